/*  model_parallel.c - a model on two ranks: the layers are cut by hand, with a send and a receive

        cc -O3 -march=native examples/model_parallel.c -o model_parallel -lm -lpthread
        ./model_parallel         2 ranks; ./model_parallel 1 trains all layers on one rank
        ./model_parallel 2 50    50 steps

        rank 0   layers 0 1   forward ───────┐                                  ┌─ backward   update
                                       activations                        gradients
        rank 1   layers 2 3                  └─ forward   loss   backward ──────┘             update

    Each rank holds only its layers: their weights, gradients and momentum. This is for a model that does not
    fit into the memory of one rank. It does not make training faster, because one rank waits while the other
    computes. The program prints the share of time that each rank waits. Micro-batches fill that time: see
    train_mlp_pipeline.c. At the end each rank also trains all layers itself, and compares the weights. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIXELS = 784, HIDDEN = 128, CLASSES = 10, LAYERS = 4, CUT = 2 }; /* rank 1 begins with layer CUT */
enum { SAMPLES = 1024, ROWS = 64 };
static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, HIDDEN, CLASSES};
static uint8_t images[SAMPLES * PIXELS], labels[SAMPLES]; /* (SAMPLES, PIXELS), (SAMPLES) */

/* Noise, and a bright stripe at the height of the label. */
static ddp_result make_data(void) {
    uint32_t random = 1;
    for (int i = 0; i < SAMPLES * PIXELS; i++) {
        random = random * 1664525 + 1013904223;
        images[i] = (uint8_t)((random >> 25) + (i % PIXELS / 56 == i / PIXELS % CLASSES + 2 ? 60 : 0));
    }
    for (int i = 0; i < SAMPLES; i++) labels[i] = (uint8_t)(i % CLASSES);
    return DDP_OK;
}

//== model ======================================================================================
typedef struct layer { /* (inputs, outputs), then the bias as one more row */
    float value[(PIXELS + 1) * HIDDEN], grad[(PIXELS + 1) * HIDDEN], momentum[(PIXELS + 1) * HIDDEN];
} layer;

typedef struct model {
    int first, end;                         /* this rank holds layers first to end - 1 */
    layer *layers[LAYERS];                  /* NULL on the other rank */
    float out[LAYERS + 1][ROWS * PIXELS];   /* (ROWS, width) each; out[0] are the pixels */
    float d_out[LAYERS + 1][ROWS * PIXELS]; /* their gradients */
    double loss, waiting;                   /* of the last step; seconds in send and receive */
} model;

static int layer_size(int l) { return (width[l] + 1) * width[l + 1]; }

/* He et al. 2015: uniform weights of variance 2 / inputs. Each layer has its own random numbers. */
static ddp_result create_model(model **out, int first, int end) {
    model *m = (model *)calloc(1, sizeof *m);
    *out = m;
    if (!m) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    m->first = first;
    m->end = end;
    for (int l = first; l < end; l++) {
        uint32_t random = (uint32_t)l + 1;
        m->layers[l] = (layer *)calloc(1, sizeof(layer));
        if (!m->layers[l]) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for layer %d", l);
        for (int k = 0; k < width[l] * width[l + 1]; k++) {
            random = random * 1664525 + 1013904223;
            m->layers[l]->value[k] = sqrtf(6.0f / (float)width[l]) * ((float)(random >> 8) / 8388608.0f - 1);
        }
    }
    return DDP_OK;
}

static void destroy_model(model *m) {
    for (int l = 0; m && l < LAYERS; l++) free(m->layers[l]);
    free(m);
}

/* out[l + 1] = relu(out[l] weight + bias); the last layer has no relu. */
static void forward_layer(model *m, int l) {
    const float *weight = m->layers[l]->value, *bias = weight + width[l] * width[l + 1];
    int inputs = width[l], outputs = width[l + 1];
    for (int b = 0; b < ROWS; b++) {
        const float *in = m->out[l] + b * inputs;
        float *out = m->out[l + 1] + b * outputs;
        for (int j = 0; j < outputs; j++) out[j] = bias[j];
        for (int i = 0; i < inputs; i++)
            for (int j = 0; j < outputs; j++) out[j] += in[i] * weight[i * outputs + j];
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) out[j] = out[j] > 0 ? out[j] : 0;
    }
}

/* From d_out[l + 1]: the gradients of weight and bias, and d_out[l]. */
static void backward_layer(model *m, int l) {
    const float *weight = m->layers[l]->value;
    float *d_weight = m->layers[l]->grad, *d_bias = d_weight + width[l] * width[l + 1];
    int inputs = width[l], outputs = width[l + 1];
    memset(d_weight, 0, sizeof(float) * (size_t)layer_size(l));
    for (int b = 0; b < ROWS; b++) {
        const float *in = m->out[l] + b * inputs, *out = m->out[l + 1] + b * outputs;
        float *d_in = m->d_out[l] + b * inputs, *d = m->d_out[l + 1] + b * outputs;
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) d[j] = out[j] > 0 ? d[j] : 0;
        for (int j = 0; j < outputs; j++) d_bias[j] += d[j];
        for (int i = 0; i < inputs; i++) {
            float sum = 0;
            for (int j = 0; j < outputs; j++) d_weight[i * outputs + j] += in[i] * d[j];
            for (int j = 0; l > 0 && j < outputs; j++) sum += weight[i * outputs + j] * d[j];
            d_in[i] = sum;
        }
    }
}

/* Returns the mean loss, and sets the gradient of the logits. */
static double cross_entropy(model *m, const uint8_t *label) {
    double loss = 0;
    for (int b = 0; b < ROWS; b++) {
        const float *logits = m->out[LAYERS] + b * CLASSES;
        float *d_logits = m->d_out[LAYERS] + b * CLASSES, max = logits[0], sum = 0;
        for (int j = 1; j < CLASSES; j++) max = logits[j] > max ? logits[j] : max;
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++)
            d_logits[j] = (expf(logits[j] - max) / sum - (j == label[b])) / ROWS;
        loss += (double)(logf(sum) + max - logits[label[b]]) / ROWS;
    }
    return loss;
}

/* SGD with momentum. */
static void update_layer(layer *l, int count) {
    for (int i = 0; i < count; i++) {
        l->momentum[i] = 0.9f * l->momentum[i] + l->grad[i];
        l->value[i] -= 0.01f * l->momentum[i];
    }
}

//== training ===================================================================================
/* One step. The output of layer CUT - 1 crosses the cut, and its gradient comes back. With all layers on one
   rank nothing is sent, and world is not used. */
static ddp_result train_step(ddp_group *world, model *m, int step) {
    const size_t count = ROWS * HIDDEN;
    int row = step * ROWS % SAMPLES;
    double start = ddp_now();
    if (m->first > 0) DDP_TRY(ddp_recv(world, m->out[CUT], count, DDP_F32, 0, 0, NULL));
    m->waiting += ddp_now() - start;
    for (int i = 0; m->first == 0 && i < ROWS * PIXELS; i++)
        m->out[0][i] = (float)images[row * PIXELS + i] / 128 - 0.5f;
    for (int l = m->first; l < m->end; l++) forward_layer(m, l);
    start = ddp_now();
    if (m->end < LAYERS) {
        DDP_TRY(ddp_send(world, m->out[CUT], count, DDP_F32, 1, 0, NULL));
        DDP_TRY(ddp_recv(world, m->d_out[CUT], count, DDP_F32, 1, 0, NULL));
    }
    m->waiting += ddp_now() - start;
    if (m->end == LAYERS) m->loss = cross_entropy(m, labels + row);
    for (int l = m->end - 1; l >= m->first; l--) backward_layer(m, l);
    start = ddp_now();
    if (m->first > 0) DDP_TRY(ddp_send(world, m->d_out[CUT], count, DDP_F32, 0, 0, NULL));
    m->waiting += ddp_now() - start;
    for (int l = m->first; l < m->end; l++) update_layer(m->layers[l], layer_size(l));
    return DDP_OK;
}

/* Collects the layers of both ranks in `all`, on each rank: it sends its own layers and receives the others.
   Without the batch both ranks could wait in ddp_send for the receive of the other one. */
static ddp_result exchange_layers(ddp_group *world, const model *m, model *all) {
    int other = 1 - ddp_rank(world);
    DDP_TRY(ddp_p2p_begin(world));
    for (int l = 0; l < LAYERS; l++) {
        size_t count = (size_t)layer_size(l);
        float *value = all->layers[l]->value;
        if (!m->layers[l]) DDP_TRY(ddp_recv(world, value, count, DDP_F32, other, l, NULL));
        if (!m->layers[l]) continue;
        memcpy(value, m->layers[l]->value, count * sizeof(float));
        if (ddp_world_size(world) == 2) DDP_TRY(ddp_send(world, value, count, DDP_F32, other, l, NULL));
    }
    return ddp_p2p_end(world);
}

static uint64_t hash_weights(const model *m) {
    uint64_t hash = 14695981039346656037u;
    for (int l = 0; l < LAYERS; l++)
        for (size_t k = 0; k < (size_t)layer_size(l) * sizeof(float); k++)
            hash = (hash ^ ((const uint8_t *)m->layers[l]->value)[k]) * 1099511628211u;
    return hash;
}

/* Rank 0, on a terminal: one line, which the next one overwrites. */
static void print_progress(int rank, int step, int steps) {
    if (rank > 0 || step % 10 || !isatty(STDOUT_FILENO)) return;
    printf("step %d/%d \r", step, steps);
    fflush(stdout);
}

/* m: this rank's layers. all: all layers, to compare with. */
static ddp_result train(ddp_group *world, int steps, model *m, model *all) {
    int ranks = ddp_world_size(world), rank = ddp_rank(world);
    double first = 0, start = ddp_now(), share, shares[2];
    for (int step = 0; step < steps; step++) {
        DDP_TRY(train_step(world, m, step));
        if (step == 0) first = m->loss;
        print_progress(rank, step, 2 * steps);
    }
    share = 100 * m->waiting / (ddp_now() - start);
    DDP_TRY(ddp_all_gather(world, &share, shares, 1, DDP_F64, NULL));
    for (int r = 0; rank == 0 && r < ranks; r++) printf("rank %d waits %.0f%% of the time\n", r, shares[r]);
    if (rank == ranks - 1 && !(m->loss < first))
        return ddp_fail(DDP_ERR_CORRUPT, "the loss went from %.4f to %.4f", first, m->loss);

    for (int step = 0; step < steps; step++) { /* all layers */
        DDP_TRY(train_step(NULL, all, step));
        print_progress(rank, steps + step, 2 * steps);
    }
    unsigned long long expected = hash_weights(all);
    DDP_TRY(exchange_layers(world, m, all));
    unsigned long long hash = hash_weights(all);
    if (rank == 0) printf("loss %.4f, weights %016llx\n", all->loss, hash);
    if (hash == expected) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "weights %016llx, but %016llx on one rank: check the cut", hash,
                    expected);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world), rank = ddp_rank(world);
    model *m = NULL, *all = NULL;
    if (ranks > 2) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1 or 2", ranks);
    int first = rank == 0 ? 0 : CUT;
    int end = rank == ranks - 1 ? LAYERS : CUT;
    ddp_result result = create_model(&m, first, end);
    if (result == DDP_OK) result = create_model(&all, 0, LAYERS);
    if (result == DDP_OK) result = train(world, *(const int *)user, m, all);
    destroy_model(m);
    destroy_model(all);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    int steps = argc > 2 ? atoi(argv[2]) : 200;
    ddp_result result = make_data();
    if (argc > 3 || desc.world_size < 1 || steps < 2 || steps > 1000000)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [steps]], 2 to 1000000 steps", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &steps);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

/*  dp_vs_ddp.c - data parallelism in which rank 0 owns the model (DataParallel) next to DDP

        cc -O3 -march=native examples/dp_vs_ddp.c -o dp_vs_ddp -lm -lpthread
        ./dp_vs_ddp                  on 1, then on 2, then on 4 ranks: a line of the table for each
        ./dp_vs_ddp 2 8              on 2, then on 8 ranks
        mpirun --oversubscribe -n 8 ./dp_vs_ddp 8    on the ranks of a launcher

    DataParallel, as in torch.nn.DataParallel: rank 0 has the batch, the weights and the optimizer. The other
    ranks only compute gradients, and wait for rank 0 before and after that:

        rank 0   scatter rows   broadcast weights   backward   gather gradients   add   update
        rank 1   its rows       a copy              backward   send               wait  wait

    DDP (Li et al. 2020): each rank has its rows, the weights and the optimizer. Gradients are averaged bucket
    by bucket while backward still runs:

        rank r   backward and all_reduce   update

    Both end with the same weights, bit for bit. Times are the fastest of three measurements. Bytes are those
    that rank 0 sends and receives in a step, counted from the calls: an all_reduce of n bytes sends and
    receives 2 n (ranks - 1) / ranks. Memory is that which the program allocates on rank 0. PyTorch's
    DataParallel adds gradients while it collects them, and does not need memory for all of them. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIXELS = 784, HIDDEN = 128, CLASSES = 10, LAYERS = 4, PARAMS = 2 * LAYERS, BATCH = 32 };
enum { STEPS = 30, BLOCK = 10 }; /* times are measured over BLOCK steps */
static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, HIDDEN, CLASSES};
static uint8_t images[BATCH * PIXELS], labels[BATCH]; /* one batch, for every step */

/* Noise, and a bright stripe at the height of the label. */
static ddp_result make_data(void) {
    uint32_t random = 1;
    for (int i = 0; i < BATCH * PIXELS; i++) {
        random = random * 1664525 + 1013904223;
        images[i] = (uint8_t)((random >> 25) + (i % PIXELS / 56 == i / PIXELS % CLASSES + 2 ? 60 : 0));
    }
    for (int i = 0; i < BATCH; i++) labels[i] = (uint8_t)(i % CLASSES);
    return DDP_OK;
}

//== model ======================================================================================
typedef struct trainer {
    ddp_group *world;
    int rows;                 /* that this rank computes */
    size_t count;             /* parameters */
    ddp_param params[PARAMS]; /* of layer l: 2l weight (width[l], width[l + 1]), 2l + 1 bias */
    float *weights;           /* (count), the values of all params */
    float *grads;             /* (count); DDP: NULL, the reducer allocates them */
    float *momentum;          /* (count); NULL on ranks that do not update */
    float *all_grads;         /* (ranks, count) on rank 0 of DataParallel */
    uint8_t *pixels, *labels; /* (rows, PIXELS), (rows) */
    float *out[LAYERS + 1];   /* (rows, width) each; out[0] are the pixels */
    float *d_out[LAYERS + 1];
    ddp_reducer *reducer; /* DDP */
    void *memory[32];
    int memory_count;
    size_t bytes; /* allocated */
} trainer;

static void *allocate(trainer *t, size_t size_bytes) {
    void *memory = calloc(1, size_bytes);
    t->memory[t->memory_count++] = memory;
    t->bytes += size_bytes;
    return memory;
}

/* out[l + 1] = relu(out[l] weight + bias); the last layer has no relu. */
static void forward_layer(trainer *t, int l) {
    const float *weight = (const float *)t->params[2 * l].value.data;
    const float *bias = (const float *)t->params[2 * l + 1].value.data;
    int inputs = width[l], outputs = width[l + 1];
    for (int b = 0; b < t->rows; b++) {
        const float *in = t->out[l] + b * inputs;
        float *out = t->out[l + 1] + b * outputs;
        for (int j = 0; j < outputs; j++) out[j] = bias[j];
        for (int i = 0; i < inputs; i++)
            for (int j = 0; j < outputs; j++) out[j] += in[i] * weight[i * outputs + j];
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) out[j] = out[j] > 0 ? out[j] : 0;
    }
}

/* From d_out[l + 1]: the gradients of weight and bias, and d_out[l]. */
static void backward_layer(trainer *t, int l) {
    const float *weight = (const float *)t->params[2 * l].value.data;
    float *d_weight = (float *)t->params[2 * l].grad.data, *d_bias = (float *)t->params[2 * l + 1].grad.data;
    int inputs = width[l], outputs = width[l + 1];
    memset(d_weight, 0, sizeof(float) * (size_t)(inputs * outputs));
    memset(d_bias, 0, sizeof(float) * (size_t)outputs);
    for (int b = 0; b < t->rows; b++) {
        const float *in = t->out[l] + b * inputs, *out = t->out[l + 1] + b * outputs;
        float *d_in = t->d_out[l] + b * inputs, *d = t->d_out[l + 1] + b * outputs;
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

/* Returns the mean loss of this rank's rows, and sets the gradient of the logits. */
static float cross_entropy(trainer *t) {
    float loss = 0;
    for (int b = 0; b < t->rows; b++) {
        const float *logits = t->out[LAYERS] + b * CLASSES;
        float *d_logits = t->d_out[LAYERS] + b * CLASSES, max = logits[0], sum = 0, rows = (float)t->rows;
        int label = t->labels[b];
        for (int j = 1; j < CLASSES; j++) max = logits[j] > max ? logits[j] : max;
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++) d_logits[j] = (expf(logits[j] - max) / sum - (j == label)) / rows;
        loss += (logf(sum) + max - logits[label]) / rows;
    }
    return loss;
}

/* Forward and backward. With DDP a bucket of gradients is sent as soon as it is ready. */
static ddp_result compute(trainer *t, float *loss) {
    for (int i = 0; i < t->rows * PIXELS; i++) t->out[0][i] = (float)t->pixels[i] / 128 - 0.5f;
    for (int l = 0; l < LAYERS; l++) forward_layer(t, l);
    *loss = cross_entropy(t);
    for (int l = LAYERS - 1; l >= 0; l--) {
        backward_layer(t, l);
        if (t->reducer) DDP_TRY(ddp_reducer_ready(t->reducer, 2 * l + 1));
        if (t->reducer) DDP_TRY(ddp_reducer_ready(t->reducer, 2 * l));
    }
    return DDP_OK;
}

/* SGD with momentum on some of the weights. */
static void update(trainer *t, const float *grad, size_t first, size_t count) {
    float *weight = t->weights + first, *momentum = t->momentum + first;
    for (size_t i = 0; i < count; i++) {
        momentum[i] = 0.9f * momentum[i] + grad[i];
        weight[i] -= 0.01f * momentum[i];
    }
}

//== the two strategies =========================================================================
/* All weights, rows and gradients pass through rank 0. */
static ddp_result step_dp(trainer *t, float *loss) {
    int ranks = ddp_world_size(t->world);
    size_t rows = (size_t)t->rows;
    DDP_TRY(ddp_scatter(t->world, images, t->pixels, rows * PIXELS, DDP_U8, 0, NULL));
    DDP_TRY(ddp_scatter(t->world, labels, t->labels, rows, DDP_U8, 0, NULL));
    DDP_TRY(ddp_broadcast(t->world, t->weights, t->count, DDP_F32, 0, NULL));
    DDP_TRY(compute(t, loss));
    DDP_TRY(ddp_gather(t->world, t->grads, t->all_grads, t->count, DDP_F32, 0, NULL));
    if (ddp_rank(t->world) > 0) return DDP_OK;
    /* The binary tree in which DDP adds: (r0 + r1) + (r2 + r3) */
    for (int distance = 1; distance < ranks; distance *= 2)
        for (int r = 0; r + distance < ranks; r += 2 * distance) {
            float *sum = t->all_grads + (size_t)r * t->count, *other = sum + (size_t)distance * t->count;
            for (size_t i = 0; i < t->count; i++) sum[i] += other[i];
        }
    for (size_t i = 0; i < t->count; i++) t->all_grads[i] /= (float)ranks;
    update(t, t->all_grads, 0, t->count);
    return DDP_OK;
}

/* Every rank updates its own weights with the same gradients. */
static ddp_result step_ddp(trainer *t, float *loss) {
    DDP_TRY(compute(t, loss));
    DDP_TRY(ddp_reducer_wait(t->reducer));
    for (int i = 0; i < PARAMS; i++) {
        size_t first = (size_t)((float *)t->params[i].value.data - t->weights);
        update(t, (const float *)t->params[i].grad.data, first,
               (size_t)ddp_tensor_count(&t->params[i].value));
    }
    return DDP_OK;
}

/* He et al. 2015: uniform weights of variance 2 / inputs. */
static ddp_result create_trainer(trainer *t, ddp_group *world, int is_ddp) {
    int ranks = ddp_world_size(world), is_root = ddp_rank(world) == 0;
    uint32_t random = 1;
    size_t at = 0;
    *t = (trainer){.world = world, .rows = BATCH / ranks};
    for (int l = 0; l < LAYERS; l++) t->count += (size_t)((width[l] + 1) * width[l + 1]);
    size_t rows = (size_t)t->rows, bytes = t->count * sizeof(float);
    t->weights = (float *)allocate(t, bytes);
    t->grads = is_ddp ? NULL : (float *)allocate(t, bytes);
    t->momentum = is_ddp || is_root ? (float *)allocate(t, bytes) : NULL;
    t->all_grads = !is_ddp && is_root ? (float *)allocate(t, (size_t)ranks * bytes) : NULL;
    t->pixels = (uint8_t *)allocate(t, rows * PIXELS);
    t->labels = (uint8_t *)allocate(t, rows);
    for (int l = 0; l <= LAYERS; l++) {
        t->out[l] = (float *)allocate(t, rows * (size_t)width[l] * sizeof(float));
        t->d_out[l] = (float *)allocate(t, rows * (size_t)width[l] * sizeof(float));
    }
    for (int i = 0; i < t->memory_count; i++)
        if (!t->memory[i]) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    for (int i = 0; i < PARAMS; i++) {
        int inputs = i % 2 ? 1 : width[i / 2], outputs = width[i / 2 + 1];
        t->params[i] = (ddp_param){.name = i % 2 ? "bias" : "weight"};
        t->params[i].value = (ddp_tensor){t->weights + at, DDP_F32, 2, {inputs, outputs}};
        t->params[i].grad.data = is_ddp ? NULL : t->grads + at;
        for (int k = 0; i % 2 == 0 && k < inputs * outputs; k++) {
            random = random * 1664525 + 1013904223;
            t->weights[at + (size_t)k] = sqrtf(6.0f / (float)inputs)
                                         * ((float)(random >> 8) / 8388608.0f - 1);
        }
        at += (size_t)(inputs * outputs);
    }
    if (!is_ddp) return DDP_OK;
    memcpy(t->pixels, images + ddp_rank(world) * t->rows * PIXELS, rows * PIXELS);
    memcpy(t->labels, labels + ddp_rank(world) * t->rows, rows);
    t->bytes += bytes; /* gradients */
    ddp_reducer_desc desc = {.params = t->params, .param_count = PARAMS};
    return ddp_reducer_create(&t->reducer, world, &desc);
}

/* The entries of a strategy in the table. */
typedef struct measurement {
    double ms, moved_mb, memory_mb; /* of a step; through rank 0 in a step; on rank 0 */
    uint64_t hash;                  /* of the weights */
} measurement;

static ddp_result measure(trainer *t, int is_ddp, measurement *m) {
    double start = 0, seconds, fastest = 1e9, ranks = ddp_world_size(t->world), bytes = 4 * (double)t->count;
    float loss = 0, first = 0, mean = 0;
    for (int step = -2; step < STEPS; step++) { /* two to warm up */
        if (step >= 0 && step % BLOCK == 0) start = ddp_now();
        DDP_TRY(is_ddp ? step_ddp(t, &loss) : step_dp(t, &loss));
        seconds = ddp_now() - start;
        if (step % BLOCK == BLOCK - 1 && seconds < fastest) fastest = seconds;
        if (step == -2) DDP_TRY(ddp_reduce(t->world, &loss, &first, 1, DDP_F32, DDP_OP_AVG, 0, NULL));
    }
    DDP_TRY(ddp_reduce(t->world, &loss, &mean, 1, DDP_F32, DDP_OP_AVG, 0, NULL));
    m->ms = 1e3 * fastest / BLOCK;
    m->moved_mb = 1e-6 * 4 * bytes * (ranks - 1) / ranks;
    if (!is_ddp) m->moved_mb = 1e-6 * (ranks - 1) * (2 * bytes + t->rows * (PIXELS + 1));
    m->memory_mb = 1e-6 * (double)t->bytes;
    m->hash = 14695981039346656037u;
    for (size_t k = 0; k < t->count * sizeof(float); k++)
        m->hash = (m->hash ^ ((const uint8_t *)t->weights)[k]) * 1099511628211u;
    if (ddp_rank(t->world) > 0 || mean < first / 2) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "the loss went from %.4f to %.4f: it must halve", first, mean);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world), is_first = *(const int *)user;
    measurement m[2] = {0}; /* DataParallel, DDP */
    if (BATCH % ranks) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2, 4, 8, 16 or 32", ranks);
    for (int is_ddp = 0; is_ddp < 2; is_ddp++) {
        trainer t;
        ddp_result result = create_trainer(&t, world, is_ddp);
        if (result == DDP_OK) result = measure(&t, is_ddp, &m[is_ddp]);
        ddp_reducer_destroy(t.reducer);
        for (int i = 0; i < t.memory_count; i++) free(t.memory[i]);
        DDP_TRY(result);
    }
    if (ddp_rank(world) > 0) return DDP_OK; /* with DataParallel it lacks the last update */
    if (m[0].hash != m[1].hash)
        return ddp_fail(DDP_ERR_CORRUPT, "on %d ranks DataParallel and DDP end with other weights", ranks);
    if (is_first)
        printf("           ms per step    MB through rank 0       MB on rank 0\n"
               "ranks       DP     DDP         DP       DDP         DP     DDP   weights\n");
    printf("%5d %8.2f %7.2f %10.2f %9.2f %10.2f %7.2f   %016llx\n", ranks, m[0].ms, m[1].ms, m[0].moved_mb,
           m[1].moved_mb, m[0].memory_mb, m[1].memory_mb, (unsigned long long)m[0].hash);
    return DDP_OK;
}

int main(int argc, char **argv) {
    int ranks[64] = {1, 2, 4};
    int count = argc > 1 ? argc - 1 : 3;
    ddp_result result = make_data();
    if (argc > 64) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks ...]", argv[0]);
    for (int i = 0; i < count && result == DDP_OK; i++) {
        if (argc > 1) ranks[i] = atoi(argv[i + 1]);
        if (ranks[i] < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks ...]", argv[0]);
    }
    for (int i = 0; i < count && result == DDP_OK; i++) {
        ddp_launch_desc desc = {.world_size = ranks[i]};
        int is_first = i == 0;
        result = ddp_launch(&desc, rank_main, &is_first);
    }
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

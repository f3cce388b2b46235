/*  large_batch.c - large batches: linear scaling of the learning rate with warm-up, and LARS

        cc -O3 -march=native examples/large_batch.c -o large_batch -lm -lpthread
        ./large_batch           2 ranks; a synthetic data set
        ./large_batch 4 data    4 ranks, and a folder with the files of Fashion-MNIST, as for train_mlp.c

    More ranks mean larger batches, and fewer steps per epoch. Five recipes train the same model for the same
    number of epochs. With 16 times the batch and an unchanged learning rate, the model learns too little.
    Goyal et al. 2017 multiply the rate by 16, and start with a warm-up. LARS (You et al. 2017) also scales
    the rate of each matrix by the ratio of its norm and that of its gradient: every matrix changes by the
    same share of its norm. The table shows the smallest and the largest share in the first step. Both
    recipes come close to the small batch. Without a warm-up, this small model learns as well; deep ones
    often diverge. 1, 2 and 4 ranks end with the same bits: the last line prints a hash of all weights. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_optimizer, ddp_lr_at */
#include "extras/mnist.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An input is the mean of 4 x 4 pixels. */
enum { PIXELS = 784, INPUTS = PIXELS / 16, HIDDEN = 32, CLASSES = 10, LAYERS = 3, PARAMS = 2 * LAYERS };
enum { MICRO = 8, BASE_BATCH = 4 * MICRO, LARGE_BATCH = 16 * BASE_BATCH };
enum { TRAIN = 4096, TEST = 2048, EPOCHS = 8 }; /* samples for training, and after them for the test */
enum { SMALL, UNCHANGED, SCALED, WARM_UP, LARS, RECIPES };
static const int width[LAYERS + 1] = {INPUTS, HIDDEN, HIDDEN, CLASSES};
static const float trust_coefficient = 0.1f; /* of LARS */

typedef struct recipe {
    const char *name;
    int batch, base_batch; /* base_batch 0 = the rate is max_lr; otherwise max_lr * batch / base_batch */
    double max_lr;
    int warmup_epochs;
    ddp_optimizer_kind kind;
} recipe;

static const recipe recipes[RECIPES] = {
    {"SGD", BASE_BATCH, 0, 0.02, 0, DDP_OPTIMIZER_SGD},
    {"SGD, unchanged rate", LARGE_BATCH, 0, 0.02, 0, DDP_OPTIMIZER_SGD},
    {"SGD, 16 times the rate", LARGE_BATCH, BASE_BATCH, 0.02, 0, DDP_OPTIMIZER_SGD},
    {"SGD, 16 times, warm-up", LARGE_BATCH, BASE_BATCH, 0.02, 1, DDP_OPTIMIZER_SGD},
    {"LARS, warm-up", LARGE_BATCH, BASE_BATCH, 0.02, 1, DDP_OPTIMIZER_LARS},
};

static mnist data; /* images NULL = synthetic samples */

typedef struct trainer {
    ddp_group *world;
    int micro_batches;        /* of this rank in a step */
    ddp_param params[PARAMS]; /* of layer l: 2l weight (width[l], width[l + 1]), 2l + 1 bias */
    float value[PARAMS][INPUTS * HIDDEN], old[PARAMS][INPUTS * HIDDEN]; /* old: before the first step */
    float out[LAYERS + 1][MICRO * INPUTS]; /* (MICRO, width) each; out[0] are the inputs */
    float d_out[LAYERS + 1][MICRO * INPUTS];
    int label[MICRO];
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_optimizer *optimizer;
    ddp_sampler sampler;
    ddp_mean accuracy;
    double min_share, max_share, lars_share; /* of a matrix: |change| / |values| in the first step */
} trainer;

static float uniform(uint32_t *random) { /* -1 to 1 */
    *random = *random * 1664525 + 1013904223;
    return (float)(*random >> 8) / 8388608.0f - 1;
}

/* Row b of the micro-batch. The label of noise is the answer of a fixed network with random weights. */
static void make_sample(trainer *t, int b, int64_t index) {
    uint32_t random = (uint32_t)index * 2654435761u, weights = 1;
    float *in = t->out[0] + b * INPUTS, answer[CLASSES] = {0};
    if (data.images) {
        for (int i = 0; i < INPUTS; i++) in[i] = -0.5f;
        for (int i = 0; i < PIXELS; i++)
            in[i / 112 * 7 + i % 28 / 4] += (float)data.images[index * PIXELS + i] / (16 * 128);
        t->label[b] = data.labels[index];
        return;
    }
    for (int i = 0; i < INPUTS; i++) in[i] = uniform(&random);
    for (int h = 0; h < 8; h++) {
        float sum = 0;
        for (int i = 0; i < INPUTS; i++) sum += in[i] * uniform(&weights);
        for (int j = 0; j < CLASSES; j++) answer[j] += tanhf(2 * sum) * uniform(&weights);
    }
    t->label[b] = 0;
    for (int j = 1; j < CLASSES; j++)
        if (answer[j] > answer[t->label[b]]) t->label[b] = j;
}

/* out[l + 1] = relu(out[l] weight + bias); the last layer has no relu. */
static void forward_layer(trainer *t, int l) {
    int inputs = width[l], outputs = width[l + 1];
    for (int b = 0; b < MICRO; b++) {
        const float *in = t->out[l] + b * inputs;
        float *out = t->out[l + 1] + b * outputs;
        memcpy(out, t->value[2 * l + 1], sizeof(float) * (size_t)outputs);
        for (int i = 0; i < inputs; i++) {
            const float *weight = t->value[2 * l] + i * outputs;
            for (int j = 0; j < outputs; j++) out[j] += in[i] * weight[j];
        }
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) out[j] = out[j] > 0 ? out[j] : 0;
    }
}

/* From d_out[l + 1]: the gradients of weight and bias, and d_out[l]. */
static void backward_layer(trainer *t, int l) {
    float *d_weight = (float *)t->params[2 * l].grad.data, *d_bias = (float *)t->params[2 * l + 1].grad.data;
    int inputs = width[l], outputs = width[l + 1];
    memset(d_weight, 0, sizeof(float) * (size_t)(inputs * outputs));
    memset(d_bias, 0, sizeof(float) * (size_t)outputs);
    for (int b = 0; b < MICRO; b++) {
        const float *in = t->out[l] + b * inputs, *out = t->out[l + 1] + b * outputs;
        float *d_in = t->d_out[l] + b * inputs, *d = t->d_out[l + 1] + b * outputs;
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) d[j] = out[j] > 0 ? d[j] : 0;
        for (int j = 0; j < outputs; j++) d_bias[j] += d[j];
        for (int i = 0; i < inputs; i++) {
            const float *weight = t->value[2 * l] + i * outputs;
            float *d_row = d_weight + i * outputs, sum = 0;
            for (int j = 0; j < outputs; j++) d_row[j] += in[i] * d[j];
            for (int j = 0; j < outputs; j++) sum += weight[j] * d[j];
            d_in[i] = sum;
        }
    }
}

/* Runs the model. Adds to the accuracy, and sets the gradient of the mean loss of the micro-batch. */
static void forward(trainer *t) {
    for (int l = 0; l < LAYERS; l++) forward_layer(t, l);
    for (int b = 0; b < MICRO; b++) {
        const float *logits = t->out[LAYERS] + b * CLASSES;
        float *d_logits = t->d_out[LAYERS] + b * CLASSES, max = logits[0], sum = 0;
        for (int j = 1; j < CLASSES; j++) max = fmaxf(max, logits[j]);
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++)
            d_logits[j] = (expf(logits[j] - max) / sum - (float)(j == t->label[b])) / MICRO;
        ddp_mean_add(&t->accuracy, logits[t->label[b]] == max, 1);
    }
}

static ddp_result create(trainer *t, const recipe *r) {
    static const char *const names[PARAMS] = {"w0", "b0", "w1", "b1", "w2", "b2"};
    int ranks = ddp_world_size(t->world), count = r->batch / MICRO / ranks;
    uint32_t random = 2;
    for (int i = 0; i < PARAMS; i++) { /* He et al. 2015: uniform weights of variance 2 / inputs */
        int rows = i % 2 ? 1 : width[i / 2], columns = width[i / 2 + 1];
        t->params[i] = (ddp_param){.name = names[i], .value = {t->value[i], DDP_F32, 2, {rows, columns}}};
        if (i % 2) t->params[i].value = (ddp_tensor){t->value[i], DDP_F32, 1, {columns}};
        for (int k = 0; i % 2 == 0 && k < rows * columns; k++)
            t->value[i][k] = sqrtf(6.0f / (float)rows) * uniform(&random);
    }
    t->micro_batches = count;
    ddp_reducer_desc reducer = {.params = t->params, .param_count = PARAMS, .micro_batch_count = count};
    DDP_TRY(ddp_reducer_create(&t->reducer, t->world, &reducer));
    ddp_accumulator_desc accumulator = {t->params, PARAMS, count, t->reducer};
    DDP_TRY(ddp_accumulator_create(&t->accumulator, t->world, &accumulator));
    ddp_optimizer_desc optimizer = {.kind = r->kind,
                                    .params = t->params,
                                    .param_count = PARAMS,
                                    .momentum = 0.9f,
                                    .trust_coefficient = trust_coefficient,
                                    .weight_decay = 1e-4f,
                                    .decay_matrices_only = 1}; /* biases: no decay, and no ratio in LARS */
    DDP_TRY(ddp_optimizer_create(&t->optimizer, t->world, &optimizer));
    ddp_sampler_desc sampler = {TRAIN, .num_replicas = ranks, .rank = ddp_rank(t->world),
                                .global_batch = r->batch};
    return ddp_sampler_init(&t->sampler, &sampler);
}

/* One step. Every rank has a block of micro-batches: the sum does not depend on the number of ranks. */
static ddp_result train_step(trainer *t, float lr) {
    for (int m = 0; m < t->micro_batches; m++) {
        for (int b = 0; b < MICRO; b++) make_sample(t, b, ddp_sampler_next(&t->sampler, NULL));
        forward(t);
        for (int l = LAYERS - 1; l >= 0; l--) {
            backward_layer(t, l);
            DDP_TRY(ddp_accumulator_ready(t->accumulator, 2 * l + 1));
            DDP_TRY(ddp_accumulator_ready(t->accumulator, 2 * l));
        }
        DDP_TRY(ddp_accumulator_next(t->accumulator, NULL));
    }
    DDP_TRY(ddp_reducer_wait(t->reducer));
    return ddp_optimizer_step(t->optimizer, lr);
}

/* After the first step: how much each matrix has changed. */
static void measure_first_step(trainer *t, float lr) {
    t->lars_share = lr * trust_coefficient; /* without the momentum of later steps */
    for (int l = 0; l < LAYERS; l++) {
        double change = 0, norm = 0; /* their squares */
        for (int k = 0; k < width[l] * width[l + 1]; k++) {
            double old = t->old[2 * l][k], difference = t->value[2 * l][k] - old;
            change += difference * difference;
            norm += old * old;
        }
        t->min_share = fmin(t->min_share, sqrt(change / norm));
        t->max_share = fmax(t->max_share, sqrt(change / norm));
    }
}

static ddp_result train(trainer *t, const recipe *r) {
    int steps = TRAIN / r->batch; /* of an epoch */
    ddp_lr_desc lr = {.kind = DDP_LR_COSINE,
                      .max_lr = r->max_lr,
                      .batch = r->batch,
                      .base_batch = r->base_batch ? r->base_batch : r->batch,
                      .warmup_steps = r->warmup_epochs * steps,
                      .total_steps = EPOCHS * steps};
    DDP_TRY(create(t, r));
    memcpy(t->old, t->value, sizeof t->old);
    for (int step = 0; step < EPOCHS * steps; step++) {
        if (step % steps == 0) ddp_sampler_set_epoch(&t->sampler, (uint64_t)(step / steps));
        DDP_TRY(train_step(t, ddp_lr_at(&lr, step + 1)));
        if (step == 0) measure_first_step(t, ddp_lr_at(&lr, 1));
    }
    t->accuracy = (ddp_mean){0};
    for (int i = ddp_rank(t->world); i < TEST / MICRO; i += ddp_world_size(t->world)) {
        for (int b = 0; b < MICRO; b++) make_sample(t, b, TRAIN + i * MICRO + b);
        forward(t);
    }
    return ddp_mean_reduce(t->world, &t->accuracy);
}

static ddp_result run(trainer *t, ddp_group *world, const recipe *r, uint64_t *hash) {
    *t = (trainer){.world = world, .min_share = INFINITY};
    ddp_result result = train(t, r);
    for (size_t k = 0; k < sizeof t->value; k++) /* FNV-1a; the unused rows are zero */
        *hash = (*hash ^ ((const uint8_t *)t->value)[k]) * 1099511628211u;
    ddp_sampler_free(&t->sampler);
    ddp_optimizer_destroy(t->optimizer);
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    return result;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    static trainer t;
    double accuracy[RECIPES]; /* percent */
    uint64_t hash = 14695981039346656037u;
    int ranks = ddp_world_size(world);
    if (user || BASE_BATCH / MICRO % ranks)
        return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2 or 4", ranks);
    if (ddp_rank(world) == 0) printf("recipe                  batch  steps  first step          accuracy\n");
    for (int i = 0; i < RECIPES; i++) {
        DDP_TRY(run(&t, world, &recipes[i], &hash));
        accuracy[i] = 100 * ddp_mean_value(&t.accuracy);
        if (ddp_rank(world) == 0)
            printf("%-22s  %5d  %5d  %.3f%% to %.3f%%  %7.2f%%\n", recipes[i].name, recipes[i].batch,
                   EPOCHS * TRAIN / recipes[i].batch, 100 * t.min_share, 100 * t.max_share, accuracy[i]);
        fflush(stdout);
    }
    /* t is that of LARS, where the weight decay changes the shares a little. */
    if (t.min_share < 0.99 * t.lars_share || t.max_share > 1.01 * t.lars_share)
        return ddp_fail(DDP_ERR_CORRUPT, "LARS changes a matrix by another share: check the optimizer");
    /* over six seeds, UNCHANGED loses at least 14.7 points; WARM_UP and LARS lose at most a third of that */
    double half = (accuracy[SMALL] + accuracy[UNCHANGED]) / 2;
    if (accuracy[UNCHANGED] > accuracy[SMALL] - 10)
        return ddp_fail(DDP_ERR_CORRUPT, "the unchanged rate is as good: check the steps per epoch");
    if (accuracy[WARM_UP] < half || accuracy[LARS] < half)
        return ddp_fail(DDP_ERR_CORRUPT, "a large batch learns less than a small one: check the rates");
    if (ddp_rank(world) == 0) printf("weights %016llx\n", (unsigned long long)hash);
    return DDP_OK;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [folder]]", argv[0]);
    if (desc.world_size >= 1 && argc <= 3) result = argc > 2 ? mnist_open(argv[2], &data, NULL) : DDP_OK;
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

/*  amp.c - mixed precision: 16-bit weights and activations, f32 master weights, loss scaling, recompute

        cc -O3 -march=native examples/amp.c -o amp -lm -lpthread
        ./amp                   2 ranks; ./amp 4 has 4 ranks

    Trains one model in f32, bf16, f16, and f16 with a loss scaler (Micikevicius et al. 2018). Weights,
    activations and gradients are stored in the 16-bit dtype. Products and sums are f32, as in tensor cores.
    FSDP keeps f32 master weights, and adds gradients over micro-batches and ranks in f32. Small gradients
    round to zero in f16: the table shows how many. This small model learns all the same. The scaler
    multiplies the loss before backward. After an overflow it skips the step and halves the scale.
    Each mode also runs with recompute (Chen et al. 2016): only the input of each block is stored, and
    backward runs the block's forward again. The hash at the end is the same on 1, 2 and 4 ranks. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The model: BLOCKS times x = x + relu(x W1) W2. The first CLASSES columns of the last x are the logits. */
enum { WIDTH = 16, INNER = 64, CLASSES = 8, BLOCKS = 4, PARAMS = 2 * BLOCKS };
enum { MICRO = 16, BATCH = 4 * MICRO, TEST = 512, STEPS = 64 };

typedef struct mode {
    const char *name;
    ddp_dtype dtype; /* of weights, activations and gradients */
    int scaled;      /* 1 = with a scaler */
} mode;

typedef struct trainer {
    ddp_group *world;
    mode mode;
    int recompute, skipped;        /* skipped steps */
    ddp_fsdp_param params[PARAMS]; /* 2b W1 (WIDTH, INNER), 2b + 1 W2 (INNER, WIDTH) of block b */
    ddp_fsdp_unit_desc units[BLOCKS];
    ddp_fsdp *fsdp;
    ddp_scaler scaler;
    char *activations;    /* in the mode's dtype: x and hidden */
    void *x[BLOCKS + 1];  /* the input of each block (MICRO, WIDTH) */
    void *hidden[BLOCKS]; /* relu(x W1) of each block (MICRO, INNER); with recompute all in one buffer */
    float d_x[MICRO * WIDTH], d_hidden[MICRO * INNER]; /* their gradients, in the mode's dtype */
    ddp_mean lost;     /* of the gradients that are not zero in f32: the share that is stored as zero */
    ddp_mean accuracy; /* on the test set */
    int label[MICRO];
    size_t activation_bytes;
    uint64_t hash;
    /* f32 copies for one layer; a GPU has them in registers */
    float in[MICRO * INNER], out[MICRO * INNER], d_in[MICRO * INNER], d_out[MICRO * INNER];
    float weight[WIDTH * INNER], d_weight[WIDTH * INNER], stored[WIDTH * INNER];
} trainer;

static void load(trainer *t, float *out, const void *stored, int count) {
    ddp_device_cpu()->cast(out, DDP_F32, stored, t->mode.dtype, (size_t)count);
}

/* Rounds to the nearest number of the mode's dtype. f16 stores 65520 and more as infinity. */
static void store(trainer *t, void *stored, const float *in, int count) {
    ddp_device_cpu()->cast(stored, t->mode.dtype, in, DDP_F32, (size_t)count);
}

/* Stores gradients, and counts those that round to zero. */
static void store_grad(trainer *t, void *stored, const float *in, int count) {
    int nonzero = 0, lost = 0;
    store(t, stored, in, count);
    load(t, t->stored, stored, count);
    for (int i = 0; i < count; i++) {
        nonzero += in[i] != 0;
        lost += in[i] != 0 && t->stored[i] == 0;
    }
    ddp_mean_add(&t->lost, lost, nonzero);
}

/* Samples first, first + 1 ...: noise, and a bright stripe at the place of the label. */
static void make_micro_batch(trainer *t, int first) {
    for (int b = 0; b < MICRO; b++) {
        uint32_t random = (uint32_t)(first + b) * 2654435761u;
        t->label[b] = (first + b) % CLASSES;
        for (int i = 0; i < WIDTH; i++) {
            random = random * 1664525 + 1013904223;
            t->out[b * WIDTH + i] = (float)(random >> 8) / 8388608.0f - 1;
            if (i * CLASSES / WIDTH == t->label[b]) t->out[b * WIDTH + i] += 1.5f;
        }
    }
    store(t, t->x[0], t->out, MICRO * WIDTH);
}

/* out (MICRO, outputs) = in (MICRO, inputs) weight */
static void linear(trainer *t, int p, int inputs, int outputs) {
    load(t, t->weight, t->params[p].param.value.data, inputs * outputs);
    memset(t->out, 0, sizeof t->out);
    for (int b = 0; b < MICRO; b++)
        for (int j = 0; j < inputs; j++) {
            const float *weight = t->weight + j * outputs, in = t->in[b * inputs + j];
            float *out = t->out + b * outputs;
            for (int k = 0; k < outputs; k++) out[k] += in * weight[k];
        }
}

/* From in and d_out: stores the gradient of weight, and computes d_in. */
static void linear_backward(trainer *t, int p, int inputs, int outputs) {
    load(t, t->weight, t->params[p].param.value.data, inputs * outputs);
    memset(t->d_weight, 0, sizeof t->d_weight);
    for (int b = 0; b < MICRO; b++)
        for (int j = 0; j < inputs; j++) {
            const float *weight = t->weight + j * outputs, *d = t->d_out + b * outputs;
            float *d_weight = t->d_weight + j * outputs, sum = 0, in = t->in[b * inputs + j];
            for (int k = 0; k < outputs; k++) d_weight[k] += in * d[k];
            for (int k = 0; k < outputs; k++) sum += weight[k] * d[k];
            t->d_in[b * inputs + j] = sum;
        }
    store_grad(t, t->params[p].param.grad.data, t->d_weight, inputs * outputs);
}

/* Runs in forward, and with recompute again in backward. */
static void forward_hidden(trainer *t, int b) {
    load(t, t->in, t->x[b], MICRO * WIDTH);
    linear(t, 2 * b, WIDTH, INNER);
    for (int i = 0; i < MICRO * INNER; i++) t->out[i] = fmaxf(t->out[i], 0);
    store(t, t->hidden[b], t->out, MICRO * INNER);
}

static ddp_result forward(trainer *t) {
    for (int b = 0; b < BLOCKS; b++) {
        DDP_TRY(ddp_fsdp_unshard(t->fsdp, b));
        forward_hidden(t, b);
        load(t, t->in, t->hidden[b], MICRO * INNER);
        linear(t, 2 * b + 1, INNER, WIDTH);
        load(t, t->in, t->x[b], MICRO * WIDTH);
        for (int i = 0; i < MICRO * WIDTH; i++) t->out[i] += t->in[i];
        store(t, t->x[b + 1], t->out, MICRO * WIDTH);
        DDP_TRY(ddp_fsdp_reshard(t->fsdp, b));
    }
    return DDP_OK;
}

/* d_x is the gradient of x[b + 1], and becomes that of x[b]. */
static void backward_block(trainer *t, int b) {
    if (t->recompute) forward_hidden(t, b);
    load(t, t->in, t->hidden[b], MICRO * INNER);
    load(t, t->d_out, t->d_x, MICRO * WIDTH);
    linear_backward(t, 2 * b + 1, INNER, WIDTH);
    for (int i = 0; i < MICRO * INNER; i++) t->d_in[i] = t->in[i] > 0 ? t->d_in[i] : 0;
    store_grad(t, t->d_hidden, t->d_in, MICRO * INNER);
    load(t, t->in, t->x[b], MICRO * WIDTH);
    load(t, t->d_out, t->d_hidden, MICRO * INNER);
    linear_backward(t, 2 * b, WIDTH, INNER);
    load(t, t->d_out, t->d_x, MICRO * WIDTH);
    for (int i = 0; i < MICRO * WIDTH; i++) t->d_in[i] += t->d_out[i];
    store_grad(t, t->d_x, t->d_in, MICRO * WIDTH);
}

/* Adds to the accuracy, and sets d_x, the gradient of the mean loss times scale. */
static void cross_entropy(trainer *t, float scale) {
    load(t, t->out, t->x[BLOCKS], MICRO * WIDTH);
    memset(t->d_out, 0, sizeof t->d_out);
    for (int b = 0; b < MICRO; b++) {
        const float *logits = t->out + b * WIDTH;
        float max = logits[0], sum = 0;
        for (int j = 1; j < CLASSES; j++) max = fmaxf(max, logits[j]);
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++) {
            float probability = expf(logits[j] - max) / sum;
            t->d_out[b * WIDTH + j] = scale * (probability - (float)(j == t->label[b])) / MICRO;
        }
        ddp_mean_add(&t->accuracy, logits[t->label[b]] == max, 1);
    }
    store_grad(t, t->d_x, t->d_out, MICRO * WIDTH);
}

/* Called for this rank's rows: uniform weights of variance 2 / inputs (He et al. 2015); W2 is smaller. */
static ddp_result init_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const ddp_tensor *value = &param->param.value;
    int p = (int)(param - ((trainer *)user)->params);
    float bound = sqrtf(6 / (float)value->shape[0]) / (p % 2 ? 4 : 1);
    for (int64_t k = 0; k < row_count * value->shape[1]; k++) {
        uint32_t random = (uint32_t)(p << 20 | (first_row * value->shape[1] + k)) * 2654435761u;
        random = (random ^ random >> 15) * 2246822519u;
        ((float *)out)[k] = bound * ((float)(random >> 8) / 8388608.0f - 1);
    }
    return DDP_OK;
}

static ddp_result create(trainer *t) {
    static const char *const names[PARAMS] = {"w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"};
    ddp_tensor w1 = {NULL, DDP_F32, 2, {WIDTH, INNER}};
    ddp_tensor w2 = {NULL, DDP_F32, 2, {INNER, WIDTH}};
    size_t x_bytes = MICRO * WIDTH * ddp_dtype_size(t->mode.dtype);
    size_t hidden_bytes = x_bytes / WIDTH * INNER;
    size_t hidden_count = t->recompute ? 1 : BLOCKS;
    for (int p = 0; p < PARAMS; p++) {
        t->params[p].param = (ddp_param){.name = names[p], .value = p % 2 ? w2 : w1};
        t->units[p / 2] = (ddp_fsdp_unit_desc){.params = &t->params[p / 2 * 2], .param_count = 2};
    }
    t->activation_bytes = (BLOCKS + 1) * x_bytes + hidden_count * hidden_bytes;
    t->activations = (char *)malloc(t->activation_bytes);
    if (!t->activations) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the activations");
    char *hidden = t->activations + (BLOCKS + 1) * x_bytes;
    for (size_t b = 0; b <= BLOCKS; b++) t->x[b] = t->activations + b * x_bytes;
    for (size_t b = 0; b < BLOCKS; b++) t->hidden[b] = hidden + b % hidden_count * hidden_bytes;
    DDP_TRY(ddp_scaler_init(&t->scaler, &(ddp_scaler_desc){.growth_interval = 16})); /* default 2000 */
    ddp_fsdp_desc desc = {.units = t->units,
                          .unit_count = BLOCKS,
                          .param_dtype = t->mode.dtype, /* master weights stay f32 */
                          .micro_batch_count = BATCH / MICRO / ddp_world_size(t->world),
                          .scaler = t->mode.scaled ? &t->scaler : NULL,
                          .init_fn = init_rows,
                          .init_user = t};
    return ddp_fsdp_create(&t->fsdp, t->world, &desc);
}

/* Micro-batch m of rank r is number m * ranks + r of the step, on any number of ranks. */
static ddp_result train_step(trainer *t, int step) {
    float scale = t->mode.scaled ? ddp_scaler_scale(&t->scaler) : 1;
    int ranks = ddp_world_size(t->world);
    for (int m = 0; m < BATCH / MICRO / ranks; m++) {
        make_micro_batch(t, step * BATCH + (m * ranks + ddp_rank(t->world)) * MICRO);
        DDP_TRY(forward(t));
        cross_entropy(t, scale);
        for (int b = BLOCKS - 1; b >= 0; b--) {
            DDP_TRY(ddp_fsdp_unshard(t->fsdp, b));
            backward_block(t, b);
            DDP_TRY(ddp_fsdp_reduce_grads(t->fsdp, b));
        }
    }
    DDP_TRY(ddp_fsdp_step(t->fsdp, 2e-3f)); /* divides by the scale; an overflow skips the step */
    if (!t->mode.scaled) return DDP_OK;
    t->skipped += ddp_scaler_found_inf(&t->scaler); /* the same on every rank */
    return ddp_scaler_update(&t->scaler);
}

static ddp_result train(trainer *t) {
    DDP_TRY(create(t));
    for (int step = 0; step < STEPS; step++) DDP_TRY(train_step(t, step));
    t->accuracy = (ddp_mean){0};
    DDP_TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (int i = ddp_rank(t->world); i < TEST / MICRO; i += ddp_world_size(t->world)) {
        make_micro_batch(t, STEPS * BATCH + i * MICRO);
        DDP_TRY(forward(t));
        cross_entropy(t, 1);
    }
    DDP_TRY(ddp_mean_reduce(t->world, &t->accuracy));
    DDP_TRY(ddp_mean_reduce(t->world, &t->lost));
    t->hash = 14695981039346656037u;
    for (int p = 0; p < PARAMS; p++) { /* FNV-1a, the same on every rank */
        const ddp_tensor *value = &t->params[p].param.value;
        DDP_TRY(ddp_fsdp_unshard(t->fsdp, p / 2));
        for (size_t k = 0; k < (size_t)ddp_tensor_count(value) * ddp_dtype_size(t->mode.dtype); k++)
            t->hash = (t->hash ^ ((const uint8_t *)value->data)[k]) * 1099511628211u;
    }
    return DDP_OK;
}

static ddp_result run(trainer *t, ddp_group *world, mode m, int recompute) {
    *t = (trainer){.world = world, .mode = m, .recompute = recompute};
    ddp_result result = train(t);
    ddp_fsdp_destroy(t->fsdp);
    free(t->activations);
    return result;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    static const mode modes[4] = {
        {"f32", DDP_F32, 0}, {"bf16", DDP_BF16, 0}, {"f16", DDP_F16, 0}, {"f16, scaler", DDP_F16, 1}};
    static trainer t[5]; /* of each mode; the last one with recompute */
    uint64_t hash = 0;
    int ranks = ddp_world_size(world);
    if (user || BATCH / MICRO % ranks) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2 or 4", ranks);
    if (ddp_rank(world) == 0)
        printf("mode         test accuracy  activations  recompute  lost gradients  skipped  last scale\n");
    for (int i = 0; i < 4; i++) {
        DDP_TRY(run(&t[i], world, modes[i], 0));
        DDP_TRY(run(&t[4], world, modes[i], 1));
        if (t[4].hash != t[i].hash)
            return ddp_fail(DDP_ERR_CORRUPT, "%s: recompute changed the weights", modes[i].name);
        if (i != 2 && ddp_mean_value(&t[i].accuracy) < ddp_mean_value(&t[0].accuracy) - 0.03)
            return ddp_fail(DDP_ERR_CORRUPT, "%s is less accurate: check scale", modes[i].name);
        hash = hash * 31 + t[i].hash;
        if (ddp_rank(world) > 0) continue;
        printf("%-11s  %12.2f%%  %9zu B  %7zu B  %13.2f%%  %7d", modes[i].name,
               100 * ddp_mean_value(&t[i].accuracy), t[i].activation_bytes, t[4].activation_bytes,
               100 * ddp_mean_value(&t[i].lost), t[i].skipped);
        printf("  %10g\n", modes[i].scaled ? ddp_scaler_scale(&t[i].scaler) : 1);
    }
    if (ddp_mean_value(&t[2].lost) < 4 * ddp_mean_value(&t[3].lost) || t[3].skipped == 0)
        return ddp_fail(DDP_ERR_CORRUPT, "the scaler saves no gradients, or never overflows: check scale");
    if (ddp_rank(world) == 0) printf("weights %016llx\n", (unsigned long long)hash);
    return DDP_OK;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    if (desc.world_size >= 1 && argc <= 2) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

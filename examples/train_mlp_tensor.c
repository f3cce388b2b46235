/*  train_mlp_tensor.c - a classifier of Fashion-MNIST on several ranks, with tensor parallelism

        cc -O3 -march=native examples/train_mlp_tensor.c -o train_mlp_tensor -lm -lpthread
        ./train_mlp_tensor         2 ranks; a synthetic data set
        ./train_mlp_tensor 2 data  2 ranks, and a folder with the files of MNIST: see train_mlp.c

    Every rank trains on the whole batch, with a part of every layer. Layers come in pairs, as in Megatron-LM:
    a column layer computes a part of the hidden units, a row layer adds up the parts of all ranks. So a pair
    needs one all-reduce forward and one backward. Sums over ranks are rounded in another order than on one
    rank: the weights differ in their last bits. diff train_mlp.c train_mlp_tensor.c shows what changes. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_optimizer, ddp_lr_at */
#include "../ddp_tensor.h"
#include "extras/mnist.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIXELS = 784, HIDDEN = 128, CLASSES = 10, LAYERS = 4, PARAMS = 2 * LAYERS };
enum { BATCH = 256, EPOCHS = 4 };
static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, HIDDEN, CLASSES};

//== model ======================================================================================
typedef struct metrics {
    ddp_mean loss, accuracy;
} metrics;

typedef struct trainer {
    ddp_group *world;
    ddp_loader *train, *test;
    ddp_param
        params[PARAMS]; /* this rank's part of layer l: 2l weight (width[l + 1], width[l]), 2l + 1 bias */
    float value[PARAMS][PIXELS * HIDDEN];
    float out[LAYERS + 1][BATCH * PIXELS]; /* (BATCH, width), or this rank's columns of it */
    float d_out[LAYERS + 1][BATCH * PIXELS];
    float grad[PARAMS][PIXELS * HIDDEN];
    ddp_tp *tp;
    ddp_tp_linear *linear[LAYERS];
    ddp_optimizer *optimizer;
} trainer;

/* Layers 0 and 2 are split by columns: out[l + 1] has this rank's units. Layers 1 and 3 have all of them. */
static int64_t local_width(const trainer *t, int l) {
    return l % 2 ? width[l] / ddp_world_size(t->world) : width[l];
}

/* out[l + 1] = relu(out[l] weight' + bias) for n rows; the last layer has no relu. */
static ddp_result forward_layer(trainer *t, int l, int n) {
    DDP_TRY(ddp_tp_linear_forward(t->linear[l], t->params[2 * l].value.data, t->params[2 * l + 1].value.data,
                                  t->out[l], n, t->out[l + 1]));
    for (int64_t k = 0; l < LAYERS - 1 && k < n * local_width(t, l + 1); k++)
        t->out[l + 1][k] = t->out[l + 1][k] > 0 ? t->out[l + 1][k] : 0;
    return DDP_OK;
}

/* From d_out[l + 1]: the gradients of weight and bias, and d_out[l]. */
static ddp_result backward_layer(trainer *t, int l, int n) {
    for (int64_t k = 0; l < LAYERS - 1 && k < n * local_width(t, l + 1); k++)
        t->d_out[l + 1][k] = t->out[l + 1][k] > 0 ? t->d_out[l + 1][k] : 0;
    return ddp_tp_linear_backward(t->linear[l], t->params[2 * l].value.data, t->out[l], t->d_out[l + 1], n,
                                  l ? t->d_out[l] : NULL, t->params[2 * l].grad.data,
                                  t->params[2 * l + 1].grad.data);
}

/* Adds loss and accuracy of the logits out[LAYERS], without padding, and sets their gradient. */
static void cross_entropy(trainer *t, const ddp_batch *batch, metrics *m) {
    for (int b = 0; b < batch->count; b++) {
        const float *logits = t->out[LAYERS] + b * CLASSES;
        float *d_logits = t->d_out[LAYERS] + b * CLASSES, max = logits[0], sum = 0;
        int label = ((const uint8_t *)batch->fields[1].data)[b];
        for (int j = 1; j < CLASSES; j++) max = logits[j] > max ? logits[j] : max;
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++)
            d_logits[j] = (expf(logits[j] - max) / sum - (j == label)) / (float)batch->count;
        if (batch->is_padding[b]) continue;
        ddp_mean_add(&m->loss, logf(sum) + max - logits[label], 1);
        ddp_mean_add(&m->accuracy, logits[label] == max, 1);
    }
}

/* He et al. 2015: uniform weights of variance 2 / inputs. All ranks draw all weights, and keep their part. */
static ddp_result create_layer(trainer *t, int l, uint32_t *random) {
    static const char *const names[] = {"w0", "b0", "w1", "b1", "w2", "b2", "w3", "b3"};
    ddp_tp_linear_desc desc = {
        .split = l % 2 ? DDP_TP_ROW : DDP_TP_COLUMN, .in_features = width[l], .out_features = width[l + 1]};
    ddp_tensor_box box, bias;
    DDP_TRY(ddp_tp_linear_create(&t->linear[l], t->tp, &desc));
    DDP_TRY(ddp_tp_linear_weight_box(t->linear[l], 0, &box));
    DDP_TRY(ddp_tp_linear_bias_box(t->linear[l], 0, &bias));
    float *at = t->value[2 * l];
    for (int64_t i = 0; i < width[l + 1]; i++)
        for (int64_t j = 0; j < width[l]; j++) {
            *random = *random * 1664525 + 1013904223;
            if (i < box.offset[0] || i >= box.offset[0] + box.shape[0]) continue;
            if (j < box.offset[1] || j >= box.offset[1] + box.shape[1]) continue;
            *at++ = sqrtf(6.0f / (float)width[l]) * ((float)(*random >> 8) / 8388608.0f - 1);
        }
    t->params[2 * l].value = (ddp_tensor){t->value[2 * l], DDP_F32, 2, {box.shape[0], box.shape[1]}};
    t->params[2 * l + 1].value = (ddp_tensor){t->value[2 * l + 1], DDP_F32, 1, {bias.shape[0]}};
    for (int i = 2 * l; i < 2 * l + 2; i++) {
        t->params[i].name = names[i];
        t->params[i].grad.data = t->grad[i];
    }
    return DDP_OK;
}

static ddp_result create_strategy(trainer *t) {
    ddp_tp_desc desc = {.max_rows = BATCH};
    uint32_t random = 1;
    DDP_TRY(ddp_tp_create(&t->tp, t->world, &desc));
    for (int l = 0; l < LAYERS; l++) DDP_TRY(create_layer(t, l, &random));
    ddp_optimizer_desc adamw = {.params = t->params, .param_count = PARAMS, .weight_decay = 0.01f};
    return ddp_optimizer_create(&t->optimizer, t->world, &adamw);
}

/* Every rank loads the whole batch. */
static ddp_result create_loader(ddp_loader **out, mnist *data, int64_t count) {
    const ddp_tensor fields[2] = {{NULL, DDP_U8, 1, {PIXELS}}, {NULL, DDP_U8, 0, {0}}};
    ddp_sampler_desc sampler = {.dataset_size = count};
    ddp_loader_desc desc = {sampler,           BATCH, fields, .field_count = 2, .fetch = mnist_fetch,
                            .fetch_user = data};
    return ddp_loader_create(out, &desc);
}

static ddp_result forward(trainer *t, const ddp_batch *batch, metrics *m) {
    const uint8_t *pixels = (const uint8_t *)batch->fields[0].data;
    for (int64_t i = 0; i < batch->count * PIXELS; i++) t->out[0][i] = (float)pixels[i] / 128 - 0.5f;
    for (int l = 0; l < LAYERS; l++) DDP_TRY(forward_layer(t, l, (int)batch->count));
    cross_entropy(t, batch, m);
    return DDP_OK;
}

static ddp_result backward(trainer *t, int n) {
    for (int l = LAYERS - 1; l >= 0; l--) DDP_TRY(backward_layer(t, l, n));
    return DDP_OK;
}

/* Trains for one epoch, then tests. *step counts the steps of all epochs. */
static ddp_result run_epoch(trainer *t, int epoch, const ddp_lr_desc *lr, int64_t *step, metrics *trained,
                            metrics *tested) {
    ddp_batch batch;
    DDP_TRY(ddp_loader_set_epoch(t->train, (uint64_t)epoch));
    for (int64_t left = ddp_loader_length(t->train); left > 0; left--) {
        DDP_TRY(ddp_loader_next(t->train, &batch));
        DDP_TRY(forward(t, &batch, trained));
        DDP_TRY(backward(t, (int)batch.count));
        DDP_TRY(ddp_optimizer_step(t->optimizer, ddp_lr_at(lr, ++*step)));
        if (ddp_rank(t->world) == 0 && isatty(STDOUT_FILENO) && *step % 10 == 0) {
            printf("step %lld/%lld \r", (long long)*step, (long long)lr->total_steps);
            fflush(stdout);
        }
    }
    DDP_TRY(ddp_loader_set_epoch(t->test, 0));
    for (int64_t left = ddp_loader_length(t->test); left > 0; left--) {
        DDP_TRY(ddp_loader_next(t->test, &batch));
        DDP_TRY(forward(t, &batch, tested));
    }
    return DDP_OK; /* every rank has the whole loss */
}

static ddp_result train(trainer *t, mnist *data) {
    int64_t step = 0, steps = data[0].count / BATCH; /* per epoch */
    ddp_lr_desc lr = {.kind = DDP_LR_COSINE, .max_lr = 2e-3, .total_steps = EPOCHS * steps};
    double start = ddp_now(), right = 0;
    DDP_TRY(create_strategy(t));
    DDP_TRY(create_loader(&t->train, &data[0], steps * BATCH));
    DDP_TRY(create_loader(&t->test, &data[1], data[1].count));
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        metrics trained = {0}, tested = {0};
        DDP_TRY(run_epoch(t, epoch, &lr, &step, &trained, &tested));
        right = 100 * ddp_mean_value(&tested.accuracy);
        if (ddp_rank(t->world) == 0)
            printf("epoch %d/%d   loss %.4f   test accuracy %.2f%%   %.1f s\n", epoch + 1, EPOCHS,
                   ddp_mean_value(&trained.loss), right, ddp_now() - start);
    }
    return right > 80 ? DDP_OK : ddp_fail(DDP_ERR_CORRUPT, "test accuracy %.2f%% is below 80%%", right);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world);
    if (HIDDEN % ranks)
        return ddp_fail(DDP_ERR_INVALID, "%d ranks: use a divisor of 128, such as 1, 2 or 4", ranks);
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    t->world = world;
    ddp_result result = train(t, (mnist *)user);
    if (result != DDP_OK) ddp_group_abort(world); /* other ranks do not wait for this one */
    ddp_loader_destroy(t->train);
    ddp_loader_destroy(t->test);
    ddp_optimizer_destroy(t->optimizer);
    for (int l = 0; l < LAYERS; l++) ddp_tp_linear_destroy(t->linear[l]);
    ddp_tp_destroy(t->tp);
    free(t);
    return result;
}

int main(int argc, char **argv) {
    mnist data[2]; /* training set, test set; opened before the ranks start, which share the memory */
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = argc > 2 ? mnist_open(argv[2], &data[0], &data[1])
                                 : mnist_synthetic(4096, 1024, &data[0], &data[1]);
    if (desc.world_size < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [folder]]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, data);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

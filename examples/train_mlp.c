/*  train_mlp.c - a classifier of Fashion-MNIST on several ranks, with data parallelism (DDP)

        cc -O3 -march=native examples/train_mlp.c -o train_mlp -lm -lpthread
        ./train_mlp             2 ranks; a synthetic data set
        ./train_mlp 2 data      2 ranks, and a folder with the files of MNIST or Fashion-MNIST:
                                apt-get install dataset-fashion-mnist
                                cp -r /usr/share/datasets/fashion-mnist data && gunzip -r data
        ./train_mlp 2 data best.npy    stops early, and keeps the best weights in a file; "-" = no folder

    Every rank holds the whole model and trains on its part of each batch. The reducer averages the gradients
    over the ranks while backward still computes the layers below. 1, 2 and 4 ranks end with the same bits:
    the last line prints a hash of the weights. train_mlp_fsdp.c, train_mlp_pipeline.c and train_mlp_tensor.c
    train the same model with other strategies; diff shows what changes. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_optimizer, ddp_lr_at */
#include "extras/mnist.h"
#include "extras/npy.h"
#include "extras/training.h" /* early_stop */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIXELS = 784, HIDDEN = 128, CLASSES = 10, LAYERS = 4, PARAMS = 2 * LAYERS };
enum { MICRO = 64, BATCH = 4 * MICRO, EPOCHS = 4, MAX_EPOCHS = 20 }; /* MAX_EPOCHS with early stopping */
static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, HIDDEN, CLASSES};
static const char *best_file; /* NULL = no early stopping */

//== model ======================================================================================
typedef struct metrics {
    ddp_mean loss, accuracy;
} metrics;

typedef struct trainer {
    ddp_group *world;
    ddp_loader *train, *test;
    ddp_param params[PARAMS]; /* of layer l: 2l weight (width[l], width[l + 1]), 2l + 1 bias */
    float value[PARAMS][PIXELS * HIDDEN];
    float out[LAYERS + 1][MICRO * PIXELS]; /* (MICRO, width) each; out[0] are the pixels */
    float d_out[LAYERS + 1][MICRO * PIXELS];
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_optimizer *optimizer;
    early_stop stop;
} trainer;

/* out[l + 1] = relu(out[l] weight + bias) for n rows; the last layer has no relu. */
static void forward_layer(trainer *t, int l, int n) {
    const float *weight = (const float *)t->params[2 * l].value.data;
    const float *bias = (const float *)t->params[2 * l + 1].value.data;
    int inputs = width[l], outputs = width[l + 1];
    for (int b = 0; b < n; b++) {
        const float *in = t->out[l] + b * inputs;
        float *out = t->out[l + 1] + b * outputs;
        for (int j = 0; j < outputs; j++) out[j] = bias[j];
        for (int i = 0; i < inputs; i++)
            for (int j = 0; j < outputs; j++) out[j] += in[i] * weight[i * outputs + j];
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) out[j] = out[j] > 0 ? out[j] : 0;
    }
}

/* From d_out[l + 1]: the gradients of weight and bias, and d_out[l]. */
static void backward_layer(trainer *t, int l, int n) {
    const float *weight = (const float *)t->params[2 * l].value.data;
    float *d_weight = (float *)t->params[2 * l].grad.data, *d_bias = (float *)t->params[2 * l + 1].grad.data;
    int inputs = width[l], outputs = width[l + 1];
    memset(d_weight, 0, sizeof(float) * (size_t)(inputs * outputs));
    memset(d_bias, 0, sizeof(float) * (size_t)outputs);
    for (int b = 0; b < n; b++) {
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

/* He et al. 2015: uniform weights of variance 2 / inputs. */
static void create_model(trainer *t) {
    static const char *const names[] = {"w0", "b0", "w1", "b1", "w2", "b2", "w3", "b3"};
    uint32_t random = 1;
    for (int i = 0; i < PARAMS; i++) {
        int rows = i % 2 ? 1 : width[i / 2], columns = width[i / 2 + 1];
        t->params[i] = (ddp_param){.name = names[i], .value = {t->value[i], DDP_F32, 2, {rows, columns}}};
        for (int k = 0; i % 2 == 0 && k < rows * columns; k++) {
            random = random * 1664525 + 1013904223;
            t->value[i][k] = sqrtf(6.0f / (float)rows) * ((float)(random >> 8) / 8388608.0f - 1);
        }
    }
}

/* The reducer allocates the gradients, broadcasts the weights of rank 0, and averages. The accumulator adds
   the micro-batches of this rank in the order in which the reducer adds ranks: as a binary tree. */
static ddp_result create_strategy(trainer *t) {
    int micro_batches = BATCH / MICRO / ddp_world_size(t->world);
    ddp_reducer_desc reducer = {
        .params = t->params, .param_count = PARAMS, .micro_batch_count = micro_batches};
    DDP_TRY(ddp_reducer_create(&t->reducer, t->world, &reducer));
    ddp_accumulator_desc accumulator = {.reducer = t->reducer,
                                        .params = t->params,
                                        .param_count = PARAMS,
                                        .micro_batch_count = micro_batches};
    DDP_TRY(ddp_accumulator_create(&t->accumulator, t->world, &accumulator));
    ddp_optimizer_desc adamw = {.params = t->params, .param_count = PARAMS, .weight_decay = 0.01f};
    return ddp_optimizer_create(&t->optimizer, t->world, &adamw);
}

/* With global_batch, the batches of an epoch are the same on any number of ranks; rank r takes block r. */
static ddp_result create_loader(ddp_loader **out, trainer *t, mnist *data, int64_t count, int global_batch) {
    const ddp_tensor fields[2] = {{NULL, DDP_U8, 1, {PIXELS}}, {NULL, DDP_U8, 0, {0}}};
    ddp_sampler_desc sampler = {.dataset_size = count,
                                .num_replicas = ddp_world_size(t->world),
                                .rank = ddp_rank(t->world),
                                .global_batch = global_batch};
    ddp_loader_desc desc = {sampler,           MICRO, fields, .field_count = 2, .fetch = mnist_fetch,
                            .fetch_user = data};
    return ddp_loader_create(out, &desc);
}

static ddp_result forward(trainer *t, const ddp_batch *batch, metrics *m) {
    const uint8_t *pixels = (const uint8_t *)batch->fields[0].data;
    for (int64_t i = 0; i < batch->count * PIXELS; i++) t->out[0][i] = (float)pixels[i] / 128 - 0.5f;
    for (int l = 0; l < LAYERS; l++) forward_layer(t, l, (int)batch->count);
    cross_entropy(t, batch, m);
    return DDP_OK;
}

/* The reducer sends a bucket as soon as its gradients are ready, while the layers below are computed. */
static ddp_result backward(trainer *t, int n) {
    for (int l = LAYERS - 1; l >= 0; l--) {
        backward_layer(t, l, n);
        DDP_TRY(ddp_accumulator_ready(t->accumulator, 2 * l + 1));
        DDP_TRY(ddp_accumulator_ready(t->accumulator, 2 * l));
    }
    return ddp_accumulator_next(t->accumulator, NULL);
}

/* A hash of all weights, the same on every rank. */
static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    *hash = 14695981039346656037u;
    for (int i = 0; i < PARAMS; i++)
        for (size_t k = 0; k < sizeof(float) * (size_t)(i % 2 ? 1 : width[i / 2]) * (size_t)width[i / 2 + 1];
             k++)
            *hash = (*hash ^ ((const uint8_t *)t->value[i])[k]) * 1099511628211u;
    return DDP_OK;
}

/* tested: loss and accuracy on the test set, over all ranks. */
static ddp_result run_test(trainer *t, metrics *tested) {
    ddp_batch batch;
    DDP_TRY(ddp_loader_set_epoch(t->test, 0));
    for (int64_t left = ddp_loader_length(t->test); left > 0; left--) {
        DDP_TRY(ddp_loader_next(t->test, &batch));
        DDP_TRY(forward(t, &batch, tested));
    }
    DDP_TRY(ddp_mean_reduce(t->world, &tested->loss));
    return ddp_mean_reduce(t->world, &tested->accuracy);
}

/* Trains for one epoch, then tests. *step counts the steps of all epochs. */
static ddp_result run_epoch(trainer *t, int epoch, const ddp_lr_desc *lr, int64_t *step, metrics *trained,
                            metrics *tested) {
    int micro_batches = BATCH / MICRO / ddp_world_size(t->world);
    ddp_batch batch;
    DDP_TRY(ddp_loader_set_epoch(t->train, (uint64_t)epoch));
    for (int64_t left = ddp_loader_length(t->train); left > 0; left -= micro_batches) {
        for (int m = 0; m < micro_batches; m++) {
            DDP_TRY(ddp_loader_next(t->train, &batch));
            DDP_TRY(forward(t, &batch, trained));
            DDP_TRY(backward(t, (int)batch.count));
        }
        DDP_TRY(ddp_reducer_wait(t->reducer));
        DDP_TRY(ddp_optimizer_step(t->optimizer, ddp_lr_at(lr, ++*step)));
        if (ddp_rank(t->world) == 0 && isatty(STDOUT_FILENO) && *step % 10 == 0) {
            printf("step %lld/%lld \r", (long long)*step, (long long)lr->total_steps);
            fflush(stdout);
        }
    }
    DDP_TRY(ddp_mean_reduce(t->world, &trained->loss));
    return run_test(t, tested);
}

/* After an epoch: rank 0 saves the weights if no earlier epoch had a lower test loss. *is_over 1: two epochs
   in a row have not improved it. All ranks get the same answer, so they end together. */
static ddp_result keep_best(trainer *t, double loss, int *is_over) {
    ddp_tensor weights = {t->value, DDP_F32, 2, {PARAMS, PIXELS * HIDDEN}};
    int is_best = 0;
    DDP_TRY(early_stop_check(t->world, &t->stop, loss, &is_best, is_over));
    return is_best && ddp_rank(t->world) == 0 ? npy_save(NULL, &weights, best_file) : DDP_OK;
}

/* Rank 0 reads the best weights and sends them. Their test loss must be the best one again. */
static ddp_result load_best(trainer *t) {
    ddp_tensor weights = {t->value, DDP_F32, 2, {PARAMS, PIXELS * HIDDEN}};
    metrics tested = {0};
    if (ddp_rank(t->world) == 0) DDP_TRY(npy_load(NULL, best_file, &weights));
    DDP_TRY(ddp_broadcast(t->world, t->value, PARAMS * PIXELS * HIDDEN, DDP_F32, 0, NULL));
    DDP_TRY(run_test(t, &tested));
    double loss = ddp_mean_value(&tested.loss);
    if (ddp_rank(t->world) == 0)
        printf("best weights in %s   test loss %.4f   test accuracy %.2f%%\n", best_file, loss,
               100 * ddp_mean_value(&tested.accuracy));
    if (loss == t->stop.best) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "%s has a test loss of %g, not %g", best_file, loss, t->stop.best);
}

static ddp_result train(trainer *t, mnist *data) {
    int64_t step = 0, steps = data[0].count / BATCH; /* per epoch */
    int epochs = best_file ? MAX_EPOCHS : EPOCHS, is_over = 0;
    ddp_lr_desc lr = {.kind = DDP_LR_COSINE, .max_lr = 2e-3, .total_steps = epochs * steps};
    uint64_t hash;
    double start = ddp_now(), right = 0;
    create_model(t);
    DDP_TRY(create_strategy(t));
    DDP_TRY(create_loader(&t->train, t, &data[0], steps * BATCH, BATCH));
    DDP_TRY(create_loader(&t->test, t, &data[1], data[1].count, 0));
    t->stop = (early_stop){.patience = 2, .min_delta = 1e-3};
    for (int epoch = 0; epoch < epochs && !is_over; epoch++) {
        metrics trained = {0}, tested = {0};
        DDP_TRY(run_epoch(t, epoch, &lr, &step, &trained, &tested));
        right = 100 * ddp_mean_value(&tested.accuracy);
        if (ddp_rank(t->world) == 0)
            printf("epoch %d/%d   loss %.4f   test accuracy %.2f%%   %.1f s\n", epoch + 1, epochs,
                   ddp_mean_value(&trained.loss), right, ddp_now() - start);
        if (best_file) DDP_TRY(keep_best(t, ddp_mean_value(&tested.loss), &is_over));
    }
    if (best_file) DDP_TRY(load_best(t));
    DDP_TRY(hash_weights(t, &hash));
    if (ddp_rank(t->world) == 0) printf("weights %016llx\n", (unsigned long long)hash);
    return right > 80 ? DDP_OK : ddp_fail(DDP_ERR_CORRUPT, "test accuracy %.2f%% is below 80%%", right);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world);
    if (BATCH / MICRO % ranks) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2 or 4", ranks);
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    t->world = world;
    ddp_result result = train(t, (mnist *)user);
    if (result != DDP_OK) ddp_group_abort(world); /* other ranks do not wait for this one */
    ddp_loader_destroy(t->train);
    ddp_loader_destroy(t->test);
    ddp_optimizer_destroy(t->optimizer);
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    free(t);
    return result;
}

int main(int argc, char **argv) {
    mnist data[2]; /* training set, test set; opened before the ranks start, which share the memory */
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    int has_folder = argc > 2 && strcmp(argv[2], "-") != 0;
    ddp_result result = has_folder ? mnist_open(argv[2], &data[0], &data[1])
                                   : mnist_synthetic(4096, 1024, &data[0], &data[1]);
    if (argc > 3) best_file = argv[3];
    if (desc.world_size < 1 || argc > 4)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [folder [best.npy]]]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, data);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

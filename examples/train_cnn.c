/*  train_cnn.c - a convolutional network for Fashion-MNIST, with batch normalization over all ranks

        cc -O3 -march=native examples/train_cnn.c -o train_cnn -lm -lpthread
        ./train_cnn             2 ranks; a synthetic data set
        ./train_cnn 2 data      2 ranks, and a folder with the files of Fashion-MNIST: see train_mlp.c
        ./train_cnn 4 local     4 ranks; each rank normalizes by its own samples

    conv 3x3 - batch norm - relu - pool - conv 3x3 - batch norm - relu - pool - linear

    Each batch norm uses the mean and variance of all ranks' samples, as SyncBatchNorm of PyTorch. 1, 2 and 4
    ranks then end with the same bits: the last line prints a hash of the weights. With "local" it uses the
    samples of its rank, as BatchNorm2d. The weights then depend on the number of ranks. Before each step
    ddp_reducer_sync_buffers gives all ranks the running statistics of rank 0. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_optimizer */
#include "extras/batch_norm.h"
#include "extras/mnist.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIXELS = 784, CLASSES = 10, BATCH = 256, BLOCK = 64, EPOCHS = 4, CONVS = 2, PARAMS = 8 };
enum { MAPS0 = 1, MAPS1 = 8, MAPS2 = 16, FLAT = MAPS2 * 7 * 7 };
static const int maps[CONVS + 1] = {MAPS0, MAPS1, MAPS2};
/* Height and width of the input of each convolution, and of the linear layer. */
static const int side[CONVS + 1] = {28, 14, 7};
static int local; /* 1 = each rank normalizes by its own samples */

//== model ======================================================================================
/* Activations of convolution l, for the samples of this rank. Gradients of d_norm replace its values. */
typedef struct conv_layer {
    float in[BATCH * MAPS1 * 14 * 14], d_in[BATCH * MAPS1 * 14 * 14]; /* (n, maps[l], side[l], side[l]) */
    float conv[BATCH * MAPS1 * 784], norm[BATCH * MAPS1 * 784];       /* (n, maps[l + 1], side[l], side[l]) */
    float d_norm[BATCH * MAPS1 * 784];
    uint8_t
        max[BATCH * MAPS1 * 14 * 14]; /* place of the maximum in each 2x2 of the pool: 0 to 3; 4: relu is 0 */
    batch_norm *batch_norm;
} conv_layer;

typedef struct trainer {
    ddp_group *world, *norms; /* norms: the ranks of world, for batch norm; NULL = by the samples of a rank */
    ddp_loader *train, *test;
    ddp_param params[PARAMS]; /* conv l: 3l weight (maps[l + 1], maps[l], 3, 3), 3l + 1 and 3l + 2 batch norm;
                                 then 6 weight (CLASSES, FLAT), 7 bias */
    float value[PARAMS][CLASSES * FLAT];
    conv_layer conv[CONVS];
    float flat[BATCH * FLAT], d_flat[BATCH * FLAT], d_logits[BATCH * CLASSES];
    ddp_reducer *reducer;
    ddp_optimizer *optimizer;
    ddp_mean loss, accuracy;
} trainer;

static const float *value_of(const trainer *t, int param) {
    return (const float *)t->params[param].value.data;
}
static float *grad_of(const trainer *t, int param) { return (float *)t->params[param].grad.data; }

/* One map: out(y, x) += sum over a 3x3 window of weight * in. flip: transposed, for the gradient of in. */
static void convolve(float *out, const float *in, const float *weight, int size, int flip) {
    for (int k = 0; k < 9; k++) {
        int dy = flip ? 1 - k / 3 : k / 3 - 1, dx = flip ? 1 - k % 3 : k % 3 - 1;
        for (int y = dy < 0; y < size - (dy > 0); y++)
            for (int x = dx < 0; x < size - (dx > 0); x++)
                out[y * size + x] += weight[k] * in[(y + dy) * size + x + dx];
    }
}

/* relu, then the maximum of each 2x2: norm to out. */
static void pool(conv_layer *c, float *out, int planes, int size) {
    for (int i = 0; i < planes * (size / 2) * (size / 2); i++) {
        int y = i / (size / 2) * 2, x = i % (size / 2) * 2, best = 4;
        float max = 0;
        for (int k = 0; k < 4; k++) {
            float value = c->norm[(y + k / 2) * size + x + k % 2];
            if (value > max) best = k;
            if (value > max) max = value;
        }
        c->max[i] = (uint8_t)best;
        out[i] = max;
    }
}

static void pool_backward(conv_layer *c, const float *d_out, int planes, int size) {
    memset(c->d_norm, 0, sizeof(float) * (size_t)(planes * size * size));
    for (int i = 0; i < planes * (size / 2) * (size / 2); i++) {
        int y = i / (size / 2) * 2, x = i % (size / 2) * 2, k = c->max[i];
        if (k < 4) c->d_norm[(y + k / 2) * size + x + k % 2] = d_out[i];
    }
}

static ddp_result forward(trainer *t, const ddp_batch *batch, int training) {
    int n = (int)batch->count;
    const uint8_t *pixels = (const uint8_t *)batch->fields[0].data;
    for (int i = 0; i < n * PIXELS; i++) t->conv[0].in[i] = (float)pixels[i] / 128 - 0.5f;
    for (int l = 0; l < CONVS; l++) {
        conv_layer *c = &t->conv[l];
        int ins = maps[l], outs = maps[l + 1], area = side[l] * side[l];
        memset(c->conv, 0, sizeof(float) * (size_t)(n * outs * area));
        for (int s = 0; s < n; s++)
            for (int k = 0; k < outs * ins; k++)
                convolve(c->conv + (s * outs + k / ins) * area, c->in + (s * ins + k % ins) * area,
                         value_of(t, 3 * l) + k * 9, side[l], 0);
        DDP_TRY(batch_norm_forward(c->batch_norm, value_of(t, 3 * l + 1), value_of(t, 3 * l + 2), c->conv,
                                   c->norm, n, area, training));
        pool(c, l + 1 < CONVS ? t->conv[l + 1].in : t->flat, n * outs, side[l]);
    }
    for (int s = 0; s < n; s++) {
        float logits[CLASSES], max = -INFINITY, sum = 0;
        int label = ((const uint8_t *)batch->fields[1].data)[s];
        for (int j = 0; j < CLASSES; j++) {
            logits[j] = value_of(t, 7)[j];
            for (int i = 0; i < FLAT; i++) logits[j] += value_of(t, 6)[j * FLAT + i] * t->flat[s * FLAT + i];
            max = logits[j] > max ? logits[j] : max;
        }
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++)
            t->d_logits[s * CLASSES + j] = (expf(logits[j] - max) / sum - (j == label)) / (float)n;
        if (batch->is_padding[s]) continue;
        ddp_mean_add(&t->loss, logf(sum) + max - logits[label], 1);
        ddp_mean_add(&t->accuracy, logits[label] == max, 1);
    }
    return DDP_OK;
}

/* Gradient of a parameter except batch norm, over samples [first, first + count), as a binary tree of blocks.
   Ranks continue this tree: the sum has the same bits on 1, 2 and 4 ranks. */
static void sum_gradient(trainer *t, int param, int first, int count, float *grad) {
    int size = (int)ddp_tensor_count(&t->params[param].value), l = param / 3;
    if (count > BLOCK) {
        float right[CLASSES * FLAT];
        sum_gradient(t, param, first, count / 2, grad);
        sum_gradient(t, param, first + count / 2, count / 2, right);
        for (int i = 0; i < size; i++) grad[i] += right[i];
        return;
    }
    memset(grad, 0, sizeof(float) * (size_t)size);
    for (int s = first; s < first + count; s++) {
        const float *d_logits = t->d_logits + s * CLASSES, *flat = t->flat + s * FLAT;
        for (int i = 0; param == 7 && i < size; i++) grad[i] += d_logits[i];
        for (int i = 0; param == 6 && i < size; i++) grad[i] += d_logits[i / FLAT] * flat[i % FLAT];
        for (int i = 0; param < 6 && i < size; i++) {
            int n = side[l], out = i / 9 / maps[l], in = i / 9 % maps[l], dy = i / 3 % 3 - 1, dx = i % 3 - 1;
            const float *d = t->conv[l].d_norm + (s * maps[l + 1] + out) * n * n;
            const float *x_in = t->conv[l].in + (s * maps[l] + in) * n * n;
            float lane[28] = {0};
            for (int y = dy < 0; y < n - (dy > 0); y++)
                for (int x = dx < 0; x < n - (dx > 0); x++)
                    lane[x] += d[y * n + x] * x_in[(y + dy) * n + x + dx];
            for (int x = 0; x < n; x++) grad[i] += lane[x];
        }
    }
}

/* The reducer sends a bucket as soon as its gradients are ready, while the layers below are computed. */
static ddp_result backward(trainer *t, int n) {
    for (int param = 7; param >= 6; param--) {
        sum_gradient(t, param, 0, n, grad_of(t, param));
        DDP_TRY(ddp_reducer_ready(t->reducer, param));
    }
    memset(t->d_flat, 0, sizeof(float) * (size_t)(n * FLAT));
    for (int s = 0; s < n; s++)
        for (int j = 0; j < CLASSES; j++)
            for (int i = 0; i < FLAT; i++)
                t->d_flat[s * FLAT + i] += t->d_logits[s * CLASSES + j] * value_of(t, 6)[j * FLAT + i];
    for (int l = CONVS - 1; l >= 0; l--) {
        conv_layer *c = &t->conv[l];
        int ins = maps[l], outs = maps[l + 1], area = side[l] * side[l];
        pool_backward(c, l + 1 < CONVS ? t->conv[l + 1].d_in : t->d_flat, n * outs, side[l]);
        DDP_TRY(batch_norm_backward(c->batch_norm, value_of(t, 3 * l + 1), c->conv, c->d_norm, c->d_norm,
                                    grad_of(t, 3 * l + 1), grad_of(t, 3 * l + 2), n, area));
        sum_gradient(t, 3 * l, 0, n, grad_of(t, 3 * l));
        for (int param = 3 * l + 2; param >= 3 * l; param--) DDP_TRY(ddp_reducer_ready(t->reducer, param));
        if (l == 0) break;
        memset(c->d_in, 0, sizeof(float) * (size_t)(n * ins * area));
        for (int s = 0; s < n; s++)
            for (int k = 0; k < outs * ins; k++)
                convolve(c->d_in + (s * ins + k % ins) * area, c->d_norm + (s * outs + k / ins) * area,
                         value_of(t, 3 * l) + k * 9, side[l], 1);
    }
    return DDP_OK;
}

/* He et al. 2015 for weights: uniform, of variance 2 / inputs. Batch norm starts with weight 1 and bias 0. */
static ddp_result create_model(trainer *t, ddp_tensor *buffers) {
    static const char *const names[] = {"conv0", "scale0", "shift0", "conv1", "scale1", "shift1", "w", "b"};
    uint32_t random = 1;
    for (int i = 0; i < PARAMS; i++) {
        int l = i / 3, outs = l < CONVS ? maps[l + 1] : CLASSES, inputs = l < CONVS ? 9 * maps[l] : FLAT;
        int is_weight = i % 3 == 0;
        t->params[i] = (ddp_param){.name = names[i],
                                   .value = {t->value[i], DDP_F32, 2, {outs, is_weight ? inputs : 1}}};
        for (int k = 0; k < outs * (is_weight ? inputs : 1); k++) {
            random = random * 1664525 + 1013904223;
            t->value[i][k] = is_weight ? sqrtf(6.0f / (float)inputs) * ((float)(random >> 8) / 8388608.0f - 1)
                                       : l < CONVS && i % 3 == 1;
        }
    }
    for (int l = 0; l < CONVS; l++) {
        batch_norm_desc desc = {.channels = maps[l + 1], .group = t->norms};
        DDP_TRY(batch_norm_create(&t->conv[l].batch_norm, &desc));
        batch_norm_buffers(t->conv[l].batch_norm, buffers + 3 * l);
    }
    return DDP_OK;
}

/* Rank r takes block r of each global batch. */
static ddp_result create_loader(ddp_loader **out, trainer *t, mnist *data, int64_t count, int global_batch) {
    const ddp_tensor fields[2] = {{NULL, DDP_U8, 1, {PIXELS}}, {NULL, DDP_U8, 0, {0}}};
    int ranks = ddp_world_size(t->world);
    ddp_sampler_desc sampler = {.dataset_size = count,
                                .num_replicas = ranks,
                                .rank = ddp_rank(t->world),
                                .global_batch = global_batch};
    ddp_loader_desc desc = {sampler,          BATCH / ranks,        fields,
                            .field_count = 2, .fetch = mnist_fetch, .fetch_user = data};
    return ddp_loader_create(out, &desc);
}

static ddp_result train(trainer *t, mnist *data) {
    int64_t steps = data[0].count / BATCH; /* per epoch */
    ddp_tensor buffers[3 * CONVS];
    ddp_batch batch;
    DDP_TRY(create_model(t, buffers));
    ddp_reducer_desc reducer = {
        .params = t->params, .param_count = PARAMS, .buffers = buffers, .buffer_count = 3 * CONVS};
    DDP_TRY(ddp_reducer_create(&t->reducer, t->world, &reducer));
    ddp_optimizer_desc adamw = {.params = t->params, .param_count = PARAMS, .weight_decay = 0.01f};
    DDP_TRY(ddp_optimizer_create(&t->optimizer, t->world, &adamw));
    DDP_TRY(create_loader(&t->train, t, &data[0], steps * BATCH, BATCH));
    DDP_TRY(create_loader(&t->test, t, &data[1], data[1].count, 0));
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        DDP_TRY(ddp_loader_set_epoch(t->train, (uint64_t)epoch));
        t->loss = (ddp_mean){0};
        for (int64_t step = 0; step < steps; step++) {
            if (!t->norms) DDP_TRY(ddp_reducer_sync_buffers(t->reducer, 0));
            DDP_TRY(ddp_loader_next(t->train, &batch));
            DDP_TRY(forward(t, &batch, 1));
            DDP_TRY(backward(t, (int)batch.count));
            DDP_TRY(ddp_reducer_wait(t->reducer));
            DDP_TRY(ddp_optimizer_step(t->optimizer, 5e-3f));
        }
        DDP_TRY(ddp_mean_reduce(t->world, &t->loss));
        if (ddp_rank(t->world) == 0)
            printf("epoch %d/%d   loss %.4f\n", epoch + 1, EPOCHS, ddp_mean_value(&t->loss));
    }
    DDP_TRY(ddp_reducer_sync_buffers(t->reducer, 0));
    t->accuracy = (ddp_mean){0};
    for (int64_t left = ddp_loader_length(t->test); left > 0; left--) {
        DDP_TRY(ddp_loader_next(t->test, &batch));
        DDP_TRY(forward(t, &batch, 0));
    }
    DDP_TRY(ddp_mean_reduce(t->world, &t->accuracy));
    double right = 100 * ddp_mean_value(&t->accuracy);
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < PARAMS; i++)
        for (int64_t k = 0; k < 4 * ddp_tensor_count(&t->params[i].value); k++)
            hash = (hash ^ ((const uint8_t *)t->value[i])[k]) * 1099511628211u;
    if (ddp_rank(t->world) == 0)
        printf("test accuracy %.2f%%\nweights %016llx\n", right, (unsigned long long)hash);
    return right > 80 ? DDP_OK : ddp_fail(DDP_ERR_CORRUPT, "test accuracy %.2f%% is below 80%%", right);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    trainer *t = (trainer *)calloc(1, sizeof *t);
    ddp_result result = t ? DDP_OK : ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    if (BATCH / BLOCK % ddp_world_size(world))
        result = ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2 or 4", ddp_world_size(world));
    if (t) t->world = world;
    if (result == DDP_OK && !local) result = ddp_group_split(world, 0, 0, &t->norms);
    if (result == DDP_OK) result = train(t, (mnist *)user);
    if (result != DDP_OK) ddp_group_abort(world); /* other ranks do not wait for this one */
    if (!t) return result;
    ddp_loader_destroy(t->train);
    ddp_loader_destroy(t->test);
    ddp_optimizer_destroy(t->optimizer);
    ddp_reducer_destroy(t->reducer);
    for (int l = 0; l < CONVS; l++) batch_norm_destroy(t->conv[l].batch_norm);
    ddp_group_destroy(t->norms);
    free(t);
    return result;
}

int main(int argc, char **argv) {
    mnist data[2]; /* training set, test set */
    local = argc > 2 && strcmp(argv[argc - 1], "local") == 0;
    int rest = argc - local;
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = rest > 2 ? mnist_open(argv[2], &data[0], &data[1])
                                 : mnist_synthetic(1024, 512, &data[0], &data[1]);
    if (desc.world_size < 1 || rest > 3)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [folder] [local]]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, data);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

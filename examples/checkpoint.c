/*  checkpoint.c - save on 4 ranks, continue on 2 ranks with the same bits, read the files in Python

        cc -O3 -march=native examples/checkpoint.c -o checkpoint -lm -lpthread
        ./checkpoint                  saves on 4 ranks, continues on 2; keeps the checkpoint in saved_model
        ./checkpoint 1 4 saved data   1 rank, then 4; checkpoint in saved; Fashion-MNIST in data (train_mlp.c)

    Three runs of one training: 40 steps without a break; 20 steps and a save; a load and the remaining 20
    steps on another number of ranks. The first and the third end with the same weights, bit by bit. The save
    is in the middle of an epoch: the checkpoint also holds the position of the sampler. The program starts
    all ranks itself, without mpirun. A second call replaces the checkpoint.

    The folder has safetensors files (https://github.com/huggingface/safetensors). Python without packages:

        import json, struct
        folder, weights = "saved_model/", {}
        for name, path in json.load(open(folder + "model.safetensors.index.json"))["weight_map"].items():
            file = open(folder + path, "rb")
            size = struct.unpack("<Q", file.read(8))[0]
            entry = json.loads(file.read(size))[name]  # with dtype, shape and data_offsets
            begin, end = entry["data_offsets"]
            file.seek(8 + size + begin)
            weights[name] = struct.unpack("<%df" % ((end - begin) // 4), file.read(end - begin))

    With the package: safetensors.numpy.load_file("saved_model/model-00001-of-00001.safetensors").
    ddp_fsdp_export writes only the model, as one file: see fsdp.c. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h"
#include "extras/mnist.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { INPUTS = 784, HIDDEN = 32, CLASSES = 10, LAYERS = 2, PARAMS = 2 * LAYERS };
enum { SAMPLES = 1024, MICRO = 16, BATCH = 4 * MICRO, STEPS = 40, SAVE_STEP = 20 }; /* 16 steps per epoch */
static const int width[LAYERS + 1] = {INPUTS, HIDDEN, CLASSES};
static mnist data; /* images NULL = synthetic samples */

/* One run of the training, in memory that the ranks share with main(). */
typedef struct run {
    const char *folder;
    int load;      /* 1 = start from the checkpoint in folder */
    int last_step; /* the run ends after this step, and saves if it is SAVE_STEP */
    int first_step;
    int rank_count; /* ranks that have found this memory: those of mpirun share none */
    double loss;    /* of the last step */
    uint64_t hash;  /* of the weights at the end */
} run;

typedef struct trainer {
    ddp_group *world;
    ddp_fsdp_param params[PARAMS]; /* of layer l: 2l weight (width[l], width[l + 1]), 2l + 1 bias */
    ddp_fsdp_unit_desc units[LAYERS];
    ddp_fsdp *fsdp;
    ddp_sampler sampler;
    ddp_fsdp_state state; /* saved with the weights: steps taken, position of the sampler */
    float out[LAYERS + 1][MICRO * INPUTS], d_out[LAYERS + 1][MICRO * INPUTS]; /* (MICRO, width) each */
    int label[MICRO];
} trainer;

/* Row b of the micro-batch: an image, or noise with a bright stripe at the place of the label. */
static void make_sample(trainer *t, int b, int64_t index) {
    uint32_t random = (uint32_t)index + 1;
    t->label[b] = data.images ? data.labels[index] : (int)(index % CLASSES);
    for (int i = 0; i < INPUTS; i++) {
        random = random * 1664525 + 1013904223;
        float noise = (float)(random >> 8) / 8388608.0f - (i / 64 == t->label[b] ? 0 : 1);
        t->out[0][b * INPUTS + i] = data.images ? (float)data.images[index * INPUTS + i] / 128 - 0.5f : noise;
    }
}

/* out[l + 1] = out[l] weight + bias, and tanh except in the last layer. */
static void forward_layer(trainer *t, int l) {
    const float *weight = (const float *)t->params[2 * l].param.value.data;
    const float *bias = (const float *)t->params[2 * l + 1].param.value.data;
    for (int b = 0; b < MICRO; b++) {
        const float *in = t->out[l] + b * width[l];
        float *out = t->out[l + 1] + b * width[l + 1];
        for (int j = 0; j < width[l + 1]; j++) {
            float sum = bias[j];
            for (int i = 0; i < width[l]; i++) sum += in[i] * weight[i * width[l + 1] + j];
            out[j] = l < LAYERS - 1 ? tanhf(sum) : sum;
        }
    }
}

/* From d_out[l + 1]: adds the gradients of weight and bias, and sets d_out[l]. */
static void backward_layer(trainer *t, int l) {
    const float *weight = (const float *)t->params[2 * l].param.value.data;
    float *d_weight = (float *)t->params[2 * l].param.grad.data;
    float *d_bias = (float *)t->params[2 * l + 1].param.grad.data;
    for (int b = 0; b < MICRO; b++) {
        const float *in = t->out[l] + b * width[l], *out = t->out[l + 1] + b * width[l + 1];
        float *d_in = t->d_out[l] + b * width[l], *d = t->d_out[l + 1] + b * width[l + 1];
        for (int j = 0; l < LAYERS - 1 && j < width[l + 1]; j++) d[j] *= 1 - out[j] * out[j];
        for (int j = 0; j < width[l + 1]; j++) d_bias[j] += d[j];
        for (int i = 0; i < width[l]; i++) {
            d_in[i] = 0;
            for (int j = 0; j < width[l + 1]; j++) {
                d_weight[i * width[l + 1] + j] += in[i] * d[j];
                d_in[i] += weight[i * width[l + 1] + j] * d[j];
            }
        }
    }
}

/* Adds the loss of the logits out[LAYERS], and sets their gradient. */
static void cross_entropy(trainer *t, ddp_mean *loss) {
    for (int b = 0; b < MICRO; b++) {
        const float *logits = t->out[LAYERS] + b * CLASSES;
        float max = logits[0], sum = 0;
        for (int j = 1; j < CLASSES; j++) max = fmaxf(max, logits[j]);
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++)
            t->d_out[LAYERS][b * CLASSES + j] = (expf(logits[j] - max) / sum - (float)(j == t->label[b]))
                                                / MICRO;
        ddp_mean_add(loss, logf(sum) + max - logits[t->label[b]], 1);
    }
}

/* Called by ddp_fsdp_create for this rank's rows: uniform weights of variance 1 / rows, bias 0. */
static ddp_result init_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const int64_t *shape = param->param.value.shape;
    int64_t columns = param->param.value.ndim == 2 ? shape[1] : 1;
    (void)user;
    memset(out, 0, sizeof(float) * (size_t)(row_count * columns));
    for (int64_t k = 0; columns > 1 && k < row_count * columns; k++) {
        uint32_t random = (uint32_t)(first_row * columns + k + shape[0]) * 2654435761u;
        random = (random ^ random >> 15) * 2246822519u;
        ((float *)out)[k] = sqrtf(3 / (float)shape[0]) * ((float)(random >> 8) / 8388608.0f - 1);
    }
    return DDP_OK;
}

static ddp_result create(trainer *t) {
    static const char *const names[PARAMS] = {"w0", "b0", "w1", "b1"};
    int ranks = ddp_world_size(t->world);
    for (int i = 0; i < PARAMS; i++) {
        ddp_tensor weight = {NULL, DDP_F32, 2, {width[i / 2], width[i / 2 + 1]}};
        ddp_tensor bias = {NULL, DDP_F32, 1, {width[i / 2 + 1]}};
        t->params[i].param = (ddp_param){.name = names[i], .value = i % 2 ? bias : weight};
        t->units[i / 2] = (ddp_fsdp_unit_desc){.params = &t->params[i / 2 * 2], .param_count = 2};
    }
    ddp_fsdp_desc desc = {.units = t->units,
                          .unit_count = LAYERS,
                          .micro_batch_count = BATCH / MICRO / ranks,
                          .optimizer = {.weight_decay = 0.01f}, /* AdamW */
                          .init_fn = init_rows,
                          .state = &t->state};
    DDP_TRY(ddp_fsdp_create(&t->fsdp, t->world, &desc));
    /* micro-batch k of rank r is number k * ranks + r of the step, on any number of ranks */
    ddp_sampler_desc sampler = {.dataset_size = SAMPLES,
                                .num_replicas = ranks,
                                .rank = ddp_rank(t->world),
                                .global_batch = MICRO * ranks};
    return ddp_sampler_init(&t->sampler, &sampler);
}

static ddp_result train_step(trainer *t, ddp_mean *loss) {
    for (int m = 0; m < BATCH / MICRO / ddp_world_size(t->world); m++) {
        for (int b = 0; b < MICRO; b++) make_sample(t, b, ddp_sampler_next(&t->sampler, NULL));
        for (int l = 0; l < LAYERS; l++) {
            DDP_TRY(ddp_fsdp_unshard(t->fsdp, l));
            forward_layer(t, l);
            DDP_TRY(ddp_fsdp_reshard(t->fsdp, l));
        }
        cross_entropy(t, loss);
        for (int l = LAYERS - 1; l >= 0; l--) {
            DDP_TRY(ddp_fsdp_unshard(t->fsdp, l));
            backward_layer(t, l);
            DDP_TRY(ddp_fsdp_reduce_grads(t->fsdp, l));
        }
    }
    return ddp_fsdp_step(t->fsdp, 0.01f);
}

/* FNV-1a over all weights, the same on every rank. */
static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    *hash = 14695981039346656037u;
    for (int i = 0; i < PARAMS; i++) {
        const ddp_tensor *value = &t->params[i].param.value;
        DDP_TRY(ddp_fsdp_unshard(t->fsdp, i / 2));
        for (int64_t k = 0; k < 4 * ddp_tensor_count(value); k++)
            *hash = (*hash ^ ((const uint8_t *)value->data)[k]) * 1099511628211u;
        DDP_TRY(ddp_fsdp_reshard(t->fsdp, i / 2));
    }
    return DDP_OK;
}

static ddp_result train(trainer *t, run *r) {
    ddp_mean loss = {0};
    DDP_TRY(create(t));
    if (r->load) {
        DDP_TRY(ddp_fsdp_load(t->fsdp, r->folder)); /* weights, moments, and t->state */
        DDP_TRY(ddp_sampler_load(&t->sampler, &t->state.sampler));
    }
    int first_step = (int)t->state.step + 1;
    for (int step = first_step; step <= r->last_step; step++) {
        if ((step - 1) % (SAMPLES / BATCH) == 0)
            ddp_sampler_set_epoch(&t->sampler, (uint64_t)(step - 1) / (SAMPLES / BATCH));
        loss = (ddp_mean){0};
        DDP_TRY(train_step(t, &loss));
    }
    if (r->last_step == SAVE_STEP) {
        DDP_TRY(ddp_sampler_save(&t->sampler, &t->state.sampler));
        DDP_TRY(ddp_fsdp_save(t->fsdp, r->folder));
    }
    DDP_TRY(ddp_mean_reduce(t->world, &loss));
    uint64_t hash;
    DDP_TRY(hash_weights(t, &hash));
    if (ddp_rank(t->world) > 0) return DDP_OK;
    r->first_step = first_step;
    r->loss = ddp_mean_value(&loss);
    r->hash = hash;
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world);
    if (BATCH / MICRO % ranks) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2 or 4", ranks);
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    t->world = world;
    __atomic_add_fetch(&((run *)user)->rank_count, 1, __ATOMIC_RELAXED);
    ddp_result result = train(t, (run *)user);
    ddp_sampler_free(&t->sampler);
    ddp_fsdp_destroy(t->fsdp);
    free(t);
    return result;
}

/* Runs the training on some ranks, and prints one line. */
static ddp_result launch(run *r, int ranks) {
    ddp_launch_desc desc = {.world_size = ranks};
    DDP_TRY(ddp_launch(&desc, rank_main, r));
    if (r->rank_count != ranks)
        return ddp_fail(DDP_ERR_INVALID, "mpirun or another launcher started the ranks: run without it");
    printf("%d rank%s  steps %2d to %2d   loss %.4f   weights %016llx", ranks, ranks > 1 ? "s" : " ",
           r->first_step, r->last_step, r->loss, (unsigned long long)r->hash);
    if (r->last_step == SAVE_STEP) printf("   saved to %s", r->folder);
    printf("\n");
    return DDP_OK;
}

static ddp_result compare(run r[3], int ranks_before, int ranks_after) {
    r[0].last_step = STEPS;
    r[1].last_step = SAVE_STEP;
    r[2].last_step = STEPS;
    r[2].load = 1;
    DDP_TRY(launch(&r[0], ranks_before));
    DDP_TRY(launch(&r[1], ranks_before));
    DDP_TRY(launch(&r[2], ranks_after));
    if (r[0].hash != r[2].hash || r[2].first_step != SAVE_STEP + 1)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "the continued run ends with other weights: check what ddp_fsdp_state restores");
    if (!(r[0].loss < 1))
        return ddp_fail(DDP_ERR_CORRUPT, "the loss is still %.4f: lower the rate", r[0].loss);
    printf("The weights are equal: the break, and the number of ranks, changed no bit.\n");
    return DDP_OK;
}

int main(int argc, char **argv) {
    int before = argc > 1 ? atoi(argv[1]) : 4, after = argc > 2 ? atoi(argv[2]) : 2;
    const char *folder = argc > 3 ? argv[3] : "saved_model";
    run *r = (run *)mmap(NULL, 3 * sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ddp_result result = DDP_OK;
    if (r == MAP_FAILED) result = ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the results");
    if (before < 1 || after < 1 || argc > 5)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks_before [ranks_after [folder [data]]]]", argv[0]);
    if (result == DDP_OK && argc > 4) result = mnist_open(argv[4], &data, NULL);
    for (int i = 0; i < 3 && result == DDP_OK; i++) r[i].folder = folder;
    if (result == DDP_OK) result = compare(r, before, after);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

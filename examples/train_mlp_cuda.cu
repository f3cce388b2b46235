/*  train_mlp_cuda.cu - a classifier of Fashion-MNIST on one to eight GPUs, with data parallelism (DDP)

        nvcc -std=c++17 -O3 -arch=native examples/train_mlp_cuda.cu -o train_mlp_cuda -lcublasLt -lnccl
        ./train_mlp_cuda                       1 GPU; a synthetic data set
        ./train_mlp_cuda --gpus 0,1,2,3 data   4 GPUs, and a folder with the files of MNIST: see train_mlp.c
    Each GPU has a rank: a process with the whole model of train_mlp.c. Four places make the program parallel:
        main       ddp_launch starts the ranks; in rank_main, ddp_cuda_group_create makes them a group
        create     every rank reads its own part of each batch
        backward   the reducer averages gradients over the GPUs while backward computes the layers below
        update     every rank waits for the averages, and makes the same step
    1, 2, 4 and 8 GPUs end with the same bits: the last line prints a hash of the weights. Ten lines end in
    "fsdp: CODE": replace each by CODE to shard the model with ddp_fsdp.h. Never run on a GPU yet. */
#define DDP_USE_CUBLASLT
#define DDP_IMPLEMENTATION
#include "../ddp_cuda.cuh"
/* fsdp: #include "../ddp_fsdp.h" */

enum { PIXELS = 784, HIDDEN = 128, CLASSES = 10, LAYERS = 4, EPOCHS = 4, MICRO = 32, BATCH = 8 * MICRO };
enum { TRAIN = 60000, TEST = 10000, WEIGHTS = HIDDEN * (PIXELS + 2 * HIDDEN + CLASSES + 3) + CLASSES };
static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, HIDDEN, CLASSES};

//== data =======================================================================================
static uint8_t images[TRAIN + TEST][PIXELS], labels[TRAIN + TEST]; /* filled in before the ranks start */

/* Each file has a header. Without a folder: noise, and a bright stripe at the height of the label. */
static ddp_result read_data(const char *folder) {
    const char *name[] = {"train-images-idx3", "t10k-images-idx3", "train-labels-idx1", "t10k-labels-idx1"};
    uint8_t *data[] = {images[0], images[TRAIN], labels, labels + TRAIN};
    size_t size[] = {TRAIN * PIXELS, TEST * PIXELS, TRAIN, TEST};
    for (int i = 0; i < 4 && folder; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s-ubyte", folder, name[i]);
        FILE *file = fopen(path, "rb");
        int ok = file && fread(data[i], i < 2 ? 16 : 8, 1, file) && fread(data[i], size[i], 1, file);
        if (file) fclose(file);
        if (!ok) return ddp_fail(DDP_ERR_INVALID, "%s is missing, or not a file of MNIST", path);
    }
    uint32_t random = 1;
    for (int i = 0; i < (TRAIN + TEST) * PIXELS && !folder; i++) {
        int label = labels[i / PIXELS] = i / PIXELS % CLASSES;
        random = random * 1664525 + 1013904223;
        images[i / PIXELS][i % PIXELS] = (random >> 25) + (i % PIXELS / 56 == label + 2 ? 60 : 0);
    }
    return DDP_OK;
}

/* Called by the loader's threads. user: not NULL for the test set. */
static ddp_result fetch(void *user, int64_t index, void *const *fields) {
    if (user) index += TRAIN;
    for (int p = 0; p < PIXELS; p++) ((float *)fields[0])[p] = images[index][p] / 128.0f - 0.5f;
    *(uint8_t *)fields[1] = labels[index];
    return labels[index] < CLASSES ? DDP_OK : ddp_fail(DDP_ERR_INVALID, "a label is not below 10");
}

//== kernels ====================================================================================
/* out (MICRO, outputs) = relu(out + bias); the last layer has no relu. A block per row. */
static __global__ void add_bias(float *out, const float *bias, int relu) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = out[i] + bias[threadIdx.x];
    out[i] = relu && sum < 0 ? 0 : sum;
}

/* d (MICRO, outputs) passes back through relu. d_bias is its sum over rows. A thread per column. */
static __global__ void backward_bias(float *d_bias, float *d, const float *out, int relu) {
    float sum = 0;
    for (unsigned i = threadIdx.x; i < MICRO * blockDim.x; i += blockDim.x) {
        if (relu && out[i] <= 0) d[i] = 0;
        sum += d[i];
    }
    d_bias[threadIdx.x] = sum;
}

/* d (MICRO, CLASSES): gradient of the mean loss. sums (2, MICRO) += loss, right answers. A thread per row. */
static __global__ void cross_entropy(float *d, float *sums, const float *out, const uint8_t *labels) {
    int row = threadIdx.x, start = row * CLASSES, label = start + labels[row];
    float max = out[start], sum = 0;
    for (int i = start; i < start + CLASSES; i++) max = out[i] > max ? out[i] : max;
    for (int i = start; i < start + CLASSES; i++) sum += expf(out[i] - max);
    for (int i = start; i < start + CLASSES; i++) d[i] = (expf(out[i] - max) / sum - (i == label)) / MICRO;
    sums[row] += logf(sum) + max - out[label];
    sums[MICRO + row] += out[label] == max;
}

//== model ======================================================================================
typedef struct gpu_memory { /* of a rank; the host only computes addresses in it */
    alignas(256) float weights[WEIGHTS], grads[WEIGHTS], m[WEIGHTS], v[WEIGHTS], pixels[MICRO * PIXELS];
    float out[LAYERS][MICRO * HIDDEN], d_out[LAYERS][MICRO * HIDDEN], sums[2 * MICRO];
    uint8_t labels[MICRO];
} gpu_memory;

typedef struct trainer {
    ddp_group *gpus;
    gpu_memory *gpu;
    ddp_loader *train, *test;
    int micro_batches, step; /* per rank and step; steps made */
    float *host_sums;        /* in pinned memory: the GPU's sums of the step before */
    cudaEvent_t summed;      /* they have arrived */
    ddp_param params[LAYERS];
    /* fsdp: ddp_fsdp_param shards[LAYERS]; ddp_fsdp_unit_desc units[LAYERS]; ddp_fsdp *fsdp; */
    ddp_param *layer[LAYERS]; /* (width[l] + 1, width[l + 1]): the weight, and the bias as last row */
    ddp_reducer *reducer;
    ddp_accumulator *sum; /* NULL with fsdp */
} trainer;

static float *weight(trainer *t, int l) { return (float *)t->layer[l]->value.data; }
static float *grad(trainer *t, int l) { return (float *)t->layer[l]->grad.data; }
static thread_local float host[WEIGHTS];

/* The accumulator adds micro-batches in the order in which the reducer adds ranks: as a binary tree. */
static ddp_result create(trainer *t) {
    static const char *const names[LAYERS] = {"layer0", "layer1", "layer2", "layer3"};
    static const ddp_tensor fields[2] = {{NULL, DDP_F32, 1, {PIXELS}}, {NULL, DDP_U8, 0, {0}}};
    ddp_loader_desc loader = DDP_ZERO;
    uint32_t random = 1;
    for (int l = 0, k = 0; l < LAYERS; l++) {
        t->layer[l] = &t->params[l];
        /* fsdp: t->layer[l] = &t->shards[l].param; t->units[l] = {NULL, t->shards + l, 1}; */
        t->layer[l]->name = names[l];
        t->layer[l]->value = ddp_tensor{t->gpu->weights + k, DDP_F32, 2, {width[l] + 1, width[l + 1]}};
        t->layer[l]->grad.data = t->gpu->grads + k;
        for (int i = 0; i < (width[l] + 1) * width[l + 1]; i++) { /* He et al. 2015: variance 2 / inputs */
            random = random * 1664525 + 1013904223;
            host[k++] = i < width[l] * width[l + 1] ? sqrtf(6.0f / width[l]) * (random / 2147483648.0f - 1)
                                                    : 0;
        }
    }
    cudaMemcpy(t->gpu->weights, host, sizeof host, cudaMemcpyHostToDevice);
    /* Rank r reads block r of each batch, so a step has the same images on any number of ranks. */
    loader.sampler.num_replicas = ddp_world_size(t->gpus);
    loader.sampler.rank = ddp_rank(t->gpus);
    loader.sampler.global_batch = BATCH; /* fsdp: loader.sampler.global_batch = BATCH / t->micro_batches; */
    loader.sampler.dataset_size = TRAIN / BATCH * BATCH;
    loader.batch_size = MICRO;
    loader.fields = fields;
    loader.field_count = 2;
    loader.fetch = fetch;
    loader.group = t->gpus;                            /* batches are in pinned memory */
    loader.extra_valid_batches = 2 * t->micro_batches; /* that the GPU can still copy, see add_sums */
    DDP_TRY(ddp_loader_create(&t->train, &loader));
    loader.sampler.dataset_size = TEST / BATCH * BATCH;
    loader.fetch_user = t;
    DDP_TRY(ddp_loader_create(&t->test, &loader));
    /* fsdp: ddp_fsdp_desc fsdp = DDP_ZERO; fsdp.units = t->units; fsdp.unit_count = LAYERS; */
    /* fsdp: fsdp.micro_batch_count = t->micro_batches; return ddp_fsdp_create(&t->fsdp, t->gpus, &fsdp); */
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc sum = DDP_ZERO;
    reducer.params = sum.params = t->layer[0];
    reducer.param_count = sum.param_count = LAYERS;
    reducer.micro_batch_count = sum.micro_batch_count = t->micro_batches;
    DDP_TRY(ddp_reducer_create(&t->reducer, t->gpus, &reducer));
    sum.reducer = t->reducer;
    return ddp_accumulator_create(&t->sum, t->gpus, &sum);
}

/* c (m, n) = op(a) (m, k) op(b) (k, n), row-major; op transposes if ta or tb is 1. */
static ddp_result gemm(trainer *t, float *c, float *a, float *b, int m, int n, int k, int ta, int tb) {
    const ddp_cuda_epilogue none = DDP_CUDA_EPILOGUE_NONE;
    ddp_cuda_gemm_desc desc = {m, n, k, a, b, c, 0, 0, 0, ta, tb, DDP_F32, 0, none, 0, 0, 0, 0, NULL};
    return ddp_cuda_gemm(t->gpus, &desc, 0);
}

/* Copies a batch to the GPU. Computes its loss, right answers and d_out. */
static ddp_result forward(trainer *t, ddp_loader *loader) {
    gpu_memory *g = t->gpu;
    ddp_batch batch;
    DDP_TRY(ddp_loader_next(loader, &batch));
    cudaMemcpyAsync(g->pixels, batch.fields[0].data, sizeof g->pixels, cudaMemcpyHostToDevice, 0);
    cudaMemcpyAsync(g->labels, batch.fields[1].data, sizeof g->labels, cudaMemcpyHostToDevice, 0);
    for (int l = 0; l < LAYERS; l++) {
        int inputs = width[l], outputs = width[l + 1];
        float *in = l ? g->out[l - 1] : g->pixels;
        /* fsdp: DDP_TRY(ddp_fsdp_unshard(t->fsdp, l)); */
        DDP_TRY(gemm(t, g->out[l], in, weight(t, l), MICRO, outputs, inputs, 0, 0));
        add_bias<<<MICRO, outputs>>>(g->out[l], weight(t, l) + inputs * outputs, l < LAYERS - 1);
    }
    cross_entropy<<<1, MICRO>>>(g->d_out[LAYERS - 1], g->sums, g->out[LAYERS - 1], g->labels);
    return DDP_OK;
}

/* The reducer sends the gradients of a layer that is ready, while the layers below are computed. */
static ddp_result backward(trainer *t) {
    gpu_memory *g = t->gpu;
    for (int l = LAYERS - 1; l >= 0; l--) {
        int inputs = width[l], outputs = width[l + 1];
        float *in = l ? g->out[l - 1] : g->pixels, *d = g->d_out[l];
        backward_bias<<<1, outputs>>>(grad(t, l) + inputs * outputs, d, g->out[l], l < LAYERS - 1);
        DDP_TRY(gemm(t, grad(t, l), in, d, inputs, outputs, MICRO, 1, 0));
        if (l > 0) DDP_TRY(gemm(t, g->d_out[l - 1], d, weight(t, l), MICRO, inputs, outputs, 0, 1));
        DDP_TRY(ddp_accumulator_ready(t->sum, l)); /* fsdp: DDP_TRY(ddp_fsdp_reduce_grads(t->fsdp, l)); */
    }
    return t->sum ? ddp_accumulator_next(t->sum, NULL) : DDP_OK;
}

/* Every rank makes the same step, so the weights stay equal. */
static ddp_result update(trainer *t) {
    ddp_cuda_step_desc adamw = DDP_ZERO;
    float lr = 2e-3f * (1 - ++t->step / (TRAIN / BATCH * EPOCHS + 1.0f));
    DDP_TRY(ddp_reducer_wait(t->reducer)); /* fsdp: return ddp_fsdp_step(t->fsdp, lr); */
    adamw.master = t->gpu->weights;
    adamw.grad = t->gpu->grads;
    adamw.first = t->gpu->m;
    adamw.second = t->gpu->v;
    adamw.count = WEIGHTS;
    adamw.step = t->step;
    adamw.lr = lr;
    return ddp_cuda_adamw(&adamw, 1, 0);
}

/* Adds the sums of the step before, while the GPU has the work of this step, and sends those of this step. */
static void add_sums(trainer *t, ddp_mean *means) {
    cudaEventSynchronize(t->summed);
    for (int i = 0; i < 2 * MICRO; i++) ddp_mean_add(&means[i / MICRO], t->host_sums[i], 0);
    cudaMemcpyAsync(t->host_sums, t->gpu->sums, sizeof t->gpu->sums, cudaMemcpyDeviceToHost, 0);
    cudaMemsetAsync(t->gpu->sums, 0, sizeof t->gpu->sums, 0);
    cudaEventRecord(t->summed);
}

/* Trains or tests for an epoch. means: loss and accuracy, over all ranks. */
static ddp_result run_epoch(trainer *t, ddp_loader *loader, int epoch, ddp_mean *means) {
    DDP_TRY(ddp_loader_set_epoch(loader, (uint64_t)epoch));
    int batches = (int)ddp_loader_length(loader);
    for (int i = 1; i <= batches; i++) {
        DDP_TRY(forward(t, loader));
        if (loader == t->train) DDP_TRY(backward(t));
        if (i % t->micro_batches) continue;
        if (loader == t->train) DDP_TRY(update(t));
        add_sums(t, means);
    }
    add_sums(t, means); /* of the last step */
    for (int i = 0; i < 2; i++) {
        ddp_mean_add(&means[i], 0, batches * MICRO);
        DDP_TRY(ddp_mean_reduce(t->gpus, &means[i]));
    }
    cudaError_t error = cudaGetLastError();
    return error ? ddp_fail(DDP_ERR_ENGINE, "%s", cudaGetErrorString(error)) : DDP_OK;
}

static ddp_result train(trainer *t) {
    uint64_t hash = 0;
    double accuracy = 0;
    DDP_TRY(create(t));
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        ddp_mean trained[2] = DDP_ZERO, tested[2] = DDP_ZERO; /* loss, accuracy */
        DDP_TRY(run_epoch(t, t->train, epoch, trained));
        DDP_TRY(run_epoch(t, t->test, 0, tested));
        accuracy = 100 * ddp_mean_value(&tested[1]);
        if (ddp_rank(t->gpus) == 0)
            printf("epoch %d/%d   loss %.4f   test accuracy %.2f%%\n", epoch + 1, EPOCHS,
                   ddp_mean_value(&trained[0]), accuracy);
    }
    for (int l = 0; l < LAYERS; l++) { /* the test has left full weights on every rank */
        size_t size_bytes = sizeof(float) * (width[l] + 1) * width[l + 1];
        cudaMemcpy(host, weight(t, l), size_bytes, cudaMemcpyDeviceToHost);
        hash = ddp_hash(hash, host, size_bytes);
    }
    if (ddp_rank(t->gpus) == 0) printf("weights %016llx\n", (unsigned long long)hash);
    return accuracy > 80 ? DDP_OK : ddp_fail(DDP_ERR_CORRUPT, "test accuracy %.2f%% is below 80%%", accuracy);
}

static ddp_result rank_main(ddp_group *world, void *) {
    ddp_cuda_desc desc = DDP_ZERO;
    trainer t = DDP_ZERO;
    desc.order = DDP_ORDER_TREE; /* the same bits on any number of GPUs */
    desc.allow_shared = 1;       /* --gpus 0,0 is slow, to try the program */
    DDP_TRY(ddp_cuda_group_create(&t.gpus, world, &desc));
    t.micro_batches = BATCH / MICRO / ddp_world_size(world);
    cudaEventCreate(&t.summed);
    cudaMallocHost(&t.host_sums, sizeof t.gpu->sums);
    memset(t.host_sums, 0, sizeof t.gpu->sums);
    ddp_result result = ddp_group_alloc(t.gpus, sizeof *t.gpu, (void **)&t.gpu); /* zeros */
    if (result == DDP_OK) result = train(&t);
    ddp_loader_destroy(t.train);
    ddp_loader_destroy(t.test);
    ddp_accumulator_destroy(t.sum);
    ddp_reducer_destroy(t.reducer);
    /* fsdp: ddp_fsdp_destroy(t.fsdp); */
    ddp_group_destroy(t.gpus); /* also frees t.gpu */
    cudaEventDestroy(t.summed);
    cudaFreeHost(t.host_sums);
    return result;
}

int main(int argc, char **argv) {
    int gpus[16] = {0}, listed = argc > 2 && strcmp(argv[1], "--gpus") == 0, count = !listed;
    ddp_launch_desc desc = DDP_ZERO;
    if (listed && argv[2][strspn(argv[2], "0123456789,")] == 0)
        for (char *gpu = strtok(argv[2], ","); gpu && count < 9; gpu = strtok(NULL, ","))
            gpus[count++] = atoi(gpu);
    desc.world_size = desc.device_count = count;
    desc.devices = gpus; /* rank r uses GPU gpus[r] */
    ddp_result result = read_data(argv[listed ? 3 : 1]);
    if (argc > (listed ? 4 : 2) || count == 0 || BATCH / MICRO % count)
        result = ddp_fail(DDP_ERR_INVALID, "usage: train_mlp_cuda [--gpus 0,1] [FOLDER]: 1, 2, 4 or 8 GPUs");
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

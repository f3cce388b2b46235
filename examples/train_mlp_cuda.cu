/*  train_mlp_cuda.cu - a classifier of Fashion-MNIST on one to eight GPUs, with data parallelism (DDP)

        nvcc -std=c++17 -O3 -arch=native examples/train_mlp_cuda.cu -o train_mlp_cuda -lcublasLt -lnccl
        ./train_mlp_cuda data                  1 GPU, and a folder with the files of MNIST: see train_mlp.c
        ./train_mlp_cuda --gpus 0,1,2,3 data   4 GPUs
        ./train_mlp_cuda --gpus 0,0 data       2 ranks share GPU 0, to try the program: slow
    Each GPU has a rank: a process with the whole model of train_mlp.c. Four places make the program parallel:
        main          ddp_launch starts the ranks; in rank_main, ddp_cuda_group_create makes them a group
        create        every rank reads its own part of each batch
        micro_batch   the reducer averages gradients over the GPUs while backward computes the layers below
        update        every rank waits for the averages, and makes the same step
    1, 2, 4 and 8 GPUs end with the same bits: the last line prints a hash of the weights. To shard the model
    with ddp_fsdp.h, replace each line that ends in a comment "fsdp: CODE" by CODE. Never run on a GPU yet. */
#define DDP_USE_CUBLASLT
#define DDP_IMPLEMENTATION
#include "../ddp_cuda.cuh"
/* fsdp: #include "../ddp_fsdp.h" */

enum { PIXELS = 784, HIDDEN = 128, CLASSES = 10, LAYERS = 4, PARAMS = 2 * LAYERS };
enum { WEIGHTS = (PIXELS + 1 + 2 * (HIDDEN + 1)) * HIDDEN + (HIDDEN + 1) * CLASSES };
enum { IMAGES = 60000, EPOCHS = 4, MICRO = 32, BATCH = 8 * MICRO, MAX_GPUS = 8 };
enum { COPIED = 0, SUMMED = 2, USED = 4, EVENTS = 5 }; /* of the first two, there are two each */
static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, HIDDEN, CLASSES};

//== data =======================================================================================
static uint8_t images[IMAGES][PIXELS], labels[IMAGES]; /* filled in before the ranks start */
static int image_count;

/* Reads a file of MNIST: a header, then size bytes for each image. Returns the number of images. */
static int read_file(const char *folder, const char *name, int header, void *out, size_t size) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    size_t count = file && fseek(file, header, SEEK_SET) == 0 ? fread(out, size, IMAGES, file) : 0;
    if (file) fclose(file);
    return (int)count;
}

static ddp_result fetch(void *, int64_t index, void *const *fields) { /* on the loader's threads */
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
    alignas(256) float values[WEIGHTS], grads[WEIGHTS], first[WEIGHTS], second[WEIGHTS];
    alignas(256) float pixels[2][MICRO * PIXELS]; /* kernels read one batch while the other one arrives */
    float out[LAYERS][MICRO * HIDDEN], d_out[LAYERS][MICRO * HIDDEN], sums[2 * MICRO];
    uint8_t labels[2][MICRO];
} gpu_memory;

typedef struct trainer {
    ddp_group *gpus;
    gpu_memory *gpu;
    cudaStream_t copies; /* of batches; all other work is on the default stream */
    cudaEvent_t event[EVENTS];
    ddp_loader *loader;
    int micro_batches, epoch, next; /* of this rank in a step; of the loader; the batch that arrives */
    float (*host_sums)[2 * MICRO];  /* of two steps, in pinned memory */
    ddp_param params[PARAMS];       /* fsdp: ddp_fsdp_param params[PARAMS]; ddp_fsdp *fsdp; */
    ddp_param *param[PARAMS];       /* of layer l: 2l weight (width[l], width[l + 1]), 2l + 1 bias */
    ddp_reducer *reducer;
    ddp_accumulator *sum;
} trainer;

static float *value(trainer *t, int i) { return (float *)t->param[i]->value.data; }
static float *grad(trainer *t, int i) { return (float *)t->param[i]->grad.data; }

static ddp_result check(const char *where) { /* the first error of CUDA calls since the last check */
    cudaError_t error = cudaGetLastError();
    return error ? ddp_fail(DDP_ERR_ENGINE, "%s: %s", where, cudaGetErrorString(error)) : DDP_OK;
}

/* The reducer broadcasts the weights of rank 0, and averages gradients. The accumulator adds micro-batches in
   the order in which the reducer adds ranks: as a binary tree. */
static ddp_result create(trainer *t) {
    static const char *const names[] = {"w0", "b0", "w1", "b1", "w2", "b2", "w3", "b3"};
    static const ddp_tensor fields[2] = {{NULL, DDP_F32, 1, {PIXELS}}, {NULL, DDP_U8, 0, {0}}};
    static thread_local float host[WEIGHTS];
    uint32_t random = 1;
    for (int i = 0, k = 0; i < PARAMS; i++) {
        int rows = i % 2 ? 1 : width[i / 2], columns = width[i / 2 + 1];
        t->param[i] = &t->params[i]; /* fsdp: t->param[i] = &t->params[i].param; */
        t->param[i]->name = names[i];
        t->param[i]->value = ddp_tensor{t->gpu->values + k, DDP_F32, 2, {rows, columns}};
        t->param[i]->grad.data = t->gpu->grads + k;
        for (int end = k + rows * columns; k < end; k++) { /* He et al. 2015: variance 2 / inputs */
            random = random * 1664525 + 1013904223;
            host[k] = i % 2 ? 0 : sqrtf(6.0f / rows) * ((random >> 8) / 8388608.0f - 1);
        }
    }
    cudaMemcpy(t->gpu->values, host, sizeof host, cudaMemcpyHostToDevice);
    /* Rank r reads block r of each batch, so a step has the same images on any number of ranks. */
    ddp_loader_desc loader = DDP_ZERO;
    loader.sampler.dataset_size = image_count / BATCH * BATCH;
    loader.sampler.num_replicas = ddp_world_size(t->gpus);
    loader.sampler.rank = ddp_rank(t->gpus);
    loader.sampler.global_batch = BATCH; /* fsdp: loader.sampler.global_batch = BATCH / t->micro_batches; */
    loader.batch_size = MICRO;
    loader.fields = fields;
    loader.field_count = 2;
    loader.fetch = fetch;
    loader.group = t->gpus; /* batches are in pinned memory */
    DDP_TRY(ddp_loader_create(&t->loader, &loader));
    /* fsdp: ddp_fsdp_desc fsdp = DDP_ZERO; ddp_fsdp_unit_desc units[LAYERS] = DDP_ZERO; */
    /* fsdp: for (int l = 0; l < LAYERS; l++) units[l] = ddp_fsdp_unit_desc{NULL, t->params + 2 * l, 2}; */
    /* fsdp: fsdp.units = units; fsdp.unit_count = LAYERS; fsdp.micro_batch_count = t->micro_batches; */
    /* fsdp: fsdp.optimizer.weight_decay = 0.01f; return ddp_fsdp_create(&t->fsdp, t->gpus, &fsdp); */
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc sum = DDP_ZERO;
    reducer.params = sum.params = t->param[0];
    reducer.param_count = sum.param_count = PARAMS;
    reducer.micro_batch_count = sum.micro_batch_count = t->micro_batches;
    DDP_TRY(ddp_reducer_create(&t->reducer, t->gpus, &reducer));
    sum.reducer = t->reducer;
    return ddp_accumulator_create(&t->sum, t->gpus, &sum);
}

/* Starts to copy a batch to the GPU, after the kernels in flight. The loader overwrites the last batch but
   one: its copy must have ended. */
static ddp_result start_copy(trainer *t) {
    float *pixels = t->gpu->pixels[t->next];
    ddp_batch batch;
    cudaEventSynchronize(t->event[COPIED + t->next]);
    DDP_TRY(ddp_loader_next(t->loader, &batch));
    if (batch.count == 0) DDP_TRY(ddp_loader_set_epoch(t->loader, (uint64_t)++t->epoch));
    if (batch.count == 0) DDP_TRY(ddp_loader_next(t->loader, &batch));
    cudaEventRecord(t->event[USED]);
    cudaStreamWaitEvent(t->copies, t->event[USED], 0);
    cudaMemcpyAsync(pixels, batch.fields[0].data, MICRO * PIXELS * 4, cudaMemcpyHostToDevice, t->copies);
    cudaMemcpyAsync(t->gpu->labels[t->next], batch.fields[1].data, MICRO, cudaMemcpyHostToDevice, t->copies);
    cudaEventRecord(t->event[COPIED + t->next], t->copies);
    return check("start_copy");
}

/* c (m, n) = op(a) (m, k) op(b) (k, n), row-major, no gaps. op transposes a if ta is 1, and b if tb is 1. */
static ddp_result gemm(trainer *t, float *c, float *a, float *b, int m, int n, int k, int ta, int tb) {
    ddp_cuda_epilogue none = DDP_CUDA_EPILOGUE_NONE;
    ddp_cuda_gemm_desc desc = {m, n, k, a, b, c, 0, 0, 0, ta, tb, DDP_F32, 0, none, 0, 0, 0, 0, NULL};
    return ddp_cuda_gemm(t->gpus, &desc, 0);
}

/* Forward and backward. Meanwhile the next batch arrives, and the reducer sends gradients that are ready. */
static ddp_result micro_batch(trainer *t) {
    gpu_memory *g = t->gpu;
    float *in[] = {g->pixels[t->next], g->out[0], g->out[1], g->out[2], g->out[3]}; /* of layer l: in[l] */
    float *d[] = {NULL, g->d_out[0], g->d_out[1], g->d_out[2], g->d_out[3]};        /* their gradients */
    cudaStreamWaitEvent(0, t->event[COPIED + t->next], 0);
    t->next = !t->next;
    DDP_TRY(start_copy(t));
    for (int l = 0; l < LAYERS; l++) {
        /* fsdp: DDP_TRY(ddp_fsdp_unshard(t->fsdp, l)); */
        DDP_TRY(gemm(t, in[l + 1], in[l], value(t, 2 * l), MICRO, width[l + 1], width[l], 0, 0));
        add_bias<<<MICRO, width[l + 1]>>>(in[l + 1], value(t, 2 * l + 1), l < LAYERS - 1);
        /* fsdp: DDP_TRY(ddp_fsdp_reshard(t->fsdp, l)); */
    }
    cross_entropy<<<1, MICRO>>>(d[LAYERS], g->sums, in[LAYERS], g->labels[!t->next]);
    for (int l = LAYERS - 1; l >= 0; l--) {
        /* fsdp: DDP_TRY(ddp_fsdp_unshard(t->fsdp, l)); */
        backward_bias<<<1, width[l + 1]>>>(grad(t, 2 * l + 1), d[l + 1], in[l + 1], l < LAYERS - 1);
        DDP_TRY(gemm(t, grad(t, 2 * l), in[l], d[l + 1], width[l], width[l + 1], MICRO, 1, 0));
        if (l > 0) DDP_TRY(gemm(t, d[l], d[l + 1], value(t, 2 * l), MICRO, width[l], width[l + 1], 0, 1));
        DDP_TRY(ddp_accumulator_ready(t->sum, 2 * l + 1)); /* fsdp: */
        DDP_TRY(ddp_accumulator_ready(t->sum, 2 * l)); /* fsdp: DDP_TRY(ddp_fsdp_reduce_grads(t->fsdp, l)); */
    }
    return ddp_accumulator_next(t->sum, NULL); /* fsdp: return DDP_OK; */
}

/* Every rank makes the same step, so the weights stay equal. */
static ddp_result update(trainer *t, int step, float lr) {
    ddp_cuda_step_desc adamw = DDP_ZERO;
    DDP_TRY(ddp_reducer_wait(t->reducer)); /* fsdp: return ddp_fsdp_step(t->fsdp, lr); */
    adamw.master = t->gpu->values;
    adamw.grad = t->gpu->grads;
    adamw.first = t->gpu->first;
    adamw.second = t->gpu->second;
    adamw.count = WEIGHTS;
    adamw.step = step;
    adamw.lr = lr;
    adamw.weight_decay = 0.01f;
    return ddp_cuda_adamw(&adamw, 1, 0);
}

static ddp_result train(trainer *t) {
    static thread_local uint8_t host[sizeof(float) * PIXELS * HIDDEN];
    int epoch_steps = image_count / BATCH, steps = EPOCHS * epoch_steps;
    double totals[EPOCHS][2] = {}, rows = epoch_steps * t->micro_batches * MICRO; /* of this rank */
    uint64_t hash = 14695981039346656037u;
    DDP_TRY(create(t));
    DDP_TRY(start_copy(t));
    for (int step = 1; step <= steps + 1; step++) {
        for (int m = 0; m < t->micro_batches && step <= steps; m++) DDP_TRY(micro_batch(t));
        if (step <= steps) DDP_TRY(update(t, step, 2e-3f * (1 - step / (steps + 1.0f))));
        cudaMemcpyAsync(t->host_sums[step % 2], t->gpu->sums, sizeof t->gpu->sums, cudaMemcpyDeviceToHost, 0);
        cudaMemsetAsync(t->gpu->sums, 0, sizeof t->gpu->sums, 0);
        cudaEventRecord(t->event[SUMMED + step % 2]);
        if (step == 1) continue;
        /* The sums of the step before. While the host waits for them, the GPU has the work of this step. */
        int epoch = (step - 2) / epoch_steps, slot = !(step % 2);
        cudaEventSynchronize(t->event[SUMMED + slot]);
        for (int i = 0; i < 2 * MICRO; i++) totals[epoch][i / MICRO] += t->host_sums[slot][i];
        if ((step - 1) % epoch_steps == 0 && ddp_rank(t->gpus) == 0)
            printf("epoch %d/%d   loss %.4f   accuracy %.2f%%\n", epoch + 1, EPOCHS, totals[epoch][0] / rows,
                   100 * totals[epoch][1] / rows);
    }
    for (int i = 0; i < PARAMS; i++) {
        size_t size_bytes = sizeof(float) * (i % 2 ? 1 : width[i / 2]) * width[i / 2 + 1];
        /* fsdp: DDP_TRY(ddp_fsdp_unshard(t->fsdp, i / 2)); */
        cudaMemcpy(host, value(t, i), size_bytes, cudaMemcpyDeviceToHost);
        for (size_t k = 0; k < size_bytes; k++) hash = (hash ^ host[k]) * 1099511628211u;
    }
    if (ddp_rank(t->gpus) == 0) printf("weights %016llx\n", (unsigned long long)hash);
    return totals[EPOCHS - 1][1] > 0.8 * rows ? check("train")
                                              : ddp_fail(DDP_ERR_CORRUPT, "accuracy below 80%%");
}

static ddp_result rank_main(ddp_group *world, void *) {
    ddp_cuda_desc desc = DDP_ZERO;
    trainer t = DDP_ZERO;
    desc.order = DDP_ORDER_TREE; /* the same bits on any number of GPUs */
    desc.allow_shared = 1;       /* --gpus 0,0 is no error */
    DDP_TRY(ddp_cuda_group_create(&t.gpus, world, &desc));
    t.micro_batches = BATCH / MICRO / ddp_world_size(world);
    cudaStreamCreateWithFlags(&t.copies, cudaStreamNonBlocking);
    for (int i = 0; i < EVENTS; i++) cudaEventCreate(&t.event[i]);
    cudaMallocHost(&t.host_sums, 2 * sizeof t.gpu->sums);
    ddp_result result = ddp_group_alloc(t.gpus, sizeof *t.gpu, (void **)&t.gpu); /* zeros */
    if (result == DDP_OK) result = train(&t);
    ddp_loader_destroy(t.loader);
    ddp_accumulator_destroy(t.sum);
    ddp_reducer_destroy(t.reducer);
    /* fsdp: ddp_fsdp_destroy(t.fsdp); */
    ddp_group_destroy(t.gpus); /* also frees t.gpu */
    cudaStreamDestroy(t.copies);
    for (int i = 0; i < EVENTS; i++) cudaEventDestroy(t.event[i]);
    cudaFreeHost(t.host_sums);
    return result;
}

/* "0,2,3": the GPU of each rank. Returns their number, 0 for another text. */
static int parse_gpus(const char *text, int *gpus) {
    char *end = NULL;
    for (int count = 0; *text >= '0' && *text <= '9' && count < MAX_GPUS; text = end + 1) {
        gpus[count++] = (int)strtol(text, &end, 10);
        if (*end != ',') return *end ? 0 : count;
    }
    return 0;
}

int main(int argc, char **argv) {
    int gpus[MAX_GPUS] = {0};
    const char *folder = argv[argc - 1];
    ddp_launch_desc desc = DDP_ZERO;
    ddp_result result = DDP_OK;
    desc.world_size = desc.device_count = argc == 4 ? parse_gpus(argv[2], gpus) : 1;
    desc.devices = gpus;
    image_count = read_file(folder, "train-images-idx3-ubyte", 16, images, PIXELS);
    if (argc != 2 && (argc != 4 || strcmp(argv[1], "--gpus")))
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [--gpus 0,1] FOLDER", argv[0]);
    else if (desc.world_size == 0 || BATCH / MICRO % desc.world_size)
        result = ddp_fail(DDP_ERR_INVALID, "--gpus %s: use a list of 1, 2, 4 or 8 GPUs, such as 0,1",
                          argv[2]);
    else if (image_count < BATCH || read_file(folder, "train-labels-idx1-ubyte", 8, labels, 1) != image_count)
        result = ddp_fail(DDP_ERR_INVALID, "%s: the files train-*-ubyte of MNIST are missing", folder);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

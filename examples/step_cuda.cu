/*  step_cuda.cu - the kernels of a training step on GPUs, called one by one.

    nvcc -std=c++17 -O3 -arch=native examples/step_cuda.cu -o step_cuda -lnccl -lpthread
    ./step_cuda             one rank
    ./step_cuda 4           four ranks; ranks share GPUs, through host memory, where there are fewer
    With -DDDP_USE_CUBLASLT -lcublasLt it also multiplies two matrices.

    A step of ddp_reducer or ddp_fsdp calls these kernels itself. A trainer that has its own step can use them
    directly. Two tensors learn fixed targets: w0 by AdamW, w1 by SGD with momentum. A step:

        gradients of two micro-batches --reduce_tree--> sums --flatten--> one buffer --all_reduce--> averages
        --unflatten--> gradients --unscale--> norm, count of infinities and NaNs --adamw, sgd--> new values

    All work is enqueued on one stream. The host waits only for the norm that it prints. */
#define DDP_IMPLEMENTATION
#include "../ddp_cuda.cuh"
#if defined(DDP_USE_CUBLASLT)
#include "../ddp_tensor.h" /* ddp_gemm */
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TENSORS = 2, MICRO_BATCHES = 2, STEPS = 200 };
static const size_t size[TENSORS] = {600, 1000};
static const size_t total = 1600;

typedef struct trainer {
    ddp_group *world, *gpus;
    cudaStream_t stream;
    const ddp_device *device;
    float *value[TENSORS], *minus_target[TENSORS]; /* all pointers: device memory */
    float *micro_grad[TENSORS][MICRO_BATCHES], *grad[TENSORS];
    float *first[TENSORS], *second; /* moments; SGD has only the first */
    uint16_t *copy;                 /* w0 in bf16, for a forward in 16 bits */
    float *flat;                    /* all gradients in one buffer: one all-reduce */
    ddp_cuda_norm *norm;
} trainer;

static ddp_result check(cudaError_t error, const char *call) {
    if (error == cudaSuccess) return DDP_OK;
    return ddp_fail(DDP_ERR_ENGINE, "%s: %s", call, cudaGetErrorString(error));
}

static ddp_result alloc(trainer *t, size_t size_bytes, void *out) {
    return ddp_group_alloc(t->gpus, size_bytes, (void **)out);
}

static ddp_result create_tensors(trainer *t) {
    static thread_local float host[1000];
    DDP_TRY(alloc(t, total * sizeof(float), &t->flat));
    DDP_TRY(alloc(t, size[0] * sizeof(float), &t->second));
    DDP_TRY(alloc(t, size[0] * sizeof(uint16_t), &t->copy));
    DDP_TRY(alloc(t, sizeof *t->norm, &t->norm));
    for (int i = 0; i < TENSORS; i++) {
        size_t size_bytes = size[i] * sizeof(float);
        DDP_TRY(alloc(t, size_bytes, &t->value[i]));
        DDP_TRY(alloc(t, size_bytes, &t->minus_target[i]));
        DDP_TRY(alloc(t, size_bytes, &t->grad[i]));
        DDP_TRY(alloc(t, size_bytes, &t->first[i]));
        for (int m = 0; m < MICRO_BATCHES; m++) DDP_TRY(alloc(t, size_bytes, &t->micro_grad[i][m]));
        for (size_t k = 0; k < size[i]; k++) host[k] = -sinf((float)k);
        t->device->copy(t->minus_target[i], host, size_bytes);
    }
    return ddp_cuda_check();
}

/* The gradient of a micro-batch: value - target, by functions of the device table. */
static ddp_result backward(trainer *t) {
    for (int i = 0; i < TENSORS; i++)
        for (int m = 0; m < MICRO_BATCHES; m++)
            t->device->add(t->micro_grad[i][m], t->value[i], t->minus_target[i], size[i], DDP_F32);
    return ddp_cuda_check();
}

/* Averages the gradients over micro-batches and ranks. */
static ddp_result reduce(trainer *t) {
    ddp_cuda_range ranges[TENSORS];
    size_t offset = 0;
    for (int i = 0; i < TENSORS; i++) {
        void *sum[1] = {t->grad[i]};
        const void *parts[MICRO_BATCHES] = {t->micro_grad[i][0], t->micro_grad[i][1]};
        DDP_TRY(ddp_cuda_reduce_tree(sum, 1, parts, MICRO_BATCHES, size[i], DDP_F32, DDP_OP_AVG,
                                     MICRO_BATCHES, t->stream));
        ranges[i].data = t->grad[i];
        ranges[i].count = size[i];
        ranges[i].offset = offset;
        offset += size[i];
    }
    DDP_TRY(ddp_cuda_flatten(t->flat, DDP_F32, ranges, TENSORS, DDP_F32, 1, t->stream));
    DDP_TRY(ddp_all_reduce(t->gpus, t->flat, t->flat, total, DDP_F32, DDP_OP_AVG, NULL));
    return ddp_cuda_unflatten(t->flat, DDP_F32, ranges, TENSORS, DDP_F32, 1, t->stream);
}

/* A step with a NaN or an infinity in a gradient changes nothing: skip points to their number. */
static ddp_result update(trainer *t, int step) {
    ddp_cuda_step_desc desc = DDP_ZERO;
    t->device->fill_zero(t->norm, sizeof *t->norm);
    for (int i = 0; i < TENSORS; i++)
        DDP_TRY(ddp_cuda_unscale(t->grad[i], 1, size[i], DDP_F32, 1, t->norm, t->stream));
    desc.step = step;
    desc.skip = &t->norm->non_finite;
    desc.lr = 0.05f;
    desc.master = t->value[0];
    desc.grad = t->grad[0];
    desc.first = t->first[0];
    desc.second = t->second;
    desc.copy = t->copy;
    desc.count = size[0];
    DDP_TRY(ddp_cuda_adamw(&desc, 1, t->stream));
    desc.master = t->value[1];
    desc.grad = t->grad[1];
    desc.first = t->first[1];
    desc.second = NULL;
    desc.copy = NULL;
    desc.count = size[1];
    desc.momentum = 0.9f;
    return ddp_cuda_sgd(&desc, 1, t->stream);
}

/* The norm of all gradients: a copy to the host waits for the stream. */
static ddp_result read_norm(trainer *t, double *norm) {
    ddp_cuda_norm host;
    t->device->copy(&host, t->norm, sizeof host);
    DDP_TRY(ddp_cuda_check());
    if (host.non_finite)
        return ddp_fail(DDP_ERR_CORRUPT, "%lld gradients are not finite", (long long)host.non_finite);
    *norm = sqrt(ddp_exact_sum_value(&host.squares));
    return DDP_OK;
}

/* w0 as 8-bit numbers with one scale per block, and back. Returns the largest difference. */
static ddp_result quantize(trainer *t, float *error) {
    size_t blocks = (size[0] + DDP_CUDA_QUANT_BLOCK - 1) / DDP_CUDA_QUANT_BLOCK;
    int8_t *q;
    float *scales, before[600], after[600];
    DDP_TRY(alloc(t, size[0], &q));
    DDP_TRY(alloc(t, blocks * sizeof(float), &scales));
    DDP_TRY(ddp_cuda_quantise8(q, scales, t->value[0], DDP_F32, size[0], t->stream));
    DDP_TRY(ddp_cuda_dequantise8(t->grad[0], DDP_F32, q, scales, size[0], t->stream));
    t->device->copy(before, t->value[0], sizeof before);
    t->device->copy(after, t->grad[0], sizeof after);
    *error = 0;
    for (size_t i = 0; i < size[0]; i++) *error = fmaxf(*error, fabsf(before[i] - after[i]));
    DDP_TRY(ddp_group_free(t->gpus, q));
    DDP_TRY(ddp_group_free(t->gpus, scales));
    return ddp_cuda_check();
}

#if defined(DDP_USE_CUBLASLT)
/* Times the algorithms of cuBLASLt for a product, and loads a table with the fastest one. For a whole model,
   and with more care, bench/gpu/bench_gpt.cu --tune does so. */
static ddp_result tune(trainer *t, ddp_cuda_gemm_desc *desc) {
    ddp_cuda_gemm_algo algos[8];
    cudaEvent_t begin, end;
    char path[64];
    int count, fastest = 0, used;
    float best_ms = 0;
    DDP_TRY(check(cudaEventCreate(&begin), "cudaEventCreate"));
    DDP_TRY(check(cudaEventCreate(&end), "cudaEventCreate"));
    DDP_TRY(ddp_cuda_gemm_algos(t->gpus, desc, algos, 8, &count));
    for (int i = 0; i < count; i++) {
        float ms;
        desc->algo = &algos[i];
        DDP_TRY(check(cudaEventRecord(begin, t->stream), "cudaEventRecord"));
        DDP_TRY(ddp_cuda_gemm(t->gpus, desc, t->stream));
        DDP_TRY(check(cudaEventRecord(end, t->stream), "cudaEventRecord"));
        DDP_TRY(check(cudaEventSynchronize(end), "cudaEventSynchronize"));
        DDP_TRY(check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime"));
        if (i > 0 && ms >= best_ms) continue;
        best_ms = ms;
        fastest = i;
    }
    desc->algo = NULL;
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    /* Every rank needs the same table: rank 0 writes it. */
    int64_t id = getpid();
    DDP_TRY(ddp_broadcast(t->world, &id, 1, DDP_I64, 0, NULL));
    snprintf(path, sizeof path, "step_cuda_%lld.txt", (long long)id);
    ddp_result result = DDP_OK;
    if (ddp_rank(t->world) == 0) result = ddp_cuda_gemm_save(t->gpus, path, desc, &algos[fastest], 1);
    if (result == DDP_OK) result = ddp_barrier(t->world);
    if (result == DDP_OK) result = ddp_cuda_gemm_load(t->gpus, path, &used);
    if (ddp_rank(t->world) == 0) remove(path);
    return result;
}

/* flat (4, 4) = a (4, 8) times b (8, 4), in f32, and by the function that layers of ddp_tensor.h may use for
   TF32. All elements of a are 1, of b 2. */
static ddp_result multiply(trainer *t) {
    float ones[32], twos[32], product[16];
    for (int i = 0; i < 32; i++) {
        ones[i] = 1;
        twos[i] = 2;
    }
    t->device->copy(t->grad[0], ones, sizeof ones);
    t->device->copy(t->grad[1], twos, sizeof twos);
    ddp_gemm of_layer = {4, 4, 8, 8, 4, 4, t->grad[0], t->grad[1], t->flat, DDP_F32, 0, 0, 0};
    ddp_cuda_gemm_desc desc = DDP_ZERO;
    desc.m = 4;
    desc.n = 4;
    desc.k = 8;
    desc.a = t->grad[0];
    desc.b = t->grad[1];
    desc.c = t->flat;
    for (int tf32 = 0; tf32 < 2; tf32++) {
        DDP_TRY(tf32 ? ddp_cuda_gemm_tf32(&of_layer, t->gpus) : ddp_cuda_gemm(t->gpus, &desc, t->stream));
        t->device->copy(product, t->flat, sizeof product);
        DDP_TRY(ddp_cuda_check());
        for (int i = 0; i < 16; i++)
            if (product[i] != 16)
                return ddp_fail(DDP_ERR_CORRUPT, "a product is %g, not 16", (double)product[i]);
    }
    return tune(t, &desc);
}
#endif

static ddp_result train(trainer *t) {
    double norm = 0, first_norm = 0;
    float error;
    DDP_TRY(create_tensors(t));
    for (int step = 1; step <= STEPS; step++) {
        DDP_TRY(backward(t));
        DDP_TRY(reduce(t));
        DDP_TRY(update(t, step));
        if (step > 1 && step % 50) continue;
        DDP_TRY(read_norm(t, &norm));
        if (step == 1) first_norm = norm;
        if (ddp_rank(t->gpus) == 0) printf("step %3d   norm of the gradients %.6f\n", step, norm);
    }
    if (!(norm < 0.01 * first_norm))
        return ddp_fail(DDP_ERR_CORRUPT, "the norm fell from %g only to %g", first_norm, norm);
    DDP_TRY(quantize(t, &error));
    if (ddp_rank(t->gpus) == 0) printf("8-bit values differ by at most %.5f\n", (double)error);
    if (!(error > 0 && error <= 1.01f / 253.9f)) /* the largest magnitude is near 1 */
        return ddp_fail(DDP_ERR_CORRUPT, "8-bit values differ by %g", (double)error);
#if defined(DDP_USE_CUBLASLT)
    DDP_TRY(multiply(t));
    if (ddp_rank(t->gpus) == 0) printf("products are right\n");
#endif
    return DDP_OK;
}

static ddp_result run(ddp_group *world, void *user) {
    ddp_cuda_pick_desc pick = DDP_ZERO;
    ddp_cuda_desc desc = DDP_ZERO;
    trainer t = DDP_ZERO;
    int device;
    (void)user;
    t.world = world;
    pick.allow_shared = 1; /* ranks may share a GPU, to try the program on one */
    desc.allow_shared = 1;
    desc.order = DDP_ORDER_TREE; /* the same bits as on CPUs */
    DDP_TRY(ddp_cuda_pick(world, &pick, &device));
    DDP_TRY(ddp_cuda_group_create(&t.gpus, world, &desc));
    t.device = ddp_device_cuda();
    ddp_result result = check(cudaStreamCreateWithFlags(&t.stream, cudaStreamNonBlocking),
                              "cudaStreamCreate");
    if (result == DDP_OK) result = ddp_cuda_set_stream(t.gpus, t.stream); /* for calls on the group */
    cudaStream_t previous = ddp_cuda_use_stream(t.stream);                /* for functions of the device */
    if (result == DDP_OK) result = train(&t);
    ddp_cuda_use_stream(previous);
    if (result == DDP_OK) /* no collective is in flight */
        result = check(cudaStreamSynchronize(ddp_cuda_comm_stream(t.gpus)), "cudaStreamSynchronize");
    ddp_group_destroy(t.gpus); /* frees the memory of ddp_group_alloc */
    if (t.stream) cudaStreamDestroy(t.stream);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = argc > 1 ? atoi(argv[1]) : 1;
    ddp_result result = DDP_OK;
    if (desc.world_size < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, run, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

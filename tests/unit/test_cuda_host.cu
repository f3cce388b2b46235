/*  test_cuda_host.cu - ddp_cuda.cuh without a device: a table of CUDA runtime calls emulated on the CPU
    replaces the real one.

    Proves, on the CPU, the element code, dispatch and work division of every kernel (support/cuda_kernels.h),
    every message of device selection on one rank and on several, and the handling of CUDA errors. It proves
    nothing about a GPU. */
#include <stddef.h>
#include <stdint.h>
#if !defined(DDP_NO_NCCL)
#define DDP_NO_NCCL
#endif
#include "../support/host_only.h"

struct ddp__cuda_runtime;
static const struct ddp__cuda_runtime *fake_runtime(void);
#define DDP__CUDA_RUNTIME fake_runtime()

/* The CPU does not mind misaligned groups, a GPU does. */
size_t grouped, misaligned;
inline void seen(int n, const void *address, size_t size_bytes) {
    grouped += n > 1;
    misaligned += n > 1 && (uintptr_t)address % (size_bytes < 16 ? size_bytes : 16) != 0;
}
#define DDP__CUDA_RECORD_ACCESS(n, address, size_bytes) seen(n, address, size_bytes)
#define DDP_CUDA_IMPLEMENTATION
#include "../../ddp_cuda.cuh"
#include "../support/inner.h"
#define ddp__cast inner.cast /* of the object with the bodies of ddp.h */
#define ddp__reduce_tree inner.reduce_tree
#define ddp__update_f32 inner.update_f32
#define ddp__update_f64 inner.update_f64
#include "../support/cuda_kernels.h"

/* ---- the fake ---- */

static struct {
    int count;
    cudaError_t count_error;
    int set;
    unsigned char first_byte[16];
    int one_each;
    int no_set_plus_1; /* 1 + the rank on which cudaSetDevice fails; 0 = none */
} machine;
static __thread int rank_of_thread, current_device;
static struct {
    int launches;
    unsigned largest_grid;
    cudaStream_t stream;
    cudaError_t answer;
    cudaError_t malloc_answer;
    int waits;
} record;
static cudaError_t copy_answer; /* of copies, memset and cudaFree */
static int kernels_run = 1;

static cudaError_t fake_device_count(int *count) {
    *count = machine.count;
    return machine.count_error;
}
static cudaError_t fake_identity(int device, char name[256], unsigned char uuid[16]) {
    snprintf(name, 256, "Fake %d", device);
    memset(uuid, 0xab, 16);
    uuid[0] = machine.one_each ? (unsigned char)(rank_of_thread + 1) : machine.first_byte[device];
    uuid[15] = (unsigned char)device;
    return cudaSuccess;
}
static cudaError_t fake_set_device(int device) {
    __atomic_store_n(&machine.set, device, __ATOMIC_RELAXED);
    current_device = device;
    return machine.no_set_plus_1 == rank_of_thread + 1 ? cudaErrorDevicesUnavailable : cudaSuccess;
}
static cudaError_t fake_get_device(int *device) {
    *device = current_device;
    return cudaSuccess;
}
static cudaError_t fake_malloc(void **out, size_t size_bytes) {
    if (record.malloc_answer != cudaSuccess) return record.malloc_answer;
    if (posix_memalign(out, 256, size_bytes) != 0) return cudaErrorMemoryAllocation;
    memset(*out, 0xee, size_bytes);
    return cudaSuccess;
}
static cudaError_t fake_free(void *memory) {
    free(memory);
    return copy_answer;
}
static cudaError_t fake_memcpy(void *dst, const void *src, size_t size_bytes, cudaMemcpyKind kind,
                               cudaStream_t stream) {
    (void)kind;
    record.stream = stream;
    memmove(dst, src, size_bytes);
    return copy_answer;
}
static cudaError_t fake_memset(void *dst, int value, size_t size_bytes, cudaStream_t stream) {
    record.stream = stream;
    memset(dst, value, size_bytes);
    return copy_answer;
}
static cudaError_t fake_synchronize(cudaStream_t stream) {
    (void)stream;
    record.waits++;
    return cudaSuccess;
}
/* Odd addresses are device memory. */
static cudaError_t fake_is_device(const void *pointer, int *yes) {
    *yes = (uintptr_t)pointer % 2;
    return cudaSuccess;
}
static cudaError_t fake_launch(const void *kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared_bytes, cudaStream_t stream) {
    record.launches += kernel && arguments && shared_bytes == 0 && block.x == 256 && block.y == 1
                       && block.z == 1 && grid.y == 1;
    if (grid.x > record.largest_grid) record.largest_grid = grid.x;
    record.stream = stream;
    return record.answer;
}
static cudaError_t fake_clear(void) { return cudaSuccess; }
static cudaError_t fake_host_work(void (*run)(void *copy), const void *argument, size_t argument_bytes,
                                  cudaStream_t stream) {
    void *copy = NULL;
    if (posix_memalign(&copy, 64, argument_bytes) != 0) return cudaErrorMemoryAllocation;
    memcpy(copy, argument, argument_bytes);
    record.stream = stream;
    run(copy);
    free(copy);
    return cudaSuccess;
}

/* Streams and events are not used here: they are NULL. */
#define FAKE_CALLS                                                                                          \
    fake_device_count, fake_identity, fake_set_device, fake_malloc, fake_free, fake_memcpy, fake_memset,    \
        fake_synchronize, fake_is_device, fake_launch, fake_clear, fake_get_device, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, fake_host_work
static const struct ddp__cuda_runtime *fake_runtime(void) {
    static const ddp__cuda_runtime on_host = {1, FAKE_CALLS}, recorded = {0, FAKE_CALLS};
    return kernels_run ? &on_host : &recorded;
}

/* ---- choosing a device ---- */

static char host[64];

static void says(ddp_result result, ddp_result wanted, const char *sentence) {
    check_that(result == wanted && strcmp(ddp_last_error(), sentence) == 0,
               "%s, and the line is\n  %s\ninstead of\n  %s", ddp_result_name(result), ddp_last_error(),
               sentence);
}

static void check_pick_alone(void) {
    static const int list[] = {2, 9};
    char line[512];
    int device = 7;
    ddp_cuda_pick_desc desc = DDP_ZERO;
    gethostname(host, sizeof host - 1);
    machine.count = 0;
    machine.count_error = cudaErrorNoDevice;
    snprintf(line, sizeof line,
             "ddp_cuda_pick: on host %s: device 0 (the local rank) does not exist on this machine, which has "
             "none; check nvidia-smi and CUDA_VISIBLE_DEVICES",
             host);
    says(ddp_cuda_pick(NULL, NULL, &device), DDP_ERR_INVALID, line);
    check_that(device == -1, "device is %d after a failure", device);
    machine.count_error = cudaErrorInsufficientDriver;
    snprintf(
        line, sizeof line,
        "ddp_cuda_pick: on host %s: on this machine: cudaGetDeviceCount: %s (cudaErrorInsufficientDriver)",
        host, cudaGetErrorString(cudaErrorInsufficientDriver));
    says(ddp_cuda_pick(NULL, NULL, &device), DDP_ERR_ENGINE, line);
    machine.count_error = cudaSuccess;
    machine.count = 3;
    check_that(ddp_cuda_pick(NULL, NULL, &device) == DDP_OK && device == 0 && machine.set == 0, "%s",
               ddp_last_error());
    desc.devices = list;
    desc.device_count = 1;
    check_that(ddp_cuda_pick(NULL, &desc, &device) == DDP_OK && device == 2 && machine.set == 2, "%s",
               ddp_last_error());
    desc.devices = list + 1;
    snprintf(line, sizeof line,
             "ddp_cuda_pick: on host %s: device 9 does not exist on this machine, which has 0 (Fake 0), 1 "
             "(Fake 1), 2 (Fake 2)",
             host);
    says(ddp_cuda_pick(NULL, &desc, &device), DDP_ERR_INVALID, line);
    machine.count = 8;
    snprintf(line, sizeof line,
             "ddp_cuda_pick: on host %s: device 9 does not exist on this machine, which has 0 (Fake 0), 1 "
             "(Fake 1), 2 (Fake 2), 3 (Fake 3) and 4 more, up to 7",
             host);
    says(ddp_cuda_pick(NULL, &desc, &device), DDP_ERR_INVALID, line);
    desc.uuid = "GPU-";
    snprintf(line, sizeof line, "ddp_cuda_pick: on host %s: set devices or uuid, not both", host);
    says(ddp_cuda_pick(NULL, &desc, &device), DDP_ERR_INVALID, line);
    says(ddp_cuda_pick(NULL, &desc, NULL), DDP_ERR_INVALID, "ddp_cuda_pick: device is NULL");
}

static void check_pick_uuid(void) {
    char line[512];
    int device;
    ddp_cuda_pick_desc desc = DDP_ZERO;
    machine.count = 2;
    machine.first_byte[0] = 0x1f;
    machine.first_byte[1] = 0x2e;
    desc.uuid = "GPU-2eabab";
    check_that(ddp_cuda_pick(NULL, &desc, &device) == DDP_OK && device == 1, "%s", ddp_last_error());
    desc.uuid = "1FABABAB-ABAB";
    check_that(ddp_cuda_pick(NULL, &desc, &device) == DDP_OK && device == 0, "%s", ddp_last_error());
    desc.uuid = "2eababab-abab-abab-abab-abababababababab"; /* too long by four */
    check_that(ddp_cuda_pick(NULL, &desc, &device) == DDP_ERR_INVALID, "a UUID that is too long was found");
    desc.uuid = "GPU-77";
    snprintf(line, sizeof line,
             "ddp_cuda_pick: on host %s: uuid GPU-77 matches no device of this machine, which has "
             "0 (GPU-1fababab-abab-abab-abab-ababababab00), 1 (GPU-2eababab-abab-abab-abab-ababababab01)",
             host);
    says(ddp_cuda_pick(NULL, &desc, &device), DDP_ERR_INVALID, line);
    machine.first_byte[0] = 0x2e;
    desc.uuid = "GPU-2e";
    snprintf(line, sizeof line,
             "ddp_cuda_pick: on host %s: uuid GPU-2e matches devices 0 and 1; use a longer prefix", host);
    says(ddp_cuda_pick(NULL, &desc, &device), DDP_ERR_INVALID, line);
}

/* The outcome of every rank; ranks are threads. */
static struct {
    ddp_cuda_pick_desc desc;
    int device[4], current[4]; /* current: the thread's device after the call; 7 before it */
    ddp_result result[4];
    char line[4][512];
} ranks;

static ddp_result pick_rank(ddp_group *world, void *user) {
    int rank = ddp_rank(world);
    (void)user;
    rank_of_thread = rank;
    current_device = 7;
    ranks.result[rank] = ddp_cuda_pick(world, &ranks.desc, &ranks.device[rank]);
    ranks.current[rank] = current_device;
    snprintf(ranks.line[rank], sizeof ranks.line[rank], "%s", ddp_last_error());
    return DDP_OK;
}

/* sentence NULL: every rank finds a device. It follows "rank r/W ddp_cuda_pick group=world: ". The rank that
   failed (-1 = none) leaves out its number. */
static void pick_ranks(int world_size, int device_count, const char *sentence, int failed) {
    char line[512], number[16];
    ddp_launch_desc launch = DDP_ZERO;
    launch.world_size = world_size;
    launch.mode = DDP_LAUNCH_THREADS;
    launch.group.timeout_ms = 20000;
    launch.no_affinity = 1;
    machine.count = device_count;
    check_that(ddp_launch(&launch, pick_rank, NULL) == DDP_OK, "%s", ddp_last_error());
    for (int rank = 0; rank < world_size; rank++) {
        snprintf(number, sizeof number, "rank %d: ", failed);
        snprintf(line, sizeof line, "rank %d/%d ddp_cuda_pick group=world: %s%s", rank, world_size,
                 failed < 0 || rank == failed ? "" : number, sentence ? sentence : "");
        if (!sentence)
            check_that(ranks.result[rank] == DDP_OK, "rank %d: %s", rank, ranks.line[rank]);
        else
            check_that(ranks.result[rank] == (machine.no_set_plus_1 ? DDP_ERR_ENGINE : DDP_ERR_INVALID)
                           && ranks.device[rank] == -1 && ranks.current[rank] == 7
                           && strcmp(ranks.line[rank], line) == 0,
                       "rank %d returned\n  %s\ninstead of\n  %s", rank, ranks.line[rank], line);
    }
}

static void check_pick_ranks(void) {
    static const int list[] = {0, 3}, doubled[] = {3, 1, 3};
    char sentence[512];
    memset(&ranks, 0, sizeof ranks);
    pick_ranks(3, 3, NULL, -1);
    for (int rank = 0; rank < 3; rank++)
        check_that(ranks.device[rank] == rank, "rank %d took device %d", rank, ranks.device[rank]);
    snprintf(sentence, sizeof sentence,
             "on host %s: device 2 (the local rank) does not exist on this machine, which has 0 (Fake 0), 1 "
             "(Fake 1); "
             "start fewer ranks, or set allow_shared",
             host);
    pick_ranks(4, 2, sentence, 2);
    machine.one_each = 1; /* CUDA_VISIBLE_DEVICES differs between ranks: each sees its own GPU as number 0 */
    pick_ranks(3, 1, NULL, -1);
    for (int rank = 0; rank < 3; rank++)
        check_that(ranks.device[rank] == 0, "rank %d took device %d", rank, ranks.device[rank]);
    machine.one_each = 0;
    snprintf(sentence, sizeof sentence,
             "ranks 0 and 1 on host %s both use device 0 (GPU-00ababab-abab-abab-abab-ababababab00); list "
             "one device for each rank in devices, start fewer ranks, or set allow_shared",
             host);
    pick_ranks(2, 1, sentence, -1);
    ranks.desc.allow_shared = 1;
    pick_ranks(4, 2, NULL, -1);
    for (int rank = 0; rank < 4; rank++)
        check_that(ranks.device[rank] == rank % 2, "rank %d took device %d", rank, ranks.device[rank]);
    ranks.desc.allow_shared = 0;
    ranks.desc.devices = list;
    ranks.desc.device_count = 2;
    pick_ranks(2, 4, NULL, -1);
    check_that(ranks.device[0] == 0 && ranks.device[1] == 3, "devices %d and %d", ranks.device[0],
               ranks.device[1]);
    snprintf(sentence, sizeof sentence,
             "on host %s: local rank 2, but device_count=2; list one device for each rank of this machine",
             host);
    pick_ranks(3, 4, sentence, 2);
    ranks.desc.devices = doubled;
    ranks.desc.device_count = 3;
    snprintf(sentence, sizeof sentence,
             "ranks 0 and 2 on host %s both use device 3 (GPU-00ababab-abab-abab-abab-ababababab03); list "
             "one device for each rank in devices, start fewer ranks, or set allow_shared",
             host);
    pick_ranks(3, 4, sentence, -1);
    /* cudaSetDevice ran after the ranks had agreed: the others returned DDP_OK. */
    memset(&ranks.desc, 0, sizeof ranks.desc);
    machine.no_set_plus_1 = 2;
    snprintf(sentence, sizeof sentence,
             "on host %s: on this machine: cudaSetDevice: %s (cudaErrorDevicesUnavailable)", host,
             cudaGetErrorString(cudaErrorDevicesUnavailable));
    pick_ranks(3, 4, sentence, 1);
    machine.no_set_plus_1 = 0;
}

/* ---- CUDA errors and streams ---- */

/* Invalid arguments of every kernel are detected before anything is launched. */
static void check_kernels_refuse(float *memory) {
    static const ddp_cuda_range empty = {NULL, 4, 0};
    void *dst = memory, *null = NULL;
    const void *src[2] = {memory, NULL};
    ddp_cuda_norm *norm = (ddp_cuda_norm *)(void *)memory;
    ddp_cuda_step_desc step = DDP_ZERO;
    record.launches = 0;
    says(ddp_cuda_reduce_tree(&dst, 1, src, 2, 1, DDP_F32, DDP_OP_SUM, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_reduce_tree: src[1] is NULL");
    says(ddp_cuda_reduce_tree(&null, 1, src, 1, 1, DDP_F32, DDP_OP_SUM, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_reduce_tree: dst[0] is NULL");
    says(ddp_cuda_reduce_tree(&dst, 1, src, 1, 1, (ddp_dtype)99, DDP_OP_SUM, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_reduce_tree: op=0 dtype=99 is invalid; use a ddp_op and DDP_F32 to DDP_U64");
    says(ddp_cuda_flatten(memory, DDP_F32, &empty, -1, DDP_F32, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_flatten: range_count=-1 is negative, or flat or ranges is NULL");
    says(ddp_cuda_flatten(memory, DDP_F32, &empty, 1, DDP_F32, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_flatten: ranges[0].data is NULL");
    says(ddp_cuda_unflatten(memory, DDP_I32, &empty, 1, DDP_F32, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_unflatten: cannot convert i32 to f32; use floating-point dtypes");
    says(ddp_cuda_unscale(NULL, 1, 1, DDP_F32, 1, norm, 0), DDP_ERR_INVALID,
         "ddp_cuda_unscale: data or norm is NULL");
    says(ddp_cuda_unscale(memory, 1, 1, DDP_F32, 1, NULL, 0), DDP_ERR_INVALID,
         "ddp_cuda_unscale: data or norm is NULL");
    says(ddp_cuda_unscale(memory, 1, 1, DDP_I64, 1, norm, 0), DDP_ERR_INVALID,
         "ddp_cuda_unscale: dtype=i64; use a floating-point dtype");
    says(ddp_cuda_adamw(NULL, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_adamw: count=1 is negative, or descs is NULL");
    says(ddp_cuda_sgd(&step, -1, 0), DDP_ERR_INVALID, "ddp_cuda_sgd: count=-1 is negative, or descs is NULL");
    step.master = memory, step.grad = memory, step.count = 1, step.step = 1, step.momentum = 0.9f;
    says(ddp_cuda_adamw(&step, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_adamw: descs[0]: first or second is NULL; set both");
    says(ddp_cuda_sgd(&step, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_sgd: descs[0]: momentum=0.9, but first is NULL; set it");
    ddp_cuda_step_desc two[2] = {step, step}; /* the second one is invalid: the first one is not launched */
    two[0].first = two[0].second = two[1].first = two[1].second = memory;
    two[1].grad = NULL;
    says(ddp_cuda_adamw(two, 2, 0), DDP_ERR_INVALID,
         "ddp_cuda_adamw: descs[1]: master or grad is NULL; set both");
    two[1].grad_dtype = DDP_F64;
    two[1].grad = memory;
    says(ddp_cuda_sgd(two, 2, 0), DDP_ERR_INVALID,
         "ddp_cuda_sgd: descs[1]: grad_dtype=f64; use f32, f16 or bf16");
    two[1].grad_dtype = DDP_F32;
    two[1].copy_dtype = DDP_I8;
    says(ddp_cuda_adamw(two, 2, 0), DDP_ERR_INVALID,
         "ddp_cuda_adamw: descs[1]: copy_dtype=i8; use bf16, f16 or f32");
    says(ddp_cuda_quantise8(NULL, memory, memory, DDP_F32, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_quantise8: q, scales or src is NULL");
    says(ddp_cuda_dequantise8(NULL, DDP_F32, (int8_t *)memory, memory, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_dequantise8: dst, q or scales is NULL");
    says(ddp_cuda_dequantise8(memory, DDP_F64, (int8_t *)memory, memory, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_dequantise8: dst_dtype=f64; use f32, f16 or bf16");
    check_that(record.launches == 0, "%d launches of refused calls", record.launches);
    check_that(ddp_cuda_flatten(NULL, DDP_F32, NULL, 0, DDP_F32, 1, 0) == DDP_OK
                   && ddp_cuda_quantise8(NULL, NULL, NULL, DDP_F32, 0, 0) == DDP_OK,
               "nothing is refused");
}

/* The 148 tensors of GPT-2 124M: 50 matrices with weight decay, 98 vectors without. One launch per tensor
   became three per step. */
static void check_launches(void) {
    enum { COUNT = 148 };
    static float memory[4 * COUNT];
    ddp_cuda_step_desc descs[COUNT] = DDP_ZERO;
    for (int i = 0; i < COUNT; i++) {
        ddp_cuda_step_desc *d = &descs[i];
        d->master = memory + i;
        d->grad = memory + COUNT + i;
        d->first = memory + 2 * COUNT + i;
        d->second = memory + 3 * COUNT + i;
        d->count = d->step = 1;
        d->weight_decay = i % 3 ? 0 : 0.1f;
    }
    for (int adamw = 0; adamw < 2; adamw++) {
        record.launches = 0;
        check_that((adamw ? ddp_cuda_adamw(descs, COUNT, 0) : ddp_cuda_sgd(descs, COUNT, 0)) == DDP_OK, "%s",
                   ddp_last_error());
        check_that(record.launches == 3, "%d launches for %d tensors", record.launches, (int)COUNT);
    }
}

/* A call of the device table without a result stores its error, with its name, for ddp_cuda_check. */
static void check_table_errors(float *memory) {
    static const char *const names[] = {"copy: cudaMemcpyAsync", "copy_async: cudaMemcpyAsync",
                                        "fill_zero: cudaMemsetAsync", "cast: cudaMemcpyAsync",
                                        "free: cudaFree"};
    char line[512];
    for (int k = 0; k < 5; k++) {
        void *block = NULL;
        check_that(gpu->alloc(NULL, 64, &block) == DDP_OK, "%s", ddp_last_error());
        copy_answer = cudaErrorInvalidValue;
        if (k == 0) gpu->copy(memory, memory + 100, 8);
        if (k == 1) gpu->copy_async(memory, memory + 100, 8);
        if (k == 2) gpu->fill_zero(memory, 8);
        if (k == 3) gpu->cast(memory, DDP_F32, memory + 100, DDP_F32, 2);
        if (k == 4) gpu->free(NULL, block);
        copy_answer = cudaSuccess;
        snprintf(line, sizeof line, "ddp_device_cuda %s: %s (cudaErrorInvalidValue)", names[k],
                 cudaGetErrorString(cudaErrorInvalidValue));
        says(ddp_cuda_check(), DDP_ERR_ENGINE, line);
        check_that(ddp_cuda_check() == DDP_OK, "%s is reported twice", names[k]);
        if (k != 4) gpu->free(NULL, block);
    }
}

static void check_errors(void) {
    static float memory[4096];
    void *out = memory, *dst = memory;
    const void *src[2] = {memory, memory + 1024};
    cudaStream_t stream = (cudaStream_t)(void *)memory;
    ddp_cuda_step_desc step = DDP_ZERO;
    char line[512];
    record.malloc_answer = cudaErrorMemoryAllocation;
    snprintf(line, sizeof line,
             "ddp_device_cuda alloc: cudaMalloc of 12345 bytes: %s (cudaErrorMemoryAllocation)",
             cudaGetErrorString(cudaErrorMemoryAllocation));
    says(gpu->alloc(NULL, 12345, &out), DDP_ERR_NO_MEMORY, line);
    check_that(out == NULL, "out is set after a failure");
    record.malloc_answer = cudaSuccess;

    kernels_run = 0;
    record.answer = cudaErrorNoKernelImageForDevice;
    snprintf(line, sizeof line,
             "ddp_cuda_reduce_tree: cudaLaunchKernel: %s (cudaErrorNoKernelImageForDevice)",
             cudaGetErrorString(cudaErrorNoKernelImageForDevice));
    says(ddp_cuda_reduce_tree(&dst, 1, src, 2, 1000, DDP_F32, DDP_OP_SUM, 1, 0), DDP_ERR_ENGINE, line);
    gpu->add(memory, memory, memory + 1024, 100, DDP_F32); /* keeps the first failure */
    record.answer = cudaErrorInvalidValue;
    const ddp_tensor hundred = {memory, DDP_F32, 1, {100}};
    gpu->scale(&hundred, 1, 2.0f);
    snprintf(line, sizeof line, "ddp_device_cuda add: cudaLaunchKernel: %s (cudaErrorNoKernelImageForDevice)",
             cudaGetErrorString(cudaErrorNoKernelImageForDevice));
    says(ddp_cuda_check(), DDP_ERR_ENGINE, line);
    check_that(ddp_cuda_check() == DDP_OK, "a failure is reported twice");
    {
        ddp_exact_sum sum;
        ddp_exact_sum_clear(&sum);
        gpu->sum_squares(&sum, 0, &hundred, 1);
        check_that(ddp_cuda_check() == DDP_ERR_ENGINE, "a failed sum of squares does not show");
    }

    record.answer = cudaSuccess;
    record.launches = 0;
    record.largest_grid = 0;
    check_that(ddp_cuda_reduce_tree(&dst, 1, src, 2, (size_t)1 << 40, DDP_F32, DDP_OP_SUM, 1, stream)
                   == DDP_OK,
               "%s", ddp_last_error());
    check_that(record.launches == 1 && record.largest_grid == 4096 && record.stream == stream,
               "2^40 elements: %d launches, grid %u", record.launches, record.largest_grid);
    check_that(ddp_cuda_use_stream(stream) == 0, "the stream does not start as 0");
    gpu->divide(&hundred, 1, 3);
    check_that(record.launches == 2 && record.stream == stream, "divide is not on the stream that was set");
    gpu->fill_zero(memory, 16);
    check_that(record.stream == stream, "fill_zero is not on the stream that was set");
    record.waits = 0;
    /* The fake treats odd addresses as device memory. */
    gpu->copy((char *)memory + 1, (char *)memory + 101, 8);
    check_that(record.waits == 0 && record.stream == stream, "a copy on the device waits");
    gpu->copy((char *)memory + 1, (char *)memory + 100, 8);
    gpu->copy((char *)memory, (char *)memory + 101, 8);
    check_that(record.waits == 2, "a copy with the host does not wait");
    check_that(ddp_cuda_use_stream(0) == stream, "the stream that was set is not returned");
    kernels_run = 1;

    says(ddp_cuda_reduce_tree(&dst, 1, src, 65, 1, DDP_F32, DDP_OP_SUM, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_reduce_tree: dst_count=1 src_count=65; use 1 to 64");
    says(ddp_cuda_adamw(&step, 1, 0), DDP_ERR_INVALID, "ddp_cuda_adamw: descs[0]: step=0; use 1 or more");
    step.step = 1;
    step.stochastic = 1;
    step.copy_dtype = DDP_F16;
    says(ddp_cuda_adamw(&step, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_adamw: descs[0]: stochastic rounding with copy_dtype=f16; use bf16");
    says(ddp_cuda_quantise8((int8_t *)memory, memory, memory, DDP_F64, 1, 0), DDP_ERR_INVALID,
         "ddp_cuda_quantise8: src_dtype=f64; use f32, f16 or bf16");
    check_kernels_refuse(memory);
    kernels_run = 0;
    check_launches();
    kernels_run = 1;
    check_table_errors(memory);
}

/* ---- 16-bit floats: every value, and every f32 next to one ---- */

static void check_halves(void) {
    size_t wrong = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t half = (uint16_t)h;
        float f[2];
        ddp__cast(&f[0], DDP_F32, &half, DDP_F16, 1);
        ddp__cast(&f[1], DDP_F32, &half, DDP_BF16, 1);
        wrong += ddp__cuda_bits(ddp__cuda_from_f16(half)) != ddp__cuda_bits(f[0])
                 || ddp__cuda_bits(ddp__cuda_from_bf16(half)) != ddp__cuda_bits(f[1]);
    }
    check_that(wrong == 0, "%zu halves become other f32 than in ddp.h", wrong);
    wrong = 0;
    for (uint64_t i = 0; i < 4000000; i++) {
        float x = ddp__cuda_from_bits((uint32_t)(i * 1073 + (i & 1)));
        uint16_t f16, bf16;
        ddp__cast(&f16, DDP_F16, &x, DDP_F32, 1);
        ddp__cast(&bf16, DDP_BF16, &x, DDP_F32, 1);
        wrong += ddp__cuda_to_f16(x) != f16 || ddp__cuda_to_bf16(x) != bf16;
    }
    check_that(wrong == 0, "%zu f32 become other halves than in ddp.h", wrong);
}

/* Counts the visits of elements and chunks. */
struct visits {
    enum { WIDTH = 4 };
    unsigned char *count;
    template <int N> DDP__HD void run(size_t at) const {
        for (int i = 0; i < N; i++) count[at + (size_t)i]++;
    }
    DDP__HD void chunk(size_t number, size_t thread, size_t) const {
        count[number] = (unsigned char)(count[number] + (thread == 0));
    }
};

/* A grid's threads one after another, in the code that a device runs: each element belongs to exactly one. */
static void check_shares(void) {
    enum { COUNT = 1003 };
    unsigned char elements[COUNT] = {0}, chunks[COUNT] = {0};
    size_t wrong = 0;
    const ddp__cuda_elements_work<visits> each = {{elements}, ddp__cuda_vectors_of(1u << 3, COUNT, 4)};
    const ddp__cuda_chunks_work<visits> lists = {{chunks}, COUNT};
    gridDim.x = 3;
    blockDim.x = 5;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) {
            each.device();
            lists.device();
        }
    for (int i = 0; i < COUNT; i++) wrong += elements[i] != 1 || chunks[i] != 1;
    check_that(wrong == 0, "%zu of %d elements and chunks are not visited exactly once", wrong, (int)COUNT);
}

/* After all kernels have run. */
static void check_groups(void) {
    check_that(misaligned == 0 && grouped > 1000000, "%zu of %zu groups are misaligned", misaligned, grouped);
}

int main(void) {
    int failed = 0;
    gpu = ddp_device_cuda();
    failed += table_line("pick, one rank", check_pick_alone);
    failed += table_line("pick by UUID", check_pick_uuid);
    memset(machine.first_byte, 0, sizeof machine.first_byte);
    failed += table_line("pick, several ranks", check_pick_ranks);
    failed += table_line("errors and streams", check_errors);
    failed += table_line("16-bit floats", check_halves);
    failed += table_line("shares of threads", check_shares);
    failed += kernel_checks();
    failed += table_line("alignment of groups", check_groups);
    return failed != 0;
}

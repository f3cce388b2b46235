/*  device.h - ddp_cuda.cuh, and groups over device memory, for the tests that run on a GPU.

    With DDP_TEST_ON_CPU the GPU is the fake one of fake_gpu.h: without a device, the same test proves its own
    logic, and the order of all work on streams. Each rank has its own fake device. With DDP_TEST_GPUS=1 all
    ranks share one, and NCCL is 2.30.

    A host buffer has a mirror on the device. Its data is copied there and back on a compute stream of the
    rank, which is busy meanwhile. No call on the host waits for that stream. If a call does not order itself
    after that stream, or later work does not wait for the call, the data is wrong. */
#ifndef DDP_TEST_DEVICE_H
#define DDP_TEST_DEVICE_H

#if defined(DDP_TEST_ON_CPU)
#include "host_only.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* each test needs only a part of it */
#include "fake_nccl.h"
#pragma GCC diagnostic pop
struct ddp__cuda_runtime;
static const struct ddp__cuda_runtime *device_runtime(void);
#define DDP__CUDA_RUNTIME device_runtime()
#define DDP__CUDA_RECORD_ACCESS(n, address, size_bytes) fake_seen(address, size_bytes)
#define DDP__CUDA_STAGE_BYTES ((size_t)16384) /* many rounds with little data */
static int device_patience_ms = 2000;
#define DDP__NCCL_CLOSE_TIMEOUT_MS device_patience_ms
#if defined(DDP_IMPLEMENTATION_INCLUDED)
extern "C" __thread int machine_salt; /* of implementation.c: ranks with different ones share no machine */
#else
static __thread int machine_salt;
#define DDP__MACHINE_SALT machine_salt
#endif
#if __has_include(<cublasLt.h>)
#include "fake_cublaslt.h"
#define DDP_USE_CUBLASLT
#endif
#endif
#define DDP_IMPLEMENTATION
#include "../../ddp_cuda.cuh"
#include "../../ddp_fsdp.h"
#include "ranks.h"

typedef struct device_rank {
    ddp_group *cpu, *group; /* the world, and the group over device memory */
    cudaStream_t stream;
    unsigned char *scratch; /* on the device: staging buffer for copies */
    size_t scratch_bytes;
} device_rank;

/* Every test creates its groups with this: staged through the host, or over NCCL if $DDP_TEST_ENGINE is nccl.
   In tree order. On the fake GPU, $DDP_TEST_BLOCK successive ranks act as if on a machine of their own. */
static RANKS_UNUSED ddp_result device_group(ddp_group *world, cudaStream_t stream, ddp_group **out);

#if defined(DDP_TEST_ON_CPU)
static const struct ddp__cuda_runtime *device_runtime(void) {
    static const ddp__cuda_runtime table = FAKE_GPU_RUNTIME(1);
    return &table;
}
static RANKS_UNUSED void device_delay(cudaStream_t stream) { (void)stream; } /* work is late anyway */
/* Between device_expect(1) and device_expect(0) ranks may make different calls, or wait for a missing one. */
static RANKS_UNUSED void device_expect(int failures) {
    pthread_mutex_lock(&fake.lock);
    fake.patient = failures;
    pthread_mutex_unlock(&fake.lock);
    fake_expect("mismatch: ");
}
static cudaError_t device_stream_create(cudaStream_t *out) { return device_runtime()->stream_create(out, 0); }
static cudaError_t device_stream_destroy(cudaStream_t stream) {
    return device_runtime()->stream_destroy(stream);
}
static RANKS_UNUSED cudaError_t device_get(int *device) { return device_runtime()->get_device(device); }
static RANKS_UNUSED cudaError_t device_copy(void *to, const void *from, size_t size_bytes,
                                            cudaMemcpyKind kind, cudaStream_t stream) {
    return device_runtime()->memcpy_async(to, from, size_bytes, kind, stream);
}

/* One fake GPU state per process: created by its first rank, checked when its last rank has left. */
static pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;
static int device_ranks, device_pid, device_failures;
static int device_number = 4;                    /* devices of the fake machine */
static RANKS_UNUSED int device_machine(int by) { /* the order violations so far */
    int failures;
    pthread_mutex_lock(&device_lock);
    if (by > 0 && (device_pid != (int)getpid() || device_ranks == 0)) {
        static uint64_t seed;
        const char *gpus = getenv("DDP_TEST_GPUS");
        if (gpus) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
        fake_start(gpus ? atoi(gpus) : device_number, ++seed);
        device_pid = (int)getpid();
        device_ranks = 0;
    }
    device_ranks += by;
    if (device_ranks == 0) {
        std::string left = fake_left();
        device_failures += fake_failures() + !left.empty();
        if (!left.empty()) printf("FAIL leaked:\n%s", left.c_str());
        fflush(stdout);
    }
    if (getenv("DDP_TEST_GPUS")) fake_nccl_version = 23000;
    failures = device_failures;
    pthread_mutex_unlock(&device_lock);
    return failures;
}
#else
static RANKS_UNUSED void device_expect(int failures) { (void)failures; }
static __global__ void device_spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) {
    }
}
/* About 10 us. */
static RANKS_UNUSED void device_delay(cudaStream_t stream) { device_spin<<<1, 1, 0, stream>>>(20000); }
static cudaError_t device_stream_create(cudaStream_t *out) {
    return cudaStreamCreateWithFlags(out, cudaStreamNonBlocking);
}
static cudaError_t device_stream_destroy(cudaStream_t stream) { return cudaStreamDestroy(stream); }
static RANKS_UNUSED cudaError_t device_get(int *device) { return cudaGetDevice(device); }
static RANKS_UNUSED cudaError_t device_copy(void *to, const void *from, size_t size_bytes,
                                            cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size_bytes, kind, stream);
}
static int device_machine(int by) {
    (void)by;
    return 0;
}
#endif

static RANKS_UNUSED ddp_result device_rank_open(device_rank *d, ddp_group *world, size_t scratch_bytes) {
    int device;
    ddp_cuda_pick_desc pick = DDP_ZERO;
    void *memory = NULL;
    memset(d, 0, sizeof *d);
    device_machine(1);
    pick.allow_shared = 1;
    d->cpu = world;
    RANKS_OK(world, ddp_cuda_pick(world, &pick, &device));
    RANKS_CHECK(world, device_stream_create(&d->stream) == cudaSuccess, "no stream");
    ddp_cuda_use_stream(d->stream);
    RANKS_OK(world, device_group(world, d->stream, &d->group));
    RANKS_OK(world, ddp_device_cuda()->alloc(NULL, scratch_bytes, &memory));
    d->scratch = (unsigned char *)memory;
    d->scratch_bytes = scratch_bytes;
    return DDP_OK;
}

static RANKS_UNUSED ddp_result device_rank_close(device_rank *d) {
    int failures;
    ddp_device_cuda()->free(NULL, d->scratch);
    ddp_group_destroy(d->group);
    ddp_cuda_use_stream(0);
    device_stream_destroy(d->stream);
    RANKS_OK(d->cpu, ddp_cuda_check());
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    failures = device_machine(-1);
    RANKS_CHECK(d->cpu, failures == 0, "%d things are out of order on the machine", failures);
    return DDP_OK;
}

/* Returns while the copy can still be in flight on the compute stream. */
static RANKS_UNUSED ddp_result device_up(device_rank *d, void *far, const void *near, size_t size_bytes) {
    if (size_bytes == 0) return DDP_OK;
    RANKS_CHECK(d->cpu, size_bytes <= d->scratch_bytes, "scratch is too small");
    ddp_device_cuda()->copy(d->scratch, near, size_bytes); /* waits until the stream no longer uses scratch */
    device_delay(d->stream);
    RANKS_CHECK(d->cpu,
                device_copy(far, d->scratch, size_bytes, cudaMemcpyDeviceToDevice, d->stream) == cudaSuccess,
                "copying up");
    return DDP_OK;
}

/* The contents of far as seen by work that is launched on the compute stream now. */
static RANKS_UNUSED ddp_result device_down(device_rank *d, void *near, const void *far, size_t size_bytes) {
    if (size_bytes == 0) return DDP_OK;
    RANKS_CHECK(d->cpu, size_bytes <= d->scratch_bytes, "scratch is too small");
    RANKS_CHECK(d->cpu,
                device_copy(d->scratch, far, size_bytes, cudaMemcpyDeviceToDevice, d->stream) == cudaSuccess,
                "copying down");
    ddp_device_cuda()->copy(near, d->scratch, size_bytes);
    return DDP_OK;
}

static RANKS_UNUSED int device_uses_nccl(void) {
    const char *engine = getenv("DDP_TEST_ENGINE");
    return engine && strcmp(engine, "nccl") == 0;
}

static ddp_result device_group_with(ddp_group *world, cudaStream_t stream, int timeout_ms, ddp_group **out) {
    ddp_cuda_desc desc = DDP_ZERO;
#if defined(DDP_TEST_ON_CPU)
    const char *block = getenv("DDP_TEST_BLOCK");
    machine_salt = block ? 1 + ddp_rank(world) / atoi(block) : 0;
#endif
    desc.name = "gpu";
    desc.allow_shared = 1;
    desc.engine = device_uses_nccl() ? DDP_CUDA_ENGINE_NCCL : DDP_CUDA_ENGINE_STAGED;
    desc.order = DDP_ORDER_TREE;
    desc.stream = stream;
    desc.timeout_ms = timeout_ms;
    return ddp_cuda_group_create(out, world, &desc);
}
static ddp_result device_group(ddp_group *world, cudaStream_t stream, ddp_group **out) {
    return device_group_with(world, stream, 0, out);
}

/* Ends the tests of a rank. user: the one passed by device_each. */
static RANKS_UNUSED ddp_result device_ok(ddp_group *world, void *user) {
    if (ddp_rank(world) == 0)
        printf("ok: %s W=%d\n", ranks_mode_name(*(ranks_mode *)user), ddp_world_size(world));
    fflush(stdout);
    return DDP_OK;
}

/* Runs fn with the numbers of ranks of the command line, or with 1 to 4. Returns the exit status of the
   process. */
static RANKS_UNUSED int device_each(int argc, char **argv, ddp_rank_fn fn) {
    static const int defaults[] = {1, 2, 3, 4, 0};
    ranks_mode mode;
    int failures = ranks_each(argc, argv, defaults, 120, &mode, fn);
    return failures < 0 ? 2 : failures != 0;
}

#endif /* DDP_TEST_DEVICE_H */

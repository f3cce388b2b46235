/*  cuda_on_host.h - the table of CUDA runtime calls as plain CPU code: what is put on a stream is done at once, device memory is host memory.

    Include before ddp_cuda.cuh and once more after it. What uses it proves logic on any machine, and nothing about a GPU or about the order of streams. */
#ifndef DDP_TEST_CUDA_ON_HOST_H
#define DDP_TEST_CUDA_ON_HOST_H

#include <stddef.h>
#include <stdint.h>

struct ddp__cuda_runtime;
static const struct ddp__cuda_runtime *on_host_runtime(void);
#define DDP__CUDA_RUNTIME on_host_runtime()

#define DDP_TEST_ON_HOST

#elif !defined(DDP_TEST_CUDA_ON_HOST_TABLE)
#define DDP_TEST_CUDA_ON_HOST_TABLE

static struct { int64_t allocated, streams, events; int64_t fail_copies_after; } on_host; /* what is alive; > 0: so many copies more succeed, then one fails */

static void on_host_count(int64_t *what, int64_t by) { __atomic_add_fetch(what, by, __ATOMIC_RELAXED); }
static cudaError_t on_host_device_count(int *count) { *count = 1; return cudaSuccess; }
static cudaError_t on_host_identity(int device, char name[256], unsigned char uuid[16]) {
    (void)device;
    snprintf(name, 256, "the CPU");
    memset(uuid, 0xc0, 16);
    return cudaSuccess;
}
static cudaError_t on_host_set_device(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
static cudaError_t on_host_get_device(int *device) { *device = 0; return cudaSuccess; }
static cudaError_t on_host_malloc(void **out, size_t size_bytes) {
    if (size_bytes > (size_t)1 << 40 || posix_memalign(out, 256, size_bytes) != 0) return cudaErrorMemoryAllocation;
    memset(*out, 0xee, size_bytes);
    on_host_count(&on_host.allocated, 1);
    return cudaSuccess;
}
static cudaError_t on_host_free(void *memory) {
    if (memory) on_host_count(&on_host.allocated, -1);
    free(memory);
    return cudaSuccess;
}
static cudaError_t on_host_malloc_async(void **out, size_t size_bytes, cudaStream_t stream) { (void)stream; return on_host_malloc(out, size_bytes); }
static cudaError_t on_host_free_async(void *memory, cudaStream_t stream) { (void)stream; return on_host_free(memory); }
static cudaError_t on_host_memcpy(void *dst, const void *src, size_t size_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    (void)stream;
    if (__atomic_load_n(&on_host.fail_copies_after, __ATOMIC_RELAXED) > 0 && __atomic_add_fetch(&on_host.fail_copies_after, -1, __ATOMIC_RELAXED) == 0)
        return cudaErrorIllegalAddress;
    memmove(dst, src, size_bytes);
    return cudaSuccess;
}
static cudaError_t on_host_memset(void *dst, int value, size_t size_bytes, cudaStream_t stream) { (void)stream; memset(dst, value, size_bytes); return cudaSuccess; }
static cudaError_t on_host_synchronize(cudaStream_t stream) { (void)stream; return cudaSuccess; }
static cudaError_t on_host_is_device(const void *pointer, int *yes) { (void)pointer; *yes = 1; return cudaSuccess; }
static cudaError_t on_host_launch(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) {
    (void)kernel; (void)grid; (void)block; (void)arguments; (void)shared_bytes; (void)stream;
    return cudaErrorNoDevice;
}
static cudaError_t on_host_clear(void) { return cudaSuccess; }
static cudaError_t on_host_stream_create(cudaStream_t *out, int high_priority) {
    (void)high_priority;
    *out = (cudaStream_t)malloc(1);
    on_host_count(&on_host.streams, 1);
    return cudaSuccess;
}
static cudaError_t on_host_stream_destroy(cudaStream_t stream) { free((void *)stream); on_host_count(&on_host.streams, -1); return cudaSuccess; }
static cudaError_t on_host_stream_wait_event(cudaStream_t stream, cudaEvent_t event) { (void)stream; (void)event; return cudaSuccess; }
static cudaError_t on_host_stream_query(cudaStream_t stream) { (void)stream; return cudaSuccess; }
static cudaError_t on_host_capturing(cudaStream_t stream, int *yes) { (void)stream; *yes = 0; return cudaSuccess; }
static cudaError_t on_host_event_create(cudaEvent_t *out) { *out = (cudaEvent_t)malloc(1); on_host_count(&on_host.events, 1); return cudaSuccess; }
static cudaError_t on_host_event_destroy(cudaEvent_t event) { free((void *)event); on_host_count(&on_host.events, -1); return cudaSuccess; }
static cudaError_t on_host_event_record(cudaEvent_t event, cudaStream_t stream) { (void)event; (void)stream; return cudaSuccess; }
static cudaError_t on_host_event_query(cudaEvent_t event) { /* now and then not ready, as real ones are */
    static uint32_t asked;
    (void)event;
    return __atomic_add_fetch(&asked, 1u, __ATOMIC_RELAXED) % 3 == 0 ? cudaErrorNotReady : cudaSuccess;
}
static cudaError_t on_host_event_synchronize(cudaEvent_t event) { (void)event; return cudaSuccess; }
static cudaError_t on_host_work(void (*run)(void *copy), const void *argument, size_t argument_bytes, cudaStream_t stream) {
    void *copy = NULL;
    (void)stream;
    if (posix_memalign(&copy, 64, argument_bytes) != 0) return cudaErrorMemoryAllocation;
    memcpy(copy, argument, argument_bytes);
    run(copy);
    free(copy);
    return cudaSuccess;
}

static const struct ddp__cuda_runtime *on_host_runtime(void) {
    static const ddp__cuda_runtime table = {1, on_host_device_count, on_host_identity, on_host_set_device, on_host_malloc, on_host_free,
                                            on_host_malloc_async, on_host_free_async, on_host_memcpy, on_host_memset, on_host_synchronize,
                                            on_host_is_device, on_host_launch, on_host_clear, on_host_get_device, on_host_stream_create,
                                            on_host_stream_destroy, on_host_stream_wait_event, on_host_stream_query, on_host_capturing, on_host_clear,
                                            on_host_event_create, on_host_event_destroy, on_host_event_record, on_host_event_query,
                                            on_host_event_synchronize, on_host_malloc, on_host_free, on_host_work};
    return &table;
}

#endif

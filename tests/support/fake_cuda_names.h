/*  fake_cuda_names.h - the functions of the CUDA runtime that the examples call, on the fake GPU of
    fake_gpu.h.

    Include after fake_gpu.h (or device.h) and before the example: from there on cudaMalloc is fake_malloc,
    and so on. Unknown arguments are failures. Times are counts of work, see fake_event_elapsed. The
    properties are those of a small sm_90. */
#ifndef DDP_TEST_FAKE_CUDA_NAMES_H
#define DDP_TEST_FAKE_CUDA_NAMES_H

#include "fake_gpu.h"

/* ---- memory ---- */

template <class T> static inline cudaError_t fake_name_malloc(T **out, size_t bytes) {
    return fake_malloc((void **)out, bytes);
}
template <class T>
static inline cudaError_t fake_name_malloc_async(T **out, size_t bytes, cudaStream_t stream) {
    return fake_malloc_async((void **)out, bytes, stream);
}
template <class T> static inline cudaError_t fake_name_host_alloc(T **out, size_t bytes, unsigned = 0) {
    return fake_host_alloc((void **)out, bytes);
}

/* Host memory that is not pinned makes the copy wait, and so do copies to the host. */
static inline cudaError_t fake_name_memcpy_async(void *to, const void *from, size_t bytes,
                                                 cudaMemcpyKind kind, cudaStream_t stream = 0) {
    return fake_memcpy(to, from, bytes, kind, stream);
}
static inline cudaError_t fake_name_memcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t error = fake_memcpy(to, from, bytes, kind, 0);
    return error == cudaSuccess && kind != cudaMemcpyDeviceToDevice ? fake_synchronize(0) : error;
}
static inline cudaError_t fake_name_memset_async(void *at, int value, size_t bytes, cudaStream_t stream = 0) {
    return fake_memset(at, value, bytes, stream);
}
static inline cudaError_t fake_name_memset(void *at, int value, size_t bytes) {
    return fake_memset(at, value, bytes, 0);
}

static inline cudaError_t fake_name_mem_info(size_t *available, size_t *total) {
    FAKE_CALL(1, "cudaMemGetInfo()");
    *total = fake.device[fake_me.device].total;
    *available = *total - fake.device[fake_me.device].held;
    return call.error();
}

/* ---- devices ---- */

static inline cudaError_t fake_name_attribute(int *value, cudaDeviceAttr attribute, int device) {
    static const struct {
        cudaDeviceAttr attribute;
        int value;
    } known[] = {
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMultiProcessorCount, 4},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 * 1024},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 * 1024},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 * 1024},
        {cudaDevAttrL2CacheSize, 50 << 20},
        {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMemoryPoolsSupported, 1},
    };
    FAKE_CALL(1, "cudaDeviceGetAttribute(%d, %d)", (int)attribute, device);
    if (call.fault || device < 0 || device >= fake.device_count)
        return call.fault ? call.error() : cudaErrorInvalidDevice;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].attribute == attribute) {
            *value = known[i].value;
            return cudaSuccess;
        }
    fake_failed("the attribute is not modelled: %s", fake_where(call.line).c_str());
    return cudaErrorInvalidValue;
}

static inline cudaError_t fake_name_properties(cudaDeviceProp *out, int device) {
    unsigned char uuid[16];
    cudaError_t error;
    memset(out, 0, sizeof *out);
    error = fake_identity(device, out->name, uuid);
    if (error != cudaSuccess) return error;
    memcpy(&out->uuid, uuid, sizeof uuid);
    out->totalGlobalMem = fake.device[device].total;
    out->major = 9;
    out->warpSize = 32;
    out->multiProcessorCount = 4;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = 2048;
    out->sharedMemPerBlock = 48 * 1024;
    out->sharedMemPerBlockOptin = 227 * 1024;
    out->sharedMemPerMultiprocessor = 228 * 1024;
    out->regsPerBlock = 65536;
    out->l2CacheSize = 50 << 20;
    return cudaSuccess;
}

static inline cudaError_t fake_name_device_synchronize(void) {
    FAKE_CALL(0, "cudaDeviceSynchronize()");
    if (call.fault) return call.error();
    if (fake_spoils(NULL, call.line)) return cudaErrorStreamCaptureUnsupported;
    return fake_drain_device(fake_me.device, call.line) ? cudaSuccess : cudaErrorLaunchTimeout;
}

/* ---- streams and events ---- */

static inline cudaError_t fake_name_stream_create_with_flags(cudaStream_t *out, unsigned flags) {
    return flags & cudaStreamNonBlocking ? fake_stream_create(out, 0) : fake_stream_create_blocking(out);
}
static inline cudaError_t fake_name_stream_create_with_priority(cudaStream_t *out, unsigned flags,
                                                                int priority) {
    return flags & cudaStreamNonBlocking ? fake_stream_create(out, priority < 0)
                                         : fake_stream_create_blocking(out);
}
static inline cudaError_t fake_name_priorities(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
static inline cudaError_t fake_name_wait_event(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    return fake_stream_wait_event(stream, event);
}
static inline cudaError_t fake_name_event_create(cudaEvent_t *out) { return fake_event_create_timing(out); }
static inline cudaError_t fake_name_event_create_with_flags(cudaEvent_t *out, unsigned flags) {
    return flags & cudaEventDisableTiming ? fake_event_create(out) : fake_event_create_timing(out);
}
static inline cudaError_t fake_name_event_record(cudaEvent_t event, cudaStream_t stream = 0) {
    return fake_event_record(event, stream);
}

/* The function must not call CUDA: the lock is held. */
static inline cudaError_t fake_name_host_function(cudaStream_t stream, cudaHostFn_t function, void *user) {
    FAKE_CALL(0, "cudaLaunchHostFunc(%s)", fake_name(stream).c_str());
    return call.fault ? call.error()
                      : fake_enqueue_work(stream, call.line, {}, [function, user] { function(user); });
}

/* ---- graphs ---- */

static inline cudaError_t fake_name_capturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    int yes = 0;
    cudaError_t error = fake_stream_capturing(stream, &yes);
    *status = yes ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return error;
}
static inline cudaError_t fake_name_exchange_mode(cudaStreamCaptureMode *mode) {
    FAKE_CALL(2, "cudaThreadExchangeStreamCaptureMode(%d)", (int)*mode);
    cudaStreamCaptureMode before = fake_me.relaxed ? cudaStreamCaptureModeRelaxed
                                                   : cudaStreamCaptureModeGlobal;
    if (call.fault) return call.error();
    fake_me.relaxed = *mode == cudaStreamCaptureModeRelaxed;
    *mode = before;
    return cudaSuccess;
}
static inline cudaError_t fake_name_end_capture(cudaStream_t stream, cudaGraph_t *out) {
    fake_graph *graph = fake_capture_end(stream);
    *out = (cudaGraph_t)(void *)graph;
    if (graph) graph->owned = 1;
    return graph ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
}

static inline cudaError_t fake_name_instantiate(cudaGraphExec_t *out, cudaGraph_t handle,
                                                unsigned long long = 0) {
    FAKE_CALL(0, "cudaGraphInstantiate()");
    fake_graph *graph = (fake_graph *)(void *)handle;
    *out = NULL;
    if (call.fault) return call.error();
    if (!graph->owned) fake_failed("the graph has been destroyed: %s", fake_where(call.line).c_str());
    fake.execs.push_back({graph, fake_me.device, 1, {}});
    *out = (cudaGraphExec_t)(void *)&fake.execs.back();
    return cudaSuccess;
}
static inline cudaError_t fake_name_graph_launch(cudaGraphExec_t handle, cudaStream_t stream) {
    fake_exec *exec = (fake_exec *)(void *)handle;
    if (!exec->live) fake_failed("an instance of a graph is launched, and has been destroyed");
    return fake_graph_launch(exec->graph, stream, &exec->players);
}
static inline cudaError_t fake_name_graph_destroy(cudaGraph_t handle) {
    FAKE_CALL(0, "cudaGraphDestroy()");
    fake_graph *graph = (fake_graph *)(void *)handle;
    if (!graph->owned) fake_failed("the graph has been destroyed already: %s", fake_where(call.line).c_str());
    graph->owned = 0;
    return call.error();
}
static inline cudaError_t fake_name_exec_destroy(cudaGraphExec_t handle) {
    FAKE_CALL(0, "cudaGraphExecDestroy()");
    fake_exec *exec = (fake_exec *)(void *)handle;
    if (!exec->live)
        fake_failed("the instance has been destroyed already: %s", fake_where(call.line).c_str());
    exec->live = 0;
    return call.error();
}

#undef cudaGetDeviceProperties /* which is a macro of CUDA's own */
#define cudaMalloc fake_name_malloc
#define cudaFree fake_free
#define cudaMallocAsync fake_name_malloc_async
#define cudaFreeAsync fake_free_async
#define cudaHostAlloc fake_name_host_alloc
#define cudaMallocHost fake_name_host_alloc
#define cudaFreeHost fake_host_free
#define cudaMemcpyAsync fake_name_memcpy_async
#define cudaMemcpy fake_name_memcpy
#define cudaMemsetAsync fake_name_memset_async
#define cudaMemset fake_name_memset
#define cudaMemGetInfo fake_name_mem_info
#define cudaGetDeviceCount fake_device_count
#define cudaGetDevice fake_get_device
#define cudaSetDevice fake_set_device
#define cudaDeviceGetAttribute fake_name_attribute
#define cudaGetDeviceProperties fake_name_properties
#define cudaDeviceSynchronize fake_name_device_synchronize
#define cudaGetLastError fake_clear_error
#define cudaPeekAtLastError fake_clear_error
#define cudaStreamCreate fake_stream_create_blocking
#define cudaStreamCreateWithFlags fake_name_stream_create_with_flags
#define cudaStreamCreateWithPriority fake_name_stream_create_with_priority
#define cudaDeviceGetStreamPriorityRange fake_name_priorities
#define cudaStreamDestroy fake_stream_destroy
#define cudaStreamSynchronize fake_synchronize
#define cudaStreamQuery fake_stream_query
#define cudaStreamWaitEvent fake_name_wait_event
#define cudaEventCreate fake_name_event_create
#define cudaEventCreateWithFlags fake_name_event_create_with_flags
#define cudaEventDestroy fake_event_destroy
#define cudaEventRecord fake_name_event_record
#define cudaEventQuery fake_event_query
#define cudaEventSynchronize fake_event_synchronize
#define cudaEventElapsedTime fake_event_elapsed
#define cudaLaunchHostFunc fake_name_host_function
#define cudaStreamBeginCapture fake_capture_begin
#define cudaStreamEndCapture fake_name_end_capture
#define cudaStreamIsCapturing fake_name_capturing
#define cudaThreadExchangeStreamCaptureMode fake_name_exchange_mode
#define cudaGraphInstantiate fake_name_instantiate
#define cudaGraphLaunch fake_name_graph_launch
#define cudaGraphDestroy fake_name_graph_destroy
#define cudaGraphExecDestroy fake_name_exec_destroy

#endif /* DDP_TEST_FAKE_CUDA_NAMES_H */

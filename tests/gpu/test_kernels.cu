/*  test_kernels.cu - the kernels of ddp_cuda.cuh on a real device; see support/cuda_kernels.h. Status 77: no
   device. */
#define DDP_IMPLEMENTATION
#include "../../ddp_cuda.cuh"
#if !defined(DDP_TEST_SMALL)
#define DDP_TEST_LARGE
#endif
#include "../support/cuda_kernels.h"

/* Work on a separate stream that does not wait for the default stream. */
static void check_stream(void) {
    enum { COUNT = 1 << 20 };
    cudaStream_t stream;
    float *host = (float *)malloc(COUNT * sizeof *host), *data;
    void *memory = NULL;
    size_t wrong = 0;
    if (!host || cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        check_that(0, "no stream");
        return;
    }
    check_that(ddp_cuda_use_stream(stream) == 0, "the stream does not start as 0");
    check_that(gpu->alloc(NULL, COUNT * sizeof *host, &memory) == DDP_OK, "%s", ddp_last_error());
    data = (float *)memory;
    for (int i = 0; i < COUNT; i++) host[i] = (float)(i % 1000);
    gpu->copy(data, host, COUNT * sizeof *host);
    gpu->add(data, data, data, COUNT, DDP_F32);
    const ddp_tensor all = {data, DDP_F32, 1, {COUNT}};
    gpu->scale(&all, 1, 0.25f);
    gpu->divide(&all, 1, 2);
    gpu->copy(host, data, COUNT * sizeof *host);
    for (int i = 0; i < COUNT; i++) wrong += host[i] != (float)(i % 1000) * 0.25f;
    check_that(wrong == 0, "%zu of %d elements are wrong", wrong, (int)COUNT);
    gpu->free(NULL, memory);
    check_that(ddp_cuda_use_stream(0) == stream && cudaStreamDestroy(stream) == cudaSuccess,
               "the stream cannot be destroyed");
    free(host);
}

/* A call that CUDA refuses returns the error, without an effect on the next one. */
static void check_refusal(void) {
    void *memory = NULL;
    check_that(gpu->alloc(NULL, SIZE_MAX / 4, &memory) == DDP_ERR_NO_MEMORY && !memory
                   && strstr(ddp_last_error(), "out of memory"),
               "%s", ddp_last_error());
    check_that(cudaGetLastError() == cudaSuccess, "the error is still set");
}

static size_t free_bytes(void) {
    size_t available = 0, total = 0;
    cudaMemPool_t pool;
    int device = 0;
    if (cudaDeviceSynchronize() == cudaSuccess && cudaGetDevice(&device) == cudaSuccess
        && cudaDeviceGetDefaultMemPool(&pool, device) == cudaSuccess)
        cudaMemPoolTrimTo(pool, 0);
    return cudaMemGetInfo(&available, &total) == cudaSuccess ? available : 0;
}

int main(void) {
    ddp_cuda_pick_desc desc = DDP_ZERO;
    cudaDeviceProp properties;
    int device, failed = 0;
    size_t before, after;
    if (ddp_cuda_pick(NULL, &desc, &device) != DDP_OK) {
        printf("%s\n", ddp_last_error());
        return 77;
    }
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return 1;
    printf("device %d: %s, sm_%d%d\n", device, properties.name, properties.major, properties.minor);
    gpu = ddp_device_cuda();
    failed += table_line("refusals", check_refusal);
    /* twice: the first time loads kernels, whose memory stays */
    failed += table_line("own stream", check_stream);
    before = free_bytes();
    failed += table_line("own stream again", check_stream);
    after = free_bytes();
    printf("%-28s %8d checks  %6d failed\n", "leaked device memory", 1, after < before);
    failed += after < before;
    failed += kernel_checks();
    return failed != 0;
}

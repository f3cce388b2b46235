/*  test_device.cu - the first program to run on a new machine: whether a kernel launches, and the versions of
    device, driver and libraries.

    test_device     prints one line per fact. Status 77: no device.

    It includes nothing of this project. If it fails, the machine is at fault, not ddp_cuda.cuh. */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#if !defined(DDP_NO_NCCL)
#include <nccl.h>
#endif
#if defined(DDP_USE_CUBLASLT)
#include <cublasLt.h>
#endif

enum { COUNT = 1 << 20, COPIES = 20 };
static const size_t COPY_BYTES = (size_t)256 << 20;

static void must(cudaError_t error, const char *call) {
    if (error == cudaSuccess) return;
    printf("%s: %s\n", call, cudaGetErrorString(error));
    exit(1);
}

static void check(int holds, const char *text) {
    if (holds) return;
    printf("%s\n", text);
    exit(1);
}

static __global__ void fill(int *data) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < COUNT) data[i] = 3 * i + 1;
}

static void launch_kernel(void) {
    static int host[COUNT];
    int *data;
    must(cudaMalloc((void **)&data, sizeof host), "cudaMalloc");
    fill<<<(COUNT + 255) / 256, 256>>>(data);
    must(cudaGetLastError(), "launch");
    must(cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int i = 0; i < COUNT; i++) check(host[i] == 3 * i + 1, "the kernel wrote wrong values");
    must(cudaFree(data), "cudaFree");
    printf("kernel: launched, %d values are right\n", (int)COUNT);
    fflush(stdout);
}

static void measure_copy(void) {
    cudaEvent_t begin, end;
    void *from, *to;
    float ms = 0;
    must(cudaMalloc(&from, COPY_BYTES), "cudaMalloc");
    must(cudaMalloc(&to, COPY_BYTES), "cudaMalloc");
    must(cudaMemset(from, 1, COPY_BYTES), "cudaMemset");
    must(cudaEventCreate(&begin), "cudaEventCreate");
    must(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = -3; i < COPIES; i++) {
        if (i == 0) must(cudaEventRecord(begin), "cudaEventRecord");
        must(cudaMemcpyAsync(to, from, COPY_BYTES, cudaMemcpyDeviceToDevice), "cudaMemcpyAsync");
    }
    must(cudaEventRecord(end), "cudaEventRecord");
    must(cudaEventSynchronize(end), "cudaEventSynchronize");
    must(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    printf("copy: %.0f GB/s, bytes read and written\n", 2.0 * COPIES * (double)COPY_BYTES / ms * 1e-6);
    fflush(stdout);
    must(cudaFree(from), "cudaFree");
    must(cudaFree(to), "cudaFree");
}

/* A communicator of one rank: whether NCCL starts on this machine at all. */
static void start_nccl(void) {
#if !defined(DDP_NO_NCCL)
    ncclUniqueId id;
    ncclComm_t comm;
    float one = 1, *data;
    int version = 0;
    check(ncclGetVersion(&version) == ncclSuccess, "ncclGetVersion failed");
    printf("NCCL: version %d, header %d\n", version, NCCL_VERSION_CODE);
    fflush(stdout);
    must(cudaMalloc((void **)&data, sizeof one), "cudaMalloc");
    must(cudaMemcpy(data, &one, sizeof one, cudaMemcpyHostToDevice), "cudaMemcpy");
    check(ncclGetUniqueId(&id) == ncclSuccess, "ncclGetUniqueId failed");
    check(ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess,
          "ncclCommInitRank failed; NCCL_DEBUG=INFO shows why");
    check(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, comm, NULL) == ncclSuccess,
          "ncclAllReduce failed");
    must(cudaDeviceSynchronize(), "ncclAllReduce");
    must(cudaMemcpy(&one, data, sizeof one, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(one == 1, "ncclAllReduce over one rank changed the value");
    ncclCommDestroy(comm);
    must(cudaFree(data), "cudaFree");
    printf("NCCL: a communicator of one rank works\n");
#else
    printf("NCCL: not built in\n");
#endif
}

int main(void) {
    cudaDeviceProp properties;
    int count = 0, driver = 0, runtime = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        printf("no device: %s\n", cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
        return 77;
    }
    must(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    must(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    must(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    printf("device: %s, sm_%d%d, %d multiprocessors, %.1f GiB, %d visible\n", properties.name,
           properties.major, properties.minor, properties.multiProcessorCount,
           (double)properties.totalGlobalMem / (1 << 30), count);
    printf("CUDA: driver %d.%d, ", driver / 1000, driver % 1000 / 10);
    printf("runtime %d.%d\n", runtime / 1000, runtime % 1000 / 10);
    fflush(stdout);
    launch_kernel();
    measure_copy();
#if defined(DDP_USE_CUBLASLT)
    printf("cuBLASLt: version %zu\n", cublasLtGetVersion());
    fflush(stdout);
#endif
    start_nccl();
    return 0;
}

/*  host_only.h - compiles the host code of ddp_cuda.cuh with a plain C++ compiler, in a fraction of nvcc's
    time and with any sanitizer.

    Include first. Kernels are parsed, but never instantiated: none is launched if DDP__CUDA_RUNTIME runs them
    as loops on the CPU. compile.cuda and tests/gpu test device code. Under nvcc this header does nothing. */
#ifndef DDP_TEST_HOST_ONLY_H
#define DDP_TEST_HOST_ONLY_H
#if !defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

/* fake_kernel.h sets them. */
static uint3 threadIdx __attribute__((unused)) = {}, blockIdx __attribute__((unused)) = {};
static dim3 blockDim __attribute__((unused)), gridDim __attribute__((unused));
void __syncthreads(void);
#define DDP__CUDA_KERNEL(...) ((const void *)"a kernel")
#define __CUDACC__ /* required by ddp_cuda.cuh */

#endif
#endif /* DDP_TEST_HOST_ONLY_H */

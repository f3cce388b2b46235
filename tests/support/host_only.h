/*  host_only.h - the host's half of ddp_cuda.cuh through a plain C++ compiler, in a fraction of nvcc's time and with any sanitizer.

    Include first. Kernels are parsed, but never instantiated: nothing launches one where DDP__CUDA_RUNTIME runs them as loops on the CPU. Device code is
    what compile.cuda and tests/gpu look at. Where nvcc compiles, this header does nothing. */
#ifndef DDP_TEST_HOST_ONLY_H
#define DDP_TEST_HOST_ONLY_H
#if !defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

static uint3 threadIdx __attribute__((unused)) = {}, blockIdx __attribute__((unused)) = {}; /* fake_kernel.h sets them */
static dim3 blockDim __attribute__((unused)), gridDim __attribute__((unused));
void __syncthreads(void);
#define DDP__CUDA_KERNEL(...) ((const void *)"a kernel")
#define __CUDACC__ /* ddp_cuda.cuh asks for it */

#endif
#endif /* DDP_TEST_HOST_ONLY_H */

/*  all_reduce_cuda.cu - the smallest complete program on GPUs: every rank brings a vector, every rank leaves with the sum.

    nvcc -std=c++17 -O3 -arch=native examples/all_reduce_cuda.cu -o all_reduce_cuda -lnccl      without NCCL: -DDDP_NO_NCCL in place of -lnccl
    ./all_reduce_cuda             one rank
    ./all_reduce_cuda 4           four ranks, each on a GPU of its own; where there are fewer they share, staged through host memory
    mpirun -n 2 ./all_reduce_cuda the ranks of a launcher, also under torchrun --no-python --nproc_per_node 2 */
#define DDP_IMPLEMENTATION
#include "../ddp_cuda.cuh"
#include "gpt/launcher.h"
#include <stdio.h>
#include <stdlib.h>

#define COUNT 1000000

static __global__ void fill(float *data, float value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < COUNT; i += gridDim.x * blockDim.x)
        data[i] = value;
}

static ddp_result sum(ddp_group *gpus) {
    static thread_local float host[COUNT];
    int rank = ddp_rank(gpus), ranks = ddp_world_size(gpus), expected = ranks * (ranks + 1) / 2;
    void *memory; /* on this rank's GPU */
    ddp_result result = ddp_group_alloc(gpus, COUNT * sizeof(float), &memory);
    float *data = (float *)memory;
    if (result != DDP_OK) return result;

    fill<<<256, 256>>>(data, (float)(rank + 1)); /* on the default stream, which calls follow and hold up */
    result = ddp_all_reduce(gpus, data, data, COUNT, DDP_F32, DDP_OP_SUM, NULL);
    if (result != DDP_OK) return result;

    cudaError_t error = cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) return ddp_fail(DDP_ERR_ENGINE, "rank %d: %s", rank, cudaGetErrorString(error));
    for (int i = 0; i < COUNT; i++)
        if (host[i] != (float)expected)
            return ddp_fail(DDP_ERR_CORRUPT, "element %d on rank %d is %g, not %d", i, rank, (double)host[i],
                            expected);
    if (rank == 0)
        printf("%d ranks: 1 + ... + %d = %d, in each of %d elements on every GPU\n", ranks, ranks, expected,
               COUNT);
    return ddp_group_free(gpus, memory);
}

static ddp_result run(ddp_group *world, void *user) {
    ddp_cuda_desc desc = DDP_ZERO; /* the GPU with the number of the local rank */
    ddp_group *gpus;
    ddp_result result;
    (void)user;
    desc.allow_shared = 1;
    result = ddp_cuda_group_create(&gpus, world, &desc);
    if (result == DDP_OK) result = sum(gpus);
    ddp_group_destroy(gpus);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = ranks_to_start(argc > 1 ? atoi(argv[1]) : 0, 1);
    desc.group.log_fn = print_notice;
    if (ddp_launch(&desc, run, NULL) == DDP_OK) return 0;
    fprintf(stderr, "all_reduce_cuda: %s\n", ddp_last_error());
    return 1;
}

/*  all_reduce_cuda.cu - the smallest complete program on GPUs: every rank has a vector, and every rank gets
    the sum

        nvcc -std=c++17 -O3 -arch=native examples/all_reduce_cuda.cu -o all_reduce_cuda -lnccl
        ./all_reduce_cuda                1 rank
        ./all_reduce_cuda 4              4 ranks
        mpirun -n 2 ./all_reduce_cuda    the ranks of a launcher; also torchrun --no-python --nproc_per_node 2

    Each rank has a GPU of its own and NCCL adds. If there are fewer GPUs than ranks, ranks share GPUs, and
    data travels through host memory. Without NCCL, compile with -DDDP_NO_NCCL instead of -lnccl.
    all_reduce.c is the same program on CPUs. */
#define DDP_IMPLEMENTATION
#include "../ddp_cuda.cuh"
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1000000 };

static __global__ void fill(float *data, float value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < COUNT; i += gridDim.x * blockDim.x)
        data[i] = value;
}

static ddp_result run_on_gpus(ddp_group *gpus) {
    int rank = ddp_rank(gpus), ranks = ddp_world_size(gpus), expected = ranks * (ranks + 1) / 2;
    static thread_local float host[COUNT];
    void *memory; /* on the GPU of this rank */
    DDP_TRY(ddp_group_alloc(gpus, COUNT * sizeof(float), &memory));
    float *data = (float *)memory;

    fill<<<256, 256>>>(data, (float)(rank + 1)); /* on the default stream; the all-reduce runs after it */
    DDP_TRY(ddp_all_reduce(gpus, data, data, COUNT, DDP_F32, DDP_OP_SUM, NULL));
    cudaError_t error = cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) return ddp_fail(DDP_ERR_ENGINE, "rank %d: %s", rank, cudaGetErrorString(error));

    for (int i = 0; i < COUNT; i++)
        if (host[i] != (float)expected)
            return ddp_fail(DDP_ERR_CORRUPT, "element %d on rank %d is %g, not %d: the all-reduce is wrong",
                            i, rank, (double)host[i], expected);
    if (rank == 0)
        printf("%d ranks: the sum of 1 to %d is %d, in each of %d elements on every GPU\n", ranks, ranks,
               expected, COUNT);
    return ddp_group_free(gpus, memory);
}

static ddp_result run(ddp_group *world, void *user) {
    ddp_cuda_desc desc = DDP_ZERO; /* device: the GPU with the number of the local rank */
    ddp_group *gpus;
    (void)user;
    desc.allow_shared = 1; /* fewer GPUs than ranks are no error */
    DDP_TRY(ddp_cuda_group_create(&gpus, world, &desc));
    ddp_result result = run_on_gpus(gpus);
    ddp_group_destroy(gpus);
    return result;
}

/* Receives notices, such as the ranks that share a GPU. */
static void print_notice(const char *text, void *user) {
    (void)user;
    fprintf(stderr, "%s\n", text);
}

/* torchrun, mpirun, mpiexec and srun set one of these variables. */
static int has_launcher(void) {
    return getenv("WORLD_SIZE") || getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE")
           || getenv("SLURM_STEP_ID");
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    ddp_result result = DDP_OK;
    desc.world_size = has_launcher() ? 0 : 1; /* 0: the ranks of the launcher */
    if (argc > 1) desc.world_size = atoi(argv[1]);
    if (argc > 2 || (argc > 1 && desc.world_size < 1))
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    desc.group.log_fn = print_notice;
    if (result == DDP_OK) result = ddp_launch(&desc, run, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

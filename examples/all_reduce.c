/*  all_reduce.c - the smallest complete program: every rank has a vector, and every rank gets the sum

        cc -O3 -march=native examples/all_reduce.c -o all_reduce -lm -lpthread
        ./all_reduce                one rank per core
        ./all_reduce 4              4 ranks
        mpirun -n 2 ./all_reduce    the ranks of a launcher; also torchrun --no-python --nproc_per_node 2

    ddp_launch starts the ranks and calls run on each. The group `world` connects them. The vector is stored
    in group memory, which the ranks of one machine read in place: the all-reduce makes no copy. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1000000 };

static ddp_result run(ddp_group *world, void *user) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world), expected = ranks * (ranks + 1) / 2;
    void *memory;
    (void)user;
    DDP_TRY(ddp_group_alloc(world, COUNT * sizeof(float), &memory));
    float *data = (float *)memory;

    for (int i = 0; i < COUNT; i++) data[i] = (float)(rank + 1);
    DDP_TRY(ddp_all_reduce(world, data, data, COUNT, DDP_F32, DDP_OP_SUM, NULL));

    for (int i = 0; i < COUNT; i++)
        if (data[i] != (float)expected)
            return ddp_fail(DDP_ERR_CORRUPT, "element %d on rank %d is %g, not %d: the all-reduce is wrong",
                            i, rank, (double)data[i], expected);
    if (rank == 0)
        printf("%d ranks: the sum of 1 to %d is %d, in each of %d elements on every rank\n", ranks, ranks,
               expected, COUNT);
    return ddp_group_free(world, memory);
}

/* Receives notices, such as the ranks that have not arrived after 5 seconds. */
static void print_notice(const char *text, void *user) {
    (void)user;
    fprintf(stderr, "%s\n", text);
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO; /* world_size 0: the ranks of a launcher, or one per core */
    ddp_result result = DDP_OK;
    if (argc > 1) desc.world_size = atoi(argv[1]);
    if (argc > 2 || (argc > 1 && desc.world_size < 1))
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    desc.group.log_fn = print_notice;
    if (result == DDP_OK) result = ddp_launch(&desc, run, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

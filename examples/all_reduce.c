/*  all_reduce.c - the smallest complete program: every rank brings a vector, every rank leaves with the sum.

    cc -O3 -march=native examples/all_reduce.c -o all_reduce -lm -lpthread
    ./all_reduce                  one rank per core
    ./all_reduce 4                four ranks
    mpirun -n 2 ./all_reduce      the ranks of a launcher, also under torchrun --no-python --nproc_per_node 2 */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <stdio.h>
#include <stdlib.h>

#define COUNT 1000000

static ddp_result sum(ddp_group *world, void *user) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world), expected = ranks * (ranks + 1) / 2;
    void *memory; /* peers read it in place: no copy */
    ddp_result result = ddp_group_alloc(world, COUNT * sizeof(float), &memory);
    float *data = (float *)memory;
    (void)user;
    if (result != DDP_OK) return result;

    for (int i = 0; i < COUNT; i++) data[i] = (float)(rank + 1);
    result = ddp_all_reduce(world, data, data, COUNT, DDP_F32, DDP_OP_SUM, NULL);
    if (result != DDP_OK) return result;

    for (int i = 0; i < COUNT; i++)
        if (data[i] != (float)expected)
            return ddp_fail(DDP_ERR_CORRUPT, "element %d on rank %d is %g, not %d", i, rank, (double)data[i],
                            expected);
    if (rank == 0)
        printf("%d ranks: 1 + ... + %d = %d, in each of %d elements on every rank\n", ranks, ranks, expected,
               COUNT);
    return ddp_group_free(world, memory);
}

static void print_notice(const char *text, void *user) {
    (void)user;
    fprintf(stderr, "%s\n", text);
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    char *end = argc > 1 ? argv[1] : NULL;
    desc.group.log_fn = print_notice;                              /* such as ranks that are waited for */
    if (end && *end) desc.world_size = (int)strtol(end, &end, 10); /* 0 = one rank per core */
    if (argc > 2 || (end && (*end || end == argv[1])))
        return fprintf(stderr, "all_reduce: the only argument is how many ranks to start: all_reduce 4\n"), 1;
    if (ddp_launch(&desc, sum, NULL) == DDP_OK) return 0;
    fprintf(stderr, "all_reduce: %s\n", ddp_last_error());
    return 1;
}

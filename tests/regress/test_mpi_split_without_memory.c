/*  test_mpi_split_without_memory.c - a rank without memory for a split fails the split of all ranks, within the timeout.

    Its peers went on to MPI_Comm_split, which cannot be given up, or made groups that this rank was missing from. */
#include <mpi.h>

#include "../../ddp.h"
#include "../support/ranks.h"

static int left = -1; /* allocations until one fails; -1 = none does */

static void *alloc_some(size_t size_bytes, void *user) {
    (void)user;
    if (left >= 0 && left-- == 0) return NULL;
    return malloc(size_bytes);
}

static void free_some(void *memory, void *user) { (void)user; free(memory); }

/* *over = 1 once the split needs fewer allocations than come before the one that fails. */
static ddp_result try_with(int before, int kind, int *over) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *g = NULL, *part = NULL;
    ddp_result result;
    int rank, color, mine[2], worst[2];
    double start;
    desc.init_method = "mpi://";
    desc.timeout_ms = 700;
    desc.alloc_fn = alloc_some;
    desc.free_fn = free_some;
    desc.order = kind < 2 ? DDP_ORDER_TREE : DDP_ORDER_ANY;
    PMPI_Barrier(MPI_COMM_WORLD);
    RANKS_OK(NULL, ddp_group_create(&g, &desc));
    rank = ddp_rank(g);
    color = kind == 0 ? rank % 2 : rank / 2;
    RANKS_OK(g, ddp_barrier(g));
    if (rank == 1) left = before;
    start = ranks_now();
    result = ddp_group_split(g, color, 0, &part);
    mine[0] = left < 0;
    left = -1;
    mine[1] = result == DDP_OK && ddp_barrier(part) != DDP_OK; /* a group in which somebody is missing */
    RANKS_CHECK(g, ranks_now() - start < 20, "it took %.1f s", ranks_now() - start);
    RANKS_CHECK(g, (result == DDP_OK) == (part != NULL), "%s", ddp_result_name(result));
    ddp_group_destroy(part);
    if (rank != 1) mine[0] = 0;
    else *over = !mine[0];
    mine[0] = mine[0] && result == DDP_OK;
    PMPI_Allreduce(mine, worst, 2, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    PMPI_Bcast(over, 1, MPI_INT, 1, MPI_COMM_WORLD);
    ddp_group_destroy(g);
    RANKS_CHECK(NULL, !worst[0], "kind %d, allocation %d: the rank that had none was content", kind, before);
    RANKS_CHECK(NULL, !worst[1], "kind %d, allocation %d: a group without all its ranks", kind, before);
    return DDP_OK;
}

int main(void) {
    watchdog_start(100);
    PMPI_Init(NULL, NULL);
    for (int kind = 0; kind < 3; kind++)
        for (int before = 0, over = 0; !over; before++)
            if (try_with(before, kind, &over) != DDP_OK) _exit(1);
    PMPI_Finalize();
    return 0;
}

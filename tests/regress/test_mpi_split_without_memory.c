/*  test_mpi_split_without_memory.c - a rank without memory for a split fails the split of all ranks, within
    the timeout.

    Its peers continued to MPI_Comm_split, which cannot be cancelled, or created groups without this rank. */
#include <mpi.h>

#include "../../ddp.h"
#include "../support/ranks.h"

static int left = -1; /* allocations until one fails; -1 = none fails */

static void *alloc_some(size_t size_bytes, void *user) {
    (void)user;
    if (left >= 0 && left-- == 0) return NULL;
    return malloc(size_bytes);
}

static void free_some(void *memory, void *user) {
    (void)user;
    free(memory);
}

static int timeout_ms = 700; /* the duration of a split in which a rank is missing */

/* A world in which every rank has met every other one. The timeout is for missing ranks, not for a machine
   that stands still. */
static ddp_group *make_world(ddp_order order) {
    for (;; timeout_ms *= 2) {
        ddp_group_desc desc = DDP_ZERO;
        ddp_group *g = NULL;
        int ok, all_ok;
        desc.init_method = "mpi://";
        desc.timeout_ms = timeout_ms;
        desc.alloc_fn = alloc_some;
        desc.free_fn = free_some;
        desc.order = order;
        PMPI_Barrier(MPI_COMM_WORLD);
        ok = ddp_group_create(&g, &desc) == DDP_OK && ddp_barrier(g) == DDP_OK;
        PMPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        if (all_ok) return g;
        if (!ok) fprintf(stderr, "again: %s\n", ddp_last_error());
        ddp_group_destroy(g);
    }
}

enum outcome {
    WRONG,
    AGAIN /* the time was up before */,
    FAILED /* as it should */,
    OVER /* the split needs fewer allocations */
};

static enum outcome try_with(int before, int kind) {
    ddp_group *g = make_world(kind < 2 ? DDP_ORDER_TREE : DDP_ORDER_ANY), *part = NULL;
    int rank = ddp_rank(g), color = kind == 0 ? rank % 2 : rank / 2, mine[3], theirs[3], wrong = 0;
    ddp_result result;
    if (rank == 1) left = before;
    result = ddp_group_split(g, color, 0, &part);
    mine[0] = color;
    mine[1] = (int)result;
    mine[2] = rank == 1 && left < 0; /* it got no memory */
    left = -1;
    if ((result == DDP_OK) != (part != NULL))
        wrong = printf("FAIL rank %d: %s\n", rank, ddp_result_name(result));
    memcpy(theirs, mine, sizeof theirs);
    PMPI_Bcast(theirs, 3, MPI_INT, 1, MPI_COMM_WORLD);
    if (theirs[2] && theirs[1] == DDP_OK)
        wrong = printf("FAIL kind %d, allocation %d: the rank that had none was content\n", kind, before);
    if (theirs[2] && theirs[0] == color && result == DDP_OK)
        wrong = printf("FAIL kind %d, allocation %d: rank %d has a group that rank 1 is missing from\n", kind,
                       before, rank);
    ddp_group_destroy(part);
    ddp_group_destroy(g);
    return wrong ? WRONG : theirs[2] ? FAILED : theirs[1] == DDP_OK ? OVER : AGAIN;
}

int main(void) {
    watchdog_start(100);
    setvbuf(stdout, NULL, _IOLBF, 0);
    PMPI_Init(NULL, NULL);
    for (int kind = 0; kind < 3; kind++)
        for (int before = 0, outcome = AGAIN; outcome != OVER; before += outcome == FAILED)
            if ((outcome = (int)try_with(before, kind)) == WRONG) _exit(1);
    PMPI_Finalize();
    return 0;
}

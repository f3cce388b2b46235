/*  test_mpi_late.c - data that arrives after a call has failed is written nowhere.

    A call that failed left its buffers with MPI. Numbers on its stack received the answer of a late rank
    while that stack was in other use, and the user's buffer received the late data.

    mpirun -n 2 test_mpi_late barrier|message|gather */
#include <mpi.h>

#include "../../ddp.h"
#include "../support/ranks.h"

enum { COUNT = 4000 };
static int holds; /* this rank does not begin to send before the other one has failed */

static void await_failure(void) { PMPI_Recv(NULL, 0, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }

int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
    int late = holds && count > 1000;
    if (late) {
        holds = 0;
        await_failure();
    }
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}

/* Checks that the stack below the caller's is not written while the late rank continues. */
static __attribute__((noinline)) int nobody_writes(const float *data) {
    volatile unsigned char stack[100000];
    int ok = 1;
    memset((void *)(uintptr_t)stack, 0x5a, sizeof stack);
    PMPI_Send(NULL, 0, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
    PMPI_Recv(NULL, 0, MPI_BYTE, 1, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    for (double until = ranks_now() + 0.3; ranks_now() < until;) { /* MPI moves on */
        int flag;
        PMPI_Iprobe(MPI_ANY_SOURCE, 99, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
    }
    for (size_t i = 0; i < sizeof stack; i++) ok &= stack[i] == 0x5a;
    for (int i = 0; i < COUNT; i++) ok &= data[i] == 7;
    return ok;
}

static ddp_result rank_main(const char *what) {
    static float data[2 * COUNT], mine[COUNT];
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *g = NULL;
    ddp_result result = DDP_OK;
    int late;
    desc.init_method = "mpi://";
    desc.timeout_ms = 8000; /* a machine can stand still for seconds */
    RANKS_OK(NULL, ddp_group_create(&g, &desc));
    RANKS_OK(g, ddp_barrier(g));
    late = ddp_rank(g) == 1;
    for (int i = 0; i < 2 * COUNT; i++) data[i] = 7;
    for (int i = 0; i < COUNT; i++) mine[i] = late ? 8 : 7;
    holds = late && strcmp(what, "gather") == 0;
    if (late && !holds) await_failure();
    if (strcmp(what, "barrier") == 0)
        result = ddp_barrier(g);
    else if (strcmp(what, "gather") == 0)
        result = ddp_all_gather(g, mine, data, COUNT, DDP_F32, NULL);
    else if (late)
        (void)!ddp_send(g, mine, COUNT, DDP_F32, 0, 3, NULL);
    else
        result = ddp_recv(g, data, COUNT, DDP_F32, 1, 3, NULL);
    if (late) PMPI_Send(NULL, 0, MPI_BYTE, 0, 2, MPI_COMM_WORLD);
    if (late) return DDP_OK;
    RANKS_CHECK(g, result == DDP_ERR_TIMEOUT, "%s: %s", ddp_result_name(result), ddp_last_error());
    RANKS_CHECK(g, nobody_writes(strcmp(what, "gather") == 0 ? data + COUNT : data), "%s: it was written",
                what);
    return DDP_OK;
}

static void finalize(void) { PMPI_Finalize(); } /* after ddp.h, which leaves it out after a failed group */

int main(int argc, char **argv) {
    ddp_result result;
    watchdog_start(50);
    PMPI_Init(NULL, NULL);
    PMPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    result = rank_main(argc > 1 ? argv[1] : "");
    if (result != DDP_OK) _exit(1);
    finalize();
    return 0;
}

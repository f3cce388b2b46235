/*  test_mpi_abort_thread.c - a thread that monitors training aborts the group while the main thread waits in
    a collective.

    Below MPI_THREAD_MULTIPLE only the thread that makes the group's calls may call MPI. ddp_group_abort
    notified the other machines from the calling thread, concurrently with a call in progress. Now the waiting
    call notifies them. */
#include <mpi.h>

#include "../../ddp.h"
#include "../support/ranks.h"

#include <pthread.h>

static pthread_t main_thread;
static int watched, trespasses;

/* Replaces MPI's own functions in the library. */
int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
    if (watched && !pthread_equal(pthread_self(), main_thread))
        __atomic_add_fetch(&trespasses, 1, __ATOMIC_SEQ_CST);
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}

static void *call_off(void *group) {
    ranks_sleep_us(100000); /* the main thread is likely to wait by then; if not, its call fails at once */
    return ddp_group_abort((ddp_group *)group) == DDP_OK ? group : NULL;
}

/* The others wait for a message that never arrives. The barrier of rank 0 notifies them, or its
   ddp_group_destroy if it makes no other call. */
static ddp_result rank_main(int waits) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *g = NULL;
    pthread_t thread;
    void *called = NULL;
    desc.init_method = "mpi://";
    desc.timeout_ms = 20000;
    RANKS_OK(NULL, ddp_group_create(&g, &desc));
    RANKS_OK(g, ddp_barrier(g));
    if (ddp_rank(g) == 0) {
        watched = 1;
        if (pthread_create(&thread, NULL, call_off, g) != 0) return ddp_fail(DDP_ERR_SYSTEM, "no thread");
        if (waits) RANKS_CHECK(g, ddp_barrier(g) == DDP_ERR_POISONED, "%s", ddp_last_error());
        pthread_join(thread, &called);
        RANKS_CHECK(g, called == g, "the abort failed");
    } else {
        RANKS_CHECK(g, ddp_recv(g, &called, 1, DDP_U64, 0, 0, NULL) == DDP_ERR_POISONED, "%s",
                    ddp_last_error());
    }
    RANKS_CHECK(g,
                ddp_group_status(g) != DDP_OK && strstr(ddp_last_error(), "rank 0 (pid ")
                    && strstr(ddp_last_error(), "called ddp_group_abort"),
                "%s", ddp_last_error());
    RANKS_CHECK(g, trespasses == 0, "%d calls of MPI by the thread that aborted", trespasses);
    ddp_group_destroy(g);
    MPI_Barrier(MPI_COMM_WORLD);
    return DDP_OK;
}

int main(void) {
    int level;
    watchdog_start(50);
    main_thread = pthread_self();
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
    for (int waits = 1; waits >= 0; waits--)
        if (rank_main(waits) != DDP_OK) _exit(1);
    MPI_Finalize();
    return 0;
}

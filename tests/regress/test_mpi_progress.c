/*  test_mpi_progress.c - a message progresses while its sender waits in a collective.

    The ranks of a machine meet in shared memory before MPI gets a call. A rank that waited there did not let
    MPI progress. Below MPI_THREAD_MULTIPLE no other thread does, so a large message stayed unsent. Its
    receiver, which was to make that call next, waited for it until the timeout. */
#include <mpi.h>

#include "../../ddp.h"
#include "../support/ranks.h"

enum { COUNT = 4 << 20 };

static ddp_result rank_main(void) {
    float *data = (float *)malloc(COUNT * sizeof *data);
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *g = NULL;
    ddp_work sent = DDP_ZERO;
    desc.init_method = "mpi://";
    desc.order = DDP_ORDER_ANY;
    desc.timeout_ms = 10000;
    RANKS_OK(NULL, ddp_group_create(&g, &desc));
    for (int i = 0; i < COUNT; i++) data[i] = (float)(ddp_rank(g) + i % 1000);
    RANKS_OK(g, ddp_barrier(g));
    if (ddp_rank(g) == 0) RANKS_OK(g, ddp_send(g, data, COUNT, DDP_F32, 1, 3, &sent));
    if (ddp_rank(g) == 1) RANKS_OK(g, ddp_recv(g, data, COUNT, DDP_F32, 0, 3, NULL));
    RANKS_OK(g, ddp_barrier(g));
    RANKS_OK(g, ddp_wait(g, &sent));
    for (int i = 0; i < COUNT; i++)
        RANKS_CHECK(g, data[i] == (float)(i % 1000), "element %d is %g", i, (double)data[i]);
    ddp_group_destroy(g);
    free(data);
    return DDP_OK;
}

int main(void) {
    int level;
    watchdog_start(50);
    /* Otherwise the receiver could complete it by itself. */
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 1);
    setenv("OMPI_MCA_btl_sm_single_copy_mechanism", "none", 1);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SINGLE, &level);
    if (rank_main() != DDP_OK) _exit(1);
    MPI_Finalize();
    return 0;
}

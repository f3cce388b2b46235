/*  test_mpi_free_in_turn.c - group memory is freed in issue order, after asynchronous work.

    Over MPI ddp_group_free communicated with the ranks of its machine at once, on the caller, while the
    communication thread did the same for an all_reduce issued before. Both made calls on one group, which
    then disagreed or waited for each other. */
#include "../../ddp.h"
#include "../support/ranks.h"

enum { COUNT = 1000000, ROUNDS = 20 };

static ddp_result rank_main(ddp_group *g, void *user) {
    static float data[COUNT];
    int w = ddp_world_size(g);
    (void)user;
    for (int round = 0; round < ROUNDS; round++) {
        void *memory[4];
        ddp_work work;
        for (int i = 0; i < 4; i++) RANKS_OK(g, ddp_group_alloc(g, 4096, &memory[i]));
        for (int i = 0; i < COUNT; i++) data[i] = (float)(ddp_rank(g) + i % 100);
        RANKS_OK(g, ddp_all_reduce(g, data, data, COUNT, DDP_F32, DDP_OP_SUM, &work));
        for (int i = 0; i < 4; i++) { /* at different places of the sum */
            ranks_sleep_us((round * 137 + i * 311 + ddp_rank(g) * 753) % 2000);
            RANKS_OK(g, ddp_group_free(g, memory[i]));
        }
        RANKS_OK(g, ddp_wait(g, &work));
        for (int i = 0; i < COUNT; i++)
            RANKS_CHECK(g, data[i] == (float)(w * (w - 1) / 2 + w * (i % 100)), "round %d: element %d is %g",
                        round, i, (double)data[i]);
    }
    RANKS_CHECK(g, ddp_group_free(g, data) == DDP_ERR_INVALID, "memory from elsewhere");
    return DDP_OK;
}

int main(void) {
    watchdog_start(50);
    return ranks_run(RANKS_MPI, 0, 20000, rank_main, NULL) != DDP_OK;
}

/*  test_signal_is_named.c - a timeout names ddp_group_wait_signal, and not the collective before it.

    A rank that waits publishes its call, so that the timeouts of other groups can name it. Inside
    ddp_group_wait_signal it published its last collective: "rank 0 was waiting in ddp_all_reduce (seq=1)",
    though that call had returned.

    Here rank 0 waits for a signal of rank 1, which sleeps. Rank 2 waits for rank 0 in another group. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include <unistd.h>

enum { TIMEOUT_MS = 800 * DDP_TEST_SLOWDOWN };

static int *named; /* shared: results of rank 2 that name the wait */

static ddp_result rank_main(ddp_group *world, void *user) {
    int rank = ddp_rank(world);
    float x = 1;
    ddp_group *pair, *other;
    uint64_t *word = NULL;
    (void)user;
    RANKS_OK(world, ddp_group_split(world, rank < 2 ? 0 : -1, 0, &pair));
    RANKS_OK(world, ddp_group_split(world, rank != 1 ? 1 : -1, 0, &other));
    if (pair) RANKS_OK(world, ddp_group_alloc(pair, 64, (void **)&word));
    if (pair) RANKS_OK(world, ddp_all_reduce(pair, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_OK(world, ddp_barrier(world));
    if (rank == 0) {
        usleep(TIMEOUT_MS * 1000 / 2); /* rank 2 times out first */
        ddp_group_wait_signal(pair, word, 1);
    } else if (rank == 1) {
        usleep(TIMEOUT_MS * 1000 * 2);
    } else {
        ddp_result result = ddp_barrier(other);
        int names = strstr(ddp_last_error(), "was waiting in ddp_group_wait_signal of group=world.0") != NULL;
        printf("%s: %s\n", result == DDP_ERR_TIMEOUT && names ? "ok" : "FAIL", ddp_last_error());
        fflush(stdout);
        *named += result == DDP_ERR_TIMEOUT && names;
    }
    ddp_group_destroy(pair);
    ddp_group_destroy(other);
    return DDP_OK;
}

int main(void) {
    ddp_launch_desc desc = DDP_ZERO;
    watchdog_start(30 * DDP_TEST_SLOWDOWN);
    named = (int *)mmap(NULL, sizeof *named, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (named == MAP_FAILED) return 1;
    desc.world_size = 3;
    desc.group.timeout_ms = TIMEOUT_MS;
    for (int threads = 0; threads < 2; threads++) {
        desc.mode = threads ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
        ddp_launch(&desc, rank_main, NULL); /* fails: groups have timed out */
    }
    return *named != 2;
}

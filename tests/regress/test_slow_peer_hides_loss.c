/*  test_slow_peer_hides_loss.c - a rank that waits for a slow rank detects at once that a third one died.

    The wait checked only the rank that it was waiting for, and sends and receives shared one timer, which
    only the first in the list used. With rank 1 busy and rank 2 dead, rank 0 detected the loss when rank 1
    arrived, or at its timeout.

    test_slow_peer_hides_loss [processes|threads] */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { BARRIER, RECVS, BATCH, WAITS };
static const char *const wait_names[WAITS] = {"barrier", "two receives", "batch of two receives"};

static ddp_result rank_main(ddp_group *world, void *user) {
    int what = *(const int *)user, data[2] = {0, 0};
    ddp_work slow = DDP_ZERO, lost = DDP_ZERO;
    ddp_result result;
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 2) { /* leaves after rank 0 has issued its calls and, most likely, waits */
        heard(&stage_shared->counter, 1);
        ranks_sleep_us(30000);
        event_now();
        return ddp_fail(DDP_ERR_CORRUPT, "gone on purpose");
    }
    if (ddp_rank(world) == 1) { /* arrives after rank 0 has detected it, or too late to be the reason */
        for (int waited_ms = 0; waited_ms < 2 * PROMPT_SECONDS * 1000; waited_ms++) {
            if (__atomic_load_n(&stage_shared->finished, __ATOMIC_SEQ_CST)) break;
            ranks_sleep_us(1000);
        }
        return note(world, world, ddp_barrier(world));
    }
    if (what == BARRIER) {
        say(&stage_shared->counter);
        result = note(world, world, ddp_barrier(world));
    } else if (what == RECVS) {
        RANKS_OK(world, ddp_recv(world, &data[1], 1, DDP_I32, 2, 0, &lost));
        RANKS_OK(world, ddp_recv(world, &data[0], 1, DDP_I32, 1, 0, &slow));
        say(&stage_shared->counter);
        result = note(world, world, ddp_wait(world, &slow));
        ddp_wait(world, &lost);
    } else {
        RANKS_OK(world, ddp_p2p_begin(world));
        RANKS_OK(world, ddp_recv(world, &data[0], 1, DDP_I32, 1, 0, NULL));
        RANKS_OK(world, ddp_recv(world, &data[1], 1, DDP_I32, 2, 0, NULL));
        say(&stage_shared->counter);
        result = note(world, world, ddp_p2p_end(world));
    }
    say(&stage_shared->finished);
    return result;
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0)
        return fprintf(stderr, "usage: test_slow_peer_hides_loss [processes|threads]\n"), 2;
    faults_start(50);
    for (int what = 0; what < WAITS; what++) {
        const seen *s = &stage_shared->rank[0];
        faults_begin(wait_names[what]);
        launch(mode, 3, 20000, rank_main, &what);
        EXPECT(s->done && s->first == DDP_ERR_PEER_LOST && names_rank(s->text, 2), "rank 0 got %s '%s'",
               ddp_result_name(s->first), s->text);
        EXPECT(s->first_at - stage_shared->event_at < PROMPT_SECONDS, "it took %.3f s",
               s->first_at - stage_shared->event_at);
        EXPECT(stage_shared->rank[1].first == DDP_ERR_PEER_LOST, "rank 1 got '%s'",
               stage_shared->rank[1].text);
    }
    return faults_end();
}

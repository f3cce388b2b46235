/*  test_lost_at_rendezvous.c - a rank that dies after it has said hello, before the world is complete, is found to be lost.

    Ranks noted their own pid once the rendezvous was over. One that died before counted as not there yet, so that the others
    waited for it until the timeout. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/ports.h"

static void say_and_wait_for_the_end(void) {
    say(&stage_shared->counter);
    for (;;) pause();
}

static pid_t start_rank(int rank) {
    pid_t pid = fork();
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    ddp_result result;
    if (pid != 0) return pid;
    if (rank == 1) inner.hello_is_read = say_and_wait_for_the_end;
    desc.rank = rank;
    desc.world_size = 3;
    desc.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
    result = ddp_group_create(&world, &desc);
    if (result == DDP_OK) {
        note(world, world, ddp_barrier(world));
    } else { /* rank 0 saw it go before the last one came: nobody gets a world */
        seen *s = &stage_shared->rank[rank];
        s->first = result;
        s->first_at = ranks_now();
        snprintf(s->text, sizeof s->text, "%s", ddp_last_error());
        s->done = 1;
    }
    ddp_group_destroy(world);
    _exit(0);
}

int main(void) {
    pid_t pids[3];
    char port[16];
    faults_start(50);
    faults_begin("rendezvous");
    snprintf(port, sizeof port, "%d", some_ports(1)); /* it names the job */
    setenv("MASTER_PORT", port, 1);
    pids[0] = start_rank(0);
    pids[1] = start_rank(1);
    EXPECT(heard(&stage_shared->counter, 1), "rank 0 did not read the hello of rank 1");
    kill(pids[1], SIGKILL);
    waitpid(pids[1], NULL, 0);
    event_now();
    pids[2] = start_rank(2);
    for (int r = 0; r < 3; r += 2) {
        const seen *s = &stage_shared->rank[r];
        waitpid(pids[r], NULL, 0);
        EXPECT(s->done && s->first == DDP_ERR_PEER_LOST && names_rank(s->text, 1), "rank %d got %s '%s'", r, ddp_result_name(s->first), s->text);
        EXPECT(s->first_at - stage_shared->event_at < PROMPT_SECONDS, "it took %.3f s", s->first_at - stage_shared->event_at);
    }
    return faults_end();
}

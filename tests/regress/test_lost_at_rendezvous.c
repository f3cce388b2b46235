/*  test_lost_at_rendezvous.c - a rank that dies after its hello, before the world is complete, is detected as
    lost.

    Ranks stored their own pid after the rendezvous. A rank that died earlier counted as not yet arrived, so
    that the others waited for it until the timeout. */
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
    } else { /* rank 0 saw it end before the last one arrived: no rank gets a world */
        seen *s = &stage_shared->rank[rank];
        s->first = result;
        s->first_at = ranks_now();
        snprintf(s->text, sizeof s->text, "%s", ddp_last_error());
        s->done = 1;
    }
    ddp_group_destroy(world);
    _exit(0);
}

/* Ranks of one machine that meet over TCP meet again in shared memory. A rank that died after the first time
   was forgotten: the others waited for it until the timeout. */

static int victim, hellos, listens, split_group;

static void die_at_second_hello(void) {
    if (++hellos == 2) kill(getpid(), SIGKILL);
}

/* Its first rendezvous is over TCP if this is rank 0 of the world. */
static void die_at_local_listen(void) {
    if (++listens == (split_group ? 1 : 2)) kill(getpid(), SIGKILL);
}

static pid_t start_tcp_rank(int rank, int leader, const char *url) {
    pid_t pid = fork();
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL, *part = NULL;
    seen *s = &stage_shared->rank[rank];
    if (pid != 0) return pid;
    if (rank == victim && rank == leader) inner.before_listen = die_at_local_listen;
    if (rank == victim && rank != leader) inner.before_hello = die_at_second_hello;
    machine_salt = split_group
                   && rank == 0; /* the split is of ranks 1, 2 and 3, on another machine than rank 0 */
    desc.init_method = url;
    desc.rank = rank;
    desc.world_size = split_group ? 4 : 3;
    desc.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
    s->first = ddp_group_create(&world, &desc);
    if (split_group && s->first == DDP_OK) s->first = ddp_group_split(world, rank > 0, 0, &part);
    s->first_at = ranks_now();
    snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
    s->done = 1;
    for (double until = s->first_at + 1; ranks_now() < until;)
        ranks_sleep_us(10000); /* the end of this process is not the cause */
    ddp_group_destroy(part);
    ddp_group_destroy(world);
    _exit(0);
}

static void test_lost_after_tcp(void) {
    int count = split_group ? 4 : 3, leader = split_group;
    pid_t pids[4];
    char url[64];
    faults_begin(split_group ? "split of a group over TCP" : "ranks that met over TCP");
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", some_ports(1));
    for (int r = count - 1; r >= 0; r--) pids[r] = start_tcp_rank(r, leader, url);
    waitpid(pids[victim], NULL, 0);
    event_now();
    for (int r = 0; r < count; r++) {
        const seen *s = &stage_shared->rank[r];
        if (r == victim) continue;
        waitpid(pids[r], NULL, 0);
        if (r < leader) continue; /* the only one in its part */
        EXPECT(s->done && s->first == DDP_ERR_PEER_LOST && names_rank(s->text, victim - leader),
               "rank %d got %s '%s'", r, ddp_result_name(s->first), s->text);
        EXPECT(s->first_at - stage_shared->event_at < 2 * DDP_TEST_SLOWDOWN, "it took %.3f s",
               s->first_at - stage_shared->event_at);
    }
}

int main(void) {
    pid_t pids[3];
    char port[16];
    faults_start(100);
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
        EXPECT(s->done && s->first == DDP_ERR_PEER_LOST && names_rank(s->text, 1), "rank %d got %s '%s'", r,
               ddp_result_name(s->first), s->text);
        EXPECT(s->first_at - stage_shared->event_at < PROMPT_SECONDS, "it took %.3f s",
               s->first_at - stage_shared->event_at);
    }
    unsetenv("MASTER_PORT");
    for (split_group = 0; split_group < 2; split_group++)
        for (victim = split_group; victim < 3; victim++) test_lost_after_tcp();
    return faults_end();
}

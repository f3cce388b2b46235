/*  test_outer_proc.c - a living rank is not declared dead because /proc cannot show it.

    In a PID namespace that still has the outer /proc, /proc/PID is another process or missing. A rank that
    waited for some milliseconds then failed with "pid is gone". So did a rank without a free descriptor,
    which cannot open /proc/PID/stat. A rank that really ends is still detected at once, also as a zombie. */
#include <sys/syscall.h>

#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/ports.h"

enum { NO_NAMESPACES = 77 };

/* Forks until the number of the child is that of no process in this /proc: only then was the failure
   certain. */
static pid_t fork_unseen(void) {
    for (int tries = 0; tries < 2000; tries++) {
        int go[2];
        char path[32], byte = 0;
        pid_t pid;
        if (pipe(go) != 0) return -1;
        pid = fork();
        if (pid == 0) {
            close(go[1]);
            if (read(go[0], &byte, 1) != 1) _exit(0);
            close(go[0]);
            return 0;
        }
        close(go[0]);
        snprintf(path, sizeof path, "/proc/%d", (int)pid);
        if (access(path, F_OK) != 0 && write(go[1], "!", 1) == 1) byte = '!';
        close(go[1]);
        if (byte) return pid;
        waitpid(pid, NULL, 0);
    }
    return -1;
}

static void be_rank(int rank, int few_files) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    seen *s = &stage_shared->rank[rank];
    desc.rank = rank;
    desc.world_size = 2;
    desc.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
    s->first = ddp_group_create(&world, &desc);
    if (s->first == DDP_OK && rank == 0 && few_files) {
        struct rlimit none;
        memset(&none, 0, sizeof none);
        setrlimit(RLIMIT_NOFILE, &none);
    }
    if (s->first == DDP_OK && rank == 1) ranks_sleep_us(300000); /* rank 0 checks this process many times */
    if (s->first == DDP_OK) s->first = ddp_barrier(world);
    snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
    if (s->first == DDP_OK && rank == 1) {
        event_now();
        _exit(0); /* without a message; no rank detects it until rank 0 has ended */
    }
    if (s->first == DDP_OK && !few_files) {
        s->second = ddp_barrier(world);
        s->first_at = ranks_now();
        snprintf(s->text2, sizeof s->text2, "%s", ddp_last_error());
    }
    s->done = 1;
    ddp_group_destroy(world);
    _exit(0);
}

static void check(void) {
    const seen *zero = &stage_shared->rank[0], *one = &stage_shared->rank[1];
    EXPECT(zero->done && zero->first == DDP_OK, "rank 0 waits for rank 1, which lives: %s '%s'",
           ddp_result_name(zero->first), zero->text);
    EXPECT(one->first == DDP_OK, "rank 1: %s '%s'", ddp_result_name(one->first), one->text);
    EXPECT(zero->second == DDP_ERR_PEER_LOST && names_rank(zero->text2, 1), "rank 1 has ended: %s '%s'",
           ddp_result_name(zero->second), zero->text2);
    EXPECT(zero->first_at - stage_shared->event_at < PROMPT_SECONDS, "it took %.3f s",
           zero->first_at - stage_shared->event_at);
}

/* The first process of a new namespace, with the /proc of the outer one. Both ranks are its children. */
static void be_first(void) {
    pid_t pids[2];
    if (getpid() != 1) _exit(NO_NAMESPACES);
    for (int r = 0; r < 2; r++) {
        pids[r] = fork_unseen();
        if (pids[r] == 0) be_rank(r, 0);
        if (pids[r] < 0) _exit(1);
    }
    waitpid(pids[0], NULL, 0); /* rank 1 is a zombie meanwhile */
    waitpid(pids[1], NULL, 0);
    _exit(0);
}

/* AddressSanitizer starts a thread before main, which a process that has left its namespace cannot: therefore
   a process that never gets there. */
static void start_apart(void) {
    pid_t child;
    int status = 0;
    if (syscall(SYS_unshare, 0x20000000 /* CLONE_NEWPID */) != 0) _exit(NO_NAMESPACES);
    child = fork();
    if (child == 0) be_first();
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) _exit(1);
    _exit(WEXITSTATUS(status));
}

int main(void) {
    char port[16];
    pid_t child, pids[2];
    int status = -1;
    faults_start(60);
    snprintf(port, sizeof port, "%d", some_ports(1)); /* it names the job */
    setenv("MASTER_PORT", port, 1);

    faults_begin("a rank without a free descriptor");
    for (int r = 0; r < 2; r++) {
        pids[r] = fork();
        if (pids[r] == 0) be_rank(r, 1);
    }
    for (int r = 0; r < 2; r++) EXPECT(waitpid(pids[r], NULL, 0) == pids[r], "waitpid");
    EXPECT(stage_shared->rank[0].first == DDP_OK, "rank 0 waits for rank 1, which lives: '%s'",
           stage_shared->rank[0].text);

    faults_begin("the /proc of the outer namespace");
    child = fork();
    if (child == 0) start_apart();
    EXPECT(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status), "wait status %d", status);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NO_NAMESPACES && !faults_failures) {
        fprintf(stderr, "no PID namespaces here: skipped\n");
        return 77;
    }
    EXPECT(WEXITSTATUS(status) == 0, "the ranks did not start");
    check();
    return faults_end();
}

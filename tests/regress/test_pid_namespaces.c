/*  test_pid_namespaces.c - ranks that cannot see each other's processes get an error at the rendezvous.

    Two containers can share the network, and therefore meet, with separate process numbers. A large receive
    then read the process with the sender's number here, often the receiver itself, and returned DDP_OK with
    that data. Any wait of some milliseconds ended in "pid is gone". */
#include <sys/syscall.h>

#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/ports.h"

static void be_rank(int rank) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    char number[2] = {(char)('0' + rank), 0};
    setenv("RANK", number, 1);
    setenv("LOCAL_RANK", number, 1);
    desc.timeout_ms = 60000;
    stage_shared->rank[rank].first = ddp_group_create(&world, &desc);
    snprintf(stage_shared->rank[rank].text, sizeof stage_shared->rank[rank].text, "%s", ddp_last_error());
    ddp_group_destroy(world);
    _exit(0);
}

/* A process that has left the namespace for its children cannot start threads. AddressSanitizer starts a
   thread before main, which a process that has left its namespace cannot: therefore a process that never gets
   there. */
static void start_apart(void) {
    pid_t child;
    if (syscall(SYS_unshare, 0x20000000 /* CLONE_NEWPID */) != 0) _exit(77);
    child = fork();
    if (child == 0) be_rank(1);
    _exit(child < 0 || waitpid(child, NULL, 0) != child);
}

int main(void) {
    char port[16];
    pid_t child[2];
    int status = -1;
    faults_start(60);
    faults_begin("rank 1 is the first process of its own namespace");
    snprintf(port, sizeof port, "%d", some_ports(1)); /* it names the job */
    setenv("MASTER_ADDR", "pid_namespaces", 1);
    setenv("MASTER_PORT", port, 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    child[0] = fork();
    if (child[0] == 0) be_rank(0);
    child[1] = fork();
    if (child[1] == 0) start_apart();
    if (child[1] > 0 && waitpid(child[1], &status, 0) == child[1] && WIFEXITED(status)
        && WEXITSTATUS(status) == 77) {
        kill(child[0], SIGKILL);
        fprintf(stderr, "no pid namespaces here: skipped\n");
        return 77;
    }
    EXPECT(child[0] > 0 && waitpid(child[0], NULL, 0) == child[0], "rank 0 did not start");
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank 1 did not start");
    for (int r = 0; r < 2; r++) {
        EXPECT(stage_shared->rank[r].first == DDP_ERR_UNSUPPORTED, "rank %d: %s", r,
               ddp_result_name(stage_shared->rank[r].first));
        EXPECT(says(stage_shared->rank[r].text, "rank 1 (pid 1) and rank 0 are in different pid namespaces"),
               "rank %d: %s", r, stage_shared->rank[r].text);
    }
    return faults_end();
}

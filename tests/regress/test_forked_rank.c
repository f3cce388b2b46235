/*  test_forked_rank.c - a process that a rank forks gets an error from every call, and harms nothing.

    Once, its calls were taken for the rank's: a barrier of the child let the peers pass, and its ddp_group_destroy told them that the
    rank had left. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include <sys/wait.h>

static int failures;
#define REFUSED(call) \
    do { \
        ddp_result refused = (call); \
        const char *line = ddp_last_error(); \
        if (refused == DDP_ERR_INVALID && strstr(line, "was forked from the rank and is not part of the group")) break; \
        fprintf(stderr, "FAIL %s: %s: %s\n", #call, ddp_result_name(refused), line); \
        failures++; \
    } while (0)

static int child(ddp_group *group, void *memory, ddp_work *work) {
    float x = 1;
    int done;
    void *more;
    ddp_group *half;
    ddp_work mine = DDP_ZERO;
    REFUSED(ddp_barrier(group));
    REFUSED(ddp_all_reduce(group, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL));
    REFUSED(ddp_broadcast(group, &x, 1, DDP_F32, 0, &mine));
    REFUSED(ddp_send(group, &x, 1, DDP_F32, 1, 0, NULL));
    REFUSED(ddp_recv(group, &x, 1, DDP_F32, 1, 0, &mine));
    REFUSED(ddp_wait(group, work));
    REFUSED(ddp_test(group, work, &done));
    REFUSED(ddp_p2p_begin(group));
    REFUSED(ddp_p2p_end(group));
    REFUSED(ddp_group_alloc(group, 64, &more));
    REFUSED(ddp_group_free(group, memory));
    REFUSED(ddp_group_split(group, 0, 0, &half));
    REFUSED(ddp_group_status(group));
    REFUSED(ddp_group_abort(group));
    ddp_group_destroy(group);
    return failures != 0;
}

static ddp_result run(ddp_group *group, void *user) {
    float x = 1;
    void *memory;
    ddp_work work = DDP_ZERO;
    int status = 0;
    (void)user;
    RANKS_OK(group, ddp_group_alloc(group, 4096, &memory));
    RANKS_OK(group, ddp_all_reduce(group, &x, &x, 1, DDP_F32, DDP_OP_SUM, &work));
    if (ddp_rank(group) == 0) {
        pid_t pid = fork();
        if (pid == 0) {
            int failed = child(group, memory, &work);
            fflush(NULL);
            _exit(failed);
        }
        RANKS_CHECK(group, waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child: %x", status);
    }
    RANKS_OK(group, ddp_wait(group, &work));
    RANKS_OK(group, ddp_barrier(group));
    RANKS_CHECK(group, x == 3, "the sum is %g", (double)x);
    return ddp_group_free(group, memory);
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    watchdog_start(60);
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) return 2;
    if (ranks_run(mode, 3, 20000, run, NULL) == DDP_OK) return 0;
    fprintf(stderr, "%s\n", ddp_last_error());
    return 1;
}

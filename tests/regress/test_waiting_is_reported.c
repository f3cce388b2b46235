/*  test_waiting_is_reported.c - a rank that waits for others logs which ones, and the address where it
    listens.

    Old rank variables in the environment, or a wrong address, made a program wait ten minutes in silence. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/ports.h"

static char urls[3][96];
static const char *const names[3] = {"local", "tcp", "file"};

/* The log of the ranks of three jobs, with at most one text each. */
typedef struct board {
    int count[3][3];
    char text[3][3][512];
} board;
static board *noticed;
static int my_job, my_rank;

static void notice(const char *text, void *user) {
    (void)user;
    if (!strstr(text, "still waiting")) return;
    snprintf(noticed->text[my_job][my_rank], sizeof noticed->text[0][0], "%s", text);
    __atomic_add_fetch(&noticed->count[my_job][my_rank], 1, __ATOMIC_SEQ_CST);
}

static pid_t start_rank(int job, int rank) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    seen *s = &stage_shared->rank[3 * job + rank];
    pid_t pid = fork();
    if (pid != 0) return pid;
    my_job = job;
    my_rank = rank;
    desc.init_method = urls[job][0] ? urls[job] : NULL;
    desc.rank = rank;
    desc.world_size = 3;
    desc.timeout_ms = 60000;
    desc.log_fn = notice;
    s->first = ddp_group_create(&world, &desc);
    if (s->first == DDP_OK) s->first = ddp_barrier(world);
    snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
    s->done = 1;
    ddp_group_destroy(world);
    _exit(0);
}

static void expect_notice(int job, int rank, const char *word, const char *word2) {
    int told = heard(&noticed->count[job][rank], 1);
    const char *text = noticed->text[job][rank];
    EXPECT(told, "%s: rank %d logged nothing", names[job], rank);
    EXPECT(!told || (says(text, word) && says(text, word2)), "%s: rank %d logged '%s', without '%s' or '%s'",
           names[job], rank, text, word, word2);
    EXPECT(noticed->count[job][rank] <= 1, "%s: rank %d logged it %d times", names[job], rank,
           noticed->count[job][rank]);
}

int main(void) {
    char port[16], listens[3][128];
    pid_t pids[3][3];
    faults_start(100);
    noticed = (board *)ranks_shared(sizeof *noticed);
    snprintf(port, sizeof port, "%d", some_ports(1)); /* it names the local job */
    setenv("MASTER_PORT", port, 1);
    snprintf(urls[1], sizeof urls[1], "tcp://127.0.0.1:%d", some_ports(1));
    snprintf(urls[2], sizeof urls[2], "file:///tmp/ddp_test_waiting_%d", (int)getpid());
    snprintf(listens[0], sizeof listens[0], "rank 1; this rank listens at socket @ddp-%d-", (int)getuid());
    snprintf(listens[1], sizeof listens[1], "port %s", strrchr(urls[1], ':') + 1);
    snprintf(listens[2], sizeof listens[2], "as written in %s", urls[2] + 7);

    faults_begin("rank 1 is late");
    for (int job = 0; job < 3; job++)
        for (int r = 0; r < 3; r += 2) pids[job][r] = start_rank(job, r);
    for (int job = 0; job < 3; job++) {
        expect_notice(job, 0, "still waiting for rank 1; this rank listens at", listens[job]);
        expect_notice(job, 2, "still waiting for other ranks to connect to rank 0",
                      job ? "(127.0.0.1 port" : "(pid");
        pids[job][1] = start_rank(job, 1);
    }
    for (int i = 0; i < 9; i++) {
        const seen *s = &stage_shared->rank[i];
        EXPECT(waitpid(pids[i / 3][i % 3], NULL, 0) > 0 && s->done && s->first == DDP_OK,
               "%s rank %d: %s '%s'", names[i / 3], i % 3, ddp_result_name(s->first), s->text);
    }
    for (int job = 0; job < 3; job++)
        EXPECT(!noticed->count[job][1], "%s: rank 1 logged '%s'", names[job], noticed->text[job][1]);

    faults_begin("without rank 0");
    memset(noticed, 0, sizeof *noticed);
    for (int job = 0; job < 3; job++) pids[job][1] = start_rank(job, 1);
    expect_notice(0, 1, "still waiting for rank 0 at socket @ddp-", "refused");
    expect_notice(1, 1, "still waiting for rank 0:", listens[1]);
    expect_notice(2, 1, "still waiting for rank 0:", urls[2] + 7);
    for (int job = 0; job < 3; job++) {
        kill(pids[job][1], SIGKILL);
        waitpid(pids[job][1], NULL, 0);
    }
    return faults_end();
}

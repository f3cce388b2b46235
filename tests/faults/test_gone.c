/*  test_gone.c - detection of a lost rank that this process did not start. Its pid can belong to another
    process by now, and the rank can arrive and end during the check. Ranks join by their environment. The
    test intercepts each kill(), with which ddp.h checks a process. */
#include <errno.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>
static int watched_kill(pid_t pid, int number);
static ssize_t padded_read(int fd, void *data, size_t size);
#define kill(pid, number) watched_kill(pid, number)
#define read(fd, data, size) padded_read(fd, data, size)
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#undef kill
#undef read
#include "../support/ranks.h"
#include "../support/faults.h"

enum { WORLD = 2 };
enum { LOOKS = 1, REAPED }; /* stage_shared->counter */
static int armed;           /* this process stops during its next check of another one */

static const char *outcome(const seen *s) { return s->done ? ddp_result_name(s->first) : "died"; }
static void reach(int point) { __atomic_store_n(&stage_shared->counter, point, __ATOMIC_SEQ_CST); }

static int watched_kill(pid_t pid, int number) {
    if (armed && number == 0) {
        armed = 0;
        reach(LOOKS);
        heard(&stage_shared->counter, REAPED);
    }
    return kill(pid, number);
}

static int pads; /* each read fills its buffer: blanks follow the data */

static ssize_t padded_read(int fd, void *data, size_t size) {
    ssize_t n = read(fd, data, size);
    if (!pads || n < 0) return n;
    memset((char *)data + n, ' ', size - (size_t)n);
    return (ssize_t)size;
}

/* A line of /proc/PID/stat that is longer than the buffer for it. */
static void test_long_stat_line(void) {
    uint64_t start = ddp__process_start_time((int)getpid()), padded;
    faults_begin("a long line of /proc/PID/stat");
    pads = 1;
    padded = ddp__process_start_time((int)getpid());
    pads = 0;
    EXPECT(start != 0 && start == padded, "start times %llu and %llu", (unsigned long long)start,
           (unsigned long long)padded);
}

/* A rank in a separate process. */
static pid_t spawn(int rank, int tag, ddp_result (*fn)(ddp_group *world)) {
    pid_t pid;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        seen *s = &stage_shared->rank[rank];
        ddp_group_desc desc = DDP_ZERO;
        ddp_group *world = NULL;
        char text[16];
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        snprintf(text, sizeof text, "%d", rank);
        setenv("RANK", text, 1);
        setenv("LOCAL_RANK", text, 1);
        setenv("WORLD_SIZE", "2", 1);
        setenv("LOCAL_WORLD_SIZE", "2", 1);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        snprintf(text, sizeof text, "%d", tag);
        setenv("MASTER_PORT", text, 1);
        desc.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
        s->first = ddp_group_create(&world, &desc);
        if (s->first == DDP_OK) s->first = fn(world);
        snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
        s->done = 1;
        if (rank == 0) ddp_group_destroy(world);
        _exit(0);
    }
    return pid;
}

static void run(ddp_result (*fn)(ddp_group *world), int tag) {
    pid_t pids[WORLD];
    int status;
    for (int r = 0; r < WORLD; r++) pids[r] = spawn(r, tag, fn);
    waitpid(pids[1], &status, 0);
    reach(REAPED);
    waitpid(pids[0], &status, 0);
}

/* Rank 1 is killed, and its pid belongs to another process by now: to the one that started both. */
static ddp_result reused(ddp_group *world) {
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 1) raise(SIGKILL);
    if (!heard(&stage_shared->counter, REAPED)) return DDP_ERR_TIMEOUT;
    ((ddp__local *)world->state)->heap->job->rank[1].pid = (int32_t)getppid();
    return ddp_barrier(world);
}

static void test_reused_pid(void) {
    const seen *s = &stage_shared->rank[0];
    faults_begin("a process that died has a pid that another process has now");
    ranks_sleep_us(50000); /* no rank starts in the same clock tick as this process */
    run(reused, (int)getpid() * 2);
    EXPECT(s->done && s->first == DDP_ERR_PEER_LOST && names_rank(s->text, 1), "%s '%s'", outcome(s),
           s->text);
}

/* Rank 0 misses rank 1 and looks for its process. Meanwhile rank 1 arrives and ends: no rank is lost. */
static ddp_result overtaken(ddp_group *world) {
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 0)
        armed = 1;
    else if (!heard(&stage_shared->counter, LOOKS))
        return DDP_ERR_TIMEOUT;
    RANKS_OK(world, ddp_barrier(world));
    return ddp_group_status(world);
}

static void test_arrival_during_a_look(void) {
    faults_begin("a rank arrives and ends while another one looks for its process");
    run(overtaken, (int)getpid() * 2 + 1);
    for (int r = 0; r < WORLD; r++) {
        const seen *s = &stage_shared->rank[r];
        EXPECT(s->done && s->first == DDP_OK, "rank %d: %s '%s'", r, outcome(s), s->text);
    }
}

int main(void) {
    faults_start(100);
    test_long_stat_line();
    test_reused_pid();
    test_arrival_during_a_look();
    return faults_end();
}

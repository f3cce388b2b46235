/*  test_launch_ends.c - the end of a launch: interrupted, with a rank that is killed after its function has
    returned, and with an unchanged environment of the caller. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* fopencookie */
#endif
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { W = 2 };

//== a signal to the launching process is no reason to start again ==========================

/* Ranks of the first start wait until they are killed. Ranks of a second start return at once, and the count
   shows them. */
static ddp_result wait_for_the_end(ddp_group *world, void *user) {
    int starts = __atomic_add_fetch(&stage_shared->counter, 1, __ATOMIC_SEQ_CST);
    (void)world, (void)user;
    while (starts <= W) pause();
    return DDP_OK;
}

static void test_interrupted(int number) {
    int status = 0;
    pid_t launcher;
    faults_begin(number == SIGINT ? "SIGINT with max_restarts" : "SIGTERM with max_restarts");
    fflush(NULL);
    launcher = fork();
    if (launcher == 0) {
        ddp_launch_desc desc = DDP_ZERO;
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        desc.world_size = W;
        desc.max_restarts = 2;
        desc.group.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
        _exit(ddp_launch(&desc, wait_for_the_end, NULL) == DDP_ERR_PEER_LOST ? 0 : 1);
    }
    EXPECT(heard(&stage_shared->counter, W), "only %d of %d ranks came", stage_shared->counter, W);
    kill(launcher, number);
    EXPECT(waitpid(launcher, &status, 0) == launcher && WIFEXITED(status) && WEXITSTATUS(status) == 0,
           "status %x", status);
    EXPECT(stage_shared->counter == W, "ranks were started %d times, not %d", stage_shared->counter, W);
}

//== killed after its function has returned =================================================

/* The flush of a stream is the last thing that the process of a rank does. */
static ssize_t deadly_write(void *cookie, const char *data, size_t size) {
    (void)cookie, (void)data;
    kill(getpid(), SIGKILL);
    return (ssize_t)size;
}

static ddp_result killed_in_flush(ddp_group *world, void *user) {
    cookie_io_functions_t functions = {NULL, deadly_write, NULL, NULL};
    (void)user;
    if (ddp_rank(world) == 1) {
        FILE *stream = fopencookie(NULL, "w", functions);
        RANKS_CHECK(world, stream && fputs("last words", stream) >= 0, "fopencookie");
    }
    return ddp_barrier(world);
}

static void test_killed_after_return(void) {
    ddp_result result;
    faults_begin("a rank is killed after its function has returned");
    result = launch(RANKS_PROCESSES, W, 20000, killed_in_flush, NULL);
    EXPECT(result == DDP_ERR_PEER_LOST && says(ddp_last_error(), "rank 1")
               && says(ddp_last_error(), "signal 9"),
           "%s '%s'", ddp_result_name(result), ddp_last_error());
}

//== the environment ========================================================================

/* Ranks as threads share the environment of their process: the launch adds variables to it for a while. */
static ddp_result read_environment(ddp_group *world, void *user) {
    const char *omp = getenv("OMP_NUM_THREADS");
    (void)user;
    RANKS_CHECK(world, omp && strcmp(omp, "5") == 0, "OMP_NUM_THREADS is %s", omp ? omp : "not set");
    return ddp_barrier(world);
}

static void test_environment(void) {
    const char *omp;
    faults_begin("OMP_NUM_THREADS of the caller stays");
    setenv("OMP_NUM_THREADS", "5", 1);
    unsetenv("OPENBLAS_NUM_THREADS");
    EXPECT(launch(RANKS_THREADS, W, 20000, read_environment, NULL) == DDP_OK, "%s", ddp_last_error());
    omp = getenv("OMP_NUM_THREADS");
    EXPECT(omp && strcmp(omp, "5") == 0, "it is %s after a launch of threads", omp ? omp : "not set");
    EXPECT(!getenv("OPENBLAS_NUM_THREADS"), "a launch of threads leaves OPENBLAS_NUM_THREADS");
}

int main(void) {
    faults_start(60);
    test_interrupted(SIGINT);
    test_interrupted(SIGTERM);
    test_killed_after_return();
    test_environment();
    return faults_end();
}

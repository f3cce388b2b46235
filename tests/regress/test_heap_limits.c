/*  test_heap_limits.c - allocating too much shared memory fails and changes nothing.

    A ddp_group_alloc that failed had already moved the end of the heap past its limit, so that every later
    one failed too. Sizes near the top of size_t wrapped around. A file size limit below the job's header was
    a SIGBUS. A process that cannot map the job's header reports it. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

static ddp_result greedy_main(ddp_group *world, void *user) {
    static const size_t sizes[] = {(size_t)1 << 44,       (size_t)1 << 62,
                                   SIZE_MAX / 2 - 100000, SIZE_MAX / 2 - 69632 - 4095,
                                   SIZE_MAX - 5000,       SIZE_MAX};
    void *memory = NULL;
    (void)user;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        ddp_result result = ddp_group_alloc(world, sizes[i], &memory);
        RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY && !memory, "%zu bytes: %s", sizes[i],
                    ddp_result_name(result));
        RANKS_OK(world, ddp_group_alloc(world, 100000, &memory));
        memset(memory, 1, 100000);
        RANKS_OK(world, ddp_all_reduce(world, memory, memory, 25000, DDP_F32, DDP_OP_SUM, NULL));
        RANKS_OK(world, ddp_group_free(world, memory));
    }
    return DDP_OK;
}

/* The address space of this process has only `more` bytes left. */
static void limit_address_space(size_t more) {
    struct rlimit limit;
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%lu", &pages) != 1) _exit(9);
    fclose(file);
    limit.rlim_cur = limit.rlim_max = pages * (size_t)sysconf(_SC_PAGESIZE) + more;
    setrlimit(RLIMIT_AS, &limit);
}

static ddp_result idle_main(ddp_group *world, void *user) {
    (void)user;
    return ddp_barrier(world);
}

int main(void) {
    static const rlim_t limits[] = {0, 1, 4096, 20000, 1 << 20, 64 << 20};
    faults_start(50);
    faults_begin("too large");
    EXPECT(ranks_run(RANKS_PROCESSES, 2, 20000 * DDP_TEST_SLOWDOWN, greedy_main, NULL) == DDP_OK, "%s",
           ddp_last_error());
    EXPECT(ranks_run(RANKS_THREADS, 2, 20000 * DDP_TEST_SLOWDOWN, greedy_main, NULL) == DDP_OK, "%s",
           ddp_last_error());
    faults_begin("ulimit -f");
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        int status = -1;
        pid_t child;
        fflush(NULL);
        child = fork();
        if (child == 0) {
            struct rlimit limit;
            ddp_result result;
            limit.rlim_cur = limit.rlim_max = limits[i];
            setrlimit(RLIMIT_FSIZE, &limit);
            result = ranks_run(RANKS_PROCESSES, 2, 20000 * DDP_TEST_SLOWDOWN, idle_main, NULL);
            _exit(result == DDP_OK ? 0 : says(ddp_last_error(), "ulimit -f") ? 1 : 2);
        }
        EXPECT(waitpid(child, &status, 0) == child, "waitpid");
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == (limits[i] < 64 << 20),
               "limit of %llu bytes: wait status %d", (unsigned long long)limits[i], status);
    }
    faults_begin("ulimit -v");
    if (strcmp(DDP_TEST_FLAVOUR, "plain") == 0) { /* sanitizers need address space themselves */
        int status = -1;
        pid_t child;
        fflush(NULL);
        child = fork();
        if (child == 0) {
            ddp_result result;
            limit_address_space((size_t)1 << 20);
            result = ranks_run(RANKS_PROCESSES, 2, 20000 * DDP_TEST_SLOWDOWN, idle_main, NULL);
            _exit(result == DDP_ERR_NO_MEMORY && says(ddp_last_error(), "could not be mapped") ? 0 : 1);
        }
        EXPECT(waitpid(child, &status, 0) == child, "waitpid");
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "wait status %d", status);
    }
    return faults_end();
}

/* test_few_files.c - rank 0 of a rendezvous over TCP passed poll an entry for each rank and 129 more. Below
   that limit of open files poll fails: rank 0 looped without sleeping until all ranks had arrived. If it
   could not open a socket for each rank, it looped until its timeout, and named ranks as missing that were
   trying to connect. Now it sleeps, and reports the cause. */
#include "../../ddp.h"
#include "../support/ranks.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static int refusals;

int poll(struct pollfd *places, nfds_t count, int timeout_ms) {
    struct timespec limit;
    limit.tv_sec = timeout_ms / 1000;
    limit.tv_nsec = timeout_ms % 1000 * 1000000;
    int ready = (int)syscall(SYS_ppoll, places, count, timeout_ms < 0 ? NULL : &limit, NULL, 0);
    refusals += ready < 0 && errno == EINVAL;
    return ready;
}

static void limit_files(int more) {
    struct rlimit limit;
    int next = dup(2);
    close(next);
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = (rlim_t)(next + more);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
        perror("setrlimit");
        exit(2);
    }
}

static ddp_result join(const char *url, int rank, int world_size, int timeout_ms) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    desc.init_method = url;
    desc.rank = rank;
    desc.world_size = world_size;
    desc.timeout_ms = timeout_ms;
    ddp_result result = ddp_group_create(&world, &desc);
    if (result == DDP_OK) result = ddp_barrier(world);
    ddp_group_destroy(world);
    return result;
}

/* Rank 0 is this process, which can open more files by this number. Returns the number of other ranks that
   joined. */
static int meeting(int world_size, int more, int timeout_ms, ddp_result *result, char *text) {
    char url[80];
    int joined = 0, status;
    snprintf(url, sizeof url, "file:///tmp/ddp_test_few_files_%d_%d", (int)getpid(), world_size);
    for (int r = 1; r < world_size; r++)
        if (fork() == 0) _exit(join(url, r, world_size, timeout_ms) == DDP_OK);
    limit_files(more);
    *result = join(url, 0, world_size, timeout_ms);
    snprintf(text, 600, "%s", *result == DDP_OK ? "" : ddp_last_error());
    for (int r = 1; r < world_size; r++)
        if (wait(&status) > 0) joined += WIFEXITED(status) && WEXITSTATUS(status) == 1;
    return joined;
}

int main(void) {
    char text[600], seated[600];
    ddp_result result;
    int failures = 0, joined;
    watchdog_start(50);
    joined = meeting(3, 40, 30000 * DDP_TEST_SLOWDOWN, &result, text);
    if (result != DDP_OK || joined != 2)
        failures += fprintf(stderr, "FAIL 40 files are enough for 3 ranks: %s '%s', %d joined\n",
                            ddp_result_name(result), text, joined)
                    > 0;
    if (refusals) failures += fprintf(stderr, "FAIL poll was refused %d times\n", refusals) > 0;
    joined = meeting(12, 6, 5000, &result, text);
    if (result != DDP_ERR_SYSTEM || !strstr(text, "ulimit -n") || !strstr(text, "12 ranks") || joined)
        failures += fprintf(stderr, "FAIL 6 files for 12 ranks: %s '%s', %d joined\n",
                            ddp_result_name(result), text, joined)
                    > 0;
    /* The listener and 4 sockets; accept then fails for lack of files although no rank connects. */
    meeting(5, 5, 5000, &result, seated);
    if (strstr(seated, "ulimit -n"))
        failures += fprintf(stderr, "FAIL 5 files seat 5 ranks: '%s'\n", seated) > 0;
    if (!failures) printf("ok: %s\n", text);
    return failures != 0;
}

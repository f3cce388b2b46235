/*  test_exception.c - an exception that leaves the function of a rank, in C++.

    It passed through ddp_launch in the forked rank, into any handler of the caller of ddp_launch. The rank
    then continued as if it were its parent, wrote the parent's files a second time and exited with the
    parent's status. Now the rank ends where the exception leaves its function, and the signal shows it. */
#include "../../ddp.h"
#include "../support/watchdog.h"

#include <exception>
#include <stdexcept>

static ddp_result rank_throws(ddp_group *world, void *user) {
    (void)user;
    if (ddp_rank(world) == 1) {
        std::set_terminate([] { abort(); }); /* without output */
        throw std::runtime_error("not caught in this rank");
    }
    return ddp_barrier(world);
}

int main() {
    ddp_launch_desc desc = DDP_ZERO;
    ddp_result result = DDP_OK;
    pid_t parent = getpid();
    watchdog_start(60);
    desc.world_size = 2;
    desc.group.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
    try {
        result = ddp_launch(&desc, rank_throws, nullptr);
    } catch (const std::exception &error) {
        fprintf(stderr, "%s caught \"%s\" outside of its function\n",
                getpid() == parent ? "the parent" : "a rank", error.what());
        return 1;
    }
    if (result == DDP_ERR_PEER_LOST && strstr(ddp_last_error(), "rank 1/2")
        && strstr(ddp_last_error(), "was killed by signal 6"))
        return 0;
    fprintf(stderr, "%s: %s\n", ddp_result_name(result), ddp_last_error());
    return 1;
}

/*  test_exception.c - an exception that leaves the function of a rank, in C++.

    It went up through ddp_launch in the forked rank, into whatever handler the caller of ddp_launch had: the rank then went on as if it were its parent,
    wrote the parent's files a second time and left with the parent's status. Now the rank ends where the exception leaves its function, as the signal says. */
#include "../../ddp.h"
#include "../support/watchdog.h"

#include <exception>
#include <stdexcept>

static ddp_result rank_throws(ddp_group *world, void *user) {
    (void)user;
    if (ddp_rank(world) == 1) {
        std::set_terminate([] { abort(); }); /* says nothing */
        throw std::runtime_error("nobody in this rank catches it");
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
        fprintf(stderr, "%s caught \"%s\" outside of its function\n", getpid() == parent ? "the parent" : "a rank", error.what());
        return 1;
    }
    if (result == DDP_ERR_PEER_LOST && strstr(ddp_last_error(), "rank 1/2") && strstr(ddp_last_error(), "was killed by signal 6")) return 0;
    fprintf(stderr, "%s: %s\n", ddp_result_name(result), ddp_last_error());
    return 1;
}

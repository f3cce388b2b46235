/*  test_alloc_over_tcp.c - group memory that one rank cannot allocate is a failure of all ranks, which all
    free theirs.

    Over TCP, where memory is private to each rank, the other ranks had kept theirs and reported success.
    Ranks count their allocations, because the processes of ddp_launch end without a check for leaks. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

enum { MOST = 1 << 20 };

static int live; /* allocations of this rank */

static void *alloc_little(size_t size_bytes, void *user) {
    void *memory = user && size_bytes > MOST ? NULL : malloc(size_bytes);
    __atomic_add_fetch(&live, memory != NULL, __ATOMIC_SEQ_CST);
    return memory;
}

static void free_little(void *memory, void *user) {
    (void)user;
    __atomic_sub_fetch(&live, memory != NULL, __ATOMIC_SEQ_CST);
    free(memory);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    static const char url[] = "file:///tmp/ddp_test_alloc_over_tcp_";
    char path[sizeof url + 16];
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *tcp = NULL;
    void *memory = world;
    int before;
    snprintf(path, sizeof path, "%s%d", url, (int)getppid());
    machine_salt = ddp_rank(world) + 1;
    desc.init_method = path;
    desc.rank = ddp_rank(world);
    desc.world_size = ddp_world_size(world);
    desc.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
    desc.alloc_fn = alloc_little;
    desc.free_fn = free_little;
    desc.user = desc.rank == 1 ? user : NULL;
    RANKS_OK(world, ddp_group_create(&tcp, &desc));
    before = live;
    RANKS_CHECK(world, ddp_group_alloc(tcp, 2 * MOST, &memory) == DDP_ERR_NO_MEMORY && !memory, "%s",
                ddp_last_error());
    RANKS_CHECK(world, live == before, "%d allocations became %d", before, live);
    RANKS_CHECK(world, strstr(ddp_last_error(), "2097152 bytes"), "%s", ddp_last_error());
    RANKS_OK(world, ddp_group_status(tcp));
    RANKS_OK(world, ddp_group_alloc(tcp, MOST / 2, &memory));
    RANKS_OK(world, ddp_group_free(tcp, memory));
    RANKS_OK(world, ddp_barrier(tcp));
    ddp_group_destroy(tcp);
    RANKS_CHECK(world, live == 0, "%d allocations are left", live);
    return DDP_OK;
}

int main(void) {
    int limited = 1;
    watchdog_start(50);
    return ranks_run(RANKS_PROCESSES, 3, 30000 * DDP_TEST_SLOWDOWN, rank_main, &limited) != DDP_OK;
}

/*  test_large_pages.c - with pages of 64 KiB, as on some arm64 systems, mappings and released memory are
    whole pages.

    Group memory and control memory were divided at 4 KiB. Pages shared by two ranks' parts were never
    released, and the reservation after a mapping stayed reserved. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "../support/before_syscall.h"

enum { PAGE = 65536 };
static int crooked, mapped, given_back; /* of this process */
static int whole(uint64_t size) { return size % PAGE == 0; }

static long page_sysconf(int name) { return name == _SC_PAGESIZE ? PAGE : sysconf(name); }

static void *page_mmap(void *address, size_t size, int prot, int flags, int fd, off_t offset) {
    if (flags & MAP_FIXED)
        mapped++, crooked += !whole((uintptr_t)address) || !whole(size) || !whole((uint64_t)offset);
    return mmap(address, size, prot, flags, fd, offset);
}

static int page_madvise(void *address, size_t size, int advice) {
    /* MADV_WIPEONFORK, of a whole mapping: real pages are smaller here. */
    if (advice == 18) return madvise(address, size, advice);
    crooked += !whole((uintptr_t)address); /* a length may be anything */
    return madvise(address, size, advice);
}

static void before_syscall(long number, const long argument[6]) {
    if (number == SYS_fallocate && argument[1])
        given_back++, crooked += !whole((uint64_t)argument[2]) || !whole((uint64_t)argument[3]);
}

#define sysconf page_sysconf
#define mmap page_mmap
#define madvise page_madvise
#define syscall watched_syscall
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#undef sysconf
#undef mmap
#undef madvise
#undef syscall
#include "../support/ranks.h"
#include "../support/faults.h"

static ddp_result rank_main(ddp_group *world, void *user) {
    static const size_t sizes[] = {1, 4096, 65535, 65536, 65537, 100000, 1 << 20, 2100000, (size_t)5 << 20};
    ddp_group *half = NULL;
    int me = ddp_rank(world), w = ddp_world_size(world);
    (void)user;
    RANKS_OK(world, ddp_group_split(world, me % 2, 0, &half));
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *memory = NULL, *peer;
        RANKS_OK(world, ddp_group_alloc(world, sizes[i], (void **)&memory));
        memset(memory, me + 1, sizes[i]);
        RANKS_OK(world, ddp_barrier(world));
        peer = (unsigned char *)ddp_group_peer(world, memory, (me + 1) % w);
        RANKS_CHECK(world, peer && peer[0] == (me + 1) % w + 1 && peer[sizes[i] - 1] == (me + 1) % w + 1,
                    "%zu bytes: those of another rank are missing", sizes[i]);
        RANKS_OK(world, ddp_group_free(world, memory));
    }
    ddp_group_destroy(half);
    RANKS_CHECK(world, mapped > 9 && given_back > 8, "only %d mappings, and %d released ranges, were checked",
                mapped, given_back);
    RANKS_CHECK(world, crooked == 0, "%d ranges of memory begin or end inside a page", crooked);
    return DDP_OK;
}

int main(void) {
    faults_start(50);
    faults_begin("processes");
    EXPECT(ranks_run(RANKS_PROCESSES, 3, 20000 * DDP_TEST_SLOWDOWN, rank_main, NULL) == DDP_OK, "%s",
           ddp_last_error());
    return faults_end();
}

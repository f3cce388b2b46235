/*  test_late_reader.c - a rank that reads a peer's buffer too late returns an error.

    The root of a broadcast waits until all ranks have read its buffer. The group failed (here: an abort) and
    the root changed that buffer. A rank that read it only then, in one copy or in group memory, found all
    counters as expected, and returned DDP_OK with the changed data. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include "../support/before_syscall.h"
#define syscall watched_syscall
static void *held_memcpy(void *dst, const void *src, size_t size);
#define memcpy held_memcpy
#define DDP__LARGE_BYTES 65536
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#undef syscall
#undef memcpy
#include "../support/ranks.h"
#include "../support/faults.h"

enum { COUNT = 1 << 18 };
enum { READING = 1, CHANGED, OVER }; /* stage_shared->counter */
static int late;                     /* this rank, in its large copies */

static void reach(int point) { __atomic_store_n(&stage_shared->counter, point, __ATOMIC_RELEASE); }
static void await(int point) {
    while (__atomic_load_n(&stage_shared->counter, __ATOMIC_ACQUIRE) < point) usleep(200);
}

static void wait_for_change(size_t size) {
    if (!late || size < COUNT) return;
    late = 0;
    reach(READING);
    await(CHANGED);
}

static void *held_memcpy(void *dst, const void *src, size_t size) {
    wait_for_change(size);
    return memcpy(dst, src, size);
}

static void before_syscall(long number, const long argument[6]) {
#if defined(SYS_process_vm_readv)
    if (number == SYS_process_vm_readv) wait_for_change(((const struct iovec *)argument[1])->iov_len);
#else
    (void)number, (void)argument;
#endif
}

static void *abort_main(void *world) {
    await(READING);
    ddp_group_abort((ddp_group *)world);
    return NULL;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    ddp__local *l = (ddp__local *)world->state;
    int rank = ddp_rank(world), shared = *(const int *)user;
    void *memory = NULL;
    float *data;
    ddp_result result;
    pthread_t thread;
    if (shared && ddp_group_alloc(world, COUNT * sizeof *data, &memory) != DDP_OK) return DDP_ERR_NO_MEMORY;
    if (!shared) memory = malloc(COUNT * sizeof *data);
    if (!memory) return DDP_ERR_NO_MEMORY;
    data = (float *)memory;
    for (int i = 0; i < COUNT; i++) data[i] = 1;
    if (ddp_barrier(world) != DDP_OK) return DDP_ERR_CORRUPT;
    for (int size = 0; size < 16; size++) /* read in one copy */
        for (int way = 0; way < DDP__TUNED_METHODS; way++) {
            l->tuner[DDP__TUNER_ONE_SENDER][size].calls = 4;
            l->tuner[DDP__TUNER_ONE_SENDER][size].seconds[way] = way == DDP__METHOD_READ ? 0.5 : 1;
        }
    late = rank == 0;
    if (rank == 1 && pthread_create(&thread, NULL, abort_main, world) != 0) return DDP_ERR_SYSTEM;
    result = ddp_broadcast(world, data, COUNT, DDP_F32, 1, NULL);
    stage_shared->rank[rank].first = result;
    snprintf(stage_shared->rank[rank].text, sizeof stage_shared->rank[rank].text, "%s", ddp_last_error());
    if (rank == 1) {
        pthread_join(thread, NULL);
        for (int i = 0; i < COUNT; i++) data[i] = 99;
        reach(CHANGED);
        await(OVER); /* the buffer lives until it has been read */
    } else {
        reach(OVER);
    }
    return DDP_OK;
}

static int private_memory_can_be_read(void) {
    char from = 1, to = 0;
    return ddp__vm_read((int)getpid(), &to, (uint64_t)(uintptr_t)&from, 1);
}

int main(void) {
    faults_start(100);
    for (int shared = !private_memory_can_be_read(); shared < 2; shared++) {
        ddp_launch_desc desc = DDP_ZERO;
        faults_begin(shared ? "group memory" : "private memory");
        desc.world_size = 2;
        desc.group.timeout_ms = 60000;
        ddp_launch(&desc, rank_main, &shared);
        for (int r = 0; r < 2; r++) {
            EXPECT(stage_shared->rank[r].first == DDP_ERR_POISONED, "rank %d: %s", r,
                   ddp_result_name(stage_shared->rank[r].first));
            EXPECT(says(stage_shared->rank[r].text, "called ddp_group_abort"), "rank %d: %s", r,
                   stage_shared->rank[r].text);
        }
    }
    return faults_end();
}

/*  test_buffers_after_failure.c - after a failed call, no other rank accesses this rank's buffers.

    Ranks as threads read and write each other's buffers. A rank that failed (timeout, abort) returned while
    its peers were still inside the reduction or the copy. When it freed its buffer, they crashed, or wrote
    into other memory. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { REDUCE, GATHER, MESSAGE, KINDS };

static ddp_result rank_main(ddp_group *world, void *user) {
    size_t count = (size_t)2 << 20, w = (size_t)ddp_world_size(world), size = count * (w + 1) * sizeof(float);
    int kind = *(const int *)user, rank = ddp_rank(world), peer = rank ^ 1;
    ddp_result result = DDP_OK;
    /* Until one of them is late; a loaded machine can run them one after the other. */
    for (int i = 0; result == DDP_OK && i < 20; i++) {
        float *data = (float *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == (float *)MAP_FAILED) return DDP_ERR_NO_MEMORY;
        if (kind == REDUCE)
            result = ddp_all_reduce(world, data, data, count, DDP_F32, DDP_OP_SUM, NULL);
        else if (kind == GATHER)
            result = ddp_all_gather(world, data, data + count, count, DDP_F32, NULL);
        else if (rank & 1)
            result = ddp_recv(world, data, count * w, DDP_F32, peer, 0, NULL);
        else
            result = ddp_send(world, data, count * w, DDP_F32, peer, 0, NULL);
        munmap(data, size);
    }
    return result;
}

int main(void) {
    faults_start(100);
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < 3; i++) {
            ddp_launch_desc desc = DDP_ZERO;
            faults_begin("timeouts in the middle of calls");
            desc.world_size = 6;
            desc.mode = DDP_LAUNCH_THREADS;
            desc.group.timeout_ms = 1 + 2 * i;
            ddp_launch(&desc, rank_main, &kind);
        }
    return faults_end();
}

/*  test_abandoned_work.c - destroying a group frees the handles of work that was never waited for.

    After a failure, programs end without waiting for every ddp_work. Only handles in a queue were freed;
    completed ones leaked. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

static int live; /* blocks not yet freed, of all ranks */
static void *counted_alloc(size_t size_bytes, void *user) {
    (void)user;
    __atomic_add_fetch(&live, 1, __ATOMIC_SEQ_CST);
    return malloc(size_bytes);
}
static void counted_free(void *memory, void *user) {
    (void)user;
    __atomic_sub_fetch(&live, memory != NULL, __ATOMIC_SEQ_CST);
    free(memory);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    static int all[2][5]; /* outlives the ranks: abandoned work can still write here */
    int peer = !ddp_rank(world), *data = all[!peer];
    ddp_work work;
    (void)user;
    RANKS_OK(world, ddp_all_reduce(world, data, data, 1, DDP_I32, DDP_OP_SUM, &work));
    RANKS_OK(world, ddp_send(world, data + 4, 1, DDP_I32, peer, 0, &work));
    RANKS_OK(world, ddp_recv(world, data + 1, 1, DDP_I32, peer, 0, &work));
    RANKS_OK(world, ddp_all_reduce(world, data + 2, data + 2, 1, DDP_I32, DDP_OP_SUM, &work));
    RANKS_OK(world, ddp_barrier(world)); /* collectives are done in order */
    RANKS_OK(world, ddp_p2p_begin(world));
    ddp_recv(world, data + 3, 1, DDP_I32, peer, 1, NULL); /* fails if the peer has left already */
    return DDP_OK;
}

int main(void) {
    ddp_launch_desc desc = DDP_ZERO;
    faults_start(20);
    faults_begin("abandoned");
    desc.world_size = 2;
    desc.mode = DDP_LAUNCH_THREADS;
    desc.group.alloc_fn = counted_alloc;
    desc.group.free_fn = counted_free;
    ddp_launch(&desc, rank_main, NULL);
    EXPECT(live == 0, "%d blocks are left", live);
    return faults_end();
}

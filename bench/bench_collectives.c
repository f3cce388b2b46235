/*  bench_collectives.c - the collectives of ddp, measured by the protocol of bench.h.

    cc -O3 -march=native bench_collectives.c -o bench_collectives -lpthread -lm
    ./bench_collectives --share FILE                     all_reduce with 2 ranks, CSV on the terminal; FILE is
                                                         created
    sh bench/run.sh                                      in turns with every installed peer

    Ranks are processes of ddp_launch. Each block is measured in group memory and in private memory.
*/
#define _GNU_SOURCE
#include "bench.h"

#define DDP_IMPLEMENTATION
#include "../ddp.h"

//== ddp

typedef struct ddp_user {
    bench *b;
    ddp_group *group;
    float *data[2], *out[2];
} ddp_user;

static int ddp_supports(void *user, const bench_cell *cell, int kind) {
    (void)user;
    if (cell->op == BENCH_BARRIER) return kind == 1;
    return cell->op != BENCH_COPY;
}

/* One send_recv is one way. Successive calls alternate in direction. */
static ddp_result send_recv(ddp_group *group, float *data, size_t count, int calls) {
    ddp_result result = DDP_OK;
    int rank = ddp_rank(group);
    for (int i = 0; i < calls && result == DDP_OK; i++) {
        result = (i & 1) == rank ? ddp_send(group, data, count, DDP_F32, 1 - rank, 0, NULL)
                                 : ddp_recv(group, data, count, DDP_F32, 1 - rank, 0, NULL);
    }
    return result;
}

static ddp_result run_calls(ddp_user *u, const bench_cell *cell, int kind, int calls) {
    ddp_group *group = u->group;
    float *data = u->data[kind], *out = u->out[kind];
    size_t count = cell->bytes / sizeof(float), block = count / (size_t)u->b->rank_count;
    ddp_result result = DDP_OK;
    switch (cell->op) {
    case BENCH_ALL_REDUCE:
        for (int i = 0; i < calls && result == DDP_OK; i++)
            result = ddp_all_reduce(group, data, data, count, DDP_F32, DDP_OP_SUM, NULL);
        return result;
    case BENCH_REDUCE_SCATTER:
        for (int i = 0; i < calls && result == DDP_OK; i++)
            result = ddp_reduce_scatter(group, data, out, block, DDP_F32, DDP_OP_SUM, NULL);
        return result;
    case BENCH_REDUCE_SCATTER_IN_PLACE:
        out = data + (size_t)u->b->rank * block;
        for (int i = 0; i < calls && result == DDP_OK; i++)
            result = ddp_reduce_scatter(group, data, out, block, DDP_F32, DDP_OP_SUM, NULL);
        return result;
    case BENCH_ALL_GATHER:
        for (int i = 0; i < calls && result == DDP_OK; i++) {
            result = ddp_all_gather(group, data + (size_t)u->b->rank * block, data, block, DDP_F32, NULL);
        }
        return result;
    case BENCH_BROADCAST:
        for (int i = 0; i < calls && result == DDP_OK; i++)
            result = ddp_broadcast(group, data, count, DDP_F32, 0, NULL);
        return result;
    case BENCH_SEND_RECV: return send_recv(group, data, count, calls);
    case BENCH_BARRIER:
        for (int i = 0; i < calls && result == DDP_OK; i++) result = ddp_barrier(group);
        return result;
    default: return DDP_ERR_UNSUPPORTED;
    }
}

static int ddp_run(void *user, const bench_cell *cell, int kind, int calls) {
    if (run_calls((ddp_user *)user, cell, kind, calls) == DDP_OK) return 0;
    fprintf(stderr, "bench: %s\n", ddp_last_error());
    return 1;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    bench b = *(bench *)user;
    bench_driver d;
    ddp_user u;
    size_t largest = bench_largest(&b), block_bytes = (size_t)25 << 20;
    void *data = NULL, *out = NULL;
    bench_join(&b, ddp_rank(world));
    if (ddp_group_alloc(world, largest, &data) != DDP_OK
        || ddp_group_alloc(world, block_bytes, &out) != DDP_OK) {
        bench_die(&b, ddp_last_error());
    }
    u.b = &b;
    u.group = world;
    u.data[0] = bench_private(&b, largest);
    u.out[0] = bench_private(&b, block_bytes);
    u.data[1] = (float *)data;
    u.out[1] = (float *)out;
    memset(&d, 0, sizeof d);
    d.user = &u;
    d.kind_count = 2;
    d.supports = ddp_supports;
    d.run = ddp_run;
    memcpy(d.data, u.data, sizeof d.data);
    memcpy(d.out, u.out, sizeof d.out);
    bench_run(&b, &d);
    return DDP_OK;
}

int main(int argc, char **argv) {
    bench b;
    ddp_launch_desc desc = DDP_ZERO;
    bench_arguments(&b, argc, argv);
    if (b.cell_count == 0) return 0;
    if (b.slot_count == 1 && b.share_path) unlink(b.share_path);
    desc.world_size = b.rank_count;
    desc.no_affinity = 1; /* bench_join pins */
    desc.group.timeout_ms = BENCH_DEAD_S * 1000;
    if (ddp_launch(&desc, rank_main, &b) == DDP_OK) return 0;
    fprintf(stderr, "bench: %s\n", ddp_last_error());
    return 1;
}

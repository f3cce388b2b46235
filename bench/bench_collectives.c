/*  bench_collectives.c - ddp's collectives, timed as bench.h says, beside the peers that run.sh starts; and what memory itself can do.

    cc -O3 -march=native bench_collectives.c -o bench_collectives -lpthread -lm
    ./bench_collectives --share FILE                     all_reduce alone, two ranks, CSV on the terminal; FILE is made anew
    sh bench/run.sh                                      side by side with every peer that is installed

    --system ddp      ranks are processes of ddp_launch; each block is timed in group memory and in private memory
    --system memory   two threads run the bare loops that a collective over two ranks cannot do without, on huge pages and without any library around
                      them: all_reduce is a[i] = b[i] = a[i] + b[i] on both ranks' buffers, each thread one half; reduce_scatter out[i] = a[i] + b[i], past
                      the caches when out is not a or b; all_gather writes the own block past the caches into the other's buffer. copy is memcpy of each
                      thread's own buffer.
*/
#define _GNU_SOURCE
#include "bench.h"

#define DDP_IMPLEMENTATION
#include "../ddp.h"

#include <pthread.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

/* One send_recv is one way: calls alternate in direction. */
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
        for (int i = 0; i < calls && result == DDP_OK; i++) result = ddp_all_reduce(group, data, data, count, DDP_F32, DDP_OP_SUM, NULL);
        return result;
    case BENCH_REDUCE_SCATTER:
        for (int i = 0; i < calls && result == DDP_OK; i++) result = ddp_reduce_scatter(group, data, out, block, DDP_F32, DDP_OP_SUM, NULL);
        return result;
    case BENCH_REDUCE_SCATTER_IN_PLACE:
        out = data + (size_t)u->b->rank * block;
        for (int i = 0; i < calls && result == DDP_OK; i++) result = ddp_reduce_scatter(group, data, out, block, DDP_F32, DDP_OP_SUM, NULL);
        return result;
    case BENCH_ALL_GATHER:
        for (int i = 0; i < calls && result == DDP_OK; i++) {
            result = ddp_all_gather(group, data + (size_t)u->b->rank * block, data, block, DDP_F32, NULL);
        }
        return result;
    case BENCH_BROADCAST:
        for (int i = 0; i < calls && result == DDP_OK; i++) result = ddp_broadcast(group, data, count, DDP_F32, 0, NULL);
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
    if (ddp_group_alloc(world, largest, &data) != DDP_OK || ddp_group_alloc(world, block_bytes, &out) != DDP_OK) {
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

//== memory

typedef struct memory_user {
    bench *b;
    float *data[BENCH_MAX_RANKS], *out, *copy;
} memory_user;

typedef struct memory_thread {
    bench b;
    float **data; /* of every rank */
    pthread_t thread;
    int rank;
} memory_thread;

static int memory_supports(void *user, const bench_cell *cell, int kind) {
    (void)user;
    (void)kind;
    return cell->op == BENCH_COPY || (cell->bytes >= (size_t)25 << 20 && cell->op <= BENCH_ALL_GATHER);
}

static void pair_add(float *restrict left, float *restrict right, size_t count) {
    for (size_t i = 0; i < count; i++) left[i] = right[i] = left[i] + right[i];
}

static void add_to(float *restrict left, const float *restrict right, size_t count) {
    for (size_t i = 0; i < count; i++) left[i] += right[i];
}

/* out[i] = left[i] + right[i], or left[i] where right is NULL. */
static void stream_to(float *out, const float *left, const float *right, size_t count) {
#if defined(__SSE2__)
    for (size_t i = 0; i < count; i += 4) {
        __m128 sum = _mm_loadu_ps(left + i);
        if (right) sum = _mm_add_ps(sum, _mm_loadu_ps(right + i));
        _mm_stream_ps(out + i, sum);
    }
    _mm_sfence();
#else
    for (size_t i = 0; i < count; i++) out[i] = right ? left[i] + right[i] : left[i];
#endif
}

static int memory_run(void *user, const bench_cell *cell, int kind, int calls) {
    memory_user *u = (memory_user *)user;
    size_t count = cell->bytes / sizeof(float), half = count / 2, own = (size_t)u->b->rank * half;
    float *mine = u->data[u->b->rank], *other = u->data[1 - u->b->rank];
    (void)kind;
    for (int i = 0; i < calls; i++) {
        switch (cell->op) {
        case BENCH_ALL_REDUCE: pair_add(u->data[0] + own, u->data[1] + own, half); break;
        case BENCH_REDUCE_SCATTER: stream_to(u->out, u->data[0] + own, u->data[1] + own, half); break;
        case BENCH_REDUCE_SCATTER_IN_PLACE: add_to(mine + own, other + own, half); break;
        case BENCH_ALL_GATHER: stream_to(other + own, mine + own, NULL, half); break;
        default: memcpy(u->copy, mine, cell->bytes); break;
        }
        if (cell->op != BENCH_COPY) bench_barrier(u->b); /* the result is there when both halves are */
    }
    return 0;
}

static void *memory_main(void *argument) {
    memory_thread *t = (memory_thread *)argument;
    bench_driver d;
    memory_user u;
    size_t largest = bench_largest(&t->b);
    bench_join(&t->b, t->rank);
    t->b.huge = 1; /* the bound is the best that the machine does */
    u.b = &t->b;
    u.copy = bench_private(&t->b, largest);
    u.out = bench_private(&t->b, (size_t)25 << 20);
    t->data[t->rank] = bench_private(&t->b, largest);
    bench_barrier(&t->b);
    for (int r = 0; r < t->b.rank_count; r++) u.data[r] = t->data[r];
    memset(&d, 0, sizeof d);
    d.user = &u;
    d.kind_count = 1;
    d.supports = memory_supports;
    d.run = memory_run;
    d.data[0] = u.data[t->rank];
    d.out[0] = u.out;
    bench_run(&t->b, &d);
    return NULL;
}

static int run_memory(const bench *b) {
    memory_thread thread[2];
    float *data[BENCH_MAX_RANKS];
    if (b->rank_count != 2) return 1;
    for (int r = 0; r < 2; r++) {
        thread[r].b = *b;
        thread[r].data = data;
        thread[r].rank = r;
        if (pthread_create(&thread[r].thread, NULL, memory_main, &thread[r]) != 0) return 1;
    }
    for (int r = 0; r < 2; r++) pthread_join(thread[r].thread, NULL);
    return 0;
}

int main(int argc, char **argv) {
    bench b;
    ddp_launch_desc desc = DDP_ZERO;
    bench_arguments(&b, argc, argv);
    if (b.cell_count == 0) return 0;
    if (b.slot_count == 1 && b.share_path) unlink(b.share_path);
    if (strcmp(b.system, "memory") == 0) return run_memory(&b);
    desc.world_size = b.rank_count;
    desc.no_affinity = 1; /* bench_join pins */
    desc.group.timeout_ms = BENCH_DEAD_S * 1000;
    if (ddp_launch(&desc, rank_main, &b) == DDP_OK) return 0;
    fprintf(stderr, "bench: %s\n", ddp_last_error());
    return 1;
}

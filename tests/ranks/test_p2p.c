/*  test_p2p.c - sends and receives: matching, order, sizes, many in flight, batches, and progress during
    collectives.

    test_p2p BACKEND [W ...]     one of support/ranks.h */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#define BIG ((size_t)(DDP_TEST_SLOWDOWN > 1 ? 1 : 4) << 20)

/* The bytes of a message follow from its number. */
static void message_fill(void *buf, size_t size_bytes, uint64_t number) {
    ranks_data data;
    data.dtype = DDP_U64;
    data.seed = number * 7919u;
    data.specials = 0;
    ranks_fill(buf, &data, 0, 0, size_bytes / 8);
    data.dtype = DDP_U8;
    ranks_fill((unsigned char *)buf + size_bytes / 8 * 8, &data, 0, size_bytes / 8 * 8, size_bytes % 8);
}

static long message_check(const void *buf, size_t size_bytes, uint64_t number) {
    unsigned char *want = (unsigned char *)malloc(size_bytes + 1);
    long at = -1;
    message_fill(want, size_bytes, number);
    for (size_t i = 0; i < size_bytes && at < 0 && memcmp(want, buf, size_bytes) != 0; i++)
        if (want[i] != ((const unsigned char *)buf)[i]) at = (long)i;
    free(want);
    return at;
}

#define ARRIVED(group, buf, size_bytes, number)                                                           \
    do {                                                                                                  \
        long at = message_check((buf), (size_bytes), (number));                                           \
        RANKS_CHECK((group), at < 0, "%s: message %llu of %zu bytes is wrong at byte %ld", ranks_current, \
                    (unsigned long long)(number), (size_t)(size_bytes), at);                              \
    } while (0)

static unsigned char *bytes(size_t size_bytes) { return (unsigned char *)calloc(1, size_bytes + 1); }

/* Every ordered pair, blocking; the sender overwrites its buffer as soon as the call returns. */
static ddp_result all_pairs(ddp_group *g) {
    static const size_t counts[] = {0, 1, 7, 64, 1000, 4095, 4096, 4097, 65535, 65537, 262147, 1048579};
    int rank = ddp_rank(g), w = ddp_world_size(g);
    unsigned char *buf = bytes(1048579);
    for (size_t n = 0; n < sizeof counts / sizeof *counts; n++)
        for (int from = 0; from < w; from++)
            for (int to = 0; to < w; to++) {
                uint64_t number = n * 10000 + (uint64_t)(from * 100 + to);
                if (from == to || (counts[n] > 5000 && w > 4 && (from + to) % 3)) continue;
                if (rank == from) {
                    message_fill(buf, counts[n], number);
                    RANKS_OK(g, ddp_send(g, buf, counts[n], DDP_U8, to, from + to, NULL));
                    memset(buf, 0xee, counts[n]);
                } else if (rank == to) {
                    buf[counts[n]] = 0x5a;
                    RANKS_OK(g, ddp_recv(g, buf, counts[n], DDP_U8, from, from + to, NULL));
                    ARRIVED(g, buf, counts[n], number);
                    RANKS_CHECK(g, buf[counts[n]] == 0x5a,
                                "count %zu: the byte after the message was changed", counts[n]);
                }
            }
    free(buf);
    return DDP_OK;
}

/* Ring: each rank sends tags 0..15 to the next one and receives them from the previous one in another
   order. */
static ddp_result tags_out_of_order(ddp_group *g) {
    int rank = ddp_rank(g), w = ddp_world_size(g), next = (rank + 1) % w, previous = (rank + w - 1) % w;
    static const size_t sizes[] = {5, 100000};
    for (size_t n = 0; n < 2; n++) {
        size_t size = sizes[n];
        unsigned char *out = bytes(16 * size), *in = bytes(size);
        ddp_work sent[16];
        memset(sent, 0, sizeof sent);
        for (int tag = 0; tag < 16; tag++) {
            message_fill(out + (size_t)tag * size, size, (uint64_t)(rank * 100 + tag));
            RANKS_OK(g, ddp_send(g, out + (size_t)tag * size, size, DDP_I8, next, tag * 1000003 % 2147483647,
                                 &sent[tag]));
        }
        for (int i = 0; i < 16; i++) {
            int tag = i * 7 % 16;
            RANKS_OK(g, ddp_recv(g, in, size, DDP_I8, previous, tag * 1000003 % 2147483647, NULL));
            ARRIVED(g, in, size, (uint64_t)(previous * 100 + tag));
        }
        for (int tag = 15; tag >= 0; tag--) RANKS_OK(g, ddp_wait(g, &sent[tag]));
        free(out), free(in);
    }
    return DDP_OK;
}

/* 300 messages of one tag in flight, receives posted before the sends and the other way round. */
static ddp_result many_outstanding(ddp_group *g, int receives_first, size_t size) {
    enum { MANY = 300 };
    int rank = ddp_rank(g), w = ddp_world_size(g), next = (rank + 1) % w, previous = (rank + w - 1) % w;
    unsigned char *out = bytes(MANY * size), *in = bytes(MANY * size);
    ddp_work *sent = (ddp_work *)calloc(MANY, sizeof *sent), *got = (ddp_work *)calloc(MANY, sizeof *got);
    for (int phase = 0; phase < 2; phase++) {
        for (size_t i = 0; i < MANY; i++) {
            if ((phase == 0) == receives_first) {
                RANKS_OK(g, ddp_recv(g, in + i * size, size, DDP_U8, previous, 9, &got[i]));
            } else {
                message_fill(out + i * size, size, (uint64_t)rank * 1000 + i);
                RANKS_OK(g, ddp_send(g, out + i * size, size, DDP_U8, next, 9, &sent[i]));
            }
        }
        RANKS_OK(g, ddp_barrier(g)); /* works with any number of them pending */
    }
    for (size_t i = 0; i < MANY; i++) {
        size_t k = i * 77 % MANY;
        RANKS_OK(g, ddp_wait(g, &got[k]));
        ARRIVED(g, in + k * size, size, (uint64_t)previous * 1000 + k);
    }
    for (size_t i = 0; i < MANY; i++) RANKS_OK(g, ddp_wait(g, &sent[i]));
    free(out), free(in), free(sent), free(got);
    return DDP_OK;
}

/* 8 MiB around the ring, from and into private and group memory. */
static ddp_result large(ddp_group *g) {
    int rank = ddp_rank(g), w = ddp_world_size(g), next = (rank + 1) % w, previous = (rank + w - 1) % w;
    size_t size = (size_t)8 << 20;
    void *shared[2];
    unsigned char *buffers[2][2];
    for (int i = 0; i < 2; i++) {
        RANKS_OK(g, ddp_group_alloc(g, size, &shared[i]));
        buffers[0][i] = bytes(size);
        buffers[1][i] = (unsigned char *)shared[i];
    }
    for (int out = 0; out < 2; out++)
        for (int in = 0; in < 2; in++) {
            ddp_work work = DDP_ZERO;
            message_fill(buffers[out][0], size, (uint64_t)(rank + 10 * out + 20 * in));
            RANKS_OK(g, ddp_recv(g, buffers[in][1], size / 4, DDP_F32, previous, 0, &work));
            RANKS_OK(g, ddp_send(g, buffers[out][0], size / 4, DDP_F32, next, 0, NULL));
            memset(buffers[out][0], 0, size);
            RANKS_OK(g, ddp_wait(g, &work));
            ARRIVED(g, buffers[in][1], size, (uint64_t)(previous + 10 * out + 20 * in));
        }
    for (int i = 0; i < 2; i++) {
        free(buffers[0][i]);
        RANKS_OK(g, ddp_group_free(g, shared[i]));
    }
    return DDP_OK;
}

/* 4 MiB under every flavour. Two sends and two receives with each neighbour are outstanding, private and
   group memory on either side, while a barrier goes through; the second of two is waited for first. Upward
   messages have tag 0, downward ones tag 1. */
static ddp_result outstanding_both_ways(ddp_group *g) {
    enum { LINES = 8 }; /* bit 0: send, bit 1: with the next rank, bit 2: the second one */
    int rank = ddp_rank(g), w = ddp_world_size(g);
    size_t size = (size_t)4 << 20;
    void *shared;
    unsigned char *own = bytes(LINES * size);
    RANKS_OK(g, ddp_group_alloc(g, LINES * size, &shared));
    /* Bit 0: receives, bit 1: sends use group memory. */
    for (int memory = 0; memory<4; memory += DDP_TEST_SLOWDOWN> 3 ? 3 : 1) {
        ddp_work works[LINES];
        memset(works, 0, sizeof works);
        for (int phase = 0; phase < 2; phase++) {
            if (phase == 1) RANKS_OK(g, ddp_barrier(g));
            for (int i = 0; i < LINES; i++) {
                int k = rank % 2 ? i ^ 1 : i; /* odd ranks send first */
                int sends = k & 1, up = k >> 1 & 1, peer = (rank + (up ? 1 : w - 1)) % w,
                    tag = sends ? !up : up;
                uint64_t number = (uint64_t)(memory * 10000 + (sends ? rank : peer) * 100 + tag * 10
                                             + (k >> 2));
                unsigned char *line = (memory >> sends & 1 ? (unsigned char *)shared : own)
                                      + (size_t)k * size;
                if (phase == 0 && sends) message_fill(line, size, number);
                if (phase == 0 && sends) RANKS_OK(g, ddp_send(g, line, size, DDP_U8, peer, tag, &works[k]));
                if (phase == 0 && !sends) RANKS_OK(g, ddp_recv(g, line, size, DDP_U8, peer, tag, &works[k]));
                if (phase == 0) continue;
                RANKS_OK(g, ddp_wait(g, &works[k ^ 4]));
                RANKS_OK(g, ddp_wait(g, &works[k]));
                if (!sends) ARRIVED(g, line, size, number);
            }
        }
    }
    free(own);
    return ddp_group_free(g, shared);
}

static ddp_result every_dtype(ddp_group *g) {
    int rank = ddp_rank(g), w = ddp_world_size(g);
    for (int dtype = DDP_F32; dtype <= DDP_U64; dtype++) {
        size_t size = 333 * ranks_dtype_size((ddp_dtype)dtype);
        unsigned char *buf = bytes(size);
        if (rank == w - 1) {
            message_fill(buf, size, (uint64_t)dtype);
            RANKS_OK(g, ddp_send(g, buf, 333, (ddp_dtype)dtype, 0, 0, NULL));
        } else if (rank == 0) {
            RANKS_OK(g, ddp_recv(g, buf, 333, (ddp_dtype)dtype, w - 1, 0, NULL));
            ARRIVED(g, buf, size, (uint64_t)dtype);
        }
        free(buf);
    }
    return DDP_OK;
}

/* All ranks send to all ranks, sends first, which deadlocks outside of a batch; then in the opposite order;
   then an empty batch. */
static ddp_result batches(ddp_group *g, size_t size) {
    int rank = ddp_rank(g), w = ddp_world_size(g);
    unsigned char *out = bytes(size * (size_t)w), *in = bytes(size * (size_t)w);
    for (int round = 0; round < 3; round++) {
        memset(in, 0, size * (size_t)w);
        RANKS_OK(g, ddp_p2p_begin(g));
        for (int phase = 0; phase < 2; phase++)
            for (int i = 0; i < w && round < 2; i++) {
                int peer = (rank + i * (round ? w - 1 : 1)) % w;
                unsigned char *mine = out + size * (size_t)peer;
                if (peer == rank) continue;
                if ((phase == 0) == (round == 0)) {
                    message_fill(mine, size, (uint64_t)(round * 10000 + rank * 100 + peer));
                    RANKS_OK(g, ddp_send(g, mine, size, DDP_U8, peer, 3, NULL));
                } else
                    RANKS_OK(g, ddp_recv(g, in + size * (size_t)peer, size, DDP_U8, peer, 3, NULL));
            }
        RANKS_OK(g, ddp_p2p_end(g));
        for (int peer = 0; peer < w && round < 2; peer++)
            if (peer != rank)
                ARRIVED(g, in + size * (size_t)peer, size, (uint64_t)(round * 10000 + peer * 100 + rank));
    }
    free(out), free(in);
    return DDP_OK;
}

/* Half of each pair waits in a blocking or pending all_reduce while the other half needs its send or receive
   to progress. */
static ddp_result beside_collectives(ddp_group *g, size_t size) {
    int rank = ddp_rank(g), w = ddp_world_size(g), peer = rank ^ 1;
    unsigned char *buf = bytes(size);
    for (int round = 0; round < 4; round++) {
        int early = rank % 2 == round % 2, sends = rank % 2 == (round < 2), alone = peer >= w;
        ddp_work p2p = DDP_ZERO, reduce = DDP_ZERO;
        int64_t one = 1, sum = 0;
        uint64_t number = (uint64_t)(round * 1000 + (rank | 1));
        if (sends) message_fill(buf, size, number);
        /* Posts its half, then waits in the collective, which the peer enters only after the message has
           arrived. */
        if (early) {
            if (!alone && sends) RANKS_OK(g, ddp_send(g, buf, size, DDP_U8, peer, 0, &p2p));
            if (!alone && !sends) RANKS_OK(g, ddp_recv(g, buf, size, DDP_U8, peer, 0, &p2p));
            RANKS_OK(g, ddp_all_reduce(g, &one, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
            RANKS_OK(g, ddp_wait(g, &p2p));
            /* Collective pending on the communication thread first, then a blocking half. */
        } else if (round % 2) {
            RANKS_OK(g, ddp_all_reduce(g, &one, &sum, 1, DDP_I64, DDP_OP_SUM, &reduce));
            if (!alone && sends) RANKS_OK(g, ddp_send(g, buf, size, DDP_U8, peer, 0, NULL));
            if (!alone && !sends) RANKS_OK(g, ddp_recv(g, buf, size, DDP_U8, peer, 0, NULL));
            RANKS_OK(g, ddp_wait(g, &reduce));
        } else {
            if (!alone && sends) RANKS_OK(g, ddp_send(g, buf, size, DDP_U8, peer, 0, NULL));
            if (!alone && !sends) RANKS_OK(g, ddp_recv(g, buf, size, DDP_U8, peer, 0, NULL));
            RANKS_OK(g, ddp_all_reduce(g, &one, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
        }
        RANKS_CHECK(g, sum == w, "round %d: all_reduce next to a message gave %lld", round, (long long)sum);
        if (!alone && !sends) ARRIVED(g, buf, size, number);
        memset(buf, 0, size);
    }
    free(buf);
    return DDP_OK;
}

/* A collective that is pending on the communication thread, which no other rank has entered, must not block
   messages. */
static ddp_result behind_pending_collective(ddp_group *g, size_t size) {
    int rank = ddp_rank(g), w = ddp_world_size(g);
    int64_t one = 1, sums[8] = {0};
    ddp_work reduce[8];
    unsigned char *buf = bytes(size);
    memset(reduce, 0, sizeof reduce);
    if (rank == 0)
        for (int i = 0; i < 8; i++)
            RANKS_OK(g, ddp_all_reduce(g, &one, &sums[i], 1, DDP_I64, DDP_OP_SUM, &reduce[i]));
    for (int i = 0; i < 4; i++) { /* ping-pong of rank 0 with the last rank */
        if (rank == 0) {
            message_fill(buf, size, (uint64_t)i);
            RANKS_OK(g, ddp_send(g, buf, size, DDP_U8, w - 1, i, NULL));
            RANKS_OK(g, ddp_recv(g, buf, size, DDP_U8, w - 1, i, NULL));
            ARRIVED(g, buf, size, (uint64_t)(i + 50));
        } else if (rank == w - 1) {
            RANKS_OK(g, ddp_recv(g, buf, size, DDP_U8, 0, i, NULL));
            ARRIVED(g, buf, size, (uint64_t)i);
            message_fill(buf, size, (uint64_t)(i + 50));
            RANKS_OK(g, ddp_send(g, buf, size, DDP_U8, 0, i, NULL));
        }
    }
    for (int i = 0; i < 8; i++) {
        if (rank != 0)
            RANKS_OK(g, ddp_all_reduce(g, &one, &sums[i], 1, DDP_I64, DDP_OP_SUM, i % 2 ? &reduce[i] : NULL));
        RANKS_OK(g, ddp_wait(g, &reduce[i]));
        RANKS_CHECK(g, sums[i] == w, "all_reduce %d gave %lld", i, (long long)sums[i]);
    }
    free(buf);
    return DDP_OK;
}

typedef struct message {
    int from, to, tag, asynchronous;
    size_t size;
} message;

/* One random traffic plan, the same on all ranks; each rank issues its part in the order of the plan and
   waits in a random one. */
static ddp_result random_traffic(ddp_group *g, int count, uint64_t seed) {
    int rank = ddp_rank(g), w = ddp_world_size(g);
    ddp_work *works = (ddp_work *)calloc((size_t)count, sizeof *works);
    unsigned char **buffers = (unsigned char **)calloc((size_t)count, sizeof *buffers);
    message *plan = (message *)calloc((size_t)count, sizeof *plan);
    for (int i = 0; i < count; i++) {
        uint64_t h = ranks_mix(seed + (uint64_t)i);
        message *m = &plan[i];
        m->from = (int)(h % (uint64_t)w);
        m->to = (int)((h >> 8) % (uint64_t)(w - 1));
        m->to += m->to >= m->from;
        m->tag = (int)(h >> 16 & 3);
        m->size = (size_t)(h >> 20 & 255) * ((h >> 28) % 8 == 0 ? 997 : 1);
        if (rank != m->from && rank != m->to) continue;
        buffers[i] = bytes(m->size);
        if (ranks_mix(h + (uint64_t)rank) % 64 == 0) ranks_sleep_us(200);
        if (rank == m->from) {
            message_fill(buffers[i], m->size, seed + (uint64_t)i);
            RANKS_OK(g, ddp_send(g, buffers[i], m->size, DDP_U8, m->to, m->tag, &works[i]));
        } else {
            RANKS_OK(g, ddp_recv(g, buffers[i], m->size, DDP_U8, m->from, m->tag, &works[i]));
        }
    }
    for (int i = 0; i < count; i++) {
        int k = (int)((uint64_t)i * 7919u % (uint64_t)count);
        if (!buffers[k]) continue;
        RANKS_OK(g, ddp_wait(g, &works[k]));
        if (rank == plan[k].to) ARRIVED(g, buffers[k], plan[k].size, seed + (uint64_t)k);
        free(buffers[k]);
    }
    free(works), free(buffers), free(plan);
    return DDP_OK;
}

/* Invalid arguments are detected before anything is sent, and change nothing. */
static ddp_result refused(ddp_group *g) {
    int rank = ddp_rank(g), w = ddp_world_size(g);
    char byte = 0;
    RANKS_CHECK(g, ddp_send(g, &byte, 1, DDP_U8, rank, 0, NULL) == DDP_ERR_INVALID, "a send to oneself");
    RANKS_CHECK(g, ddp_recv(g, &byte, 1, DDP_U8, rank, 0, NULL) == DDP_ERR_INVALID, "a receive from oneself");
    RANKS_CHECK(g, ddp_send(g, &byte, 1, DDP_U8, w, 0, NULL) == DDP_ERR_INVALID, "peer = world_size");
    RANKS_CHECK(g, ddp_recv(g, &byte, 1, DDP_U8, -1, 0, NULL) == DDP_ERR_INVALID, "peer = -1");
    RANKS_CHECK(g, ddp_send(g, &byte, 1, DDP_U8, (rank + 1) % w, -1, NULL) == DDP_ERR_INVALID, "tag = -1");
    RANKS_CHECK(g, ddp_p2p_end(g) == DDP_ERR_INVALID, "batch_end without begin");
    RANKS_OK(g, ddp_p2p_begin(g));
    RANKS_CHECK(g, ddp_p2p_begin(g) == DDP_ERR_INVALID, "batches do not nest");
    RANKS_OK(g, ddp_p2p_end(g));
    RANKS_OK(g, ddp_group_status(g));
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    double start = ranks_now();
    RANKS_RUN(world, refused(world));
    RANKS_RUN(world, all_pairs(world));
    RANKS_RUN(world, tags_out_of_order(world));
    RANKS_RUN(world, many_outstanding(world, 0, 16));
    RANKS_RUN(world, many_outstanding(world, 1, 16));
    RANKS_RUN(world, many_outstanding(world, 0, 20011));
    RANKS_RUN(world, many_outstanding(world, 1, 20011));
    RANKS_RUN(world, large(world));
    RANKS_RUN(world, outstanding_both_ways(world));
    RANKS_RUN(world, every_dtype(world));
    RANKS_RUN(world, batches(world, 8));
    RANKS_RUN(world, batches(world, ddp_world_size(world) <= 4 ? BIG : BIG / 16));
    RANKS_RUN(world, beside_collectives(world, 8));
    RANKS_RUN(world, beside_collectives(world, BIG + 5));
    RANKS_RUN(world, behind_pending_collective(world, 8));
    RANKS_RUN(world, behind_pending_collective(world, BIG / 4 + 5));
    for (int round = 0; round < 4; round++)
        RANKS_RUN(world, random_traffic(world, 400, 1000000u * (uint64_t)(round + 1)));
    if (ddp_rank(world) == 0)
        printf("ok: %s W=%d in %.1f s\n", ranks_mode_name(*(ranks_mode *)user), ddp_world_size(world),
               ranks_now() - start);
    fflush(stdout);
    return DDP_OK;
}

//== receives that do not match the send =====================================================

typedef struct unequal {
    const char *what;
    size_t send_count, recv_count;
    ddp_dtype send_dtype, recv_dtype;
    ddp_result *seen;
} unequal;

static ddp_result unequal_main(ddp_group *world, void *user) {
    const unequal *u = (const unequal *)user;
    void *buf = calloc(1, (size_t)2 << 20); /* the excess data is stored too */
    int rank = ddp_rank(world);
    if (rank == 0) u->seen[0] = ddp_send(world, buf, u->send_count, u->send_dtype, 1, 0, NULL);
    if (rank == 1) u->seen[1] = ddp_recv(world, buf, u->recv_count, u->recv_dtype, 0, 0, NULL);
    /* No text. */
    if (rank < 2 && u->seen[rank] == DDP_ERR_MISMATCH && ddp_last_error()[0] == 0)
        u->seen[rank] = DDP_ERR_CORRUPT;
    free(buf);
    return DDP_OK;
}

static int run_unequal(ranks_mode mode) {
    static const unequal table[] = {
        {"one element more sent", 11, 10, DDP_F32, DDP_F32, NULL},
        {"one element less sent", 10, 11, DDP_F32, DDP_F32, NULL},
        {"another dtype of the same size", 10, 10, DDP_F32, DDP_I32, NULL},
        {"the same bytes in another dtype", 10, 20, DDP_F64, DDP_F32, NULL},
        {"nothing against something", 0, 1, DDP_U8, DDP_U8, NULL},
        {"large, more sent", 300001, 300000, DDP_F32, DDP_F32, NULL},
        {"large, less sent", 300000, 300001, DDP_F32, DDP_F32, NULL},
        {"large against small", 300000, 1, DDP_F32, DDP_F32, NULL},
        {"small against large", 1, 300000, DDP_F32, DDP_F32, NULL},
    };
    int failures = 0;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        unequal u = table[i];
        int small = u.send_count < 100; /* such a send may have returned already */
        u.seen = (ddp_result *)ranks_shared(4096);
        ranks_run(mode, 2, 20000 * DDP_TEST_SLOWDOWN, unequal_main, &u);
        if (u.seen[1] == DDP_ERR_MISMATCH
            && (u.seen[0] == DDP_ERR_MISMATCH || (small && u.seen[0] == DDP_OK)))
            continue;
        fprintf(stderr, "FAIL %s, %s: send gave %s, recv gave %s; wanted DDP_ERR_MISMATCH\n",
                ranks_mode_name(mode), u.what, ddp_result_name(u.seen[0]), ddp_result_name(u.seen[1]));
        failures++;
    }
    return failures;
}

int main(int argc, char **argv) {
    static const int defaults[] = {2, 3, 4, 7, 0};
    ranks_mode mode;
    int failures = ranks_each(argc, argv, defaults, 180, &mode, rank_main);
    if (failures >= 0 && !ranks_joins(mode)) failures += run_unequal(mode);
    return failures != 0;
}

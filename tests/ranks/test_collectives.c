/*  test_collectives.c - every collective gives every rank exactly the documented result.

    test_collectives BACKEND [W ...]     one of support/ranks.h

    One launch per W runs:
      the product of kind x dtype x op x count x memory x place x blocking/async;
      sizes around those at which an implementation can change its method;
      a long random sequence with random delays, with up to three asynchronous calls in flight.
    From W = 8 on, where two cores make everything slow, only a selection of these. All results are compared
    bit for bit with the reference of ranks.h, and memory that a call must not change with a copy. A backend
    without support for some calls gets the cases that it supports.

    tests/gpu/test_conformance.cu includes this file. Each call is then made twice: on the CPU group and,
    possibly while that one is still in flight, on a group over device memory whose buffers mirror those of
    this file. The two results are compared bit for bit. */
#if !defined(TEST_DEVICE)
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#endif

#if !defined(TEST_SLOW)
#define TEST_SLOW ranks_slow()
#endif
#define SLOTS 3  /* asynchronous cases in flight */
#define GUARD 64 /* guard bytes around every buffer */
#define CANARY 0xa5

enum { SEND, RECV };
enum { MEMORY_PRIVATE, MEMORY_GROUP, MEMORY_MIXED, MEMORY_MODES };
enum { PLACE_OUT, PLACE_IN, PLACE_MIXED /* odd ranks in place */, PLACES };

static const char *const kind_names[] = {"all_reduce",     "reduce",       "broadcast", "all_gather",
                                         "reduce_scatter", "all_to_all",   "gather",    "scatter",
                                         "all_gather_v",   "all_to_all_v", "barrier"};
static const char *const op_names[] = {"sum", "avg", "min", "max", "prod"};

/* All ranks create the same list of these. */
typedef struct ccase {
    ddp_call_kind kind;
    ddp_dtype dtype;
    ddp_op op;
    size_t count;
    int root, memory, place, async, specials;
    int shift; /* elements between an aligned address and the buffers */
    int gaps;  /* _v: blocks in reverse order with holes; 0 = offsets NULL */
    uint64_t seed;
    long number;
} ccase;

typedef struct slot {
    unsigned char *arena[2][2]; /* [MEMORY_PRIVATE or _GROUP][SEND or RECV] */
#if defined(TEST_DEVICE)
    unsigned char *far[2][2]; /* their mirrors */
    unsigned char *back;      /* the final contents of a mirror of recv */
#endif
    size_t capacity;
    unsigned char *shadow; /* a copy of the send buffer */
    unsigned char *expect;
    int busy;
    ccase c;
    ddp_work work;
    unsigned char *send, *recv; /* of this rank */
    /* Elements; in place: where the smaller buffer starts in the larger. */
    size_t send_extent, recv_extent, inner;
    int in_place, send_outer; /* in place: the send buffer is the larger one */
} slot;

typedef struct rig {
    ddp_group *group;
    int rank, world_size;
    slot slots[SLOTS + 1]; /* the last one is for large cases */
#if defined(TEST_DEVICE)
    device_rank device;
#endif
    uint64_t zero_signs; /* see ranks_compare */
    long ran;
} rig;

typedef struct plan {
    ranks_mode mode;
    int *entered; /* shared; counts ranks inside the barrier test, NULL if the ranks share no memory */
} plan;

//== parameters of a case ===================================================================

static int is_reduction(ddp_call_kind kind) {
    return kind == DDP_CALL_ALL_REDUCE || kind == DDP_CALL_REDUCE || kind == DDP_CALL_REDUCE_SCATTER;
}

static int has_root(ddp_call_kind kind) {
    return kind == DDP_CALL_REDUCE || kind == DDP_CALL_BROADCAST || kind == DDP_CALL_GATHER
           || kind == DDP_CALL_SCATTER;
}

static int can_be_in_place(ddp_call_kind kind) {
    return kind != DDP_CALL_BROADCAST && kind != DDP_CALL_ALL_TO_ALL && kind != DDP_CALL_ALL_TO_ALL_V
           && kind != DDP_CALL_BARRIER;
}

/* Elements that rank from sends to rank to in the _v calls; for all_gather_v to is -1. */
static size_t part_count(const ccase *c, int from, int to) {
    uint64_t h = ranks_mix(c->seed ^ ranks_mix((uint64_t)from * 100 + (uint64_t)(to + 1)));
    return h % 4 == 0 ? 0 : (size_t)(h >> 8) % (c->count + 1);
}

static size_t hole(const ccase *c, int block) {
    return c->gaps ? (size_t)(ranks_mix(c->seed + 77u + (uint64_t)block) % 4) : 0;
}

/* Offsets of blocks with these counts, and the total extent. */
static size_t lay_out(const ccase *c, int world_size, const size_t *counts, size_t *offsets) {
    size_t at = 0;
    for (int i = 0; i < world_size; i++) {
        int block = c->gaps ? world_size - 1 - i : i;
        at += hole(c, block);
        offsets[block] = at;
        at += counts[block];
    }
    return at;
}

static void v_layout(const ccase *c, int rank, int world_size, size_t *send_counts, size_t *send_offsets,
                     size_t *recv_counts, size_t *recv_offsets, size_t *send_extent, size_t *recv_extent) {
    for (int r = 0; r < world_size; r++) {
        send_counts[r] = part_count(c, rank, r);
        recv_counts[r] = c->kind == DDP_CALL_ALL_GATHER_V ? part_count(c, r, -1) : part_count(c, r, rank);
    }
    *recv_extent = lay_out(c, world_size, recv_counts, recv_offsets);
    *send_extent = c->kind == DDP_CALL_ALL_GATHER_V ? recv_counts[rank]
                                                    : lay_out(c, world_size, send_counts, send_offsets);
}

static void extents(const rig *g, const ccase *c, size_t *send, size_t *recv) {
    size_t w = (size_t)g->world_size, a[DDP_MAX_LOCAL_RANKS], b[DDP_MAX_LOCAL_RANKS], d[DDP_MAX_LOCAL_RANKS],
           e[DDP_MAX_LOCAL_RANKS];
    int is_root = g->rank == c->root;
    *send = *recv = c->count;
    switch (c->kind) {
    case DDP_CALL_REDUCE: *recv = is_root ? c->count : 0; break;
    case DDP_CALL_BROADCAST: *send = 0; break;
    case DDP_CALL_ALL_GATHER: *recv = w * c->count; break;
    case DDP_CALL_GATHER: *recv = is_root ? w * c->count : 0; break;
    case DDP_CALL_REDUCE_SCATTER: *send = w * c->count; break;
    case DDP_CALL_SCATTER: *send = is_root ? w * c->count : 0; break;
    case DDP_CALL_ALL_TO_ALL: *send = *recv = w * c->count; break;
    case DDP_CALL_ALL_GATHER_V:
    case DDP_CALL_ALL_TO_ALL_V: v_layout(c, g->rank, g->world_size, a, b, d, e, send, recv); break;
    case DDP_CALL_BARRIER: *send = *recv = 0; break;
    default: break;
    }
}

/* Writes the expected contents of this rank's recv buffer over its earlier contents. */
static void reference(const rig *g, const ccase *c, unsigned char *out) {
    ranks_data data;
    size_t size = ranks_dtype_size(c->dtype), n = c->count;
    data.dtype = c->dtype;
    data.seed = c->seed;
    data.specials = c->specials;
    switch (c->kind) {
    case DDP_CALL_REDUCE:
    case DDP_CALL_ALL_REDUCE:
        if (c->kind == DDP_CALL_REDUCE && g->rank != c->root) break;
        ranks_reduce(out, &data, c->op, g->world_size, (uint64_t)g->world_size, 0, n);
        break;
    case DDP_CALL_REDUCE_SCATTER:
        ranks_reduce(out, &data, c->op, g->world_size, (uint64_t)g->world_size, (size_t)g->rank * n, n);
        break;
    case DDP_CALL_BROADCAST: ranks_fill(out, &data, c->root, 0, n); break;
    case DDP_CALL_SCATTER: ranks_fill(out, &data, c->root, (size_t)g->rank * n, n); break;
    case DDP_CALL_GATHER:
    case DDP_CALL_ALL_GATHER:
        if (c->kind == DDP_CALL_GATHER && g->rank != c->root) break;
        for (int r = 0; r < g->world_size; r++) ranks_fill(out + (size_t)r * n * size, &data, r, 0, n);
        break;
    case DDP_CALL_ALL_TO_ALL:
        for (int r = 0; r < g->world_size; r++)
            ranks_fill(out + (size_t)r * n * size, &data, r, (size_t)g->rank * n, n);
        break;
    case DDP_CALL_ALL_GATHER_V:
    case DDP_CALL_ALL_TO_ALL_V: {
        size_t sc[DDP_MAX_LOCAL_RANKS], so[DDP_MAX_LOCAL_RANKS], rc[DDP_MAX_LOCAL_RANKS],
            ro[DDP_MAX_LOCAL_RANKS], se, re;
        size_t theirs[DDP_MAX_LOCAL_RANKS], at[DDP_MAX_LOCAL_RANKS];
        v_layout(c, g->rank, g->world_size, sc, so, rc, ro, &se, &re);
        for (int r = 0; r < g->world_size; r++) {
            at[g->rank] = 0;
            if (c->kind == DDP_CALL_ALL_TO_ALL_V) {
                for (int to = 0; to < g->world_size; to++) theirs[to] = part_count(c, r, to);
                lay_out(c, g->world_size, theirs, at);
            }
            ranks_fill(out + ro[r] * size, &data, r, at[g->rank], rc[r]);
        }
        break;
    }
    default: break;
    }
}

//== one case ===============================================================================

static void describe(const ccase *c, char *text, size_t size_bytes) {
    snprintf(text, size_bytes,
             "case %ld: %s %s %s count=%zu root=%d memory=%d place=%d async=%d specials=%d shift=%d gaps=%d",
             c->number, kind_names[c->kind], ddp_dtype_name(c->dtype),
             is_reduction(c->kind) ? op_names[c->op] : "-", c->count, c->root, c->memory, c->place, c->async,
             c->specials, c->shift, c->gaps);
}

/* Kind of memory of this rank for one side; ranks differ if mixed. */
static int memory_of(const rig *g, const ccase *c, int side) {
    if (c->memory != MEMORY_MIXED) return c->memory;
    return (int)(ranks_mix(c->seed + (uint64_t)(g->rank * 2 + side)) & 1);
}

static void prepare(rig *g, slot *s, const ccase *c) {
    size_t size = ranks_dtype_size(c->dtype), skip = (size_t)c->shift * size + GUARD,
           in_place_rank = (size_t)g->rank;
    ranks_data data;
    unsigned char *outer;
    data.dtype = c->dtype;
    data.seed = c->seed;
    data.specials = c->specials;
    s->c = *c;
    s->in_place = can_be_in_place(c->kind)
                  && (c->place == PLACE_IN || (c->place == PLACE_MIXED && g->rank % 2));
    if (has_root(c->kind) && g->rank != c->root) s->in_place = 0;
    extents(g, c, &s->send_extent, &s->recv_extent);
    s->send_outer = c->kind == DDP_CALL_REDUCE_SCATTER || c->kind == DDP_CALL_SCATTER;
    s->inner = 0;
    if (s->send_outer || c->kind == DDP_CALL_ALL_GATHER || c->kind == DDP_CALL_GATHER)
        s->inner = in_place_rank * c->count;
    if (c->kind == DDP_CALL_ALL_GATHER_V) {
        size_t sc[DDP_MAX_LOCAL_RANKS], so[DDP_MAX_LOCAL_RANKS], rc[DDP_MAX_LOCAL_RANKS],
            ro[DDP_MAX_LOCAL_RANKS], se, re;
        v_layout(c, g->rank, g->world_size, sc, so, rc, ro, &se, &re);
        s->inner = ro[g->rank];
    }
    s->send = s->arena[memory_of(g, c, SEND)][SEND] + skip;
    s->recv = s->arena[memory_of(g, c, RECV)][RECV] + skip;
    outer = s->recv;
    memset(s->recv - GUARD, CANARY, s->recv_extent * size + 2 * GUARD);
    if (s->in_place) {
        if (s->send_outer) {
            s->send = outer;
            s->recv = outer + s->inner * size;
            memset(outer - GUARD, CANARY, s->send_extent * size + 2 * GUARD);
        } else {
            s->send = outer + s->inner * size;
        }
    } else {
        memset(s->send - GUARD, CANARY, s->send_extent * size + 2 * GUARD);
    }
    ranks_fill(s->send, &data, g->rank, 0, s->send_extent);
    if (c->kind == DDP_CALL_BROADCAST && g->rank == c->root) ranks_fill(s->recv, &data, g->rank, 0, c->count);
    /* expect: the whole recv buffer with guards, or in place the larger of the two; shadow: the send buffer
       with guards */
    if (s->in_place && s->send_outer) {
        memcpy(s->expect, s->send - GUARD, s->send_extent * size + 2 * GUARD);
        reference(g, c, s->expect + GUARD + s->inner * size);
    } else {
        memcpy(s->expect, s->recv - GUARD, s->recv_extent * size + 2 * GUARD);
        reference(g, c, s->expect + GUARD);
    }
    if (!s->in_place) memcpy(s->shadow, s->send - GUARD, s->send_extent * size + 2 * GUARD);
}

static ddp_result issue_on(const rig *g, ddp_group *group, const slot *s, unsigned char *at_send,
                           unsigned char *at_recv, ddp_work *work) {
    const ccase *c = &s->c;
    int odd = (int)(c->seed & 1), is_root = g->rank == c->root;
    /* For an empty buffer, NULL and a pointer are both valid. */
    void *recv = s->recv_extent == 0 && odd ? NULL : at_recv;
    const void *send = s->send_extent == 0 && odd ? NULL : at_send;
    switch (c->kind) {
    case DDP_CALL_ALL_REDUCE: return ddp_all_reduce(group, send, recv, c->count, c->dtype, c->op, work);
    case DDP_CALL_REDUCE:
        return ddp_reduce(group, send, is_root || !odd ? recv : NULL, c->count, c->dtype, c->op, c->root,
                          work);
    case DDP_CALL_BROADCAST: return ddp_broadcast(group, recv, c->count, c->dtype, c->root, work);
    case DDP_CALL_ALL_GATHER: return ddp_all_gather(group, send, recv, c->count, c->dtype, work);
    case DDP_CALL_REDUCE_SCATTER:
        return ddp_reduce_scatter(group, send, recv, c->count, c->dtype, c->op, work);
    case DDP_CALL_ALL_TO_ALL: return ddp_all_to_all(group, send, recv, c->count, c->dtype, work);
    case DDP_CALL_GATHER: return ddp_gather(group, send, recv, c->count, c->dtype, c->root, work);
    case DDP_CALL_SCATTER: return ddp_scatter(group, send, recv, c->count, c->dtype, c->root, work);
    case DDP_CALL_ALL_GATHER_V:
    case DDP_CALL_ALL_TO_ALL_V: {
        /* the arrays are valid only until the call returns, even if it is asynchronous */
        size_t sc[DDP_MAX_LOCAL_RANKS], so[DDP_MAX_LOCAL_RANKS], rc[DDP_MAX_LOCAL_RANKS],
            ro[DDP_MAX_LOCAL_RANKS], se, re;
        ddp_result result;
        v_layout(c, g->rank, g->world_size, sc, so, rc, ro, &se, &re);
        if (c->kind == DDP_CALL_ALL_GATHER_V)
            result = ddp_all_gather_v(group, send, se, recv, rc, c->gaps ? ro : NULL, c->dtype, work);
        else
            result = ddp_all_to_all_v(group, send, sc, c->gaps ? so : NULL, recv, rc, c->gaps ? ro : NULL,
                                      c->dtype, work);
        memset(sc, 0xff, sizeof sc), memset(so, 0xff, sizeof so), memset(rc, 0xff, sizeof rc),
            memset(ro, 0xff, sizeof ro);
        return result;
    }
    default: return ddp_barrier(group);
    }
}

#if defined(TEST_DEVICE)
/* The mirror of a place in one of the arenas. */
static unsigned char *far_of(const slot *s, const unsigned char *near) {
    for (int m = 0; m < 4; m++)
        if (near >= s->arena[m / 2][m % 2] && near < s->arena[m / 2][m % 2] + s->capacity)
            return s->far[m / 2][m % 2] + (near - s->arena[m / 2][m % 2]);
    return NULL;
}

static ddp_result issue(rig *g, slot *s) {
    size_t size = ranks_dtype_size(s->c.dtype);
    int send_outer = s->in_place && s->send_outer;
    ddp_result result = device_up(&g->device, far_of(s, s->send) - GUARD, s->send - GUARD,
                                  s->send_extent * size + 2 * GUARD);
    if (result == DDP_OK && !send_outer)
        result = device_up(&g->device, far_of(s, s->recv) - GUARD, s->recv - GUARD,
                           s->recv_extent * size + 2 * GUARD);
    if (result == DDP_OK)
        result = issue_on(g, g->device.group, s, far_of(s, s->send), far_of(s, s->recv),
                          s->c.async ? &s->work : NULL);
    return result == DDP_OK ? issue_on(g, g->group, s, s->send, s->recv, NULL) : result;
}

static ddp_group *group_of(rig *g) { return g->device.group; }

/* The same bits as from the CPU group, guards included, in the receive and the send buffer. */
static ddp_result compare_far(rig *g, slot *s, const char *text) {
    size_t size = ranks_dtype_size(s->c.dtype);
    for (int side = SEND; side <= RECV; side++) {
        unsigned char *near = side == SEND ? s->send : s->recv;
        size_t extent = side == SEND ? s->send_extent : s->recv_extent;
        long at;
        ddp_result result = device_down(&g->device, s->back, far_of(s, near) - GUARD,
                                        extent * size + 2 * GUARD);
        if (result != DDP_OK) return result;
        at = ranks_compare(s->back + GUARD, near, extent, s->c.dtype, 0, NULL);
        RANKS_CHECK(g->group, at < 0,
                    "%s: on the device element %ld of %zu of %s is %llx, on the CPU %llx (in_place=%d)", text,
                    at, extent, side == SEND ? "send" : "recv",
                    (unsigned long long)ranks_load(s->back + GUARD, (size_t)at, size),
                    (unsigned long long)ranks_load(near, (size_t)at, size), s->in_place);
        RANKS_CHECK(g->group,
                    memcmp(s->back, near - GUARD, GUARD) == 0
                        && memcmp(s->back + GUARD + extent * size, near + extent * size, GUARD) == 0,
                    "%s: on the device bytes around %s were changed", text, side == SEND ? "send" : "recv");
    }
    return DDP_OK;
}
#else
static ddp_result issue(rig *g, slot *s) {
    return issue_on(g, g->group, s, s->send, s->recv, s->c.async ? &s->work : NULL);
}
static ddp_group *group_of(rig *g) { return g->group; }
static ddp_result compare_far(rig *g, slot *s, const char *text) {
    (void)g;
    (void)s;
    (void)text;
    return DDP_OK;
}
#endif

/* Finishes the case in a slot, if any, and compares. */
static ddp_result finish(rig *g, slot *s) {
    const ccase *c = &s->c;
    size_t size = ranks_dtype_size(c->dtype),
           extent = s->in_place && s->send_outer ? s->send_extent : s->recv_extent;
    const unsigned char *have = s->in_place && s->send_outer ? s->send : s->recv;
    char text[256];
    ddp_result result;
    uint64_t own = 0; /* only all_reduce gives all ranks the same elements */
    long at;
    if (!s->busy) return DDP_OK;
    s->busy = 0;
    describe(c, text, sizeof text);
    if (c->async && c->kind != DDP_CALL_BARRIER) {
        if (c->seed & 2) {
            int done = 0;
            /* Sleeps a little: the awaited thread needs the CPU. */
            for (int tries = 0; !done; ranks_sleep_us(tries++ < 3 ? 0 : 50))
                RANKS_CHECK(g->group, ddp_test(group_of(g), &s->work, &done) == DDP_OK, "%s: ddp_test: %s",
                            text, ddp_last_error());
        }
        RANKS_CHECK(g->group, ddp_wait(group_of(g), &s->work) == DDP_OK, "%s: %s", text, ddp_last_error());
        RANKS_CHECK(g->group, ddp_wait(group_of(g), &s->work) == DDP_OK, "%s: waiting for nothing: %s", text,
                    ddp_last_error());
    }
    result = compare_far(g, s, text);
    if (result != DDP_OK) return result;
    if (is_reduction(c->kind) && c->op != DDP_OP_MIN && c->op != DDP_OP_MAX
        && ddp_group_order(group_of(g)) == DDP_ORDER_ANY)
        at = ranks_compare_any(have, s->expect + GUARD, extent, c->dtype);
    else
        at = ranks_compare(have, s->expect + GUARD, extent, c->dtype,
                           is_reduction(c->kind) && (c->op == DDP_OP_MIN || c->op == DDP_OP_MAX),
                           c->kind == DDP_CALL_ALL_REDUCE ? &g->zero_signs : &own);
    RANKS_CHECK(g->group, at < 0, "%s: element %ld of %zu is %llx, wanted %llx (in_place=%d)", text, at,
                extent, (unsigned long long)ranks_load(have, (size_t)at, size),
                (unsigned long long)ranks_load(s->expect + GUARD, (size_t)at, size), s->in_place);
    RANKS_CHECK(g->group, memcmp(have - GUARD, s->expect, GUARD) == 0, "%s: bytes before recv were changed",
                text);
    RANKS_CHECK(g->group, memcmp(have + extent * size, s->expect + GUARD + extent * size, GUARD) == 0,
                "%s: bytes after recv were changed", text);
    if (!s->in_place)
        RANKS_CHECK(g->group, memcmp(s->send - GUARD, s->shadow, s->send_extent * size + 2 * GUARD) == 0,
                    "%s: send was changed", text);
    g->ran++;
    return DDP_OK;
}

static size_t bytes_needed(const rig *g, const ccase *c) {
    int gathers = c->kind >= DDP_CALL_ALL_GATHER && c->kind != DDP_CALL_BARRIER;
    return ((gathers ? (size_t)g->world_size : 1) * (c->count + 4) + 4) * ranks_dtype_size(c->dtype)
           + 2 * GUARD;
}

/* Whether the backend supports such calls. Too large ones get a smaller count. */
static int is_for(const rig *g, ccase *c) {
    if (ranks_on.is & RANKS_NO_COUNTS
        && (c->kind == DDP_CALL_ALL_GATHER_V || c->kind == DDP_CALL_ALL_TO_ALL_V))
        return 0;
    while (ranks_on.most_bytes && bytes_needed(g, c) > ranks_on.most_bytes) c->count /= 2;
    return 1;
}

/* Runs a case in the given slot, after finishing the one in it; asynchronous ones stay in flight. */
static ddp_result run_case(rig *g, slot *s, const ccase *c) {
    ddp_result result = finish(g, s);
    char text[256];
    ccase fitting = *c;
    if (result != DDP_OK || !is_for(g, &fitting)) return result;
    RANKS_CHECK(g->group, bytes_needed(g, &fitting) <= s->capacity,
                "the test's own slot is too small for case %ld", c->number);
    prepare(g, s, &fitting);
    describe(&s->c, text, sizeof text);
    RANKS_CHECK(g->group, issue(g, s) == DDP_OK, "%s: %s", text, ddp_last_error());
    s->busy = 1;
    return c->async ? DDP_OK : finish(g, s);
}

static ddp_result drain(rig *g) {
    for (int i = SLOTS; i >= 0; i--) { /* not in issue order */
        ddp_result result = finish(g, &g->slots[i]);
        if (result != DDP_OK) return result;
    }
    return DDP_OK;
}

//== lists of cases =========================================================================

/* Fills in the parameters that the caller left random. */
static void vary(ccase *c, int world_size, long number) {
    uint64_t h = ranks_mix((uint64_t)number * 1000 + (uint64_t)world_size);
    c->number = number;
    c->seed = ranks_mix(h + 1);
    c->root = has_root(c->kind) ? (int)(h % (uint64_t)world_size) : 0;
    c->specials = (h >> 8) % 4 == 0;
    c->shift = (h >> 16) % 2 ? 0 : (int)((h >> 20) % 4);
    c->gaps = (int)(h >> 28 & 1);
}

/* The product of all parameters at small counts; every stride-th case of it. */
static ddp_result run_cross(rig *g, long stride) {
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 1000, 4097};
    long number = 0;
    for (int kind = DDP_CALL_ALL_REDUCE; kind <= DDP_CALL_BARRIER; kind++)
        for (int dtype = DDP_F32; dtype <= DDP_U64; dtype++)
            for (int op = DDP_OP_SUM; op <= (is_reduction((ddp_call_kind)kind) ? DDP_OP_PROD : DDP_OP_SUM);
                 op++)
                for (size_t n = 0; n < sizeof counts / sizeof *counts; n++)
                    for (int memory = 0; memory < MEMORY_MODES; memory++)
                        for (int place = 0; place < (can_be_in_place((ddp_call_kind)kind) ? PLACES : 1);
                             place++)
                            for (int async = 0; async < 2; async++) {
                                ccase c;
                                ddp_result result;
                                if (++number % stride) continue;
                                c.kind = (ddp_call_kind)kind;
                                c.dtype = (ddp_dtype)dtype;
                                c.op = (ddp_op)op;
                                c.count = counts[n];
                                c.memory = memory;
                                c.place = place;
                                c.async = async && kind != DDP_CALL_BARRIER;
                                vary(&c, g->world_size, number);
                                while (c.count > 64 && bytes_needed(g, &c) > g->slots[0].capacity)
                                    c.count /= 2;
                                result = run_case(g, &g->slots[number / stride % SLOTS], &c);
                                if (result != DDP_OK) return result;
                            }
    return drain(g);
}

/* Many ranks: every kind; the reductions with three dtypes and operations, the others with one of three
   dtypes. Each count occurs with every memory and place, of which each case has one. With very many ranks the
   reference takes longest: half of the large reductions then. */
static ddp_result run_many_ranks(rig *g) {
    static const ddp_dtype dtypes[] = {DDP_F32, DDP_BF16, DDP_I8};
    static const ddp_op ops[] = {DDP_OP_SUM, DDP_OP_AVG, DDP_OP_MAX};
    size_t counts[4] = {0, 1, (size_t)g->world_size + 1, 5000};
    long number = 3000000;
    int turn = 0;
    for (int kind = DDP_CALL_ALL_REDUCE; kind <= DDP_CALL_BARRIER; kind++)
        for (int n = 0; n < 4; n++) {
            int reduction = is_reduction((ddp_call_kind)kind),
                step = reduction && n == 3 && g->world_size > 33 ? 2 : 1;
            for (int i = 0; i < (reduction ? 9 : 4); i += step) {
                ccase c;
                ddp_result result;
                int mix = i / step + n;
                c.kind = (ddp_call_kind)kind;
                c.dtype = dtypes[i % 3];
                c.op = ops[i / 3 % 3];
                c.count = counts[n];
                c.memory = mix & 1 ? MEMORY_GROUP : MEMORY_PRIVATE;
                c.place = mix & 2 && can_be_in_place(c.kind) ? PLACE_IN : PLACE_OUT;
                c.async = turn % 3 == 0 && kind != DDP_CALL_BARRIER;
                vary(&c, g->world_size, ++number);
                result = run_case(
                    g, &g->slots[bytes_needed(g, &c) > g->slots[0].capacity ? SLOTS : turn % SLOTS], &c);
                if (result != DDP_OK) return result;
                turn++;
            }
        }
    return drain(g);
}

/* Sizes just below, at and above round numbers of bytes, per block and in total. */
static ddp_result run_thresholds(rig *g, int most) {
    static const size_t sizes[] = {4096, 16384, 65536, 262144, 1048576, 3145728};
    long number = 1000000;
    int ran = 0;
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        for (int kind = DDP_CALL_ALL_REDUCE; kind < DDP_CALL_BARRIER; kind++)
            for (int delta = -1; delta <= 3; delta += delta < 1 ? 1 : 2)
                for (int whole = 0; whole < 2; whole++) {
                    ccase c;
                    ddp_result result;
                    uint64_t h = ranks_mix((uint64_t)++number);
                    if (ran >= most && h % 16) continue;
                    ran++;
                    c.kind = (ddp_call_kind)kind;
                    c.dtype = (ddp_dtype)(DDP_F32 + h % 9);
                    c.op = (ddp_op)((h >> 8) % 5);
                    c.memory = (int)((h >> 16) % MEMORY_MODES);
                    c.place = (int)((h >> 24) % PLACES);
                    c.async = (int)(h >> 32 & 1);
                    c.count = sizes[n] / ranks_dtype_size(c.dtype) / (whole ? (size_t)g->world_size : 1)
                              + (size_t)(delta + 1) - 1;
                    vary(&c, g->world_size, number);
                    if (bytes_needed(g, &c) > g->slots[SLOTS].capacity) continue;
                    result = run_case(g, &g->slots[SLOTS], &c);
                    if (result != DDP_OK) return result;
                }
    return drain(g);
}

/* Random cases in random order, as in a program: many in flight, some ranks late. */
static ddp_result run_random(rig *g, long cases, uint64_t seed) {
    for (long i = 0; i < cases; i++) {
        uint64_t h = ranks_mix(seed + (uint64_t)i);
        ccase c;
        ddp_result result;
        c.kind = (ddp_call_kind)(h % (DDP_CALL_BARRIER + 1));
        c.dtype = (ddp_dtype)(DDP_F32 + (h >> 8) % 9);
        c.op = (ddp_op)((h >> 16) % 5);
        c.memory = (int)((h >> 24) % MEMORY_MODES);
        c.place = (int)((h >> 28) % PLACES);
        c.async = (h >> 36) % 3 && c.kind != DDP_CALL_BARRIER;
        c.count = (size_t)((h >> 40) % 64) * (size_t)((h >> 48) % 4 ? 1 : 61);
        vary(&c, g->world_size, 2000000 + i);
        c.seed = ranks_mix(h);
        while (bytes_needed(g, &c) > g->slots[0].capacity) c.count /= 2;
        if (ranks_mix(h + (uint64_t)g->rank * 99u) % 32 == 0) ranks_sleep_us((long)(h >> 20 & 255));
        result = run_case(g, &g->slots[(h >> 56) % SLOTS], &c);
        if (result != DDP_OK) return result;
    }
    return drain(g);
}

/* No rank leaves a barrier before the last has entered. */
static ddp_result run_barriers(rig *g, int *entered, int rounds) {
    for (int i = 0; i < rounds && entered; i++) {
        int in;
        if (ranks_mix((uint64_t)(i * 100 + g->rank)) % 8 == 0) ranks_sleep_us(50);
        __atomic_add_fetch(entered, 1, __ATOMIC_SEQ_CST);
        RANKS_OK(g->group, ddp_barrier(g->group));
        in = __atomic_load_n(entered, __ATOMIC_SEQ_CST);
        RANKS_CHECK(g->group, in >= (i + 1) * g->world_size,
                    "barrier %d let a rank through after %d of %d entries", i, in, (i + 1) * g->world_size);
    }
    return DDP_OK;
}

//== one launch =============================================================================

static ddp_result make_slot(rig *g, slot *s, size_t capacity) {
    memset(s, 0, sizeof *s);
    s->capacity = capacity;
    for (int side = SEND; side <= RECV; side++) {
        void *memory;
        RANKS_OK(g->group, ddp_group_alloc(g->group, capacity, &memory));
        s->arena[MEMORY_GROUP][side] = (unsigned char *)memory;
        s->arena[MEMORY_PRIVATE][side] = (unsigned char *)aligned_alloc(64, (capacity + 63) / 64 * 64);
#if defined(TEST_DEVICE)
        RANKS_OK(g->group, ddp_group_alloc(g->device.group, capacity, &memory));
        s->far[MEMORY_GROUP][side] = (unsigned char *)memory;
        RANKS_OK(g->group, ddp_device_cuda()->alloc(NULL, capacity, &memory));
        s->far[MEMORY_PRIVATE][side] = (unsigned char *)memory;
#endif
    }
#if defined(TEST_DEVICE)
    s->back = (unsigned char *)malloc(capacity);
#endif
    s->shadow = (unsigned char *)malloc(capacity);
    s->expect = (unsigned char *)malloc(capacity);
    return DDP_OK;
}

static ddp_result free_slot(rig *g, slot *s) {
    for (int side = SEND; side <= RECV; side++) {
        RANKS_OK(g->group, ddp_group_free(g->group, s->arena[MEMORY_GROUP][side]));
        free(s->arena[MEMORY_PRIVATE][side]);
#if defined(TEST_DEVICE)
        RANKS_OK(g->group, ddp_group_free(g->device.group, s->far[MEMORY_GROUP][side]));
        ddp_device_cuda()->free(NULL, s->far[MEMORY_PRIVATE][side]);
#endif
    }
#if defined(TEST_DEVICE)
    free(s->back);
#endif
    free(s->shadow);
    free(s->expect);
    return DDP_OK;
}

static ddp_result run_all(rig *g, const plan *p) {
    int w = g->world_size;
    int slow = TEST_SLOW, few = slow > 1 || !(ranks_on.is & RANKS_ALL_CASES);
    /* Every kind with every type and operation has more than a hundred cases. */
    long stride = w <= 2 ? 3 : w <= 4 ? 11 : 41;
    ddp_result result;
    if (few) stride = (w <= 2 ? 1 : w <= 4 ? 7 : 41) * (slow > 1 ? 13 : 3) - 2;
    result = w < 8 ? run_cross(g, stride) : run_many_ranks(g);
    if (result == DDP_OK && w < 8) result = run_thresholds(g, few ? 16 : w <= 4 ? 300 : 100);
    if (result == DDP_OK)
        result = run_random(g, (w <= 4 ? 2000 : w < 8 ? 500 : w < 33 ? 100 : 20) / slow, 4711u + (uint64_t)w);
    if (result == DDP_OK) result = run_barriers(g, p->entered, (w < 8 ? 500 : 50) / slow);
    return result;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    rig *g = (rig *)calloc(1, sizeof *g);
    size_t small, large;
    double start = ranks_now();
    ddp_result result;
    uint64_t mine, all[DDP_MAX_LOCAL_RANKS];
    g->group = world;
    g->rank = ddp_rank(world);
    g->world_size = ddp_world_size(world);
    small = g->world_size < 8 ? (size_t)g->world_size * 4200 * 8 + 4096 : 65536;
#if defined(TEST_LARGE_BYTES)
    large = TEST_LARGE_BYTES;
#else
    large = g->world_size < 8 ? (size_t)(g->world_size <= 4 ? 3 * g->world_size + 2 : 5) << 20
                              : (size_t)g->world_size * 5010 * 4 + 4096;
#endif
#if defined(TEST_DEVICE)
    result = device_rank_open(&g->device, world, large > small ? large : small);
    if (result != DDP_OK) return result;
#endif
    for (int i = 0; i <= SLOTS; i++) {
        result = make_slot(g, &g->slots[i], i < SLOTS ? small : large);
        if (result != DDP_OK) return result;
    }
    result = run_all(g, p);
    if (result != DDP_OK) return result;
    mine = g->zero_signs;
    RANKS_OK(world, ddp_all_gather(world, &mine, all, 1, DDP_U64, NULL));
    for (int r = 0; r < g->world_size; r++)
        RANKS_CHECK(world, all[r] == all[0], "ranks %d and 0 chose different signs of zero in MIN or MAX", r);
    for (int i = 0; i <= SLOTS; i++) {
        result = free_slot(g, &g->slots[i]);
        if (result != DDP_OK) return result;
    }
#if defined(TEST_DEVICE)
    result = device_rank_close(&g->device);
    if (result != DDP_OK) return result;
#endif
    if (g->rank == 0)
        printf("ok: %s W=%d: %ld cases in %.1f s\n", ranks_mode_name(p->mode), g->world_size, g->ran,
               ranks_now() - start);
    fflush(stdout);
    free(g);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {2, 3, 4, 7};
    plan p;
    int count = argc > 2 ? argc - 2 : (int)(sizeof defaults / sizeof *defaults), failures = 0;
    if (argc < 2 || ranks_mode_parse(argv[1], &p.mode) != 0)
        return fprintf(stderr, "usage: test_collectives BACKEND [W ...], see support/ranks.h\n"), 2;
    watchdog_start(480);
    p.entered = (int *)ranks_shared(4096);
    if (ranks_joins(p.mode)) p.entered = NULL, count = 1;
    for (int i = 0; i < count; i++) {
        int w = argc > 2 ? atoi(argv[i + 2]) : defaults[i];
        ddp_result result;
        if (p.entered) *p.entered = 0;
        result = ranks_run(p.mode, w, 60000 * DDP_TEST_SLOWDOWN, rank_main, &p);
        if (result == DDP_OK) continue;
        fprintf(stderr, "FAIL %s W=%d: %s: %s\n", ranks_mode_name(p.mode), w, ddp_result_name(result),
                ddp_last_error());
        failures++;
    }
    return failures != 0;
}

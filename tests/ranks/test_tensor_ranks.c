/*  test_tensor_ranks.c - tensors over ranks: every placement to every other one, shapes up to 4-d, uneven and
    empty; calls and bytes against the plan; layouts over the axes of meshes; sums with the bits of the tree;
    failures that all ranks return; a sharded tensor in a checkpoint.

    test_tensor_ranks BACKEND [W ...]: see support/ranks.h */
#define DDP_TENSOR_IMPLEMENTATION
#include "ddp_fsdp.h"
#include "ddp_tensor.h"
#include "../support/ranks.h"

static ranks_mode mode;

//== a group that records its calls ============================================================================

typedef struct recorder {
    ddp_group *below;
    int rank, calls;
    ddp_call_kind kind;
    size_t sent;
} recorder;
static __thread recorder *opening; /* of the group that is created next */

static ddp_result recorder_open(ddp_group *group, void **state) {
    *state = opening;
    opening->below = (ddp_group *)ddp_group_backend_user(group);
    opening->rank = ddp_rank(group);
    return DDP_OK;
}

/* Bytes that a rank sends in a ring. All-reduce: its two halves over pieces of ceil(count / W). */
static size_t bytes_sent(const ddp_call *call, int rank, int w) {
    size_t sum = 0, size = ddp_dtype_size(call->dtype), each = (call->count + (size_t)w - 1) / (size_t)w,
           next = (size_t)((rank + 1) % w), piece[2];
    switch (call->kind) {
    case DDP_CALL_ALL_REDUCE:
        for (int i = 0; i < 2; i++) {
            size_t at = (i ? next : (size_t)rank) * each, left = at < call->count ? call->count - at : 0;
            piece[i] = left < each ? left : each;
        }
        return (2 * call->count - piece[0] - piece[1]) * size;
    case DDP_CALL_ALL_GATHER_V:
        for (int r = 0; r < w; r++) sum += call->recv_counts[r];
        return (sum - call->recv_counts[next]) * size;
    case DDP_CALL_ALL_TO_ALL_V:
        for (int r = 0; r < w; r++) sum += call->send_counts[r];
        return (sum - call->send_counts[rank]) * size;
    default: return (size_t)(w - 1) * call->count * size; /* of blocks */
    }
}

static ddp_result recorder_run(ddp_group *group, void *state, const ddp_call *call) {
    recorder *r = (recorder *)state;
    if (!call->flags && call->kind != DDP_CALL_BARRIER) {
        r->calls++;
        r->kind = call->kind;
        r->sent += bytes_sent(call, r->rank, ddp_world_size(group));
    }
    return ddp_group_call(r->below, call, NULL);
}
static ddp_result recorder_status(const ddp_group *group, void *state) {
    (void)group;
    return ddp_group_cause(((recorder *)state)->below);
}
static void recorder_poison(ddp_group *group, void *state, ddp_result cause, const char *text) {
    (void)group;
    ddp_group_poison(((recorder *)state)->below, cause, text);
}
static void recorder_close(ddp_group *group, void *state) {
    (void)group;
    (void)state;
}

static ddp_result record(ddp_group **out, ddp_group *group, recorder *r) {
    static const ddp_backend backend = {
        "recorder",
        recorder_open,
        recorder_run,
        NULL,
        NULL,
        NULL,
        NULL,
        NULL,
        NULL,
        recorder_status,
        recorder_poison,
        recorder_close,
        0,
        DDP_ORDER_TREE,
        NULL,
        NULL,
        NULL,
        NULL,
        NULL,
    };
    ddp_group_desc desc = DDP_ZERO;
    memset(r, 0, sizeof *r);
    opening = r;
    desc.backend = &backend;
    desc.name = ddp_group_name(group);
    return ddp_group_create_on(out, group, &desc);
}

/* Bytes that a rank's thread has allocated, and whether its allocator refuses. */
static __thread size_t live_bytes, peak_bytes;
static __thread int grants = -1; /* allocations that still succeed; -1 = all */
static void *counted_alloc(size_t size, void *user) {
    size_t *memory = grants ? (size_t *)malloc(size + 16) : NULL;
    (void)user;
    if (!memory) return NULL;
    if (grants > 0) grants--;
    memory[0] = size > DDP_MALLOC_EXTRA ? size - DDP_MALLOC_EXTRA : 0;
    live_bytes += memory[0];
    if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    return memory + 2;
}
static void counted_free(void *memory, void *user) {
    (void)user;
    live_bytes -= ((size_t *)memory)[-2];
    free((size_t *)memory - 2);
}

//== by hand ==================================================================================================

typedef struct cut {
    int64_t begin, end;
} cut;

static cut piece_of(int64_t n, int rank, int w) {
    int64_t each = (n + w - 1) / w;
    cut c = {rank * each < n ? rank * each : n, 0};
    c.end = c.begin + each < n ? c.begin + each : n;
    return c;
}

static int64_t product(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    return n;
}

/* Visits a global tensor; inside[i]: element i is in the box. Returns how many are, and their shape. */
static int64_t mark(int ndim, const int64_t *shape, const cut *box, unsigned char *inside) {
    int64_t total = product(ndim, shape), count = 0;
    for (int64_t n = 0; n < total; n++) {
        int64_t left = n;
        inside[n] = 1;
        for (int i = ndim - 1; i >= 0; i--) {
            int64_t at = left % shape[i];
            left /= shape[i];
            if (at < box[i].begin || at >= box[i].end) inside[n] = 0;
        }
        count += inside[n];
    }
    return count;
}

/* The elements inside, one after the other. */
static void take(const unsigned char *whole, const unsigned char *inside, int64_t total, size_t size,
                 unsigned char *out) {
    for (int64_t i = 0; i < total; i++)
        if (inside[i]) memcpy(out, whole + (size_t)i * size, size), out += size;
}

static void whole_box(int ndim, const int64_t *shape, cut *box) {
    for (int i = 0; i < ndim; i++) box[i].begin = 0, box[i].end = shape[i];
}

static void cut_box(cut *box, ddp_placement placement, int rank, int w) {
    if (placement <= 0) return;
    cut *d = &box[placement - 1], c = piece_of(d->end - d->begin, rank, w);
    d->end = d->begin + c.end;
    d->begin += c.begin;
}

static ddp_tensor tensor_like(void *data, ddp_dtype dtype, int ndim, const cut *box) {
    ddp_tensor t = DDP_ZERO;
    t.data = data, t.dtype = dtype, t.ndim = ndim;
    for (int i = 0; i < ndim; i++) t.shape[i] = box[i].end - box[i].begin;
    return t;
}

enum { MOST = 540 }; /* elements of a global tensor here */
typedef unsigned char place[MOST * 8];

/* A rank's part of a tensor under a placement, and of the sum if it is PARTIAL. */
typedef struct held {
    ddp_tensor tensor;
    place data;
    unsigned char inside[MOST];
} held;
static void hold(held *h, const ranks_data *data, int ndim, const int64_t *shape, ddp_placement placement,
                 int rank, int w) {
    cut box[8];
    place whole;
    whole_box(ndim, shape, box);
    cut_box(box, placement, rank, w);
    mark(ndim, shape, box, h->inside);
    ranks_fill(whole, data, placement == DDP_PARTIAL ? rank : 0, 0, (size_t)product(ndim, shape));
    take(whole, h->inside, product(ndim, shape), ddp_dtype_size(data->dtype), h->data);
    h->tensor = tensor_like(h->data, data->dtype, ndim, box);
}

/* The expected bytes of rank after from -> to. */
static void wanted(held *h, const ranks_data *data, int ndim, const int64_t *shape, ddp_placement from,
                   ddp_placement to, int rank, int w) {
    int64_t total = product(ndim, shape);
    size_t size = ddp_dtype_size(data->dtype);
    cut box[8];
    place whole;
    if (from == DDP_PARTIAL && to == DDP_PARTIAL) {
        hold(h, data, ndim, shape, to, rank, w);
        return;
    }
    if (from == DDP_PARTIAL)
        ranks_reduce(whole, data, DDP_OP_SUM, w, 0, 0, (size_t)total);
    else
        ranks_fill(whole, data, 0, 0, (size_t)total);
    if (to == DDP_PARTIAL) { /* zeros except where this rank had it; of a replicated one, rank 0 had it */
        hold(h, data, ndim, shape, from, rank, w);
        for (int64_t i = 0; i < total; i++)
            if (!h->inside[i] || (from == DDP_REPLICATE && rank)) memset(whole + (size_t)i * size, 0, size);
    }
    whole_box(ndim, shape, box);
    cut_box(box, to, rank, w);
    mark(ndim, shape, box, h->inside);
    take(whole, h->inside, total, size, h->data);
    h->tensor = tensor_like(h->data, data->dtype, ndim, box);
}

typedef struct shape_text {
    char text[DDP_MAX_NDIM * 22 + 4];
} shape_text;

static const char *shape_of(int ndim, const int64_t *shape, shape_text *out) {
    size_t used = 0;
    for (int i = 0; i < ndim; i++)
        used += (size_t)snprintf(out->text + used, sizeof out->text - used, "%s%lld", i ? "," : "(",
                                 (long long)shape[i]);
    snprintf(out->text + used, sizeof out->text - used, ndim ? ")" : "()");
    return out->text;
}

static ddp_result same(ddp_group *group, const ddp_tensor *have, const ddp_tensor *want, const char *what) {
    shape_text a, b;
    int like = have->ndim == want->ndim && have->dtype == want->dtype;
    for (int i = 0; like && i < want->ndim; i++) like = have->shape[i] == want->shape[i];
    RANKS_CHECK(group, like, "%s: %s, not %s", what, shape_of(have->ndim, have->shape, &a),
                shape_of(want->ndim, want->shape, &b));
    size_t bytes = (size_t)ddp_tensor_count(want) * ddp_dtype_size(want->dtype);
    RANKS_CHECK(group, bytes == 0 || memcmp(have->data, want->data, bytes) == 0, "%s: other values", what);
    return DDP_OK;
}
#define TRY(call)                          \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)

//== one axis =================================================================================================

static const struct {
    int ndim;
    int64_t shape[4];
} shapes[] = {
    {0, {0}},           {1, {1}},    {1, {13}},      {1, {16}},      {2, {5, 4}},
    {2, {24, 8}},       {2, {1, 9}}, {3, {3, 8, 2}}, {3, {1, 5, 6}}, {4, {2, 3, 4, 5}},
    {4, {1, 1, 8, 16}}, {2, {0, 3}}, {3, {4, 3, 0}},
};
static const ddp_dtype dtypes[] = {DDP_F32, DDP_BF16, DDP_I32};

/* The cheapest collective, chosen by hand. */
static const char *cheapest(int ndim, const int64_t *shape, ddp_placement from, ddp_placement to, int w,
                            int64_t mine) {
    int even_from = from <= 0 || shape[from - 1] % w == 0, even_to = to <= 0 || shape[to - 1] % w == 0;
    if (product(ndim, shape) == 0 || (from == to && mine == 0)) return "none";
    if (w == 1 || from == to || from == DDP_REPLICATE || to == DDP_PARTIAL) return "copy";
    if (from == DDP_PARTIAL) return to == DDP_REPLICATE ? "ddp_all_reduce" : "ddp_reduce_scatter";
    if (to == DDP_REPLICATE) return even_from ? "ddp_all_gather" : "ddp_all_gather_v";
    return even_from && even_to ? "ddp_all_to_all" : "ddp_all_to_all_v";
}

static ddp_result redistribute(ddp_group *group, recorder *r, const ranks_data *data, int ndim,
                               const int64_t *shape, ddp_placement from, ddp_placement to) {
    int rank = ddp_rank(group), w = ddp_world_size(group), moves, calls = r->calls;
    size_t size = ddp_dtype_size(data->dtype), sent = r->sent, before;
    held in, want, kept;
    ddp_tensor out = DDP_ZERO;
    ddp_tensor_plan plan;
    char what[160];
    shape_text text;
    snprintf(what, sizeof what, "%s %s %s to %s", ddp_dtype_name(data->dtype), shape_of(ndim, shape, &text),
             ddp_placement_name(from), ddp_placement_name(to));
    hold(&in, data, ndim, shape, from, rank, w);
    hold(&kept, data, ndim, shape, from, rank, w);
    wanted(&want, data, ndim, shape, from, to, rank, w);
    out = want.tensor;
    out.data = NULL, out.dtype = DDP_DTYPE_DEFAULT;
    RANKS_OK(group, ddp_tensor_redistribute_plan(group, &in.tensor, from, to, &out, &plan));
    RANKS_CHECK(
        group, strcmp(plan.collective, cheapest(ndim, shape, from, to, w, ddp_tensor_count(&in.tensor))) == 0,
        "%s: plan %s", what, plan.collective);
    RANKS_OK(group, ddp_tensor_create(group, &out, data->dtype, ndim, want.tensor.shape));
    memset(out.data, 0xa5, (size_t)ddp_tensor_count(&out) * size);
    peak_bytes = before = live_bytes;
    RANKS_OK(group, ddp_tensor_redistribute(group, &in.tensor, from, to, &out));
    TRY(same(group, &out, &want.tensor, what));
    TRY(same(group, &in.tensor, &kept.tensor, what));
    moves = plan.sent_bytes != 0
            || (strcmp(plan.collective, "none") != 0 && strcmp(plan.collective, "copy") != 0);
    RANKS_CHECK(group,
                r->calls - calls == moves && (!moves || strcmp(ddp_call_name(r->kind), plan.collective) == 0),
                "%s: %d calls, the last one %s, plan %s", what, r->calls - calls, ddp_call_name(r->kind),
                plan.collective);
    RANKS_CHECK(group, r->sent - sent == plan.sent_bytes, "%s: %zu bytes sent, plan %zu", what,
                r->sent - sent, plan.sent_bytes);
    RANKS_CHECK(group,
                mode == RANKS_MPI || (peak_bytes - before == plan.workspace_bytes && live_bytes == before),
                "%s: %zu bytes of workspace, plan %zu", what, peak_bytes - before, plan.workspace_bytes);
    if (from == to || w == 1 || strcmp(plan.collective, "ddp_all_reduce") == 0) { /* in place */
        RANKS_OK(group, ddp_tensor_redistribute(group, &in.tensor, from, to, &in.tensor));
        TRY(same(group, &in.tensor, &want.tensor, what));
    }
    ddp_tensor_free(group, &out);
    return DDP_OK;
}

/* From and to one rank, and parts of replicated tensors. */
static ddp_result roots(ddp_group *group, const ranks_data *data, int ndim, const int64_t *shape,
                        ddp_placement placement, int root) {
    int rank = ddp_rank(group), w = ddp_world_size(group);
    held whole, part, sum;
    ddp_tensor out = DDP_ZERO, nothing = DDP_ZERO;
    hold(&whole, data, ndim, shape, DDP_REPLICATE, rank, w);
    wanted(&part, data, ndim, shape, DDP_REPLICATE, placement, rank, w);
    RANKS_OK(group, ddp_tensor_shard(group, &whole.tensor, placement, &out));
    TRY(same(group, &out, &part.tensor, "shard"));
    memset(out.data, 0xa5, (size_t)ddp_tensor_count(&out) * ddp_dtype_size(data->dtype));
    RANKS_OK(group, ddp_tensor_distribute(group, rank == root ? &whole.tensor : NULL, root, placement, &out));
    wanted(&part, data, ndim, shape, DDP_REPLICATE, placement, placement == DDP_PARTIAL ? rank != root : rank,
           w);
    TRY(same(group, &out, &part.tensor, "distribute"));
    ddp_tensor_free(group, &out);
    hold(&part, data, ndim, shape, placement, rank, w);
    wanted(&sum, data, ndim, shape, placement, DDP_REPLICATE, rank, w);
    RANKS_OK(group, ddp_tensor_gather(group, &part.tensor, placement, shape, root,
                                      rank == root ? &out
                                      : rank % 2   ? NULL
                                                   : &nothing));
    if (rank == root) TRY(same(group, &out, &sum.tensor, "gather"));
    RANKS_CHECK(group, !nothing.data, "a rank that is not root has got something");
    ddp_tensor_free(group, &out);
    return DDP_OK;
}

static ddp_result all_pairs(ddp_group *world) {
    recorder r;
    ddp_group *group;
    /* With a sanitizer only a third of them. */
    int w = ddp_world_size(world), every = ranks_slow() > 1 ? 3 : 1, turn = 0;
    RANKS_OK(world, record(&group, world, &r));
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int d = 0; d < 3; d++) {
            ranks_data data = {dtypes[d], 77 + s, 0};
            int n = shapes[s].ndim;
            for (int from = -1; from <= n; from++) {
                for (int to = -1; to <= n; to++)
                    if (turn++ % every == 0)
                        TRY(redistribute(group, &r, &data, n, shapes[s].shape, (ddp_placement)from,
                                         (ddp_placement)to));
                TRY(roots(group, &data, n, shapes[s].shape, (ddp_placement)from, turn % w));
            }
        }
    ddp_group_destroy(group);
    return DDP_OK;
}

/* The number of bytes does not depend on the ranks: the documented traffic, for even parts. */
static ddp_result formulas(ddp_group *world) {
    static const ddp_placement all[] = {DDP_REPLICATE, DDP_PARTIAL, DDP_SHARD(0), DDP_SHARD(1)};
    static const int64_t shape[2] = {840, 1680}; /* 840 = 8 * 7 * 5 * 3 */
    size_t w = (size_t)ddp_world_size(world), total = 840 * 1680 * 4, per = total / w * (w - 1);
    const size_t bytes[4][4] = {
        {0, 0, 0, 0}, {2 * per, 0, per, per}, {per, 0, 0, per / w}, {per, 0, per / w, 0}};
    if (840 % w) return DDP_OK;
    for (int i = 0; i < 16; i++) {
        ddp_tensor in = DDP_ZERO, out = DDP_ZERO;
        ddp_tensor_plan plan;
        ddp_tensor_box box;
        in.dtype = DDP_F32, in.ndim = out.ndim = 2;
        RANKS_OK(world, ddp_placement_shard_box(all[i / 4], 2, shape, ddp_rank(world), (int)w, &box));
        memcpy(in.shape, box.shape, sizeof in.shape);
        RANKS_OK(world, ddp_placement_shard_box(all[i % 4], 2, shape, ddp_rank(world), (int)w, &box));
        memcpy(out.shape, box.shape, sizeof out.shape);
        RANKS_OK(world, ddp_tensor_redistribute_plan(world, &in, all[i / 4], all[i % 4], &out, &plan));
        RANKS_CHECK(world, plan.sent_bytes == bytes[i / 4][i % 4], "%s to %s: %zu bytes, not %zu",
                    ddp_placement_name(all[i / 4]), ddp_placement_name(all[i % 4]), plan.sent_bytes,
                    bytes[i / 4][i % 4]);
        if (w > 1 && all[i % 4] == DDP_SHARD(0) && all[i / 4] == DDP_PARTIAL)
            RANKS_CHECK(world, plan.workspace_bytes == 0, "rows are stored as blocks already");
    }
    return DDP_OK;
}

//== over meshes ==============================================================================================

typedef struct grid {
    int axes, size[3], at[3];
    ddp_group *group[3];
    recorder recorder[3];
} grid;

static int coordinate(const grid *g, int rank, int axis) {
    for (int i = g->axes - 1; i > axis; i--) rank /= g->size[i];
    return rank % g->size[axis];
}

/* The summand of a rank: its position along the PARTIAL axes. */
static int summand(const grid *g, const ddp_placement *p, int rank) {
    int n = 0;
    for (int i = 0; i < g->axes; i++)
        if (p[i] == DDP_PARTIAL) n = n * g->size[i] + coordinate(g, rank, i);
    return n;
}

static int layout_of(const grid *g, int ndim, const int64_t *shape, const ddp_placement *p, int rank,
                     cut *box, unsigned char *inside) {
    whole_box(ndim, shape, box);
    for (int i = 0; i < g->axes; i++) cut_box(box, p[i], coordinate(g, rank, i), g->size[i]);
    return (int)mark(ndim, shape, box, inside);
}

/* The sum of the summands of all PARTIAL axes from this one on, innermost first, each by the tree. */
static void nested(const grid *g, const ddp_placement *p, int axis, int summand_so_far,
                   const ranks_data *data, int first, int ranks, float *out, int64_t count) {
    float right[MOST];
    int left = 1;
    if (axis == g->axes) {
        ranks_fill(out, data, summand_so_far, 0, (size_t)count);
        return;
    }
    if (p[axis] != DDP_PARTIAL) {
        nested(g, p, axis + 1, summand_so_far, data, 0, axis + 1 < g->axes ? g->size[axis + 1] : 1, out,
               count);
        return;
    }
    if (ranks == 1) {
        nested(g, p, axis + 1, summand_so_far * g->size[axis] + first, data, 0,
               axis + 1 < g->axes ? g->size[axis + 1] : 1, out, count);
        return;
    }
    while (left * 2 < ranks) left *= 2;
    nested(g, p, axis, summand_so_far, data, first, left, out, count);
    nested(g, p, axis, summand_so_far, data, first + left, ranks - left, right, count);
    for (int64_t i = 0; i < count; i++) out[i] += right[i];
}

/* Every element, from those ranks that agree with this one along replicated axes: once along sharded axes, as
   a sum along partial axes. */
static ddp_result adds_up(ddp_group *world, const grid *g, int ndim, const int64_t *shape,
                          const ddp_placement *p, const ddp_tensor *out, const int32_t *want) {
    int w = ddp_world_size(world), me = ddp_rank(world);
    int32_t mine[MOST] = {0}, all[8 * MOST], sum[MOST] = {0};
    unsigned char inside[MOST];
    cut box[8];
    int64_t total = product(ndim, shape);
    memcpy(mine, out->data, (size_t)ddp_tensor_count(out) * 4);
    RANKS_OK(world, ddp_all_gather(world, mine, all, MOST, DDP_I32, NULL));
    for (int r = 0; r < w; r++) {
        int32_t *next = all + r * MOST, agrees = 1;
        for (int i = 0; i < g->axes; i++)
            agrees &= p[i] != DDP_REPLICATE || coordinate(g, r, i) == coordinate(g, me, i);
        layout_of(g, ndim, shape, p, r, box, inside);
        for (int64_t i = 0; i < total && agrees; i++)
            if (inside[i]) sum[i] = (int32_t)((uint32_t)sum[i] + (uint32_t)*next++);
    }
    RANKS_CHECK(world, memcmp(sum, want, (size_t)total * 4) == 0, "it does not add up");
    return DDP_OK;
}

static ddp_result relayout(ddp_group *world, grid *g, ddp_dtype dtype, int ndim, const int64_t *shape,
                           const ddp_placement *from, const ddp_placement *to) {
    ranks_data data = {dtype, 99, 0};
    int rank = ddp_rank(world);
    int64_t total = product(ndim, shape);
    size_t sent = 0;
    place whole, part, want;
    unsigned char inside[MOST];
    cut box[8];
    ddp_tensor_layout a = DDP_ZERO, b;
    ddp_tensor in, out = DDP_ZERO, expected;
    ddp_tensor_plan plan, done;
    ddp_tensor_box told;
    int partial = 0;
    a.ndim = ndim, a.axis_count = g->axes;
    memcpy(a.shape, shape, (size_t)ndim * sizeof *shape);
    for (int i = 0; i < g->axes; i++) a.axes[i] = g->group[i];
    b = a;
    for (int i = 0; i < g->axes; i++)
        a.placement[i] = from[i], b.placement[i] = to[i], sent += g->recorder[i].sent,
        partial |= to[i] == DDP_PARTIAL;
    layout_of(g, ndim, shape, from, rank, box, inside);
    ranks_fill(whole, &data, summand(g, from, rank), 0, (size_t)total);
    take(whole, inside, total, ddp_dtype_size(dtype), part);
    in = tensor_like(part, dtype, ndim, box);
    RANKS_OK(world, ddp_tensor_layout_box(&a, &told));
    for (int i = 0; i < ndim; i++)
        RANKS_CHECK(world,
                    told.offset[i] == box[i].begin && told.shape[i] == in.shape[i]
                        && told.global_shape[i] == shape[i],
                    "the box of dimension %d", i);
    RANKS_OK(world, ddp_tensor_redistribute_mesh(&in, &a, &b, NULL, &plan));
    RANKS_OK(world, ddp_tensor_redistribute_mesh(&in, &a, &b, &out, &done));
    for (int i = 0; i < g->axes; i++) sent -= g->recorder[i].sent;
    RANKS_CHECK(world,
                plan.sent_bytes == done.sent_bytes && plan.workspace_bytes == done.workspace_bytes
                    && plan.collective == done.collective && plan.sent_bytes + sent == 0,
                "plan %s %zu, done %s %zu, sent %zu", plan.collective, plan.sent_bytes, done.collective,
                done.sent_bytes, (size_t)0 - sent);
    layout_of(g, ndim, shape, to, rank, box, inside);
    expected = tensor_like(want, dtype, ndim, box);
    if (dtype == DDP_I32) {
        int32_t sum[MOST] = {0};
        int summands = 1;
        for (int i = 0; i < g->axes; i++)
            if (from[i] == DDP_PARTIAL) summands *= g->size[i];
        for (int s = 0; s < summands; s++) {
            int32_t one[MOST];
            ranks_fill(one, &data, s, 0, (size_t)total);
            for (int64_t i = 0; i < total; i++) sum[i] = (int32_t)((uint32_t)sum[i] + (uint32_t)one[i]);
        }
        TRY(adds_up(world, g, ndim, shape, to, &out, sum));
        memcpy(whole, sum, (size_t)total * 4);
    } else {
        nested(g, from, 0, 0, &data, 0, g->size[0], (float *)(void *)whole, total);
    }
    take(whole, inside, total, 4, want);
    if (partial) memcpy(want, out.data, (size_t)ddp_tensor_count(&expected) * 4); /* its shape */
    TRY(same(world, &out, &expected, "relayout"));
    ddp_tensor_free(g->group[0], &out);
    return DDP_OK;
}

static ddp_result over_mesh(ddp_group *world, int axes, int first, int second) {
    static const struct {
        int ndim;
        int64_t shape[3];
    } tensors[] = {{2, {5, 7, 0}}, {2, {12, 8, 0}}, {3, {1, 6, 9}}, {1, {3, 0, 0}}, {2, {4, 0, 0}}};
    static const char *const names[] = {"dp", "cp", "tp"};
    ddp_mesh_desc desc = DDP_ZERO;
    ddp_mesh *mesh;
    grid g;
    uint64_t random = 1;
    memset(&g, 0, sizeof g);
    desc.ndim = g.axes = axes;
    desc.shape[0] = first, desc.shape[1] = second;
    for (int i = 0; i < axes; i++) desc.names[i] = names[i];
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &desc));
    for (int i = 0; i < axes; i++) {
        RANKS_OK(world, record(&g.group[i], ddp_mesh_group(mesh, names[i]), &g.recorder[i]));
        g.size[i] = ddp_world_size(g.group[i]), g.at[i] = ddp_rank(g.group[i]);
    }
    for (int t = 0; t < 5; t++) {
        int base = tensors[t].ndim + 2, all = 1, every;
        for (int i = 0; i < axes; i++) all *= base;
        every = all * all > 200 ? all * all / (ranks_slow() > 1 ? 40 : 160) : 1;
        for (int pair = 0; pair < all * all; pair++) {
            ddp_placement from[3], to[3];
            char what[200] = "";
            ddp_result result;
            random = ranks_mix(random);
            if (random % (uint64_t)every) continue;
            for (int i = 0, p = pair; i < axes; i++, p /= base * base)
                from[i] = (ddp_placement)(p % base - 1), to[i] = (ddp_placement)(p / base % base - 1);
            result = relayout(world, &g, random >> 40 & 1 ? DDP_F32 : DDP_I32, tensors[t].ndim,
                              tensors[t].shape, from, to);
            for (int i = 0; i < axes && result != DDP_OK; i++)
                snprintf(what + strlen(what), sizeof what - strlen(what), " [%d %s to %s]", g.size[i],
                         ddp_placement_name(from[i]), ddp_placement_name(to[i]));
            RANKS_CHECK(world, result == DDP_OK, "tensor %d:%s", t, what);
        }
    }
    for (int i = 0; i < axes; i++) ddp_group_destroy(g.group[i]);
    ddp_mesh_destroy(mesh);
    return DDP_OK;
}

static ddp_result meshes(ddp_group *world) {
    int w = ddp_world_size(world);
    TRY(over_mesh(world, 1, w, 0));
    if (w % 2 == 0) TRY(over_mesh(world, 2, 2, w / 2));
    if (w % 3 == 0) TRY(over_mesh(world, 2, w / 3, 3));
    if (w == 8) TRY(over_mesh(world, 3, 2, 2));
    return DDP_OK;
}

/* Best order first: an outer axis is sharded before an inner one is summed, and a shard that would be undone
   is not made. */
static ddp_result routes(ddp_group *world) {
    static const char *const names[] = {"dp", "tp"};
    ddp_mesh_desc desc = DDP_ZERO;
    ddp_mesh *mesh;
    ddp_tensor_layout a = DDP_ZERO, b;
    ddp_tensor in = DDP_ZERO;
    ddp_tensor_plan plan;
    ddp_tensor_box box;
    /* Sent by each rank, of 16 x 16. */
    static const struct {
        ddp_placement from[2], to[2];
        const char *collective;
        size_t elements;
    } cases[] = {
        {{DDP_REPLICATE, DDP_PARTIAL}, {DDP_SHARD(0), DDP_REPLICATE}, "ddp_all_reduce", 128},
        {{DDP_PARTIAL, DDP_REPLICATE}, {DDP_REPLICATE, DDP_SHARD(1)}, "ddp_all_reduce", 128},
        {{DDP_PARTIAL, DDP_PARTIAL}, {DDP_SHARD(0), DDP_SHARD(1)}, "ddp_reduce_scatter", 128 + 64},
        {{DDP_SHARD(0), DDP_SHARD(0)}, {DDP_SHARD(0), DDP_SHARD(1)}, "ddp_all_to_all", 32},
        {{DDP_SHARD(0), DDP_SHARD(0)}, {DDP_REPLICATE, DDP_REPLICATE}, "ddp_all_gather", 64 + 128},
        {{DDP_SHARD(0), DDP_SHARD(0)}, {DDP_REPLICATE, DDP_SHARD(0)}, "ddp_all_gather", 64 + 128},
        {{DDP_SHARD(0), DDP_SHARD(1)}, {DDP_REPLICATE, DDP_SHARD(1)}, "ddp_all_gather", 64},
        {{DDP_REPLICATE, DDP_REPLICATE}, {DDP_SHARD(1), DDP_SHARD(1)}, "copy", 0},
        {{DDP_SHARD(0), DDP_REPLICATE}, {DDP_REPLICATE, DDP_SHARD(0)}, "ddp_all_gather", 128},
        {{DDP_SHARD(0), DDP_PARTIAL}, {DDP_REPLICATE, DDP_SHARD(0)}, "ddp_all_reduce", 128 + 128},
    };
    if (ddp_world_size(world) != 4) return DDP_OK;
    desc.ndim = 2, desc.shape[0] = desc.shape[1] = 2, desc.names[0] = names[0], desc.names[1] = names[1];
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &desc));
    a.ndim = a.axis_count = 2, a.shape[0] = a.shape[1] = 16;
    for (int i = 0; i < 2; i++) a.axes[i] = ddp_mesh_group(mesh, names[i]);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        memcpy(a.placement, cases[c].from, sizeof cases[c].from);
        b = a;
        memcpy(b.placement, cases[c].to, sizeof cases[c].to);
        RANKS_OK(world, ddp_tensor_layout_box(&a, &box));
        in.dtype = DDP_F32, in.ndim = 2;
        memcpy(in.shape, box.shape, sizeof in.shape);
        RANKS_OK(world, ddp_tensor_redistribute_mesh(&in, &a, &b, NULL, &plan));
        RANKS_CHECK(world,
                    strcmp(plan.collective, cases[c].collective) == 0
                        && plan.sent_bytes == cases[c].elements * 4,
                    "case %zu: %s, %zu elements", c, plan.collective, plan.sent_bytes / 4);
    }
    ddp_mesh_destroy(mesh);
    return DDP_OK;
}

//== errors ====================================================================================================

static ddp_result says(ddp_group *world, ddp_result result, ddp_result wanted_result, const char *text) {
    RANKS_CHECK(world, result == wanted_result && strstr(ddp_last_error(), text),
                "wanted %s \"%s\", have %s \"%s\"", ddp_result_name(wanted_result), text,
                ddp_result_name(result), ddp_last_error());
    return DDP_OK;
}

static ddp_result sentences(ddp_group *world) {
    int w = ddp_world_size(world), rank = ddp_rank(world), last = w - 1;
    float data[64] = {0}, other[64] = {0};
    ddp_tensor in = DDP_ZERO, out = DDP_ZERO;
    static const int64_t global[2] = {5, 4};
    char text[160], failed[24];
    if (w == 1) return DDP_OK;
    snprintf(failed, sizeof failed, ": rank %d", last);
    in.data = data, in.dtype = DDP_F32, in.ndim = 2, in.shape[0] = 5, in.shape[1] = 4;
    out.data = other, out.dtype = DDP_F32, out.ndim = 2, out.shape[0] = 1, out.shape[1] = 1;
    snprintf(text, sizeof text, "out is (1, 1), but SHARD(0) of (5, 4) on rank %d of %d is (%d, 4)", rank, w,
             (int)(piece_of(5, rank, w).end - piece_of(5, rank, w).begin));
    TRY(says(world, ddp_tensor_redistribute(world, &in, DDP_REPLICATE, DDP_SHARD(0), &out), DDP_ERR_INVALID,
             text));
    if (rank == 1 && w == 2) {
        out.shape[0] = 3, out.shape[1] = 4;
        TRY(says(world, ddp_tensor_redistribute(world, &in, DDP_REPLICATE, DDP_SHARD(0), &out),
                 DDP_ERR_INVALID,
                 "rank 1/2 ddp_tensor_redistribute group=world: out is (3, 4), but SHARD(0) of (5, 4) on "
                 "rank 1 of 2 is (2, 4)"));
    }
    out.data = data, out.shape[0] = piece_of(5, rank, w).end - piece_of(5, rank, w).begin, out.shape[1] = 4;
    if (out.shape[0])
        TRY(says(world, ddp_tensor_redistribute(world, &in, DDP_REPLICATE, DDP_SHARD(0), &out),
                 DDP_ERR_INVALID, "REPLICATE to SHARD(0) has no in-place form"));

    /* one rank has an error, all return it, and the group stays usable */
    out.data = NULL;
    in.dtype = rank == last ? (ddp_dtype)99 : DDP_F32;
    TRY(says(world, ddp_tensor_distribute(world, &in, last, DDP_SHARD(0), &out), DDP_ERR_INVALID,
             "whole: dtype=99"));
    in.dtype = DDP_F32;
    out.data = rank == last ? other : NULL;
    out.shape[0] = 7;
    snprintf(text, sizeof text, "%s: out is (7, 4), but the result is", rank == last ? "" : failed);
    TRY(says(world, ddp_tensor_distribute(world, &in, 0, DDP_SHARD(0), &out), DDP_ERR_INVALID, text));
    RANKS_CHECK(world, rank == last || !out.data, "out was made");
    memset(&out, 0, sizeof out);
    in.shape[0] = rank == last ? 6 : 5;
    snprintf(text, sizeof text, "%s: in is (6, 4), but REPLICATE of (5, 4) on rank",
             rank == last ? "" : failed);
    TRY(says(world, ddp_tensor_gather(world, &in, DDP_REPLICATE, global, 0, &out), DDP_ERR_INVALID, text));
    in.shape[0] = 5;

    /* ranks pass different moves whose collectives would match */
    in.shape[0] = in.shape[1] = 2; /* of a (2, 2 w) or a (2 w, 2) */
    {
        const int64_t wide[2] = {2, 2 * w}, high[2] = {2 * w, 2}, less[2] = {2 * w - 1, 2};
        int odd = rank == 0;
        TRY(says(world,
                 ddp_tensor_gather(world, &in, odd ? DDP_SHARD(1) : DDP_SHARD(0), odd ? wide : high, 0, &out),
                 DDP_ERR_MISMATCH, "ranks differ: rank 0 SHARD(1) of f32 (2, "));
        TRY(says(world, ddp_tensor_gather(world, &in, DDP_SHARD(0), odd ? less : high, 0, &out),
                 DDP_ERR_MISMATCH, "root=0; give every rank the same"));
        in.shape[0] = in.shape[1] = 2 * w > 8 ? 8 : 2 * w;
        TRY(says(world, ddp_tensor_distribute(world, &in, 0, odd ? DDP_SHARD(1) : DDP_SHARD(0), &out),
                 DDP_ERR_MISMATCH, "ranks differ: rank 0 SHARD(1) of f32 ("));
    }
    in.ndim = 5, in.shape[0] = 5, in.shape[1] = 4, in.shape[2] = in.shape[3] = in.shape[4] = 1;
    TRY(says(world, ddp_tensor_distribute(world, &in, rank, DDP_SHARD(0), &out), DDP_ERR_MISMATCH,
             "ranks differ: rank 0 root=0, rank 1 root=1; give every rank the same"));
    snprintf(text, sizeof text, "ranks differ: rank 0 root=1, rank 1 root=%d; give every rank the same",
             2 % w);
    TRY(says(world, ddp_tensor_distribute(world, &in, (rank + 1) % w, DDP_SHARD(0), &out), DDP_ERR_MISMATCH,
             text));
    RANKS_CHECK(world, !out.data, "out was made");
    in.ndim = 2, in.shape[0] = 5, in.shape[1] = 4;
    if (mode == RANKS_MPI) return DDP_OK; /* it allocates, too */
    grants = rank == 1 ? 0 : -1;
    TRY(says(world, ddp_tensor_distribute(world, &in, 0, DDP_REPLICATE, &out), DDP_ERR_NO_MEMORY,
             "bytes could not be allocated"));
    RANKS_CHECK(world, !out.data, "out was made");
    grants = -1;
    return ddp_barrier(world);
}

/* A redistribution in which ranks pass different arguments whose collectives would match, or only one rank is
   wrong or has no memory. All return the error before anything is sent, along one group and along the axes of
   a mesh, and the groups stay usable. */
static ddp_result one_is_wrong(ddp_group *world) {
    static const char *const names[] = {"dp", "tp"};
    int w = ddp_world_size(world), rank = ddp_rank(world);
    float values[512] = {0}, other[512];
    ddp_tensor in = DDP_ZERO, out = DDP_ZERO;
    ddp_mesh_desc desc = DDP_ZERO;
    ddp_mesh *mesh;
    ddp_tensor_layout a = DDP_ZERO, b;
    char text[100];
    if (w == 1) return DDP_OK;
    in.dtype = DDP_F32, in.ndim = 2, in.data = values;
    in.shape[0] = in.shape[1] = w;
    out = in;
    out.data = other;
    /* a (w, w w) sharded along its columns and a (w w, w) sharded along its rows have equal parts, and full
       tensors of the same bytes */
    out.shape[0] = rank ? w * w : w;
    out.shape[1] = rank ? w : w * w;
    TRY(says(world,
             ddp_tensor_redistribute(world, &in, rank ? DDP_SHARD(0) : DDP_SHARD(1), DDP_REPLICATE, &out),
             DDP_ERR_MISMATCH, "ranks differ: rank 0 SHARD(1) to REPLICATE of f32 ("));
    out.shape[0] = rank == 1 ? w + 1 : w;
    out.shape[1] = w;
    snprintf(text, sizeof text, "%s: out is (%d, %d), but REPLICATE of", rank == 1 ? "" : ": rank 1", w + 1,
             w);
    TRY(says(world, ddp_tensor_redistribute(world, &in, DDP_PARTIAL, DDP_REPLICATE, &out), DDP_ERR_INVALID,
             text));
    out.shape[0] = w * w;
    TRY(says(world, ddp_tensor_redistribute(world, rank == 1 ? NULL : &in, DDP_SHARD(0), DDP_REPLICATE, &out),
             DDP_ERR_INVALID, "in is NULL"));

    /* over a mesh: the neighbours of the wrong rank learn of it first, and pass it on */
    desc.ndim = 2, desc.shape[0] = w % 2 ? 1 : 2, desc.names[0] = names[0], desc.names[1] = names[1];
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &desc));
    a.ndim = a.axis_count = 2, a.shape[0] = a.shape[1] = w;
    for (int i = 0; i < 2; i++) a.axes[i] = ddp_mesh_group(mesh, names[i]), a.placement[i] = DDP_PARTIAL;
    b = a;
    b.placement[0] = b.placement[1] = DDP_REPLICATE;
    in.shape[0] = in.shape[1] = w;
    out = in;
    out.data = other;
    TRY(says(world, ddp_tensor_redistribute_mesh(rank == 1 ? NULL : &in, &a, &b, &out, NULL), DDP_ERR_INVALID,
             "in is NULL"));
    if (mode != RANKS_MPI) { /* which allocates, too */
        out.data = NULL;
        grants = rank == 1 ? 0 : -1;
        TRY(says(world, ddp_tensor_redistribute_mesh(&in, &a, &b, &out, NULL), DDP_ERR_NO_MEMORY,
                 "bytes could not be allocated"));
        RANKS_CHECK(world, !out.data, "out was made");
        grants = rank == 1 ? 0 : -1;
        TRY(says(world, ddp_tensor_redistribute(world, &in, DDP_PARTIAL, DDP_REPLICATE, &out),
                 DDP_ERR_NO_MEMORY, "bytes could not be allocated"));
        RANKS_CHECK(world, !out.data, "out was made");
        grants = -1;
        out.data = other;
    }
    RANKS_OK(world, ddp_tensor_redistribute_mesh(&in, &a, &b, &out, NULL));
    RANKS_OK(world, ddp_tensor_redistribute(world, &in, DDP_PARTIAL, DDP_REPLICATE, &out));
    ddp_mesh_destroy(mesh);

    /* in place on one rank only, for a move that cannot be in place */
    a.axis_count = b.axis_count = 1, a.axes[0] = b.axes[0] = world, a.placement[0] = DDP_SHARD(0);
    in.shape[0] = 1;
    out.data = rank == 1 ? values : other;
    TRY(says(world, ddp_tensor_redistribute_mesh(&in, &a, &b, &out, NULL), DDP_ERR_INVALID,
             "in and out overlap"));
    return ddp_barrier(world);
}

/* Each allocation of a call fails in its turn, on every rank or on some; memory allocated before is freed.
   Over a mesh that includes tensors between steps. */
static ddp_result without_memory(ddp_group *world) {
    static const char *const names[] = {"dp", "tp"};
    int w = ddp_world_size(world), rank = ddp_rank(world);
    ranks_data data = {DDP_F32, 3, 0};
    int64_t shape[2] = {3 * w - 1, 3 * w - 1}; /* uneven */
    held in, want;
    ddp_tensor out;
    place room;
    ddp_mesh_desc desc = DDP_ZERO;
    ddp_mesh *mesh;
    ddp_tensor_layout a = DDP_ZERO, b;
    if (w == 1 || mode == RANKS_MPI) return DDP_OK; /* it allocates, too */
    hold(&in, &data, 2, shape, DDP_SHARD(0), rank, w);
    wanted(&want, &data, 2, shape, DDP_SHARD(0), DDP_SHARD(1), rank, w);
    desc.ndim = 2, desc.shape[0] = w % 2 ? w : w / 2, desc.names[0] = names[0], desc.names[1] = names[1];
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &desc));
    a.ndim = a.axis_count = 2, a.shape[0] = a.shape[1] = shape[0];
    for (int i = 0; i < 2; i++) a.axes[i] = ddp_mesh_group(mesh, names[i]);
    b = a;
    for (int axes = 0; axes < 2; axes++) {
        size_t live = live_bytes;
        ddp_result result = DDP_ERR_NO_MEMORY;
        int granted = 0, failed = 1; /* ranks */
        if (axes) {                  /* the parts of row shards become those of columns */
            ddp_tensor_box box;
            for (int i = 0; i < 2; i++) a.placement[i] = DDP_SHARD(0), b.placement[i] = DDP_SHARD(1);
            RANKS_OK(world, ddp_tensor_layout_box(&a, &box));
            in.tensor.shape[0] = box.shape[0];
            RANKS_OK(world, ddp_tensor_layout_box(&b, &box));
            want.tensor.shape[1] = box.shape[1];
        }
        out = want.tensor;
        out.data = room;
        for (; granted < 30 && failed; granted++) {
            grants = granted;
            result = axes ? ddp_tensor_redistribute_mesh(&in.tensor, &a, &b, &out, NULL)
                          : ddp_tensor_redistribute(world, &in.tensor, DDP_SHARD(0), DDP_SHARD(1), &out);
            grants = -1;
            RANKS_CHECK(world,
                        result == DDP_OK
                            || (result == DDP_ERR_NO_MEMORY
                                && strstr(ddp_last_error(), "bytes could not be allocated")),
                        "%s: %s", ddp_result_name(result), ddp_last_error());
            failed = result != DDP_OK;
            RANKS_OK(world, ddp_all_reduce(world, &failed, &failed, 1, DDP_I32, DDP_OP_SUM, NULL));
            RANKS_CHECK(world, axes || failed == 0 || failed == w, "%d of %d ranks have failed", failed, w);
            RANKS_CHECK(world, live_bytes == live, "%zu bytes leaked", live_bytes - live);
        }
        RANKS_CHECK(world, result == DDP_OK && granted > (axes && w > 3 ? 3 : 2), "%s with %d allocations",
                    ddp_result_name(result), granted - 1);
    }
    ddp_mesh_destroy(mesh);
    return DDP_OK;
}

//== in a checkpoint ==========================================================================================

/* Each rank's part of a tensor, described by its layout, goes into one checkpoint. Every rank by itself reads
   the full tensor back. */
static ddp_result checkpoint(ddp_group *world) {
    enum { ROWS = 12, COLUMNS = 22 };
    int w = ddp_world_size(world), rank = ddp_rank(world);
    char dir[64];
    ddp_group *alone;
    ddp_tensor_layout layout = DDP_ZERO;
    ddp_tensor_box box;
    ddp_tensor whole = DDP_ZERO, part = DDP_ZERO;
    ranks_data data = {DDP_F32, 5, 0};
    float values[ROWS * COLUMNS];
    int pid = (int)getpid();
    RANKS_OK(world, ddp_broadcast(world, &pid, 1, DDP_I32, 0, NULL));
    snprintf(dir, sizeof dir, "/tmp/ddp_test_tensor_%d_%d", pid, w);
    RANKS_OK(world, ddp_group_split(world, rank, 0, &alone));
    ranks_fill(values, &data, 0, 0, ROWS * COLUMNS);
    layout.ndim = 2, layout.shape[0] = ROWS, layout.shape[1] = COLUMNS;
    layout.axis_count = 1, layout.axes[0] = world, layout.placement[0] = DDP_SHARD(1);
    whole.data = values, whole.dtype = DDP_F32, whole.ndim = 2, whole.shape[0] = ROWS,
    whole.shape[1] = COLUMNS;
    RANKS_OK(world, ddp_tensor_layout_box(&layout, &box));
    RANKS_OK(world, ddp_tensor_shard(world, &whole, DDP_SHARD(1), &part));
    for (int reads = 0; reads < 2; reads++) {
        ddp_fsdp_param param = DDP_ZERO;
        ddp_fsdp_unit_desc unit = DDP_ZERO;
        ddp_fsdp_desc desc = DDP_ZERO;
        ddp_fsdp *fsdp;
        float zeros[ROWS * COLUMNS] = {0};
        param.param.name = "cut.weight";
        param.param.value = reads ? whole : part;
        if (reads)
            param.param.value.data = zeros;
        else {
            memcpy(param.global_shape, box.global_shape, sizeof param.global_shape);
            memcpy(param.global_offset, box.offset, sizeof param.global_offset);
        }
        unit.name = "unit", unit.params = &param, unit.param_count = 1;
        desc.units = &unit, desc.unit_count = 1;
        desc.checkpoint_group = reads ? NULL : world;
        RANKS_OK(world, ddp_fsdp_create(&fsdp, alone, &desc));
        if (reads) {
            RANKS_OK(world, ddp_fsdp_load(fsdp, dir));
            RANKS_OK(world, ddp_fsdp_unshard(fsdp, 0));
            RANKS_CHECK(world, memcmp(param.param.value.data, values, sizeof values) == 0,
                        "read back: other values");
        } else
            RANKS_OK(world, ddp_fsdp_save(fsdp, dir));
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(world, ddp_barrier(world));
    }
    ddp_tensor_free(world, &part);
    ddp_group_destroy(alone);
    if (rank == 0) {
        char command[100];
        snprintf(command, sizeof command, "rm -r %s", dir);
        RANKS_CHECK(world, system(command) == 0, "%s", command);
    }
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    (void)user;
    RANKS_RUN(world, all_pairs(world));
    RANKS_RUN(world, formulas(world));
    RANKS_RUN(world, meshes(world));
    RANKS_RUN(world, routes(world));
    RANKS_RUN(world, sentences(world));
    RANKS_RUN(world, one_is_wrong(world));
    RANKS_RUN(world, without_memory(world));
    RANKS_RUN(world, checkpoint(world));
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 3, 4, 6, 8, 0};
    ranks_memory.alloc_fn = counted_alloc;
    ranks_memory.free_fn = counted_free;
    return ranks_each(argc, argv, defaults, 100, &mode, rank_main) != 0;
}

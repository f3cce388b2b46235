/*  test_tp_linear.c - the context, linear layers, the MLP's pair and normal values over W ranks against plain
    loops in double on one rank: forward and backward, sharded and full rows, uneven features, fused heads,
    chunks (the same bits), finite differences, traffic, errors, no allocation, a rank that fails or dies
    half-way through. */
#undef DDP_TENSOR_IMPLEMENTATION_INCLUDED /* it looks inside */
#define DDP_TENSOR_IMPLEMENTATION
#include "ddp_tensor.h"
#include "../support/ranks.h"

enum {
    M = 24 /* 1, 2, 3, 4 and 8 ranks cut the rows evenly */,
    CHUNKS = 2 /* contexts: of 1 chunk and of 3 */,
    TAKEN_MAX = 512
};

typedef struct place { /* where a test runs */
    ddp_group *group;
    ddp_tp *tp[CHUNKS];
    ddp_dtype dtype;
    int rank, ranks, sequence_parallel, accumulate;
    double near; /* of the greatest value */
} place;

//== memory and numbers =====================================================================

static __thread void *taken[TAKEN_MAX];
static __thread int taken_count;

/* Zeroed, until drop. */
static void *take(int64_t elements) {
    void *memory = calloc((size_t)elements + 1, 8);
    if (!memory || taken_count == TAKEN_MAX) {
        fprintf(stderr, "no memory for the test\n");
        exit(2);
    }
    return taken[taken_count++] = memory;
}

static void drop(void) {
    while (taken_count) free(taken[--taken_count]);
}

#define TRY(call)                          \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)

/* A full matrix in double, the same on every rank. */
typedef struct matrix {
    int64_t rows, columns;
    double *v;
} matrix;

static matrix zeros(int64_t rows, int64_t columns) {
    matrix m;
    m.rows = rows;
    m.columns = columns;
    m.v = (double *)take(rows * columns);
    return m;
}

/* Numbers between -scale and scale that f32 holds. */
static matrix numbers(uint64_t seed, int64_t rows, int64_t columns, double scale) {
    matrix m = zeros(rows, columns);
    for (int64_t i = 0; i < rows * columns; i++)
        m.v[i] = (double)(float)(scale * (double)(int64_t)ranks_mix(seed * 1000003 + (uint64_t)i)
                                 / 9223372036854775808.0);
    return m;
}

/* a b, a' b or a b'. */
static matrix product(matrix a, int trans_a, matrix b, int trans_b) {
    int64_t n = trans_b ? b.rows : b.columns, depth = trans_a ? a.rows : a.columns;
    matrix c = zeros(trans_a ? a.columns : a.rows, n);
    for (int64_t i = 0; i < c.rows; i++)
        for (int64_t j = 0; j < n; j++)
            for (int64_t k = 0; k < depth; k++)
                c.v[i * n + j] += (trans_a ? a.v[k * a.columns + i] : a.v[i * a.columns + k])
                                  * (trans_b ? b.v[j * b.columns + k] : b.v[k * b.columns + j]);
    return c;
}

static void add_row(matrix to, matrix bias) {
    for (int64_t i = 0; i < to.rows * to.columns; i++) to.v[i] += bias.v[i % to.columns];
}

static matrix sum_of_rows(matrix from) {
    matrix sum = zeros(1, from.columns);
    for (int64_t i = 0; i < from.rows * from.columns; i++) sum.v[i % from.columns] += from.v[i];
    return sum;
}

//== a rank's part of a full matrix ===========================================================

/* Rows and columns by their numbers in the full matrix. */
typedef struct piece {
    int64_t rows, columns, *row, *column;
} piece;

static void range(int64_t **list, int64_t *count, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; i++) (*list)[(*count)++] = first + i;
}

static piece no_piece(matrix of) {
    piece p;
    p.rows = p.columns = 0;
    p.row = (int64_t *)take(of.rows);
    p.column = (int64_t *)take(of.columns);
    return p;
}

static piece all_of(matrix of) {
    piece p = no_piece(of);
    range(&p.row, &p.rows, 0, of.rows);
    range(&p.column, &p.columns, 0, of.columns);
    return p;
}

/* This rank's rows of an activation, if rows are sharded. */
static piece own_rows(const place *at, matrix of) {
    int64_t count = at->sequence_parallel ? of.rows / at->ranks : of.rows;
    piece p = no_piece(of);
    range(&p.row, &p.rows, at->sequence_parallel ? at->rank * count : 0, count);
    range(&p.column, &p.columns, 0, of.columns);
    return p;
}

static void put(const place *at, void *memory, int64_t i, double value) {
    if (at->dtype == DDP_F32)
        ((float *)memory)[i] = (float)value;
    else
        ((double *)memory)[i] = value;
}

static double get(const place *at, const void *memory, int64_t i) {
    return at->dtype == DDP_F32 ? (double)((const float *)memory)[i] : ((const double *)memory)[i];
}

static void *cut(const place *at, matrix of, piece p) {
    void *memory = take(p.rows * p.columns);
    for (int64_t i = 0; i < p.rows * p.columns; i++)
        put(at, memory, i, of.v[p.row[i / p.columns] * of.columns + p.column[i % p.columns]]);
    return memory;
}

/* have is p of want, plus the earlier contents (of gradients that accumulate). */
static ddp_result compare(const place *at, const char *layer, const char *what, const void *have, matrix want,
                          piece p, double before) {
    double most = 1e-30;
    for (int64_t i = 0; i < want.rows * want.columns; i++)
        most = fabs(want.v[i]) > most ? fabs(want.v[i]) : most;
    for (int64_t i = 0; i < p.rows * p.columns; i++) {
        double value = get(at, have, i),
               wanted = want.v[p.row[i / p.columns] * want.columns + p.column[i % p.columns]] + before;
        RANKS_CHECK(at->group, fabs(value - wanted) <= at->near * (most + before),
                    "%s: %s %s sp=%d: (%lld, %lld) is %.17g, not %.17g", layer, what,
                    ddp_dtype_name(at->dtype), at->sequence_parallel, (long long)p.row[i / p.columns],
                    (long long)p.column[i % p.columns], value, wanted);
    }
    return DDP_OK;
}

//== slopes ================================================================================

/* A parameter or input, this rank's part of it, and its gradient from backward. */
typedef struct variable {
    const char *name;
    void *memory;
    const void *grad;
    matrix whole;
    piece p;
} variable;
typedef ddp_result (*objective)(void *it, double *value);

static int64_t find(const variable *v, int64_t row, int64_t column) {
    for (int64_t i = 0; i < v->p.rows * v->p.columns; i++)
        if (v->p.row[i / v->p.columns] == row && v->p.column[i % v->p.columns] == column) return i;
    return -1;
}

/* Changes an element of the full tensor on every rank that has it, and compares the derivative of the
   objective with the gradient. f64. */
static ddp_result slopes(const place *at, const char *layer, objective value, void *it, const variable *v,
                         int count) {
    const double step = 1e-5;
    for (int i = 0; i < 4 * count; i++) {
        const variable *of = &v[i / 4];
        uint64_t pick = ranks_mix((uint64_t)i + 99);
        int64_t row = (int64_t)(pick % (uint64_t)of->whole.rows),
                column = (int64_t)((pick >> 32) % (uint64_t)of->whole.columns), place = find(of, row, column);
        double *x = place < 0 ? NULL : (double *)of->memory + place, from = x ? *x : 0, up, down, slope;
        if (x) *x = from + step;
        TRY(value(it, &up));
        if (x) *x = from - step;
        TRY(value(it, &down));
        if (x) *x = from;
        slope = (up - down) / (2 * step);
        RANKS_CHECK(at->group,
                    !x || fabs(slope - ((const double *)of->grad)[place]) < 1e-6 * (1 + fabs(slope)),
                    "%s sp=%d: the slope along %s (%lld, %lld) is %.12g, backward gives %.12g", layer,
                    at->sequence_parallel, of->name, (long long)row, (long long)column, slope,
                    x ? ((const double *)of->grad)[place] : 0);
    }
    return DDP_OK;
}

//== linear ================================================================================

typedef struct linear_run {
    const place *at;
    ddp_tp_linear *layer;
    void *weight, *bias, *x, *y, *dy;
    int64_t y_count;
    int y_is_shared; /* every rank has the full y */
} linear_run;

static ddp_result linear_value(void *user, double *value) {
    linear_run *r = (linear_run *)user;
    *value = 0;
    RANKS_OK(r->at->group, ddp_tp_linear_forward(r->layer, r->weight, r->bias, r->x, M, r->y));
    for (int64_t i = 0; i < r->y_count; i++) *value += get(r->at, r->y, i) * get(r->at, r->dy, i);
    if (!r->y_is_shared)
        RANKS_OK(r->at->group, ddp_all_reduce(r->at->group, value, value, 1, DDP_F64, DDP_OP_SUM, NULL));
    return DDP_OK;
}

/* This rank's rows and columns of the weight, by its boxes, which must agree with those of the bias. */
static ddp_result weight_piece(const place *at, ddp_tp_linear *layer, matrix weight, int no_bias, piece *p,
                               piece *bias) {
    int row_split = ddp_tp_linear_in_features(layer) != weight.columns;
    ddp_tensor_box box, b;
    *p = no_piece(weight);
    *bias = no_piece(zeros(1, weight.rows));
    bias->row[bias->rows++] = 0;
    for (int part = 0; ddp_tp_linear_weight_box(layer, part, &box) == DDP_OK; part++) {
        RANKS_CHECK(at->group,
                    box.ndim == 2 && box.global_shape[0] == weight.rows
                        && box.global_shape[1] == weight.columns,
                    "part %d", part);
        range(&p->row, &p->rows, box.offset[0], box.shape[0]);
        if (part == 0) range(&p->column, &p->columns, box.offset[1], box.shape[1]);
        if (no_bias) continue;
        RANKS_OK(at->group, ddp_tp_linear_bias_box(layer, part, &b));
        RANKS_CHECK(at->group, b.ndim == 1 && b.global_shape[0] == weight.rows, "part %d", part);
        RANKS_CHECK(at->group, b.offset[0] == box.offset[0] && b.shape[0] == box.shape[0], "part %d", part);
        range(&bias->column, &bias->columns, b.offset[0], b.shape[0]);
    }
    RANKS_CHECK(at->group,
                p->rows == ddp_tp_linear_out_features(layer)
                    && p->columns == ddp_tp_linear_in_features(layer),
                "split %d", row_split);
    if (no_bias)
        RANKS_CHECK(at->group, ddp_tp_linear_bias_box(layer, 0, &b) == DDP_ERR_INVALID, "a missing bias");
    return DDP_OK;
}

static void *filled(const place *at, int64_t count, double value) {
    void *memory = take(count);
    for (int64_t i = 0; i < count; i++) put(at, memory, i, value);
    return memory;
}

static void *copy_of(const void *memory, size_t bytes) {
    return memory ? memcpy(take((int64_t)bytes / 4), memory, bytes) : NULL;
}

/* Compares the results of one chunk and of three, bit by bit. */
static ddp_result same_bits(const place *at, const char *layer, int chunks, void **first, const void *have,
                            int64_t count) {
    size_t bytes = (size_t)count * ddp_dtype_size(at->dtype);
    if (!chunks) *first = copy_of(have, bytes);
    RANKS_CHECK(at->group, !have || !memcmp(*first, have, bytes), "%s sp=%d: chunks change the bits", layer,
                at->sequence_parallel);
    return DDP_OK;
}

static ddp_result linear(const place *at, const char *name, ddp_tp_linear_desc desc) {
    int column = desc.split == DDP_TP_COLUMN;
    int64_t kv = desc.kv_heads ? desc.kv_heads : desc.heads, head = desc.head_size ? desc.head_size
                                                                    : desc.heads
                                                                        ? desc.in_features / desc.heads
                                                                        : 0;
    int64_t N = desc.out_features ? desc.out_features : (desc.heads + 2 * kv) * head, K = desc.in_features;
    matrix x = numbers(1, M, K, 1), w = numbers(2, N, K, 1), b = numbers(3, 1, N, 1),
           dy = numbers(4, M, N, 1), y = product(x, 0, w, 1);
    matrix dx = product(dy, 0, w, 0), dw = product(dy, 1, x, 0), db = sum_of_rows(dy);
    double before = at->accumulate ? 0.5 : 0;
    void *first[4];
    if (!desc.no_bias) add_row(y, b);
    for (int c = 0; c < CHUNKS; c++) {
        linear_run r;
        ddp_tp_linear *layer;
        piece wp, bp, xp, yp;
        void *my_dx, *my_dw, *my_db;
        memset(&r, 0, sizeof r);
        RANKS_OK(at->group, ddp_tp_linear_create(&layer, at->tp[c], &desc));
        TRY(weight_piece(at, layer, w, desc.no_bias, &wp, &bp));
        xp = column ? own_rows(at, x) : all_of(x);
        if (!column && !desc.scatter_input) xp.column = wp.column, xp.columns = wp.columns;
        yp = column ? all_of(y) : own_rows(at, y);
        if (column && !desc.gather_output) yp.column = wp.row, yp.columns = wp.rows;
        r.at = at, r.layer = layer;
        r.weight = cut(at, w, wp), r.x = cut(at, x, xp), r.dy = cut(at, dy, yp),
        r.bias = desc.no_bias ? NULL : cut(at, b, bp);
        r.y_count = yp.rows * yp.columns, r.y = filled(at, r.y_count, 77);
        r.y_is_shared = column ? desc.gather_output : !at->sequence_parallel;
        my_dx = filled(at, xp.rows * xp.columns, 77);
        my_dw = filled(at, wp.rows * wp.columns, at->accumulate ? before : 77);
        my_db = desc.no_bias ? NULL : filled(at, bp.columns, at->accumulate ? before : 77);
        RANKS_OK(at->group, ddp_tp_linear_forward(layer, r.weight, r.bias, r.x, M, r.y));
        RANKS_OK(at->group, ddp_tp_linear_backward(layer, r.weight, r.x, r.dy, M, my_dx, my_dw, my_db));
        TRY(compare(at, name, "y", r.y, y, yp, 0));
        TRY(compare(at, name, "dx", my_dx, dx, xp, 0));
        TRY(compare(at, name, "weight_grad", my_dw, dw, wp, before));
        if (!desc.no_bias) TRY(compare(at, name, "bias_grad", my_db, db, bp, before));
        TRY(same_bits(at, name, c, &first[0], r.y, r.y_count));
        TRY(same_bits(at, name, c, &first[1], my_dx, xp.rows * xp.columns));
        TRY(same_bits(at, name, c, &first[2], my_dw, wp.rows * wp.columns));
        TRY(same_bits(at, name, c, &first[3], my_db, bp.columns));
        if (at->dtype == DDP_F64 && !at->accumulate) {
            variable v[3] = {
                {"x", r.x, my_dx, x, xp}, {"weight", r.weight, my_dw, w, wp}, {"bias", r.bias, my_db, b, bp}};
            TRY(slopes(at, name, linear_value, &r, v, desc.no_bias ? 2 : 3));
        }
        /* Nothing is wanted. */
        RANKS_OK(at->group, ddp_tp_linear_backward(layer, r.weight, r.x, r.dy, M, NULL, NULL, NULL));
        memset(my_dx, 0, (size_t)(xp.rows * xp.columns) * ddp_dtype_size(at->dtype));
        RANKS_OK(at->group, ddp_tp_linear_backward(layer, r.weight, r.x, r.dy, M, my_dx, NULL, NULL));
        TRY(compare(at, name, "dx alone", my_dx, dx, xp, 0));
        if (!at->accumulate) memset(my_dw, 0, (size_t)(wp.rows * wp.columns) * ddp_dtype_size(at->dtype));
        int empty = wp.rows * wp.columns == 0; /* empty: NULL is a valid pointer */
        RANKS_OK(at->group, ddp_tp_linear_backward(layer, empty ? NULL : r.weight, r.x, r.dy, M, NULL,
                                                   empty ? NULL : my_dw, empty && column ? NULL : my_db));
        if (!at->accumulate) TRY(compare(at, name, "weight_grad alone", my_dw, dw, wp, 0));
        /* No rows. */
        RANKS_OK(at->group, ddp_tp_linear_backward(layer, r.weight, r.x, r.dy, 0, my_dx, my_dw, my_db));
        if (!at->accumulate)
            for (int64_t i = 0; i < wp.rows * wp.columns; i++)
                RANKS_CHECK(at->group, get(at, my_dw, i) == 0, "%s: no rows", name);
        ddp_tp_linear_destroy(layer);
    }
    drop();
    return DDP_OK;
}

static ddp_result linears(const place *at) {
    /* The last one leaves some of 8 ranks without a part. */
    static const int64_t sizes[][2] = {{24, 48}, {22, 29}, {9, 5}};
    for (int s = 0; s < 3; s++)
        for (int no_bias = 0; no_bias < 2; no_bias++)
            for (int split = 0; split < 2; split++)
                for (int whole = 0; whole <= !at->sequence_parallel; whole++) {
                    ddp_tp_linear_desc desc = DDP_ZERO;
                    char name[80];
                    desc.split = (ddp_tp_split)split;
                    desc.in_features = sizes[s][0];
                    desc.out_features = sizes[s][1];
                    desc.no_bias = no_bias;
                    desc.gather_output = split == DDP_TP_COLUMN && whole;
                    desc.scatter_input = split == DDP_TP_ROW && whole;
                    snprintf(name, sizeof name, "%s %dx%d no_bias=%d whole=%d", split ? "row" : "column",
                             (int)sizes[s][1], (int)sizes[s][0], no_bias, whole);
                    TRY(linear(at, name, desc));
                }
    return DDP_OK;
}

/* The workspace of a column layer that gathers its output has a slot per rank. The workspace of a gated pair
   has gates, ups and their product. */
static ddp_result workspaces_are_large_enough(ddp_group *group) {
    int64_t w = ddp_world_size(group), features = 1000 * w;
    size_t least;
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp_linear_desc linear_desc = DDP_ZERO;
    ddp_tp_stats stats;
    ddp_tp_mlp_desc mlp_desc = DDP_ZERO;
    ddp_tp_linear *layer;
    ddp_tp_mlp *pair;
    ddp_tp *tp;
    desc.max_rows = M;
    mlp_desc.channels = 3;
    mlp_desc.hidden = 2 * features;
    mlp_desc.activation = DDP_TP_SILU_GATED;
    linear_desc.in_features = 3;
    linear_desc.out_features = features;
    linear_desc.gather_output = 1;
    RANKS_OK(group, ddp_tp_create(&tp, group, &desc));
    RANKS_OK(group, ddp_tp_linear_create(&layer, tp, &linear_desc));
    RANKS_OK(group, ddp_tp_get_stats(tp, &stats));
    least = w == 1 ? 0 : (size_t)(M * features) * sizeof(float);
    RANKS_CHECK(group, stats.workspace_bytes >= least, "%zu bytes", stats.workspace_bytes);
    RANKS_OK(group, ddp_tp_mlp_create(&pair, tp, &mlp_desc));
    RANKS_OK(group, ddp_tp_get_stats(tp, &stats));
    least = 3 * M * 2000 * sizeof(float);
    RANKS_CHECK(group, stats.workspace_bytes >= least, "%zu bytes of a pair", stats.workspace_bytes);
    ddp_tp_mlp_destroy(pair);
    ddp_tp_linear_destroy(layer);
    ddp_tp_destroy(tp);
    return DDP_OK;
}

static ddp_result heads(const place *at) {
    for (int grouped = 0; grouped < 2; grouped++)
        for (int whole = 0; whole <= !at->sequence_parallel; whole++) {
            ddp_tp_linear_desc desc = DDP_ZERO;
            desc.heads = at->ranks * 2;
            desc.kv_heads = grouped ? at->ranks : 0;
            desc.head_size = grouped ? 3 : 0;
            desc.in_features = desc.heads * (grouped ? 1 : 2);
            desc.gather_output = whole;
            TRY(linear(at, grouped ? "grouped heads" : "heads", desc));
        }
    return DDP_OK;
}

//== the MLP's pair ========================================================================

typedef struct mlp_run {
    const place *at;
    ddp_tp_mlp *layer;
    void *weights[4], *x, *saved, *y, *dy;
    int64_t y_count;
} mlp_run;

static ddp_result mlp_value(void *user, double *value) {
    mlp_run *r = (mlp_run *)user;
    *value = 0;
    RANKS_OK(r->at->group,
             ddp_tp_mlp_forward(r->layer, (const void *const *)r->weights, r->x, M, r->saved, r->y));
    for (int64_t i = 0; i < r->y_count; i++) *value += get(r->at, r->y, i) * get(r->at, r->dy, i);
    if (r->at->sequence_parallel)
        RANKS_OK(r->at->group, ddp_all_reduce(r->at->group, value, value, 1, DDP_F64, DDP_OP_SUM, NULL));
    return DDP_OK;
}

static double gelu(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.141592653589793) * (x + 0.044715 * x * x * x)));
}
static double gelu_slope(double x) {
    double root = sqrt(2 / 3.141592653589793), t = tanh(root * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

/* act of (M, hidden), and from d of its shape the gradient of h. */
static void activate(ddp_tp_activation kind, matrix h, matrix act, const matrix *d, const matrix *d_in) {
    for (int64_t i = 0; i < act.rows; i++)
        for (int64_t j = 0; j < act.columns; j++) {
            int64_t at = i * act.columns + j, gate = i * h.columns + j, up = gate + act.columns;
            double x = h.v[gate], s = 1 / (1 + exp(-x)),
                   value = kind == DDP_TP_GELU   ? gelu(x)
                           : kind == DDP_TP_RELU ? (x > 0 ? x : 0)
                                                 : x * s * h.v[up];
            if (!d)
                act.v[at] = value;
            else if (kind == DDP_TP_GELU)
                d_in->v[gate] = d->v[at] * gelu_slope(x);
            else if (kind == DDP_TP_RELU)
                d_in->v[gate] = x > 0 ? d->v[at] : 0;
            else
                d_in->v[gate] = d->v[at] * h.v[up] * (s + x * s * (1 - s)), d_in->v[up] = d->v[at] * x * s;
        }
}

/* Elements that a pair sends forward and backward, as in a ring. Full rows: an all-reduce of M x C each.
   Sharded rows: an all-gather and a reduce-scatter each, and in backward one more all-gather, of x. */
static ddp_result pair_sent(const place *at, ddp_tp *tp, int64_t channels, int backward, int chunks) {
    double one = (double)(at->ranks - 1) / at->ranks * M * (double)channels,
           want = (backward && at->sequence_parallel ? 3 : 2) * one;
    ddp_tp_stats stats = DDP_ZERO;
    RANKS_OK(at->group, ddp_tp_get_stats(tp, &stats));
    RANKS_CHECK(at->group,
                fabs((double)stats.elements_sent - want) < 1e-9 + (at->sequence_parallel ? 0 : chunks - 1),
                "backward=%d sp=%d: %llu elements, not %g", backward, at->sequence_parallel,
                (unsigned long long)stats.elements_sent, want);
    RANKS_CHECK(at->group,
                at->ranks > 1 ? stats.collectives > 0 && stats.comm_seconds > 0 : !stats.collectives,
                "%llu collectives in %g s", (unsigned long long)stats.collectives, stats.comm_seconds);
    if (chunks == 1 && at->ranks > 1)
        RANKS_CHECK(at->group, stats.collectives == (uint64_t)(at->sequence_parallel ? 2 + backward : 1),
                    "%llu collectives", (unsigned long long)stats.collectives);
    ddp_tp_reset_stats(tp);
    return DDP_OK;
}

static ddp_result mlp(const place *at, ddp_tp_activation kind, int64_t channels, int64_t hidden,
                      int no_bias) {
    static const char *const names[] = {"gelu", "relu", "silu"};
    int64_t first = kind == DDP_TP_SILU_GATED ? 2 * hidden : hidden;
    matrix x = numbers(1, M, channels, 1), w1 = numbers(2, first, channels, 1), b1 = numbers(3, 1, first, 1),
           w2 = numbers(4, channels, hidden, 1);
    matrix b2 = numbers(5, 1, channels, 1), dy = numbers(6, M, channels, 1), h = product(x, 0, w1, 1),
           act = zeros(M, hidden), dh = zeros(M, first), y, d_act;
    matrix grad[4];
    double before = at->accumulate ? 0.5 : 0;
    ddp_tp_mlp_desc desc = DDP_ZERO;
    void *first_of[6];
    desc.channels = channels, desc.hidden = hidden, desc.activation = kind, desc.no_bias = no_bias;
    if (!no_bias) add_row(h, b1);
    activate(kind, h, act, NULL, NULL);
    y = product(act, 0, w2, 1);
    if (!no_bias) add_row(y, b2);
    d_act = product(dy, 0, w2, 0);
    activate(kind, h, act, &d_act, &dh);
    grad[0] = product(dh, 1, x, 0), grad[1] = sum_of_rows(dh), grad[2] = product(dy, 1, act, 0),
    grad[3] = sum_of_rows(dy);
    for (int c = 0; c < CHUNKS; c++) {
        mlp_run r;
        piece p[4], xp = own_rows(at, x), yp = own_rows(at, y);
        matrix whole[4] = {w1, b1, w2, b2};
        void *grads[4], *dx = filled(at, xp.rows * xp.columns, 77);
        memset(&r, 0, sizeof r);
        RANKS_OK(at->group, ddp_tp_mlp_create(&r.layer, at->tp[c], &desc));
        TRY(weight_piece(at, ddp_tp_mlp_linear(r.layer, 0), w1, no_bias, &p[0], &p[1]));
        TRY(weight_piece(at, ddp_tp_mlp_linear(r.layer, 1), w2, no_bias, &p[2], &p[3]));
        for (int i = 0; i < 4; i++) {
            r.weights[i] = i % 2 && no_bias ? NULL : cut(at, whole[i], p[i]);
            grads[i] = i % 2 && no_bias ? NULL
                                        : filled(at, p[i].rows * p[i].columns, at->accumulate ? before : 77);
        }
        r.at = at, r.x = cut(at, x, xp), r.dy = cut(at, dy, yp), r.y_count = yp.rows * yp.columns,
        r.y = filled(at, r.y_count, 77);
        r.saved = take((int64_t)ddp_tp_mlp_saved_count(r.layer, M));
        ddp_tp_reset_stats(at->tp[c]);
        RANKS_OK(at->group,
                 ddp_tp_mlp_forward(r.layer, (const void *const *)r.weights, r.x, M, r.saved, r.y));
        TRY(pair_sent(at, at->tp[c], channels, 0, c ? 3 : 1));
        RANKS_OK(at->group, ddp_tp_mlp_backward(r.layer, (const void *const *)r.weights, r.x, r.saved, r.dy,
                                                M, dx, grads));
        TRY(pair_sent(at, at->tp[c], channels, 1, c ? 3 : 1));
        TRY(compare(at, names[kind], "y", r.y, y, yp, 0));
        TRY(compare(at, names[kind], "dx", dx, product(dh, 0, w1, 0), xp, 0));
        for (int i = 0; i < 4; i++)
            if (grads[i]) TRY(compare(at, names[kind], "a gradient", grads[i], grad[i], p[i], before));
        TRY(same_bits(at, names[kind], c, &first_of[4], r.y, r.y_count));
        TRY(same_bits(at, names[kind], c, &first_of[5], dx, xp.rows * xp.columns));
        for (int i = 0; i < 4; i++)
            TRY(same_bits(at, names[kind], c, &first_of[i], grads[i], p[i].rows * p[i].columns));
        /* RELU has no derivative at 0. */
        if (at->dtype == DDP_F64 && !at->accumulate && kind != DDP_TP_RELU) {
            variable v[5] = {
                {"x", r.x, dx, x, xp},
                {"w1", r.weights[0], grads[0], w1, p[0]},
                {"w2", r.weights[2], grads[2], w2, p[2]},
                {"b1", r.weights[1], grads[1], b1, p[1]},
                {"b2", r.weights[3], grads[3], b2, p[3]},
            };
            TRY(slopes(at, names[kind], mlp_value, &r, v, no_bias ? 3 : 5));
        }
        RANKS_OK(at->group, ddp_tp_mlp_backward(r.layer, (const void *const *)r.weights, r.x, r.saved, r.dy,
                                                M, dx, NULL));
        ddp_tp_mlp_destroy(r.layer);
    }
    drop();
    return DDP_OK;
}

static ddp_result mlps(const place *at) {
    for (int kind = 0; kind < 3; kind++) {
        TRY(mlp(at, (ddp_tp_activation)kind, 16, 48, 0));
        TRY(mlp(at, (ddp_tp_activation)kind, 7, 13, 0));
        TRY(mlp(at, (ddp_tp_activation)kind, 9, 5, 1));
    }
    return DDP_OK;
}

/* Far from 0 activations neither overflow nor lose a NaN. */
static ddp_result far_activations(const place *at) {
    static const double in[] = {-1e30, -200, -90, -87.5, -10, 0, 10, 87.5, 90, 200, 1e30, NAN};
    enum { COUNT = sizeof in / sizeof *in };
    float x[COUNT], y[COUNT], d[COUNT], ones[COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = (float)in[i], ones[i] = 1;
    for (int kind = 0; kind < 2; kind++) {
        ddp__tp_activate_f32((ddp_tp_activation)kind, 1, COUNT, x, y);
        ddp__tp_activate_backward_f32((ddp_tp_activation)kind, 1, COUNT, x, ones, d);
        for (int i = 0; i < COUNT - 1; i++) {
            double want = in[i] > 9 ? in[i] : 0;
            RANKS_CHECK(at->group, fabs(y[i] - want) <= 1e-6 * fabs(want) + 1e-7, "activation %d of %g is %g",
                        kind, in[i], (double)y[i]);
            RANKS_CHECK(at->group, in[i] == 0 || !(fabs(in[i]) < 1e9) || fabs(d[i] - (in[i] > 9)) <= 1e-6,
                        "slope %d of %g is %g", kind, in[i], (double)d[i]);
        }
        RANKS_CHECK(at->group, isnan(y[COUNT - 1]) && isnan(d[COUNT - 1]), "activation %d loses a NaN", kind);
    }
    return DDP_OK;
}

//== normal values =========================================================================

/* Any shard of a global tensor has the bits of the full one; mean and deviation are close to the requested
   ones. */
static ddp_result normal_values(ddp_group *group) {
    enum { A = 7, B = 40, C = 31 };
    static const int64_t shape[3] = {A, B, C};
    double sum = 0, squares = 0, *whole = (double *)take(A * B * C), *part = (double *)take(A * B * C);
    float *whole32 = (float *)take(A * B * C), *part32 = (float *)take(A * B * C);
    ddp_tensor_box box = DDP_ZERO;
    box.ndim = 3;
    memcpy(box.global_shape, shape, sizeof shape);
    memcpy(box.shape, shape, sizeof shape);
    RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F64, 5, 2, 0.25, whole));
    RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F32, 5, 2, 0.25, whole32));
    for (int64_t i = 0; i < A * B * C; i++) sum += whole[i], squares += (whole[i] - 2) * (whole[i] - 2);
    RANKS_CHECK(group, fabs(sum / (A * B * C) - 2) < 0.01 && fabs(squares / (A * B * C) - 0.0625) < 0.003,
                "mean %g, variance %g", sum / (A * B * C), squares / (A * B * C));
    for (int d = 0; d < 3; d++)
        for (int r = 0; r < 4; r++) {
            int64_t i = 0;
            RANKS_OK(group, ddp_placement_shard_box(DDP_SHARD(d), 3, shape, r, 4, &box));
            RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F64, 5, 2, 0.25, part));
            RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F32, 5, 2, 0.25, part32));
            for (int64_t a = 0; a < box.shape[0]; a++)
                for (int64_t b = 0; b < box.shape[1]; b++)
                    for (int64_t c = 0; c < box.shape[2]; c++, i++) {
                        int64_t at = ((a + box.offset[0]) * B + b + box.offset[1]) * C + c + box.offset[2];
                        RANKS_CHECK(group,
                                    part[i] == whole[at] && part32[i] == whole32[at]
                                        && whole32[at] == (float)whole[at],
                                    "dimension %d, part %d", d, r);
                    }
        }
    RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F64, 6, 2, 0.25, part));
    RANKS_CHECK(group, memcmp(part, whole, sizeof *part) != 0, "keys make no difference");
    drop();
    return DDP_OK;
}

/* The random stream is fixed: every later version initialises a model with a given key the same way. The
   numbers come from a Python program with Philox 4x32-10 (Salmon et al. 2011; it gives the published
   vectors). The counter is {index, index >> 32, 1, 0}. */
static ddp_result normal_known_answers(ddp_group *group) {
    static const struct {
        uint64_t key;
        double first[4], far_away;
    } table[] = {
        {0,
         {1.071173269799861, -0.6843032830356064, 0.183440826885244, -0.8094038377646908},
         -0.4984185758172026},
        {5,
         {-1.3763539768601099, -0.24634243104525688, -0.2647214007548103, -0.2217184738630448},
         -0.5201779593840008},
        {UINT64_C(0x123456789abcdef0),
         {-1.66644111567869, -0.35063627425631505, 1.1430090986442714, -1.96935589302499},
         -0.7797708697979044},
    };
    for (size_t t = 0; t < sizeof table / sizeof *table; t++) {
        ddp_tensor_box box = DDP_ZERO;
        double have[4], one;
        float have32[4];
        box.ndim = 1;
        box.global_shape[0] = INT64_C(1) << 34;
        box.shape[0] = 4;
        RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F64, table[t].key, 0, 1, have));
        RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F32, table[t].key, 0, 1, have32));
        for (int i = 0; i < 4; i++)
            RANKS_CHECK(group, fabs(have[i] - table[t].first[i]) < 1e-13 && have32[i] == (float)have[i],
                        "row %d: value %d is %.17g", (int)t, i, have[i]);
        RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F64, table[t].key, 3, 0, have));
        RANKS_CHECK(group, have[0] == 3 && have[3] == 3, "deviation 0: %g", have[0]);
        box.offset[0] = (INT64_C(1) << 33) + 12345; /* both words of the counter */
        box.shape[0] = 1;
        RANKS_OK(group, ddp_tensor_init_normal(&box, DDP_F64, table[t].key, 0, 1, &one));
        RANKS_CHECK(group, fabs(one - table[t].far_away) < 1e-13, "row %d: at a large offset it is %.17g",
                    (int)t, one);
    }
    return DDP_OK;
}

//== bad input =============================================================================

#define FAILS(group, result, call, ...)                                                               \
    do {                                                                                              \
        const char *fails_texts[] = {__VA_ARGS__};                                                    \
        ddp_result fails_result = (call);                                                             \
        RANKS_CHECK(group, fails_result == (result), "%s: %s", ddp_result_name(fails_result),         \
                    ddp_last_error());                                                                \
        for (size_t fails_i = 0; fails_i < sizeof fails_texts / sizeof *fails_texts; fails_i++)       \
            RANKS_CHECK(group, strstr(ddp_last_error(), fails_texts[fails_i]), "'%s' is not in '%s'", \
                        fails_texts[fails_i], ddp_last_error());                                      \
    } while (0)
#define BAD(group, call, ...) FAILS(group, DDP_ERR_INVALID, call, __VA_ARGS__)

static ddp_result bad_contexts(ddp_group *group) {
    ddp_tp_desc good = DDP_ZERO, d;
    ddp_tp_stats stats;
    ddp_tp *tp = (ddp_tp *)(void *)&stats; /* a failed create must clear it */
    good.max_rows = 4;
    BAD(group, ddp_tp_create(NULL, group, &good), "ddp_tp_create", "out is NULL");
    BAD(group, ddp_tp_create(&tp, NULL, &good), "group is NULL");
    RANKS_CHECK(group, !tp, "tp is left");
    BAD(group, ddp_tp_create(&tp, group, NULL), "desc is NULL");
    d = good, d.max_rows = 0;
    BAD(group, ddp_tp_create(&tp, group, &d), "max_rows=0");
    RANKS_CHECK(group, !tp, "tp is left");
    d = good, d.dtype = DDP_BF16;
    BAD(group, ddp_tp_create(&tp, group, &d), "dtype=bf16", "use f32 or f64");
    d = good, d.chunk_count = -1;
    BAD(group, ddp_tp_create(&tp, group, &d), "chunk_count=-1", "use 0 to 64");
    BAD(group, ddp_tp_get_stats(NULL, &stats), "tp is NULL");
    ddp_tp_destroy(NULL);
    ddp_tp_reset_stats(NULL);
    return DDP_OK;
}

static ddp_result bad_linears(const place *at) {
    ddp_group *group = at->group;
    ddp_tp *tp = at->tp[0];
    ddp_tp_linear_desc good = DDP_ZERO, d;
    ddp_tp_linear *l = (ddp_tp_linear *)(void *)&good;
    good.in_features = 12, good.out_features = 24;
    BAD(group, ddp_tp_linear_create(NULL, tp, &good), "out is NULL");
    BAD(group, ddp_tp_linear_create(&l, NULL, &good), "tp is NULL");
    RANKS_CHECK(group, !l, "l is left");
    BAD(group, ddp_tp_linear_create(&l, tp, NULL), "ddp_tp_linear_create", "desc is NULL");
    d = good, d.in_features = 0;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "in_features=0");
    d = good, d.out_features = -3;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "out_features=-3");
    d = good, d.out_features = INT64_C(1) << 40, d.in_features = INT64_C(1) << 40;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "does not fit in memory");
    d = good, memset(&d.split, 7, 1);
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "split=7");
    d = good, d.scatter_input = 1;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "scatter_input=1, but split is DDP_TP_COLUMN");
    d = good, d.split = DDP_TP_ROW, d.gather_output = 1;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "gather_output=1, but split is DDP_TP_ROW");
    d = good, d.gather_output = 1;
    if (at->sequence_parallel)
        BAD(group, ddp_tp_linear_create(&l, tp, &d),
            "gather_output=1 cannot be combined with sequence_parallel=1");
    d = good, d.kv_heads = 2;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "kv_heads=2", "set heads too");
    d = good, d.split = DDP_TP_ROW, d.heads = 12;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "heads=12, but split is DDP_TP_ROW");
    d = good, d.heads = -1;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "heads=-1", "use positive numbers");
    d = good, d.heads = at->ranks * 3, d.kv_heads = at->ranks * 2, d.head_size = 4;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "is not a multiple of kv_heads");
    d = good, d.in_features = 24 * at->ranks + 1, d.heads = 24 * at->ranks;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "is not a multiple of heads", "or use");
    d = good, d.in_features = 24, d.heads = 24, d.out_features = 5;
    BAD(group, ddp_tp_linear_create(&l, tp, &d),
        "out_features=5, but heads=24 and kv_heads=24 of head_size=1 need 72");
    d = good, d.heads = 24, d.head_size = -2;
    BAD(group, ddp_tp_linear_create(&l, tp, &d), "head_size=-2");
    if (at->ranks > 1) {
        char nearest[120];
        d = good, d.out_features = 0, d.heads = 5 * at->ranks + 1;
        snprintf(nearest, sizeof nearest,
                 "heads=%d is not a multiple of %d ranks; use %d, the nearest multiple", d.heads, at->ranks,
                 (at->ranks == 2 ? 6 : 5) * at->ranks);
        BAD(group, ddp_tp_linear_create(&l, tp, &d), nearest);
        d.heads = at->ranks, d.kv_heads = 1;
        snprintf(nearest, sizeof nearest,
                 "kv_heads=1 is not a multiple of %d ranks; use %d, the nearest multiple", at->ranks,
                 at->ranks);
        BAD(group, ddp_tp_linear_create(&l, tp, &d), nearest);
    }
    return DDP_OK;
}

static ddp_result bad_calls(const place *at) {
    ddp_group *group = at->group;
    double memory[M * 24];
    ddp_tp_linear_desc desc = DDP_ZERO;
    ddp_tp_mlp_desc pair = DDP_ZERO, d;
    ddp_tensor_box box;
    ddp_tp_linear *l;
    ddp_tp_mlp *m;
    void *w = memory;
    const void *weights[4] = {memory, memory, memory, memory};
    void *grads[4] = {memory, memory, memory, memory};
    memset(memory, 0, sizeof memory);
    desc.in_features = 12, desc.out_features = 24;
    RANKS_OK(group, ddp_tp_linear_create(&l, at->tp[0], &desc));
    BAD(group, ddp_tp_linear_forward(NULL, w, w, w, 0, w), "linear is NULL");
    BAD(group, ddp_tp_linear_forward(l, w, w, w, -1, w), "ddp_tp_linear_forward", "rows=-1");
    BAD(group, ddp_tp_linear_forward(l, w, w, w, M + 1, w), "rows=25", "max_rows=24");
    if (at->sequence_parallel && at->ranks > 1)
        BAD(group, ddp_tp_linear_forward(l, w, w, w, 1, w), "rows=1 is not a multiple of",
            "the next multiple");
    BAD(group, ddp_tp_linear_forward(l, NULL, w, w, M, w), "weight is NULL");
    BAD(group, ddp_tp_linear_forward(l, w, NULL, w, M, w), "bias is NULL, but no_bias=0");
    BAD(group, ddp_tp_linear_forward(l, w, w, NULL, M, w), "x is NULL");
    BAD(group, ddp_tp_linear_forward(l, w, w, w, M, NULL), "y is NULL");
    BAD(group, ddp_tp_linear_backward(NULL, w, w, w, M, w, w, w), "linear is NULL");
    BAD(group, ddp_tp_linear_backward(l, w, w, NULL, M, w, w, w), "ddp_tp_linear_backward", "dy is NULL");
    BAD(group, ddp_tp_linear_backward(l, w, w, w, M, w, w, NULL), "bias_grad is NULL");
    BAD(group, ddp_tp_linear_backward(l, w, w, w, M, w, NULL, w),
        "bias_grad is given, but weight_grad is NULL");
    BAD(group, ddp_tp_linear_weight_box(l, 1, &box), "part=1 of a linear with 1");
    BAD(group, ddp_tp_linear_weight_box(l, 0, NULL), "box is NULL");
    BAD(group, ddp_tp_linear_bias_box(NULL, 0, &box), "linear is NULL");
    RANKS_CHECK(group, ddp_tp_linear_in_features(NULL) == 0 && ddp_tp_linear_out_features(NULL) == 0,
                "NULL has features");
    ddp_tp_linear_destroy(l);
    ddp_tp_linear_destroy(NULL);
    pair.channels = 12, pair.hidden = 24;
    BAD(group, ddp_tp_mlp_create(NULL, at->tp[0], &pair), "out is NULL");
    BAD(group, ddp_tp_mlp_create(&m, at->tp[0], NULL), "desc is NULL");
    d = pair, d.hidden = 0;
    BAD(group, ddp_tp_mlp_create(&m, at->tp[0], &d), "channels=12 hidden=0");
    d = pair, memset(&d.activation, 9, 1);
    BAD(group, ddp_tp_mlp_create(&m, at->tp[0], &d), "activation=9");
    RANKS_OK(group, ddp_tp_mlp_create(&m, at->tp[0], &pair));
    RANKS_CHECK(group,
                !ddp_tp_mlp_linear(m, 2) && !ddp_tp_mlp_linear(NULL, 0) && !ddp_tp_mlp_saved_count(NULL, 3),
                "a third linear");
    BAD(group, ddp_tp_mlp_forward(NULL, weights, w, M, w, w), "mlp is NULL");
    BAD(group, ddp_tp_mlp_forward(m, NULL, w, M, w, w), "weights is NULL");
    BAD(group, ddp_tp_mlp_forward(m, weights, w, M, NULL, w), "saved is NULL");
    BAD(group, ddp_tp_mlp_forward(m, weights, NULL, M, w, w), "x is NULL");
    weights[3] = NULL;
    BAD(group, ddp_tp_mlp_forward(m, weights, w, M, w, w), "biases are given and NULL, but no_bias=0");
    weights[3] = memory, grads[2] = NULL;
    BAD(group, ddp_tp_mlp_backward(m, weights, w, w, w, M, w, grads),
        "grads[2] is NULL and grads[3] is given");
    BAD(group, ddp_tp_mlp_backward(m, weights, w, w, NULL, M, w, grads), "dy is NULL");
    ddp_tp_mlp_destroy(m);
    ddp_tp_mlp_destroy(NULL);
    return DDP_OK;
}

static ddp_result bad_normal(ddp_group *group) {
    ddp_tensor_box good = DDP_ZERO, box;
    float out[4];
    good.ndim = 1, good.global_shape[0] = 4, good.shape[0] = 4;
    RANKS_OK(group, ddp_tensor_init_normal(&good, DDP_F32, 1, 0, 1, out));
    BAD(group, ddp_tensor_init_normal(NULL, DDP_F32, 1, 0, 1, out), "box is NULL");
    box = good, box.ndim = 9;
    BAD(group, ddp_tensor_init_normal(&box, DDP_F32, 1, 0, 1, out), "ndim=9");
    box = good, box.offset[0] = 1;
    BAD(group, ddp_tensor_init_normal(&box, DDP_F32, 1, 0, 1, out),
        "entries [1, 1 + 4) are outside a size of 4");
    box = good, box.ndim = 2, box.global_shape[0] = box.global_shape[1] = INT64_C(1) << 40;
    BAD(group, ddp_tensor_init_normal(&box, DDP_F32, 1, 0, 1, out), "2^63");
    BAD(group, ddp_tensor_init_normal(&good, DDP_I32, 1, 0, 1, out), "dtype=i32");
    BAD(group, ddp_tensor_init_normal(&good, DDP_F32, 1, 0, -1, out), "deviation=-1");
    BAD(group, ddp_tensor_init_normal(&good, DDP_F32, 1, NAN, 1, out), "mean=nan");
    BAD(group, ddp_tensor_init_normal(&good, DDP_F32, 1, 0, 1, NULL), "out is NULL");
    return DDP_OK;
}

/* If ranks pass different arguments, all return an error, and the groups stay usable. */
static ddp_result mismatches(ddp_group *group) {
    int odd = ddp_rank(group) == 1;
    ddp_tp_desc desc = DDP_ZERO, other;
    ddp_tp_linear_desc l = DDP_ZERO;
    ddp_tp_mlp_desc pair = DDP_ZERO;
    ddp_tp *tp;
    ddp_tp_linear *linear_made;
    ddp_tp_mlp *mlp_made;
    if (ddp_world_size(group) == 1) return DDP_OK;
    desc.max_rows = 8;
    other = desc, other.chunk_count = odd ? 3 : 2;
    FAILS(group, DDP_ERR_MISMATCH, ddp_tp_create(&tp, group, &other),
          "rank 0 chunk_count=2, rank 1 chunk_count=3", "ddp_tp_create");
    other = desc, other.sequence_parallel = odd;
    FAILS(group, DDP_ERR_MISMATCH, ddp_tp_create(&tp, group, &other),
          "rank 0 sequence_parallel=0, rank 1 sequence_parallel=1");
    other = desc, other.max_rows = odd ? -2 : 8;
    BAD(group, ddp_tp_create(&tp, group, &other), "rank 1", "max_rows=-2");
    RANKS_OK(group, ddp_tp_create(&tp, group, &desc));
    l.in_features = 8, l.out_features = odd ? 16 : 8;
    FAILS(group, DDP_ERR_MISMATCH, ddp_tp_linear_create(&linear_made, tp, &l),
          "rank 0 out_features=8, rank 1 out_features=16; give every rank the same");
    l.out_features = 8, pair.channels = 8, pair.hidden = 8;
    FAILS(group, DDP_ERR_MISMATCH,
          odd ? ddp_tp_mlp_create(&mlp_made, tp, &pair) : ddp_tp_linear_create(&linear_made, tp, &l),
          "ranks differ: rank 0 ddp_tp_linear_create in_features=8 ", "rank 1 ddp_tp_mlp_create channels=8");
    RANKS_OK(group, ddp_tp_linear_create(&linear_made, tp, &l));
    ddp_tp_linear_destroy(linear_made);
    ddp_tp_destroy(tp);
    return DDP_OK;
}

//== memory =================================================================================

static int allocations; /* of this process */

static void *counting_alloc(size_t size_bytes, void *user) {
    (void)user;
    __atomic_fetch_add(&allocations, 1, __ATOMIC_SEQ_CST);
    return malloc(size_bytes);
}

static void counting_free(void *memory, void *user) { (void)user, free(memory); }

/* From the first call on. Two layers share the workspace of the larger. */
static ddp_result nothing_is_allocated(const place *at) {
    enum { CHANNELS = 16, HIDDEN = 64 };
    int64_t rows = M / (at->sequence_parallel ? at->ranks : 1);
    for (int c = 0; c < CHUNKS; c++) {
        ddp_tp_mlp_desc desc = DDP_ZERO;
        ddp_tp_linear_desc one = DDP_ZERO;
        ddp_tp_mlp *pair;
        ddp_tp_linear *head;
        void *w[4] = {take(CHANNELS * HIDDEN), take(HIDDEN), take(CHANNELS * HIDDEN), take(CHANNELS)},
             *grads[4], *x = take(rows * CHANNELS), *saved;
        void *y = take(rows * CHANNELS), *logits = take(M * HIDDEN);
        int before;
        desc.channels = one.in_features = CHANNELS, desc.hidden = one.out_features = HIDDEN;
        RANKS_OK(at->group, ddp_tp_mlp_create(&pair, at->tp[c], &desc));
        RANKS_OK(at->group, ddp_tp_linear_create(&head, at->tp[c], &one));
        saved = take((int64_t)ddp_tp_mlp_saved_count(pair, M));
        for (int i = 0; i < 4; i++) grads[i] = take(CHANNELS * HIDDEN);
        RANKS_OK(at->group, ddp_barrier(at->group));
        before = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
        RANKS_OK(at->group, ddp_barrier(at->group));
        for (int turn = 0; turn < 3; turn++) {
            RANKS_OK(at->group, ddp_tp_mlp_forward(pair, (const void *const *)w, x, M, saved, y));
            RANKS_OK(at->group, ddp_tp_linear_forward(head, w[0], w[1], x, M, logits));
            RANKS_OK(at->group, ddp_tp_linear_backward(head, w[0], x, logits, M, x, grads[0], grads[1]));
            RANKS_OK(at->group, ddp_tp_mlp_backward(pair, (const void *const *)w, x, saved, y, M, x, grads));
        }
        RANKS_OK(at->group, ddp_barrier(at->group));
        RANKS_CHECK(at->group, before == __atomic_load_n(&allocations, __ATOMIC_SEQ_CST),
                    "calls take memory, chunks %d", c);
        RANKS_OK(at->group, ddp_barrier(at->group));
        ddp_tp_mlp_destroy(pair);
        ddp_tp_linear_destroy(head);
    }
    drop();
    return DDP_OK;
}

//== a rank that fails, or leaves, in the middle ================================================

typedef struct trouble {
    int calls, at_call, leaves;
    ddp_result result[64];
    char text[64][400];
} trouble;
static trouble *troubles; /* shared by the ranks */

/* Product number at_call of the odd rank fails, or is its last. */
static ddp_result failing_gemm(const ddp_gemm *gemm, void *user) {
    ddp_group *group = (ddp_group *)user;
    if (ddp_rank(group) == 1 && ++troubles->calls == troubles->at_call) {
        if (troubles->leaves) raise(SIGKILL);
        return ddp_fail(DDP_ERR_ENGINE, "the product is on fire");
    }
    return ddp_gemm_builtin(gemm, NULL);
}

static ddp_result into_trouble(ddp_group *group, void *user) {
    enum { C = 16 };
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp_mlp_desc pair = DDP_ZERO;
    ddp_tp *tp;
    ddp_tp_mlp *m;
    int rank = ddp_rank(group);
    void *w[4] = {take(4 * C * C), take(4 * C), take(4 * C * C), take(C)},
         *grads[4] = {take(4 * C * C), take(4 * C), take(4 * C * C), take(C)}, *saved;
    void *x = take(M * C), *y = take(M * C);
    (void)user;
    desc.max_rows = M, desc.sequence_parallel = 1, desc.chunk_count = 3, desc.gemm = failing_gemm,
    desc.gemm_user = group;
    pair.channels = C, pair.hidden = 4 * C;
    RANKS_OK(group, ddp_tp_create(&tp, group, &desc));
    RANKS_OK(group, ddp_tp_mlp_create(&m, tp, &pair));
    saved = take((int64_t)ddp_tp_mlp_saved_count(m, M));
    troubles->result[rank] = DDP_OK;
    for (int turn = 0; turn < 3 && troubles->result[rank] == DDP_OK; turn++) {
        troubles->result[rank] = ddp_tp_mlp_forward(m, (const void *const *)w, x, M, saved, y);
        if (troubles->result[rank] == DDP_OK)
            troubles->result[rank] = ddp_tp_mlp_backward(m, (const void *const *)w, x, saved, y, M, x, grads);
    }
    snprintf(troubles->text[rank], sizeof troubles->text[rank], "%.399s", ddp_last_error());
    ddp_tp_mlp_destroy(m);
    ddp_tp_destroy(tp);
    drop();
    return DDP_OK;
}

/* The call of every rank ends with that failure or with the loss of the rank; an expired timeout would
   show. */
static int trouble_ends(ranks_mode mode, int ranks, int at_call, int leaves) {
    int failed = 0;
    memset(troubles, 0, sizeof *troubles);
    troubles->at_call = at_call;
    troubles->leaves = leaves;
    (void)ranks_run(mode, ranks, 600000, into_trouble, NULL);
    for (int r = 0; r < ranks; r++) {
        const char *want = leaves ? "killed by signal 9" : "the product is on fire";
        if (leaves && r == 1) continue;
        if (troubles->result[r] == (leaves ? DDP_ERR_PEER_LOST : DDP_ERR_ENGINE)
            && strstr(troubles->text[r], want))
            continue;
        failed = printf("FAIL rank %d/%d, product %d, leaves=%d: %s '%s'\n", r, ranks, at_call, leaves,
                        ddp_result_name(troubles->result[r]), troubles->text[r])
                 > 0;
    }
    return failed;
}

//== all of them ============================================================================

static ddp_result in_contexts(ddp_group *group, ddp_dtype dtype, int sequence_parallel, int accumulate) {
    place at = DDP_ZERO;
    at.group = group;
    at.dtype = dtype;
    at.rank = ddp_rank(group);
    at.ranks = ddp_world_size(group);
    at.sequence_parallel = sequence_parallel;
    at.accumulate = accumulate;
    at.near = dtype == DDP_F32 ? 1e-5 : 1e-12;
    for (int c = 0; c < CHUNKS; c++) {
        ddp_tp_desc desc = DDP_ZERO;
        desc.dtype = dtype;
        desc.max_rows = M;
        desc.sequence_parallel = sequence_parallel;
        desc.chunk_count = c ? 3 : 0;
        desc.accumulate_grads = accumulate;
        RANKS_OK(group, ddp_tp_create(&at.tp[c], group, &desc));
    }
    RANKS_RUN(group, linears(&at));
    RANKS_RUN(group, heads(&at));
    RANKS_RUN(group, mlps(&at));
    RANKS_RUN(group, far_activations(&at));
    RANKS_RUN(group, bad_linears(&at));
    RANKS_RUN(group, bad_calls(&at));
    RANKS_RUN(group, nothing_is_allocated(&at));
    for (int c = 0; c < CHUNKS; c++) ddp_tp_destroy(at.tp[c]);
    return DDP_OK;
}

static ddp_result cases(ddp_group *group, void *user) {
    (void)user;
    RANKS_RUN(group, bad_contexts(group));
    RANKS_RUN(group, bad_normal(group));
    RANKS_RUN(group, normal_values(group));
    RANKS_RUN(group, normal_known_answers(group));
    RANKS_RUN(group, mismatches(group));
    RANKS_RUN(group, workspaces_are_large_enough(group));
    RANKS_RUN(group, in_contexts(group, DDP_F64, 0, 0));
    RANKS_RUN(group, in_contexts(group, DDP_F64, 1, 0));
    RANKS_RUN(group, in_contexts(group, DDP_F32, 0, 1));
    RANKS_RUN(group, in_contexts(group, DDP_F32, 1, 1));
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 3, 4, 8, 0};
    ranks_mode mode;
    int failed;
    troubles = (trouble *)ranks_shared(sizeof *troubles);
    ranks_memory.alloc_fn = counting_alloc;
    ranks_memory.free_fn = counting_free;
    failed = ranks_each(argc, argv, worlds, 120, &mode, cases) != 0;
    for (int call = 1; call < 14 && !failed; call += 6) {
        failed = trouble_ends(mode, 3, call, 0);
        if (ranks_backends[mode].start == RANKS_LAUNCHED) failed |= trouble_ends(mode, 3, call, 1);
    }
    return failed;
}

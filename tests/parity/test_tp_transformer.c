/*  test_tp_transformer.c - one layer of a GPT, made of the layers of ddp_tensor.h, over t ranks against one
    rank: forward and backward, the traffic, and the memory retained for backward. The gradients on one rank
    are checked by differences.

        x -> norm -> query, key, value -> attention -> projection -> dropout -> + x = middle -> norm -> MLP ->
        dropout -> + middle = y

    M = b s rows of h channels, a heads. With t ranks a ring sends 2 n (t-1)/t per rank for an all-reduce of n
    elements, and n (t-1)/t for an all-gather or a reduce-scatter.

    Traffic. Without sequence parallelism there are four all-reduces of M h elements each, in total 8 b s h
    (t-1)/t (Shoeybi et al. 2019): in forward after the projection and after the MLP, in backward of the
    inputs of the query-key-value linear and of the MLP. With it each of them is an all-gather and a
    reduce-scatter, with the same total. Two things come in addition, as in Megatron-LM. Ranks retain only
    their rows of the two inputs of column linears and gather them again for the gradient of the weights, 2 b
    s h (t-1)/t in backward. The gradients of the norms' weights and biases are summed, 2 h elements for each
    norm, in total 8 h (t-1)/t.

    Memory retained for backward (Korthikanti et al. 2022), 2 bytes per element and 1 per element of a dropout
    mask, in units of s b h:
                                     none      t ranks        in sequence parallelism
      norms' inputs: x, middle       4         4              4/t
      inputs of column linears       4         4              4/t
      query, key, value              6         6/t            6/t
      softmax, its mask, dropped     5as/h     5as/(ht)       5as/(ht)
      input of the projection        2         2/t            2/t
      MLP: GELU's input and output   16        16/t           16/t
      masks of projection and MLP    2         2              2/t
                                     34+5as/h  10+24/t+...    34/t+...
    The norms' statistics, 4 elements per row, are not in the formulas. The masks are, although they are not
    stored here: backward draws the same numbers again. Temporary memory becomes NaN after forward, so that
    backward can use only the counted values. */
#define DDP_TENSOR_IMPLEMENTATION
#include "ddp_tensor.h"
#include "../support/ranks.h"

enum {
    B = 2,
    S = 6,
    M = B * S /* 1, 2 and 4 ranks divide them evenly */,
    A = 4,
    H = 16,
    HEAD = H / A,
    HIDDEN = 4 * H,
    BIG = M * 3 * HIDDEN
};
enum {
    NORM1,
    NORM1_BIAS,
    QKV,
    QKV_BIAS,
    PROJ,
    PROJ_BIAS,
    NORM2,
    NORM2_BIAS,
    FC,
    FC_BIAS,
    OUT,
    OUT_BIAS,
    WEIGHTS
};

#define TRY(call)                          \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)

/* A weight of this rank: parts of the global one, stacked. */
typedef struct weight {
    int parts;
    ddp_tensor_box box[3];
    double value[3 * H * HIDDEN], grad[3 * H * HIDDEN]; /* room for either dtype, as all buffers here */
} weight;

typedef struct layer {
    ddp_group *group;
    ddp_tp *tp;
    ddp_dtype dtype;
    size_t size;
    int64_t heads, own, first; /* of this rank: heads; rows of a sharded activation */
    int rank, ranks, sequence_parallel;
    ddp_tp_layer_norm *norm[2];
    ddp_tp_linear *qkv, *proj;
    ddp_tp_mlp *mlp;
    weight w[WEIGHTS];
    struct {
        double x[M * H], n1[M * H], qkv[M * 3 * H], softmax[B * A * S * S], dropped[B * A * S * S],
            context[M * H], middle[M * H], n2[M * H];
        double mlp[2 * M * HIDDEN], stats[2][2 * M];
    } kept;
    struct {
        double a[BIG], b[BIG], c[BIG], d[BIG];
    } passing; /* of forward, or of backward */
    double y[M * H], dx[M * H];
    int64_t kept_elements, masks;
} layer;

/* Between -1 and 1; f32 holds it. */
static double number(uint64_t seed) { return (double)(ranks_mix(seed) >> 40) / 8388608.0 - 1; }

static double get(const layer *l, const void *memory, int64_t index) {
    return l->dtype == DDP_F32 ? (double)((const float *)memory)[index] : ((const double *)memory)[index];
}

static void put(const layer *l, void *memory, int64_t index, double value) {
    if (l->dtype == DDP_F32)
        ((float *)memory)[index] = (float)value;
    else
        ((double *)memory)[index] = value;
}

static void add(const layer *l, void *to, const void *a, const void *b) { /* own rows */
    for (int64_t i = 0; i < l->own * H; i++) put(l, to, i, get(l, a, i) + get(l, b, i));
}

static int64_t count_of(const ddp_tensor_box *box) {
    return box->shape[0] * (box->ndim == 2 ? box->shape[1] : 1);
}

//== making it ==============================================================================

static ddp_result boxes(layer *l, int which, ddp_tp_linear *linear, int parts) {
    for (int p = 0; p < parts; p++) {
        RANKS_OK(l->group, ddp_tp_linear_weight_box(linear, p, &l->w[which].box[p]));
        RANKS_OK(l->group, ddp_tp_linear_bias_box(linear, p, &l->w[which + 1].box[p]));
    }
    l->w[which].parts = l->w[which + 1].parts = parts;
    return DDP_OK;
}

static void whole_box(weight *w) {
    w->parts = 1;
    w->box[0].ndim = 1;
    w->box[0].global_shape[0] = w->box[0].shape[0] = H;
}

/* Its weights are those of one global layer, by position. */
static ddp_result weights_of(layer *l) {
    for (int k = 0; k < WEIGHTS; k++) {
        int64_t at = 0;
        double mean = k == NORM1 || k == NORM2 ? 1 : 0;
        if (k == NORM1 || k == NORM1_BIAS || k == NORM2 || k == NORM2_BIAS) whole_box(&l->w[k]);
        for (int p = 0; p < l->w[k].parts; at += count_of(&l->w[k].box[p++]))
            RANKS_OK(l->group, ddp_tensor_init_normal(&l->w[k].box[p], l->dtype, (uint64_t)k, mean, 0.3,
                                                      (char *)l->w[k].value + (size_t)at * l->size));
    }
    return DDP_OK;
}

static ddp_result make(layer *l, ddp_group *group, ddp_dtype dtype, int sequence_parallel, int chunk_count) {
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp_layer_norm_desc norm = DDP_ZERO;
    ddp_tp_linear_desc qkv = DDP_ZERO, proj = DDP_ZERO;
    ddp_tp_mlp_desc mlp = DDP_ZERO;
    l->group = group;
    l->dtype = desc.dtype = dtype;
    l->size = ddp_dtype_size(dtype);
    l->rank = ddp_rank(group);
    l->ranks = ddp_world_size(group);
    l->sequence_parallel = desc.sequence_parallel = sequence_parallel;
    l->heads = A / l->ranks;
    l->own = sequence_parallel ? M / l->ranks : M;
    l->first = sequence_parallel ? l->own * l->rank : 0;
    desc.max_rows = M;
    desc.chunk_count = chunk_count;
    norm.channels = qkv.in_features = proj.in_features = proj.out_features = mlp.channels = H;
    qkv.heads = A;
    proj.split = DDP_TP_ROW;
    mlp.hidden = HIDDEN;
    RANKS_OK(group, ddp_tp_create(&l->tp, group, &desc));
    for (int i = 0; i < 2; i++) RANKS_OK(group, ddp_tp_layer_norm_create(&l->norm[i], l->tp, &norm));
    RANKS_OK(group, ddp_tp_linear_create(&l->qkv, l->tp, &qkv));
    RANKS_OK(group, ddp_tp_linear_create(&l->proj, l->tp, &proj));
    RANKS_OK(group, ddp_tp_mlp_create(&l->mlp, l->tp, &mlp));
    TRY(boxes(l, QKV, l->qkv, 3));
    TRY(boxes(l, PROJ, l->proj, 1));
    TRY(boxes(l, FC, ddp_tp_mlp_linear(l->mlp, 0), 1));
    TRY(boxes(l, OUT, ddp_tp_mlp_linear(l->mlp, 1), 1));
    return weights_of(l);
}

static void unmake(layer *l) {
    for (int i = 0; i < 2; i++) ddp_tp_layer_norm_destroy(l->norm[i]);
    ddp_tp_linear_destroy(l->qkv);
    ddp_tp_linear_destroy(l->proj);
    ddp_tp_mlp_destroy(l->mlp);
    ddp_tp_destroy(l->tp);
    free(l);
}

//== attention ==============================================================================

/* Index of q, k or v (which) of a position and head in the output of the linear layer. */
static int64_t qkv_at(const layer *l, int which, int64_t row, int64_t head) {
    return (row * 3 + which) * l->heads * HEAD + head * HEAD;
}

/* The same mask wherever a head is: in the full tensor, rows are (sequence, head, position). */
static ddp_result attention_dropout(const layer *l, const void *in, void *out) {
    size_t bytes = (size_t)(l->heads * S * S) * l->size;
    ddp_tp_dropout_desc desc = DDP_ZERO;
    desc.rate = 0.2;
    desc.key = 1;
    for (int b = 0; b < B; b++) {
        desc.first_row = (b * A + l->heads * l->rank) * S;
        RANKS_OK(l->group, ddp_tp_dropout(l->tp, &desc, (const char *)in + (size_t)b * bytes, l->heads * S, S,
                                          (char *)out + (size_t)b * bytes));
    }
    return DDP_OK;
}

/* For each local head and position i of each sequence: row is i's, from is where its weights over the
   positions begin. */
#define EACH_POSITION                                                                                   \
    for (int64_t k = 0; k < B * l->heads; k++)                                                          \
        for (int64_t head = k % l->heads, base = k / l->heads * S, i = 0, row = base, from = k * S * S; \
             i < S; i++, row++, from += S)

static ddp_result attention(layer *l) {
    const void *qkv = l->kept.qkv;
    EACH_POSITION {
        double score[S], most = -INFINITY, sum = 0;
        for (int64_t j = 0; j <= i; j++) {
            score[j] = 0;
            for (int c = 0; c < HEAD; c++)
                score[j] += get(l, qkv, qkv_at(l, 0, row, head) + c)
                            * get(l, qkv, qkv_at(l, 1, base + j, head) + c);
            score[j] /= sqrt((double)HEAD);
            most = score[j] > most ? score[j] : most;
        }
        for (int64_t j = 0; j <= i; j++) sum += exp(score[j] - most);
        for (int64_t j = 0; j < S; j++)
            put(l, l->kept.softmax, from + j, j <= i ? exp(score[j] - most) / sum : 0);
    }
    TRY(attention_dropout(l, l->kept.softmax, l->kept.dropped));
    EACH_POSITION {
        for (int c = 0; c < HEAD; c++) {
            double sum = 0;
            for (int64_t j = 0; j <= i; j++)
                sum += get(l, l->kept.dropped, from + j) * get(l, qkv, qkv_at(l, 2, base + j, head) + c);
            put(l, l->kept.context, row * l->heads * HEAD + head * HEAD + c, sum);
        }
    }
    return DDP_OK;
}

/* d_qkv from d_context. */
static ddp_result attention_backward(layer *l, const void *d_context, void *d_qkv, void *d_softmax) {
    const void *qkv = l->kept.qkv;
    memset(d_qkv, 0, (size_t)(M * 3 * l->heads * HEAD) * l->size);
    EACH_POSITION {
        for (int64_t j = 0; j < S; j++) {
            double sum = 0;
            for (int c = 0; c < HEAD; c++) {
                int64_t v = qkv_at(l, 2, base + j, head) + c;
                double d = get(l, d_context, row * l->heads * HEAD + head * HEAD + c);
                sum += d * get(l, qkv, v);
                put(l, d_qkv, v, get(l, d_qkv, v) + d * get(l, l->kept.dropped, from + j));
            }
            put(l, d_softmax, from + j, sum);
        }
    }
    TRY(attention_dropout(l, d_softmax, d_softmax));
    EACH_POSITION {
        double mean = 0;
        for (int64_t j = 0; j <= i; j++)
            mean += get(l, l->kept.softmax, from + j) * get(l, d_softmax, from + j);
        for (int64_t j = 0; j <= i; j++) {
            double d = get(l, l->kept.softmax, from + j) * (get(l, d_softmax, from + j) - mean)
                       / sqrt((double)HEAD);
            for (int c = 0; c < HEAD; c++) {
                int64_t q = qkv_at(l, 0, row, head) + c, key = qkv_at(l, 1, base + j, head) + c;
                put(l, d_qkv, q, get(l, d_qkv, q) + d * get(l, qkv, key));
                put(l, d_qkv, key, get(l, d_qkv, key) + d * get(l, qkv, q));
            }
        }
    }
    return DDP_OK;
}

//== the layer ==============================================================================

/* After the projection (which 0) and the MLP (1): own rows. */
static ddp_result row_dropout(const layer *l, int which, const void *in, void *out) {
    ddp_tp_dropout_desc desc = DDP_ZERO;
    desc.rate = 0.1;
    desc.key = 2 + (uint64_t)which;
    desc.first_row = l->first;
    RANKS_OK(l->group, ddp_tp_dropout(l->tp, &desc, in, l->own, H, out));
    return DDP_OK;
}

static void keep(layer *l, int64_t elements) { l->kept_elements += elements; }
static void mask(layer *l, int64_t elements) { l->masks += elements; }

static ddp_result norm_forward(layer *l, int which, const void *x, void *y) {
    const weight *w = &l->w[which ? NORM2 : NORM1];
    RANKS_OK(l->group, ddp_tp_layer_norm_forward(l->norm[which], w[0].value, w[1].value, x, l->own,
                                                 l->kept.stats[which], y));
    return DDP_OK;
}

static ddp_result norm_backward(layer *l, int which, const void *x, const void *dy, void *dx) {
    weight *w = &l->w[which ? NORM2 : NORM1];
    RANKS_OK(l->group, ddp_tp_layer_norm_backward(l->norm[which], w[0].value, x, l->kept.stats[which], dy,
                                                  l->own, dx, w[0].grad, w[1].grad));
    return DDP_OK;
}

/* y from kept.x. Temporary memory is NaN at the end. */
static ddp_result forward(layer *l) {
    const void *mlp[4] = {l->w[FC].value, l->w[FC_BIAS].value, l->w[OUT].value, l->w[OUT_BIAS].value};
    l->kept_elements = l->masks = 0;
    keep(l, l->own * H); /* x */
    TRY(norm_forward(l, 0, l->kept.x, l->kept.n1));
    keep(l, l->own * H);
    RANKS_OK(l->group, ddp_tp_linear_forward(l->qkv, l->w[QKV].value, l->w[QKV_BIAS].value, l->kept.n1, M,
                                             l->kept.qkv));
    keep(l, M * ddp_tp_linear_out_features(l->qkv));
    TRY(attention(l));
    keep(l, B * l->heads * S * S); /* softmax */
    mask(l, B * l->heads * S * S);
    keep(l, B * l->heads * S * S);                   /* dropped */
    keep(l, M * ddp_tp_linear_in_features(l->proj)); /* context */
    RANKS_OK(l->group, ddp_tp_linear_forward(l->proj, l->w[PROJ].value, l->w[PROJ_BIAS].value,
                                             l->kept.context, M, l->passing.a));
    TRY(row_dropout(l, 0, l->passing.a, l->passing.a));
    mask(l, l->own * H);
    add(l, l->kept.middle, l->kept.x, l->passing.a);
    keep(l, l->own * H);
    TRY(norm_forward(l, 1, l->kept.middle, l->kept.n2));
    keep(l, l->own * H);
    RANKS_OK(l->group, ddp_tp_mlp_forward(l->mlp, mlp, l->kept.n2, M, l->kept.mlp, l->passing.b));
    keep(l, (int64_t)ddp_tp_mlp_saved_count(l->mlp, M));
    TRY(row_dropout(l, 1, l->passing.b, l->passing.b));
    mask(l, l->own * H);
    add(l, l->y, l->kept.middle, l->passing.b);
    memset(&l->passing, 0xff, sizeof l->passing); /* NaN */
    return DDP_OK;
}

/* dx and gradients from own rows of dy. */
static ddp_result backward(layer *l, const void *dy) {
    const void *mlp[4] = {l->w[FC].value, l->w[FC_BIAS].value, l->w[OUT].value, l->w[OUT_BIAS].value};
    void *mlp_grads[4] = {l->w[FC].grad, l->w[FC_BIAS].grad, l->w[OUT].grad, l->w[OUT_BIAS].grad};
    void *a = l->passing.a, *b = l->passing.b, *d_middle = l->passing.c, *d_softmax = l->passing.d;
    TRY(row_dropout(l, 1, dy, a));
    RANKS_OK(l->group, ddp_tp_mlp_backward(l->mlp, mlp, l->kept.n2, l->kept.mlp, a, M, b, mlp_grads));
    TRY(norm_backward(l, 1, l->kept.middle, b, d_middle));
    add(l, d_middle, d_middle, dy);
    TRY(row_dropout(l, 0, d_middle, a));
    RANKS_OK(l->group, ddp_tp_linear_backward(l->proj, l->w[PROJ].value, l->kept.context, a, M, b,
                                              l->w[PROJ].grad, l->w[PROJ_BIAS].grad));
    TRY(attention_backward(l, b, a, d_softmax));
    RANKS_OK(l->group, ddp_tp_linear_backward(l->qkv, l->w[QKV].value, l->kept.n1, a, M, b, l->w[QKV].grad,
                                              l->w[QKV_BIAS].grad));
    TRY(norm_backward(l, 0, l->kept.x, b, l->dx));
    add(l, l->dx, l->dx, d_middle);
    return DDP_OK;
}

//== traffic and memory ======================================================================

static ddp_result sent(layer *l, const char *what, uint64_t collectives, int64_t elements) {
    ddp_tp_stats stats = DDP_ZERO;
    RANKS_OK(l->group, ddp_tp_get_stats(l->tp, &stats));
    RANKS_CHECK(l->group,
                stats.elements_sent == (uint64_t)elements
                    && (l->ranks == 1 || !collectives || stats.collectives == collectives),
                "%s sp=%d: %llu collectives of %llu elements, not %llu of %lld", what, l->sequence_parallel,
                (unsigned long long)stats.collectives, (unsigned long long)stats.elements_sent,
                (unsigned long long)collectives, (long long)elements);
    ddp_tp_reset_stats(l->tp);
    return DDP_OK;
}

static ddp_result step(layer *l, int chunk_count) {
    int64_t t = l->ranks, each = (int64_t)B * S * H * (t - 1) / t, gathered_again = 2 * each,
            norms = 8 * (int64_t)H * (t - 1) / t, formula;
    double dy[M * H];
    int cuts = l->sequence_parallel;
    for (int64_t i = 0; i < l->own * H; i++) {
        put(l, l->kept.x, i, number((uint64_t)(l->first * H + i)));
        put(l, dy, i, number(7777 + (uint64_t)(l->first * H + i)));
    }
    ddp_tp_reset_stats(l->tp);
    TRY(forward(l));
    TRY(sent(l, "forward", chunk_count ? 0 : cuts ? 4 : 2, 4 * each));
    TRY(backward(l, dy));
    TRY(sent(l, "backward", chunk_count ? 0 : cuts ? 8 : 2, 4 * each + (cuts ? gathered_again + norms : 0)));
    formula = cuts ? 34 * S * B * H / t + 5 * A * S * S * B / t
                   : 10 * S * B * H + 24 * S * B * H / t + 5 * A * S * S * B / t;
    RANKS_CHECK(l->group, 2 * l->kept_elements + l->masks == formula,
                "t=%d sp=%d retains %lld bytes, the formula gives %lld", l->ranks, cuts,
                (long long)(2 * l->kept_elements + l->masks), (long long)formula);
    return DDP_OK;
}

//== against one rank =======================================================================

static double objective(const layer *l) {
    double sum = 0;
    for (int64_t i = 0; i < M * H; i++) sum += number(7777 + (uint64_t)i) * get(l, l->y, i);
    return sum;
}

static ddp_result slope(layer *l, const char *what, int index, double *x, double want) {
    const double step = 1e-5, from = *x;
    double up, have;
    *x = from + step;
    TRY(forward(l));
    up = objective(l);
    *x = from - step;
    TRY(forward(l));
    have = (up - objective(l)) / (2 * step);
    *x = from;
    RANKS_CHECK(l->group, fabs(have - want) < 1e-6 * (1 + fabs(want)),
                "%s %d: the slope is %.12g, backward gives %.12g", what, index, have, want);
    return DDP_OK;
}

/* The f64 gradients of one rank are compared with differences. */
static ddp_result slopes(layer *l) {
    for (int i = 0; i < M * H; i += 37) TRY(slope(l, "x", i, l->kept.x + i, l->dx[i]));
    for (int k = 0; k < WEIGHTS; k++) {
        int64_t count = 0;
        for (int p = 0; p < l->w[k].parts; p++) count += count_of(&l->w[k].box[p]);
        for (int64_t i = k; i < count; i += count / 4 + 1)
            TRY(slope(l, "weight", k, l->w[k].value + i, l->w[k].grad[i]));
    }
    return DDP_OK;
}

typedef struct gap {
    double most, difference;
} gap;

static void gap_add(gap *g, double have, double want) {
    double difference = fabs(have - want);
    g->most = fabs(want) > g->most ? fabs(want) : g->most;
    if (!(difference <= g->difference)) g->difference = difference; /* NaN too */
}

static ddp_result narrow(const layer *l, const char *what, int index, const gap *g) {
    double near = l->dtype == DDP_F32 ? 1e-5 : 1e-11;
    RANKS_CHECK(l->group, g->difference <= near * g->most,
                "%s %d of %s, t=%d sp=%d: off by %g, where the greatest is %g", what, index,
                ddp_dtype_name(l->dtype), l->ranks, l->sequence_parallel, g->difference, g->most);
    return DDP_OK;
}

/* This rank's part equals its part of the result of one rank, which is f64. */
static ddp_result agrees(const layer *l, const layer *one) {
    gap y = DDP_ZERO, dx = DDP_ZERO;
    for (int64_t i = 0; i < l->own * H; i++) {
        gap_add(&y, get(l, l->y, i), one->y[l->first * H + i]);
        gap_add(&dx, get(l, l->dx, i), one->dx[l->first * H + i]);
    }
    TRY(narrow(l, "y", 0, &y));
    TRY(narrow(l, "dx", 0, &dx));
    for (int k = 0; k < WEIGHTS; k++) {
        gap value = DDP_ZERO, grad = DDP_ZERO;
        int64_t at = 0;
        for (int p = 0; p < l->w[k].parts; at += count_of(&l->w[k].box[p++])) {
            const ddp_tensor_box *box = &l->w[k].box[p];
            int is_matrix = box->ndim == 2;
            int64_t columns = is_matrix ? box->shape[1] : 1, all = is_matrix ? box->global_shape[1] : 1,
                    first = is_matrix ? box->offset[1] : 0;
            for (int64_t i = 0; i < count_of(box); i++) {
                int64_t there = (box->offset[0] + i / columns) * all + first + i % columns;
                gap_add(&value, get(l, l->w[k].value, at + i), one->w[k].value[there]);
                gap_add(&grad, get(l, l->w[k].grad, at + i), one->w[k].grad[there]);
            }
        }
        TRY(narrow(l, "weight", k, &value));
        TRY(narrow(l, "gradient", k, &grad));
    }
    return DDP_OK;
}

static layer *some_layer(void) {
    layer *l = (layer *)calloc(1, sizeof *l);
    if (!l) {
        fprintf(stderr, "no memory for the test\n");
        exit(2);
    }
    return l;
}

static ddp_result compared(ddp_group *group, const layer *one, ddp_dtype dtype, int sequence_parallel,
                           int chunk_count) {
    layer *l = some_layer();
    TRY(make(l, group, dtype, sequence_parallel, chunk_count));
    TRY(step(l, chunk_count));
    TRY(agrees(l, one));
    unmake(l);
    return DDP_OK;
}

static ddp_result cases(ddp_group *group, void *user) {
    ddp_group *alone = NULL;
    layer *one = some_layer();
    (void)user;
    RANKS_OK(group, ddp_group_split(group, ddp_rank(group), 0, &alone));
    RANKS_RUN(group, make(one, alone, DDP_F64, 0, 0));
    RANKS_RUN(group, step(one, 0));
    for (int sequence_parallel = 0; sequence_parallel < 2; sequence_parallel++) {
        RANKS_RUN(group, compared(group, one, DDP_F64, sequence_parallel, 0));
        RANKS_RUN(group, compared(group, one, DDP_F32, sequence_parallel, 0));
        RANKS_RUN(group, compared(group, one, DDP_F64, sequence_parallel, 2));
    }
    /* last: it replaces y and kept by those of other inputs. */
    if (ddp_world_size(group) == 1) RANKS_RUN(group, slopes(one));
    unmake(one);
    ddp_group_destroy(alone);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 4, 0};
    ranks_mode mode;
    return ranks_each(argc, argv, worlds, 60, &mode, cases) != 0;
}

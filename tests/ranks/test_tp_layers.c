/*  test_tp_layers.c - embedding, cross-entropy, norms and dropout over W ranks against plain loops in double
    on one rank: forward and backward, sharded and full rows, uneven and padded vocabularies, finite
    differences, number of collectives, bad input, no allocation. */
#define DDP_TENSOR_IMPLEMENTATION
#include "ddp_tensor.h"
#include "../support/ranks.h"

enum { ROWS = 24 /* 1, 2, 3, 4 and 8 ranks divide them evenly */, TAKEN_MAX = 64 };

typedef struct place { /* where a test runs */
    ddp_group *group;
    ddp_tp *tp;
    ddp_dtype dtype;
    int rank, ranks, sequence_parallel, accumulate;
    double near; /* of the greatest value */
} place;

//== memory and numbers =====================================================================

static __thread void *taken[TAKEN_MAX];
static __thread int taken_count;

/* Zeroed, until drop. */
static void *take(size_t elements) {
    void *memory = calloc(elements + 1, 8);
    if (!memory || taken_count == TAKEN_MAX) {
        fprintf(stderr, "no memory for the test\n");
        exit(2);
    }
    return taken[taken_count++] = memory;
}

static void drop(void) {
    while (taken_count) free(taken[--taken_count]);
}

/* Between -1 and 1; f32 holds it. */
static double number(uint64_t seed) { return (double)(ranks_mix(seed) >> 40) / 8388608.0 - 1; }

static void put(const place *at, void *memory, int64_t index, double value) {
    if (at->dtype == DDP_F32)
        ((float *)memory)[index] = (float)value;
    else
        ((double *)memory)[index] = value;
}

static double get(const place *at, const void *memory, int64_t index) {
    return at->dtype == DDP_F32 ? (double)((const float *)memory)[index] : ((const double *)memory)[index];
}

static size_t bytes_of(const place *at, int64_t count) { return (size_t)count * ddp_dtype_size(at->dtype); }

/* count numbers of a global array, from element first on. */
static void *numbers(const place *at, uint64_t seed, int64_t first, int64_t count) {
    void *memory = take((size_t)count);
    for (int64_t i = 0; i < count; i++) put(at, memory, i, number(seed * 1000003 + (uint64_t)(first + i)));
    return memory;
}

static double *exactly(uint64_t seed, int64_t count) {
    double *memory = (double *)take((size_t)count);
    for (int64_t i = 0; i < count; i++) memory[i] = number(seed * 1000003 + (uint64_t)i);
    return memory;
}

/* This rank's rows of a sharded activation: first and count; all rows if it is not sharded. */
static int64_t own_rows(const place *at) { return at->sequence_parallel ? ROWS / at->ranks : ROWS; }
static int64_t first_row(const place *at) { return at->sequence_parallel ? ROWS / at->ranks * at->rank : 0; }

static ddp_result compare(const place *at, const char *what, const void *have, const double *want,
                          int64_t count, double near) {
    double most = 0.01; /* expected zeros can be off by the rounding of numbers near 1 */
    for (int64_t i = 0; i < count; i++)
        most = isfinite(want[i]) && fabs(want[i]) > most ? fabs(want[i]) : most;
    for (int64_t i = 0; i < count; i++) {
        double value = get(at, have, i);
        int fine = isnan(want[i]) ? isnan(value) : fabs(value - want[i]) <= near * most;
        RANKS_CHECK(at->group, fine, "%s %s sp=%d: element %lld of %lld is %.17g, not %.17g", what,
                    ddp_dtype_name(at->dtype), at->sequence_parallel, (long long)i, (long long)count, value,
                    want[i]);
    }
    return DDP_OK;
}
#define TRY(call)                          \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)
#define NEAR(at, have, want, count) TRY(compare(at, #have, have, want, count, (at)->near))
#define SAME(at, have, want, count) TRY(compare(at, #have, have, want, count, 0))

/* Counters of the context since the last check: collectives, and the elements that a ring of W sends for
   them. */
static ddp_result counted(const place *at, const char *what, uint64_t collectives, double elements) {
    ddp_tp_stats stats = DDP_ZERO;
    RANKS_OK(at->group, ddp_tp_get_stats(at->tp, &stats));
    if (at->ranks == 1) collectives = 0, elements = 0;
    RANKS_CHECK(at->group,
                stats.collectives == collectives && fabs((double)stats.elements_sent - elements) < 1.5,
                "%s sp=%d: %llu collectives of %llu elements, not %llu of %g", what, at->sequence_parallel,
                (unsigned long long)stats.collectives, (unsigned long long)stats.elements_sent,
                (unsigned long long)collectives, elements);
    ddp_tp_reset_stats(at->tp);
    return DDP_OK;
}

/* The sum over ranks of the parts of a sharded value; a replicated value as it is. */
static ddp_result joined(const place *at, double *value) {
    if (at->sequence_parallel)
        RANKS_OK(at->group, ddp_all_reduce(at->group, value, value, 1, DDP_F64, DDP_OP_SUM, NULL));
    return DDP_OK;
}

/* The derivative of value(it) by *x, an f64 of this rank, or of another one (x NULL). Every rank makes the
   same call. */
typedef ddp_result (*objective)(void *it, double *value);
static ddp_result slope_is(const place *at, const char *what, objective value, void *it, double *x,
                           double want) {
    const double step = 1e-5;
    double from = x ? *x : 0, up, down, slope;
    if (x) *x = from + step;
    TRY(value(it, &up));
    if (x) *x = from - step;
    TRY(value(it, &down));
    if (x) *x = from;
    slope = (up - down) / (2 * step);
    RANKS_CHECK(at->group, !x || fabs(slope - want) < 1e-6 * (1 + fabs(want)),
                "%s sp=%d: the slope is %.12g, backward gives %.12g", what, at->sequence_parallel, slope,
                want);
    return DDP_OK;
}

//== embedding ==============================================================================

static void tokens_of(int32_t *tokens, int64_t vocab) {
    /* Some tokens are frequent. */
    for (int i = 0; i < ROWS; i++)
        tokens[i] = (int32_t)(ranks_mix((uint64_t)i) % (uint64_t)(i % 3 ? vocab : (vocab + 3) / 4));
}

typedef struct embedded {
    const place *at;
    ddp_tp_embedding *embedding;
    void *weight, *y;
    const int32_t *tokens;
    int64_t channels;
} embedded;

static ddp_result embedded_value(void *user, double *value) {
    embedded *it = (embedded *)user;
    int64_t count = own_rows(it->at) * it->channels, first = first_row(it->at) * it->channels;
    RANKS_OK(it->at->group, ddp_tp_embedding_forward(it->embedding, it->weight, it->tokens, ROWS, it->y));
    *value = 0;
    for (int64_t i = 0; i < count; i++)
        *value += number(5 * 1000003 + (uint64_t)(first + i)) * get(it->at, it->y, i);
    return joined(it->at, value);
}

static ddp_result embedding(const place *at, int64_t vocab, int64_t padded, int64_t channels) {
    int64_t rows = own_rows(at), first = first_row(at) * channels, table_rows = padded ? padded : vocab, mine;
    ddp_tp_embedding_desc desc = DDP_ZERO;
    embedded it = DDP_ZERO;
    ddp_tensor_box box = DDP_ZERO;
    int32_t tokens[ROWS];
    double *table = exactly(1, table_rows * channels), *dy = exactly(5, ROWS * channels),
           *want = (double *)take((size_t)(table_rows * channels));
    desc.vocab = vocab;
    desc.padded_vocab = padded;
    desc.channels = channels;
    tokens_of(tokens, vocab);
    it.at = at;
    it.tokens = tokens;
    it.channels = channels;
    RANKS_OK(at->group, ddp_tp_embedding_create(&it.embedding, at->tp, &desc));
    RANKS_OK(at->group, ddp_tp_embedding_box(it.embedding, &box));
    mine = (table_rows + at->ranks - 1) / at->ranks;
    RANKS_CHECK(
        at->group,
        box.ndim == 2 && box.global_shape[0] == table_rows && box.global_shape[1] == channels
            && box.shape[1] == channels && box.offset[1] == 0
            && box.offset[0] == (mine * at->rank < table_rows ? mine * at->rank : table_rows)
            && box.shape[0] == (table_rows - box.offset[0] < mine ? table_rows - box.offset[0] : mine),
        "vocab %lld: rows %lld + %lld", (long long)vocab, (long long)box.offset[0], (long long)box.shape[0]);
    it.weight = numbers(at, 1, box.offset[0] * channels, box.shape[0] * channels);
    it.y = take((size_t)(rows * channels));

    ddp_tp_reset_stats(at->tp);
    RANKS_OK(at->group, ddp_tp_embedding_forward(it.embedding, it.weight, tokens, ROWS, it.y));
    TRY(counted(at, "embedding forward", 1,
                (at->sequence_parallel ? 1.0 : 2.0) * ROWS * (double)channels * (at->ranks - 1) / at->ranks));
    for (int64_t i = 0; i < rows; i++)
        SAME(at, (char *)it.y + bytes_of(at, i * channels), table + tokens[first_row(at) + i] * channels,
             channels);

    void *grad = numbers(at, 7, 0, box.shape[0] * channels);
    for (int64_t i = 0; i < box.shape[0] * channels; i++) want[i] = at->accumulate ? get(at, grad, i) : 0;
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < channels; j++)
            if (tokens[i] >= box.offset[0] && tokens[i] < box.offset[0] + box.shape[0])
                want[(tokens[i] - box.offset[0]) * channels + j] += dy[i * channels + j];
    RANKS_OK(at->group, ddp_tp_embedding_backward(it.embedding, tokens,
                                                  numbers(at, 5, first, rows * channels), ROWS, grad));
    TRY(counted(at, "embedding backward", (uint64_t)at->sequence_parallel,
                at->sequence_parallel * ROWS * (double)channels * (at->ranks - 1) / at->ranks));
    NEAR(at, grad, want, box.shape[0] * channels);
    for (int64_t row = 0; row < table_rows && at->dtype == DDP_F64; row += 5) {
        int64_t k = (row - box.offset[0]) * channels + row % channels;
        int is_mine = row >= box.offset[0] && row < box.offset[0] + box.shape[0];
        double before = is_mine && at->accumulate ? number(7 * 1000003 + (uint64_t)k) : 0;
        TRY(slope_is(at, "embedding", embedded_value, &it, is_mine ? (double *)it.weight + k : NULL,
                     is_mine ? ((double *)grad)[k] - before : 0));
    }
    ddp_tp_embedding_destroy(it.embedding);
    drop();
    return DDP_OK;
}

//== cross-entropy ==========================================================================

/* Mean, loss of each row, and d (with the columns of x). */
static double loss_plain(const ddp_tp_loss_desc *desc, const double *x, int64_t columns,
                         const int32_t *targets, double *losses, double *d) {
    int32_t ignore = desc->ignore_index ? desc->ignore_index : -100;
    double total = 0, scale = desc->scale;
    int64_t counting = 0;
    for (int i = 0; i < ROWS; i++) counting += targets[i] != ignore;
    if (scale == 0) scale = counting ? 1 / (double)counting : 0;
    for (int i = 0; i < ROWS; i++, x += columns, d += columns) {
        double most = -INFINITY, sum = 0, all;
        losses[i] = 0;
        for (int64_t j = 0; j < columns; j++) d[j] = 0;
        if (targets[i] == ignore) continue;
        for (int64_t j = 0; j < desc->vocab; j++) most = x[j] > most ? x[j] : most;
        for (int64_t j = 0; j < desc->vocab; j++) sum += exp(x[j] - most);
        all = most + log(sum);
        losses[i] = log(sum) - (x[targets[i]] - most) + desc->z_loss * all * all;
        total += losses[i];
        for (int64_t j = 0; j < desc->vocab; j++)
            d[j] = scale * (exp(x[j] - most) / sum * (1 + 2 * desc->z_loss * all) - (j == targets[i]));
    }
    return counting ? total / (double)counting : 0;
}

typedef struct entropy {
    const place *at;
    const ddp_tp_loss_desc *desc;
    const void *logits;
    const int32_t *targets;
} entropy;

static ddp_result entropy_value(void *user, double *value) {
    entropy *it = (entropy *)user;
    RANKS_OK(it->at->group,
             ddp_tp_cross_entropy(it->at->tp, it->desc, it->logits, it->targets, ROWS, NULL, value, NULL));
    return DDP_OK;
}

enum { LOGITS_PLAIN, LOGITS_HUGE, LOGITS_MASKED, LOGITS_NAN };
static double logit(int kind, int row, int64_t column, int64_t vocab, int32_t target) {
    double x = number(11 * 1000003 + (uint64_t)row * 4096 + (uint64_t)column);
    if (column >= vocab) return column % 2 ? NAN : 1e30; /* never read */
    if (kind == LOGITS_MASKED && column % 3 == 1 && column != target) return -INFINITY;
    if (kind == LOGITS_NAN && row % 5 == 2 && column == vocab / 2) return NAN;
    return kind == LOGITS_HUGE ? (double)(float)(1e4 * x) : 4 * x;
}

/* Every rank has the bits of rank 0. */
static ddp_result alike(const place *at, const void *losses, double mean) {
    size_t bytes = ROWS * ddp_dtype_size(at->dtype) + 8;
    unsigned char *mine = (unsigned char *)take(bytes),
                  *all = (unsigned char *)take(bytes * (size_t)at->ranks);
    memcpy(mine, losses, bytes - 8);
    memcpy(mine + bytes - 8, &mean, 8);
    RANKS_OK(at->group, ddp_all_gather(at->group, mine, all, bytes, DDP_U8, NULL));
    RANKS_CHECK(at->group, memcmp(all, mine, bytes) == 0, "%s", "rank 0 has other losses");
    return DDP_OK;
}

static ddp_result entropies(const place *at, const ddp_tp_loss_desc *desc, int kind, const int32_t *targets) {
    int64_t columns = desc->padded_vocab ? desc->padded_vocab : desc->vocab,
            piece = (columns + at->ranks - 1) / at->ranks;
    int64_t first = piece * at->rank < columns ? piece * at->rank : columns,
            count = columns - first < piece ? columns - first : piece;
    size_t bytes = bytes_of(at, ROWS * count);
    double *x = (double *)take((size_t)(ROWS * columns)), *want_d = (double *)take((size_t)(ROWS * columns)),
           *want = (double *)take(ROWS);
    double *mine = (double *)take((size_t)(ROWS * count)), mean = -1, again = -1, want_mean;
    void *logits = take((size_t)(ROWS * count)), *losses = take(ROWS), *d = take((size_t)(ROWS * count)),
         *kept = take((size_t)(ROWS * count));
    entropy it = {at, desc, logits, targets};
    for (int i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < columns; j++) x[i * columns + j] = logit(kind, i, j, desc->vocab, targets[i]);
    want_mean = loss_plain(desc, x, columns, targets, want, want_d);
    for (int64_t k = 0; k < ROWS * count; k++) {
        put(at, logits, k, x[k / count * columns + first + k % count]);
        mine[k] = want_d[k / count * columns + first + k % count];
    }
    memcpy(kept, logits, bytes);
    memset(d, 0x7f, bytes);
    ddp_tp_reset_stats(at->tp);
    RANKS_OK(at->group, ddp_tp_cross_entropy(at->tp, desc, logits, targets, ROWS, losses, &mean, d));
    TRY(counted(at, "cross-entropy", 2, 2.0 * 3 * ROWS * (at->ranks - 1) / at->ranks));
    RANKS_CHECK(at->group, memcmp(kept, logits, bytes) == 0, "%s", "logits have changed");
    NEAR(at, losses, want, ROWS);
    NEAR(at, d, mine, ROWS * count);
    RANKS_CHECK(at->group,
                isnan(want_mean) ? isnan(mean) : fabs(mean - want_mean) <= at->near * (1 + fabs(want_mean)),
                "mean %.12g, not %.12g", mean, want_mean);
    TRY(alike(at, losses, mean));
    RANKS_OK(at->group, ddp_tp_cross_entropy(at->tp, desc, logits, targets, ROWS, NULL, &again, NULL));
    RANKS_CHECK(at->group, memcmp(&again, &mean, sizeof mean) == 0, "only the mean: %.12g, not %.12g", again,
                mean);
    RANKS_OK(at->group, ddp_tp_cross_entropy(at->tp, desc, logits, targets, ROWS, NULL, NULL, logits));
    RANKS_CHECK(at->group, memcmp(d, logits, bytes) == 0, "%s", "in place the gradient differs");
    memcpy(logits, kept, bytes);
    for (int i = 0; i < ROWS && at->dtype == DDP_F64 && kind == LOGITS_PLAIN && desc->scale == 0; i += 5) {
        int64_t column = (i * 7) % desc->vocab, k = i * count + column - first;
        int is_mine = column >= first && column < first + count;
        TRY(slope_is(at, "cross-entropy", entropy_value, &it, is_mine ? (double *)logits + k : NULL,
                     is_mine ? ((double *)d)[k] : 0));
    }
    drop();
    return DDP_OK;
}

static ddp_result cross_entropy(const place *at, int64_t vocab, int64_t padded) {
    ddp_tp_loss_desc desc = DDP_ZERO;
    int32_t targets[ROWS];
    desc.vocab = vocab;
    desc.padded_vocab = padded;
    for (int i = 0; i < ROWS; i++)
        targets[i] = i % 6 == 4 ? -100 : (int32_t)(ranks_mix((uint64_t)i + 77) % (uint64_t)vocab);
    for (int kind = LOGITS_PLAIN; kind <= LOGITS_NAN; kind++) TRY(entropies(at, &desc, kind, targets));
    desc.z_loss = 0.01;
    TRY(entropies(at, &desc, LOGITS_PLAIN, targets));
    TRY(entropies(at, &desc, LOGITS_HUGE, targets));
    desc.scale = -0.37;
    TRY(entropies(at, &desc, LOGITS_PLAIN, targets));
    desc.ignore_index = 1; /* a word of the vocabulary */
    for (int i = 0; i < ROWS; i++) targets[i] = i % 6 == 4 || vocab == 1 ? 1 : targets[i];
    TRY(entropies(at, &desc, LOGITS_PLAIN, targets));
    for (int i = 0; i < ROWS; i++) targets[i] = 1; /* none counts */
    TRY(entropies(at, &desc, LOGITS_NAN, targets));
    desc.scale = 0;
    return entropies(at, &desc, LOGITS_NAN, targets);
}

//== norms ==================================================================================

static void norm_plain(int rms, double eps, const double *x, const double *w, const double *b,
                       const double *dy, int64_t n, double *y, double *dx, double *dw, double *db) {
    for (int i = 0; i < ROWS; i++, x += n, dy += n, y += n, dx += n) {
        double mean = 0, squares = 0, g = 0, gx = 0, r;
        for (int64_t j = 0; j < n && !rms; j++) mean += x[j] / (double)n;
        for (int64_t j = 0; j < n; j++) squares += (x[j] - mean) * (x[j] - mean) / (double)n;
        r = 1 / sqrt(squares + eps);
        for (int64_t j = 0; j < n; j++) {
            double normal = (x[j] - mean) * r;
            y[j] = normal * w[j] + (rms ? 0 : b[j]);
            dw[j] += dy[j] * normal;
            db[j] += dy[j];
            g += rms ? 0 : dy[j] * w[j] / (double)n;
            gx += dy[j] * w[j] * normal / (double)n;
        }
        for (int64_t j = 0; j < n; j++) dx[j] = r * (dy[j] * w[j] - g - (x[j] - mean) * r * gx);
    }
}

typedef struct normed {
    const place *at;
    ddp_tp_layer_norm *norm;
    void *x, *w, *b, *stats, *y;
    int64_t n;
} normed;

static ddp_result normed_value(void *user, double *value) {
    normed *it = (normed *)user;
    int64_t rows = own_rows(it->at), first = first_row(it->at) * it->n;
    RANKS_OK(it->at->group, ddp_tp_layer_norm_forward(it->norm, it->w, it->b, it->x, rows, it->stats, it->y));
    *value = 0;
    for (int64_t i = 0; i < rows * it->n; i++)
        *value += number(24 * 1000003 + (uint64_t)(first + i)) * get(it->at, it->y, i);
    return joined(it->at, value);
}

static ddp_result norm_slopes(normed *it, const double *dx, const double *dw, const double *db) {
    const place *at = it->at;
    int64_t rows = own_rows(at);
    for (int64_t k = 0; k < ROWS * it->n; k += ROWS * it->n / 9 + 1) {
        int64_t mine = k - first_row(at) * it->n;
        int is_mine = mine >= 0 && mine < rows * it->n;
        TRY(slope_is(at, "norm dx", normed_value, it, is_mine ? (double *)it->x + mine : NULL,
                     is_mine ? dx[mine] : 0));
    }
    for (int64_t j = 0; j < it->n; j += it->n / 4 + 1) {
        TRY(slope_is(at, "norm weight", normed_value, it, (double *)it->w + j, dw[j]));
        if (it->b) TRY(slope_is(at, "norm bias", normed_value, it, (double *)it->b + j, db[j]));
    }
    return DDP_OK;
}

static ddp_result norm(const place *at, int rms, int64_t n, double eps) {
    int64_t rows = own_rows(at), first = first_row(at) * n;
    ddp_tp_layer_norm_desc desc = DDP_ZERO;
    normed it = DDP_ZERO;
    size_t many = (size_t)(ROWS * n);
    double *x = exactly(21, ROWS * n), *w = exactly(22, n), *b = exactly(23, n), *dy = exactly(24, ROWS * n);
    double *y = (double *)take(many), *want_dx = (double *)take(many), *want_dw = (double *)take((size_t)n),
           *want_db = (double *)take((size_t)n);
    void *dy_mine = numbers(at, 24, first, rows * n), *dx = take(many), *dx_alone = take(many);
    void *dw = numbers(at, 25, 0, n), *db = rms ? NULL : numbers(at, 26, 0, n),
         *dw_alone = numbers(at, 25, 0, n), *db_alone = rms ? NULL : numbers(at, 26, 0, n);
    desc.channels = n;
    desc.rms = rms ? 1 + at->rank : 0; /* any value but 0 */
    desc.eps = eps;
    norm_plain(rms, eps ? eps : 1e-5, x, w, b, dy, n, y, want_dx, want_dw, want_db);
    it.at = at;
    it.n = n;
    it.x = numbers(at, 21, first, rows * n);
    it.w = numbers(at, 22, 0, n);
    it.b = rms ? NULL : numbers(at, 23, 0, n);
    it.y = take(many);
    it.stats = take(2 * ROWS);
    RANKS_OK(at->group, ddp_tp_layer_norm_create(&it.norm, at->tp, &desc));
    ddp_tp_reset_stats(at->tp);
    RANKS_OK(at->group, ddp_tp_layer_norm_forward(it.norm, it.w, it.b, it.x, rows, it.stats, it.y));
    RANKS_OK(at->group,
             ddp_tp_layer_norm_backward(it.norm, it.w, it.x, it.stats, dy_mine, rows, dx_alone, NULL, NULL));
    TRY(counted(at, "norm forward, and backward without weights", 0, 0));
    NEAR(at, it.y, y + first, rows * n);
    RANKS_OK(at->group, ddp_tp_layer_norm_backward(it.norm, it.w, it.x, it.stats, dy_mine, rows, dx, dw, db));
    TRY(counted(at, "norm backward", (uint64_t)at->sequence_parallel,
                at->sequence_parallel * (rms ? 2.0 : 4.0) * (double)n * (at->ranks - 1) / at->ranks));
    NEAR(at, dx, want_dx + first, rows * n);
    RANKS_CHECK(at->group, memcmp(dx, dx_alone, bytes_of(at, rows * n)) == 0, "%s", "dx by itself differs");
    if (at->dtype == DDP_F64) TRY(norm_slopes(&it, (double *)dx, want_dw, want_db));
    for (int64_t j = 0; j < n && at->accumulate; j++)
        want_dw[j] += number(25 * 1000003 + (uint64_t)j), want_db[j] += number(26 * 1000003 + (uint64_t)j);
    NEAR(at, dw, want_dw, n);
    if (db) NEAR(at, db, want_db, n);
    RANKS_OK(at->group, ddp_tp_layer_norm_backward(it.norm, it.w, it.x, it.stats, dy_mine, rows, NULL,
                                                   dw_alone, db_alone));
    RANKS_CHECK(at->group,
                memcmp(dw, dw_alone, bytes_of(at, n)) == 0
                    && (rms || memcmp(db, db_alone, bytes_of(at, n)) == 0),
                "%s", "weights by themselves differ");
    RANKS_OK(at->group,
             ddp_tp_layer_norm_backward(it.norm, it.w, it.x, it.stats, dy_mine, rows, dy_mine, dw, db));
    RANKS_CHECK(at->group, memcmp(dx, dy_mine, bytes_of(at, rows * n)) == 0, "%s", "in place dx differs");
    ddp_tp_layer_norm_destroy(it.norm);
    drop();
    return DDP_OK;
}

/* Rows far from zero: their differences keep their digits. */
static ddp_result norm_far(const place *at) {
    int64_t n = 33, rows = own_rows(at);
    ddp_tp_layer_norm_desc desc = DDP_ZERO;
    ddp_tp_layer_norm *layer;
    double *want = (double *)take((size_t)(rows * n));
    void *x = take((size_t)(rows * n)), *y = take((size_t)(rows * n)), *stats = take((size_t)(2 * rows)),
         *w = take((size_t)n), *b = take((size_t)n);
    desc.channels = n;
    for (int64_t j = 0; j < n; j++) put(at, w, j, 1);
    for (int64_t i = 0; i < rows; i++) {
        double squares = 0;
        for (int64_t j = 0; j < n; j++)
            put(at, x, i * n + j, 65536 + (double)(j - 16) / 64),
                squares += (double)((j - 16) * (j - 16)) / 4096 / (double)n;
        for (int64_t j = 0; j < n; j++) want[i * n + j] = (double)(j - 16) / 64 / sqrt(squares + 1e-5);
    }
    RANKS_OK(at->group, ddp_tp_layer_norm_create(&layer, at->tp, &desc));
    RANKS_OK(at->group, ddp_tp_layer_norm_forward(layer, w, b, x, rows, stats, y));
    NEAR(at, y, want, rows * n);
    ddp_tp_layer_norm_destroy(layer);
    drop();
    return DDP_OK;
}

//== dropout ================================================================================

/* Philox 4x32-10 as described by its authors; its known answers are checked. */
static void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t k[2] = {key[0], key[1]};
    memcpy(out, counter, 16);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = UINT64_C(0xD2511F53) * out[0], p1 = UINT64_C(0xCD9E8D57) * out[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ out[1] ^ k[0], (uint32_t)p1,
                            (uint32_t)(p0 >> 32) ^ out[3] ^ k[1], (uint32_t)p0};
        memcpy(out, next, 16);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
}

static ddp_result philox_is_philox(ddp_group *group) {
    static const uint32_t in[3][6] = {
        {0, 0, 0, 0, 0, 0},
        {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu},
        {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xa4093822u, 0x299f31d0u},
    };
    static const uint32_t known[3][4] = {
        {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u},
        {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu},
        {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        philox(in[i], in[i] + 4, out);
        RANKS_CHECK(group, memcmp(out, known[i], 16) == 0, "answer %d", i);
    }
    return DDP_OK;
}

static int is_dropped(uint64_t key, uint64_t element, double rate) {
    uint32_t counter[4] = {(uint32_t)(element / 4), (uint32_t)(element / 4 >> 32), 0, 0},
             k[2] = {(uint32_t)key, (uint32_t)(key >> 32)}, out[4];
    philox(counter, k, out);
    return (double)out[element % 4] < rate * 4294967296.0;
}

/* A part of an activation has the mask of the full one, wherever it is sharded and however large its offset
   is. */
static ddp_result dropout_part(const place *at, const ddp_tp_dropout_desc *desc, int64_t rows,
                               int64_t columns) {
    int64_t width = desc->columns ? desc->columns : columns;
    void *x = numbers(at, 31, 0, rows * columns), *y = take((size_t)(rows * columns)),
         *dx = take((size_t)(rows * columns));
    void *dy = numbers(at, 32, 0, rows * columns);
    double *want = (double *)take((size_t)(rows * columns)),
           *want_dx = (double *)take((size_t)(rows * columns));
    for (int64_t k = 0; k < rows * columns; k++) {
        uint64_t element = (uint64_t)((desc->first_row + k / columns) * width + desc->first_column
                                      + k % columns);
        int dropped = is_dropped(desc->key, element, desc->rate);
        if (dropped && k % 2) put(at, x, k, NAN); /* a dropped element must not be read */
        want[k] = dropped ? 0 : get(at, x, k) / (1 - desc->rate);
        want_dx[k] = dropped ? 0 : get(at, dy, k) / (1 - desc->rate);
    }
    RANKS_OK(at->group, ddp_tp_dropout(at->tp, desc, x, rows, columns, y));
    TRY(compare(at, "dropout", y, want, rows * columns, 3e-7));
    RANKS_OK(at->group, ddp_tp_dropout(at->tp, desc, dy, rows, columns, dx));
    TRY(compare(at, "dropout backward", dx, want_dx, rows * columns, 3e-7));
    RANKS_OK(at->group, ddp_tp_dropout(at->tp, desc, x, rows, columns, x));
    RANKS_CHECK(at->group, memcmp(x, y, bytes_of(at, rows * columns)) == 0, "%s", "in place it differs");
    drop();
    return DDP_OK;
}

static ddp_result dropout_rate(const place *at) {
    const int64_t rows = 250, columns = 401;
    void *x = take((size_t)(rows * columns)), *y = take((size_t)(rows * columns)),
         *other = take((size_t)(rows * columns));
    for (int64_t k = 0; k < rows * columns; k++) put(at, x, k, 1);
    for (int r = 0; r < 4; r++) {
        static const double rates[] = {0.1, 0.5, 0.9, 0.0001};
        double n = (double)(rows * columns), p, zeros = 0, both = 0, beside = 0;
        ddp_tp_dropout_desc desc = DDP_ZERO;
        p = desc.rate = rates[r];
        desc.key = 12345;
        RANKS_OK(at->group, ddp_tp_dropout(at->tp, &desc, x, rows, columns, y));
        desc.key++;
        RANKS_OK(at->group, ddp_tp_dropout(at->tp, &desc, x, rows, columns, other));
        for (int64_t k = 0; k < rows * columns; k++) {
            int gone = get(at, y, k) == 0;
            zeros += gone;
            both += gone && get(at, other, k) == 0;
            beside += gone && k && get(at, y, k - 1) == 0;
        }
        RANKS_CHECK(at->group, fabs(zeros - n * p) < 4 * sqrt(n * p * (1 - p)),
                    "rate %g: %g of %g are dropped", p, zeros, n);
        RANKS_CHECK(at->group, fabs(both - n * p * p) < 4 * sqrt(n * p * p) + 1,
                    "rate %g: keys share %g of %g", p, both, n);
        RANKS_CHECK(at->group, fabs(beside - n * p * p) < 6 * sqrt(n * p * p) + 1,
                    "rate %g: %g of %g neighbours", p, beside, n);
    }
    drop();
    return DDP_OK;
}

static ddp_result dropout(const place *at) {
    ddp_tp_dropout_desc desc = DDP_ZERO;
    ddp_tp_stats stats = DDP_ZERO;
    ddp_tp_reset_stats(at->tp);
    desc.key = UINT64_C(0x123456789abcdef0);
    desc.rate = 0.3;
    TRY(dropout_part(at, &desc, 5, 7));
    desc.first_row = at->rank * 3; /* cut by rows */
    TRY(dropout_part(at, &desc, 3, 9));
    desc.first_row = 2;
    desc.first_column = at->rank * 3; /* by columns */
    desc.columns = at->ranks * 3 + 1;
    TRY(dropout_part(at, &desc, 4, 3));
    desc.first_row = INT64_C(1) << 40;
    desc.columns = (1 << 20) + 3;
    TRY(dropout_part(at, &desc, 2, 1003));
    desc.rate = 0;
    TRY(dropout_part(at, &desc, 2, 5));
    desc.rate = 0.999999;
    TRY(dropout_part(at, &desc, 2, 50));
    RANKS_OK(at->group, ddp_tp_dropout(at->tp, &desc, NULL, 0, 5, NULL));
    TRY(dropout_rate(at));
    RANKS_OK(at->group, ddp_tp_get_stats(at->tp, &stats));
    RANKS_CHECK(at->group, stats.collectives == 0, "%s", "dropout talks");
    return DDP_OK;
}

//== bad input ==============================================================================

/* The call fails with such a line; two words of it. */
static ddp_result fails(ddp_group *group, const char *what, ddp_result have, ddp_result want, const char *one,
                        const char *two) {
    RANKS_CHECK(group, have == want && strstr(ddp_last_error(), one) && strstr(ddp_last_error(), two),
                "%s is %s: \"%s\", which should be %s and have \"%s\" and \"%s\"", what,
                ddp_result_name(have), ddp_last_error(), ddp_result_name(want), one, two);
    return DDP_OK;
}
#define FAILS(at, call, one, two) TRY(fails((at)->group, #call, call, DDP_ERR_INVALID, one, two))

static ddp_result bad_embedding(const place *at) {
    ddp_tp_embedding_desc desc = DDP_ZERO;
    ddp_tp_embedding *layer = NULL;
    int32_t tokens[ROWS + 1] = {0};
    double weight[64] = {0}, y[64 * ROWS];
    desc.vocab = 10;
    FAILS(at, ddp_tp_embedding_create(NULL, at->tp, &desc), "ddp_tp_embedding_create", "out is NULL");
    FAILS(at, ddp_tp_embedding_create(&layer, NULL, &desc), "ddp_tp_embedding_create", "tp is NULL");
    FAILS(at, ddp_tp_embedding_create(&layer, at->tp, NULL), "ddp_tp_embedding_create", "desc is NULL");
    FAILS(at, ddp_tp_embedding_create(&layer, at->tp, &desc), "vocab=10", "channels=0");
    desc.channels = INT64_MAX / 16;
    FAILS(at, ddp_tp_embedding_create(&layer, at->tp, &desc), "do not fit", "10 rows");
    desc.channels = 3;
    desc.padded_vocab = 9;
    FAILS(at, ddp_tp_embedding_create(&layer, at->tp, &desc), "padded_vocab=9", "vocab=10");
    desc.padded_vocab = 0;
    if (at->ranks > 1) {
        desc.vocab = at->rank == 1 ? 11 : 10;
        TRY(fails(at->group, "other vocab", ddp_tp_embedding_create(&layer, at->tp, &desc), DDP_ERR_MISMATCH,
                  "rank 0 vocab=10,", "rank 1 vocab=11;"));
        desc.padded_vocab = 16;
        TRY(fails(at->group, "other vocab, same padding", ddp_tp_embedding_create(&layer, at->tp, &desc),
                  DDP_ERR_MISMATCH, "rank 0 vocab=10,", "rank 1 vocab=11;"));
        desc.padded_vocab = 0;
        TRY(fails(at->group, "bad on one",
                  ddp_tp_embedding_create(&layer, at->tp, at->rank == 1 ? NULL : &desc), DDP_ERR_INVALID,
                  "rank 1", "desc is NULL"));
        desc.vocab = 10;
    }
    RANKS_CHECK(at->group, layer == NULL, "%s", "a layer after all");
    RANKS_OK(at->group, ddp_tp_embedding_create(&layer, at->tp, &desc));
    FAILS(at, ddp_tp_embedding_box(layer, NULL), "ddp_tp_embedding_box", "box is NULL");
    FAILS(at, ddp_tp_embedding_box(NULL, NULL), "ddp_tp_embedding_box", "embedding is NULL");
    FAILS(at, ddp_tp_embedding_forward(NULL, weight, tokens, 1, y), "ddp_tp_embedding_forward",
          "embedding is NULL");
    FAILS(at, ddp_tp_embedding_backward(NULL, tokens, y, 1, weight), "ddp_tp_embedding_backward",
          "embedding is NULL");
    FAILS(at, ddp_tp_embedding_forward(layer, weight, tokens, -1, y), "ddp_tp_embedding_forward", "rows=-1");
    FAILS(at, ddp_tp_embedding_forward(layer, weight, tokens, ROWS + 1, y), "ddp_tp_embedding_forward",
          "rows=25");
    if (at->sequence_parallel && at->ranks > 1)
        FAILS(at, ddp_tp_embedding_backward(layer, tokens, y, at->ranks + 1, weight),
              "rows=", "sequence_parallel");
    FAILS(at, ddp_tp_embedding_forward(layer, weight, NULL, ROWS, y), "ddp_tp_embedding_forward",
          "tokens is NULL");
    FAILS(at, ddp_tp_embedding_forward(layer, weight, tokens, ROWS, NULL), "ddp_tp_embedding_forward",
          "y is NULL");
    FAILS(at, ddp_tp_embedding_backward(layer, tokens, NULL, ROWS, weight), "ddp_tp_embedding_backward",
          "dy is NULL");
    tokens[5] = 10;
    FAILS(at, ddp_tp_embedding_forward(layer, weight, tokens, ROWS, y), "tokens[5]=10", "0 to 9");
    tokens[5] = -1;
    FAILS(at, ddp_tp_embedding_backward(layer, tokens, y, ROWS, weight), "tokens[5]=-1", "0 to 9");
    tokens[5] = 9;
    /* The group is unaffected. */
    RANKS_OK(at->group, ddp_tp_embedding_forward(layer, weight, tokens, ROWS, y));
    RANKS_OK(at->group, ddp_tp_embedding_forward(layer, weight, NULL, 0, NULL));
    RANKS_OK(at->group, ddp_tp_embedding_backward(layer, NULL, NULL, 0, weight));
    ddp_tp_embedding_destroy(layer);
    ddp_tp_embedding_destroy(NULL);
    desc.padded_vocab = 16; /* rows 10 to 15 belong to no token */
    RANKS_OK(at->group, ddp_tp_embedding_create(&layer, at->tp, &desc));
    tokens[5] = 10;
    FAILS(at, ddp_tp_embedding_forward(layer, weight, tokens, ROWS, y), "tokens[5]=10", "0 to 9");
    FAILS(at, ddp_tp_embedding_backward(layer, tokens, y, ROWS, weight), "tokens[5]=10", "0 to 9");
    tokens[5] = 9;
    RANKS_OK(at->group, ddp_tp_embedding_forward(layer, weight, tokens, ROWS, y));
    ddp_tp_embedding_destroy(layer);
    return DDP_OK;
}

static ddp_result bad_loss(const place *at) {
    ddp_tp_loss_desc desc = DDP_ZERO;
    int32_t targets[ROWS + 1] = {0};
    double logits[16 * ROWS] = {0}, mean = 7;
    FAILS(at, ddp_tp_cross_entropy(NULL, &desc, logits, targets, 1, NULL, NULL, NULL), "ddp_tp_cross_entropy",
          "tp is NULL");
    FAILS(at, ddp_tp_cross_entropy(at->tp, NULL, logits, targets, 1, NULL, NULL, NULL),
          "ddp_tp_cross_entropy", "desc is NULL");
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, 1, NULL, NULL, NULL),
          "ddp_tp_cross_entropy", "vocab=0");
    desc.vocab = 10;
    desc.padded_vocab = 8;
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, 1, NULL, NULL, NULL), "padded_vocab=8",
          "vocab=10");
    desc.padded_vocab = 12;
    desc.z_loss = -1;
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, 1, NULL, NULL, NULL), "z_loss=-1",
          "0 or more");
    desc.z_loss = NAN;
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, 1, NULL, NULL, NULL),
          "z_loss=", "0 or more");
    desc.z_loss = 0;
    desc.scale = INFINITY;
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, 1, NULL, NULL, NULL), "scale=inf",
          "finite");
    desc.scale = 0;
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, ROWS + 1, NULL, NULL, NULL), "rows=25",
          "max_rows=24");
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, NULL, ROWS, NULL, NULL, NULL),
          "ddp_tp_cross_entropy", "targets is NULL");
    if (at->rank == 0 || at->ranks == 1) { /* a rank without logits needs none */
        FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, NULL, targets, ROWS, NULL, NULL, NULL),
              "ddp_tp_cross_entropy", "logits is NULL");
    }
    targets[3] = 10;
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, ROWS, NULL, NULL, NULL), "targets[3]=10",
          "0 to 9");
    targets[3] = -1;
    FAILS(at, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, ROWS, NULL, NULL, NULL), "targets[3]=-1",
          "ignore_index=-100");
    targets[3] = 9;
    RANKS_OK(at->group, ddp_tp_cross_entropy(at->tp, &desc, logits, targets, ROWS, NULL, &mean, NULL));
    RANKS_CHECK(at->group, fabs(mean - log(10)) < 1e-5, "%g, not log 10", mean);
    RANKS_OK(at->group, ddp_tp_cross_entropy(at->tp, &desc, NULL, NULL, 0, NULL, &mean, NULL));
    RANKS_CHECK(at->group, mean == 0, "%g of no rows", mean);
    return DDP_OK;
}

static ddp_result bad_norm(const place *at) {
    ddp_tp_layer_norm_desc desc = DDP_ZERO;
    ddp_tp_layer_norm *layer = NULL, *rms;
    double w[4] = {0}, x[4 * (ROWS + 1)] = {0}, y[4 * (ROWS + 1)], stats[2 * (ROWS + 1)] = {0};
    FAILS(at, ddp_tp_layer_norm_create(NULL, at->tp, &desc), "ddp_tp_layer_norm_create", "out is NULL");
    FAILS(at, ddp_tp_layer_norm_create(&layer, NULL, &desc), "ddp_tp_layer_norm_create", "tp is NULL");
    FAILS(at, ddp_tp_layer_norm_create(&layer, at->tp, NULL), "ddp_tp_layer_norm_create", "desc is NULL");
    FAILS(at, ddp_tp_layer_norm_create(&layer, at->tp, &desc), "ddp_tp_layer_norm_create", "channels=0");
    desc.channels = INT64_MAX;
    FAILS(at, ddp_tp_layer_norm_create(&layer, at->tp, &desc), "ddp_tp_layer_norm_create",
          "channels=9223372036854775807");
    desc.channels = 4;
    desc.eps = -1;
    FAILS(at, ddp_tp_layer_norm_create(&layer, at->tp, &desc), "eps=-1", "0 or more");
    desc.eps = 0;
    if (at->ranks > 1) {
        desc.eps = at->rank ? 1e-6 : 0;
        TRY(fails(at->group, "other eps", ddp_tp_layer_norm_create(&layer, at->tp, &desc), DDP_ERR_MISMATCH,
                  "rank 0 eps=", "rank 1 eps="));
        desc.eps = 0;
    }
    RANKS_CHECK(at->group, layer == NULL, "%s", "a layer after all");
    RANKS_OK(at->group, ddp_tp_layer_norm_create(&layer, at->tp, &desc));
    desc.rms = 1;
    RANKS_OK(at->group, ddp_tp_layer_norm_create(&rms, at->tp, &desc));
    FAILS(at, ddp_tp_layer_norm_forward(NULL, w, w, x, 1, stats, y), "ddp_tp_layer_norm_forward",
          "norm is NULL");
    FAILS(at, ddp_tp_layer_norm_backward(NULL, w, x, stats, x, 1, y, NULL, NULL),
          "ddp_tp_layer_norm_backward", "norm is NULL");
    FAILS(at, ddp_tp_layer_norm_forward(layer, w, w, x, own_rows(at) + 1, stats, y), "rows=", "on this rank");
    FAILS(at, ddp_tp_layer_norm_forward(layer, w, w, x, -1, stats, y), "ddp_tp_layer_norm_forward",
          "rows=-1");
    FAILS(at, ddp_tp_layer_norm_forward(layer, NULL, w, x, 1, stats, y), "ddp_tp_layer_norm_forward",
          "weight is NULL");
    FAILS(at, ddp_tp_layer_norm_forward(layer, w, NULL, x, 1, stats, y), "ddp_tp_layer_norm_forward",
          "bias is NULL");
    FAILS(at, ddp_tp_layer_norm_forward(rms, w, w, x, 1, stats, y), "ddp_tp_layer_norm_forward",
          "but RMSNorm has no");
    FAILS(at, ddp_tp_layer_norm_forward(layer, w, w, NULL, 1, stats, y), "ddp_tp_layer_norm_forward",
          "x is NULL");
    FAILS(at, ddp_tp_layer_norm_forward(layer, w, w, x, 1, NULL, y), "ddp_tp_layer_norm_forward",
          "stats is NULL");
    FAILS(at, ddp_tp_layer_norm_forward(layer, w, w, x, 1, stats, NULL), "ddp_tp_layer_norm_forward",
          "y is NULL");
    FAILS(at, ddp_tp_layer_norm_backward(layer, w, x, stats, NULL, 1, y, NULL, NULL),
          "ddp_tp_layer_norm_backward", "dy is NULL");
    FAILS(at, ddp_tp_layer_norm_backward(layer, w, x, stats, x, 1, y, w, NULL), "ddp_tp_layer_norm_backward",
          "both, or neither");
    FAILS(at, ddp_tp_layer_norm_backward(layer, w, x, stats, x, 1, y, NULL, w), "ddp_tp_layer_norm_backward",
          "both, or neither");
    FAILS(at, ddp_tp_layer_norm_backward(rms, w, x, stats, x, 1, y, w, w), "ddp_tp_layer_norm_backward",
          "but RMSNorm has no");
    ddp_tp_layer_norm_destroy(layer);
    ddp_tp_layer_norm_destroy(rms);
    ddp_tp_layer_norm_destroy(NULL);
    return DDP_OK;
}

static ddp_result bad_dropout(const place *at) {
    ddp_tp_dropout_desc desc = DDP_ZERO;
    double x[16] = {0};
    FAILS(at, ddp_tp_dropout(NULL, &desc, x, 1, 4, x), "ddp_tp_dropout", "tp is NULL");
    FAILS(at, ddp_tp_dropout(at->tp, NULL, x, 1, 4, x), "ddp_tp_dropout", "desc is NULL");
    desc.rate = 1;
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, 4, x), "rate=1", "below 1");
    desc.rate = NAN;
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, 4, x), "rate=", "below 1");
    desc.rate = 0.5;
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, -1, 4, x), "rows=-1", "use 0 or more");
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, -4, x), "columns=-4", "use 0 or more");
    FAILS(at, ddp_tp_dropout(at->tp, &desc, NULL, 1, 4, x), "ddp_tp_dropout", "x is NULL");
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, 4, NULL), "ddp_tp_dropout", "y is NULL");
    desc.columns = 6;
    desc.first_column = 3;
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, 4, x), "first_column=3", "6 columns");
    desc.first_column = INT64_MAX;
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, 4, x), "first_column=9223372036854775807", "6 columns");
    desc.first_column = 0;
    desc.first_row = -1;
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, 4, x), "first_row=-1", "6 columns");
    desc.first_row = INT64_MAX / 2;
    FAILS(at, ddp_tp_dropout(at->tp, &desc, x, 1, 4, x), "1 rows from first_row=4611686018427387903", "2^63");
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

static ddp_result nothing_is_allocated(const place *at) {
    enum { VOCAB = 10, CHANNELS = 5 };
    ddp_tp_embedding_desc words = DDP_ZERO;
    ddp_tp_layer_norm_desc normal = DDP_ZERO;
    ddp_tp_loss_desc loss = DDP_ZERO;
    ddp_tp_dropout_desc dropped = DDP_ZERO;
    ddp_tp_embedding *embedded;
    ddp_tp_layer_norm *normed;
    int64_t rows = own_rows(at), before = 0;
    int32_t tokens[ROWS];
    void *table = take(VOCAB * CHANNELS), *x = take(ROWS * CHANNELS), *y = take(ROWS * CHANNELS),
         *stats = take(2 * ROWS);
    void *logits = take(ROWS * VOCAB), *w = take(CHANNELS), *b = take(CHANNELS);
    words.vocab = loss.vocab = VOCAB;
    words.channels = normal.channels = CHANNELS;
    dropped.rate = 0.1;
    tokens_of(tokens, VOCAB);
    RANKS_OK(at->group, ddp_tp_embedding_create(&embedded, at->tp, &words));
    RANKS_OK(at->group, ddp_tp_layer_norm_create(&normed, at->tp, &normal));
    for (int turn = 0; turn < 3; turn++) {
        RANKS_OK(at->group, ddp_barrier(at->group));
        before = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
        RANKS_OK(at->group, ddp_barrier(at->group));
        RANKS_OK(at->group, ddp_tp_embedding_forward(embedded, table, tokens, ROWS, x));
        RANKS_OK(at->group, ddp_tp_dropout(at->tp, &dropped, x, rows, CHANNELS, x));
        RANKS_OK(at->group, ddp_tp_layer_norm_forward(normed, w, b, x, rows, stats, y));
        RANKS_OK(at->group, ddp_tp_cross_entropy(at->tp, &loss, logits, tokens, ROWS, NULL, NULL, logits));
        RANKS_OK(at->group, ddp_tp_layer_norm_backward(normed, w, x, stats, y, rows, x, w, b));
        RANKS_OK(at->group, ddp_tp_embedding_backward(embedded, tokens, x, ROWS, table));
        RANKS_OK(at->group, ddp_barrier(at->group));
        RANKS_CHECK(at->group, turn == 0 || before == __atomic_load_n(&allocations, __ATOMIC_SEQ_CST),
                    "turn %d takes memory", turn);
        RANKS_OK(at->group, ddp_barrier(at->group));
    }
    ddp_tp_embedding_destroy(embedded);
    ddp_tp_layer_norm_destroy(normed);
    drop();
    return DDP_OK;
}

//== all of them ============================================================================

static ddp_result in_a_context(ddp_group *group, ddp_dtype dtype, int sequence_parallel, int accumulate) {
    static const int64_t vocabs[][2] = {{17, 0}, {16, 24}, {10, 19}, {3, 0}, {1, 16}};
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp_stats stats = DDP_ZERO;
    place at = DDP_ZERO;
    at.group = group;
    at.dtype = dtype;
    at.rank = ddp_rank(group);
    at.ranks = ddp_world_size(group);
    at.sequence_parallel = sequence_parallel;
    at.accumulate = accumulate;
    at.near = dtype == DDP_F32 ? 1e-5 : 1e-11;
    desc.dtype = dtype;
    desc.max_rows = ROWS;
    desc.sequence_parallel = sequence_parallel;
    desc.accumulate_grads = accumulate;
    RANKS_OK(group, ddp_tp_create(&at.tp, group, &desc));
    RANKS_OK(group, ddp_tp_get_stats(at.tp, &stats));
    RANKS_CHECK(group, stats.workspace_bytes >= 3 * ROWS * ddp_dtype_size(dtype),
                "%zu bytes are too few for cross-entropy", stats.workspace_bytes);
    for (int v = 0; v < 5; v++) {
        RANKS_RUN(group, embedding(&at, vocabs[v][0], vocabs[v][1], v == 2 ? 1 : 6 + v));
        RANKS_RUN(group, cross_entropy(&at, vocabs[v][0], vocabs[v][1]));
    }
    RANKS_RUN(group, cross_entropy(&at, 300, 0)); /* more than one round of every loop */
    for (int rms = 0; rms < 2; rms++) {
        RANKS_RUN(group, norm(&at, rms, 1, 0.1)); /* one channel's variance is 0 */
        RANKS_RUN(group, norm(&at, rms, 7, 0));
        RANKS_RUN(group, norm(&at, rms, 100, 1e-3));
    }
    RANKS_RUN(group, norm_far(&at));
    RANKS_RUN(group, dropout(&at));
    RANKS_RUN(group, bad_embedding(&at));
    RANKS_RUN(group, bad_loss(&at));
    RANKS_RUN(group, bad_norm(&at));
    RANKS_RUN(group, bad_dropout(&at));
    RANKS_RUN(group, nothing_is_allocated(&at));
    ddp_tp_destroy(at.tp);
    return DDP_OK;
}

static ddp_result cases(ddp_group *group, void *user) {
    (void)user;
    RANKS_RUN(group, philox_is_philox(group));
    RANKS_RUN(group, in_a_context(group, DDP_F64, 0, 1));
    RANKS_RUN(group, in_a_context(group, DDP_F64, 1, 0));
    RANKS_RUN(group, in_a_context(group, DDP_F32, 0, 0));
    RANKS_RUN(group, in_a_context(group, DDP_F32, 1, 1));
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 3, 4, 8, 0};
    ranks_mode mode;
    ranks_memory.alloc_fn = counting_alloc;
    ranks_memory.free_fn = counting_free;
    return ranks_each(argc, argv, worlds, 120, &mode, cases) != 0;
}

/*  test_training.c - parts of a training loop (examples/extras/training.h and batch_norm.h): metrics count
    every sample once, all ranks stop early together, drift is detected and named, rank 0 prepares for longer
    than a timeout, messages of any size arrive, and batch norm over all ranks has the bits of one rank.

    test_training BACKEND [W ...]     one of support/ranks.h */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "batch_norm.h"
#include "training.h"

#include <signal.h>

//== metrics ================================================================================

enum { SAMPLES = 103 };

/* From 1e-18 to 1e18, of both signs: a sum in another order would have other bits. */
static double value_of(int64_t sample) {
    uint64_t bits = ranks_mix((uint64_t)sample);
    return ldexp((double)(int64_t)bits, (int)(bits % 61) - 123);
}

static metric_total expected(void) {
    ddp_exact_sum sum;
    metric_total total;
    ddp_exact_sum_clear(&sum);
    for (int s = 0; s < SAMPLES; s++) ddp_exact_sum_add(&sum, value_of(s));
    total.sum = ddp_exact_sum_value(&sum);
    total.count = SAMPLES;
    total.mean = total.sum / SAMPLES;
    return total;
}

static int same_total(const metric_total *a, const metric_total *b) {
    return memcmp(&a->sum, &b->sum, 8) == 0 && memcmp(&a->mean, &b->mean, 8) == 0 && a->count == b->count;
}

/* A rank's part of the data set. tell_padding 0: as in a caller that forgets to pass the padding on. */
static ddp_result add_part(ddp_group *world, metric *m, int no_pad, int64_t global_batch, int tell_padding) {
    ddp_sampler_desc desc = DDP_ZERO;
    ddp_sampler sampler;
    int64_t sample;
    int is_padding;
    desc.dataset_size = SAMPLES;
    desc.num_replicas = ddp_world_size(world);
    desc.rank = ddp_rank(world);
    desc.no_pad = no_pad;
    desc.global_batch = global_batch;
    RANKS_OK(world, ddp_sampler_init(&sampler, &desc));
    while ((sample = ddp_sampler_next(&sampler, &is_padding)) >= 0) {
        metric_add(&m[0], value_of(sample), tell_padding && is_padding);
        metric_add(&m[1], sample % 3 == 0, tell_padding && is_padding);
    }
    ddp_sampler_free(&sampler);
    return DDP_OK;
}

static ddp_result counts_once(ddp_group *world) {
    metric m[2];
    metric_total total[2], want = expected();
    int w = ddp_world_size(world);
    memset(m, 0, sizeof m);
    /* After that, metrics start from zero automatically. */
    for (int way = 0; way < 3; way++) {
        ddp_result result = add_part(world, m, way == 0, way == 2 ? 8 * w : 0, 1);
        if (result != DDP_OK) return result;
        RANKS_OK(world, metric_all_reduce(world, m, 2, SAMPLES, total));
        RANKS_CHECK(world, same_total(&total[0], &want), "way %d: %.17g of %lld, wanted %.17g", way,
                    total[0].mean, (long long)total[0].count, want.mean);
        RANKS_CHECK(world, total[1].sum == 35 && total[1].mean == 35.0 / SAMPLES, "way %d: %g are thirds",
                    way, total[1].sum);
    }
    return DDP_OK;
}

#define REFUSED(world, call, code, words)                                                    \
    do {                                                                                     \
        ddp_result refused_result = (call);                                                  \
        RANKS_CHECK(world, refused_result == (code) && strstr(ddp_last_error(), words),      \
                    "wanted \"%s\", have %s \"%s\"", words, ddp_result_name(refused_result), \
                    ddp_last_error());                                                       \
    } while (0)

static ddp_result wrong_counts(ddp_group *world) {
    metric m[2];
    metric_total total[2], untouched, want = expected();
    char text[96];
    int w = ddp_world_size(world), padded = (SAMPLES + w - 1) / w * w;
    memset(m, 0, sizeof m);
    memset(&untouched, 7, sizeof untouched);
    total[0] = untouched;
    REFUSED(world, metric_all_reduce(world, m, 1, 0, total), DDP_ERR_INVALID,
            "metric_all_reduce: metric 0 of 1 has no samples");
    if (ddp_rank(world) == 0) metric_add(m, 1, 1);
    REFUSED(world, metric_all_reduce(world, m, 1, 0, total), DDP_ERR_INVALID, "metric 0 of 1 has no samples");
    if (padded > SAMPLES) {
        RANKS_OK(world, add_part(world, m, 0, 0, 0));
        snprintf(text, sizeof text, "metric 0 of 2 has %d samples, expected %d; pass is_padding", padded,
                 SAMPLES);
        REFUSED(world, metric_all_reduce(world, m, 2, SAMPLES, total), DDP_ERR_INVALID, text);
        memset(m, 0, sizeof m);
    }
    RANKS_OK(world, add_part(world, m, 1, 0, 1));
    REFUSED(world, metric_all_reduce(world, m, 2, SAMPLES + 1, total), DDP_ERR_INVALID,
            "103 samples, expected 104; evaluate the whole epoch");
    RANKS_CHECK(world, memcmp(&total[0], &untouched, sizeof untouched) == 0, "totals were written");
    RANKS_OK(world, metric_all_reduce(world, m, 2, 0, total)); /* nothing was lost */
    RANKS_CHECK(world, same_total(&total[0], &want), "%.17g, wanted %.17g", total[0].mean, want.mean);
    if (ddp_rank(world) == w - 1)
        metric_add(m, NAN, 0);
    else
        metric_add(m, 1, 0);
    RANKS_OK(world, metric_all_reduce(world, m, 1, 0, total));
    RANKS_CHECK(world, isnan(total[0].mean) && total[0].count == w, "%g of %lld", total[0].mean,
                (long long)total[0].count);
    REFUSED(world, metric_all_reduce(NULL, m, 1, 0, total), DDP_ERR_INVALID, "is NULL");
    REFUSED(world, metric_all_reduce(world, NULL, 1, 0, total), DDP_ERR_INVALID, "is NULL");
    REFUSED(world, metric_all_reduce(world, m, 1, 0, NULL), DDP_ERR_INVALID, "is NULL");
    REFUSED(world, metric_all_reduce(world, m, 0, 0, total), DDP_ERR_INVALID, "metric_count=0");
    REFUSED(world, metric_all_reduce(world, m, 1, -1, total), DDP_ERR_INVALID, "sample_count=-1");
    return DDP_OK;
}

/* Only one rank passes a wrong argument: all return the error at once, and the group and the metrics stay
   usable. */
static ddp_result metrics_wrong_on_one(ddp_group *world) {
    metric m[2];
    metric_total total[2];
    int w = ddp_world_size(world), wrong = ddp_rank(world) == w - 1;
    memset(m, 0, sizeof m);
    metric_add(&m[0], 1, 0);
    metric_add(&m[1], 2, 0);
    REFUSED(world, metric_all_reduce(world, wrong ? NULL : m, 2, 0, total), DDP_ERR_INVALID,
            "metrics or totals is NULL");
    REFUSED(world, metric_all_reduce(world, m, 2, 0, wrong ? NULL : total), DDP_ERR_INVALID,
            "metrics or totals is NULL");
    REFUSED(world, metric_all_reduce(world, m, wrong ? -3 : 2, 0, total), DDP_ERR_INVALID, "metric_count=-3");
    REFUSED(world, metric_all_reduce(world, m, 2, wrong ? -1 : 0, total), DDP_ERR_INVALID, "sample_count=-1");
    RANKS_CHECK(world, wrong || strncmp(ddp_last_error(), "on rank ", 8) == 0, "the rank is not named: %s",
                ddp_last_error());
    RANKS_OK(world, metric_all_reduce(world, m, 2, 0, total));
    RANKS_CHECK(world, total[0].sum == w && total[1].sum == 2 * w, "%g and %g", total[0].sum, total[1].sum);
    return DDP_OK;
}

//== drift ==================================================================================

enum { TENSORS = 4 };
static const int SIZES[TENSORS] = {1, 0, 1000, 37};
static const char *const NAMES[TENSORS] = {"scale", "nothing", "weight", NULL};

typedef struct weights {
    float values[1000 + 37 + 1];
    ddp_param params[TENSORS];
} weights;

static void fill_weights(weights *w) {
    float *at = w->values;
    memset(w, 0, sizeof *w);
    for (int i = 0; i < 1038; i++) w->values[i] = (float)i - 500;
    for (int i = 0; i < TENSORS; i++) {
        w->params[i].name = NAMES[i];
        w->params[i].value.data = SIZES[i] ? at : NULL;
        w->params[i].value.dtype = DDP_F32;
        w->params[i].value.ndim = 1;
        w->params[i].value.shape[0] = SIZES[i];
        at += SIZES[i];
    }
}

/* Every single bit counts, at any position; so do pairs of signs, which a weaker hash would cancel. */
static ddp_result hash_sees(ddp_group *world) {
    unsigned char data[77];
    uint64_t hash;
    for (int i = 0; i < 77; i++) data[i] = (unsigned char)(7 * i);
    hash = drift_hash(data, sizeof data);
    for (int bit = 0; bit < 77 * 8; bit++) {
        data[bit / 8] = (unsigned char)(data[bit / 8] ^ 1 << bit % 8);
        RANKS_CHECK(world, drift_hash(data, sizeof data) != hash, "bit %d", bit);
        data[bit / 8] = (unsigned char)(data[bit / 8] ^ 1 << bit % 8);
    }
    for (int first = 3; first < 77; first += 4)
        for (int second = first + 4; second < 77; second += 4) {
            data[first] ^= 128, data[second] ^= 128;
            RANKS_CHECK(world, drift_hash(data, sizeof data) != hash, "signs of %d and %d", first, second);
            data[first] ^= 128, data[second] ^= 128;
        }
    data[76] = 0;
    RANKS_CHECK(world, drift_hash(data, 77) != drift_hash(data, 76), "a zero at the end");
    return DDP_OK;
}

static ddp_result drift_is_named(ddp_group *world) {
    int w = ddp_world_size(world), rank = ddp_rank(world);
    weights mine;
    fill_weights(&mine);
    for (int step = 0; step <= 20; step++)
        RANKS_OK(world, drift_check(world, mine.params, TENSORS, step, 10));
    RANKS_OK(world, drift_check(world, NULL, 0, 0, 1));
    /* This step has no collective. */
    if (rank == 0) RANKS_OK(world, drift_check(world, mine.params, TENSORS, 11, 10));
    if (w == 1) return DDP_OK;
    if (rank == w - 1) mine.values[1 + 999] = 3;
    if (rank == w - 1) mine.values[1001 + 36] = -3;
    REFUSED(world, drift_check(world, mine.params, TENSORS, 30, 10), DDP_ERR_CORRUPT,
            "drift_check: step 30: parameter 2 \"weight\", the first of 2 that differ");
    fill_weights(&mine);
    mine.values[0] = 0;
    if (rank == 0) mine.values[0] = -0.0f;
    REFUSED(world, drift_check(world, mine.params, TENSORS, 40, 10), DDP_ERR_CORRUPT,
            "parameter 0 \"scale\", the first of 1 that differ");
    if (w > 2)
        RANKS_CHECK(world, strstr(ddp_last_error(), "has other values on rank 0 than on the other"), "%s",
                    ddp_last_error());
    fill_weights(&mine);
    if (w == 4 && rank % 2) mine.values[1001] = 9;
    if (w == 4)
        REFUSED(world, drift_check(world, mine.params, TENSORS, 40, 10), DDP_ERR_CORRUPT,
                "parameter 3 \"\", the first of 1 that differ, has other values on ranks 1 3 than on the "
                "other 2");
    fill_weights(&mine);
    REFUSED(world, drift_check(world, mine.params, rank == w - 1 ? TENSORS - 1 : TENSORS, 0, 1),
            DDP_ERR_MISMATCH, "param_count differs: it is 3 to 4");
    RANKS_OK(world, drift_check(world, mine.params, TENSORS, 50, 10)); /* the group stays usable */
    return DDP_OK;
}

static ddp_result drift_bad_input(ddp_group *world) {
    weights mine;
    fill_weights(&mine);
    REFUSED(world, drift_check(NULL, mine.params, TENSORS, 0, 1), DDP_ERR_INVALID, "NULL");
    REFUSED(world, drift_check(world, NULL, 1, 0, 1), DDP_ERR_INVALID, "NULL");
    REFUSED(world, drift_check(world, mine.params, -1, 0, 1), DDP_ERR_INVALID, "param_count=-1");
    REFUSED(world, drift_check(world, mine.params, TENSORS, -1, 1), DDP_ERR_INVALID, "step=-1");
    REFUSED(world, drift_check(world, mine.params, TENSORS, 0, 0), DDP_ERR_INVALID, "every=0");
    mine.params[2].value.data = NULL;
    REFUSED(world, drift_check(world, mine.params, TENSORS, 0, 1), DDP_ERR_INVALID,
            "parameter 2 \"weight\": value.data is NULL");
    fill_weights(&mine);
    mine.params[3].value.dtype = DDP_DTYPE_DEFAULT;
    REFUSED(world, drift_check(world, mine.params, TENSORS, 0, 1), DDP_ERR_INVALID, "parameter 3");
    return DDP_OK;
}

static ddp_result drift_wrong_on_one(ddp_group *world) {
    weights mine;
    int wrong = ddp_rank(world) == ddp_world_size(world) - 1;
    fill_weights(&mine);
    REFUSED(world, drift_check(world, wrong ? NULL : mine.params, TENSORS, 0, 1), DDP_ERR_INVALID,
            "params is NULL");
    REFUSED(world, drift_check(world, mine.params, wrong ? -1 : TENSORS, 0, 1), DDP_ERR_INVALID,
            "param_count=-1");
    REFUSED(world, drift_check(world, mine.params, TENSORS, wrong ? -1 : 20, 10), DDP_ERR_INVALID, "step=-1");
    REFUSED(world, drift_check(world, mine.params, TENSORS, 20, wrong ? 0 : 10), DDP_ERR_INVALID, "every=0");
    if (wrong) mine.params[2].value.data = NULL;
    REFUSED(world, drift_check(world, mine.params, TENSORS, 0, 1), DDP_ERR_INVALID,
            "parameter 2 \"weight\": value.data is NULL");
    RANKS_CHECK(world, wrong || strncmp(ddp_last_error(), "on rank ", 8) == 0, "the rank is not named: %s",
                ddp_last_error());
    fill_weights(&mine);
    RANKS_OK(world, drift_check(world, mine.params, TENSORS, 50, 10)); /* the group stays usable */
    return DDP_OK;
}

/* One rank checks for drift while the others do not: their next calls do not match, which is an error on all,
   long before the timeout of 60 s. */
static ddp_result looks_alone(ddp_group *world, void *user) {
    weights mine;
    int32_t word = 0;
    ddp_result result;
    double start = ranks_now();
    (void)user;
    fill_weights(&mine);
    result = drift_check(world, mine.params, TENSORS, ddp_rank(world) == 0 ? -1 : 11, 10);
    if (result == DDP_OK) result = ddp_all_reduce(world, &word, &word, 1, DDP_I32, DDP_OP_SUM, NULL);
    if ((result == DDP_ERR_MISMATCH || result == DDP_ERR_POISONED)
        && strstr(ddp_last_error(), "ddp_all_reduce") && ranks_now() - start < 30)
        return DDP_OK;
    fprintf(stderr, "FAIL rank %d after %.1f s: %s: %s\n", ddp_rank(world), ranks_now() - start,
            ddp_result_name(result), ddp_last_error());
    return DDP_ERR_CORRUPT;
}

//== rank 0 first ===========================================================================

static ddp_result prepares(void *user) { return ++*(int *)user, DDP_OK; }
static ddp_result cannot(void *user) { return (void)user, ddp_fail(DDP_ERR_SYSTEM, "the disk is full"); }

static ddp_result rank0_prepares(ddp_group *world) {
    int times = 0;
    for (int i = 0; i < 20; i++) RANKS_OK(world, rank0_first(world, prepares, &times));
    RANKS_CHECK(world, times == (ddp_rank(world) == 0 ? 20 : 0), "%d times", times);
    REFUSED(world, rank0_first(world, ddp_rank(world) == 0 ? cannot : NULL, NULL), DDP_ERR_SYSTEM,
            "the disk is full");
    REFUSED(world, rank0_first(world, ddp_rank(world) == 0 ? NULL : prepares, &times), DDP_ERR_INVALID,
            "prepare is NULL on rank 0");
    REFUSED(world, rank0_first(NULL, prepares, &times), DDP_ERR_INVALID, "group is NULL");
    RANKS_OK(world, rank0_first(world, prepares, &times));
    return DDP_OK;
}

//== early stopping =========================================================================

/* Only rank 0's losses count. */
static ddp_result stops_together(ddp_group *world) {
    static const double losses[] = {NAN, 5, 4, 3.95, 4.5, 3.8, NAN, 3.75, 9};
    static const int best[] = {0, 1, 1, 0, 0, 1, 0, 0, 0}, over[] = {0, 0, 0, 0, 0, 0, 0, 0, 1};
    early_stop stop = {3, 0.1, 0, 0, 0}, before;
    int is_best, is_over, rank = ddp_rank(world), wrong = rank == ddp_world_size(world) - 1;
    for (int i = 0; i < 9; i++) {
        RANKS_OK(world, early_stop_check(world, &stop, rank ? -i : losses[i], &is_best, &is_over));
        RANKS_CHECK(world, is_best == best[i] && is_over == over[i], "check %d: best %d, over %d", i, is_best,
                    is_over);
    }
    RANKS_CHECK(world, stop.best == 3.8 && stop.improvement_count == 3, "best %g", stop.best);
    before = stop;
    if (wrong) stop.patience = 0;
    REFUSED(world, early_stop_check(world, &stop, 1, &is_best, &is_over), DDP_ERR_INVALID,
            "early_stop_check: patience=0 min_delta=0.1; patience must be 1 or more");
    stop.patience = before.patience;
    if (wrong) stop.min_delta = -1;
    REFUSED(world, early_stop_check(world, &stop, 1, &is_best, &is_over), DDP_ERR_INVALID, "min_delta=-1");
    stop.min_delta = before.min_delta;
    REFUSED(world, early_stop_check(world, wrong ? NULL : &stop, 1, &is_best, &is_over), DDP_ERR_INVALID,
            "stop, is_best or is_over is NULL");
    REFUSED(world, early_stop_check(NULL, &stop, 1, &is_best, &is_over), DDP_ERR_INVALID, "group is NULL");
    RANKS_CHECK(world, memcmp(&stop, &before, sizeof stop) == 0, "a failed check has changed the state");
    return DDP_OK;
}

//== messages of any size ===================================================================

/* Rank r sends r * 1000 bytes, rank 0 none. */
static ddp_result bytes_of_any_size(ddp_group *world) {
    int w = ddp_world_size(world), rank = ddp_rank(world), wrong = rank == w - 1;
    size_t size = (size_t)rank * 1000, arrived;
    unsigned char *own = (unsigned char *)malloc(size + 1);
    void *data;
    byte_list list;
    memset(own, 'a' + rank, size);
    for (int root = 0; root < w; root++) {
        RANKS_OK(world, gather_bytes(world, rank ? own : NULL, size, root, &list));
        RANKS_CHECK(world, list.count == (rank == root ? w : 0), "%d strings", list.count);
        for (int r = 0; r < list.count; r++) {
            RANKS_CHECK(world, list.size_bytes[r] == (uint64_t)r * 1000 && list.data[r][r * 1000] == 0,
                        "rank %d: %llu bytes", r, (unsigned long long)list.size_bytes[r]);
            for (int i = 0; i < r * 1000; i++)
                RANKS_CHECK(world, list.data[r][i] == 'a' + r, "byte %d of rank %d", i, r);
        }
        byte_list_free(&list);
        byte_list_free(&list); /* an empty list */
        data = own;
        arrived = rank == root ? size : 12345;
        RANKS_OK(world, broadcast_bytes(world, root, &data, &arrived));
        RANKS_CHECK(world, arrived == (size_t)root * 1000, "%zu bytes of rank %d", arrived, root);
        for (size_t i = 0; i < arrived; i++)
            RANKS_CHECK(world, ((unsigned char *)data)[i] == 'a' + root, "byte %zu of rank %d", i, root);
        RANKS_CHECK(world, rank == root || ((unsigned char *)data)[arrived] == 0, "no zero behind the bytes");
        if (rank != root) free(data);
    }
    REFUSED(world, gather_bytes(world, wrong ? NULL : own, 1, 0, &list), DDP_ERR_INVALID,
            "gather_bytes: data is NULL");
    REFUSED(world, gather_bytes(world, own, 0, wrong ? w : 0, &list), DDP_ERR_INVALID, "; use 0 to ");
    if (w > 1)
        REFUSED(world, gather_bytes(world, own, 0, wrong, &list), DDP_ERR_MISMATCH, "gather_bytes: root=");
    REFUSED(world, gather_bytes(world, own, 0, 0, NULL), DDP_ERR_INVALID, "group or out is NULL");
    data = NULL;
    arrived = 5;
    REFUSED(world, broadcast_bytes(world, 0, &data, &arrived), DDP_ERR_INVALID,
            "broadcast_bytes: data is NULL on root");
    data = own;
    REFUSED(world, broadcast_bytes(world, wrong ? -1 : 0, &data, &arrived), DDP_ERR_INVALID,
            "root=-1; use 0");
    REFUSED(world, broadcast_bytes(world, 0, NULL, &arrived), DDP_ERR_INVALID, "size_bytes is NULL");
    free(own);
    return DDP_OK;
}

//== log ====================================================================================

static ddp_result log_many(ddp_group *world, void *user) {
    (void)user;
    log_rank0(world, "%s", "once");
    for (int i = 0; i < 200; i++) log_each(world, "line %d of %d.", i, 200);
    return DDP_OK;
}

/* Lines of all ranks in one file: no two are mixed. */
static int log_lines(ranks_mode mode) {
    enum { LINES = 200 };
    char path[] = "/tmp/test_training.XXXXXX", line[256];
    int file = mkstemp(path), stdout_before = dup(1), count = 0, by_rank0 = 0, failures;
    fflush(stdout);
    dup2(file, 1);
    failures = ranks_run(mode, 3, 60000, log_many, NULL) != DDP_OK;
    fflush(stdout);
    dup2(stdout_before, 1);
    close(stdout_before);
    close(file);
    FILE *lines = fopen(path, "r");
    while (lines && fgets(line, sizeof line, lines)) {
        int rank, number, end = 0;
        if (sscanf(line, "[rank %d/3] line %d of 200.%n", &rank, &number, &end) == 2 && line[end] == '\n')
            count++;
        else if (strcmp(line, "once\n") == 0)
            by_rank0++;
        else
            failures++, fprintf(stderr, "mixed line: %s", line);
    }
    if (lines) fclose(lines);
    unlink(path);
    if (count != 3 * LINES || by_rank0 != 1) failures++;
    if (failures) fprintf(stderr, "%d lines of all ranks, %d of rank 0\n", count, by_rank0);
    return failures;
}

//== batch norm =============================================================================

enum { BN_SAMPLES = 10, BN_CHANNELS = 3, BN_SPACE = 11, BN_VALUES = BN_SAMPLES * BN_CHANNELS * BN_SPACE };

/* Rank r has samples first to end - 1: none on rank 1 of 3 or more, the rest on the last rank. */
static void bn_part(int w, int rank, int *first, int *end) {
    int each = w == 1 ? BN_SAMPLES : BN_SAMPLES / w;
    *first = rank < 2 ? rank * each : (rank - (w > 2)) * each;
    *end = rank == w - 1 ? BN_SAMPLES : *first + each;
    if (w > 2 && rank == 1) *end = *first;
}

/* Training forward and backward of all samples in f64, straight from the definition. */
typedef struct bn_reference {
    double mean[BN_CHANNELS], variance[BN_CHANNELS]; /* variance: biased */
    double y[BN_VALUES], dx[BN_VALUES], d_weight[BN_CHANNELS], d_bias[BN_CHANNELS];
} bn_reference;

static void bn_compute(bn_reference *r, const float *weight, const float *bias, const float *x,
                       const float *dy) {
    double n = BN_SAMPLES * BN_SPACE;
    memset(r, 0, sizeof *r);
    for (int pass = 0; pass < 4; pass++) /* mean, variance, sums of gradients, results */
        for (int i = 0; i < BN_VALUES; i++) {
            int c = i / BN_SPACE % BN_CHANNELS;
            double away = x[i] - r->mean[c], inv_std = 1 / sqrt(r->variance[c] + 1e-5);
            if (pass == 0) r->mean[c] += x[i] / n;
            if (pass == 1) r->variance[c] += away * away / n;
            if (pass == 2) r->d_bias[c] += dy[i];
            if (pass == 2) r->d_weight[c] += dy[i] * away * inv_std;
            if (pass < 3) continue;
            r->y[i] = away * inv_std * weight[c] + bias[c];
            r->dx[i] = weight[c] * inv_std * (dy[i] - r->d_bias[c] / n - away * inv_std * r->d_weight[c] / n);
        }
}

static int bn_near(double a, double b) { return fabs(a - b) <= 1e-5 * (1 + fabs(b)); }

/* Over all ranks, with different numbers of samples: the values of the definition, and the bits of one rank
   with all samples. Then an evaluation by the running statistics. */
static ddp_result batch_norm_over_ranks(ddp_group *world) {
    static const float weight[BN_CHANNELS] = {1.5f, -0.5f, 0.25f}, bias[BN_CHANNELS] = {0.1f, 0, -2};
    int w = ddp_world_size(world), first, end;
    float x[BN_VALUES], dy[BN_VALUES], y[BN_VALUES], dx[BN_VALUES], all_y[BN_VALUES], all_dx[BN_VALUES];
    float d[4][BN_CHANNELS]; /* d_weight, d_bias over ranks; of one rank */
    bn_reference want;
    batch_norm_desc desc = DDP_ZERO;
    batch_norm *norm, *single;
    bn_part(w, ddp_rank(world), &first, &end);
    for (int i = 0; i < BN_VALUES; i++) {
        x[i] = (float)(ranks_mix((uint64_t)i) % 1000) / 100 + (float)(i / BN_SPACE % BN_CHANNELS) * 50;
        dy[i] = (float)(ranks_mix((uint64_t)(i + 5000)) % 1000) / 1000 - 0.4f;
    }
    bn_compute(&want, weight, bias, x, dy);
    desc.channels = BN_CHANNELS;
    RANKS_OK(world, batch_norm_create(&single, &desc));
    desc.group = world;
    RANKS_OK(world, batch_norm_create(&norm, &desc));
    float *at_x = x + first * BN_CHANNELS * BN_SPACE, *at_dy = dy + first * BN_CHANNELS * BN_SPACE;
    int count = (end - first) * BN_CHANNELS * BN_SPACE, from = first * BN_CHANNELS * BN_SPACE;
    for (int step = 0; step < 2; step++) {
        RANKS_OK(world, batch_norm_forward(norm, weight, bias, at_x, y, end - first, BN_SPACE, 1));
        RANKS_OK(world, batch_norm_forward(single, weight, bias, x, all_y, BN_SAMPLES, BN_SPACE, 1));
        RANKS_OK(world,
                 batch_norm_backward(norm, weight, at_x, at_dy, dx, d[0], d[1], end - first, BN_SPACE));
        memcpy(all_dx, dy, sizeof dy); /* in place */
        RANKS_OK(world,
                 batch_norm_backward(single, weight, x, all_dx, all_dx, d[2], d[3], BN_SAMPLES, BN_SPACE));
        for (int i = 0; i < count; i++) {
            RANKS_CHECK(world, bn_near(y[i], want.y[from + i]) && bn_near(dx[i], want.dx[from + i]),
                        "value %d: y %g, dx %g; expected %g, %g", from + i, (double)y[i], (double)dx[i],
                        want.y[from + i], want.dx[from + i]);
            RANKS_CHECK(world, y[i] == all_y[from + i] && dx[i] == all_dx[from + i],
                        "value %d has other bits on one rank", from + i);
        }
        for (int c = 0; c < BN_CHANNELS; c++) {
            double n = BN_SAMPLES * BN_SPACE, kept = step ? 0.81 : 0.9, mean = (1 - kept) * want.mean[c];
            double variance = kept + (1 - kept) * want.variance[c] * n / (n - 1);
            RANKS_CHECK(world, bn_near(d[2][c], want.d_weight[c]) && bn_near(d[3][c], want.d_bias[c]),
                        "channel %d: d_weight %g, d_bias %g; expected %g, %g", c, (double)d[2][c],
                        (double)d[3][c], want.d_weight[c], want.d_bias[c]);
            RANKS_CHECK(world, bn_near(d[0][c] * w, d[2][c]) && bn_near(d[1][c] * w, d[3][c]),
                        "channel %d: the averages over ranks are %g, %g", c, (double)d[0][c],
                        (double)d[1][c]);
            RANKS_CHECK(world,
                        bn_near(norm->running_mean[c], mean) && bn_near(norm->running_var[c], variance),
                        "channel %d: running mean %g, variance %g; expected %g, %g", c,
                        (double)norm->running_mean[c], (double)norm->running_var[c], mean, variance);
        }
    }
    RANKS_CHECK(world, norm->forward_count == 2, "%lld forwards", (long long)norm->forward_count);
    RANKS_OK(world, batch_norm_forward(norm, NULL, NULL, x, y, 1, BN_SPACE, 0));
    for (int i = 0; i < BN_CHANNELS * BN_SPACE; i++) {
        int c = i / BN_SPACE;
        double expected = (x[i] - norm->running_mean[c]) / sqrt(norm->running_var[c] + 1e-5);
        RANKS_CHECK(world, bn_near(y[i], expected), "evaluation of value %d: %g", i, (double)y[i]);
    }
    ddp_tensor buffers[3];
    batch_norm_buffers(norm, buffers);
    RANKS_CHECK(world,
                buffers[0].data == norm->running_mean && buffers[1].data == norm->running_var
                    && buffers[2].data == &norm->forward_count && buffers[2].dtype == DDP_I64
                    && ddp_tensor_count(&buffers[2]) == 1 && ddp_tensor_count(&buffers[1]) == BN_CHANNELS,
                "buffers %p", buffers[0].data);
    batch_norm_destroy(norm);
    batch_norm_destroy(single);
    return DDP_OK;
}

/* An invalid argument on the last rank is an error on all ranks, and the next call works. */
static ddp_result batch_norm_bad_input(ddp_group *world) {
    int w = ddp_world_size(world), wrong = ddp_rank(world) == w - 1;
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8], d[2][2];
    const float *weight = d[0], *none = NULL;
    batch_norm_desc desc = DDP_ZERO;
    batch_norm *norm = (batch_norm *)&desc;
    REFUSED(world, batch_norm_create(&norm, &desc), DDP_ERR_INVALID, "channels=0; use 1 to 1048576");
    RANKS_CHECK(world, !norm, "a failed create returns %p", (void *)norm);
    desc.channels = 2;
    desc.momentum = 1.5f;
    REFUSED(world, batch_norm_create(&norm, &desc), DDP_ERR_INVALID, "momentum=1.5; use 0 to 1");
    desc.momentum = 0;
    desc.eps = NAN;
    REFUSED(world, batch_norm_create(&norm, &desc), DDP_ERR_INVALID, "eps=nan");
    desc.eps = 0;
    REFUSED(world, batch_norm_create(NULL, &desc), DDP_ERR_INVALID, "out or desc is NULL");
    REFUSED(world, batch_norm_forward(NULL, NULL, NULL, x, y, 1, 1, 1), DDP_ERR_INVALID, "norm is NULL");
    REFUSED(world, batch_norm_backward(NULL, NULL, x, x, y, NULL, NULL, 1, 1), DDP_ERR_INVALID,
            "norm is NULL");
    desc.group = world;
    RANKS_OK(world, batch_norm_create(&norm, &desc));
    memset(d, 0, sizeof d);
    REFUSED(world, batch_norm_backward(norm, NULL, x, x, y, NULL, NULL, 4, 1), DDP_ERR_INVALID,
            "the training forward is missing");
    REFUSED(world, batch_norm_forward(norm, NULL, NULL, x, y, wrong && w == 1, 1, 1), DDP_ERR_INVALID,
            w == 1 ? ": 1 values per channel" : ": 0 values per channel");
    struct {
        const float *x, *weight;
        int samples, space;
        const char *text;
    } cases[] = {{NULL, NULL, 4, 1, "x or y is NULL"},
                 {x, weight, 4, 1, "only one of weight and bias is NULL"},
                 {x, NULL, -1, 1, "samples is negative"},
                 {x, NULL, 4, 0, "space is below 1"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        REFUSED(world,
                batch_norm_forward(norm, wrong ? cases[i].weight : none, NULL, wrong ? cases[i].x : x, y,
                                   wrong ? cases[i].samples : 4, wrong ? cases[i].space : 1, 1),
                DDP_ERR_INVALID, wrong ? cases[i].text : "1 other ranks have an invalid argument");
    RANKS_CHECK(world, norm->running_mean[0] == 0 && norm->running_var[1] == 1 && norm->forward_count == 0,
                "a failed forward has changed the running statistics");
    REFUSED(world, batch_norm_forward(norm, NULL, NULL, NULL, y, 1, 1, 0), DDP_ERR_INVALID,
            "batch_norm_forward: x or y is NULL"); /* an evaluation is not collective */
    RANKS_OK(world, batch_norm_forward(norm, NULL, NULL, x, y, 4, 1, 1));
    REFUSED(world, batch_norm_backward(norm, NULL, x, x, y, NULL, NULL, wrong ? 3 : 4, 1), DDP_ERR_INVALID,
            "in the forward before; pass the same samples");
    REFUSED(world, batch_norm_backward(norm, wrong ? weight : none, x, x, y, NULL, NULL, 4, 1),
            DDP_ERR_INVALID, wrong ? "only some of weight" : "1 other ranks have an invalid argument");
    RANKS_OK(world, batch_norm_backward(norm, weight, x, x, y, d[0], d[1], 4, 1));
    batch_norm_destroy(norm);
    batch_norm_destroy(NULL);
    return DDP_OK;
}

static ddp_result all_tests(ddp_group *world, void *user) {
    (void)user;
    RANKS_RUN(world, counts_once(world));
    RANKS_RUN(world, wrong_counts(world));
    RANKS_RUN(world, metrics_wrong_on_one(world));
    RANKS_RUN(world, hash_sees(world));
    RANKS_RUN(world, drift_is_named(world));
    RANKS_RUN(world, drift_bad_input(world));
    RANKS_RUN(world, drift_wrong_on_one(world));
    RANKS_RUN(world, rank0_prepares(world));
    RANKS_RUN(world, stops_together(world));
    RANKS_RUN(world, bytes_of_any_size(world));
    RANKS_RUN(world, batch_norm_over_ranks(world));
    RANKS_RUN(world, batch_norm_bad_input(world));
    return DDP_OK;
}

/* Rank 0 takes longer than the timeout of the group. */
static ddp_result takes_long(void *user) {
    ranks_sleep_us(*(int *)user * 1300L);
    return DDP_OK;
}

static ddp_result outlasts(ddp_group *world, void *user) {
    RANKS_OK(world, rank0_first(world, takes_long, user));
    return DDP_OK;
}

/* Rank 0 dies, or is stopped, while it prepares; the others check their own errors. */
static ddp_result dies(void *user) {
    raise(*(int *)user);
    return ranks_sleep_us(60 * 1000000L), DDP_OK;
}

typedef struct seen {
    int done;
    ddp_result result;
    char text[512];
} seen;
static seen *all; /* in memory that outlives the ranks */

static ddp_result loses(ddp_group *world, void *user) {
    seen *mine = &all[ddp_rank(world)];
    mine->result = rank0_first(world, dies, user);
    snprintf(mine->text, sizeof mine->text, "%s", ddp_last_error());
    mine->done = 1;
    return mine->result;
}

static int rank0_is_lost(int signal, int timeout_ms, ddp_result code, const char *words) {
    int failures = 0;
    memset(all, 0, 3 * sizeof *all);
    ranks_run(RANKS_PROCESSES, 3, timeout_ms, loses, &signal);
    for (int r = 1; r < 3; r++) {
        const seen *s = &all[r];
        if (s->done && (s->result == code || s->result == DDP_ERR_POISONED) && strstr(s->text, words))
            continue;
        failures += fprintf(stderr, "FAIL rank 0 gets signal %d, rank %d: done=%d %s: %s\n", signal, r,
                            s->done, ddp_result_name(s->result), s->text)
                    > 0;
    }
    return failures;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 3, 4, 0};
    ranks_mode mode;
    int failures, timeout_ms = 8000; /* a rank can stand still for seconds without being lost */
    if (argc < 2 || ranks_mode_parse(argv[1], &mode) != 0)
        return fprintf(stderr, "usage: %s BACKEND [W ...]\n", argv[0]), 2;
    all = (seen *)ranks_shared(3 * sizeof *all);
    failures = ranks_each(argc, argv, worlds, 50, &mode, all_tests);
    if (failures == 0 && !ranks_joins(mode)) {
        failures += log_lines(mode);
        failures += ranks_run(mode, 3, 60000 * DDP_TEST_SLOWDOWN, looks_alone, NULL) != DDP_OK;
        failures += ranks_run(mode, 3, timeout_ms, outlasts, &timeout_ms) != DDP_OK;
        if (mode == RANKS_PROCESSES) /* the watchdog ends the test before the timeout */
            failures += rank0_is_lost(SIGKILL, 60000 * DDP_TEST_SLOWDOWN, DDP_ERR_PEER_LOST, "rank 0 (pid");
        if (mode == RANKS_PROCESSES)
            failures += rank0_is_lost(SIGSTOP, timeout_ms, DDP_ERR_TIMEOUT, "missing: rank 0");
    }
    printf("%s\n", failures ? "FAIL" : "ok");
    return failures != 0;
}

/*  test_training.c - parts of a training loop around the step (examples/extras/training.h): metrics count every
    sample once, drift is detected and named, and rank 0 prepares for longer than a timeout.

    test_training BACKEND [W ...]     one of support/ranks.h */
#include "../../ddp.h"
#include "../support/ranks.h"
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

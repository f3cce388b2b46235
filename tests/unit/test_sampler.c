/* ddp_sampler against a plain reference that builds PyTorch's whole index list. */
#include "../support/unit.h"
#include <math.h>

#include "../../ddp.h"
#include "../support/inner.h" /* PyTorch changes the rule of randperm at 214748364 samples; the tests move the bound down to where lists are short */

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

/* -- The reference -- */

typedef struct reference {
    uint32_t mt[624];
    int at;
} reference;

static void reference_seed(reference *r, uint64_t seed) {
    r->mt[0] = (uint32_t)seed;
    for (int i = 1; i < 624; i++)
        r->mt[i] = 1812433253u * (r->mt[i - 1] ^ (r->mt[i - 1] >> 30)) + (uint32_t)i;
    r->at = 624;
}

static uint32_t reference_draw(reference *r) {
    uint32_t y;
    if (r->at == 624) {
        for (int i = 0; i < 624; i++) {
            y = (r->mt[i] & 0x80000000u) | (r->mt[(i + 1) % 624] & 0x7fffffffu);
            r->mt[i] = r->mt[(i + 397) % 624] ^ (y >> 1);
            if (y & 1) r->mt[i] ^= 0x9908b0dfu;
        }
        r->at = 0;
    }
    y = r->mt[r->at++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

static int64_t *reference_randperm(int64_t n, uint64_t seed, int inside_out) {
    int64_t *list = (int64_t *)malloc((size_t)n * sizeof *list);
    reference r;
    reference_seed(&r, seed);
    if (inside_out) {
        for (int64_t i = 0; i < n; i++) {
            uint64_t high = reference_draw(&r);
            int64_t z = (int64_t)((high << 32 | reference_draw(&r)) % (uint64_t)(i + 1));
            list[i] = list[z];
            list[z] = i;
        }
        return list;
    }
    for (int64_t i = 0; i < n; i++) list[i] = i;
    for (int64_t i = 0; i < n - 1; i++) {
        int64_t z = (int64_t)(reference_draw(&r) % (uint64_t)(n - i)), kept = list[i];
        list[i] = list[i + z];
        list[i + z] = kept;
    }
    return list;
}

/* The order of an epoch: from the reference, or for HASHED from a sampler that takes all of it. */
static int64_t *order_of(const ddp_sampler_desc *like, uint64_t epoch) {
    int64_t n = like->dataset_size, *list;
    if (!like->no_shuffle && like->shuffle != DDP_SHUFFLE_HASHED)
        return reference_randperm(n, like->seed + epoch,
                                  like->shuffle == DDP_SHUFFLE_TORCH && n >= inner.inside_out_from);
    list = (int64_t *)malloc((size_t)n * sizeof *list);
    if (like->no_shuffle) {
        for (int64_t i = 0; i < n; i++) list[i] = i;
    } else {
        ddp_sampler whole;
        ddp_sampler_desc desc = DDP_ZERO;
        desc.dataset_size = n;
        desc.seed = like->seed;
        desc.shuffle = DDP_SHUFFLE_HASHED;
        assert_int_equal(ddp_sampler_init(&whole, &desc), DDP_OK);
        ddp_sampler_set_epoch(&whole, epoch);
        for (int64_t i = 0; i < n; i++) list[i] = ddp_sampler_next(&whole, NULL);
        ddp_sampler_free(&whole);
    }
    return list;
}

typedef struct expected {
    int64_t *sample;
    int *padding;
    int64_t count;
} expected;

/* The end of a rank's block of a global batch, by weights that are integers. */
static int64_t weighted_end(const ddp_sampler_desc *d, int rank) {
    int64_t before = 0, all = 0;
    for (int r = 0; r < d->num_replicas; r++) {
        all += (int64_t)d->weights[r];
        if (r <= rank) before += (int64_t)d->weights[r];
    }
    return d->global_batch * before / all;
}

/* The samples of one rank, from entry origin of the order on: pad or cut the list, then slice it. */
static expected expect(const ddp_sampler_desc *d, const int64_t *order, int64_t origin) {
    expected e;
    int64_t n = d->dataset_size, w = d->num_replicas, unit = d->global_batch ? d->global_batch : w,
            left = n - origin;
    int64_t total = d->drop_last ? left / unit * unit : d->no_pad ? left : (left + unit - 1) / unit * unit;
    e.sample = (int64_t *)malloc((size_t)(total + 1) * sizeof *e.sample);
    e.padding = (int *)malloc((size_t)(total + 1) * sizeof *e.padding);
    e.count = 0;
    for (int64_t i = 0; i < total; i++) {
        int64_t at = i % unit;
        int is_mine = at / (unit / w) == d->rank; /* without a global batch unit / w is 1 */
        if (d->weights) is_mine = at >= weighted_end(d, d->rank - 1) && at < weighted_end(d, d->rank);
        if (!is_mine) continue;
        e.padding[e.count] = i >= left;
        e.sample[e.count++] = order[i >= left ? (i - left) % n : origin + i];
    }
    return e;
}

static void expected_free(expected *e) {
    free(e->sample);
    free(e->padding);
}

static void check_rest(ddp_sampler *s, const expected *e, int64_t from) {
    int padding = -1;
    for (int64_t k = from; k < e->count; k++) {
        int64_t sample = ddp_sampler_next(s, &padding);
        if (sample != e->sample[k] || padding != e->padding[k])
            fail_msg("N=%lld W=%d rank=%d batch=%lld drop_last=%d no_pad=%d shuffle=%d window=%lld seed=%llu "
                     "epoch=%llu: sample %lld is %lld (padding %d), not %lld (%d)",
                     (long long)s->desc.dataset_size, s->desc.num_replicas, s->desc.rank,
                     (long long)s->desc.global_batch, s->desc.drop_last, s->desc.no_pad, (int)s->desc.shuffle,
                     (long long)s->desc.window, (unsigned long long)s->desc.seed,
                     (unsigned long long)s->epoch, (long long)k, (long long)sample, padding,
                     (long long)e->sample[k], e->padding[k]);
    }
    assert_int_equal(ddp_sampler_next(s, &padding), -1);
    assert_int_equal(padding, 0);
    assert_int_equal(ddp_sampler_next(s, NULL), -1);
}

static void start(ddp_sampler *s, const ddp_sampler_desc *d) {
    if (ddp_sampler_init(s, d) != DDP_OK) fail_msg("%s", ddp_last_error());
}

/* -- Known values -- */

static void test_known_vectors(void **state) {
    static const int64_t seed0[10] = {4, 1, 7, 5, 3, 9, 0, 8, 6, 2},
                         seed42[10] = {2, 6, 1, 8, 4, 5, 0, 9, 3, 7};
    static const int64_t four_ranks[4][3] = {{4, 3, 6}, {1, 9, 2}, {7, 0, 4}, {5, 8, 1}};
    static const int64_t batches[2][6] = {{4, 1, 3, 9, 6, 2}, {7, 5, 0, 8, 4, 1}};
    ddp_sampler s;
    ddp_sampler_desc d = DDP_ZERO;
    int padding;
    (void)state;
    d.dataset_size = 10;
    start(&s, &d);
    assert_int_equal(ddp_sampler_length(&s), 10);
    for (int i = 0; i < 10; i++) assert_int_equal(ddp_sampler_next(&s, NULL), seed0[i]);
    assert_int_equal(ddp_sampler_next(&s, NULL), -1);
    ddp_sampler_set_epoch(&s, 42); /* seed 0, epoch 42 is seed 42, epoch 0 */
    for (int i = 0; i < 10; i++) assert_int_equal(ddp_sampler_next(&s, NULL), seed42[i]);
    ddp_sampler_free(&s);
    d.seed = (UINT64_C(7) << 32) + 42; /* only the low 32 bits count */
    start(&s, &d);
    for (int i = 0; i < 10; i++) assert_int_equal(ddp_sampler_next(&s, NULL), seed42[i]);
    ddp_sampler_free(&s);
    d.seed = 0;
    d.num_replicas = 4;
    for (d.rank = 0; d.rank < 4; d.rank++) {
        start(&s, &d);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(ddp_sampler_next(&s, &padding), four_ranks[d.rank][i]);
            assert_int_equal(padding, i == 2 && d.rank >= 2);
        }
        assert_int_equal(ddp_sampler_next(&s, &padding), -1);
        ddp_sampler_free(&s);
    }
    d.num_replicas = 2;
    d.global_batch = 4;
    for (d.rank = 0; d.rank < 2; d.rank++) {
        start(&s, &d);
        for (int i = 0; i < 6; i++) {
            assert_int_equal(ddp_sampler_next(&s, &padding), batches[d.rank][i]);
            assert_int_equal(padding, i >= 4 && d.rank == 1);
        }
        assert_int_equal(ddp_sampler_next(&s, &padding), -1);
        ddp_sampler_free(&s);
    }
    static const double weights[2] = {3, 1};
    static const int64_t of_weights[2][9] = {{4, 1, 7, 3, 9, 0, 6, 2, 4}, {5, 8, 1}};
    d.weights = weights;
    for (d.rank = 0; d.rank < 2; d.rank++) {
        start(&s, &d);
        assert_int_equal(ddp_sampler_batch_size(&s), d.rank ? 1 : 3);
        assert_int_equal(ddp_sampler_length(&s), d.rank ? 3 : 9);
        for (int i = 0; i < (d.rank ? 3 : 9); i++)
            assert_int_equal(ddp_sampler_next(&s, NULL), of_weights[d.rank][i]);
        assert_int_equal(ddp_sampler_next(&s, NULL), -1);
        ddp_sampler_free(&s);
    }
}

/* -- Against the reference -- */

static void sweep_ranks(ddp_sampler_desc d, const int64_t *order, uint64_t epoch) {
    for (d.rank = 0; d.rank < d.num_replicas; d.rank++) {
        ddp_sampler s;
        expected e = expect(&d, order, 0);
        start(&s, &d);
        ddp_sampler_set_epoch(&s, epoch);
        assert_int_equal(ddp_sampler_length(&s), e.count);
        check_rest(&s, &e, 0);
        expected_free(&e);
        ddp_sampler_free(&s);
    }
}

/* Every part-th order. The plain flavour has all, since the compiler does not change the rules. */
#define PART (strcmp(DDP_TEST_FLAVOUR, "plain") == 0 ? 1 : DDP_TEST_SLOWDOWN > 1 ? 12 : 4)
static void sweep(ddp_shuffle shuffle, int no_shuffle, int part) {
    static const int64_t sizes[] = {1, 2, 3, 5, 7, 10, 16, 31, 100, 623, 624, 625, 1000, 1872, 1873};
    static const int replicas[] = {1, 2, 3, 4, 7, 8, 17};
    static const uint64_t seeds[] = {0, 42, UINT64_C(0xffffffff), UINT64_C(0x8000000000000001)};
    for (int a = 0; a < COUNT(sizes); a++)
        for (int c = 0; c < COUNT(seeds); c++) {
            ddp_sampler_desc d = DDP_ZERO;
            uint64_t epoch = (uint64_t)((a + c) % 3 * 5);
            int64_t *order;
            if ((a + c) % part) continue;
            d.dataset_size = sizes[a];
            d.seed = seeds[c];
            d.shuffle = shuffle;
            d.no_shuffle = no_shuffle;
            order = order_of(&d, epoch);
            for (int b = 0; b < COUNT(replicas); b++)
                for (int rules = 0; rules < 16; rules++) {
                    d.num_replicas = replicas[b];
                    d.drop_last = rules & 1;
                    d.no_pad = rules >> 1 & 1;
                    /* None, 1, 4 or 9 a rank. */
                    d.global_batch = (int64_t)d.num_replicas * (rules >> 2) * (rules >> 2);
                    sweep_ranks(d, order, epoch);
                }
            free(order);
        }
}

static void test_torch_matches_reference(void **state) {
    (void)state;
    sweep(DDP_SHUFFLE_TORCH, 0, PART);
}
static void test_legacy_matches_reference(void **state) {
    (void)state;
    sweep(DDP_SHUFFLE_TORCH_LEGACY, 0, PART);
}
static void test_no_shuffle_matches_reference(void **state) {
    (void)state;
    sweep(DDP_SHUFFLE_TORCH, 1, PART);
}
static void test_hashed_is_dealt_by_the_same_rules(void **state) {
    (void)state;
    sweep(DDP_SHUFFLE_HASHED, 0, PART);
}

static void test_inside_out_matches_reference(void **state) {
    (void)state;
    inner.inside_out_from = 1;
    sweep(DDP_SHUFFLE_TORCH, 0, PART);
    sweep(DDP_SHUFFLE_TORCH_LEGACY, 0, 7); /* not touched by the bound */
    inner.inside_out_from = INT64_C(214748364);
}

static void test_the_bound_itself(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    int64_t *order;
    (void)state;
    inner.inside_out_from = 500;
    d.num_replicas = 2;
    for (d.dataset_size = 499; d.dataset_size <= 501; d.dataset_size++) {
        order = reference_randperm(d.dataset_size, 3, d.dataset_size >= 500);
        d.seed = 3;
        sweep_ranks(d, order, 0);
        free(order);
    }
    inner.inside_out_from = INT64_C(214748364);
}

static void test_every_window_size(void **state) {
    static const int64_t sizes[] = {1, 2, 9, 64, 150};
    (void)state;
    for (int rule = 0; rule < 2; rule++)
        for (int a = 0; a < COUNT(sizes); a++) {
            ddp_sampler_desc d = DDP_ZERO;
            int64_t *order;
            inner.inside_out_from = rule ? 1 : INT64_C(214748364);
            d.dataset_size = sizes[a];
            d.seed = 9;
            order = order_of(&d, 1);
            for (d.num_replicas = 1; d.num_replicas <= 5; d.num_replicas += 2)
                for (d.window = 1; d.window <= d.dataset_size; d.window++) {
                    d.global_batch = 0;
                    sweep_ranks(d, order, 1);
                    d.global_batch = 4 * d.num_replicas;
                    sweep_ranks(d, order, 1);
                }
            free(order);
        }
    inner.inside_out_from = INT64_C(214748364);
}

/* Long enough that windows grow through several sizes, and small windows over many blocks of draws. */
static void test_long_orders(void **state) {
    static const int64_t windows[] = {0, 9999, 100000, 60000};
    (void)state;
    for (int rule = 0; rule < 2; rule++)
        for (int a = 0; a < COUNT(windows) / (PART > 1 ? 2 : 1); a++) {
            ddp_sampler_desc d = DDP_ZERO;
            int64_t *order;
            inner.inside_out_from = rule ? 1 : INT64_C(214748364);
            d.dataset_size = 300007;
            d.seed = 77;
            d.window = windows[a];
            d.num_replicas = 3;
            order = order_of(&d, 2);
            sweep_ranks(d, order, 2);
            d.global_batch = 3 * 128;
            sweep_ranks(d, order, 2);
            free(order);
        }
    inner.inside_out_from = INT64_C(214748364);
}

static void test_epochs_do_not_leak_into_each_other(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    (void)state;
    d.dataset_size = 5000;
    d.num_replicas = 2;
    d.rank = 1;
    d.window = 300;
    start(&s, &d);
    for (uint64_t epoch = 0; epoch < 8; epoch++) {
        int64_t *order = order_of(&d, epoch / 2);
        expected e = expect(&s.desc, order, 0);
        ddp_sampler_set_epoch(&s, epoch / 2);
        for (uint64_t k = 0; k < epoch * 300; k++) assert_int_equal(ddp_sampler_next(&s, NULL), e.sample[k]);
        ddp_sampler_set_epoch(&s, epoch / 2); /* from the start again */
        check_rest(&s, &e, 0);
        expected_free(&e);
        free(order);
    }
    ddp_sampler_free(&s);
}

/* -- Seek -- */

static void test_seek_everywhere(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++)
        for (int batch = 0; batch <= 12; batch += 12) {
            ddp_sampler_desc d = DDP_ZERO;
            ddp_sampler s;
            int64_t *order;
            expected e;
            inner.inside_out_from = kind == 1 ? 1 : INT64_C(214748364);
            d.dataset_size = 1400;
            d.num_replicas = 3;
            d.rank = 2;
            d.seed = 5;
            d.window = 100;
            d.global_batch = batch;
            d.shuffle = kind == 2 ? DDP_SHUFFLE_HASHED : DDP_SHUFFLE_TORCH;
            d.no_shuffle = kind == 3;
            order = order_of(&d, 4);
            e = expect(&d, order, 0);
            start(&s, &d);
            ddp_sampler_set_epoch(&s, 4);
            for (int64_t k = 0; k <= e.count / DDP_TEST_SLOWDOWN; k++) {
                int64_t to = k * 181 % (e.count + 1), stop = to + k % 3;
                assert_int_equal(ddp_sampler_seek(&s, to), DDP_OK);
                for (int64_t i = to; i <= stop; i++)
                    assert_int_equal(ddp_sampler_next(&s, NULL), i < e.count ? e.sample[i] : -1);
            }
            assert_int_equal(ddp_sampler_seek(&s, e.count - 40), DDP_OK);
            check_rest(&s, &e, e.count - 40);
            assert_int_equal(ddp_sampler_seek(&s, 0), DDP_OK);
            check_rest(&s, &e, 0);
            expected_free(&e);
            ddp_sampler_free(&s);
            free(order);
        }
    inner.inside_out_from = INT64_C(214748364);
}

/* -- Save and load -- */

typedef struct tally {
    int64_t n;
    int *times;
} tally;

/* Takes steps samples on each rank (or all, -1) after loading from (or at the start of the epoch, NULL).
   Counts all except padding, and checks that all ranks save the same state. */
static void run_ranks(ddp_sampler_desc d, uint64_t epoch, const ddp_sampler_state *from, int64_t steps,
                      tally *seen, ddp_sampler_state *out) {
    ddp_sampler_state begin;
    if (from) begin = *from; /* from and out can be the same */
    for (d.rank = 0; d.rank < d.num_replicas; d.rank++) {
        ddp_sampler s;
        ddp_sampler_state saved;
        start(&s, &d);
        ddp_sampler_set_epoch(&s, from ? epoch + 100 : epoch);
        if (from && ddp_sampler_load(&s, &begin) != DDP_OK) fail_msg("%s", ddp_last_error());
        for (int64_t k = 0; steps < 0 || k < steps; k++) {
            int padding;
            int64_t sample = ddp_sampler_next(&s, &padding);
            if (sample < 0) break;
            assert_true(sample < seen->n);
            if (!padding) seen->times[sample]++;
        }
        if (ddp_sampler_save(&s, &saved) != DDP_OK) fail_msg("%s", ddp_last_error());
        if (d.rank && memcmp(&saved, out, sizeof saved))
            fail_msg("rank %d of %d saves another state", d.rank, d.num_replicas);
        *out = saved;
        ddp_sampler_free(&s);
    }
}

/* Every sample once; with drop_last none twice, and fewer than may_lack missing. */
static void check_cover(const tally *seen, int64_t may_lack, const char *what) {
    int64_t lacking = 0;
    for (int64_t i = 0; i < seen->n; i++) {
        if (seen->times[i] > 1) fail_msg("%s: sample %lld came %d times", what, (long long)i, seen->times[i]);
        lacking += !seen->times[i];
    }
    if (lacking > may_lack) fail_msg("%s: %lld samples lost", what, (long long)lacking);
}

static void test_load_onto_another_world(void **state) {
    static const int worlds[] = {1, 2, 3, 4, 6};
    (void)state;
    for (int kind = 0; kind < 3; kind++)
        for (int a = 0; a < COUNT(worlds); a++)
            for (int b = 0; b < COUNT(worlds); b++)
                for (int rule = 0; rule < 3; rule++)
                    for (int batch = 0; batch <= 36; batch += 12) {
                        ddp_sampler_desc d = DDP_ZERO, other;
                        d.dataset_size = 101;
                        d.seed = 11;
                        d.num_replicas = worlds[a];
                        d.shuffle = kind == 1 ? DDP_SHUFFLE_HASHED : DDP_SHUFFLE_TORCH;
                        d.no_shuffle = kind == 2;
                        d.drop_last = rule == 1;
                        d.no_pad = rule == 2;
                        d.global_batch = batch;
                        other = d;
                        other.num_replicas = worlds[b];
                        /* Each rank has taken this many samples, except at the end. */
                        for (int64_t steps = 0; steps <= 101 / worlds[a]; steps += DDP_TEST_SLOWDOWN) {
                            tally seen = {101, (int *)calloc(101, sizeof(int))};
                            ddp_sampler_state at, end;
                            char what[160];
                            if (d.no_pad && batch && steps > 101 / batch * batch / worlds[a]) {
                                free(seen.times);
                                break;
                            }
                            if (d.drop_last
                                && steps * worlds[a]
                                       > 101 / (batch ? batch : worlds[a]) * (batch ? batch : worlds[a])) {
                                free(seen.times);
                                break;
                            }
                            snprintf(what, sizeof what,
                                     "kind %d, %d to %d ranks, rule %d, batch %d, after %d", kind, worlds[a],
                                     worlds[b], rule, batch, (int)steps);
                            run_ranks(d, 3, NULL, steps, &seen, &at);
                            run_ranks(other, 3, &at, -1, &seen, &end);
                            check_cover(&seen, d.drop_last ? (batch ? batch : worlds[b]) - 1 : 0, what);
                            if (!d.drop_last) assert_int_equal(end.position, 101);
                            free(seen.times);
                        }
                    }
}

static void test_load_again_and_again(void **state) {
    static const int worlds[] = {4, 2, 3, 1, 6, 4};
    static const int64_t batches[] = {0, 12, 24};
    (void)state;
    for (int kind = 0; kind < 2; kind++)
        for (int b = 0; b < 3; b++)
            for (int64_t steps = 0; steps < 30; steps++) {
                tally seen = {997, (int *)calloc(997, sizeof(int))};
                ddp_sampler_state at;
                ddp_sampler_desc d = DDP_ZERO;
                d.dataset_size = 997;
                d.window = kind ? 0 : 10;
                d.no_pad = 1;
                d.shuffle = kind ? DDP_SHUFFLE_HASHED : DDP_SHUFFLE_TORCH;
                for (int i = 0; i < COUNT(worlds); i++) {
                    int64_t block;
                    d.num_replicas = worlds[i];
                    d.global_batch = batches[b];
                    block = batches[b] ? batches[b] / worlds[i] : 1;
                    /* The first stop is anywhere. Later stops are whole batches after the interrupted one. */
                    run_ranks(d, 8, i ? &at : NULL,
                              i + 1 == COUNT(worlds) ? -1
                              : i                    ? 2 * block
                                                     : steps,
                              &seen, &at);
                }
                check_cover(&seen, 0, "six worlds");
                free(seen.times);
            }
}

static void test_load_on_the_same_world_changes_nothing(void **state) {
    (void)state;
    for (int rules = 0; rules < 4; rules++)
        for (int batch = 0; batch <= 24; batch += 12)
            for (int64_t steps = 0; steps <= 52; steps++) {
                ddp_sampler_desc d = DDP_ZERO;
                d.dataset_size = 155;
                d.num_replicas = 3;
                d.drop_last = rules & 1;
                d.no_pad = rules >> 1;
                d.global_batch = batch;
                d.window = 17;
                for (d.rank = 0; d.rank < 3; d.rank++) {
                    ddp_sampler whole, resumed;
                    ddp_sampler_state at;
                    int padding[2];
                    start(&whole, &d);
                    start(&resumed, &d);
                    ddp_sampler_set_epoch(&whole, 6);
                    for (int64_t k = 0; k < steps; k++) ddp_sampler_next(&whole, NULL);
                    assert_int_equal(ddp_sampler_save(&whole, &at), DDP_OK);
                    assert_int_equal(ddp_sampler_load(&resumed, &at), DDP_OK);
                    if (steps < ddp_sampler_length(&whole))
                        assert_int_equal(ddp_sampler_length(&resumed), ddp_sampler_length(&whole) - steps);
                    for (;;) {
                        int64_t sample = ddp_sampler_next(&whole, &padding[0]);
                        /* Saved after its -1: the tail may be distributed already. */
                        if (steps > ddp_sampler_length(&whole)) break;
                        if (sample < 0 && d.drop_last) break;
                        assert_int_equal(ddp_sampler_next(&resumed, &padding[1]), sample);
                        assert_int_equal(padding[1], padding[0]);
                        if (sample < 0) break;
                    }
                    ddp_sampler_free(&whole);
                    ddp_sampler_free(&resumed);
                }
            }
}

static void test_ranks_of_uneven_length_agree_at_the_end(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    (void)state;
    d.no_pad = 1;
    for (d.dataset_size = 1; d.dataset_size < 30; d.dataset_size++)
        for (d.num_replicas = 1; d.num_replicas < 6; d.num_replicas++)
            for (int batch = 0; batch < 4; batch++) {
                tally seen = {d.dataset_size, (int *)calloc((size_t)d.dataset_size, sizeof(int))};
                ddp_sampler_state end;
                d.global_batch = batch * d.num_replicas;
                run_ranks(d, 0, NULL, -1, &seen, &end);
                check_cover(&seen, 0, "no_pad");
                assert_int_equal(end.position, d.dataset_size);
                free(seen.times);
            }
}

static void test_save_inside_a_batch_that_a_load_cut(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    ddp_sampler_state at, again;
    (void)state;
    d.dataset_size = 100;
    d.num_replicas = 2;
    d.global_batch = 16;
    start(&s, &d);
    for (int k = 0; k < 11; k++) ddp_sampler_next(&s, NULL); /* 3 into the second block of 8 */
    assert_int_equal(ddp_sampler_save(&s, &at), DDP_OK);
    assert_int_equal(at.position, 16);
    assert_int_equal(at.block_offset, 3);
    ddp_sampler_free(&s);
    d.global_batch = 4;
    start(&s, &d);
    assert_int_equal(ddp_sampler_load(&s, &at), DDP_OK);
    assert_int_equal(ddp_sampler_save(&s, &again), DDP_OK); /* nothing taken: the same state */
    assert_memory_equal(&at, &again, sizeof at);
    ddp_sampler_next(&s, NULL);
    assert_int_equal(ddp_sampler_save(&s, &again), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_save: the sampler was loaded inside a global batch; "
                                          "save after 5 more samples of this rank");
    /* Three batches of 4: the 10 that were left, and 2. */
    for (int k = 1; k < 6; k++) ddp_sampler_next(&s, NULL);
    assert_int_equal(ddp_sampler_save(&s, &again), DDP_OK);
    assert_int_equal(again.position, 34);
    assert_int_equal(again.block_offset, 0);
    ddp_sampler_free(&s);
}

/* The error of a save states when one works: after whole rounds, or at the end of an epoch that ends before
   them. It stated the samples that were left of the batch: 2, where only the 8th save worked. With drop_last
   no save worked, even after the end. */
static void test_advice_inside_a_batch_that_a_load_cut(void **state) {
    (void)state;
    for (int w = 1; w < 5; w++)
        for (int n = 8; n < 42; n++)
            for (int taken = 1; taken < 4; taken++)
                for (int tail = 0; tail < 12; tail++) {
                    ddp_sampler_desc d = DDP_ZERO;
                    ddp_sampler s;
                    ddp_sampler_state at, again;
                    d.dataset_size = n;
                    d.num_replicas = 2;
                    d.global_batch = 8;
                    start(&s, &d);
                    for (int k = 0; k < taken; k++) ddp_sampler_next(&s, NULL);
                    assert_int_equal(ddp_sampler_save(&s, &at), DDP_OK);
                    ddp_sampler_free(&s);
                    d.drop_last = tail % 3 == 1;
                    d.no_pad = tail % 3 == 2;
                    d.num_replicas = w;
                    d.rank = w - 1;
                    d.global_batch = tail / 3 * w * (w == 2 ? 3 : 4); /* W or this differs from the save */
                    start(&s, &d);
                    assert_int_equal(ddp_sampler_load(&s, &at), DDP_OK);
                    long long more = -1; /* as the first error states; 0 = at the end of the epoch */
                    for (int k = 0; ddp_sampler_next(&s, NULL) >= 0; k++) {
                        ddp_result result = ddp_sampler_save(&s, &again);
                        if (more > 0 && --more == 0) assert_int_equal(result, DDP_OK);
                        if (result == DDP_OK) break;
                        assert_int_equal(result, DDP_ERR_INVALID);
                        const char *advice = strstr(ddp_last_error(), "save after ");
                        long long wait = advice ? strtoll(advice + strlen("save after "), NULL, 10) : 0;
                        if (k == 0) more = wait;
                        if (wait != more) fail_msg("'%s' after %d samples", ddp_last_error(), k + 1);
                        if (!wait) assert_non_null(strstr(ddp_last_error(), "save at the end of the epoch"));
                    }
                    if (more > 0) fail_msg("the stated number is %lld too high", more);
                    assert_int_equal(ddp_sampler_save(&s, &again), DDP_OK);
                    ddp_sampler_free(&s);
                }
}

/* The last batch is short: rank 0 has 3 samples of it, rank 1 none. A state that rank 0 saved after 2 of them
   leaves rank 1 none. */
static void test_resume_in_a_short_batch(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    ddp_sampler_state at, again;
    (void)state;
    d.dataset_size = 11;
    d.num_replicas = 2;
    d.global_batch = 8;
    d.no_pad = 1;
    start(&s, &d);
    for (int k = 0; k < 6; k++) assert_true(ddp_sampler_next(&s, NULL) >= 0);
    assert_int_equal(ddp_sampler_save(&s, &at), DDP_OK);
    assert_int_equal(at.position, 8);
    assert_int_equal(at.block_offset, 2);
    ddp_sampler_free(&s);
    d.rank = 1;
    start(&s, &d);
    assert_int_equal(ddp_sampler_load(&s, &at), DDP_OK);
    assert_int_equal(ddp_sampler_length(&s), 0);
    assert_int_equal(ddp_sampler_next(&s, NULL), -1);
    assert_int_equal(ddp_sampler_save(&s, &again), DDP_OK);
    assert_int_equal(again.position, 11);
    ddp_sampler_free(&s);
}

/* A seek back from the end of an epoch: the saved position is that of the seek. */
static void test_save_after_a_seek_from_the_end(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    ddp_sampler_state at;
    (void)state;
    d.dataset_size = 10;
    start(&s, &d);
    while (ddp_sampler_next(&s, NULL) >= 0) {
    }
    assert_int_equal(ddp_sampler_save(&s, &at), DDP_OK);
    assert_int_equal(at.position, 10);
    assert_int_equal(ddp_sampler_seek(&s, 4), DDP_OK);
    assert_int_equal(ddp_sampler_save(&s, &at), DDP_OK);
    assert_int_equal(at.position, 4);
    ddp_sampler_free(&s);
}

/* -- Weights -- */

/* Weights of up to 7 ranks; the last = equal blocks. */
static const double unequal[7] = {3, 1, 2, 2, 5, 1, 4}, same[7] = {1, 1, 1, 1, 1, 1, 1},
                    close_by[7] = {1000000, 999999, 1000001, 999998, 1000002, 1000000, 1000003};
static const double *const weight_lists[4] = {unequal, same, close_by, NULL};

static void test_weights_match_reference(void **state) {
    static const int64_t sizes[] = {1, 5, 48, 97, 1873};
    (void)state;
    for (int a = 0; a < COUNT(sizes); a++)
        for (int order = 0; order < 3; order++) {
            ddp_sampler_desc d = DDP_ZERO;
            d.dataset_size = sizes[a];
            d.seed = 21;
            d.shuffle = order == 1 ? DDP_SHUFFLE_HASHED : DDP_SHUFFLE_TORCH;
            d.no_shuffle = order == 2;
            d.window = order == 0 ? 40 : 0;
            int64_t *list = order_of(&d, 2);
            for (d.num_replicas = 1; d.num_replicas <= 7; d.num_replicas++)
                for (int rule = 0; rule < 9; rule++) {
                    d.drop_last = rule % 3 == 1;
                    d.no_pad = rule % 3 == 2;
                    d.weights = weight_lists[rule / 3];
                    d.global_batch = rule / 3 ? 25 : 48; /* 25: no multiple of the ranks */
                    sweep_ranks(d, list, 2);
                }
            free(list);
        }
}

/* Any weights: blocks are adjacent, cover the batch, and differ from the quotient by less than 1. Only
   init reads the array. */
static void test_blocks_of_any_weights(void **state) {
    uint64_t random = 1;
    (void)state;
    for (int round = 0; round < 2000; round++) {
        double weights[9], spoiled[9], all = 0;
        int64_t next = 0;
        ddp_sampler_desc d = DDP_ZERO;
        d.num_replicas = 1 + round % 9;
        d.global_batch = 100 + round % 900;
        d.dataset_size = d.global_batch;
        d.no_shuffle = 1;
        for (int r = 0; r < d.num_replicas; r++) {
            random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
            weights[r] = 0.2 + (double)(random >> 11) * 0x1p-53;
            all += weights[r];
        }
        for (d.rank = 0; d.rank < d.num_replicas; d.rank++) {
            ddp_sampler s;
            memcpy(spoiled, weights, sizeof weights);
            d.weights = spoiled;
            start(&s, &d);
            for (int r = 0; r < d.num_replicas; r++) spoiled[r] = NAN;
            double quota = (double)d.global_batch * weights[d.rank] / all;
            int64_t size = ddp_sampler_batch_size(&s);
            assert_true(fabs((double)size - quota) < 1 + 1e-9);
            assert_int_equal(ddp_sampler_length(&s), size);
            for (int64_t k = 0; k < size; k++) assert_int_equal(ddp_sampler_next(&s, NULL), next++);
            ddp_sampler_free(&s);
        }
        assert_int_equal(next, d.global_batch);
    }
}

/* Equal weights give equal blocks, up to the largest batch. Once, rounding errors of their sum made blocks of
   2 and 4 of a batch of 6 for two weights of 0.7. */
static void test_blocks_of_equal_weights(void **state) {
    (void)state;
    for (int round = 0; round < 9 * 20 * 9; round++) {
        ddp_sampler_desc d = DDP_ZERO;
        ddp_sampler s;
        double weights[9];
        int64_t size = 1 + round / 9 % 20;
        for (int r = 0; r < 9; r++) weights[r] = (1 + round / 9 / 20) * 0.7;
        d.num_replicas = 1 + round % 9;
        d.no_shuffle = size == 20;
        if (d.no_shuffle) size = INT64_C(1000000000000) / (d.num_replicas * d.num_replicas);
        d.global_batch = d.dataset_size = size * d.num_replicas;
        d.weights = weights;
        for (d.rank = 0; d.rank < d.num_replicas; d.rank++) {
            start(&s, &d);
            assert_int_equal(ddp_sampler_batch_size(&s), size);
            ddp_sampler_free(&s);
        }
    }
}

/* Takes whole global batches on every rank; -1 = the rest. All ranks save the same state. */
static void run_batches(ddp_sampler_desc d, const ddp_sampler_state *from, int batches, tally *seen,
                        ddp_sampler_state *out) {
    ddp_sampler_state begin, saved;
    if (from) begin = *from;
    for (d.rank = 0; d.rank < d.num_replicas; d.rank++) {
        ddp_sampler s;
        start(&s, &d);
        if (from) assert_int_equal(ddp_sampler_load(&s, &begin), DDP_OK);
        int64_t count = batches * ddp_sampler_batch_size(&s);
        for (int64_t k = 0; batches < 0 || k < count; k++) {
            int padding;
            int64_t sample = ddp_sampler_next(&s, &padding);
            if (sample < 0) break;
            if (!padding) seen->times[sample]++;
        }
        if (ddp_sampler_save(&s, &saved) != DDP_OK) fail_msg("%s", ddp_last_error());
        if (d.rank && memcmp(&saved, out, sizeof saved))
            fail_msg("rank %d of %d saves another state", d.rank, d.num_replicas);
        *out = saved;
        ddp_sampler_free(&s);
    }
}

/* Each world continues where the last one stopped, with other weights or none: every sample once. */
static void test_weights_load_onto_another_world(void **state) {
    static const int worlds[] = {2, 3, 7, 1};
    (void)state;
    for (int batches = 0; batches < 5; batches++)
        for (int first = 0; first < 4; first++)
            for (int then = 0; then < 16; then++) {
                tally seen = {197, (int *)calloc(197, sizeof(int))};
                ddp_sampler_state at;
                ddp_sampler_desc d = DDP_ZERO;
                d.dataset_size = 197;
                d.no_pad = 1;
                d.window = 30;
                d.num_replicas = worlds[first];
                d.global_batch = 42;
                d.weights = weight_lists[(first + then) % 4];
                run_batches(d, NULL, batches, &seen, &at);
                assert_int_equal(at.position, batches * 42 < 197 ? batches * 42 : 197);
                assert_int_equal(at.block_offset, 0);
                d.num_replicas = worlds[then / 4];
                d.weights = weight_lists[then % 4];
                run_batches(d, &at, 1, &seen, &at); /* from the state that it writes */
                d.num_replicas = 1;
                d.weights = NULL;
                run_batches(d, &at, -1, &seen, &at);
                check_cover(&seen, 0, "weights");
                assert_int_equal(at.position, 197);
                free(seen.times);
            }
}

/* Inside a global batch a save would need a number for each rank. */
static void test_weights_save_inside_a_batch(void **state) {
    static const double weights[2] = {3, 1}, equal[2] = {7, 7};
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    ddp_sampler_state at, again;
    tally seen = {11, (int *)calloc(11, sizeof(int))};
    (void)state;
    d.dataset_size = 11;
    d.num_replicas = 2;
    d.global_batch = 8; /* blocks of 6 and 2 */
    d.no_pad = 1;
    d.weights = weights;
    start(&s, &d);
    for (int k = 0; k < 4; k++) ddp_sampler_next(&s, NULL);
    assert_int_equal(ddp_sampler_save(&s, &at), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_save: ranks have unequal blocks of a global batch; "
                                          "save after 2 more samples of this rank");
    for (int k = 0; k < 4; k++) ddp_sampler_next(&s, NULL);
    assert_int_equal(ddp_sampler_save(&s, &at), DDP_ERR_INVALID); /* rank 0 has 3 of the last batch, not 6 */
    assert_string_equal(ddp_last_error(), "ddp_sampler_save: ranks have unequal blocks of a global batch; "
                                          "save at the end of the epoch");
    ddp_sampler_next(&s, NULL);
    assert_int_equal(ddp_sampler_next(&s, NULL), -1);
    assert_int_equal(ddp_sampler_save(&s, &at), DDP_OK);
    assert_int_equal(at.position, 11);
    ddp_sampler_free(&s);

    /* Weights that give equal blocks change nothing: a save works anywhere. */
    d.weights = equal;
    for (d.rank = 0; d.rank < 2; d.rank++) {
        start(&s, &d);
        for (int k = 0; k < 3; k++) seen.times[ddp_sampler_next(&s, NULL)]++;
        assert_int_equal(ddp_sampler_save(&s, &at), DDP_OK);
        assert_int_equal(at.block_offset, 3);
        ddp_sampler_free(&s);
    }
    /* Unequal blocks take the rest of that batch first. */
    d.weights = weights;
    run_batches(d, &at, 0, &seen, &again);
    assert_memory_equal(&at, &again, sizeof at);
    run_batches(d, &at, -1, &seen, &again);
    check_cover(&seen, 0, "weights after equal blocks");
    /* A state of a batch that is no multiple of the ranks. */
    memset(seen.times, 0, 11 * sizeof(int));
    d.global_batch = 9;
    run_batches(d, NULL, 1, &seen, &at);
    assert_int_equal(at.position, 9);
    run_batches(d, &at, -1, &seen, &at);
    check_cover(&seen, 0, "a batch of 9");
    free(seen.times);
}

/* -- HASHED -- */

static void test_hashed_is_a_bijection(void **state) {
    (void)state;
    for (int64_t n = 1; n <= 70000; n = n < 300 ? n + 1 : n * 3 + 1) {
        ddp_sampler_desc d = DDP_ZERO;
        ddp_sampler s;
        char *taken = (char *)calloc((size_t)n, 1);
        d.dataset_size = n;
        d.seed = (uint64_t)n * 7;
        d.shuffle = DDP_SHUFFLE_HASHED;
        start(&s, &d);
        ddp_sampler_set_epoch(&s, 1);
        for (int64_t i = 0; i < n; i++) {
            int64_t sample = ddp_sampler_next(&s, NULL);
            assert_true(sample >= 0 && sample < n && !taken[sample]);
            taken[sample] = 1;
        }
        ddp_sampler_free(&s);
        free(taken);
    }
}

static void test_hashed_at_the_largest_size(void **state) {
    static const int64_t positions[] = {0, 1, INT64_C(1) << 40, INT64_MAX / 2, INT64_MAX - 1};
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    int64_t last = -1;
    (void)state;
    d.dataset_size = INT64_MAX;
    d.shuffle = DDP_SHUFFLE_HASHED;
    start(&s, &d);
    assert_int_equal(ddp_sampler_length(&s), INT64_MAX);
    for (int i = 0; i < COUNT(positions); i++) {
        int64_t sample;
        assert_int_equal(ddp_sampler_seek(&s, positions[i]), DDP_OK);
        sample = ddp_sampler_next(&s, NULL);
        assert_true(sample >= 0 && sample != last);
        last = sample;
    }
    assert_int_equal(ddp_sampler_next(&s, NULL), -1);
    ddp_sampler_free(&s);
}

/* Chi-square of counts that should be uniform, as standard deviations from its mean. */
static double unevenness(const int *counts, int cells, double total) {
    double each = total / cells, sum = 0, degrees = cells - 1;
    for (int i = 0; i < cells; i++) sum += (counts[i] - each) * (counts[i] - each) / each;
    return (sum - degrees) / sqrt(2 * degrees);
}

static void test_hashed_mixes(void **state) {
    static const int64_t sizes[] = {INT64_C(1) << 12, 40960, INT64_C(1) << 20, INT64_C(100000000),
                                    INT64_C(1) << 45};
    static int pairs[1024], steps[256], epochs[1024];
    (void)state;
    for (int a = 0; a < COUNT(sizes); a++) {
        int64_t n = sizes[a], piece = n / 32, count = 0;
        ddp_sampler_desc d = DDP_ZERO;
        ddp_sampler s;
        int64_t before[1000];
        memset(pairs, 0, sizeof pairs);
        memset(steps, 0, sizeof steps);
        memset(epochs, 0, sizeof epochs);
        d.dataset_size = n;
        d.seed = 3;
        d.shuffle = DDP_SHUFFLE_HASHED;
        start(&s, &d);
        for (int epoch = 0; epoch < 300; epoch++) {
            int64_t last = -1;
            ddp_sampler_set_epoch(&s, (uint64_t)epoch);
            for (int k = 0; k < 1000; k++) {
                int64_t sample = ddp_sampler_next(&s, NULL);
                int bucket = sample / piece < 32 ? (int)(sample / piece) : 31;
                if (k) {
                    int earlier = last / piece < 32 ? (int)(last / piece) : 31;
                    pairs[earlier * 32 + bucket]++;
                    steps[(uint64_t)((sample + n - last) % n) * 256 / (uint64_t)n]++;
                }
                if (epoch) epochs[(before[k] / piece < 32 ? before[k] / piece : 31) * 32 + bucket]++;
                before[k] = last = sample;
                count++;
            }
        }
        assert_true(unevenness(pairs, 1024, 300 * 999.0) < 5);
        /* A step of 0 is impossible: shows for a small N. */
        assert_true(unevenness(steps, 256, 300 * 999.0) < 5 || n < 40000);
        assert_true(unevenness(epochs, 1024, 299 * 1000.0) < 5);
        ddp_sampler_free(&s);
    }
}

/* All orders of four samples are equally frequent. */
static void test_hashed_reaches_every_small_order(void **state) {
    static int orders[256];
    int counts[24], used = 0;
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    (void)state;
    d.dataset_size = 4;
    d.shuffle = DDP_SHUFFLE_HASHED;
    start(&s, &d);
    memset(orders, 0, sizeof orders);
    for (int epoch = 0; epoch < 48000; epoch++) {
        int code = 0;
        ddp_sampler_set_epoch(&s, (uint64_t)epoch);
        for (int k = 0; k < 4; k++) code = code * 4 + (int)ddp_sampler_next(&s, NULL);
        orders[code]++;
    }
    for (int i = 0; i < 256; i++)
        if (orders[i]) {
            assert_true(used < 24);
            counts[used++] = orders[i];
        }
    assert_int_equal(used, 24);
    assert_true(unevenness(counts, 24, 48000) < 5);
    ddp_sampler_free(&s);
}

/* -- Memory -- */

typedef struct heap {
    int allocs, frees, refuse;
    size_t size_bytes;
} heap;
static void *heap_alloc(size_t size_bytes, void *user) {
    heap *h = (heap *)user;
    if (h->refuse) return NULL;
    h->allocs++;
    h->size_bytes += size_bytes;
    return malloc(size_bytes);
}
static void heap_free(void *memory, void *user) {
    ((heap *)user)->frees++;
    free(memory);
}

static void test_memory_is_one_window(void **state) {
    heap h = {0, 0, 0, 0};
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    (void)state;
    d.dataset_size = 1000000;
    d.window = 1000;
    d.alloc_fn = heap_alloc;
    d.free_fn = heap_free;
    d.user = &h;
    start(&s, &d);
    assert_int_equal(h.allocs, 1);
    assert_true(h.size_bytes < 20000);
    for (int k = 0; k < 5000; k++) ddp_sampler_next(&s, NULL);
    ddp_sampler_seek(&s, 30000);
    ddp_sampler_next(&s, NULL);
    ddp_sampler_set_epoch(&s, 1);
    ddp_sampler_next(&s, NULL);
    ddp_sampler_free(&s);
    assert_int_equal(h.allocs, 1);
    assert_int_equal(h.frees, 1);
    ddp_sampler_free(&s); /* once more does nothing */
    assert_int_equal(h.frees, 1);

    h.refuse = 1;
    d.shuffle = DDP_SHUFFLE_HASHED;
    start(&s, &d); /* takes no sample */
    ddp_sampler_next(&s, NULL);
    ddp_sampler_free(&s);
    d.shuffle = DDP_SHUFFLE_TORCH;
    d.no_shuffle = 1;
    start(&s, &d);
    ddp_sampler_free(&s);
    d.no_shuffle = 0;
    assert_int_equal(ddp_sampler_init(&s, &d), DDP_ERR_NO_MEMORY);
    assert_non_null(strstr(ddp_last_error(), "for a window of 1000 samples"));
    assert_int_equal(ddp_sampler_length(&s), 0);

    h.refuse = 0;
    h.size_bytes = 0;
    /* The default window stays within 64 MB however large the dataset. */
    d.dataset_size = INT64_C(100000000);
    d.window = 0;
    start(&s, &d);
    assert_true(h.size_bytes < 64000000);
    ddp_sampler_free(&s);
}

/* -- Bad input -- */

static void refuse(ddp_sampler_desc d, const char *message) {
    ddp_sampler s;
    assert_int_equal(ddp_sampler_init(&s, &d), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), message);
    assert_int_equal(ddp_sampler_length(&s), 0);
    assert_int_equal(ddp_sampler_next(&s, NULL), -1);
    ddp_sampler_set_epoch(&s, 1);
    ddp_sampler_free(&s);
}

static void test_bad_desc(void **state) {
    ddp_sampler_desc good = DDP_ZERO, d;
    ddp_sampler s;
    (void)state;
    good.dataset_size = 100;
    good.num_replicas = 4;
    assert_int_equal(ddp_sampler_init(NULL, &good), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_init: sampler is NULL");
    assert_int_equal(ddp_sampler_init(&s, NULL), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_init: desc is NULL");
    d = good;
    d.dataset_size = 0;
    refuse(d, "ddp_sampler_init: dataset_size=0; use 1 or more");
    d = good;
    d.dataset_size = -5;
    refuse(d, "ddp_sampler_init: dataset_size=-5; use 1 or more");
    d = good;
    d.num_replicas = -1;
    refuse(d, "ddp_sampler_init: num_replicas=-1; use 1 or more, or 0 for 1");
    d = good;
    d.rank = 4;
    refuse(d, "ddp_sampler_init: rank=4; use 0 to 3 with num_replicas=4");
    d = good;
    d.rank = -1;
    refuse(d, "ddp_sampler_init: rank=-1; use 0 to 3 with num_replicas=4");
    d = good;
    d.num_replicas = 0;
    d.rank = 1;
    refuse(d, "ddp_sampler_init: rank=1; use 0 to 0 with num_replicas=1");
    d = good;
    d.shuffle = (ddp_shuffle)3;
    refuse(d, "ddp_sampler_init: shuffle=3 is not a ddp_shuffle");
    d = good;
    d.global_batch = -4;
    refuse(d, "ddp_sampler_init: global_batch=-4 is negative; use 0 or more");
    d = good;
    d.global_batch = 10;
    refuse(d, "ddp_sampler_init: global_batch=10 is not a multiple of num_replicas=4");
    double weights[4] = {1, 2, 3, 4};
    d.weights = weights; /* 10 is no multiple of 4 */
    d.no_shuffle = 1;
    assert_int_equal(ddp_sampler_init(&s, &d), DDP_OK);
    weights[1] = 1000;
    refuse(d,
           "ddp_sampler_init: weights[0]=1 leaves rank 0 no sample of global_batch=10; use a larger weight "
           "or a larger global_batch");
    const double bad[] = {0, -1, NAN, INFINITY};
    const char *texts[] = {"0", "-1", "nan", "inf"};
    for (int i = 0; i < 4; i++) {
        char wanted[100];
        snprintf(wanted, sizeof wanted, "ddp_sampler_init: weights[1]=%s; use finite numbers above 0",
                 texts[i]);
        weights[1] = bad[i];
        refuse(d, wanted);
    }
    weights[1] = weights[2] = 1e308;
    refuse(d, "ddp_sampler_init: the sum of the weights is inf, which is too large; divide them by their "
              "maximum");
    weights[1] = weights[2] = 1;
    d.global_batch = 0;
    refuse(d, "ddp_sampler_init: global_batch=0 with num_replicas=4; with weights their product must be 1 to "
              "1e12");
    d.global_batch = INT64_C(250000000001);
    refuse(d, "ddp_sampler_init: global_batch=250000000001 with num_replicas=4; with weights their product "
              "must be 1 to 1e12");
    d = good;
    d.window = -1;
    refuse(d, "ddp_sampler_init: window=-1 is negative; use 0 or more");
    d = good;
    d.alloc_fn = heap_alloc;
    refuse(d, "ddp_sampler_init: set both alloc_fn and free_fn, or neither");
    d = good;
    d.free_fn = heap_free;
    refuse(d, "ddp_sampler_init: set both alloc_fn and free_fn, or neither");
    d = good;
    d.dataset_size = INT64_MAX;
    d.shuffle = DDP_SHUFFLE_HASHED;
    refuse(d, "ddp_sampler_init: dataset_size=9223372036854775807 is too large to pad to a multiple of 4");
    d.dataset_size = INT64_MAX - 3;
    assert_int_equal(ddp_sampler_init(&s, &d), DDP_OK);
    d = good;
    d.dataset_size = INT64_C(1) << 50;
    d.window = 1 << 14;
    refuse(d, "ddp_sampler_init: window=16384 of dataset_size=1125899906842624 is too large for the TORCH "
              "orders; use a smaller window or DDP_SHUFFLE_HASHED");
}

static void test_bad_calls(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s, empty;
    ddp_sampler_state at;
    (void)state;
    d.dataset_size = 100;
    d.num_replicas = 4;
    memset(&empty, 0, sizeof empty);
    start(&s, &d);
    ddp_sampler_set_epoch(NULL, 1);
    ddp_sampler_free(NULL);
    assert_int_equal(ddp_sampler_length(NULL), 0);
    assert_int_equal(ddp_sampler_batch_size(NULL), 0);
    assert_int_equal(ddp_sampler_batch_size(&empty), 0);
    assert_int_equal(ddp_sampler_batch_size(&s), 1);
    assert_int_equal(ddp_sampler_next(NULL, NULL), -1);
    assert_int_equal(ddp_sampler_seek(NULL, 0), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(),
                        "ddp_sampler_seek: sampler is NULL or not initialized; call ddp_sampler_init first");
    assert_int_equal(ddp_sampler_seek(&empty, 0), DDP_ERR_INVALID);
    assert_int_equal(ddp_sampler_seek(&s, 26), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_seek: position=26; use 0 to 25 on rank 0");
    assert_int_equal(ddp_sampler_seek(&s, -1), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_seek: position=-1; use 0 to 25 on rank 0");
    assert_int_equal(ddp_sampler_save(&s, NULL), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_save: sampler or state is NULL, or sampler is not "
                                          "initialized; call ddp_sampler_init first");
    assert_int_equal(ddp_sampler_save(NULL, &at), DDP_ERR_INVALID);
    assert_int_equal(ddp_sampler_save(&empty, &at), DDP_ERR_INVALID);
    assert_int_equal(ddp_sampler_load(&s, NULL), DDP_ERR_INVALID);
    assert_string_equal(ddp_last_error(), "ddp_sampler_load: sampler or state is NULL, or sampler is not "
                                          "initialized; call ddp_sampler_init first");
    ddp_sampler_free(&s);
}

static void refuse_state(ddp_sampler *s, ddp_sampler_state at, ddp_result result, const char *message) {
    int64_t cursor = s->cursor;
    assert_int_equal(ddp_sampler_load(s, &at), result);
    assert_string_equal(ddp_last_error(), message);
    assert_int_equal(s->cursor, cursor);
}

static void test_bad_states(void **state) {
    ddp_sampler_desc d = DDP_ZERO;
    ddp_sampler s;
    ddp_sampler_state good, at;
    (void)state;
    d.dataset_size = 100;
    d.num_replicas = 2;
    d.seed = 5;
    d.global_batch = 16;
    start(&s, &d);
    for (int k = 0; k < 10; k++) ddp_sampler_next(&s, NULL);
    assert_int_equal(ddp_sampler_save(&s, &good), DDP_OK);
    at = good;
    at.dataset_size = 99;
    refuse_state(
        &s, at, DDP_ERR_INVALID,
        "ddp_sampler_load: state has dataset_size=99, but sampler has 100; use a sampler with the same desc");
    at = good;
    at.seed = 6;
    refuse_state(&s, at, DDP_ERR_INVALID,
                 "ddp_sampler_load: state has seed=6, but sampler has 5; use a sampler with the same desc");
    at = good;
    at.shuffle = DDP_SHUFFLE_HASHED;
    refuse_state(
        &s, at, DDP_ERR_INVALID,
        "ddp_sampler_load: state has shuffle=2, but sampler has 0; use a sampler with the same desc");
    at = good;
    at.no_shuffle = 1;
    refuse_state(
        &s, at, DDP_ERR_INVALID,
        "ddp_sampler_load: state has no_shuffle=1, but sampler has 0; use a sampler with the same desc");
    at = good;
    at.position = 101;
    refuse_state(&s, at, DDP_ERR_CORRUPT,
                 "ddp_sampler_load: position=101 block_offset=2 num_replicas=2 global_batch=16 is invalid in "
                 "an epoch of 100 samples");
    at = good;
    at.position = -1;
    refuse_state(&s, at, DDP_ERR_CORRUPT,
                 "ddp_sampler_load: position=-1 block_offset=2 num_replicas=2 global_batch=16 is invalid in "
                 "an epoch of 100 samples");
    at = good;
    at.position = 100;
    refuse_state(&s, at, DDP_ERR_CORRUPT,
                 "ddp_sampler_load: position=100 block_offset=2 num_replicas=2 global_batch=16 is invalid in "
                 "an epoch of 100 samples");
    at = good;
    at.block_offset = 8;
    refuse_state(&s, at, DDP_ERR_CORRUPT,
                 "ddp_sampler_load: position=16 block_offset=8 num_replicas=2 global_batch=16 is invalid in "
                 "an epoch of 100 samples");
    at = good;
    at.num_replicas = 0;
    refuse_state(&s, at, DDP_ERR_CORRUPT,
                 "ddp_sampler_load: position=16 block_offset=2 num_replicas=0 global_batch=16 is invalid in "
                 "an epoch of 100 samples");
    at = good;
    at.global_batch = 0;
    refuse_state(&s, at, DDP_ERR_CORRUPT,
                 "ddp_sampler_load: position=16 block_offset=2 num_replicas=2 global_batch=0 is invalid in "
                 "an epoch of 100 samples");
    memset(&at, 0, sizeof at); /* never saved */
    refuse_state(
        &s, at, DDP_ERR_INVALID,
        "ddp_sampler_load: state has dataset_size=0, but sampler has 100; use a sampler with the same desc");
    assert_int_equal(ddp_sampler_load(&s, &good), DDP_OK);
    ddp_sampler_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_vectors),
        cmocka_unit_test(test_torch_matches_reference),
        cmocka_unit_test(test_legacy_matches_reference),
        cmocka_unit_test(test_no_shuffle_matches_reference),
        cmocka_unit_test(test_hashed_is_dealt_by_the_same_rules),
        cmocka_unit_test(test_inside_out_matches_reference),
        cmocka_unit_test(test_the_bound_itself),
        cmocka_unit_test(test_every_window_size),
        cmocka_unit_test(test_long_orders),
        cmocka_unit_test(test_epochs_do_not_leak_into_each_other),
        cmocka_unit_test(test_seek_everywhere),
        cmocka_unit_test(test_load_onto_another_world),
        cmocka_unit_test(test_load_again_and_again),
        cmocka_unit_test(test_load_on_the_same_world_changes_nothing),
        cmocka_unit_test(test_ranks_of_uneven_length_agree_at_the_end),
        cmocka_unit_test(test_save_inside_a_batch_that_a_load_cut),
        cmocka_unit_test(test_advice_inside_a_batch_that_a_load_cut),
        cmocka_unit_test(test_resume_in_a_short_batch),
        cmocka_unit_test(test_save_after_a_seek_from_the_end),
        cmocka_unit_test(test_weights_match_reference),
        cmocka_unit_test(test_blocks_of_any_weights),
        cmocka_unit_test(test_blocks_of_equal_weights),
        cmocka_unit_test(test_weights_load_onto_another_world),
        cmocka_unit_test(test_weights_save_inside_a_batch),
        cmocka_unit_test(test_hashed_is_a_bijection),
        cmocka_unit_test(test_hashed_at_the_largest_size),
        cmocka_unit_test(test_hashed_mixes),
        cmocka_unit_test(test_hashed_reaches_every_small_order),
        cmocka_unit_test(test_memory_is_one_window),
        cmocka_unit_test(test_bad_desc),
        cmocka_unit_test(test_bad_calls),
        cmocka_unit_test(test_bad_states),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

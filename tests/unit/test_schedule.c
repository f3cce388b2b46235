/*  test_schedule.c - schedules as data: the lists of every kind against worked examples and closed formulas,
    the checker against an independent executor, the simulator against published bubble rates, CSV and
    pictures, lowering, and the division of layers into stages against brute force. */
#undef DDP_PIPELINE_IMPLEMENTATION_INCLUDED /* it looks inside */
#define DDP_PIPELINE_IMPLEMENTATION
#include "ddp_pipeline.h"
#include "random.h"

#include "../support/unit.h"
#include "../support/watchdog.h"
#include <math.h>
#include <time.h>

static const ddp_schedule_kind kinds[] = {
    DDP_SCHEDULE_1F1B,       DDP_SCHEDULE_NAIVE,      DDP_SCHEDULE_GPIPE,     DDP_SCHEDULE_INTERLEAVED_1F1B,
    DDP_SCHEDULE_LOOPED_BFS, DDP_SCHEDULE_ZB_H1,      DDP_SCHEDULE_ZB_H2,     DDP_SCHEDULE_INTERLEAVED_ZB_1P,
    DDP_SCHEDULE_ZB_V,       DDP_SCHEDULE_DUALPIPE_V, DDP_SCHEDULE_PIPEDREAM, DDP_SCHEDULE_PIPEDREAM_2BW,
    DDP_SCHEDULE_AUTO};
enum { KINDS = (int)(sizeof kinds / sizeof *kinds) };

static ddp_result make(ddp_schedule **out, ddp_schedule_kind kind, int p, int m, int v) {
    ddp_schedule_desc desc = DDP_ZERO;
    desc.kind = kind;
    desc.rank_count = p;
    desc.microbatch_count = m;
    desc.chunk_count = v;
    return ddp_schedule_create(out, &desc);
}

static void ok(ddp_result result) {
    if (result != DDP_OK) fail_msg("%s: %s", ddp_result_name(result), ddp_last_error());
}

static ddp_schedule *made(ddp_schedule_kind kind, int p, int m, int v) {
    ddp_schedule *s;
    ok(make(&s, kind, p, m, v));
    ok(ddp_schedule_check(s));
    return s;
}

static char *drawn(const ddp_schedule *s, ddp_schedule_format format, const ddp_stage_cost *costs) {
    size_t size = 0, room;
    char *text;
    ok(ddp_schedule_draw(s, format, costs, NULL, NULL, &size));
    text = (char *)malloc(size);
    room = size;
    ok(ddp_schedule_draw(s, format, costs, NULL, text, &room));
    assert_int_equal(room, size);
    assert_int_equal(strlen(text) + 1, size);
    return text;
}

static char *written(const ddp_schedule *s, ddp_schedule_format format) {
    size_t size = 0;
    char *text = drawn(s, format, NULL), *same;
    ok(ddp_schedule_write(s, format, NULL, &size));
    same = (char *)malloc(size);
    ok(ddp_schedule_write(s, format, same, &size));
    assert_string_equal(text, same);
    free(same);
    return text;
}

static ddp_schedule_report simulated(const ddp_schedule *s, const ddp_stage_cost *costs,
                                     ddp_rank_report *ranks) {
    ddp_schedule_report report = DDP_ZERO;
    report.ranks = ranks;
    ok(ddp_schedule_simulate(s, costs, &report));
    return report;
}

static void refused(ddp_result result, const char *says) {
    assert_int_equal(result, DDP_ERR_INVALID);
    if (!strstr(ddp_last_error(), says)) fail_msg("\"%s\" does not contain \"%s\"", ddp_last_error(), says);
}

/* --- the lists --- */

static void line_is(ddp_schedule_kind kind, int p, int m, int v, int rank, const char *line) {
    ddp_schedule *s = made(kind, p, m, v);
    char *text = written(s, DDP_SCHEDULE_CSV), *at = text;
    for (int r = 0; r < rank; r++) at = strchr(at, '\n') + 1;
    *strchr(at, '\n') = 0;
    assert_string_equal(at, line);
    free(text);
    ddp_schedule_destroy(s);
}

static void worked_examples(void **state) {
    (void)state;
    line_is(
        DDP_SCHEDULE_ZB_H1, 4, 8, 1, 0,
        "0F0,0F1,0F2,0F3,0I0,0W0,0F4,0I1,0W1,0F5,0I2,0W2,0F6,0I3,0W3,0F7,0I4,0W4,0I5,0W5,0I6,0W6,0I7,0W7");
    line_is(
        DDP_SCHEDULE_ZB_H1, 4, 8, 1, 3,
        "3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0,3F4,3I4,3W1,3F5,3I5,3W2,3F6,3I6,3W3,3F7,3I7,3W4,3W5,3W6,3W7");
    line_is(
        DDP_SCHEDULE_ZB_V, 2, 4, 2, 0,
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,0I2,0W2,0I3,0W3");
    line_is(
        DDP_SCHEDULE_ZB_V, 2, 4, 2, 1,
        "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,1I3,1W2,2W3,1W3");
    line_is(DDP_SCHEDULE_INTERLEAVED_1F1B, 2, 4, 2, 0,
            "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3");
    line_is(DDP_SCHEDULE_INTERLEAVED_1F1B, 2, 4, 2, 1,
            "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3");
    /* ZB-V with fewer micro-batches than fill the pipeline: the list of 2p - 1 without the others, as in
       PyTorch */
    line_is(DDP_SCHEDULE_ZB_V, 2, 2, 2, 1, "1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,2W1,1I1,1W1");
    line_is(DDP_SCHEDULE_ZB_V, 3, 2, 2, 2, "2F0,3F0,2F1,3F1,3I0,3W0,2I0,2W0,3I1,3W1,2I1,2W1");
    line_is(DDP_SCHEDULE_ZB_V, 4, 3, 2, 2,
            "2F0,2F1,2F2,5F0,5F1,5F2,5I0,5W0,5I1,5W1,2I0,2W0,5I2,5W2,2I1,2W1,2I2,2W2");
    line_is(DDP_SCHEDULE_ZB_V, 4, 5, 2, 1,
            "1F0,1F1,1F2,1F3,1F4,6F0,6F1,6I0,6W0,6F2,6I1,6W1,6F3,6I2,6W2,1I0,1W0,6F4,6I3,6W3,1I1,1W1,6I4,6W4,"
            "1I2,1W2,1I3,"
            "1I4,1W3,1W4");
    /* rounds of 6, 5 and 3 micro-batches, as ScheduleInterleaved1F1B of PyTorch 2.6 has them */
    line_is(
        DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 6, 2, 0,
        "0F0,0F1,0F2,0F3,0F4,0F5,4F0,4F1,4F2,4F3,4F4,4F5,4B0,4B1,4B2,4B3,4B4,4B5,0B0,0B1,0B2,0B3,0B4,0B5");
    line_is(
        DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 6, 2, 3,
        "3F0,3F1,3F2,3F3,3F4,3F5,7F0,7B0,7F1,7B1,7F2,7B2,7F3,7B3,7F4,7B4,7F5,7B5,3B0,3B1,3B2,3B3,3B4,3B5");
    line_is(DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 10, 2, 2,
            "2F0,2F1,2F2,2F3,2F4,6F0,6F1,6F2,6B0,6F3,6B1,6F4,6B2,2F5,6B3,2F6,6B4,2F7,2B0,2F8,2B1,2F9,2B2,6F5,"
            "2B3,6F6,2B4,"
            "6F7,6B5,6F8,6B6,6F9,6B7,6B8,6B9,2B5,2B6,2B7,2B8,2B9");
    line_is(DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 3, 2, 1, "1F0,1F1,1F2,5F0,5F1,5F2,5B0,5B1,5B2,1B0,1B1,1B2");
    line_is(DDP_SCHEDULE_GPIPE, 3, 3, 1, 1, "1F0,1F1,1F2,1B0,1B1,1B2");
    line_is(DDP_SCHEDULE_NAIVE, 2, 2, 2, 1, "1F0,3F0,3B0,1B0,1F1,3F1,3B1,1B1");
    line_is(DDP_SCHEDULE_LOOPED_BFS, 2, 2, 2, 0, "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1");
    line_is(DDP_SCHEDULE_1F1B, 3, 4, 1, 0, "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3");
    line_is(DDP_SCHEDULE_1F1B, 3, 1, 1, 0, "0F0,0B0");
    /* DeepSeek's order, as in a test of PyTorch */
    line_is(DDP_SCHEDULE_DUALPIPE_V, 4, 10, 2, 0,
            "0F0,0F1,0F2,0F3,0F4,0F5,0F6,7F0,7I0,7W0,7F1,7I1,7W1,7F2,7I2,7W2,7F3,(0F7;7B3)OVERLAP_F_B,(7F4;"
            "0B0)OVERLAP_F_B,(0F8;7B4)OVERLAP_F_B,"
            "(7F5;0B1)OVERLAP_F_B,(0F9;7B5)OVERLAP_F_B,(7F6;0B2)OVERLAP_F_B,7B6,(7F7;0B3)OVERLAP_F_B,7B7,("
            "7F8;0B4)OVERLAP_F_B,7B8,(7F9;0B5)OVERLAP_F_B,"
            "7B9,0I6,0W6,0I7,0W7,0I8,0W8,0I9,0W9");
    line_is(DDP_SCHEDULE_DUALPIPE_V, 4, 10, 2, 3,
            "3F0,4F0,3F1,4F1,3F2,4F2,3F3,4F3,3F4,4B0,(4F4;3B0)OVERLAP_F_B,(3F5;4B1)OVERLAP_F_B,(4F5;3B1)"
            "OVERLAP_F_B,(3F6;4B2)OVERLAP_F_B,(4F6;3B2)OVERLAP_F_B,"
            "(3F7;4B3)OVERLAP_F_B,(4F7;3B3)OVERLAP_F_B,(3F8;4B4)OVERLAP_F_B,(4F8;3B4)OVERLAP_F_B,(3F9;4B5)"
            "OVERLAP_F_B,(4F9;3B5)OVERLAP_F_B,4B6,3B6,4B7,3B7,4I8,"
            "3I8,4I9,3I9,4W8,3W8,4W9,3W9");
}

/* Whether the kind is defined for these numbers, by its definition. */
static int is_legal(ddp_schedule_kind kind, int p, int m, int v) {
    switch (kind) {
    case DDP_SCHEDULE_NAIVE:
    case DDP_SCHEDULE_LOOPED_BFS: return 1;
    /* PyTorch's rounds have one size. */
    case DDP_SCHEDULE_INTERLEAVED_1F1B: return m % (m < p ? 1 : m / p) == 0;
    case DDP_SCHEDULE_INTERLEAVED_ZB_1P: return m % p == 0;
    case DDP_SCHEDULE_ZB_V: return v == 2;
    case DDP_SCHEDULE_DUALPIPE_V: return v == 2 && m >= 2 * p;
    case DDP_SCHEDULE_PIPEDREAM_2BW: return v == 1 && m >= p;
    default: return v == 1;
    }
}

static void same_lists(const ddp_schedule *a, const ddp_schedule *b) {
    char *left = written(a, DDP_SCHEDULE_CSV), *right = written(b, DDP_SCHEDULE_CSV);
    assert_string_equal(left, right);
    free(left);
    free(right);
}

/* CSV round trip, and all stages of lowering of a schedule, which takes the same time unless I and W
   merge. */
static void goes_round(ddp_schedule *s) {
    ddp_schedule *other, *again;
    ddp_schedule_report before = simulated(s, NULL, NULL), after;
    char *text = written(s, DDP_SCHEDULE_CSV);
    ok(ddp_schedule_parse(&other, text));
    same_lists(s, other);
    ddp_schedule_destroy(other);
    free(text);
    for (unsigned parts = 0; parts < 16; parts += 1 + parts % 5) {
        ok(ddp_schedule_lower(&other, s, parts));
        ok(ddp_schedule_check(other));
        after = simulated(other, NULL, NULL);
        if (parts && !(parts & DDP_LOWER_MERGE))
            assert_true(before.span == after.span && before.peak_in_flight == after.peak_in_flight);
        assert_int_equal(ddp_schedule_update_interval(other), ddp_schedule_update_interval(s));
        text = written(other, DDP_SCHEDULE_CSV);
        ok(ddp_schedule_parse(&again, text));
        same_lists(other, again);
        free(text);
        ddp_schedule_destroy(again);
        ddp_schedule_destroy(other);
    }
}

static void grid(void **state) {
    int legal = 0, illegal = 0;
    (void)state;
    for (int k = 0; k < KINDS; k++)
        for (int p = 1; p <= 5; p++)
            for (int m = 1; m <= 12; m++)
                for (int v = 1; v <= 3; v++) {
                    ddp_schedule *s;
                    ddp_result result = make(&s, kinds[k], p, m, v);
                    const char *nearest;
                    if ((result == DDP_OK) != is_legal(kinds[k], p, m, v))
                        fail_msg("%s p=%d m=%d v=%d: %s", ddp_schedule_kind_name(kinds[k]), p, m, v,
                                 ddp_last_error());
                    if (result == DDP_OK) {
                        ok(ddp_schedule_check(s));
                        assert_int_equal(ddp_schedule_rank_count(s), p);
                        assert_int_equal(ddp_schedule_stage_count(s), p * v);
                        assert_int_equal(ddp_schedule_microbatch_count(s), m);
                        assert_int_equal(ddp_schedule_get_kind(s), kinds[k]);
                        for (int stage = 0; stage < p * v; stage++) {
                            int vee = kinds[k] == DDP_SCHEDULE_ZB_V || kinds[k] == DDP_SCHEDULE_DUALPIPE_V;
                            assert_int_equal(ddp_schedule_stage_rank(s, stage),
                                             vee && stage >= p ? 2 * p - 1 - stage : stage % p);
                        }
                        assert_int_equal(ddp_schedule_stage_rank(s, -1), -1);
                        assert_int_equal(ddp_schedule_stage_rank(s, ddp_schedule_stage_count(s)), -1);
                        if (m % 3 != 1) goes_round(s);
                        ddp_schedule_destroy(s);
                        legal++;
                        continue;
                    }
                    assert_null(s);
                    nearest = strstr(ddp_last_error(), ", the nearest") ? strstr(ddp_last_error(), "; use ")
                                                                        : NULL;
                    if (!nearest)
                        refused(result, "chunk_count="); /* names the kinds that allow more */
                    else
                        ddp_schedule_destroy(made(kinds[k], p, atoi(nearest + 6), v));
                    illegal++;
                }
    assert_true(legal > 1000 && illegal > 700);
}

static void nearest(void **state) {
    static const struct {
        ddp_schedule_kind kind;
        int p, m, v, interval;
        const char *says;
    } cases[] = {
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 9, 2, 0,
         "microbatch_count=9, but interleaved-1F1B on 4 ranks needs a multiple of 2 (microbatch_count / "
         "rank_count, rounded down); use 8, the nearest"},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 11, 2, 0, "use 12, the nearest"},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 14, 2, 0, "needs a multiple of 3"},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 14, 2, 0, "use 15, the nearest"},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 8, 1000003, 2, 0, "use 1000000, the nearest"},
        {DDP_SCHEDULE_INTERLEAVED_ZB_1P, 4, 9, 2, 0, "needs a multiple of 4; use 8, the nearest"},
        {DDP_SCHEDULE_INTERLEAVED_ZB_1P, 4, 1, 2, 0, "use 4, the nearest"},
        {DDP_SCHEDULE_DUALPIPE_V, 4, 7, 2, 0, "needs at least 8; use 8, the nearest"},
        {DDP_SCHEDULE_PIPEDREAM_2BW, 4, 3, 1, 0, "needs at least 4; use 4, the nearest"},
        {DDP_SCHEDULE_PIPEDREAM_2BW, 4, 12, 1, 3,
         "update_interval=3, but PipeDream-2BW needs a divisor of microbatch_count=12 of at least 4; use 4, "
         "the nearest"},
        {DDP_SCHEDULE_PIPEDREAM, 4, 12, 1, 5, "use 4, the nearest"},
        {DDP_SCHEDULE_1F1B, 4, 12, 1, 3, "update_interval=3, but 1F1B updates once"},
        {DDP_SCHEDULE_1F1B, 4, 8, 2, 0,
         "chunk_count=2, but 1F1B has 1; use another count only with interleaved-1F1B"},
        {DDP_SCHEDULE_ZB_V, 4, 8, 1, 0, "chunk_count=1, but ZB-V has 2"},
        {DDP_SCHEDULE_1F1B, 0, 8, 1, 0, "rank_count=0"},
        {DDP_SCHEDULE_1F1B, 4, 0, 1, 0, "microbatch_count=0"},
        {DDP_SCHEDULE_1F1B, 70000, 1, 1, 0, "rank_count=70000; use 1 to 65536"},
        {DDP_SCHEDULE_NAIVE, 4, 1, -1, 0, "chunk_count=-1"},
        {DDP_SCHEDULE_GPIPE, 60000, 10000000, 1, 0, "are more than"},
        {(ddp_schedule_kind)77, 4, 8, 1, 0, "kind=77"},
    };
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_schedule *s;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        desc.kind = cases[i].kind, desc.rank_count = cases[i].p, desc.microbatch_count = cases[i].m,
        desc.chunk_count = cases[i].v;
        desc.update_interval = cases[i].interval;
        refused(ddp_schedule_create(&s, &desc), cases[i].says);
        assert_null(s);
    }
    refused(ddp_schedule_create(NULL, &desc), "out is NULL");
    refused(ddp_schedule_create(&s, NULL), "desc is NULL");
    memset(&desc, 0, sizeof desc);
    desc.rank_count = desc.microbatch_count = 2;
    desc.alloc_fn = ddp__schedule_malloc;
    refused(ddp_schedule_create(&s, &desc), "both alloc_fn and free_fn");
    desc.alloc_fn = NULL;
    desc.kind = DDP_SCHEDULE_AUTO;
    desc.memory_limit = 0.5;
    refused(ddp_schedule_create(&s, &desc), "use at least 1");
    desc.memory_limit = NAN;
    refused(ddp_schedule_create(&s, &desc), "memory_limit=");
    desc.memory_limit = 1;
    ok(ddp_schedule_create(&s, &desc));
    assert_true(simulated(s, NULL, NULL).peak_memory <= 1);
    ddp_schedule_destroy(s);
}

/* --- simulation --- */

static void published_rates(void **state) {
    static const struct {
        int p, m;
        double f, i, w, transfer, rate[3];
    } rows[] = {
        {8, 24, 18.522, 18.086, 9.337, 0.601, {0.2431, 0.1585, 0.1083}},
        {16, 48, 11.347, 11.248, 8.132, 0.377, {0.2552, 0.1397, 0.0672}},
    };
    static const ddp_schedule_kind which[] = {DDP_SCHEDULE_1F1B, DDP_SCHEDULE_ZB_H1, DDP_SCHEDULE_ZB_H2};
    (void)state;
    for (int r = 0; r < 2; r++) {
        ddp_stage_cost costs[16] = {{0, 0, 0, 0, 0, 0, 0}};
        for (int stage = 0; stage < 16; stage++)
            costs[stage].forward = rows[r].f, costs[stage].input_grad = rows[r].i,
            costs[stage].weight_grad = rows[r].w, costs[stage].transfer = rows[r].transfer;
        for (int k = 0; k < 3; k++) {
            ddp_schedule *s = made(which[k], rows[r].p, rows[r].m, 1);
            assert_true(fabs(simulated(s, costs, NULL).bubble_rate - rows[r].rate[k]) < 5e-5);
            ddp_schedule_destroy(s);
        }
    }
}

/* Bubble and actions in flight, by the formulas. Equal costs f, i, w are powers of two and the like, so that
   sums are exact. */
static void formulas(void **state) {
    static const double cost[][3] = {{1, 1, 1}, {4, 3, 2}, {2, 2, 1}};
    (void)state;
    for (int c = 0; c < 3; c++)
        for (int p = 1; p <= 6; p++)
            for (int turn = 2; turn <= 4; turn++)
                for (int v = 1; v <= 3; v++) {
                    int m = turn * p;
                    double f = cost[c][0], i = cost[c][1], w = cost[c][2], all = f + i + w;
                    ddp_stage_cost costs[18] = {{0, 0, 0, 0, 0, 0, 0}};
                    ddp_rank_report ranks[6];
                    for (int stage = 0; stage < 18; stage++)
                        costs[stage].forward = f, costs[stage].input_grad = i, costs[stage].weight_grad = w;
                    for (int k = 0; k < KINDS; k++) {
                        ddp_schedule *s;
                        ddp_schedule_report report;
                        double bubble = -1;
                        if (!is_legal(kinds[k], p, m, v) || kinds[k] == DDP_SCHEDULE_AUTO) continue;
                        s = made(kinds[k], p, m, v);
                        report = simulated(s, costs, ranks);
                        for (int r = 0; r < p; r++) {
                            int flight = ranks[r].peak_in_flight, last = p - 1 - r;
                            assert_true(ranks[r].busy == m * v * all && ranks[r].peak_memory <= flight);
                            switch (kinds[k]) {
                            case DDP_SCHEDULE_1F1B:
                                bubble = (p - 1) * all;
                                assert_int_equal(flight, m < p - r ? m : p - r);
                                break;
                            case DDP_SCHEDULE_PIPEDREAM:
                                assert_int_equal(ranks[r].weight_versions, p - r);
                                break;
                            case DDP_SCHEDULE_PIPEDREAM_2BW:
                                assert_int_equal(ranks[r].weight_versions, 2);
                                break;
                            case DDP_SCHEDULE_NAIVE: assert_int_equal(flight, v); break;
                            case DDP_SCHEDULE_GPIPE:
                            case DDP_SCHEDULE_LOOPED_BFS:
                                bubble = (p - 1) * all;
                                assert_int_equal(flight, m * v);
                                break;
                            case DDP_SCHEDULE_INTERLEAVED_1F1B:
                                if (v > 1) bubble = (p - 1) * all;
                                assert_int_equal(flight, m * v < (v - 1) * p + 2 * last + 1
                                                             ? m * v
                                                             : (v - 1) * p + 2 * last + 1);
                                break;
                            case DDP_SCHEDULE_ZB_H1:
                                bubble = (p - 1) * (f + i - w);
                                assert_int_equal(flight, p);
                                break;
                            case DDP_SCHEDULE_ZB_H2:
                                if (turn > 2) bubble = (p - 1) * (f + i - 2 * w);
                                assert_int_equal(flight, 2 * p - 1);
                                break;
                            case DDP_SCHEDULE_INTERLEAVED_ZB_1P:
                                if (c == 0) bubble = (p - 1) * (f + i - w);
                                assert_int_equal(flight, v * p);
                                break;
                            case DDP_SCHEDULE_ZB_V:
                                if (c == 0) bubble = 0;
                                assert_true(flight <= 2 * p);
                                break;
                            /* With pairs as one: pairs_as_one. */
                            case DDP_SCHEDULE_DUALPIPE_V:
                                if (c == 0) bubble = (p - 1) * (f + i - w);
                                break;
                            default: break;
                            }
                            if (kinds[k] != DDP_SCHEDULE_PIPEDREAM && kinds[k] != DDP_SCHEDULE_PIPEDREAM_2BW)
                                assert_int_equal(ranks[r].weight_versions, 1);
                        }
                        if (bubble >= 0 && fabs(report.span - m * v * all - bubble) > 1e-9)
                            fail_msg("%s p=%d m=%d v=%d (%g %g %g): bubble %g, by the formula %g",
                                     ddp_schedule_kind_name(kinds[k]), p, m, v, f, i, w,
                                     report.span - m * v * all, bubble);
                        ddp_schedule_destroy(s);
                    }
                }
}

/* DualPipeV in which a pair has its own cost: DeepSeek's (stages/2 - 1)(F&B + B - 3W) on the rank at the tip,
   which has the most pairs. */
static void pairs_as_one(void **state) {
    (void)state;
    for (int p = 2; p <= 6; p++)
        for (double together = 2; together <= 3; together += 0.5) {
            ddp_stage_cost costs[12] = {{0, 0, 0, 0, 0, 0, 0}};
            ddp_rank_report ranks[6];
            ddp_schedule *s = made(DDP_SCHEDULE_DUALPIPE_V, p, 4 * p, 2);
            for (int stage = 0; stage < 2 * p; stage++) {
                costs[stage].forward = costs[stage].input_grad = costs[stage].weight_grad = 1;
                costs[stage].overlapped = together;
            }
            assert_true(simulated(s, costs, ranks).span - ranks[p - 1].busy == (p - 1) * (together + 2 - 3));
            ddp_schedule_destroy(s);
        }
}

static void spans(void **state) {
    static const struct {
        ddp_schedule_kind kind;
        int p, m, v;
        double span;
    } cases[] = {
        {DDP_SCHEDULE_GPIPE, 4, 8, 1, 33},
        {DDP_SCHEDULE_1F1B, 4, 8, 1, 33},
        {DDP_SCHEDULE_ZB_H1, 4, 8, 1, 27},
        {DDP_SCHEDULE_ZB_H2, 4, 8, 1, 24},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 2, 4, 2, 27},
        {DDP_SCHEDULE_ZB_V, 4, 8, 2, 48},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 64, 512, 4, 6333},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ddp_schedule *s = made(cases[i].kind, cases[i].p, cases[i].m, cases[i].v);
        assert_true(simulated(s, NULL, NULL).span == cases[i].span);
        ddp_schedule_destroy(s);
    }
}

/* All parts of the costs: transfers only between ranks, unequal stages, pairs that overlap, memory of either
   half. */
static void costs_count(void **state) {
    ddp_stage_cost costs[4] = {
        {1, 1, 1, 10, 0, 5, 2}, {2, 1, 1, 20, 0, 7, 3}, {1, 1, 1, 40, 0, 11, 4}, {1, 1, 1, 80, 0, 13, 6}};
    ddp_rank_report ranks[4];
    ddp_schedule_report report;
    ddp_schedule *s = made(DDP_SCHEDULE_1F1B, 4, 1, 1);
    (void)state;
    report = simulated(s, costs, ranks); /* F 1+10 2+20 1+40 1 B 2+80 2+40 2+20 2 */
    assert_true(report.makespan == 5 + 70 + 8 + 140 && report.span == report.makespan);
    assert_true(ranks[3].begin == 1 + 10 + 2 + 20 + 1 + 40 && ranks[1].busy == 4 && report.peak_memory == 13);
    assert_true(fabs(report.bubble_rate - (report.span - 4) / report.span) < 1e-12);
    ddp_schedule_destroy(s);

    ok(ddp_schedule_parse(&s, "0F0,1F0,1I0,1W0,0I0,0W0\n")); /* one rank: nothing is transferred */
    report = simulated(s, costs, NULL);
    assert_true(report.makespan == 7 && report.peak_memory == 12);
    ddp_schedule_destroy(s);

    ok(ddp_schedule_parse(&s,
                          "0F0,0I0,0F1,0I1,0W0,0W1\n")); /* I leaves weight_activation until W: 5 2 7 4 2 0 */
    assert_true(simulated(s, costs, NULL).peak_memory == 7);
    ddp_schedule_destroy(s);

    ok(ddp_schedule_parse(&s, "0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,1B1,0B0,0B1"));
    ok(ddp_schedule_check(s));
    assert_true(simulated(s, costs, ranks).makespan == 3 + 3 + 2 + 2 + 4 && ranks[0].busy == 14);
    costs[0].overlapped = 2;
    assert_true(simulated(s, costs, NULL).makespan == 3 + 2 + 2 + 2 + 4);
    ddp_schedule_destroy(s);

    /* Without a separate cost, the output of F1 is sent before B0 begins. */
    ok(ddp_schedule_parse(&s, "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"));
    memset(costs, 0, sizeof costs);
    for (int stage = 0; stage < 2; stage++)
        costs[stage].forward = costs[stage].input_grad = costs[stage].weight_grad = 1;
    assert_true(simulated(s, costs, ranks).makespan == 9 && ranks[0].busy == 6 && ranks[1].end == 7);
    costs[0].overlapped = 3; /* together they wait for both inputs, and both outputs leave at the end */
    assert_true(simulated(s, costs, ranks).makespan == 12 && ranks[0].busy == 6 && ranks[1].end == 10);
    costs[1].forward = -1;
    refused(ddp_schedule_simulate(s, costs, &report), "costs[1].forward=-1");
    costs[1].forward = INFINITY;
    refused(ddp_schedule_simulate(s, costs, &report), "costs[1].forward=inf");
    refused(ddp_schedule_simulate(s, NULL, NULL), "report is NULL");
    refused(ddp_schedule_simulate(NULL, NULL, &report), "schedule is NULL");
    ddp_schedule_destroy(s);
}

/* Zero Bubble's own schedules, found by its authors' search: those of ddp are as good to four decimals,
   within the same memory. A transformer stores 34 + 5 a s / h bytes per element from F to I and 32 from I to
   W. */
static void made_to_measure(void **state) {
    static const struct {
        int p, m;
        double f, i, w, transfer, left, rate[2];
    } rows[] = {
        {8, 24, 18.522, 18.086, 9.337, 0.601, 32 / 87.333, {0.1585, 0.0433}},
        {8, 32, 29.802, 29.428, 19.530, 0.577, 32 / 74.0, {0.1045, 0.0022}},
        {16, 48, 11.347, 11.248, 8.132, 0.377, 32 / 74.0, {0.1397, 0.0066}},
        {32, 96, 10.419, 10.207, 7.715, 0.408, 32 / 74.0, {0.1421, 0.0038}},
        {32, 256, 10.402, 10.248, 7.698, 0.460, 32 / 74.0, {0.0594, 0.0018}},
    };
    (void)state;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        ddp_stage_cost costs[32] = {{0, 0, 0, 0, 0, 0, 0}};
        for (int stage = 0; stage < 32; stage++) {
            costs[stage].forward = rows[r].f, costs[stage].input_grad = rows[r].i,
            costs[stage].weight_grad = rows[r].w, costs[stage].transfer = rows[r].transfer;
            costs[stage].weight_activation = rows[r].left;
        }
        for (int k = 0; k < 2; k++) {
            ddp_schedule_desc desc = DDP_ZERO;
            ddp_schedule_report report;
            ddp_schedule *s;
            desc.kind = DDP_SCHEDULE_AUTO, desc.rank_count = rows[r].p, desc.microbatch_count = rows[r].m,
            desc.costs = costs;
            desc.memory_limit = k ? 2 * rows[r].p : 0;
            ok(ddp_schedule_create(&s, &desc));
            ok(ddp_schedule_check(s));
            report = simulated(s, costs, NULL);
            if (report.bubble_rate > rows[r].rate[k] + 1.5e-4)
                fail_msg("p=%d m=%d limit %dp: %.4f", rows[r].p, rows[r].m, k + 1, report.bubble_rate);
            assert_true(report.peak_memory <= (k + 1) * rows[r].p * (1 + 1e-9));
            ddp_schedule_destroy(s);
        }
    }
}

/* Unequal stages and random costs: never slower than the known kinds that fit into the same memory, never
   more memory than allowed. */
static void made_to_any_measure(void **state) {
    (void)state;
    for (int round = 0; round < 150; round++) {
        int p = 1 + (int)(random_u64() % 6), m = 1 + (int)(random_u64() % 12);
        ddp_stage_cost costs[6] = {{0, 0, 0, 0, 0, 0, 0}};
        ddp_schedule_desc desc = DDP_ZERO;
        ddp_schedule_report report, h1;
        ddp_schedule *s, *other;
        for (int stage = 0; stage < p; stage++) {
            costs[stage].forward = (double)(random_u64() % 20),
            costs[stage].input_grad = (double)(1 + random_u64() % 20);
            costs[stage].weight_grad = (double)(random_u64() % 20),
            costs[stage].transfer = (double)(random_u64() % 5);
            costs[stage].activation = (double)(1 + random_u64() % 3),
            costs[stage].weight_activation = (double)(random_u64() % 4);
        }
        desc.kind = DDP_SCHEDULE_AUTO, desc.rank_count = p, desc.microbatch_count = m, desc.costs = costs;
        desc.memory_limit = 3 + (double)(random_u64() % 12);
        ok(ddp_schedule_create(&s, &desc));
        ok(ddp_schedule_check(s));
        report = simulated(s, costs, NULL);
        assert_true(report.peak_memory <= desc.memory_limit * (1 + 1e-9));
        other = made(DDP_SCHEDULE_ZB_H1, p, m, 1);
        h1 = simulated(other, costs, NULL);
        assert_true(h1.peak_memory > desc.memory_limit || report.span <= h1.span * (1 + 1e-9));
        ddp_schedule_destroy(other);
        ddp_schedule_destroy(s);
    }
}

/* A larger memory limit never gives a slower schedule, for any two limits and any costs. */
static void more_memory_helps(void **state) {
    (void)state;
    for (int round = 0; round < 20; round++) {
        int p = 2 + (int)(random_u64() % 8), m = 1 + (int)(random_u64() % 30), equal = round % 2;
        ddp_stage_cost costs[9];
        double before = HUGE_VAL, activation = 1;
        memset(costs, 0, sizeof costs);
        for (int stage = 0; stage < p; stage++) {
            double slower = equal ? 1 : 1 + (double)(random_u64() % 40) / 100;
            costs[stage].forward = slower;
            costs[stage].input_grad = slower * (0.9 + (double)(round % 7) / 20);
            costs[stage].weight_grad = slower * (0.4 + (double)(round % 5) / 7);
            costs[stage].transfer = (double)(round % 4) / 40;
            costs[stage].weight_activation = (double)(round % 3) / 3;
            if (round % 3 == 2) costs[stage].activation = 1 + (double)(random_u64() % 4) / 4;
            if (costs[stage].activation > activation) activation = costs[stage].activation;
        }
        for (double limit = activation; limit < 4 * activation * p;
             limit += activation * (0.1 + (double)(random_u64() % 100) / 90)) {
            ddp_schedule_desc desc = DDP_ZERO;
            ddp_schedule_report report;
            ddp_schedule *s;
            desc.kind = DDP_SCHEDULE_AUTO;
            desc.rank_count = p;
            desc.microbatch_count = m;
            desc.costs = costs;
            desc.memory_limit = limit;
            ok(ddp_schedule_create(&s, &desc));
            report = simulated(s, costs, NULL);
            assert_true(report.peak_memory <= limit * (1 + 1e-9));
            if (report.span > before * (1 + 1e-9))
                fail_msg("p=%d m=%d: span %.9g with memory_limit %g, %.9g with less", p, m, report.span,
                         limit, before);
            before = report.span;
            ddp_schedule_destroy(s);
        }
    }
}

/* AUTO computes the span of the simulator: it stops early only if nothing faster could follow. */
static void auto_spans(void **state) {
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_stage_cost costs[4];
    ddp_schedule *s;
    (void)state;
    memset(costs, 0, sizeof costs);
    for (int stage = 0; stage < 4; stage++) costs[stage].forward = 1, costs[stage].activation = 1e308;
    desc.kind = DDP_SCHEDULE_AUTO;
    desc.rank_count = 4;
    desc.microbatch_count = 8;
    desc.costs = costs;
    ok(ddp_schedule_create(&s, &desc)); /* the memory of four micro-batches is not a finite number */
    ok(ddp_schedule_check(s));
    ddp_schedule_destroy(s);
    for (int stage = 0; stage < 4; stage++) costs[stage].forward = 0, costs[stage].activation = 0;
    ok(ddp_schedule_create(&s, &desc)); /* nothing takes any time */
    ok(ddp_schedule_check(s));
    ddp_schedule_destroy(s);
    for (int stage = 0; stage < 4; stage++) costs[stage].forward = 1e308;
    refused(ddp_schedule_create(&s, &desc),
            "the time of 8 micro-batches is not a finite number; use smaller costs");
}

/* Seconds of CPU time, which other programs on the machine hardly change. */
static double cpu_seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* Large schedules. Times are compared with each other: lowering was 250 times as slow as the check when every
   rank looked at all messages, and AUTO 60 times as slow as the simulation. */
static void large(void **state) {
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_schedule_report report = DDP_ZERO;
    ddp_schedule *s, *low;
    double begin, check, lower, simulate, make;
    (void)state;
    s = made(DDP_SCHEDULE_1F1B, 4096, 64, 1);
    begin = cpu_seconds();
    ok(ddp_schedule_check(s));
    check = cpu_seconds() - begin;
    begin = cpu_seconds();
    ok(ddp_schedule_lower(&low, s, 0));
    lower = cpu_seconds() - begin;
    if (lower > 40 * check + 0.1) fail_msg("lowering takes %.3f s, the check %.3f s", lower, check);
    ok(ddp_schedule_check(low));
    ddp_schedule_destroy(low);
    ddp_schedule_destroy(s);
    desc.kind = DDP_SCHEDULE_AUTO;
    desc.rank_count = 512;
    desc.microbatch_count = 512;
    begin = cpu_seconds();
    ok(ddp_schedule_create(&s, &desc));
    make = cpu_seconds() - begin;
    begin = cpu_seconds();
    ok(ddp_schedule_simulate(s, NULL, &report));
    simulate = cpu_seconds() - begin;
    if (make > 30 * simulate + 0.1) fail_msg("AUTO takes %.3f s, the simulation %.3f s", make, simulate);
    ddp_schedule_destroy(s);
}

/* --- the checker --- */

enum { STAGES = 16, BATCHES = 16, RANKS = 6 };

/* Executes a schedule, one action of each rank in turn, with room for one message between two ranks. Returns
   1 if it is complete and reached its end. */
typedef struct executor {
    const ddp_schedule *s;
    int position[RANKS], forward[STAGES][BATCHES], gradient[STAGES][BATCHES], weight[STAGES][BATCHES],
        there[2][STAGES][BATCHES], messages;
    ddp_action channel[RANKS][RANKS];
    int full[RANKS][RANKS];
} executor;

/* Runs an action, or only checks whether it could run: 1 now, 0 not yet, -1 never. */
static int execute(executor *e, int rank, const ddp_action *a, int run) {
    int last = ddp_schedule_stage_count(e->s) - 1, i = a->microbatch,
        back = a->kind == DDP_ACTION_SEND_B || a->kind == DDP_ACTION_RECV_B, from, to;
    if (a->kind == DDP_ACTION_IDLE) return 1;
    if (ddp_schedule_stage_rank(e->s, a->stage) != rank) return -1;
    switch (a->kind) {
    case DDP_ACTION_FORWARD:
        if (e->forward[a->stage][i]) return -1;
        if (a->stage > 0) {
            int apart = ddp_schedule_stage_rank(e->s, a->stage - 1) != rank;
            if (!(e->messages && apart ? e->there[0][a->stage][i] : e->forward[a->stage - 1][i])) return 0;
        }
        if (run) e->forward[a->stage][i] = 1;
        return 1;
    case DDP_ACTION_INPUT_GRAD:
    case DDP_ACTION_BACKWARD:
        if (e->gradient[a->stage][i] || (a->kind == DDP_ACTION_BACKWARD && e->weight[a->stage][i])) return -1;
        if (!e->forward[a->stage][i]) return 0;
        if (a->stage < last) {
            int apart = ddp_schedule_stage_rank(e->s, a->stage + 1) != rank;
            if (!(e->messages && apart ? e->there[1][a->stage][i] : e->gradient[a->stage + 1][i])) return 0;
        }
        if (run) e->gradient[a->stage][i] = 1;
        if (run && a->kind == DDP_ACTION_BACKWARD) e->weight[a->stage][i] = 1;
        return 1;
    case DDP_ACTION_WEIGHT_GRAD:
        if (e->weight[a->stage][i]) return -1;
        if (run) e->weight[a->stage][i] = e->gradient[a->stage][i];
        return e->gradient[a->stage][i];
    case DDP_ACTION_SEND_F:
    case DDP_ACTION_SEND_B:
        if (a->stage == (back ? 0 : last)) return -1;
        to = ddp_schedule_stage_rank(e->s, a->stage + (back ? -1 : 1));
        if (to == rank) return -1;
        if (e->full[rank][to] || !(back ? e->gradient : e->forward)[a->stage][i]) return 0;
        if (run) e->channel[rank][to] = *a, e->full[rank][to] = 1;
        return 1;
    case DDP_ACTION_RECV_F:
    case DDP_ACTION_RECV_B:
        if (a->stage == (back ? last : 0)) return -1;
        from = ddp_schedule_stage_rank(e->s, a->stage + (back ? 1 : -1));
        if (from == rank || e->there[back][a->stage][i]) return -1;
        if (!e->full[from][rank]) return 0;
        if (e->channel[from][rank].microbatch != i
            || e->channel[from][rank].stage != a->stage + (back ? 1 : -1)
            || (e->channel[from][rank].kind == DDP_ACTION_SEND_B) != back)
            return -1;
        if (run) e->full[from][rank] = 0, e->there[back][a->stage][i] = 1;
        return 1;
    default: return -1;
    }
}

static int executes(const ddp_schedule *s) {
    static executor e;
    int moved = 1;
    if (s->stage_count == 0) return 0;
    memset(&e, 0, sizeof e);
    e.s = s;
    for (int i = 0; i < s->count; i++) e.messages |= ddp__action_communicates(s->actions[i].kind);
    while (moved) {
        moved = 0;
        for (int rank = 0; rank < s->rank_count; rank++) {
            int count, at = e.position[rank], n, can = 1;
            const ddp_action *list = ddp_schedule_actions(s, rank, &count);
            if (at == count) continue;
            n = 1 + list[at].overlaps;
            if (at + n > count
                || (n == 2
                    && (list[at + 1].overlaps || !ddp__action_computes(list[at].kind)
                        || !ddp__action_computes(list[at + 1].kind)
                        || (list[at].kind == DDP_ACTION_FORWARD)
                               == (list[at + 1].kind == DDP_ACTION_FORWARD))))
                return 0;
            for (int k = 0; k < n; k++) {
                int one = execute(&e, rank, &list[at + k], 0);
                if (one < 0) return 0;
                can &= one;
            }
            for (int k = 0; k < n && can; k++) execute(&e, rank, &list[at + k], 1);
            if (can) e.position[rank] += n, moved = 1;
        }
    }
    for (int rank = 0; rank < s->rank_count; rank++) {
        if (e.position[rank] < s->first[rank + 1] - s->first[rank]) return 0;
        for (int other = 0; other < s->rank_count; other++)
            if (e.full[rank][other]) return 0;
    }
    for (int stage = 0; stage < s->stage_count; stage++)
        for (int i = 0; i < s->microbatch_count; i++)
            if (!e.forward[stage][i] || !e.gradient[stage][i] || !e.weight[stage][i]) return 0;
    return 1;
}

/* A copy with one thing changed. */
static ddp_schedule *damaged(const ddp_schedule *s) {
    ddp_schedule *to = ddp__schedule_new_like(s), *out;
    int what = (int)(random_u64() % 5), rank = (int)(random_u64() % (unsigned)s->rank_count),
        size = s->first[rank + 1] - s->first[rank];
    int i = s->first[rank] + (int)(random_u64() % (unsigned)size),
        j = s->first[rank] + (int)(random_u64() % (unsigned)size);
    if (what == 1) j = i + 1 < s->first[rank + 1] ? i + 1 : i;
    for (int r = 0; r < s->rank_count; r++) {
        for (int k = s->first[r]; k < s->first[r + 1]; k++) {
            ddp_action a = s->actions[k];
            if (what < 2 && (k == i || k == j)) a = s->actions[i + j - k];         /* two change places */
            if (what == 2 && k == i) continue;                                     /* one is left out */
            if (what == 3 && k == j) ddp__schedule_push_action(to, s->actions[i]); /* one comes twice */
            /* One is for another micro-batch. */
            if (what == 4 && k == i) a.microbatch = (a.microbatch + 1) % s->microbatch_count;
            ddp__schedule_push_action(to, a);
        }
        ddp__schedule_end_rank(to);
    }
    ok(ddp__schedule_finish(&out, to));
    return out;
}

static void checker_against_executor(void **state) {
    int right = 0, wrong = 0;
    (void)state;
    for (int round = 0; round < 4000; round++) {
        int k = (int)(random_u64() % KINDS), p = 1 + (int)(random_u64() % 4),
            v = kinds[k] == DDP_SCHEDULE_ZB_V || kinds[k] == DDP_SCHEDULE_DUALPIPE_V ? 2 : 1;
        int m = p * (1 + (int)(random_u64() % 3)), times = 1 + (int)(random_u64() % 2);
        ddp_schedule *s, *to;
        if (kinds[k] == DDP_SCHEDULE_DUALPIPE_V && m < 2 * p) m = 2 * p;
        s = made(kinds[k], p, m, v);
        if (round % 2) {
            ok(ddp_schedule_lower(&to, s, DDP_LOWER_COMM));
            ddp_schedule_destroy(s);
            s = to;
        }
        assert_true(executes(s));
        while (times--) {
            to = damaged(s);
            ddp_schedule_destroy(s);
            s = to;
        }
        if ((ddp_schedule_check(s) == DDP_OK) != executes(s)) {
            char *text = written(s, DDP_SCHEDULE_CSV);
            fail_msg("executor: %d, checker: %s\n%s", executes(s), ddp_last_error(), text);
        }
        if (executes(s))
            right++;
        else {
            wrong++;
            assert_true(s->stage_count == 0
                        || (strstr(ddp_last_error(), "ddp_schedule_check: rank ")
                            && strstr(ddp_last_error(), " position ")));
        }
        ddp_schedule_destroy(s);
    }
    assert_true(right > 200 && wrong > 2000);
}

/* An error names rank, position, action and reason. */
static void checker_says(void **state) {
    static const struct {
        const char *csv, *says;
    } cases[] = {
        {"0F0,0B0\n1B0,1F0",
         "rank 1 position 0 1B0: its forward 1F0 comes later on this rank, at position 1"},
        {"0F0,0W0,0I0",
         "rank 0 position 1 0W0: its input gradient 0I0 comes later on this rank, at position 2"},
        {"0F0,0I0,0W0\n1F0,1I0", "rank 1 position 1 1I0: its weight gradient 1W0 is missing on this rank"},
        {"0F0,0B0\n1F0,1W0", "rank 1 position 1 1W0: its input gradient 1I0 is missing on this rank"},
        {"0F0,0F1,0B0,0B1\n1F0,1B0,1B1", "rank 1 position 2 1B1: its forward 1F1 is missing on this rank"},
        {"0F0,0F1,0B0\n1F0,1F1,1B0,1B1", "rank 0 position 1 0F1: its backward 0B1 is missing on this rank"},
        {"0F0,0F1,0B0,0B1\n1F0,1B0", "rank 1 position 2: the list ends without 1F1"},
        {"0F0,0F0,0B0",
         "rank 0 position 1 0F0: 0F0 of the same stage and micro-batch is already at position 0"},
        {"0F0,0B0,0W0",
         "rank 0 position 2 0W0: 0B0 of the same stage and micro-batch is already at position 1"},
        {"0F0,0B0\n0F1,0B1", "rank 1 position 0 0F1: stage 0 is already on rank 0"},
        {"0F0,2F0,2B0,0B0", "rank 0 position 1 2F0: 3 stages, but stage 1 has no actions"},
        {"0F0,0B9",
         "rank 0 position 1 0B9: 1 stages x 10 micro-batches need more than the 2 actions of the schedule"},
        {"1F0,0F0,1B0,0B0", "rank 0 position 0 1F0: deadlock: it waits for 0F0 at position 1 of rank 0"},
        {"0F0,2F0,0B0,2B0\n1F0,1B0", "rank 0 position 2 0B0: deadlock: it waits for 1B0 at position 1 of "
                                     "rank 1, which is blocked in 1B0 at position 1: a cycle of 2 ranks"},
        {"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0",
         "rank 1 position 2 1B0: its message 1SEND_B0 is missing on this rank"},
        {"0F0,0B0,0RECV_B0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0",
         "rank 0 position 1 0B0: its message 0RECV_B0 comes later on this rank, at position 2"},
        {"0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
         "rank 0 position 0 0SEND_F0: its tensor 0F0 comes later on this rank, at position 1"},
        {"0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n1RECV_F1,1RECV_F0,1F0,1F1,1B0,1B1,1SEND_B0,"
         "1SEND_B1",
         "rank 1 position 0 1RECV_F1: messages from rank 0 arrive in the order of their sends: 1RECV_F0 must "
         "be received just before"},
        {"0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,"
         "1SEND_B1",
         NULL},
        {"0F0,0F1,0F2,0F3,0SEND_F0,0SEND_F1,0SEND_F2,0SEND_F3,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2,0RECV_"
         "B3,0B3\n"
         "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2,1RECV_F3,1F3,1B3,"
         "1SEND_B3",
         "a cycle of 2 ranks, with one message in flight between two ranks"},
        {"0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0",
         "rank 0 position 1 0SEND_F0: stage 1 is on the same rank, so nothing is sent to it"},
        {"0F0,0SEND_F0,0B0", "rank 0 position 1 0SEND_F0: stage 0 has no neighbor to send to"},
        {"0RECV_F0,0F0,0B0", "rank 0 position 0 0RECV_F0: stage 0 has no neighbor to receive from"},
        {"0F0,0UNSHARD,0B0,0RESHARD",
         "rank 0 position 0 0F0: stage 0 is sharded; put its UNSHARD before this action"},
        {"0UNSHARD,0UNSHARD,0F0,0B0,0RESHARD", "rank 0 position 1 0UNSHARD: stage 0 is already unsharded"},
        {"0UNSHARD,0F0,0B0", "rank 0 position 3: the list ends without 0RESHARD"},
        {"0F0,0REDUCE_GRAD,0B0",
         "rank 0 position 1 0REDUCE_GRAD: only 0 of 1 weight gradients of stage 0 come before it"},
        {"0F0,0B0,0REDUCE_GRAD,0F1,0B1",
         "rank 0 position 2 0REDUCE_GRAD: only 1 of 2 weight gradients of stage 0 come before it"},
        {"0F0,1F0,1B0,0B0,0REDUCE_GRAD", "rank 0 position 5: the list ends without 1REDUCE_GRAD"},
        {"(0F1;0F0)OVERLAP_F_B,0B0,0B1",
         "rank 0 position 0 0F1: it overlaps with 0F0; only a forward and a backward can overlap"},
        {"(0F0;0B0)OVERLAP_F_B",
         "rank 0 position 0 0F0: it overlaps with 0B0, but one of them needs the other"},
        {"0UNSHARD", "the lists have no computation (F, I, W or B)"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ddp_schedule_report report = DDP_ZERO;
        ddp_schedule *s, *to;
        size_t size;
        ok(ddp_schedule_parse(&s, cases[i].csv));
        if (!cases[i].says)
            ok(ddp_schedule_check(s));
        else {
            refused(ddp_schedule_check(s), cases[i].says);
            refused(ddp_schedule_simulate(s, NULL, &report), cases[i].says);
            refused(ddp_schedule_lower(&to, s, 0), cases[i].says);
            refused(ddp_schedule_write(s, DDP_SCHEDULE_SVG, NULL, &size), cases[i].says);
        }
        ddp_schedule_destroy(s);
    }
    refused(ddp_schedule_check(NULL), "schedule is NULL");
}

/* --- CSV, lowering, pictures --- */

static void csv(void **state) {
    static const char same[] = /* one of each kind, idle cells, an empty list between others */
        "0UNSHARD,0F0,0SEND_F0,,2RECV_F0,2F0,2I0,2W0,,,2SEND_B0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0,\n"
        "\n"
        "(3F7;4B12)OVERLAP_F_B,(3I1;4F9)OVERLAP_F_B\n";
    static const struct {
        const char *csv, *says;
    } cases[] = {
        {"", "csv is empty"},
        {" \n\n", "csv is empty"},
        {"0F0,0X0", "line 1 cell 2 \"0X0\": unknown action"},
        {"0F0\nF0", "line 2 cell 1 \"F0\": an action must start with its stage"},
        {"0F", "line 1 cell 1 \"0F\": an action must end with its micro-batch"},
        {"0UNSHARD0", "this action has no micro-batch"},
        {"0F0 0F1", "unexpected text after the action"},
        {"65536F0", "stage, 0 to 65535"},
        {"0F16777216", "micro-batch, 0 to 16777215"},
        {"0F99999999999999999999", "micro-batch, 0 to 16777215"},
        {"00F0", "an action must start with its stage"},
        {"0F01", "an action must end with its micro-batch"},
        {"-1F0", "an action must start with its stage"},
        {"0BW0", "BW is an old name"},
        {"(0F0;1B0)", "invalid overlapping pair; use the form (0F7;7B3)OVERLAP_F_B"},
        {"(0F0)OVERLAP_F_B", "invalid overlapping pair"},
        {"(0F0;1B0)OVERLAP_F_BB", "unexpected text after"},
        {"0f0", "unknown action"},
        {"0F0;", "unexpected text after"},
        {"0F0\t\x01", "\"0F0\t?\""},
        {"\xef\xbb\xbf", "csv is empty"},
        {"\xef\xbb\xbf\n", "csv is empty"},
        {"\"\"\n\" \" \n", "csv is empty"},
        {"\xef\xbb", "line 1 cell 1"},
        {"0F0\n\xef\xbb\xbf"
         "0B0",
         "line 2 cell 1"},
        {"\"0F0", "line 1 cell 1 \"\"0F0\": the quotation mark is not closed in this cell"},
        {"\"0F0,0B0\"", "line 1 cell 1 \"\"0F0\": the quotation mark is not closed in this cell"},
        {"\"", "the quotation mark is not closed"},
        {"\"0F0\"x", "the quotation mark is not closed"},
        {"\"\"0F0\"\"", "an action must start with its stage"},
        {"0F0,\"0X0\"", "line 1 cell 2 \"0X0\": unknown action"},
    };
    ddp_schedule *s, *to;
    char *text;
    int count;
    (void)state;
    ok(ddp_schedule_parse(&s, same));
    text = written(s, DDP_SCHEDULE_CSV);
    assert_string_equal(text, same);
    free(text);
    assert_int_equal(ddp_schedule_rank_count(s), 4);
    assert_int_equal(ddp_schedule_stage_count(s), 5);
    assert_int_equal(ddp_schedule_microbatch_count(s), 13);
    assert_int_equal(ddp_schedule_get_kind(s), DDP_SCHEDULE_KIND_COUNT);
    assert_int_equal(ddp_schedule_actions(s, 0, &count)[3].kind, DDP_ACTION_IDLE);
    assert_int_equal(count, 15);
    assert_non_null(ddp_schedule_actions(s, 2, &count));
    assert_int_equal(count, 0);
    assert_int_equal(ddp_schedule_actions(s, 3, &count)[0].overlaps, 1);
    assert_int_equal(count, 4);
    assert_null(ddp_schedule_actions(s, 4, &count));
    assert_null(ddp_schedule_actions(NULL, 0, NULL));
    ddp_schedule_destroy(s);
    ok(ddp_schedule_parse(&s, "  0F0 ,\t0B0\r\n 1F0,1B0\n\n  \n"));
    text = written(s, DDP_SCHEDULE_CSV);
    assert_string_equal(text, "0F0,0B0\n1F0,1B0\n");
    free(text);
    ddp_schedule_destroy(s);
    /* as a spreadsheet writes it */
    ok(ddp_schedule_parse(&s, "\xef\xbb\xbf\"0F0\",\"\", \" 0B0 \" \r\n\"1F0\",1B0\r\n"));
    text = written(s, DDP_SCHEDULE_CSV);
    assert_string_equal(text, "0F0,,0B0\n1F0,1B0\n");
    free(text);
    ddp_schedule_destroy(s);
    ok(ddp_schedule_parse(&s, "\xef\xbb\xbf"
                              "0F0,\"(0F1;0B0)OVERLAP_F_B\",0B1"));
    text = written(s, DDP_SCHEDULE_CSV);
    assert_string_equal(text, "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
    free(text);
    ddp_schedule_destroy(s);
    /* a last rank without actions */
    ok(ddp_schedule_parse(&s, "0F0,0B0\n,\n,\n"));
    ok(ddp_schedule_lower(&to, s, DDP_LOWER_MERGE));
    text = written(to, DDP_SCHEDULE_CSV);
    assert_string_equal(text, "0F0,0B0\n\n,\n");
    ddp_schedule_destroy(to);
    ok(ddp_schedule_parse(&to, text));
    assert_int_equal(ddp_schedule_rank_count(to), 3);
    free(text);
    ddp_schedule_destroy(to);
    ddp_schedule_destroy(s);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (strchr(cases[i].csv, 1))
            refused(ddp_schedule_parse(&s, cases[i].csv), "unexpected text after");
        else
            refused(ddp_schedule_parse(&s, cases[i].csv), cases[i].says);
        assert_null(s);
    }
    refused(ddp_schedule_parse(&s, NULL), "csv is NULL");
    refused(ddp_schedule_parse(NULL, "0F0"), "out or csv is NULL");
}

/* The list of PyTorch's tests for two ranks of two stages each, with successive I and W merged, and its
   messages. */
static void pytorch_lists(void **state) {
    static const char comms[] = "0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_"
                                "B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                                "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3I0,3SEND_"
                                "B0,1RECV_B0,3F1,3I1,3SEND_B1,1RECV_B1,3W0,1I0,1SEND_B0,3W1,1I1,1SEND_B1,"
                                "1W0,1W1\n";
    ddp_schedule *s, *to;
    char *text;
    (void)state;
    ok(ddp_schedule_parse(&s, comms));
    ok(ddp_schedule_check(s));
    text = written(s, DDP_SCHEDULE_CSV);
    assert_string_equal(text, comms);
    free(text);
    refused(ddp_schedule_lower(&to, s, 0), "the schedule already has SEND and RECV; leave that part out");
    refused(ddp_schedule_lower(&to, s, DDP_LOWER_MERGE), "merge before they are added");
    refused(ddp_schedule_lower(&to, s, 16), "parts=0x10");
    refused(ddp_schedule_lower(NULL, s, 0), "out is NULL");
    ok(ddp_schedule_lower(&to, s, DDP_LOWER_SHARD | DDP_LOWER_REDUCE));
    ok(ddp_schedule_check(to));
    ddp_schedule_destroy(to);
    ddp_schedule_destroy(s);
}

static void lowering(void **state) {
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_schedule *s, *to, *more;
    char *text;
    (void)state;
    ok(ddp_schedule_parse(&s, "0F0,,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1"));
    ok(ddp_schedule_lower(&to, s, 0));
    text = written(to, DDP_SCHEDULE_CSV);
    assert_string_equal(
        text, "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
              "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1RESHARD\n");
    free(text);
    refused(ddp_schedule_lower(&more, to, DDP_LOWER_SHARD), "already has UNSHARD and RESHARD");
    refused(ddp_schedule_lower(&more, to, DDP_LOWER_REDUCE), "already has REDUCE_GRAD");
    ddp_schedule_destroy(to);
    ddp_schedule_destroy(s);
    desc.kind = DDP_SCHEDULE_PIPEDREAM, desc.rank_count = 2, desc.microbatch_count = 4,
    desc.update_interval = 2;
    ok(ddp_schedule_create(&s, &desc));
    ok(ddp_schedule_lower(&to, s, DDP_LOWER_REDUCE));
    ok(ddp_schedule_check(to));
    text = written(to, DDP_SCHEDULE_CSV);
    assert_string_equal(text, "0F0,0F1,0B0,0F2,0B1,0REDUCE_GRAD,0F3,0B2,0B3,0REDUCE_GRAD\n1F0,1B0,1F1,1B1,"
                              "1REDUCE_GRAD,1F2,1B2,1F3,1B3,1REDUCE_GRAD\n");
    free(text);
    ddp_schedule_destroy(to);
    ddp_schedule_destroy(s);
}

static int occurrences(const char *text, const char *what) {
    int n = 0;
    for (; (text = strstr(text, what)) != NULL; text += strlen(what)) n++;
    return n;
}

/* The picture of a run of 24 actions at these times, in multiples of unit seconds. */
static char *drawn_times(const ddp_schedule *s, const ddp_action_time *times, double unit) {
    ddp_action_time scaled[24];
    size_t size = 0;
    char *text;
    for (int i = 0; i < 24; i++) scaled[i].begin = times[i].begin * unit, scaled[i].end = times[i].end * unit;
    ok(ddp_schedule_draw(s, DDP_SCHEDULE_SVG, NULL, scaled, NULL, &size));
    text = (char *)malloc(size);
    ok(ddp_schedule_draw(s, DDP_SCHEDULE_SVG, NULL, scaled, text, &size));
    return text;
}

static void pictures(void **state) {
    ddp_stage_cost costs[4] = {{0, 0, 0, 0, 0, 0, 0}};
    ddp_schedule *s = made(DDP_SCHEDULE_1F1B, 3, 4, 1);
    ddp_action_time times[24];
    char *text = written(s, DDP_SCHEDULE_TEXT), small[16] = "untouched";
    size_t size = sizeof small;
    (void)state;
    assert_string_equal(text, "rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---\n"
                              "rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---\n"
                              "rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---\n"
                              "makespan 18.000, bubble 0.3333, 3 in flight\n");
    free(text);
    refused(ddp_schedule_write(s, DDP_SCHEDULE_TEXT, small, &size),
            "*size_bytes=16 is too small; the text needs ");
    assert_true(size > 16 && strcmp(small, "untouched") == 0);
    refused(ddp_schedule_write(s, (ddp_schedule_format)9, small, &size), "format=9");
    refused(ddp_schedule_write(s, DDP_SCHEDULE_CSV, small, NULL), "size_bytes is NULL");
    text = written(s, DDP_SCHEDULE_SVG);
    assert_int_equal(occurrences(text, "<title>"), 24 + 2); /* and two of the legend */
    /* 4 numbers of the axis, and its name. */
    assert_int_equal(occurrences(text, "<text "), 3 + 1 + 24 + 2 * 2 + 4 + 1);
    assert_non_null(strstr(text, ">time; F, I and W take 1 each</text>"));
    /* 5 units of 22 px. */
    assert_non_null(strstr(text, "<text x=\"174.00\" y=\"140\" font-size=\"11\">5</text>"));
    assert_int_equal(occurrences(text, "stroke=\"#202020\""), 0); /* no pair overlaps */
    assert_non_null(strstr(
        text, "1F1B: 3 ranks, 3 stages, 4 micro-batches; bubble rate 0.3333, 3 in flight, makespan 18.000"));
    assert_string_equal(text + strlen(text) - 7, "</svg>\n");
    assert_non_null(strstr(text, " viewBox=\"0 0 860 196\""));
    free(text);
    text = written(s, DDP_SCHEDULE_TRACE);
    assert_int_equal(occurrences(text, "\"ph\":\"X\""), 24);
    assert_int_equal(occurrences(text, "\"thread_name\""), 3);
    assert_non_null(
        strstr(text, "{\"name\":\"2B0\",\"cat\":\"backward\",\"ph\":\"X\",\"pid\":0,\"tid\":2,\"ts\":3000000."
                     "000,\"dur\":2000000.000,\"args\":{\"stage\":2,\"microbatch\":0}}"));
    free(text);
    /* As measured: all ranks at once. */
    for (int i = 0; i < 24; i++) times[i].begin = 5 + i % 8, times[i].end = times[i].begin + 0.5;
    ok(ddp_schedule_draw(s, DDP_SCHEDULE_TEXT, NULL, times, NULL, &size));
    text = (char *)malloc(size);
    ok(ddp_schedule_draw(s, DDP_SCHEDULE_TEXT, NULL, times, text, &size));
    assert_non_null(strstr(text, "rank 2   F0 .  B0 .  F1 .  B1 .  F2 .  B2 .  F3 .  B3\n"));
    assert_non_null(strstr(text, "makespan 7.500, bubble 0.4667"));
    free(text);
    text = drawn_times(s, times, 1); /* seconds */
    assert_non_null(strstr(text, "makespan 7.500 s</text>"));
    assert_non_null(strstr(text, ">time in seconds</text>"));
    free(text);
    text = drawn_times(s, times, 1e-3);
    assert_non_null(strstr(text, "makespan 7.500 ms</text>"));
    assert_non_null(strstr(text, ">time in milliseconds</text>"));
    free(text);
    text = drawn_times(s, times, 1e-5);
    assert_non_null(strstr(text, "makespan 75.000 us</text>"));
    assert_non_null(strstr(text, ">time in microseconds</text>"));
    free(text);
    times[3].end = 0;
    refused(ddp_schedule_draw(s, DDP_SCHEDULE_TEXT, NULL, times, NULL, &size), "times[3] is from 8 to 0");
    /* One action of almost no time: the number of columns stays small. */
    for (int i = 0; i < 24; i++) times[i].begin = 5 + i % 8, times[i].end = times[i].begin + (i ? 0.5 : 1e-7);
    ok(ddp_schedule_draw(s, DDP_SCHEDULE_TEXT, NULL, times, NULL, &size));
    assert_true(size < 1500);
    times[0].end = times[0].begin; /* an action can take no time at all */
    ok(ddp_schedule_draw(s, DDP_SCHEDULE_TEXT, NULL, times, NULL, &size));
    assert_int_equal(ddp_schedule_update_interval(s), 4); /* all micro-batches */
    ddp_schedule_destroy(s);
    s = made(DDP_SCHEDULE_GPIPE, 2, 11, 1); /* columns are as wide as the longest label */
    text = written(s, DDP_SCHEDULE_TEXT);
    assert_non_null(
        strstr(text, "rank 0   F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10 .   .   .   B0----- B1----- "));
    free(text);
    ddp_schedule_destroy(s);
    s = made(DDP_SCHEDULE_INTERLEAVED_ZB_1P, 2, 2, 2); /* wide enough for its title */
    text = written(s, DDP_SCHEDULE_SVG);
    assert_true(strstr(text, " width=\"")
                && atoi(strstr(text, " width=\"") + 8)
                       > 64
                             + 8
                                   * (int)strlen("interleaved-ZB-1P: 2 ranks, 4 stages, 2 micro-batches; "
                                                 "bubble rate 0.0769, 4 in flight, makespan 13.000"));
    free(text);
    ddp_schedule_destroy(s);
    /* Overlapping actions have a row of their own, next to that of the rank. */
    s = made(DDP_SCHEDULE_DUALPIPE_V, 2, 4, 2);
    text = written(s, DDP_SCHEDULE_TRACE);
    assert_int_equal(occurrences(text, "\"thread_name\""), 2); /* sequential: no second row */
    free(text);
    for (int stage = 0; stage < 4; stage++)
        costs[stage].forward = costs[stage].input_grad = costs[stage].weight_grad = 1,
        costs[stage].overlapped = 2.5;
    text = drawn(s, DDP_SCHEDULE_TRACE, costs);
    assert_int_equal(occurrences(text, "\"thread_name\""), 4);
    assert_non_null(strstr(text, "\"tid\":3,\"args\":{\"name\":\"rank 1, overlapped\"}}"));
    assert_non_null(strstr(text, "\"tid\":3,\"args\":{\"sort_index\":3}}"));
    free(text);
    for (int together = 0; together < 2; together++) { /* each pair has a frame, and so has the legend */
        int pairs = 0;
        for (int i = 0; i < s->count; i++) pairs += s->actions[i].overlaps;
        assert_true(pairs > 0);
        text = drawn(s, DDP_SCHEDULE_SVG, together ? costs : NULL);
        assert_int_equal(occurrences(text, "stroke=\"#202020\""), pairs + 1);
        assert_int_equal(occurrences(text, " overlaps with "), pairs);
        assert_non_null(strstr(text, ">overlapped pair</text>"));
        if (together) assert_non_null(strstr(text, ">time, in the unit of the costs</text>"));
        free(text);
    }
    ddp_schedule_destroy(s);
    s = made(DDP_SCHEDULE_ZB_H1, 8, 400, 1); /* 1,200 actions on a rank still fit into 2,000 px */
    text = written(s, DDP_SCHEDULE_SVG);
    assert_int_equal(atoi(strstr(text, " width=\"") + 8), 2000);
    assert_int_equal(occurrences(text, "<title>"), s->count + 3);
    free(text);
    ddp_schedule_destroy(s);
}

/* Tags are nested, and each is closed. No call here reads a string to its end: with strict_string_checks the
   time grows with the square of the length. */
static void well_formed(const char *text) {
    const char *open[8];
    int depth = 0;
    for (const char *at = text; *at; at++) {
        const char *end = at;
        if (*at != '<') continue;
        while (*end && *end != '>') end++;
        assert_true(*end == '>');
        if (at[1] == '/') {
            assert_true(depth > 0);
            depth--;
            assert_memory_equal(open[depth], at + 2, (size_t)(end - at - 2));
        } else if (end[-1] != '/') {
            assert_true(depth < 8);
            open[depth++] = at + 1;
        }
        at = end;
    }
    assert_int_equal(depth, 0);
}

/* Reads the number after a character, and advances. */
static int number_after(const char **at, char before) {
    int number = 0;
    assert_true(**at == before);
    for (++*at; **at >= '0' && **at <= '9'; ++*at) number = 10 * number + (**at - '0');
    return number;
}

/* The pixels that the paths of a merged picture fill in the row of a rank. */
static int filled(const char *text, int rank) {
    static const char path[] = "<path stroke=\"#123456\" d=\"";
    int sum = 0;
    for (const char *at = text; *at;) {
        if (strncmp(at, path, 14) == 0 && at[14] == '#') {
            const char *d = at + sizeof path - 1;
            number_after(&d, 'M');
            if (number_after(&d, ' ') == 34 + 30 * rank + 13) {
                sum += number_after(&d, 'h');
                while (*d == 'm') {
                    number_after(&d, 'm');
                    assert_int_equal(number_after(&d, ' '), 0);
                    sum += number_after(&d, 'h');
                }
                assert_true(*d == '"');
            }
        }
        while (*at && *at != '\n') at++;
        at += *at == '\n';
    }
    return sum;
}

/* A picture with more actions than pixels is as large as its pixels, and each row keeps its busy time. */
static void merged_pictures(void **state) {
    static const struct {
        ddp_schedule_kind kind;
        int ranks, microbatches, chunks, merged;
        size_t most;
    } cases[] = {
        {DDP_SCHEDULE_1F1B, 1024, 1024, 1, 1, 4000000},        {DDP_SCHEDULE_ZB_H1, 8, 700, 1, 1, 100000},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 4, 1000, 2, 1, 50000}, {DDP_SCHEDULE_GPIPE, 101, 100, 1, 1, 200000},
        {DDP_SCHEDULE_ZB_H1, 8, 640, 1, 0, 3000000},           {DDP_SCHEDULE_GPIPE, 100, 100, 1, 0, 5000000},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ddp_schedule *s = made(cases[i].kind, cases[i].ranks, cases[i].microbatches, cases[i].chunks);
        ddp_rank_report *ranks = (ddp_rank_report *)malloc((size_t)s->rank_count * sizeof *ranks);
        ddp_schedule_report report = simulated(s, NULL, ranks);
        char *text = drawn(s, DDP_SCHEDULE_SVG, NULL);
        double scale = 1920 / report.makespan;
        if (scale > 22) scale = 22;
        assert_in_range(strlen(text), 1, cases[i].most);
        assert_int_equal(strstr(text, "Actions are merged") != NULL, cases[i].merged);
        well_formed(text);
        assert_int_equal(atoi(strstr(text, " width=\"") + 8), 2000);
        for (int r = 0; r < s->rank_count && cases[i].merged; r += s->rank_count > 200 ? 93 : 1) {
            double busy = scale * ranks[r].busy;
            int pixels = filled(text, r);
            if (pixels < busy - 1 || pixels > busy + 1)
                fail_msg("rank %d: %d pixels, %g are busy", r, pixels, busy);
        }
        free(text);
        free(ranks);
        ddp_schedule_destroy(s);
    }
}

static void names(void **state) {
    ddp_schedule_kind kind;
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        ok(ddp_schedule_kind_find(ddp_schedule_kind_name(kinds[k]), &kind));
        assert_int_equal(kind, kinds[k]);
    }
    ok(ddp_schedule_kind_find("INTERLEAVED_1f1b", &kind));
    assert_int_equal(kind, DDP_SCHEDULE_INTERLEAVED_1F1B);
    refused(ddp_schedule_kind_find("zb", &kind), "name \"zb\" is not a schedule; use 1F1B, naive");
    refused(ddp_schedule_kind_find(NULL, &kind), "name or kind is NULL");
    assert_string_equal(ddp_schedule_kind_name(DDP_SCHEDULE_KIND_COUNT), "unknown ddp_schedule_kind");
    for (int k = 0; k < KINDS; k++) /* the sentence has all of them */
        if (ddp_schedule_kind_find("?", &kind) == DDP_OK
            || !strstr(ddp_last_error(), ddp_schedule_kind_name(kinds[k])))
            fail();
    ddp_schedule_destroy(NULL);
}

/* --- memory --- */

static int live, allowed;
static void *counted_alloc(size_t size_bytes, void *user) {
    assert_ptr_equal(user, &live);
    if (allowed-- <= 0) return NULL;
    live++;
    return malloc(size_bytes);
}
static void counted_free(void *memory, void *user) {
    assert_ptr_equal(user, &live);
    live--;
    free(memory);
}

/* Every allocation fails once: an error, and no leak. */
static void out_of_memory(void **state) {
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        int done = 0;
        for (int n = 0; !done; n++) {
            ddp_schedule_desc desc = DDP_ZERO;
            ddp_schedule *s = NULL, *to = NULL;
            ddp_schedule_report report = DDP_ZERO;
            ddp_result result;
            desc.kind = kinds[k], desc.rank_count = 2, desc.microbatch_count = 4;
            desc.alloc_fn = counted_alloc, desc.free_fn = counted_free, desc.user = &live;
            allowed = n;
            result = ddp_schedule_create(&s, &desc);
            if (result == DDP_OK) result = ddp_schedule_check(s);
            if (result == DDP_OK) result = ddp_schedule_simulate(s, NULL, &report);
            if (result == DDP_OK) result = ddp_schedule_lower(&to, s, 0);
            done = result == DDP_OK;
            if (!done) assert_int_equal(result, DDP_ERR_NO_MEMORY);
            ddp_schedule_destroy(to);
            ddp_schedule_destroy(s);
            assert_int_equal(live, 0);
        }
    }
}

/* --- balancing --- */

/* The time of the slowest stage from `stage` on in the best division, by trying them; -1: none exists. */
static double brute(const double *cost, int layers, const double *speed, int stages, int stage, int from) {
    double best = -1, sum = 0;
    if (stage == stages) return from == layers ? 0 : -1;
    for (int to = from; to < layers; to++) {
        double rest, all;
        sum += cost[to];
        rest = brute(cost, layers, speed, stages, stage + 1, to + 1);
        all = rest > sum / speed[stage] ? rest : sum / speed[stage];
        if (rest >= 0 && (best < 0 || all < best)) best = all;
    }
    return best;
}

/* Returns the time of the slowest stage. No stage may be empty. */
static double slowest(const double *cost, int layers, const double *speed, int stages, const int *first) {
    double most = 0;
    assert_int_equal(first[0], 0);
    for (int stage = 0; stage < stages; stage++) {
        int end = stage + 1 < stages ? first[stage + 1] : layers;
        double sum = 0;
        assert_true(first[stage] < end);
        for (int i = first[stage]; i < end; i++) sum += cost[i];
        if (sum / speed[stage] > most) most = sum / speed[stage];
    }
    return most;
}

static void partition(void **state) {
    (void)state;
    for (int round = 0; round < 3000; round++) {
        int layers = 1 + (int)(random_u64() % 9), stages = 1 + (int)(random_u64() % (unsigned)layers),
            first[9], by_speed[9];
        double cost[9], speed[9];
        for (int i = 0; i < layers; i++)
            cost[i] = round % 3 ? (double)(random_u64() >> 11) * 0x1p-53 : (double)(random_u64() % 4);
        for (int i = 0; i < stages; i++) speed[i] = 1;
        ok(ddp_pipeline_partition(cost, layers, stages, first));
        double least = brute(cost, layers, speed, stages, 0, 0);
        assert_true(slowest(cost, layers, speed, stages, first) == least);
        ok(ddp_pipeline_partition_speed(cost, layers, speed, stages, by_speed));
        assert_memory_equal(first, by_speed, sizeof(int) * (size_t)stages);
        /* The early stages have as many layers as possible: one more makes the cut slower. */
        for (int i = 1; i < stages; i++) {
            int next = i + 1 < stages ? first[i + 1] : layers;
            first[i]++;
            assert_true(first[i] == next || slowest(cost, layers, speed, stages, first) > least);
            first[i]--;
        }
        for (int i = 0; i < stages; i++)
            speed[i] = round % 2 ? exp2((double)(random_u64() % 5)) : 0.1 * (i + 1);
        ok(ddp_pipeline_partition_speed(cost, layers, speed, stages, by_speed));
        assert_true(slowest(cost, layers, speed, stages, by_speed)
                    == brute(cost, layers, speed, stages, 0, 0));
    }
}

/* The first stage must leave the large layer to the last stage: as many layers as possible would be wrong. */
static void partition_leaves_a_layer_to_a_fast_stage(void **state) {
    const double cost[4] = {1, 1, 10, 1}, speed[3] = {2, 1, 10};
    int first[3];
    (void)state;
    ok(ddp_pipeline_partition_speed(cost, 4, speed, 3, first));
    assert_int_equal(first[1], 1);
    assert_int_equal(first[2], 2);
}

static void partition_refuses(void **state) {
    double cost[3] = {1, NAN, 2}, speed[3] = {1, 1, 1};
    int first[3] = {7, 7, 7};
    (void)state;
    refused(ddp_pipeline_partition(cost, 3, 2, first), "ddp_pipeline_partition: cost[1]=nan");
    cost[1] = -1;
    refused(ddp_pipeline_partition(cost, 3, 2, first), "cost[1]=-1");
    refused(ddp_pipeline_partition_speed(cost, 3, speed, 2, first),
            "ddp_pipeline_partition_speed: cost[1]=-1; use a finite number of 0 or more");
    cost[1] = 1;
    refused(ddp_pipeline_partition(cost, 3, 4, first), "3 layers for 4 stages");
    refused(ddp_pipeline_partition(cost, 3, 0, first), "3 layers for 0 stages");
    refused(ddp_pipeline_partition(NULL, 3, 1, first), "cost or first_layer is NULL");
    refused(ddp_pipeline_partition(cost, 3, 1, NULL), "cost or first_layer is NULL");
    refused(ddp_pipeline_partition(cost, -3, 1, first), "-3 layers for 1 stages");
    refused(ddp_pipeline_partition_speed(cost, 3, speed, 4, first), "3 layers for 4 stages");
    refused(ddp_pipeline_partition_speed(cost, 3, NULL, 2, first), "speed is NULL");
    const double bad[] = {0, -2, NAN, INFINITY};
    const char *texts[] = {"0", "-2", "nan", "inf"};
    for (int i = 0; i < 4; i++) {
        char wanted[120];
        snprintf(wanted, sizeof wanted,
                 "ddp_pipeline_partition_speed: speed[1]=%s; use a finite number above 0", texts[i]);
        speed[1] = bad[i];
        refused(ddp_pipeline_partition_speed(cost, 3, speed, 2, first), wanted);
    }
    for (int i = 0; i < 3; i++) assert_int_equal(first[i], 7);
    cost[0] = cost[1] = cost[2] = 1e308; /* costs with infinite sums are still divided */
    ok(ddp_pipeline_partition(cost, 3, 1, first));
    assert_int_equal(first[0], 0);
    speed[1] = 1e-308;
    ok(ddp_pipeline_partition_speed(cost, 3, speed, 2, first));
    assert_int_equal(first[1], 2);
}

typedef struct runs {
    int count[3][3], order, fails;
    const char *reason; /* NULL = the callback sets no error line */
} runs;
static ddp_result run_layer(int layer, ddp_action_kind kind, void *user) {
    runs *r = (runs *)user;
    int which = (int)kind - DDP_ACTION_FORWARD;
    assert_int_equal(which, r->order++ % 3);
    r->count[layer][which]++;
    if (!r->fails || layer != 2 || which != 1) return DDP_OK;
    return r->reason ? ddp_fail(DDP_ERR_ENGINE, "%s", r->reason) : DDP_ERR_ENGINE;
}

static void profile(void **state) {
    ddp_profile_desc desc = DDP_ZERO;
    ddp_stage_cost cost[3] = {{-1, -1, -1, 7, 0, 0, 0}, {-1, -1, -1, 7, 0, 0, 0}, {-1, -1, -1, 7, 0, 0, 0}};
    runs r;
    (void)state;
    memset(&r, 0, sizeof r);
    desc.layer_count = 3, desc.run = run_layer, desc.user = &r, desc.rounds = 4, desc.warmup_rounds = 2;
    ok(ddp_pipeline_profile(&desc, cost));
    for (int layer = 0; layer < 3; layer++) {
        assert_true(cost[layer].forward >= 0 && cost[layer].input_grad >= 0 && cost[layer].weight_grad >= 0
                    && cost[layer].transfer == 7);
        for (int k = 0; k < 3; k++) assert_int_equal(r.count[layer][k], 6);
    }
    memset(&r, 0, sizeof r);
    r.fails = 1;
    assert_int_equal(ddp_pipeline_profile(&desc, cost), DDP_ERR_ENGINE);
    assert_string_equal(ddp_last_error(),
                        "ddp_pipeline_profile: input gradient of layer 2 failed: DDP_ERR_ENGINE");
    memset(&r, 0, sizeof r);
    r.fails = 1;
    r.reason = "my own reason";
    assert_int_equal(ddp_pipeline_profile(&desc, cost), DDP_ERR_ENGINE);
    assert_string_equal(ddp_last_error(),
                        "ddp_pipeline_profile: input gradient of layer 2 failed: my own reason");
    desc.layer_count = 0;
    refused(ddp_pipeline_profile(&desc, cost), "layer_count=0");
    desc.layer_count = 3, desc.rounds = -1;
    refused(ddp_pipeline_profile(&desc, cost), "rounds=-1");
    desc.rounds = 100001;
    refused(ddp_pipeline_profile(&desc, cost), "rounds=100001");
    desc.rounds = 0, desc.warmup_rounds = -2;
    refused(ddp_pipeline_profile(&desc, cost), "warmup_rounds=-2");
    desc.warmup_rounds = -1; /* none; and 5 rounds */
    memset(&r, 0, sizeof r);
    ok(ddp_pipeline_profile(&desc, cost));
    assert_int_equal(r.count[2][2], 5);
    refused(ddp_pipeline_profile(&desc, NULL), "desc, desc->run or cost is NULL");
    desc.run = NULL;
    refused(ddp_pipeline_profile(&desc, cost), "desc, desc->run or cost is NULL");
    refused(ddp_pipeline_profile(NULL, cost), "desc, desc->run or cost is NULL");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(worked_examples),
                                       cmocka_unit_test(grid),
                                       cmocka_unit_test(nearest),
                                       cmocka_unit_test(published_rates),
                                       cmocka_unit_test(formulas),
                                       cmocka_unit_test(pairs_as_one),
                                       cmocka_unit_test(spans),
                                       cmocka_unit_test(costs_count),
                                       cmocka_unit_test(made_to_measure),
                                       cmocka_unit_test(made_to_any_measure),
                                       cmocka_unit_test(more_memory_helps),
                                       cmocka_unit_test(auto_spans),
                                       cmocka_unit_test(large),
                                       cmocka_unit_test(checker_against_executor),
                                       cmocka_unit_test(checker_says),
                                       cmocka_unit_test(csv),
                                       cmocka_unit_test(pytorch_lists),
                                       cmocka_unit_test(lowering),
                                       cmocka_unit_test(pictures),
                                       cmocka_unit_test(merged_pictures),
                                       cmocka_unit_test(names),
                                       cmocka_unit_test(out_of_memory),
                                       cmocka_unit_test(partition),
                                       cmocka_unit_test(partition_leaves_a_layer_to_a_fast_stage),
                                       cmocka_unit_test(partition_refuses),
                                       cmocka_unit_test(profile)};
    watchdog_start(120);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

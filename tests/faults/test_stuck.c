/*  test_stuck.c - ranks that make different calls, are missing, or abandon a call: every rank's error names
    rank and call, and none hangs.

    test_stuck [processes|threads] */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#define BIG ((size_t)1 << 20)

//== different calls ========================================================================

/* Calls of a pair: rank odd makes the second one, all others the first. */
typedef enum call {
    SUM_F32,
    SUM_F64,
    MAX_F32,
    SUM_11,
    SUM_BIG,
    SUM_BIG_F64,
    SUM_GROUP,
    REDUCE_0,
    REDUCE_1,
    BROADCAST_0,
    BROADCAST_1,
    BROADCAST_I32,
    GATHER,
    SCATTER,
    ALL_GATHER,
    ALL_GATHER_BIG,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    BARRIER,
    GATHER_V,
    GATHER_V_OTHER,
    A2A_V,
    A2A_V_OTHER,
    ASYNC_SUM,
    ASYNC_MAX,
    SPLIT,
    ALLOC_64,
    ALLOC_128,
    FREE_A,
    FREE_B,
    CALLS
} call;

typedef struct pair {
    call common, odd;
    const char *words[4];
} pair; /* words: in the error of every rank */

static const pair pairs[] = {
    {SUM_F32, SUM_F64, {"all_reduce", "f32", "f64", NULL}},
    {SUM_F64, SUM_F32, {"all_reduce", "f32", "f64", NULL}},
    {SUM_F32, MAX_F32, {"all_reduce", "sum", "max", NULL}},
    {SUM_F32, SUM_11, {"count=10", "count=11", NULL, NULL}},
    {SUM_F32, SUM_BIG, {"count=10", "count=1048576", NULL, NULL}},
    {SUM_BIG, SUM_F32, {"count=10", "count=1048576", NULL, NULL}},
    {SUM_BIG, SUM_BIG_F64, {"f32", "f64", NULL, NULL}},
    {SUM_GROUP, SUM_BIG_F64, {"f32", "f64", NULL, NULL}},
    {SUM_BIG, BARRIER, {"all_reduce", "barrier", NULL, NULL}},
    {BARRIER, SUM_BIG, {"all_reduce", "barrier", NULL, NULL}},
    {BARRIER, SUM_F32, {"all_reduce", "barrier", NULL, NULL}},
    {SUM_F32, REDUCE_0, {"all_reduce", "ddp_reduce", NULL, NULL}},
    {REDUCE_0, REDUCE_1, {"ddp_reduce", "root=0", "root=1", NULL}},
    {BROADCAST_0, BROADCAST_1, {"broadcast", "root=0", "root=1", NULL}},
    {BROADCAST_0, BROADCAST_I32, {"broadcast", "f32", "i32", NULL}},
    {GATHER, SCATTER, {"ddp_gather", "ddp_scatter", NULL, NULL}},
    {ALL_GATHER, GATHER, {"ddp_all_gather", "ddp_gather", NULL, NULL}},
    {ALL_GATHER, ALL_GATHER_BIG, {"count=10", "count=1048576", NULL, NULL}},
    {ALL_GATHER, REDUCE_SCATTER, {"all_gather", "reduce_scatter", NULL, NULL}},
    {ALL_TO_ALL, ALL_GATHER, {"all_to_all", "all_gather", NULL, NULL}},
    {ALL_GATHER, GATHER_V, {"ddp_all_gather", "ddp_all_gather_v", NULL, NULL}},
    {GATHER_V, GATHER_V_OTHER, {"ddp_all_gather_v", "count", NULL, NULL}},
    {A2A_V, A2A_V_OTHER, {"rank 1", "11", "10", NULL}},
    {ASYNC_SUM, ASYNC_MAX, {"sum", "max", NULL, NULL}},
    {ASYNC_SUM, BARRIER, {"all_reduce", "barrier", NULL, NULL}},
    {SPLIT, BARRIER, {"split", "barrier", NULL, NULL}},
    {SUM_F32, SPLIT, {"split", "all_reduce", NULL, NULL}},
    {ALLOC_64, ALLOC_128, {"64", "128", NULL, NULL}},
    {ALLOC_64, SPLIT, {"alloc", "split", NULL, NULL}},
    {FREE_A, FREE_B, {"free", NULL, NULL, NULL}},
    {FREE_A, SUM_F32, {"free", "all_reduce", NULL, NULL}},
};

/* late: the odd rank comes last rather than first. */
typedef struct plan {
    const pair *p;
    int odd;
    int late;
} plan;

static ddp_result make_call(ddp_group *g, call which, void **blocks) {
    int w = ddp_world_size(g);
    float *in = (float *)calloc(BIG * 8, 1), *out = (float *)calloc(BIG * (size_t)w, 8);
    size_t counts[RANKS_MAX], other[RANKS_MAX];
    ddp_group *made = NULL;
    ddp_work work = DDP_ZERO;
    void *memory;
    ddp_result result = DDP_ERR_CORRUPT;
    for (int r = 0; r < w; r++) counts[r] = 10, other[r] = 10;
    other[w - 1] = 11;
    switch (which) {
    case SUM_F32: result = ddp_all_reduce(g, in, out, 10, DDP_F32, DDP_OP_SUM, NULL); break;
    case SUM_F64: result = ddp_all_reduce(g, in, out, 10, DDP_F64, DDP_OP_SUM, NULL); break;
    case MAX_F32: result = ddp_all_reduce(g, in, out, 10, DDP_F32, DDP_OP_MAX, NULL); break;
    case SUM_11: result = ddp_all_reduce(g, in, out, 11, DDP_F32, DDP_OP_SUM, NULL); break;
    case SUM_BIG: result = ddp_all_reduce(g, in, out, BIG, DDP_F32, DDP_OP_SUM, NULL); break;
    case SUM_BIG_F64: result = ddp_all_reduce(g, in, out, BIG, DDP_F64, DDP_OP_SUM, NULL); break;
    case SUM_GROUP: result = ddp_all_reduce(g, blocks[0], blocks[0], BIG, DDP_F32, DDP_OP_SUM, NULL); break;
    case REDUCE_0:
    case REDUCE_1: result = ddp_reduce(g, in, out, 10, DDP_F32, DDP_OP_SUM, which - REDUCE_0, NULL); break;
    case BROADCAST_0:
    case BROADCAST_1: result = ddp_broadcast(g, in, 10, DDP_F32, which - BROADCAST_0, NULL); break;
    case BROADCAST_I32: result = ddp_broadcast(g, in, 10, DDP_I32, 0, NULL); break;
    case GATHER: result = ddp_gather(g, in, out, 10, DDP_F32, 0, NULL); break;
    case SCATTER: result = ddp_scatter(g, out, in, 10, DDP_F32, 0, NULL); break;
    case ALL_GATHER: result = ddp_all_gather(g, in, out, 10, DDP_F32, NULL); break;
    case ALL_GATHER_BIG: result = ddp_all_gather(g, in, out, BIG, DDP_F32, NULL); break;
    case REDUCE_SCATTER: result = ddp_reduce_scatter(g, out, in, 10, DDP_F32, DDP_OP_SUM, NULL); break;
    case ALL_TO_ALL: result = ddp_all_to_all(g, in, out, 10, DDP_F32, NULL); break;
    case BARRIER: result = ddp_barrier(g); break;
    case GATHER_V:
    case GATHER_V_OTHER: {
        const size_t *c = which == GATHER_V ? counts : other;
        result = ddp_all_gather_v(g, in, c[ddp_rank(g)], out, c, NULL, DDP_F32, NULL);
        break;
    }
    /* The odd rank sends one message more to the last rank than that one expects. */
    case A2A_V:
    case A2A_V_OTHER:
        result = ddp_all_to_all_v(g, in, which == A2A_V ? counts : other, NULL, out, counts, NULL, DDP_F32,
                                  NULL);
        break;
    case ASYNC_SUM:
    case ASYNC_MAX:
        result = ddp_all_reduce(g, in, out, 10, DDP_F32, which == ASYNC_SUM ? DDP_OP_SUM : DDP_OP_MAX, &work);
        if (result == DDP_OK) ddp_fail(DDP_ERR_INVALID, "stale text");
        if (result == DDP_OK) result = ddp_wait(g, &work);
        break;
    case SPLIT: result = ddp_group_split(g, 0, 0, &made); break;
    case ALLOC_64:
    case ALLOC_128: result = ddp_group_alloc(g, which == ALLOC_64 ? 64 : 128, &memory); break;
    case FREE_A:
    case FREE_B: result = ddp_group_free(g, blocks[which - FREE_A]); break;
    default: break;
    }
    free(in), free(out);
    return result;
}

static ddp_result mismatch_main(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    int rank = ddp_rank(world), odd = rank == p->odd;
    void *blocks[2];
    ddp_result result;
    for (int i = 0; i < 2; i++) RANKS_OK(world, ddp_group_alloc(world, BIG * sizeof(float), &blocks[i]));
    RANKS_OK(world, ddp_barrier(world));
    if (odd == p->late) ranks_sleep_us(10000);
    result = note(world, world, make_call(world, odd ? p->p->odd : p->p->common, blocks));
    meet_outside(ddp_world_size(world));
    return result;
}

static void run_mismatches(ranks_mode mode, int w) {
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char scenario[200];
        plan p;
        ddp_result result;
        p.p = &pairs[i];
        p.odd = pairs[i].odd == A2A_V_OTHER ? 0 : (int)(i % (size_t)w);
        if (pairs[i].odd == A2A_V_OTHER && w > 2) p.odd = 1;
        p.late = (int)(i / 2 % 2);
        snprintf(scenario, sizeof scenario, "%s W=%d: mismatch %zu, rank %d differs: %s %s %s",
                 ranks_mode_name(mode), w, i, p.odd, pairs[i].words[0],
                 pairs[i].words[1] ? pairs[i].words[1] : "", pairs[i].words[2] ? pairs[i].words[2] : "");
        faults_begin(scenario);
        result = launch(mode, w, 20000, mismatch_main, &p);
        /* No rank starts: the group stays usable. */
        int agreed = pairs[i].odd == ALLOC_128 || pairs[i].odd == FREE_B;
        EXPECT(result == DDP_ERR_MISMATCH, "launch gave %s '%s'", ddp_result_name(result), ddp_last_error());
        for (int r = 0; r < w; r++) {
            const seen *s = &stage_shared->rank[r];
            EXPECT(s->done && s->first == DDP_ERR_MISMATCH, "rank %d got %s '%s'", r,
                   s->done ? ddp_result_name(s->first) : "nothing", s->text);
            for (int k = 0; k < 4 && pairs[i].words[k]; k++)
                EXPECT(says(s->text, pairs[i].words[k]), "rank %d: '%s' does not contain '%s'", r, s->text,
                       pairs[i].words[k]);
            EXPECT(s->second == (agreed ? DDP_OK : DDP_ERR_POISONED), "rank %d: second call gave %s '%s'", r,
                   ddp_result_name(s->second), s->text2);
            for (int k = 0; k < 4 && pairs[i].words[k] && !agreed; k++)
                EXPECT(says(s->text2, pairs[i].words[k]), "rank %d: later '%s' does not contain '%s'", r,
                       s->text2, pairs[i].words[k]);
        }
    }
}

//== a missing rank ========================================================================

/* -1 = none. */
typedef struct absence {
    const char *what;
    int missing, second_missing;
    int stopped;
} absence;
enum { ABSENCE_MS = RUN_INTO_MS }; /* also the time in which the ranks must start */

static ddp_result absence_main(ddp_group *world, void *user) {
    const absence *a = (const absence *)user;
    int rank = ddp_rank(world), missing = rank == a->missing || rank == a->second_missing;
    int present = ddp_world_size(world) - (a->missing >= 0) - (a->second_missing >= 0);
    float x = 1;
    ddp_result result;
    seen_by(world)->pid = getpid();
    RANKS_OK(world, ddp_barrier(world));
    if (missing && a->stopped) kill(getpid(), SIGSTOP);
    if (missing) heard(&stage_shared->counter, present); /* arrives after the timeout of the others */
    seen_by(world)->start_at = ranks_now();
    result = note(world, world, ddp_all_reduce(world, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL));
    if (!missing) say(&stage_shared->counter);
    meet_outside(a->stopped ? present : ddp_world_size(world));
    return result;
}

static void run_absences(ranks_mode mode) {
    static const absence table[] = {
        {"one rank stopped", 1, -1, 1},
        {"two ranks stopped", 0, 3, 1},
        {"one rank late", 2, -1, 0},
        {"two ranks late", 1, 3, 0},
    };
    enum { W = 4 };
    const double patience = ABSENCE_MS * 1e-3 * DDP_TEST_SLOWDOWN;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const absence *a = &table[i];
        double begin = 0; /* when the first of the present ranks began to wait */
        char scenario[100];
        ddp_result result;
        if (a->stopped && mode == RANKS_THREADS) continue;
        if (DDP_TEST_SLOWDOWN > 1 && a->second_missing >= 0) continue; /* each waits for the timeout */
        snprintf(scenario, sizeof scenario, "%s: %s", ranks_mode_name(mode), a->what);
        faults_begin(scenario);
        result = launch(mode, W, ABSENCE_MS, absence_main, (void *)(uintptr_t)a);
        EXPECT(result == DDP_ERR_TIMEOUT, "launch gave %s '%s'", ddp_result_name(result), ddp_last_error());
        EXPECT(launch_seconds < 2 * patience + 2 * PROMPT_SECONDS, "launch took %.1f s", launch_seconds);
        for (int r = 0; r < W; r++) {
            double start = stage_shared->rank[r].start_at;
            if (r != a->missing && r != a->second_missing && (begin == 0 || start < begin)) begin = start;
        }
        for (int r = 0; r < W; r++) {
            const seen *s = &stage_shared->rank[r];
            int missing = r == a->missing || r == a->second_missing;
            double took = s->first_at - begin;
            if (missing && a->stopped) continue; /* it was killed */
            EXPECT(s->done && s->first == DDP_ERR_TIMEOUT, "rank %d got %s '%s'", r,
                   s->done ? ddp_result_name(s->first) : "nothing", s->text);
            EXPECT(s->second == DDP_ERR_POISONED, "rank %d: second call gave %s", r,
                   ddp_result_name(s->second));
            EXPECT(missing || (took > 0.99 * patience && took < patience + PROMPT_SECONDS),
                   "rank %d waited %.3f s of %.3f s", r, took, patience);
            /* "arrived: rank 0,2; missing: rank 1,3"; a late rank can arrive meanwhile. */
            for (int k = 0; k < W; k++) {
                const char *absent = strstr(s->text, "missing: rank "), digit[2] = {(char)('0' + k), 0};
                int away = k == a->missing || k == a->second_missing;
                char list[32] = "";
                if (absent) sscanf(absent + 14, "%31[0-9,]", list); /* the following text lists them */
                EXPECT((strstr(list, digit) != NULL) == away, "rank %d: '%s' is wrong about rank %d", r,
                       s->text, k);
            }
        }
        for (int r = 0; r < W; r++) /* a stopped rank does not outlive the launch */
            if (mode == RANKS_PROCESSES) EXPECT(gone(stage_shared->rank[r].pid), "rank %d is still there", r);
    }
}

/* The one-sided kind: a message that is never sent. */
static ddp_result no_message_main(ddp_group *world, void *user) {
    float x = 0;
    ddp_result result = DDP_OK;
    (void)user;
    if (ddp_rank(world) == 0) {
        double start = ranks_now();
        result = ddp_recv(world, &x, 1, DDP_F32, 1, 5, NULL);
        stage_shared->event_at = ranks_now() - start;
        snprintf(stage_shared->rank[0].text, sizeof stage_shared->rank[0].text, "%s", ddp_last_error());
        stage_shared->rank[0].first = result;
        say(&stage_shared->counter);
    } else {
        heard(&stage_shared->counter, 1);
    }
    return result;
}

static void run_no_message(ranks_mode mode) {
    const double patience = ABSENCE_MS * 1e-3 * DDP_TEST_SLOWDOWN;
    faults_begin(mode == RANKS_THREADS ? "threads: a message that never comes"
                                       : "processes: a message that never comes");
    launch(mode, 2, ABSENCE_MS, no_message_main, NULL);
    EXPECT(stage_shared->rank[0].first == DDP_ERR_TIMEOUT, "recv gave %s '%s'",
           ddp_result_name(stage_shared->rank[0].first), stage_shared->rank[0].text);
    EXPECT(names_rank(stage_shared->rank[0].text, 1), "'%s' does not name rank 1",
           stage_shared->rank[0].text);
    EXPECT(stage_shared->event_at > 0.99 * patience && stage_shared->event_at < patience + PROMPT_SECONDS,
           "it waited %.3f s", stage_shared->event_at);
}

/* Two groups of the same ranks, called in different orders: each rank waits in one for the other rank, and
   its error names the other rank's call. */
static ddp_result crossed_main(ddp_group *world, void *user) {
    int rank = ddp_rank(world);
    ddp_group *group[2] = {NULL, NULL};
    double x = 1;
    (void)user;
    for (int i = 0; i < 2; i++) RANKS_OK(world, ddp_group_split(world, i + 1, rank, &group[i]));
    stage_shared->rank[rank].first = ddp_all_reduce(group[rank], &x, &x, 1, rank ? DDP_F64 : DDP_F32,
                                                    rank ? DDP_OP_MAX : DDP_OP_SUM, NULL);
    snprintf(stage_shared->rank[rank].text, sizeof stage_shared->rank[rank].text, "%s", ddp_last_error());
    say(&stage_shared->counter);
    heard(&stage_shared->counter, 2); /* no rank leaves before the other has its error */
    for (int i = 0; i < 2; i++) ddp_group_destroy(group[i]);
    return DDP_OK;
}

static void run_crossed(ranks_mode mode) {
    static const char *const words[2] = {"group=world.1 seq=1 f32 count=1: timed out",
                                         "group=world.2 seq=1 f64 count=1: timed out"};
    static const char *const others[2] = {
        "rank 1 was waiting in ddp_all_reduce f64 count=1 max of group=world.2 (seq=1)",
        "rank 0 was waiting in ddp_all_reduce f32 count=1 sum of group=world.1 (seq=1)"};
    faults_begin(mode == RANKS_THREADS ? "threads: two groups in different orders"
                                       : "processes: two groups in different orders");
    launch(mode, 2, ABSENCE_MS, crossed_main, NULL); /* both must be in their calls by then */
    for (int r = 0; r < 2; r++) {
        const char *text = stage_shared->rank[r].text;
        EXPECT(stage_shared->rank[r].first == DDP_ERR_TIMEOUT, "%s '%s'",
               ddp_result_name(stage_shared->rank[r].first), text);
        EXPECT(strstr(text, words[r]) && strstr(text, others[r]), "'%s' lacks '%s' or '%s'", text, words[r],
               others[r]);
    }
}

//== giving up ==============================================================================

static ddp_result abort_main(ddp_group *world, void *user) {
    int rank = ddp_rank(world), w = ddp_world_size(world), what = *(int *)user;
    float x = 1, *big = (float *)calloc(BIG, sizeof *big);
    ddp_work work = DDP_ZERO;
    ddp_result result;
    RANKS_OK(world, ddp_barrier(world));
    if (rank == 1) {
        ranks_sleep_us(30000);
        event_now();
        RANKS_OK(world, ddp_group_abort(world));
        RANKS_CHECK(world, ddp_group_status(world) != DDP_OK, "status after one's own abort");
    }
    switch (what) {
    case 0: result = ddp_all_reduce(world, big, big, BIG, DDP_F32, DDP_OP_SUM, NULL); break;
    case 1: result = rank == 1 ? ddp_barrier(world) : ddp_recv(world, &x, 1, DDP_F32, 1, 0, NULL); break;
    case 2:
        result = ddp_all_reduce(world, &x, &x, 1, DDP_F32, DDP_OP_SUM, &work);
        if (result == DDP_OK) result = ddp_wait(world, &work);
        break;
    default:
        while (ddp_group_status(world) == DDP_OK) ranks_sleep_us(1000);
        result = ddp_barrier(world);
        break;
    }
    result = note(world, world, result);
    meet_outside(w);
    free(big);
    return result;
}

static void run_aborts(ranks_mode mode) {
    static const char *const names[] = {"all_reduce", "recv", "asynchronous all_reduce",
                                        "ddp_group_status in a loop"};
    for (int what = 0; what < 4; what++) {
        char scenario[100];
        ddp_result result;
        snprintf(scenario, sizeof scenario, "%s: abort while others are in %s", ranks_mode_name(mode),
                 names[what]);
        faults_begin(scenario);
        result = launch(mode, 3, 20000, abort_main, &what);
        EXPECT(result != DDP_OK && says(ddp_last_error(), "abort"), "launch gave %s '%s'",
               ddp_result_name(result), ddp_last_error());
        for (int r = 0; r < 3; r++) {
            const seen *s = &stage_shared->rank[r];
            EXPECT(s->done && s->first != DDP_OK && says(s->text, "abort")
                       && (names_rank(s->text, 1) || r == 1),
                   "rank %d got %s '%s'", r, ddp_result_name(s->first), s->text);
            EXPECT(s->second == DDP_ERR_POISONED && says(s->text2, "abort"),
                   "rank %d: second call gave %s '%s'", r, ddp_result_name(s->second), s->text2);
            EXPECT(s->first_at - stage_shared->event_at < PROMPT_SECONDS,
                   "rank %d learned of it after %.3f s", r, s->first_at - stage_shared->event_at);
        }
    }
}

//== wrong arguments on one rank ============================================================

/* DDP_ERR_INVALID is detected before anything is sent: the rank can make the right call next, without an
   effect on others. */
static ddp_result invalid_main(ddp_group *world, void *user) {
    int w = ddp_world_size(world), rank = ddp_rank(world);
    int64_t in[4] = {1, 2, 3, 4}, out[4];
    (void)user;
    for (int round = 0; round < 20; round++) {
        if (round % w == rank) {
            RANKS_CHECK(world,
                        ddp_all_reduce(world, NULL, out, 4, DDP_I64, DDP_OP_SUM, NULL) == DDP_ERR_INVALID,
                        "NULL");
            RANKS_CHECK(world, ddp_broadcast(world, in, 4, DDP_I64, w, NULL) == DDP_ERR_INVALID, "root");
            RANKS_CHECK(world,
                        ddp_all_reduce(world, in, in + 1, 3, DDP_I64, DDP_OP_SUM, NULL) == DDP_ERR_INVALID,
                        "overlap");
            RANKS_OK(world, ddp_group_status(world));
        }
        RANKS_OK(world, ddp_all_reduce(world, in, out, 4, DDP_I64, DDP_OP_SUM, NULL));
        RANKS_CHECK(world, out[3] == 4 * w, "sum %lld", (long long)out[3]);
    }
    return DDP_OK;
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    ddp_result result;
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0)
        return fprintf(stderr, "usage: test_stuck [processes|threads]\n"), 2;
    faults_start(180);
    if (DDP_TEST_SLOWDOWN == 1) run_mismatches(mode, 2);
    run_mismatches(mode, 3);
    run_absences(mode);
    run_no_message(mode);
    run_crossed(mode);
    run_aborts(mode);
    faults_begin("a wrong argument on one rank");
    result = launch(mode, 3, 20000, invalid_main, NULL);
    EXPECT(result == DDP_OK, "%s '%s'", ddp_result_name(result), ddp_last_error());
    return faults_end();
}

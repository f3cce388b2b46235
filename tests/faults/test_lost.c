/*  test_lost.c - a rank that dies or leaves becomes DDP_ERR_PEER_LOST on all others, promptly and by name.

    test_lost [processes|threads]

    All combinations of the end of a rank (kill -9, segfault, exit, return with and without an error) and the
    current call of the others. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#define W 4
#define BIG ((size_t)1 << 20)

typedef enum ending { END_KILL, END_SEGV, END_EXIT, END_RETURN_OK, END_RETURN_ERROR, ENDINGS } ending;
static const char *const ending_names[ENDINGS] = {"kill -9", "segfault", "exit(3)", "returns DDP_OK early",
                                                  "returns an error"};
/* In the text of every rank. */
static const char *const ending_words[ENDINGS] = {"signal 9", "signal 11", "3", "", ""};

/* The current call of the others. Each must return an error. */
typedef enum waiting {
    WAIT_BARRIER,
    WAIT_ALL_REDUCE,
    WAIT_LARGE,
    WAIT_GROUP_MEMORY,
    WAIT_ASYNC,
    WAIT_RECV,
    WAIT_SEND,
    WAIT_RECV_ASYNC,
    WAIT_BATCH,
    WAIT_ALLOC,
    WAIT_SPLIT,
    WAIT_CHILD,
    WAIT_GATHER,
    WAIT_A2AV,
    WAIT_TEST_LOOP,
    WAIT_IDLE,
    WAITINGS
} waiting;
static const char *const waiting_names[WAITINGS] = {"barrier",
                                                    "all_reduce",
                                                    "all_reduce of 4 MiB",
                                                    "all_reduce in group memory",
                                                    "asynchronous all_reduce",
                                                    "recv",
                                                    "send of 4 MiB",
                                                    "asynchronous recv",
                                                    "batch",
                                                    "group_alloc",
                                                    "group_split",
                                                    "barrier of a child",
                                                    "gather",
                                                    "all_to_all_v",
                                                    "ddp_test in a loop",
                                                    "nothing, then a barrier"};

/* late: the victim ends before any rank waits. */
typedef struct plan {
    ranks_mode mode;
    ending how;
    waiting what;
    int victim;
    int late;
} plan;

static ddp_result wait_somehow(ddp_group *g, waiting what, int victim, ddp_group *child, float *shared) {
    static __thread float in[W], out[W];
    float *big = (float *)calloc(BIG, sizeof *big);
    ddp_group *made = NULL;
    ddp_work work = DDP_ZERO;
    void *memory;
    int done = 0;
    size_t ones[W] = {1, 1, 1, 1};
    ddp_result result = DDP_ERR_CORRUPT;
    switch (what) {
    case WAIT_BARRIER: result = ddp_barrier(g); break;
    case WAIT_ALL_REDUCE: result = ddp_all_reduce(g, in, out, W, DDP_F32, DDP_OP_SUM, NULL); break;
    case WAIT_LARGE: result = ddp_all_reduce(g, big, big, BIG, DDP_F32, DDP_OP_SUM, NULL); break;
    case WAIT_GROUP_MEMORY: result = ddp_all_reduce(g, shared, shared, BIG, DDP_F32, DDP_OP_AVG, NULL); break;
    case WAIT_ASYNC:
    case WAIT_TEST_LOOP:
        result = ddp_all_reduce(g, big, big, BIG, DDP_F32, DDP_OP_SUM, &work);
        while (what == WAIT_TEST_LOOP && result == DDP_OK && !done) {
            result = ddp_test(g, &work, &done);
            ranks_sleep_us(100);
        }
        if (result == DDP_OK) result = ddp_wait(g, &work);
        break;
    case WAIT_RECV: result = ddp_recv(g, in, 1, DDP_F32, victim, 0, NULL); break;
    case WAIT_SEND: result = ddp_send(g, big, BIG, DDP_F32, victim, 0, NULL); break;
    case WAIT_RECV_ASYNC:
        /* Fails when another rank has found the loss already. */
        result = ddp_recv(g, in, 1, DDP_F32, victim, 0, &work);
        if (result == DDP_OK) result = ddp_wait(g, &work);
        break;
    case WAIT_BATCH:
        result = ddp_p2p_begin(g);
        if (result == DDP_OK) result = ddp_send(g, big, BIG, DDP_F32, victim, 0, NULL);
        if (result == DDP_OK) result = ddp_recv(g, out, 1, DDP_F32, victim, 0, NULL);
        if (result == DDP_OK) result = ddp_p2p_end(g);
        break;
    case WAIT_ALLOC: result = ddp_group_alloc(g, 100000, &memory); break;
    case WAIT_SPLIT: result = ddp_group_split(g, 0, 0, &made); break;
    case WAIT_CHILD: result = ddp_barrier(child); break;
    case WAIT_GATHER: result = ddp_gather(g, in, big, 1, DDP_F32, victim == 0 ? 1 : 0, NULL); break;
    case WAIT_A2AV: result = ddp_all_to_all_v(g, in, ones, NULL, out, ones, NULL, DDP_F32, NULL); break;
    default:
        heard(&stage_shared->counter, 1);
        ranks_sleep_us(50000);
        event_now(); /* the limit counts from the call */
        result = ddp_barrier(g);
        break;
    }
    free(big);
    return result;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    ddp_group *child = NULL;
    void *shared = NULL;
    ddp_result result;
    int rank = ddp_rank(world);
    seen_by(world)->pid = getpid();
    RANKS_OK(world, ddp_group_alloc(world, BIG * sizeof(float), &shared));
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    RANKS_OK(world, ddp_barrier(world));
    if (rank == p->victim) {
        if (!p->late) ranks_sleep_us(30000);
        event_now();
        say(&stage_shared->counter);
        switch (p->how) {
        case END_KILL: kill(getpid(), SIGKILL); break;
        case END_SEGV:
            signal(SIGSEGV, SIG_DFL);
            raise(SIGSEGV);
            break;
        case END_EXIT: exit(3);
        case END_RETURN_ERROR:
            ddp_group_destroy(child);
            return ddp_fail(DDP_ERR_CORRUPT, "the disk of this rank is on fire");
        default: ddp_group_destroy(child); return DDP_OK;
        }
        return DDP_OK;
    }
    if (p->late) {
        heard(&stage_shared->counter, 1);
        ranks_sleep_us(30000);
    }
    result = wait_somehow(world, p->what, p->victim, child, (float *)shared);
    result = note(world, p->what == WAIT_CHILD ? child : world, result);
    meet_outside(W - 1);
    for (double end = ranks_now() + PROMPT_SECONDS;
         p->how == END_RETURN_ERROR && ddp_group_status(world) == DDP_OK && ranks_now() < end;)
        /* It ended the child group first: the launch reports the function that fails first, which must be
           that of this rank. */
        ranks_sleep_us(500);
    ddp_group_destroy(child);
    return result;
}

static double slowest;
/* Number of losses that ranks detected, and of those not within the promised 100 ms. */
static int learned, learned_late;

static void run(ranks_mode mode, ending how, waiting what, int victim, int late) {
    char scenario[200], pid[32];
    plan p;
    ddp_result result;
    p.mode = mode, p.how = how, p.what = what, p.victim = victim, p.late = late;
    snprintf(scenario, sizeof scenario, "%s: rank %d %s%s, others in %s", ranks_mode_name(mode), victim,
             ending_names[how], late ? " before" : "", waiting_names[what]);
    faults_begin(scenario);
    result = launch(mode, W, 20000, rank_main, &p);
    snprintf(pid, sizeof pid, "%d", (int)stage_shared->rank[victim].pid);
    for (int r = 0; r < W; r++) {
        const seen *s = &stage_shared->rank[r];
        double took = s->first_at - stage_shared->event_at;
        if (r == victim) continue;
        EXPECT(s->done, "rank %d never came back", r);
        if (!s->done) continue;
        EXPECT(s->first == DDP_ERR_PEER_LOST, "rank %d got %s '%s'", r, ddp_result_name(s->first), s->text);
        EXPECT(names_rank(s->text, victim), "rank %d: '%s' does not name rank %d", r, s->text, victim);
        EXPECT(says(s->text, ending_words[how]), "rank %d: '%s' does not contain '%s'", r, s->text,
               ending_words[how]);
        if (mode == RANKS_PROCESSES && how <= END_EXIT)
            EXPECT(says(s->text, pid), "rank %d: '%s' does not contain pid %s", r, s->text, pid);
        EXPECT(s->second == DDP_ERR_POISONED, "rank %d: second call gave %s '%s'", r,
               ddp_result_name(s->second), s->text2);
        EXPECT(names_rank(s->text2, victim) && says(s->text2, ending_words[how]),
               "rank %d: later text '%s' has another cause than '%s'", r, s->text2, s->text);
        if (!late && took > slowest) slowest = took;
        if (!late) learned++, learned_late += took > 0.1 * DDP_TEST_SLOWDOWN;
        EXPECT(late || took < PROMPT_SECONDS, "rank %d learned of it after %.3f s", r, took);
    }
    EXPECT(result == (how == END_RETURN_ERROR ? DDP_ERR_CORRUPT : DDP_ERR_PEER_LOST), "launch gave %s '%s'",
           ddp_result_name(result), ddp_last_error());
    EXPECT(says(ddp_last_error(), ending_words[how]), "launch returned '%s'", ddp_last_error());
    if (how == END_RETURN_ERROR)
        EXPECT(says(ddp_last_error(), "on fire"), "launch returned '%s'", ddp_last_error());
    else
        EXPECT(says(ddp_last_error(), "rank 2") || victim != 2, "launch returned '%s'", ddp_last_error());
    EXPECT(launch_seconds < 3 * PROMPT_SECONDS, "launch took %.1f s", launch_seconds);
}

//== killed at a random moment of real work =================================================

/* All ranks add and check until an alarm kills one of them at any point. */
static ddp_result storm_main(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    int rank = ddp_rank(world), w = ddp_world_size(world);
    size_t count = p->late % 2 ? 1000 : 300000;
    void *shared;
    float *data[2];
    ddp_result result = DDP_OK;
    RANKS_OK(world, ddp_group_alloc(world, count * sizeof(float), &shared));
    data[0] = (float *)shared;
    data[1] = (float *)malloc(count * sizeof(float));
    if (rank == p->victim) {
        struct itimerval timer;
        memset(&timer, 0, sizeof timer);
        timer.it_value.tv_usec = 20000 + p->late * 1377;
        signal(SIGALRM, SIG_DFL);
        setitimer(ITIMER_REAL, &timer, NULL);
    }
    for (int round = 0; result == DDP_OK; round++) {
        float *d = data[round % 2];
        for (size_t i = 0; i < count; i += count / 100) d[i] = (float)(round % 100);
        result = ddp_all_reduce(world, d, d, count, DDP_F32, DDP_OP_SUM, NULL);
        for (size_t i = 0; i < count && result == DDP_OK; i += count / 100)
            RANKS_CHECK(world, d[i] == (float)(round % 100 * w), "round %d: %g next to a dying rank", round,
                        (double)d[i]);
    }
    result = note(world, world, result);
    meet_outside(w - 1);
    return result;
}

static void storm(int number, int w) {
    char scenario[64];
    plan p;
    ddp_result result;
    memset(&p, 0, sizeof p);
    p.victim = number % w, p.late = number;
    snprintf(scenario, sizeof scenario, "rank %d of %d killed at random, number %d", p.victim, w, number);
    faults_begin(scenario);
    result = launch(RANKS_PROCESSES, w, 20000, storm_main, &p);
    for (int r = 0; r < w; r++) {
        const seen *s = &stage_shared->rank[r];
        if (r == p.victim) continue;
        EXPECT(s->done && s->first == DDP_ERR_PEER_LOST && names_rank(s->text, p.victim)
                   && says(s->text, "signal 14"),
               "rank %d got %s '%s'", r, ddp_result_name(s->first), s->text);
        EXPECT(s->second == DDP_ERR_POISONED, "rank %d: second call gave %s", r, ddp_result_name(s->second));
    }
    EXPECT(result == DDP_ERR_PEER_LOST && says(ddp_last_error(), "signal 14"), "launch gave %s '%s'",
           ddp_result_name(result), ddp_last_error());
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0)
        return fprintf(stderr, "usage: test_lost [processes|threads]\n"), 2;
    faults_start(240);
    for (int how = mode == RANKS_THREADS ? END_RETURN_OK : 0; how < ENDINGS; how++)
        for (int what = 0; what < WAITINGS; what++) {
            run(mode, (ending)how, (waiting)what, 2, 0);
            if (what % 4 == 0) run(mode, (ending)how, (waiting)what, 0, 1);
        }
    printf("slowest rank to learn of a loss: %.1f ms\n", slowest * 1e3);
    faults_begin("all of the above");
    printf("%d of %d within %d ms\n", learned - learned_late, learned, 100 * DDP_TEST_SLOWDOWN);
    /* A few on a busy machine, not half of them. */
    EXPECT(learned_late * 2 <= learned, "%d times of %d it took too long to learn of a loss", learned_late,
           learned);
    if (mode == RANKS_PROCESSES) {
        for (int i = 0; i < 24 / DDP_TEST_SLOWDOWN + 4; i++) storm(i, i % 3 == 2 ? 5 : 2);
    }
    return faults_end();
}

/*  test_pipeline.c - the runner of ddp_pipeline.h: every schedule gives the bits of one process; versions of
    weights against a plain loop with delayed weights; tied parameters, hooks, recomputation, evaluation, the
    norm; memory of other ranks; messages for bad input; a callback that fails.

    test_pipeline BACKEND [W ...]: see support/ranks.h */
#define DDP_PIPELINE_IMPLEMENTATION
#include "../support/pipeline.h"
#include "../support/inner.h"

static ranks_mode mode;

//== bits ===========================================================================================

typedef struct history { /* of one process: versions of weights, gradients, losses */
    float weight[2][PIPE_STAGES][PIPE_WEIGHTS], bias[2][PIPE_STAGES][PIPE_SIDE];
    pipe_grads grads[PIPE_BATCHES];
    double losses[PIPE_BATCHES];
} history;

/* One step in one process: h->grads[0] receives the sum of gradients, divided. */
static double plain_step(history *h, const pipe_model *m, int count, int divide) {
    const float *weight[PIPE_STAGES], *bias[PIPE_STAGES];
    for (int s = 0; s < m->stages; s++) weight[s] = h->weight[0][s], bias[s] = h->bias[0][s];
    for (int i = 0; i < count; i++) h->losses[i] = pipe_plain(m->stages, weight, bias, i, &h->grads[i]);
    pipe_sum(h->grads, count);
    for (int s = 0; s < m->stages && divide; s++) {
        for (int k = 0; k < PIPE_WEIGHTS; k++) h->grads[0].weight[s][k] /= (float)count;
        for (int k = 0; k < PIPE_SIDE; k++) h->grads[0].bias[s][k] /= (float)count;
    }
    return pipe_sum_losses(h->losses, count) / count;
}

static void plain_descend(history *h, const pipe_model *m) {
    for (int s = 0; s < m->stages; s++) {
        for (int k = 0; k < PIPE_WEIGHTS; k++) h->weight[0][s][k] -= 0.05f * h->grads[0].weight[s][k];
        for (int k = 0; k < PIPE_SIDE; k++) h->bias[0][s][k] -= 0.05f * h->grads[0].bias[s][k];
    }
}

static void plain_begin(history *h, const pipe_model *m) {
    memset(h, 0, sizeof *h);
    memcpy(h->weight[0], m->weight, sizeof m->weight);
    memcpy(h->bias[0], m->bias, sizeof m->bias);
}

static ddp_result same_gradients(ddp_group *world, const pipe_model *m, const ddp_schedule *s,
                                 const history *h, const char *what) {
    for (int stage = 0; stage < m->stages; stage++) {
        if (ddp_schedule_stage_rank(s, stage) != ddp_rank(world)) continue;
        RANKS_CHECK(
            world,
            memcmp(m->params[stage][0].grad.data, h->grads[0].weight[stage], sizeof h->grads[0].weight[stage])
                == 0,
            "%s stage %d: weight", what, stage);
        RANKS_CHECK(
            world,
            memcmp(m->params[stage][1].grad.data, h->grads[0].bias[stage], sizeof h->grads[0].bias[stage])
                == 0,
            "%s stage %d: bias", what, stage);
    }
    return DDP_OK;
}

typedef struct variant {
    int with_loss, recompute, no_divide, prefetch, placed;
} variant;

/* Three steps of a schedule, an evaluation between them, and the same in one process. */
static ddp_result compare(ddp_group *world, const ddp_schedule *s, variant v, const char *what) {
    pipe_model *m = (pipe_model *)malloc(sizeof *m);
    history *h = (history *)malloc(sizeof *h);
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    int count = ddp_schedule_microbatch_count(s), again = 0, unwaited;
    double mean, each[PIPE_BATCHES];
    RANKS_CHECK(world, m && h, "memory");
    pipe_build(m, ddp_schedule_stage_count(s), v.with_loss);
    plain_begin(h, m);
    pipe_desc(m, s, &desc);
    desc.prefetch = v.prefetch;
    for (int stage = 0; stage < m->stages; stage++) {
        m->stage[stage].recompute = v.recompute && stage % 3 != 1;
        m->stage[stage].zero_gradients = stage % 2;
        m->stage[stage].grad_division = v.no_divide ? DDP_DIVIDE_NONE : DDP_DIVIDE_DEFAULT;
        if (v.placed) m->params[stage][0].grad.data = NULL;
        if (stage % 3 == 2) m->params[stage][0].grad.dtype = DDP_DTYPE_DEFAULT; /* as the value */
        if (ddp_schedule_stage_rank(s, stage) == ddp_rank(world)) again += m->stage[stage].recompute * count;
    }
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    for (int step = 0; step < 3; step++) {
        double want = plain_step(h, m, count, !v.no_divide);
        if (step == 1) {
            RANKS_OK(world, ddp_pipeline_evaluate(pipeline));
            RANKS_OK(world, ddp_pipeline_get_loss(pipeline, &mean, NULL));
            RANKS_CHECK(world, mean == want, "%s: evaluated %.17g, not %.17g", what, mean, want);
        }
        RANKS_OK(world, ddp_pipeline_step(pipeline));
        RANKS_CHECK(world, !m->wrong, "%s step %d: %s", what, step, m->wrong);
        RANKS_OK(world, same_gradients(world, m, s, h, what));
        RANKS_OK(world, ddp_pipeline_get_loss(pipeline, &mean, each));
        RANKS_CHECK(world, mean == want && memcmp(each, h->losses, (size_t)count * sizeof *each) == 0,
                    "%s step %d: loss %.17g, not %.17g", what, step, mean, want);
        for (int stage = 0; stage < m->stages; stage++)
            if (ddp_schedule_stage_rank(s, stage) == ddp_rank(world)) pipe_descend(m, stage);
        plain_descend(h, m);
        m->steps++;
    }
    RANKS_CHECK(world, m->recomputed == 3 * again, "%s: %d forwards ran again, not %d", what, m->recomputed,
                3 * again);
    ddp_pipeline_destroy(pipeline);
    unwaited = inner.handles_in_use(world);
    RANKS_CHECK(world, unwaited == 0, "%s: destroy has not waited for %d messages", what, unwaited);
    for (int stage = 0; stage < m->stages && v.placed; stage++)
        RANKS_CHECK(world, !m->params[stage][0].grad.data, "%s: a pointer to freed memory", what);
    free(h);
    free(m);
    return DDP_OK;
}

static ddp_result make(ddp_group *world, ddp_schedule **s, ddp_schedule_kind kind, int m, int v,
                       int interval) {
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_stage_cost costs[8];
    memset(costs, 0, sizeof costs);
    for (int i = 0; i < 8; i++)
        costs[i].forward = 1 + i % 3, costs[i].input_grad = 1.5, costs[i].weight_grad = 0.5 + i % 2,
        costs[i].transfer = 0.1;
    desc.kind = kind;
    desc.rank_count = ddp_world_size(world);
    desc.microbatch_count = m;
    desc.chunk_count = v;
    desc.update_interval = interval;
    if (kind == DDP_SCHEDULE_AUTO) desc.costs = costs;
    RANKS_OK(world, ddp_schedule_create(s, &desc));
    return DDP_OK;
}

/* Each kind with each number of chunks up to 3, before and after lowering. */
static ddp_result every_schedule(ddp_group *world) {
    static const struct {
        ddp_schedule_kind kind;
        int least, most, per_rank, more;
    } all[] = {
        {DDP_SCHEDULE_1F1B, 1, 1, 1, 3},
        {DDP_SCHEDULE_1F1B, 1, 1, 0, 1},
        {DDP_SCHEDULE_NAIVE, 1, 3, 1, 2},
        {DDP_SCHEDULE_GPIPE, 1, 1, 2, 1},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 1, 3, 2, 0},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 2, 3, 1, 2},
        {DDP_SCHEDULE_LOOPED_BFS, 1, 3, 1, 3},
        {DDP_SCHEDULE_ZB_H1, 1, 1, 2, 1},
        {DDP_SCHEDULE_ZB_H2, 1, 1, 3, 1},
        {DDP_SCHEDULE_INTERLEAVED_ZB_1P, 1, 3, 3, 0},
        {DDP_SCHEDULE_ZB_V, 2, 2, 2, 3},
        {DDP_SCHEDULE_DUALPIPE_V, 2, 2, 2, 3},
        {DDP_SCHEDULE_AUTO, 1, 1, 2, 3},
    };
    int n = 0;
    for (int k = 0; k < (int)(sizeof all / sizeof all[0]); k++)
        for (int chunks = all[k].least; chunks <= all[k].most; chunks++, n++) {
            ddp_schedule *s, *low;
            char what[80];
            snprintf(what, sizeof what, "%s, %d chunks", ddp_schedule_kind_name(all[k].kind), chunks);
            RANKS_OK(world, make(world, &s, all[k].kind,
                                 all[k].per_rank * ddp_world_size(world) + all[k].more, chunks, 0));
            RANKS_OK(world, ddp_schedule_lower(&low, s, 0));
            for (int lowered = 0; lowered < 2; lowered++) {
                /* sanitizers check memory and threads: one of the two is enough */
                if (DDP_TEST_SLOWDOWN > 1 && lowered != n % 2) continue;
                int i = n + lowered;
                variant v = {i % 2, i % 3 == 1, i % 4 == 3, i % 5, i % 4 < 2};
                RANKS_OK(world, compare(world, lowered ? low : s, v, what));
            }
            ddp_schedule_destroy(low);
            ddp_schedule_destroy(s);
        }
    return DDP_OK;
}

/* Micro-batches in custom orders, different for sending and receiving, with more messages than fit between
   two ranks. */
static ddp_result own_order(ddp_group *world) {
    static const char csv[] = "0F0,0F3,0F1,0F5,0F4,0F2,0F6,0B6,0B0,0B1,0B5,0B3,0B2,0B4\n1F2,1F0,1F6,1F1,1B6,"
                              "1B0,1I1,1F5,1F4,1I5,1F3,1W5,1B3,1B2,1W1,1B4\n";
    char text[4096];
    size_t at = 0;
    variant v = {1, 0, 0, 1, 0};
    ddp_schedule *s;
    if (ddp_world_size(world) != 2) return DDP_OK;
    RANKS_OK(world, ddp_schedule_parse(&s, csv));
    RANKS_OK(world, compare(world, s, v, "own order"));
    ddp_schedule_destroy(s);
    for (int rank = 0; rank < 2; rank++) { /* the other way round */
        for (int i = 0; i < PIPE_BATCHES; i++)
            at += (size_t)snprintf(text + at, sizeof text - at, "%dF%d,", rank,
                                   rank ? PIPE_BATCHES - 1 - i : i);
        for (int i = 0; i < PIPE_BATCHES; i++)
            at += (size_t)snprintf(text + at, sizeof text - at, "%dB%d%s", rank, i,
                                   i + 1 < PIPE_BATCHES ? "," : "\n");
    }
    RANKS_OK(world, ddp_schedule_parse(&s, text));
    RANKS_OK(world, compare(world, s, v, "reversed"));
    ddp_schedule_destroy(s);
    return DDP_OK;
}

//== versions of weights ====================================================================

static ddp_result on_update(int stage, void *user) {
    pipe_model *m = (pipe_model *)user;
    m->hooks[stage][4]++;
    pipe_descend(m, stage);
    return DDP_OK;
}

enum { VERSIONS = 3 * PIPE_BATCHES + 1 };
typedef struct versions {
    float weight[VERSIONS][PIPE_STAGES][PIPE_WEIGHTS], bias[VERSIONS][PIPE_STAGES][PIPE_SIDE];
} versions;

/* A loop over micro-batches in which stage s uses delayed weights; the delay follows from its place in the
   pipeline. */
static void delayed(versions *all, int kind_2bw, int stages, int count, int interval, int steps) {
    pipe_grads g[PIPE_BATCHES];
    for (int step = 0; step < steps; step++)
        for (int i = 0; i < count; i++) {
            const float *weight[PIPE_STAGES], *bias[PIPE_STAGES];
            /* Updates by micro-batches before this one's. */
            int made = step * (count / interval) + i / interval;
            for (int s = 0; s < stages; s++) {
                int waits = i - (stages - 1 - s),
                    version = kind_2bw ? (made ? made - 1 : 0)
                                       : step * (count / interval) + (waits > 0 ? waits : 0) / interval;
                weight[s] = all->weight[version][s], bias[s] = all->bias[version][s];
            }
            pipe_plain(stages, weight, bias, i, &g[i % interval]);
            if ((i + 1) % interval) continue;
            pipe_sum(g, interval);
            for (int s = 0; s < stages; s++) {
                for (int k = 0; k < PIPE_WEIGHTS; k++)
                    all->weight[made + 1][s][k] = all->weight[made][s][k]
                                                  - 0.05f * (g[0].weight[s][k] / (float)interval);
                for (int k = 0; k < PIPE_SIDE; k++)
                    all->bias[made + 1][s][k] = all->bias[made][s][k]
                                                - 0.05f * (g[0].bias[s][k] / (float)interval);
            }
        }
}

/* The mean loss of a version of the weights. */
static double newest_loss(const versions *all, int version, int stages, int count) {
    const float *weight[PIPE_STAGES], *bias[PIPE_STAGES];
    double losses[PIPE_BATCHES];
    pipe_grads unused;
    for (int s = 0; s < stages; s++) weight[s] = all->weight[version][s], bias[s] = all->bias[version][s];
    for (int i = 0; i < count; i++) losses[i] = pipe_plain(stages, weight, bias, i, &unused);
    return pipe_sum_losses(losses, count) / count;
}

/* A stage whose values are stored elsewhere, and in m only from unshard to reshard. An update inside a step
   unshards again. */
typedef struct sharded {
    pipe_model m;
    float weight[PIPE_STAGES][PIPE_WEIGHTS], bias[PIPE_STAGES][PIPE_SIDE];
} sharded;

static ddp_result on_gather(int stage, void *user) {
    sharded *me = (sharded *)user;
    memcpy(me->m.weight[stage], me->weight[stage], sizeof me->weight[stage]);
    memcpy(me->m.bias[stage], me->bias[stage], sizeof me->bias[stage]);
    return DDP_OK;
}

static ddp_result on_release(int stage, void *user) {
    sharded *me = (sharded *)user;
    memset(me->m.weight[stage], 0xff, sizeof me->weight[stage]); /* no numbers */
    memset(me->m.bias[stage], 0xff, sizeof me->bias[stage]);
    return DDP_OK;
}

static ddp_result on_shard_update(int stage, void *user) {
    sharded *me = (sharded *)user;
    me->m.hooks[stage][4]++;
    for (int k = 0; k < PIPE_WEIGHTS; k++) me->weight[stage][k] -= 0.05f * me->m.d_weight[stage][k];
    for (int k = 0; k < PIPE_SIDE; k++) me->bias[stage][k] -= 0.05f * me->m.d_bias[stage][k];
    on_release(stage, user);
    return on_gather(stage, user);
}

/* Case by case as the list is made, with whole values; then lowered, with sharded ones. */
static ddp_result weight_versions(ddp_group *world) {
    int w = ddp_world_size(world);
    static const struct {
        int twice, per_rank, interval, scaled;
    } cases[] = {{0, 4, 1, 0}, {0, 4, 2, 0}, {0, 2, 1, 1}, {1, 3, 1, 1}, {1, 2, 2, 1}};
    enum { CASES = (int)(sizeof cases / sizeof cases[0]) };
    for (int turn = 0; turn < 2 * CASES; turn++) {
        int k = turn % CASES, shards = turn >= CASES,
            interval = cases[k].interval * (cases[k].scaled ? w : 1), count = cases[k].per_rank * w;
        sharded *me = (sharded *)malloc(sizeof *me);
        pipe_model *m = &me->m;
        versions *all = (versions *)malloc(sizeof *all);
        ddp_pipeline_desc desc;
        ddp_pipeline *pipeline;
        ddp_pipeline_stats stats;
        ddp_schedule *s, *low;
        double mean, want;
        RANKS_CHECK(world, me && all, "memory");
        RANKS_OK(world, make(world, &s, cases[k].twice ? DDP_SCHEDULE_PIPEDREAM_2BW : DDP_SCHEDULE_PIPEDREAM,
                             count, 1, interval));
        RANKS_OK(world, ddp_schedule_lower(&low, s, 0));
        pipe_build(m, w, 1);
        memcpy(all->weight[0], m->weight, sizeof m->weight);
        memcpy(all->bias[0], m->bias, sizeof m->bias);
        memcpy(me->weight, m->weight, sizeof m->weight);
        memcpy(me->bias, m->bias, sizeof m->bias);
        for (int stage = 0; stage < w; stage++) {
            m->stage[stage].update = shards ? on_shard_update : on_update;
            if (shards)
                m->stage[stage].unshard = on_gather, m->stage[stage].reshard = on_release,
                on_release(stage, me);
        }
        pipe_desc(m, shards ? low : s, &desc);
        RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
        for (int step = 0; step < 3; step++) RANKS_OK(world, ddp_pipeline_step(pipeline));
        delayed(all, cases[k].twice, w, count, interval, 3);
        for (int stage = 0; stage < w; stage++) {
            if (stage != ddp_rank(world)) continue;
            RANKS_CHECK(world, m->hooks[stage][4] == 3 * count / interval, "case %d: %d updates", k,
                        m->hooks[stage][4]);
            RANKS_CHECK(world, m->params[stage][0].value.data == m->weight[stage],
                        "case %d: the newest values moved", k);
            RANKS_CHECK(world,
                        memcmp(shards ? me->weight[stage] : m->weight[stage],
                               all->weight[3 * count / interval][stage], sizeof m->weight[stage])
                            == 0,
                        "case %d stage %d: weight", turn, stage);
            RANKS_CHECK(world,
                        memcmp(shards ? me->bias[stage] : m->bias[stage],
                               all->bias[3 * count / interval][stage], sizeof m->bias[stage])
                            == 0,
                        "case %d stage %d: bias", turn, stage);
        }
        RANKS_CHECK(world, !m->wrong, "case %d: %s", k, m->wrong);
        RANKS_OK(world, ddp_pipeline_evaluate(pipeline));
        RANKS_OK(world, ddp_pipeline_get_loss(pipeline, &mean, NULL));
        want = newest_loss(all, 3 * count / interval, w, count);
        RANKS_CHECK(world, mean == want, "case %d: evaluated %.17g, the newest weights give %.17g", turn,
                    mean, want);
        RANKS_OK(world, ddp_pipeline_get_stats(pipeline, &stats));
        RANKS_CHECK(world,
                    cases[k].twice ? stats.version_bytes > 0
                                   : (stats.version_bytes > 0) == (ddp_rank(world) + 1 < w),
                    "case %d: %zu bytes", k, stats.version_bytes);
        ddp_pipeline_destroy(pipeline);
        ddp_schedule_destroy(low);
        ddp_schedule_destroy(s);
        free(all);
        free(me);
    }
    return DDP_OK;
}

//== hooks, ties, norm ============================================================================

#define HOOK(name, number)                            \
    static ddp_result name(int stage, void *user) {   \
        ((pipe_model *)user)->hooks[stage][number]++; \
        return DDP_OK;                                \
    }
HOOK(on_unshard, 0)
HOOK(on_reshard, 1)
HOOK(on_reduce, 2)
HOOK(on_wait, 3)
HOOK(on_optimizer, 4)

/* The last stage also uses the first bias. The norm is that of one process. Hooks are called once per step
   and stage. */
static ddp_result ties_and_norm(ddp_group *world) {
    int w = ddp_world_size(world), stages = 2 * w, count = 2 * w + 1;
    pipe_model *m = (pipe_model *)malloc(sizeof *m);
    history *h = (history *)malloc(sizeof *h);
    ddp_pipeline_tie tie = {0, 1, stages - 1, 1};
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    float norm, want;
    RANKS_CHECK(world, m && h, "memory");
    for (int turn = 0; turn < 2; turn++) {
        ddp_exact_sum sum;
        RANKS_OK(world, make(world, &s, turn ? DDP_SCHEDULE_ZB_V : DDP_SCHEDULE_LOOPED_BFS, count, 2, 0));
        pipe_build(m, stages, 1);
        plain_begin(h, m);
        plain_step(h, m, count, turn == 0);
        for (int k = 0; k < PIPE_SIDE; k++)
            h->grads[0].bias[stages - 1][k] = h->grads[0].bias[0][k] += h->grads[0].bias[stages - 1][k];
        for (int stage = 0; stage < stages; stage++) {
            m->stage[stage].unshard = on_unshard, m->stage[stage].reshard = on_reshard;
            m->stage[stage].wait_grad = on_wait;
            m->stage[stage].update = on_optimizer;
            /* reduce_grad divides, so the runner leaves sums. */
            if (turn) m->stage[stage].reduce_grad = on_reduce;
        }
        pipe_desc(m, s, &desc);
        desc.ties = &tie, desc.tie_count = 1;
        RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
        RANKS_OK(world, ddp_pipeline_step(pipeline));
        RANKS_OK(world, same_gradients(world, m, s, h, "ties"));
        for (int stage = 0; stage < stages; stage++) {
            const int *n = m->hooks[stage], here = ddp_schedule_stage_rank(s, stage) == ddp_rank(world);
            RANKS_CHECK(world, n[4] == here, "stage %d: %d updates", stage, n[4]);
            RANKS_CHECK(world, n[0] == here && n[1] == here && n[2] == (here && turn) && n[3] == here,
                        "stage %d: hooks %d %d %d %d", stage, n[0], n[1], n[2], n[3]);
        }
        ddp_exact_sum_clear(&sum);
        for (int stage = 0; stage < stages; stage++) {
            const ddp_tensor grads[2] = {{h->grads[0].weight[stage], DDP_F32, 2, {PIPE_SIDE, PIPE_SIDE}},
                                         {h->grads[0].bias[stage], DDP_F32, 1, {PIPE_SIDE}}};
            ddp_device_cpu()->sum_squares(&sum, 0, grads, stage + 1 < stages ? 2 : 1);
        }
        want = (float)sqrt(ddp_exact_sum_value(&sum));
        RANKS_OK(world, ddp_pipeline_clip_grad_norm(pipeline, want / 2, &norm));
        RANKS_CHECK(world, norm == want, "norm %.9g, not %.9g", (double)norm, (double)want);
        const ddp_tensor all = {&h->grads[0], DDP_F32, 1, {sizeof h->grads[0] / sizeof(float)}};
        ddp_device_cpu()->scale(&all, 1, want / 2 / want);
        RANKS_OK(world, same_gradients(world, m, s, h, "clipped"));
        ddp_pipeline_destroy(pipeline);
        ddp_schedule_destroy(s);
    }
    free(h);
    free(m);
    return DDP_OK;
}

static ddp_result no_sharded_grad(int stage, int param, ddp_tensor *grad, void *user) {
    (void)stage, (void)param, (void)grad, (void)user;
    return DDP_ERR_ENGINE;
}

/* If get_sharded_grad fails without an error line, the error is the name of its result, not an older line.
   The group that fails has one rank. */
static ddp_result fails_silently(ddp_group *world) {
    pipe_model m;
    ddp_pipeline_tie tie = {0, 1, 1, 1};
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    ddp_group *self;
    RANKS_OK(world, ddp_group_split(world, ddp_rank(world), 0, &self));
    RANKS_OK(world, make(self, &s, DDP_SCHEDULE_LOOPED_BFS, 2, 2, 0));
    pipe_build(&m, 2, 1);
    m.stage[0].get_sharded_grad = no_sharded_grad;
    pipe_desc(&m, s, &desc);
    desc.ties = &tie, desc.tie_count = 1;
    RANKS_OK(world, ddp_pipeline_create(&pipeline, self, &desc));
    (void)!ddp_fail(DDP_ERR_CORRUPT, "an older line");
    RANKS_CHECK(world,
                ddp_pipeline_step(pipeline) == DDP_ERR_ENGINE
                    && strstr(ddp_last_error(), "tied parameters: DDP_ERR_ENGINE"),
                "%s", ddp_last_error());
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
    ddp_group_destroy(self);
    return DDP_OK;
}

/* One bias in three or more stages: every end has the sum of all, added in the order of the ties. Turn 0: the
   first use is on rank 0. Turn 1: it is at the tip of a V, on the last rank, and the sum goes back to lower
   ranks. */
static ddp_result ties_of_many(ddp_group *world) {
    int w = ddp_world_size(world), stages = 2 * w, count = 2 * w + 1;
    pipe_model *m = (pipe_model *)malloc(sizeof *m);
    history *h = (history *)malloc(sizeof *h);
    RANKS_CHECK(world, m && h, "memory");
    for (int turn = 0; turn < 2; turn++) {
        int first = turn ? w - 1 : 0, tie_count = 0;
        ddp_pipeline_tie ties[PIPE_STAGES];
        ddp_pipeline_desc desc;
        ddp_pipeline *pipeline;
        ddp_schedule *s;
        RANKS_OK(world, make(world, &s, turn ? DDP_SCHEDULE_ZB_V : DDP_SCHEDULE_LOOPED_BFS, count, 2, 0));
        pipe_build(m, stages, 1);
        plain_begin(h, m);
        plain_step(h, m, count, 1);
        for (int stage = stages - 1; stage > first; stage--) {
            ddp_pipeline_tie tie = {first, 1, stage, 1};
            ties[tie_count++] = tie;
            for (int k = 0; k < PIPE_SIDE; k++) h->grads[0].bias[first][k] += h->grads[0].bias[stage][k];
        }
        for (int stage = first + 1; stage < stages; stage++)
            memcpy(h->grads[0].bias[stage], h->grads[0].bias[first], sizeof h->grads[0].bias[first]);
        pipe_desc(m, s, &desc);
        desc.ties = ties;
        desc.tie_count = tie_count;
        RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
        for (int step = 0; step < 2; step++) {
            RANKS_OK(world, ddp_pipeline_step(pipeline));
            RANKS_OK(world, same_gradients(world, m, s, h, turn ? "many ties of a V" : "many ties"));
        }
        ddp_pipeline_destroy(pipeline);
        ddp_schedule_destroy(s);
    }
    free(h);
    free(m);
    return DDP_OK;
}

/* The last stage has no parameters known to the runner; then no stage has any. */
static ddp_result norm_without_params(ddp_group *world) {
    int w = ddp_world_size(world), count = 2 * w;
    pipe_model *m = (pipe_model *)malloc(sizeof *m);
    history *h = (history *)malloc(sizeof *h);
    ddp_schedule *s;
    RANKS_CHECK(world, m && h, "memory");
    RANKS_OK(world, make(world, &s, DDP_SCHEDULE_ZB_H1, count, 1, 0));
    for (int named = 0; named<w; named += w> 1 ? w - 1 : 1) {
        ddp_pipeline_desc desc;
        ddp_pipeline *pipeline;
        ddp_exact_sum sum;
        ddp_result result;
        float norm = 0;
        pipe_build(m, w, 1);
        plain_begin(h, m);
        plain_step(h, m, count, 1);
        for (int stage = named; stage < w; stage++)
            m->stage[stage].params = NULL, m->stage[stage].param_count = 0;
        pipe_desc(m, s, &desc);
        RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
        RANKS_OK(world, ddp_pipeline_step(pipeline));
        RANKS_CHECK(world,
                    ddp_pipeline_clip_grad_norm(pipeline, 0, NULL) == DDP_ERR_INVALID
                        && strstr(ddp_last_error(), "max_norm"),
                    "%s", ddp_last_error());
        ddp_exact_sum_clear(&sum);
        for (int stage = 0; stage < named; stage++) {
            const ddp_tensor grads[2] = {{h->grads[0].weight[stage], DDP_F32, 2, {PIPE_SIDE, PIPE_SIDE}},
                                         {h->grads[0].bias[stage], DDP_F32, 1, {PIPE_SIDE}}};
            ddp_device_cpu()->sum_squares(&sum, 0, grads, 2);
        }
        result = ddp_pipeline_clip_grad_norm(pipeline, 1e9f, &norm);
        if (named)
            RANKS_CHECK(world, result == DDP_OK && norm == (float)sqrt(ddp_exact_sum_value(&sum)),
                        "norm %.9g", (double)norm);
        else
            RANKS_CHECK(world, result == DDP_ERR_INVALID && strstr(ddp_last_error(), "no stage has params"),
                        "%s", ddp_last_error());
        ddp_pipeline_destroy(pipeline);
    }
    ddp_schedule_destroy(s);
    free(h);
    free(m);
    return DDP_OK;
}

/* Reduces over replicas first, then updates the weights, also at the time that the list sets. */
static ddp_result on_late_update(int stage, void *user) {
    pipe_model *m = (pipe_model *)user;
    PIPE_SEE(m, m->hooks[stage][4] + 1 == m->hooks[stage][2] && m->hooks[stage][2] == m->hooks[stage][3]);
    return on_update(stage, user);
}

static ddp_result updates_in_lists(ddp_group *world) {
    pipe_model m;
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s, *low;
    int w = ddp_world_size(world), mine = ddp_rank(world);
    RANKS_OK(world, make(world, &s, DDP_SCHEDULE_PIPEDREAM, 4 * w, 1, 2));
    RANKS_OK(world, ddp_schedule_lower(&low, s, 0));
    pipe_build(&m, w, 1);
    for (int i = 0; i < w; i++)
        m.stage[i].reduce_grad = on_reduce, m.stage[i].wait_grad = on_wait,
        m.stage[i].update = on_late_update;
    pipe_desc(&m, low, &desc);
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    RANKS_CHECK(world, !m.wrong && m.hooks[mine][4] == 2 * w, "%d updates: %s", m.hooks[mine][4],
                m.wrong ? m.wrong : "");
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(low);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

/* A rank without actions has no span. */
static ddp_result idle_rank(ddp_group *world) {
    pipe_model m;
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    if (ddp_world_size(world) != 2) return DDP_OK;
    RANKS_OK(world, ddp_schedule_parse(&s, ",\n0F0,0B0\n"));
    pipe_build(&m, 1, 1);
    pipe_desc(&m, s, &desc);
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    RANKS_CHECK(world, inner_span(pipeline, 0) == 0 && inner_span(pipeline, 1) > 0, "spans %g and %g",
                inner_span(pipeline, 0), inner_span(pipeline, 1));
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

/* Costs and times of every rank's actions are available on every rank, and can be drawn and simulated. */
static ddp_result times(ddp_group *world) {
    pipe_model m;
    ddp_stage_cost costs[PIPE_STAGES];
    ddp_action_time *all;
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_pipeline_stats stats;
    ddp_schedule *s;
    size_t size_bytes = 0;
    int w = ddp_world_size(world), count = 0, n;
    RANKS_OK(world, make(world, &s, DDP_SCHEDULE_ZB_H1, 2 * w, 1, 0));
    for (int r = 0; r < w; r++) {
        RANKS_CHECK(world, ddp_schedule_actions(s, r, &n), "list");
        count += n;
    }
    all = (ddp_action_time *)calloc((size_t)count, sizeof *all);
    RANKS_CHECK(world, all, "memory");
    pipe_build(&m, w, 1);
    pipe_desc(&m, s, &desc);
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    RANKS_OK(world, ddp_pipeline_get_times(pipeline, costs, all));
    for (int i = 0; i < count; i++)
        RANKS_CHECK(world, all[i].begin >= 0 && all[i].end > all[i].begin, "action %d: %g to %g", i,
                    all[i].begin, all[i].end);
    for (int stage = 0; stage < w; stage++)
        RANKS_CHECK(world,
                    costs[stage].forward > 0 && costs[stage].input_grad > 0 && costs[stage].weight_grad > 0,
                    "stage %d", stage);
    RANKS_OK(world, ddp_schedule_draw(s, DDP_SCHEDULE_TRACE, costs, all, NULL, &size_bytes));
    RANKS_OK(world, ddp_pipeline_get_stats(pipeline, &stats));
    RANKS_CHECK(world,
                stats.steps == 2 && stats.step_seconds > 0 && stats.compute_seconds > 0
                    && stats.activation_bytes > 0,
                "stats");
    RANKS_CHECK(world,
                stats.bubble_rate >= 0 && stats.bubble_rate < 1 && stats.predicted_bubble_rate >= 0
                    && stats.predicted_bubble_rate < 1,
                "bubble");
    RANKS_CHECK(world, (stats.bytes_sent > 0) == (w > 1), "bytes_sent");
    RANKS_CHECK(world,
                stats.bytes_handed_over
                    == (ddp_rank(world) + 1 == w ? 2 * (size_t)w * sizeof(float) * PIPE_CELLS : 0),
                "%zu bytes", stats.bytes_handed_over);
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
    free(all);
    return DDP_OK;
}

//== memory of other ranks ==========================================================================

enum { READ_CELLS = 2000 };

/* Each stage sends a number to the next one, and another one back, in every cell. The receiver reads twice,
   and checks the address. */
typedef struct reader {
    ddp_group *group;
    const ddp_schedule *schedule;
    int stages, in_place;
    /* This rank's outputs for other ranks are in its group memory, at this address or above. */
    uintptr_t own;
    const char *wrong;
} reader;

static float read_mark(int stage, int microbatch, int way) {
    return (float)(1 + 2 * (stage * PIPE_BATCHES + microbatch) + way);
}

static int read_same(const ddp_tensor *tensor, float mark) {
    for (int k = 0; k < READ_CELLS; k++)
        if (((const float *)tensor->data)[k] != mark) return 0;
    return 1;
}

/* Whether an address of this rank is in the group memory of the rank of that stage. */
static int read_lies(const reader *r, const void *data, int stage) {
    int rank = ddp_schedule_stage_rank(r->schedule, stage);
    uintptr_t there = (uintptr_t)ddp_group_peer(r->group, (const void *)r->own, rank);
    return there
           && ddp_group_peer(r->group, (const void *)(r->own + ((uintptr_t)data - there)), rank) == data;
}

static ddp_result read_stage(const ddp_pipeline_call *c, void *user) {
    reader *r = (reader *)user;
    int back = c->kind != DDP_ACTION_FORWARD, gets = c->output_grads && c->output_count;
    ddp_tensor *makes = (ddp_tensor *)(uintptr_t)(back ? c->input_grads : c->outputs);
    if (c->kind == DDP_ACTION_WEIGHT_GRAD || !(back ? c->input_count : c->output_count)) makes = NULL;
    for (int look = 0; look < 2; look++) {
        if (c->input_count) PIPE_SEE(r, read_same(&c->inputs[0], read_mark(c->stage - 1, c->microbatch, 0)));
        if (gets) PIPE_SEE(r, read_same(&c->output_grads[0], read_mark(c->stage + 1, c->microbatch, 1)));
        if (!look && c->stage % 2) ranks_sleep_us(500); /* gives a premature writer the time to overwrite */
    }
    if (makes) {
        for (int k = 0; k < READ_CELLS; k++)
            ((float *)makes->data)[k] = read_mark(c->stage, c->microbatch, back);
        r->own = (uintptr_t)makes->data;
    }
    if (r->own && c->input_count) PIPE_SEE(r, read_lies(r, c->inputs[0].data, c->stage - 1) == r->in_place);
    if (r->own && gets) PIPE_SEE(r, read_lies(r, c->output_grads[0].data, c->stage + 1) == r->in_place);
    if (c->loss) *c->loss = 1;
    return DDP_OK;
}

static ddp_result read_steps(ddp_group *world, const ddp_schedule *s, int slots, const char *what) {
    ddp_pipeline_stage stages[PIPE_STAGES];
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_stats stats;
    ddp_pipeline *pipeline;
    reader r;
    void *memory;
    memset(&r, 0, sizeof r);
    memset(stages, 0, sizeof stages);
    RANKS_OK(world, ddp_group_alloc(world, 64, &memory));
    r.group = world, r.schedule = s, r.stages = ddp_schedule_stage_count(s);
    r.in_place = ddp_group_peer(world, memory, 1 - ddp_rank(world) % 2) != NULL;
    for (int i = 0; i < r.stages; i++)
        stages[i].forward = stages[i].input_grad = stages[i].weight_grad = read_stage, stages[i].user = &r;
    desc.schedule = s, desc.stages = stages;
    desc.stage_count = r.stages;
    desc.boundary.dtype = DDP_F32, desc.boundary.ndim = 1, desc.boundary.shape[0] = READ_CELLS;
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    for (int step = 0; step < 2; step++) {
        RANKS_OK(world, ddp_pipeline_step(pipeline));
        RANKS_CHECK(world, !r.wrong, "%s: %s", what, r.wrong);
        RANKS_OK(world, ddp_pipeline_evaluate(pipeline));
        RANKS_CHECK(world, !r.wrong, "%s, evaluating: %s", what, r.wrong);
    }
    RANKS_OK(world, ddp_pipeline_get_stats(pipeline, &stats));
    if (r.in_place && slots >= 0)
        RANKS_CHECK(world, stats.activation_bytes == (size_t)slots * READ_CELLS * sizeof(float),
                    "%s: %zu bytes", what, stats.activation_bytes);
    ddp_pipeline_destroy(pipeline);
    RANKS_OK(world, ddp_group_free(world, memory));
    return DDP_OK;
}

/* Boundaries are read at the producer, and no rank overwrites them before the last read. */
static ddp_result handed_over(ddp_group *world) {
    /* Rank 1 retains micro-batches that rank 0 ended long ago, and returns later ones first. */
    static const char late[] =
        "0F0,0F1,0B0,0B1,0F2,0F3,0B2,0B3,0F4,0F5,0B4,0B5,0F6,0F7,0B6,0B7\n"
        "1F0,1F1,1I0,1I1,1W1,1F2,1F3,1I2,1I3,1W3,1W0,1F4,1F5,1I4,1I5,1W5,1W2,1F6,1F7,1I6,1I7,1W7,1W4,1W6\n";
    static const ddp_schedule_kind kinds[] = {DDP_SCHEDULE_1F1B, DDP_SCHEDULE_GPIPE, DDP_SCHEDULE_ZB_H2};
    int w = ddp_world_size(world), left = w - ddp_rank(world);
    ddp_schedule *s;
    for (int k = 0; k < 3 && w > 1; k++) {
        /* 1F1B: p-r slots forward, p-(r-1) slots backward. */
        int slots = k ? -1 : (left > 1 ? left : 0) + (left < w ? left + 1 : 0);
        RANKS_OK(world, make(world, &s, kinds[k], 4 * w, 1, 0));
        RANKS_OK(world, read_steps(world, s, slots, ddp_schedule_kind_name(kinds[k])));
        ddp_schedule_destroy(s);
    }
    if (w != 2) return DDP_OK;
    RANKS_OK(world, ddp_schedule_parse(&s, late));
    RANKS_OK(world, read_steps(world, s, left == 2 ? 2 + 3 : 2, "late W")); /* in flight: 2 here, 3 there */
    ddp_schedule_destroy(s);
    return DDP_OK;
}

/* Writes marks, and checks those of others. A mask has only that of the micro-batch. */
static ddp_result mask_stage(const ddp_pipeline_call *c, void *user) {
    reader *r = (reader *)user;
    for (int i = 0; c->outputs && i < c->output_count; i++)
        for (int k = 0; k < READ_CELLS; k++) {
            if (c->outputs[i].dtype == DDP_I32)
                ((int32_t *)c->outputs[i].data)[k] = c->microbatch;
            else
                ((float *)c->outputs[i].data)[k] = read_mark(c->stage, c->microbatch, 0);
        }
    for (int i = 0; c->input_grads && i < c->input_count; i++)
        for (int k = 0; k < READ_CELLS && c->input_grads[i].data; k++)
            ((float *)c->input_grads[i].data)[k] = read_mark(c->stage, c->microbatch, 1);
    for (int i = 0; i < c->input_count; i++)
        for (int k = 0; k < READ_CELLS; k++)
            PIPE_SEE(r, c->inputs[i].dtype == DDP_I32
                            ? ((int32_t *)c->inputs[i].data)[k] == c->microbatch
                            : ((float *)c->inputs[i].data)[k] == read_mark(c->stage - 1, c->microbatch, 0));
    if (c->loss) *c->loss = 1;
    return DDP_OK;
}

/* Stage s on rank s % 3, and a mask of integers from stage 0 to stage 2, which rank 0 learns of only through
   rank 1. The message that returns its memory is queued after more messages than fit between two ranks, and
   rank 0 receives those later. */
static ddp_result far_mask(ddp_group *world) {
    enum { MASK_AHEAD = 40, MASK_BATCHES = 44 };
    static const char *const format[4] = {"%sF%d,", "%sB%d,", "%sB%d,", "%sF%d,"};
    ddp_pipeline_stage stages[6];
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_edge edges[6];
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    reader r;
    char *text, number[2][2] = {"0", "0"};
    size_t at = 0, room = 1 << 14;
    if (ddp_world_size(world) != 3) return DDP_OK;
    RANKS_CHECK(world, (text = (char *)malloc(room)) != NULL, "memory");
    for (int rank = 0; rank < 3; rank++) {
        number[0][0] = (char)('0' + rank), number[1][0] = (char)('3' + rank);
        for (int i = 0; i < MASK_AHEAD; i++)
            at += (size_t)snprintf(text + at, room - at, "%sF%d,", number[0], i);
        for (int i = 0; i < 4 * MASK_BATCHES; i++) {
            int k = i % 4, batch = i / 4 + (k == 3 ? MASK_AHEAD : 0);
            if (batch < MASK_BATCHES)
                at += (size_t)snprintf(text + at, room - at, format[k], number[k < 2], batch);
        }
        text[at - 1] = '\n';
    }
    RANKS_OK(world, ddp_schedule_parse(&s, text));
    free(text);
    memset(&r, 0, sizeof r);
    memset(stages, 0, sizeof stages);
    memset(edges, 0, sizeof edges);
    r.group = world, r.schedule = s, r.stages = 6;
    for (int i = 0; i < 6; i++) {
        stages[i].forward = stages[i].input_grad = stages[i].weight_grad = mask_stage, stages[i].user = &r;
        edges[i].from = i < 5 ? i : 0, edges[i].to = i < 5 ? i + 1 : 2;
        edges[i].tensor.dtype = i < 5 ? DDP_F32 : DDP_I32, edges[i].tensor.ndim = 1,
        edges[i].tensor.shape[0] = READ_CELLS;
    }
    desc.stage_count = 6;
    desc.schedule = s, desc.stages = stages, desc.edges = edges, desc.edge_count = 6;
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    for (int step = 0; step < 2; step++) {
        RANKS_OK(world, ddp_pipeline_step(pipeline));
        RANKS_OK(world, ddp_pipeline_evaluate(pipeline));
        RANKS_CHECK(world, !r.wrong, "mask: %s", r.wrong);
    }
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

//== bad input =====================================================================================

#define EXPECT_BAD(world, pipeline, code, words)                                                   \
    do {                                                                                           \
        ddp_result bad_result = ddp_pipeline_create(&(pipeline), (world), &desc);                  \
        RANKS_CHECK(world, bad_result == (code) && !(pipeline) && strstr(ddp_last_error(), words), \
                    "\"%s\": %s", words, ddp_last_error());                                        \
        pipe_build(&m, stages, 1);                                                                 \
        pipe_desc(&m, s, &desc);                                                                   \
    } while (0)

/* An array of stages that is shorter than the schedule is refused before anything reads past its end. The
   array is on the heap and has exactly stage_count entries, so that AddressSanitizer sees a read too far. */
static ddp_result wrong_stage_counts(ddp_group *world, const ddp_pipeline_desc *good) {
    int right = good->stage_count, last = ddp_world_size(world) - 1;
    int counts[] = {0, -1, right - 1, right + 1};
    ddp_pipeline *pipeline;
    char words[80];
    for (int turn = 0; turn < 8; turn++) {
        int count = counts[turn % 4];
        int everywhere = turn < 4; /* otherwise on the last rank only: all ranks return its error */
        int entries = count > 0 ? count : 1;
        ddp_pipeline_desc desc = *good;
        ddp_pipeline_stage *stages = (ddp_pipeline_stage *)calloc((size_t)entries, sizeof *stages);
        ddp_result result;
        RANKS_CHECK(world, stages, "memory");
        memcpy(stages, good->stages, (size_t)(entries < right ? entries : right) * sizeof *stages);
        if (everywhere || ddp_rank(world) == last) {
            desc.stages = stages;
            desc.stage_count = count;
        }
        result = ddp_pipeline_create(&pipeline, world, &desc);
        snprintf(words, sizeof words, "stage_count=%d, but the schedule has %d stages;", count, right);
        RANKS_CHECK(world, result == DDP_ERR_INVALID && !pipeline && strstr(ddp_last_error(), words),
                    "stage_count=%d: %s: %s", count, ddp_result_name(result), ddp_last_error());
        free(stages);
    }
    return DDP_OK;
}

static ddp_result bad_input(ddp_group *world) {
    pipe_model m;
    ddp_pipeline_stats stats;
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s, *other, *twice;
    ddp_schedule_desc wide = DDP_ZERO;
    ddp_pipeline_tie tie = {0, 0, 1, 2};
    int w = ddp_world_size(world), stages = 2 * w;
    char words[120];
    snprintf(
        words, sizeof words,
        "ties[0]: params[0] of stage 0 on rank 0 is f32 [5,5], params[1] of stage %d on rank %d is f32 [5]",
        stages - 1, w - 1);
    RANKS_OK(world, make(world, &s, DDP_SCHEDULE_INTERLEAVED_ZB_1P, 2 * w, 2, 0));
    wide.rank_count = w + 1, wide.microbatch_count = 2;
    RANKS_OK(world, ddp_schedule_create(&other, &wide));
    pipe_build(&m, stages, 1);
    pipe_desc(&m, s, &desc);
    RANKS_CHECK(world,
                ddp_pipeline_step(NULL) == DDP_ERR_INVALID && ddp_pipeline_evaluate(NULL) == DDP_ERR_INVALID,
                "NULL");
    RANKS_CHECK(world,
                ddp_pipeline_create(&pipeline, world, NULL) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "desc is NULL"),
                "%s", ddp_last_error());
    ddp_pipeline_destroy(NULL);
    desc.schedule = NULL;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "schedule or stages is NULL");
    desc.schedule = other;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "ranks, but the group has");
    RANKS_OK(world, wrong_stage_counts(world, &desc));
    m.stage[1].grad_division = (ddp_grad_division)7;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "stage 1: grad_division=7 is not a ddp_grad_division");
    m.stage[1].grad_division = DDP_DIVIDE_DEFAULT;
    m.stage[1].forward = NULL; /* on one rank only: the others return its error */
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "stage 1: forward is NULL");
    m.stage[1].offload_saved = 1;
    m.stage[1].recompute = 1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "stage 1: offload_saved=1 and recompute=1");
    m.stage[1].offload_saved = 1;
    m.stage[1].saved_bytes = 0;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "stage 1: offload_saved=1, but saved_bytes=0");
    m.stage[0].name = "embedding", m.stage[0].weight_grad = NULL;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID,
               "stage 0 (embedding): weight_grad is NULL, but the schedule has W");
    m.params[1][1].value.shape[0] = -4;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "params[1] (bias)");
    m.edges[0].to = 0;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "edges[0]: from=0 to=0");
    m.edges[0].tensor.dtype = DDP_DTYPE_DEFAULT;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "edges[0] (stage 0 to 1)");
    m.edges[0].to = stages;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "edges[0]: from=0 to the loss; use the last stage");
    m.edges[0].no_grad = 1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "no edge with a gradient from stage 0 to stage 1");
    desc.loss = NULL;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "loss is NULL");
    desc.edge_count--;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "loss is set, but has no edge");
    desc.edges = NULL;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "set both, with at most");
    desc.edge_count = -1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "edge_count=-1");
    desc.edges = NULL, desc.edge_count = 0;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "edges[0] (stage 0 to 1)");
    desc.tie_count = 2;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "tie_count=2");
    m.stage[0].params = NULL;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "stage 0: param_count=2");
    desc.ties = &tie, desc.tie_count = 1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "ties[0]: stage 1 has no params[2]");
    tie.second_stage = 0;
    tie.second_param = 0; /* a later parameter would be accepted */
    desc.ties = &tie, desc.tie_count = 1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID,
               "ties[0]: first_stage=0 first_param=0 second_stage=0 second_param=0; use stages 0 to ");
    tie.second_stage = stages;
    desc.ties = &tie, desc.tie_count = 1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "or as a later parameter of the same stage");
    tie.second_stage = w, tie.second_param = 1; /* stages 0 and w are on one rank */
    desc.ties = &tie, desc.tie_count = 1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "f32 [5,5]");
    tie.second_stage = stages - 1; /* on rank w - 1, and each rank compares both */
    desc.ties = &tie, desc.tie_count = 1;
    EXPECT_BAD(world, pipeline, w > 1 ? DDP_ERR_MISMATCH : DDP_ERR_INVALID, words);
    tie.second_param = 0; /* the same except for the dtype of the gradient */
    m.params[stages - 1][0].grad.dtype = DDP_F64;
    desc.ties = &tie, desc.tie_count = 1;
    EXPECT_BAD(world, pipeline, w > 1 ? DDP_ERR_MISMATCH : DDP_ERR_INVALID, "is f64 [5,5]");
    m.stage[w].saved_bytes = SIZE_MAX;
    EXPECT_BAD(world, pipeline, DDP_ERR_NO_MEMORY, "micro-batches of");
    m.params[0][0].value.shape[0] = INT64_MAX / 5;
    m.params[0][0].grad.data = NULL, m.params[0][0].grad.ndim = 0;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "params[0] (weight)");
    m.pointers[w][1] = &m.params[0][1];
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "params[1] is also params[1] of stage 0");
    desc.prefetch = -1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "prefetch=-1");
    if (w > 1) {
        if (ddp_rank(world) == 1) m.edges[0].tensor.shape[0]++;
        EXPECT_BAD(world, pipeline, DDP_ERR_MISMATCH, "ranks differ: rank 0 edges=");
    }
    RANKS_OK(world, make(world, &twice, DDP_SCHEDULE_PIPEDREAM_2BW, 2 * w, 1, 0));
    RANKS_CHECK(world, ddp_pipeline_get_stats(NULL, &stats) == DDP_ERR_INVALID, "%s", ddp_last_error());
    desc.schedule = twice;
    desc.stage_count = w;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID,
               "update is NULL, but PipeDream-2BW updates weights within a step");
    for (int i = 0; i < w; i++) m.stage[i].update = on_update, m.stage[i].recompute = 1;
    desc.schedule = twice;
    desc.stage_count = w;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "recompute=1 cannot be combined with PipeDream-2BW");
    tie.second_stage = w - 1, tie.second_param = 0;
    for (int i = 0; i < w; i++) m.stage[i].update = on_update;
    desc.stage_count = w;
    desc.schedule = twice, desc.ties = &tie, desc.tie_count = 1;
    EXPECT_BAD(world, pipeline, DDP_ERR_INVALID, "ties cannot be combined with PipeDream-2BW");
    ddp_schedule_destroy(twice);
    RANKS_CHECK(world,
                ddp_pipeline_create(&pipeline, NULL, &desc) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "group is NULL"),
                "%s", ddp_last_error());
    for (int k = 0; k < 2; k++) { /* an error of only the last rank; no rank waits for it */
        int mine = ddp_rank(world) == w - 1;
        ddp_result result = ddp_pipeline_create(mine && k ? NULL : &pipeline, world,
                                                mine && !k ? NULL : &desc);
        char words[48];
        snprintf(words, sizeof words, "rank %d: %s is NULL", w - 1, k ? "out" : "desc");
        RANKS_CHECK(world, result == DDP_ERR_INVALID && strstr(ddp_last_error(), mine ? words + 8 : words),
                    "%s", ddp_last_error());
        RANKS_CHECK(world, strstr(ddp_last_error(), "ddp_pipeline_create"), "%s", ddp_last_error());
    }
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc)); /* the group works still */
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(other);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

/* The error of a failed group names the public call, not its internal calls. */
static ddp_result failed_group(ddp_group *world) {
    pipe_model m;
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline, *other;
    ddp_group *group;
    ddp_schedule *s;
    char words[80];
    int w = ddp_world_size(world);
    RANKS_OK(world, make(world, &s, DDP_SCHEDULE_GPIPE, 2, 1, 0));
    RANKS_OK(world, ddp_group_split(world, 0, ddp_rank(world), &group));
    pipe_build(&m, w, 1);
    pipe_desc(&m, s, &desc);
    RANKS_OK(world, ddp_pipeline_create(&pipeline, group, &desc));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    if (ddp_rank(world) == w - 1) RANKS_OK(world, ddp_group_abort(group));
    RANKS_OK(world, ddp_barrier(world));
    for (int k = 0; k < 4 && w > 1; k++) {
        static const char *const names[] = {"create", "step", "get_times", "clip_grad_norm"};
        ddp_result result = k == 0   ? ddp_pipeline_create(&other, group, &desc)
                            : k == 1 ? ddp_pipeline_step(pipeline)
                            : k == 2 ? ddp_pipeline_get_times(pipeline, NULL, NULL)
                                     : ddp_pipeline_clip_grad_norm(pipeline, 1, NULL);
        snprintf(words, sizeof words, "rank %d/%d ddp_pipeline_%s group=", ddp_rank(world), w, names[k]);
        RANKS_CHECK(world,
                    result == DDP_ERR_POISONED && strncmp(ddp_last_error(), words, strlen(words)) == 0
                        && strstr(ddp_last_error(), "called ddp_group_abort"),
                    "%s: %s: %s", words, ddp_result_name(result), ddp_last_error());
    }
    ddp_pipeline_destroy(pipeline);
    ddp_group_destroy(group);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

//== a callback that fails ==========================================================================

/* Ends the step on every rank with an error that names stage, action and micro-batch. */
static ddp_result failing(ddp_group *world, void *user) {
    const pipe_fault *fault = (const pipe_fault *)user;
    pipe_model m;
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    ddp_result result, code = fault->how == 3 ? DDP_ERR_SYSTEM : DDP_ERR_CORRUPT;
    char words[80];
    int w = ddp_world_size(world);
    /* the last rank can wait only for the first one's gradient */
    ddp_pipeline_tie tie = {0, 1, w - 1, 1};
    static const char *const names[] = {"", "forward", "input gradient", "weight gradient"};
    RANKS_OK(world, make(world, &s, DDP_SCHEDULE_ZB_H1, 2 * w + 1, 1, 0));
    pipe_build(&m, w, 1);
    m.fault = *fault;
    pipe_desc(&m, s, &desc);
    desc.ties = &tie, desc.tie_count = w > 1;
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    m.steps++;
    result = ddp_pipeline_step(pipeline);
    snprintf(words, sizeof words, "stage %d, %s of micro-batch %d) failed: %s", fault->stage,
             names[fault->kind], fault->microbatch,
             fault->how == 3 ? "DDP_ERR_SYSTEM" : "the sun does not shine");
    RANKS_CHECK(world,
                result == code && strstr(ddp_last_error(), words)
                    && strstr(ddp_last_error(), "ddp_pipeline_step group="),
                "%s: %s: %s", words, ddp_result_name(result), ddp_last_error());
    RANKS_CHECK(world, ddp_pipeline_step(pipeline) != DDP_OK && strstr(ddp_last_error(), words), "%s",
                ddp_last_error());
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

static int failures_of(int world_size) {
    int failures = 0;
    for (int k = 0; k < 6; k++) {
        pipe_fault fault = {k % 2 ? 0 : world_size - 1,
                            k,
                            1,
                            k == 4,
                            k == 4 ? DDP_ACTION_FORWARD : (ddp_action_kind)(DDP_ACTION_FORWARD + k % 3),
                            k == 3 ? 3 : 1};
        /* Stage 0's last action. */
        if (k == 5) fault.microbatch = 2 * world_size, fault.kind = DDP_ACTION_WEIGHT_GRAD;
        if (fault.microbatch > 2 * world_size) fault.microbatch = 0;
        failures += ranks_run(mode, world_size, 30000 * DDP_TEST_SLOWDOWN, failing, &fault) != DDP_OK;
    }
    return failures;
}

//== memory ===========================================================================================

static int allocations;
static void *count_alloc(size_t size_bytes, void *user) {
    (void)user;
    __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
    return malloc(size_bytes);
}
static void count_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

static ddp_result steps_without_memory(ddp_group *world, void *user) {
    pipe_model m;
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    int before;
    (void)user;
    RANKS_OK(world, make(world, &s, DDP_SCHEDULE_INTERLEAVED_1F1B, 4 * ddp_world_size(world), 2, 0));
    pipe_build(&m, 2 * ddp_world_size(world), 1);
    pipe_desc(&m, s, &desc);
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    RANKS_OK(world, ddp_barrier(world));
    before = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
    RANKS_OK(world, ddp_barrier(world));
    for (int step = 0; step < 4; step++) RANKS_OK(world, ddp_pipeline_step(pipeline));
    RANKS_OK(world, ddp_barrier(world));
    RANKS_CHECK(world, __atomic_load_n(&allocations, __ATOMIC_SEQ_CST) == before,
                "%d allocations in four steps", allocations - before);
    RANKS_OK(world, ddp_barrier(world));
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

static int no_memory(int world_size) {
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = world_size;
    desc.mode = DDP_LAUNCH_THREADS;
    desc.group.alloc_fn = count_alloc;
    desc.group.free_fn = count_free;
    return ddp_launch(&desc, steps_without_memory, NULL) != DDP_OK;
}

static ddp_result all(ddp_group *world, void *user) {
    (void)user;
    RANKS_RUN(world, every_schedule(world));
    RANKS_RUN(world, own_order(world));
    RANKS_RUN(world, weight_versions(world));
    RANKS_RUN(world, ties_and_norm(world));
    RANKS_RUN(world, fails_silently(world));
    RANKS_RUN(world, ties_of_many(world));
    RANKS_RUN(world, norm_without_params(world));
    RANKS_RUN(world, updates_in_lists(world));
    RANKS_RUN(world, idle_rank(world));
    RANKS_RUN(world, times(world));
    RANKS_RUN(world, handed_over(world));
    RANKS_RUN(world, far_mask(world));
    RANKS_RUN(world, bad_input(world));
    RANKS_RUN(world, failed_group(world));
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int sizes[] = {1, 2, 3, 4, 0};
    int failures = ranks_each(argc, argv, sizes, 200, &mode, all);
    if (failures < 0) return 2;
    for (int i = 0; (argc > 2 ? i + 2 < argc : sizes[i]) && !ranks_joins(mode); i++)
        failures += failures_of(argc > 2 ? atoi(argv[i + 2]) : sizes[i]);
    if (mode == RANKS_THREADS) failures += no_memory(3);
    printf("%s\n", failures ? "FAIL" : "ok");
    return failures != 0;
}

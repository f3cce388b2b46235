/*  test_pipeline_dp.c - a mesh of pipeline stages x replicas ends with the bits of one process that adds all
    micro-batches pairwise.

    Replica r runs micro-batches [8r, 8r + 8); the runner adds them pairwise. Then a ddp_reducer or a ddp_fsdp
    of each stage adds its gradients over replicas, from the hooks of ddp_pipeline_stage. The reference holds
    the full model, adds the gradients of all micro-batches as a tree over their number, divides once and
    steps with ddp_optimizer.

    test_pipeline_dp BACKEND [W ...]: W / 2 ranks of stages, two replicas; see support/ranks.h */
#define DDP_PIPELINE_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "../support/pipeline.h"

enum { REPLICAS = 2, COUNT = 8, ALL = REPLICAS * COUNT, STEPS = 3 };
#define RATE 0.02f

/* The object that adds over replicas: a ddp_fsdp of that strategy, or a reducer. */
enum { OVER_REDUCER = DDP_FSDP_NO_SHARD + 1, OVERS };
static const char *const over_names[] = {"FULL_SHARD", "SHARD_GRAD", "SHARD_OPTIM", "NO_SHARD", "reducer"};

typedef struct plan {
    ddp_schedule_kind kind;
    int chunks, recompute, lowered, over;
    int tied;     /* the first and the last stage share their bias */
    int clipped;  /* the caller clips and steps after ddp_pipeline_step */
    int interval; /* micro-batches of an update; 0 = COUNT */
} plan;

//== one process ================================================================================

typedef struct plain {
    float weight[PIPE_STAGES][PIPE_WEIGHTS], bias[PIPE_STAGES][PIPE_SIDE];
    pipe_grads grads[ALL]; /* the first one receives the sum, divided */
    ddp_param params[2 * PIPE_STAGES];
    double losses[ALL];
    float norm;
} plain;

static ddp_result plain_create(plain *one, const pipe_model *m, ddp_group **self, ddp_optimizer **optimizer) {
    ddp_group_desc alone = DDP_ZERO;
    ddp_optimizer_desc desc = DDP_ZERO;
    memset(one, 0, sizeof *one);
    memcpy(one->weight, m->weight, sizeof m->weight);
    memcpy(one->bias, m->bias, sizeof m->bias);
    for (int i = 0; i < 2 * m->stages; i++) {
        int s = i / 2;
        one->params[i].value = one->params[i].grad = m->params[s][i % 2].value;
        one->params[i].value.data = i % 2 ? one->bias[s] : one->weight[s];
        one->params[i].grad.data = i % 2 ? one->grads[0].bias[s] : one->grads[0].weight[s];
    }
    alone.init_method = "self://", alone.name = "alone";
    RANKS_OK(NULL, ddp_group_create(self, &alone));
    desc.params = one->params, desc.param_count = 2 * m->stages;
    RANKS_OK(NULL, ddp_optimizer_create(optimizer, *self, &desc));
    return DDP_OK;
}

static void plain_norm(plain *one, const plan *plan, int stages) {
    ddp_exact_sum sum;
    ddp_exact_sum_clear(&sum);
    for (int i = 0; i < 2 * stages; i++) {
        const ddp_tensor grad = {one->params[i].grad.data, DDP_F32, 2, {PIPE_SIDE, i % 2 ? 1 : PIPE_SIDE}};
        if (!plan->tied || i + 1 < 2 * stages) ddp_device_cpu()->sum_squares(&sum, 0, &grad, 1);
    }
    one->norm = (float)sqrt(ddp_exact_sum_value(&sum));
    const ddp_tensor all = {&one->grads[0], DDP_F32, 1, {sizeof one->grads[0] / sizeof(float)}};
    ddp_device_cpu()->scale(&all, 1, one->norm / 2 / one->norm);
}

static ddp_result plain_step(plain *one, const plan *plan, int stages, ddp_optimizer *optimizer) {
    const float *weight[PIPE_STAGES], *bias[PIPE_STAGES];
    pipe_grads *g = &one->grads[0];
    for (int s = 0; s < stages; s++) weight[s] = one->weight[s], bias[s] = one->bias[s];
    for (int i = 0; i < ALL; i++) one->losses[i] = pipe_plain(stages, weight, bias, i, &one->grads[i]);
    pipe_sum(one->grads, ALL);
    for (size_t k = 0; k < sizeof *g / sizeof(float); k++) ((float *)g)[k] /= (float)ALL;
    for (int k = 0; k < PIPE_SIDE && plan->tied; k++)
        g->bias[stages - 1][k] = g->bias[0][k] += g->bias[stages - 1][k];
    if (plan->clipped) plain_norm(one, plan, stages);
    return ddp_optimizer_step(optimizer, RATE);
}

//== one rank of the mesh =========================================================================

typedef struct member {
    pipe_model m; /* first: callbacks and hooks get one pointer */
    ddp_fsdp_param split[PIPE_STAGES][2];
    ddp_reducer *reducer[PIPE_STAGES];
    ddp_optimizer *optimizer[PIPE_STAGES];
    ddp_fsdp *fsdp[PIPE_STAGES];
} member;

static ddp_result on_ready(int stage, void *user) {
    ddp_reducer *reducer = ((member *)user)->reducer[stage];
    ddp_result result = ddp_reducer_ready(reducer, 1);
    return result == DDP_OK ? ddp_reducer_ready(reducer, 0) : result;
}
static ddp_result on_wait(int stage, void *user) {
    return ddp_reducer_wait(((member *)user)->reducer[stage]);
}
static ddp_result on_optimizer(int stage, void *user) {
    return ddp_optimizer_step(((member *)user)->optimizer[stage], RATE);
}

static ddp_result on_gather(int stage, void *user) {
    return ddp_fsdp_unshard(((member *)user)->fsdp[stage], 0);
}
static ddp_result on_release(int stage, void *user) {
    return ddp_fsdp_reshard(((member *)user)->fsdp[stage], 0);
}
static ddp_result on_reduce(int stage, void *user) {
    return ddp_fsdp_reduce_grads(((member *)user)->fsdp[stage], 0);
}
static ddp_result on_final(int stage, int param, ddp_tensor *grad, void *user) {
    return ddp_fsdp_get_shard(((member *)user)->fsdp[stage], 0, param, NULL, grad, NULL);
}
static ddp_result on_step(int stage, void *user) {
    return ddp_fsdp_step(((member *)user)->fsdp[stage], RATE);
}
static ddp_result on_step_inside(int stage, void *user) { /* actions of the step follow */
    ddp_result result = on_step(stage, user);
    return result == DDP_OK ? on_gather(stage, user) : result;
}

/* The reducer places the gradients of even stages. */
static ddp_result stage_reduced(member *me, int s, ddp_group *dp, const plan *plan) {
    ddp_pipeline_stage *stage = &me->m.stage[s];
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_optimizer_desc steps = DDP_ZERO;
    desc.params = steps.params = me->m.params[s];
    desc.param_count = steps.param_count = 2;
    desc.micro_batch_count = plan->interval ? plan->interval : COUNT;
    desc.first_bucket_bytes = 64; /* a bucket for each parameter */
    desc.bucket_cap_bytes = 64;
    for (int i = 0; i < 2 && s % 2 == 0; i++) me->m.params[s][i].grad.data = NULL;
    RANKS_OK(dp, ddp_reducer_create(&me->reducer[s], dp, &desc));
    RANKS_OK(dp, ddp_optimizer_create(&me->optimizer[s], dp, &steps));
    stage->reduce_grad = on_ready;
    stage->wait_grad = on_wait;
    stage->update = plan->clipped ? NULL : on_optimizer;
    return DDP_OK;
}

/* Fills the model's own arrays with NaN from here on. */
static ddp_result stage_split(member *me, int s, ddp_group *dp, const plan *plan) {
    ddp_pipeline_stage *stage = &me->m.stage[s];
    ddp_fsdp_unit_desc unit = {"stage", me->split[s], 2};
    ddp_fsdp_desc desc = DDP_ZERO;
    for (int i = 0; i < 2; i++) {
        me->split[s][i].param = me->m.params[s][i];
        me->split[s][i].param.grad.data = NULL;
        me->m.pointers[s][i] = &me->split[s][i].param;
    }
    desc.units = &unit, desc.unit_count = 1;
    desc.strategy = (ddp_fsdp_strategy)plan->over;
    RANKS_OK(dp, ddp_fsdp_create(&me->fsdp[s], dp, &desc));
    memset(me->m.weight[s], 0xff, sizeof me->m.weight[s]);
    memset(me->m.bias[s], 0xff, sizeof me->m.bias[s]);
    stage->unshard = on_gather;
    stage->reshard = on_release;
    stage->reduce_grad = on_reduce;
    stage->update = plan->interval ? on_step_inside : on_step;
    stage->grad_division = DDP_DIVIDE_BEFORE_REDUCE;
    stage->get_sharded_grad = plan->tied ? on_final : NULL;
    return DDP_OK;
}

static ddp_result clip_and_step(ddp_group *pp, ddp_pipeline *pipeline, member *me, float want) {
    float norm;
    RANKS_OK(pp, ddp_pipeline_clip_grad_norm(pipeline, want / 2, &norm));
    RANKS_CHECK(pp, norm == want, "norm %.9g, not %.9g", (double)norm, (double)want);
    for (int s = 0; s < me->m.stages; s++)
        if (me->optimizer[s]) RANKS_OK(pp, on_optimizer(s, me));
    return DDP_OK;
}

static ddp_result steps(ddp_group *pp, ddp_pipeline *pipeline, member *me, const plan *plan, plain *one,
                        ddp_optimizer *optimizer, const char *what) {
    double mean, each[COUNT];
    for (int step = 0; step < STEPS; step++) {
        RANKS_OK(pp, plain_step(one, plan, me->m.stages, optimizer));
        if (step == 1) {
            RANKS_OK(pp, ddp_pipeline_evaluate(pipeline));
            RANKS_OK(pp, ddp_pipeline_get_loss(pipeline, &mean, each));
            RANKS_CHECK(pp, memcmp(each, one->losses + me->m.first, sizeof each) == 0, "%s: evaluated losses",
                        what);
        }
        RANKS_OK(pp, ddp_pipeline_step(pipeline));
        RANKS_CHECK(pp, !me->m.wrong, "%s step %d: %s", what, step, me->m.wrong);
        RANKS_OK(pp, ddp_pipeline_get_loss(pipeline, &mean, each));
        RANKS_CHECK(pp, memcmp(each, one->losses + me->m.first, sizeof each) == 0, "%s step %d: losses", what,
                    step);
        RANKS_CHECK(pp, mean == pipe_sum_losses(each, COUNT) / COUNT, "%s step %d: mean loss", what, step);
        if (plan->clipped) RANKS_OK(pp, clip_and_step(pp, pipeline, me, one->norm));
    }
    return DDP_OK;
}

static ddp_result same_weights(ddp_group *pp, member *me, const plain *one, const char *what) {
    for (int s = 0; s < me->m.stages; s++) {
        if (!me->fsdp[s] && !me->reducer[s]) continue;
        if (me->fsdp[s]) RANKS_OK(pp, on_gather(s, me));
        RANKS_CHECK(pp, memcmp(me->m.pointers[s][0]->value.data, one->weight[s], sizeof one->weight[s]) == 0,
                    "%s stage %d: weight", what, s);
        RANKS_CHECK(pp, memcmp(me->m.pointers[s][1]->value.data, one->bias[s], sizeof one->bias[s]) == 0,
                    "%s stage %d: bias", what, s);
        if (me->fsdp[s]) RANKS_OK(pp, on_release(s, me));
    }
    return DDP_OK;
}

/* Gradients that exist only in a part of the step: the location of their sums must be given. */
static ddp_result refuses_ties(ddp_group *pp, const ddp_pipeline_desc *desc, const ddp_pipeline_tie *tie) {
    ddp_pipeline_desc tied = *desc;
    ddp_pipeline *none;
    tied.ties = tie, tied.tie_count = 1;
    RANKS_CHECK(pp,
                ddp_pipeline_create(&none, pp, &tied) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "exists only while unsharded; set get_sharded_grad"),
                "%s", ddp_last_error());
    return DDP_OK;
}

/* The pipeline does not clip them either. */
static ddp_result refuses_to_clip(ddp_group *pp, ddp_pipeline *pipeline) {
    RANKS_CHECK(pp,
                ddp_pipeline_clip_grad_norm(pipeline, 1, NULL) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "exist only while unsharded"),
                "%s", ddp_last_error());
    return DDP_OK;
}

static void destroy_stages(member *me) {
    for (int s = 0; s < me->m.stages; s++) {
        ddp_optimizer_destroy(me->optimizer[s]);
        ddp_reducer_destroy(me->reducer[s]);
        ddp_fsdp_destroy(me->fsdp[s]);
    }
}

static ddp_result run_plan(ddp_group *pp, ddp_group *dp, const plan *plan, member *me, plain *one) {
    ddp_schedule_desc shape = DDP_ZERO;
    ddp_pipeline_tie tie = {0, 1, 0, 1};
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_optimizer *optimizer;
    ddp_schedule *schedule, *lowered = NULL;
    ddp_group *self;
    char what[96];
    shape.kind = plan->kind, shape.chunk_count = plan->chunks;
    shape.rank_count = ddp_world_size(pp), shape.microbatch_count = COUNT;
    RANKS_OK(pp, ddp_schedule_create(&schedule, &shape));
    if (plan->lowered) RANKS_OK(pp, ddp_schedule_lower(&lowered, schedule, 0));
    memset(me, 0, sizeof *me);
    pipe_build(&me->m, ddp_schedule_stage_count(schedule), 1);
    me->m.first = COUNT * ddp_rank(dp);
    if (plan->tied) memcpy(me->m.bias[me->m.stages - 1], me->m.bias[0], sizeof me->m.bias[0]);
    RANKS_OK(pp, plain_create(one, &me->m, &self, &optimizer));
    for (int s = 0; s < me->m.stages; s++) {
        me->m.stage[s].recompute = plan->recompute;
        if (ddp_schedule_stage_rank(schedule, s) != ddp_rank(pp)) continue;
        RANKS_OK(pp,
                 plan->over == OVER_REDUCER ? stage_reduced(me, s, dp, plan) : stage_split(me, s, dp, plan));
    }
    snprintf(what, sizeof what, "%s%s over %s%s%s%s", ddp_schedule_kind_name(plan->kind),
             lowered ? " lowered" : "", over_names[plan->over], plan->recompute ? " recomputed" : "",
             plan->tied ? " tied" : "", plan->clipped ? " clipped" : "");
    pipe_desc(&me->m, lowered ? lowered : schedule, &desc);
    tie.second_stage = me->m.stages - 1;
    desc.ties = &tie, desc.tie_count = plan->tied;
    if (plan->over == DDP_FSDP_FULL_SHARD && !plan->tied) RANKS_OK(pp, refuses_ties(pp, &desc, &tie));
    RANKS_OK(pp, ddp_pipeline_create(&pipeline, pp, &desc));
    RANKS_OK(pp, steps(pp, pipeline, me, plan, one, optimizer, what));
    RANKS_OK(pp, same_weights(pp, me, one, what));
    RANKS_CHECK(pp, (me->m.recomputed > 0) == plan->recompute, "%s: %d forwards ran again", what,
                me->m.recomputed);
    if (plan->over == DDP_FSDP_FULL_SHARD) RANKS_OK(pp, refuses_to_clip(pp, pipeline));
    ddp_pipeline_destroy(pipeline);
    destroy_stages(me);
    ddp_optimizer_destroy(optimizer);
    ddp_group_destroy(self);
    ddp_schedule_destroy(lowered);
    ddp_schedule_destroy(schedule);
    return DDP_OK;
}

/* Weights that change inside a step: with either object the bits are those with a reducer, whose stages are
   full. */
static ddp_result delayed_weights(ddp_group *pp, ddp_group *dp, ddp_schedule_kind kind, member *me) {
    float weight[PIPE_WEIGHTS], bias[PIPE_SIDE];
    int s = ddp_rank(pp); /* one stage on each rank */
    for (int over = OVER_REDUCER; over >= 0; over--) {
        plan plan = {kind, 1, 0, over % 2, over, 0, 0, COUNT / 4};
        ddp_schedule_desc shape = DDP_ZERO;
        ddp_pipeline_desc desc;
        ddp_pipeline *pipeline;
        ddp_schedule *schedule, *lowered;
        shape.kind = kind, shape.update_interval = plan.interval;
        shape.rank_count = ddp_world_size(pp), shape.microbatch_count = COUNT;
        RANKS_OK(pp, ddp_schedule_create(&schedule, &shape));
        RANKS_OK(pp, ddp_schedule_lower(&lowered, schedule, 0));
        memset(me, 0, sizeof *me);
        pipe_build(&me->m, shape.rank_count, 1);
        me->m.first = COUNT * ddp_rank(dp);
        RANKS_OK(pp, over == OVER_REDUCER ? stage_reduced(me, s, dp, &plan) : stage_split(me, s, dp, &plan));
        pipe_desc(&me->m, plan.lowered ? lowered : schedule, &desc);
        for (int other = 0; other < shape.rank_count; other++)
            me->m.stage[other].update = me->m.stage[s].update;
        RANKS_OK(pp, ddp_pipeline_create(&pipeline, pp, &desc));
        for (int step = 0; step < STEPS; step++) RANKS_OK(pp, ddp_pipeline_step(pipeline));
        RANKS_CHECK(pp, !me->m.wrong, "%s over %s: %s", ddp_schedule_kind_name(kind), over_names[over],
                    me->m.wrong);
        if (me->fsdp[s]) RANKS_OK(pp, on_gather(s, me));
        if (over == OVER_REDUCER) {
            RANKS_CHECK(pp,
                        memcmp(me->m.pointers[s][0]->value.data, me->m.weight[s], sizeof weight) == 0
                            && me->m.weight[s][0] == me->m.weight[s][0],
                        "weights");
            memcpy(weight, me->m.weight[s], sizeof weight);
            memcpy(bias, me->m.bias[s], sizeof bias);
        }
        RANKS_CHECK(pp,
                    memcmp(me->m.pointers[s][0]->value.data, weight, sizeof weight) == 0
                        && memcmp(me->m.pointers[s][1]->value.data, bias, sizeof bias) == 0,
                    "%s over %s: weights", ddp_schedule_kind_name(kind), over_names[over]);
        ddp_pipeline_destroy(pipeline);
        destroy_stages(me);
        ddp_schedule_destroy(lowered);
        ddp_schedule_destroy(schedule);
    }
    return DDP_OK;
}

static ddp_result test(ddp_group *world, void *user) {
    static const struct {
        ddp_schedule_kind kind;
        int chunks;
    } kinds[] = {
        {DDP_SCHEDULE_1F1B, 1},
        {DDP_SCHEDULE_INTERLEAVED_1F1B, 2},
        {DDP_SCHEDULE_ZB_H1, 1},
        {DDP_SCHEDULE_GPIPE, 1},
    };
    ddp_mesh_desc grid = DDP_ZERO;
    ddp_mesh *mesh;
    member *me = (member *)malloc(sizeof *me);
    plain *one = (plain *)malloc(sizeof *one);
    (void)user;
    RANKS_CHECK(world, me && one && ddp_world_size(world) % REPLICAS == 0,
                "memory, or an odd number of ranks");
    grid.ndim = 2, grid.shape[1] = REPLICAS, grid.names[0] = "pp", grid.names[1] = "dp";
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &grid));
    for (int k = 0; k < (int)(sizeof kinds / sizeof kinds[0]); k++)
        for (int i = 0; i < 2 * OVERS; i++) {
            plan plan = {kinds[k].kind, kinds[k].chunks, i % 2, (k + i / 2) % 2, i / 2, 0, 0, 0};
            plan.tied = plan.lowered;
            plan.clipped = plan.over == OVER_REDUCER && plan.recompute;
            RANKS_RUN(world,
                      run_plan(ddp_mesh_group(mesh, "pp"), ddp_mesh_group(mesh, "dp"), &plan, me, one));
        }
    RANKS_RUN(world, delayed_weights(ddp_mesh_group(mesh, "pp"), ddp_mesh_group(mesh, "dp"),
                                     DDP_SCHEDULE_PIPEDREAM, me));
    RANKS_RUN(world, delayed_weights(ddp_mesh_group(mesh, "pp"), ddp_mesh_group(mesh, "dp"),
                                     DDP_SCHEDULE_PIPEDREAM_2BW, me));
    ddp_mesh_destroy(mesh);
    free(one);
    free(me);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {4, 0};
    ranks_mode mode;
    return ranks_each(argc, argv, defaults, 100, &mode, test) != 0;
}

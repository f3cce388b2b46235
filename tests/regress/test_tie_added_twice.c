/*  test_tie_added_twice.c - a tie of two uses that a ddp_reducer or ddp_fsdp adds itself is an error.

    Stage 1 has one parameter with two uses; their gradients are 1 and 10. A reducer with both of them leaves
    11 in the first one. ddp_pipeline_create accepted a tie of the two as well, and after a step both
    gradients were 21. A ddp_fsdp with both uses adds them in its step, which then took 22. */
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#include "../support/ranks.h"

enum { COUNT = 4, USES = 3 };

/* Stage 1 is on rank 1. Uses 0 and 1 have one value, use 2 has another. */
typedef struct member {
    float value[2][COUNT], grad[USES][COUNT];
    ddp_param params[USES];
    ddp_fsdp_param fsdp_params[USES];
    ddp_param *pointers[USES];
    ddp_reducer *reducer;
    ddp_fsdp *fsdp;
    ddp_pipeline_stage stage[2];
    ddp_schedule *schedule;
} member;

static ddp_result forward(const ddp_pipeline_call *call, void *user) {
    (void)user;
    if (call->loss) *call->loss = 0;
    return DDP_OK;
}

static ddp_result backward(const ddp_pipeline_call *call, void *user) {
    static const float grads[USES] = {1, 10, 100};
    member *me = (member *)user;
    for (int i = 0; i < USES && call->stage; i++)
        for (int k = 0; k < COUNT; k++) ((float *)me->pointers[i]->grad.data)[k] = grads[i];
    return DDP_OK;
}

static ddp_result on_reduce(int stage, void *user) {
    member *me = (member *)user;
    for (int i = USES - 1; i >= 0 && stage; i--) DDP_TRY(ddp_reducer_ready(me->reducer, i));
    return DDP_OK;
}

static ddp_result on_wait(int stage, void *user) {
    return stage ? ddp_reducer_wait(((member *)user)->reducer) : DDP_OK;
}

static void build(member *me) {
    memset(me->params, 0, sizeof me->params);
    memset(me->fsdp_params, 0, sizeof me->fsdp_params);
    memset(me->stage, 0, sizeof me->stage);
    for (int i = 0; i < USES; i++) {
        static const char *const names[USES] = {"embedding", "head", "bias"};
        ddp_param *param = &me->params[i];
        param->name = names[i];
        param->value.data = me->value[i == 2];
        param->value.dtype = DDP_F32;
        param->value.ndim = 1;
        param->value.shape[0] = COUNT;
        param->grad.data = me->grad[i];
        me->pointers[i] = param;
    }
    for (int s = 0; s < 2; s++) {
        me->stage[s].forward = forward;
        me->stage[s].backward = backward;
        me->stage[s].user = me;
    }
    me->stage[1].params = me->pointers;
    me->stage[1].param_count = USES;
}

static ddp_result create(ddp_pipeline **out, ddp_group *world, const member *me, const ddp_pipeline_tie *ties,
                         int tie_count) {
    ddp_pipeline_desc desc = DDP_ZERO;
    desc.schedule = me->schedule;
    desc.stages = me->stage;
    desc.stage_count = 2;
    desc.boundary.dtype = DDP_F32;
    desc.ties = ties;
    desc.tie_count = tie_count;
    return ddp_pipeline_create(out, world, &desc);
}

/* All ranks return the error of rank 1. */
static ddp_result refused(ddp_group *world, const member *me, const ddp_pipeline_tie *ties, int tie_count,
                          const char *words) {
    ddp_pipeline *pipeline;
    ddp_result result = create(&pipeline, world, me, ties, tie_count);
    RANKS_CHECK(world, result == DDP_ERR_INVALID && !pipeline && strstr(ddp_last_error(), words), "%s: %s",
                ddp_result_name(result), ddp_last_error());
    return DDP_OK;
}

static ddp_result one_step(ddp_group *world, member *me, const ddp_pipeline_tie *ties, int tie_count,
                           const float *want) {
    ddp_pipeline *pipeline;
    RANKS_OK(world, create(&pipeline, world, me, ties, tie_count));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    for (int i = 0; i < USES && ddp_rank(world) == 1; i++)
        RANKS_CHECK(world, me->grad[i][0] == want[i], "gradient %d is %g, not %g", i, (double)me->grad[i][0],
                    (double)want[i]);
    ddp_pipeline_destroy(pipeline);
    return DDP_OK;
}

static ddp_result over_reducer(ddp_group *world, ddp_group *self, member *me) {
    static const ddp_pipeline_tie ties[] = {{1, 0, 1, 1}, {1, 0, 1, 2}}, of_last[] = {{1, 0, 1, 2}};
    static const ddp_pipeline_tie through_first[] = {{1, 0, 1, 2}, {1, 0, 1, 1}};
    static const float reduced[] = {11, 10, 100}, tied[] = {11, 11, 100}, last[] = {111, 10, 111};
    static const char words[] = "ties[0]: params[0] of stage 1 and params[1] of stage 1 are uses of one";
    ddp_reducer_desc desc = DDP_ZERO;
    build(me);
    desc.params = me->params;
    desc.param_count = USES;
    RANKS_OK(world, ddp_reducer_create(&me->reducer, self, &desc));
    me->stage[1].reduce_grad = on_reduce;
    me->stage[1].wait_grad = on_wait;
    RANKS_OK(world, refused(world, me, ties, 1, words));
    RANKS_OK(world, refused(world, me, through_first, 2, "ties[1]: params[0] of stage 1 and params[1]"));
    RANKS_OK(world, one_step(world, me, NULL, 0, reduced));
    RANKS_OK(world, one_step(world, me, of_last, 1, last)); /* of two values */
    /* without the reducer the pipeline adds them */
    ddp_reducer_destroy(me->reducer);
    me->stage[1].reduce_grad = me->stage[1].wait_grad = NULL;
    return one_step(world, me, ties, 1, tied);
}

/* Both uses are second uses of ties to a parameter on another rank. */
static ddp_result both_second(ddp_group *world, ddp_group *self, member *me) {
    static const ddp_pipeline_tie ties[] = {{0, 0, 1, 0}, {0, 0, 1, 1}};
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_param *first = &me->params[2];
    build(me);
    me->stage[0].params = &first;
    me->stage[0].param_count = 1;
    me->stage[1].param_count = 2;
    desc.params = me->params;
    desc.param_count = 2;
    RANKS_OK(world, ddp_reducer_create(&me->reducer, self, &desc));
    RANKS_OK(world,
             refused(world, me, ties, 2, "ties[1]: params[0] of stage 1 and params[1] of stage 1 are uses"));
    ddp_reducer_destroy(me->reducer);
    return DDP_OK;
}

static ddp_result over_fsdp(ddp_group *world, ddp_group *self, member *me) {
    static const ddp_pipeline_tie ties[] = {{1, 0, 1, 1}};
    ddp_fsdp_unit_desc unit = DDP_ZERO;
    ddp_fsdp_desc desc = DDP_ZERO;
    build(me);
    for (int i = 0; i < USES; i++) {
        me->fsdp_params[i].param = me->params[i];
        me->fsdp_params[i].param.grad.data = NULL;
        me->pointers[i] = &me->fsdp_params[i].param;
    }
    unit.params = me->fsdp_params;
    unit.param_count = USES;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.strategy = DDP_FSDP_NO_SHARD;
    RANKS_OK(world, ddp_fsdp_create(&me->fsdp, self, &desc));
    RANKS_OK(world, refused(world, me, ties, 1, "are uses of one parameter in a ddp_reducer or ddp_fsdp"));
    ddp_fsdp_destroy(me->fsdp);
    RANKS_CHECK(world, !me->pointers[0]->first_use, "the ddp_fsdp is left");
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    ddp_schedule_desc shape = DDP_ZERO;
    ddp_group *self;
    member me;
    (void)user;
    shape.rank_count = 2;
    shape.microbatch_count = 1;
    RANKS_OK(world, ddp_schedule_create(&me.schedule, &shape));
    RANKS_OK(world, ddp_group_split(world, ddp_rank(world), 0, &self));
    RANKS_RUN(world, over_reducer(world, self, &me));
    RANKS_RUN(world, both_second(world, self, &me));
    RANKS_RUN(world, over_fsdp(world, self, &me));
    ddp_group_destroy(self);
    ddp_schedule_destroy(me.schedule);
    return DDP_OK;
}

int main(void) {
    watchdog_start(50);
    return ranks_run(RANKS_THREADS, 2, 30000 * DDP_TEST_SLOWDOWN, rank_main, NULL) != DDP_OK;
}

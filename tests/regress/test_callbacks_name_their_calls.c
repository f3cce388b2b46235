/*  test_callbacks_name_their_calls.c - an error line of a call that a user's callback makes names that call.

    A ddp_reduce with an invalid op inside desc.step_fn reported "ddp_join_step group=world: op=99 is not a
    ddp_op": of the callbacks, only bucket hooks and the callbacks of pipeline stages named the call inside.

    test_callbacks_name_their_calls */
#include "../support/pipeline.h"
#include "ddp_fsdp.h"
#include "ddp_tensor.h"

enum {
    STEP,
    LOG,
    INIT,
    HOOK,
    UNSHARD,
    RESHARD,
    REDUCE,
    WAIT,
    UPDATE,
    SHARDED,
    FORWARD,
    GEMM,
    FETCH,
    CALLBACKS
};
static const char *const names[CALLBACKS] = {
    "step_fn",   "log_fn", "init_fn",          "bucket hook", "unshard", "reshard", "reduce_grad",
    "wait_grad", "update", "get_sharded_grad", "forward",     "gemm",    "fetch"};

/* Ranks are threads. By callback: wrong: a line that names another call; seen: the callback was called. */
static char wrong[CALLBACKS][300], folder[64];
static int seen[CALLBACKS];

static ddp_result probe(int callback) {
    ddp_result result = ddp_reduce(NULL, NULL, NULL, 1, DDP_F32, (ddp_op)99, 0, NULL);
    if (result != DDP_ERR_INVALID || strncmp(ddp_last_error(), "ddp_reduce: ", 12) != 0)
        snprintf(wrong[callback], sizeof wrong[callback], "%s", ddp_last_error());
    __atomic_store_n(&seen[callback], 1, __ATOMIC_RELAXED);
    return DDP_OK;
}

static ddp_result on_step(void *user) { return (void)user, probe(STEP); }
static void on_log(const char *text, void *user) { (void)text, (void)user, probe(LOG); }

static ddp_result on_init(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                          void *user) {
    (void)param, (void)first_row, (void)user;
    for (int64_t i = 0; i < row_count; i++) ((float *)out)[i] = 1;
    return probe(INIT);
}

static ddp_result on_bucket(ddp_group *group, ddp_bucket *bucket, void *user) {
    (void)user;
    (void)probe(HOOK);
    return ddp_all_reduce(group, bucket->data, bucket->data, bucket->count, bucket->dtype, DDP_OP_SUM, NULL);
}

/* The second parameter is not sharded: *grad stays. */
static ddp_result on_sharded(int stage, int param, ddp_tensor *grad, void *user) {
    (void)stage, (void)param, (void)grad, (void)user;
    return probe(SHARDED);
}

#define ON_STAGE(name, callback)                    \
    static ddp_result name(int stage, void *user) { \
        (void)stage, (void)user;                    \
        return probe(callback);                     \
    }
ON_STAGE(on_unshard, UNSHARD)
ON_STAGE(on_reshard, RESHARD)
ON_STAGE(on_reduce, REDUCE)
ON_STAGE(on_wait, WAIT)
ON_STAGE(on_update, UPDATE)

static ddp_result on_forward(const ddp_pipeline_call *call, void *user) {
    (void)probe(FORWARD);
    return pipe_on_forward(call, user);
}

static ddp_result on_gemm(const ddp_gemm *gemm, void *user) {
    (void)probe(GEMM);
    return ddp_gemm_builtin(gemm, user);
}

static ddp_result on_fetch(void *user, int64_t index, void *const *fields) {
    (void)user, (void)index;
    memset(fields[0], 0, sizeof(float));
    return probe(FETCH);
}

/* Rank 1 has no batch in the second step. */
static ddp_result reducers(ddp_group *world) {
    float value[4] = {0}, grad[4] = {0};
    ddp_param param = DDP_ZERO;
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_join_desc join_desc = DDP_ZERO;
    ddp_join *join;
    int active = 1;
    param.name = "w";
    param.value.data = value;
    param.value.dtype = DDP_F32;
    param.value.ndim = 1;
    param.value.shape[0] = 4;
    param.grad = param.value;
    param.grad.data = grad;
    desc.params = &param;
    desc.param_count = 1;
    desc.hook = on_bucket;
    RANKS_OK(world, ddp_reducer_create(&join_desc.reducer, world, &desc));
    join_desc.step_fn = on_step;
    RANKS_OK(world, ddp_join_create(&join, world, &join_desc));
    for (int step = 0; active; step++) {
        RANKS_OK(world, ddp_join_step(join, step + ddp_rank(world) < 2, &active));
        if (!active) break;
        RANKS_OK(world, ddp_reducer_ready(join_desc.reducer, 0));
        RANKS_OK(world, ddp_reducer_wait(join_desc.reducer));
    }
    ddp_join_destroy(join);
    ddp_reducer_destroy(join_desc.reducer);
    return DDP_OK;
}

/* A load of a model of another program sends a notice to log_fn. */
static ddp_result sharding(ddp_group *world) {
    ddp_fsdp_param param = DDP_ZERO;
    ddp_fsdp_unit_desc unit = DDP_ZERO;
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp;
    char dir[80], command[200];
    param.param.name = "w";
    param.param.value.dtype = DDP_F32;
    param.param.value.ndim = 1;
    param.param.value.shape[0] = 8;
    unit.name = "layer";
    unit.params = &param;
    unit.param_count = 1;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.init_fn = on_init;
    RANKS_OK(world, ddp_fsdp_create(&fsdp, world, &desc));
    snprintf(dir, sizeof dir, "%s/saved", folder);
    snprintf(command, sizeof command, "rm %s/state.json %s/optimizer*", dir, dir);
    RANKS_OK(world, ddp_fsdp_save(fsdp, dir));
    if (ddp_rank(world) == 0) RANKS_CHECK(world, system(command) == 0, "%s", command);
    RANKS_OK(world, ddp_barrier(world));
    RANKS_OK(world, ddp_fsdp_load(fsdp, dir));
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

static ddp_result stages(ddp_group *world) {
    ddp_schedule_desc schedule_desc = DDP_ZERO;
    ddp_pipeline_tie tie = {0, 1, 1, 1};
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *schedule;
    pipe_model *m = (pipe_model *)malloc(sizeof *m);
    RANKS_CHECK(world, m, "memory");
    schedule_desc.kind = DDP_SCHEDULE_1F1B;
    schedule_desc.rank_count = 2;
    schedule_desc.microbatch_count = 3;
    RANKS_OK(world, ddp_schedule_create(&schedule, &schedule_desc));
    pipe_build(m, 2, 1);
    for (int s = 0; s < 2; s++) {
        m->stage[s].forward = on_forward;
        m->stage[s].unshard = on_unshard;
        m->stage[s].reshard = on_reshard;
        m->stage[s].reduce_grad = on_reduce;
        m->stage[s].wait_grad = on_wait;
        m->stage[s].update = on_update;
        m->stage[s].get_sharded_grad = on_sharded;
    }
    pipe_desc(m, schedule, &desc);
    desc.ties = &tie;
    desc.tie_count = 1;
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &desc));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(schedule);
    free(m);
    return DDP_OK;
}

static ddp_result layers(ddp_group *world) {
    float x[8] = {0}, weight[64] = {0}, bias[8] = {0}, y[8];
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp_linear_desc linear_desc = DDP_ZERO;
    ddp_tp *tp;
    ddp_tp_linear *linear;
    desc.max_rows = 1;
    desc.gemm = on_gemm;
    RANKS_OK(world, ddp_tp_create(&tp, world, &desc));
    linear_desc.split = DDP_TP_COLUMN;
    linear_desc.in_features = linear_desc.out_features = 8;
    RANKS_OK(world, ddp_tp_linear_create(&linear, tp, &linear_desc));
    RANKS_OK(world, ddp_tp_linear_forward(linear, weight, bias, x, 1, y));
    ddp_tp_linear_destroy(linear);
    ddp_tp_destroy(tp);
    return DDP_OK;
}

static ddp_result batches(ddp_group *world) {
    ddp_tensor field = DDP_ZERO;
    ddp_loader_desc desc = DDP_ZERO;
    ddp_loader *loader;
    ddp_batch batch;
    field.dtype = DDP_F32;
    desc.sampler.dataset_size = 4;
    desc.batch_size = 2;
    desc.fields = &field;
    desc.field_count = 1;
    desc.fetch = on_fetch;
    desc.worker_count = -1;
    RANKS_OK(world, ddp_loader_create(&loader, &desc));
    RANKS_OK(world, ddp_loader_next(loader, &batch));
    ddp_loader_destroy(loader);
    return DDP_OK;
}

static ddp_result all(ddp_group *world, void *user) {
    (void)user;
    RANKS_OK(world, reducers(world));
    RANKS_OK(world, sharding(world));
    RANKS_OK(world, stages(world));
    RANKS_OK(world, layers(world));
    return batches(world);
}

int main(void) {
    ddp_launch_desc desc = DDP_ZERO;
    char command[128];
    int failed = 0;
    watchdog_start(60);
    snprintf(folder, sizeof folder, "/tmp/ddp-callbacks-XXXXXX");
    if (!mkdtemp(folder)) return 2;
    desc.world_size = 2;
    desc.mode = DDP_LAUNCH_THREADS;
    desc.group.timeout_ms = 20000;
    desc.group.log_fn = on_log;
    if (ddp_launch(&desc, all, NULL) != DDP_OK) {
        fprintf(stderr, "%s\n", ddp_last_error());
        failed = 1;
    }
    for (int i = 0; i < CALLBACKS; i++) {
        if (seen[i] && !wrong[i][0]) continue;
        fprintf(stderr, "%s: %s\n", names[i], seen[i] ? wrong[i] : "was not called");
        failed = 1;
    }
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) != 0 || failed;
}

/*  test_half_gradients.c - 16-bit gradients are added in f32: every strategy on 1, 2 and 4 ranks ends with
    the same bits.

    The reference adds the f32 values of all micro-batches' 16-bit gradients as the tree over their global
    index and divides once. ddp_fsdp must store exactly these f32 averages in its shards, and after a step
    every rank must gather the same values as one rank. ddp_reducer with a ddp_accumulator, and ddp_pipeline,
    keep gradients in 16 bits: they must store the averages rounded once. Replicas of a pipeline, whose
    gradients a reducer or fsdp reduces, must end the same way. One sum that is rounded to 16 bits before the
    end changes about half of the elements. */
#define DDP_PIPELINE_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#include "../support/ranks.h"
#include "../support/relay.h"

enum { PARAMS = 5, MOST = 9000, MICRO_MOST = 8, UNITS = 2 };

/* Rows that 4 ranks do not divide, one long tensor (longer than a block of the accumulator), one of fewer
   rows than ranks. */
static const struct shape {
    const char *name;
    int unit, rows, columns;
} shapes[PARAMS] = {
    {"a", 0, 13, 5}, {"b", 0, 9000, 1}, {"c", 0, 1, 7}, {"d", 1, 3, 40}, {"e", 1, 10, 1},
};

typedef enum adder { BY_FSDP, BY_REDUCER, BY_PIPELINE } adder_kind;

typedef struct plan {
    adder_kind adder;
    ddp_dtype dtype;
    ddp_fsdp_strategy strategy;
    int micro_batches; /* per rank */
    int replicas;      /* fsdp, pipeline: 2 = the ranks are two copies of half as many */
    adder_kind over;   /* pipeline: reduces the gradients of replicas */
    int packed;        /* fsdp: ranks do not see each other's memory */
    int scattered;     /* reducer: gradients are allocated by the caller, not adjacent */
    int hook;          /* reducer: buckets go through a hook */
} plan;

static float (*average)[MOST]; /* the expected gradients of each parameter */
static float (*stepped)[MOST]; /* values after a step; filled in by one rank */

static int elements(int param) { return shapes[param].rows * shapes[param].columns; }

/* A 16-bit number, as f32. Micro-batches differ in magnitude, so that the order and the width of additions
   show. */
static float gradient(ddp_dtype dtype, int param, int i, int micro_batch) {
    uint64_t seed = (uint64_t)((micro_batch * PARAMS + param) * MOST + i);
    float x = (float)((double)(int64_t)ranks_mix(seed) / 9223372036854775808.0);
    float out;
    uint16_t bits;
    x *= 1.0f + 0.37f * (float)(micro_batch % 3);
    ddp_device_cpu()->cast(&bits, dtype, &x, DDP_F32, 1);
    ddp_device_cpu()->cast(&out, DDP_F32, &bits, dtype, 1);
    return out;
}

static float tree(ddp_dtype dtype, int param, int i, int first, int count) {
    int left = 1;
    if (count == 1) return gradient(dtype, param, i, first);
    while (left * 2 < count) left *= 2;
    return tree(dtype, param, i, first, left) + tree(dtype, param, i, first + left, count - left);
}

static void write_gradient(void *out, ddp_dtype dtype, int param, int micro_batch) {
    for (int i = 0; i < elements(param); i++) {
        float x = gradient(dtype, param, i, micro_batch);
        ddp_device_cpu()->cast((char *)out + 2 * (size_t)i, dtype, &x, DDP_F32, 1);
    }
}

static void tensor_of(ddp_tensor *tensor, int param, void *data, ddp_dtype dtype) {
    memset(tensor, 0, sizeof *tensor);
    tensor->data = data;
    tensor->dtype = dtype;
    tensor->ndim = 2;
    tensor->shape[0] = shapes[param].rows;
    tensor->shape[1] = shapes[param].columns;
}

/* Counts the 16-bit gradients that differ from the average, rounded once. */
static int wrong_halves(const void *grad, ddp_dtype dtype, int param) {
    int wrong = 0;
    for (int i = 0; i < elements(param); i++) {
        uint16_t want;
        ddp_device_cpu()->cast(&want, dtype, &average[param][i], DDP_F32, 1);
        wrong += memcmp((const char *)grad + 2 * (size_t)i, &want, 2) != 0;
    }
    return wrong;
}

//== ddp_fsdp =================================================================================

/* The averages are in the shards. one_unit: it has all parameters. Then a step. */
static ddp_result check_and_step(ddp_group *group, ddp_fsdp *fsdp, const plan *p, int one_unit) {
    int next[UNITS] = {0};
    float norm;
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 3.0e38f, &norm));
    for (int k = 0; k < PARAMS; k++) {
        ddp_tensor grad;
        int64_t first;
        int wrong = 0, unit = one_unit ? 0 : shapes[k].unit;
        RANKS_OK(group, ddp_fsdp_get_shard(fsdp, unit, next[unit]++, NULL, &grad, &first));
        RANKS_CHECK(group, grad.dtype == DDP_F32, "%s: gradients are %s", shapes[k].name,
                    ddp_dtype_name(grad.dtype));
        for (int64_t i = 0; grad.data && i < ddp_tensor_count(&grad); i++)
            wrong += memcmp((const float *)grad.data + i, &average[k][first * shapes[k].columns + i],
                            sizeof(float))
                     != 0;
        RANKS_CHECK(group, wrong == 0, "strategy %d, %s: %d of %lld gradients have other bits",
                    (int)p->strategy, shapes[k].name, wrong, (long long)ddp_tensor_count(&grad));
    }
    return ddp_fsdp_step(fsdp, 0.01f);
}

static ddp_result micro_batch_of_fsdp(ddp_group *group, ddp_fsdp *fsdp, const plan *p,
                                      ddp_fsdp_param (*params)[PARAMS], int number) {
    int next[UNITS] = {0};
    for (int u = 0; u < UNITS; u++) RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
    for (int k = 0; k < PARAMS; k++) {
        int unit = shapes[k].unit;
        write_gradient(params[unit][next[unit]++].param.grad.data, p->dtype, k, number);
    }
    for (int u = UNITS - 1; u >= 0; u--) {
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    }
    return DDP_OK;
}

/* After the step: one rank stores its gathered values, the others compare. */
static ddp_result check_values(ddp_group *group, ddp_fsdp *fsdp, ddp_fsdp_param (*params)[PARAMS],
                               int first) {
    int next[UNITS] = {0};
    for (int u = 0; u < UNITS; u++) RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
    for (int k = 0; k < PARAMS; k++) {
        const ddp_tensor *value = &params[shapes[k].unit][next[shapes[k].unit]++].param.value;
        size_t bytes = (size_t)elements(k) * ddp_dtype_size(value->dtype);
        if (first) memcpy(stepped[k], value->data, bytes);
        RANKS_CHECK(group, memcmp(stepped[k], value->data, bytes) == 0,
                    "%s: values after a step differ from those of one rank", shapes[k].name);
    }
    for (int u = 0; u < UNITS; u++) RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    return DDP_OK;
}

static ddp_result by_fsdp(ddp_group *group, const plan *p) {
    ddp_fsdp_param params[UNITS][PARAMS];
    ddp_fsdp_unit_desc units[UNITS] = {{"first", NULL, 0}, {"second", NULL, 0}};
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp;
    ddp_group *part = group, *below = NULL, *copies = NULL;
    int rank = ddp_rank(group), world = ddp_world_size(group), inner = world / p->replicas;
    int each = p->strategy == DDP_FSDP_FULL_SHARD || p->strategy == DDP_FSDP_SHARD_GRAD;
    float *start = (float *)calloc(MOST, sizeof *start);
    memset(params, 0, sizeof params);
    if (p->replicas > 1) {
        RANKS_OK(group, ddp_group_split(group, rank / inner, rank, &part));
        RANKS_OK(group, ddp_group_split(group, rank % inner, rank, &copies));
    }
    if (p->packed) {
        below = part;
        RANKS_OK(group, relay_over(&part, below));
    }
    for (int i = 0; i < MOST; i++) start[i] = (float)(i % 17) * 0.125f;
    for (int k = 0; k < PARAMS; k++) {
        ddp_fsdp_unit_desc *unit = &units[shapes[k].unit];
        unit->params = params[shapes[k].unit];
        ddp_fsdp_param *param = &params[shapes[k].unit][unit->param_count++];
        float *value = (float *)malloc(sizeof(float) * (size_t)elements(k));
        memcpy(value, start, sizeof(float) * (size_t)elements(k));
        param->param.name = shapes[k].name;
        tensor_of(&param->param.value, k, value, DDP_F32);
    }
    free(start);
    desc.units = units;
    desc.unit_count = UNITS;
    desc.strategy = p->strategy;
    desc.replicas = copies;
    desc.param_dtype = p->dtype;
    desc.micro_batch_count = p->micro_batches;
    desc.overwrite_gradients = 1;
    void *values[PARAMS];
    int at = 0;
    for (int u = 0; u < UNITS; u++)
        for (int k = 0; k < units[u].param_count; k++) values[at++] = params[u][k].param.value.data;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &desc));
    for (int k = 0; k < PARAMS; k++) free(values[k]);
    for (int step = 0; step < 2; step++) {
        for (int b = 0; b < p->micro_batches; b++)
            RANKS_OK(group, micro_batch_of_fsdp(group, fsdp, p, params,
                                                each ? b * world + rank : rank * p->micro_batches + b));
        RANKS_OK(group, check_and_step(group, fsdp, p, 0));
    }
    RANKS_OK(group, check_values(group, fsdp, params, world == 1 && p->strategy == DDP_FSDP_FULL_SHARD));
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    if (below) ddp_group_destroy(part);
    if (p->replicas > 1) ddp_group_destroy(below ? below : part);
    ddp_group_destroy(copies);
    return DDP_OK;
}

//== ddp_reducer and ddp_accumulator ==========================================================

/* *user: its duration in milliseconds */
static ddp_result average_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    if (user) usleep(1000 * *(const useconds_t *)user);
    const ddp_tensor all = {bucket->data, bucket->dtype, 1, {(int64_t)bucket->count}};
    ddp_result result = ddp_all_reduce(group, bucket->data, bucket->data, bucket->count, bucket->dtype,
                                       DDP_OP_SUM, NULL);
    if (result == DDP_OK) ddp_group_device(group)->divide(&all, 1, bucket->divisor);
    return result;
}

static ddp_result by_reducer(ddp_group *group, const plan *p) {
    ddp_param params[PARAMS];
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_accumulator_desc sums = DDP_ZERO;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_reducer_stats stats;
    uint16_t *memory[2 * PARAMS];
    useconds_t hook_ms = 0;
    size_t bytes = 0;
    int rank = ddp_rank(group);
    memset(params, 0, sizeof params);
    for (int k = 0; k < PARAMS; k++) {
        memory[k] = (uint16_t *)calloc((size_t)elements(k), 2);
        memory[PARAMS + k] = (uint16_t *)calloc((size_t)elements(k), 2);
        params[k].name = shapes[k].name;
        tensor_of(&params[k].value, k, memory[k], p->dtype);
        if (p->scattered) tensor_of(&params[k].grad, k, memory[PARAMS + k], p->dtype);
        bytes += (size_t)elements(k) * (p->micro_batches > 1 ? 4 : 2); /* one gradient is exact in 16 bits */
    }
    desc.params = sums.params = params;
    desc.param_count = sums.param_count = PARAMS;
    desc.micro_batch_count = sums.micro_batch_count = p->micro_batches;
    desc.first_bucket_bytes = 64;
    desc.bucket_cap_bytes = 10000; /* three buckets */
    if (p->hook) desc.hook = average_hook;
    desc.hook_user = &hook_ms;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    sums.reducer = reducer;
    RANKS_OK(group, ddp_accumulator_create(&accumulator, group, &sums));
    for (int step = 0; step < 3; step++) { /* buckets are rebuilt after the first */
        for (int b = 0; b < p->micro_batches; b++) {
            for (int k = PARAMS - 1; k >= 0; k--) {
                write_gradient(params[k].grad.data, p->dtype, k, rank * p->micro_batches + b);
                RANKS_OK(group, ddp_accumulator_ready(accumulator, k));
            }
            RANKS_OK(group, ddp_accumulator_next(accumulator, NULL));
        }
        RANKS_OK(group, ddp_reducer_wait(reducer));
        for (int k = 0; k < PARAMS; k++) {
            int wrong = wrong_halves(params[k].grad.data, p->dtype, k);
            RANKS_CHECK(group, wrong == 0, "reducer, step %d, %s: %d of %d gradients have other bits", step,
                        shapes[k].name, wrong, elements(k));
        }
        RANKS_OK(group, ddp_reducer_get_stats(reducer, &stats));
        RANKS_CHECK(group, !p->scattered || ddp_world_size(group) == 1 || stats.bytes_reduced == bytes,
                    "reducer: %zu bytes reduced, not %zu", stats.bytes_reduced, bytes);
    }
    hook_ms = 20; /* the second bucket has not read the sums when rank 0 destroys the accumulator */
    for (int b = 0; b < p->micro_batches; b++) { /* ends in the middle of the last micro-batch */
        int last = b + 1 == p->micro_batches;
        for (int k = PARAMS - 1; k >= (last ? 1 : 0); k--)
            RANKS_OK(group, ddp_accumulator_ready(accumulator, k));
        if (!last) RANKS_OK(group, ddp_accumulator_next(accumulator, NULL));
    }
    if (p->scattered && p->hook && rank > 0) usleep(60000);
    if (p->scattered) ddp_accumulator_destroy(accumulator);
    ddp_reducer_destroy(reducer);
    RANKS_OK(group, ddp_barrier(group));
    if (!p->scattered) ddp_accumulator_destroy(accumulator);
    for (int k = 0; k < 2 * PARAMS; k++) free(memory[k]);
    return DDP_OK;
}

//== ddp_pipeline =============================================================================

typedef struct stages {
    const plan *p;
    int first;                     /* global index of this pipeline's micro-batch 0 */
    ddp_fsdp_param params[PARAMS]; /* without fsdp, their param */
    ddp_param plain[PARAMS], *list[PARAMS];
    ddp_reducer *reducer;
    ddp_fsdp *fsdp;
} stages;

static ddp_result forward(const ddp_pipeline_call *call, void *user) {
    (void)user;
    for (int i = 0; i < call->output_count; i++) memset(call->outputs[i].data, 0, sizeof(float));
    if (call->loss) *call->loss = 1;
    return DDP_OK;
}

static ddp_result backward(const ddp_pipeline_call *call, void *user) {
    stages *s = (stages *)user;
    for (int i = 0; i < call->input_count; i++)
        if (call->input_grads[i].data) memset(call->input_grads[i].data, 0, sizeof(float));
    for (int k = 0; k < PARAMS; k++)
        write_gradient(s->list[k]->grad.data, s->p->dtype, k, s->first + call->microbatch);
    return DDP_OK;
}

static ddp_result reducer_ready(int stage, void *user) {
    stages *s = (stages *)user;
    (void)stage;
    for (int k = PARAMS - 1; k >= 0; k--) {
        ddp_result result = ddp_reducer_ready(s->reducer, k);
        if (result != DDP_OK) return result;
    }
    return DDP_OK;
}
static ddp_result reducer_wait(int stage, void *user) {
    (void)stage;
    return ddp_reducer_wait(((stages *)user)->reducer);
}
static ddp_result fsdp_unshard(int stage, void *user) {
    (void)stage;
    return ddp_fsdp_unshard(((stages *)user)->fsdp, 0);
}
static ddp_result fsdp_reshard(int stage, void *user) {
    (void)stage;
    return ddp_fsdp_reshard(((stages *)user)->fsdp, 0);
}
static ddp_result fsdp_reduce(int stage, void *user) {
    (void)stage;
    return ddp_fsdp_reduce_grads(((stages *)user)->fsdp, 0);
}

/* The parameters of the stage, and the method that adds gradients over its replicas. */
static ddp_result stage_open(ddp_group *group, ddp_group *copies, stages *s, ddp_pipeline_stage *stage) {
    const plan *p = s->p;
    for (int k = 0; k < PARAMS; k++) {
        ddp_param *param = p->over == BY_FSDP ? &s->params[k].param : &s->plain[k];
        ddp_dtype dtype = p->over == BY_FSDP ? DDP_F32 : p->dtype;
        param->name = shapes[k].name;
        tensor_of(&param->value, k, calloc((size_t)elements(k), ddp_dtype_size(dtype)), dtype);
        s->list[k] = param;
    }
    stage->forward = forward;
    stage->backward = backward;
    stage->user = s;
    stage->params = s->list;
    stage->param_count = PARAMS;
    if (p->over == BY_REDUCER) {
        ddp_reducer_desc desc = DDP_ZERO;
        desc.params = s->plain;
        desc.param_count = PARAMS;
        desc.micro_batch_count = p->micro_batches * ddp_world_size(group) / p->replicas;
        desc.first_bucket_bytes = 64;
        desc.bucket_cap_bytes = 20000;
        if (p->hook) desc.hook = average_hook;
        RANKS_OK(group, ddp_reducer_create(&s->reducer, copies, &desc));
        stage->reduce_grad = reducer_ready;
        stage->wait_grad = reducer_wait;
    } else if (p->over == BY_FSDP) {
        ddp_fsdp_unit_desc unit = {"all", s->params, PARAMS};
        ddp_fsdp_desc desc = DDP_ZERO;
        void *values[PARAMS];
        for (int k = 0; k < PARAMS; k++) values[k] = s->list[k]->value.data;
        desc.units = &unit;
        desc.unit_count = 1;
        desc.strategy = p->strategy;
        desc.param_dtype = p->dtype;
        RANKS_OK(group, ddp_fsdp_create(&s->fsdp, copies, &desc));
        for (int k = 0; k < PARAMS; k++) free(values[k]);
        stage->unshard = fsdp_unshard;
        stage->reshard = fsdp_reshard;
        stage->reduce_grad = fsdp_reduce;
        stage->grad_division = DDP_DIVIDE_BEFORE_REDUCE;
    }
    return DDP_OK;
}

/* Every stage has all parameters: each must end with the average over the micro-batches of all pipelines. */
static ddp_result by_pipeline(ddp_group *group, const plan *p) {
    int world = ddp_world_size(group), depth = world / p->replicas, rank = ddp_rank(group);
    int each = p->micro_batches * depth; /* per rank, times the ranks of a pipeline */
    ddp_schedule_desc order = DDP_ZERO;
    ddp_schedule *schedule;
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_stage stage[4];
    ddp_pipeline *pipeline;
    ddp_group *own = group, *copies = NULL, *below = NULL;
    stages s;
    memset(&s, 0, sizeof s);
    memset(stage, 0, sizeof stage);
    s.p = p;
    s.first = rank / depth * each;
    if (p->replicas > 1) {
        RANKS_OK(group, ddp_group_split(group, rank / depth, rank, &own));
        RANKS_OK(group, ddp_group_split(group, rank % depth, rank, &copies));
    }
    if (p->packed) {
        below = copies;
        RANKS_OK(group, relay_over(&copies, below));
    }
    RANKS_OK(group, stage_open(group, copies ? copies : own, &s, &stage[ddp_rank(own)]));
    order.rank_count = depth;
    order.microbatch_count = each;
    RANKS_OK(group, ddp_schedule_create(&schedule, &order));
    desc.schedule = schedule;
    desc.stages = stage;
    desc.stage_count = depth;
    desc.boundary.dtype = DDP_F32;
    RANKS_OK(group, ddp_pipeline_create(&pipeline, own, &desc));
    for (int step = 0; step < 3; step++) {
        RANKS_OK(group, ddp_pipeline_step(pipeline));
        for (int k = 0; k < PARAMS && !s.fsdp; k++) {
            int wrong = wrong_halves(s.list[k]->grad.data, p->dtype, k);
            RANKS_CHECK(group, wrong == 0, "pipeline, %s: %d of %d gradients have other bits", shapes[k].name,
                        wrong, elements(k));
        }
        if (s.fsdp) RANKS_OK(group, check_and_step(group, s.fsdp, p, 1));
    }
    /* Before or after the pipeline, of which it reads memory. */
    if (p->scattered) ddp_reducer_destroy(s.reducer);
    ddp_pipeline_destroy(pipeline);
    if (!p->scattered) ddp_reducer_destroy(s.reducer);
    for (int k = 0; k < PARAMS; k++) {
        RANKS_CHECK(group, !s.list[k]->sum.data, "%s: the pipeline's sum is left", shapes[k].name);
        RANKS_CHECK(group, !s.list[k]->sum.reader || s.fsdp, "%s: the reducer is left", shapes[k].name);
        if (!s.fsdp) free(s.list[k]->value.data);
    }
    ddp_fsdp_destroy(s.fsdp);
    ddp_schedule_destroy(schedule);
    RANKS_OK(group, ddp_barrier(group));
    if (below) ddp_group_destroy(copies);
    if (p->replicas > 1) ddp_group_destroy(own);
    ddp_group_destroy(below ? below : copies);
    return DDP_OK;
}

//== cases ====================================================================================

static int failures, runs;

static ddp_result train(ddp_group *group, void *user) {
    const plan *p = (const plan *)user;
    if (p->adder == BY_FSDP) return by_fsdp(group, p);
    return p->adder == BY_REDUCER ? by_reducer(group, p) : by_pipeline(group, p);
}

static void run(ranks_mode mode, int world, plan p, int total) {
    static const char *const names[] = {"fsdp", "reducer", "pipeline"};
    p.micro_batches = total / world;
    if (!p.replicas) p.replicas = 1;
    runs++;
    if (ranks_run(mode, world, 20000 * DDP_TEST_SLOWDOWN, train, &p) == DDP_OK) return;
    fprintf(stderr,
            "FAIL %s %s on %d %s: strategy %d, %d micro-batches each, replicas=%d over %s packed=%d "
            "scattered=%d hook=%d: %s\n",
            names[p.adder], ddp_dtype_name(p.dtype), world, ranks_mode_name(mode), (int)p.strategy,
            p.micro_batches, p.replicas, names[p.over], p.packed, p.scattered, p.hook, ddp_last_error());
    failures++;
}

static void run_all(ranks_mode mode, ddp_dtype dtype, int total) {
    plan p;
    memset(&p, 0, sizeof p);
    p.dtype = dtype;
    p.replicas = 1;
    for (int k = 0; k < PARAMS; k++)
        for (int i = 0; i < elements(k); i++) average[k][i] = tree(dtype, k, i, 0, total) / (float)total;
    for (int world = 1; world <= 4; world *= 2) {
        for (int s = DDP_FSDP_FULL_SHARD; s <= DDP_FSDP_NO_SHARD; s++) {
            p.adder = BY_FSDP;
            p.strategy = (ddp_fsdp_strategy)s;
            for (p.packed = 0; p.packed <= (world > 1); p.packed++) run(mode, world, p, total);
            p.packed = 0;
            p.replicas = 2;
            if (world == 4) run(mode, world, p, total);
            p.replicas = 1;
        }
        p.adder = BY_REDUCER;
        for (p.scattered = 0; p.scattered < 2; p.scattered++)
            for (p.hook = 0; p.hook < 2; p.hook++)
                if (!p.hook || (world > 1 && total > world)) run(mode, world, p, total);
        p.scattered = p.hook = 0;
        p.adder = p.over = BY_PIPELINE;
        run(mode, world, p, total);
        p.replicas = 2;
        p.over = BY_REDUCER;
        for (p.scattered = 0; p.scattered < 2 && world > 1 && total == MICRO_MOST; p.scattered++)
            for (p.hook = 0; p.hook < 2; p.hook++) run(mode, world, p, total);
        p.scattered = p.hook = 0;
        p.over = BY_FSDP;
        if (world == 1) p.replicas = 1; /* the pipeline's sums are those of ddp_fsdp */
        for (int s = DDP_FSDP_FULL_SHARD; s <= DDP_FSDP_NO_SHARD && total == MICRO_MOST; s++) {
            p.strategy = (ddp_fsdp_strategy)s;
            for (p.packed = 0; p.packed <= (world > 1); p.packed++) run(mode, world, p, total);
        }
        p.packed = 0;
        p.replicas = 1;
    }
}

/* [threads|processes] */
int main(int argc, char **argv) {
    average = (float(*)[MOST])ranks_shared(PARAMS * sizeof *average);
    stepped = (float(*)[MOST])ranks_shared(PARAMS * sizeof *stepped);
    watchdog_start(120);
    for (int threads = 0; threads < 2; threads++) {
        ranks_mode mode = threads ? RANKS_THREADS : RANKS_PROCESSES;
        if (argc > 1 && strcmp(argv[1], ranks_mode_name(mode)) != 0) continue;
        for (int half = 0; half < 2; half++) {
            run_all(mode, half ? DDP_F16 : DDP_BF16, 4);
            run_all(mode, half ? DDP_F16 : DDP_BF16, MICRO_MOST);
        }
    }
    printf("%d runs, %d failures\n", runs, failures);
    return failures != 0 || runs == 0;
}

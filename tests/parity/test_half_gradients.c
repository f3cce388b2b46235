/*  test_half_gradients.c - 16-bit gradients are added in f32: every strategy on 1, 2 and 4 ranks ends with
   the same bits.

    The reference adds the f32 values of all micro-batches' 16-bit gradients as the tree over their global
    index and divides once. ddp_fsdp must leave exactly these f32 averages in its shards, and after a step
    every rank must gather the same values as one rank. ddp_reducer with a ddp_accumulator, and ddp_pipeline,
    keep gradients in 16 bits: they must leave the averages rounded once. One sum that is rounded to 16 bits
    before the end changes about half of the elements. */
#define DDP_PIPELINE_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#include "../support/ranks.h"
#include "../support/relay.h"

enum { PARAMS = 5, MOST = 9000, MICRO_MOST = 8, UNITS = 2 };

/* Rows that 4 ranks do not divide, one long tensor (longer than a block of the accumulator), one of fewer
   rows than ranks. */
static const struct shape { const char *name; int unit, rows, columns; } shapes[PARAMS] = {
    {"a", 0, 13, 5}, {"b", 0, 9000, 1}, {"c", 0, 1, 7}, {"d", 1, 3, 40}, {"e", 1, 10, 1}};

typedef enum adder { BY_FSDP, BY_REDUCER, BY_PIPELINE } adder_kind;

typedef struct plan {
    adder_kind adder;
    ddp_dtype dtype;
    ddp_fsdp_strategy strategy;
    int micro_batches; /* per rank */
    int replicas;      /* fsdp: 2 = the ranks are two copies of half as many */
    int packed;        /* fsdp: ranks do not see each other's memory */
    int scattered;     /* reducer: gradients are the caller's, apart from each other */
    int hook;          /* reducer: buckets go through a hook */
} plan;

static float (*average)[MOST];   /* what the gradients of each parameter must be */
static float (*stepped)[MOST];   /* values after a step; filled in by one rank */

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

static ddp_result check_shards(ddp_group *group, ddp_fsdp *fsdp, const plan *p) {
    int next[UNITS] = {0};
    for (int k = 0; k < PARAMS; k++) {
        ddp_tensor grad;
        int64_t first;
        int wrong = 0, unit = shapes[k].unit;
        RANKS_OK(group, ddp_fsdp_get_shard(fsdp, unit, next[unit]++, NULL, &grad, &first));
        RANKS_CHECK(group, grad.dtype == DDP_F32, "%s: gradients are %s", shapes[k].name,
                    ddp_dtype_name(grad.dtype));
        for (int64_t i = 0; grad.data && i < ddp_tensor_count(&grad); i++)
            wrong += memcmp((const float *)grad.data + i, &average[k][first * shapes[k].columns + i],
                            sizeof(float)) != 0;
        RANKS_CHECK(group, wrong == 0, "strategy %d, %s: %d of %lld gradients have other bits",
                    (int)p->strategy, shapes[k].name,
                    wrong, (long long)ddp_tensor_count(&grad));
    }
    return DDP_OK;
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

/* After the step: one rank writes what it gathers, the others compare. */
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
    float norm;
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
        RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 3.0e38f, &norm));
        RANKS_OK(group, check_shards(group, fsdp, p));
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.01f));
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

static ddp_result average_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    (void)user;
    ddp_result result = ddp_all_reduce(group, bucket->data, bucket->data, bucket->count, bucket->dtype,
                                       DDP_OP_SUM, NULL);
    if (result == DDP_OK) ddp_group_device(group)->divide(bucket->data, bucket->count, bucket->dtype,
                                                          bucket->divisor);
    return result;
}

static ddp_result by_reducer(ddp_group *group, const plan *p) {
    ddp_param params[PARAMS];
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_accumulator_desc sums = DDP_ZERO;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    uint16_t *memory[2 * PARAMS];
    int rank = ddp_rank(group);
    memset(params, 0, sizeof params);
    for (int k = 0; k < PARAMS; k++) {
        memory[k] = (uint16_t *)calloc((size_t)elements(k), 2);
        memory[PARAMS + k] = (uint16_t *)calloc((size_t)elements(k), 2);
        params[k].name = shapes[k].name;
        tensor_of(&params[k].value, k, memory[k], p->dtype);
        if (p->scattered) tensor_of(&params[k].grad, k, memory[PARAMS + k], p->dtype);
    }
    desc.params = sums.params = params;
    desc.param_count = sums.param_count = PARAMS;
    desc.micro_batch_count = sums.micro_batch_count = p->micro_batches;
    desc.first_bucket_bytes = 64;
    desc.bucket_cap_bytes = 20000;
    if (p->hook) desc.hook = average_hook;
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
    }
    for (int b = 0; b < p->micro_batches; b++) { /* ends in the middle of the last micro-batch */
        int last = b + 1 == p->micro_batches;
        for (int k = PARAMS - 1; k >= (last ? 2 : 0); k--) RANKS_OK(group, ddp_accumulator_ready(accumulator, k));
        if (!last) RANKS_OK(group, ddp_accumulator_next(accumulator, NULL));
    }
    if (p->scattered) ddp_accumulator_destroy(accumulator);
    ddp_reducer_destroy(reducer);
    if (!p->scattered) ddp_accumulator_destroy(accumulator);
    for (int k = 0; k < 2 * PARAMS; k++) free(memory[k]);
    return DDP_OK;
}

//== ddp_pipeline =============================================================================

typedef struct stages { const plan *p; ddp_param params[PARAMS], *list[PARAMS]; } stages;

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
    for (int k = 0; k < PARAMS; k++) write_gradient(s->params[k].grad.data, s->p->dtype, k, call->microbatch);
    return DDP_OK;
}

/* Every stage has all parameters: each must end with the average over the micro-batches of the one pipeline.
   */
static ddp_result by_pipeline(ddp_group *group, const plan *p) {
    int world = ddp_world_size(group), rank = ddp_rank(group), total = p->micro_batches * world;
    ddp_schedule_desc order = DDP_ZERO;
    ddp_schedule *schedule;
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_stage stage[4];
    ddp_pipeline *pipeline;
    stages s;
    uint16_t *memory[PARAMS];
    memset(&s, 0, sizeof s);
    memset(stage, 0, sizeof stage);
    s.p = p;
    for (int k = 0; k < PARAMS; k++) {
        memory[k] = (uint16_t *)calloc((size_t)elements(k), 2);
        s.params[k].name = shapes[k].name;
        tensor_of(&s.params[k].value, k, memory[k], p->dtype);
        s.list[k] = &s.params[k];
    }
    order.rank_count = world;
    order.microbatch_count = total;
    RANKS_OK(group, ddp_schedule_create(&schedule, &order));
    stage[rank].forward = forward;
    stage[rank].backward = backward;
    stage[rank].user = &s;
    stage[rank].params = s.list;
    stage[rank].param_count = PARAMS;
    desc.schedule = schedule;
    desc.stages = stage;
    desc.stage_count = world;
    desc.boundary.dtype = DDP_F32;
    RANKS_OK(group, ddp_pipeline_create(&pipeline, group, &desc));
    for (int step = 0; step < 2; step++) {
        RANKS_OK(group, ddp_pipeline_step(pipeline));
        for (int k = 0; k < PARAMS; k++) {
            int wrong = wrong_halves(s.params[k].grad.data, p->dtype, k);
            RANKS_CHECK(group, wrong == 0, "pipeline, %s: %d of %d gradients have other bits", shapes[k].name,
                        wrong, elements(k));
        }
    }
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(schedule);
    for (int k = 0; k < PARAMS; k++) free(memory[k]);
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
            "FAIL %s %s on %d %s: strategy %d, %d micro-batches each, replicas=%d packed=%d scattered=%d hook=%d: %s\n",
            names[p.adder], ddp_dtype_name(p.dtype), world, ranks_mode_name(mode), (int)p.strategy,
            p.micro_batches, p.replicas, p.packed, p.scattered, p.hook, ddp_last_error());
    failures++;
}

static void run_all(ranks_mode mode, ddp_dtype dtype, int total) {
    plan p;
    memset(&p, 0, sizeof p);
    p.dtype = dtype;
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
        p.adder = BY_PIPELINE;
        run(mode, world, p, total);
    }
}

/* [threads|processes] */
int main(int argc, char **argv) {
    average = (float (*)[MOST])ranks_shared(PARAMS * sizeof *average);
    stepped = (float (*)[MOST])ranks_shared(PARAMS * sizeof *stepped);
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

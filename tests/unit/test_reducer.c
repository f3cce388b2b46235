/*  test_reducer.c - the reducer, the accumulator and the join on one rank: rules of bucketing against a plain
    reimplementation, bits of sums and averages, clipping against long double, every bad input, and no
    allocation in a step. */
#include "ddp.h"

#include "../support/unit.h"

#include <math.h>

enum { PARAMS_MAX = 64 };

/* A model of up to PARAMS_MAX parameters with separate memory. */
typedef struct model {
    ddp_group *group;
    ddp_param params[PARAMS_MAX];
    char names[PARAMS_MAX][16];
    int count;
    unsigned char *memory; /* values, one after the other */
    size_t used;
} model;

static void model_open(model *m) {
    ddp_group_desc desc = DDP_ZERO;
    memset(m, 0, sizeof *m);
    desc.init_method = "self://";
    assert_int_equal(ddp_group_create(&m->group, &desc), DDP_OK);
    m->memory = (unsigned char *)calloc(1, (size_t)64 << 20);
    assert_non_null(m->memory);
}

static void model_close(model *m) {
    ddp_group_destroy(m->group);
    free(m->memory);
}

/* Separate pieces of memory: at least 8 bytes between any two of them. */
static void *model_take(model *m, size_t bytes) {
    void *memory = m->memory + m->used;
    m->used += (bytes + 15) / 8 * 8;
    return memory;
}

static ddp_param *model_add(model *m, ddp_dtype dtype, int64_t rows, int64_t columns) {
    ddp_param *param = &m->params[m->count];
    assert_true(m->count < PARAMS_MAX);
    snprintf(m->names[m->count], sizeof m->names[0], "p%d", m->count);
    param->name = m->names[m->count++];
    param->value.dtype = dtype;
    param->value.ndim = 2;
    param->value.shape[0] = rows;
    param->value.shape[1] = columns;
    param->value.data = model_take(m, (size_t)(rows * columns) * ddp_dtype_size(dtype));
    return param;
}

static ddp_reducer_desc model_desc(model *m) {
    ddp_reducer_desc desc = DDP_ZERO;
    desc.params = m->params;
    desc.param_count = m->count;
    return desc;
}

static ddp_reducer *model_reducer(model *m, const ddp_reducer_desc *desc) {
    ddp_reducer *reducer = NULL;
    ddp_result result = ddp_reducer_create(&reducer, m->group, desc);
    if (result != DDP_OK) print_error("%s\n", ddp_last_error());
    assert_int_equal(result, DDP_OK);
    return reducer;
}

static size_t param_count(const ddp_param *param) { return (size_t)ddp_tensor_count(&param->value); }
static float *param_grad(const ddp_param *param) { return (float *)param->grad.data; }

static uint32_t random_next(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }
static float random_float(uint32_t *state) {
    return ldexpf((float)((int32_t)random_next(state) >> 8), -20 + (int)(random_next(state) >> 29));
}

static void expect_text(const char *part) {
    if (!strstr(ddp_last_error(), part)) print_error("have: %s\nwant: %s\n", ddp_last_error(), part);
    assert_non_null(strstr(ddp_last_error(), part));
}

static void step_all(model *m, ddp_reducer *reducer) {
    for (int i = m->count - 1; i >= 0; i--) assert_int_equal(ddp_reducer_ready(reducer, i), DDP_OK);
    assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
}

//== create =================================================================================

static void null_gradients_are_placed_in_reverse_order_per_dtype(void **state) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    unsigned char *previous = NULL;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 12; i++)
        model_add(&m, i % 3 == 0 ? DDP_F64 : i % 3 == 1 ? DDP_F32 : DDP_BF16, 3, 5 + i);
    desc = model_desc(&m);
    reducer = model_reducer(&m, &desc);
    for (int i = 0; i < 12; i++) {
        assert_non_null(m.params[i].grad.data);
        assert_int_equal((uintptr_t)m.params[i].grad.data % 64, 0);
        assert_int_equal(m.params[i].grad.dtype, m.params[i].value.dtype);
        assert_int_equal(ddp_tensor_count(&m.params[i].grad), ddp_tensor_count(&m.params[i].value));
        for (size_t k = 0; k < param_count(&m.params[i]) * ddp_dtype_size(m.params[i].grad.dtype); k++)
            assert_int_equal(((unsigned char *)m.params[i].grad.data)[k], 0);
    }
    for (int i = 11; i >= 0; i--) {
        if (i % 3 != 1) continue;
        if (previous)
            assert_ptr_equal(m.params[i].grad.data,
                             previous + (param_count(&m.params[i + 3]) * 4 + 63) / 64 * 64);
        previous = (unsigned char *)m.params[i].grad.data;
    }
    ddp_reducer_destroy(reducer);
    for (int i = 0; i < 12; i++) assert_null(m.params[i].grad.data);
    model_close(&m);
}

static void gradient_dtype_may_differ_from_the_value(void **state) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    (void)state;
    model_open(&m);
    model_add(&m, DDP_BF16, 4, 4)->grad.dtype = DDP_F32;
    desc = model_desc(&m);
    desc.micro_batch_count = 2;
    reducer = model_reducer(&m, &desc);
    param_grad(&m.params[0])[15] = 3.0f;
    step_all(&m, reducer);
    assert_true(param_grad(&m.params[0])[15] == 1.5f);
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

static void bad_create(model *m, const ddp_reducer_desc *desc, const char *text) {
    ddp_reducer *reducer = (ddp_reducer *)m;
    assert_int_equal(ddp_reducer_create(&reducer, m->group, desc), DDP_ERR_INVALID);
    assert_null(reducer);
    expect_text(text);
}

static void every_bad_desc_is_refused_in_words(void **state) {
    model m;
    ddp_reducer_desc good, desc;
    ddp_param saved;
    ddp_tensor buffer = DDP_ZERO;
    ddp_reducer *reducer;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 3; i++) model_add(&m, DDP_F32, 2, 3);
    good = model_desc(&m);
    saved = m.params[1];
    assert_int_equal(ddp_reducer_create(NULL, m.group, &good), DDP_ERR_INVALID);
    expect_text("out is NULL");
    assert_int_equal(ddp_reducer_create(&reducer, NULL, &good), DDP_ERR_INVALID);
    expect_text("group is NULL");
    bad_create(&m, NULL, "desc is NULL");
    desc = good;
    desc.params = NULL;
    bad_create(&m, &desc, "set both, to the array of trained parameters");
    desc = good;
    desc.param_count = 0;
    bad_create(&m, &desc, "param_count=0");
    desc = good;
    desc.param_count = -1;
    bad_create(&m, &desc, "param_count=-1");
    desc = good;
    desc.micro_batch_count = -2;
    bad_create(&m, &desc, "micro_batch_count=-2");
    desc = good;
    desc.comm_dtype = DDP_F64;
    bad_create(&m, &desc, "comm_dtype=f64");
    desc = good;
    desc.buffer_count = 1;
    bad_create(&m, &desc, "buffer_count=1");
    desc.buffers = &buffer;
    bad_create(&m, &desc, "buffer 0");
    m.params[1].value.data = NULL;
    bad_create(&m, &good, "parameter 1 'p1': value.data is NULL");
    m.params[1] = saved;
    m.params[1].value.dtype = DDP_DTYPE_DEFAULT;
    bad_create(&m, &good, "parameter 1 'p1': value.dtype=0 is invalid");
    m.params[1] = saved;
    m.params[1].value.shape[1] = -1;
    bad_create(&m, &good, "parameter 1 'p1': value.ndim=2 or value.shape is invalid");
    m.params[1] = saved;
    m.params[1].value.ndim = DDP_MAX_NDIM + 1;
    bad_create(&m, &good, "use ndim 0 to 8");
    m.params[1] = saved;
    m.params[1].grad.dtype = DDP_I32;
    bad_create(&m, &good, "a gradient of dtype i32 cannot be averaged");
    m.params[1] = saved;
    m.params[1].value.dtype = DDP_I64;
    bad_create(&m, &good, "a gradient of dtype i64 cannot be averaged");
    m.params[1] = saved;
    m.params[1].grad.ndim = 1;
    m.params[1].grad.shape[0] = 7;
    bad_create(&m, &good, "has 7 elements, but the value has 6");
    m.params[1] = saved;
    m.params[1].grad.data = m.memory + 1;
    bad_create(&m, &good, "not aligned");
    m.params[1].grad.data = m.memory + 4096;
    m.params[2].grad.data = m.memory + 4096;
    bad_create(&m, &good, "the gradients of parameter 1 'p1' and parameter 2 'p2' overlap");
    m.params[2].grad.data = m.memory + 4096 + 20;
    bad_create(&m, &good, "overlap");
    m.params[1] = saved;
    m.params[2].grad.data = NULL;
    m.params[2].value.data = m.params[0].value.data;
    m.params[2].value.shape[0] = 1;
    bad_create(&m, &good, "parameter 0 'p0' and parameter 2 'p2' share value.data");
    m.params[2].value.shape[0] = 2;
    m.params[1].name = NULL;
    m.params[1].value.data = NULL;
    bad_create(&m, &good, "parameter 1: value.data");
    m.params[1] = saved;
    reducer = model_reducer(&m, &good); /* the failed calls have no lasting effect */
    ddp_reducer_destroy(reducer);
    ddp_reducer_destroy(NULL);
    model_close(&m);
}

//== buckets ================================================================================

typedef struct seen {
    int count;
    size_t elements[PARAMS_MAX];
    ddp_dtype dtype[PARAMS_MAX];
    int bucket_count;
    uint64_t divisor, step;
} seen;

static ddp_result record_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    seen *s = (seen *)user;
    (void)group;
    if (bucket->index == 0) s->count = 0;
    assert_int_equal(bucket->index, s->count);
    s->elements[s->count] = bucket->count;
    s->dtype[s->count++] = bucket->dtype;
    s->bucket_count = bucket->bucket_count;
    s->divisor = bucket->divisor;
    s->step = bucket->step;
    return DDP_OK;
}

/* SEMANTICS: visit the parameters, per dtype add one, close the bucket once bytes >= limit. The buckets are
   in the order of completion. */
static void reference_buckets(const model *m, const int *order, size_t first_limit, size_t limit, seen *out) {
    ddp_dtype dtypes[3] = {DDP_F32, DDP_F64, DDP_BF16};
    size_t elements[PARAMS_MAX];
    int last[PARAMS_MAX], count = 0;
    ddp_dtype dtype[PARAMS_MAX];
    for (int d = 0; d < 3; d++) {
        size_t bytes = 0, n = 0, bound = first_limit;
        int at = -1;
        for (int k = 0; k < m->count; k++) {
            const ddp_param *param = &m->params[order[k]];
            if (param->value.dtype != dtypes[d]) continue;
            n += param_count(param);
            bytes += param_count(param) * ddp_dtype_size(dtypes[d]);
            at = k;
            if (bytes < bound) continue;
            elements[count] = n;
            last[count] = at;
            dtype[count++] = dtypes[d];
            bytes = n = 0;
            bound = limit;
        }
        if (n) {
            elements[count] = n;
            last[count] = at;
            dtype[count++] = dtypes[d];
        }
    }
    out->count = 0;
    for (int k = 0; k < m->count; k++)
        for (int b = 0; b < count; b++)
            if (last[b] == k) {
                out->elements[out->count] = elements[b];
                out->dtype[out->count++] = dtype[b];
            }
}

static void expect_buckets(const seen *have, const seen *want) {
    assert_int_equal(have->count, want->count);
    assert_int_equal(have->bucket_count, want->count);
    for (int b = 0; b < want->count; b++) {
        assert_int_equal(have->elements[b], want->elements[b]);
        assert_int_equal(have->dtype[b], want->dtype[b]);
    }
}

static void buckets_follow_the_rule_and_then_the_ready_order(void **state) {
    uint32_t seed = 7;
    (void)state;
    for (int round = 0; round < 40; round++) {
        model m;
        ddp_reducer_desc desc;
        ddp_reducer *reducer;
        ddp_reducer_stats stats = DDP_ZERO;
        seen have, want;
        int order[PARAMS_MAX];
        model_open(&m);
        for (int i = 0, n = 1 + (int)(random_next(&seed) >> 27); i < n; i++) {
            uint32_t kind = random_next(&seed) >> 24;
            model_add(&m,
                      kind < 160   ? DDP_F32
                      : kind < 220 ? DDP_F64
                                   : DDP_BF16,
                      1 + (random_next(&seed) >> 28), 1 + (random_next(&seed) >> 23));
        }
        desc = model_desc(&m);
        desc.first_bucket_bytes = 1 + (random_next(&seed) >> 19);
        desc.bucket_cap_bytes = 1 + (random_next(&seed) >> 17);
        desc.hook = record_hook;
        desc.hook_user = &have;
        desc.micro_batch_count = 3;
        reducer = model_reducer(&m, &desc);
        for (int i = 0; i < m.count; i++) order[i] = m.count - 1 - i;
        reference_buckets(&m, order, desc.first_bucket_bytes, desc.bucket_cap_bytes, &want);
        /* shuffle: the order announced in this step is the order of the next. */
        for (int i = 0; i < m.count; i++) {
            int j = i + (int)(random_next(&seed) >> 8) % (m.count - i), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
        for (int step = 0; step < 3; step++) {
            for (int i = 0; i < m.count; i++) assert_int_equal(ddp_reducer_ready(reducer, order[i]), DDP_OK);
            assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
            expect_buckets(&have, &want);
            assert_int_equal(have.divisor, 3);
            assert_int_equal(have.step, step);
            assert_int_equal(ddp_reducer_get_stats(reducer, &stats), DDP_OK);
            assert_int_equal(stats.rebuilt, 1);
            reference_buckets(&m, order, desc.first_bucket_bytes, desc.bucket_cap_bytes, &want);
            assert_int_equal(stats.bucket_count, want.count);
        }
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
}

static ddp_result negate_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    (void)group;
    for (size_t i = 0; i < bucket->count; i++) ((float *)bucket->data)[i] *= -1.0f;
    *(size_t *)user += bucket->count;
    return DDP_OK;
}

static void hooks_see_every_gradient_once_and_nothing_else(void **state) {
    (void)state;
    for (int given = 0; given < 2; given++) {
        model m;
        ddp_reducer_desc desc;
        ddp_reducer *reducer;
        size_t total = 0, elements = 0;
        model_open(&m);
        for (int i = 0; i < 9; i++) {
            ddp_param *param = model_add(&m, DDP_F32, 3, 7 + i);
            if (given) param->grad.data = model_take(&m, param_count(param) * 4);
            elements += param_count(param);
        }
        desc = model_desc(&m);
        desc.first_bucket_bytes = 200;
        desc.bucket_cap_bytes = 500;
        desc.hook = negate_hook;
        desc.hook_user = &total;
        reducer = model_reducer(&m, &desc);
        for (int i = 0; i < 9; i++)
            for (size_t k = 0; k < param_count(&m.params[i]); k++)
                param_grad(&m.params[i])[k] = (float)(i * 1000 + (int)k);
        step_all(&m, reducer);
        assert_int_equal(total, elements);
        for (int i = 0; i < 9; i++)
            for (size_t k = 0; k < param_count(&m.params[i]); k++)
                assert_true(param_grad(&m.params[i])[k] == -(float)(i * 1000 + (int)k));
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
}

static ddp_result failing_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    (void)group;
    (void)user;
    return bucket->index == 1 ? ddp_fail(DDP_ERR_CORRUPT, "the hook's own words") : DDP_OK;
}

static void a_failing_hook_is_named(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 3; i++) model_add(&m, DDP_F32, 2, 3);
    desc = model_desc(&m);
    desc.first_bucket_bytes = desc.bucket_cap_bytes = 1;
    desc.hook = failing_hook;
    reducer = model_reducer(&m, &desc);
    for (int i = 2; i >= 0; i--) assert_int_equal(ddp_reducer_ready(reducer, i), DDP_OK);
    assert_int_equal(ddp_reducer_wait(reducer), DDP_ERR_CORRUPT);
    expect_text("bucket 1 of 3");
    expect_text("the hook's own words");
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

//== steps ==================================================================================

static void one_rank_only_divides_once(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    ddp_reducer_stats stats = DDP_ZERO;
    uint32_t seed = 3;
    float *want = (float *)malloc(6 * 1000 * sizeof(float));
    (void)state;
    model_open(&m);
    for (int i = 0; i < 6; i++) model_add(&m, DDP_F32, 10, 100);
    desc = model_desc(&m);
    desc.micro_batch_count = 7;
    reducer = model_reducer(&m, &desc);
    for (int i = 0; i < 6000; i++) {
        float value = random_float(&seed);
        param_grad(&m.params[i / 1000])[i % 1000] = value;
        want[i] = value / 7.0f;
    }
    step_all(&m, reducer);
    for (int i = 0; i < 6000; i++) assert_true(param_grad(&m.params[i / 1000])[i % 1000] == want[i]);
    assert_int_equal(ddp_reducer_get_stats(reducer, &stats), DDP_OK);
    assert_int_equal(stats.steps, 1);
    assert_int_equal(stats.gradient_bytes, 24000);
    assert_int_equal(stats.bytes_reduced, 0);
    assert_int_equal(stats.bytes_copied, 0);
    assert_int_equal(stats.largest_bucket_bytes, 24000);
    assert_true(stats.wait_seconds >= 0 && stats.comm_seconds > 0
                && stats.total_comm_seconds >= stats.comm_seconds);
    ddp_reducer_destroy(reducer);
    model_close(&m);
    free(want);
}

static void misuse_of_a_step_is_named_and_harmless(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 3; i++) model_add(&m, DDP_F32, 2, 3);
    desc = model_desc(&m);
    reducer = model_reducer(&m, &desc);
    assert_int_equal(ddp_reducer_wait(reducer), DDP_ERR_INVALID);
    expect_text("parameter 0 'p0' never became ready on rank 0 in step 0");
    assert_int_equal(ddp_reducer_ready(reducer, -1), DDP_ERR_INVALID);
    expect_text("param_index=-1");
    assert_int_equal(ddp_reducer_ready(reducer, 3), DDP_ERR_INVALID);
    expect_text("param_index=3 with 3 parameters");
    assert_int_equal(ddp_reducer_ready(reducer, 1), DDP_OK);
    assert_int_equal(ddp_reducer_ready(reducer, 1), DDP_ERR_INVALID);
    expect_text("parameter 1 'p1' is ready twice in step 0");
    assert_int_equal(ddp_reducer_no_sync(reducer, 1), DDP_ERR_INVALID);
    expect_text("1 parameters of this step are already ready");
    assert_int_equal(ddp_reducer_ready(reducer, 0), DDP_OK);
    assert_int_equal(ddp_reducer_wait(reducer), DDP_ERR_INVALID);
    expect_text("parameter 2 'p2' never became ready");
    step_all(&m, reducer); /* a new step starts clean */
    assert_int_equal(ddp_reducer_ready(NULL, 0), DDP_ERR_INVALID);
    assert_int_equal(ddp_reducer_wait(NULL), DDP_ERR_INVALID);
    assert_int_equal(ddp_reducer_no_sync(NULL, 0), DDP_ERR_INVALID);
    assert_int_equal(ddp_reducer_get_stats(reducer, NULL), DDP_ERR_INVALID);
    assert_int_equal(ddp_reducer_clip_grad_norm(NULL, 1, NULL), DDP_ERR_INVALID);
    assert_int_equal(ddp_reducer_is_unused(reducer, 99), 0);
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

static void no_sync_leaves_gradients_alone(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 3; i++) model_add(&m, DDP_F32, 2, 3);
    desc = model_desc(&m);
    desc.micro_batch_count = 2;
    reducer = model_reducer(&m, &desc);
    for (int i = 0; i < 3; i++) param_grad(&m.params[i])[0] = 8;
    assert_int_equal(ddp_reducer_no_sync(reducer, 1), DDP_OK);
    assert_int_equal(ddp_reducer_ready(reducer, 1), DDP_OK);
    assert_int_equal(ddp_reducer_ready(reducer, 1), DDP_OK);
    assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
    assert_true(param_grad(&m.params[1])[0] == 8);
    assert_int_equal(ddp_reducer_no_sync(reducer, 0), DDP_OK);
    step_all(&m, reducer);
    assert_true(param_grad(&m.params[1])[0] == 4);
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

static void unused_parameters_get_zeros_and_are_reported(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    ddp_reducer_stats stats = DDP_ZERO;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 4; i++) model_add(&m, DDP_F32, 2, 3);
    desc = model_desc(&m);
    desc.find_unused = 1;
    reducer = model_reducer(&m, &desc);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 4; i++) param_grad(&m.params[i])[5] = 8;
        for (int i = 0; i < 4; i++)
            if (i != step) assert_int_equal(ddp_reducer_ready(reducer, i), DDP_OK);
        assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
        ddp_reducer_get_stats(reducer, &stats);
        assert_int_equal(stats.unused_count, 1);
        assert_int_equal(stats.rebuilt, 0);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(ddp_reducer_is_unused(reducer, i), i == step);
            assert_true(param_grad(&m.params[i])[5] == (i == step ? 0 : 8));
        }
    }
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

/* From the second step on, the gradient of p2 is in no bucket: ranks may have different numbers there. */
static void static_graph_does_not_wait_for_what_the_first_step_left_out(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    float norm;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 4; i++) model_add(&m, DDP_F32, 2, 3);
    desc = model_desc(&m);
    desc.static_graph = 1;
    reducer = model_reducer(&m, &desc);
    for (int step = 0; step < 3; step++) {
        param_grad(&m.params[2])[0] = 5;
        for (int i = 0; i < 4; i++)
            if (i != 2) assert_int_equal(ddp_reducer_ready(reducer, i), DDP_OK);
        if (step == 1) {
            assert_int_equal(ddp_reducer_ready(reducer, 2), DDP_ERR_INVALID);
            expect_text("parameter 2 'p2' was not used in the first step");
        }
        assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
        assert_int_equal(ddp_reducer_is_unused(reducer, 2), 1);
        assert_true(param_grad(&m.params[2])[0] == (step ? 5 : 0));
        /* a gradient that no rank uses is neither counted nor scaled */
        param_grad(&m.params[0])[0] = 4;
        assert_int_equal(ddp_reducer_clip_grad_norm(reducer, 2, &norm), DDP_OK);
        assert_true(norm == 4 && param_grad(&m.params[0])[0] == 2);
        assert_true(param_grad(&m.params[2])[0] == (step ? 5 : 0));
    }
    assert_int_equal(ddp_reducer_ready(reducer, 0), DDP_OK);
    assert_int_equal(ddp_reducer_wait(reducer), DDP_ERR_INVALID);
    expect_text("parameter 1 'p1' never became ready");
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

static void uses_of_a_tied_parameter_add_up_in_the_first(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    float norm = 0;
    (void)state;
    model_open(&m);
    for (int i = 0; i < 4; i++) model_add(&m, DDP_F32, 2, 2);
    m.params[1].value.data = m.params[3].value.data = m.params[0].value.data;
    desc = model_desc(&m);
    desc.micro_batch_count = 2;
    reducer = model_reducer(&m, &desc);
    param_grad(&m.params[0])[0] = 0.25f;
    param_grad(&m.params[1])[0] = 16777216.0f;
    param_grad(&m.params[2])[0] = 6.0f;
    param_grad(&m.params[3])[0] = -16777216.0f;
    step_all(&m, reducer);
    /* Averages, in definition order. */
    assert_true(param_grad(&m.params[0])[0] == (0.125f + 8388608.0f) - 8388608.0f);
    assert_true(param_grad(&m.params[2])[0] == 3.0f);
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, 1e9f, &norm), DDP_OK);
    assert_true(
        norm == (float)sqrt(9.0 + (double)param_grad(&m.params[0])[0] * (double)param_grad(&m.params[0])[0]));
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

static void clipping_matches_long_double(void **state) {
    uint32_t seed = 11;
    (void)state;
    for (int round = 0; round < 20; round++) {
        model m;
        ddp_reducer_desc desc;
        ddp_reducer *reducer;
        long double sum = 0;
        float norm = 0, max_norm, before[5][600];
        model_open(&m);
        for (int i = 0; i < 5; i++)
            model_add(&m, DDP_F32, 1 + (random_next(&seed) >> 29), 1 + (random_next(&seed) >> 26));
        desc = model_desc(&m);
        reducer = model_reducer(&m, &desc);
        for (int i = 0; i < 5; i++)
            for (size_t k = 0; k < param_count(&m.params[i]); k++) {
                before[i][k] = param_grad(&m.params[i])[k] = random_float(&seed);
                sum += (long double)before[i][k] * (long double)before[i][k];
            }
        step_all(&m, reducer);
        max_norm = (float)sqrtl(sum) * (round % 2 ? 0.25f : 4.0f);
        assert_int_equal(ddp_reducer_clip_grad_norm(reducer, max_norm, &norm), DDP_OK);
        assert_true(fabsl((long double)norm - sqrtl(sum)) <= 1.3e-7L * sqrtl(sum));
        for (int i = 0; i < 5; i++)
            for (size_t k = 0; k < param_count(&m.params[i]); k++)
                assert_true(param_grad(&m.params[i])[k]
                            == (round % 2 ? before[i][k] * (max_norm / norm) : before[i][k]));
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
}

static void clipping_leaves_what_is_not_finite(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    float norm = 0;
    (void)state;
    model_open(&m);
    model_add(&m, DDP_F32, 2, 2);
    desc = model_desc(&m);
    reducer = model_reducer(&m, &desc);
    step_all(&m, reducer);
    param_grad(&m.params[0])[0] = INFINITY;
    param_grad(&m.params[0])[1] = 3;
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, 1, &norm), DDP_OK);
    assert_true(isinf(norm) && param_grad(&m.params[0])[1] == 3);
    param_grad(&m.params[0])[2] = NAN;
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, 1, &norm), DDP_OK);
    assert_true(isnan(norm) && param_grad(&m.params[0])[1] == 3);
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, 0, &norm), DDP_ERR_INVALID);
    expect_text("max_norm=0");
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, NAN, &norm), DDP_ERR_INVALID);
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, -1, NULL), DDP_ERR_INVALID);
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

//== accumulator ============================================================================

static float micro_gradient(int micro_batch, int param, size_t index) {
    uint32_t seed = (uint32_t)(micro_batch * 7919 + param * 104729 + (int)index * 31 + 1);
    random_next(&seed);
    random_next(&seed);
    return random_float(&seed);
}

static float tree(int first, int n, int param, size_t index) {
    int left = 1;
    if (n == 1) return micro_gradient(first, param, index);
    while (left * 2 < n) left *= 2;
    return tree(first, left, param, index) + tree(first + left, n - left, param, index);
}

static ddp_accumulator_desc accumulator_desc(model *m, ddp_reducer *reducer, int micro_batch_count) {
    ddp_accumulator_desc desc = DDP_ZERO;
    desc.params = m->params;
    desc.param_count = m->count;
    desc.micro_batch_count = micro_batch_count;
    desc.reducer = reducer;
    return desc;
}

static void accumulation_is_the_tree_for_any_count(void **state) {
    (void)state;
    for (int count = 1; count <= 37; count++) {
        model m;
        ddp_reducer_desc desc;
        ddp_reducer *reducer;
        ddp_accumulator *accumulator = NULL;
        ddp_accumulator_desc accumulate;
        int last = 0;
        model_open(&m);
        model_add(&m, DDP_F32, 1, 5);
        model_add(&m, DDP_F32, 3, count == 5 ? 3000 : 7); /* once longer than a block */
        desc = model_desc(&m);
        desc.micro_batch_count = count;
        reducer = model_reducer(&m, &desc);
        accumulate = accumulator_desc(&m, reducer, count);
        assert_int_equal(ddp_accumulator_create(&accumulator, m.group, &accumulate), DDP_OK);
        for (int step = 0; step < 2; step++) {
            for (int b = 0; b < count; b++) {
                assert_int_equal(last && b > 0, 0);
                for (int i = 1; i >= 0; i--) {
                    for (size_t k = 0; k < param_count(&m.params[i]); k++)
                        param_grad(&m.params[i])[k] = micro_gradient(b, i, k);
                    assert_int_equal(ddp_accumulator_ready(accumulator, i), DDP_OK);
                }
                assert_int_equal(ddp_accumulator_next(accumulator, &last), DDP_OK);
            }
            assert_int_equal(last, 1);
            assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
            for (int i = 0; i < 2; i++)
                for (size_t k = 0; k < param_count(&m.params[i]); k++)
                    assert_true(param_grad(&m.params[i])[k] == tree(0, count, i, k) / (float)count);
        }
        ddp_accumulator_destroy(accumulator);
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
}

static void bad_accumulator(model *m, const ddp_accumulator_desc *desc, const char *text) {
    ddp_accumulator *accumulator = (ddp_accumulator *)m;
    assert_int_equal(ddp_accumulator_create(&accumulator, m->group, desc), DDP_ERR_INVALID);
    assert_null(accumulator);
    expect_text(text);
}

static void misuse_of_an_accumulator_is_named(void **state) {
    model m, other;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator = NULL;
    ddp_accumulator_desc good, bad;
    (void)state;
    model_open(&m);
    model_open(&other);
    for (int i = 0; i < 2; i++) {
        model_add(&m, DDP_F32, 2, 3);
        model_add(&other, DDP_F32, 2, 3);
    }
    good = accumulator_desc(&m, NULL, 4);
    bad_accumulator(&m, &good, "parameter 0 'p0': grad.data is NULL");
    desc = model_desc(&m);
    desc.micro_batch_count = 4;
    reducer = model_reducer(&m, &desc);
    good.reducer = reducer;
    bad_accumulator(&m, NULL, "desc is NULL");
    bad = good;
    bad.params = NULL;
    bad_accumulator(&m, &bad, "set both, to the array");
    bad = good;
    bad.micro_batch_count = 0;
    bad_accumulator(&m, &bad, "micro_batch_count=0");
    bad = good;
    bad.micro_batch_count = 8;
    bad_accumulator(&m, &bad, "the reducer has micro_batch_count=4");
    bad = good;
    bad.params = other.params;
    bad_accumulator(&m, &bad, "differ from those of the reducer");
    /* it returned DDP_OK */
    assert_int_equal(ddp_accumulator_create(&accumulator, other.group, &good), DDP_ERR_INVALID);
    assert_null(accumulator);
    expect_text("ddp_accumulator_create: desc->reducer belongs to another group");
    assert_int_equal(ddp_accumulator_create(NULL, m.group, &good), DDP_ERR_INVALID);
    assert_int_equal(ddp_accumulator_create(&accumulator, NULL, &good), DDP_ERR_INVALID);
    assert_int_equal(ddp_accumulator_create(&accumulator, m.group, &good), DDP_OK);
    assert_int_equal(ddp_accumulator_ready(accumulator, 2), DDP_ERR_INVALID);
    expect_text("param_index=2");
    assert_int_equal(ddp_accumulator_ready(accumulator, 1), DDP_OK);
    assert_int_equal(ddp_accumulator_ready(accumulator, 1), DDP_ERR_INVALID);
    expect_text("parameter 1 'p1' is ready twice in micro-batch 0");
    assert_int_equal(ddp_accumulator_next(accumulator, NULL), DDP_ERR_INVALID);
    expect_text("parameter 0 'p0' is not ready in micro-batch 0");
    assert_int_equal(ddp_accumulator_ready(accumulator, 0), DDP_OK);
    assert_int_equal(ddp_accumulator_next(accumulator, NULL), DDP_OK);
    assert_int_equal(ddp_accumulator_ready(NULL, 0), DDP_ERR_INVALID);
    assert_int_equal(ddp_accumulator_next(NULL, NULL), DDP_ERR_INVALID);
    ddp_accumulator_destroy(accumulator);
    ddp_accumulator_destroy(NULL);
    ddp_reducer_destroy(reducer);
    model_close(&m);
    model_close(&other);
}

//== join, memory ===========================================================================

static void join_on_one_rank_ends_when_the_batches_do(void **state) {
    (void)state;
    for (int mode = DDP_JOIN_SHADOW; mode <= DDP_JOIN_STOP; mode++) {
        model m;
        ddp_reducer_desc desc;
        ddp_reducer *reducer;
        ddp_join *join;
        ddp_join_desc join_desc = DDP_ZERO;
        int active, steps = 0;
        model_open(&m);
        model_add(&m, DDP_F32, 2, 3);
        desc = model_desc(&m);
        reducer = model_reducer(&m, &desc);
        assert_int_equal(ddp_join_create(&join, m.group, &join_desc), DDP_ERR_INVALID);
        expect_text("create the reducer first");
        join_desc.reducer = reducer;
        join_desc.mode = (ddp_join_mode)7;
        assert_int_equal(ddp_join_create(&join, m.group, &join_desc), DDP_ERR_INVALID);
        expect_text("mode=7");
        join_desc.mode = (ddp_join_mode)mode;
        assert_int_equal(ddp_join_create(NULL, m.group, &join_desc), DDP_ERR_INVALID);
        assert_int_equal(ddp_join_create(&join, m.group, &join_desc), DDP_OK);
        assert_int_equal(ddp_join_step(NULL, 1, &active), DDP_ERR_INVALID);
        for (;;) {
            assert_int_equal(ddp_join_step(join, steps < 3, &active), DDP_OK);
            if (!active) break;
            assert_int_equal(active, 1);
            assert_int_equal(ddp_reducer_ready(reducer, 0), DDP_OK);
            assert_int_equal(ddp_join_step(join, 1, &active), DDP_ERR_INVALID);
            expect_text("a step is pending");
            assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
            steps++;
        }
        assert_int_equal(steps, 3);
        ddp_join_destroy(join);
        ddp_join_destroy(NULL);
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
}

typedef struct counter {
    int live, total, fail_at;
} counter;

static void *counting_alloc(size_t size_bytes, void *user) {
    counter *c = (counter *)user;
    if (c->fail_at > 0 && c->total + 1 == c->fail_at) {
        c->total++;
        return NULL;
    }
    c->total++;
    c->live++;
    return malloc(size_bytes);
}

static void counting_free(void *memory, void *user) {
    if (memory) ((counter *)user)->live--;
    free(memory);
}

static void steps_allocate_nothing_and_all_is_given_back(void **state) {
    counter count = DDP_ZERO;
    ddp_group_desc group_desc = DDP_ZERO;
    (void)state;
    group_desc.init_method = "self://";
    group_desc.alloc_fn = counting_alloc;
    group_desc.free_fn = counting_free;
    group_desc.user = &count;
    for (int fail_at = 0; fail_at < 12; fail_at++) { /* also with each allocation failing in turn */
        model m;
        ddp_reducer_desc desc;
        ddp_reducer *reducer = NULL;
        ddp_accumulator *accumulator = NULL;
        ddp_accumulator_desc accumulate;
        int after_first = 0, before, base;
        ddp_result result;
        model_open(&m);
        ddp_group_destroy(m.group);
        memset(&count, 0, sizeof count);
        assert_int_equal(ddp_group_create(&m.group, &group_desc), DDP_OK);
        before = count.live;
        base = count.total;
        count.fail_at = fail_at ? base + fail_at : 0;
        for (int i = 0; i < 8; i++) model_add(&m, DDP_F32, 10, 30 + i);
        desc = model_desc(&m);
        desc.micro_batch_count = 4;
        result = ddp_reducer_create(&reducer, m.group, &desc);
        if (result == DDP_OK) {
            accumulate = accumulator_desc(&m, reducer, 4);
            result = ddp_accumulator_create(&accumulator, m.group, &accumulate);
        }
        if (fail_at == 0) assert_int_equal(result, DDP_OK);
        if (result != DDP_OK) assert_int_equal(result, DDP_ERR_NO_MEMORY);
        for (int step = 0; step < 4 && result == DDP_OK; step++) {
            for (int b = 0; b < 4; b++) {
                for (int i = 7; i >= 0; i--) assert_int_equal(ddp_accumulator_ready(accumulator, i), DDP_OK);
                assert_int_equal(ddp_accumulator_next(accumulator, NULL), DDP_OK);
            }
            assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
            if (step == 0) after_first = count.total;
        }
        if (result == DDP_OK) assert_int_equal(count.total, after_first);
        ddp_accumulator_destroy(accumulator);
        ddp_reducer_destroy(reducer);
        assert_int_equal(count.live, before);
        ddp_group_destroy(m.group);
        m.group = NULL;
        model_close(&m);
    }
}

static void empty_and_scalar_parameters_are_fine(void **state) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *reducer;
    float norm = 0;
    (void)state;
    model_open(&m);
    model_add(&m, DDP_F32, 0, 4)->value.data = NULL;
    model_add(&m, DDP_F32, 1, 1)->value.ndim = 0;
    model_add(&m, DDP_F32, 5, 0);
    desc = model_desc(&m);
    desc.micro_batch_count = 2;
    reducer = model_reducer(&m, &desc);
    param_grad(&m.params[1])[0] = 3;
    step_all(&m, reducer);
    step_all(&m, reducer);
    assert_true(param_grad(&m.params[1])[0] == 0.75f);
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, 0.5f, &norm), DDP_OK);
    assert_true(norm == 0.75f && param_grad(&m.params[1])[0] == 0.75f * (0.5f / 0.75f));
    ddp_reducer_destroy(reducer);
    model_close(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(null_gradients_are_placed_in_reverse_order_per_dtype),
        cmocka_unit_test(gradient_dtype_may_differ_from_the_value),
        cmocka_unit_test(every_bad_desc_is_refused_in_words),
        cmocka_unit_test(buckets_follow_the_rule_and_then_the_ready_order),
        cmocka_unit_test(hooks_see_every_gradient_once_and_nothing_else),
        cmocka_unit_test(a_failing_hook_is_named),
        cmocka_unit_test(one_rank_only_divides_once),
        cmocka_unit_test(misuse_of_a_step_is_named_and_harmless),
        cmocka_unit_test(no_sync_leaves_gradients_alone),
        cmocka_unit_test(unused_parameters_get_zeros_and_are_reported),
        cmocka_unit_test(static_graph_does_not_wait_for_what_the_first_step_left_out),
        cmocka_unit_test(uses_of_a_tied_parameter_add_up_in_the_first),
        cmocka_unit_test(clipping_matches_long_double),
        cmocka_unit_test(clipping_leaves_what_is_not_finite),
        cmocka_unit_test(accumulation_is_the_tree_for_any_count),
        cmocka_unit_test(misuse_of_an_accumulator_is_named),
        cmocka_unit_test(join_on_one_rank_ends_when_the_batches_do),
        cmocka_unit_test(steps_allocate_nothing_and_all_is_given_back),
        cmocka_unit_test(empty_and_scalar_parameters_are_fine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

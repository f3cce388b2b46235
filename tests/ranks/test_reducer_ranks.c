/*  test_reducer_ranks.c - the reducer, the accumulator and the join over several ranks: every average bit for
    bit against the reference tree, whatever the layout, buckets or order of readiness; and every way for
    ranks to disagree.

    test_reducer_ranks BACKEND [CASE], see support/ranks.h */
#include "ddp.h"
#include "../support/ranks.h"

#include <math.h>

enum { PARAMS = 12, ELEMENTS_MAX = 30000 };

static ranks_mode run_mode;

//== a model with test gradients ============================================================

/* The location of gradients. */
typedef enum layout { PLACED, FORWARD, BACKWARD, SCATTERED, PER_RANK, LAYOUTS } layout;

typedef struct model {
    ddp_group *group;
    ddp_param params[PARAMS];
    char names[PARAMS][16];
    int count;
    unsigned char *values, *grads;
    size_t value_bytes;
} model;

static size_t param_elements(const ddp_param *param) { return (size_t)ddp_tensor_count(&param->value); }

static void model_open(model *m, ddp_group *group, int count) {
    memset(m, 0, sizeof *m);
    m->group = group;
    m->count = count;
    m->values = (unsigned char *)calloc(PARAMS * ELEMENTS_MAX, 8);
    m->grads = (unsigned char *)calloc(PARAMS * (ELEMENTS_MAX + 64), 8);
    for (int i = 0; i < count; i++) {
        static const int64_t rows[PARAMS] = {3, 17, 1, 100, 64, 5, 150, 2, 31, 1, 77, 8},
                             columns[PARAMS] = {5, 1, 1, 200, 16, 3, 200, 7, 33, 1, 13, 250};
        ddp_tensor *value = &m->params[i].value;
        snprintf(m->names[i], sizeof m->names[i], "p%d", i);
        m->params[i].name = m->names[i];
        value->dtype = DDP_F32;
        value->ndim = 2;
        value->shape[0] = rows[i];
        value->shape[1] = columns[i];
        value->data = m->values + m->value_bytes;
        m->value_bytes += param_elements(&m->params[i]) * 8;
    }
}

static void model_close(model *m) {
    free(m->values);
    free(m->grads);
}

static void model_mixed_dtypes(model *m) {
    static const ddp_dtype dtypes[4] = {DDP_F32, DDP_BF16, DDP_F64, DDP_F16};
    for (int i = 0; i < m->count; i++) m->params[i].value.dtype = dtypes[i * 7 / 3 % 4];
}

static void model_lay_out(model *m, layout how) {
    size_t at = 0;
    int rank = ddp_rank(m->group);
    if (how == PER_RANK) how = rank == 0 ? FORWARD : rank == 1 ? BACKWARD : SCATTERED;
    for (int k = 0; k < m->count; k++) {
        ddp_param *param = &m->params[how == BACKWARD ? m->count - 1 - k : k];
        size_t size = ddp_dtype_size(param->value.dtype);
        param->grad.data = NULL;
        if (how == PLACED) continue;
        at = (at + size - 1) / size * size;
        param->grad.data = m->grads + at;
        at += param_elements(param) * size;
        if (how == SCATTERED) at += 24;
    }
}

static ddp_reducer_desc model_desc(model *m) {
    ddp_reducer_desc desc = DDP_ZERO;
    desc.params = m->params;
    desc.param_count = m->count;
    return desc;
}

static ddp_reducer_desc bucket_per_param_desc(model *m) {
    ddp_reducer_desc desc = model_desc(m);
    desc.first_bucket_bytes = desc.bucket_cap_bytes = 1;
    return desc;
}

static ranks_data param_data(const model *m, int param, int step) {
    ranks_data data;
    data.dtype = m->params[param].grad.dtype ? m->params[param].grad.dtype : m->params[param].value.dtype;
    data.seed = (uint64_t)(param * 1000003 + step * 7 + 1);
    data.specials = 0;
    return data;
}

static void fill_param(model *m, int param, int step) {
    ranks_data data = param_data(m, param, step);
    ranks_fill(m->params[param].grad.data, &data, ddp_rank(m->group), 0, param_elements(&m->params[param]));
}

static uint32_t random_next(uint32_t *state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

/* Every rank has its own order. */
static void shuffle(int *order, int count, uint32_t seed) {
    for (int i = 0; i < count; i++) order[i] = count - 1 - i;
    for (int i = 0; i < count && seed; i++) {
        int j = i + (int)(random_next(&seed) % (uint32_t)(count - i)), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

/* The tree over ranks, then one division. */
static ddp_result check_param(model *m, int param, int step, uint64_t divisor) {
    ranks_data data = param_data(m, param, step);
    size_t size = ranks_dtype_size(data.dtype), count = param_elements(&m->params[param]);
    void *want = malloc(count * size + 1), *have = m->params[param].grad.data;
    ranks_reduce(want, &data, DDP_OP_AVG, ddp_world_size(m->group), divisor, 0, count);
    for (size_t k = 0; k < count && memcmp(have, want, count * size) != 0; k++)
        RANKS_CHECK(m->group, ranks_load(have, k, size) == ranks_load(want, k, size),
                    "parameter %d (%s) element %zu step %d: have %llx, want %llx", param,
                    ddp_dtype_name(data.dtype), k, step, (unsigned long long)ranks_load(have, k, size),
                    (unsigned long long)ranks_load(want, k, size));
    free(want);
    return DDP_OK;
}

/* One step in this rank's order of readiness, with checks. */
static ddp_result checked_step(model *m, ddp_reducer *reducer, int step, uint32_t seed, uint64_t divisor) {
    int order[PARAMS];
    shuffle(order, m->count, seed);
    for (int k = 0; k < m->count; k++) {
        fill_param(m, order[k], step);
        RANKS_OK(m->group, ddp_reducer_ready(reducer, order[k]));
    }
    RANKS_OK(m->group, ddp_reducer_wait(reducer));
    for (int i = 0; i < m->count; i++) {
        ddp_result result = check_param(m, i, step, divisor);
        if (result != DDP_OK) return result;
    }
    return DDP_OK;
}

#define PASS(call)                                     \
    do {                                               \
        ddp_result pass_result = (call);               \
        if (pass_result != DDP_OK) return pass_result; \
    } while (0)

//== averages ===============================================================================

static ddp_result sum_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    const ddp_tensor all = {bucket->data, bucket->dtype, 1, {(int64_t)bucket->count}};
    ddp_result result = ddp_all_reduce(group, bucket->data, bucket->data, bucket->count, bucket->dtype,
                                       DDP_OP_SUM, NULL);
    (void)user;
    if (result == DDP_OK) ddp_group_device(group)->divide(&all, 1, bucket->divisor);
    return result;
}

static ddp_result averages(ddp_group *group, void *user) {
    static const size_t limits[3][2] = {{0, 0}, {1, 1}, {3000, 90000}};
    (void)user;
    for (int how = 0; how < LAYOUTS; how++)
        for (int round = 0; round < 6; round++) {
            model m;
            ddp_reducer *reducer;
            ddp_reducer_desc desc;
            ddp_reducer_stats stats = DDP_ZERO;
            int hooked = round == 5; /* a hook that adds 16-bit gradients would round twice: f32 only */
            model_open(&m, group, PARAMS);
            if (round % 2 == 0) model_mixed_dtypes(&m);
            model_lay_out(&m, (layout)how);
            desc = model_desc(&m);
            desc.first_bucket_bytes = limits[round % 3][0];
            desc.bucket_cap_bytes = limits[round % 3][1];
            desc.micro_batch_count = round == 4 ? 3 : 0;
            if (hooked) desc.hook = sum_hook;
            RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
            for (int step = 0; step < 3; step++)
                PASS(checked_step(&m, reducer, step, (uint32_t)(round * 100 + ddp_rank(group) * 10 + step),
                                  (uint64_t)ddp_world_size(group) * (round == 4 ? 3 : 1)));
            RANKS_OK(group, ddp_reducer_get_stats(reducer, &stats));
            RANKS_CHECK(group, stats.steps == 3 && stats.rebuilt == 1, "steps=%d rebuilt=%d",
                        (int)stats.steps, stats.rebuilt);
            RANKS_CHECK(group, ddp_world_size(group) == 1 || stats.bytes_reduced >= stats.gradient_bytes,
                        "%zu of %zu", stats.bytes_reduced, stats.gradient_bytes);
            RANKS_CHECK(group,
                        stats.overlap >= 0 && stats.overlap <= 1
                            && stats.total_wait_seconds >= stats.wait_seconds,
                        "overlap %g", stats.overlap);
            RANKS_CHECK(group,
                        ddp_world_size(group) == 1
                            || (stats.comm_seconds > 0 && stats.total_comm_seconds > stats.comm_seconds),
                        "%g s", stats.comm_seconds);
            RANKS_CHECK(group,
                        ddp_world_size(group) > 1
                            || (stats.overlap == 0 && (round >= 4 || stats.total_comm_seconds == 0)),
                        "%g s alone", stats.total_comm_seconds);
            RANKS_CHECK(group, how != PLACED || round != 0 || stats.bytes_copied == 0,
                        "one range per bucket was copied: %zu bytes", stats.bytes_copied);
            ddp_reducer_destroy(reducer);
            model_close(&m);
        }
    return DDP_OK;
}

/* Casts once, adds in f32, divides, rounds once. */
static ddp_result sixteen_bit_communication(ddp_group *group, void *user) {
    int w = ddp_world_size(group);
    (void)user;
    for (int which = 0; which < 2; which++) {
        model m;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        ddp_reducer_stats stats = DDP_ZERO;
        model_open(&m, group, 6);
        model_lay_out(&m, which ? FORWARD : PLACED);
        desc = model_desc(&m);
        desc.comm_dtype = which ? DDP_F16 : DDP_BF16;
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        for (int i = 5; i >= 0; i--) {
            fill_param(&m, i, 9);
            RANKS_OK(group, ddp_reducer_ready(reducer, i));
        }
        RANKS_OK(group, ddp_reducer_wait(reducer));
        for (int i = 0; i < 6 && w > 1; i++)
            for (size_t k = 0; k < param_elements(&m.params[i]); k++) {
                ranks_data data = param_data(&m, i, 9);
                float parts[4] = {0, 0, 0, 0}, sum, have = ((const float *)m.params[i].grad.data)[k];
                for (int r = 0; r < w; r++) {
                    float value = ranks_widen(DDP_F32, ranks_bits(&data, r, k)).f;
                    parts[r] = which ? ranks_f16_to_f32(ranks_f32_to_f16(value))
                                     : ranks_bf16_to_f32(ranks_f32_to_bf16(value));
                }
                sum = parts[0] + parts[1];
                if (w == 3) sum += parts[2];
                if (w == 4) sum += parts[2] + parts[3];
                sum /= (float)w;
                sum = which ? ranks_f16_to_f32(ranks_f32_to_f16(sum))
                            : ranks_bf16_to_f32(ranks_f32_to_bf16(sum));
                RANKS_CHECK(group, have == sum, "parameter %d element %zu: have %a, want %a", i, k,
                            (double)have, (double)sum);
            }
        RANKS_OK(group, ddp_reducer_get_stats(reducer, &stats));
        RANKS_CHECK(group, w == 1 || stats.bytes_reduced == stats.gradient_bytes / 2, "%zu",
                    stats.bytes_reduced);
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    return DDP_OK;
}

static ddp_result values_and_buffers_come_from_rank_0(ddp_group *group, void *user) {
    (void)user;
    for (int skip = 0; skip < 2; skip++) {
        model m;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        ddp_tensor buffers[11];
        int64_t counter[2];
        unsigned char *bytes = (unsigned char *)malloc(160000),
                      first = (unsigned char)(skip ? ddp_rank(group) + 1 : 1);
        model_open(&m, group, PARAMS);
        m.params[9].value.data = m.params[2].value.data; /* a second use */
        memset(m.values, ddp_rank(group) + 1, PARAMS * ELEMENTS_MAX * 8);
        memset(bytes, ddp_rank(group) + 1, 160000);
        memset(buffers, 0, sizeof buffers);
        counter[0] = counter[1] = ddp_rank(group) + 1;
        buffers[0].data = counter;
        buffers[0].dtype = DDP_I64;
        buffers[0].ndim = 1;
        buffers[0].shape[0] = 2;
        buffers[1].data = bytes;
        buffers[1].dtype = DDP_U8;
        buffers[1].ndim = 2;
        buffers[1].shape[0] = 400;
        buffers[1].shape[1] = 100;
        buffers[2].dtype = DDP_F32;
        buffers[2].ndim = 1;           /* empty */
        for (int i = 3; i < 11; i++) { /* 8 small ones, too many for one broadcast */
            buffers[i].data = bytes + 40000 + (i - 3) * 15000;
            buffers[i].dtype = DDP_I8;
            buffers[i].ndim = 1;
            buffers[i].shape[0] = 15000;
        }
        desc = model_desc(&m);
        desc.buffers = buffers;
        desc.buffer_count = 11;
        desc.skip_initial_broadcast = skip;
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        for (int i = 0; i < PARAMS; i++)
            for (size_t k = 0; k < param_elements(&m.params[i]) * 4; k++)
                RANKS_CHECK(group, ((unsigned char *)m.params[i].value.data)[k] == first,
                            "parameter %d byte %zu", i, k);
        RANKS_CHECK(group, counter[0] == (skip ? ddp_rank(group) + 1 : 1) && counter[1] == counter[0], "%d",
                    (int)counter[0]);
        for (int i = 0; i < 160000; i++)
            RANKS_CHECK(group, bytes[i] == first, "byte %d of the buffers is %d", i, bytes[i]);
        ddp_reducer_destroy(reducer);
        free(bytes);
        model_close(&m);
    }
    return DDP_OK;
}

/* Buffers that each rank changes in a step: 7 bytes, none, 5 floats. */
typedef struct buffers {
    unsigned char bytes[7];
    float numbers[5];
    ddp_tensor tensors[3];
} buffers;

static void buffers_set(buffers *b, int value) {
    memset(b->bytes, value, sizeof b->bytes);
    for (int i = 0; i < 5; i++) b->numbers[i] = (float)value;
}

static void buffers_open(buffers *b, ddp_reducer_desc *desc, int count) {
    const ddp_tensor tensors[3] = {
        {b->bytes, DDP_U8, 1, {7}}, {NULL, DDP_F32, 1, {0}}, {b->numbers, DDP_F32, 1, {5}}};
    memcpy(b->tensors, tensors, sizeof tensors);
    buffers_set(b, 0);
    desc->buffers = b->tensors;
    desc->buffer_count = count;
}

/* The first `count` buffers have the value. */
static int buffers_are(const buffers *b, int count, int value) {
    for (int i = 0; i < 7; i++)
        if (b->bytes[i] != value) return 0;
    for (int i = 0; i < 5 && count == 3; i++)
        if (b->numbers[i] != (float)value) return 0;
    return 1;
}

/* Each rank changes its buffers; then all have those of the root. One buffer is sent without packing. */
static ddp_result buffers_follow_the_root(ddp_group *group, void *user) {
    int w = ddp_world_size(group), rank = ddp_rank(group);
    (void)user;
    for (int count = 0; count <= 3; count++) {
        model m;
        buffers b;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        model_open(&m, group, 3);
        desc = model_desc(&m);
        buffers_open(&b, &desc, count);
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        memset(b.tensors, 0, sizeof b.tensors); /* create has copied them */
        for (int step = 0; step < 4; step++) {
            int own = 1 + rank + 10 * step, of_root = 1 + step % w + 10 * step;
            buffers_set(&b, own);
            RANKS_OK(group, ddp_reducer_no_sync(reducer, 1));
            RANKS_OK(group, ddp_reducer_sync_buffers(reducer, step % w));
            RANKS_CHECK(group, buffers_are(&b, 3, own), "no_sync: step %d", step);
            RANKS_OK(group, ddp_reducer_no_sync(reducer, 0));
            RANKS_OK(group, ddp_reducer_sync_buffers(reducer, step % w));
            RANKS_CHECK(group, buffers_are(&b, count, count ? of_root : own), "%d buffers: step %d", count,
                        step);
            PASS(checked_step(&m, reducer, step, 0, (uint64_t)w));
        }
        for (int root = -1; root <= w; root += w + 1)
            RANKS_CHECK(group,
                        ddp_reducer_sync_buffers(reducer, root) == DDP_ERR_INVALID
                            && strstr(ddp_last_error(), "ddp_reducer_sync_buffers")
                            && strstr(ddp_last_error(), "is not a rank of the group"),
                        "%s", ddp_last_error());
        RANKS_OK(group, ddp_reducer_ready(reducer, 2));
        RANKS_CHECK(group,
                    ddp_reducer_sync_buffers(reducer, 0) == DDP_ERR_INVALID
                        && strstr(ddp_last_error(), "1 parameters of this step are already ready"),
                    "%s", ddp_last_error());
        for (int i = 1; i >= 0; i--) RANKS_OK(group, ddp_reducer_ready(reducer, i));
        RANKS_OK(group, ddp_reducer_wait(reducer));
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    RANKS_CHECK(group, ddp_reducer_sync_buffers(NULL, 0) == DDP_ERR_INVALID, "%s", ddp_last_error());
    return DDP_OK;
}

//== order and use ==========================================================================

typedef struct seen {
    int count;
    size_t elements[PARAMS];
} seen;

static ddp_result record_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    seen *s = (seen *)user;
    (void)group;
    if (bucket->index == 0) s->count = 0;
    s->elements[s->count++] = bucket->count;
    return DDP_OK;
}

/* One parameter per bucket: the hook sees the order of the buckets. */
static ddp_result buckets_follow_rank_0(ddp_group *group, void *user) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    seen s;
    int order[PARAMS], of_rank_0[PARAMS];
    (void)user;
    model_open(&m, group, PARAMS);
    desc = bucket_per_param_desc(&m);
    desc.hook = record_hook;
    desc.hook_user = &s;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    shuffle(of_rank_0, PARAMS, 100);
    for (int step = 0; step < 3; step++) {
        shuffle(order, PARAMS, (uint32_t)(100 + ddp_rank(group) + 10 * step));
        for (int i = 0; i < PARAMS; i++) RANKS_OK(group, ddp_reducer_ready(reducer, order[i]));
        RANKS_OK(group, ddp_reducer_wait(reducer));
        RANKS_CHECK(group, s.count == PARAMS, "%d buckets", s.count);
        for (int i = 0; i < PARAMS; i++) {
            size_t want = param_elements(&m.params[step == 0 ? PARAMS - 1 - i : of_rank_0[i]]);
            RANKS_CHECK(group, s.elements[i] == want, "step %d bucket %d: %zu elements, want %zu", step, i,
                        s.elements[i], want);
        }
    }
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

static ddp_result unused_is_zero_here_and_reported_when_nobody_used_it(ddp_group *group, void *user) {
    int w = ddp_world_size(group), rank = ddp_rank(group);
    (void)user;
    for (int fixed = 0; fixed < 2; fixed++) { /* find_unused, then static_graph */
        model m;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        model_open(&m, group, 5);
        desc = model_desc(&m);
        desc.first_bucket_bytes = desc.bucket_cap_bytes = 100;
        if (fixed)
            desc.static_graph = 1;
        else
            desc.find_unused = 1;
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        for (int step = 0; step < 4; step++) {
            /* nobody: a parameter used by no rank; somebody: one used only by the last rank. */
            int nobody = fixed ? 2 : step, somebody = fixed ? 3 : (step + 1) % 5;
            for (int i = 0; i < 5; i++) {
                float *grad = (float *)m.params[i].grad.data;
                if (i == nobody || (i == somebody && rank != w - 1)) continue;
                for (size_t k = 0; k < param_elements(&m.params[i]); k++) grad[k] = (float)(rank + 1 + i);
                RANKS_OK(group, ddp_reducer_ready(reducer, i));
            }
            RANKS_OK(group, ddp_reducer_wait(reducer));
            for (int i = 0; i < 5; i++) {
                float want = i == nobody     ? 0
                             : i == somebody ? (float)(w + i)
                                             : (float)(w * (w + 1) / 2 + w * i);
                const float *grad = (const float *)m.params[i].grad.data;
                RANKS_CHECK(group, grad[0] == want / (float)w, "step %d parameter %d: have %g, want %g", step,
                            i, (double)grad[0], (double)(want / (float)w));
                RANKS_CHECK(group, ddp_reducer_is_unused(reducer, i) == (i == nobody), "step %d parameter %d",
                            step, i);
            }
            if (!fixed) continue;
            /* numbers of this rank, where no gradient is reduced: they are not part of the norm */
            float *left = (float *)m.params[nobody].grad.data, norm, least;
            *left = (float)(rank + 1) * 100;
            RANKS_OK(group, ddp_reducer_clip_grad_norm(reducer, 0.5f, &norm));
            RANKS_OK(group, ddp_all_reduce(group, &norm, &least, 1, DDP_F32, DDP_OP_MIN, NULL));
            RANKS_CHECK(group, norm == least && *left == (float)(rank + 1) * 100,
                        "step %d: the norm is %g, on another rank %g; an unused gradient became %g", step,
                        (double)norm, (double)least, (double)*left);
            *left = 0;
        }
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    return DDP_OK;
}

static ddp_result no_sync_then_sync(ddp_group *group, void *user) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    (void)user;
    model_open(&m, group, 4);
    desc = model_desc(&m);
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    for (int step = 0; step < 3; step++) {
        RANKS_OK(group, ddp_reducer_no_sync(reducer, 1));
        ((float *)m.params[3].grad.data)[0] = (float)(ddp_rank(group) + 10);
        RANKS_OK(group, ddp_reducer_ready(reducer, 3));
        RANKS_OK(group, ddp_reducer_wait(reducer));
        RANKS_CHECK(group, ((float *)m.params[3].grad.data)[0] == (float)(ddp_rank(group) + 10), "changed");
        RANKS_OK(group, ddp_reducer_no_sync(reducer, 0));
        PASS(checked_step(&m, reducer, step, 0, (uint64_t)ddp_world_size(group)));
    }
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

/* fixed: static_graph, and no rank uses the first use of the parameter, whose gradient is still that of the
   other uses. */
static ddp_result tied_uses(ddp_group *group, int fixed) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    int w = ddp_world_size(group);
    model_open(&m, group, 6);
    for (int i = 2; i < 6; i += 3) { /* 2 and 5 are uses of 0, all of one shape */
        m.params[i].value = m.params[0].value;
    }
    desc = model_desc(&m);
    desc.static_graph = fixed;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    for (int step = 0; step < 3; step++) {
        for (int i = 5; i >= fixed; i--) {
            fill_param(&m, i, step);
            RANKS_OK(group, ddp_reducer_ready(reducer, i));
        }
        RANKS_OK(group, ddp_reducer_wait(reducer));
        for (size_t k = 0; k < param_elements(&m.params[0]); k++) {
            float want = 0;
            for (int i = fixed; i < 6; i++) {
                ranks_data data = param_data(&m, i, step);
                float part;
                ranks_reduce(&part, &data, DDP_OP_AVG, w, (uint64_t)w, k, 1);
                if (i == 0)
                    want = part;
                else if (i == 2 || i == 5)
                    want += part;
            }
            RANKS_CHECK(group, ((float *)m.params[0].grad.data)[k] == want,
                        "static_graph=%d step %d element %zu", fixed, step, k);
        }
        PASS(check_param(&m, 1, step, (uint64_t)w));
        PASS(check_param(&m, 4, step, (uint64_t)w));
        float norm;
        double squares = 0;
        for (int i = 0; i < 5; i++)
            for (size_t k = 0; k < param_elements(&m.params[i]) && i != 2; k++) {
                double g = (double)((const float *)m.params[i].grad.data)[k];
                squares += g * g;
            }
        RANKS_OK(group, ddp_reducer_clip_grad_norm(reducer, 1e30f, &norm));
        RANKS_CHECK(group, fabs((double)norm / sqrt(squares) - 1) < 1e-5,
                    "static_graph=%d step %d: norm %g, not %g", fixed, step, (double)norm, sqrt(squares));
    }
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

static ddp_result tied_uses_add_up_after_the_average(ddp_group *group, void *user) {
    (void)user;
    PASS(tied_uses(group, 0));
    return tied_uses(group, 1);
}

//== disagreements ==========================================================================

#define EXPECT_ERROR(group, call, code, ...)                                                           \
    do {                                                                                               \
        const char *expect_words[] = {__VA_ARGS__};                                                    \
        ddp_result expect_result = (call);                                                             \
        RANKS_CHECK(group, expect_result == (code), "%s: %s", ddp_result_name(expect_result),          \
                    ddp_last_error());                                                                 \
        for (size_t expect_i = 0; expect_i < sizeof expect_words / sizeof expect_words[0]; expect_i++) \
            RANKS_CHECK(group, strstr(ddp_last_error(), expect_words[expect_i]), "'%s' is not in: %s", \
                        expect_words[expect_i], ddp_last_error());                                     \
    } while (0)

static ddp_result a_missing_parameter_is_named_everywhere(ddp_group *group, void *user) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    int w = ddp_world_size(group), rank = ddp_rank(group);
    char culprit[64];
    (void)user;
    snprintf(culprit, sizeof culprit, "never became ready on rank %d", w - 1);
    model_open(&m, group, 6);
    desc = model_desc(&m);
    desc.first_bucket_bytes = desc.bucket_cap_bytes = 100;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    for (int round = 0; round < 3; round++) {
        for (int i = 5; i >= 0; i--)
            if (rank != w - 1 || i != 2 * round) RANKS_OK(group, ddp_reducer_ready(reducer, i));
        EXPECT_ERROR(group, ddp_reducer_wait(reducer), DDP_ERR_INVALID,
                     round == 0   ? "'p0'"
                     : round == 1 ? "'p2'"
                                  : "'p4'",
                     culprit);
        if (round == 1) PASS(checked_step(&m, reducer, round, 0, (uint64_t)w)); /* the group is whole */
    }
    /* A wait without any ready is the same mistake; a second ready is an error of only this rank. */
    if (rank != w - 1)
        for (int i = 0; i < 6; i++) RANKS_OK(group, ddp_reducer_ready(reducer, i));
    EXPECT_ERROR(group, ddp_reducer_wait(reducer), DDP_ERR_INVALID, "parameter 0 'p0'", culprit);
    for (int i = 0; i < 6; i++) {
        fill_param(&m, i, 50);
        RANKS_OK(group, ddp_reducer_ready(reducer, i));
        if (rank == 0)
            EXPECT_ERROR(group, ddp_reducer_ready(reducer, i), DDP_ERR_INVALID, "is ready twice", m.names[i]);
    }
    RANKS_OK(group, ddp_reducer_wait(reducer));
    for (int i = 0; i < 6; i++) PASS(check_param(&m, i, 50, (uint64_t)w));
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

typedef enum difference {
    NAME,
    LATE_NAME,
    VALUE_DTYPE,
    GRAD_DTYPE,
    SHAPE,
    NDIM,
    ORDER,
    FEWER,
    MORE,
    TIED,
    GIVEN,
    CAP,
    FIRST,
    MICRO,
    PER_TOKEN,
    UNUSED_FLAG,
    STATIC_FLAG,
    COMM,
    HOOK,
    SKIP,
    BUFFER_SHAPE,
    BUFFER_COUNT,
    BAD_ARGUMENT,
    BAD_OUT,
    BAD_DESC,
    DIFFERENCES
} difference;

static const struct {
    const char *words[3];
    ddp_result code;
} differences[DIFFERENCES] = {
    {{"rank 0 parameter 0", "'p0'", "'other'"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 9", "'p9'", "'other'"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 3", "f32 [100,200]", "f64 [100,200]"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 3", "gradient f32", "gradient bf16"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 3", "f32 [100,200]", "f32 [200,100]"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 3", "f32 [100,200]", "f32 [100,200,1]"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 4", "'p4' f32 [64,16]", "'p5' f32 [5,3]"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 ", "no parameter 9", "'p9'"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 ", "no parameter 10", "'p10'"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 9", "tied to parameter 2", "'p9'"}, DDP_ERR_MISMATCH},
    {{"rank 0 parameter 6", "NULL", "given"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 bucket_cap_bytes=", " bucket_cap_bytes=26214400", " bucket_cap_bytes=1000"},
     DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 first_bucket_bytes=", " first_bucket_bytes=1048576", " first_bucket_bytes=1000"},
     DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 micro_batch_count=", " micro_batch_count=1", " micro_batch_count=2"},
     DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 per_token=", " per_token=0", " per_token=1"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 find_unused=", " find_unused=0", " find_unused=1"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 static_graph=", " static_graph=0", " static_graph=1"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 comm_dtype=", " comm_dtype=0", " comm_dtype="}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 hook=", " hook=0", " hook=1"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 skip_initial_broadcast=", " skip_initial_broadcast=0",
      " skip_initial_broadcast=1"},
     DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 buffer 1 f32", "f32 [4]", "f32 [5]"}, DDP_ERR_MISMATCH},
    {{"ranks differ: rank 0 ", "buffer 1 f32 [4]", "no buffer 1"}, DDP_ERR_MISMATCH},
    {{"parameter 3 'p3'", "value.data is NULL", "set it to"}, DDP_ERR_INVALID},
    {{"out is NULL", "out is NULL", "out is NULL"}, DDP_ERR_INVALID},
    {{"desc is NULL", "desc is NULL", "desc is NULL"}, DDP_ERR_INVALID},
};

/* Makes the odd rank different. */
static void make_different(model *m, ddp_reducer_desc *desc, difference which) {
    ddp_param swap;
    switch (which) {
    case NAME: m->params[0].name = "other"; break;
    case LATE_NAME: m->params[9].name = "other"; break;
    case VALUE_DTYPE:
        m->params[3].value.dtype = DDP_F64;
        m->params[3].grad.dtype = DDP_F32;
        break;
    case GRAD_DTYPE: m->params[3].grad.dtype = DDP_BF16; break;
    case SHAPE:
        m->params[3].value.shape[0] = 200;
        m->params[3].value.shape[1] = 100;
        break;
    case NDIM:
        m->params[3].value.ndim = 3;
        m->params[3].value.shape[2] = 1;
        break;
    case ORDER:
        swap = m->params[4];
        m->params[4] = m->params[5];
        m->params[5] = swap;
        break;
    case FEWER: desc->param_count = 9; break;
    case MORE: desc->param_count = 11; break;
    case TIED: m->params[9].value.data = m->params[2].value.data; break;
    case GIVEN: m->params[6].grad.data = m->grads; break;
    case CAP: desc->bucket_cap_bytes = 1000; break;
    case FIRST: desc->first_bucket_bytes = 1000; break;
    case MICRO: desc->micro_batch_count = 2; break;
    case PER_TOKEN: desc->per_token = 1; break;
    case UNUSED_FLAG: desc->find_unused = 1; break;
    case STATIC_FLAG: desc->static_graph = 1; break;
    case COMM: desc->comm_dtype = DDP_BF16; break;
    case HOOK: desc->hook = sum_hook; break;
    case SKIP: desc->skip_initial_broadcast = 1; break;
    case BUFFER_COUNT: desc->buffer_count = 1; break;
    case BAD_ARGUMENT: m->params[3].value.data = NULL; break;
    default: break;
    }
}

static ddp_result every_difference_is_named_on_every_rank(ddp_group *group, void *user) {
    int w = ddp_world_size(group), rank = ddp_rank(group);
    (void)user;
    if (w == 1) return DDP_OK;
    for (int which = 0; which < DIFFERENCES; which++)
        for (int odd = 0; odd < w; odd += w - 1) {
            model m, untouched;
            ddp_reducer *reducer = NULL;
            ddp_reducer_desc desc;
            ddp_tensor buffers[2] = {DDP_ZERO, DDP_ZERO};
            float buffer_data[8] = {0};
            char name[32];
            model_open(&m, group, PARAMS);
            m.count = 10;
            for (int i = 0; i < 2; i++) {
                buffers[i].data = buffer_data;
                buffers[i].dtype = DDP_F32;
                buffers[i].ndim = 1;
                buffers[i].shape[0] = i == 1 && which == BUFFER_SHAPE && rank == odd ? 5 : 4;
            }
            desc = model_desc(&m);
            desc.buffers = buffers;
            desc.buffer_count = 2;
            untouched = m;
            if (rank == odd) make_different(&m, &desc, (difference)which);
            snprintf(name, sizeof name, "rank %d", odd);
            EXPECT_ERROR(group,
                         ddp_reducer_create(which == BAD_OUT && rank == odd ? NULL : &reducer, group,
                                            which == BAD_DESC && rank == odd ? NULL : &desc),
                         differences[which].code, differences[which].words[0], differences[which].words[1],
                         differences[which].words[2],
                         differences[which].code == DDP_ERR_MISMATCH || rank != odd ? name
                                                                                    : "ddp_reducer_create");
            RANKS_CHECK(group, reducer == NULL, "difference %d", which);
            for (int i = 0; i < 10; i++)
                RANKS_CHECK(group, which == GIVEN || m.params[i].grad.data == NULL,
                            "difference %d filled in parameter %d", which, i);
            /* Afterwards everything is as before the call. */
            memcpy(m.params, untouched.params, sizeof m.params);
            for (int i = 0; i < 10; i++) m.params[i].name = m.names[i];
            desc = model_desc(&m);
            RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
            ddp_reducer_destroy(reducer);
            model_close(&m);
        }
    return DDP_OK;
}

static ddp_result odd_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    (void)user;
    if (bucket->index == 1 && ddp_rank(group) == ddp_world_size(group) - 1)
        return ddp_fail(DDP_ERR_CORRUPT, "no more paper");
    return ddp_all_reduce(group, bucket->data, bucket->data, bucket->count, bucket->dtype, DDP_OP_AVG, NULL);
}

static ddp_result a_hook_that_fails_on_one_rank_fails_everywhere(ddp_group *group, void *user) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    ddp_result result = DDP_OK;
    (void)user;
    model_open(&m, group, 6);
    desc = bucket_per_param_desc(&m);
    desc.hook = odd_hook;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    for (int i = 5; i >= 0 && result == DDP_OK; i--) result = ddp_reducer_ready(reducer, i);
    EXPECT_ERROR(group, ddp_reducer_wait(reducer), DDP_ERR_CORRUPT, "no more paper", "bucket 1 of 6");
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

static ddp_reducer *left_behind[8];

/* The last rank is killed between two buckets; the launch must fail, and no rank waits for long. */
static ddp_result a_rank_dies_in_the_middle_of_a_step(ddp_group *group, void *user) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    ddp_result result = DDP_OK;
    (void)user;
    model_open(&m, group, 6);
    desc = bucket_per_param_desc(&m);
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    PASS(checked_step(&m, reducer, 0, 0, (uint64_t)ddp_world_size(group)));
    for (int i = 5; i >= 0 && result == DDP_OK; i--) {
        if (i == 2 && ddp_rank(group) == ddp_world_size(group) - 1) {
            model_close(&m);
            if (run_mode == RANKS_PROCESSES) raise(SIGKILL);
            /* Destroying it is collective; here it stays reachable, for the leak checker. */
            left_behind[ddp_world_size(group)] = reducer;
            return ddp_fail(DDP_ERR_PEER_LOST, "this rank leaves early");
        }
        result = ddp_reducer_ready(reducer, i);
    }
    result = ddp_reducer_wait(reducer);
    RANKS_CHECK(group, result == DDP_ERR_PEER_LOST, "%s: %s", ddp_result_name(result), ddp_last_error());
    result = ddp_reducer_wait(reducer);
    RANKS_CHECK(group, result != DDP_OK, "a later step succeeded");
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_ERR_PEER_LOST;
}

/* Half a step, then the end: destroy waits for the buckets in flight. The last rank is late. When destroy
   returns, the gradients of those buckets are averages. */
static ddp_result destroy_in_the_middle_of_a_step(ddp_group *group, void *user) {
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    (void)user;
    model_open(&m, group, PARAMS);
    model_lay_out(&m, FORWARD);
    desc = bucket_per_param_desc(&m);
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    for (int i = 0; i < PARAMS; i++) fill_param(&m, i, 0);
    if (ddp_rank(group) == ddp_world_size(group) - 1) ranks_sleep_us(50000);
    for (int i = PARAMS - 1; i > 4; i--) RANKS_OK(group, ddp_reducer_ready(reducer, i));
    ddp_reducer_destroy(reducer);
    for (int i = PARAMS - 1; i > 4; i--) {
        ddp_result result = check_param(&m, i, 0, (uint64_t)ddp_world_size(group));
        if (result != DDP_OK) return result;
    }
    RANKS_OK(group, ddp_barrier(group));
    model_close(&m);
    return DDP_OK;
}

//== join ===================================================================================

typedef struct trainer {
    model *m;
    int steps;
    float lr;
} trainer;

static ddp_result plain_step(void *user) {
    trainer *t = (trainer *)user;
    for (int i = 0; i < t->m->count; i++)
        for (size_t k = 0; k < param_elements(&t->m->params[i]); k++)
            ((float *)t->m->params[i].value.data)[k] -= t->lr * ((const float *)t->m->params[i].grad.data)[k];
    t->steps++;
    return DDP_OK;
}

/* Rank r has r + 2 batches. The gradient of step s on rank r is s * 10 + r + 1 everywhere. */
static ddp_result uneven_inputs(ddp_group *group, void *user) {
    int w = ddp_world_size(group), rank = ddp_rank(group);
    (void)user;
    for (int variant = 0; variant < 3; variant++) { /* shadow with a step function; shadow without; stop */
        model m;
        trainer t;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        ddp_join *join;
        ddp_join_desc join_desc = DDP_ZERO;
        float want = 0;
        int last = variant == 2 ? 2 : w + 1;
        model_open(&m, group, 5);
        t.m = &m;
        t.steps = 0;
        t.lr = 0.5f;
        desc = model_desc(&m);
        desc.first_bucket_bytes = desc.bucket_cap_bytes = 1000;
        desc.micro_batch_count = 2;
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        join_desc.reducer = reducer;
        join_desc.mode = variant == 2 ? DDP_JOIN_STOP : DDP_JOIN_SHADOW;
        join_desc.step_fn = variant == 0 ? plain_step : NULL;
        join_desc.user = &t;
        RANKS_OK(group, ddp_join_create(&join, group, &join_desc));
        for (int epoch = 0; epoch < 2; epoch++) { /* a finished join starts over */
            for (int s = 0;; s++) {
                int active = -1, want_active = 0;
                float sum = 0;
                for (int r = 0; r < w; r++)
                    if (s < r + 2) {
                        want_active++;
                        sum += (float)(s * 10 + r + 1);
                    }
                RANKS_OK(group, ddp_join_step(join, s < rank + 2, &active));
                if (!active) break;
                RANKS_CHECK(group, active == want_active && s < last, "step %d: active %d, want %d", s,
                            active, want_active);
                for (int i = 4; i >= 0; i--) {
                    for (size_t k = 0; k < param_elements(&m.params[i]); k++)
                        ((float *)m.params[i].grad.data)[k] = (float)(s * 10 + rank + 1);
                    RANKS_OK(group, ddp_reducer_ready(reducer, i));
                }
                RANKS_OK(group, ddp_reducer_wait(reducer));
                RANKS_CHECK(group, ((float *)m.params[2].grad.data)[0] == sum / (float)(2 * active),
                            "step %d: gradient %g, want %g", s, (double)((float *)m.params[2].grad.data)[0],
                            (double)(sum / (float)(2 * active)));
                RANKS_OK(group, plain_step(&t));
            }
            for (int s = 0; s < last; s++) {
                float sum = 0;
                int active = 0;
                for (int r = 0; r < w; r++)
                    if (s < r + 2) {
                        active++;
                        sum += (float)(s * 10 + r + 1);
                    }
                want -= 0.5f * (sum / (float)(2 * active));
            }
            RANKS_CHECK(group, variant == 1 || t.steps == last * (epoch + 1), "variant %d: %d steps", variant,
                        t.steps);
            for (int i = 0; i < 5; i++)
                for (size_t k = 0; k < param_elements(&m.params[i]); k++)
                    RANKS_CHECK(group, ((float *)m.params[i].value.data)[k] == want,
                                "variant %d parameter %d: %g, want %g", variant, i,
                                (double)((float *)m.params[i].value.data)[k], (double)want);
        }
        PASS(checked_step(&m, reducer, 3, 0, (uint64_t)w * 2)); /* outside a join all ranks count again */
        ddp_join_destroy(join);
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    return DDP_OK;
}

/* Rank r has r + 2 batches, and each step adds r + 1 to its buffers. Before a step all ranks have the buffers
   of the lowest rank with a batch. At the end they have those of the last rank, the only one in the last
   step. */
static ddp_result buffers_of_uneven_inputs(ddp_group *group, void *user) {
    int w = ddp_world_size(group), rank = ddp_rank(group);
    (void)user;
    for (int sync = 0; sync < 2; sync++) {
        model m;
        buffers b;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        ddp_join *join;
        ddp_join_desc join_desc = DDP_ZERO;
        int steps = 0, want = 0, active;
        model_open(&m, group, 3);
        desc = model_desc(&m);
        buffers_open(&b, &desc, 3);
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        join_desc.reducer = reducer;
        join_desc.sync_buffers = sync;
        RANKS_OK(group, ddp_join_create(&join, group, &join_desc));
        for (;; steps++) {
            RANKS_OK(group, ddp_join_step(join, steps < rank + 2, &active));
            if (!active) break;
            if (steps > 0) want += (steps < 2 ? 0 : steps - 1) + 1; /* of the lowest rank with a batch */
            RANKS_CHECK(group, buffers_are(&b, 3, sync ? want : steps * (rank + 1)), "step %d: %g", steps,
                        (double)b.numbers[0]);
            RANKS_CHECK(group,
                        active == w || sync
                            || (ddp_reducer_sync_buffers(reducer, rank) == DDP_ERR_INVALID
                                && strstr(ddp_last_error(), "set ddp_join_desc.sync_buffers instead")),
                        "step %d: %s", steps, ddp_last_error());
            buffers_set(&b, (int)b.numbers[0] + rank + 1);
            for (int i = 2; i >= 0; i--) RANKS_OK(group, ddp_reducer_ready(reducer, i));
            RANKS_OK(group, ddp_reducer_wait(reducer));
        }
        want = sync ? w * (w + 1) / 2 + w : w * (w + 1);
        RANKS_CHECK(group, buffers_are(&b, 3, want), "end: %g, want %d", (double)b.numbers[0], want);
        ddp_join_destroy(join);
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    return DDP_OK;
}

/* A rank that leaves before its first step, with static_graph and find_unused. */
static ddp_result a_rank_without_any_batch(ddp_group *group, void *user) {
    int rank = ddp_rank(group), w = ddp_world_size(group);
    (void)user;
    for (int fixed = 0; fixed < 2; fixed++) {
        model m;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        ddp_join *join;
        ddp_join_desc join_desc = DDP_ZERO;
        model_open(&m, group, 4);
        desc = model_desc(&m);
        if (fixed)
            desc.static_graph = 1;
        else
            desc.find_unused = 1;
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        join_desc.reducer = reducer;
        RANKS_OK(group, ddp_join_create(&join, group, &join_desc));
        for (int epoch = 0; epoch < 2; epoch++)
            for (int s = 0;; s++) {
                int active;
                RANKS_OK(group, ddp_join_step(join, s < 2 && (w == 1 || epoch == 1 || rank != 0), &active));
                if (!active) break;
                for (int i = 3; i >= 0; i--) {
                    if (i == 2) continue;
                    ((float *)m.params[i].grad.data)[0] = (float)(rank + 1);
                    RANKS_OK(group, ddp_reducer_ready(reducer, i));
                }
                RANKS_OK(group, ddp_reducer_wait(reducer));
                RANKS_CHECK(group, ddp_reducer_is_unused(reducer, 2) && !ddp_reducer_is_unused(reducer, 1),
                            "epoch %d", epoch);
                RANKS_CHECK(group,
                            ((float *)m.params[2].grad.data)[0] == 0
                                && ((float *)m.params[1].grad.data)[0] != 0,
                            "epoch %d", epoch);
            }
        ddp_join_destroy(join);
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    return DDP_OK;
}

//== means over tokens ========================================================================

enum { MICRO_BATCHES = 4 }; /* of all ranks */

/* Not inlined: compilers for arm64 fuse a product with the following addition in some places only. */
#define ON_ITS_OWN __attribute__((noinline))
static int tokens_of(int step, int m) { return step == 3 ? 0 : (m * 7 + step * 3) % 5; }
static ON_ITS_OWN double loss_of(int step, int m) { return 0.1 * (m + 1) * tokens_of(step, m) + 1e-9 * step; }
static ON_ITS_OWN float token_gradient(int step, int m, int param, size_t k) {
    return 1.0f / (float)(3 + m + step * 7 + param) + 0.01f * (float)(k % 97);
}

/* One, two and four ranks, each with its block of the same four micro-batches, end a step with the same bits:
   gradients, loss and norm, for any tokens. On three ranks the first four of their micro-batches have tokens.
   Uses of a tied parameter are summed before the division. */
static ddp_result means_are_over_tokens(ddp_group *group, void *user) {
    int w = ddp_world_size(group), rank = ddp_rank(group), per_rank = (MICRO_BATCHES + w - 1) / w;
    (void)user;
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    ddp_accumulator *accumulator;
    ddp_accumulator_desc sums = DDP_ZERO;
    model_open(&m, group, 5);
    m.params[4].value = m.params[1].value; /* tied */
    desc = model_desc(&m);
    desc.per_token = 1;
    desc.first_bucket_bytes = desc.bucket_cap_bytes = 1000;
    desc.micro_batch_count = per_rank;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    sums.params = m.params, sums.param_count = 5, sums.micro_batch_count = per_rank, sums.reducer = reducer;
    RANKS_OK(group, ddp_accumulator_create(&accumulator, group, &sums));
    for (int step = 0; step < 5; step++) {
        ddp_mean loss = DDP_ZERO, whole = DDP_ZERO;
        float want_norm, norm;
        ddp_exact_sum squares = DDP_ZERO;
        for (int n = 0; n < per_rank; n++) {
            int number = rank * per_rank + n, counts = number < MICRO_BATCHES;
            for (int i = 4; i >= 0; i--) {
                for (size_t k = 0; k < param_elements(&m.params[i]); k++)
                    ((float *)m.params[i].grad.data)[k] = counts ? token_gradient(step, number, i, k) : 0;
                RANKS_OK(group, ddp_accumulator_ready(accumulator, i));
            }
            if (counts) ddp_mean_add(&loss, loss_of(step, number), tokens_of(step, number));
            RANKS_OK(group, ddp_accumulator_next(accumulator, NULL));
        }
        RANKS_OK(group, ddp_reducer_wait_mean(reducer, &loss));
        for (int n = 0; n < MICRO_BATCHES; n++) ddp_mean_add(&whole, loss_of(step, n), tokens_of(step, n));
        RANKS_CHECK(group, loss.count == whole.count && ddp_mean_value(&loss) == ddp_mean_value(&whole),
                    "step %d: %.17g over %lld, want %.17g over %lld", step, ddp_mean_value(&loss),
                    (long long)loss.count, ddp_mean_value(&whole), (long long)whole.count);
        for (int i = 0; i < 4; i++) {
            float *grad = (float *)m.params[i].grad.data;
            float *expected = (float *)malloc(param_elements(&m.params[i]) * sizeof *expected);
            for (size_t k = 0; k < param_elements(&m.params[i]); k++) {
                float sum = 0;
                for (int use = i; use <= (i == 1 ? 4 : i); use += 3) {
                    float a = token_gradient(step, 0, use, k) + token_gradient(step, 1, use, k),
                          b = token_gradient(step, 2, use, k) + token_gradient(step, 3, use, k);
                    sum += a + b;
                }
                expected[k] = whole.count ? sum / (float)whole.count : sum;
                RANKS_CHECK(group, grad[k] == expected[k], "step %d parameter %d[%zu]: %.9g, want %.9g", step,
                            i, k, (double)grad[k], (double)expected[k]);
            }
            ddp_tensor total = m.params[i].value;
            total.data = expected;
            ddp_device_cpu()->sum_squares(&squares, 0, &total, 1);
            free(expected);
        }
        want_norm = (float)sqrt(ddp_exact_sum_value(&squares));
        RANKS_OK(group, ddp_reducer_clip_grad_norm(reducer, 1e9f, &norm));
        RANKS_CHECK(group, norm == want_norm, "step %d: norm %.9g, want %.9g", step, (double)norm,
                    (double)want_norm);
    }
    ddp_accumulator_destroy(accumulator);
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

/* Unequal blocks of a global batch: the mean loss and the mean gradient have the bits of equal blocks, since
   the sums of these gradients are exact. */
static ddp_result means_by_weights(ddp_group *group, void *user) {
    enum { BATCHES = 2, BATCH = 84 }; /* a multiple of 1, 2, 3, 4 and 7 ranks */
    int w = ddp_world_size(group);
    double weights[8];
    (void)user;
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    ddp_sampler_desc samples = DDP_ZERO;
    RANKS_CHECK(group, w <= 8, "%d ranks", w);
    for (int r = 0; r < w; r++) weights[r] = 1 + 0.7 * r;
    model_open(&m, group, 2);
    desc = model_desc(&m);
    desc.per_token = 1;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    samples.dataset_size = BATCHES * BATCH;
    samples.num_replicas = w;
    samples.rank = ddp_rank(group);
    samples.shuffle = DDP_SHUFFLE_HASHED;
    samples.global_batch = BATCH;
    for (int batch = 0; batch < BATCHES; batch++) {
        size_t bytes = param_elements(&m.params[0]) * sizeof(float);
        float *gradient = (float *)m.params[0].grad.data, *kept = (float *)malloc(bytes);
        ddp_mean mean[2];
        for (int weighted = 0; weighted < 2; weighted++) {
            ddp_sampler sampler;
            memset(&mean[weighted], 0, sizeof mean[weighted]);
            samples.weights = weighted ? weights : NULL;
            RANKS_OK(group, ddp_sampler_init(&sampler, &samples));
            int64_t block = ddp_sampler_batch_size(&sampler);
            RANKS_OK(group, ddp_sampler_seek(&sampler, batch * block));
            for (int i = 0; i < 2; i++)
                memset(m.params[i].grad.data, 0, param_elements(&m.params[i]) * sizeof(float));
            for (int64_t n = 0; n < block; n++) {
                int64_t sample = ddp_sampler_next(&sampler, NULL);
                for (size_t k = 0; k < bytes / sizeof(float); k++)
                    gradient[k] += (float)((int)((size_t)sample * 7 + k) % 13 - 6);
                ddp_mean_add(&mean[weighted], 0.1 * (double)sample, 1);
            }
            for (int i = 1; i >= 0; i--) RANKS_OK(group, ddp_reducer_ready(reducer, i));
            RANKS_OK(group, ddp_reducer_wait_mean(reducer, &mean[weighted]));
            RANKS_CHECK(group, mean[weighted].count == BATCH, "%lld samples",
                        (long long)mean[weighted].count);
            if (!weighted) memcpy(kept, gradient, bytes);
            ddp_sampler_free(&sampler);
        }
        RANKS_CHECK(group, ddp_mean_value(&mean[0]) == ddp_mean_value(&mean[1]), "losses %.17g and %.17g",
                    ddp_mean_value(&mean[0]), ddp_mean_value(&mean[1]));
        RANKS_CHECK(group, memcmp(kept, gradient, bytes) == 0, "batch %d: another gradient", batch);
        free(kept);
    }
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

/* Ranks without batches have no tokens. A negative count on one rank is an error on all, and the next step
   works. */
static ddp_result tokens_of_uneven_inputs(ddp_group *group, void *user) {
    int w = ddp_world_size(group), rank = ddp_rank(group), active, steps = 0;
    (void)user;
    model m;
    ddp_reducer *reducer;
    ddp_reducer_desc desc;
    ddp_join *join;
    ddp_join_desc join_desc = DDP_ZERO;
    ddp_mean loss = DDP_ZERO;
    char text[80];
    model_open(&m, group, 2);
    desc = model_desc(&m);
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    RANKS_CHECK(group,
                ddp_reducer_wait_mean(reducer, &loss) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "desc.per_token=0"),
                "%s", ddp_last_error());
    ddp_reducer_destroy(reducer);
    for (int i = 0; i < 2; i++) m.params[i].grad.data = NULL;
    desc.per_token = 1;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    join_desc.reducer = reducer;
    RANKS_OK(group, ddp_join_create(&join, group, &join_desc));
    for (;; steps++) { /* rank r has r + 1 batches of r + 2 tokens each; the loss is the number of the step */
        float sum = 0;
        int64_t count = 0;
        RANKS_OK(group, ddp_join_step(join, steps <= rank, &active));
        if (!active) break;
        for (int r = steps; r < w; r++) sum += (float)(r + 1), count += r + 2;
        for (int i = 1; i >= 0; i--) {
            for (size_t k = 0; k < param_elements(&m.params[i]); k++)
                ((float *)m.params[i].grad.data)[k] = (float)(rank + 1);
            RANKS_OK(group, ddp_reducer_ready(reducer, i));
        }
        memset(&loss, 0, sizeof loss);
        ddp_mean_add(&loss, steps * (rank + 2), rank + 2);
        RANKS_OK(group, ddp_reducer_wait_mean(reducer, &loss));
        RANKS_CHECK(group,
                    loss.count == count && ddp_mean_value(&loss) == steps
                        && ((float *)m.params[0].grad.data)[0] == sum / (float)count,
                    "step %d: loss %g over %lld, gradient %g", steps, ddp_mean_value(&loss),
                    (long long)loss.count, (double)((float *)m.params[0].grad.data)[0]);
    }
    RANKS_CHECK(group, steps == rank + 1, "%d steps", steps);
    ddp_join_destroy(join);
    for (int i = 1; i >= 0; i--) RANKS_OK(group, ddp_reducer_ready(reducer, i));
    memset(&loss, 0, sizeof loss);
    ddp_mean_add(&loss, 1, rank == w - 1 ? -3 : 1);
    snprintf(text, sizeof text, "mean->count is negative on 1 ranks, and %d on this rank",
             rank == w - 1 ? -3 : 1);
    RANKS_CHECK(group,
                ddp_reducer_wait_mean(reducer, &loss) == DDP_ERR_INVALID && strstr(ddp_last_error(), text),
                "%s", ddp_last_error());
    for (int i = 1; i >= 0; i--) RANKS_OK(group, ddp_reducer_ready(reducer, i));
    memset(&loss, 0, sizeof loss);
    RANKS_OK(group, ddp_reducer_wait_mean(reducer, &loss));
    RANKS_CHECK(group, ddp_mean_value(&loss) == 0, "the mean of nothing is %g", ddp_mean_value(&loss));
    ddp_reducer_destroy(reducer);
    model_close(&m);
    return DDP_OK;
}

//== times ==================================================================================

enum { TIMED_BUCKETS = 5, BUCKET_US = 10000 /* the minimum time of a bucket */ };

static ddp_result timed_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    ddp_result result = ddp_all_reduce(group, bucket->data, bucket->data, bucket->count, bucket->dtype,
                                       DDP_OP_AVG, NULL);
    ranks_sleep_us(BUCKET_US);
    __atomic_fetch_add((int *)user, 1, __ATOMIC_SEQ_CST);
    return result;
}

/* One step. hide: compute after each gradient lasts until its bucket is reduced, except after the last one,
   which is left to ddp_reducer_wait. Otherwise all are ready at once. *before: seconds from the first call to
   the wait; *inside: of the wait. */
static ddp_result timed_step(model *m, ddp_reducer *reducer, int hide, const int *through, double *before,
                             double *inside) {
    int first = __atomic_load_n(through, __ATOMIC_SEQ_CST);
    double begin = ranks_now();
    for (int i = m->count - 1; i >= 0; i--) {
        RANKS_OK(m->group, ddp_reducer_ready(reducer, i));
        while (hide && i > 0 && __atomic_load_n(through, __ATOMIC_SEQ_CST) - first < m->count - i) {
            RANKS_CHECK(m->group, ranks_now() - begin < 20.0 * DDP_TEST_SLOWDOWN,
                        "bucket %d is not carried out before the wait", m->count - 1 - i);
            ranks_sleep_us(100);
        }
    }
    *before = ranks_now() - begin;
    begin = ranks_now();
    RANKS_OK(m->group, ddp_reducer_wait(reducer));
    *inside = ranks_now() - begin;
    return DDP_OK;
}

/* Four buckets of five can be hidden, or none. A single rank sends to no peer, so none. The share of a step
   depends on the machine, so steps continue until every rank has seen the required values. The bounds hold in
   each step. */
static ddp_result overlap_is_the_share_that_compute_hid(ddp_group *group, void *user) {
    (void)user;
    /* All at once; hidden; one bucket, which nothing can hide. */
    for (int variant = 0; variant < 3; variant++) {
        int buckets = variant == 2 ? 1 : TIMED_BUCKETS, through = 0, seen = 0, now = 0;
        double least = buckets * BUCKET_US * 1e-6, comm = 0, wait = 0;
        model m;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        model_open(&m, group, buckets);
        desc = bucket_per_param_desc(&m);
        desc.hook = timed_hook;
        desc.hook_user = &through;
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        for (int step = 0; step < 40 && (step < 2 || !seen); step++) {
            ddp_reducer_stats stats = DDP_ZERO;
            double before = 0, inside = 0;
            int mine;
            PASS(timed_step(&m, reducer, variant == 1, &through, &before, &inside));
            RANKS_OK(group, ddp_reducer_get_stats(reducer, &stats));
            comm += stats.comm_seconds;
            wait += stats.wait_seconds;
            RANKS_CHECK(group, stats.bucket_count == buckets && through == buckets * (step + 1),
                        "%d buckets, %d through", stats.bucket_count, through);
            RANKS_CHECK(group, stats.comm_seconds >= least && stats.comm_seconds <= before + inside,
                        "%g s of communication in %g s", stats.comm_seconds, before + inside);
            RANKS_CHECK(group, stats.wait_seconds >= least / buckets && stats.wait_seconds <= inside,
                        "%g s of waiting in %g s", stats.wait_seconds, inside);
            RANKS_CHECK(group,
                        stats.overlap >= 0 && stats.overlap <= 1
                            && stats.overlap * stats.comm_seconds <= before + 1e-9,
                        "%g of %g s hidden in %g s", stats.overlap, stats.comm_seconds, before);
            RANKS_CHECK(group, (buckets > 1 && ddp_world_size(group) > 1) || stats.overlap == 0,
                        "overlap %g where nothing can be hidden", stats.overlap);
            RANKS_CHECK(group, stats.total_comm_seconds == comm && stats.total_wait_seconds == wait,
                        "totals %g %g, want %g %g", stats.total_comm_seconds, stats.total_wait_seconds, comm,
                        wait);
            mine = variant == 1 && ddp_world_size(group) > 1 ? stats.overlap > 0.5 : stats.overlap < 0.25;
            RANKS_OK(group, ddp_all_reduce(group, &mine, &now, 1, DDP_I32, DDP_OP_MIN, NULL));
            seen |= now;
        }
        RANKS_CHECK(group, seen, "variant %d: no step in which every rank had %s overlap", variant,
                    variant == 1 ? "much" : "little");
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    return DDP_OK;
}

//== memory =================================================================================

static int allocations; /* of this process */

static void *counting_alloc(size_t size_bytes, void *user) {
    (void)user;
    __atomic_fetch_add(&allocations, 1, __ATOMIC_SEQ_CST);
    return malloc(size_bytes);
}

static void counting_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

static ddp_result steps_allocate_nothing(ddp_group *group, void *user) {
    (void)user;
    for (int find = 0; find < 2; find++) {
        model m;
        ddp_reducer *reducer;
        ddp_reducer_desc desc;
        int before, after;
        model_open(&m, group, PARAMS);
        model_lay_out(&m, SCATTERED);
        desc = model_desc(&m);
        desc.first_bucket_bytes = desc.bucket_cap_bytes = 2000;
        desc.find_unused = find;
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
        PASS(checked_step(&m, reducer, 0, (uint32_t)ddp_rank(group) + 5, (uint64_t)ddp_world_size(group)));
        RANKS_OK(group, ddp_barrier(group));
        before = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
        RANKS_OK(group, ddp_barrier(group));
        for (int step = 1; step < 6; step++)
            PASS(checked_step(&m, reducer, step, (uint32_t)ddp_rank(group) + 5,
                              (uint64_t)ddp_world_size(group)));
        RANKS_OK(group, ddp_barrier(group));
        after = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
        RANKS_OK(group, ddp_barrier(group));
        RANKS_CHECK(group, after == before, "%d allocations in steps", after - before);
        ddp_reducer_destroy(reducer);
        model_close(&m);
    }
    return DDP_OK;
}

//== main ===================================================================================

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        ddp_rank_fn fn;
        ddp_result want;
    } scenarios[] = {
        {"averages", averages, DDP_OK},
        {"sixteen_bit_communication", sixteen_bit_communication, DDP_OK},
        {"values_and_buffers_come_from_rank_0", values_and_buffers_come_from_rank_0, DDP_OK},
        {"buffers_follow_the_root", buffers_follow_the_root, DDP_OK},
        {"buckets_follow_rank_0", buckets_follow_rank_0, DDP_OK},
        {"unused_is_zero_here_and_reported_when_nobody_used_it",
         unused_is_zero_here_and_reported_when_nobody_used_it, DDP_OK},
        {"no_sync_then_sync", no_sync_then_sync, DDP_OK},
        {"tied_uses_add_up_after_the_average", tied_uses_add_up_after_the_average, DDP_OK},
        {"a_missing_parameter_is_named_everywhere", a_missing_parameter_is_named_everywhere, DDP_OK},
        {"every_difference_is_named_on_every_rank", every_difference_is_named_on_every_rank, DDP_OK},
        {"a_hook_that_fails_on_one_rank_fails_everywhere", a_hook_that_fails_on_one_rank_fails_everywhere,
         DDP_OK},
        {"a_rank_dies_in_the_middle_of_a_step", a_rank_dies_in_the_middle_of_a_step, DDP_ERR_PEER_LOST},
        {"destroy_in_the_middle_of_a_step", destroy_in_the_middle_of_a_step, DDP_OK},
        {"uneven_inputs", uneven_inputs, DDP_OK},
        {"buffers_of_uneven_inputs", buffers_of_uneven_inputs, DDP_OK},
        {"a_rank_without_any_batch", a_rank_without_any_batch, DDP_OK},
        {"means_are_over_tokens", means_are_over_tokens, DDP_OK},
        {"means_by_weights", means_by_weights, DDP_OK},
        {"tokens_of_uneven_inputs", tokens_of_uneven_inputs, DDP_OK},
        {"overlap_is_the_share_that_compute_hid", overlap_is_the_share_that_compute_hid, DDP_OK},
        {"steps_allocate_nothing", steps_allocate_nothing, DDP_OK},
    };
    int failures = 0;
    if (argc > 1 && ranks_mode_parse(argv[1], &run_mode) != 0) {
        fprintf(stderr, "usage: test_reducer_ranks BACKEND [CASE]\n");
        return 2;
    }
    watchdog_start(100);
    ranks_memory.alloc_fn = counting_alloc;
    ranks_memory.free_fn = counting_free;
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        if (argc > 2 && strcmp(argv[2], scenarios[i].name) != 0) continue;
        if (ranks_joins(run_mode)
            && (scenarios[i].want != DDP_OK
                || scenarios[i].fn == a_hook_that_fails_on_one_rank_fails_everywhere))
            continue; /* a launcher ends all ranks once a world has failed */
        for (int w = scenarios[i].want == DDP_OK ? 1 : 2; w <= (ranks_joins(run_mode) ? 1 : 4); w++) {
            if (DDP_TEST_SLOWDOWN > 1 && !ranks_joins(run_mode) && w % 3 == 1) continue; /* 2 and 3 ranks */
            ddp_result result = ranks_run(run_mode, w, 20000 * DDP_TEST_SLOWDOWN, scenarios[i].fn, NULL);
            if (result != scenarios[i].want) {
                fprintf(stderr, "FAIL %s on %d ranks: %s: %s\n", scenarios[i].name, w,
                        ddp_result_name(result), ddp_last_error());
                failures++;
            }
        }
        printf("%s\n", scenarios[i].name);
        fflush(stdout);
    }
    printf("%d failures\n", failures);
    return failures != 0;
}

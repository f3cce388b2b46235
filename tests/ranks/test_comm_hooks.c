/*  test_comm_hooks.c - examples/extras/comm_hooks.h over W ranks: the view of gradients in a bucket; 16-bit hooks
    equal to the reducer's comm_dtype; sums that lose nothing over steps and rebuilt buckets; PowerSGD exact
    if its rank allows; DELAY late by exactly one step; NaN; one rank; saved states; bytes; memory; bad input;
    local SGD and DiLoCo against plain loops; a small model that learns with each of them; and a rank that is
    lost. */
#include "ddp.h"
#define COMM__PIECE ((size_t)1000) /* buckets are cut */
#include "comm_hooks.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#include <signal.h>

enum { PARAMS = 9, STEPS = 7, SAVED_HEADER = 40 /* bytes of a saved state before its numbers */ };

static const int64_t SHAPES[PARAMS][4] = {
    /* ndim, then the shape; odd sizes, so that buckets are packed */
    {2, 40, 30}, {1, 30}, {3, 7, 5, 6}, {0}, {2, 0, 4}, {2, 64, 48}, {1, 48}, {2, 3, 2}, {1, 9},
};
/* Different from the order of the first buckets, so that they are rebuilt. */
static const int READY[PARAMS] = {3, 8, 5, 0, 7, 1, 4, 6, 2};

static int all_allocations; /* of all ranks that are threads of this process */
static void *counting_alloc(size_t size_bytes, void *user) {
    (void)user;
    __atomic_add_fetch(&all_allocations, 1, __ATOMIC_RELAXED);
    return malloc(size_bytes);
}
static void counting_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

//== a model ================================================================================

typedef struct model {
    ddp_group *group;
    ddp_param params[PARAMS];
    ddp_reducer *reducer;
    comm_hook *hook;
    size_t count[PARAMS], total;
    float *values, *grads, *out; /* out: all gradients after a step, in definition order */
} model;

typedef struct how {
    comm_hook_desc hook;
    int given;              /* gradients are in memory of the model, in definition order */
    int plain, find_unused; /* no hook; the buckets are not rebuilt */
    ddp_dtype comm_dtype;
    int micro_batch_count;
} how;

static void model_close(model *m) {
    ddp_reducer_destroy(m->reducer);
    comm_hook_destroy(m->hook);
    free(m->values);
    free(m->grads);
    free(m->out);
}

static void model_params(model *m, ddp_group *group, ddp_dtype grad_dtype) {
    memset(m, 0, sizeof *m);
    m->group = group;
    for (int i = 0; i < PARAMS; i++) {
        ddp_tensor *value = &m->params[i].value;
        value->dtype = DDP_F32;
        value->ndim = (int)SHAPES[i][0];
        for (int k = 0; k < value->ndim; k++) value->shape[k] = SHAPES[i][k + 1];
        m->params[i].grad.dtype = grad_dtype;
        m->count[i] = (size_t)ddp_tensor_count(value);
        m->total += m->count[i];
    }
    m->values = (float *)calloc(m->total, 8);
    m->grads = (float *)calloc(m->total, 8);
    m->out = (float *)calloc(m->total, 8);
    for (size_t i = 0, at = 0; i < PARAMS; at += m->count[i++]) m->params[i].value.data = m->values + at;
}

static ddp_result model_open_as(model *m, ddp_group *group, const how *h, ddp_dtype grad_dtype) {
    ddp_reducer_desc desc = DDP_ZERO;
    comm_hook_desc hook = h->hook;
    model_params(m, group, grad_dtype);
    for (size_t i = 0, at = 0; i < PARAMS && h->given; at += m->count[i++])
        m->params[i].grad.data = m->grads + at;
    desc.params = m->params;
    hook.params = m->params;
    desc.param_count = hook.param_count = PARAMS;
    desc.first_bucket_bytes = 500;
    desc.bucket_cap_bytes = 6000;
    desc.comm_dtype = h->comm_dtype;
    desc.find_unused = h->find_unused;
    desc.micro_batch_count = h->micro_batch_count;
    if (!h->plain) {
        ddp_result result = comm_hook_create(&m->hook, group, &hook);
        if (result != DDP_OK) return result;
        desc.hook = comm_hook_run;
        desc.hook_user = m->hook;
    }
    return ddp_reducer_create(&m->reducer, group, &desc);
}

static ddp_result model_open(model *m, ddp_group *group, const how *h) {
    return model_open_as(m, group, h, DDP_F32);
}

/* A gradient between -1 and 1, the same on every rank. */
static float number(int rank, int step, int param, size_t element) {
    uint64_t h = ranks_mix(((uint64_t)rank << 40) + ((uint64_t)step << 32) + ((uint64_t)param << 24)
                           + element);
    return (float)(int32_t)(h >> 32) / 2147483648.0f;
}

/* One step with the current gradients; m->out receives the result. */
static ddp_result model_reduce(model *m) {
    for (int k = 0; k < PARAMS; k++) {
        ddp_result result = ddp_reducer_ready(m->reducer, READY[k]);
        if (result != DDP_OK) return result;
    }
    ddp_result result = ddp_reducer_wait(m->reducer);
    if (result != DDP_OK) return result;
    for (size_t i = 0, at = 0; i < PARAMS; at += m->count[i++])
        if (m->count[i])
            ddp_device_cpu()->cast(m->out + at, DDP_F32, m->params[i].grad.data, m->params[i].grad.dtype,
                                   m->count[i]);
    return DDP_OK;
}

static ddp_result model_step(model *m, int step) {
    for (int i = 0; i < PARAMS; i++)
        for (size_t e = 0; e < m->count[i]; e++) {
            float x = number(ddp_rank(m->group), step, i, e);
            ddp_device_cpu()->cast((char *)m->params[i].grad.data
                                       + e * ddp_dtype_size(m->params[i].grad.dtype),
                                   m->params[i].grad.dtype, &x, DDP_F32, 1);
        }
    return model_reduce(m);
}

static uint64_t hash_floats(uint64_t hash, const float *x, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        hash = ranks_mix(hash ^ bits);
    }
    return hash;
}

/* The same word everywhere? */
static int is_equal(ddp_group *group, uint64_t word) {
    int64_t both[2] = {(int64_t)(word >> 1), -(int64_t)(word >> 1)};
    return ddp_all_reduce(group, both, both, 2, DDP_I64, DDP_OP_MIN, NULL) == DDP_OK && both[0] == -both[1];
}

static how how_of(comm_hook_kind kind) {
    how h;
    memset(&h, 0, sizeof h);
    h.hook.kind = kind;
    h.hook.block = 64;
    return h;
}

//== the view of a bucket ====================================================================

typedef struct seen {
    model *m;
    size_t elements;
    int wrong, calls;
} seen;

/* Gradients hold 1000 * parameter + element. */
static ddp_result look(ddp_group *group, ddp_bucket *bucket, void *user) {
    seen *s = (seen *)user;
    const float *at = (const float *)bucket->data;
    (void)group;
    for (int k = 0; k < bucket->param_count; k++) {
        int i = bucket->params[k];
        for (size_t e = 0; e < s->m->count[i]; e++) s->wrong += *at++ != (float)(i * 10000) + (float)e;
    }
    s->wrong += at != (const float *)bucket->data + bucket->count;
    s->elements += bucket->count;
    s->calls++;
    return DDP_OK;
}

static ddp_result a_bucket_tells_whose_gradients_lie_where(ddp_group *group) {
    for (int given = 0; given < 4; given++) {
        model m;
        ddp_reducer_desc desc = DDP_ZERO;
        seen s = {&m, 0, 0, 0};
        model_params(&m, group, DDP_F32);
        for (size_t i = 0, at = 0; i < PARAMS && given; at += m.count[i++])
            m.params[i].grad.data = m.grads + (given == 2 ? 2 * at : at);
        desc.params = m.params;
        desc.param_count = PARAMS;
        desc.first_bucket_bytes = 500;
        desc.bucket_cap_bytes = given == 3 ? 1000000 : 6000; /* one range, or many */
        desc.hook = look;
        desc.hook_user = &s;
        RANKS_OK(group, ddp_reducer_create(&m.reducer, group, &desc));
        for (int step = 0; step < 3; step++) {
            for (int i = 0; i < PARAMS; i++)
                for (size_t e = 0; e < m.count[i]; e++)
                    ((float *)m.params[i].grad.data)[e] = (float)(i * 10000) + (float)e;
            RANKS_OK(group, model_reduce(&m));
        }
        RANKS_CHECK(group, s.wrong == 0 && s.elements == 3 * m.total && s.calls >= 4,
                    "given %d: %d wrong, %zu elements in %d calls", given, s.wrong, s.elements, s.calls);
        model_close(&m);
    }
    return DDP_OK;
}

//== values =================================================================================

/* BF16 and F16 equal the reducer's comm_dtype. Steps before start_step are the plain reduction, bit for
   bit. */
static ddp_result bits_of_the_reducer(ddp_group *group) {
    static const struct {
        comm_hook_kind kind;
        ddp_dtype comm, grad;
        int start;
    } cases[] = {
        {COMM_HOOK_BF16, DDP_BF16, DDP_F32, 0},
        {COMM_HOOK_F16, DDP_F16, DDP_F32, 0},
        {COMM_HOOK_F16, DDP_F16, DDP_F64, 0},
        {COMM_HOOK_BF16, DDP_DTYPE_DEFAULT, DDP_F16, 0},
        {COMM_HOOK_INT8, DDP_DTYPE_DEFAULT, DDP_F32, STEPS},
        {COMM_HOOK_POWERSGD, DDP_DTYPE_DEFAULT, DDP_F32, STEPS},
        {COMM_HOOK_DELAY, DDP_DTYPE_DEFAULT, DDP_BF16, STEPS},
    };
    for (int c = 0; c < (int)(sizeof cases / sizeof cases[0]); c++) {
        model with, without;
        how h = how_of(cases[c].kind), plain = how_of(cases[c].kind);
        h.hook.start_step = cases[c].start;
        h.micro_batch_count = plain.micro_batch_count = 3;
        plain.plain = 1;
        plain.comm_dtype = cases[c].comm;
        RANKS_OK(group, model_open_as(&with, group, &h, cases[c].grad));
        RANKS_OK(group, model_open_as(&without, group, &plain, cases[c].grad));
        for (int step = 0; step < 3; step++) {
            RANKS_OK(group, model_step(&with, step));
            RANKS_OK(group, model_step(&without, step));
            RANKS_CHECK(group, !memcmp(with.out, without.out, with.total * sizeof(float)),
                        "case %d, step %d: other bits", c, step);
        }
        model_close(&with);
        model_close(&without);
    }
    return DDP_OK;
}

/* Sum over ranks of their memories, in definition order. */
static ddp_result memories(model *m, double *out) {
    size_t bytes;
    RANKS_OK(m->group, comm_hook_save(m->hook, NULL, &bytes));
    char *state = (char *)malloc(bytes);
    RANKS_OK(m->group, comm_hook_save(m->hook, state, &bytes));
    for (size_t i = 0; i < m->total; i++) {
        float x;
        memcpy(&x, state + SAVED_HEADER + i * 4, 4);
        out[i] = x;
    }
    free(state);
    return ddp_all_reduce(m->group, out, out, m->total, DDP_F64, DDP_OP_SUM, NULL);
}

/* Over steps and rebuilt buckets, the applied and the remembered values sum to all gradients. The memory
   stays small, and the ranks agree. *hash covers all results. */
static ddp_result nothing_is_lost(ddp_group *group, const how *h, double most, uint64_t *hash) {
    model m;
    int ranks = ddp_world_size(group), power = h->hook.kind == COMM_HOOK_POWERSGD;
    RANKS_OK(group, model_open(&m, group, h));
    double *gave = (double *)calloc(m.total, 8), *applied = (double *)calloc(m.total, 8),
           *kept = (double *)calloc(m.total, 8), greatest = 0;
    *hash = 0;
    for (int step = 0; step < STEPS; step++) {
        RANKS_OK(group, model_step(&m, step));
        *hash = hash_floats(*hash, m.out, m.total);
        RANKS_CHECK(group, is_equal(group, *hash), "step %d: ranks have other bits", step);
        for (size_t i = 0, at = 0; i < PARAMS; at += m.count[i++])
            for (size_t e = 0; e < m.count[i]; e++) {
                double sum = 0, first;
                for (int r = 0; r < ranks; r++) sum += (double)number(r, step, (int)i, e);
                gave[at + e] += sum;
                applied[at + e] += first = (double)m.out[at + e] * ranks;
                /* Rounded once per rank and once by the owner, if at all. */
                if ((step == 0 && !power) || (power && SHAPES[i][0] < 2))
                    RANKS_CHECK(group, fabs(first - sum) <= (power ? 1e-6 : ranks / 254.0 * 2.05) * ranks,
                                "param %d element %zu: %g for %g", (int)i, e, first, sum);
            }
    }
    RANKS_OK(group, memories(&m, kept));
    for (size_t i = 0; i < m.total; i++) {
        RANKS_CHECK(group, fabs(gave[i] - applied[i] - kept[i]) < 2e-5 * ranks,
                    "element %zu: gave %g, applied %g, remembered %g", i, gave[i], applied[i], kept[i]);
        greatest = fabs(kept[i]) > greatest ? fabs(kept[i]) : greatest;
    }
    RANKS_CHECK(group, ranks == 1 ? greatest == 0 : greatest > 0 && greatest < most * ranks,
                "the largest memory is %g", greatest);
    free(gave);
    free(applied);
    free(kept);
    model_close(&m);
    return DDP_OK;
}

static ddp_result sums_over_steps(ddp_group *group) {
    for (int given = DDP_TEST_SLOWDOWN > 3; given < 2; given++) {
        uint64_t first, again;
        how h = how_of(COMM_HOOK_INT8);
        h.given = given;
        RANKS_RUN(group, nothing_is_lost(group, &h, 0.03, &first));
        RANKS_RUN(group, nothing_is_lost(group, &h, 0.03, &again));
        RANKS_CHECK(group, first == again, "INT8: another run gave other bits");
        h.hook.kind = COMM_HOOK_POWERSGD;
        RANKS_RUN(group, nothing_is_lost(group, &h, STEPS, &first));
        RANKS_RUN(group, nothing_is_lost(group, &h, STEPS, &again));
        RANKS_CHECK(group, first == again, "POWERSGD: another run gave other bits");
        h.hook.seed = 5;
        RANKS_RUN(group, nothing_is_lost(group, &h, STEPS, &again));
        RANKS_CHECK(group, first != again || ddp_world_size(group) == 1, "the seed changes nothing");
    }
    return DDP_OK;
}

/* Matrices of rank 1 on each rank sum to one of rank W <= 4: it is transferred except for rounding, and
   nothing is remembered. Earlier zeros do no harm. */
static ddp_result low_rank_is_exact(ddp_group *group) {
    model m;
    how h = how_of(COMM_HOOK_POWERSGD);
    int ranks = ddp_world_size(group);
    RANKS_OK(group, model_open(&m, group, &h));
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < PARAMS; i++) {
            int64_t n = SHAPES[i][0] > 0 && m.count[i] ? SHAPES[i][1] : 1,
                    columns = m.count[i] ? (int64_t)m.count[i] / n : 1;
            for (size_t e = 0; e < m.count[i]; e++)
                ((float *)m.params[i].grad.data)[e] = step < 2 ? 0
                                                               : number(ddp_rank(group), step, i,
                                                                        e / (size_t)columns)
                                                                     * number(ddp_rank(group), 99, i,
                                                                              e % (size_t)columns);
        }
        RANKS_OK(group, model_reduce(&m));
        for (size_t i = 0, at = 0; i < PARAMS; at += m.count[i++])
            for (size_t e = 0; e < m.count[i]; e++) {
                size_t columns = SHAPES[i][0] > 0 ? m.count[i] / (size_t)SHAPES[i][1] : m.count[i];
                double sum = 0;
                for (int r = 0; r < ranks && step >= 2; r++)
                    sum += (double)(number(r, step, (int)i, e / columns)
                                    * number(r, 99, (int)i, e % columns));
                RANKS_CHECK(group, fabs((double)m.out[at + e] - sum / ranks) < 1e-4,
                            "step %d param %d element %zu: %g for %g", step, (int)i, e, m.out[at + e],
                            sum / ranks);
            }
    }
    model_close(&m);
    return DDP_OK;
}

/* Each step gets the bits of the plain reduction of the step before, with any calls between them. */
static ddp_result one_step_late(ddp_group *group) {
    for (int c = 0; c < 4; c++) {
        model late, plain;
        how h = how_of(COMM_HOOK_DELAY);
        ddp_dtype dtype = c == 3 ? DDP_BF16 : DDP_F32;
        int start = c == 2 ? 3 : 0;
        h.given = c == 1;
        h.hook.start_step = start;
        RANKS_OK(group, model_open_as(&late, group, &h, dtype));
        h.plain = 1;
        RANKS_OK(group, model_open_as(&plain, group, &h, dtype));
        float *before = (float *)calloc(plain.total, 4), word = 1;
        for (int step = 0; step < STEPS; step++) {
            const float *want = ddp_world_size(group) == 1 || step < start ? plain.out : before;
            RANKS_OK(group, model_step(&plain, step));
            RANKS_OK(group, model_step(&late, step));
            RANKS_OK(group, ddp_all_reduce(group, &word, &word, 1, DDP_F32, DDP_OP_MAX, NULL));
            if (step == start) memset(before, 0, plain.total * 4);
            RANKS_CHECK(group, !memcmp(late.out, want, late.total * 4), "case %d, step %d: other bits", c,
                        step);
            memcpy(before, plain.out, plain.total * 4);
        }
        free(before);
        model_close(&late);
        model_close(&plain);
    }
    return DDP_OK;
}

/* A NaN of the last rank reaches all ranks, at least in its block or matrix. Two steps later everything is
   finite again, and the memories are free of it. */
static ddp_result not_a_number(ddp_group *group) {
    for (int c = COMM_HOOK_BF16; c <= COMM_HOOK_POWERSGD + (ddp_world_size(group) > 1); c++) {
        model m;
        int overflow = c > COMM_HOOK_POWERSGD, kind = c - overflow; /* where P is finite, and Q is not */
        how h = how_of((comm_hook_kind)kind);
        RANKS_OK(group, model_open(&m, group, &h));
        if (!overflow) RANKS_OK(group, model_step(&m, 0));
        for (int i = 0; i < PARAMS; i++)
            for (size_t e = 0; e < m.count[i]; e++)
                ((float *)m.params[i].grad.data)[e] = number(ddp_rank(group), 1, i, e);
        if (ddp_rank(group) == ddp_world_size(group) - 1 && !overflow)
            ((float *)m.params[5].grad.data)[77] = kind == COMM_HOOK_INT8 ? INFINITY : NAN;
        for (int row = 0; row < 64 && overflow; row++)
            ((float *)m.params[5].grad.data)[48 * row + 29] = 3e38f / (float)ddp_world_size(group);
        RANKS_OK(group, model_reduce(&m));
        const float *there = m.out + m.count[0] + m.count[1] + m.count[2] + m.count[3];
        RANKS_CHECK(group, !isfinite(there[77]), "kind %d: it became %g", kind, there[77]);
        RANKS_CHECK(group, isfinite(m.out[0]), "kind %d: it spread", kind);
        for (int step = 2; step < 4; step++) {
            RANKS_OK(group, model_step(&m, step));
            for (size_t i = 0; i < m.total; i++)
                RANKS_CHECK(group, fabsf(m.out[i]) < 10, "kind %d: element %zu is %g in step %d", kind, i,
                            m.out[i], step);
        }
        model_close(&m);
    }
    return DDP_OK;
}

//== bytes and memory =======================================================================

static ddp_result bytes_and_memory(ddp_group *group) {
    size_t power = 0;
    for (int i = 0; i < PARAMS; i++) {
        size_t count = 1, n = SHAPES[i][0] ? (size_t)SHAPES[i][1] : 1;
        for (int64_t k = 1; k <= SHAPES[i][0]; k++) count *= (size_t)SHAPES[i][k];
        size_t m = n ? count / n : 0;
        power += SHAPES[i][0] >= 2 && (n + m) * 4 < count ? (n + m) * 4 : count;
    }
    for (int kind = COMM_HOOK_BF16; kind <= COMM_HOOK_DELAY; kind++) {
        model m;
        how h = how_of((comm_hook_kind)kind);
        comm_hook_stats stats;
        int before = 0, step;
        RANKS_OK(group, model_open(&m, group, &h));
        for (step = 0; step < STEPS; step++) {
            if (step == 2) RANKS_OK(group, ddp_barrier(group));
            if (step == 2) before = __atomic_load_n(&all_allocations, __ATOMIC_RELAXED);
            if (step == 2) RANKS_OK(group, ddp_barrier(group));
            RANKS_OK(group, model_step(&m, step));
        }
        RANKS_OK(group, ddp_barrier(group));
        RANKS_CHECK(group, before == __atomic_load_n(&all_allocations, __ATOMIC_RELAXED),
                    "kind %d: steps took memory", kind);
        RANKS_OK(group, ddp_barrier(group));
        RANKS_OK(group, comm_hook_get_stats(m.hook, &stats));
        uint64_t all = (uint64_t)m.total * 4 * STEPS, want = kind <= COMM_HOOK_F16        ? all / 2
                                                             : kind == COMM_HOOK_POWERSGD ? power * 4 * STEPS
                                                                                          : all;
        if (ddp_world_size(group) == 1) want = 0;
        RANKS_CHECK(group, stats.gradient_bytes == all, "kind %d: %llu bytes of gradients", kind,
                    (unsigned long long)stats.gradient_bytes);
        RANKS_CHECK(group,
                    kind == COMM_HOOK_INT8
                        ? stats.sent_bytes <= all / 3 && (want == 0) == (stats.sent_bytes == 0)
                        : stats.sent_bytes == want,
                    "kind %d: %llu bytes sent, not %llu", kind, (unsigned long long)stats.sent_bytes,
                    (unsigned long long)want);
        model_close(&m);
    }
    return DDP_OK;
}

//== saved states ===========================================================================

static ddp_result saved(model *m, char **state, size_t *bytes) {
    RANKS_OK(m->group, comm_hook_save(m->hook, NULL, bytes));
    *state = (char *)malloc(*bytes);
    RANKS_OK(m->group, comm_hook_save(m->hook, *state, bytes));
    return DDP_OK;
}

static ddp_result states_go_on(ddp_group *group, comm_hook_kind kind) {
    model whole, second;
    how h = how_of(kind);
    char *state;
    size_t bytes;
    h.find_unused = 1; /* the same buckets before and after */
    RANKS_OK(group, model_open(&whole, group, &h));
    for (int step = 0; step < 3; step++) RANKS_OK(group, model_step(&whole, step));
    RANKS_OK(group, saved(&whole, &state, &bytes));
    RANKS_OK(group, model_open(&second, group, &h));
    RANKS_OK(group, comm_hook_load(second.hook, (const void *const *)&state, &bytes, 1));
    for (int step = 3; step < 6; step++) {
        RANKS_OK(group, model_step(&whole, step));
        RANKS_OK(group, model_step(&second, step));
        RANKS_CHECK(group, !memcmp(whole.out, second.out, whole.total * 4), "kind %d, step %d: other bits",
                    (int)kind, step);
    }
    free(state);
    model_close(&whole);
    model_close(&second);
    return DDP_OK;
}

/* The states of all ranks go to one: a group of one rank applies all of it in its first step. In the old
   group nothing is lost either. */
static ddp_result states_move(ddp_group *group, comm_hook_kind kind) {
    model m, alone, other;
    how h = how_of(kind);
    ddp_group *one = NULL;
    char *mine;
    size_t bytes, sizes[8];
    const void *list[8];
    int ranks = ddp_world_size(group);
    RANKS_OK(group, model_open(&m, group, &h));
    for (int step = 0; step < 3; step++) RANKS_OK(group, model_step(&m, step));
    RANKS_OK(group, saved(&m, &mine, &bytes));
    char *all = (char *)malloc(bytes * (size_t)ranks);
    double *want = (double *)calloc(m.total, 8), *have = (double *)calloc(m.total, 8);
    RANKS_OK(group, ddp_all_gather(group, mine, all, bytes, DDP_U8, NULL));
    RANKS_OK(group, memories(&m, want));
    for (int r = 0; r < ranks; r++) list[r] = all + (size_t)r * bytes, sizes[r] = bytes;

    RANKS_OK(group, model_open(&other, group, &h));
    RANKS_OK(group, comm_hook_load(other.hook, list, sizes, ddp_rank(group) == 0 ? ranks : 0));
    RANKS_OK(group, memories(&other, have));
    for (size_t i = 0; i < m.total; i++)
        RANKS_CHECK(group, fabs(have[i] - want[i]) < 1e-5, "element %zu: %g for %g", i, have[i], want[i]);

    RANKS_CHECK(group, is_equal(group, hash_floats(0, other.hook->q, other.hook->q_total)),
                "ranks start from other Q");
    RANKS_OK(group, model_step(&other, 3));
    RANKS_CHECK(group, is_equal(group, hash_floats(0, other.out, other.total)),
                "ranks go on with other bits");

    RANKS_OK(group, ddp_group_split(group, ddp_rank(group), 0, &one));
    RANKS_OK(group, model_open(&alone, one, &h));
    RANKS_OK(group, comm_hook_load(alone.hook, list, sizes, ranks));
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < PARAMS; i++)
            if (m.count[i]) memset(alone.params[i].grad.data, 0, m.count[i] * 4);
        RANKS_OK(group, model_reduce(&alone));
        for (size_t i = 0; i < m.total; i++)
            RANKS_CHECK(group, fabs((double)alone.out[i] - (turn ? 0 : want[i])) < 1e-5,
                        "turn %d element %zu: %g for %g", turn, i, (double)alone.out[i], want[i]);
    }
    model_close(&alone);
    ddp_group_destroy(one);
    model_close(&other);
    model_close(&m);
    free(mine);
    free(all);
    free(want);
    free(have);
    return DDP_OK;
}

static ddp_result states(ddp_group *group) {
    for (int kind = COMM_HOOK_INT8; kind <= COMM_HOOK_POWERSGD; kind++) {
        RANKS_RUN(group, states_go_on(group, (comm_hook_kind)kind));
        RANKS_RUN(group, states_move(group, (comm_hook_kind)kind));
    }
    return DDP_OK;
}

//== bad input ==============================================================================

/* One sentence with `text` in it. */
static int said(ddp_result have, ddp_result want, const char *text) {
    if (have == want && strstr(ddp_last_error(), text) && !strchr(ddp_last_error(), '\n')) return 1;
    fprintf(stderr, "%s for %s: '%s', and no '%s'\n", ddp_result_name(have), ddp_result_name(want),
            ddp_last_error(), text);
    return 0;
}

static ddp_result bad_creates(ddp_group *group) {
    static const struct {
        const char *text;
        int kind, start, block, rank, count, where;
    } cases[] = {
        {"set one of comm_hook_kind", 0, 0, 0, 0, PARAMS, 0},
        {"set one of comm_hook_kind", 6, 0, 0, 0, PARAMS, 0},
        {"start_step=-1", 3, -1, 0, 0, PARAMS, 0},
        {"block=17", 3, 0, 17, 0, PARAMS, 0},
        {"block=-16", 3, 0, -16, 0, PARAMS, 0},
        {"rank=65", 4, 0, 0, 65, PARAMS, 0},
        {"rank=-1", 4, 0, 0, -1, PARAMS, 0},
        {"param_count=0", 5, 0, 0, 0, 0, 0},
        {"params is NULL", 4, 0, 0, 0, PARAMS, 1},
        {"params[2] (no name) has a negative", 4, 0, 0, 0, PARAMS, 2},
    };
    model m;
    comm_hook *hook = NULL;
    comm_hook_desc desc = DDP_ZERO;
    int last = ddp_world_size(group) - 1, mine = ddp_rank(group) == last;
    model_params(&m, group, DDP_F32);
    /* On every rank, then only on the last one. */
    for (int c = 0; c < 2 * (int)(sizeof cases / sizeof cases[0]); c++) {
        int k = c / 2, wrong = c % 2 == 0 || mine;
        ddp_param params[PARAMS];
        comm_hook_desc bad = DDP_ZERO;
        char others[40];
        memcpy(params, m.params, sizeof params);
        bad.kind = COMM_HOOK_POWERSGD;
        bad.params = params;
        bad.param_count = PARAMS;
        if (wrong) {
            bad.kind = (comm_hook_kind)cases[k].kind;
            bad.params = cases[k].where == 1 ? NULL : params;
            bad.param_count = cases[k].count;
            bad.start_step = cases[k].start;
            bad.block = cases[k].block;
            bad.rank = cases[k].rank;
            if (cases[k].where == 2) params[2].value.shape[1] = -5;
        }
        snprintf(others, sizeof others, "rank %d has failed", last);
        hook = (comm_hook *)&m;
        ddp_result result = comm_hook_create(&hook, group, &bad);
        RANKS_CHECK(group,
                    said(result, wrong ? DDP_ERR_INVALID : DDP_ERR_MISMATCH, wrong ? cases[k].text : others)
                        && !hook,
                    "case %d", c);
    }
    RANKS_CHECK(group, said(comm_hook_create(&hook, NULL, &desc), DDP_ERR_INVALID, "group is NULL"), "group");
    RANKS_CHECK(group, said(comm_hook_create(NULL, group, &desc), DDP_ERR_INVALID, "out is NULL"), "out");
    RANKS_CHECK(group, said(comm_hook_create(&hook, group, NULL), DDP_ERR_INVALID, "desc is NULL"), "desc");
    if (last > 0) {
        desc.kind = COMM_HOOK_POWERSGD;
        desc.params = m.params;
        desc.param_count = PARAMS;
        desc.rank = mine ? 2 : 3;
        RANKS_CHECK(group,
                    said(comm_hook_create(&hook, group, &desc), DDP_ERR_MISMATCH, "differ between ranks"),
                    "another rank");
        m.params[6].value.shape[0] += mine;
        desc.rank = 0;
        RANKS_CHECK(group,
                    said(comm_hook_create(&hook, group, &desc), DDP_ERR_MISMATCH, "differ between ranks"),
                    "another shape");
    }
    comm_hook_destroy(NULL);
    model_close(&m);
    return DDP_OK;
}

static ddp_result bad_states(ddp_group *group) {
    model m, other;
    how h = how_of(COMM_HOOK_POWERSGD);
    char *state, *list[2];
    size_t bytes, small, sizes[2];
    int mine = ddp_rank(group) == ddp_world_size(group) - 1;
    RANKS_OK(group, model_open(&m, group, &h));
    h.hook.rank = 2;
    RANKS_OK(group, model_open(&other, group, &h));
    RANKS_OK(group, saved(&m, &state, &bytes));
    small = bytes - 1;
    RANKS_CHECK(group, said(comm_hook_save(m.hook, state, &small), DDP_ERR_INVALID, "are needed"), "room");
    RANKS_CHECK(group,
                said(comm_hook_save(NULL, state, &small), DDP_ERR_INVALID, "hook or size_bytes is NULL"),
                "NULL");
    RANKS_CHECK(group, said(comm_hook_get_stats(m.hook, NULL), DDP_ERR_INVALID, "stats is NULL"), "NULL");
    for (int c = 0; c < 7; c++) {
        static const char *const texts[] = {"is truncated",
                                            "was not written by",
                                            "another desc",
                                            "bytes, not",
                                            "states or state_bytes is NULL",
                                            "is truncated",
                                            "state_count=-1"};
        ddp_result want = c == 2 || c == 4 || c == 6 ? DDP_ERR_INVALID : DDP_ERR_CORRUPT;
        list[0] = state, list[1] = NULL, sizes[0] = bytes, sizes[1] = bytes;
        if (mine && c == 0) sizes[0] = 39;
        if (c == 1) state[0] ^= (char)mine;
        if (mine && c == 3) sizes[0] = bytes - 4;
        int count = mine && c == 6 ? -1 : mine && c == 5 ? 2 : 1;
        ddp_result result = comm_hook_load(c == 2 ? other.hook : m.hook,
                                           mine && c == 4 ? NULL : (const void *const *)list, sizes, count);
        if (c == 1) state[0] ^= (char)mine;
        RANKS_CHECK(
            group,
            said(result, mine || c == 2 ? want : DDP_ERR_MISMATCH, mine || c == 2 ? texts[c] : "has failed"),
            "case %d", c);
    }
    ddp_result result = comm_hook_load(m.hook, NULL, NULL, 0);
    if (ddp_rank(group))
        RANKS_CHECK(group, said(result, DDP_ERR_MISMATCH, "rank 0 has failed"), "no state");
    else
        RANKS_CHECK(group, said(result, DDP_ERR_INVALID, "rank 0 has no state"), "no state");
    RANKS_OK(group, model_step(&m, 0));
    RANKS_CHECK(
        group,
        said(comm_hook_load(m.hook, (const void *const *)list, sizes, 1), DDP_ERR_INVALID, "has run already"),
        "late");
    free(state);
    model_close(&m);
    model_close(&other);
    return DDP_OK;
}

/* Detected in a step: the group is a split, since it fails then. */
static ddp_result bad_steps(ddp_group *group) {
    static const char *const texts[] = {"created on another group", "hook_user is NULL",
                                        "does not match the hook's desc", "are f64", "leave per_token 0"};
    for (int c = 0; c < 5; c++) {
        model m;
        ddp_group *child = NULL;
        ddp_reducer_desc desc = DDP_ZERO;
        comm_hook_desc hook = DDP_ZERO;
        RANKS_OK(group, ddp_group_split(group, 0, ddp_rank(group), &child));
        model_params(&m, child, c == 3 ? DDP_F64 : DDP_F32);
        hook.kind = c == 4 ? COMM_HOOK_DELAY : COMM_HOOK_INT8;
        hook.params = m.params;
        hook.param_count = c == 2 ? PARAMS - 1 : PARAMS;
        RANKS_OK(group, comm_hook_create(&m.hook, c == 0 ? group : child, &hook));
        desc.params = m.params;
        desc.param_count = PARAMS;
        desc.hook = comm_hook_run;
        desc.hook_user = c == 1 ? NULL : m.hook;
        desc.per_token = c == 4;
        RANKS_OK(group, ddp_reducer_create(&m.reducer, child, &desc));
        ddp_result result = model_step(&m, 0);
        if (ddp_world_size(group) > 1 || c < 2)
            RANKS_CHECK(group, said(result, c == 3 ? DDP_ERR_UNSUPPORTED : DDP_ERR_INVALID, texts[c]),
                        "case %d", c);
        model_close(&m);
        ddp_group_destroy(child);
    }
    return DDP_OK;
}

//== local SGD, DiLoCo ======================================================================

static ddp_result local_open(model *m, local_sgd **local, ddp_group *group, int every, double lr,
                             double momentum) {
    local_sgd_desc desc = DDP_ZERO;
    model_params(m, group, DDP_F32);
    m->params[8].value = m->params[1].value; /* tied; the memory of the ninth is not used */
    for (size_t i = 0; i < m->total; i++) m->values[i] = number(ddp_rank(group), 50, 0, i);
    desc.params = m->params;
    desc.param_count = PARAMS;
    desc.every = every;
    desc.outer_lr = lr;
    desc.outer_momentum = momentum;
    return local_sgd_create(local, group, &desc);
}

/* Against plain loops in double: each rank moves its values by number(); every third step is an outer
   step. */
static ddp_result outer_steps(ddp_group *group, double lr, double momentum) {
    model m;
    local_sgd *local, *again;
    comm_hook_stats stats;
    int ranks = ddp_world_size(group), synced;
    RANKS_OK(group, local_open(&m, &local, group, 3, lr, momentum));
    size_t n = m.total - 9, bytes; /* the ninth has no values of its own */
    double *old = (double *)calloc(n, 8), *speed = (double *)calloc(n, 8), *mean = (double *)calloc(n, 8),
           eta = lr == 0 ? 1 : lr;
    for (size_t i = 0; i < n; i++) {
        RANKS_CHECK(group, m.values[i] == number(0, 50, 0, i), "value %zu is not rank 0's", i);
        old[i] = (double)m.values[i];
    }
    for (int step = 0; step < 9; step++) {
        for (size_t i = 0; i < n; i++) m.values[i] += 0.01f * number(ddp_rank(group), step, 1, i);
        float first = m.values[0];
        RANKS_OK(group, local_sgd_step(local, &synced));
        RANKS_CHECK(group, synced == (step % 3 == 2), "step %d: synced=%d", step, synced);
        if (!synced) {
            RANKS_CHECK(group, m.values[0] == first, "step %d changed values", step);
            continue;
        }
        for (size_t i = 0; i < n; i++) {
            mean[i] = 0;
            for (int r = 0; r < ranks; r++)
                for (int s = step - 2; s <= step; s++) mean[i] -= 0.01 * (double)number(r, s, 1, i) / ranks;
            speed[i] = momentum * speed[i] + mean[i];
            old[i] -= eta * (momentum > 0 ? mean[i] + momentum * speed[i] : mean[i]);
            RANKS_CHECK(group, fabs(old[i] - (double)m.values[i]) < 2e-6, "step %d value %zu: %g for %g",
                        step, i, (double)m.values[i], old[i]);
        }
        RANKS_CHECK(group, is_equal(group, hash_floats(0, m.values, n)), "step %d: ranks have other bits",
                    step);
        if (step != 2) continue;
        RANKS_OK(group, local_sgd_save(local, NULL, &bytes)); /* continues in another object */
        char *state = (char *)malloc(bytes);
        local_sgd_desc desc = local->desc;
        RANKS_OK(group, local_sgd_save(local, state, &bytes));
        RANKS_OK(group, local_sgd_create(&again, group, &desc));
        RANKS_OK(group, local_sgd_load(again, state, bytes));
        local_sgd_destroy(local);
        local = again;
        free(state);
    }
    RANKS_OK(group, local_sgd_get_stats(local, &stats));
    RANKS_CHECK(group, stats.gradient_bytes == n * 4 * 6 && stats.sent_bytes == (ranks > 1 ? n * 4 * 2 : 0),
                "%llu of %llu bytes", (unsigned long long)stats.sent_bytes,
                (unsigned long long)stats.gradient_bytes);
    free(old);
    free(speed);
    free(mean);
    local_sgd_destroy(local);
    model_close(&m);
    return DDP_OK;
}

static ddp_result bad_locals(ddp_group *group) {
    static const struct {
        const char *text;
        int every;
        double lr, momentum;
    } cases[] = {
        {"every=0", 0, 0, 0},      {"outer_lr=-1", 1, -1, 0},     {"outer_lr=nan", 1, NAN, 0},
        {"outer_lr=11", 1, 11, 0}, {"outer_momentum=1", 1, 0, 1}, {"outer_momentum=-0.5", 1, 0, -0.5},
    };
    model m;
    local_sgd *local, *other;
    local_sgd_desc desc;
    size_t bytes;
    int mine = ddp_rank(group) == 0;
    for (int c = 0; c < (int)(sizeof cases / sizeof cases[0]); c++) {
        ddp_result result = local_open(&m, &local, group, cases[c].every, cases[c].lr, cases[c].momentum);
        RANKS_CHECK(group, said(result, DDP_ERR_INVALID, cases[c].text) && !local, "case %d", c);
        model_close(&m);
    }
    RANKS_OK(group, local_open(&m, &local, group, 4, 0.7, 0.9));
    desc = local->desc;
    desc.every = 5;
    RANKS_OK(group, local_sgd_create(&other, group, &desc));
    RANKS_OK(group, local_sgd_save(local, NULL, &bytes));
    char *state = (char *)malloc(bytes);
    RANKS_OK(group, local_sgd_save(local, state, &bytes));
    RANKS_CHECK(group, said(local_sgd_load(other, state, bytes), DDP_ERR_INVALID, "another desc"), "load");
    RANKS_CHECK(group, said(local_sgd_load(local, state, bytes - 1), DDP_ERR_CORRUPT, "bytes, not"), "load");
    RANKS_CHECK(group, said(local_sgd_load(local, state, 3), DDP_ERR_CORRUPT, "truncated"), "load");
    state[1] ^= 1;
    RANKS_CHECK(group, said(local_sgd_load(local, state, bytes), DDP_ERR_CORRUPT, "not written by"), "load");
    bytes--;
    RANKS_CHECK(group, said(local_sgd_save(local, state, &bytes), DDP_ERR_INVALID, "are needed"), "save");
    RANKS_CHECK(group, said(local_sgd_step(NULL, NULL), DDP_ERR_INVALID, "local is NULL"), "step");
    RANKS_CHECK(group, said(local_sgd_get_stats(local, NULL), DDP_ERR_INVALID, "stats is NULL"), "stats");
    local_sgd_destroy(other);
    desc.every = mine ? 2 : 3;
    if (ddp_world_size(group) > 1)
        RANKS_CHECK(group,
                    said(local_sgd_create(&other, group, &desc), DDP_ERR_MISMATCH, "differ between ranks"),
                    "create");
    desc.every = 2;
    m.params[5].value.dtype = DDP_F64;
    RANKS_CHECK(group, said(local_sgd_create(&other, group, &desc), DDP_ERR_INVALID, "params[5] (no name)"),
                "create");
    RANKS_CHECK(group, said(local_sgd_create(&other, NULL, &desc), DDP_ERR_INVALID, "group is NULL"),
                "create");
    RANKS_CHECK(group, said(local_sgd_create(NULL, group, &desc), DDP_ERR_INVALID, "out is NULL"), "create");
    RANKS_CHECK(group, said(local_sgd_create(&other, group, NULL), DDP_ERR_INVALID, "desc is NULL"),
                "create");
    local_sgd_destroy(local);
    local_sgd_destroy(NULL);
    free(state);
    model_close(&m);
    return DDP_OK;
}

static ddp_result local_training(ddp_group *group) {
    RANKS_RUN(group, outer_steps(group, 0, 0));
    RANKS_RUN(group, outer_steps(group, 0.5, 0));
    RANKS_RUN(group, outer_steps(group, 0.7, 0.9));
    RANKS_RUN(group, bad_locals(group));
    if (ddp_world_size(group) > 1) return DDP_OK;
    model m;
    local_sgd *local;
    RANKS_OK(group, local_open(&m, &local, group, 1, 0, 0)); /* one rank, no outer optimizer: its own bits */
    uint64_t hash = hash_floats(0, m.values, m.total);
    RANKS_OK(group, local_sgd_step(local, NULL));
    RANKS_CHECK(group, hash == hash_floats(0, m.values, m.total), "one rank's values changed");
    local_sgd_destroy(local);
    model_close(&m);
    return DDP_OK;
}

//== learning ===============================================================================

/* A perceptron of IN x HIDDEN x OUT learns the outputs of another one of the same shape for random inputs. A
   rank has every W-th input. */
enum { IN = 24, HIDDEN = 32, OUT = 8, SAMPLES = 96, TURNS = 150 };
enum { W1, B1, W2, LAYERS };
static const int64_t NET[LAYERS][3] = {{2, HIDDEN, IN}, {1, HIDDEN}, {2, OUT, HIDDEN}};

enum { NET_COUNT = HIDDEN * IN + HIDDEN + OUT * HIDDEN };
typedef struct net {
    ddp_param params[LAYERS];
    float values[NET_COUNT], grads[NET_COUNT], speed[NET_COUNT];
} net;

static void net_forward(const float *values, int sample, float *x, float *hidden, float *y) {
    const float *w1 = values, *b1 = w1 + HIDDEN * IN, *w2 = b1 + HIDDEN;
    for (int i = 0; i < IN; i++) x[i] = number(9, 9, sample, (size_t)i);
    for (int h = 0; h < HIDDEN; h++) {
        float sum = b1[h];
        for (int i = 0; i < IN; i++) sum += w1[h * IN + i] * x[i];
        hidden[h] = tanhf(sum);
    }
    for (int o = 0; o < OUT; o++) {
        y[o] = 0;
        for (int h = 0; h < HIDDEN; h++) y[o] += w2[o * HIDDEN + h] * hidden[h];
    }
}

/* Mean loss over samples first, first + stride ...; gradients too unless NULL. */
static double net_loss(const float *values, const float *teacher, float *grads, int first, int stride) {
    float x[IN], hidden[HIDDEN], taught[HIDDEN], y[OUT], want[OUT];
    double loss = 0;
    int count = 0;
    if (grads) memset(grads, 0, NET_COUNT * sizeof *grads);
    for (int s = first; s < SAMPLES; s += stride, count++) {
        net_forward(teacher, s, x, taught, want);
        net_forward(values, s, x, hidden, y);
        for (int o = 0; o < OUT; o++) {
            float d = y[o] - want[o];
            loss += 0.5 * (double)d * d;
            y[o] = d;
        }
        for (int h = 0; h < HIDDEN && grads; h++) {
            float *w1 = grads, *b1 = w1 + HIDDEN * IN, *w2 = b1 + HIDDEN, back = 0;
            for (int o = 0; o < OUT; o++) {
                back += y[o] * values[HIDDEN * IN + HIDDEN + o * HIDDEN + h];
                w2[o * HIDDEN + h] += y[o] * hidden[h] / (float)(SAMPLES / stride);
            }
            back *= (1 - hidden[h] * hidden[h]) / (float)(SAMPLES / stride);
            b1[h] += back;
            for (int i = 0; i < IN; i++) w1[h * IN + i] += back * x[i];
        }
    }
    return loss / count;
}

/* The loss after this many steps of SGD with momentum. every > 0: local SGD, or DiLoCo. */
static ddp_result learn(ddp_group *group, const comm_hook_desc *how, int every, double outer_lr,
                        double outer_momentum, int turns, double *loss) {
    static const size_t count = NET_COUNT;
    float *teacher = (float *)calloc(count, 4);
    net *n = (net *)calloc(1, sizeof *n);
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_reducer *reducer = NULL;
    comm_hook_desc hook_desc = *how;
    comm_hook *hook = NULL;
    local_sgd_desc outer = DDP_ZERO;
    local_sgd *local = NULL;
    for (size_t i = 0; i < count; i++)
        teacher[i] = number(0, 1, 1, i) * 0.5f, n->values[i] = number(0, 2, 2, i) * 0.3f;
    for (size_t k = 0, at = 0; k < LAYERS; at += (size_t)ddp_tensor_count(&n->params[k++].value)) {
        ddp_tensor *value = &n->params[k].value;
        value->ndim = (int)NET[k][0];
        value->shape[0] = NET[k][1], value->shape[1] = NET[k][2];
        value->dtype = DDP_F32;
        value->data = n->values + at;
        n->params[k].grad.data = n->grads + at;
    }
    desc.params = outer.params = n->params;
    hook_desc.params = n->params;
    desc.param_count = hook_desc.param_count = outer.param_count = LAYERS;
    desc.first_bucket_bytes = 1024;
    if (how->kind) {
        RANKS_OK(group, comm_hook_create(&hook, group, &hook_desc));
        desc.hook = comm_hook_run;
        desc.hook_user = hook;
    }
    outer.every = every;
    outer.outer_lr = outer_lr;
    outer.outer_momentum = outer_momentum;
    if (every)
        RANKS_OK(group, local_sgd_create(&local, group, &outer));
    else
        RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    for (int turn = 0; turn < turns; turn++) {
        net_loss(n->values, teacher, n->grads, ddp_rank(group), ddp_world_size(group));
        for (int k = LAYERS - 1; k >= 0 && reducer; k--) RANKS_OK(group, ddp_reducer_ready(reducer, k));
        if (reducer) RANKS_OK(group, ddp_reducer_wait(reducer));
        for (size_t i = 0; i < count; i++) {
            n->speed[i] = 0.8f * n->speed[i] + n->grads[i];
            n->values[i] -= 0.04f * n->speed[i];
        }
        if (local) RANKS_OK(group, local_sgd_step(local, NULL));
    }
    RANKS_CHECK(group, is_equal(group, hash_floats(0, n->values, count)), "ranks have other weights");
    *loss = net_loss(n->values, teacher, NULL, 0, 1);
    ddp_reducer_destroy(reducer);
    comm_hook_destroy(hook);
    local_sgd_destroy(local);
    free(teacher);
    free(n);
    return DDP_OK;
}

/* Each reaches the loss of the plain all-reduce within a factor. */
static ddp_result models_learn(ddp_group *group) {
    static const struct {
        const char *name;
        int kind, rank, every;
        double lr, momentum, within;
    } cases[] = {
        {"bf16", COMM_HOOK_BF16, 0, 0, 0, 0, 1.02},  {"f16", COMM_HOOK_F16, 0, 0, 0, 0, 1.02},
        {"int8", COMM_HOOK_INT8, 0, 0, 0, 0, 1.05},  {"powersgd", COMM_HOOK_POWERSGD, 2, 0, 0, 0, 1.1},
        {"delay", COMM_HOOK_DELAY, 0, 0, 0, 0, 1.1}, {"local SGD", 0, 0, 5, 0, 0, 1.2},
        {"DiLoCo", 0, 0, 5, 0.7, 0.5, 1.1},
    };
    comm_hook_desc none = DDP_ZERO;
    double start, plain, loss;
    if (DDP_TEST_SLOWDOWN > 3) return DDP_OK; /* a ThreadSanitizer run adds nothing */
    RANKS_OK(group, learn(group, &none, 0, 0, 0, 0, &start));
    RANKS_OK(group, learn(group, &none, 0, 0, 0, TURNS, &plain));
    RANKS_CHECK(group, plain < 0.2 * start, "the plain one does not learn: from %g to %g", start, plain);
    for (int c = 0; c < (int)(sizeof cases / sizeof cases[0]); c++) {
        comm_hook_desc desc = DDP_ZERO;
        desc.kind = (comm_hook_kind)cases[c].kind;
        desc.rank = cases[c].rank;
        RANKS_OK(group, learn(group, &desc, cases[c].every, cases[c].lr, cases[c].momentum, TURNS, &loss));
        if (ddp_rank(group) == 0)
            printf("W=%d %-9s loss %.5f, plain %.5f: %.3f of it, allowed %.2f\n", ddp_world_size(group),
                   cases[c].name, loss, plain, loss / plain, cases[c].within);
        RANKS_CHECK(group, loss <= plain * cases[c].within, "%s: loss %g, plain %g", cases[c].name, loss,
                    plain);
    }
    return DDP_OK;
}

//== a rank that is lost ====================================================================

typedef struct trouble {
    int kind, leaves;
    ddp_result result[8];
    char text[8][400];
} trouble;
static trouble *troubles; /* shared by the ranks */

/* Rank 1 is killed, or as a thread returns, before its fourth step. */
static ddp_result into_trouble(ddp_group *group, void *user) {
    model m;
    how h = how_of((comm_hook_kind)troubles->kind);
    int rank = ddp_rank(group);
    ddp_result result = model_open(&m, group, &h);
    (void)user;
    for (int step = 0; step < 6 && result == DDP_OK; step++) {
        if (step == 3 && rank == 1 && !troubles->leaves) raise(SIGKILL);
        if (step == 3 && rank == 1) { /* without its collective part */
            ddp_group_destroy(m.hook->delay_group);
            return ddp_fail(DDP_ERR_ENGINE, "rank 1 has had enough");
        }
        result = model_step(&m, step);
    }
    troubles->result[rank] = result;
    snprintf(troubles->text[rank], sizeof troubles->text[rank], "%.399s", ddp_last_error());
    model_close(&m);
    return result;
}

/* The errors of the others name the rank, in the same step instead of after the timeout of ten minutes. */
static int trouble_ends(ranks_mode mode, int kind) {
    int failed = 0;
    memset(troubles, 0, sizeof *troubles);
    troubles->kind = kind;
    troubles->leaves = ranks_backends[mode].start == RANKS_AS_THREADS;
    (void)ranks_run(mode, 3, 600000, into_trouble, NULL);
    for (int r = 0; r < 3; r += 2) {
        if (troubles->result[r] == DDP_ERR_PEER_LOST && strstr(troubles->text[r], "rank 1")) continue;
        failed = fprintf(stderr, "FAIL kind %d, rank %d/3: %s '%s'\n", kind, r,
                         ddp_result_name(troubles->result[r]), troubles->text[r])
                 > 0;
    }
    return failed;
}

//== all of them ============================================================================

static ddp_result cases(ddp_group *group, void *user) {
    (void)user;
    RANKS_RUN(group, a_bucket_tells_whose_gradients_lie_where(group));
    RANKS_RUN(group, bits_of_the_reducer(group));
    RANKS_RUN(group, sums_over_steps(group));
    RANKS_RUN(group, low_rank_is_exact(group));
    RANKS_RUN(group, one_step_late(group));
    RANKS_RUN(group, not_a_number(group));
    RANKS_RUN(group, bytes_and_memory(group));
    RANKS_RUN(group, states(group));
    RANKS_RUN(group, bad_creates(group));
    RANKS_RUN(group, bad_states(group));
    RANKS_RUN(group, bad_steps(group));
    RANKS_RUN(group, local_training(group));
    RANKS_RUN(group, models_learn(group));
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 3, 4, 0};
    ranks_mode mode;
    int failed;
    ranks_memory.alloc_fn = counting_alloc;
    ranks_memory.free_fn = counting_free;
    troubles = (trouble *)ranks_shared(sizeof *troubles);
    failed = ranks_each(argc, argv, worlds, 55, &mode, cases) != 0;
    /* mpirun ends all ranks if one is lost */
    for (int kind = COMM_HOOK_INT8; kind <= COMM_HOOK_DELAY && !failed && !ranks_joins(mode); kind++)
        failed = trouble_ends(mode, kind);
    return failed;
}

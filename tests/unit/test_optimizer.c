/*  test_optimizer.c - optimizers, learning rates and the loss scaler of ddp_fsdp.h: every kind and option
    against plain formulas in double, equal bits with sharding, state through a device and through the user's
    allocator, every bad input. compile/optimizer_bits.c compares bits between compilers. */
#include "ddp_fsdp.h"

#include <math.h>

#include "../support/inner.h"
#include "../support/unit.h"
#include "../support/watchdog.h"

enum { STEPS = 6, TENSORS = 6, COUNT_MAX = 6000 };

/* Tensors of a model: 3 is another use of 2, 5 has rows of more than one piece. */
static const struct {
    const char *name;
    ddp_dtype dtype;
    int ndim;
    int64_t shape[2];
} shapes[TENSORS] = {
    {"matrix", DDP_F32, 2, {7, 13}}, {"bias", DDP_F32, 1, {5, 0}},  {"tied", DDP_F64, 2, {2, 9}},
    {"use", DDP_F64, 2, {2, 9}},     {"gain", DDP_F64, 1, {11, 0}}, {"wide", DDP_F32, 2, {1, 5003}},
};

typedef struct model {
    ddp_param params[TENSORS];
    unsigned char value[TENSORS][COUNT_MAX * 8], grad[TENSORS][COUNT_MAX * 8];
} model;

static double number(int tensor, int64_t i, int step) {
    uint64_t x = (uint64_t)(tensor * 100 + step) * UINT64_C(0x9e3779b97f4a7c15)
                 + (uint64_t)i * UINT64_C(0xbf58476d1ce4e5b9) + 1;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)(float)((double)(int64_t)(x ^ x >> 31) * 0x1p-63 * (step ? 0.1 : 1.0));
}

static void put(void *at, ddp_dtype dtype, int64_t i, double x) {
    if (dtype == DDP_F32)
        ((float *)at)[i] = (float)x;
    else
        ((double *)at)[i] = x;
}
static double get(const void *at, ddp_dtype dtype, int64_t i) {
    return dtype == DDP_F32 ? (double)((const float *)at)[i] : ((const double *)at)[i];
}

static int64_t columns_of(int t) { return shapes[t].ndim == 2 ? shapes[t].shape[1] : 1; }

/* The rows of this rank; rank 0 of 1 has all. */
static void model_open(model *m, int rank, int world_size) {
    memset(m, 0, sizeof *m);
    for (int t = 0; t < TENSORS; t++) {
        ddp_param *p = &m->params[t];
        int64_t share = (shapes[t].shape[0] + world_size - 1) / world_size, first = share * rank,
                rows = shapes[t].shape[0] - first;
        if (rows > share) rows = share;
        if (rows < 0) rows = 0;
        p->name = shapes[t].name;
        p->value.dtype = shapes[t].dtype;
        p->value.ndim = shapes[t].ndim;
        p->value.shape[0] = rows;
        p->value.shape[1] = columns_of(t);
        p->value.data = rows ? m->value[t == 3 ? 2 : t] : NULL;
        p->grad = p->value;
        p->grad.data = rows ? m->grad[t] : NULL;
        for (int64_t i = 0; i < rows * columns_of(t); i++)
            put(m->value[t], shapes[t].dtype, i, number(t, first * columns_of(t) + i, 0));
    }
}

static void model_gradients(model *m, int rank, int world_size, int step) {
    for (int t = 0; t < TENSORS; t++) {
        int64_t first = (shapes[t].shape[0] + world_size - 1) / world_size * rank * columns_of(t);
        for (int64_t i = 0; i < ddp_tensor_count(&m->params[t].value); i++)
            put(m->grad[t], shapes[t].dtype, i, number(t, first + i, step));
    }
}

static float lr_of(int step) { return 0.02f / (float)step; }

static ddp_group *alone(const ddp_device *device) {
    ddp_group *group = NULL;
    ddp_group_desc desc = DDP_ZERO;
    desc.init_method = "self://";
    desc.device = device;
    assert_int_equal(ddp_group_create(&group, &desc), DDP_OK);
    return group;
}

static void expect_ok(ddp_result result) {
    if (result != DDP_OK) print_error("%s\n", ddp_last_error());
    assert_int_equal(result, DDP_OK);
}

static void expect_bad(ddp_result result, ddp_result wanted, const char *text) {
    assert_int_equal(result, wanted);
    if (!strstr(ddp_last_error(), text)) print_error("have: %s\nwant: %s\n", ddp_last_error(), text);
    assert_non_null(strstr(ddp_last_error(), text));
}

//== options ================================================================================

static ddp_optimizer_desc option(ddp_optimizer_kind kind) {
    ddp_optimizer_desc d = DDP_ZERO;
    d.kind = kind;
    return d;
}

static int is_adam(const ddp_optimizer_desc *d) {
    return d->kind == DDP_OPTIMIZER_ADAMW || d->kind == DDP_OPTIMIZER_LAMB;
}
static int has_trust(const ddp_optimizer_desc *d) {
    return d->kind == DDP_OPTIMIZER_LAMB || d->kind == DDP_OPTIMIZER_LARS;
}

enum { OPTIONS = 15 };
static ddp_optimizer_desc options_at(int i) {
    static const ddp_optimizer_kind kinds[OPTIONS] = {
        DDP_OPTIMIZER_ADAMW, DDP_OPTIMIZER_ADAMW, DDP_OPTIMIZER_ADAMW, DDP_OPTIMIZER_SGD,
        DDP_OPTIMIZER_SGD,   DDP_OPTIMIZER_SGD,   DDP_OPTIMIZER_SGD,   DDP_OPTIMIZER_SGD,
        DDP_OPTIMIZER_LAMB,  DDP_OPTIMIZER_LAMB,  DDP_OPTIMIZER_LAMB,  DDP_OPTIMIZER_LARS,
        DDP_OPTIMIZER_LARS,  DDP_OPTIMIZER_LARS,  DDP_OPTIMIZER_LARS};
    ddp_optimizer_desc d = option(kinds[i]);
    switch (i) {
    case 1:
        d.beta1 = 0.8f;
        d.beta2 = 0.95f;
        d.eps = 1e-3f;
        d.weight_decay = 0.1f;
        break;
    case 2:
        d.beta1 = -1;
        d.weight_decay = 0.1f;
        d.decay_matrices_only = 1;
        break;
    case 4: d.weight_decay = 0.1f; break;
    case 5: d.momentum = 0.9f; break;
    case 6:
        d.momentum = 0.9f;
        d.dampening = 0.3f;
        d.weight_decay = 0.1f;
        d.decay_matrices_only = 1;
        break;
    case 7:
        d.momentum = 0.8f;
        d.nesterov = 1;
        d.weight_decay = 0.01f;
        break;
    case 9:
        d.weight_decay = 0.1f;
        d.trust_coefficient = 0.5f;
        d.eps = 1e-2f;
        break;
    case 10:
        d.weight_decay = 0.1f;
        d.decay_matrices_only = 1;
        break;
    case 12:
        d.weight_decay = 0.1f;
        d.trust_coefficient = 0.02f;
        break;
    case 13:
        d.weight_decay = 0.1f;
        d.momentum = 0.5f;
        d.decay_matrices_only = 1;
        break;
    case 14:
        d.momentum = -1;
        d.weight_decay = 0.1f;
        break;
    default: break;
    }
    return d;
}

//== plain formulas =========================================================================

static double or_default(float x, double fallback) { return x == 0 ? fallback : x == -1 ? 0 : (double)x; }

static double length_of(const double *x, int64_t count) {
    long double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += (long double)x[i] * x[i];
    return (double)sqrtl(sum);
}

/* One step of a tensor; each kind as its paper or PyTorch writes it, line by line. */
static void plain_step(const ddp_optimizer_desc *d, int t, double *w, double *m, double *v, double *g,
                       int64_t count, int step, double lr) {
    int matrix = shapes[t].ndim > 1 || !d->decay_matrices_only;
    double b1 = or_default(d->beta1, (double)0.9f), b2 = or_default(d->beta2, (double)0.999f),
           decay = matrix ? (double)d->weight_decay : 0;
    double eps = or_default(d->eps, d->kind == DDP_OPTIMIZER_LAMB ? 1e-6 : 1e-8), mu = (double)d->momentum,
           ratio = 1;
    if (is_adam(d)) {
        for (int64_t i = 0; i < count; i++) {
            m[i] = b1 * m[i] + (1 - b1) * g[i];
            v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
            g[i] = m[i] / (1 - pow(b1, step)) / (sqrt(v[i] / (1 - pow(b2, step))) + eps) + decay * w[i];
        }
        if (d->kind == DDP_OPTIMIZER_LAMB && matrix)
            ratio = or_default(d->trust_coefficient, 1) * length_of(w, count) / length_of(g, count);
        for (int64_t i = 0; i < count; i++) w[i] -= lr * ratio * g[i];
        return;
    }
    if (d->kind == DDP_OPTIMIZER_LARS) {
        mu = or_default(d->momentum, (double)0.9f);
        if (matrix)
            ratio = or_default(d->trust_coefficient, (double)0.001f) * length_of(w, count)
                    / (length_of(g, count) + decay * length_of(w, count));
        for (int64_t i = 0; i < count; i++) {
            m[i] = mu * m[i] + lr * ratio * (g[i] + decay * w[i]);
            w[i] -= m[i];
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        double u = g[i] + decay * w[i];
        if (mu != 0) {
            m[i] = step == 1 ? u : mu * m[i] + (1 - (double)d->dampening) * u;
            u = d->nesterov ? u + mu * m[i] : m[i];
        }
        w[i] -= lr * u;
    }
}

static void every_kind_and_option_follows_its_formula(void **state) {
    static model m;
    static double w[TENSORS][COUNT_MAX], first[TENSORS][COUNT_MAX], second[TENSORS][COUNT_MAX], g[COUNT_MAX];
    ddp_group *group = alone(NULL);
    (void)state;
    for (int k = 0; k < OPTIONS; k++) {
        ddp_optimizer *optimizer;
        ddp_optimizer_desc d = options_at(k);
        model_open(&m, 0, 1);
        memset(first, 0, sizeof first);
        memset(second, 0, sizeof second);
        for (int t = 0; t < TENSORS; t++)
            for (int64_t i = 0; i < COUNT_MAX; i++) w[t][i] = number(t, i, 0);
        d.params = m.params;
        d.param_count = TENSORS;
        expect_ok(ddp_optimizer_create(&optimizer, group, &d));
        for (int step = 1; step <= STEPS; step++) {
            model_gradients(&m, 0, 1, step);
            expect_ok(ddp_optimizer_step(optimizer, lr_of(step)));
            for (int t = 0; t < TENSORS; t++) {
                int64_t count = ddp_tensor_count(&m.params[t].value);
                double close = shapes[t].dtype == DDP_F32 ? 3e-6 : 1e-14;
                if (t == 3) continue;
                for (int64_t i = 0; i < count; i++)
                    g[i] = number(t, i, step) + (t == 2 ? number(3, i, step) : 0);
                plain_step(&d, t, w[t], first[t], second[t], g, count, step, (double)lr_of(step));
                for (int64_t i = 0; i < count; i++)
                    if (!(fabs(get(m.value[t], shapes[t].dtype, i) - w[t][i]) <= close * (1 + fabs(w[t][i]))))
                        fail_msg("options %d step %d %s[%d]: %.17g, and it is %.17g", k, step, shapes[t].name,
                                 (int)i, get(m.value[t], shapes[t].dtype, i), w[t][i]);
            }
        }
        assert_int_equal(ddp_optimizer_get_step(optimizer), STEPS);
        ddp_optimizer_destroy(optimizer);
    }
    ddp_group_destroy(group);
}

/* The ratio is 1 if the norm of values, or of gradients, is 0. */
static void zeros_have_no_trust_ratio(void **state) {
    ddp_group *group = alone(NULL);
    float w[2][4] = {{0, 0, 0, 0}, {1, 2, 3, 4}}, g[2][4] = {{1, -1, 2, -2}, {0, 0, 0, 0}};
    (void)state;
    for (int k = 0; k < 2; k++) {
        ddp_optimizer *optimizer;
        ddp_param params[2];
        ddp_optimizer_desc d = option(k ? DDP_OPTIMIZER_LARS : DDP_OPTIMIZER_LAMB);
        memset(params, 0, sizeof params);
        for (int i = 0; i < 2; i++) {
            params[i].value.data = w[i];
            params[i].value.dtype = DDP_F32;
            params[i].value.ndim = 2;
            params[i].value.shape[0] = params[i].value.shape[1] = 2;
            params[i].grad.data = g[i];
        }
        memset(w[0], 0, sizeof w[0]);
        for (int i = 0; i < 4; i++) g[0][i] = (float)(i % 2 ? -1 - i / 2 : 1 + i / 2);
        d.params = params;
        d.param_count = 2;
        expect_ok(ddp_optimizer_create(&optimizer, group, &d));
        expect_ok(ddp_optimizer_step(optimizer, 0.5f));
        for (int i = 0; i < 4; i++) {
            double move = k ? 0.5 * (i % 2 ? -1 - i / 2 : 1 + i / 2) : i % 2 ? -0.5 : 0.5;
            assert_true(fabs(w[0][i] + move) < 1e-5);
            assert_true(w[1][i] == (float)(i + 1));
        }
        ddp_optimizer_destroy(optimizer);
    }
    ddp_group_destroy(group);
}

/* nesterov is an option of SGD: LARS ends with the same bits with and without it. */
static void lars_ignores_nesterov(void **state) {
    ddp_group *group = alone(NULL);
    float w[2][4] = {{1, -2, 3, 0.5f}, {1, -2, 3, 0.5f}}, g[4] = {0.3f, -1, 2, 0.7f};
    (void)state;
    for (int k = 0; k < 2; k++) {
        ddp_optimizer *optimizer;
        ddp_param param;
        ddp_optimizer_desc d = option(DDP_OPTIMIZER_LARS);
        memset(&param, 0, sizeof param);
        param.value.data = w[k];
        param.value.dtype = DDP_F32;
        param.value.ndim = 2;
        param.value.shape[0] = param.value.shape[1] = 2;
        d.params = &param;
        d.param_count = 1;
        d.nesterov = k;
        for (int step = 0; step < 3; step++) {
            float grad[4];
            memcpy(grad, g, sizeof grad);
            param.grad.data = grad;
            if (step == 0) expect_ok(ddp_optimizer_create(&optimizer, group, &d));
            expect_ok(ddp_optimizer_step(optimizer, 0.5f));
        }
        ddp_optimizer_destroy(optimizer);
    }
    assert_memory_equal(w[0], w[1], sizeof w[0]);
    ddp_group_destroy(group);
}

//== bits by sharding =======================================================================

/* One piece of memory with all values and state, tensor by tensor, in which ranks store their rows. */
static unsigned char results[2][3][TENSORS][COUNT_MAX * 8];

typedef struct sharded {
    ddp_optimizer_desc desc;
    int to;
} sharded;

static ddp_result train_shard(ddp_group *world, void *user) {
    const sharded *s = (const sharded *)user;
    int rank = ddp_rank(world), world_size = ddp_world_size(world);
    model *m = (model *)calloc(1, sizeof *m);
    ddp_optimizer *optimizer;
    ddp_optimizer_desc d = s->desc;
    ddp_result result;
    model_open(m, rank, world_size);
    d.params = m->params;
    d.param_count = TENSORS;
    if (s->to) d.shard_group = world; /* the first run uses full tensors */
    result = ddp_optimizer_create(&optimizer, world, &d);
    for (int step = 1; step <= 3 && result == DDP_OK; step++) {
        model_gradients(m, rank, world_size, step);
        result = ddp_optimizer_step(optimizer, lr_of(step));
    }
    for (int t = 0; t < TENSORS && result == DDP_OK; t++) {
        size_t size = ddp_dtype_size(shapes[t].dtype),
               bytes = (size_t)ddp_tensor_count(&m->params[t].value) * size;
        size_t first = (size_t)((shapes[t].shape[0] + world_size - 1) / world_size * rank * columns_of(t))
                       * size;
        ddp_tensor tensor;
        if (bytes) memcpy(results[s->to][0][t] + first, m->params[t].value.data, bytes);
        for (int which = 0; which < 2 && bytes; which++)
            if (ddp_optimizer_get_state(optimizer, t, which, NULL, &tensor) == DDP_OK)
                memcpy(results[s->to][1 + which][t] + first, tensor.data, bytes);
    }
    ddp_optimizer_destroy(optimizer);
    free(m);
    return result;
}

static void bits_do_not_depend_on_the_sharding(void **state) {
    (void)state;
    for (int k = 0; k < OPTIONS; k++) {
        sharded s;
        s.desc = options_at(k);
        memset(results, 0, sizeof results);
        for (int world_size = 0; world_size <= 4; world_size++) {
            ddp_launch_desc launch = DDP_ZERO;
            s.to = world_size > 0;
            launch.mode = DDP_LAUNCH_THREADS;
            launch.world_size = world_size ? world_size : 1;
            if (!s.to || world_size == 1 || has_trust(&s.desc) || k % 3 == world_size % 3)
                expect_ok(ddp_launch(&launch, train_shard, &s));
            if (s.to && memcmp(results[0], results[1], sizeof results[0]) != 0)
                fail_msg("options %d: %d ranks have other bits", k, world_size);
        }
    }
}

//== state ==================================================================================

static void a_loaded_state_goes_on_with_the_same_bits(void **state) {
    static model m, copy;
    ddp_group *group = alone(NULL);
    (void)state;
    for (int k = 0; k < OPTIONS; k++) {
        ddp_optimizer *a, *b;
        ddp_optimizer_desc d = options_at(k);
        model_open(&m, 0, 1);
        model_open(&copy, 0, 1);
        d.params = m.params;
        d.param_count = TENSORS;
        expect_ok(ddp_optimizer_create(&a, group, &d));
        for (int step = 1; step <= 2; step++) {
            model_gradients(&m, 0, 1, step);
            expect_ok(ddp_optimizer_step(a, lr_of(step)));
        }
        d.params = copy.params;
        expect_ok(ddp_optimizer_create(&b, group, &d));
        memcpy(copy.value, m.value, sizeof m.value);
        for (int t = 0; t < TENSORS; t++)
            for (int which = 0; which < 2; which++) {
                ddp_tensor from, to;
                const char *name, *other;
                if (ddp_optimizer_get_state(a, t, which, &name, &from) != DDP_OK) continue;
                expect_ok(ddp_optimizer_get_state(b, t, which, &other, &to));
                assert_string_equal(name, other);
                assert_string_equal(name, is_adam(&d) ? which ? "exp_avg_sq" : "exp_avg" : "momentum_buffer");
                assert_int_equal(ddp_tensor_count(&from), ddp_tensor_count(&m.params[t].value));
                assert_int_equal(from.dtype, shapes[t].dtype);
                memcpy(to.data, from.data, (size_t)ddp_tensor_count(&from) * ddp_dtype_size(from.dtype));
            }
        ddp_optimizer_set_step(b, -1); /* would divide by 1 - beta^0 */
        assert_int_equal(ddp_optimizer_get_step(b), 0);
        ddp_optimizer_set_step(b, ddp_optimizer_get_step(a));
        model_gradients(&m, 0, 1, 3);
        model_gradients(&copy, 0, 1, 3);
        expect_ok(ddp_optimizer_step(a, 0.01f));
        expect_ok(ddp_optimizer_step(b, 0.01f));
        assert_memory_equal(m.value, copy.value, sizeof m.value);
        ddp_optimizer_destroy(a);
        ddp_optimizer_destroy(b);
    }
    ddp_group_destroy(group);
}

static int allocations, frees;
static size_t allocated;
static void *count_alloc(size_t size_bytes, void *user) {
    allocations++;
    allocated += size_bytes;
    return *(int *)user ? NULL : calloc(1, size_bytes);
}
static void count_free(void *memory, void *user) {
    (void)user;
    frees++;
    free(memory);
}

static void state_comes_from_the_users_allocator(void **state) {
    static model m;
    static const size_t wanted[4] = {2 * (384 + 64 + 192 + 128 + 20032), 384 + 64 + 192 + 128 + 20032,
                                     2 * (384 + 64 + 192 + 128 + 20032), 384 + 64 + 192 + 128 + 20032};
    ddp_group *group = alone(NULL);
    int refuse = 0;
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        ddp_optimizer *optimizer;
        ddp_optimizer_desc d = option((ddp_optimizer_kind)kind);
        model_open(&m, 0, 1);
        model_gradients(&m, 0, 1, 1);
        d.momentum = 0.9f;
        d.params = m.params;
        d.param_count = TENSORS;
        d.state_alloc_fn = count_alloc;
        d.state_free_fn = count_free;
        d.state_user = &refuse;
        allocations = frees = 0;
        allocated = 0;
        expect_ok(ddp_optimizer_create(&optimizer, group, &d));
        assert_int_equal(allocations, 1);
        assert_int_equal(allocated, wanted[kind]);
        expect_ok(ddp_optimizer_step(optimizer, 0.1f));
        ddp_optimizer_destroy(optimizer);
        assert_int_equal(allocations, 1);
        assert_int_equal(frees, 1);
        refuse = 1;
        expect_bad(ddp_optimizer_create(&optimizer, group, &d), DDP_ERR_NO_MEMORY,
                   "could not be allocated by state_alloc_fn");
        assert_null(optimizer);
        refuse = 0;
    }
    ddp_optimizer_destroy(NULL);
    ddp_group_destroy(group);
}

/* A device with its own kernels is called to compute, with the results of the CPU. */
static int updates; /* tensors */
static void device_update(const ddp_update *u) {
    for (int i = 0; i < u->tensor_count; i++, updates++)
        if (u->dtype == DDP_F32)
            inner.update_f32(u, &u->tensors[i]);
        else
            inner.update_f64(u, &u->tensors[i]);
}
static void device_scale(const ddp_tensor *tensors, int count, const float *factor) {
    ddp_device_cpu()->scale(tensors, count, *factor);
}
static void device_clip(const ddp_exact_sum *sum, float limit, float *factor, float *norm) {
    (void)sum;
    (void)limit;
    (void)factor;
    (void)norm;
}
static void device_trust(const ddp_exact_sum *sums, size_t count, double lr, double c, double decay,
                         double *out) {
    for (size_t i = 0; i < count; i++) {
        double value = sqrt(ddp_exact_sum_value(&sums[2 * i])),
               grad = sqrt(ddp_exact_sum_value(&sums[2 * i + 1]));
        if (decay > 0) grad += decay * value;
        out[i] = lr * (value == 0 || grad == 0 ? 1 : c * value / grad);
    }
}
static ddp_optimizer_kernels device_kernels = {DDP_VERSION, device_update, device_scale, device_clip,
                                               device_trust};

/* A device without a table, whose memory the host cannot read, or with the table of another version. */
static void kernels_of_a_device_are_checked(void **state) {
    static const char *const texts[2] = {
        "rank 0/1 ddp_optimizer_create group=world: device test has no kernels for ddp_fsdp.h; put "
        "ddp_fsdp.h into the folder of ddp_cuda.cuh",
        "rank 0/1 ddp_optimizer_create group=world: device test has kernels for version 1 of ddp_fsdp.h, but "
        "that header has version"};
    static model m;
    ddp_optimizer_kernels other = device_kernels;
    (void)state;
    other.version = 1;
    for (int turn = 0; turn < 2; turn++) {
        ddp_device device = *ddp_device_cpu();
        ddp_optimizer_desc d = option(DDP_OPTIMIZER_ADAMW);
        ddp_optimizer *optimizer;
        ddp_group *group;
        device.name = "test";
        device.host_memory = turn;
        device.optimizer = turn ? &other : NULL;
        group = alone(&device);
        model_open(&m, 0, 1);
        d.params = m.params;
        d.param_count = TENSORS;
        expect_bad(ddp_optimizer_create(&optimizer, group, &d), DDP_ERR_UNSUPPORTED, texts[turn]);
        ddp_group_destroy(group);
    }
}

static void a_device_computes_itself(void **state) {
    static model m, other;
    static const int wanted[4] = {5, 5, 10, 5};
    ddp_device device = *ddp_device_cpu();
    ddp_group *group, *plain = alone(NULL);
    (void)state;
    device.name = "test";
    device.optimizer = &device_kernels;
    group = alone(&device);
    for (int kind = 0; kind < 4; kind++)
        for (int mixed = 0; mixed < 2; mixed++) { /* mixed: a group with memory elsewhere sums the norms */
            ddp_optimizer *a, *b;
            ddp_optimizer_desc d = option((ddp_optimizer_kind)kind);
            d.weight_decay = 0.1f;
            d.param_count = TENSORS;
            model_open(&m, 0, 1);
            model_open(&other, 0, 1);
            d.params = other.params;
            expect_ok(ddp_optimizer_create(&b, plain, &d));
            d.params = m.params;
            if (mixed) d.shard_group = plain;
            expect_ok(ddp_optimizer_create(&a, group, &d));
            model_gradients(&m, 0, 1, 1);
            model_gradients(&other, 0, 1, 1);
            updates = 0;
            expect_ok(ddp_optimizer_step(a, 0.1f));
            expect_ok(ddp_optimizer_step(b, 0.1f));
            assert_int_equal(updates, wanted[kind]);
            assert_memory_equal(m.value, other.value, sizeof m.value);
            ddp_optimizer_destroy(a);
            ddp_optimizer_destroy(b);
        }
    ddp_group_destroy(group);
    ddp_group_destroy(plain);
}

/* Gradients multiplied in the pass of the step, or in one before: the same bits, on the CPU and on a
   device. */
static void scaled_gradients_are_the_products(void **state) {
    static model m, other;
    ddp_device device = *ddp_device_cpu();
    ddp_group *plain = alone(NULL), *group;
    (void)state;
    device.name = "test";
    device.optimizer = &device_kernels;
    group = alone(&device);
    for (int kind = 0; kind < 4; kind++)
        for (int on_device = 0; on_device < 2; on_device++) {
            ddp_optimizer *a, *b;
            ddp_optimizer_desc d = option((ddp_optimizer_kind)kind);
            d.weight_decay = 0.1f;
            d.momentum = 0.9f;
            d.param_count = TENSORS;
            model_open(&m, 0, 1);
            model_open(&other, 0, 1);
            d.params = other.params;
            expect_ok(ddp_optimizer_create(&b, plain, &d));
            d.params = m.params;
            expect_ok(ddp_optimizer_create(&a, on_device ? group : plain, &d));
            for (int step = 1; step <= 3; step++) {
                float scale = step == 3 ? 1.0f : 0.3f / (float)step;
                model_gradients(&m, 0, 1, step);
                model_gradients(&other, 0, 1, step);
                for (int i = 0; i < TENSORS; i++) {
                    ddp_tensor grad = other.params[i].value;
                    grad.data = other.params[i].grad.data;
                    ddp_device_cpu()->scale(&grad, 1, scale);
                }
                expect_ok(ddp_optimizer_step_scaled(a, 0.1f, scale));
                expect_ok(ddp_optimizer_step(b, 0.1f));
                assert_memory_equal(m.value, other.value, sizeof m.value);
            }
            expect_bad(ddp_optimizer_step_scaled(a, 0.1f, 0), DDP_ERR_INVALID,
                       "grad_scale=0; use a positive number");
            expect_bad(ddp_optimizer_step_scaled(a, 0.1f, NAN), DDP_ERR_INVALID, "grad_scale=");
            expect_bad(ddp_optimizer_step_scaled(a, 0.1f, INFINITY), DDP_ERR_INVALID, "grad_scale=inf");
            assert_memory_equal(m.value, other.value, sizeof m.value);
            ddp_optimizer_destroy(a);
            ddp_optimizer_destroy(b);
        }
    ddp_group_destroy(group);
    ddp_group_destroy(plain);
}

//== bad input ==============================================================================

static void bad_optimizers_are_told_what_is_wrong(void **state) {
    static model m;
    ddp_group *group = alone(NULL);
    ddp_optimizer *optimizer = (ddp_optimizer *)&m;
    ddp_optimizer_desc good = option(DDP_OPTIMIZER_LAMB);
    ddp_tensor tensor;
    (void)state;
    model_open(&m, 0, 1);
    good.params = m.params;
    good.param_count = TENSORS;
#define BAD(kind_, change, text)                                                                          \
    do {                                                                                                  \
        ddp_optimizer_desc d = good;                                                                      \
        d.kind = kind_;                                                                                   \
        change;                                                                                           \
        expect_bad(ddp_optimizer_create(&optimizer, group, &d), DDP_ERR_INVALID, "ddp_optimizer_create"); \
        expect_bad(DDP_ERR_INVALID, DDP_ERR_INVALID, text);                                               \
        assert_null(optimizer);                                                                           \
        model_open(&m, 0, 1);                                                                             \
    } while (0)
    BAD((ddp_optimizer_kind)4, (void)0, "kind=4");
    BAD(DDP_OPTIMIZER_ADAMW, d.beta1 = 1, "beta1=1");
    BAD(DDP_OPTIMIZER_LAMB, d.beta2 = -0.5f, "beta2=-0.5");
    BAD(DDP_OPTIMIZER_ADAMW, d.eps = -1, "eps=-1");
    BAD(DDP_OPTIMIZER_ADAMW, d.eps = (float)INFINITY, "eps=inf");
    BAD(DDP_OPTIMIZER_SGD, d.momentum = (float)NAN, "momentum=");
    BAD(DDP_OPTIMIZER_LARS, d.dampening = -2, "dampening=-2");
    BAD(DDP_OPTIMIZER_SGD, d.nesterov = 1,
        "nesterov=1 with momentum=0 and dampening=0; use a positive momentum and dampening 0");
    BAD(DDP_OPTIMIZER_SGD, d.nesterov = 1; d.momentum = 0.9f; d.dampening = 0.1f, "nesterov");
    BAD(DDP_OPTIMIZER_LARS, d.trust_coefficient = -1, "trust_coefficient=-1");
    BAD(DDP_OPTIMIZER_ADAMW, d.weight_decay = -1, "weight_decay=-1");
    BAD(DDP_OPTIMIZER_ADAMW, d.params = NULL, "params is NULL");
    BAD(DDP_OPTIMIZER_ADAMW, d.param_count = 0, "param_count=0");
    BAD(DDP_OPTIMIZER_ADAMW, d.state_alloc_fn = count_alloc, "both state_alloc_fn and state_free_fn");
    BAD(DDP_OPTIMIZER_ADAMW, m.params[1].value.dtype = DDP_BF16,
        "params[1] \"bias\": value.dtype is bf16; use f32 or f64");
    BAD(DDP_OPTIMIZER_ADAMW, m.params[1].value.shape[0] = -1,
        "params[1] \"bias\": value.ndim=1 or value.shape is invalid");
    BAD(DDP_OPTIMIZER_ADAMW, m.params[4].value.data = NULL, "params[4] \"gain\": value.data is NULL");
    BAD(DDP_OPTIMIZER_ADAMW, m.params[4].grad.data = NULL, "params[4] \"gain\": grad.data is NULL");
    BAD(DDP_OPTIMIZER_ADAMW, m.params[0].grad.dtype = DDP_F64,
        "params[0] \"matrix\": value is f32, but grad is f64");
    BAD(DDP_OPTIMIZER_ADAMW, m.params[0].grad.shape[0] = 3,
        "params[0] \"matrix\": value has 91 elements, but grad has 39");
    BAD(DDP_OPTIMIZER_ADAMW, m.params[3].value.shape[0] = m.params[3].grad.shape[0] = 1,
        "params[3] \"use\" and params[2] share value.data but differ in shape");
#undef BAD
    expect_bad(ddp_optimizer_create(NULL, group, &good), DDP_ERR_INVALID, "out is NULL");
    expect_bad(ddp_optimizer_create(&optimizer, NULL, &good), DDP_ERR_INVALID, "group or desc is NULL");
    expect_ok(ddp_optimizer_create(&optimizer, group, &good));
    expect_bad(ddp_optimizer_step(NULL, 0.1f), DDP_ERR_INVALID, "ddp_optimizer_step: optimizer is NULL");
    expect_bad(ddp_optimizer_step(optimizer, (float)NAN), DDP_ERR_INVALID, "ddp_optimizer_step: lr=");
    expect_bad(ddp_optimizer_step(optimizer, -1), DDP_ERR_INVALID, "lr=-1; use 0 or more");
    m.params[1].grad.data = NULL;
    expect_bad(ddp_optimizer_step(optimizer, 1), DDP_ERR_INVALID, "params[1] \"bias\": grad.data is NULL");
    assert_int_equal(ddp_optimizer_get_step(optimizer), 0);
    expect_bad(ddp_optimizer_get_state(optimizer, TENSORS, 0, NULL, &tensor), DDP_ERR_INVALID,
               "param=6 with 6 parameters; use 0 to param_count - 1");
    expect_bad(ddp_optimizer_get_state(optimizer, 0, 2, NULL, &tensor), DDP_ERR_INVALID,
               "which=2, but each parameter has 2 states");
    ddp_optimizer_destroy(optimizer);
    ddp_group_destroy(group);
}

//== learning rates =========================================================================

/* Linear warm-up over a tenth of the steps, at most 100, then a cosine down to a tenth of lr. */
static float learning_rate(double lr, int64_t steps, int64_t step) {
    int64_t warm = steps / 10 < 100 ? steps / 10 : 100;
    if (step <= warm) return (float)(lr * (double)step / (double)warm);
    return (float)(lr
                   * (0.55
                      + 0.45 * cos(3.14159265358979323846 * (double)(step - warm) / (double)(steps - warm))));
}

static void the_cosine_has_the_values_of_its_formula(void **state) {
    static const double rates[] = {3e-3, 6e-4, 1e-3, 0.1, 7.3e-4, 1e-9, 9.87654321};
    static const int64_t lengths[] = {1, 7, 20, 100, 1000, 3001};
    (void)state;
    for (int r = 0; r < 7; r++)
        for (int l = 0; l < 6; l++) {
            ddp_lr_desc d = DDP_ZERO;
            d.kind = DDP_LR_COSINE;
            d.max_lr = rates[r];
            d.min_lr = rates[r] / 10;
            d.total_steps = lengths[l];
            d.warmup_steps = lengths[l] / 10 < 100 ? lengths[l] / 10 : 100;
            for (int64_t step = 1; step <= lengths[l]; step++) {
                float a = ddp_lr_at(&d, step), b = learning_rate(rates[r], lengths[l], step);
                if (a != b)
                    fail_msg("peak %g step %d of %d: %.9g, not %.9g", rates[r], (int)step, (int)lengths[l],
                             (double)a, (double)b);
            }
        }
}

static ddp_lr_desc schedule(ddp_lr_kind kind) {
    ddp_lr_desc d = DDP_ZERO;
    d.kind = kind;
    d.max_lr = 1;
    d.min_lr = 0.25;
    d.warmup_steps = 4;
    d.total_steps = 24;
    return d;
}

static void schedules_have_the_values_computed_by_hand(void **state) {
    /* Constant, cosine, linear, polynomial of power 2, WSD with 8 steps of decay. */
    static const struct {
        int64_t step;
        float of[5];
    } wanted[] = {
        {-3, {0, 0, 0, 0, 0}},
        {0, {0, 0, 0, 0, 0}},
        {1, {0.25f, 0.25f, 0.25f, 0.25f, 0.25f}},
        {3, {0.75f, 0.75f, 0.75f, 0.75f, 0.75f}},
        {4, {1, 1, 1, 1, 1}},
        {14, {1, 0.625f, 0.625f, 0.4375f, 1}},
        {16, {1, 0, 0.55f, 0.37f, 1}},
        {20, {1, 0, 0.4f, 0.28f, 0.625f}},
        {24, {1, 0.25f, 0.25f, 0.25f, 0.25f}},
        {25, {1, 0.25f, 0.25f, 0.25f, 0.25f}},
        {1000000, {1, 0.25f, 0.25f, 0.25f, 0.25f}},
    };
    ddp_lr_desc d;
    (void)state;
    for (int kind = 0; kind < 5; kind++)
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
            float want = wanted[i].of[kind];
            d = schedule((ddp_lr_kind)kind);
            d.power = 2;
            d.decay_steps = 8;
            if (kind == DDP_LR_COSINE && wanted[i].step == 16)
                want = (float)(0.25 + 0.75 * 0.5 * (1 + cos(0.6 * 3.14159265358979)));
            if (kind == DDP_LR_COSINE && wanted[i].step == 20)
                want = (float)(0.25 + 0.75 * 0.5 * (1 + cos(0.8 * 3.14159265358979)));
            if (!(fabsf(ddp_lr_at(&d, wanted[i].step) - want) <= 1e-7f))
                fail_msg("kind %d step %d: %g", kind, (int)wanted[i].step,
                         (double)ddp_lr_at(&d, wanted[i].step));
        }
    d = schedule(DDP_LR_WSD); /* a tenth of 24 is 2 */
    assert_true(ddp_lr_at(&d, 22) == 1 && ddp_lr_at(&d, 23) == 0.625f && ddp_lr_at(&d, 24) == 0.25f);
    for (int64_t total = 1; total < 10; total++) { /* a tenth of few steps is one */
        d = schedule(DDP_LR_WSD);
        d.warmup_steps = 0;
        d.total_steps = total;
        for (int64_t step = 0; step <= total; step++)
            assert_true(ddp_lr_at(&d, step) == (step < total ? 1 : 0.25f));
    }
    d = schedule(DDP_LR_POLYNOMIAL); /* power 0 is 1 */
    assert_true(ddp_lr_at(&d, 14) == 0.625f);
    d = schedule(DDP_LR_LINEAR);
    d.warmup_steps = 0;
    d.min_lr = 0;
    assert_true(ddp_lr_at(&d, 0) == 1 && ddp_lr_at(&d, 12) == 0.5f && ddp_lr_at(&d, 24) == 0);
    d.warmup_steps = 24; /* nothing but warm-up */
    assert_true(ddp_lr_at(&d, 24) == 1 && ddp_lr_at(&d, 25) == 0);
    d = schedule(DDP_LR_CONSTANT);
    d.total_steps = 0;
    assert_true(ddp_lr_at(&d, 2) == 0.5f && ddp_lr_at(&d, 1 << 30) == 1);
    /* Eight times the batch, eight times every rate. */
    for (int kind = DDP_LR_CONSTANT; kind <= DDP_LR_WSD; kind++) {
        ddp_lr_desc large;
        d = large = schedule((ddp_lr_kind)kind);
        large.batch = 2048;
        large.base_batch = 256;
        for (int step = 0; step < 30; step++) assert_true(ddp_lr_at(&large, step) == 8 * ddp_lr_at(&d, step));
    }
}

static void bad_schedules_are_told_what_is_wrong(void **state) {
    (void)state;
#define BAD(kind, change, text)                                           \
    do {                                                                  \
        ddp_lr_desc d = schedule(kind);                                   \
        assert_true(ddp_lr_at(&d, 5) > 0);                                \
        change;                                                           \
        assert_true(ddp_lr_at(&d, 5) == 0);                               \
        expect_bad(DDP_ERR_INVALID, DDP_ERR_INVALID, "ddp_lr_at: " text); \
    } while (0)
    BAD(DDP_LR_LINEAR, d.kind = (ddp_lr_kind)5, "kind=5");
    BAD(DDP_LR_LINEAR, d.max_lr = 0, "max_lr=0; use a positive number");
    BAD(DDP_LR_CONSTANT, d.max_lr = INFINITY, "max_lr=inf");
    BAD(DDP_LR_COSINE, d.min_lr = 2, "min_lr=2; use 0 to max_lr=1");
    BAD(DDP_LR_COSINE, d.min_lr = NAN, "min_lr=");
    BAD(DDP_LR_CONSTANT, d.warmup_steps = -1, "warmup_steps=-1");
    BAD(DDP_LR_LINEAR, d.total_steps = 0, "total_steps=0; use 1 or more");
    BAD(DDP_LR_LINEAR, d.warmup_steps = 25, "warmup_steps=25 is more than total_steps=24");
    BAD(DDP_LR_WSD, d.decay_steps = 21, "decay_steps=21; use 0 to 20, the steps after the warmup");
    BAD(DDP_LR_POLYNOMIAL, d.power = -1, "power=-1");
    BAD(DDP_LR_COSINE, d.batch = 512, "batch=512 and base_batch=0; set both, or neither");
    BAD(DDP_LR_COSINE, (d.batch = -1, d.base_batch = 256), "batch=-1");
#undef BAD
    assert_true(ddp_lr_at(NULL, 1) == 0);
    expect_bad(DDP_ERR_INVALID, DDP_ERR_INVALID, "ddp_lr_at: desc is NULL");
}

//== loss scaling ===========================================================================

/* The rules of torch.amp.GradScaler over a random sequence, written plainly. */
static void the_scale_follows_pytorchs_rules(void **state) {
    ddp_group *group = alone(NULL);
    ddp_scaler scaler;
    ddp_scaler_desc desc = DDP_ZERO;
    float scale = 65536;
    int tracker = 0, shrunk = 0, grown = 0;
    (void)state;
    desc.growth_interval = 3;
    expect_ok(ddp_scaler_init(&scaler, &desc));
    for (int step = 0; step < 3000; step++) {
        float g[3] = {scale, -1, 0};
        ddp_tensor tensor = DDP_ZERO;
        /* Down; up; up to the largest f32 and beyond. */
        int bad = step < 2000 ? number(1, step, 0) > (step < 1000 ? 0.2 : 0.95) : 0;
        float inverse = (float)(1.0 / (double)scale);
        ddp_scaler_state saved;
        assert_true(ddp_scaler_scale(&scaler) == scale);
        if (bad) g[step % 3] = step % 2 ? (float)NAN : -(float)INFINITY;
        tensor.data = g;
        tensor.dtype = DDP_F32;
        tensor.ndim = 1;
        tensor.shape[0] = 3;
        expect_ok(ddp_scaler_unscale(&scaler, group, &tensor, 1));
        assert_int_equal(ddp_scaler_found_inf(&scaler), bad);
        if (!bad) assert_true(g[1] == -inverse && g[2] == 0);
        expect_ok(ddp_scaler_update(&scaler));
        if (bad) {
            scale *= 0.5f;
            tracker = 0;
            shrunk++;
        } else if (++tracker == 3) {
            if (scale <= 1.7e38f) {
                scale *= 2;
                grown++;
            }
            tracker = 0;
        }
        ddp_scaler_save(&scaler, &saved); /* saved state is equal too */
        assert_true(saved.scale == (double)scale && saved.growth_tracker == tracker);
        if (step % 7 == 0) {
            expect_ok(ddp_scaler_init(&scaler, &desc));
            expect_ok(ddp_scaler_load(&scaler, &saved));
        }
        if (scale < 0x1p-120f) { /* PyTorch goes to 0 */
            scale = 1;
            saved.scale = 1;
            expect_ok(ddp_scaler_load(&scaler, &saved));
        }
    }
    assert_true(shrunk > 100 && grown > 100 && scale == 0x1p127f);
    ddp_group_destroy(group);
}

/* Infinities and NaNs in each dtype and place, on the CPU and on a device. The largest finite numbers do not
   count. */
static void what_is_not_finite_is_found(void **state) {
    static const uint64_t infinite[5] = {0, 0x7f800000u, UINT64_C(0x7ff) << 52, 0x7c00, 0x7f80},
                          largest[5] = {0, 0x7f7fffffu, UINT64_C(0x7fe) << 52, 0x7bff, 0x7f7f};
    ddp_device device = *ddp_device_cpu();
    ddp_group *groups[2];
    ddp_scaler_desc desc = DDP_ZERO;
    (void)state;
    device.name = "test";
    groups[0] = alone(NULL);
    groups[1] = alone(&device);
    desc.init_scale = 2;
    for (int g = 0; g < 2; g++)
        for (int dtype = DDP_F32; dtype <= DDP_BF16; dtype++)
            for (int what = 0; what < 4; what++) /* the largest, an infinity, -infinity, a NaN */
                for (int at = 0; at < 5000; at += 1237) {
                    static unsigned char data[5000 * 8];
                    size_t size = ddp_dtype_size((ddp_dtype)dtype);
                    uint64_t bits = what ? infinite[dtype] : largest[dtype];
                    ddp_tensor tensors[2];
                    ddp_scaler scaler;
                    /* A device detects infinity by squares. */
                    if (g == 1 && dtype == DDP_F64 && !what) continue;
                    if (what == 2) bits |= UINT64_C(1) << (8 * size - 1);
                    if (what == 3) bits |= 1;
                    memset(data, 0, sizeof data);
                    memset(tensors, 0, sizeof tensors);
                    tensors[0].dtype = DDP_F32; /* empty */
                    tensors[0].ndim = 1;
                    tensors[1].data = data;
                    tensors[1].dtype = (ddp_dtype)dtype;
                    tensors[1].ndim = 2;
                    tensors[1].shape[0] = 50;
                    tensors[1].shape[1] = 100;
                    memcpy(data + (size_t)at * size, &bits, size);
                    expect_ok(ddp_scaler_init(&scaler, &desc));
                    expect_ok(ddp_scaler_unscale(&scaler, groups[g], tensors, 2));
                    if (ddp_scaler_found_inf(&scaler) != (what != 0))
                        fail_msg("group %d %s %d at %d", g, ddp_dtype_name((ddp_dtype)dtype), what, at);
                }
    ddp_group_destroy(groups[0]);
    ddp_group_destroy(groups[1]);
}

/* A grid of 2 by 2: an infinity on one rank is known to all ranks, through both dimensions. */
static ddp_result scale_in_a_grid(ddp_group *world, void *user) {
    int found[5] = {0, 0, 0, 0, 0}, rank = ddp_rank(world);
    ddp_scaler scaler;
    ddp_scaler_desc desc = DDP_ZERO;
    (void)user;
    if (ddp_group_split(world, rank / 2, rank, &desc.groups[0]) != DDP_OK
        || ddp_group_split(world, rank % 2, rank, &desc.groups[1]) != DDP_OK)
        return DDP_ERR_SYSTEM;
    desc.group_count = 2;
    if (ddp_scaler_init(&scaler, &desc) != DDP_OK) return DDP_ERR_SYSTEM;
    for (int culprit = 0; culprit < 5; culprit++) {
        float g[2] = {1, culprit == rank ? (float)INFINITY : 2};
        ddp_tensor tensor = DDP_ZERO;
        tensor.data = g;
        tensor.dtype = DDP_F32;
        tensor.ndim = 1;
        tensor.shape[0] = rank == 3 && culprit != 3 ? 0 : 2; /* a rank can have no rows */
        if (ddp_scaler_unscale(&scaler, world, &tensor, 1) != DDP_OK)
            return ddp_fail(DDP_ERR_SYSTEM, "%s", ddp_last_error());
        found[culprit] = ddp_scaler_found_inf(&scaler);
        if (ddp_scaler_update(&scaler) != DDP_OK) return DDP_ERR_SYSTEM;
    }
    ddp_group_destroy(desc.groups[0]);
    ddp_group_destroy(desc.groups[1]);
    for (int culprit = 0; culprit < 5; culprit++)
        if (found[culprit] != (culprit < 4))
            return ddp_fail(DDP_ERR_MISMATCH, "rank %d, culprit %d: found_inf=%d", rank, culprit,
                            found[culprit]);
    return ddp_scaler_scale(&scaler) == 4096
               ? DDP_OK
               : ddp_fail(DDP_ERR_MISMATCH, "rank %d: scale=%g", rank, (double)ddp_scaler_scale(&scaler));
}

static void what_one_rank_found_all_know(void **state) {
    ddp_launch_desc launch = DDP_ZERO;
    (void)state;
    launch.mode = DDP_LAUNCH_THREADS;
    launch.world_size = 4;
    expect_ok(ddp_launch(&launch, scale_in_a_grid, NULL));
}

static void bad_scalers_are_told_what_is_wrong(void **state) {
    ddp_group *group = alone(NULL);
    ddp_scaler scaler;
    ddp_scaler_state saved = {1024, 5};
    ddp_tensor tensor = DDP_ZERO;
    int32_t data[2] = {0, 0};
    (void)state;
#define BAD(change, text)                                                                       \
    do {                                                                                        \
        ddp_scaler_desc desc = DDP_ZERO;                                                        \
        change;                                                                                 \
        expect_bad(ddp_scaler_init(&scaler, &desc), DDP_ERR_INVALID, "ddp_scaler_init: " text); \
    } while (0)
    BAD(desc.init_scale = -1, "init_scale=-1");
    BAD(desc.init_scale = (float)INFINITY, "init_scale=inf");
    BAD(desc.growth_factor = 1, "growth_factor=1; use a number above 1");
    BAD(desc.backoff_factor = 1, "backoff_factor=1; use a number between 0 and 1");
    BAD(desc.growth_interval = -1, "growth_interval=-1");
    BAD(desc.group_count = 5, "group_count=5; use 0 to 4");
    BAD(desc.group_count = 1, "groups[0] is NULL");
#undef BAD
    expect_bad(ddp_scaler_init(NULL, NULL), DDP_ERR_INVALID, "scaler is NULL");
    expect_ok(ddp_scaler_init(&scaler, NULL));
    assert_true(ddp_scaler_scale(&scaler) == 65536);
    expect_bad(ddp_scaler_update(&scaler), DDP_ERR_INVALID, "ddp_scaler_update: no gradients were unscaled");
    tensor.dtype = DDP_I32;
    tensor.ndim = 1;
    tensor.shape[0] = 2;
    tensor.data = data;
    expect_bad(ddp_scaler_unscale(&scaler, NULL, &tensor, 1), DDP_ERR_INVALID, "scaler or group is NULL");
    expect_bad(ddp_scaler_unscale(&scaler, group, NULL, 1), DDP_ERR_INVALID,
               "gradient_count=1 is negative, or gradients is NULL");
    expect_bad(ddp_scaler_unscale(&scaler, group, &tensor, 1), DDP_ERR_INVALID,
               "gradients[0].dtype is i32; use a floating-point dtype");
    tensor.dtype = DDP_F32;
    tensor.data = NULL;
    expect_bad(ddp_scaler_unscale(&scaler, group, &tensor, 1), DDP_ERR_INVALID, "gradients[0].data is NULL");
    tensor.shape[0] = -2;
    expect_bad(ddp_scaler_unscale(&scaler, group, &tensor, 1), DDP_ERR_INVALID,
               "gradients[0]: ndim=1 or shape is invalid");
    expect_ok(ddp_scaler_unscale(&scaler, group, NULL, 0));
    expect_bad(ddp_scaler_unscale(&scaler, group, NULL, 0), DDP_ERR_INVALID,
               "call ddp_scaler_update after each ddp_scaler_unscale");
    expect_ok(ddp_scaler_load(&scaler, &saved));
    assert_true(ddp_scaler_scale(&scaler) == 1024);
    saved.scale = 1e300;
    expect_bad(ddp_scaler_load(&scaler, &saved), DDP_ERR_CORRUPT, "scale=1e+300");
    saved.scale = 0.1; /* no f32 */
    expect_bad(ddp_scaler_load(&scaler, &saved), DDP_ERR_CORRUPT, "scale=0.1");
    static const struct {
        double scale;
        const char *text;
    } unusable[] = {
        {0, "scale=0 "}, {-2, "scale=-2"}, {(double)NAN, "scale=nan"}, {(double)INFINITY, "scale=inf"}};
    for (size_t i = 0; i < sizeof unusable / sizeof unusable[0]; i++) {
        saved.scale = unusable[i].scale;
        expect_bad(ddp_scaler_load(&scaler, &saved), DDP_ERR_CORRUPT, unusable[i].text);
    }
    saved.scale = 2;
    saved.growth_tracker = -1;
    expect_bad(ddp_scaler_load(&scaler, &saved), DDP_ERR_CORRUPT, "growth_tracker=-1");
    assert_true(ddp_scaler_scale(&scaler) == 1024);
    ddp_group_destroy(group);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_and_option_follows_its_formula),
        cmocka_unit_test(zeros_have_no_trust_ratio),
        cmocka_unit_test(lars_ignores_nesterov),
        cmocka_unit_test(bits_do_not_depend_on_the_sharding),
        cmocka_unit_test(a_loaded_state_goes_on_with_the_same_bits),
        cmocka_unit_test(state_comes_from_the_users_allocator),
        cmocka_unit_test(kernels_of_a_device_are_checked),
        cmocka_unit_test(a_device_computes_itself),
        cmocka_unit_test(scaled_gradients_are_the_products),
        cmocka_unit_test(bad_optimizers_are_told_what_is_wrong),
        cmocka_unit_test(the_cosine_has_the_values_of_its_formula),
        cmocka_unit_test(schedules_have_the_values_computed_by_hand),
        cmocka_unit_test(bad_schedules_are_told_what_is_wrong),
        cmocka_unit_test(the_scale_follows_pytorchs_rules),
        cmocka_unit_test(what_is_not_finite_is_found),
        cmocka_unit_test(what_one_rank_found_all_know),
        cmocka_unit_test(bad_scalers_are_told_what_is_wrong),
    };
    watchdog_start(60);
    return cmocka_run_group_tests_name("optimizer", tests, NULL, NULL);
}

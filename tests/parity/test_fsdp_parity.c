/*  test_fsdp_parity.c - W ranks with any strategy end with the bits of one process that adds the same
    micro-batches pairwise.

    The reference is plain: it holds every value, adds the micro-batches' gradients as a binary counter does,
    divides once, adds the two uses of the tied matrix, clips by the exact norm and steps with ddp_optimizer
    on full tensors. Gradients consist of the gathered values and of noise that depends on micro-batch, use
    and element, so that one wrong row anywhere shows in every later step.

    tests/gpu/test_fsdp.cu is the same over device memory.

    Shapes: rows that W does not divide, fewer rows than ranks, a scalar, two dtypes in one unit, a matrix
    with a second use in another unit. */
#include "../../ddp_fsdp.h"
#include "../support/ranks.h"
#include "../support/relay.h"

#if defined(FSDP_ON_DEVICE)
#define OFFLOAD DDP_FSDP_OFFLOAD_HOST
#define OFFLOADS_PARAMS 1
#define RELAYED 0 /* data always travels */
#else
#define OFFLOAD DDP_FSDP_OFFLOAD_FILE
#define OFFLOADS_PARAMS 0 /* changes nothing */
#define RELAYED 1
#endif

enum { STEPS = 4, USES = 8, UNITS = USES, MOST = 72, TIED_USE = 7 };

static const struct shape {
    const char *name;
    ddp_dtype dtype;
    int unit, ndim, rows, columns;
} shapes[USES] = {
    {"wte", DDP_F32, 0, 2, 13, 5}, {"wpe", DDP_F32, 0, 2, 7, 5},   {"h.w", DDP_F32, 1, 2, 9, 4},
    {"h.b", DDP_F32, 1, 1, 9, 1},  {"h.s", DDP_F32, 1, 0, 1, 1},   {"h.d", DDP_F64, 1, 2, 6, 2},
    {"ln", DDP_F32, 2, 1, 2, 1},   {"head", DDP_F32, 2, 2, 13, 5},
};

typedef struct plan {
    ddp_fsdp_strategy strategy;
    int micro_batches, replicas; /* per rank; parameters are sharded over ranks / replicas */
    /* half: bf16 values, f32 sums; gathers: 1 = no release between forward and backward. */
    int prefetch, keep, half, overwrite, plain, gathers;
    ddp_optimizer_kind kind;
    int early;  /* values by init_fn */
    int packed; /* ranks do not see each other's memory */
    /* Steps [first, last); last 0 = STEPS. From a checkpoint unless first is 0, to one unless last is 0. */
    int first, last;
    int background;
    int wrap; /* 0 = units as in shapes, 1 = all in one, 2 = one for each use */
    /* Gradients are of sums over tokens; micro-batches have different numbers of tokens. */
    int tokens;
    int world; /* number of ranks; 0 = all */
    ddp_fsdp_offload offload;
    /* Uses a loss scale; before step 1, a step that is skipped because of an infinity on the last rank. */
    int scaled;
} plan;

/* The final state of a training run. */
typedef struct whole {
    double value[USES][MOST];
    float norm[STEPS];
    double loss[STEPS];
} whole;

static whole *expected;
static char folder[48]; /* of checkpoints */

static double noise(uint64_t seed) { return (double)(int64_t)ranks_mix(seed) / 9223372036854775808.0; }
static int elements(int use) { return shapes[use].rows * shapes[use].columns; }
static double first_value(int use, int i) {
    return (double)(float)(0.3 * noise((uint64_t)(use == TIED_USE ? 0 : use) * 1000 + (uint64_t)i));
}

static double gradient(int use, int i, double value, int step, int micro_batch) {
    return (double)(float)(0.2 * value
                           + noise((uint64_t)(((step * 64 + micro_batch) * USES + use) * 100 + i)));
}

/* Tokens of a micro-batch, and the sum of their losses; some have none. */
static int tokens_of(int step, int micro_batch) { return (micro_batch * 7 + step * 3) % 5; }
static double loss_of(int step, int micro_batch) {
    return tokens_of(step, micro_batch) * (2 + noise((uint64_t)(step * 64 + micro_batch)));
}

static double load(const void *memory, ddp_dtype dtype, int i) {
    double d = 0;
    if (dtype == DDP_F64) return ((const double *)memory)[i];
    float f = 0;
    ddp_device_cpu()->cast(&f, DDP_F32, (const char *)memory + (size_t)i * ddp_dtype_size(dtype), dtype, 1);
    return d + (double)f;
}

static void store(void *memory, ddp_dtype dtype, int i, double value) {
    ddp_device_cpu()->cast((char *)memory + (size_t)i * ddp_dtype_size(dtype), dtype, &value, DDP_F64, 1);
}

static void tensor_of(ddp_tensor *t, int use, void *data, ddp_dtype dtype) {
    memset(t, 0, sizeof *t);
    t->data = data;
    t->dtype = dtype;
    t->ndim = shapes[use].ndim;
    t->shape[0] = shapes[use].rows;
    t->shape[1] = shapes[use].columns;
    for (int d = t->ndim; d < 2; d++) t->shape[d] = 0;
}

static ddp_optimizer_desc optimizer_of(const plan *p) {
    ddp_optimizer_desc d = DDP_ZERO;
    d.kind = p->kind;
    d.weight_decay = 0.1f;
    d.decay_matrices_only = 1;
    if (p->kind == DDP_OPTIMIZER_SGD) d.momentum = 0.9f;
    return d;
}

//== the reference ==========================================================================

typedef struct stack {
    void *sum[32];
    int size[32], depth;
} stack;

static void add_arrays(void *left, const void *right, int count, ddp_dtype dtype) {
    for (int i = 0; i < count; i++) {
        if (dtype == DDP_F64)
            ((double *)left)[i] += ((const double *)right)[i];
        else
            ((float *)left)[i] += ((const float *)right)[i];
    }
}

/* A binary counter: equal sizes are added, older + newer; at the end the rest is added, from the newest
   on. */
static void stack_push(stack *s, void *sum, int count, ddp_dtype dtype, int last) {
    s->sum[s->depth] = sum;
    s->size[s->depth++] = 1;
    while (s->depth > 1 && (last || s->size[s->depth - 2] == s->size[s->depth - 1])) {
        s->depth--;
        add_arrays(s->sum[s->depth - 1], s->sum[s->depth], count, dtype);
        s->size[s->depth - 1] += s->size[s->depth];
        free(s->sum[s->depth]);
    }
}

static ddp_result reference(ddp_group *group, void *user) {
    const plan *p = (const plan *)user;
    int total = p->micro_batches; /* of all ranks */
    char *value[USES], *grad[USES], *gathered[USES];
    ddp_param params[USES];
    ddp_optimizer_desc desc = optimizer_of(p);
    ddp_optimizer *optimizer;
    int count = 0, at[USES];
    for (int u = 0; u < USES; u++) {
        value[u] = u == TIED_USE ? value[0] : (char *)calloc(MOST * 2, sizeof(double));
        grad[u] = (char *)calloc(MOST * 2, sizeof(double));
        gathered[u] = (char *)calloc(MOST * 2, sizeof(double));
        for (int i = 0; i < elements(u); i++) store(value[u], shapes[u].dtype, i, first_value(u, i));
        if (u == TIED_USE) continue;
        at[count] = u;
        memset(&params[count], 0, sizeof params[count]);
        params[count].name = shapes[u].name;
        tensor_of(&params[count].value, u, value[u], shapes[u].dtype);
        tensor_of(&params[count].grad, u, grad[u], shapes[u].dtype);
        count++;
    }
    desc.params = params;
    desc.param_count = count;
    RANKS_OK(group, ddp_optimizer_create(&optimizer, group, &desc));
    for (int step = 0; step < STEPS; step++) {
        ddp_exact_sum sum;
        float norm;
        int divisor = p->tokens ? 0 : total;
        ddp_mean loss = DDP_ZERO;
        for (int m = 0; m < total && p->tokens; m++) {
            divisor += tokens_of(step, m);
            ddp_mean_add(&loss, loss_of(step, m), tokens_of(step, m));
        }
        expected->loss[step] = ddp_mean_value(&loss);
        for (int u = 0; u < USES; u++) {
            stack s;
            ddp_dtype seen = p->half ? DDP_BF16 : shapes[u].dtype;
            memset(&s, 0, sizeof s);
            ddp_device_cpu()->cast(gathered[u], seen, value[u], shapes[u].dtype, (size_t)elements(u));
            for (int m = 0; m < total; m++) {
                void *part = calloc(MOST, sizeof(double));
                for (int i = 0; i < elements(u); i++) {
                    char narrow[8];
                    store(narrow, seen, 0, gradient(u, i, load(gathered[u], seen, i), step, m));
                    store(part, shapes[u].dtype, i, load(narrow, seen, 0));
                }
                stack_push(&s, part, elements(u), shapes[u].dtype, m + 1 == total);
            }
            memcpy(grad[u], s.sum[0], MOST * sizeof(double));
            free(s.sum[0]);
            for (int i = 0; i < elements(u); i++) {
                if (shapes[u].dtype == DDP_F64)
                    ((double *)grad[u])[i] /= divisor ? divisor : 1;
                else
                    ((float *)grad[u])[i] /= (float)(divisor ? divisor : 1);
            }
        }
        add_arrays(grad[0], grad[TIED_USE], elements(0), DDP_F32);
        ddp_exact_sum_clear(&sum);
        ddp_tensor grads[USES];
        for (int k = 0; k < count; k++) {
            const ddp_tensor one = {
                grad[at[k]], shapes[at[k]].dtype, 2, {shapes[at[k]].rows, shapes[at[k]].columns}};
            grads[k] = one;
        }
        ddp_device_cpu()->sum_squares(&sum, 0, grads, count);
        norm = (float)sqrt(ddp_exact_sum_value(&sum));
        expected->norm[step] = norm;
        if (norm > 0.5f) ddp_device_cpu()->scale(grads, count, 0.5f / norm);
        RANKS_OK(group, ddp_optimizer_step(optimizer, 0.05f));
    }
    for (int u = 0; u < USES; u++)
        for (int i = 0; i < elements(u); i++) expected->value[u][i] = load(value[u], shapes[u].dtype, i);
    ddp_optimizer_destroy(optimizer);
    for (int u = 0; u < USES; u++) {
        if (u != TIED_USE) free(value[u]);
        free(grad[u]);
        free(gathered[u]);
    }
    return DDP_OK;
}

//== sharded ================================================================================

static ddp_result fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                       void *user) {
    int use = param->index;
    (void)user;
    for (int64_t i = 0; i < row_count * shapes[use].columns; i++)
        store(out, shapes[use].dtype, (int)i, first_value(use, (int)(first_row * shapes[use].columns + i)));
    return DDP_OK;
}

static ddp_result describe(ddp_group *part, ddp_fsdp_param *params, ddp_fsdp_unit_desc *units,
                           int *unit_count, void **memory, const plan *p, int rank) {
    static const char *const names[UNITS] = {"embed", "h", "head"};
    memset(params, 0, USES * sizeof *params);
    memset(units, 0, UNITS * sizeof *units);
    for (int u = 0; u < USES; u++) {
        int number = p->wrap == 0 ? shapes[u].unit : p->wrap == 1 ? 0 : u;
        ddp_fsdp_unit_desc *unit = &units[number];
        double near[MOST];
        memory[u] = u == TIED_USE ? memory[0] : NULL;
        if (!p->early && u != TIED_USE)
            RANKS_OK(part, ddp_group_device(part)->alloc(part, sizeof near, &memory[u]));
        params[u].param.name = shapes[u].name;
        params[u].index = u;
        tensor_of(&params[u].param.value, u, memory[u], shapes[u].dtype);
        if (u == TIED_USE) params[u].tied_to = "wte";
        for (int i = 0; i < elements(u); i++)
            store(near, shapes[u].dtype, i, rank == 0 ? first_value(u, i) : 7.0);
        if (memory[u])
            ddp_group_device(part)->copy(memory[u], near,
                                         (size_t)elements(u) * ddp_dtype_size(shapes[u].dtype));
        if (!unit->param_count++) unit->params = &params[u];
        unit->name = names[number];
        *unit_count = number + 1;
    }
    return DDP_OK;
}

/* Copies the elements of a tensor to the host, and back. */
static void fetch(ddp_group *part, void *near, const ddp_tensor *far) {
    size_t bytes = (size_t)ddp_tensor_count(far) * ddp_dtype_size(far->dtype);
    if (bytes) ddp_group_device(part)->copy(near, far->data, bytes);
}

static void backward(ddp_group *part, const ddp_fsdp_unit_desc *unit, const ddp_fsdp_param *params, int step,
                     int micro_batch, int overwrite, double scale) {
    for (int k = 0; k < unit->param_count; k++) {
        const ddp_param *param = &unit->params[k].param;
        int use = (int)(unit->params + k - params);
        double value[MOST], grad[MOST];
        fetch(part, value, &param->value);
        fetch(part, grad, &param->grad);
        for (int i = 0; i < elements(use); i++) {
            double before = overwrite ? 0 : load(grad, param->grad.dtype, i); /* zero, or it shows */
            store(grad, param->grad.dtype, i,
                  before + scale * gradient(use, i, load(value, param->value.dtype, i), step, micro_batch));
        }
        ddp_group_device(part)->copy(param->grad.data, grad,
                                     (size_t)elements(use) * ddp_dtype_size(param->grad.dtype));
    }
}

/* A step that all ranks skip because of an infinity on the last rank, with replicas too. */
static ddp_result infinite_step(ddp_group *group, ddp_group *part, ddp_fsdp *fsdp, ddp_scaler *scaler,
                                const plan *p, const ddp_fsdp_unit_desc *units, int unit_count,
                                const ddp_fsdp_param *params) {
    int last = ddp_rank(group) == ddp_world_size(group) - 1;
    for (int m = 0; m < p->micro_batches; m++)
        for (int u = 0; u < unit_count; u++) {
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
            backward(part, &units[u], params, 9, 0, 1, last && u == 1 ? INFINITY : 1.0);
            RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
            RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
        }
    RANKS_OK(group, ddp_fsdp_step(fsdp, 0.05f));
    RANKS_CHECK(group, ddp_scaler_found_inf(scaler), "rank %d did not detect the infinity", ddp_rank(group));
    RANKS_OK(group, ddp_scaler_update(scaler));
    return DDP_OK;
}

static ddp_result train_step(ddp_group *group, ddp_group *part, ddp_fsdp *fsdp, ddp_scaler *scaler,
                             const plan *p, const ddp_fsdp_unit_desc *units, int unit_count,
                             const ddp_fsdp_param *params, int step) {
    int rank = ddp_rank(group), world = ddp_world_size(group);
    int each = p->strategy == DDP_FSDP_FULL_SHARD || p->strategy == DDP_FSDP_SHARD_GRAD;
    float norm = 0;
    ddp_mean loss = DDP_ZERO;
    if (p->scaled && step == 1)
        RANKS_OK(group, infinite_step(group, part, fsdp, scaler, p, units, unit_count, params));
    for (int m = 0; m < p->micro_batches; m++) {
        int number = each ? m * world + rank : rank * p->micro_batches + m;
        ddp_mean_add(&loss, loss_of(step, number), tokens_of(step, number));
        for (int u = 0; u < unit_count; u++) {
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
            if (!p->gathers) RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
        }
        for (int u = unit_count - 1; u >= 0; u--) {
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
            backward(part, &units[u], params, step, number, p->overwrite,
                     p->scaled ? (double)ddp_scaler_scale(scaler) : 1.0);
            RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
            RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
        }
    }
    if (p->tokens) {
        RANKS_CHECK(group,
                    ddp_fsdp_step(fsdp, 0.05f) == DDP_ERR_INVALID
                        && strstr(ddp_last_error(), "call ddp_fsdp_mean first"),
                    "%s", ddp_last_error());
        ddp_mean wrong = loss, before = loss;
        /* An error on all ranks, with replicas too, and nothing is lost. */
        if (rank == world - 1) wrong.count = -2;
        RANKS_CHECK(group,
                    ddp_fsdp_mean(fsdp, &wrong) == DDP_ERR_INVALID && strstr(ddp_last_error(), "negative"),
                    "%s", ddp_last_error());
        if (rank == world - 1) before.count = -2;
        RANKS_CHECK(group, memcmp(&wrong, &before, sizeof wrong) == 0, "a refused mean has changed");
        RANKS_OK(group, ddp_fsdp_mean(fsdp, &loss));
        double value = ddp_mean_value(&loss);
        RANKS_CHECK(group, memcmp(&value, &expected->loss[step], sizeof value) == 0,
                    "step %d: loss %.17g, want %.17g", step, value, expected->loss[step]);
        RANKS_CHECK(group,
                    ddp_fsdp_mean(fsdp, &loss) == DDP_ERR_INVALID
                        && strstr(ddp_last_error(), "was already called in this step"),
                    "%s", ddp_last_error());
    } else
        RANKS_CHECK(group,
                    ddp_fsdp_mean(fsdp, &loss) == DDP_ERR_INVALID
                        && strstr(ddp_last_error(), "desc.per_token=0"),
                    "%s", ddp_last_error());
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 0.5f, &norm));
    RANKS_CHECK(group, memcmp(&norm, &expected->norm[step], sizeof norm) == 0,
                "step %d: norm %.9g, want %.9g", step, (double)norm, (double)expected->norm[step]);
    RANKS_OK(group, ddp_fsdp_step(fsdp, 0.05f));
    if (p->scaled) RANKS_OK(group, ddp_scaler_update(scaler));
    return DDP_OK;
}

/* Whether elements first to first + count of a parameter have the expected bits in this dtype. */
static ddp_result check_rows(ddp_group *group, const char *what, int use, const void *rows, ddp_dtype dtype,
                             int first, int count) {
    for (int i = 0; i < count; i++) {
        char narrow[8];
        double want, have = load(rows, dtype, i);
        store(narrow, dtype, 0, expected->value[use][first + i]);
        want = load(narrow, dtype, 0);
        RANKS_CHECK(group, memcmp(&want, &have, sizeof want) == 0, "%s of %s[%d] is %.17g, want %.17g", what,
                    shapes[use].name, first + i, have, want);
    }
    return DDP_OK;
}

static ddp_result check_values(ddp_group *group, ddp_group *part, ddp_fsdp *fsdp, int offloaded,
                               const ddp_fsdp_unit_desc *units, int unit_count,
                               const ddp_fsdp_param *params) {
    RANKS_OK(group, ddp_fsdp_no_grad(fsdp, 1));
    for (int u = 0; u < unit_count; u++) {
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
        for (int k = 0; k < units[u].param_count; k++) {
            int use = (int)(units[u].params + k - params);
            double near[MOST];
            ddp_tensor rows;
            int64_t first;
            fetch(part, near, &params[use].param.value);
            RANKS_OK(group,
                     check_rows(group, "value", use, near, params[use].param.value.dtype, 0, elements(use)));
            RANKS_OK(group, ddp_fsdp_get_shard(fsdp, u, k, &rows, NULL, &first));
            if (!rows.data) continue;
            if (offloaded)
                memcpy(near, rows.data, (size_t)ddp_tensor_count(&rows) * ddp_dtype_size(rows.dtype));
            else
                fetch(part, near, &rows);
            RANKS_OK(group, check_rows(group, "shard", use, near, rows.dtype,
                                       (int)first * shapes[use].columns, (int)ddp_tensor_count(&rows)));
        }
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    }
    return DDP_OK;
}

static ddp_result train_on(ddp_group *group, void *user) {
    const plan *p = (const plan *)user;
    ddp_fsdp_param params[USES];
    ddp_fsdp_unit_desc units[UNITS];
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_group *world = group, *part = group, *below = NULL, *copies = NULL;
    ddp_fsdp *fsdp;
    ddp_fsdp_state state = DDP_ZERO;
    ddp_scaler scaler;
    ddp_result result = DDP_OK;
    void *memory[USES];
    int rank = ddp_rank(group), inner = ddp_world_size(group) / p->replicas, unit_count = 0;
#if defined(FSDP_ON_DEVICE)
    device_rank device;
    RANKS_OK(group, device_rank_open(&device, group, 64));
    world = part = device.group;
#endif
    if (p->replicas > 1) {
        RANKS_OK(group, ddp_group_split(world, rank / inner, rank, &part));
        RANKS_OK(group, ddp_group_split(world, rank % inner, rank, &copies));
    }
    if (p->packed) RANKS_OK(group, relay_over(&part, below = part));
    RANKS_OK(group, describe(part, params, units, &unit_count, memory, p, rank));
    desc.units = units;
    desc.unit_count = unit_count;
    desc.strategy = p->strategy;
    desc.replicas = copies;
    desc.per_token = p->tokens;
    desc.micro_batch_count = p->micro_batches;
    desc.prefetch = p->prefetch;
    desc.no_reshard_after_forward = p->keep;
    desc.overwrite_gradients = p->overwrite;
    desc.optimizer = optimizer_of(p);
    desc.init_fn = fill;
    desc.state = &state;
    desc.offload = p->offload;
    desc.offload_dir = "/tmp";
    desc.save_in_background = p->background;
    RANKS_OK(group, ddp_scaler_init(&scaler, NULL));
    if (p->scaled) desc.scaler = &scaler;
    if (p->half) {
        desc.param_dtype = DDP_BF16;
        desc.reduce_dtype = DDP_F32;
    }
    RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &desc));
    for (int u = 0; u < USES; u++)
        if (u != TIED_USE && memory[u]) ddp_group_device(part)->free(part, memory[u]);
    if (p->first) {
        RANKS_OK(group, ddp_fsdp_load(fsdp, folder));
        RANKS_CHECK(group, state.step == p->first && state.user[3] == 0.1 * p->first, "step %lld, user %g",
                    (long long)state.step, state.user[3]);
    }
    for (int step = p->first; step < (p->last ? p->last : STEPS) && result == DDP_OK; step++)
        result = train_step(group, part, fsdp, &scaler, p, units, unit_count, params, step);
    if (result == DDP_OK && p->last) {
        state.user[3] = 0.1 * p->last;
        RANKS_OK(group, ddp_fsdp_save(fsdp, folder));
        RANKS_OK(group, ddp_fsdp_save_wait(fsdp));
    }
    if (result == DDP_OK && (!p->last || p->last == STEPS))
        result = check_values(group, part, fsdp, p->offload != DDP_FSDP_OFFLOAD_NONE, units, unit_count,
                              params);
    if (result != DDP_OK) return result;
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    if (part != world) ddp_group_destroy(part);
    if (below && below != world) ddp_group_destroy(below);
    ddp_group_destroy(copies);
#if defined(FSDP_ON_DEVICE)
    RANKS_OK(group, device_rank_close(&device));
#endif
    return DDP_OK;
}

static ddp_result train(ddp_group *group, void *user) {
    const plan *p = (const plan *)user;
    ddp_group *some;
    ddp_result result = DDP_OK;
    if (!p->world || p->world == ddp_world_size(group)) return train_on(group, user);
    RANKS_OK(group, ddp_group_split(group, ddp_rank(group) >= p->world, ddp_rank(group), &some));
    if (ddp_rank(group) < p->world) result = train_on(some, user);
    ddp_group_destroy(some);
    return result;
}

//== cases ==================================================================================

static int failures, runs;

static const char *const strategies[] = {"FULL_SHARD", "SHARD_GRAD", "SHARD_OPTIM", "NO_SHARD"};

/* Compares with a run of plan p with this total of micro-batches. */
static ddp_result expect(ranks_mode mode, plan p, int total) {
    ddp_group_desc self = DDP_ZERO;
    ddp_group *alone;
    ddp_result result;
    p.micro_batches = total;
    memset(expected, 0, sizeof *expected);
    if (!ranks_joins(mode)) return ranks_run(RANKS_THREADS, 1, 20000, reference, &p);
    self.init_method = "self://"; /* every process creates its own */
    result = ddp_group_create(&alone, &self);
    if (result == DDP_OK) result = reference(alone, &p);
    if (result == DDP_OK) ddp_group_destroy(alone);
    return result;
}

static void run(ranks_mode mode, int world, plan p) {
    ddp_result result = ranks_run(mode, world, 20000 * DDP_TEST_SLOWDOWN, train, &p);
    runs++;
    if (result == DDP_OK) return;
    fprintf(stderr,
            "FAIL %s on %d %s, %d micro-batches each, replicas=%d prefetch=%d keep=%d half=%d overwrite=%d "
            "tokens=%d kind=%d early=%d gathers=%d packed=%d offload=%d wrap=%d steps %d to %d: %s: %s\n",
            strategies[p.strategy], world, ranks_mode_name(mode), p.micro_batches, p.replicas, p.prefetch,
            p.keep, p.half, p.overwrite, p.tokens, (int)p.kind, p.early, p.gathers, p.packed, (int)p.offload,
            p.wrap, p.first, p.last, ddp_result_name(result), ddp_last_error());
    failures++;
}

/* A checkpoint of one strategy, number of ranks and wrapping continues with others: four micro-batches in
   total. The last save is loaded with another param_dtype. */
static void run_resumed(ranks_mode mode) {
    static const struct {
        ddp_fsdp_strategy strategy;
        int world, replicas, half, wrap;
    } turns[][4] = {
        {{DDP_FSDP_FULL_SHARD, 4, 1, 0, 0},
         {DDP_FSDP_NO_SHARD, 2, 1, 0, 2},
         {DDP_FSDP_SHARD_GRAD, 1, 1, 0, 1},
         {DDP_FSDP_FULL_SHARD, 4, 1, 1, 2}},
        {{DDP_FSDP_NO_SHARD, 4, 1, 0, 1},
         {DDP_FSDP_FULL_SHARD, 4, 2, 0, 0},
         {DDP_FSDP_SHARD_OPTIM, 2, 1, 0, 2},
         {DDP_FSDP_SHARD_GRAD, 2, 1, 1, 0}},
        {{DDP_FSDP_SHARD_OPTIM, 1, 1, 1, 2},
         {DDP_FSDP_FULL_SHARD, 2, 1, 1, 1},
         {DDP_FSDP_NO_SHARD, 4, 2, 1, 0},
         {DDP_FSDP_FULL_SHARD, 2, 1, 0, 1}},
    };
    for (size_t t = 0; t < sizeof turns / sizeof turns[0]; t++) {
        plan p;
        ddp_result result;
        memset(&p, 0, sizeof p);
        p.half = turns[t][0].half;
        result = expect(mode, p, 4);
        for (int k = 0; k < 4 && result == DDP_OK; k++) {
            p.strategy = turns[t][k].strategy;
            p.replicas = turns[t][k].replicas;
            p.half = turns[t][k].half;
            p.wrap = turns[t][k].wrap;
            p.world = turns[t][k].world;
            p.micro_batches = 4 / p.world;
            p.first = k == 3 ? STEPS : k;
            p.last = k == 3 ? 0 : k == 2 ? STEPS : k + 1;
            p.packed = RELAYED && (int)t == k;
            p.background = k == 1 && !p.packed; /* a relay cannot create groups */
            run(mode, p.world, p);
        }
        failures += result != DDP_OK;
    }
}

/* Each strategy on world ranks with every supported number of micro-batches; the other options take turns. */
static void run_world(ranks_mode mode, int world) {
    static const int micro[4] = {1, 2, 4, 3};
    int turn = world;
    for (int s = DDP_FSDP_FULL_SHARD; s <= DDP_FSDP_NO_SHARD; s++) {
        int each = s <= DDP_FSDP_SHARD_GRAD, even = (world & (world - 1)) == 0;
        for (int m = 0; m < 4; m++)
            for (int replicas = 1; replicas <= 2; replicas++, turn++) {
                plan p;
                /* The documented rule excludes these numbers. */
                if (each ? micro[m] > 1 && !even : micro[m] == 3 && world > 1) continue;
                if (replicas == 2 && (world != 4 || ((m & 1) && s != DDP_FSDP_FULL_SHARD))) continue;
                memset(&p, 0, sizeof p);
                p.strategy = (ddp_fsdp_strategy)s;
                p.micro_batches = micro[m];
                p.replicas = replicas;
                p.prefetch = turn % 3 == 0 ? -1 : turn % 3;
                p.keep = turn % 5 == 0 && s == DDP_FSDP_FULL_SHARD;
                p.half = turn % 4 == 1;
                p.overwrite = turn / 2 % 2;
                p.tokens = turn % 5 < 2;
                p.kind = (ddp_optimizer_kind)(turn % 7 < 4 ? turn % 7 : 0);
                p.early = turn % 3 == 1;
                p.gathers = turn % 5 == 2;
                p.offload = turn % 4 == 3 ? OFFLOAD : DDP_FSDP_OFFLOAD_NONE;
                p.packed = RELAYED && turn % 2 && world > 1;
                ddp_result expects = expect(mode, p, micro[m] * world);
                failures += expects != DDP_OK;
                if (expects == DDP_OK) run(mode, world, p);
                if (!OFFLOADS_PARAMS || s != DDP_FSDP_FULL_SHARD || micro[m] == 2 || expects != DDP_OK)
                    continue;
                p.offload = DDP_FSDP_OFFLOAD_PARAMS;
                p.scaled = !p.tokens; /* scales are powers of two */
                run(mode, world, p);
            }
    }
}

/* Three copies of the shards of two ranks: norms of tensors, the scaler and the sums over copies. */
static void run_copies(ranks_mode mode) {
    for (int s = DDP_FSDP_FULL_SHARD; s <= DDP_FSDP_NO_SHARD; s++)
        for (int kind = DDP_OPTIMIZER_LAMB; kind <= DDP_OPTIMIZER_LARS; kind++) {
            plan p;
            memset(&p, 0, sizeof p);
            p.strategy = (ddp_fsdp_strategy)s;
            p.micro_batches = 1;
            p.replicas = 3;
            p.kind = (ddp_optimizer_kind)kind;
            p.scaled = 1;
            if (expect(mode, p, 6) == DDP_OK)
                run(mode, 6, p);
            else
                failures++;
        }
}

/* [threads|processes|mpi [W ...]]: everything, without arguments. */
int main(int argc, char **argv) {
    ranks_mode mode;
    char command[128];
    int removes = 1;
    expected = (whole *)ranks_shared(sizeof *expected);
    watchdog_start(120);
    snprintf(folder, sizeof folder, "/tmp/ddp-fsdp-%d", (int)getpid());
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) == 0 && ranks_joins(mode)) {
        const char *size = getenv("OMPI_COMM_WORLD_SIZE"), *rank = getenv("OMPI_COMM_WORLD_RANK");
        /* The launcher's: the same on every rank. */
        snprintf(folder, sizeof folder, "/tmp/ddp-fsdp-%d", (int)getppid());
        run_world(mode, size ? atoi(size) : 1);
        if (size && atoi(size) == 4) run_resumed(mode);
        removes = rank && atoi(rank) == 0; /* no run ends before all ranks are done */
    } else {
        for (int threads = 0; threads < 2; threads++) {
            int worlds = 0;
            mode = threads ? RANKS_THREADS : RANKS_PROCESSES;
            if (argc > 1 && strcmp(argv[1], ranks_mode_name(mode))) continue;
            for (int world = 1; world <= 4; world++) {
                int wanted = argc < 3;
                for (int i = 2; i < argc; i++) wanted |= atoi(argv[i]) == world;
                if (wanted) run_world(mode, world);
                worlds += wanted;
            }
            if (worlds == 4) run_resumed(mode);
            if (worlds == 4) run_copies(mode);
        }
    }
    snprintf(command, sizeof command, "rm -rf %s %s.*", folder, folder);
    if (removes && system(command) != 0) failures++;
    printf("%d runs, %d failures\n", runs, failures);
    return failures != 0 || runs == 0;
}

/*  test_fsdp.c - promises of ddp_fsdp.h besides equal bits (parity/test_fsdp_parity.c): messages for bad
    input, ranks that differ, tied parameters, odd tensors, prefetch in changing orders, memory to the byte,
    8-bit gathers, scalers.

    test_fsdp [processes|threads [W ...]] */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* fallocate */
#endif
#include "ddp_fsdp.h"
#include "../support/ranks.h"
#include "../support/relay.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <inttypes.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* Replaces that of libc. With no_fallocate it fails as in a libc without emulation. */
static int no_fallocate;
int posix_fallocate(int fd, off_t from, off_t size_bytes) {
    if (__atomic_load_n(&no_fallocate, __ATOMIC_ACQUIRE)) return EOPNOTSUPP;
    return fallocate(fd, 0, from, size_bytes) == 0 ? 0 : errno;
}

enum { PARAMS = 16, UNITS = 8 };

typedef struct model {
    ddp_fsdp_param params[PARAMS];
    ddp_fsdp_unit_desc units[UNITS];
    int count, unit_count;
    ddp_fsdp_desc desc;
} model;

static double noise(uint64_t seed) { return (double)(int64_t)ranks_mix(seed) / 9223372036854775808.0; }
static uint64_t name_seed(const char *name) {
    uint64_t seed = 7;
    while (*name) seed = ranks_mix(seed + (unsigned char)*name++);
    return seed;
}

static double load(const void *memory, ddp_dtype dtype, int64_t i) {
    double value;
    ddp_device_cpu()->cast(&value, DDP_F64, (const char *)memory + (size_t)i * ddp_dtype_size(dtype), dtype,
                           1);
    return value;
}

static void store(void *memory, ddp_dtype dtype, int64_t i, double value) {
    ddp_device_cpu()->cast((char *)memory + (size_t)i * ddp_dtype_size(dtype), dtype, &value, DDP_F64, 1);
}

static double first_value(const char *name, int64_t i) {
    return (double)(float)noise(name_seed(name) + (uint64_t)i);
}

static ddp_result fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                       void *user) {
    const ddp_tensor *t = &param->param.value;
    int64_t each = t->ndim && t->shape[0] ? ddp_tensor_count(t) / t->shape[0] : 1;
    (void)user;
    for (int64_t i = 0; i < row_count * each; i++)
        store(out, t->dtype == DDP_F64 ? DDP_F64 : DDP_F32, i,
              first_value(param->tied_to ? param->tied_to : param->param.name, first_row * each + i));
    return DDP_OK;
}

/* A parameter of the last unit, or the first of a new one. columns 0: one dimension; rows -1: none. */
static ddp_fsdp_param *add(model *m, const char *unit, const char *name, ddp_dtype dtype, int rows,
                           int columns) {
    ddp_fsdp_param *p = &m->params[m->count++];
    if (unit) {
        m->units[m->unit_count].name = unit;
        m->units[m->unit_count++].params = p;
    }
    m->units[m->unit_count - 1].param_count++;
    p->param.name = name;
    p->param.value.dtype = dtype;
    p->param.value.ndim = rows < 0 ? 0 : columns ? 2 : 1;
    p->param.value.shape[0] = rows < 0 ? 0 : rows;
    p->param.value.shape[1] = columns;
    m->desc.units = m->units;
    m->desc.unit_count = m->unit_count;
    m->desc.init_fn = fill;
    return p;
}

static void blocks(model *m, int count, int rows, int columns) {
    static const char *const names[UNITS] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    memset(m, 0, sizeof *m);
    for (int u = 0; u < count; u++) add(m, names[u], names[u], DDP_F32, rows, columns);
}

static void backward(const model *m, int unit, uint64_t seed) {
    for (int k = 0; k < m->units[unit].param_count; k++) {
        const ddp_param *p = &m->units[unit].params[k].param;
        for (int64_t i = 0; p->grad.data && i < ddp_tensor_count(&p->grad); i++)
            store(p->grad.data, p->grad.dtype, i,
                  load(p->grad.data, p->grad.dtype, i) + 0.2 * load(p->value.data, p->value.dtype, i)
                      + noise(seed + name_seed(p->name) + (uint64_t)i));
    }
}

static ddp_result pass(ddp_group *group, ddp_fsdp *fsdp, const model *m, uint64_t seed) {
    for (int u = 0; u < m->unit_count; u++) {
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    }
    for (int u = m->unit_count - 1; u >= 0; u--) {
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
        backward(m, u, ranks_mix(seed * 64 + (uint64_t)ddp_rank(group)));
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    }
    return DDP_OK;
}

static ddp_result train(ddp_group *group, ddp_fsdp *fsdp, const model *m, int steps, uint64_t seed) {
    int micro_batches = m->desc.micro_batch_count ? m->desc.micro_batch_count : 1;
    for (int s = 0; s < steps; s++) {
        for (int k = 0; k < micro_batches; k++)
            RANKS_OK(group, pass(group, fsdp, m, seed * 1000 + (uint64_t)(s * micro_batches + k)));
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.05f));
    }
    return DDP_OK;
}

static uint64_t hash_bytes(uint64_t hash, const void *memory, size_t size) {
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)memory)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static uint64_t unit_hash(uint64_t hash, const model *m, int unit) {
    for (int k = 0; k < m->units[unit].param_count; k++) {
        const ddp_tensor *v = &m->units[unit].params[k].param.value;
        if (v->data) hash = hash_bytes(hash, v->data, (size_t)ddp_tensor_count(v) * ddp_dtype_size(v->dtype));
    }
    return hash;
}

/* All values, whole. */
static ddp_result digest(ddp_group *group, ddp_fsdp *fsdp, const model *m, uint64_t *out) {
    *out = 99;
    RANKS_OK(group, ddp_fsdp_no_grad(fsdp, 1));
    for (int u = 0; u < m->unit_count; u++) {
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
        *out = unit_hash(*out, m, u);
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    }
    RANKS_OK(group, ddp_fsdp_no_grad(fsdp, 0));
    return DDP_OK;
}

static int says(const char *word) { return strstr(ddp_last_error(), word) != NULL; }

#define FAILS(group, call, code, ...)                                                                   \
    do {                                                                                                \
        static const char *const words[] = {__VA_ARGS__};                                               \
        ddp_result got = (ddp_result)(call);                                                            \
        RANKS_CHECK(group, got == (code), "%s: %s", ddp_result_name(got),                               \
                    got == DDP_OK ? "" : ddp_last_error());                                             \
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)                                     \
            RANKS_CHECK(group, says(words[i]), "\"%s\" is missing in: %s", words[i], ddp_last_error()); \
    } while (0)

/* refuse_after: > 0 = this allocation and all later ones fail; < 0 = only allocation -refuse_after fails, and
   refuse_after becomes 0. */
typedef struct counter {
    size_t now, peak;
    int calls, refuse_after;
} counter;

static void *counted(size_t size, void *user) {
    counter *c = (counter *)user;
    size_t *memory;
    if (c->refuse_after > 0 && c->calls + 1 >= c->refuse_after) return NULL;
    if (c->calls + 1 == -c->refuse_after) {
        c->refuse_after = 0;
        return NULL;
    }
    memory = (size_t *)malloc(size + 64);
    if (!memory) return NULL;
    c->calls++;
    memory[0] = size;
    c->now += size;
    if (c->now > c->peak) c->peak = c->now;
    return memory + 8;
}

static void uncounted(void *memory, void *user) {
    if (!memory) return;
    ((counter *)user)->now -= ((size_t *)memory)[-8];
    free((size_t *)memory - 8);
}

//== bad input ==============================================================================

/* ddp_fsdp_predict finds the errors of a desc without a group. */
static ddp_result refuse_predict(ddp_group *group, const model *m, const char *const words[3]) {
    ddp_fsdp_bytes bytes = {1, 1, 1, 1, 1, 1, 1, 1};
    const ddp_fsdp_bytes before = bytes;
    FAILS(group, ddp_fsdp_predict(&m->desc, 4, &bytes), DDP_ERR_INVALID, "ddp_fsdp_predict");
    RANKS_CHECK(group, says(words[0]), "no \"%s\" in: %s", words[0], ddp_last_error());
    RANKS_CHECK(group, memcmp(&bytes, &before, sizeof bytes) == 0, "an error changes the bytes");
    return DDP_OK;
}

/* One change at a time to a valid model; on every rank, or only on the last one. */
static ddp_result refuse(ddp_group *group, int only_last) {
    static const char *const words[][3] = {
        {"unit_count is below 1"},
        {"unit 1", "bee", "no parameters"},
        {"strategy=9"},
        {"offload=7"},
        {"param_dtype"},
        {"reduce_dtype"},
        {"micro_batch_count=-1"},
        {"alloc_fn", "free_fn"},
        {"replicas"},
        {"quantize_gather", "FULL_SHARD"},
        {"keep_checkpoints"},
        {"unit ay", "no name"},
        {"unit ay", "parameter a.w", "shape"},
        {"unit bee", "parameter b.w", "not a floating-point dtype"},
        {"unit bee", "parameter b.w", "grad.dtype"},
        {"unit bee", "parameter b.w", "no values"},
        {"unit bee", "a.w", "this name"},
        {"unit bee", "tied_to=none"},
        {"tied", "shape or dtype"},
        {"global_shape"},
        {"beta1"},
        {"unit bee", "b.w", "unit ay"},
        {"frozen", "a.w"},
        {"unit bee", "a.v", "this name"},
        {"prefetch"},
        {"unit bee", "UTF-8"},
        {"unit bee", "9900 bytes"},
        {"unit bee", "__metadata__"},
        {"buffer_count=2", "set both, or neither"},
        {"buffer 1", "data, dtype or shape"},
        {"buffer_names is NULL", "2 buffers"},
        {"buffer 1", "name is missing or invalid"},
        {"buffers 0 and 1", "mean", "own name"},
        {"buffer 1", "parameter b.w", "own name"},
        {"buffer 0", "name is missing or invalid", "UTF-8"},
        {"OFFLOAD_PARAMS needs strategy DDP_FSDP_FULL_SHARD", "use DDP_FSDP_OFFLOAD_HOST"},
    };
    static const char *const shared[] = {"mean", "var"};
    static const char *const no_name[] = {"mean", NULL}, *const twice[] = {"mean", "mean"};
    static const char *const of_param[] = {"mean", "b.w"}, *const not_utf8[] = {"caf\xe9", "var"};
    enum { OWN_REPLICAS = 8, NO_VALUES = 15, NO_BUFFER_DATA = 29 };
    double memory[12] = {0};
    char name[9902] = "";
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        model m;
        ddp_fsdp *fsdp = (ddp_fsdp *)&m;
        int bad = !only_last || ddp_rank(group) == ddp_world_size(group) - 1;
        ddp_fsdp_param *a, *b;
        memset(&m, 0, sizeof m);
        a = add(&m, "ay", "a.w", DDP_F32, 4, 3);
        add(&m, NULL, "a.v", DDP_F32, 4, 3);
        b = add(&m, "bee", "b.w", DDP_F32, 4, 3);
        ddp_tensor buffers[2] = {{memory, DDP_F32, 1, {3}}, {memory + 3, DDP_I64, 0, {0}}};
        m.desc.buffers = buffers;
        m.desc.buffer_names = shared;
        m.desc.buffer_count = 2;
        switch (bad ? (int)i : -1) {
        case 0: m.desc.unit_count = 0; break;
        case 1: m.units[1].param_count = 0; break;
        case 2: m.desc.strategy = (ddp_fsdp_strategy)9; break;
        case 3: m.desc.offload = (ddp_fsdp_offload)7; break;
        case 4: m.desc.param_dtype = DDP_I8; break;
        case 5: m.desc.reduce_dtype = (ddp_dtype)77; break;
        case 6: m.desc.micro_batch_count = -1; break;
        case 7: m.desc.alloc_fn = counted; break;
        case 8: m.desc.replicas = group; break;
        case 9:
            m.desc.quantize_gather = 1;
            m.desc.strategy = DDP_FSDP_SHARD_GRAD;
            break;
        case 10: m.desc.keep_checkpoints = -3; break;
        case 11: a->param.name = NULL; break;
        case 12: a->param.value.shape[1] = -1; break;
        case 13: b->param.value.dtype = DDP_I32; break;
        case 14: b->param.grad.dtype = DDP_U8; break;
        case 15:
            m.desc.init_fn = NULL;
            a->param.value.data = memory;
            m.params[1].param.value.data = memory + 6;
            break;
        case 16: b->param.name = "a.w"; break;
        case 17: b->tied_to = "none"; break;
        case 18:
            b->tied_to = "a.w";
            b->param.value.shape[0] = 5;
            break;
        case 19:
            b->global_shape[0] = 6;
            b->global_shape[1] = 3;
            b->global_offset[0] = 3;
            break;
        case 20: m.desc.optimizer.beta1 = 1.5f; break;
        case 21: a->param.value.data = b->param.value.data = memory; break;
        case 22:
            b->tied_to = "a.w";
            a->frozen = 1;
            break;
        case 23:
            b->tied_to = "a.w";
            b->param.name = "a.v";
            break;
        case 24: m.desc.prefetch = -5; break;
        case 25: b->param.name = "caf\xe9"; break;
        case 26: b->param.name = (const char *)memset(name, 'x', sizeof name - 1); break;
        case 27: b->param.name = "__metadata__"; break;
        case 28: m.desc.buffers = NULL; break;
        case NO_BUFFER_DATA: buffers[1].data = NULL; break;
        case 30: m.desc.buffer_names = NULL; break;
        case 31: m.desc.buffer_names = no_name; break;
        case 32: m.desc.buffer_names = twice; break;
        case 33: m.desc.buffer_names = of_param; break;
        case 34: m.desc.buffer_names = not_utf8; break;
        case 35:
            m.desc.offload = DDP_FSDP_OFFLOAD_PARAMS;
            m.desc.strategy = DDP_FSDP_SHARD_GRAD;
            break;
        default: break;
        }
        int predicts = i == NO_VALUES || i == NO_BUFFER_DATA || i == OWN_REPLICAS;
        if (bad && !predicts) RANKS_OK(group, refuse_predict(group, &m, words[i]));
        ddp_result result = ddp_fsdp_create(&fsdp, group, &m.desc);
        RANKS_CHECK(group, result == DDP_ERR_INVALID && !fsdp, "case %d: %s: %s", (int)i,
                    ddp_result_name(result), ddp_last_error());
        for (int k = 0; k < 3 && words[i][k]; k++)
            RANKS_CHECK(group, says(words[i][k]), "case %d: no \"%s\" in: %s", (int)i, words[i][k],
                        ddp_last_error());
        RANKS_OK(group, ddp_group_status(group));
    }
    return DDP_OK;
}

static ddp_result bad_input(ddp_group *group) { return refuse(group, 0); }
static ddp_result bad_on_one(ddp_group *group) {
    return ddp_world_size(group) > 1 ? refuse(group, 1) : DDP_OK;
}

static ddp_result bad_calls(ddp_group *group) {
    model m;
    ddp_fsdp *fsdp;
    ddp_tensor t;
    ddp_fsdp_memory memory;
    float norm, half, first;
    blocks(&m, 2, 6, 2);
    FAILS(group, ddp_fsdp_create(NULL, group, &m.desc), DDP_ERR_INVALID, "out");
    FAILS(group, ddp_fsdp_create(&fsdp, NULL, &m.desc), DDP_ERR_INVALID, "group");
    FAILS(group, ddp_fsdp_create(&fsdp, group, NULL), DDP_ERR_INVALID, "desc");
    FAILS(group, ddp_fsdp_unshard(NULL, 0), DDP_ERR_INVALID, "fsdp is NULL");
    FAILS(group, ddp_fsdp_step(NULL, 0), DDP_ERR_INVALID, "fsdp is NULL");
    FAILS(group, ddp_fsdp_get_memory(NULL, &memory), DDP_ERR_INVALID, "NULL");
    ddp_fsdp_destroy(NULL);
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    FAILS(group, ddp_fsdp_unshard(fsdp, 2), DDP_ERR_INVALID, "unit=2", "0 to 1");
    FAILS(group, ddp_fsdp_reshard(fsdp, -1), DDP_ERR_INVALID, "unit=-1");
    FAILS(group, ddp_fsdp_reduce_grads(fsdp, 9), DDP_ERR_INVALID, "unit=9");
    FAILS(group, ddp_fsdp_reshard(fsdp, 1), DDP_ERR_INVALID, "unit b", "not unsharded");
    FAILS(group, ddp_fsdp_reduce_grads(fsdp, 1), DDP_ERR_INVALID, "unit b", "call ddp_fsdp_unshard");
    FAILS(group, ddp_fsdp_step(fsdp, 0.1f), DDP_ERR_INVALID, "unit a", "reduced 0 times");
    FAILS(group, ddp_fsdp_clip_grad_norm(fsdp, 1, &norm), DDP_ERR_INVALID, "unit a", "reduced 0 times");
    FAILS(group, ddp_fsdp_get_shard(fsdp, 0, 1, &t, NULL, NULL), DDP_ERR_INVALID, "param=1", "unit a");
    RANKS_OK(group, pass(group, fsdp, &m, 1));
    FAILS(group, ddp_fsdp_reduce_grads(fsdp, 0), DDP_ERR_INVALID, "unit a", "ddp_fsdp_step");
    FAILS(group, ddp_fsdp_step(fsdp, -1), DDP_ERR_INVALID, "lr=-1");
    FAILS(group, ddp_fsdp_step(fsdp, NAN), DDP_ERR_INVALID, "lr=");
    FAILS(group, ddp_fsdp_step(fsdp, INFINITY), DDP_ERR_INVALID, "lr=");
    FAILS(group, ddp_fsdp_clip_grad_norm(fsdp, 0, &norm), DDP_ERR_INVALID, "max_norm=0");
    FAILS(group, ddp_fsdp_clip_grad_norm(fsdp, NAN, NULL), DDP_ERR_INVALID, "max_norm");
    FAILS(group, ddp_fsdp_get_norm(NULL, &norm), DDP_ERR_INVALID, "fsdp or norm is NULL");
    FAILS(group, ddp_fsdp_get_norm(fsdp, NULL), DDP_ERR_INVALID, "fsdp or norm is NULL");
    FAILS(group, ddp_fsdp_get_norm(fsdp, &norm), DDP_ERR_INVALID, "no norm is available",
          "ddp_fsdp_clip_grad_norm first");
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, INFINITY, &norm));
    RANKS_CHECK(group, norm > 0, "norm %g", (double)norm);
    RANKS_OK(group, ddp_fsdp_get_norm(fsdp, &half));
    RANKS_CHECK(group, half == norm, "norm %g, the second time %g", (double)norm, (double)half);
    RANKS_OK(group, ddp_fsdp_get_shard(fsdp, 0, 0, NULL, &t, NULL));
    first = ddp_tensor_count(&t) ? ((float *)t.data)[0] : 0;
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, norm / 2, NULL));
    /* The factor is applied in the step; a read before it returns the product. */
    RANKS_OK(group, ddp_fsdp_get_shard(fsdp, 0, 0, NULL, &t, NULL));
    RANKS_CHECK(group, !ddp_tensor_count(&t) || ((float *)t.data)[0] == first * 0.5f,
                "%g, half of which is %g", (double)first, (double)((float *)t.data)[0]);
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, norm / 4, &half));
    RANKS_CHECK(group, fabsf(half - norm / 2) < 1e-6f * norm, "norm %g, clipped to its half %g", (double)norm,
                (double)half);
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, INFINITY, &half));
    RANKS_CHECK(group, fabsf(half - norm / 4) < 1e-6f * norm, "norm %g, clipped to its fourth %g",
                (double)norm, (double)half);
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 1e-45f, NULL));
    RANKS_OK(group, ddp_fsdp_step(fsdp, 0));
    RANKS_OK(group, ddp_fsdp_get_norm(fsdp, &norm)); /* valid until the next call */
    RANKS_CHECK(group, norm == half, "norm %g, after the step %g", (double)half, (double)norm);
    FAILS(group, ddp_fsdp_reduce_grads(fsdp, 0), DDP_ERR_INVALID, "unit a", "call ddp_fsdp_unshard");
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* Rank 0 passes another description: an error on every rank, and the group stays usable. */
static ddp_result descs_differ(ddp_group *group) {
    static const char *const words[][2] = {
        {"unit b", "[7"},
        {"unit b", "'b' f64"},
        {"unit b", " frozen"},
        {"parameter 'b'", "'bb'"},
        {"unit b", " tied"},
        {"rank 0 unit_count=2", "rank 1 unit_count=3"},
        {"rank 0 strategy=2", "rank 1 strategy=0"},
        {"rank 0 micro_batch_count=2", "rank 1 micro_batch_count=1"},
        {"rank 0 optimizer.weight_decay=0.5,", "rank 1 optimizer.weight_decay=0;"},
        {"rank 0 optimizer.kind=1", "rank 1 optimizer.kind=0"},
        {"unit b", ",1]"},
    };
    if (ddp_world_size(group) == 1) return DDP_OK;
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_result result;
        blocks(&m, 3, 6, 2);
        switch (ddp_rank(group) == 0 ? (int)i : -1) {
        case 0: m.params[1].param.value.shape[0] = 7; break;
        case 1: m.params[1].param.value.dtype = DDP_F64; break;
        case 2: m.params[1].frozen = 1; break;
        case 3: m.params[1].param.name = "bb"; break;
        case 4: m.params[1].tied_to = "a"; break;
        case 5: m.desc.unit_count = 2; break;
        case 6: m.desc.strategy = DDP_FSDP_SHARD_OPTIM; break;
        case 7: m.desc.micro_batch_count = 2; break;
        case 8: m.desc.optimizer.weight_decay = 0.5f; break;
        case 9:
            m.desc.optimizer.kind = DDP_OPTIMIZER_SGD;
            m.desc.optimizer.momentum = 0.9f;
            break;
        case 10:
            m.params[1].param.value.ndim = 3;
            m.params[1].param.value.shape[2] = 1;
            break;
        default: break;
        }
        result = ddp_fsdp_create(&fsdp, group, &m.desc);
        RANKS_CHECK(group, result == DDP_ERR_MISMATCH && says(words[i][0]) && says(words[i][1]),
                    "case %d: %s: %s", (int)i, ddp_result_name(result), ddp_last_error());
        RANKS_OK(group, ddp_group_status(group));
    }
    return DDP_OK;
}

//== wrap ===================================================================================

static ddp_result wrapping(ddp_group *group) {
    static const char *const names[] = {"wte",       "h.0.ln",    "h.0.mlp.w", "h.1.ln",
                                        "h.1.mlp.w", "h.0.mlp.b", "lnf",       "head.w"};
    static const char *const nested[] = {"h.*", "h.*.mlp"}, *const plain[] = {"h."},
                             *const missing[] = {"h.*", "x"}, *const null_prefix[] = {NULL};
    ddp_param params[8];
    ddp_fsdp_param storage[8];
    ddp_fsdp_unit_desc units[8];
    ddp_fsdp_wrap_desc desc = DDP_ZERO;
    memset(params, 0, sizeof params);
    for (int i = 0; i < 8; i++) {
        params[i].name = names[i];
        params[i].value.dtype = DDP_F32;
        params[i].value.ndim = 1;
        params[i].value.shape[0] = 10 * (i + 1);
    }
    desc.storage = storage;
    desc.prefixes = nested;
    desc.prefix_count = 2;
    {
        static const char *const want[] = {"root", "h.0", "h.0.mlp", "h.1", "h.1.mlp"};
        static const int counts[] = {3, 1, 2, 1, 1};
        RANKS_CHECK(group, ddp_fsdp_wrap(params, 8, &desc, units, 8) == 5, "%s", ddp_last_error());
        for (int u = 0; u < 5; u++)
            RANKS_CHECK(group, !strcmp(units[u].name, want[u]) && units[u].param_count == counts[u], "%s %d",
                        units[u].name, units[u].param_count);
        RANKS_CHECK(group,
                    units[2].params[1].index == 5 && !strcmp(units[2].params[1].param.name, "h.0.mlp.b"),
                    "index %d", units[2].params[1].index);
        RANKS_CHECK(group, units[0].params[2].index == 7, "head.w is not in h");
    }
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, units, 4), DDP_ERR_INVALID, "5 units", "4");
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, NULL, 0), DDP_ERR_INVALID, "5 units");
    desc.prefixes = plain;
    desc.prefix_count = 1;
    RANKS_CHECK(group,
                ddp_fsdp_wrap(params, 8, &desc, units, 8) == 2 && units[1].param_count == 5
                    && !strcmp(units[1].name, "h"),
                "%s", units[1].name);
    desc.prefixes = missing;
    desc.prefix_count = 2;
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, units, 8), DDP_ERR_INVALID, "prefix x");
    desc.prefixes = null_prefix;
    desc.prefix_count = 1;
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, units, 8), DDP_ERR_INVALID, "prefixes[0]");
    desc.prefixes = NULL;
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, units, 8), DDP_ERR_INVALID, "prefixes");
    desc.prefix_count = 0;
    desc.min_unit_bytes = 200;
    /* 40 80 120 | 160 200 | 240 | 280 | 320. */
    RANKS_CHECK(group, ddp_fsdp_wrap(params, 8, &desc, units, 8) == 5, "%s", ddp_last_error());
    RANKS_CHECK(group,
                units[0].param_count == 3 && units[1].param_count == 2 && units[4].param_count == 1
                    && !units[4].name,
                "by size");
    FAILS(group, ddp_fsdp_wrap(params, 0, &desc, units, 8), DDP_ERR_INVALID, "param_count=0");
    params[3].name = "wte";
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, units, 8), DDP_ERR_INVALID, "wte", "params[3]");
    params[3].name = "";
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, units, 8), DDP_ERR_INVALID, "params[3]", "no name");
    desc.storage = NULL;
    FAILS(group, ddp_fsdp_wrap(params, 8, &desc, units, 8), DDP_ERR_INVALID, "storage");
    return DDP_OK;
}

//== odd tensors, ties, dtypes ==============================================================

typedef struct odd {
    ddp_fsdp_strategy strategy;
    ddp_dtype reduce;
    int packed, micro_batches, prefetch, keep, by_memory;
} odd;

/* Fewer rows than ranks, no rows, no columns, no dimensions; every float dtype, gradients wider than values;
   uses within one unit and across units; parameters that are not trained. */
static ddp_result train_odd(ddp_group *group, const odd *o, uint64_t *out) {
    model m;
    ddp_fsdp *fsdp;
    ddp_group *far = group;
    float tied[8], frozen[9];
    ddp_fsdp_param *p;
    memset(&m, 0, sizeof m);
    add(&m, "u0", "emb", DDP_F32, 5, 3);
    add(&m, NULL, "tiny", DDP_F32, 1, 7);
    add(&m, NULL, "scalar", DDP_F32, -1, 0);
    add(&m, NULL, "none", DDP_F32, 0, 4);
    p = add(&m, NULL, "thin", DDP_F32, 3, 1);
    p->param.value.shape[1] = 0;
    add(&m, "u1", "d", DDP_F64, 6, 2);
    add(&m, NULL, "h", DDP_BF16, 7, 3);
    add(&m, NULL, "f", DDP_F16, 2, 5);
    add(&m, NULL, "wide", DDP_BF16, 7, 0)->param.grad.dtype = DDP_F32;
    add(&m, NULL, "plain", DDP_F32, 3, 2);
    add(&m, NULL, "emb.use", DDP_F32, 5, 3)->tied_to = "emb";
    p = add(&m, "u2", "frozen", DDP_F32, 9, 0);
    p->frozen = 1;
    for (int i = 0; i < 9; i++) frozen[i] = (float)first_value("frozen", i);
    if (o->by_memory) p->param.value.data = frozen;
    for (int i = 0; i < 8; i++) tied[i] = (float)first_value("in", i);
    p = add(&m, NULL, "in", DDP_F32, 4, 2);
    if (o->by_memory) p->param.value.data = tied;
    p = add(&m, NULL, "in.use", DDP_F32, 4, 2);
    if (o->by_memory)
        p->param.value.data = tied;
    else
        p->tied_to = "in";
    p = add(&m, "u3", "last.frozen", DDP_F64, 3, 0);
    p->frozen = 1;
    add(&m, "u4", "emb.again", DDP_F32, 5, 3)->tied_to = "emb";
    m.desc.strategy = o->strategy;
    m.desc.reduce_dtype = o->reduce;
    m.desc.micro_batch_count = o->micro_batches;
    m.desc.prefetch = o->prefetch;
    m.desc.no_reshard_after_forward = o->keep;
    if (o->packed) RANKS_OK(group, relay_over(&far, group));
    RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
    RANKS_OK(group, train(group, fsdp, &m, 2, 3));
    RANKS_OK(group, digest(group, fsdp, &m, out));
    for (int u = 0; u < m.unit_count; u++) {
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
        for (int k = 0; k < m.units[u].param_count; k++) {
            const ddp_fsdp_param *q = &m.units[u].params[k];
            RANKS_CHECK(group, !q->frozen == (q->param.grad.data != NULL), "%s: grad.data=%p", q->param.name,
                        q->param.grad.data);
            for (int64_t i = 0; i < ddp_tensor_count(&q->param.value) && q->frozen; i++)
                RANKS_CHECK(group,
                            load(q->param.value.data, q->param.value.dtype, i)
                                == first_value(q->param.name, i),
                            "%s[%d] moved", q->param.name, (int)i);
        }
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    }
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    if (far != group) ddp_group_destroy(far);
    return DDP_OK;
}

static ddp_result odd_tensors(ddp_group *group) {
    for (int micro_batches = 1; micro_batches <= 2; micro_batches++)
        for (int reduce = 0; reduce < 2; reduce++) {
            uint64_t want[2] = {0, 0}, have;
            for (int turn = 0; turn < 8; turn++) {
                odd o;
                /* Which strategies have the same order of sums. */
                int kind = micro_batches == 1 ? 0 : turn / 2 > 1;
                o.strategy = (ddp_fsdp_strategy)(turn / 2);
                o.reduce = reduce ? DDP_F32 : DDP_DTYPE_DEFAULT;
                o.packed = turn & 1;
                o.micro_batches = micro_batches;
                o.prefetch = turn % 3 - 1;
                o.keep = turn == 1;
                o.by_memory = turn / 2 % 2;
                RANKS_OK(group, train_odd(group, &o, &have));
                if (!want[kind]) want[kind] = have;
                RANKS_CHECK(group, want[kind] == have,
                            "strategy %d packed=%d reduce=%d micro_batches=%d has other bits",
                            (int)o.strategy, o.packed, reduce, micro_batches);
            }
        }
    return DDP_OK;
}

//== optimizer state ========================================================================

/* After the first step the moments are those that AdamW computes from the gradients of get_shard, row by row.
   A use has the moments of its source. */
static ddp_result states(ddp_group *group) {
    static const char *const names[] = {"exp_avg", "exp_avg_sq"};
    for (int strategy = 0; strategy < 4; strategy++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_tensor grad, state, tied;
        const char *name;
        float grads[2][15], rest[] = {(float)(1.0 - (double)0.9f), (float)(1.0 - (double)0.999f)};
        memset(&m, 0, sizeof m);
        add(&m, "a", "emb", DDP_F32, 5, 3);
        add(&m, NULL, "frozen", DDP_F32, 3, 0)->frozen = 1;
        add(&m, "b", "w", DDP_F32, 4, 2);
        add(&m, NULL, "use", DDP_F32, 5, 3)->tied_to = "emb";
        m.desc.strategy = (ddp_fsdp_strategy)strategy;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, pass(group, fsdp, &m, 4));
        RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, INFINITY, NULL)); /* divides */
        for (int u = 0; u < 2; u++) {
            RANKS_OK(group, ddp_fsdp_get_shard(fsdp, u, 0, NULL, &grad, NULL));
            if (grad.data) memcpy(grads[u], grad.data, (size_t)ddp_tensor_count(&grad) * sizeof(float));
        }
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.05f));
        for (int i = 0; i < 4; i++) {
            int u = i / 2, which = i % 2;
            RANKS_OK(group, ddp_fsdp_get_shard(fsdp, u, 0, &grad, NULL, NULL));
            RANKS_OK(group, ddp_fsdp_get_state(fsdp, u, 0, which, &name, &state));
            RANKS_CHECK(group,
                        !strcmp(name, names[which]) && state.dtype == DDP_F32 && state.ndim == 2
                            && state.shape[0] == grad.shape[0] && state.shape[1] == grad.shape[1]
                            && !state.data == !ddp_tensor_count(&state),
                        "strategy %d, unit %d: %s", strategy, u, name);
            for (int64_t k = 0; k < ddp_tensor_count(&state); k++) {
                float g = grads[u][k], want = rest[which] * (which ? (float)(g * g) : g);
                RANKS_CHECK(group, ((float *)state.data)[k] == want && want != 0,
                            "strategy %d, %s of unit %d: element %d is %.9g, want %.9g", strategy, name, u,
                            (int)k, (double)((float *)state.data)[k], (double)want);
            }
            RANKS_OK(group, ddp_fsdp_get_state(fsdp, 1, 1, which, NULL, &tied));
            RANKS_CHECK(group, u || (tied.data == state.data && tied.shape[0] == state.shape[0]),
                        "strategy %d: a tied parameter has a state of its own", strategy);
        }
        FAILS(group, ddp_fsdp_get_state(NULL, 0, 0, 0, &name, &state), DDP_ERR_INVALID, "fsdp is NULL");
        FAILS(group, ddp_fsdp_get_state(fsdp, 2, 0, 0, &name, &state), DDP_ERR_INVALID, "unit=2", "0 to 1");
        FAILS(group, ddp_fsdp_get_state(fsdp, 0, 2, 0, &name, &state), DDP_ERR_INVALID, "param=2", "unit a");
        FAILS(group, ddp_fsdp_get_state(fsdp, 0, 1, 0, &name, &state), DDP_ERR_INVALID,
              "unit a, parameter frozen", "no optimizer state");
        FAILS(group, ddp_fsdp_get_state(fsdp, 0, 0, 2, &name, &state), DDP_ERR_INVALID, "ddp_fsdp_get_state",
              "which=2", "2 states");
        FAILS(group, ddp_fsdp_get_state(fsdp, 0, 0, -1, &name, &state), DDP_ERR_INVALID, "which=-1");
        FAILS(group, ddp_fsdp_get_state(fsdp, 0, 0, 0, &name, NULL), DDP_ERR_INVALID, "state is NULL");
        ddp_fsdp_destroy(fsdp);
    }
    return DDP_OK;
}

/* Values of an earlier run, by name. */
typedef struct earlier {
    ddp_fsdp *fsdp;
    const model *m;
} earlier;

static ddp_result fill_again(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                             void *user) {
    const earlier *e = (const earlier *)user;
    for (int i = 0; i < e->m->count; i++) {
        ddp_tensor rows;
        int64_t first;
        ddp_result result = ddp_fsdp_get_shard(e->fsdp, i / 2, i % 2, &rows, NULL, &first);
        if (result != DDP_OK) return result;
        if (strcmp(e->m->params[i].param.name, param->param.name)) continue;
        if (first != first_row || rows.shape[0] != row_count)
            return ddp_fail(DDP_ERR_INVALID, "rows from %d on are requested", (int)first_row);
        memcpy(out, rows.data, (size_t)ddp_tensor_count(&rows) * sizeof(float));
    }
    return DDP_OK;
}

/* Saved and restored values, state and steps continue as if uninterrupted; with another step they do not. */
static ddp_result steps_set(ddp_group *group) {
    for (int turn = 0; turn < 5; turn++) {
        model m[2];
        earlier e;
        ddp_fsdp *fsdp[2];
        ddp_fsdp_state state = DDP_ZERO;
        uint64_t hash[2];
        for (int k = 0; k < 2; k++) {
            memset(&m[k], 0, sizeof m[k]);
            add(&m[k], "a", "a", DDP_F32, 5, 3);
            add(&m[k], NULL, "b", DDP_F32, 7, 0);
            add(&m[k], "c", "c", DDP_F32, 4, 2);
            add(&m[k], NULL, "d", DDP_F32, 1, 9);
            m[k].desc.strategy = (ddp_fsdp_strategy)(turn % 4);
        }
        RANKS_OK(group, ddp_fsdp_create(&fsdp[0], group, &m[0].desc));
        RANKS_OK(group, train(group, fsdp[0], &m[0], 3, 5));
        e.fsdp = fsdp[0];
        e.m = &m[0];
        m[1].desc.init_fn = fill_again;
        m[1].desc.init_user = &e;
        m[1].desc.state = &state;
        RANKS_OK(group, ddp_fsdp_create(&fsdp[1], group, &m[1].desc));
        for (int i = 0; i < 8; i++) {
            ddp_tensor from, to;
            RANKS_OK(group, ddp_fsdp_get_state(fsdp[0], i / 4, i / 2 % 2, i % 2, NULL, &from));
            RANKS_OK(group, ddp_fsdp_get_state(fsdp[1], i / 4, i / 2 % 2, i % 2, NULL, &to));
            if (to.data) memcpy(to.data, from.data, (size_t)ddp_tensor_count(&to) * sizeof(float));
        }
        FAILS(group, ddp_fsdp_set_step(NULL, 3), DDP_ERR_INVALID, "ddp_fsdp_set_step", "fsdp is NULL");
        FAILS(group, ddp_fsdp_set_step(fsdp[1], -1), DDP_ERR_INVALID, "ddp_fsdp_set_step", "step=-1");
        RANKS_OK(group, ddp_fsdp_set_step(fsdp[1], turn < 4 ? 3 : 2));
        RANKS_CHECK(group, state.step == (turn < 4 ? 3 : 2), "state.step %d", (int)state.step);
        for (int k = 0; k < 2; k++) RANKS_OK(group, train(group, fsdp[k], &m[k], 2, 6));
        for (int k = 0; k < 2; k++) RANKS_OK(group, digest(group, fsdp[k], &m[k], &hash[k]));
        RANKS_CHECK(group, (hash[0] == hash[1]) == (turn < 4) && state.step == (turn < 4 ? 5 : 4),
                    "turn %d: after step %d values are %s", turn, (int)state.step,
                    hash[0] == hash[1] ? "equal" : "others");
        for (int k = 0; k < 2; k++) ddp_fsdp_destroy(fsdp[k]);
    }
    return DDP_OK;
}

//== devices ================================================================================

/* A device with only the required functions, whose calls are complete on return: the same bits as on the CPU,
   with and without offload to the host. */
static ddp_result plain_devices(ddp_group *group) {
    ddp_device plain = *ddp_device_cpu();
    ddp_group *far;
    plain.name = "plain";
    RANKS_OK(group, relay_over_device(&far, group, &plain));
    for (int turn = 0; turn < 16; turn++) {
        uint64_t hash[4];
        float norm[4];
        int ways = turn % 4 == DDP_FSDP_FULL_SHARD ? 4 : 3;
        for (int way = 0; way < ways; way++) {
            model m;
            ddp_fsdp *fsdp;
            blocks(&m, 3, 7, 3);
            m.desc.strategy = (ddp_fsdp_strategy)(turn % 4);
            m.desc.optimizer.kind = (ddp_optimizer_kind)(turn / 4);
            m.desc.offload = way == 2 ? DDP_FSDP_OFFLOAD_HOST : DDP_FSDP_OFFLOAD_NONE;
            if (way == 3) m.desc.offload = DDP_FSDP_OFFLOAD_PARAMS;
            m.desc.param_dtype = (turn + turn / 4) & 1 ? DDP_BF16 : DDP_DTYPE_DEFAULT;
            m.desc.micro_batch_count = 2;
            RANKS_OK(group, ddp_fsdp_create(&fsdp, way ? far : group, &m.desc));
            for (int s = 0; s < 3; s++) {
                for (int k = 0; k < 2; k++) RANKS_OK(group, pass(group, fsdp, &m, (uint64_t)(2 * s + k)));
                RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 0.5f, NULL));
                RANKS_OK(group, ddp_fsdp_step(fsdp, 0.05f));
            }
            RANKS_OK(group, ddp_fsdp_get_norm(fsdp, &norm[way]));
            RANKS_OK(group, digest(group, fsdp, &m, &hash[way]));
            ddp_fsdp_destroy(fsdp);
        }
        for (int way = 1; way < ways; way++)
            RANKS_CHECK(
                group,
                hash[way] == hash[0] && memcmp(&norm[way], &norm[0], sizeof norm[0]) == 0 && norm[0] > 0.5f,
                "turn %d, way %d: norm %.9g, want %.9g", turn, way, (double)norm[way], (double)norm[0]);
    }
    ddp_group_destroy(far);
    return DDP_OK;
}

/* A device whose copies from and to pinned memory are late: complete after the event that follows them was
   queried three times. */
static struct {
    size_t taken; /* bytes of the device's memory that were ever given out */
    /* Copies; pieces of pinned memory that were freed before all copies were known to be done. */
    int started, finished, freed_early;
    int fails;         /* results of the next check and the next test of an event */
    int stuck, waited; /* events never complete; number of repeated queries since then */
} late;
typedef struct late_event {
    int covers, asked, in_vain;
} late_event;

static ddp_result late_alloc(ddp_group *group, size_t size_bytes, void **out) {
    late.taken += size_bytes;
    return ddp_device_cpu()->alloc(group, size_bytes, out);
}
static ddp_result late_use_stream(ddp_group *group, ddp_stream_kind lane) {
    (void)group;
    (void)lane;
    return DDP_OK;
}
static ddp_result late_result(void) {
    int fails = late.fails;
    late.fails = 0;
    return fails ? ddp_fail(DDP_ERR_ENGINE, "the late device fails") : DDP_OK;
}
static ddp_result late_check(ddp_group *group) {
    (void)group;
    return late_result();
}
static ddp_result late_create(ddp_group *group, void **out) {
    (void)group;
    *out = calloc(1, sizeof(late_event));
    return *out ? DDP_OK : DDP_ERR_NO_MEMORY;
}
static void late_destroy(ddp_group *group, void *event) {
    (void)group;
    free(event);
}
static ddp_result late_record(ddp_group *group, ddp_stream_kind lane, void *event) {
    (void)group;
    (void)lane;
    ((late_event *)event)->covers = late.started;
    ((late_event *)event)->asked = 0;
    return DDP_OK;
}
static ddp_result late_wait(ddp_group *group, ddp_stream_kind lane, void *event) {
    (void)group;
    (void)lane;
    (void)event;
    return DDP_OK;
}
static ddp_result late_test(ddp_group *group, void *event, int *done) {
    late_event *e = (late_event *)event;
    (void)group;
    if (late.stuck && e->in_vain++ == 1) late.waited++;
    *done = ++e->asked > 2 && !late.stuck;
    if (*done && late.finished < e->covers) late.finished = e->covers;
    return late_result();
}
static ddp_result late_alloc_pinned(ddp_group *group, size_t size_bytes, void **out) {
    (void)group;
    *out = malloc(size_bytes);
    return *out ? DDP_OK : DDP_ERR_NO_MEMORY;
}
static void late_free_pinned(void *memory) {
    late.freed_early += late.finished < late.started;
    free(memory);
}
static void late_copy_async(void *dst, const void *src, size_t size_bytes) {
    late.started++;
    memcpy(dst, src, size_bytes);
}
static void late_update(const ddp_update *u) { (void)u; }
static void late_scale(const ddp_tensor *tensors, int count, const float *factor) {
    ddp_device_cpu()->scale(tensors, count, *factor);
}
static void late_clip(const ddp_exact_sum *sum, float limit, float *factor, float *norm) {
    *norm = (float)sqrt(ddp_exact_sum_value(sum));
    *factor = *norm > limit ? limit / *norm : 1;
}
static void late_trust(const ddp_exact_sum *sums, size_t count, double lr, double c, double decay,
                       double *out) {
    (void)sums;
    (void)count;
    (void)lr;
    (void)c;
    (void)decay;
    (void)out;
}
static const ddp_optimizer_kernels late_kernels = {DDP_VERSION, late_update, late_scale, late_clip,
                                                   late_trust};

static ddp_device late_device(void) {
    ddp_device device = *ddp_device_cpu();
    memset(&late, 0, sizeof late);
    device.name = "late", device.alloc = late_alloc, device.use_stream = late_use_stream,
    device.check = late_check;
    device.event_create = late_create, device.event_destroy = late_destroy, device.event_record = late_record,
    device.event_wait = late_wait;
    device.event_test = late_test, device.alloc_pinned = late_alloc_pinned,
    device.free_pinned = late_free_pinned, device.copy_async = late_copy_async;
    device.optimizer = &late_kernels;
    return device;
}

static ddp_result late_devices(ddp_group *group) {
    ddp_device device = late_device();
    ddp_group *far, *own; /* which fails at the end */
    ddp_fsdp *fsdp;
    ddp_fsdp_memory memory;
    size_t counted[2], taken[2];
    float norm;
    model m;
    if (ddp_world_size(group) > 1) return DDP_OK;
    RANKS_OK(group, ddp_group_split(group, 0, 0, &own));
    RANKS_OK(group, relay_over_device(&far, own, &device));

    /* Memory that norms need in addition: sums of squares on device and host, rates on the device. */
    for (int lamb = 0; lamb < 2; lamb++) {
        taken[lamb] = late.taken;
        blocks(&m, 3, 7, 3);
        m.desc.optimizer.kind = lamb ? DDP_OPTIMIZER_LAMB : DDP_OPTIMIZER_ADAMW;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
        taken[lamb] = late.taken - taken[lamb];
        counted[lamb] = memory.now.total;
        ddp_fsdp_destroy(fsdp);
    }
    RANKS_CHECK(group, taken[1] - taken[0] >= 6 * sizeof(ddp_exact_sum) + 3 * sizeof(double),
                "%zu bytes more", taken[1] - taken[0]);
    RANKS_CHECK(group, counted[1] - counted[0] == taken[1] - taken[0],
                "LAMB has %zu bytes of the device more, and counts %zu", taken[1] - taken[0],
                counted[1] - counted[0]);

    blocks(&m, 3, 7, 3);
    m.desc.offload = DDP_FSDP_OFFLOAD_HOST;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
    /* After a failed clip no norm is available, even if an earlier one succeeded. */
    for (int turn = 0; turn < 4; turn++) {
        int fails = turn % 2 == 0;
        RANKS_OK(group, pass(group, fsdp, &m, (uint64_t)turn));
        for (int u = 0; u < 3; u++) {
            ddp_tensor grad;
            RANKS_OK(group, ddp_fsdp_get_shard(fsdp, u, 0, NULL, &grad, NULL));
        }
        if (turn > 1) RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 0.5f, &norm));
        late.fails = fails;
        ddp_result result = ddp_fsdp_clip_grad_norm(fsdp, 0.5f, NULL);
        RANKS_CHECK(group, result == (fails ? DDP_ERR_ENGINE : DDP_OK), "turn %d: %s", turn,
                    ddp_last_error());
        if (fails)
            FAILS(group, ddp_fsdp_get_norm(fsdp, &norm), DDP_ERR_INVALID,
                  "ddp_fsdp_get_norm: no norm is available");
        else
            RANKS_OK(group, ddp_fsdp_get_norm(fsdp, &norm));
        RANKS_OK(group, turn == 1 ? ddp_fsdp_step(fsdp, 0.05f) : ddp_fsdp_zero_grad(fsdp));
    }
    RANKS_OK(group, pass(group, fsdp, &m, 9));
    /* the next test of an event is that of arriving gradients */
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 0.5f, &norm));
    int before = late.started;
    late.fails = 1;
    FAILS(group, ddp_fsdp_step(fsdp, 0.05f), DDP_ERR_ENGINE, "the late device fails");
    RANKS_CHECK(group, late.started > before, "no gradient was in flight");
    ddp_fsdp_destroy(fsdp);
    RANKS_CHECK(group, late.freed_early == 0, "%d pieces of memory are freed while copies use them",
                late.freed_early);
    ddp_group_destroy(far);
    ddp_group_destroy(own);
    return DDP_OK;
}

/* A device that hangs: destroy gives up once, after the timeout of the group, for any number of pieces in
   flight. */
static ddp_result stuck_device(ddp_group *group) {
    enum { TIMEOUT_MS = 3000 };
    ddp_device device = late_device();
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *far, *own;
    ddp_fsdp *fsdp;
    model m;
    if (ddp_world_size(group) > 1) return DDP_OK;
    desc.init_method = "self://";
    desc.timeout_ms = TIMEOUT_MS;
    RANKS_OK(group, ddp_group_create(&own, &desc));
    RANKS_OK(group, relay_over_device(&far, own, &device));
    blocks(&m, 3, 7, 3);
    m.desc.offload = DDP_FSDP_OFFLOAD_HOST;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
    RANKS_OK(group, pass(group, fsdp, &m, 0));
    RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 0.5f, NULL));
    late.fails = 1;
    FAILS(group, ddp_fsdp_step(fsdp, 0.05f), DDP_ERR_ENGINE, "the late device fails");
    late.stuck = 1;
    double start = ddp_now();
    ddp_fsdp_destroy(fsdp);
    double seconds = ddp_now() - start;
    RANKS_CHECK(group, seconds >= 1e-3 * TIMEOUT_MS, "destroy took %.3f s: nothing was waited for", seconds);
    RANKS_CHECK(group, late.waited == 1, "%d events were each waited for, in %.3f s", late.waited, seconds);
    ddp_group_destroy(far);
    ddp_group_destroy(own);
    return DDP_OK;
}

//== the order of calls =====================================================================

/* Unshards in a different order in every step, several units at a time, some twice; the gathered values go
   into *out. Reductions also run in any order. */
static ddp_result train_disorder(ddp_group *group, int prefetch, size_t limit, int packed, int keep,
                                 size_t *most, uint64_t *out) {
    enum { COUNT = 6, STEPS = 12 };
    model m;
    ddp_fsdp *fsdp;
    ddp_group *far = group;
    ddp_fsdp_memory memory;
    blocks(&m, COUNT, 5, 3);
    m.desc.prefetch = prefetch;
    m.desc.max_gathered_bytes = limit;
    m.desc.no_reshard_after_forward = keep;
    if (packed) RANKS_OK(group, relay_over(&far, group));
    RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
    *out = 5;
    for (uint64_t step = 0; step < STEPS; step++) {
        uint64_t random = step < 4 ? 1 : ranks_mix(step / 2); /* an order is kept for some steps */
        int held[COUNT] = {0}, done[COUNT] = {0}, left = COUNT;
        for (int i = 0; left > 0; i++) {
            int u = (int)((random = ranks_mix(random + 1)) % COUNT), what = (int)(random >> 32) % 4;
            if (what < 3 || !held[u]) {
                RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
                *out = unit_hash(*out, &m, u);
                held[u] = 1;
            }
            if (what == 2 && !done[u]) {
                backward(&m, u, ranks_mix(step * 64 + (uint64_t)ddp_rank(group)));
                RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
                *out = unit_hash(*out, &m, u);
                done[u] = 1;
                left--;
            }
            if (what > 0) {
                RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
                held[u] = 0;
            }
        }
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.05f));
    }
    RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
    if (!keep && prefetch < 0)
        RANKS_CHECK(group, memory.peak.gathered <= COUNT * (64 + DDP_MALLOC_EXTRA), "%zu bytes gathered",
                    memory.peak.gathered);
    if (!keep && limit)
        RANKS_CHECK(group, memory.peak.gathered <= *most,
                    "limit of %zu: %zu bytes gathered, without prefetch %zu", limit, memory.peak.gathered,
                    *most);
    if (prefetch < 0) *most = memory.peak.gathered;
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    if (far != group) ddp_group_destroy(far);
    return DDP_OK;
}

static ddp_result orders_change(ddp_group *group) {
    static const struct {
        int prefetch;
        size_t limit;
        int packed, keep;
    } ways[] = {
        {1, 0, 0, 0}, {2, 0, 1, 0}, {5, 0, 0, 0}, {1000000, 0, 0, 0}, {INT32_MAX, 0, 1, 0},
        {3, 1, 0, 0}, {2, 1, 1, 0}, {1, 0, 0, 1}, {2, 0, 1, 1},
    };
    uint64_t want, have;
    size_t most = 0; /* memory of the units in use at one time */
    RANKS_OK(group, train_disorder(group, -1, 0, 0, 0, &most, &want));
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        RANKS_OK(group, train_disorder(group, ways[i].prefetch, ways[i].limit, ways[i].packed, ways[i].keep,
                                       &most, &have));
        RANKS_CHECK(group, want == have, "prefetch=%d packed=%d keep=%d has other bits", ways[i].prefetch,
                    ways[i].packed, ways[i].keep);
    }
    return DDP_OK;
}

/* Evaluation, discarded gradients, recomputation and units retained over the step change nothing. */
static ddp_result detours(ddp_group *group) {
    enum { COUNT = 4, STEPS = 4 };
    for (int turn = 0; turn < 8; turn++) {
        uint64_t want, have, aside;
        for (int with = 0; with < 2; with++) {
            model m;
            ddp_fsdp *fsdp;
            blocks(&m, COUNT, 5, 3);
            m.desc.strategy = (ddp_fsdp_strategy)(turn % 4);
            m.desc.no_reshard_after_forward = turn == 4;
            m.desc.micro_batch_count = 2;
            m.desc.prefetch = turn > 4 ? -1 : 1;
            RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
            for (int s = 0; s < STEPS; s++) {
                for (int k = 0; k < 2; k++) {
                    RANKS_OK(group, pass(group, fsdp, &m, (uint64_t)(s * 2 + k)));
                    if (!with) continue;
                    RANKS_OK(group, digest(group, fsdp, &m, &aside));
                    if (k == 1) continue;
                    RANKS_OK(group, ddp_fsdp_unshard(fsdp, s)); /* gradients that are discarded */
                    backward(&m, s, 77);
                    RANKS_OK(group, ddp_fsdp_unshard(fsdp, s));
                    RANKS_OK(group, ddp_fsdp_reshard(fsdp, s));
                    if (s == 2) { /* the step again */
                        RANKS_OK(group, pass(group, fsdp, &m, 55));
                        RANKS_OK(group, ddp_fsdp_unshard(fsdp, 1));
                        RANKS_OK(group, ddp_fsdp_zero_grad(fsdp));
                        RANKS_OK(group, pass(group, fsdp, &m, (uint64_t)(s * 2)));
                    }
                }
                if (with) RANKS_OK(group, ddp_fsdp_unshard(fsdp, s)); /* held over the step */
                RANKS_OK(group, ddp_fsdp_step(fsdp, 0.05f));
                if (with) RANKS_OK(group, digest(group, fsdp, &m, &aside));
            }
            RANKS_OK(group, digest(group, fsdp, &m, with ? &have : &want));
            ddp_fsdp_destroy(fsdp);
        }
        RANKS_CHECK(group, want == have, "turn %d", turn);
    }
    return DDP_OK;
}

/* One rank reads its gradients between two reductions: other ranks are unaffected. */
static ddp_result one_looks(ddp_group *group) {
    model m;
    ddp_fsdp *fsdp;
    ddp_tensor grad;
    int64_t first;
    blocks(&m, 4, 5, 3);
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    for (int s = 0; s < 3; s++) {
        for (int u = 3; u >= 0; u--) {
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
            backward(&m, u, 4);
            RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
            RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
            if (ddp_rank(group)) continue;
            RANKS_OK(group, ddp_fsdp_get_shard(fsdp, u, 0, NULL, &grad, &first));
            RANKS_CHECK(group, grad.data && first == 0 && load(grad.data, grad.dtype, 0) != 0,
                        "unit %d has no sums", u);
        }
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.1f));
    }
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* Ranks whose orders differ return an error before values change, and can start the step again. */
static ddp_result orders_differ(ddp_group *group) {
    uint64_t before, after;
    model m;
    ddp_fsdp *fsdp;
    ddp_group *far;
    if (ddp_world_size(group) == 1) return DDP_OK;
    blocks(&m, 3, 5, 3);
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    RANKS_OK(group, train(group, fsdp, &m, 1, 1));
    RANKS_OK(group, digest(group, fsdp, &m, &before));
    RANKS_OK(group, ddp_fsdp_unshard(fsdp, ddp_rank(group) == 0 ? 1 : 2));
    RANKS_OK(group, ddp_fsdp_reshard(fsdp, ddp_rank(group) == 0 ? 1 : 2));
    RANKS_OK(group, pass(group, fsdp, &m, 1));
    FAILS(group, ddp_fsdp_step(fsdp, 0.1f), DDP_ERR_MISMATCH, "different orders", "ddp_fsdp_step");
    RANKS_OK(group, ddp_fsdp_zero_grad(fsdp));
    RANKS_OK(group, digest(group, fsdp, &m, &after));
    RANKS_CHECK(group, before == after, "values moved");
    RANKS_OK(group, train(group, fsdp, &m, 1, 1));
    ddp_fsdp_destroy(fsdp);
    /* reductions of different units: the group fails then */
    for (int packed = 0; packed < 2; packed++) {
        ddp_group *part, *used;
        ddp_result result = DDP_OK;
        RANKS_OK(group, ddp_group_split(group, 0, ddp_rank(group), &part));
        used = part;
        if (packed) RANKS_OK(group, relay_over(&far, part));
        if (packed) used = far;
        blocks(&m, 3, 5, 3);
        RANKS_OK(group, ddp_fsdp_create(&fsdp, used, &m.desc));
        for (int k = 0; k < 3 && result == DDP_OK; k++) {
            int u = ddp_rank(group) == 0 ? k : 2 - k;
            result = ddp_fsdp_unshard(fsdp, u);
            if (result == DDP_OK) result = ddp_fsdp_reduce_grads(fsdp, u);
        }
        if (result == DDP_OK) result = ddp_fsdp_step(fsdp, 0.1f);
        RANKS_CHECK(group, result == DDP_ERR_MISMATCH || result == DDP_ERR_POISONED, "packed=%d: %s", packed,
                    ddp_result_name(result));
        RANKS_CHECK(group, packed || says("unit"), "no unit in: %s", ddp_last_error());
        ddp_fsdp_destroy(fsdp);
        if (packed) ddp_group_destroy(far);
        RANKS_OK(group, ddp_barrier(group));
        ddp_group_destroy(part);
    }
    return DDP_OK;
}

/* Only one rank gathers one more unit, or releases one later: from then on its slots become free in another
   order. The sums are still right. */
static ddp_result slots_differ(ddp_group *group) {
    for (int turn = 0; turn < 4; turn++) {
        uint64_t values[2];
        for (int with = 0; with < 2; with++) {
            int first = ddp_rank(group) == 0;
            model m;
            ddp_fsdp *fsdp;
            blocks(&m, 4, 5, 3);
            m.desc.strategy = turn & 1 ? DDP_FSDP_SHARD_GRAD : DDP_FSDP_FULL_SHARD;
            RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
            RANKS_OK(group, train(group, fsdp, &m, 1, 1));
            if (with && turn < 2 && first) RANKS_OK(group, ddp_fsdp_unshard(fsdp, 1));
            if (with && turn < 2 && first) RANKS_OK(group, ddp_fsdp_reshard(fsdp, 1));
            if (with && turn < 2 && ddp_world_size(group) > 1) {
                RANKS_OK(group, pass(group, fsdp, &m, 1));
                FAILS(group, ddp_fsdp_step(fsdp, 0.1f), DDP_ERR_MISMATCH, "different orders",
                      "ddp_fsdp_step");
                RANKS_OK(group, ddp_fsdp_zero_grad(fsdp));
            }
            for (int u = 0; u < 3 && with && turn >= 2; u++) { /* the others release one unit later */
                RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
                if (u && !first) RANKS_OK(group, ddp_fsdp_reshard(fsdp, u - 1));
                if (u == 2 || first) RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
            }
            RANKS_OK(group, train(group, fsdp, &m, 2, 5));
            RANKS_OK(group, digest(group, fsdp, &m, &values[with]));
            ddp_fsdp_destroy(fsdp);
        }
        RANKS_CHECK(group, values[0] == values[1], "turn %d", turn);
    }
    return DDP_OK;
}

/* Rank 0 passes its gradients in and gives up, after which it may free them. The ranks that reduce them
   return an error and no sums. */
static ddp_result one_gives_up(ddp_group *group) {
    model m;
    ddp_fsdp *fsdp;
    ddp_group *part;
    int first = ddp_rank(group) == 0;
    if (ddp_world_size(group) == 1) return DDP_OK;
    RANKS_OK(group, ddp_group_split(group, 0, ddp_rank(group), &part));
    blocks(&m, 2, 5, 3);
    m.desc.strategy = DDP_FSDP_SHARD_GRAD;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &m.desc));
    RANKS_OK(group, train(group, fsdp, &m, 1, 1));
    RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
    backward(&m, 0, 3);
    RANKS_OK(group, ddp_barrier(group));
    if (first) {
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, 0));
        RANKS_OK(group, ddp_group_abort(part));
    }
    RANKS_OK(group, ddp_barrier(group));
    if (!first) {
        ddp_tensor grad;
        ddp_result result = ddp_fsdp_reduce_grads(fsdp, 0);
        if (result == DDP_OK) result = ddp_fsdp_get_shard(fsdp, 0, 0, NULL, &grad, NULL);
        RANKS_CHECK(group, result == DDP_ERR_POISONED && says("rank 0") && says("ddp_group_abort"), "%s",
                    ddp_result_name(result));
    }
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(part);
    return DDP_OK;
}

/* Counts the gathers of 3 steps. A step has MICRO forward and backward passes over UNITS_HERE units and so
   needs each unit twice per pass. After the first step the order is known. Then a unit that is needed again
   at once is not gathered again: the last one of each forward, and the first one between two micro-batches.
   The last step also gathers `prefetch` units of the next one. */
static ddp_result gathers_counted(ddp_group *group) {
    enum { UNITS_HERE = 4, MICRO = 3, EVERY = 2 * UNITS_HERE * MICRO, TURNS = 2 * MICRO - 1 };
    static const struct {
        ddp_fsdp_strategy strategy;
        int keep, first, later;
    } turns[] = {
        {DDP_FSDP_FULL_SHARD, 0, EVERY, EVERY - TURNS},
        {DDP_FSDP_FULL_SHARD, 1, UNITS_HERE, UNITS_HERE},
        {DDP_FSDP_SHARD_GRAD, 0, UNITS_HERE, UNITS_HERE},
        {DDP_FSDP_SHARD_OPTIM, 0, UNITS_HERE, UNITS_HERE},
    };
    ddp_group *far;
    if (ddp_world_size(group) == 1) return DDP_OK;
    RANKS_OK(group, relay_over(&far, group));
    for (size_t t = 0; t < sizeof turns / sizeof turns[0]; t++) {
        for (int ahead = 0; ahead <= 2; ahead++) {
            int *gathers = &relay_gathers[ddp_rank(group)];
            int before = __atomic_load_n(gathers, __ATOMIC_RELAXED);
            int want = turns[t].first + 2 * turns[t].later + ahead;
            model m;
            ddp_fsdp *fsdp;
            blocks(&m, UNITS_HERE, 6, 2);
            m.desc.strategy = turns[t].strategy;
            m.desc.no_reshard_after_forward = turns[t].keep;
            m.desc.prefetch = ahead ? ahead : -1;
            m.desc.micro_batch_count = MICRO;
            RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
            RANKS_OK(group, train(group, fsdp, &m, 3, 5));
            ddp_fsdp_destroy(fsdp);
            int count = __atomic_load_n(gathers, __ATOMIC_RELAXED) - before;
            RANKS_CHECK(group, count == want, "turn %d, prefetch %d: %d gathers, want %d", (int)t, ahead,
                        count, want);
        }
    }
    ddp_group_destroy(far);
    return DDP_OK;
}

//== 16-bit gradients without sums ==========================================================

/* Three steps of one rank with 16-bit gradients. In step 1, touch 1 reads gradients and does not clip, touch
   2 clips twice. gradients: bytes of gradients, before and after the steps. */
static ddp_result train_half(ddp_group *alone, ddp_fsdp_strategy strategy, int turn, int touch,
                             size_t gradients[2], uint64_t *out) {
    model m;
    ddp_fsdp *fsdp;
    ddp_fsdp_memory memory;
    ddp_tensor grad;
    static const int clips[] = {1, 0, 2}; /* in step 1 */
    blocks(&m, 3, 7, 11);
    m.desc.strategy = strategy;
    m.desc.param_dtype = turn & 1 ? DDP_F16 : DDP_BF16;
    m.desc.optimizer.kind = turn & 2 ? DDP_OPTIMIZER_SGD : DDP_OPTIMIZER_ADAMW;
    m.desc.optimizer.momentum = turn & 2 ? 0.9f : 0;
    RANKS_OK(alone, ddp_fsdp_create(&fsdp, alone, &m.desc));
    RANKS_OK(alone, ddp_fsdp_get_memory(fsdp, &memory));
    gradients[0] = memory.now.gradients;
    for (int s = 0; s < 3; s++) {
        RANKS_OK(alone, pass(alone, fsdp, &m, (uint64_t)s));
        for (int clip = 0; clip < (s == 1 ? clips[touch] : 1); clip++)
            RANKS_OK(alone, ddp_fsdp_clip_grad_norm(fsdp, 0.7f - 0.3f * (float)clip, NULL));
        for (int u = 0; u < 3 && s == 1 && touch == 1; u++) {
            RANKS_OK(alone, ddp_fsdp_get_shard(fsdp, u, 0, NULL, &grad, NULL));
            RANKS_CHECK(alone, grad.dtype == DDP_F32 && ddp_tensor_count(&grad) == 77,
                        "grad of unit %d is %s", u, ddp_dtype_name(grad.dtype));
            *out = hash_bytes(*out, grad.data, 77 * sizeof(float));
        }
        RANKS_OK(alone, ddp_fsdp_step(fsdp, 0.05f));
    }
    RANKS_OK(alone, ddp_fsdp_get_memory(fsdp, &memory));
    gradients[1] = memory.now.gradients;
    uint64_t values;
    RANKS_OK(alone, digest(alone, fsdp, &m, &values));
    *out = hash_bytes(*out, &values, sizeof values);
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* One rank with one micro-batch has no f32 sums of 16-bit gradients until something changes or reads them.
   The bits are those of FULL_SHARD, which always has sums. */
static ddp_result half_gradients_are_sums(ddp_group *group) {
    ddp_group *alone;
    ddp_group_desc desc = DDP_ZERO;
    desc.init_method = "self://";
    RANKS_OK(group, ddp_group_create(&alone, &desc));
    for (int turn = 0; turn < 4; turn++)
        for (int touch = 0; touch < 3; touch++) {
            uint64_t want = 0, have;
            size_t gradients[2], half = 3 * 192; /* 77 elements of 2 bytes, rounded up to 64 */
            RANKS_OK(group, train_half(alone, DDP_FSDP_FULL_SHARD, turn, touch, gradients, &want));
            for (int strategy = DDP_FSDP_SHARD_OPTIM; strategy <= DDP_FSDP_NO_SHARD; strategy++) {
                have = 0;
                RANKS_OK(group,
                         train_half(alone, (ddp_fsdp_strategy)strategy, turn, touch, gradients, &have));
                RANKS_CHECK(group, have == want, "turn %d touch %d strategy %d has other bits", turn, touch,
                            strategy);
                RANKS_CHECK(group, gradients[0] >= half && gradients[0] < 2 * half,
                            "turn %d: %zu bytes of gradients, want about %zu", turn, gradients[0], half);
                RANKS_CHECK(group, touch ? gradients[1] > 2 * half : gradients[1] == gradients[0],
                            "turn %d touch %d: %zu bytes of gradients after the steps", turn, touch,
                            gradients[1]);
            }
        }
    ddp_group_destroy(alone);
    return DDP_OK;
}

//== memory =================================================================================

static ddp_result bytes_add_up(ddp_group *group) {
    int alone = ddp_world_size(group) == 1;
    for (int turn = 0; turn < 8; turn++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_fsdp_memory a, b;
        counter c = {0, 0, 0, 0};
        ddp_group *far = group;
        int allocs;
        blocks(&m, 5, 7, 11);
        m.desc.strategy = (ddp_fsdp_strategy)(turn % 4);
        m.desc.param_dtype = turn & 1 ? DDP_BF16 : DDP_DTYPE_DEFAULT;
        m.desc.micro_batch_count = turn > 3 ? 3 : 1;
        m.desc.prefetch = turn == 4 ? 2 : turn == 5 ? -1 : 0;
        m.desc.alloc_fn = counted;
        m.desc.free_fn = uncounted;
        m.desc.user = &c;
        if (turn & 2) RANKS_OK(group, relay_over(&far, group));
        RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &a));
        allocs = relay_allocs + c.calls;
        RANKS_OK(group, train(group, fsdp, &m, 3, 2));
        RANKS_CHECK(group, relay_allocs + c.calls == allocs, "turn %d: a step allocates", turn);
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &b));
        RANKS_CHECK(group, memcmp(&a, &b, sizeof a) == 0,
                    "turn %d: memory grows after the first step: %zu to %zu bytes", turn, a.peak.total,
                    b.peak.total);
        RANKS_CHECK(group, c.now + a.group_bytes == a.now.total,
                    "turn %d: alloc_fn has %zu + %zu, now.total is %zu", turn, c.now, a.group_bytes,
                    a.now.total);
        RANKS_CHECK(group, !alone || (!a.group_bytes && c.peak == a.peak.total),
                    "turn %d: alloc_fn had %zu, peak.total is %zu", turn, c.peak, a.peak.total);
        RANKS_CHECK(group,
                    a.now.total
                        == a.now.shards + a.now.gathered + a.now.gradients + a.now.optimizer
                               + a.now.communication + a.now.bookkeeping,
                    "turn %d", turn);
        ddp_fsdp_destroy(fsdp);
        RANKS_CHECK(group, c.now == 0, "turn %d: %zu bytes are left", turn, c.now);
        RANKS_OK(group, ddp_barrier(group));
        if (far != group) ddp_group_destroy(far);
    }
    return DDP_OK;
}

/* A unit that consists only of uses has no shard, and is still gathered without staging. */
static ddp_result only_uses(ddp_group *group) {
    model m;
    ddp_fsdp *fsdp;
    ddp_fsdp_memory memory;
    blocks(&m, 2, 6, 2);
    m.params[1].tied_to = "a";
    m.desc.no_reshard_after_forward = 1;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    RANKS_OK(group, train(group, fsdp, &m, 2, 1));
    RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
    RANKS_CHECK(group, memory.peak.communication == 0,
                "%zu bytes of staging where ranks read each other's memory", memory.peak.communication);
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* A group of one rank with an allocator that counts: memory comes from it if alloc_fn is NULL. */
static ddp_result hooks(ddp_group *group) {
    if (ddp_world_size(group) > 1) return DDP_OK;
    for (int kind = DDP_OPTIMIZER_ADAMW; kind <= DDP_OPTIMIZER_LARS; kind++) {
        model m;
        ddp_group_desc desc = DDP_ZERO;
        ddp_group *alone;
        ddp_fsdp *fsdp;
        ddp_fsdp_memory memory;
        counter c = {0, 0, 0, 0};
        size_t before;
        desc.init_method = "self://";
        desc.alloc_fn = counted;
        desc.free_fn = uncounted;
        desc.user = &c;
        RANKS_OK(group, ddp_group_create(&alone, &desc));
        before = c.now;
        blocks(&m, 3, 7, 11);
        m.desc.optimizer.kind = (ddp_optimizer_kind)kind;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, alone, &m.desc));
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
        RANKS_CHECK(group, c.now - before == memory.now.total,
                    "optimizer %d: alloc_fn has %zu, now.total is %zu", kind, c.now - before,
                    memory.now.total);
        ddp_fsdp_destroy(fsdp);
        RANKS_CHECK(group, c.now == before, "optimizer %d: %zu bytes are left", kind, c.now - before);
        ddp_group_destroy(alone);
    }
    return DDP_OK;
}

/* Four blocks of 512 x 512: bytes by the formulas. */
/* The table of the opening comment of ddp_fsdp.h: p parameters, u of them in a unit, 2^levels micro-batches,
   slots units ahead. */
static double bytes_formula(ddp_fsdp_strategy strategy, int half, double p, double u, double w, double levels,
                            double slots) {
    double whole = half ? 2 : 4, tile = half && w > 1 ? (w + 1) * 1024 * 4 : 0;
    double sums = levels * 4 * p; /* of whole gradients */
    if (half && levels > 0) sums += 4 * u;
    switch (strategy) {
    case DDP_FSDP_NO_SHARD: return (half && levels == 0 && w > 1 ? 20 : 16) * p + sums;
    case DDP_FSDP_SHARD_OPTIM:
        if (half && levels == 0) sums = w > 1 ? 4 * p / w + tile : 0;
        return 2 * whole * p + (half ? 12 : 8) * p / w + sums;
    case DDP_FSDP_SHARD_GRAD:
        return whole * p + ((half ? 16 : 12) + 4 * levels) * p / w + slots * whole * u + tile;
    default: return ((half ? 18 : 16) + 4 * levels) * p / w + 2 * slots * whole * u + tile;
    }
}

static ddp_result bytes_predicted(ddp_group *group) {
    for (int turn = 0; turn < 96; turn++) {
        model m;
        ddp_fsdp_bytes bytes;
        int half = turn % 24 >= 8, levels = turn % 24 >= 16 ? 2 : 0, ahead = !(turn & 1),
            ranks = 1 << turn / 24;
        blocks(&m, 4, 512, 512);
        m.desc.strategy = (ddp_fsdp_strategy)(turn % 8 / 2);
        m.desc.prefetch = ahead ? 1 : -1;
        m.desc.micro_batch_count = 1 << levels;
        if (half) m.desc.param_dtype = DDP_BF16;
        RANKS_OK(group, ddp_fsdp_predict(&m.desc, ranks, &bytes));
        double predicted = (double)(bytes.total - bytes.bookkeeping);
        double formula = bytes_formula(m.desc.strategy, half, 4.0 * 512 * 512, 512 * 512, ranks, levels,
                                       ahead ? 2 : 1);
        RANKS_CHECK(group, fabs(predicted - formula) < 0.001 * formula,
                    "turn %d: predicted %.0f, the formula gives %.0f", turn, predicted, formula);
    }
    return DDP_OK;
}

/* Predicts without a group or values, then makes a step and compares each purpose of the peak. */
static ddp_result predict_and_train(ddp_group *group, ddp_group *shards, model *m, const char *name) {
    ddp_fsdp *fsdp;
    ddp_fsdp_memory memory;
    ddp_fsdp_desc unseen = m->desc;
    ddp_fsdp_bytes bytes;
    unseen.replicas = NULL;
    unseen.init_fn = NULL;
    RANKS_OK(group, ddp_fsdp_predict(&unseen, ddp_world_size(shards), &bytes));
    RANKS_OK(group, ddp_fsdp_create(&fsdp, shards, &m->desc));
    RANKS_OK(group, train(group, fsdp, m, 1, 3));
    RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
    for (size_t i = 0; i < sizeof bytes / sizeof(size_t); i++) {
        double have = (double)((const size_t *)(const void *)&memory.peak)[i];
        double want = (double)((const size_t *)(const void *)&bytes)[i];
        /* ranks after the first may have fewer rows */
        if (ddp_rank(shards) > 0 && have <= want) continue;
        RANKS_CHECK(group, fabs(have - want) <= 0.02 * have, "%s: field %d: peak %.0f, predicted %.0f", name,
                    (int)i, have, want);
    }
    RANKS_CHECK(group, memory.predicted.total == bytes.total - bytes.bookkeeping || ddp_rank(shards) > 0,
                "%s: get_memory predicts %zu, ddp_fsdp_predict %zu", name, memory.predicted.total,
                bytes.total - bytes.bookkeeping);
    ddp_fsdp_destroy(fsdp);
    return ddp_barrier(group);
}

/* Units of different sizes, one of them frozen; rows that do not divide evenly; a tied parameter. */
static void uneven_units(model *m) {
    memset(m, 0, sizeof *m);
    add(m, "a", "a.w", DDP_F32, 50, 12);
    add(m, NULL, "a.b", DDP_F32, 50, 0);
    add(m, "b", "b.w", DDP_F32, 33, 20)->frozen = 1;
    add(m, NULL, "b.v", DDP_F64, 7, 30);
    add(m, "c", "c.w", DDP_F32, 64, 8)->param.grad.dtype = DDP_F32;
    add(m, "d", "d.w", DDP_F32, 50, 12)->tied_to = "a.w";
    add(m, "e", "e.w", DDP_F32, 3, 70)->frozen = 1;
}

static const struct option {
    const char *name;
    int micro_batches, sequential, prefetch, optimizer, keep, quantize, file, hybrid;
    float momentum;
    ddp_dtype reduce_dtype;
} options[] = {
    {"plain", 1, 0, 0, 0, 0, 0, 0, 0, 0, DDP_DTYPE_DEFAULT},
    {"3 micro-batches", 3, 0, 0, 0, 0, 0, 0, 0, 0, DDP_DTYPE_DEFAULT},
    {"64 micro-batches", 64, 0, 0, 0, 0, 0, 0, 0, 0,
     DDP_DTYPE_DEFAULT}, /* the recorded order outgrows memory */
    {"4, sequential", 4, 1, 0, 0, 0, 0, 0, 0, 0, DDP_DTYPE_DEFAULT},
    {"prefetch", 4, 0, 8, 0, 0, 0, 0, 0, 0, DDP_DTYPE_DEFAULT},
    {"no prefetch, LAMB", 1, 0, -1, DDP_OPTIMIZER_LAMB, 0, 0, 0, 0, 0, DDP_DTYPE_DEFAULT},
    {"SGD", 1, 0, 0, DDP_OPTIMIZER_SGD, 0, 0, 0, 0, 0, DDP_DTYPE_DEFAULT},
    {"momentum, rounded sums", 2, 0, 0, DDP_OPTIMIZER_SGD, 0, 0, 0, 0, 0.9f, DDP_BF16},
    {"LARS, kept values", 1, 0, 8, DDP_OPTIMIZER_LARS, 1, 0, 0, 0, 0, DDP_DTYPE_DEFAULT},
    {"offload to a file", 1, 0, 0, 0, 0, 0, 1, 0, 0, DDP_DTYPE_DEFAULT},
    {"hybrid", 1, 0, 0, 0, 0, 0, 0, 1, 0, DDP_DTYPE_DEFAULT},
    {"hybrid, rounded sums", 3, 0, 0, 0, 0, 0, 0, 1, 0, DDP_BF16},
    {"8-bit gathers", 1, 0, 0, 0, 0, 1, 0, 0, 0, DDP_DTYPE_DEFAULT}, /* only FULL_SHARD */
};
enum { OPTION_COUNT = sizeof options / sizeof options[0] };

static void set_options(model *m, int option, int dtype) {
    const struct option *o = &options[option];
    ddp_fsdp_desc *d = &m->desc;
    static const ddp_dtype dtypes[] = {DDP_DTYPE_DEFAULT, DDP_BF16, DDP_F16};
    d->param_dtype = dtypes[dtype];
    d->reduce_dtype = o->reduce_dtype;
    d->micro_batch_count = o->micro_batches;
    d->sequential_accumulation = o->sequential;
    d->prefetch = o->prefetch;
    d->optimizer.kind = (ddp_optimizer_kind)o->optimizer;
    d->optimizer.momentum = o->momentum;
    d->optimizer.decay_matrices_only = 1;
    d->no_reshard_after_forward = o->keep;
    d->quantize_gather = o->quantize;
    d->offload = o->file ? DDP_FSDP_OFFLOAD_FILE : DDP_FSDP_OFFLOAD_NONE;
    d->offload_dir = "/tmp";
}

/* Every strategy with every option that changes memory. Transport and dtype change from run to run. */
static ddp_result peaks_predicted(ddp_group *group) {
    int rank = ddp_rank(group), half = ddp_world_size(group) == 4 ? 2 : 1, turn = 0;
    ddp_group *parts[2], *far[2], *replicas; /* all ranks; those of a hybrid */
    static const char *const buffer_names[] = {"mean", "var"};
    float numbers[600] = {0};
    const ddp_tensor buffers[2] = {{numbers, DDP_F32, 1, {300}}, {numbers + 300, DDP_F32, 1, {300}}};
    ddp_fsdp_state state = DDP_ZERO;
    if (ddp_world_size(group) == 2) return DDP_OK; /* a hybrid of 4 ranks has groups of 2 */
    RANKS_OK(group, ddp_group_split(group, 0, rank, &parts[0]));
    RANKS_OK(group, ddp_group_split(group, rank / half, rank, &parts[1]));
    RANKS_OK(group, ddp_group_split(group, rank % half, rank, &replicas));
    for (int i = 0; i < 2; i++) RANKS_OK(group, relay_over(&far[i], parts[i]));
    for (int option = 0; option < OPTION_COUNT; option++)
        for (int strategy = 0; strategy <= DDP_FSDP_NO_SHARD; strategy++, turn++) {
            model m;
            char name[128];
            int hybrid = options[option].hybrid, relayed = turn / 4 % 2, dtype = turn % 3;
            if (options[option].quantize && strategy != DDP_FSDP_FULL_SHARD) continue;
            uneven_units(&m);
            set_options(&m, option, dtype);
            m.desc.state = turn & 1 ? &state : NULL;
            m.desc.buffers = buffers;
            m.desc.buffer_names = buffer_names;
            m.desc.buffer_count = turn / 2 % 3;
            if (!m.desc.buffer_count) m.desc.buffers = NULL;
            m.desc.strategy = (ddp_fsdp_strategy)strategy;
            m.desc.ranks.no_peer_memory = relayed;
            m.desc.ranks.replica_count = hybrid ? ddp_world_size(replicas) : 0;
            m.desc.replicas = hybrid ? replicas : NULL;
            snprintf(name, sizeof name, "strategy %d, %s, dtype %d, relayed %d", strategy,
                     options[option].name, dtype, relayed);
            RANKS_OK(group, predict_and_train(group, relayed ? far[hybrid] : parts[hybrid], &m, name));
        }
    for (int i = 0; i < 2; i++) ddp_group_destroy(far[i]);
    for (int i = 0; i < 2; i++) ddp_group_destroy(parts[i]);
    ddp_group_destroy(replicas);
    return DDP_OK;
}

static void *no_alloc(size_t size_bytes, void *user) {
    (void)size_bytes;
    (void)user;
    return NULL;
}

/* Bad arguments of ddp_fsdp_predict. Its tables come from alloc_fn, are small, and are freed. */
static ddp_result predictions_refused(ddp_group *group) {
    model m;
    counter c = {0, 0, 0, 0};
    ddp_fsdp_bytes bytes;
    blocks(&m, 3, 100000, 10000);
    FAILS(group, ddp_fsdp_predict(NULL, 2, &bytes), DDP_ERR_INVALID, "ddp_fsdp_predict", "desc or bytes");
    FAILS(group, ddp_fsdp_predict(&m.desc, 2, NULL), DDP_ERR_INVALID, "ddp_fsdp_predict", "desc or bytes");
    FAILS(group, ddp_fsdp_predict(&m.desc, 0, &bytes), DDP_ERR_INVALID, "ddp_fsdp_predict", "world_size=0");
    m.desc.ranks.replica_count = -2;
    FAILS(group, ddp_fsdp_predict(&m.desc, 2, &bytes), DDP_ERR_INVALID, "ddp_fsdp_predict",
          "ranks.replica_count=-2");
    m.desc.ranks.replica_count = 1 << 12; /* a product of 2^32 once became a table of 0 ranks */
    FAILS(group, ddp_fsdp_predict(&m.desc, 1 << 20, &bytes), DDP_ERR_INVALID, "ddp_fsdp_predict",
          "world_size=1048576", "ranks.replica_count=4096", "too large");
    m.desc.ranks.replica_count = 0;
    m.desc.ranks.gpu = 1;
    m.desc.quantize_gather = 1;
    FAILS(group, ddp_fsdp_predict(&m.desc, 2, &bytes), DDP_ERR_UNSUPPORTED, "ddp_fsdp_predict",
          "quantize_gather needs CPU memory", "cuda");
    m.desc.quantize_gather = 0;
    m.desc.alloc_fn = no_alloc;
    m.desc.free_fn = uncounted;
    FAILS(group, ddp_fsdp_predict(&m.desc, 2, &bytes), DDP_ERR_NO_MEMORY, "ddp_fsdp_predict",
          "could not be allocated");
    m.desc.alloc_fn = counted;
    m.desc.user = &c;
    RANKS_OK(group, ddp_fsdp_predict(&m.desc, 2, &bytes));
    RANKS_CHECK(group, c.now == 0 && c.peak < 64 << 10 && bytes.total > (size_t)24 << 30,
                "%zu bytes are left of %zu, predicted %zu", c.now, c.peak, bytes.total);
    return DDP_OK;
}

/* prefetch of more units than exist uses, and predicts, gradient memory of all units and no more. */
static ddp_result bytes_of_few_units(ddp_group *group) {
    enum { UNITS_HERE = 2, ROWS = 120, COLUMNS = 200, UNIT_BYTES = 4 * ROWS * COLUMNS };
    model m;
    ddp_fsdp *fsdp;
    ddp_fsdp_memory memory;
    double whole = UNITS_HERE * UNIT_BYTES;
    double want = whole + whole / ddp_world_size(group); /* gradients, and their sums */
    blocks(&m, UNITS_HERE, ROWS, COLUMNS);
    m.desc.prefetch = 7;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    RANKS_OK(group, train(group, fsdp, &m, 2, 1));
    RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
    double peak = (double)memory.peak.gradients, predicted = (double)memory.predicted.gradients;
    RANKS_CHECK(group, fabs(predicted - want) < 0.01 * want, "predicted %.0f bytes of gradients, want %.0f",
                predicted, want);
    RANKS_CHECK(group, peak < 1.01 * want, "peak %.0f bytes of gradients, want %.0f", peak, want);
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* Units are prefetched up to the limit, and no memory is allocated for more. */
static ddp_result bytes_limited(ddp_group *group) {
    for (int slots = 1; slots <= 5; slots++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_fsdp_memory memory;
        uint64_t ignored;
        blocks(&m, 6, 16, 16);
        m.desc.prefetch = 4;
        m.desc.max_gathered_bytes = (size_t)slots * 16 * 16 * 4;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 3, 1));
        RANKS_OK(group, digest(group, fsdp, &m, &ignored));
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
        RANKS_CHECK(group, memory.peak.gathered <= (size_t)slots * (16 * 16 * 4 + DDP_MALLOC_EXTRA),
                    "%d units allowed: %zu bytes", slots, memory.peak.gathered);
        RANKS_CHECK(group, memory.peak.gathered >= (size_t)slots * 16 * 16 * 4,
                    "%d units allowed: only %zu bytes", slots, memory.peak.gathered);
        ddp_fsdp_destroy(fsdp);
    }
    return DDP_OK;
}

/* Memory runs out at one rank, at every possible place: an error on every rank in time, nothing leaks. In
   create and step it is the same error on every rank, and the group stays usable. once: only one allocation
   fails, and the later ones have memory. */
static ddp_result out_of_memory(ddp_group *group, int once) {
    int done = 0;
    for (int at = 1; !done; at++) {
        model m;
        ddp_fsdp *fsdp = NULL;
        ddp_group *part;
        counter c = {0, 0, 0, 0};
        ddp_result result;
        int32_t fine, same[2], calls = 0; /* calls: made by every rank before the step */
        RANKS_CHECK(group, at < 200, "it never succeeds");
        RANKS_OK(group, ddp_group_split(group, 0, ddp_rank(group), &part));
        blocks(&m, 3, 5, 3);
        int is_poor = ddp_rank(group) == ddp_world_size(group) - 1;
        if (is_poor) c.refuse_after = once ? -at : at;
        static const char *const names[2] = {"norm.mean", "norm.var"};
        float mean[2] = {0}, var[3] = {0};
        const ddp_tensor tensors[2] = {{mean, DDP_F32, 1, {2}}, {var, DDP_F32, 1, {3}}};
        ddp_fsdp_state state = DDP_ZERO;
        m.desc.buffers = tensors;
        m.desc.buffer_names = names;
        m.desc.buffer_count = 2;
        m.desc.state = &state;
        m.desc.alloc_fn = counted;
        m.desc.free_fn = uncounted;
        m.desc.user = &c;
        result = ddp_fsdp_create(&fsdp, part, &m.desc);
        for (int u = 0; u < 6 && result == DDP_OK; u++) {
            int unit = u < 3 ? u : 5 - u;
            result = ddp_fsdp_unshard(fsdp, unit);
            if (result == DDP_OK && u >= 3) result = ddp_fsdp_reduce_grads(fsdp, unit);
            if (result == DDP_OK && u < 3) result = ddp_fsdp_reshard(fsdp, unit);
            calls += result == DDP_OK;
        }
        RANKS_OK(group, ddp_all_reduce(group, &calls, &calls, 1, DDP_I32, DDP_OP_MIN, NULL));
        if (result == DDP_OK) result = ddp_fsdp_step(fsdp, 0.1f);
        if (!fsdp || calls == 6) {
            same[0] = (int32_t)result;
            same[1] = -same[0];
            RANKS_OK(group, ddp_all_reduce(group, same, same, 2, DDP_I32, DDP_OP_MIN, NULL));
            RANKS_CHECK(group, same[0] == -same[1], "%d: %s here, another result elsewhere", at,
                        ddp_result_name(result));
            RANKS_OK(group, ddp_group_status(part));
        }
        fine = result == DDP_OK;
        RANKS_CHECK(group,
                    fine || result == DDP_ERR_NO_MEMORY || result == DDP_ERR_PEER_LOST
                        || result == DDP_ERR_POISONED,
                    "%d: %s: %s", at, ddp_result_name(result), ddp_last_error());
        RANKS_CHECK(group, fine || !is_poor || says("memory") || says("allocated"), "%d: %s", at,
                    ddp_last_error());
        RANKS_CHECK(group, !fine || !is_poor || c.refuse_after, "%d: the failed allocation is no error", at);
        /* No rank is still waiting in part. */
        RANKS_OK(group, ddp_all_reduce(group, &fine, &fine, 1, DDP_I32, DDP_OP_MIN, NULL));
        ddp_fsdp_destroy(fsdp);
        ddp_group_destroy(part);
        RANKS_CHECK(group, c.now == 0, "%d: %zu bytes are left", at, c.now);
        done = fine;
    }
    return DDP_OK;
}

static ddp_result no_memory_somewhere(ddp_group *group) { return out_of_memory(group, 0); }
static ddp_result no_memory_once(ddp_group *group) { return out_of_memory(group, 1); }

//== 8-bit gathers ==========================================================================

enum { QROWS = 41, QCOLUMNS = 37 };

static double q_value(int64_t i) {
    static const double special[] = {0, NAN, INFINITY, -FLT_MAX, 1e-30};
    int64_t block = i / 509;
    double x = noise((uint64_t)i) * pow(10, (double)(i / 100 % 9) - 4);
    if (block == 0) return 0;
    if (block == 1) return noise((uint64_t)i) * 3e-41;
    if (block == 2 && i % 509 > 200) return i % 509 == 300 ? special[1 + i % 2] : x;
    return i % 700 == 699 ? special[3 + i % 2] : x;
}

static ddp_result q_fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                         void *user) {
    (void)param;
    (void)user;
    for (int64_t i = 0; i < row_count * QCOLUMNS; i++)
        ((float *)out)[i] = (float)q_value(first_row * QCOLUMNS + i);
    return DDP_OK;
}

static ddp_result quantized(ddp_group *group) {
    int64_t total = QROWS * QCOLUMNS,
            part = (QROWS + ddp_world_size(group) - 1) / ddp_world_size(group) * QCOLUMNS;
    for (int packed = 0; packed < 2; packed++) {
        ddp_group *far = group;
        model m;
        ddp_fsdp *fsdp;
        uint64_t low[2];
        ddp_tensor rows;
        int64_t first;
        memset(&m, 0, sizeof m);
        add(&m, "q", "q", DDP_F32, QROWS, QCOLUMNS);
        m.desc.init_fn = q_fill;
        m.desc.quantize_gather = 1;
        if (packed) RANKS_OK(group, relay_over(&far, group));
        RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
        for (int64_t from = 0, end; from < total; from = end) { /* a block: 256 of one rank's rows */
            double most = 0;
            int bad = 0;
            end = from + 256 < (from / part + 1) * part ? from + 256 : (from / part + 1) * part;
            if (end > total) end = total;
            for (int64_t i = from; i < end; i++) {
                float want = (float)q_value(i);
                bad |= !isfinite(want);
                if (fabsf(want) > most) most = fabsf(want);
            }
            for (int64_t i = from; i < end; i++) {
                float want = (float)q_value(i), have = ((float *)m.params[0].param.value.data)[i];
                if (bad)
                    RANKS_CHECK(group, isnan(have), "[%d] is %g next to a value that is not finite", (int)i,
                                (double)have);
                else
                    RANKS_CHECK(group, fabs((double)have - (double)want) <= most / 254 * (1 + 1e-4),
                                "[%d] is %g, not %g; block of %g", (int)i, (double)have, (double)want, most);
                if (!bad && most == 0) RANKS_CHECK(group, have == 0, "[%d] is %g", (int)i, (double)have);
            }
        }
        low[0] = unit_hash(1, &m, 0);
        low[1] = ~low[0];
        RANKS_OK(group, ddp_all_reduce(group, low, low, 2, DDP_U64, DDP_OP_MIN, NULL));
        RANKS_CHECK(group, low[0] == ~low[1], "ranks have other bits");
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, 0));
        RANKS_OK(group, ddp_fsdp_get_shard(fsdp, 0, 0, &rows, NULL, &first));
        for (int64_t i = 0; i < ddp_tensor_count(&rows); i++) {
            float want = (float)q_value(first * QCOLUMNS + i);
            RANKS_CHECK(group, memcmp((float *)rows.data + i, &want, sizeof want) == 0 || isnan(want),
                        "the master copy is not exact");
        }
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(group, ddp_barrier(group));
        if (far != group) ddp_group_destroy(far);
    }
    return DDP_OK;
}

/* y = W x learns a matrix from noise that differs by rank, with parameters gathered in 8 bits. */
static ddp_result quantized_learns(ddp_group *group) {
    enum { N = 24 };
    model m;
    ddp_fsdp *fsdp;
    double loss = 0, first = 0;
    blocks(&m, 1, N, N);
    m.desc.quantize_gather = 1;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    for (uint64_t step = 0; step < 300; step++) {
        float *w, *g;
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
        w = (float *)m.params[0].param.value.data;
        g = (float *)m.params[0].param.grad.data;
        loss = 0;
        for (int i = 0; i < N; i++) {
            double x[N], error = 0;
            for (int j = 0; j < N; j++)
                error += ((double)w[i * N + j] - cos(i * 3 + j))
                         * (x[j] = noise(step * 999 + (uint64_t)(ddp_rank(group) * 31 + j)));
            for (int j = 0; j < N; j++) g[i * N + j] = (float)(error * x[j]);
            loss += error * error;
        }
        if (step == 0) first = loss;
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, 0));
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.04f));
    }
    RANKS_CHECK(group, loss < first / 50, "loss %g, first %g", loss, first);
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

//== scaler, offload, neighbours ============================================================

/* A gradient that is not finite makes the norm infinite: clipping changes no gradient. */
static ddp_result infinite_norm(ddp_group *group) {
    for (int strategy = DDP_FSDP_FULL_SHARD; strategy <= DDP_FSDP_NO_SHARD; strategy++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_tensor grad;
        float norm = 0;
        int64_t first;
        memset(&m, 0, sizeof m);
        add(&m, "u", "w", DDP_F32, 9, 3);
        m.desc.init_fn = fill;
        m.desc.strategy = (ddp_fsdp_strategy)strategy;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
        for (int i = 0; i < 27; i++)
            ((float *)m.params[0].param.grad.data)[i] = i == 13 ? INFINITY : (float)i;
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, 0));
        RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 1, &norm));
        RANKS_CHECK(group, isinf(norm), "strategy %d: the norm is %g", strategy, (double)norm);
        RANKS_OK(group, ddp_fsdp_get_shard(fsdp, 0, 0, NULL, &grad, &first));
        for (int64_t i = 0; grad.data && i < ddp_tensor_count(&grad); i++) {
            float want = first * 3 + i == 13 ? INFINITY : (float)(first * 3 + i),
                  have = ((const float *)grad.data)[i];
            RANKS_CHECK(group, have == want, "strategy %d: gradient %d is %g", strategy, (int)(first * 3 + i),
                        (double)have);
        }
        ddp_fsdp_destroy(fsdp);
    }
    return DDP_OK;
}

/* An infinity on one rank skips the step on all; the scaler can change to other groups. */
static ddp_result scaled(ddp_group *group) {
    ddp_scaler scaler;
    ddp_scaler_desc desc = DDP_ZERO;
    desc.init_scale = 1024;
    RANKS_OK(group, ddp_scaler_init(&scaler, &desc));
    for (int turn = 0; turn < 6; turn++) {
        uint64_t before, after;
        model m;
        ddp_fsdp *fsdp;
        ddp_group *part;
        ddp_fsdp_state state = DDP_ZERO;
        float norm;
        RANKS_OK(group, ddp_group_split(group, 0, ddp_rank(group), &part));
        blocks(&m, 3, 5, 3);
        m.desc.strategy = (ddp_fsdp_strategy)(turn % 4);
        m.desc.param_dtype = DDP_F16;
        m.desc.scaler = &scaler;
        m.desc.state = &state;
        m.desc.micro_batch_count = turn > 3 ? 2 : 0;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        RANKS_OK(group, ddp_scaler_update(&scaler));
        RANKS_OK(group, digest(group, fsdp, &m, &before));
        scaler.scale = 1024;
        for (int k = 0; k < 1 + (turn > 3); k++) {
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, 1));
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, 2));
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
            backward(&m, 1, 3);
            if (ddp_rank(group) == ddp_world_size(group) - 1)
                store(m.params[1].param.grad.data, m.params[1].param.grad.dtype, 14, INFINITY);
            for (int u = 0; u < 3; u++) RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
        }
        if (turn & 1) RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 1, &norm));
        if (turn & 1) RANKS_CHECK(group, !isfinite(norm), "norm %g", (double)norm);
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.1f));
        RANKS_CHECK(group, ddp_scaler_found_inf(&scaler), "turn %d: not detected", turn);
        RANKS_OK(group, ddp_scaler_update(&scaler));
        RANKS_CHECK(group, scaler.scale == 512, "scale %g", (double)scaler.scale);
        RANKS_OK(group, digest(group, fsdp, &m, &after));
        RANKS_CHECK(group, before == after && state.step == 1, "turn %d: the step was not left out", turn);
        RANKS_OK(group, train(group, fsdp, &m, 1, 2));
        RANKS_OK(group, digest(group, fsdp, &m, &after));
        RANKS_CHECK(group, before != after && state.step == 2, "turn %d: no step any more", turn);
        /* without the update the next step fails, twice, and changes nothing */
        for (int k = 0; k < 1 + (turn > 3); k++) RANKS_OK(group, pass(group, fsdp, &m, 6));
        before = after;
        for (int k = 0; k < 2; k++)
            FAILS(group, ddp_fsdp_step(fsdp, 0.1f), DDP_ERR_INVALID, "ddp_scaler_update");
        RANKS_OK(group, ddp_scaler_update(&scaler));
        /* with a scale of 0 no step would ever change a value */
        scaler.scale = 0;
        FAILS(group, ddp_fsdp_step(fsdp, 0.1f), DDP_ERR_INVALID, "scale of desc.scaler is 0");
        scaler.scale = 512;
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.1f));
        RANKS_OK(group, ddp_scaler_update(&scaler));
        RANKS_OK(group, digest(group, fsdp, &m, &after));
        RANKS_CHECK(group, before != after && state.step == 3, "turn %d: no step after the update", turn);
        /* gradients unscaled by clipping are discarded: the next step needs no update before it */
        for (int k = 0; k < 1 + (turn > 3); k++) RANKS_OK(group, pass(group, fsdp, &m, 7));
        RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 1, &norm));
        RANKS_OK(group, ddp_fsdp_zero_grad(fsdp));
        RANKS_OK(group, train(group, fsdp, &m, 1, 8));
        RANKS_OK(group, ddp_scaler_update(&scaler));
        ddp_fsdp_destroy(fsdp);
        RANKS_CHECK(group, scaler.desc.group_count == 0,
                    "the scaler still has %d groups that can be destroyed", scaler.desc.group_count);
        RANKS_OK(group, ddp_barrier(group));
        ddp_group_destroy(part);
    }
    return DDP_OK;
}

/* Offload on the CPU: to a file, or without effect. */
static ddp_result offloaded(ddp_group *group) {
    uint64_t want = 0, have;
    size_t total = 0;
    for (int turn = 0; turn < 9; turn++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_fsdp_memory memory;
        blocks(&m, 3, 50, 30);
        m.desc.strategy = turn < 3 || turn > 6 ? DDP_FSDP_FULL_SHARD : (ddp_fsdp_strategy)(turn - 3);
        /* No rank still allocates for the previous turn. */
        if (turn == 7) RANKS_OK(group, ddp_barrier(group));
        __atomic_store_n(&no_fallocate, turn == 7, __ATOMIC_RELEASE);
        m.desc.offload = turn < 3 ? (ddp_fsdp_offload)turn : DDP_FSDP_OFFLOAD_FILE;
        if (turn == 8) m.desc.offload = DDP_FSDP_OFFLOAD_PARAMS;
        m.desc.offload_dir = "/tmp";
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 2, 1));
        RANKS_OK(group, digest(group, fsdp, &m, &have));
        if (!turn) want = have;
        RANKS_CHECK(group, want == have, "turn %d has other bits", turn);
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
        RANKS_CHECK(group, (m.desc.offload == DDP_FSDP_OFFLOAD_FILE) == (memory.file_bytes > 0),
                    "turn %d: %zu bytes of file", turn, memory.file_bytes);
        if (m.desc.offload == DDP_FSDP_OFFLOAD_FILE)
            RANKS_CHECK(group, memory.now.optimizer == 0, "turn %d: moments in memory", turn);
        if (turn == 0) total = memory.now.total;
        RANKS_CHECK(group, turn != 8 || memory.now.total == total, "%zu bytes, %zu without offload",
                    memory.now.total, total);
        ddp_fsdp_destroy(fsdp);
    }
    RANKS_OK(group, ddp_barrier(group));
    __atomic_store_n(&no_fallocate, 0, __ATOMIC_RELEASE);
    return DDP_OK;
}

static ddp_result offload_fails(ddp_group *group) {
    model m;
    ddp_fsdp *fsdp;
    ddp_group *part;
    ddp_result result;
    RANKS_OK(group, ddp_group_split(group, 0, ddp_rank(group), &part));
    blocks(&m, 3, 5, 3);
    m.desc.offload = DDP_FSDP_OFFLOAD_FILE;
    m.desc.offload_dir = "/nowhere/at/all";
    result = ddp_fsdp_create(&fsdp, part, &m.desc);
    RANKS_CHECK(group, result == DDP_ERR_SYSTEM && says("/nowhere/at/all") && !fsdp, "%s: %s",
                ddp_result_name(result), ddp_last_error());
    ddp_group_destroy(part);
    return DDP_OK;
}

/* Two objects on one group, with interleaved steps, give the same results as each by itself. */
static ddp_result two_objects(ddp_group *group) {
    uint64_t want[2], have;
    model m[2];
    ddp_fsdp *fsdp[2];
    for (int together = 0; together < 2; together++) {
        for (int i = 0; i < 2; i++) {
            blocks(&m[i], 3 + i, 5 + i, 3);
            m[i].desc.strategy = i ? DDP_FSDP_SHARD_OPTIM : DDP_FSDP_FULL_SHARD;
        }
        for (int i = 0; i < 2 && together; i++) RANKS_OK(group, ddp_fsdp_create(&fsdp[i], group, &m[i].desc));
        for (int s = 0; s < 3 && together; s++) {
            for (int u = 0; u < 3; u++) {
                for (int i = 0; i < 2; i++) {
                    RANKS_OK(group, ddp_fsdp_unshard(fsdp[i], u));
                    backward(&m[i], u, ranks_mix((uint64_t)(s * 64 + ddp_rank(group))));
                    RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp[i], u));
                }
                for (int i = 0; i < 2; i++) RANKS_OK(group, ddp_fsdp_reshard(fsdp[i], u));
            }
            RANKS_OK(group, ddp_fsdp_unshard(fsdp[1], 3));
            RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp[1], 3));
            for (int i = 0; i < 2; i++) RANKS_OK(group, ddp_fsdp_step(fsdp[i], 0.1f));
        }
        for (int i = 0; i < 2; i++) {
            if (!together) RANKS_OK(group, ddp_fsdp_create(&fsdp[i], group, &m[i].desc));
            for (int s = 0; s < 3 && !together; s++) {
                for (int u = 0; u < 3 + i; u++) {
                    RANKS_OK(group, ddp_fsdp_unshard(fsdp[i], u));
                    if (u < 3) backward(&m[i], u, ranks_mix((uint64_t)(s * 64 + ddp_rank(group))));
                    RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp[i], u));
                    RANKS_OK(group, ddp_fsdp_reshard(fsdp[i], u));
                }
                RANKS_OK(group, ddp_fsdp_step(fsdp[i], 0.1f));
            }
            RANKS_OK(group, digest(group, fsdp[i], &m[i], together ? &have : &want[i]));
            if (together) RANKS_CHECK(group, have == want[i], "object %d has other bits", i);
            if (!together) ddp_fsdp_destroy(fsdp[i]);
        }
    }
    ddp_fsdp_destroy(fsdp[1]);
    ddp_fsdp_destroy(fsdp[0]);
    return DDP_OK;
}

/* Replicas that received other arguments than their peers return an error; so do all ranks. */
static ddp_result replicas_differ(ddp_group *group) {
    ddp_group *part, *copies;
    model m;
    ddp_fsdp *fsdp;
    ddp_result result;
    int rank = ddp_rank(group);
    if (ddp_world_size(group) != 4) return DDP_OK;
    RANKS_OK(group, ddp_group_split(group, rank / 2, rank, &part));
    RANKS_OK(group, ddp_group_split(group, rank % 2, rank, &copies));
    for (int turn = 0; turn < 5; turn++) {
        blocks(&m, 3, 6, 2);
        /* Rank 3 waits for it, the others return its error. */
        m.desc.replicas = turn == 4 && rank == 1 ? NULL : copies;
        if (turn == 0 && rank >= 2) m.params[1].param.value.shape[0] = 8; /* a whole group of shards */
        if (turn == 1 && rank == 2) m.params[1].param.value.shape[0] = 8; /* one rank */
        if (turn == 2 && rank == 2) m.desc.micro_batch_count = -1;
        result = ddp_fsdp_create(&fsdp, part, &m.desc);
        if (turn < 2)
            RANKS_CHECK(group, result == DDP_ERR_MISMATCH && says("unit b"), "turn %d: %s: %s", turn,
                        ddp_result_name(result), ddp_last_error());
        if (turn == 2)
            RANKS_CHECK(group, result == DDP_ERR_INVALID && says("micro_batch_count=-1"), "%s: %s",
                        ddp_result_name(result), ddp_last_error());
        if (turn == 3) RANKS_OK(group, result);
        if (turn == 3) RANKS_OK(group, train(group, fsdp, &m, 2, 1));
        if (turn == 3) ddp_fsdp_destroy(fsdp);
        if (turn == 4 && rank == 1) RANKS_OK(group, ddp_group_abort(copies));
        if (turn == 4)
            RANKS_CHECK(group, rank < 2 ? result == DDP_ERR_MISMATCH : result != DDP_OK, "%s: %s",
                        ddp_result_name(result), ddp_last_error());
        if (turn == 4)
            RANKS_CHECK(group, rank == 3 || says("rank 0 replicas=2, rank 1 replicas=0"), "%s",
                        ddp_last_error());
    }
    /* Rank 1 lacks the checkpoint group: ranks 2 and 3 wait for it there, and rank 0 reports the cause. */
    ddp_group *all;
    RANKS_OK(group, ddp_group_split(group, 0, rank, &all));
    blocks(&m, 3, 6, 2);
    m.desc.checkpoint_group = rank == 1 ? NULL : all;
    result = ddp_fsdp_create(&fsdp, part, &m.desc);
    RANKS_CHECK(group, result == DDP_ERR_MISMATCH && says("checkpoint_group"), "%s: %s",
                ddp_result_name(result), ddp_last_error());
    ddp_group_destroy(all);
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(copies);
    ddp_group_destroy(part);
    return DDP_OK;
}

/* One group reduces in another order than its replicas: their sums would go to other units, which is detected
   before values change. */
static ddp_result replicas_disorder(ddp_group *group) {
    ddp_group *part, *copies;
    model m;
    ddp_fsdp *fsdp;
    ddp_tensor before, after;
    int64_t first;
    double was;
    int rank = ddp_rank(group);
    if (ddp_world_size(group) != 4) return DDP_OK;
    RANKS_OK(group, ddp_group_split(group, rank / 2, rank, &part));
    RANKS_OK(group, ddp_group_split(group, rank % 2, rank, &copies));
    blocks(&m, 3, 6, 2);
    m.desc.replicas = copies;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &m.desc));
    RANKS_OK(group, ddp_fsdp_get_shard(fsdp, 0, 0, &before, NULL, &first));
    was = load(before.data, before.dtype, 0);
    for (int k = 0; k < 3; k++) {
        int u = rank / 2 ? k : 2 - k;
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
    }
    FAILS(group, ddp_fsdp_step(fsdp, 0.1f), DDP_ERR_MISMATCH, "different orders");
    RANKS_OK(group, ddp_fsdp_get_shard(fsdp, 0, 0, &after, NULL, &first));
    RANKS_CHECK(group, was == load(after.data, after.dtype, 0), "values moved");
    RANKS_OK(group, ddp_fsdp_zero_grad(fsdp));
    RANKS_OK(group, train(group, fsdp, &m, 2, 1));
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(copies);
    ddp_group_destroy(part);
    return DDP_OK;
}

/* The sum of micro-batches is pairwise or sequential. The numbers show which. */
static ddp_result sums(ddp_group *group) {
    static const float parts[5] = {1e8f, 3, 4, -1e8f, 5};
    if (ddp_world_size(group) > 1) return DDP_OK;
    for (int turn = 0; turn < 8; turn++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_tensor grad;
        volatile float want = 0, left = parts[0] + parts[1], right = parts[2] + parts[3];
        blocks(&m, 2, 3, 2);
        m.desc.strategy = (ddp_fsdp_strategy)(turn / 2);
        m.desc.sequential_accumulation = turn & 1;
        m.desc.micro_batch_count = 5;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        for (int k = 0; k < 5; k++)
            for (int u = 0; u < 2; u++) {
                RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
                for (int i = 0; i < 6; i++) ((float *)m.params[u].param.grad.data)[i] += parts[k];
                RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, u));
                RANKS_OK(group, ddp_fsdp_reshard(fsdp, u));
            }
        if (turn & 1)
            for (int k = 0; k < 5; k++) want = want + parts[k];
        else
            want = left + right, want = want + parts[4];
        for (int u = 0; u < 2; u++) {
            RANKS_OK(group, ddp_fsdp_get_shard(fsdp, u, 0, NULL, &grad, NULL));
            for (int i = 0; i < 6; i++)
                RANKS_CHECK(group, ((float *)grad.data)[i] == want, "turn %d: %.9g, want %.9g", turn,
                            (double)((float *)grad.data)[i], (double)want);
        }
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.1f));
        ddp_fsdp_destroy(fsdp);
    }
    return DDP_OK;
}

static ddp_result all_frozen(ddp_group *group) {
    uint64_t before, after;
    model m;
    ddp_fsdp *fsdp;
    float norm = 1;
    for (int strategy = 0; strategy < 4; strategy++) {
        blocks(&m, 2, 5, 3);
        m.params[0].frozen = m.params[1].frozen = 1;
        m.desc.strategy = (ddp_fsdp_strategy)strategy;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, digest(group, fsdp, &m, &before));
        RANKS_OK(group, train(group, fsdp, &m, 2, 1));
        RANKS_OK(group, ddp_fsdp_clip_grad_norm(fsdp, 1, &norm));
        RANKS_CHECK(group, norm == 0, "norm %g", (double)norm);
        RANKS_OK(group, digest(group, fsdp, &m, &after));
        RANKS_CHECK(group, before == after, "values moved");
        ddp_fsdp_destroy(fsdp);
    }
    return DDP_OK;
}

//== checkpoints ============================================================================

/* A folder for this case, with the same name on all ranks; rank 0 deletes it with its neighbours. */
static ddp_result folder_of(ddp_group *group, char folder[64], int done) {
    int64_t pid = getpid();
    char command[128];
    if (!done) RANKS_OK(group, ddp_broadcast(group, &pid, 1, DDP_I64, 0, NULL));
    if (!done) snprintf(folder, 64, "/tmp/ddp-fsdp-unit-%lld", (long long)pid);
    RANKS_OK(group, ddp_barrier(group));
    /* a process with that number can have left it */
    snprintf(command, sizeof command, done ? "rm -rf %s" : "rm -rf %s && mkdir %s", folder, folder);
    if (ddp_rank(group) == 0) RANKS_CHECK(group, system(command) == 0, "%s", command);
    return ddp_barrier(group);
}

/* Failed saves, on one rank or in the thread, are failures of all ranks, and do not affect later ones. */
static ddp_result saves_fail(ddp_group *group) {
    char folder[64], dir[100];
    RANKS_OK(group, folder_of(group, folder, 0));
    for (int turn = 0; turn < 2; turn++) {
        uint64_t want, have;
        model m;
        ddp_fsdp *fsdp;
        counter c = {0, 0, 0, 0};
        char name[400] = "";
        int poor = ddp_rank(group) == 1 % ddp_world_size(group);
        blocks(&m, 3, 5, 3);
        m.params[0].param.name = (const char *)memset(name, 'x', sizeof name - 1);
        m.desc.strategy = turn ? DDP_FSDP_NO_SHARD : DDP_FSDP_FULL_SHARD;
        m.desc.save_in_background = 1;
        m.desc.alloc_fn = counted;
        m.desc.free_fn = uncounted;
        m.desc.user = &c;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        snprintf(dir, sizeof dir, "%s/a", folder);
        if (poor) c.refuse_after = c.calls + 1;
        FAILS(group, ddp_fsdp_save(fsdp, dir), DDP_ERR_NO_MEMORY, "ddp_fsdp_save", "allocated");
        c.refuse_after = 0;
        RANKS_OK(group, ddp_fsdp_save_wait(fsdp));
        snprintf(dir, sizeof dir, "%s/no/such", folder);
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        RANKS_OK(group, train(group, fsdp, &m, 1, 2)); /* while the thread is saving */
        FAILS(group, ddp_fsdp_save_wait(fsdp), DDP_ERR_SYSTEM, "/no", "No such file");
        RANKS_OK(group, digest(group, fsdp, &m, &want));
        snprintf(dir, sizeof dir, "%s/a", folder);
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        RANKS_OK(group, train(group, fsdp, &m, 1, 3));
        RANKS_OK(group, ddp_fsdp_save_wait(fsdp));
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_OK(group, digest(group, fsdp, &m, &have));
        RANKS_CHECK(group, have == want, "other values than were saved");
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        ddp_fsdp_destroy(fsdp); /* waits for the thread */
        RANKS_CHECK(group, c.now == 0, "%zu bytes are left", c.now);
        blocks(&m, 3, 5, 3);
        m.params[0].param.name = name;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_OK(group, digest(group, fsdp, &m, &have));
        RANKS_CHECK(group, have == want, "other values than were saved");
        ddp_fsdp_destroy(fsdp);
    }
    return folder_of(group, folder, 1);
}

/* A set of replicas that finds no checkpoint, or another one than the others, makes all ranks fail, and no
   values change. */
static ddp_result replicas_load(ddp_group *group) {
    char folder[64], dir[100];
    ddp_group *part, *copies;
    uint64_t saved, before, after;
    model m;
    ddp_fsdp *fsdp;
    int rank = ddp_rank(group);
    if (ddp_world_size(group) != 4) return DDP_OK;
    RANKS_OK(group, folder_of(group, folder, 0));
    RANKS_OK(group, ddp_group_split(group, rank / 2, rank, &part));
    RANKS_OK(group, ddp_group_split(group, rank % 2, rank, &copies));
    blocks(&m, 3, 6, 2);
    m.desc.replicas = copies;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &m.desc));
    for (int k = 0; k < 2; k++) {
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        RANKS_OK(group, digest(group, fsdp, &m, &saved));
        snprintf(dir, sizeof dir, "%s/%d", folder, k);
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
    }
    RANKS_OK(group, train(group, fsdp, &m, 1, 1));
    RANKS_OK(group, digest(group, fsdp, &m, &before));
    for (int turn = 0; turn < 3; turn++) {
        snprintf(dir, sizeof dir, "%s/%d", folder, turn == 2 || rank / 2 ? 1 : turn == 0 ? 2 : 0);
        if (turn == 0) FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_SYSTEM, "/2", "No such file");
        if (turn == 1)
            FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "rank 0 finds checkpoint ",
                  ", rank 1 finds checkpoint ");
        if (turn == 2) RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_OK(group, digest(group, fsdp, &m, &after));
        RANKS_CHECK(group, after == (turn == 2 ? saved : before), "turn %d: other values", turn);
        if (turn == 1) RANKS_OK(group, train(group, fsdp, &m, 1, 1)); /* masters have not changed either */
        if (turn == 1) RANKS_OK(group, digest(group, fsdp, &m, &before));
    }
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(copies);
    ddp_group_destroy(part);
    return folder_of(group, folder, 1);
}

/* A checkpoint of memory that the host cannot access uses a copy, both ways. */
static ddp_result device_checkpoint(ddp_group *group) {
    ddp_device plain = *ddp_device_cpu();
    char folder[64], dir[100];
    ddp_group *far;
    plain.name = "plain";
    RANKS_OK(group, folder_of(group, folder, 0));
    RANKS_OK(group, relay_over_device(&far, group, &plain));
    for (int strategy = 0; strategy < 4; strategy++) {
        model m;
        ddp_fsdp *fsdp;
        uint64_t saved, loaded, continued[2];
        snprintf(dir, sizeof dir, "%s/%d", folder, strategy);
        blocks(&m, 3, 7, 3);
        m.desc.strategy = (ddp_fsdp_strategy)strategy;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 2, 1));
        RANKS_OK(group, digest(group, fsdp, &m, &saved));
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        for (int k = 0; k < 2; k++) {
            RANKS_OK(group, train(group, fsdp, &m, 2, 5));
            RANKS_OK(group, digest(group, fsdp, &m, &continued[k]));
            RANKS_CHECK(group, continued[k] != saved, "strategy %d: nothing is trained", strategy);
            RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
            RANKS_OK(group, digest(group, fsdp, &m, &loaded));
            RANKS_CHECK(group, loaded == saved, "strategy %d: a load brings other values back", strategy);
        }
        RANKS_CHECK(group, continued[0] == continued[1], "strategy %d: a load brings other moments back",
                    strategy);
        ddp_fsdp_destroy(fsdp);
    }
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(far);
    return folder_of(group, folder, 1);
}

/* Moments of another kind of optimizer are neither used nor ignored: the load fails, and training continues
   as if it had not been called. */
static ddp_result other_optimizer(ddp_group *group) {
    static const struct {
        ddp_optimizer_kind saved;
        float saved_momentum;
        ddp_optimizer_kind loads;
        float momentum;
        const char *words;
    } turns[] = {
        {DDP_OPTIMIZER_ADAMW, 0, DDP_OPTIMIZER_SGD, 0.9f, "'a.exp_avg'"},
        {DDP_OPTIMIZER_LARS, 0, DDP_OPTIMIZER_ADAMW, 0, "'a.momentum_buffer'"},
        {DDP_OPTIMIZER_SGD, 0, DDP_OPTIMIZER_LAMB, 0, "'a.exp_avg'"},
        {DDP_OPTIMIZER_ADAMW, 0, DDP_OPTIMIZER_LAMB, 0, NULL},
        {DDP_OPTIMIZER_LARS, 0, DDP_OPTIMIZER_SGD, 0.5f, NULL},
    };
    char folder[64], dir[100];
    RANKS_OK(group, folder_of(group, folder, 0));
    for (size_t t = 0; t < sizeof turns / sizeof turns[0]; t++) {
        uint64_t ends[2];
        for (int loads = 0; loads < 2; loads++) {
            model m;
            ddp_fsdp *fsdp;
            ddp_fsdp_state state = DDP_ZERO;
            blocks(&m, 2, 5, 3);
            m.desc.optimizer.kind = turns[t].saved;
            m.desc.optimizer.momentum = turns[t].saved_momentum;
            snprintf(dir, sizeof dir, "%s/%d", folder, (int)t);
            RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
            RANKS_OK(group, train(group, fsdp, &m, 3, 1));
            RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
            ddp_fsdp_destroy(fsdp);
            blocks(&m, 2, 5, 3);
            m.desc.optimizer.kind = turns[t].loads;
            m.desc.optimizer.momentum = turns[t].momentum;
            m.desc.state = &state;
            RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
            RANKS_OK(group, train(group, fsdp, &m, 2, 2));
            if (loads && turns[t].words) {
                FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "ddp_fsdp_load", "/ddp-fsdp-unit-");
                RANKS_CHECK(group, says(turns[t].words), "turn %d: %s", (int)t, ddp_last_error());
            } else if (loads) {
                RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
            }
            RANKS_CHECK(group, state.step == (loads && !turns[t].words ? 3 : 2), "turn %d: step %lld", (int)t,
                        (long long)state.step);
            RANKS_OK(group, train(group, fsdp, &m, 2, 3));
            RANKS_OK(group, digest(group, fsdp, &m, &ends[loads]));
            ddp_fsdp_destroy(fsdp);
        }
        RANKS_CHECK(group, (ends[0] == ends[1]) == (turns[t].words != NULL), "turn %d ends with %s values",
                    (int)t, ends[0] == ends[1] ? "the same" : "other");
    }
    return folder_of(group, folder, 1);
}

/* After a load the next unit is prefetched as before: the order of gathers is kept. */
static ddp_result load_keeps_order(ddp_group *group) {
    char folder[64], dir[100];
    model m;
    ddp_fsdp *fsdp;
    ddp_group *far;
    int world = ddp_world_size(group), runs;
    if (world == 1) return DDP_OK;
    RANKS_OK(group, folder_of(group, folder, 0));
    snprintf(dir, sizeof dir, "%s/a", folder);
    RANKS_OK(group, relay_over(&far, group));
    blocks(&m, 3, 5, 3);
    RANKS_OK(group, ddp_fsdp_create(&fsdp, far, &m.desc));
    RANKS_OK(group, train(group, fsdp, &m, 2, 1));
    RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
    RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
    RANKS_OK(group, ddp_barrier(group));
    runs = __atomic_load_n(&relay_runs, __ATOMIC_RELAXED);
    RANKS_OK(group, ddp_barrier(group));
    RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
    RANKS_OK(group, ddp_barrier(far)); /* completes after everything in flight */
    RANKS_OK(group, ddp_barrier(group));
    runs = __atomic_load_n(&relay_runs, __ATOMIC_RELAXED) - runs;
    RANKS_OK(group, ddp_barrier(group)); /* no rank starts counted calls before all have read */
    RANKS_CHECK(group, runs == 3 || runs == 3 * world,
                "%d calls, not two gathers and a barrier, of one rank or of all", runs);
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(far);
    return folder_of(group, folder, 1);
}

/* A load while units are unsharded: it reshards them, and later unshards provide the loaded values. With
   FULL_SHARD and no_reshard_after_forward, value.data pointed to the old values. */
static ddp_result load_reshards(ddp_group *group) {
    char folder[64], dir[100];
    RANKS_OK(group, folder_of(group, folder, 0));
    for (int turn = 0; turn < 8; turn++) {
        model m;
        ddp_fsdp *fsdp;
        uint64_t saved, trained, loaded = 99;
        snprintf(dir, sizeof dir, "%s/%d", folder, turn);
        blocks(&m, 3, 7, 3);
        m.desc.strategy = (ddp_fsdp_strategy)(turn / 2);
        m.desc.no_reshard_after_forward = turn & 1;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 2, 1));
        RANKS_OK(group, digest(group, fsdp, &m, &saved));
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        RANKS_OK(group, train(group, fsdp, &m, 2, 5));
        RANKS_OK(group, digest(group, fsdp, &m, &trained));
        RANKS_CHECK(group, trained != saved, "turn %d: nothing is trained", turn);
        for (int u = 0; u < 3; u++) RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, 2));
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        for (int u = 0; u < 3; u++) {
            const void *data = m.params[u].param.value.data;
            RANKS_CHECK(group, !data == (m.desc.strategy == DDP_FSDP_FULL_SHARD), "turn %d: unit %d has %p",
                        turn, u, data);
            FAILS(group, ddp_fsdp_reshard(fsdp, u), DDP_ERR_INVALID, "is not unsharded");
        }
        for (int u = 0; u < 3; u++) {
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, u));
            loaded = unit_hash(loaded, &m, u);
        }
        RANKS_CHECK(group, loaded == saved, "turn %d: unshard after a load brings other values", turn);
        RANKS_OK(group, train(group, fsdp, &m, 1, 6));
        ddp_fsdp_destroy(fsdp);
    }
    return folder_of(group, folder, 1);
}

/* Errors of the scaler are detected before values change. State that a checkpoint lacks stays unchanged. */
static ddp_result scaler_state(ddp_group *group) {
    char folder[64], dir[100];
    static const double scales[] = {0, 0.1, -2}; /* no scaler; no float; negative */
    for (int turn = 0; turn < 3; turn++) {
        uint64_t before, after;
        const int fails = turn > 0;
        model m;
        ddp_scaler scaler;
        ddp_fsdp *fsdp;
        ddp_fsdp_state state = DDP_ZERO;
        RANKS_OK(group, folder_of(group, folder, 0));
        snprintf(dir, sizeof dir, "%s/a", folder);
        RANKS_OK(group, ddp_scaler_init(&scaler, NULL));
        blocks(&m, 2, 5, 3);
        state.scaler.scale = scales[turn];
        state.rng[3] = 17;
        m.desc.state = &state;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        ddp_fsdp_destroy(fsdp);
        blocks(&m, 2, 5, 3);
        m.desc.scaler = &scaler;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc)); /* without its own state */
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        RANKS_OK(group, ddp_scaler_update(&scaler));
        scaler.scale = 512;
        RANKS_OK(group, digest(group, fsdp, &m, &before));
        if (turn == 1) FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_CORRUPT, "ddp_scaler_load", "0.1");
        if (turn == 2) FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_CORRUPT, "ddp_scaler_load", "-2");
        if (!fails) RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_OK(group, digest(group, fsdp, &m, &after));
        RANKS_CHECK(group, scaler.scale == 512 && (before == after) == fails, "turn %d: scale %g", turn,
                    (double)scaler.scale);
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        ddp_fsdp_destroy(fsdp);
        blocks(&m, 2, 5, 3);
        memset(&state, 0, sizeof state);
        m.desc.state = &state;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_CHECK(group,
                    state.step == (fails ? 2 : 1) && state.scaler.scale == 512
                        && state.rng[3] == (fails ? 0 : 17),
                    "turn %d: step %lld, scale %g, rng %llu", turn, (long long)state.step, state.scaler.scale,
                    (unsigned long long)state.rng[3]);
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(group, folder_of(group, folder, 1));
    }
    return DDP_OK;
}

//== buffers ================================================================================

enum { BUFFERS = 4, BUFFER_FLOATS = 5 };
/* A vector, a counter without dimensions, an empty tensor, and a matrix of 16-bit numbers. */
typedef struct buffers {
    ddp_tensor tensors[BUFFERS];
    float mean[BUFFER_FLOATS];
    int64_t steps;
    uint16_t half[6];
} buffers;
static const char *const buffer_names[BUFFERS] = {"norm.mean", "norm.steps", "norm.none", "norm.half"};

static void buffers_of(buffers *b, model *m) {
    const ddp_tensor list[BUFFERS] = {{b->mean, DDP_F32, 1, {BUFFER_FLOATS}},
                                      {&b->steps, DDP_I64, 0, {0}},
                                      {NULL, DDP_U8, 1, {0}},
                                      {b->half, DDP_BF16, 2, {2, 3}}};
    memcpy(b->tensors, list, sizeof list);
    m->desc.buffers = b->tensors;
    m->desc.buffer_names = buffer_names;
    m->desc.buffer_count = BUFFERS;
}

static void buffers_set(buffers *b, int value) {
    for (int i = 0; i < BUFFER_FLOATS; i++) b->mean[i] = (float)value + 0.25f * (float)i;
    b->steps = (int64_t)value << 40;
    for (int i = 0; i < 6; i++) b->half[i] = (uint16_t)(value * 7 + i);
}

static int buffers_are(const buffers *b, int value) {
    buffers want;
    buffers_set(&want, value);
    return memcmp(b->mean, want.mean, sizeof b->mean) == 0 && b->steps == want.steps
           && memcmp(b->half, want.half, sizeof b->half) == 0;
}

/* create broadcasts the buffers of rank 0, and sync those of its root: under every strategy, over ranks that
   read each other's memory, over collectives, and on a device. */
static ddp_result buffers_follow_the_root(ddp_group *group) {
    ddp_device plain = *ddp_device_cpu();
    int rank = ddp_rank(group), world = ddp_world_size(group);
    ddp_group *far;
    plain.name = "plain";
    RANKS_OK(group, relay_over_device(&far, group, &plain));
    for (int turn = 0; turn < 6; turn++) {
        model m;
        buffers b;
        ddp_fsdp *fsdp;
        ddp_fsdp_memory before, after;
        int skip = turn == 4, single = turn == 5;
        blocks(&m, 2, 5, 3);
        buffers_of(&b, &m);
        buffers_set(&b, 10 + rank);
        m.desc.strategy = (ddp_fsdp_strategy)(turn % 4);
        m.desc.skip_initial_broadcast = skip;
        if (single) m.desc.buffer_count = 1; /* sent as it is */
        RANKS_OK(group, ddp_fsdp_create(&fsdp, turn & 1 ? far : group, &m.desc));
        memset(b.tensors, 0xee, sizeof b.tensors); /* the list was copied */
        if (single)
            RANKS_CHECK(group, b.mean[1] == 10.25f && b.steps == (int64_t)(10 + rank) << 40, "%g",
                        (double)b.mean[1]);
        else
            RANKS_CHECK(group, buffers_are(&b, skip ? 10 + rank : 10), "turn %d: create", turn);
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &before));
        for (int root = 0; root < world; root++) {
            buffers_set(&b, 20 + rank);
            RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
            RANKS_OK(group, ddp_fsdp_sync_buffers(fsdp, root));
            if (single)
                RANKS_CHECK(group, b.mean[1] == 20.25f + (float)root, "%g", (double)b.mean[1]);
            else
                RANKS_CHECK(group, buffers_are(&b, 20 + root), "turn %d: not those of rank %d", turn, root);
            RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        }
        RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &after));
        RANKS_CHECK(group, memcmp(&before, &after, sizeof before) == 0, "turn %d: a sync allocates", turn);
        FAILS(group, ddp_fsdp_sync_buffers(NULL, 0), DDP_ERR_INVALID, "ddp_fsdp_sync_buffers",
              "fsdp is NULL");
        FAILS(group, ddp_fsdp_sync_buffers(fsdp, -1), DDP_ERR_INVALID, "ddp_fsdp_sync_buffers", "root=-1");
        FAILS(group, ddp_fsdp_sync_buffers(fsdp, world), DDP_ERR_INVALID, "is not a rank of the group");
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, 1));
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, 1));
        FAILS(group, ddp_fsdp_sync_buffers(fsdp, 0), DDP_ERR_INVALID, "unit b", "already been reduced",
              "call ddp_fsdp_sync_buffers before the first");
        RANKS_OK(group, ddp_fsdp_zero_grad(fsdp));
        RANKS_OK(group, ddp_fsdp_sync_buffers(fsdp, 0));
        ddp_fsdp_destroy(fsdp);
    }
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(far);
    return DDP_OK;
}

/* Two sets of replicas: the buffers are those of one rank of the first set. Differing lists are reported. */
static ddp_result buffers_of_replicas(ddp_group *group) {
    int rank = ddp_rank(group);
    ddp_group *part, *copies;
    model m;
    buffers b;
    ddp_fsdp *fsdp;
    if (ddp_world_size(group) != 4) return DDP_OK;
    RANKS_OK(group, ddp_group_split(group, rank / 2, rank, &part));
    RANKS_OK(group, ddp_group_split(group, rank % 2, rank, &copies));
    blocks(&m, 2, 5, 3);
    buffers_of(&b, &m);
    buffers_set(&b, rank);
    m.desc.replicas = copies;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &m.desc));
    RANKS_CHECK(group, buffers_are(&b, 0), "create: steps %lld", (long long)b.steps);
    for (int root = 1; root >= 0; root--) {
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        buffers_set(&b, 30 + rank);
        RANKS_OK(group, ddp_fsdp_sync_buffers(fsdp, root));
        RANKS_CHECK(group, buffers_are(&b, 30 + root), "root %d: steps %lld", root, (long long)b.steps);
    }
    ddp_fsdp_destroy(fsdp);
    for (int turn = 0; turn < 4; turn++) {
        static const char *const other[BUFFERS] = {"norm.mean", "norm.steps", "norm.none", "norm.other"};
        int odd = rank == 3;
        blocks(&m, 2, 5, 3);
        buffers_of(&b, &m);
        m.desc.replicas = copies;
        if (odd && turn == 0) m.desc.buffer_count = 3;
        if (odd && turn == 1) b.tensors[3].shape[1] = 2;
        if (odd && turn == 2) b.tensors[3].dtype = DDP_F16;
        if (odd && turn == 3) m.desc.buffer_names = other;
        if (turn == 0)
            FAILS(group, ddp_fsdp_create(&fsdp, part, &m.desc), DDP_ERR_MISMATCH, "buffer_count=4",
                  "buffer_count=3");
        else
            FAILS(group, ddp_fsdp_create(&fsdp, part, &m.desc), DDP_ERR_MISMATCH,
                  "buffer 3 'norm.half' bf16");
        RANKS_OK(group, ddp_group_status(part));
    }
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(copies);
    ddp_group_destroy(part);
    return DDP_OK;
}

/* Buffers in a checkpoint: loaded under another strategy, with other numbers of ranks, and on a device; not
   loaded, with nothing changed, where name, shape or dtype differ. */
static ddp_result buffers_are_saved(ddp_group *group) {
    ddp_device plain = *ddp_device_cpu();
    char folder[64], dir[100];
    int rank = ddp_rank(group), world = ddp_world_size(group);
    ddp_group *far, *part;
    plain.name = "plain";
    RANKS_OK(group, folder_of(group, folder, 0));
    RANKS_OK(group, relay_over_device(&far, group, &plain));
    RANKS_OK(group, ddp_group_split(group, rank == world - 1, rank, &part)); /* W - 1 ranks, and one */
    for (int strategy = 0; strategy < 4; strategy++) {
        model m;
        buffers b;
        ddp_fsdp *fsdp;
        uint64_t saved, have;
        snprintf(dir, sizeof dir, "%s/%d", folder, strategy);
        blocks(&m, 2, 5, 3);
        buffers_of(&b, &m);
        m.desc.strategy = (ddp_fsdp_strategy)strategy;
        m.desc.save_in_background = strategy == 1;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, strategy & 2 ? far : group, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        RANKS_OK(group, digest(group, fsdp, &m, &saved));
        buffers_set(&b, 40 + rank); /* rank 0 saves its own */
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        buffers_set(&b, 50 + rank);
        RANKS_OK(group, ddp_fsdp_save_wait(fsdp));
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_CHECK(group, buffers_are(&b, 40), "strategy %d: steps %lld", strategy, (long long)b.steps);
        ddp_fsdp_destroy(fsdp);
        int turns = strategy ? 1 + (strategy == 2) : 7; /* the bad ones once */
        for (int turn = strategy == 2; turn < turns; turn++) {
            static const char *const other[BUFFERS] = {"norm.mean", "norm.steps", "norm.none", "norm.other"};
            uint64_t before;
            blocks(&m, 2, 5, 3);
            buffers_of(&b, &m);
            m.desc.strategy = (ddp_fsdp_strategy)((strategy + 1 + turn) % 4);
            if (turn == 2) b.tensors[0].shape[0]--;
            if (turn == 3) b.tensors[1].dtype = DDP_F64;
            if (turn == 4) m.desc.buffer_names = other;
            if (turn == 5) m.desc.buffer_count = 3;
            if (turn == 6) b.tensors[1].ndim = b.tensors[1].shape[0] = 1;
            ddp_group *on = turn == 0 ? part : group;
            if (turn == 1) on = far;
            RANKS_OK(group, ddp_fsdp_create(&fsdp, on, &m.desc));
            RANKS_OK(group, train(on, fsdp, &m, 1, 9));
            RANKS_OK(group, digest(group, fsdp, &m, &before));
            buffers_set(&b, 60 + rank);
            switch (turn) {
            case 2:
                FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "'norm.mean'", "F32 [5]", "F32 [4]");
                break;
            case 3:
                FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "'norm.steps'", "I64", "F64");
                break;
            case 4:
                FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "'norm.half'", "not among");
                break;
            case 5:
                FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "'norm.half'", "not among");
                break;
            case 6: FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "'norm.steps'"); break;
            default: RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
            }
            RANKS_OK(group, digest(group, fsdp, &m, &have));
            RANKS_CHECK(group, have == (turn < 2 ? saved : before), "strategy %d, turn %d: other values",
                        strategy, turn);
            RANKS_CHECK(group, buffers_are(&b, turn < 2 ? 40 : 60 + rank), "strategy %d, turn %d: steps %lld",
                        strategy, turn, (long long)b.steps);
            ddp_fsdp_destroy(fsdp);
            RANKS_OK(group, ddp_barrier(group));
        }
    }
    ddp_group_destroy(part);
    ddp_group_destroy(far);
    return folder_of(group, folder, 1);
}

//== state of each rank =====================================================================

static void state_set(ddp_fsdp_state *state, int value) {
    memset(state, 0, sizeof *state);
    state->sampler.position = 1000 + value;
    for (int i = 0; i < 4; i++) state->rng[i] = UINT64_MAX - (uint64_t)(value * 4 + i);
    for (int i = 0; i < 8; i++) state->user[i] = value + 1.0 / (i + 3);
    state->user[7] = NAN;
}

/* rng and user as state_set(own) set them, and the rest as on rank 0. */
static int state_is(const ddp_fsdp_state *state, int own, int per_rank) {
    ddp_fsdp_state want;
    state_set(&want, own);
    return memcmp(state->rng, want.rng, sizeof want.rng) == 0
           && memcmp(state->user, want.user, sizeof want.user) == 0 && state->per_rank == per_rank
           && state->sampler.position == 1000 && state->step == 1;
}

/* With per_rank each rank gets its own numbers back, on the same number of ranks. On another number, and from
   a checkpoint without them, the load fails and changes nothing; with 0 every rank gets those of rank 0. */
static ddp_result state_of_each_rank(ddp_group *group) {
    char folder[64], dir[100], plain[100];
    int rank = ddp_rank(group), world = ddp_world_size(group);
    ddp_group *part = group, *copies = NULL, *few;
    ddp_fsdp_state state, before;
    ddp_fsdp *fsdp;
    model m;
    RANKS_OK(group, folder_of(group, folder, 0));
    snprintf(dir, sizeof dir, "%s/own", folder);
    snprintf(plain, sizeof plain, "%s/plain", folder);
    RANKS_OK(group, ddp_group_split(group, rank == world - 1, rank, &few)); /* W - 1 ranks, and one */
    if (world == 4) RANKS_OK(group, ddp_group_split(group, rank / 2, rank, &part));
    if (world == 4) RANKS_OK(group, ddp_group_split(group, rank % 2, rank, &copies));
    for (int background = 0; background < 2; background++) {
        blocks(&m, 2, 5, 3);
        m.desc.state = &state;
        m.desc.save_in_background = background;
        m.desc.replicas = background ? copies : NULL; /* rank 2 is rank 0 of the second replica */
        RANKS_OK(group, ddp_fsdp_create(&fsdp, background ? part : group, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        state_set(&state, rank);
        RANKS_OK(group, ddp_fsdp_save(fsdp, plain));
        state.per_rank = 1;
        RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        state_set(&state, 70 + rank);
        RANKS_OK(group, ddp_fsdp_save_wait(fsdp));
        state.per_rank = 2;
        FAILS(group, ddp_fsdp_save(fsdp, dir), DDP_ERR_INVALID, "ddp_fsdp_save", "state.per_rank=2");
        FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_INVALID, "ddp_fsdp_load", "state.per_rank=2");
        state.per_rank = rank == 0;
        if (world > 1)
            FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "rank 0 state.per_rank=1",
                  "state.per_rank=0");
        state.per_rank = 1;
        before = state;
        FAILS(group, ddp_fsdp_load(fsdp, plain), DDP_ERR_MISMATCH, "no state of each rank",
              "set it to 0 for this load");
        RANKS_CHECK(group, memcmp(&state, &before, sizeof state) == 0, "a failed load changes the state");
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_CHECK(group, state_is(&state, rank, 1), "rank %d: rng %llu", rank,
                    (unsigned long long)state.rng[0]);
        for (int k = 0; k < 2; k++) {
            state_set(&state, 70 + rank);
            RANKS_OK(group, ddp_fsdp_load(fsdp, k ? dir : plain));
            RANKS_CHECK(group, state_is(&state, 0, 0), "of rank 0: rng %llu",
                        (unsigned long long)state.rng[0]);
        }
        ddp_fsdp_destroy(fsdp);
        blocks(&m, 2, 5, 3);
        m.desc.state = &state;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, few, &m.desc));
        state_set(&state, 80 + rank);
        state.per_rank = 1;
        before = state;
        if (world > 1) {
            FAILS(group, ddp_fsdp_load(fsdp, dir), DDP_ERR_MISMATCH, "ddp_fsdp_load", "has the state of",
                  "load it with state.per_rank=1", "set it to 0");
            RANKS_CHECK(group, memcmp(&state, &before, sizeof state) == 0, "a failed load changes the state");
        } else {
            RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        }
        state.per_rank = 0;
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_CHECK(group, state_is(&state, 0, 0), "of rank 0: rng %llu", (unsigned long long)state.rng[0]);
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(group, ddp_barrier(group));
    }
    if (copies) ddp_group_destroy(copies);
    if (part != group) ddp_group_destroy(part);
    ddp_group_destroy(few);
    return folder_of(group, folder, 1);
}

//== full tensors on one rank ===============================================================

enum { FULL_PARAMS = 6, FULL_MOST = 96 };
/* Odd rows, no dimension, f64, no elements, a tie, and a frozen parameter. */
static void full_model(model *m) {
    memset(m, 0, sizeof *m);
    add(m, "a", "a.w", DDP_F32, 7, 3);
    add(m, NULL, "a.scalar", DDP_F32, -1, 0);
    add(m, "b", "b.double", DDP_F64, 5, 0);
    add(m, NULL, "b.none", DDP_F32, 0, 4);
    add(m, "c", "c.tied", DDP_F32, 7, 3)->tied_to = "a.w";
    add(m, NULL, "c.frozen", DDP_F32, 2, 48)->frozen = 1;
}

static int full_unit(int i) { return i / 2; }

/* The full parameter: all ranks' rows of ddp_fsdp_get_shard. split 0: rank 0 has all of them. */
static ddp_result full_by_shards(ddp_group *group, ddp_fsdp *fsdp, const model *m, int i, int split,
                                 void *out) {
    size_t counts[8], offsets[8], size, all = 0;
    ddp_tensor rows;
    int64_t first;
    RANKS_OK(group, ddp_fsdp_get_shard(fsdp, full_unit(i), i % 2, &rows, NULL, &first));
    size = ddp_dtype_size(rows.dtype);
    int64_t mine = ddp_tensor_count(&rows), of_rank[8];
    if (!split && ddp_rank(group) > 0) mine = 0;
    RANKS_OK(group, ddp_all_gather(group, &mine, of_rank, 1, DDP_I64, NULL));
    for (int r = 0; r < ddp_world_size(group); r++) {
        counts[r] = (size_t)of_rank[r] * size;
        offsets[r] = all;
        all += counts[r];
    }
    RANKS_CHECK(group, all == (size_t)ddp_tensor_count(&m->params[i].param.value) * size, "%zu bytes", all);
    RANKS_OK(group, ddp_all_gather_v(group, mine ? rows.data : NULL, (size_t)mine * size, out, counts,
                                     offsets, DDP_U8, NULL));
    return DDP_OK;
}

/* Each rank in turn receives each parameter in master precision: the rows of all ranks. */
static ddp_result full_on_one_rank(ddp_group *group) {
    ddp_device plain = *ddp_device_cpu();
    int rank = ddp_rank(group), world = ddp_world_size(group);
    ddp_group *far;
    plain.name = "plain";
    RANKS_OK(group, relay_over_device(&far, group, &plain));
    for (int turn = 0; turn < 8; turn++) {
        model m;
        ddp_fsdp *fsdp;
        full_model(&m);
        m.desc.strategy = (ddp_fsdp_strategy)(turn % 4);
        m.desc.param_dtype = turn & 4 ? DDP_BF16 : DDP_DTYPE_DEFAULT;
        m.desc.offload = turn == 2 || turn == 4 ? DDP_FSDP_OFFLOAD_FILE : DDP_FSDP_OFFLOAD_NONE;
        m.desc.offload_dir = "/tmp";
        ddp_group *on = turn == 1 || turn == 3 || turn == 5 ? far : group;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, on, &m.desc));
        RANKS_OK(group, train(group, fsdp, &m, 1, 1));
        for (int i = 0; i < FULL_PARAMS; i++)
            for (int root = 0; root < world; root++) {
                if (i && root != (i + turn) % world) continue; /* only the first one to each rank */
                double want[FULL_MOST] = {0}, have[FULL_MOST] = {0}, untouched[FULL_MOST] = {0};
                ddp_tensor out = m.params[i].param.value;
                out.dtype = i == 2 ? DDP_F64 : DDP_F32;
                out.data = have;
                RANKS_OK(group, full_by_shards(on, fsdp, &m, i, turn % 4 != DDP_FSDP_NO_SHARD, want));
                RANKS_OK(group, ddp_fsdp_get_full(fsdp, full_unit(i), i % 2, root,
                                                  rank == root || i % 2 ? &out : NULL));
                RANKS_CHECK(group, memcmp(have, rank == root ? want : untouched, sizeof have) == 0,
                            "turn %d, %s, root %d: other values", turn, m.params[i].param.name, root);
            }
        RANKS_OK(group, train(group, fsdp, &m, 1, 2));
        ddp_fsdp_destroy(fsdp);
    }
    RANKS_OK(group, ddp_barrier(group));
    ddp_group_destroy(far);
    return DDP_OK;
}

/* Bad arguments of get_full are errors of every rank, and the group stays usable. */
static ddp_result full_bad_calls(ddp_group *group) {
    int rank = ddp_rank(group), world = ddp_world_size(group), root = world - 1;
    double memory[FULL_MOST];
    model m;
    ddp_fsdp *fsdp;
    full_model(&m);
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    const ddp_tensor good = {memory, DDP_F32, 2, {7, 3}};
    ddp_tensor out = good;
    FAILS(group, ddp_fsdp_get_full(NULL, 0, 0, 0, &out), DDP_ERR_INVALID, "ddp_fsdp_get_full",
          "fsdp is NULL");
    FAILS(group, ddp_fsdp_get_full(fsdp, 3, 0, root, &out), DDP_ERR_INVALID, "ddp_fsdp_get_full", "unit=3");
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 2, root, &out), DDP_ERR_INVALID, "param=2 in unit a");
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, world, &out), DDP_ERR_INVALID, "root=", "use 0 to");
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, -1, &out), DDP_ERR_INVALID, "root=-1");
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, root, rank == root ? NULL : &out), DDP_ERR_INVALID,
          "ddp_fsdp_get_full", "out is NULL on rank");
    out.data = NULL;
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out), DDP_ERR_INVALID, "parameter a.w",
          "out->data is NULL", "84 bytes");
    out = good;
    out.dtype = DDP_BF16;
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out), DDP_ERR_INVALID, "parameter a.w", "out is bf16",
          "use f32");
    out = good;
    out.shape[0] = 8;
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out), DDP_ERR_INVALID, "parameter a.w", "f32 [8,3]");
    out = good;
    out.ndim = 1;
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out), DDP_ERR_INVALID, "parameter a.w");
    out = good;
    if (world > 1)
        FAILS(group, ddp_fsdp_get_full(fsdp, rank ? 2 : 0, 0, root, &out), DDP_ERR_MISMATCH, "rank 0 unit=0",
              "rank 1 unit=2");
    RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
    RANKS_OK(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out)); /* of an unsharded unit too */
    RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, 0));
    FAILS(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out), DDP_ERR_INVALID, "unit a",
          "already been reduced");
    FAILS(group, ddp_fsdp_export(fsdp, "/tmp/none"), DDP_ERR_INVALID, "ddp_fsdp_export", "unit a",
          "already been reduced");
    RANKS_OK(group, ddp_fsdp_zero_grad(fsdp));
    RANKS_OK(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out));
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* A parameter of several pieces, with two sets of replicas: only the first sends. Other ranks than root never
   have memory for the full parameter. */
static ddp_result full_in_pieces(ddp_group *group) {
    enum { ROWS = 1200007 }; /* more than four pieces of 2^18 */
    int rank = ddp_rank(group), world = ddp_world_size(group), replicated = world == 4, root = replicated;
    ddp_group *part = group, *copies = NULL;
    model m;
    ddp_fsdp *fsdp;
    ddp_fsdp_memory memory;
    float *values = (float *)malloc(ROWS * sizeof *values), *have = (float *)calloc(ROWS, sizeof *have);
    for (int i = 0; i < ROWS; i++) values[i] = (float)(i % 1000003);
    if (replicated) RANKS_OK(group, ddp_group_split(group, rank / 2, rank, &part));
    if (replicated) RANKS_OK(group, ddp_group_split(group, rank % 2, rank, &copies));
    blocks(&m, 1, ROWS, 0);
    m.params[0].param.value.data = values;
    m.params[0].frozen = 1; /* no optimizer state */
    m.desc.replicas = copies;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &m.desc));
    ddp_tensor out = m.params[0].param.value;
    out.data = have;
    RANKS_OK(group, ddp_fsdp_get_full(fsdp, 0, 0, root, &out));
    int receives = rank == root; /* world 4: rank 1 of the first replica */
    for (int i = 0; i < ROWS; i++)
        RANKS_CHECK(group, have[i] == (receives ? (float)(i % 1000003) : 0), "element %d is %g", i,
                    (double)have[i]);
    RANKS_OK(group, ddp_fsdp_get_memory(fsdp, &memory));
    size_t piece = world > 1 ? 4u << 18 : 0;
    size_t most = piece * (size_t)(receives ? 1 + ddp_world_size(part) : 1);
    if (replicated && rank >= 2) most = 0;
    RANKS_CHECK(group, memory.peak.communication >= most && memory.peak.communication <= most + 4096,
                "%zu bytes, not %zu", memory.peak.communication, most);
    ddp_fsdp_destroy(fsdp);
    RANKS_OK(group, ddp_barrier(group));
    if (copies) ddp_group_destroy(copies);
    if (replicated) ddp_group_destroy(part);
    free(values);
    free(have);
    return DDP_OK;
}

/* Reads the tensor `name` of a safetensors file of the library: dtype and shape as written, and its data.
   Returns its bytes, or -1 if the file does not have it. */
static long read_tensor(const char *path, const char *name, char *description, size_t size, void *out) {
    char key[64], *header, *at, *offsets;
    uint64_t length = 0, begin, end;
    FILE *file = fopen(path, "rb");
    long bytes = -1;
    if (!file) return -1;
    if (fread(&length, 1, 8, file) == 8 && length < 100000 && (header = (char *)calloc(1, length + 1))) {
        snprintf(key, sizeof key, "\"%s\":{", name);
        if (fread(header, 1, length, file) == length && (at = strstr(header, key))
            && (offsets = strstr(at, ",\"data_offsets\":["))
            && sscanf(offsets, ",\"data_offsets\":[%" SCNu64 ",%" SCNu64 "]", &begin, &end) == 2) {
            at += strlen(key);
            snprintf(description, size, "%.*s", (int)(offsets - at), at);
            if (end - begin <= FULL_MOST * 8 && fseek(file, (long)(8 + length + begin), SEEK_SET) == 0
                && fread(out, 1, end - begin, file) == end - begin)
                bytes = (long)(end - begin);
        }
        free(header);
    }
    fclose(file);
    return bytes;
}

/* An exported file has every parameter and buffer once. It is a model for ddp_fsdp_load, on any number of
   ranks and under any strategy. */
static ddp_result exported(ddp_group *group) {
    static const char *const descriptions[FULL_PARAMS] = {"\"dtype\":\"F32\",\"shape\":[7,3]",
                                                          "\"dtype\":\"F32\",\"shape\":[]",
                                                          "\"dtype\":\"F64\",\"shape\":[5]",
                                                          "\"dtype\":\"F32\",\"shape\":[0,4]",
                                                          "",
                                                          "\"dtype\":\"F32\",\"shape\":[2,48]"};
    ddp_device plain = *ddp_device_cpu();
    char folder[64], path[140], dir[100], command[200], text[100];
    int rank = ddp_rank(group), world = ddp_world_size(group);
    ddp_group *far, *few;
    plain.name = "plain";
    RANKS_OK(group, folder_of(group, folder, 0));
    RANKS_OK(group, relay_over_device(&far, group, &plain));
    RANKS_OK(group, ddp_group_split(group, rank == world - 1, rank, &few));
    for (int turn = 0; turn < 4; turn++) {
        model m;
        buffers b;
        ddp_fsdp *fsdp;
        uint64_t saved, have;
        snprintf(dir, sizeof dir, "%s/%d", folder, turn);
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        if (rank == 0) RANKS_CHECK(group, mkdir(dir, 0777) == 0, "%s", dir);
        RANKS_OK(group, ddp_barrier(group));
        full_model(&m);
        buffers_of(&b, &m);
        m.desc.strategy = (ddp_fsdp_strategy)turn;
        m.desc.save_in_background = turn == 3;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, turn == 0 || turn == 2 ? far : group, &m.desc));
        for (int k = turn != 3; k < 2; k++) { /* the second file replaces the first one */
            RANKS_OK(group, train(group, fsdp, &m, 1, 1));
            buffers_set(&b, 90 + rank + k);
            if (turn == 3) snprintf(command, sizeof command, "%s/saved", dir);
            if (turn == 3) RANKS_OK(group, ddp_fsdp_save(fsdp, command));
            RANKS_OK(group, ddp_fsdp_export(fsdp, rank ? NULL : path));
        }
        RANKS_OK(group, digest(group, fsdp, &m, &saved));
        for (int i = 0; i < FULL_PARAMS; i++) {
            double want[FULL_MOST] = {0}, found[FULL_MOST] = {0};
            ddp_tensor out = m.params[i].param.value;
            out.dtype = i == 2 ? DDP_F64 : DDP_F32;
            out.data = want;
            RANKS_OK(group, ddp_fsdp_get_full(fsdp, full_unit(i), i % 2, 0, &out));
            if (rank > 0) continue;
            long bytes = read_tensor(path, m.params[i].param.name, text, sizeof text, found);
            RANKS_CHECK(group, bytes == (i == 4 ? -1 : (long)ddp_tensor_bytes(&out)), "%s: %ld bytes",
                        m.params[i].param.name, bytes);
            if (i == 4) continue; /* tied to a.w, and only there */
            RANKS_CHECK(group, strcmp(text, descriptions[i]) == 0, "%s: %s", m.params[i].param.name, text);
            RANKS_CHECK(group, memcmp(want, found, sizeof want) == 0, "turn %d: %s has other values", turn,
                        m.params[i].param.name);
        }
        if (rank == 0) {
            int64_t steps = 0;
            RANKS_CHECK(group,
                        read_tensor(path, "norm.steps", text, sizeof text, &steps) == 8
                            && steps == (int64_t)91 << 40,
                        "steps %lld", (long long)steps);
            snprintf(command, sizeof command, "test \"$(ls %s | grep -v saved)\" = model.safetensors", dir);
            RANKS_CHECK(group, system(command) == 0, "%s", command);
        }
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(group, ddp_barrier(group));
        full_model(&m);
        buffers_of(&b, &m);
        m.desc.strategy = (ddp_fsdp_strategy)((turn + 1) % 4);
        RANKS_OK(group, ddp_fsdp_create(&fsdp, few, &m.desc));
        RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        RANKS_OK(group, digest(group, fsdp, &m, &have));
        RANKS_CHECK(group, have == saved && buffers_are(&b, 91), "turn %d: the load brings other values",
                    turn);
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(group, ddp_barrier(group));
    }
    ddp_group_destroy(few);
    ddp_group_destroy(far);
    return folder_of(group, folder, 1);
}

//== slices =================================================================================

enum { TP_ROWS = 6, TP_COLUMNS = 8 };

/* Values by their place in the whole tensors: "norm" of TP_COLUMNS elements, "wide" of TP_ROWS x TP_COLUMNS,
   "bias" of TP_COLUMNS. */
static ddp_result place_fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                             void *user) {
    const ddp_tensor *t = &param->param.value;
    int64_t columns = t->ndim == 2 ? t->shape[1] : 1, width = t->ndim == 2 ? TP_COLUMNS : 1;
    for (int64_t i = 0; i < row_count * columns; i++) {
        int64_t row = first_row + i / columns + param->global_offset[0],
                column = i % columns + (t->ndim == 2 ? param->global_offset[1] : 0);
        ((float *)out)[i] = user ? -1 : (float)first_value(param->param.name, row * width + column);
    }
    return DDP_OK;
}

/* parts 1: the full tensors. Otherwise those of tensor-parallel rank part: columns of one, rows of another,
   all of the third. */
static void tensor_parallel(model *m, int part, int parts) {
    int columns = TP_COLUMNS / parts;
    ddp_fsdp_param *norm, *wide, *bias;
    memset(m, 0, sizeof *m);
    norm = add(m, "block", "norm", DDP_F32, TP_COLUMNS, 0);
    wide = add(m, NULL, "wide", DDP_F32, TP_ROWS, columns);
    bias = add(m, "bias", "bias", DDP_F32, columns, 0);
    m->desc.init_fn = place_fill;
    if (parts == 1) return;
    norm->global_shape[0] = bias->global_shape[0] = wide->global_shape[1] = TP_COLUMNS;
    wide->global_shape[0] = TP_ROWS;
    wide->global_offset[1] = bias->global_offset[0] = (int64_t)part * columns;
}

/* Slices of larger tensors are saved as slices, and loaded as other slices of them. */
static ddp_result slices_of_larger(ddp_group *group) {
    char folder[64], dir[100];
    int rank = ddp_rank(group), parts = ddp_world_size(group) == 1 ? 1 : 2,
        data = ddp_world_size(group) / parts;
    if (ddp_world_size(group) % 2) return DDP_OK;
    RANKS_OK(group, folder_of(group, folder, 0));
    snprintf(dir, sizeof dir, "%s/a", folder);
    for (int turn = 0; turn < 4; turn++) { /* saved as parts, loaded whole; saved whole, loaded as parts */
        ddp_group *shards = group;
        int sharded = turn == 0 || turn == 3, part = rank / data;
        model m;
        ddp_fsdp *fsdp;
        tensor_parallel(&m, part, sharded ? parts : 1);
        if (sharded) RANKS_OK(group, ddp_group_split(group, part, rank, &shards));
        if (sharded) m.desc.checkpoint_group = group;
        if (sharded && data > 1) m.desc.strategy = turn ? DDP_FSDP_NO_SHARD : DDP_FSDP_FULL_SHARD;
        m.desc.init_user = turn & 1 ? &m : NULL; /* the values before the load are different */
        RANKS_OK(group, ddp_fsdp_create(&fsdp, shards, &m.desc));
        if (!(turn & 1))
            RANKS_OK(group, ddp_fsdp_save(fsdp, dir));
        else
            RANKS_OK(group, ddp_fsdp_load(fsdp, dir));
        for (int i = 0; i < 3; i++) {
            ddp_tensor rows;
            int64_t first;
            float want[TP_ROWS * TP_COLUMNS];
            RANKS_OK(group, ddp_fsdp_get_shard(fsdp, i / 2, i % 2, &rows, NULL, &first));
            RANKS_OK(group, place_fill(&m.params[i], first, rows.shape[0], want, NULL));
            RANKS_CHECK(group,
                        !rows.data || memcmp(rows.data, want, (size_t)ddp_tensor_count(&rows) * 4) == 0,
                        "turn %d: %s", turn, m.params[i].param.name);
        }
        ddp_fsdp_destroy(fsdp);
        if (turn == 0) { /* that a tensor is the same on all ranks must be declared */
            tensor_parallel(&m, part, parts);
            m.params[0].global_shape[0] = 0;
            m.desc.checkpoint_group = group;
            RANKS_OK(group, ddp_fsdp_create(&fsdp, shards, &m.desc));
            FAILS(group, ddp_fsdp_save(fsdp, dir), DDP_ERR_MISMATCH, "'norm'", "overlap or leave a gap");
            ddp_fsdp_destroy(fsdp);
        }
        RANKS_OK(group, ddp_barrier(group));
        if (sharded) ddp_group_destroy(shards);
    }
    return folder_of(group, folder, 1);
}

/* Failed exports are errors of every rank, and leave the file and the folder as they were. */
static ddp_result exports_fail(ddp_group *group) {
    char folder[64], path[100], command[200];
    int rank = ddp_rank(group), world = ddp_world_size(group);
    model m;
    ddp_fsdp *fsdp;
    char long_name[1200];
    RANKS_OK(group, folder_of(group, folder, 0));
    counter c = {0, 0, 0, 0};
    blocks(&m, 2, 5, 3);
    m.desc.alloc_fn = counted;
    m.desc.free_fn = uncounted;
    m.desc.user = &c;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &m.desc));
    snprintf(path, sizeof path, "%s/model", folder);
    for (int rank_without = 0; rank_without < world; rank_without++) {
        int tries = 0;
        for (ddp_result result = DDP_ERR_NO_MEMORY; result != DDP_OK; tries++) {
            if (rank == rank_without) c.refuse_after = -(c.calls + 1 + tries); /* only this one fails */
            result = ddp_fsdp_export(fsdp, path);
            c.refuse_after = 0;
            RANKS_CHECK(group, result == DDP_OK || (result == DDP_ERR_NO_MEMORY && says("allocated")),
                        "%d: %s", tries, ddp_last_error());
            RANKS_CHECK(group, result == DDP_OK || rank_without || access(path, F_OK) != 0, "%d: a file",
                        tries);
        }
        /* pieces, tables, a tensor; the others have one piece, and one rank none */
        int want = (world > 1) + 2 * (rank_without == 0);
        RANKS_CHECK(group, tries == want + 1, "rank %d: %d failures, not %d", rank_without, tries - 1, want);
    }
    if (rank == 0) RANKS_CHECK(group, unlink(path) == 0, "%s", path);
    memset(long_name, 'x', sizeof long_name);
    long_name[sizeof long_name - 1] = 0;
    FAILS(group, ddp_fsdp_export(NULL, "x"), DDP_ERR_INVALID, "ddp_fsdp_export", "fsdp is NULL");
    FAILS(group, ddp_fsdp_export(fsdp, rank ? "x" : NULL), DDP_ERR_INVALID, "ddp_fsdp_export",
          "path is NULL");
    FAILS(group, ddp_fsdp_export(fsdp, ""), DDP_ERR_INVALID, "path is NULL or empty");
    FAILS(group, ddp_fsdp_export(fsdp, "/tmp/"), DDP_ERR_INVALID, "ends with a slash");
    FAILS(group, ddp_fsdp_export(fsdp, long_name), DDP_ERR_INVALID, "longer than 1000 bytes");
    snprintf(path, sizeof path, "%s/no/model", folder);
    FAILS(group, ddp_fsdp_export(fsdp, path), DDP_ERR_SYSTEM, "ddp_fsdp_export", "/no/model.tmp",
          "No such file");
    snprintf(path, sizeof path, "%s/folder", folder);
    snprintf(command, sizeof command, "mkdir -p %s/folder/kept", folder);
    if (rank == 0) RANKS_CHECK(group, system(command) == 0, "%s", command);
    FAILS(group, ddp_fsdp_export(fsdp, path), DDP_ERR_SYSTEM, "cannot replace", "/folder");
    snprintf(command, sizeof command, "test \"$(ls %s)\" = folder && test -d %s/folder/kept", folder, folder);
    if (rank == 0) RANKS_CHECK(group, system(command) == 0, "%s", command);
    ddp_fsdp_destroy(fsdp);
    RANKS_CHECK(group, c.now == 0, "%zu bytes are left", c.now);
    if (world == 2 || world == 4) {
        ddp_group *part;
        RANKS_OK(group, ddp_group_split(group, rank * 2 / world, rank, &part));
        tensor_parallel(&m, rank * 2 / world, 2);
        m.desc.checkpoint_group = group;
        RANKS_OK(group, ddp_fsdp_create(&fsdp, part, &m.desc));
        FAILS(group, ddp_fsdp_export(fsdp, path), DDP_ERR_UNSUPPORTED, "ddp_fsdp_export", "parameter norm",
              "slice of a larger tensor", "use ddp_fsdp_save");
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(group, ddp_barrier(group));
        ddp_group_destroy(part);
    }
    return folder_of(group, folder, 1);
}

/* A failure of one data-parallel group is immediately an error of all ranks that save together: when ranks
   describe their units, and when they allocate memory. */
static ddp_result one_group_fails(ddp_group *group) {
    int rank = ddp_rank(group), odd = rank % 2;
    if (ddp_world_size(group) == 1) return DDP_OK;
    for (int turn = 0; turn < 4; turn++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_group *world, *part;
        counter c = {0, 0, 0, 0};
        ddp_result result;
        RANKS_OK(group, ddp_group_split(group, 0, rank, &world));
        RANKS_OK(group, ddp_group_split(group, odd, rank, &part));
        blocks(&m, 2, 6, 2);
        m.desc.checkpoint_group = world;
        m.desc.save_in_background = turn % 2;
        m.desc.alloc_fn = counted;
        m.desc.free_fn = uncounted;
        m.desc.user = &c;
        if (odd && turn < 2) m.params[1].param.value.shape[1] = -1;
        if (odd && turn >= 2) c.refuse_after = 5; /* the object and its tables are already allocated */
        result = ddp_fsdp_create(&fsdp, part, &m.desc);
        RANKS_CHECK(group, result == (turn < 2 ? DDP_ERR_INVALID : DDP_ERR_NO_MEMORY), "turn %d: %s: %s",
                    turn, ddp_result_name(result), ddp_last_error());
        if (turn < 2)
            RANKS_CHECK(group, says("unit b, parameter b: the shape"), "turn %d: %s", turn, ddp_last_error());
        RANKS_CHECK(group, turn < 2 || says("allocated"), "turn %d: %s", turn, ddp_last_error());
        RANKS_OK(group, ddp_group_status(world));
        RANKS_OK(group, ddp_group_status(part));
        ddp_fsdp_destroy(fsdp);
        RANKS_CHECK(group, c.now == 0, "%zu bytes are left", c.now);
        ddp_group_destroy(part);
        ddp_group_destroy(world);
        RANKS_OK(group, ddp_barrier(group));
    }
    return DDP_OK;
}

/* Only one rank has no checkpoint_group: the other ranks return its error, and do not wait there. */
static ddp_result no_checkpoint_group(ddp_group *group) {
    int rank = ddp_rank(group), last = ddp_world_size(group) - 1;
    if (last != 3) return DDP_OK;
    for (int turn = 0; turn < 2; turn++) {
        model m;
        ddp_fsdp *fsdp;
        ddp_group *world, *part;
        double start = ddp_now();
        RANKS_OK(group, ddp_group_split(group, 0, rank, &world));
        RANKS_OK(group, ddp_group_split(group, rank / 2, rank, &part));
        blocks(&m, 2, 6, 2);
        m.desc.checkpoint_group = rank == 1 ? NULL : world;
        if (turn && rank == 1) m.desc.prefetch = 2;
        FAILS(group, ddp_fsdp_create(&fsdp, part, &m.desc), DDP_ERR_MISMATCH,
              "rank 0 checkpoint_group=", "rank 1 checkpoint_group=");
        RANKS_CHECK(group, ddp_now() - start < 20 * DDP_TEST_SLOWDOWN, "turn %d: it took %.1f s", turn,
                    ddp_now() - start);
        RANKS_OK(group, ddp_barrier(group));
        ddp_group_destroy(part);
        ddp_group_destroy(world);
    }
    return DDP_OK;
}

//== cases ==================================================================================

static const char *only; /* name of the case to run; NULL = all */

#define CASE(test)                                                        \
    do {                                                                  \
        if (!only || !strcmp(only, #test)) RANKS_RUN(world, test(world)); \
    } while (0)

static ddp_result cases(ddp_group *world, void *user) {
    (void)user;
    CASE(bad_input);
    CASE(bad_on_one);
    CASE(bad_calls);
    CASE(descs_differ);
    CASE(wrapping);
    CASE(odd_tensors);
    CASE(states);
    CASE(steps_set);
    CASE(plain_devices);
    CASE(late_devices);
    CASE(stuck_device);
    CASE(orders_change);
    CASE(detours);
    CASE(one_looks);
    CASE(orders_differ);
    CASE(slots_differ);
    CASE(one_gives_up);
    CASE(gathers_counted);
    CASE(bytes_add_up);
    CASE(only_uses);
    CASE(hooks);
    CASE(half_gradients_are_sums);
    CASE(bytes_predicted);
    CASE(peaks_predicted);
    CASE(predictions_refused);
    CASE(bytes_of_few_units);
    CASE(bytes_limited);
    CASE(no_memory_somewhere);
    CASE(no_memory_once);
    CASE(quantized);
    CASE(quantized_learns);
    CASE(infinite_norm);
    CASE(scaled);
    CASE(offloaded);
    CASE(offload_fails);
    CASE(two_objects);
    CASE(replicas_differ);
    CASE(replicas_disorder);
    CASE(sums);
    CASE(all_frozen);
    CASE(saves_fail);
    CASE(replicas_load);
    CASE(device_checkpoint);
    CASE(scaler_state);
    CASE(other_optimizer);
    CASE(load_keeps_order);
    CASE(load_reshards);
    CASE(buffers_follow_the_root);
    CASE(buffers_of_replicas);
    CASE(buffers_are_saved);
    CASE(state_of_each_rank);
    CASE(full_on_one_rank);
    CASE(full_bad_calls);
    CASE(full_in_pieces);
    CASE(exported);
    CASE(exports_fail);
    CASE(slices_of_larger);
    CASE(one_group_fails);
    CASE(no_checkpoint_group);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 3, 4, 0};
    ranks_mode mode;
    only = getenv("DDP_TEST_CASE");
    return ranks_each(argc, argv, worlds, 120, &mode, cases) != 0;
}

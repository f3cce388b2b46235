/*  test_training.cu - a training loop over device memory has the same bits on 1, 2 and 4 ranks, and those of
    plain loops on the CPU.

    test_training processes|threads [W ...]     W divides 4. Built with -DDDP_TEST_ON_CPU it runs on the fake
                                                GPU, as test_conformance.cu.

    Two linear layers with a ReLU between, mean squared error, four micro-batches a step: accumulated
    pairwise, reduced in buckets, clipped, and stepped by AdamW. All arithmetic rounds operation by operation,
    so that the CPU computes the reference. Before that, optimizers of ddp_fsdp.h on rows of these tensors,
    and its loss scaler. */
#include "../support/device.h"

enum { IN = 33, HIDDEN = 57, OUT = 9, BATCH = 8, MICRO = 4, STEPS = 7, PARAMS = 4 };
enum { W1, B1, W2, B2 };
static const size_t lengths[PARAMS] = {HIDDEN * IN, HIDDEN, OUT *HIDDEN, OUT};
enum { TOTAL = HIDDEN * IN + HIDDEN + OUT * HIDDEN + OUT };

/* Location of gradients: placed by the reducer, adjacent, or apart. */
enum { GRADS_PLACED, GRADS_ADJACENT, GRADS_APART, GRAD_KINDS };

/* Everything is device memory, or in the reference host memory. */
typedef struct trainer {
    const ddp_device *device;
    device_rank *d; /* NULL = the reference */
    float *value[PARAMS], *grad[PARAMS], *first[PARAMS], *second[PARAMS];
    float *x, *y, *h, *error, *back; /* of a micro-batch */
    unsigned char *memory;
} trainer;

//== the model ==============================================================================

/* A number that depends on its indices, between -1 and 1, exact in f32. */
static float number(uint64_t what, uint64_t index) {
    return (float)((int64_t)(ranks_mix(what * UINT64_C(0x10000001) + index) >> 44) - (1 << 19))
           / (float)(1 << 19);
}

/* out[b][o] = bias[o] + sum over i of weight[o][i] in[b][i], then the ReLU or the difference to a target. */
struct linear {
    enum { WIDTH = 1 };
    const float *weight, *bias, *in, *target;
    float *out;
    int in_count, out_count;
    template <int N> DDP__HD void run(size_t at) const {
        size_t b = at / (size_t)out_count, o = at % (size_t)out_count;
        float sum = bias[o];
        for (int i = 0; i < in_count; i++)
            sum = ddp__cuda_add(sum, ddp__cuda_mul(weight[o * (size_t)in_count + (size_t)i],
                                                   in[b * (size_t)in_count + (size_t)i]));
        out[at] = target ? ddp__cuda_add(sum, -target[at]) : sum > 0 ? sum : 0;
    }
};

/* back[b][i] = sum over o of weight[o][i] error[b][o], where h[b][i] is not 0. */
struct backward {
    enum { WIDTH = 1 };
    const float *weight, *error, *h;
    float *back;
    int in_count, out_count;
    template <int N> DDP__HD void run(size_t at) const {
        size_t b = at / (size_t)in_count, i = at % (size_t)in_count;
        float sum = 0;
        for (int o = 0; o < out_count; o++)
            sum = ddp__cuda_add(sum, ddp__cuda_mul(weight[(size_t)o * (size_t)in_count + i],
                                                   error[b * (size_t)out_count + (size_t)o]));
        back[at] = h[at] > 0 ? sum : 0;
    }
};

/* grad[o][i] = sum over b of error[b][o] in[b][i]; in == NULL is the bias. */
struct outer {
    enum { WIDTH = 1 };
    const float *error, *in;
    float *grad;
    int in_count, out_count;
    template <int N> DDP__HD void run(size_t at) const {
        size_t o = at / (size_t)in_count, i = at % (size_t)in_count;
        float sum = 0;
        for (size_t b = 0; b < BATCH; b++) {
            float e = error[b * (size_t)out_count + o];
            sum = ddp__cuda_add(sum, in ? ddp__cuda_mul(e, in[b * (size_t)in_count + i]) : e);
        }
        grad[at] = sum;
    }
};

/* The same element code on a stream, or here. */
template <class F> static ddp_result apply(trainer *t, const F &f, size_t count) {
    if (t->d) return ddp__cuda_launch_elements(f, 0, count, t->d->stream, "test");
    for (size_t i = 0; i < count; i++) f.template run<1>(i);
    return DDP_OK;
}

static ddp_result gradients(trainer *t, ddp_group *world, int step, int micro) {
    float host[BATCH * (IN + OUT)];
    uint64_t sample = (uint64_t)(step * MICRO + micro) * BATCH;
    linear hidden = {t->value[W1], t->value[B1], t->x, NULL, t->h, IN, HIDDEN},
           top = {t->value[W2], t->value[B2], t->h, t->y, t->error, HIDDEN, OUT};
    outer w2 = {t->error, t->h, t->grad[W2], HIDDEN, OUT}, b2 = {t->error, NULL, t->grad[B2], 1, OUT};
    backward back = {t->value[W2], t->error, t->h, t->back, HIDDEN, OUT};
    outer w1 = {t->back, t->x, t->grad[W1], IN, HIDDEN}, b1 = {t->back, NULL, t->grad[B1], 1, HIDDEN};
    for (uint64_t i = 0; i < BATCH * IN; i++) host[i] = number(1, sample * IN + i);
    for (uint64_t i = 0; i < BATCH * OUT; i++) host[BATCH * IN + i] = number(2, sample * OUT + i);
    t->device->copy(t->x, host, BATCH * IN * sizeof(float));
    t->device->copy(t->y, host + BATCH * IN, BATCH * OUT * sizeof(float));
    RANKS_OK(world, apply(t, hidden, BATCH * HIDDEN));
    RANKS_OK(world, apply(t, top, BATCH * OUT));
    RANKS_OK(world, apply(t, w2, OUT * HIDDEN));
    RANKS_OK(world, apply(t, b2, OUT));
    RANKS_OK(world, apply(t, back, BATCH * HIDDEN));
    RANKS_OK(world, apply(t, w1, HIDDEN * IN));
    RANKS_OK(world, apply(t, b1, HIDDEN));
    return DDP_OK;
}

/* AdamW for one dtype of gradients. The dtype is a parameter of the template, since nvcc rejects
   ddp__cuda_update<DDP_F32, 1> in a plain function. */
template <ddp_dtype GRAD> static ddp_result adamw(trainer *t, ddp_group *world, int step) {
    ddp_cuda_step_desc descs[PARAMS] = DDP_ZERO;
    for (int i = 0; i < PARAMS; i++) {
        ddp_cuda_step_desc &desc = descs[i], d;
        desc.master = t->value[i];
        desc.grad = t->grad[i];
        desc.first = t->first[i];
        desc.second = t->second[i];
        desc.count = lengths[i];
        desc.step = step + 1;
        desc.lr = 0.01f;
        desc.weight_decay = 0.1f;
        if (t->d) continue;
        ddp__cuda_resolve_step_desc(&desc, &d);
        const ddp__cuda_update<GRAD, 1> factors = ddp__cuda_update_of<GRAD, 1>(&d);
        const ddp__cuda_step_tensor<float> tensor = {d.master, (void *)d.grad, d.first, d.second,
                                                     NULL,     NULL,           0};
        const typename ddp__cuda_update<GRAD, 1>::elements elements = {factors, tensor, 0};
        RANKS_OK(world, apply(t, elements, lengths[i]));
    }
    return t->d ? ddp_cuda_adamw(descs, PARAMS, t->d->stream) : DDP_OK;
}

//== training ===============================================================================

static ddp_result trainer_make(trainer *t, ddp_group *world, device_rank *d, int grads) {
    enum { GAP = 16, WORK = BATCH * (IN + 2 * OUT + 2 * HIDDEN), FLOATS = 4 * (TOTAL + PARAMS * GAP) + WORK };
    float host[TOTAL], *at;
    void *memory = NULL;
    memset(t, 0, sizeof *t);
    t->d = d;
    t->device = d ? ddp_device_cuda() : ddp_device_cpu();
    RANKS_OK(world, t->device->alloc(d ? d->group : world, FLOATS * sizeof(float), &memory));
    t->memory = (unsigned char *)memory;
    at = (float *)memory;
    t->x = at, at += BATCH * IN;
    t->y = at, at += BATCH * OUT;
    t->h = at, at += BATCH * HIDDEN;
    t->error = at, at += BATCH * OUT;
    t->back = at, at += BATCH * HIDDEN;
    for (int kind = 0; kind < 4; kind++)
        for (int i = PARAMS - 1; i >= 0; i--) { /* adjacent gradients are stored in the order of buckets */
            float **list = kind == 0 ? t->value : kind == 1 ? t->first : kind == 2 ? t->second : t->grad;
            list[i] = kind == 3 && grads == GRADS_PLACED ? NULL : at;
            at += lengths[i] + (kind == 3 && grads == GRADS_ADJACENT ? 0 : GAP);
        }
    for (int i = 0; i < PARAMS; i++) { /* only rank 0 has the right ones */
        for (size_t k = 0; k < lengths[i]; k++)
            host[k] = 0.2f * number(3 + (uint64_t)i, k) * (float)(ddp_rank(world) == 0);
        t->device->copy(t->value[i], host, lengths[i] * sizeof(float));
    }
    return DDP_OK;
}

static ddp_result train(ddp_group *world, device_rank *d, int grads, float *out) {
    static const char *const names[PARAMS] = {"w1", "b1", "w2", "b2"};
    ddp_group *group = d ? d->group : world;
    int rank = ddp_rank(group), each = MICRO / ddp_world_size(group), last;
    ddp_param params[PARAMS];
    ddp_reducer_desc reducer_desc = DDP_ZERO;
    ddp_accumulator_desc accumulator_desc = DDP_ZERO;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_result result;
    trainer t;
    result = trainer_make(&t, world, d, grads);
    if (result != DDP_OK) return result;
    memset(params, 0, sizeof params);
    for (int i = 0; i < PARAMS; i++) {
        params[i].name = names[i];
        params[i].value.data = t.value[i];
        params[i].value.dtype = DDP_F32;
        params[i].value.ndim = i == W1 || i == W2 ? 2 : 1;
        params[i].value.shape[0] = i == W1 || i == B1 ? HIDDEN : OUT;
        params[i].value.shape[1] = i == W1 ? IN : i == W2 ? HIDDEN : 0;
        params[i].grad.data = t.grad[i];
    }
    reducer_desc.params = params;
    reducer_desc.param_count = PARAMS;
    reducer_desc.micro_batch_count = each;
    reducer_desc.bucket_cap_bytes = 4000; /* several buckets */
    reducer_desc.first_bucket_bytes = 1000;
    RANKS_OK(world, ddp_reducer_create(&reducer, group, &reducer_desc));
    accumulator_desc.params = params;
    accumulator_desc.param_count = PARAMS;
    accumulator_desc.micro_batch_count = each;
    accumulator_desc.reducer = reducer;
    RANKS_OK(world, ddp_accumulator_create(&accumulator, group, &accumulator_desc));
    for (int i = 0; i < PARAMS; i++) t.grad[i] = (float *)params[i].grad.data;
    for (int step = 0; step < STEPS; step++) {
        float norm;
        for (int m = 0; m < each; m++) {
            result = gradients(&t, world, step, rank * each + m);
            if (result != DDP_OK) return result;
            for (int i = PARAMS - 1; i >= 0; i--) RANKS_OK(world, ddp_accumulator_ready(accumulator, i));
            RANKS_OK(world, ddp_accumulator_next(accumulator, &last));
        }
        RANKS_OK(world, ddp_reducer_wait(reducer));
        RANKS_OK(world, ddp_reducer_clip_grad_norm(reducer, 0.7f, &norm));
        RANKS_CHECK(world, norm > 0.01f, "step %d: the norm is %g", step, (double)norm);
        result = adamw<DDP_F32>(&t, world, step);
        if (result != DDP_OK) return result;
    }
    for (int i = 0; i < PARAMS; out += lengths[i++])
        t.device->copy(out, t.value[i], lengths[i] * sizeof(float));
    ddp_accumulator_destroy(accumulator);
    ddp_reducer_destroy(reducer);
    t.device->free(group, t.memory);
    return DDP_OK;
}

//== optimizers on shards ====================================================================

/* Three steps on this rank's rows; out: full tensors in host memory, into which these rows are written. d
   NULL = full tensors, on the CPU. */
static ddp_result shard_steps(ddp_group *world, device_rank *d, int kind, float *out) {
    static const size_t row_counts[PARAMS] = {HIDDEN, HIDDEN, OUT, OUT};
    ddp_group *group = d ? d->group : world;
    const ddp_device *device = d ? ddp_device_cuda() : ddp_device_cpu();
    size_t first[PARAMS], count[PARAMS], W = d ? (size_t)ddp_world_size(world) : 1,
                                         rank = d ? (size_t)ddp_rank(world) : 0;
    ddp_param params[PARAMS];
    ddp_optimizer_desc desc = DDP_ZERO;
    ddp_optimizer *optimizer;
    void *memory = NULL;
    float *at, host[TOTAL];
    RANKS_OK(world, device->alloc(group, 2 * TOTAL * sizeof(float), &memory));
    at = (float *)memory;
    memset(params, 0, sizeof params);
    for (int i = 0; i < PARAMS; i++) {
        size_t rows = row_counts[i], columns = lengths[i] / rows, share = (rows + W - 1) / W,
               begin = share * rank < rows ? share * rank : rows;
        size_t mine = rows - begin < share ? rows - begin : share;
        first[i] = begin * columns;
        count[i] = mine * columns;
        params[i].value.dtype = DDP_F32;
        params[i].value.ndim = columns > 1 ? 2 : 1;
        params[i].value.shape[0] = (int64_t)mine;
        params[i].value.shape[1] = (int64_t)columns;
        params[i].value.data = at;
        params[i].grad.data = at + TOTAL;
        at += count[i];
        for (size_t k = 0; k < count[i]; k++) host[k] = number(30 + (uint64_t)i, first[i] + k);
        device->copy(params[i].value.data, host, count[i] * sizeof(float));
    }
    desc.kind = (ddp_optimizer_kind)kind;
    desc.weight_decay = 0.1f;
    desc.momentum = 0.9f;
    desc.nesterov = kind == DDP_OPTIMIZER_SGD;
    desc.params = params;
    desc.param_count = PARAMS;
    desc.shard_group = d ? group : NULL;
    RANKS_OK(world, ddp_optimizer_create(&optimizer, group, &desc));
    for (int step = 1; step <= 3; step++) {
        for (int i = 0; i < PARAMS; i++) {
            for (size_t k = 0; k < count[i]; k++)
                host[k] = number(40 + (uint64_t)(10 * step + i), first[i] + k);
            device->copy(params[i].grad.data, host, count[i] * sizeof(float));
        }
        RANKS_OK(world, ddp_optimizer_step(optimizer, 0.01f / (float)step));
    }
    for (int i = 0; i < PARAMS; out += lengths[i++])
        device->copy(out + first[i], params[i].value.data, count[i] * sizeof(float));
    ddp_optimizer_destroy(optimizer);
    device->free(group, memory);
    return DDP_OK;
}

/* One rank at a time has a gradient that is not finite, and all ranks detect it. */
static ddp_result shard_scaler(ddp_group *world, device_rank *d) {
    const ddp_device *device = ddp_device_cuda();
    ddp_scaler scaler;
    ddp_scaler_desc desc = DDP_ZERO;
    void *memory = NULL;
    desc.groups[0] = d->group;
    desc.group_count = 1;
    desc.init_scale = 8;
    RANKS_OK(world, device->alloc(d->group, 100 * sizeof(float), &memory));
    RANKS_OK(world, ddp_scaler_init(&scaler, &desc));
    for (int culprit = 0; culprit <= ddp_world_size(world); culprit++) {
        float host[100];
        ddp_tensor tensor = {memory, DDP_F32, 1, {100}};
        for (int i = 0; i < 100; i++) host[i] = culprit == ddp_rank(world) && i == 77 ? -INFINITY : (float)i;
        device->copy(memory, host, sizeof host);
        RANKS_OK(world, ddp_scaler_unscale(&scaler, d->group, &tensor, 1));
        device->copy(host, memory, sizeof host);
        RANKS_CHECK(world, ddp_scaler_found_inf(&scaler) == (culprit < ddp_world_size(world)),
                    "culprit %d: found_inf=%d", culprit, ddp_scaler_found_inf(&scaler));
        RANKS_CHECK(world, host[76] == 76.0f / (8.0f / (float)(1 << culprit)), "culprit %d: unscaled to %g",
                    culprit, (double)host[76]);
        RANKS_OK(world, ddp_scaler_update(&scaler));
    }
    device->free(d->group, memory);
    return DDP_OK;
}

static ddp_result shards(ddp_group *world, ddp_group *alone, device_rank *d) {
    static thread_local float reference[TOTAL], mine[TOTAL];
    static const size_t row_counts[PARAMS] = {HIDDEN, HIDDEN, OUT, OUT};
    for (int kind = 0; kind < 4; kind++) {
        ddp_result result = shard_steps(alone, NULL, kind, reference);
        size_t at = 0;
        if (result == DDP_OK) result = shard_steps(world, d, kind, mine);
        if (result != DDP_OK) return result;
        for (int i = 0; i < PARAMS; at += lengths[i++]) {
            size_t columns = lengths[i] / row_counts[i],
                   share = (row_counts[i] + (size_t)ddp_world_size(world) - 1) / (size_t)ddp_world_size(world)
                           * columns;
            for (size_t k = share * (size_t)ddp_rank(world);
                 k < share * ((size_t)ddp_rank(world) + 1) && k < lengths[i]; k++)
                RANKS_CHECK(world, memcmp(&mine[at + k], &reference[at + k], 4) == 0,
                            "kind %d tensor %d: element %d is %.9g, on the CPU %.9g", kind, i, (int)k,
                            (double)mine[at + k], (double)reference[at + k]);
        }
    }
    return shard_scaler(world, d);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    static const char *const kinds[GRAD_KINDS] = {"placed", "adjacent", "apart"};
    static thread_local float reference[TOTAL], mine[TOTAL];
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *alone;
    device_rank d;
    ddp_result result;
    desc.init_method = "self://";
    RANKS_OK(world, ddp_group_create(&alone, &desc));
    result = train(alone, NULL, GRADS_PLACED, reference);
    if (result == DDP_OK) result = device_rank_open(&d, world, 64);
    if (result == DDP_OK) result = shards(world, alone, &d);
    ddp_group_destroy(alone);
    for (int grads = 0; grads < GRAD_KINDS && result == DDP_OK; grads++) {
        double moved = 0;
        result = train(world, &d, grads, mine);
        if (result != DDP_OK) break;
        for (int i = 0; i < TOTAL; i++) {
            RANKS_CHECK(world, memcmp(&mine[i], &reference[i], 4) == 0,
                        "gradients %s: parameter %d is %.9g, on the CPU %.9g", kinds[grads], i,
                        (double)mine[i], (double)reference[i]);
            moved += fabs((double)mine[i]);
        }
        RANKS_CHECK(world, moved > 1, "nothing was trained");
    }
    if (result != DDP_OK) return result;
    result = device_rank_close(&d);
    if (result != DDP_OK) return result;
    if (ddp_rank(world) == 0)
        printf("ok: %s W=%d\n", ranks_mode_name(*(ranks_mode *)user), ddp_world_size(world));
    fflush(stdout);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 4, 0};
    ranks_mode mode;
    int failures = ranks_each(argc, argv, defaults, 120, &mode, rank_main);
    return failures < 0 ? 2 : failures != 0;
}

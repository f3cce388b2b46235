/*  test_fsdp.cu - sharded training over device memory ends with the bits of one process on the CPU. It runs
    parity/test_fsdp_parity.c on groups over device memory, staged or over NCCL. After the first steps, in
    which buffers are allocated, a step never blocks the host.

    test_fsdp processes|threads [W ...]     Built with -DDDP_TEST_ON_CPU it runs on the fake GPU, as
                                            test_conformance.cu. */
#define DDP__HOST_PIECE ((size_t)64) /* many pieces with little data */
#include "../support/device.h"
#define FSDP_ON_DEVICE
#pragma push_macro("main")
#undef main
#define main parity_main
#include "../parity/test_fsdp_parity.c"
#pragma pop_macro("main")

//== steady steps ===========================================================================

enum {
    STEADY_UNITS = 3,
    STEADY_PARAMS = 2 * STEADY_UNITS,
    STEADY_STEPS = 6,
    STEADY_MICRO = 2,
    STEADY_MOST = 13 * 64
};

/* Results of one variant of stepping, and its device memory. */
typedef struct steady {
    float norm[STEADY_STEPS];
    double value[STEADY_PARAMS][STEADY_MOST];
    size_t device_bytes;
} steady;

/* The norm is queried in the step; the device decides; the optimizer runs on the host. */
enum { WAITS, DECIDES, OFFLOADED, STEADY_WAYS };

static int steady_rows(int i) { return i % 2 ? 64 : 13; }
static int steady_columns(int i) { return i % 2 ? 1 : 64; }

static ddp_result steady_fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                              void *user) {
    int columns = steady_columns(param->index);
    (void)user;
    for (int64_t i = 0; i < row_count * columns; i++)
        ((float *)out)[i] = (float)noise((uint64_t)(param->index * 1000 + first_row * columns + i));
    return DDP_OK;
}

#if defined(DDP_TEST_ON_CPU)
/* The allocation that a copy in the record names. */
static const fake_block *steady_block(int device, const std::string &name) {
    for (const std::pair<const uintptr_t, fake_block> &b : fake.blocks)
        if (b.second.device == device && b.second.name == name.substr(0, name.find('+'))) return &b.second;
    return NULL;
}

/* With offload, gradients go to the host in pieces, at least one per parameter and step, on one stream, and
   values to the device on another. still: nothing else is copied; the shards of a single rank are the
   gathered values. */
static ddp_result steady_copies(ddp_group *world, int device, const std::string &record, int way, int still,
                                const char *what) {
    std::string downs, ups;
    int down = 0, up = 0;
    for (size_t at = 0; (at = record.find("cudaMemcpyAsync(", at)) != std::string::npos;) {
        size_t comma = record.find(", ", at += 16), second = record.find(", ", comma + 2),
               end = record.find(")\n", at);
        const fake_block *dst = steady_block(device, record.substr(at, comma - at)),
                         *src = steady_block(device, record.substr(comma + 2, second - comma - 2));
        std::string stream = record.substr(record.rfind(' ', end), end - record.rfind(' ', end));
        RANKS_CHECK(world, dst && src, "%s: a copy of unknown memory in\n%s", what, record.c_str());
        if (dst->is_device && src->is_device)
            RANKS_CHECK(world, !still, "%s: one rank copies in\n%s", what, record.c_str());
        else
            dst->is_device ? (up++, ups = stream) : (down++, downs = stream);
        if (!dst->is_device)
            RANKS_CHECK(world, downs == stream, "%s: gradients come down on several streams", what);
        if (!src->is_device) RANKS_CHECK(world, ups == stream, "%s: values go up on several streams", what);
    }
    RANKS_CHECK(world,
                way == OFFLOADED ? down >= 2 * STEADY_PARAMS && up == down && ups != downs : down + up == 0,
                "%s: %d copies down on %s, %d up on %s", what, down, downs.c_str(), up, ups.c_str());
    return DDP_OK;
}

static size_t steady_bytes(int device) {
    size_t bytes = 0;
    pthread_mutex_lock(&fake.lock);
    for (const std::pair<const uintptr_t, fake_block> &b : fake.blocks)
        if (b.second.live && b.second.is_device && b.second.device == device) bytes += b.second.bytes;
    pthread_mutex_unlock(&fake.lock);
    return bytes;
}

/* Waits and allocations of this rank's host since fake_record_from_here. Staged groups wait: data passes
   through the host. */
static ddp_result steady_calls(ddp_group *world, int early, int way, int still, int most, const char *what) {
    static const char *const words[] = {
        "Synchronize",      "cudaMalloc",       "cudaFree", "cudaHost", "cudaEventCreate",
        "cudaStreamCreate", "cudaEventDestroy", "(host",    ", host",   "FAILS"};
    int device;
    if (!device_uses_nccl()) return DDP_OK;
    RANKS_CHECK(world, way == OFFLOADED || fake_mine->early == early,
                "%s: the host queried %d times whether the device has finished", what,
                fake_mine->early - early);
    fake_get_device(&device);
    std::string record = fake_record(device);
    int kernels = 0;
    for (size_t at = 0; (at = record.find("kernel(", at)) != std::string::npos; at++) kernels++;
    RANKS_CHECK(world, kernels > 0 && kernels <= most, "%s: %d kernels, at most %d are needed", what, kernels,
                most);
    for (const char *word : words)
        RANKS_CHECK(world, record.find(word) == std::string::npos, "%s: %s appears in\n%s", what, word,
                    record.c_str());
    pthread_mutex_lock(&fake.lock);
    ddp_result result = steady_copies(world, device, record, way, still, what);
    pthread_mutex_unlock(&fake.lock);
    return result;
}
#endif

static ddp_result steady_step(ddp_group *world, device_rank *d, ddp_fsdp *fsdp, ddp_fsdp_param *params,
                              const float *numbers, int step, float *norm) {
    const ddp_device *device = ddp_device_cuda();
    for (int m = 0; m < STEADY_MICRO; m++)
        for (int pass = 0; pass < 2 * STEADY_UNITS; pass++) {
            int back = pass >= STEADY_UNITS, u = back ? 2 * STEADY_UNITS - 1 - pass : pass;
            RANKS_OK(world, ddp_fsdp_unshard(fsdp, u));
            for (int i = 2 * u; i < 2 * u + 2 && back; i++) { /* gradients: some numbers plus the values */
                const ddp_param *p = &params[i].param;
                size_t count = (size_t)ddp_tensor_count(&p->value);
                ddp_cuda_use_stream(d->stream);
                device->cast(p->grad.data, p->grad.dtype, numbers + (step * 5 + m * 3 + ddp_rank(world)) * 7,
                             DDP_F32, count);
                device->add(p->grad.data, p->grad.data, p->value.data, count, p->value.dtype);
            }
            if (back) RANKS_OK(world, ddp_fsdp_reduce_grads(fsdp, u));
            RANKS_OK(world, ddp_fsdp_reshard(fsdp, u));
        }
    RANKS_OK(world, ddp_fsdp_clip_grad_norm(fsdp, step == 2 ? INFINITY : 0.25f, norm));
    RANKS_OK(world, ddp_fsdp_step(fsdp, 0.01f));
    return DDP_OK;
}

static ddp_fsdp_desc steady_desc(ddp_fsdp_param *params, ddp_fsdp_unit_desc *units, int turn, int way) {
    ddp_fsdp_desc desc = DDP_ZERO;
    memset(params, 0, STEADY_PARAMS * sizeof *params);
    memset(units, 0, STEADY_UNITS * sizeof *units);
    for (int i = 0; i < STEADY_PARAMS; i++) {
        static const char *const names[STEADY_PARAMS] = {"a.w", "a.b", "b.w", "b.b", "c.w", "c.b"};
        ddp_param *p = &params[i].param;
        p->name = names[i];
        p->value.dtype = DDP_F32;
        p->value.ndim = 2 - i % 2;
        p->value.shape[0] = steady_rows(i);
        p->value.shape[1] = i % 2 ? 0 : steady_columns(i);
        params[i].index = i;
        units[i / 2].params = &params[i / 2 * 2];
        units[i / 2].param_count = 2;
    }
    desc.units = units;
    desc.unit_count = STEADY_UNITS;
    desc.strategy = (ddp_fsdp_strategy)(turn % 4);
    desc.param_dtype = DDP_BF16;
    desc.reduce_dtype = turn % 3 ? DDP_F32 : DDP_DTYPE_DEFAULT;
    desc.micro_batch_count = STEADY_MICRO;
    desc.optimizer.kind = (ddp_optimizer_kind)((turn + turn / 4) % 4);
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = steady_fill;
    desc.offload = way == OFFLOADED ? DDP_FSDP_OFFLOAD_HOST : DDP_FSDP_OFFLOAD_NONE;
    return desc;
}

/* ddp_fsdp_predict for the ranks of a group of GPUs. */
static ddp_result predict(const ddp_fsdp_desc *desc, const ddp_group *group, ddp_fsdp_bytes *out) {
    ddp_fsdp_desc unseen = *desc;
    unseen.ranks.gpu = 1;
    return ddp_fsdp_predict(&unseen, ddp_world_size(group), out);
}

/* Compares each purpose on rank 0; the other ranks may have fewer rows. */
static ddp_result peak_is(ddp_group *world, const ddp_fsdp_bytes *peak, const ddp_fsdp_bytes *predicted) {
    for (size_t i = 0; i < sizeof *peak / sizeof(size_t) && ddp_rank(world) == 0; i++) {
        double have = (double)((const size_t *)(const void *)peak)[i];
        double want = (double)((const size_t *)(const void *)predicted)[i];
        RANKS_CHECK(world, fabs(have - want) <= 0.02 * have, "field %d: peak %.0f, predicted %.0f", (int)i,
                    have, want);
    }
    return DDP_OK;
}

/* If the host does not query the norm, the calls of steps 1 and 2 are checked. */
static ddp_result steady_run(ddp_group *world, device_rank *d, int turn, int way, const float *numbers,
                             steady *out) {
    const ddp_device *device = ddp_device_cuda();
    ddp_fsdp_param params[STEADY_PARAMS];
    ddp_fsdp_unit_desc units[STEADY_UNITS];
    ddp_fsdp_desc desc = steady_desc(params, units, turn, way);
    ddp_fsdp *fsdp;
    ddp_fsdp_memory before, after;
#if defined(DDP_TEST_ON_CPU)
    int early = 0, number;
#endif
    float norm;
    ddp_fsdp_bytes predicted;
    RANKS_OK(world, predict(&desc, d->group, &predicted));
    RANKS_OK(world, ddp_fsdp_create(&fsdp, d->group, &desc));
    RANKS_CHECK(world,
                ddp_fsdp_get_norm(fsdp, &norm) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "ddp_fsdp_clip_grad_norm first"),
                "%s", ddp_last_error());
    for (int s = 0; s < STEADY_STEPS; s++) {
        if (s == 1) RANKS_OK(world, ddp_fsdp_get_memory(fsdp, &before));
#if defined(DDP_TEST_ON_CPU)
        RANKS_OK(world, ddp_barrier(world));
        if (s == 1 && ddp_rank(world) == 0) fake_record_from_here();
        if (s == 1) early = fake_mine->early;
        RANKS_OK(world, ddp_barrier(world));
#endif
        RANKS_OK(world, steady_step(world, d, fsdp, params, numbers, s, way == WAITS ? &norm : NULL));
#if defined(DDP_TEST_ON_CPU)
        /* Of rows on the host, added by NCCL. */
        int norms = way == OFFLOADED && desc.optimizer.kind >= DDP_OPTIMIZER_LAMB
                    && ddp_world_size(world) > 1;
        /* The others keep micro-batches of full gradients. */
        int still = ddp_world_size(world) == 1 && desc.strategy <= DDP_FSDP_SHARD_GRAD;
        /* Of 2 steps. For each of 6 parameters and 2 micro-batches: 2 that make gradients here; for each
           parameter: micro-batches added. For each unit: a cast of the gradients of each micro-batch. For
           all: divided, squares, the norm; AdamW of matrices and of vectors, which also write the new values
           in bf16; offloaded, gradients are clipped instead. */
        int update = way == OFFLOADED ? 1 : 2;
        int most = still && turn == 0 ? 2 * (6 * 2 * 2 + 6 + 3 * 2 + 3 + update) : INT32_MAX;
        if (s == 2 && way != WAITS && !norms)
            RANKS_OK(world, steady_calls(world, early, way, still, most, strategies[desc.strategy]));
#endif
        /* Step 2 follows step 1 at once. */
        if (way != WAITS) RANKS_OK(world, s == 1 ? DDP_OK : ddp_fsdp_get_norm(fsdp, &norm));
        out->norm[s] = norm;
    }
    RANKS_OK(world, ddp_fsdp_get_memory(fsdp, &after));
    RANKS_CHECK(world, memcmp(&before, &after, sizeof before) == 0, "%s: memory was taken in a later step",
                strategies[desc.strategy]);
    RANKS_OK(world, peak_is(world, &after.peak, &predicted));
    size_t elsewhere = after.now.total - after.now.bookkeeping - after.now.device;
    RANKS_CHECK(world, (way == OFFLOADED) == (elsewhere > 0), "%s, way %d: %zu bytes in host memory",
                strategies[desc.strategy], way, elsewhere);
    for (int i = 0; i < STEADY_PARAMS; i++) {
        ddp_tensor rows;
        float near[STEADY_MOST];
        int64_t own;
        RANKS_OK(world, ddp_fsdp_get_shard(fsdp, i / 2, i % 2, &rows, NULL, NULL));
        own = ddp_tensor_count(&rows);
        RANKS_CHECK(world, own >= 0 && own <= STEADY_MOST, "parameter %d: %d elements", i, (int)own);
        if (rows.data && way == OFFLOADED)
            memcpy(near, rows.data, (size_t)own * sizeof near[0]);
        else if (rows.data)
            device->copy(near, rows.data, (size_t)own * sizeof near[0]);
        for (int k = 0; k < (int)own; k++) out->value[i][k] = (double)near[k];
    }
    RANKS_OK(world, ddp_cuda_check());
#if defined(DDP_TEST_ON_CPU)
    fake_get_device(&number);
    out->device_bytes = steady_bytes(number);
#endif
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

static ddp_result steady_main(ddp_group *world, void *user) {
    float numbers[STEADY_MOST + 512];
    static thread_local steady ended[STEADY_WAYS];
    device_rank d;
    void *memory;
    (void)user;
    RANKS_OK(world, device_rank_open(&d, world, 64));
    RANKS_OK(world, ddp_device_cuda()->alloc(d.group, sizeof numbers, &memory));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) numbers[i] = (float)noise(77 + i);
    ddp_device_cuda()->copy(memory, numbers, sizeof numbers);
    for (int turn = 0; turn < 8; turn++) {
        memset(ended, 0, sizeof ended);
        for (int way = WAITS; way < STEADY_WAYS; way++)
            RANKS_OK(world, steady_run(world, &d, turn, way, (const float *)memory, &ended[way]));
        RANKS_CHECK(world, ended[WAITS].norm[0] > 0.25f, "turn %d: norm %g clips nothing", turn,
                    (double)ended[WAITS].norm[0]);
        for (int way = DECIDES; way < STEADY_WAYS; way++) {
            for (int s = 0; s < STEADY_STEPS; s++)
                RANKS_CHECK(world,
                            s == 1 || memcmp(&ended[WAITS].norm[s], &ended[way].norm[s], sizeof(float)) == 0,
                            "turn %d, way %d, step %d: norm %.9g, want %.9g", turn, way, s,
                            (double)ended[way].norm[s], (double)ended[WAITS].norm[s]);
            RANKS_CHECK(world, memcmp(ended[WAITS].value, ended[way].value, sizeof ended[way].value) == 0,
                        "turn %d, way %d: other values", turn, way);
        }
        /* Elements of state on this rank: two moments and a master copy if the optimizer is AdamW. */
        size_t mine = 0;
        /* The last rank has fewest. */
        for (int i = 0, shares = turn % 4 == DDP_FSDP_NO_SHARD ? 1 : ddp_world_size(world); i < STEADY_PARAMS;
             i++)
            mine += (size_t)((steady_rows(i) - (shares - 1) * ((steady_rows(i) + shares - 1) / shares))
                             * steady_columns(i));
        RANKS_CHECK(world,
                    ended[OFFLOADED].device_bytes + (turn ? 0 : 12 * mine) <= ended[DECIDES].device_bytes,
                    "turn %d: offloaded, %zu bytes of the device, otherwise %zu", turn,
                    ended[OFFLOADED].device_bytes, ended[DECIDES].device_bytes);
    }
    ddp_device_cuda()->free(d.group, memory);
    return device_rank_close(&d);
}

//== buffers and full parameters ============================================================

/* In device memory: a vector and, 64 bytes after it, a counter. */
typedef struct device_buffers {
    float mean[16];
    int64_t steps;
} device_buffers;

static ddp_result buffers_put(device_rank *d, void *memory, int value) {
    device_buffers b;
    for (int i = 0; i < 16; i++) b.mean[i] = (float)(value + i);
    b.steps = value;
    ddp_cuda_use_stream(d->stream);
    ddp_device_cuda()->copy(memory, &b, sizeof b);
    return ddp_cuda_check();
}

static ddp_result buffers_check(ddp_group *world, device_rank *d, const void *memory, int value,
                                const char *what) {
    device_buffers b;
    RANKS_OK(world, device_down(d, &b, memory, sizeof b));
    RANKS_CHECK(world, b.mean[0] == (float)value && b.mean[15] == (float)(value + 15) && b.steps == value,
                "%s: mean %g to %g, steps %lld, want %d", what, (double)b.mean[0], (double)b.mean[15],
                (long long)b.steps, value);
    return DDP_OK;
}

/* A rank receives each parameter in host memory: the rows that ddp_fsdp_get_shard has on every rank. */
static ddp_result full_check(ddp_group *world, ddp_fsdp *fsdp, const ddp_fsdp_param *params, int on_host,
                             const char *what) {
    for (int i = 0; i < STEADY_PARAMS; i++) {
        float full[STEADY_MOST] = {0}, near[STEADY_MOST] = {0};
        int root = i % ddp_world_size(world);
        ddp_tensor out = params[i].param.value, rows;
        int64_t first;
        out.dtype = DDP_F32;
        out.data = full;
        RANKS_OK(world, ddp_fsdp_get_full(fsdp, i / 2, i % 2, root, &out));
        RANKS_CHECK(world, (full[1] != 0) == (ddp_rank(world) == root), "%s: parameter %d: %g", what, i,
                    (double)full[1]);
        RANKS_OK(world, ddp_broadcast(world, full, STEADY_MOST, DDP_F32, root, NULL));
        RANKS_OK(world, ddp_fsdp_get_shard(fsdp, i / 2, i % 2, &rows, NULL, &first));
        size_t bytes = (size_t)ddp_tensor_count(&rows) * sizeof(float);
        if (rows.data && on_host) memcpy(near, rows.data, bytes);
        if (rows.data && !on_host) ddp_device_cuda()->copy(near, rows.data, bytes);
        RANKS_CHECK(world, memcmp(near, full + first * steady_columns(i), bytes) == 0,
                    "%s: parameter %d differs from the shard", what, i);
    }
    return DDP_OK;
}

static ddp_result full_run(ddp_group *world, device_rank *d, int turn, const float *numbers, void *memory,
                           const char *folder) {
    const char *what = turn < 4 ? strategies[turn] : "OFFLOAD_PARAMS";
    const ddp_tensor buffers[2] = {{memory, DDP_F32, 1, {16}}, {(float *)memory + 16, DDP_I64, 0, {0}}};
    static const char *const names[2] = {"norm.mean", "norm.steps"};
    int rank = ddp_rank(world), last = ddp_world_size(world) - 1, on_host = turn & 1 || turn == 4;
    ddp_fsdp_param params[STEADY_PARAMS];
    ddp_fsdp_unit_desc units[STEADY_UNITS];
    ddp_fsdp_desc desc = steady_desc(params, units, turn, on_host ? OFFLOADED : DECIDES);
    ddp_fsdp *fsdp;
    char path[128];
    if (turn == 4) desc.offload = DDP_FSDP_OFFLOAD_PARAMS;
    desc.buffers = buffers;
    desc.buffer_names = names;
    desc.buffer_count = 2;
    RANKS_OK(world, buffers_put(d, memory, 10 + rank));
    RANKS_OK(world, ddp_fsdp_create(&fsdp, d->group, &desc));
    RANKS_OK(world, buffers_check(world, d, memory, 10, what));
    RANKS_OK(world, steady_step(world, d, fsdp, params, numbers, 0, NULL));
    RANKS_OK(world, buffers_put(d, memory, 20 + rank));
#if defined(DDP_TEST_ON_CPU)
    int device;
    fake_get_device(&device);
    RANKS_OK(world, ddp_barrier(world));
    if (rank == 0) fake_record_from_here();
    RANKS_OK(world, ddp_barrier(world));
#endif
    RANKS_OK(world, ddp_fsdp_sync_buffers(fsdp, last));
#if defined(DDP_TEST_ON_CPU)
    /* One broadcast of both buffers, which one kernel packs or unpacks. */
    std::string record = fake_record(device);
    int sent = 0, kernels = 0;
    for (size_t at = 0; (at = record.find("ncclBroadcast(", at)) != std::string::npos; at++) sent++;
    for (size_t at = 0; (at = record.find("kernel(", at)) != std::string::npos; at++) kernels++;
    int want = last > 0;
    RANKS_CHECK(world, !device_uses_nccl() || (sent == want && kernels == want), "%d broadcasts, %d kernels",
                sent, kernels);
    RANKS_OK(world, ddp_barrier(world)); /* no rank continues before all have read */
#endif
    RANKS_OK(world, buffers_check(world, d, memory, 20 + last, what));
    RANKS_OK(world, full_check(world, fsdp, params, on_host, what));
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    RANKS_OK(world, ddp_fsdp_export(fsdp, path));
    RANKS_OK(world, steady_step(world, d, fsdp, params, numbers, 1, NULL));
    RANKS_OK(world, buffers_put(d, memory, 30 + rank));
    RANKS_OK(world, ddp_fsdp_load(fsdp, folder));
    RANKS_OK(world, buffers_check(world, d, memory, 20 + last, what));
    RANKS_OK(world, full_check(world, fsdp, params, on_host, what));
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* Under every strategy, and with offload: buffers in device memory follow their root, full parameters and an
   exported file have the values of the shards. */
static ddp_result full_main(ddp_group *world, void *user) {
    const ddp_device *device = ddp_device_cuda();
    float numbers[STEADY_MOST + 512];
    int64_t pid = getpid();
    char folder[80], command[200];
    device_rank d;
    void *memory, *buffers;
    (void)user;
    RANKS_OK(world, device_rank_open(&d, world, sizeof(device_buffers)));
    RANKS_OK(world, device->alloc(d.group, sizeof numbers, &memory));
    RANKS_OK(world, device->alloc(d.group, sizeof(device_buffers), &buffers));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) numbers[i] = (float)noise(77 + i);
    device->copy(memory, numbers, sizeof numbers);
    RANKS_OK(world, ddp_broadcast(world, &pid, 1, DDP_I64, 0, NULL));
    snprintf(folder, sizeof folder, "/tmp/ddp-fsdp-device-%lld", (long long)pid);
    snprintf(command, sizeof command, "rm -rf %s && mkdir %s", folder, folder);
    if (ddp_rank(world) == 0) RANKS_CHECK(world, system(command) == 0, "%s", command);
    RANKS_OK(world, ddp_barrier(world));
    for (int turn = 0; turn < 5; turn++)
        RANKS_OK(world, full_run(world, &d, turn, (const float *)memory, buffers, folder));
    RANKS_OK(world, ddp_barrier(world));
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (ddp_rank(world) == 0) RANKS_CHECK(world, system(command) == 0, "%s", command);
    device->free(d.group, buffers);
    device->free(d.group, memory);
    return device_rank_close(&d);
}

#if defined(DDP_TEST_ON_CPU)
/* ---- calls of a step ---- */

enum { CALLS_BLOCKS = 12, CALLS_PARAMS = 148, CALLS_UNITS = CALLS_BLOCKS + 3, CALLS_RANKS = 8 };

static ddp_result calls_fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                             void *user) {
    int64_t columns = param->param.value.ndim > 1 ? param->param.value.shape[1] : 1;
    (void)user;
    for (int64_t i = 0; i < row_count * columns; i++)
        ((float *)out)[i] = (float)noise((uint64_t)(param->index * 10007 + first_row * columns + i));
    return DDP_OK;
}

/* The parameters of GPT-2, narrow, in 15 units: wte; wpe; 12 blocks of 12 parameters; the last layer norm. */
static ddp_fsdp_desc calls_desc(ddp_fsdp_param *params, ddp_fsdp_unit_desc *units, char (*names)[16]) {
    static const int rows[12] = {128, 128, 384, 384, 128, 128, 128, 128, 512, 512, 128, 128};
    static const int columns[12] = {0, 0, 16, 0, 16, 0, 0, 0, 16, 0, 64, 0};
    static const int embedded[2] = {640, 256};
    ddp_fsdp_desc desc = DDP_ZERO;
    memset(params, 0, CALLS_PARAMS * sizeof *params);
    memset(units, 0, CALLS_UNITS * sizeof *units);
    for (int i = 0; i < CALLS_PARAMS; i++) {
        int unit = i < 2 ? i : 2 + (i - 2) / 12;
        int k = (i - 2) % 12;
        ddp_param *p = &params[i].param;
        snprintf(names[i], sizeof names[i], "p%d", i);
        p->name = names[i];
        p->value.dtype = DDP_F32;
        p->value.shape[0] = i < 2 ? embedded[i] : rows[k];
        p->value.shape[1] = i < 2 ? 16 : columns[k];
        p->value.ndim = p->value.shape[1] ? 2 : 1;
        params[i].index = i;
        if (!units[unit].params) units[unit].params = &params[i];
        units[unit].param_count++;
    }
    desc.units = units;
    desc.unit_count = CALLS_UNITS;
    desc.param_dtype = DDP_BF16;
    desc.overwrite_gradients = 1;
    desc.init_fn = calls_fill;
    return desc;
}

/* The number of times that word appears in the record. */
static int calls_count(const std::string &record, const char *word) {
    int count = 0;
    for (size_t at = 0; (at = record.find(word, at)) != std::string::npos; at++) count++;
    return count;
}

/* Calls of CUDA on each of 8 ranks in the third step, without the optimizer. Gradients are bf16, their sums
   f32, and all rows divide by 8. 3 all-gathers, of wte and wpe, receive in place. 25 are unpacked, 24 of
   them from 96 ranges. 15 reduce-scatters receive the sums in place. With one call per parameter and rank, a
   step made 3984 calls, and now makes 76:

                              copies   casts   fills with zero   kernels now
       pack for all-gathers      293                                       0
       unpack                   2344                                      49
       pack gradients                   1184                15            27
       unpack sums               148                                       0

   The all-gather of the next unit comes before the kernels that unpack this one, on another stream. */
static ddp_result calls_steps(ddp_group *world, void *user) {
    ddp_fsdp_param params[CALLS_PARAMS];
    ddp_fsdp_unit_desc units[CALLS_UNITS];
    char names[CALLS_PARAMS][16];
    ddp_fsdp_desc desc = calls_desc(params, units, names);
    ddp_cuda_desc cuda = DDP_ZERO;
    ddp_group *group;
    ddp_fsdp *fsdp;
    device_rank d;
    int device;
    (void)user;
    RANKS_OK(world, device_rank_open(&d, world, 64));
    fake_get_device(&device);
    const std::string compute = "kernel(" + fake_name(d.stream) + ")";
    cuda.engine = DDP_CUDA_ENGINE_NCCL;
    cuda.stream = d.stream;
    RANKS_OK(world, ddp_cuda_group_create(&group, world, &cuda));
    RANKS_OK(world, ddp_fsdp_create(&fsdp, group, &desc));
    for (int step = 0; step < 3; step++) {
        std::string record;
        size_t at = 0;
        RANKS_OK(world, ddp_barrier(world));
        if (ddp_rank(world) == 0) fake_record_from_here();
        RANKS_OK(world, ddp_barrier(world));
        for (int pass = 0; pass < 2 * CALLS_UNITS; pass++) {
            int back = pass >= CALLS_UNITS, u = back ? 2 * CALLS_UNITS - 1 - pass : pass;
            RANKS_OK(world, ddp_fsdp_unshard(fsdp, u));
            record = fake_record(device).substr(at);
            size_t kernel = record.find("kernel("), gather = record.rfind("ncclAllGather(");
            RANKS_CHECK(world, step == 0 || gather == std::string::npos || gather < kernel,
                        "step %d, unit %d: the next all-gather follows the kernels in\n%s", step, u,
                        record.c_str());
            RANKS_CHECK(world, calls_count(record, "kernel(") == calls_count(record, compute.c_str()),
                        "step %d, unit %d: not all kernels are on the compute stream in\n%s", step, u,
                        record.c_str());
            if (back) RANKS_OK(world, ddp_fsdp_reduce_grads(fsdp, u));
            RANKS_OK(world, ddp_fsdp_reshard(fsdp, u));
            at = fake_record(device).size();
        }
        record = fake_record(device);
        int kernels = calls_count(record, "kernel("), copies = calls_count(record, "cudaMemcpyAsync(");
        int fills = calls_count(record, "cudaMemsetAsync("), gathers = calls_count(record, "ncclAllGather(");
        int reduces = calls_count(record, "ncclReduceScatter(");
        RANKS_CHECK(world, step < 2 || (copies == 0 && fills == 0 && kernels == 49 + 27),
                    "%d copies, %d fills with zero, %d kernels", copies, fills, kernels);
        RANKS_CHECK(world, step < 2 || (gathers == 28 && reduces == 15), "%d all-gathers, %d reduce-scatters",
                    gathers, reduces);
        RANKS_OK(world, ddp_fsdp_step(fsdp, 0.01f));
    }
    ddp_fsdp_destroy(fsdp);
    ddp_group_destroy(group);
    return device_rank_close(&d);
}

/* ---- OFFLOAD_PARAMS ---- */

enum { STREAM_UNITS = 40, STREAM_ROWS = 64, STREAM_COLUMNS = 32, STREAM_STEPS = 3, STREAM_MICRO = 2 };
enum { STREAM_MOST = STREAM_ROWS * STREAM_COLUMNS, STREAM_BUDGET = 80 * 1024 };

typedef struct stream_model {
    ddp_fsdp_param params[2 * STREAM_UNITS];
    ddp_fsdp_unit_desc units[STREAM_UNITS];
    char names[2 * STREAM_UNITS][16];
    ddp_fsdp_desc desc;
    std::vector<float> ended; /* master values of this rank */
    size_t device_bytes;      /* what the ddp_fsdp takes of the device */
} stream_model;

static void stream_describe(stream_model *m, int units, ddp_fsdp_offload offload) {
    memset((void *)m->params, 0, sizeof m->params);
    memset((void *)m->units, 0, sizeof m->units);
    memset((void *)&m->desc, 0, sizeof m->desc);
    for (int i = 0; i < 2 * units; i++) {
        ddp_param *p = &m->params[i].param;
        snprintf(m->names[i], sizeof m->names[i], "p%d", i);
        p->name = m->names[i];
        p->value.dtype = DDP_F32;
        p->value.ndim = 2 - i % 2;
        p->value.shape[0] = STREAM_ROWS;
        p->value.shape[1] = i % 2 ? 0 : STREAM_COLUMNS;
        m->params[i].index = i;
        m->units[i / 2].params = &m->params[i / 2 * 2];
        m->units[i / 2].param_count = 2;
    }
    m->desc.units = m->units;
    m->desc.unit_count = units;
    m->desc.param_dtype = DDP_BF16;
    m->desc.micro_batch_count = STREAM_MICRO;
    m->desc.offload = offload;
    m->desc.init_fn = calls_fill;
}

/* The words between the brackets of a line of the record. */
static std::vector<std::string> stream_words(const std::string &line) {
    std::vector<std::string> words;
    size_t at = line.find('(') + 1, end = line.rfind(')');
    while (at < end) {
        size_t comma = std::min(line.find(", ", at), end);
        words.push_back(line.substr(at, comma - at));
        at = comma + 2;
    }
    return words;
}

/* The copies of one step, which begins and ends with the first unit prefetched. A unit is copied to the
   device once per pass, except where a pass begins with the unit that the last one ended with. */
static ddp_result stream_copies(ddp_group *world, ddp_group *group, int device, const std::string &record) {
    const ddp__cuda_streams *streams = ddp__cuda_streams_of(group);
    const std::string copy = fake_name(streams->stream[DDP_STREAM_COPY]),
                      comm = fake_name(streams->stream[DDP_STREAM_COMM]);
    const size_t rows = STREAM_ROWS / (size_t)ddp_world_size(world), elements = rows * (STREAM_COLUMNS + 1);
    std::map<std::string, std::pair<std::string, int>>
        recorded;                              /* event: its stream, and all-gathers before */
    std::string waited;                        /* the event that the copy stream waited for */
    size_t to_device[2] = {0, 0}, to_host = 0; /* by copy and communication stream */
    int gathers = 0, copies = 0;
    for (size_t at = 0, end; (end = record.find('\n', at)) != std::string::npos; at = end + 1) {
        const std::string line = record.substr(at, end - at);
        const std::vector<std::string> words = stream_words(line);
        if (line.find("ncclAllGather(") == 0) gathers++;
        if (line.find("cudaEventRecord(") == 0) recorded[words[0]] = std::make_pair(words[1], gathers);
        if (line.find("cudaStreamWaitEvent(" + copy) == 0) waited = words[1];
        if (line.find("cudaMemcpyAsync(") != 0) continue;
        const fake_block *dst = steady_block(device, words[0]), *src = steady_block(device, words[1]);
        const size_t bytes = (size_t)atoll(words[2].c_str());
        RANKS_CHECK(world, dst && src && dst->is_device != src->is_device, "unexpected: %s", line.c_str());
        RANKS_CHECK(world, words[4] == comm || (words[4] == copy && dst->is_device), "stream: %s",
                    line.c_str());
        *(dst->is_device ? &to_device[words[4] == comm] : &to_host) += bytes;
        if (words[4] != copy) continue;
        /* it waits for the all-gather before the last; on one rank, for earlier work of that stream */
        const std::pair<std::string, int> &from = recorded[waited];
        RANKS_CHECK(world, ++copies < 3 || from.first == comm, "a copy waits for %s", from.first.c_str());
        RANKS_CHECK(world, copies < 3 || ddp_world_size(world) == 1 || from.second == gathers - 1,
                    "copy %d waits for all-gather %d of %d", copies, from.second, gathers);
    }
    const size_t fetches = STREAM_MICRO * (2 * STREAM_UNITS - 2) + 1, sums = STREAM_UNITS * 4 * elements;
    RANKS_CHECK(world, to_device[0] == fetches * 2 * elements, "%zu bytes of rows to the device, want %zu",
                to_device[0], fetches * 2 * elements);
    RANKS_CHECK(world, to_host == STREAM_MICRO * sums && to_device[1] == (STREAM_MICRO - 1) * sums,
                "sums: %zu bytes to the host, %zu to the device; a unit's are %zu", to_host, to_device[1],
                sums / STREAM_UNITS);
    return DDP_OK;
}

static ddp_result stream_step(ddp_group *world, ddp_group *group, cudaStream_t stream, ddp_fsdp *fsdp,
                              stream_model *m, const float *numbers, int step, int checks) {
    const ddp_device *device = ddp_device_cuda();
    int number, early = fake_mine->early, last = 2 * m->desc.unit_count - 1;
    fake_get_device(&number);
    for (int pass = 0; pass < STREAM_MICRO * (last + 1); pass++) {
        int back = pass % (last + 1) > last / 2;
        int u = back ? last - pass % (last + 1) : pass % (last + 1);
        size_t at = checks ? fake_record(number).size() : 0;
        RANKS_OK(world, ddp_fsdp_unshard(fsdp, u));
        /* the copy of the next unit is issued before any work of the caller's stream */
        if (checks && u > 0 && u < last / 2) {
            const std::string record = fake_record(number).substr(at),
                              name = fake_name(ddp__cuda_streams_of(group)->stream[DDP_STREAM_COPY]);
            size_t copy = record.find("Default, " + name + ")"), kernel = record.find("kernel(");
            RANKS_CHECK(world, copy != std::string::npos && copy < kernel, "unit %d is not ahead:\n%s", u,
                        record.c_str());
        }
        for (int i = 2 * u; i < 2 * u + 2 && back; i++) {
            const ddp_param *p = &m->params[i].param;
            size_t count = (size_t)ddp_tensor_count(&p->value);
            ddp_cuda_use_stream(stream);
            device->cast(p->grad.data, p->grad.dtype, numbers + (step * 5 + pass + ddp_rank(world)) % 512,
                         DDP_F32, count);
            device->add(p->grad.data, p->grad.data, p->value.data, count, p->value.dtype);
        }
        if (back) RANKS_OK(world, ddp_fsdp_reduce_grads(fsdp, u));
        RANKS_OK(world, ddp_fsdp_reshard(fsdp, u));
    }
    if (checks) {
        const std::string record = fake_record(number);
        for (const char *word :
             {"Synchronize", "cudaMalloc", "cudaFree", "cudaHost", "Create", "(host", ", host"})
            RANKS_CHECK(world, record.find(word) == std::string::npos, "%s in\n%s", word, record.c_str());
        RANKS_CHECK(world, fake_mine->early == early, "the host waited %d times", fake_mine->early - early);
    }
    RANKS_OK(world, ddp_fsdp_clip_grad_norm(fsdp, 0.25f, NULL));
    RANKS_OK(world, ddp_fsdp_step(fsdp, 0.01f));
    if (!checks) return DDP_OK;
    const std::string record = fake_record(number);
    pthread_mutex_lock(&fake.lock);
    ddp_result result = stream_copies(world, group, number, record);
    pthread_mutex_unlock(&fake.lock);
    return result;
}

/* Steps from `first` on, after a load unless that is 0. Saves before the last step if `saves`. */
static ddp_result stream_run(ddp_group *world, ddp_group *group, cudaStream_t stream, stream_model *m,
                             const float *numbers, int first, int saves) {
    ddp_fsdp *fsdp;
    ddp_fsdp_memory memory;
    char dir[64];
    int number;
    snprintf(dir, sizeof dir, "/tmp/ddp-stream-%d", (int)getpid());
    fake_get_device(&number);
    size_t before = steady_bytes(number);
    ddp_fsdp_bytes predicted;
    RANKS_OK(world, predict(&m->desc, group, &predicted));
    RANKS_OK(world, ddp_fsdp_create(&fsdp, group, &m->desc));
    if (first) RANKS_OK(world, ddp_fsdp_load(fsdp, dir));
    for (int step = first; step < STREAM_STEPS; step++) {
        if (saves && step == STREAM_STEPS - 1) {
            RANKS_OK(world, ddp_fsdp_get_memory(fsdp, &memory));
            RANKS_OK(world, peak_is(world, &memory.peak, &predicted));
            RANKS_OK(world, ddp_fsdp_save(fsdp, dir));
        }
        RANKS_OK(world, ddp_barrier(world));
        if (ddp_rank(world) == 0) fake_record_from_here();
        RANKS_OK(world, ddp_barrier(world));
        int checks = step == STREAM_STEPS - 1 && !first && m->desc.offload == DDP_FSDP_OFFLOAD_PARAMS
                     && m->desc.unit_count == STREAM_UNITS;
        RANKS_OK(world, stream_step(world, group, stream, fsdp, m, numbers, step, checks));
    }
    m->device_bytes = steady_bytes(number) - before;
    m->ended.clear();
    for (int i = 0; i < 2 * m->desc.unit_count; i++) {
        ddp_tensor rows;
        float near[STREAM_MOST];
        RANKS_OK(world, ddp_fsdp_get_shard(fsdp, i / 2, i % 2, &rows, NULL, NULL));
        ddp_device_cuda()->copy(near, rows.data, ddp_tensor_bytes(&rows));
        m->ended.insert(m->ended.end(), near, near + ddp_tensor_count(&rows));
    }
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

/* Shards that are larger than the device. The bits are those of a device that has room for it, also
   after a checkpoint of either kind. The device memory does not depend on the number of units. */
static ddp_result stream_main(ddp_group *world, void *user) {
    static thread_local stream_model plain, offloaded, half, resumed[2];
    float numbers[STREAM_MOST + 512];
    device_rank d;
    ddp_cuda_desc cuda = DDP_ZERO;
    ddp_group *group;
    ddp_fsdp *fsdp;
    void *memory;
    int number;
    (void)user;
    RANKS_OK(world, device_rank_open(&d, world, 64));
    fake_get_device(&number);
    cuda.engine = DDP_CUDA_ENGINE_NCCL;
    cuda.order = DDP_ORDER_TREE;
    cuda.stream = d.stream;
    RANKS_OK(world, ddp_cuda_group_create(&group, world, &cuda));
    RANKS_OK(world, ddp_device_cuda()->alloc(group, sizeof numbers, &memory));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) numbers[i] = (float)noise(77 + i);
    ddp_device_cuda()->copy(memory, numbers, sizeof numbers);
    stream_describe(&plain, STREAM_UNITS, DDP_FSDP_OFFLOAD_NONE);
    RANKS_OK(world, stream_run(world, group, d.stream, &plain, (float *)memory, 0, 0));
    stream_describe(&half, STREAM_UNITS / 2, DDP_FSDP_OFFLOAD_PARAMS);
    RANKS_OK(world, stream_run(world, group, d.stream, &half, (float *)memory, 0, 0));
    size_t total = fake.device[number].total, shard = plain.ended.size() * 2;
    RANKS_CHECK(world, shard > STREAM_BUDGET, "a shard of %zu bytes fits", shard);
    RANKS_OK(world, ddp_barrier(world));
    fake.device[number].total = fake.device[number].held + STREAM_BUDGET;
    RANKS_OK(world, ddp_barrier(world));
    stream_describe(&offloaded, STREAM_UNITS, DDP_FSDP_OFFLOAD_HOST);
    ddp_result result = ddp_fsdp_create(&fsdp, group, &offloaded.desc);
    RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY, "%s: %s", ddp_result_name(result), ddp_last_error());
    stream_describe(&offloaded, STREAM_UNITS, DDP_FSDP_OFFLOAD_PARAMS);
    RANKS_OK(world, stream_run(world, group, d.stream, &offloaded, (float *)memory, 0, 1));
    RANKS_CHECK(world, offloaded.ended == plain.ended, "other values");
    RANKS_CHECK(world, offloaded.device_bytes == half.device_bytes, "%zu bytes, %zu with half the units",
                offloaded.device_bytes, half.device_bytes);
    RANKS_OK(world, ddp_barrier(world));
    for (int turn = 0; turn < 2; turn++) {
        if (turn) fake.device[number].total = total;
        RANKS_OK(world, ddp_barrier(world));
        stream_describe(&resumed[turn], STREAM_UNITS, turn ? DDP_FSDP_OFFLOAD_NONE : DDP_FSDP_OFFLOAD_PARAMS);
        RANKS_OK(world,
                 stream_run(world, group, d.stream, &resumed[turn], (float *)memory, STREAM_STEPS - 1, 0));
        RANKS_CHECK(world, resumed[turn].ended == plain.ended, "turn %d: other values after a load", turn);
    }
    ddp_device_cuda()->free(group, memory);
    ddp_group_destroy(group);
    return device_rank_close(&d);
}

enum { TIED_UNITS = 3, TIED_PARAMS = 4, TIED_ROWS = 10, TIED_COLUMNS = 8, TIED_STEPS = 3 };

/* Full values of every step, of 4 parameters in 3 units. The last unit shares a value of the first one, and a
   step unshards it first: with prefetch three units are then in flight. They have two buffers for gathered
   blocks, so that one unit is unpacked early. */
static ddp_result tied_run(ddp_group *world, device_rank *d, int prefetch,
                           float (*out)[TIED_PARAMS][TIED_ROWS * TIED_COLUMNS]) {
    static const char *const names[TIED_PARAMS] = {"embedding", "w", "head", "v"};
    static const int first[TIED_UNITS + 1] = {0, 1, 2, 4};
    ddp_fsdp_param params[TIED_PARAMS];
    ddp_fsdp_unit_desc units[TIED_UNITS];
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp;
    memset(params, 0, sizeof params);
    memset(units, 0, sizeof units);
    for (int i = 0; i < TIED_PARAMS; i++) {
        ddp_param *p = &params[i].param;
        p->name = names[i];
        p->value.dtype = DDP_F32;
        p->value.ndim = 2;
        p->value.shape[0] = TIED_ROWS;
        p->value.shape[1] = TIED_COLUMNS;
        params[i].index = i;
    }
    params[2].tied_to = "embedding";
    for (int u = 0; u < TIED_UNITS; u++) {
        units[u].params = &params[first[u]];
        units[u].param_count = first[u + 1] - first[u];
    }
    desc.units = units;
    desc.unit_count = TIED_UNITS;
    desc.strategy = DDP_FSDP_SHARD_GRAD;
    desc.prefetch = prefetch;
    desc.init_fn = calls_fill;
    desc.optimizer.weight_decay = 0.1f; /* gradients are 0 */
    RANKS_OK(world, ddp_fsdp_create(&fsdp, d->group, &desc));
    for (int step = 0; step < TIED_STEPS; step++) {
        for (int pass = 0; pass < 2 * TIED_UNITS; pass++) {
            int u = pass < TIED_UNITS ? TIED_UNITS - 1 - pass : pass - TIED_UNITS;
            RANKS_OK(world, ddp_fsdp_unshard(fsdp, u));
            for (int i = first[u]; i < first[u + 1]; i++) {
                const ddp_tensor *value = &params[i].param.value;
                RANKS_OK(world, device_down(d, out[step][i], value->data, ddp_tensor_bytes(value)));
            }
            if (pass >= TIED_UNITS) RANKS_OK(world, ddp_fsdp_reduce_grads(fsdp, u));
            RANKS_OK(world, ddp_fsdp_reshard(fsdp, u));
        }
        RANKS_OK(world, ddp_fsdp_step(fsdp, 0.5f));
    }
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

static ddp_result tied_main(ddp_group *world, void *user) {
    static thread_local float values[2][TIED_STEPS][TIED_PARAMS][TIED_ROWS * TIED_COLUMNS];
    device_rank d;
    (void)user;
    RANKS_OK(world, device_rank_open(&d, world, sizeof values[0][0][0]));
    for (int prefetch = 0; prefetch < 2; prefetch++)
        RANKS_OK(world, tied_run(world, &d, prefetch ? 1 : -1, values[prefetch]));
    RANKS_CHECK(world, memcmp(values[0], values[1], sizeof values[0]) == 0, "other values with prefetch");
    RANKS_CHECK(world, memcmp(values[0][1], values[0][2], sizeof values[0][1]) != 0,
                "no step changes values");
    RANKS_CHECK(world, memcmp(values[0][2][0], values[0][2][2], sizeof values[0][2][0]) == 0,
                "a tied parameter has other values");
    return device_rank_close(&d);
}

/* One call of CUDA or NCCL fails, each in its turn: an error reports it, unless it was a call that frees; and
   nothing leaks. */
static ddp_result steady_faults(ddp_group *world, void *user) {
    int fired = 1, shows = 0;
    (void)user;
    for (int n = 1; fired; n += DDP_TEST_SLOWDOWN) {
        ddp_fsdp_param params[STEADY_PARAMS];
        ddp_fsdp_unit_desc units[STEADY_UNITS];
        ddp_fsdp_desc desc = steady_desc(params, units, 0, OFFLOADED);
        ddp_fsdp *fsdp;
        device_rank d;
        float norm;
        void *memory;
        RANKS_OK(world, device_rank_open(&d, world, 64));
        RANKS_OK(world, ddp_device_cuda()->alloc(d.group, 4096, &memory));
        desc.micro_batch_count = 1;
        fake_fail(NULL, 0, n, 0, 0);
        ddp_result result = ddp_fsdp_create(&fsdp, d.group, &desc);
        for (int u = 0; u < STEADY_UNITS && result == DDP_OK; u++) {
            result = ddp_fsdp_unshard(fsdp, u);
            if (result == DDP_OK) result = ddp_fsdp_reduce_grads(fsdp, u);
        }
        if (result == DDP_OK) result = ddp_fsdp_clip_grad_norm(fsdp, 0.25f, &norm);
        if (result == DDP_OK) result = ddp_fsdp_step(fsdp, 0.01f);
        ddp_fsdp_destroy(fsdp);
        fired = fake_fault_fired(1);
        if (result == DDP_OK)
            result = ddp_cuda_check();
        else
            (void)ddp_cuda_check();
        int gives = strstr(fake.fault.text.c_str(), "cudaFree") || strstr(fake.fault.text.c_str(), "Destroy")
                    || strstr(fake.fault.text.c_str(), "IsCapturing")
                    || strstr(fake.fault.text.c_str(), "cudaSetDevice");
        RANKS_CHECK(world, !fired || result != DDP_OK || gives, "call %d fails unseen: %s", n,
                    fake.fault.text.c_str());
        shows += fired && result != DDP_OK;
        ddp_device_cuda()->free(d.group, memory);
        RANKS_OK(world, device_rank_close(&d));
    }
    RANKS_CHECK(world, shows > 50 / DDP_TEST_SLOWDOWN, "only %d calls failed", shows);
    return DDP_OK;
}

static ddp_result ones_fill(const ddp_fsdp_param *param, int64_t, int64_t row_count, void *out, void *) {
    const ddp_tensor *value = &param->param.value;
    for (int64_t i = 0; i < row_count * (value->ndim > 1 ? value->shape[1] : 1); i++) ((float *)out)[i] = 1;
    return DDP_OK;
}

enum { GPT_UNITS = 14, GPT_PARAMS = 148, GPT_WIDTH = 16 };

/* 148 parameters in 14 units, as GPT-2 124M: two embeddings; 12 blocks of 4 matrices and 8 vectors; the last
   norm. From the last gradient to the end of a step, a rank launches 10 kernels:

                         before   now
       divide               148     3    64 tensors per launch
       squares              148     3    64
       norm                   1     1
       AdamW                148     3    56: 50 matrices, 98 vectors
       new values in bf16    14     0    AdamW writes them

   With one micro-batch and full gradients (*user is 1), from the first backward to the end of a step: 7. The
   bf16 gradients are neither cast nor divided. */
static ddp_result steady_launches(ddp_group *world, void *user) {
    static ddp_fsdp_param params[GPT_PARAMS];
    static char names[GPT_PARAMS][8];
    const char *engine = getenv("DDP_TEST_ENGINE");
    ddp_fsdp_unit_desc units[GPT_UNITS] = {};
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp;
    device_rank d;
    int device, kernels = 0, one = *(const int *)user;
    if (!engine || strcmp(engine, "nccl")) return DDP_OK;
    RANKS_OK(world, device_rank_open(&d, world, 64));
    for (int i = 0; i < GPT_PARAMS; i++) {
        int unit = i < 2 ? 0 : 1 + (i - 2) / 12, matrix = i < 2 || (i < GPT_PARAMS - 2 && (i - 2) % 3 == 0);
        ddp_param *p = &params[i].param;
        snprintf(names[i], sizeof names[i], "%d", i);
        p->name = names[i];
        p->value.dtype = DDP_F32;
        p->value.ndim = 1 + matrix;
        p->value.shape[0] = GPT_WIDTH;
        p->value.shape[1] = matrix ? GPT_WIDTH : 0;
        if (!units[unit].params) units[unit].params = &params[i];
        units[unit].param_count++;
    }
    desc.units = units;
    desc.unit_count = GPT_UNITS;
    desc.param_dtype = DDP_BF16;
    desc.micro_batch_count = one ? 1 : 2;
    desc.strategy = one ? DDP_FSDP_SHARD_OPTIM : DDP_FSDP_FULL_SHARD;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = ones_fill;
    RANKS_OK(world, ddp_fsdp_create(&fsdp, d.group, &desc));
    fake_record_from_here();
    for (int pass = 0; pass < desc.micro_batch_count * GPT_UNITS; pass++) {
        RANKS_OK(world, ddp_fsdp_unshard(fsdp, pass % GPT_UNITS));
        RANKS_OK(world, ddp_fsdp_reduce_grads(fsdp, pass % GPT_UNITS));
        RANKS_OK(world, ddp_fsdp_reshard(fsdp, pass % GPT_UNITS));
    }
    if (!one) fake_record_from_here();
    RANKS_OK(world, ddp_fsdp_clip_grad_norm(fsdp, 1, NULL));
    RANKS_OK(world, ddp_fsdp_step(fsdp, 0.01f));
    fake_get_device(&device);
    std::string record = fake_record(device);
    for (size_t at = 0; (at = record.find("kernel(", at)) != std::string::npos; at++) kernels++;
    RANKS_CHECK(world, kernels == (one ? 7 : 10), "%d kernels", kernels);
    ddp_fsdp_destroy(fsdp);
    return device_rank_close(&d);
}

/* A rank is missing at the clipping: the other one gets the error when it queries the norm that its device
   waits for, and everything can be freed. */
static ddp_result steady_lost(ddp_group *world, void *user) {
    ddp_fsdp_param params[STEADY_PARAMS];
    ddp_fsdp_unit_desc units[STEADY_UNITS];
    ddp_fsdp_desc desc = steady_desc(params, units, 0, DECIDES);
    ddp_cuda_desc cuda = DDP_ZERO;
    ddp_group *group;
    ddp_fsdp *fsdp;
    device_rank d;
    float norm = -7;
    (void)user;
    if (!device_uses_nccl()) return DDP_OK; /* staged, the clipping itself waits */
    RANKS_OK(world, device_rank_open(&d, world, 64));
    fake.patient = 1;
    cuda.engine = DDP_CUDA_ENGINE_NCCL;
    cuda.order = DDP_ORDER_TREE;
    cuda.allow_shared = 1;
    cuda.timeout_ms = 8000; /* longer than a rank can stand still before the wait */
    cuda.stream = d.stream;
    RANKS_OK(world, ddp_cuda_group_create(&group, world, &cuda));
    desc.micro_batch_count = 1;
    RANKS_OK(world, ddp_fsdp_create(&fsdp, group, &desc));
    for (int u = 0; u < STEADY_UNITS; u++) {
        RANKS_OK(world, ddp_fsdp_unshard(fsdp, u));
        RANKS_OK(world, ddp_fsdp_reduce_grads(fsdp, u));
        RANKS_OK(world, ddp_fsdp_reshard(fsdp, u));
    }
    RANKS_OK(world, ddp_barrier(world));
    for (int turn = 0; turn < 2 && ddp_rank(world) == 0; turn++) {
        if (turn == 0) RANKS_OK(world, ddp_fsdp_clip_grad_norm(fsdp, 1, NULL));
        ddp_result result = ddp_fsdp_get_norm(fsdp, &norm);
        RANKS_CHECK(world, result == DDP_ERR_TIMEOUT && norm == -7, "turn %d: %s, norm %g", turn,
                    ddp_result_name(result), (double)norm);
    }
    RANKS_OK(world, ddp_barrier(world));
    ddp_fsdp_destroy(fsdp);
    ddp_group_destroy(group);
    return device_rank_close(&d);
}
#endif

int main(int argc, char **argv) {
    int failed = parity_main(argc, argv), worlds = 0;
    for (int world = 1; world <= 4; world++)
        for (int i = 2; i < argc; i++)
            if (atoi(argv[i]) == world) worlds |= 1 << world;
    for (int world = 1; world <= 4; world++) {
        ranks_mode mode = argc > 1 && strcmp(argv[1], "processes") == 0 ? RANKS_PROCESSES : RANKS_THREADS;
        if (worlds && !(worlds >> world & 1)) continue;
        if (ranks_run(mode, world, 20000 * DDP_TEST_SLOWDOWN, steady_main, NULL) == DDP_OK) continue;
        fprintf(stderr, "FAIL steady steps on %d %s: %s\n", world, ranks_mode_name(mode), ddp_last_error());
        failed = 1;
    }
    for (int world = 1; world <= 4; world++) {
        ranks_mode mode = argc > 1 && strcmp(argv[1], "processes") == 0 ? RANKS_PROCESSES : RANKS_THREADS;
        if (worlds && !(worlds >> world & 1)) continue;
        if (ranks_run(mode, world, 20000 * DDP_TEST_SLOWDOWN, full_main, NULL) == DDP_OK) continue;
        fprintf(stderr, "FAIL full parameters on %d %s: %s\n", world, ranks_mode_name(mode),
                ddp_last_error());
        failed = 1;
    }
#if defined(DDP_TEST_ON_CPU)
    if ((!worlds || worlds & 2)
        && ranks_run(RANKS_THREADS, 1, 60000 * DDP_TEST_SLOWDOWN, steady_faults, NULL) != DDP_OK) {
        fprintf(stderr, "FAIL one failing call: %s\n", ddp_last_error());
        failed = 1;
    }
    for (int one = 0; one < 2 && (!worlds || worlds & 2); one++)
        if (ranks_run(RANKS_THREADS, 1, 20000 * DDP_TEST_SLOWDOWN, steady_launches, &one) != DDP_OK) {
            fprintf(stderr, "FAIL launches of 148 parameters: %s\n", ddp_last_error());
            failed = 1;
        }
    if ((!worlds || worlds & 12)
        && ranks_run(RANKS_THREADS, 2, 60000 * DDP_TEST_SLOWDOWN, steady_lost, NULL) != DDP_OK) {
        fprintf(stderr, "FAIL a rank that does not come: %s\n", ddp_last_error());
        failed = 1;
    }
    if ((!worlds || worlds & 8)
        && ranks_run(RANKS_THREADS, 3, 60000 * DDP_TEST_SLOWDOWN, tied_main, NULL) != DDP_OK) {
        fprintf(stderr, "FAIL units in another order than they share values: %s\n", ddp_last_error());
        failed = 1;
    }
    const char *engine = getenv("DDP_TEST_ENGINE");
    for (int world = 1; world <= 2 && engine && strcmp(engine, "nccl") == 0; world++)
        if ((!worlds || worlds & 2)
            && ranks_run(RANKS_THREADS, world, 60000 * DDP_TEST_SLOWDOWN, stream_main, NULL) != DDP_OK) {
            fprintf(stderr, "FAIL offloaded parameters on %d threads: %s\n", world, ddp_last_error());
            failed = 1;
        }
    if (system("rm -rf /tmp/ddp-stream-$PPID*") != 0) failed = 1;
    device_number = CALLS_RANKS;
    if ((!worlds || worlds & 8) && engine && strcmp(engine, "nccl") == 0
        && ranks_run(RANKS_THREADS, CALLS_RANKS, 60000 * DDP_TEST_SLOWDOWN, calls_steps, NULL) != DDP_OK) {
        fprintf(stderr, "FAIL the calls of a step: %s\n", ddp_last_error());
        failed = 1;
    }
#endif
    return failed;
}

/*  test_pipeline.cu - pipelines over device memory: for every schedule gradients, losses, weights and norms
    have the bits of the same pipeline on the CPU.

    The model is that of support/pipeline.h. A callback copies its inputs from the device, computes on the CPU
    and copies its outputs back on the compute stream, which is still busy when it returns.

    test_pipeline processes|threads [W ...]     Built with -DDDP_TEST_ON_CPU it runs on the fake GPU, as
                                                test_conformance.cu. */
#include "../support/device.h"
#include "../../ddp_pipeline.h"
#include "../support/pipeline.h"

#define PIPE_TRY(call)                     \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)

enum { STAGE_FLOATS = PIPE_WEIGHTS + PIPE_SIDE, FAR_FLOATS = 2 * PIPE_STAGES * STAGE_FLOATS };

typedef struct far_model {
    pipe_model m; /* first: its callbacks get one pointer. Its params are on the device */
    device_rank *d;
    float *memory; /* there: of each stage the values, then the gradients */
    ddp_fsdp_param split[PIPE_STAGES][2];
    ddp_reducer *reducer[PIPE_STAGES];
    ddp_fsdp *fsdp[PIPE_STAGES];
} far_model;

//== callbacks ==============================================================================

/* Copies the inputs of a call, one array at a time; after the call, its outputs. */
static ddp_result far_fetch(device_rank *d, const ddp_tensor *far, int count, ddp_tensor *near,
                            double (*room)[PIPE_CELLS], int reads) {
    for (int i = 0; i < count; i++) {
        near[i] = far[i];
        if (!far[i].data) continue;
        near[i].data = room[i];
        if (reads)
            PIPE_TRY(device_down(d, room[i], far[i].data,
                                 (size_t)ddp_tensor_count(&far[i]) * ddp_dtype_size(far[i].dtype)));
    }
    return DDP_OK;
}

static ddp_result far_store(device_rank *d, const ddp_tensor *far, int count, const ddp_tensor *near) {
    for (int i = 0; i < count; i++)
        if (far[i].data)
            PIPE_TRY(device_up(d, far[i].data, near[i].data,
                               (size_t)ddp_tensor_count(&far[i]) * ddp_dtype_size(far[i].dtype)));
    return DDP_OK;
}

static ddp_result far_run(far_model *f, const ddp_pipeline_call *c, ddp_pipeline_fn fn, int loss) {
    int forward = c->kind == DDP_ACTION_FORWARD && !loss,
        weights = c->kind == DDP_ACTION_WEIGHT_GRAD || c->kind == DDP_ACTION_BACKWARD;
    const ddp_tensor *far[4] = {c->inputs, c->outputs, c->output_grads, c->input_grads};
    const int counts[4] = {c->input_count, c->output_count, c->output_count, c->input_count},
              reads[4] = {1, loss, !loss, 0}, writes[4] = {0, forward, loss, 1};
    size_t bytes[2] = {PIPE_WEIGHTS * sizeof(float), PIPE_SIDE * sizeof(float)};
    float values[2][PIPE_WEIGHTS], grads[2][PIPE_WEIGHTS];
    void *kept[2][2];
    double room[4][3][PIPE_CELLS];
    ddp_tensor near[4][3];
    ddp_pipeline_call here = *c;
    ddp_param *const *params = f->m.pointers[c->stage];
    pipe_saved saved;
    ddp_result result;
    for (int k = 0; k < 4; k++)
        if (far[k]) PIPE_TRY(far_fetch(f->d, far[k], counts[k], near[k], room[k], reads[k]));
    here.inputs = far[0] ? near[0] : NULL, here.outputs = far[1] ? near[1] : NULL;
    here.output_grads = far[2] ? near[2] : NULL, here.input_grads = far[3] ? near[3] : NULL;
    if (c->saved && !forward) PIPE_TRY(device_down(f->d, &saved, c->saved, sizeof saved));
    if (c->saved) here.saved = &saved;
    for (int i = 0; i < 2; i++) {
        kept[i][0] = params[i]->value.data, kept[i][1] = params[i]->grad.data;
        PIPE_TRY(device_down(f->d, values[i], kept[i][0], bytes[i]));
    }
    for (int i = 0; i < 2; i++) params[i]->value.data = values[i], params[i]->grad.data = grads[i];
    result = fn(&here, &f->m);
    for (int i = 0; i < 2; i++) params[i]->value.data = kept[i][0], params[i]->grad.data = kept[i][1];
    PIPE_TRY(result);
    for (int k = 0; k < 4; k++)
        if (far[k] && writes[k]) PIPE_TRY(far_store(f->d, far[k], counts[k], near[k]));
    if (c->saved && c->kind != DDP_ACTION_WEIGHT_GRAD)
        PIPE_TRY(device_up(f->d, c->saved, &saved, sizeof saved));
    for (int i = 0; i < 2 && weights; i++) PIPE_TRY(device_up(f->d, kept[i][1], grads[i], bytes[i]));
    return DDP_OK;
}

static ddp_result far_stage(const ddp_pipeline_call *c, void *user) {
    ddp_pipeline_fn fn = c->kind == DDP_ACTION_FORWARD       ? pipe_on_forward
                         : c->kind == DDP_ACTION_INPUT_GRAD  ? pipe_on_input_grad
                         : c->kind == DDP_ACTION_WEIGHT_GRAD ? pipe_on_weight_grad
                                                             : pipe_on_backward;
    return far_run((far_model *)user, c, fn, 0);
}

static ddp_result far_loss(const ddp_pipeline_call *c, void *user) {
    return far_run((far_model *)user, c, pipe_on_loss, 1);
}

//== building ===============================================================================

static ddp_result far_build(far_model *f, device_rank *d, const pipe_model *near) {
    float values[STAGE_FLOATS];
    f->d = d;
    f->m = *near;
    for (int s = 0; s < near->stages; s++) {
        ddp_pipeline_stage *stage = &f->m.stage[s];
        float *at = f->memory + 2 * s * STAGE_FLOATS;
        memcpy(values, near->weight[s], sizeof near->weight[s]);
        memcpy(values + PIPE_WEIGHTS, near->bias[s], sizeof near->bias[s]);
        PIPE_TRY(device_up(d, at, values, sizeof values));
        for (int i = 0; i < 2; i++) {
            f->m.params[s][i].value.data = at + i * PIPE_WEIGHTS;
            f->m.params[s][i].grad.data = near->params[s][i].grad.data ? at + STAGE_FLOATS + i * PIPE_WEIGHTS
                                                                       : NULL;
            f->m.pointers[s][i] = &f->m.params[s][i];
        }
        stage->forward = stage->input_grad = stage->weight_grad = far_stage;
        stage->backward = stage->backward ? far_stage : NULL;
        stage->user = f;
        stage->params = f->m.pointers[s];
    }
    return DDP_OK;
}

static void far_desc(far_model *f, const ddp_schedule *s, ddp_pipeline_desc *desc) {
    pipe_desc(&f->m, s, desc);
    if (f->m.with_loss) desc->loss = far_loss;
    desc->loss_user = f;
}

/* w = w - rate g, on the CPU, and on the device in stream order. */
static ddp_result near_update(int stage, void *user) {
    pipe_descend((pipe_model *)user, stage);
    return DDP_OK;
}
static ddp_result far_update(int stage, void *user) {
    far_model *f = (far_model *)user;
    for (int i = 0; i < 2; i++) {
        ddp_param *param = f->m.pointers[stage][i];
        float value[PIPE_WEIGHTS], grad[PIPE_WEIGHTS];
        size_t count = i ? PIPE_SIDE : PIPE_WEIGHTS;
        PIPE_TRY(device_down(f->d, value, param->value.data, count * sizeof(float)));
        PIPE_TRY(device_down(f->d, grad, param->grad.data, count * sizeof(float)));
        for (size_t k = 0; k < count; k++) value[k] -= 0.05f * grad[k];
        PIPE_TRY(device_up(f->d, param->value.data, value, count * sizeof(float)));
    }
    return DDP_OK;
}

/* The values or the gradients of a stage's parameters: compares both sides. */
static ddp_result same(far_model *f, const pipe_model *near, int stage, int grads, const char *what) {
    for (int i = 0; i < 2; i++) {
        const ddp_param *a = near->pointers[stage][i], *b = f->m.pointers[stage][i];
        float values[PIPE_WEIGHTS];
        size_t bytes = (i ? PIPE_SIDE : PIPE_WEIGHTS) * sizeof(float);
        PIPE_TRY(device_down(f->d, values, grads ? b->grad.data : b->value.data, bytes));
        RANKS_CHECK(f->d->cpu, memcmp(values, grads ? a->grad.data : a->value.data, bytes) == 0,
                    "%s stage %d: %s of the %s", what, stage, grads ? "gradients" : "values",
                    i ? "bias" : "weight");
    }
    return DDP_OK;
}

static ddp_result same_losses(device_rank *d, ddp_pipeline *one, ddp_pipeline *other, const char *what) {
    double mean[2], each[2][PIPE_BATCHES];
    RANKS_OK(d->cpu, ddp_pipeline_get_loss(one, &mean[0], each[0]));
    RANKS_OK(d->cpu, ddp_pipeline_get_loss(other, &mean[1], each[1]));
    RANKS_CHECK(d->cpu, mean[0] == mean[1] && mean[0] > 0, "%s: loss %.17g, not %.17g", what, mean[1],
                mean[0]);
    return DDP_OK;
}

//== one schedule ===========================================================================

typedef struct variant {
    int with_loss, recompute, prefetch, placed, timed, tied;
} variant;
typedef struct both {
    pipe_model near;
    far_model far;
} both;

static ddp_result steps(device_rank *d, both *b, ddp_pipeline *near, ddp_pipeline *far, const ddp_schedule *s,
                        const variant *v, int inside, const char *what) {
    for (int step = 0; step < 2; step++) {
        float norm[2] = {0, 0};
        if (step) {
            RANKS_OK(d->cpu, ddp_pipeline_evaluate(near));
            RANKS_OK(d->cpu, ddp_pipeline_evaluate(far));
            PIPE_TRY(same_losses(d, near, far, what));
        }
        RANKS_OK(d->cpu, ddp_pipeline_step(near));
        RANKS_OK(d->cpu, ddp_pipeline_step(far));
        RANKS_CHECK(d->cpu, !b->far.m.wrong, "%s step %d: %s", what, step, b->far.m.wrong);
        PIPE_TRY(same_losses(d, near, far, what));
        for (int clipped = 0; clipped <= v->tied; clipped++) {
            for (int stage = 0; stage < b->near.stages; stage++)
                if (ddp_schedule_stage_rank(s, stage) == ddp_rank(d->cpu))
                    PIPE_TRY(same(&b->far, &b->near, stage, 1, what));
            if (!v->tied || clipped) break;
            RANKS_OK(d->cpu, ddp_pipeline_clip_grad_norm(near, 0.125f, &norm[0]));
            RANKS_OK(d->cpu, ddp_pipeline_clip_grad_norm(far, 0.125f, &norm[1]));
            RANKS_CHECK(d->cpu, norm[0] == norm[1] && norm[0] > 0.125f, "%s: norm %.9g, not %.9g", what,
                        (double)norm[1], (double)norm[0]);
        }
        for (int stage = 0; stage < b->near.stages; stage++) {
            if (ddp_schedule_stage_rank(s, stage) != ddp_rank(d->cpu)) continue;
            if (!inside) PIPE_TRY(near_update(stage, &b->near));
            if (!inside) PIPE_TRY(far_update(stage, &b->far));
            PIPE_TRY(same(&b->far, &b->near, stage, 0, what));
        }
    }
    return DDP_OK;
}

/* Two steps and an evaluation between them, on the CPU and on the device. */
static ddp_result compare(device_rank *d, both *b, const ddp_schedule *s, variant v, const char *what) {
    int stages = ddp_schedule_stage_count(s),
        inside = ddp_schedule_update_interval(s) < ddp_schedule_microbatch_count(s);
    ddp_pipeline_tie tie = {0, 1, stages - 1, 1};
    ddp_pipeline_desc desc;
    ddp_pipeline *near, *far;
    ddp_pipeline_stats stats;
    ddp_stage_cost costs[PIPE_STAGES];
    v.tied = v.tied && stages > 1;
    pipe_build(&b->near, stages, v.with_loss);
    for (int stage = 0; stage < stages; stage++) {
        b->near.stage[stage].recompute = v.recompute && stage % 3 != 1;
        b->near.stage[stage].offload_saved = !b->near.stage[stage].recompute && stage % 4 != 2;
        b->near.stage[stage].zero_gradients = stage % 2;
        b->near.stage[stage].update = inside ? near_update : NULL;
        if (v.placed) b->near.params[stage][0].grad.data = NULL;
    }
    if (v.tied) memcpy(b->near.bias[stages - 1], b->near.bias[0], sizeof b->near.bias[0]);
    PIPE_TRY(far_build(&b->far, d, &b->near));
    for (int stage = 0; stage < stages && inside; stage++) b->far.m.stage[stage].update = far_update;
    pipe_desc(&b->near, s, &desc);
    desc.prefetch = v.prefetch, desc.ties = &tie, desc.tie_count = v.tied;
    RANKS_OK(d->cpu, ddp_pipeline_create(&near, d->cpu, &desc));
    far_desc(&b->far, s, &desc);
    desc.prefetch = v.prefetch, desc.ties = &tie, desc.tie_count = v.tied, desc.timed = v.timed;
    RANKS_OK(d->cpu, ddp_pipeline_create(&far, d->group, &desc));
    PIPE_TRY(steps(d, b, near, far, s, &v, inside, what));
    RANKS_OK(d->cpu, ddp_pipeline_get_stats(far, &stats));
    RANKS_OK(d->cpu, ddp_pipeline_get_times(far, costs, NULL));
    for (int stage = 0; stage < stages; stage++)
        RANKS_CHECK(d->cpu, costs[stage].forward > 0, "%s: no time for stage %d", what, stage);
    RANKS_CHECK(d->cpu, stats.steps == 2 && stats.compute_seconds > 0, "%s: stats", what);
    ddp_pipeline_destroy(far);
    ddp_pipeline_destroy(near);
    return DDP_OK;
}

static ddp_result every_schedule(device_rank *d, both *b) {
    static const struct {
        ddp_schedule_kind kind;
        int chunks, per_rank, more, interval;
    } all[] = {
        {DDP_SCHEDULE_GPIPE, 1, 2, 1, 0},          {DDP_SCHEDULE_1F1B, 1, 2, 1, 0},
        {DDP_SCHEDULE_NAIVE, 2, 1, 0, 0},          {DDP_SCHEDULE_INTERLEAVED_1F1B, 2, 2, 0, 0},
        {DDP_SCHEDULE_LOOPED_BFS, 2, 1, 1, 0},     {DDP_SCHEDULE_ZB_H1, 1, 2, 1, 0},
        {DDP_SCHEDULE_ZB_H2, 1, 2, 1, 0},          {DDP_SCHEDULE_INTERLEAVED_ZB_1P, 2, 2, 0, 0},
        {DDP_SCHEDULE_ZB_V, 2, 2, 1, 0},           {DDP_SCHEDULE_DUALPIPE_V, 2, 2, 1, 0},
        {DDP_SCHEDULE_AUTO, 1, 2, 1, 0},           {DDP_SCHEDULE_PIPEDREAM, 1, 2, 0, 1},
        {DDP_SCHEDULE_PIPEDREAM_2BW, 1, 2, 0, -1},
    };
    int w = ddp_world_size(d->cpu);
    for (int i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        ddp_schedule_desc desc = DDP_ZERO;
        ddp_schedule *s, *low;
        int synchronous = !all[i].interval;
        variant v = {i % 2, synchronous && i % 3 == 1, i % 4, i % 4 < 2, i % 4 == 2, synchronous && i % 2};
        desc.kind = all[i].kind, desc.rank_count = w, desc.chunk_count = all[i].chunks;
        desc.microbatch_count = all[i].per_rank * w + all[i].more,
        desc.update_interval = all[i].interval < 0 ? w : all[i].interval;
        RANKS_OK(d->cpu, ddp_schedule_create(&s, &desc));
        RANKS_OK(d->cpu, ddp_schedule_lower(&low, s, 0));
        PIPE_TRY(compare(d, b, i % 2 ? low : s, v, ddp_schedule_kind_name(all[i].kind)));
        ddp_schedule_destroy(low);
        ddp_schedule_destroy(s);
    }
    return DDP_OK;
}

/* Lists that send in another order than they receive: more is in flight at once than in any other schedule.
   With messages of its own, one list has a SEND before the other rank's RECV and the other way round. */
static ddp_result own_orders(device_rank *d, both *b) {
    static const char *const lists[] = {
        "0F0,0F3,0F1,0F5,0F4,0F2,0F6,0B6,0B0,0B1,0B5,0B3,0B2,0B4\n1F2,1F0,1F6,1F1,1B6,1B0,1I1,1F5,1F4,1I5,"
        "1F3,1W5,1B3,1B2,1W1,1B4\n",
        "0F0,0F1,0F2,0F3,0F4,0B0,0B1,0B2,0B3,0B4\n1F4,1F3,1F2,1F1,1F0,1B0,1B1,1B2,1B3,1B4\n",
        "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,"
        "1SEND_B1\n"};
    static const variant v = {1, 0, 1, 0, 0, 0};
    for (int i = 0; i < 3 && ddp_world_size(d->cpu) == 2; i++) {
        ddp_schedule *s;
        RANKS_OK(d->cpu, ddp_schedule_parse(&s, lists[i]));
        PIPE_TRY(compare(d, b, s, v, "a list"));
        ddp_schedule_destroy(s);
    }
    return DDP_OK;
}

/* After the first step nothing is allocated: no memory on either side, no events. */
static ddp_result without_memory(device_rank *d, both *b) {
#if defined(DDP_TEST_ON_CPU)
    static const char *const calls[] = {"cudaMalloc(", "cudaHostAlloc(", "cudaMallocAsync(",
                                        "cudaEventCreate", "cudaStreamCreate"};
    int w = ddp_world_size(d->cpu), device;
    ddp_schedule_desc shape = DDP_ZERO;
    ddp_pipeline_tie tie = {0, 1, 2 * w - 2, 1}; /* on another rank, if there are several */
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    shape.kind = DDP_SCHEDULE_ZB_V, shape.rank_count = w, shape.microbatch_count = 2 * w;
    RANKS_OK(d->cpu, ddp_schedule_create(&s, &shape));
    pipe_build(&b->near, 2 * w, 1);
    PIPE_TRY(far_build(&b->far, d, &b->near));
    far_desc(&b->far, s, &desc);
    desc.ties = &tie, desc.tie_count = w > 1;
    RANKS_OK(d->cpu, ddp_pipeline_create(&pipeline, d->group, &desc));
    RANKS_OK(d->cpu, ddp_pipeline_step(pipeline));
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    fake_record_from_here(); /* ranks are threads, which share it, or processes */
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    for (int step = 0; step < 3; step++) RANKS_OK(d->cpu, ddp_pipeline_step(pipeline));
    RANKS_CHECK(d->cpu, device_get(&device) == cudaSuccess, "no device");
    std::string record = fake_record(device);
    RANKS_CHECK(d->cpu, record.find("cudaMemcpyAsync") != std::string::npos, "nothing was recorded");
    for (const char *call : calls)
        RANKS_CHECK(d->cpu, record.find(call) == std::string::npos, "%s in a later step", call);
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
#else
    (void)d, (void)b;     /* a real device does not report it */
#endif
    return DDP_OK;
}

//== saved memory on the host ================================================================

#if defined(DDP_TEST_ON_CPU)
/* The copies of one step: their number and size. While a copy from the host runs, the compute stream has
   other work, before it waits for the copy. */
static ddp_result offload_copies(device_rank *d, const std::string &record, const std::string &copy, int down,
                                 int up) {
    const std::string compute = fake_name(d->stream), size = std::to_string(sizeof(pipe_saved));
    int to_host = 0, to_device = 0, device;
    RANKS_CHECK(d->cpu, device_get(&device) == cudaSuccess, "no device");
    for (size_t at = 0, end; (end = record.find('\n', at)) != std::string::npos; at = end + 1) {
        const std::string line = record.substr(at, end - at);
        int is_device = 0;
        if (line.find("cudaMemcpyAsync(") != 0 || line.find(", " + copy + ")") == std::string::npos) continue;
        RANKS_CHECK(d->cpu, line.find(", " + size + ", ") != std::string::npos, "other bytes: %s",
                    line.c_str());
        const std::string name = line.substr(16, line.find_first_of("+,") - 16);
        pthread_mutex_lock(&fake.lock);
        for (const std::pair<const uintptr_t, fake_block> &b : fake.blocks)
            is_device |= b.second.live && b.second.is_device && b.second.name == name
                         && b.second.device == device;
        pthread_mutex_unlock(&fake.lock);
        to_host += !is_device;
        to_device += is_device;
        if (!is_device) continue;
        /* The next event of the copy stream; the communication thread may record others before it. */
        size_t done = record.find("cudaEventRecord(", end);
        while (done != std::string::npos
               && record.compare(record.find(',', done), copy.size() + 3, ", " + copy + ")") != 0)
            done = record.find("cudaEventRecord(", done + 16);
        RANKS_CHECK(d->cpu, done != std::string::npos, "no event after %s", line.c_str());
        done += 16;
        const std::string event = record.substr(done, record.find(',', done) - done);
        size_t waits = record.find("cudaStreamWaitEvent(" + compute + ", " + event + ")", done);
        size_t work = record.find(", " + compute + ")\n", record.find('\n', done));
        RANKS_CHECK(d->cpu, waits != std::string::npos && work < waits, "nothing overlaps with %s in\n%s",
                    line.c_str(), record.c_str());
    }
    RANKS_CHECK(d->cpu, to_host == down && to_device == up, "%d copies to the host, %d back; want %d and %d",
                to_host, to_device, down, up);
    return DDP_OK;
}
#endif

/* One step, after a first one. Of each stage, `down` copies go to the host, and `up` come back. */
static ddp_result offload_step(device_rank *d, both *b, const ddp_schedule *s, int offloads, int down, int up,
                               ddp_pipeline_stats *stats) {
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    pipe_build(&b->near, ddp_schedule_stage_count(s), 1);
    for (int stage = 0; stage < b->near.stages; stage++) b->near.stage[stage].offload_saved = offloads;
    PIPE_TRY(far_build(&b->far, d, &b->near));
    far_desc(&b->far, s, &desc);
    RANKS_OK(d->cpu, ddp_pipeline_create(&pipeline, d->group, &desc));
    RANKS_OK(d->cpu, ddp_pipeline_step(pipeline));
#if defined(DDP_TEST_ON_CPU)
    const ddp__cuda_streams *streams = ddp__cuda_streams_of(d->group);
    int device;
    RANKS_CHECK(d->cpu, device_get(&device) == cudaSuccess, "no device");
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    fake_record_from_here();
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    RANKS_OK(d->cpu, ddp_pipeline_step(pipeline));
    std::string record = fake_record(device);
    for (const char *call : {"cudaMalloc(", "cudaHostAlloc(", "cudaEventCreate", "cudaStreamCreate"})
        RANKS_CHECK(d->cpu, record.find(call) == std::string::npos, "%s in a later step", call);
    if (offloads)
        RANKS_RUN(d->cpu, offload_copies(d, record, fake_name(streams->stream[DDP_STREAM_COPY]), down, up));
#else
    (void)down, (void)up; /* a real device does not report them */
#endif
    RANKS_OK(d->cpu, ddp_pipeline_get_stats(pipeline, stats));
    ddp_pipeline_destroy(pipeline);
    return DDP_OK;
}

/* Device memory of saved data is two buffers for any number of micro-batches; the rest is on the host. */
static ddp_result offloaded(device_rank *d, both *b) {
    const size_t slot = (sizeof(pipe_saved) + 63) / 64 * 64;
    ddp_pipeline_stats plain, stats;
    ddp_schedule *s;
    for (int m = 4; m <= 8; m += 4) {
        ddp_schedule_desc shape = DDP_ZERO;
        shape.kind = DDP_SCHEDULE_GPIPE;
        shape.rank_count = ddp_world_size(d->cpu);
        shape.microbatch_count = m;
        RANKS_OK(d->cpu, ddp_schedule_create(&s, &shape));
        RANKS_RUN(d->cpu, offload_step(d, b, s, 0, 0, 0, &plain));
        RANKS_RUN(d->cpu, offload_step(d, b, s, 1, m, m, &stats));
        ddp_schedule_destroy(s);
        RANKS_CHECK(d->cpu, plain.offloaded_bytes == 0 && stats.offloaded_bytes == (size_t)m * slot,
                    "%zu bytes on the host", stats.offloaded_bytes);
        RANKS_CHECK(d->cpu, plain.activation_bytes - stats.activation_bytes == (size_t)(m - 2) * slot,
                    "%zu bytes of activations, %zu without offload", stats.activation_bytes,
                    plain.activation_bytes);
    }
    if (ddp_world_size(d->cpu) > 1) return DDP_OK;
    /* a backward that follows its forward finds its saved memory in a buffer, and so does the next one */
    RANKS_OK(d->cpu, ddp_schedule_parse(&s, "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n"));
    RANKS_RUN(d->cpu, offload_step(d, b, s, 1, 3, 2, &stats));
    ddp_schedule_destroy(s);
    /* F3 takes the buffer of micro-batch 1, which has ended, and leaves 2 for the next action */
    RANKS_OK(d->cpu, ddp_schedule_parse(&s, "0F0,0F1,0F2,0B1,0F3,0B2,0B3,0B0\n"));
    RANKS_RUN(d->cpu, offload_step(d, b, s, 1, 4, 1, &stats));
    ddp_schedule_destroy(s);
    /* two buffers are enough without copies */
    RANKS_OK(d->cpu, ddp_schedule_parse(&s, "0F0,0F1,0B0,0F2,0B1,0B2\n"));
    RANKS_RUN(d->cpu, offload_step(d, b, s, 1, 0, 0, &stats));
    RANKS_CHECK(d->cpu, stats.offloaded_bytes == 0, "%zu bytes on the host", stats.offloaded_bytes);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

//== replicas ===============================================================================

static ddp_result on_ready(int stage, void *user) {
    ddp_reducer *reducer = ((far_model *)user)->reducer[stage];
    PIPE_TRY(ddp_reducer_ready(reducer, 1));
    return ddp_reducer_ready(reducer, 0);
}
static ddp_result on_wait(int stage, void *user) {
    return ddp_reducer_wait(((far_model *)user)->reducer[stage]);
}
static ddp_result on_gather(int stage, void *user) {
    return ddp_fsdp_unshard(((far_model *)user)->fsdp[stage], 0);
}
static ddp_result on_release(int stage, void *user) {
    return ddp_fsdp_reshard(((far_model *)user)->fsdp[stage], 0);
}
static ddp_result on_reduce(int stage, void *user) {
    return ddp_fsdp_reduce_grads(((far_model *)user)->fsdp[stage], 0);
}
static ddp_result on_step(int stage, void *user) {
    return ddp_fsdp_step(((far_model *)user)->fsdp[stage], 0.02f);
}

/* A stage over replicas: with a reducer, or sharded. */
static ddp_result replicate(ddp_group *dp, far_model *f, int s, int sharded, int count) {
    ddp_pipeline_stage *stage = &f->m.stage[s];
    ddp_fsdp_unit_desc unit = {"stage", f->split[s], 2};
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_fsdp_desc fsdp = DDP_ZERO;
    if (!sharded) {
        reducer.params = f->m.params[s], reducer.param_count = 2, reducer.micro_batch_count = count;
        stage->reduce_grad = on_ready, stage->wait_grad = on_wait;
        return ddp_reducer_create(&f->reducer[s], dp, &reducer);
    }
    for (int i = 0; i < 2; i++) {
        f->split[s][i].param = f->m.params[s][i];
        f->split[s][i].param.grad.data = NULL;
        f->m.pointers[s][i] = &f->split[s][i].param;
    }
    fsdp.units = &unit, fsdp.unit_count = 1;
    stage->unshard = on_gather, stage->reshard = on_release, stage->reduce_grad = on_reduce,
    stage->update = on_step, stage->grad_division = DDP_DIVIDE_BEFORE_REDUCE;
    return ddp_fsdp_create(&f->fsdp[s], dp, &fsdp);
}

/* The same with a far_model in host memory. */
static ddp_result one_side(device_rank *d, ddp_group *pp, ddp_group *dp, far_model *f, const ddp_schedule *s,
                           int sharded, int device, float (*out)[STAGE_FLOATS]) {
    ddp_pipeline_desc desc;
    ddp_pipeline *pipeline;
    for (int k = 0; k < f->m.stages; k++)
        if (ddp_schedule_stage_rank(s, k) == ddp_rank(pp))
            RANKS_OK(d->cpu, replicate(dp, f, k, sharded, ddp_schedule_microbatch_count(s)));
    if (device)
        far_desc(f, s, &desc);
    else
        pipe_desc(&f->m, s, &desc);
    RANKS_OK(d->cpu, ddp_pipeline_create(&pipeline, pp, &desc));
    for (int step = 0; step < 2; step++) {
        RANKS_OK(d->cpu, ddp_pipeline_step(pipeline));
        for (int k = 0; k < f->m.stages && !sharded; k++)
            if (f->reducer[k]) PIPE_TRY(device ? far_update(k, f) : near_update(k, &f->m));
    }
    for (int k = 0; k < f->m.stages; k++) {
        if (!f->reducer[k] && !f->fsdp[k]) continue;
        if (sharded) RANKS_OK(d->cpu, on_gather(k, f));
        for (int i = 0; i < 2; i++) {
            const void *from = f->m.pointers[k][i]->value.data;
            size_t bytes = (i ? PIPE_SIDE : PIPE_WEIGHTS) * sizeof(float);
            if (device)
                PIPE_TRY(device_down(d, out[k] + i * PIPE_WEIGHTS, from, bytes));
            else
                memcpy(out[k] + i * PIPE_WEIGHTS, from, bytes);
        }
        if (sharded) RANKS_OK(d->cpu, on_release(k, f));
    }
    ddp_pipeline_destroy(pipeline);
    for (int k = 0; k < f->m.stages; k++) ddp_reducer_destroy(f->reducer[k]), ddp_fsdp_destroy(f->fsdp[k]);
    return DDP_OK;
}

static ddp_result replicas(device_rank *d) {
    static const ddp_schedule_kind kinds[] = {DDP_SCHEDULE_1F1B, DDP_SCHEDULE_ZB_H1};
    ddp_group *pp[2], *dp[2];
    int rank = ddp_rank(d->cpu);
    far_model *f = (far_model *)calloc(2, sizeof *f);
    float out[2][PIPE_STAGES][STAGE_FLOATS];
    void *memory;
    if (ddp_world_size(d->cpu) != 4) {
        free(f);
        return DDP_OK;
    }
    RANKS_CHECK(d->cpu, f != NULL, "memory");
    RANKS_OK(d->cpu, ddp_device_cuda()->alloc(NULL, FAR_FLOATS * sizeof(float), &memory));
    for (int device = 0; device < 2; device++) {
        RANKS_OK(d->cpu, ddp_group_split(device ? d->group : d->cpu, rank % 2, rank, &pp[device]));
        RANKS_OK(d->cpu, ddp_group_split(device ? d->group : d->cpu, rank / 2, rank, &dp[device]));
    }
    for (int turn = 0; turn < 4; turn++) {
        ddp_schedule_desc shape = DDP_ZERO;
        ddp_schedule *s;
        shape.kind = kinds[turn % 2], shape.rank_count = 2, shape.microbatch_count = 4;
        RANKS_OK(d->cpu, ddp_schedule_create(&s, &shape));
        memset(f, 0, 2 * sizeof *f);
        memset(out, 0, sizeof out);
        f[1].memory = (float *)memory;
        pipe_build(&f[0].m, 2, 1);
        f[0].m.first = 4 * ddp_rank(dp[0]);
        PIPE_TRY(far_build(&f[1], d, &f[0].m));
        for (int device = 0; device < 2; device++)
            PIPE_TRY(one_side(d, pp[device], dp[device], &f[device], s, turn / 2, device, out[device]));
        RANKS_CHECK(d->cpu, memcmp(out[0], out[1], sizeof out[0]) == 0, "%s, %s: other weights",
                    ddp_schedule_kind_name(shape.kind), turn / 2 ? "sharded" : "reducer");
        ddp_schedule_destroy(s);
    }
    for (int device = 0; device < 2; device++) ddp_group_destroy(dp[device]), ddp_group_destroy(pp[device]);
    ddp_device_cuda()->free(NULL, memory);
    free(f);
    return DDP_OK;
}

//== failures ================================================================================

/* A failing callback of one rank ends the step on all of them, and is named: in the middle, and when only the
   last rank waits for a tied gradient. */
static ddp_result failing(device_rank *d, both *b) {
    int w = ddp_world_size(d->cpu);
    ddp_pipeline_tie tie = {0, 1, w - 1, 1};
    ddp_schedule_desc shape = DDP_ZERO;
    ddp_schedule *s;
    for (int turn = 0; turn < 2; turn++) {
        pipe_fault fault = {turn ? 0 : w - 1,
                            turn ? 2 * w - 1 : 1,
                            1,
                            0,
                            turn ? DDP_ACTION_WEIGHT_GRAD : DDP_ACTION_FORWARD,
                            1};
        ddp_pipeline_desc desc;
        ddp_pipeline *pipeline;
        ddp_group *group;
        ddp_result result;
        char words[96];
        shape.kind = DDP_SCHEDULE_ZB_H1, shape.rank_count = w, shape.microbatch_count = 2 * w;
        RANKS_OK(d->cpu, ddp_schedule_create(&s, &shape));
        RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
        pipe_build(&b->near, w, 1);
        b->near.fault = fault;
        PIPE_TRY(far_build(&b->far, d, &b->near));
        far_desc(&b->far, s, &desc);
        desc.ties = &tie, desc.tie_count = w > 1;
        RANKS_OK(d->cpu, ddp_pipeline_create(&pipeline, group, &desc));
        RANKS_OK(d->cpu, ddp_pipeline_step(pipeline));
        b->far.m.steps++;
        result = ddp_pipeline_step(pipeline);
        snprintf(words, sizeof words, "stage %d, %s of micro-batch %d) failed: the sun does not shine",
                 fault.stage, turn ? "weight gradient" : "forward", fault.microbatch);
        RANKS_CHECK(d->cpu, result == DDP_ERR_CORRUPT && strstr(ddp_last_error(), words), "%s: %s: %s", words,
                    ddp_result_name(result), ddp_last_error());
        RANKS_CHECK(d->cpu, ddp_pipeline_step(pipeline) != DDP_OK && strstr(ddp_last_error(), words), "%s",
                    ddp_last_error());
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        ddp_pipeline_destroy(pipeline);
        ddp_group_destroy(group);
        ddp_schedule_destroy(s);
    }
    return DDP_OK;
}

/* If one rank cannot allocate for a tie, create ends on all ranks, also those without a part in the tie, and
   none waits for the timeout. */
static ddp_result untied(device_rank *d, both *b) {
#if defined(DDP_TEST_ON_CPU)
    int w = ddp_world_size(d->cpu), fired = 0, device;
    ddp_pipeline_tie tie = {0, 1, 1, 1};
    ddp_schedule_desc shape = DDP_ZERO;
    ddp_schedule *s;
    shape.kind = DDP_SCHEDULE_GPIPE;
    shape.rank_count = w;
    shape.microbatch_count = 3; /* in flight: more than two, so that saved memory is offloaded */
    if (w != 3) return DDP_OK;
    RANKS_CHECK(d->cpu, device_get(&device) == cudaSuccess, "no device");
    RANKS_OK(d->cpu, ddp_schedule_create(&s, &shape));
    for (int nth = 1; nth <= 8; nth++) {
        ddp_pipeline_desc desc;
        ddp_pipeline *pipeline;
        ddp_group *group;
        ddp_result result;
        RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
        pipe_build(&b->near, w, 1);
        for (int stage = 0; stage < b->near.stages; stage++) b->near.stage[stage].offload_saved = 1;
        PIPE_TRY(far_build(&b->far, d, &b->near));
        far_desc(&b->far, s, &desc);
        desc.ties = &tie, desc.tie_count = 1;
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        if (ddp_rank(d->cpu) == 1) fake_fail("cudaEventCreateWithFlags", device, nth, 0, 0);
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        result = ddp_pipeline_create(&pipeline, group, &desc);
        RANKS_CHECK(d->cpu,
                    result == DDP_OK
                        || (result == DDP_ERR_ENGINE && strstr(ddp_last_error(), "cudaEventCreateWithFlags")),
                    "event %d: %s %s", nth, ddp_result_name(result), ddp_last_error());
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        fired += fake_fault_fired(0);
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        fake_fault_fired(1);
        ddp_pipeline_destroy(pipeline);
        ddp_group_destroy(group);
    }
    /* ranks as processes have separate fake GPUs */
    RANKS_OK(d->cpu, ddp_all_reduce(d->cpu, &fired, &fired, 1, DDP_I32, DDP_OP_MAX, NULL));
    RANKS_CHECK(d->cpu, fired > 0, "no event was made");
    ddp_schedule_destroy(s);
#else
    (void)d, (void)b;     /* the fake GPU fails no call */
#endif
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    device_rank d;
    both *b = (both *)calloc(1, sizeof *b);
    void *memory;
    RANKS_CHECK(world, b != NULL, "memory");
    PIPE_TRY(device_rank_open(&d, world, 4096));
    RANKS_OK(world, ddp_device_cuda()->alloc(NULL, FAR_FLOATS * sizeof(float), &memory));
    b->far.memory = (float *)memory;
    RANKS_RUN(world, every_schedule(&d, b));
    RANKS_RUN(world, own_orders(&d, b));
    RANKS_RUN(world, without_memory(&d, b));
    RANKS_RUN(world, offloaded(&d, b));
    RANKS_RUN(world, replicas(&d));
    RANKS_RUN(world, failing(&d, b));
    RANKS_RUN(world, untied(&d, b));
    ddp_device_cuda()->free(NULL, memory);
    free(b);
    PIPE_TRY(device_rank_close(&d));
    return device_ok(world, user);
}

int main(int argc, char **argv) { return device_each(argc, argv, rank_main); }

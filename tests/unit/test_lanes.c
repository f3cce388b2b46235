/*  test_lanes.c - a backend that enqueues, on a device with streams, both defined here: streams are queues
    whose work runs as late as possible. The results have the bits of plain CPU groups only if ddp.h orders
    the two streams by its events, and nothing runs before a call waits for it. Ranks are threads, one or two;
    collectives run over the CPU group of each group. */
#include "ddp.h"
#include "inner.h"

#include "../support/unit.h"
#include "../support/watchdog.h"

enum { ITEMS = 4096, ARENA = 1 << 22, N = 3000 };

typedef struct event {
    int recorded, done;
} event;

/* One entry of a stream: a call of the backend, a device function, or a mark to set or to wait for. */
enum { CALL, COPY, ZERO, ADD, SCALE, DIVIDE, SQUARES, MARK, FOLLOW };
typedef struct item {
    int kind;
    ddp_call call;
    void *dst;
    const void *src, *other;
    ddp_tensor tensor;
    size_t count;
    ddp_dtype dtype;
    float factor;
    uint64_t divisor;
    event *mark;
    int version;
} item;

typedef struct lane {
    item items[ITEMS];
    int first, end;
} lane;

/* State of the device per group; the backend adds its own. */
typedef struct machine {
    lane lanes[2];
    unsigned char *arena;
    size_t used;
    int executed;       /* items run up to now */
    int fail_next;      /* the next call of the backend fails */
    int fail_batch_end; /* the end of a batch fails */
    ddp_group *control;
    ddp_result cause;
    char text[256];
} machine;

static __thread machine *here; /* of the rank's thread: each has one group of this kind */
static __thread ddp_stream_kind entered;

static void execute(machine *m, int which);

static void finish_mark(machine *m, event *mark, int version) {
    for (int which = 1; which >= 0; which--)
        while (mark->done < version && m->lanes[which].first < m->lanes[which].end) execute(m, which);
    assert_true(mark->done >= version);
}

static void execute(machine *m, int which) {
    item *i = &m->lanes[which].items[m->lanes[which].first++];
    const ddp_device *cpu = ddp_device_cpu();
    const ddp_call *call = &i->call;
    m->executed++;
    switch (i->kind) {
    case CALL:
        if (call->kind == DDP_CALL_ALL_REDUCE && call->op == DDP_OP_AVG && call->divisor) {
            assert_int_equal(ddp_all_reduce(m->control, call->send, call->recv, call->count, call->dtype,
                                            DDP_OP_SUM, NULL),
                             DDP_OK);
            const ddp_tensor sum = {call->recv, call->dtype, 1, {(int64_t)call->count}};
            cpu->divide(&sum, 1, call->divisor);
        } else if (call->kind == DDP_CALL_ALL_REDUCE) {
            assert_int_equal(
                ddp_all_reduce(m->control, call->send, call->recv, call->count, call->dtype, call->op, NULL),
                DDP_OK);
        } else if (call->kind == DDP_CALL_BROADCAST) {
            assert_int_equal(
                ddp_broadcast(m->control, call->recv, call->count, call->dtype, call->root, NULL), DDP_OK);
        } else if (call->kind == DDP_CALL_SEND) {
            assert_int_equal(
                ddp_send(m->control, call->send, call->count, call->dtype, call->root, call->tag, NULL),
                DDP_OK);
        } else {
            assert_int_equal(call->kind, DDP_CALL_RECV);
            assert_int_equal(
                ddp_recv(m->control, call->recv, call->count, call->dtype, call->root, call->tag, NULL),
                DDP_OK);
        }
        break;
    case COPY: memcpy(i->dst, i->src, i->count); break;
    case ZERO: memset(i->dst, 0, i->count); break;
    case ADD: cpu->add(i->dst, i->src, i->other, i->count, i->dtype); break;
    case SCALE: cpu->scale(&i->tensor, 1, i->factor); break;
    case DIVIDE: cpu->divide(&i->tensor, 1, i->divisor); break;
    case SQUARES: cpu->sum_squares((ddp_exact_sum *)i->dst, 0, &i->tensor, 1); break;
    /* A newer version of a reused event can already be complete. */
    case MARK:
        if (i->mark->done < i->version) i->mark->done = i->version;
        break;
    case FOLLOW: finish_mark(m, i->mark, i->version); break;
    }
}

static void synchronise(machine *m, int which) {
    while (m->lanes[which].first < m->lanes[which].end) execute(m, which);
}

static item *put(machine *m, int which, int kind) {
    lane *l = &m->lanes[which];
    item *i;
    if (l->first == l->end) l->first = l->end = 0;
    assert_true(l->end < ITEMS);
    i = &l->items[l->end++];
    memset(i, 0, sizeof *i);
    i->kind = kind;
    return i;
}

/* ---- the device ---- */

static int on_device(const void *p) {
    return (const unsigned char *)p >= here->arena && (const unsigned char *)p < here->arena + ARENA;
}
static ddp_result lane_alloc(ddp_group *group, size_t size_bytes, void **out) {
    (void)group;
    *out = here->arena + here->used;
    here->used += (size_bytes + 63) / 64 * 64;
    assert_true(here->used <= ARENA);
    return DDP_OK;
}
static void lane_free(ddp_group *group, void *memory) {
    (void)group;
    (void)memory;
}
static void lane_copy(void *dst, const void *src, size_t size_bytes) {
    item *i = put(here, entered, COPY);
    i->dst = dst;
    i->src = src;
    i->count = size_bytes;
    if (!on_device(dst) || !on_device(src)) synchronise(here, entered);
}
static void lane_fill_zero(void *dst, size_t size_bytes) {
    item *i = put(here, entered, ZERO);
    i->dst = dst;
    i->count = size_bytes;
}
static void lane_cast(void *dst, ddp_dtype to, const void *src, ddp_dtype from, size_t count) {
    (void)dst;
    (void)to;
    (void)src;
    (void)from;
    (void)count;
    fail();
}
/* Equal dtypes. */
static void lane_copy_many(const ddp_copy_range *ranges, int range_count, ddp_dtype to, ddp_dtype from) {
    assert_int_equal(to, from);
    for (int i = 0; i < range_count; i++)
        lane_copy(ranges[i].dst, ranges[i].src, ranges[i].count * ddp_dtype_size(to));
}
static void lane_add(void *dst, const void *left, const void *right, size_t count, ddp_dtype dtype) {
    item *i = put(here, entered, ADD);
    i->dst = dst;
    i->src = left;
    i->other = right;
    i->count = count;
    i->dtype = dtype;
}
static void lane_scale(const ddp_tensor *tensors, int count, float factor) {
    for (int k = 0; k < count; k++) {
        item *i = put(here, entered, SCALE);
        i->tensor = tensors[k];
        i->factor = factor;
    }
}
static void lane_divide(const ddp_tensor *tensors, int count, uint64_t divisor) {
    for (int k = 0; k < count; k++) {
        item *i = put(here, entered, DIVIDE);
        i->tensor = tensors[k];
        i->divisor = divisor;
    }
}
static void lane_sum_squares(ddp_exact_sum *sums, int stride, const ddp_tensor *tensors, int count) {
    assert_true(on_device(sums));
    for (int k = 0; k < count; k++) {
        item *i = put(here, entered, SQUARES);
        i->dst = sums + k * stride;
        i->tensor = tensors[k];
    }
}
static ddp_result lane_open(ddp_group *group, ddp_group *parent, void **state) {
    assert_null(parent);
    *state = ddp_group_backend_user(group);
    return DDP_OK;
}
static void lane_close(ddp_group *group, void *state) {
    (void)group;
    assert_ptr_equal(state, here);
}
static ddp_result lane_use_stream(ddp_group *group, ddp_stream_kind lane) {
    assert_ptr_equal(ddp_group_device_state(group), here);
    entered = lane;
    return DDP_OK;
}
static ddp_result lane_check(ddp_group *group) {
    (void)group;
    return DDP_OK;
}
static int events;
static ddp_result lane_event_create(ddp_group *group, void **out) {
    (void)group;
    *out = calloc(1, sizeof(event));
    __atomic_add_fetch(&events, 1, __ATOMIC_RELAXED);
    return DDP_OK;
}
static void lane_event_destroy(ddp_group *group, void *e) {
    (void)group;
    free(e);
    __atomic_sub_fetch(&events, 1, __ATOMIC_RELAXED);
}
static ddp_result lane_event_record(ddp_group *group, ddp_stream_kind which, void *e) {
    item *i = put((machine *)ddp_group_device_state(group), which, MARK);
    i->mark = (event *)e;
    i->version = ++i->mark->recorded;
    return DDP_OK;
}
static ddp_result lane_event_wait(ddp_group *group, ddp_stream_kind which, void *e) {
    item *i = put((machine *)ddp_group_device_state(group), which, FOLLOW);
    i->mark = (event *)e;
    i->version = i->mark->recorded;
    return DDP_OK;
}
static ddp_result lane_event_test(ddp_group *group, void *e, int *done) {
    (void)group;
    *done = ((event *)e)->done == ((event *)e)->recorded;
    if (!*done && here->lanes[DDP_STREAM_COMM].first < here->lanes[DDP_STREAM_COMM].end)
        execute(here, DDP_STREAM_COMM);
    return DDP_OK;
}
#define LANE_FIELD(name, result, arguments) lane_##name,
static const ddp_device lanes_device = {"lanes", 1,
                                        DDP_DEVICE_MEMORY(LANE_FIELD) DDP_DEVICE_STREAMS(LANE_FIELD)
                                            DDP_DEVICE_PINNED(DDP_NULL_FIELD) NULL,
                                        NULL};

/* ---- the backend ---- */

static ddp_result queue_open(ddp_group *group, void **state) {
    *state = ddp_group_backend_user(group);
    return DDP_OK;
}
static ddp_result queue_status(const ddp_group *group, void *state) {
    machine *m = (machine *)state;
    (void)group;
    return m->cause == DDP_OK ? DDP_OK : ddp_fail(m->cause, "%s", m->text);
}
static void queue_poison(ddp_group *group, void *state, ddp_result cause, const char *text) {
    machine *m = (machine *)state;
    (void)group;
    if (m->cause == DDP_OK) snprintf(m->text, sizeof m->text, "%s", text);
    if (m->cause == DDP_OK) m->cause = cause;
}
static ddp_result queue_run(ddp_group *group, void *state, const ddp_call *call) {
    machine *m = (machine *)state;
    ddp_result result = queue_status(group, state);
    if (result != DDP_OK) return result;
    if (call->kind == DDP_CALL_ALL_GATHER && call->flags)
        return ddp_all_gather(m->control, call->send, call->recv, call->count, call->dtype, NULL);
    if (call->kind == DDP_CALL_ALL_REDUCE && call->flags)
        return ddp_all_reduce(m->control, call->send, call->recv, call->count, call->dtype, call->op, NULL);
    assert_int_equal(entered, DDP_STREAM_COMM);
    if (m->fail_next) return ddp_fail(DDP_ERR_ENGINE, "the queue is out of order");
    put(m, DDP_STREAM_COMM, CALL)->call = *call;
    return DDP_OK;
}
static int batches;
static ddp_result queue_batch(ddp_group *group, void *state, int begin) {
    (void)group;
    if (begin) __atomic_add_fetch(&batches, 1, __ATOMIC_RELAXED);
    if (begin || !((machine *)state)->fail_batch_end) return DDP_OK;
    return ddp_fail(DDP_ERR_ENGINE, "the batch does not end");
}
static ddp_result queue_alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    (void)state;
    return lane_alloc(group, size_bytes, out);
}
static ddp_result queue_free(ddp_group *group, void *state, void *memory) {
    (void)group;
    (void)state;
    (void)memory;
    return DDP_OK;
}
static void queue_close(ddp_group *group, void *state) {
    (void)group;
    (void)state;
}
static const ddp_backend queue_backend = {
    "queue",     queue_open, queue_run,    NULL,         NULL,        NULL, NULL,
    queue_alloc, queue_free, queue_status, queue_poison, queue_close, 1,    DDP_ORDER_ANY,
    queue_batch, NULL,       NULL,         NULL,         NULL,
};

/* The same, but calls are complete on return, as with ranks that share a GPU. */
static const ddp_backend plain_backend = {
    "plain",     queue_open, queue_run,    NULL,         NULL,        NULL, NULL,
    queue_alloc, queue_free, queue_status, queue_poison, queue_close, 0,    DDP_ORDER_ANY,
    NULL,        NULL,       NULL,         NULL,         NULL,
};

static ddp_group *group_make_on(ddp_group *world, const ddp_backend *backend) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group;
    here = (machine *)calloc(1, sizeof *here);
    here->arena = (unsigned char *)calloc(1, ARENA);
    here->control = world;
    desc.backend = backend;
    desc.backend_user = here;
    desc.device = &lanes_device;
    desc.name = "lanes";
    assert_int_equal(ddp_group_create_on(&group, world, &desc), DDP_OK);
    assert_int_equal(ddp_group_order(group), DDP_ORDER_ANY);
    assert_string_equal(ddp_group_name(group), "lanes");
    return group;
}

static ddp_group *group_make(ddp_group *world) { return group_make_on(world, &queue_backend); }

static void group_end(ddp_group *group) {
    synchronise(here, 0);
    synchronise(here, 1);
    ddp_group_destroy(group);
    free(here->arena);
    free(here);
}

static float *floats(int count) {
    void *out;
    lane_alloc(NULL, (size_t)count * 4, &out);
    return (float *)out;
}
static void fill_with(float *dst, int count, int seed) {
    for (int i = 0; i < count; i++) dst[i] = (float)((i * 37 + seed * 101) % 1999) * 0.37f - 300;
}

/* ---- programs ---- */

static void scale_by(float *data, float factor) {
    const ddp_tensor all = {data, DDP_F32, 1, {N}};
    lane_scale(&all, 1, factor);
}

/* Work waits for the compute stream; ddp_wait and later work wait for it. Nothing of it runs in the time of
   the host. */
static ddp_result calls(ddp_group *world, void *user) {
    ddp_group *group = group_make(world);
    float *in = floats(N), *out = floats(N), host[N], plain[N];
    ddp_work work[2];
    int done = 0;
    (void)user;
    fill_with(host, N, ddp_rank(world));
    assert_int_equal(ddp_all_reduce(world, host, plain, N, DDP_F32, DDP_OP_SUM, NULL), DDP_OK);
    lane_copy(in, host, sizeof host);
    scale_by(in, 2.0f);
    here->executed = 0;
    assert_int_equal(ddp_all_reduce(group, in, out, N, DDP_F32, DDP_OP_SUM, &work[0]), DDP_OK);
    assert_int_equal(ddp_broadcast(group, in, N, DDP_F32, 0, &work[1]), DDP_OK);
    assert_int_equal(ddp_wait(group, &work[0]), DDP_OK);
    scale_by(out, 0.5f);
    assert_int_equal(here->executed, 0);
    lane_copy(host, out, sizeof host);
    for (int i = 0; i < N; i++) assert_true(host[i] == plain[i]);
    for (int tries = 0; !done && tries < 100; tries++)
        assert_int_equal(ddp_test(group, &work[1], &done), DDP_OK);
    assert_true(done);
    assert_int_equal(ddp_wait(group, &work[1]), DDP_OK);
    fill_with(plain, N, 0);
    lane_copy(host, in, sizeof host);
    for (int i = 0; i < N; i++) assert_true(host[i] == plain[i] * 2);
    /* No work: the same, waited for by the stream. */
    assert_int_equal(ddp_all_reduce(group, in, in, N, DDP_F32, DDP_OP_MAX, NULL), DDP_OK);
    lane_copy(host, in, sizeof host);
    for (int i = 0; i < N; i++) assert_true(host[i] == plain[i] * 2);
    group_end(group);
    return DDP_OK;
}

static ddp_result messages(ddp_group *world, void *user) {
    ddp_group *group = group_make(world);
    float *mine = floats(N), *theirs = floats(N), host[N], plain[N];
    int other = 1 - ddp_rank(world);
    (void)user;
    fill_with(plain, N, other);
    fill_with(host, N, ddp_rank(world));
    lane_copy(mine, host, sizeof host);
    assert_int_equal(ddp_p2p_begin(group), DDP_OK);
    if (other) assert_int_equal(ddp_send(group, mine, N, DDP_F32, other, 0, NULL), DDP_OK);
    assert_int_equal(ddp_recv(group, theirs, N, DDP_F32, other, 0, NULL), DDP_OK);
    if (!other) assert_int_equal(ddp_send(group, mine, N, DDP_F32, other, 0, NULL), DDP_OK);
    here->executed = 0;
    assert_int_equal(ddp_p2p_end(group), DDP_OK);
    assert_int_equal(here->executed, 0);
    lane_copy(host, theirs, sizeof host);
    for (int i = 0; i < N; i++) assert_true(host[i] == plain[i]);
    group_end(group);
    return DDP_OK;
}

/* The backend accepts all messages of a batch, and fails only at its end. */
static ddp_result batch_end_fails(ddp_group *world, void *user) {
    ddp_group *group = group_make(world);
    float *mine = floats(N), *theirs = floats(N);
    int other = 1 - ddp_rank(world);
    (void)user;
    here->fail_batch_end = 1;
    assert_int_equal(ddp_p2p_begin(group), DDP_OK);
    if (other) assert_int_equal(ddp_send(group, mine, N, DDP_F32, other, 0, NULL), DDP_OK);
    assert_int_equal(ddp_recv(group, theirs, N, DDP_F32, other, 0, NULL), DDP_OK);
    if (!other) assert_int_equal(ddp_send(group, mine, N, DDP_F32, other, 0, NULL), DDP_OK);
    assert_int_equal(ddp_p2p_end(group), DDP_ERR_ENGINE);
    assert_non_null(strstr(ddp_last_error(), "the batch does not end"));
    group_end(group);
    return DDP_OK;
}

static ddp_result doubled(ddp_group *group, void *argument) {
    float *data = (float *)argument;
    scale_by(data, 2.0f);
    /* in place: the task is on the communication stream */
    assert_int_equal(ddp_all_reduce(group, data, data, N, DDP_F32, DDP_OP_SUM, NULL), DDP_OK);
    assert_int_equal(entered, DDP_STREAM_COMM);
    scale_by(data, 0.5f);
    return DDP_OK;
}

static ddp_result tasks(ddp_group *world, void *user) {
    ddp_group *group = group_make(world);
    float *data = floats(N), host[N], plain[N];
    ddp_work work;
    (void)user;
    fill_with(host, N, ddp_rank(world));
    assert_int_equal(ddp_all_reduce(world, host, plain, N, DDP_F32, DDP_OP_SUM, NULL), DDP_OK);
    lane_copy(data, host, sizeof host);
    here->executed = 0;
    assert_int_equal(ddp_group_enqueue(group, doubled, data, &work), DDP_OK);
    assert_int_equal(ddp_wait(group, &work), DDP_OK);
    assert_int_equal(here->executed, 0);
    assert_int_equal(entered, DDP_STREAM_COMPUTE);
    lane_copy(host, data, sizeof host);
    for (int i = 0; i < N; i++) assert_true(host[i] == plain[i]);
    group_end(group);
    return DDP_OK;
}

static ddp_result notes_lane(ddp_group *group, void *argument) {
    (void)group;
    *(int *)argument = (int)entered;
    return DDP_OK;
}

static ddp_result fails(ddp_group *group, void *argument) {
    (void)group;
    (void)argument;
    return ddp_fail(DDP_ERR_NO_MEMORY, "nothing is left");
}

/* A blocking task also runs on the communication stream: its output can still be read there by an earlier
   task that no call has waited for. If nothing was queued it ran on the caller's stream, and a gather
   overwrote the input of a reduction. */
static ddp_result blocking_tasks(ddp_group *world, void *user) {
    ddp_group *group = group_make_on(world, &plain_backend);
    int lane = -1;
    (void)user;
    assert_int_equal(ddp_group_enqueue(group, notes_lane, &lane, NULL), DDP_OK);
    assert_int_equal(lane, DDP_STREAM_COMM);
    assert_int_equal(entered, DDP_STREAM_COMPUTE);
    assert_int_equal(ddp_group_enqueue(group, fails, NULL, NULL), DDP_ERR_NO_MEMORY);
    assert_int_equal(ddp_group_status(group), DDP_OK); /* the failure of a task affects only its work */
    group_end(group);
    return DDP_OK;
}

/* A failure at the call is stored in its work. One that is detected later is returned by the wait; the next
   call only refers to it. */
static ddp_result errors(ddp_group *world, void *user) {
    ddp_group *group = group_make(world);
    float *data = floats(N);
    ddp_work work;
    (void)user;
    here->fail_next = 1;
    assert_int_equal(ddp_all_reduce(group, data, data, N, DDP_F32, DDP_OP_SUM, &work), DDP_OK);
    assert_int_equal(ddp_wait(group, &work), DDP_ERR_ENGINE);
    assert_non_null(strstr(ddp_last_error(),
                           "ddp_all_reduce group=lanes seq=1 f32 count=3000: the queue is out of order"));
    assert_int_equal(ddp_group_status(group), DDP_ERR_ENGINE);
    here->fail_next = 0;
    here->cause = DDP_OK;
    inner.forget_cause(group);
    assert_int_equal(ddp_all_reduce(group, data, data, N, DDP_F32, DDP_OP_SUM, &work), DDP_OK);
    queue_poison(group, here, DDP_ERR_TIMEOUT, "rank 7 is behind");
    assert_int_equal(ddp_wait(group, &work), DDP_ERR_TIMEOUT);
    assert_non_null(strstr(ddp_last_error(), "seq=2 f32 count=3000: rank 7 is behind"));
    assert_int_equal(ddp_all_reduce(group, data, data, N, DDP_F32, DDP_OP_SUM, NULL), DDP_ERR_POISONED);
    group_end(group);
    return DDP_OK;
}

/* One training loop of a reducer; the gradients after three steps, and the norm. */
static void train(ddp_group *group, const ddp_device *device, float *out, float *norm) {
    static const int64_t rows[5] = {7, 300, 1, 40, 90};
    ddp_param params[5];
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_reducer *reducer;
    float host[600];
    memset(params, 0, sizeof params);
    for (int p = 0; p < 5; p++) {
        params[p].value.dtype = DDP_F32;
        params[p].value.ndim = 2;
        params[p].value.shape[0] = rows[p];
        params[p].value.shape[1] = 2;
        assert_int_equal(device->alloc(group, (size_t)rows[p] * 8, &params[p].value.data), DDP_OK);
        /* The reducer places the others. */
        if (p & 1)
            assert_int_equal(device->alloc(group, (size_t)rows[p] * 8 + 128, &params[p].grad.data), DDP_OK);
    }
    desc.params = params;
    desc.param_count = 5;
    desc.first_bucket_bytes = 100;
    desc.bucket_cap_bytes = 1500;
    assert_int_equal(ddp_reducer_create(&reducer, group, &desc), DDP_OK);
    for (int step = 0; step < 3; step++) {
        for (int p = 4; p >= 0; p--) {
            fill_with(host, (int)rows[p] * 2, step * 17 + p + ddp_rank(group) * 5);
            device->copy(params[p].grad.data, host, (size_t)rows[p] * 8);
            const ddp_tensor grad = {params[p].grad.data, DDP_F32, 1, {rows[p] * 2}};
            device->scale(&grad, 1, 1.5f);
            assert_int_equal(ddp_reducer_ready(reducer, p), DDP_OK);
        }
        assert_int_equal(ddp_reducer_wait(reducer), DDP_OK);
    }
    assert_int_equal(ddp_reducer_clip_grad_norm(reducer, 10.0f, norm), DDP_OK);
    for (int p = 0; p < 5; out += rows[p++] * 2) device->copy(out, params[p].grad.data, (size_t)rows[p] * 8);
    ddp_reducer_destroy(reducer);
    for (int p = 0; p < 5; p++) {
        device->free(group, params[p].value.data);
        if (p & 1) device->free(group, params[p].grad.data);
    }
}

static ddp_result reducers(ddp_group *world, void *user) {
    ddp_group *group = group_make(world);
    float lanes[1000], plain[1000], norm, plain_norm;
    (void)user;
    memset(lanes, 0, sizeof lanes);
    memset(plain, 0, sizeof plain);
    train(world, ddp_device_cpu(), plain, &plain_norm);
    train(group, &lanes_device, lanes, &norm);
    assert_memory_equal(lanes, plain, sizeof plain);
    assert_memory_equal(&norm, &plain_norm, sizeof norm);
    group_end(group);
    return DDP_OK;
}

static void run(ddp_rank_fn fn, int world_size) {
    ddp_launch_desc launch = DDP_ZERO;
    launch.world_size = world_size;
    launch.mode = DDP_LAUNCH_THREADS;
    launch.no_affinity = 1;
    if (ddp_launch(&launch, fn, NULL) != DDP_OK) fail_msg("%s", ddp_last_error());
    assert_int_equal(events, 0);
}

static void test_calls(void **state) {
    (void)state;
    run(calls, 1);
    run(calls, 2);
}
static void test_messages(void **state) {
    (void)state;
    batches = 0;
    run(messages, 2);
    assert_int_equal(batches, 2);
}
static void test_batch_end_fails(void **state) {
    (void)state;
    run(batch_end_fails, 2);
}
static void test_tasks(void **state) {
    (void)state;
    run(tasks, 1);
    run(tasks, 2);
}
static void test_blocking_tasks(void **state) {
    (void)state;
    run(blocking_tasks, 1);
    run(blocking_tasks, 2);
}
static void test_errors(void **state) {
    (void)state;
    run(errors, 1);
    run(errors, 2);
}
static void test_reducers(void **state) {
    (void)state;
    run(reducers, 1);
    run(reducers, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),           cmocka_unit_test(test_messages),
        cmocka_unit_test(test_batch_end_fails), cmocka_unit_test(test_tasks),
        cmocka_unit_test(test_blocking_tasks),  cmocka_unit_test(test_errors),
        cmocka_unit_test(test_reducers)};
    watchdog_start(60);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/*  test_call_orders.c - every order in which the calls of an object can be made, up to some length.

    Each object has a table of calls and a model of its documented behaviour. All sequences of calls run on a
    fresh object. Each call must follow the model: succeed, with the value that the model computes, or return
    DDP_ERR_INVALID under its public name. ddp_reducer_clip_grad_norm before ddp_reducer_wait returned DDP_OK
    and a wrong norm; so did ddp_pipeline_clip_grad_norm before the first step. */
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"

#include "../support/unit.h"
#include "../support/watchdog.h"

#include <math.h>
#include <stdarg.h>
#include <unistd.h>

enum { LONGEST = 8 };
static char sequence[256]; /* the calls up to now, for messages */

/* Runs a function on every sequence of length calls of kinds kinds. */
typedef void (*sequence_fn)(const int *calls, int length, void *user);
static void for_all_sequences(int kinds, int length, sequence_fn fn, void *user) {
    int calls[LONGEST] = {0};
    for (;;) {
        int at = length - 1;
        sequence[0] = 0;
        fn(calls, length, user);
        while (at >= 0 && ++calls[at] == kinds) calls[at--] = 0;
        if (at < 0) return;
    }
}

static int in_rank; /* a rank is a separate process, which cmocka must not leave with longjmp */
static void failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void failed(const char *format, ...) {
    char text[700];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "%s\n", text);
    if (in_rank) _exit(1);
    fail();
}
#define WORKS(call)                                                                    \
    do {                                                                               \
        if ((call) != DDP_OK) failed("%s: %s: %s", sequence, #call, ddp_last_error()); \
    } while (0)

static void add_to_sequence(const char *name) {
    size_t used = strlen(sequence);
    snprintf(sequence + used, sizeof sequence - used, "%s%s", used ? ", " : "", name);
}

/* One call of a sequence. A failure must be the wanted one, under the public name. */
static void expect(const char *name, ddp_result result, ddp_result wanted) {
    if (result != wanted)
        failed("%s: %s, wanted %s; '%s'", sequence, ddp_result_name(result), ddp_result_name(wanted),
               result ? ddp_last_error() : "");
    if (result != DDP_OK && !strstr(ddp_last_error(), name))
        failed("%s: '%s' does not name %s", sequence, ddp_last_error(), name);
}

static void expect_number(const char *what, double have, double want) {
    if (!(have == want) && !(isnan(have) && isnan(want)))
        failed("%s: %s is %.9g, wanted %.9g", sequence, what, have, want);
}

static ddp_group *alone(void) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group = NULL;
    desc.init_method = "self://";
    WORKS(ddp_group_create(&group, &desc));
    return group;
}

//== reducer ================================================================================

enum { READY0, READY1, WAIT, CLIP, NO_SYNC, SYNC, WAIT_MEAN, WAIT_NEGATIVE, REDUCER_CALLS };
static const char *const reducer_calls[REDUCER_CALLS] = {
    "ddp_reducer_ready(0)",   "ddp_reducer_ready(1)",
    "ddp_reducer_wait",       "ddp_reducer_clip_grad_norm",
    "ddp_reducer_no_sync(1)", "ddp_reducer_no_sync(0)",
    "ddp_reducer_wait_mean",  "ddp_reducer_wait_mean with a negative count"};
static const char *const reducer_names[REDUCER_CALLS] = {
    "ddp_reducer_ready",   "ddp_reducer_ready",   "ddp_reducer_wait",      "ddp_reducer_clip_grad_norm",
    "ddp_reducer_no_sync", "ddp_reducer_no_sync", "ddp_reducer_wait_mean", "ddp_reducer_wait_mean"};
typedef struct reducer_case {
    ddp_group *group;
    int find_unused, per_token;
} reducer_case;

/* Rank r has the gradients (3, 4) (r + 1). */
static void reducer_sequence(const int *calls, int length, void *user) {
    const reducer_case *c = (const reducer_case *)user;
    ddp_group *group = c->group;
    float value[2][2] = {{0, 0}, {0, 0}}, grad[2][2];
    ddp_param params[2];
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_reducer *reducer;
    int w = ddp_world_size(group);
    int ready[2] = {0, 0}, no_sync = 0, averaged = 0,
        known = 1; /* known: no failed wait has left partially reduced gradients */
    double sum[2], scale = (w + 1) / 2.0 * w, first = 1; /* sum: of the gradients over ranks */
    memset(params, 0, sizeof params);
    for (int i = 0; i < 2; i++) {
        params[i].name = i ? "second" : "first";
        params[i].value.data = value[i];
        params[i].value.dtype = DDP_F32;
        params[i].value.ndim = 1;
        params[i].value.shape[0] = 2;
        params[i].grad = params[i].value;
        params[i].grad.data = grad[i];
        grad[i][0] = (float)((i ? 4 : 3) * (ddp_rank(group) + 1));
        grad[i][1] = 0;
        sum[i] = (i ? 4 : 3) * scale;
    }
    desc.params = params;
    desc.param_count = 2;
    desc.find_unused = c->find_unused;
    desc.per_token = c->per_token;
    WORKS(ddp_reducer_create(&reducer, group, &desc));
    for (int i = 0; i < length; i++) {
        int call = calls[i], takes_mean = call == WAIT_MEAN || call == WAIT_NEGATIVE,
            waits = call == WAIT || takes_mean, missing = !c->find_unused && !(ready[0] && ready[1]);
        ddp_result result = DDP_OK, wanted = DDP_OK;
        ddp_mean loss = DDP_ZERO;
        float norm = -1;
        add_to_sequence(reducer_calls[call]);
        ddp_mean_add(&loss, 1.0, call == WAIT_NEGATIVE ? -2 : 2);
        if (call == READY0 || call == READY1)
            result = ddp_reducer_ready(reducer, call - READY0);
        else if (call == WAIT)
            result = ddp_reducer_wait(reducer);
        else if (takes_mean)
            result = ddp_reducer_wait_mean(reducer, &loss);
        else if (call == CLIP)
            result = ddp_reducer_clip_grad_norm(reducer, 1e30f, &norm);
        else
            result = ddp_reducer_no_sync(reducer, call == NO_SYNC);

        if (call <= READY1 && !no_sync) {
            if (ready[call - READY0]) wanted = DDP_ERR_INVALID;
            ready[call - READY0] = 1;
            averaged = 0;
        }
        if (takes_mean && !c->per_token)
            wanted = DDP_ERR_INVALID;
        else if (waits && !no_sync) {
            double divisor = call == WAIT_MEAN ? 2.0 * w : c->per_token ? 1 : w;
            if (missing) wanted = DDP_ERR_INVALID;
            known &= !missing;
            for (int p = 0; p < 2; p++)
                sum[p] = ready[p] ? sum[p] / divisor * (first ? 1 : w)
                                  : 0; /* from now on equal on all ranks */
            first = 0;
            averaged = !missing;
            ready[0] = ready[1] = 0;
            if (call == WAIT_NEGATIVE) { /* gradients are sums over ranks from now on */
                wanted = DDP_ERR_INVALID;
                averaged = known = 0;
            }
        }
        if (call == CLIP && (no_sync || !averaged)) wanted = DDP_ERR_INVALID;
        if (call == NO_SYNC || call == SYNC) {
            if (ready[0] || ready[1])
                wanted = DDP_ERR_INVALID;
            else
                no_sync = call == NO_SYNC;
            if (call == NO_SYNC && wanted == DDP_OK) averaged = 0;
        }
        /* an error detected by another public call of ddp_reducer_wait_mean can have that call's name */
        expect(takes_mean && c->per_token ? "ddp_" : reducer_names[call], result, wanted);
        if (call == CLIP && result == DDP_OK && known)
            expect_number("the norm", (double)norm, (double)(float)sqrt(sum[0] * sum[0] + sum[1] * sum[1]));
    }
    ddp_reducer_destroy(reducer);
}

static void reducer_orders(void **state) {
    ddp_group *group = alone();
    (void)state;
    for (int find = 0; find < 2; find++)
        for (int per_token = 0; per_token < 2; per_token++) {
            reducer_case c = {group, find, per_token};
            for (int length = 1; length <= 5; length++)
                for_all_sequences(REDUCER_CALLS, length, reducer_sequence, &c);
        }
    ddp_group_destroy(group);
}

static ddp_result reducer_on_two(ddp_group *world, void *user) {
    reducer_case c = {world, 0, *(int *)user};
    in_rank = 1;
    for (int length = 1; length <= 4; length++)
        for_all_sequences(REDUCER_CALLS, length, reducer_sequence, &c);
    return DDP_OK;
}

static void reducer_orders_of_two_ranks(void **state) {
    (void)state;
    for (int per_token = 0; per_token < 2; per_token++) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = 2;
        desc.group.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
        if (ddp_launch(&desc, reducer_on_two, &per_token) != DDP_OK) failed("%s", ddp_last_error());
    }
}

//== accumulator ============================================================================

enum { ACC_READY, ACC_NEXT, ACC_WAIT, ACC_CLIP, ACC_CALLS };
static const char *const accumulator_names[ACC_CALLS] = {"ddp_accumulator_ready", "ddp_accumulator_next",
                                                         "ddp_reducer_wait", "ddp_reducer_clip_grad_norm"};

/* Two micro-batches, one parameter. Backward number k leaves the gradient k. */
static void accumulator_sequence(const int *calls, int length, void *user) {
    ddp_group *group = (ddp_group *)user;
    float value = 0, grad = 0, norm;
    ddp_param param;
    ddp_reducer_desc reducer_desc = DDP_ZERO;
    ddp_accumulator_desc desc = DDP_ZERO;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    int micro_batch = 0, announced = 0, ready = 0, averaged = 0, backward = 0;
    double sum = 0;
    memset(&param, 0, sizeof param);
    param.value.data = &value;
    param.value.dtype = DDP_F32;
    param.grad.data = &grad;
    reducer_desc.params = desc.params = &param;
    reducer_desc.param_count = desc.param_count = 1;
    reducer_desc.micro_batch_count = desc.micro_batch_count = 2;
    WORKS(ddp_reducer_create(&reducer, group, &reducer_desc));
    desc.reducer = reducer;
    WORKS(ddp_accumulator_create(&accumulator, group, &desc));
    for (int i = 0; i < length; i++) {
        ddp_result result, wanted = DDP_OK;
        int last = -1;
        add_to_sequence(accumulator_names[calls[i]]);
        switch (calls[i]) {
        case ACC_READY:
            if (announced || ready)
                wanted = DDP_ERR_INVALID;
            else
                grad = (float)++backward;
            result = ddp_accumulator_ready(accumulator, 0);
            if (wanted != DDP_OK) break;
            sum = micro_batch ? sum + backward : backward;
            announced = 1;
            averaged = 0;
            ready = micro_batch == 1;
            break;
        case ACC_NEXT:
            if (!announced) wanted = DDP_ERR_INVALID;
            result = ddp_accumulator_next(accumulator, &last);
            if (wanted != DDP_OK) break;
            announced = 0;
            micro_batch = !micro_batch;
            expect_number("last", last, !micro_batch);
            break;
        case ACC_WAIT:
            if (!ready) wanted = DDP_ERR_INVALID;
            result = ddp_reducer_wait(reducer);
            averaged = ready;
            ready = 0;
            if (averaged) expect_number("the average", (double)grad, sum / 2);
            break;
        default:
            if (!averaged) wanted = DDP_ERR_INVALID;
            result = ddp_reducer_clip_grad_norm(reducer, 1e30f, &norm);
            if (averaged) expect_number("the norm", (double)norm, sum / 2);
        }
        expect(accumulator_names[calls[i]], result, wanted);
    }
    ddp_accumulator_destroy(accumulator);
    ddp_reducer_destroy(reducer);
}

static void accumulator_orders(void **state) {
    ddp_group *group = alone();
    (void)state;
    for (int length = 1; length <= 8; length++)
        for_all_sequences(ACC_CALLS, length, accumulator_sequence, group);
    ddp_group_destroy(group);
}

//== join ===================================================================================

enum { JOIN_WITH, JOIN_WITHOUT, JOIN_READY, JOIN_WAIT, JOIN_CLIP, JOIN_CALLS };
static const char *const join_names[JOIN_CALLS] = {"ddp_join_step", "ddp_join_step", "ddp_reducer_ready",
                                                   "ddp_reducer_wait", "ddp_reducer_clip_grad_norm"};

static void join_sequence(const int *calls, int length, void *user) {
    ddp_group *group = (ddp_group *)user;
    float value = 0, grad = 3, norm;
    ddp_param param;
    ddp_reducer_desc reducer_desc = DDP_ZERO;
    ddp_join_desc desc = DDP_ZERO;
    ddp_reducer *reducer;
    ddp_join *join;
    int ready = 0, averaged = 0;
    memset(&param, 0, sizeof param);
    param.value.data = &value;
    param.value.dtype = DDP_F32;
    param.grad.data = &grad;
    reducer_desc.params = &param;
    reducer_desc.param_count = 1;
    WORKS(ddp_reducer_create(&reducer, group, &reducer_desc));
    desc.reducer = reducer;
    WORKS(ddp_join_create(&join, group, &desc));
    for (int i = 0; i < length; i++) {
        ddp_result result, wanted = DDP_OK;
        int call = calls[i], active = -1;
        add_to_sequence(join_names[call]);
        if (call == JOIN_WITH || call == JOIN_WITHOUT) {
            if (ready) wanted = DDP_ERR_INVALID;
            result = ddp_join_step(join, call == JOIN_WITH, &active);
            expect_number("active", active, call == JOIN_WITH && !ready);
        } else if (call == JOIN_READY) {
            if (ready) wanted = DDP_ERR_INVALID;
            result = ddp_reducer_ready(reducer, 0);
            ready = 1;
            averaged = 0;
        } else if (call == JOIN_WAIT) {
            if (!ready) wanted = DDP_ERR_INVALID;
            result = ddp_reducer_wait(reducer);
            averaged = ready;
            ready = 0;
        } else {
            if (!averaged) wanted = DDP_ERR_INVALID;
            result = ddp_reducer_clip_grad_norm(reducer, 1e30f, &norm);
            if (averaged) expect_number("the norm", (double)norm, 3);
        }
        expect(join_names[call], result, wanted);
    }
    ddp_join_destroy(join);
    ddp_reducer_destroy(reducer);
}

static void join_orders(void **state) {
    ddp_group *group = alone();
    (void)state;
    for (int length = 1; length <= 5; length++) for_all_sequences(JOIN_CALLS, length, join_sequence, group);
    ddp_group_destroy(group);
}

/* On a rank without a batch the optimizer's step runs inside ddp_join_step: there gradients are those of a
   finished step. */
typedef struct uneven {
    ddp_reducer *reducer;
    float norm;
    int steps;
    ddp_result result;
} uneven;

static ddp_result clip_inside(void *user) {
    uneven *u = (uneven *)user;
    u->steps++;
    u->result = ddp_reducer_clip_grad_norm(u->reducer, 1e30f, &u->norm);
    return u->result;
}

static ddp_result uneven_main(ddp_group *world, void *user) {
    float value = 0, grad = 0, norm = 0;
    int batches = ddp_rank(world) ? 1 : 3, active = 0, per_token = *(int *)user;
    ddp_param param;
    ddp_reducer_desc reducer_desc = DDP_ZERO;
    ddp_join_desc desc = DDP_ZERO;
    ddp_join *join;
    uneven u = {NULL, 0, 0, DDP_OK};
    in_rank = 1;
    sequence[0] = 0;
    memset(&param, 0, sizeof param);
    param.value.data = &value;
    param.value.dtype = DDP_F32;
    param.grad.data = &grad;
    reducer_desc.params = &param;
    reducer_desc.param_count = 1;
    reducer_desc.per_token = per_token;
    WORKS(ddp_reducer_create(&u.reducer, world, &reducer_desc));
    desc.reducer = u.reducer;
    desc.step_fn = clip_inside;
    desc.user = &u;
    WORKS(ddp_join_create(&join, world, &desc));
    for (int step = 0;; step++) {
        ddp_mean loss = DDP_ZERO;
        WORKS(ddp_join_step(join, step < batches, &active));
        if (!active) break;
        grad = 6;
        ddp_mean_add(&loss, 1, 2);
        WORKS(ddp_reducer_ready(u.reducer, 0));
        expect("ddp_reducer_clip_grad_norm", ddp_reducer_clip_grad_norm(u.reducer, 1e30f, &norm),
               DDP_ERR_INVALID);
        WORKS(per_token ? ddp_reducer_wait_mean(u.reducer, &loss) : ddp_reducer_wait(u.reducer));
        WORKS(ddp_reducer_clip_grad_norm(u.reducer, 1e30f, &norm));
        expect_number("the norm", (double)norm, per_token ? 3 : 6);
    }
    expect_number("steps without a batch", u.steps, 3 - batches);
    if (u.steps) expect_number("the norm on the rank without a batch", (double)u.norm, per_token ? 3 : 6);
    ddp_join_destroy(join);
    ddp_reducer_destroy(u.reducer);
    return DDP_OK;
}

static void clipping_inside_a_join(void **state) {
    (void)state;
    for (int per_token = 0; per_token < 2; per_token++) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = 2;
        desc.group.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
        if (ddp_launch(&desc, uneven_main, &per_token) != DDP_OK) failed("%s", ddp_last_error());
    }
}

//== loader =================================================================================

enum { SAMPLES = 7, BATCH = 3, BATCHES = 3, LOADER_EPOCHS = 2 };
enum { LOAD_NEXT, LOAD_SEEK0, LOAD_SEEK2, LOAD_SEEK4, LOAD_EPOCH1, LOAD_SAVE, LOAD_LOAD, LOADER_CALLS };
static const char *const loader_names[LOADER_CALLS] = {
    "ddp_loader_next",      "ddp_loader_seek", "ddp_loader_seek", "ddp_loader_seek",
    "ddp_loader_set_epoch", "ddp_loader_save", "ddp_loader_load"};

static ddp_result fetch_number(void *user, int64_t index, void *const *fields) {
    (void)user;
    *(int64_t *)fields[0] = index * 10;
    return DDP_OK;
}

static ddp_loader *loader_new(int workers) {
    ddp_loader_desc desc = DDP_ZERO;
    ddp_loader *loader = NULL;
    ddp_tensor field;
    memset(&field, 0, sizeof field);
    field.dtype = DDP_I64;
    desc.sampler.dataset_size = SAMPLES;
    desc.sampler.seed = 5;
    desc.batch_size = BATCH;
    desc.fields = &field;
    desc.field_count = 1;
    desc.fetch = fetch_number;
    desc.worker_count = workers;
    WORKS(ddp_loader_create(&loader, &desc));
    return loader;
}

typedef struct loader_case {
    int workers;
    int64_t order[LOADER_EPOCHS][SAMPLES];
} loader_case;

static void loader_sequence(const int *calls, int length, void *user) {
    const loader_case *c = (const loader_case *)user;
    ddp_loader *loader = loader_new(c->workers);
    ddp_sampler_state saved;
    int epoch = 0, base = 0, at = 0, saved_epoch = 0,
        saved_at = 0; /* in batches; base: where seek counts from */
    WORKS(ddp_loader_save(loader, &saved));
    for (int i = 0; i < length; i++) {
        ddp_result result, wanted = DDP_OK;
        int call = calls[i], to = call == LOAD_SEEK0 ? 0 : call == LOAD_SEEK2 ? 2 : 4;
        ddp_batch batch;
        add_to_sequence(loader_names[call]);
        switch (call) {
        case LOAD_NEXT:
            result = ddp_loader_next(loader, &batch);
            expect_number("samples", (double)batch.count,
                          at == BATCHES       ? 0
                          : at + 1 == BATCHES ? SAMPLES % BATCH
                                              : BATCH);
            for (int k = 0; k < batch.count; k++)
                expect_number("the sample", (double)((const int64_t *)batch.fields[0].data)[k],
                              10.0 * (double)c->order[epoch][at * BATCH + k]);
            at += batch.count > 0;
            break;
        case LOAD_EPOCH1:
            result = ddp_loader_set_epoch(loader, 1);
            epoch = 1;
            base = at = 0;
            break;
        case LOAD_SAVE:
            result = ddp_loader_save(loader, &saved);
            saved_epoch = epoch;
            saved_at = at;
            break;
        case LOAD_LOAD:
            result = ddp_loader_load(loader, &saved);
            epoch = saved_epoch;
            base = at = saved_at;
            break;
        default:
            if (to > BATCHES - base)
                wanted = DDP_ERR_INVALID;
            else
                at = base + to;
            result = ddp_loader_seek(loader, to);
        }
        expect(loader_names[call], result, wanted);
        expect_number("ddp_loader_length", (double)ddp_loader_length(loader), BATCHES - at);
    }
    ddp_loader_destroy(loader);
}

static void loader_orders(void **state) {
    loader_case c;
    ddp_loader *loader = loader_new(-1);
    (void)state;
    for (int epoch = 0; epoch < LOADER_EPOCHS; epoch++) {
        ddp_batch batch;
        int count = 0;
        WORKS(ddp_loader_set_epoch(loader, (uint64_t)epoch));
        while (ddp_loader_next(loader, &batch) == DDP_OK && batch.count)
            for (int k = 0; k < batch.count; k++) c.order[epoch][count++] = batch.indices[k];
        assert_int_equal(count, SAMPLES);
    }
    ddp_loader_destroy(loader);
    for (c.workers = -1; c.workers <= 2; c.workers += 3)
        for (int length = 1; length <= (c.workers < 0 ? 5 : 3); length++)
            for_all_sequences(LOADER_CALLS, length, loader_sequence, &c);
}

//== scaler =================================================================================

enum { SCALER_INIT, SCALER_UNSCALE, SCALER_INFINITE, SCALER_UPDATE, SCALER_SAVE, SCALER_LOAD, SCALER_CALLS };
static const char *const scaler_names[SCALER_CALLS] = {"ddp_scaler_init",    "ddp_scaler_unscale",
                                                       "ddp_scaler_unscale", "ddp_scaler_update",
                                                       "ddp_scaler_save",    "ddp_scaler_load"};

static void scaler_sequence(const int *calls, int length, void *user) {
    ddp_group *group = (ddp_group *)user;
    ddp_scaler scaler;
    ddp_scaler_desc desc = DDP_ZERO;
    ddp_scaler_state saved = {4, 1};
    double scale = 0, saved_scale = 4;
    int is_init = 0, tracker = 0, saved_tracker = 1, unscaled = 0, found = 0;
    memset(&scaler, 0, sizeof scaler);
    desc.init_scale = 16;
    desc.growth_interval = 2;
    for (int i = 0; i < length; i++) {
        ddp_result result = DDP_OK, wanted = DDP_OK;
        int call = calls[i];
        float gradient[2] = {1, call == SCALER_INFINITE ? INFINITY : 2};
        ddp_tensor tensor;
        memset(&tensor, 0, sizeof tensor);
        tensor.data = gradient;
        tensor.dtype = DDP_F32;
        tensor.ndim = 1;
        tensor.shape[0] = 2;
        add_to_sequence(scaler_names[call]);
        switch (call) {
        case SCALER_INIT:
            result = ddp_scaler_init(&scaler, &desc);
            is_init = 1;
            scale = 16;
            tracker = unscaled = found = 0;
            break;
        case SCALER_UNSCALE:
        case SCALER_INFINITE:
            if (scale == 0 || unscaled) wanted = DDP_ERR_INVALID;
            result = ddp_scaler_unscale(&scaler, group, &tensor, 1);
            expect_number("the gradient", (double)gradient[0], wanted == DDP_OK ? 1 / scale : 1);
            if (wanted != DDP_OK) break;
            unscaled = 1;
            found = call == SCALER_INFINITE;
            break;
        case SCALER_UPDATE:
            if (!unscaled) wanted = DDP_ERR_INVALID;
            result = ddp_scaler_update(&scaler);
            if (wanted != DDP_OK) break;
            tracker = found ? 0 : tracker + 1;
            if (found) scale /= 2;
            if (tracker == 2) scale *= 2;
            if (tracker == 2) tracker = 0;
            unscaled = found = 0;
            break;
        case SCALER_SAVE:
            ddp_scaler_save(&scaler, &saved);
            saved_scale = scale;
            saved_tracker = tracker;
            break;
        default:
            if (saved_scale == 0) wanted = DDP_ERR_CORRUPT; /* of a scaler before ddp_scaler_init */
            if (!is_init) wanted = DDP_ERR_INVALID;
            result = ddp_scaler_load(&scaler, &saved);
            if (wanted != DDP_OK) break;
            scale = saved_scale;
            tracker = saved_tracker;
            unscaled = found = 0;
        }
        expect(scaler_names[call], result, wanted);
        expect_number("the scale", (double)ddp_scaler_scale(&scaler), scale);
        expect_number("found_inf", ddp_scaler_found_inf(&scaler), found);
    }
}

static void scaler_orders(void **state) {
    ddp_group *group = alone();
    (void)state;
    for (int length = 1; length <= 6; length++)
        for_all_sequences(SCALER_CALLS, length, scaler_sequence, group);
    ddp_group_destroy(group);
}

//== sharded training with a scaler =========================================================

enum { FSDP_BACKWARD, FSDP_INFINITE, FSDP_CLIP, FSDP_UPDATE, FSDP_STEP, FSDP_ZERO_GRAD, FSDP_CALLS };
static const char *const fsdp_names[FSDP_CALLS] = {"ddp_fsdp_reduce_grads",   "ddp_fsdp_reduce_grads",
                                                   "ddp_fsdp_clip_grad_norm", "ddp_scaler_update",
                                                   "ddp_fsdp_step",           "ddp_fsdp_zero_grad"};

/* One parameter of one element, with plain SGD. A backward leaves the gradient 3, times the scale, or an
   infinity. ddp_fsdp_clip_grad_norm and then ddp_scaler_update forgot the infinity: ddp_fsdp_step applied
   it. */
static void fsdp_sequence(const int *calls, int length, void *user) {
    ddp_group *group = (ddp_group *)user;
    float initial = 8;
    ddp_fsdp_param param;
    ddp_fsdp_unit_desc unit = DDP_ZERO;
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_scaler scaler;
    ddp_fsdp *fsdp;
    int reduced = 0, divided = 0, unscaled = 0, found = 0;
    double value = 8, gradient = 0, scale = 65536;
    memset(&param, 0, sizeof param);
    param.param.name = "w";
    param.param.value.data = &initial;
    param.param.value.dtype = DDP_F32;
    param.param.value.ndim = 1;
    param.param.value.shape[0] = 1;
    unit.name = "unit";
    unit.params = &param;
    unit.param_count = 1;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.optimizer.kind = DDP_OPTIMIZER_SGD;
    desc.scaler = &scaler;
    WORKS(ddp_scaler_init(&scaler, NULL));
    WORKS(ddp_fsdp_create(&fsdp, group, &desc));
    for (int i = 0; i < length; i++) {
        ddp_result result, wanted = DDP_OK;
        ddp_tensor shard;
        float norm = -1;
        int call = calls[i], ready = divided ? unscaled : reduced && !unscaled;
        add_to_sequence(call == FSDP_INFINITE ? "infinite ddp_fsdp_reduce_grads" : fsdp_names[call]);
        switch (call) {
        case FSDP_BACKWARD:
        case FSDP_INFINITE:
            WORKS(ddp_fsdp_unshard(fsdp, 0));
            if (reduced) wanted = DDP_ERR_INVALID;
            if (!reduced)
                *(float *)param.param.grad.data = call == FSDP_INFINITE ? INFINITY : (float)(3 * scale);
            result = ddp_fsdp_reduce_grads(fsdp, 0);
            if (reduced) break;
            gradient = call == FSDP_INFINITE ? (double)INFINITY : 3;
            reduced = 1;
            break;
        case FSDP_UPDATE:
            if (!unscaled) wanted = DDP_ERR_INVALID;
            result = ddp_scaler_update(&scaler);
            if (found) scale /= 2;
            if (found) gradient *= 2; /* a backward that came before this call had the old scale */
            unscaled = found = 0;
            break;
        case FSDP_CLIP:
        case FSDP_STEP:
            if (!ready) wanted = DDP_ERR_INVALID;
            result = call == FSDP_CLIP ? ddp_fsdp_clip_grad_norm(fsdp, 1e30f, &norm) : ddp_fsdp_step(fsdp, 1);
            if (!ready) break;
            if (call == FSDP_CLIP) expect_number("the norm", (double)norm, gradient);
            divided = call == FSDP_CLIP;
            unscaled = 1;
            found = isinf(gradient);
            if (call == FSDP_STEP && !found) value -= gradient;
            if (call == FSDP_STEP) reduced = 0;
            break;
        default:
            result = ddp_fsdp_zero_grad(fsdp);
            if (divided) unscaled = found = 0;
            reduced = divided = 0;
        }
        expect(fsdp_names[call], result, wanted);
        if (divided && !unscaled && (call == FSDP_CLIP || call == FSDP_STEP)
            && !strstr(ddp_last_error(), "between ddp_fsdp_clip_grad_norm and ddp_fsdp_step"))
            failed("%s: '%s' does not name the order", sequence, ddp_last_error());
        expect_number("found_inf", ddp_scaler_found_inf(&scaler), found);
        WORKS(ddp_fsdp_get_shard(fsdp, 0, 0, &shard, NULL, NULL));
        expect_number("the value", (double)*(const float *)shard.data, value);
    }
    ddp_fsdp_destroy(fsdp);
}

static void fsdp_orders(void **state) {
    ddp_group *group = alone();
    (void)state;
    for (int length = 1; length <= 6; length++) for_all_sequences(FSDP_CALLS, length, fsdp_sequence, group);
    ddp_group_destroy(group);
}

//== pipeline ===============================================================================

enum { PIPE_STEP, PIPE_EVALUATE, PIPE_LOSS, PIPE_TIMES, PIPE_CLIP, PIPE_STATS, PIPE_FAILING, PIPE_CALLS };
static const char *const pipe_names[PIPE_CALLS] = {
    "ddp_pipeline_step",      "ddp_pipeline_evaluate",       "ddp_pipeline_get_loss",
    "ddp_pipeline_get_times", "ddp_pipeline_clip_grad_norm", "ddp_pipeline_get_stats",
    "ddp_pipeline_step"};
typedef struct line {
    ddp_param param;
    ddp_param *params[1];
    float weight, grad;
    int fails;
} line;

static void work_for_a_moment(void) {
    double until = ddp_now() + 2e-5;
    while (ddp_now() < until) {
    }
}

/* The loss of micro-batch m is weight (m + 1): 2 and 4. */
static ddp_result line_forward(const ddp_pipeline_call *call, void *user) {
    line *l = (line *)user;
    work_for_a_moment();
    *call->loss = (double)l->weight * (call->microbatch + 1);
    return l->fails ? ddp_fail(DDP_ERR_CORRUPT, "no more") : DDP_OK;
}
static ddp_result line_backward(const ddp_pipeline_call *call, void *user) {
    work_for_a_moment();
    ((line *)user)->grad = (float)(call->microbatch + 1);
    return DDP_OK;
}

static void pipeline_sequence(const int *calls, int length, void *user) {
    const ddp_schedule *schedule = (const ddp_schedule *)user;
    ddp_group *group = alone();
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_stage stage;
    ddp_pipeline *pipeline = NULL;
    line l;
    int steps = 0, has_losses = 0, has_gradients = 0, broken = 0;
    memset(&l, 0, sizeof l);
    memset(&stage, 0, sizeof stage);
    l.weight = 2;
    l.param.value.data = &l.weight;
    l.param.value.dtype = DDP_F32;
    l.param.grad.data = &l.grad;
    l.params[0] = &l.param;
    stage.forward = line_forward;
    stage.backward = line_backward;
    stage.user = &l;
    stage.params = l.params;
    stage.param_count = 1;
    desc.schedule = schedule;
    desc.stages = &stage;
    desc.stage_count = 1;
    if (ddp_pipeline_create(&pipeline, group, &desc) != DDP_OK) failed("%s", ddp_last_error());
    for (int i = 0; i < length; i++) {
        ddp_result result, wanted = broken ? DDP_ERR_POISONED : DDP_OK;
        int call = calls[i];
        ddp_stage_cost cost;
        ddp_pipeline_stats stats;
        double mean;
        float norm = -1;
        add_to_sequence(call == PIPE_FAILING ? "a ddp_pipeline_step that fails" : pipe_names[call]);
        switch (call) {
        case PIPE_STEP:
            result = ddp_pipeline_step(pipeline);
            if (broken) break;
            steps++;
            has_losses = has_gradients = 1;
            break;
        case PIPE_EVALUATE:
            result = ddp_pipeline_evaluate(pipeline);
            if (!broken) has_losses = 1;
            break;
        case PIPE_LOSS:
            wanted = has_losses ? DDP_OK : DDP_ERR_INVALID;
            result = ddp_pipeline_get_loss(pipeline, &mean, NULL);
            if (has_losses) expect_number("the loss", mean, 3);
            break;
        case PIPE_TIMES:
            if (!broken && !has_gradients) wanted = DDP_ERR_INVALID;
            result = ddp_pipeline_get_times(pipeline, &cost, NULL);
            if (wanted == DDP_OK && !(cost.forward > 0 && cost.input_grad > 0 && cost.weight_grad > 0))
                failed("%s: the step took %g, %g and %g s", sequence, cost.forward, cost.input_grad,
                       cost.weight_grad);
            break;
        case PIPE_CLIP:
            if (!broken && !has_gradients) wanted = DDP_ERR_INVALID;
            result = ddp_pipeline_clip_grad_norm(pipeline, 1e30f, &norm);
            if (wanted == DDP_OK) expect_number("the norm", (double)norm, 1.5);
            break;
        case PIPE_STATS: /* of this rank only */
            wanted = DDP_OK;
            result = ddp_pipeline_get_stats(pipeline, &stats);
            expect_number("steps", (double)stats.steps, steps);
            break;
        default:
            l.fails = 1;
            result = ddp_pipeline_step(pipeline);
            l.fails = 0;
            if (!broken) wanted = DDP_ERR_CORRUPT;
            if (!broken) has_losses = has_gradients = 0;
            broken = 1;
        }
        expect(pipe_names[call], result, wanted);
    }
    ddp_pipeline_destroy(pipeline);
    ddp_group_destroy(group);
}

static void pipeline_orders(void **state) {
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_schedule *schedule = NULL;
    (void)state;
    desc.kind = DDP_SCHEDULE_1F1B;
    desc.rank_count = 1;
    desc.microbatch_count = 2;
    WORKS(ddp_schedule_create(&schedule, &desc));
    for (int length = 1; length <= 4; length++)
        for_all_sequences(PIPE_CALLS, length, pipeline_sequence, schedule);
    ddp_schedule_destroy(schedule);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reducer_orders),         cmocka_unit_test(reducer_orders_of_two_ranks),
        cmocka_unit_test(accumulator_orders),     cmocka_unit_test(join_orders),
        cmocka_unit_test(clipping_inside_a_join), cmocka_unit_test(loader_orders),
        cmocka_unit_test(scaler_orders),          cmocka_unit_test(fsdp_orders),
        cmocka_unit_test(pipeline_orders)};
    watchdog_start(100);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

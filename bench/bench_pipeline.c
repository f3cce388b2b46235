/*  bench_pipeline.c - delays that the runner of ddp_pipeline.h adds to its schedules.

USAGE
    cc -O3 -march=native bench/bench_pipeline.c -o bench_pipeline -lm -lpthread
    ./bench_pipeline waits [ranks [micro-batches [milliseconds [steps [dat]]]]]    default: 8 32 10 5
    ./bench_pipeline gpt [layers [channels [micro-batches [steps]]]]               default: 6 256 8 9

    waits   An action sleeps until 10 ms after its start (B: 20 ms), so that 8 ranks really run in parallel on
            2 cores. If a sleep ends late, the next action of the rank is shortened by that time (at most to
            zero). So the lateness of the machine does not accumulate. The delays of the runner count in full,
            since an action starts when the runner calls it. All schedules take turns, one step each, so that
            a short disturbance does not hit only one of them. 64 KiB pass over each stage boundary, and every
            received element is compared. The simulation has the same costs and no transfers.
    gpt     The stages of train_gpt_pipeline on 2 ranks. The ideal is the simulation with the measured costs
            of the same step (means per stage and kind) and no transfers. It is compared with the whole
            ddp_pipeline_step, with tied gradients and division.

    makespan            from the start of the first action to the end of the last one, over all ranks
    replayed            makespan of the schedule played with the measured time of every action, without gaps.
                        The difference to the measured makespan is time that the runner adds. The difference
                        to the simulation is actions that took longer than simulated
    gap on the rank     mean time from the end of an action to the start of the next one on its rank, if the
                        inputs were present
    gap between ranks   mean time from the end of an action to the start of the action on another rank that
                        waited for it
    Figures are medians over steps, without the first. Lines for plot_pipeline.gp are appended to the file
    dat.
*/
#define main train_gpt_pipeline_main /* its stages are measured here */
#include "../examples/gpt/train_gpt_pipeline.c"
#include "median.h"
#undef main

#include <sys/prctl.h>
#include <time.h>

enum { STEPS_MAX = 64, ELEMENTS = 16384, WAIT_PARAM = 16 };

typedef struct setup {
    int ranks, microbatches, steps, layers, channels;
    double seconds; /* duration of an action */
    const char *dat;
} setup;

typedef struct plan {
    const char *name; /* NULL = the name of the kind */
    ddp_schedule_kind kind;
    int chunks, interval;
    int memory; /* AUTO: limit in units of p */
} plan;

/* Figures of one step; printed as medians over steps. */
enum { MAKESPAN, STEP, IDEAL, REPLAYED, NEXT, HANDED_ON, BUBBLE, PREDICTED, COSTS, OF_IDEAL, FIGURES };
typedef struct figures {
    double of[FIGURES][STEPS_MAX];
} figures;

static void *zeros(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) {
        fprintf(stderr, "bench_pipeline: not enough memory\n");
        exit(1);
    }
    return memory;
}

static int action_count(const ddp_schedule *s) {
    int total = 0, count;
    for (int rank = 0; rank < ddp_schedule_rank_count(s); rank++) {
        ddp_schedule_actions(s, rank, &count);
        total += count;
    }
    return total;
}

//== analysis of a step =========================================================================== >>analysis

/* Index of the end time of an action: that which makes a stage's output, or with backward = 1 the gradient of
   its input. */
static size_t place(const ddp_schedule *s, int stage, int microbatch, int backward) {
    return 2 * ((size_t)stage * (size_t)ddp_schedule_microbatch_count(s) + (size_t)microbatch)
           + (size_t)backward;
}

/* Index of the end time that an action waits for, or -1. */
static int64_t need_of(const ddp_schedule *s, const ddp_action *a) {
    if (a->kind == DDP_ACTION_FORWARD)
        return a->stage > 0 ? (int64_t)place(s, a->stage - 1, a->microbatch, 0) : -1;
    return a->kind != DDP_ACTION_WEIGHT_GRAD && a->stage + 1 < ddp_schedule_stage_count(s)
               ? (int64_t)place(s, a->stage + 1, a->microbatch, 1)
               : -1;
}

/* Plays the schedule with the measured time of each action, and sums the measured gaps. */
static void analyse(const ddp_schedule *s, const ddp_action_time *times, figures *f, int step) {
    int ranks = ddp_schedule_rank_count(s), next_count = 0, handed_count = 0, moved = 1;
    size_t places = place(s, ddp_schedule_stage_count(s), 0, 0);
    double *played = (double *)zeros(places, sizeof *played), *real = (double *)zeros(places, sizeof *real),
           *now = (double *)zeros((size_t)ranks, sizeof *now);
    double begin = times[0].begin, end = 0, last = 0, next = 0, handed = 0;
    int *at = (int *)zeros((size_t)ranks, sizeof *at);
    while (moved) {
        const ddp_action_time *time = times;
        moved = 0;
        for (int rank = 0, count; rank < ranks; rank++, time += count) {
            const ddp_action *list = ddp_schedule_actions(s, rank, &count);
            for (; at[rank] < count; at[rank]++, moved = 1) {
                const ddp_action *a = &list[at[rank]];
                const ddp_action_time *t = &time[at[rank]];
                int64_t need = need_of(s, a);
                double before = at[rank] > 0 ? t[-1].end : t->begin;
                if (a->stage < 0) continue;
                if (need >= 0 && played[need] == 0) break;
                if (need >= 0 && real[need] > before)
                    handed += t->begin - real[need], handed_count++;
                else if (at[rank] > 0)
                    next += t->begin - before, next_count++;
                now[rank] = (need >= 0 && played[need] > now[rank] ? played[need] : now[rank]) + t->end
                            - t->begin;
                if (now[rank] > last) last = now[rank];
                if (t->begin < begin) begin = t->begin;
                if (t->end > end) end = t->end;
                if (a->kind == DDP_ACTION_WEIGHT_GRAD) continue;
                played[place(s, a->stage, a->microbatch, a->kind != DDP_ACTION_FORWARD)] = now[rank];
                real[place(s, a->stage, a->microbatch, a->kind != DDP_ACTION_FORWARD)] = t->end;
            }
        }
    }
    f->of[MAKESPAN][step] = end - begin;
    f->of[REPLAYED][step] = last;
    f->of[NEXT][step] = next_count ? next / next_count : 0;
    f->of[HANDED_ON][step] = handed_count ? handed / handed_count : 0;
    free(played);
    free(real);
    free(now);
    free(at);
}

/* Records the step that has just run, and fills in the costs. Collective, because of
   ddp_pipeline_get_times. */
static ddp_result take_figures(ddp_pipeline *pipeline, const ddp_schedule *s, figures *f, int step) {
    int stages = ddp_schedule_stage_count(s);
    ddp_stage_cost *costs = (ddp_stage_cost *)zeros((size_t)stages, sizeof *costs);
    ddp_action_time *times = (ddp_action_time *)zeros((size_t)action_count(s), sizeof *times);
    ddp_schedule_report report = DDP_ZERO;
    ddp_pipeline_stats stats;
    DDP_TRY(ddp_pipeline_get_times(pipeline, costs, times));
    DDP_TRY(ddp_pipeline_get_stats(pipeline, &stats));
    analyse(s, times, f, step);
    for (int stage = 0; stage < stages; stage++) {
        f->of[COSTS][step] += (costs[stage].forward + costs[stage].input_grad + costs[stage].weight_grad)
                              / stages;
        costs[stage].transfer = 0;
    }
    DDP_TRY(ddp_schedule_simulate(s, costs, &report));
    f->of[STEP][step] = stats.step_seconds;
    f->of[IDEAL][step] = report.makespan;
    f->of[OF_IDEAL][step] = report.makespan / stats.step_seconds;
    f->of[BUBBLE][step] = stats.bubble_rate;
    f->of[PREDICTED][step] = stats.predicted_bubble_rate;
    free(costs);
    free(times);
    return DDP_OK;
}

//== stages that sleep =============================================================================== >>waits

typedef struct waiter {
    double seconds;
    double *late; /* of the rank: how late its last sleep ended */
    float values[WAIT_PARAM];
    ddp_param param, *pointer;
} waiter;

/* The value that a stage passes to the next one, or with backward = 1 to the one before. */
static float mark(int stage, int microbatch, int backward) {
    return (float)(2 * (stage * 512 + microbatch) + backward);
}

static ddp_result compare(const ddp_tensor *tensor, float expected, const char *what) {
    const float *data = (const float *)tensor->data;
    for (int i = 0; i < ELEMENTS; i++)
        if (data[i] != expected)
            return ddp_fail(DDP_ERR_CORRUPT, "element %d of %s is %g, not %g", i, what, (double)data[i],
                            (double)expected);
    return DDP_OK;
}

static void fill(const ddp_tensor *tensor, float value) {
    float *data = (float *)tensor->data;
    for (int i = 0; i < ELEMENTS; i++) data[i] = value;
}

static ddp_result wait_action(const ddp_pipeline_call *c, void *user) {
    waiter *w = (waiter *)user;
    double until = ddp_now() + w->seconds - (*w->late < w->seconds ? *w->late : w->seconds);
    int forward = c->kind == DDP_ACTION_FORWARD;
    struct timespec deadline;
    if (forward && c->input_count)
        DDP_TRY(compare(&c->inputs[0], mark(c->stage - 1, c->microbatch, 0), "the input"));
    if (!forward && c->output_count)
        DDP_TRY(compare(&c->output_grads[0], mark(c->stage + 1, c->microbatch, 1), "the output's gradient"));
    if (forward && c->output_count) fill(&c->outputs[0], mark(c->stage, c->microbatch, 0));
    if (c->kind == DDP_ACTION_INPUT_GRAD && c->input_count)
        fill(&c->input_grads[0], mark(c->stage, c->microbatch, 1));
    if (c->kind == DDP_ACTION_WEIGHT_GRAD)
        for (int i = 0; i < WAIT_PARAM; i++) ((float *)w->param.grad.data)[i] = 1;
    if (c->loss) *c->loss = 1;
    deadline.tv_sec = (time_t)until;
    deadline.tv_nsec = (long)((until - (double)deadline.tv_sec) * 1e9);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, NULL) == EINTR) {
    }
    *w->late = ddp_now() - until;
    return DDP_OK;
}

static ddp_result no_update(int stage, void *user) {
    (void)stage;
    (void)user;
    return DDP_OK;
}

static ddp_result create_waits(ddp_pipeline **out, ddp_group *group, const ddp_schedule *s, waiter *waiters) {
    ddp_pipeline_stage *stages = (ddp_pipeline_stage *)zeros((size_t)ddp_schedule_stage_count(s),
                                                             sizeof *stages);
    ddp_schedule_kind kind = ddp_schedule_get_kind(s);
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_result result;
    for (int i = 0; i < ddp_schedule_stage_count(s); i++) {
        waiter *w = &waiters[i];
        w->param.name = "weights";
        w->param.value.data = w->values;
        w->param.value.dtype = DDP_F32;
        w->param.value.ndim = 1;
        w->param.value.shape[0] = WAIT_PARAM;
        w->pointer = &w->param;
        stages[i].forward = stages[i].input_grad = stages[i].weight_grad = wait_action;
        stages[i].user = w;
        stages[i].params = &w->pointer;
        stages[i].param_count = 1;
        if (kind == DDP_SCHEDULE_PIPEDREAM || kind == DDP_SCHEDULE_PIPEDREAM_2BW)
            stages[i].update = no_update;
    }
    desc.schedule = s;
    desc.stages = stages;
    desc.stage_count = ddp_schedule_stage_count(s);
    desc.boundary.dtype = DDP_F32;
    desc.boundary.ndim = 1;
    desc.boundary.shape[0] = ELEMENTS;
    result = ddp_pipeline_create(out, group, &desc);
    free(stages);
    return result;
}

static void report_waits(const setup *u, const plan *q, const ddp_schedule *s,
                         const ddp_schedule_report *expected, figures *f) {
    const char *name = q->name ? q->name : ddp_schedule_kind_name(q->kind);
    double measured = median(f->of[MAKESPAN], u->steps), ratio = measured / expected->makespan,
           bubble = median(f->of[BUBBLE], u->steps);
    int chunks = ddp_schedule_stage_count(s) / u->ranks;
    FILE *dat = u->dat ? fopen(u->dat, "a") : NULL;
    printf("| %s | %d | %.0f | %.1f | %.4f%s | %.2f%% | %.2f%% | %d | %.1f | %.0f | %.0f |\n", name, chunks,
           expected->makespan * 1e3, measured * 1e3, ratio, ratio > 1.03 || ratio < 0.97 ? " missed" : "",
           100 * expected->bubble_rate, 100 * bubble, expected->peak_in_flight,
           median(f->of[REPLAYED], u->steps) * 1e3, median(f->of[NEXT], u->steps) * 1e6,
           median(f->of[HANDED_ON], u->steps) * 1e6);
    fflush(stdout);
    if (!dat) return;
    fprintf(dat, "\"%s\" %.6f %.6f %.6f %.6f %.5f\n", name, expected->makespan, measured,
            100 * expected->bubble_rate, 100 * bubble, ratio);
    fclose(dat);
}

/* One rank's state for one measured schedule. */
typedef struct waits {
    ddp_schedule *schedule; /* NULL: the kind does not allow these numbers of ranks and micro-batches */
    ddp_schedule_report expected;
    ddp_group *group;
    ddp_pipeline *pipeline;
    waiter *waiters;
    figures figures;
} waits;

static ddp_result waits_init(waits *m, ddp_group *world, const setup *u, const plan *q, double *late) {
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_stage_cost *costs;
    int stages;
    desc.kind = q->kind;
    desc.rank_count = u->ranks;
    desc.microbatch_count = u->microbatches;
    desc.chunk_count = q->chunks;
    desc.update_interval = q->interval;
    desc.memory_limit = q->memory * u->ranks;
    if (ddp_schedule_create(&m->schedule, &desc) != DDP_OK) {
        if (ddp_rank(world) == 0) fprintf(stderr, "left out: %s\n", ddp_last_error());
        m->schedule = NULL;
        return DDP_OK;
    }
    stages = ddp_schedule_stage_count(m->schedule);
    costs = (ddp_stage_cost *)zeros((size_t)stages, sizeof *costs);
    m->waiters = (waiter *)zeros((size_t)stages, sizeof *m->waiters);
    for (int i = 0; i < stages; i++) {
        m->waiters[i].seconds = costs[i].forward = costs[i].input_grad = costs[i].weight_grad = u->seconds;
        m->waiters[i].late = late;
    }
    DDP_TRY(ddp_schedule_simulate(m->schedule, costs, &m->expected));
    free(costs);
    DDP_TRY(ddp_group_split(world, 0, ddp_rank(world), &m->group));
    return create_waits(&m->pipeline, m->group, m->schedule, m->waiters);
}

static void waits_free(waits *m) {
    if (!m->schedule) return;
    ddp_pipeline_destroy(m->pipeline);
    ddp_group_destroy(m->group);
    ddp_schedule_destroy(m->schedule);
    free(m->waiters);
}

/* Seconds for which the host has withheld the cores since the machine started; 0 if unknown. */
static double stolen_seconds(void) {
    unsigned long long ticks = 0;
    FILE *f = fopen("/proc/stat", "r");
    if (f && fscanf(f, "cpu %*u %*u %*u %*u %*u %*u %*u %llu", &ticks) != 1) ticks = 0;
    if (f) fclose(f);
    return (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

static ddp_result wait_rank(ddp_group *world, void *user) {
    static const plan plans[] = {
        {NULL, DDP_SCHEDULE_NAIVE, 1, 0, 0},
        {NULL, DDP_SCHEDULE_GPIPE, 1, 0, 0},
        {NULL, DDP_SCHEDULE_1F1B, 1, 0, 0},
        {NULL, DDP_SCHEDULE_INTERLEAVED_1F1B, 2, 0, 0},
        {NULL, DDP_SCHEDULE_LOOPED_BFS, 2, 0, 0},
        {NULL, DDP_SCHEDULE_ZB_H1, 1, 0, 0},
        {NULL, DDP_SCHEDULE_ZB_H2, 1, 0, 0},
        {NULL, DDP_SCHEDULE_INTERLEAVED_ZB_1P, 2, 0, 0},
        {NULL, DDP_SCHEDULE_ZB_V, 2, 0, 0},
        {NULL, DDP_SCHEDULE_DUALPIPE_V, 2, 0, 0},
        {"AUTO, memory p", DDP_SCHEDULE_AUTO, 1, 0, 1},
        {"AUTO, memory 2p", DDP_SCHEDULE_AUTO, 1, 0, 2},
        {NULL, DDP_SCHEDULE_PIPEDREAM, 1, 1, 0},
        {NULL, DDP_SCHEDULE_PIPEDREAM_2BW, 1, 8, 0},
    };
    enum { PLANS = sizeof plans / sizeof plans[0] };
    const setup *u = (const setup *)user;
    waits *of = (waits *)zeros(PLANS, sizeof *of);
    double late = 0, begin = ddp_now(), stolen = stolen_seconds();
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); /* the default lets sleeps end 50 us late */
    if (ddp_rank(world) == 0)
        printf("%d ranks, %d micro-batches, F = I = W = %.4g ms, medians of %d steps\n\n"
               "| schedule | chunks | simulated, ms | measured, ms | ratio | bubble predicted | measured | "
               "in flight | replayed, ms | gap on the rank, us | "
               "gap between ranks, us |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
               u->ranks, u->microbatches, u->seconds * 1e3, u->steps);
    for (int i = 0; i < PLANS; i++) DDP_TRY(waits_init(&of[i], world, u, &plans[i], &late));
    for (int step = -1; step < u->steps; step++)
        for (int i = 0; i < PLANS; i++) {
            if (!of[i].schedule) continue;
            DDP_TRY(ddp_barrier(world));
            late = 0;
            DDP_TRY(ddp_pipeline_step(of[i].pipeline));
            if (step >= 0) DDP_TRY(take_figures(of[i].pipeline, of[i].schedule, &of[i].figures, step));
        }
    for (int i = 0; i < PLANS; i++) {
        if (of[i].schedule && ddp_rank(world) == 0)
            report_waits(u, &plans[i], of[i].schedule, &of[i].expected, &of[i].figures);
        waits_free(&of[i]);
    }
    if (ddp_rank(world) == 0)
        printf("\nThe host withheld %.1f%% of the processor time.\n",
               100 * (stolen_seconds() - stolen) / (ddp_now() - begin)
                   / (double)sysconf(_SC_NPROCESSORS_ONLN));
    free(of);
    return DDP_OK;
}

//== stages of a model ================================================================================= >>gpt

/* Builds a trainer of train_gpt_pipeline with random tokens. Collective. */
static ddp_result build_trainer(trainer *t, const setup *u, run_options *options, ddp_group *world, job *j) {
    run *r = &t->run;
    run_init(r, world, j);
    r->options = options;
    r->plan.config.layers = u->layers;
    r->plan.config.channels = u->channels;
    r->plan.config.heads = 4;
    r->plan.config.context = 128;
    r->plan.config.micro_batch = 4;
    r->plan.config.batch = 4 * u->microbatches;
    r->plan.config.steps = u->steps + 1;
    r->plan.config.seed = 1;
    r->plan.text_tokens = 1 << 16;
    r->plan.train_tokens = r->plan.text_tokens / 10 * 9;
    r->text.count = r->text.capacity = r->plan.text_tokens;
    r->text.bytes = (uint8_t *)zeros((size_t)r->plan.text_tokens, 1);
    for (int64_t i = 0; i < r->plan.text_tokens; i++)
        r->text.bytes[i] = (uint8_t)(32 + gpt_random(7, (uint64_t)i) % 96);
    DDP_TRY(make_schedule(t));
    DDP_TRY(run_build_model(r, GPT_OWN_VALUES));
    DDP_TRY(build_params(t));
    return build_parallel(t);
}

static ddp_result measure_gpt(ddp_group *world, const setup *u, const char *name, int chunks) {
    trainer *t = (trainer *)zeros(1, sizeof *t);
    figures *f = (figures *)zeros(1, sizeof *f);
    run_options options;
    job j;
    memset(&options, 0, sizeof options);
    memset(&j, 0, sizeof j);
    options.strategy = name;
    options.stages = chunks * ddp_world_size(world);
    DDP_TRY(build_trainer(t, u, &options, world, &j));
    for (int step = -1; step < u->steps; step++) {
        for (int i = 0; i < t->run.plan.config.batch; i++) t->starts[i] = next_sequence(&t->run);
        DDP_TRY(ddp_barrier(world));
        DDP_TRY(ddp_pipeline_step(t->pipeline));
        if (step >= 0) DDP_TRY(take_figures(t->pipeline, t->schedule, f, step));
    }
    if (ddp_rank(world) == 0) {
        double of_ideal = median(f->of[OF_IDEAL], u->steps), step = median(f->of[STEP], u->steps);
        printf("| %s | %d | %.1f | %.1f | %.1f | %.1f | %.0f | %.1f%%%s | %.1f%% | %.1f%% | %.0f | %.0f |\n",
               name, chunks, median(f->of[IDEAL], u->steps) * 1e3, median(f->of[REPLAYED], u->steps) * 1e3,
               median(f->of[MAKESPAN], u->steps) * 1e3, step * 1e3,
               t->run.plan.config.batch * t->run.plan.config.context / step, 100 * of_ideal,
               of_ideal < 0.95 ? " missed" : "", 100 * median(f->of[PREDICTED], u->steps),
               100 * median(f->of[BUBBLE], u->steps), median(f->of[NEXT], u->steps) * 1e6,
               median(f->of[HANDED_ON], u->steps) * 1e6);
        fflush(stdout);
    }
    trainer_free(t);
    free(t);
    free(f);
    return DDP_OK;
}

static ddp_result gpt_rank(ddp_group *world, void *user) {
    static const struct {
        const char *name;
        int chunks;
    } schedules[] = {
        {"1F1B", 1}, {"GPipe", 1}, {"ZB-H1", 1}, {"ZB-H2", 1}, {"interleaved-1F1B", 2}, {"ZB-V", 2},
    };
    const setup *u = (const setup *)user;
    if (ddp_rank(world) == 0)
        printf("%d layers, %d channels, %d micro-batches of 4 x 128 tokens, 2 ranks, medians of %d steps; "
               "target: 95%% of the ideal\n\n"
               "| schedule | chunks | ideal, ms | replayed, ms | makespan, ms | whole step, ms | tokens/s | "
               "share of the ideal | bubble predicted | measured | "
               "gap on the rank, us | gap between ranks, us "
               "|\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
               u->layers, u->channels, u->microbatches, u->steps);
    for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++)
        DDP_TRY(measure_gpt(world, u, schedules[i].name, schedules[i].chunks));
    return DDP_OK;
}

static int usage(void) {
    fprintf(
        stderr,
        "usage: bench_pipeline waits [ranks 1-%d [micro-batches 1-512 [milliseconds [steps 1-%d [dat]]]]]\n"
        "       bench_pipeline gpt [layers 2-1000 [channels, divisible by 4 [micro-batches 1-512, even "
        "[steps 1-%d]]]]\n",
        DDP_MAX_LOCAL_RANKS, STEPS_MAX, STEPS_MAX);
    return 1;
}

int main(int argc, char **argv) {
    int gpt = argc > 1 && strcmp(argv[1], "gpt") == 0;
    ddp_launch_desc desc = DDP_ZERO;
    setup u;
    memset(&u, 0, sizeof u);
    if (!gpt && (argc < 2 || strcmp(argv[1], "waits") != 0)) return usage();
    u.layers = 6;
    u.channels = 256;
    if (gpt) {
        u.ranks = 2;
        if (argc > 2) u.layers = atoi(argv[2]);
        if (argc > 3) u.channels = atoi(argv[3]);
        u.microbatches = argc > 4 ? atoi(argv[4]) : 8;
        u.steps = argc > 5 ? atoi(argv[5]) : 9;
    } else {
        u.ranks = argc > 2 ? atoi(argv[2]) : 8;
        u.microbatches = argc > 3 ? atoi(argv[3]) : 32;
        u.seconds = argc > 4 ? atof(argv[4]) * 1e-3 : 0.01;
        u.steps = argc > 5 ? atoi(argv[5]) : 5;
        u.dat = argc > 6 ? argv[6] : NULL;
    }
    if (u.ranks < 1 || u.ranks > DDP_MAX_LOCAL_RANKS || u.microbatches < 1 || u.microbatches > 512
        || u.steps < 1 || u.steps > STEPS_MAX)
        return usage();
    if (!(u.seconds >= 0) || u.layers < 2 || u.layers > 1000 || u.channels < 4 || u.channels % 4
        || (gpt && u.microbatches % 2))
        return usage();
    desc.world_size = u.ranks;
    if (ddp_launch(&desc, gpt ? gpt_rank : wait_rank, &u) == DDP_OK) return 0;
    fprintf(stderr, "bench_pipeline: %s\n", ddp_last_error());
    return 1;
}

/* MIT License: see LICENSE. */

/*  train_gpt.c - trains a byte-level GPT on text, on every core, and gets the same bits on any number of ranks.

USAGE
    cc -O3 -march=native examples/gpt/train_gpt.c -o train_gpt -lm -lpthread
    ./train_gpt [flags] [files or folders]         without files: the text of this repository; --help lists the flags
    mpirun -n 2 ./train_gpt                        the ranks of a launcher
    torchrun --no-python --nproc_per_node 2 ./train_gpt

A STEP
    The sampler gives every rank a contiguous block of the global batch, micro-batch by micro-batch:

        global batch   | micro 0 | micro 1 | micro 2 | micro 3 |        windows of context + 1 bytes
        1 rank         | rank 0                                |
        2 ranks        | rank 0            | rank 1            |

    Each micro-batch's backward announces a gradient as soon as it is final. The accumulator adds micro-batches pairwise,
    (0+1)+(2+3); with the last one it passes the announcement on to the reducer, which adds over ranks in the same tree while
    backward goes on, and divides once. So who computed which micro-batch leaves no trace in the sum. Clipping takes
    an exact norm, AdamW runs on every rank alike, and the last line of the output is a hash of the weights that
    is the same for 1, 2 or 4 ranks with the same --batch and --micro-batch.

    --hook sends fewer bytes of gradients, or sends them later (comm_hooks.h); the weights then depend on the number of ranks, and what a hook
    remembers is not in a checkpoint.

    Rank 0 alone reads files, writes files and prints. */
#define TRAIN_PROMISE                                                                                        \
    "The same --batch and --micro-batch give the same weights on any number of ranks, bit for bit, but for " \
    "--hook."
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#include "checkpoint.h"
#include "../extras/comm_hooks.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0,
     "FILE save there at every validation and at the end"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0,
     "FILE go on from a checkpoint, on any number of ranks"},
    RECOMPUTE_FLAG,
    {"--hook", FLAG_TEXT, NOT_SAVED, AT(hook), 0, 0,
     "NAME how gradients are sent: bf16, f16, int8, powersgd, or delay, a step late; gives up equal bits"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "this text"},
};
static const run_program PROGRAM = {"train_gpt", "trains a byte-level GPT on text with data-parallel ranks",
                                    FLAGS, (int)(sizeof FLAGS / sizeof FLAGS[0])};

//== trainer ============================================================================================== >>trainer

/* One rank. What it points to is the same on every rank, but for the sampler, the batch, gradients before the reduction, and
   what rank 0 alone has. */
typedef struct trainer {
    run run;
    text_buffer saved; /* rank 0: the file of --resume, its header is in saved_header */
    checkpoint_header saved_header;
    ddp_param *params;     /* model.param_count each */
    int64_t *moment;       /* where a parameter's moments start; -1: it shares the value of an earlier one */
    float *first, *second; /* AdamW's moments, parameter_count each */
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    comm_hook *hook;         /* --hook, or NULL */
    ddp_result ready_result; /* first failure inside a backward */
    double gather_seconds;
} trainer;

/* What --hook names; 0 = nothing that there is. */
static comm_hook_kind hook_kind(const char *name) {
    static const char *const names[] = {"bf16", "f16", "int8", "powersgd",
                                        "delay"}; /* as comm_hook_kind has them, from 1 */
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, names[i])) return (comm_hook_kind)(i + 1);
    return (comm_hook_kind)0;
}

/* Rank 0: everything that can be wrong with the input is found here, before training and before anything is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    TRY(check_options(o, r->world_size));
    if (o->hook && !hook_kind(o->hook))
        return WRONG("--hook %.60s: give bf16, f16, int8, powersgd or delay", o->hook);
    if (o->checkpoint) TRY(check_writable(o->checkpoint));
    if (o->resume) TRY(checkpoint_read(o->resume, &t->saved, &t->saved_header));
    return make_plan(&r->plan, o, r->world_size, o->resume ? &t->saved_header.run : NULL, &r->text);
}

/* What the strategy needs of the model: the parameters, and where their moments lie. */
static ddp_result build_params(trainer *t) {
    run *r = &t->run;
    size_t count = (size_t)r->model.param_count, moments = (size_t)r->parameter_count;
    int64_t next = 0;
    t->params = (ddp_param *)calloc(count, sizeof *t->params);
    t->moment = (int64_t *)calloc(count, sizeof *t->moment);
    t->first = (float *)calloc(moments, sizeof(float));
    t->second = (float *)calloc(moments, sizeof(float));
    if (!t->params || !t->moment || !t->first || !t->second)
        return ddp_fail(DDP_ERR_NO_MEMORY, "moments of %lld parameters; use a smaller --channels or --layers",
                        (long long)r->parameter_count);
    for (int i = 0; i < r->model.param_count; i++) {
        run_describe(r, i, &t->params[i]);
        t->params[i].value.data = r->model.values[i];
        t->moment[i] = r->infos[i].tied_to < 0 ? next : -1;
        if (t->moment[i] >= 0) next += r->infos[i].count;
    }
    return DDP_OK;
}

/* First values: drawn from the seed, or rank 0's from the checkpoint; the reducer broadcasts them. */
static ddp_result start_values(trainer *t) {
    run *r = &t->run;
    const uint8_t *from = t->saved.bytes + sizeof(checkpoint_header);
    size_t moment_bytes = (size_t)r->parameter_count * sizeof(float);
    if (r->plan.first_step == 0) {
        gpt_model_init(&r->model, (uint64_t)r->plan.config.seed);
        return DDP_OK;
    }
    TRY(share_result(r->world, r->rank == 0 ? checkpoint_check(r, &t->saved_header) : DDP_OK));
    if (r->rank == 0) {
        for (int i = 0; i < r->model.param_count; i++)
            if (t->moment[i] >= 0)
                memcpy(r->model.values[i], from + (size_t)t->moment[i] * sizeof(float),
                       (size_t)r->infos[i].count * sizeof(float));
        memcpy(t->first, from + moment_bytes, moment_bytes);
        memcpy(t->second, from + moment_bytes * 2, moment_bytes);
        free(t->saved.bytes);
        memset(&t->saved, 0, sizeof t->saved);
    }
    TRY(ddp_broadcast(r->world, t->first, (size_t)r->parameter_count, DDP_F32, 0, NULL));
    return ddp_broadcast(r->world, t->second, (size_t)r->parameter_count, DDP_F32, 0, NULL);
}

/* What makes the trainer parallel: reducer, accumulator, and a sampler for this rank's block of the batch. Collective. */
static ddp_result build_parallel(trainer *t) {
    run *r = &t->run;
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc accumulator = DDP_ZERO;
    comm_hook_desc hook = DDP_ZERO;

    reducer.params =
        t->params; /* gradients are NULL: the reducer places them in group memory, bucket by bucket */
    reducer.param_count = r->model.param_count;
    reducer.micro_batch_count = r->micro_count;
    if (r->options->hook) {
        hook.kind = hook_kind(r->options->hook);
        hook.params = t->params;
        hook.param_count = r->model.param_count;
        TRY(comm_hook_create(&t->hook, r->world, &hook));
        reducer.hook = comm_hook_run;
        reducer.hook_user = t->hook;
    }
    TRY(ddp_reducer_create(&t->reducer, r->world, &reducer));
    for (int i = 0; i < r->model.param_count; i++) r->model.grads[i] = (float *)t->params[i].grad.data;

    accumulator.params = t->params;
    accumulator.param_count = r->model.param_count;
    accumulator.micro_batch_count = r->micro_count;
    accumulator.reducer = t->reducer;
    TRY(ddp_accumulator_create(&t->accumulator, r->world, &accumulator));
    return run_build_sampler(r, r->world_size, r->rank);
}

//== training ============================================================================================ >>training

/* Called by backward for each gradient; only the last micro-batch's call sends something on its way. */
static void gradient_ready(void *user, int index) {
    trainer *t = (trainer *)user;
    ddp_result result = ddp_accumulator_ready(t->accumulator, index);
    if (t->ready_result == DDP_OK) t->ready_result = result;
}

/* AdamW on every value once: a tied parameter's gradient is in its first use. Only matrices decay. */
static void update(trainer *t, int64_t step) {
    run *r = &t->run;
    float lr = learning_rate(&r->plan.config, step);
    for (int i = 0; i < r->model.param_count; i++) {
        if (t->moment[i] < 0) continue;
        gpt_adamw(r->model.values[i], r->model.grads[i], t->first + t->moment[i], t->second + t->moment[i],
                  (size_t)r->infos[i].count, lr, 0.9f, 0.95f, 1e-8f, r->infos[i].ndim > 1 ? 0.1f : 0.0f,
                  (int)step, 1.0f);
    }
}

/* One optimizer step. *loss is the global batch's, *norm that of the gradient before clipping. Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    double start = ddp_now(), gather;
    for (int micro = 0; micro < r->micro_count; micro++) {
        for (int row = 0; row < c->micro_batch; row++) TRY(take_window(r, row, next_window(r)));
        r->losses[r->rank * r->micro_count + micro] = gpt_model_forward_backward(
            &r->model, r->tokens, r->targets, c->micro_batch, c->context, gradient_ready, t);
        TRY(t->ready_result);
        TRY(ddp_accumulator_next(t->accumulator, NULL));
    }
    TRY(ddp_reducer_wait(t->reducer));
    TRY(ddp_reducer_clip_grad_norm(t->reducer, 1.0f, norm));
    update(t, step);
    gather = ddp_now();
    TRY(run_mean_loss(r, (int64_t)r->micro_count * r->world_size, loss));
    t->gather_seconds += ddp_now() - gather;
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation windows. Ranks take contiguous shares of the micro-batches, which are the same on any number of ranks.
   Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    int64_t count = validation_micro_batches(&r->plan), share = (count + r->world_size - 1) / r->world_size;
    for (int64_t i = r->rank * share; i < (r->rank + 1) * share && i < count; i++) {
        TRY(take_validation_windows(r, i));
        r->losses[i] = gpt_model_forward(&r->model, r->tokens, r->targets, c->micro_batch, c->context);
    }
    return run_mean_loss(r, count, loss);
}

static uint64_t hash_weights(const trainer *t) {
    const run *r = &t->run;
    uint64_t hash = HASH_START;
    for (int i = 0; i < r->model.param_count; i++)
        if (t->moment[i] >= 0)
            hash = hash_bytes(hash, r->model.values[i], (size_t)r->infos[i].count * sizeof(float));
    return hash;
}

static ddp_result save_checkpoint(const trainer *t, const char *path, int64_t step) {
    const run *r = &t->run;
    size_t moment_bytes = (size_t)r->parameter_count * sizeof(float);
    checkpoint_writer w;
    TRY(checkpoint_begin(&w, r, path, step));
    for (int i = 0; i < r->model.param_count; i++)
        if (t->moment[i] >= 0)
            checkpoint_put(&w, r->model.values[i], (size_t)r->infos[i].count * sizeof(float));
    checkpoint_put(&w, t->first, moment_bytes);
    checkpoint_put(&w, t->second, moment_bytes);
    return checkpoint_end(&w, path);
}

/* The validation loss, and after training steps a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    ddp_result result = DDP_OK;
    TRY(validate(t, loss));
    if (r->rank == 0) {
        report_validation(&r->report, &r->plan, step, *loss);
        if (r->options->checkpoint && step > r->plan.first_step)
            result = save_checkpoint(t, r->options->checkpoint, step);
    }
    return r->options->checkpoint ? share_result(r->world, result) : DDP_OK;
}

static ddp_result train_steps(trainer *t, double *validation) {
    run *r = &t->run;
    double loss;
    float norm;
    TRY(evaluate(t, r->plan.first_step, validation));
    for (int64_t step = r->plan.first_step + 1; step <= r->plan.config.steps; step++) {
        TRY(train_step(t, step, &loss, &norm));
        run_report_step(r, step, loss, norm);
        if (is_validation_step(r, step)) TRY(evaluate(t, step, validation));
    }
    return DDP_OK;
}

//== the end ================================================================================================== >>end

/* Rank 0, once each rank's share of time is gathered. */
static void print_table(const run *r) {
    const double *exposed = (const double *)r->everyones;
    double mean = 0, worst = 0;
    for (int i = 0; i < r->world_size; i++) {
        mean += exposed[i] / r->world_size;
        worst = exposed[i] > worst ? exposed[i] : worst;
    }
    printf("\n  ranks   tokens/s   communication not hidden by compute\n");
    printf("  %5d   %8.0f   %.2f%% of the time, %.2f%% on the rank that waited longest\n\n", r->world_size,
           tokens_per_second(r, r->plan.config.steps), 100 * mean, 100 * worst);
}

static void print_hook(const trainer *t) {
    comm_hook_stats stats = DDP_ZERO;
    if (!t->hook || comm_hook_get_stats(t->hook, &stats) != DDP_OK || stats.gradient_bytes == 0) return;
    printf("  --hook %s sent %.1f%% of the bytes of the gradients\n\n", t->run.options->hook,
           100.0 * (double)stats.sent_bytes / (double)stats.gradient_bytes);
}

/* Sample, table, and what every run ends with. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    ddp_reducer_stats stats = DDP_ZERO;
    double exposed;
    TRY(ddp_reducer_get_stats(t->reducer, &stats));
    exposed = r->train_seconds > 0 ? (stats.total_wait_seconds + t->gather_seconds) / r->train_seconds : 0;
    TRY(run_gather(r, &exposed, sizeof exposed));
    if (r->rank == 0) {
        int tokens[32 + SAMPLE_BYTES], prompt;
        TRY(sample_prompt(r, tokens, &prompt));
        gpt_generate(&r->model, tokens, prompt, prompt + SAMPLE_BYTES, 0.8f, (uint64_t)r->plan.config.seed);
        print_sample(&r->plan, tokens, prompt);
        print_table(r);
        run_print_recompute(r);
        print_hook(t);
    }
    return run_finish(r, validation, hash_weights(t));
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0;
    TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    TRY(run_build_model(r, GPT_OWN_VALUES));
    TRY(build_params(t));
    TRY(start_values(t));
    TRY(build_parallel(t));
    run_report_start(r);
    TRY(train_steps(t, &validation));
    return finish(t, validation);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    comm_hook_destroy(t->hook);
    run_free(&t->run);
    free(t->saved.bytes);
    free(t->params);
    free(t->moment);
    free(t->first);
    free(t->second);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    return run_trainer(world, (job *)user, sizeof(trainer), train, trainer_free);
}

int main(int argc, char **argv) {
    job j;
    memset(&j, 0, sizeof j);
    parse_options(&PROGRAM, argc, argv, &j.options);
    return run_main(&j, rank_main);
}

/* MIT License: see LICENSE. */

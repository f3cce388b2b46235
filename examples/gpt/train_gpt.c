/*  train_gpt.c - trains a byte-level GPT with data parallelism (DDP); the same bits on any number of ranks

USAGE
    cc -O3 -march=native examples/gpt/train_gpt.c -o train_gpt -lm -lpthread
    ./train_gpt [flags] [files or folders]  without files: the text of this repository; --help lists the flags
    mpirun -n 2 ./train_gpt                 under a launcher
    torchrun --no-python --nproc_per_node 2 ./train_gpt

A STEP
    The sampler gives each rank a contiguous block of the micro-batches of the global batch:

        global batch   | micro 0 | micro 1 | micro 2 | micro 3 |     sequences of context + 1 bytes
        1 rank         | rank 0                                |
        2 ranks        | rank 0            | rank 1            |

    Backward reports each gradient as soon as it is final. The accumulator adds the micro-batches of a rank as
    a binary tree, (0+1)+(2+3). With the last micro-batch it passes the reports on to the reducer. The reducer
    adds the sums of the ranks in the same tree while backward continues, and divides once. Therefore the sums
    do not depend on the number of ranks. Clipping uses an exact norm, and every rank performs the same AdamW
    step.

    The last line is a hash of the weights. With the same --batch and --micro-batch it is the same for 1, 2
    and 4 ranks. That holds for --dropout too: its random numbers depend on the seed, the epoch and the
    sequence, not on the rank.

    Only rank 0 reads files, writes files and prints. */
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#include "checkpoint.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    DROPOUT_FLAG,
    CHECKPOINT_FLAGS,
    RECOMPUTE_FLAG("blocks"),
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "print this text"},
};
static const run_program PROGRAM = {"train_gpt", "trains a byte-level GPT on text with data-parallel ranks",
                                    FLAGS, (int)(sizeof FLAGS / sizeof FLAGS[0])};

//== trainer ================================================================================== >>trainer

/* The state of a rank. */
typedef struct trainer {
    run run;
    checkpoint_file saved;
    ddp_param *params; /* model.param_count */
    int value_count;   /* the parameters except the last, head.weight, which shares the value of wte */
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_optimizer *optimizer;
    ddp_result ready_result; /* the first error in gradient_ready */
    double gather_seconds;   /* time of averaging losses */
} trainer;

/* Rank 0: checks all input before training, and before any file is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_saved *saved;
    DDP_TRY(check_options(r->options, r->world_size));
    DDP_TRY(checkpoint_open(&t->saved, r->options, &saved));
    return make_plan(&r->plan, r->options, r->world_size, saved, &r->text);
}

/* Describes the parameters to the library. */
static ddp_result build_params(trainer *t) {
    run *r = &t->run;
    t->params = (ddp_param *)calloc((size_t)r->model.param_count, sizeof *t->params);
    if (!t->params)
        return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for %d parameters; use a smaller --layers",
                        r->model.param_count);
    for (int i = 0; i < r->model.param_count; i++) {
        run_describe(r, i, &t->params[i]);
        t->params[i].value.data = r->model.values[i];
    }
    t->value_count = gpt_param_head(&r->model.config);
    return DDP_OK;
}

/* A value or a moment of a parameter, for checkpoints. Every rank has all of them. */
static float *state_of(const trainer *t, int which, int param) {
    ddp_tensor moment = DDP_ZERO;
    if (which == 0) return t->run.model.values[param];
    ddp_optimizer_get_state(t->optimizer, param, which - 1, NULL, &moment);
    return (float *)moment.data;
}
static ddp_result get_state(void *user, int which, int param, const float **full) {
    *full = state_of((const trainer *)user, which, param);
    return DDP_OK;
}
static void set_state(void *user, int which, int param, const float *full) {
    const trainer *t = (const trainer *)user;
    memcpy(state_of(t, which, param), full, (size_t)t->run.infos[param].count * sizeof(float));
}

/* Creates reducer, accumulator, optimizer, and the sampler of this rank's block of the batch. Collective. */
static ddp_result build_parallel(trainer *t) {
    run *r = &t->run;
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc accumulator = DDP_ZERO;
    ddp_optimizer_desc adamw = DDP_ZERO;

    reducer.params = t->params; /* grad.data is NULL: the reducer allocates the gradients, bucket by bucket */
    reducer.param_count = r->model.param_count;
    reducer.micro_batch_count = r->micro_count;
    DDP_TRY(ddp_reducer_create(&t->reducer, r->world, &reducer));
    for (int i = 0; i < r->model.param_count; i++) r->model.grads[i] = (float *)t->params[i].grad.data;

    accumulator.params = t->params;
    accumulator.param_count = r->model.param_count;
    accumulator.micro_batch_count = r->micro_count;
    accumulator.reducer = t->reducer;
    DDP_TRY(ddp_accumulator_create(&t->accumulator, r->world, &accumulator));

    adamw.params = t->params;
    adamw.param_count = t->value_count; /* the reducer has added the gradient of head.weight to that of wte */
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    adamw.decay_matrices_only = 1;
    DDP_TRY(ddp_optimizer_create(&t->optimizer, r->world, &adamw));
    if (r->plan.first_step > 0) DDP_TRY(checkpoint_load(r, &t->saved, set_state, t));
    ddp_optimizer_set_step(t->optimizer, r->plan.first_step);
    return run_build_sampler(r, r->world_size, r->rank);
}

//== training ================================================================================ >>training

/* Called by backward for each gradient. In the last micro-batch of a step, the reducer sends a bucket once
   all of its gradients are ready. */
static void gradient_ready(void *user, int index) {
    trainer *t = (trainer *)user;
    ddp_result result = ddp_accumulator_ready(t->accumulator, index);
    if (t->ready_result == DDP_OK) t->ready_result = result;
}

/* One optimizer step. *loss is the mean over the global batch, *norm that of the gradients before clipping.
   Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    double start = ddp_now(), gather;
    for (int micro = 0; micro < r->micro_count; micro++) {
        for (int row = 0; row < c->micro_batch; row++) DDP_TRY(load_sequence(r, row, next_sequence(r)));
        r->losses[r->rank * r->micro_count + micro] = gpt_model_forward_backward(
            &r->model, r->tokens, r->targets, c->micro_batch, c->context, gradient_ready, t);
        DDP_TRY(t->ready_result);
        DDP_TRY(ddp_accumulator_next(t->accumulator, NULL));
    }
    DDP_TRY(ddp_reducer_wait(t->reducer));
    DDP_TRY(ddp_reducer_clip_grad_norm(t->reducer, 1.0f, norm));
    DDP_TRY(ddp_optimizer_step(t->optimizer, ddp_lr_at(&r->lr, step)));
    gather = ddp_now();
    DDP_TRY(run_mean_loss(r, (int64_t)r->micro_count * r->world_size, loss));
    t->gather_seconds += ddp_now() - gather;
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation text. Each rank computes a contiguous block of the micro-batches, which are
   the same on any number of ranks. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    int64_t count = validation_micro_batches(&r->plan), share = (count + r->world_size - 1) / r->world_size;
    for (int64_t i = r->rank * share; i < (r->rank + 1) * share && i < count; i++) {
        DDP_TRY(load_validation_batch(r, i));
        r->losses[i] = gpt_model_forward(&r->model, r->tokens, r->targets, c->micro_batch, c->context);
    }
    return run_mean_loss(r, count, loss);
}

static uint64_t hash_weights(const trainer *t) {
    const run *r = &t->run;
    uint64_t hash = HASH_START;
    for (int i = 0; i < t->value_count; i++)
        hash = hash_bytes(hash, r->model.values[i], (size_t)r->infos[i].count * sizeof(float));
    return hash;
}

/* Computes the validation loss. After training steps, writes a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    DDP_TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    if (!r->options->checkpoint || step == r->plan.first_step) return DDP_OK;
    return checkpoint_save(r, step, get_state, t);
}

static ddp_result train_steps(trainer *t, double *validation) {
    run *r = &t->run;
    double loss;
    float norm;
    DDP_TRY(evaluate(t, r->plan.first_step, validation));
    for (int64_t step = r->plan.first_step + 1; step <= r->plan.config.steps; step++) {
        DDP_TRY(train_step(t, step, &loss, &norm));
        run_report_step(r, step, loss, norm);
        if (is_validation_step(r, step)) DDP_TRY(evaluate(t, step, validation));
    }
    return DDP_OK;
}

//== end of the run =============================================================================== >>end

/* Rank 0: r->gathered has, for each rank, the fraction of time that it waited for communication. */
static void print_table(const run *r) {
    const double *exposed = (const double *)r->gathered;
    double mean = 0, worst = 0;
    for (int i = 0; i < r->world_size; i++) {
        mean += exposed[i] / r->world_size;
        worst = exposed[i] > worst ? exposed[i] : worst;
    }
    printf("\n  ranks   tokens/s   waiting for communication\n");
    printf("  %5d   %8.0f   %.2f%% of the time, %.2f%% on the slowest rank\n\n", r->world_size,
           tokens_per_second(r, r->plan.config.steps), 100 * mean, 100 * worst);
}

/* Prints a sample and a table, and finishes the run. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    ddp_reducer_stats stats = DDP_ZERO;
    double exposed;
    DDP_TRY(ddp_reducer_get_stats(t->reducer, &stats));
    exposed = r->train_seconds > 0 ? (stats.total_wait_seconds + t->gather_seconds) / r->train_seconds : 0;
    DDP_TRY(run_gather(r, &exposed, sizeof exposed));
    if (r->rank == 0) {
        int tokens[32 + SAMPLE_BYTES], prompt;
        DDP_TRY(sample_prompt(r, tokens, &prompt));
        gpt_generate(&r->model, tokens, prompt, prompt + SAMPLE_BYTES, 0.8f, (uint64_t)r->plan.config.seed);
        print_sample(&r->plan, tokens, prompt);
        print_table(r);
        run_print_recompute(r);
    }
    return run_finish(r, validation, hash_weights(t));
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0;
    DDP_TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    DDP_TRY(run_build_model(r, GPT_OWN_VALUES));
    DDP_TRY(build_params(t));
    gpt_model_init(&r->model, (uint64_t)r->plan.config.seed);
    DDP_TRY(build_parallel(t));
    run_report_start(r);
    DDP_TRY(train_steps(t, &validation));
    return finish(t, validation);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    ddp_optimizer_destroy(t->optimizer);
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    run_free(&t->run);
    checkpoint_close(&t->saved);
    free(t->params);
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

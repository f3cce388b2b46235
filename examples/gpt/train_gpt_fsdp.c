/*  train_gpt_fsdp.c - train_gpt with parameters, gradients and optimizer state split over ranks, and the same bits.

USAGE
    cc -O3 -march=native examples/gpt/train_gpt_fsdp.c -o train_gpt_fsdp -lm -lpthread
    ./train_gpt_fsdp [flags] [files or folders]    --strategy full, grad, optim or none; --help lists the flags
    mpirun -n 2 ./train_gpt_fsdp                   the ranks of a launcher

A STEP
    The model's units are the embedding, the blocks and the head. One at a time is whole on a rank:

        forward     gather embedding, compute, release; gather block 0, ...; gather head
        backward    gather head, compute, reduce, release; ...; gather embedding, compute, reduce, release

    Under full and grad, gradients are added over ranks after every micro-batch; so micro-batches are dealt to ranks in turn,
    number k W + r to rank r, and the sums over ranks, then over k, are the tree of train_gpt. Under optim and none a rank
    adds up its own first, and has a block of them, as in train_gpt:

        micro-batch         0       1       2       3
        full, grad        rank 0  rank 1  rank 0  rank 1
        optim, none       rank 0  rank 0  rank 1  rank 1

    So the hash in the last line is that of train_gpt with the same --batch and --micro-batch, whatever the strategy and on any number of
    ranks, and a checkpoint of one goes on under another. First values are made row by row where they lie, validation and
    the sample at the end gather unit by unit: under full no rank ever holds the whole model. */
#define DDP_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "folder.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--strategy", FLAG_TEXT, NOT_SAVED, AT(strategy), 0, 0,
     "NAME what ranks split: full (ZeRO-3, default), grad (ZeRO-2), optim (ZeRO-1) or none"},
    {"--replicas", FLAG_INT32, NOT_SAVED, AT(replicas), 1, TRAIN_MAX_AXIS,
     "N groups of ranks, each with all shards; default 1"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0,
     "DIR save there at every validation and at the end; DIR.1 is the one before"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0,
     "DIR go on from a checkpoint, on any number of ranks under any strategy"},
    RECOMPUTE_FLAG,
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "this text"},
};
static const run_program PROGRAM = {"train_gpt_fsdp", "trains a byte-level GPT on text with sharded ranks",
                                    FLAGS, (int)(sizeof FLAGS / sizeof FLAGS[0])};

/* What follows from the strategy before ranks start. */
static void check_strategy(run_options *o) {
    int s = find_strategy(o->strategy);
    if (s == STRATEGY_COUNT && !o->wrong[0])
        snprintf(o->wrong, sizeof o->wrong, "--strategy %.60s: give full, grad, optim or none", o->strategy);
    o->dealt = s == DDP_FSDP_FULL_SHARD || s == DDP_FSDP_SHARD_GRAD;
}

//== trainer ============================================================================================== >>trainer

/* One rank. */
typedef struct trainer {
    run run;
    ddp_fsdp_strategy strategy;
    ddp_group *shard_group,
        *copies; /* with --replicas: the ranks that split the model, and those that hold the same shard */
    ddp_fsdp_param *params;    /* model.param_count */
    ddp_fsdp_unit_desc *units; /* embedding, blocks, head */
    int unit_count;
    ddp_fsdp *fsdp;
    ddp_fsdp_state state; /* what a checkpoint keeps beside tensors */
    int64_t *starts;      /* windows of the global batch */
    double gather_seconds;
} trainer;

/* Rank 0: everything that can be wrong with the input is found here, before training and before anything is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    int replicas = o->replicas ? o->replicas : 1, inner = r->world_size / replicas;
    run_saved saved;
    memset(&saved, 0, sizeof saved);
    TRY(check_options(o, r->world_size));
    if (r->world_size % replicas)
        return WRONG("--replicas %d does not divide %d ranks; use a divisor", replicas, r->world_size);
    if (replicas > 1 && !is_power(inner))
        return WRONG("--replicas %d on %d ranks splits the model over %d ranks; use 2^k of them, so that "
                     "sums keep their tree",
                     replicas, r->world_size, inner);
    if (o->checkpoint) TRY(folder_check(o->checkpoint));
    if (o->resume) TRY(folder_read(r->options, &saved));
    if (o->resume)
        TRY(folder_check_qkv(o->resume, 0, "go on with train_gpt_3d, or with train_gpt_cuda --tp 2 or more"));
    return make_plan(&r->plan, o, r->world_size, o->resume ? &saved : NULL, &r->text);
}

/* What the strategy needs of the model: the parameters, grouped into units. */
static ddp_result build_params(trainer *t) {
    run *r = &t->run;
    t->unit_count = r->plan.config.layers + 2;
    t->params = (ddp_fsdp_param *)calloc((size_t)r->model.param_count, sizeof *t->params);
    t->units = (ddp_fsdp_unit_desc *)calloc((size_t)t->unit_count, sizeof *t->units);
    t->starts = (int64_t *)calloc((size_t)r->plan.config.batch, sizeof *t->starts);
    if (!t->params || !t->units || !t->starts)
        return ddp_fail(DDP_ERR_NO_MEMORY, "arrays of %d parameters", r->model.param_count);
    for (int i = 0; i < r->model.param_count; i++) {
        const gpt_param *info = &r->infos[i];
        ddp_fsdp_unit_desc *unit = &t->units[info->unit];
        run_describe(r, i, &t->params[i].param);
        t->params[i].index = i;
        if (info->tied_to >= 0) t->params[i].tied_to = r->infos[info->tied_to].name;
        if (unit->param_count++) continue;
        unit->params = &t->params[i];
        unit->name = t->params[i].unit;
        if (info->unit == 0)
            snprintf(t->params[i].unit, sizeof t->params[i].unit, "embedding");
        else if (info->unit > r->plan.config.layers)
            snprintf(t->params[i].unit, sizeof t->params[i].unit, "head");
        else
            snprintf(t->params[i].unit, sizeof t->params[i].unit, "h.%d", info->unit - 1);
    }
    return DDP_OK;
}

/* First values: drawn from the seed, row by row on the rank that keeps them. */
static ddp_result fill_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const run *r = (const run *)user;
    int64_t columns = r->infos[param->index].shape[1];
    gpt_param_init(&r->model.config, (uint64_t)r->plan.config.seed, param->index, first_row * columns,
                   row_count * columns, (float *)out);
    return DDP_OK;
}

/* What makes the trainer parallel: shards, and a sampler of the whole batch, of which a rank takes the micro-batches that are its own. Collective. */
static ddp_result build_parallel(trainer *t) {
    run *r = &t->run;
    ddp_fsdp_desc desc = DDP_ZERO;

    t->shard_group = r->world;
    if (r->options->replicas > 1) {
        int inner = r->world_size / r->options->replicas;
        TRY(ddp_group_split(r->world, r->rank / inner, r->rank, &t->shard_group));
        TRY(ddp_group_split(r->world, r->rank % inner, r->rank, &t->copies));
    }
    desc.units = t->units;
    desc.unit_count = t->unit_count;
    desc.strategy = t->strategy;
    desc.replicas = t->copies;
    desc.micro_batch_count = r->micro_count;
    desc.overwrite_gradients = 1; /* backward writes every gradient of a unit */
    desc.optimizer.beta2 = 0.95f;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = fill_rows;
    desc.init_user = r;
    desc.state = &t->state;
    desc.keep_checkpoints = 2;
    TRY(ddp_fsdp_create(&t->fsdp, t->shard_group, &desc));

    if (r->plan.first_step > 0) {
        TRY(ddp_fsdp_load(t->fsdp, r->options->resume));
        if (t->state.step != r->plan.first_step)
            return WRONG("--resume %s: another run has just written it; give a checkpoint that stays",
                         r->options->resume);
        r->plan.data = t->state.sampler;
    }
    return run_build_sampler(r, 1, 0);
}

//== training ============================================================================================ >>training

/* The unit's values, and its gradients outside of ddp_fsdp_no_grad, are where the model looks for them. Collective. */
static ddp_result gather(trainer *t, int unit) {
    double start = ddp_now();
    TRY(ddp_fsdp_unshard(t->fsdp, unit));
    for (int i = 0; i < t->units[unit].param_count; i++) {
        const ddp_fsdp_param *param = &t->units[unit].params[i];
        t->run.model.values[param->index] = (float *)param->param.value.data;
        t->run.model.grads[param->index] = (float *)param->param.grad.data;
    }
    t->gather_seconds += ddp_now() - start;
    return DDP_OK;
}

/* Forward through all units. *loss (may be NULL: nothing is computed) is the mean over the tokens of the pass. Collective. */
static ddp_result forward(trainer *t, const gpt_pass *pass, const int *tokens, const int *targets,
                          double *loss) {
    for (int unit = 0; unit < t->unit_count; unit++) {
        TRY(gather(t, unit));
        if (loss)
            *loss = gpt_model_unit_forward(&t->run.model, pass, unit, tokens, targets)
                    / ((double)pass->batch * pass->length);
        TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return DDP_OK;
}

static ddp_result backward(trainer *t, const gpt_pass *pass, const int *tokens, const int *targets) {
    for (int unit = t->unit_count - 1; unit >= 0; unit--) {
        TRY(gather(t, unit));
        gpt_model_unit_backward(&t->run.model, pass, unit, tokens, targets);
        TRY(ddp_fsdp_reduce_grads(t->fsdp, unit));
        TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return DDP_OK;
}

/* One optimizer step. *loss is the global batch's, *norm that of the gradient before clipping. Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    gpt_pass pass = gpt_model_pass(&r->model, c->micro_batch, c->context);
    double start = ddp_now();
    for (int i = 0; i < c->batch; i++) t->starts[i] = next_window(r);
    for (int micro = 0; micro < r->micro_count; micro++) {
        int number = r->options->dealt ? micro * r->world_size + r->rank : r->rank * r->micro_count + micro;
        for (int row = 0; row < c->micro_batch; row++)
            TRY(take_window(r, row, t->starts[number * c->micro_batch + row]));
        TRY(forward(t, &pass, r->tokens, r->targets, &r->losses[number]));
        TRY(backward(t, &pass, r->tokens, r->targets));
    }
    TRY(ddp_fsdp_clip_grad_norm(t->fsdp, 1.0f, norm));
    TRY(ddp_fsdp_step(t->fsdp, ddp_lr_at(&r->lr, step)));
    TRY(run_mean_loss(r, (int64_t)r->micro_count * r->world_size, loss));
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation windows. Ranks take contiguous shares of the micro-batches, which are the same on any number of ranks; where a
   share is short, its rank gathers along with the others. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    gpt_pass pass = gpt_model_pass(&r->model, c->micro_batch, c->context);
    int64_t count = validation_micro_batches(&r->plan), share = (count + r->world_size - 1) / r->world_size;
    double training = t->gather_seconds;
    TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (int64_t i = r->rank * share; i < (r->rank + 1) * share; i++) {
        if (i < count) TRY(take_validation_windows(r, i));
        TRY(forward(t, &pass, r->tokens, r->targets, i < count ? &r->losses[i] : NULL));
    }
    TRY(ddp_fsdp_no_grad(t->fsdp, 0));
    t->gather_seconds = training;
    return run_mean_loss(r, count, loss);
}

static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    const run *r = &t->run;
    *hash = HASH_START;
    TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (int unit = 0; unit < t->unit_count; unit++) {
        TRY(gather(t, unit));
        for (int i = 0; i < r->model.param_count; i++)
            if (r->infos[i].unit == unit && r->infos[i].tied_to < 0)
                *hash = hash_bytes(*hash, r->model.values[i], (size_t)r->infos[i].count * sizeof(float));
        TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return ddp_fsdp_no_grad(t->fsdp, 0);
}

/* The validation loss, and after training steps a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    if (!r->options->checkpoint || step == r->plan.first_step) return DDP_OK;
    folder_state(&t->state, &r->plan);
    TRY(ddp_sampler_save(&r->sampler, &t->state.sampler));
    return ddp_fsdp_save(t->fsdp, r->options->checkpoint);
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

/* What the model writes when it goes on from the start of the validation text: gpt_generate, unit by unit. Rank 0 computes, the others gather along.
   Collective. */
static ddp_result generate(trainer *t) {
    run *r = &t->run;
    int tokens[32 + SAMPLE_BYTES], prompt, context = r->plan.config.context, start = 0, done = 0;
    double unused;
    TRY(sample_prompt(r, tokens, &prompt));
    TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (int at = prompt; at < prompt + SAMPLE_BYTES; at++) {
        gpt_pass pass;
        if (at - start > context) {
            start = at - (context + 1) / 2;
            done = 0;
        }
        pass = gpt_model_pass(&r->model, 1, at - start);
        pass.first = r->model.recompute ? 0 : done;
        TRY(forward(t, &pass, tokens + start, NULL, r->rank == 0 ? &unused : NULL));
        done = at - start;
        tokens[at] = r->rank ? 0
                             : gpt_sample(r->model.head.logits, 256, 0.8f,
                                          gpt_sample_draw((uint64_t)r->plan.config.seed, at));
    }
    if (r->rank == 0) print_sample(&r->plan, tokens, prompt);
    return ddp_fsdp_no_grad(t->fsdp, 0);
}

/* A rank's share of time that it waited, and the memory that it has. */
typedef struct rank_use {
    double exposed;
    ddp_fsdp_memory memory;
} rank_use;

static void print_bytes(const char *purpose, size_t now, size_t peak, size_t predicted) {
    printf("  %-14s %11zu %11zu %11zu\n", purpose, now, peak, predicted);
}

/* Rank 0, once what each rank uses is gathered. */
static void print_table(const trainer *t) {
    const run *r = &t->run;
    const rank_use *use = (const rank_use *)r->everyones;
    const ddp_fsdp_bytes *now = &use->memory.now, *peak = &use->memory.peak,
                         *predicted = &use->memory.predicted;
    double mean = 0;
    for (int i = 0; i < r->world_size; i++) mean += use[i].exposed / r->world_size;
    printf("\n  strategy   ranks   tokens/s   waiting for parameters\n");
    printf("  %-8s   %5d   %8.0f   %.2f%% of the time\n", strategy_name(t->strategy), r->world_size,
           tokens_per_second(r, r->plan.config.steps), 100 * mean);
    printf("\n  bytes of rank 0        now        peak   predicted\n");
    print_bytes("shards", now->shards, peak->shards, predicted->shards);
    print_bytes("gathered", now->gathered, peak->gathered, predicted->gathered);
    print_bytes("gradients", now->gradients, peak->gradients, predicted->gradients);
    print_bytes("optimizer", now->optimizer, peak->optimizer, predicted->optimizer);
    print_bytes("communication", now->communication, peak->communication, predicted->communication);
    print_bytes("bookkeeping", now->bookkeeping, peak->bookkeeping, predicted->bookkeeping);
    print_bytes("total", now->total, peak->total, predicted->total);
    printf("  peak of every rank:");
    for (int i = 0; i < r->world_size; i++) printf(" %zu", use[i].memory.peak.total);
    printf("\n\n");
}

/* Sample, table, and what every run ends with. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    rank_use use = DDP_ZERO;
    uint64_t hash;
    use.exposed = r->train_seconds > 0 ? t->gather_seconds / r->train_seconds : 0;
    TRY(ddp_fsdp_get_memory(t->fsdp, &use.memory));
    TRY(generate(t));
    TRY(run_gather(r, &use, sizeof use));
    if (r->rank == 0) {
        print_table(t);
        run_print_recompute(r);
    }
    TRY(hash_weights(t, &hash));
    return run_finish(r, validation, hash);
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0;
    t->strategy = (ddp_fsdp_strategy)find_strategy(t->run.options->strategy);
    TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    TRY(run_build_model(r, 0));
    TRY(build_params(t));
    TRY(build_parallel(t));
    run_report_start(r);
    TRY(train_steps(t, &validation));
    return finish(t, validation);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    ddp_fsdp_destroy(t->fsdp);
    ddp_group_destroy(t->copies);
    if (t->shard_group != t->run.world) ddp_group_destroy(t->shard_group);
    run_free(&t->run);
    free(t->params);
    free(t->units);
    free(t->starts);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    return run_trainer(world, (job *)user, sizeof(trainer), train, trainer_free);
}

int main(int argc, char **argv) {
    job j;
    memset(&j, 0, sizeof j);
    parse_options(&PROGRAM, argc, argv, &j.options);
    check_strategy(&j.options);
    return run_main(&j, rank_main);
}

/* MIT License: see LICENSE. */

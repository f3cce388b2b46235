/*  train_gpt_fsdp.c - train_gpt with sharded parameters, gradients and optimizer state (FSDP); the same bits

USAGE
    cc -O3 -march=native examples/gpt/train_gpt_fsdp.c -o train_gpt_fsdp -lm -lpthread
    ./train_gpt_fsdp [flags] [files or folders]   --strategy full, grad, optim or none; --help lists all flags
    mpirun -n 2 ./train_gpt_fsdp                  under a launcher

A STEP
    The units of the model are the embedding, each block and the head. With full, a rank has the full
    parameters of one unit at a time:

        forward     unshard embedding, compute, reshard; unshard block 0, ...; unshard head, compute, reshard
        backward    unshard head, compute, reduce, reshard; ...; unshard embedding, compute, reduce, reshard

    With full and grad, gradients are reduced after every micro-batch. With optim and none, a rank first
    accumulates all of its micro-batches. The assignment of micro-batches to ranks differs accordingly, so
    that gradients are always added in the binary tree of train_gpt:

        micro-batch         0       1       2       3
        full, grad        rank 0  rank 1  rank 0  rank 1
        optim, none       rank 0  rank 0  rank 1  rank 1

    Therefore the hash in the last line is that of train_gpt with the same --batch and --micro-batch, for
    every strategy and number of ranks. A checkpoint continues under any other strategy and number of
    ranks.

    With --param-dtype bf16 or f16, parameters are unsharded in 16 bits. A unit is cast to f32 before it
    computes. Master values, gradients and moments stay f32, also in checkpoints, so a run can continue with
    another --param-dtype. The hash is that of the 16-bit values. It does not depend on strategy and ranks.

    --offload changes where tensors are stored, and no bits: file is for a CPU, params for a device with its
    own memory. See ddp_fsdp_offload.

    Initial values are computed on the rank that stores them, and validation and the sample unshard
    unit by unit: with full, no rank ever holds the whole model. */
#define DDP_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "folder.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    DROPOUT_FLAG,
    {"--strategy", FLAG_TEXT, NOT_SAVED, AT(strategy), 0, 0,
     "NAME full (ZeRO-3, default), grad (ZeRO-2), optim (ZeRO-1) or none"},
    {"--replicas", FLAG_INT32, NOT_SAVED, AT(replicas), 1, TRAIN_MAX_AXIS,
     "N hybrid sharding: N groups of ranks, each with all shards; default 1"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0,
     "DIR write a checkpoint there after each validation; DIR.1 is the previous one"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0,
     "DIR continue from a checkpoint, with any --strategy and number of ranks" RESUMED_FLAGS},
    RECOMPUTE_FLAG("blocks"),
    {"--offload", FLAG_TEXT, NOT_SAVED, AT(offload_name), 0, 0,
     "NAME file: moments and master values are in a file here, for a model larger than memory;\n"
     "                        params (--strategy full): a GPU streams parameters from host memory. A\n"
     "                        CPU has them there already; none (default)"},
    {"--param-dtype", FLAG_TEXT, NOT_SAVED, AT(dtype), 0, 0,
     "NAME of unsharded parameters: f32 (default), or bf16 or f16, which halve the bytes of an unshard;\n"
     "                        master values, gradients and products stay f32"},
    {"--export", FLAG_TEXT, NOT_SAVED, AT(export_file), 0, 0,
     "FILE at the end, write the model to one safetensors file, in f32"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "print this text"},
};
static const run_program PROGRAM = {"train_gpt_fsdp", "trains a byte-level GPT on text with sharded ranks",
                                    FLAGS, (int)(sizeof FLAGS / sizeof FLAGS[0])};

/* The number of an --offload, by its name. -1 = invalid. */
static int find_offload(const char *name) {
    if (!name || !strcmp(name, "none")) return DDP_FSDP_OFFLOAD_NONE;
    if (!strcmp(name, "file")) return DDP_FSDP_OFFLOAD_FILE;
    return strcmp(name, "params") ? -1 : DDP_FSDP_OFFLOAD_PARAMS;
}

/* Checks --strategy, --param-dtype and --offload. Sets the assignment of micro-batches that the strategy
   needs. */
static void check_names(run_options *o) {
    int s = find_strategy(o->strategy);
    if (s == STRATEGY_COUNT && !o->wrong[0])
        snprintf(o->wrong, sizeof o->wrong, "--strategy %.60s: give full, grad, optim or none", o->strategy);
    if (!find_dtype(o->dtype, DDP_F32) && !o->wrong[0])
        snprintf(o->wrong, sizeof o->wrong, "--param-dtype %.60s: give f32, bf16 or f16", o->dtype);
    int offload = find_offload(o->offload_name);
    if (offload < 0 && !o->wrong[0])
        snprintf(o->wrong, sizeof o->wrong, "--offload %.60s: give none, file or params", o->offload_name);
    if (offload == DDP_FSDP_OFFLOAD_PARAMS && s != DDP_FSDP_FULL_SHARD && !o->wrong[0])
        snprintf(o->wrong, sizeof o->wrong,
                 "--offload params keeps no full parameters, as --strategy %.60s does; use --strategy full",
                 o->strategy);
    o->round_robin = s == DDP_FSDP_FULL_SHARD || s == DDP_FSDP_SHARD_GRAD;
}

//== trainer ================================================================================== >>trainer

/* The state of a rank. */
typedef struct trainer {
    run run;
    ddp_fsdp_strategy strategy;
    ddp_dtype dtype;           /* of unsharded parameters */
    float *widened;            /* the values of a unit in f32, if dtype is not f32: space for the largest */
    ddp_group *shard_group;    /* the ranks that hold one copy of the model */
    ddp_group *replica_group;  /* with --replicas: the ranks with the same shards; otherwise NULL */
    ddp_fsdp_param *params;    /* model.param_count */
    ddp_fsdp_unit_desc *units; /* embedding, blocks, head */
    int unit_count;
    ddp_fsdp *fsdp;
    ddp_fsdp_state state; /* the part of a checkpoint that is not tensors */
    int64_t *starts;      /* starts of the sequences of the global batch */
    double unshard_seconds;
} trainer;

/* Rank 0: checks all input before training, and before any file is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    int replicas = o->replicas ? o->replicas : 1, inner = r->world_size / replicas;
    run_saved saved;
    memset(&saved, 0, sizeof saved);
    DDP_TRY(check_options(o, r->world_size));
    if (r->world_size % replicas)
        return ddp_fail(DDP_ERR_INVALID,
                        "--replicas %d does not divide %d ranks; use a divisor of the number of ranks",
                        replicas, r->world_size);
    if (replicas > 1 && !is_power_of_two(inner))
        return ddp_fail(
            DDP_ERR_INVALID,
            "--replicas %d on %d ranks splits the model over %d ranks; use 1, 2, 4, 8 ... ranks per "
            "replica",
            replicas, r->world_size, inner);
    if (o->checkpoint) DDP_TRY(folder_check(o->checkpoint));
    if (o->export_file) DDP_TRY(check_writable(o->export_file));
    if (o->resume) DDP_TRY(folder_read(r->options, &saved));
    if (o->resume)
        DDP_TRY(folder_check_qkv(o->resume, 0, "use train_gpt_3d, or train_gpt_cuda with --tp 2 or more"));
    return make_plan(&r->plan, o, r->world_size, o->resume ? &saved : NULL, &r->text);
}

/* The elements of the largest unit. */
static size_t largest_unit(const run *r) {
    int64_t most = 0, count = 0;
    for (int i = 0; i < r->model.param_count; i++) {
        count = i && r->infos[i].unit == r->infos[i - 1].unit ? count + r->infos[i].count : r->infos[i].count;
        most = count > most ? count : most;
    }
    return (size_t)most;
}

/* Describes the parameters to the library, grouped into units. */
static ddp_result build_params(trainer *t) {
    run *r = &t->run;
    t->unit_count = r->plan.config.layers + 2;
    t->params = (ddp_fsdp_param *)calloc((size_t)r->model.param_count, sizeof *t->params);
    t->units = (ddp_fsdp_unit_desc *)calloc((size_t)t->unit_count, sizeof *t->units);
    t->starts = (int64_t *)calloc((size_t)r->plan.config.batch, sizeof *t->starts);
    t->widened = (float *)calloc(t->dtype == DDP_F32 ? 1 : largest_unit(r), sizeof *t->widened);
    if (!t->params || !t->units || !t->starts || !t->widened) return run_out_of_memory();
    for (int i = 0; i < r->model.param_count; i++) {
        const gpt_param *info = &r->infos[i];
        ddp_fsdp_unit_desc *unit = &t->units[info->unit];
        run_describe(r, i, &t->params[i].param);
        t->params[i].param.grad.dtype = DDP_F32;
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

/* Called by ddp_fsdp_create: computes the initial values of the rows that this rank stores. */
static ddp_result fill_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const run *r = (const run *)user;
    int64_t columns = r->infos[param->index].shape[1];
    gpt_param_init(&r->model.config, (uint64_t)r->plan.config.seed, param->index, first_row * columns,
                   row_count * columns, (float *)out);
    return DDP_OK;
}

/* Creates the shards, and a sampler of the global batch: each rank picks its own micro-batches.
   Collective. */
static ddp_result build_parallel(trainer *t) {
    run *r = &t->run;
    ddp_fsdp_desc desc = DDP_ZERO;

    t->shard_group = r->world;
    if (r->options->replicas > 1) {
        int inner = r->world_size / r->options->replicas;
        DDP_TRY(ddp_group_split(r->world, r->rank / inner, r->rank, &t->shard_group));
        DDP_TRY(ddp_group_split(r->world, r->rank % inner, r->rank, &t->replica_group));
    }
    desc.units = t->units;
    desc.unit_count = t->unit_count;
    desc.strategy = t->strategy;
    desc.param_dtype = t->dtype;
    desc.replicas = t->replica_group;
    desc.micro_batch_count = r->micro_count;
    desc.overwrite_gradients = 1; /* backward overwrites every gradient */
    desc.offload = (ddp_fsdp_offload)find_offload(r->options->offload_name);
    desc.optimizer.beta2 = 0.95f;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = fill_rows;
    desc.init_user = r;
    desc.state = &t->state;
    desc.keep_checkpoints = 2;
    DDP_TRY(ddp_fsdp_create(&t->fsdp, t->shard_group, &desc));

    if (r->plan.first_step > 0) {
        DDP_TRY(ddp_fsdp_load(t->fsdp, r->options->resume));
        if (t->state.step != r->plan.first_step)
            return ddp_fail(DDP_ERR_INVALID,
                            "--resume %s: another run replaced it during the load; stop that run first",
                            r->options->resume);
        r->plan.data = t->state.sampler;
    }
    return run_build_sampler(r, 1, 0);
}

//== training ================================================================================ >>training

/* Unshards a unit, and sets the model's pointers to its values and gradients. The model computes in f32, so
   values of another dtype are cast. Collective. */
static ddp_result unshard(trainer *t, int unit) {
    double start = ddp_now();
    float *widened = t->widened;
    DDP_TRY(ddp_fsdp_unshard(t->fsdp, unit));
    for (int i = 0; i < t->units[unit].param_count; i++) {
        const ddp_fsdp_param *param = &t->units[unit].params[i];
        const ddp_tensor *value = &param->param.value;
        size_t count = (size_t)t->run.infos[param->index].count;
        t->run.model.grads[param->index] = (float *)param->param.grad.data;
        t->run.model.values[param->index] = (float *)value->data;
        if (t->dtype == DDP_F32) continue;
        ddp_group_device(t->run.world)->cast(widened, DDP_F32, value->data, value->dtype, count);
        t->run.model.values[param->index] = widened;
        widened += count;
    }
    t->unshard_seconds += ddp_now() - start;
    return DDP_OK;
}

/* Forward pass. *loss is the mean over the tokens of the pass. With loss NULL this rank only takes part in
   the collectives of the others. Collective. */
static ddp_result forward(trainer *t, const gpt_pass *pass, const int *tokens, const int *targets,
                          double *loss) {
    for (int unit = 0; unit < t->unit_count; unit++) {
        DDP_TRY(unshard(t, unit));
        if (loss)
            *loss = gpt_model_unit_forward(&t->run.model, pass, unit, tokens, targets)
                    / ((double)pass->batch * pass->length);
        DDP_TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return DDP_OK;
}

static ddp_result backward(trainer *t, const gpt_pass *pass, const int *tokens, const int *targets) {
    for (int unit = t->unit_count - 1; unit >= 0; unit--) {
        DDP_TRY(unshard(t, unit));
        gpt_model_unit_backward(&t->run.model, pass, unit, tokens, targets);
        DDP_TRY(ddp_fsdp_reduce_grads(t->fsdp, unit));
        DDP_TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return DDP_OK;
}

/* One optimizer step. *loss is the mean over the global batch, *norm that of the gradients before clipping.
   Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    gpt_pass pass = gpt_model_train_pass(&r->model, c->micro_batch, c->context);
    double start = ddp_now();
    for (int i = 0; i < c->batch; i++) t->starts[i] = next_sequence(r);
    for (int micro = 0; micro < r->micro_count; micro++) {
        int number = r->options->round_robin ? micro * r->world_size + r->rank
                                             : r->rank * r->micro_count + micro;
        for (int row = 0; row < c->micro_batch; row++)
            DDP_TRY(load_sequence(r, row, t->starts[number * c->micro_batch + row]));
        DDP_TRY(forward(t, &pass, r->tokens, r->targets, &r->losses[number]));
        DDP_TRY(backward(t, &pass, r->tokens, r->targets));
    }
    DDP_TRY(ddp_fsdp_clip_grad_norm(t->fsdp, 1.0f, norm));
    DDP_TRY(ddp_fsdp_step(t->fsdp, ddp_lr_at(&r->lr, step)));
    DDP_TRY(run_mean_loss(r, (int64_t)r->micro_count * r->world_size, loss));
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation text. Each rank computes a contiguous block of the micro-batches, which are
   the same on any number of ranks. A rank with fewer micro-batches still takes part in the collectives.
   Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    gpt_pass pass = gpt_model_pass(&r->model, c->micro_batch, c->context);
    int64_t count = validation_micro_batches(&r->plan), share = (count + r->world_size - 1) / r->world_size;
    double training = t->unshard_seconds;
    DDP_TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (int64_t i = r->rank * share; i < (r->rank + 1) * share; i++) {
        if (i < count) DDP_TRY(load_validation_batch(r, i));
        DDP_TRY(forward(t, &pass, r->tokens, r->targets, i < count ? &r->losses[i] : NULL));
    }
    DDP_TRY(ddp_fsdp_no_grad(t->fsdp, 0));
    t->unshard_seconds = training;
    return run_mean_loss(r, count, loss);
}

static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    const run *r = &t->run;
    *hash = HASH_START;
    DDP_TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (int unit = 0; unit < t->unit_count; unit++) {
        DDP_TRY(unshard(t, unit));
        for (int i = 0; i < r->model.param_count; i++)
            if (r->infos[i].unit == unit && r->infos[i].tied_to < 0)
                *hash = hash_bytes(*hash, r->model.values[i], (size_t)r->infos[i].count * sizeof(float));
        DDP_TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return ddp_fsdp_no_grad(t->fsdp, 0);
}

/* Computes the validation loss. After training steps, writes a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    DDP_TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    if (!r->options->checkpoint || step == r->plan.first_step) return DDP_OK;
    folder_state(&t->state, &r->plan);
    DDP_TRY(ddp_sampler_save(&r->sampler, &t->state.sampler));
    return ddp_fsdp_save(t->fsdp, r->options->checkpoint);
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

/* Prints a continuation of the validation text: gpt_generate, unit by unit. Rank 0 computes; the others take
   part in the collectives. Collective. */
static ddp_result generate(trainer *t) {
    run *r = &t->run;
    int tokens[32 + SAMPLE_BYTES], prompt, context = r->plan.config.context, start = 0, done = 0;
    double unused;
    DDP_TRY(sample_prompt(r, tokens, &prompt));
    DDP_TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (int at = prompt; at < prompt + SAMPLE_BYTES; at++) {
        gpt_pass pass;
        if (at - start > context) {
            start = at - (context + 1) / 2;
            done = 0;
        }
        pass = gpt_model_pass(&r->model, 1, at - start);
        pass.first = r->model.recompute ? 0 : done;
        DDP_TRY(forward(t, &pass, tokens + start, NULL, r->rank == 0 ? &unused : NULL));
        done = at - start;
        tokens[at] = 0;
        if (r->rank == 0)
            tokens[at] = gpt_sample(r->model.head.logits, 256, 0.8f,
                                    gpt_sample_draw((uint64_t)r->plan.config.seed, at));
    }
    if (r->rank == 0) print_sample(&r->plan, tokens, prompt);
    return ddp_fsdp_no_grad(t->fsdp, 0);
}

/* Figures of a rank, for the table. */
typedef struct rank_use {
    double waiting; /* fraction of the time that it waited for parameters */
    ddp_fsdp_memory memory;
} rank_use;

static void print_bytes(const char *purpose, size_t now, size_t peak, size_t predicted) {
    printf("  %-14s %11zu %11zu %11zu\n", purpose, now, peak, predicted);
}

/* Rank 0: r->gathered has the rank_use of each rank. */
static void print_table(const trainer *t) {
    const run *r = &t->run;
    const rank_use *use = (const rank_use *)r->gathered;
    const ddp_fsdp_bytes *now = &use->memory.now, *peak = &use->memory.peak,
                         *predicted = &use->memory.predicted;
    double mean = 0;
    for (int i = 0; i < r->world_size; i++) mean += use[i].waiting / r->world_size;
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

/* Prints a sample and a table, and finishes the run. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    rank_use use = DDP_ZERO;
    uint64_t hash;
    use.waiting = r->train_seconds > 0 ? t->unshard_seconds / r->train_seconds : 0;
    DDP_TRY(ddp_fsdp_get_memory(t->fsdp, &use.memory));
    DDP_TRY(generate(t));
    DDP_TRY(run_gather(r, &use, sizeof use));
    if (r->rank == 0) {
        print_table(t);
        run_print_recompute(r);
    }
    DDP_TRY(hash_weights(t, &hash));
    if (r->options->export_file) DDP_TRY(ddp_fsdp_export(t->fsdp, r->options->export_file));
    return run_finish(r, validation, hash);
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0;
    t->strategy = (ddp_fsdp_strategy)find_strategy(t->run.options->strategy);
    t->dtype = find_dtype(t->run.options->dtype, DDP_F32);
    DDP_TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    DDP_TRY(run_build_model(r, 0));
    DDP_TRY(build_params(t));
    DDP_TRY(build_parallel(t));
    run_report_start(r);
    DDP_TRY(train_steps(t, &validation));
    return finish(t, validation);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    ddp_fsdp_destroy(t->fsdp);
    ddp_group_destroy(t->replica_group);
    if (t->shard_group != t->run.world) ddp_group_destroy(t->shard_group);
    run_free(&t->run);
    free(t->params);
    free(t->units);
    free(t->starts);
    free(t->widened);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    return run_trainer(world, (job *)user, sizeof(trainer), train, trainer_free);
}

int main(int argc, char **argv) {
    job j;
    memset(&j, 0, sizeof j);
    parse_options(&PROGRAM, argc, argv, &j.options);
    check_names(&j.options);
    return run_main(&j, rank_main);
}

/* MIT License: see LICENSE. */

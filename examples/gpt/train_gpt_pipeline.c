/*  train_gpt_pipeline.c - train_gpt with pipeline parallelism, and the same bits

USAGE
    cc -O3 -march=native examples/gpt/train_gpt_pipeline.c -o train_gpt_pipeline -lm -lpthread
    ./train_gpt_pipeline [flags] [files or folders]    --schedule ZB-H1, for example; --help lists the flags
    ./train_gpt_pipeline --ranks 2 --schedule my.csv   your own schedule: a row per rank, cells such as 1F0
    mpirun -n 2 ./train_gpt_pipeline                   under a launcher

A STEP
    The units of the model are the embedding, each block and the head. They are partitioned into --stages of
    about equal cost, one or more on each rank:

        rank 0   embedding  h.0  h.1          F0 F1 .  .  .  B0 F2 B1 F3 ...
        rank 1   h.2  h.3  head               .  F0 B0 F1 B1 F2 B2 ...

    ddp_pipeline_step calls the stages in the order of the schedule, sends activations and their gradients,
    and adds the gradients of micro-batches as a binary tree. The embedding and the head share a matrix. Each
    of them has a copy, and a tie adds both gradients. Therefore the hash in the last line is that of
    train_gpt with the same --batch and --micro-batch, for every schedule and number of ranks. A checkpoint is
    that of train_gpt. It continues with another schedule and number of ranks, or in train_gpt.

    The program writes the timeline of the last step, as measured, to schedule.svg and trace.json. The
    latter is for chrome://tracing or ui.perfetto.dev. */
#define DDP_IMPLEMENTATION
#include "../../ddp_pipeline.h"
#include "checkpoint.h"
#include "train.h"

#define SCHEDULE_PATH "schedule.svg"
#define TRACE_PATH "trace.json"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    DROPOUT_FLAG,
    {"--schedule", FLAG_TEXT, NOT_SAVED, AT(strategy), 0, 0,
     "NAME 1F1B (default), GPipe, interleaved-1F1B, looped-BFS, naive, ZB-H1, ZB-V, DualPipeV,\n"
     "                        ..., or the path of a CSV file"},
    {"--stages", FLAG_INT32, NOT_SAVED, AT(stages), 1, 65536,
     "N stages over all ranks; default: one per rank, or two if the schedule needs two"},
    {"--micro-batches", FLAG_INT32, NOT_SAVED, AT(micro_batches), 1, 1e6,
     "N micro-batches per step; default --batch / --micro-batch"},
    CHECKPOINT_FLAGS,
    RECOMPUTE_FLAG("stages"),
    {"--offload", FLAG_TEXT, NOT_SAVED, AT(offload_name), 0, 0,
     "NAME saved: a GPU keeps the activations of micro-batches in flight in host memory. A CPU\n"
     "                        has them there already; none (default). Not with --recompute"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "print this text"},
};
static const run_program PROGRAM = {"train_gpt_pipeline",
                                    "trains a byte-level GPT on text with pipeline parallelism", FLAGS,
                                    (int)(sizeof FLAGS / sizeof FLAGS[0])};

static int offloads_saved(const run_options *o) {
    return o->offload_name && !strcmp(o->offload_name, "saved");
}

static void check_offload(run_options *o) {
    int saved = offloads_saved(o);
    if (o->offload_name && strcmp(o->offload_name, "none") && !saved && !o->wrong[0])
        snprintf(o->wrong, sizeof o->wrong, "--offload %.60s: give none or saved", o->offload_name);
    if (saved && o->recompute && !o->wrong[0])
        snprintf(o->wrong, sizeof o->wrong,
                 "--offload saved, but --recompute keeps no activations; use one of them");
}

//== trainer ================================================================================== >>trainer

/* Memory of a unit for one micro-batch, from its forward to its weight gradients. */
typedef struct unit_memory {
    float *out;   /* (B, T, C): the input of the next unit of the stage */
    float *d_out; /* (B, T, C): its gradient */
    float *grads; /* gradients that I computes and W stores: of layer norms and of the head's matrix */
    gpt_block_acts acts;
    gpt_block_temps temps;
    gpt_head_acts head;
} unit_memory;

/* The state of a rank. */
typedef struct trainer {
    run run;
    checkpoint_file saved;
    ddp_schedule *schedule;
    char *csv;        /* text of the file of --schedule; NULL if --schedule is a kind */
    ddp_group *group; /* all ranks; a group of its own for the pipeline */
    ddp_pipeline *pipeline;
    int unit_count, stage_count;
    int micro_count;      /* micro-batches in a step */
    int *first_unit;      /* of each stage; first_unit[stage_count] = unit_count */
    ddp_param *params;    /* model.param_count; those of other ranks are unused */
    ddp_param **pointers; /* to params, in order */
    ddp_param *owned;     /* the parameters that this rank updates; a tied value once */
    int *owned_index;     /* their indices; that of wte for head.weight, which has the same values */
    int owned_count;
    float *full; /* a full parameter: space for the largest */
    ddp_optimizer *optimizer;
    unit_memory *units;
    int64_t *starts;      /* starts of the sequences of the global batch */
    int64_t validating;   /* index of the first validation micro-batch of the current evaluation */
    double *micro_losses; /* micro_count */
} trainer;

static int is_on_this_rank(const trainer *t, int stage) {
    return ddp_schedule_stage_rank(t->schedule, stage) == t->run.rank;
}

static int stage_of(const trainer *t, int unit) {
    int stage = 0;
    while (t->first_unit[stage + 1] <= unit) stage++;
    return stage;
}

/* The first parameter of a unit. Its parameters are consecutive. */
static int first_param(const trainer *t, int unit) {
    if (unit == 0) return 0;
    if (unit > t->run.plan.config.layers) return t->run.model.param_count - 3;
    return gpt_block_first_param(unit - 1);
}

/* The stages per rank, from --stages; 0 = the default of the schedule. */
static ddp_result find_chunks(const trainer *t, int *chunks) {
    int ranks = t->run.world_size, stages = t->run.options->stages;
    *chunks = stages / ranks;
    if (stages % ranks)
        return ddp_fail(DDP_ERR_INVALID, "--stages %d is not a multiple of %d ranks; use --stages %d", stages,
                        ranks, stages < ranks ? ranks : stages / ranks * ranks);
    return DDP_OK;
}

/* Computes --batch or --micro-batch from --micro-batches, which is `count`, or checks all three. */
static ddp_result find_batch(run_config *c, int count) {
    if (!count) return DDP_OK;
    if (!c->batch && !c->micro_batch) c->micro_batch = 4;
    if (!c->batch && (int64_t)count * c->micro_batch > 1000000)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--micro-batches %d of %d sequences exceed the maximum of --batch, 1000000; use fewer", count,
            c->micro_batch);
    if (!c->batch) c->batch = count * c->micro_batch;
    if (!c->micro_batch && c->batch % count == 0) c->micro_batch = c->batch / count;
    if (!c->micro_batch)
        return ddp_fail(DDP_ERR_INVALID, "--batch %d does not split into --micro-batches %d; use --batch %d",
                        c->batch, count, (c->batch / count + 1) * count);
    if ((int64_t)count * c->micro_batch != c->batch)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--micro-batches %d of --micro-batch %d are not --batch %d; leave one of the three out", count,
            c->micro_batch, c->batch);
    return DDP_OK;
}

/* Returns 1 if --schedule is a path, not the name of a kind. */
static int is_file_name(const char *schedule) {
    size_t length = schedule ? strlen(schedule) : 0;
    return length > 0 && (strchr(schedule, '/') || strchr(schedule, '.'));
}

enum { SCHEDULE_MAX_BYTES = 256 << 20 };

/* Rank 0: reads the file of --schedule. */
static ddp_result read_schedule(trainer *t, const char *path) {
    struct stat info;
    size_t size, used = 0;
    ssize_t got = 1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "--schedule %s cannot be read: %s; give a CSV file, or the name of a schedule", path,
                        strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size > SCHEDULE_MAX_BYTES) {
        close(fd);
        return ddp_fail(
            DDP_ERR_INVALID,
            "--schedule %s is not a file of at most %d bytes; give a CSV file with a row per rank", path,
            SCHEDULE_MAX_BYTES);
    }
    size = (size_t)info.st_size;
    t->csv = (char *)malloc(size + 1);
    while (t->csv && used < size && (got = read(fd, t->csv + used, size - used)) > 0) used += (size_t)got;
    close(fd);
    if (!t->csv) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for --schedule %s of %zu bytes", path, size);
    if (got < 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "--schedule %s cannot be read: %s; give a CSV file with a row per rank", path,
                        strerror(errno));
    t->csv[used] = 0;
    if (strlen(t->csv) != used)
        return ddp_fail(DDP_ERR_INVALID,
                        "--schedule %s has a zero byte; give a text file with cells separated by commas",
                        path);
    return DDP_OK;
}

/* Broadcasts the text of the file. Collective. */
static ddp_result broadcast_schedule(trainer *t) {
    int64_t size = t->csv ? (int64_t)strlen(t->csv) + 1 : 0;
    DDP_TRY(ddp_broadcast(t->run.world, &size, 1, DDP_I64, 0, NULL));
    if (!size) return DDP_OK;
    if (!t->csv) t->csv = (char *)malloc((size_t)size);
    if (!t->csv)
        return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for a schedule of %lld bytes", (long long)size);
    return ddp_broadcast(t->run.world, t->csv, (size_t)size, DDP_U8, 0, NULL);
}

/* Repeats the last error, of ddp_schedule_parse or ddp_schedule_check, with file, row and cell. An overlapped
   pair is one cell. */
static ddp_result invalid_schedule(const trainer *t, const char *path) {
    char found[400];
    int row, cell, count = 0, end = 0;
    snprintf(found, sizeof found, "%s", ddp_last_error());
    if (sscanf(found, "ddp_schedule_parse: line %d cell %d%n", &row, &cell, &end) == 2 && end > 0)
        return ddp_fail(DDP_ERR_INVALID, "--schedule %s row %d cell %d%s", path, row, cell, found + end);
    if (sscanf(found, "ddp_schedule_check: rank %d position %d%n", &row, &cell, &end) == 2 && end > 0) {
        const ddp_action *list = ddp_schedule_actions(t->schedule, row, &count);
        for (int i = cell - 1; i >= 0; i--) cell -= i < count && list[i].overlaps;
        return ddp_fail(DDP_ERR_INVALID, "--schedule %s row %d cell %d%s", path, row + 1, cell + 1,
                        found + end);
    }
    return ddp_fail(DDP_ERR_INVALID, "--schedule %s: %s", path, found);
}

/* Parses the schedule of a file. Checks that it is complete, free of deadlocks, and for this number of
   ranks. */
static ddp_result parse_schedule(trainer *t) {
    const run_options *o = t->run.options;
    const char *path = o->strategy;
    int rows, stages;
    if (ddp_schedule_parse(&t->schedule, t->csv) != DDP_OK) return invalid_schedule(t, path);
    rows = ddp_schedule_rank_count(t->schedule);
    stages = ddp_schedule_stage_count(t->schedule);
    if (rows != t->run.world_size)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--schedule %s has %d rows, one per rank, but the number of ranks is %d; use --ranks %d", path,
            rows, t->run.world_size, rows);
    if (ddp_schedule_check(t->schedule) != DDP_OK) return invalid_schedule(t, path);
    if (o->stages && o->stages != stages)
        return ddp_fail(DDP_ERR_INVALID, "--schedule %s has %d stages; leave --stages out", path, stages);
    return DDP_OK;
}

/* Rank 0: sets --micro-batches from the schedule of a file. */
static ddp_result find_file_batch(const trainer *t, run_options *options) {
    const run_config *c = &options->config;
    int count = ddp_schedule_microbatch_count(t->schedule);
    if (options->micro_batches && options->micro_batches != count)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--schedule %s has %d micro-batches, but --micro-batches is %d; leave --micro-batches out",
            options->strategy, count, options->micro_batches);
    if (c->batch && c->micro_batch && (int64_t)count * c->micro_batch != c->batch)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--schedule %s has %d micro-batches, but --batch %d is not %d times --micro-batch %d; "
            "leave --batch out",
            options->strategy, count, c->batch, count, c->micro_batch);
    options->micro_batches = count;
    return DDP_OK;
}

static ddp_result make_kind(trainer *t) {
    const run_options *o = t->run.options;
    ddp_schedule_desc desc = DDP_ZERO;
    if (o->strategy) DDP_TRY(ddp_schedule_kind_find(o->strategy, &desc.kind));
    if (desc.kind == DDP_SCHEDULE_PIPEDREAM || desc.kind == DDP_SCHEDULE_PIPEDREAM_2BW)
        return ddp_fail(DDP_ERR_INVALID,
                        "--schedule %s trains with delayed weights, so the result would differ from that of "
                        "train_gpt; use another schedule",
                        o->strategy);
    desc.rank_count = t->run.world_size;
    desc.microbatch_count = t->run.plan.config.batch / t->run.plan.config.micro_batch;
    DDP_TRY(find_chunks(t, &desc.chunk_count));
    return ddp_schedule_create(&t->schedule, &desc);
}

static ddp_result make_schedule(trainer *t) {
    DDP_TRY(t->csv ? parse_schedule(t) : make_kind(t));
    t->stage_count = ddp_schedule_stage_count(t->schedule);
    t->unit_count = t->run.plan.config.layers + 2;
    t->micro_count = ddp_schedule_microbatch_count(t->schedule);
    if (t->stage_count > t->unit_count)
        return ddp_fail(DDP_ERR_INVALID,
                        "%d stages for an embedding, %d blocks and a head; use --layers %d or more",
                        t->stage_count, t->unit_count - 2, t->stage_count - 2);
    return DDP_OK;
}

/* Rank 0: checks all input. The ranks share one data-parallel replica, so the batch is split as on one
   rank. */
static ddp_result plan_run(trainer *t) {
    run_options options = *t->run.options;
    const run_saved *saved;
    DDP_TRY(check_options(&options, t->run.world_size));
    DDP_TRY(check_writable(SCHEDULE_PATH));
    DDP_TRY(check_writable(TRACE_PATH));
    DDP_TRY(checkpoint_open(&t->saved, &options, &saved));
    if (saved && !options.config.batch) options.config.batch = saved->config.batch;
    if (saved && !options.config.micro_batch) options.config.micro_batch = saved->config.micro_batch;
    if (is_file_name(options.strategy)) {
        DDP_TRY(read_schedule(t, options.strategy));
        DDP_TRY(parse_schedule(t));
        DDP_TRY(find_file_batch(t, &options));
        ddp_schedule_destroy(t->schedule);
        t->schedule = NULL;
    }
    DDP_TRY(find_batch(&options.config, options.micro_batches));
    DDP_TRY(make_plan(&t->run.plan, &options, 1, saved, &t->run.text));
    DDP_TRY(make_schedule(t));
    ddp_schedule_destroy(t->schedule);
    t->schedule = NULL;
    return DDP_OK;
}

/* Partitions the units into stages. Describes the parameters, and initializes those of this rank. */
static ddp_result build_params(trainer *t) {
    run *r = &t->run;
    size_t count = (size_t)r->model.param_count;
    double *cost = (double *)calloc((size_t)t->unit_count, sizeof *cost);
    ddp_result result;
    t->first_unit = (int *)calloc((size_t)t->stage_count + 1, sizeof *t->first_unit);
    t->params = (ddp_param *)calloc(count, sizeof *t->params);
    t->pointers = (ddp_param **)calloc(count, sizeof *t->pointers);
    t->owned = (ddp_param *)calloc(count, sizeof *t->owned);
    t->owned_index = (int *)calloc(count, sizeof *t->owned_index);
    t->full = (float *)calloc(run_largest_param(r), sizeof *t->full);
    t->units = (unit_memory *)calloc((size_t)t->unit_count, sizeof *t->units);
    t->starts = (int64_t *)calloc((size_t)r->plan.config.batch, sizeof *t->starts);
    t->micro_losses = (double *)calloc((size_t)t->micro_count, sizeof *t->micro_losses);
    if (!cost || !t->first_unit || !t->params || !t->pointers || !t->owned || !t->owned_index || !t->full
        || !t->units || !t->starts || !t->micro_losses) {
        free(cost);
        return run_out_of_memory();
    }
    for (int u = 0; u < t->unit_count; u++) cost[u] = unit_cost(&r->plan, u);
    result = ddp_pipeline_partition(cost, t->unit_count, t->stage_count, t->first_unit);
    t->first_unit[t->stage_count] = t->unit_count;
    free(cost);
    for (int i = 0; i < r->model.param_count; i++) {
        int64_t floats = r->infos[i].count;
        run_describe(r, i, &t->params[i]);
        t->params[i].value.data = r->model.values[i];
        t->pointers[i] = &t->params[i];
        if (result != DDP_OK || !is_on_this_rank(t, stage_of(t, r->infos[i].unit))) continue;
        if (r->infos[i].tied_to < 0)
            gpt_param_init(&r->model.config, (uint64_t)r->plan.config.seed, i, 0, floats, r->model.values[i]);
        else
            gpt_param_init(&r->model.config, (uint64_t)r->plan.config.seed, r->infos[i].tied_to, 0, floats,
                           r->model.values[i]);
    }
    return result;
}

//== stages ==================================================================================== >>stages

/* Sets the pointers of a stage's units into the memory of one micro-batch. Returns the floats needed; memory
   NULL only counts. */
static size_t place_units(trainer *t, int stage, float *memory) {
    const gpt_model *m = &t->run.model;
    int batch = t->run.plan.config.micro_batch, length = t->run.plan.config.context;
    size_t used = 0, n = (size_t)batch * (size_t)length * (size_t)m->config.channels;
    for (int u = t->first_unit[stage]; u < t->first_unit[stage + 1]; u++) {
        unit_memory *unit = &t->units[u];
        unit->out = gpt__take(memory, &used, n);
        unit->d_out = gpt__take(memory, &used, n);
        if (u == 0) continue;
        unit->grads = gpt__take(memory, &used,
                                (size_t)m->config.channels
                                    * (u + 1 < t->unit_count ? 4 : 2 + (size_t)m->config.vocab));
        if (u + 1 == t->unit_count) {
            used += gpt_head_acts_place(&m->config, batch, length, memory ? memory + used : NULL,
                                        &unit->head);
            continue;
        }
        used += gpt_block_acts_place(&m->config, batch, length, memory ? memory + used : NULL, &unit->acts);
        used += gpt_block_temps_place(&m->config, batch, length, memory ? memory + used : NULL, &unit->temps);
    }
    return used;
}

/* Loads the tokens of the micro-batch of the call, and sets the pointers into its memory. */
static ddp_result begin_call(trainer *t, const ddp_pipeline_call *c, gpt_pass *pass) {
    run *r = &t->run;
    int rows = r->plan.config.micro_batch;
    int64_t last = validation_micro_batches(&r->plan) - 1, index = t->validating + c->microbatch;
    if (c->evaluating)
        DDP_TRY(load_validation_batch(r, index < last ? index : last));
    else
        for (int row = 0; row < rows; row++)
            DDP_TRY(load_sequence(r, row, t->starts[c->microbatch * rows + row]));
    place_units(t, c->stage, (float *)c->saved);
    *pass = gpt_model_train_pass(&r->model, rows, r->plan.config.context);
    if (c->evaluating) pass->dropout = 0;
    return DDP_OK;
}

/* The input of unit u of the stage. */
static const float *input_of(const trainer *t, const ddp_pipeline_call *c, int u) {
    if (u > t->first_unit[c->stage]) return t->units[u - 1].out;
    return c->input_count ? (const float *)c->inputs[0].data : NULL;
}

/* The gradient of the output of unit u. */
static const float *output_grad_of(const trainer *t, const ddp_pipeline_call *c, int u) {
    return u + 1 < t->first_unit[c->stage + 1] || !c->output_count ? t->units[u].d_out
                                                                   : (const float *)c->output_grads[0].data;
}

static ddp_result stage_forward(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    gpt_model *m = &t->run.model;
    gpt_pass pass;
    DDP_TRY(begin_call(t, c, &pass));
    for (int u = t->first_unit[c->stage]; u < t->first_unit[c->stage + 1]; u++) {
        const float *in = input_of(t, c, u);
        float *out = u + 1 < t->first_unit[c->stage + 1] || !c->output_count ? t->units[u].out
                                                                             : (float *)c->outputs[0].data;
        if (u == 0) {
            gpt_embed embed = gpt_embed_view(m->values);
            gpt_embed_forward(&pass, &embed, t->run.tokens, out);
        } else if (u + 1 < t->unit_count) {
            gpt_block block = gpt_block_view(m->values, u - 1);
            gpt_block_forward(&pass, &block, in, &t->units[u].acts, out);
        } else {
            gpt_head head = gpt_head_view(&m->config, m->values);
            *c->loss = gpt_head_loss_forward(&pass, &head, in, t->run.targets, &t->units[u].head)
                       / ((double)pass.batch * pass.length);
        }
    }
    return DDP_OK;
}

/* I: the gradient of the stage's input. The gradients of layer norms and of the head are computed with it,
   and stored for W. */
static ddp_result stage_input_grad(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    gpt_model *m = &t->run.model;
    gpt_pass pass;
    size_t C = (size_t)m->config.channels;
    DDP_TRY(begin_call(t, c, &pass));
    for (int u = t->first_unit[c->stage + 1] - 1; u >= t->first_unit[c->stage] && u > 0; u--) {
        unit_memory *unit = &t->units[u];
        float *d_in = u > t->first_unit[c->stage] ? t->units[u - 1].d_out : (float *)c->input_grads[0].data;
        if (u + 1 == t->unit_count) {
            gpt_head head = gpt_head_view(&m->config, m->values), d_head = head;
            d_head.ln_weight = unit->grads;
            d_head.ln_bias = unit->grads + C;
            d_head.weight = unit->grads + 2 * C;
            gpt_head_backward(&pass, &head, &d_head, input_of(t, c, u), t->run.targets, &unit->head,
                              1.0f / (float)(pass.batch * pass.length), d_in);
        } else {
            gpt_block block = gpt_block_view(m->values, u - 1), d_block = gpt_block_view(m->grads, u - 1);
            d_block.ln1_weight = unit->grads;
            d_block.ln1_bias = unit->grads + C;
            d_block.ln2_weight = unit->grads + 2 * C;
            d_block.ln2_bias = unit->grads + 3 * C;
            pass.parts = GPT_INPUT_GRADS;
            gpt_block_backward(&pass, &block, &d_block, input_of(t, c, u), &unit->acts, &unit->temps,
                               output_grad_of(t, c, u), d_in);
            pass.parts = 0;
        }
    }
    return DDP_OK;
}

/* W: the gradients of the stage's parameters. */
static ddp_result stage_weight_grad(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    gpt_model *m = &t->run.model;
    gpt_pass pass;
    size_t C = (size_t)m->config.channels, line = C * sizeof(float);
    DDP_TRY(begin_call(t, c, &pass));
    for (int u = t->first_unit[c->stage]; u < t->first_unit[c->stage + 1]; u++) {
        unit_memory *unit = &t->units[u];
        if (u == 0) {
            gpt_embed d_embed = gpt_embed_view(m->grads);
            gpt_embed_backward(&pass, &d_embed, t->run.tokens, output_grad_of(t, c, u));
        } else if (u + 1 == t->unit_count) {
            gpt_head d_head = gpt_head_view(&m->config, m->grads);
            memcpy(d_head.ln_weight, unit->grads, line);
            memcpy(d_head.ln_bias, unit->grads + C, line);
            memcpy(d_head.weight, unit->grads + 2 * C, line * (size_t)m->config.vocab);
        } else {
            gpt_block block = gpt_block_view(m->values, u - 1), d_block = gpt_block_view(m->grads, u - 1);
            pass.parts = GPT_WEIGHT_GRADS;
            gpt_block_backward(&pass, &block, &d_block, input_of(t, c, u), &unit->acts, &unit->temps,
                               output_grad_of(t, c, u), NULL);
            pass.parts = 0;
            memcpy(d_block.ln1_weight, unit->grads, line);
            memcpy(d_block.ln1_bias, unit->grads + C, line);
            memcpy(d_block.ln2_weight, unit->grads + 2 * C, line);
            memcpy(d_block.ln2_bias, unit->grads + 3 * C, line);
        }
    }
    return DDP_OK;
}

/* AdamW for this rank's parameters. If this rank has both uses of the tied matrix, the pipeline has added the
   gradient of head.weight to that of wte. */
static ddp_result build_optimizer(trainer *t) {
    run *r = &t->run;
    ddp_optimizer_desc adamw = DDP_ZERO;
    adamw.params = t->owned;
    for (int i = 0; i < r->model.param_count; i++) {
        int tied_to = r->infos[i].tied_to;
        if (!is_on_this_rank(t, stage_of(t, r->infos[i].unit))) continue;
        if (tied_to >= 0 && is_on_this_rank(t, stage_of(t, r->infos[tied_to].unit))) continue;
        t->owned_index[t->owned_count] = tied_to >= 0 ? tied_to : i;
        t->owned[t->owned_count++] = t->params[i];
    }
    adamw.param_count = t->owned_count;
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    adamw.decay_matrices_only = 1;
    return ddp_optimizer_create(&t->optimizer, t->group, &adamw);
}

/* A value or a moment of a parameter, for checkpoints. NULL if another rank has it. */
static float *state_of(const trainer *t, int which, int param) {
    ddp_tensor moment = DDP_ZERO;
    int i = 0;
    while (i < t->owned_count && t->owned_index[i] != param) i++;
    if (i == t->owned_count) return NULL;
    if (which == 0) return (float *)t->owned[i].value.data;
    ddp_optimizer_get_state(t->optimizer, i, which - 1, NULL, &moment);
    return (float *)moment.data;
}

static void set_state(void *user, int which, int param, const float *full) {
    const trainer *t = (const trainer *)user;
    float *own = state_of(t, which, param);
    if (own) memcpy(own, full, (size_t)t->run.infos[param].count * sizeof(float));
}

/* The rank of the parameter's stage sends it to rank 0. */
static ddp_result get_state(void *user, int which, int param, const float **full) {
    trainer *t = (trainer *)user;
    const run *r = &t->run;
    int from = ddp_schedule_stage_rank(t->schedule, stage_of(t, r->infos[param].unit));
    size_t count = (size_t)r->infos[param].count;
    *full = from == 0 ? state_of(t, which, param) : t->full;
    if (from == 0) return DDP_OK;
    if (r->rank == 0) return ddp_recv(r->world, t->full, count, DDP_F32, from, 0, NULL);
    if (r->rank != from) return DDP_OK;
    return ddp_send(r->world, state_of(t, which, param), count, DDP_F32, 0, 0, NULL);
}

/* Creates the pipeline, the optimizer, and a sampler of the global batch. Collective. */
static ddp_result build_parallel(trainer *t) {
    run *r = &t->run;
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_tie tie = {0, 0, t->stage_count - 1, 0};
    ddp_pipeline_stage *stages = (ddp_pipeline_stage *)calloc((size_t)t->stage_count, sizeof *stages);
    ddp_result result;
    if (!stages) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for %d stages", t->stage_count);
    for (int s = 0; s < t->stage_count; s++) {
        int begin = first_param(t, t->first_unit[s]), end = r->model.param_count;
        if (t->first_unit[s + 1] < t->unit_count) end = first_param(t, t->first_unit[s + 1]);
        stages[s].forward = stage_forward;
        stages[s].input_grad = stage_input_grad;
        stages[s].weight_grad = stage_weight_grad;
        stages[s].user = t;
        stages[s].saved_bytes = place_units(t, s, NULL) * sizeof(float);
        stages[s].recompute = r->options->recompute;
        stages[s].offload_saved = offloads_saved(r->options);
        stages[s].params = t->pointers + begin;
        stages[s].param_count = end - begin;
        tie.second_param = stages[s].param_count - 1; /* after the loop: head.weight, in the last stage */
    }
    desc.schedule = t->schedule;
    desc.stages = stages;
    desc.stage_count = t->stage_count;
    desc.boundary.dtype = DDP_F32;
    desc.boundary.ndim = 3;
    desc.boundary.shape[0] = r->plan.config.micro_batch;
    desc.boundary.shape[1] = r->plan.config.context;
    desc.boundary.shape[2] = r->plan.config.channels;
    desc.ties = &tie;
    desc.tie_count = 1;
    result = ddp_group_split(r->world, 0, r->rank, &t->group);
    if (result == DDP_OK) result = ddp_pipeline_create(&t->pipeline, t->group, &desc);
    free(stages);
    DDP_TRY(result);
    for (int i = 0; i < r->model.param_count; i++) r->model.grads[i] = (float *)t->params[i].grad.data;
    DDP_TRY(build_optimizer(t));
    if (r->plan.first_step > 0) DDP_TRY(checkpoint_load(r, &t->saved, set_state, t));
    ddp_optimizer_set_step(t->optimizer, r->plan.first_step);
    return run_build_sampler(r, 1, 0);
}

//== training ================================================================================ >>training

/* One optimizer step. *loss is the mean over the global batch, *norm that of the gradients before clipping.
   Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    double start = ddp_now();
    for (int i = 0; i < r->plan.config.batch; i++) t->starts[i] = next_sequence(r);
    DDP_TRY(ddp_pipeline_step(t->pipeline));
    DDP_TRY(ddp_pipeline_clip_grad_norm(t->pipeline, 1.0f, norm));
    DDP_TRY(ddp_optimizer_step(t->optimizer, ddp_lr_at(&r->lr, step)));
    DDP_TRY(ddp_pipeline_get_loss(t->pipeline, loss, r->rank == 0 ? r->losses : NULL));
    DDP_TRY(run_mean_loss(r, t->micro_count, loss)); /* adds in the order of train_gpt */
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation text, micro_count micro-batches at a time. After training steps, writes a
   checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    int64_t count = validation_micro_batches(&r->plan);
    for (t->validating = 0; t->validating < count; t->validating += t->micro_count) {
        DDP_TRY(ddp_pipeline_evaluate(t->pipeline));
        DDP_TRY(ddp_pipeline_get_loss(t->pipeline, loss, t->micro_losses));
        for (int64_t i = 0; r->rank == 0 && i < t->micro_count && t->validating + i < count; i++)
            r->losses[t->validating + i] = t->micro_losses[i];
    }
    DDP_TRY(run_mean_loss(r, count, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    if (!r->options->checkpoint || step == r->plan.first_step) return DDP_OK;
    return checkpoint_save(r, step, get_state, t);
}

/* Writes the timeline of the last step to a file. */
static ddp_result draw(const trainer *t, ddp_schedule_format format, const char *path,
                       const ddp_stage_cost *costs, const ddp_action_time *times) {
    size_t size_bytes = 0;
    char *text;
    ddp_result result;
    FILE *file;
    DDP_TRY(ddp_schedule_draw(t->schedule, format, costs, times, NULL, &size_bytes));
    text = (char *)malloc(size_bytes);
    if (!text) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for a timeline of %zu bytes", size_bytes);
    result = ddp_schedule_draw(t->schedule, format, costs, times, text, &size_bytes);
    file = result == DDP_OK ? fopen(path, "wb") : NULL;
    if (result == DDP_OK && (!file || fwrite(text, 1, size_bytes - 1, file) != size_bytes - 1))
        result = ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
    if (file && fclose(file) != 0 && result == DDP_OK)
        result = ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
    free(text);
    return result;
}

/* The name of the kind, or of the file without its folder. */
static const char *schedule_name(const trainer *t) {
    const char *path = t->run.options->strategy, *slash = t->csv ? strrchr(path, '/') : NULL;
    if (!t->csv) return ddp_schedule_kind_name(ddp_schedule_get_kind(t->schedule));
    return slash ? slash + 1 : path;
}

/* After the last training step: prints the table and writes the timeline. Collective. */
static ddp_result report_pipeline(trainer *t) {
    run *r = &t->run;
    ddp_pipeline_stats stats;
    ddp_stage_cost *costs = (ddp_stage_cost *)calloc((size_t)t->stage_count, sizeof *costs);
    ddp_action_time *times;
    ddp_result result;
    int count = 0, actions;
    for (int rank = 0; rank < r->world_size; rank++) {
        ddp_schedule_actions(t->schedule, rank, &actions);
        count += actions;
    }
    times = (ddp_action_time *)calloc((size_t)count, sizeof *times);
    result = costs && times ? ddp_pipeline_get_times(t->pipeline, costs, times)
                            : ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the times of %d actions", count);
    if (result == DDP_OK) result = ddp_pipeline_get_stats(t->pipeline, &stats);
    if (result == DDP_OK && r->rank == 0) result = draw(t, DDP_SCHEDULE_SVG, SCHEDULE_PATH, costs, times);
    if (result == DDP_OK && r->rank == 0) result = draw(t, DDP_SCHEDULE_TRACE, TRACE_PATH, costs, times);
    free(costs);
    free(times);
    DDP_TRY(broadcast_result(r->world, result));
    if (r->rank != 0) return DDP_OK;
    printf("\n  schedule             ranks   stages   micro-batches   tokens/s   predicted bubble   "
           "measured bubble   bytes of activations on rank 0\n");
    printf("  %-18.60s   %5d   %6d   %13d   %8.0f   %15.1f%%   %14.1f%%   %zu\n", schedule_name(t),
           r->world_size, t->stage_count, t->micro_count, tokens_per_second(r, r->plan.config.steps),
           100 * stats.predicted_bubble_rate, 100 * stats.bubble_rate, stats.activation_bytes);
    printf("  %s: a timeline of the last step, as measured\n", SCHEDULE_PATH);
    printf("  %s: the same for ui.perfetto.dev or chrome://tracing\n\n", TRACE_PATH);
    return DDP_OK;
}

/* Broadcasts all values, hashes them, prints a sample on rank 0, and finishes the run. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    uint64_t hash = HASH_START;
    for (int i = 0; i < r->model.param_count; i++) {
        if (r->infos[i].tied_to >= 0) continue;
        DDP_TRY(ddp_broadcast(r->world, r->model.values[i], (size_t)r->infos[i].count, DDP_F32,
                              ddp_schedule_stage_rank(t->schedule, stage_of(t, r->infos[i].unit)), NULL));
        hash = hash_bytes(hash, r->model.values[i], (size_t)r->infos[i].count * sizeof(float));
    }
    if (r->rank == 0) {
        int tokens[32 + SAMPLE_BYTES], prompt;
        DDP_TRY(sample_prompt(r, tokens, &prompt));
        gpt_generate(&r->model, tokens, prompt, prompt + SAMPLE_BYTES, 0.8f, (uint64_t)r->plan.config.seed);
        print_sample(&r->plan, tokens, prompt);
    }
    return run_finish(r, validation, hash);
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0, loss;
    float norm;
    DDP_TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    DDP_TRY(broadcast_schedule(t));
    DDP_TRY(make_schedule(t));
    DDP_TRY(run_build_model(r, GPT_OWN_VALUES));
    DDP_TRY(build_params(t));
    DDP_TRY(build_parallel(t));
    run_report_start(r);
    DDP_TRY(evaluate(t, r->plan.first_step, &validation));
    for (int64_t step = r->plan.first_step + 1; step <= r->plan.config.steps; step++) {
        DDP_TRY(train_step(t, step, &loss, &norm));
        run_report_step(r, step, loss, norm);
        if (step == r->plan.config.steps) DDP_TRY(report_pipeline(t));
        if (is_validation_step(r, step)) DDP_TRY(evaluate(t, step, &validation));
    }
    return finish(t, validation);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    ddp_optimizer_destroy(t->optimizer);
    ddp_pipeline_destroy(t->pipeline);
    ddp_group_destroy(t->group);
    run_free(&t->run);
    ddp_schedule_destroy(t->schedule);
    checkpoint_close(&t->saved);
    free(t->csv);
    free(t->first_unit);
    free(t->params);
    free(t->pointers);
    free(t->owned);
    free(t->owned_index);
    free(t->full);
    free(t->units);
    free(t->starts);
    free(t->micro_losses);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    return run_trainer(world, (job *)user, sizeof(trainer), train, trainer_free);
}

int main(int argc, char **argv) {
    job j;
    memset(&j, 0, sizeof j);
    parse_options(&PROGRAM, argc, argv, &j.options);
    check_offload(&j.options);
    return run_main(&j, rank_main);
}

/* MIT License: see LICENSE. */

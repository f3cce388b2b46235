/*  train_gpt_tensor.c - train_gpt with tensor parallelism, and the same losses

USAGE
    cc -O3 -march=native examples/gpt/train_gpt_tensor.c -o train_gpt_tensor -lm -lpthread
    ./train_gpt_tensor [flags] [files or folders]   --tp N, --sequence-parallel, --chunks N; --help lists all
    mpirun --oversubscribe -n 4 ./train_gpt_tensor --tp 2   under a launcher: two replicas of two ranks each

RANKS
    The ranks are a mesh of dp x tp. The tp ranks of a tensor group have consecutive numbers, hold one model
    together and compute the same micro-batches; gpt_tensor.h has the layers. Each tensor group is a replica:
    it has a block of the batch, as a rank has in train_gpt, and a reducer averages the gradients along dp.

RESULTS
    The sums inside matrix products are split over ranks, so losses equal those of train_gpt except for
    rounding. The hash in the last line depends on --tp, but not on the number of replicas. A checkpoint
    holds the global model. Its format is that of train_gpt, and it continues under another --tp, or in
    train_gpt. */
#define DDP_IMPLEMENTATION
#include "../../ddp_tensor.h"
#define TRAIN_PROMISE                                                                                      \
    "The same --batch and --micro-batch give the losses of train_gpt, except for rounding, on any number " \
    "of ranks."
#include "checkpoint.h"
#include "gpt_tensor.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--tp", FLAG_INT32, NOT_SAVED, AT(tensor), 1, TRAIN_MAX_AXIS,
     "N ranks of a tensor group; default: the largest number that divides ranks and heads"},
    {"--sequence-parallel", FLAG_SWITCH, NOT_SAVED, AT(sequence_parallel), 0, 1,
     "layer norms and the residual stream are sharded along the sequence"},
    {"--chunks", FLAG_INT32, NOT_SAVED, AT(chunks), 1, 64,
     "N pieces in which activations are sent while others are multiplied; default 1"},
    CHECKPOINT_FLAGS,
    RECOMPUTE_FLAG("blocks"),
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "print this text"},
};
static const run_program PROGRAM = {"train_gpt_tensor",
                                    "trains a byte-level GPT on text with tensor-parallel ranks", FLAGS,
                                    (int)(sizeof FLAGS / sizeof FLAGS[0])};

//== trainer ================================================================================== >>trainer

/* The state of a rank. */
typedef struct trainer {
    run run;
    checkpoint_file saved;
    ddp_mesh *mesh;
    ddp_group *tensor, *replicas; /* along tp; along dp */
    gpt_tensor model;             /* this rank's shard of the layers */
    ddp_param *params;
    float **values, **grads; /* model.param_count each */
    float **streams;         /* (S, C) for each block: its input; the last one is the input of the head */
    gpt_tensor_acts *acts;   /* layers; with --recompute all have the same memory */
    int held;                /* with --recompute: the layer of the activations in that memory */
    gpt_tensor_head_acts head;
    float *d_stream; /* (S, C): the gradient of a stream */
    float *memory;   /* of values and activations */
    size_t memory_bytes;
    float *full;         /* a full parameter: space for the largest */
    ddp_tensor *counted; /* the gradients that this rank adds to the norm */
    int counted_count;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_optimizer *optimizer;
    uint64_t elements_sent; /* by layers in training steps */
    double comm_seconds;    /* waiting for the tensor group in training steps */
} trainer;

/* The greatest common divisor. */
static int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

static int tensor_ranks(const run *r, int heads) {
    return r->options->tensor ? r->options->tensor : common_divisor(r->world_size, heads);
}

/* Rank 0: checks all input before training, and before any file is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    const run_saved *saved;
    int tp, heads, better;
    DDP_TRY(check_options(o, r->world_size));
    DDP_TRY(checkpoint_open(&t->saved, o, &saved));
    heads = saved ? saved->config.heads : 4;
    if (o->config.heads) heads = o->config.heads;
    tp = tensor_ranks(r, heads);
    better = nearest_divisor(common_divisor(r->world_size, heads), tp);
    if (r->world_size % tp)
        return ddp_fail(DDP_ERR_INVALID, "--tp %d does not divide %d ranks; use --tp %d", tp, r->world_size,
                        better);
    if (heads % tp)
        return ddp_fail(DDP_ERR_INVALID, "--heads %d is not a multiple of --tp %d; use --tp %d", heads, tp,
                        better);
    DDP_TRY(make_plan(&r->plan, o, r->world_size / tp, saved, &r->text));
    return gpt_tensor_check(r, tp);
}

/* Fills this rank's shard of a parameter: from the full parameter, or with full NULL with its initial
   values. */
static void fill_shard(const trainer *t, int index, const float *full, float *to) {
    size_t columns = (size_t)t->model.pieces[index].columns;
    for (int k = 0; k < t->model.pieces[index].box_count; k++) {
        const ddp_tensor_box *box = &t->model.pieces[index].box[k];
        for (int64_t i = 0; i < box->shape[0]; i++, to += columns)
            if (full)
                memcpy(to, full + gpt_box_row(box, i), columns * sizeof(float));
            else
                gpt_param_init(&t->model.config, (uint64_t)t->run.plan.config.seed, index,
                               gpt_box_row(box, i), (int64_t)columns, to);
    }
}

/* This rank's shard of a value or a moment of a parameter, for checkpoints. */
static float *state_of(const trainer *t, int which, int param) {
    ddp_tensor moment = DDP_ZERO;
    if (which == 0) return t->values[param];
    ddp_optimizer_get_state(t->optimizer, param, which - 1, NULL, &moment);
    return (float *)moment.data;
}
static void set_state(void *user, int which, int param, const float *full) {
    const trainer *t = (const trainer *)user;
    fill_shard(t, param, full, state_of(t, which, param));
}

//== memory ==================================================================================== >>memory

/* Sets the pointers to values and activations. Returns the floats needed; memory NULL only counts. */
static size_t place(trainer *t, float *memory) {
    size_t used = 0, stream = (size_t)t->model.rows * (size_t)t->model.config.channels;
    for (int i = 0; i < t->model.param_count; i++) {
        size_t count = (size_t)(t->model.pieces[i].rows * t->model.pieces[i].columns);
        if (t->run.infos[i].tied_to >= 0) {
            t->values[i] = t->values[t->run.infos[i].tied_to];
            continue;
        }
        t->values[i] = gpt__take(memory, &used, count);
    }
    for (int l = 0; l <= t->model.config.layers; l++) {
        t->streams[l] = gpt__take(memory, &used, stream);
        if (l > 0 && t->run.options->recompute)
            t->acts[l] = t->acts[0];
        else if (l < t->model.config.layers)
            used += gpt_tensor_acts_place(&t->model, memory ? memory + used : NULL, &t->acts[l]);
    }
    used += gpt_tensor_head_acts_place(&t->model, memory ? memory + used : NULL, &t->head);
    t->d_stream = gpt__take(memory, &used, stream);
    return used;
}

/* Creates the mesh and the layers, and initializes this rank's shards of the parameters. Collective. */
static ddp_result build_model(trainer *t) {
    run *r = &t->run;
    gpt_config config = run_model_config(r);
    ddp_mesh_desc mesh = DDP_ZERO;
    size_t count = (size_t)gpt_param_count(&config), layers = (size_t)config.layers;
    DDP_TRY(run_build_arrays(r));
    mesh.ndim = 2;
    mesh.names[0] = "dp";
    mesh.names[1] = "tp";
    mesh.shape[1] = tensor_ranks(r, config.heads);
    mesh.shape[0] = r->world_size / mesh.shape[1];
    DDP_TRY(ddp_mesh_create(&t->mesh, r->world, &mesh));
    t->replicas = ddp_mesh_group(t->mesh, "dp");
    t->tensor = ddp_mesh_group(t->mesh, "tp");
    t->params = (ddp_param *)calloc(count, sizeof *t->params);
    t->counted = (ddp_tensor *)calloc(count, sizeof *t->counted);
    t->values = (float **)calloc(count * 2, sizeof *t->values);
    t->streams = (float **)calloc(layers + 1, sizeof *t->streams);
    t->acts = (gpt_tensor_acts *)calloc(layers + 1, sizeof *t->acts);
    if (!t->params || !t->counted || !t->values || !t->streams || !t->acts) return run_out_of_memory();
    t->grads = t->values + count;
    DDP_TRY(gpt_tensor_create(&t->model, r, t->tensor, t->values, t->grads));

    t->memory_bytes = (place(t, NULL) + 16) * sizeof(float);
    t->memory = (float *)calloc(1, t->memory_bytes);
    t->full = (float *)calloc(run_largest_param(r), sizeof(float));
    if (!t->memory || !t->full) return run_out_of_memory();
    place(t, (float *)GPT_ROUND_UP((uintptr_t)t->memory, 64));
    for (int i = 0; i < t->model.param_count; i++) {
        run_describe(r, i, &t->params[i]);
        t->params[i].value.data = t->values[i];
        t->params[i].value.shape[0] = t->model.pieces[i].rows;
        if (t->params[i].value.ndim > 1) t->params[i].value.shape[1] = t->model.pieces[i].columns;
        if (r->infos[i].tied_to < 0 && r->plan.first_step == 0) fill_shard(t, i, NULL, t->values[i]);
    }
    return DDP_OK;
}

/* Called by backward for each gradient. The last micro-batch's gradients are sent along dp while backward
   continues. */
static ddp_result ready(void *user, int index) {
    return ddp_accumulator_ready(((trainer *)user)->accumulator, index);
}

/* Creates reducer and accumulator along dp, the optimizer, and the sampler. Collective. */
static ddp_result build_parallel(trainer *t) {
    run *r = &t->run;
    int replicas = ddp_world_size(t->replicas);
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc accumulator = DDP_ZERO;
    ddp_optimizer_desc adamw = DDP_ZERO;

    r->micro_count = r->plan.config.batch / r->plan.config.micro_batch / replicas;
    reducer.params = t->params;
    reducer.param_count = t->model.param_count;
    reducer.micro_batch_count = r->micro_count;
    DDP_TRY(ddp_reducer_create(&t->reducer, t->replicas, &reducer));
    for (int i = 0; i < t->model.param_count; i++) {
        int replicated = t->model.pieces[i].placement == DDP_REPLICATE;
        t->grads[i] = (float *)t->params[i].grad.data;
        if (r->infos[i].tied_to >= 0 || (replicated && ddp_rank(t->tensor) > 0)) continue;
        t->counted[t->counted_count++] = ddp_param_grad(&t->params[i]);
    }

    accumulator.params = t->params;
    accumulator.param_count = t->model.param_count;
    accumulator.micro_batch_count = r->micro_count;
    accumulator.reducer = t->reducer;
    DDP_TRY(ddp_accumulator_create(&t->accumulator, t->replicas, &accumulator));
    t->model.ready = ready;
    t->model.ready_user = t;

    adamw.params = t->params;
    adamw.param_count = gpt_param_head(&t->model.config); /* all but the last, head.weight, which is wte */
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    adamw.decay_matrices_only = 1;
    DDP_TRY(ddp_optimizer_create(&t->optimizer, r->world, &adamw));
    if (r->plan.first_step > 0) DDP_TRY(checkpoint_load(r, &t->saved, set_state, t));
    ddp_optimizer_set_step(t->optimizer, r->plan.first_step);
    return run_build_sampler(r, replicas, ddp_rank(t->replicas));
}

//== forward and backward ====================================================================== >>passes

static ddp_result block_forward(trainer *t, int layer) {
    t->held = layer;
    return gpt_tensor_block_forward(&t->model, layer, t->streams[layer], &t->acts[layer],
                                    t->streams[layer + 1]);
}

/* *loss is the mean of the micro-batch. with_grads: replaces the logits by their gradient. Collective over
   the tensor group. */
static ddp_result forward(trainer *t, double *loss, int with_grads) {
    int layers = t->model.config.layers;
    DDP_TRY(gpt_tensor_embed_forward(&t->model, t->run.tokens, t->streams[0]));
    for (int l = 0; l < layers; l++) DDP_TRY(block_forward(t, l));
    return gpt_tensor_head_forward(&t->model, t->streams[layers], t->run.targets, &t->head, loss, with_grads);
}

/* After forward with with_grads: computes all gradients of the micro-batch. Collective over the tensor
   group. */
static ddp_result backward(trainer *t) {
    int layers = t->model.config.layers;
    DDP_TRY(gpt_tensor_head_backward(&t->model, t->streams[layers], &t->head, t->d_stream));
    for (int l = layers - 1; l >= 0; l--) {
        if (t->run.options->recompute && t->held != l) DDP_TRY(block_forward(t, l));
        DDP_TRY(
            gpt_tensor_block_backward(&t->model, l, t->streams[l], &t->acts[l], t->d_stream, t->d_stream));
    }
    return gpt_tensor_embed_backward(&t->model, t->run.tokens, t->d_stream);
}

//== training ================================================================================ >>training

/* *norm is that of all gradients. *scale is the factor that clips it to 1. A replicated parameter is counted
   on the first rank of the group. The sum is exact, so it does not depend on the sharding. Collective over
   the tensor group. */
static ddp_result clip(const trainer *t, float *norm, float *scale) {
    ddp_exact_sum sum;
    ddp_exact_sum_clear(&sum);
    ddp_group_device(t->tensor)->sum_squares(&sum, 0, t->counted, t->counted_count);
    DDP_TRY(ddp_all_reduce(t->tensor, sum.cell, sum.cell, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, NULL));
    *scale = ddp_clip_factor(&sum, 1.0f, norm);
    return DDP_OK;
}

/* Stores the loss of micro-batch `index` of the batch, on the first rank of the group. */
static void store_loss(trainer *t, int64_t index, double loss) {
    if (ddp_rank(t->tensor) == 0) t->run.losses[index] = loss;
}

/* One optimizer step. *loss is the mean over the global batch, *norm that of the gradients before clipping.
   Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    ddp_tp_stats stats = DDP_ZERO;
    double start = ddp_now(), each;
    float scale;
    ddp_tp_reset_stats(t->model.tp);
    for (int micro = 0; micro < r->micro_count; micro++) {
        for (int row = 0; row < r->plan.config.micro_batch; row++)
            DDP_TRY(load_sequence(r, row, next_sequence(r)));
        DDP_TRY(forward(t, &each, 1));
        store_loss(t, ddp_rank(t->replicas) * r->micro_count + micro, each);
        DDP_TRY(backward(t));
        DDP_TRY(ddp_accumulator_next(t->accumulator, NULL));
    }
    DDP_TRY(ddp_reducer_wait(t->reducer));
    DDP_TRY(clip(t, norm, &scale));
    DDP_TRY(ddp_optimizer_step_scaled(t->optimizer, ddp_lr_at(&r->lr, step), scale));
    DDP_TRY(run_mean_loss(r, (int64_t)r->micro_count * ddp_world_size(t->replicas), loss));
    DDP_TRY(ddp_tp_get_stats(t->model.tp, &stats));
    t->elements_sent += stats.elements_sent;
    t->comm_seconds += stats.comm_seconds;
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation text. Each replica computes a contiguous block of the micro-batches, which
   are the same for any number of replicas. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    int64_t count = validation_micro_batches(&r->plan), replicas = ddp_world_size(t->replicas),
            share = (count + replicas - 1) / replicas;
    int64_t first = ddp_rank(t->replicas) * share;
    double each;
    for (int64_t i = first; i < first + share && i < count; i++) {
        DDP_TRY(load_validation_batch(r, i));
        DDP_TRY(forward(t, &each, 0));
        store_loss(t, i, each);
    }
    return run_mean_loss(r, count, loss);
}

/* All-gathers a parameter or moment into t->full. from: this rank's shard. Collective over the tensor
   group. */
static ddp_result gather_full(trainer *t, int index, float *from) {
    const gpt_piece *p = &t->model.pieces[index];
    float *full = t->full;
    for (int k = 0; k < p->box_count; k++) {
        ddp_tensor in = t->params[index].value, out = in;
        in.data = from;
        out.data = full;
        for (int d = 0; d < in.ndim; d++) {
            in.shape[d] = p->box[k].shape[d];
            out.shape[d] = p->box[k].global_shape[d];
        }
        out.shape[0] /= p->box_count; /* queries, keys and values are gathered separately */
        DDP_TRY(ddp_tensor_redistribute(t->tensor, &in, p->placement, DDP_REPLICATE, &out));
        from += ddp_tensor_count(&in);
        full += ddp_tensor_count(&out);
    }
    return DDP_OK;
}

/* For checkpoints: the ranks of the first replica gather the tensor. */
static ddp_result get_state(void *user, int which, int param, const float **full) {
    trainer *t = (trainer *)user;
    *full = t->full;
    return ddp_rank(t->replicas) == 0 ? gather_full(t, param, state_of(t, which, param)) : DDP_OK;
}

/* Computes the validation loss. After training steps, writes a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    DDP_TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    if (!r->options->checkpoint || step == r->plan.first_step) return DDP_OK;
    return checkpoint_save(r, step, get_state, t);
}

//== end of the run =============================================================================== >>end

/* Hashes the full weights, and stores them in r->model on rank 0. Collective. */
static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    run *r = &t->run;
    *hash = HASH_START;
    for (int i = 0; i < t->model.param_count; i++) {
        size_t size_bytes = (size_t)r->infos[i].count * sizeof(float);
        if (r->infos[i].tied_to >= 0) continue;
        DDP_TRY(gather_full(t, i, t->values[i]));
        *hash = hash_bytes(*hash, t->full, size_bytes);
        if (r->rank == 0) memcpy(r->model.values[i], t->full, size_bytes);
    }
    return DDP_OK;
}

/* waiting: seconds that a rank waited for its tensor group; mean over ranks. */
static void print_table(const trainer *t, double waiting) {
    const run *r = &t->run;
    double steps = r->plan.config.steps > r->plan.first_step
                       ? (double)(r->plan.config.steps - r->plan.first_step)
                       : 1;
    printf("\n  ranks   tp   chunks   sequence parallel   tokens/s   elements sent per rank and step   "
           "waiting for the tensor group\n");
    printf("  %5d   %2d   %6d   %17s   %8.0f   %32.0f   %.4f s per step, %.2f%% of the time\n", r->world_size,
           t->model.ranks, r->options->chunks ? r->options->chunks : 1,
           r->options->sequence_parallel ? "yes" : "no", tokens_per_second(r, r->plan.config.steps),
           (double)t->elements_sent / steps, waiting / steps,
           r->train_seconds > 0 ? 100 * waiting / r->train_seconds : 0);
    printf("  values and activations of rank 0: %zu bytes\n\n", t->memory_bytes);
}

/* Gathers the weights, prints a sample and a table, and finishes the run. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    double waiting = t->comm_seconds;
    uint64_t hash;
    if (r->rank == 0 && gpt_model_create(&r->model, &t->model.config, 1, GPT_OWN_VALUES) != 0)
        return run_out_of_memory();
    DDP_TRY(hash_weights(t, &hash));
    DDP_TRY(ddp_all_reduce(r->world, &waiting, &waiting, 1, DDP_F64, DDP_OP_AVG, NULL));
    if (r->rank == 0) {
        int tokens[32 + SAMPLE_BYTES], prompt;
        DDP_TRY(sample_prompt(r, tokens, &prompt));
        gpt_generate(&r->model, tokens, prompt, prompt + SAMPLE_BYTES, 0.8f, (uint64_t)r->plan.config.seed);
        print_sample(&r->plan, tokens, prompt);
        print_table(t, waiting);
    }
    return run_finish(r, validation, hash);
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0, loss;
    float norm;
    DDP_TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    DDP_TRY(build_model(t));
    DDP_TRY(build_parallel(t));
    run_report_start(r);
    DDP_TRY(evaluate(t, r->plan.first_step, &validation));
    for (int64_t step = r->plan.first_step + 1; step <= r->plan.config.steps; step++) {
        DDP_TRY(train_step(t, step, &loss, &norm));
        run_report_step(r, step, loss, norm);
        if (is_validation_step(r, step)) DDP_TRY(evaluate(t, step, &validation));
    }
    return finish(t, validation);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    ddp_optimizer_destroy(t->optimizer);
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    gpt_tensor_destroy(&t->model);
    ddp_mesh_destroy(t->mesh);
    run_free(&t->run);
    free(t->params);
    free(t->counted);
    free(t->values);
    free(t->streams);
    free(t->acts);
    free(t->memory);
    free(t->full);
    checkpoint_close(&t->saved);
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

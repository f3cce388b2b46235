/*  train_gpt_3d.c - train_gpt on a mesh of pipeline stages x shards of data parallelism x tensor-parallel ranks, and the same losses.

USAGE
    cc -O3 -march=native examples/gpt/train_gpt_3d.c -o train_gpt_3d -lm -lpthread
    ./train_gpt_3d --pp 2 --dp 2 --tp 2 [flags] [files or folders]    eight ranks; --help lists the flags
    mpirun -n 8 ./train_gpt_3d --pp 2 --tp 2                          the ranks of a launcher

RANKS
    pp x dp x tp of them, named by their place on the mesh; --pp 2 --dp 2 --tp 2:

        stage 0: embedding, h.0          stage 1: h.1, head
            tp 0    tp 1                     tp 0    tp 1
        dp 0  rank 0  rank 1  -- activations -->  rank 4  rank 5     replica 0 and its micro-batches
        dp 1  rank 2  rank 3  -- activations -->  rank 6  rank 7     replica 1 and the next ones

    Along tp a stage's matrices are cut, as in train_gpt_tensor. Along dp each rank keeps some rows of what tp has left, as in train_gpt_fsdp. Along pp
    activations and their gradients travel, as in train_gpt_pipeline.

A STEP
    Each replica pipelines its block of the batch through the stages (1F1B). Before its first action a stage is gathered along dp; behind its last one
    gradients, added pairwise over the micro-batches, are added over dp, and each rank keeps those of its rows. Both uses of the tied matrix, the
    embedding's on the first stage and the head's on the last one, are added shard by shard. One norm clips them all, and AdamW runs on the shards.

    A checkpoint is a folder of whole tensors, queries, keys and values apart. It goes on under any other mesh. The hash in the last line is another one
    for another --tp, and the same for any --pp and --dp. */
#define DDP_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#include "../../ddp_tensor.h"
#define TRAIN_PROMISE \
    "The same --batch and --micro-batch give the losses of train_gpt, but for rounding, on any mesh."
#include "folder.h"
#include "gpt_tensor.h"
#include "train.h"

#include <float.h>

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--pp", FLAG_INT32, NOT_SAVED, AT(stages), 1, TRAIN_MAX_AXIS, "N stages of the pipeline; default 1"},
    {"--dp", FLAG_INT32, NOT_SAVED, AT(replicas), 1, TRAIN_MAX_AXIS,
     "N ranks that share the batch and split a stage; default: what pp and tp leave"},
    {"--tp", FLAG_INT32, NOT_SAVED, AT(tensor), 1, TRAIN_MAX_AXIS,
     "N ranks that matrices are cut over; default 1"},
    {"--sequence-parallel", FLAG_SWITCH, NOT_SAVED, AT(sequence_parallel), 0, 1,
     "stream and norms are cut by tokens"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0,
     "DIR save there at every validation and at the end; DIR.1 is the one before"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0, "DIR go on from a checkpoint, on any mesh"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "this text"},
};
static const run_program PROGRAM = {"train_gpt_3d", "trains a byte-level GPT on text on a mesh of ranks",
                                    FLAGS, (int)(sizeof FLAGS / sizeof FLAGS[0])};

//== trainer ============================================================================================== >>trainer

/* A box of a parameter, as ddp_fsdp has it. Every rank has some of every parameter, so that all list the same tensors: of other stages', no rows. */
typedef struct slice {
    int param, box;
    int here;    /* this rank's stage has it */
    int counted; /* of the ranks that have it, this is the one that counts for norm and hash */
    char name[40];
} slice;

/* What a unit of the stage keeps of one micro-batch between F and B. */
typedef struct unit_memory {
    float *out; /* (S, C): what the next unit of the stage reads */
    gpt_tensor_acts acts;
    gpt_tensor_head_acts head;
} unit_memory;

/* One rank. */
typedef struct trainer {
    run run;
    int pp, dp, tp;
    ddp_mesh *mesh;
    ddp_group *column, *replicas; /* along pp, the pipeline's own; along dp */
    gpt_tensor model;             /* the layers, on the group along tp */
    float **values, **grads;      /* model.param_count each; those of this stage while it is gathered */
    float *
        fused; /* queries, keys and values one below the other, which lie apart in ddp_fsdp; and their gradients */
    ddp_schedule *schedule;
    ddp_pipeline *pipeline;
    int unit_count, stage, micro_count; /* micro_count: micro-batches of this replica in a step */
    int *first_unit;                    /* of each stage, and one more */
    unit_memory *units;
    int slice_count;
    slice *slices;
    ddp_fsdp_param *params; /* slice_count, as these */
    ddp_param **pointers;   /* those of this stage */
    ddp_fsdp *fsdp;         /* the stage as one unit */
    ddp_fsdp_state state;   /* what a checkpoint keeps beside tensors */
    float *d, *whole; /* (S, C): the stream's gradient inside of the stage; room for the largest parameter */
    int64_t *starts;  /* windows of this replica's part of the batch */
    int64_t validating;       /* number of this replica's first validation micro-batch of an evaluation */
    double *each;             /* losses */
    ddp_pipeline_stats stats; /* of the run's last step */
} trainer;

/* What flags leave open of the mesh. */
static void find_mesh(trainer *t) {
    const run_options *o = t->run.options;
    t->pp = o->stages ? o->stages : 1;
    t->tp = o->tensor ? o->tensor : 1;
    t->dp = o->replicas ? o->replicas : (int)(t->run.world_size / ((int64_t)t->pp * t->tp));
    if (t->dp < 1) t->dp = 1;
}

static ddp_result check_mesh(const trainer *t, int heads) {
    int64_t ranks = t->run.world_size, rest = (int64_t)t->pp * t->tp, all = rest * t->dp;
    if (all != ranks && all > DDP_MAX_LOCAL_RANKS)
        return ddp_fail(DDP_ERR_INVALID,
                        "--pp %d x --dp %d x --tp %d are %lld ranks, and there are %lld; start as many under "
                        "mpirun, or use %d at most",
                        t->pp, t->dp, t->tp, (long long)all, (long long)ranks, DDP_MAX_LOCAL_RANKS);
    if (ranks % rest)
        return ddp_fail(DDP_ERR_INVALID, "--pp %d x --tp %d does not divide %lld ranks; use --ranks %lld",
                        t->pp, t->tp, (long long)ranks, (long long)((ranks + rest - 1) / rest * rest));
    if (all != ranks)
        return ddp_fail(DDP_ERR_INVALID, "--pp %d x --dp %d x --tp %d are not %lld ranks; use --dp %lld",
                        t->pp, t->dp, t->tp, (long long)ranks, (long long)(ranks / rest));
    if (heads % t->tp)
        return ddp_fail(DDP_ERR_INVALID, "--heads %d cannot be dealt out to --tp %d ranks; use --tp %d",
                        heads, t->tp, nearest_divisor(heads, t->tp));
    return DDP_OK;
}

static ddp_result make_schedule(trainer *t) {
    const run_config *c = &t->run.plan.config;
    ddp_schedule_desc desc = DDP_ZERO;
    t->unit_count = c->layers + 2;
    t->micro_count = c->batch / c->micro_batch / t->dp;
    if (t->pp > t->unit_count)
        return ddp_fail(DDP_ERR_INVALID,
                        "--pp %d: stages for an embedding, %d blocks and a head; use --layers %d or more",
                        t->pp, c->layers, t->pp - 2);
    desc.rank_count = t->pp;
    desc.microbatch_count = t->micro_count;
    return ddp_schedule_create(&t->schedule, &desc);
}

/* Rank 0: everything that can be wrong with the input is found here, before training and before anything is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    run_saved saved;
    memset(&saved, 0, sizeof saved);
    DDP_TRY(check_options(o, r->world_size));
    if (o->checkpoint) DDP_TRY(folder_check(o->checkpoint));
    if (o->resume) DDP_TRY(folder_read(o, &saved));
    if (o->resume)
        DDP_TRY(folder_check_qkv(o->resume, 1, "go on with train_gpt_fsdp, or with train_gpt_cuda --tp 1"));
    DDP_TRY(check_mesh(t, o->config.heads ? o->config.heads : o->resume ? saved.config.heads : 4));
    DDP_TRY(make_plan(&r->plan, o, t->dp, o->resume ? &saved : NULL, &r->text));
    DDP_TRY(gpt_tensor_check(r, t->tp));
    DDP_TRY(make_schedule(t));
    ddp_schedule_destroy(t->schedule);
    t->schedule = NULL;
    return DDP_OK;
}

static int is_last(const trainer *t) { return t->stage == t->pp - 1; }
static int is_in_stage(const trainer *t, int unit) {
    return unit >= t->first_unit[t->stage] && unit < t->first_unit[t->stage + 1];
}

/* The mesh, the layers, and which units are this rank's. Collective. */
static ddp_result build_model(trainer *t) {
    run *r = &t->run;
    ddp_mesh_desc mesh = DDP_ZERO;
    gpt_config config = run_model_config(r);
    size_t count = (size_t)gpt_param_count(&config), units = (size_t)t->unit_count, largest = 0;
    double *cost = (double *)calloc(units, sizeof *cost);
    ddp_result result;
    t->first_unit = (int *)calloc((size_t)t->pp + 1, sizeof *t->first_unit);
    t->values = (float **)calloc(count * 2, sizeof *t->values);
    t->units = (unit_memory *)calloc(units, sizeof *t->units);
    t->starts = (int64_t *)calloc((size_t)r->plan.config.batch, sizeof *t->starts);
    t->each = (double *)calloc((size_t)t->micro_count, sizeof *t->each);
    if (!cost || !t->first_unit || !t->values || !t->units || !t->starts || !t->each) {
        free(cost);
        return run_out_of_memory();
    }
    t->grads = t->values + count;
    for (int u = 0; u < t->unit_count; u++) cost[u] = unit_cost(&r->plan, u);
    result = ddp_pipeline_partition(cost, t->unit_count, t->pp, t->first_unit);
    t->first_unit[t->pp] = t->unit_count;
    free(cost);
    DDP_TRY(result);
    DDP_TRY(run_build_arrays(r));

    mesh.ndim = 3, mesh.names[0] = "pp", mesh.names[1] = "dp", mesh.names[2] = "tp";
    mesh.shape[0] = t->pp, mesh.shape[1] = t->dp, mesh.shape[2] = t->tp;
    DDP_TRY(ddp_mesh_create(&t->mesh, r->world, &mesh));
    t->column = ddp_mesh_group(t->mesh, "pp");
    t->replicas = ddp_mesh_group(t->mesh, "dp");
    t->stage = ddp_rank(t->column);
    DDP_TRY(gpt_tensor_create(&t->model, r, ddp_mesh_group(t->mesh, "tp"), t->values, t->grads));
    for (int i = 0; i < t->model.param_count; i++)
        largest = (size_t)r->infos[i].count > largest ? (size_t)r->infos[i].count : largest;
    t->whole = (float *)calloc(largest, sizeof(float));
    t->d = (float *)calloc((size_t)t->model.rows * (size_t)config.channels, sizeof(float));
    return t->whole && t->d ? DDP_OK : run_out_of_memory();
}

//== shards ================================================================================================ >>shards

static const ddp_tensor_box *box_of(const trainer *t, const slice *s) {
    return &t->model.pieces[s->param].box[s->box];
}

/* "h.0.attn.qkv.weight" becomes "h.0.attn.q.weight" and its like: each is a tensor of the checkpoint, and this rank's rows of it are one box. */
static void describe_slice(trainer *t, slice *s, ddp_fsdp_param *p) {
    const gpt_param *info = &t->run.infos[s->param];
    const gpt_piece *piece = &t->model.pieces[s->param];
    const ddp_tensor_box *box = box_of(t, s);
    const char *fused = piece->box_count == 3 ? strstr(info->name, "qkv") : NULL;
    if (fused)
        snprintf(s->name, sizeof s->name, "%.*s%c%s", (int)(fused - info->name), info->name, "qkv"[s->box],
                 fused + 3);
    else
        snprintf(s->name, sizeof s->name, "%s", info->name);
    s->here = is_in_stage(t, info->unit) || (s->param == 0 && is_last(t));
    s->counted = s->here && info->tied_to < 0 && (s->param != 0 || t->stage == 0)
                 && (piece->placement != DDP_REPLICATE || ddp_rank(t->model.group) == 0);
    run_describe(&t->run, s->param, &p->param);
    p->param.name = s->name;
    for (int d = 0; d < box->ndim; d++) {
        p->param.value.shape[d] = d || s->here ? box->shape[d] : 0;
        p->global_shape[d] = d ? box->global_shape[d] : box->global_shape[d] / piece->box_count;
        p->global_offset[d] = d ? box->offset[d] : box->offset[d] - s->box * p->global_shape[d];
    }
    p->index = (int)(s - t->slices);
    if (info->tied_to >= 0) p->tied_to = t->run.infos[info->tied_to].name;
}

/* What ddp_fsdp and the runner need of the parameters. The head's matrix is a second use of the embedding's where both are on one stage; otherwise
   both stages have "wte", the same rows with the same gradients. */
static ddp_result build_slices(trainer *t) {
    size_t room = 3 * (size_t)t->model.param_count, fused = 0;
    t->slices = (slice *)calloc(room, sizeof *t->slices);
    t->params = (ddp_fsdp_param *)calloc(room, sizeof *t->params);
    t->pointers = (ddp_param **)calloc(room, sizeof *t->pointers);
    if (!t->slices || !t->params || !t->pointers) return run_out_of_memory();
    for (int i = 0; i < t->model.param_count; i++)
        for (int k = 0; k < t->model.pieces[i].box_count && (t->run.infos[i].tied_to < 0 || t->pp == 1);
             k++) {
            slice *s = &t->slices[t->slice_count];
            s->param = i, s->box = k;
            describe_slice(t, s, &t->params[t->slice_count++]);
        }
    for (int pass = 0; pass < 2; pass++) {
        if (pass && !(t->fused = (float *)calloc(fused + 1, sizeof(float)))) return run_out_of_memory();
        fused = 0;
        for (int i = 0; i < t->model.param_count; i++) {
            const gpt_piece *piece = &t->model.pieces[i];
            if (piece->box_count == 1 || !is_in_stage(t, t->run.infos[i].unit)) continue;
            t->values[i] = gpt__take(t->fused, &fused, (size_t)(piece->rows * piece->columns));
            t->grads[i] = gpt__take(t->fused, &fused, (size_t)(piece->rows * piece->columns));
        }
    }
    return DDP_OK;
}

/* First values: drawn from the seed, row by row on the rank that keeps them. */
static ddp_result fill_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const trainer *t = (const trainer *)user;
    const slice *s = &t->slices[param->index];
    const ddp_tensor_box *box = box_of(t, s);
    int64_t columns = t->model.pieces[s->param].columns;
    for (int64_t i = 0; i < row_count; i++)
        gpt_param_init(&t->model.config, (uint64_t)t->run.plan.config.seed, s->param,
                       gpt_box_row(box, first_row + i), columns, (float *)out + i * columns);
    return DDP_OK;
}

/* Along dp: shards of the stage. Collective. */
static ddp_result build_shards(trainer *t) {
    run *r = &t->run;
    ddp_fsdp_unit_desc unit = {"stage", t->params, t->slice_count};
    ddp_fsdp_desc desc = DDP_ZERO;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.overwrite_gradients = 1; /* backward writes every gradient of a unit */
    desc.optimizer.beta2 = 0.95f;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = fill_rows;
    desc.init_user = t;
    desc.state = &t->state;
    desc.keep_checkpoints = 2;
    desc.checkpoint_group = r->world;
    DDP_TRY(ddp_fsdp_create(&t->fsdp, t->replicas, &desc));
    if (r->plan.first_step == 0) return DDP_OK;
    DDP_TRY(ddp_fsdp_load(t->fsdp, r->options->resume));
    if (t->state.step != r->plan.first_step)
        return ddp_fail(DDP_ERR_INVALID,
                        "--resume %s: another run has just written it; give a checkpoint that stays",
                        r->options->resume);
    r->plan.data = t->state.sampler;
    return DDP_OK;
}

/* Queries, keys and values go below each other, or their gradients go back from there. */
static void move_fused(const trainer *t, int back) {
    for (int i = 0; i < t->slice_count; i++) {
        const slice *s = &t->slices[i];
        const ddp_param *p = &t->params[i].param;
        size_t count = (size_t)ddp_tensor_count(&p->value);
        if (!s->here || t->model.pieces[s->param].box_count == 1) continue;
        if (back)
            memcpy(p->grad.data, t->grads[s->param] + (size_t)s->box * count, count * sizeof(float));
        else
            memcpy(t->values[s->param] + (size_t)s->box * count, p->value.data, count * sizeof(float));
    }
}

/* Before a stage's first action: its values, and its gradients, are where the layers look for them. Collective over dp. */
static ddp_result gather_stage(int stage, void *user) {
    trainer *t = (trainer *)user;
    int head = t->model.param_count - 1;
    (void)stage;
    DDP_TRY(ddp_fsdp_unshard(t->fsdp, 0));
    for (int i = 0; i < t->slice_count; i++) {
        const slice *s = &t->slices[i];
        if (!s->here || t->model.pieces[s->param].box_count > 1) continue;
        t->values[s->param] = (float *)t->params[i].param.value.data;
        t->grads[s->param] = (float *)t->params[i].param.grad.data;
    }
    if (t->pp > 1 && is_last(t)) t->values[head] = t->values[0], t->grads[head] = t->grads[0];
    move_fused(t, 0);
    return DDP_OK;
}

static ddp_result reduce_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_reduce_grads(((trainer *)user)->fsdp, 0);
}
static ddp_result release_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_reshard(((trainer *)user)->fsdp, 0);
}
/* Averages of this rank's rows, which nothing clips yet. Collective over dp. */
static ddp_result average_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_clip_grad_norm(((trainer *)user)->fsdp, FLT_MAX, NULL);
}

/* Gradients of this rank's rows of slice i. */
static ddp_result gradient_of(const trainer *t, int i, ddp_tensor *grad) {
    return ddp_fsdp_get_shard(t->fsdp, 0, i, NULL, grad, NULL);
}
static ddp_result tied_gradient(int stage, int param, ddp_tensor *grad,
                                void *user) { /* "wte", the first slice */
    return (void)stage, (void)param, gradient_of((trainer *)user, 0, grad);
}

//== stages ================================================================================================ >>stages

/* Lays the stage's units out in saved memory. Returns the floats needed; memory NULL only counts. */
static size_t place_units(trainer *t, float *memory) {
    size_t used = 0, n = (size_t)t->model.rows * (size_t)t->model.config.channels;
    for (int u = t->first_unit[t->stage]; u < t->first_unit[t->stage + 1]; u++) {
        unit_memory *unit = &t->units[u];
        unit->out = gpt__take(memory, &used, n);
        if (u + 1 == t->unit_count)
            used += gpt_tensor_head_acts_place(&t->model, memory ? memory + used : NULL, &unit->head);
        else if (u > 0)
            used += gpt_tensor_acts_place(&t->model, memory ? memory + used : NULL, &unit->acts);
    }
    return used;
}

/* The micro-batch's tokens and targets are where layers look for them; the stage's memory is laid out. */
static ddp_result begin(trainer *t, const ddp_pipeline_call *c) {
    run *r = &t->run;
    int rows = r->plan.config.micro_batch;
    int64_t last = validation_micro_batches(&r->plan) - 1, index = t->validating + c->microbatch;
    if (c->evaluating)
        DDP_TRY(load_validation_batch(r, index < last ? index : last));
    else
        for (int row = 0; row < rows; row++)
            DDP_TRY(load_sequence(r, row, t->starts[c->microbatch * rows + row]));
    place_units(t, (float *)c->saved);
    return DDP_OK;
}

/* What unit u of the stage reads. */
static const float *input_of(const trainer *t, const ddp_pipeline_call *c, int u) {
    return u > t->first_unit[c->stage] ? t->units[u - 1].out
           : c->input_count            ? (const float *)c->inputs[0].data
                                       : NULL;
}

static ddp_result stage_forward(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    DDP_TRY(begin(t, c));
    for (int u = t->first_unit[c->stage]; u < t->first_unit[c->stage + 1]; u++) {
        const float *in = input_of(t, c, u);
        unit_memory *unit = &t->units[u];
        float *out = u + 1 < t->first_unit[c->stage + 1] || !c->output_count ? unit->out
                                                                             : (float *)c->outputs[0].data;
        if (u == 0)
            DDP_TRY(gpt_tensor_embed_forward(&t->model, t->run.tokens, out));
        else if (u + 1 < t->unit_count)
            DDP_TRY(gpt_tensor_block_forward(&t->model, u - 1, in, &unit->acts, out));
        else
            DDP_TRY(
                gpt_tensor_head_forward(&t->model, in, t->run.targets, &unit->head, c->loss, !c->evaluating));
    }
    return DDP_OK;
}

static ddp_result stage_backward(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    const float *d_out = c->output_count ? (const float *)c->output_grads[0].data : NULL;
    DDP_TRY(begin(t, c));
    for (int u = t->first_unit[c->stage + 1] - 1; u >= t->first_unit[c->stage]; u--) {
        float *d_in = u > t->first_unit[c->stage] ? t->d
                      : c->input_count            ? (float *)c->input_grads[0].data
                                                  : NULL;
        if (u == 0)
            DDP_TRY(gpt_tensor_embed_backward(&t->model, t->run.tokens, d_out));
        else if (u + 1 < t->unit_count)
            DDP_TRY(gpt_tensor_block_backward(&t->model, u - 1, input_of(t, c, u), &t->units[u].acts, d_out,
                                              d_in));
        else
            DDP_TRY(gpt_tensor_head_backward(&t->model, input_of(t, c, u), &t->units[u].head, d_in));
        d_out = d_in;
    }
    move_fused(t, 1);
    return DDP_OK;
}

/* Along pp: the runner. Collective. */
static ddp_result build_pipeline(trainer *t) {
    const ddp_pipeline_tie tie = {0, 0, t->pp - 1, 0}; /* "wte" is the first parameter of both */
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_stage *stages = (ddp_pipeline_stage *)calloc((size_t)t->pp, sizeof *stages), *own;
    ddp_result result;
    if (!stages) return run_out_of_memory();
    own = stages + t->stage;
    own->forward = stage_forward;
    own->backward = stage_backward;
    own->user = t;
    own->saved_bytes = place_units(t, NULL) * sizeof(float);
    own->params = t->pointers;
    for (int i = 0; i < t->slice_count; i++)
        if (t->slices[i].here) t->pointers[own->param_count++] = &t->params[i].param;
    own->unshard = gather_stage;
    own->reshard = release_stage;
    own->reduce_grad = reduce_stage;
    own->wait_grad = average_stage;
    own->get_sharded_grad = tied_gradient;
    own->grad_division = DDP_DIVIDE_BEFORE_REDUCE;
    desc.ties = &tie;
    desc.tie_count = t->pp > 1;
    desc.schedule = t->schedule;
    desc.stages = stages;
    desc.stage_count = t->pp;
    desc.boundary.dtype = DDP_F32;
    desc.boundary.ndim = 2;
    desc.boundary.shape[0] = t->model.rows, desc.boundary.shape[1] = t->model.config.channels;
    result = ddp_pipeline_create(&t->pipeline, t->column, &desc);
    free(stages);
    DDP_TRY(result);
    return run_build_sampler(&t->run, t->dp, ddp_rank(t->replicas));
}

//== training ============================================================================================ >>training

/* The norm of all gradients, the tied matrix' one counted once, and they are clipped to 1. An exact sum of rows, so that neither stages nor shards change it.
   Collective. */
static ddp_result clip(trainer *t, float *norm) {
    const ddp_device *device = ddp_group_device(t->run.world);
    ddp_tensor grad;
    ddp_exact_sum sum;
    ddp_exact_sum_clear(&sum);
    for (int i = 0; i < t->slice_count; i++) {
        if (!t->slices[i].counted) continue;
        DDP_TRY(gradient_of(t, i, &grad));
        if (grad.data)
            device->sum_squares(&sum, grad.data, (size_t)grad.shape[0],
                                (size_t)(ddp_tensor_count(&grad) / grad.shape[0]), DDP_F32);
    }
    DDP_TRY(ddp_all_reduce(t->run.world, sum.cell, sum.cell, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, NULL));
    *norm = (float)sqrt(ddp_exact_sum_value(&sum));
    for (int i = 0; i<t->slice_count && * norm> 1; i++) {
        DDP_TRY(gradient_of(t, i, &grad));
        if (grad.data) device->scale(grad.data, (size_t)ddp_tensor_count(&grad), DDP_F32, 1 / *norm);
    }
    return DDP_OK;
}

/* Losses of this replica's micro-batches, number `first` of all and the next ones: one rank says them. */
static ddp_result keep_losses(trainer *t, int64_t first, int64_t end) {
    double unused;
    DDP_TRY(ddp_pipeline_get_loss(t->pipeline, &unused, t->each));
    for (int64_t i = 0; i < t->micro_count && first + i < end; i++)
        if (t->stage == 0 && ddp_rank(t->model.group) == 0) t->run.losses[first + i] = t->each[i];
    return DDP_OK;
}

/* One optimizer step. *loss is the global batch's, *norm that of the gradient before clipping. Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    int64_t first = (int64_t)ddp_rank(t->replicas) * t->micro_count, count = (int64_t)t->micro_count * t->dp;
    double start = ddp_now();
    for (int i = 0; i < r->plan.config.batch / t->dp; i++) t->starts[i] = next_sequence(r);
    DDP_TRY(ddp_pipeline_step(t->pipeline));
    DDP_TRY(keep_losses(t, first, count));
    DDP_TRY(clip(t, norm));
    DDP_TRY(ddp_fsdp_step(t->fsdp, ddp_lr_at(&r->lr, step)));
    DDP_TRY(run_mean_loss(r, count, loss));
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation windows, as many micro-batches at a time as a step has. Replicas take contiguous shares; where one is short, it runs
   along with the others. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    int64_t count = validation_micro_batches(&r->plan), share = (count + t->dp - 1) / t->dp,
            first = ddp_rank(t->replicas) * share;
    int64_t end = first + share < count ? first + share : count;
    for (t->validating = first; t->validating < first + share; t->validating += t->micro_count) {
        DDP_TRY(ddp_pipeline_evaluate(t->pipeline));
        DDP_TRY(keep_losses(t, t->validating, end));
    }
    return run_mean_loss(r, count, loss);
}

/* The validation loss, and after training steps, and at the end, a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    DDP_TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    if (!r->options->checkpoint || (step == r->plan.first_step && step < r->plan.config.steps)) return DDP_OK;
    folder_state(&t->state, &r->plan);
    DDP_TRY(ddp_sampler_save(&r->sampler, &t->state.sampler));
    return ddp_fsdp_save(t->fsdp, r->options->checkpoint);
}

//== the end ================================================================================================== >>end

/* The whole of a parameter on every rank, in t->whole: of zeros and the rows that each has. Collective. */
static ddp_result gather_whole(trainer *t, int param) {
    size_t count = (size_t)t->run.infos[param].count, columns = (size_t)t->model.pieces[param].columns;
    memset(t->whole, 0, count * sizeof(float));
    for (int i = 0; i < t->slice_count; i++) {
        ddp_tensor rows;
        int64_t first;
        if (t->slices[i].param != param || !t->slices[i].counted) continue;
        DDP_TRY(ddp_fsdp_get_shard(t->fsdp, 0, i, &rows, NULL, &first));
        for (int64_t j = 0; rows.data && j < rows.shape[0]; j++)
            memcpy(t->whole + gpt_box_row(box_of(t, &t->slices[i]), first + j),
                   (float *)rows.data + (size_t)j * columns, columns * sizeof(float));
    }
    return ddp_all_reduce(t->run.world, t->whole, t->whole, count, DDP_F32, DDP_OP_SUM, NULL);
}

static ddp_result print_table(const trainer *t) {
    const run *r = &t->run;
    ddp_fsdp_memory memory = DDP_ZERO;
    DDP_TRY(ddp_fsdp_get_memory(t->fsdp, &memory));
    if (r->rank != 0) return DDP_OK;
    printf("\n  ranks   pp   dp   tp   micro-batches   tokens/s   bubble predicted   measured   bytes of "
           "values and moments on rank 0\n");
    printf("  %5d   %2d   %2d   %2d   %13d   %8.0f   %15.1f%%   %7.1f%%   %zu\n\n", r->world_size, t->pp,
           t->dp, t->tp, t->micro_count, tokens_per_second(r, r->plan.config.steps),
           100 * t->stats.predicted_bubble_rate, 100 * t->stats.bubble_rate,
           memory.now.shards + memory.now.optimizer);
    return DDP_OK;
}

/* Every rank hashes all values, and rank 0 keeps them for the sample. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    uint64_t hash = HASH_START;
    if (r->rank == 0 && gpt_model_create(&r->model, &t->model.config, 1, GPT_OWN_VALUES) != 0)
        return run_out_of_memory();
    for (int i = 0; i < t->model.param_count; i++) {
        size_t size_bytes = (size_t)r->infos[i].count * sizeof(float);
        if (r->infos[i].tied_to >= 0) continue;
        DDP_TRY(gather_whole(t, i));
        hash = hash_bytes(hash, t->whole, size_bytes);
        if (r->rank == 0) memcpy(r->model.values[i], t->whole, size_bytes);
    }
    if (r->rank == 0) {
        int tokens[32 + SAMPLE_BYTES], prompt;
        DDP_TRY(sample_prompt(r, tokens, &prompt));
        gpt_generate(&r->model, tokens, prompt, prompt + SAMPLE_BYTES, 0.8f, (uint64_t)r->plan.config.seed);
        print_sample(&r->plan, tokens, prompt);
    }
    DDP_TRY(print_table(t));
    return run_finish(r, validation, hash);
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0, loss;
    float norm;
    find_mesh(t);
    DDP_TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    DDP_TRY(make_schedule(t));
    DDP_TRY(build_model(t));
    DDP_TRY(build_slices(t));
    DDP_TRY(build_shards(t));
    DDP_TRY(build_pipeline(t));
    run_report_start(r);
    DDP_TRY(evaluate(t, r->plan.first_step, &validation));
    for (int64_t step = r->plan.first_step + 1; step <= r->plan.config.steps; step++) {
        DDP_TRY(train_step(t, step, &loss, &norm));
        run_report_step(r, step, loss, norm);
        if (step == r->plan.config.steps) DDP_TRY(ddp_pipeline_get_stats(t->pipeline, &t->stats));
        if (is_validation_step(r, step)) DDP_TRY(evaluate(t, step, &validation));
    }
    return finish(t, validation);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    ddp_pipeline_destroy(t->pipeline);
    ddp_fsdp_destroy(t->fsdp);
    gpt_tensor_destroy(&t->model);
    ddp_mesh_destroy(t->mesh);
    run_free(&t->run);
    ddp_schedule_destroy(t->schedule);
    free(t->first_unit);
    free(t->values);
    free(t->fused);
    free(t->units);
    free(t->slices);
    free(t->params);
    free(t->pointers);
    free(t->d);
    free(t->whole);
    free(t->starts);
    free(t->each);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    return run_trainer(world, (job *)user, sizeof(trainer), train, trainer_free);
}

/* Without --ranks a mesh starts as many as it has. One that is larger than a machine is a launcher's; without one, the only rank says so. */
static int mesh_ranks(const run_options *o) {
    int64_t pp = o->stages ? o->stages : 1, dp = o->replicas ? o->replicas : 1,
            tp = o->tensor ? o->tensor : 1, ranks = pp * dp * tp;
    if (ranks > DDP_MAX_LOCAL_RANKS) return 1;
    return o->stages || o->replicas || o->tensor ? (int)ranks : 0;
}

int main(int argc, char **argv) {
    job j;
    memset(&j, 0, sizeof j);
    parse_options(&PROGRAM, argc, argv, &j.options);
    j.ranks = mesh_ranks(&j.options);
    return run_main(&j, rank_main);
}

/* MIT License: see LICENSE. */

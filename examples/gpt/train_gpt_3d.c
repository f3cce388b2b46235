/*  train_gpt_3d.c - train_gpt with pipeline, sharded data and tensor parallelism on one mesh; the same losses

USAGE
    cc -O3 -march=native examples/gpt/train_gpt_3d.c -o train_gpt_3d -lm -lpthread
    ./train_gpt_3d --pp 2 --dp 2 --tp 2 [flags] [files or folders]   eight ranks; --help lists the flags
    mpirun --oversubscribe -n 8 ./train_gpt_3d --pp 2 --tp 2         under a launcher

RANKS
    The ranks are a mesh of pp x dp x tp. With --pp 2 --dp 2 --tp 2:

        stage 0: embedding, h.0          stage 1: h.1, head
            tp 0    tp 1                     tp 0    tp 1
        dp 0  rank 0  rank 1  -- activations -->  rank 4  rank 5     replica 0 and its micro-batches
        dp 1  rank 2  rank 3  -- activations -->  rank 6  rank 7     replica 1 and the next ones

    Along tp the matrices of a stage are split, as in train_gpt_tensor. Along dp each rank stores some rows of
    its tensor-parallel shard, as in train_gpt_fsdp. Along pp the ranks send activations and their gradients,
    as in train_gpt_pipeline.

A STEP
    Each replica pipelines its block of the batch through the stages (1F1B). A stage is unsharded along dp
    before its first action. After its last action the gradients, which are added over the micro-batches as a
    binary tree, are reduce-scattered along dp. The gradients of the tied matrix, of the embedding on the
    first stage and of the head on the last one, are added shard by shard. All gradients are clipped by one
    norm, and AdamW updates the shards.

RESULTS
    A checkpoint is a folder of full tensors, with separate queries, keys and values. It continues on any
    other mesh. The hash in the last line depends on --tp, but not on --pp and --dp. */
#define DDP_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#include "../../ddp_tensor.h"
#define TRAIN_PROMISE \
    "The same --batch and --micro-batch give the losses of train_gpt, except for rounding, on any mesh."
#include "folder.h"
#include "gpt_tensor.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--pp", FLAG_INT32, NOT_SAVED, AT(stages), 1, TRAIN_MAX_AXIS, "N pipeline stages; default 1"},
    {"--dp", FLAG_INT32, NOT_SAVED, AT(replicas), 1, TRAIN_MAX_AXIS,
     "N replicas, which shard the stages; default: ranks / (pp x tp)"},
    {"--tp", FLAG_INT32, NOT_SAVED, AT(tensor), 1, TRAIN_MAX_AXIS, "N tensor-parallel ranks; default 1"},
    {"--sequence-parallel", FLAG_SWITCH, NOT_SAVED, AT(sequence_parallel), 0, 1,
     "layer norms and the residual stream are sharded along the sequence"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0,
     "DIR write a checkpoint there after each validation; DIR.1 is the previous one"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0,
     "DIR continue from a checkpoint, on any mesh" RESUMED_FLAGS},
    RECOMPUTE_FLAG("stages"),
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "print this text"},
};
static const run_program PROGRAM = {"train_gpt_3d", "trains a byte-level GPT on text on a mesh of ranks",
                                    FLAGS, (int)(sizeof FLAGS / sizeof FLAGS[0])};

//== trainer ================================================================================== >>trainer

/* A box of a parameter that is a tensor for ddp_fsdp. All ranks list the same tensors; those of other stages
   have no rows. */
typedef struct slice {
    int param, box;
    int present; /* 1 = this rank's stage has it */
    int counted; /* 1 = this rank adds it to norm and hash: one of the ranks that have it */
    char name[40];
} slice;

/* Memory of a unit for one micro-batch, from forward to backward. */
typedef struct unit_memory {
    float *out; /* (S, C): the input of the next unit of the stage */
    gpt_tensor_acts acts;
    gpt_tensor_head_acts head;
} unit_memory;

/* The state of a rank. */
typedef struct trainer {
    run run;
    int pp, dp, tp;
    ddp_mesh *mesh;
    ddp_group *pipeline_group, *replicas; /* along pp; along dp */
    gpt_tensor model;                     /* the layers, on the group along tp */
    float **values, **grads; /* model.param_count each; valid for this stage while it is unsharded */
    float *fused;            /* queries, keys and values as one tensor, and their gradients */
    ddp_schedule *schedule;
    ddp_pipeline *pipeline;
    int unit_count, stage;
    int micro_count; /* micro-batches of this replica in a step */
    int *first_unit; /* of each stage; first_unit[pp] = unit_count */
    unit_memory *units;
    int slice_count;
    slice *slices;
    ddp_fsdp_param *params; /* slice_count; params[i] describes slices[i] */
    ddp_param **pointers;   /* to the params of this stage */
    ddp_tensor *grad_rows;  /* slice_count: space for the list of this rank's gradients */
    ddp_fsdp *fsdp;         /* the stage as one unit */
    ddp_fsdp_state state;   /* the part of a checkpoint that is not tensors */
    float *d_stream;        /* (S, C): the gradient between units of the stage */
    float *full;            /* a full parameter: space for the largest */
    int64_t *starts;        /* starts of the sequences of this replica's block of the batch */
    int64_t validating;   /* index of this replica's first validation micro-batch of the current evaluation */
    double *micro_losses; /* micro_count */
    ddp_pipeline_stats stats; /* of the last training step */
} trainer;

/* Fills in the mesh dimensions that are not given. */
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
        return ddp_fail(
            DDP_ERR_INVALID,
            "--pp %d x --dp %d x --tp %d are %lld ranks, but the number of ranks is %lld; start that many "
            "under mpirun, or use at most %d",
            t->pp, t->dp, t->tp, (long long)all, (long long)ranks, DDP_MAX_LOCAL_RANKS);
    if (ranks % rest)
        return ddp_fail(DDP_ERR_INVALID, "--pp %d x --tp %d does not divide %lld ranks; use --ranks %lld",
                        t->pp, t->tp, (long long)ranks, (long long)((ranks + rest - 1) / rest * rest));
    if (all != ranks)
        return ddp_fail(DDP_ERR_INVALID, "--pp %d x --dp %d x --tp %d are not %lld ranks; use --dp %lld",
                        t->pp, t->dp, t->tp, (long long)ranks, (long long)(ranks / rest));
    if (heads % t->tp)
        return ddp_fail(DDP_ERR_INVALID, "--heads %d is not a multiple of --tp %d; use --tp %d", heads, t->tp,
                        nearest_divisor(heads, t->tp));
    return DDP_OK;
}

static ddp_result make_schedule(trainer *t) {
    const run_config *c = &t->run.plan.config;
    ddp_schedule_desc desc = DDP_ZERO;
    t->unit_count = c->layers + 2;
    t->micro_count = c->batch / c->micro_batch / t->dp;
    if (t->pp > t->unit_count)
        return ddp_fail(DDP_ERR_INVALID,
                        "--pp %d is more than the units of the model: embedding, %d blocks and head; use "
                        "--layers %d or more",
                        t->pp, c->layers, t->pp - 2);
    desc.rank_count = t->pp;
    desc.microbatch_count = t->micro_count;
    return ddp_schedule_create(&t->schedule, &desc);
}

/* Rank 0: checks all input before training, and before any file is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    run_saved saved;
    int heads;
    memset(&saved, 0, sizeof saved);
    DDP_TRY(check_options(o, r->world_size));
    if (o->checkpoint) DDP_TRY(folder_check(o->checkpoint));
    if (o->resume) DDP_TRY(folder_read(o, &saved));
    if (o->resume)
        DDP_TRY(folder_check_qkv(o->resume, 1, "use train_gpt_fsdp, or train_gpt_cuda with --tp 1"));
    heads = o->resume ? saved.config.heads : 4;
    if (o->config.heads) heads = o->config.heads;
    DDP_TRY(check_mesh(t, heads));
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

/* Creates the mesh and the layers, and partitions the units into stages. Collective. */
static ddp_result build_model(trainer *t) {
    run *r = &t->run;
    ddp_mesh_desc mesh = DDP_ZERO;
    gpt_config config = run_model_config(r);
    size_t count = (size_t)gpt_param_count(&config), units = (size_t)t->unit_count;
    double *cost = (double *)calloc(units, sizeof *cost);
    ddp_result result;
    t->first_unit = (int *)calloc((size_t)t->pp + 1, sizeof *t->first_unit);
    t->values = (float **)calloc(count * 2, sizeof *t->values);
    t->units = (unit_memory *)calloc(units, sizeof *t->units);
    t->starts = (int64_t *)calloc((size_t)r->plan.config.batch, sizeof *t->starts);
    t->micro_losses = (double *)calloc((size_t)t->micro_count, sizeof *t->micro_losses);
    if (!cost || !t->first_unit || !t->values || !t->units || !t->starts || !t->micro_losses) {
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

    mesh.ndim = 3;
    mesh.names[0] = "pp";
    mesh.names[1] = "dp";
    mesh.names[2] = "tp";
    mesh.shape[0] = t->pp;
    mesh.shape[1] = t->dp;
    mesh.shape[2] = t->tp;
    DDP_TRY(ddp_mesh_create(&t->mesh, r->world, &mesh));
    t->pipeline_group = ddp_mesh_group(t->mesh, "pp");
    t->replicas = ddp_mesh_group(t->mesh, "dp");
    t->stage = ddp_rank(t->pipeline_group);
    DDP_TRY(gpt_tensor_create(&t->model, r, ddp_mesh_group(t->mesh, "tp"), t->values, t->grads));
    t->full = (float *)calloc(run_largest_param(r), sizeof(float));
    t->d_stream = (float *)calloc((size_t)t->model.rows * (size_t)config.channels, sizeof(float));
    return t->full && t->d_stream ? DDP_OK : run_out_of_memory();
}

//== shards ==================================================================================== >>shards

static const ddp_tensor_box *box_of(const trainer *t, const slice *s) {
    return &t->model.pieces[s->param].box[s->box];
}

/* "h.0.attn.qkv.weight" becomes "h.0.attn.q.weight", ".k." and ".v.": three tensors of the checkpoint. This
   rank's rows of each are one box. */
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
    s->present = is_in_stage(t, info->unit) || (s->param == 0 && is_last(t));
    s->counted = s->present && info->tied_to < 0 && (s->param != 0 || t->stage == 0)
                 && (piece->placement != DDP_REPLICATE || ddp_rank(t->model.group) == 0);
    run_describe(&t->run, s->param, &p->param);
    p->param.name = s->name;
    for (int d = 0; d < box->ndim; d++) {
        p->param.value.shape[d] = d || s->present ? box->shape[d] : 0;
        p->global_shape[d] = d ? box->global_shape[d] : box->global_shape[d] / piece->box_count;
        p->global_offset[d] = d ? box->offset[d] : box->offset[d] - s->box * p->global_shape[d];
    }
    p->index = (int)(s - t->slices);
    if (info->tied_to >= 0) p->tied_to = t->run.infos[info->tied_to].name;
}

/* Describes the parameters to ddp_fsdp. With one stage, head.weight is a tied use of wte. With more, the
   first and the last stage both have "wte", with the same rows and the same gradients. */
static ddp_result build_slices(trainer *t) {
    size_t room = 3 * (size_t)t->model.param_count, fused = 0;
    t->slices = (slice *)calloc(room, sizeof *t->slices);
    t->params = (ddp_fsdp_param *)calloc(room, sizeof *t->params);
    t->pointers = (ddp_param **)calloc(room, sizeof *t->pointers);
    t->grad_rows = (ddp_tensor *)calloc(room, sizeof *t->grad_rows);
    if (!t->slices || !t->params || !t->pointers || !t->grad_rows) return run_out_of_memory();
    for (int i = 0; i < t->model.param_count; i++)
        for (int k = 0; k < t->model.pieces[i].box_count && (t->run.infos[i].tied_to < 0 || t->pp == 1);
             k++) {
            slice *s = &t->slices[t->slice_count];
            s->param = i;
            s->box = k;
            describe_slice(t, s, &t->params[t->slice_count]);
            t->slice_count++;
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

/* Called by ddp_fsdp_create: computes the initial values of the rows that this rank stores. */
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

/* Shards the stage along dp. Collective. */
static ddp_result build_shards(trainer *t) {
    run *r = &t->run;
    ddp_fsdp_unit_desc unit = {"stage", t->params, t->slice_count};
    ddp_fsdp_desc desc = DDP_ZERO;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.overwrite_gradients = 1; /* backward overwrites every gradient */
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
                        "--resume %s: another run replaced it during the load; stop that run first",
                        r->options->resume);
    r->plan.data = t->state.sampler;
    return DDP_OK;
}

/* Copies queries, keys and values into t->fused, or with grads their gradients out of it. */
static void copy_fused(const trainer *t, int grads) {
    for (int i = 0; i < t->slice_count; i++) {
        const slice *s = &t->slices[i];
        const ddp_param *p = &t->params[i].param;
        size_t count = (size_t)ddp_tensor_count(&p->value);
        if (!s->present || t->model.pieces[s->param].box_count == 1) continue;
        if (grads)
            memcpy(p->grad.data, t->grads[s->param] + (size_t)s->box * count, count * sizeof(float));
        else
            memcpy(t->values[s->param] + (size_t)s->box * count, p->value.data, count * sizeof(float));
    }
}

/* Called before the first action of a stage. Unshards it, and sets the pointers to values and gradients.
   Collective over dp. */
static ddp_result unshard_stage(int stage, void *user) {
    trainer *t = (trainer *)user;
    int head = t->model.param_count - 1;
    (void)stage;
    DDP_TRY(ddp_fsdp_unshard(t->fsdp, 0));
    for (int i = 0; i < t->slice_count; i++) {
        const slice *s = &t->slices[i];
        if (!s->present || t->model.pieces[s->param].box_count > 1) continue;
        t->values[s->param] = (float *)t->params[i].param.value.data;
        t->grads[s->param] = (float *)t->params[i].param.grad.data;
    }
    if (t->pp > 1 && is_last(t)) {
        t->values[head] = t->values[0];
        t->grads[head] = t->grads[0];
    }
    copy_fused(t, 0);
    return DDP_OK;
}

static ddp_result reduce_stage(int stage, void *user) {
    (void)stage;
    return ddp_fsdp_reduce_grads(((trainer *)user)->fsdp, 0);
}
static ddp_result reshard_stage(int stage, void *user) {
    (void)stage;
    return ddp_fsdp_reshard(((trainer *)user)->fsdp, 0);
}
/* Waits for the averaged gradients of this rank's rows. INFINITY: `clip` clips them later, by the norm over
   all stages. Collective over dp. */
static ddp_result wait_stage(int stage, void *user) {
    (void)stage;
    return ddp_fsdp_clip_grad_norm(((trainer *)user)->fsdp, INFINITY, NULL);
}

/* The gradient of this rank's rows of slice i. */
static ddp_result gradient_of(const trainer *t, int i, ddp_tensor *grad) {
    return ddp_fsdp_get_shard(t->fsdp, 0, i, NULL, grad, NULL);
}
/* The tied parameter is "wte", the first slice. */
static ddp_result tied_gradient(int stage, int param, ddp_tensor *grad, void *user) {
    (void)stage;
    (void)param;
    return gradient_of((trainer *)user, 0, grad);
}

//== stages ==================================================================================== >>stages

/* Sets the pointers of the stage's units into the memory of one micro-batch. Returns the floats needed;
   memory NULL only counts. */
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

/* Loads the tokens of the micro-batch of the call, and sets the pointers into its memory. */
static ddp_result begin_call(trainer *t, const ddp_pipeline_call *c) {
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

/* The input of unit u of the stage. */
static const float *input_of(const trainer *t, const ddp_pipeline_call *c, int u) {
    if (u > t->first_unit[c->stage]) return t->units[u - 1].out;
    return c->input_count ? (const float *)c->inputs[0].data : NULL;
}

static ddp_result stage_forward(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    DDP_TRY(begin_call(t, c));
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
    DDP_TRY(begin_call(t, c));
    for (int u = t->first_unit[c->stage + 1] - 1; u >= t->first_unit[c->stage]; u--) {
        float *d_in = c->input_count ? (float *)c->input_grads[0].data : NULL;
        if (u > t->first_unit[c->stage]) d_in = t->d_stream;
        if (u == 0)
            DDP_TRY(gpt_tensor_embed_backward(&t->model, t->run.tokens, d_out));
        else if (u + 1 < t->unit_count)
            DDP_TRY(gpt_tensor_block_backward(&t->model, u - 1, input_of(t, c, u), &t->units[u].acts, d_out,
                                              d_in));
        else
            DDP_TRY(gpt_tensor_head_backward(&t->model, input_of(t, c, u), &t->units[u].head, d_in));
        d_out = d_in;
    }
    copy_fused(t, 1);
    return DDP_OK;
}

/* Creates the pipeline along pp, and the sampler. Collective. */
static ddp_result build_pipeline(trainer *t) {
    const ddp_pipeline_tie tie = {0, 0, t->pp - 1, 0}; /* "wte" is the first parameter of both stages */
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_stage *stages = (ddp_pipeline_stage *)calloc((size_t)t->pp, sizeof *stages), *own;
    ddp_result result;
    if (!stages) return run_out_of_memory();
    own = stages + t->stage;
    own->forward = stage_forward;
    own->backward = stage_backward;
    own->user = t;
    own->saved_bytes = place_units(t, NULL) * sizeof(float);
    own->recompute = t->run.options->recompute;
    own->params = t->pointers;
    for (int i = 0; i < t->slice_count; i++)
        if (t->slices[i].present) t->pointers[own->param_count++] = &t->params[i].param;
    own->unshard = unshard_stage;
    own->reshard = reshard_stage;
    own->reduce_grad = reduce_stage;
    own->wait_grad = wait_stage;
    own->get_sharded_grad = tied_gradient;
    own->grad_division = DDP_DIVIDE_BEFORE_REDUCE;
    desc.ties = &tie;
    desc.tie_count = t->pp > 1;
    desc.schedule = t->schedule;
    desc.stages = stages;
    desc.stage_count = t->pp;
    desc.boundary.dtype = DDP_F32;
    desc.boundary.ndim = 2;
    desc.boundary.shape[0] = t->model.rows;
    desc.boundary.shape[1] = t->model.config.channels;
    result = ddp_pipeline_create(&t->pipeline, t->pipeline_group, &desc);
    free(stages);
    DDP_TRY(result);
    return run_build_sampler(&t->run, t->dp, ddp_rank(t->replicas));
}

//== training ================================================================================ >>training

/* Clips all gradients to a norm of 1. *norm is the norm before. The tied matrix is counted once. The sum is
   exact, so it does not depend on stages and shards. Collective. */
static ddp_result clip(trainer *t, float *norm) {
    const ddp_device *device = ddp_group_device(t->run.world);
    ddp_exact_sum sum;
    float factor;
    int count = 0;
    ddp_exact_sum_clear(&sum);
    for (int counted = 1; counted >= 0; counted--) { /* first those that the norm counts, then the others */
        for (int i = 0; i < t->slice_count; i++) {
            if (t->slices[i].counted != counted) continue;
            DDP_TRY(gradient_of(t, i, &t->grad_rows[count]));
            count += t->grad_rows[count].data != NULL;
        }
        if (counted) device->sum_squares(&sum, 0, t->grad_rows, count);
    }
    DDP_TRY(ddp_all_reduce(t->run.world, sum.cell, sum.cell, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, NULL));
    factor = ddp_clip_factor(&sum, 1.0f, norm);
    if (factor != 1) device->scale(t->grad_rows, count, factor);
    return DDP_OK;
}

/* Stores the losses of this replica's micro-batches, from index `first` of the batch, on one of its ranks. */
static ddp_result store_losses(trainer *t, int64_t first, int64_t end) {
    double unused;
    DDP_TRY(ddp_pipeline_get_loss(t->pipeline, &unused, t->micro_losses));
    for (int64_t i = 0; i < t->micro_count && first + i < end; i++)
        if (t->stage == 0 && ddp_rank(t->model.group) == 0) t->run.losses[first + i] = t->micro_losses[i];
    return DDP_OK;
}

/* One optimizer step. *loss is the mean over the global batch, *norm that of the gradients before clipping.
   Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    int64_t first = (int64_t)ddp_rank(t->replicas) * t->micro_count, count = (int64_t)t->micro_count * t->dp;
    double start = ddp_now();
    for (int i = 0; i < r->plan.config.batch / t->dp; i++) t->starts[i] = next_sequence(r);
    DDP_TRY(ddp_pipeline_step(t->pipeline));
    DDP_TRY(store_losses(t, first, count));
    DDP_TRY(clip(t, norm));
    DDP_TRY(ddp_fsdp_step(t->fsdp, ddp_lr_at(&r->lr, step)));
    DDP_TRY(run_mean_loss(r, count, loss));
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation text, micro_count micro-batches at a time. Each replica computes a contiguous
   block of them. A replica with fewer still takes part in the collectives. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    int64_t count = validation_micro_batches(&r->plan), share = (count + t->dp - 1) / t->dp,
            first = ddp_rank(t->replicas) * share;
    int64_t end = first + share < count ? first + share : count;
    for (t->validating = first; t->validating < first + share; t->validating += t->micro_count) {
        DDP_TRY(ddp_pipeline_evaluate(t->pipeline));
        DDP_TRY(store_losses(t, t->validating, end));
    }
    return run_mean_loss(r, count, loss);
}

/* Computes the validation loss. Writes a checkpoint after training steps and at the end. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    DDP_TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    if (!r->options->checkpoint || (step == r->plan.first_step && step < r->plan.config.steps)) return DDP_OK;
    folder_state(&t->state, &r->plan);
    DDP_TRY(ddp_sampler_save(&r->sampler, &t->state.sampler));
    return ddp_fsdp_save(t->fsdp, r->options->checkpoint);
}

//== end of the run =============================================================================== >>end

/* All-gathers a parameter into t->full, as a sum of zeros and the rows of each rank. Collective. */
static ddp_result gather_full(trainer *t, int param) {
    size_t count = (size_t)t->run.infos[param].count, columns = (size_t)t->model.pieces[param].columns;
    memset(t->full, 0, count * sizeof(float));
    for (int i = 0; i < t->slice_count; i++) {
        ddp_tensor rows;
        int64_t first;
        if (t->slices[i].param != param || !t->slices[i].counted) continue;
        DDP_TRY(ddp_fsdp_get_shard(t->fsdp, 0, i, &rows, NULL, &first));
        for (int64_t j = 0; rows.data && j < rows.shape[0]; j++)
            memcpy(t->full + gpt_box_row(box_of(t, &t->slices[i]), first + j),
                   (float *)rows.data + (size_t)j * columns, columns * sizeof(float));
    }
    return ddp_all_reduce(t->run.world, t->full, t->full, count, DDP_F32, DDP_OP_SUM, NULL);
}

static ddp_result print_table(const trainer *t) {
    const run *r = &t->run;
    ddp_fsdp_memory memory = DDP_ZERO;
    DDP_TRY(ddp_fsdp_get_memory(t->fsdp, &memory));
    if (r->rank != 0) return DDP_OK;
    printf("\n  ranks   pp   dp   tp   micro-batches   tokens/s   predicted bubble   measured bubble   "
           "bytes on rank 0: values and moments, activations\n");
    printf("  %5d   %2d   %2d   %2d   %13d   %8.0f   %15.1f%%   %14.1f%%   %zu %zu\n\n", r->world_size, t->pp,
           t->dp, t->tp, t->micro_count, tokens_per_second(r, r->plan.config.steps),
           100 * t->stats.predicted_bubble_rate, 100 * t->stats.bubble_rate,
           memory.now.shards + memory.now.optimizer, t->stats.activation_bytes);
    return DDP_OK;
}

/* Gathers and hashes all values, prints a sample and a table, and finishes the run. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    uint64_t hash = HASH_START;
    if (r->rank == 0 && gpt_model_create(&r->model, &t->model.config, 1, GPT_OWN_VALUES) != 0)
        return run_out_of_memory();
    for (int i = 0; i < t->model.param_count; i++) {
        size_t size_bytes = (size_t)r->infos[i].count * sizeof(float);
        if (r->infos[i].tied_to >= 0) continue;
        DDP_TRY(gather_full(t, i));
        hash = hash_bytes(hash, t->full, size_bytes);
        if (r->rank == 0) memcpy(r->model.values[i], t->full, size_bytes);
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
    free(t->grad_rows);
    free(t->d_stream);
    free(t->full);
    free(t->starts);
    free(t->micro_losses);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    return run_trainer(world, (job *)user, sizeof(trainer), train, trainer_free);
}

/* The ranks to start without --ranks: those of the mesh; 0 without a mesh. For a mesh that is too large for
   one machine, start one rank, which reports that a launcher is needed. */
static int mesh_ranks(const run_options *o) {
    int64_t pp = o->stages ? o->stages : 1;
    int64_t dp = o->replicas ? o->replicas : 1;
    int64_t tp = o->tensor ? o->tensor : 1;
    int64_t ranks = pp * dp * tp;
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

/*  train_gpt_tensor.c - train_gpt with every matrix cut over the ranks of a tensor group, and the same losses.

USAGE
    cc -O3 -march=native examples/train_gpt_tensor.c -o train_gpt_tensor -lm -lpthread
    ./train_gpt_tensor [flags] [files or folders]    --tp N, --sequence-parallel, --chunks N; --help lists the flags
    mpirun -n 4 ./train_gpt_tensor --tp 2            the ranks of a launcher: two replicas of two ranks each

RANKS
    dp x tp of them. The tp ranks of a tensor group are neighbours, hold one model together and see the same micro-batches. Groups are replicas: the
    batch is dealt to them in blocks, as train_gpt deals it to ranks, and a reducer averages along dp what rank k of each of them has.

A BLOCK
    Each rank has heads / tp heads and 4 channels / tp of the MLP's middle, from the weights that train_gpt starts with:

        in --norm--> qkv --attention--> proj --(+ in)--> middle --norm--> fc --gelu--> mlp --(+ middle)--> out
                    column     own       row                             column          row
                    linear    heads     linear                           linear         linear

    Nothing is sent between a column linear and its row linear; behind the row linear a sum over the group is due, and in backward one behind the column
    linear. With --sequence-parallel what is outside of these pairs, stream and norms, is cut by tokens, and sums become reduce-scatters and
    all-gathers. The embedding's rows, which the head uses too, are cut along the vocabulary, and so is the loss.

    Sums of products are cut as well, so that losses are those of train_gpt but for rounding; the hash in the last line is another one for another
    --tp, and the same for any number of replicas. A checkpoint holds the global model: it is train_gpt's own, and goes on there or here, under another --tp.
*/
#define DDP_IMPLEMENTATION
#include "../ddp_tensor.h"
#define TRAIN_PROMISE "The same --batch and --micro-batch give the losses of train_gpt, but for rounding, on any number of ranks."
#include "checkpoint.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--tp", FLAG_INT32, NOT_SAVED, AT(tensor), 1, DDP_MAX_LOCAL_RANKS, "N ranks of a tensor group; default: as many as divide ranks and heads"},
    {"--sequence-parallel", FLAG_SWITCH, NOT_SAVED, AT(sequence_parallel), 0, 1, "stream and norms are cut by tokens"},
    {"--chunks", FLAG_INT32, NOT_SAVED, AT(chunks), 1, 64, "N pieces in which tokens travel while others are multiplied; default 1"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0, "FILE save there at every validation and at the end, as train_gpt does"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0, "FILE go on from a checkpoint, train_gpt's too, with any --tp on any number of ranks"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "this text"},
};
static const run_program PROGRAM = {"train_gpt_tensor", "trains a byte-level GPT on text with tensor-parallel ranks", FLAGS,
                                    (int)(sizeof FLAGS / sizeof FLAGS[0])};

//== trainer ============================================================================================== >>trainer

/* What a block keeps of a micro-batch. M tokens; S = M, or M / tp in sequence parallelism; L = C / tp columns of this rank's heads. */
typedef struct block_acts {
    float *in;                      /* (S, C); the one behind the last block is the head's */
    float *ln1, *ln1_stats;         /* (S, C) (2 S) */
    float *qkv, *lse, *attention;   /* (M, 3L) (B, NH / tp, T) (M, L) */
    float *middle;                  /* (S, C) */
    float *ln2, *ln2_stats, *mlp;   /* (S, C) (2 S) (what ddp_tp_mlp saves) */
} block_acts;

/* A rank's part of a parameter: one box of the global one, or, of queries, keys and values, three. */
typedef struct piece {
    int box_count;
    ddp_placement placement; /* of a box in its third, or in the whole */
    ddp_tensor_box box[3];
    int64_t rows, columns;   /* of all boxes, one below the other; a vector has one column */
} piece;

/* One rank. */
typedef struct trainer {
    run run;
    text_buffer saved;               /* rank 0: the file of --resume, its header is in saved_header */
    checkpoint_header saved_header;
    gpt_config config, own;          /* the model's; and with this rank's heads and their channels alone */
    int param_count, tp_ranks;
    int64_t tokens, rows;            /* M and S */
    ddp_mesh *mesh;
    ddp_group *tensor, *replicas;    /* along tp; along dp */
    ddp_tp *tp;
    ddp_tp_embedding *embedding;     /* layers hold no weights: one of a kind does for all blocks */
    ddp_tp_layer_norm *norm;
    ddp_tp_linear *qkv, *proj, *head;
    ddp_tp_mlp *mlp;
    piece *pieces;                   /* param_count each, as what follows */
    ddp_param *params;
    float **values, **grads, **first, **second; /* AdamW's moments: NULL where a parameter shares the value of an earlier one */
    block_acts *acts;                /* layers + 1 */
    float *ln_f, *ln_f_stats, *logits;                 /* (S, C) (2 S) (M, this rank's part of the vocabulary) */
    float *d, *d_middle, *d_norm, *d_attention, *d_qkv; /* gradients: (S, C) (S, C) (S, C) (M, L) (M, 3L) */
    float *scratch, *memory, *whole; /* whole: room for the largest parameter */
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    uint64_t elements_sent;          /* by layers in training steps; likewise */
    double comm_seconds;
} trainer;

/* The largest number that divides both. */
static int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

/* The divisor of number that is nearest to wish. */
static int nearest_divisor(int number, int wish) {
    int distance = 0;
    while (number % (wish + distance) && (wish <= distance || number % (wish - distance))) distance++;
    return wish > distance && number % (wish - distance) == 0 ? wish - distance : wish + distance;
}

static int tensor_ranks(const run *r, int heads) { return r->options->tensor ? r->options->tensor : common_divisor(r->world_size, heads); }

/* Rank 0: everything that can be wrong with the input is found here, before training and before anything is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    const run_config *c = &r->plan.config;
    int tp, heads, better;
    TRY(check_options(o, r->world_size));
    if (o->checkpoint) TRY(check_writable(o->checkpoint));
    if (o->resume) TRY(checkpoint_read(o->resume, &t->saved, &t->saved_header));
    heads = o->config.heads ? o->config.heads : o->resume ? t->saved_header.run.config.heads : 4;
    tp = tensor_ranks(r, heads);
    better = nearest_divisor(common_divisor(r->world_size, heads), tp);
    if (r->world_size % tp) return WRONG("--tp %d does not divide %d ranks; use --tp %d", tp, r->world_size, better);
    if (heads % tp) return WRONG("--heads %d cannot be dealt out to --tp %d ranks; use --tp %d", heads, tp, better);
    TRY(make_plan(&r->plan, o, r->world_size / tp, o->resume ? &t->saved_header.run : NULL, &r->text));
    if (c->micro_batch > INT32_MAX / c->context) return run_no_room();
    if (o->sequence_parallel && c->micro_batch * c->context % tp)
        return WRONG("--sequence-parallel deals the tokens of --micro-batch %d x --context %d out to --tp %d ranks; use --context %d", c->micro_batch,
                     c->context, tp, (c->context + tp - 1) / tp * tp);
    return DDP_OK;
}

/* The model's own product is the layers' too. */
static ddp_result multiply(const ddp_gemm *g, void *user) {
    gpt_matrix a, b;
    gpt_output out;
    a.data = (const float *)g->a, a.row = g->trans_a ? 1 : (size_t)g->lda, a.column = g->trans_a ? (size_t)g->lda : 1;
    b.data = (const float *)g->b, b.row = g->trans_b ? 1 : (size_t)g->ldb, b.column = g->trans_b ? (size_t)g->ldb : 1;
    out.c = (float *)g->c, out.row = (size_t)g->ldc, out.bias = NULL, out.add = g->accumulate ? out.c : NULL;
    if (g->k > 0) gpt_gemm((float *)user, (int)g->m, (int)g->n, (int)g->k, a, b, out);
    for (int64_t i = 0; i < g->m && g->k == 0 && !g->accumulate; i++) memset(out.c + i * g->ldc, 0, (size_t)g->n * sizeof(float));
    return DDP_OK;
}

/* Ranks as a grid, and what all blocks compute with. Collective. */
static ddp_result build_layers(trainer *t) {
    run *r = &t->run;
    ddp_mesh_desc mesh = DDP_ZERO;
    ddp_tp_desc tp = DDP_ZERO;
    ddp_tp_embedding_desc embedding = DDP_ZERO;
    ddp_tp_layer_norm_desc norm = DDP_ZERO;
    ddp_tp_linear_desc qkv = DDP_ZERO, proj = DDP_ZERO, head = DDP_ZERO;
    ddp_tp_mlp_desc mlp = DDP_ZERO;
    int C = t->config.channels;

    mesh.ndim = 2;
    mesh.shape[0] = r->world_size / t->tp_ranks, mesh.names[0] = "dp";
    mesh.shape[1] = t->tp_ranks, mesh.names[1] = "tp";
    TRY(ddp_mesh_create(&t->mesh, r->world, &mesh));
    t->replicas = ddp_mesh_group(t->mesh, "dp");
    t->tensor = ddp_mesh_group(t->mesh, "tp");

    tp.max_rows = t->tokens;
    tp.sequence_parallel = r->options->sequence_parallel;
    tp.chunk_count = r->options->chunks;
    tp.gemm = multiply;
    tp.gemm_user = t->scratch;
    TRY(ddp_tp_create(&t->tp, t->tensor, &tp));
    embedding.vocab = t->config.vocab, embedding.channels = C;
    TRY(ddp_tp_embedding_create(&t->embedding, t->tp, &embedding));
    norm.channels = C;
    TRY(ddp_tp_layer_norm_create(&t->norm, t->tp, &norm));
    qkv.split = DDP_TP_COLUMN, qkv.in_features = C, qkv.heads = t->config.heads;
    TRY(ddp_tp_linear_create(&t->qkv, t->tp, &qkv));
    proj.split = DDP_TP_ROW, proj.in_features = proj.out_features = C;
    TRY(ddp_tp_linear_create(&t->proj, t->tp, &proj));
    mlp.channels = C, mlp.hidden = 4 * C;
    TRY(ddp_tp_mlp_create(&t->mlp, t->tp, &mlp));
    head.split = DDP_TP_COLUMN, head.in_features = C, head.out_features = t->config.vocab, head.no_bias = 1;
    return ddp_tp_linear_create(&t->head, t->tp, &head);
}

/* Which boxes of parameter `index` this rank has. */
static ddp_result find_piece(const trainer *t, int index, piece *p) {
    const gpt_param *info = &t->run.infos[index];
    const int kind = info->unit >= 1 && info->unit <= t->config.layers ? (index - 2) % GPT_BLOCK_PARAMS : -1;
    ddp_tp_linear *linear = NULL;
    if (kind == GPT_QKV_WEIGHT || kind == GPT_QKV_BIAS) linear = t->qkv;
    if (kind == GPT_ATTN_WEIGHT || kind == GPT_ATTN_BIAS) linear = t->proj;
    if (kind == GPT_FC_WEIGHT || kind == GPT_FC_BIAS) linear = ddp_tp_mlp_linear(t->mlp, 0);
    if (kind == GPT_MLP_WEIGHT || kind == GPT_MLP_BIAS) linear = ddp_tp_mlp_linear(t->mlp, 1);
    p->box_count = linear && linear == t->qkv ? 3 : 1;
    for (int k = 0; k < p->box_count; k++) {
        ddp_tensor_box *box = &p->box[k];
        if (linear) TRY(info->ndim > 1 ? ddp_tp_linear_weight_box(linear, k, box) : ddp_tp_linear_bias_box(linear, k, box));
        else if (index == 0 || info->tied_to == 0) TRY(ddp_tp_embedding_box(t->embedding, box));
        else TRY(ddp_placement_box(DDP_REPLICATE, info->ndim, info->shape, 0, 1, box));
        p->columns = box->ndim > 1 ? box->shape[1] : 1;
        p->rows += box->shape[0];
        for (int d = 0; d < box->ndim; d++)
            if (box->shape[d] < box->global_shape[d]) p->placement = DDP_SHARD(d);
    }
    return DDP_OK;
}

/* Elements from one row of the global matrix to the next. */
static int64_t box_stride(const ddp_tensor_box *box) { return box->ndim > 1 ? box->global_shape[1] : 1; }

/* Where row i of the box begins in the global matrix. */
static int64_t box_row(const ddp_tensor_box *box, int64_t i) { return (box->offset[0] + i) * box_stride(box) + (box->ndim > 1 ? box->offset[1] : 0); }

/* First values are drawn row by row, as in the whole matrix; or they are this rank's part of it. */
static void fill_piece(const trainer *t, int index, const float *whole, float *to) {
    size_t columns = (size_t)t->pieces[index].columns;
    for (int k = 0; k < t->pieces[index].box_count; k++) {
        const ddp_tensor_box *box = &t->pieces[index].box[k];
        for (int64_t i = 0; i < box->shape[0]; i++, to += columns)
            if (whole) memcpy(to, whole + box_row(box, i), columns * sizeof(float));
            else gpt_param_init(&t->config, (uint64_t)t->run.plan.config.seed, index, box_row(box, i), (int64_t)columns, to);
    }
}

/* Values and moments from rank 0's checkpoint, tensor by tensor. Collective. */
static ddp_result load_checkpoint(trainer *t) {
    run *r = &t->run;
    float *const *const tables[] = {t->values, t->first, t->second};
    const uint8_t *from = t->saved.bytes + sizeof(checkpoint_header);
    TRY(share_result(r->world, r->rank == 0 ? checkpoint_check(r, &t->saved_header) : DDP_OK));
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < t->param_count; i++) {
            size_t count = (size_t)r->infos[i].count;
            if (r->infos[i].tied_to >= 0) continue;
            if (r->rank == 0) memcpy(t->whole, from, count * sizeof(float)), from += count * sizeof(float);
            TRY(ddp_broadcast(r->world, t->whole, count, DDP_F32, 0, NULL));
            fill_piece(t, i, t->whole, tables[k][i]);
        }
    free(t->saved.bytes);
    memset(&t->saved, 0, sizeof t->saved);
    return DDP_OK;
}

//== memory ================================================================================================ >>memory

/* Lays out values, moments and activations; memory NULL only counts. */
static size_t place(trainer *t, float *memory) {
    size_t used = 0, C = (size_t)t->config.channels, L = (size_t)t->own.channels, M = (size_t)t->tokens, S = (size_t)t->rows;
    for (int i = 0; i < t->param_count; i++) {
        size_t count = (size_t)(t->pieces[i].rows * t->pieces[i].columns);
        if (t->run.infos[i].tied_to >= 0) { t->values[i] = t->values[t->run.infos[i].tied_to]; continue; }
        t->values[i] = gpt__take(memory, &used, count);
        t->first[i] = gpt__take(memory, &used, count);
        t->second[i] = gpt__take(memory, &used, count);
    }
    for (int l = 0; l <= t->config.layers; l++) {
        block_acts *a = &t->acts[l];
        a->in = gpt__take(memory, &used, S * C);
        if (l == t->config.layers) break;
        a->ln1 = gpt__take(memory, &used, S * C);
        a->ln1_stats = gpt__take(memory, &used, 2 * S);
        a->qkv = gpt__take(memory, &used, M * 3 * L);
        a->lse = gpt__take(memory, &used, M * (size_t)t->own.heads);
        a->attention = gpt__take(memory, &used, M * L);
        a->middle = gpt__take(memory, &used, S * C);
        a->ln2 = gpt__take(memory, &used, S * C);
        a->ln2_stats = gpt__take(memory, &used, 2 * S);
        a->mlp = gpt__take(memory, &used, ddp_tp_mlp_saved_count(t->mlp, t->tokens));
    }
    t->ln_f = gpt__take(memory, &used, S * C);
    t->ln_f_stats = gpt__take(memory, &used, 2 * S);
    t->logits = gpt__take(memory, &used, M * (size_t)ddp_tp_linear_out_features(t->head));
    t->d = gpt__take(memory, &used, S * C);
    t->d_middle = gpt__take(memory, &used, S * C);
    t->d_norm = gpt__take(memory, &used, S * C);
    t->d_attention = gpt__take(memory, &used, M * L);
    t->d_qkv = gpt__take(memory, &used, M * 3 * L);
    return used;
}

/* Arrays, layers, and this rank's parts of the parameters with their first values. Collective. */
static ddp_result build_model(trainer *t) {
    run *r = &t->run;
    size_t count, largest = 0;
    TRY(run_build_arrays(r));
    t->config = t->own = run_model_config(r);
    t->tp_ranks = tensor_ranks(r, t->config.heads);
    t->own.heads /= t->tp_ranks, t->own.channels /= t->tp_ranks;
    t->tokens = (int64_t)r->plan.config.micro_batch * r->plan.config.context;
    t->rows = r->options->sequence_parallel ? t->tokens / t->tp_ranks : t->tokens;
    t->param_count = gpt_param_count(&t->config);
    count = (size_t)t->param_count;
    t->scratch = (float *)calloc(gpt_scratch_floats(&t->own, t->own.context), sizeof(float));
    t->pieces = (piece *)calloc(count, sizeof *t->pieces);
    t->params = (ddp_param *)calloc(count, sizeof *t->params);
    t->values = (float **)calloc(count * 4, sizeof *t->values);
    t->acts = (block_acts *)calloc((size_t)t->config.layers + 1, sizeof *t->acts);
    if (!t->scratch || !t->pieces || !t->params || !t->values || !t->acts) return run_no_room();
    t->grads = t->values + count, t->first = t->grads + count, t->second = t->first + count;
    TRY(build_layers(t));

    for (int i = 0; i < t->param_count; i++) TRY(find_piece(t, i, &t->pieces[i]));
    for (int i = 0; i < t->param_count; i++) largest = (size_t)r->infos[i].count > largest ? (size_t)r->infos[i].count : largest;
    t->memory = (float *)calloc(place(t, NULL) + 16, sizeof(float));
    t->whole = (float *)calloc(largest, sizeof(float));
    if (!t->memory || !t->whole) return run_no_room();
    place(t, (float *)GPT_ROUND_UP((uintptr_t)t->memory, 64));
    for (int i = 0; i < t->param_count; i++) {
        run_describe(r, i, &t->params[i]);
        t->params[i].value.data = t->values[i];
        t->params[i].value.shape[0] = t->pieces[i].rows;
        if (t->params[i].value.ndim > 1) t->params[i].value.shape[1] = t->pieces[i].columns;
        if (r->infos[i].tied_to < 0 && r->plan.first_step == 0) fill_piece(t, i, NULL, t->values[i]);
    }
    return r->plan.first_step > 0 ? load_checkpoint(t) : DDP_OK;
}

/* What makes replicas of the tensor groups. Collective. */
static ddp_result build_parallel(trainer *t) {
    run *r = &t->run;
    int replicas = ddp_world_size(t->replicas);
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc accumulator = DDP_ZERO;

    r->micro_count = r->plan.config.batch / r->plan.config.micro_batch / replicas;
    reducer.params = t->params;
    reducer.param_count = t->param_count;
    reducer.micro_batch_count = r->micro_count;
    TRY(ddp_reducer_create(&t->reducer, t->replicas, &reducer));
    for (int i = 0; i < t->param_count; i++) t->grads[i] = (float *)t->params[i].grad.data;

    accumulator.params = t->params;
    accumulator.param_count = t->param_count;
    accumulator.micro_batch_count = r->micro_count;
    accumulator.reducer = t->reducer;
    TRY(ddp_accumulator_create(&t->accumulator, t->replicas, &accumulator));
    return run_build_sampler(r, replicas, ddp_rank(t->replicas));
}

//== forward and backward =================================================================================== >>passes

/* What attention is called with: a model of this rank's heads. */
static gpt_pass attention_pass(const trainer *t) {
    gpt_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.config = &t->own;
    pass.batch = t->run.plan.config.micro_batch;
    pass.length = t->own.context;
    pass.scratch = t->scratch;
    return pass;
}

static void add(float *to, const float *what, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += what[i];
}

/* The row of wpe, or of its gradient, that belongs to row i of this rank's stream. */
static float *position(const trainer *t, float *const *table, int64_t i) {
    int64_t first = t->run.options->sequence_parallel ? ddp_rank(t->tensor) * t->rows : 0;
    return table[1] + (first + i) % t->config.context * t->config.channels;
}

static ddp_result block_forward(trainer *t, int layer) {
    gpt_block w = gpt_block_view(t->values, layer);
    block_acts *a = &t->acts[layer];
    const void *const mlp[4] = {w.fc_weight, w.fc_bias, w.mlp_weight, w.mlp_bias};
    float *out = t->acts[layer + 1].in;
    gpt_pass pass = attention_pass(t);
    TRY(ddp_tp_layer_norm_forward(t->norm, w.ln1_weight, w.ln1_bias, a->in, t->rows, a->ln1_stats, a->ln1));
    TRY(ddp_tp_linear_forward(t->qkv, w.qkv_weight, w.qkv_bias, a->ln1, t->tokens, a->qkv));
    gpt_attention(&pass, a->attention, a->lse, a->qkv);
    TRY(ddp_tp_linear_forward(t->proj, w.attn_weight, w.attn_bias, a->attention, t->tokens, a->middle));
    add(a->middle, a->in, t->rows * t->config.channels);
    TRY(ddp_tp_layer_norm_forward(t->norm, w.ln2_weight, w.ln2_bias, a->middle, t->rows, a->ln2_stats, a->ln2));
    TRY(ddp_tp_mlp_forward(t->mlp, mlp, a->ln2, t->tokens, a->mlp, out));
    add(out, a->middle, t->rows * t->config.channels);
    return DDP_OK;
}

/* The mean loss of the micro-batch; with_grads: the logits become their gradient. Collective over the tensor group. */
static ddp_result forward(trainer *t, double *loss, int with_grads) {
    gpt_head w = gpt_head_view(&t->config, t->values);
    ddp_tp_loss_desc desc = DDP_ZERO;
    const float *in = t->acts[t->config.layers].in;
    desc.vocab = t->config.vocab;
    TRY(ddp_tp_embedding_forward(t->embedding, t->values[0], t->run.tokens, t->tokens, t->acts[0].in));
    for (int64_t i = 0; i < t->rows; i++) add(t->acts[0].in + i * t->config.channels, position(t, t->values, i), t->config.channels);
    for (int layer = 0; layer < t->config.layers; layer++) TRY(block_forward(t, layer));
    TRY(ddp_tp_layer_norm_forward(t->norm, w.ln_weight, w.ln_bias, in, t->rows, t->ln_f_stats, t->ln_f));
    TRY(ddp_tp_linear_forward(t->head, w.weight, NULL, t->ln_f, t->tokens, t->logits));
    return ddp_tp_cross_entropy(t->tp, &desc, t->logits, t->run.targets, t->tokens, NULL, loss, with_grads ? t->logits : NULL);
}

/* These gradients are final: the last micro-batch's are sent along dp while backward goes on. A block may also run without replicas. */
static ddp_result ready(trainer *t, int last, int first) {
    for (int i = last; i >= first && t->accumulator; i--) TRY(ddp_accumulator_ready(t->accumulator, i));
    return DDP_OK;
}

/* t->d, the gradient of the block's output, becomes that of its input. */
static ddp_result block_backward(trainer *t, int layer) {
    gpt_block w = gpt_block_view(t->values, layer), g = gpt_block_view(t->grads, layer);
    block_acts *a = &t->acts[layer];
    const void *const mlp[4] = {w.fc_weight, w.fc_bias, w.mlp_weight, w.mlp_bias};
    void *const mlp_grads[4] = {g.fc_weight, g.fc_bias, g.mlp_weight, g.mlp_bias};
    gpt_pass pass = attention_pass(t);
    TRY(ddp_tp_mlp_backward(t->mlp, mlp, a->ln2, a->mlp, t->d, t->tokens, t->d_norm, mlp_grads));
    TRY(ready(t, w.first + GPT_MLP_BIAS, w.first + GPT_FC_WEIGHT));
    TRY(ddp_tp_layer_norm_backward(t->norm, w.ln2_weight, a->middle, a->ln2_stats, t->d_norm, t->rows, t->d_middle, g.ln2_weight, g.ln2_bias));
    TRY(ready(t, w.first + GPT_LN2_BIAS, w.first + GPT_LN2_WEIGHT));
    add(t->d_middle, t->d, t->rows * t->config.channels);
    TRY(ddp_tp_linear_backward(t->proj, w.attn_weight, a->attention, t->d_middle, t->tokens, t->d_attention, g.attn_weight, g.attn_bias));
    TRY(ready(t, w.first + GPT_ATTN_BIAS, w.first + GPT_ATTN_WEIGHT));
    gpt_attention_backward(&pass, t->d_qkv, t->d_attention, a->attention, a->lse, a->qkv);
    TRY(ddp_tp_linear_backward(t->qkv, w.qkv_weight, a->ln1, t->d_qkv, t->tokens, t->d_norm, g.qkv_weight, g.qkv_bias));
    TRY(ready(t, w.first + GPT_QKV_BIAS, w.first + GPT_QKV_WEIGHT));
    TRY(ddp_tp_layer_norm_backward(t->norm, w.ln1_weight, a->in, a->ln1_stats, t->d_norm, t->rows, t->d, g.ln1_weight, g.ln1_bias));
    add(t->d, t->d_middle, t->rows * t->config.channels);
    return ready(t, w.first + GPT_LN1_BIAS, w.first + GPT_LN1_WEIGHT);
}

/* After forward with_grads: every gradient of the micro-batch. Positions are whole on every rank; in sequence parallelism each sees its tokens alone,
   and their gradients add up over the group, as those of norms do inside their layer. */
static ddp_result backward(trainer *t) {
    gpt_head w = gpt_head_view(&t->config, t->values), g = gpt_head_view(&t->config, t->grads);
    const float *in = t->acts[t->config.layers].in;
    size_t positions = (size_t)t->config.context * (size_t)t->config.channels;
    TRY(ddp_tp_linear_backward(t->head, w.weight, t->ln_f, t->logits, t->tokens, t->d_norm, g.weight, NULL));
    TRY(ddp_tp_layer_norm_backward(t->norm, w.ln_weight, in, t->ln_f_stats, t->d_norm, t->rows, t->d, g.ln_weight, g.ln_bias));
    TRY(ready(t, w.first + 2, w.first));
    for (int layer = t->config.layers - 1; layer >= 0; layer--) TRY(block_backward(t, layer));
    memset(t->grads[1], 0, positions * sizeof(float));
    for (int64_t i = 0; i < t->rows; i++) add(position(t, t->grads, i), t->d + i * t->config.channels, t->config.channels);
    if (t->run.options->sequence_parallel)
        TRY(ddp_all_reduce(t->tensor, t->grads[1], t->grads[1], positions, DDP_F32, DDP_OP_SUM, NULL));
    TRY(ddp_tp_embedding_backward(t->embedding, t->run.tokens, t->d, t->tokens, t->grads[0]));
    return ready(t, 1, 0);
}

//== training ============================================================================================ >>training

/* The norm over all ranks of the group, each element counted once: what is whole on every rank is the first one's. An exact sum of rows. *scale is what
   clips it to 1. Collective over the tensor group. */
static ddp_result clip(const trainer *t, float *norm, float *scale) {
    const ddp_device *device = ddp_group_device(t->tensor);
    ddp_exact_sum sum;
    ddp_exact_sum_clear(&sum);
    for (int i = 0; i < t->param_count; i++) {
        const piece *p = &t->pieces[i];
        if (t->first[i] && (p->placement != DDP_REPLICATE || ddp_rank(t->tensor) == 0))
            device->sum_squares(&sum, t->grads[i], (size_t)p->rows, (size_t)p->columns, DDP_F32);
    }
    TRY(ddp_all_reduce(t->tensor, sum.cell, sum.cell, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, NULL));
    *norm = (float)sqrt(ddp_exact_sum_value(&sum));
    *scale = *norm > 1 ? 1 / *norm : 1;
    return DDP_OK;
}

/* AdamW on every value once: a tied parameter's gradient is in its first use. Only matrices decay. */
static void update(trainer *t, int64_t step, float scale) {
    run *r = &t->run;
    float lr = learning_rate(&r->plan.config, step);
    for (int i = 0; i < t->param_count; i++) {
        if (!t->first[i]) continue;
        gpt_adamw(t->values[i], t->grads[i], t->first[i], t->second[i], (size_t)(t->pieces[i].rows * t->pieces[i].columns), lr, 0.9f, 0.95f, 1e-8f,
                  r->infos[i].ndim > 1 ? 0.1f : 0.0f, (int)step, scale);
    }
}

/* The loss of a micro-batch, number `index` of the batch, counts once: the group's first rank says it. */
static void keep_loss(trainer *t, int64_t index, double loss) {
    if (ddp_rank(t->tensor) == 0) t->run.losses[index] = loss;
}

/* One optimizer step. *loss is the global batch's, *norm that of the gradient before clipping. Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    run *r = &t->run;
    ddp_tp_stats stats = DDP_ZERO;
    double start = ddp_now(), each;
    float scale;
    ddp_tp_reset_stats(t->tp);
    for (int micro = 0; micro < r->micro_count; micro++) {
        for (int row = 0; row < r->plan.config.micro_batch; row++) take_window(r, row, next_window(r));
        TRY(forward(t, &each, 1));
        keep_loss(t, ddp_rank(t->replicas) * r->micro_count + micro, each);
        TRY(backward(t));
        TRY(ddp_accumulator_next(t->accumulator, NULL));
    }
    TRY(ddp_reducer_wait(t->reducer));
    TRY(clip(t, norm, &scale));
    update(t, step, scale);
    TRY(run_mean_loss(r, (int64_t)r->micro_count * ddp_world_size(t->replicas), loss));
    TRY(ddp_tp_get_stats(t->tp, &stats));
    t->elements_sent += stats.elements_sent;
    t->comm_seconds += stats.comm_seconds;
    r->train_seconds += ddp_now() - start;
    return run_check_step(step, *loss, *norm);
}

/* Mean loss over the validation windows. Replicas take contiguous shares of the micro-batches, which are the same on any number of them. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    int64_t count = validation_micro_batches(&r->plan), replicas = ddp_world_size(t->replicas), share = (count + replicas - 1) / replicas;
    int64_t first = ddp_rank(t->replicas) * share;
    double each;
    for (int64_t i = first; i < first + share && i < count; i++) {
        take_validation_windows(r, i);
        TRY(forward(t, &each, 0));
        keep_loss(t, i, each);
    }
    return run_mean_loss(r, count, loss);
}

/* The whole of a parameter, or of its moments, of which this rank has `from`: t->whole on every rank of the group. Collective over the tensor group. */
static ddp_result gather(trainer *t, int index, float *from) {
    const piece *p = &t->pieces[index];
    float *whole = t->whole;
    for (int k = 0; k < p->box_count; k++) {
        ddp_tensor in = t->params[index].value, out = in;
        in.data = from, out.data = whole;
        for (int d = 0; d < in.ndim; d++) in.shape[d] = p->box[k].shape[d], out.shape[d] = p->box[k].global_shape[d];
        out.shape[0] /= p->box_count; /* queries, keys, values: each is a third of its own */
        TRY(ddp_tensor_redistribute(t->tensor, &in, p->placement, DDP_REPLICATE, &out));
        from += ddp_tensor_count(&in), whole += ddp_tensor_count(&out);
    }
    return DDP_OK;
}

/* The first replica's ranks give their parts, rank 0 writes. Collective. */
static ddp_result save_checkpoint(trainer *t, const char *path, int64_t step) {
    run *r = &t->run;
    float *const *const tables[] = {t->values, t->first, t->second};
    checkpoint_writer w;
    ddp_result result;
    TRY(share_result(r->world, r->rank == 0 ? checkpoint_begin(&w, r, path, step) : DDP_OK));
    result = DDP_OK;
    for (int k = 0; k < 3 && ddp_rank(t->replicas) == 0; k++)
        for (int i = 0; i < t->param_count && result == DDP_OK; i++) {
            if (r->infos[i].tied_to >= 0) continue;
            result = gather(t, i, tables[k][i]);
            if (r->rank == 0 && result == DDP_OK) checkpoint_put(&w, t->whole, (size_t)r->infos[i].count * sizeof(float));
        }
    if (r->rank == 0 && result == DDP_OK) result = checkpoint_end(&w, path);
    else if (r->rank == 0) fclose(w.file), unlink(w.temporary);
    return result == DDP_OK || r->rank == 0 ? share_result(r->world, result) : result;
}

/* The validation loss, and after training steps a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    return r->options->checkpoint && step > r->plan.first_step ? save_checkpoint(t, r->options->checkpoint, step) : DDP_OK;
}

//== the end ================================================================================================== >>end

/* The hash of the global weights; rank 0 keeps them. Collective. */
static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    run *r = &t->run;
    *hash = HASH_START;
    for (int i = 0; i < t->param_count; i++) {
        size_t size_bytes = (size_t)r->infos[i].count * sizeof(float);
        if (r->infos[i].tied_to >= 0) continue;
        TRY(gather(t, i, t->values[i]));
        *hash = hash_bytes(*hash, t->whole, size_bytes);
        if (r->rank == 0) memcpy(r->model.values[i], t->whole, size_bytes);
    }
    return DDP_OK;
}

/* waiting: seconds, mean over ranks. */
static void print_table(const trainer *t, double waiting) {
    const run *r = &t->run;
    double steps = r->plan.config.steps > r->plan.first_step ? (double)(r->plan.config.steps - r->plan.first_step) : 1;
    printf("\n  ranks   tp   chunks   sequence parallel   tokens/s   elements sent per rank and step   waiting for the tensor group\n");
    printf("  %5d   %2d   %6d   %17s   %8.0f   %32.0f   %.4f s per step, %.2f%% of the time\n\n", r->world_size, t->tp_ranks,
           r->options->chunks ? r->options->chunks : 1, r->options->sequence_parallel ? "yes" : "no", tokens_per_second(r, r->plan.config.steps),
           (double)t->elements_sent / steps, waiting / steps, r->train_seconds > 0 ? 100 * waiting / r->train_seconds : 0);
}

/* Weights go to rank 0 for the sample; table, and what every run ends with. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    double waiting = t->comm_seconds;
    uint64_t hash;
    if (r->rank == 0 && gpt_model_create(&r->model, &t->config, 1, GPT_OWN_VALUES) != 0) return run_no_room();
    TRY(hash_weights(t, &hash));
    TRY(ddp_all_reduce(r->world, &waiting, &waiting, 1, DDP_F64, DDP_OP_AVG, NULL));
    if (r->rank == 0) {
        int tokens[32 + SAMPLE_BYTES], prompt = sample_prompt(r, tokens);
        gpt_generate(&r->model, tokens, prompt, prompt + SAMPLE_BYTES, 0.8f, (uint64_t)r->plan.config.seed);
        print_sample(tokens, prompt);
        print_table(t, waiting);
    }
    return run_finish(r, validation, hash);
}

static ddp_result train(trainer *t) {
    run *r = &t->run;
    double validation = 0, loss;
    float norm;
    TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    TRY(build_model(t));
    TRY(build_parallel(t));
    run_report_start(r);
    TRY(evaluate(t, r->plan.first_step, &validation));
    for (int64_t step = r->plan.first_step + 1; step <= r->plan.config.steps; step++) {
        TRY(train_step(t, step, &loss, &norm));
        run_report_step(r, step, loss, norm);
        if (is_validation_step(r, step)) TRY(evaluate(t, step, &validation));
    }
    return finish(t, validation);
}

static void trainer_free(trainer *t) {
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    ddp_tp_linear_destroy(t->head);
    ddp_tp_mlp_destroy(t->mlp);
    ddp_tp_linear_destroy(t->proj);
    ddp_tp_linear_destroy(t->qkv);
    ddp_tp_layer_norm_destroy(t->norm);
    ddp_tp_embedding_destroy(t->embedding);
    ddp_tp_destroy(t->tp);
    ddp_mesh_destroy(t->mesh);
    run_free(&t->run);
    free(t->scratch);
    free(t->pieces);
    free(t->params);
    free(t->values);
    free(t->acts);
    free(t->memory);
    free(t->whole);
    free(t->saved.bytes);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    trainer *t = (trainer *)calloc(1, sizeof *t);
    ddp_result result;
    if (!t) return ddp_fail(DDP_ERR_NO_MEMORY, "a trainer");
    run_init(&t->run, world, (job *)user);
    result = train(t);
    if (result != DDP_OK && t->run.report.terminal && t->run.report.shown > 0) printf("\n");
    trainer_free(t);
    free(t);
    return result;
}

int main(int argc, char **argv) {
    job j;
    memset(&j, 0, sizeof j);
    parse_options(&PROGRAM, argc, argv, &j.options);
    return run_main(&j, rank_main);
}

/* MIT License: see LICENSE. */

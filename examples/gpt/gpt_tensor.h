/*  gpt_tensor.h - the layers of gpt.h with tensor parallelism, for train_gpt_tensor and train_gpt_3d

    The ranks of the tensor group hold one model together and compute the same micro-batches. Each rank has
    heads / tp attention heads and 4 channels / tp hidden units of the MLP:

        in --norm--> qkv --attention--> proj --(+ in)--> middle --norm--> fc --gelu--> mlp --(+ middle)--> out
                    column    of its    row                             column          row
                    linear    heads    linear                           linear         linear

    A column linear and the row linear after it need no communication between them. After a row linear the
    group adds its outputs (all-reduce). In backward the all-reduce follows the column linear. With sequence
    parallelism the residual stream and the layer norms are sharded along the sequence, and each all-reduce
    becomes a reduce-scatter and an all-gather. The rows of the embedding, which are also those of the head,
    are sharded along the vocabulary, and so is the loss (Megatron-LM: Shoeybi et al. 2019, Korthikanti et al.
    2022).

    Values and gradients belong to the trainer: two tables with a pointer per parameter. A call reads and
    writes only those of its unit. All functions that compute are collective over the group.

    Shapes: M tokens of a micro-batch; S = M rows of this rank's stream, or M / tp with sequence
    parallelism; C channels; L = C / tp channels of this rank's heads. */
#ifndef DDP_EXAMPLE_GPT_TENSOR_H
#define DDP_EXAMPLE_GPT_TENSOR_H

#include "../../ddp_tensor.h"
#include "train.h"

/* This rank's shard of a parameter: one box of the global tensor, or three for queries, keys and values. */
typedef struct gpt_piece {
    int box_count;
    ddp_placement placement; /* of the tensor, or of each of queries, keys and values */
    ddp_tensor_box box[3];
    int64_t rows, columns; /* of the boxes, stored one after the other; a vector has one column */
} gpt_piece;

/* Called by backward when gradient `index` is final. */
typedef ddp_result (*gpt_tensor_ready_fn)(void *user, int index);

typedef struct gpt_tensor {
    gpt_config config; /* of the model */
    gpt_config own;    /* the same with the heads and channels of this rank */
    int param_count, ranks;
    int64_t tokens, rows; /* M, S */
    int batch, sequence_parallel;
    ddp_group *group;
    ddp_tp *tp;
    ddp_tp_embedding *embedding; /* layers store no weights, so all blocks share one of each kind */
    ddp_tp_layer_norm *norm;
    ddp_tp_linear *qkv, *proj, *head;
    ddp_tp_mlp *mlp;
    gpt_piece *pieces;         /* param_count */
    float **values, **grads;   /* the trainer's tables */
    gpt_tensor_ready_fn ready; /* NULL = not called */
    void *ready_user;
    float *scratch, *memory;
    float *d_middle, *d_norm;   /* gradients inside a block: (S, C) (S, C) */
    float *d_attention, *d_qkv; /* (M, L) (M, 3L) */
} gpt_tensor;

/* The activations of a block that backward needs. */
typedef struct gpt_tensor_acts {
    float *ln1, *ln1_stats;       /* (S, C) (2 S) */
    float *qkv, *lse, *attention; /* (M, 3L) (B, NH / tp, T) (M, L) */
    float *middle;                /* (S, C) */
    float *ln2, *ln2_stats, *mlp; /* (S, C) (2 S) (ddp_tp_mlp_saved_count) */
} gpt_tensor_acts;

/* The activations of the head. */
typedef struct gpt_tensor_head_acts {
    float *ln, *ln_stats; /* (S, C) (2 S) */
    float *logits;        /* (M, this rank's part of the vocabulary) */
} gpt_tensor_head_acts;

//== bad input ============================================================================== >>bad-input

/* The divisor of number that is nearest to target. */
static int nearest_divisor(int number, int target) {
    int distance = 0;
    while (number % (target + distance) && (target <= distance || number % (target - distance))) distance++;
    if (target > distance && number % (target - distance) == 0) return target - distance;
    return target + distance;
}

/* Rank 0: checks after the plan whether the tokens of a micro-batch can be sharded. */
static ddp_result gpt_tensor_check(const run *r, int ranks) {
    const run_config *c = &r->plan.config;
    if (c->micro_batch > INT32_MAX / c->context) return run_out_of_memory();
    if (r->options->sequence_parallel && c->micro_batch * c->context % ranks)
        return ddp_fail(DDP_ERR_INVALID,
                        "--sequence-parallel: --micro-batch %d x --context %d is not a multiple of --tp %d; "
                        "use --context %d",
                        c->micro_batch, c->context, ranks, (c->context + ranks - 1) / ranks * ranks);
    return DDP_OK;
}

//== layers ==================================================================================== >>layers

/* Matrix products of the library's layers, by gpt_gemm. */
static ddp_result gpt_tensor_multiply(const ddp_gemm *g, void *user) {
    gpt_matrix a, b;
    gpt_output out;
    a.data = (const float *)g->a;
    a.row = g->trans_a ? 1 : (size_t)g->lda;
    a.column = g->trans_a ? (size_t)g->lda : 1;
    b.data = (const float *)g->b;
    b.row = g->trans_b ? 1 : (size_t)g->ldb;
    b.column = g->trans_b ? (size_t)g->ldb : 1;
    out.c = (float *)g->c;
    out.row = (size_t)g->ldc;
    out.bias = NULL;
    out.add = g->accumulate ? out.c : NULL;
    if (g->k > 0) gpt_gemm((float *)user, (int)g->m, (int)g->n, (int)g->k, a, b, out);
    for (int64_t i = 0; i < g->m && g->k == 0 && !g->accumulate; i++)
        memset(out.c + i * g->ldc, 0, (size_t)g->n * sizeof(float));
    return DDP_OK;
}

static ddp_result gpt_tensor_build_layers(gpt_tensor *m, int chunks) {
    ddp_tp_desc tp = DDP_ZERO;
    ddp_tp_embedding_desc embedding = DDP_ZERO;
    ddp_tp_layer_norm_desc norm = DDP_ZERO;
    ddp_tp_linear_desc qkv = DDP_ZERO, proj = DDP_ZERO, head = DDP_ZERO;
    ddp_tp_mlp_desc mlp = DDP_ZERO;
    int C = m->config.channels;

    tp.max_rows = m->tokens;
    tp.sequence_parallel = m->sequence_parallel;
    tp.chunk_count = chunks;
    tp.gemm = gpt_tensor_multiply;
    tp.gemm_user = m->scratch;
    DDP_TRY(ddp_tp_create(&m->tp, m->group, &tp));
    embedding.vocab = m->config.vocab;
    embedding.channels = C;
    DDP_TRY(ddp_tp_embedding_create(&m->embedding, m->tp, &embedding));
    norm.channels = C;
    DDP_TRY(ddp_tp_layer_norm_create(&m->norm, m->tp, &norm));
    qkv.split = DDP_TP_COLUMN;
    qkv.in_features = C;
    qkv.heads = m->config.heads;
    DDP_TRY(ddp_tp_linear_create(&m->qkv, m->tp, &qkv));
    proj.split = DDP_TP_ROW;
    proj.in_features = C;
    proj.out_features = C;
    DDP_TRY(ddp_tp_linear_create(&m->proj, m->tp, &proj));
    mlp.channels = C;
    mlp.hidden = 4 * C;
    DDP_TRY(ddp_tp_mlp_create(&m->mlp, m->tp, &mlp));
    head.split = DDP_TP_COLUMN;
    head.in_features = C;
    head.out_features = m->config.vocab;
    head.no_bias = 1;
    return ddp_tp_linear_create(&m->head, m->tp, &head);
}

/* Finds this rank's boxes of a parameter. */
static ddp_result gpt_tensor_find_piece(const gpt_tensor *m, int index, const gpt_param *info, gpt_piece *p) {
    const int kind = info->unit >= 1 && info->unit <= m->config.layers ? (index - 2) % GPT_BLOCK_PARAMS : -1;
    ddp_tp_linear *linear = NULL;
    if (kind == GPT_QKV_WEIGHT || kind == GPT_QKV_BIAS) linear = m->qkv;
    if (kind == GPT_ATTN_WEIGHT || kind == GPT_ATTN_BIAS) linear = m->proj;
    if (kind == GPT_FC_WEIGHT || kind == GPT_FC_BIAS) linear = ddp_tp_mlp_linear(m->mlp, 0);
    if (kind == GPT_MLP_WEIGHT || kind == GPT_MLP_BIAS) linear = ddp_tp_mlp_linear(m->mlp, 1);
    p->box_count = linear && linear == m->qkv ? 3 : 1;
    for (int k = 0; k < p->box_count; k++) {
        ddp_tensor_box *box = &p->box[k];
        if (linear)
            DDP_TRY(info->ndim > 1 ? ddp_tp_linear_weight_box(linear, k, box)
                                   : ddp_tp_linear_bias_box(linear, k, box));
        else if (index == 0 || info->tied_to == 0)
            DDP_TRY(ddp_tp_embedding_box(m->embedding, box));
        else
            DDP_TRY(ddp_placement_shard_box(DDP_REPLICATE, info->ndim, info->shape, 0, 1, box));
        p->columns = box->ndim > 1 ? box->shape[1] : 1;
        p->rows += box->shape[0];
        for (int d = 0; d < box->ndim; d++)
            if (box->shape[d] < box->global_shape[d]) p->placement = DDP_SHARD(d);
    }
    return DDP_OK;
}

/* Creates the layers of the run's model on this group, and describes this rank's shards of the parameters.
   Collective. */
static ddp_result gpt_tensor_create(gpt_tensor *m, const run *r, ddp_group *group, float **values,
                                    float **grads) {
    size_t used = 0, C, L, M, S;
    m->config = run_model_config(r);
    m->own = m->config;
    m->group = group;
    m->ranks = ddp_world_size(group);
    m->own.heads /= m->ranks;
    m->own.channels /= m->ranks;
    m->batch = r->plan.config.micro_batch;
    m->sequence_parallel = r->options->sequence_parallel;
    m->tokens = (int64_t)m->batch * m->config.context;
    m->rows = m->sequence_parallel ? m->tokens / m->ranks : m->tokens;
    m->param_count = gpt_param_count(&m->config);
    m->values = values;
    m->grads = grads;
    m->scratch = (float *)calloc(gpt_scratch_floats(&m->own, m->own.context), sizeof(float));
    m->pieces = (gpt_piece *)calloc((size_t)m->param_count, sizeof *m->pieces);
    C = (size_t)m->config.channels;
    L = (size_t)m->own.channels;
    M = (size_t)m->tokens;
    S = (size_t)m->rows;
    m->memory = (float *)calloc(2 * S * C + 4 * M * L + 4 * 16, sizeof(float));
    if (!m->scratch || !m->pieces || !m->memory) return run_out_of_memory();
    m->d_middle = gpt__take(m->memory, &used, S * C);
    m->d_norm = gpt__take(m->memory, &used, S * C);
    m->d_attention = gpt__take(m->memory, &used, M * L);
    m->d_qkv = gpt__take(m->memory, &used, M * 3 * L);
    DDP_TRY(gpt_tensor_build_layers(m, r->options->chunks));
    for (int i = 0; i < m->param_count; i++)
        DDP_TRY(gpt_tensor_find_piece(m, i, &r->infos[i], &m->pieces[i]));
    return DDP_OK;
}

/* Collective. */
static void gpt_tensor_destroy(gpt_tensor *m) {
    ddp_tp_linear_destroy(m->head);
    ddp_tp_mlp_destroy(m->mlp);
    ddp_tp_linear_destroy(m->proj);
    ddp_tp_linear_destroy(m->qkv);
    ddp_tp_layer_norm_destroy(m->norm);
    ddp_tp_embedding_destroy(m->embedding);
    ddp_tp_destroy(m->tp);
    free(m->scratch);
    free(m->pieces);
    free(m->memory);
}

/* Elements from one row of the global matrix to the next. */
static int64_t gpt_box_stride(const ddp_tensor_box *box) { return box->ndim > 1 ? box->global_shape[1] : 1; }

/* The offset of row i of the box in the global matrix. */
static int64_t gpt_box_row(const ddp_tensor_box *box, int64_t i) {
    return (box->offset[0] + i) * gpt_box_stride(box) + (box->ndim > 1 ? box->offset[1] : 0);
}

//== forward and backward ====================================================================== >>passes

/* Sets the pointers to the activations of a block. Returns the floats needed; memory NULL only counts. */
static size_t gpt_tensor_acts_place(const gpt_tensor *m, float *memory, gpt_tensor_acts *a) {
    size_t used = 0, C = (size_t)m->config.channels, L = (size_t)m->own.channels, M = (size_t)m->tokens,
           S = (size_t)m->rows;
    a->ln1 = gpt__take(memory, &used, S * C);
    a->ln1_stats = gpt__take(memory, &used, 2 * S);
    a->qkv = gpt__take(memory, &used, M * 3 * L);
    a->lse = gpt__take(memory, &used, M * (size_t)m->own.heads);
    a->attention = gpt__take(memory, &used, M * L);
    a->middle = gpt__take(memory, &used, S * C);
    a->ln2 = gpt__take(memory, &used, S * C);
    a->ln2_stats = gpt__take(memory, &used, 2 * S);
    a->mlp = gpt__take(memory, &used, ddp_tp_mlp_saved_count(m->mlp, m->tokens));
    return used;
}

/* The same for the head. */
static size_t gpt_tensor_head_acts_place(const gpt_tensor *m, float *memory, gpt_tensor_head_acts *a) {
    size_t used = 0, S = (size_t)m->rows;
    a->ln = gpt__take(memory, &used, S * (size_t)m->config.channels);
    a->ln_stats = gpt__take(memory, &used, 2 * S);
    a->logits = gpt__take(memory, &used, (size_t)m->tokens * (size_t)ddp_tp_linear_out_features(m->head));
    return used;
}

/* The argument of attention: a model of this rank's heads. */
static gpt_pass gpt_tensor_pass(const gpt_tensor *m) {
    gpt_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.config = &m->own;
    pass.batch = m->batch;
    pass.length = m->own.context;
    pass.scratch = m->scratch;
    return pass;
}

static void gpt_tensor_add(float *to, const float *what, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += what[i];
}

/* The row of wpe, or of its gradient, for row i of this rank's stream. */
static float *gpt_tensor_position(const gpt_tensor *m, float *const *table, int64_t i) {
    int64_t first = m->sequence_parallel ? ddp_rank(m->group) * m->rows : 0;
    return table[1] + (first + i) % m->config.context * m->config.channels;
}

/* out (S, C) from tokens (M). */
static ddp_result gpt_tensor_embed_forward(const gpt_tensor *m, const int *tokens, float *out) {
    int64_t C = m->config.channels;
    DDP_TRY(ddp_tp_embedding_forward(m->embedding, m->values[0], tokens, m->tokens, out));
    for (int64_t i = 0; i < m->rows; i++)
        gpt_tensor_add(out + i * C, gpt_tensor_position(m, m->values, i), C);
    return DDP_OK;
}

/* in and out (S, C). */
static ddp_result gpt_tensor_block_forward(const gpt_tensor *m, int layer, const float *in,
                                           gpt_tensor_acts *a, float *out) {
    gpt_block w = gpt_block_view(m->values, layer);
    const void *const mlp[4] = {w.fc_weight, w.fc_bias, w.mlp_weight, w.mlp_bias};
    gpt_pass pass = gpt_tensor_pass(m);
    DDP_TRY(ddp_tp_layer_norm_forward(m->norm, w.ln1_weight, w.ln1_bias, in, m->rows, a->ln1_stats, a->ln1));
    DDP_TRY(ddp_tp_linear_forward(m->qkv, w.qkv_weight, w.qkv_bias, a->ln1, m->tokens, a->qkv));
    gpt_attention(&pass, a->attention, a->lse, a->qkv);
    DDP_TRY(ddp_tp_linear_forward(m->proj, w.attn_weight, w.attn_bias, a->attention, m->tokens, a->middle));
    gpt_tensor_add(a->middle, in, m->rows * m->config.channels);
    DDP_TRY(ddp_tp_layer_norm_forward(m->norm, w.ln2_weight, w.ln2_bias, a->middle, m->rows, a->ln2_stats,
                                      a->ln2));
    DDP_TRY(ddp_tp_mlp_forward(m->mlp, mlp, a->ln2, m->tokens, a->mlp, out));
    gpt_tensor_add(out, a->middle, m->rows * m->config.channels);
    return DDP_OK;
}

/* *loss is the mean of the micro-batch. with_grads: replaces the logits by their gradient. */
static ddp_result gpt_tensor_head_forward(const gpt_tensor *m, const float *in, const int *targets,
                                          gpt_tensor_head_acts *a, double *loss, int with_grads) {
    gpt_head w = gpt_head_view(&m->config, m->values);
    ddp_tp_loss_desc desc = DDP_ZERO;
    desc.vocab = m->config.vocab;
    DDP_TRY(ddp_tp_layer_norm_forward(m->norm, w.ln_weight, w.ln_bias, in, m->rows, a->ln_stats, a->ln));
    DDP_TRY(ddp_tp_linear_forward(m->head, w.weight, NULL, a->ln, m->tokens, a->logits));
    return ddp_tp_cross_entropy(m->tp, &desc, a->logits, targets, m->tokens, NULL, loss,
                                with_grads ? a->logits : NULL);
}

/* Reports gradients last to first as final. */
static ddp_result gpt_tensor_ready(const gpt_tensor *m, int last, int first) {
    for (int i = last; i >= first && m->ready; i--) DDP_TRY(m->ready(m->ready_user, i));
    return DDP_OK;
}

/* After gpt_tensor_head_forward with with_grads. d_in (S, C). */
static ddp_result gpt_tensor_head_backward(const gpt_tensor *m, const float *in,
                                           const gpt_tensor_head_acts *a, float *d_in) {
    gpt_head w = gpt_head_view(&m->config, m->values), g = gpt_head_view(&m->config, m->grads);
    DDP_TRY(
        ddp_tp_linear_backward(m->head, w.weight, a->ln, a->logits, m->tokens, m->d_norm, g.weight, NULL));
    DDP_TRY(ddp_tp_layer_norm_backward(m->norm, w.ln_weight, in, a->ln_stats, m->d_norm, m->rows, d_in,
                                       g.ln_weight, g.ln_bias));
    return gpt_tensor_ready(m, w.first + 2, w.first);
}

/* Computes d_in, the gradient of the block's input, from d_out, that of its output. They may be the same
   memory. */
static ddp_result gpt_tensor_block_backward(const gpt_tensor *m, int layer, const float *in,
                                            const gpt_tensor_acts *a, const float *d_out, float *d_in) {
    gpt_block w = gpt_block_view(m->values, layer), g = gpt_block_view(m->grads, layer);
    const void *const mlp[4] = {w.fc_weight, w.fc_bias, w.mlp_weight, w.mlp_bias};
    void *const mlp_grads[4] = {g.fc_weight, g.fc_bias, g.mlp_weight, g.mlp_bias};
    int64_t count = m->rows * m->config.channels;
    gpt_pass pass = gpt_tensor_pass(m);
    DDP_TRY(ddp_tp_mlp_backward(m->mlp, mlp, a->ln2, a->mlp, d_out, m->tokens, m->d_norm, mlp_grads));
    DDP_TRY(gpt_tensor_ready(m, w.first + GPT_MLP_BIAS, w.first + GPT_FC_WEIGHT));
    DDP_TRY(ddp_tp_layer_norm_backward(m->norm, w.ln2_weight, a->middle, a->ln2_stats, m->d_norm, m->rows,
                                       m->d_middle, g.ln2_weight, g.ln2_bias));
    DDP_TRY(gpt_tensor_ready(m, w.first + GPT_LN2_BIAS, w.first + GPT_LN2_WEIGHT));
    gpt_tensor_add(m->d_middle, d_out, count);
    DDP_TRY(ddp_tp_linear_backward(m->proj, w.attn_weight, a->attention, m->d_middle, m->tokens,
                                   m->d_attention, g.attn_weight, g.attn_bias));
    DDP_TRY(gpt_tensor_ready(m, w.first + GPT_ATTN_BIAS, w.first + GPT_ATTN_WEIGHT));
    gpt_attention_backward(&pass, m->d_qkv, m->d_attention, a->attention, a->lse, a->qkv);
    DDP_TRY(ddp_tp_linear_backward(m->qkv, w.qkv_weight, a->ln1, m->d_qkv, m->tokens, m->d_norm, g.qkv_weight,
                                   g.qkv_bias));
    DDP_TRY(gpt_tensor_ready(m, w.first + GPT_QKV_BIAS, w.first + GPT_QKV_WEIGHT));
    DDP_TRY(ddp_tp_layer_norm_backward(m->norm, w.ln1_weight, in, a->ln1_stats, m->d_norm, m->rows, d_in,
                                       g.ln1_weight, g.ln1_bias));
    gpt_tensor_add(d_in, m->d_middle, count);
    return gpt_tensor_ready(m, w.first + GPT_LN1_BIAS, w.first + GPT_LN1_WEIGHT);
}

/* From d (S, C). wpe is replicated. With sequence parallelism a rank has only the gradients of its tokens, so
   the group adds them. ddp_tp_layer_norm_backward does the same for the norms. */
static ddp_result gpt_tensor_embed_backward(const gpt_tensor *m, const int *tokens, const float *d) {
    int64_t C = m->config.channels;
    size_t positions = (size_t)m->config.context * (size_t)C;
    memset(m->grads[1], 0, positions * sizeof(float));
    for (int64_t i = 0; i < m->rows; i++) gpt_tensor_add(gpt_tensor_position(m, m->grads, i), d + i * C, C);
    if (m->sequence_parallel)
        DDP_TRY(ddp_all_reduce(m->group, m->grads[1], m->grads[1], positions, DDP_F32, DDP_OP_SUM, NULL));
    DDP_TRY(ddp_tp_embedding_backward(m->embedding, tokens, d, m->tokens, m->grads[0]));
    return gpt_tensor_ready(m, 1, 0);
}

#endif /* DDP_EXAMPLE_GPT_TENSOR_H */

/* MIT License: see LICENSE. */

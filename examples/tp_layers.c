/*  tp_layers.c - the tensor-parallel layers, as one small language model

        cc -O3 -march=native examples/tp_layers.c -o tp_layers -lm -lpthread
        ./tp_layers               2 ranks
        ./tp_layers 4             1, 2 or 4 ranks
        mpirun --oversubscribe -n 4 ./tp_layers 4    the ranks of a launcher

        tokens -> embedding -> layer norm -> dropout -> MLP -> + -> head -> cross-entropy
                           \_______________________________/

    Every rank has all tokens and a part of the weights: rows of the embedding table, hidden units of the MLP,
    words of the head. The model learns which token follows another one. Values depend on global positions,
    and so does dropout: 1, 2 and 4 ranks print the same losses, except for rounding. The last line shows what
    a rank computes and sends. The layers are those of Megatron-LM (Shoeybi et al. 2019).
    train_mlp_tensor.c uses only linear layers. */
#define DDP_IMPLEMENTATION
#include "../ddp_tensor.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 32, CHANNELS = 32, HIDDEN = 64, ROWS = VOCAB, STEPS = 120, LOG_STEPS = 30 };
enum { TABLE, NORM, NORM_BIAS, FC, FC_BIAS, PROJ, PROJ_BIAS, HEAD, PARAMS };

typedef struct model {
    ddp_tp *tp;
    ddp_tp_embedding *embedding;
    ddp_tp_layer_norm *norm;
    ddp_tp_mlp *mlp;
    ddp_tp_linear *head;
    int64_t count[PARAMS]; /* elements of this rank's part */
    float value[PARAMS][VOCAB * HIDDEN], grad[PARAMS][VOCAB * HIDDEN];
    int32_t tokens[ROWS], targets[ROWS];
    float x[ROWS * CHANNELS], normed[ROWS * CHANNELS], stats[2 * ROWS], dropped[ROWS * CHANNELS];
    float y[ROWS * CHANNELS], dy[ROWS * CHANNELS], dx[ROWS * CHANNELS];
    float logits[ROWS * VOCAB]; /* (ROWS, this rank's words); then their gradient */
    float *saved;               /* of the MLP, for backward */
    double flops;
} model;

/* The product of all layers. Your program may call its BLAS here. This one counts operations. */
static ddp_result gemm(const ddp_gemm *product, void *user) {
    *(double *)user += 2.0 * (double)product->m * (double)product->n * (double)product->k;
    return ddp_gemm_builtin(product, NULL);
}

/* Random weights of this rank's box of the global tensor. key: a different one for each tensor. */
static ddp_result init(model *m, int param, const ddp_tensor_box *box, double deviation) {
    m->count[param] = box->shape[0] * (box->ndim > 1 ? box->shape[1] : 1);
    return ddp_tensor_init_normal(box, DDP_F32, (uint64_t)param, 0, deviation, m->value[param]);
}

static ddp_result create(model *m, ddp_group *world) {
    ddp_tp_desc tp = {.max_rows = ROWS, .gemm = gemm, .gemm_user = &m->flops};
    ddp_tp_embedding_desc embedding = {.vocab = VOCAB, .channels = CHANNELS};
    ddp_tp_layer_norm_desc norm = {.channels = CHANNELS};
    ddp_tp_mlp_desc mlp = {.channels = CHANNELS, .hidden = HIDDEN, .activation = DDP_TP_GELU};
    ddp_tp_linear_desc head = {.in_features = CHANNELS, .out_features = VOCAB, .no_bias = 1};
    ddp_tensor_box box;
    DDP_TRY(ddp_tp_create(&m->tp, world, &tp));

    DDP_TRY(ddp_tp_embedding_create(&m->embedding, m->tp, &embedding));
    DDP_TRY(ddp_tp_embedding_box(m->embedding, &box));
    DDP_TRY(init(m, TABLE, &box, 1));

    DDP_TRY(ddp_tp_layer_norm_create(&m->norm, m->tp, &norm)); /* its weights are the same on every rank */
    m->count[NORM] = CHANNELS;
    m->count[NORM_BIAS] = CHANNELS;
    for (int i = 0; i < CHANNELS; i++) m->value[NORM][i] = 1;

    DDP_TRY(ddp_tp_mlp_create(&m->mlp, m->tp, &mlp));
    for (int which = 0; which < 2; which++) { /* biases stay zero */
        ddp_tp_linear *linear = ddp_tp_mlp_linear(m->mlp, which);
        DDP_TRY(ddp_tp_linear_weight_box(linear, 0, &box));
        DDP_TRY(init(m, FC + 2 * which, &box, 0.1));
        m->count[FC_BIAS + 2 * which] = ddp_tp_linear_out_features(linear);
    }
    m->saved = (float *)calloc(ddp_tp_mlp_saved_count(m->mlp, ROWS), sizeof(float));
    if (!m->saved) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for activations");

    DDP_TRY(ddp_tp_linear_create(&m->head, m->tp, &head));
    DDP_TRY(ddp_tp_linear_weight_box(m->head, 0, &box));
    DDP_TRY(init(m, HEAD, &box, 0.1));
    if (m->count[HEAD] != ddp_tp_linear_out_features(m->head) * ddp_tp_linear_in_features(m->head))
        return ddp_fail(DDP_ERR_CORRUPT, "the box of the head has %lld elements", (long long)m->count[HEAD]);
    return DDP_OK;
}

/* step -1: without dropout. Leaves the gradient of the logits in m->logits. */
static ddp_result forward(model *m, int step, double *loss) {
    const void *mlp[4] = {m->value[FC], m->value[FC_BIAS], m->value[PROJ], m->value[PROJ_BIAS]};
    ddp_tp_dropout_desc dropout = {.rate = step < 0 ? 0 : 0.1, .key = (uint64_t)(step + 1)};
    ddp_tp_loss_desc cross_entropy = {.vocab = VOCAB};
    DDP_TRY(ddp_tp_embedding_forward(m->embedding, m->value[TABLE], m->tokens, ROWS, m->x));
    DDP_TRY(ddp_tp_layer_norm_forward(m->norm, m->value[NORM], m->value[NORM_BIAS], m->x, ROWS, m->stats,
                                      m->normed));
    DDP_TRY(ddp_tp_dropout(m->tp, &dropout, m->normed, ROWS, CHANNELS, m->dropped));
    DDP_TRY(ddp_tp_mlp_forward(m->mlp, mlp, m->dropped, ROWS, m->saved, m->y));
    for (int i = 0; i < ROWS * CHANNELS; i++) m->y[i] += m->x[i];
    DDP_TRY(ddp_tp_linear_forward(m->head, m->value[HEAD], NULL, m->y, ROWS, m->logits));
    return ddp_tp_cross_entropy(m->tp, &cross_entropy, m->logits, m->targets, ROWS, NULL, loss, m->logits);
}

static ddp_result backward(model *m, int step) {
    const void *mlp[4] = {m->value[FC], m->value[FC_BIAS], m->value[PROJ], m->value[PROJ_BIAS]};
    void *d_mlp[4] = {m->grad[FC], m->grad[FC_BIAS], m->grad[PROJ], m->grad[PROJ_BIAS]};
    ddp_tp_dropout_desc dropout = {.rate = 0.1, .key = (uint64_t)(step + 1)}; /* as in forward */
    DDP_TRY(
        ddp_tp_linear_backward(m->head, m->value[HEAD], m->y, m->logits, ROWS, m->dy, m->grad[HEAD], NULL));
    DDP_TRY(ddp_tp_mlp_backward(m->mlp, mlp, m->dropped, m->saved, m->dy, ROWS, m->dx, d_mlp));
    DDP_TRY(ddp_tp_dropout(m->tp, &dropout, m->dx, ROWS, CHANNELS, m->dx));
    DDP_TRY(ddp_tp_layer_norm_backward(m->norm, m->value[NORM], m->x, m->stats, m->dx, ROWS, m->dx,
                                       m->grad[NORM], m->grad[NORM_BIAS]));
    for (int i = 0; i < ROWS * CHANNELS; i++) m->dx[i] += m->dy[i];
    return ddp_tp_embedding_backward(m->embedding, m->tokens, m->dx, ROWS, m->grad[TABLE]);
}

static ddp_result train(model *m, ddp_group *world) {
    double loss = 0;
    ddp_tp_stats stats;
    for (int i = 0; i < ROWS; i++) {
        m->tokens[i] = i;
        m->targets[i] = (5 * i + 3) % VOCAB; /* the token that follows token i */
    }
    DDP_TRY(create(m, world));
    for (int step = 0; step < STEPS; step++) {
        m->flops = 0;
        ddp_tp_reset_stats(m->tp);
        DDP_TRY(forward(m, step, &loss));
        DDP_TRY(backward(m, step));
        for (int p = 0; p < PARAMS; p++)
            for (int64_t i = 0; i < m->count[p]; i++) m->value[p][i] -= 0.5f * m->grad[p][i];
        if (ddp_rank(world) == 0 && step % LOG_STEPS == 0) printf("step %3d   loss %.5f\n", step, loss);
    }
    DDP_TRY(ddp_tp_get_stats(m->tp, &stats)); /* of the last step */
    DDP_TRY(forward(m, -1, &loss));
    if (ddp_rank(world) == 0) {
        printf("at last    loss %.5f\n", loss);
        printf("a rank's step: %.2f million operations, %llu collectives, %llu floats sent\n",
               m->flops * 1e-6, (unsigned long long)stats.collectives,
               (unsigned long long)stats.elements_sent);
    }
    return loss < 0.1 ? DDP_OK : ddp_fail(DDP_ERR_CORRUPT, "the loss is %g: it must be below 0.1", loss);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world);
    (void)user;
    if (VOCAB % ranks || ranks > 4) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2 or 4", ranks);
    model *m = (model *)calloc(1, sizeof *m);
    if (!m) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    ddp_result result = train(m, world);
    ddp_tp_linear_destroy(m->head);
    ddp_tp_mlp_destroy(m->mlp);
    ddp_tp_layer_norm_destroy(m->norm);
    ddp_tp_embedding_destroy(m->embedding);
    ddp_tp_destroy(m->tp);
    free(m->saved);
    free(m);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = DDP_OK;
    if (argc > 2 || desc.world_size < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

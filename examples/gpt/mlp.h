/*  mlp.h - a multilayer perceptron for classification, layer by layer: what the examples train that need no transformer.

        mlp_layer    out = in weight^T + bias, and where relu is set what of it is positive
        mlp_loss     softmax and cross-entropy on what the last layer gives

    A layer owns nothing: its weights and gradients lie where the caller has placed them. Backward overwrites gradients with sums over the rows; the loss
    scales them. One thread; the bits of a row do not depend on the rows around it. */
#ifndef DDP_EXAMPLE_MLP_H
#define DDP_EXAMPLE_MLP_H

#include "gpt.h" /* matrix product, random numbers */

#define MLP_PACK_FLOATS \
    (GPT_PACK_A_FLOATS + GPT_PACK_B_FLOATS) /* what `pack` holds; nothing in it outlives a call */

typedef struct mlp_layer {
    int inputs, outputs, relu;
    float *weight, *bias; /* (outputs, inputs) (outputs) */
    float *d_weight, *d_bias;
} mlp_layer;

/* Uniform, of variance 1 / inputs, or 2 / inputs before a relu (He et al. 2015). */
static inline void mlp_init(const mlp_layer *l, uint64_t seed, int index) {
    float bound = sqrtf((l->relu ? 6.0f : 3.0f) / (float)l->inputs);
    for (int i = 0; i < l->outputs * l->inputs; i++)
        l->weight[i] =
            bound
            * ((float)(gpt_random(seed + (uint64_t)index, (uint64_t)i) >> 40) * (2.0f / 16777216.0f) - 1.0f);
    memset(l->bias, 0, (size_t)l->outputs * sizeof(float));
}

/* in (rows, inputs), out (rows, outputs) */
static inline void mlp_forward(const mlp_layer *l, float *pack, int rows, const float *in, float *out) {
    size_t inputs = (size_t)l->inputs, outputs = (size_t)l->outputs;
    gpt_gemm(pack, rows, l->outputs, l->inputs, gpt__matrix(in, inputs, 1), gpt__matrix(l->weight, 1, inputs),
             gpt__output(out, outputs, l->bias, NULL));
    for (size_t i = 0; l->relu && i < (size_t)rows * outputs; i++) out[i] = out[i] > 0 ? out[i] : 0;
}

/* d_out (rows, outputs): the gradient of out, on return that before relu. d_in (rows, inputs): NULL = nobody needs it. */
static inline void mlp_backward(const mlp_layer *l, float *pack, int rows, const float *in, const float *out,
                                float *d_out, float *d_in) {
    size_t inputs = (size_t)l->inputs, outputs = (size_t)l->outputs;
    for (size_t i = 0; l->relu && i < (size_t)rows * outputs; i++) d_out[i] = out[i] > 0 ? d_out[i] : 0;
    gpt_gemm(pack, l->outputs, l->inputs, rows, gpt__matrix(d_out, 1, outputs), gpt__matrix(in, inputs, 1),
             gpt__output(l->d_weight, inputs, NULL, NULL));
    memset(l->d_bias, 0, outputs * sizeof(float));
    for (int r = 0; r < rows; r++)
        for (size_t j = 0; j < outputs; j++) l->d_bias[j] += d_out[(size_t)r * outputs + j];
    if (d_in)
        gpt_gemm(pack, rows, l->inputs, l->outputs, gpt__matrix(d_out, outputs, 1),
                 gpt__matrix(l->weight, inputs, 1), gpt__output(d_in, inputs, NULL, NULL));
}

/* One row of logits (classes): its cross-entropy. *is_right (may be NULL): whether the label has the greatest logit. d_logits (may be NULL, may be logits):
   the gradient of the loss times scale. */
static inline double mlp_loss(int classes, const float *logits, int label, int *is_right, float *d_logits,
                              float scale) {
    float greatest = logits[0], wanted = logits[label], sum = 0;
    for (int j = 1; j < classes; j++) greatest = logits[j] > greatest ? logits[j] : greatest;
    for (int j = 0; j < classes; j++) sum += expf(logits[j] - greatest);
    if (is_right) *is_right = wanted == greatest;
    for (int j = 0; d_logits && j < classes; j++)
        d_logits[j] = scale * (expf(logits[j] - greatest) / sum - (j == label ? 1.0f : 0.0f));
    return (double)(logf(sum) + greatest - wanted);
}

/* Layers on top of each other, with values and activations of its own; the caller says where gradients lie. */
#define MLP_LAYERS 8 /* at most */
typedef struct mlp {
    int layer_count, rows;
    mlp_layer layer[MLP_LAYERS];
    float *out[MLP_LAYERS + 1],
        *d_out[MLP_LAYERS + 1]; /* (rows, width): out[0] goes in, out[layer_count] are the logits */
    float *memory, *pack;
} mlp;

/* widths: layer_count + 1 of them. 0, or -1 when it does not fit in memory. */
static inline int mlp_create(mlp *m, int layer_count, const int *widths, int rows, uint64_t seed) {
    size_t floats = MLP_PACK_FLOATS;
    float *at;
    memset(m, 0, sizeof *m);
    m->layer_count = layer_count, m->rows = rows;
    for (int i = 0; i <= layer_count; i++)
        floats += (size_t)widths[i] * (2 * (size_t)rows + (i ? (size_t)widths[i - 1] + 1 : 0));
    m->memory = m->pack = (float *)calloc(floats, sizeof(float));
    if (!m->memory) return -1;
    at = m->pack + MLP_PACK_FLOATS;
    for (int i = 0; i <= layer_count; i++, at += 2 * rows * widths[i - 1])
        m->out[i] = at, m->d_out[i] = at + rows * widths[i];
    for (int i = 0; i < layer_count; i++, at += (widths[i - 1] + 1) * widths[i]) {
        mlp_layer layer = {widths[i], widths[i + 1], i + 1 < layer_count, at, at + widths[i] * widths[i + 1],
                           NULL,      NULL};
        m->layer[i] = layer;
        mlp_init(&layer, seed, i);
    }
    return 0;
}

#endif /* DDP_EXAMPLE_MLP_H */

/* MIT License: see LICENSE. */

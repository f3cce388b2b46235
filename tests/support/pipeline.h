/*  pipeline.h - a small model divided into stages, run by a pipeline and by a plain loop.

    Stage s is y = tanh(W x + b) of ROWS rows. Stage 0 computes its input from the number of the micro-batch,
    the last stage compares with a target. In addition to the f32 boundary, an i32 edge connects each stage
    with the next one. With three or more stages, stage 0 also sends f64 numbers to the last stage. */
#ifndef DDP_TEST_PIPELINE_H
#define DDP_TEST_PIPELINE_H

#include "../../ddp_pipeline.h"
#include "ranks.h"

#include <math.h>

enum {
    PIPE_ROWS = 2,
    PIPE_SIDE = 5,
    PIPE_CELLS = PIPE_ROWS * PIPE_SIDE,
    PIPE_WEIGHTS = PIPE_SIDE * PIPE_SIDE,
    PIPE_STAGES = 12,
    PIPE_BATCHES = 40,
    PIPE_NOTES = 3
};

typedef struct pipe_saved {
    float y[PIPE_CELLS], dz[PIPE_CELLS];
} pipe_saved;

/* A fault injected into a stage's callback. */
/* how: 0 = none, 1 = fails, 2 = is killed, 3 = never reports completion. */
typedef struct pipe_fault {
    int stage, microbatch, step, loss;
    ddp_action_kind kind;
    int how;
} pipe_fault;

typedef struct pipe_model {
    int stages, with_loss, steps;
    int first; /* number of the runner's micro-batch 0 among those of all replicas */
    float weight[PIPE_STAGES][PIPE_WEIGHTS], bias[PIPE_STAGES][PIPE_SIDE];
    float d_weight[PIPE_STAGES][PIPE_WEIGHTS], d_bias[PIPE_STAGES][PIPE_SIDE];
    ddp_param params[PIPE_STAGES][2], *pointers[PIPE_STAGES][2];
    ddp_pipeline_stage stage[PIPE_STAGES];
    ddp_pipeline_edge edges[2 * PIPE_STAGES + 2];
    int edge_count;
    int hooks[PIPE_STAGES][5]; /* number of calls of each */
    int recomputed, evaluated;
    pipe_fault fault;
    const char *wrong; /* an error that a callback observed */
} pipe_model;

static float pipe_number(uint64_t seed) {
    return (float)((double)(int64_t)ranks_mix(seed) / 9223372036854775808.0);
}

//== the model as plain loops ==================================================================

static void pipe_input(float *x, int i) {
    for (int k = 0; k < PIPE_CELLS; k++) x[k] = pipe_number((uint64_t)i * 1000 + (uint64_t)k);
}

static void pipe_forward(const float *weight, const float *bias, const float *x, const double *skip,
                         float *y) {
    for (int r = 0; r < PIPE_ROWS; r++)
        for (int n = 0; n < PIPE_SIDE; n++) {
            float sum = bias[n] + (skip ? (float)skip[r * PIPE_SIDE + n] : 0);
            for (int c = 0; c < PIPE_SIDE; c++) sum += weight[n * PIPE_SIDE + c] * x[r * PIPE_SIDE + c];
            y[r * PIPE_SIDE + n] = tanhf(sum);
        }
}

static void pipe_skip_out(const float *y, double *skip) {
    for (int k = 0; k < PIPE_CELLS; k++) skip[k] = (double)y[k] * y[k];
}

static double pipe_loss(const float *y, int i, float *dy) {
    double loss = 0;
    for (int k = 0; k < PIPE_CELLS; k++) {
        float off = y[k] - pipe_number((uint64_t)i * 777 + (uint64_t)k + 5);
        loss += 0.5 * (double)off * off;
        if (dy) dy[k] = off;
    }
    return loss;
}

/* dz and dx; d_skip_back is the gradient received for the skip output. */
static void pipe_input_grad(const float *weight, const float *y, const float *dy, const double *d_skip_back,
                            float *dz, float *dx, double *d_skip) {
    for (int k = 0; k < PIPE_CELLS; k++) {
        float d = dy[k] + (d_skip_back ? (float)(d_skip_back[k] * 2 * y[k]) : 0);
        dz[k] = d * (1 - y[k] * y[k]);
        if (d_skip) d_skip[k] = dz[k];
    }
    for (int r = 0; r < PIPE_ROWS && dx; r++)
        for (int c = 0; c < PIPE_SIDE; c++) {
            float sum = 0;
            for (int n = 0; n < PIPE_SIDE; n++) sum += weight[n * PIPE_SIDE + c] * dz[r * PIPE_SIDE + n];
            dx[r * PIPE_SIDE + c] = sum;
        }
}

static void pipe_weight_grad(const float *dz, const float *x, float *d_weight, float *d_bias) {
    for (int n = 0; n < PIPE_SIDE; n++) {
        float sum = 0;
        for (int r = 0; r < PIPE_ROWS; r++) sum += dz[r * PIPE_SIDE + n];
        d_bias[n] = sum;
        for (int c = 0; c < PIPE_SIDE; c++) {
            float product = 0;
            for (int r = 0; r < PIPE_ROWS; r++) product += dz[r * PIPE_SIDE + n] * x[r * PIPE_SIDE + c];
            d_weight[n * PIPE_SIDE + c] = product;
        }
    }
}

//== the same as callbacks =================================================================

static int pipe_skips(const pipe_model *m) { return m->stages >= 3; }

#define PIPE_SEE(m, condition)                                    \
    do {                                                          \
        if (!(condition) && !(m)->wrong) (m)->wrong = #condition; \
    } while (0)

/* The arrays of a call: boundary first, then notes, then skip, as edges are listed. */
static const float *pipe_x(const pipe_model *m, const ddp_pipeline_call *c, float *drawn) {
    if (c->stage) return (const float *)c->inputs[0].data;
    pipe_input(drawn, m->first + c->microbatch);
    return drawn;
}

static ddp_result pipe_misbehave(pipe_model *m, const ddp_pipeline_call *c, int loss) {
    const pipe_fault *f = &m->fault;
    if (!f->how || f->stage != c->stage || f->microbatch != c->microbatch || f->kind != c->kind
        || f->step != m->steps || f->loss != loss)
        return DDP_OK;
    if (f->how == 2) kill(getpid(), SIGKILL);
    return f->how == 3 ? DDP_ERR_SYSTEM : ddp_fail(DDP_ERR_CORRUPT, "the sun does not shine");
}

static ddp_result pipe_on_forward(const ddp_pipeline_call *c, void *user) {
    pipe_model *m = (pipe_model *)user;
    int s = c->stage, last = s + 1 == m->stages;
    float drawn[PIPE_CELLS], *y = (float *)(last ? ((pipe_saved *)c->saved)->y : c->outputs[0].data);
    const float *x = pipe_x(m, c, drawn);
    PIPE_SEE(m,
             c->kind == DDP_ACTION_FORWARD && c->saved && c->input_grads == NULL && c->output_grads == NULL);
    PIPE_SEE(m, c->input_count == (s ? 2 : 0) + (last && pipe_skips(m)));
    PIPE_SEE(m, c->output_count == (last ? m->with_loss : 2) + (s == 0 && pipe_skips(m)));
    PIPE_SEE(m, (last != 0) == (c->loss != NULL));
    for (int k = 0; k < PIPE_NOTES && s; k++)
        PIPE_SEE(m, ((const int32_t *)c->inputs[1].data)[k] == c->microbatch * 100 + s * 10 + k);
    for (int k = 0; k < PIPE_NOTES && !last; k++)
        ((int32_t *)c->outputs[1].data)[k] = c->microbatch * 100 + (s + 1) * 10 + k;
    pipe_forward((const float *)m->pointers[s][0]->value.data, (const float *)m->pointers[s][1]->value.data,
                 x, last && pipe_skips(m) ? (const double *)c->inputs[2].data : NULL, y);
    if (s == 0 && pipe_skips(m)) pipe_skip_out(y, (double *)c->outputs[2].data);
    if (!last) memcpy(((pipe_saved *)c->saved)->y, y, sizeof(float) * PIPE_CELLS);
    if (last && m->with_loss) memcpy(c->outputs[0].data, y, sizeof(float) * PIPE_CELLS);
    if (last && !m->with_loss) *c->loss = pipe_loss(y, m->first + c->microbatch, NULL);
    m->recomputed += c->recomputing;
    m->evaluated += c->evaluating;
    return pipe_misbehave(m, c, 0);
}

static ddp_result pipe_on_loss(const ddp_pipeline_call *c, void *user) {
    pipe_model *m = (pipe_model *)user;
    PIPE_SEE(m, c->output_count == 1 && (c->evaluating != 0) == (c->output_grads == NULL));
    *c->loss = pipe_loss((const float *)c->outputs[0].data, m->first + c->microbatch,
                         c->output_grads ? (float *)c->output_grads[0].data : NULL);
    return pipe_misbehave(m, c, 1);
}

static ddp_result pipe_on_input_grad(const ddp_pipeline_call *c, void *user) {
    pipe_model *m = (pipe_model *)user;
    pipe_saved *saved = (pipe_saved *)c->saved;
    int s = c->stage, last = s + 1 == m->stages;
    float own[PIPE_CELLS];
    const float *dy = own;
    if (last && !m->with_loss)
        pipe_loss(saved->y, m->first + c->microbatch, own);
    else
        dy = (const float *)c->output_grads[0].data;
    PIPE_SEE(m, c->kind == DDP_ACTION_INPUT_GRAD || c->kind == DDP_ACTION_BACKWARD);
    PIPE_SEE(m, c->outputs == NULL && !c->evaluating && !c->recomputing);
    PIPE_SEE(m, last || c->output_grads[1].data == NULL);
    PIPE_SEE(m, !s || c->input_grads[1].data == NULL);
    pipe_input_grad((const float *)m->pointers[s][0]->value.data, saved->y, dy,
                    s == 0 && pipe_skips(m) ? (const double *)c->output_grads[2].data : NULL, saved->dz,
                    s ? (float *)c->input_grads[0].data : NULL,
                    last && pipe_skips(m) ? (double *)c->input_grads[2].data : NULL);
    return pipe_misbehave(m, c, 0);
}

static ddp_result pipe_on_weight_grad(const ddp_pipeline_call *c, void *user) {
    pipe_model *m = (pipe_model *)user;
    int s = c->stage;
    float drawn[PIPE_CELLS];
    PIPE_SEE(m, c->kind == DDP_ACTION_WEIGHT_GRAD && c->input_grads == NULL && c->saved);
    for (int k = 0; k < PIPE_NOTES && s; k++)
        PIPE_SEE(m, ((const int32_t *)c->inputs[1].data)[k] == c->microbatch * 100 + s * 10 + k);
    pipe_weight_grad(((pipe_saved *)c->saved)->dz, pipe_x(m, c, drawn), (float *)m->pointers[s][0]->grad.data,
                     (float *)m->pointers[s][1]->grad.data);
    return pipe_misbehave(m, c, 0);
}

static ddp_result pipe_on_backward(const ddp_pipeline_call *c, void *user) {
    ddp_pipeline_call half = *c;
    ddp_result result = pipe_on_input_grad(c, user);
    half.kind = DDP_ACTION_WEIGHT_GRAD;
    half.input_grads = NULL;
    return result == DDP_OK ? pipe_on_weight_grad(&half, user) : result;
}

/* w = w - rate g */
static RANKS_UNUSED void pipe_descend(const pipe_model *m, int s) {
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < (i ? PIPE_SIDE : PIPE_WEIGHTS); k++)
            ((float *)m->pointers[s][i]->value.data)[k] -= 0.05f
                                                           * ((const float *)m->pointers[s][i]->grad.data)[k];
}

//== building it ================================================================================

static void pipe_tensor(ddp_tensor *t, ddp_dtype dtype, int rows, int columns) {
    memset(t, 0, sizeof *t);
    t->dtype = dtype;
    t->ndim = columns ? 2 : 1;
    t->shape[0] = rows;
    t->shape[1] = columns;
}

static void pipe_edge(pipe_model *m, int from, int to, ddp_dtype dtype, int rows, int columns) {
    ddp_pipeline_edge *e = &m->edges[m->edge_count++];
    memset(e, 0, sizeof *e);
    e->from = from, e->to = to;
    pipe_tensor(&e->tensor, dtype, rows, columns);
}

static void pipe_build(pipe_model *m, int stages, int with_loss) {
    memset(m, 0, sizeof *m);
    m->stages = stages;
    m->with_loss = with_loss;
    for (int s = 0; s < stages; s++) {
        ddp_pipeline_stage *stage = &m->stage[s];
        for (int k = 0; k < PIPE_WEIGHTS; k++) m->weight[s][k] = pipe_number((uint64_t)(9000 + 100 * s + k));
        for (int k = 0; k < PIPE_SIDE; k++) m->bias[s][k] = pipe_number((uint64_t)(90000 + 100 * s + k)) / 4;
        for (int i = 0; i < 2; i++) {
            ddp_param *param = &m->params[s][i];
            pipe_tensor(&param->value, DDP_F32, PIPE_SIDE, i ? 0 : PIPE_SIDE);
            param->name = i ? "bias" : "weight";
            param->value.data = i ? m->bias[s] : m->weight[s];
            param->grad = param->value;
            param->grad.data = i ? m->d_bias[s] : m->d_weight[s];
            m->pointers[s][i] = param;
        }
        stage->forward = pipe_on_forward;
        stage->input_grad = pipe_on_input_grad;
        stage->weight_grad = pipe_on_weight_grad;
        stage->backward = s % 2 ? pipe_on_backward : NULL;
        stage->user = m;
        stage->saved_bytes = sizeof(pipe_saved);
        stage->params = m->pointers[s];
        stage->param_count = 2;
        if (s + 1 == stages) continue;
        pipe_edge(m, s, s + 1, DDP_F32, PIPE_ROWS, PIPE_SIDE);
        pipe_edge(m, s, s + 1, DDP_I32, PIPE_NOTES, 0);
    }
    if (pipe_skips(m)) pipe_edge(m, 0, stages - 1, DDP_F64, PIPE_CELLS, 0);
    if (with_loss) pipe_edge(m, stages - 1, stages, DDP_F32, PIPE_ROWS, PIPE_SIDE);
}

static void pipe_desc(pipe_model *m, const ddp_schedule *schedule, ddp_pipeline_desc *desc) {
    memset(desc, 0, sizeof *desc);
    desc->schedule = schedule;
    desc->stages = m->stage;
    desc->stage_count = m->stages;
    desc->edges = m->edges;
    desc->edge_count = m->edge_count;
    desc->loss = m->with_loss ? pipe_on_loss : NULL;
    desc->loss_user = m;
}

//== one process ================================================================================

typedef struct pipe_grads {
    float weight[PIPE_STAGES][PIPE_WEIGHTS], bias[PIPE_STAGES][PIPE_SIDE];
} pipe_grads;

/* Forward and backward of one micro-batch, with weights of any version. Returns the loss. */
static RANKS_UNUSED double pipe_plain(int stages, const float *const *weight, const float *const *bias, int i,
                                      pipe_grads *g) {
    float x[PIPE_STAGES + 1][PIPE_CELLS], dz[PIPE_CELLS], d[2][PIPE_CELLS];
    double skip[PIPE_CELLS], d_skip[PIPE_CELLS], loss;
    int skips = stages >= 3;
    pipe_input(x[0], i);
    for (int s = 0; s < stages; s++) {
        pipe_forward(weight[s], bias[s], x[s], skips && s + 1 == stages ? skip : NULL, x[s + 1]);
        if (skips && s == 0) pipe_skip_out(x[1], skip);
    }
    loss = pipe_loss(x[stages], i, d[0]);
    for (int s = stages - 1; s >= 0; s--) {
        pipe_input_grad(weight[s], x[s + 1], d[0], skips && s == 0 ? d_skip : NULL, dz, d[1],
                        skips && s + 1 == stages ? d_skip : NULL);
        pipe_weight_grad(dz, x[s], g->weight[s], g->bias[s]);
        memcpy(d[0], d[1], sizeof d[0]);
    }
    return loss;
}

/* Pairwise: the left part is the largest power of two below count. The sum is left in g[0]. */
static RANKS_UNUSED void pipe_sum(pipe_grads *g, int count) {
    int half = 1;
    if (count == 1) return;
    while (2 * half < count) half *= 2;
    pipe_sum(g, half);
    pipe_sum(g + half, count - half);
    for (size_t k = 0; k < sizeof *g / sizeof(float); k++) ((float *)g)[k] += ((const float *)(g + half))[k];
}

static RANKS_UNUSED double pipe_sum_losses(const double *losses, int count) {
    int half = 1;
    if (count == 1) return losses[0];
    while (2 * half < count) half *= 2;
    return pipe_sum_losses(losses, half) + pipe_sum_losses(losses + half, count - half);
}

#endif

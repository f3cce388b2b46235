/*  async_pipeline.c - asynchronous pipelines: PipeDream and PipeDream-2BW next to 1F1B

        cc -O3 -march=native examples/async_pipeline.c -o async_pipeline -lm -lpthread
        ./async_pipeline         2 ranks, 32 batches; a synthetic data set
        ./async_pipeline 4 100   4 ranks, 100 batches

    1F1B drains the pipeline before each update, and ranks wait meanwhile. PipeDream (Harlap et al. 2018)
    keeps it full: a stage updates its weights after every micro-batch, while others are in flight. A backward
    needs the weights of its forward, so a stage keeps a version for each micro-batch in flight:

        rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 ...   B1 uses the weights of F1, although the update
        rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 ...   of micro-batch 0 comes between F1 and B1

    PipeDream-2BW (Narayanan et al. 2021) updates once per batch and keeps two versions on every stage. The
    weights of 1F1B have the same bits on any number of ranks: the last line prints their hash. The model is
    that of train_mlp_pipeline.c with two more layers. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_optimizer */
#include "../ddp_pipeline.h"
#include "extras/mnist.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIXELS = 784, HIDDEN = 128, CLASSES = 10, LAYERS = 6, PARAMS = 2 * LAYERS };
enum { MICRO = 64, BATCH = 4, MAX_BATCHES = 1000 }; /* samples of a micro-batch; micro-batches of a batch */
enum { SAMPLES = 4096, BOUNDARY_BYTES = MICRO * HIDDEN * sizeof(float) };
static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, CLASSES};
typedef float matrix[MICRO * PIXELS]; /* (MICRO, width) */

static mnist data; /* synthetic; made before the ranks start */

//== model ======================================================================================
typedef struct trainer {
    ddp_group *world;
    ddp_param params[PARAMS]; /* of layer l: 2l weight (width[l], width[l + 1]), 2l + 1 bias */
    float value[PARAMS][PIXELS * HIDDEN], grad[PARAMS][PIXELS * HIDDEN];
    matrix d_out[LAYERS + 1], profiled[LAYERS + 1];
    int batches, start; /* of the training; micro-batches before this step of the pipeline */
    double loss[MAX_BATCHES * BATCH];
    int first_layer[LAYERS + 1], first, end; /* of each stage, then LAYERS; of this rank's stage */
    ddp_param *stage_params[PARAMS];
    const char *name; /* of the schedule */
    ddp_schedule *schedule;
    ddp_pipeline *pipeline;
    ddp_optimizer *optimizer;
} trainer;

/* out = relu(in weight + bias); the last layer has no relu. */
static void forward_layer(trainer *t, int l, const float *in, float *out) {
    const float *weight = (const float *)t->params[2 * l].value.data;
    const float *bias = (const float *)t->params[2 * l + 1].value.data;
    int inputs = width[l], outputs = width[l + 1];
    for (int b = 0; b < MICRO; b++, in += inputs, out += outputs) {
        for (int j = 0; j < outputs; j++) out[j] = bias[j];
        for (int i = 0; i < inputs; i++)
            for (int j = 0; j < outputs; j++) out[j] += in[i] * weight[i * outputs + j];
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) out[j] = out[j] > 0 ? out[j] : 0;
    }
}

/* From d_out[l + 1]: the gradients of weight and bias, and d_out[l]. */
static void backward_layer(trainer *t, int l, const float *in, const float *out) {
    const float *weight = (const float *)t->params[2 * l].value.data;
    float *d_weight = (float *)t->params[2 * l].grad.data, *d_bias = (float *)t->params[2 * l + 1].grad.data;
    float *d = t->d_out[l + 1], *d_in = t->d_out[l];
    int inputs = width[l], outputs = width[l + 1];
    memset(d_weight, 0, sizeof(float) * (size_t)(inputs * outputs));
    memset(d_bias, 0, sizeof(float) * (size_t)outputs);
    for (int b = 0; b < MICRO; b++, in += inputs, out += outputs, d += outputs, d_in += inputs) {
        for (int j = 0; l < LAYERS - 1 && j < outputs; j++) d[j] = out[j] > 0 ? d[j] : 0;
        for (int j = 0; j < outputs; j++) d_bias[j] += d[j];
        for (int i = 0; i < inputs; i++) {
            float sum = 0;
            for (int j = 0; j < outputs; j++) d_weight[i * outputs + j] += in[i] * d[j];
            for (int j = 0; l > 0 && j < outputs; j++) sum += weight[i * outputs + j] * d[j];
            d_in[i] = sum;
        }
    }
}

/* Returns the mean loss of a micro-batch, and sets the gradient of its logits. */
static double cross_entropy(trainer *t, const float *logits, const uint8_t *label) {
    double loss = 0;
    for (int b = 0; b < MICRO; b++, logits += CLASSES) {
        float *d_logits = t->d_out[LAYERS] + b * CLASSES, max = logits[0], sum = 0;
        for (int j = 1; j < CLASSES; j++) max = logits[j] > max ? logits[j] : max;
        for (int j = 0; j < CLASSES; j++) sum += expf(logits[j] - max);
        for (int j = 0; j < CLASSES; j++)
            d_logits[j] = (expf(logits[j] - max) / sum - (j == label[b])) / MICRO;
        loss += (double)(logf(sum) + max - logits[label[b]]);
    }
    return loss / MICRO;
}

/* He et al. 2015: uniform weights of variance 2 / inputs. */
static void create_model(trainer *t) {
    uint32_t random = 1;
    memset(t->value, 0, sizeof t->value);
    for (int i = 0; i < PARAMS; i++) {
        int rows = i % 2 ? 1 : width[i / 2], columns = width[i / 2 + 1];
        t->params[i] = (ddp_param){.name = i % 2 ? "bias" : "weight"};
        t->params[i].value = (ddp_tensor){t->value[i], DDP_F32, 2, {rows, columns}};
        t->params[i].grad = (ddp_tensor){t->grad[i], DDP_F32, 2, {rows, columns}};
        for (int k = 0; i % 2 == 0 && k < rows * columns; k++) {
            random = random * 1664525 + 1013904223;
            t->value[i][k] = sqrtf(6.0f / (float)rows) * ((float)(random >> 8) / 8388608.0f - 1);
        }
    }
}

//== pipeline ===================================================================================
/* Runs one part of one layer, which ddp_pipeline_profile measures. W is all of backward. */
static ddp_result run_layer(int l, ddp_action_kind kind, void *user) {
    trainer *t = (trainer *)user;
    if (kind == DDP_ACTION_FORWARD) forward_layer(t, l, t->profiled[l], t->profiled[l + 1]);
    if (kind == DDP_ACTION_WEIGHT_GRAD) backward_layer(t, l, t->profiled[l], t->profiled[l + 1]);
    return DDP_OK;
}

/* Gives each rank a stage, such that the slowest stage is as fast as possible. Rank 0 measures the layers. */
static ddp_result cut_model(trainer *t) {
    ddp_profile_desc desc = {.layer_count = LAYERS, .run = run_layer, .user = t};
    ddp_stage_cost cost[LAYERS] = {0};
    double seconds[LAYERS];
    int ranks = ddp_world_size(t->world), rank = ddp_rank(t->world);
    create_model(t);
    if (rank == 0) DDP_TRY(ddp_pipeline_profile(&desc, cost));
    for (int l = 0; l < LAYERS; l++) seconds[l] = cost[l].forward + cost[l].weight_grad;
    DDP_TRY(ddp_broadcast(t->world, seconds, LAYERS, DDP_F64, 0, NULL));
    DDP_TRY(ddp_pipeline_partition(seconds, LAYERS, ranks, t->first_layer));
    t->first_layer[ranks] = LAYERS;
    t->first = t->first_layer[rank];
    t->end = t->first_layer[rank + 1];
    return DDP_OK;
}

/* Forward of this rank's layers. call->saved keeps their inputs and outputs until backward. */
static ddp_result forward(const ddp_pipeline_call *call, void *user) {
    trainer *t = (trainer *)user;
    matrix *out = (matrix *)call->saved; /* out[0] goes into layer t->first */
    int at = t->start + call->microbatch, row = at * MICRO % SAMPLES, layers = t->end - t->first;
    for (int i = 0; t->first == 0 && i < MICRO * PIXELS; i++)
        out[0][i] = (float)data.images[row * PIXELS + i] / 128 - 0.5f;
    if (t->first > 0) memcpy(out[0], call->inputs[0].data, BOUNDARY_BYTES);
    for (int i = 0; i < layers; i++) forward_layer(t, t->first + i, out[i], out[i + 1]);
    if (t->end < LAYERS) memcpy(call->outputs[0].data, out[layers], BOUNDARY_BYTES);
    if (t->end == LAYERS) *call->loss = cross_entropy(t, out[layers], data.labels + row);
    if (t->first == 0 && isatty(STDOUT_FILENO)) /* the next line overwrites this one */
        dprintf(STDOUT_FILENO, "%s: batch %d/%d \r", t->name, at / BATCH, t->batches);
    return DDP_OK;
}

/* The runner has pointed the parameters to the weights that this micro-batch's forward used. */
static ddp_result backward(const ddp_pipeline_call *call, void *user) {
    trainer *t = (trainer *)user;
    const matrix *out = (const matrix *)call->saved;
    int layers = t->end - t->first;
    int row = (t->start + call->microbatch) * MICRO % SAMPLES;
    if (t->end < LAYERS) memcpy(t->d_out[t->end], call->output_grads[0].data, BOUNDARY_BYTES);
    if (t->end == LAYERS) cross_entropy(t, out[layers], data.labels + row);
    for (int i = layers - 1; i >= 0; i--) backward_layer(t, t->first + i, out[i], out[i + 1]);
    if (t->first > 0) memcpy(call->input_grads[0].data, t->d_out[t->first], BOUNDARY_BYTES);
    return DDP_OK;
}

/* The gradients of this stage's update are final: of a batch, or of one micro-batch with PipeDream. */
static ddp_result update(int stage, void *user) {
    (void)stage;
    return ddp_optimizer_step(((trainer *)user)->optimizer, 1e-3f);
}

/* The list of 1F1B is one batch: its only update comes at the end. The other two have one list for the whole
   training, so that they never drain the pipeline. */
static ddp_result create_strategy(trainer *t, ddp_schedule_kind kind) {
    int ranks = ddp_world_size(t->world), rank = ddp_rank(t->world), layers = t->end - t->first;
    ddp_schedule_desc schedule = {.kind = kind, .rank_count = ranks};
    schedule.microbatch_count = kind == DDP_SCHEDULE_1F1B ? BATCH : t->batches * BATCH;
    if (kind == DDP_SCHEDULE_PIPEDREAM_2BW) schedule.update_interval = BATCH;
    DDP_TRY(ddp_schedule_create(&t->schedule, &schedule));
    for (int i = 0; i < 2 * layers; i++) t->stage_params[i] = t->params + 2 * t->first + i;
    ddp_pipeline_stage stages[LAYERS] = {0};
    stages[rank] = (ddp_pipeline_stage){.forward = forward, .backward = backward, .update = update};
    stages[rank].user = t;
    stages[rank].saved_bytes = (size_t)(layers + 1) * sizeof(matrix);
    stages[rank].params = t->stage_params;
    stages[rank].param_count = 2 * layers;
    ddp_pipeline_desc desc = {.schedule = t->schedule, .stages = stages, .stage_count = ranks};
    desc.boundary = (ddp_tensor){NULL, DDP_F32, 2, {MICRO, HIDDEN}};
    DDP_TRY(ddp_pipeline_create(&t->pipeline, t->world, &desc));
    ddp_optimizer_desc adamw = {.params = *t->stage_params, .param_count = 2 * layers, .weight_decay = 0.01f};
    return ddp_optimizer_create(&t->optimizer, t->world, &adamw);
}

/* A hash of all weights, which each rank gets from the rank of their stage. */
static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    *hash = 14695981039346656037u;
    for (int i = 0, stage = 0; i < PARAMS; i++) {
        size_t count = (size_t)(i % 2 ? 1 : width[i / 2]) * (size_t)width[i / 2 + 1];
        while (i / 2 >= t->first_layer[stage + 1]) stage++;
        DDP_TRY(ddp_broadcast(t->world, t->value[i], count, DDP_F32, stage, NULL));
        for (size_t k = 0; k < count * sizeof(float); k++)
            *hash = (*hash ^ ((const uint8_t *)t->value[i])[k]) * 1099511628211u;
    }
    return DDP_OK;
}

/* Prints a line of the table. seconds: of training on this rank, in total and computing. */
static ddp_result report(trainer *t, double loss, double *seconds) {
    ddp_stage_cost costs[LAYERS];
    ddp_rank_report simulated[LAYERS];
    ddp_schedule_report all = {.ranks = simulated};
    int ranks = ddp_world_size(t->world), interval = ddp_schedule_update_interval(t->schedule);
    DDP_TRY(ddp_pipeline_get_times(t->pipeline, costs, NULL));
    DDP_TRY(ddp_schedule_simulate(t->schedule, costs, &all)); /* with the measured costs */
    DDP_TRY(ddp_all_reduce(t->world, seconds, seconds, 2, DDP_F64, DDP_OP_AVG, NULL));
    if (ddp_rank(t->world) > 0) return DDP_OK;
    double busy = 0, ms = 1e3 * seconds[0] / t->batches;
    for (int r = 0; r < ranks; r++) busy += simulated[r].busy / all.makespan / ranks;
    printf("%-14s %7d %8.4f %9.2f ", t->name, t->batches * BATCH / interval, loss, ms);
    printf("%9.0f%% %9.0f%%  ", 100 - 100 * seconds[1] / seconds[0], 100 - 100 * busy);
    for (int r = 0; r < ranks; r++) printf(" %d%s", simulated[r].weight_versions, r < ranks - 1 ? "" : "\n");
    return DDP_OK;
}

/* Trains with one schedule. All schedules see the same samples in the same order. */
static ddp_result train(trainer *t) {
    int list = ddp_schedule_microbatch_count(t->schedule), total = t->batches * BATCH;
    double mean, loss = 0, seconds[2] = {0, 0}, begin = ddp_now();
    ddp_pipeline_stats stats;
    for (t->start = 0; t->start < total; t->start += list) {
        DDP_TRY(ddp_pipeline_step(t->pipeline));
        DDP_TRY(ddp_pipeline_get_loss(t->pipeline, &mean, t->loss + t->start));
        DDP_TRY(ddp_pipeline_get_stats(t->pipeline, &stats));
        seconds[1] += stats.compute_seconds + stats.update_seconds;
    }
    seconds[0] = ddp_now() - begin;
    for (int i = total - BATCH; i < total; i++) loss += t->loss[i] / BATCH; /* of the last batch */
    DDP_TRY(report(t, loss, seconds));
    double limit = t->batches < 32 ? t->loss[0] : 0.5; /* a short training only improves */
    return loss < limit ? DDP_OK : ddp_fail(DDP_ERR_CORRUPT, "%s: loss %.3f >= %.3f", t->name, loss, limit);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    ddp_schedule_kind kinds[] = {DDP_SCHEDULE_1F1B, DDP_SCHEDULE_PIPEDREAM, DDP_SCHEDULE_PIPEDREAM_2BW};
    uint64_t hash = 0;
    int ranks = ddp_world_size(world);
    if (ranks > BATCH) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1 to %d", ranks, BATCH);
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    t->world = world;
    t->batches = *(const int *)user;
    ddp_result result = cut_model(t);
    if (ddp_rank(world) == 0)
        printf("                                  ms per   share of waiting     weight versions\n"
               "schedule       updates     loss    batch   measured  simulated   of each stage\n");
    for (int k = 0; k < 3 && result == DDP_OK; k++) {
        t->name = ddp_schedule_kind_name(kinds[k]);
        create_model(t);
        result = create_strategy(t, kinds[k]);
        if (result == DDP_OK) result = train(t);
        if (result == DDP_OK && k == 0) result = hash_weights(t, &hash);
        ddp_optimizer_destroy(t->optimizer);
        ddp_pipeline_destroy(t->pipeline);
        ddp_schedule_destroy(t->schedule);
        t->optimizer = NULL;
        t->pipeline = NULL;
        t->schedule = NULL;
    }
    free(t);
    if (result == DDP_OK && !ddp_rank(world)) printf("weights of 1F1B %016llx\n", (unsigned long long)hash);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    int batches = argc > 2 ? atoi(argv[2]) : 32;
    ddp_result result = mnist_synthetic(SAMPLES, 0, &data, NULL);
    if (argc > 3 || desc.world_size < 1 || batches < 3 || batches > MAX_BATCHES)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [batches]], 3 to 1000 batches", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &batches);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

/*  uneven.c - ranks with different numbers of batches

        cc -O3 -march=native examples/uneven.c -o uneven -lm -lpthread
        ./uneven              3 ranks: rank 0 has 100 batches, rank 1 has 200, rank 2 has 300
        ./uneven 2 50         2 ranks, 50 batches on rank 0
        ./uneven 3 100 stop   all ranks stop when the first rank has no batch left

    Without a join, a rank that has finished would leave the others waiting for its gradient. Before each step
    every rank calls ddp_join_step and states whether it has a batch. The call returns the number of active
    ranks, by which the reducer then divides:

        step     0       1       2
        rank 0   batch   zeros   zeros      a finished rank contributes zeros
        rank 1   batch   batch   zeros
        rank 2   batch   batch   batch
        active   3       2       1          "stop": all ranks stop after step 0

    At the end all ranks hold the same weights, and every batch counts once in the mean loss. PyTorch calls
    this the join context manager. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 4, COLUMNS = 6, SAMPLES = 8 }; /* samples of a batch */

typedef struct arguments {
    int ranks, batches, stop;
} arguments;

typedef struct trainer {
    ddp_param param;
    float weight[ROWS * COLUMNS];
    ddp_reducer *reducer;
    ddp_join *join;
    double first_loss, last_loss;
    ddp_mean loss;
} trainer;

/* A step of SGD. A finished rank calls it too: its weights stay equal to those of the other ranks. */
static ddp_result update(void *user) {
    trainer *t = (trainer *)user;
    const float *gradient = (const float *)t->param.grad.data;
    for (int i = 0; i < ROWS * COLUMNS; i++) t->weight[i] -= 0.1f * gradient[i];
    return DDP_OK;
}

/* The layer y = W x learns the outputs of another layer. Computes the gradient, and returns the loss. */
static double backward(trainer *t, int rank, int batch) {
    float *gradient = (float *)t->param.grad.data;
    double loss = 0;
    memset(gradient, 0, ROWS * COLUMNS * sizeof(float));
    for (int s = 0; s < SAMPLES; s++)
        for (int r = 0; r < ROWS; r++) {
            float x[COLUMNS], error = 0;
            for (int c = 0; c < COLUMNS; c++) {
                x[c] = cosf((float)(1 + rank + 7 * batch + 13 * s) * (float)(c + 1));
                error += (t->weight[r * COLUMNS + c] - sinf((float)(r * COLUMNS + c))) * x[c];
            }
            loss += (double)(error * error) / (SAMPLES * ROWS);
            for (int c = 0; c < COLUMNS; c++) gradient[r * COLUMNS + c] += error * x[c] / SAMPLES;
        }
    return loss;
}

static ddp_result train(trainer *t, int rank, int batches) {
    for (int batch = 0;; batch++) {
        int active; /* 0: training is over on all ranks */
        DDP_TRY(ddp_join_step(t->join, batch < batches, &active));
        if (active == 0) return DDP_OK;
        t->last_loss = backward(t, rank, batch);
        if (batch == 0) t->first_loss = t->last_loss;
        ddp_mean_add(&t->loss, t->last_loss, 1);
        DDP_TRY(ddp_reducer_ready(t->reducer, 0));
        DDP_TRY(ddp_reducer_wait(t->reducer)); /* the gradient is now the average over active ranks */
        DDP_TRY(update(t));
    }
}

/* All ranks must hold the same weights. The loss must have fallen, and every batch must count once. */
static ddp_result check(ddp_group *world, trainer *t, const arguments *args) {
    int ranks = ddp_world_size(world);
    int expected = args->batches * ranks; /* with "stop", every rank used as many as rank 0 has */
    if (!args->stop) expected = args->batches * ranks * (ranks + 1) / 2;
    uint64_t hash = 14695981039346656037u;
    uint64_t least, greatest;
    for (size_t k = 0; k < sizeof t->weight; k++)
        hash = (hash ^ ((const uint8_t *)t->weight)[k]) * 1099511628211u;
    DDP_TRY(ddp_all_reduce(world, &hash, &least, 1, DDP_U64, DDP_OP_MIN, NULL));
    DDP_TRY(ddp_all_reduce(world, &hash, &greatest, 1, DDP_U64, DDP_OP_MAX, NULL));
    if (least != greatest)
        return ddp_fail(DDP_ERR_CORRUPT, "rank %d: the ranks ended with different weights", ddp_rank(world));

    DDP_TRY(ddp_mean_reduce(world, &t->loss));
    if (t->loss.count != expected)
        return ddp_fail(DDP_ERR_CORRUPT, "%lld batches are in the mean loss, not %d",
                        (long long)t->loss.count, expected);
    if (ddp_rank(world) == ranks - 1) /* the rank with the most batches */
        printf("%d ranks with %d to %d batches: %d used, loss %.4f -> %.2g, mean %.4f, weights %016llx\n",
               ranks, args->batches, args->batches * ranks, expected, t->first_loss, t->last_loss,
               ddp_mean_value(&t->loss), (unsigned long long)hash);
    if (args->batches >= 100 && t->last_loss > 1e-2 * t->first_loss)
        return ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g: it must fall by a factor of 100",
                        t->first_loss, t->last_loss);
    return DDP_OK;
}

static ddp_result create(trainer *t, ddp_group *world, int stop) {
    ddp_reducer_desc reducer = {.params = &t->param, .param_count = 1};
    t->param = (ddp_param){.name = "weight", .value = {t->weight, DDP_F32, 2, {ROWS, COLUMNS}}};
    DDP_TRY(ddp_reducer_create(&t->reducer, world, &reducer));
    ddp_join_desc join = {.reducer = t->reducer, .step_fn = update, .user = t};
    if (stop) join.mode = DDP_JOIN_STOP;
    return ddp_join_create(&t->join, world, &join);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    const arguments *args = (const arguments *)user;
    trainer t = {0};
    ddp_result result = create(&t, world, args->stop);
    if (result == DDP_OK) result = train(&t, ddp_rank(world), args->batches * (ddp_rank(world) + 1));
    if (result == DDP_OK) result = check(world, &t, args);
    ddp_join_destroy(t.join);
    ddp_reducer_destroy(t.reducer);
    return result;
}

int main(int argc, char **argv) {
    arguments args = {.ranks = 3, .batches = 100, .stop = argc > 3};
    if (argc > 1) args.ranks = atoi(argv[1]);
    if (argc > 2) args.batches = atoi(argv[2]);
    ddp_launch_desc desc = {.world_size = args.ranks};
    ddp_result result = DDP_OK;
    if (argc > 4 || args.ranks < 1 || args.batches < 1 || args.batches > 1000000
        || (args.stop && strcmp(argv[3], "stop") != 0))
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [batches of rank 0 [stop]]]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &args);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

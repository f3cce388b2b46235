/*  experts.c - a mixture of experts: gradients that not every rank has, averages over tokens

        cc -O3 -march=native examples/experts.c -o experts -lm -lpthread
        ./experts                                  one rank
        mpirun --oversubscribe -n 4 ./experts      the ranks of a launcher
        for r in 0 1; do RANK=$r WORLD_SIZE=2 ./experts & done; wait      ranks started by hand

    The launcher starts the program once per rank, so it calls ddp_group_create instead of ddp_launch. Each
    rank has a different number of tokens, and each token uses one of three experts:

        per_token     gradients are divided by the tokens of all ranks, not by the ranks
        find_unused   an expert that a rank did not use counts as zeros there. In every second step no rank
                      uses expert 2: ddp_reducer_is_unused reports it
        no_sync       a rank computes its tokens in two parts. The first stays local: nothing is sent */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_optimizer */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 3, SIZE = 16, TOKENS = 48, STEPS = 60 };

typedef struct trainer {
    ddp_group *world;
    ddp_param params[EXPERTS];
    float value[EXPERTS][SIZE], grad[EXPERTS][SIZE];
    int used[EXPERTS]; /* by this rank in this step */
    ddp_reducer *reducer;
    ddp_optimizer *optimizer;
} trainer;

/* An expert learns a vector. Token i uses expert i % 3 in even steps, and i % 2 in odd ones. Adds the
   gradients of the tokens, and the sum of their losses. */
static void backward(trainer *t, int step, int first, int end, ddp_mean *loss) {
    for (int i = first; i < end; i++) {
        int e = i % (step % 2 ? 2 : 3);
        double sum = 0;
        for (int k = 0; k < SIZE; k++) {
            float error = t->value[e][k] - sinf((float)(e * SIZE + k));
            t->grad[e][k] += error;
            sum += 0.5 * (double)(error * error);
        }
        t->used[e] = 1;
        ddp_mean_add(loss, sum, 1);
    }
}

/* One step on tokens first to end - 1. *unused: number of experts that no rank used. */
static ddp_result train_step(trainer *t, int step, int first, int end, ddp_mean *loss, int *unused) {
    int middle = (first + end) / 2;
    memset(t->grad, 0, sizeof t->grad);
    memset(t->used, 0, sizeof t->used);
    DDP_TRY(ddp_reducer_no_sync(t->reducer, 1));
    backward(t, step, first, middle, loss);
    DDP_TRY(ddp_reducer_no_sync(t->reducer, 0));
    backward(t, step, middle, end, loss);
    for (int e = EXPERTS - 1; e >= 0; e--)
        if (t->used[e]) DDP_TRY(ddp_reducer_ready(t->reducer, e));
    DDP_TRY(ddp_reducer_wait_mean(t->reducer, loss));
    for (int e = 0; e < EXPERTS; e++) *unused += ddp_reducer_is_unused(t->reducer, e);
    return ddp_optimizer_step(t->optimizer, 0.5f);
}

static ddp_result train(trainer *t) {
    int rank = ddp_rank(t->world), ranks = ddp_world_size(t->world), unused = 0;
    int first = TOKENS * rank * rank / (ranks * ranks);
    int end = TOKENS * (rank + 1) * (rank + 1) / (ranks * ranks);
    double first_loss = 0, last_loss = 0;
    for (int e = 0; e < EXPERTS; e++)
        t->params[e] = (ddp_param){.name = "expert",
                                   .value = {t->value[e], DDP_F32, 1, {SIZE}},
                                   .grad = {t->grad[e], DDP_F32, 1, {SIZE}}};
    ddp_reducer_desc desc = {.params = t->params, .param_count = EXPERTS, .find_unused = 1, .per_token = 1};
    DDP_TRY(ddp_reducer_create(&t->reducer, t->world, &desc));
    ddp_optimizer_desc sgd = {.kind = DDP_OPTIMIZER_SGD, .params = t->params, .param_count = EXPERTS};
    DDP_TRY(ddp_optimizer_create(&t->optimizer, t->world, &sgd));
    for (int step = 0; step < STEPS; step++) {
        ddp_mean loss = {0};
        DDP_TRY(train_step(t, step, first, end, &loss, &unused));
        last_loss = ddp_mean_value(&loss);
        if (step == 0) first_loss = last_loss;
        if (loss.count != TOKENS)
            return ddp_fail(DDP_ERR_CORRUPT, "%lld tokens are counted, not %d", (long long)loss.count,
                            TOKENS);
    }
    if (rank == 0)
        printf("%d ranks, %d steps: loss %.4f -> %.2g; experts unused by all ranks: %d times\n", ranks,
               (int)ddp_optimizer_get_step(t->optimizer), first_loss, last_loss, unused);
    if (unused != STEPS / 2)
        return ddp_fail(DDP_ERR_CORRUPT, "an expert was unused %d times, not %d", unused, STEPS / 2);
    if (!(last_loss < 1e-3 * first_loss))
        return ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g", first_loss, last_loss);
    return DDP_OK;
}

int main(int argc, char **argv) {
    trainer t = {0};
    ddp_result result = DDP_OK;
    if (argc > 1)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s, without arguments: a launcher sets the ranks",
                          argv[0]);
    if (result == DDP_OK) result = ddp_group_create(&t.world, NULL);
    if (result == DDP_OK) result = train(&t);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    ddp_optimizer_destroy(t.optimizer);
    ddp_reducer_destroy(t.reducer);
    ddp_group_destroy(t.world);
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

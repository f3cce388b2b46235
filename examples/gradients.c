/*  gradients.c - uses of a reducer: micro-batches, unused parameters, means, clipping, loss scaling

        cc -O3 -march=native examples/gradients.c -o gradients -lm -lpthread
        ./gradients               2 ranks
        ./gradients 4             4 ranks
        mpirun --oversubscribe -n 4 ./gradients 4    the ranks of a launcher

    A reducer averages gradients over ranks. Each function below creates one for the same two parameters, sets
    gradients as a backward would, and compares the result with a formula. train_mlp.c is a whole trainer with
    a reducer; uneven.c has ranks with different numbers of batches. The calls follow PyTorch's DDP. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_scaler */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PARAMS = 2, COUNT = 1000 }; /* elements of each */

typedef struct model {
    ddp_param params[PARAMS]; /* create sets grad.data */
    float value[PARAMS][COUNT];
} model;

static ddp_result create(ddp_reducer **out, ddp_group *world, model *m, ddp_reducer_desc desc) {
    static const char *const names[PARAMS] = {"body", "expert"};
    for (int p = 0; p < PARAMS; p++)
        m->params[p] = (ddp_param){.name = names[p], .value = {m->value[p], DDP_F32, 1, {COUNT}}};
    desc.params = m->params;
    desc.param_count = PARAMS;
    return ddp_reducer_create(out, world, &desc);
}

/* Sets all elements of a gradient, as backward does, or adds to them. */
static void set_grad(model *m, int p, float value, int add) {
    float *grad = (float *)m->params[p].grad.data;
    for (int i = 0; i < COUNT; i++) grad[i] = add ? grad[i] + value : value;
}

/* All elements of both gradients must be as expected. Rank 0 prints them. */
static ddp_result check(ddp_group *world, const char *what, const model *m, double body, double expert) {
    const double expected[PARAMS] = {body, expert};
    for (int p = 0; p < PARAMS; p++)
        for (int i = 0; i < COUNT; i++) {
            double grad = (double)((const float *)m->params[p].grad.data)[i];
            if (fabs(grad - expected[p]) > 1e-5 * (1 + fabs(expected[p])))
                return ddp_fail(DDP_ERR_CORRUPT, "%s: gradient %d of %s on rank %d is %g, not %g", what, i,
                                m->params[p].name, ddp_rank(world), grad, expected[p]);
        }
    if (ddp_rank(world) == 0) printf("%-28s body %-8.4g expert %-8.4g\n", what, body, expert);
    return DDP_OK;
}

/* Every rank adds up two micro-batches by itself; only the second one is reduced. ddp_accumulator does the
   same with bits that do not depend on the number of ranks. */
static ddp_result micro_batches(ddp_group *world, model *m) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world);
    ddp_reducer *reducer;
    DDP_TRY(create(&reducer, world, m, (ddp_reducer_desc){.micro_batch_count = 2}));
    for (int micro_batch = 0; micro_batch < 2; micro_batch++) {
        DDP_TRY(ddp_reducer_no_sync(reducer, micro_batch == 0));
        for (int p = PARAMS - 1; p >= 0; p--) { /* backward: the last parameter is ready first */
            set_grad(m, p, (float)(rank + p), micro_batch > 0);
            DDP_TRY(ddp_reducer_ready(reducer, p));
        }
        DDP_TRY(ddp_reducer_wait(reducer));
    }
    double mean = (ranks - 1) / 2.0; /* of the ranks' numbers */
    ddp_result result = check(world, "two micro-batches", m, mean, mean + 1);
    ddp_reducer_destroy(reducer);
    return result;
}

/* The expert is used by the last rank in step 0, and by no rank in step 1. */
static ddp_result unused_parameters(ddp_group *world, model *m) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world);
    ddp_reducer *reducer;
    DDP_TRY(create(&reducer, world, m, (ddp_reducer_desc){.find_unused = 1}));
    for (int step = 0; step < 2; step++) {
        if (step == 0 && rank == ranks - 1) {
            set_grad(m, 1, 8, 0);
            DDP_TRY(ddp_reducer_ready(reducer, 1));
        }
        set_grad(m, 0, 1, 0);
        DDP_TRY(ddp_reducer_ready(reducer, 0));
        DDP_TRY(ddp_reducer_wait(reducer));
        if (ddp_reducer_is_unused(reducer, 1) != step)
            return ddp_fail(DDP_ERR_CORRUPT, "step %d: is_unused of the expert is %d", step, 1 - step);
        DDP_TRY(check(world, step ? "expert used by no rank" : "expert used by one rank", m, 1,
                      step ? 0 : 8.0 / ranks));
    }
    ddp_reducer_destroy(reducer);
    return DDP_OK;
}

/* Rank r has r + 1 tokens, each with a loss and a gradient of r. The mean is over tokens, not over ranks. */
static ddp_result mean_over_tokens(ddp_group *world, model *m) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world);
    double sum = 0, tokens = 0;
    ddp_mean loss = DDP_ZERO;
    ddp_reducer *reducer;
    for (int r = 0; r < ranks; r++) {
        sum += r * (r + 1);
        tokens += r + 1;
    }
    DDP_TRY(create(&reducer, world, m, (ddp_reducer_desc){.per_token = 1}));
    ddp_mean_add(&loss, rank * (rank + 1), rank + 1);
    for (int p = PARAMS - 1; p >= 0; p--) {
        set_grad(m, p, (float)(rank * (rank + 1)), 0);
        DDP_TRY(ddp_reducer_ready(reducer, p));
    }
    DDP_TRY(ddp_reducer_wait_mean(reducer, &loss));
    DDP_TRY(check(world, "mean over tokens", m, sum / tokens, sum / tokens));
    if (ddp_mean_value(&loss) != sum / tokens)
        return ddp_fail(DDP_ERR_CORRUPT, "the mean loss is %g, not %g", ddp_mean_value(&loss), sum / tokens);
    ddp_reducer_destroy(reducer);
    return DDP_OK;
}

/* Clips the norm of all gradients, and prints what the reducer measured. */
static ddp_result clip(ddp_group *world, model *m) {
    const double norm = 3 * sqrt(PARAMS * COUNT);
    float found;
    ddp_reducer_stats stats;
    ddp_reducer *reducer;
    ddp_reducer_desc desc = {.first_bucket_bytes = 4000, .bucket_cap_bytes = 4000}; /* one parameter each */
    DDP_TRY(create(&reducer, world, m, desc));
    for (int p = PARAMS - 1; p >= 0; p--) {
        set_grad(m, p, 3, 0);
        DDP_TRY(ddp_reducer_ready(reducer, p));
    }
    DDP_TRY(ddp_reducer_wait(reducer));
    DDP_TRY(ddp_reducer_clip_grad_norm(reducer, 1, &found));
    DDP_TRY(check(world, "clipped to norm 1", m, 3 / norm, 3 / norm));
    if (fabs((double)found - norm) > 1e-4 * norm)
        return ddp_fail(DDP_ERR_CORRUPT, "the norm is %g, not %g", (double)found, norm);
    DDP_TRY(ddp_reducer_get_stats(reducer, &stats));
    if (ddp_rank(world) == 0)
        printf("%d buckets, %zu bytes of gradients, %zu copied\n", stats.bucket_count, stats.gradient_bytes,
               stats.bytes_copied);
    ddp_reducer_destroy(reducer);
    return DDP_OK;
}

/* Loss scaling without FSDP. In step 0 the last rank has an infinity: every rank skips the step, and the
   scale halves. Then the scale is saved and restored, as for a checkpoint. */
static ddp_result scale_loss(ddp_group *world, model *m) {
    ddp_scaler_desc desc = {.init_scale = 1024, .groups = {world}, .group_count = 1};
    ddp_scaler scaler;
    ddp_scaler_state state;
    ddp_reducer *reducer;
    DDP_TRY(ddp_scaler_init(&scaler, &desc));
    DDP_TRY(create(&reducer, world, m, (ddp_reducer_desc){.micro_batch_count = 1}));
    for (int step = 0; step < 2; step++) {
        int overflows = step == 0 && ddp_rank(world) == ddp_world_size(world) - 1;
        for (int p = PARAMS - 1; p >= 0; p--) {
            set_grad(m, p, overflows ? INFINITY : 5 * ddp_scaler_scale(&scaler), 0);
            DDP_TRY(ddp_reducer_ready(reducer, p));
        }
        DDP_TRY(ddp_reducer_wait(reducer));
        ddp_tensor gradients[PARAMS] = {m->params[0].grad, m->params[1].grad};
        DDP_TRY(ddp_scaler_unscale(&scaler, world, gradients, PARAMS));
        if (ddp_scaler_found_inf(&scaler) != (step == 0))
            return ddp_fail(DDP_ERR_CORRUPT, "step %d: found_inf is %d", step, step);
        if (step == 1) DDP_TRY(check(world, "unscaled", m, 5, 5)); /* the optimizer steps here */
        DDP_TRY(ddp_scaler_update(&scaler));
        ddp_scaler_save(&scaler, &state);
        DDP_TRY(ddp_scaler_init(&scaler, &desc));
        DDP_TRY(ddp_scaler_load(&scaler, &state));
        if (ddp_scaler_scale(&scaler) != 512)
            return ddp_fail(DDP_ERR_CORRUPT, "the scale is %g, not 512", (double)ddp_scaler_scale(&scaler));
    }
    ddp_reducer_destroy(reducer);
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    model *m = (model *)user; /* ranks are processes: each has its own copy */
    DDP_TRY(micro_batches(world, m));
    DDP_TRY(unused_parameters(world, m));
    DDP_TRY(mean_over_tokens(world, m));
    DDP_TRY(clip(world, m));
    return scale_loss(world, m);
}

int main(int argc, char **argv) {
    static model m;
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = DDP_OK;
    if (argc > 2 || desc.world_size < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &m);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

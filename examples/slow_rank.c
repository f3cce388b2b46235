/*  slow_rank.c - ranks of unequal speed: shares of a global batch, and stages of a pipeline

        cc -O3 -march=native examples/slow_rank.c -o slow_rank -lm -lpthread
        ./slow_rank           2 ranks; rank 0 needs 3 times as long for a sample
        ./slow_rank 4 2       4 ranks; rank 0 needs twice as long

    A step ends when its slowest rank has finished. With equal shares of a global batch the fast ranks wait:

        equal       rank 0   ############     4 samples each
                    rank 1   ####
        by speed    rank 0   ######           2 samples
                    rank 1   ######           6 samples

    The first run has equal shares, and measures the samples per second of each rank. They are the weights of
    the second run. Both take the same samples in every step. The reducer averages over samples, not over
    ranks (per_token), so both runs train the same model. The program checks this: the first loss has the same
    bits. Later losses and the parameters differ by rounding only, because gradients are added in another
    order. At the end the same speeds cut the layers of a pipeline into stages.

    The work of a sample is a sleep, so that ranks that share a core keep their speed. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_pipeline.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FEATURES = 16, BATCH = 48, STEPS = 24, SAMPLES = STEPS * BATCH, LAYERS = 24, MAX_RANKS = 8 };
static const double fast_seconds = 2e-4; /* of the work for one sample on every rank but rank 0 */
static const double tolerance = 1e-5;    /* of parameters and losses, relative to the first loss */

typedef struct arguments {
    int ranks, slowdown;
} arguments;

typedef struct run {
    int64_t share;          /* samples of this rank in a step */
    double step_seconds;    /* median */
    double sample_seconds;  /* median of the work of this rank */
    double loss[STEPS];     /* mean over the samples of all ranks */
    float weight[FEATURES]; /* the parameters */
    int32_t seen[SAMPLES];  /* how often this rank took each sample */
    ddp_param param;
} run;

/* Adds the gradient of one sample of a linear regression, and returns its loss. */
static double backward(run *r, int64_t sample) {
    float *gradient = (float *)r->param.grad.data;
    float x[FEATURES];
    float error = 0;
    for (int f = 0; f < FEATURES; f++) {
        x[f] = cosf((float)(sample + 1) * (float)(f + 1));
        error += (r->weight[f] - sinf((float)f)) * x[f];
    }
    for (int f = 0; f < FEATURES; f++) gradient[f] += error * x[f];
    return (double)error * (double)error;
}

static void work(int64_t samples, double sample_seconds) {
    double seconds = (double)samples * sample_seconds;
    struct timespec duration = {.tv_sec = (time_t)seconds};
    duration.tv_nsec = (long)(1e9 * (seconds - (double)duration.tv_sec));
    nanosleep(&duration, NULL);
}

static int compare(const void *left, const void *right) {
    double l = *(const double *)left;
    double r = *(const double *)right;
    return (l > r) - (l < r);
}

static double median(double *values) {
    qsort(values, STEPS, sizeof *values, compare);
    return values[STEPS / 2];
}

/* A step on the next global batch. *worked: the seconds of this rank's work. */
static ddp_result train_step(run *r, ddp_reducer *reducer, ddp_sampler *sampler, double sample_seconds,
                             double *loss, double *worked) {
    float *gradient = (float *)r->param.grad.data;
    ddp_mean mean = {0};
    double start = ddp_now();
    memset(gradient, 0, sizeof r->weight);
    for (int64_t n = 0; n < r->share; n++) {
        int64_t sample = ddp_sampler_next(sampler, NULL);
        r->seen[sample]++;
        ddp_mean_add(&mean, backward(r, sample), 1); /* one sample at a time: the sum is exact */
    }
    work(r->share, sample_seconds);
    *worked = ddp_now() - start;
    DDP_TRY(ddp_reducer_ready(reducer, 0));
    DDP_TRY(ddp_reducer_wait_mean(reducer, &mean)); /* divides by the samples of all ranks */
    if (mean.count != BATCH)
        return ddp_fail(DDP_ERR_CORRUPT, "%lld samples in a step, not %d", (long long)mean.count, BATCH);
    for (int f = 0; f < FEATURES; f++) r->weight[f] -= 0.1f * gradient[f];
    *loss = ddp_mean_value(&mean);
    return DDP_OK;
}

/* An epoch of STEPS global batches. weights: of all ranks; NULL = equal shares. */
static ddp_result train(ddp_group *world, const double *weights, double sample_seconds, run *r) {
    ddp_reducer_desc desc = {.params = &r->param, .param_count = 1, .per_token = 1};
    ddp_sampler_desc samples = {.dataset_size = SAMPLES,
                                .num_replicas = ddp_world_size(world),
                                .rank = ddp_rank(world),
                                .global_batch = BATCH,
                                .weights = weights};
    ddp_reducer *reducer = NULL;
    ddp_sampler sampler;
    double step_seconds[STEPS];
    double work_seconds[STEPS];
    r->param = (ddp_param){.name = "weight", .value = {r->weight, DDP_F32, 1, {FEATURES}}};
    DDP_TRY(ddp_sampler_init(&sampler, &samples));
    r->share = ddp_sampler_batch_size(&sampler);
    ddp_result result = ddp_reducer_create(&reducer, world, &desc);
    for (int step = 0; step < STEPS && result == DDP_OK; step++) {
        double start = ddp_now();
        result = train_step(r, reducer, &sampler, sample_seconds, &r->loss[step], &work_seconds[step]);
        step_seconds[step] = ddp_now() - start;
    }
    ddp_sampler_free(&sampler);
    ddp_reducer_destroy(reducer);
    if (result != DDP_OK) return result;
    r->step_seconds = median(step_seconds);
    r->sample_seconds = median(work_seconds) / (double)r->share;
    return DDP_OK;
}

/* Every sample is taken once, and all ranks hold the parameters of rank 0. */
static ddp_result check_run(ddp_group *world, run *r) {
    float first[FEATURES];
    DDP_TRY(ddp_all_reduce(world, r->seen, r->seen, SAMPLES, DDP_I32, DDP_OP_SUM, NULL));
    for (int i = 0; i < SAMPLES; i++)
        if (r->seen[i] != 1)
            return ddp_fail(DDP_ERR_CORRUPT, "sample %d was taken %d times, not once", i, (int)r->seen[i]);
    memcpy(first, r->weight, sizeof first);
    DDP_TRY(ddp_broadcast(world, first, FEATURES, DDP_F32, 0, NULL));
    if (memcmp(first, r->weight, sizeof first) != 0)
        return ddp_fail(DDP_ERR_CORRUPT, "rank %d ended with other parameters than rank 0", ddp_rank(world));
    return DDP_OK;
}

static ddp_result check_same_training(const run *equal, const run *by_speed) {
    double allowed = tolerance * equal->loss[0];
    if (equal->loss[0] != by_speed->loss[0])
        return ddp_fail(DDP_ERR_CORRUPT, "the first loss is %.17g with equal shares, %.17g by speed",
                        equal->loss[0], by_speed->loss[0]);
    for (int step = 0; step < STEPS; step++)
        if (!(fabs(equal->loss[step] - by_speed->loss[step]) <= allowed))
            return ddp_fail(DDP_ERR_CORRUPT, "the loss of step %d is %g with equal shares, %g by speed", step,
                            equal->loss[step], by_speed->loss[step]);
    for (int f = 0; f < FEATURES; f++)
        if (!(fabs((double)equal->weight[f] - (double)by_speed->weight[f]) <= allowed))
            return ddp_fail(DDP_ERR_CORRUPT, "parameter %d is %g with equal shares, %g by speed", f,
                            (double)equal->weight[f], (double)by_speed->weight[f]);
    if (!(equal->loss[STEPS - 1] < 0.1 * equal->loss[0]))
        return ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g: it must fall by a factor of 10",
                        equal->loss[0], equal->loss[STEPS - 1]);
    return DDP_OK;
}

static ddp_result print_run(ddp_group *world, const char *name, const run *r) {
    int64_t shares[MAX_RANKS];
    DDP_TRY(ddp_all_gather(world, &r->share, shares, 1, DDP_I64, NULL));
    if (ddp_rank(world) != 0) return DDP_OK;
    printf("%-8s  %5.1f ms per step, loss %.4f -> %.4f, samples of a step by rank:", name,
           1e3 * r->step_seconds, r->loss[0], r->loss[STEPS - 1]);
    for (int i = 0; i < ddp_world_size(world); i++) printf(" %d", (int)shares[i]);
    printf("\n");
    return DDP_OK;
}

/* Prints the layers of each stage, and returns the time of the slowest. All layers cost the same. */
static double print_stages(ddp_group *world, const char *name, const int *first, const double *speed) {
    int stages = ddp_world_size(world);
    double slowest = 0;
    for (int s = 0; s < stages; s++) {
        int end = s + 1 < stages ? first[s + 1] : LAYERS;
        double seconds = (end - first[s]) / speed[s];
        if (seconds > slowest) slowest = seconds;
    }
    if (ddp_rank(world) != 0) return slowest;
    printf("%-8s  %5.1f ms in the slowest stage of a pipeline, layers by rank:", name, 1e3 * slowest);
    for (int s = 0; s < stages; s++) printf(" %d", (s + 1 < stages ? first[s + 1] : LAYERS) - first[s]);
    printf("\n");
    return slowest;
}

/* Stage s runs on rank s. Every rank has the same costs and speeds, so every rank computes the same cut. */
static ddp_result cut_layers(ddp_group *world, const double *speed) {
    double cost[LAYERS];
    int first[MAX_RANKS];
    int stages = ddp_world_size(world);
    for (int l = 0; l < LAYERS; l++) cost[l] = 1; /* a layer takes as long as a sample */
    DDP_TRY(ddp_pipeline_partition(cost, LAYERS, stages, first));
    double equal = print_stages(world, "equal", first, speed);
    DDP_TRY(ddp_pipeline_partition_speed(cost, LAYERS, speed, stages, first));
    double by_speed = print_stages(world, "by speed", first, speed);
    if (by_speed > equal) return ddp_fail(DDP_ERR_CORRUPT, "the cut by speed is slower than the equal one");
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    const arguments *args = (const arguments *)user;
    int is_slow = ddp_rank(world) == 0;
    double sample_seconds = fast_seconds * (is_slow ? args->slowdown : 1);
    double speed[MAX_RANKS];
    run equal = {0};
    run by_speed = {0};
    DDP_TRY(train(world, NULL, sample_seconds, &equal));
    double samples_per_second = 1 / equal.sample_seconds;
    DDP_TRY(ddp_all_gather(world, &samples_per_second, speed, 1, DDP_F64, NULL));
    DDP_TRY(train(world, speed, sample_seconds, &by_speed));
    DDP_TRY(check_run(world, &equal));
    DDP_TRY(check_run(world, &by_speed));
    DDP_TRY(check_same_training(&equal, &by_speed));
    DDP_TRY(print_run(world, "equal", &equal));
    DDP_TRY(print_run(world, "by speed", &by_speed));
    return cut_layers(world, speed);
}

int main(int argc, char **argv) {
    arguments args = {.ranks = 2, .slowdown = 3};
    if (argc > 1) args.ranks = atoi(argv[1]);
    if (argc > 2) args.slowdown = atoi(argv[2]);
    ddp_launch_desc desc = {.world_size = args.ranks};
    ddp_result result = DDP_OK;
    if (argc > 3 || args.ranks < 1 || args.slowdown < 1 || args.slowdown > 4)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [slowdown of rank 0, 1 to 4]]", argv[0]);
    else if (args.ranks > MAX_RANKS || BATCH % args.ranks != 0)
        result = ddp_fail(DDP_ERR_INVALID, "%d ranks: use a divisor of %d, at most %d", args.ranks, BATCH,
                          MAX_RANKS);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &args);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

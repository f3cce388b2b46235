/*  bench_hooks.c - time and bytes of a bucket of 25 MiB under each hook of examples/extras/comm_hooks.h.

        sh bench/run.sh --hooks
        cc -O3 -march=native -std=gnu11 bench/bench_hooks.c -o bench_hooks -lm -lpthread
        ./bench_hooks [ranks, default 2 [rounds, default 21]]

    The bucket is one parameter of 2560 x 2560 f32 in group memory. Each variant (hook) has a reducer of its
    own over the same gradient, which is rewritten before each turn. The variants take turns in the same
    processes, in an order that is reversed every round. A turn starts at a barrier; its time is that of the
    slowest rank. Each round gives one ratio to the plain all-reduce per variant. Figures are medians and
    quartiles over rounds.

    DELAY: the time that a step still waits after the averages of the step before have had time to arrive. Its
    own averages then arrive before the turn ends. DiLoCo: an outer step, which occurs every H-th time. Ranks
    of one machine read each other's memory, so the plain all-reduce runs at the speed of memory, and each
    hook is slower: it also rounds, multiplies or copies. "worth it below" is the link speed, per rank, below
    which the saved transfer takes longer than the hook. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../examples/extras/comm_hooks.h"
#include "median.h"
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                    \
    do {                                             \
        ddp_result try_result = (call);              \
        if (try_result != DDP_OK) return try_result; \
    } while (0)
enum { SIDE = 2560, COUNT = SIDE * SIDE, ROUNDS_MAX = 400, VARIANTS = 8, PLAIN = 0, DILOCO = 7 };
static const struct {
    const char *name;
    int kind, rank;
} variants[VARIANTS] = {
    {"plain all-reduce", 0, 0},
    {"BF16", COMM_HOOK_BF16, 0},
    {"F16", COMM_HOOK_F16, 0},
    {"INT8, blocks of 256", COMM_HOOK_INT8, 0},
    {"POWERSGD, rank 1", COMM_HOOK_POWERSGD, 1},
    {"POWERSGD, rank 4", COMM_HOOK_POWERSGD, 4},
    {"DELAY", COMM_HOOK_DELAY, 0},
    {"DiLoCo, outer step", 0, 0},
};

typedef struct variant {
    ddp_param param;
    comm_hook *hook;
    ddp_reducer *reducer;
    local_sgd *local;
    double times[ROUNDS_MAX], ratios[ROUNDS_MAX];
} variant;

static ddp_result build(ddp_group *world, variant *w, int index, float *gradient) {
    comm_hook_desc hook = DDP_ZERO;
    ddp_reducer_desc reducer = DDP_ZERO;
    local_sgd_desc local = DDP_ZERO;
    w->param.value.dtype = DDP_F32;
    w->param.value.ndim = 2;
    w->param.value.shape[0] = w->param.value.shape[1] = SIDE;
    w->param.value.data = gradient; /* nothing is trained */
    w->param.grad.data = gradient;
    local.params = reducer.params = &w->param;
    hook.params = &w->param;
    hook.param_count = local.param_count = reducer.param_count = 1;
    local.every = 1;
    local.outer_lr = 0.7;
    local.outer_momentum = 0.9;
    if (index == DILOCO) return local_sgd_create(&w->local, world, &local);
    hook.kind = (comm_hook_kind)variants[index].kind;
    hook.rank = variants[index].rank;
    reducer.skip_initial_broadcast = 1;
    if (hook.kind) {
        TRY(comm_hook_create(&w->hook, world, &hook));
        reducer.hook = comm_hook_run;
        reducer.hook_user = w->hook;
    }
    return ddp_reducer_create(&w->reducer, world, &reducer);
}

static ddp_result turn(ddp_group *world, variant *w, float *gradient, const float *source, double *seconds) {
    memcpy(gradient, source, (size_t)COUNT * sizeof *gradient);
    TRY(ddp_barrier(world));
    double start = ddp_now();
    if (w->local)
        TRY(local_sgd_step(w->local, NULL));
    else {
        TRY(ddp_reducer_ready(w->reducer, 0));
        TRY(ddp_reducer_wait(w->reducer));
    }
    *seconds = ddp_now() - start;
    if (w->hook && w->hook->delay_group) TRY(ddp_barrier(w->hook->delay_group));
    return ddp_all_reduce(world, seconds, seconds, 1, DDP_F64, DDP_OP_MAX, NULL);
}

static void print_row(variant *all, int index, int ranks, int rounds) {
    variant *w = &all[index];
    comm_hook_stats stats = {(uint64_t)COUNT * 4, (uint64_t)COUNT * 4};
    double time = median(w->times, rounds), plain = median(all[PLAIN].times, rounds),
           low = quantile(w->ratios, rounds, 0.25), high = quantile(w->ratios, rounds, 0.75);
    char worth[32] = "";
    if (w->hook) comm_hook_get_stats(w->hook, &stats);
    /* Bytes per rank of an all-reduce in a ring. */
    double share = (double)stats.sent_bytes / (double)stats.gradient_bytes,
           travels = 2.0 * (ranks - 1) / ranks * COUNT * 4.0;
    if (share < 1 && time > plain)
        snprintf(worth, sizeof worth, "%.2f GB/s", (1 - share) * travels / (time - plain) * 1e-9);
    if (share < 1 && time <= plain) snprintf(worth, sizeof worth, "any speed");
    printf("| %s | %.2f | %.2f (%.2f to %.2f) | %.2f | %.1f%%%s | %s |\n", variants[index].name, time * 1e3,
           median(w->ratios, rounds), low, high, share * COUNT * 4 / 1048576.0, share * 100,
           index == DILOCO ? " / H" : "", worth);
}

static ddp_result measure(ddp_group *world, void *user) {
    int rounds = *(int *)user, ranks = ddp_world_size(world);
    variant *all = (variant *)calloc(VARIANTS, sizeof *all);
    float *source = (float *)malloc((size_t)COUNT * sizeof *source);
    void *gradient;
    if (!all || !source) return ddp_fail(DDP_ERR_NO_MEMORY, "a gradient of 25 MiB");
    TRY(ddp_group_alloc(world, (size_t)COUNT * sizeof *source, &gradient));
    for (int i = 0; i < COUNT; i++)
        source[i] = (float)(int32_t)(comm__mix((uint64_t)i * 64 + (uint64_t)ddp_rank(world)) >> 32) * 1e-12f;
    for (int i = 0; i < VARIANTS; i++) TRY(build(world, &all[i], i, (float *)gradient));
    for (int round = -2; round < rounds; round++) {
        double seconds[VARIANTS];
        for (int k = 0; k < VARIANTS; k++) {
            int i = round & 1 ? VARIANTS - 1 - k : k;
            TRY(turn(world, &all[i], (float *)gradient, source, &seconds[i]));
        }
        for (int i = 0; i < VARIANTS && round >= 0; i++) {
            all[i].times[round] = seconds[i];
            all[i].ratios[round] = seconds[i] / seconds[PLAIN];
        }
    }
    if (ddp_rank(world) == 0) {
        printf("A bucket of 25 MiB on %d ranks, medians of %d rounds\n\n", ranks, rounds);
        printf("| hook | ms | time / plain (quartiles) | MiB sent | share of the bytes | worth it below "
               "|\n|---|---|---|---|---|---|\n");
        for (int i = 0; i < VARIANTS; i++) print_row(all, i, ranks, rounds);
    }
    for (int i = 0; i < VARIANTS; i++) {
        ddp_reducer_destroy(all[i].reducer);
        comm_hook_destroy(all[i].hook);
        local_sgd_destroy(all[i].local);
    }
    free(all);
    free(source);
    return ddp_barrier(world);
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    int rounds = argc > 2 ? atoi(argv[2]) : 21;
    desc.world_size = argc > 1 ? atoi(argv[1]) : 2;
    if (desc.world_size < 2 || desc.world_size > DDP_MAX_LOCAL_RANKS || rounds < 1 || rounds > ROUNDS_MAX)
        return fprintf(stderr, "bench_hooks: ranks must be 2 to %d, rounds 1 to %d\n", DDP_MAX_LOCAL_RANKS,
                       ROUNDS_MAX),
               1;
    if (ddp_launch(&desc, measure, &rounds) == DDP_OK) return 0;
    return fprintf(stderr, "bench_hooks: %s\n", ddp_last_error()), 1;
}

/* MIT License: see LICENSE. */

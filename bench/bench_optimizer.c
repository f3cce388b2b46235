/*  bench_optimizer.c - steps of ddp_optimizer against bare loops that read and write the same memory.

        sh bench/run.sh --optimizer
        cc -O3 -march=native -std=gnu11 bench/bench_optimizer.c -o bench_optimizer -lm -lpthread
        ./bench_optimizer [MiB of values, default 64]

    One thread, one f32 tensor larger than the caches. A bare loop only adds, so its time is that of memory,
    and no step can be faster. Step and loop take turns; the share is the median of loop / step over the
    turns. "and clip" multiplies the gradients in the pass of the step, "clip, then" in a separate pass. */
#define DDP_IMPLEMENTATION
#include "../ddp_fsdp.h"
#include "median.h"
#include <stdio.h>
#include <stdlib.h>

enum { TURNS = 21, ROWS = 1024 };

typedef float line __attribute__((vector_size(64), may_alias, aligned(4)));

static float *w, *g, *m, *v; /* count values each; m and v belong to the bare loops */
static size_t count;

/* Bare loops, by the arrays that they read and write. */
#define EACH_LINE(body)                      \
    for (size_t i = 0; i < count; i += 16) { \
        body                                 \
    }
#define LINE(p) (*(line *)((p) + i))
/* AdamW, LAMB's first pass (w is g). */
static void bare_four(void) { EACH_LINE(line x = LINE(g); LINE(m) += x; LINE(v) += x; LINE(w) += x;) }
/* SGD with momentum. */
static void bare_three(void) { EACH_LINE(line x = LINE(g); LINE(m) += x; LINE(w) += x;) }
static void bare_two(void) { EACH_LINE(LINE(w) += LINE(g);) } /* SGD, LAMB's last pass */
static void bare_one(void) { EACH_LINE(LINE(g) *= 0.999f;) }  /* clipping in a separate pass */
static float sink;
static void bare_read(void) { /* norms of values and gradients */
    line sum = {0};
    EACH_LINE(sum += LINE(w) + LINE(g);)
    sink += sum[0];
}

static void bare(ddp_optimizer_kind kind, int momentum) {
    if (kind == DDP_OPTIMIZER_ADAMW || kind == DDP_OPTIMIZER_LAMB)
        bare_four();
    else if (momentum)
        bare_three();
    else
        bare_two();
    if (kind == DDP_OPTIMIZER_LAMB || kind == DDP_OPTIMIZER_LARS) bare_read();
    if (kind == DDP_OPTIMIZER_LAMB) bare_two();
}

typedef enum clip { CLIP_NONE, CLIP_WITH, CLIP_BEFORE } clip;

/* Prints one row. momentum: only for SGD. clip: how gradients are clipped. */
static int row(ddp_group *self, const char *name, ddp_optimizer_kind kind, float momentum, clip clips,
               int words) {
    ddp_param param = DDP_ZERO;
    ddp_optimizer_desc desc = DDP_ZERO;
    ddp_optimizer *optimizer;
    double step[TURNS], share[TURNS];
    param.name = "w";
    param.value.data = w;
    param.value.dtype = DDP_F32;
    param.value.ndim = 2;
    param.value.shape[0] = ROWS;
    param.value.shape[1] = (int64_t)(count / ROWS);
    param.grad = param.value;
    param.grad.data = g;
    desc.kind = kind;
    desc.momentum = momentum;
    desc.weight_decay = 0.1f;
    desc.params = &param;
    desc.param_count = 1;
    if (ddp_optimizer_create(&optimizer, self, &desc) != DDP_OK)
        return fprintf(stderr, "bench_optimizer: %s\n", ddp_last_error()), 1;
    for (int turn = -2; turn < TURNS; turn++) {
        double start = ddp_now(), middle, end;
        ddp_result result;
        if (clips == CLIP_BEFORE) ddp_device_cpu()->scale(&param.grad, 1, 0.999f);
        result = ddp_optimizer_step_scaled(optimizer, 1e-6f, clips == CLIP_WITH ? 0.999f : 1);
        if (result != DDP_OK) return fprintf(stderr, "bench_optimizer: %s\n", ddp_last_error()), 1;
        middle = ddp_now();
        bare(kind, momentum != 0);
        if (clips == CLIP_BEFORE) bare_one();
        end = ddp_now();
        if (turn < 0) continue;
        step[turn] = middle - start;
        share[turn] = (end - middle) / (middle - start);
    }
    ddp_optimizer_destroy(optimizer);
    double time = median(step, TURNS);
    printf("| %-22s | %5d | %8.2f ms | %6.2f GB/s | %5.0f%% |\n", name, words * 4, time * 1e3,
           (double)count * 4 * words / time * 1e-9, 100 * median(share, TURNS));
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv) {
    double mib = argc > 1 ? atof(argv[1]) : 64;
    ddp_group *self;
    ddp_group_desc desc = DDP_ZERO;
    float **arrays[4] = {&w, &g, &m, &v};
    if (!(mib >= 1 && mib <= 4096))
        return fprintf(stderr, "bench_optimizer: MiB of values must be 1 to 4096, not %s\n", argv[1]), 1;
    count = (size_t)(mib * 1048576 / sizeof(float)) / (16 * ROWS) * (16 * ROWS);
    for (int a = 0; a < 4; a++) {
        *arrays[a] = (float *)aligned_alloc(64, count * sizeof(float) + 69632 * 4);
        if (!*arrays[a])
            return fprintf(stderr, "bench_optimizer: not enough memory for four arrays of %g MiB\n", mib), 1;
        *arrays[a] += (size_t)a * 17408; /* distances that are no powers of two */
        for (size_t i = 0; i < count; i++) (*arrays[a])[i] = 1e-3f * (float)(1 + i % 97);
    }
    desc.init_method = "self://";
    if (ddp_group_create(&self, &desc) != DDP_OK)
        return fprintf(stderr, "bench_optimizer: %s\n", ddp_last_error()), 1;
    printf("| step                   | bytes |   time      | moved       | share of bare loop "
           "|\n|---|---|---|---|---|\n");
    int failed = row(self, "AdamW", DDP_OPTIMIZER_ADAMW, 0, CLIP_NONE, 7)
                 || row(self, "AdamW and clip", DDP_OPTIMIZER_ADAMW, 0, CLIP_WITH, 7)
                 || row(self, "clip, then AdamW", DDP_OPTIMIZER_ADAMW, 0, CLIP_BEFORE, 9)
                 || row(self, "SGD", DDP_OPTIMIZER_SGD, 0, CLIP_NONE, 3)
                 || row(self, "SGD, momentum", DDP_OPTIMIZER_SGD, 0.9f, CLIP_NONE, 5)
                 || row(self, "SGD, momentum, and clip", DDP_OPTIMIZER_SGD, 0.9f, CLIP_WITH, 5)
                 || row(self, "LAMB", DDP_OPTIMIZER_LAMB, 0, CLIP_NONE, 12)
                 || row(self, "LARS", DDP_OPTIMIZER_LARS, 0.9f, CLIP_NONE, 7);
    ddp_group_destroy(self);
    for (int a = 0; a < 4; a++) free(*arrays[a] - (size_t)a * 17408);
    return failed;
}

/* MIT License: see LICENSE. */

/*  bench_gpt.c - tokens per second of gpt.h in one thread: forward, backward and AdamW.

USAGE
    cc -O3 -march=native bench/bench_gpt.c -o bench_gpt -lm && ./bench_gpt [vocab [steps [layers [channels]]]]
    cc -O3 -march=native -DGPT_USE_CBLAS bench/bench_gpt.c -o bench_gpt -lopenblas -lm
    OPENBLAS_NUM_THREADS=1 ./bench_gpt

    The shape: 4 layers, 256 channels, 4 heads, context 256, batch 4, vocabulary 256. peer_gpt_torch.py runs
    the same model in PyTorch. The first lines of the output are the matrix product by itself.
*/
#include "../examples/gpt/gpt.h"
#include "median.h"
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* GFLOP/s of (m, k) times (k, n): plain, with B transposed (a linear layer), and with A transposed (its
   weight gradient). */
static void bench_gemm(float *pack, int m, int n, int k) {
    float *a = (float *)calloc((size_t)m * (size_t)k, sizeof *a),
          *b = (float *)calloc((size_t)k * (size_t)n, sizeof *b);
    float *c = (float *)calloc((size_t)m * (size_t)n, sizeof *c);
    if (!a || !b || !c) exit(1);
    for (int i = 0; i < m * k; i++) a[i] = (float)(i % 7) - 3;
    for (int i = 0; i < k * n; i++) b[i] = (float)(i % 5) - 2;
    printf("gemm %4d x %4d x %4d:", m, n, k);
    for (int kind = 0; kind < 3; kind++) {
        gpt_matrix A = kind == 2 ? gpt__matrix(a, 1, (size_t)m) : gpt__matrix(a, (size_t)k, 1);
        gpt_matrix B = kind == 1 ? gpt__matrix(b, 1, (size_t)k) : gpt__matrix(b, (size_t)n, 1);
        double times[21];
        for (int r = 0; r < 21; r++) {
            double start = now();
            for (int i = 0; i < 4; i++) gpt_gemm(pack, m, n, k, A, B, gpt__output(c, (size_t)n, NULL, NULL));
            times[r] = (now() - start) / 4;
        }
        printf("  %s %6.1f",
               kind == 0   ? "AB"
               : kind == 1 ? "AB'"
                           : "A'B",
               2e-9 * m * n * k / median(times, 21));
    }
    printf(" GFLOP/s\n");
    free(a);
    free(b);
    free(c);
}

int main(int argc, char **argv) {
    int vocab = argc > 1 ? atoi(argv[1]) : 256, steps = argc > 2 ? atoi(argv[2]) : 30, batch = 4;
    gpt_config config = {vocab, 256, argc > 3 ? atoi(argv[3]) : 4, 4, argc > 4 ? atoi(argv[4]) : 256};
    int count = batch * config.context;
    double *times = (double *)calloc((size_t)steps + 1, sizeof *times), loss = 0, backward = 0;
    int *tokens = (int *)calloc((size_t)count + 1, sizeof *tokens);
    float **m = (float **)calloc((size_t)gpt_param_count(&config) * 2, sizeof *m), **v;
    gpt_model model;
    if (steps < 1 || !times || !tokens || !m
        || gpt_model_create(&model, &config, batch, GPT_OWN_VALUES | GPT_OWN_GRADS) != 0) {
        fprintf(stderr, "bench_gpt: bad arguments, or not enough memory\n");
        return 1;
    }
    v = m + model.param_count;
    gpt_model_init(&model, 1);
    for (int i = 0; i <= count; i++) tokens[i] = (int)(gpt_random(7, (uint64_t)i) % (uint64_t)vocab);
    for (int i = 0; i < model.param_count; i++) {
        gpt_param p;
        gpt_param_info(&config, i, &p);
        m[i] = (float *)calloc((size_t)p.count, sizeof(float));
        v[i] = (float *)calloc((size_t)p.count, sizeof(float));
        if (!m[i] || !v[i]) return 1;
    }
    bench_gemm(model.scratch, 1024, 1024, 256);
    bench_gemm(model.scratch, 1024, 256, 1024);
    bench_gemm(model.scratch, 768, 256, 1024);
    bench_gemm(model.scratch, 1024, 256, 256);
    for (int step = -2; step < steps; step++) {
        double start = now();
        loss = gpt_model_forward_backward(&model, tokens, tokens + 1, batch, config.context, NULL, NULL);
        if (step >= 0) backward += now() - start;
        /* The two uses of the tied matrix. */
        for (size_t i = 0; i < (size_t)vocab * (size_t)config.channels; i++)
            model.grads[0][i] += model.grads[model.param_count - 1][i];
        for (int i = 0; i + 1 < model.param_count; i++) {
            gpt_param p;
            gpt_param_info(&config, i, &p);
            gpt_adamw(model.values[i], model.grads[i], m[i], v[i], (size_t)p.count, 1e-3f, 0.9f, 0.999f,
                      1e-8f, 0.1f, step + 3, 1.0f);
        }
        if (step >= 0) times[step] = now() - start;
    }
    backward *= 1e3 / steps;
    printf(
        "gpt.h: vocab %d, loss %.4f, %.1f ms per step, of which forward and backward %.1f, %.0f tokens/s\n",
        vocab, loss, median(times, steps) * 1e3, backward, count / median(times, steps));
    return 0;
}

/*  bench_gpt.c - tokens per second of gpt.h in one thread: forward, backward and AdamW.

USAGE
    cc -O3 -march=native bench/bench_gpt.c -o bench_gpt -lm -lpthread
    ./bench_gpt [vocab [steps [layers [channels]]]]
    cc -O3 -march=native -DGPT_USE_CBLAS bench/bench_gpt.c -o bench_gpt -lopenblas -lm -lpthread
    OPENBLAS_NUM_THREADS=1 ./bench_gpt

    The shape: 4 layers, 256 channels, 4 heads, context 256, batch 4, vocabulary 256. peer_gpt_torch.py runs
    the same model in PyTorch. The first lines of the output are the matrix product by itself.
*/
#define DDP_IMPLEMENTATION
#include "../ddp_fsdp.h" /* ddp_optimizer */
#include "../examples/gpt/gpt.h"
#include "median.h"
#include <time.h>

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
            double start = ddp_now();
            for (int i = 0; i < 4; i++) gpt_gemm(pack, m, n, k, A, B, gpt__output(c, (size_t)n, NULL, NULL));
            times[r] = (ddp_now() - start) / 4;
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

/* AdamW for all values. head.weight, the last parameter, has the value of wte. */
static ddp_result create_adamw(gpt_model *model, ddp_param *params, ddp_group **group, ddp_optimizer **out) {
    ddp_group_desc one_rank = DDP_ZERO;
    ddp_optimizer_desc adamw = DDP_ZERO;
    one_rank.init_method = "self://";
    adamw.params = params;
    adamw.param_count = gpt_param_head(&model->config);
    adamw.weight_decay = 0.1f;
    for (int i = 0; i < adamw.param_count; i++) {
        gpt_param p;
        gpt_param_info(&model->config, i, &p);
        params[i].value.data = model->values[i];
        params[i].value.dtype = DDP_F32;
        params[i].value.ndim = 1;
        params[i].value.shape[0] = p.count;
        params[i].grad.data = model->grads[i];
    }
    DDP_TRY(ddp_group_create(group, &one_rank));
    return ddp_optimizer_create(out, *group, &adamw);
}

int main(int argc, char **argv) {
    int vocab = argc > 1 ? atoi(argv[1]) : 256, steps = argc > 2 ? atoi(argv[2]) : 30, batch = 4;
    gpt_config config = {vocab, 256, argc > 3 ? atoi(argv[3]) : 4, 4, argc > 4 ? atoi(argv[4]) : 256};
    int count = batch * config.context;
    double *times = (double *)calloc((size_t)steps + 1, sizeof *times), loss = 0, backward = 0;
    int *tokens = (int *)calloc((size_t)count + 1, sizeof *tokens);
    ddp_param *params = (ddp_param *)calloc((size_t)gpt_param_count(&config), sizeof *params);
    ddp_group *group = NULL;
    ddp_optimizer *optimizer = NULL;
    gpt_model model;
    if (steps < 1 || !times || !tokens || !params
        || gpt_model_create(&model, &config, batch, GPT_OWN_VALUES | GPT_OWN_GRADS) != 0) {
        fprintf(stderr, "bench_gpt: bad arguments, or not enough memory\n");
        return 1;
    }
    if (create_adamw(&model, params, &group, &optimizer) != DDP_OK) {
        fprintf(stderr, "bench_gpt: %s\n", ddp_last_error());
        return 1;
    }
    gpt_model_init(&model, 1);
    for (int i = 0; i <= count; i++) tokens[i] = (int)(gpt_random(7, (uint64_t)i) % (uint64_t)vocab);
    bench_gemm(model.scratch, 1024, 1024, 256);
    bench_gemm(model.scratch, 1024, 256, 1024);
    bench_gemm(model.scratch, 768, 256, 1024);
    bench_gemm(model.scratch, 1024, 256, 256);
    for (int step = -2; step < steps; step++) {
        double start = ddp_now();
        loss = gpt_model_forward_backward(&model, tokens, tokens + 1, batch, config.context, NULL, NULL);
        if (step >= 0) backward += ddp_now() - start;
        /* The two uses of the tied matrix. */
        for (size_t i = 0; i < (size_t)vocab * (size_t)config.channels; i++)
            model.grads[0][i] += model.grads[model.param_count - 1][i];
        ddp_optimizer_step(optimizer, 1e-3f);
        if (step >= 0) times[step] = ddp_now() - start;
    }
    backward *= 1e3 / steps;
    printf(
        "gpt.h: vocab %d, loss %.4f, %.1f ms per step, of which forward and backward %.1f, %.0f tokens/s\n",
        vocab, loss, median(times, steps) * 1e3, backward, count / median(times, steps));
    return 0;
}

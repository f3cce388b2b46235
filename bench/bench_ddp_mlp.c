/*  bench_ddp_mlp.c - cost of averaging gradients: an MLP with 24 MiB of gradients, with and without the
    reducer.

USAGE
    cc -O3 -march=native bench/bench_ddp_mlp.c -o bench_ddp_mlp -lm -lpthread
    ./bench_ddp_mlp [ranks [rounds [batch per rank]]]

    Layers 1024-2048-2048-10, ReLU, squared error, f32, plain SGD, one thread per rank, batch 64 per rank.
    peer_ddp_torch.py does the same with PyTorch DDP over Gloo.

    Rounds alternate: 5 steps without the reducer (every rank trains its own model, gradients in the same
    memory), 5 steps with it. Each block of steps starts at a barrier; its time is that of the slowest rank.
    Figures are medians over rounds. "communication" is the share of a step that the reducer adds, per round.
    With one rank it is the time inside the reducer's own calls: the difference of two noisy steps could not
    show it.
*/
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../examples/gpt/gpt.h"
#include "median.h"

enum { LAYERS = 3, BLOCK = 5, ROUNDS_MAX = 1000 };
static const int width[LAYERS + 1] = {1024, 2048, 2048, 10};

typedef struct mlp {
    ddp_param params[2 * LAYERS]; /* weight, bias, weight, ... */
    float *activation[LAYERS + 1], *gradient[LAYERS + 1], *target, *pack;
    int batch;
    ddp_reducer *reducer;   /* NULL = gradients are not averaged */
    double reducer_seconds; /* time inside the reducer's calls */
} mlp;

typedef struct setup {
    int ranks, rounds, batch;
} setup;

static float *floats(size_t count) {
    float *memory = (float *)calloc(count, sizeof(float));
    if (!memory) {
        fprintf(stderr, "bench_ddp_mlp: not enough memory\n");
        exit(1);
    }
    return memory;
}

static void mlp_init(mlp *m, int batch, int rank) {
    uint32_t seed = 12345;
    memset(m, 0, sizeof *m);
    m->batch = batch;
    for (int l = 0; l <= LAYERS; l++) {
        m->activation[l] = floats((size_t)batch * (size_t)width[l]);
        m->gradient[l] = floats((size_t)batch * (size_t)width[l]);
    }
    m->target = floats((size_t)batch * (size_t)width[LAYERS]);
    m->pack = floats(GPT_PACK_A_FLOATS + GPT_PACK_B_FLOATS);
    for (int l = 0; l < LAYERS; l++)
        for (int bias = 0; bias < 2; bias++) {
            ddp_param *param = &m->params[2 * l + bias];
            size_t count = (size_t)width[l + 1] * (bias ? 1 : (size_t)width[l]);
            param->name = bias ? "bias" : "weight";
            param->value.dtype = DDP_F32;
            param->value.ndim = bias ? 1 : 2;
            param->value.shape[0] = bias ? width[l + 1] : width[l];
            param->value.shape[1] = width[l + 1];
            param->value.data = floats(count);
            for (size_t i = 0; i < count && !bias; i++) {
                seed = seed * 1664525u + 1013904223u;
                ((float *)param->value.data)[i] = ((float)(seed >> 8) / 16777216.0f - 0.5f) * 0.05f;
            }
        }
    for (int i = 0; i < batch * width[0]; i++)
        m->activation[0][i] = (float)((i * 7 + rank * 13) % 31) / 31.0f - 0.5f;
    for (int i = 0; i < batch * width[LAYERS]; i++)
        m->target[i] = (float)((i * 5 + rank * 3) % 17) / 17.0f - 0.5f;
}

static void mlp_ready(mlp *m, int index) {
    double begin;
    if (!m->reducer) return;
    begin = ddp_now();
    if (ddp_reducer_ready(m->reducer, index) != DDP_OK) {
        fprintf(stderr, "bench_ddp_mlp: %s\n", ddp_last_error());
        exit(1);
    }
    m->reducer_seconds += ddp_now() - begin;
}

/* (B, in) -> (B, out). backward computes the gradients of weight and bias first, so that their reduction
   overlaps with the rest. */
static void mlp_forward(mlp *m) {
    for (int l = 0; l < LAYERS; l++) {
        size_t in = (size_t)width[l], out = (size_t)width[l + 1], count = (size_t)m->batch * out;
        gpt_gemm(
            m->pack, m->batch, (int)out, (int)in, gpt__matrix(m->activation[l], in, 1),
            gpt__matrix((const float *)m->params[2 * l].value.data, out, 1),
            gpt__output(m->activation[l + 1], out, (const float *)m->params[2 * l + 1].value.data, NULL));
        for (size_t i = 0; i < count && l + 1 < LAYERS; i++)
            m->activation[l + 1][i] = m->activation[l + 1][i] > 0 ? m->activation[l + 1][i] : 0;
    }
}

static void mlp_backward(mlp *m) {
    for (int i = 0; i < m->batch * width[LAYERS]; i++)
        m->gradient[LAYERS][i] = (m->activation[LAYERS][i] - m->target[i]) / (float)m->batch;
    for (int l = LAYERS - 1; l >= 0; l--) {
        size_t in = (size_t)width[l], out = (size_t)width[l + 1];
        float *bias = (float *)m->params[2 * l + 1].grad.data, *d_out = m->gradient[l + 1];
        memset(bias, 0, out * sizeof(float));
        for (int b = 0; b < m->batch; b++)
            for (size_t j = 0; j < out; j++) bias[j] += d_out[(size_t)b * out + j];
        mlp_ready(m, 2 * l + 1);
        gpt_gemm(m->pack, (int)in, (int)out, m->batch, gpt__matrix(m->activation[l], 1, in),
                 gpt__matrix(d_out, out, 1),
                 gpt__output((float *)m->params[2 * l].grad.data, out, NULL, NULL));
        mlp_ready(m, 2 * l);
        if (l == 0) break;
        gpt_gemm(m->pack, m->batch, (int)in, (int)out, gpt__matrix(d_out, out, 1),
                 gpt__matrix((const float *)m->params[2 * l].value.data, 1, out),
                 gpt__output(m->gradient[l], in, NULL, NULL));
        for (size_t i = 0; i < (size_t)m->batch * in; i++)
            m->gradient[l][i] = m->activation[l][i] > 0 ? m->gradient[l][i] : 0;
    }
}

static void mlp_step(mlp *m) {
    mlp_forward(m);
    mlp_backward(m);
    if (m->reducer) {
        double begin = ddp_now();
        if (ddp_reducer_wait(m->reducer) != DDP_OK) {
            fprintf(stderr, "bench_ddp_mlp: %s\n", ddp_last_error());
            exit(1);
        }
        m->reducer_seconds += ddp_now() - begin;
    }
    for (int i = 0; i < 2 * LAYERS; i++) {
        float *value = (float *)m->params[i].value.data;
        const float *grad = (const float *)m->params[i].grad.data;
        int64_t count = ddp_tensor_count(&m->params[i].value);
        for (int64_t k = 0; k < count; k++) value[k] -= 0.001f * grad[k];
    }
}

static ddp_result bench_rank(ddp_group *world, void *user) {
    static double times[2][ROUNDS_MAX], inside[ROUNDS_MAX], share[ROUNDS_MAX];
    const setup *s = (const setup *)user;
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_reducer *reducer;
    ddp_reducer_stats stats = DDP_ZERO;
    ddp_result result;
    double plain, with, own;
    mlp m;
    mlp_init(&m, s->batch, ddp_rank(world));
    desc.params = m.params;
    desc.param_count = 2 * LAYERS;
    result = ddp_reducer_create(&reducer, world, &desc);
    /* Round -1 is a warm-up, in which buckets are rebuilt. */
    for (int round = -1; round < s->rounds && result == DDP_OK; round++)
        for (int k = 0; k < 2 && result == DDP_OK; k++) {
            int reduced = (round & 1) ^ k;
            double begin, took, slowest = 0;
            m.reducer = reduced ? reducer : NULL;
            m.reducer_seconds = 0;
            result = ddp_barrier(world);
            begin = ddp_now();
            for (int i = 0; i < BLOCK; i++) mlp_step(&m);
            took = (ddp_now() - begin) / BLOCK;
            if (result == DDP_OK)
                result = ddp_all_reduce(world, &took, &slowest, 1, DDP_F64, DDP_OP_MAX, NULL);
            if (round < 0) continue;
            times[reduced][round] = slowest;
            if (reduced) inside[round] = m.reducer_seconds / BLOCK;
        }
    if (result != DDP_OK) return result;
    ddp_reducer_get_stats(reducer, &stats);
    for (int i = 0; i < s->rounds; i++) share[i] = (times[1][i] - times[0][i]) / times[1][i];
    if (ddp_rank(world) == 0) {
        plain = median(times[0], s->rounds);
        with = median(times[1], s->rounds);
        own = median(inside, s->rounds);
        printf("%d rank%s, batch %d each, %.1f MiB of gradients in %d buckets, %.1f MiB copied\n",
               ddp_world_size(world), ddp_world_size(world) == 1 ? "" : "s", s->batch,
               (double)stats.gradient_bytes / 1048576, stats.bucket_count,
               (double)stats.bytes_copied / 1048576);
        printf("  without averaging %.2f ms per step, with the reducer %.2f ms\n", plain * 1e3, with * 1e3);
        if (ddp_world_size(world) == 1)
            printf("  inside the reducer %.1f us, %.3f%% of a step (target: below 0.5%%)\n", own * 1e6,
                   100 * own / with);
        else
            printf("  communication %.1f%% of a step (target: below 8%%); %.2f ms inside the reducer's "
                   "calls, %.2f ms reducing buckets\n",
                   100 * median(share, s->rounds), own * 1e3,
                   stats.total_comm_seconds / (double)stats.steps * 1e3);
    }
    ddp_reducer_destroy(reducer);
    return DDP_OK;
}

int main(int argc, char **argv) {
    setup s;
    int only = argc > 1 ? atoi(argv[1]) : 0;
    s.rounds = argc > 2 ? atoi(argv[2]) : 21;
    s.batch = argc > 3 ? atoi(argv[3]) : 64;
    if (only < 0 || only > DDP_MAX_LOCAL_RANKS || s.rounds < 1 || s.rounds > ROUNDS_MAX || s.batch < 1) {
        fprintf(stderr, "usage: bench_ddp_mlp [ranks 1-64 [rounds 1-%d [batch]]]\n", ROUNDS_MAX);
        return 1;
    }
    for (s.ranks = only ? only : 1; s.ranks <= (only ? only : 2); s.ranks++) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = s.ranks;
        if (ddp_launch(&desc, bench_rank, &s) != DDP_OK) {
            fprintf(stderr, "bench_ddp_mlp: %s\n", ddp_last_error());
            return 1;
        }
    }
    return 0;
}

/*  bench_tensor.c - one transformer block of train_gpt_tensor, forward and backward, over 1, 2 and 4 tensor
    ranks.

USAGE
    cc -O3 -march=native bench/bench_tensor.c -o bench_tensor -lm -lpthread
    ./bench_tensor [channels [heads [context [sequences [rounds [dat]]]]]]       default: 512 8 256 4 15

    Ranks are processes. Variants: with and without sequence parallelism, in 1, 2 and 4 chunks, and the whole
    block on rank 0 while the other ranks sleep in a barrier. All variants of a world size are built once and
    take turns, block by block, with a barrier before each. The time of a block is that of its slowest rank.
    Figures are medians over rounds, without the first.

    waiting         time inside collectives of the layers that compute did not hide, mean over ranks
    ideal           time of rank 0 with the whole block in the same rounds, divided by the number of ranks, or
                    by the number of cores if that is smaller
    elements sent   per rank, as counted by the layers
    8bsh(t-1)/t     elements that a block without sequence parallelism should send. With it, two inputs are
                    gathered again in backward, and the gradients of norms are reduced
    Lines for plot_tensor.gp are appended to the file dat.
*/
#define main train_gpt_tensor_main /* its blocks are measured here */
#include "../examples/gpt/train_gpt_tensor.c"
#include "median.h"
#undef main

#include <sys/mman.h>

enum { ROUNDS_MAX = 256, VARIANTS = 7 };

/* on_rank0: 1 = only rank 0 computes, the whole block; the other ranks wait. */
typedef struct variant {
    int on_rank0, sequence_parallel, chunks;
} variant;
static const variant variants[VARIANTS] = {{1, 0, 1}, {0, 0, 1}, {0, 0, 2}, {0, 0, 4},
                                           {0, 1, 1}, {0, 1, 2}, {0, 1, 4}};
static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof worlds[0] };

typedef struct figures {
    double seconds[ROUNDS_MAX], waiting[ROUNDS_MAX], elements;
} figures;

/* In memory that ranks share with the program. */
typedef struct setup {
    int channels, heads, context, sequences, rounds, world; /* world: index into worlds */
    figures of[WORLDS][VARIANTS];
} setup;

/* Builds a trainer of one block. Its input and the gradient of its output are random. Collective. */
static ddp_result build(trainer *t, const setup *u, run_options *options, ddp_group *world, job *j) {
    run *r = &t->run;
    gpt_tensor *m = &t->model;
    size_t floats = 0;
    run_init(r, world, j);
    r->options = options;
    r->plan.config.layers = 1;
    r->plan.config.channels = u->channels;
    r->plan.config.heads = u->heads;
    r->plan.config.context = u->context;
    r->plan.config.micro_batch = u->sequences;
    r->plan.config.batch = u->sequences;
    r->plan.config.seed = 1;
    DDP_TRY(build_model(t));
    for (int i = 0; i < m->param_count; i++)
        floats += GPT_ROUND_UP((size_t)(m->pieces[i].rows * m->pieces[i].columns), 16);
    t->grads[0] = (float *)calloc(floats, sizeof(float));
    if (!t->grads[0]) return run_out_of_memory();
    for (int i = 1; i < m->param_count; i++)
        t->grads[i] = t->grads[i - 1]
                      + GPT_ROUND_UP((size_t)(m->pieces[i - 1].rows * m->pieces[i - 1].columns), 16);
    for (int64_t i = 0; i < m->rows * m->config.channels; i++)
        t->streams[0][i] = (float)(gpt_random(3, (uint64_t)i) >> 40) * 0x1p-23f - 1;
    return DDP_OK;
}

/* Runs one block. Its gradients are not averaged: it has no accumulator. Collective. */
static ddp_result run_block(trainer *t, figures *f, int round) {
    ddp_tp_stats stats = DDP_ZERO;
    gpt_tensor *m = &t->model;
    double seconds, waiting;
    for (int64_t i = 0; i < m->rows * m->config.channels; i++) t->d_stream[i] = 0x1p-10f * t->streams[0][i];
    ddp_tp_reset_stats(m->tp);
    DDP_TRY(ddp_barrier(t->run.world));
    seconds = ddp_now();
    DDP_TRY(gpt_tensor_block_forward(m, 0, t->streams[0], &t->acts[0], t->streams[1]));
    DDP_TRY(gpt_tensor_block_backward(m, 0, t->streams[0], &t->acts[0], t->d_stream, t->d_stream));
    seconds = ddp_now() - seconds;
    DDP_TRY(ddp_tp_get_stats(m->tp, &stats));
    waiting = stats.comm_seconds;
    DDP_TRY(ddp_all_reduce(t->run.world, &seconds, &seconds, 1, DDP_F64, DDP_OP_MAX, NULL));
    DDP_TRY(ddp_all_reduce(t->run.world, &waiting, &waiting, 1, DDP_F64, DDP_OP_AVG, NULL));
    if (t->run.rank != 0 || round < 0) return DDP_OK;
    f->seconds[round] = seconds;
    f->waiting[round] = waiting;
    f->elements = (double)stats.elements_sent;
    return DDP_OK;
}

/* With one rank, the only variant is the whole block. */
static int variant_count(int ranks) { return ranks > 1 ? VARIANTS : 1; }

/* one: the group of only rank 0; NULL on other ranks. */
static ddp_result measure(ddp_group *world, ddp_group *one, setup *u, trainer *trainers, run_options *options,
                          job *j) {
    int count = variant_count(ddp_world_size(world));
    for (int v = 0; v < count; v++) {
        ddp_group *group = variants[v].on_rank0 ? one : world;
        if (!group) continue;
        options[v].tensor = ddp_world_size(group);
        options[v].sequence_parallel = variants[v].sequence_parallel;
        options[v].chunks = variants[v].chunks;
        DDP_TRY(build(&trainers[v], u, &options[v], group, j));
    }
    for (int round = -1; round < u->rounds; round++)
        for (int v = 0; v < count; v++) {
            int turn = round % 2 ? count - 1 - v : v;
            DDP_TRY(ddp_barrier(world));
            if (trainers[turn].model.tp) DDP_TRY(run_block(&trainers[turn], &u->of[u->world][turn], round));
        }
    return DDP_OK;
}

static ddp_result rank(ddp_group *world, void *user) {
    trainer *trainers = (trainer *)calloc(VARIANTS, sizeof *trainers);
    run_options *options = (run_options *)calloc(VARIANTS, sizeof *options);
    ddp_group *one = NULL;
    ddp_result result;
    job j;
    memset(&j, 0, sizeof j);
    result = trainers && options ? ddp_group_split(world, ddp_rank(world) == 0 ? 0 : -1, 0, &one)
                                 : run_out_of_memory();
    if (result == DDP_OK) result = measure(world, one, (setup *)user, trainers, options, &j);
    for (int v = VARIANTS - 1; v >= 0 && trainers; v--) {
        if (trainers[v].grads) free(trainers[v].grads[0]);
        trainer_free(&trainers[v]);
    }
    ddp_group_destroy(one);
    free(trainers);
    free(options);
    return result;
}

static void print_bar(FILE *dat, int ranks, const variant *v, double computing, double waiting) {
    fprintf(dat, "\"%d %s%s", ranks, ranks > 1 ? "ranks" : "rank", v->sequence_parallel ? ", sequence" : "");
    if (v->chunks > 1) fprintf(dat, ", %d chunks", v->chunks);
    fprintf(dat, "\" %.6f %.6f\n", computing * 1e3, waiting * 1e3);
}

static void print_rows(setup *u, FILE *dat) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    double bsh = (double)u->sequences * u->context * u->channels;
    printf("%d channels, %d heads, %d sequences of %d tokens, f32, %ld cores, medians of %d rounds\n\n"
           "| ranks | sequence parallel | chunks | forward and backward, ms | rank 0 only, ms | share of the "
           "ideal | waiting, ms | share waiting | elements sent | "
           "8bsh(t-1)/t |\n"
           "|---|---|---|---|---|---|---|---|---|---|\n",
           u->channels, u->heads, u->sequences, u->context, cores, u->rounds);
    for (int w = 0; w < WORLDS; w++) {
        double one = median(u->of[w][0].seconds, u->rounds);
        int parallel = worlds[w] < cores ? worlds[w] : (int)cores;
        for (int v = w > 0; v < variant_count(worlds[w]); v++) {
            figures *f = &u->of[w][v];
            double seconds = median(f->seconds, u->rounds), waiting = median(f->waiting, u->rounds);
            printf("| %d | %s | %d | %.2f | %.2f | %.1f%% | %.2f | %.1f%% | %.0f | %.0f |\n", worlds[w],
                   variants[v].sequence_parallel ? "yes" : "no", variants[v].chunks, seconds * 1e3, one * 1e3,
                   100 * one / parallel / seconds, waiting * 1e3, 100 * waiting / seconds, f->elements,
                   8 * bsh * (worlds[w] - 1) / worlds[w]);
            if (dat) print_bar(dat, worlds[w], &variants[v], seconds - waiting, waiting);
        }
    }
    fflush(stdout);
}

int main(int argc, char **argv) {
    setup *u = (setup *)mmap(NULL, sizeof *u, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    FILE *dat;
    if (u == (setup *)MAP_FAILED) return perror("bench_tensor"), 1;
    u->channels = argc > 1 ? atoi(argv[1]) : 512;
    u->heads = argc > 2 ? atoi(argv[2]) : 8;
    u->context = argc > 3 ? atoi(argv[3]) : 256;
    u->sequences = argc > 4 ? atoi(argv[4]) : 4;
    u->rounds = argc > 5 ? atoi(argv[5]) : 15;
    if (u->heads < 4 || u->heads % 4 || u->channels < 1 || u->channels % u->heads || u->context < 4
        || u->context % 4 || u->sequences < 1 || u->rounds < 1 || u->rounds > ROUNDS_MAX) {
        fprintf(stderr,
                "usage: bench_tensor [channels, divisible by heads [heads, divisible by 4 [context, "
                "divisible by 4 [sequences [rounds 1-%d "
                "[dat]]]]]]\n",
                ROUNDS_MAX);
        return 1;
    }
    for (u->world = 0; u->world < WORLDS; u->world++) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = worlds[u->world];
        if (ddp_launch(&desc, rank, u) == DDP_OK) continue;
        fprintf(stderr, "bench_tensor: %s\n", ddp_last_error());
        return 1;
    }
    dat = argc > 6 ? fopen(argv[6], "a") : NULL;
    if (argc > 6 && !dat) return perror(argv[6]), 1;
    print_rows(u, dat);
    return dat && fclose(dat) != 0 ? (perror(argv[6]), 1) : 0;
}

/* MIT License: see LICENSE. */

/*  bench_fsdp.c - cost and memory of sharding: a step of train_gpt's model under each strategy of ddp_fsdp.h.

USAGE
    cc -O3 -march=native bench/bench_fsdp.c -o bench_fsdp -lm -lpthread
    ./bench_fsdp [ranks [rounds [layers channels [dat]]]]

    The shape of train_gpt on 2 ranks: context 128, micro-batch 4, two micro-batches per rank and step,
    clipping, AdamW. Default sizes: 4 layers of 128 channels, then 6 of 256. Lines for plot_fsdp.gp are
    appended to the file dat.

    All strategies, and train_gpt's DDP (ddp_reducer, ddp_accumulator, ddp_optimizer), exist in the same
    processes and train the same model on the same tokens. They take turns of a few steps, in an order that
    is reversed every round. A turn starts at a barrier; its time is that of the slowest rank. Each round
    gives one ratio to NO_SHARD per strategy. Figures are medians and quartiles over rounds. "processor
    time" is the same ratio for the processor time of all ranks: other programs disturb it less, but it
    counts waits that spin. At the end all weights must have the same bits. */
#define DDP_IMPLEMENTATION
#include "../ddp_fsdp.h"
#include "../examples/gpt/gpt.h"
#include "median.h"

#define TRY(call)                                    \
    do {                                             \
        ddp_result try_result = (call);              \
        if (try_result != DDP_OK) return try_result; \
    } while (0)
enum {
    MICRO_BATCH = 4,
    CONTEXT = 128,
    MICROS = 2,
    VARIANTS = 5,
    REDUCER = 4,
    NO_SHARD = DDP_FSDP_NO_SHARD,
    ROUNDS_MAX = 400
};
/* Indexed by ddp_fsdp_strategy, then train_gpt's DDP. */
static const char *const names[VARIANTS] = {"FULL_SHARD", "SHARD_GRAD", "SHARD_OPTIM", "NO_SHARD",
                                            "train_gpt"};

typedef struct setup {
    int ranks, rounds, layers, channels;
    const char *dat;
} setup;

typedef struct variant {
    ddp_fsdp *fsdp; /* NULL = train_gpt's DDP, which uses: */
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_optimizer *optimizer;
    ddp_fsdp_param *params;
    ddp_fsdp_unit_desc *units;
    ddp_param *plain;
    /* ratios: of times and ran, to NO_SHARD's. */
    double times[ROUNDS_MAX], ran[ROUNDS_MAX], ratios[2][ROUNDS_MAX];
} variant;

typedef struct bench {
    ddp_group *world;
    gpt_config config;
    gpt_model model; /* activations; values and grads point to those of the current variant */
    float **own;     /* values of train_gpt's DDP */
    gpt_param *infos;
    int64_t parameter_count;
    int *tokens; /* of all micro-batches: (MICROS * ranks, MICRO_BATCH, CONTEXT) + 1 */
    variant variants[VARIANTS];
} bench;

static void *zeros(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) {
        fprintf(stderr, "bench_fsdp: not enough memory\n");
        exit(1);
    }
    return memory;
}

//== building ===================================================================================== >>building

static void describe(const bench *b, int i, ddp_param *param) {
    param->name = b->infos[i].name;
    param->value.dtype = DDP_F32;
    param->value.ndim = b->infos[i].ndim;
    for (int k = 0; k < param->value.ndim; k++) param->value.shape[k] = b->infos[i].shape[k];
}

static ddp_result fill_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const bench *b = (const bench *)user;
    int64_t columns = b->infos[param->index].shape[1];
    gpt_param_init(&b->config, 1, param->index, first_row * columns, row_count * columns, (float *)out);
    return DDP_OK;
}

static ddp_result build_fsdp(bench *b, int strategy) {
    variant *w = &b->variants[strategy];
    ddp_fsdp_desc desc = DDP_ZERO;
    w->params = (ddp_fsdp_param *)zeros((size_t)b->model.param_count, sizeof *w->params);
    w->units = (ddp_fsdp_unit_desc *)zeros((size_t)b->config.layers + 2, sizeof *w->units);
    for (int i = 0; i < b->model.param_count; i++) {
        ddp_fsdp_unit_desc *unit = &w->units[b->infos[i].unit];
        describe(b, i, &w->params[i].param);
        w->params[i].index = i;
        if (b->infos[i].tied_to >= 0) w->params[i].tied_to = b->infos[b->infos[i].tied_to].name;
        if (!unit->param_count++) unit->params = &w->params[i];
    }
    desc.units = w->units;
    desc.unit_count = b->config.layers + 2;
    desc.strategy = (ddp_fsdp_strategy)strategy;
    desc.micro_batch_count = MICROS;
    desc.overwrite_gradients = 1;
    desc.optimizer.beta2 = 0.95f;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = fill_rows;
    desc.init_user = b;
    return ddp_fsdp_create(&w->fsdp, b->world, &desc);
}

static ddp_result build_reducer(bench *b) {
    variant *w = &b->variants[REDUCER];
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc accumulator = DDP_ZERO;
    ddp_optimizer_desc adamw = DDP_ZERO;
    w->plain = (ddp_param *)zeros((size_t)b->model.param_count, sizeof *w->plain);
    for (int i = 0; i < b->model.param_count; i++) {
        describe(b, i, &w->plain[i]);
        if (b->infos[i].tied_to < 0)
            gpt_param_init(&b->config, 1, i, 0, b->infos[i].count,
                           b->own[i] = (float *)zeros((size_t)b->infos[i].count, sizeof(float)));
        else
            b->own[i] = b->own[b->infos[i].tied_to];
        w->plain[i].value.data = b->own[i];
    }
    reducer.params = accumulator.params = w->plain;
    reducer.param_count = accumulator.param_count = b->model.param_count;
    reducer.micro_batch_count = accumulator.micro_batch_count = MICROS;
    TRY(ddp_reducer_create(&w->reducer, b->world, &reducer));
    accumulator.reducer = w->reducer;
    TRY(ddp_accumulator_create(&w->accumulator, b->world, &accumulator));
    adamw.params = w->plain;
    adamw.param_count = gpt_param_head(&b->config); /* without the last, head.weight, which is wte */
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    adamw.decay_matrices_only = 1;
    return ddp_optimizer_create(&w->optimizer, b->world, &adamw);
}

static ddp_result build(bench *b) {
    int tokens = MICROS * ddp_world_size(b->world) * MICRO_BATCH * CONTEXT + 1,
        count = gpt_param_count(&b->config);
    if (gpt_model_create(&b->model, &b->config, MICRO_BATCH, 0) != 0)
        return ddp_fail(DDP_ERR_NO_MEMORY, "a model");
    b->infos = (gpt_param *)zeros((size_t)count, sizeof *b->infos);
    b->own = (float **)zeros((size_t)count, sizeof *b->own);
    b->tokens = (int *)zeros((size_t)tokens, sizeof *b->tokens);
    for (int i = 0; i < tokens; i++) b->tokens[i] = (int)(gpt_random(7, (uint64_t)i) % 96);
    for (int i = 0; i < count; i++) {
        gpt_param_info(&b->config, i, &b->infos[i]);
        if (b->infos[i].tied_to < 0) b->parameter_count += b->infos[i].count;
    }
    for (int s = 0; s < REDUCER; s++) TRY(build_fsdp(b, s));
    return build_reducer(b);
}

//== a step =========================================================================================== >>step

static ddp_result gather(bench *b, variant *w, int unit) {
    TRY(ddp_fsdp_unshard(w->fsdp, unit));
    for (int i = 0; i < w->units[unit].param_count; i++) {
        const ddp_fsdp_param *param = &w->units[unit].params[i];
        b->model.values[param->index] = (float *)param->param.value.data;
        b->model.grads[param->index] = (float *)param->param.grad.data;
    }
    return DDP_OK;
}

static ddp_result step_fsdp(bench *b, variant *w, int strategy) {
    int rank = ddp_rank(b->world), world = ddp_world_size(b->world), units = b->config.layers + 2;
    int dealt = strategy == DDP_FSDP_FULL_SHARD || strategy == DDP_FSDP_SHARD_GRAD;
    gpt_pass pass = gpt_model_pass(&b->model, MICRO_BATCH, CONTEXT);
    for (int micro = 0; micro < MICROS; micro++) {
        const int *tokens = b->tokens
                            + (dealt ? micro * world + rank : rank * MICROS + micro) * MICRO_BATCH * CONTEXT;
        for (int unit = 0; unit < units; unit++) {
            TRY(gather(b, w, unit));
            gpt_model_unit_forward(&b->model, &pass, unit, tokens, tokens + 1);
            TRY(ddp_fsdp_reshard(w->fsdp, unit));
        }
        for (int unit = units - 1; unit >= 0; unit--) {
            TRY(gather(b, w, unit));
            gpt_model_unit_backward(&b->model, &pass, unit, tokens, tokens + 1);
            TRY(ddp_fsdp_reduce_grads(w->fsdp, unit));
            TRY(ddp_fsdp_reshard(w->fsdp, unit));
        }
    }
    TRY(ddp_fsdp_clip_grad_norm(w->fsdp, 1.0f, NULL));
    return ddp_fsdp_step(w->fsdp, 1e-3f);
}

/* ddp_accumulator_next reports failures. */
static void gradient_ready(void *user, int index) {
    ddp_accumulator_ready(((variant *)user)->accumulator, index);
}

static ddp_result step_reducer(bench *b, variant *w) {
    for (int i = 0; i < b->model.param_count; i++) {
        b->model.values[i] = b->own[i];
        b->model.grads[i] = (float *)w->plain[i].grad.data;
    }
    for (int micro = 0; micro < MICROS; micro++) {
        const int *tokens = b->tokens + (ddp_rank(b->world) * MICROS + micro) * MICRO_BATCH * CONTEXT;
        gpt_model_forward_backward(&b->model, tokens, tokens + 1, MICRO_BATCH, CONTEXT, gradient_ready, w);
        TRY(ddp_accumulator_next(w->accumulator, NULL));
    }
    TRY(ddp_reducer_wait(w->reducer));
    TRY(ddp_reducer_clip_grad_norm(w->reducer, 1.0f, NULL));
    return ddp_optimizer_step(w->optimizer, 1e-3f);
}

static double processor_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static ddp_result turn(bench *b, int which, int steps, double *seconds, double *ran) {
    double begin, ran_begin;
    TRY(ddp_barrier(b->world));
    begin = ddp_now();
    ran_begin = processor_seconds();
    for (int i = 0; i < steps; i++)
        TRY(which == REDUCER ? step_reducer(b, &b->variants[which])
                             : step_fsdp(b, &b->variants[which], which));
    *seconds = (ddp_now() - begin) / steps;
    *ran = (processor_seconds() - ran_begin) / steps;
    TRY(ddp_all_reduce(b->world, ran, ran, 1, DDP_F64, DDP_OP_SUM, NULL));
    return ddp_all_reduce(b->world, seconds, seconds, 1, DDP_F64, DDP_OP_MAX, NULL);
}

//== the run =========================================================================================== >>run

/* Compares the final values of all variants with those of train_gpt's DDP. */
static ddp_result compare(bench *b) {
    for (int s = 0; s < REDUCER; s++) {
        TRY(ddp_fsdp_no_grad(b->variants[s].fsdp, 1));
        for (int unit = 0; unit < b->config.layers + 2; unit++) {
            TRY(gather(b, &b->variants[s], unit));
            for (int i = 0; i < b->model.param_count; i++)
                if (b->infos[i].unit == unit
                    && memcmp(b->model.values[i], b->own[i], (size_t)b->infos[i].count * sizeof(float)))
                    return ddp_fail(DDP_ERR_CORRUPT,
                                    "%s: the final weights %s differ from those of train_gpt", names[s],
                                    b->infos[i].name);
            TRY(ddp_fsdp_reshard(b->variants[s].fsdp, unit));
        }
    }
    return DDP_OK;
}

static void report(bench *b, const setup *s) {
    static const double required[VARIANTS] = {1.08, 1.03, 1.03, 0, 0};
    FILE *dat = s->dat ? fopen(s->dat, "a") : NULL;
    printf("%d layers, %d channels: %.2f M parameters (f32), %d ranks, %d rounds\n", s->layers, s->channels,
           (double)b->parameter_count * 1e-6, s->ranks, s->rounds);
    printf("| | step, ms | against NO_SHARD | quartiles | target | processor time | peak, MB | predicted, MB "
           "|\n|---|---|---|---|---|---|---|---|\n");
    if (dat) fprintf(dat, "# %d layers, %d channels\n", s->layers, s->channels);
    for (int i = VARIANTS - 1; i >= 0; i--) {
        variant *w = &b->variants[i];
        double ms = quantile(w->times, s->rounds, 0.5) * 1e3, ratio = quantile(w->ratios[0], s->rounds, 0.5);
        ddp_fsdp_memory memory = DDP_ZERO;
        printf("| %s | %.2f | %.3f | %.3f to %.3f |", names[i], ms, ratio,
               quantile(w->ratios[0], s->rounds, 0.25), quantile(w->ratios[0], s->rounds, 0.75));
        if (required[i] > 0)
            printf(" %.2f%s |", required[i], ratio > required[i] ? " missed" : "");
        else
            printf(" |");
        printf(" %.3f |", quantile(w->ratios[1], s->rounds, 0.5));
        if (!w->fsdp) {
            printf(" | |\n");
            continue;
        }
        ddp_fsdp_get_memory(w->fsdp, &memory);
        printf(" %.2f | %.2f |\n", (double)memory.peak.total * 1e-6, (double)memory.predicted.total * 1e-6);
        if (dat)
            fprintf(dat, "%s %.4f %.4f %.4f %.4f %.4f %.4f\n", names[i], ratio,
                    (double)memory.peak.shards * 1e-6, (double)memory.peak.gathered * 1e-6,
                    (double)memory.peak.gradients * 1e-6, (double)memory.peak.optimizer * 1e-6,
                    (double)(memory.peak.communication + memory.peak.bookkeeping) * 1e-6);
    }
    printf("\n");
    if (dat) {
        fprintf(dat, "\n\n");
        fclose(dat);
    }
}

static ddp_result bench_rank(ddp_group *world, void *user) {
    const setup *s = (const setup *)user;
    bench *b = (bench *)zeros(1, sizeof *b);
    double seconds = 0, ran;
    int steps;
    b->world = world;
    b->config.vocab = 256;
    b->config.context = CONTEXT;
    b->config.layers = s->layers;
    b->config.heads = 4;
    b->config.channels = s->channels;
    TRY(build(b));
    /* warm-up: buckets are rebuilt, orders recorded. */
    for (int i = 0; i < VARIANTS; i++) TRY(turn(b, i, 3, &seconds, &ran));
    steps = seconds < 0.1 ? (int)(0.2 / seconds) : 1;
    TRY(ddp_broadcast(world, &steps, 1, DDP_I32, 0, NULL));
    for (int round = 0; round < s->rounds; round++) {
        for (int k = 0; k < VARIANTS; k++) {
            int i = round & 1 ? VARIANTS - 1 - k : k;
            TRY(turn(b, i, steps, &b->variants[i].times[round], &b->variants[i].ran[round]));
        }
        for (int i = 0; i < VARIANTS; i++) {
            b->variants[i].ratios[0][round] = b->variants[i].times[round]
                                              / b->variants[NO_SHARD].times[round];
            b->variants[i].ratios[1][round] = b->variants[i].ran[round] / b->variants[NO_SHARD].ran[round];
        }
    }
    TRY(compare(b));
    if (ddp_rank(world) == 0) report(b, s);
    for (int i = 0; i < REDUCER; i++) ddp_fsdp_destroy(b->variants[i].fsdp);
    ddp_accumulator_destroy(b->variants[REDUCER].accumulator);
    ddp_reducer_destroy(b->variants[REDUCER].reducer);
    return DDP_OK; /* the process ends here and frees the rest */
}

int main(int argc, char **argv) {
    static const int sizes[2][2] = {{4, 128}, {6, 256}};
    int given = argc > 4;
    setup s;
    memset(&s, 0, sizeof s);
    s.ranks = argc > 1 ? atoi(argv[1]) : 2;
    s.rounds = argc > 2 ? atoi(argv[2]) : 31;
    s.dat = argc > 5 ? argv[5] : NULL;
    for (int i = 0; i < (given ? 1 : 2); i++) {
        ddp_launch_desc desc = DDP_ZERO;
        s.layers = given ? atoi(argv[3]) : sizes[i][0];
        s.channels = given ? atoi(argv[4]) : sizes[i][1];
        desc.world_size = s.ranks;
        if (s.ranks < 1 || s.ranks > DDP_MAX_LOCAL_RANKS || s.rounds < 1 || s.rounds > ROUNDS_MAX
            || s.layers < 1 || s.channels < 4 || s.channels % 4) {
            fprintf(stderr,
                    "usage: bench_fsdp [ranks 1-%d [rounds 1-%d [layers channels [dat]]]], channels "
                    "divisible by 4\n",
                    DDP_MAX_LOCAL_RANKS, ROUNDS_MAX);
            return 1;
        }
        if (ddp_launch(&desc, bench_rank, &s) != DDP_OK) {
            fprintf(stderr, "bench_fsdp: %s\n", ddp_last_error());
            return 1;
        }
    }
    return 0;
}

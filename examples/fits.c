/*  fits.c - the largest batch that fits on a GPU, for each strategy and number of ranks

        cc -O3 -march=native examples/fits.c -o fits -lm -lpthread
        ./fits                          GPT-2 on 4 GPUs of 16 GiB, f32, AdamW; --help prints the options
        ./fits --model t5-3b --memory 80 --ranks 2,4,8 --dtype bf16

    ddp_fsdp_predict gives the memory of values, gradients and optimizer; no GPU and no group is needed.
    You give the activations: bytes per sample of a block (--unit-bytes), of the input of a block, which
    recompute keeps (--boundary-bytes), and of the outputs (--output-bytes). By default they follow from
    --tokens, as Korthikanti et al. 2022 count them: 34 t d + 5 a t t bytes in 16 bits for t tokens, width d
    and a heads. A block with cross-attention has the attention part twice. --fit N scales them, so that
    exactly N samples fill one GPU, and prints the factor, for --scale.

    Memory of a GPU:
        reserve       CUDA's context, kernels, and the workspace of matrix products: --reserve
        workspace     with more than one rank: up to 32 MiB of ddp_cuda.cuh, and NCCL's buffers: --workspace
        state         what ddp_fsdp_predict counts on the device. "Offload" is DDP_FSDP_OFFLOAD_HOST; with
                      ZeRO-3, DDP_FSDP_OFFLOAD_PARAMS
        activations   batch per rank times bytes per sample. With recompute: the inputs of all blocks, and
                      the activations of the largest block, which backward computes again

    DDP is DDP_FSDP_NO_SHARD; ddp_reducer with an optimizer of your own needs the same. DataParallel (see
    dp_vs_ddp.c) is limited by GPU 0. In addition to the state of one rank, GPU 0 has the gradients of its own
    replica next to their sum over replicas. It also gathers the outputs of every sample.
    ZeRO-3 gathers one block ahead. In the row "one unit" the model is a single unit, as
    FullyShardedDataParallel makes it without a wrapping policy: it gathers all values at once.

    Published for T5-large on 4 GPUs of 16 GB, f32, SGD with momentum: global batches 14 (one GPU), 36
    (DataParallel), 48 (DDP), 64 (FSDP). After --tokens 64 --fit 14 this program prints 14, 32, 52, and 60 for
    one unit. A unit per block leaves room for 96. */
#define DDP_IMPLEMENTATION
#include "../ddp_fsdp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARAMS = 640, MAX_UNITS = 64, MAX_RANK_COUNTS = 8 };
static const double MIB = 1048576, GIB = 1073741824;

/* GPT-2 (Radford et al. 2019) and T5 (Raffel et al. 2020). T5 has no positions and no biases. */
static const char *const model_names[] = {"gpt2", "t5-large", "t5-3b", NULL};
static const struct architecture {
    int width, inner, hidden, heads, encoders, decoders, vocabulary, positions;
} architectures[] = {
    {768, 768, 3072, 12, 12, 0, 50257, 1024}, /* its blocks have no cross-attention, as those of an encoder */
    {1024, 1024, 4096, 16, 24, 24, 32128, 0},
    {1024, 4096, 16384, 32, 24, 24, 32128, 0},
};
static const char *const optimizer_names[] = {"adamw", "sgd", "momentum", NULL};
static const char *const dtype_names[] = {"f32", "bf16", NULL};

typedef struct settings {
    int model, optimizer, dtype; /* indexes of the names */
    int rank_count_count;
    double rank_counts[MAX_RANK_COUNTS], memory, reserve, workspace, tokens, scale, fit;
    double unit_bytes, boundary_bytes, output_bytes; /* per sample; 0 = by tokens */
} settings;

/* A model as units, and its bytes per sample: of activations without and with recompute, of outputs. */
typedef struct model {
    ddp_fsdp_param params[MAX_PARAMS], flat;
    char names[MAX_PARAMS][16];
    ddp_fsdp_unit_desc units[MAX_UNITS], one_unit;
    int param_count, unit_count;
    double count, activations, recomputed, outputs;
} model;

static double element_bytes(const settings *s) { return s->dtype ? 2 : 4; }

/* A matrix, or with columns 0 a vector; with a bias if the model has biases. */
static void add(model *m, const struct architecture *a, int rows, int columns) {
    for (int bias = 0; bias <= (a->positions > 0); bias++) {
        ddp_fsdp_param *p = &m->params[m->param_count];
        snprintf(m->names[m->param_count], sizeof m->names[0], "p%d", m->param_count);
        p->param.name = m->names[m->param_count++];
        p->param.value.dtype = DDP_F32;
        p->param.value.ndim = bias || !columns ? 1 : 2;
        p->param.value.shape[0] = rows;
        p->param.value.shape[1] = bias ? 0 : columns;
        m->units[m->unit_count - 1].param_count++;
        m->count += (double)ddp_tensor_count(&p->param.value);
    }
}

static void add_block(model *m, const struct architecture *a, int attentions) {
    m->units[m->unit_count++].params = &m->params[m->param_count];
    for (int i = 0; i < attentions; i++) {
        add(m, a, a->width, 0); /* a norm */
        for (int k = 0; k < 3; k++) add(m, a, a->inner, a->width);
        add(m, a, a->width, a->inner);
    }
    add(m, a, a->width, 0);
    add(m, a, a->hidden, a->width);
    add(m, a, a->width, a->hidden);
}

/* Activations of a block per sample: elements that backward needs, and masks of dropout of one byte. */
static double block_bytes(const settings *s, const struct architecture *a, int attentions) {
    double t = s->tokens, scores = a->heads * t * t;
    double attention = t * (2 * a->width + 4 * a->inner) + 2 * scores, mlp = 2 * t * (a->width + a->hidden);
    double masks = (attentions + 1) * t * a->width + attentions * scores;
    if (s->unit_bytes > 0) return s->scale * s->unit_bytes;
    return s->scale * (element_bytes(s) * (attentions * attention + mlp) + masks);
}

/* Builds a unit for the embeddings and the final norm, and one for each block. */
static void build(model *m, const settings *s) {
    const struct architecture *a = &architectures[s->model], no_bias = {0};
    double size = element_bytes(s), largest = 0;
    double boundary = s->boundary_bytes > 0 ? s->boundary_bytes : s->tokens * a->width * size;
    memset(m, 0, sizeof *m);
    m->outputs = s->output_bytes > 0 ? s->output_bytes : s->tokens * a->vocabulary * size;
    m->units[m->unit_count++].params = m->params;
    add(m, &no_bias, a->vocabulary, a->width);
    if (a->positions) add(m, &no_bias, a->positions, a->width);
    add(m, a, a->width, 0);
    for (int side = 0; side < 2 && !a->positions; side++) add(m, &no_bias, 32, a->heads); /* T5: positions */
    if (a->decoders) add(m, a, a->width, 0);
    m->activations = m->recomputed = m->outputs;
    for (int b = 0; b < a->encoders + a->decoders; b++) {
        double bytes = block_bytes(s, a, b < a->encoders ? 1 : 2);
        add_block(m, a, b < a->encoders ? 1 : 2);
        m->activations += bytes;
        m->recomputed += boundary;
        if (bytes > largest) largest = bytes;
    }
    m->recomputed += largest;
    m->flat.param.name = "flat";
    m->flat.param.value = (ddp_tensor){NULL, DDP_F32, 1, {0}};
    m->one_unit = (ddp_fsdp_unit_desc){"model", &m->flat, 1};
}

typedef struct row {
    const char *name;
    ddp_fsdp_strategy strategy;
    int on_one_rank, data_parallel, one_unit;
} row;
static const row rows[] = {
    {"one rank", DDP_FSDP_NO_SHARD, 1, 0, 0}, {"DataParallel", DDP_FSDP_NO_SHARD, 1, 1, 0},
    {"DDP", DDP_FSDP_NO_SHARD, 0, 0, 0},      {"ZeRO-1", DDP_FSDP_SHARD_OPTIM, 0, 0, 0},
    {"ZeRO-2", DDP_FSDP_SHARD_GRAD, 0, 0, 0}, {"ZeRO-3, one unit", DDP_FSDP_FULL_SHARD, 0, 0, 1},
    {"ZeRO-3", DDP_FSDP_FULL_SHARD, 0, 0, 0},
};

/* The largest batch per rank, 0 = none, and the bytes of a GPU for values, gradients and optimizer. */
static ddp_result largest_batch(model *m, const settings *s, const row *r, int ranks, int recompute,
                                int offload, double *state, double *batch) {
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp_bytes bytes;
    double per_sample = recompute ? m->recomputed : m->activations, room = s->memory - s->reserve;
    m->flat.param.value.shape[0] = ((int64_t)m->count + ranks - 1) / ranks * ranks;
    desc.units = r->one_unit ? &m->one_unit : m->units;
    desc.unit_count = r->one_unit ? 1 : m->unit_count;
    desc.strategy = r->strategy;
    desc.param_dtype = s->dtype ? DDP_BF16 : DDP_DTYPE_DEFAULT;
    desc.optimizer.kind = s->optimizer ? DDP_OPTIMIZER_SGD : DDP_OPTIMIZER_ADAMW;
    desc.optimizer.momentum = s->optimizer == 2 ? 0.9f : 0;
    if (offload) desc.offload = r->strategy ? DDP_FSDP_OFFLOAD_HOST : DDP_FSDP_OFFLOAD_PARAMS;
    desc.ranks.gpu = 1;
    DDP_TRY(ddp_fsdp_predict(&desc, r->on_one_rank ? 1 : ranks, &bytes));
    *state = (double)bytes.device;
    if (r->data_parallel) *state += m->count * element_bytes(s);
    if (r->data_parallel) per_sample += (ranks - 1) * m->outputs;
    if (ranks > 1 && r != &rows[0]) room -= s->workspace;
    /* a batch that --fit has made to fill the GPU is not lost to rounding */
    *batch = room > *state ? floor((room - *state) / per_sample * (1 + 1e-12)) : 0;
    return DDP_OK;
}

static ddp_result print_table(model *m, const settings *s, int ranks) {
    printf("\n| batch per rank (of all ranks), %d GPUs | state, GiB | plain | recompute | offload | both |\n"
           "|---|---|---|---|---|---|\n",
           ranks);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const row *r = &rows[i];
        double state = 0, batch = 0;
        DDP_TRY(largest_batch(m, s, r, ranks, 0, 0, &state, &batch));
        printf("| %s | %.2f |", r->name, state / GIB);
        for (int column = 0; column < 4; column++) {
            DDP_TRY(largest_batch(m, s, r, ranks, column & 1, column / 2, &state, &batch));
            if (batch == 0 || (r->data_parallel && column > 1)) /* DataParallel has no offload */
                printf(" - |");
            else
                printf(" %.0f (%.0f) |", batch, batch * (r == &rows[0] ? 1 : ranks));
        }
        printf("\n");
    }
    return DDP_OK;
}

static ddp_result run(model *m, settings *s) {
    double state, ignored;
    build(m, s);
    if (s->fit > 0) {
        DDP_TRY(largest_batch(m, s, &rows[0], 1, 0, 0, &state, &ignored));
        double blocks = (s->memory - s->reserve - state) / s->fit - m->outputs;
        if (blocks <= 0)
            return ddp_fail(DDP_ERR_INVALID, "--fit %.0f: no room for that many samples; use more --memory",
                            s->fit);
        s->scale *= blocks / (m->activations - m->outputs);
        build(m, s);
    }
    printf("%s: %.0f parameters in %d units, %s, %s, GPUs of %g GiB\n", model_names[s->model], m->count,
           m->unit_count, dtype_names[s->dtype], optimizer_names[s->optimizer], s->memory / GIB);
    printf("MiB per sample: activations %.1f, with recompute %.1f, outputs %.1f; --scale %.6g\n",
           m->activations / MIB, m->recomputed / MIB, m->outputs / MIB, s->scale);
    for (int i = 0; i < s->rank_count_count; i++) DDP_TRY(print_table(m, s, (int)s->rank_counts[i]));
    return DDP_OK;
}

/* Reads up to cap numbers from min to max, with commas between them. Returns how many, or 0 on error. With a
   cap above 1 they must be whole numbers. */
static int read_numbers(const char *text, double min, double max, double *out, int cap) {
    for (int i = 0; i < cap; i++) {
        char *rest;
        out[i] = strtod(text, &rest);
        if (rest == text || !(out[i] >= min && out[i] <= max)) return 0;
        if (cap > 1 && out[i] != floor(out[i])) return 0;
        if (!*rest) return i + 1;
        if (*rest != ',') return 0;
        text = rest + 1;
    }
    return 0;
}

static ddp_result read_option(settings *s, const char *flag, const char *value) {
    const struct {
        const char *flag;
        double *out, min, max, unit;
        int cap;
    } numbers[] = {
        {"--ranks", s->rank_counts, 1, 4096, 1, MAX_RANK_COUNTS},
        {"--memory", &s->memory, 0.1, 1e5, GIB, 1},
        {"--reserve", &s->reserve, 0, 1e5, MIB, 1},
        {"--workspace", &s->workspace, 0, 1e5, MIB, 1},
        {"--tokens", &s->tokens, 1, 1e6, 1, 1},
        {"--unit-bytes", &s->unit_bytes, 1, 1e15, 1, 1},
        {"--scale", &s->scale, 1e-6, 1e6, 1, 1},
        {"--boundary-bytes", &s->boundary_bytes, 1, 1e15, 1, 1},
        {"--fit", &s->fit, 1, 1e6, 1, 1},
        {"--output-bytes", &s->output_bytes, 1, 1e15, 1, 1},
    };
    const struct {
        const char *flag, *const *names;
        int *out;
    } choices[] = {{"--model", model_names, &s->model},
                   {"--dtype", dtype_names, &s->dtype},
                   {"--optimizer", optimizer_names, &s->optimizer}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0] && value; i++) {
        if (strcmp(flag, numbers[i].flag)) continue;
        int count = read_numbers(value, numbers[i].min, numbers[i].max, numbers[i].out, numbers[i].cap);
        const char *use = numbers[i].cap > 1 ? "up to 8 numbers" : "a number";
        if (!count)
            return ddp_fail(DDP_ERR_INVALID, "%s %s: use %s from %g to %g", flag, value, use, numbers[i].min,
                            numbers[i].max);
        *numbers[i].out *= numbers[i].unit;
        if (numbers[i].cap > 1) s->rank_count_count = count;
        return DDP_OK;
    }
    for (size_t i = 0; i < sizeof choices / sizeof choices[0] && value; i++) {
        if (strcmp(flag, choices[i].flag)) continue;
        int *k = choices[i].out;
        for (*k = 0; choices[i].names[*k]; ++*k)
            if (!strcmp(value, choices[i].names[*k])) return DDP_OK;
        return ddp_fail(DDP_ERR_INVALID, "%s %s: no such name; see --help", flag, value);
    }
    return ddp_fail(DDP_ERR_INVALID, "%s: unknown option, or its value is missing; see --help", flag);
}

static const char help[] = "usage: fits [OPTION VALUE]...\n"
                           "  --model NAME          gpt2 (default), t5-large, t5-3b\n"
                           "  --ranks N,N,...       numbers of GPUs (4)\n"
                           "  --memory GIB          of a GPU (16)\n"
                           "  --reserve MIB         of a GPU, for the driver and libraries (512)\n"
                           "  --workspace MIB       of a GPU, for NCCL (128)\n"
                           "  --dtype NAME          f32 (default), bf16: parameters and activations\n"
                           "  --optimizer NAME      adamw (default), sgd, momentum\n"
                           "  --tokens N            of a sample (1024)\n"
                           "  --unit-bytes N        activations of a block per sample (by --tokens)\n"
                           "  --boundary-bytes N    input of a block per sample (by --tokens)\n"
                           "  --output-bytes N      outputs per sample (by --tokens)\n"
                           "  --scale X             multiplies the activations of blocks (1)\n"
                           "  --fit N               chooses --scale: N samples fill one GPU";

int main(int argc, char **argv) {
    static model m;
    settings s = {.rank_count_count = 1, .rank_counts = {4}, .memory = 16 * GIB, .tokens = 1024, .scale = 1};
    s.reserve = 512 * MIB;
    s.workspace = 128 * MIB;
    ddp_result result = DDP_OK;
    if (argc > 1 && !strcmp(argv[1], "--help")) return puts(help) < 0;
    for (int i = 1; i < argc && result == DDP_OK; i += 2)
        result = read_option(&s, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
    if (result == DDP_OK) result = run(&m, &s);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

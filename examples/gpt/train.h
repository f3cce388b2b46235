/*  train.h - shared by all GPT trainers: flags, the plan of a run, text, batches, the report

    The parallel strategy is in the trainer itself: where parameters, gradients and optimizer state are
    stored, a training step, and checkpoints. Everything else is in a `run`, the first member of each trainer:

        parse_options      stores the flags; rank 0 reports invalid ones later
        run_start          rank 0 makes the plan and broadcasts it with the text
        run_build_model    allocates activations and batches
        (the trainer)      allocates parameters; for each step: loads sequences, computes, calls run_mean_loss
                           and run_report_step
        run_finish         writes the loss curve, prints the losses and a hash of the weights

    Only rank 0 reads files, writes files and prints. There are two exceptions. Checkpoints of ddp_fsdp are
    written by all ranks. Token shards are checked by rank 0; then each rank reads the sequences of its
    batches from them, so no rank holds all tokens. */
#ifndef DDP_EXAMPLE_TRAIN_H
#define DDP_EXAMPLE_TRAIN_H

#include "../../ddp_fsdp.h" /* ddp_optimizer, ddp_lr_at */
#include "curve.h"
#include "gpt.h"
#include "launcher.h"
#include "../extras/text.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef SAMPLE_BYTES
#define SAMPLE_BYTES 400
#endif
#ifndef VALIDATION_WINDOWS
#define VALIDATION_WINDOWS 128
#endif
#define SVG_PATH "loss.svg"
#define HASH_START UINT64_C(0xcbf29ce484222325)
#ifndef TRAIN_PROMISE /* the last line of --help */
#define TRAIN_PROMISE \
    "The same --batch and --micro-batch give the same weights on any number of ranks, bit for bit."
#endif
#ifndef TRAIN_RANKS /* for --help: the default of --ranks */
#define TRAIN_RANKS "one per core"
#endif
#ifndef TRAIN_MAX_RANKS /* limit over all machines; 0 = none */
#define TRAIN_MAX_RANKS 0
#endif
#define TRAIN_MAX_AXIS 65536 /* the largest size of a mesh dimension that a flag accepts */

//== options ================================================================================== >>options

/* Everything that determines the bits of a run. A checkpoint stores it, and a resumed run uses it. While
   flags are read, 0 means that a flag is not given; for seed and dropout -1 does. vocab: 0 = the text is
   bytes; otherwise the text is token shards with this vocabulary size. */
typedef struct run_config {
    int32_t layers, heads, channels, context, batch, micro_batch, steps, lr_decay_steps, vocab;
    int64_t seed;
    double lr, dropout;
} run_config;

typedef struct run_program run_program;

typedef struct run_options {
    const run_program *program;
    run_config config;
    int32_t ranks, threads_as_ranks, restarts, recompute, replicas, stages, chunks, micro_batches, tensor,
        sequence_parallel, help;
    const char *strategy, *checkpoint, *resume;
    const char **paths;
    int path_count;
    int round_robin;  /* 1 = micro-batch i belongs to rank i % world_size; 0 = each rank has a block */
    int reads_tokens; /* 1 = this program accepts token shards */
    /* only for train_gpt_cuda */
    int32_t offload, offload_params, memory_limit, no_graphs, profile;
    double loss_scale;
    const char *gpus, *schedule, *dtype, *order, *reduce_dtype, *tied_grads, *timeline, *gemm_table;
    const char *init, *write_random;
    const char *export_file;  /* only for train_gpt_fsdp */
    const char *offload_name; /* only for train_gpt_fsdp and train_gpt_pipeline */
    char wrong[512];          /* the error in the command line; "" = none */
} run_options;

typedef enum flag_kind { FLAG_SWITCH, FLAG_INT32, FLAG_INT64, FLAG_DOUBLE, FLAG_TEXT } flag_kind;
typedef enum flag_rule {
    NOT_SAVED,
    SAVED, /* stored in a checkpoint; the flag overrides it */
    FIXED  /* stored in a checkpoint; a flag with another value is an error */
} flag_rule;

typedef struct flag {
    const char *name;
    flag_kind kind;
    flag_rule rule;
    size_t offset; /* in run_options */
    double min, max;
    const char *help;
} flag;

struct run_program {
    const char *name, *purpose;
    const flag *flags;
    int flag_count;
};

#define AT(field) offsetof(run_options, field)
// clang-format off
#define TRAIN_FLAGS \
    {"--ranks", FLAG_INT32, NOT_SAVED, AT(ranks), 1, DDP_MAX_LOCAL_RANKS, \
     "N ranks to start; default: " TRAIN_RANKS}, \
    {"--threads-as-ranks", FLAG_SWITCH, NOT_SAVED, AT(threads_as_ranks), 0, 1, \
     "ranks are threads of one process"}, \
    {"--restarts", FLAG_INT32, NOT_SAVED, AT(restarts), 0, 1e6, \
     "N after a failure start all ranks again, at most N times"}, \
    {"--steps", FLAG_INT32, SAVED, AT(config.steps), 1, 1e9, \
     "N optimizer steps in total; default 500"}, \
    {"--batch", FLAG_INT32, FIXED, AT(config.batch), 1, 1e6, \
     "N sequences per step, over all ranks; default about 16"}, \
    {"--micro-batch", FLAG_INT32, FIXED, AT(config.micro_batch), 1, 1e6, \
     "N sequences per forward and backward pass; default 4"}, \
    {"--context", FLAG_INT32, FIXED, AT(config.context), 1, 65536, \
     "N tokens per sequence; default 128"}, \
    {"--layers", FLAG_INT32, FIXED, AT(config.layers), 1, 1000, "N transformer blocks; default 4"}, \
    {"--heads", FLAG_INT32, FIXED, AT(config.heads), 1, 1000, "N attention heads; default 4"}, \
    {"--channels", FLAG_INT32, FIXED, AT(config.channels), 1, 65536, \
     "N embedding size, a multiple of --heads; default 128"}, \
    {"--lr", FLAG_DOUBLE, SAVED, AT(config.lr), 1e-9, 10, "X highest learning rate; default 0.003"}, \
    {"--lr-decay-steps", FLAG_INT32, SAVED, AT(config.lr_decay_steps), 1, 1e9, \
     "N steps until the learning rate has decayed to a tenth of --lr, where it stays; default: --steps"}, \
    {"--seed", FLAG_INT64, FIXED, AT(config.seed), 0, 9e15, \
     "N seed of the initial weights and of the data order; default 1"}

#define DROPOUT_FLAG \
    {"--dropout", FLAG_DOUBLE, SAVED, AT(config.dropout), 0, 0.99, \
     "P probability of dropout in training, in the places of GPT-2; default 0"}

/* The end of the help of --resume. */
#define RESUMED_FLAGS \
    ";\n" \
    "                        flags not given, such as --steps and --lr-decay-steps, keep their values.\n" \
    "                        auto: from --checkpoint, if it exists; otherwise a new run"

/* pieces: "blocks", or "stages" where a stage is repeated as a whole. */
#define RECOMPUTE_FLAG(pieces) \
    {"--recompute", FLAG_SWITCH, NOT_SAVED, AT(recompute), 0, 1, \
     "activation checkpointing: store only the inputs of " pieces \
     ", and repeat their forward pass in backward"}
// clang-format on

static void print_help(const run_program *program) {
    printf("%s [flags] [files or folders]: %s\n", program->name, program->purpose);
    for (int i = 0; i < program->flag_count; i++) {
        const flag *f = &program->flags[i];
        char left[64];
        int metavar = f->kind == FLAG_SWITCH ? 0 : (int)strcspn(f->help, " ");
        snprintf(left, sizeof left, "%s %.*s", f->name, metavar, f->help);
        printf("  %-22s%s\n", left, f->help + metavar + (metavar > 0));
    }
    printf("%s\n", TRAIN_PROMISE);
}

static void flag_set(const flag *f, run_options *o, const char *value) {
    char *end = NULL, *target = (char *)o + f->offset;
    double number;
    if (f->kind == FLAG_TEXT) {
        memcpy(target, &value, sizeof value);
        if (!value[0])
            snprintf(o->wrong, sizeof o->wrong, "%s needs a value; --help lists the flags", f->name);
        return;
    }
    errno = 0;
    number = f->kind == FLAG_DOUBLE ? strtod(value, &end) : (double)strtoll(value, &end, 10);
    if (end == value || *end || errno || !(number >= f->min && number <= f->max)) {
        snprintf(o->wrong, sizeof o->wrong, "%s %.60s: give %s from %.15g to %.15g", f->name, value,
                 f->kind == FLAG_DOUBLE ? "a number" : "an integer", f->min, f->max);
        return;
    }
    if (f->kind == FLAG_DOUBLE)
        memcpy(target, &number, sizeof number);
    else if (f->kind == FLAG_INT64) {
        int64_t wide = (int64_t)number;
        memcpy(target, &wide, sizeof wide);
    } else {
        int32_t narrow = (int32_t)number;
        memcpy(target, &narrow, sizeof narrow);
    }
}

/* Fills *o. An error is stored in o->wrong, so that under any launcher only rank 0 prints it. */
static void parse_options(const run_program *program, int argc, char **argv, run_options *o) {
    memset(o, 0, sizeof *o);
    o->program = program;
    o->config.seed = -1;
    o->config.dropout = -1;
    o->paths = (const char **)calloc((size_t)argc + 1, sizeof *o->paths);
    if (!o->paths) snprintf(o->wrong, sizeof o->wrong, "no memory for %d arguments", argc);
    for (int i = 1; i < argc && !o->wrong[0]; i++) {
        const char *value = strchr(argv[i], '=');
        size_t length = value ? (size_t)(value - argv[i]) : strlen(argv[i]);
        const flag *f = NULL;
        if (argv[i][0] != '-') {
            o->paths[o->path_count++] = argv[i];
            continue;
        }
        for (int j = 0; j < program->flag_count; j++)
            if (strlen(program->flags[j].name) == length && !strncmp(argv[i], program->flags[j].name, length))
                f = &program->flags[j];
        if (!f)
            snprintf(o->wrong, sizeof o->wrong, "unknown flag %.60s; --help lists the flags", argv[i]);
        else if (f->kind == FLAG_SWITCH && value)
            snprintf(o->wrong, sizeof o->wrong, "%s takes no value", f->name);
        else if (f->kind == FLAG_SWITCH) {
            int32_t on = 1;
            memcpy((char *)o + f->offset, &on, sizeof on);
        } else if (!value && i + 1 == argc)
            snprintf(o->wrong, sizeof o->wrong, "%s needs a value; --help lists the flags", f->name);
        else
            flag_set(f, o, value ? value + 1 : argv[++i]);
    }
}

//== plan ======================================================================================== >>plan

/* FNV-1a. The first call starts from HASH_START. */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t size_bytes) {
    const uint8_t *byte = (const uint8_t *)data;
    for (size_t i = 0; i < size_bytes; i++) hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Rank 0 makes the plan and broadcasts it. */
typedef struct run_plan {
    run_config config;
    ddp_sampler_state data; /* with --resume: the position of the sampler */
    int64_t first_step;     /* with --resume: steps completed by the checkpoint; otherwise 0 */
    int64_t text_tokens;    /* a token is a byte, except in token shards */
    int64_t train_tokens;   /* tokens [0, train_tokens) are for training, the others for validation */
    uint64_t text_hash;
    double entropy; /* nats per token */
} run_plan;

/* The part of a checkpoint that is not tensors. */
typedef struct run_saved {
    run_config config;
    ddp_sampler_state data;
    uint64_t text_hash;
    int64_t step;
} run_saved;

static double flag_value(const flag *f, const void *at) {
    int32_t narrow;
    int64_t wide;
    double number;
    if (f->kind == FLAG_INT32) {
        memcpy(&narrow, at, sizeof narrow);
        return narrow;
    }
    if (f->kind == FLAG_INT64) {
        memcpy(&wide, at, sizeof wide);
        return (double)wide;
    }
    memcpy(&number, at, sizeof number);
    return number;
}

/* Fills in from the checkpoint every flag that is not given. A FIXED flag that differs is an error. */
static ddp_result config_merge(const run_program *program, run_config *config, const run_config *saved,
                               const char *path) {
    for (int i = 0; i < program->flag_count; i++) {
        const flag *f = &program->flags[i];
        size_t offset = f->offset - AT(config);
        double given, stored;
        if (f->rule == NOT_SAVED) continue;
        given = flag_value(f, (const char *)config + offset);
        stored = flag_value(f, (const char *)saved + offset);
        if (given == (f->min > 0 ? 0 : -1))
            memcpy((char *)config + offset, (const char *)saved + offset,
                   f->kind == FLAG_INT32 ? sizeof(int32_t) : sizeof(int64_t));
        else if (f->rule == FIXED && given != stored)
            return ddp_fail(
                DDP_ERR_INVALID,
                "%s was trained with %s %.15g, not %.15g; leave %s out, or resume from another checkpoint",
                path, f->name, stored, given, f->name);
    }
    if (config->dropout < 0 && saved->dropout > 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "%s was trained with --dropout %g, which %s does not have; continue with the program "
                        "that wrote it",
                        path, saved->dropout, program->name);
    return DDP_OK;
}

static int is_power_of_two(int64_t number) { return number > 0 && (number & (number - 1)) == 0; }

/* Returns whether a batch splits into micro-batches of all ranks, so that gradients are added in the same
   binary tree on any number of ranks. For this each rank needs a block of 2^k micro-batches; with round_robin
   the number of ranks is 2^k, or each rank has one micro-batch. */
static int batch_splits(int64_t batch, int64_t micro_batch, int64_t ranks, int round_robin) {
    int64_t share = batch / (micro_batch * ranks);
    if (share < 1 || batch % (micro_batch * ranks)) return 0;
    return ranks == 1 || share == 1 || is_power_of_two(round_robin ? ranks : share);
}

/* Fills in defaults, and checks that channels and batch can be divided. */
static ddp_result config_resolve(run_config *c, int ranks, int round_robin) {
    if (!c->layers) c->layers = 4;
    if (!c->heads) c->heads = 4;
    if (!c->channels) c->channels = 128;
    if (!c->context) c->context = 128;
    if (!c->micro_batch) c->micro_batch = 4;
    if (!c->steps) c->steps = 500;
    if (c->seed < 0) c->seed = 1;
    if (c->lr == 0) c->lr = 3e-3;
    if (c->dropout < 0) c->dropout = 0;
    if (!c->lr_decay_steps) c->lr_decay_steps = c->steps;
    if (!c->batch) {
        c->batch = c->micro_batch * ranks;
        while (c->batch * 3 / 2 < 16 && batch_splits(c->batch * 2, c->micro_batch, ranks, round_robin))
            c->batch *= 2;
    }
    if (c->channels % c->heads) {
        int below = c->channels / c->heads * c->heads, above = below + c->heads;
        return ddp_fail(DDP_ERR_INVALID, "--channels %d is not divisible by --heads %d; use --channels %d",
                        c->channels, c->heads,
                        below > 0 && c->channels - below <= above - c->channels ? below : above);
    }
    if (!batch_splits(c->batch, c->micro_batch, ranks, round_robin)) {
        int64_t unit = (int64_t)c->micro_batch * ranks, below = unit, above = unit; /* batches that split */
        int only_one = round_robin && !is_power_of_two(ranks), any_count = round_robin || ranks == 1;
        const char *parts = "1, 2, 4, 8 ... micro-batches";
        if (any_count) parts = "micro-batches";
        if (only_one) parts = "one micro-batch";
        while (above < c->batch && !only_one) {
            below = above;
            above = any_count ? above + unit : above * 2;
        }
        return ddp_fail(DDP_ERR_INVALID,
                        "--batch %d does not split into %s of %d on each of %d ranks; use --batch %lld",
                        c->batch, parts, c->micro_batch, ranks,
                        (long long)(c->batch - below <= above - c->batch ? below : above));
    }
    return DDP_OK;
}

/* Checks at the start whether the file can be written at the end, and leaves it unchanged. */
static ddp_result check_writable(const char *path) {
    char temporary[4096];
    struct stat info;
    int existed, fd;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (!path[0] || (stat(path, &info) == 0 && !S_ISREG(info.st_mode)))
        return ddp_fail(DDP_ERR_INVALID,
                        "%s cannot be written: it is not a regular file; remove it or choose another path",
                        path);
    existed = stat(temporary, &info) == 0;
    fd = open(temporary, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return ddp_fail(DDP_ERR_INVALID, "%s cannot be written: %s; choose another path", path,
                        strerror(errno));
    close(fd);
    if (!existed) unlink(temporary);
    return DDP_OK;
}

/* Rank 0: checks the flags that do not depend on other input. */
static ddp_result check_options(const run_options *o, int ranks) {
    if (o->wrong[0]) return ddp_fail(DDP_ERR_INVALID, "%s", o->wrong);
    if (o->ranks && o->ranks != ranks)
        return ddp_fail(DDP_ERR_INVALID, "--ranks %d, but the launcher started %d; leave --ranks out",
                        o->ranks, ranks);
    if (TRAIN_MAX_RANKS && ranks > TRAIN_MAX_RANKS)
        return ddp_fail(DDP_ERR_INVALID,
                        "the launcher started %d ranks, but this program runs on at most %d; start fewer",
                        ranks, TRAIN_MAX_RANKS);
    return check_writable(SVG_PATH);
}

/* The name of a token in messages, the size of the vocabulary, and the bytes of a token in the text. */
static const char *plan_token(const run_plan *p) { return p->config.vocab ? "token" : "byte"; }
static int plan_vocab(const run_plan *p) { return p->config.vocab ? p->config.vocab : 256; }
static int plan_token_bytes(const run_plan *p) { return p->config.vocab ? 2 : 1; }

/* The estimated cost of a unit of the model, relative to a block. */
static inline double unit_cost(const run_plan *p, int unit) {
    if (unit == 0) return 0.05; /* embedding */
    if (unit <= p->config.layers) return 1;
    return plan_vocab(p) / (12.0 * p->config.channels); /* head */
}

/* Opens the text: token shards if the paths are such, otherwise bytes. */
static ddp_result plan_text(run_plan *p, const run_options *o, const run_saved *saved, text_buffer *t) {
    p->config.vocab = 0;
    if (o->reads_tokens) DDP_TRY(text_open_shards(t, o->paths, o->path_count));
    if (t->shards.count) p->config.vocab = TEXT_SHARD_VOCAB;
    if (saved && saved->config.vocab != p->config.vocab)
        return ddp_fail(DDP_ERR_INVALID, "%s was trained on %s, but the input is %s; %s", o->resume,
                        saved->config.vocab ? "token shards" : "bytes",
                        p->config.vocab ? "a token shard" : "text",
                        o->reads_tokens ? "give the same files" : "use train_gpt_cuda");
    return p->config.vocab ? DDP_OK : text_load(t, o->paths, o->path_count);
}

/* Reads the text once, piece by piece. Computes its hash, checks that every token is below the vocabulary
   size, and computes the unigram entropy: the loss of a model that predicts each token by its frequency. */
static ddp_result plan_scan(run_plan *p, const text_buffer *t) {
    uint16_t piece[32768];
    int size = plan_token_bytes(p), vocab = plan_vocab(p);
    int64_t *count = (int64_t *)calloc((size_t)vocab, sizeof *count);
    ddp_result result = count ? DDP_OK : ddp_fail(DDP_ERR_NO_MEMORY, "no memory for %d counts", vocab);
    size_t n = 0;
    p->text_hash = HASH_START;
    for (int64_t at = 0; result == DDP_OK && at < t->count; at += (int64_t)n) {
        n = t->count - at < (int64_t)sizeof piece ? (size_t)(t->count - at) : sizeof piece;
        result = text_read(t, at, n, piece);
        if (result == DDP_OK) p->text_hash = hash_bytes(p->text_hash, piece, n);
        for (size_t i = 0; result == DDP_OK && i < n / (size_t)size; i++) {
            int token = size == 2 ? piece[i] : ((const uint8_t *)piece)[i];
            if (token >= vocab)
                result = text_bad_token(t, at + 2 * (int64_t)i, token, vocab);
            else
                count[token]++;
        }
    }
    for (int i = 0; result == DDP_OK && i < vocab; i++)
        if (count[i])
            p->entropy -= (double)count[i] / (double)p->text_tokens
                          * log((double)count[i] / (double)p->text_tokens);
    free(count);
    return result;
}

/* Rank 0: makes the plan and checks the remaining input before any file is written. saved: from the
   checkpoint of --resume, or NULL. */
static ddp_result make_plan(run_plan *p, const run_options *o, int ranks, const run_saved *saved,
                            text_buffer *t) {
    int64_t window, validation;
    memset(p, 0, sizeof *p);
    p->config = o->config;
    if (saved) {
        DDP_TRY(config_merge(o->program, &p->config, &saved->config, o->resume));
        p->data = saved->data;
        p->first_step = saved->step;
    }
    DDP_TRY(config_resolve(&p->config, ranks, o->round_robin));
    if (p->first_step > p->config.steps)
        return ddp_fail(DDP_ERR_INVALID, "%s was saved after step %lld; use --steps %lld or more", o->resume,
                        (long long)p->first_step, (long long)p->first_step);
    DDP_TRY(plan_text(p, o, saved, t));
    window = p->config.context + 1;
    p->text_tokens = t->count / plan_token_bytes(p);
    validation = p->text_tokens / 10 > window ? p->text_tokens / 10 : window;
    if (p->text_tokens < 2 * window)
        return ddp_fail(
            DDP_ERR_INVALID,
            "the text has %lld %ss, but training and validation need %lld each with --context %d; "
            "give more text or use a shorter --context",
            (long long)p->text_tokens, plan_token(p), (long long)window, p->config.context);
    p->train_tokens = p->text_tokens - validation;
    DDP_TRY(plan_scan(p, t));
    if (saved && p->text_hash != saved->text_hash)
        return ddp_fail(DDP_ERR_INVALID, "%s was trained on other text; give the same files", o->resume);
    return DDP_OK;
}

//== report ==================================================================================== >>report

/* Progress of the run, for rank 0. Each point of the training curve is a mean over `every` steps, so that it
   has at most CURVE_POINTS. */
typedef struct run_report {
    curve training, validation;
    int every;           /* steps per point of the training curve */
    int pending;         /* steps since the last point */
    double pending_loss; /* sum of their losses */
    double start, shown; /* times of the start and of the last progress line */
    int terminal;        /* 1 = stdout is a terminal */
} run_report;

static void report_start(run_report *r, const run_plan *p) {
    memset(r, 0, sizeof *r);
    r->every = (p->config.steps + CURVE_POINTS - 1) / CURVE_POINTS;
    r->terminal = isatty(STDOUT_FILENO);
    r->start = ddp_now();
}

static void report_loss(run_report *r, int64_t step, double loss) {
    r->pending_loss += loss;
    if (++r->pending < r->every) return;
    curve_add(&r->training, (double)step - (r->pending - 1) / 2.0, r->pending_loss / r->pending);
    r->pending = 0;
    r->pending_loss = 0;
}

/* On a terminal: overwrites the progress line, at most ten times a second. Otherwise prints a line for each
   twentieth of the run. */
static void report_progress(run_report *r, const run_plan *p, int64_t step, double loss, double norm,
                            double tokens_per_second) {
    double now = ddp_now();
    double left = (now - r->start) / (double)(step - p->first_step) * (double)(p->config.steps - step);
    int64_t interval = p->config.steps / 20 > 1 ? p->config.steps / 20 : 1;
    int due = r->terminal ? now - r->shown >= 0.1 : step % interval == 0;
    if (!due && step < p->config.steps) return;
    r->shown = now;
    printf("%sstep %4lld/%d   loss %.4f   %.0f tokens/s   gradient norm %.4g   ETA %d:%02d%s",
           r->terminal ? "\r" : "", (long long)step, p->config.steps, loss, tokens_per_second, norm,
           (int)(left + 0.5) / 60, (int)(left + 0.5) % 60, r->terminal ? "\033[K" : "\n");
    fflush(stdout);
}

static void report_validation(run_report *r, const run_plan *p, int64_t step, double loss) {
    curve_add(&r->validation, (double)step, loss);
    printf("%sstep %4lld/%d   validation loss %.4f   (unigram entropy %.4f)\n", r->terminal ? "\r\033[K" : "",
           (long long)step, p->config.steps, loss, p->entropy);
    fflush(stdout);
}

static ddp_result draw_curve(const run_report *r, const run_plan *p) {
    const run_config *c = &p->config;
    char title[128];
    snprintf(title, sizeof title, "%d layers, %d channels, context %d, batch %d, learning rate %.4g",
             c->layers, c->channels, c->context, c->batch, c->lr);
    return curve_draw(SVG_PATH, title, (double)p->first_step, c->steps, &r->training, &r->validation,
                      p->entropy);
}

//== run ========================================================================================== >>run

/* The state of a rank that does not depend on the strategy. The first member of every trainer. */
typedef struct run {
    const run_options *options; /* = &own */
    run_options own;
    ddp_group *world;
    int rank, world_size;
    run_plan plan;
    ddp_lr_desc lr; /* for ddp_lr_at */
    text_buffer text;
    gpt_model model;         /* owns the activations; the trainer sets the pointers to values and gradients */
    gpt_param *infos;        /* model.param_count */
    int64_t parameter_count; /* elements of all values; a tied value counts once */
    ddp_sampler sampler;
    uint64_t epoch;
    int micro_count;       /* micro-batches of this rank in a step */
    int *tokens, *targets; /* (micro_batch, context) */
    uint64_t *keys;        /* micro_batch: for gpt_pass.keys */
    /* One per micro-batch of all ranks, in the order of the global batch. Those of other ranks are 0. */
    double *losses;
    double train_seconds;
    void *gathered;    /* the result of the last run_gather */
    run_report report; /* rank 0 */
} run;

/* Broadcasts rank 0's result and error text, so that all ranks stop together. Collective. */
static ddp_result broadcast_result(ddp_group *world, ddp_result result) {
    char sentence[512] = "";
    int32_t code = result;
    if (result != DDP_OK) snprintf(sentence, sizeof sentence, "%s", ddp_last_error());
    DDP_TRY(ddp_broadcast(world, &code, 1, DDP_I32, 0, NULL));
    if (code == DDP_OK) return DDP_OK;
    DDP_TRY(ddp_broadcast(world, sentence, sizeof sentence, DDP_U8, 0, NULL));
    ddp_barrier(world); /* every rank has the error before one exits */
    return ddp_fail((ddp_result)code, "%s", sentence);
}

/* All-gathers `mine` of all ranks into r->gathered, which is valid until the next call. Collective. */
static ddp_result run_gather(run *r, const void *mine, size_t size_bytes) {
    void *all = realloc(r->gathered, (size_t)r->world_size * size_bytes);
    if (!all)
        return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for %zu bytes of each of %d ranks", size_bytes,
                        r->world_size);
    r->gathered = all;
    return ddp_all_gather(r->world, mine, all, size_bytes, DDP_U8, NULL);
}

typedef struct shards_found {
    int64_t tokens;
    uint64_t hash;
    char wrong[240];
} shards_found;

/* Hashes the sizes of the shards, and the first and last tokens of each: enough to find other files. */
static ddp_result run_sample_shards(const run *r, uint64_t *hash) {
    const text_buffer *t = &r->text;
    uint8_t piece[4096];
    *hash = hash_bytes(HASH_START, t->first, ((size_t)t->shards.count + 1) * sizeof *t->first);
    for (int i = 0; i < t->shards.count; i++) {
        int64_t all = t->first[i + 1] - t->first[i],
                n = all < (int64_t)sizeof piece ? all : (int64_t)sizeof piece;
        DDP_TRY(text_read(t, t->first[i], (size_t)n, piece));
        *hash = hash_bytes(*hash, piece, (size_t)n);
        DDP_TRY(text_read(t, t->first[i + 1] - n, (size_t)n, piece));
        *hash = hash_bytes(*hash, piece, (size_t)n);
    }
    return DDP_OK;
}

/* Opens the token shards on every rank, and compares them with those of rank 0. Collective. */
static ddp_result run_open_shards(run *r) {
    ddp_result result = DDP_OK;
    const shards_found *found;
    shards_found mine;
    memset(&mine, 0, sizeof mine);
    if (r->rank != 0)
        result = text_open_shards(&r->text, r->options->paths,
                                  r->options->path_count); /* plan_text opened them on rank 0 */
    if (result == DDP_OK && r->text.count) result = run_sample_shards(r, &mine.hash);
    if (result != DDP_OK) snprintf(mine.wrong, sizeof mine.wrong, "%.239s", ddp_last_error());
    mine.tokens = r->text.count / 2;
    DDP_TRY(run_gather(r, &mine, sizeof mine));
    found = (const shards_found *)r->gathered;
    for (int i = 0; i < r->world_size; i++) {
        if (found[i].wrong[0]) return ddp_fail(DDP_ERR_INVALID, "rank %d: %s", i, found[i].wrong);
        if (found[i].tokens != r->plan.text_tokens)
            return ddp_fail(
                DDP_ERR_INVALID,
                "rank %d has token shards of %lld tokens, but rank 0 of %lld; give the same shards at "
                "the same path on every machine",
                i, (long long)found[i].tokens, (long long)r->plan.text_tokens);
        if (found[i].hash != found[0].hash)
            return ddp_fail(
                DDP_ERR_INVALID,
                "rank %d has other tokens in its shards than rank 0; give the same shards at the same "
                "path on every machine",
                i);
    }
    return DDP_OK;
}

/* Warm-up over a tenth of lr_decay_steps, at most 100 steps, then a cosine down to a tenth of lr. */
static ddp_lr_desc run_lr_desc(const run_config *c) {
    ddp_lr_desc lr = DDP_ZERO;
    lr.kind = DDP_LR_COSINE;
    lr.max_lr = c->lr;
    lr.min_lr = c->lr / 10;
    lr.total_steps = c->lr_decay_steps;
    lr.warmup_steps = c->lr_decay_steps / 10 < 100 ? c->lr_decay_steps / 10 : 100;
    return lr;
}

/* Broadcasts the plan and the text of rank 0, or its error. planned: the result of rank 0's plan.
   Collective. */
static ddp_result run_start(run *r, ddp_result planned) {
    DDP_TRY(broadcast_result(r->world, planned));
    DDP_TRY(ddp_broadcast(r->world, &r->plan, sizeof r->plan, DDP_U8, 0, NULL));
    r->lr = run_lr_desc(&r->plan.config);
    if (r->plan.config.vocab) return run_open_shards(r);
    if (r->rank != 0) {
        r->text.count = r->text.capacity = r->plan.text_tokens;
        r->text.bytes = (uint8_t *)malloc((size_t)r->text.count);
        if (!r->text.bytes)
            return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for a text of %lld bytes; give fewer files",
                            (long long)r->text.count);
    }
    return ddp_broadcast(r->world, r->text.bytes, (size_t)r->text.count, DDP_U8, 0, NULL);
}

/* Micro-batches of a validation: they cover the validation text once, with about VALIDATION_WINDOWS sequences
   at most. */
static int64_t validation_micro_batches(const run_plan *p) {
    int64_t windows = (p->text_tokens - p->train_tokens) / (p->config.context + 1);
    if (windows > VALIDATION_WINDOWS) windows = VALIDATION_WINDOWS;
    return (windows + p->config.micro_batch - 1) / p->config.micro_batch;
}

static gpt_config run_model_config(const run *r) {
    const run_config *c = &r->plan.config;
    gpt_config config;
    config.vocab = plan_vocab(&r->plan);
    config.context = c->context;
    config.layers = c->layers;
    config.heads = c->heads;
    config.channels = c->channels;
    return config;
}

static ddp_result run_out_of_memory(void) {
    return ddp_fail(
        DDP_ERR_NO_MEMORY,
        "no memory for the model; use a smaller --channels, --layers, --context or --micro-batch");
}

/* Allocates the list of parameters, a micro-batch of tokens, and the losses. */
static ddp_result run_build_arrays(run *r) {
    const run_config *c = &r->plan.config;
    int64_t tokens = (int64_t)c->micro_batch * c->context, losses = c->batch / c->micro_batch,
            validation = validation_micro_batches(&r->plan);
    gpt_config config = run_model_config(r);
    int count = gpt_param_count(&config);
    r->micro_count = (int)losses / r->world_size;
    if (losses < validation) losses = validation;
    if (tokens > INT32_MAX / 4 / c->channels) return run_out_of_memory();
    r->infos = (gpt_param *)calloc((size_t)count, sizeof *r->infos);
    r->tokens = (int *)calloc((size_t)tokens, sizeof *r->tokens);
    r->targets = (int *)calloc((size_t)tokens, sizeof *r->targets);
    r->keys = (uint64_t *)calloc((size_t)c->micro_batch, sizeof *r->keys);
    r->losses = (double *)calloc((size_t)losses, sizeof *r->losses);
    if (!r->infos || !r->tokens || !r->targets || !r->keys || !r->losses) return run_out_of_memory();
    for (int i = 0; i < count; i++) {
        gpt_param_info(&config, i, &r->infos[i]);
        if (r->infos[i].tied_to < 0) r->parameter_count += r->infos[i].count;
    }
    return DDP_OK;
}

/* The elements of the largest parameter. */
static inline size_t run_largest_param(const run *r) {
    gpt_config config = run_model_config(r);
    int64_t largest = 0;
    for (int i = 0; i < gpt_param_count(&config); i++)
        if (r->infos[i].count > largest) largest = r->infos[i].count;
    return (size_t)largest;
}

/* Calls run_build_arrays, and allocates the activations. own: GPT_OWN_VALUES or 0. */
static inline ddp_result run_build_model(run *r, int own) {
    gpt_config config = run_model_config(r);
    DDP_TRY(run_build_arrays(r));
    if (gpt_model_create(&r->model, &config, r->plan.config.micro_batch,
                         own | (r->options->recompute ? GPT_RECOMPUTE : 0))
        != 0)
        return run_out_of_memory();
    r->model.clock = ddp_now;
    r->model.dropout = (float)r->plan.config.dropout;
    r->model.keys = r->keys;
    return DDP_OK;
}

/* Describes a parameter to the library, without value.data. */
static void run_describe(const run *r, int index, ddp_param *param) {
    param->name = r->infos[index].name;
    param->value.dtype = DDP_F32;
    param->value.ndim = r->infos[index].ndim;
    for (int k = 0; k < param->value.ndim; k++) param->value.shape[k] = r->infos[index].shape[k];
}

/* The sampler of one of `replicas` blocks of each global batch. A sample is a start of a sequence in the
   text. The global batches are the same for any number of replicas. */
static ddp_sampler_desc run_sampler_desc(const run *r, int replicas, int replica) {
    ddp_sampler_desc sampler = DDP_ZERO;
    sampler.dataset_size = r->plan.train_tokens - r->plan.config.context;
    sampler.num_replicas = replicas;
    sampler.rank = replica;
    sampler.seed = (uint64_t)r->plan.config.seed;
    sampler.shuffle = DDP_SHUFFLE_HASHED;
    sampler.global_batch = r->plan.config.batch;
    return sampler;
}

static ddp_result run_build_sampler(run *r, int replicas, int replica) {
    ddp_sampler_desc sampler = run_sampler_desc(r, replicas, replica);
    DDP_TRY(ddp_sampler_init(&r->sampler, &sampler));
    r->epoch = r->plan.data.epoch;
    return r->plan.first_step > 0 ? ddp_sampler_load(&r->sampler, &r->plan.data) : DDP_OK;
}

static void run_free(run *r) {
    ddp_sampler_free(&r->sampler);
    gpt_model_destroy(&r->model);
    text_free(&r->text);
    free(r->infos);
    free(r->tokens);
    free(r->targets);
    free(r->keys);
    free(r->losses);
    free(r->gathered);
}

/* Reads tokens [at, at + count) of the text. */
static ddp_result run_tokens(const run *r, int64_t at, int count, int *out) {
    /* 16-bit tokens are read into the second half of out, then converted to int from its beginning */
    uint8_t *narrow = (uint8_t *)(out + count) - 2 * (ptrdiff_t)count;
    if (!r->plan.config.vocab) {
        for (int i = 0; i < count; i++) out[i] = r->text.bytes[at + i];
        return DDP_OK;
    }
    DDP_TRY(text_read(&r->text, 2 * at, 2 * (size_t)count, narrow));
    for (int i = 0; i < count; i++) {
        uint16_t token;
        memcpy(&token, narrow + 2 * i, 2);
        if (token >= r->plan.config.vocab)
            return text_bad_token(&r->text, 2 * (at + i), token, r->plan.config.vocab);
        out[i] = token;
    }
    return DDP_OK;
}

/* Loads sequence `row` of the micro-batch: context tokens from `start`, and the next token of each as
   target. The random numbers of dropout depend on the sequence and the epoch, which is the same for the whole
   global batch: an epoch is padded to full ones. */
static ddp_result load_sequence(run *r, int row, int64_t start) {
    enum { DROPOUT_STREAM = 0 };
    int context = r->plan.config.context;
    r->keys[row] = ddp_seed((uint64_t)r->plan.config.seed, r->epoch, start, DROPOUT_STREAM);
    DDP_TRY(run_tokens(r, start, context, r->tokens + row * context));
    return run_tokens(r, start + 1, context, r->targets + row * context);
}

/* The start of the next sequence. At the end of an epoch the next one begins. */
static inline int64_t next_sequence(run *r) {
    int64_t start = ddp_sampler_next(&r->sampler, NULL);
    if (start >= 0) return start;
    r->epoch++;
    ddp_sampler_set_epoch(&r->sampler, r->epoch);
    return ddp_sampler_next(&r->sampler, NULL);
}

/* Loads micro-batch `index` of validation_micro_batches: sequences at equal distances in the validation
   text. */
static ddp_result load_validation_batch(run *r, int64_t index) {
    const run_config *c = &r->plan.config;
    int64_t count = validation_micro_batches(&r->plan) * c->micro_batch;
    int64_t last_start = r->plan.text_tokens - r->plan.train_tokens - c->context - 1;
    for (int row = 0; row < c->micro_batch; row++) {
        int64_t start = count > 1 ? last_start * (index * c->micro_batch + row) / (count - 1) : 0;
        DDP_TRY(load_sequence(r, row, r->plan.train_tokens + start));
    }
    return DDP_OK;
}

/* The mean of the first `count` losses of all ranks. They are added in the order of the global batch, so the
   bits do not depend on the number of ranks. Collective. */
static ddp_result run_mean_loss(run *r, int64_t count, double *mean) {
    double sum = 0;
    DDP_TRY(ddp_all_reduce(r->world, r->losses, r->losses, (size_t)count, DDP_F64, DDP_OP_SUM, NULL));
    for (int64_t i = 0; i < count; i++) sum += r->losses[i];
    memset(r->losses, 0, (size_t)count * sizeof *r->losses);
    *mean = sum / (double)count;
    return DDP_OK;
}

static double tokens_per_second(const run *r, int64_t step) {
    double tokens = (double)(step - r->plan.first_step) * r->plan.config.batch * r->plan.config.context;
    return r->train_seconds > 0 ? tokens / r->train_seconds : 0;
}

static ddp_result run_check_step(int64_t step, double loss, float norm) {
    if (isfinite(loss) && isfinite(norm)) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID, "the loss is not finite at step %lld; use a smaller --lr",
                    (long long)step);
}

static void run_report_start(run *r) {
    const char *threads = r->options->threads_as_ranks ? " as threads" : "";
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (r->rank != 0) return;
    report_start(&r->report, &r->plan);
    printf("%lld parameters, %lld %ss of text, %d %s%s\n", (long long)r->parameter_count,
           (long long)r->plan.text_tokens, plan_token(&r->plan), r->world_size,
           r->world_size == 1 ? "rank" : "ranks", threads);
    if (ddp_local_world_size(r->world) > cores)
        printf("%d ranks share %ld cores: they compute in turns, so times are those of %ld cores\n",
               ddp_local_world_size(r->world), cores, cores);
    if (r->plan.first_step > 0)
        printf("%s continues after step %lld\n", r->options->resume, (long long)r->plan.first_step);
}

static void run_report_step(run *r, int64_t step, double loss, float norm) {
    if (r->rank != 0) return;
    report_loss(&r->report, step, loss);
    report_progress(&r->report, &r->plan, step, loss, norm, tokens_per_second(r, step));
}

static int is_validation_step(const run *r, int64_t step) {
    int64_t steps = r->plan.config.steps, interval = steps / 10 > 1 ? steps / 10 : 1;
    return step % interval == 0 || step == steps;
}

//== end of the run =============================================================================== >>end

/* The prompt of the sample: the first *prompt tokens of the validation text. */
static ddp_result sample_prompt(const run *r, int *tokens, int *prompt) {
    *prompt = r->plan.config.context < 32 ? r->plan.config.context : 32;
    return run_tokens(r, r->plan.train_tokens, *prompt, tokens);
}

/* Prints bytes as text, other tokens as numbers. */
static void print_sample(const run_plan *p, const int *tokens, int prompt) {
    printf("\n--- %d %ss of the validation text, continued by the model ---\n", prompt, plan_token(p));
    for (int i = 0; i < prompt + SAMPLE_BYTES; i++)
        if (p->config.vocab)
            printf("%d%c", tokens[i], i % 20 == 19 ? '\n' : ' ');
        else
            putchar(tokens[i] == '\n' || (tokens[i] >= ' ' && tokens[i] < 127) ? tokens[i] : '?');
    printf("\n---\n");
}

/* Rank 0: the memory of activations and the time of a step, with and without --recompute. */
static inline void run_print_recompute(const run *r) {
    gpt_block_acts acts;
    struct rusage usage;
    double steps = (double)(r->plan.config.steps - r->plan.first_step);
    double ms = r->train_seconds / steps * 1e3, recompute_ms = r->model.recompute_seconds / steps * 1e3;
    double block = (double)gpt_block_acts_place(&r->model.config, r->model.batch, r->model.config.context,
                                                NULL, &acts)
                   * sizeof(float) / 1048576;
    double blocks = block * r->model.config.layers;
    if (steps <= 0 || getrusage(RUSAGE_SELF, &usage) != 0) return;
    printf("  --recompute       activations of all blocks   time per step\n");
    if (r->model.recompute) {
        printf("  no                %21.2f MiB   %10.2f ms, without the repeated forward passes\n", blocks,
               ms - recompute_ms);
        printf("  yes (this run)    %21.2f MiB   %10.2f ms\n", block, ms);
    } else {
        printf("  no (this run)     %21.2f MiB   %10.2f ms\n", blocks, ms);
        printf("  yes               %21.2f MiB\n", block);
    }
    printf("  peak resident memory of this process: %.1f MiB\n\n", (double)usage.ru_maxrss / 1024);
}

/* Writes the loss curve, prints the losses, and compares the hashes of the weights of all ranks.
   Collective. */
static ddp_result run_finish(run *r, double validation, uint64_t hash) {
    const uint64_t *hashes;
    ddp_result result = DDP_OK;
    DDP_TRY(run_gather(r, &hash, sizeof hash));
    hashes = (const uint64_t *)r->gathered;
    for (int i = 1; i < r->world_size; i++)
        if (hashes[i] != hashes[0])
            return ddp_fail(
                DDP_ERR_CORRUPT,
                "rank %d ends with other weights than rank 0: use the same build on machines of one type", i);
    if (r->rank == 0) result = draw_curve(&r->report, &r->plan);
    DDP_TRY(broadcast_result(r->world, result));
    if (r->rank == 0) {
        printf("%s: the loss curve\n", SVG_PATH);
        printf("unigram entropy: %.4f nats per %s\n", r->plan.entropy, plan_token(&r->plan));
        printf("validation loss: %.4f nats per %s\n", validation, plan_token(&r->plan));
        printf("weights hash: %016llx\n", (unsigned long long)hashes[0]);
    }
    return DDP_OK;
}

typedef struct job {
    run_options options;
    int ranks; /* ranks to start without --ranks; 0 = one per core */
    int quiet; /* 1 = a launcher started this process, and it is not rank 0 */
} job;

/* --resume auto: continues from --checkpoint if it is there. Rank 0 decides. Collective. */
static ddp_result run_find_checkpoint(run *r) {
    char state[4096];
    struct stat info;
    int32_t exists = 0;
    if (!r->own.resume || strcmp(r->own.resume, "auto")) return DDP_OK;
    if (!r->own.checkpoint)
        return ddp_fail(DDP_ERR_INVALID, "--resume auto: set --checkpoint, from which the run continues");
    snprintf(state, sizeof state, "%s/state.json", r->own.checkpoint);
    if (r->rank == 0)
        exists = access(state, F_OK) == 0 || (stat(r->own.checkpoint, &info) == 0 && S_ISREG(info.st_mode));
    DDP_TRY(ddp_broadcast(r->world, &exists, 1, DDP_I32, 0, NULL));
    r->own.resume = exists ? r->own.checkpoint : NULL;
    if (r->rank == 0 && ddp_group_attempt(r->world) > 0)
        printf("restart %d: %s\n", ddp_group_attempt(r->world),
               exists ? r->own.checkpoint : "no checkpoint yet, a new run");
    return DDP_OK;
}

static void run_init(run *r, ddp_group *world, job *j) {
    r->own = j->options;
    r->options = &r->own;
    r->world = world;
    r->rank = ddp_rank(world);
    r->world_size = ddp_world_size(world);
    if (r->rank != 0 && !j->options.threads_as_ranks) j->quiet = 1; /* a forked rank sets only its own copy */
}

/* Runs one rank. Allocates a zeroed trainer of size_bytes, which starts with its run, calls train, then
   end. */
static ddp_result run_trainer(ddp_group *world, job *j, size_t size_bytes, ddp_result (*train)(void *trainer),
                              void (*end)(void *trainer)) {
    run *r = (run *)calloc(1, size_bytes);
    char cause[1024];
    ddp_result result;
    if (!r) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the trainer");
    run_init(r, world, j);
    result = run_find_checkpoint(r);
    if (result == DDP_OK) result = train(r);
    if (result != DDP_OK && r->report.terminal && r->report.shown > 0) printf("\n");
    snprintf(cause, sizeof cause, "%s", ddp_last_error()); /* before `end`, which may set another error */
    end(r);
    free(r);
    return result == DDP_OK ? DDP_OK : ddp_fail(result, "%s", cause);
}

/* Starts the ranks, or joins those of a launcher. Returns the exit status of the process. */
static int run_main(job *j, ddp_rank_fn rank_main) {
    ddp_launch_desc desc = DDP_ZERO;
    ddp_result result;
    if (j->options.help && !j->options.wrong[0]) {
        print_help(j->options.program);
        return 0;
    }
    desc.world_size = j->options.wrong[0] ? ranks_to_start(0, 1) : ranks_to_start(j->options.ranks, j->ranks);
    desc.group.log_fn = print_notice;
    desc.max_restarts = j->options.restarts;
    desc.mode = j->options.threads_as_ranks ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
    result = ddp_launch(&desc, rank_main, j);
    if (result != DDP_OK && !j->quiet)
        fprintf(stderr, "%s: %s\n", j->options.program->name, ddp_last_error());
    free(j->options.paths);
    return result == DDP_OK ? 0 : 1;
}

#endif /* DDP_EXAMPLE_TRAIN_H */

/* MIT License: see LICENSE. */

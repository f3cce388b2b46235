/*  train_gpt.c - trains a byte-level GPT on text, on every core, and gets the same bits on any number of ranks.

USAGE
    cc -O3 -march=native examples/train_gpt.c -o train_gpt -lm -lpthread
    ./train_gpt [flags] [files or folders]         without files: the text of this repository; --help lists the flags
    mpirun -n 2 ./train_gpt                        the ranks of a launcher
    torchrun --no-python --nproc_per_node 2 ./train_gpt

A STEP
    The sampler gives every rank a contiguous block of the global batch, micro-batch by micro-batch:

        global batch   | micro 0 | micro 1 | micro 2 | micro 3 |        windows of context + 1 bytes
        1 rank         | rank 0                                |
        2 ranks        | rank 0            | rank 1            |

    Each micro-batch's backward announces a gradient as soon as it is final. The accumulator adds micro-batches pairwise,
    (0+1)+(2+3); with the last one it passes the announcement on to the reducer, which adds over ranks in the same tree while
    backward goes on, and divides once. So who computed which micro-batch leaves no trace in the sum. Clipping takes
    an exact norm, AdamW runs on every rank alike, and the last line of the output is a hash of the weights that
    is the same for 1, 2 or 4 ranks with the same --batch and --micro-batch.

    Rank 0 alone reads files, writes files and prints. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "curve.h"
#include "gpt.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SAMPLE_BYTES 400
#define VALIDATION_WINDOWS 128
#define SVG_PATH "loss.svg"
#define HASH_START UINT64_C(0xcbf29ce484222325)
#define TRY(call) do { ddp_result try_result = (call); if (try_result != DDP_OK) return try_result; } while (0)
#define WRONG(...) ddp_fail(DDP_ERR_INVALID, __VA_ARGS__)

//== options ============================================================================================== >>options

/* What decides the bits of a run: a checkpoint stores it and a resumed run shares it. 0 (seed -1) = not given. */
typedef struct run_config {
    int32_t layers, heads, channels, context, batch, micro_batch, steps, reserved;
    int64_t seed;
    double lr;
} run_config;

typedef struct run_options {
    run_config config;
    int32_t ranks, threads_as_ranks, help;
    const char *checkpoint, *resume;
    const char **paths;
    int path_count;
    char wrong[512]; /* what is wrong with the command line, or "" */
} run_options;

typedef enum flag_kind { FLAG_SWITCH, FLAG_INT32, FLAG_INT64, FLAG_DOUBLE, FLAG_TEXT } flag_kind;
typedef enum flag_rule { NOT_SAVED, SAVED /* a flag overrides the checkpoint */, FIXED /* a flag that differs is an error */ } flag_rule;

typedef struct flag {
    const char *name;
    flag_kind kind;
    flag_rule rule;
    size_t offset; /* in options */
    double least, most;
    const char *help;
} flag;

#define AT(field) offsetof(run_options, field)
static const flag FLAGS[] = {
    {"--ranks", FLAG_INT32, NOT_SAVED, AT(ranks), 1, DDP_MAX_LOCAL_RANKS, "N ranks to start; default: one per core"},
    {"--threads-as-ranks", FLAG_SWITCH, NOT_SAVED, AT(threads_as_ranks), 0, 1, "ranks are threads of one process"},
    {"--steps", FLAG_INT32, SAVED, AT(config.steps), 1, 1e9, "N optimizer steps; default 500"},
    {"--batch", FLAG_INT32, FIXED, AT(config.batch), 1, 1e6, "N windows per step, over all ranks; default near 16"},
    {"--micro-batch", FLAG_INT32, FIXED, AT(config.micro_batch), 1, 1e6, "N windows per forward and backward; default 4"},
    {"--context", FLAG_INT32, FIXED, AT(config.context), 1, 65536, "N bytes that a prediction sees; default 128"},
    {"--layers", FLAG_INT32, FIXED, AT(config.layers), 1, 1000, "N transformer blocks; default 4"},
    {"--heads", FLAG_INT32, FIXED, AT(config.heads), 1, 1000, "N attention heads; default 4"},
    {"--channels", FLAG_INT32, FIXED, AT(config.channels), 1, 65536, "N width, divisible by heads; default 128"},
    {"--lr", FLAG_DOUBLE, SAVED, AT(config.lr), 1e-9, 10, "X highest learning rate; default 0.003"},
    {"--seed", FLAG_INT64, FIXED, AT(config.seed), 0, 9e15, "N of the initial weights and the order of the text; default 1"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0, "FILE save there at every validation and at the end"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0, "FILE go on from a checkpoint, on any number of ranks"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "this text"},
};
#define FLAG_COUNT ((int)(sizeof FLAGS / sizeof FLAGS[0]))

static void print_help(void) {
    printf("train_gpt [flags] [files or folders]: trains a byte-level GPT on text with data-parallel ranks\n");
    for (int i = 0; i < FLAG_COUNT; i++) {
        char left[64];
        int metavar = FLAGS[i].kind == FLAG_SWITCH ? 0 : (int)strcspn(FLAGS[i].help, " ");
        snprintf(left, sizeof left, "%s %.*s", FLAGS[i].name, metavar, FLAGS[i].help);
        printf("  %-22s%s\n", left, FLAGS[i].help + metavar + (metavar > 0));
    }
    printf("The same --batch and --micro-batch give the same weights on any number of ranks, bit for bit.\n");
}

static void flag_set(const flag *f, run_options *o, const char *value) {
    char *end = NULL, *target = (char *)o + f->offset;
    double number;
    if (f->kind == FLAG_TEXT) {
        memcpy(target, &value, sizeof value);
        if (!value[0]) snprintf(o->wrong, sizeof o->wrong, "%s needs the name of a file", f->name);
        return;
    }
    errno = 0;
    number = f->kind == FLAG_DOUBLE ? strtod(value, &end) : (double)strtoll(value, &end, 10);
    if (end == value || *end || errno || !(number >= f->least && number <= f->most)) {
        snprintf(o->wrong, sizeof o->wrong, "%s %.60s: give %s from %.15g to %.15g", f->name, value,
                 f->kind == FLAG_DOUBLE ? "a number" : "a whole number", f->least, f->most);
        return;
    }
    if (f->kind == FLAG_DOUBLE) memcpy(target, &number, sizeof number);
    else if (f->kind == FLAG_INT64) { int64_t wide = (int64_t)number; memcpy(target, &wide, sizeof wide); }
    else { int32_t narrow = (int32_t)number; memcpy(target, &narrow, sizeof narrow); }
}

/* Fills *o. What is wrong goes to o->wrong, so that rank 0 alone says it, under any launcher. */
static void parse_options(int argc, char **argv, run_options *o) {
    memset(o, 0, sizeof *o);
    o->config.seed = -1;
    o->paths = (const char **)calloc((size_t)argc + 1, sizeof *o->paths);
    if (!o->paths) snprintf(o->wrong, sizeof o->wrong, "%d arguments do not fit in memory", argc);
    for (int i = 1; i < argc && !o->wrong[0]; i++) {
        const char *value = strchr(argv[i], '=');
        size_t length = value ? (size_t)(value - argv[i]) : strlen(argv[i]);
        const flag *f = NULL;
        if (argv[i][0] != '-') { o->paths[o->path_count++] = argv[i]; continue; }
        for (int j = 0; j < FLAG_COUNT; j++)
            if (strlen(FLAGS[j].name) == length && !strncmp(argv[i], FLAGS[j].name, length)) f = &FLAGS[j];
        if (!f) snprintf(o->wrong, sizeof o->wrong, "there is no flag %.60s; --help lists the flags", argv[i]);
        else if (f->kind == FLAG_SWITCH && value) snprintf(o->wrong, sizeof o->wrong, "%s takes no value", f->name);
        else if (f->kind == FLAG_SWITCH) { int32_t on = 1; memcpy((char *)o + f->offset, &on, sizeof on); }
        else if (!value && i + 1 == argc) snprintf(o->wrong, sizeof o->wrong, "%s needs a value; --help lists the flags", f->name);
        else flag_set(f, o, value ? value + 1 : argv[++i]);
    }
}

//== plan ==================================================================================================== >>plan

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t size_bytes) { /* FNV-1a; start from HASH_START */
    const uint8_t *byte = (const uint8_t *)data;
    for (size_t i = 0; i < size_bytes; i++) hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* What rank 0 finds and decides before anything starts; then it is the same on every rank. */
typedef struct run_plan {
    run_config config;
    ddp_sampler_state data;    /* resumed: where the sampler stood */
    int64_t first_step;        /* > 0: resumed */
    int64_t text_bytes;        /* all of it, of which */
    int64_t train_bytes;       /* the start is trained on, the rest is for validation */
    uint64_t text_hash;
    double entropy;            /* nats per byte */
} run_plan;

/* A checkpoint file: this header, then parameter_count values, first moments and second moments, as f32, then the FNV-1a hash of all
   bytes before it. Numbers as this machine has them. */
typedef struct checkpoint_header {
    char magic[8];
    uint32_t version, header_bytes;
    run_config config;
    ddp_sampler_state data;
    uint64_t text_hash;
    int64_t step, parameter_count;
} checkpoint_header;

#define CHECKPOINT_MAGIC "ddp gpt" /* with its zero: 8 bytes */
#define CHECKPOINT_VERSION 1

static double flag_value(const flag *f, const void *at) {
    int32_t narrow;
    int64_t wide;
    double number;
    if (f->kind == FLAG_INT32) { memcpy(&narrow, at, sizeof narrow); return narrow; }
    if (f->kind == FLAG_INT64) { memcpy(&wide, at, sizeof wide); return (double)wide; }
    memcpy(&number, at, sizeof number);
    return number;
}

/* What the command line leaves open comes from the checkpoint; what contradicts it is an error. */
static ddp_result config_merge(run_config *config, const run_config *saved, const char *path) {
    for (int i = 0; i < FLAG_COUNT; i++) {
        const flag *f = &FLAGS[i];
        size_t offset = f->offset - AT(config);
        double given, had;
        if (f->rule == NOT_SAVED) continue;
        given = flag_value(f, (const char *)config + offset);
        had = flag_value(f, (const char *)saved + offset);
        if (given == (f->kind == FLAG_INT64 ? -1 : 0))
            memcpy((char *)config + offset, (const char *)saved + offset, f->kind == FLAG_INT32 ? sizeof(int32_t) : sizeof(int64_t));
        else if (f->rule == FIXED && given != had)
            return WRONG("%s was trained with %s %.15g, not %.15g; leave %s out, or resume from another checkpoint", path, f->name, had, given,
                         f->name);
    }
    return DDP_OK;
}

/* Reads the whole file, so that nothing is believed before its hash is right. */
static ddp_result checkpoint_read(const char *path, text_buffer *file, checkpoint_header *header) {
    uint64_t hash, stored;
    struct stat info;
    int64_t body;
    if (stat(path, &info) != 0) return WRONG("--resume %s: %s; give a file that --checkpoint has written", path, strerror(errno));
    if (S_ISREG(info.st_mode)) TRY(text_add_file(file, path, 0));
    if (file->count < (int64_t)sizeof header->magic || memcmp(file->bytes, CHECKPOINT_MAGIC, sizeof header->magic))
        return WRONG("--resume %s: this is no checkpoint; give a file that --checkpoint has written", path);
    body = file->count - (int64_t)sizeof *header - (int64_t)sizeof hash;
    if (body >= 0) memcpy(header, file->bytes, sizeof *header);
    if (body >= 0 && (header->version != CHECKPOINT_VERSION || header->header_bytes != sizeof *header))
        return WRONG("--resume %s: version %u of the format, this program reads version %d; train anew, or use the program that wrote it", path,
                     header->version, CHECKPOINT_VERSION);
    if (body < 0 || body / 12 < header->parameter_count)
        return ddp_fail(DDP_ERR_CORRUPT, "--resume %s is cut short; give an older or a complete copy", path);
    hash = hash_bytes(HASH_START, file->bytes, (size_t)file->count - sizeof hash);
    memcpy(&stored, file->bytes + file->count - sizeof stored, sizeof stored);
    if (hash != stored || header->parameter_count < 1 || body != header->parameter_count * 12)
        return ddp_fail(DDP_ERR_CORRUPT, "--resume %s is damaged, its hash does not fit its contents; give another copy", path);
    return DDP_OK;
}

/* Batches that split: over the ranks, into micro-batches, and on several ranks into 2^k of them each, so that sums keep their tree. */
static int batch_splits(int64_t batch, int64_t micro_batch, int64_t ranks) {
    int64_t share = batch / (micro_batch * ranks);
    return share > 0 && batch % (micro_batch * ranks) == 0 && (ranks == 1 || (share & (share - 1)) == 0);
}

static ddp_result config_resolve(run_config *c, int ranks) {
    if (!c->layers) c->layers = 4;
    if (!c->heads) c->heads = 4;
    if (!c->channels) c->channels = 128;
    if (!c->context) c->context = 128;
    if (!c->micro_batch) c->micro_batch = 4;
    if (!c->steps) c->steps = 500;
    if (c->seed < 0) c->seed = 1;
    if (c->lr == 0) c->lr = 3e-3;
    if (!c->batch) for (c->batch = c->micro_batch * ranks; c->batch * 3 / 2 < 16;) c->batch *= 2;
    if (c->channels % c->heads) {
        int below = c->channels / c->heads * c->heads, above = below + c->heads;
        return WRONG("--channels %d is not divisible by --heads %d; use --channels %d", c->channels, c->heads,
                     below > 0 && c->channels - below <= above - c->channels ? below : above);
    }
    if (!batch_splits(c->batch, c->micro_batch, ranks)) {
        int64_t unit = (int64_t)c->micro_batch * ranks, below = unit, above = unit;
        while (above < c->batch) { below = above; above = ranks == 1 ? above + unit : above * 2; }
        return WRONG("--batch %d does not split into 1, 2, 4, 8 ... micro-batches of %d on each of %d ranks; use --batch %lld", c->batch,
                     c->micro_batch, ranks, (long long)(c->batch - below <= above - c->batch ? below : above));
    }
    return DDP_OK;
}

/* Whether path can be replaced at the end, asked at the start. Leaves everything as it was. */
static ddp_result check_writable(const char *path) {
    char temporary[4096];
    struct stat info;
    int existed, fd;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return WRONG("%s cannot be written, it is not a file; remove it or choose another place", path);
    existed = stat(temporary, &info) == 0;
    fd = open(temporary, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return WRONG("%s cannot be written: %s; choose a place where it can", path, strerror(errno));
    close(fd);
    if (!existed) unlink(temporary);
    return DDP_OK;
}

/* Rank 0: everything that can be wrong with the input is found here, before training and before anything is written. */
static ddp_result make_plan(run_plan *p, const run_options *o, int ranks, text_buffer *t, text_buffer *saved, checkpoint_header *header) {
    int64_t window, validation;
    memset(p, 0, sizeof *p);
    p->config = o->config;
    if (o->wrong[0]) return WRONG("%s", o->wrong);
    if (o->ranks && o->ranks != ranks) return WRONG("--ranks %d, but the launcher started %d; leave --ranks out", o->ranks, ranks);
    TRY(check_writable(SVG_PATH));
    if (o->checkpoint) TRY(check_writable(o->checkpoint));
    if (o->resume) {
        TRY(checkpoint_read(o->resume, saved, header));
        TRY(config_merge(&p->config, &header->config, o->resume));
        p->data = header->data;
        p->first_step = header->step;
    }
    TRY(config_resolve(&p->config, ranks));
    if (p->first_step > p->config.steps)
        return WRONG("%s has %lld steps behind it; use --steps %lld or more", o->resume, (long long)p->first_step, (long long)p->first_step);
    TRY(text_load(t, o->paths, o->path_count));
    window = p->config.context + 1;
    validation = t->count / 10 > window ? t->count / 10 : window;
    if (t->count < 2 * window)
        return WRONG("the text has %lld bytes, and training and validation need %lld each with --context %d; "
                     "give more text or use a shorter --context",
                     (long long)t->count, (long long)window, p->config.context);
    p->text_bytes = t->count;
    p->train_bytes = t->count - validation;
    p->entropy = text_unigram_entropy(t);
    p->text_hash = hash_bytes(HASH_START, t->bytes, (size_t)t->count);
    if (o->resume && p->text_hash != header->text_hash) return WRONG("%s was trained on other text; give the same files, unchanged", o->resume);
    return DDP_OK;
}

//== report ================================================================================================ >>report

/* What rank 0 shows. Points of the curve are means over `every` steps, so that there are never more than CURVE_POINTS. */
typedef struct run_report {
    curve training, validation;
    int every, pending;             /* steps per point of the training curve; steps in the one that is being filled */
    double pending_loss;
    double start, shown;            /* of the run; of the last progress line */
    int terminal;
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

/* A line that ends where it began on a terminal, or a plain one every twentieth of the run. */
static void report_progress(run_report *r, const run_plan *p, int64_t step, double loss, double norm, double tokens_per_second) {
    double now = ddp_now();
    double left = (now - r->start) / (double)(step - p->first_step) * (double)(p->config.steps - step);
    int64_t interval = p->config.steps / 20 > 1 ? p->config.steps / 20 : 1;
    if (r->terminal ? now - r->shown < 0.1 && step < p->config.steps : step % interval != 0 && step < p->config.steps) return;
    r->shown = now;
    printf("%sstep %4lld/%d   loss %.4f   %.0f tokens/s   gradient norm %.4g   ETA %d:%02d%s", r->terminal ? "\r" : "", (long long)step,
           p->config.steps, loss, tokens_per_second, norm, (int)(left + 0.5) / 60, (int)(left + 0.5) % 60, r->terminal ? "\033[K" : "\n");
    fflush(stdout);
}

static void report_validation(run_report *r, const run_plan *p, int64_t step, double loss) {
    curve_add(&r->validation, (double)step, loss);
    printf("%sstep %4lld/%d   validation loss %.4f   (unigram entropy %.4f)\n", r->terminal ? "\r\033[K" : "", (long long)step,
           p->config.steps, loss, p->entropy);
    fflush(stdout);
}

static ddp_result draw_curve(const run_report *r, const run_plan *p) {
    const run_config *c = &p->config;
    char title[128];
    snprintf(title, sizeof title, "%d layers, %d channels, context %d, batch %d, learning rate %.4g", c->layers, c->channels, c->context,
             c->batch, c->lr);
    return curve_draw(SVG_PATH, title, (double)p->first_step, c->steps, &r->training, &r->validation, p->entropy);
}

//== trainer ============================================================================================== >>trainer

/* One rank. What it points to is the same on every rank, but for the sampler, the batch, gradients before the reduction, and
   what rank 0 alone has. */
typedef struct trainer {
    const run_options *options;
    ddp_group *world;
    int rank, world_size;
    run_plan plan;
    text_buffer text;
    text_buffer saved;                    /* rank 0: the file of --resume, its header is in saved_header */
    checkpoint_header saved_header;
    gpt_model model;
    gpt_param *infos;              /* param_count each */
    ddp_param *params;
    int64_t *moment;               /* where a parameter's moments start; -1: it shares the value of an earlier one */
    int64_t parameter_count;       /* numbers in all values */
    float *first, *second;         /* AdamW's moments, parameter_count each */
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_result ready_result;       /* first failure inside a backward */
    ddp_sampler sampler;
    uint64_t epoch;
    int micro_count;               /* micro-batches of this rank in a step */
    int *tokens, *targets;         /* (micro_batch, context) */
    double *losses;                /* one per micro-batch of all ranks, in the order of the global batch */
    double train_seconds, gather_seconds;
    run_report report;                 /* rank 0 */
} trainer;

/* Rank 0's result and its sentence become everybody's, so that all ranks stop together and say the same. Collective. */
static ddp_result share_result(ddp_group *world, ddp_result result) {
    char sentence[512] = "";
    int32_t code = result;
    if (result != DDP_OK) snprintf(sentence, sizeof sentence, "%s", ddp_last_error());
    TRY(ddp_broadcast(world, &code, 1, DDP_I32, 0, NULL));
    if (code == DDP_OK) return DDP_OK;
    TRY(ddp_broadcast(world, sentence, sizeof sentence, DDP_U8, 0, NULL));
    return ddp_fail((ddp_result)code, "%s", sentence);
}

/* The plan and the text, made by rank 0 for everybody. Collective. */
static ddp_result receive_plan(trainer *t) {
    ddp_result result = DDP_OK;
    if (t->rank == 0) result = make_plan(&t->plan, t->options, t->world_size, &t->text, &t->saved, &t->saved_header);
    TRY(share_result(t->world, result));
    TRY(ddp_broadcast(t->world, &t->plan, sizeof t->plan, DDP_U8, 0, NULL));
    if (t->rank != 0) {
        t->text.count = t->text.capacity = t->plan.text_bytes;
        t->text.bytes = (uint8_t *)malloc((size_t)t->plan.text_bytes);
        if (!t->text.bytes)
            return ddp_fail(DDP_ERR_NO_MEMORY, "a text of %lld bytes does not fit in memory; give fewer files", (long long)t->plan.text_bytes);
    }
    return ddp_broadcast(t->world, t->text.bytes, (size_t)t->plan.text_bytes, DDP_U8, 0, NULL);
}

/* Validation windows: so many that they cover the validation text once, at most VALIDATION_WINDOWS, in whole micro-batches. */
static int64_t validation_micro_batches(const run_plan *p) {
    int64_t windows = (p->text_bytes - p->train_bytes) / (p->config.context + 1);
    if (windows > VALIDATION_WINDOWS) windows = VALIDATION_WINDOWS;
    return (windows + p->config.micro_batch - 1) / p->config.micro_batch;
}

/* The model with its own values, and arrays that go with them. */
static ddp_result build_model(trainer *t) {
    const run_config *c = &t->plan.config;
    int64_t tokens = (int64_t)c->micro_batch * c->context, losses = c->batch / c->micro_batch, validation = validation_micro_batches(&t->plan);
    int count;
    gpt_config config;
    config.vocab = 256; config.context = c->context; config.layers = c->layers; config.heads = c->heads; config.channels = c->channels;
    count = gpt_param_count(&config);
    if (losses < validation + t->world_size) losses = validation + t->world_size;
    if (tokens > INT32_MAX / 4 / c->channels || gpt_model_create(&t->model, &config, c->micro_batch, GPT_OWN_VALUES) != 0)
        return ddp_fail(DDP_ERR_NO_MEMORY, "the model does not fit in memory; use a smaller --channels, --layers, --context or --micro-batch");
    t->infos = (gpt_param *)calloc((size_t)count, sizeof *t->infos);
    t->params = (ddp_param *)calloc((size_t)count, sizeof *t->params);
    t->moment = (int64_t *)calloc((size_t)count, sizeof *t->moment);
    t->tokens = (int *)calloc((size_t)tokens, sizeof *t->tokens);
    t->targets = (int *)calloc((size_t)tokens, sizeof *t->targets);
    t->losses = (double *)calloc((size_t)losses, sizeof *t->losses);
    if (!t->infos || !t->params || !t->moment || !t->tokens || !t->targets || !t->losses)
        return ddp_fail(DDP_ERR_NO_MEMORY, "arrays of %d parameters", count);
    for (int i = 0; i < count; i++) {
        ddp_tensor *value = &t->params[i].value;
        gpt_param_info(&config, i, &t->infos[i]);
        t->moment[i] = t->infos[i].tied_to < 0 ? t->parameter_count : -1;
        if (t->moment[i] >= 0) t->parameter_count += t->infos[i].count;
        t->params[i].name = t->infos[i].name;
        value->data = t->model.values[i];
        value->dtype = DDP_F32;
        value->ndim = t->infos[i].ndim;
        for (int k = 0; k < value->ndim; k++) value->shape[k] = t->infos[i].shape[k];
    }
    t->first = (float *)calloc((size_t)t->parameter_count, sizeof(float));
    t->second = (float *)calloc((size_t)t->parameter_count, sizeof(float));
    if (!t->first || !t->second)
        return ddp_fail(DDP_ERR_NO_MEMORY, "moments of %lld parameters; use a smaller --channels or --layers", (long long)t->parameter_count);
    return DDP_OK;
}

/* First values: drawn from the seed, or rank 0's from the checkpoint; the reducer broadcasts them. */
static ddp_result start_values(trainer *t) {
    const uint8_t *from = t->saved.bytes + sizeof(checkpoint_header);
    size_t moment_bytes = (size_t)t->parameter_count * sizeof(float);
    ddp_result result = DDP_OK;
    if (t->plan.first_step == 0) { gpt_model_init(&t->model, (uint64_t)t->plan.config.seed); return DDP_OK; }
    if (t->rank == 0 && t->saved_header.parameter_count != t->parameter_count)
        result = ddp_fail(DDP_ERR_CORRUPT, "%s holds %lld parameters, the model has %lld; train anew", t->options->resume,
                          (long long)t->saved_header.parameter_count, (long long)t->parameter_count);
    TRY(share_result(t->world, result));
    if (t->rank == 0) {
        for (int i = 0; i < t->model.param_count; i++)
            if (t->moment[i] >= 0)
                memcpy(t->model.values[i], from + (size_t)t->moment[i] * sizeof(float), (size_t)t->infos[i].count * sizeof(float));
        memcpy(t->first, from + moment_bytes, moment_bytes);
        memcpy(t->second, from + moment_bytes * 2, moment_bytes);
        free(t->saved.bytes);
        memset(&t->saved, 0, sizeof t->saved);
    }
    TRY(ddp_broadcast(t->world, t->first, (size_t)t->parameter_count, DDP_F32, 0, NULL));
    return ddp_broadcast(t->world, t->second, (size_t)t->parameter_count, DDP_F32, 0, NULL);
}

/* What makes the trainer parallel: reducer, accumulator, sampler. Collective. */
static ddp_result build_parallel(trainer *t) {
    const run_config *c = &t->plan.config;
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc accumulator = DDP_ZERO;
    ddp_sampler_desc sampler = DDP_ZERO;

    t->micro_count = c->batch / c->micro_batch / t->world_size;
    reducer.params = t->params; /* gradients are NULL: the reducer places them in group memory, bucket by bucket */
    reducer.param_count = t->model.param_count;
    reducer.micro_batch_count = t->micro_count;
    TRY(ddp_reducer_create(&t->reducer, t->world, &reducer));
    for (int i = 0; i < t->model.param_count; i++) t->model.grads[i] = (float *)t->params[i].grad.data;

    accumulator.params = t->params;
    accumulator.param_count = t->model.param_count;
    accumulator.micro_batch_count = t->micro_count;
    accumulator.reducer = t->reducer;
    TRY(ddp_accumulator_create(&t->accumulator, t->world, &accumulator));

    sampler.dataset_size = t->plan.train_bytes - c->context; /* every start of a window of context + 1 bytes */
    sampler.num_replicas = t->world_size;
    sampler.rank = t->rank;
    sampler.seed = (uint64_t)c->seed;
    sampler.shuffle = DDP_SHUFFLE_HASHED;
    sampler.global_batch = c->batch;
    TRY(ddp_sampler_init(&t->sampler, &sampler));
    t->epoch = t->plan.data.epoch;
    return t->plan.first_step > 0 ? ddp_sampler_load(&t->sampler, &t->plan.data) : DDP_OK;
}

//== training ============================================================================================ >>training

/* Row `row` of the micro-batch: context bytes from start on, and for each the byte that follows. */
static void take_window(trainer *t, int row, int64_t start) {
    int context = t->plan.config.context;
    const uint8_t *from = t->text.bytes + start;
    for (int i = 0; i < context; i++) {
        t->tokens[row * context + i] = from[i];
        t->targets[row * context + i] = from[i + 1];
    }
}

static int64_t next_window(trainer *t) {
    int64_t start = ddp_sampler_next(&t->sampler, NULL);
    if (start >= 0) return start;
    ddp_sampler_set_epoch(&t->sampler, ++t->epoch);
    return ddp_sampler_next(&t->sampler, NULL);
}

/* Called by backward for each gradient; only the last micro-batch's call sends something on its way. */
static void gradient_ready(void *user, int index) {
    trainer *t = (trainer *)user;
    ddp_result result = ddp_accumulator_ready(t->accumulator, index);
    if (t->ready_result == DDP_OK) t->ready_result = result;
}

/* The mean of the first `count` losses, added in their order; each rank has filled its own `share` of them. Collective. */
static ddp_result gather_losses(trainer *t, int64_t share, int64_t count, double *mean) {
    double sum = 0;
    TRY(ddp_all_gather(t->world, t->losses + t->rank * share, t->losses, (size_t)share, DDP_F64, NULL));
    for (int64_t i = 0; i < count; i++) sum += t->losses[i];
    *mean = sum / (double)count;
    return DDP_OK;
}

/* Warm-up over a tenth of the steps, at most 100, then a cosine down to a tenth. step counts from 1. */
static float learning_rate(const run_config *c, int64_t step) {
    int64_t warm = c->steps / 10 < 100 ? c->steps / 10 : 100;
    if (step <= warm) return (float)(c->lr * (double)step / (double)warm);
    return (float)(c->lr * (0.55 + 0.45 * cos(3.14159265358979323846 * (double)(step - warm) / (double)(c->steps - warm))));
}

/* AdamW on every value once: a tied parameter's gradient is in its first use. Only matrices decay. */
static void update(trainer *t, int64_t step) {
    float lr = learning_rate(&t->plan.config, step);
    for (int i = 0; i < t->model.param_count; i++) {
        if (t->moment[i] < 0) continue;
        gpt_adamw(t->model.values[i], t->model.grads[i], t->first + t->moment[i], t->second + t->moment[i], (size_t)t->infos[i].count, lr, 0.9f,
                  0.95f, 1e-8f, t->infos[i].ndim > 1 ? 0.1f : 0.0f, (int)step, 1.0f);
    }
}

/* One optimizer step. *loss is the global batch's, *norm that of the gradient before clipping. Collective. */
static ddp_result train_step(trainer *t, int64_t step, double *loss, float *norm) {
    const run_config *c = &t->plan.config;
    double start = ddp_now(), gather;
    for (int micro = 0; micro < t->micro_count; micro++) {
        for (int row = 0; row < c->micro_batch; row++) take_window(t, row, next_window(t));
        t->losses[t->rank * t->micro_count + micro] =
            gpt_model_forward_backward(&t->model, t->tokens, t->targets, c->micro_batch, c->context, gradient_ready, t);
        TRY(t->ready_result);
        TRY(ddp_accumulator_next(t->accumulator, NULL));
    }
    TRY(ddp_reducer_wait(t->reducer));
    TRY(ddp_reducer_clip_grad_norm(t->reducer, 1.0f, norm));
    update(t, step);
    gather = ddp_now();
    TRY(gather_losses(t, t->micro_count, (int64_t)t->micro_count * t->world_size, loss));
    t->gather_seconds += ddp_now() - gather;
    t->train_seconds += ddp_now() - start;
    if (!isfinite(*loss) || !isfinite(*norm))
        return WRONG("the loss is not a number any more at step %lld; use a smaller --lr", (long long)step);
    return DDP_OK;
}

/* Mean loss over windows spread evenly over the validation text. Ranks take contiguous shares of the micro-batches, which are the same on
   any number of ranks. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    const run_config *c = &t->plan.config;
    int64_t count = validation_micro_batches(&t->plan), share = (count + t->world_size - 1) / t->world_size, windows = count * c->micro_batch;
    int64_t room = t->plan.text_bytes - t->plan.train_bytes - c->context - 1; /* of the first byte of a window */
    for (int64_t i = t->rank * share; i < (t->rank + 1) * share && i < count; i++) {
        for (int row = 0; row < c->micro_batch; row++)
            take_window(t, row, t->plan.train_bytes + (windows > 1 ? room * (i * c->micro_batch + row) / (windows - 1) : 0));
        t->losses[i] = gpt_model_forward(&t->model, t->tokens, t->targets, c->micro_batch, c->context);
    }
    return gather_losses(t, share, count, loss);
}

static uint64_t hash_weights(const trainer *t) {
    uint64_t hash = HASH_START;
    for (int i = 0; i < t->model.param_count; i++)
        if (t->moment[i] >= 0) hash = hash_bytes(hash, t->model.values[i], (size_t)t->infos[i].count * sizeof(float));
    return hash;
}

static void put(FILE *file, uint64_t *hash, const void *data, size_t size_bytes) {
    *hash = hash_bytes(*hash, data, size_bytes);
    if (size_bytes) fwrite(data, 1, size_bytes, file); /* ferror tells at the end */
}

/* Writes beside the file, then renames: whenever this is killed, one whole checkpoint is there. */
static ddp_result save_checkpoint(const trainer *t, const char *path, int64_t step) {
    char temporary[4096];
    checkpoint_header header;
    uint64_t hash = HASH_START, unused = 0;
    size_t moment_bytes = (size_t)t->parameter_count * sizeof(float);
    FILE *file;
    int failed;
    memset(&header, 0, sizeof header);
    memcpy(header.magic, CHECKPOINT_MAGIC, sizeof header.magic);
    header.version = CHECKPOINT_VERSION;
    header.header_bytes = sizeof header;
    header.config = t->plan.config;
    header.text_hash = t->plan.text_hash;
    header.step = step;
    header.parameter_count = t->parameter_count;
    TRY(ddp_sampler_save(&t->sampler, &header.data));
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    file = fopen(temporary, "wb");
    if (!file) return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s; choose a place where it can", path, strerror(errno));
    put(file, &hash, &header, sizeof header);
    for (int i = 0; i < t->model.param_count; i++)
        if (t->moment[i] >= 0) put(file, &hash, t->model.values[i], (size_t)t->infos[i].count * sizeof(float));
    put(file, &hash, t->first, moment_bytes);
    put(file, &hash, t->second, moment_bytes);
    put(file, &unused, &hash, sizeof hash);
    failed = fflush(file) != 0 || ferror(file) || fsync(fileno(file)) != 0;
    failed = fclose(file) != 0 || failed;
    if (!failed && rename(temporary, path) == 0) return DDP_OK;
    failed = errno;
    unlink(temporary);
    return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s; what was there is untouched", path, strerror(failed));
}

/* The validation loss, and after training steps a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    ddp_result result = DDP_OK;
    TRY(validate(t, loss));
    if (t->rank == 0) {
        report_validation(&t->report, &t->plan, step, *loss);
        if (t->options->checkpoint && step > t->plan.first_step) result = save_checkpoint(t, t->options->checkpoint, step);
    }
    return t->options->checkpoint ? share_result(t->world, result) : DDP_OK;
}

static double tokens_per_second(const trainer *t, int64_t step) {
    double tokens = (double)(step - t->plan.first_step) * t->plan.config.batch * t->plan.config.context;
    return t->train_seconds > 0 ? tokens / t->train_seconds : 0;
}

static ddp_result train_steps(trainer *t, double *validation) {
    int64_t steps = t->plan.config.steps, interval = steps / 10 > 1 ? steps / 10 : 1;
    double loss;
    float norm;
    TRY(evaluate(t, t->plan.first_step, validation));
    for (int64_t step = t->plan.first_step + 1; step <= steps; step++) {
        TRY(train_step(t, step, &loss, &norm));
        if (t->rank == 0) {
            report_loss(&t->report, step, loss);
            report_progress(&t->report, &t->plan, step, loss, norm, tokens_per_second(t, step));
        }
        if (step % interval == 0 || step == steps) TRY(evaluate(t, step, validation));
    }
    return DDP_OK;
}

//== the end ================================================================================================== >>end

/* Rank 0: what the model writes when it goes on from the start of the validation text. */
static ddp_result print_sample(trainer *t) {
    int prompt = t->plan.config.context < 32 ? t->plan.config.context : 32;
    int *tokens = (int *)malloc((SAMPLE_BYTES + 32) * sizeof *tokens);
    if (!tokens) return ddp_fail(DDP_ERR_NO_MEMORY, "a sample of %d bytes", SAMPLE_BYTES);
    for (int i = 0; i < prompt; i++) tokens[i] = t->text.bytes[t->plan.train_bytes + i];
    gpt_generate(&t->model, tokens, prompt, prompt + SAMPLE_BYTES, 0.8f, (uint64_t)t->plan.config.seed);
    printf("\n--- the model goes on from %d bytes of the validation text ---\n", prompt);
    for (int i = 0; i < prompt + SAMPLE_BYTES; i++) putchar(tokens[i] == '\n' || (tokens[i] >= ' ' && tokens[i] < 127) ? tokens[i] : '?');
    printf("\n---\n");
    free(tokens);
    return DDP_OK;
}

/* Rank 0: exposed holds each rank's share of time. */
static void print_table(const trainer *t, const double *exposed) {
    double mean = 0, worst = 0;
    for (int r = 0; r < t->world_size; r++) {
        mean += exposed[r] / t->world_size;
        worst = exposed[r] > worst ? exposed[r] : worst;
    }
    printf("\n  ranks   tokens/s   communication not hidden by compute\n");
    printf("  %5d   %8.0f   %.2f%% of the time, %.2f%% on the rank that waited longest\n\n", t->world_size,
           tokens_per_second(t, t->plan.config.steps), 100 * mean, 100 * worst);
}

/* Sample, table, drawing, both losses, and the hash, which all ranks must agree on. Collective. */
static ddp_result finish(trainer *t, double validation) {
    ddp_reducer_stats stats = DDP_ZERO;
    double exposed[DDP_MAX_LOCAL_RANKS];
    uint64_t hashes[DDP_MAX_LOCAL_RANKS];
    ddp_result result = DDP_OK;
    TRY(ddp_reducer_get_stats(t->reducer, &stats));
    exposed[t->rank] = t->train_seconds > 0 ? (stats.total_wait_seconds + t->gather_seconds) / t->train_seconds : 0;
    hashes[t->rank] = hash_weights(t);
    TRY(ddp_all_gather(t->world, &exposed[t->rank], exposed, 1, DDP_F64, NULL));
    TRY(ddp_all_gather(t->world, &hashes[t->rank], hashes, 1, DDP_U64, NULL));
    for (int r = 1; r < t->world_size; r++)
        if (hashes[r] != hashes[0])
            return ddp_fail(DDP_ERR_CORRUPT, "rank %d has other weights than rank 0: its machine or its build computes differently", r);
    if (t->rank == 0) {
        result = print_sample(t);
        if (result == DDP_OK) {
            print_table(t, exposed);
            result = draw_curve(&t->report, &t->plan);
        }
    }
    TRY(share_result(t->world, result));
    if (t->rank == 0) {
        printf("%s: the loss curve\n", SVG_PATH);
        printf("unigram entropy: %.4f nats per byte\nvalidation loss: %.4f nats per byte\n", t->plan.entropy, validation);
        printf("weights hash: %016llx\n", (unsigned long long)hashes[0]);
    }
    return DDP_OK;
}

static ddp_result train(trainer *t) {
    double validation = 0;
    TRY(receive_plan(t));
    TRY(build_model(t));
    TRY(start_values(t));
    TRY(build_parallel(t));
    if (t->rank == 0) {
        report_start(&t->report, &t->plan);
        printf("%lld parameters, %lld bytes of text, %d %s%s\n", (long long)t->parameter_count, (long long)t->plan.text_bytes, t->world_size,
               t->world_size == 1 ? "rank" : "ranks", t->options->threads_as_ranks ? " as threads" : "");
        if (t->plan.first_step > 0) printf("%s goes on from step %lld\n", t->options->resume, (long long)t->plan.first_step);
    }
    TRY(train_steps(t, &validation));
    return finish(t, validation);
}

static void trainer_free(trainer *t) {
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    ddp_sampler_free(&t->sampler);
    gpt_model_destroy(&t->model);
    free(t->text.bytes);
    free(t->saved.bytes);
    free(t->infos);
    free(t->params);
    free(t->moment);
    free(t->tokens);
    free(t->targets);
    free(t->losses);
    free(t->first);
    free(t->second);
}

typedef struct job {
    run_options options;
    int quiet; /* this process is a rank of a launcher, and not rank 0 */
} job;

static ddp_result rank_main(ddp_group *world, void *user) {
    job *j = (job *)user;
    trainer *t = (trainer *)calloc(1, sizeof *t);
    ddp_result result;
    if (!t) return ddp_fail(DDP_ERR_NO_MEMORY, "a trainer");
    t->options = &j->options;
    t->world = world;
    t->rank = ddp_rank(world);
    t->world_size = ddp_world_size(world);
    if (t->rank != 0 && !j->options.threads_as_ranks) j->quiet = 1; /* forked ranks write to their own copy */
    result = train(t);
    if (result != DDP_OK && t->report.terminal && t->report.shown > 0) printf("\n");
    trainer_free(t);
    free(t);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    ddp_result result;
    job j;
    memset(&j, 0, sizeof j);
    parse_options(argc, argv, &j.options);
    if (j.options.help && !j.options.wrong[0]) { print_help(); return 0; }
    desc.world_size = j.options.wrong[0] ? 1 : j.options.ranks;
    desc.mode = j.options.threads_as_ranks ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
    result = ddp_launch(&desc, rank_main, &j);
    if (result != DDP_OK && !j.quiet) fprintf(stderr, "train_gpt: %s\n", ddp_last_error());
    free(j.options.paths);
    return result == DDP_OK ? 0 : 1;
}

/* MIT License: see LICENSE. */

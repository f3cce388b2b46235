/*  llmc.c - creates, copies and describes files of llm.c: GPT-2 checkpoints and token shards

    cc -O2 examples/gpt/llmc.c -o llmc -lm -lpthread
    ./llmc --model random.bin --dtype bf16         a GPT-2 124M with random values; flags set other shapes
    ./llmc --model half.bin --dtype bf16 --from gpt2_124M.bin         the same weights in another dtype
    ./llmc --tokens text.bin book.txt              files and folders as a shard of bytes (a vocabulary of 256)
    ./llmc --tokens noise.bin --count 10000000     random tokens below --vocab, for benchmarks
    ./llmc --show random.bin                       shape and bytes; mean and deviation of every parameter

    The program opens each file that it has written, and compares the header. It needs a few MiB of memory,
    except for text. Invalid input is one line on stderr and exit status 1. */
#define DDP_IMPLEMENTATION
#include "../extras/llmc.h"
#include "options.h"

/* The command line. */
typedef struct request {
    const char *model, *from, *tokens, *show, *dtype, *paths[64];
    gpt_config config;
    int count, seed;
} request;

static ddp_result copy_rows(void *user, int index, int64_t first, int64_t count, float *out) {
    return llmc_read((const llmc_model *)user, index, first, count, out);
}

static void print_header(const char *path, const llmc_header *h) {
    printf("%s: vocab %d (padded to %d), context %d, layers %d, heads %d, channels %d, %s, %lld bytes\n",
           path, h->config.vocab, h->padded_vocab, h->config.context, h->config.layers, h->config.heads,
           h->config.channels, ddp_dtype_name(h->dtype), (long long)llmc_file_bytes(h));
}

/* Writes a checkpoint: a copy of --from, or random values. Opens it again, and compares the header. */
static ddp_result make_model(const request *r) {
    llmc_model from, made;
    llmc_header h = llmc_gpt2_124m();
    ddp_result result = DDP_OK;
    memset(&from, 0, sizeof from);
    if (r->from) result = llmc_open(&from, r->from);
    if (result != DDP_OK) return result;
    h.config = r->config;
    h.padded_vocab = 0;
    if (r->from) h = from.header;
    if (r->dtype || !r->from) h.dtype = r->dtype && !strcmp(r->dtype, "bf16") ? DDP_BF16 : DDP_F32;
    result = r->from ? llmc_write(r->model, &h, copy_rows, &from)
                     : llmc_write_random(r->model, &h, (uint64_t)r->seed);
    llmc_close(&from);
    if (result == DDP_OK) result = llmc_open(&made, r->model);
    if (result != DDP_OK) return result;
    if (memcmp(&made.header.config, &h.config, sizeof h.config) || made.header.dtype != h.dtype)
        result = ddp_fail(DDP_ERR_CORRUPT,
                          "%.300s was changed by another program while it was written; write it again",
                          r->model);
    print_header(r->model, &made.header);
    llmc_close(&made);
    return result;
}

/* Prints mean and deviation of one parameter, which it reads piece by piece. */
static ddp_result show_parameter(const llmc_model *m, int index) {
    static float piece[1 << 16];
    double sum = 0, squares = 0, mean;
    gpt_param p;
    int64_t step;
    gpt_param_info(&m->header.config, index, &p);
    step = (int64_t)(sizeof piece / sizeof *piece) / p.shape[1];
    if (step < 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%s has rows of %lld elements; --show supports at most %d",
                        p.name, (long long)p.shape[1], 1 << 16);
    for (int64_t first = 0, rows; first < p.shape[0]; first += rows) {
        ddp_result result;
        rows = p.shape[0] - first < step ? p.shape[0] - first : step;
        result = llmc_read(m, index, first, rows, piece);
        if (result != DDP_OK) return result;
        for (int64_t i = 0; i < rows * p.shape[1]; i++) {
            sum += piece[i];
            squares += (double)piece[i] * piece[i];
        }
    }
    mean = sum / (double)p.count;
    printf("  %-22s (%lld, %lld)  mean %.3g  deviation %.3g\n", p.name, (long long)p.shape[0],
           (long long)p.shape[1], mean, sqrt(fmax(0, squares / (double)p.count - mean * mean)));
    return DDP_OK;
}

static ddp_result show(const char *path) {
    llmc_model m;
    ddp_result result = llmc_open(&m, path);
    if (result != DDP_OK) return result;
    print_header(path, &m.header);
    for (int i = 0; result == DDP_OK && i < gpt_param_head(&m.header.config); i++)
        result = show_parameter(&m, i);
    llmc_close(&m);
    return result;
}

/* Writes a shard of text or of random tokens. Opens it again, and compares the number of tokens. */
static ddp_result make_tokens(const request *r) {
    text_buffer text = DDP_ZERO;
    int path_count = 0;
    int64_t count = r->count;
    ddp_result result;
    source s;
    while (r->paths[path_count]) path_count++;
    if (count > 0)
        result = llmc_write_random_tokens(r->tokens, count, r->config.vocab, (uint64_t)r->seed);
    else {
        result = text_load(&text, (const char **)r->paths, path_count);
        count = text.count;
        if (result == DDP_OK) result = llmc_write_tokens(r->tokens, text.bytes, DDP_U8, count);
        free(text.bytes);
    }
    if (result != DDP_OK || count < 2) return result;
    result = source_open_tokens(&s, r->tokens, 1);
    if (result == DDP_OK && s.count != count - 1)
        result = ddp_fail(DDP_ERR_CORRUPT,
                          "%.300s was changed by another program while it was written; write it again",
                          r->tokens);
    if (result == DDP_OK) printf("%s: %lld tokens\n", r->tokens, (long long)count);
    source_close(&s);
    return result;
}

/* Returns NULL for a valid command line, otherwise an error text. */
static const char *request_error(const request *r) {
    if (!r->model + !r->tokens + !r->show != 2) return "give exactly one of --model, --tokens and --show";
    if (r->dtype && strcmp(r->dtype, "f32") && strcmp(r->dtype, "bf16")) return "--dtype: give f32 or bf16";
    if (r->from && !r->model) return "--from requires --model";
    if (r->paths[0] && (!r->tokens || r->count))
        return "files are the text of --tokens: give --tokens, and leave --count out";
    return NULL;
}

int main(int argc, char **argv) {
    request r;
    ddp_result result;
    memset(&r, 0, sizeof r);
    r.config = llmc_gpt2_124m().config;
    r.seed = 1;
    const option options[] = {
        {"--model", "FILE", NULL, NULL, &r.model, 0, 0, "write a checkpoint"},
        {"--from", "FILE", NULL, NULL, &r.from, 0, 0,
         "copy the weights of this checkpoint; without it, random values"},
        {"--dtype", "NAME", NULL, NULL, &r.dtype, 0, 0,
         "of --model: f32 or bf16; default that of --from, or f32"},
        {"--vocab", "N", &r.config.vocab, NULL, NULL, 1, 65536, "vocabulary of --model and of --count"},
        {"--context", "N", &r.config.context, NULL, NULL, 1, 1 << 20, "longest sequence of --model"},
        {"--layers", "N", &r.config.layers, NULL, NULL, 1, 1000, "blocks of --model"},
        {"--heads", "N", &r.config.heads, NULL, NULL, 1, 1000, "attention heads of --model"},
        {"--channels", "N", &r.config.channels, NULL, NULL, 1, 65536,
         "embedding size of --model, a multiple of --heads"},
        {"--tokens", "FILE", NULL, NULL, &r.tokens, 0, 0, "write a token shard with the bytes of the files"},
        {"--count", "N", &r.count, NULL, NULL, 0, INT32_MAX,
         "with --tokens: N random tokens instead of files"},
        {"--seed", "N", &r.seed, NULL, NULL, 0, INT32_MAX, "of random values and tokens"},
        {"--show", "FILE", NULL, NULL, &r.show, 0, 0, "describe a checkpoint"},
    };
    int status;
    if (argc > (int)(sizeof r.paths / sizeof *r.paths)) {
        fprintf(stderr, "llmc: %d arguments, but at most %d are supported; give folders\n", argc - 1,
                (int)(sizeof r.paths / sizeof *r.paths) - 1);
        return 1;
    }
    status = options_read("llmc: creates, copies and describes GPT-2 checkpoints and token shards of llm.c",
                          options, (int)(sizeof options / sizeof *options), argc, argv, r.paths);
    if (status >= 0) return status;
    if (request_error(&r)) {
        fprintf(stderr, "llmc: %s\n", request_error(&r));
        return 1;
    }
    if (r.show)
        result = show(r.show);
    else
        result = r.model ? make_model(&r) : make_tokens(&r);
    if (result == DDP_OK) return 0;
    fprintf(stderr, "llmc: %s\n", ddp_last_error());
    return 1;
}

/* MIT License: see LICENSE. */

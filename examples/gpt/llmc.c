/*  llmc.c - makes, copies and shows the files of llm.c that the trainers read: GPT-2 checkpoints and token shards.

    cc -O2 examples/gpt/llmc.c -o llmc -lm -lpthread
    ./llmc --model random.bin --dtype bf16             a GPT-2 124M with first values drawn from --seed; other shapes by flags
    ./llmc --model half.bin --dtype bf16 --from gpt2_124M.bin     the same weights in another dtype
    ./llmc --tokens text.bin book.txt                  files and folders as a shard of bytes (a vocabulary of 256)
    ./llmc --tokens noise.bin --count 10000000         random tokens below --vocab, to measure with
    ./llmc --show random.bin                           shape and bytes, mean and deviation of every parameter

    What is written is opened again, and its header compared. Memory stays below a few MiB, but for text. Wrong input is one sentence, and status 1. */
#define DDP_IMPLEMENTATION
#include "../extras/llmc.h"
#include "options.h"

/* What the command line says. */
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

/* A checkpoint of --from, or of random first values; opened again, it is what was asked for. */
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

/* Sums of one parameter, piece by piece. */
static ddp_result show_parameter(const llmc_model *m, int index) {
    static float piece[1 << 16];
    double sum = 0, squares = 0, mean;
    gpt_param p;
    int64_t step;
    gpt_param_info(&m->header.config, index, &p);
    step = (int64_t)(sizeof piece / sizeof *piece) / p.shape[1];
    if (step < 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "%s has rows of %lld elements; the longest that can be shown have %d", p.name,
                        (long long)p.shape[1], 1 << 16);
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

/* A shard of text, or of random tokens; opened again, it has as many. */
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

static const char *wrong_request(const request *r) {
    if (!r->model + !r->tokens + !r->show != 2) return "give one of --model, --tokens and --show";
    if (r->dtype && strcmp(r->dtype, "f32") && strcmp(r->dtype, "bf16")) return "--dtype: give f32 or bf16";
    if (r->from && !r->model) return "--from goes with --model";
    if (r->paths[0] && (!r->tokens || r->count)) return "files are text for --tokens, without --count";
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
        {"--from", "FILE", NULL, NULL, &r.from, 0, 0, "copy this one's weights; without it, random ones"},
        {"--dtype", "NAME", NULL, NULL, &r.dtype, 0, 0, "f32 or bf16, of --model; that of --from, or f32"},
        {"--vocab", "N", &r.config.vocab, NULL, NULL, 1, 65536, "tokens of --model and of --count"},
        {"--context", "N", &r.config.context, NULL, NULL, 1, 1 << 20, "positions of --model"},
        {"--layers", "N", &r.config.layers, NULL, NULL, 1, 1000, "blocks of --model"},
        {"--heads", "N", &r.config.heads, NULL, NULL, 1, 1000, "attention heads of --model"},
        {"--channels", "N", &r.config.channels, NULL, NULL, 1, 65536, "width of --model, divisible by heads"},
        {"--tokens", "FILE", NULL, NULL, &r.tokens, 0, 0,
         "write a token shard, of the bytes of the files given"},
        {"--count", "N", &r.count, NULL, NULL, 0, INT32_MAX, "random tokens instead of files, for --tokens"},
        {"--seed", "N", &r.seed, NULL, NULL, 0, INT32_MAX, "of what is random"},
        {"--show", "FILE", NULL, NULL, &r.show, 0, 0, "describe a checkpoint"},
    };
    int status;
    if (argc > (int)(sizeof r.paths / sizeof *r.paths))
        return fprintf(stderr, "llmc: %d words are too many; give folders\n", argc), 1;
    status = options_read("llmc: makes, copies and shows GPT-2 checkpoints and token shards of llm.c",
                          options, (int)(sizeof options / sizeof *options), argc, argv, r.paths);
    if (status >= 0) return status;
    if (wrong_request(&r)) return fprintf(stderr, "llmc: %s\n", wrong_request(&r)), 1;
    result = r.show ? show(r.show) : r.model ? make_model(&r) : make_tokens(&r);
    if (result == DDP_OK) return 0;
    fprintf(stderr, "llmc: %s\n", ddp_last_error());
    return 1;
}

/* MIT License: see LICENSE. */

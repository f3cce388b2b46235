/*  llmc.h - the files of llm.c (Karpathy 2024): GPT-2 checkpoints in f32 and bf16, read by parameter and row; token shards, written.

        llmc_model m;
        llmc_open(&m, "gpt2_124M.bin");                          m.header.config, .padded_vocab, .dtype; the file fits its header
        llmc_read(&m, index, first, rows, out);                  f32 rows of parameter `index` of gpt_param_info, whatever the file has
        llmc_close(&m);

        llmc_write("out.bin", &header, rows_of, user);           asks rows_of for every parameter in pieces; llmc_write_random draws them
        llmc_write_tokens("text.bin", bytes, DDP_U8, count);     sources.h reads shards: source_open_tokens

    A checkpoint is 256 int32 (magic, version, context, V, layers, heads, C, padded V), then the elements of

        wte (Vp, C)   wpe (context, C)   ln1.weight (L, C)   ln1.bias (L, C)   attn.qkv.weight (L, 3C, C)   ...   ln_f.weight (C)   ln_f.bias (C)

    with all L layers of a kind together, otherwise as gpt.h has them: row-major, queries above keys above values, the head tied to wte. Rows V to Vp - 1
    of wte are zero and no token has them. A rank reads its own rows alone: a piece is found by arithmetic, and nothing else is read. Numbers are
    little-endian, offsets 64-bit. Writing goes to PATH.tmp, which takes the place of PATH once it is whole.

    Every thread may read at once. A function that fails leaves nothing open and no file behind; its line names the file and what to do. */
#ifndef DDP_EXAMPLE_LLMC_H
#define DDP_EXAMPLE_LLMC_H

#ifndef GPT_H
#include "../gpt/gpt.h"
#endif
#include "sources.h"

typedef struct llmc_header {
    gpt_config config; /* vocab is V, without padding */
    int padded_vocab; /* rows of wte in the file, V or more; 0 when writing = V up to a multiple of 128, as llm.c has it */
    ddp_dtype dtype; /* DDP_F32 or DDP_BF16; DDP_DTYPE_DEFAULT when writing = DDP_F32 */
} llmc_header;

typedef struct llmc_model {
    llmc_header header;
    /* the rest is private */
    int file, is_open;
    char path[301];
} llmc_model;

/* Writes rows [first, first + count) of parameter `index` to out, in f32. A vector of C has C rows of one element. */
typedef ddp_result (*llmc_rows_fn)(void *user, int index, int64_t first, int64_t count, float *out);

enum {
    LLMC_MAGIC = 20240326,
    LLMC_VERSION_F32 = 3,
    LLMC_VERSION_BF16 = 5,
    LLMC_HEADER_BYTES = 256 * 4,
    LLMC_PIECE = 1 << 18 /* elements at a time */
};

//== layout =================================================================================================

static inline int llmc__element_bytes(const llmc_header *h) { return h->dtype == DDP_BF16 ? 2 : 4; }

/* Bytes of the file with this header; -1: 64 bits do not hold them. */
static inline int64_t llmc_file_bytes(const llmc_header *h) {
    const gpt_config *c = &h->config;
    int64_t C = c->channels, blocks, rest;
    if (__builtin_mul_overflow(C, 12 * C + 13, &blocks)
        || __builtin_mul_overflow(blocks, (int64_t)c->layers, &blocks)
        || __builtin_mul_overflow(C, (int64_t)h->padded_vocab + c->context + 2, &rest)
        || __builtin_add_overflow(blocks, rest, &rest)
        || __builtin_mul_overflow(rest, (int64_t)llmc__element_bytes(h), &rest)
        || __builtin_add_overflow(rest, (int64_t)LLMC_HEADER_BYTES, &rest))
        return -1;
    return rest;
}

/* Elements before parameter `index`, and what the parameter is; of wte and the head, which shares it, with the padded rows. */
static inline int64_t llmc__place(const llmc_header *h, int index, gpt_param *p) {
    const gpt_config *c = &h->config;
    int64_t before = 0;
    int layer = (index - 2) / GPT_BLOCK_PARAMS, kind = (index - 2) % GPT_BLOCK_PARAMS;
    gpt_param_info(c, index, p);
    if (index == 0 || p->tied_to == 0) {
        p->shape[0] = h->padded_vocab;
        return 0;
    }
    if (index == 1) return (int64_t)h->padded_vocab * c->channels;
    before = ((int64_t)h->padded_vocab + c->context) * c->channels;
    if (layer == c->layers) {
        layer = 0;
        kind = GPT_BLOCK_PARAMS;
    } /* behind the blocks */
    for (int k = 0; c->layers && k < kind; k++) {
        gpt_param other;
        gpt_param_info(c, 2 + k, &other);
        before += other.count * c->layers;
    }
    if (p->unit == c->layers + 1) return before + (index == gpt_param_count(c) - 2 ? c->channels : 0);
    return before + p->count * layer;
}

/* NULL, or what is wrong with a header, as the end of a sentence. */
static inline const char *llmc__check(const llmc_header *h) {
    const char *wrong = gpt_config_check(&h->config);
    if (wrong) return wrong;
    if (h->padded_vocab < h->config.vocab) return "padded_vocab must not be less than vocab";
    if (h->config.layers > INT32_MAX / 16 || llmc_file_bytes(h) < 0) return "so large a model fits no file";
    return NULL;
}

//== numbers ================================================================================================

/* The nearest bf16, ties to even; NaN stays NaN. */
static inline uint16_t llmc_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float llmc_from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

//== reading ================================================================================================

/* What a file is that begins with another number. */
static inline const char *llmc__kind(int32_t magic) {
    return magic == TEXT_SHARD_MAGIC                ? "a token shard of llm.c"
           : magic == 20240327                      ? "a debug state of llm.c"
           : magic == 20240328                      ? "a tokenizer of llm.c"
           : magic == 20240801 || magic == 20240803 ? "a file of llm.c for Llama 3"
                                                    : "no checkpoint of llm.c";
}

static inline ddp_result llmc__read_header(llmc_model *m) {
    llmc_header *h = &m->header;
    int32_t head[8];
    struct stat info;
    const char *wrong;
    ddp_result result;
    if (fstat(m->file, &info) != 0 || !S_ISREG(info.st_mode))
        return ddp_fail(DDP_ERR_INVALID, "%s is no file; give a checkpoint of llm.c", m->path);
    if (info.st_size < LLMC_HEADER_BYTES)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s ends inside its header of %d bytes, at byte %lld; fetch the file again", m->path,
                        LLMC_HEADER_BYTES, (long long)info.st_size);
    result = text_pread(m->file, m->path, head, sizeof head, 0);
    if (result != DDP_OK) return result;
    if (head[0] != LLMC_MAGIC)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s is %s: it begins with %d, not %d; give a GPT-2 checkpoint, such as gpt2_124M.bin",
                        m->path, llmc__kind(head[0]), (int)head[0], LLMC_MAGIC);
    if (head[1] != LLMC_VERSION_F32 && head[1] != LLMC_VERSION_BF16)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "%s: version %d; %d (f32) and %d (bf16) can be read: write it again by llm.c of May "
                        "2024 or later",
                        m->path, (int)head[1], LLMC_VERSION_F32, LLMC_VERSION_BF16);
    h->dtype = head[1] == LLMC_VERSION_F32 ? DDP_F32 : DDP_BF16;
    h->config.context = head[2], h->config.vocab = head[3], h->config.layers = head[4],
    h->config.heads = head[5], h->config.channels = head[6];
    h->padded_vocab = head[7];
    wrong = llmc__check(h);
    if (wrong)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s: its header says context=%d vocab=%d layers=%d heads=%d channels=%d "
                        "padded_vocab=%d, but %s; fetch the file again",
                        m->path, (int)head[2], (int)head[3], (int)head[4], (int)head[5], (int)head[6],
                        (int)head[7], wrong);
    if (info.st_size != llmc_file_bytes(h))
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s has %lld bytes, and its header describes %lld; fetch the file again", m->path,
                        (long long)info.st_size, (long long)llmc_file_bytes(h));
    return DDP_OK;
}

/* m may be zero, or closed. */
static inline void llmc_close(llmc_model *m) {
    if (m->is_open) close(m->file);
    memset(m, 0, sizeof *m);
}

static inline ddp_result llmc_open(llmc_model *m, const char *path) {
    ddp_result result;
    memset(m, 0, sizeof *m);
    snprintf(m->path, sizeof m->path, "%s", path);
    m->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (m->file < 0)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; give a checkpoint of llm.c that can be read", m->path,
                        strerror(errno));
    m->is_open = 1;
    result = llmc__read_header(m);
    if (result != DDP_OK) llmc_close(m);
    return result;
}

/* Rows [first, first + rows) of parameter `index` to out, in f32. A vector of C has C rows of one element; wte and head.weight, which is the same,
   have padded_vocab rows. Touches nothing but these rows of the file. */
static inline ddp_result llmc_read(const llmc_model *m, int index, int64_t first, int64_t rows, float *out) {
    uint16_t half[8192];
    gpt_param p;
    int64_t at, left, size = llmc__element_bytes(&m->header), piece = (int64_t)(sizeof half / sizeof *half);
    if (!m->is_open)
        return ddp_fail(DDP_ERR_INVALID, "llmc_read: the checkpoint is not open; call llmc_open first");
    if (index < 0 || index >= gpt_param_count(&m->header.config))
        return ddp_fail(DDP_ERR_INVALID, "%s: parameter %d, but there are %d", m->path, index,
                        gpt_param_count(&m->header.config));
    at = llmc__place(&m->header, index, &p);
    if (first < 0 || rows < 0 || first > p.shape[0] || rows > p.shape[0] - first)
        return ddp_fail(DDP_ERR_INVALID,
                        "%s: %lld rows from %lld of %s, which has %lld; ask for rows that it has", m->path,
                        (long long)rows, (long long)first, p.name, (long long)p.shape[0]);
    at = LLMC_HEADER_BYTES + size * (at + first * p.shape[1]);
    left = rows * p.shape[1];
    if (m->header.dtype == DDP_F32) return text_pread(m->file, m->path, out, (size_t)left * 4, at);
    for (; left > 0; left -= piece, at += 2 * piece, out += piece) {
        if (piece > left) piece = left;
        ddp_result result = text_pread(m->file, m->path, half, (size_t)piece * 2, at);
        if (result != DDP_OK) return result;
        for (int64_t i = 0; i < piece; i++) out[i] = llmc_from_bf16(half[i]);
    }
    return DDP_OK;
}

//== writing ================================================================================================

/* A file on its way to its name. */
typedef struct llmc__writer {
    const char *path;
    FILE *file;
    int error; /* the errno of the first write that failed; llmc__end tells */
    char temporary[4096];
} llmc__writer;

static inline void llmc__out(llmc__writer *w, const void *data, size_t size_bytes) {
    if (!w->error && fwrite(data, 1, size_bytes, w->file) != size_bytes) w->error = errno;
}

static inline ddp_result llmc__begin(llmc__writer *w, const char *path, const int32_t *head, int count) {
    int32_t header[256] = {0};
    memcpy(header, head, (size_t)count * sizeof *head);
    w->path = path;
    w->error = 0;
    if (snprintf(w->temporary, sizeof w->temporary, "%s.tmp", path) >= (int)sizeof w->temporary)
        return ddp_fail(DDP_ERR_INVALID, "%.300s...: so long a path cannot be written; choose a shorter one",
                        path);
    w->file = fopen(w->temporary, "wb");
    if (!w->file)
        return ddp_fail(DDP_ERR_SYSTEM, "%.300s cannot be written: %s; choose a place where it can", path,
                        strerror(errno));
    llmc__out(w, header, sizeof header);
    return DDP_OK;
}

/* Puts the file in its place; or, where result says that something has failed or the file cannot be written, removes what there is of it. */
static inline ddp_result llmc__end(llmc__writer *w, ddp_result result) {
    if (result == DDP_OK && !w->error && (fflush(w->file) != 0 || fsync(fileno(w->file)) != 0))
        w->error = errno;
    if (fclose(w->file) != 0 && !w->error) w->error = errno;
    if (result == DDP_OK && !w->error) {
        if (rename(w->temporary, w->path) == 0) return DDP_OK;
        w->error = errno;
    }
    unlink(w->temporary);
    return result != DDP_OK
               ? result
               : ddp_fail(DDP_ERR_SYSTEM, "%.300s cannot be written: %s; what was there is untouched",
                          w->path, strerror(w->error));
}

/* One parameter; the rows of wte behind V are zero. piece has room for capacity elements. */
static inline ddp_result llmc__put(llmc__writer *w, const llmc_header *h, int index, llmc_rows_fn rows,
                                   void *user, float *piece, int64_t capacity) {
    gpt_param p;
    int64_t given, step;
    ddp_result result = DDP_OK;
    gpt_param_info(&h->config, index, &p);
    given = p.shape[0];
    if (index == 0) p.shape[0] = h->padded_vocab;
    step = capacity / p.shape[1];
    for (int64_t first = 0, count; result == DDP_OK && !w->error && first < p.shape[0]; first += count) {
        int64_t end = first < given ? given : p.shape[0];
        count = end - first < step ? end - first : step;
        memset(piece, 0, (size_t)(count * p.shape[1]) * sizeof *piece);
        if (first < given) result = rows(user, index, first, count, piece);
        if (h->dtype == DDP_BF16) {
            uint8_t *out = (uint8_t *)
                piece; /* in place: an element is read before something is written over it */
            for (int64_t i = 0; i < count * p.shape[1]; i++) {
                uint16_t half = llmc_to_bf16(piece[i]);
                memcpy(out + 2 * i, &half, 2);
            }
        }
        if (result == DDP_OK) llmc__out(w, piece, (size_t)(count * p.shape[1] * llmc__element_bytes(h)));
    }
    return result;
}

/* The header with defaults filled in. */
static inline llmc_header llmc__resolve(const llmc_header *header) {
    llmc_header h = *header;
    if (h.dtype == DDP_DTYPE_DEFAULT) h.dtype = DDP_F32;
    if (h.padded_vocab == 0 && h.config.vocab <= INT32_MAX - 127)
        h.padded_vocab = (h.config.vocab + 127) / 128 * 128;
    return h;
}

/* Writes a checkpoint; rows is asked once for every row, kind by kind, layer by layer, at most LLMC_PIECE elements (or one row) at a time; never for
   head.weight. What it returns other than DDP_OK ends the writing and is returned. */
static inline ddp_result llmc_write(const char *path, const llmc_header *header, llmc_rows_fn rows,
                                    void *user) {
    llmc_header h = llmc__resolve(header);
    const gpt_config *c = &h.config;
    const char *wrong = h.dtype != DDP_F32 && h.dtype != DDP_BF16 ? "its elements can be f32 or bf16 only"
                                                                  : llmc__check(&h);
    int64_t capacity = LLMC_PIECE;
    ddp_result result;
    llmc__writer w;
    float *piece;
    int32_t head[8] = {LLMC_MAGIC,  h.dtype == DDP_F32 ? LLMC_VERSION_F32 : LLMC_VERSION_BF16,
                       c->context,  c->vocab,
                       c->layers,   c->heads,
                       c->channels, h.padded_vocab};
    if (wrong)
        return ddp_fail(DDP_ERR_INVALID, "%.300s: a checkpoint of this shape cannot be: %s", path, wrong);
    if (capacity < 4 * (int64_t)c->channels)
        capacity = 4 * (int64_t)c->channels; /* the longest row is that of mlp.proj.weight */
    piece = (float *)malloc((size_t)capacity * sizeof *piece);
    if (!piece)
        return ddp_fail(DDP_ERR_NO_MEMORY, "%.300s: %lld elements on their way to it", path,
                        (long long)capacity);
    result = llmc__begin(&w, path, head, 8);
    if (result != DDP_OK) {
        free(piece);
        return result;
    }
    for (int index = 0; result == DDP_OK && index < 2; index++)
        result = llmc__put(&w, &h, index, rows, user, piece, capacity);
    for (int kind = 0; kind < GPT_BLOCK_PARAMS; kind++)
        for (int layer = 0; result == DDP_OK && layer < c->layers; layer++)
            result = llmc__put(&w, &h, gpt_block_first_param(layer) + kind, rows, user, piece, capacity);
    for (int index = gpt_param_head(c) - 2; result == DDP_OK && index < gpt_param_head(c); index++)
        result = llmc__put(&w, &h, index, rows, user, piece, capacity);
    free(piece);
    return llmc__end(&w, result);
}

typedef struct llmc__drawn {
    const gpt_config *config;
    uint64_t seed;
} llmc__drawn;

static inline ddp_result llmc__draw(void *user, int index, int64_t first, int64_t count, float *out) {
    const llmc__drawn *d = (const llmc__drawn *)user;
    gpt_param p;
    gpt_param_info(d->config, index, &p);
    gpt_param_init(d->config, d->seed, index, first * p.shape[1], count * p.shape[1], out);
    return DDP_OK;
}

/* GPT-2 124M as llm.c has it; the dtype is still to be set. */
static inline llmc_header llmc_gpt2_124m(void) {
    llmc_header h;
    memset(&h, 0, sizeof h);
    h.config.vocab = 50257, h.config.context = 1024, h.config.layers = 12, h.config.heads = 12,
    h.config.channels = 768;
    h.padded_vocab = 50304;
    return h;
}

/* Writes a checkpoint of first values, as gpt_param_init draws them from the seed. */
static inline ddp_result llmc_write_random(const char *path, const llmc_header *header, uint64_t seed) {
    llmc__drawn d;
    d.config = &header->config;
    d.seed = seed;
    return llmc_write(path, header, llmc__draw, &d);
}

//== token shards ===========================================================================================

/* Writes a shard in pieces: tokens of dtype DDP_U8 or DDP_I32, or, where tokens is NULL, random ones below `limit`. */
static inline ddp_result llmc__write_shard(const char *path, const void *tokens, ddp_dtype dtype,
                                           int64_t count, int limit, uint64_t seed) {
    int32_t head[3] = {TEXT_SHARD_MAGIC, 1, (int32_t)count};
    uint16_t piece[4096];
    llmc__writer w;
    ddp_result result;
    if (count < 1 || count > INT32_MAX)
        return ddp_fail(DDP_ERR_INVALID, "%.300s: %lld tokens; a shard holds 1 to %d: write several", path,
                        (long long)count, INT32_MAX);
    result = llmc__begin(&w, path, head, 3);
    if (result != DDP_OK) return result;
    for (int64_t first = 0; !w.error && first < count; first += 4096) {
        int n = count - first < 4096 ? (int)(count - first) : 4096;
        for (int i = 0; i < n; i++) {
            int64_t at = first + i, token = !tokens
                                                ? (int64_t)(gpt_random(seed, (uint64_t)at) % (uint64_t)limit)
                                            : dtype == DDP_U8 ? ((const uint8_t *)tokens)[at]
                                                              : ((const int32_t *)tokens)[at];
            if (token < 0 || token > 65535)
                return llmc__end(&w, ddp_fail(DDP_ERR_INVALID,
                                              "%.300s: token %lld is %lld; a shard holds 0 to 65535", path,
                                              (long long)at, (long long)token));
            piece[i] = (uint16_t)token;
        }
        llmc__out(&w, piece, 2 * (size_t)n);
    }
    return llmc__end(&w, DDP_OK);
}

/* Writes count tokens, DDP_U8 (bytes as tokens) or DDP_I32, as a shard. */
static inline ddp_result llmc_write_tokens(const char *path, const void *tokens, ddp_dtype dtype,
                                           int64_t count) {
    if (!tokens || (dtype != DDP_U8 && dtype != DDP_I32))
        return ddp_fail(DDP_ERR_INVALID, "%.300s: tokens are of dtype u8 or i32; give such", path);
    return llmc__write_shard(path, tokens, dtype, count, 0, 0);
}

/* Writes count tokens from 0 to vocab - 1 drawn from the seed: data to measure with. */
static inline ddp_result llmc_write_random_tokens(const char *path, int64_t count, int vocab, uint64_t seed) {
    if (vocab < 1 || vocab > 65536)
        return ddp_fail(DDP_ERR_INVALID, "%.300s: vocab=%d; tokens of a shard take 1 to 65536", path, vocab);
    return llmc__write_shard(path, NULL, DDP_I32, count, vocab, seed);
}

#endif /* DDP_EXAMPLE_LLMC_H */

/* MIT License: see LICENSE. */

/*  llmc.h - reads and writes the files of llm.c (Karpathy 2024): GPT-2 checkpoints and token shards.

USAGE
    Copy it together with gpt.h, sources.h, text.h and npy.h next to ddp.h. Include gpt.h before it.
    All functions are static.

EXAMPLE
    llmc_model m;
    llmc_open(&m, "gpt2_124M.bin");             // sets m.header.config, .padded_vocab, .dtype
    llmc_read(&m, index, first, rows, out);     // rows of parameter `index` of gpt_param_info, as f32
    llmc_close(&m);

    llmc_write("out.bin", &header, rows_fn, user);          // calls rows_fn for the rows of every parameter
    llmc_write_tokens("text.bin", bytes, DDP_U8, count);    // source_open_tokens of sources.h reads it

CONCEPTS
    A checkpoint has a header of 256 int32 (magic, version, context, V, layers, heads, C, padded vocabulary
    Vp), followed by the parameters in f32 or bf16. All L layers of a parameter are stored together:

        wte (Vp, C)   wpe (context, C)   ln1.weight (L, C)   ln1.bias (L, C)   attn.qkv.weight (L, 3C, C)
        ...   ln_f.weight (C)   ln_f.bias (C)

    Otherwise the layout is that of gpt.h: row-major, queries before keys before values, head tied to wte.
    Rows V to Vp - 1 of wte are padding and zero. Numbers are little-endian, offsets have 64 bits.
    llmc_read computes the offset of the rows and reads nothing else: each rank can read only its own shard.
    Any number of threads may call it at the same time.
    Files are written to PATH.tmp, which is renamed to PATH when it is complete.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). Lines name the file and the remedy. After an error no file
    is open, PATH is unchanged and PATH.tmp is removed.

NOT DONE HERE
    No optimizer state of llm.c, no Llama 3, no tokenizer, no big-endian machines.
*/
#ifndef DDP_EXAMPLE_LLMC_H
#define DDP_EXAMPLE_LLMC_H

#ifndef GPT_H
#include "../gpt/gpt.h"
#endif
#include "sources.h"

typedef struct llmc_header {
    gpt_config config; /* vocab is V, without padding */
    int padded_vocab;  /* rows of wte in the file; llmc_write: 0 = V rounded up to a multiple of 128 */
    ddp_dtype dtype;   /* DDP_F32 or DDP_BF16; llmc_write: DDP_DTYPE_DEFAULT = DDP_F32 */
} llmc_header;

typedef struct llmc_model {
    llmc_header header;
    /* private */
    int file, is_open;
    char path[301];
} llmc_model;

/* Callback of llmc_write. Copies rows [first, first + count) of parameter `index` to out, in f32. A vector of
   C elements has C rows of one element. */
typedef ddp_result (*llmc_rows_fn)(void *user, int index, int64_t first, int64_t count, float *out);

enum {
    LLMC_MAGIC = 20240326,
    LLMC_VERSION_F32 = 3,
    LLMC_VERSION_BF16 = 5,
    LLMC_HEADER_BYTES = 256 * 4,
    LLMC_PIECE = 1 << 18 /* elements per call of llmc_rows_fn */
};

//== layout =================================================================================================

static inline int llmc__element_bytes(const llmc_header *h) { return h->dtype == DDP_BF16 ? 2 : 4; }

/* Size of the file with this header, in bytes. -1 if it does not fit in 64 bits. */
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

/* Returns the offset of parameter `index` in elements and sets *p. For wte and for the head, which shares its
   values, p->shape[0] includes the padding rows. */
static inline int64_t llmc__offset(const llmc_header *h, int index, gpt_param *p) {
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
    if (layer == c->layers) { /* ln_f: all block parameters precede it */
        layer = 0;
        kind = GPT_BLOCK_PARAMS;
    }
    for (int k = 0; c->layers && k < kind; k++) {
        gpt_param other;
        gpt_param_info(c, 2 + k, &other);
        before += other.count * c->layers;
    }
    if (p->unit != c->layers + 1) return before + p->count * layer;
    return index == gpt_param_count(c) - 2 ? before + c->channels : before; /* ln_f.bias, ln_f.weight */
}

/* Returns NULL for a valid header, otherwise the error as the end of a sentence. */
static inline const char *llmc__check(const llmc_header *h) {
    const char *wrong = gpt_config_check(&h->config);
    if (wrong) return wrong;
    if (h->padded_vocab < h->config.vocab) return "padded_vocab must not be less than vocab";
    if (h->config.layers > INT32_MAX / 16 || llmc_file_bytes(h) < 0) return "the model is too large";
    return NULL;
}

//== numbers ================================================================================================

/* Rounds to the nearest bf16, ties to even. NaN stays NaN. */
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

/* Describes a file that is not a checkpoint, by its first number. */
static inline const char *llmc__describe(int32_t magic) {
    switch (magic) {
    case TEXT_SHARD_MAGIC: return "a token shard of llm.c";
    case 20240327: return "a debug state of llm.c";
    case 20240328: return "a tokenizer of llm.c";
    case 20240801:
    case 20240803: return "a file of llm.c for Llama 3";
    }
    return "not a checkpoint of llm.c";
}

/* Reads the header and checks it against the size of the file. */
static inline ddp_result llmc__read_header(llmc_model *m) {
    llmc_header *h = &m->header;
    int32_t head[8];
    struct stat info;
    const char *wrong;
    ddp_result result;
    if (fstat(m->file, &info) != 0 || !S_ISREG(info.st_mode))
        return ddp_fail(DDP_ERR_INVALID, "%s is not a regular file; pass a checkpoint of llm.c", m->path);
    if (info.st_size < LLMC_HEADER_BYTES)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s: truncated: it ends inside its header of %d bytes, at byte %lld; download it "
                        "again",
                        m->path, LLMC_HEADER_BYTES, (long long)info.st_size);
    result = text_pread(m->file, m->path, head, sizeof head, 0);
    if (result != DDP_OK) return result;
    if (head[0] != LLMC_MAGIC)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s is %s: it begins with %d, not %d; pass a GPT-2 checkpoint, such as gpt2_124M.bin",
                        m->path, llmc__describe(head[0]), (int)head[0], LLMC_MAGIC);
    if (head[1] != LLMC_VERSION_F32 && head[1] != LLMC_VERSION_BF16)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "%s: checkpoint version %d; %d (f32) and %d (bf16) are supported: write it again "
                        "with llm.c of May 2024 or later",
                        m->path, (int)head[1], LLMC_VERSION_F32, LLMC_VERSION_BF16);
    h->dtype = head[1] == LLMC_VERSION_F32 ? DDP_F32 : DDP_BF16;
    h->config.context = head[2];
    h->config.vocab = head[3];
    h->config.layers = head[4];
    h->config.heads = head[5];
    h->config.channels = head[6];
    h->padded_vocab = head[7];
    wrong = llmc__check(h);
    if (wrong)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s: invalid header: context=%d vocab=%d layers=%d heads=%d channels=%d "
                        "padded_vocab=%d: %s; download it again",
                        m->path, (int)head[2], (int)head[3], (int)head[4], (int)head[5], (int)head[6],
                        (int)head[7], wrong);
    if (info.st_size != llmc_file_bytes(h))
        return ddp_fail(DDP_ERR_CORRUPT, "%s has %lld bytes, but its header needs %lld; download it again",
                        m->path, (long long)info.st_size, (long long)llmc_file_bytes(h));
    return DDP_OK;
}

/* Closes the file and sets *m to zero. m may be zero or closed. */
static inline void llmc_close(llmc_model *m) {
    if (m->is_open) close(m->file);
    memset(m, 0, sizeof *m);
}

/* Opens a checkpoint and sets m->header. Close it with llmc_close. After an error *m is closed.
   Errors: DDP_ERR_INVALID (unreadable), DDP_ERR_CORRUPT, DDP_ERR_UNSUPPORTED (version), DDP_ERR_SYSTEM. */
static inline ddp_result llmc_open(llmc_model *m, const char *path) {
    ddp_result result;
    memset(m, 0, sizeof *m);
    snprintf(m->path, sizeof m->path, "%s", path);
    m->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (m->file < 0)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; pass a readable checkpoint of llm.c", m->path,
                        strerror(errno));
    m->is_open = 1;
    result = llmc__read_header(m);
    if (result != DDP_OK) llmc_close(m);
    return result;
}

/* Copies rows [first, first + rows) of parameter `index` to out, in f32. A vector of C elements has C rows
   of one element. wte and head.weight, which shares its values, have padded_vocab rows.
   Reads only these rows of the file. Thread-safe.
   Errors: DDP_ERR_INVALID (closed, index or rows out of range), DDP_ERR_CORRUPT (truncated),
   DDP_ERR_SYSTEM. */
static inline ddp_result llmc_read(const llmc_model *m, int index, int64_t first, int64_t rows, float *out) {
    uint16_t half[8192];
    gpt_param p;
    int64_t at, left, size = llmc__element_bytes(&m->header);
    int64_t piece = (int64_t)(sizeof half / sizeof *half);
    if (!m->is_open)
        return ddp_fail(DDP_ERR_INVALID, "llmc_read: the checkpoint is not open; call llmc_open first");
    if (index < 0 || index >= gpt_param_count(&m->header.config))
        return ddp_fail(DDP_ERR_INVALID, "llmc_read: %s: index=%d must be 0 or more and less than %d",
                        m->path, index, gpt_param_count(&m->header.config));
    at = llmc__offset(&m->header, index, &p);
    if (first < 0 || rows < 0 || first > p.shape[0] || rows > p.shape[0] - first)
        return ddp_fail(DDP_ERR_INVALID,
                        "llmc_read: %s: %s has %lld rows; first=%lld rows=%lld is out of range", m->path,
                        p.name, (long long)p.shape[0], (long long)first, (long long)rows);
    at = LLMC_HEADER_BYTES + size * (at + first * p.shape[1]);
    left = rows * p.shape[1];
    if (m->header.dtype == DDP_F32) return text_pread(m->file, m->path, out, (size_t)left * 4, at);
    while (left > 0) {
        if (piece > left) piece = left;
        DDP_TRY(text_pread(m->file, m->path, half, (size_t)piece * 2, at));
        for (int64_t i = 0; i < piece; i++) out[i] = llmc_from_bf16(half[i]);
        at += 2 * piece;
        out += piece;
        left -= piece;
    }
    return DDP_OK;
}

//== writing ================================================================================================

/* An output file. It is written to `temporary` and renamed to path at the end. */
typedef struct llmc__writer {
    const char *path;
    FILE *file;
    int error; /* errno of the first failed write; llmc__end returns it as an error */
    char temporary[4096];
} llmc__writer;

static inline void llmc__write(llmc__writer *w, const void *data, size_t size_bytes) {
    if (!w->error && fwrite(data, 1, size_bytes, w->file) != size_bytes) w->error = errno;
}

/* Creates the temporary file and writes a header of 256 int32: the `count` numbers of head, then zeros. */
static inline ddp_result llmc__begin(llmc__writer *w, const char *path, const int32_t *head, int count) {
    int32_t header[256] = {0};
    memcpy(header, head, (size_t)count * sizeof *head);
    w->path = path;
    w->error = 0;
    if (snprintf(w->temporary, sizeof w->temporary, "%s.tmp", path) >= (int)sizeof w->temporary)
        return ddp_fail(DDP_ERR_INVALID, "%.300s...: the path has more than %d bytes; choose a shorter one",
                        path, (int)sizeof w->temporary - 5);
    w->file = fopen(w->temporary, "wb");
    if (!w->file)
        return ddp_fail(DDP_ERR_SYSTEM, "%.300s cannot be written: %s; choose a writable folder", path,
                        strerror(errno));
    llmc__write(w, header, sizeof header);
    return DDP_OK;
}

/* Syncs the file and renames it to its path. If result is an error or a write has failed, removes the
   temporary file instead and returns the error. */
static inline ddp_result llmc__end(llmc__writer *w, ddp_result result) {
    if (result == DDP_OK && !w->error && (fflush(w->file) != 0 || fsync(fileno(w->file)) != 0))
        w->error = errno;
    if (fclose(w->file) != 0 && !w->error) w->error = errno;
    if (result == DDP_OK && !w->error) {
        if (rename(w->temporary, w->path) == 0) return DDP_OK;
        w->error = errno;
    }
    unlink(w->temporary);
    if (result != DDP_OK) return result;
    return ddp_fail(DDP_ERR_SYSTEM, "%.300s cannot be written: %s; the old file is unchanged", w->path,
                    strerror(w->error));
}

/* Writes one parameter. Rows V to Vp - 1 of wte are zero. piece is a buffer of `capacity` elements. */
static inline ddp_result llmc__write_param(llmc__writer *w, const llmc_header *h, int index,
                                           llmc_rows_fn rows, void *user, float *piece, int64_t capacity) {
    gpt_param p;
    int64_t given, step;
    ddp_result result = DDP_OK;
    gpt_param_info(&h->config, index, &p);
    given = p.shape[0]; /* rows that the callback has */
    if (index == 0) p.shape[0] = h->padded_vocab;
    step = capacity / p.shape[1];
    for (int64_t first = 0, count; result == DDP_OK && !w->error && first < p.shape[0]; first += count) {
        int64_t end = first < given ? given : p.shape[0];
        count = end - first < step ? end - first : step;
        memset(piece, 0, (size_t)(count * p.shape[1]) * sizeof *piece);
        if (first < given) result = rows(user, index, first, count, piece);
        if (h->dtype == DDP_BF16) {
            uint8_t *out = (uint8_t *)piece; /* in place: element i is read before it is overwritten */
            for (int64_t i = 0; i < count * p.shape[1]; i++) {
                uint16_t half = llmc_to_bf16(piece[i]);
                memcpy(out + 2 * i, &half, 2);
            }
        }
        if (result == DDP_OK) llmc__write(w, piece, (size_t)(count * p.shape[1] * llmc__element_bytes(h)));
    }
    return result;
}

/* Returns the header with defaults resolved. */
static inline llmc_header llmc__resolve(const llmc_header *header) {
    llmc_header h = *header;
    if (h.dtype == DDP_DTYPE_DEFAULT) h.dtype = DDP_F32;
    if (h.padded_vocab == 0 && h.config.vocab <= INT32_MAX - 127)
        h.padded_vocab = (h.config.vocab + 127) / 128 * 128;
    return h;
}

/* Writes a checkpoint. Calls `rows` once for every row, in the order of the file, with at most LLMC_PIECE
   elements or one row per call. Does not call it for head.weight, which shares the values of wte.
   An error of `rows` ends the call and is returned; its ddp_last_error() is kept.
   Errors: DDP_ERR_INVALID (header, path too long), DDP_ERR_SYSTEM, DDP_ERR_NO_MEMORY, those of `rows`. */
static inline ddp_result llmc_write(const char *path, const llmc_header *header, llmc_rows_fn rows,
                                    void *user) {
    llmc_header h = llmc__resolve(header);
    const gpt_config *c = &h.config;
    const char *wrong = llmc__check(&h);
    int64_t capacity = LLMC_PIECE;
    ddp_result result;
    llmc__writer w;
    float *piece;
    int32_t version = h.dtype == DDP_F32 ? LLMC_VERSION_F32 : LLMC_VERSION_BF16;
    int32_t head[8] = {LLMC_MAGIC, version,  c->context,  c->vocab,
                       c->layers,  c->heads, c->channels, h.padded_vocab};
    if (h.dtype != DDP_F32 && h.dtype != DDP_BF16) wrong = "dtype must be f32 or bf16";
    if (wrong) return ddp_fail(DDP_ERR_INVALID, "llmc_write: %.300s: invalid header: %s", path, wrong);
    if (capacity < 4 * (int64_t)c->channels)
        capacity = 4 * (int64_t)c->channels; /* the longest row is that of mlp.proj.weight */
    piece = (float *)malloc((size_t)capacity * sizeof *piece);
    if (!piece)
        return ddp_fail(DDP_ERR_NO_MEMORY, "llmc_write: %.300s: buffer of %lld elements", path,
                        (long long)capacity);
    result = llmc__begin(&w, path, head, 8);
    if (result != DDP_OK) {
        free(piece);
        return result;
    }
    for (int index = 0; result == DDP_OK && index < 2; index++)
        result = llmc__write_param(&w, &h, index, rows, user, piece, capacity);
    for (int kind = 0; kind < GPT_BLOCK_PARAMS; kind++)
        for (int layer = 0; result == DDP_OK && layer < c->layers; layer++)
            result = llmc__write_param(&w, &h, gpt_block_first_param(layer) + kind, rows, user, piece,
                                       capacity);
    for (int index = gpt_param_head(c) - 2; result == DDP_OK && index < gpt_param_head(c); index++)
        result = llmc__write_param(&w, &h, index, rows, user, piece, capacity);
    free(piece);
    return llmc__end(&w, result);
}

typedef struct llmc__random {
    const gpt_config *config;
    uint64_t seed;
} llmc__random;

static inline ddp_result llmc__random_rows(void *user, int index, int64_t first, int64_t count, float *out) {
    const llmc__random *d = (const llmc__random *)user;
    gpt_param p;
    gpt_param_info(d->config, index, &p);
    gpt_param_init(d->config, d->seed, index, first * p.shape[1], count * p.shape[1], out);
    return DDP_OK;
}

/* Header of GPT-2 124M in llm.c. The dtype is not set. */
static inline llmc_header llmc_gpt2_124m(void) {
    llmc_header h;
    memset(&h, 0, sizeof h);
    h.config.vocab = 50257;
    h.config.context = 1024;
    h.config.layers = 12;
    h.config.heads = 12;
    h.config.channels = 768;
    h.padded_vocab = 50304;
    return h;
}

/* Writes a checkpoint of initial values, drawn from the seed by gpt_param_init. */
static inline ddp_result llmc_write_random(const char *path, const llmc_header *header, uint64_t seed) {
    llmc__random d;
    d.config = &header->config;
    d.seed = seed;
    return llmc_write(path, header, llmc__random_rows, &d);
}

//== token shards ===========================================================================================

/* Token i of an array of DDP_U8 or DDP_I32. tokens NULL: a random token below `limit`. */
static inline int64_t llmc__token(const void *tokens, ddp_dtype dtype, int64_t i, int limit, uint64_t seed) {
    if (!tokens) return (int64_t)(gpt_random(seed, (uint64_t)i) % (uint64_t)limit);
    if (dtype == DDP_U8) return ((const uint8_t *)tokens)[i];
    return ((const int32_t *)tokens)[i];
}

/* Writes a shard. Arguments as for llmc__token. */
static inline ddp_result llmc__write_shard(const char *path, const void *tokens, ddp_dtype dtype,
                                           int64_t count, int limit, uint64_t seed) {
    int32_t head[3] = {TEXT_SHARD_MAGIC, 1, (int32_t)count};
    uint16_t piece[4096];
    llmc__writer w;
    ddp_result result;
    if (count < 1 || count > INT32_MAX)
        return ddp_fail(DDP_ERR_INVALID,
                        "%.300s: count=%lld; a shard has 1 to %d tokens: write several shards", path,
                        (long long)count, INT32_MAX);
    DDP_TRY(llmc__begin(&w, path, head, 3));
    for (int64_t first = 0; !w.error && first < count; first += 4096) {
        int n = count - first < 4096 ? (int)(count - first) : 4096;
        for (int i = 0; i < n; i++) {
            int64_t token = llmc__token(tokens, dtype, first + i, limit, seed);
            if (token < 0 || token > 65535) {
                result = ddp_fail(DDP_ERR_INVALID, "%.300s: token %lld is %lld; use tokens from 0 to 65535",
                                  path, (long long)(first + i), (long long)token);
                return llmc__end(&w, result);
            }
            piece[i] = (uint16_t)token;
        }
        llmc__write(&w, piece, 2 * (size_t)n);
    }
    return llmc__end(&w, DDP_OK);
}

/* Writes `count` tokens as a shard. dtype: DDP_U8 (bytes as tokens) or DDP_I32.
   Errors: DDP_ERR_INVALID (dtype, count, a token outside 0 to 65535), DDP_ERR_SYSTEM. */
static inline ddp_result llmc_write_tokens(const char *path, const void *tokens, ddp_dtype dtype,
                                           int64_t count) {
    if (!tokens || (dtype != DDP_U8 && dtype != DDP_I32))
        return ddp_fail(DDP_ERR_INVALID,
                        "llmc_write_tokens: %.300s: tokens is NULL, or dtype is not DDP_U8 or DDP_I32", path);
    return llmc__write_shard(path, tokens, dtype, count, 0, 0);
}

/* Writes `count` random tokens from 0 to vocab - 1 as a shard, for benchmarks. */
static inline ddp_result llmc_write_random_tokens(const char *path, int64_t count, int vocab, uint64_t seed) {
    if (vocab < 1 || vocab > 65536)
        return ddp_fail(DDP_ERR_INVALID, "llmc_write_random_tokens: %.300s: vocab=%d must be 1 to 65536",
                        path, vocab);
    return llmc__write_shard(path, NULL, DDP_I32, count, vocab, seed);
}

#endif /* DDP_EXAMPLE_LLMC_H */

/* MIT License: see LICENSE. */

/* examples/extras/llmc.h: checkpoints against a layout that is written out here, whole and in parts, in f32 and
   bf16; shards; every possible error of a file, with its name. No large file is written: those of GPT-2's
   sizes are sparse. */
#include "../support/folder.h"
#include "../support/watchdog.h"

#include "../../examples/extras/llmc.h"
#include <sys/resource.h>

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

//== files of a test ========================================================================================

/* The whole file; the caller frees it. */
static uint8_t *get(const char *name, size_t *size_bytes) {
    FILE *file = fopen(path_of(name), "rb");
    uint8_t *bytes = (uint8_t *)malloc(1 << 22);
    assert_non_null(file);
    assert_non_null(bytes);
    *size_bytes = fread(bytes, 1, 1 << 22, file);
    fclose(file);
    return bytes;
}

static void says(ddp_result result, ddp_result wanted, const char *name, const char *words) {
    if (result != wanted || !strstr(ddp_last_error(), name) || !strstr(ddp_last_error(), words))
        fail_msg("%s: %s `%s`, wanted %s with `%s`", name, ddp_result_name(result),
                 result ? ddp_last_error() : "", ddp_result_name(wanted), words);
}

static int is_there(const char *name) { return access(path_of(name), F_OK) == 0; }

static llmc_header shape(int vocab, int padded, int context, int layers, int heads, int channels,
                         ddp_dtype dtype) {
    llmc_header h;
    memset(&h, 0, sizeof h);
    h.config.vocab = vocab, h.config.context = context, h.config.layers = layers, h.config.heads = heads,
    h.config.channels = channels;
    h.padded_vocab = padded;
    h.dtype = dtype;
    return h;
}

/* Element i of parameter index: exact in bf16 too, and different from its neighbours in the list, the layer
   and the row. */
static float value_of(int index, int64_t i) { return (float)((index * 37 + i * 11) % 251 - 125) / 8; }

typedef struct asked {
    const gpt_config *config;
    int calls, fail_at;
    int64_t most;
} asked;

static ddp_result give_rows(void *user, int index, int64_t first, int64_t count, float *out) {
    asked *a = (asked *)user;
    gpt_param p;
    assert_int_equal(gpt_param_info(a->config, index, &p), 0);
    assert_true(p.tied_to < 0 && first >= 0 && count > 0 && first + count <= p.shape[0]);
    if (a->calls++ == a->fail_at) return ddp_fail(DDP_ERR_TIMEOUT, "the rows of %s did not come", p.name);
    if (count * p.shape[1] > a->most) a->most = count * p.shape[1];
    for (int64_t i = 0; i < count * p.shape[1]; i++) out[i] = value_of(index, first * p.shape[1] + i);
    return DDP_OK;
}

static void write_model(const char *name, const llmc_header *h, asked *a) {
    memset(a, 0, sizeof *a);
    a->config = &h->config;
    a->fail_at = -1;
    assert_int_equal(llmc_write(path_of(name), h, give_rows, a), DDP_OK);
    assert_false(is_there("m.bin.tmp"));
}

//== checkpoints ============================================================================================

/* One number of a file, as f32. */
static float number_at(const uint8_t *bytes, ddp_dtype dtype, int64_t element) {
    float value;
    uint16_t half;
    uint32_t bits;
    if (dtype == DDP_F32) return memcpy(&value, bytes + LLMC_HEADER_BYTES + 4 * element, 4), value;
    memcpy(&half, bytes + LLMC_HEADER_BYTES + 2 * element, 2);
    bits = (uint32_t)half << 16;
    return memcpy(&value, &bits, 4), value;
}

/* The bytes of a small file are those of llm.c's documentation: header, wte with its padding, wpe, each kind
   with all its layers, the last norm. */
static void test_layout(void **state) {
    /* Elements per layer of C = 6. */
    static const int64_t kinds[12] = {6, 6, 108, 18, 36, 6, 6, 6, 144, 24, 144, 6};
    static const ddp_dtype dtypes[2] = {DDP_F32, DDP_BF16};
    (void)state;
    for (int d = 0; d < 2; d++) {
        llmc_header h = shape(5, 8, 3, 2, 2, 6, dtypes[d]);
        int32_t head[256], wanted[256] = {20240326, d ? 5 : 3, 3, 5, 2, 2, 6, 8};
        int64_t at = 0;
        size_t size;
        asked a;
        uint8_t *bytes;
        write_model("m.bin", &h, &a);
        bytes = get("m.bin", &size);
        assert_int_equal(size, llmc_file_bytes(&h));
        memcpy(head, bytes, sizeof head);
        assert_memory_equal(head, wanted, sizeof head);
        for (int i = 0; i < 48; i++, at++)
            assert_true(number_at(bytes, h.dtype, at) == (i < 30 ? value_of(0, i) : 0));
        for (int i = 0; i < 18; i++, at++) assert_true(number_at(bytes, h.dtype, at) == value_of(1, i));
        for (int kind = 0; kind < 12; kind++)
            for (int layer = 0; layer < 2; layer++)
                for (int i = 0; i < kinds[kind]; i++, at++)
                    assert_true(number_at(bytes, h.dtype, at) == value_of(2 + 12 * layer + kind, i));
        for (int i = 0; i < 12; i++, at++)
            assert_true(number_at(bytes, h.dtype, at) == value_of(26 + i / 6, i % 6));
        assert_int_equal(size, LLMC_HEADER_BYTES + at * (d ? 2 : 4));
        free(bytes);
    }
}

/* Every run of rows of every parameter is read as written, and nothing after it is touched. */
static void test_rows(void **state) {
    static const llmc_header shapes[] = {
        {{5, 3, 2, 2, 6}, 8, DDP_F32},
        {{5, 3, 2, 2, 6}, 8, DDP_BF16},
        {{4, 1, 1, 1, 2}, 4, DDP_BF16},
        {{3, 2, 0, 1, 4}, 3, DDP_F32},
    };
    (void)state;
    for (int k = 0; k < COUNT(shapes); k++) {
        const llmc_header *h = &shapes[k];
        llmc_model m;
        asked a;
        write_model("m.bin", h, &a);
        assert_int_equal(llmc_open(&m, path_of("m.bin")), DDP_OK);
        assert_memory_equal(&m.header.config, &h->config, sizeof h->config);
        assert_int_equal(m.header.padded_vocab, h->padded_vocab);
        assert_int_equal(m.header.dtype, h->dtype);
        for (int index = 0; index < gpt_param_count(&h->config); index++) {
            gpt_param p;
            int64_t rows;
            gpt_param_info(&h->config, index, &p);
            rows = index == 0 || p.tied_to == 0 ? h->padded_vocab : p.shape[0];
            for (int64_t first = 0; first <= rows; first++)
                for (int64_t n = 0; n <= rows - first; n++) {
                    float out[256];
                    out[n * p.shape[1]] = 77;
                    assert_int_equal(llmc_read(&m, index, first, n, out), DDP_OK);
                    for (int64_t i = 0; i < n * p.shape[1]; i++) {
                        int64_t at = first * p.shape[1] + i;
                        assert_true(out[i] == (at < p.count ? value_of(p.tied_to == 0 ? 0 : index, at) : 0));
                    }
                    assert_true(out[n * p.shape[1]] == 77);
                }
        }
        llmc_close(&m);
        llmc_close(&m); /* a closed one is fine too */
    }
}

/* Pieces: a table of several, rows longer than one, and no more memory than that. */
static void test_pieces(void **state) {
    llmc_header h = shape(40001, 0, 1, 1, 1, 8, DDP_BF16),
                wide = shape(1, 1, 1, 0, 1, LLMC_PIECE / 4 + 1, DDP_F32);
    llmc_model m;
    asked a;
    float *all = (float *)malloc(40064 * 8 * sizeof *all), row[8];
    (void)state;
    assert_non_null(all);
    write_model("m.bin", &h, &a);
    assert_int_equal(a.most, LLMC_PIECE);
    assert_int_equal(llmc_open(&m, path_of("m.bin")), DDP_OK);
    assert_int_equal(m.header.padded_vocab, 40064); /* the next multiple of 128 */
    assert_int_equal(llmc_read(&m, 0, 0, 40064, all), DDP_OK);
    for (int i = 0; i < 40064 * 8; i++) assert_true(all[i] == (i < 40001 * 8 ? value_of(0, i) : 0));
    assert_int_equal(llmc_read(&m, 0, 39999, 1, row), DDP_OK);
    assert_memory_equal(row, all + 39999 * 8, sizeof row);
    llmc_close(&m);
    free(all);
    write_model("m.bin", &wide, &a);
    assert_int_equal(llmc_open(&m, path_of("m.bin")), DDP_OK);
    llmc_close(&m);
}

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Nearest, ties to even. Overflow gives infinity. NaN stays NaN even if its bits would round to infinity. */
static void test_bf16(void **state) {
    static const uint32_t cases[][2] = {
        {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81},
        {0x3f818000, 0x3f82}, {0x3f817fff, 0x3f81}, {0, 0},
        {0x80000000, 0x8000}, {0x7f7fffff, 0x7f80}, {0x7f800000, 0x7f80},
        {0xff800000, 0xff80}, {0x00008000, 0},      {0x00018000, 2},
        {0xbf80ffff, 0xbf81},
    };
    (void)state;
    for (int i = 0; i < COUNT(cases); i++) {
        if (llmc_to_bf16(from_bits(cases[i][0])) != cases[i][1])
            fail_msg("%08x becomes %04x, not %04x", (unsigned)cases[i][0],
                     (unsigned)llmc_to_bf16(from_bits(cases[i][0])), (unsigned)cases[i][1]);
    }
    assert_true(isnan(llmc_from_bf16(llmc_to_bf16(from_bits(0x7f800001)))));
    assert_true(isnan(llmc_from_bf16(llmc_to_bf16(from_bits(0xffffffff)))));
    /* Each bf16 is its own nearest value, and the nearest of a third of the way to its neighbour. */
    for (uint32_t half = 0; half < 65536; half++) {
        float value = llmc_from_bf16((uint16_t)half);
        if (isnan(value)) continue;
        assert_int_equal(llmc_to_bf16(value), half);
        if ((half & 0x7fff) < 0x7f80) assert_int_equal(llmc_to_bf16(from_bits(half << 16 | 0x5555)), half);
    }
}

/* A random file has the values of gpt_param_init, as a model of the same seed has them. */
static void test_random(void **state) {
    llmc_header h = shape(11, 16, 4, 2, 2, 8, DDP_DTYPE_DEFAULT);
    llmc_model m;
    (void)state;
    assert_int_equal(llmc_write_random(path_of("m.bin"), &h, 7), DDP_OK);
    assert_int_equal(llmc_open(&m, path_of("m.bin")), DDP_OK);
    assert_int_equal(m.header.dtype, DDP_F32);
    for (int index = 0; index < gpt_param_count(&h.config); index++) {
        float out[256], wanted[256];
        gpt_param p;
        gpt_param_info(&h.config, index, &p);
        gpt_param_init(&h.config, 7, index, 0, p.count, wanted);
        assert_int_equal(llmc_read(&m, index, 0, p.shape[0], out), DDP_OK);
        assert_memory_equal(out, wanted, (size_t)p.count * sizeof *out);
    }
    llmc_close(&m);
}

/* A sparse file of this size: only its header is written. */
static void put_hole(const char *name, const int32_t *head, int64_t size_bytes) {
    int32_t header[256] = {0};
    memcpy(header, head, 8 * sizeof *head);
    put(name, header, sizeof header);
    assert_int_equal(truncate(path_of(name), (off_t)size_bytes), 0);
}

/* The sizes of llm.c's own files: gpt2_124M.bin and gpt2_124M_bf16.bin. */
static void test_124m(void **state) {
    static const int32_t f32[8] = {20240326, 3, 1024, 50257, 12, 12, 768, 50304},
                         bf16[8] = {20240326, 5, 1024, 50257, 12, 12, 768, 50304};
    llmc_header h = llmc_gpt2_124m();
    llmc_model m;
    float row[768];
    (void)state;
    h.dtype = DDP_F32;
    assert_int_equal(llmc_file_bytes(&h), 1024 + 4 * INT64_C(124475904));
    put_hole("big.bin", f32, llmc_file_bytes(&h));
    assert_int_equal(llmc_open(&m, path_of("big.bin")), DDP_OK);
    assert_memory_equal(&m.header.config, &h.config, sizeof h.config);
    assert_int_equal(m.header.padded_vocab, 50304);
    assert_int_equal(llmc_read(&m, gpt_param_head(&h.config) - 1, 0, 768, row), DDP_OK);
    llmc_close(&m);
    h.dtype = DDP_BF16;
    assert_int_equal(llmc_file_bytes(&h), 1024 + 2 * INT64_C(124475904));
    put_hole("big.bin", bf16, llmc_file_bytes(&h));
    assert_int_equal(llmc_open(&m, path_of("big.bin")), DDP_OK);
    llmc_close(&m);
    put_hole("big.bin", bf16, llmc_file_bytes(&h) + 2);
    says(llmc_open(&m, path_of("big.bin")), DDP_ERR_CORRUPT, "big.bin",
         "has 248952834 bytes, but its header needs 248952832");
    unlink(path_of("big.bin"));
}

/* GPT-2 1.5B in f32 exceeds 4 GiB: the last row is found there. */
static void test_beyond_4_gib(void **state) {
    static const int32_t head[8] = {20240326, 3, 1024, 50257, 48, 25, 1600, 50304};
    llmc_header h = shape(50257, 50304, 1024, 48, 25, 1600, DDP_F32);
    const float last[2] = {2.5f, -3};
    float out[2];
    llmc_model m;
    FILE *file;
    (void)state;
    assert_int_equal(llmc_file_bytes(&h), INT64_C(6230746624));
    put_hole("big.bin", head, llmc_file_bytes(&h));
    file = fopen(path_of("big.bin"), "r+b");
    assert_non_null(file);
    assert_int_equal(fseeko(file, -8, SEEK_END), 0);
    assert_int_equal(fwrite(last, 1, 8, file), 8);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(llmc_open(&m, path_of("big.bin")), DDP_OK);
    assert_int_equal(llmc_read(&m, gpt_param_head(&h.config) - 1, 1598, 2, out), DDP_OK);
    assert_memory_equal(out, last, sizeof last);
    llmc_close(&m);
    unlink(path_of("big.bin"));
}

//== errors ================================================================================================

static void test_open_refused(void **state) {
    static const struct {
        int32_t head[8];
        int64_t size;
        ddp_result result;
        const char *words;
    } cases[] = {
        {{20240520, 1, 100},
         4096,
         DDP_ERR_CORRUPT,
         "is a token shard of llm.c: it begins with 20240520, not 20240326"},
        {{20240327, 2}, 4096, DDP_ERR_CORRUPT, "is a debug state of llm.c"},
        {{20240328, 2}, 4096, DDP_ERR_CORRUPT, "is a tokenizer of llm.c"},
        {{20240803, 3}, 4096, DDP_ERR_CORRUPT, "is a file of llm.c for Llama 3"},
        {{0, 3}, 4096, DDP_ERR_CORRUPT, "is not a checkpoint of llm.c: it begins with 0"},
        {{20240326, 1, 3, 5, 2, 2, 6},
         4096,
         DDP_ERR_UNSUPPORTED,
         "checkpoint version 1; 3 (f32) and 5 (bf16) are supported"},
        {{20240326, 4, 3, 5, 2, 2, 6, 8}, 4096, DDP_ERR_UNSUPPORTED, "version 4;"},
        {{20240326, 3, 0, 5, 2, 2, 6, 8},
         4096,
         DDP_ERR_CORRUPT,
         "context=0 vocab=5 layers=2 heads=2 channels=6 padded_vocab=8: vocab, context"},
        {{20240326, 3, 3, -5, 2, 2, 6, 8}, 4096, DDP_ERR_CORRUPT, "vocab=-5"},
        {{20240326, 3, 3, 5, -2, 2, 6, 8}, 4096, DDP_ERR_CORRUPT, "layers=-2"},
        {{20240326, 3, 3, 5, 2, 0, 6, 8}, 4096, DDP_ERR_CORRUPT, "heads=0"},
        {{20240326, 3, 3, 5, 2, 4, 6, 8}, 4096, DDP_ERR_CORRUPT, "channels must be a multiple of heads"},
        {{20240326, 3, 3, 5, 2, 2, 6, 4}, 4096, DDP_ERR_CORRUPT, "padded_vocab must not be less than vocab"},
        {{20240326, 3, 1, 1, 2147483647, 1, 2147483647, 1}, 4096, DDP_ERR_CORRUPT, "the model is too large"},
        {{20240326, 5, 1, 1, 2147483647, 1, 1, 1}, 4096, DDP_ERR_CORRUPT, "the model is too large"},
        {{20240326, 3, 2147483647, 2147483647, 1, 1, 2147483647, 2147483647},
         4096,
         DDP_ERR_CORRUPT,
         "the model is too large"},
        {{20240326, 3, 3, 5, 2, 2, 6, 8}, 1024, DDP_ERR_CORRUPT, "has 1024 bytes, but its header needs 5416"},
        {{20240326, 3, 3, 5, 2, 2, 6, 8}, 5415, DDP_ERR_CORRUPT, "has 5415 bytes"},
        {{20240326, 3, 3, 5, 2, 2, 6, 8}, 5417, DDP_ERR_CORRUPT, "has 5417 bytes"},
        {{20240326, 5, 3, 5, 2, 2, 6, 8}, 5416, DDP_ERR_CORRUPT, "has 5416 bytes, but its header needs 3220"},
        {{20240326, 3, 3, 5, 2, 2, 6, 8},
         1023,
         DDP_ERR_CORRUPT,
         "ends inside its header of 1024 bytes, at byte 1023"},
        {{20240326, 3, 3, 5, 2, 2, 6, 8},
         0,
         DDP_ERR_CORRUPT,
         "ends inside its header of 1024 bytes, at byte 0"},
    };
    llmc_model m;
    (void)state;
    for (int i = 0; i < COUNT(cases); i++) {
        put_hole("bad.bin", cases[i].head, cases[i].size);
        says(llmc_open(&m, path_of("bad.bin")), cases[i].result, "bad.bin", cases[i].words);
        assert_false(m.is_open);
    }
    says(llmc_open(&m, path_of("missing.bin")), DDP_ERR_INVALID, "missing.bin",
         "pass a readable checkpoint of llm.c");
    says(llmc_open(&m, folder), DDP_ERR_INVALID, folder, "is not a regular file");
    llmc_close(&m);
}

static void test_read_refused(void **state) {
    llmc_header h = shape(5, 8, 3, 2, 2, 6, DDP_BF16);
    float out[64];
    llmc_model m;
    asked a;
    (void)state;
    write_model("m.bin", &h, &a);
    assert_int_equal(llmc_open(&m, path_of("m.bin")), DDP_OK);
    says(llmc_read(&m, -1, 0, 1, out), DDP_ERR_INVALID, "m.bin",
         "index=-1 must be 0 or more and less than 29");
    says(llmc_read(&m, 29, 0, 1, out), DDP_ERR_INVALID, "m.bin", "index=29 must be");
    says(llmc_read(&m, 1, 2, 2, out), DDP_ERR_INVALID, "m.bin",
         "wpe has 3 rows; first=2 rows=2 is out of range");
    says(llmc_read(&m, 0, 8, 1, out), DDP_ERR_INVALID, "m.bin", "wte has 8 rows; first=8 rows=1 is");
    says(llmc_read(&m, 14, -1, 1, out), DDP_ERR_INVALID, "m.bin",
         "h.1.ln1.weight has 6 rows; first=-1 rows=1 is");
    says(llmc_read(&m, 14, INT64_MAX, 1, out), DDP_ERR_INVALID, "m.bin", "h.1.ln1.weight has 6 rows; first=");
    says(llmc_read(&m, 14, 1, INT64_MAX, out), DDP_ERR_INVALID, "m.bin", "h.1.ln1.weight has 6 rows; first=");
    assert_int_equal(truncate(path_of("m.bin"), 3000), 0); /* truncated while it is open */
    says(llmc_read(&m, 27, 0, 6, out), DDP_ERR_CORRUPT, "m.bin", "while it was open");
    assert_int_equal(llmc_read(&m, 0, 0, 5, out), DDP_OK);
    llmc_close(&m);
    says(llmc_read(&m, 0, 0, 1, out), DDP_ERR_INVALID, "llmc_read", "call llmc_open first");
}

/* A failed write returns the cause, and leaves the old file and no part of a new one. */
static void test_write_refused(void **state) {
    llmc_header h = shape(5, 8, 3, 2, 2, 6, DDP_F32), bad;
    struct rlimit limit, small;
    char longest[5000];
    size_t before, after;
    uint8_t *kept, *now;
    asked a;
    (void)state;
    write_model("m.bin", &h, &a);
    assert_int_equal(a.calls, 28);
    kept = get("m.bin", &before);
    for (int call = 0; call < 28; call += 9) {
        a.calls = 0;
        a.fail_at = call;
        says(llmc_write(path_of("m.bin"), &h, give_rows, &a), DDP_ERR_TIMEOUT, "the rows of", "did not come");
        assert_int_equal(a.calls, call + 1);
        assert_false(is_there("m.bin.tmp"));
    }
    a.calls = 0;
    a.fail_at = -1;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    says(llmc_write(path_of("m.bin"), &h, give_rows, &a), DDP_ERR_SYSTEM,
         "m.bin cannot be written: File too large", "unchanged");
    says(llmc_write_random_tokens(path_of("m.bin"), 100000, 256, 1), DDP_ERR_SYSTEM,
         "m.bin cannot be written: File too large", "unchanged");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_false(is_there("m.bin.tmp"));
    now = get("m.bin", &after);
    assert_int_equal(after, before);
    assert_memory_equal(now, kept, before);
    free(kept);
    free(now);
    says(llmc_write("nowhere/m.bin", &h, give_rows, &a), DDP_ERR_SYSTEM, "nowhere/m.bin",
         "cannot be written: No such file");
    says(llmc_write(folder, &h, give_rows, &a), DDP_ERR_SYSTEM, folder, "cannot be written");
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    says(llmc_write(longest, &h, give_rows, &a), DDP_ERR_INVALID, "xxx", "choose a shorter one");
    bad = h, bad.dtype = DDP_F16;
    says(llmc_write(path_of("n.bin"), &bad, give_rows, &a), DDP_ERR_INVALID, "n.bin",
         "dtype must be f32 or bf16");
    bad = h, bad.padded_vocab = 4;
    says(llmc_write(path_of("n.bin"), &bad, give_rows, &a), DDP_ERR_INVALID, "n.bin",
         "padded_vocab must not be less than vocab");
    bad = h, bad.config.heads = 5;
    says(llmc_write(path_of("n.bin"), &bad, give_rows, &a), DDP_ERR_INVALID, "n.bin", "multiple of heads");
    bad = h, bad.config.vocab = INT32_MAX, bad.padded_vocab = 0; /* no multiple of 128 fits into 32 bits */
    says(llmc_write(path_of("n.bin"), &bad, give_rows, &a), DDP_ERR_INVALID, "n.bin",
         "padded_vocab must not be less than vocab");
    assert_false(is_there("n.bin") || is_there("n.bin.tmp"));
}

//== shards =================================================================================================

/* sources.h reads the written files: in several pieces, from bytes, from int32, and at random. */
static void test_shards(void **state) {
    static int32_t tokens[10001];
    static uint8_t bytes[3] = {0, 128, 255};
    int32_t window[2];
    void *fields[1] = {window};
    size_t size[2];
    uint8_t *file[2];
    source s;
    (void)state;
    for (int i = 0; i < COUNT(tokens); i++) tokens[i] = (i * 7919) % 65536;
    tokens[5000] = 65535;
    assert_int_equal(llmc_write_tokens(path_of("t.bin"), tokens, DDP_I32, COUNT(tokens)), DDP_OK);
    assert_int_equal(source_open_tokens(&s, path_of("t.bin"), 1), DDP_OK);
    assert_int_equal(s.count, COUNT(tokens) - 1);
    for (int i = 0; i < COUNT(tokens) - 1; i++) {
        assert_int_equal(source_fetch(&s, i, fields), DDP_OK);
        assert_memory_equal(window, tokens + i, sizeof window);
    }
    source_close(&s);
    assert_int_equal(llmc_write_tokens(path_of("t.bin"), bytes, DDP_U8, 3), DDP_OK);
    assert_int_equal(source_open_tokens(&s, path_of("t.bin"), 1), DDP_OK);
    assert_int_equal(s.count, 2);
    assert_int_equal(source_fetch(&s, 1, fields), DDP_OK);
    assert_true(window[0] == 128 && window[1] == 255);
    source_close(&s);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(llmc_write_random_tokens(path_of("t.bin"), 9000, 50257, 3), DDP_OK);
        file[k] = get("t.bin", &size[k]);
    }
    assert_int_equal(size[0], 1024 + 18000);
    assert_memory_equal(file[0], file[1], size[0]);
    for (int k = 0, seen = 0, most = 0; k < 9000; k++) {
        uint16_t token;
        memcpy(&token, file[0] + 1024 + 2 * k, 2);
        assert_true(token < 50257);
        seen += token < 25000;
        if (token > most) most = token;
        if (k == 8999) assert_true(seen > 4000 && seen < 5000 && most > 50000);
    }
    free(file[0]);
    free(file[1]);
}

static void test_shards_refused(void **state) {
    static const int32_t tokens[2][3] = {{1, -2, 3}, {1, 2, 65536}};
    (void)state;
    says(llmc_write_tokens(path_of("u.bin"), tokens[0], DDP_I32, 3), DDP_ERR_INVALID, "u.bin",
         "token 1 is -2; use tokens from 0 to 65535");
    says(llmc_write_tokens(path_of("u.bin"), tokens[1], DDP_I32, 3), DDP_ERR_INVALID, "u.bin",
         "token 2 is 65536");
    says(llmc_write_tokens(path_of("u.bin"), tokens[0], DDP_I64, 1), DDP_ERR_INVALID, "u.bin",
         "dtype is not DDP_U8 or DDP_I32");
    says(llmc_write_tokens(path_of("u.bin"), NULL, DDP_U8, 1), DDP_ERR_INVALID, "u.bin",
         "dtype is not DDP_U8 or DDP_I32");
    says(llmc_write_tokens(path_of("u.bin"), tokens[0], DDP_U8, 0), DDP_ERR_INVALID, "u.bin",
         "count=0; a shard has 1 to 2147483647 tokens");
    says(llmc_write_random_tokens(path_of("u.bin"), INT64_C(1) << 31, 256, 1), DDP_ERR_INVALID, "u.bin",
         "count=2147483648");
    says(llmc_write_random_tokens(path_of("u.bin"), 5, 0, 1), DDP_ERR_INVALID, "u.bin",
         "vocab=0 must be 1 to 65536");
    says(llmc_write_random_tokens(path_of("u.bin"), 5, 65537, 1), DDP_ERR_INVALID, "u.bin", "vocab=65537");
    says(llmc_write_random_tokens("nowhere/u.bin", 5, 256, 1), DDP_ERR_SYSTEM, "nowhere/u.bin",
         "cannot be written");
    assert_false(is_there("u.bin") || is_there("u.bin.tmp"));
}

//== shards as one stream ===================================================================================

/* A shard of zeros, stored as a hole. */
static void put_zeros(const char *name, int32_t tokens) {
    const int32_t header[256] = {TEXT_SHARD_MAGIC, 1, tokens};
    assert_int_equal(truncate(put(name, header, sizeof header),
                              tokens < 0 ? TEXT_SHARD_HEADER : TEXT_SHARD_HEADER + 2 * (int64_t)tokens),
                     0);
}

/* Shards of 1000, 0, 5 and 3000 tokens in a folder named by the caller; returns the tokens of all. */
static const char *put_stream(const char *name, int32_t *tokens) {
    static char path[256];
    char file[64];
    const int first[] = {0, 1000, 1000, 1005, 4005};
    snprintf(path, sizeof path, "%s", path_of(name));
    assert_int_equal(mkdir(path, 0777), 0);
    for (int i = 0; i < 4005; i++) tokens[i] = (i * 7919 + 3) % 65536;
    for (int k = 0; k < 4; k++) {
        snprintf(file, sizeof file, "%s/%d.bin", name, k);
        if (first[k] == first[k + 1])
            put_zeros(file, 0);
        else
            assert_int_equal(
                llmc_write_tokens(path_of(file), tokens + first[k], DDP_I32, first[k + 1] - first[k]),
                DDP_OK);
    }
    return path;
}

static void check_tokens(const text_buffer *t, int64_t at, int count, const int32_t *tokens) {
    static uint16_t got[8192];
    assert_int_equal(text_read(t, 2 * at, 2 * (size_t)count, got), DDP_OK);
    for (int i = 0; i < count; i++) assert_int_equal(got[i], tokens[i]);
}

/* Every window of several lengths, over every number of shard borders; in the order of the given paths. */
static void test_stream(void **state) {
    static int32_t tokens[4005];
    char last[300], first[300];
    const char *folder_path = put_stream("stream", tokens), *both[2] = {last, first};
    text_buffer t = DDP_ZERO;
    (void)state;
    assert_int_equal(text_open_shards(&t, &folder_path, 1), DDP_OK);
    assert_int_equal(t.count, 2 * 4005);
    assert_int_equal(t.shards.count, 4);
    for (int length = 1; length <= 4005; length = length < 9 ? length + 1 : length * 20)
        for (int at = length < 9 ? 0 : 990; at + length <= 4005 && at < 1200; at++)
            check_tokens(&t, at, length, tokens + at);
    check_tokens(&t, 0, 4005, tokens);
    text_free(&t);
    snprintf(last, sizeof last, "%s/3.bin", folder_path);
    snprintf(first, sizeof first, "%s/0.bin", folder_path);
    assert_int_equal(text_open_shards(&t, both, 2), DDP_OK);
    assert_int_equal(t.count, 2 * 4000);
    check_tokens(&t, 0, 3000, tokens + 1005);
    check_tokens(&t, 3000, 1000, tokens);
    says(text_bad_token(&t, 2 * 3007, 9, 5), DDP_ERR_CORRUPT, "0.bin",
         "token 7 is 9, but the vocabulary has 5");
    text_free(&t);
}

/* Other text goes to text_load. Errors of a shard are returned at the start and later. */
static void test_stream_refused(void **state) {
    static int32_t tokens[4005];
    const int32_t header[256] = {TEXT_SHARD_MAGIC, 2, 0};
    char window[16], one[300], other[300];
    const char *folder_path = put_stream("refused", tokens), *paths[2] = {one, other};
    text_buffer t = DDP_ZERO;
    (void)state;
    snprintf(other, sizeof other, "%s", put("words.txt", "words", 5));
    snprintf(one, sizeof one, "%s/0.bin", folder_path);
    assert_int_equal(text_open_shards(&t, paths + 1, 1), DDP_OK);
    assert_true(t.count == 0 && t.shards.count == 0);
    says(text_open_shards(&t, paths, 2), DDP_ERR_INVALID, "words.txt",
         "is not a token shard, but another file is");
    put("refused/x.txt", "words", 5);
    says(text_open_shards(&t, &folder_path, 1), DDP_ERR_INVALID, "x.txt",
         "is not a token shard, but another file is");
    unlink(path_of("refused/x.txt"));
    put("refused/3.bin", header, sizeof header);
    says(text_open_shards(&t, &folder_path, 1), DDP_ERR_UNSUPPORTED, "3.bin", "shard version 2");
    put("refused/3.bin", header, 1000);
    says(text_open_shards(&t, &folder_path, 1), DDP_ERR_CORRUPT, "3.bin", "ends inside its header");
    put_zeros("refused/3.bin", 70);
    assert_int_equal(truncate(path_of("refused/3.bin"), 1024 + 139), 0);
    says(text_open_shards(&t, &folder_path, 1), DDP_ERR_CORRUPT, "3.bin",
         "139 bytes after its header, not 2 for each of 70 tokens");
    put_zeros("refused/3.bin", -1);
    says(text_open_shards(&t, &folder_path, 1), DDP_ERR_CORRUPT, "3.bin", "not 2 for each of -1 tokens");
    assert_true(t.count == 0 && t.shards.count == 0);
    put_zeros("refused/3.bin", 70);
    assert_int_equal(text_open_shards(&t, &folder_path, 1), DDP_OK);
    put_zeros("refused/3.bin", 69);
    says(text_read(&t, 2 * 1001, 16, window), DDP_ERR_CORRUPT, "3.bin", "its token count has changed");
    put("refused/3.bin", tokens, 4096);
    says(text_read(&t, 2 * 1001, 16, window), DDP_ERR_CORRUPT, "3.bin", "is no longer a token shard");
    unlink(path_of("refused/3.bin"));
    says(text_read(&t, 2 * 1001, 16, window), DDP_ERR_INVALID, "3.bin", "No such file");
    check_tokens(&t, 990, 10, tokens + 990);
    text_free(&t);
}

/* All of 1.2 GB, then windows here and there: the process grows by less than 16 MiB. */
static void test_stream_memory(void **state) {
    static uint8_t piece[1 << 16];
    struct rusage before, after;
    text_buffer t = DDP_ZERO;
    char path[256];
    const char *paths[1] = {path};
    (void)state;
    snprintf(path, sizeof path, "%s", path_of("holes"));
    assert_int_equal(mkdir(path, 0777), 0);
    for (int i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof name, "holes/%d.bin", i);
        put_zeros(name, 200000000);
    }
    assert_int_equal(getrusage(RUSAGE_SELF, &before), 0);
    assert_int_equal(text_open_shards(&t, paths, 1), DDP_OK);
    assert_int_equal(t.count, 1200000000);
    for (int64_t at = 0; at < t.count; at += COUNT(piece))
        assert_int_equal(
            text_read(&t, at, t.count - at < COUNT(piece) ? (size_t)(t.count - at) : sizeof piece, piece),
            DDP_OK);
    for (uint64_t i = 0; i < 20000; i++) {
        int64_t at = (int64_t)(gpt_random(1, i) % (uint64_t)(t.count - 4096));
        piece[0] = piece[4095] = 1;
        assert_int_equal(text_read(&t, at, 4096, piece), DDP_OK);
        assert_true(piece[0] == 0 && piece[4095] == 0);
    }
    assert_int_equal(getrusage(RUSAGE_SELF, &after), 0);
    assert_true(after.ru_maxrss - before.ru_maxrss < 16 * 1024);
    text_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),       cmocka_unit_test(test_rows),
        cmocka_unit_test(test_pieces),       cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_random),       cmocka_unit_test(test_124m),
        cmocka_unit_test(test_beyond_4_gib), cmocka_unit_test(test_open_refused),
        cmocka_unit_test(test_read_refused), cmocka_unit_test(test_write_refused),
        cmocka_unit_test(test_shards),       cmocka_unit_test(test_shards_refused),
        cmocka_unit_test(test_stream),       cmocka_unit_test(test_stream_refused),
        cmocka_unit_test(test_stream_memory)};
    watchdog_start(60);
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}

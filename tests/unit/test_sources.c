/* examples/extras/sources.h and text.h: every kind of file is opened and read, and every error names the file. */
#include "../support/folder.h"
#include "../support/watchdog.h"

#include "../../examples/extras/sources.h"

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

//== files of a test ========================================================================================

/* Gzips a file, and returns the compressed bytes; a test can truncate them. */
static size_t gzipped(const char *name, unsigned char *out, size_t room) {
    char command[600];
    FILE *pipe;
    size_t size;
    snprintf(command, sizeof command, "gzip -c %s", path_of(name));
    pipe = popen(command, "r");
    assert_non_null(pipe);
    size = fread(out, 1, room, pipe);
    assert_int_equal(pclose(pipe), 0);
    assert_true(size > 20 && size < room);
    return size;
}

/* The call failed with this code, the source is empty, and the line contains the file and the words. */
static void says(const source *s, ddp_result result, ddp_result wanted, const char *name, const char *words) {
    if (result != wanted || !strstr(ddp_last_error(), name) || !strstr(ddp_last_error(), words))
        fail_msg("%s: %s `%s`, wanted %s with `%s`", name, ddp_result_name(result),
                 result ? ddp_last_error() : "", ddp_result_name(wanted), words);
    assert_null(s->file);
    assert_int_equal(s->count, 0);
}

static ddp_result get(source *s, int64_t index, void *to) {
    void *fields[1] = {to};
    return source_fetch(s, index, fields);
}

//== IDX ====================================================================================================

/* Two samples of three elements, of each type; big-endian. */
static void test_idx_of_each_type(void **state) {
    static const struct {
        unsigned char code;
        int size;
        ddp_dtype dtype;
    } types[] = {
        {8, 1, DDP_U8},   {9, 1, DDP_I8},   {11, 2, DDP_I32},
        {12, 4, DDP_I32}, {13, 4, DDP_F32}, {14, 8, DDP_F64},
    };
    static const double values[6] = {1, 2, 3, 100, 101, 102};
    (void)state;
    for (int k = 0; k < COUNT(types); k++) {
        unsigned char file[12 + 48] = {0, 0, types[k].code, 2, 0, 0, 0, 2, 0, 0, 0, 3};
        int size = types[k].size;
        source s;
        for (int i = 0; i < 6; i++) {
            double sign = types[k].code == 8 ? 1 : -1;
            unsigned char bytes[8], *to = file + 12 + i * size;
            float f = (float)(sign * values[i]);
            double d = sign * values[i];
            int64_t n = (int64_t)d;
            if (types[k].code == 13)
                memcpy(bytes, &f, 4);
            else if (types[k].code == 14)
                memcpy(bytes, &d, 8);
            else
                memcpy(bytes, &n, 8);
            for (int b = 0; b < size; b++) to[b] = bytes[size - 1 - b];
        }
        assert_int_equal(source_open_idx(&s, put("a.idx", file, (size_t)(12 + 6 * size))), DDP_OK);
        assert_int_equal(s.count, 2);
        assert_int_equal(s.sample.dtype, types[k].dtype);
        assert_int_equal(s.sample.ndim, 1);
        assert_int_equal(s.sample.shape[0], 3);
        for (int sample = 0; sample < 2; sample++) {
            unsigned char out[24];
            assert_int_equal(get(&s, sample, out), DDP_OK);
            for (int i = 0; i < 3; i++) {
                double want = (types[k].code == 8 ? 1 : -1) * values[3 * sample + i], is = 0;
                if (s.sample.dtype == DDP_U8) is = out[i];
                if (s.sample.dtype == DDP_I8) is = (signed char)out[i];
                if (s.sample.dtype == DDP_I32) {
                    int32_t v;
                    memcpy(&v, out + 4 * i, 4);
                    is = v;
                }
                if (s.sample.dtype == DDP_F32) {
                    float v;
                    memcpy(&v, out + 4 * i, 4);
                    is = v;
                }
                if (s.sample.dtype == DDP_F64) memcpy(&is, out + 8 * i, 8);
                assert_true(is == want);
            }
        }
        assert_int_equal(get(&s, 2, file), DDP_ERR_INVALID);
        assert_non_null(strstr(ddp_last_error(), "a.idx: index=2 must be 0 or more and less than 2"));
        assert_int_equal(get(&s, -1, file), DDP_ERR_INVALID);
        source_close(&s);
        source_close(&s); /* an empty one is fine too */
    }
}

/* Labels are single elements. Images and labels are two fields of one sample. A gzipped file gives the same
   samples. */
static void test_idx_gzipped_pair(void **state) {
    unsigned char images[16 + 5 * 4] = {0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0, 0, 2},
                                  labels[8 + 5] = {0, 0, 8, 1, 0, 0, 0, 5}, packed[256];
    unsigned char image[4], label;
    void *fields[2] = {image, &label};
    source a, b, *both[] = {&a, &b, NULL};
    (void)state;
    for (int i = 0; i < 20; i++) images[16 + i] = (unsigned char)(10 * i);
    for (int i = 0; i < 5; i++) labels[8 + i] = (unsigned char)(i + 1);
    put("images", images, sizeof images);
    assert_int_equal(source_open_idx(&a, put("images.gz", packed, gzipped("images", packed, sizeof packed))),
                     DDP_OK);
    assert_int_equal(source_open_idx(&b, put("labels", labels, sizeof labels)), DDP_OK);
    assert_int_equal(a.sample.ndim, 2);
    assert_int_equal(b.sample.ndim, 0);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(source_fetch_each(both, i, fields), DDP_OK);
        assert_memory_equal(image, images + 16 + 4 * i, 4);
        assert_int_equal(label, i + 1);
    }
    b.count = 4;
    assert_int_equal(source_fetch_each(both, 4, fields), DDP_ERR_INVALID);
    assert_non_null(strstr(ddp_last_error(), "labels: index=4"));
    source_close(&a);
    source_close(&b);
}

static void test_idx_refused(void **state) {
    static const struct {
        const char *bytes;
        int size;
        ddp_result result;
        const char *words;
    } cases[] = {
        {"", 0, DDP_ERR_CORRUPT, "is empty"},
        {"\0\0\10", 3, DDP_ERR_CORRUPT, "is not an IDX file"},
        {"\1\0\10\1\0\0\0\1x", 9, DDP_ERR_CORRUPT, "is not an IDX file"},
        {"\0\0\12\1\0\0\0\1x", 9, DDP_ERR_CORRUPT, "invalid IDX element type 0x0a"},
        {"\0\0\10\0x", 5, DDP_ERR_UNSUPPORTED, "has 0 dimensions"},
        {"\0\0\10\12x", 5, DDP_ERR_UNSUPPORTED, "has 10 dimensions"},
        {"\0\0\10\2\0\0\0\1\0\0", 10, DDP_ERR_CORRUPT, "ends inside its header, at byte 10"},
        {"\0\0\10\1\0\0\0\0", 8, DDP_ERR_INVALID, "has no samples"},
        {"\0\0\10\2\0\0\0\1\0\0\0\0", 12, DDP_ERR_INVALID, "has no samples"},
        {"\0\0\10\1\0\0\0\3xx", 10, DDP_ERR_CORRUPT,
         "3 samples of 1 elements of 1 bytes do not fill the 2 bytes"},
        {"\0\0\10\1\0\0\0\3xxxx", 12, DDP_ERR_CORRUPT, "do not fill the 4 bytes"},
        {"\0\0\16\3\377\377\377\377\377\377\377\377\377\377\377\377xxxx", 20, DDP_ERR_CORRUPT,
         "do not fill the 4 bytes"},
    };
    source s;
    (void)state;
    for (int i = 0; i < COUNT(cases); i++)
        says(&s, source_open_idx(&s, put("bad.idx", cases[i].bytes, (size_t)cases[i].size)), cases[i].result,
             "bad.idx", cases[i].words);
    says(&s, source_open_idx(&s, path_of("missing.idx")), DDP_ERR_INVALID, "missing.idx",
         "pass a readable file");
    says(&s, source_open_idx(&s, folder), DDP_ERR_INVALID, folder, "is not a regular file");
}

//== gzip ===================================================================================================

static void test_gzip_refused(void **state) {
    /* 200000 incompressible bytes: more than the capacity of a pipe. */
    static unsigned char idx[8 + 200000] = {0, 0, 8, 1, 0, 3, 13, 64}, packed[400000];
    uint32_t random = 1;
    char *kept = strdup(getenv("PATH"));
    source s;
    size_t size;
    (void)state;
    for (int i = 0; i < 200000; i++)
        idx[8 + i] = (unsigned char)((random = random * 1664525 + 1013904223) >> 24);
    put("n.idx", idx, sizeof idx);
    size = gzipped("n.idx", packed, sizeof packed);
    assert_int_equal(source_open_idx(&s, put("n.gz", packed, size)), DDP_OK);
    assert_int_equal(s.count, 200000);
    assert_memory_equal(s.file->data, idx + 8, 200000);
    source_close(&s);
    says(&s, source_open_idx(&s, put("n.gz", packed, size - 1)), DDP_ERR_CORRUPT, "n.gz", "truncated");
    says(&s, source_open_idx(&s, put("n.gz", packed, size / 2)), DDP_ERR_CORRUPT, "n.gz", "truncated");
    says(&s, source_open_idx(&s, put("n.gz", packed, 5)), DDP_ERR_CORRUPT, "n.gz", "truncated");
    packed[size / 2] ^= 16;
    says(&s, source_open_idx(&s, put("n.gz", packed, size)), DDP_ERR_CORRUPT, "n.gz", "damaged");
    packed[size / 2] ^= 16;
    packed[size - 8] ^= 1; /* the checksum */
    says(&s, source_open_idx(&s, put("n.gz", packed, size)), DDP_ERR_CORRUPT, "n.gz", "damaged");
    packed[size - 8] ^= 1;
    put("nothing", "", 0);
    size = gzipped("nothing", packed, sizeof packed);
    says(&s, source_open_idx(&s, put("n.gz", packed, size)), DDP_ERR_CORRUPT, "n.gz",
         "is empty after unpacking");
    setenv("PATH", "/nowhere", 1);
    says(&s, source_open_idx(&s, path_of("n.gz")), DDP_ERR_SYSTEM, "n.gz", "install it, or unpack the file");
    setenv("PATH", kept, 1);
    free(kept);
}

//== .npy ===================================================================================================

static size_t npy_file(unsigned char *file, int version, const char *header, const void *data,
                       size_t data_bytes) {
    size_t at = version == 1 ? 10 : 12, length = strlen(header);
    memcpy(file, "\x93NUMPY", 6);
    file[6] = (unsigned char)version, file[7] = 0, file[8] = (unsigned char)length,
    file[9] = (unsigned char)(length >> 8);
    if (version > 1) file[10] = file[11] = 0;
    memcpy(file + at, header, length);
    if (data_bytes) memcpy(file + at + length, data, data_bytes);
    return at + length + data_bytes;
}

static void test_npy(void **state) {
    static const float numbers[6] = {1, 2, 3, 4, 5, 6};
    static const unsigned char big[4] = {1, 2, 0xff, 0xfe};
    unsigned char file[256];
    float f[3];
    int32_t w[1];
    source s;
    (void)state;
    for (int version = 1; version <= 3; version++) {
        size_t size = npy_file(file, version,
                               "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n", numbers,
                               sizeof numbers);
        assert_int_equal(source_open_npy(&s, put("a.npy", file, size)), DDP_OK);
        assert_int_equal(s.count, 2);
        assert_int_equal(s.sample.dtype, DDP_F32);
        assert_int_equal(s.sample.ndim, 1);
        assert_int_equal(s.sample.shape[0], 3);
        assert_int_equal(get(&s, 1, f), DDP_OK);
        assert_memory_equal(f, numbers + 3, sizeof f);
        source_close(&s);
    }
    assert_int_equal(
        source_open_npy(
            &s, put("a.npy", file,
                    npy_file(file, 1, "{'shape': (2,), 'fortran_order': False, 'descr': '>i2'}\n", big, 4))),
        DDP_OK);
    assert_int_equal(s.sample.dtype, DDP_I32);
    assert_int_equal(s.sample.ndim, 0);
    assert_int_equal(get(&s, 0, w), DDP_OK);
    assert_int_equal(w[0], 258);
    assert_int_equal(get(&s, 1, w), DDP_OK);
    assert_int_equal(w[0], -2);
    source_close(&s);
    /* One column has the same bytes in both orders. */
    assert_int_equal(
        source_open_npy(&s, put("a.npy", file,
                                npy_file(file, 1, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1)}",
                                         numbers, 8))),
        DDP_OK);
    assert_int_equal(s.count, 2);
    source_close(&s);
}

static void test_npy_refused(void **state) {
    static const struct {
        const char *header;
        int data_bytes;
        ddp_result result;
        const char *words;
    } cases[] = {
        {"{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }", 16, DDP_ERR_UNSUPPORTED,
         "Fortran order"},
        {"{'descr': '<c8', 'fortran_order': False, 'shape': (1, 1), }", 8, DDP_ERR_UNSUPPORTED,
         "dtype '<c8' has no ddp_dtype"},
        {"{'descr': '<u4', 'fortran_order': False, 'shape': (2,), }", 8, DDP_ERR_UNSUPPORTED,
         "dtype '<u4' has no ddp_dtype"},
        {"{'descr': '<f16', 'fortran_order': False, 'shape': (2,), }", 32, DDP_ERR_UNSUPPORTED,
         "dtype '<f16' has no ddp_dtype"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", 8, DDP_ERR_UNSUPPORTED,
         "its elements are records"},
        {"{'fortran_order': False, 'shape': (2,), 'descr': '<", 8, DDP_ERR_CORRUPT, "a dtype in quotes"},
        {"{'fortran_order': False, 'shape': (2,), 'descr': '", 8, DDP_ERR_CORRUPT, "a dtype in quotes"},
        {"{'descr': '<f4', 'fortran_order': False, }", 8, DDP_ERR_CORRUPT, "its header has no 'shape'"},
        {"{'descr': '<f4', 'shape': (2,), }", 8, DDP_ERR_CORRUPT, "its header has no 'fortran_order'"},
        {"", 0, DDP_ERR_CORRUPT, "the { of a header"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, x), }", 8, DDP_ERR_CORRUPT,
         "at byte 64 there should be an entry of a shape, which is a number"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }", 8, DDP_ERR_CORRUPT,
         "at byte 61 there should be an entry of a shape, which is a number"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (), }", 4, DDP_ERR_INVALID, "has no dimensions"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 2), }", 0, DDP_ERR_INVALID, "has no samples"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1,1), }", 4, DDP_ERR_UNSUPPORTED,
         "more than 9 dimensions"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }", 15, DDP_ERR_CORRUPT,
         "do not fill the 15 bytes"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }", 4, DDP_ERR_CORRUPT,
         "do not fill the 4 bytes"},
    };
    unsigned char file[256], zeros[64] = {0};
    size_t size;
    source s;
    (void)state;
    for (int i = 0; i < COUNT(cases); i++) {
        size = npy_file(file, 1, cases[i].header, zeros, (size_t)cases[i].data_bytes);
        if (size < 12) size = npy_file(file, 2, cases[i].header, zeros, (size_t)cases[i].data_bytes);
        says(&s, source_open_npy(&s, put("bad.npy", file, size)), cases[i].result, "bad.npy", cases[i].words);
    }
    size = npy_file(file, 1, cases[0].header, zeros, 8);
    says(&s, source_open_npy(&s, put("bad.npy", file, 40)), DDP_ERR_CORRUPT, "bad.npy",
         "ends at byte 40, inside its header");
    says(&s, source_open_npy(&s, put("bad.npy", file, 8)), DDP_ERR_CORRUPT, "bad.npy",
         "ends at byte 8, inside its header");
    says(&s, source_open_npy(&s, put("bad.npy", "", 0)), DDP_ERR_CORRUPT, "bad.npy", "is empty");
    file[6] = 4;
    says(&s, source_open_npy(&s, put("bad.npy", file, size)), DDP_ERR_UNSUPPORTED, "bad.npy", "version 4.0");
    file[0] = 'x';
    says(&s, source_open_npy(&s, put("bad.npy", file, size)), DDP_ERR_CORRUPT, "bad.npy",
         "is not a .npy file");
}

//== tokens =================================================================================================

static const char *put_shard(const char *name, int magic, int version, int count, int from, int extra_bytes) {
    static unsigned char file[1024 + 4096];
    int32_t header[256] = {0};
    header[0] = magic, header[1] = version, header[2] = count;
    memcpy(file, header, sizeof header);
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)(from + i);
        memcpy(file + 1024 + 2 * i, &token, 2);
    }
    return put(name, file, (size_t)(1024 + 2 * (count > 0 ? count : 0) + extra_bytes));
}

/* Three shards of 10, 9 and 23 tokens in windows of 4 + 1: 2, 2 and 5 windows, for any order of names in the
   folder. */
static void test_tokens(void **state) {
    static const int starts[9] = {0, 4, 60000, 60004, 200, 204, 208, 212, 216};
    char pattern[128];
    int32_t window[5];
    source s;
    (void)state;
    put_shard("t_0002.bin", 20240520, 1, 23, 200, 0);
    put_shard("t_0000.bin", 20240520, 1, 10, 0, 0);
    put_shard("t_0001.bin", 20240520, 1, 9, 60000, 0);
    snprintf(pattern, sizeof pattern, "%s/t_*.bin", folder);
    assert_int_equal(source_open_tokens(&s, pattern, 4), DDP_OK);
    assert_int_equal(s.count, 9);
    assert_int_equal(s.sample.dtype, DDP_I32);
    assert_int_equal(s.sample.shape[0], 5);
    for (int i = 0; i < 9; i++) {
        assert_int_equal(get(&s, i, window), DDP_OK);
        for (int k = 0; k < 5; k++) assert_int_equal(window[k], starts[i] + k);
    }
    source_close(&s);
}

static void test_tokens_refused(void **state) {
    source s;
    (void)state;
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240521, 1, 9, 0, 0), 4), DDP_ERR_CORRUPT, "b.bin",
         "it begins with 20240521, not 20240520");
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240520, 7, 9, 0, 0), 4), DDP_ERR_UNSUPPORTED,
         "b.bin", "shard version 7");
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240520, 1, 9, 0, 2), 4), DDP_ERR_CORRUPT, "b.bin",
         "has 20 bytes after its header, not 2 for each of 9 tokens");
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240520, 1, 9, 0, -1), 4), DDP_ERR_CORRUPT, "b.bin",
         "has 17 bytes");
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240520, 1, -9, 0, 0), 4), DDP_ERR_CORRUPT, "b.bin",
         "not 2 for each of -9 tokens");
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240520, 1, 0, 0, -1), 4), DDP_ERR_CORRUPT, "b.bin",
         "ends inside its header");
    says(&s, source_open_tokens(&s, put("b.bin", "", 0), 4), DDP_ERR_CORRUPT, "b.bin", "is empty");
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240520, 1, 4, 0, 0), 4), DDP_ERR_INVALID, "b.bin",
         "has 4 tokens, but a sample needs 5");
    says(&s, source_open_tokens(&s, put_shard("b.bin", 20240520, 1, 9, 0, 0), 0), DDP_ERR_INVALID, "b.bin",
         "context=0");
    says(&s, source_open_tokens(&s, path_of("none_*.bin"), 4), DDP_ERR_INVALID, "none_*.bin",
         "no file matches");
    put_shard("m_1.bin", 20240520, 1, 9, 0, 0);
    put_shard("m_2.bin", 20240520, 1, 9, 0, 1); /* the second of two: the first is closed again */
    says(&s, source_open_tokens(&s, path_of("m_*.bin"), 4), DDP_ERR_CORRUPT, "m_2.bin", "has 19 bytes");
}

static void test_text(void **state) {
    char first[256], second[256];
    unsigned char window[5];
    const char *paths[2] = {first, second}, *missing = "sources.nowhere";
    source s;
    (void)state;
    snprintf(first, sizeof first, "%s", put("one.txt", "0123456", 7));
    snprintf(second, sizeof second, "%s", put("two.txt", "789abc", 6));
    assert_int_equal(source_open_text(&s, paths, 2, 4), DDP_OK); /* 13 bytes: one text */
    assert_int_equal(s.count, 3);
    assert_int_equal(s.sample.dtype, DDP_U8);
    assert_int_equal(get(&s, 1, window), DDP_OK);
    assert_memory_equal(window, "45678", 5);
    assert_int_equal(get(&s, 2, window), DDP_OK);
    assert_memory_equal(window, "89abc", 5);
    source_close(&s);
    says(&s, source_open_text(&s, paths, 1, 7), DDP_ERR_INVALID, "the text",
         "has 7 tokens, but a sample needs 8");
    says(&s, source_open_text(&s, paths, 1, 0), DDP_ERR_INVALID, "source_open_text", "context=0");
    says(&s, source_open_text(&s, &missing, 1, 4), DDP_ERR_INVALID, "sources.nowhere",
         "pass files or folders that exist");
}

//== text.h =================================================================================================

/* A folder in byte order of its paths, without hidden, binary and linked files and folders named build. */
static void test_text_folder(void **state) {
    static const char *const folders[] = {"words", "words/b", "words/build", "words/.git", "empty"};
    const char *paths[2], *none[1];
    char path[256], window[16], words[256], empty[256], link[256];
    text_buffer t = DDP_ZERO;
    (void)state;
    for (int i = 0; i < COUNT(folders); i++) assert_int_equal(mkdir(path_of(folders[i]), 0777), 0);
    put("words/c.txt", "three ", 6);
    put("words/a.txt", "one ", 4);
    put("words/b/a.txt", "two ", 4);
    put("words/b.bin", "x\0y", 3);
    put("words/.hidden", "hidden", 6);
    put("words/build/a.txt", "built", 5);
    put("words/.git/a.txt", "object", 6);
    snprintf(link, sizeof link, "%s", path_of("words/link.txt"));
    assert_int_equal(symlink("a.txt", link), 0);
    snprintf(path, sizeof path, "%s", put("last.txt", "four", 4));
    snprintf(words, sizeof words, "%s", path_of("words"));
    snprintf(empty, sizeof empty, "%s", path_of("empty"));
    paths[0] = words;
    paths[1] = path;
    none[0] = empty;
    assert_int_equal(text_load(&t, paths, 2), DDP_OK);
    assert_int_equal(t.count, 18);
    assert_memory_equal(t.bytes, "one two three four", 18);
    assert_int_equal(text_read(&t, 4, 9, window), DDP_OK);
    assert_memory_equal(window, "two three", 9);
    text_free(&t);
    assert_int_equal(text_load(&t, none, 1), DDP_ERR_INVALID);
    assert_non_null(strstr(ddp_last_error(), "empty has no text"));
    text_free(&t);
    assert_null(t.bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_idx_of_each_type),
                                       cmocka_unit_test(test_idx_gzipped_pair),
                                       cmocka_unit_test(test_idx_refused),
                                       cmocka_unit_test(test_gzip_refused),
                                       cmocka_unit_test(test_npy),
                                       cmocka_unit_test(test_npy_refused),
                                       cmocka_unit_test(test_tokens),
                                       cmocka_unit_test(test_tokens_refused),
                                       cmocka_unit_test(test_text),
                                       cmocka_unit_test(test_text_folder)};
    watchdog_start(60);
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}

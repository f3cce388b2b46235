/*  test_json.c - protection of checkpoints against damage: checksums, the JSON reader, and headers of tensor
    files.

    Checksums against a bit-by-bit reference, by instructions and by tables, in one piece and in runs in any
    order. Invalid JSON, and headers that do not describe a file, return an error with a reason. The reader
    never reads beyond the end of the text (AddressSanitizer checks copies of exact size). */
#include "../support/unit.h"

#include "../support/watchdog.h"

#define DDP_STATIC /* functions without a caller are not compiled, and no group is created here */
#define DDP_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../ddp_fsdp.h"

#include "../support/random.h"

static ddp_group zero, *alone = &zero; /* provides the allocator */

static void *allocate(size_t size_bytes, void *user) {
    (void)user;
    return malloc(size_bytes);
}
static void release(void *memory, void *user) {
    (void)user;
    free(memory);
}

//== checksums ==============================================================================

/* The definition, a bit at a time. */
static uint32_t reference_crc(const unsigned char *data, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int b = 0; b < 8; b++) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    }
    return ~crc;
}

static void test_crc_values(void **state) {
    unsigned char zeros[32] = {0}, *random = (unsigned char *)malloc(120000);
    (void)state;
    assert_int_equal(ddp__crc32c("123456789", 9), 0xe3069283u);
    assert_int_equal(ddp__crc32c(zeros, 32), 0x8a9136aau); /* RFC 3720 */
    assert_int_equal(ddp__crc32c("", 0), 0);
    for (int i = 0; i < 120000; i++) random[i] = (unsigned char)random_u64();
    for (size_t size = 0; size < 120000; size += 1 + size * 3 / 8) {
        uint32_t want = reference_crc(random + 3, size - (size > 3 ? 3 : 0));
        assert_int_equal(ddp__crc32c(random + 3, size - (size > 3 ? 3 : 0)), want);
        assert_int_equal(~ddp__crc_portable(0xffffffffu, random + 3, size - (size > 3 ? 3 : 0)), want);
    }
    free(random);
}

/* Runs of a text, each multiplied by the shift of the rest after it, in random order. */
static void test_crc_of_runs(void **state) {
    unsigned char data[5000];
    (void)state;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)random_u64();
    for (int trial = 0; trial < 20; trial++) {
        size_t size = random_u64() % sizeof data, cut[9] = {0}, count = 0;
        uint32_t remainder = 0;
        while (count < 8 && cut[count] < size) {
            size_t more = random_u64() % size + 1;
            cut[count + 1] = cut[count] + more < size && count < 7 ? cut[count] + more : size;
            count++;
        }
        for (size_t i = count; i-- > 0;)
            remainder ^= ddp__crc_multiply(ddp__crc_update(0, data + cut[i], cut[i + 1] - cut[i]),
                                           ddp__crc_shift(size - cut[i + 1]));
        assert_int_equal(ddp__crc_finish(remainder, size), reference_crc(data, size));
    }
}

//== JSON ===================================================================================

/* A copy of exact size, so that a byte beyond it is seen by AddressSanitizer. */
static ddp__json json_of(const char *text, size_t length) {
    char *copy = (char *)malloc(length ? length : 1);
    memcpy(copy, text, length);
    return ddp__json_reader(copy, length);
}

static const char *skip_error(const char *text) {
    ddp__json j = json_of(text, strlen(text));
    const char *error;
    if (ddp__json_skip(&j)) (void)ddp__json_end(&j);
    error = j.error;
    free(j.begin);
    return error;
}

static void test_json_accepts(void **state) {
    static const char *const good[] = {"{}",
                                       "[]",
                                       " [ ] ",
                                       "0",
                                       "-0",
                                       "1.5e-3",
                                       "-12E+7",
                                       "\"\"",
                                       "true",
                                       "false",
                                       "null",
                                       "[1,2,[3,{\"a\":[]}],{}]",
                                       "{\"a\":1,\"b\":{\"c\":[null,true]}}",
                                       "\"\\u00e9\\ud83d\\ude00\\n\\/\"",
                                       "\"\xc3\xa9\xf0\x9f\x98\x80\"",
                                       "[[[[[]]]]]",
                                       "\n\t\r {\"x\" : [ 1 , 2 ] } "};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        if (skip_error(good[i])) fail_msg("%s: %s", good[i], skip_error(good[i]));
}

static void test_json_refuses(void **state) {
    static const char *const bad[] = {"",
                                      " ",
                                      "{",
                                      "[",
                                      "[1",
                                      "[1,",
                                      "[1,]",
                                      "[,1]",
                                      "{\"a\"}",
                                      "{\"a\":}",
                                      "{\"a\":1,}",
                                      "{a:1}",
                                      "{\"a\":1 \"b\":2}",
                                      "01",
                                      "-",
                                      "+1",
                                      "1.",
                                      ".5",
                                      "1e",
                                      "1e+",
                                      "0x10",
                                      "tru",
                                      "nulll",
                                      "\"",
                                      "\"\\",
                                      "\"\\x\"",
                                      "\"\\u12\"",
                                      "\"\\u12g4\"",
                                      "\"\\ud800\"",
                                      "\"\\ud800\\u0041\"",
                                      "\"\\udc00\"",
                                      "\"\x01\"",
                                      "\"\xff\"",
                                      "\"\xc0\x80\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"\xf4\x90\x80\x80\"",
                                      "\"\xe0\x80\x80\"",
                                      "\"\xc3\"",
                                      "{} {}",
                                      "[}",
                                      "{]",
                                      "1 2",
                                      "'a'",
                                      "NaN",
                                      "\xef\xbb\xbf{}",
                                      "[1}",
                                      "{\"a\":1]",
                                      "- 1"};
    char deep[200];
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (!skip_error(bad[i])) fail_msg("accepted: %s", bad[i]);
    memset(deep, '[', sizeof deep);
    deep[sizeof deep - 1] = '\0';
    assert_non_null(strstr(skip_error(deep), "too deeply"));
    memset(deep + 64, ']', 64);
    deep[128] = '\0';
    assert_null(skip_error(deep));
}

static void test_json_values(void **state) {
    static const char text[] =
        "[18446744073709551615, -9223372036854775808, 9223372036854775807, \"a\\u0000\\u20ac\\\"\"]";
    static const char *const wrong[] = {"18446744073709551616", "-1", "1.0", "1e3", "\"1\""};
    ddp__json j = json_of(text, sizeof text - 1);
    ddp__string_view word;
    uint64_t u;
    (void)state;
    assert_true(ddp__json_accept(&j, '[') && ddp__json_number(&j, 'u', &u) && u == UINT64_MAX);
    assert_true(ddp__json_accept(&j, ',') && ddp__json_number(&j, 'i', &u) && (int64_t)u == INT64_MIN);
    assert_true(ddp__json_accept(&j, ',') && ddp__json_number(&j, 'i', &u) && (int64_t)u == INT64_MAX);
    assert_true(ddp__json_accept(&j, ',') && ddp__json_string(&j, &word) && word.length == 6
                && memcmp(word.text, "a\0\xe2\x82\xac\"", 6) == 0);
    assert_true(ddp__json_accept(&j, ']') && ddp__json_end(&j));
    free(j.begin);
    for (size_t n = 0; n < sizeof wrong / sizeof *wrong; n++) {
        j = json_of(wrong[n], strlen(wrong[n]));
        assert_false(ddp__json_number(&j, 'u', &u));
        assert_non_null(j.error);
        free(j.begin);
    }
    j = json_of("9223372036854775808", 19);
    assert_false(ddp__json_number(&j, 'i', &u));
    free(j.begin);
}

/* The first and the last character of each length in UTF-8, a space, and hexadecimal digits in both cases. */
static void test_json_characters(void **state) {
    static const struct {
        const char *text, *means;
    } table[] = {
        {"\"\x7f\"", "\x7f"},
        {"\"\xc2\x80\"", "\xc2\x80"},
        {"\"\xdf\xbf\"", "\xdf\xbf"},
        {"\"\xe0\xa0\x80\"", "\xe0\xa0\x80"},
        {"\"\xed\x9f\xbf\"", "\xed\x9f\xbf"},
        {"\"\xee\x80\x80\"", "\xee\x80\x80"},
        {"\"\xef\xbf\xbf\"", "\xef\xbf\xbf"},
        {"\"\xf0\x90\x80\x80\"", "\xf0\x90\x80\x80"},
        {"\"\xf4\x8f\xbf\xbf\"", "\xf4\x8f\xbf\xbf"},
        {"\" a b \"", " a b "},
        {"\"\\u00E9\\u00e9\"", "\xc3\xa9\xc3\xa9"},
        {"\"\\uABCF\\uabcf\"", "\xea\xaf\x8f\xea\xaf\x8f"},
        {"\"\\u007f\\u0080\\u07ff\\u0800\"", "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80"},
        {"\"\\uD800\\uDC00\"", "\xf0\x90\x80\x80"},
        {"\"\\udbff\\udfff\"", "\xf4\x8f\xbf\xbf"},
        {"\"\\ud7ff\\ue000\"", "\xed\x9f\xbf\xee\x80\x80"},
    };
    static const char *const bad[] = {"\"\x1f\"",
                                      "\"\x80\"",
                                      "\"\xc1\xbf\"",
                                      "\"\xe0\x9f\xbf\"",
                                      "\"\xf0\x8f\xbf\xbf\"",
                                      "\"\xf4\x90\x80\x80\"",
                                      "\"\xf5\x80\x80\x80\"",
                                      "\"\xc2\x7f\"",
                                      "\"\xc2\xc0\""};
    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        ddp__json j = json_of(table[i].text, strlen(table[i].text));
        ddp__string_view word;
        if (!ddp__json_string(&j, &word)) fail_msg("%s: %s", table[i].text, j.error);
        assert_int_equal(word.length, strlen(table[i].means));
        assert_memory_equal(word.text, table[i].means, word.length);
        assert_true(ddp__json_end(&j));
        free(j.begin);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (!skip_error(bad[i])) fail_msg("accepted: %s", bad[i]);
}

//== headers ================================================================================

/* Reads a copy of exact size. */
static ddp_result read_header(const char *text, size_t length, uint64_t data_bytes, ddp__load_file *file) {
    memset(file, 0, sizeof *file);
    file->dir = "folder";
    file->name = "a.safetensors";
    file->text = json_of(text, length).begin;
    return ddp__header_read(alone, file, length, data_bytes);
}

static void drop(ddp__load_file *file) {
    ddp_host_free(alone, file->records);
    free(file->text);
}

static void test_header(void **state) {
    static const char text[] = "{\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[2,26]},\"__"
                               "metadata__\":{\"format\":\"pt\",\"crc32c:b\":\"0123abcd\"},"
                               "\"a\":{\"data_offsets\":[0,2],\"shape\":[],\"dtype\":\"BF16\"},\"e\":{"
                               "\"dtype\":\"I64\",\"shape\":[4,0],\"data_offsets\":[26,26]}}   ";
    ddp__load_file header;
    ddp__file_tensor *b;
    (void)state;
    assert_int_equal(read_header(text, sizeof text - 1, 26, &header), DDP_OK);
    assert_int_equal(header.count, 3);
    b = ddp__file_tensor_find(&header, ddp__string_view_of("b"));
    assert_true(b && b->ndim == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->begin == 2 && b->end == 26
                && b->dtype->dtype == DDP_F32);
    assert_true(b->has_crc && b->crc == 0x0123abcd);
    assert_null(ddp__file_tensor_find(&header, ddp__string_view_of("c")));
    assert_false(ddp__file_tensor_find(&header, ddp__string_view_of("a"))->has_crc);
    drop(&header);
    assert_int_equal(read_header("{}", 2, 0, &header), DDP_OK);
    assert_int_equal(header.count, 0);
    drop(&header);
}

#define T(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_header_refused(void **state) {
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"", "expected an object"},
        {" {}", "expected an object"},
        {"[]", "expected an object"},
        {"{}", "end at byte 0"},
        {"{} x", "after the end"},
        {"{" T("a", "F32", "[2]", "[0,8]") "}", "end at byte 8"},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[3]", "[4,16]") "}", "overlaps"},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[1]", "[12,16]") "}", "unused bytes"},
        {"{" T("a", "F32", "[3]", "[4,16]") "}", "unused bytes"},
        {"{" T("a", "F32", "[4]", "[0,20]") "}", "outside"},
        {"{" T("a", "F32", "[4]", "[16,0]") "}", "outside"},
        {"{" T("a", "F32", "[5]", "[0,16]") "}", "not have the size"},
        {"{" T("a", "F99", "[4]", "[0,16]") "}", "unknown dtype"},
        {"{" T("a", "F32", "[-4]", "[0,16]") "}", "negative"},
        {"{" T("a", "F32", "[4.0]", "[0,16]") "}", "expected an integer"},
        {"{" T("a", "F32", "[4294967296,4294967296,4]", "[0,16]") "}", "out of range"},
        {"{" T("a", "F32", "[4]", "[0,16,20]") "}", "two numbers"},
        {"{" T("a", "F32", "[4]", "[0]") "}", "two numbers"},
        {"{" T("a", "F32", "4", "[0,16]") "}", "list"},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("a", "F32", "[2]", "[8,16]") "}", "name of another tensor"},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("\\u0061", "F32", "[2]", "[8,16]") "}",
         "name of another tensor"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4]}}", "each once"},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", "each once"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16],\"x\":1}}", "each once"},
        {"{\"a\":3}", "object"},
        {"{\"__metadata__\":{\"x\":\"1\",\"x\":\"2\"}," T("a", "F32", "[4]", "[0,16]") "}", "duplicate key"},
        {"{\"__metadata__\":{},\"__metadata__\":{}," T("a", "F32", "[4]", "[0,16]") "}",
         "duplicate __metadata__"},
        {"{\"__metadata__\":{\"x\":1}," T("a", "F32", "[4]", "[0,16]") "}", "string"},
        {"{\"__metadata__\":{\"crc32c:a\":\"1234567\"}," T("a", "F32", "[4]", "[0,16]") "}", "8 hexadecimal"},
        {"{\"__metadata__\":{\"crc32c:a\":\"012345678\"}," T("a", "F32", "[4]", "[0,16]") "}",
         "8 hexadecimal"},
        {"{\"__metadata__\":{\"crc32c:a\":\"1234567g\"}," T("a", "F32", "[4]", "[0,16]") "}",
         "8 hexadecimal"},
        {"{" T("\xff", "F32", "[4]", "[0,16]") "}", "UTF-8"},
        {"{" T("a", "F32", "[4]", "[0,16]"), "closing"},
        {"{" T("a", "F32", "[4]", "[0,16]") ",}", "string"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ddp__load_file header;
        ddp_result result = read_header(bad[i].text, strlen(bad[i].text), 16, &header);
        if (result != DDP_ERR_CORRUPT || !strstr(ddp_last_error(), bad[i].says)
            || !strstr(ddp_last_error(), "folder/a.safetensors"))
            fail_msg("%s gives %s: %s", bad[i].text, ddp_result_name(result),
                     result == DDP_OK ? "" : ddp_last_error());
        drop(&header);
    }
}

/* Every text that is cut off is refused, and every byte that is changed leads to an answer. */
static void test_header_cut_and_flipped(void **state) {
    static const char text[] = "{\"__metadata__\":{\"format\":\"pt\",\"crc32c:a\":\"01234567\"}," T(
        "a", "F32", "[2,2]", "[0,16]") "," T("\xc3\xa9", "U8", "[]", "[16,17]") "}";
    (void)state;
    for (size_t length = 0; length < sizeof text - 1; length++) {
        ddp__load_file header;
        assert_int_equal(read_header(text, length, 17, &header), DDP_ERR_CORRUPT);
        drop(&header);
    }
    for (size_t at = 0; at < sizeof text - 1; at++)
        for (int bit = 0; bit < 8; bit++) {
            char flipped[sizeof text - 1];
            ddp__load_file header;
            memcpy(flipped, text, sizeof flipped);
            flipped[at] = (char)(flipped[at] ^ 1 << bit);
            ddp_result result = read_header(flipped, sizeof flipped, 17, &header);
            assert_true(result == DDP_OK || result == DDP_ERR_CORRUPT);
            drop(&header);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_crc_values),
        cmocka_unit_test(test_crc_of_runs),
        cmocka_unit_test(test_json_accepts),
        cmocka_unit_test(test_json_refuses),
        cmocka_unit_test(test_json_characters),
        cmocka_unit_test(test_json_values),
        cmocka_unit_test(test_header),
        cmocka_unit_test(test_header_refused),
        cmocka_unit_test(test_header_cut_and_flipped),
    };
    watchdog_start(60);
    alone->desc.alloc_fn = allocate;
    alone->desc.free_fn = release;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

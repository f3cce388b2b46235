/*  test_hmac.c - the proof of a secret: SHA-256 against the examples of FIPS 180, each divided at every
    place; HMAC-SHA-256 against RFC 4231. Every input of a proof changes it. Text from peers is escaped. */
#include "../support/unit.h"
#include "../support/watchdog.h"

#define DDP_STATIC
#define DDP_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../ddp.h"

static void from_hex(unsigned char *out, const char *hex) {
    for (; hex[0] && hex[1]; hex += 2) {
        unsigned byte = 0;
        sscanf(hex, "%2x", &byte);
        *out++ = (unsigned char)byte;
    }
}

static void expect_hash(const void *message, size_t size, const char *hex) {
    unsigned char out[32], want[32];
    size_t step = size > 1000 ? 43 : 1;
    from_hex(want, hex);
    for (size_t first = 0; first <= size && first < 130; first += step) { /* in two pieces, cut anywhere */
        ddp__sha256(message, first, (const char *)message + first, size - first, out);
        assert_memory_equal(out, want, 32);
    }
}

static void test_sha256(void **state) {
    static char million[1000000];
    const char *two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    const char *longer =
        "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
        "mnopqrstnopqrstu";
    (void)state;
    expect_hash("", 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    expect_hash("abc", 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    expect_hash(two_blocks, 56, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    expect_hash(longer, 112, "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    memset(million, 'a', sizeof million);
    expect_hash(million, sizeof million, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void test_hmac(void **state) {
    static unsigned char key[131], data[152];
    const char *large_key = "Test Using Larger Than Block-Size Key - Hash Key First";
    const char *large_both =
        "This is a test using a larger than block-size key and a larger than block-size data. The key "
        "needs to be hashed before being used by the HMAC algorithm.";
    struct {
        size_t key_size;
        int key_byte;     /* -1: 1, 2, 3, ...; -2: "Jefe" */
        const char *text; /* NULL: data_size times data_byte */
        size_t data_size;
        int data_byte;
        const char *hex;
        size_t hex_bytes;
    } cases[] = {
        {20, 0x0b, "Hi There", 8, 0, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", 32},
        {4, -2, "what do ya want for nothing?", 28, 0,
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843", 32},
        {20, 0xaa, NULL, 50, 0xdd, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe", 32},
        {25, -1, NULL, 50, 0xcd, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b", 32},
        {20, 0x0c, "Test With Truncation", 20, 0, "a3b6167473100ee06e0c796c2955552b", 16},
        {64, 0xaa, "A key of exactly one block", 26, 0, /* RFC 4231 has no such key; by Python's hmac */
         "2c704478485b26a2c6cac8fdeec0f6b4d5395bef4231c7d4099290fb055c5a00", 32},
        {131, 0xaa, large_key, 54, 0, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54", 32},
        {131, 0xaa, large_both, 152, 0, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
         32},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char out[32], want[32];
        for (size_t k = 0; k < cases[i].key_size; k++)
            key[k] = (unsigned char)(cases[i].key_byte >= 0 ? cases[i].key_byte : (int)k + 1);
        if (cases[i].key_byte == -2) memcpy(key, "Jefe", 4);
        memset(data, cases[i].data_byte, sizeof data);
        if (cases[i].text) memcpy(data, cases[i].text, cases[i].data_size);
        from_hex(want, cases[i].hex);
        ddp__hmac_sha256(key, cases[i].key_size, data, cases[i].data_size, out);
        assert_memory_equal(out, want, cases[i].hex_bytes);
    }
}

static void test_equal(void **state) {
    unsigned char left[65], right[65];
    (void)state;
    memset(left, 5, sizeof left);
    memset(right, 5, sizeof right);
    assert_true(ddp__equal_in_constant_time(left, right, sizeof left));
    for (size_t i = 0; i < sizeof left; i++) {
        right[i] ^= 0x80;
        assert_false(ddp__equal_in_constant_time(left, right, sizeof left));
        right[i] ^= 0x80;
    }
}

/* Each input of a proof changes it: the key, the role, either nonce, and every byte of the hello. */
static void test_proof(void **state) {
    unsigned char key[32] = {1};
    uint64_t nonce[2][2] = {{1, 2}, {3, 4}};
    char hello[DDP__TEXT_MAX] = "0123456789abcdef 1 2 3", first[65], other[65];
    (void)state;
    ddp__proof_write(first, key, 'r', nonce[0], nonce[1], hello);
    ddp__proof_write(other, key, 'r', nonce[0], nonce[1], hello);
    assert_string_equal(first, other);
    assert_int_equal(strlen(first), 64);
    ddp__proof_write(other, key, '0', nonce[0], nonce[1], hello);
    assert_string_not_equal(first, other);
    ddp__proof_write(other, key, 'r', nonce[1], nonce[0], hello);
    assert_string_not_equal(first, other);
    for (int i = 0; i < 4; i++) {
        nonce[i / 2][i % 2] ^= 1;
        ddp__proof_write(other, key, 'r', nonce[0], nonce[1], hello);
        assert_string_not_equal(first, other);
        nonce[i / 2][i % 2] ^= 1;
    }
    for (int i = 0; i < 32; i++) {
        key[i] ^= 1;
        ddp__proof_write(other, key, 'r', nonce[0], nonce[1], hello);
        assert_string_not_equal(first, other);
        key[i] ^= 1;
    }
    for (int i = 0; i < DDP__TEXT_MAX; i++) {
        hello[i] ^= 1;
        ddp__proof_write(other, key, 'r', nonce[0], nonce[1], hello);
        assert_string_not_equal(first, other);
        hello[i] ^= 1;
    }
}

static void test_escape(void **state) {
    char text[DDP__TEXT_MAX] = "plain \x1b[31mred\n\x7f\xc3\xa9\\x1b", once[DDP__TEXT_MAX];
    (void)state;
    ddp__escape_text(text);
    assert_string_equal(text, "plain \\x1b[31mred\\x0a\\x7f\\xc3\\xa9\\x1b");
    memcpy(once, text, sizeof once);
    ddp__escape_text(text);
    assert_string_equal(text, once);
    memset(text, 0x1b, sizeof text);
    ddp__escape_text(text);
    assert_int_equal(text[DDP__TEXT_MAX - 1], 0);
    assert_true(strlen(text) <= DDP__TEXT_MAX - 1 && strlen(text) % 4 == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sha256), cmocka_unit_test(test_hmac),
                                       cmocka_unit_test(test_equal), cmocka_unit_test(test_proof),
                                       cmocka_unit_test(test_escape)};
    watchdog_start(60);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

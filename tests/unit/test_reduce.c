/*  test_reduce.c - the CPU kernels: tree reductions, casts, divisions and exact sums against plain scalar
    references.

    A reduction of every dtype, operation and number of sources is computed once per element by the reference
    below; every count, offset, set of destinations and store path must then give the same bits. NaN matches
    any NaN.

    test_reduce [narrow]     narrow: as on a CPU without wide vectors */
#include <float.h>
#include <math.h>
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/random.h"
#include "../support/unit.h"

#define COUNT_MAX 4097
#define SOURCES_MAX 64
#define SLOT (COUNT_MAX * 8 + 256)

static const ddp_dtype dtypes[] = {DDP_F32, DDP_F64, DDP_F16, DDP_BF16, DDP_I8,
                                   DDP_U8,  DDP_I32, DDP_I64, DDP_U64};
static const char *const dtype_names[] = {"default", "f32", "f64", "f16", "bf16",
                                          "i8",      "u8",  "i32", "i64", "u64"};
static const size_t counts[] = {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 511, 513, 1000, 4097};
#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static uint64_t bits_of_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}
static double double_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

/* ---- 16-bit floats by definition ---- */

/* Value of a float format with the given mantissa bits and 15 bits of exponent and mantissa in all. */
static double half_value(uint16_t half, int mantissa_bits) {
    int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = (half & 0x7fff) >> mantissa_bits, mantissa = half & ((1 << mantissa_bits) - 1);
    double value;
    if (exponent == (1 << exponent_bits) - 1)
        value = mantissa ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = ldexp(mantissa, 1 - bias - mantissa_bits);
    else
        value = ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return half & 0x8000 ? -value : value;
}

/* f16 and bf16: magnitudes in ascending order; infinity represents the next power of two. */
static double half_values[2][0x7f81];
static uint16_t half_infinity[2] = {0x7c00, 0x7f80};
static const int half_mantissa[2] = {10, 7};

static int prepare(void **state) {
    (void)state;
    for (int format = 0; format < 2; format++) {
        for (uint32_t i = 0; i < half_infinity[format]; i++)
            half_values[format][i] = half_value((uint16_t)i, half_mantissa[format]);
        half_values[format][half_infinity[format]] = format == 0 ? 65536.0 : ldexp(1.0, 128);
    }
    return 0;
}

/* Nearest even by searching the table of all values. */
static uint16_t half_nearest(double value, int format) {
    const double *table = half_values[format];
    uint16_t sign = (uint16_t)(bits_of_double(value) >> 63 << 15);
    int low = 0, high = half_infinity[format];
    double magnitude = fabs(value);
    if (magnitude != magnitude) return (uint16_t)(sign | half_infinity[format] | 1);
    if (magnitude >= table[high]) return (uint16_t)(sign | high);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table[middle] <= magnitude)
            low = middle;
        else
            high = middle;
    }
    /* Both differences are exact: the neighbours differ by at most a factor of two, or the lower one is 0. */
    if (magnitude - table[low] > table[high] - magnitude)
        low = high;
    else if (magnitude - table[low] == table[high] - magnitude && (low & 1))
        low = high;
    return (uint16_t)(sign | low);
}

/* ---- the reference reduction, one element ---- */

typedef union element {
    float f32;
    double f64;
    int64_t i64;
    uint64_t u64;
} element;

static int is_float(ddp_dtype dtype) {
    return dtype == DDP_F32 || dtype == DDP_F64 || dtype == DDP_F16 || dtype == DDP_BF16;
}

static element element_load(const void *data, size_t i, ddp_dtype dtype) {
    element e;
    const unsigned char *at = (const unsigned char *)data + i * ddp_dtype_size(dtype);
    uint16_t half;
    int8_t i8;
    int32_t i32;
    memset(&e, 0, sizeof e);
    switch (dtype) {
    case DDP_F16:
        memcpy(&half, at, 2);
        e.f32 = (float)half_value(half, 10);
        break;
    case DDP_BF16:
        memcpy(&half, at, 2);
        e.f32 = (float)half_value(half, 7);
        break;
    case DDP_F32: memcpy(&e.f32, at, 4); break;
    case DDP_I8:
        memcpy(&i8, at, 1);
        e.i64 = i8;
        break;
    case DDP_U8: e.u64 = *at; break;
    case DDP_I32:
        memcpy(&i32, at, 4);
        e.i64 = i32;
        break;
    default: memcpy(&e, at, 8); break;
    }
    return e;
}

static void element_store(void *data, size_t i, ddp_dtype dtype, element e) {
    unsigned char *at = (unsigned char *)data + i * ddp_dtype_size(dtype);
    uint16_t half;
    if (dtype == DDP_F16 || dtype == DDP_BF16) {
        half = half_nearest(e.f32, dtype == DDP_BF16);
        memcpy(at, &half, 2);
    } else
        memcpy(at, &e, ddp_dtype_size(dtype)); /* little-endian: the low bytes of a wrapped integer */
}

/* Integers keep full 64-bit values, truncated to their type after each step. */
static int64_t cut(int64_t value, ddp_dtype dtype) {
    uint64_t u = (uint64_t)value;
    if (dtype == DDP_I8) return (int64_t)(u & 0xff) - (int64_t)((u & 0x80) << 1);
    if (dtype == DDP_U8) return (int64_t)(u & 0xff);
    if (dtype == DDP_I32) return (int64_t)(u & 0xffffffff) - (int64_t)((u & 0x80000000u) << 1);
    return value;
}

static double pick(double a, double b, int greater) {
    if (a != a || b != b) return (double)NAN;
    if (a == b) return greater ? (signbit(a) ? b : a) : (signbit(a) ? a : b);
    return (a < b) != greater ? a : b;
}

static element combine(element a, element b, ddp_dtype dtype, ddp_op op) {
    element r;
    int sum = op == DDP_OP_SUM || op == DDP_OP_AVG;
    memset(&r, 0, sizeof r);
    if (dtype == DDP_F64)
        r.f64 = sum                 ? a.f64 + b.f64
                : op == DDP_OP_PROD ? a.f64 * b.f64
                                    : pick(a.f64, b.f64, op == DDP_OP_MAX);
    else if (is_float(dtype))
        r.f32 = sum                 ? a.f32 + b.f32
                : op == DDP_OP_PROD ? a.f32 * b.f32
                                    : (float)pick(a.f32, b.f32, op == DDP_OP_MAX);
    else if (sum)
        r.i64 = cut((int64_t)(a.u64 + b.u64), dtype);
    else if (op == DDP_OP_PROD)
        r.i64 = cut((int64_t)(a.u64 * b.u64), dtype);
    else if (dtype == DDP_U64)
        r.u64 = (a.u64 < b.u64) == (op == DDP_OP_MIN) ? a.u64 : b.u64;
    else
        r.i64 = (a.i64 < b.i64) == (op == DDP_OP_MIN) ? a.i64 : b.i64;
    return r;
}

/* A range of n > 1 sources splits at the largest power of two below n. */
static element tree(void *const *src, int first, int n, size_t i, ddp_dtype dtype, ddp_op op) {
    int left = 1;
    if (n == 1) return element_load(src[first], i, dtype);
    while (left * 2 < n) left *= 2;
    return combine(tree(src, first, left, i, dtype, op), tree(src, first + left, n - left, i, dtype, op),
                   dtype, op);
}

static element divided(element e, ddp_dtype dtype, uint64_t divisor) {
    if (dtype == DDP_F64)
        e.f64 = e.f64 / (double)divisor;
    else if (is_float(dtype))
        e.f32 = e.f32 / (float)divisor;
    else if (dtype == DDP_U8 || dtype == DDP_U64)
        e.u64 /= divisor;
    else
        e.i64 /= (int64_t)divisor;
    return e;
}

static int is_nan_at(const void *data, size_t i, ddp_dtype dtype) {
    element e;
    if (!is_float(dtype)) return 0;
    e = element_load(data, i, dtype);
    return dtype == DDP_F64 ? e.f64 != e.f64 : e.f32 != e.f32;
}

/* Index of the first element that differs, or count. */
static size_t first_difference(const void *a, const void *b, size_t count, ddp_dtype dtype) {
    size_t size = ddp_dtype_size(dtype);
    if (count == 0 || memcmp(a, b, count * size) == 0) return count;
    for (size_t i = 0; i < count; i++)
        if (memcmp((const char *)a + i * size, (const char *)b + i * size, size) != 0
            && !(is_nan_at(a, i, dtype) && is_nan_at(b, i, dtype)))
            return i;
    return count;
}

/* Numbers of mixed size, with NaN, infinities, zeros of both signs, subnormals and ties among them. */
static void fill(void *data, size_t count, ddp_dtype dtype) {
    for (size_t i = 0; i < count; i++) {
        uint64_t r = random_u64(), kind = random_u64() % 64;
        element e;
        e.u64 = r;
        if (dtype == DDP_F64) {
            if (kind < 56)
                e.f64 = ldexp((double)(int64_t)r, (int)(kind % 24) - 63);
            else if (kind < 58)
                e.u64 = r & UINT64_C(0x800fffffffffffff);
            else if (kind < 61)
                e.f64 = r & 1 ? 0.0 : -0.0;
            else if (kind == 61)
                e.f64 = r & 1 ? INFINITY : -INFINITY;
        } else if (dtype == DDP_F32) {
            if (kind < 56)
                e.f32 = ldexpf((float)(int32_t)r, (int)(kind % 24) - 31);
            else if (kind < 58)
                e.f32 = float_of((uint32_t)r & 0x807fffff);
            else if (kind < 61)
                e.f32 = r & 1 ? 0.0f : -0.0f;
            else if (kind == 61)
                e.f32 = r & 1 ? INFINITY : -INFINITY;
            else
                e.f32 = float_of((uint32_t)r);
        } else if (is_float(dtype)) {
            if (kind < 50)
                e.f32 = ldexpf((float)(int32_t)r, (int)(kind % 24) - 31);
            else if (kind < 52)
                e.f32 = r & 1 ? 0.0f : -0.0f;
            else
                e.f32 = (float)half_value((uint16_t)r, dtype == DDP_F16 ? 10 : 7);
        } else if (kind < 8)
            e.u64 = r % 5;
        element_store(data, i, dtype, e);
    }
}

/* ---- reductions ---- */

static unsigned char *arena, *outside; /* SOURCES_MAX slots each; offset bytes in front of every array */
static void *source[SOURCES_MAX], *pristine[SOURCES_MAX];

/* Sets of destinations: number of arrays apart from the sources, then sources written in place. */
typedef enum pattern {
    OUT_1,
    OUT_2,
    OUT_3,
    OUT_10,
    IN_FIRST,
    IN_LAST,
    IN_FIRST_AND_OUT,
    IN_ALL,
    IN_TWO_LAST,
    PATTERNS
} pattern;

static int destinations(pattern p, int src_count, void **dst, size_t offset) {
    int n = 0, outs = p == OUT_1              ? 1
                      : p == OUT_2            ? 2
                      : p == OUT_3            ? 3
                      : p == OUT_10           ? 10
                      : p == IN_FIRST_AND_OUT ? 1
                                              : 0;
    if (p == IN_FIRST || p == IN_FIRST_AND_OUT) dst[n++] = source[0];
    if (p == IN_LAST || p == IN_TWO_LAST) dst[n++] = source[src_count - 1];
    if (p == IN_TWO_LAST && src_count > 1) dst[n++] = source[src_count - 2];
    if (p == IN_ALL)
        for (int i = 0; i < src_count; i++) dst[n++] = source[i];
    for (int i = 0; i < outs; i++) dst[n++] = outside + (size_t)i * SLOT + 64 + offset;
    return n;
}

static void check_case(pattern p, int src_count, size_t count, ddp_dtype dtype, ddp_op op, uint64_t divisor,
                       size_t offset, int how, const void *expected) {
    void *dst[SOURCES_MAX];
    const void *src[SOURCES_MAX];
    size_t size = ddp_dtype_size(dtype), bytes = count * size;
    int dst_count;

    for (int i = 0; i < src_count; i++) {
        source[i] = arena + (size_t)i * SLOT + 64 + (offset ? offset + (size_t)i % 3 * size : 0);
        memcpy(source[i], pristine[i], bytes);
        memset((char *)source[i] + bytes, 0x5a, 32);
        src[i] = source[i];
    }
    dst_count = destinations(p, src_count, dst, offset);
    for (int i = 0; i < dst_count; i++) {
        memset((char *)dst[i] - 32, 0xa5, 32);
        memset((char *)dst[i] + bytes, 0x5a, 32);
    }
    inner.reduce_tree(dst, dst_count, src, src_count, count, dtype, op, divisor, how);
    for (int i = 0; i < dst_count; i++) {
        size_t at = first_difference(expected, dst[i], count, dtype);
        if (at != count)
            fail_msg(
                "%s op %d W=%d count=%zu offset=%zu pattern=%d divisor=%llu: destination %d differs at %zu",
                dtype_names[dtype], (int)op, src_count, count, offset, (int)p, (unsigned long long)divisor, i,
                at);
        for (int k = 0; k < 32; k++)
            if (((unsigned char *)dst[i])[k - 32] != 0xa5
                || ((unsigned char *)dst[i])[bytes + (size_t)k] != 0x5a)
                fail_msg("%s W=%d count=%zu offset=%zu pattern=%d: written outside destination %d",
                         dtype_names[dtype], src_count, count, offset, (int)p, i);
    }
    for (int i = 0; i < src_count; i++) {
        int written = 0;
        for (int k = 0; k < dst_count; k++) written |= dst[k] == src[i];
        if (!written && memcmp(src[i], pristine[i], bytes) != 0) fail_msg("source %d was changed", i);
    }
}

static void check_operation(int src_count, ddp_dtype dtype, ddp_op op, uint64_t divisor) {
    static unsigned char expected[SLOT];
    const size_t offsets[] = {0, ddp_dtype_size(dtype), 7};
    for (size_t i = 0; i < COUNT_MAX; i++) {
        element e = tree(pristine, 0, src_count, i, dtype, op);
        if (op == DDP_OP_AVG && divisor > 1) e = divided(e, dtype, divisor);
        element_store(expected, i, dtype, e);
    }
    for (size_t c = 0; c < LENGTH(counts); c++)
        for (int p = 0; p < PATTERNS; p++)
            for (size_t o = 0; o < LENGTH(offsets); o++)
                check_case((pattern)p, src_count, counts[c], dtype, op, divisor, offsets[o],
                           (int)(c + o + (size_t)p) % 3, expected);
}

/* Other compilers and sanitizers repeat only some of the cases. */
#define SHARE (DDP_TEST_SLOWDOWN > 1 ? 6 : strcmp(DDP_TEST_FLAVOUR, "plain") == 0 ? 1 : 3)

static void every_path_gives_the_bits_of_the_tree(void **state) {
    static const int worlds[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64};
    (void)state;
    for (size_t t = 0; t < LENGTH(dtypes); t++) {
        for (int i = 0; i < SOURCES_MAX; i++) fill(pristine[i], COUNT_MAX, dtypes[t]);
        for (size_t w = 0; w < LENGTH(worlds); w++) {
            if ((w + t) % SHARE) continue; /* each world with some of the types */
            check_operation(worlds[w], dtypes[t], DDP_OP_SUM, (uint64_t)worlds[w] % 2);
            check_operation(worlds[w], dtypes[t], DDP_OP_AVG, (uint64_t)worlds[w]);
            check_operation(worlds[w], dtypes[t], DDP_OP_AVG, w % 2 ? 6 : 16);
            check_operation(worlds[w], dtypes[t], DDP_OP_MIN, 0);
            check_operation(worlds[w], dtypes[t], DDP_OP_MAX, 3);
            check_operation(worlds[w], dtypes[t], DDP_OP_PROD, 5);
        }
    }
}

/* copy_across and copy_stream, below and above several runs, from and to every alignment, write the right
   bytes and no others. */
static void copies_are_exact(void **state) {
    static const size_t sizes[] = {0, 1, 63, 64, 65, 8191, 8192, 8193, 12345, 16448};
    unsigned char *in = arena, *out = outside;
    (void)state;
    for (size_t i = 0; i < 20000; i++) in[i] = (unsigned char)(i * 131 + i / 256);
    for (size_t c = 0; c < LENGTH(sizes); c++)
        for (size_t offset = 0; offset < 72; offset += 9)
            for (int past = 0; past < 2; past++) {
                unsigned char *to = out + 64 + offset;
                memset(out, 0xa5, sizes[c] + 256);
                (past ? inner.copy_stream : inner.copy_across)(to, in + 71 - offset, sizes[c]);
                inner.stream_end();
                assert_memory_equal(to, in + 71 - offset, sizes[c]);
                assert_int_equal(to[-1], 0xa5);
                assert_int_equal(to[sizes[c]], 0xa5);
            }
}

/* The arrays of pointers have exactly the sizes that were given. ASan reports a read past their end. */
static void streaming_stays_inside_the_pointer_arrays(void **state) {
    enum { SOURCES = 3, ELEMENTS = 100, PAST = 2 };
    void **dst = (void **)malloc(2 * sizeof *dst);
    const void **src = (const void **)malloc(SOURCES * sizeof *src);
    static float in[SOURCES][ELEMENTS], out[2][ELEMENTS];
    (void)state;
    assert_true(dst && src);
    for (int s = 0; s < SOURCES; s++) {
        src[s] = in[s];
        for (int i = 0; i < ELEMENTS; i++) in[s][i] = (float)(s * 1000 + i);
    }
    dst[0] = out[0];
    dst[1] = out[1];
    inner.reduce_tree(dst, 2, src, SOURCES, ELEMENTS, DDP_F32, DDP_OP_SUM, 1, PAST);
    for (int i = 0; i < ELEMENTS; i++) {
        assert_true(out[0][i] == (float)(3000 + 3 * i));
        assert_true(out[1][i] == out[0][i]);
    }
    free(dst);
    free(src);
}

/* 2^24 absorbs a single 1 but not a 2: each grouping of seven sources has a different sum. */
static void seven_sources_group_as_documented(void **state) {
    float in[7] = {16777216.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}, out = 0.0f;
    void *dst[1];
    const void *src[7];
    (void)state;
    dst[0] = &out;
    for (int i = 0; i < 7; i++) src[i] = &in[i];
    inner.reduce_tree(dst, 1, src, 7, 1, DDP_F32, DDP_OP_SUM, 0, 0);
    assert_true(out == ((16777216.0f + 1.0f) + (1.0f + 1.0f)) + ((1.0f + 1.0f) + 1.0f));
    inner.reduce_tree(dst, 1, src, 3, 1, DDP_F32, DDP_OP_SUM, 0, 0);
    assert_true(out == 16777216.0f);
}

static void minimum_and_maximum_order_zeros_and_pass_nan_on(void **state) {
    const float values[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 1e-45f, -1e-45f};
    (void)state;
    for (size_t a = 0; a < LENGTH(values); a++)
        for (size_t b = 0; b < LENGTH(values); b++)
            for (size_t count = 1; count <= 17; count += 16) {
                float x[17], y[17], low[17], high[17];
                void *dst[1];
                const void *src[2];
                src[0] = x;
                src[1] = y;
                for (int i = 0; i < 17; i++) {
                    x[i] = values[a];
                    y[i] = values[b];
                }
                dst[0] = low;
                inner.reduce_tree(dst, 1, src, 2, count, DDP_F32, DDP_OP_MIN, 0, 0);
                dst[0] = high;
                inner.reduce_tree(dst, 1, src, 2, count, DDP_F32, DDP_OP_MAX, 0, 0);
                for (size_t i = 0; i < count; i++) {
                    if (isnan(values[a]) || isnan(values[b])) {
                        assert_true(isnan(low[i]) && isnan(high[i]));
                        continue;
                    }
                    assert_int_equal(bits_of(low[i]), bits_of((float)pick(values[a], values[b], 0)));
                    assert_int_equal(bits_of(high[i]), bits_of((float)pick(values[a], values[b], 1)));
                }
            }
}

static void halves_are_added_in_f32_and_rounded_once(void **state) {
    /* 2048 + 1 + 1: each addition rounded to f16 would stay at 2048; 65504 + 65504 - 65504 would overflow. */
    uint16_t one[4] = {0x6800, 0x3c00, 0x3c00, 0x0000}, two[3] = {0x7bff, 0x7bff, 0xfbff}, out;
    const void *src[4];
    void *dst[1];
    (void)state;
    dst[0] = &out;
    for (int i = 0; i < 4; i++) src[i] = &one[i];
    inner.reduce_tree(dst, 1, src, 4, 1, DDP_F16, DDP_OP_SUM, 0, 0);
    assert_int_equal(out, 0x6801);
    for (int i = 0; i < 3; i++) src[i] = &two[i];
    inner.reduce_tree(dst, 1, src, 3, 1, DDP_F16, DDP_OP_SUM, 0, 0);
    assert_int_equal(out, 0x7bff);
    inner.reduce_tree(dst, 1, src, 2, 1, DDP_F16, DDP_OP_SUM, 0, 0);
    assert_int_equal(out, 0x7c00);
    inner.reduce_tree(dst, 1, src, 2, 1, DDP_F16, DDP_OP_AVG, 2, 0);
    assert_int_equal(out, 0x7bff);
}

/* ---- division ---- */

static void division_matches_the_average(void **state) {
    static const uint64_t divisors[] = {0, 1, 2, 3, 7, 64, 255, 1000003, UINT64_C(1) << 63, UINT64_MAX};
    static unsigned char data[SLOT], expected[SLOT];
    (void)state;
    for (size_t t = 0; t < LENGTH(dtypes); t++)
        for (size_t d = 0; d < LENGTH(divisors); d++) {
            size_t count = 1543, size = ddp_dtype_size(dtypes[t]);
            void *one[1];
            const void *src[1];
            fill(data + 7, count, dtypes[t]);
            one[0] = expected;
            src[0] = data + 7;
            inner.reduce_tree(one, 1, src, 1, count, dtypes[t], DDP_OP_AVG, divisors[d], 0);
            for (size_t i = 0; i < count && divisors[d] > 1 && divisors[d] < UINT64_MAX / 4; i++) {
                element e = divided(element_load(data + 7, i, dtypes[t]), dtypes[t], divisors[d]);
                unsigned char one_element[8];
                element_store(one_element, 0, dtypes[t], e);
                assert_int_equal(first_difference(one_element, expected + i * size, 1, dtypes[t]), 1);
            }
            inner.divide(data + 7, count, dtypes[t], divisors[d]);
            assert_int_equal(first_difference(expected, data + 7, count, dtypes[t]), count);
        }
}

static void signed_division_truncates_at_the_limits(void **state) {
    int64_t wide[4] = {INT64_MIN, INT64_MIN + 1, INT64_MAX, -7};
    int8_t narrow[3] = {-128, 127, -7};
    (void)state;
    inner.divide(wide, 4, DDP_I64, UINT64_C(1) << 63);
    assert_true(wide[0] == -1 && wide[1] == 0 && wide[2] == 0 && wide[3] == 0);
    wide[0] = INT64_MIN;
    wide[3] = -7;
    inner.divide(wide, 4, DDP_I64, 2);
    assert_true(wide[0] == INT64_MIN / 2 && wide[3] == -3);
    inner.divide(narrow, 3, DDP_I8, 2);
    assert_true(narrow[0] == -64 && narrow[1] == 63 && narrow[2] == -3);
    inner.divide(narrow, 3, DDP_I8, 1000);
    assert_true(narrow[0] == 0 && narrow[1] == 0 && narrow[2] == 0);
}

/* ---- casts ---- */

static void all_halves_survive_a_round_trip(void **state) {
    static uint16_t in[65536], out[65536];
    static float f32[65536];
    static double f64[65536];
    (void)state;
    for (int i = 0; i < 65536; i++) in[i] = (uint16_t)i;
    for (int format = 0; format < 2; format++) {
        ddp_dtype dtype = format ? DDP_BF16 : DDP_F16;
        inner.cast(f32, DDP_F32, in, dtype, 65536);
        inner.cast(f64, DDP_F64, in, dtype, 65536);
        for (int i = 0; i < 65536; i++) {
            double value = half_value((uint16_t)i, half_mantissa[format]);
            if (isnan(value)) {
                assert_true(isnan(f32[i]) && isnan(f64[i]));
                continue;
            }
            assert_int_equal(bits_of(f32[i]), bits_of((float)value));
            assert_true(bits_of_double(f64[i]) == bits_of_double(value));
        }
        inner.cast(out, dtype, f32, DDP_F32, 65536);
        assert_int_equal(first_difference(in, out, 65536, dtype), 65536);
        memset(out, 0, sizeof out);
        inner.cast(out, dtype, f64, DDP_F64, 65536);
        assert_int_equal(first_difference(in, out, 65536, dtype), 65536);
    }
}

static void check_rounding(const double *values, size_t count) {
    static float f32[4096];
    static uint16_t from_f32[4096], from_f64[4096];
    for (size_t i = 0; i < count; i++) f32[i] = (float)values[i];
    for (int format = 0; format < 2; format++) {
        ddp_dtype dtype = format ? DDP_BF16 : DDP_F16;
        inner.cast(from_f32, dtype, f32, DDP_F32, count);
        inner.cast(from_f64, dtype, values, DDP_F64, count);
        for (size_t i = 0; i < count; i++) {
            uint16_t a = half_nearest(f32[i], format), b = half_nearest(values[i], format);
            if (isnan(values[i])) {
                assert_true((from_f32[i] & 0x7fff) > half_infinity[format]
                            && (from_f64[i] & 0x7fff) > half_infinity[format]);
                continue;
            }
            if (a != from_f32[i] || b != from_f64[i])
                fail_msg("format %d value %a: from f32 %04x, expected %04x; from f64 %04x, expected %04x",
                         format, values[i], from_f32[i], a, from_f64[i], b);
        }
    }
}

static void casts_round_once_to_nearest_even(void **state) {
    static double values[4096];
    size_t n = 0;
    (void)state;
    for (int round = 0; round < 200; round++) {
        for (n = 0; n < 4096; n++) {
            uint64_t r = random_u64();
            if (r % 4 == 0)
                values[n] = float_of((uint32_t)(r >> 32));
            else if (r % 4 == 1)
                values[n] = double_of(random_u64());
            else
                values[n] = ldexp((double)(int64_t)r, (int)(random_u64() % 50) - 90);
        }
        check_rounding(values, 4096);
    }
    /* Every midpoint of two neighbours, and the doubles and floats next to it. */
    for (int format = 0; format < 2; format++)
        for (int i = 0; i < half_infinity[format]; i++) {
            double middle = (half_values[format][i] + half_values[format][i + 1]) / 2;
            double near[9];
            near[0] = middle;
            near[1] = nextafter(middle, 0.0);
            near[2] = nextafter(middle, INFINITY);
            near[3] = -middle;
            near[4] = -near[1];
            near[5] = -near[2];
            near[6] = nextafterf((float)middle, 0.0f);
            near[7] = nextafterf((float)middle, INFINITY);
            near[8] = half_values[format][i];
            check_rounding(near, 9);
        }
}

static void casts_between_other_types(void **state) {
    float f32[40], back[40];
    double f64[40];
    uint16_t half[40], other[40];
    (void)state;
    for (int i = 0; i < 40; i++) f32[i] = float_of((uint32_t)random_u64() & 0xbfffffff);
    inner.cast(f64, DDP_F64, f32, DDP_F32, 40);
    inner.cast(back, DDP_F32, f64, DDP_F64, 40);
    assert_int_equal(first_difference(f32, back, 40, DDP_F32), 40);
    inner.cast(back, DDP_F32, f32, DDP_F32, 40);
    assert_memory_equal(f32, back, sizeof f32);
    inner.cast(back, DDP_F32, f32, DDP_F32, 0);
    for (int i = 0; i < 40; i++) half[i] = (uint16_t)(0x3c00 + i);
    inner.cast(other, DDP_BF16, half, DDP_F16, 40);
    for (int i = 0; i < 40; i++) assert_int_equal(other[i], half_nearest(half_value(half[i], 10), 1));
    inner.cast(half, DDP_BF16, half, DDP_F16, 40); /* in place between types of one size */
    assert_memory_equal(half, other, sizeof half);
}

/* ---- lists of copies ---- */

static void many_ranges_are_copied_or_cast(void **state) {
    float from[300], to[300];
    uint16_t half[300];
    ddp_copy_range ranges[100];
    (void)state;
    for (int i = 0; i < 300; i++) from[i] = (float)(i + 1);
    memset(to, 0, sizeof to);
    for (int i = 0; i < 100; i++) { /* backwards, every third is empty */
        ranges[i].dst = to + 3 * (99 - i);
        ranges[i].src = from + 3 * i;
        ranges[i].count = (size_t)(i % 3);
    }
    ddp_device_cpu()->copy_many(ranges, 100, DDP_F32, DDP_F32);
    for (int i = 0; i < 300; i++) {
        int range = 99 - i / 3;
        assert_true(to[i] == (i % 3 < range % 3 ? from[3 * range + i % 3] : 0.0f));
    }
    for (int i = 0; i < 100; i++) {
        ranges[i].dst = half + 3 * i;
        ranges[i].count = 3;
    }
    ddp_device_cpu()->copy_many(ranges, 100, DDP_BF16, DDP_F32);
    for (int i = 0; i < 300; i++) assert_int_equal(half[i], half_nearest((double)from[i], 1));
    ddp_device_cpu()->copy_many(NULL, 0, DDP_F32, DDP_F32);
}

static int list_calls, list_ranges; /* of counted_copy_many */
static void counted_copy_many(const ddp_copy_range *ranges, int range_count, ddp_dtype to, ddp_dtype from) {
    list_calls++;
    list_ranges += range_count;
    ddp_device_cpu()->copy_many(ranges, range_count, to, from);
}

/* A list joins neighbours, and copies when it is full, when the dtypes change, and at its end. */
static void a_list_of_copies_makes_few_calls(void **state) {
    static float from[1000], to[1000];
    uint16_t half[8];
    ddp_device counted = *ddp_device_cpu();
    ddp_copy_list list = DDP_ZERO;
    (void)state;
    counted.copy_many = counted_copy_many;
    list.device = &counted;
    for (int i = 0; i < 1000; i++) from[i] = (float)(i + 1);
    ddp_copy_list_end(&list);
    ddp_copy_list_add(&list, to, DDP_F32, from, DDP_F32, 0);
    ddp_copy_list_end(&list);
    assert_int_equal(list_calls, 0);
    for (int i = 0; i < 10; i++)
        ddp_copy_list_add(&list, to + i, DDP_F32, from + i, DDP_F32, 1); /* 1 range */
    ddp_copy_list_add(&list, to + 11, DDP_F32, from + 10, DDP_F32, 1);   /* 2 */
    ddp_copy_list_add(&list, to + 12, DDP_F32, from + 12, DDP_F32, 1);   /* 3 */
    assert_int_equal(list_calls, 0);
    ddp_copy_list_add(&list, half, DDP_BF16, from, DDP_F32, 4);
    assert_int_equal(list_calls, 1);
    assert_int_equal(list_ranges, 3);
    ddp_copy_list_add(&list, half + 4, DDP_BF16, from + 4, DDP_F32, 4);
    ddp_copy_list_end(&list);
    assert_int_equal(list_calls, 2);
    assert_int_equal(list_ranges, 4);
    for (int i = 0; i < 10; i++) assert_true(to[i] == (float)(i + 1));
    assert_true(to[10] == 0 && to[11] == 11 && to[12] == 13);
    for (int i = 0; i < 8; i++) assert_int_equal(half[i], half_nearest((double)from[i], 1));
    for (int i = 0; i < 200; i++) ddp_copy_list_add(&list, to + 5 * i, DDP_F32, from + 5 * i, DDP_F32, 4);
    assert_int_equal(list_calls, 5);
    ddp_copy_list_end(&list);
    assert_int_equal(list_calls, 6);
    assert_int_equal(list_ranges, 204);
    for (int i = 20; i < 1000; i++) assert_true(to[i] == (i % 5 < 4 ? (float)(i + 1) : 0.0f));
}

/* ---- exact sums ---- */

static double exact_of(const double *values, size_t count) {
    ddp_exact_sum sum;
    ddp_exact_sum_clear(&sum);
    for (size_t i = 0; i < count; i++) ddp_exact_sum_add(&sum, values[i]);
    return ddp_exact_sum_value(&sum);
}

#define assert_double(a, b) assert_true(bits_of_double(a) == bits_of_double(b))

static void one_value_sums_to_itself(void **state) {
    (void)state;
    for (int i = 0; i < 200000; i++) {
        double value = double_of(random_u64());
        if (i % 8 == 0) value = double_of(random_u64() & UINT64_C(0x801fffffffffffff));
        if (value != value || value == 0.0) continue;
        assert_double(exact_of(&value, 1), value);
    }
    assert_double(exact_of(NULL, 0), 0.0);
}

static void huge_and_tiny_cancel_exactly(void **state) {
    const double cancel[] = {1e308, 1.0, 1e-308, -1e308, 5e-324, -1.0, -1e-308};
    const double overflow[] = {DBL_MAX, DBL_MAX, -DBL_MAX}, infinite[] = {-DBL_MAX, -DBL_MAX};
    const double limit[] = {DBL_MAX, 9.9792015476735990582818635651842e291},
                 beyond[] = {DBL_MAX, 9.9792015476736e291};
    const double even[] = {9007199254740992.0, 1.0}, up[] = {9007199254740992.0, 1.0, 5e-324},
                 odd[] = {9007199254740994.0, 1.0};
    const double zeros[] = {-0.0, 1.0, -1.0};
    (void)state;
    assert_double(exact_of(cancel, LENGTH(cancel)), 5e-324);
    assert_double(exact_of(overflow, 3), DBL_MAX);
    assert_double(exact_of(overflow, 2), (double)INFINITY);
    assert_double(exact_of(infinite, 2), (double)-INFINITY);
    assert_double(exact_of(limit, 2), DBL_MAX + limit[1]);
    assert_double(exact_of(beyond, 2), DBL_MAX + beyond[1]);
    assert_double(exact_of(even, 2), 9007199254740992.0);
    assert_double(exact_of(up, 3), 9007199254740994.0);
    assert_double(exact_of(odd, 2), 9007199254740996.0);
    assert_double(exact_of(zeros, 3), 0.0);
}

static void infinities_and_nan_propagate(void **state) {
    const double plus[] = {1.0, INFINITY, -DBL_MAX}, minus[] = {-INFINITY, DBL_MAX, -INFINITY},
                 both[] = {INFINITY, -INFINITY, 1.0};
    const double nan_first[] = {NAN, 1.0, INFINITY};
    (void)state;
    assert_double(exact_of(plus, 3), (double)INFINITY);
    assert_double(exact_of(minus, 3), (double)-INFINITY);
    assert_true(isnan(exact_of(both, 3)));
    assert_true(isnan(exact_of(nan_first, 3)));
}

/* The values are multiples of 2^-60 below 2^60, so that 128-bit integers hold every sum. */
static void sums_equal_128_bit_integers(void **state) {
    __extension__ typedef __int128 wide;
    static double values[3000];
    (void)state;
    for (int round = 0; round < 300; round++) {
        wide total = 0;
        int count = 1 + (int)(random_u64() % 3000);
        for (int i = 0; i < count; i++) {
            int64_t mantissa = (int64_t)(random_u64() >> 11) - (INT64_C(1) << 52);
            int shift = (int)(random_u64() % 60);
            values[i] = ldexp((double)mantissa, shift - 60);
            total += (wide)mantissa * ((wide)1 << shift);
        }
        assert_double(exact_of(values, (size_t)count), ldexp((double)total, -60));
    }
}

/* Any order, any split over ranks, merged, or added as integers as in an all-reduce. */
static void order_and_sharing_do_not_matter(void **state) {
    enum { N = 20000 };
    static double values[N];
    double expected;
    (void)state;
    for (int i = 0; i < N; i++) {
        do values[i] = double_of(random_u64());
        while (!(fabs(values[i]) < 1e300));
    }
    expected = exact_of(values, N);
    for (int parts = 1; parts <= 64; parts *= 2) {
        ddp_exact_sum part[64], added;
        for (int i = N - 1; i > 0; i--) {
            int k = (int)(random_u64() % (uint64_t)(i + 1));
            double swap = values[i];
            values[i] = values[k];
            values[k] = swap;
        }
        ddp_exact_sum_clear(&added);
        for (int p = 0; p < parts; p++) {
            ddp_exact_sum_clear(&part[p]);
            for (int i = p; i < N; i += parts) ddp_exact_sum_add(&part[p], values[i]);
            for (int k = 0; k < DDP_EXACT_CELLS; k++) added.cell[k] += part[p].cell[k];
        }
        assert_double(ddp_exact_sum_value(&added), expected);
    }
}

static void many_additions_carry_in_time(void **state) {
    ddp_exact_sum sum;
    double value = double_of((UINT64_C(1033) << 52) | ((UINT64_C(1) << 52) - 1));
    (void)state;
    ddp_exact_sum_clear(&sum);
    for (int i = 0; i < 3000000; i++) ddp_exact_sum_add(&sum, -value);
    /* A carry takes as long as 70 additions. It resets the bound, or every later addition would carry too. */
    assert_true(sum.cell[DDP_EXACT_CELLS - 1] > 0 && sum.cell[DDP_EXACT_CELLS - 1] < INT64_C(1) << 16);
    for (int k = 0; k < 67; k++)
        assert_true(sum.cell[k] < INT64_C(1) << 49 && sum.cell[k] > -(INT64_C(1) << 49));
    assert_double(ddp_exact_sum_value(&sum), (double)(-(long double)value * 3000000.0L));
}

/* ---- sums of squares ---- */

/* Element e is in lane e mod 32; the two of every 64 that share a lane are added first. volatile keeps every
   product rounded. */
static double squares_reference(const void *data, size_t count, ddp_dtype dtype) {
    double lane[32];
    memset(lane, 0, sizeof lane);
    for (size_t base = 0; base < count; base += 64)
        for (size_t e = 0; e < 32; e++) {
            volatile double product[2] = {0.0, 0.0};
            for (size_t k = 0; k < 2 && base + e + 32 * k < count; k++) {
                element x = element_load(data, base + e + 32 * k, dtype);
                product[k] = dtype == DDP_F64 ? x.f64 * x.f64 : (double)x.f32 * (double)x.f32;
            }
            lane[e] += product[0] + product[1];
        }
    for (int half = 16; half; half /= 2)
        for (int e = 0; e < half; e++) lane[e] += lane[e + half];
    return lane[0];
}

static void squares_add_per_row_in_a_fixed_order(void **state) {
    static const size_t row_counts[] = {1,   2,   15,  16,   17,   63,   64,   65,
                                        127, 128, 200, 1000, 4095, 4096, 4097, 9000};
    static const ddp_dtype floats[] = {DDP_F32, DDP_F64, DDP_F16, DDP_BF16};
    static unsigned char data[9 * 8 * 9000 + 16];
    (void)state;
    for (size_t t = 0; t < LENGTH(floats); t++)
        for (size_t c = 0; c < LENGTH(row_counts); c++)
            for (size_t offset = 0; offset < 8; offset += 7) {
                size_t rows = 9, n = row_counts[c], size = ddp_dtype_size(floats[t]);
                ddp_exact_sum expected, whole, parts, part;
                for (size_t i = 0; i < rows * n; i++) {
                    element e;
                    double value = ldexp((double)(int64_t)random_u64(), (int)(random_u64() % 20) - 70);
                    if (floats[t] == DDP_F64)
                        e.f64 = value;
                    else
                        e.f32 = (float)value;
                    element_store(data + offset, i, floats[t], e);
                }
                ddp_exact_sum_clear(&expected);
                for (size_t r = 0; r < rows; r++)
                    for (size_t at = 0; at < n; at += 4096) /* pieces of long rows add exactly */
                        ddp_exact_sum_add(&expected,
                                          squares_reference(data + offset + (r * n + at) * size,
                                                            n - at < 4096 ? n - at : 4096, floats[t]));
                ddp_exact_sum_clear(&whole);
                inner.exact_add_squares(&whole, data + offset, rows, n, floats[t]);
                ddp_exact_sum_clear(&parts);
                for (size_t r = 0; r < rows; r += 4) {
                    ddp_exact_sum_clear(&part);
                    inner.exact_add_squares(&part, data + offset + r * n * size, rows - r < 4 ? rows - r : 4,
                                            n, floats[t]);
                    for (int k = 0; k < DDP_EXACT_CELLS; k++) parts.cell[k] += part.cell[k];
                }
                assert_memory_equal(&whole, &expected, sizeof whole);
                assert_double(ddp_exact_sum_value(&parts), ddp_exact_sum_value(&whole));
            }
}

static void squares_pass_nan_and_overflow_on(void **state) {
    float row[70];
    ddp_exact_sum sum;
    (void)state;
    for (int i = 0; i < 70; i++) row[i] = 1.0f;
    row[69] = INFINITY;
    ddp_exact_sum_clear(&sum);
    inner.exact_add_squares(&sum, row, 1, 70, DDP_F32);
    assert_double(ddp_exact_sum_value(&sum), (double)INFINITY);
    row[3] = NAN;
    inner.exact_add_squares(&sum, row, 70, 1, DDP_F32);
    assert_true(isnan(ddp_exact_sum_value(&sum)));
    ddp_exact_sum_clear(&sum);
    inner.exact_add_squares(&sum, row, 0, 70, DDP_F32);
    inner.exact_add_squares(&sum, row, 70, 0, DDP_F32);
    assert_double(ddp_exact_sum_value(&sum), 0.0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_path_gives_the_bits_of_the_tree),
        cmocka_unit_test(copies_are_exact),
        cmocka_unit_test(streaming_stays_inside_the_pointer_arrays),
        cmocka_unit_test(seven_sources_group_as_documented),
        cmocka_unit_test(minimum_and_maximum_order_zeros_and_pass_nan_on),
        cmocka_unit_test(halves_are_added_in_f32_and_rounded_once),
        cmocka_unit_test(division_matches_the_average),
        cmocka_unit_test(signed_division_truncates_at_the_limits),
        cmocka_unit_test(all_halves_survive_a_round_trip),
        cmocka_unit_test(casts_round_once_to_nearest_even),
        cmocka_unit_test(casts_between_other_types),
        cmocka_unit_test(many_ranges_are_copied_or_cast),
        cmocka_unit_test(a_list_of_copies_makes_few_calls),
        cmocka_unit_test(one_value_sums_to_itself),
        cmocka_unit_test(huge_and_tiny_cancel_exactly),
        cmocka_unit_test(infinities_and_nan_propagate),
        cmocka_unit_test(sums_equal_128_bit_integers),
        cmocka_unit_test(order_and_sharing_do_not_matter),
        cmocka_unit_test(many_additions_carry_in_time),
        cmocka_unit_test(squares_add_per_row_in_a_fixed_order),
        cmocka_unit_test(squares_pass_nan_and_overflow_on),
    };
    int failed;
    inner.runs_bytes = 8192; /* so that the counts of a test span several runs */
    inner.narrow = argc > 1 && strcmp(argv[1], "narrow") == 0;
    arena = (unsigned char *)malloc((size_t)SOURCES_MAX * SLOT * 3);
    if (!arena) return 1;
    outside = arena + (size_t)SOURCES_MAX * SLOT;
    for (int i = 0; i < SOURCES_MAX; i++) pristine[i] = outside + (size_t)(SOURCES_MAX + i) * SLOT;
    failed = cmocka_run_group_tests(tests, prepare, NULL);
    free(arena);
    return failed;
}

/*  test_tp_gemm.c - ddp_gemm_builtin against a plain triple loop: all transposes, sizes around every edge of
    the blocking, rows with padding, sizes of 0, adding to c, both dtypes. Nothing outside of c is written.
    The bits of an element depend only on its row of op(a) and column of op(b). Invalid arguments return
    errors. With DDP_USE_CBLAS the default of a context is compared with the same loop.

    TP_GEMM_WIDE: the kernel for vectors of 64 bytes, on a CPU that has them. */
#if defined(TP_GEMM_WIDE)
#pragma GCC target("avx512f")
#endif
#undef DDP_TENSOR_IMPLEMENTATION_INCLUDED /* it looks inside */
#define DDP_TENSOR_IMPLEMENTATION
#include <math.h>
#include "../../ddp_tensor.h"
#include "../support/unit.h"

#define MOST 640000
static double a64[MOST], b64[MOST], c64[MOST], want[MOST];
static float a32[MOST], b32[MOST], c32[MOST];

/* Element i of stream key, in [0, 1); f32 holds it. */
static double uniform(uint64_t key, uint64_t i) {
    uint64_t x = (i + key * UINT64_C(1000003)) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)((x ^ x >> 31) >> 40) / 16777216.0;
}

typedef struct shape {
    int64_t m, n, k;
} shape;
static const shape shapes[] = {
    {1, 1, 1},      {0, 3, 2},      {3, 0, 2},      {3, 2, 0},      {1, 33, 5},    {33, 1, 5},
    {5, 7, 1},      {11, 31, 127},  {12, 32, 128},  {13, 33, 129},  {23, 64, 255}, {24, 65, 256},
    {25, 113, 257}, {49, 223, 300}, {50, 225, 513}, {37, 449, 130}, {7, 500, 600},
};
#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

static double at(const ddp_gemm *g, const void *data, size_t index) {
    return g->dtype == DDP_F64 ? ((const double *)data)[index] : (double)((const float *)data)[index];
}

/* Compares the product of g with that of a plain loop, and checks that the bytes between and after the rows
   of c are unchanged. */
static void check(ddp_gemm g, ddp_gemm_fn multiply) {
    double eps = g.dtype == DDP_F64 ? 1e-14 : 1e-5;
    int64_t end = g.m ? (g.m - 1) * g.ldc + g.n : 0;
    assert_true(end + 16 < MOST);
    for (int64_t i = 0; i < end + 16; i++) c64[i] = uniform(17, (uint64_t)i), c32[i] = (float)c64[i];
    g.c = g.dtype == DDP_F64 ? (void *)c64 : (void *)c32;
    for (int64_t i = 0; i < end + 16; i++) want[i] = at(&g, g.c, (size_t)i);
    for (int64_t i = 0; i < g.m; i++)
        for (int64_t j = 0; j < g.n; j++) {
            const double *a = a64 + (g.trans_a ? i : i * g.lda), *b = b64 + (g.trans_b ? j * g.ldb : j);
            double sum = g.accumulate ? want[i * g.ldc + j] : 0;
            for (int64_t k = 0; k < g.k; k++, a += g.trans_a ? g.lda : 1, b += g.trans_b ? 1 : g.ldb)
                sum += *a * *b;
            want[i * g.ldc + j] = sum;
        }
    assert_int_equal(multiply(&g, NULL), DDP_OK);
    for (int64_t i = 0; i < end + 16; i++) {
        double have = at(&g, g.c, (size_t)i);
        int inside = i < end && i % g.ldc < g.n;
        if (inside ? fabs(have - want[i]) <= eps * (1 + sqrt((double)g.k)) : have == want[i]) continue;
        fail_msg("m=%lld n=%lld k=%lld trans %d %d accumulate %d %s: c[%lld] is %.9g, not %.9g",
                 (long long)g.m, (long long)g.n, (long long)g.k, g.trans_a, g.trans_b, g.accumulate,
                 ddp_dtype_name(g.dtype), (long long)i, have, want[i]);
    }
}

static void each(ddp_gemm_fn multiply) {
    for (size_t i = 0; i < MOST; i++) {
        a64[i] = uniform(1, i) - 0.5, b64[i] = uniform(2, i) - 0.5;
        a32[i] = (float)a64[i], b32[i] = (float)b64[i];
    }
    for (size_t s = 0; s < LENGTH(shapes); s++)
        for (int way = 0; way < 32; way++) {
            ddp_gemm g;
            int apart = way >> 3 & 1 ? 3 : 0;
            memset(&g, 0, sizeof g);
            g.m = shapes[s].m, g.n = shapes[s].n, g.k = shapes[s].k;
            g.trans_a = way & 1, g.trans_b = way >> 1 & 1, g.accumulate = way >> 2 & 1;
            g.dtype = way >> 4 ? DDP_F64 : DDP_F32;
            g.lda = (g.trans_a ? g.m : g.k) + apart, g.ldb = (g.trans_b ? g.k : g.n) + 2 * apart,
            g.ldc = g.n + apart;
            g.a = way >> 4 ? (const void *)a64 : (const void *)a32;
            g.b = way >> 4 ? (const void *)b64 : (const void *)b32;
            check(g, multiply);
        }
}

static void test_against_a_plain_loop(void **state) {
    (void)state;
    each(ddp_gemm_builtin);
}

#if defined(DDP_USE_CBLAS)
static void test_cblas(void **state) {
    ddp_gemm g;
    (void)state;
    each(DDP__GEMM_DEFAULT);
    memset(&g, 0, sizeof g);
    g.dtype = DDP_F32, g.m = g.n = g.k = 1, g.lda = INT64_C(1) << 31, g.ldb = g.ldc = 1, g.a = a32, g.b = b32,
    g.c = c32;
    assert_int_equal(DDP__GEMM_DEFAULT(&g, NULL), DDP_ERR_INVALID);
    assert_non_null(strstr(ddp_last_error(), "lda=2147483648 exceeds the CBLAS limit of"));
}
#endif

/* Any part of c, and any cut of k that adds, has the bits of the whole. */
static void test_parts_have_the_bits_of_the_whole(void **state) {
    ddp_gemm g;
    (void)state;
    memset(&g, 0, sizeof g);
    for (int f64 = 0; f64 < 2; f64++)
        for (int cut = 5; cut <= 600; cut = cut * 3 + 4) {
            size_t size = f64 ? sizeof(double) : sizeof(float);
            unsigned char *part = f64 ? (unsigned char *)want : (unsigned char *)a64,
                          *whole = f64 ? (unsigned char *)c64 : (unsigned char *)c32;
            const unsigned char *a = f64 ? (const unsigned char *)b64 : (const unsigned char *)a32;
            const unsigned char *b = f64 ? (const unsigned char *)b64 : (const unsigned char *)b32;
            g.dtype = f64 ? DDP_F64 : DDP_F32;
            g.m = 61, g.n = 239, g.k = 531, g.lda = 531, g.ldb = 239, g.ldc = 239, g.a = a, g.b = b,
            g.c = whole, g.accumulate = 0;
            assert_int_equal(ddp_gemm_builtin(&g, NULL), DDP_OK);
            for (int64_t i = 0; i < 61; i += cut)
                for (int64_t j = 0; j < 239; j += cut + 5)
                    for (int64_t k = 0; k < 531; k += cut * 7) {
                        g.m = 61 - i < cut ? 61 - i : cut, g.n = 239 - j < cut + 5 ? 239 - j : cut + 5,
                        g.k = 531 - k < cut * 7 ? 531 - k : cut * 7;
                        g.a = a + (size_t)(i * 531 + k) * size, g.b = b + (size_t)(k * 239 + j) * size,
                        g.c = part + (size_t)(i * 239 + j) * size;
                        g.accumulate = k > 0;
                        assert_int_equal(ddp_gemm_builtin(&g, NULL), DDP_OK);
                    }
            assert_memory_equal(part, whole, 61 * 239 * size);
        }
}

static void refused(ddp_gemm g, const char *text) {
    assert_int_equal(ddp_gemm_builtin(&g, NULL), DDP_ERR_INVALID);
    if (!strstr(ddp_last_error(), text)) fail_msg("'%s' does not contain '%s'", ddp_last_error(), text);
}

static void test_bad_input(void **state) {
    ddp_gemm good, g;
    (void)state;
    memset(&good, 0, sizeof good);
    good.dtype = DDP_F32, good.m = 2, good.n = 3, good.k = 4, good.lda = 4, good.ldb = 3, good.ldc = 3,
    good.a = a32, good.b = b32, good.c = c32;
    assert_int_equal(ddp_gemm_builtin(&good, NULL), DDP_OK);
    assert_int_equal(ddp_gemm_builtin(NULL, NULL), DDP_ERR_INVALID);
    g = good, g.m = -1, refused(g, "m=-1");
    g = good, g.dtype = DDP_BF16, refused(g, "dtype=bf16");
    g = good, g.dtype = DDP_DTYPE_DEFAULT, refused(g, "use f32 or f64");
    g = good, g.lda = 3, refused(g, "lda=3 is less than a's 4 columns");
    g = good, g.trans_b = 1, refused(g, "ldb=3 is less than b's 4 columns");
    g = good, g.ldc = 2, refused(g, "ldc=2 is less than c's 3 columns");
    g = good, g.a = NULL, refused(g, "a is NULL");
    g = good, g.b = NULL, refused(g, "b is NULL");
    g = good, g.c = NULL, refused(g, "c is NULL");
}

int main(void) {
#if defined(TP_GEMM_WIDE)
    if (!__builtin_cpu_supports("avx512f")) return puts("skipped: this CPU has no AVX-512"), 0;
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_a_plain_loop),
#if defined(DDP_USE_CBLAS)
        cmocka_unit_test(test_cblas),
#endif
        cmocka_unit_test(test_parts_have_the_bits_of_the_whole),
        cmocka_unit_test(test_bad_input),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

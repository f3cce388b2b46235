/*  fake_cublaslt.h - the part of cuBLASLt that ddp_cuda.cuh uses, on the fake GPU of fake_gpu.h: functions of
    <cublasLt.h> under their own names.

    A product is one piece of work on its stream. The result follows the layouts, transposes and leading
    dimensions, column by column. Sums begin at the last term, so that no caller can rely on an order. An
    algorithm (algo) is valid for the sizes, alignments, epilogue and workspace of its request. Other
    arguments, a layout that does not fit, memory that is too small, or a reduction in place are failures.
    Matrices are f64, f32, f16 or bf16, with the same type for input and output. Epilogues: BIAS,
    GELU_AUX_BIAS, DGELU, BGRADA and BGRADB, with the pointers and the leading dimension that <cublasLt.h>
    requires. The bits of fake_lt_refused are those for which the heuristics return "not supported". */
#ifndef DDP_TEST_FAKE_CUBLASLT_H
#define DDP_TEST_FAKE_CUBLASLT_H

#include "fake_gpu.h"
#include <cublasLt.h>
#include <math.h>

struct cublasLtContext {
    int device;
};
struct fake_lt_desc {
    int compute, scale, transposed[2];
    uint32_t epilogue;
    const void *bias, *aux;
    int64_t aux_step;
};
struct fake_lt_layout {
    int type;
    uint64_t rows, columns;
    int64_t step;
};
struct fake_lt_want {
    uint64_t bytes;
    uint32_t schemes, align[4];
};
/* Of A, B, C, D, bias, aux. */
struct fake_lt_way {
    int compute, type;
    uint32_t m, n, k, epilogue, bytes;
    uint16_t align[6];
    uint32_t number; /* of the algorithm among those for a request. The first adds in f64, the others in f32,
                        from a term on that is earlier by this number */
};
/* live handles; heuristic requests; products with TF32 */
static int fake_lt_handles, fake_lt_asked, fake_lt_tf32;
static uint64_t fake_lt_refused;                                     /* 1 << epilogue % 61 */
static cublasStatus_t fake_lt_refusal = CUBLAS_STATUS_NOT_SUPPORTED; /* the result in that case */
static cublasStatus_t fake_lt_state = CUBLAS_STATUS_SUCCESS; /* the state of results of the heuristics */
static int fake_lt_late;                                     /* 1: the product refuses, not the heuristics */
static int fake_lt_fused;                                    /* products with an epilogue */
enum { FAKE_LT_ALGORITHMS = 3 };                             /* for each product */
static size_t fake_lt_version = 130101;

template <class T, class Opaque> static T &fake_lt(Opaque *opaque) {
    static_assert(sizeof(T) <= sizeof(Opaque), "NVIDIA's struct is larger");
    return *(T *)(void *)opaque;
}

extern "C" {

const char *cublasLtGetStatusName(cublasStatus_t status) {
    return status == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED"
           : status == CUBLAS_STATUS_NOT_SUPPORTED  ? "CUBLAS_STATUS_NOT_SUPPORTED"
           : status == CUBLAS_STATUS_SUCCESS        ? "CUBLAS_STATUS_SUCCESS"
                                                    : "CUBLAS_STATUS_INVALID_VALUE";
}
const char *cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_EXECUTION_FAILED ? "the function failed to launch" : "it failed";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    FAKE_CALL(0, "cublasLtCreate()");
    if (call.fault) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new cublasLtContext{fake_me.device};
    fake_lt_handles++;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    FAKE_CALL(0, "cublasLtDestroy()");
    fake_lt_handles--;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
    fake_lt<fake_lt_desc>(desc) = {(int)compute, (int)scale, {0, 0}, CUBLASLT_EPILOGUE_DEFAULT,
                                   NULL,         NULL,       0};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void *value,
                                              size_t bytes) {
    fake_lt_desc &d = fake_lt<fake_lt_desc>(desc);
    size_t size = attribute == CUBLASLT_MATMUL_DESC_TRANSA || attribute == CUBLASLT_MATMUL_DESC_TRANSB
                          || attribute == CUBLASLT_MATMUL_DESC_EPILOGUE
                      ? 4
                      : 8;
    if (bytes != size) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
    case CUBLASLT_MATMUL_DESC_TRANSB:
        d.transposed[attribute == CUBLASLT_MATMUL_DESC_TRANSB] = *(const cublasOperation_t *)value
                                                                 == CUBLAS_OP_T;
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: d.epilogue = *(const uint32_t *)value; break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: d.bias = *(const void *const *)value; break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: d.aux = *(const void *const *)value; break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: d.aux_step = *(const int64_t *)value; break;
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t, cudaDataType_t type,
                                                 uint64_t rows, uint64_t columns, int64_t step) {
    fake_lt<fake_lt_layout>(layout) = {(int)type, rows, columns, step};
    return step < (int64_t)rows || !rows || !columns ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t want, size_t) {
    fake_lt<fake_lt_want>(want) = {0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t want,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    fake_lt_want &w = fake_lt<fake_lt_want>(want);
    if (bytes != (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8u : 4u))
        return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: w.bytes = *(const uint64_t *)value; break;
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: w.schemes = *(const uint32_t *)value; break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: w.align[0] = *(const uint32_t *)value; break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: w.align[1] = *(const uint32_t *)value; break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: w.align[2] = *(const uint32_t *)value; break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: w.align[3] = *(const uint32_t *)value; break;
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}
}

static int fake_lt_has_aux(uint32_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || epilogue == CUBLASLT_EPILOGUE_DGELU;
}
static int fake_lt_has_bias(uint32_t epilogue) {
    return epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_DGELU;
}
static size_t fake_lt_size(int type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
/* Alignment up to 256, the maximum for an algorithm. */
static uint16_t fake_lt_aligned(const void *at) {
    uint16_t align = 256;
    while ((uintptr_t)at % align) align /= 2;
    return align;
}

/* The requirements of an epilogue, from the comments of <cublasLt.h>. */
static int fake_lt_epilogue_fits(const fake_lt_desc &d, uint64_t rows) {
    switch (d.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB: break;
    default: return 0;
    }
    return (d.bias || !fake_lt_has_bias(d.epilogue))
           && (!fake_lt_has_aux(d.epilogue) || (d.aux && d.aux_step % 8 == 0 && d.aux_step >= (int64_t)rows));
}

/* The algorithm for these layouts; m = 0 if they do not match. */
static fake_lt_way fake_lt_shape(const fake_lt_desc &d, const fake_lt_layout &a, const fake_lt_layout &b,
                                 const fake_lt_layout &c, const fake_lt_layout &out) {
    fake_lt_way way = {
        d.compute,
        a.type,
        (uint32_t)(d.transposed[0] ? a.columns : a.rows),
        (uint32_t)(d.transposed[1] ? b.rows : b.columns),
        (uint32_t)(d.transposed[0] ? a.rows : a.columns),
        d.epilogue,
        0,
        {0, 0, 0, 0, 0, 0},
        0,
    };
    uint64_t k = d.transposed[1] ? b.columns : b.rows;
    int scale = a.type == CUDA_R_64F ? CUDA_R_64F : CUDA_R_32F;
    if (k != way.k || out.rows != way.m || out.columns != way.n || c.rows != way.m || c.columns != way.n)
        way.m = 0;
    if (a.type != b.type || a.type != c.type || a.type != out.type || scale != d.scale) way.m = 0;
    if (a.type == CUDA_R_64F ? d.compute != CUBLAS_COMPUTE_64F
                             : d.compute != CUBLAS_COMPUTE_32F && d.compute != CUBLAS_COMPUTE_32F_FAST_TF32)
        way.m = 0;
    if (!fake_lt_epilogue_fits(d, out.rows)) way.m = 0;
    return way;
}

extern "C" cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                                         cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                         cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                         cublasLtMatmulPreference_t want, int most,
                                                         cublasLtMatmulHeuristicResult_t *found, int *count) {
    FAKE_CALL(0, "cublasLtMatmulAlgoGetHeuristic()");
    const fake_lt_want &w = fake_lt<fake_lt_want>(want);
    const fake_lt_desc &how = fake_lt<fake_lt_desc>(desc);
    fake_lt_way way = fake_lt_shape(how, fake_lt<fake_lt_layout>(a), fake_lt<fake_lt_layout>(b),
                                    fake_lt<fake_lt_layout>(c), fake_lt<fake_lt_layout>(d));
    *count = 0;
    fake_lt_asked++;
    if (call.fault) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (most < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (way.m == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (how.epilogue != CUBLASLT_EPILOGUE_DEFAULT && fake_lt_refused >> how.epilogue % 61 & 1
        && !fake_lt_late)
        return fake_lt_refusal;
    if (w.schemes & CUBLASLT_REDUCTION_SCHEME_INPLACE)
        fake_failed("parts of a product may be added in any order: %s", fake_where(call.line).c_str());
    way.bytes = (uint32_t)w.bytes;
    for (int i = 0; i < 4; i++) way.align[i] = (uint16_t)w.align[i];
    way.align[4] = fake_lt_aligned(how.bias);
    way.align[5] = fake_lt_aligned(how.aux);
    for (*count = 0; *count < most && *count < FAKE_LT_ALGORITHMS; ++*count) {
        way.number = (uint32_t)*count;
        memset(&found[*count].algo, 0, sizeof found->algo);
        fake_lt<fake_lt_way>(&found[*count].algo) = way;
        found[*count].workspaceSize = w.bytes;
        found[*count].state = fake_lt_state;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* Whether an algorithm is one for these sizes and types. */
static int fake_lt_matches(const fake_lt_way &way, const fake_lt_way &mine) {
    return mine.m && mine.m == way.m && mine.n == way.n && mine.k == way.k && mine.compute == way.compute
           && mine.type == way.type && mine.epilogue == way.epilogue && way.number < FAKE_LT_ALGORITHMS;
}

extern "C" cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                                  cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                  cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                  const cublasLtMatmulAlgo_t *algo,
                                                  cublasLtMatmulHeuristicResult_t *result) {
    FAKE_CALL(0, "cublasLtMatmulAlgoCheck()");
    const fake_lt_way &way = fake_lt<fake_lt_way>((cublasLtMatmulAlgo_t *)algo);
    if (call.fault) return CUBLAS_STATUS_EXECUTION_FAILED;
    result->workspaceSize = way.bytes;
    result->state = CUBLAS_STATUS_SUCCESS;
    return fake_lt_matches(way, fake_lt_shape(fake_lt<fake_lt_desc>(desc), fake_lt<fake_lt_layout>(a),
                                              fake_lt<fake_lt_layout>(b), fake_lt<fake_lt_layout>(c),
                                              fake_lt<fake_lt_layout>(d)))
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_INVALID_VALUE;
}

extern "C" size_t cublasLtGetVersion(void) { return fake_lt_version; }

#if defined(__GNUC__) && !defined(__clang__) && !defined(__OPTIMIZE__)
#pragma GCC push_options
#pragma GCC optimize("O2") /* products take most of the time of a build that is not optimised */
#endif
/* Numbers in their memory format, widened and rounded to nearest even. */
struct fake_lt_bf16 {
    uint16_t bits;
};
struct fake_lt_f16 {
    uint16_t bits;
};
static double fake_lt_wide(double x) { return x; }
static double fake_lt_wide(float x) { return (double)x; }
static double fake_lt_wide(fake_lt_f16 x) {
    int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    if (exponent == 31) size = fraction ? (double)NAN : (double)INFINITY;
    return x.bits >> 15 ? -size : size;
}
static double fake_lt_wide(fake_lt_bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, 4);
    return (double)f;
}
static void fake_lt_round(fake_lt_f16 *to, double x) {
    double size = fabs(x);
    int exponent = -13;
    uint16_t bits = size == size ? 0x7c00 : 0x7e00;
    if (size > 0) frexp(size, &exponent); /* size is below 2^exponent */
    if (exponent < -13) exponent = -13;   /* subnormal numbers have the step of the smallest normal ones */
    if (size < 65520) bits = (uint16_t)(nearbyint(ldexp(size, 11 - exponent)) + ((exponent + 13) << 10));
    to->bits = (uint16_t)(bits | (signbit(x) ? 0x8000 : 0));
}
static void fake_lt_round(double *to, double x) { *to = x; }
static void fake_lt_round(float *to, double x) { *to = (float)x; }
static void fake_lt_round(fake_lt_bf16 *to, double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    to->bits = f != f ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The operands of one product: A, B, C, D, bias and aux, and their leading dimensions. */
struct fake_lt_task {
    fake_lt_desc how;
    fake_lt_way way;
    const void *at[6];
    int64_t step[4];
    double alpha, beta;
};

/* GELU in its tanh form, and its derivative. */
static double fake_lt_gelu(double x, double *slope) {
    double t = tanh(0.79788456080286536 * (x + 0.044715 * x * x * x));
    *slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286536 * (1 + 3 * 0.044715 * x * x);
    return 0.5 * x * (1 + t);
}

/* sums[j] += x * row[j]: the inner loop of all products. The caller has accessed the memory before, so that a
   sanitizer checks it. */
__attribute__((no_sanitize("address", "undefined", "thread"))) static void
fake_lt_add(double *sums, const double *row, double x, int64_t n) {
    for (int64_t j = 0; j < n; j++) sums[j] += x * row[j];
}

template <class T> static void fake_lt_product(const fake_lt_task &task) {
    const T *a = (const T *)fake_real(task.at[0]), *b = (const T *)fake_real(task.at[1]),
            *c = (const T *)fake_real(task.at[2]);
    T *d = (T *)fake_real(task.at[3]), *bias = (T *)fake_real(task.at[4]), *aux = (T *)fake_real(task.at[5]);
    const fake_lt_desc &how = task.how;
    /* From one i, or j, to the next. */
    int64_t row[2] = {how.transposed[0] ? task.step[0] : 1, how.transposed[1] ? 1 : task.step[1]};
    /* From one k to the next. */
    int64_t deep[2] = {how.transposed[0] ? 1 : task.step[0], how.transposed[1] ? task.step[1] : 1};
    int64_t m = task.way.m, n = task.way.n, depth = task.way.k;
    if (how.epilogue == CUBLASLT_EPILOGUE_BGRADA || how.epilogue == CUBLASLT_EPILOGUE_BGRADB)
        for (int64_t i = 0, which = how.epilogue == CUBLASLT_EPILOGUE_BGRADB; i < (which ? n : m); i++) {
            double sum = 0;
            for (int64_t k = depth; k-- > 0;)
                sum += fake_lt_wide((which ? b : a)[i * row[which] + k * deep[which]]);
            fake_lt_round(&bias[i], sum);
        }
    std::vector<double> wide((size_t)(depth * n)), sums((size_t)n); /* of b, row by row of k */
    for (int64_t k = 0; k < depth; k++)
        for (int64_t j = 0; j < n; j++) wide[(size_t)(k * n + j)] = fake_lt_wide(b[j * row[1] + k * deep[1]]);
    for (int64_t i = 0; i < m; i++) {
        sums.assign((size_t)n, 0);
        for (int64_t term = depth; term-- > 0;) {
            int64_t k = (term + depth - task.way.number % depth) % depth;
            fake_lt_add(sums.data(), wide.data() + k * n, fake_lt_wide(a[i * row[0] + k * deep[0]]), n);
            for (int64_t j = 0; task.way.number && j < n; j++) sums[(size_t)j] = (float)sums[(size_t)j];
        }
        for (int64_t j = 0; j < n; j++) {
            double sum = sums[(size_t)j], slope;
            sum = task.alpha * sum + (task.beta != 0 ? task.beta * fake_lt_wide(c[j * task.step[2] + i]) : 0);
            if (how.epilogue == CUBLASLT_EPILOGUE_BIAS || how.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
                sum += fake_lt_wide(bias[i]);
            if (how.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
                fake_lt_round(&aux[j * how.aux_step + i], sum);
                sum = fake_lt_gelu(sum, &slope);
            }
            if (how.epilogue == CUBLASLT_EPILOGUE_DGELU) {
                fake_lt_gelu(fake_lt_wide(aux[j * how.aux_step + i]), &slope);
                sum *= slope;
            }
            fake_lt_round(&d[j * task.step[3] + i], sum);
        }
    }
}

#if defined(__GNUC__) && !defined(__clang__) && !defined(__OPTIMIZE__)
#pragma GCC pop_options
#endif

static void fake_lt_rows(std::vector<fake_range> &ranges, const void *at, int64_t step, uint64_t rows,
                         uint64_t columns, size_t size, int write) {
    for (uint64_t j = 0; j < (step == (int64_t)rows ? 1 : columns); j++)
        ranges.push_back({(const char *)at + j * (uint64_t)step * size,
                          (step == (int64_t)rows ? columns : 1) * rows * size, write});
}

extern "C" cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                         const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                                         const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                                         const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                                         cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                                         void *workspace, size_t bytes, cudaStream_t stream) {
    FAKE_CALL(0, "cublasLtMatmul(%s)", fake_name(stream).c_str());
    const fake_lt_layout layout[4] = {fake_lt<fake_lt_layout>(a_layout), fake_lt<fake_lt_layout>(b_layout),
                                      fake_lt<fake_lt_layout>(c_layout), fake_lt<fake_lt_layout>(d_layout)};
    fake_lt_task task = {fake_lt<fake_lt_desc>(desc),
                         fake_lt<fake_lt_way>((cublasLtMatmulAlgo_t *)algo),
                         {a, b, c, d, NULL, NULL},
                         {layout[0].step, layout[1].step, layout[2].step, layout[3].step},
                         0,
                         0};
    const fake_lt_way mine = fake_lt_shape(task.how, layout[0], layout[1], layout[2], layout[3]),
                      &way = task.way;
    std::vector<fake_range> ranges = {{workspace, bytes, 1}};
    size_t size = fake_lt_size(way.type);
    if (call.fault) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (handle->device != fake_me.device)
        fake_failed("the handle is another device's: %s", fake_where(call.line).c_str());
    if (!fake_lt_matches(way, mine) || bytes < way.bytes || (c == d && layout[2].step != layout[3].step)) {
        fake_failed("the way is not for this product: %s", fake_where(call.line).c_str());
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (fake_lt_late && way.epilogue != CUBLASLT_EPILOGUE_DEFAULT && fake_lt_refused >> way.epilogue % 61 & 1)
        return fake_lt_refusal;
    task.alpha = way.type == CUDA_R_64F ? *(const double *)alpha : *(const float *)alpha;
    task.beta = way.type == CUDA_R_64F ? *(const double *)beta : *(const float *)beta;
    if (fake_lt_has_bias(way.epilogue)) {
        int written = way.epilogue == CUBLASLT_EPILOGUE_BGRADA || way.epilogue == CUBLASLT_EPILOGUE_BGRADB;
        task.at[4] = task.how.bias;
        ranges.push_back(
            {task.how.bias, (way.epilogue == CUBLASLT_EPILOGUE_BGRADB ? way.n : way.m) * size, written});
    }
    if (fake_lt_has_aux(way.epilogue)) {
        task.at[5] = task.how.aux;
        fake_lt_rows(ranges, task.how.aux, task.how.aux_step, way.m, way.n, size,
                     way.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
    }
    for (int i = 0; i < 6; i++)
        if ((uintptr_t)task.at[i] % way.align[i] || (uintptr_t)workspace % 256)
            fake_failed("memory is not aligned as was said: %s", fake_where(call.line).c_str());
    for (int i = 0; i < 4; i++)
        if (i != 2 || task.beta != 0)
            fake_lt_rows(ranges, task.at[i], layout[i].step, layout[i].rows, layout[i].columns, size, i == 3);
    fake_lt_tf32 += task.how.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    fake_lt_fused += way.epilogue != CUBLASLT_EPILOGUE_DEFAULT;
    return fake_enqueue_work(stream, call.line, ranges,
                             [=] {
                                 if (task.way.type == CUDA_R_64F)
                                     fake_lt_product<double>(task);
                                 else if (task.way.type == CUDA_R_32F)
                                     fake_lt_product<float>(task);
                                 else if (task.way.type == CUDA_R_16F)
                                     fake_lt_product<fake_lt_f16>(task);
                                 else
                                     fake_lt_product<fake_lt_bf16>(task);
                             })
                   == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_INVALID_VALUE;
}

#endif /* DDP_TEST_FAKE_CUBLASLT_H */

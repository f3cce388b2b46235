/*  fake_cublaslt.h - the part of cuBLASLt that ddp_cuda.cuh uses, on the machine of fake_gpu.h: the functions of <cublasLt.h> under their own names.

    A product is one piece of work of its stream, and comes to what the layouts, transposes and leading dimensions say, column by column; sums begin at the
    last term, in no order that somebody could rely on. A way of doing it (algo) is good for the sizes, alignments and workspace that it was asked for:
    what it is given instead, a layout that does not fit, memory that is too small, or a reduction in place are failures. */
#ifndef DDP_TEST_FAKE_CUBLASLT_H
#define DDP_TEST_FAKE_CUBLASLT_H

#include "fake_gpu.h"
#include <cublasLt.h>

struct cublasLtContext { int device; };
struct fake_lt_desc { int compute, scale, transposed[2]; };
struct fake_lt_layout { int type; uint64_t rows, columns; int64_t step; };
struct fake_lt_want { uint64_t bytes; uint32_t schemes, align[4]; };
struct fake_lt_way { int compute; uint64_t m, n, k, bytes; uint32_t align[4]; };
static int fake_lt_handles, fake_lt_asked, fake_lt_tf32; /* that live; questions for a way; products by TF32 */

template <class T, class Opaque> static T &fake_lt(Opaque *opaque) {
    static_assert(sizeof(T) <= sizeof(Opaque), "what NVIDIA keeps there is larger");
    return *(T *)(void *)opaque;
}

extern "C" {

const char *cublasLtGetStatusName(cublasStatus_t status) {
    return status == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED" : status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" :
           status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE";
}
const char *cublasLtGetStatusString(cublasStatus_t status) { return status == CUBLAS_STATUS_EXECUTION_FAILED ? "the function failed to launch" : "it failed"; }

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

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t, cublasComputeType_t compute, cudaDataType_t scale) {
    fake_lt<fake_lt_desc>(desc) = {(int)compute, (int)scale, {0, 0}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) {
    if ((attribute != CUBLASLT_MATMUL_DESC_TRANSA && attribute != CUBLASLT_MATMUL_DESC_TRANSB) || bytes != sizeof(int32_t)) return CUBLAS_STATUS_INVALID_VALUE;
    fake_lt<fake_lt_desc>(desc).transposed[attribute == CUBLASLT_MATMUL_DESC_TRANSB] = *(const cublasOperation_t *)value == CUBLAS_OP_T;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t, cudaDataType_t type, uint64_t rows, uint64_t columns, int64_t step) {
    fake_lt<fake_lt_layout>(layout) = {(int)type, rows, columns, step};
    return step < (int64_t)rows || !rows || !columns ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t want, size_t) {
    fake_lt<fake_lt_want>(want) = {0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t want, cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes) {
    fake_lt_want &w = fake_lt<fake_lt_want>(want);
    if (bytes != (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8u : 4u)) return CUBLAS_STATUS_INVALID_VALUE;
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

/* The way for these layouts; m 0 when they do not go together. */
static fake_lt_way fake_lt_shape(const fake_lt_desc &d, const fake_lt_layout &a, const fake_lt_layout &b, const fake_lt_layout &c) {
    fake_lt_way way = {d.compute, d.transposed[0] ? a.columns : a.rows, d.transposed[1] ? b.rows : b.columns, d.transposed[0] ? a.rows : a.columns, 0, {0, 0, 0, 0}};
    uint64_t k = d.transposed[1] ? b.columns : b.rows;
    if (k != way.k || c.rows != way.m || c.columns != way.n || a.type != b.type || a.type != c.type || a.type != d.scale) way.m = 0;
    if (a.type == CUDA_R_64F ? d.compute != CUBLAS_COMPUTE_64F : d.compute != CUBLAS_COMPUTE_32F && d.compute != CUBLAS_COMPUTE_32F_FAST_TF32) way.m = 0;
    return way;
}

extern "C" cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                         cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t want, int most, cublasLtMatmulHeuristicResult_t *found, int *count) {
    FAKE_CALL(0, "cublasLtMatmulAlgoGetHeuristic()");
    const fake_lt_want &w = fake_lt<fake_lt_want>(want);
    fake_lt_way way = fake_lt_shape(fake_lt<fake_lt_desc>(desc), fake_lt<fake_lt_layout>(a), fake_lt<fake_lt_layout>(b), fake_lt<fake_lt_layout>(c));
    *count = 0;
    fake_lt_asked++;
    if (call.fault || c != d || most < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (way.m == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (w.schemes & CUBLASLT_REDUCTION_SCHEME_INPLACE) fake_failed("parts of a product may be added in any order: %s", fake_where(call.line).c_str());
    way.bytes = w.bytes;
    memcpy(way.align, w.align, sizeof way.align);
    fake_lt<fake_lt_way>(&found->algo) = way;
    found->workspaceSize = w.bytes;
    found->state = CUBLAS_STATUS_SUCCESS;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

template <class T> static void fake_lt_product(const fake_lt_desc &d, const fake_lt_way &way, const void *const *memory, const int64_t *step, T alpha, T beta) {
    const T *a = (const T *)fake_real(memory[0]), *b = (const T *)fake_real(memory[1]);
    T *c = (T *)fake_real(memory[2]);
    for (int64_t i = 0; i < (int64_t)way.m; i++)
        for (int64_t j = 0; j < (int64_t)way.n; j++) {
            double sum = 0;
            for (int64_t k = (int64_t)way.k; k-- > 0;)
                sum += (double)a[d.transposed[0] ? i * step[0] + k : k * step[0] + i] * (double)b[d.transposed[1] ? k * step[1] + j : j * step[1] + k];
            c[j * step[2] + i] = (T)((double)alpha * sum + (beta != 0 ? (double)beta * (double)c[j * step[2] + i] : 0));
        }
}

extern "C" cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                         cublasLtMatrixLayout_t b_layout, const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                         const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes, cudaStream_t stream) {
    FAKE_CALL(0, "cublasLtMatmul(%s)", fake_name(stream).c_str());
    const fake_lt_desc how = fake_lt<fake_lt_desc>(desc);
    const fake_lt_layout layout[3] = {fake_lt<fake_lt_layout>(a_layout), fake_lt<fake_lt_layout>(b_layout), fake_lt<fake_lt_layout>(c_layout)};
    const fake_lt_way way = fake_lt<fake_lt_way>((cublasLtMatmulAlgo_t *)algo);
    const fake_lt_way mine = fake_lt_shape(how, layout[0], layout[1], layout[2]);
    const void *memory[3] = {a, b, d};
    std::vector<fake_range> ranges = {{workspace, bytes, 1}};
    if (call.fault) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (handle->device != fake_me.device) fake_failed("the handle is another device's: %s", fake_where(call.line).c_str());
    if (c != d || c_layout != d_layout || mine.m != way.m || mine.n != way.n || mine.k != way.k || mine.compute != way.compute || bytes < way.bytes || !mine.m)
        fake_failed("the way is not for this product: %s", fake_where(call.line).c_str());
    for (int i = 0; i < 3; i++) {
        size_t size = layout[i].type == CUDA_R_64F ? 8 : 4;
        if ((uintptr_t)memory[i] % way.align[i] || (uintptr_t)workspace % 256) fake_failed("memory is not aligned as was said: %s", fake_where(call.line).c_str());
        for (uint64_t j = 0; j < layout[i].columns; j++)
            ranges.push_back({(const char *)memory[i] + j * (uint64_t)layout[i].step * size, layout[i].rows * size, i == 2});
    }
    fake_lt_tf32 += how.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    int64_t steps[3] = {layout[0].step, layout[1].step, layout[2].step};
    std::vector<int64_t> step(steps, steps + 3);
    std::vector<const void *> at(memory, memory + 3);
    double factor[2] = {layout[0].type == CUDA_R_64F ? *(const double *)alpha : *(const float *)alpha, layout[0].type == CUDA_R_64F ? *(const double *)beta : *(const float *)beta};
    double one = factor[0], more = factor[1];
    int wide = layout[0].type == CUDA_R_64F;
    return fake_enqueue_work(stream, call.line, ranges, [=] {
        if (wide) fake_lt_product<double>(how, way, at.data(), step.data(), one, more);
        else fake_lt_product<float>(how, way, at.data(), step.data(), (float)one, (float)more);
    }) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

#endif /* DDP_TEST_FAKE_CUBLASLT_H */

/*  cuda_kernels.h - compares the kernels of ddp_cuda.cuh with ddp.h's own code, bit for bit, and with f64
    references.

    The same checks run on a device (tests/gpu) and, if the including file substitutes DDP__CUDA_RUNTIME, as
    loops on the CPU (tests/unit). kernel_checks() runs all and prints a table. DDP_TEST_LARGE adds sizes that
    only a device can finish in time. */
#ifndef DDP_TEST_CUDA_KERNELS_H
#define DDP_TEST_CUDA_KERNELS_H

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../../ddp_fsdp.h"
#include "random.h"

static int check_failures, check_count;

static void check_that(int good, const char *format, ...) {
    va_list args;
    check_count++;
    if (good || ++check_failures > 10) return;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

static const ddp_dtype all_dtypes[] = {DDP_F32, DDP_F64, DDP_F16, DDP_BF16, DDP_I8,
                                       DDP_U8,  DDP_I32, DDP_I64, DDP_U64};
static const ddp_dtype float_dtypes[] = {DDP_F32, DDP_F64, DDP_F16, DDP_BF16};

/* Values of mixed size; special: NaN, infinities, subnormals and zeros of both signs among them. */
static void fill(void *data, size_t count, ddp_dtype dtype, int special) {
    unsigned char *at = (unsigned char *)data;
    size_t size = ddp_dtype_size(dtype);
    for (size_t i = 0; i < count; i++, at += size) {
        uint64_t r = random_u64(), kind = random_u64() % 64;
        float x = ldexpf((float)(int32_t)r, (int)(kind % 20) - 35);
        double wide = ldexp((double)(int64_t)r, (int)(kind % 20) - 67);
        int raw = (special && kind > 60)
                  || (dtype != DDP_F32 && dtype != DDP_F64 && dtype != DDP_F16 && dtype != DDP_BF16);
        if (special && kind < 3) {
            x = kind == 0 ? 0.0f : kind == 1 ? -0.0f : 1e-41f;
            wide = (double)x * (kind == 2 ? 1e-280 : 1.0);
        }
        if (raw)
            memcpy(at, &r, size);
        else if (dtype == DDP_F64)
            memcpy(at, &wide, 8);
        else
            ddp__cast(at, dtype, &x, DDP_F32, 1);
    }
}

static int is_nan(const void *data, size_t i, ddp_dtype dtype) {
    double x;
    float y;
    if (!ddp_is_float(dtype)) return 0;
    if (dtype == DDP_F64) {
        memcpy(&x, (const char *)data + 8 * i, 8);
        return x != x;
    }
    ddp__cast(&y, DDP_F32, (const char *)data + ddp_dtype_size(dtype) * i, dtype, 1);
    return y != y;
}

/* Any NaN equals any other. */
static int same(const void *a, const void *b, size_t count, ddp_dtype dtype) {
    size_t size = ddp_dtype_size(dtype);
    if (count == 0 || memcmp(a, b, count * size) == 0) return 1;
    for (size_t i = 0; i < count; i++)
        if (memcmp((const char *)a + i * size, (const char *)b + i * size, size) != 0
            && !(is_nan(a, i, dtype) && is_nan(b, i, dtype)))
            return 0;
    return 1;
}

/* ---- memory on both sides ---- */

typedef struct buffer {
    unsigned char *host, *device;
    size_t bytes;
} buffer;

static const ddp_device *gpu;

static buffer buffer_make(size_t bytes) {
    buffer b;
    void *device = NULL;
    b.bytes = bytes + 64;
    b.host = (unsigned char *)calloc(1, b.bytes);
    if (gpu->alloc(NULL, b.bytes, &device) != DDP_OK || !b.host) {
        printf("%s\n", ddp_last_error());
        exit(1);
    }
    b.device = (unsigned char *)device;
    return b;
}
static void buffer_up(const buffer *b) { gpu->copy(b->device, b->host, b->bytes); }
static void buffer_down(const buffer *b) { gpu->copy(b->host, b->device, b->bytes); }
static void buffer_free(buffer *b) {
    free(b->host);
    gpu->free(NULL, b->device);
}

/* ---- reductions ---- */

enum { SOURCES = 64 };
#ifdef DDP_TEST_LARGE
#define REDUCE_COUNT 300001
#else
#define REDUCE_COUNT 515
#endif
#define REDUCE_SLOT ((size_t)REDUCE_COUNT * 8 + 64)

/* shift: 0 = aligned, 1 = all shifted by one element, 2 = each with another shift, 3 = at odd addresses. */
static size_t shifted(int shift, int k, size_t size) {
    return shift == 0   ? 0
           : shift == 1 ? size
           : shift == 2 ? size * (size_t)(k % 3)
                        : 1 + size * (size_t)(k % 2);
}

static void reduce_case(buffer *in, buffer *out, unsigned char *want, int w, size_t count, ddp_dtype dtype,
                        ddp_op op, uint64_t divisor, int shift, int dst_count, int in_place) {
    const void *src[SOURCES], *src_host[SOURCES];
    void *dst[SOURCES], *want_list[1] = {want};
    size_t size = ddp_dtype_size(dtype);
    for (int k = 0; k < w; k++) {
        size_t at = REDUCE_SLOT * (size_t)k + shifted(shift, k, size);
        src[k] = in->device + at;
        src_host[k] = in->host + at;
    }
    for (int k = 0; k < dst_count; k++)
        dst[k] = in_place ? in->device + ((const unsigned char *)src_host[k] - in->host)
                          : out->device + REDUCE_SLOT * (size_t)k + shifted(shift, k, size);
    ddp__reduce_tree(want_list, 1, src_host, w, count, dtype, op, divisor, 0);
    if (in_place) buffer_up(in);
    check_that(ddp_cuda_reduce_tree(dst, dst_count, src, w, count, dtype, op, divisor, 0) == DDP_OK, "%s",
               ddp_last_error());
    /* Keeps the sources. */
    if (in_place) memcpy(out->host, in->host, in->bytes < out->bytes ? in->bytes : out->bytes);
    for (int k = 0; k < dst_count; k++) {
        gpu->copy(out->host, dst[k], count * size);
        check_that(same(out->host, want, count, dtype),
                   "reduce %s op=%d W=%d count=%zu shift=%d to %d of %d%s", ddp_dtype_name(dtype), (int)op, w,
                   count, shift, k, dst_count, in_place ? " in place" : "");
    }
    if (in_place) buffer_up(in);
}

static void check_reduce(void) {
    static const int worlds[] = {1, 2, 3, 4, 5, 7, 8, 11, 16, 28, 33, 64};
    static const size_t counts[] = {0, 1, 3, 17, 64, REDUCE_COUNT};
    buffer in = buffer_make(REDUCE_SLOT * SOURCES), out = buffer_make(REDUCE_SLOT * SOURCES);
    unsigned char *want = (unsigned char *)malloc(REDUCE_SLOT);
    for (size_t d = 0; d < sizeof all_dtypes / sizeof *all_dtypes; d++) {
        ddp_dtype dtype = all_dtypes[d];
        for (int shift = 0; shift < 4; shift++) {
            /* Integer sources can have any values, and so can those of floats. */
            for (int k = 0; k < SOURCES; k++)
                fill(in.host + REDUCE_SLOT * (size_t)k + shifted(shift, k, ddp_dtype_size(dtype)),
                     REDUCE_COUNT, dtype, k % 7 == 3);
            buffer_up(&in);
            for (int op = 0; op <= DDP_OP_PROD; op++)
                for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
                    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                        uint64_t divisor = c % 3 == 0   ? 0
                                           : c % 3 == 1 ? (uint64_t)worlds[w]
                                                        : (uint64_t)worlds[w] * 6;
                        reduce_case(&in, &out, want, worlds[w], counts[c], dtype, (ddp_op)op, divisor, shift,
                                    1 + (int)(c % 2), 0);
                    }
            reduce_case(&in, &out, want, 8, REDUCE_COUNT, dtype, DDP_OP_AVG, 8, shift, 8, 1);
            reduce_case(&in, &out, want, 3, 33, dtype, DDP_OP_AVG, 3, shift, 2, 1);
        }
    }
    buffer_free(&in);
    buffer_free(&out);
    free(want);
}

/* The sum of n sources of `dtype`, with results of dst_dtype: in f32, rounded at most once. */
static void reduce_to(void *dst, ddp_dtype dst_dtype, const void *const *src, int n, size_t count,
                      ddp_dtype dtype, ddp_op op, uint64_t divisor) {
    ddp_dtype sum_dtype = dst_dtype == dtype ? dtype : DDP_F32;
    size_t slot = count * ddp_dtype_size(sum_dtype);
    unsigned char *wide = (unsigned char *)malloc(slot * (size_t)(n + 1));
    const void **sources = (const void **)malloc(sizeof *sources * (size_t)n);
    void *sum = wide + slot * (size_t)n;
    for (int k = 0; k < n; k++) {
        sources[k] = wide + slot * (size_t)k;
        ddp__cast(wide + slot * (size_t)k, sum_dtype, src[k], dtype, count);
    }
    ddp__reduce_tree(&sum, 1, sources, n, count, sum_dtype, op, divisor, 0);
    ddp__cast(dst, dst_dtype, sum, sum_dtype, count);
    free(sources);
    free(wide);
}

/* Sources at a fixed stride, as received from ranks, and one elsewhere. More than 64 of them need a kernel
   with more levels. Partial sums of 16-bit floats are f32. */
static void check_reduce_strided(void) {
    static const int worlds[] = {1,   2,   7,   64,  65,  67,   100,  127,
                                 128, 129, 200, 255, 257, 1000, 4097, DDP__CUDA_TREE_MAX_SOURCES};
    enum { WORLDS = sizeof worlds / sizeof *worlds, COUNT = 37, STRIDE = 48 * 8 };
    static const struct {
        ddp_dtype from, to;
    } pairs[] = {{DDP_F32, DDP_F32}, {DDP_F64, DDP_F64}, {DDP_F16, DDP_F16}, {DDP_BF16, DDP_BF16},
                 {DDP_I8, DDP_I8},   {DDP_U8, DDP_U8},   {DDP_I32, DDP_I32}, {DDP_I64, DDP_I64},
                 {DDP_U64, DDP_U64}, {DDP_F16, DDP_F32}, {DDP_F32, DDP_F16}, {DDP_BF16, DDP_F32},
                 {DDP_F32, DDP_BF16}};
    buffer in = buffer_make((size_t)STRIDE * DDP__CUDA_TREE_MAX_SOURCES), elsewhere = buffer_make(STRIDE),
           out = buffer_make(STRIDE);
    const void **src = (const void **)malloc(sizeof *src * DDP__CUDA_TREE_MAX_SOURCES);
    unsigned char want[STRIDE];
    for (size_t d = 0; d < sizeof pairs / sizeof *pairs; d++) {
        ddp_dtype dtype = pairs[d].from, dst_dtype = pairs[d].to;
        size_t size = ddp_dtype_size(dtype), stride = 48 * size;
        for (int k = 0; k < DDP__CUDA_TREE_MAX_SOURCES; k++) {
            unsigned char *source = in.host + stride * (size_t)k;
            fill(source, COUNT, dtype, k == 5);
            memcpy(source + COUNT * size, source, 6 * size);
        }
        fill(elsewhere.host, COUNT + 1, dtype, 0);
        memcpy(elsewhere.host + (COUNT + 1) * size, elsewhere.host, 5 * size);
        buffer_up(&in);
        buffer_up(&elsewhere);
        for (int w = 0; w < WORLDS; w++) {
            int n = worlds[w], own = w % 3 == 0 ? n - 1 : w % 3 == 1 ? 0 : n / 2;
            /* All arrays are aligned, only one is not, or all are after heads of different lengths. */
            size_t shift = w % 3 == 2 ? 6 * size : 0, own_shift = w % 3 == 1 ? size : shift;
            size_t dst_shift = w % 3 == 2 ? 3 * ddp_dtype_size(dst_dtype) : 0;
            ddp_op op = (ddp_op)(((int)d + w) % (DDP_OP_PROD + 1));
            uint64_t divisor = op != DDP_OP_AVG ? 1 : w % 2 ? (uint64_t)n : 6;
            const void *two[2] = {in.device + shift, elsewhere.device + own_shift};
            void *dst = out.device + dst_shift;
            ddp__cuda_tree_call call = DDP_ZERO;
            call.dst = &dst;
            call.dst_count = 1;
            call.src = two;
            call.src_count = n;
            call.count = COUNT;
            call.op = op;
            call.divisor = divisor;
            call.function = "strided";
            call.stride_bytes = stride;
            call.own = own;
            call.dst_dtype = dst_dtype;
            for (int k = 0; k < n; k++)
                src[k] = k == own ? elsewhere.host + own_shift : in.host + shift + stride * (size_t)k;
            reduce_to(want, dst_dtype, src, n, COUNT, dtype, op, divisor);
            check_that(ddp__cuda_tree_reduce(&call, dtype) == DDP_OK, "%s", ddp_last_error());
            gpu->copy(out.host, out.device + dst_shift, COUNT * ddp_dtype_size(dst_dtype));
            check_that(same(out.host, want, COUNT, dst_dtype),
                       "reduce %s to %s op=%d W=%d own=%d a stride apart", ddp_dtype_name(dtype),
                       ddp_dtype_name(dst_dtype), (int)op, n, own);
        }
    }
    buffer_free(&in);
    buffer_free(&elsewhere);
    buffer_free(&out);
    free(src);
}

/* ---- many tensors ---- */

enum { TENSORS = 70 };

/* The expected value of each element: the product in the wider type, rounded once. */
static void convert_reference(void *dst, ddp_dtype to, const void *src, ddp_dtype from, size_t count,
                              float factor) {
    const unsigned char *in = (const unsigned char *)src;
    unsigned char *out = (unsigned char *)dst;
    for (size_t i = 0; i < count; i++, in += ddp_dtype_size(from), out += ddp_dtype_size(to)) {
        double wide;
        float x;
        if (from == DDP_F64)
            memcpy(&wide, in, 8);
        else
            ddp__cast(&wide, DDP_F64, in, from, 1);
        x = (float)wide;
        if (factor == 1.0f)
            ddp__cast(out, to, in, from, 1);
        else if (to == DDP_F64 || from == DDP_F64) {
            wide *= (double)factor;
            ddp__cast(out, to, &wide, DDP_F64, 1);
        } else {
            x *= factor;
            ddp__cast(out, to, &x, DDP_F32, 1);
        }
    }
}

static void multi_case(ddp_dtype flat_dtype, ddp_dtype dtype, float factor, int odd) {
    static const size_t lengths[] = {5, 0, 1, 300, 3, 16385, 64, 0};
    ddp_cuda_range ranges[TENSORS];
    size_t starts[TENSORS], total = 0, tensors = 1, size = ddp_dtype_size(dtype),
                            flat_size = ddp_dtype_size(flat_dtype);
    buffer data, flat;
    unsigned char *want;
    for (int i = 0; i < TENSORS; i++) {
        ranges[i].count = lengths[i % 8];
        ranges[i].offset = total;
        starts[i] = (tensors + 7) / 8 * 8 * (size_t)!odd + tensors * (size_t)odd;
        total += ranges[i].count;
        tensors = starts[i] + ranges[i].count * size + (size_t)(i % 3);
    }
    data = buffer_make(tensors);
    flat = buffer_make(total * flat_size);
    want = (unsigned char *)calloc(1, data.bytes + flat.bytes);
    for (int i = 0; i < TENSORS; i++) {
        ranges[i].data = data.device + starts[i];
        fill(data.host + starts[i], ranges[i].count, dtype, 1);
        convert_reference(want + ranges[i].offset * flat_size, flat_dtype, data.host + starts[i], dtype,
                          ranges[i].count, factor);
    }
    buffer_up(&data);
    check_that(ddp_cuda_flatten(flat.device, flat_dtype, ranges, TENSORS, dtype, factor, 0) == DDP_OK, "%s",
               ddp_last_error());
    buffer_down(&flat);
    check_that(same(flat.host, want, total, flat_dtype), "flatten %s to %s factor=%g odd=%d",
               ddp_dtype_name(dtype), ddp_dtype_name(flat_dtype), (double)factor, odd);
    check_that(ddp_cuda_unflatten(flat.device, flat_dtype, ranges, TENSORS, dtype, factor, 0) == DDP_OK, "%s",
               ddp_last_error());
    buffer_down(&data);
    for (int i = 0; i < TENSORS; i++) {
        convert_reference(want, dtype, flat.host + ranges[i].offset * flat_size, flat_dtype, ranges[i].count,
                          factor);
        check_that(same(data.host + starts[i], want, ranges[i].count, dtype),
                   "unflatten %s to %s factor=%g tensor %d", ddp_dtype_name(flat_dtype),
                   ddp_dtype_name(dtype), (double)factor, i);
    }
    free(want);
    buffer_free(&data);
    buffer_free(&flat);
}

static void check_multi(void) {
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            for (int odd = 0; odd < 2; odd++) {
                multi_case(float_dtypes[a], float_dtypes[b], 1.0f, odd);
                multi_case(float_dtypes[a], float_dtypes[b], 0.37f, odd);
            }
}

/* ---- unscaling and norms ---- */

/* Elements of tensor i of a list: some have none, some more than a chunk. */
static size_t list_length(int i) {
    static const size_t lengths[] = {5, 0, 1, 300, 3, 64, 0, 17};
    return i % 50 == 3 ? DDP__CUDA_CHUNK + 1 + (size_t)i : lengths[i % 8];
}

static size_t count_non_finite(const void *before, const void *after, size_t count, ddp_dtype dtype) {
    size_t bad = 0, size = ddp_dtype_size(dtype);
    for (size_t i = 0; i < count; i++) {
        double x, y;
        ddp__cast(&x, DDP_F64, (const char *)before + i * size, dtype, 1);
        ddp__cast(&y, DDP_F64, (const char *)after + i * size, dtype, 1);
        bad += !isfinite(x) || !isfinite(y);
    }
    return bad;
}

static void squares_case(ddp_dtype dtype, size_t rows, size_t row_count, int special, size_t shift) {
    size_t count = rows * row_count, size = ddp_dtype_size(dtype);
    buffer data = buffer_make(count * size), cells = buffer_make(sizeof(ddp_cuda_norm));
    unsigned char *want = (unsigned char *)malloc(count * size + 64);
    ddp_exact_sum expected, got;
    ddp_cuda_norm norm;
    double a, b;
    fill(data.host + shift, count, dtype, special);
    memcpy(want, data.host + shift, count * size);
    buffer_up(&data);
    ddp_exact_sum_clear(&expected);
    const ddp_tensor on_host = {want, dtype, 2, {(int64_t)rows, (int64_t)row_count}},
                     on_device = {data.device + shift, dtype, 2, {(int64_t)rows, (int64_t)row_count}};
    ddp_device_cpu()->sum_squares(&expected, 0, &on_host, 1);
    gpu->sum_squares((ddp_exact_sum *)(void *)cells.device, 0, &on_device, 1);
    gpu->copy(&got, cells.device, sizeof got);
    gpu->fill_zero(cells.device, sizeof norm);
    a = ddp_exact_sum_value(&expected);
    b = ddp_exact_sum_value(&got);
    check_that(memcmp(&a, &b, 8) == 0 || (a != a && b != b), "sum_squares %s %zux%zu: %.17g and not %.17g",
               ddp_dtype_name(dtype), rows, row_count, b, a);

    ddp_device_cpu()->scale(&on_host, 1, 0.43f);
    ddp_exact_sum_clear(&expected);
    ddp_device_cpu()->sum_squares(&expected, 0, &on_host, 1);
    check_that(ddp_cuda_unscale(data.device + shift, rows, row_count, dtype, 0.43f,
                                (ddp_cuda_norm *)(void *)cells.device, 0)
                   == DDP_OK,
               "%s", ddp_last_error());
    buffer_down(&cells);
    memcpy(&norm, cells.host, sizeof norm);
    a = ddp_exact_sum_value(&expected);
    b = ddp_exact_sum_value(&norm.squares);
    check_that(memcmp(&a, &b, 8) == 0 || (a != a && b != b), "unscale %s %zux%zu: sum %.17g and not %.17g",
               ddp_dtype_name(dtype), rows, row_count, b, a);
    {
        unsigned char *after = (unsigned char *)malloc(count * size + 1);
        gpu->copy(after, data.device + shift, count * size);
        check_that(same(after, want, count, dtype), "unscale %s %zux%zu: values", ddp_dtype_name(dtype), rows,
                   row_count);
        check_that((size_t)norm.non_finite == count_non_finite(data.host + shift, after, count, dtype),
                   "unscale %s %zux%zu: %lld not finite", ddp_dtype_name(dtype), rows, row_count,
                   (long long)norm.non_finite);
        free(after);
    }
    free(want);
    buffer_free(&data);
    buffer_free(&cells);
}

enum { LIST_MAX = 500 };

/* Lists of tensors of all float dtypes, some without elements: scale and divide them, then add their squares
   to one sum, and to one sum each. */
static void tensor_list_case(int count) {
    static ddp_tensor list[2][LIST_MAX];
    static ddp_exact_sum want[LIST_MAX + 1];
    size_t total = 0, at = 0;
    for (int i = 0; i < count; i++) total += list_length(i) * 8 + 8;
    buffer data = buffer_make(total), sums = buffer_make((size_t)(count + 1) * sizeof(ddp_exact_sum));
    unsigned char *got = (unsigned char *)malloc(data.bytes);
    ddp_exact_sum *sum;
    memset(want, 0, sizeof want);
    for (int i = 0; i < count; i++) {
        ddp_tensor *t = &list[0][i];
        int64_t length = (int64_t)list_length(i), columns = i % 2 && length % 3 == 0 ? 3 : 1;
        t->dtype = float_dtypes[i / 2 % 4];
        t->ndim = 1 + i % 2;
        t->shape[0] = length / columns;
        t->shape[1] = columns;
        at += (size_t)(i % 4); /* any address */
        t->data = data.host + at;
        fill(t->data, list_length(i), t->dtype, 0);
        list[1][i] = *t;
        list[1][i].data = data.device + at;
        at += list_length(i) * ddp_dtype_size(t->dtype);
    }
    buffer_up(&data);
    for (int on_device = 0; on_device < 2; on_device++) {
        const ddp_device *device = on_device ? gpu : ddp_device_cpu();
        sum = on_device ? (ddp_exact_sum *)(void *)sums.device : want;
        device->scale(list[on_device], count, 0.7f);
        device->divide(list[on_device], count, 3);
        device->divide(list[on_device], count, 8);
        device->sum_squares(sum, 0, list[on_device], count);
        device->sum_squares(sum + 1, 1, list[on_device], count);
    }
    gpu->copy(got, data.device, data.bytes);
    check_that(memcmp(got, data.host, data.bytes) == 0, "%d tensors: scaled and divided", count);
    buffer_down(&sums);
    for (int i = 0; i <= count; i++) {
        double a = ddp_exact_sum_value(&want[i]),
               b = ddp_exact_sum_value((ddp_exact_sum *)(void *)sums.host + i);
        check_that(memcmp(&a, &b, 8) == 0, "%d tensors, sum %d: %.17g and not %.17g", count, i, b, a);
    }
    buffer_free(&data);
    buffer_free(&sums);
    free(got);
}

static void check_tensor_lists(void) {
    static const int counts[] = {0, 1, 63, 64, 65, 148, 500};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) tensor_list_case(counts[c]);
}

static void check_squares(void) {
    static const size_t shapes[][2] = {{1, 1},    {1000, 1}, {3, 64},   {5, 63},   {7, 65},
                                       {4, 1000}, {1, 5003}, {2, 4096}, {3, 4097}, {1, 70001},
                                       {100, 31}, {9, 33},   {40, 768}};
    for (int d = 0; d < 4; d++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            squares_case(float_dtypes[d], shapes[s][0], shapes[s][1], 0, 0);
            squares_case(float_dtypes[d], shapes[s][0], shapes[s][1], 1, ddp_dtype_size(float_dtypes[d]));
            squares_case(float_dtypes[d], shapes[s][0], shapes[s][1], 0, 3);
#ifdef DDP_TEST_LARGE
            squares_case(float_dtypes[d], shapes[s][0] * 100, shapes[s][1], 0, 0);
#endif
        }
}

/* ---- optimizers ---- */

typedef struct step_state {
    buffer master, first, second, grad, copy;
    size_t count, shift;
} step_state;

static ddp_cuda_step_desc step_desc(const step_state *s, ddp_dtype grad_dtype, ddp_dtype copy_dtype,
                                    int64_t step) {
    ddp_cuda_step_desc d = DDP_ZERO;
    d.master = (float *)(void *)(s->master.device + s->shift * 4);
    d.first = (float *)(void *)(s->first.device + s->shift * 4);
    d.second = (float *)(void *)(s->second.device + s->shift * 4);
    d.grad = s->grad.device + s->shift * ddp_dtype_size(grad_dtype);
    d.grad_dtype = grad_dtype;
    d.copy = s->copy.device + s->shift * ddp_dtype_size(copy_dtype);
    d.copy_dtype = copy_dtype;
    d.count = s->count;
    d.step = step;
    d.lr = 3e-3f;
    d.weight_decay = 0.1f;
    d.grad_factor = 0.7f;
    return d;
}

/* One element in f32, operation by operation, and in f64. v = {w, m, v}. */
static void adamw_f32(float *v, float g, const ddp_cuda_step_desc *d) {
    const float b1 = 0.9f, b2 = 0.999f;
    float rate = (float)(d->lr / (1.0 - pow(b1, (double)d->step))),
          root = (float)(1.0 / sqrt(1.0 - pow(b2, (double)d->step)));
    volatile float t, u;
    g = g * d->grad_factor;
    t = b1 * v[1];
    u = (1.0f - b1) * g;
    v[1] = t + u;
    t = g * g;
    t = (1.0f - b2) * t;
    u = b2 * v[2];
    v[2] = u + t;
    t = sqrtf(v[2]) * root;
    t = t + 1e-8f;
    u = rate * v[1];
    u = u / t;
    t = v[0] * (1.0f - d->lr * d->weight_decay);
    v[0] = t - u;
}

static void adamw_f64(double *v, double g, const ddp_cuda_step_desc *d) {
    g *= (double)d->grad_factor;
    v[1] = (double)0.9f * v[1] + (1 - (double)0.9f) * g;
    v[2] = (double)0.999f * v[2] + (1 - (double)0.999f) * g * g;
    v[0] = v[0] * (1 - (double)d->lr * (double)d->weight_decay)
           - (double)d->lr / (1 - pow((double)0.9f, (double)d->step)) * v[1]
                 / (sqrt(v[2] / (1 - pow((double)0.999f, (double)d->step))) + 1e-8);
}

static void sgd_f64(double *v, double g, const ddp_cuda_step_desc *d) {
    g = g * (double)d->grad_factor + (double)d->weight_decay * v[0];
    if (d->momentum != 0) {
        v[1] = d->step == 1 ? g : (double)d->momentum * v[1] + (1 - (double)d->dampening) * g;
        g = d->nesterov ? g + (double)d->momentum * v[1] : v[1];
    }
    v[0] -= (double)d->lr * g;
}

static step_state step_make(size_t count, size_t shift) {
    step_state s;
    s.count = count;
    s.shift = shift;
    s.master = buffer_make((count + shift) * 4);
    s.first = buffer_make((count + shift) * 4);
    s.second = buffer_make((count + shift) * 4);
    s.grad = buffer_make((count + shift) * 4);
    s.copy = buffer_make((count + shift) * 4);
    for (size_t i = 0; i < count; i++) {
        float w = (float)(int32_t)random_u64() * 0x1p-31f;
        memcpy(s.master.host + 4 * (shift + i), &w, 4);
    }
    buffer_up(&s.master);
    return s;
}

static void step_free(step_state *s) {
    buffer_free(&s->master);
    buffer_free(&s->first);
    buffer_free(&s->second);
    buffer_free(&s->grad);
    buffer_free(&s->copy);
}

/* adamw 0: SGD of the given kind: 0 plain, 1 momentum with dampening, 2 Nesterov. */
static void step_case(int adamw, int kind, ddp_dtype grad_dtype, ddp_dtype copy_dtype, size_t count,
                      size_t shift) {
    step_state s = step_make(count, shift);
    double *wide = (double *)calloc(3 * count, 8), worst = 0;
    float *plain = (float *)calloc(3 * count, 4), w;
    int64_t no = 0, yes = 1;
    size_t different = 0, size = ddp_dtype_size(copy_dtype);
    buffer flag = buffer_make(16);
    memcpy(flag.host, &no, 8);
    memcpy(flag.host + 8, &yes, 8);
    buffer_up(&flag);
    for (size_t i = 0; i < count; i++) {
        memcpy(&w, s.master.host + 4 * (shift + i), 4);
        wide[3 * i] = plain[3 * i] = w;
    }
    for (int64_t step = 1; step <= 4; step++) {
        ddp_cuda_step_desc d = step_desc(&s, grad_dtype, copy_dtype, step);
        fill(s.grad.host + shift * ddp_dtype_size(grad_dtype), count, grad_dtype, 0);
        buffer_up(&s.grad);
        if (!adamw && kind) {
            d.momentum = 0.9f;
            d.dampening = kind == 1 ? 0.2f : 0;
            d.nesterov = kind == 2;
        }
        d.skip = (const int64_t *)(void *)(flag.device + 8); /* a step that is skipped changes nothing */
        check_that((adamw ? ddp_cuda_adamw(&d, 1, 0) : ddp_cuda_sgd(&d, 1, 0)) == DDP_OK, "%s",
                   ddp_last_error());
        d.skip = (const int64_t *)(void *)flag.device;
        check_that((adamw ? ddp_cuda_adamw(&d, 1, 0) : ddp_cuda_sgd(&d, 1, 0)) == DDP_OK, "%s",
                   ddp_last_error());
        for (size_t i = 0; i < count; i++) {
            float g;
            ddp__cast(&g, DDP_F32, s.grad.host + (shift + i) * ddp_dtype_size(grad_dtype), grad_dtype, 1);
            if (adamw) {
                adamw_f32(plain + 3 * i, g, &d);
                adamw_f64(wide + 3 * i, g, &d);
            } else
                sgd_f64(wide + 3 * i, g, &d);
        }
    }
    buffer_down(&s.master);
    buffer_down(&s.copy);
    for (size_t i = 0; i < count; i++) {
        uint32_t rounded = 0, copied = 0;
        memcpy(&w, s.master.host + 4 * (shift + i), 4);
        worst = fmax(worst, fabs((double)w - wide[3 * i]) / (fabs(wide[3 * i]) + 1));
        different += adamw && memcmp(&w, plain + 3 * i, 4) != 0;
        ddp__cast(&rounded, copy_dtype, &w, DDP_F32, 1);
        memcpy(&copied, s.copy.host + size * (shift + i), size);
        different += rounded != copied;
    }
    check_that(different == 0, "%s %d %s to %s count=%zu shift=%zu: %zu differ in bits",
               adamw ? "adamw" : "sgd", kind, ddp_dtype_name(grad_dtype), ddp_dtype_name(copy_dtype), count,
               shift, different);
    check_that(worst < 4e-6, "%s %d %s: off by %g from f64", adamw ? "adamw" : "sgd", kind,
               ddp_dtype_name(grad_dtype), worst);
    free(wide);
    free(plain);
    buffer_free(&flag);
    step_free(&s);
}

/* Stochastic rounding picks one of the two neighbours, is right on average, and does not depend on the
   distribution of elements to threads. */
static void check_random_rounding(void) {
    enum { COUNT = 20000, CUT = 7001 };
    step_state s = step_make(COUNT, 0);
    unsigned char *whole = (unsigned char *)malloc(2 * COUNT);
    double error = 0, ulp = 0;
    ddp_cuda_step_desc d = step_desc(&s, DDP_F32, DDP_BF16, 1);
    d.stochastic = 1;
    d.seed = 5;
    d.first_index = 1000;
    d.lr = 0; /* nothing moves, so the step is only the copy */
    check_that(ddp_cuda_sgd(&d, 1, 0) == DDP_OK, "%s", ddp_last_error());
    buffer_down(&s.copy);
    memcpy(whole, s.copy.host, 2 * COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        float w, rounded;
        uint32_t bits, low, high;
        uint16_t half;
        memcpy(&w, s.master.host + 4 * i, 4);
        memcpy(&half, whole + 2 * i, 2);
        memcpy(&bits, &w, 4);
        low = bits >> 16;
        high = bits & 0xffff ? low + 1 : low;
        check_that(half == low || half == high, "random rounding: element %zu is no neighbour", i);
        ddp__cast(&rounded, DDP_F32, &half, DDP_BF16, 1);
        error += (double)rounded - (double)w;
        ulp += ldexp(1.0, ilogbf(w) - 7);
    }
    check_that(fabs(error) < 0.02 * ulp, "random rounding: the average is off by %g of an ulp", error / ulp);
    gpu->fill_zero(s.copy.device, 2 * COUNT);
    d.count = CUT;
    check_that(ddp_cuda_sgd(&d, 1, 0) == DDP_OK, "%s", ddp_last_error());
    d.count = COUNT - CUT;
    d.first_index += CUT;
    d.master += CUT;
    d.grad = (const float *)d.grad + CUT;
    d.copy = (unsigned char *)d.copy + 2 * CUT;
    check_that(ddp_cuda_sgd(&d, 1, 0) == DDP_OK, "%s", ddp_last_error());
    buffer_down(&s.copy);
    check_that(memcmp(whole, s.copy.host, 2 * COUNT) == 0, "random rounding depends on the sharding");
    free(whole);
    step_free(&s);
}

/* AdamW with beta1, beta2 and eps of 0 has the bits of their defaults; beta2 is used if it is set. */
static void check_step_defaults(void) {
    enum { COUNT = 100, STEPS = 3, WAYS = 3 };
    unsigned char ended[WAYS][4 * COUNT];
    step_state s = step_make(COUNT, 0);
    for (int way = 0; way < WAYS; way++) {
        buffer_up(&s.master);
        gpu->fill_zero(s.first.device, 4 * COUNT);
        gpu->fill_zero(s.second.device, 4 * COUNT);
        for (int64_t step = 1; step <= STEPS; step++) {
            ddp_cuda_step_desc d = step_desc(&s, DDP_F32, DDP_BF16, step);
            for (int i = 0; i < COUNT; i++) {
                float g = (float)(i + 1) / (float)(step * COUNT);
                memcpy(s.grad.host + 4 * i, &g, 4);
            }
            buffer_up(&s.grad);
            d.beta1 = way ? 0.9f : 0;
            d.beta2 = way ? 0.999f : 0;
            d.eps = way ? 1e-8f : 0;
            if (way == 2) d.beta2 = 0.5f;
            check_that(ddp_cuda_adamw(&d, 1, 0) == DDP_OK, "%s", ddp_last_error());
        }
        gpu->copy(ended[way], s.master.device, 4 * COUNT);
    }
    check_that(memcmp(ended[0], ended[1], sizeof ended[0]) == 0,
               "adamw: the defaults are not 0.9, 0.999 and 1e-8");
    check_that(memcmp(ended[1], ended[2], sizeof ended[1]) != 0, "adamw: beta2 changes nothing");
    step_free(&s);
}

static void check_optimizers(void) {
    static const ddp_dtype grads[] = {DDP_F32, DDP_F16, DDP_BF16}, copies[] = {DDP_BF16, DDP_F16, DDP_F32};
    static const size_t counts[] = {1, 7, 1003};
    for (int g = 0; g < 3; g++)
        for (int c = 0; c < 3; c++)
            for (size_t shift = 0; shift < 3; shift++) {
                step_case(1, 0, grads[g], copies[c], counts[(g + c + (int)shift) % 3], shift);
                step_case(0, c, grads[g], copies[c], counts[(g + c + (int)shift + 1) % 3], shift);
            }
    step_case(1, 0, DDP_F32, DDP_BF16, 50021, 0);
    step_case(1, 0, DDP_BF16, DDP_BF16, 50021, 1);
    check_random_rounding();
    check_step_defaults();
}

/* Lists of descs give the bits of calls with one desc each. Descs differ in every field that keeps two
   tensors out of one launch. */
static void step_list_case(int adamw, int count) {
    step_state s[2] = {step_make(148 * 40, 1), step_make(148 * 40, 1)};
    static ddp_cuda_step_desc descs[LIST_MAX];
    unsigned char *got = (unsigned char *)malloc(s[0].master.bytes);
    buffer flag = buffer_make(8);
    int64_t yes = 1;
    memcpy(flag.host, &yes, 8);
    buffer_up(&flag);
    for (int k = 1; k >= 0; k--) { /* the same numbers in both */
        memcpy(s[k].master.host, s[0].master.host, s[0].master.bytes);
        for (size_t i = 0; i < s[k].count && k; i++) {
            float g = (float)(i % 13) - 6;
            memcpy(s[0].grad.host + 4 * i, &g, 4);
        }
        memcpy(s[k].grad.host, s[0].grad.host, s[0].grad.bytes);
        buffer_up(&s[k].master);
        buffer_up(&s[k].grad);
    }
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < count; i++) {
            ddp_cuda_step_desc *d = &descs[i];
            size_t at = (size_t)i * 40 + (size_t)i % 3;
            *d = step_desc(&s[k], DDP_F32, DDP_BF16, 3);
            d->count = (size_t)(i * 7) % 38;
            d->master += at;
            d->first += at;
            d->second += at;
            d->grad = (const float *)d->grad + at;
            d->copy = i % 5 ? (unsigned char *)d->copy + 4 * at : NULL;
            d->first_index = 10 * (uint64_t)i;
            if (i % 16 == 1) d->weight_decay = 0;
            if (i % 16 == 2) d->lr = 1e-4f;
            if (i % 16 == 3) d->beta1 = 0.8f;
            if (i % 16 == 4) d->beta2 = 0.95f;
            if (i % 16 == 5) d->eps = 1e-3f;
            if (i % 16 == 6) d->momentum = 0.9f;
            if (i % 16 == 7) d->momentum = d->dampening = 0.5f;
            if (i % 16 == 8) {
                d->momentum = 0.9f;
                d->nesterov = 1;
            }
            if (i % 16 == 9) d->grad_factor = 0.3f;
            if (i % 16 == 10) d->step = 1;
            if (i % 16 == 11) d->copy_dtype = DDP_F32;
            if (i % 16 == 12) d->stochastic = 1;
            if (i % 16 == 13) d->stochastic = (int)(d->seed = 1);
            if (i % 16 == 14) d->skip = (const int64_t *)(void *)flag.device;
            if (i % 16 == 15) d->grad_dtype = DDP_BF16;
            if (k == 0)
                check_that((adamw ? ddp_cuda_adamw(d, 1, 0) : ddp_cuda_sgd(d, 1, 0)) == DDP_OK, "%s",
                           ddp_last_error());
        }
    check_that((adamw ? ddp_cuda_adamw(descs, count, 0) : ddp_cuda_sgd(descs, count, 0)) == DDP_OK, "%s",
               ddp_last_error());
    const buffer pairs[4][2] = {{s[0].master, s[1].master},
                                {s[0].first, s[1].first},
                                {s[0].second, s[1].second},
                                {s[0].copy, s[1].copy}};
    for (int i = 0; i < 4; i++) {
        gpu->copy(pairs[i][0].host, pairs[i][0].device, pairs[i][0].bytes);
        gpu->copy(got, pairs[i][1].device, pairs[i][1].bytes);
        check_that(memcmp(pairs[i][0].host, got, pairs[i][0].bytes) == 0, "%s of %d descs: array %d differs",
                   adamw ? "adamw" : "sgd", count, i);
    }
    for (int k = 0; k < 2; k++) step_free(&s[k]);
    buffer_free(&flag);
    free(got);
}

static void check_step_lists(void) {
    static const int counts[] = {0, 1, 63, 64, 65, 148};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int adamw = 0; adamw < 2; adamw++) step_list_case(adamw, counts[c]);
}

/* A step of an optimizer by the device table, and as ddp_fsdp.h computes it on the CPU. without: momentum. */
static void update_case(ddp_update u, int without, size_t count, size_t shift) {
    size_t size = ddp_dtype_size(u.dtype), bytes = (count + shift + 4) * size,
           at[4] = {shift * size, shift * size, shift * size, shift * size};
    unsigned char *got = (unsigned char *)malloc(bytes + 64);
    static const char *const names[4] = {"value", "grad", "state0", "state1"};
    buffer b[4], factors = buffer_make(16); /* some are read from device memory */
    float grad_scale = (float)(u.grad_scale != 0 ? u.grad_scale : 1);
    memcpy(factors.host, &grad_scale, sizeof grad_scale);
    memcpy(factors.host + 8, &u.scale, sizeof u.scale);
    buffer_up(&factors);
    if (shift == 2) {
        at[1] = size;
        at[2] = 3 * size;
    } /* without a head all of them are aligned */
    for (int k = 0; k < 4; k++) {
        b[k] = buffer_make(bytes);
        fill(b[k].host, bytes / size, u.dtype, k < 2);
        if (k > 1) memset(b[k].host, 0, bytes);
        buffer_up(&b[k]);
    }
    for (int step = 1; step <= 3; step++) {
        ddp_update_tensor host = DDP_ZERO, device;
        u.first = step == 1;
        host.count = count;
        host.value = b[0].host + at[0];
        host.grad = b[1].host + at[1];
        host.state0 = without ? NULL : b[2].host + at[2];
        host.state1 = b[3].host + at[3];
        device = host;
        device.value = b[0].device + at[0];
        device.grad = b[1].device + at[1];
        device.state0 = without ? NULL : b[2].device + at[2];
        device.state1 = b[3].device + at[3];
        if (u.dtype == DDP_F32)
            ddp__update_f32(&u, &host);
        else
            ddp__update_f64(&u, &host);
        ddp_update on_device = u;
        if (shift == 1) {
            on_device.grad_scale_at = (const float *)(const void *)factors.device;
            device.scale_at = (const double *)(const void *)(factors.device + 8);
            on_device.grad_scale = on_device.scale = 0.123;
        }
        on_device.tensors = &device;
        on_device.tensor_count = 1;
        gpu->optimizer->update(&on_device);
    }
    for (int k = 0; k < 4; k++) {
        gpu->copy(got, b[k].device, bytes);
        check_that(same(got, b[k].host, bytes / size, u.dtype),
                   "update %s kind=%d count=%zu shift=%zu: %s differs", ddp_dtype_name(u.dtype), (int)u.kind,
                   count, shift, names[k]);
        buffer_free(&b[k]);
    }
    buffer_free(&factors);
    free(got);
}

/* Kinds: 0 ADAMW, 1 and 2 LAMB without and with decay, 3 to 5 SGD: plain, momentum, Nesterov and decay. */
static ddp_update update_factors(int kind, ddp_dtype dtype) {
    ddp_update u = DDP_ZERO;
    u.kind = DDP_UPDATE_SGD;
    if (kind < 3) u.kind = kind == 0 ? DDP_UPDATE_ADAMW : DDP_UPDATE_LAMB;
    u.dtype = u.grad_dtype = dtype;
    u.rate = 0.03f;
    u.beta1 = 0.9f;
    u.one_minus_beta1 = 1.0f - 0.9f;
    u.beta2 = 0.999f;
    u.one_minus_beta2 = 1.0f - 0.999f;
    u.inv_sqrt_bias_correction2 = 31.6f;
    u.eps = 1e-8f;
    u.decay_factor = 0.997f;
    u.scale = kind == 4 ? 0.7f : 1;
    u.decay = kind == 2 || kind == 5 ? 0.1f : 0;
    u.nesterov = kind == 5;
    u.grad_scale = kind % 2 ? 0.3f : 0;
    return u;
}

enum { LIST_VALUE, LIST_GRAD, LIST_STATE0, LIST_STATE1, LIST_COPY, LIST_ARRAYS };

/* A step of `count` tensors by one call of the device table, and of each by ddp_fsdp.h on the CPU. Arrays
   begin at any element. Some tensors read their scale from memory, and some have a copy. */
static void update_list_case(int kind, ddp_dtype dtype, ddp_dtype grad, ddp_dtype copy, int count) {
    static const char *const names[LIST_ARRAYS] = {"value", "grad", "state0", "state1", "copy"};
    const ddp_dtype dtypes[LIST_ARRAYS] = {dtype, grad, dtype, dtype, copy};
    ddp_update u = update_factors(kind, dtype);
    static ddp_update_tensor tensors[LIST_MAX];
    ddp_update_tensor host;
    buffer b[LIST_ARRAYS], scale = buffer_make(8);
    size_t total = 0, at;
    double factor = 0.61;
    for (int i = 0; i < count; i++) total += list_length(i) + (size_t)i % 3;
    float *wide = (float *)malloc(total * sizeof *wide + 64);
    unsigned char *got = (unsigned char *)malloc(total * 8 + 64);
    for (int k = 0; k < LIST_ARRAYS; k++) {
        b[k] = buffer_make(total * ddp_dtype_size(dtypes[k]));
        if (k <= LIST_GRAD) fill(b[k].host, total, dtypes[k], 0);
        buffer_up(&b[k]);
    }
    memcpy(scale.host, &factor, 8);
    buffer_up(&scale);
    u.first = 1;
    u.grad_dtype = grad;
    u.copy_dtype = copy;
    u.tensors = tensors;
    u.tensor_count = count;
    at = 0;
    for (int i = 0; i < count; i++) {
        void *start[2][LIST_ARRAYS]; /* on the host, on the device */
        size_t length = list_length(i);
        at += (size_t)i % 3; /* a gap, which must not change */
        for (int k = 0; k < LIST_ARRAYS; k++) {
            start[0][k] = b[k].host + at * ddp_dtype_size(dtypes[k]);
            start[1][k] = b[k].device + at * ddp_dtype_size(dtypes[k]);
        }
        for (int on_device = 0; on_device < 2; on_device++) {
            ddp_update_tensor *t = on_device ? &tensors[i] : &host;
            memset(t, 0, sizeof *t);
            t->value = start[on_device][LIST_VALUE];
            t->grad = start[on_device][LIST_GRAD];
            t->state0 = kind == 3 ? NULL : start[on_device][LIST_STATE0];
            t->state1 = start[on_device][LIST_STATE1];
            if (u.kind != DDP_UPDATE_LAMB && i % 4 != 1) t->copy = start[on_device][LIST_COPY];
            t->count = length;
            if (kind > 3 && i % 2)
                t->scale_at = (const double *)(void *)(on_device ? scale.device : scale.host);
        }
        if (grad != dtype) {
            ddp__cast(wide, DDP_F32, host.grad, grad, length);
            host.grad = wide;
        }
        if (dtype == DDP_F32)
            ddp__update_f32(&u, &host);
        else
            ddp__update_f64(&u, &host);
        if (host.copy) ddp__cast(host.copy, copy, host.value, dtype, length);
        at += length;
    }
    gpu->optimizer->update(&u);
    for (int k = 0; k < LIST_ARRAYS; k++) {
        gpu->copy(got, b[k].device, total * ddp_dtype_size(dtypes[k]));
        check_that(same(got, b[k].host, total, dtypes[k]),
                   "update of %d tensors, kind=%d %s %s to %s: %s differs", count, kind,
                   ddp_dtype_name(dtype), ddp_dtype_name(grad), ddp_dtype_name(copy), names[k]);
        buffer_free(&b[k]);
    }
    buffer_free(&scale);
    free(wide);
    free(got);
}

static void check_updates(void) {
    static const size_t counts[] = {0, 1, 7, 1003};
    for (int kind = 0; kind < 6; kind++)
        for (int wide = 0; wide < 2; wide++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
                for (size_t shift = 0; shift < 3; shift++)
                    update_case(update_factors(kind, wide ? DDP_F64 : DDP_F32), kind == 3, counts[c], shift);
}

static void check_update_lists(void) {
    static const int counts[] = {1, 55, 56, 57, 63, 64, 65, 113, 148};
    for (int kind = 0; kind < 6; kind++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            ddp_dtype half = c % 2 ? DDP_F16 : DDP_BF16, copy = float_dtypes[(c + (size_t)kind) % 4];
            int halves = kind != 1 && kind != 2; /* LAMB writes its update to the gradient */
            update_list_case(kind, DDP_F32, halves && c % 3 == 0 ? half : DDP_F32, copy, counts[c]);
            update_list_case(kind, DDP_F64, DDP_F64, float_dtypes[c % 4], counts[c]);
        }
}

/* ---- 8 bits ---- */

static void quantise_case(ddp_dtype dtype, size_t count, size_t shift, int kind) {
    size_t blocks = (count + DDP_CUDA_QUANT_BLOCK - 1) / DDP_CUDA_QUANT_BLOCK, size = ddp_dtype_size(dtype);
    buffer data = buffer_make(count * size), q = buffer_make(count), scales = buffer_make(blocks * 4),
           back = buffer_make(count * 4);
    fill(data.host + shift * size, count, dtype, 0);
    /* kind 1: extremes; kind 2: tiny; kind 3: one NaN or infinity in every second block. */
    for (size_t i = 0; i < count; i++) {
        float x = i % 3 ? FLT_MAX : -FLT_MAX;
        if (kind == 2) x = i % 2 ? 1e-31f : -1e-40f;
        if (kind == 3) x = i % 1024 == 300 ? NAN : i % 1024 == 900 ? -INFINITY : 1.0f;
        if (kind) ddp__cast(data.host + (shift + i) * size, dtype, &x, DDP_F32, 1);
    }
    buffer_up(&data);
    memset(q.host, 0x55, q.bytes);
    buffer_up(&q);
    check_that(ddp_cuda_quantise8((int8_t *)(q.device + shift), (float *)(void *)scales.device,
                                  data.device + shift * size, dtype, count, 0)
                   == DDP_OK,
               "%s", ddp_last_error());
    check_that(ddp_cuda_dequantise8(back.device, DDP_F32, (const int8_t *)(q.device + shift),
                                    (const float *)(const void *)scales.device, count, 0)
                   == DDP_OK,
               "%s", ddp_last_error());
    buffer_down(&q);
    size_t outside = shift && q.host[0] != 0x55;
    for (size_t i = shift + count; i < q.bytes; i++) outside += q.host[i] != 0x55;
    check_that(outside == 0, "quantise %s count=%zu shift=%zu: %zu bytes outside are written",
               ddp_dtype_name(dtype), count, shift, outside);
    buffer_down(&back);
    for (size_t b = 0; b < blocks; b++) {
        size_t first = b * DDP_CUDA_QUANT_BLOCK,
               n = count - first < DDP_CUDA_QUANT_BLOCK ? count - first : DDP_CUDA_QUANT_BLOCK, wrong = 0;
        double largest = 0;
        int special = 0;
        for (size_t i = first; i < first + n; i++) {
            double x;
            ddp__cast(&x, DDP_F64, data.host + (shift + i) * size, dtype, 1);
            special |= !isfinite(x);
            largest = fmax(largest, fabs(x));
        }
        for (size_t i = first; i < first + n; i++) {
            double x;
            float y;
            ddp__cast(&x, DDP_F64, data.host + (shift + i) * size, dtype, 1);
            memcpy(&y, back.host + 4 * i, 4);
            if (special)
                wrong += y == y;
            else if (largest < 0x1p-100)
                wrong += y != 0;
            else
                wrong += !(fabs((double)y - x) <= largest / 253.9);
        }
        check_that(wrong == 0, "quantise %s count=%zu shift=%zu kind=%d block %zu: %zu out of bounds",
                   ddp_dtype_name(dtype), count, shift, kind, b, wrong);
    }
    for (int d = 2; d < 4; d++) { /* 16-bit results are the f32 ones, rounded */
        unsigned char *want = (unsigned char *)malloc(2 * count + 1),
                      *f32 = (unsigned char *)malloc(4 * count + 1);
        memcpy(f32, back.host, 4 * count);
        ddp__cast(want, float_dtypes[d], f32, DDP_F32, count);
        check_that(ddp_cuda_dequantise8(back.device + 2, float_dtypes[d], (const int8_t *)(q.device + shift),
                                        (const float *)(const void *)scales.device, count, 0)
                       == DDP_OK,
                   "%s", ddp_last_error());
        gpu->copy(f32, back.device + 2, 2 * count);
        check_that(same(f32, want, count, float_dtypes[d]), "dequantise to %s",
                   ddp_dtype_name(float_dtypes[d]));
        free(want);
        free(f32);
    }
    buffer_free(&data);
    buffer_free(&q);
    buffer_free(&scales);
    buffer_free(&back);
}

static void check_quantise(void) {
    static const ddp_dtype dtypes[] = {DDP_F32, DDP_F16, DDP_BF16};
    static const size_t counts[] = {1, 8, 255, 256, 257, 5003};
    for (int d = 0; d < 3; d++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (size_t shift = 0; shift < 2; shift++)
                for (int kind = 0; kind < 4; kind++)
                    if (kind == 0 || dtypes[d] != DDP_F16) quantise_case(dtypes[d], counts[c], shift, kind);
}

/* ---- sums of squares ---- */

enum { STEERS = 512 };

/* Sums of all sizes, cells after an addition over ranks, zeros, infinities, a NaN. */
static void steer_sums(ddp_exact_sum *sums) {
    for (int i = 0; i < STEERS; i++) {
        int terms = i % 16 == 15 ? 0 : 1 + (int)(random_u64() % 40),
            scale = (int)(random_u64() % 2100) - 1070;
        ddp_exact_sum_clear(&sums[i]);
        for (int k = 0; k < terms; k++) {
            ddp_exact_sum part;
            double x = ldexp((double)(random_u64() >> 11),
                             scale + (int)(random_u64() % (i % 3 ? 8 : 200)) - 53);
            ddp_exact_sum_clear(&part);
            ddp_exact_sum_add(&part, x);
            for (int cell = 0; cell < DDP_EXACT_CELLS; cell++) sums[i].cell[cell] += part.cell[cell];
        }
        if (i % 32 < 8) { /* between two floats, or just next to the middle */
            ddp_exact_sum_clear(&sums[i]);
            ddp_exact_sum_add(&sums[i], ldexp((double)(random_u64() >> 11), 60));
            ddp_exact_sum_add(&sums[i], ldexp(0.5, 60));
            if (i % 2) ddp_exact_sum_add(&sums[i], ldexp(1, -900));
        }
        if (i % 64 == 20) ddp_exact_sum_add(&sums[i], HUGE_VAL);
        if (i % 64 == 21) ddp_exact_sum_add(&sums[i], (double)NAN);
    }
}

static void check_steer(void) {
    static const float limits[] = {1, 1e-30f, 1e30f, INFINITY, 1e-44f};
    static const double decays[] = {-1, 0, 0.1};
    buffer sums = buffer_make(STEERS * sizeof(ddp_exact_sum)), out = buffer_make(STEERS * sizeof(double));
    ddp_exact_sum *host = (ddp_exact_sum *)(void *)sums.host;
    steer_sums(host);
    buffer_up(&sums);
    const ddp_exact_sum *there = (const ddp_exact_sum *)(const void *)sums.device;
    for (int i = 0; i < STEERS; i++) {
        float limit = limits[i % 5], n = (float)sqrt(ddp_exact_sum_value(&host[i])), got[2] = {7, 7},
              want[2] = {n > limit && n <= FLT_MAX ? limit / n : 1, n};
        gpu->optimizer->clip(there + i, limit, (float *)(void *)out.device,
                             (float *)(void *)(out.device + 4));
        gpu->copy(got, out.device, sizeof got);
        check_that(same(got, want, 2, DDP_F32), "clip %d: %.9g %.9g, want %.9g %.9g", i, (double)got[0],
                   (double)got[1], (double)want[0], (double)want[1]);
    }
    for (int d = 0; d < 3; d++) {
        double want[STEERS / 2], lr = (double)0.03f, c = (double)0.001f;
        for (int i = 0; i < STEERS / 2; i++) {
            double value = sqrt(ddp_exact_sum_value(&host[2 * i])),
                   grad = sqrt(ddp_exact_sum_value(&host[2 * i + 1])), decayed = decays[d] * value;
            double trust = value == 0 || grad == 0 ? 1 : c * value / (decays[d] < 0 ? grad : grad + decayed);
            want[i] = lr * trust;
        }
        gpu->optimizer->trust(there, STEERS / 2, lr, c, decays[d], (double *)(void *)out.device);
        buffer_down(&out);
        check_that(same(out.host, want, STEERS / 2, DDP_F64), "trust with decay %g differs", decays[d]);
    }
    buffer_free(&sums);
    buffer_free(&out);
}

/* ---- the device table ---- */

static void check_device(void) {
    enum { COUNT = 1003 };
    const ddp_device *cpu = ddp_device_cpu();
    buffer a = buffer_make(COUNT * 8), b = buffer_make(COUNT * 8), c = buffer_make(COUNT * 8);
    unsigned char *want = (unsigned char *)malloc(COUNT * 8 + 64),
                  *got = (unsigned char *)malloc(COUNT * 8 + 64);
    void *memory = NULL;
    check_that(gpu->alloc(NULL, 1000, &memory) == DDP_OK && (uintptr_t)memory % 64 == 0, "alloc: %s",
               ddp_last_error());
    memset(want, 0, 1000);
    memset(got, 1, 1000);
    gpu->copy(got, memory, 1000);
    check_that(memcmp(want, got, 1000) == 0, "alloc: not zeroed");
    gpu->free(NULL, memory);
    gpu->free(NULL, NULL);
    for (size_t d = 0; d < sizeof all_dtypes / sizeof *all_dtypes; d++) {
        ddp_dtype dtype = all_dtypes[d];
        size_t size = ddp_dtype_size(dtype), shift = d % 2 * size;
        fill(a.host + shift, COUNT, dtype, 1);
        fill(b.host + shift, COUNT, dtype, 1);
        buffer_up(&a);
        buffer_up(&b);
        cpu->add(want, a.host + shift, b.host + shift, COUNT, dtype);
        gpu->add(c.device, a.device + shift, b.device + shift, COUNT, dtype);
        gpu->copy(got, c.device, COUNT * size);
        check_that(same(got, want, COUNT, dtype), "add %s", ddp_dtype_name(dtype));
        const ddp_tensor wanted = {want, dtype, 1, {COUNT}}, divided = {c.device, dtype, 1, {COUNT}},
                         scaled = {a.device + shift, dtype, 1, {COUNT}};
        for (uint64_t divisor = 0; divisor < 9; divisor++) {
            gpu->copy(c.device, a.device + shift, COUNT * size);
            memcpy(want, a.host + shift, COUNT * size);
            cpu->divide(&wanted, 1, divisor);
            gpu->divide(&divided, 1, divisor);
            gpu->copy(got, c.device, COUNT * size);
            check_that(same(got, want, COUNT, dtype), "divide %s by %d", ddp_dtype_name(dtype), (int)divisor);
        }
        memcpy(want, a.host + shift, COUNT * size);
        cpu->scale(&wanted, 1, 1.3f);
        gpu->scale(&scaled, 1, 1.3f);
        gpu->copy(got, a.device + shift, COUNT * size);
        check_that(same(got, want, COUNT, dtype), "scale %s", ddp_dtype_name(dtype));
        if (dtype == DDP_F32 || dtype == DDP_F64) { /* by a factor in device memory */
            float factor = 0.7f;
            gpu->copy(c.device, &factor, sizeof factor);
            gpu->optimizer->scale(&scaled, 1, (const float *)(const void *)c.device);
            cpu->scale(&wanted, 1, factor);
            gpu->copy(got, a.device + shift, COUNT * size);
            check_that(same(got, want, COUNT, dtype), "scale %s by a factor there", ddp_dtype_name(dtype));
        }
        for (int to = 0; to < 4 && ddp_is_float(dtype); to++) {
            cpu->cast(want, float_dtypes[to], b.host + shift, dtype, COUNT);
            gpu->cast(c.device, float_dtypes[to], b.device + shift, dtype, COUNT);
            gpu->copy(got, c.device, COUNT * ddp_dtype_size(float_dtypes[to]));
            check_that(same(got, want, COUNT, float_dtypes[to]), "cast %s to %s", ddp_dtype_name(dtype),
                       ddp_dtype_name(float_dtypes[to]));
        }
    }
    gpu->fill_zero(c.device + 1, 100);
    gpu->copy(got, c.device + 1, 100);
    memset(want, 0, 100);
    check_that(memcmp(got, want, 100) == 0, "fill_zero");
    check_that(ddp_cuda_check() == DDP_OK, "%s", ddp_last_error());
    free(want);
    free(got);
    buffer_free(&a);
    buffer_free(&b);
    buffer_free(&c);
}

/* 70 ranges in one call, against the CPU: of several lengths, at any address, some of them empty. Bytes
   outside of all ranges stay as they are. */
static void copy_many_case(ddp_dtype to, ddp_dtype from) {
    static const size_t lengths[] = {5, 0, 1, 300, 3, 16385, 64, 17};
    size_t to_size = ddp_dtype_size(to), from_size = ddp_dtype_size(from), to_at = 0, from_at = 0;
    ddp_copy_range near[TENSORS], far[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        size_t count = lengths[i % 8];
        from_at += (size_t)(i % 5);
        to_at += 1 + (size_t)(i % 3) * 8;
        near[i].dst = (void *)to_at;
        near[i].src = (void *)from_at;
        near[i].count = count;
        from_at += count * from_size;
        to_at += count * to_size;
    }
    buffer in = buffer_make(from_at), out = buffer_make(to_at);
    unsigned char *want = (unsigned char *)malloc(out.bytes);
    memset(out.host, 0x5a, out.bytes);
    memset(want, 0x5a, out.bytes);
    for (int i = 0; i < TENSORS; i++) {
        size_t dst = (size_t)near[i].dst, src = (size_t)near[i].src;
        far[i].dst = out.device + dst;
        far[i].src = in.device + src;
        far[i].count = near[i].count;
        near[i].dst = want + dst;
        near[i].src = in.host + src;
        fill(in.host + src, near[i].count, from, 1);
    }
    buffer_up(&in);
    buffer_up(&out);
    ddp_device_cpu()->copy_many(near, TENSORS, to, from);
    gpu->copy_many(far, TENSORS, to, from);
    buffer_down(&out);
    if (to == from) check_that(memcmp(out.host, want, out.bytes) == 0, "copy_many %s", ddp_dtype_name(to));
    for (size_t at = 0, next; at < out.bytes; at = next) { /* a NaN may have other bits after a cast */
        int i = 0;
        next = at + 1;
        while (i < TENSORS && (!near[i].count || (unsigned char *)near[i].dst != want + at)) i++;
        if (i < TENSORS) next = at + near[i].count * to_size;
        check_that(i < TENSORS ? same(out.host + at, want + at, near[i].count, to) : out.host[at] == want[at],
                   "copy_many %s to %s: byte %zu of range %d", ddp_dtype_name(from), ddp_dtype_name(to), at,
                   i);
    }
    free(want);
    buffer_free(&in);
    buffer_free(&out);
}

static void check_copy_many(void) {
    for (size_t d = 0; d < sizeof all_dtypes / sizeof *all_dtypes; d++)
        copy_many_case(all_dtypes[d], all_dtypes[d]);
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            if (a != b) copy_many_case(float_dtypes[a], float_dtypes[b]);
    gpu->copy_many(NULL, 0, DDP_F32, DDP_F32);
    check_that(ddp_cuda_check() == DDP_OK, "%s", ddp_last_error());
    const ddp_copy_range one = {NULL, NULL, 1};
    gpu->copy_many(&one, 1, DDP_F32, DDP_I32);
    check_that(ddp_cuda_check() == DDP_ERR_INVALID
                   && strstr(ddp_last_error(), "ddp_device_cuda copy_many: cannot convert i32 to f32"),
               "%s", ddp_last_error());
}

/* ---- all of them ---- */

static int table_line(const char *name, void (*run)(void)) {
    double start = ddp_now();
    check_failures = check_count = 0;
    run();
    if (ddp_cuda_check() != DDP_OK) check_that(0, "%s", ddp_last_error());
    printf("%-28s %8d checks  %6d failed  %7.2f s\n", name, check_count, check_failures, ddp_now() - start);
    return check_failures != 0;
}

static int kernel_checks(void) {
    int failed = 0;
    gpu = ddp_device_cuda();
    failed += table_line("device table", check_device);
    failed += table_line("tree reduction", check_reduce);
    failed += table_line("tree reduction, strided", check_reduce_strided);
    failed += table_line("flatten, unflatten, cast", check_multi);
    failed += table_line("unscale, sum of squares", check_squares);
    failed += table_line("AdamW, SGD", check_optimizers);
    failed += table_line("optimizers of the table", check_updates);
    failed += table_line("lists of the table", check_update_lists);
    failed += table_line("lists of AdamW, SGD", check_step_lists);
    failed += table_line("clip, trust ratios", check_steer);
    failed += table_line("8-bit blocks", check_quantise);
    failed += table_line("scale, divide, squares", check_tensor_lists);
    failed += table_line("copies of many ranges", check_copy_many);
    return failed;
}

#endif /* DDP_TEST_CUDA_KERNELS_H */

/*  test_tensor.c - tensors of one rank: memory, views, boxes, casts, text, .npy files, placements. Boxes and
    transposes against loops over single elements; every message for bad input; exhausted memory; and all of
    it again on a device whose memory the host cannot access. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#define DDP_TENSOR_IMPLEMENTATION
#include "ddp_tensor.h"
#include "../../examples/extras/npy.h"
#include "random.h"

#include "../support/unit.h"
#include "../support/watchdog.h"
#include <fcntl.h>
#include <math.h>
#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char path[64]; /* of a file that tests may write */

/* File calls of the library, in their order. */
static char file_calls[64];
static void note_file_call(char letter) {
    size_t length = strlen(file_calls);
    if (length + 1 < sizeof file_calls) {
        file_calls[length] = letter;
        file_calls[length + 1] = 0;
    }
}

int fsync(int fd) {
    note_file_call('s');
    return (int)syscall(SYS_fsync, fd);
}
int rename(const char *from, const char *to) {
    note_file_call('r');
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

static void ok(ddp_result result) {
    if (result != DDP_OK) fail_msg("%s: %s", ddp_result_name(result), ddp_last_error());
}

static void says(ddp_result result, ddp_result wanted, const char *text) {
    if (result != wanted || !strstr(ddp_last_error(), text))
        fail_msg("wanted %s \"%s\", have %s \"%s\"", ddp_result_name(wanted), text, ddp_result_name(result),
                 ddp_last_error());
}
#define REFUSED(call, text) says(call, DDP_ERR_INVALID, text)

static ddp_tensor tensor_of(void *data, ddp_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c,
                            int64_t d) {
    ddp_tensor t = DDP_ZERO;
    t.data = data, t.dtype = dtype, t.ndim = ndim;
    t.shape[0] = a, t.shape[1] = b, t.shape[2] = c, t.shape[3] = d;
    return t;
}

//== groups of one rank: on the CPU, on a device, with memory that runs out ==================================

/* Device memory: addresses that the host can neither read nor write. The contents are in another mapping,
   known only to the functions of the device. */
enum { ARENA = 64 << 20 };
static unsigned char *arena_real, *arena_seen;
static size_t arena_used, arena_live;

static unsigned char *real_of(const void *memory) {
    unsigned char *p = (unsigned char *)(uintptr_t)memory;
    return p >= arena_seen && p < arena_seen + ARENA ? arena_real + (p - arena_seen) : p;
}
static ddp_result far_alloc(ddp_group *group, size_t size, void **out) {
    (void)group;
    size = (size + 127) / 64 * 64;
    *out = NULL;
    if (arena_live == 0) arena_used = 0;
    if (size > ARENA - arena_used) return ddp_fail(DDP_ERR_NO_MEMORY, "the device is full");
    *out = arena_seen + arena_used;
    memset(arena_real + arena_used, 0, size);
    arena_used += size;
    arena_live++;
    return DDP_OK;
}
static void far_free(ddp_group *group, void *memory) {
    (void)group;
    if (memory) arena_live--;
}
static void far_copy(void *dst, const void *src, size_t size) { memcpy(real_of(dst), real_of(src), size); }
static void far_copy_many(const ddp_copy_range *ranges, int range_count, ddp_dtype to, ddp_dtype from) {
    for (int i = 0; i < range_count; i++) {
        const ddp_copy_range r = {real_of(ranges[i].dst), real_of(ranges[i].src), ranges[i].count};
        ddp_device_cpu()->copy_many(&r, 1, to, from);
    }
}
static void far_fill_zero(void *dst, size_t size) { memset(real_of(dst), 0, size); }
static void far_cast(void *dst, ddp_dtype to, const void *src, ddp_dtype from, size_t count) {
    ddp_device_cpu()->cast(real_of(dst), to, real_of(src), from, count);
}

static ddp_device far_device;
static ddp_group *near_group, *far_group, *poor_group;

static size_t poor_left, poor_live; /* allocations that are still granted */
static void *poor_alloc(size_t size, void *user) {
    (void)user;
    if (poor_left == 0) return NULL;
    poor_left--;
    poor_live++;
    return malloc(size);
}
static void poor_free(void *memory, void *user) {
    (void)user;
    poor_live--;
    free(memory);
}

static ddp_group *group_of_one(const char *name, const ddp_device *device, int poor) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group;
    desc.init_method = "self://";
    desc.name = name;
    desc.device = device;
    if (poor) desc.alloc_fn = poor_alloc, desc.free_fn = poor_free;
    poor_left = 1000;
    ok(ddp_group_create(&group, &desc));
    return group;
}

static int setup(void **state) {
    int fd = memfd_create("arena", 0);
    (void)state;
    snprintf(path, sizeof path, "/tmp/ddp_test_tensor_%d.npy", (int)getpid());
    if (fd < 0 || ftruncate(fd, ARENA) != 0) return -1;
    arena_real = (unsigned char *)mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    arena_seen = (unsigned char *)mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    close(fd);
    if (arena_real == MAP_FAILED || arena_seen == MAP_FAILED) return -1;
    far_device = *ddp_device_cpu();
    far_device.name = "far";
    far_device.alloc = far_alloc, far_device.free = far_free, far_device.copy = far_copy,
    far_device.fill_zero = far_fill_zero, far_device.cast = far_cast, far_device.copy_many = far_copy_many;
    near_group = group_of_one("near", NULL, 0);
    far_group = group_of_one("far", &far_device, 0);
    poor_group = group_of_one("poor", NULL, 1);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    ddp_group_destroy(near_group);
    ddp_group_destroy(far_group);
    ddp_group_destroy(poor_group);
    return arena_live || poor_live ? -1 : 0;
}

/* A tensor of the group with these bytes; random ones where data is NULL. */
static ddp_tensor with_data(ddp_group *group, ddp_dtype dtype, int ndim, const int64_t *shape,
                            const void *data) {
    ddp_tensor t = DDP_ZERO;
    ok(ddp_tensor_create(group, &t, dtype, ndim, shape));
    size_t bytes = (size_t)ddp_tensor_count(&t) * ddp_dtype_size(dtype);
    if (data)
        memcpy(real_of(t.data), data, bytes);
    else
        for (size_t i = 0; i < bytes; i++) real_of(t.data)[i] = (unsigned char)random_u64();
    return t;
}

static int64_t below(int64_t n) { return (int64_t)(random_u64() % (uint64_t)n); }

//== memory ===================================================================================================

static void create(void **state) {
    static const int64_t shapes[][4] = {{0}, {5}, {3, 4}, {2, 0, 3}, {1, 2, 3, 4}};
    static const int ndims[] = {0, 1, 2, 3, 4};
    ddp_group *groups[] = {NULL, near_group, far_group};
    ddp_tensor t = DDP_ZERO;
    int64_t big[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    (void)state;
    for (int g = 0; g < 3; g++)
        for (int d = DDP_F32; d <= DDP_U64; d++)
            for (int s = 0; s < 5; s++) {
                size_t bytes;
                ok(ddp_tensor_create(groups[g], &t, (ddp_dtype)d, ndims[s], shapes[s]));
                assert_non_null(t.data);
                assert_int_equal(t.dtype, d);
                assert_int_equal(t.ndim, ndims[s]);
                for (int i = 0; i < 8; i++) assert_int_equal(t.shape[i], i < ndims[s] ? shapes[s][i] : 0);
                bytes = (size_t)ddp_tensor_count(&t) * ddp_dtype_size(t.dtype);
                for (size_t i = 0; i < bytes; i++) assert_int_equal(real_of(t.data)[i], 0);
                ddp_tensor_free(groups[g], &t);
                assert_null(t.data);
                assert_int_equal(t.ndim + (int)t.dtype, 0);
                ddp_tensor_free(groups[g], &t);
            }
    ddp_tensor_free(near_group, NULL);
    ok(ddp_tensor_create(near_group, &t, DDP_U8, 8, big));
    ddp_tensor_free(near_group, &t);
    REFUSED(ddp_tensor_create(NULL, NULL, DDP_F32, 0, NULL), "ddp_tensor_create: out is NULL");
    REFUSED(ddp_tensor_create(near_group, &t, DDP_DTYPE_DEFAULT, 1, big),
            "rank 0/1 ddp_tensor_create group=near: out: dtype=0 is invalid");
    REFUSED(ddp_tensor_create(NULL, &t, (ddp_dtype)77, 1, big), "dtype=77");
    REFUSED(ddp_tensor_create(NULL, &t, DDP_F32, -1, big), "ndim=-1; use 0 to 8");
    REFUSED(ddp_tensor_create(NULL, &t, DDP_F32, 9, big), "ndim=9");
    REFUSED(ddp_tensor_create(NULL, &t, DDP_F32, 2, NULL), "shape is NULL");
    big[3] = -2;
    REFUSED(ddp_tensor_create(NULL, &t, DDP_F32, 4, big), "shape[3]=-2; use 0 or more");
    big[3] = INT64_MAX, big[4] = 3;
    REFUSED(ddp_tensor_create(NULL, &t, DDP_U8, 5, big),
            "(1, 1, 1, 9223372036854775807, 3) of u8 does not fit in memory");
    big[4] = 1;
    /* The elements are countable, the bytes are not. */
    REFUSED(ddp_tensor_create(NULL, &t, DDP_F64, 5, big), "does not fit in memory");
    big[3] = INT64_MAX / 8;
    REFUSED(ddp_tensor_create(NULL, &t, DDP_F64, 5, big), "does not fit in memory");
    assert_null(t.data);
}

static void views(void **state) {
    float data[24];
    ddp_tensor t = tensor_of(data, DDP_F32, 3, 2, 3, 4, 0), v = DDP_ZERO,
               empty = tensor_of(data, DDP_F32, 2, 0, 4, 0, 0);
    static const int64_t flat[] = {-1}, two[] = {4, -1}, uneven[] = {5, -1}, both[] = {-1, -1},
                         negative[] = {-2, 12}, none[] = {-1, 0}, six[] = {6, 4};
    (void)state;
    ok(ddp_tensor_view(&t, 1, flat, &v));
    assert_true(v.data == data && v.ndim == 1 && v.shape[0] == 24 && v.dtype == DDP_F32);
    ok(ddp_tensor_view(&t, 2, two, &v));
    assert_true(v.ndim == 2 && v.shape[0] == 4 && v.shape[1] == 6);
    v = t;
    ok(ddp_tensor_view(&v, 2, six, &v)); /* of itself */
    assert_true(v.ndim == 2 && v.shape[0] == 6 && v.shape[1] == 4 && v.shape[2] == 0);
    ok(ddp_tensor_view(&empty, 1, flat + 0, &v));
    assert_int_equal(v.shape[0], 0);
    REFUSED(ddp_tensor_view(&t, 2, uneven, &v), "in is (2, 3, 4), and its 24 elements do not fill (5, -1)");
    REFUSED(ddp_tensor_view(&t, 2, both, &v), "shape[0] and shape[1] are both -1; use -1 once");
    REFUSED(ddp_tensor_view(&t, 2, negative, &v), "do not fill (-2, 12)");
    REFUSED(ddp_tensor_view(&empty, 2, none, &v), "do not fill (-1, 0)");
    REFUSED(ddp_tensor_view(&t, 0, NULL, &v), "do not fill ()");
    REFUSED(ddp_tensor_view(&t, 1, NULL, &v), "shape is NULL");
    REFUSED(ddp_tensor_view(&t, 9, six, &v), "ndim=9");
    REFUSED(ddp_tensor_view(NULL, 1, flat, &v), "in is NULL");
    REFUSED(ddp_tensor_view(&t, 1, flat, NULL), "out is NULL");

    ok(ddp_tensor_slice(&t, 0, 1, 2, &v));
    assert_true(v.data == data + 12 && v.ndim == 3 && v.shape[0] == 1 && v.shape[1] == 3);
    ok(ddp_tensor_slice(&v, 1, 1, 3, &v));
    assert_true(v.data == data + 16 && v.shape[1] == 2 && v.shape[2] == 4);
    ok(ddp_tensor_slice(&t, 0, 2, 2, &v));
    assert_int_equal(ddp_tensor_count(&v), 0);
    REFUSED(ddp_tensor_slice(&t, 1, 0, 1, &v), "in is (2, 3, 4): a slice of dimension 1 is not contiguous, "
                                               "since shape[0] is not 1; use ddp_tensor_copy_box");
    REFUSED(ddp_tensor_slice(&t, 3, 0, 1, &v), "dim=3 is not a dimension of in, which is (2, 3, 4)");
    REFUSED(ddp_tensor_slice(&t, -1, 0, 1, &v), "dim=-1");
    REFUSED(ddp_tensor_slice(&t, 0, 1, 3, &v),
            "entries [1, 3) are outside dimension 0 of in, which is (2, 3, 4)");
    REFUSED(ddp_tensor_slice(&t, 0, 2, 1, &v), "entries [2, 1)");
    REFUSED(ddp_tensor_slice(&t, 0, -1, 1, &v), "entries [-1, 1)");
    REFUSED(ddp_tensor_slice(NULL, 0, 0, 1, &v), "in is NULL");
    REFUSED(ddp_tensor_slice(&t, 0, 0, 1, NULL), "out is NULL");
}

static void copies(void **state) {
    static const double values[] = {0, -0.0, 1, 1.00390625, 1.005859375, -3.0e38, 65504, 1e-8};
    static const int64_t eight[] = {2, 4};
    ddp_group *groups[] = {NULL, near_group, far_group};
    (void)state;
    for (int g = 0; g < 3; g++)
        for (int from = DDP_F32; from <= DDP_U64; from++)
            for (int to = 0; to <= DDP_U64; to++) {
                unsigned char start[64], want[64];
                ddp_tensor in, out = DDP_ZERO;
                ddp_dtype type = to ? (ddp_dtype)to : (ddp_dtype)from;
                if (from < DDP_I8)
                    ddp_device_cpu()->cast(start, (ddp_dtype)from, values, DDP_F64, 8);
                else
                    for (int i = 0; i < 64; i++) start[i] = (unsigned char)random_u64();
                in = with_data(groups[g], (ddp_dtype)from, 2, eight, start);
                out.dtype = (ddp_dtype)to;
                if (type != (ddp_dtype)from && (from >= DDP_I8 || type >= DDP_I8)) {
                    REFUSED(ddp_tensor_copy(groups[g], &in, &out), "only between floating-point dtypes");
                    assert_null(out.data);
                } else {
                    ddp_device_cpu()->cast(want, type, start, (ddp_dtype)from, 8);
                    ok(ddp_tensor_copy(groups[g], &in, &out));
                    assert_true(out.dtype == type && out.ndim == 2 && out.shape[1] == 4
                                && out.data != in.data);
                    assert_memory_equal(real_of(out.data), want, 8 * ddp_dtype_size(type));
                    far_fill_zero(out.data, 8 * ddp_dtype_size(type));
                    ok(ddp_tensor_copy(groups[g], &in, &out)); /* into an existing tensor */
                    assert_memory_equal(real_of(out.data), want, 8 * ddp_dtype_size(type));
                }
                ddp_tensor_free(groups[g], &in);
                ddp_tensor_free(groups[g], &out);
            }
    { /* nearest even, and in place */
        double d[4] = {1.00390625, 1.01171875, 1 + 1.0 / 512, 1e300};
        uint16_t half[4], want[4] = {0x3f80, 0x3f82, 0x3f80, 0x7f80};
        ddp_tensor in = tensor_of(d, DDP_F64, 1, 4, 0, 0, 0), out = tensor_of(half, DDP_BF16, 1, 4, 0, 0, 0),
                   same = in, shifted = in, shorter = out;
        ok(ddp_tensor_copy(NULL, &in, &out));
        assert_memory_equal(half, want, sizeof want);
        ok(ddp_tensor_copy(NULL, &in, &same));
        assert_true(d[1] == 1.01171875);
        shifted.data = d + 1, shifted.shape[0] = 3;
        same.shape[0] = 3;
        REFUSED(ddp_tensor_copy(NULL, &same, &shifted), "in and out overlap");
        shorter.shape[0] = 3;
        REFUSED(ddp_tensor_copy(NULL, &in, &shorter), "out is (3), but the result is (4)");
        shorter.shape[0] = 4, shorter.data = d;
        REFUSED(ddp_tensor_copy(NULL, &in, &shorter), "in and out overlap"); /* another size of elements */
        REFUSED(ddp_tensor_copy(NULL, NULL, &out), "in is NULL");
        REFUSED(ddp_tensor_copy(NULL, &in, NULL), "out is NULL");
        in.data = NULL;
        REFUSED(ddp_tensor_copy(NULL, &in, &out), "in: data is NULL");
    }
}

//== boxes ====================================================================================================

/* Element by element. */
static void box_by_hand(const ddp_tensor *in, const int64_t *from, ddp_tensor *out, const int64_t *to,
                        const int64_t *extent) {
    size_t size = ddp_dtype_size(in->dtype);
    int64_t total = 1;
    for (int i = 0; i < in->ndim; i++) total *= extent[i];
    for (int64_t n = 0; n < total; n++) {
        int64_t left = n, index[8], a = 0, b = 0;
        for (int i = in->ndim - 1; i >= 0; i--) index[i] = left % extent[i], left /= extent[i];
        for (int i = 0; i < in->ndim; i++)
            a = a * in->shape[i] + from[i] + index[i], b = b * out->shape[i] + to[i] + index[i];
        memcpy(real_of(out->data) + (size_t)b * size, real_of(in->data) + (size_t)a * size, size);
    }
}

static void boxes(void **state) {
    static const ddp_dtype dtypes[] = {DDP_U8, DDP_BF16, DDP_F32, DDP_F64};
    (void)state;
    for (int round = 0; round < 600; round++) {
        ddp_group *group = round % 3 == 0 ? NULL : round % 3 == 1 ? near_group : far_group;
        ddp_dtype dtype = dtypes[below(4)];
        int ndim = (int)below(7), long_rows = round % 7 == 0;
        int64_t a[8], b[8], from[8], to[8], extent[8];
        for (int i = 0; i < ndim; i++) {
            extent[i] = below(5) ? 1 + below(i == ndim - 1 && long_rows ? 1500 : 4) : round % 11 ? 1 : 0;
            from[i] = below(2) ? 0 : below(3), to[i] = below(2) ? 0 : below(3);
            a[i] = from[i] + extent[i] + (below(2) ? 0 : below(3));
            b[i] = to[i] + extent[i] + (below(2) ? 0 : below(3));
        }
        ddp_tensor in = with_data(group, dtype, ndim, a, NULL), out = with_data(group, dtype, ndim, b, NULL),
                   want = DDP_ZERO;
        ok(ddp_tensor_copy(group, &out, &want));
        box_by_hand(&in, from, &want, to, extent);
        ok(ddp_tensor_copy_box(group, &in, from, &out, to, extent));
        assert_memory_equal(real_of(out.data), real_of(want.data),
                            (size_t)ddp_tensor_count(&out) * ddp_dtype_size(dtype));
        ddp_tensor_free(group, &in);
        ddp_tensor_free(group, &out);
        ddp_tensor_free(group, &want);
    }
    {
        float data[12] = {0}, other[12] = {0};
        ddp_tensor in = tensor_of(data, DDP_F32, 2, 3, 4, 0, 0),
                   out = tensor_of(other, DDP_F32, 2, 4, 3, 0, 0);
        ddp_tensor flat = tensor_of(other, DDP_F32, 1, 12, 0, 0, 0),
                   f64 = tensor_of(other, DDP_F64, 2, 2, 3, 0, 0);
        int64_t extent[2] = {2, 3}, at[2] = {2, 0}, negative[2] = {-1, 0}, huge[2] = {INT64_MAX, 0};
        ok(ddp_tensor_copy_box(NULL, &in, NULL, &out, NULL, extent));
        REFUSED(ddp_tensor_copy_box(NULL, &in, at, &out, NULL, extent),
                "the box of (2, 3) at offset (2, 0) is outside in, which is (3, 4)");
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &out, at + 0, huge),
                "the box of (9223372036854775807, 0) at offset (0, 0) is outside in");
        extent[1] = 4;
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &out, NULL, extent),
                "the box of (2, 4) at offset (0, 0) is outside out, which is (4, 3)");
        extent[1] = -1;
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &out, NULL, extent), "the box of (2, -1)");
        extent[1] = 3;
        REFUSED(ddp_tensor_copy_box(NULL, &in, negative, &out, NULL, extent), "at offset (-1, 0)");
        REFUSED(ddp_tensor_copy_box(NULL, &in, huge, &out, NULL, extent),
                "at offset (9223372036854775807, 0)");
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &out, NULL, NULL), "extent is NULL");
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &flat, NULL, extent),
                "in is (3, 4), but out is (12); give both the same number of dimensions");
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &f64, NULL, extent),
                "in is f32, but out is f64; give both the same dtype");
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &in, NULL, extent), "in and out overlap");
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, NULL, NULL, extent), "out is NULL");
        out.data = NULL;
        REFUSED(ddp_tensor_copy_box(NULL, &in, NULL, &out, NULL, extent), "out: data is NULL");
    }
}

static void transposes(void **state) {
    static const ddp_dtype dtypes[] = {DDP_I8, DDP_F16, DDP_I32, DDP_U64};
    (void)state;
    for (int round = 0; round < 400; round++) {
        ddp_group *group = round % 2 ? near_group : far_group;
        ddp_dtype dtype = dtypes[below(4)];
        size_t size = ddp_dtype_size(dtype);
        int ndim = (int)below(6), order[8];
        int64_t shape[8];
        ddp_tensor out = DDP_ZERO;
        for (int i = 0; i < ndim; i++)
            shape[i] = below(40) == 0 ? 0 : 1 + below(ndim < 3 ? 100 : 7), order[i] = i;
        for (int i = ndim - 1; i > 0; i--) {
            int j = (int)below(i + 1), keep = order[i];
            order[i] = order[j], order[j] = keep;
        }
        ddp_tensor in = with_data(group, dtype, ndim, shape, NULL);
        ok(ddp_tensor_transpose(group, &in, order, &out));
        for (int i = 0; i < ndim; i++) assert_int_equal(out.shape[i], shape[order[i]]);
        for (int64_t n = 0; n < ddp_tensor_count(&out); n++) {
            int64_t left = n, index[8], at = 0;
            for (int i = ndim - 1; i >= 0; i--) index[order[i]] = left % out.shape[i], left /= out.shape[i];
            for (int i = 0; i < ndim; i++) at = at * shape[i] + index[i];
            assert_memory_equal(real_of(out.data) + (size_t)n * size, real_of(in.data) + (size_t)at * size,
                                size);
        }
        ddp_tensor_free(group, &in);
        ddp_tensor_free(group, &out);
    }
    {
        float data[12], other[12];
        ddp_tensor in = tensor_of(data, DDP_F32, 2, 3, 4, 0, 0), out = in;
        int twice[2] = {1, 1}, beyond[2] = {0, 2}, swap[2] = {1, 0};
        REFUSED(ddp_tensor_transpose(NULL, &in, twice, &out),
                "order[1]=1; use each dimension from 0 to 1 once");
        REFUSED(ddp_tensor_transpose(NULL, &in, beyond, &out), "order[1]=2");
        REFUSED(ddp_tensor_transpose(NULL, &in, NULL, &out), "order is NULL");
        REFUSED(ddp_tensor_transpose(NULL, &in, swap, NULL), "out is NULL");
        REFUSED(ddp_tensor_transpose(NULL, &in, swap, &out), "out is (3, 4), but the result is (4, 3)");
        out = tensor_of(data, DDP_F32, 2, 4, 3, 0, 0);
        REFUSED(ddp_tensor_transpose(NULL, &in, swap, &out), "in and out overlap");
        out = tensor_of(other, DDP_I32, 2, 4, 3, 0, 0);
        REFUSED(ddp_tensor_transpose(NULL, &in, swap, &out), "out is i32, but the result is f32");
    }
}

/* Entries of a tensor without elements can be of any size: their addresses are never computed. */
static void vast_and_empty(void **state) {
    static const int order[3] = {0, 2, 1};
    static const int64_t offset[3] = {0, INT64_C(1) << 39, 1}, extent[3] = {0, 5, 6};
    ddp_tensor in = tensor_of(NULL, DDP_F64, 3, 0, INT64_C(1) << 40, INT64_C(1) << 41, 0), out = DDP_ZERO;
    (void)state;
    ok(ddp_tensor_transpose(NULL, &in, order, &out));
    assert_true(out.shape[0] == 0 && out.shape[1] == INT64_C(1) << 41 && out.shape[2] == INT64_C(1) << 40);
    ddp_tensor_free(NULL, &out);
    out = in;
    ok(ddp_tensor_copy_box(NULL, &in, offset, &out, offset, extent));
    ddp_tensor_free(NULL, &out);
}

static void fills(void **state) {
    static const double some[] = {0, 1, -1.5, -0.0, 1e30},
                        bounds[5][2] = {
                            {-128, 127},
                            {0, 255},
                            {-2147483648.0, 2147483647.0},
                            {-9223372036854775808.0, 9223372036854774784.0},
                            {0, 18446744073709549568.0},
                        };
    ddp_group *groups[] = {NULL, near_group, far_group};
    static const int64_t large[] = {300, 1001};
    char text[80];
    (void)state;
    for (int g = 0; g < 3; g++)
        for (int d = DDP_F32; d <= DDP_U64; d++) {
            ddp_tensor t = with_data(groups[g], (ddp_dtype)d, 2, large, NULL);
            size_t size = ddp_dtype_size(t.dtype);
            for (int v = 0; v < (d < DDP_I8 ? 5 : 2); v++) {
                double value = d < DDP_I8 ? some[v] : bounds[d - DDP_I8][v];
                unsigned char one[8];
                if (d < DDP_I8)
                    ddp_device_cpu()->cast(one, (ddp_dtype)d, &value, DDP_F64, 1);
                else if (d == DDP_U64) {
                    uint64_t n = (uint64_t)value;
                    memcpy(one, &n, 8);
                }
                /* little-endian: the low bytes come first. */
                else {
                    int64_t n = (int64_t)value;
                    memcpy(one, &n, 8);
                }
                ok(ddp_tensor_fill(groups[g], &t, value));
                for (size_t i = 0; i < (size_t)ddp_tensor_count(&t); i++)
                    if (memcmp(real_of(t.data) + i * size, one, size) != 0)
                        fail_msg("element %zu of %s", i, ddp_dtype_name(t.dtype));
            }
            if (d >= DDP_I8) {
                double wrong[] = {0.5,
                                  (double)NAN,
                                  bounds[d - DDP_I8][0] * 2 - 1,
                                  bounds[d - DDP_I8][1] * 2,
                                  (double)INFINITY,
                                  0};
                if (d == DDP_I64) wrong[2] = -1e19;
                /* The first that is too large. */
                wrong[5] = ldexp(1, (int)(8 * size) - (d != DDP_U8 && d != DDP_U64));
                for (int i = 0; i < 6; i++)
                    REFUSED(ddp_tensor_fill(groups[g], &t, wrong[i]), ddp_dtype_name(t.dtype));
            }
            ddp_tensor_free(groups[g], &t);
        }
    {
        static const int64_t none[] = {0};
        ddp_tensor empty = DDP_ZERO;
        ok(ddp_tensor_create(far_group, &empty, DDP_F32, 1, none));
        ok(ddp_tensor_fill(far_group, &empty, 3));
        ddp_tensor_free(far_group, &empty);
    }
    REFUSED(ddp_tensor_fill(NULL, NULL, 0), "tensor is NULL");
    snprintf(text, sizeof text, "value=%.17g", 1e300);
    {
        int8_t b;
        ddp_tensor t = tensor_of(&b, DDP_I8, 0, 0, 0, 0, 0);
        REFUSED(ddp_tensor_fill(NULL, &t, 1e300), text);
    }
}

//== text =====================================================================================================

static void printed(ddp_group *group, const ddp_tensor *t, ddp_placement placement, const char *want) {
    char text[2048];
    size_t need = 0, room;
    ok(ddp_tensor_print(group, t, placement, NULL, &need));
    room = need;
    ok(ddp_tensor_print(group, t, placement, text, &room));
    assert_string_equal(text, want);
    assert_true(room == need && need == strlen(want) + 1);
    room = need - 1;
    REFUSED(ddp_tensor_print(group, t, placement, text, &room), "is too small");
    assert_int_equal(room, need);
}

static void text(void **state) {
    double d[] = {1.5, -2, 1.0 / 3, 1e10, (double)INFINITY, 0};
    int8_t small[40];
    uint64_t large[1] = {UINT64_MAX};
    ddp_tensor t;
    static const int64_t cube[] = {2, 1, 5, 9};
    size_t room = 1;
    (void)state;
    for (int i = 0; i < 40; i++) small[i] = (int8_t)(i - 20);
    t = tensor_of(d, DDP_F64, 2, 2, 3, 0, 0);
    printed(
        NULL, &t, DDP_REPLICATE,
        "f64 (2, 3) REPLICATE\n         1.5          -2     0.33333\n       1e+10         inf           0\n");
    t = tensor_of(d, DDP_F64, 0, 0, 0, 0, 0);
    printed(near_group, &t, DDP_PARTIAL, "f64 () PARTIAL\n         1.5\n");
    t = tensor_of(small, DDP_I8, 1, 9, 0, 0, 0);
    printed(NULL, &t, DDP_SHARD(0),
            "i8 (9) SHARD(0)\n         -20         -19         -18         -17         -16         -15       "
            "  -14         -13 ...\n");
    t = tensor_of(small, DDP_U8, 2, 5, 1, 0, 0);
    printed(NULL, &t, DDP_SHARD(1),
            "u8 (5, 1) SHARD(1)\n         236\n         237\n         238\n         239\n         ...\n");
    t = tensor_of(large, DDP_U64, 1, 1, 0, 0, 0);
    printed(NULL, &t, DDP_REPLICATE, "u64 (1) REPLICATE\n 18446744073709551615\n");
    t = tensor_of(NULL, DDP_BF16, 3, 2, 0, 4, 0);
    printed(NULL, &t, DDP_REPLICATE, "bf16 (2, 0, 4) REPLICATE\n  no elements\n");
    {
        int64_t *n = (int64_t *)calloc(90, sizeof *n);
        ddp_tensor far;
        for (int i = 0; i < 90; i++) n[i] = 1000 - i;
        far = with_data(far_group, DDP_I64, 4, cube, n);
        printed(far_group, &far, DDP_SHARD(3),
                "i64 (2, 1, 5, 9) SHARD(3)\n  at [0, 0, :4, :8]\n"
                "        1000         999         998         997         996         995         994        "
                " 993 ...\n"
                "         991         990         989         988         987         986         985        "
                " 984 ...\n"
                "         982         981         980         979         978         977         976        "
                " 975 ...\n"
                "         973         972         971         970         969         968         967        "
                " 966 ...\n"
                "         ...\n");
        ddp_tensor_free(far_group, &far);
        free(n);
    }
    t = tensor_of(small, DDP_I8, 1, 4, 0, 0, 0);
    REFUSED(ddp_tensor_print(NULL, &t, DDP_SHARD(1), NULL, &room),
            "SHARD(1) is invalid for a tensor of shape (4)");
    REFUSED(ddp_tensor_print(NULL, &t, (ddp_placement)-2, NULL, &room),
            "unknown placement (-2) is invalid for a tensor of shape (4)");
    REFUSED(ddp_tensor_print(NULL, &t, 0, NULL, NULL), "size_bytes is NULL");
    REFUSED(ddp_tensor_print(NULL, NULL, 0, NULL, &room), "tensor is NULL");
}

//== .npy files ===============================================================================================

static void write_file(const void *data, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    fclose(file);
}

/* A file with this header, in a given version, with this many bytes of values. */
static size_t npy_file(unsigned char out[4096], int version, const char *header, size_t values) {
    size_t length = strlen(header), at = version == 1 ? 10 : 12;
    memcpy(out, "\x93NUMPY", 6);
    out[6] = (unsigned char)version, out[7] = 0;
    out[8] = (unsigned char)length, out[9] = (unsigned char)(length >> 8), out[10] = out[11] = 0;
    memcpy(out + at, header, length);
    for (size_t i = 0; i < values; i++) out[at + length + i] = (unsigned char)i;
    return at + length + values;
}

static void npy_there_and_back(void **state) {
    static const int64_t shapes[][4] = {{0}, {5}, {3, 4}, {2, 0, 3}, {300, 7, 130, 1}};
    ddp_group *groups[] = {NULL, near_group, far_group};
    (void)state;
    for (int g = 0; g < 3; g++)
        for (int d = DDP_F32; d <= DDP_U64; d++)
            for (int s = 0; s < 5; s++) {
                ddp_tensor t, back = DDP_ZERO;
                size_t bytes;
                if (s == 4 && d != DDP_F64) continue; /* two megabytes: in pieces */
                t = with_data(groups[g], (ddp_dtype)d, s, shapes[s], NULL);
                bytes = (size_t)ddp_tensor_count(&t) * ddp_dtype_size(t.dtype);
                ok(npy_save(groups[g], &t, path));
                if (d == DDP_BF16) {
                    says(npy_load(groups[g], path, &back), DDP_ERR_UNSUPPORTED,
                         "its elements are '<u2', which is not a ddp_dtype; to load bf16, set out->dtype to "
                         "DDP_BF16");
                    assert_null(back.data);
                    back.dtype = DDP_BF16;
                }
                ok(npy_load(groups[g], path, &back));
                assert_memory_equal(back.shape, t.shape, sizeof t.shape);
                assert_true(back.dtype == t.dtype && back.ndim == t.ndim);
                assert_memory_equal(real_of(back.data), real_of(t.data), bytes);
                if (bytes) real_of(back.data)[0] ^= 255;
                ok(npy_load(groups[g], path, &back)); /* into an existing tensor */
                assert_memory_equal(real_of(back.data), real_of(t.data), bytes);
                ddp_tensor_free(groups[g], &t);
                ddp_tensor_free(groups[g], &back);
            }
    unlink(path);
}

static void npy_as_others_write(void **state) {
    static const struct {
        int version;
        const char *header;
        ddp_dtype dtype;
        int ndim;
        int64_t shape[2];
    } good[] = {
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n", DDP_F32, 2, {3, 4}},
        {2, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n", DDP_F32, 2, {3, 4}},
        {3, "  {\"shape\":(2L,),\"fortran_order\":False,\"descr\":\"<i4\"}", DDP_I32, 1, {2, 0}},
        /* Both orders at once. */
        {1, "{'descr': '|u1', 'fortran_order': True, 'shape': (1, 9)}   \n", DDP_U8, 2, {1, 9}},
        {1, "{'descr': '<f2', 'fortran_order': False, 'shape': ( ) , }", DDP_F16, 0, {0, 0}},
    };
    unsigned char file[4096];
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        ddp_tensor t = DDP_ZERO;
        size_t size = npy_file(file, good[i].version, good[i].header, 60);
        write_file(file, size);
        ok(npy_load(NULL, path, &t));
        assert_true(t.dtype == good[i].dtype && t.ndim == good[i].ndim && t.shape[0] == good[i].shape[0]
                    && t.shape[1] == good[i].shape[1]);
        for (int64_t n = 0; n < ddp_tensor_count(&t) * (int64_t)ddp_dtype_size(t.dtype); n++)
            assert_int_equal(((unsigned char *)t.data)[n], n);
        ddp_tensor_free(NULL, &t);
    }
    unlink(path);
}

static void npy_damaged(void **state) {
    static const struct {
        int version;
        const char *header;
        size_t values;
        ddp_result result;
        const char *says;
    } bad[] = {
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }", 47, DDP_ERR_CORRUPT,
         " ends at byte 116, but (3, 4) of f32 from byte 69 on needs 1 more"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }", 0, DDP_ERR_CORRUPT,
         "needs 48 more"},
        {1, "{'descr': '<f4', 'fortran_order': True, 'shape': (3, 4), }", 48, DDP_ERR_UNSUPPORTED,
         "(3, 4) in Fortran order; save numpy.ascontiguousarray of it"},
        {1, "{'descr': '>f4', 'fortran_order': False, 'shape': (3, 4), }", 48, DDP_ERR_UNSUPPORTED,
         "its elements are '>f4', which is not a ddp_dtype"},
        {1, "{'descr': '<c16', 'fortran_order': False, 'shape': (1,), }", 48, DDP_ERR_UNSUPPORTED,
         "its elements are '<c16'"},
        {1, "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", 48, DDP_ERR_UNSUPPORTED,
         "its elements are '|O'"},
        {1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", 48, DDP_ERR_UNSUPPORTED,
         "its elements are records"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1), }", 48,
         DDP_ERR_UNSUPPORTED, "has 9 dimensions, more than 8"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 48,
         DDP_ERR_CORRUPT, "a shape of (4294967296, 4294967296) does not fit in memory"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }", 48, DDP_ERR_CORRUPT,
         "needs 4398046511056 more"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", 48,
         DDP_ERR_CORRUPT, "at byte 61 there should be an entry of a shape below 2^63"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", 48, DDP_ERR_CORRUPT,
         "at byte 61 there should be an entry of a shape, which is a number"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3), }", 48, DDP_ERR_CORRUPT,
         "at byte 62 there should be a comma after an entry of a shape"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3 4), }", 48, DDP_ERR_CORRUPT,
         "a comma after an entry"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': 3, }", 48, DDP_ERR_CORRUPT,
         "at byte 60 there should be the ( of a shape"},
        {1, "{'descr': '<f4', 'fortran_order': 0, 'shape': (3,), }", 48, DDP_ERR_CORRUPT,
         "there should be True or False"},
        {1, "{'descr': 4, 'fortran_order': False, 'shape': (3,), }", 48, DDP_ERR_CORRUPT,
         "there should be a dtype in quotes"},
        {1, "{'descr': 'a dtype of too many letters', 'fortran_order': False, 'shape': (3,), }", 48,
         DDP_ERR_CORRUPT, "there should be a dtype in quotes"},
        {1, "{'descr': '<f4", 48, DDP_ERR_CORRUPT, "there should be a dtype in quotes"},
        {1, "{'descr': '<f4', 'fortran_order': False, }", 48, DDP_ERR_CORRUPT, "its header has no 'shape'"},
        {1, "{}", 48, DDP_ERR_CORRUPT, "its header has no 'descr'"},
        {1, "{'descr': '<f4', 'descr': '<f4', 'shape': (3,), }", 48, DDP_ERR_CORRUPT,
         "at byte 27 there should be 'descr', 'fortran_order' or 'shape', each once"},
        {1, "{'order': '<f4' }", 48, DDP_ERR_CORRUPT, "each once"},
        {1, "{'descr' '<f4' }", 48, DDP_ERR_CORRUPT, "there should be a colon"},
        {1, "{'descr': '<f4' 'shape': (3,) }", 48, DDP_ERR_CORRUPT, "a comma or the } of the header"},
        {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), } x", 48, DDP_ERR_CORRUPT,
         "spaces up to the end of the header"},
        {1, "'descr'", 48, DDP_ERR_CORRUPT, "at byte 10 there should be the { of a header"},
        {1, "", 48, DDP_ERR_CORRUPT, "the { of a header"},
        {4, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", 48, DDP_ERR_UNSUPPORTED,
         "version 4.0 of the format"},
        {0, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", 48, DDP_ERR_UNSUPPORTED,
         "version 0.0 of the format"},
    };
    unsigned char file[4096];
    ddp_tensor t = DDP_ZERO, kept;
    float data[12];
    size_t size;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        size = npy_file(file, bad[i].version, bad[i].header, bad[i].values);
        write_file(file, size);
        says(npy_load(NULL, path, &t), bad[i].result, bad[i].says);
        assert_non_null(strstr(ddp_last_error(), path));
        assert_null(t.data);
    }
    size = npy_file(file, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n", 48);
    for (size_t cut = 0; cut < size; cut++) { /* at every byte */
        write_file(file, cut);
        says(npy_load(near_group, path, &t), DDP_ERR_CORRUPT,
             cut < 6 ? "at byte 0 there should be \\x93NUMPY" : "ends at byte");
        assert_non_null(strstr(ddp_last_error(), "rank 0/1 npy_load group=near: "));
    }
    file[8] = 255, file[9] = 255;
    write_file(file, size);
    says(npy_load(NULL, path, &t), DDP_ERR_CORRUPT, "inside its header of 65545 bytes");
    file[6] = 2, file[10] = file[11] = 255;
    write_file(file, size);
    says(npy_load(NULL, path, &t), DDP_ERR_CORRUPT, "inside its header of 4294967307 bytes");
    size = npy_file(file, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n", 48);
    write_file(file, size);
    kept = tensor_of(data, DDP_F32, 1, 12, 0, 0, 0);
    REFUSED(npy_load(NULL, path, &kept), "out is (12,), but ");
    kept = tensor_of(data, DDP_F64, 2, 3, 4, 0, 0);
    REFUSED(npy_load(NULL, path, &kept), "its elements are f32, but out->dtype is f64");
    unlink(path);
    says(npy_load(NULL, path, &t), DDP_ERR_SYSTEM, "No such file");
    REFUSED(npy_load(NULL, "/tmp", &t), "/tmp is not a regular file");
    REFUSED(npy_load(NULL, NULL, &t), "path is NULL");
    REFUSED(npy_load(NULL, path, NULL), "out is NULL");
    kept = tensor_of(data, DDP_F32, 1, 12, 0, 0, 0);
    for (int i = 0; i < 1000; i++) { /* files that a process of the same number left when it was killed */
        char left[128];
        int fd = (snprintf(left, sizeof left, "%s.%d.%d.tmp", path, (int)getpid(), i),
                  open(left, O_WRONLY | O_CREAT, 0600));
        assert_true(fd >= 0);
        close(fd);
    }
    ok(npy_save(NULL, &kept, path));
    for (int i = 0; i < 1000; i++) {
        char left[128];
        snprintf(left, sizeof left, "%s.%d.%d.tmp", path, (int)getpid(), i);
        assert_int_equal(unlink(left), 0);
    }
    unlink(path);
    memset(data, 0, sizeof data);
    says(npy_save(NULL, &kept, "/tmp/ddp_no_such_folder/x.npy"), DDP_ERR_SYSTEM,
         "creating /tmp/ddp_no_such_folder/x.npy");
    says(npy_save(NULL, &kept, "/tmp"), DDP_ERR_SYSTEM, "renaming to /tmp: Is a directory");
    if (access("/dev/full", W_OK) == 0)
        says(npy_load(NULL, "/dev/full", &t), DDP_ERR_INVALID, "/dev/full is not a regular file");
    REFUSED(npy_save(NULL, &kept, NULL), "path is NULL");
    REFUSED(npy_save(NULL, NULL, path), "tensor is NULL");
    kept.dtype = (ddp_dtype)77;
    REFUSED(npy_save(NULL, &kept, path), "dtype=77 is invalid; use DDP_F32 to DDP_U64");
    kept = tensor_of(data, DDP_F32, 9, 12, 1, 1, 1);
    REFUSED(npy_save(NULL, &kept, path), "ndim=9 and shape are invalid");
    kept = tensor_of(data, DDP_F32, 1, -12, 0, 0, 0);
    REFUSED(npy_save(NULL, &kept, path), "ndim=1 and shape are invalid");
    kept = tensor_of(NULL, DDP_F32, 1, 12, 0, 0, 0);
    REFUSED(npy_save(NULL, &kept, path), "data is NULL");
    kept = tensor_of(data, DDP_F32, 1, 12, 0, 0, 0);
    {
        char *far_away = (char *)malloc(5000);
        memset(far_away, 'x', 4999), far_away[4999] = 0;
        REFUSED(npy_save(NULL, &kept, far_away), "path has more than");
        free(far_away);
    }
}

/* A file gets its name after its bytes are on the disk. A save that fails leaves no other file in the
   folder. */
static void npy_is_whole_or_not_there(void **state) {
    char folder[64], inside[96];
    float data[4] = {1, 2, 3, 4};
    ddp_tensor t = tensor_of(data, DDP_F32, 2, 2, 2, 0, 0);
    struct dirent *entry;
    int entries = 0;
    DIR *list;
    (void)state;
    file_calls[0] = 0;
    ok(npy_save(NULL, &t, path));
    assert_string_equal(file_calls, "sr");
    unlink(path);

    snprintf(folder, sizeof folder, "/tmp/ddp_test_npy_folder_%d", (int)getpid());
    snprintf(inside, sizeof inside, "%s/name.npy", folder);
    assert_int_equal(mkdir(folder, 0700), 0);
    assert_int_equal(mkdir(inside, 0700), 0); /* a folder of that name: the rename fails */
    says(npy_save(NULL, &t, inside), DDP_ERR_SYSTEM, "renaming to");
    list = opendir(folder);
    assert_non_null(list);
    while ((entry = readdir(list)) != NULL) entries += entry->d_name[0] != '.';
    closedir(list);
    assert_int_equal(entries, 1);
    assert_int_equal(rmdir(inside), 0);
    assert_int_equal(rmdir(folder), 0);
}

//== placements ===============================================================================================

static void placements(void **state) {
    ddp_tensor_box box;
    int64_t shape[4] = {5, 3, 0, 7}, far_away[1] = {INT64_MAX / 4}, wrong[1] = {-1};
    const char *first = ddp_placement_name(DDP_SHARD(3));
    (void)state;
    assert_string_equal(ddp_placement_name(DDP_REPLICATE), "REPLICATE");
    assert_string_equal(ddp_placement_name(DDP_PARTIAL), "PARTIAL");
    assert_string_equal(ddp_placement_name(DDP_SHARD(0)), "SHARD(0)");
    assert_string_equal(first, "SHARD(3)");
    assert_string_equal(ddp_placement_name((ddp_placement)INT32_MIN), "unknown placement (-2147483648)");
    for (int w = 1; w <= 9; w++)
        for (int64_t n = 0; n <= 20; n++) { /* successive pieces of ceil(n / w) */
            int64_t each = (n + w - 1) / w, next = 0;
            for (int r = 0; r < w; r++) {
                shape[0] = n;
                ok(ddp_placement_shard_box(DDP_SHARD(0), 2, shape, r, w, &box));
                assert_int_equal(box.offset[0], next);
                assert_int_equal(box.shape[0], next + each <= n ? each : n - next);
                assert_true(box.ndim == 2 && box.shape[1] == 3 && box.offset[1] == 0
                            && box.global_shape[0] == n && box.global_shape[1] == 3);
                next += box.shape[0];
            }
            assert_int_equal(next, n);
        }
    ok(ddp_placement_shard_box(DDP_SHARD(0), 1, far_away, 2, 3, &box));
    assert_true(box.offset[0] + box.shape[0] == INT64_MAX / 4);
    REFUSED(ddp_placement_shard_box(DDP_SHARD(0), 1, wrong, 0, 1, &box), "shape[0]=-1; use 0 or more");
    REFUSED(ddp_placement_shard_box(DDP_SHARD(2), 2, shape, 0, 1, &box),
            "SHARD(2) is invalid for a tensor of shape (20, 3)");
    REFUSED(ddp_placement_shard_box(DDP_SHARD(0), 0, NULL, 0, 1, &box),
            "SHARD(0) is invalid for a tensor of shape ()");
    REFUSED(ddp_placement_shard_box(DDP_PARTIAL, 9, shape, 0, 1, &box), "ndim=9");
    REFUSED(ddp_placement_shard_box(DDP_PARTIAL, 2, NULL, 0, 1, &box), "global_shape is NULL");
    REFUSED(ddp_placement_shard_box(DDP_PARTIAL, 2, shape, 3, 3, &box), "rank=3 with world_size=3");
    REFUSED(ddp_placement_shard_box(DDP_PARTIAL, 2, shape, 0, 0, &box), "rank=0 with world_size=0");
    REFUSED(ddp_placement_shard_box(DDP_PARTIAL, 2, shape, 0, 1, NULL), "box is NULL");
}

static void one_rank(void **state) { /* a group of one: everything is the same tensor */
    static const ddp_placement all[] = {DDP_REPLICATE, DDP_PARTIAL, DDP_SHARD(0), DDP_SHARD(1)};
    static const int64_t shape[] = {3, 4};
    ddp_group *groups[] = {near_group, far_group};
    ddp_tensor none = DDP_ZERO;
    (void)state;
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < 16; i++) {
            ddp_tensor whole = with_data(groups[g], DDP_F32, 2, shape, NULL), part = DDP_ZERO,
                       out = tensor_of(NULL, (ddp_dtype)0, 2, 3, 4, 0, 0), back = DDP_ZERO;
            ddp_tensor_plan plan;
            ok(ddp_tensor_shard(groups[g], &whole, all[i / 4], &part));
            ok(ddp_tensor_redistribute_plan(groups[g], &part, all[i / 4], all[i % 4], &out, &plan));
            assert_string_equal(plan.collective, "copy");
            assert_true(plan.sent_bytes == 0 && plan.workspace_bytes == 0);
            ok(ddp_tensor_redistribute(groups[g], &part, all[i / 4], all[i % 4], &out));
            assert_memory_equal(real_of(out.data), real_of(whole.data), 48);
            ok(ddp_tensor_redistribute_plan(groups[g], &out, all[i / 4], all[i % 4], &out, &plan));
            assert_string_equal(plan.collective, "none");
            ok(ddp_tensor_redistribute(groups[g], &out, all[i / 4], all[i % 4], &out));
            ok(ddp_tensor_gather(groups[g], &out, all[i % 4], shape, 0, &back));
            assert_memory_equal(real_of(back.data), real_of(whole.data), 48);
            ddp_tensor_free(groups[g], &part);
            ok(ddp_tensor_distribute(groups[g], &back, 0, all[i / 4], &part));
            assert_memory_equal(real_of(part.data), real_of(whole.data), 48);
            ddp_tensor_free(groups[g], &whole);
            ddp_tensor_free(groups[g], &part);
            ddp_tensor_free(groups[g], &out);
            ddp_tensor_free(groups[g], &back);
        }
    {
        float data[12] = {0};
        ddp_tensor in = tensor_of(data, DDP_F32, 2, 3, 4, 0, 0),
                   out = tensor_of(NULL, DDP_F32, 2, 3, 5, 0, 0), half = in;
        ddp_tensor_plan plan;
        ok(ddp_tensor_shard(NULL, &in, DDP_SHARD(1), &none));
        ddp_tensor_free(NULL, &none);
        REFUSED(ddp_tensor_redistribute(NULL, &in, 0, 0, &out), "group is NULL");
        REFUSED(ddp_tensor_redistribute(near_group, NULL, 0, 0, &out), "in is NULL");
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, 0, NULL), "out is NULL");
        out.ndim = -1;
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, 0, &out), "out: ndim=-1");
        out.ndim = 2;
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, 0, &out),
                "in is (3, 4) and out is (3, 5), both with placement REPLICATE; give both the same shape");
        REFUSED(ddp_tensor_redistribute(near_group, &in, DDP_PARTIAL, DDP_REPLICATE, &out),
                "out is (3, 5), but REPLICATE of (3, 4) on rank 0 of 1 is (3, 4)");
        REFUSED(ddp_tensor_redistribute(near_group, &in, DDP_SHARD(1), DDP_REPLICATE, &out),
                "in is (3, 4), but SHARD(1) of (3, 5) on rank 0 of 1 is (3, 5)");
        REFUSED(ddp_tensor_redistribute(near_group, &in, DDP_SHARD(2), 0, &out),
                "SHARD(2) is invalid for a tensor of shape (3, 4)");
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, (ddp_placement)-7, &out),
                "unknown placement (-7) is invalid for a tensor of shape (3, 4)");
        out.dtype = DDP_I32;
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, 0, &out),
                "in is f32, but out is i32; give both the same dtype");
        out.dtype = DDP_F32, out.ndim = 1;
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, 0, &out),
                "in is (3, 4), but out is (3); give both the same number of dimensions");
        half.data = data + 1;
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, 0, &half),
                "in and out overlap, but REPLICATE to REPLICATE has no in-place form; use separate memory");
        in.data = NULL;
        REFUSED(ddp_tensor_redistribute(near_group, &in, 0, 0, &half), "in: data is NULL");
        REFUSED(ddp_tensor_redistribute_plan(near_group, &in, 0, 0, &half, NULL), "plan is NULL");
        ok(ddp_tensor_redistribute_plan(near_group, &in, 0, 0, &half, &plan));
        REFUSED(ddp_tensor_shard(near_group, &in, 0, &none), "whole: data is NULL");
        in.data = data;
        REFUSED(ddp_tensor_shard(near_group, &in, DDP_SHARD(2), &none),
                "SHARD(2) is invalid for a tensor of shape (3, 4)");
        REFUSED(ddp_tensor_shard(near_group, &in, 0, NULL), "out is NULL");
        REFUSED(ddp_tensor_shard(near_group, &in, 0, &half), "whole and out overlap");
        REFUSED(ddp_tensor_distribute(near_group, &in, 1, 0, &none), "root=1; use ranks 0 to 0");
        REFUSED(ddp_tensor_distribute(near_group, NULL, 0, 0, &none), "whole is NULL");
        REFUSED(ddp_tensor_distribute(near_group, &in, 0, 0, NULL), "out is NULL");
        REFUSED(ddp_tensor_distribute(NULL, &in, 0, 0, &none), "group is NULL");
        REFUSED(ddp_tensor_gather(near_group, &in, 0, shape, -1, &none), "root=-1");
        REFUSED(ddp_tensor_gather(near_group, &in, 0, NULL, 0, &none), "global_shape is NULL");
        REFUSED(ddp_tensor_gather(near_group, &in, 0, shape, 0, NULL), "out is NULL");
        REFUSED(ddp_tensor_gather(NULL, &in, 0, shape, 0, &none), "group is NULL");
        REFUSED(ddp_tensor_gather(near_group, NULL, 0, shape, 0, &none), "in is NULL");
        REFUSED(ddp_tensor_gather(near_group, &in, DDP_SHARD(0), shape, 0, &in), "in and out overlap");
        REFUSED(ddp_tensor_distribute(near_group, &in, 0, DDP_SHARD(0), &half), "whole and out overlap");
        in.shape[0] = 2;
        REFUSED(ddp_tensor_gather(near_group, &in, DDP_SHARD(1), shape, 0, &none),
                "in is (2, 4), but SHARD(1) of (3, 4) on rank 0 of 1 is (3, 4)");
        assert_null(none.data);
    }
}

static void layouts(void **state) { /* layouts without axes, and invalid ones */
    float data[12] = {0};
    ddp_tensor in = tensor_of(data, DDP_F32, 2, 3, 4, 0, 0), out = DDP_ZERO;
    ddp_tensor_layout a = DDP_ZERO, b;
    ddp_tensor_box box;
    ddp_tensor_plan plan;
    (void)state;
    a.ndim = 2, a.shape[0] = 3, a.shape[1] = 4;
    ok(ddp_tensor_layout_box(&a, &box));
    assert_true(box.shape[0] == 3 && box.shape[1] == 4 && box.offset[1] == 0);
    ok(ddp_tensor_redistribute_mesh(&in, &a, &a, &out, &plan));
    assert_string_equal(plan.collective, "copy");
    ddp_tensor_free(NULL, &out);
    ok(ddp_tensor_redistribute_mesh(&in, &a, &a, &in, &plan));
    assert_string_equal(plan.collective, "none");
    out = in;
    out.data = data + 4;
    in.shape[0] = out.shape[0] = a.shape[0] = 2; /* elements 0 to 7 and 4 to 11 */
    REFUSED(ddp_tensor_redistribute_mesh(&in, &a, &a, &out, &plan), "in and out overlap");
    in.shape[0] = a.shape[0] = 3;
    memset(&out, 0, sizeof out);
    REFUSED(ddp_tensor_layout_box(NULL, &box), "layout is NULL");
    REFUSED(ddp_tensor_layout_box(&a, NULL), "box is NULL");
    REFUSED(ddp_tensor_redistribute_mesh(NULL, &a, &a, &out, NULL), "in is NULL");
    REFUSED(ddp_tensor_redistribute_mesh(&in, NULL, &a, &out, NULL), "from is NULL");
    REFUSED(ddp_tensor_redistribute_mesh(&in, &a, NULL, &out, NULL), "to is NULL");
    b = a, b.shape[1] = 5;
    REFUSED(ddp_tensor_redistribute_mesh(&in, &a, &b, &out, NULL),
            "from->shape is (3, 4), but to->shape is (3, 5); give both the same");
    REFUSED(ddp_tensor_redistribute_mesh(&in, &b, &b, &out, NULL),
            "in is (3, 4), but the part of this rank of (3, 5) in layout from is (3, 5)");
    b = a, b.axis_count = 9;
    REFUSED(ddp_tensor_layout_box(&b, &box), "axis_count=9; use 0 to 8");
    b.axis_count = 2, b.axes[0] = near_group;
    REFUSED(ddp_tensor_layout_box(&b, &box), "axes[1] is NULL");
    b.axes[1] = near_group;
    REFUSED(ddp_tensor_layout_box(&b, &box), "axes[0] and axes[1] are both group near");
    b.axis_count = 1, b.placement[0] = DDP_SHARD(2);
    REFUSED(ddp_tensor_layout_box(&b, &box), "SHARD(2) is invalid for a tensor of shape (3, 4)");
    b.placement[0] = DDP_SHARD(1);
    REFUSED(ddp_tensor_redistribute_mesh(&in, &a, &b, &out, NULL),
            "from->axis_count=0, but to->axis_count=1; give both the same");
    a = b, a.axes[0] = far_group;
    REFUSED(ddp_tensor_redistribute_mesh(&in, &a, &b, &out, NULL),
            "axes[0] is group far in from, but group near in to; give both the same");
    a.ndim = -1;
    REFUSED(ddp_tensor_layout_box(&a, &box), "ndim=-1");
}

//== memory that runs out =====================================================================================

static ddp_tensor scarce_in, scarce_out;
static ddp_result scarce(int what) {
    static const int order[2] = {1, 0};
    static const int64_t shape[2] = {3, 4};
    scarce_out.ndim = 2, scarce_out.shape[0] = 3, scarce_out.shape[1] = 4;
    switch (what) {
    case 0: return ddp_tensor_create(poor_group, &scarce_out, DDP_F32, 2, shape);
    case 1: return ddp_tensor_copy(poor_group, &scarce_in, &scarce_out);
    case 2: return ddp_tensor_transpose(poor_group, &scarce_in, order, &scarce_out);
    case 3: return npy_load(poor_group, path, &scarce_out);
    case 4: return ddp_tensor_shard(poor_group, &scarce_in, DDP_SHARD(0), &scarce_out);
    case 5: return ddp_tensor_distribute(poor_group, &scarce_in, 0, DDP_SHARD(1), &scarce_out);
    case 6: return ddp_tensor_gather(poor_group, &scarce_in, DDP_SHARD(1), shape, 0, &scarce_out);
    default: return ddp_tensor_redistribute(poor_group, &scarce_in, DDP_SHARD(0), DDP_SHARD(1), &scarce_out);
    }
}

static void without_memory(void **state) {
    float data[12] = {1, 2, 3};
    size_t live = poor_live;
    (void)state;
    scarce_in = tensor_of(data, DDP_F32, 2, 3, 4, 0, 0);
    ok(npy_save(NULL, &scarce_in, path));
    for (int what = 0; what < 8; what++) {
        ddp_result result;
        size_t granted = 0;
        do {
            memset(&scarce_out, 0, sizeof scarce_out);
            poor_left = granted++;
            result = scarce(what);
            if (result == DDP_OK) break;
            says(result, DDP_ERR_NO_MEMORY, "bytes could not be allocated");
            assert_null(scarce_out.data);
            assert_int_equal(poor_live, live);
        } while (granted < 20);
        assert_int_equal(result, DDP_OK);
        assert_true(granted > 1);
        ddp_tensor_free(poor_group, &scarce_out);
        assert_int_equal(poor_live, live);
    }
    poor_left = 1000;
    unlink(path);
}

/* A device without kernels for layers, whose memory the host cannot read, or with those of another
   version. */
static void kernels_of_a_device_are_checked(void **state) {
    static const char *const texts[2] = {"ddp_tp_create group=odd: device odd has no kernels for "
                                         "ddp_tensor.h; put ddp_tensor.h into the folder of ddp_cuda.cuh",
                                         "ddp_tp_create group=odd: device odd has kernels for version 1 of "
                                         "ddp_tensor.h, but that header has version"};
    static ddp_layer_kernels other[2];
    (void)state;
    other[0].version = 1;
    for (int turn = 0; turn < 2; turn++) {
        ddp_device odd = *ddp_device_cpu();
        ddp_tp_desc desc = DDP_ZERO;
        ddp_tp *tp;
        odd.name = "odd";
        odd.host_memory = turn;
        odd.layers = turn ? other : NULL;
        ddp_group *group = group_of_one("odd", &odd, 0);
        desc.max_rows = 1;
        assert_int_equal(ddp_tp_create(&tp, group, &desc), DDP_ERR_UNSUPPORTED);
        if (!strstr(ddp_last_error(), texts[turn])) fail_msg("%s", ddp_last_error());
        ddp_group_destroy(group);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(kernels_of_a_device_are_checked),
                                       cmocka_unit_test(create),
                                       cmocka_unit_test(views),
                                       cmocka_unit_test(copies),
                                       cmocka_unit_test(boxes),
                                       cmocka_unit_test(transposes),
                                       cmocka_unit_test(vast_and_empty),
                                       cmocka_unit_test(fills),
                                       cmocka_unit_test(text),
                                       cmocka_unit_test(npy_there_and_back),
                                       cmocka_unit_test(npy_as_others_write),
                                       cmocka_unit_test(npy_damaged),
                                       cmocka_unit_test(npy_is_whole_or_not_there),
                                       cmocka_unit_test(placements),
                                       cmocka_unit_test(one_rank),
                                       cmocka_unit_test(layouts),
                                       cmocka_unit_test(without_memory)};
    watchdog_start(60);
    return cmocka_run_group_tests(tests, setup, teardown);
}

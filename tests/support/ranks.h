/*  ranks.h - runs a function on W ranks, makes test data, and computes the expected results of reductions.

    The reference follows only the documented promises: one element at a time, a recursive tree over rank
    index, 16-bit types through float with one rounding at the end. It shares no code with ddp.h.

    Include after ddp.h. Needs -lm. */
#ifndef DDP_TEST_RANKS_H
#define DDP_TEST_RANKS_H

#include "watchdog.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define RANKS_UNUSED __attribute__((unused))

#if defined(RANKS_BACKEND) /* names the function that returns a plugged-in backend */
#if defined(__cplusplus)
extern "C"
#endif
    const ddp_backend *
    RANKS_BACKEND(void);
#define RANKS_PLUG RANKS_BACKEND()
#else
#define RANKS_PLUG ((const ddp_backend *)NULL)
#endif

//== backends ===============================================================================

/* The backends of the tests in tests/ranks: the arguments of a test select entries of this table. */
typedef enum ranks_mode {
    RANKS_SELF,
    RANKS_PROCESSES,
    RANKS_THREADS,
    RANKS_LARGE,
    RANKS_LARGE_THREADS,
    RANKS_NARROW,
    RANKS_TCP,
    RANKS_TCP_THREADS,
    RANKS_ENV,
    RANKS_MPI,
    RANKS_MPI_ANY,
    RANKS_FOREIGN,
    RANKS_FOREIGN_THREADS,
    RANKS_MODES
} ranks_mode;
enum { RANKS_LAUNCHED, RANKS_AS_THREADS, RANKS_STARTED /* this process is one rank already */ };
enum {
    RANKS_NO_MESSAGES = 1,
    RANKS_NO_COUNTS = 2,  /* no send and receive; no call with counts per rank */
    RANKS_APART = 4,      /* every rank is on an emulated machine of its own */
    RANKS_PLUGGED_IN = 8, /* launched on the backend that RANKS_BACKEND gives */
    /* The methods of large calls, at sizes that a test can afford. */
    RANKS_LARGE_EARLY = 16,
    RANKS_NARROW_CPU = 32, /* as without wide vectors */
    RANKS_ALL_CASES = 64   /* others repeat only some of them */
};
typedef struct ranks_backend {
    const char *name;
    int start;
    /* the init_method with which ranks join, also after a launch; NULL = that of the launch, or the
       launcher */
    const char *joins;
    ddp_order order;
    int is;
    size_t most_bytes; /* of a rank in one call; 0 = any */
    int slow;          /* factor by which less is done */
} ranks_backend;
static const ranks_backend ranks_backends[RANKS_MODES] = {
    {"self", RANKS_STARTED, "self://", DDP_ORDER_DEFAULT, 0, 0, 1},
    {"processes", RANKS_LAUNCHED, NULL, DDP_ORDER_DEFAULT, RANKS_ALL_CASES, 0, 1},
    {"threads", RANKS_AS_THREADS, NULL, DDP_ORDER_DEFAULT, 0, 0, 1},
    {"large", RANKS_LAUNCHED, NULL, DDP_ORDER_DEFAULT, RANKS_LARGE_EARLY | RANKS_ALL_CASES, 0, 1},
    {"large_threads", RANKS_AS_THREADS, NULL, DDP_ORDER_DEFAULT, RANKS_LARGE_EARLY, 0, 1},
    {"narrow", RANKS_LAUNCHED, NULL, DDP_ORDER_DEFAULT, RANKS_LARGE_EARLY | RANKS_NARROW_CPU, 0, 1},
    {"tcp", RANKS_LAUNCHED, "file://", DDP_ORDER_DEFAULT, RANKS_APART | RANKS_NO_MESSAGES | RANKS_NO_COUNTS,
     65536, 10},
    {"tcp_threads", RANKS_AS_THREADS, "file://", DDP_ORDER_DEFAULT,
     RANKS_APART | RANKS_NO_MESSAGES | RANKS_NO_COUNTS, 65536, 10},
    {"env", RANKS_STARTED, NULL, DDP_ORDER_DEFAULT, 0, 0, 1},
    {"mpi", RANKS_STARTED, "mpi://", DDP_ORDER_DEFAULT, 0, 0, 1},
    {"mpi_any", RANKS_STARTED, "mpi://", DDP_ORDER_ANY, 0, 0, 1},
    {"foreign", RANKS_LAUNCHED, NULL, DDP_ORDER_DEFAULT, RANKS_PLUGGED_IN, 0, 20},
    {"foreign_threads", RANKS_AS_THREADS, NULL, DDP_ORDER_DEFAULT, RANKS_PLUGGED_IN, 0, 20},
};
static ranks_backend ranks_on; /* the one that runs */
/* alloc_fn, free_fn and user of the worlds; NULL = the defaults */
static ddp_group_desc ranks_memory;

static RANKS_UNUSED int ranks_slow(void) { return ranks_on.slow * DDP_TEST_SLOWDOWN; }

static RANKS_UNUSED const char *ranks_mode_name(ranks_mode mode) { return ranks_backends[mode].name; }

/* Returns 0 if text names a backend of this program. */
static RANKS_UNUSED int ranks_mode_parse(const char *text, ranks_mode *mode) {
    for (int m = 0; m < RANKS_MODES; m++) {
        if (strcmp(text, ranks_backends[m].name) != 0
            || (ranks_backends[m].is & RANKS_PLUGGED_IN && !RANKS_PLUG))
            continue;
        *mode = (ranks_mode)m;
        return 0;
    }
    return -1;
}

/* Whether the ranks of this mode are processes that a launcher started (or one process without a
   launcher). */
static RANKS_UNUSED int ranks_joins(ranks_mode mode) { return ranks_backends[mode].start == RANKS_STARTED; }

/* Number of successive ranks per emulated machine (support/implementation.c). */
static RANKS_UNUSED int ranks_per_machine(void) {
    const char *block = getenv("DDP_TEST_BLOCK");
    return ranks_on.is & RANKS_APART ? 1 : block ? atoi(block) : 64;
}

//== running ranks ==========================================================================

typedef struct ranks_joining {
    int timeout_ms, launch;
    ddp_rank_fn fn;
    void *user;
} ranks_joining;

/* local: the group of the launch, whose ranks join another group together; or NULL. */
static RANKS_UNUSED ddp_result ranks_join(ddp_group *local, void *user) {
    const ranks_joining *j = (const ranks_joining *)user;
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    char url[80];
    ddp_result result;
    desc.timeout_ms = j->timeout_ms;
    desc.order = ranks_on.order;
    desc.alloc_fn = ranks_memory.alloc_fn;
    desc.free_fn = ranks_memory.free_fn;
    desc.user = ranks_memory.user;
    desc.init_method = ranks_on.joins;
    if (local) {
        snprintf(url, sizeof url, "%.20s/tmp/ddp_test_ranks_%d_%d", ranks_on.joins, (int)j->launch,
                 (int)getuid());
        desc.init_method = url;
        desc.rank = ddp_rank(local);
        desc.world_size = ddp_world_size(local);
    }
#if defined(DDP_TEST_INNER_H)
    machine_salt = ranks_on.is & RANKS_APART ? desc.rank + 1 : 0;
#endif
    result = ddp_group_create(&world, &desc);
    if (result == DDP_OK) result = j->fn(world, j->user);
    if (result == DDP_OK) result = ddp_barrier(world);
    if (local && desc.rank == 0) unlink(url + strlen(ranks_on.joins));
    ddp_group_destroy(world);
    return result;
}

/* Runs fn on world_size ranks. */
static RANKS_UNUSED ddp_result ranks_run(ranks_mode mode, int world_size, int timeout_ms, ddp_rank_fn fn,
                                         void *user) {
    static int launches;
    ranks_joining joining;
    ddp_launch_desc desc = DDP_ZERO;
    joining.timeout_ms = timeout_ms;
    joining.launch = (int)getpid() * 100 + launches++ % 100;
    joining.fn = fn;
    joining.user = user;
    ranks_on = ranks_backends[mode];
#if !defined(DDP_TEST_INNER_H)
    if (ranks_on.is & (RANKS_APART | RANKS_LARGE_EARLY | RANKS_NARROW_CPU))
        return ddp_fail(DDP_ERR_INVALID, "mode %s needs support/inner.h, included before ranks.h",
                        ranks_on.name);
#else
    if (ranks_on.is & RANKS_LARGE_EARLY) inner.large_bytes = 16384;
    inner.narrow = (ranks_on.is & RANKS_NARROW_CPU) != 0;
#endif
    if (ranks_on.start == RANKS_STARTED) return ranks_join(NULL, &joining);
    desc.world_size = world_size;
    desc.group = ranks_memory;
    desc.mode = ranks_on.start == RANKS_AS_THREADS ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
    desc.group.timeout_ms = timeout_ms;
    if (ranks_on.is & RANKS_PLUGGED_IN) desc.group.backend = RANKS_PLUG;
    return ranks_on.joins ? ddp_launch(&desc, ranks_join, &joining) : ddp_launch(&desc, fn, user);
}

/* Zeroed memory shared by all ranks, as threads or as forked processes. */
static RANKS_UNUSED void *ranks_shared(size_t size_bytes) {
    void *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return memory;
}

static RANKS_UNUSED double ranks_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static RANKS_UNUSED void ranks_sleep_us(long us) {
    struct timespec pause;
    pause.tv_sec = us / 1000000;
    pause.tv_nsec = us % 1000000 * 1000;
    while (nanosleep(&pause, &pause) != 0 && errno == EINTR) {
    }
}

/* Inside a rank function: returns with an error that names the place if condition is false. */
#define RANKS_CHECK(group, condition, ...)                                                           \
    do {                                                                                             \
        if (!(condition)) return ranks_failed((group), __FILE__, __LINE__, #condition, __VA_ARGS__); \
    } while (0)

/* As above for a call that must return DDP_OK. */
#define RANKS_OK(group, call)                                                                                \
    do {                                                                                                     \
        ddp_result ranks_result = (call);                                                                    \
        if (ranks_result != DDP_OK)                                                                          \
            return ranks_failed((group), __FILE__, __LINE__, #call, "%s: %s", ddp_result_name(ranks_result), \
                                ddp_last_error());                                                           \
    } while (0)

static RANKS_UNUSED ddp_result ranks_failed(ddp_group *group, const char *file, int line, const char *what,
                                            const char *format, ...) __attribute__((format(printf, 5, 6)));
static RANKS_UNUSED ddp_result ranks_failed(ddp_group *group, const char *file, int line, const char *what,
                                            const char *format, ...) {
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "FAIL %s:%d rank %d/%d: %s: %s\n", file, line, group ? ddp_rank(group) : -1,
            group ? ddp_world_size(group) : 0, what, text);
    return ddp_fail(DDP_ERR_CORRUPT, "%s:%d: %s", file, line, what);
}

static RANKS_UNUSED __thread const char *ranks_current = ""; /* the test that runs; the same on every rank */

/* Inside a rank function: runs a test and a barrier, and returns if either fails. */
#define RANKS_RUN(world, test)                                                                              \
    do {                                                                                                    \
        double run_start = ranks_now();                                                                     \
        ddp_result run_result;                                                                              \
        ranks_current = #test;                                                                              \
        run_result = (test);                                                                                \
        if (run_result == DDP_OK) run_result = ddp_barrier(world);                                          \
        if (run_result != DDP_OK) {                                                                         \
            fprintf(stderr, "FAIL rank %d/%d in %s: %s\n", ddp_rank(world), ddp_world_size(world), #test,   \
                    ddp_last_error());                                                                      \
            return run_result;                                                                              \
        }                                                                                                   \
        if (ranks_now() - run_start > 10) printf("slow: %s took %.1f s\n", #test, ranks_now() - run_start); \
    } while (0)

/* The main of `program BACKEND [W ...]`: one launch per W, by default per entry of defaults, which ends with
   0; fn gets the mode. Returns how many failed, or -1 after a line on usage. The watchdog is started here. */
static RANKS_UNUSED int ranks_each(int argc, char **argv, const int *defaults, int watchdog_seconds,
                                   ranks_mode *mode, ddp_rank_fn fn) {
    int failures = 0;
    if (argc < 2 || ranks_mode_parse(argv[1], mode) != 0)
        return fprintf(stderr, "usage: %s BACKEND [W ...], see support/ranks.h\n", argv[0]), -1;
    watchdog_start(watchdog_seconds);
    for (int i = 0; argc > 2 ? i + 2 < argc : defaults[i]; i++) {
        int w = argc > 2 ? atoi(argv[i + 2]) : defaults[i];
        ddp_result result = ranks_run(*mode, w, 60000 * DDP_TEST_SLOWDOWN, fn, mode);
        if (result != DDP_OK) {
            fprintf(stderr, "FAIL %s W=%d: %s: %s\n", ranks_mode_name(*mode), w, ddp_result_name(result),
                    ddp_last_error());
            failures++;
        }
        if (ranks_joins(*mode)) break;
    }
    return failures;
}

//== 16-bit floats ==========================================================================

static float ranks_power_of_2(int exponent) {
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static RANKS_UNUSED float ranks_f16_to_f32(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value;
    if (exponent == 31)
        value = mantissa ? NAN : INFINITY;
    else if (exponent == 0)
        value = (float)mantissa * ranks_power_of_2(-24);
    else
        value = (float)(mantissa + 1024) * ranks_power_of_2(exponent - 25);
    return bits & 0x8000 ? -value : value;
}

/* To nearest, ties to even; scaling by a power of two is exact, so rintf is the one rounding. */
static RANKS_UNUSED uint16_t ranks_f32_to_f16(float value) {
    uint16_t sign = (uint16_t)(signbit(value) ? 0x8000 : 0);
    float size = fabsf(value);
    int exponent;
    if (isnan(value)) return (uint16_t)(sign | 0x7e00);
    if (size >= 65520.0f) return (uint16_t)(sign | 0x7c00);
    if (size < ldexpf(1, -14)) return (uint16_t)(sign | (uint16_t)rintf(ldexpf(size, 24)));
    exponent = ilogbf(size);
    return (
        uint16_t)(sign
                  | (uint16_t)(((exponent + 15) << 10) + ((int)rintf(ldexpf(size, 10 - exponent)) - 1024)));
}

static RANKS_UNUSED float ranks_bf16_to_f32(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static RANKS_UNUSED uint16_t ranks_f32_to_bf16(float value) {
    uint32_t bits, low;
    memcpy(&bits, &value, 4);
    if (isnan(value)) return (uint16_t)(bits >> 16 | 0x40);
    low = bits & 0xffff;
    bits >>= 16;
    if (low > 0x8000 || (low == 0x8000 && (bits & 1))) bits++;
    return (uint16_t)bits;
}

//== data ===================================================================================

static RANKS_UNUSED uint64_t ranks_mix(uint64_t x) { /* splitmix64's finaliser */
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* A sequence of test numbers that every rank can compute for every other rank. */
typedef struct ranks_data {
    ddp_dtype dtype;
    uint64_t seed;
    int specials; /* 1 = one element in eight is NaN, infinite, a signed zero, subnormal or extreme */
} ranks_data;

static RANKS_UNUSED size_t ranks_dtype_size(ddp_dtype dtype) {
    switch (dtype) {
    case DDP_F64:
    case DDP_I64:
    case DDP_U64: return 8;
    case DDP_F32:
    case DDP_I32: return 4;
    case DDP_F16:
    case DDP_BF16: return 2;
    default: return 1;
    }
}

/* A finite float in a range of a few binades, so that the order of additions shows; or a special one. */
static inline uint64_t ranks_float_bits(uint64_t h, int mantissa_bits, int exponent_bits, int special) {
    uint64_t top = (UINT64_C(1) << exponent_bits) - 1, bias = top >> 1,
             mantissa = (UINT64_C(1) << mantissa_bits) - 1;
    uint64_t sign = (h >> 63) << (mantissa_bits + exponent_bits);
    if (special) {
        switch (h >> 8 & 7) {
        case 0: return sign | top << mantissa_bits | (mantissa + 1) >> 1; /* NaN */
        case 1:
        case 2: return sign | top << mantissa_bits; /* infinity */
        case 3:
        case 4: return sign;                                         /* zero */
        case 5: return sign | 1;                                     /* least subnormal */
        case 6: return sign | (top - 1) << mantissa_bits | mantissa; /* greatest */
        default: return sign | (h >> 16 & mantissa);                 /* subnormal */
        }
    }
    return sign | (bias - 4 + h % 9) << mantissa_bits | (h >> 8 & mantissa);
}

/* Element index of a rank's input, as bits in the low bytes. */
static inline uint64_t ranks_bits(const ranks_data *data, int rank, size_t index) {
    uint64_t h = ranks_mix(data->seed + (uint64_t)rank * UINT64_C(0x100000001b3) + ((uint64_t)index << 20));
    int special = data->specials && (h >> 40 & 7) == 0;
    switch (data->dtype) {
    case DDP_F32: return ranks_float_bits(h, 23, 8, special);
    case DDP_F64: return ranks_float_bits(h, 52, 11, special);
    case DDP_F16: return ranks_float_bits(h, 10, 5, special);
    case DDP_BF16: return ranks_float_bits(h, 7, 8, special);
    default: return h;
    }
}

static inline void ranks_store(void *memory, size_t index, size_t size, uint64_t bits) { /* little-endian */
    unsigned char *at = (unsigned char *)memory + index * size;
    if (size == 8)
        memcpy(at, &bits, 8);
    else if (size == 4)
        memcpy(at, &bits, 4);
    else if (size == 2)
        memcpy(at, &bits, 2);
    else
        *at = (unsigned char)bits;
}

static RANKS_UNUSED uint64_t ranks_load(const void *memory, size_t index, size_t size) {
    uint64_t bits = 0;
    memcpy(&bits, (const unsigned char *)memory + index * size, size);
    return bits;
}

/* memory[0 .. count) = elements first, first + 1, ... of a rank's input. */
static RANKS_UNUSED void ranks_fill(void *memory, const ranks_data *data, int rank, size_t first,
                                    size_t count) {
    size_t size = ranks_dtype_size(data->dtype);
    for (size_t i = 0; i < count; i++) ranks_store(memory, i, size, ranks_bits(data, rank, first + i));
}

//== reference reduction ====================================================================

typedef union ranks_number {
    float f;
    double d;
    uint64_t u;
    int64_t i;
} ranks_number;

static inline ranks_number ranks_widen(ddp_dtype dtype, uint64_t bits) {
    ranks_number n;
    n.u = bits; /* little-endian: the bytes are already those of f32, f64, i64 and u64 */
    switch (dtype) {
    case DDP_F16: n.f = ranks_f16_to_f32((uint16_t)bits); break;
    case DDP_BF16: n.f = ranks_bf16_to_f32((uint16_t)bits); break;
    case DDP_I8: n.i = (int8_t)bits; break;
    case DDP_I32: n.i = (int32_t)bits; break;
    case DDP_U8: n.u = (uint8_t)bits; break;
    default: break;
    }
    return n;
}

static inline uint64_t ranks_narrow(ddp_dtype dtype, ranks_number n) {
    return dtype == DDP_F16 ? ranks_f32_to_f16(n.f) : dtype == DDP_BF16 ? ranks_f32_to_bf16(n.f) : n.u;
}

static int ranks_is_f32(ddp_dtype dtype) { return dtype == DDP_F32 || dtype == DDP_F16 || dtype == DDP_BF16; }

/* a = a op b for n numbers. */
#define RANKS_EACH(field, value) \
    for (size_t i = 0; i < n; i++) a[i].field = (value)
#define RANKS_PICK(field, less) \
    (isnan(a[i].field) || isnan(b[i].field) ? NAN : b[i].field less a[i].field ? b[i].field : a[i].field)
#define RANKS_FLOATS(field)                             \
    do {                                                \
        if (op == DDP_OP_SUM || op == DDP_OP_AVG)       \
            RANKS_EACH(field, a[i].field + b[i].field); \
        else if (op == DDP_OP_PROD)                     \
            RANKS_EACH(field, a[i].field *b[i].field);  \
        else if (op == DDP_OP_MIN)                      \
            RANKS_EACH(field, RANKS_PICK(field, <));    \
        else                                            \
            RANKS_EACH(field, RANKS_PICK(field, >));    \
    } while (0)
static RANKS_UNUSED void ranks_combine(ddp_dtype dtype, ddp_op op, ranks_number *a, const ranks_number *b,
                                       size_t n) {
    int is_unsigned = dtype == DDP_U8 || dtype == DDP_U64;
    if (ranks_is_f32(dtype))
        RANKS_FLOATS(f);
    else if (dtype == DDP_F64)
        RANKS_FLOATS(d);
    else if (op == DDP_OP_SUM || op == DDP_OP_AVG)
        RANKS_EACH(u, a[i].u + b[i].u);
    else if (op == DDP_OP_PROD)
        RANKS_EACH(u, a[i].u * b[i].u);
    else
        RANKS_EACH(u,
                   (op == DDP_OP_MIN) == (is_unsigned ? b[i].u < a[i].u : b[i].i < a[i].i) ? b[i].u : a[i].u);
}

/* Elements at .. at + n - 1 of ranks first .. first + ranks - 1 as a tree: the left part is the largest power
   of two below the number of ranks. */
#define RANKS_BLOCK ((size_t)128)
static RANKS_UNUSED void ranks_tree(ranks_number *out, const ranks_data *data, ddp_op op, int first,
                                    int ranks, size_t at, size_t n) {
    ranks_number right[RANKS_BLOCK];
    int left = 1;
    for (size_t i = 0; i < n && ranks == 1; i++)
        out[i] = ranks_widen(data->dtype, ranks_bits(data, first, at + i));
    if (ranks == 1) return;
    while (left * 2 < ranks) left *= 2;
    ranks_tree(out, data, op, first, left, at, n);
    ranks_tree(right, data, op, first + left, ranks - left, at, n);
    ranks_combine(data->dtype, op, out, right, n);
}

static inline ranks_number ranks_divided(ddp_dtype dtype, ranks_number n, uint64_t divisor) {
    if (ranks_is_f32(dtype))
        n.f /= (float)divisor;
    else if (dtype == DDP_F64)
        n.d /= (double)divisor;
    else {
        n = ranks_widen(dtype, n.u); /* the wrapped sum */
        if (dtype == DDP_U8 || dtype == DDP_U64)
            n.u /= divisor;
        else
            n.i /= (int64_t)divisor;
    }
    return n;
}

/* out[0 .. count) = elements first, first + 1, ... of a reduction over ranks 0 .. world_size - 1; AVG divides
   by divisor. */
static RANKS_UNUSED void ranks_reduce(void *out, const ranks_data *data, ddp_op op, int world_size,
                                      uint64_t divisor, size_t first, size_t count) {
    size_t size = ranks_dtype_size(data->dtype);
    ranks_number block[RANKS_BLOCK];
    for (size_t at = 0; at < count; at += RANKS_BLOCK) {
        size_t n = count - at < RANKS_BLOCK ? count - at : RANKS_BLOCK;
        ranks_tree(block, data, op, 0, world_size, first + at, n);
        for (size_t i = 0; i < n; i++)
            ranks_store(out, at + i, size,
                        ranks_narrow(data->dtype, op == DDP_OP_AVG
                                                      ? ranks_divided(data->dtype, block[i], divisor)
                                                      : block[i]));
    }
}

//== comparing ==============================================================================

static RANKS_UNUSED int ranks_is_nan(ddp_dtype dtype, uint64_t bits) {
    ranks_number n = ranks_widen(dtype, bits);
    return ranks_is_f32(dtype) ? isnan(n.f) : dtype == DDP_F64 ? isnan(n.d) : 0;
}

static RANKS_UNUSED int ranks_is_zero(ddp_dtype dtype, uint64_t bits) {
    ranks_number n = ranks_widen(dtype, bits);
    return ranks_is_f32(dtype) ? n.f == 0 : dtype == DDP_F64 ? n.d == 0 : n.u == 0;
}

/* -1 if have equals want bit for bit, otherwise the first index that differs. Any NaN equals any NaN. MIN and
   MAX may choose either sign of a zero, but the same on all ranks: it goes into *zero_signs. */
static RANKS_UNUSED long ranks_compare(const void *have, const void *want, size_t count, ddp_dtype dtype,
                                       int free_zero, uint64_t *zero_signs) {
    size_t size = ranks_dtype_size(dtype);
    if (memcmp(have, want, count * size) == 0) return -1;
    for (size_t i = 0; i < count; i++) {
        uint64_t a = ranks_load(have, i, size), b = ranks_load(want, i, size);
        if (a == b || (ranks_is_nan(dtype, a) && ranks_is_nan(dtype, b))) continue;
        if (!free_zero || !ranks_is_zero(dtype, a) || !ranks_is_zero(dtype, b)) return (long)i;
        *zero_signs += ranks_mix((uint64_t)i);
    }
    return -1;
}

/* The same as ranks_compare for an engine that chose the order of additions of floats: a small difference is
   allowed, and any result if a number is not finite. */
static RANKS_UNUSED long ranks_compare_any(const void *have, const void *want, size_t count,
                                           ddp_dtype dtype) {
    size_t size = ranks_dtype_size(dtype);
    for (size_t i = 0; i < count; i++) {
        uint64_t a = ranks_load(have, i, size), b = ranks_load(want, i, size);
        ranks_number x = ranks_widen(dtype, a), y = ranks_widen(dtype, b);
        double p = ranks_is_f32(dtype) ? (double)x.f : x.d, q = ranks_is_f32(dtype) ? (double)y.f : y.d;
        if (a == b) continue;
        if (!ranks_is_f32(dtype) && dtype != DDP_F64) return (long)i;
        if (isfinite(p) && isfinite(q) && fabs(p - q) > 1e-4 * (1 + fabs(p) + fabs(q))) return (long)i;
    }
    return -1;
}

#endif /* DDP_TEST_RANKS_H */

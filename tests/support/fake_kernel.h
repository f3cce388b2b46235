/*  fake_kernel.h - runs the kernels of examples/gpt/gpt_cuda_base.cuh on the fake GPU of fake_gpu.h, thread by
    thread.

    Include after fake_gpu.h (or device.h), and before the header with kernels. A launch is one piece of work
    on its stream, or a node of the graph that the stream captures. When the stream reaches it, the blocks of
    its grid run, up to three of them concurrently.

    Threads   are fibers: one runs until it meets others, at a barrier or in an operation of its warp. The
              seed chooses the order of threads and of blocks, and the number of concurrent blocks, again
              after each meeting. So a missing barrier or flag gives wrong data with some seeds. Failures: a
              barrier that not all threads of the block reach (except those that have returned), or in two
              lines at once; a warp operation in which a lane is missing.
    Global    memory is accessed only by gpt_cuda_load and the like. Each access must be inside an allocation
              of this device, and aligned to its size. The search for races between streams includes all
              accesses of a launch.
    Shared    memory is NaN when a block starts. An asynchronous copy makes its target NaN when it starts, and
              writes the data when the thread waits for it. With AddressSanitizer each access is checked for
              bounds.
    Waiting   for a flag is a failure if no thread that can run sets it.

    The first failure ends the launch. Fragments of matrices have the layout of the PTX ISA. Their products
    are added as in the tensor cores of sm_90, which truncate where the CPU rounds (Xie et al. 2025, arXiv
    2511.10909). So tolerances that hold here hold on a device. */
#ifndef DDP_TEST_FAKE_KERNEL_H
#define DDP_TEST_FAKE_KERNEL_H

#include "fake_gpu.h"
#include "host_only.h"
#include <cuda_fp16.h>
#include <math.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__GNUC__) && !defined(__clang__) \
    && !defined(__OPTIMIZE__) /* threads switch all the time: optimized in every build */
#pragma GCC push_options
#pragma GCC optimize("O2")
#define FAKE_POP_OPTIONS
#endif

#define GPT_CUDA_ON_CPU
#undef __launch_bounds__
#define __launch_bounds__(...)
#define FAKE_STACK ((size_t)1 << 17) /* of a thread; the page next to it is closed */
#define FAKE_THREADS 1024
#define FAKE_RESIDENTS 3                 /* concurrent blocks */
#define FAKE_SHARED ((size_t)227 * 1024) /* of a block of sm_90, of which 16 KiB may be static */
#define FAKE_SPINS 1000

enum fake_warp_kind {
    FAKE_WARP_SYNC,
    FAKE_SHUFFLE,
    FAKE_LDMATRIX,
    FAKE_LDMATRIX_TRANS,
    FAKE_MMA,
    FAKE_MMA_F16
};
static const char *const fake_warp_names[] = {"gpt_cuda_warp_sync", "gpt_cuda_shuffle",
                                              "gpt_cuda_ldmatrix4", "gpt_cuda_ldmatrix4_trans",
                                              "gpt_cuda_mma",       "gpt_cuda_mma of f16"};
enum fake_fiber_state { FAKE_READY, FAKE_AT_BARRIER, FAKE_IN_WARP, FAKE_SPINNING, FAKE_RETURNED };

struct fake_static {
    const void *key;
    char *at;
    size_t bytes;
};
struct fake_copy {
    char *to;
    const char *from;
    int group;
}; /* from NULL: zeros */

/* Input of a lane to an operation of its warp, and the place of its result. */
struct fake_lane {
    const void *in, *more;
    void *out;
    int from;
    uint32_t bits;
};
/* Lanes that can run are bits in `ready`, that of lane l at l ^ flip. */
struct fake_warp {
    uint32_t ready, flip, live, arrived;
    int kind;
    fake_lane lane[32];
};

struct fake_resident;
struct fake_fiber {
    void *stands; /* where its registers are saved while another one runs */
    uint3 thread;
    int number, state, group, spins, flag; /* number: in its block */
    const int *spins_on;
    fake_resident *home;
    fake_warp *warp;
    char *stack;
    size_t copied; /* of copies */
    std::vector<fake_copy> copies;
    void *asan;
};

/* A block that runs. */
struct fake_resident {
    uint3 index;
    int live, waiting, barrier_line, spinning, made; /* threads; made: fibers with a stack */
    /* Warps that may have lanes ready: bit i is warp order[i]. */
    uint32_t ready, order[32];
    fake_warp *warp; /* of the thread that ran last */
    char *shared, *dynamic;
    size_t static_bytes;
    std::vector<fake_static> statics;
    fake_warp warps[32];
    fake_fiber fiber[FAKE_THREADS];
};

static struct fake_grid_state {
    const char *name;                                      /* of the kernel */
    int line, threads, warps, residents, running, stopped; /* running: blocks */
    size_t dynamic_bytes, next; /* next: index into order of the next block to start */
    std::vector<uint32_t> order;
    const std::function<void()> *body;
    fake_fiber *now;
    void *host; /* saved stack pointer of the CPU's own stack */
    char *stacks;
    unsigned char *touched[2]; /* read and written: a bit for 2 bytes */
    uint16_t *page[2];         /* number of its bytes that may be accessed, after the first access */
    std::vector<uint32_t> pages[2];
    fake_resident resident[FAKE_RESIDENTS];
#if defined(__SANITIZE_ADDRESS__)
    const void *host_stack;
    size_t host_stack_bytes;
    void *host_asan;
    int from_host;
#endif
} fake_grid;

/* ---- fibers ---- */

/* Saves the registers that a function must preserve on the stack, the stack pointer in *stands, and continues
   at to. */
extern "C" void fake_fiber_switch(void **stands, void *to);
#if defined(__x86_64__)
#define FAKE_FIBER_WORDS 8 /* six registers, the return address, and padding */
#define FAKE_FIBER_ENTRY 6
__asm__(".text\n.p2align 4\n.type fake_fiber_switch,@function\nfake_fiber_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\nmovq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\npopq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size fake_fiber_switch,.-fake_fiber_switch\n");
#elif defined(__aarch64__)
#define FAKE_FIBER_WORDS 20
#define FAKE_FIBER_ENTRY 11
__asm__(".text\n.p2align 4\n.type fake_fiber_switch,@function\nfake_fiber_switch:\n"
        "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, "
        "x26, [sp, #48]\nstp x27, x28, [sp, #64]\n"
        "stp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, "
        "#128]\nstp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\nldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, "
        "[sp, #32]\nldp x25, x26, [sp, #48]\n"
        "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, "
        "#112]\nldp d12, d13, [sp, #128]\n"
        "ldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n.size fake_fiber_switch,.-fake_fiber_switch\n");
#else
#error "fake_kernel.h: fake_fiber_switch is written for x86-64 and arm64"
#endif

/* That this fiber runs. */
static inline void fake_fiber_is(fake_fiber *f) {
    fake_grid.now = f;
    threadIdx = f->thread;
    blockIdx = f->home->index;
}

/* Switches to a fiber; NULL: back to the host. Returns when another fiber switches back. */
static inline void fake_fiber_go(fake_fiber *from, fake_fiber *to) {
#if defined(__SANITIZE_ADDRESS__)
    void **kept = from ? &from->asan : &fake_grid.host_asan;
    if (!from) fake_grid.from_host = 1;
    __sanitizer_start_switch_fiber(kept, to ? to->stack : fake_grid.host_stack,
                                   to ? FAKE_STACK : fake_grid.host_stack_bytes);
#endif
    if (to) fake_fiber_is(to);
    fake_fiber_switch(from ? &from->stands : &fake_grid.host, to ? to->stands : fake_grid.host);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(*kept, fake_grid.from_host ? &fake_grid.host_stack : NULL,
                                    fake_grid.from_host ? &fake_grid.host_stack_bytes : NULL);
    fake_grid.from_host = 0;
#endif
}

/* ---- failures ---- */

/* Ends the launch. */
static inline void fake_kernel_failed(const char *format, ...)
    __attribute__((format(printf, 1, 2), noreturn));
static inline void fake_kernel_failed(const char *format, ...) {
    char text[512];
    const uint3 &b = fake_grid.now->home->index, &t = fake_grid.now->thread;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fake_failed("kernel %s, block %u %u %u, thread %u %u %u: %s, in %s", fake_grid.name, b.x, b.y, b.z, t.x,
                t.y, t.z, text, fake_where(fake_grid.line).c_str());
    fake_grid.stopped = 1;
    fake_fiber_go(fake_grid.now, NULL);
    __builtin_unreachable();
}

/* ---- scheduling ---- */

static inline void fake_warp_wake(fake_warp *w, uint32_t lanes) {
    w->flip = (uint32_t)fake_random(32);
    w->ready = lanes == ~0u ? ~0u : 0;
    if (!w->ready)
        for (uint32_t lane = 0; lane < 32; lane++) w->ready |= (lanes >> lane & 1) << (lane ^ w->flip);
}

static inline uint32_t fake_bits(int count) { return count == 32 ? ~0u : (1u << count) - 1; }

/* All threads of the block that have not returned can run, in a new order. */
static inline void fake_block_wake(fake_resident *r) {
    for (int i = fake_grid.warps; i > 1; i--) std::swap(r->order[i - 1], r->order[fake_random((uint64_t)i)]);
    for (int i = 0; i < fake_grid.warps; i++) fake_warp_wake(&r->warps[i], r->warps[i].live);
    r->ready = fake_bits(fake_grid.warps);
    r->waiting = r->spinning = 0;
}

/* Takes the next thread of the block that can run, of the same warp if possible. */
static inline fake_fiber *fake_block_next(fake_resident *r) {
    fake_warp *w = r->warp;
    while (!w->ready) {
        if (!r->ready) return NULL;
        w = &r->warps[r->order[__builtin_ctz(r->ready)]];
        if (!w->ready) r->ready &= r->ready - 1;
    }
    uint32_t at = (uint32_t)__builtin_ctz(w->ready);
    w->ready &= w->ready - 1;
    r->warp = w;
    return &r->fiber[(size_t)(w - r->warps) * 32 + (at ^ w->flip)];
}

/* Threads that wait for a flag check it again. */
static inline int fake_block_look_again(fake_resident *r) {
    if (!r->spinning) return 0;
    for (int i = 0; i < fake_grid.threads; i++) {
        fake_fiber &f = r->fiber[i];
        if (f.state == FAKE_SPINNING) {
            f.state = FAKE_READY;
            f.warp->ready |= 1u << ((uint32_t)(i % 32) ^ f.warp->flip);
        }
    }
    r->ready = fake_bits(fake_grid.warps);
    r->spinning = 0;
    return 1;
}

/* A random thread of any block; NULL if none can run. */
static inline fake_fiber *fake_grid_next(void) {
    size_t first = (size_t)fake_random((uint64_t)fake_grid.residents);
    for (int again = 1; again;) {
        for (int i = 0; i < fake_grid.residents; i++) {
            fake_fiber *next = fake_block_next(
                &fake_grid.resident[(first + (size_t)i) % (size_t)fake_grid.residents]);
            if (next) return next;
        }
        again = 0;
        for (int i = 0; i < fake_grid.residents; i++) again |= fake_block_look_again(&fake_grid.resident[i]);
    }
    return NULL;
}

/* No thread can run: reports what they wait for. */
static inline void fake_grid_stuck(void) __attribute__((noreturn));
static inline void fake_grid_stuck(void) {
    for (int n = 0; n < fake_grid.residents; n++)
        for (int i = 0; i < fake_grid.warps; i++) {
            fake_resident &r = fake_grid.resident[n];
            const fake_warp &w = r.warps[i];
            if (!r.live || !w.arrived) continue;
            int missing = 0;
            while (w.arrived >> missing & 1) missing++;
            int other = i * 32 + missing;
            fake_grid.now = &r.fiber[i * 32 + __builtin_ctz(w.arrived)];
            fake_kernel_failed("%s of warp %d misses %d lanes: lane %d %s", fake_warp_names[w.kind], i,
                               32 - __builtin_popcount(w.arrived), missing,
                               other >= fake_grid.threads                ? "is none of the block's threads"
                               : r.fiber[other].state == FAKE_AT_BARRIER ? "waits at a barrier"
                                                                         : "has returned");
        }
    fake_kernel_failed("its threads wait for each other");
}

/* The running thread waits, or has returned: others run. Returns at its next turn. elsewhere: threads of any
   block. */
static inline void fake_fiber_yield(int elsewhere) {
    fake_fiber *me = fake_grid.now, *next = elsewhere ? NULL : fake_block_next(me->home);
    if (!next) next = fake_grid_next();
    if (!next && fake_grid.running) fake_grid_stuck();
    if (next != me) fake_fiber_go(me, next);
}

/* ---- threads ---- */

static inline void fake_block_begin(fake_resident *r);
static inline __attribute__((noinline)) void fake_fiber_body(void) { (*fake_grid.body)(); }

/* A fiber runs one thread after another, of the blocks that are active here. */
static inline void fake_fiber_main(void) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, fake_grid.from_host ? &fake_grid.host_stack : NULL,
                                    fake_grid.from_host ? &fake_grid.host_stack_bytes : NULL);
    fake_grid.from_host = 0;
#endif
    fake_fiber *me = fake_grid.now;
    fake_resident *r = me->home;
    for (;;) {
        fake_fiber_is(me);
        fake_fiber_body();
        me->state = FAKE_RETURNED;
        me->warp->live &= ~(1u << me->number % 32);
        r->live--;
        if (r->live && r->waiting == r->live) fake_block_wake(r);
        if (!r->live) {
            fake_grid.running--;
            if (fake_grid.next < fake_grid.order.size()) fake_block_begin(r);
        }
        fake_fiber_yield(0);
    }
}

/* A fresh stack. */
static inline void fake_fiber_fresh(fake_fiber *f) {
    /* Stacks with the same alignment would compete for the same cache sets. */
    size_t colour = (size_t)f->number * 5 % 64 * 64;
    void **top = (void **)(void *)(f->stack + FAKE_STACK - colour);
    ASAN_UNPOISON_MEMORY_REGION(f->stack, FAKE_STACK);
    memset(top - FAKE_FIBER_WORDS, 0, FAKE_FIBER_WORDS * sizeof *top);
    f->stands = top - FAKE_FIBER_WORDS;
    ((void **)f->stands)[FAKE_FIBER_ENTRY] = (void *)fake_fiber_main;
}

static inline void *fake_kernel_map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        perror("fake_kernel: mmap");
        _exit(1);
    }
    return at;
}

#define FAKE_SHARED_MAP \
    ((size_t)320 * 1024) /* static memory from its start, dynamic memory up to a closed page at its end */

/* Memory that all launches share, and as many fibers as this one needs. */
static inline void fake_grid_prepare(void) {
    if (!fake_grid.stacks) {
        fake_grid.stacks = (char *)fake_kernel_map(FAKE_RESIDENTS * FAKE_THREADS * (FAKE_STACK + 4096));
        for (fake_resident &r : fake_grid.resident) {
            r.shared = (char *)fake_kernel_map(FAKE_SHARED_MAP);
            mprotect(r.shared + FAKE_SHARED_MAP - 4096, 4096, PROT_NONE);
        }
        for (int write = 0; write < 2; write++) {
            fake_grid.touched[write] = (unsigned char *)fake_kernel_map(FAKE_ARENA / 16);
            fake_grid.page[write] = (uint16_t *)fake_kernel_map(FAKE_ARENA / 4096 * sizeof(uint16_t));
        }
    }
    for (int n = 0; n < fake_grid.residents; n++) {
        fake_resident &r = fake_grid.resident[n];
        for (; r.made < fake_grid.threads; r.made++) {
            fake_fiber &f = r.fiber[r.made];
            f.number = r.made;
            f.home = &r;
            f.warp = &r.warps[r.made / 32];
            f.stack = fake_grid.stacks + (size_t)(n * FAKE_THREADS + r.made) * (FAKE_STACK + 4096) + 4096;
            mprotect(f.stack - 4096, 4096, PROT_NONE);
            fake_fiber_fresh(&f);
        }
    }
}

/* ---- barriers and warps ---- */

static inline void fake_kernel_sync(int line) {
    fake_resident *r = fake_grid.now->home;
    int elsewhere = 0;
    if (r->waiting == 0) r->barrier_line = line;
    if (r->barrier_line != line)
        fake_kernel_failed("it comes to the barrier of line %d while others wait at that of line %d", line,
                           r->barrier_line);
    fake_grid.now->state = FAKE_AT_BARRIER;
    if (++r->waiting == r->live) {
        fake_block_wake(r); /* this thread too: it continues at its turn */
        elsewhere = fake_grid.residents > 1 && fake_random(2);
        for (int i = 0; i < fake_grid.residents && elsewhere; i++)
            fake_block_look_again(&fake_grid.resident[i]);
    }
    fake_fiber_yield(elsewhere);
    fake_grid.now->state = FAKE_READY;
}

static inline void fake_warp_do(fake_warp *w);

/* The lane has stored its operands in fake_kernel_my_lane(). The last lane to arrive executes the operation
   for all. */
static inline void fake_warp_meet(fake_warp_kind kind) {
    fake_fiber *me = fake_grid.now;
    fake_warp *w = me->warp;
    if (w->arrived == 0) w->kind = kind;
    if (w->kind != kind)
        fake_kernel_failed("its lane comes to %s while others of warp %d are in %s", fake_warp_names[kind],
                           me->number / 32, fake_warp_names[w->kind]);
    w->arrived |= 1u << me->number % 32;
    if (w->arrived == ~0u) {
        w->arrived = 0;
        fake_warp_do(w);
        fake_warp_wake(w, ~0u);
        w->ready &= ~(1u << ((uint32_t)(me->number % 32) ^ w->flip));
        return;
    }
    me->state = FAKE_IN_WARP;
    fake_fiber_yield(0);
    me->state = FAKE_READY;
}

static inline fake_lane &fake_kernel_my_lane(void) {
    return fake_grid.now->warp->lane[fake_grid.now->number % 32];
}
static inline int fake_kernel_lane(void) { return fake_grid.now->number % 32; }
static inline void fake_kernel_warp_sync(void) { fake_warp_meet(FAKE_WARP_SYNC); }

template <class T> static inline T fake_kernel_shuffle(T value, int lane) {
    static_assert(sizeof(T) == 4, "float, int or uint32_t");
    fake_lane &mine = fake_kernel_my_lane();
    T got;
    memcpy(&mine.bits, &value, 4);
    mine.from = lane & 31;
    mine.out = &got;
    fake_warp_meet(FAKE_SHUFFLE);
    return got;
}

static inline int fake_in_shared(const void *p, size_t bytes) {
    const char *at = (const char *)p;
    const fake_resident &r = *fake_grid.now->home;
    return (at >= r.shared && at + bytes <= r.shared + r.static_bytes)
           || (at >= r.dynamic && at + bytes <= r.dynamic + fake_grid.dynamic_bytes);
}

static inline void fake_kernel_ldmatrix(uint32_t r[4], const void *shared, int trans) {
    fake_lane &mine = fake_kernel_my_lane();
    if ((uintptr_t)shared % 16)
        fake_kernel_failed("gpt_cuda_ldmatrix4 reads a row that is not aligned to 16");
    if (!fake_in_shared(shared, 16))
        fake_kernel_failed("gpt_cuda_ldmatrix4 reads a row that does not lie in shared memory");
    mine.in = shared;
    mine.out = r;
    fake_warp_meet(trans ? FAKE_LDMATRIX_TRANS : FAKE_LDMATRIX);
}

static inline void fake_kernel_mma(float d[4], const uint32_t a[4], const uint32_t b[2], int f16) {
    fake_lane &mine = fake_kernel_my_lane();
    mine.in = a;
    mine.more = b;
    mine.out = d;
    fake_warp_meet(f16 ? FAKE_MMA_F16 : FAKE_MMA);
}

/* Inner loops on separate arrays, optimized in every build. */
#if defined(__clang__)
#define FAKE_HOT __attribute__((noinline, no_sanitize("address", "undefined")))
#else
#define FAKE_HOT __attribute__((noinline, optimize("O3"), no_sanitize_address, no_sanitize_undefined))
#endif

/* r[lane][i], of rows[8 i + row of tile i]. */
FAKE_HOT static void fake_tiles(uint32_t (*r)[4], const uint16_t (*rows)[8], int trans) {
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            uint16_t low = trans ? rows[8 * i + 2 * t][g] : rows[8 * i + g][2 * t],
                     high = trans ? rows[8 * i + 2 * t + 1][g] : rows[8 * i + g][2 * t + 1];
            r[lane][i] = low | (uint32_t)high << 16;
        }
    }
}

/* Exponent of a number from its bits; for 0 one that no sum is aligned to. */
static inline int fake_exponent(uint32_t bits) {
    return bits << 1 == 0 ? -1000 : (bits >> 23 & 255) ? (int)(bits >> 23 & 255) : 1;
}
static inline double fake_power(int exponent) {
    uint64_t bits = (uint64_t)(1023 + exponent) << 52;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

/* To f32, cut off. */
static inline float fake_cut(double x) {
    float near = (float)x;
    uint32_t bits;
    memcpy(&bits, &near, 4);
    bits -= fabs((double)near) > fabs(x) && fabs(x) < 3.4028236692093846e38; /* 2^128 */
    memcpy(&near, &bits, 4);
    return near;
}

/* z += x y with the addition of sm_90: the 16 products of an element and z are truncated (not rounded) 25
   binary places after the largest exponent among them. Their sum is exact, and truncated to f32. The exponent
   of a product is the sum of its factors'. Returns 0, without effect, if an operand is not finite. */
FAKE_HOT static int fake_add(float *z, const uint32_t (*x)[16], const uint32_t (*y)[8]) {
    int x_exponent[16][16], y_exponent[16][8], top[16][8], finite = 1;
    double left[16][16], right[16][8];
    float at[16][16];
    uint32_t bits[16][8];
    memcpy(at, x, sizeof at);
    memcpy(bits, z, sizeof bits);
    for (int i = 0; i < 256; i++)
        finite &= (x_exponent[i / 16][i % 16] = fake_exponent(x[i / 16][i % 16])) < 255,
            left[i / 16][i % 16] = (double)at[i / 16][i % 16];
    memcpy(at, y, sizeof right / 2);
    for (int i = 0; i < 128; i++) {
        finite &= (y_exponent[i / 8][i % 8] = fake_exponent(y[i / 8][i % 8])) < 255;
        finite &= (top[i / 8][i % 8] = fake_exponent(bits[i / 8][i % 8])) < 255;
        right[i / 8][i % 8] = (double)at[i / 16][i % 16];
    }
    for (int i = 0; i < 16 && finite; i++, z += 8) {
        double scale[8], sum[8];
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) {
                int exponent = x_exponent[i][k] + y_exponent[k][j] - 127;
                top[i][j] = exponent > top[i][j] ? exponent : top[i][j];
            }
        for (int j = 0; j < 8; j++) {
            if (top[i][j] < -400) top[i][j] = 0; /* only zeros */
            scale[j] = fake_power(25 + 127 - top[i][j]);
            sum[j] = (double)(int32_t)((double)z[j] * scale[j]);
        }
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) sum[j] += (double)(int32_t)(left[i][k] * right[k][j] * scale[j]);
        for (int j = 0; j < 8; j++) z[j] = fake_cut(sum[j] * fake_power(top[i][j] - 25 - 127));
    }
    return finite;
}

/* 1 = products are added with the CPU's rounding, in a sixth of the time: for runs whose numbers are not
   compared, or only with the same run. */
static int fake_rounds;

/* The bits of a number as f32. */
static inline uint32_t fake_wide_bits(uint32_t half, int f16) {
    if (!f16) return half << 16;
    const float wide = __half2float(__ushort_as_half((uint16_t)half));
    memcpy(&half, &wide, 4);
    return half;
}

/* In and out by lanes. */
FAKE_HOT static void fake_product(float (*d)[4], const uint32_t (*a)[4], const uint32_t (*b)[2], int f16) {
    typedef float four __attribute__((vector_size(16)));
    union {
        uint32_t bits[16][16];
        float at[16][16];
    } x;
    union {
        uint32_t bits[16][8];
        float at[16][8];
        four row[16][2];
    } y, z;
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
            x.bits[row][column] = fake_wide_bits(a[lane][i] & 0xffff, f16);
            x.bits[row][column + 1] = fake_wide_bits(a[lane][i] >> 16, f16);
            z.at[g + i / 2 * 8][2 * t + i % 2] = d[lane][i];
        }
        for (int i = 0; i < 2; i++) {
            y.bits[2 * t + i * 8][g] = fake_wide_bits(b[lane][i] & 0xffff, f16);
            y.bits[2 * t + i * 8 + 1][g] = fake_wide_bits(b[lane][i] >> 16, f16);
        }
    }
    if (fake_rounds || !fake_add(&z.at[0][0], x.bits, y.bits))
        for (int i = 0; i < 256; i++) {
            four factor = {x.at[i / 16][i % 16], x.at[i / 16][i % 16], x.at[i / 16][i % 16],
                           x.at[i / 16][i % 16]};
            z.row[i / 16][0] += factor * y.row[i % 16][0];
            z.row[i / 16][1] += factor * y.row[i % 16][1];
        }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) d[lane][i] = z.at[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

static inline void fake_warp_ldmatrix(fake_warp *w, int trans) {
    uint16_t rows[32][8];
    uint32_t r[32][4];
    for (int lane = 0; lane < 32; lane++) memcpy(rows[lane], w->lane[lane].in, 16);
    fake_tiles(r, rows, trans);
    for (int lane = 0; lane < 32; lane++) memcpy(w->lane[lane].out, r[lane], 16);
}

static inline void fake_warp_mma(fake_warp *w, int f16) {
    uint32_t a[32][4], b[32][2];
    float d[32][4];
    for (int lane = 0; lane < 32; lane++) {
        memcpy(a[lane], w->lane[lane].in, 16);
        memcpy(b[lane], w->lane[lane].more, 8);
        memcpy(d[lane], w->lane[lane].out, 16);
    }
    fake_product(d, a, b, f16);
    for (int lane = 0; lane < 32; lane++) memcpy(w->lane[lane].out, d[lane], 16);
}

static inline void fake_warp_do(fake_warp *w) {
    switch (w->kind) {
    case FAKE_SHUFFLE:
        for (fake_lane &mine : w->lane) memcpy(mine.out, &w->lane[mine.from].bits, 4);
        break;
    case FAKE_LDMATRIX: fake_warp_ldmatrix(w, 0); break;
    case FAKE_LDMATRIX_TRANS: fake_warp_ldmatrix(w, 1); break;
    case FAKE_MMA: fake_warp_mma(w, 0); break;
    case FAKE_MMA_F16: fake_warp_mma(w, 1); break;
    default: break;
    }
}

/* ---- global memory ---- */

/* The first access of a launch to a page, and one that is wrong. */
static inline __attribute__((noinline)) void fake_kernel_look(const void *p, size_t bytes, int write) {
    const char *what = write ? "writes" : "reads", *wrong = NULL;
    size_t offset = (size_t)((const char *)p - fake.base);
    int device = fake.running->device;
    if ((uintptr_t)p % bytes)
        fake_kernel_failed("it %s %zu bytes at %s, which is not aligned to that", what, bytes,
                           fake_name(p).c_str());
    if (!fake_in_arena(p))
        fake_kernel_failed("it %s %zu bytes at %p, which is %s", what, bytes, p,
                           fake_in_shared(p, 1) ? "shared memory"
                           : (uintptr_t)p >> 20 ? "memory of the host"
                                                : "near NULL");
    fake_block *block = fake_block_of(p);
    if (!block) { /* possibly the end of the allocation before it */
        std::map<uintptr_t, fake_block>::iterator i = fake.blocks.upper_bound((uintptr_t)p);
        if (i == fake.blocks.begin())
            fake_kernel_failed("it %s %zu bytes outside every allocation", what, bytes);
        --i;
        fake_kernel_failed("it %s %zu bytes at %s+%zu, and that has %zu bytes", what, bytes,
                           i->second.name.c_str(), (size_t)((uintptr_t)p - i->first), i->second.bytes);
    }
    if (!block->live)
        wrong = "has been freed";
    else if ((const char *)p + bytes > block->at + block->bytes)
        wrong = "runs over the end of its allocation";
    else if (block->is_device && block->device != device)
        wrong = "is memory of another device";
    if (wrong)
        fake_kernel_failed("it %s %zu bytes at %s, which %s", what, bytes, fake_name(p).c_str(), wrong);
    fake_grid.pages[write].push_back((uint32_t)(offset / 4096));
    fake_grid.page[write][offset / 4096] = (uint16_t)std::min(
        (size_t)4096, block->bytes - (size_t)((const char *)p - block->at) / 4096 * 4096);
}

/* The real address of the bytes. */
template <size_t BYTES> static inline char *fake_kernel_reach(const void *p, int write) {
    size_t offset = (size_t)((const char *)p - fake.base);
    if (__builtin_expect(offset >= FAKE_ARENA || offset % BYTES
                             || offset % 4096 + BYTES > fake_grid.page[write][offset / 4096],
                         0))
        fake_kernel_look(p, BYTES, write);
    fake_grid.touched[write][offset / 16] |= (unsigned char)(((1u << BYTES / 2) - 1) << (offset / 2 & 7));
    return fake.real + offset;
}

template <size_t BYTES> static inline void fake_kernel_load(void *out, const void *global) {
    memcpy(out, fake_kernel_reach<BYTES>(global, 0), BYTES);
}
template <size_t BYTES> static inline void fake_kernel_store(void *global, const void *in) {
    memcpy(fake_kernel_reach<BYTES>(global, 1), in, BYTES);
}

static inline int fake_kernel_atomic_add(int *global, int value) {
    fake_kernel_reach<4>(global, 0);
    int *at = (int *)(void *)fake_kernel_reach<4>(global, 1), old = *at;
    *at = (int)((unsigned)old + (unsigned)value);
    return old;
}
static inline void fake_kernel_release(int *global, int value) { fake_kernel_store<4>(global, &value); }

/* If the flag is unchanged since the last read, other threads run first, and the flag is read again. */
static inline int fake_kernel_acquire(const int *global) {
    fake_fiber *me = fake_grid.now;
    int value;
    fake_kernel_load<4>(&value, global);
    if (me->spins_on != global || me->flag != value) me->spins = 0;
    me->spins_on = global;
    me->flag = value;
    if (me->spins++ == 0) return value;
    if (me->spins > FAKE_SPINS)
        fake_kernel_failed("it waits for ever for the flag at %s, which is %d", fake_name(global).c_str(),
                           value);
    me->state = FAKE_SPINNING;
    me->home->spinning = 1;
    fake_fiber_yield(1);
    me->state = FAKE_READY;
    fake_kernel_load<4>(&value, global);
    return value;
}

/* ---- shared memory ---- */

static inline unsigned char *fake_kernel_dynamic_shared(void) {
    return (unsigned char *)fake_grid.now->home->dynamic;
}

/* The static memory of a declaration, found by its key. */
static inline void *fake_kernel_shared(const void *key, size_t bytes) {
    fake_resident &r = *fake_grid.now->home;
    for (const fake_static &known : r.statics)
        if (known.key == key) return known.at;
    char *at = r.shared + r.static_bytes;
    if (r.static_bytes + bytes > 16 * 1024)
        fake_kernel_failed("its static shared memory takes more than 16 KiB");
    if (r.static_bytes + bytes + fake_grid.dynamic_bytes > FAKE_SHARED)
        fake_kernel_failed("its shared memory takes more than 227 KiB");
    r.static_bytes += (bytes + 15) / 16 * 16;
    ASAN_UNPOISON_MEMORY_REGION(at, bytes);
    memset(at, 0xff, bytes);
    r.statics.push_back({key, at, bytes});
    return at;
}

static inline void fake_kernel_copy_async16(void *shared, const void *global, int valid) {
    fake_fiber *me = fake_grid.now;
    if ((uintptr_t)shared % 16)
        fake_kernel_failed("gpt_cuda_copy_async16 writes to shared memory that is not aligned to 16");
    if ((uintptr_t)global % 16) fake_kernel_failed("gpt_cuda_copy_async16 reads what is not aligned to 16");
    if (!fake_in_shared(shared, 16))
        fake_kernel_failed("gpt_cuda_copy_async16 writes to what does not lie in shared memory");
    me->copies.push_back({(char *)shared, valid ? fake_kernel_reach<16>(global, 0) : NULL, me->group});
    memset(shared, 0xff, 16);
}
static inline void fake_kernel_copy_commit(void) { fake_grid.now->group++; }
static inline void fake_kernel_copy_wait(int newest) {
    fake_fiber *me = fake_grid.now;
    for (; me->copied < me->copies.size() && me->copies[me->copied].group < me->group - newest;
         me->copied++) {
        const fake_copy &copy = me->copies[me->copied];
        if (copy.from)
            memcpy(copy.to, copy.from, 16);
        else
            memset(copy.to, 0, 16);
    }
    if (me->copied == me->copies.size()) {
        me->copies.clear();
        me->copied = 0;
    }
}

/* ---- blocks and grids ---- */

static inline void fake_block_begin(fake_resident *r) {
    uint32_t block = fake_grid.order[fake_grid.next++];
    r->index.x = block % gridDim.x;
    r->index.y = block / gridDim.x % gridDim.y;
    r->index.z = block / gridDim.x / gridDim.y;
    r->live = fake_grid.threads;
    fake_grid.running++;
    for (int i = 0; i < fake_grid.warps; i++) {
        r->warps[i].live = fake_bits(std::min(32, fake_grid.threads - i * 32));
        r->warps[i].arrived = 0;
        r->order[i] = (uint32_t)i;
    }
    for (int i = 0; i < fake_grid.threads; i++) {
        fake_fiber &f = r->fiber[i];
        f.state = FAKE_READY;
        f.group = f.spins = 0;
        f.copied = 0;
        f.copies.clear();
    }
    for (const fake_static &known : r->statics) memset(known.at, 0xff, known.bytes);
    memset(r->dynamic, 0xff, fake_grid.dynamic_bytes);
    fake_block_wake(r);
    r->warp = &r->warps[r->order[0]];
}

/* Before the first block of a launch here. */
static inline void fake_resident_prepare(fake_resident *r) {
    r->static_bytes = 0;
    r->statics.clear();
    r->dynamic = r->shared + FAKE_SHARED_MAP - 4096 - (fake_grid.dynamic_bytes + 127) / 128 * 128;
    ASAN_POISON_MEMORY_REGION(r->shared, FAKE_SHARED_MAP - 4096);
    ASAN_UNPOISON_MEMORY_REGION(r->dynamic, fake_grid.dynamic_bytes);
    for (int i = 0; i < fake_grid.threads; i++) {
        unsigned n = (unsigned)i;
        r->fiber[i].thread = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    }
}

/* After a failure fibers are suspended anywhere: they start again. */
static inline void fake_grid_forget(void) {
    for (fake_resident &r : fake_grid.resident)
        for (int i = 0; i < r.made; i++) fake_fiber_fresh(&r.fiber[i]);
}

/* The ranges that were accessed, in order; then starts with none. */
static inline void fake_kernel_ranges(int write, std::vector<fake_range> &ranges) {
    std::vector<uint32_t> &pages = fake_grid.pages[write];
    size_t first = ranges.size();
    std::sort(pages.begin(), pages.end());
    for (uint32_t page : pages) {
        unsigned char *bits = fake_grid.touched[write] + (size_t)page * 256;
        for (int i = 0; i < 256; i++) {
            for (int bit = 0; bits[i] && bit < 8; bit++) {
                if (!(bits[i] >> bit & 1)) continue;
                const char *at = fake.base + (size_t)page * 4096 + (size_t)(i * 16 + bit * 2);
                int whole = bits[i] == 0xff;
                size_t bytes = whole ? 16 : 2;
                if (ranges.size() > first && (const char *)ranges.back().at + ranges.back().bytes == at)
                    ranges.back().bytes += bytes;
                else
                    ranges.push_back({at, bytes, write});
                if (whole) break;
            }
        }
        memset(bits, 0, 256);
        fake_grid.page[write][page] = 0;
    }
    pages.clear();
}

/* Order of blocks: ascending, descending, or random. */
static inline void fake_grid_shuffle(size_t blocks) {
    std::vector<uint32_t> &order = fake_grid.order;
    uint64_t way = fake_random(3);
    order.resize(blocks);
    for (size_t i = 0; i < blocks; i++) order[i] = (uint32_t)(way == 1 ? blocks - 1 - i : i);
    for (size_t i = blocks; way == 2 && i > 1; i--) std::swap(order[i - 1], order[fake_random(i)]);
}

/* The kernel, when the stream gets to it. */
static inline void fake_kernel_run(const char *name, dim3 grid, dim3 block, size_t shared_bytes,
                                   const std::function<void()> &body, int line) {
    cudaStream_t s = fake.running;
    std::vector<fake_range> ranges;
    fake_grid_shuffle((size_t)grid.x * grid.y * grid.z);
    fake_grid.name = name;
    fake_grid.line = line;
    fake_grid.threads = (int)(block.x * block.y * block.z);
    fake_grid.warps = (fake_grid.threads + 31) / 32;
    fake_grid.residents = (int)std::min(fake_grid.order.size(), (size_t)(1 + fake_random(FAKE_RESIDENTS)));
    fake_grid.dynamic_bytes = shared_bytes;
    fake_grid.body = &body;
    fake_grid.running = fake_grid.stopped = 0;
    fake_grid.next = 0;
    gridDim = grid;
    blockDim = block;
    fake_grid_prepare();
    for (int i = 0; i < fake_grid.residents; i++) {
        fake_resident_prepare(&fake_grid.resident[i]);
        fake_block_begin(&fake_grid.resident[i]);
    }
    fake_fiber_go(NULL, fake_grid_next());
    if (fake_grid.stopped) fake_grid_forget();
    for (int write = 0; write < 2; write++) fake_kernel_ranges(write, ranges);
    for (const fake_range &range : ranges) fake_touch(range, s->timeline, s->clock, line);
}

static inline cudaError_t fake_kernel_launch(const char *name, dim3 grid, dim3 block, size_t shared_bytes,
                                             cudaStream_t stream, const std::function<void()> &body) {
    FAKE_CALL(0, "cudaLaunchKernel(%s, %u x %u x %u, %u, %s)", name, grid.x, grid.y, grid.z,
              block.x * block.y * block.z, fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    int line = call.line;
    if (call.fault || !s) return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (s->device != fake_me.device) {
        fake_failed("the stream is another device's: %s", fake_where(line).c_str());
        return cudaErrorInvalidResourceHandle;
    }
    if ((uint64_t)block.x * block.y * block.z > FAKE_THREADS || block.x * block.y * block.z == 0
        || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 || grid.z == 0
        || grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (shared_bytes > FAKE_SHARED) return cudaErrorInvalidValue;
    return fake_enqueue_work(stream, line, {},
                             [=] { fake_kernel_run(name, grid, block, shared_bytes, body, line); });
}

#if defined(FAKE_POP_OPTIONS)
#pragma GCC pop_options
#undef FAKE_POP_OPTIONS
#endif

#endif /* DDP_TEST_FAKE_KERNEL_H */

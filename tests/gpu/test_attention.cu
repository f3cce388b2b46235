/*  test_attention.cu - examples/gpt/gpt_cuda_attention.cuh against the CPU's attention in gpt.h, on inputs that
    are exact in bf16.

    test_attention        on a device, or with DDP_TEST_ON_CPU on the fake GPU, whose seed chooses the order
                          of threads and blocks.
    Status 77: no device. Arrays are between bytes that are NaN in every dtype, and results and workspace
    start with such bytes. A second run in the same workspace, or in another order, has the same bits. */
#if defined(DDP_TEST_ON_CPU)
#include "../support/host_only.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* each test needs some of it */
#include "../support/fake_nccl.h"
#pragma GCC diagnostic pop
#include "../support/fake_kernel.h"
#include "../support/fake_cuda_names.h"
#elif !defined(DDP_IMPLEMENTATION)
#define DDP_IMPLEMENTATION
#endif
#include "../../examples/gpt/gpt_cuda_attention.cuh"
#include "../../examples/gpt/gpt.h"
#include "../support/random.h"
#include "../support/watchdog.h"
#include <vector>

#define GUARD 256 /* bytes on both sides of an array */

static int attention_failures, attention_checks;
/* With checks of each access: fewer cases. */
static int attention_short(void) { return getenv("DDP_TEST_SANITIZED") != NULL; }

static void expect(int good, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void expect(int good, const char *format, ...) {
    va_list args;
    attention_checks++;
    if (good || ++attention_failures > 20) return;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}
#define CUDA(call) expect((call) == cudaSuccess, "line %d: %s", __LINE__, #call)

/* ---- arrays ---- */

struct array {
    unsigned char *memory;
    size_t bytes, guard;
    void *at() const { return memory + guard; }
};

/* On the device, all NaN. guard 0: the fake GPU detects accesses outside. */
static array array_make(size_t bytes, size_t guard) {
    array a = {NULL, bytes, guard};
    CUDA(cudaMalloc(&a.memory, bytes + 2 * guard));
    CUDA(cudaMemset(a.memory, 0xff, bytes + 2 * guard));
    return a;
}

static void array_up(const array &a, const void *from) {
    CUDA(cudaMemcpy(a.at(), from, a.bytes, cudaMemcpyHostToDevice));
}

/* The contents, after checking that the guards are unchanged. */
static std::vector<unsigned char> array_down(const array &a, const char *name) {
    std::vector<unsigned char> all(a.bytes + 2 * a.guard);
    size_t touched = 0;
    CUDA(cudaMemcpy(all.data(), a.memory, all.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < a.guard; i++) touched += (all[i] != 0xff) + (all[a.guard + a.bytes + i] != 0xff);
    expect(touched == 0, "%s: %zu bytes outside of it are written", name, touched);
    return std::vector<unsigned char>(all.begin() + (long)a.guard, all.begin() + (long)(a.guard + a.bytes));
}

static float float_of(ddp_dtype dtype, uint16_t bits) {
    gpt_bf16 bf16 = {bits};
    gpt_f16 f16 = {bits};
    return dtype == DDP_F16 ? gpt_cuda_to_float(f16) : gpt_cuda_to_float(bf16);
}

static std::vector<float> as_floats(const std::vector<unsigned char> &bytes, ddp_dtype dtype) {
    std::vector<float> x(bytes.size() / (dtype == DDP_F32 ? 4 : 2));
    for (size_t i = 0; i < x.size(); i++) {
        uint16_t bits;
        if (dtype == DDP_F32) {
            memcpy(&x[i], &bytes[4 * i], 4);
            continue;
        }
        memcpy(&bits, &bytes[2 * i], 2);
        x[i] = float_of(dtype, bits);
    }
    return x;
}

static std::vector<unsigned char> as_bytes(const std::vector<float> &x, ddp_dtype dtype) {
    std::vector<unsigned char> bytes(x.size() * (dtype == DDP_F32 ? 4 : 2));
    for (size_t i = 0; i < x.size(); i++) {
        uint16_t half = gpt_cuda_round_bf16(x[i]).bits;
        if (dtype == DDP_F16) half = gpt_cuda_round_f16(x[i]).bits;
        memcpy(&bytes[i * (dtype == DDP_F32 ? 4 : 2)],
               dtype == DDP_F32 ? (const void *)&x[i] : (const void *)&half, dtype == DDP_F32 ? 4 : 2);
    }
    return bytes;
}

/* Normal numbers, as bf16 holds them. */
static std::vector<float> numbers(size_t count, float deviation) {
    std::vector<float> x(count);
    for (float &value : x) {
        double sum = -6;
        for (int i = 0; i < 12; i++) sum += (double)(random_u64() >> 11) / 9007199254740992.0;
        value = gpt_cuda_to_float(gpt_cuda_round_bf16((float)sum * deviation));
    }
    return x;
}

/* ---- a case ---- */

struct shape {
    int B, T, NH, HS;
};

struct attention_case {
    gpt_cuda_attention it;
    const char *title;
    std::vector<float> qkv, d_out, out, lse, d_qkv; /* the last three: of the CPU */
};

static void case_reference(attention_case *c) {
    const gpt_cuda_attention &it = c->it;
    gpt_config config = {1, it.length, 1, it.heads, it.heads * it.head_size};
    gpt_pass pass;
    std::vector<float> scratch(gpt_scratch_floats(&config, it.length) + 16);
    memset(&pass, 0, sizeof pass);
    pass.config = &config;
    pass.batch = it.batch;
    pass.length = it.length;
    pass.scratch = scratch.data() + (64 - (uintptr_t)scratch.data() % 64) % 64 / 4;
    c->out.resize(c->d_out.size());
    c->d_qkv.resize(c->qkv.size());
    c->lse.resize((size_t)it.batch * (size_t)it.heads * (size_t)it.length);
    gpt_attention(&pass, c->out.data(), c->lse.data(), c->qkv.data());
    gpt_attention_backward(&pass, c->d_qkv.data(), c->d_out.data(), c->out.data(), c->lse.data(),
                           c->qkv.data());
}

static attention_case case_make(ddp_dtype dtype, shape s, float deviation) {
    static char title[128];
    attention_case c;
    size_t count = (size_t)s.B * (size_t)s.T * (size_t)s.NH * (size_t)s.HS;
    snprintf(title, sizeof title, "%s B=%d T=%d NH=%d HS=%d deviation=%g", ddp_dtype_name(dtype), s.B, s.T,
             s.NH, s.HS, (double)deviation);
    memset(&c.it, 0, sizeof c.it);
    c.it.batch = s.B;
    c.it.length = s.T;
    c.it.heads = s.NH;
    c.it.head_size = s.HS;
    c.it.dtype = dtype;
    c.title = title;
    c.qkv = numbers(3 * count, deviation);
    c.d_out = numbers(count, 1);
    return c;
}

struct attention_run {
    std::vector<unsigned char> out, lse, d_qkv;
};

/* Forward and backward times times, with the same workspace and stream; every run has the bits of the first
   one. */
static attention_run case_run(attention_case *c, int times, size_t guard) {
    size_t size = c->it.dtype == DDP_F32 ? 4 : 2;
    array qkv = array_make(c->qkv.size() * size, guard), out = array_make(c->d_out.size() * size, guard),
          d_out = array_make(out.bytes, guard);
    array d_qkv = array_make(qkv.bytes, guard),
          lse = array_make((size_t)c->it.batch * (size_t)c->it.heads * (size_t)c->it.length * 4, guard);
    array workspace = array_make(gpt_cuda_attention_workspace(&c->it), guard);
    attention_run first, again;
    CUDA(cudaStreamCreateWithFlags(&c->it.stream, cudaStreamNonBlocking));
    array_up(qkv, as_bytes(c->qkv, c->it.dtype).data());
    array_up(d_out, as_bytes(c->d_out, c->it.dtype).data());
    CUDA(cudaStreamSynchronize(0));
    for (int i = 0; i < times; i++) {
        CUDA(cudaMemsetAsync(out.at(), 0xff, out.bytes, c->it.stream));
        CUDA(cudaMemsetAsync(lse.at(), 0xff, lse.bytes, c->it.stream));
        CUDA(cudaMemsetAsync(d_qkv.at(), 0xff, d_qkv.bytes, c->it.stream));
        expect(gpt_cuda_attention_forward(&c->it, qkv.at(), out.at(), (float *)lse.at()) == DDP_OK, "%s",
               ddp_last_error());
        expect(gpt_cuda_attention_backward(&c->it, qkv.at(), out.at(), (const float *)lse.at(), d_out.at(),
                                           d_qkv.at(), workspace.at())
                   == DDP_OK,
               "%s", ddp_last_error());
        CUDA(cudaStreamSynchronize(c->it.stream));
        attention_run *run = i == 0 ? &first : &again;
        run->out = array_down(out, "out");
        run->lse = array_down(lse, "lse");
        run->d_qkv = array_down(d_qkv, "d_qkv");
        if (i > 0)
            expect(first.out == again.out && first.lse == again.lse && first.d_qkv == again.d_qkv,
                   "%s: run %d has other bits", c->title, i);
    }
    array_down(workspace, "the workspace");
    array_down(qkv, "qkv");
    CUDA(cudaStreamDestroy(c->it.stream));
    for (const array *a : {&qkv, &out, &d_out, &d_qkv, &lse, &workspace}) CUDA(cudaFree(a->memory));
    return first;
}

/* got against want (count values from from on, of in a row, rows row apart), relative to the largest, which
   counts as at least least: returns the worst and the mean error. */
static void close_to(const attention_case &c, const char *name, const std::vector<float> &got,
                     const std::vector<float> &want, size_t from, size_t of, size_t row, double worst_allowed,
                     double mean_allowed, double least = 1e-30) {
    double largest = least, worst = 0, sum = 0;
    size_t count = 0, bad = 0;
    for (size_t i = from; i < want.size(); i += row)
        for (size_t j = i; j < i + of; j++, count++) {
            double error = fabs((double)got[j] - want[j]);
            if (!(error < 1e30)) {
                bad++;
                continue;
            }
            if (fabs((double)want[j]) > largest) largest = fabs((double)want[j]);
            if (error > worst) worst = error;
            sum += error;
        }
    expect(bad == 0, "%s: %s: %zu of %zu values are no numbers", c.title, name, bad, count);
    expect(worst <= worst_allowed * largest && sum <= mean_allowed * largest * (double)count,
           "%s: %s: worst error %.3g, mean %.3g of the largest, %.3g", c.title, name, worst / largest,
           sum / (double)count / largest, largest);
}

/* worst and mean error allowed; gradients 0: only checks that they are numbers */
static void case_compare(attention_case *c, const attention_run &run, double worst, double mean,
                         int gradients) {
    std::vector<float> d_qkv = as_floats(run.d_qkv, c->it.dtype);
    size_t C = (size_t)c->it.heads * (size_t)c->it.head_size;
    case_reference(c);
    close_to(*c, "out", as_floats(run.out, c->it.dtype), c->out, 0, C, C, worst, mean);
    /* The error is that of probabilities, which are relative, however small lse is. */
    close_to(*c, "lse", as_floats(run.lse, DDP_F32), c->lse, 0, 1, 1, 3e-6, 1e-6, 1);
    if (!gradients) worst = mean = 1e30;
    if (c->it.length == 1) { /* the only probability is 1, and its gradient is only rounding */
        for (size_t i = 0; i < d_qkv.size(); i++)
            if (i % (3 * C) < 2 * C)
                expect(fabsf(d_qkv[i]) <= 0.1f, "%s: gradient %g of a query or key that changes nothing",
                       c->title, (double)d_qkv[i]);
    } else {
        close_to(*c, "dQ", d_qkv, c->d_qkv, 0, C, 3 * C, worst, mean);
        close_to(*c, "dK", d_qkv, c->d_qkv, C, C, 3 * C, worst, mean);
    }
    close_to(*c, "dV", d_qkv, c->d_qkv, 2 * C, C, 3 * C, worst, mean);
}

static void check_shape(ddp_dtype dtype, shape s, float deviation, int times) {
    attention_case c = case_make(dtype, s, deviation);
    attention_run run = case_run(&c, times, random_u64() % 2 * GUARD);
    if (dtype == DDP_F32)
        case_compare(&c, run, 1e-5, 2e-6, 1);
    else if (dtype == DDP_F16)
        case_compare(&c, run, 2e-3, 4e-4, 1);
    else
        case_compare(&c, run, 1e-2, 2e-3, 1);
}

/* ---- the cases ---- */

#if defined(DDP_TEST_ON_CPU)
static const int lengths[] = {1, 2, 16, 33, 64, 65, 127, 129, 200};
#else
static const int lengths[] = {1,   2,   3,   7,   8,   9,   15,  16,  17,  31,  32,  33,  47,  48,  49,
                              63,  64,  65,  95,  96,  97,  100, 111, 127, 128, 129, 130, 159, 160, 161,
                              177, 191, 192, 193, 199, 200, 255, 256, 257, 300, 384, 500, 512, 513, 1000};
#endif

/* Tensor cores: every length at some head size, and each head size with several heads and sequences. */
static void check_fast(void) {
    static const int sizes[] = {64, 32, 128};
    int turn = 0;
    for (int T : lengths)
        if (!attention_short() || T % 3 == 0) check_shape(DDP_BF16, {1, T, 1, sizes[turn % 3]}, 1, 1), turn++;
    for (int HS : sizes) check_shape(DDP_BF16, {2, 70, 2, HS}, 1.5f, 2);
    check_shape(DDP_BF16, {1, 400, 1, 64}, 1, 2); /* four tiles of keys */
    check_shape(DDP_F16, {2, 150, 1, 64}, 1.5f, 1);
    check_shape(DDP_F16, {1, 70, 1, 128}, 1.5f, 1);
}

static void check_plain(void) {
    static const int sizes[] = {64, 5, 32, 96, 256, 1, 12};
    int turn = 0;
    for (int T : lengths) {
        int half = turn % 4 == 3;
        if (!attention_short() || T % 3 == 0)
            check_shape(half ? DDP_BF16 : DDP_F32, {1, T, 1, half ? 80 : sizes[turn % 7]}, 1, 1);
        turn++;
    }
    check_shape(DDP_F32, {2, 40, 3, 24}, 1.5f, 2);
    check_shape(DDP_BF16, {2, 40, 3, 7}, 1.5f, 2);
    check_shape(DDP_F16, {1, 40, 2, 32}, 1.5f, 1);
    check_shape(DDP_F16, {1, 33, 1, 80}, 1, 1);
}

/* Scores of thousands, of millions, and all the same. */
static void check_extremes(void) {
    static const ddp_dtype dtypes[] = {DDP_BF16, DDP_F32};
    for (ddp_dtype dtype : dtypes)
        for (float deviation : {0.0f, 30.0f, 1000.0f}) {
            attention_case c = case_make(dtype, {1, 140, 1, 64}, deviation);
            std::vector<float> values = numbers(c.d_out.size(), 1);
            for (size_t t = 0; t < 140; t++)
                for (size_t i = 0; i < 64; i++) c.qkv[t * 192 + 128 + i] = values[t * 64 + i];
            attention_run run = case_run(&c, 1, GUARD);
            case_compare(&c, run, 1e-2, 1e-3, deviation == 0);
        }
}

#if defined(DDP_TEST_ON_CPU)
/* The order of threads and blocks changes nothing. Most of the seeds test blocks that wait for each other. */
static void check_orders(void) {
    static const struct {
        shape s;
        ddp_dtype dtype;
        uint64_t seeds;
    } cases[] = {
        {{1, 520, 1, 32}, DDP_BF16, 12},
        {{1, 150, 2, 64}, DDP_BF16, 3},
        {{1, 150, 2, 128}, DDP_BF16, 3},
        {{1, 150, 2, 64}, DDP_F32, 3},
    };
    for (size_t which = 0; which < sizeof cases / sizeof cases[0]; which++) {
        attention_case c = case_make(cases[which].dtype, cases[which].s, 1);
        attention_run first;
        /* Sanitizers look at accesses. */
        for (uint64_t seed = 1; seed <= cases[which].seeds / (DDP_TEST_SLOWDOWN > 1 ? 3 : 1); seed++) {
            fake_start(1, seed * 7919);
            attention_run run = case_run(&c, 1, 0);
            if (seed == 1) first = run;
            expect(first.out == run.out && first.lse == run.lse && first.d_qkv == run.d_qkv,
                   "%s: other bits with seed %d", c.title, (int)seed);
            expect(fake_failures() == 0, "%s: the fake GPU found the failures above", c.title);
        }
    }
}
#else
/* More blocks than run at a time: the bits are the same in any order. The first sequence is compared with the
   CPU's. */
static void check_orders(void) {
    static const shape shapes[] = {
        {8, 1024, 12, 64}, {4, 1000, 12, 128}, {8, 1024, 12, 32}, {2, 4096, 4, 64}, {4, 300, 12, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        shape s = shapes[i];
        if (attention_short()) s.B = 1, s.T = 300;
        attention_case c = case_make(i == 4 ? DDP_F32 : DDP_BF16, s, 1);
        attention_run run = case_run(&c, attention_short() ? 2 : 20, GUARD);
        c.it.batch = 1;
        c.qkv.resize(c.qkv.size() / (size_t)s.B);
        c.d_out.resize(c.d_out.size() / (size_t)s.B);
        if (i == 4)
            case_compare(&c, run, 1e-5, 2e-6, 1);
        else
            case_compare(&c, run, 1e-2, 2e-3, 1);
    }
}
#endif

static void refused(ddp_result result, const char *says) {
    expect(result == DDP_ERR_INVALID && strstr(ddp_last_error(), says), "not '%s' but '%s'", says,
           ddp_last_error());
}

/* Invalid arguments return an error, and nothing runs. */
static void check_refusals(void) {
    static const struct {
        gpt_cuda_attention it;
        const char *says;
    } wrong[] = {
        {{0, 8, 1, 64, DDP_BF16, 0}, "must be at least 1"},
        {{1, 0, 1, 64, DDP_BF16, 0}, "must be at least 1"},
        {{1, 8, -1, 64, DDP_BF16, 0}, "must be at least 1"},
        {{1, 8, 1, 0, DDP_BF16, 0}, "must be at least 1"},
        {{1, 8, 1, 257, DDP_F32, 0}, "head_size must be at most 256"},
        {{1, 8, 1, 64, DDP_F64, 0}, "dtype must be"},
        {{1 << 15, 1 << 16, 1, 64, DDP_BF16, 0}, "below 2^31"},
    };
    gpt_cuda_attention good = {1, 8, 1, 64, DDP_DTYPE_DEFAULT, 0};
    char *p = (char *)(uintptr_t)4096; /* never followed */
    expect(gpt_cuda_attention_check(&good) == NULL && gpt_cuda_attention_workspace(&good) >= 8 * 64 * 4,
           "a good description is refused");
    expect(gpt_cuda_attention_check(NULL) != NULL, "no description is taken");
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const char *says = gpt_cuda_attention_check(&wrong[i].it);
        expect(says && strstr(says, wrong[i].says), "case %zu returned: %s", i, says ? says : "nothing");
        expect(gpt_cuda_attention_workspace(&wrong[i].it) == 0, "case %zu has a workspace", i);
        refused(gpt_cuda_attention_forward(&wrong[i].it, p, p, (float *)p), wrong[i].says);
    }
    refused(gpt_cuda_attention_forward(&good, NULL, p, (float *)p),
            "gpt_cuda_attention_forward: qkv is NULL");
    refused(gpt_cuda_attention_forward(&good, p, p + 8, (float *)p), "out is not aligned");
    refused(gpt_cuda_attention_backward(&good, p, p, (float *)p, p, p + 64, NULL), "workspace is NULL");
    refused(gpt_cuda_attention_backward(&good, p, p, (float *)p, p, p, p), "d_qkv is qkv");
    expect(gpt_cuda_attention_flops(&good, 0) == 2.0 * 2 * 36 * 64
               && gpt_cuda_attention_flops(&good, 1) == 5.0 * 2 * 36 * 64,
           "flops");
}

static int table_row(const char *name, void (*run)(void)) {
    double start = ddp_now();
    attention_failures = attention_checks = 0;
#if defined(DDP_TEST_ON_CPU)
    fake_start(1, (uint64_t)name[0]);
#endif
    run();
#if defined(DDP_TEST_ON_CPU)
    expect(fake_failures() == 0, "%s: the fake GPU found the failures above", name);
    expect(fake_left().empty(), "%s leaks:\n%s", name, fake_left().c_str());
#endif
    printf("%-28s %8d checks  %6d failed  %7.2f s\n", name, attention_checks, attention_failures,
           ddp_now() - start);
    fflush(stdout);
    return attention_failures != 0;
}

int main(void) {
    int failed = 0;
    watchdog_start(120);
#if !defined(DDP_TEST_ON_CPU)
    int device = 0;
    cudaDeviceProp properties;
    if (cudaGetDevice(&device) != cudaSuccess
        || cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
        printf("no device\n");
        return 77;
    }
    if (properties.major < 8) {
        printf("%s is sm_%d%d; bf16 attention needs sm_80\n", properties.name, properties.major,
               properties.minor);
        return 77;
    }
    printf("device %d: %s, sm_%d%d\n", device, properties.name, properties.major, properties.minor);
#endif
    failed += table_row("refusals", check_refusals);
    failed += table_row("tensor cores", check_fast);
    failed += table_row("plain", check_plain);
    failed += table_row("extremes", check_extremes);
    failed += table_row("orders", check_orders);
    return failed != 0;
}

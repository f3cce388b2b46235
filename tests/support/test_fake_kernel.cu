/*  test_fake_kernel.cu - kernels of examples/gpt/gpt_cuda_base.cuh on the fake GPU: results of right kernels, and
    detection of wrong ones. */
#include "host_only.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "fake_nccl.h"
#pragma GCC diagnostic pop
#include "fake_kernel.h"
#include "fake_cuda_names.h"
#include "../../examples/gpt/gpt_cuda_base.cuh"
#include "watchdog.h"
#include <float.h>

#define SEEDS 12

static int failures, checks;
static const char *doing = "";

static void check_at(int good, int line, const char *what) {
    checks++;
    if (good || failures++ > 20) return;
    printf("%s, line %d, seed %llu: %s\n", doing, line, (unsigned long long)fake.seed, what);
}
#define CHECK(good) check_at((good) != 0, __LINE__, #good)
#define CLEAN() check_at(fake_failures() == 0, __LINE__, "nothing is out of order")
#define FOUND(text) check_at(fake_expect(text) > 0, __LINE__, "found: " text)
#define RUN(kernel, grid, block, shared_bytes, ...)                                                        \
    do {                                                                                                   \
        CHECK(GPT_CUDA_LAUNCH(kernel, grid, block, shared_bytes, (cudaStream_t)0, __VA_ARGS__) == DDP_OK); \
        CHECK(cudaStreamSynchronize(0) == cudaSuccess);                                                    \
    } while (0)

template <class T> static T *made(int count) {
    T *p = NULL;
    CHECK(cudaMalloc(&p, (size_t)count * sizeof(T)) == cudaSuccess);
    return p;
}
template <class T> static T *seen(T *p) { return (T *)fake_view(p); }

/* ---- numbers ---- */

static void numbers(void) {
    static const struct {
        float x;
        uint16_t bits;
    } known[] = {
        {1, 0x3f80}, {-2, 0xc000}, {1.00390625f, 0x3f80}, {1.01171875f, 0x3f82}, {3.4e38f, 0x7f80}, {0, 0},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        CHECK(gpt_cuda_from_float<gpt_bf16>(known[i].x).bits == known[i].bits);
        CHECK(gpt_cuda_pack<gpt_bf16>(known[i].x, 1) == (0x3f800000u | known[i].bits));
    }
    CHECK(gpt_cuda_round_bf16(NAN).bits == 0x7fff);
    CHECK(gpt_cuda_to_float(gpt_cuda_round_bf16(1.5f)) == 1.5f && gpt_cuda_from_float<float>(0.1f) == 0.1f);
    CHECK(gpt_cuda_pack<gpt_f16>(1, -2) == 0xc0003c00u);
    CHECK(gpt_cuda_round_f16(65519).bits == 0x7bff && gpt_cuda_round_f16(-65520).bits == 0xfc00);
    CHECK(gpt_cuda_round_f16(NAN).bits == 0x7fff && gpt_cuda_round_f16(INFINITY).bits == 0x7c00);
    for (uint32_t i = 0; i < 0x10000; i++) { /* every number of f16, and the middle between it and the next */
        gpt_f16 x = {(uint16_t)i}, next = {(uint16_t)(i + 1)};
        float value = gpt_cuda_to_float(x), real = __half2float(__ushort_as_half(x.bits));
        if ((i & 0x7fff) > 0x7c00) {
            CHECK(value != value);
            continue;
        }
        CHECK(memcmp(&value, &real, 4) == 0 && gpt_cuda_round_f16(value).bits == i);
        if ((i & 0x7fff) >= 0x7bff) continue;
        float middle = (value + gpt_cuda_to_float(next)) / 2, above = nextafterf(middle, value * 4);
        CHECK(gpt_cuda_round_f16(middle).bits == (i & 1 ? i + 1 : i));
        if (value != 0) CHECK(gpt_cuda_round_f16(above).bits == i + 1);
    }
}

/* ---- barriers and lanes ---- */

template <bool BARRIER> static __global__ void sum_kernel(float *out, const float *in, int count) {
    GPT_CUDA_SHARED(float, part, 32);
    GPT_CUDA_SHARED(int, lanes, 256);
    float sum = 0, x;
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) {
        gpt_cuda_load<1>(&x, in + i);
        sum += x;
    }
    sum = gpt_cuda_warp_sum(sum);
    lanes[threadIdx.x] = gpt_cuda_shuffle((int)threadIdx.x, 5);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    if (BARRIER) gpt_cuda_sync();
    if (threadIdx.x != 0) return;
    sum = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) sum += part[i];
    for (int i = 0; i < (int)blockDim.x && BARRIER; i++) sum += lanes[i] == i / 32 * 32 + 5 ? 0 : 1e6f;
    gpt_cuda_store<1>(out + blockIdx.x, &sum);
}

static int wrong_sums, right_sums;
static void sums(void) {
    float *in = made<float>(1000), *out = made<float>(3);
    for (int i = 0; i < 1000; i++) seen(in)[i] = (float)i;
    RUN(sum_kernel<true>, 3, 256, 0, out, in, 1000);
    for (int i = 0; i < 3; i++) CHECK(seen(out)[i] == 499500);
    CLEAN();
    RUN((sum_kernel<false>), 3, 256, 0, out, in, 1000);
    for (int i = 0; i < 3; i++) seen(out)[i] == 499500 ? right_sums++ : wrong_sums++;
    CLEAN();
}

/* Neighbours in a warp, through shared memory. */
template <bool MEET> static __global__ void neighbour_kernel(int *out) {
    GPT_CUDA_SHARED(int, cell, 32);
    cell[threadIdx.x] = (int)threadIdx.x;
    if (MEET) gpt_cuda_warp_sync();
    int other = cell[threadIdx.x ^ 1];
    gpt_cuda_store<1>(out + threadIdx.x, &other);
}

static void neighbours(void) {
    int *out = made<int>(32), wrong = 0;
    RUN(neighbour_kernel<true>, 1, 32, 0, out);
    for (int i = 0; i < 32; i++) CHECK(seen(out)[i] == (i ^ 1));
    RUN(neighbour_kernel<false>, 1, 32, 0, out);
    for (int i = 0; i < 32; i++) wrong += seen(out)[i] != (i ^ 1);
    CHECK(wrong > 0);
    CLEAN();
}

template <class T> static __global__ void transpose_kernel(T *out, const T *in, int rows, int columns) {
    GPT_CUDA_DYNAMIC_SHARED(memory);
    T *tile = (T *)memory;
    const int x = (int)threadIdx.x, left = (int)blockIdx.x * 32, top = (int)blockIdx.y * 32;
    for (int y = (int)threadIdx.y; y < 32; y += 8)
        if (top + y < rows && left + x < columns)
            gpt_cuda_load_stream<1>(tile + y * 33 + x, in + (top + y) * columns + left + x);
    gpt_cuda_sync();
    for (int y = (int)threadIdx.y; y < 32; y += 8)
        if (left + y < columns && top + x < rows)
            gpt_cuda_store_stream<1>(out + (left + y) * rows + top + x, tile + x * 33 + y);
}

static void transposed(void) {
    float *a = made<float>(70 * 40), *b = made<float>(70 * 40);
    uint16_t *c = made<uint16_t>(70 * 40), *d = made<uint16_t>(70 * 40);
    for (int i = 0; i < 70 * 40; i++) {
        seen(a)[i] = (float)i;
        seen(c)[i] = (uint16_t)i;
    }
    RUN(transpose_kernel<float>, dim3(2, 3), dim3(32, 8), 32 * 33 * 4, b, a, 70, 40);
    RUN(transpose_kernel<uint16_t>, dim3(2, 3), dim3(32, 8), 32 * 33 * 2, d, c, 70, 40);
    for (int i = 0; i < 70; i++)
        for (int j = 0; j < 40; j++)
            CHECK(seen(b)[j * 70 + i] == (float)(i * 40 + j) && seen(d)[j * 70 + i] == i * 40 + j);
    CLEAN();
}

/* ---- matrices ---- */

/* One product of fragments; b is stored by rows (16 x 8), or transposed (8 x 16). */
template <class H>
static __global__ void fragment_kernel(float *out, const H *a, const H *b, int transposed) {
    GPT_CUDA_SHARED(H, rows, 256);
    GPT_CUDA_SHARED(H, columns, 256);
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    uint32_t x[4], y[4];
    float d[4] = {1, 2, 3, 4};
    gpt_cuda_load<8>(rows + lane * 8, a + lane * 8);
    gpt_cuda_load<4>(columns + lane * 4, b + lane * 4);
    columns[128 + lane * 4] = columns[129 + lane * 4] = columns[130 + lane * 4] = columns[131 + lane * 4] =
        gpt_cuda_from_float<H>(0);
    gpt_cuda_sync();
    gpt_cuda_ldmatrix4(x, rows + (lane % 16) * 16 + lane / 16 * 8);
    if (transposed)
        gpt_cuda_ldmatrix4(y, columns + lane % 8 * 16 + lane / 8 % 2 * 8);
    else
        gpt_cuda_ldmatrix4_trans(y, columns + lane * 8);
    gpt_cuda_mma<H>(d, x, y);
    gpt_cuda_store<2>(out + g * 8 + 2 * t, d);
    gpt_cuda_store<2>(out + (g + 8) * 8 + 2 * t, d + 2);
}

template <class H> static void fragments_of(void) {
    float *out = made<float>(128);
    H *a = made<H>(256), *b = made<H>(128);
    float plain_a[256], plain_b[128];
    for (int i = 0; i < 256; i++)
        seen(a)[i] = gpt_cuda_from_float<H>(plain_a[i] = (float)fake_random(32) - 16);
    for (int i = 0; i < 128; i++)
        seen(b)[i] = gpt_cuda_from_float<H>(plain_b[i] = (float)fake_random(32) - 16);
    for (int transposed = 0; transposed < 2; transposed++) {
        RUN(fragment_kernel<H>, 1, 32, 0, out, a, b, transposed);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                float sum = (float)(i / 8 * 2 + j % 2 + 1);
                for (int k = 0; k < 16; k++)
                    sum += plain_a[i * 16 + k] * plain_b[transposed ? j * 16 + k : k * 8 + j];
                CHECK(seen(out)[i * 8 + j] == sum);
            }
    }
    CLEAN();
}

static void fragments(void) {
    fragments_of<gpt_bf16>();
    fragments_of<gpt_f16>();
}

/* out[i] = d + five products with 1; in[6 i ...]: d and the products. */
static __global__ void added_kernel(float *out, const float *in, int count) {
    for (int i = 0; i < count; i++) {
        float d[4], products[5];
        uint32_t x[4], y[2] = {gpt_cuda_pack<gpt_bf16>(1, 1), gpt_cuda_pack<gpt_bf16>(1, 1)};
        for (int k = 0; k < 4; k++) gpt_cuda_load<1>(&d[k], in + 6 * i);
        for (int k = 0; k < 5; k++) gpt_cuda_load<1>(&products[k], in + 6 * i + 1 + k);
        if (threadIdx.x % 4)
            for (int k = 0; k < 4; k++) products[k] = 0;
        x[0] = x[1] = gpt_cuda_pack<gpt_bf16>(products[0], products[1]);
        x[2] = x[3] = gpt_cuda_pack<gpt_bf16>(products[2], products[3]);
        if (threadIdx.x % 4 == 1) x[0] = x[1] = gpt_cuda_pack<gpt_bf16>(products[4], 0);
        gpt_cuda_mma<gpt_bf16>(d, x, y);
        if (threadIdx.x == 0) gpt_cuda_store<1>(out + i, d);
    }
}

/* Tensor cores truncate: 25 places after the largest exponent, and the sum to f32. */
static void added(void) {
    const float e = ldexpf(1, -24), huge = 1e30f;
    const float cases[][7] = {
        /* d, products, the sum */
        {1, 1.5f * e, 0, 0, 0, 0, 1},
        {1, 2 * e, 0, 0, 0, 0, 1 + 2 * e},
        {1, e, e, 0, 0, 0, 1 + 2 * e},
        {1, e / 2, e / 2, e / 2, e / 2, 0, 1 + 2 * e},
        {1, e / 4, e / 4, e / 4, e / 4, 0, 1},
        {-1, -1.5f * e, 0, 0, 0, 0, -1},
        {1, -e / 4, 0, 0, 0, 0, 1},
        {1, -e / 2, 0, 0, 0, 0, 1 - e},
        {0, huge, 1, -huge, 0, 0, 0},
        {3, 5, -7, 0.5f, 100, -1, 100.5f},
        {0, 0, 0, 0, 0, 0, 0},
        {e * e, 0, 0, 0, 0, 0, e * e},
        {0, INFINITY, 1, 0, 0, 0, INFINITY},
        {FLT_MAX, FLT_MAX / 2, 0, 0, 0, 0, INFINITY},
        {FLT_MAX, ldexpf(1, 103), 0, 0, 0, 0, FLT_MAX},
    };
    const int count = (int)(sizeof cases / sizeof *cases);
    float *out = made<float>(count), *in = made<float>(count * 6);
    for (int i = 0; i < count; i++) memcpy(seen(in) + 6 * i, cases[i], 6 * sizeof(float));
    RUN(added_kernel, 1, 32, 0, out, in, count);
    for (int i = 0; i < count; i++) CHECK(seen(out)[i] == cases[i][6]);
    CLEAN();
}

/* out (64 x 64) = a (64 x K) b (K x 64): four warps with 16 rows each, tiles of 16 columns of a in two
   buffers. WAIT 0 leaves a wait out, 1 a barrier. */
template <int WAIT>
static __global__ void product_kernel(float *out, const gpt_bf16 *a, const gpt_bf16 *b, int depth, int rows) {
    GPT_CUDA_DYNAMIC_SHARED(memory);
    gpt_bf16 *tile = (gpt_bf16 *)memory; /* 2 x (64 x 16 of a, 16 x 64 of b) */
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, n = (int)threadIdx.x;
    float d[8][4] = {};
    for (int step = 0; step <= depth / 16; step++) {
        if (step < depth / 16) {
            gpt_bf16 *to = tile + step % 2 * 2048;
            gpt_cuda_copy_async16(to + n * 8, a + n / 2 * depth + step * 16 + n % 2 * 8, n / 2 < rows);
            gpt_cuda_copy_async16(to + 1024 + n * 8, b + step * 1024 + n * 8, 1);
        }
        gpt_cuda_copy_commit();
        if (step == 0) continue;
        if (WAIT != 0) gpt_cuda_copy_wait<1>();
        if (WAIT != 1) gpt_cuda_sync();
        const gpt_bf16 *from = tile + (step - 1) % 2 * 2048;
        uint32_t x[4], y[4];
        gpt_cuda_ldmatrix4(x, from + (warp * 16 + lane % 16) * 16 + lane / 16 * 8);
        GPT_CUDA_UNROLL for (int j = 0; j < 4; j++) {
            gpt_cuda_ldmatrix4_trans(y, from + 1024 + lane % 16 * 64 + j * 16 + lane / 16 * 8);
            gpt_cuda_mma<gpt_bf16>(d[2 * j], x, y);
            gpt_cuda_mma<gpt_bf16>(d[2 * j + 1], x, y + 2);
        }
        gpt_cuda_sync();
    }
    GPT_CUDA_UNROLL for (int j = 0; j < 8; j++) {
        gpt_cuda_store<2>(out + (warp * 16 + lane / 4) * 64 + j * 8 + lane % 4 * 2, d[j]);
        gpt_cuda_store<2>(out + (warp * 16 + 8 + lane / 4) * 64 + j * 8 + lane % 4 * 2, d[j] + 2);
    }
}

static int product_wrong(const float *out, const float *a, const float *b, int rows) {
    int wrong = 0;
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < 64; j++) {
            float sum = 0;
            for (int k = 0; k < 64 && i < rows; k++) sum += a[i * 64 + k] * b[k * 64 + j];
            wrong += out[i * 64 + j] != sum;
        }
    return wrong;
}

static void products(void) {
    float *out = made<float>(4096), plain_a[4096], plain_b[4096];
    gpt_bf16 *a = made<gpt_bf16>(50 * 64), *b = made<gpt_bf16>(4096);
    for (int i = 0; i < 50 * 64; i++)
        seen(a)[i] = gpt_cuda_round_bf16(plain_a[i] = (float)fake_random(32) - 16);
    for (int i = 0; i < 4096; i++) seen(b)[i] = gpt_cuda_round_bf16(plain_b[i] = (float)fake_random(32) - 16);
    RUN(product_kernel<2>, 1, 128, 8192, out, a, b, 64, 50);
    CHECK(product_wrong(seen(out), plain_a, plain_b, 50) == 0);
    RUN(product_kernel<0>, 1, 128, 8192, out, a, b, 64, 50);
    CHECK(product_wrong(seen(out), plain_a, plain_b, 50) > 0);
    RUN(product_kernel<1>, 1, 128, 8192, out, a, b, 64, 50);
    CHECK(product_wrong(seen(out), plain_a, plain_b, 50) > 0);
    CLEAN();
    RUN(product_kernel<2>, 1, 128, 8192, out, a, b, 64, 51);
    FOUND("and that has 6400 bytes");
    CLEAN();
}

/* ---- threads that do not meet ---- */

static __global__ void lanes_kernel(float *out, int how) {
    GPT_CUDA_SHARED(float, cell, 128);
    alignas(16) uint32_t r[4];
    float x = 1;
    if (how == 0 && threadIdx.x == 37) return;
    if (how == 1 && threadIdx.x == 5) gpt_cuda_sync();
    if (how == 2 && threadIdx.x == 37) gpt_cuda_warp_sync();
    if (how == 3 && threadIdx.x / 32 == 1) gpt_cuda_sync();
    if (how == 4) gpt_cuda_ldmatrix4(r, cell + 1);
    if (how == 5) gpt_cuda_ldmatrix4(r, r);
    if (how == 6) gpt_cuda_copy_async16(cell + 126, out, 1);
    if (how == 7) gpt_cuda_copy_async16(cell + 1, out, 1);
    if (how == 8 && threadIdx.x >= 64) return; /* whole warps may leave */
    if (how == 9) gpt_cuda_copy_async16(cell, out + 1, 0);
    x = gpt_cuda_warp_sum(x);
    gpt_cuda_sync();
    gpt_cuda_store<1>(out + threadIdx.x, &x);
}

static void lanes(void) {
    float *out = made<float>(128);
    RUN(lanes_kernel, 1, 128, 0, out, -1);
    RUN(lanes_kernel, 1, 128, 0, out, 8);
    for (int i = 0; i < 128; i++) CHECK(seen(out)[i] == 32);
    CLEAN();
    RUN(lanes_kernel, 1, 128, 0, out, 0);
    FOUND("gpt_cuda_shuffle of warp 1 misses 1 lanes: lane 5 has returned");
    RUN(lanes_kernel, 1, 32, 0, out, 1);
    FOUND("gpt_cuda_shuffle of warp 0 misses 1 lanes: lane 5 waits at a barrier");
    RUN(lanes_kernel, 1, 128, 0, out, 2);
    FOUND("while others of warp 1 are in");
    RUN(lanes_kernel, 1, 128, 0, out, 3);
    FOUND("while others wait at that of line");
    RUN(lanes_kernel, 1, 128, 0, out, 4);
    FOUND("a row that is not aligned to 16");
    RUN(lanes_kernel, 1, 128, 0, out, 5);
    FOUND("a row that does not lie in shared memory");
    RUN(lanes_kernel, 1, 128, 0, out, 6);
    CHECK(fake_expect("writes to what does not lie in shared memory")
              + fake_expect("writes to shared memory that is not aligned to 16")
          > 0);
    RUN(lanes_kernel, 1, 128, 0, out, 7);
    FOUND("writes to shared memory that is not aligned to 16");
    RUN(lanes_kernel, 1, 128, 0, out, 9);
    FOUND("reads what is not aligned to 16");
    RUN(lanes_kernel, 1, 48, 0, out, -1);
    FOUND("lane 16 is none of the block's threads");
    CLEAN();
    RUN(lanes_kernel, 1, 128, 0, out, -1); /* after a failure all threads start again */
    CLEAN();
}

/* ---- global memory ---- */

template <int N> static __global__ void copy_kernel(float *out, const float *in, int count) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) * N;
    float x[N];
    if (i + N > count) return;
    gpt_cuda_load<N>(x, in + i);
    gpt_cuda_store<N>(out + i, x);
}

static void accesses(void) {
    float *in = made<float>(1001), *out = made<float>(1024), *far, host[1024];
    for (int i = 0; i < 1001; i++) seen(in)[i] = (float)i;
    RUN(copy_kernel<4>, 2, 128, 0, out, in, 1000);
    RUN(copy_kernel<1>, 8, 128, 0, out + 1000, in + 1000, 1);
    for (int i = 0; i < 1001; i++) CHECK(seen(out)[i] == (float)i);
    CLEAN();
    RUN(copy_kernel<1>, 8, 128, 0, out, in, 1002);
    FOUND("it reads 4 bytes at m1+4004, and that has 4004 bytes");
    RUN(copy_kernel<4>, 2, 128, 0, out, in + 1, 1000);
    FOUND("it reads 16 bytes at m1+");
    RUN(copy_kernel<2>, 4, 128, 0, out + 3, in, 1000);
    FOUND("it writes 8 bytes at m2+");
    RUN(copy_kernel<1>, 8, 128, 0, host, in, 1000);
    FOUND("which is memory of the host");
    RUN(copy_kernel<1>, 8, 128, 0, (float *)NULL, in, 1000);
    FOUND("which is near NULL");
    cudaSetDevice(1);
    far = made<float>(1000);
    cudaSetDevice(0);
    RUN(copy_kernel<1>, 8, 128, 0, far, in, 1000);
    FOUND("which is memory of another device");
    cudaFree(in);
    RUN(copy_kernel<1>, 8, 128, 0, out, in, 1000);
    FOUND("which has been freed");
    CLEAN();
}

/* Blocks in the order of their tickets: each doubles the value that it reads and adds its ticket. way 1:
   waits for a ticket that does not exist; 2: does not wait. */
static __global__ void chain_kernel(int *cells, int way) {
    GPT_CUDA_SHARED(int, ticket, 1);
    if (threadIdx.x == 0) ticket[0] = gpt_cuda_atomic_add(cells, 1);
    gpt_cuda_sync();
    if (threadIdx.x != 40) return;
    int sum = 0, mine = ticket[0];
    if (way < 2)
        while (gpt_cuda_acquire(cells + 1) != mine + way) {
        }
    gpt_cuda_load<1>(&sum, cells + 2);
    sum = 2 * sum + mine;
    gpt_cuda_store<1>(cells + 2, &sum);
    gpt_cuda_release(cells + 1, mine + 1);
}

/* A thread waits for another one of its block. */
static __global__ void signal_kernel(int *cells) {
    int one = 1;
    if (threadIdx.x == 0)
        while (gpt_cuda_acquire(cells + 2) != 1) {
        }
    if (threadIdx.x == 33)
        while (gpt_cuda_acquire(cells + 1) != 1) {
        }
    if (threadIdx.x == 63) gpt_cuda_release(cells + 1, 1);
    if (threadIdx.x == 33) gpt_cuda_release(cells + 2, one);
}

static int wrong_chains, right_chains;
static void flags(void) {
    int *cells = made<int>(3), expected = 0;
    for (int i = 0; i < 10; i++) expected = 2 * expected + i;
    memset(seen(cells), 0, 12);
    RUN(chain_kernel, 10, 64, 0, cells, 0);
    CHECK(seen(cells)[0] == 10 && seen(cells)[1] == 10 && seen(cells)[2] == expected);
    memset(seen(cells), 0, 12);
    RUN(signal_kernel, 1, 64, 0, cells);
    CHECK(seen(cells)[2] == 1);
    memset(seen(cells), 0, 12);
    RUN(chain_kernel, 10, 64, 0, cells, 2);
    seen(cells)[2] == expected ? right_chains++ : wrong_chains++;
    CLEAN();
    memset(seen(cells), 0, 12);
    RUN(chain_kernel, 10, 64, 0, cells, 1);
    FOUND("it waits for ever for the flag at m1+4, which is 0");
    CLEAN();
}

/* ---- streams and graphs ---- */

static void streams(void) {
    float *p = made<float>(256);
    cudaStream_t a = NULL, b = NULL;
    cudaEvent_t e = NULL;
    CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking) == cudaSuccess
          && cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess);
    CHECK(GPT_CUDA_LAUNCH(copy_kernel<1>, 1, 128, 0, a, p + 128, p, 128) == DDP_OK); /* neighbours */
    CHECK(GPT_CUDA_LAUNCH(copy_kernel<1>, 1, 64, 0, b, p + 64, p, 64) == DDP_OK);
    CHECK(cudaStreamSynchronize(a) == cudaSuccess && cudaStreamSynchronize(b) == cudaSuccess);
    FOUND("race: ");
    CHECK(GPT_CUDA_LAUNCH(copy_kernel<1>, 1, 64, 0, a, p + 128, p, 64) == DDP_OK);
    CHECK(GPT_CUDA_LAUNCH(copy_kernel<1>, 1, 64, 0, b, p + 192, p, 64) == DDP_OK);
    CHECK(cudaStreamSynchronize(a) == cudaSuccess && cudaStreamSynchronize(b) == cudaSuccess);
    CLEAN();
    CHECK(GPT_CUDA_LAUNCH(copy_kernel<4>, 1, 32, 0, a, p + 128, p, 128) == DDP_OK);
    CHECK(cudaEventRecord(e, a) == cudaSuccess && cudaStreamWaitEvent(b, e) == cudaSuccess);
    CHECK(GPT_CUDA_LAUNCH(copy_kernel<1>, 1, 64, 0, b, p, p + 192, 64) == DDP_OK);
    CHECK(cudaStreamSynchronize(b) == cudaSuccess);
    CLEAN();
}

static __global__ void add_kernel(float *out, float by) {
    float x;
    gpt_cuda_load<1>(&x, out + threadIdx.x);
    x += by;
    gpt_cuda_store<1>(out + threadIdx.x, &x);
}

static void graphs(void) {
    float *p = made<float>(64), by = 2;
    cudaStream_t a = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking) == cudaSuccess
          && cudaMemsetAsync(p, 0, 256, a) == cudaSuccess);
    CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(GPT_CUDA_LAUNCH(add_kernel, 1, 64, 0, a, p, by) == DDP_OK);
    by = 3; /* arguments are taken at the launch */
    CHECK(GPT_CUDA_LAUNCH(add_kernel, 1, 64, 0, a, p, by) == DDP_OK);
    CHECK(cudaStreamEndCapture(a, &graph) == cudaSuccess
          && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(exec, a) == cudaSuccess);
    CHECK(GPT_CUDA_LAUNCH(add_kernel, 1, 64, 0, a, p, 100) == DDP_OK
          && cudaStreamSynchronize(a) == cudaSuccess);
    for (int i = 0; i < 64; i++) CHECK(seen(p)[i] == 110);
    CHECK(fake_left().find("an instance of a graph") != std::string::npos);
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess && cudaStreamDestroy(a) == cudaSuccess
          && cudaFree(p) == cudaSuccess && fake_left() == "");
    CLEAN();
}

/* ---- launching, and CUDA's names ---- */

template <int KB> static __global__ void static_kernel(float *out) {
    GPT_CUDA_SHARED(float, first, KB * 128);
    GPT_CUDA_SHARED(float, second, KB * 128);
    first[threadIdx.x] = (float)threadIdx.x;
    second[threadIdx.x] = 2 * first[threadIdx.x];
    gpt_cuda_store<1>(out + threadIdx.x, second + threadIdx.x);
}

static void launches(void) {
    float *p = made<float>(64);
    RUN(static_kernel<16>, 1, 64, 0, p);
    for (int i = 0; i < 64; i++) CHECK(seen(p)[i] == (float)(2 * i));
    CHECK(GPT_CUDA_LAUNCH(static_kernel<1>, 1, 64, 227 * 1024, (cudaStream_t)0, p) == DDP_OK
          && cudaStreamSynchronize(0) == cudaSuccess);
    FOUND("its shared memory takes more than 227 KiB");
    RUN(static_kernel<17>, 1, 64, 0, p);
    FOUND("its static shared memory takes more than 16 KiB");
    CHECK(GPT_CUDA_LAUNCH(add_kernel, 1, 1025, 0, (cudaStream_t)0, p, 1) == DDP_ERR_ENGINE);
    CHECK(strstr(ddp_last_error(), "kernel add_kernel, grid 1 x 1 x 1, block 1025 x 1 x 1, 0 bytes of shared "
                                   "memory: cudaLaunchKernel: ")
          != NULL);
    CHECK(GPT_CUDA_LAUNCH(add_kernel, 0, 32, 0, (cudaStream_t)0, p, 1) == DDP_ERR_ENGINE);
    CHECK(GPT_CUDA_LAUNCH(add_kernel, dim3(1, 65536), 32, 0, (cudaStream_t)0, p, 1) == DDP_ERR_ENGINE);
    CHECK(GPT_CUDA_LAUNCH(add_kernel, 1, 32, 228 * 1024, (cudaStream_t)0, p, 1) == DDP_ERR_ENGINE);
    fake_fail("cudaLaunchKernel", -1, 1, (int)cudaErrorLaunchFailure, 0);
    CHECK(GPT_CUDA_LAUNCH((copy_kernel<4>), 1, 32, 0, (cudaStream_t)0, p, p, 1) == DDP_ERR_ENGINE
          && strstr(ddp_last_error(), "copy_kernel<4>") != NULL);
    CLEAN();
}

static void names(void) {
    void *p = NULL, *q = NULL;
    size_t available = 0, total = 0;
    cudaEvent_t a = NULL, b = NULL;
    float ms = -1;
    int value = 0;
    cudaDeviceProp properties;
    fake_set_memory(0, 5000);
    CHECK(cudaMalloc(&p, 4000) == cudaSuccess && cudaMalloc(&q, 2000) == cudaErrorMemoryAllocation
          && q == NULL);
    CHECK(cudaMemGetInfo(&available, &total) == cudaSuccess && available == 1000 && total == 5000
          && fake.device[0].most == 4000);
    CHECK(cudaMallocHost(&q, 2000) == cudaSuccess && cudaFreeHost(q) == cudaSuccess);
    CHECK(cudaEventCreate(&a) == cudaSuccess && cudaEventCreate(&b) == cudaSuccess
          && cudaEventRecord(a, 0) == cudaSuccess);
    for (int i = 0; i < 3; i++) CHECK(cudaMemsetAsync(p, 0, 4000, 0) == cudaSuccess);
    CHECK(cudaEventRecord(b, 0) == cudaSuccess && cudaEventElapsedTime(&ms, a, b) == cudaErrorNotReady);
    CHECK(cudaDeviceSynchronize() == cudaSuccess && cudaEventElapsedTime(&ms, a, b) == cudaSuccess
          && ms == 3);
    CHECK(cudaEventDestroy(a) == cudaSuccess && cudaEventDestroy(b) == cudaSuccess
          && cudaFree(p) == cudaSuccess && fake_left() == "");
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && value == 9);
    CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9
          && strcmp(properties.name, "Fake 0") == 0);
    CLEAN();
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxPitch, 0) != cudaSuccess);
    FOUND("the attribute is not modelled");
}

/* ---- main ---- */

#define CASE(name) \
    { #name, name }
int main(void) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {CASE(numbers), CASE(sums),     CASE(neighbours), CASE(transposed), CASE(fragments),
                 CASE(added),   CASE(products), CASE(lanes),      CASE(accesses),   CASE(flags),
                 CASE(streams), CASE(graphs),   CASE(launches),   CASE(names)};
    watchdog_start(50);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        doing = cases[k].name;
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            fake_start(2, seed);
            cases[k].run();
        }
    }
    check_at(wrong_sums > 0 && right_sums > 0, __LINE__,
             "a missing barrier gives right data in some blocks and wrong data in others");
    check_at(wrong_chains > 0 && right_chains > 0, __LINE__,
             "a missing wait between blocks gives right data with some seeds and wrong data with others");
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}

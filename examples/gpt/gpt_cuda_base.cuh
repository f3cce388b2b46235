/*  gpt_cuda_base.cuh - building blocks of the GPT kernels: memory, barriers, warps, mma, launches.

    The same kernel source runs on a GPU and, in tests, thread by thread on the CPU
    (tests/support/fake_kernel.h). There every access to global memory, every barrier and every shuffle is
    checked.

USAGE
    template <class T> static __global__ void gpt_cuda__scale_kernel(T *data, float factor, int count) {
        int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
        T x;
        if (i >= count) return;
        gpt_cuda_load<1>(&x, data + i);
        x = gpt_cuda_from_float<T>(gpt_cuda_to_float(x) * factor);
        gpt_cuda_store<1>(data + i, &x);
    }
    ddp_result result = GPT_CUDA_LAUNCH(gpt_cuda__scale_kernel<float>, (count + 127) / 128, 128, 0, stream,
                                        data, 0.5f, count);

    Put a kernel name with a comma in parentheses: GPT_CUDA_LAUNCH((kernel<64, 1>), ...). Arguments are passed
    by value, at most 4 KiB.

CONCEPTS
    Global memory   Only the functions below access it. Each access is aligned to its size.
    Warps           All 32 lanes of a warp execute a shuffle, ldmatrix or mma together. After a
                    divergent branch, call gpt_cuda_warp_sync() first.
    Barriers        All threads of a block call the same gpt_cuda_sync(), on the same line.
    Between blocks  A block waits only for blocks with a lower ticket from gpt_cuda_atomic_add, which
                    are already running. No kernel uses floating-point atomics, so every run has the same
                    bits.

    Needs sm_80 for bf16, mma.sync, ldmatrix and cp.async. Compiles for sm_80 and sm_90. It has not run on a
    GPU. */
#ifndef GPT_CUDA_BASE_CUH
#define GPT_CUDA_BASE_CUH

#include "../../ddp_cuda.cuh"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "gpt_cuda_base.cuh: bf16 and cp.async need sm_80 or later; compile with -arch=sm_80 or above"
#endif

//== numbers ================================================================================================
#if defined(GPT_CUDA_ON_CPU)
#define GPT_CUDA_DEVICE static inline /* device function */
#define GPT_CUDA_BOTH static inline   /* host and device function */
#define GPT_CUDA_UNROLL /* unrolls a loop, so that arrays indexed by its counter are in registers */
#else
#define GPT_CUDA_DEVICE static __device__ __forceinline__
#define GPT_CUDA_BOTH static __host__ __device__ __forceinline__
#define GPT_CUDA_UNROLL _Pragma("unroll")
#endif

/* The upper 16 bits of a float; same layout as __nv_bfloat16 and DDP_BF16. */
typedef struct gpt_bf16 {
    uint16_t bits;
} gpt_bf16;

/* IEEE binary16; same layout as __half and DDP_F16. */
typedef struct gpt_f16 {
    uint16_t bits;
} gpt_f16;

GPT_CUDA_BOTH float gpt_cuda_to_float(float x) { return x; }
GPT_CUDA_BOTH float gpt_cuda_to_float(gpt_bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
GPT_CUDA_BOTH float gpt_cuda_to_float(gpt_f16 x) {
    float value;
#if defined(__CUDA_ARCH__)
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
#else
    uint32_t bits = (uint32_t)(x.bits & 0x7fff) << 13, infinity = 0x7f800000;
    memcpy(&value, &bits, sizeof value);
    value *= 5.192296858534828e33f; /* 2^112: the exponents' biases differ by 112 */
    memcpy(&bits, &value, sizeof bits);
    if ((x.bits & 0x7c00) == 0x7c00) bits |= infinity;
    bits |= (uint32_t)(x.bits & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
#endif
    return value;
}

/* Rounds to nearest even. NaN becomes 0x7fff. */
GPT_CUDA_BOTH gpt_bf16 gpt_cuda_round_bf16(float x) {
    gpt_bf16 y;
#if defined(__CUDA_ARCH__)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    y.bits = x != x ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
    return y;
}

/* The same for f16. From 65520 on the result is infinity. */
GPT_CUDA_BOTH gpt_f16 gpt_cuda_round_f16(float x) {
    gpt_f16 y;
#if defined(__CUDA_ARCH__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    uint32_t bits, magnitude;
    memcpy(&bits, &x, sizeof bits);
    magnitude = bits & 0x7fffffff;
    if (magnitude < 113u << 23) { /* below 2^-14: adding 0.5, with a last place of 2^-24, rounds */
        float sum;
        memcpy(&sum, &magnitude, sizeof sum);
        sum += 0.5f;
        memcpy(&magnitude, &sum, sizeof magnitude);
        magnitude -= 0x3f000000;
    } else if (magnitude < 143u << 23)
        magnitude = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    else
        magnitude = 0x7c00;
    y.bits = x != x ? 0x7fff : (uint16_t)(magnitude | (bits >> 16 & 0x8000));
#endif
    return y;
}

/* from: rounds one number. pack: rounds two, and puts them into one register for mma, low in the lower
   half. */
template <class T> struct gpt_cuda__number;
template <> struct gpt_cuda__number<float> {
    GPT_CUDA_BOTH float from(float x) { return x; }
};
template <> struct gpt_cuda__number<gpt_bf16> {
    GPT_CUDA_BOTH gpt_bf16 from(float x) { return gpt_cuda_round_bf16(x); }
    GPT_CUDA_BOTH uint32_t pack(float low, float high) {
#if defined(__CUDA_ARCH__)
        uint32_t pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return from(low).bits | (uint32_t)from(high).bits << 16;
#endif
    }
};
template <> struct gpt_cuda__number<gpt_f16> {
    GPT_CUDA_BOTH gpt_f16 from(float x) { return gpt_cuda_round_f16(x); }
    GPT_CUDA_BOTH uint32_t pack(float low, float high) {
#if defined(__CUDA_ARCH__)
        uint32_t pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return from(low).bits | (uint32_t)from(high).bits << 16;
#endif
    }
};
template <class T> GPT_CUDA_BOTH T gpt_cuda_from_float(float x) { return gpt_cuda__number<T>::from(x); }

/* Rounds two numbers to gpt_bf16 or gpt_f16, and packs them into one register: low in the lower half. */
template <class T> GPT_CUDA_BOTH uint32_t gpt_cuda_pack(float low, float high) {
    return gpt_cuda__number<T>::pack(low, high);
}

//== global memory ==========================================================================================

template <int BYTES> struct gpt_cuda__word;
template <> struct gpt_cuda__word<2> { typedef unsigned short type; };
template <> struct gpt_cuda__word<4> { typedef unsigned int type; };
template <> struct gpt_cuda__word<8> { typedef uint2 type; };
template <> struct gpt_cuda__word<16> { typedef uint4 type; };

/* Loads N elements of 2, 4, 8 or 16 bytes in total, in one access aligned to its size. */
template <int N, class T> GPT_CUDA_DEVICE void gpt_cuda_load(T *out, const T *global) {
    typedef typename gpt_cuda__word<N *(int)sizeof(T)>::type word;
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_load<sizeof(word)>(out, global);
#else
    word bits = *(const word *)(const void *)global;
    memcpy(out, &bits, sizeof bits);
#endif
}

template <int N, class T> GPT_CUDA_DEVICE void gpt_cuda_store(T *global, const T *in) {
    typedef typename gpt_cuda__word<N *(int)sizeof(T)>::type word;
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_store<sizeof(word)>(global, in);
#else
    word bits;
    memcpy(&bits, in, sizeof bits);
    *(word *)(void *)global = bits;
#endif
}

/* Load and store for data that is used once: the caches evict it first. */
template <int N, class T> GPT_CUDA_DEVICE void gpt_cuda_load_stream(T *out, const T *global) {
#if defined(__CUDA_ARCH__)
    typedef typename gpt_cuda__word<N *(int)sizeof(T)>::type word;
    word bits = __ldcs((const word *)(const void *)global);
    memcpy(out, &bits, sizeof bits);
#else
    gpt_cuda_load<N>(out, global);
#endif
}

template <int N, class T> GPT_CUDA_DEVICE void gpt_cuda_store_stream(T *global, const T *in) {
#if defined(__CUDA_ARCH__)
    typedef typename gpt_cuda__word<N *(int)sizeof(T)>::type word;
    word bits;
    memcpy(&bits, in, sizeof bits);
    __stcs((word *)(void *)global, bits);
#else
    gpt_cuda_store<N>(global, in);
#endif
}

//== between blocks =========================================================================================

/* Adds and returns the previous value, with acquire and release semantics: writes before the call, also those
   of other threads before a barrier, are visible to every later add. So the last of n blocks to add reads
   what all n blocks wrote. */
GPT_CUDA_DEVICE int gpt_cuda_atomic_add(int *global, int value) {
#if defined(GPT_CUDA_ON_CPU)
    return fake_kernel_atomic_add(global, value);
#else
    int old;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(__cvta_generic_to_global(global)), "r"(value)
                 : "memory");
    return old;
#endif
}

/* Stores a flag with release semantics. A thread that reads the value with gpt_cuda_acquire also sees
   everything written before it, by this thread or before a barrier that this thread has passed. */
GPT_CUDA_DEVICE void gpt_cuda_release(int *global, int value) {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_release(global, value);
#else
    asm volatile("st.release.gpu.global.s32 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(global)), "r"(value)
                 : "memory");
#endif
}

GPT_CUDA_DEVICE int gpt_cuda_acquire(const int *global) {
#if defined(GPT_CUDA_ON_CPU)
    return fake_kernel_acquire(global);
#else
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(global))
                 : "memory");
    return value;
#endif
}

//== shared memory ==========================================================================================

/* GPT_CUDA_SHARED(float, sums, 32);     declares float sums[32] in shared memory, aligned to 16 bytes and
                                         uninitialised. At most 16 KiB per kernel.
   GPT_CUDA_DYNAMIC_SHARED(memory);      declares unsigned char *memory, aligned to 128 bytes, of the
                                         shared_bytes of the launch. */
#if defined(GPT_CUDA_ON_CPU)
#define GPT_CUDA_SHARED(type, name, count) \
    static char name##_key;                \
    type *const name = (type *)fake_kernel_shared(&name##_key, sizeof(type) * (size_t)(count))
#define GPT_CUDA_DYNAMIC_SHARED(name) unsigned char *const name = fake_kernel_dynamic_shared()
#else
#define GPT_CUDA_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define GPT_CUDA_DYNAMIC_SHARED(name)                                   \
    extern __shared__ __align__(128) unsigned char gpt_cuda__dynamic[]; \
    unsigned char *const name = gpt_cuda__dynamic
#endif

/* Barrier over the threads of a block. Writes before it are visible to all of them after it. */
#if defined(GPT_CUDA_ON_CPU)
static inline void gpt_cuda_sync(int line = __builtin_LINE()) { fake_kernel_sync(line); }
#else
GPT_CUDA_DEVICE void gpt_cuda_sync() { __syncthreads(); }
#endif

/* Starts an asynchronous copy of 16 bytes from global to shared memory, both aligned to 16. valid 0: writes
   zeros and does not read global. This thread can read the bytes after gpt_cuda_copy_wait of their group,
   other threads after the next barrier. */
GPT_CUDA_DEVICE void gpt_cuda_copy_async16(void *shared, const void *global, int valid) {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_copy_async16(shared, global, valid);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((unsigned int)__cvta_generic_to_shared(shared)), "l"(__cvta_generic_to_global(global)),
                   "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

/* Ends a group of copies. The group may be empty. */
GPT_CUDA_DEVICE void gpt_cuda_copy_commit() {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_copy_commit();
#else
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

/* Waits until at most the N newest groups of this thread are in flight. */
template <int N> GPT_CUDA_DEVICE void gpt_cuda_copy_wait() {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_copy_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
#endif
}

//== warps ==================================================================================================

/* Barrier over the lanes of a warp. Writes to shared memory before it are visible to all of them after it. */
GPT_CUDA_DEVICE void gpt_cuda_warp_sync() {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_warp_sync();
#else
    __syncwarp();
#endif
}

/* The value of lane (own lane ^ mask), or of `lane`. T is float, int or uint32_t. */
template <class T> GPT_CUDA_DEVICE T gpt_cuda_shuffle_xor(T value, int mask) {
#if defined(GPT_CUDA_ON_CPU)
    return fake_kernel_shuffle(value, fake_kernel_lane() ^ mask);
#else
    return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

template <class T> GPT_CUDA_DEVICE T gpt_cuda_shuffle(T value, int lane) {
#if defined(GPT_CUDA_ON_CPU)
    return fake_kernel_shuffle(value, lane);
#else
    return __shfl_sync(0xffffffffu, value, lane);
#endif
}

/* Sum and maximum over the 32 lanes, in a fixed order. Every lane gets the same bits. */
GPT_CUDA_DEVICE float gpt_cuda_warp_sum(float x) {
    GPT_CUDA_UNROLL for (int mask = 16; mask > 0; mask /= 2) x += gpt_cuda_shuffle_xor(x, mask);
    return x;
}
GPT_CUDA_DEVICE float gpt_cuda_warp_max(float x) {
    GPT_CUDA_UNROLL for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, gpt_cuda_shuffle_xor(x, mask));
    return x;
}

//== products of matrices ===================================================================================

/*  Fragments of mma.m16n8k16 (PTX ISA): the lanes of a warp hold a matrix together. A register holds two
    neighbours of 16 bits, the first in the lower half. With g = lane / 4 and t = lane % 4:

        a (16 x 16)   a[0] (g, 2t..)   a[1] (g + 8, 2t..)   a[2] (g, 2t + 8..)   a[3] (g + 8, 2t + 8..)
        b (16 x 8)    b[0] (2t.., g)   b[1] (2t + 8.., g)   neighbours in a column
        d (16 x 8)    d[0], d[1] (g, 2t..)   d[2], d[3] (g + 8, 2t..)   in f32

    gpt_cuda_ldmatrix4 loads four 8 x 8 tiles of 16-bit values from shared memory. Lane l passes the address
    of row l % 8 of tile l / 8, which is 16 bytes long and aligned to 16. Afterwards r[i] holds of tile i the
    elements (g, 2t..), or with _trans (2t.., g).

        a from a row-major matrix      tiles (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)
        b from a row-major matrix      gpt_cuda_ldmatrix4_trans
        b from a column-major matrix   gpt_cuda_ldmatrix4 */
GPT_CUDA_DEVICE void gpt_cuda_ldmatrix4(uint32_t r[4], const void *shared) {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_ldmatrix(r, shared, 0);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned int)__cvta_generic_to_shared(shared))
                 : "memory");
#endif
}

GPT_CUDA_DEVICE void gpt_cuda_ldmatrix4_trans(uint32_t r[4], const void *shared) {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_ldmatrix(r, shared, 1);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned int)__cvta_generic_to_shared(shared))
                 : "memory");
#endif
}

/* d += a b, of gpt_bf16 or gpt_f16 with f32 accumulation. The first argument selects the type. */
GPT_CUDA_DEVICE void gpt_cuda__mma(gpt_bf16, float d[4], const uint32_t a[4], const uint32_t b[2]) {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_mma(d, a, b, 0);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
GPT_CUDA_DEVICE void gpt_cuda__mma(gpt_f16, float d[4], const uint32_t a[4], const uint32_t b[2]) {
#if defined(GPT_CUDA_ON_CPU)
    fake_kernel_mma(d, a, b, 1);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
template <class T> GPT_CUDA_DEVICE void gpt_cuda_mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    gpt_cuda__mma(T(), d, a, b);
}

//== functions ==============================================================================================

/* 2^x with an error of 2 ulp on a GPU. ex2.approx.ftz flushes subnormal numbers to zero. */
GPT_CUDA_DEVICE float gpt_cuda_exp2(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

GPT_CUDA_DEVICE float gpt_cuda_rsqrt(float x) {
#if defined(__CUDA_ARCH__)
    return rsqrtf(x);
#else
    return 1 / sqrtf(x);
#endif
}

//== launching ==============================================================================================

template <class T> struct gpt_cuda__same { typedef T type; };
template <class... P> struct gpt_cuda__bytes {
    enum { total = 0 };
};
template <class T, class... P> struct gpt_cuda__bytes<T, P...> {
    enum { total = (int)sizeof(T) + (int)gpt_cuda__bytes<P...>::total };
};

/* Launches a kernel on the stream. On an error returns DDP_ERR_ENGINE; the error line has the kernel's name
   and CUDA's text. As always in CUDA, errors inside the kernel are reported by a later call. It can be called
   during stream capture. */
template <class... P>
static inline ddp_result gpt_cuda__launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                                          size_t shared_bytes, cudaStream_t stream,
                                          typename gpt_cuda__same<P>::type... args) {
    static_assert(gpt_cuda__bytes<P...>::total <= 4096, "a kernel takes 4 KiB of arguments");
    const char *call = "cudaLaunchKernel";
#if defined(GPT_CUDA_ON_CPU)
    cudaError_t error = fake_kernel_launch(name, grid, block, shared_bytes, stream, [=] { kernel(args...); });
#else
    void *list[] = {(void *)&args..., NULL};
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 32 * 1024) { /* the default limit is 48 KiB with static memory */
        call = "cudaFuncSetAttribute";
        error = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)shared_bytes);
    }
    if (error == cudaSuccess) {
        call = "cudaLaunchKernel";
        error = cudaLaunchKernel((const void *)kernel, grid, block, list, shared_bytes, stream);
    }
    if (error != cudaSuccess) cudaGetLastError(); /* reset it: it is reported here */
#endif
    if (error == cudaSuccess) return DDP_OK;
    return ddp_fail(
        DDP_ERR_ENGINE,
        "kernel %s, grid %u x %u x %u, block %u x %u x %u, %zu bytes of shared memory: %s: %s (%s)", name,
        grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, call, cudaGetErrorString(error),
        cudaGetErrorName(error));
}
#define GPT_CUDA_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    gpt_cuda__launch(#kernel, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

#endif /* GPT_CUDA_BASE_CUH */

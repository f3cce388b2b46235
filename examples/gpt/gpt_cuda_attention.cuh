/*  gpt_cuda_attention.cuh - causal attention on the GPU, forward and backward (FlashAttention-2).

    Dao 2023: tiles of queries and keys in shared memory, and an online softmax, so no T x T matrix is in
    memory. Backward recomputes the probabilities from lse. bf16 and f16 use tensor cores with f32
    accumulation.

USAGE
    gpt_cuda_attention it = {batch, length, heads, head_size, DDP_BF16, stream};
    gpt_cuda_attention_forward(&it, qkv, out, lse);     // both calls enqueue kernels and return
    gpt_cuda_attention_backward(&it, qkv, out, lse, d_out, d_qkv, workspace);

    qkv, d_qkv     (B, T, 3, NH, HS)  queries, keys, values, as the projection writes them
    out, d_out     (B, T, NH, HS)
    lse            (B, NH, T) f32     log of the sum of exp of a query's scaled scores, as in gpt_attention
    workspace      gpt_cuda_attention_workspace(&it) bytes, uninitialised

    All pointers are device memory, aligned to 16 bytes. T is arbitrary. bf16 with heads of 32, 64 or 128, and
    f16 with heads of 64 or 128, use the fast kernels. f32, and other head sizes up to
    GPT_CUDA_ATTENTION_LARGEST, use plain kernels for checks and small models.

CONTENTS
    interface  arguments  tiles  fragments  forward  prepare  backward  plain  calls

FORWARD
    A block has 128 queries of one head, a warp 32 of them. It iterates over tiles of 64 keys (32 for heads of
    128). cp.async loads the next tile during the computation. Scores stay in the layout of mma results,
    16 x 8 each:

        d[0], d[1]   row g, columns 2t, 2t + 1            g = lane / 4, t = lane % 4
        d[2], d[3]   row g + 8

    The left operand of the next mma, 16 x 16, has in each lane (g, 2t..), (g + 8, 2t..), (g, 2t + 8..) and
    (g + 8, 2t + 8..). These are the pairs of two neighbouring results, rounded to 16 bits. So the
    probabilities are the left operand of P V without leaving their registers.
    exp(x) is 2^(x log2 e): scale and log2 e are one factor, and one multiply-add gives the exponent. A warp
    skips tiles above the diagonal and masks only tiles on it. Blocks of one head are neighbours, so that they
    read its keys from L2. Blocks with the most keys start first.

BACKWARD
    Scores are transposed (keys down, queries across), so dV += P^T dO and dK += dS^T Q use registers in the
    same way. A block has 128 keys of one head and iterates over tiles of 64 queries. Only dQ += dS K sums
    over the keys of all warps and passes dS through shared memory. This needs 5 products; a separate kernel
    for dQ would need 7.

    Order of sums: a tile of dQ is the sum over several blocks. Query tile i (64 rows) needs key tiles
    j = i / 2, i / 2 - 1, ..., 0 (128 rows), and the sum has this order. The first block writes its part to
    the workspace, the next ones read it, add theirs and write it, and the last rounds to 16 bits into d_qkv.
    So the bits do not depend on the schedule, and no floating-point atomics are needed. Block j processes its
    query tiles i = 2j, 2j + 1, ... in ascending order. After tile i it stores its progress in progress[j]
    (release). Before it reads tile i it waits (acquire) until block j + 1 has passed tile i.

    No deadlock: a block gets its tile from a ticket that it draws when it starts. Tickets are ordered by
    head, and within a head by descending j. Block j waits only for block j + 1 of its head, which has a lower
    ticket and is therefore running. By induction from the lowest unfinished ticket, every block makes
    progress, for any number of concurrent blocks and any start order. With equal steps block j reaches tile i
    two steps after block j + 1.

    Visibility: the threads of block j + 1 store and reach a barrier, then one thread stores the flag with
    release at GPU scope, which is cumulative. One thread of block j loads it with acquire, then a barrier,
    then all threads load (PTX memory model: causality order includes barriers). Each word is read by the
    thread with the same number as the thread that wrote it.

SHARED MEMORY
    A row of a tile has D 16-bit values in chunks of 16 bytes. Chunk c of row r is stored at c ^ (r % 8)
    (heads of 32: c ^ (r / 2 % 4)). So the 8 rows of a column that ldmatrix reads, and the 8 rows that a warp
    writes, are in 32 different banks.

REGISTERS
    Accumulators use most of them: 128 of 255 in backward, 64 of 168 in forward with heads of 64. With ptxas
    13.0 the only spills are at most 24 bytes of addresses, with heads of 64, used once per iteration.
    Backward with heads of 64 uses 81 KiB of shared memory: two blocks per multiprocessor of sm_90.

    Has not run on a GPU: it compiles for sm_80 and sm_90, and tests run its kernels thread by thread on the
    CPU. */
#ifndef GPT_CUDA_ATTENTION_CUH
#define GPT_CUDA_ATTENTION_CUH

#include "gpt_cuda_base.cuh"

//== interface ==============================================================================================

#define GPT_CUDA_ATTENTION_LARGEST 256 /* largest head size */

typedef struct gpt_cuda_attention {
    int batch, length, heads, head_size; /* B, T, NH (of this rank), HS */
    ddp_dtype dtype;                     /* 0 = DDP_BF16; DDP_F16, DDP_F32 */
    cudaStream_t stream;
} gpt_cuda_attention;

/* Returns NULL for valid values, otherwise the error as one sentence. */
static const char *gpt_cuda_attention_check(const gpt_cuda_attention *it);

/* Bytes of the workspace of backward. Its contents are not kept between calls. */
static size_t gpt_cuda_attention_workspace(const gpt_cuda_attention *it);

/* FLOPs of the 2 products of forward, or the 5 of backward, below the diagonal. */
static double gpt_cuda_attention_flops(const gpt_cuda_attention *it, int backward);

/* Both enqueue kernels on it->stream and return. Errors: DDP_ERR_INVALID, DDP_ERR_ENGINE. */
static ddp_result gpt_cuda_attention_forward(const gpt_cuda_attention *it, const void *qkv, void *out,
                                             float *lse);
static ddp_result gpt_cuda_attention_backward(const gpt_cuda_attention *it, const void *qkv, const void *out,
                                              const float *lse, const void *d_out, void *d_qkv,
                                              void *workspace);

//== arguments ==============================================================================================

enum {
    GPT_CUDA__QUERIES = 128, /* queries of a tile in forward; its keys: gpt_cuda__forward_shape */
    GPT_CUDA__DOWN = 128,    /* keys of a tile in backward */
    GPT_CUDA__ACROSS = 64,   /* queries of a tile in backward */
    GPT_CUDA__PLAIN = 32     /* queries and keys of a tile in the plain kernels */
};
#define GPT_CUDA__LOG2_E 1.4426950408889634f
#if defined(__CUDACC__) && !defined(GPT_CUDA_ON_CPU)
#define GPT_CUDA__KEEP _Pragma("unroll 1") /* prevents unrolling */
#else
#define GPT_CUDA__KEEP
#endif

/* Arguments of all kernels in this file. */
template <class T> struct gpt_cuda__attn {
    int batch, length, heads, size, padded; /* padded: length, rounded up to GPT_CUDA__ACROSS */
    float scale;                            /* of scores: 1 / sqrt(HS) */
    const T *qkv, *out, *d_out;
    T *to, *d_qkv; /* to: out of forward */
    float *lse;
    int *ticket;    /* start of the workspace */
    int *progress;  /* (B NH, key tiles): query tiles before this one include this block's part of dQ */
    float *lse2;    /* (B NH, padded): lse in base 2; infinity after the end, so that probabilities are 0 */
    float *delta;   /* (B NH, padded): sum of out d_out of a query and head, equal to the sum of P dP */
    float *partial; /* (B NH, padded / ACROSS): tiles of dQ in the order of the threads' registers */
};

/* Tile and head of a block. */
struct gpt_cuda__place {
    int tile, pair, head; /* pair: index of (batch, head) */
    size_t row;           /* first row of the sequence in (B T) */
};

template <class T>
GPT_CUDA_DEVICE gpt_cuda__place gpt_cuda__place_of(const gpt_cuda__attn<T> &a, int block, int tiles) {
    gpt_cuda__place at;
    at.tile = tiles - 1 - block % tiles;
    at.pair = block / tiles;
    at.head = at.pair % a.heads;
    at.row = (size_t)(at.pair / a.heads) * (size_t)a.length;
    return at;
}

/* Warp of this thread in the block. The shuffle from lane 0 shows the compiler that all lanes have the same
   value. */
GPT_CUDA_DEVICE int gpt_cuda__warp() { return gpt_cuda_shuffle((int)threadIdx.x / 32, 0); }

/* Start of queries (part 0), keys (1) or values (2) of a head in qkv or d_qkv. A row has 3 NH HS elements. */
template <class T, class P>
GPT_CUDA_DEVICE P *gpt_cuda__part(const gpt_cuda__attn<T> &a, P *qkv, const gpt_cuda__place &at, int part) {
    return qkv + (at.row * 3 + (size_t)part) * (size_t)(a.heads * a.size) + (size_t)(at.head * a.size);
}

//== tiles ==================================================================================================

/* threadIdx.x, hidden from the optimizer: addresses derived from it are computed again each time, in a few
   instructions, and do not occupy registers that a loop needs for accumulators. */
GPT_CUDA_DEVICE int gpt_cuda__thread() {
    int thread = (int)threadIdx.x;
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(thread));
#endif
    return thread;
}

/* Byte offset of chunk `chunk` of a row in a tile with rows of D elements. */
template <int D> GPT_CUDA_DEVICE int gpt_cuda__at(int row, int chunk) {
    return row * (2 * D) + (chunk ^ (D == 32 ? row / 2 % 4 : row % 8)) * 16;
}

/* Moves an offset by 16 * rows16 rows and 16 * columns16 columns. `at` must be in the first 16 columns. */
template <int D> GPT_CUDA_DEVICE int gpt_cuda__move(int at, int rows16, int columns16) {
    return (at ^ columns16 * 32) + rows16 * 32 * D;
}

/* Offsets of a lane for ldmatrix of the 16 x 16 values from `row` on, with 8 x 8 tiles in column-major (down)
   or row-major (across) order. */
template <int D> GPT_CUDA_DEVICE int gpt_cuda__down(int row) {
    int thread = gpt_cuda__thread();
    return gpt_cuda__at<D>(row + thread % 16, thread % 32 / 16);
}
template <int D> GPT_CUDA_DEVICE int gpt_cuda__across(int row) {
    int thread = gpt_cuda__thread();
    return gpt_cuda__at<D>(row + thread % 32 / 16 * 8 + thread % 8, thread / 8 % 2);
}

/* Starts asynchronous copies of rows first to first + ROWS - 1 of a head to a tile. Rows from `end` on become
   zeros. All threads of the block call it. */
template <int ROWS, int D, int THREADS, class T>
GPT_CUDA_DEVICE void gpt_cuda__tile_load(unsigned char *tile, const T *from, int pitch, int first, int end) {
    const int CHUNKS = D / 8, STEP = THREADS / CHUNKS; /* rows at a time */
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "a thread has the same chunk of each of its rows");
    int thread = gpt_cuda__thread(), row = thread / CHUNKS, chunk = thread % CHUNKS;
    unsigned char *to = tile + gpt_cuda__at<D>(row, chunk);
    const T *at = from + ((first + row) * pitch + chunk * 8);
    GPT_CUDA_UNROLL for (int i = 0; i < ROWS / STEP; i++)
        gpt_cuda_copy_async16(to + i * STEP * 2 * D, at + i * STEP * pitch, first + row + i * STEP < end);
}

//== fragments ==============================================================================================

/* d (16 M x 16 N) += a b^T. a: 16 M rows of a tile from a_at = down(row). b: 16 N rows of a tile from
   b_at = across(row). */
template <class T, int M, int N, int D>
GPT_CUDA_DEVICE void gpt_cuda__mma_rows(float (*d)[2 * N][4], const unsigned char *a, int a_at,
                                        const unsigned char *b, int b_at) {
    GPT_CUDA_UNROLL for (int k = 0; k < D / 16; k++) {
        uint32_t left[M][4];
        GPT_CUDA_UNROLL for (int m = 0; m < M; m++)
            gpt_cuda_ldmatrix4(left[m], a + gpt_cuda__move<D>(a_at, m, k));
        GPT_CUDA_UNROLL for (int n = 0; n < N; n++) {
            uint32_t right[4];
            gpt_cuda_ldmatrix4(right, b + gpt_cuda__move<D>(b_at, n, k));
            GPT_CUDA_UNROLL for (int m = 0; m < M; m++) {
                gpt_cuda_mma<T>(d[m][2 * n], left[m], right);
                gpt_cuda_mma<T>(d[m][2 * n + 1], left[m], right + 2);
            }
        }
    }
}

/* d (16 M x D) += p b. p: 16 M x 16 K in registers. b: 16 K rows of a tile from b_at = down(row). */
template <class T, int M, int K, int D>
GPT_CUDA_DEVICE void gpt_cuda__mma_columns(float (*d)[D / 8][4], const uint32_t (*p)[K][4],
                                           const unsigned char *b, int b_at) {
    GPT_CUDA_UNROLL for (int k = 0; k < K; k++) GPT_CUDA_UNROLL for (int n = 0; n < D / 16; n++) {
        uint32_t right[4];
        gpt_cuda_ldmatrix4_trans(right, b + gpt_cuda__move<D>(b_at, k, n));
        GPT_CUDA_UNROLL for (int m = 0; m < M; m++) {
            gpt_cuda_mma<T>(d[m][2 * n], p[m][k], right);
            gpt_cuda_mma<T>(d[m][2 * n + 1], p[m][k], right + 2);
        }
    }
}

/* Converts results of mma (16 x 8 each) to left operands of the next mma (16 x 16 each). */
template <class T, int M, int K>
GPT_CUDA_DEVICE void gpt_cuda__pack(uint32_t (*p)[K][4], const float (*d)[2 * K][4]) {
    GPT_CUDA_UNROLL for (int m = 0; m < M; m++) GPT_CUDA_UNROLL for (int n = 0; n < 2 * K; n++)
        GPT_CUDA_UNROLL for (int r = 0; r < 2; r++)
            p[m][n / 2][n % 2 * 2 + r] = gpt_cuda_pack<T>(d[m][n][2 * r], d[m][n][2 * r + 1]);
}

/* Stores 32 neighbouring columns of row g (r = 0) or g + 8 (r = 1) of four results, times scale. The four
   lanes of a row transpose their 4 x 4 pairs, so that each has 16 contiguous bytes. All lanes of the warp
   call it. `to` is the start of the row; it is written only if `valid`. */
template <class T>
GPT_CUDA_DEVICE void gpt_cuda__store_row(T *to, const float (*d)[4], int r, float scale, int valid) {
    int t = (int)threadIdx.x % 4;
    uint32_t w[4], got;
    GPT_CUDA_UNROLL for (int n = 0; n < 4; n++)
        w[n] = gpt_cuda_pack<T>(d[n][2 * r] * scale, d[n][2 * r + 1] * scale);
    GPT_CUDA_UNROLL for (int n = 0; n < 4; n += 2) {
        got = gpt_cuda_shuffle_xor(t & 1 ? w[n] : w[n + 1], 1);
        if (t & 1)
            w[n] = got;
        else
            w[n + 1] = got;
    }
    GPT_CUDA_UNROLL for (int n = 0; n < 2; n++) {
        got = gpt_cuda_shuffle_xor(t & 2 ? w[n] : w[n + 2], 2);
        if (t & 2)
            w[n] = got;
        else
            w[n + 2] = got;
    }
    if (valid) gpt_cuda_store<8>(to + 8 * t, (const T *)(const void *)w);
}

/* Stores 16 M rows of a warp from `row` on, 32 N columns, to a matrix with row pitch `pitch`. Skips rows from
   `end` on. */
template <int M, int N, class T>
GPT_CUDA_DEVICE void gpt_cuda__store_rows(T *to, int pitch, int row, int end, const float (*d)[4 * N][4],
                                          float scale) {
    GPT_CUDA_UNROLL for (int m = 0; m < M; m++) GPT_CUDA_UNROLL for (int r = 0; r < 2; r++) {
        int at = row + 16 * m + 8 * r + (int)threadIdx.x % 32 / 4;
        GPT_CUDA_UNROLL for (int n = 0; n < N; n++)
            gpt_cuda__store_row(to + at * pitch + 32 * n, d[m] + 4 * n, r, scale, at < end);
    }
}

//== forward ================================================================================================

/* Maximum and sum over the four lanes of a row. */
GPT_CUDA_DEVICE float gpt_cuda__row_max(float x) {
    x = fmaxf(x, gpt_cuda_shuffle_xor(x, 1));
    return fmaxf(x, gpt_cuda_shuffle_xor(x, 2));
}
GPT_CUDA_DEVICE float gpt_cuda__row_sum(float x) {
    x += gpt_cuda_shuffle_xor(x, 1);
    return x + gpt_cuda_shuffle_xor(x, 2);
}

/* Causal mask: in the scores of 16 M queries from `query` on and keys from `key` on, later keys become
   -infinity. */
template <int M, int N> GPT_CUDA_DEVICE void gpt_cuda__mask_rows(float (*s)[N][4], int query, int key) {
    int thread = gpt_cuda__thread(), g = thread % 32 / 4, t = thread % 4;
    GPT_CUDA_UNROLL for (int m = 0; m < M; m++) GPT_CUDA_UNROLL for (int n = 0; n < N; n++)
        GPT_CUDA_UNROLL for (int i = 0; i < 4;
                             i++) if (key + 8 * n + 2 * t + i % 2 > query + 16 * m + 8 * (i / 2) + g)
            s[m][n][i] = -INFINITY;
}

/* One step of the online softmax for row g (r = 0) or g + 8 (r = 1): updates the running maximum *top,
   replaces the scores s by 2^(factor (s - top)), and rescales *sum and the outputs o to the new maximum. *sum
   is this lane's part of the row's sum. */
template <int N, int D>
GPT_CUDA_DEVICE void gpt_cuda__softmax_row(float (*s)[4], float (*o)[4], int r, float factor, float *top,
                                           float *sum) {
    float largest = *top, shrink, shift;
    GPT_CUDA_UNROLL for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    largest = gpt_cuda__row_max(largest);
    shrink = gpt_cuda_exp2((*top - largest) * factor); /* 0 in the first tile, where top is minus infinity */
    shift = largest * factor;
    *top = largest;
    *sum *= shrink;
    GPT_CUDA_UNROLL for (int n = 0; n < N; n++) GPT_CUDA_UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) {
        s[n][i] = gpt_cuda_exp2(fmaf(s[n][i], factor, -shift));
        *sum += s[n][i];
    }
    GPT_CUDA_UNROLL for (int n = 0; n < D / 8; n++) {
        o[n][2 * r] *= shrink;
        o[n][2 * r + 1] *= shrink;
    }
}

/* Stores out and lse of a warp's 32 queries from `row` on. */
template <int D, class T>
GPT_CUDA_DEVICE void gpt_cuda__forward_end(const gpt_cuda__attn<T> &a, const gpt_cuda__place &at, int row,
                                           float (*o)[D / 8][4], const float (*top)[2],
                                           const float (*sum)[2]) {
    const size_t pitch = (size_t)(a.heads * D);
    T *to = a.to + at.row * pitch + (size_t)(at.head * D);
    GPT_CUDA_UNROLL for (int m = 0; m < 2; m++) GPT_CUDA_UNROLL for (int r = 0; r < 2; r++) {
        int query = row + 16 * m + 8 * r + (int)threadIdx.x % 32 / 4;
        float total = gpt_cuda__row_sum(sum[m][r]), lse = top[m][r] * a.scale + logf(total);
        GPT_CUDA_UNROLL for (int n = 0; n < D / 32; n++) gpt_cuda__store_row(
            to + (size_t)query * pitch + 32 * n, o[m] + 4 * n, r, 1 / total, query < a.length);
        if (threadIdx.x % 4 == 0 && query < a.length)
            gpt_cuda_store<1>(a.lse + (size_t)at.pair * (size_t)a.length + query, &lse);
    }
}

/* Keys per tile, and blocks per multiprocessor that fit in registers. Shared memory holds the queries and two
   stages of keys and values. */
template <int D> struct gpt_cuda__forward_shape {
    enum {
        KEYS = D == 128 ? 32 : 64,
        BLOCKS = D == 128 ? 2 : 3,
        BYTES = KEYS * D * 2,
        SHARED_BYTES = GPT_CUDA__QUERIES * D * 2 + 4 * BYTES
    };
};

template <class T, int D>
static __global__ void __launch_bounds__(128, gpt_cuda__forward_shape<D>::BLOCKS)
    gpt_cuda__attn_forward_kernel(const gpt_cuda__attn<T> a) {
    enum {
        QUERIES = GPT_CUDA__QUERIES,
        KEYS = gpt_cuda__forward_shape<D>::KEYS,
        BYTES = gpt_cuda__forward_shape<D>::BYTES
    };
    GPT_CUDA_DYNAMIC_SHARED(shared);
    const gpt_cuda__place at = gpt_cuda__place_of(a, (int)blockIdx.x, (a.length + QUERIES - 1) / QUERIES);
    const T *head = gpt_cuda__part(a, a.qkv, at, 0);
    const int width = a.heads * D;
    const int first = at.tile * QUERIES, mine = gpt_cuda__warp() * 32, row = first + mine;
    const int end = first + QUERIES < a.length ? first + QUERIES : a.length;
    const float factor = a.scale * GPT_CUDA__LOG2_E;
    unsigned char *const stages = shared + QUERIES * D * 2;
    float o[2][D / 8][4] = {}, top[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}, sum[2][2] = {};
    gpt_cuda__tile_load<QUERIES, D, 128>(shared, head, 3 * width, first, a.length);
    gpt_cuda__tile_load<KEYS, D, 128>(stages, head + width, 3 * width, 0, a.length);
    gpt_cuda__tile_load<KEYS, D, 128>(stages + BYTES, head + 2 * width, 3 * width, 0, a.length);
    gpt_cuda_copy_commit();
    for (int key = 0, stage = 0; key < end; key += KEYS, stage ^= 1) {
        unsigned char *here = stages + stage * 2 * BYTES, *next = stages + (stage ^ 1) * 2 * BYTES;
        gpt_cuda_copy_wait<0>();
        gpt_cuda_sync(); /* this stage is loaded, and the other one is no longer read */
        if (key + KEYS < end) {
            gpt_cuda__tile_load<KEYS, D, 128>(next, head + width, 3 * width, key + KEYS, a.length);
            gpt_cuda__tile_load<KEYS, D, 128>(next + BYTES, head + 2 * width, 3 * width, key + KEYS,
                                              a.length);
            gpt_cuda_copy_commit();
        }
        if (key > row)
            continue; /* all queries of the warp precede these keys: row and key are multiples of 32 */
        float s[2][KEYS / 8][4] = {};
        uint32_t p[2][KEYS / 16][4];
        gpt_cuda__mma_rows<T, 2, KEYS / 16, D>(s, shared, gpt_cuda__down<D>(mine), here,
                                               gpt_cuda__across<D>(0));
        if (key + KEYS - 1 > row)
            gpt_cuda__mask_rows<2, KEYS / 8>(s, row, key); /* also masks keys after T for queries before T */
        GPT_CUDA_UNROLL for (int m = 0; m < 2; m++) GPT_CUDA_UNROLL for (int r = 0; r < 2; r++)
            gpt_cuda__softmax_row<KEYS / 8, D>(s[m], o[m], r, factor, &top[m][r], &sum[m][r]);
        gpt_cuda__pack<T, 2, KEYS / 16>(p, s);
        gpt_cuda__mma_columns<T, 2, KEYS / 16, D>(o, p, here + BYTES, gpt_cuda__down<D>(0));
    }
    gpt_cuda__forward_end<D>(a, at, row, o, top, sum);
}

//== prepare ================================================================================================

#define GPT_CUDA__PREPARE_THREADS 256

/* First kernel of backward: computes lse2 and delta with 8 lanes per query and head and 32 queries per block,
   and sets ticket and progress to 0. */
template <class T>
static __global__ void __launch_bounds__(256) gpt_cuda__attn_prepare_kernel(const gpt_cuda__attn<T> a) {
    const int WIDE = 16 / (int)sizeof(T), tiles = a.padded / 32, pair = (int)blockIdx.x / tiles;
    const int lane = (int)threadIdx.x % 8, zero = 0;
    const int query = (int)blockIdx.x % tiles * 32 + (int)threadIdx.x / 8,
              keys = (a.length + GPT_CUDA__DOWN - 1) / GPT_CUDA__DOWN;
    const size_t at = (((size_t)(pair / a.heads) * (size_t)a.length + (size_t)query) * (size_t)a.heads
                       + (size_t)(pair % a.heads))
                      * (size_t)a.size;
    const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x,
                 to = (size_t)pair * (size_t)a.padded + (size_t)query;
    float delta = 0, lse2 = INFINITY, lse;
    T x[WIDE], y[WIDE];
    if (query < a.length && a.size % WIDE == 0) {
        for (int i = lane * WIDE; i < a.size; i += 8 * WIDE) {
            gpt_cuda_load<WIDE>(x, a.out + at + i);
            gpt_cuda_load<WIDE>(y, a.d_out + at + i);
            GPT_CUDA_UNROLL for (int j = 0; j < WIDE; j++)
                delta = fmaf(gpt_cuda_to_float(x[j]), gpt_cuda_to_float(y[j]), delta);
        }
    } else if (query < a.length) {
        for (int i = lane; i < a.size; i += 8) {
            gpt_cuda_load<1>(x, a.out + at + i);
            gpt_cuda_load<1>(y, a.d_out + at + i);
            delta = fmaf(gpt_cuda_to_float(x[0]), gpt_cuda_to_float(y[0]), delta);
        }
    }
    GPT_CUDA_UNROLL for (int mask = 4; mask > 0; mask /= 2) delta += gpt_cuda_shuffle_xor(delta, mask);
    if (lane == 0) {
        if (query < a.length) {
            gpt_cuda_load<1>(&lse, a.lse + (size_t)pair * (size_t)a.length + (size_t)query);
            lse2 = lse * GPT_CUDA__LOG2_E;
        }
        gpt_cuda_store<1>(a.lse2 + to, &lse2);
        gpt_cuda_store<1>(a.delta + to, &delta);
    }
    if (thread < (size_t)(a.batch * a.heads * keys)) gpt_cuda_store<1>(a.progress + thread, &zero);
    if (thread == 0) gpt_cuda_store<1>(a.ticket, &zero);
}

//== backward ===============================================================================================

/* Shape of a block of backward. A warp has 16 M keys, and of dQ 16 QM queries and 32 columns. */
template <int D> struct gpt_cuda__backward_shape {
    enum {
        WARPS = D == 128 ? 8 : 4,
        THREADS = 32 * WARPS,
        BLOCKS = D == 128 ? 1 : 2,
        M = GPT_CUDA__DOWN / 16 / WARPS,
        BESIDE = D / 32,
        QM = GPT_CUDA__ACROSS / 16 * BESIDE / WARPS,
        KEY_BYTES = GPT_CUDA__DOWN * D * 2,
        QUERY_BYTES = GPT_CUDA__ACROSS * D * 2,
        NUMBER_BYTES = GPT_CUDA__ACROSS * 4,
        STAGE_BYTES = 2 * (QUERY_BYTES + NUMBER_BYTES),
        SCORE_BYTES = GPT_CUDA__DOWN * GPT_CUDA__ACROSS * 2,
        SHARED_BYTES = 2 * KEY_BYTES + 2 * STAGE_BYTES
                       + SCORE_BYTES /* keys, values, two stages of queries, dS */
    };
};

/* Loads a stage: queries from `query` on, their d_out, lse2 and delta. */
template <int D, class T>
GPT_CUDA_DEVICE void gpt_cuda__stage_load(unsigned char *stage, const gpt_cuda__attn<T> &a,
                                          const gpt_cuda__place &at, int query) {
    typedef gpt_cuda__backward_shape<D> S;
    const int width = a.heads * D;
    gpt_cuda__tile_load<GPT_CUDA__ACROSS, D, S::THREADS>(stage, gpt_cuda__part(a, a.qkv, at, 0), 3 * width,
                                                         query, a.length);
    gpt_cuda__tile_load<GPT_CUDA__ACROSS, D, S::THREADS>(
        stage + S::QUERY_BYTES, a.d_out + at.row * (size_t)width + (size_t)(at.head * D), width, query,
        a.length);
    if (threadIdx.x < 2 * S::NUMBER_BYTES / 16) {
        int i = (int)threadIdx.x;
        const float *from = i < S::NUMBER_BYTES / 16 ? a.lse2 : a.delta;
        from += (size_t)at.pair * (size_t)a.padded + (size_t)(query + i % (S::NUMBER_BYTES / 16) * 4);
        gpt_cuda_copy_async16(stage + 2 * S::QUERY_BYTES + 16 * i, from, 1);
    }
}

/* Replaces scores s by probabilities, and gradients dp of probabilities by gradients of scores, for keys from
   `key` (down) and queries from `query` (across). numbers: lse2 of the queries, followed after ACROSS floats
   by delta. The scale is applied later, to dQ and dK. */
template <int M>
GPT_CUDA_DEVICE void gpt_cuda__softmax_backward(float (*s)[4][4], float (*dp)[4][4], const float *numbers,
                                                float factor, int key, int query) {
    const int thread = gpt_cuda__thread(), g = thread % 32 / 4, t = thread % 4,
              masked = key + 16 * M - 1 > query;
    GPT_CUDA_UNROLL for (int n = 0; n < 4; n++) {
        const float2 lse2 = *(const float2 *)(const void *)(numbers + 8 * n + 2 * t);
        const float2 delta = *(const float2 *)(const void *)(numbers + GPT_CUDA__ACROSS + 8 * n + 2 * t);
        GPT_CUDA_UNROLL for (int m = 0; m < M; m++) GPT_CUDA_UNROLL for (int i = 0; i < 4; i++) {
            if (masked && key + 16 * m + 8 * (i / 2) + g > query + 8 * n + 2 * t + i % 2)
                s[m][n][i] = -INFINITY;
            s[m][n][i] = gpt_cuda_exp2(fmaf(s[m][n][i], factor, i % 2 ? -lse2.y : -lse2.x));
            dp[m][n][i] = s[m][n][i] * (dp[m][n][i] - (i % 2 ? delta.y : delta.x));
        }
    }
}

/* Processes 32 queries of a stage (half 0 or 1) with the warp's keys, from row `mine` of the block: adds to
   dk and dv, and writes dS^T to scores. key, query: first key of the block, first query of the stage. */
template <class T, int D, int M>
GPT_CUDA_DEVICE void gpt_cuda__backward_half(const unsigned char *keys, const unsigned char *stage,
                                             unsigned char *scores, int mine, int half, int key, int query,
                                             float factor, float (*dk)[D / 8][4], float (*dv)[D / 8][4]) {
    typedef gpt_cuda__backward_shape<D> S;
    const int thread = gpt_cuda__thread(), g = thread % 32 / 4, t = thread % 4,
              none = key + mine > query + 32 * half + 31;
    const float *numbers = (const float *)(const void *)(stage + 2 * S::QUERY_BYTES) + 32 * half;
    uint32_t p[M][2][4], ds[M][2][4] = {};
    if (!none) { /* none: all keys of the warp are later than all queries */
        float s[M][4][4] = {}, dp[M][4][4] = {};
        gpt_cuda__mma_rows<T, M, 2, D>(s, keys, gpt_cuda__down<D>(mine), stage,
                                       gpt_cuda__across<D>(32 * half));
        gpt_cuda__mma_rows<T, M, 2, D>(dp, keys + S::KEY_BYTES, gpt_cuda__down<D>(mine),
                                       stage + S::QUERY_BYTES, gpt_cuda__across<D>(32 * half));
        gpt_cuda__softmax_backward<M>(s, dp, numbers, factor, key + mine, query + 32 * half);
        gpt_cuda__pack<T, M, 2>(p, s);
        gpt_cuda__pack<T, M, 2>(ds, dp);
    }
    GPT_CUDA_UNROLL for (int m = 0; m < M; m++) GPT_CUDA_UNROLL for (int n = 0; n < 4; n++)
            GPT_CUDA_UNROLL for (int r = 0; r < 2; r++)
        * (uint32_t *)(void *)(scores
                               + gpt_cuda__at<GPT_CUDA__ACROSS>(mine + 16 * m + 8 * r + g, 4 * half + n)
                               + 4 * t) = ds[m][n / 2][n % 2 * 2 + r];
    if (none) return;
    gpt_cuda__mma_columns<T, M, 2, D>(dv, p, stage + S::QUERY_BYTES, gpt_cuda__down<D>(32 * half));
    gpt_cuda__mma_columns<T, M, 2, D>(dk, ds, stage, gpt_cuda__down<D>(32 * half));
}

/* Adds this block's part dS K to the tile of dQ. The first block starts the sum; the last one stores it to
   d_qkv, the others to the workspace. */
template <int D, class T>
GPT_CUDA_DEVICE void gpt_cuda__backward_queries(const gpt_cuda__attn<T> &a, const gpt_cuda__place &at,
                                                const unsigned char *keys, const unsigned char *scores,
                                                int warp, int tile) {
    typedef gpt_cuda__backward_shape<D> S;
    enum { QM = S::QM };
    const int down16 = warp / S::BESIDE * QM, beside = warp % S::BESIDE;
    const int key = at.tile * GPT_CUDA__DOWN, query = tile * GPT_CUDA__ACROSS,
              first = key + GPT_CUDA__DOWN > query;
    const int a_at = gpt_cuda__across<GPT_CUDA__ACROSS>(0), b_at = gpt_cuda__down<D>(0);
    float *partial = a.partial + ((size_t)at.pair * (size_t)a.padded + (size_t)query) * D
                     + gpt_cuda__thread() * 4;
    float dq[QM][4][4] = {}, before[QM][4][4] = {};
    if (!first) /* loaded here, used after the products */
        GPT_CUDA_UNROLL for (int i = 0; i < QM * 4; i++)
            gpt_cuda_load<4>(before[i / 4][i % 4], partial + i * S::THREADS * 4);
    /* parts of 64 keys with at least one key that is not later than all queries */
    for (int part = 0; part < GPT_CUDA__DOWN / 64 && key + 64 * part < query + GPT_CUDA__ACROSS; part++)
        GPT_CUDA_UNROLL for (int k = 0; k < 4; k++) {
            uint32_t left[QM][4], right[2][4];
            GPT_CUDA_UNROLL for (int m = 0; m < QM; m++) gpt_cuda_ldmatrix4_trans(
                left[m], scores + gpt_cuda__move<GPT_CUDA__ACROSS>(a_at, 4 * part + k, down16 + m));
            GPT_CUDA_UNROLL for (int n = 0; n < 2; n++) gpt_cuda_ldmatrix4_trans(
                right[n], keys + gpt_cuda__move<D>(b_at, 4 * part + k, 2 * beside + n));
            GPT_CUDA_UNROLL for (int m = 0; m < QM; m++) GPT_CUDA_UNROLL for (int n = 0; n < 4; n++)
                gpt_cuda_mma<T>(dq[m][n], left[m], right[n / 2] + n % 2 * 2);
        }
    GPT_CUDA_UNROLL for (int i = 0; i < QM * 16; i++)
        dq[i / 16][i / 4 % 4][i % 4] += before[i / 16][i / 4 % 4][i % 4];
    if (at.tile > 0) {
        GPT_CUDA_UNROLL for (int i = 0; i < QM * 4; i++)
            gpt_cuda_store<4>(partial + i * S::THREADS * 4, dq[i / 4][i % 4]);
    } else {
        gpt_cuda__store_rows<QM, 1>(gpt_cuda__part(a, a.d_qkv, at, 0) + 32 * beside, 3 * a.heads * D,
                                    query + 16 * down16, a.length, dq, a.scale);
    }
}

template <class T, int D>
static __global__ void __launch_bounds__(gpt_cuda__backward_shape<D>::THREADS,
                                         gpt_cuda__backward_shape<D>::BLOCKS)
    gpt_cuda__attn_backward_kernel(const gpt_cuda__attn<T> a) {
    typedef gpt_cuda__backward_shape<D> S;
    enum { M = S::M };
    GPT_CUDA_DYNAMIC_SHARED(shared);
    GPT_CUDA_SHARED(int, drawn, 1);
    if (threadIdx.x == 0) drawn[0] = gpt_cuda_atomic_add(a.ticket, 1);
    gpt_cuda_warp_sync();
    gpt_cuda_sync();
    const int tiles = (a.length + GPT_CUDA__DOWN - 1) / GPT_CUDA__DOWN, end = a.padded / GPT_CUDA__ACROSS;
    const int warp = gpt_cuda__warp(), mine = warp * 16 * M;
    const gpt_cuda__place at = gpt_cuda__place_of(a, drawn[0], tiles);
    const int key = at.tile * GPT_CUDA__DOWN, begin = key / GPT_CUDA__ACROSS;
    const int waits = threadIdx.x == S::THREADS - 32; /* in another warp than the release */
    const int pitch = 3 * a.heads * D;
    const float factor = a.scale * GPT_CUDA__LOG2_E;
    int *const progress = a.progress + (size_t)at.pair * (size_t)tiles + at.tile;
    int known = 0; /* last value read of the progress of block j + 1 */
    unsigned char *const keys = shared, *const stages = keys + 2 * S::KEY_BYTES,
                         *const scores = stages + 2 * S::STAGE_BYTES;
    float dk[M][D / 8][4] = {}, dv[M][D / 8][4] = {};
    gpt_cuda__tile_load<GPT_CUDA__DOWN, D, S::THREADS>(keys, gpt_cuda__part(a, a.qkv, at, 1), pitch, key,
                                                       a.length);
    gpt_cuda__tile_load<GPT_CUDA__DOWN, D, S::THREADS>(keys + S::KEY_BYTES, gpt_cuda__part(a, a.qkv, at, 2),
                                                       pitch, key, a.length);
    gpt_cuda__stage_load<D>(stages, a, at, begin * GPT_CUDA__ACROSS);
    gpt_cuda_copy_commit();
    for (int tile = begin; tile < end; tile++) {
        const int first = tile * GPT_CUDA__ACROSS < key + GPT_CUDA__DOWN;
        unsigned char *here = stages + (tile - begin) % 2 * S::STAGE_BYTES,
                      *next = stages + (tile - begin + 1) % 2 * S::STAGE_BYTES;
        gpt_cuda_copy_wait<0>();
        gpt_cuda_sync(); /* stage loaded; the other one and scores are free; previous dQ written */
        if (threadIdx.x == 0 && tile > begin && at.tile > 0) gpt_cuda_release(progress, tile);
        gpt_cuda_warp_sync(); /* reconverge for ldmatrix and mma, as after every branch of one thread */
        if (tile + 1 < end) {
            gpt_cuda__stage_load<D>(next, a, at, (tile + 1) * GPT_CUDA__ACROSS);
            gpt_cuda_copy_commit();
        }
        if (waits && !first && known <= tile)
            known = gpt_cuda_acquire(progress + 1); /* often enough; otherwise wait after the next products */
        gpt_cuda_warp_sync();
        GPT_CUDA__KEEP for (int half = 0; half < 2; half++) gpt_cuda__backward_half<T, D, M>(
            keys, here, scores, mine, half, key, tile * GPT_CUDA__ACROSS, factor, dk, dv);
        while (waits && !first && known <= tile) known = gpt_cuda_acquire(progress + 1);
        gpt_cuda_warp_sync();
        gpt_cuda_sync(); /* scores are written, and the acquire of one thread holds for all */
        gpt_cuda__backward_queries<D>(a, at, keys, scores, warp, tile);
    }
    gpt_cuda_sync();
    if (threadIdx.x == 0 && at.tile > 0) gpt_cuda_release(progress, end);
    gpt_cuda_warp_sync();
    gpt_cuda__store_rows<M, D / 32>(gpt_cuda__part(a, a.d_qkv, at, 1), pitch, key + mine, a.length, dk,
                                    a.scale);
    gpt_cuda__store_rows<M, D / 32>(gpt_cuda__part(a, a.d_qkv, at, 2), pitch, key + mine, a.length, dv, 1);
}

//== plain ==================================================================================================
/* Kernels with f32 arithmetic in shared memory, for any head size up to 8 N. A block has 32 rows (queries, or
   keys in backward) with 8 lanes each, and iterates over tiles of 32 of the others. Lane l has the scores
   with l, l + 8, l + 16 and l + 24 of them, and the columns l, l + 8, ... of sums. */

#define GPT_CUDA__PLAIN_THREADS (8 * GPT_CUDA__PLAIN)
#define GPT_CUDA__PLAIN_SCORES (GPT_CUDA__PLAIN + 4) /* floats of a row of scores */

/* Floats of a row of a tile. The padding puts the chunks of 8 rows in different banks. */
GPT_CUDA_BOTH int gpt_cuda__plain_pitch(int size) { return (size + 31) / 32 * 32 + 4; }
GPT_CUDA_BOTH int gpt_cuda__plain_tile(int size) { return GPT_CUDA__PLAIN * gpt_cuda__plain_pitch(size); }

/* Loads rows first to first + 31 of a head. Rows from `end` on, and columns up to a multiple of 8, become
   zeros. */
template <class T>
GPT_CUDA_DEVICE void gpt_cuda__plain_load(float *tile, const T *from, size_t pitch, int first, int end,
                                          int size) {
    const int columns = (size + 7) / 8 * 8;
    for (int i = (int)threadIdx.x * 4; i < GPT_CUDA__PLAIN * columns; i += GPT_CUDA__PLAIN_THREADS * 4) {
        int row = i / columns, column = i % columns;
        const T *at = from + (size_t)(first + row) * pitch + column;
        T x[4];
        GPT_CUDA_UNROLL for (int j = 0; j < 4; j++) x[j] = gpt_cuda_from_float<T>(0);
        if (first + row < end) {
            if (size % 4 == 0) {
                if (column < size) gpt_cuda_load<4>(x, at);
            } else {
                GPT_CUDA_UNROLL for (int j = 0; j < 4; j++) if (column + j < size)
                    gpt_cuda_load<1>(x + j, at + j);
            }
        }
        GPT_CUDA_UNROLL for (int j = 0; j < 4; j++)
            tile[row * gpt_cuda__plain_pitch(size) + column + j] = gpt_cuda_to_float(x[j]);
    }
}

/* s[n] = dot product of `row` and row l + 8 n of a tile. */
GPT_CUDA_DEVICE void gpt_cuda__plain_scores(float s[4], const float *row, const float *tile, int size) {
    const int pitch = gpt_cuda__plain_pitch(size), l = (int)threadIdx.x % 8;
    GPT_CUDA_UNROLL for (int n = 0; n < 4; n++) s[n] = 0;
    for (int i = 0; i < size; i += 4) {
        const float4 x = *(const float4 *)(const void *)(row + i);
        GPT_CUDA_UNROLL for (int n = 0; n < 4; n++) {
            const float4 y = *(const float4 *)(const void *)(tile + (l + 8 * n) * pitch + i);
            s[n] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, s[n]))));
        }
    }
}

/* sum[n] += sum over j of p[j] * element (j, l + 8 n) of a tile. */
template <int N>
GPT_CUDA_DEVICE void gpt_cuda__plain_sum(float *sum, const float *p, const float *tile, int size) {
    const int pitch = gpt_cuda__plain_pitch(size), l = (int)threadIdx.x % 8;
    for (int j = 0; j < GPT_CUDA__PLAIN; j++)
        GPT_CUDA_UNROLL for (int n = 0; n < N; n++) if (8 * n < size)
            sum[n] = fmaf(p[j], tile[j * pitch + l + 8 * n], sum[n]);
}

/* Stores this lane's columns of a row. */
template <int N, class T>
GPT_CUDA_DEVICE void gpt_cuda__plain_store(T *row, const float *sum, float scale, int size) {
    const int l = (int)threadIdx.x % 8;
    GPT_CUDA_UNROLL for (int n = 0; n < N; n++) {
        T x = gpt_cuda_from_float<T>(sum[n] * scale);
        if (l + 8 * n < size) gpt_cuda_store<1>(row + l + 8 * n, &x);
    }
}

/* Maximum and sum over the 8 lanes of a row. */
GPT_CUDA_DEVICE float gpt_cuda__plain_max(float x) {
    GPT_CUDA_UNROLL for (int mask = 4; mask > 0; mask /= 2) x = fmaxf(x, gpt_cuda_shuffle_xor(x, mask));
    return x;
}
GPT_CUDA_DEVICE float gpt_cuda__plain_total(float x) {
    GPT_CUDA_UNROLL for (int mask = 4; mask > 0; mask /= 2) x += gpt_cuda_shuffle_xor(x, mask);
    return x;
}

template <class T, int N>
static __global__ void __launch_bounds__(256) gpt_cuda__attn_plain_forward_kernel(const gpt_cuda__attn<T> a) {
    GPT_CUDA_DYNAMIC_SHARED(shared);
    const gpt_cuda__place at = gpt_cuda__place_of(a, (int)blockIdx.x,
                                                  (a.length + GPT_CUDA__PLAIN - 1) / GPT_CUDA__PLAIN);
    const int mine = (int)threadIdx.x / 8, l = (int)threadIdx.x % 8, first = at.tile * GPT_CUDA__PLAIN,
              row = first + mine;
    const size_t width = (size_t)(a.heads * a.size);
    const float factor = a.scale * GPT_CUDA__LOG2_E;
    float *queries = (float *)(void *)shared, *keys = queries + gpt_cuda__plain_tile(a.size),
          *values = keys + gpt_cuda__plain_tile(a.size);
    float *p = values + gpt_cuda__plain_tile(a.size) + mine * GPT_CUDA__PLAIN_SCORES;
    float o[N] = {}, s[4], top = -INFINITY, sum = 0;
    gpt_cuda__plain_load(queries, gpt_cuda__part(a, a.qkv, at, 0), 3 * width, first, a.length, a.size);
    for (int key = 0; key <= first; key += GPT_CUDA__PLAIN) {
        gpt_cuda_sync();
        gpt_cuda__plain_load(keys, gpt_cuda__part(a, a.qkv, at, 1), 3 * width, key, a.length, a.size);
        gpt_cuda__plain_load(values, gpt_cuda__part(a, a.qkv, at, 2), 3 * width, key, a.length, a.size);
        gpt_cuda_sync();
        float largest = top;
        gpt_cuda__plain_scores(s, queries + mine * gpt_cuda__plain_pitch(a.size), keys, a.size);
        GPT_CUDA_UNROLL for (int n = 0; n < 4; n++) {
            if (key + l + 8 * n > row) s[n] = -INFINITY;
            largest = fmaxf(largest, s[n]);
        }
        largest = gpt_cuda__plain_max(largest);
        float shrink = exp2f((top - largest) * factor), part = 0;
        top = largest;
        GPT_CUDA_UNROLL for (int n = 0; n < 4; n++) {
            s[n] = exp2f((s[n] - top) * factor);
            part += s[n];
            p[l + 8 * n] = s[n];
        }
        sum = sum * shrink + part;
        GPT_CUDA_UNROLL for (int n = 0; n < N; n++) o[n] *= shrink;
        gpt_cuda_warp_sync(); /* the lanes of a row are in one warp */
        gpt_cuda__plain_sum<N>(o, p, values, a.size);
    }
    sum = gpt_cuda__plain_total(sum);
    float lse = top * a.scale + logf(sum);
    if (row >= a.length) return;
    gpt_cuda__plain_store<N>(a.to + (at.row + (size_t)row) * width + (size_t)(at.head * a.size), o, 1 / sum,
                             a.size);
    if (l == 0) gpt_cuda_store<1>(a.lse + (size_t)at.pair * (size_t)a.length + (size_t)row, &lse);
}

/* KEYS 1: rows are keys, dk += dS^T Q and dv += P^T dO. KEYS 0: rows are queries, dq += dS K. x, y: keys and
   values, or queries and d_out. */
template <class T, int N, int KEYS>
static __global__ void __launch_bounds__(256)
    gpt_cuda__attn_plain_backward_kernel(const gpt_cuda__attn<T> a) {
    GPT_CUDA_DYNAMIC_SHARED(shared);
    const int tiles = (a.length + GPT_CUDA__PLAIN - 1) / GPT_CUDA__PLAIN, tile = gpt_cuda__plain_tile(a.size);
    const gpt_cuda__place at = gpt_cuda__place_of(a, (int)blockIdx.x, tiles);
    const int mine = (int)threadIdx.x / 8, l = (int)threadIdx.x % 8, first = at.tile * GPT_CUDA__PLAIN,
              row = first + mine;
    const size_t width = (size_t)(a.heads * a.size);
    const float factor = a.scale * GPT_CUDA__LOG2_E, *lse2 = a.lse2 + (size_t)at.pair * (size_t)a.padded,
                *delta = a.delta + (lse2 - a.lse2);
    const T *queries = gpt_cuda__part(a, a.qkv, at, 0), *keys = gpt_cuda__part(a, a.qkv, at, 1),
            *values = gpt_cuda__part(a, a.qkv, at, 2);
    const T *d_out = a.d_out + at.row * width + (size_t)(at.head * a.size);
    float *x = (float *)(void *)shared, *y = x + tile, *others_x = y + tile, *others_y = others_x + tile;
    float *p = others_y + tile + mine * GPT_CUDA__PLAIN_SCORES,
          *ds = p + GPT_CUDA__PLAIN * GPT_CUDA__PLAIN_SCORES;
    float sum_x[N] = {}, sum_y[N] = {}, s[4], dp[4], lse_of, delta_of;
    const T *own_x = KEYS ? keys : queries;
    const T *own_y = KEYS ? values : d_out;
    const T *other_x = KEYS ? queries : keys;
    const T *other_y = KEYS ? d_out : values;
    const size_t own_pitch = KEYS ? 3 * width : width, other_pitch = 4 * width - own_pitch;
    const int tile_begin = KEYS ? at.tile : 0;
    const int tile_end = KEYS ? tiles : at.tile + 1;
    gpt_cuda__plain_load(x, own_x, 3 * width, first, a.length, a.size);
    gpt_cuda__plain_load(y, own_y, own_pitch, first, a.length, a.size);
    for (int i = tile_begin; i < tile_end; i++) {
        gpt_cuda_sync();
        gpt_cuda__plain_load(others_x, other_x, 3 * width, i * GPT_CUDA__PLAIN, a.length, a.size);
        gpt_cuda__plain_load(others_y, other_y, other_pitch, i * GPT_CUDA__PLAIN, a.length, a.size);
        gpt_cuda_sync();
        gpt_cuda__plain_scores(s, x + mine * gpt_cuda__plain_pitch(a.size), others_x, a.size);
        gpt_cuda__plain_scores(dp, y + mine * gpt_cuda__plain_pitch(a.size), others_y, a.size);
        GPT_CUDA_UNROLL for (int n = 0; n < 4; n++) {
            int other = i * GPT_CUDA__PLAIN + l + 8 * n;
            int query = KEYS ? other : row;
            int key = KEYS ? row : other;
            gpt_cuda_load<1>(&lse_of, lse2 + query);
            gpt_cuda_load<1>(&delta_of, delta + query);
            s[n] = key > query ? 0 : exp2f(fmaf(s[n], factor, -lse_of));
            p[l + 8 * n] = s[n];
            ds[l + 8 * n] = s[n] * (dp[n] - delta_of);
        }
        gpt_cuda_warp_sync(); /* the lanes of a row are in one warp */
        gpt_cuda__plain_sum<N>(sum_x, ds, others_x, a.size);
        if (KEYS) gpt_cuda__plain_sum<N>(sum_y, p, others_y, a.size);
    }
    if (row >= a.length) return;
    gpt_cuda__plain_store<N>(gpt_cuda__part(a, a.d_qkv, at, KEYS ? 1 : 0) + (size_t)row * 3 * width, sum_x,
                             a.scale, a.size);
    if (KEYS)
        gpt_cuda__plain_store<N>(gpt_cuda__part(a, a.d_qkv, at, 2) + (size_t)row * 3 * width, sum_y, 1,
                                 a.size);
}

//== calls ==================================================================================================

static inline size_t gpt_cuda__attn_padded(const gpt_cuda_attention *it) {
    return ((size_t)it->length + GPT_CUDA__ACROSS - 1) / GPT_CUDA__ACROSS * GPT_CUDA__ACROSS;
}

static inline const char *gpt_cuda_attention_check(const gpt_cuda_attention *it) {
    if (!it) return "the gpt_cuda_attention is NULL";
    if (it->batch < 1 || it->length < 1 || it->heads < 1 || it->head_size < 1)
        return "batch, length, heads and head_size must be at least 1";
    if (it->head_size > GPT_CUDA_ATTENTION_LARGEST)
        return "head_size must be at most 256: use more heads for the same channels";
    if (it->dtype != 0 && it->dtype != DDP_BF16 && it->dtype != DDP_F16 && it->dtype != DDP_F32)
        return "dtype must be DDP_BF16, DDP_F16 or DDP_F32";
    if ((double)it->batch * it->heads * (double)gpt_cuda__attn_padded(it) >= 2147483648.0
        || 3.0 * it->heads * it->head_size * (it->length + 128.0) >= 2147483648.0)
        return "batch times heads times length, and length times 3 times channels, must stay below 2^31: "
               "use fewer or shorter sequences";
    return NULL;
}

/* Byte offsets in the workspace: [0] lse2, [1] delta, [2] partial, [3] the end. Ticket and progress precede
   lse2. */
static inline void gpt_cuda__attn_layout(const gpt_cuda_attention *it, int fast, size_t at[4]) {
    size_t pairs = (size_t)it->batch * (size_t)it->heads, padded = gpt_cuda__attn_padded(it);
    size_t keys = ((size_t)it->length + GPT_CUDA__DOWN - 1) / GPT_CUDA__DOWN; /* tiles of them */
    at[0] = ((1 + pairs * keys) * sizeof(int) + 127) / 128 * 128;
    at[1] = at[0] + pairs * padded * sizeof(float);
    at[2] = at[1] + pairs * padded * sizeof(float);
    at[3] = at[2] + (fast ? pairs * padded * (size_t)it->head_size * sizeof(float) : 0);
}

/* Heads of 32 have no fast kernels in f16, as each takes seconds to compile. */
static inline int gpt_cuda__attn_fast(const gpt_cuda_attention *it) {
    if (it->dtype == DDP_F32) return 0;
    return (it->head_size == 32 && it->dtype != DDP_F16) || it->head_size == 64 || it->head_size == 128;
}

static inline size_t gpt_cuda_attention_workspace(const gpt_cuda_attention *it) {
    size_t at[4];
    if (gpt_cuda_attention_check(it)) return 0;
    gpt_cuda__attn_layout(it, gpt_cuda__attn_fast(it), at);
    return at[3];
}

static inline double gpt_cuda_attention_flops(const gpt_cuda_attention *it, int backward) {
    double scores = (double)it->batch * it->heads * it->length * (it->length + 1.0) / 2;
    return (backward ? 5 : 2) * 2 * scores * it->head_size;
}

template <class T>
static inline gpt_cuda__attn<T> gpt_cuda__attn_arguments(const gpt_cuda_attention *it, const void *qkv,
                                                         void *to, float *lse) {
    gpt_cuda__attn<T> a;
    memset(&a, 0, sizeof a);
    a.batch = it->batch;
    a.length = it->length;
    a.heads = it->heads;
    a.size = it->head_size;
    a.padded = (int)gpt_cuda__attn_padded(it);
    a.scale = 1 / sqrtf((float)it->head_size);
    a.qkv = (const T *)qkv;
    a.to = (T *)to;
    a.lse = lse;
    return a;
}

static inline unsigned gpt_cuda__attn_blocks(const gpt_cuda_attention *it, int rows) {
    return (unsigned)it->batch * (unsigned)it->heads * (unsigned)((it->length + rows - 1) / rows);
}

/* Checks the description and the pointers. */
static inline ddp_result gpt_cuda__attn_valid(const char *function, const gpt_cuda_attention *it, int count,
                                              const char *const *names, const void *const *pointers) {
    const char *wrong = gpt_cuda_attention_check(it);
    if (wrong) return ddp_fail(DDP_ERR_INVALID, "%s: %s", function, wrong);
    for (int i = 0; i < count; i++) {
        if (!pointers[i])
            return ddp_fail(DDP_ERR_INVALID, "%s: %s is NULL; give device memory", function, names[i]);
        if ((uintptr_t)pointers[i] % 16)
            return ddp_fail(DDP_ERR_INVALID, "%s: %s is not aligned to 16 bytes", function, names[i]);
    }
    return DDP_OK;
}

template <int D, class T>
static inline ddp_result gpt_cuda__attn_forward(const gpt_cuda_attention *it, const gpt_cuda__attn<T> &a) {
    return GPT_CUDA_LAUNCH((gpt_cuda__attn_forward_kernel<T, D>),
                           gpt_cuda__attn_blocks(it, GPT_CUDA__QUERIES), 128,
                           gpt_cuda__forward_shape<D>::SHARED_BYTES, it->stream, a);
}

template <int D, class T>
static inline ddp_result gpt_cuda__attn_backward(const gpt_cuda_attention *it, const gpt_cuda__attn<T> &a) {
    typedef gpt_cuda__backward_shape<D> S;
    return GPT_CUDA_LAUNCH((gpt_cuda__attn_backward_kernel<T, D>), gpt_cuda__attn_blocks(it, GPT_CUDA__DOWN),
                           S::THREADS, S::SHARED_BYTES, it->stream, a);
}

template <class T>
static inline ddp_result gpt_cuda__attn_plain_forward(const gpt_cuda_attention *it,
                                                      const gpt_cuda__attn<T> &a) {
    const size_t shared = sizeof(float)
                          * (size_t)(3 * gpt_cuda__plain_tile(a.size)
                                     + GPT_CUDA__PLAIN * GPT_CUDA__PLAIN_SCORES);
    const unsigned blocks = gpt_cuda__attn_blocks(it, GPT_CUDA__PLAIN);
    if (a.size <= 64)
        return GPT_CUDA_LAUNCH((gpt_cuda__attn_plain_forward_kernel<T, 8>), blocks, GPT_CUDA__PLAIN_THREADS,
                               shared, it->stream, a);
    return GPT_CUDA_LAUNCH((gpt_cuda__attn_plain_forward_kernel<T, 32>), blocks, GPT_CUDA__PLAIN_THREADS,
                           shared, it->stream, a);
}

template <class T, int N>
static inline ddp_result gpt_cuda__attn_plain_both(const gpt_cuda_attention *it, const gpt_cuda__attn<T> &a) {
    const size_t shared = sizeof(float)
                          * (size_t)(4 * gpt_cuda__plain_tile(a.size)
                                     + 2 * GPT_CUDA__PLAIN * GPT_CUDA__PLAIN_SCORES);
    const unsigned blocks = gpt_cuda__attn_blocks(it, GPT_CUDA__PLAIN);
    ddp_result result = GPT_CUDA_LAUNCH((gpt_cuda__attn_plain_backward_kernel<T, N, 1>), blocks,
                                        GPT_CUDA__PLAIN_THREADS, shared, it->stream, a);
    if (result != DDP_OK) return result;
    return GPT_CUDA_LAUNCH((gpt_cuda__attn_plain_backward_kernel<T, N, 0>), blocks, GPT_CUDA__PLAIN_THREADS,
                           shared, it->stream, a);
}

template <class T>
static inline ddp_result gpt_cuda__attn_plain_backward(const gpt_cuda_attention *it,
                                                       const gpt_cuda__attn<T> &a) {
    return a.size <= 64 ? gpt_cuda__attn_plain_both<T, 8>(it, a) : gpt_cuda__attn_plain_both<T, 32>(it, a);
}

static inline ddp_result gpt_cuda_attention_forward(const gpt_cuda_attention *it, const void *qkv, void *out,
                                                    float *lse) {
    static const char *const names[] = {"qkv", "out", "lse"};
    const void *const pointers[] = {qkv, out, lse};
    ddp_result result = gpt_cuda__attn_valid("gpt_cuda_attention_forward", it, 3, names, pointers);
    if (result != DDP_OK) return result;
    if (it->dtype == DDP_F32) {
        gpt_cuda__attn<float> a = gpt_cuda__attn_arguments<float>(it, qkv, out, lse);
        return gpt_cuda__attn_plain_forward(it, a);
    }
    if (it->dtype == DDP_F16) {
        gpt_cuda__attn<gpt_f16> a = gpt_cuda__attn_arguments<gpt_f16>(it, qkv, out, lse);
        if (it->head_size == 64) return gpt_cuda__attn_forward<64>(it, a);
        if (it->head_size == 128) return gpt_cuda__attn_forward<128>(it, a);
        return gpt_cuda__attn_plain_forward(it, a);
    }
    gpt_cuda__attn<gpt_bf16> a = gpt_cuda__attn_arguments<gpt_bf16>(it, qkv, out, lse);
    if (it->head_size == 32) return gpt_cuda__attn_forward<32>(it, a);
    if (it->head_size == 64) return gpt_cuda__attn_forward<64>(it, a);
    if (it->head_size == 128) return gpt_cuda__attn_forward<128>(it, a);
    return gpt_cuda__attn_plain_forward(it, a);
}

/* Sets the arguments of backward and launches its first kernel. */
template <class T>
static inline ddp_result gpt_cuda__attn_prepare(const gpt_cuda_attention *it, gpt_cuda__attn<T> *a,
                                                const void *out, const void *d_out, void *d_qkv,
                                                void *workspace) {
    unsigned char *memory = (unsigned char *)workspace;
    size_t at[4];
    gpt_cuda__attn_layout(it, gpt_cuda__attn_fast(it), at);
    a->out = (const T *)out;
    a->d_out = (const T *)d_out;
    a->d_qkv = (T *)d_qkv;
    a->ticket = (int *)workspace;
    a->progress = a->ticket + 1;
    a->lse2 = (float *)(void *)(memory + at[0]);
    a->delta = (float *)(void *)(memory + at[1]);
    a->partial = (float *)(void *)(memory + at[2]);
    return GPT_CUDA_LAUNCH(gpt_cuda__attn_prepare_kernel<T>,
                           (unsigned)it->batch * (unsigned)it->heads * (unsigned)(a->padded / 32),
                           GPT_CUDA__PREPARE_THREADS, 0, it->stream, *a);
}

static inline ddp_result gpt_cuda_attention_backward(const gpt_cuda_attention *it, const void *qkv,
                                                     const void *out, const float *lse, const void *d_out,
                                                     void *d_qkv, void *workspace) {
    static const char *const names[] = {"qkv", "out", "lse", "d_out", "d_qkv", "workspace"};
    const void *const pointers[] = {qkv, out, lse, d_out, d_qkv, workspace};
    ddp_result result = gpt_cuda__attn_valid("gpt_cuda_attention_backward", it, 6, names, pointers);
    if (result != DDP_OK) return result;
    if (d_qkv == qkv)
        return ddp_fail(
            DDP_ERR_INVALID,
            "gpt_cuda_attention_backward: d_qkv is qkv, which blocks read to the end; give other memory");
    float *const lse_of = (float *)lse; /* read only */
    if (it->dtype == DDP_F32) {
        gpt_cuda__attn<float> a = gpt_cuda__attn_arguments<float>(it, qkv, NULL, lse_of);
        result = gpt_cuda__attn_prepare(it, &a, out, d_out, d_qkv, workspace);
        return result == DDP_OK ? gpt_cuda__attn_plain_backward(it, a) : result;
    }
    if (it->dtype == DDP_F16) {
        gpt_cuda__attn<gpt_f16> a = gpt_cuda__attn_arguments<gpt_f16>(it, qkv, NULL, lse_of);
        result = gpt_cuda__attn_prepare(it, &a, out, d_out, d_qkv, workspace);
        if (result != DDP_OK) return result;
        if (it->head_size == 64) return gpt_cuda__attn_backward<64>(it, a);
        if (it->head_size == 128) return gpt_cuda__attn_backward<128>(it, a);
        return gpt_cuda__attn_plain_backward(it, a);
    }
    gpt_cuda__attn<gpt_bf16> a = gpt_cuda__attn_arguments<gpt_bf16>(it, qkv, NULL, lse_of);
    result = gpt_cuda__attn_prepare(it, &a, out, d_out, d_qkv, workspace);
    if (result != DDP_OK) return result;
    if (it->head_size == 32) return gpt_cuda__attn_backward<32>(it, a);
    if (it->head_size == 64) return gpt_cuda__attn_backward<64>(it, a);
    if (it->head_size == 128) return gpt_cuda__attn_backward<128>(it, a);
    return gpt_cuda__attn_plain_backward(it, a);
}

#endif /* GPT_CUDA_ATTENTION_CUH */

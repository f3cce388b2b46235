/*  gpt.h - the small GPT of the examples: the architecture of GPT-2 in f32, unit by unit

USAGE
    #include "gpt.h"            C11 (gnu11) or C++17; needs only libm. All functions are static.
    cc -O3 -march=native trainer.c -lm                              built-in matrix product
    cc -O3 -march=native -DGPT_USE_CBLAS trainer.c -lopenblas -lm   cblas_sgemm for the large products

EXAMPLE
    gpt_config config = {256, 256, 4, 4, 256};            // vocab, context, layers, heads, channels
    gpt_model model;
    if (gpt_model_create(&model, &config, batch, GPT_OWN_VALUES | GPT_OWN_GRADS) != 0) return 1;
    gpt_model_init(&model, seed);
    for (;;) {
        double loss = gpt_model_forward_backward(&model, tokens, targets, batch, 256, NULL, NULL);
        update(model.values, model.grads);                // for example with ddp_optimizer_step
    }
    gpt_model_destroy(&model);

CONTENTS      (search for the tags)
    >>config >>parameters >>vectors >>gemm >>layers >>dropout >>attention >>embed >>block >>head >>model
    >>generate

CONCEPTS
    Parameters are a numbered list: "wte", "wpe", twelve tensors per block, "ln_f.weight", "ln_f.bias",
    "head.weight". Tables with one pointer per parameter hold the addresses of values and gradients. The
    tensors can be anywhere in memory.

    The head is tied to the token embedding. "head.weight" has the value of "wte" (the same pointer), but its
    own gradient. Each use of the matrix writes its own gradient. The trainer adds the two after the reduction
    over ranks.

    The functions gpt_embed_*, gpt_block_* and gpt_head_* compute one unit each, in memory that the caller
    passes. Unit 0 is the embedding, 1 to layers are the blocks, layers + 1 is the head. gpt_model_* calls all
    units, and gpt_model_unit_* one of them.

    Backward overwrites gradients, or adds to them if pass.accumulate is set. It calls pass.ready(user, index)
    as soon as gradient `index` is final, so that its reduction can start while backward continues.

    Dropout is a property of the pass: gpt_model_train_pass has it, gpt_model_pass does not. The caller gives
    each sequence a random key, from which all of its masks follow.

    Shapes are written (B, T, C): batch, positions, channels. NH heads of HS = C / NH channels. V is the
    vocabulary.

DETERMINISM
    One thread, no global state, no clock. Each element of a product is a sum in the order of the summed
    index, for any shape. Therefore results do not depend on tiling, on other elements, or on the rank. */
#ifndef GPT_H
#define GPT_H

//== config ==================================================================================== >>config
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#ifdef GPT_USE_CBLAS
#include <cblas.h>
#endif

#define GPT_DEF static inline
#define GPT_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define GPT_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__CUDACC__)
#define GPT_UNROLL
#else
#define GPT_UNROLL _Pragma("GCC unroll 16")
#endif

typedef struct gpt_config {
    int vocab;   /* V; 256 for bytes */
    int context; /* longest T */
    int layers;
    int heads;    /* divides channels */
    int channels; /* C */
} gpt_config;

/* Returns NULL for a valid configuration, otherwise an error text. */
GPT_DEF const char *gpt_config_check(const gpt_config *c) {
    if (c->vocab < 1 || c->context < 1 || c->layers < 0 || c->heads < 1 || c->channels < 1)
        return "vocab, context, heads and channels must be at least 1";
    if (c->channels % c->heads) return "channels must be a multiple of heads";
    return NULL;
}

//== parameters ============================================================================ >>parameters

/* The twelve tensors of a block, in the order of the parameter list. */
enum {
    GPT_LN1_WEIGHT,
    GPT_LN1_BIAS,
    GPT_QKV_WEIGHT,
    GPT_QKV_BIAS,
    GPT_ATTN_WEIGHT,
    GPT_ATTN_BIAS,
    GPT_LN2_WEIGHT,
    GPT_LN2_BIAS,
    GPT_FC_WEIGHT,
    GPT_FC_BIAS,
    GPT_MLP_WEIGHT,
    GPT_MLP_BIAS,
    GPT_BLOCK_PARAMS
};

typedef struct gpt_param {
    char name[32];
    int ndim;         /* 1 or 2 */
    int64_t shape[2]; /* row-major; shape[1] is 1 for a vector */
    int64_t count;    /* elements */
    int unit;         /* 0 embedding, 1..layers blocks, layers + 1 head */
    int tied_to;      /* index of the parameter that this one shares its value with, or -1 */
    float constant;   /* initial value, where deviation is 0 */
    float deviation;  /* standard deviation of the normal initial value */
} gpt_param;

GPT_DEF int gpt_param_count(const gpt_config *c) { return 2 + GPT_BLOCK_PARAMS * c->layers + 3; }
/* The index of "head.weight". */
GPT_DEF int gpt_param_head(const gpt_config *c) { return gpt_param_count(c) - 1; }
GPT_DEF int gpt_block_first_param(int layer) { return 2 + GPT_BLOCK_PARAMS * layer; }

static inline void gpt__param_set(gpt_param *p, const char *name, int64_t rows, int64_t columns,
                                  float constant, float deviation) {
    snprintf(p->name, sizeof p->name, "%s", name);
    p->ndim = columns ? 2 : 1;
    p->shape[0] = rows;
    p->shape[1] = columns ? columns : 1;
    p->count = p->shape[0] * p->shape[1];
    p->constant = constant;
    p->deviation = deviation;
}

/* Describes parameter `index`. Returns 0, or -1 with a zeroed *p for an invalid index. Initial values are
   those of GPT-2: normal with standard deviation 0.02, divided by sqrt(2 layers) for the two projections that
   add to the residual stream. */
GPT_DEF int gpt_param_info(const gpt_config *c, int index, gpt_param *p) {
    static const struct {
        const char *name;
        int rows, columns, residual;
        float constant;
    } kinds[GPT_BLOCK_PARAMS] = {
        {"ln1.weight", 1, 0, 0, 1},    {"ln1.bias", 1, 0, 0, 0},         {"attn.qkv.weight", 3, 1, 0, 0},
        {"attn.qkv.bias", 3, 0, 0, 0}, {"attn.proj.weight", 1, 1, 1, 0}, {"attn.proj.bias", 1, 0, 0, 0},
        {"ln2.weight", 1, 0, 0, 1},    {"ln2.bias", 1, 0, 0, 0},         {"mlp.fc.weight", 4, 1, 0, 0},
        {"mlp.fc.bias", 4, 0, 0, 0},   {"mlp.proj.weight", 1, 4, 1, 0},  {"mlp.proj.bias", 1, 0, 0, 0},
    };
    int count = gpt_param_count(c), C = c->channels;
    memset(p, 0, sizeof *p);
    if (index < 0 || index >= count) return -1;
    p->tied_to = -1;
    p->unit = index < 2 ? 0 : 1 + (index - 2) / GPT_BLOCK_PARAMS; /* for the head this is layers + 1 */
    if (index == 0)
        gpt__param_set(p, "wte", c->vocab, C, 0, 0.02f);
    else if (index == 1)
        gpt__param_set(p, "wpe", c->context, C, 0, 0.02f);
    else if (index == count - 3)
        gpt__param_set(p, "ln_f.weight", C, 0, 1, 0);
    else if (index == count - 2)
        gpt__param_set(p, "ln_f.bias", C, 0, 0, 0);
    else if (index == count - 1) {
        gpt__param_set(p, "head.weight", c->vocab, C, 0, 0.02f);
        p->tied_to = 0;
    } else {
        int layer = (index - 2) / GPT_BLOCK_PARAMS, kind = (index - 2) % GPT_BLOCK_PARAMS;
        float deviation = kinds[kind].columns ? 0.02f : 0.0f;
        char name[32];
        if (kinds[kind].residual) deviation /= sqrtf(2.0f * (float)c->layers);
        snprintf(name, sizeof name, "h.%d.%s", layer, kinds[kind].name);
        gpt__param_set(p, name, (int64_t)kinds[kind].rows * C, (int64_t)kinds[kind].columns * C,
                       kinds[kind].constant, deviation);
    }
    return 0;
}

static inline uint64_t gpt__mix(uint64_t x) { /* the finalizer of SplitMix64 (Steele, Lea, Flood 2014) */
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Random bits number `counter` of stream `key`. Without state, so elements can be computed in any order. */
GPT_DEF uint64_t gpt_random(uint64_t key, uint64_t counter) {
    return gpt__mix(gpt__mix(key + UINT64_C(0x9e3779b97f4a7c15)) + counter * UINT64_C(0x9e3779b97f4a7c15));
}

/* Writes the initial values of elements [offset, offset + count) of parameter `index` to out. The bits of an
   element do not depend on offset and count, so that shards can be initialized separately. */
GPT_DEF void gpt_param_init(const gpt_config *c, uint64_t seed, int index, int64_t offset, int64_t count,
                            float *out) {
    gpt_param p;
    uint64_t key;
    if (gpt_param_info(c, index, &p) != 0) return;
    key = gpt_random(seed, (uint64_t)(p.tied_to >= 0 ? p.tied_to : index));
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits;
        float u, angle;
        if (p.deviation == 0) {
            out[i] = p.constant;
            continue;
        }
        bits = gpt_random(key, (uint64_t)(offset + i));
        u = (float)((bits >> 40) + 1) * (1.0f / 16777216.0f); /* (0, 1]; Box-Muller */
        angle = (float)((bits >> 8) & 0xffffff) * (6.28318530718f / 16777216.0f);
        out[i] = p.deviation * sqrtf(-2.0f * logf(u)) * cosf(angle);
    }
}

/* Pointers to the values of one unit, or to its gradients, from a table with one pointer per parameter. */
typedef struct gpt_embed {
    float *wte, *wpe; /* (V, C) (context, C) */
} gpt_embed;
typedef struct gpt_block {
    float *ln1_weight, *ln1_bias, *qkv_weight, *qkv_bias;   /* (C) (C) (3C, C) (3C) */
    float *attn_weight, *attn_bias, *ln2_weight, *ln2_bias; /* (C, C) (C) (C) (C) */
    float *fc_weight, *fc_bias, *mlp_weight, *mlp_bias;     /* (4C, C) (4C) (C, 4C) (C) */
    int first;                                              /* parameter index of ln1_weight */
} gpt_block;
typedef struct gpt_head {
    float *ln_weight, *ln_bias, *weight; /* (C) (C) (V, C) */
    int first;                           /* parameter index of ln_weight */
} gpt_head;

GPT_DEF gpt_embed gpt_embed_view(float *const *table) {
    gpt_embed e;
    e.wte = table[0];
    e.wpe = table[1];
    return e;
}

GPT_DEF gpt_block gpt_block_view(float *const *table, int layer) {
    float *const *t = table + gpt_block_first_param(layer);
    gpt_block b;
    memcpy(&b, t, GPT_BLOCK_PARAMS * sizeof(float *)); /* the members are in the order of the list */
    b.first = gpt_block_first_param(layer);
    return b;
}

static inline int gpt__block_layer(const gpt_block *b) { return (b->first - 2) / GPT_BLOCK_PARAMS; }

GPT_DEF gpt_head gpt_head_view(const gpt_config *c, float *const *table) {
    gpt_head h;
    h.first = gpt_param_count(c) - 3;
    h.ln_weight = table[h.first];
    h.ln_bias = table[h.first + 1];
    h.weight = table[h.first + 2];
    return h;
}

//== vectors ================================================================================== >>vectors
/* Vectors of the machine's width, with the compiler's vector types. Loads are unaligned. The last vector of a
   row may be partial. It is computed with the same operations, so the bits of an element do not depend on its
   position. */

#if defined(__AVX512F__)
#define GPT_LANES 16
#elif defined(__AVX__)
#define GPT_LANES 8
#else
#define GPT_LANES 4
#endif
typedef float gpt_vec __attribute__((vector_size(GPT_LANES * 4)));
typedef int32_t gpt_mask __attribute__((vector_size(GPT_LANES * 4))); /* a lane is 0 or -1 */
typedef uint32_t gpt_bits __attribute__((vector_size(GPT_LANES * 4)));
typedef float gpt_quad __attribute__((vector_size(16)));

GPT_INLINE gpt_vec gpt__splat(float x) {
    gpt_vec zero = {0};
    return x - zero;
}
GPT_INLINE gpt_vec gpt__load(const float *p) {
    gpt_vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
GPT_INLINE void gpt__store(float *p, gpt_vec v) { memcpy(p, &v, sizeof v); }

/* Loads the first `left` elements at p, at most one vector. The other lanes are `fill`. */
GPT_INLINE gpt_vec gpt__load_part(const float *p, ptrdiff_t left, float fill) {
    gpt_vec v;
    if (left >= GPT_LANES) return gpt__load(p);
    v = gpt__splat(fill);
    memcpy(&v, p, (size_t)left * sizeof(float));
    return v;
}

GPT_INLINE void gpt__store_part(float *p, gpt_vec v, ptrdiff_t left) {
    if (left >= GPT_LANES)
        gpt__store(p, v);
    else
        memcpy(p, &v, (size_t)left * sizeof(float));
}

GPT_INLINE gpt_vec gpt__select(gpt_mask m, gpt_vec a, gpt_vec b) {
    return (gpt_vec)((m & (gpt_mask)a) | (~m & (gpt_mask)b));
}

/* max(a, b) and min(a, b). The result is NaN if b is. */
GPT_INLINE gpt_vec gpt__max(gpt_vec a, gpt_vec b) {
#if defined(__AVX512F__)
    return (gpt_vec)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a,
                                        (__m512)b); /* gcc 12 warns about _mm512_max_ps in C++ */
#elif defined(__AVX__)
    return (gpt_vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (gpt_vec)_mm_max_ps((__m128)a, (__m128)b);
#else
    return gpt__select(a > b, a, b);
#endif
}

GPT_INLINE gpt_vec gpt__min(gpt_vec a, gpt_vec b) { return -gpt__max(-a, -b); }

GPT_INLINE gpt_vec gpt__sqrt(gpt_vec x) {
#if defined(__AVX512F__)
    return (gpt_vec)_mm512_maskz_sqrt_ps((__mmask16)-1, (__m512)x);
#elif defined(__AVX__)
    return (gpt_vec)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (gpt_vec)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < GPT_LANES; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

static inline float gpt__reduce_sum(gpt_vec v) { /* as a binary tree, the same everywhere */
    float x[GPT_LANES];
    memcpy(x, &v, sizeof x);
    for (int half = GPT_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

static inline float gpt__reduce_max(gpt_vec v) {
    float m = v[0];
    for (int i = 1; i < GPT_LANES; i++)
        if (v[i] > m || v[i] != v[i]) m = v[i];
    return m;
}

/* exp(x) with an error of at most 2 ulp for |x| <= 87; larger |x| are clamped. x = n ln 2 + r with |r| <=
   ln(2)/2. exp(r) is 1 + r + r^2 q(r); q minimizes the relative error by a Remez exchange (3e-9 before
   rounding). NaN stays NaN. */
GPT_INLINE gpt_vec gpt__exp(gpt_vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits */
    gpt_vec shifted, n, r, q;
    gpt_bits scale;
    x = gpt__min(gpt__splat(87.5f), gpt__max(gpt__splat(-87.0f), x));
    shifted = x * 1.44269504f + magic;
    n = shifted - magic;
    r = x - n * 0.693359375f; /* ln 2 in two parts, the first with few bits */
    r = r + n * 2.12194440e-4f;
    q = r * 1.38145402e-3f + 8.36874511e-3f;
    q = q * r + 4.16683908e-2f;
    q = q * r + 1.66665204e-1f;
    q = q * r + 4.99999934e-1f;
    scale = ((gpt_bits)shifted + (127u - 0x4B400000u)) << 23;
    return ((q * r) * r + r + 1.0f) * (gpt_vec)scale;
}

//== gemm ======================================================================================== >>gemm
/* C = A B, after Goto and van de Geijn (2008). Panels of A and B are packed, so that the innermost loop reads
   both with stride one and accumulates a tile of C in registers. A tile has GPT_MR rows and GPT_NR columns,
   which are two vectors.

             NR            B: packed in panels of NR columns, depth x NR each
           +----+----+
        MR | C tile  |     A: packed in panels of MR rows, depth x MR each
           +----+----+
*/
#define GPT_NR (2 * GPT_LANES)
#if defined(__AVX512F__) || defined(__aarch64__)
#define GPT_MR 12 /* 24 accumulators of 32 registers */
#else
#define GPT_MR 6 /* 12 accumulators of 16 registers */
#endif
#define GPT_KC 384  /* depth of a packed block: the tile is written back once per GPT_KC terms */
#define GPT_MC 120  /* rows of A packed at a time: GPT_MC x GPT_KC floats stay in the second-level cache */
#define GPT_NC 1024 /* columns of B packed at a time */
#define GPT_QB 64   /* queries that attention handles together, a multiple of GPT_NR */
#define GPT_ROUND_UP(n, to) (((n) + (to)-1) / (to) * (to))

/* A matrix where element (i, j) is data[i * row + j * column]; one of the two steps is 1. */
typedef struct gpt_matrix {
    const float *data;
    size_t row, column;
} gpt_matrix;

static inline gpt_matrix gpt__matrix(const float *data, size_t row, size_t column) {
    gpt_matrix m;
    m.data = data;
    m.row = row;
    m.column = column;
    return m;
}

GPT_INLINE gpt_quad gpt__quad_load(const float *p) {
    gpt_quad v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* out[j * step + i] = in[i * stride + j] for i, j < 4 */
GPT_INLINE void gpt__transpose4(float *out, size_t step, const float *in, size_t stride) {
    gpt_quad a = gpt__quad_load(in), b = gpt__quad_load(in + stride);
    gpt_quad c = gpt__quad_load(in + 2 * stride), d = gpt__quad_load(in + 3 * stride), row[4];
#if defined(__clang__)
    gpt_quad ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    gpt_quad cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    row[0] = __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5);
    row[1] = __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7);
    row[2] = __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5);
    row[3] = __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7);
#else
    typedef int32_t quad_index __attribute__((vector_size(16)));
    const quad_index even = {0, 4, 1, 5}, odd = {2, 6, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
    gpt_quad ab0 = __builtin_shuffle(a, b, even), ab1 = __builtin_shuffle(a, b, odd);
    gpt_quad cd0 = __builtin_shuffle(c, d, even), cd1 = __builtin_shuffle(c, d, odd);
    row[0] = __builtin_shuffle(ab0, cd0, low);
    row[1] = __builtin_shuffle(ab0, cd0, high);
    row[2] = __builtin_shuffle(ab1, cd1, low);
    row[3] = __builtin_shuffle(ab1, cd1, high);
#endif
    for (int j = 0; j < 4; j++) memcpy(out + (size_t)j * step, &row[j], sizeof row[j]);
}

/* Packs element (i, k), i < count, k < depth, at in[i * outer + k * step] into panels of `width` values of i:
   out[panel][k][i - panel * width]. The last panel is padded with zeros. */
GPT_INLINE void gpt__pack(const int width, float *out, int count, int depth, const float *in, size_t outer,
                          size_t step) {
    for (int i0 = 0; i0 < count; i0 += width, out += (size_t)width * (size_t)depth) {
        const float *from = in + (size_t)i0 * outer;
        int w = count - i0 < width ? count - i0 : width, i = 0;
        if (w < width) memset(out, 0, sizeof(float) * (size_t)width * (size_t)depth);
        if (outer == 1 && w == width) {
            for (int k = 0; k < depth; k++)
                memcpy(out + k * width, from + (size_t)k * step, sizeof(float) * (size_t)width);
            continue;
        }
        for (; i + 4 <= w; i += 4) {
            int k = 0;
            for (; step == 1 && k + 4 <= depth; k += 4)
                gpt__transpose4(out + k * width + i, (size_t)width, from + (size_t)i * outer + k, outer);
            for (; k < depth; k++)
                for (int j = i; j < i + 4; j++)
                    out[k * width + j] = from[(size_t)j * outer + (size_t)k * step];
        }
        for (; i < w; i++)
            for (int k = 0; k < depth; k++) out[k * width + i] = from[(size_t)i * outer + (size_t)k * step];
    }
}

static inline void gpt__pack_a(float *out, int rows, int depth, gpt_matrix a) {
    gpt__pack(GPT_MR, out, rows, depth, a.data, a.row, a.column);
}

static inline void gpt__pack_b(float *out, int columns, int depth, gpt_matrix b) {
    gpt__pack(GPT_NR, out, columns, depth, b.data, b.column, b.row);
}

/* The output of a product: c = product + bias (per column) + add (of the shape of c; may be c). */
typedef struct gpt_output {
    float *c;
    const float *bias, *add;
    size_t row;
} gpt_output;

/* Computes a tile of rows x GPT_NR sums over depth, and stores the first m x n of them. `rows` is a constant
   at each call, so the accumulators stay in registers. */
GPT_INLINE void gpt__tile(const int rows, int depth, const float *a, size_t a_row, size_t a_step,
                          const float *b, gpt_output o, int m, int n) {
    gpt_vec acc[GPT_MR][2];
    float edge[GPT_MR * GPT_NR];
    GPT_UNROLL
    for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = gpt__splat(0);
    GPT_UNROLL
    for (int i = 0; i < rows; i++) { /* prefetches the tile of C during the sums: 3% faster */
        __builtin_prefetch(o.c + (size_t)i * o.row, 1);
        __builtin_prefetch(o.c + (size_t)i * o.row + GPT_LANES, 1);
    }
    for (int k = 0; k < depth; k++, a += a_step, b += GPT_NR) {
        gpt_vec b0 = gpt__load(b), b1 = gpt__load(b + GPT_LANES);
        GPT_UNROLL
        for (int i = 0; i < rows; i++) {
            float x = a[(size_t)i * a_row];
            acc[i][0] += x * b0;
            acc[i][1] += x * b1;
        }
    }
    if (m >= rows && n >= GPT_NR) {
        if (o.bias) {
            gpt_vec b0 = gpt__load(o.bias), b1 = gpt__load(o.bias + GPT_LANES);
            GPT_UNROLL
            for (int i = 0; i < rows; i++) {
                acc[i][0] += b0;
                acc[i][1] += b1;
            }
        }
        if (o.add) {
            GPT_UNROLL
            for (int i = 0; i < rows; i++) {
                acc[i][0] += gpt__load(o.add + (size_t)i * o.row);
                acc[i][1] += gpt__load(o.add + (size_t)i * o.row + GPT_LANES);
            }
        }
        GPT_UNROLL
        for (int i = 0; i < rows; i++) {
            gpt__store(o.c + (size_t)i * o.row, acc[i][0]);
            gpt__store(o.c + (size_t)i * o.row + GPT_LANES, acc[i][1]);
        }
        return;
    }
    GPT_UNROLL
    for (int i = 0; i < rows; i++) {
        gpt__store(edge + i * GPT_NR, acc[i][0]);
        gpt__store(edge + i * GPT_NR + GPT_LANES, acc[i][1]);
    }
    for (int i = 0; i < rows && i < m; i++)
        for (int j = 0; j < GPT_NR && j < n; j++) {
            float x = edge[i * GPT_NR + j];
            if (o.bias) x += o.bias[j];
            if (o.add) x += o.add[(size_t)i * o.row + (size_t)j];
            o.c[(size_t)i * o.row + (size_t)j] = x;
        }
}

/* An m x n product over depth of A and packed B. Panel p of A starts at a + p * a_panel, with element (i, k)
   at i * a_row + k * a_step; packed panels have a_row 1 and a_step GPT_MR. Panels of B are b_panel floats
   apart. Columns are the outer loop, so that a panel of B stays in the first-level cache for all panels of
   A. */
GPT_INLINE void gpt__product(int m, int n, int depth, const float *a, size_t a_row, size_t a_step,
                             size_t a_panel, const float *b, size_t b_panel, gpt_output out) {
    const int third = GPT_MR / 3;
    for (int j = 0; j < n; j += GPT_NR, b += b_panel) {
        const float *a_at = a;
        for (int i = 0; i < m; i += GPT_MR, a_at += a_panel) {
            gpt_output o = out;
            int left = m - i;
            o.c = out.c + (size_t)i * out.row + (size_t)j;
            if (out.add) o.add = out.add + (size_t)i * out.row + (size_t)j;
            if (out.bias) o.bias = out.bias + j;
            if (left > 2 * third)
                gpt__tile(GPT_MR, depth, a_at, a_row, a_step, b, o, left, n - j);
            else if (left > third)
                gpt__tile(GPT_MR / 3 * 2, depth, a_at, a_row, a_step, b, o, left, n - j);
            else
                gpt__tile(GPT_MR / 3, depth, a_at, a_row, a_step, b, o, left, n - j);
        }
    }
}

/* A is stored with the summed index as the outer one: packed, or a block of attention scores. */
static inline void gpt__product_by_depth(int m, int n, int depth, const float *a, size_t a_step,
                                         size_t a_panel, const float *b, size_t b_panel, gpt_output out) {
    gpt__product(m, n, depth, a, 1, a_step, a_panel, b, b_panel, out);
}

/* A is stored by rows, GPT_QB floats apart: a block of attention scores, transposed. */
static inline void gpt__product_by_rows(int m, int n, int depth, const float *a, const float *b,
                                        size_t b_panel, gpt_output out) {
    gpt__product(m, n, depth, a, GPT_QB, 1, GPT_MR * GPT_QB, b, b_panel, out);
}

static inline gpt_output gpt__output(float *c, size_t row, const float *bias, const float *add) {
    gpt_output o;
    o.c = c;
    o.row = row;
    o.bias = bias;
    o.add = add;
    return o;
}

#define GPT_PACK_A_FLOATS (GPT_ROUND_UP(GPT_MC, GPT_MR) * GPT_KC)
#define GPT_PACK_B_FLOATS (GPT_ROUND_UP(GPT_NC, GPT_NR) * GPT_KC)

/* C (m x n) = A (m x k) B (k x n) + bias + add. `pack` holds GPT_PACK_A_FLOATS + GPT_PACK_B_FLOATS. */
#ifdef GPT_USE_CBLAS
/* BLAS requires a row stride of at least a row, even if there is only one row. */
static inline int gpt__stride(size_t step, int row) { return (int)step > row ? (int)step : row; }

GPT_DEF void gpt_gemm(float *pack, int m, int n, int k, gpt_matrix a, gpt_matrix b, gpt_output out) {
    int ta = a.column != 1, tb = b.column != 1;
    int lda = gpt__stride(a.row, k), ldb = gpt__stride(b.row, n);
    float beta = out.bias || out.add ? 1.0f : 0.0f;
    if (ta) lda = gpt__stride(a.column, m);
    if (tb) ldb = gpt__stride(b.column, k);
    (void)pack;
    for (int i = 0; i < m && (out.bias || (out.add && out.add != out.c)); i++)
        for (int j = 0; j < n; j++) {
            size_t at = (size_t)i * out.row + (size_t)j;
            float bias = out.bias ? out.bias[j] : 0.0f;
            out.c[at] = bias + (out.add ? out.add[at] : 0.0f);
        }
    cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, m, n, k, 1.0f,
                a.data, lda, b.data, ldb, beta, out.c, (int)out.row);
}
#else
GPT_DEF void gpt_gemm(float *pack, int m, int n, int k, gpt_matrix a, gpt_matrix b, gpt_output out) {
    float *pack_a = pack, *pack_b = pack + GPT_PACK_A_FLOATS;
    for (int j = 0; j < n; j += GPT_NC) {
        int nc = n - j < GPT_NC ? n - j : GPT_NC;
        for (int p = 0; p < k; p += GPT_KC) {
            int kc = k - p < GPT_KC ? k - p : GPT_KC;
            gpt__pack_b(pack_b, nc, kc,
                        gpt__matrix(b.data + (size_t)p * b.row + (size_t)j * b.column, b.row, b.column));
            for (int i = 0; i < m; i += GPT_MC) {
                int mc = m - i < GPT_MC ? m - i : GPT_MC;
                size_t at = (size_t)i * out.row + (size_t)j;
                gpt_output o = gpt__output(out.c + at, out.row, NULL,
                                           out.c + at); /* after the first depth block: adds to C */
                if (p == 0) {
                    o.bias = out.bias ? out.bias + j : NULL;
                    o.add = out.add ? out.add + at : NULL;
                }
                gpt__pack_a(pack_a, mc, kc,
                            gpt__matrix(a.data + (size_t)i * a.row + (size_t)p * a.column, a.row, a.column));
                gpt__product_by_depth(mc, nc, kc, pack_a, GPT_MR, (size_t)(GPT_MR * kc), pack_b,
                                      (size_t)(GPT_NR * kc), o);
            }
        }
    }
}
#endif

//== layers ==================================================================================== >>layers

/* Called when the gradient of parameter `param_index` is final. */
typedef void (*gpt_ready_fn)(void *user, int param_index);

enum { GPT_INPUT_GRADS = 1, GPT_WEIGHT_GRADS = 2 };

/* The arguments that all forward and backward functions share. */
typedef struct gpt_pass {
    const gpt_config *config;
    int batch, length; /* B and T of this call; T <= context */
    /* With B = 1: computes only positions first to T-1; the activations have the earlier ones. Otherwise 0 */
    int first;
    int accumulate;     /* backward: 0 overwrites gradients, 1 adds to them */
    int parts;          /* gpt_block_backward: GPT_INPUT_GRADS, GPT_WEIGHT_GRADS; 0 = both */
    gpt_ready_fn ready; /* NULL = not called */
    void *ready_user;
    float *scratch; /* gpt_scratch_floats(config, T) floats, for the duration of a call */
    float dropout;  /* probability that an element is set to 0, below 1; 0 = no dropout. Needs first = 0 */
    const uint64_t *keys; /* (B) with dropout: the random key of each sequence, the same in backward */
    int layer; /* with dropout: the layer of gpt_attention. gpt_block_forward and gpt_block_backward set it */
} gpt_pass;

static inline void gpt__ready(const gpt_pass *pass, int index) {
    if (pass->ready) pass->ready(pass->ready_user, index);
}
static inline int gpt__rows(const gpt_pass *pass) { return pass->batch * pass->length - pass->first; }

/* out (rows, N) = in (rows, C) weight^T + bias + add;  weight (N, C) */
static inline void gpt__linear(const gpt_pass *pass, float *out, const float *in, const float *weight,
                               const float *bias, const float *add, int C, int N) {
    size_t at = (size_t)pass->first;
    gpt_gemm(pass->scratch, gpt__rows(pass), N, C, gpt__matrix(in + at * (size_t)C, (size_t)C, 1),
             gpt__matrix(weight, 1, (size_t)C),
             gpt__output(out + at * (size_t)N, (size_t)N, bias, add ? add + at * (size_t)N : NULL));
}

/* d_in (rows, C) = d_out (rows, N) weight */
static inline void gpt__linear_input_grad(const gpt_pass *pass, float *d_in, const float *d_out,
                                          const float *weight, int C, int N) {
    gpt_gemm(pass->scratch, gpt__rows(pass), C, N, gpt__matrix(d_out, (size_t)N, 1),
             gpt__matrix(weight, (size_t)C, 1), gpt__output(d_in, (size_t)C, NULL, NULL));
}

/* d_weight (N, C) = d_out^T in */
static inline void gpt__linear_weight_grad(const gpt_pass *pass, float *d_weight, const float *d_out,
                                           const float *in, int C, int N) {
    gpt_gemm(pass->scratch, N, C, gpt__rows(pass), gpt__matrix(d_out, 1, (size_t)N),
             gpt__matrix(in, (size_t)C, 1),
             gpt__output(d_weight, (size_t)C, NULL, pass->accumulate ? d_weight : NULL));
}

/* d_bias (N) = sum of the rows of d_out (rows, N), in row order. Four vectors of columns at a time in
   registers. */
static inline void gpt__bias_grad(const gpt_pass *pass, float *d_bias, const float *d_out, int N) {
    int rows = gpt__rows(pass), j = 0;
    for (; j < N; j += 4 * GPT_LANES) {
        gpt_vec sum[4];
        for (int v = 0; v < 4; v++) {
            int at = j + v * GPT_LANES;
            sum[v] = pass->accumulate && at < N ? gpt__load_part(d_bias + at, N - at, 0) : gpt__splat(0);
        }
        if (j + 4 * GPT_LANES <= N)
            for (int i = 0; i < rows; i++)
                for (int v = 0; v < 4; v++)
                    sum[v] += gpt__load(d_out + (size_t)i * (size_t)N + j + v * GPT_LANES);
        else
            for (int i = 0; i < rows; i++)
                for (int v = 0; v < 4 && j + v * GPT_LANES < N; v++)
                    sum[v] += gpt__load_part(d_out + (size_t)i * (size_t)N + j + v * GPT_LANES,
                                             N - j - v * GPT_LANES, 0);
        for (int v = 0; v < 4 && j + v * GPT_LANES < N; v++)
            gpt__store_part(d_bias + j + v * GPT_LANES, sum[v], N - j - v * GPT_LANES);
    }
}

/* out = (x - mean) rstd weight + bias for each row of C. Stores mean (rows) and rstd (rows) for backward. */
static inline void gpt__layernorm(const gpt_pass *pass, float *out, float *mean, float *rstd, const float *x,
                                  const float *weight, const float *bias) {
    int C = pass->config->channels, rows = pass->first + gpt__rows(pass);
    for (int i = pass->first; i < rows; i++) {
        const float *in = x + (size_t)i * (size_t)C;
        float *o = out + (size_t)i * (size_t)C, m, r;
        gpt_vec sum = gpt__splat(0), square = gpt__splat(0);
        for (int j = 0; j < C; j += GPT_LANES) sum += gpt__load_part(in + j, C - j, 0);
        m = gpt__reduce_sum(sum) / (float)C;
        for (int j = 0; j < C; j += GPT_LANES) {
            gpt_vec d = gpt__load_part(in + j, C - j, m) - m;
            square += d * d;
        }
        r = 1.0f / sqrtf(gpt__reduce_sum(square) / (float)C + 1e-5f);
        for (int j = 0; j < C; j += GPT_LANES) {
            gpt_vec n = (gpt__load_part(in + j, C - j, m) - m) * r;
            gpt__store_part(
                o + j, n * gpt__load_part(weight + j, C - j, 0) + gpt__load_part(bias + j, C - j, 0), C - j);
        }
        mean[i] = m;
        rstd[i] = r;
    }
}

/* dx = add + the gradient through the norm, for each row. dx may be add. add NULL = 0. With n = (x - mean)
   rstd and g = d_out weight: dx = rstd (g - mean(g) - n mean(g n)); d_weight = sum of d_out n, d_bias = sum
   of d_out. */
static inline void gpt__layernorm_backward(const gpt_pass *pass, float *dx, const float *add, float *d_weight,
                                           float *d_bias, const float *d_out, const float *x,
                                           const float *mean, const float *rstd, const float *weight) {
    int C = pass->config->channels, rows = gpt__rows(pass);
    if (!pass->accumulate) {
        memset(d_weight, 0, sizeof(float) * (size_t)C);
        memset(d_bias, 0, sizeof(float) * (size_t)C);
    }
    for (int i = 0; i < rows; i++) {
        const float *in = x + (size_t)i * (size_t)C, *d = d_out + (size_t)i * (size_t)C;
        float *to = dx + (size_t)i * (size_t)C, m = mean[i], r = rstd[i], mean_g, mean_gn;
        gpt_vec sum_g = gpt__splat(0), sum_gn = gpt__splat(0);
        for (int j = 0; j < C; j += GPT_LANES) {
            gpt_vec dj = gpt__load_part(d + j, C - j, 0), n = (gpt__load_part(in + j, C - j, m) - m) * r;
            gpt_vec g = dj * gpt__load_part(weight + j, C - j, 0);
            sum_g += g;
            sum_gn += g * n;
            gpt__store_part(d_bias + j, gpt__load_part(d_bias + j, C - j, 0) + dj, C - j);
            gpt__store_part(d_weight + j, gpt__load_part(d_weight + j, C - j, 0) + dj * n, C - j);
        }
        mean_g = gpt__reduce_sum(sum_g) / (float)C;
        mean_gn = gpt__reduce_sum(sum_gn) / (float)C;
        for (int j = 0; j < C; j += GPT_LANES) {
            gpt_vec n = (gpt__load_part(in + j, C - j, m) - m) * r;
            gpt_vec g = gpt__load_part(d + j, C - j, 0) * gpt__load_part(weight + j, C - j, 0);
            gpt_vec v = (g - mean_g - n * mean_gn) * r;
            if (add) v += gpt__load_part(add + (size_t)i * (size_t)C + j, C - j, 0);
            gpt__store_part(to + j, v, C - j);
        }
    }
}

/* GELU with tanh: 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). This is x s with
   s = 1 / (1 + exp(-2u)). */
#define GPT_GELU_A 1.5957691216f /* 2 sqrt(2/pi) */
#define GPT_GELU_B 0.0713548163f /* 2 sqrt(2/pi) 0.044715 */

GPT_INLINE gpt_vec gpt__gelu_gate(gpt_vec x) {
    return 1.0f / (1.0f + gpt__exp(-x * (GPT_GELU_A + GPT_GELU_B * (x * x))));
}

static inline void gpt__gelu(float *out, const float *x, size_t n) {
    for (size_t i = 0; i < n; i += GPT_LANES) {
        gpt_vec v = gpt__load_part(x + i, (ptrdiff_t)(n - i), 0);
        gpt__store_part(out + i, v * gpt__gelu_gate(v), (ptrdiff_t)(n - i));
    }
}

/* d *= gelu'(x), where gelu' = s + x s (1 - s) (2u)' */
static inline void gpt__gelu_backward(float *d, const float *x, size_t n) {
    for (size_t i = 0; i < n; i += GPT_LANES) {
        gpt_vec v = gpt__load_part(x + i, (ptrdiff_t)(n - i), 0), s = gpt__gelu_gate(v);
        gpt_vec slope = s + v * s * (1.0f - s) * (GPT_GELU_A + 3.0f * GPT_GELU_B * (v * v));
        gpt__store_part(d + i, gpt__load_part(d + i, (ptrdiff_t)(n - i), 0) * slope, (ptrdiff_t)(n - i));
    }
}

//== dropout ================================================================================== >>dropout
/* Dropout (Srivastava et al. 2014) where GPT-2 has it: the embedding, the probabilities of attention, and the
   outputs of attention and MLP before they are added to the residual stream. A kept element is divided by
   1 - dropout. Random numbers depend on the key of the sequence, the place and the position. They do not
   depend on the batch, the rank or the time, so backward and recomputation compute them again. */

/* A place has the number of a weight: that of the linear layer that feeds it, qkv for attention, or 0 for the
   embedding. */
static inline uint64_t gpt__dropout_key(const gpt_pass *pass, int sequence, int place) {
    return gpt_random(pass->keys[sequence], (uint64_t)place);
}

/* The factor of element `at` of a place: 0 or 1 / (1 - dropout). */
static inline float gpt__dropout_factor(const gpt_pass *pass, uint64_t key, uint64_t at) {
    float u = (float)(gpt_random(key, at) >> 40) * (1.0f / 16777216.0f);
    return u < pass->dropout ? 0.0f : 1.0f / (1.0f - pass->dropout);
}

/* out = dropout(x) + add, (B, T, C) each. out may be x or add. add NULL = 0. */
static inline void gpt__dropout(const gpt_pass *pass, int place, float *out, const float *x,
                                const float *add) {
    size_t n = (size_t)pass->length * (size_t)pass->config->channels;
    for (int b = 0; b < pass->batch; b++) {
        uint64_t key = gpt__dropout_key(pass, b, place);
        for (size_t i = 0, j = (size_t)b * n; i < n; i++, j++)
            out[j] = x[j] * gpt__dropout_factor(pass, key, i) + (add ? add[j] : 0.0f);
    }
}

/* The gradient of a dropout's input, from d of its output: d without dropout, otherwise `memory`, which it
   fills. */
static inline const float *gpt__dropout_backward(const gpt_pass *pass, int place, float *memory,
                                                 const float *d) {
    if (pass->dropout == 0) return d;
    gpt__dropout(pass, place, memory, d, NULL);
    return memory;
}

/* Multiplies s (n keys, GPT_QB), probabilities or their gradients, by the factors of `count` queries from q0.
   head: counted over the sequences of the batch. */
static inline void gpt__dropout_scores(const gpt_pass *pass, int head, float *s, int n, int q0, int count) {
    int NH = pass->config->heads, T = pass->length;
    uint64_t key;
    if (pass->dropout == 0) return;
    key = gpt__dropout_key(pass, head / NH, gpt_block_first_param(pass->layer) + GPT_QKV_WEIGHT);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < count; i++) {
            uint64_t query = (uint64_t)(head % NH) * (uint64_t)T + (uint64_t)(q0 + i);
            s[t * GPT_QB + i] *= gpt__dropout_factor(pass, key, query * (uint64_t)T + (uint64_t)t);
        }
}

//== attention ============================================================================== >>attention
/* Causal attention, for one head of one sequence and GPT_QB queries at a time. It stores only that many rows
   of the T x T score matrix (as FlashAttention, Dao et al. 2022). Scores are stored transposed, a row per key
   and a column per query, so that one vector has the softmax of several queries. The masked corner is
   skipped:

              queries q0 .. q0+QB-1
       key 0  # # # #        rows past the block's last query are never computed;
              # # # #        inside the last QB rows, the lower left is masked.
              # # # #
       q0     \ # # #
              . \ # #
              . . \ #
*/

/* The lanes with query (q + lane) >= key t. */
GPT_INLINE gpt_mask gpt__causal(int q, int t) {
    gpt_mask lane;
    for (int i = 0; i < GPT_LANES; i++) lane[i] = i;
    return lane >= t - q;
}

/* Replaces scores s (n keys, GPT_QB) of queries from q0 by exp(scale (s - max)). sum[q] is their sum over
   keys, lse[q] the logarithm of the sum of exp(scale s). */
static inline void gpt__softmax_columns(float *s, int n, int q0, int width, float scale, float *sum,
                                        float *lse) {
    for (int j = 0; j < width; j += GPT_LANES) {
        gpt_vec top = gpt__load(s + j), total = gpt__splat(0);
        int full = q0 + j + 1 < n ? q0 + j + 1 : n; /* keys that all lanes use */
        int last = q0 + j + GPT_LANES < n ? q0 + j + GPT_LANES : n;
        int t = 1;
        for (; t < full; t++) top = gpt__max(top, gpt__load(s + t * GPT_QB + j));
        for (; t < last; t++)
            top = gpt__max(top, gpt__select(gpt__causal(q0 + j, t), gpt__load(s + t * GPT_QB + j), top));
        for (t = 0; t < full; t++) {
            gpt_vec p = gpt__exp(scale * (gpt__load(s + t * GPT_QB + j) - top));
            total += p;
            gpt__store(s + t * GPT_QB + j, p);
        }
        for (; t < n; t++) {
            gpt_vec p = gpt__exp(scale * (gpt__load(s + t * GPT_QB + j) - top));
            p = gpt__select(gpt__causal(q0 + j, t), p, gpt__splat(0));
            total += p;
            gpt__store(s + t * GPT_QB + j, p);
        }
        gpt__store(sum + j, total);
        for (int i = 0; i < GPT_LANES; i++) lse[j + i] = scale * top[i] + logf(total[i]);
    }
}

/* Sizes of the arrays of attention in scratch: T keys and the head size, padded to tiles. */
static inline size_t gpt__attention_keys(int length) { return (size_t)GPT_ROUND_UP(length, GPT_MR); }
static inline size_t gpt__attention_size(const gpt_config *c) {
    return (size_t)GPT_ROUND_UP(c->channels / c->heads, GPT_NR);
}

/* Floats of gpt_pass.scratch for sequences of `length`: enough for gpt_gemm and for attention. */
GPT_DEF size_t gpt_scratch_floats(const gpt_config *c, int length) {
    size_t keys = gpt__attention_keys(length), size = gpt__attention_size(c);
    size_t attention = 3 * keys * size + 4 * GPT_QB * size + 2 * keys * GPT_QB,
           gemm = GPT_PACK_A_FLOATS + GPT_PACK_B_FLOATS;
    return attention > gemm ? attention : gemm;
}

/* s (n, GPT_QB) = keys (n, HS) times queries (HS, width), both packed: the scores of a block of queries. */
static inline void gpt__scores(float *s, int n, int width, int HS, const float *keys, const float *queries) {
    gpt__product_by_depth(n, width, HS, keys, GPT_MR, (size_t)(GPT_MR * HS), queries, (size_t)(GPT_NR * HS),
                          gpt__output(s, GPT_QB, NULL, NULL));
}

/* out (count, HS) = s^T (count, n) values (n, HS): sums over keys. values is packed for all T keys. */
static inline void gpt__sum_over_keys(float *out, size_t row, int count, int HS, int n, const float *s,
                                      const float *values, int T) {
    gpt__product_by_depth(count, HS, n, s, GPT_QB, GPT_MR, values, (size_t)GPT_NR * (size_t)T,
                          gpt__output(out, row, NULL, NULL));
}

/* out (n, HS) = s (n, count) values (count, HS): sums over queries, added to out from the second block on. */
static inline void gpt__sum_over_queries(float *out, size_t row, int n, int HS, int count, const float *s,
                                         const float *values, int add) {
    gpt__product_by_rows(n, HS, count, s, values, (size_t)(GPT_NR * count),
                         gpt__output(out, row, NULL, add ? out : NULL));
}

/* out (B, T, C) from qkv (B, T, 3C) = queries, keys, values. Stores lse (B, NH, T) for backward. Of
   pass->config it reads only heads and channels. With heads and channels of a rank, it computes the attention
   of these heads; C is then NH HS. */
GPT_DEF void gpt_attention(const gpt_pass *pass, float *out, float *lse, const float *qkv) {
    int T = pass->length, NH = pass->config->heads, C = pass->config->channels, HS = C / NH;
    size_t row = 3 * (size_t)C, keys = gpt__attention_keys(T), size = gpt__attention_size(pass->config);
    float *k_pack = pass->scratch, *v_pack = k_pack + keys * size, *q_pack = v_pack + keys * size,
          *s = q_pack + GPT_QB * size;
    float scale = 1.0f / sqrtf((float)HS), sum[GPT_QB], logs[GPT_QB];
    for (int head = 0; head < pass->batch * NH; head++) {
        int b = head / NH, h = head % NH;
        const float *q = qkv + (size_t)b * (size_t)T * row + h * HS, *k = q + C, *v = q + 2 * C;
        gpt__pack_a(k_pack, T, HS, gpt__matrix(k, row, 1));
        gpt__pack_b(v_pack, HS, T, gpt__matrix(v, row, 1));
        for (int q0 = pass->first / GPT_QB * GPT_QB; q0 < T; q0 += GPT_QB) {
            int count = T - q0 < GPT_QB ? T - q0 : GPT_QB, n = q0 + count,
                width = GPT_ROUND_UP(count, GPT_NR);
            float *o = out + ((size_t)b * (size_t)T + (size_t)q0) * (size_t)C + h * HS;
            gpt__pack_b(q_pack, count, HS, gpt__matrix(q + (size_t)q0 * row, 1, row));
            gpt__scores(s, n, width, HS, k_pack, q_pack);
            gpt__softmax_columns(s, n, q0, width, scale, sum, logs);
            gpt__dropout_scores(pass, head, s, n, q0, count);
            gpt__sum_over_keys(o, (size_t)C, count, HS, n, s, v_pack, T);
            for (int i = 0; i < count; i++) {
                float inverse = 1.0f / sum[i];
                for (int j = 0; j < HS; j++) o[(size_t)i * (size_t)C + (size_t)j] *= inverse;
            }
            memcpy(lse + (size_t)head * (size_t)T + q0, logs, sizeof(float) * (size_t)count);
        }
    }
}

/* Replaces scores s by probabilities p, and dp, the gradient of p, by that of the scores: p (dp - delta)
   scale. */
static inline void gpt__softmax_columns_backward(float *s, float *dp, int n, int q0, int width, float scale,
                                                 const float *lse, const float *delta) {
    for (int j = 0; j < width; j += GPT_LANES) {
        gpt_vec l = gpt__load(lse + j), d = gpt__load(delta + j);
        for (int t = 0; t < n; t++) {
            gpt_vec p = gpt__exp(scale * gpt__load(s + t * GPT_QB + j) - l);
            if (t > q0 + j) p = gpt__select(gpt__causal(q0 + j, t), p, gpt__splat(0));
            gpt__store(s + t * GPT_QB + j, p);
            gpt__store(dp + t * GPT_QB + j, p * (gpt__load(dp + t * GPT_QB + j) - d) * scale);
        }
    }
}

/* d_qkv (B, T, 3C) from d_out, out (B, T, C), qkv and lse. Starts with the last block of queries, which uses
   every key: it writes the gradients of keys and values, and the other blocks add to them. */
GPT_DEF void gpt_attention_backward(const gpt_pass *pass, float *d_qkv, const float *d_out, const float *out,
                                    const float *lse, const float *qkv) {
    int T = pass->length, NH = pass->config->heads, C = pass->config->channels, HS = C / NH;
    size_t row = 3 * (size_t)C, keys = gpt__attention_keys(T), size = gpt__attention_size(pass->config),
           block = GPT_QB * size;
    float *k_rows = pass->scratch, *v_rows = k_rows + keys * size, *k_deep = v_rows + keys * size;
    float *q_across = k_deep + keys * size, *d_across = q_across + block, *q_deep = d_across + block,
          *d_deep = q_deep + block;
    float *s = d_deep + block, *dp = s + keys * GPT_QB, scale = 1.0f / sqrtf((float)HS);
    for (int head = 0; head < pass->batch * NH; head++) {
        size_t start = (size_t)(head / NH) * (size_t)T;
        const float *q = qkv + start * row + head % NH * HS, *k = q + C, *v = q + 2 * C;
        float *dq = d_qkv + start * row + head % NH * HS, *dk = dq + C, *dv = dq + 2 * C;
        gpt__pack_a(k_rows, T, HS, gpt__matrix(k, row, 1));
        gpt__pack_a(v_rows, T, HS, gpt__matrix(v, row, 1));
        gpt__pack_b(k_deep, HS, T, gpt__matrix(k, row, 1));
        for (int q0 = (T - 1) / GPT_QB * GPT_QB; q0 >= 0; q0 -= GPT_QB) {
            int count = T - q0 < GPT_QB ? T - q0 : GPT_QB, n = q0 + count,
                width = GPT_ROUND_UP(count, GPT_NR);
            const float *o = out + (start + (size_t)q0) * (size_t)C + head % NH * HS, *d = d_out + (o - out);
            float delta[GPT_QB] = {0}, logs[GPT_QB] = {0};
            for (int i = 0; i < count; i++) {
                gpt_vec sum = gpt__splat(0);
                for (int j = 0; j < HS; j += GPT_LANES)
                    sum += gpt__load_part(o + i * C + j, HS - j, 0)
                           * gpt__load_part(d + i * C + j, HS - j, 0);
                delta[i] = gpt__reduce_sum(sum);
                logs[i] = lse[(size_t)head * (size_t)T + (size_t)(q0 + i)];
            }
            gpt__pack_b(q_across, count, HS, gpt__matrix(q + (size_t)q0 * row, 1, row));
            gpt__pack_b(d_across, count, HS, gpt__matrix(d, 1, (size_t)C));
            gpt__pack_b(q_deep, HS, count, gpt__matrix(q + (size_t)q0 * row, row, 1));
            gpt__pack_b(d_deep, HS, count, gpt__matrix(d, (size_t)C, 1));
            gpt__scores(s, n, width, HS, k_rows, q_across);
            gpt__scores(dp, n, width, HS, v_rows, d_across);
            gpt__dropout_scores(pass, head, dp, n, q0, count);
            gpt__softmax_columns_backward(s, dp, n, q0, width, scale, logs, delta);
            gpt__dropout_scores(pass, head, s, n, q0, count);
            gpt__sum_over_queries(dv, row, n, HS, count, s, d_deep, n < T);
            gpt__sum_over_queries(dk, row, n, HS, count, dp, q_deep, n < T);
            gpt__sum_over_keys(dq + (size_t)q0 * row, row, count, HS, n, dp, k_deep, T);
        }
    }
}

//== embed ====================================================================================== >>embed

/* out (B, T, C) = wte[tokens] + wpe[positions]; tokens (B, T), each in [0, V) */
GPT_DEF void gpt_embed_forward(const gpt_pass *pass, const gpt_embed *value, const int *tokens, float *out) {
    size_t C = (size_t)pass->config->channels;
    for (int i = pass->first; i < pass->batch * pass->length; i++) {
        const float *token = value->wte + (size_t)tokens[i] * C,
                    *position = value->wpe + (size_t)(i % pass->length) * C;
        float *o = out + (size_t)i * C;
        for (size_t j = 0; j < C; j++) o[j] = token[j] + position[j];
    }
    if (pass->dropout > 0) gpt__dropout(pass, 0, out, out, NULL);
}

/* to (C) += the gradient before dropout of row i of d_out (B, T, C) */
static inline void gpt__embed_add(const gpt_pass *pass, float *to, const float *d_out, int i) {
    size_t C = (size_t)pass->config->channels, at = (size_t)(i % pass->length) * C;
    const float *d = d_out + (size_t)i * C;
    uint64_t key;
    if (pass->dropout == 0) {
        for (size_t j = 0; j < C; j++) to[j] += d[j];
        return;
    }
    key = gpt__dropout_key(pass, i / pass->length, 0);
    for (size_t j = 0; j < C; j++) to[j] += d[j] * gpt__dropout_factor(pass, key, at + j);
}

/* The gradients of wte (of this use) and wpe from d_out (B, T, C). Rows without a token are set to 0. */
GPT_DEF void gpt_embed_backward(const gpt_pass *pass, const gpt_embed *grad, const int *tokens,
                                const float *d_out) {
    size_t C = (size_t)pass->config->channels;
    if (!pass->accumulate) {
        memset(grad->wpe, 0, sizeof(float) * (size_t)pass->config->context * C);
        memset(grad->wte, 0, sizeof(float) * (size_t)pass->config->vocab * C);
    }
    for (int i = 0; i < pass->batch * pass->length; i++)
        gpt__embed_add(pass, grad->wpe + (size_t)(i % pass->length) * C, d_out, i);
    gpt__ready(pass, 1);
    for (int i = 0; i < pass->batch * pass->length; i++)
        gpt__embed_add(pass, grad->wte + (size_t)tokens[i] * C, d_out, i);
    gpt__ready(pass, 0);
}

//== block ====================================================================================== >>block

/* The activations of a block that backward needs. */
typedef struct gpt_block_acts {
    float *ln1, *ln1_mean, *ln1_rstd; /* (B, T, C) (B, T) (B, T) */
    float *qkv, *lse, *attention;     /* (B, T, 3C) (B, NH, T) (B, T, C) */
    float *middle;                    /* (B, T, C): the residual stream between attention and MLP */
    float *ln2, *ln2_mean, *ln2_rstd; /* (B, T, C) (B, T) (B, T) */
    float *fc, *gelu;                 /* (B, T, 4C) (B, T, 4C) */
} gpt_block_acts;

/* Gradients inside a block. With GPT_INPUT_GRADS they must remain until the call with GPT_WEIGHT_GRADS. */
typedef struct gpt_block_temps {
    float *d_fc, *d_qkv, *d_middle, *d_norm; /* (B, T, 4C) (B, T, 3C) (B, T, C) (B, T, C) */
} gpt_block_temps;

/* Returns memory + *used and increases *used by n floats, rounded up to a cache line. memory NULL: only
   counts. */
static inline float *gpt__take(float *memory, size_t *used, size_t n) {
    float *at = memory ? memory + *used : NULL;
    *used += GPT_ROUND_UP(n, 16);
    return at;
}

/* Sets the pointers to the activations of a block. Returns the floats needed; memory NULL only counts. */
GPT_DEF size_t gpt_block_acts_place(const gpt_config *c, int batch, int length, float *memory,
                                    gpt_block_acts *a) {
    size_t n = (size_t)batch * (size_t)length, C = (size_t)c->channels, used = 0;
    a->ln1 = gpt__take(memory, &used, n * C);
    a->ln1_mean = gpt__take(memory, &used, n);
    a->ln1_rstd = gpt__take(memory, &used, n);
    a->qkv = gpt__take(memory, &used, n * 3 * C);
    a->lse = gpt__take(memory, &used, n * (size_t)c->heads);
    a->attention = gpt__take(memory, &used, n * C);
    a->middle = gpt__take(memory, &used, n * C);
    a->ln2 = gpt__take(memory, &used, n * C);
    a->ln2_mean = gpt__take(memory, &used, n);
    a->ln2_rstd = gpt__take(memory, &used, n);
    a->fc = gpt__take(memory, &used, n * 4 * C);
    a->gelu = gpt__take(memory, &used, n * 4 * C);
    return used;
}

GPT_DEF size_t gpt_block_temps_place(const gpt_config *c, int batch, int length, float *memory,
                                     gpt_block_temps *t) {
    size_t n = (size_t)batch * (size_t)length, C = (size_t)c->channels, used = 0;
    t->d_fc = gpt__take(memory, &used, n * 4 * C);
    t->d_qkv = gpt__take(memory, &used, n * 3 * C);
    t->d_middle = gpt__take(memory, &used, n * C);
    t->d_norm = gpt__take(memory, &used, n * C);
    return used;
}

/* middle = in + attention(ln1(in)), out = middle + mlp(ln2(middle)); in and out (B, T, C) are different
   memory. */
GPT_DEF void gpt_block_forward(const gpt_pass *pass, const gpt_block *w, const float *in, gpt_block_acts *a,
                               float *out) {
    int C = pass->config->channels, drops = pass->dropout > 0;
    size_t at = (size_t)pass->first * 4 * (size_t)C;
    gpt_pass attention = *pass;
    attention.layer = gpt__block_layer(w);
    gpt__layernorm(pass, a->ln1, a->ln1_mean, a->ln1_rstd, in, w->ln1_weight, w->ln1_bias);
    gpt__linear(pass, a->qkv, a->ln1, w->qkv_weight, w->qkv_bias, NULL, C, 3 * C);
    gpt_attention(&attention, a->attention, a->lse, a->qkv);
    gpt__linear(pass, a->middle, a->attention, w->attn_weight, w->attn_bias, drops ? NULL : in, C, C);
    if (drops) gpt__dropout(pass, w->first + GPT_ATTN_WEIGHT, a->middle, a->middle, in);
    gpt__layernorm(pass, a->ln2, a->ln2_mean, a->ln2_rstd, a->middle, w->ln2_weight, w->ln2_bias);
    gpt__linear(pass, a->fc, a->ln2, w->fc_weight, w->fc_bias, NULL, C, 4 * C);
    gpt__gelu(a->gelu + at, a->fc + at, (size_t)gpt__rows(pass) * 4 * (size_t)C);
    gpt__linear(pass, out, a->gelu, w->mlp_weight, w->mlp_bias, drops ? NULL : a->middle, 4 * C, C);
    if (drops) gpt__dropout(pass, w->first + GPT_MLP_WEIGHT, out, out, a->middle);
}

/* The gradients of a linear layer's weight and bias. Reports both as ready. */
static inline void gpt__linear_grads(const gpt_pass *pass, int first, int kind, float *d_weight,
                                     float *d_bias, const float *d_out, const float *in, int C, int N) {
    if (pass->parts == GPT_INPUT_GRADS) return;
    gpt__bias_grad(pass, d_bias, d_out, N);
    gpt__ready(pass, first + kind + 1);
    gpt__linear_weight_grad(pass, d_weight, d_out, in, C, N);
    gpt__ready(pass, first + kind);
}

/* Computes d_in, the gradient of in, and g, those of the parameters, from d_out (B, T, C). d_in may be d_out.
   pass->parts splits backward into two calls, for pipeline schedules that compute weight gradients later. The
   first call, GPT_INPUT_GRADS, computes the gradients of layer norms too and fills t. The second,
   GPT_WEIGHT_GRADS, reads t, a and the same d_out, so d_in must not be d_out. */
GPT_DEF void gpt_block_backward(const gpt_pass *pass, const gpt_block *w, const gpt_block *g, const float *in,
                                const gpt_block_acts *a, gpt_block_temps *t, const float *d_out,
                                float *d_in) {
    int C = pass->config->channels, input = pass->parts != GPT_WEIGHT_GRADS, first = w->first;
    gpt_pass attention = *pass;
    const float *d_mlp = gpt__dropout_backward(pass, first + GPT_MLP_WEIGHT, t->d_norm, d_out), *d_attn;
    attention.layer = gpt__block_layer(w);
    gpt__linear_grads(pass, first, GPT_MLP_WEIGHT, g->mlp_weight, g->mlp_bias, d_mlp, a->gelu, 4 * C, C);
    if (input) {
        gpt__linear_input_grad(pass, t->d_fc, d_mlp, w->mlp_weight, 4 * C, C);
        gpt__gelu_backward(t->d_fc, a->fc, (size_t)gpt__rows(pass) * 4 * (size_t)C);
    }
    gpt__linear_grads(pass, first, GPT_FC_WEIGHT, g->fc_weight, g->fc_bias, t->d_fc, a->ln2, C, 4 * C);
    if (input) {
        gpt__linear_input_grad(pass, t->d_norm, t->d_fc, w->fc_weight, C, 4 * C);
        gpt__layernorm_backward(pass, t->d_middle, d_out, g->ln2_weight, g->ln2_bias, t->d_norm, a->middle,
                                a->ln2_mean, a->ln2_rstd, w->ln2_weight);
        gpt__ready(pass, first + GPT_LN2_BIAS);
        gpt__ready(pass, first + GPT_LN2_WEIGHT);
    }
    /* d_qkv is not in use yet, or still in use by GPT_WEIGHT_GRADS, which does not need d_norm. */
    d_attn = gpt__dropout_backward(pass, first + GPT_ATTN_WEIGHT, input ? t->d_qkv : t->d_norm, t->d_middle);
    gpt__linear_grads(pass, first, GPT_ATTN_WEIGHT, g->attn_weight, g->attn_bias, d_attn, a->attention, C, C);
    if (input) {
        gpt__linear_input_grad(pass, t->d_norm, d_attn, w->attn_weight, C, C);
        gpt_attention_backward(&attention, t->d_qkv, t->d_norm, a->attention, a->lse, a->qkv);
    }
    gpt__linear_grads(pass, first, GPT_QKV_WEIGHT, g->qkv_weight, g->qkv_bias, t->d_qkv, a->ln1, C, 3 * C);
    if (!input) return;
    gpt__linear_input_grad(pass, t->d_norm, t->d_qkv, w->qkv_weight, C, 3 * C);
    gpt__layernorm_backward(pass, d_in, t->d_middle, g->ln1_weight, g->ln1_bias, t->d_norm, in, a->ln1_mean,
                            a->ln1_rstd, w->ln1_weight);
    gpt__ready(pass, first + GPT_LN1_BIAS);
    gpt__ready(pass, first + GPT_LN1_WEIGHT);
}

//== head ======================================================================================== >>head

typedef struct gpt_head_acts {
    float *ln, *mean, *rstd;    /* (B, T, C) (B, T) (B, T) */
    float *logits;              /* (B, T, V); backward replaces them by their gradient */
    float *lse, *losses, *d_ln; /* (B, T) (B, T) (B, T, C) */
} gpt_head_acts;

GPT_DEF size_t gpt_head_acts_place(const gpt_config *c, int batch, int length, float *memory,
                                   gpt_head_acts *a) {
    size_t n = (size_t)batch * (size_t)length, C = (size_t)c->channels, used = 0;
    a->ln = gpt__take(memory, &used, n * C);
    a->mean = gpt__take(memory, &used, n);
    a->rstd = gpt__take(memory, &used, n);
    a->logits = gpt__take(memory, &used, n * (size_t)c->vocab);
    a->lse = gpt__take(memory, &used, n);
    a->losses = gpt__take(memory, &used, n);
    a->d_ln = gpt__take(memory, &used, n * C);
    return used;
}

/* logits (B, T, V) = ln_f(in) weight^T */
GPT_DEF void gpt_head_logits(const gpt_pass *pass, const gpt_head *w, const float *in, gpt_head_acts *a) {
    gpt__layernorm(pass, a->ln, a->mean, a->rstd, in, w->ln_weight, w->ln_bias);
    gpt__linear(pass, a->logits, a->ln, w->weight, NULL, NULL, pass->config->channels, pass->config->vocab);
}

/* Cross-entropy of targets (B, T). Stores the loss per token in a->losses. Returns their sum, in f64 and in
   order. */
GPT_DEF double gpt_head_loss_forward(const gpt_pass *pass, const gpt_head *w, const float *in,
                                     const int *targets, gpt_head_acts *a) {
    int V = pass->config->vocab;
    double sum = 0;
    gpt_head_logits(pass, w, in, a);
    for (int i = 0; i < pass->batch * pass->length; i++) {
        const float *x = a->logits + (size_t)i * (size_t)V;
        gpt_vec top = gpt__splat(x[0]), total = gpt__splat(0);
        float m;
        for (int j = 0; j < V; j += GPT_LANES) top = gpt__max(top, gpt__load_part(x + j, V - j, x[0]));
        m = gpt__reduce_max(top);
        for (int j = 0; j + GPT_LANES <= V; j += GPT_LANES) total += gpt__exp(gpt__load(x + j) - m);
        if (V % GPT_LANES) {
            gpt_vec last = gpt__exp(gpt__load_part(x + V / GPT_LANES * GPT_LANES, V % GPT_LANES, m) - m);
            for (int l = V % GPT_LANES; l < GPT_LANES; l++) last[l] = 0;
            total += last;
        }
        a->lse[i] = m + logf(gpt__reduce_sum(total));
        a->losses[i] = a->lse[i] - x[targets[i]];
        sum += a->losses[i];
    }
    return sum;
}

/* Gradients of the head's parameters and d_in (B, T, C). The losses of tokens are multiplied by
   weight_per_token, which is 1 / (B T) for the mean of the micro-batch. Call it after gpt_head_loss_forward.
   Overwrites the logits. */
GPT_DEF void gpt_head_backward(const gpt_pass *pass, const gpt_head *w, const gpt_head *g, const float *in,
                               const int *targets, gpt_head_acts *a, float weight_per_token, float *d_in) {
    int V = pass->config->vocab, C = pass->config->channels;
    for (int i = 0; i < pass->batch * pass->length; i++) {
        float *x = a->logits + (size_t)i * (size_t)V;
        for (int j = 0; j < V; j += GPT_LANES)
            gpt__store_part(x + j, gpt__exp(gpt__load_part(x + j, V - j, 0) - a->lse[i]) * weight_per_token,
                            V - j);
        x[targets[i]] -= weight_per_token;
    }
    gpt__linear_weight_grad(pass, g->weight, a->logits, a->ln, C, V);
    gpt__ready(pass, w->first + 2);
    gpt__linear_input_grad(pass, a->d_ln, a->logits, w->weight, C, V);
    gpt__layernorm_backward(pass, d_in, NULL, g->ln_weight, g->ln_bias, a->d_ln, in, a->mean, a->rstd,
                            w->ln_weight);
    gpt__ready(pass, w->first + 1);
    gpt__ready(pass, w->first);
}

//== model ====================================================================================== >>model
/* All units with their memory: the model of a single process, or of a data-parallel rank. */

/* GPT_RECOMPUTE is activation checkpointing (Chen et al. 2016): only the input of each block is stored, and
   backward repeats its forward first. All blocks share the activations of one. The bits are the same. */
enum { GPT_OWN_VALUES = 1, GPT_OWN_GRADS = 2, GPT_RECOMPUTE = 4 };

typedef struct gpt_model {
    gpt_config config;
    int param_count;
    /* One pointer per parameter; values[head.weight] is values[wte]. Set by the caller if the model does not
       own them */
    float **values, **grads;
    int accumulate;           /* copied to gpt_pass.accumulate */
    int batch;                /* largest B */
    gpt_block_acts *blocks;   /* per layer; with recompute all have the same memory */
    int recompute, held;      /* held: with recompute, the layer of the activations in that memory */
    double (*clock)(void);    /* seconds; NULL = recompute_seconds is not counted */
    double recompute_seconds; /* time of the repeated forward passes */
    float dropout;            /* copied to the gpt_pass of gpt_model_train_pass, as the next one */
    const uint64_t *keys;     /* with dropout: set by the caller for each micro-batch */
    gpt_block_temps temps;    /* shared by all layers */
    gpt_head_acts head;
    float *stream;   /* (layers + 1, B, T, C): the input of each block, and of the head */
    float *d_stream; /* (B, T, C) */
    float *scratch;
    void *memory;
} gpt_model;

/* Sets the pointers to all memory of the model. Returns the floats needed; memory NULL only counts. */
static inline size_t gpt__model_place(gpt_model *m, float *memory, int flags) {
    const gpt_config *c = &m->config;
    size_t used = 0, n = (size_t)m->batch * (size_t)c->context * (size_t)c->channels;
    m->stream = gpt__take(memory, &used, n * (size_t)(c->layers + 1));
    m->d_stream = gpt__take(memory, &used, n);
    m->scratch = gpt__take(memory, &used, gpt_scratch_floats(c, c->context));
    used += gpt_block_temps_place(c, m->batch, c->context, memory ? memory + used : NULL, &m->temps);
    used += gpt_head_acts_place(c, m->batch, c->context, memory ? memory + used : NULL, &m->head);
    for (int l = 0; l < c->layers; l++)
        if (l > 0 && flags & GPT_RECOMPUTE)
            m->blocks[l] = m->blocks[0];
        else
            used += gpt_block_acts_place(c, m->batch, c->context, memory ? memory + used : NULL,
                                         &m->blocks[l]);
    for (int i = 0; i < m->param_count; i++) {
        gpt_param p;
        if (gpt_param_info(c, i, &p) != 0) continue;
        if (flags & GPT_OWN_GRADS) m->grads[i] = gpt__take(memory, &used, (size_t)p.count);
        if ((flags & GPT_OWN_VALUES) && p.tied_to >= 0)
            m->values[i] = m->values[p.tied_to];
        else if (flags & GPT_OWN_VALUES)
            m->values[i] = gpt__take(memory, &used, (size_t)p.count);
    }
    return used;
}

GPT_DEF void gpt_model_destroy(gpt_model *m) {
    free(m->values);
    free(m->grads);
    free(m->blocks);
    free(m->memory);
    memset(m, 0, sizeof *m);
}

/* Allocates activations for up to `batch` sequences of the full context. GPT_OWN_VALUES and GPT_OWN_GRADS
   also allocate values and gradients; otherwise the caller sets the pointers in m->values and m->grads before
   use. Returns 0, or -1 with a zeroed *m for an invalid configuration or without memory. */
GPT_DEF int gpt_model_create(gpt_model *m, const gpt_config *config, int batch, int flags) {
    size_t floats, count = (size_t)gpt_param_count(config);
    memset(m, 0, sizeof *m);
    if (gpt_config_check(config) || batch < 1) return -1;
    m->config = *config;
    m->batch = batch;
    m->param_count = (int)count;
    m->recompute = (flags & GPT_RECOMPUTE) != 0;
    m->values = (float **)calloc(count, sizeof(float *));
    m->grads = (float **)calloc(count, sizeof(float *));
    m->blocks = (gpt_block_acts *)calloc((size_t)config->layers + 1, sizeof *m->blocks);
    if (!m->values || !m->grads || !m->blocks) {
        gpt_model_destroy(m);
        return -1;
    }
    floats = gpt__model_place(m, NULL, flags);
    m->memory = calloc(floats + 16, sizeof(float));
    if (!m->memory) {
        gpt_model_destroy(m);
        return -1;
    }
    gpt__model_place(m, (float *)GPT_ROUND_UP((uintptr_t)m->memory, 64), flags);
    return 0;
}

/* Initializes the values as in GPT-2. */
GPT_DEF void gpt_model_init(gpt_model *m, uint64_t seed) {
    gpt_param p;
    for (int i = 0; i < m->param_count; i++)
        if (gpt_param_info(&m->config, i, &p) == 0 && p.tied_to < 0)
            gpt_param_init(&m->config, seed, i, 0, p.count, m->values[i]);
}

/* The gpt_pass for B sequences of T tokens. */
GPT_DEF gpt_pass gpt_model_pass(gpt_model *m, int batch, int length) {
    gpt_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.config = &m->config;
    pass.batch = batch;
    pass.length = length;
    pass.accumulate = m->accumulate;
    pass.scratch = m->scratch;
    return pass;
}

/* The same for training: with dropout. */
GPT_DEF gpt_pass gpt_model_train_pass(gpt_model *m, int batch, int length) {
    gpt_pass pass = gpt_model_pass(m, batch, length);
    pass.dropout = m->dropout;
    pass.keys = m->keys;
    return pass;
}

/* The input of block l; of the head for l = layers. */
static inline float *gpt__model_stream(const gpt_model *m, int l) {
    return m->stream + (size_t)l * (size_t)m->batch * (size_t)m->config.context * (size_t)m->config.channels;
}

/* Forward of one unit, 0 to layers + 1; call them in this order. Reads only the values of that unit, so the
   others may be resharded. The head returns the sum of the B T losses, or with targets NULL stores the logits
   of the last position in m->head.logits. The other units return 0. */
GPT_DEF double gpt_model_unit_forward(gpt_model *m, const gpt_pass *pass, int unit, const int *tokens,
                                      const int *targets) {
    const gpt_config *c = &m->config;
    if (unit == 0) {
        gpt_embed embed = gpt_embed_view(m->values);
        gpt_embed_forward(pass, &embed, tokens, gpt__model_stream(m, 0));
    } else if (unit <= c->layers) {
        gpt_block block = gpt_block_view(m->values, unit - 1);
        gpt_block_forward(pass, &block, gpt__model_stream(m, unit - 1), &m->blocks[unit - 1],
                          gpt__model_stream(m, unit));
        m->held = unit - 1;
    } else {
        gpt_head head = gpt_head_view(c, m->values);
        gpt_pass last = *pass;
        if (targets)
            return gpt_head_loss_forward(pass, &head, gpt__model_stream(m, c->layers), targets, &m->head);
        last.batch = last.length = 1;
        last.first = 0;
        gpt_head_logits(&last, &head,
                        gpt__model_stream(m, c->layers) + (size_t)(pass->length - 1) * (size_t)c->channels,
                        &m->head);
    }
    return 0;
}

/* Recomputes the activations of a block, unless they are in memory. This writes its output again, with the
   same bits. */
static inline void gpt__model_recompute(gpt_model *m, const gpt_pass *pass, int unit) {
    double start = m->clock ? m->clock() : 0;
    if (!m->recompute || m->held == unit - 1) return;
    gpt_model_unit_forward(m, pass, unit, NULL, NULL);
    if (m->clock) m->recompute_seconds += m->clock() - start;
}

/* Backward of one unit, layers + 1 to 0; call them in this order. Computes all its gradients, for the mean of
   the B T losses. Uses only the values and gradients of that unit. */
GPT_DEF void gpt_model_unit_backward(gpt_model *m, const gpt_pass *pass, int unit, const int *tokens,
                                     const int *targets) {
    const gpt_config *c = &m->config;
    if (unit == 0) {
        gpt_embed d_embed = gpt_embed_view(m->grads);
        gpt_embed_backward(pass, &d_embed, tokens, m->d_stream);
    } else if (unit <= c->layers) {
        gpt_block block = gpt_block_view(m->values, unit - 1), d_block = gpt_block_view(m->grads, unit - 1);
        gpt__model_recompute(m, pass, unit);
        gpt_block_backward(pass, &block, &d_block, gpt__model_stream(m, unit - 1), &m->blocks[unit - 1],
                           &m->temps, m->d_stream, m->d_stream);
    } else {
        gpt_head head = gpt_head_view(c, m->values), d_head = gpt_head_view(c, m->grads);
        gpt_head_backward(pass, &head, &d_head, gpt__model_stream(m, c->layers), targets, &m->head,
                          1.0f / (float)(pass->batch * pass->length), m->d_stream);
    }
}

static inline double gpt__model_loss(gpt_model *m, const gpt_pass *pass, const int *tokens,
                                     const int *targets) {
    double sum = 0;
    for (int unit = 0; unit <= m->config.layers + 1; unit++)
        sum = gpt_model_unit_forward(m, pass, unit, tokens, targets);
    return sum / ((double)pass->batch * pass->length);
}

/* Returns the mean loss over B T tokens, without gradients and without dropout. */
GPT_DEF double gpt_model_forward(gpt_model *m, const int *tokens, const int *targets, int batch, int length) {
    gpt_pass pass = gpt_model_pass(m, batch, length);
    return gpt__model_loss(m, &pass, tokens, targets);
}

/* Returns the mean loss over B T tokens, and computes all gradients. Calls ready(user, index) once for each,
   from the head to the embedding. tokens and targets are (B, T), B <= m->batch, T <= context. */
GPT_DEF double gpt_model_forward_backward(gpt_model *m, const int *tokens, const int *targets, int batch,
                                          int length, gpt_ready_fn ready, void *user) {
    gpt_pass pass = gpt_model_train_pass(m, batch, length);
    double loss = gpt__model_loss(m, &pass, tokens, targets);
    pass.ready = ready;
    pass.ready_user = user;
    for (int unit = m->config.layers + 1; unit >= 0; unit--)
        gpt_model_unit_backward(m, &pass, unit, tokens, targets);
    return loss;
}

//== generate ================================================================================ >>generate

/* Logits (V) after tokens[0..length-1]. The activations of the first `done` tokens are those of earlier
   calls; 0 at the start and after training steps. With recompute all tokens are computed again. length <=
   context. */
GPT_DEF const float *gpt_model_logits(gpt_model *m, const int *tokens, int done, int length) {
    gpt_pass pass = gpt_model_pass(m, 1, length);
    pass.first = m->recompute ? 0 : done;
    for (int unit = 0; unit <= m->config.layers + 1; unit++)
        gpt_model_unit_forward(m, &pass, unit, tokens, NULL);
    return m->head.logits;
}

/* Samples from softmax(logits / temperature) with a random u in [0, 1). Temperature 0 returns the most likely
   token. */
GPT_DEF int gpt_sample(const float *logits, int vocab, float temperature, double u) {
    double sum = 0, seen = 0;
    int best = 0;
    for (int i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    if (temperature <= 0) return best;
    for (int i = 0; i < vocab; i++) sum += exp((logits[i] - logits[best]) / temperature);
    for (int i = 0; i < vocab; i++) {
        seen += exp((logits[i] - logits[best]) / temperature);
        if (seen > u * sum) return i;
    }
    return best;
}

/* The random u in [0, 1) of gpt_generate for the token at position `at`. */
GPT_DEF double gpt_sample_draw(uint64_t seed, int at) {
    return (double)(gpt_random(seed, (uint64_t)at) >> 11) * (1.0 / 9007199254740992.0);
}

/* Continues tokens[0..prompt-1] to tokens[total-1]. The same seed gives the same result. prompt is at least
   1. When the context is full, its first half is dropped. */
GPT_DEF void gpt_generate(gpt_model *m, int *tokens, int prompt, int total, float temperature,
                          uint64_t seed) {
    int context = m->config.context, start = 0, done = 0;
    for (int at = prompt; at < total; at++) {
        const float *logits;
        if (at - start > context) {
            start = at - (context + 1) / 2;
            done = 0;
        }
        logits = gpt_model_logits(m, tokens + start, done, at - start);
        done = at - start;
        tokens[at] = gpt_sample(logits, m->config.vocab, temperature, gpt_sample_draw(seed, at));
    }
}

#endif /* GPT_H */

/* MIT License: see LICENSE. */

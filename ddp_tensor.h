/*  ddp_tensor.h - distributed tensors, and tensor-parallel and sequence-parallel layers on them.

    A global tensor is replicated on every rank, sharded along a dimension, or a sum that has not been
    computed yet. One call converts any of these placements into any other with the cheapest collective. The
    layers of a transformer, with weights sharded over the ranks of a group, build on it: forward and
    backward, explicit buffers, no autograd.

USAGE
    #define DDP_IMPLEMENTATION       in exactly one source file: the bodies of ddp.h and of this header
    #include "ddp_tensor.h"
    Or DDP_TENSOR_IMPLEMENTATION for only the bodies of this header. Link with -lpthread -lm.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp_tensor.h"
    #include <stdio.h>

    static ddp_result rank(ddp_group *group, void *user) {            // columns of a 4 x 6 matrix become rows
        ddp_tensor columns = DDP_ZERO, rows = DDP_ZERO, full = DDP_ZERO;
        int64_t shape[2] = {4, 6};
        char text[512];
        size_t size = sizeof text;
        if (ddp_tensor_create(group, &full, DDP_F32, 2, shape)) return DDP_ERR_NO_MEMORY;
        if (ddp_tensor_fill(group, &full, 1)) return DDP_ERR_INVALID;
        if (ddp_tensor_shard(group, &full, DDP_SHARD(1), &columns)) return DDP_ERR_INVALID;
        if (ddp_tensor_shard(group, &full, DDP_SHARD(0), &rows)) return DDP_ERR_INVALID;
        ddp_result result = ddp_tensor_redistribute(group, &columns, DDP_SHARD(1), DDP_SHARD(0), &rows);
        if (!result) result = ddp_tensor_print(group, &rows, DDP_SHARD(0), text, &size);
        if (!result && ddp_rank(group) == 0) puts(text);
        ddp_tensor_free(group, &full), ddp_tensor_free(group, &columns), ddp_tensor_free(group, &rows);
        return (void)user, result;
    }
    int main(void) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = 2;
        if (ddp_launch(&desc, rank, NULL) != DDP_OK) return puts(ddp_last_error()), 1;
        return 0;
    }

CONTENTS      (search for the tags)
    >>config  >>kernels  >>types  >>descs  >>api  >>impl-structs  >>impl-tensor-memory
    >>impl-tensor-boxes  >>impl-tensor-layout  >>impl-tensor-plan  >>impl-tensor-run
    >>impl-tensor-root  >>impl-tensor-mesh  >>impl-tp-math  >>impl-tp-gemm-kernel  >>impl-tp-kernels
    >>impl-tp-gemm  >>impl-tp-context  >>impl-tp-linear  >>impl-tp-linear-passes
    >>impl-tp-linear-create  >>impl-tp-mlp  >>impl-tp-vocab  >>impl-tp-norm  >>impl-tp-random
    >>impl-public

CONCEPTS
    Placement  The distribution of one global tensor over the W ranks of a group. REPLICATE: every rank has
               all of it. SHARD(d): dimension d, of n entries, is cut into pieces of c = ceil(n / W). Rank r
               has entries [rc, (r+1)c); the last ranks have fewer or none. PARTIAL: every rank has a summand
               of the full shape; the tensor is their sum.
               n = 5, W = 3:    rank 0  [0 1]    rank 1  [2 3]    rank 2  [4]
    Layout     A placement along each axis of a mesh. Axes cut one after the other: SHARD(0) along both axes
               of 2 x 2 gives rank (i, j) piece j of piece i.
    Box        A rectangular part of a global tensor: an offset and a shape. Each rank has one box of it. A
               checkpoint stores boxes (ddp_fsdp_param: global_shape is the global shape, global_offset is
               this offset).
    Tensor parallelism (Shoeybi et al. 2019)   A column-parallel linear shards the rows of W (columns of its
               transpose), so y is sharded. A row-parallel linear takes a sharded input, and its products are
               added over the ranks. Between the two, nothing is sent:

                   x (M, K) --column--> y (M, N/t) --activation--> --row--> z (M, K)

               The forward has one all-reduce, of z, and the backward one, of dx.

    Sequence parallelism (Korthikanti et al. 2022)   Outside these pairs, the M rows (tokens) are sharded
               too. The all-reduce becomes a reduce-scatter of rows after the row-parallel linear and an
               all-gather of rows before the column-parallel linear. Together they send the same number of
               bytes.
    Overlap    The gather or scatter is sent in chunk_count pieces, while the product of another piece is
               computed.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). An error about shapes names both:
      rank 1/2 ddp_tensor_redistribute group=world: out is (3, 4), but SHARD(0) of (5, 4) on rank 1 of 2 is
      (2, 4)

CONFIG MACROS (define before including)
    DDP_TENSOR_IMPLEMENTATION   also compile the bodies of this header, here. DDP_IMPLEMENTATION implies it
    DDP_USE_CBLAS               products by cblas_sgemm and cblas_dgemm; the program provides the include path
                                and links -lopenblas (or another CBLAS)

NOT DONE HERE
    No autograd, no attention (heads are local: any attention works), no strides. 16-bit tensors, but no
    16-bit layers.
*/
#ifndef DDP_TENSOR_KERNELS_H
#define DDP_TENSOR_KERNELS_H

//== config =================================================================================== >>config
#include "ddp.h"

//== kernels ================================================================================= >>kernels

/* A matrix product: c (m, n) = op(a) op(b). op(a) is (m, k), and op(b) is (k, n). */
typedef struct ddp_gemm {
    int64_t m, n, k;       /* may be 0 */
    int64_t lda, ldb, ldc; /* elements from row to row */
    const void *a, *b;     /* row-major: a is (m, k), or (k, m) with trans_a; b is (k, n), or (n, k) with
                              trans_b */
    void *c;               /* row-major (m, n); overlaps neither a nor b */
    ddp_dtype dtype;       /* DDP_F32 or DDP_F64 */
    int trans_a, trans_b;  /* 1 = op transposes */
    int accumulate;        /* 1 = adds to c; 0 = overwrites c */
} ddp_gemm;
/* Computes a product: see ddp_tp_desc.gemm. */
typedef ddp_result (*ddp_gemm_fn)(const ddp_gemm *gemm, void *user);

/* The activations of ddp_tp_mlp. */
typedef enum ddp_tp_activation {
    /* tanh form, as GPT-2: x s(1.5957691216057307 (x + 0.044715 x^3)), s(x) = 1 / (1 + exp(-x)) */
    DDP_TP_GELU = 0,
    DDP_TP_RELU,      /* max(x, 0) */
    DDP_TP_SILU_GATED /* SwiGLU: g s(g) u of a first linear with 2 hidden features: [g | u] */
} ddp_tp_activation;

/* The arguments of two kernels: rows of an embedding table. Matrices have no gaps. */
typedef struct ddp_lookup {
    int64_t rows, columns; /* of the looked-up rows */
    const int32_t *index;  /* one per row; host memory, read before the call returns */
    int64_t first, count;  /* rows of the full table that this rank has */
    const void *in;        /* lookup: the table. lookup_backward: a gradient per index */
    void *out;             /* lookup: row index[i] - first of the table, or zeros. lookup_backward: gradients
                             of the table; that row += row i, in order */
} ddp_lookup;

/* The argument of a kernel: normalizes the rows of x. Matrices have no gaps. */
typedef struct ddp_norm {
    int64_t rows, columns;         /* of x and y */
    int rms;                       /* 1 = without mean */
    double eps;                    /* added to the variance */
    const void *x, *weight, *bias; /* bias may be NULL */
    void *stats;                   /* (rows, 2): mean, or 0 with rms; 1 / sqrt(mean((x - mean)^2) + eps) */
    void *y;                       /* (x - mean) stats[1] weight + bias */
} ddp_norm;

/* The argument of a kernel: the gradients of ddp_norm, with h = (x - mean) stats[1] and g = dy weight. */
typedef struct ddp_norm_backward {
    int64_t rows, columns;          /* of x, dy and dx */
    int rms;                        /* as in ddp_norm */
    const void *x, *weight, *stats; /* as in ddp_norm */
    const void *dy;                 /* the gradient of y */
    void *dx;   /* NULL = skip; may be dy: stats[1] (g - mean(g) - h mean(g h)), with rms without mean(g) */
    void *sums; /* NULL = skip; 2 rows: += the sums over rows of dy h and, unless rms, of dy */
} ddp_norm_backward;

/* The argument of three kernels: cross-entropy of logits, of which this rank has the words `first` to
   first + count - 1, and padding. Rows with targets[i] == ignore are not read and have results of 0.
     loss_max   max[i] = the greatest logit, at least minus infinity
     loss_sum   dlogits (may be NULL or logits) = exp(logits - max); sums[0][i] = logits[target] - max, or 0
                if another rank has the target; sums[1][i] = the sum of dlogits
     loss_end   all = max + log(sums[1]);  losses[i] (may be NULL) = log(sums[1]) - sums[0] + z_loss all^2;
                *total (may be NULL), host memory, is the sum of losses;
                dlogits = dlogits scale (1 + 2 z_loss all) / sums[1], less scale at the target; 0 in the
                padding. max may be overwritten */
typedef struct ddp_loss {
    int64_t rows, columns;  /* of logits and dlogits, padding included */
    const int32_t *targets; /* host memory, read before the call returns */
    int64_t ignore;         /* the target of rows that do not count */
    int64_t first, count;   /* this rank's words */
    double scale, z_loss;   /* factors of loss_end */
    double *total;          /* NULL = not computed; host memory */
    const void *logits;     /* the input */
    void *max;              /* one per row */
    void *sums;             /* two arrays of one per row */
    void *dlogits, *losses; /* NULL = not computed */
} ddp_loss;

/* The argument of a kernel: y = u < threshold ? 0 : x scale. u is word e % 4 of Philox 4x32-10 with counter
   e / 4, where e = first + row * step + column. */
typedef struct ddp_dropout {
    int64_t rows, columns; /* of x and y */
    int64_t first, step;   /* the position in the global activation */
    uint64_t key;          /* of Philox */
    uint32_t threshold;    /* probability of zero times 2^32 */
    double scale;          /* 1 / (1 - probability of zero) */
    const void *x;         /* the input */
    void *y;               /* the output; may be x */
} ddp_dropout;

/* The functions of ddp_device.layers: an array of two tables, for f32 and for f64. Work goes to the stream
   that the calling thread uses. The order of each sum depends only on shapes. step: elements from row to row.
   dy, dx: gradients of y and x. */
#define DDP_LAYER_KERNELS(X)                                                                              \
    /* copies rows */                                                                                     \
    X(copy_rows, (int64_t rows, int64_t columns, const void *x, int64_t x_step, void *y, int64_t y_step)) \
    /* y += bias in each row */                                                                           \
    X(add_bias, (int64_t rows, int64_t columns, const void *bias, void *y, int64_t y_step))               \
    /* out = the sum of x's rows; accumulate: it is added to out */                                       \
    X(sum_rows, (int64_t rows, int64_t columns, const void *x, int accumulate, void *out))                \
    /* y = the activation of x */                                                                         \
    X(activate, (ddp_tp_activation form, int64_t rows, int64_t columns, const void *x, void *y))          \
    /* dx = its gradient */                                                                               \
    X(activate_backward,                                                                                  \
      (ddp_tp_activation form, int64_t rows, int64_t columns, const void *x, const void *dy, void *dx))   \
    /* rows of an embedding table */                                                                      \
    X(lookup, (const ddp_lookup *op))                                                                     \
    /* its gradient */                                                                                    \
    X(lookup_backward, (const ddp_lookup *op))                                                            \
    /* layer norm or RMS norm */                                                                          \
    X(norm, (const ddp_norm *op))                                                                         \
    /* its gradients */                                                                                   \
    X(norm_backward, (const ddp_norm_backward *op))                                                       \
    /* see ddp_loss */                                                                                    \
    X(loss_max, (const ddp_loss *op))                                                                     \
    /* see ddp_loss */                                                                                    \
    X(loss_sum, (const ddp_loss *op))                                                                     \
    /* see ddp_loss */                                                                                    \
    X(loss_end, (const ddp_loss *op))                                                                     \
    /* see ddp_dropout */                                                                                 \
    X(dropout, (const ddp_dropout *op))

// clang-format off
/* A table of these functions, and a product. */
typedef struct ddp_layer_kernels {
    int version;      /* DDP_VERSION of the header that filled in the table */
    ddp_gemm_fn gemm; /* user: the group */
#define DDP_X(name, arguments) ddp_result (*name) arguments;
    DDP_LAYER_KERNELS(DDP_X)
#undef DDP_X
    // clang-format on
} ddp_layer_kernels;

#endif /* DDP_TENSOR_KERNELS_H */

#if !defined(DDP__KERNELS_ONLY) /* ddp_cuda.cuh includes only the part above */
#ifndef DDP_TENSOR_H
#define DDP_TENSOR_H

#ifdef __cplusplus
extern "C" {
#endif

//== types ===================================================================================== >>types

/* The distribution of a tensor over the ranks of a group: DDP_REPLICATE, DDP_PARTIAL or DDP_SHARD. Zero is
   DDP_REPLICATE. */
typedef int32_t ddp_placement;
/* Every rank has the whole tensor. A constant, also in initializers; so are the next two. */
#define DDP_REPLICATE ((ddp_placement)0)
/* Every rank has a summand of the full shape. */
#define DDP_PARTIAL ((ddp_placement)-1)
/* Every rank has a piece along dimension dim, from 0. */
#define DDP_SHARD(dim) ((ddp_placement)(1 + (dim)))

/* A rectangular part of a global tensor: [offset, offset + shape) of global_shape. */
typedef struct ddp_tensor_box {
    int ndim;                           /* of the global tensor and of the box */
    int64_t global_shape[DDP_MAX_NDIM]; /* of the global tensor */
    int64_t offset[DDP_MAX_NDIM];       /* the first entry of the box along each dimension */
    int64_t shape[DDP_MAX_NDIM];        /* of the box */
} ddp_tensor_box;

/* The work of a redistribution on this rank. */
typedef struct ddp_tensor_plan {
    const char *collective; /* such as "ddp_all_gather_v"; "copy": no rank sends; "none": no elements, or out
                               is in already. Static text */
    size_t sent_bytes;      /* to other ranks, as by a ring: all-reduce 2(W-1)/W of the tensor, all-gather and
                               reduce-scatter (W-1)/W */
    size_t workspace_bytes; /* allocated on the group's device during the call */
} ddp_tensor_plan;

typedef struct ddp_tp ddp_tp; /* what the layers of a model share on one group; see ddp_tp_create */
typedef struct ddp_tp_linear ddp_tp_linear;         /* see ddp_tp_linear_create */
typedef struct ddp_tp_mlp ddp_tp_mlp;               /* see ddp_tp_mlp_create */
typedef struct ddp_tp_embedding ddp_tp_embedding;   /* see ddp_tp_embedding_create */
typedef struct ddp_tp_layer_norm ddp_tp_layer_norm; /* see ddp_tp_layer_norm_create */

//== descs ===================================================================================== >>descs

/* A global tensor over the axes of a mesh, or over one group. */
typedef struct ddp_tensor_layout {
    int ndim;                              /* of the global tensor; 0 is one element */
    int64_t shape[DDP_MAX_NDIM];           /* global */
    int axis_count;                        /* 0 = only this rank has the tensor */
    ddp_group *axes[DDP_MAX_NDIM];         /* this rank's group along each axis, outermost first; each group
                                              once; the same axes on every rank */
    ddp_placement placement[DDP_MAX_NDIM]; /* along each axis; 0 = replicate */
} ddp_tensor_layout;

/* For ddp_tp_create. Zero means default, except for max_rows. */
typedef struct ddp_tp_desc {
    ddp_dtype dtype;       /* 0 = DDP_F32; or DDP_F64: of activations, weights and gradients */
    int64_t max_rows;      /* required; the largest M: rows (tokens of all sequences) of a full activation */
    int sequence_parallel; /* 1 = activations between the pairs are sharded by rows; M is then a multiple of
                              the ranks */
    int chunk_count;       /* 0 = 1, no overlap. Otherwise rows are sent in this many pieces, at most 64,
                              while others are multiplied. The bits are the same if those of gemm do not
                              depend on the number of rows. Over tcp, 2 or more is DDP_ERR_UNSUPPORTED */
    int accumulate_grads;  /* 1 = backward adds to gradients of weights and biases; 0 = it overwrites them */
    ddp_gemm_fn gemm;      /* called on the thread that calls the layer; see ddp_gemm. NULL = CBLAS with
                              DDP_USE_CBLAS, otherwise ddp_gemm_builtin, on one core; on a device with its
                              own memory, the device's product (for GPUs see ddp_cuda_gemm_tf32) */
    void *gemm_user;       /* passed to gemm */
} ddp_tp_desc;

/* Measurements of a context since its creation or since ddp_tp_reset_stats. */
typedef struct ddp_tp_stats {
    uint64_t collectives;   /* of forward, backward and ddp_tp_cross_entropy; each chunk is one */
    uint64_t elements_sent; /* by this rank, as by a ring; not bytes */
    double comm_seconds;    /* time of these calls in collectives, not hidden by compute. Almost 0 on a device
                               with streams */
    size_t workspace_bytes; /* of the shared workspace now; not reset */
} ddp_tp_stats;

/* The sharded dimension of a linear layer's weight: see CONCEPTS. */
typedef enum ddp_tp_split { DDP_TP_COLUMN = 0, DDP_TP_ROW } ddp_tp_split;

/* For ddp_tp_linear_create: y = x W' + b, W (out_features, in_features) as in PyTorch. */
typedef struct ddp_tp_linear_desc {
    ddp_tp_split split;                /* COLUMN shards out_features, ROW in_features, by the rule of SHARD */
    int64_t in_features, out_features; /* required; global. With heads, out_features 0 = (heads + 2 kv_heads)
                                          head_size */
    int no_bias;       /* 1 = no bias. Otherwise COLUMN shards the bias like out_features. ROW: every rank
                          has the full bias, which is added once, after the sum */
    int gather_output; /* 1 = every rank gets the full y. Only COLUMN without sequence_parallel */
    int scatter_input; /* 1 = every rank passes the full x, and uses its own columns. Only ROW without
                          sequence_parallel */
    /* Only COLUMN: fused query, key, value; 0 = not fused. The heads of queries, a multiple of the ranks. W's
       rows are the heads of all queries, then of all keys, then of all values. Each is sharded by heads, so
       y's columns are this rank's [queries | keys | values]. With gather_output they are as W's rows. */
    int heads;
    int kv_heads;      /* 0 = heads; fewer: grouped-query attention. A multiple of the ranks; divides heads */
    int64_t head_size; /* with heads: 0 = in_features / heads, which must be exact */
} ddp_tp_linear_desc;

/* For ddp_tp_mlp_create. */
typedef struct ddp_tp_mlp_desc {
    int64_t channels, hidden;     /* required; hidden is sharded */
    ddp_tp_activation activation; /* 0 = GELU */
    int no_bias;                  /* 1 = both linears have no bias */
} ddp_tp_mlp_desc;

/* For ddp_tp_embedding_create. */
typedef struct ddp_tp_embedding_desc {
    int64_t vocab, channels; /* required */
    int64_t padded_vocab;    /* 0 = vocab; at least vocab. Rows of the table, which are sharded; those from
                                vocab on are not used. It must not depend on the number of ranks: checkpoints
                                have this many rows */
} ddp_tp_embedding_desc;

/* For ddp_tp_cross_entropy. */
typedef struct ddp_tp_loss_desc {
    int64_t vocab;        /* required */
    int64_t padded_vocab; /* 0 = vocab; logits from vocab on count as minus infinity */
    int32_t ignore_index; /* 0 = -100: rows with this target do not count */
    double z_loss;        /* adds z_loss * (log sum exp)^2 to each row's loss (PaLM, Chowdhery et al. 2022); 0
                             = none */
    double scale;         /* factor of the gradient; 0 = 1 / (number of rows that count), for the gradient of
                             the mean */
} ddp_tp_loss_desc;

/* For ddp_tp_layer_norm_create. */
typedef struct ddp_tp_layer_norm_desc {
    int64_t channels; /* required */
    double eps;       /* added to the variance; 0 = 1e-5 */
    int rms;          /* 1 = RMS norm: no mean, no bias (Zhang and Sennrich 2019) */
} ddp_tp_layer_norm_desc;

/* For ddp_tp_dropout: the position of a buffer in a global activation. Element (i, j) of the buffer is
   element (first_row + i, first_column + j) of an activation with `columns` columns. */
typedef struct ddp_tp_dropout_desc {
    double rate;  /* probability of zero, 0 to below 1 */
    uint64_t key; /* another one for each step and layer; the same on all ranks that share the activation */
    int64_t first_row, first_column; /* required where rows or columns are sharded */
    int64_t columns;                 /* of the activation; 0 = the buffer has all of them */
} ddp_tp_dropout_desc;

//== api ========================================================================================= >>api

/* --- tensors ---
   Row-major and contiguous, in memory of the group's device; group NULL = the CPU, with malloc. The caller
   frees allocated memory once, by ddp_tensor_free with the same group. A view refers to the memory of another
   tensor, and is invalid once that is freed. Not collective, and blocking, unless stated otherwise. On a
   device with streams a call may return earlier: its work on device memory is enqueued on the compute stream.
   Errors: DDP_ERR_INVALID names shapes; DDP_ERR_NO_MEMORY. The fields of out are then unchanged, and nothing
   stays allocated. */

/* Allocates zeroed memory for shape[0] * ... * shape[ndim - 1] elements on the group's device. Entries may be
   0; data is not NULL then, either. The old fields of out are not read, so memory of an earlier tensor is not
   freed. Errors: DDP_ERR_INVALID when the number of bytes overflows. */
DDPDEF ddp_result ddp_tensor_create(ddp_group *group, ddp_tensor *out, ddp_dtype dtype, int ndim,
                                    const int64_t *shape);
/* Frees memory that ddp_tensor_create or another call has allocated with this group, and sets all fields to
   0. Enqueued work on the memory is done first. Call it before ddp_group_destroy. tensor NULL, or data NULL:
   frees nothing. */
DDPDEF void ddp_tensor_free(ddp_group *group, ddp_tensor *tensor);

/* Returns a view of the same elements with another shape; one entry may be -1 = inferred from the rest. The
   old fields of out are not read. out may be in: the tensor then keeps its memory, and is freed as before. */
DDPDEF ddp_result ddp_tensor_view(const ddp_tensor *in, int ndim, const int64_t *shape, ddp_tensor *out);
/* Returns a view of entries [begin, end) of dimension dim; begin may equal end. Every dimension before dim
   must have length 1; otherwise the entries are not contiguous: see ddp_tensor_copy_box. out may be in, but
   data then moves: keep another copy of the struct to free the memory. */
DDPDEF ddp_result ddp_tensor_slice(const ddp_tensor *in, int dim, int64_t begin, int64_t end,
                                   ddp_tensor *out);

/* --- elements of tensors ---
   A call with `out` writes to the memory of out, which must have the right shape. If out->data is NULL, it
   allocates out like ddp_tensor_create and sets its shape. So initialize out to zero, or to a tensor.
   out->dtype 0 = in's; another dtype is an error, except in ddp_tensor_copy. An input without elements may
   have data NULL. in and out do not overlap, unless stated otherwise. Everything else is as for tensors. */

/* Copies between equal shapes, and converts dtypes: any float to any float, rounding to nearest even;
   integers only to the same dtype. In place: out->data == in->data, for dtypes of the same size. */
DDPDEF ddp_result ddp_tensor_copy(ddp_group *group, const ddp_tensor *in, ddp_tensor *out);
/* Copies the box of extent[] entries from in_offset[] of in to out_offset[] of out. The three arrays have
   ndim entries; offsets NULL = 0. in and out have the same ndim and dtype. Their memory does not overlap,
   also outside the boxes. out must be allocated. Errors: DDP_ERR_INVALID also for a box outside its
   tensor. */
DDPDEF ddp_result ddp_tensor_copy_box(ddp_group *group, const ddp_tensor *in, const int64_t *in_offset,
                                      ddp_tensor *out, const int64_t *out_offset, const int64_t *extent);
/* Permutes dimensions: dimension i of out is dimension order[i] of in. order has in->ndim entries. */
DDPDEF ddp_result ddp_tensor_transpose(ddp_group *group, const ddp_tensor *in, const int *order,
                                       ddp_tensor *out);
/* Sets every element of an allocated tensor to value, rounded to a float dtype. Errors: DDP_ERR_INVALID when
   an integer dtype cannot represent value exactly. */
DDPDEF ddp_result ddp_tensor_fill(ddp_group *group, ddp_tensor *tensor, double value);

/* Writes a summary of a few lines: rank, dtype, shape, placement, and the corner of at most 4 x 8 values of
   the last two dimensions. The shape and the values are those of this rank's part; placement only appears as
   a word. *size_bytes: in, the space at text; out, the length with its terminating 0. text NULL: only sets
   *size_bytes. Errors: DDP_ERR_INVALID when the space is too small: text is unchanged, and *size_bytes is the
   required length. */
DDPDEF ddp_result ddp_tensor_print(ddp_group *group, const ddp_tensor *tensor, ddp_placement placement,
                                   char *text, size_t *size_bytes);

/* --- placements ---
   A call with `out` writes to it as the calls for elements of tensors do. Only ddp_tensor_shard accepts group
   NULL: one rank. A sum of PARTIAL is in the group's order. Not collective, unless stated otherwise; blocking
   as the calls for tensors. Errors: DDP_ERR_INVALID names shapes or placements, and leaves box and plan
   unchanged; DDP_ERR_NO_MEMORY. */

/* Returns a text such as "REPLICATE" or "SHARD(1)". A thread keeps its last four texts; other calls of this
   section may replace them. */
DDPDEF const char *ddp_placement_name(ddp_placement placement);
/* Returns the box of a rank's part of a tensor with this global shape. PARTIAL and REPLICATE: all of it. A
   rank without entries has shape 0 along the sharded dimension; its offset there is the dimension's global
   length. Errors: DDP_ERR_INVALID also when rank is not in 0 to world_size - 1. */
DDPDEF ddp_result ddp_placement_shard_box(ddp_placement placement, int ndim, const int64_t *global_shape,
                                          int rank, int world_size, ddp_tensor_box *box);

/* Extracts this rank's part of a tensor that every rank has in full. Sends nothing. PARTIAL: rank 0 gets the
   values, the other ranks get zeros. whole and out do not overlap. */
DDPDEF ddp_result ddp_tensor_shard(ddp_group *group, const ddp_tensor *whole, ddp_placement to,
                                   ddp_tensor *out);
/* Distributes root's tensor: each rank gets its part, as ddp_tensor_shard describes, with root in place of
   rank 0. Shape and dtype are those of root's whole; other ranks may pass whole NULL. Collective. In place on
   root, except for SHARD: out->data == whole->data. Errors on every rank, before data is sent: those of one
   rank; DDP_ERR_MISMATCH when roots or placements differ. An invalid root is an error only on this rank: the
   other ranks wait (ddp.h, One rank). */
DDPDEF ddp_result ddp_tensor_distribute(ddp_group *group, const ddp_tensor *whole, int root, ddp_placement to,
                                        ddp_tensor *out);

/* Gathers the full tensor on root, the inverse of ddp_tensor_distribute. PARTIAL: the sum. REPLICATE: a copy
   of root's in. out is allocated or written only on root; other ranks may pass NULL. global_shape has
   in->ndim entries. Collective, with the same dtype and global_shape on every rank. In place on root, except
   for SHARD: out->data == in->data. Errors: as ddp_tensor_distribute; DDP_ERR_MISMATCH also for dtypes and
   global shapes. */
DDPDEF ddp_result ddp_tensor_gather(ddp_group *group, const ddp_tensor *in, ddp_placement from,
                                    const int64_t *global_shape, int root, ddp_tensor *out);

/* Converts a tensor from one placement to another. in and out are this rank's parts. The shape of out is
   required, also where out is allocated. The global shape is that of in, except for the dimension that `from`
   shards: out has all of that dimension. If from equals to, in and out have the same shape.
       REPLICATE -> SHARD    copy of the box      SHARD(a) -> SHARD(b)   all-to-all
       REPLICATE -> PARTIAL  rank 0 copies, the others write zeros
       SHARD -> REPLICATE    all-gather           SHARD -> PARTIAL       copy into zeros
       PARTIAL -> REPLICATE  all-reduce           PARTIAL -> SHARD       reduce-scatter (zero-padded)
       the same placement    copy
   Collective, with the same placements and global shape on every rank. In place: in->data may equal out->data
   for the same placement, in a group of one rank, and for PARTIAL -> REPLICATE. Otherwise the call does not
   write the memory of in.
   Errors: DDP_ERR_INVALID prints both sides; DDP_ERR_NO_MEMORY. A conversion by a collective returns an error
   of one rank on every rank, and DDP_ERR_MISMATCH when placements, dtypes or global shapes differ. The group
   stays usable. The other conversions send nothing: each rank returns only its own errors. */
DDPDEF ddp_result ddp_tensor_redistribute(ddp_group *group, const ddp_tensor *in, ddp_placement from,
                                          ddp_placement to, ddp_tensor *out);
/* Returns the plan of a ddp_tensor_redistribute without executing it. Not collective; data is not read.
   plan->collective is the same on ranks with the same arguments; the numbers of bytes may differ. */
DDPDEF ddp_result ddp_tensor_redistribute_plan(ddp_group *group, const ddp_tensor *in, ddp_placement from,
                                               ddp_placement to, const ddp_tensor *out,
                                               ddp_tensor_plan *plan);

/* Returns the box of this rank under a layout. Each axis cuts the box that the axes before it have left. A
   rank without entries has its offset at the end of that box. */
DDPDEF ddp_result ddp_tensor_layout_box(const ddp_tensor_layout *layout, ddp_tensor_box *box);
/* Converts a tensor from one layout to another with the same global shape and axes, axis by axis. If inner
   axes shard the dimension that an outer axis changes, the tensor is gathered along the inner axes first.
   PARTIAL along several axes is summed one axis after the other, innermost first. in is this rank's part.
   *plan (may be NULL): sent_bytes is the sum over the steps; workspace_bytes is the maximum over the steps,
   with the tensors between them; collective names the step that sends most.
   Collective over all axes. out NULL: only sets *plan; then in->data is not read, and nothing is sent or
   awaited. Ownership: out is allocated with axes[0], or with group NULL if axis_count is 0.
   Errors: as ddp_tensor_redistribute, along each axis. After an error of its own or of a peer, a rank still
   takes part in the remaining steps, so no rank waits for it. Only after DDP_ERR_INVALID for a layout, or for
   two that do not match, it takes part in no step. Then call ddp_group_abort on the groups of every axis: the
   other ranks are still waiting. */
DDPDEF ddp_result ddp_tensor_redistribute_mesh(const ddp_tensor *in, const ddp_tensor_layout *from,
                                               const ddp_tensor_layout *to, ddp_tensor *out,
                                               ddp_tensor_plan *plan);

/* --- layers ---
   M rows, t ranks, K and N features. N/t and K/t are this rank's share by the rule of SHARD, also where t
   does not divide N or K. In sequence parallelism, activations outside the column-row pairs have M/t rows,
   SHARD(0). An activation that every rank has in full is the same on every rank, and so is its gradient.
   Weights and gradients are passed with every call, so that ddp_fsdp.h or a reducer may own them. Gradients
   of weights and biases are complete: they are not to be summed over the group. A gradient of inputs (dx) may
   be NULL, on all ranks or none: it is then not computed.
   Collective over the context's group, unless stated otherwise: creating a context or a layer, destroying a
   context, forward, backward and ddp_tp_cross_entropy. rows is the same on every rank, and may be 0.
   Calls block on a CPU group; on a device with streams they return once their work is enqueued. Buffers
   belong to the caller. They are contiguous, of the context's dtype, in memory of the group's device. A
   buffer without elements may be NULL. An output overlaps no other buffer, unless stated otherwise. Buffers
   are in use until the call returns; on a device with streams, until the enqueued work is done. Tokens and
   targets are host memory, read before the call returns.
   Creating a context or a layer blocks, copies desc, and may grow the shared workspace (group memory), after
   waiting for work that layers have enqueued. Errors, on every rank: DDP_ERR_INVALID and DDP_ERR_MISMATCH
   name the field; DDP_ERR_NO_MEMORY. Other calls allocate nothing. A context must outlive its layers.
   Errors of other calls: DDP_ERR_INVALID before data is sent, also for more than max_rows rows. Each rank
   checks only its own arguments; with the same ones on all ranks, all return the same error. A later failure,
   also one of gemm, poisons the group. */

/* Creates a context. desc is the same on every rank, but gemm and gemm_user are not compared. */
DDPDEF ddp_result ddp_tp_create(ddp_tp **out, ddp_group *group, const ddp_tp_desc *desc);
/* Frees the context, after its layers, and the workspace. Blocks. NULL on all ranks is ignored. If the group
   has failed, the call waits for no rank. */
DDPDEF void ddp_tp_destroy(ddp_tp *tp);
DDPDEF ddp_result ddp_tp_get_stats(const ddp_tp *tp, ddp_tp_stats *stats); /* sets *stats */
/* Sets the measurements to 0, except for workspace_bytes. NULL is ignored. */
DDPDEF void ddp_tp_reset_stats(ddp_tp *tp);

/* Computes a product in host memory on the calling thread, without CBLAS, also if DDP_USE_CBLAS is defined.
   Needs no group; user is not read. Each element of c is one chain of additions in the order of k, which
   starts with the old element if accumulate is set. So its bits do not depend on the other elements. */
DDPDEF ddp_result ddp_gemm_builtin(const ddp_gemm *gemm, void *user);

/* Creates a linear layer: column-parallel or row-parallel. */
DDPDEF ddp_result ddp_tp_linear_create(ddp_tp_linear **out, ddp_tp *tp, const ddp_tp_linear_desc *desc);
DDPDEF void ddp_tp_linear_destroy(ddp_tp_linear *linear); /* NULL is ignored */
/* Returns the box of a part of this rank's weight in the global weight (out_features, in_features). Fused
   query, key, value has parts 0 to 2; the column linear of a gated MLP has 0 and 1, gate and up projection;
   others have only part 0. The rank's weight holds its parts one below the other, part 0 first. */
DDPDEF ddp_result ddp_tp_linear_weight_box(const ddp_tp_linear *linear, int part, ddp_tensor_box *box);
/* Returns the box of a part of this rank's bias in the global bias (out_features). part: as for the weight.
   Errors: DDP_ERR_INVALID also with no_bias. */
DDPDEF ddp_result ddp_tp_linear_bias_box(const ddp_tp_linear *linear, int part, ddp_tensor_box *box);
/* Returns the columns of this rank's weight; 0 for NULL. */
DDPDEF int64_t ddp_tp_linear_in_features(const ddp_tp_linear *linear);
/* Returns the rows of this rank's weight, of all its parts; 0 for NULL. */
DDPDEF int64_t ddp_tp_linear_out_features(const ddp_tp_linear *linear);

/* Computes y = x W' + b.
     COLUMN   x (M, K), or (M/t, K) in sequence parallelism -> y (M, N/t), or (M, N) with gather_output
     ROW      x (M, K/t), or (M, K) with scatter_input -> y (M, N), or (M/t, N) in sequence parallelism
   rows is M, at most max_rows. bias is NULL with no_bias. */
DDPDEF ddp_result ddp_tp_linear_forward(ddp_tp_linear *linear, const void *weight, const void *bias,
                                        const void *x, int64_t rows, void *y);
/* Computes the gradients of x, weight and bias. dy has the shape of y, dx of x, weight_grad and bias_grad of
   weight and bias. In sequence parallelism, a column linear gathers x again, in chunks during the product for
   dx. weight_grad NULL = neither weight_grad nor bias_grad, on all ranks that have features or on none.
   bias_grad is NULL exactly then, and with no_bias. */
DDPDEF ddp_result ddp_tp_linear_backward(ddp_tp_linear *linear, const void *weight, const void *x,
                                         const void *dy, int64_t rows, void *dx, void *weight_grad,
                                         void *bias_grad);

/* Creates an MLP: a column linear (hidden, channels), the activation, and a row linear (channels, hidden).
   SILU_GATED: the column linear is (2 hidden, channels), with hidden rows for the gate, then hidden rows for
   the up projection. Each is sharded: see ddp_tp_linear_weight_box. */
DDPDEF ddp_result ddp_tp_mlp_create(ddp_tp_mlp **out, ddp_tp *tp, const ddp_tp_mlp_desc *desc);
DDPDEF void ddp_tp_mlp_destroy(ddp_tp_mlp *mlp); /* with its linears; NULL is ignored */
/* Returns the number of elements of this rank's saved, which forward writes and backward reads; rows is M. 0
   for NULL. */
DDPDEF size_t ddp_tp_mlp_saved_count(const ddp_tp_mlp *mlp, int64_t rows);
/* Returns the column linear (which = 0) or the row linear (1), for their boxes; otherwise NULL. Owned by the
   mlp: never destroy it. */
DDPDEF ddp_tp_linear *ddp_tp_mlp_linear(ddp_tp_mlp *mlp, int which);
/* Computes y. x and y are (M, channels), or (M/t, channels) in sequence parallelism; rows is M. weights:
   weight and bias of the column linear, then of the row linear; biases are NULL with no_bias. saved:
   ddp_tp_mlp_saved_count elements, required also if no backward follows. */
DDPDEF ddp_result ddp_tp_mlp_forward(ddp_tp_mlp *mlp, const void *const weights[4], const void *x,
                                     int64_t rows, void *saved, void *y);
/* Computes the gradients of x and weights. x, weights and saved have the values of the forward; they are only
   read. dy has the shape of y, dx of x. grads: the gradients of all entries of weights. grads NULL = none, on
   all ranks that have features or on no rank. */
DDPDEF ddp_result ddp_tp_mlp_backward(ddp_tp_mlp *mlp, const void *const weights[4], const void *x,
                                      const void *saved, const void *dy, int64_t rows, void *dx,
                                      void *const grads[4]);

/* Creates an embedding. Its table (padded_vocab, channels) is sharded by rows. */
DDPDEF ddp_result ddp_tp_embedding_create(ddp_tp_embedding **out, ddp_tp *tp,
                                          const ddp_tp_embedding_desc *desc);
DDPDEF void ddp_tp_embedding_destroy(ddp_tp_embedding *embedding); /* NULL is ignored */
/* Returns the box of this rank's rows in the table. */
DDPDEF ddp_result ddp_tp_embedding_box(const ddp_tp_embedding *embedding, ddp_tensor_box *box);
/* Looks up one row of the table for each token. weight: this rank's rows of the table. tokens: M of them, the
   same on every rank; rows is M. y (M, channels), or (M/t, channels) in sequence parallelism. Errors:
   DDP_ERR_INVALID names the position of a token outside 0 to vocab - 1. */
DDPDEF ddp_result ddp_tp_embedding_forward(ddp_tp_embedding *embedding, const void *weight,
                                           const int32_t *tokens, int64_t rows, void *y);
/* Computes the gradient of the table. dy has the shape of y. weight_grad, this rank's rows, is required.
   Without accumulate_grads, rows without a token become 0. Errors: as ddp_tp_embedding_forward. */
DDPDEF ddp_result ddp_tp_embedding_backward(ddp_tp_embedding *embedding, const int32_t *tokens,
                                            const void *dy, int64_t rows, void *weight_grad);

/* Computes the cross-entropy of logits that are sharded along the vocabulary, (M, this rank's share of
   padded_vocab), and its gradient: no backward call follows. losses (M): the loss of each row, 0 for rows
   that do not count. *mean: over the rows that count, or 0 without such rows; host memory. dlogits: the
   gradient, with the shape of logits. Each of the three may be NULL = not computed, also only on some ranks.
   losses and *mean have the same bits on all ranks. A NaN in a row is the loss of that row. targets and desc
   are the same on every rank. Two collectives: an all-reduce MAX and one fused SUM. Only for mean the host
   waits for a device. In place: dlogits may be logits. Errors: DDP_ERR_INVALID names the row of a target
   outside 0 to vocab - 1 that is not ignore_index. Source: Megatron-LM. */
DDPDEF ddp_result ddp_tp_cross_entropy(ddp_tp *tp, const ddp_tp_loss_desc *desc, const void *logits,
                                       const int32_t *targets, int64_t rows, void *losses, double *mean,
                                       void *dlogits);

/* Creates a layer norm, or an RMS norm. Every rank has all channels of weight and bias. */
DDPDEF ddp_result ddp_tp_layer_norm_create(ddp_tp_layer_norm **out, ddp_tp *tp,
                                           const ddp_tp_layer_norm_desc *desc);
DDPDEF void ddp_tp_layer_norm_destroy(ddp_tp_layer_norm *norm); /* NULL is ignored */
/* Normalizes the last dimension of x (rows, channels). Unlike in other layers, rows is M/t in sequence
   parallelism. stats (rows, 2) is required; backward reads it. bias is NULL exactly with rms. Not
   collective. */
DDPDEF ddp_result ddp_tp_layer_norm_forward(ddp_tp_layer_norm *norm, const void *weight, const void *bias,
                                            const void *x, int64_t rows, void *stats, void *y);
/* Computes dx, weight_grad and bias_grad. weight_grad NULL = neither of the last two, on all ranks or none.
   bias_grad is NULL exactly then, and with rms. Collective only if weight_grad is computed in sequence
   parallelism: one all-reduce sums it and bias_grad over the group. In place: dx may be dy. */
DDPDEF ddp_result ddp_tp_layer_norm_backward(ddp_tp_layer_norm *norm, const void *weight, const void *x,
                                             const void *stats, const void *dy, int64_t rows, void *dx,
                                             void *weight_grad, void *bias_grad);

/* Sets random elements of x (rows, columns) to zero, and multiplies the others by 1 / (1 - rate). A random
   number decides, which depends only on key and the element's position in the global activation. Ranks that
   hold the same element therefore agree, for any sharding. max_rows is no limit. Backward is the same call on
   dy, with the same desc. In place: y == x. Not collective. */
DDPDEF ddp_result ddp_tp_dropout(ddp_tp *tp, const ddp_tp_dropout_desc *desc, const void *x, int64_t rows,
                                 int64_t columns, void *y);

/* Fills out with the box of a global tensor of normally distributed values. A value depends only on key,
   mean, deviation and the element's position in global_shape: any sharding has the bits of the full tensor.
   Pass another key for each tensor. out is host memory: box->shape, of dtype f32 or f64. Not collective. */
DDPDEF ddp_result ddp_tensor_init_normal(const ddp_tensor_box *box, ddp_dtype dtype, uint64_t key,
                                         double mean, double deviation, void *out);

#ifdef __cplusplus
}
#endif
#endif /* DDP_TENSOR_H */

#include "ddp.h" /* once more, for its check of the options with which bodies are compiled */
#if (defined(DDP_IMPLEMENTATION) || defined(DDP_TENSOR_IMPLEMENTATION)) \
    && !defined(DDP_TENSOR_IMPLEMENTATION_INCLUDED)
#define DDP_TENSOR_IMPLEMENTATION_INCLUDED
#define DDP__TENSOR_BODIES /* this inclusion compiles the bodies */

//== structs ============================================================================ >>impl-structs
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(DDP_USE_CBLAS)
#include <cblas.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__cplusplus)
#define DDP__TENSOR_THREAD thread_local
#else
#define DDP__TENSOR_THREAD _Thread_local
#endif
#define DDP__TENSOR_INVALID(group, ...) ddp_fail_in(DDP_ERR_INVALID, __func__, group, __VA_ARGS__)

//== tensor memory ================================================================ >>impl-tensor-memory
/* ddp_tensor_create, _free, _view, _slice, _fill and _copy, and the checks of tensors that all calls share. A
   tensor is contiguous memory of the group's device. */

typedef struct ddp__tensor_text {
    char text[DDP_MAX_NDIM * 22 + 4];
} ddp__tensor_text;

/* "(4, 6)" */
static const char *ddp__tensor_shape(int ndim, const int64_t *shape, ddp__tensor_text *out) {
    size_t used = 1;
    strcpy(out->text, "(");
    for (int i = 0; i < ndim; i++)
        used += (size_t)snprintf(out->text + used, sizeof out->text - used, "%s%lld", i ? ", " : "",
                                 (long long)shape[i]);
    strcpy(out->text + used, ")");
    return out->text;
}

static int ddp__tensor_equal(int ndim, const int64_t *a, const int64_t *b) {
    for (int i = 0; i < ndim; i++)
        if (a[i] != b[i]) return 0;
    return 1;
}

/* Returns the bytes of a tensor, or -1 if the shape is invalid or too large for memory. */
static int64_t ddp__tensor_bytes(const ddp_tensor *t) {
    int64_t bytes = ddp_tensor_count(t);
    if (bytes < 0 || __builtin_mul_overflow(bytes, (int64_t)ddp_dtype_size(t->dtype), &bytes)
        || bytes > PTRDIFF_MAX / 2)
        return -1;
    return bytes;
}

/* Checks dtype, shape and, with with_data, that data is set. Errors name the public function `who` and its
   argument `name`. */
static ddp_result ddp__tensor_check(const char *who, const ddp_group *group, const char *name,
                                    const ddp_tensor *t, int with_data) {
    ddp__tensor_text text;
    if (!t) return ddp_fail_in(DDP_ERR_INVALID, who, group, "%s is NULL", name);
    if (!ddp_dtype_size(t->dtype))
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "%s: dtype=%d is invalid; use DDP_F32 to DDP_U64",
                           name, (int)t->dtype);
    if (t->ndim < 0 || t->ndim > DDP_MAX_NDIM)
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "%s: ndim=%d; use 0 to %d", name, t->ndim,
                           DDP_MAX_NDIM);
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] < 0)
            return ddp_fail_in(DDP_ERR_INVALID, who, group, "%s: shape[%d]=%lld; use 0 or more", name, i,
                               (long long)t->shape[i]);
    if (ddp__tensor_bytes(t) < 0)
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "%s: %s of %s does not fit in memory", name,
                           ddp__tensor_shape(t->ndim, t->shape, &text), ddp_dtype_name(t->dtype));
    if (with_data && !t->data && ddp__tensor_bytes(t))
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "%s: data is NULL", name);
    return DDP_OK;
}

/* Checks that two tensors have the same dtype and dimensions. */
static ddp_result ddp__tensor_check_same_type(const char *who, const ddp_group *group, const ddp_tensor *in,
                                              const ddp_tensor *out) {
    ddp__tensor_text a, b;
    if (in->dtype != out->dtype)
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "in is %s, but out is %s; give both the same dtype",
                           ddp_dtype_name(in->dtype), ddp_dtype_name(out->dtype));
    if (in->ndim != out->ndim)
        return ddp_fail_in(
            DDP_ERR_INVALID, who, group, "in is %s, but out is %s; give both the same number of dimensions",
            ddp__tensor_shape(in->ndim, in->shape, &a), ddp__tensor_shape(out->ndim, out->shape, &b));
    return DDP_OK;
}

static int ddp__tensor_overlap(const ddp_tensor *a, const ddp_tensor *b) {
    uintptr_t x = (uintptr_t)a->data, y = (uintptr_t)b->data, x_size = (uintptr_t)ddp__tensor_bytes(a),
              y_size = (uintptr_t)ddp__tensor_bytes(b);
    return x_size && y_size && x < y + y_size && y < x + x_size;
}

static const ddp_device *ddp__tensor_device(const ddp_group *group) {
    return group ? ddp_group_device(group) : ddp_device_cpu();
}

static ddp_result ddp__tensor_alloc(const char *who, ddp_group *group, const char *name, ddp_tensor *out,
                                    ddp_dtype dtype, int ndim, const int64_t *shape) {
    ddp_tensor t = DDP_ZERO;
    t.dtype = dtype;
    t.ndim = ndim;
    if (ndim > 0 && ndim <= DDP_MAX_NDIM) {
        if (!shape) return ddp_fail_in(DDP_ERR_INVALID, who, group, "shape is NULL");
        memcpy(t.shape, shape, (size_t)ndim * sizeof *shape);
    }
    DDP_TRY(ddp__tensor_check(who, group, name, &t, 0));
    DDP_TRY(ddp_device_begin(group));
    DDP_TRY(ddp__tensor_device(group)->alloc(group, (size_t)ddp__tensor_bytes(&t), &t.data));
    *out = t;
    return DDP_OK;
}

/* Every call that returns a tensor writes it between ddp__tensor_output_begin and _end. Begin sets
   *target: the memory of out, whose dtype and shape must match, or new memory if out->data is NULL. dtype
   is the default for out->dtype 0. Unless `casts`, it is the only valid dtype. */
static ddp_result ddp__tensor_output_begin(const char *who, ddp_group *group, const ddp_tensor *out,
                                           ddp_dtype dtype, int casts, int ndim, const int64_t *shape,
                                           ddp_tensor *target) {
    ddp__tensor_text a, b;
    if (!out) return ddp_fail_in(DDP_ERR_INVALID, who, group, "out is NULL");
    if (out->dtype && out->dtype != dtype && !casts)
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "out is %s, but the result is %s",
                           ddp_dtype_name(out->dtype), ddp_dtype_name(dtype));
    if (!out->data)
        return ddp__tensor_alloc(who, group, "out", target, out->dtype ? out->dtype : dtype, ndim, shape);
    *target = *out;
    if (!target->dtype) target->dtype = dtype;
    DDP_TRY(ddp__tensor_check(who, group, "out", target, 1));
    if (target->ndim != ndim || !ddp__tensor_equal(ndim, target->shape, shape))
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "out is %s, but the result is %s",
                           ddp__tensor_shape(target->ndim, target->shape, &a),
                           ddp__tensor_shape(ndim, shape, &b));
    return ddp_device_begin(group);
}

/* Sets *out on success. After an error it frees the memory that begin allocated, and leaves out unchanged. */
static ddp_result ddp__tensor_output_end(ddp_group *group, ddp_tensor *out, ddp_tensor *target,
                                         ddp_result result) {
    if (result == DDP_OK) result = ddp_device_check(group);
    if (result != DDP_OK && target->data != out->data) ddp__tensor_device(group)->free(group, target->data);
    if (result == DDP_OK) *out = *target;
    return result;
}

/* One element of any dtype. */
typedef union ddp__tensor_element {
    int8_t i8;
    uint8_t u8;
    int32_t i32;
    int64_t i64;
    uint64_t u64;
    unsigned char bytes[8];
} ddp__tensor_element;

/* Sets an element of dtype to value. Errors: DDP_ERR_INVALID when an integer dtype cannot represent it. */
static ddp_result ddp__tensor_encode_value(const char *who, const ddp_group *group, ddp_dtype dtype,
                                           double value, ddp__tensor_element *out) {
    static const struct {
        double min, end;
    } range[] = {
        {-128, 128},
        {0, 256},
        {-2147483648.0, 2147483648.0},
        {-9223372036854775808.0, 9223372036854775808.0},
        {0, 18446744073709551616.0},
    }; /* from DDP_I8 */
    if (dtype >= DDP_I8
        && !(value >= range[dtype - DDP_I8].min && value < range[dtype - DDP_I8].end
             && trunc(value) == value))
        return ddp_fail_in(DDP_ERR_INVALID, who, group, "value=%.17g is not a value of %s", value,
                           ddp_dtype_name(dtype));
    switch (dtype) {
    case DDP_I8: out->i8 = (int8_t)value; break;
    case DDP_U8: out->u8 = (uint8_t)value; break;
    case DDP_I32: out->i32 = (int32_t)value; break;
    case DDP_I64: out->i64 = (int64_t)value; break;
    case DDP_U64: out->u64 = (uint64_t)value; break;
    default: ddp_device_cpu()->cast(out, dtype, &value, DDP_F64, 1);
    }
    return DDP_OK;
}

/* Writes one block of values, then copies what is written already, in pieces that stay in the cache:
       [block]  [block|block]  [block|block|block|block]  ... */
static void ddp__tensor_fill_encoded(ddp_group *group, const ddp_tensor *t, const unsigned char element[8]) {
    const ddp_device *device = ddp__tensor_device(group);
    size_t size = ddp_dtype_size(t->dtype), bytes = (size_t)ddp__tensor_bytes(t), written = 0, n;
    unsigned char block[4096], *data = (unsigned char *)t->data;
    int zero = 1;
    for (size_t i = 0; i < size; i++) zero &= element[i] == 0;
    if (zero) {
        if (bytes) device->fill_zero(data, bytes);
        return;
    }
    for (size_t i = 0; i < sizeof block; i += size) memcpy(block + i, element, size);
    for (; written < bytes; written += n) {
        n = written ? written : sizeof block;
        if (n > bytes - written) n = bytes - written;
        if (n > 262144 && device == ddp_device_cpu()) n = 262144;
        device->copy(data + written, written ? data : block, n);
    }
}

DDPDEF ddp_result ddp_tensor_create(ddp_group *group, ddp_tensor *out, ddp_dtype dtype, int ndim,
                                    const int64_t *shape) {
    if (!out) return DDP__TENSOR_INVALID(group, "out is NULL");
    return ddp__tensor_alloc(__func__, group, "out", out, dtype, ndim, shape);
}

DDPDEF void ddp_tensor_free(ddp_group *group, ddp_tensor *tensor) {
    if (!tensor) return;
    if (tensor->data) ddp_device_begin(group);
    ddp__tensor_device(group)->free(group, tensor->data);
    memset(tensor, 0, sizeof *tensor);
}

DDPDEF ddp_result ddp_tensor_view(const ddp_tensor *in, int ndim, const int64_t *shape, ddp_tensor *out) {
    ddp_tensor t = DDP_ZERO;
    ddp__tensor_text a, b;
    int64_t count, known;
    int inferred = -1;
    if (!out) return DDP__TENSOR_INVALID(NULL, "out is NULL");
    DDP_TRY(ddp__tensor_check(__func__, NULL, "in", in, 0));
    if (ndim < 0 || ndim > DDP_MAX_NDIM)
        return DDP__TENSOR_INVALID(NULL, "ndim=%d; use 0 to %d", ndim, DDP_MAX_NDIM);
    if (ndim && !shape) return DDP__TENSOR_INVALID(NULL, "shape is NULL");
    t.data = in->data;
    t.dtype = in->dtype;
    t.ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        t.shape[i] = shape[i];
        if (shape[i] != -1) continue;
        if (inferred >= 0)
            return DDP__TENSOR_INVALID(NULL, "shape[%d] and shape[%d] are both -1; use -1 once", inferred, i);
        inferred = i;
        t.shape[i] = 1;
    }
    count = ddp_tensor_count(in);
    known = ddp_tensor_count(&t);
    if (inferred >= 0 && known > 0 && count % known == 0) t.shape[inferred] = count / known;
    if (known < 0 || ddp_tensor_count(&t) != count || (inferred >= 0 && known == 0))
        return DDP__TENSOR_INVALID(NULL, "in is %s, and its %lld elements do not fill %s",
                                   ddp__tensor_shape(in->ndim, in->shape, &a), (long long)count,
                                   ddp__tensor_shape(ndim, shape, &b));
    *out = t;
    return DDP_OK;
}

DDPDEF ddp_result ddp_tensor_slice(const ddp_tensor *in, int dim, int64_t begin, int64_t end,
                                   ddp_tensor *out) {
    ddp__tensor_text text;
    size_t step;
    ddp_tensor t;
    if (!out) return DDP__TENSOR_INVALID(NULL, "out is NULL");
    DDP_TRY(ddp__tensor_check(__func__, NULL, "in", in, 0));
    ddp__tensor_shape(in->ndim, in->shape, &text);
    if (dim < 0 || dim >= in->ndim)
        return DDP__TENSOR_INVALID(NULL, "dim=%d is not a dimension of in, which is %s", dim, text.text);
    if (begin < 0 || end < begin || end > in->shape[dim])
        return DDP__TENSOR_INVALID(NULL, "entries [%lld, %lld) are outside dimension %d of in, which is %s",
                                   (long long)begin, (long long)end, dim, text.text);
    for (int i = 0; i < dim; i++)
        if (in->shape[i] != 1)
            return DDP__TENSOR_INVALID(
                NULL,
                "in is %s: a slice of dimension %d is not contiguous, since shape[%d] is "
                "not 1; use ddp_tensor_copy_box",
                text.text, dim, i);
    t = *in;
    step = ddp_dtype_size(in->dtype);
    for (int i = dim + 1; i < in->ndim; i++) step *= (size_t)in->shape[i];
    t.shape[dim] = end - begin;
    if (t.data) t.data = (char *)t.data + (size_t)begin * step;
    *out = t;
    return DDP_OK;
}

DDPDEF ddp_result ddp_tensor_fill(ddp_group *group, ddp_tensor *tensor, double value) {
    ddp__tensor_element element;
    DDP_TRY(ddp__tensor_check(__func__, group, "tensor", tensor, 1));
    DDP_TRY(ddp__tensor_encode_value(__func__, group, tensor->dtype, value, &element));
    DDP_TRY(ddp_device_begin(group));
    ddp__tensor_fill_encoded(group, tensor, element.bytes);
    return ddp_device_check(group);
}

DDPDEF ddp_result ddp_tensor_copy(ddp_group *group, const ddp_tensor *in, ddp_tensor *out) {
    const ddp_device *device = ddp__tensor_device(group);
    ddp_tensor t;
    DDP_TRY(ddp__tensor_check(__func__, group, "in", in, 1));
    if (!out) return DDP__TENSOR_INVALID(group, "out is NULL");
    if (out->dtype && out->dtype != in->dtype
        && (in->dtype >= DDP_I8 || (out->dtype >= DDP_I8 && out->dtype <= DDP_U64)))
        return DDP__TENSOR_INVALID(
            group, "in is %s and out is %s; a copy converts only between floating-point dtypes",
            ddp_dtype_name(in->dtype), ddp_dtype_name(out->dtype));
    DDP_TRY(ddp__tensor_output_begin(__func__, group, out, in->dtype, 1, in->ndim, in->shape, &t));
    if (ddp__tensor_overlap(in, &t)
        && (in->data != t.data || ddp_dtype_size(in->dtype) != ddp_dtype_size(t.dtype)))
        return DDP__TENSOR_INVALID(group, "in and out overlap; use separate memory");
    if (in->dtype != t.dtype)
        device->cast(t.data, t.dtype, in->data, in->dtype, (size_t)ddp_tensor_count(in));
    else if (t.data != in->data && ddp__tensor_bytes(in))
        device->copy(t.data, in->data, (size_t)ddp__tensor_bytes(in));
    return ddp__tensor_output_end(group, out, &t, DDP_OK);
}

//== boxes ========================================================================= >>impl-tensor-boxes
/* Strided copies: ddp_tensor_copy_box, ddp_tensor_transpose, and packing for collectives. */

/* A strided copy. For every index below the extents, run_bytes bytes are copied
       from   in  + index[0] * dim[0].in_stride  + index[1] * dim[1].in_stride  + ...
       to     out + index[0] * dim[0].out_stride + index[1] * dim[1].out_stride + ...
   Strides are bytes. Box of 2 x 3 elements of 4 bytes, from columns 1 to 3 of a 2 x 5 tensor to a 2 x 3 one:
       in   . a b c .      out  a b c      run_bytes = 12, dim[0] = {extent 2, in_stride 20, out_stride 12}
            . d e f .           d e f */
typedef struct ddp__tensor_dim {
    int64_t extent, in_stride, out_stride;
} ddp__tensor_dim;
typedef struct ddp__tensor_strided {
    int ndim;
    size_t run_bytes;
    ddp__tensor_dim dim[DDP_MAX_NDIM];
} ddp__tensor_strided;

static void ddp__tensor_strided_drop(ddp__tensor_strided *s, int i) {
    s->ndim--;
    memmove(&s->dim[i], &s->dim[i + 1], (size_t)(s->ndim - i) * sizeof s->dim[0]);
}

static void ddp__tensor_strided_swap(ddp__tensor_strided *s, int i, int j) {
    ddp__tensor_dim dim = s->dim[i];
    s->dim[i] = s->dim[j];
    s->dim[j] = dim;
}

/* Merges dimensions until runs are as long and dimensions as few as possible. Then sorts the two that matter
   for the cache: the last dimension has the smallest stride of out, the one before it the smallest stride of
   in among the others. */
static void ddp__tensor_strided_simplify(ddp__tensor_strided *s) {
    for (int i = 0; i < s->ndim; i++)
        if (s->dim[i].extent == 1) ddp__tensor_strided_drop(s, i--);
    for (int i = 0; i < s->ndim; i++)
        if (s->dim[i].in_stride == (int64_t)s->run_bytes && s->dim[i].out_stride == (int64_t)s->run_bytes) {
            s->run_bytes *= (size_t)s->dim[i].extent;
            ddp__tensor_strided_drop(s, i);
            i = -1;
        }
    for (int i = 0; i < s->ndim; i++)
        for (int j = 0; j < s->ndim; j++)
            if (i != j && s->dim[i].in_stride == s->dim[j].in_stride * s->dim[j].extent
                && s->dim[i].out_stride == s->dim[j].out_stride * s->dim[j].extent) {
                s->dim[j].extent *= s->dim[i].extent;
                ddp__tensor_strided_drop(s, i);
                i = j = 0;
            }
    for (int i = 0; i + 1 < s->ndim; i++)
        if (s->dim[i].out_stride < s->dim[s->ndim - 1].out_stride)
            ddp__tensor_strided_swap(s, i, s->ndim - 1);
    for (int i = 0; i + 2 < s->ndim; i++)
        if (s->dim[i].in_stride < s->dim[s->ndim - 2].in_stride) ddp__tensor_strided_swap(s, i, s->ndim - 2);
}

/* Copies the last two dimensions in tiles that fit in the cache. With short runs, one of the two sides moves
   to another cache line at each step; a tile uses each of these lines several times. */
static inline __attribute__((always_inline)) void
ddp__tensor_copy_tiles(const ddp__tensor_strided *s, const char *in, char *out, size_t size, int64_t tile) {
    static const ddp__tensor_dim none = {1, 0, 0};
    /* copies: the stores below could alias *w */
    const ddp__tensor_dim a = s->ndim > 1 ? s->dim[s->ndim - 2] : none;
    const ddp__tensor_dim b = s->ndim > 0 ? s->dim[s->ndim - 1] : none;
    for (int64_t i0 = 0; i0 < a.extent; i0 += tile)
        for (int64_t j0 = 0; j0 < b.extent; j0 += tile) {
            int64_t i_end = a.extent - i0 < tile ? a.extent : i0 + tile;
            int64_t columns = b.extent - j0 < tile ? b.extent - j0 : tile;
            for (int64_t i = i0; i < i_end; i++) {
                const char *from = in + i * a.in_stride + j0 * b.in_stride;
                char *to = out + i * a.out_stride + j0 * b.out_stride;
                for (int64_t j = 0; j < columns; j++, from += b.in_stride, to += b.out_stride)
                    memcpy(to, from, size);
            }
        }
}
static void ddp__tensor_copy_plane(const ddp__tensor_strided *s, const char *in, char *out) {
    switch (s->run_bytes) {
    case 1: ddp__tensor_copy_tiles(s, in, out, 1, 32); break;
    case 2: ddp__tensor_copy_tiles(s, in, out, 2, 32); break;
    case 4: ddp__tensor_copy_tiles(s, in, out, 4, 32); break;
    case 8: ddp__tensor_copy_tiles(s, in, out, 8, 16); break;
    default: ddp__tensor_copy_tiles(s, in, out, s->run_bytes, s->run_bytes < 64 ? 16 : (int64_t)1 << 40);
    }
}

/* Loops over all dimensions. by_plane: both sides are host memory, and the last two dimensions are copied
   together. Otherwise the device copies run by run. */
static void ddp__tensor_strided_copy_all(const ddp__tensor_strided *s, const ddp_device *device, int by_plane,
                                         const char *in, char *out) {
    int64_t index[DDP_MAX_NDIM] = {0};
    int outer = s->ndim;
    ddp_copy_list runs = DDP_ZERO;
    runs.device = device;
    if (by_plane) outer = s->ndim > 2 ? s->ndim - 2 : 0;
    for (int d = 0; d >= 0;) {
        if (by_plane)
            ddp__tensor_copy_plane(s, in, out);
        else
            ddp_copy_list_add(&runs, out, DDP_U8, in, DDP_U8, s->run_bytes);
        for (d = outer - 1; d >= 0; d--) {
            in += s->dim[d].in_stride;
            out += s->dim[d].out_stride;
            if (++index[d] < s->dim[d].extent) break;
            in -= index[d] * s->dim[d].in_stride;
            out -= index[d] * s->dim[d].out_stride;
            index[d] = 0;
        }
    }
    ddp_copy_list_end(&runs);
}

/* A device with memory of its own copies long runs itself. Short runs are copied to the host, rearranged
   there, and copied back. */
static ddp_result ddp__tensor_strided_copy(ddp_group *group, ddp__tensor_strided *s, const void *in,
                                           void *out) {
    const ddp_device *device = ddp__tensor_device(group);
    size_t in_span, out_span, moved;
    for (int i = 0; i < s->ndim; i++)
        if (s->dim[i].extent == 0) return DDP_OK;
    ddp__tensor_strided_simplify(s);
    if (device == ddp_device_cpu() || s->run_bytes >= 1024 || s->ndim == 0) {
        ddp__tensor_strided_copy_all(s, device, device == ddp_device_cpu(), (const char *)in, (char *)out);
        return DDP_OK;
    }
    in_span = out_span = moved = s->run_bytes;
    for (int i = 0; i < s->ndim; i++) {
        in_span += (size_t)((s->dim[i].extent - 1) * s->dim[i].in_stride);
        out_span += (size_t)((s->dim[i].extent - 1) * s->dim[i].out_stride);
        moved *= (size_t)s->dim[i].extent;
    }
    char *host = (char *)ddp_host_alloc(group, in_span + out_span);
    if (!host) return DDP_ERR_NO_MEMORY;
    device->copy(host, in, in_span);
    if (moved < out_span) device->copy(host + in_span, out, out_span);
    ddp__tensor_strided_copy_all(s, device, 1, host, host + in_span);
    device->copy(out, host + in_span, out_span);
    ddp_host_free(group, host);
    return DDP_OK;
}

/* Copies the box of shape `extent` from in_offset in `in` to out_offset in `out`; offsets NULL = 0. size:
   bytes of an element. */
static ddp_result ddp__tensor_copy_box(ddp_group *group, size_t size, int ndim, const int64_t *extent,
                                       const void *in, const int64_t *in_shape, const int64_t *in_offset,
                                       void *out, const int64_t *out_shape, const int64_t *out_offset) {
    ddp__tensor_strided s = DDP_ZERO;
    int64_t in_stride = (int64_t)size, out_stride = (int64_t)size;
    const char *from = (const char *)in;
    char *to = (char *)out;
    s.ndim = ndim;
    s.run_bytes = size;
    for (int i = 0; i < ndim; i++)
        if (extent[i] == 0) return DDP_OK; /* other entries may be of any size */
    for (int i = ndim - 1; i >= 0; i--) {
        s.dim[i].extent = extent[i];
        s.dim[i].in_stride = in_stride;
        s.dim[i].out_stride = out_stride;
        if (in_offset) from += in_offset[i] * in_stride;
        if (out_offset) to += out_offset[i] * out_stride;
        in_stride *= in_shape[i];
        out_stride *= out_shape[i];
    }
    return ddp__tensor_strided_copy(group, &s, from, to);
}

static ddp_result ddp__tensor_check_box(const char *who, const ddp_group *group, const char *name,
                                        const ddp_tensor *t, const int64_t *offset, const int64_t *extent) {
    static const int64_t zero[DDP_MAX_NDIM] = {0};
    ddp__tensor_text a, b, c;
    if (!offset) offset = zero;
    for (int i = 0; i < t->ndim; i++)
        if (extent[i] < 0 || offset[i] < 0 || offset[i] > t->shape[i] || extent[i] > t->shape[i] - offset[i])
            return ddp_fail_in(DDP_ERR_INVALID, who, group,
                               "the box of %s at offset %s is outside %s, which is %s",
                               ddp__tensor_shape(t->ndim, extent, &a), ddp__tensor_shape(t->ndim, offset, &b),
                               name, ddp__tensor_shape(t->ndim, t->shape, &c));
    return DDP_OK;
}

DDPDEF ddp_result ddp_tensor_copy_box(ddp_group *group, const ddp_tensor *in, const int64_t *in_offset,
                                      ddp_tensor *out, const int64_t *out_offset, const int64_t *extent) {
    DDP_TRY(ddp__tensor_check(__func__, group, "in", in, 1));
    DDP_TRY(ddp__tensor_check(__func__, group, "out", out, 1));
    DDP_TRY(ddp__tensor_check_same_type(__func__, group, in, out));
    if (in->ndim && !extent) return DDP__TENSOR_INVALID(group, "extent is NULL");
    DDP_TRY(ddp__tensor_check_box(__func__, group, "in", in, in_offset, extent));
    DDP_TRY(ddp__tensor_check_box(__func__, group, "out", out, out_offset, extent));
    if (ddp__tensor_overlap(in, out))
        return DDP__TENSOR_INVALID(group, "in and out overlap; use separate memory");
    DDP_TRY(ddp_device_begin(group));
    DDP_TRY(ddp__tensor_copy_box(group, ddp_dtype_size(in->dtype), in->ndim, extent, in->data, in->shape,
                                 in_offset, out->data, out->shape, out_offset));
    return ddp_device_check(group);
}

DDPDEF ddp_result ddp_tensor_transpose(ddp_group *group, const ddp_tensor *in, const int *order,
                                       ddp_tensor *out) {
    ddp__tensor_strided s = DDP_ZERO;
    ddp_tensor t;
    int64_t shape[DDP_MAX_NDIM], in_stride[DDP_MAX_NDIM], step;
    unsigned seen = 0;
    DDP_TRY(ddp__tensor_check(__func__, group, "in", in, 1));
    if (in->ndim && !order) return DDP__TENSOR_INVALID(group, "order is NULL");
    for (int i = 0; i < in->ndim; i++) {
        if (order[i] < 0 || order[i] >= in->ndim || seen >> order[i] & 1)
            return DDP__TENSOR_INVALID(group, "order[%d]=%d; use each dimension from 0 to %d once", i,
                                       order[i], in->ndim - 1);
        seen |= 1u << order[i];
        shape[i] = in->shape[order[i]];
    }
    DDP_TRY(ddp__tensor_output_begin(__func__, group, out, in->dtype, 0, in->ndim, shape, &t));
    if (ddp__tensor_overlap(in, &t))
        return DDP__TENSOR_INVALID(group, "in and out overlap; use separate memory");
    /* empty: its steps may exceed 63 bits */
    if (ddp__tensor_bytes(in) == 0) return ddp__tensor_output_end(group, out, &t, DDP_OK);
    s.ndim = in->ndim;
    s.run_bytes = ddp_dtype_size(in->dtype);
    step = (int64_t)s.run_bytes;
    for (int i = in->ndim - 1; i >= 0; i--) {
        in_stride[i] = step;
        step *= in->shape[i];
    }
    step = (int64_t)s.run_bytes;
    for (int i = in->ndim - 1; i >= 0; i--) {
        s.dim[i].extent = shape[i];
        s.dim[i].in_stride = in_stride[order[i]];
        s.dim[i].out_stride = step;
        step *= shape[i];
    }
    return ddp__tensor_output_end(group, out, &t, ddp__tensor_strided_copy(group, &s, in->data, t.data));
}

//== shards of each rank ========================================================== >>impl-tensor-layout
/* The box that a rank holds under a placement, or under a layout of several axes. Axes shard one after the
   other: each cuts the box that the axes before it have left. */

/* The dimension that a placement shards, or -1. */
static int ddp__tensor_shard_dim(ddp_placement placement) { return placement > 0 ? placement - 1 : -1; }

/* SHARD's rule: n entries are cut into pieces of ceil(n / world_size). Returns the length of rank's piece, 0
   if the ranks before it have all entries. *begin: its first entry.
       n = 5, 4 ranks:    rank 0 [0 1]   rank 1 [2 3]   rank 2 [4]   rank 3 [ ] */
static int64_t ddp__tensor_shard_range(int64_t n, int rank, int world_size, int64_t *begin) {
    int64_t size = n / world_size + (n % world_size != 0); /* ceil(n / world_size) */
    int64_t first = size && rank > n / size ? n : rank * size;
    if (begin) *begin = first;
    return size < n - first ? size : n - first;
}

/* Shards a box, which may already be sharded along other axes. */
static void ddp__tensor_box_shard(ddp_tensor_box *box, ddp_placement placement, int rank, int world_size) {
    int dim = ddp__tensor_shard_dim(placement);
    int64_t begin, length;
    if (dim < 0) return;
    length = ddp__tensor_shard_range(box->shape[dim], rank, world_size, &begin);
    box->offset[dim] += begin;
    box->shape[dim] = length;
}

static void ddp__tensor_box_full(ddp_tensor_box *box, int ndim, const int64_t *shape) {
    memset(box, 0, sizeof *box);
    box->ndim = ndim;
    for (int i = 0; i < ndim; i++) box->shape[i] = box->global_shape[i] = shape[i];
}

static ddp_result ddp__tensor_check_placement(const char *who, const ddp_group *group,
                                              ddp_placement placement, int ndim, const int64_t *shape) {
    ddp__tensor_text text;
    if (placement >= DDP_PARTIAL && placement <= ndim) return DDP_OK;
    return ddp_fail_in(DDP_ERR_INVALID, who, group, "%s is invalid for a tensor of shape %s",
                       ddp_placement_name(placement), ddp__tensor_shape(ndim, shape, &text));
}

DDPDEF const char *ddp_placement_name(ddp_placement placement) {
    static DDP__TENSOR_THREAD char texts[4][32];
    static DDP__TENSOR_THREAD unsigned next;
    char *text = texts[next++ % 4];
    if (placement == DDP_REPLICATE) return "REPLICATE";
    if (placement == DDP_PARTIAL) return "PARTIAL";
    if (placement > 0)
        snprintf(text, sizeof texts[0], "SHARD(%d)", (int)placement - 1);
    else
        snprintf(text, sizeof texts[0], "unknown placement (%d)", (int)placement);
    return text;
}

DDPDEF ddp_result ddp_placement_shard_box(ddp_placement placement, int ndim, const int64_t *global_shape,
                                          int rank, int world_size, ddp_tensor_box *box) {
    ddp_tensor full = DDP_ZERO;
    if (!box) return DDP__TENSOR_INVALID(NULL, "box is NULL");
    if (ndim < 0 || ndim > DDP_MAX_NDIM)
        return DDP__TENSOR_INVALID(NULL, "ndim=%d; use 0 to %d", ndim, DDP_MAX_NDIM);
    if (ndim && !global_shape) return DDP__TENSOR_INVALID(NULL, "global_shape is NULL");
    if (world_size < 1 || rank < 0 || rank >= world_size)
        return DDP__TENSOR_INVALID(NULL, "rank=%d with world_size=%d; use ranks 0 to world_size - 1", rank,
                                   world_size);
    full.dtype = DDP_U8;
    full.ndim = ndim;
    for (int i = 0; i < ndim; i++) full.shape[i] = global_shape[i];
    DDP_TRY(ddp__tensor_check(__func__, NULL, "the global tensor", &full, 0));
    DDP_TRY(ddp__tensor_check_placement(__func__, NULL, placement, ndim, global_shape));
    ddp__tensor_box_full(box, ndim, global_shape);
    ddp__tensor_box_shard(box, placement, rank, world_size);
    return DDP_OK;
}

static ddp_group *ddp__tensor_layout_group(const ddp_tensor_layout *layout) {
    return layout->axis_count > 0 ? layout->axes[0] : NULL;
}

static ddp_result ddp__tensor_check_layout(const char *who, const char *name,
                                           const ddp_tensor_layout *layout) {
    ddp_tensor full = DDP_ZERO;
    if (!layout) return ddp_fail_in(DDP_ERR_INVALID, who, NULL, "%s is NULL", name);
    if (layout->axis_count < 0 || layout->axis_count > DDP_MAX_NDIM)
        return ddp_fail_in(DDP_ERR_INVALID, who, NULL, "%s: axis_count=%d; use 0 to %d", name,
                           layout->axis_count, DDP_MAX_NDIM);
    for (int i = 0; i < layout->axis_count; i++) {
        if (!layout->axes[i]) return ddp_fail_in(DDP_ERR_INVALID, who, NULL, "%s: axes[%d] is NULL", name, i);
        for (int j = 0; j < i; j++)
            if (layout->axes[i] == layout->axes[j])
                return ddp_fail_in(DDP_ERR_INVALID, who, layout->axes[0],
                                   "%s: axes[%d] and axes[%d] are both group %s; use each group once", name,
                                   j, i, ddp_group_name(layout->axes[i]));
    }
    full.dtype = DDP_U8;
    full.ndim = layout->ndim;
    memcpy(full.shape, layout->shape, sizeof full.shape);
    DDP_TRY(ddp__tensor_check(who, ddp__tensor_layout_group(layout), name, &full, 0));
    for (int i = 0; i < layout->axis_count; i++)
        DDP_TRY(ddp__tensor_check_placement(who, layout->axes[0], layout->placement[i], layout->ndim,
                                            layout->shape));
    return DDP_OK;
}

/* The box of this rank if the axes had these placements instead of the layout's. skipped_axis is treated as
   REPLICATE; -1 = none. */
static void ddp__tensor_layout_shard(const ddp_tensor_layout *layout, const ddp_placement *placement,
                                     int skipped_axis, ddp_tensor_box *box) {
    ddp__tensor_box_full(box, layout->ndim, layout->shape);
    for (int i = 0; i < layout->axis_count; i++)
        if (i != skipped_axis)
            ddp__tensor_box_shard(box, placement[i], ddp_rank(layout->axes[i]),
                                  ddp_world_size(layout->axes[i]));
}

DDPDEF ddp_result ddp_tensor_layout_box(const ddp_tensor_layout *layout, ddp_tensor_box *box) {
    DDP_TRY(ddp__tensor_check_layout(__func__, "layout", layout));
    if (!box) return DDP__TENSOR_INVALID(ddp__tensor_layout_group(layout), "box is NULL");
    ddp__tensor_layout_shard(layout, layout->placement, -1, box);
    return DDP_OK;
}

//== redistribution: plan =========================================================== >>impl-tensor-plan
/* Chooses how one group converts a tensor from one placement to another: one collective, with blocks that are
   packed before it and unpacked after it. ddp__tensor_transfer is this plan. ddp_tensor_redistribute runs it
   once. ddp_tensor_redistribute_mesh runs one for each step along an axis.

   2 ranks, a 2 x 4 tensor with the rows a b c d and e f g h. [a b / e f] are two rows of a part:

     SHARD(1) -> REPLICATE    rank 0  [a b / e f]   all-gather   [a b e f | c d g h]   unpack   [a b c d]
     all-gather               rank 1  [c d / g h]                                               [e f g h]

     SHARD(1) -> SHARD(0)     rank 0  [a b / e f]   sends e f to rank 1, receives c d       [a b c d]
     all-to-all               rank 1  [c d / g h]   sends c d to rank 0, receives e f       [e f g h]

     PARTIAL -> SHARD(1)      both ranks have summands of all 8 elements:
     reduce-scatter             pack   [a b e f | c d g h]    rank 0 receives the sum of the first block

     PARTIAL -> REPLICATE     all-reduce of the full tensor, no packing

   A block is a rank's part of the tensor, stored contiguously. Collectives send and receive blocks in rank
   order. A tensor is already stored in this form if all dimensions before the sharded one have length 1.
   Where a collective needs blocks of equal size, they are padded with zeros: [0 1 2 | 3 4 -]. */

typedef struct ddp__tensor_transfer {
    const char *who;
    ddp_group *group;
    int rank, world_size, ndim;
    int may_communicate; /* the placements need messages: all ranks agree first, even on an error */
    int has_collective;  /* 0 = a local copy, or nothing: the tensor is empty */
    ddp_placement from, to;
    ddp_dtype dtype;
    size_t element_size; /* bytes */
    int64_t global[DDP_MAX_NDIM], in_shape[DDP_MAX_NDIM], out_shape[DDP_MAX_NDIM];
    ddp_call_kind collective;
    /* reduce-scatter, gather, scatter: length of each block along the sharded dimension, with padding */
    int64_t padded_entries;
    size_t pack_bytes, unpack_bytes; /* workspace for blocks; 0 = `in`, or `out`, is used in place */
    ddp_tensor_plan plan;
} ddp__tensor_transfer;

static int64_t ddp__tensor_shape_count(int ndim, const int64_t *shape) {
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) count *= shape[i];
    return count;
}

/* 1 = the shards along dim are contiguous blocks of the tensor. */
static int ddp__tensor_shards_adjacent(const int64_t *shape, int dim) {
    return ddp__tensor_shape_count(dim, shape) == 1;
}

/* Elements of rank's shard of a tensor along dim. */
static int64_t ddp__tensor_shard_count(int ndim, const int64_t *shape, int dim, int rank, int world_size) {
    int64_t count = ddp__tensor_shard_range(shape[dim], rank, world_size, NULL);
    for (int i = 0; i < ndim; i++)
        if (i != dim) count *= shape[i];
    return count;
}

/* packs: copies a tensor to its blocks along dim, in rank order; otherwise back. Only the last block that is
   not empty may be shorter, so blocks with padding start at the same offsets. */
static ddp_result ddp__tensor_copy_blocks(const ddp__tensor_transfer *tr, int packs, const int64_t *shape,
                                          int dim, void *tensor, void *blocks) {
    int64_t offset[DDP_MAX_NDIM] = {0}, extent[DDP_MAX_NDIM];
    char *block = (char *)blocks;
    memcpy(extent, shape, (size_t)tr->ndim * sizeof *extent);
    for (int r = 0; r < tr->world_size; r++) {
        extent[dim] = ddp__tensor_shard_range(shape[dim], r, tr->world_size, &offset[dim]);
        if (packs)
            DDP_TRY(ddp__tensor_copy_box(tr->group, tr->element_size, tr->ndim, extent, tensor, shape, offset,
                                         block, extent, NULL));
        else
            DDP_TRY(ddp__tensor_copy_box(tr->group, tr->element_size, tr->ndim, extent, block, extent, NULL,
                                         tensor, shape, offset));
        block += (size_t)ddp__tensor_shape_count(tr->ndim, extent) * tr->element_size;
    }
    return DDP_OK;
}

/* The box of the global tensor that this rank holds under a placement. */
static ddp_tensor_box ddp__tensor_local_box(const ddp__tensor_transfer *tr, ddp_placement placement) {
    ddp_tensor_box box;
    ddp__tensor_box_full(&box, tr->ndim, tr->global);
    ddp__tensor_box_shard(&box, placement, tr->rank, tr->world_size);
    return box;
}

/* Checks that `shape` is that of this rank's part under the placement. The error prints both shapes. */
static ddp_result ddp__tensor_transfer_check_shape(const ddp__tensor_transfer *tr, const char *name,
                                                   const int64_t *shape, ddp_placement placement) {
    ddp__tensor_text a, b, c;
    const ddp_tensor_box box = ddp__tensor_local_box(tr, placement);
    if (ddp__tensor_equal(tr->ndim, box.shape, shape)) return DDP_OK;
    return ddp_fail_in(DDP_ERR_INVALID, tr->who, tr->group, "%s is %s, but %s of %s on rank %d of %d is %s",
                       name, ddp__tensor_shape(tr->ndim, shape, &a), ddp_placement_name(placement),
                       ddp__tensor_shape(tr->ndim, tr->global, &b), tr->rank, tr->world_size,
                       ddp__tensor_shape(tr->ndim, box.shape, &c));
}

/* Chooses the cheapest collective between two different placements, and computes its workspace. sent:
   elements that this rank sends in a ring. All-gather sends all parts except the next rank's.
   Reduce-scatter sends all parts except this rank's. All-reduce is both. */
static ddp_result ddp__tensor_transfer_choose(ddp__tensor_transfer *tr) {
    int from_dim = ddp__tensor_shard_dim(tr->from), to_dim = ddp__tensor_shard_dim(tr->to),
        next = (tr->rank + 1) % tr->world_size;
    int64_t total = ddp__tensor_shape_count(tr->ndim, tr->global),
            in_count = ddp__tensor_shape_count(tr->ndim, tr->in_shape), sent, blocks;
    int even = from_dim < 0 || tr->global[from_dim] % tr->world_size == 0;
    tr->has_collective = 1;
    if (tr->from == DDP_PARTIAL && to_dim < 0) {
        tr->collective = DDP_CALL_ALL_REDUCE;
        sent = 2 * total - ddp__tensor_shard_count(1, &total, 0, tr->rank, tr->world_size)
               - ddp__tensor_shard_count(1, &total, 0, next, tr->world_size);
    } else if (tr->from == DDP_PARTIAL) {
        tr->collective = DDP_CALL_REDUCE_SCATTER;
        tr->padded_entries = tr->global[to_dim] / tr->world_size + (tr->global[to_dim] % tr->world_size != 0);
        if (__builtin_mul_overflow(total / tr->global[to_dim], tr->padded_entries, &sent)
            || __builtin_mul_overflow(sent, tr->world_size, &blocks)
            || __builtin_mul_overflow(blocks, (int64_t)tr->element_size, &blocks))
            return ddp_fail_in(DDP_ERR_INVALID, tr->who, tr->group,
                               "%d blocks of %lld elements do not fit in memory", tr->world_size,
                               (long long)sent);
        sent *= tr->world_size - 1;
        if (tr->global[to_dim] % tr->world_size || !ddp__tensor_shards_adjacent(tr->in_shape, to_dim))
            tr->pack_bytes = (size_t)blocks;
    } else if (to_dim < 0) {
        tr->collective = even ? DDP_CALL_ALL_GATHER : DDP_CALL_ALL_GATHER_V;
        sent = total - ddp__tensor_shard_count(tr->ndim, tr->global, from_dim, next, tr->world_size);
        if (!ddp__tensor_shards_adjacent(tr->global, from_dim))
            tr->unpack_bytes = (size_t)total * tr->element_size;
    } else {
        even = even && tr->global[to_dim] % tr->world_size == 0;
        tr->collective = even ? DDP_CALL_ALL_TO_ALL : DDP_CALL_ALL_TO_ALL_V;
        sent = in_count - ddp__tensor_shard_count(tr->ndim, tr->in_shape, to_dim, tr->rank, tr->world_size);
        if (!ddp__tensor_shards_adjacent(tr->in_shape, to_dim))
            tr->pack_bytes = (size_t)in_count * tr->element_size;
        if (!ddp__tensor_shards_adjacent(tr->out_shape, from_dim))
            tr->unpack_bytes = (size_t)ddp__tensor_shape_count(tr->ndim, tr->out_shape) * tr->element_size;
    }
    tr->pack_bytes = ddp_round_up(tr->pack_bytes, 64);
    tr->plan.collective = ddp_call_name(tr->collective);
    tr->plan.sent_bytes = (size_t)sent * tr->element_size;
    tr->plan.workspace_bytes = tr->pack_bytes + tr->unpack_bytes;
    if (tr->collective == DDP_CALL_ALL_GATHER_V || tr->collective == DDP_CALL_ALL_TO_ALL_V)
        tr->plan.workspace_bytes += 2 * (size_t)tr->world_size * sizeof(size_t);
    return DDP_OK;
}

static void ddp__tensor_transfer_init(ddp__tensor_transfer *tr, const char *who, ddp_group *group,
                                      ddp_placement from, ddp_placement to) {
    memset(tr, 0, sizeof *tr);
    tr->who = who;
    tr->group = group;
    tr->rank = group ? ddp_rank(group) : 0;
    tr->world_size = group ? ddp_world_size(group) : 1;
    tr->from = from;
    tr->to = to;
    tr->may_communicate = tr->world_size > 1 && from != to && from != DDP_REPLICATE && to != DDP_PARTIAL;
}

/* shape: global. The global tensor has the dtype and ndim of t. */
static void ddp__tensor_transfer_set_global(ddp__tensor_transfer *tr, const ddp_tensor *t,
                                            const int64_t *shape) {
    tr->dtype = t->dtype;
    tr->element_size = ddp_dtype_size(t->dtype);
    tr->ndim = t->ndim;
    memcpy(tr->global, shape, (size_t)t->ndim * sizeof *shape);
}

/* Checks the arguments of a conversion and plans it. global NULL: the global shape is derived from the
   shapes of in and out. */
static ddp_result ddp__tensor_transfer_prepare(ddp__tensor_transfer *tr, const char *who, ddp_group *group,
                                               const ddp_tensor *in, ddp_placement from, ddp_placement to,
                                               const ddp_tensor *out, const int64_t *global, int with_data) {
    ddp_tensor full, t;
    int from_dim = ddp__tensor_shard_dim(from);
    ddp__tensor_transfer_init(tr, who, group, from, to);
    if (!group) return ddp_fail_in(DDP_ERR_INVALID, who, NULL, "group is NULL");
    DDP_TRY(ddp__tensor_check(who, group, "in", in, with_data));
    if (!out) return ddp_fail_in(DDP_ERR_INVALID, who, group, "out is NULL");
    t = *out;
    if (!t.dtype) t.dtype = in->dtype;
    DDP_TRY(ddp__tensor_check(who, group, "out", &t, 0));
    DDP_TRY(ddp__tensor_check_same_type(who, group, in, &t));
    DDP_TRY(ddp__tensor_check_placement(who, group, from, in->ndim, in->shape));
    DDP_TRY(ddp__tensor_check_placement(who, group, to, in->ndim, in->shape));
    ddp__tensor_transfer_set_global(tr, in, global ? global : in->shape);
    memcpy(tr->in_shape, in->shape, sizeof tr->in_shape);
    memcpy(tr->out_shape, t.shape, sizeof tr->out_shape);
    if (from_dim >= 0 && from != to && !global) tr->global[from_dim] = t.shape[from_dim];
    full = t;
    memcpy(full.shape, tr->global, sizeof full.shape);
    DDP_TRY(ddp__tensor_check(who, group, "the global tensor", &full, 0));
    if (from != to || global) {
        DDP_TRY(ddp__tensor_transfer_check_shape(tr, "in", tr->in_shape, from));
        DDP_TRY(ddp__tensor_transfer_check_shape(tr, "out", tr->out_shape, to));
    } else {
        ddp__tensor_text x, y;
        if (!ddp__tensor_equal(tr->ndim, tr->in_shape, tr->out_shape))
            return ddp_fail_in(DDP_ERR_INVALID, who, group,
                               "in is %s and out is %s, both with placement %s; give both the same shape",
                               ddp__tensor_shape(tr->ndim, tr->in_shape, &x),
                               ddp__tensor_shape(tr->ndim, tr->out_shape, &y), ddp_placement_name(from));
    }
    tr->plan.collective = (from == to || tr->world_size == 1) && in->data && in->data == t.data ? "none"
                                                                                                : "copy";
    if (ddp__tensor_bytes(&full) == 0)
        tr->plan.collective = "none";
    else if (tr->may_communicate)
        DDP_TRY(ddp__tensor_transfer_choose(tr));
    if (with_data && t.data && ddp__tensor_overlap(in, &t)
        && (in->data != t.data
            || !(from == to || tr->world_size == 1
                 || (tr->has_collective && tr->collective == DDP_CALL_ALL_REDUCE))))
        return ddp_fail_in(DDP_ERR_INVALID, who, group,
                           "in and out overlap, but %s to %s has no in-place form; use separate memory",
                           ddp_placement_name(from), ddp_placement_name(to));
    return DDP_OK;
}

//== redistribution: execution ======================================================= >>impl-tensor-run
/* Runs a ddp__tensor_transfer: pack, collective, unpack; or only a copy. ddp_tensor_redistribute and
   ddp_tensor_shard. All ranks agree on the conversion before the first message, so an error of one rank is
   returned on all. */

/* A conversion that sends nothing:
     same placement, or one rank   copy
     REPLICATE -> SHARD            copy this rank's box
     REPLICATE -> PARTIAL          rank 0 copies, the other ranks write zeros
     SHARD -> PARTIAL              write zeros, then copy this rank's part to its box */
static ddp_result ddp__tensor_transfer_local(const ddp__tensor_transfer *tr, const ddp_tensor *in,
                                             ddp_tensor *out) {
    const ddp_device *device = ddp__tensor_device(tr->group);
    size_t out_bytes = (size_t)ddp__tensor_bytes(out);
    if (tr->from == tr->to || tr->world_size == 1
        || (tr->from == DDP_REPLICATE && tr->to == DDP_PARTIAL && tr->rank == 0)) {
        if (out_bytes && in->data != out->data) device->copy(out->data, in->data, out_bytes);
        return DDP_OK;
    }
    if (tr->to == DDP_PARTIAL && out_bytes) device->fill_zero(out->data, out_bytes);
    if (tr->from == DDP_REPLICATE && tr->to == DDP_PARTIAL) return DDP_OK;
    const ddp_tensor_box box = ddp__tensor_local_box(tr, tr->from == DDP_REPLICATE ? tr->to : tr->from);
    return ddp__tensor_copy_box(tr->group, tr->element_size, tr->ndim, box.shape, in->data, in->shape,
                                tr->from == DDP_REPLICATE ? box.offset : NULL, out->data, out->shape,
                                tr->from == DDP_REPLICATE ? NULL : box.offset);
}

/* counts[r] = elements of rank r's block along dim. */
static void ddp__tensor_block_counts(const ddp__tensor_transfer *tr, const int64_t *shape, int dim,
                                     size_t *counts) {
    for (int r = 0; r < tr->world_size; r++)
        counts[r] = (size_t)ddp__tensor_shard_count(tr->ndim, shape, dim, r, tr->world_size);
}

/* send and recv contain blocks in rank order. counts: memory for two numbers per rank. */
static ddp_result ddp__tensor_transfer_collective(const ddp__tensor_transfer *tr, const void *send,
                                                  void *recv, size_t *counts) {
    int from_dim = ddp__tensor_shard_dim(tr->from), to_dim = ddp__tensor_shard_dim(tr->to);
    size_t count = (size_t)ddp__tensor_shape_count(tr->ndim, tr->in_shape);
    switch (tr->collective) {
    case DDP_CALL_ALL_REDUCE:
        return ddp_all_reduce(tr->group, send, recv, count, tr->dtype, DDP_OP_SUM, NULL);
    case DDP_CALL_REDUCE_SCATTER:
        count = count / (size_t)tr->global[to_dim] * (size_t)tr->padded_entries;
        return ddp_reduce_scatter(tr->group, send, recv, count, tr->dtype, DDP_OP_SUM, NULL);
    case DDP_CALL_ALL_GATHER: return ddp_all_gather(tr->group, send, recv, count, tr->dtype, NULL);
    case DDP_CALL_ALL_GATHER_V:
        ddp__tensor_block_counts(tr, tr->global, from_dim, counts);
        return ddp_all_gather_v(tr->group, send, count, recv, counts, NULL, tr->dtype, NULL);
    case DDP_CALL_ALL_TO_ALL:
        return ddp_all_to_all(tr->group, send, recv, count / (size_t)tr->world_size, tr->dtype, NULL);
    default:
        ddp__tensor_block_counts(tr, tr->in_shape, to_dim, counts);
        ddp__tensor_block_counts(tr, tr->out_shape, from_dim, counts + tr->world_size);
        return ddp_all_to_all_v(tr->group, send, counts, NULL, recv, counts + tr->world_size, NULL, tr->dtype,
                                NULL);
    }
}

static ddp_result ddp__tensor_transfer_exchange(const ddp__tensor_transfer *tr, const ddp_tensor *in,
                                                ddp_tensor *out, char *workspace, size_t *counts) {
    int from_dim = ddp__tensor_shard_dim(tr->from), to_dim = ddp__tensor_shard_dim(tr->to);
    size_t out_bytes = (size_t)ddp__tensor_bytes(out);
    const void *send = tr->pack_bytes ? workspace : in->data;
    void *recv = tr->unpack_bytes ? workspace + tr->pack_bytes : out->data;
    if (tr->pack_bytes) DDP_TRY(ddp__tensor_copy_blocks(tr, 1, tr->in_shape, to_dim, in->data, workspace));
    if (tr->padded_entries && tr->global[to_dim] % tr->world_size) /* received with its padding */
        recv = workspace
               + (size_t)(ddp__tensor_shape_count(tr->ndim, tr->global) / tr->global[to_dim]
                          * tr->padded_entries * tr->rank)
                     * tr->element_size;
    DDP_TRY(ddp__tensor_transfer_collective(tr, send, recv, counts));
    if (tr->unpack_bytes)
        DDP_TRY(ddp__tensor_copy_blocks(tr, 0, tr->out_shape, from_dim, out->data, recv));
    else if (recv != out->data && out_bytes)
        ddp__tensor_device(tr->group)->copy(out->data, recv, out_bytes);
    return DDP_OK;
}

/* Compares the conversion on all ranks. After an error of one rank, or DDP_ERR_MISMATCH, all ranks return an
   error. root: -1 if it has none. */
static ddp_result ddp__tensor_transfer_agree(const ddp__tensor_transfer *tr, int root, ddp_result result) {
    int64_t values[5 + DDP_MAX_NDIM] = {root, tr->from, tr->to, (int64_t)tr->dtype, tr->ndim};
    ddp__tensor_text shape;
    const char *to = ddp_placement_name(tr->to), *dtype = ddp_dtype_name(tr->dtype);
    char description[300];
    memcpy(values + 5, tr->global, sizeof tr->global);
    ddp__tensor_shape(tr->ndim, tr->global, &shape);
    if (root < 0)
        snprintf(description, sizeof description, "%s to %s of %s %s", ddp_placement_name(tr->from), to,
                 dtype, shape.text);
    else
        snprintf(description, sizeof description, "%s of %s %s root=%d", to, dtype, shape.text, root);
    return ddp_agree(tr->group, tr->who, result, ddp_hash(DDP_HASH_SEED, values, sizeof values), description);
}

/* result: this rank's error before this call, or DDP_OK. Memory is allocated before the ranks agree, so that
   a rank without memory is an error on all. */
static ddp_result ddp__tensor_transfer_run(const ddp__tensor_transfer *tr, const ddp_tensor *in,
                                           ddp_tensor *out, ddp_result result) {
    size_t *counts = NULL, blocks_bytes = tr->pack_bytes + tr->unpack_bytes;
    void *workspace = NULL;
    if (result == DDP_OK && tr->has_collective && tr->plan.workspace_bytes > blocks_bytes) {
        counts = (size_t *)ddp_host_alloc(tr->group, 2 * (size_t)tr->world_size * sizeof *counts);
        if (!counts) result = DDP_ERR_NO_MEMORY;
    }
    if (result == DDP_OK && tr->has_collective && blocks_bytes)
        result = ddp__tensor_device(tr->group)->alloc(tr->group, blocks_bytes, &workspace);
    if (tr->may_communicate) {
        result = ddp__tensor_transfer_agree(tr, -1, result);
        if (result == DDP_OK) result = ddp_device_begin(tr->group);
    }
    if (result == DDP_OK)
        result = tr->has_collective ? ddp__tensor_transfer_exchange(tr, in, out, (char *)workspace, counts)
                                    : ddp__tensor_transfer_local(tr, in, out);
    ddp__tensor_device(tr->group)->free(tr->group, workspace);
    if (counts) ddp_host_free(tr->group, counts);
    return result;
}

DDPDEF ddp_result ddp_tensor_redistribute_plan(ddp_group *group, const ddp_tensor *in, ddp_placement from,
                                               ddp_placement to, const ddp_tensor *out,
                                               ddp_tensor_plan *plan) {
    ddp__tensor_transfer tr;
    if (!plan) return DDP__TENSOR_INVALID(group, "plan is NULL");
    DDP_TRY(ddp__tensor_transfer_prepare(&tr, __func__, group, in, from, to, out, NULL, 0));
    *plan = tr.plan;
    return DDP_OK;
}

DDPDEF ddp_result ddp_tensor_redistribute(ddp_group *group, const ddp_tensor *in, ddp_placement from,
                                          ddp_placement to, ddp_tensor *out) {
    DDP_PUBLIC_CALL(ddp_tensor_redistribute);
    ddp__tensor_transfer tr;
    ddp_tensor t = DDP_ZERO;
    ddp_result result = ddp__tensor_transfer_prepare(&tr, __func__, group, in, from, to, out, NULL, 1);
    if (result == DDP_OK)
        result = ddp__tensor_output_begin(__func__, group, out, in->dtype, 0, out->ndim, out->shape, &t);
    result = ddp__tensor_transfer_run(&tr, in, &t, result);
    return out ? ddp__tensor_output_end(group, out, &t, result) : result;
}

DDPDEF ddp_result ddp_tensor_shard(ddp_group *group, const ddp_tensor *whole, ddp_placement to,
                                   ddp_tensor *out) {
    ddp__tensor_transfer tr;
    ddp_tensor t;
    DDP_TRY(ddp__tensor_check(__func__, group, "whole", whole, 1));
    DDP_TRY(ddp__tensor_check_placement(__func__, group, to, whole->ndim, whole->shape));
    ddp__tensor_transfer_init(&tr, __func__, group, DDP_REPLICATE, to);
    ddp__tensor_transfer_set_global(&tr, whole, whole->shape);
    DDP_TRY(ddp__tensor_output_begin(__func__, group, out, whole->dtype, 0, tr.ndim,
                                     ddp__tensor_local_box(&tr, to).shape, &t));
    if (ddp__tensor_overlap(whole, &t))
        return DDP__TENSOR_INVALID(group, "whole and out overlap; use separate memory");
    return ddp__tensor_output_end(group, out, &t, ddp__tensor_transfer_local(&tr, whole, &t));
}

//== distribute and gather ========================================================== >>impl-tensor-root
/* ddp_tensor_distribute sends the parts of root's full tensor to all ranks; ddp_tensor_gather is the inverse.
   Both use a ddp__tensor_transfer from REPLICATE (root's tensor) to the placement of the parts.

     placement   distribute                            gather
     SHARD       ddp_scatter, blocks of equal size     ddp_gather, blocks of equal size
     REPLICATE   ddp_broadcast                         root copies its own part
     PARTIAL     root copies, the others write zeros   ddp_reduce */

/* Scatters or gathers equal blocks of padded_entries entries along the sharded dimension. A short part is
   padded in workspace. Root packs or unpacks its full tensor there. */
static ddp_result ddp__tensor_root_exchange_shards(const ddp__tensor_transfer *tr, int root, int gathers,
                                                   ddp_tensor *whole, ddp_tensor *part, char *workspace) {
    const ddp_device *device = ddp__tensor_device(tr->group);
    const int dim = ddp__tensor_shard_dim(tr->to), packed = tr->rank == root && tr->pack_bytes;
    const int64_t entry_count = ddp__tensor_shape_count(tr->ndim, tr->global) / tr->global[dim];
    const size_t block_count = (size_t)(entry_count * tr->padded_entries);
    const size_t part_bytes = (size_t)ddp__tensor_bytes(part);
    const int padded = part_bytes < block_count * tr->element_size;
    char *block = (char *)part->data; /* of this rank */
    char *blocks = NULL;              /* of all ranks, on root */
    if (tr->rank == root) blocks = packed ? workspace : (char *)whole->data;
    if (padded) block = packed ? blocks + (size_t)tr->rank * block_count * tr->element_size : workspace;
    if (gathers) {
        if (padded && part_bytes) device->copy(block, part->data, part_bytes);
        DDP_TRY(ddp_gather(tr->group, block, blocks, block_count, tr->dtype, root, NULL));
        return packed ? ddp__tensor_copy_blocks(tr, 0, tr->global, dim, whole->data, workspace) : DDP_OK;
    }
    if (packed) DDP_TRY(ddp__tensor_copy_blocks(tr, 1, tr->global, dim, whole->data, workspace));
    DDP_TRY(ddp_scatter(tr->group, blocks, block, block_count, tr->dtype, root, NULL));
    if (padded && part_bytes) device->copy(part->data, block, part_bytes);
    return DDP_OK;
}

static ddp_result ddp__tensor_root_exchange(const ddp__tensor_transfer *tr, int root, int gathers,
                                            ddp_tensor *whole, ddp_tensor *part, char *workspace) {
    const ddp_device *device = ddp__tensor_device(tr->group);
    ddp_tensor *from = gathers ? part : whole;
    ddp_tensor *to = gathers ? whole : part;
    size_t count = (size_t)ddp__tensor_shape_count(tr->ndim, tr->global), bytes = count * tr->element_size;
    if (bytes == 0) return DDP_OK;
    if (tr->to > 0 && tr->world_size > 1)
        return ddp__tensor_root_exchange_shards(tr, root, gathers, whole, part, workspace);
    if (tr->to == DDP_PARTIAL && gathers && tr->world_size > 1)
        return ddp_reduce(tr->group, part->data, whole->data, count, tr->dtype, DDP_OP_SUM, root, NULL);
    if (tr->rank == root && from->data != to->data) device->copy(to->data, from->data, bytes);
    if (tr->to == DDP_PARTIAL && tr->rank != root) device->fill_zero(part->data, bytes);
    return tr->to == DDP_REPLICATE && !gathers && tr->world_size > 1
               ? ddp_broadcast(tr->group, part->data, count, tr->dtype, root, NULL)
               : DDP_OK;
}

/* Computes the size of blocks and workspace. Errors: DDP_ERR_INVALID when they do not fit in memory. */
static ddp_result ddp__tensor_root_block_sizes(ddp__tensor_transfer *tr, int root) {
    int dim = ddp__tensor_shard_dim(tr->to);
    int64_t bytes, length;
    if (dim < 0 || tr->world_size == 1 || ddp__tensor_shape_count(tr->ndim, tr->global) == 0) return DDP_OK;
    tr->padded_entries = tr->global[dim] / tr->world_size + (tr->global[dim] % tr->world_size != 0);
    length = ddp__tensor_shard_range(tr->global[dim], tr->rank, tr->world_size, NULL);
    if (__builtin_mul_overflow(ddp__tensor_shape_count(tr->ndim, tr->global) / tr->global[dim]
                                   * (int64_t)tr->element_size,
                               tr->padded_entries, &bytes)
        || __builtin_mul_overflow(bytes, (int64_t)(tr->rank == root ? tr->world_size : 1), &bytes))
        return ddp_fail_in(DDP_ERR_INVALID, tr->who, tr->group,
                           "%d blocks of %lld elements do not fit in memory", tr->world_size,
                           (long long)tr->padded_entries);
    int packs = length < tr->padded_entries; /* a part with padding */
    if (tr->rank == root)
        packs = tr->global[dim] % tr->world_size || !ddp__tensor_shards_adjacent(tr->global, dim);
    if (packs) tr->pack_bytes = (size_t)bytes;
    return DDP_OK;
}

/* result: this rank's error before this call, or DDP_OK. All ranks agree before the first message. */
static ddp_result ddp__tensor_root_run(ddp__tensor_transfer *tr, int root, int gathers, ddp_tensor *whole,
                                       ddp_tensor *part, ddp_result result) {
    void *workspace = NULL;
    if (result == DDP_OK) result = ddp__tensor_root_block_sizes(tr, root);
    if (result == DDP_OK && tr->pack_bytes)
        result = ddp__tensor_device(tr->group)->alloc(tr->group, tr->pack_bytes, &workspace);
    result = ddp__tensor_transfer_agree(tr, root, result);
    if (result == DDP_OK) result = ddp_device_begin(tr->group);
    if (result == DDP_OK)
        result = ddp__tensor_root_exchange(tr, root, gathers, whole, part, (char *)workspace);
    ddp__tensor_device(tr->group)->free(tr->group, workspace);
    return result;
}

DDPDEF ddp_result ddp_tensor_distribute(ddp_group *group, const ddp_tensor *whole, int root, ddp_placement to,
                                        ddp_tensor *out) {
    DDP_PUBLIC_CALL(ddp_tensor_distribute);
    ddp_result result = DDP_OK;
    char description[32];
    ddp__tensor_transfer tr;
    /* source: root's whole tensor; dtype, ndim and shape on every rank */
    ddp_tensor t = DDP_ZERO, source = DDP_ZERO;
    if (!group) return DDP__TENSOR_INVALID(NULL, "group is NULL");
    if (root < 0 || root >= ddp_world_size(group))
        return DDP__TENSOR_INVALID(group, "root=%d; use ranks 0 to %d", root, ddp_world_size(group) - 1);
    ddp__tensor_transfer_init(&tr, __func__, group, DDP_REPLICATE, to);
    if (tr.rank == root) result = ddp__tensor_check(__func__, group, "whole", whole, 1);
    if (tr.rank == root && result == DDP_OK) {
        result = ddp__tensor_check_placement(__func__, group, to, whole->ndim, whole->shape);
        source = *whole;
    }
    snprintf(description, sizeof description, "root=%d", root);
    DDP_TRY(ddp_agree(group, __func__, result, (uint64_t)root, description));
    DDP_TRY(ddp_host_collective(group, DDP_CALL_BROADCAST, &source, &source, sizeof source, DDP_U8,
                                DDP_OP_SUM, root));
    ddp__tensor_transfer_set_global(&tr, &source, source.shape);
    result = ddp__tensor_check_placement(__func__, group, to, tr.ndim, tr.global);
    if (result == DDP_OK)
        result = ddp__tensor_output_begin(__func__, group, out, tr.dtype, 0, tr.ndim,
                                          ddp__tensor_local_box(&tr, to).shape, &t);
    if (result == DDP_OK && tr.rank == root && ddp__tensor_overlap(&source, &t)
        && (to > 0 || source.data != t.data))
        result = DDP__TENSOR_INVALID(group, "whole and out overlap; use separate memory");
    result = ddp__tensor_root_run(&tr, root, 0, &source, &t, result);
    return out ? ddp__tensor_output_end(group, out, &t, result) : result;
}

/* Checks the arguments of ddp_tensor_gather on this rank. *whole: the full tensor, only on root. */
static ddp_result ddp__tensor_gather_prepare(ddp__tensor_transfer *tr, const char *who, ddp_group *group,
                                             const ddp_tensor *in, ddp_placement from,
                                             const int64_t *global_shape, int root, const ddp_tensor *out,
                                             ddp_tensor *whole) {
    ddp_tensor t;
    ddp__tensor_transfer_init(tr, who, group, DDP_REPLICATE, from);
    DDP_TRY(ddp__tensor_check(who, group, "in", in, 1));
    if (in->ndim && !global_shape) return ddp_fail_in(DDP_ERR_INVALID, who, group, "global_shape is NULL");
    t = *in;
    if (in->ndim) memcpy(t.shape, global_shape, (size_t)in->ndim * sizeof *global_shape);
    DDP_TRY(ddp__tensor_check(who, group, "the global tensor", &t, 0));
    DDP_TRY(ddp__tensor_check_placement(who, group, from, t.ndim, t.shape));
    ddp__tensor_transfer_set_global(tr, &t, t.shape);
    DDP_TRY(ddp__tensor_transfer_check_shape(tr, "in", in->shape, from));
    if (tr->rank != root) return DDP_OK;
    DDP_TRY(ddp__tensor_output_begin(who, group, out, tr->dtype, 0, tr->ndim, tr->global, whole));
    if (!ddp__tensor_overlap(in, whole) || (from <= 0 && in->data == whole->data)) return DDP_OK;
    return ddp_fail_in(DDP_ERR_INVALID, who, group, "in and out overlap; use separate memory");
}

DDPDEF ddp_result ddp_tensor_gather(ddp_group *group, const ddp_tensor *in, ddp_placement from,
                                    const int64_t *global_shape, int root, ddp_tensor *out) {
    DDP_PUBLIC_CALL(ddp_tensor_gather);
    ddp__tensor_transfer tr;
    ddp_tensor t = DDP_ZERO, part = DDP_ZERO;
    ddp_result result;
    if (!group) return DDP__TENSOR_INVALID(NULL, "group is NULL");
    if (root < 0 || root >= ddp_world_size(group))
        return DDP__TENSOR_INVALID(group, "root=%d; use ranks 0 to %d", root, ddp_world_size(group) - 1);
    result = ddp__tensor_gather_prepare(&tr, __func__, group, in, from, global_shape, root, out, &t);
    if (in) part = *in;
    result = ddp__tensor_root_run(&tr, root, 1, &t, &part, result);
    if (ddp_rank(group) == root && out) return ddp__tensor_output_end(group, out, &t, result);
    return result == DDP_OK ? ddp_device_check(group) : result;
}

//== redistribution over a mesh ===================================================== >>impl-tensor-mesh
/* ddp_tensor_redistribute_mesh: converts between two layouts by steps, each of which changes the placement
   along one axis and is a ddp__tensor_transfer in that axis' group. Example on 2 x 2 ranks, from (SHARD(0),
   SHARD(0)) to (REPLICATE, SHARD(0)), with row blocks 0 to 3:

     rank (i, j)    (0,0)  (0,1)  (1,0)  (1,1)
     start            0      1      2      3      axis 1 shards the rows that axis 0 has left
     axis 1 gather   0 1    0 1    2 3    2 3     the inner axis first: it cuts axis 0's pieces
     axis 0 gather   0..3   0..3   0..3   0..3
     axis 1 shard    0 1    2 3    0 1    2 3     sends nothing */

typedef struct ddp__tensor_mesh_plan {
    const ddp_tensor_layout *layout;
    ddp_placement current[DDP_MAX_NDIM], to[DDP_MAX_NDIM];
    int count;
    struct {
        int axis;
        ddp_placement from, to;
    } step[8 * DDP_MAX_NDIM];
} ddp__tensor_mesh_plan;

static void ddp__tensor_mesh_plan_append(ddp__tensor_mesh_plan *mesh, int axis, ddp_placement to) {
    mesh->step[mesh->count].axis = axis;
    mesh->step[mesh->count].from = mesh->current[axis];
    mesh->step[mesh->count++].to = mesh->current[axis] = to;
}

/* Appends the conversion of one axis. Inner axes that shard the old or the new dimension of this axis are
   gathered first, innermost first: their pieces depend on this axis' piece. */
static void ddp__tensor_mesh_plan_convert(ddp__tensor_mesh_plan *mesh, int axis, ddp_placement to) {
    ddp_placement from = mesh->current[axis];
    for (int i = mesh->layout->axis_count - 1; i > axis; i--)
        if (mesh->current[i] > 0 && (mesh->current[i] == from || mesh->current[i] == to))
            ddp__tensor_mesh_plan_append(mesh, i, DDP_REPLICATE);
    ddp__tensor_mesh_plan_append(mesh, axis, to);
}

/* 1 = an outer axis has a later step that would have to gather what this axis shards now. */
static int ddp__tensor_mesh_shard_too_early(const ddp__tensor_mesh_plan *mesh, int axis, ddp_placement to) {
    for (int i = 0; i < axis; i++)
        if (mesh->current[i] != mesh->to[i] && (mesh->current[i] == to || mesh->to[i] == to)) return 1;
    return 0;
}

/* Plans the steps in this order:
     1  REPLICATE -> SHARD: sends nothing, and makes later steps smaller
     2  PARTIAL -> other: sums, innermost axis first
     3  all other conversions, outermost axis first. An axis that was gathered for an outer one is sharded
        again when its turn comes
   At most 48 steps for 8 axes: each gather undoes one sharding, and an axis is sharded at most three
   times. */
static void ddp__tensor_mesh_plan_make(ddp__tensor_mesh_plan *mesh, const ddp_tensor_layout *from,
                                       const ddp_tensor_layout *to) {
    int n = from->axis_count;
    memset(mesh, 0, sizeof *mesh);
    mesh->layout = from;
    for (int i = 0; i < n; i++)
        if (ddp_world_size(from->axes[i]) > 1) {
            mesh->current[i] = from->placement[i];
            mesh->to[i] = to->placement[i];
        }
    for (int i = 0; i < n; i++) {
        int inside = 0;
        for (int j = i + 1; j < n; j++) inside |= mesh->current[j] == mesh->to[i];
        if (mesh->current[i] == DDP_REPLICATE && mesh->to[i] > 0 && !inside
            && !ddp__tensor_mesh_shard_too_early(mesh, i, mesh->to[i]))
            ddp__tensor_mesh_plan_append(mesh, i, mesh->to[i]);
    }
    for (int i = n - 1; i >= 0; i--)
        if (mesh->current[i] == DDP_PARTIAL && mesh->to[i] != DDP_PARTIAL)
            ddp__tensor_mesh_plan_convert(
                mesh, i,
                mesh->to[i] > 0 && ddp__tensor_mesh_shard_too_early(mesh, i, mesh->to[i]) ? DDP_REPLICATE
                                                                                          : mesh->to[i]);
    for (int i = 0; i < n; i++)
        if (mesh->current[i] != mesh->to[i]) ddp__tensor_mesh_plan_convert(mesh, i, mesh->to[i]);
    for (int i = 0; i < n; i++)
        mesh->current[i] = ddp_world_size(from->axes[i]) > 1 ? from->placement[i] : DDP_REPLICATE;
}

static ddp_result ddp__tensor_check_layouts(const char *who, const ddp_tensor_layout *from,
                                            const ddp_tensor_layout *to) {
    ddp__tensor_text a, b;
    ddp_group *group;
    DDP_TRY(ddp__tensor_check_layout(who, "from", from));
    DDP_TRY(ddp__tensor_check_layout(who, "to", to));
    group = ddp__tensor_layout_group(from);
    if (from->ndim != to->ndim || !ddp__tensor_equal(from->ndim, from->shape, to->shape))
        return ddp_fail_in(
            DDP_ERR_INVALID, who, group, "from->shape is %s, but to->shape is %s; give both the same",
            ddp__tensor_shape(from->ndim, from->shape, &a), ddp__tensor_shape(to->ndim, to->shape, &b));
    if (from->axis_count != to->axis_count)
        return ddp_fail_in(DDP_ERR_INVALID, who, group,
                           "from->axis_count=%d, but to->axis_count=%d; give both the same", from->axis_count,
                           to->axis_count);
    for (int i = 0; i < from->axis_count; i++)
        if (from->axes[i] != to->axes[i])
            return ddp_fail_in(DDP_ERR_INVALID, who, group,
                               "axes[%d] is group %s in from, but group %s in to; give both the same", i,
                               ddp_group_name(from->axes[i]), ddp_group_name(to->axes[i]));
    return DDP_OK;
}

/* Runs one step from tensor `current` to tensor `next`, and sets the shape of next. runs 0: only adds the
   step to *plan. result: this rank's error before this step; the ranks of the axis agree on it. */
static ddp_result ddp__tensor_mesh_step(ddp__tensor_mesh_plan *mesh, const char *who, int step,
                                        const ddp_tensor *current, ddp_tensor *next, int runs,
                                        ddp_tensor_plan *plan, size_t *max_sent, ddp_result result) {
    int axis = mesh->step[step].axis;
    ddp_group *group = mesh->layout->axes[axis], *first = mesh->layout->axes[0];
    ddp__tensor_transfer tr;
    ddp_tensor_box axis_box, box;
    ddp__tensor_layout_shard(mesh->layout, mesh->current, axis, &axis_box);
    mesh->current[axis] = mesh->step[step].to;
    ddp__tensor_layout_shard(mesh->layout, mesh->current, -1, &box);
    memcpy(next->shape, box.shape, sizeof next->shape);
    ddp__tensor_transfer_init(&tr, who, group, mesh->step[step].from, mesh->step[step].to);
    if (result == DDP_OK)
        result = ddp__tensor_transfer_prepare(&tr, who, group, current, tr.from, tr.to, next, axis_box.shape,
                                              runs);
    if (result == DDP_OK) {
        size_t bytes = tr.plan.workspace_bytes + (step ? (size_t)ddp__tensor_bytes(current) : 0)
                       + (step + 1 < mesh->count ? (size_t)ddp__tensor_bytes(next) : 0);
        plan->sent_bytes += tr.plan.sent_bytes;
        if (bytes > plan->workspace_bytes) plan->workspace_bytes = bytes;
        if (tr.plan.sent_bytes > *max_sent || strcmp(plan->collective, "none") == 0)
            plan->collective = tr.plan.collective;
        if (tr.plan.sent_bytes > *max_sent) *max_sent = tr.plan.sent_bytes;
    }
    if (!runs) return result;
    if (result == DDP_OK && !next->data)
        result = ddp__tensor_device(first)->alloc(first, (size_t)ddp__tensor_bytes(next), &next->data);
    if (result == DDP_OK) result = ddp_device_begin(group);
    return ddp__tensor_transfer_run(&tr, current, next, result);
}

/* Checks the tensors of this rank against the layouts. *t: memory for the result. */
static ddp_result ddp__tensor_mesh_prepare(const char *who, const ddp_tensor *in,
                                           const ddp_tensor_layout *from, const ddp_tensor_layout *to,
                                           const ddp_tensor *out, ddp_tensor *t) {
    ddp_group *group = ddp__tensor_layout_group(from);
    ddp__tensor_text a, b, c;
    ddp_tensor_box box;
    DDP_TRY(ddp__tensor_check(who, group, "in", in, out != NULL));
    ddp__tensor_layout_shard(from, from->placement, -1, &box);
    if (in->ndim != from->ndim || !ddp__tensor_equal(in->ndim, in->shape, box.shape))
        return ddp_fail_in(
            DDP_ERR_INVALID, who, group, "in is %s, but the part of this rank of %s in layout from is %s",
            ddp__tensor_shape(in->ndim, in->shape, &a), ddp__tensor_shape(from->ndim, from->shape, &b),
            ddp__tensor_shape(from->ndim, box.shape, &c));
    ddp__tensor_layout_shard(to, to->placement, -1, &box);
    if (!out) return DDP_OK;
    DDP_TRY(ddp__tensor_output_begin(who, group, out, in->dtype, 0, to->ndim, box.shape, t));
    return t->data != in->data && ddp__tensor_overlap(in, t)
               ? ddp_fail_in(DDP_ERR_INVALID, who, group, "in and out overlap; use separate memory")
               : DDP_OK;
}

DDPDEF ddp_result ddp_tensor_redistribute_mesh(const ddp_tensor *in, const ddp_tensor_layout *from,
                                               const ddp_tensor_layout *to, ddp_tensor *out,
                                               ddp_tensor_plan *plan) {
    DDP_PUBLIC_CALL(ddp_tensor_redistribute_mesh);
    ddp_tensor_plan total_plan = {"none", 0, 0};
    ddp__tensor_mesh_plan mesh;
    ddp_tensor current = DDP_ZERO, next, t = DDP_ZERO;
    size_t max_sent = 0;
    DDP_TRY(ddp__tensor_check_layouts(__func__, from, to));
    ddp_group *group = ddp__tensor_layout_group(from);
    ddp_result result = ddp__tensor_mesh_prepare(__func__, in, from, to, out, &t);
    if (result != DDP_OK && !out) return result;
    ddp__tensor_mesh_plan_make(&mesh, from, to);
    if (result == DDP_OK) current = *in;
    for (int i = 0; i < mesh.count; i++, current = next) {
        next = current;
        next.data = i + 1 == mesh.count ? t.data : NULL;
        result = ddp__tensor_mesh_step(&mesh, __func__, i, &current, &next, out != NULL, &total_plan,
                                       &max_sent, result);
        if (result != DDP_OK && next.data != t.data) {
            ddp__tensor_device(group)->free(group, next.data);
            next.data = NULL;
        }
        if (current.data != (in ? in->data : NULL)) ddp__tensor_device(group)->free(group, current.data);
    }
    if (result == DDP_OK && mesh.count == 0 && ddp__tensor_bytes(in) && (!out || t.data != in->data)) {
        total_plan.collective = "copy";
        if (out) ddp__tensor_device(group)->copy(t.data, in->data, (size_t)ddp__tensor_bytes(in));
    }
    if (out) result = ddp__tensor_output_end(group, out, &t, result);
    if (plan && result == DDP_OK) *plan = total_plan;
    return result;
}

//== numeric helpers of kernels ========================================================= >>impl-tp-math
/* The exponential, random words and sums that the kernels below share, and the block sizes of products. */

#define DDP__TP_LANES 16 /* partial sums of a reduction: enough that the compiler vectorises it */
#define DDP__TP_BLOCK 64 /* loops of this length are vectorised; the compiler unrolls shorter ones first */

/* total = the sum of `term`, an expression of k, over k from 0 to n - 1, in double. The order of additions
   depends only on n:
       partial[lane] = term(lane) + term(lane + 16) + term(lane + 32) + ...      lane = 0 to 15
       partial[0]   += the terms that are left after the last full group of 16
       total         = partial[0] + partial[1] + ... + partial[15] */
#define DDP__TP_SUM(total, k, n, term)                                                      \
    do {                                                                                    \
        double partial_[DDP__TP_LANES] = DDP_ZERO;                                          \
        int64_t first_ = 0;                                                                 \
        for (; first_ + DDP__TP_LANES <= (n); first_ += DDP__TP_LANES)                      \
            for (int lane_ = 0; lane_ < DDP__TP_LANES; lane_++) {                           \
                int64_t k = first_ + lane_;                                                 \
                partial_[lane_] += (term);                                                  \
            }                                                                               \
        for (int64_t k = first_; k < (n); k++) partial_[0] += (term);                       \
        for (int lane_ = 1; lane_ < DDP__TP_LANES; lane_++) partial_[0] += partial_[lane_]; \
        (total) = partial_[0];                                                              \
    } while (0)

/* exp(x) within 2e-7. x is clamped to -87 and 88; NaN stays NaN. x = n ln 2 + r with |r| <= ln(2) / 2, and a
   Taylor polynomial of r. It has no branches, so that loops of it are vectorised. */
static inline float ddp__tp_exp(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    float shifted, n, r, power, scale;
    uint32_t bits;
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    shifted = x * 1.44269504f + magic;
    n = shifted - magic;
    r = x - n * 0.693359375f; /* ln 2 in two parts, the first with few bits */
    r = r + n * 2.12194440e-4f;
    power = 1.0f
            + r
                  * (1.0f
                     + r * (0.5f + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720))))));
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u - 0x4B400000u) << 23;
    memcpy(&scale, &bits, sizeof scale);
    return power * scale;
}

static inline float ddp__tp_sigmoid_f32(float x) { return 1.0f / (1.0f + ddp__tp_exp(-x)); }
static inline double ddp__tp_sigmoid_f64(double x) { return 1.0 / (1.0 + exp(-x)); }

/* Of differences to the largest logit. Minus infinity gives 0. */
static inline float ddp__tp_loss_exp_f32(float x) { return x < -87.0f ? 0.0f : ddp__tp_exp(x); }
static inline double ddp__tp_loss_exp_f64(double x) { return exp(x); }

/* Philox 4x32-10 (Salmon et al. 2011): four words that depend only on key, stream and counter. */
enum { DDP__TP_STREAM_DROPOUT = 0, DDP__TP_STREAM_NORMAL = 1 };
static inline void ddp__tp_philox_round(uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, uint32_t k0,
                                        uint32_t k1) {
    uint64_t a = (uint64_t)0xd2511f53u * *c0, b = (uint64_t)0xcd9e8d57u * *c2;
    *c0 = (uint32_t)(b >> 32) ^ *c1 ^ k0;
    *c1 = (uint32_t)b;
    *c2 = (uint32_t)(a >> 32) ^ *c3 ^ k1;
    *c3 = (uint32_t)a;
}

/* The words of `count` consecutive counters, at most DDP__TP_BLOCK. */
static void ddp__tp_philox(uint64_t key, uint32_t stream, uint64_t counter, int count, uint32_t *words) {
    uint32_t c[4][DDP__TP_BLOCK], k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int k = 0; k < count; k++) {
        c[0][k] = (uint32_t)(counter + (uint64_t)k);
        c[1][k] = (uint32_t)((counter + (uint64_t)k) >> 32);
        c[2][k] = stream;
        c[3][k] = 0;
    }
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u)
        for (int k = 0; k < count; k++) ddp__tp_philox_round(&c[0][k], &c[1][k], &c[2][k], &c[3][k], k0, k1);
    for (int k = 0; k < count; k++)
        for (int w = 0; w < 4; w++) words[4 * k + w] = c[w][k];
}

static inline int64_t ddp__tp_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* Block sizes of matrix products, see >>impl-tp-gemm-kernel. */
#if defined(__AVX512F__)
#define DDP__GEMM_VECTOR 64 /* bytes */
#elif defined(__AVX__)
#define DDP__GEMM_VECTOR 32
#else
#define DDP__GEMM_VECTOR 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define DDP__GEMM_MR 12 /* rows of a tile: 24 sums in 32 registers */
#else
#define DDP__GEMM_MR 6 /* 12 sums in 16 registers */
#endif
#define DDP__GEMM_NR_BYTES (2 * DDP__GEMM_VECTOR) /* of a row of a tile */
#define DDP__GEMM_KC_BYTES 1024                   /* of the terms of a packed block */
#define DDP__GEMM_MC (2 * DDP__GEMM_MR)           /* rows of A that are packed at a time */
#define DDP__GEMM_NC_BYTES 896                    /* of the columns of B that are packed at a time */
#define DDP__GEMM_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define DDP__GEMM_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__CUDACC__)
#define DDP__GEMM_UNROLL
#else
#define DDP__GEMM_UNROLL _Pragma("GCC unroll 16")
#endif
#endif /* the first part of the bodies */

/* The next two sections are compiled for float and for double: below them, this header includes itself with
   DDP__REAL set. ddp__real(norm) is then ddp__tp_norm_f32 or ddp__tp_norm_f64. */
#if defined(DDP__REAL)

//== matrix product of one type ================================================== >>impl-tp-gemm-kernel
/* C = A B or C += A B, after Goto and van de Geijn (2008). Blocks of A and B are packed in the order in which
   the innermost loop reads them. That loop keeps a tile of C in registers, MR rows by NR columns (two
   vectors). ddp_gemm_builtin calls ddp__real(gemm_run).

     for each NC columns of C                     packed B, KC terms in panels of NR columns
         for each KC terms of the sum     pack        +----+----+----+
             for each MC rows of C        pack        |    |    |    |
                 for each tile                        +----+----+----+
                                               +--+   +----+
                     packed A, in panels       +--+   |tile|   c (MC x NC)
                     of MR rows                +--+   +----+
                                                KC

   A tile starts with the values of C and is written back after KC terms. An element of C is therefore one
   chain of additions in the order of k, for any m, n and k. The packed blocks are on the stack: nothing is
   allocated, and any number of threads may call it. */

typedef DDP__REAL ddp__real(vector) __attribute__((vector_size(DDP__GEMM_VECTOR)));

/* Packs `count` rows of A (or columns of B) with `depth` terms each into panels of `width`. Element (i, k) is
   read from in[i * outer + k * step] and written to out[panel][k][i - panel * width]. The last panel is
   padded with zeros. */
DDP__GEMM_INLINE void ddp__real(gemm_pack)(const int64_t width, DDP__REAL *out, int64_t count, int64_t depth,
                                           const DDP__REAL *in, int64_t outer, int64_t step) {
    const size_t size = sizeof(DDP__REAL);
    for (int64_t first = 0; first < count; first += width, out += width * depth) {
        const DDP__REAL *from = in + first * outer;
        int64_t panel_width = count - first < width ? count - first : width, i = 0;
        if (panel_width < width) memset(out, 0, (size_t)(width * depth) * size);
        if (outer == 1 && panel_width == width) {
            for (int64_t k = 0; k < depth; k++)
                memcpy(out + k * width, from + k * step, (size_t)width * size);
            continue;
        }
        for (; i + 4 <= panel_width; i += 4)
            for (int64_t k = 0; k < depth; k++)
                for (int64_t j = i; j < i + 4; j++)
                    memcpy(out + k * width + j, from + j * outer + k * step, size);
        for (; i < panel_width; i++)
            for (int64_t k = 0; k < depth; k++)
                memcpy(out + k * width + i, from + i * outer + k * step, size);
    }
}

/* One tile: c (m, n) += a b over depth terms, or = with overwrite. a and b are panels. m <= rows and
   n <= NR at the edges of C. `rows` is a constant in each call, so that the sums stay in registers. */
DDP__GEMM_INLINE void ddp__real(gemm_tile)(const int rows, int64_t depth, const DDP__REAL *a,
                                           const DDP__REAL *b, DDP__REAL *c, int64_t ldc, int m, int n,
                                           int overwrite) {
    enum { lanes = DDP__GEMM_VECTOR / sizeof(DDP__REAL), nr = 2 * lanes };
    DDP__REAL edge[DDP__GEMM_MR * nr]; /* a full tile, in place of a part of C */
    ddp__real(vector) sum[DDP__GEMM_MR][2];
    DDP__REAL *tile = c;
    int64_t tile_step = ldc;
    int edge_rows = 0;
    size_t edge_bytes = (size_t)(n < nr ? n : nr) * sizeof(DDP__REAL);
    if (m < rows || n < nr) {
        tile = edge;
        tile_step = nr;
        edge_rows = m < rows ? m : rows;
        memset(edge, 0, sizeof edge);
        for (int i = 0; i < edge_rows && !overwrite; i++) memcpy(edge + i * nr, c + i * ldc, edge_bytes);
    }
    DDP__GEMM_UNROLL
    for (int i = 0; i < rows; i++) {
        if (overwrite)
            memset(sum[i], 0, sizeof sum[i]);
        else
            memcpy(sum[i], tile + i * tile_step, sizeof sum[i]);
    }
    for (int64_t k = 0; k < depth; k++, a += DDP__GEMM_MR, b += nr) {
        ddp__real(vector) left, right;
        memcpy(&left, b, sizeof left);
        memcpy(&right, b + lanes, sizeof right);
        DDP__GEMM_UNROLL
        for (int i = 0; i < rows; i++) {
            sum[i][0] += a[i] * left;
            sum[i][1] += a[i] * right;
        }
    }
    DDP__GEMM_UNROLL
    for (int i = 0; i < rows; i++) memcpy(tile + i * tile_step, sum[i], sizeof sum[i]);
    for (int i = 0; i < edge_rows; i++) memcpy(c + i * ldc, edge + i * nr, edge_bytes);
}

/* All tiles of a packed block of A and one of B: c (m, n). Few rows use a lower tile. */
static void ddp__real(gemm_block)(int64_t m, int64_t n, int64_t depth, const DDP__REAL *packed_a,
                                  const DDP__REAL *packed_b, DDP__REAL *c, int64_t ldc, int overwrite) {
    const int nr = DDP__GEMM_NR_BYTES / (int)sizeof(DDP__REAL), third = DDP__GEMM_MR / 3;
    const DDP__REAL *b = packed_b;
    for (int64_t j = 0; j < n; j += nr, b += nr * depth) {
        const DDP__REAL *a = packed_a;
        const int columns = n - j < nr ? (int)(n - j) : nr;
        for (int64_t i = 0; i < m; i += DDP__GEMM_MR, a += DDP__GEMM_MR * depth) {
            const int rows = m - i < DDP__GEMM_MR ? (int)(m - i) : DDP__GEMM_MR;
            DDP__REAL *tile = c + i * ldc + j;
            if (rows > 2 * third)
                ddp__real(gemm_tile)(DDP__GEMM_MR, depth, a, b, tile, ldc, rows, columns, overwrite);
            else if (rows > third)
                ddp__real(gemm_tile)(DDP__GEMM_MR / 3 * 2, depth, a, b, tile, ldc, rows, columns, overwrite);
            else
                ddp__real(gemm_tile)(DDP__GEMM_MR / 3, depth, a, b, tile, ldc, rows, columns, overwrite);
        }
    }
}

static __attribute__((noinline)) void ddp__real(gemm_run)(const ddp_gemm *g) {
    enum {
        nr = DDP__GEMM_NR_BYTES / sizeof(DDP__REAL),
        kc = DDP__GEMM_KC_BYTES / sizeof(DDP__REAL),
        nc = DDP__GEMM_NC_BYTES / DDP__GEMM_NR_BYTES * nr
    };
    /* element (i, k) of A: a[i * a_row + k * a_step]; element (k, j) of B: b[k * b_row + j * b_step] */
    const int64_t a_row = g->trans_a ? 1 : g->lda;
    const int64_t a_step = g->trans_a ? g->lda : 1;
    const int64_t b_row = g->trans_b ? 1 : g->ldb;
    const int64_t b_step = g->trans_b ? g->ldb : 1;
    const DDP__REAL *a = (const DDP__REAL *)g->a, *b = (const DDP__REAL *)g->b;
    DDP__REAL packed_a[DDP__GEMM_MC * kc] __attribute__((aligned(64)));
    DDP__REAL packed_b[nc * kc] __attribute__((aligned(64)));
    for (int64_t j = 0; j < g->n; j += nc) {
        const int64_t columns = ddp__tp_min(g->n - j, nc);
        for (int64_t k = 0; k < g->k; k += kc) {
            const int64_t depth = ddp__tp_min(g->k - k, kc);
            ddp__real(gemm_pack)(nr, packed_b, columns, depth, b + k * b_row + j * b_step, b_step, b_row);
            for (int64_t i = 0; i < g->m; i += DDP__GEMM_MC) {
                const int64_t rows = ddp__tp_min(g->m - i, DDP__GEMM_MC);
                DDP__REAL *c = (DDP__REAL *)g->c + i * g->ldc + j;
                ddp__real(gemm_pack)(DDP__GEMM_MR, packed_a, rows, depth, a + i * a_row + k * a_step, a_row,
                                     a_step);
                ddp__real(gemm_block)(rows, columns, depth, packed_a, packed_b, c, g->ldc,
                                      k == 0 && !g->accumulate);
            }
        }
    }
}

//== layer kernels of one type ======================================================= >>impl-tp-kernels
/* The functions of ddp_layer_kernels for host memory. The table ddp__host_layers lists them; the layers below
   call them through ddp_tp.kernels. */

/* y += x, n elements */
static inline void ddp__real(add)(int64_t n, const DDP__REAL *x, DDP__REAL *y) {
    for (int64_t j = 0; j < n; j++) y[j] += x[j];
}

static ddp_result ddp__real(copy_rows)(int64_t rows, int64_t columns, const void *x, int64_t x_step, void *y,
                                       int64_t y_step) {
    for (int64_t i = 0; i < rows && columns; i++)
        memcpy((DDP__REAL *)y + i * y_step, (const DDP__REAL *)x + i * x_step,
               (size_t)columns * sizeof(DDP__REAL));
    return DDP_OK;
}

static ddp_result ddp__real(add_bias)(int64_t rows, int64_t columns, const void *bias, void *y,
                                      int64_t y_step) {
    for (int64_t i = 0; i < rows; i++)
        ddp__real(add)(columns, (const DDP__REAL *)bias, (DDP__REAL *)y + i * y_step);
    return DDP_OK;
}

static ddp_result ddp__real(sum_rows)(int64_t rows, int64_t columns, const void *x, int accumulate,
                                      void *out) {
    if (!accumulate && columns) memset(out, 0, (size_t)columns * sizeof(DDP__REAL));
    for (int64_t i = 0; i < rows; i++)
        ddp__real(add)(columns, (const DDP__REAL *)x + i * columns, (DDP__REAL *)out);
    return DDP_OK;
}

/* Tokens of other ranks give rows of zeros: the sum over the ranks is the full output. */
static ddp_result ddp__real(lookup)(const ddp_lookup *op) {
    int64_t n = op->columns;
    DDP__REAL *y = (DDP__REAL *)op->out;
    for (int64_t i = 0; i < op->rows; i++, y += n) {
        int64_t row = op->index[i] - op->first;
        if (row >= 0 && row < op->count)
            memcpy(y, (const DDP__REAL *)op->in + row * n, (size_t)n * sizeof *y);
        else
            memset(y, 0, (size_t)n * sizeof *y);
    }
    return DDP_OK;
}

/* Adds token by token: the bits do not depend on how the table is sharded. */
static ddp_result ddp__real(lookup_backward)(const ddp_lookup *op) {
    int64_t n = op->columns;
    const DDP__REAL *dy = (const DDP__REAL *)op->in;
    for (int64_t i = 0; i < op->rows; i++, dy += n) {
        int64_t row = op->index[i] - op->first;
        if (row < 0 || row >= op->count) continue;
        ddp__real(add)(n, dy, (DDP__REAL *)op->out + row * n);
    }
    return DDP_OK;
}

/* A Philox counter gives the words of four elements. A row may start inside of such four elements. */
static ddp_result ddp__real(dropout)(const ddp_dropout *op) {
    const DDP__REAL *x = (const DDP__REAL *)op->x;
    DDP__REAL *y = (DDP__REAL *)op->y, factor = (DDP__REAL)op->scale;
    uint32_t words[4 * DDP__TP_BLOCK];
    for (int64_t i = 0; i < op->rows; i++) {
        uint64_t element = (uint64_t)(op->first + i * op->step);
        for (int64_t left = op->columns, n; left > 0; left -= n, element += (uint64_t)n, x += n, y += n) {
            int64_t skip = (int64_t)(element % 4), counters = (skip + left + 3) / 4;
            if (counters > DDP__TP_BLOCK) counters = DDP__TP_BLOCK;
            n = 4 * counters - skip < left ? 4 * counters - skip : left;
            ddp__tp_philox(op->key, DDP__TP_STREAM_DROPOUT, element / 4, (int)counters, words);
            for (int64_t j = 0; j < n; j++) y[j] = words[skip + j] < op->threshold ? 0 : x[j] * factor;
        }
    }
    return DDP_OK;
}

/* GELU in its tanh form is x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). */
static ddp_result ddp__real(activate)(ddp_tp_activation form, int64_t rows, int64_t h, const void *x_,
                                      void *y) {
    const DDP__REAL scale = (DDP__REAL)1.5957691216057307, cubic = (DDP__REAL)0.044715;
    const DDP__REAL *in = (const DDP__REAL *)x_;
    DDP__REAL *out = (DDP__REAL *)y;
    for (int64_t i = 0; i < rows * h && form == DDP_TP_GELU; i++) {
        DDP__REAL x = in[i];
        out[i] = x * ddp__real(sigmoid)(scale * (x + cubic * x * x * x));
    }
    for (int64_t i = 0; i < rows * h && form == DDP_TP_RELU; i++) out[i] = in[i] < 0 ? 0 : in[i];
    for (int64_t i = 0; i < rows && form == DDP_TP_SILU_GATED; i++)
        for (int64_t j = 0; j < h; j++) {
            DDP__REAL gate = in[2 * i * h + j];
            out[i * h + j] = gate * ddp__real(sigmoid)(gate) * in[(2 * i + 1) * h + j];
        }
    return DDP_OK;
}

static ddp_result ddp__real(activate_backward)(ddp_tp_activation form, int64_t rows, int64_t h,
                                               const void *x_, const void *dy, void *dx) {
    const DDP__REAL scale = (DDP__REAL)1.5957691216057307, cubic = (DDP__REAL)0.044715;
    const DDP__REAL *in = (const DDP__REAL *)x_, *d = (const DDP__REAL *)dy;
    DDP__REAL *d_in = (DDP__REAL *)dx;
    for (int64_t i = 0; i < rows * h && form == DDP_TP_GELU; i++) {
        DDP__REAL x = in[i], s = ddp__real(sigmoid)(scale * (x + cubic * x * x * x));
        d_in[i] = d[i] * (s + x * s * (1 - s) * scale * (1 + 3 * cubic * x * x));
    }
    for (int64_t i = 0; i < rows * h && form == DDP_TP_RELU; i++) {
        DDP__REAL at_most_0 = in[i] <= 0 ? 0 : in[i]; /* the gradient of a NaN is NaN */
        d_in[i] = in[i] > 0 ? d[i] : at_most_0;
    }
    for (int64_t i = 0; i < rows && form == DDP_TP_SILU_GATED; i++)
        for (int64_t j = 0; j < h; j++) {
            DDP__REAL gate = in[2 * i * h + j], up = in[(2 * i + 1) * h + j];
            DDP__REAL s = ddp__real(sigmoid)(gate), slope = d[i * h + j];
            d_in[2 * i * h + j] = slope * up * s * (1 + gate * (1 - s));
            d_in[(2 * i + 1) * h + j] = slope * gate * s;
        }
    return DDP_OK;
}

/* Cross-entropy: three passes over this rank's logits, with an all-reduce after each of the first two:
     loss_max   the largest logit of each row                              all-reduce MAX
     loss_sum   exp(logit - max), stored in dlogits; their sum;            all-reduce SUM
                the target's logit minus max
     loss_end   the loss, and the gradient from the stored exponentials
   Rows to ignore are not read. loss_max may miss a NaN; the sum of loss_sum contains it. */
static ddp_result ddp__real(loss_max)(const ddp_loss *op) {
    const DDP__REAL *x = (const DDP__REAL *)op->logits;
    for (int64_t i = 0; i < op->rows; i++) {
        int64_t j = i * op->columns, end = op->targets[i] == op->ignore ? j : j + op->count;
        DDP__REAL partial[DDP__TP_LANES], max = -(DDP__REAL)INFINITY;
        for (int lane = 0; lane < DDP__TP_LANES; lane++) partial[lane] = max;
        for (; j + DDP__TP_LANES <= end; j += DDP__TP_LANES)
            for (int lane = 0; lane < DDP__TP_LANES; lane++)
                partial[lane] = x[j + lane] > partial[lane] ? x[j + lane] : partial[lane];
        for (; j < end; j++) max = x[j] > max ? x[j] : max;
        for (int lane = 0; lane < DDP__TP_LANES; lane++) max = partial[lane] > max ? partial[lane] : max;
        ((DDP__REAL *)op->max)[i] = max;
    }
    return DDP_OK;
}

static ddp_result ddp__real(loss_sum)(const ddp_loss *op) {
    const DDP__REAL *x = (const DDP__REAL *)op->logits;
    DDP__REAL *d = (DDP__REAL *)op->dlogits, *target = (DDP__REAL *)op->sums, *sum = target + op->rows;
    for (int64_t i = 0; i < op->rows; i++) {
        int64_t j = i * op->columns, end = j + op->count, word = op->targets[i] - op->first;
        DDP__REAL max = ((const DDP__REAL *)op->max)[i], e[DDP__TP_BLOCK];
        double partial[DDP__TP_BLOCK] = DDP_ZERO;
        target[i] = 0;
        sum[i] = 0;
        if (op->targets[i] == op->ignore) continue;
        if (word >= 0 && word < op->count) target[i] = x[j + word] - max;
        for (; j + DDP__TP_BLOCK <= end; j += DDP__TP_BLOCK) {
            for (int k = 0; k < DDP__TP_BLOCK; k++) e[k] = ddp__real(loss_exp)(x[j + k] - max);
            for (int k = 0; k < DDP__TP_BLOCK; k++) partial[k] += (double)e[k];
            if (d) memcpy(d + j, e, sizeof e);
        }
        for (; j < end; j++) {
            e[0] = ddp__real(loss_exp)(x[j] - max);
            partial[0] += (double)e[0];
            if (d) d[j] = e[0];
        }
        for (int k = 1; k < DDP__TP_BLOCK; k++) partial[0] += partial[k];
        sum[i] = (DDP__REAL)partial[0];
    }
    return DDP_OK;
}

static ddp_result ddp__real(loss_end)(const ddp_loss *op) {
    const DDP__REAL *target = (const DDP__REAL *)op->sums, *sum = target + op->rows;
    DDP__REAL *d = (DDP__REAL *)op->dlogits, *losses = (DDP__REAL *)op->losses;
    double total = 0;
    for (int64_t i = 0; i < op->rows; i++) {
        int64_t row = i * op->columns, word = op->targets[i] - op->first;
        int64_t valid = op->targets[i] == op->ignore ? 0 : op->count; /* columns with a gradient */
        double loss = 0, factor = 0;
        if (op->targets[i] != op->ignore) {
            double log_sum = log((double)sum[i]), all = (double)((const DDP__REAL *)op->max)[i] + log_sum;
            loss = log_sum - (double)target[i] + (op->z_loss > 0 ? op->z_loss * all * all : 0);
            factor = op->scale * (1 + 2 * op->z_loss * all) / (double)sum[i];
        }
        total += loss;
        if (losses) losses[i] = (DDP__REAL)loss;
        for (int64_t j = 0; d && j < valid; j++) d[row + j] *= (DDP__REAL)factor;
        for (int64_t j = valid; d && j < op->columns; j++) d[row + j] = 0;
        if (d && word >= 0 && word < valid) d[row + word] -= (DDP__REAL)op->scale;
    }
    if (op->total) *op->total = total;
    return DDP_OK;
}

/* stats: a row's mean (0 in RMS norm), then 1 / deviation. */
static ddp_result ddp__real(norm)(const ddp_norm *op) {
    const DDP__REAL *w = (const DDP__REAL *)op->weight, *b = (const DDP__REAL *)op->bias;
    const DDP__REAL *x = (const DDP__REAL *)op->x;
    DDP__REAL *stat = (DDP__REAL *)op->stats, *y = (DDP__REAL *)op->y;
    int64_t n = op->columns;
    for (int64_t i = 0; i < op->rows; i++, x += n, y += n, stat += 2) {
        double mean = 0, squares, scale;
        if (!op->rms) DDP__TP_SUM(mean, k, n, (double)x[k]);
        mean /= (double)n;
        DDP__TP_SUM(squares, k, n, ((double)x[k] - mean) * ((double)x[k] - mean));
        scale = 1 / sqrt(squares / (double)n + op->eps);
        stat[0] = (DDP__REAL)mean;
        stat[1] = (DDP__REAL)scale;
        for (int64_t k = 0; k < n; k++)
            y[k] = (DDP__REAL)(((double)x[k] - mean) * scale) * w[k] + (b ? b[k] : 0);
    }
    return DDP_OK;
}

/* With h = (x - mean) / deviation and g = dy w: dx = (g - mean(g) - h mean(g h)) / deviation. RMS norm has no
   mean(g). */
static ddp_result ddp__real(norm_backward)(const ddp_norm_backward *op) {
    const DDP__REAL *w = (const DDP__REAL *)op->weight, *x = (const DDP__REAL *)op->x;
    const DDP__REAL *stat = (const DDP__REAL *)op->stats, *dy = (const DDP__REAL *)op->dy;
    DDP__REAL *dx = (DDP__REAL *)op->dx, *dw = (DDP__REAL *)op->sums;
    DDP__REAL *db = dw && !op->rms ? dw + op->columns : NULL;
    int64_t n = op->columns;
    for (int64_t i = 0; i < op->rows; i++, x += n, dy += n, stat += 2) {
        DDP__REAL mean = stat[0], scale = stat[1], mean_g = 0, mean_gh;
        double sum;
        if (!op->rms) {
            DDP__TP_SUM(sum, k, n, (double)(dy[k] * w[k]));
            mean_g = (DDP__REAL)(sum / (double)n);
        }
        DDP__TP_SUM(sum, k, n, (double)(dy[k] * w[k]) * (double)((x[k] - mean) * scale));
        mean_gh = (DDP__REAL)(sum / (double)n);
        for (int64_t k = 0; dw && k < n; k++) dw[k] += dy[k] * ((x[k] - mean) * scale);
        for (int64_t k = 0; db && k < n; k++) db[k] += dy[k];
        for (int64_t k = 0; dx && k < n; k++)
            dx[k] = scale * (dy[k] * w[k] - mean_g - (x[k] - mean) * scale * mean_gh);
        if (dx) dx += n;
    }
    return DDP_OK;
}
#endif /* DDP__REAL */

#if defined(DDP__TENSOR_BODIES) && !defined(DDP__REAL)
#define DDP__REAL float
#define ddp__real(name) ddp__tp_##name##_f32
#include "ddp_tensor.h"
#undef DDP__REAL
#undef ddp__real
#define DDP__REAL double
#define ddp__real(name) ddp__tp_##name##_f64
#include "ddp_tensor.h"
#undef DDP__REAL
#undef ddp__real

//== matrix products ==================================================================== >>impl-tp-gemm
/* ddp_gemm_builtin and CBLAS: argument checks, and the tables of kernels for host memory. */

#define DDP__GEMM_NEED(condition, ...)                                                \
    do {                                                                              \
        if (!(condition)) return ddp_fail(DDP_ERR_INVALID, "ddp_gemm: " __VA_ARGS__); \
    } while (0)

static ddp_result ddp__gemm_check(const ddp_gemm *g) {
    DDP__GEMM_NEED(g, "gemm is NULL");
    const int64_t a_columns = g->trans_a ? g->m : g->k;
    const int64_t b_columns = g->trans_b ? g->k : g->n;
    DDP__GEMM_NEED(g->m >= 0 && g->n >= 0 && g->k >= 0, "m=%lld n=%lld k=%lld; use 0 or more",
                   (long long)g->m, (long long)g->n, (long long)g->k);
    DDP__GEMM_NEED(g->dtype == DDP_F32 || g->dtype == DDP_F64, "dtype=%s (%d); use f32 or f64",
                   ddp_dtype_name(g->dtype), (int)g->dtype);
    DDP__GEMM_NEED(g->lda >= a_columns, "lda=%lld is less than a's %lld columns", (long long)g->lda,
                   (long long)a_columns);
    DDP__GEMM_NEED(g->ldb >= b_columns, "ldb=%lld is less than b's %lld columns", (long long)g->ldb,
                   (long long)b_columns);
    DDP__GEMM_NEED(g->ldc >= g->n, "ldc=%lld is less than c's %lld columns", (long long)g->ldc,
                   (long long)g->n);
    DDP__GEMM_NEED(g->c || !g->m || !g->n, "c is NULL");
    DDP__GEMM_NEED((g->a && g->b) || !g->m || !g->n || !g->k, "%s is NULL", g->a ? "b" : "a");
    return DDP_OK;
}

/* The result if m, n or k is 0. */
static int ddp__gemm_empty(const ddp_gemm *g) {
    size_t size = ddp_dtype_size(g->dtype);
    if (g->m && g->n && g->k) return 0;
    for (int64_t i = 0; i < g->m && g->n && !g->accumulate; i++)
        memset((unsigned char *)g->c + (size_t)(i * g->ldc) * size, 0, (size_t)g->n * size);
    return 1;
}

DDPDEF ddp_result ddp_gemm_builtin(const ddp_gemm *gemm, void *user) {
    (void)user;
    DDP_TRY(ddp__gemm_check(gemm));
    if (ddp__gemm_empty(gemm)) return DDP_OK;
    if (gemm->dtype == DDP_F32)
        ddp__tp_gemm_run_f32(gemm);
    else
        ddp__tp_gemm_run_f64(gemm);
    return DDP_OK;
}

#if defined(DDP_USE_CBLAS)
static ddp_result ddp__gemm_cblas(const ddp_gemm *g, void *user) {
    static const char *const names[6] = {"m", "n", "k", "lda", "ldb", "ldc"};
    (void)user;
    DDP_TRY(ddp__gemm_check(g));
    if (ddp__gemm_empty(g)) return DDP_OK;
    const int64_t sizes[6] = {g->m, g->n, g->k, g->lda, g->ldb, g->ldc};
    CBLAS_TRANSPOSE ta = g->trans_a ? CblasTrans : CblasNoTrans;
    CBLAS_TRANSPOSE tb = g->trans_b ? CblasTrans : CblasNoTrans;
    for (int i = 0; i < 6; i++)
        DDP__GEMM_NEED(sizes[i] <= 2147483647,
                       "%s=%lld exceeds the CBLAS limit of 2147483647; set desc.gemm to ddp_gemm_builtin",
                       names[i], (long long)sizes[i]);
    if (g->dtype == DDP_F32)
        cblas_sgemm(CblasRowMajor, ta, tb, (int)g->m, (int)g->n, (int)g->k, 1.0f, (const float *)g->a,
                    (int)g->lda, (const float *)g->b, (int)g->ldb, g->accumulate ? 1.0f : 0.0f, (float *)g->c,
                    (int)g->ldc);
    else
        cblas_dgemm(CblasRowMajor, ta, tb, (int)g->m, (int)g->n, (int)g->k, 1.0, (const double *)g->a,
                    (int)g->lda, (const double *)g->b, (int)g->ldb, g->accumulate ? 1.0 : 0.0, (double *)g->c,
                    (int)g->ldc);
    return DDP_OK;
}
#define DDP__GEMM_DEFAULT ddp__gemm_cblas
#else
#define DDP__GEMM_DEFAULT ddp_gemm_builtin
#endif

#define DDP__TP_F32(name, arguments) ddp__tp_##name##_f32,
#define DDP__TP_F64(name, arguments) ddp__tp_##name##_f64,
static const ddp_layer_kernels ddp__host_layers[2] = {
    {DDP_VERSION, DDP__GEMM_DEFAULT, DDP_LAYER_KERNELS(DDP__TP_F32)},
    {DDP_VERSION, DDP__GEMM_DEFAULT, DDP_LAYER_KERNELS(DDP__TP_F64)},
};

//== tensor-parallel context ========================================================= >>impl-tp-context
/* struct ddp_tp: the workspace that layers share, checks of arguments, and the collectives with
   statistics that all layers call. ddp_tp_create and ddp_tp_destroy. */

#define DDP__TP_MAX_CHUNKS 64 /* chunk_count at most */
#define DDP__TP_MAX_PENDING 4 /* pending collectives of one layer, at most */

struct ddp_tp {
    ddp_group *group;
    const ddp_device *device;         /* of group */
    const ddp_layer_kernels *kernels; /* of device and dtype */
    ddp_tp_desc desc;                 /* with every default resolved */
    int rank, world_size;
    size_t size; /* bytes of an element */
    unsigned char
        *workspace; /* group memory, as large as the largest layer needs; valid only during a call */
    size_t workspace_bytes;
    size_t *counts; /* counts[world_size], then offsets[world_size] of an all_gather_v */
    ddp_tp_stats stats;
};

/* Collectives that are pending inside a call. works[0] belongs to an all-gather that starts before the chunks
   (see ddp__tp_linear_backward_column); the chunks use the others in turn. */
typedef struct ddp__tp_pending {
    ddp_work works[DDP__TP_MAX_PENDING];
    int next;
} ddp__tp_pending;

/* rows * columns elements of that many bytes; SIZE_MAX when that overflows, or a factor is negative. */
static size_t ddp__tp_bytes(int64_t rows, int64_t columns, size_t size) {
    uint64_t count, bytes;
    if (rows < 0 || columns < 0 || __builtin_mul_overflow((uint64_t)rows, (uint64_t)columns, &count))
        return SIZE_MAX;
    if (__builtin_mul_overflow(count, (uint64_t)size, &bytes) || bytes > (uint64_t)PTRDIFF_MAX)
        return SIZE_MAX;
    return (size_t)bytes;
}

static size_t ddp__tp_add_bytes(size_t a, size_t b) { return a > SIZE_MAX - b ? SIZE_MAX : a + b; }

/* Element i of a buffer. */
static void *ddp__tp_at(const ddp_tp *tp, const void *data, int64_t i) {
    return (unsigned char *)data + (size_t)i * tp->size;
}

/* Compares desc on all ranks, and grows the workspace to the largest `bytes` of any rank. After an error
   of one rank, all ranks return an error. */
static ddp_result ddp__tp_reserve_workspace(ddp_group *group, ddp_tp *tp, const char *call, ddp_result result,
                                            const char *desc, size_t bytes) {
    char description[280];
    void *larger = NULL;
    uint64_t largest = bytes;
    if (result == DDP_OK && bytes > (size_t)PTRDIFF_MAX)
        result = ddp_fail_in(
            DDP_ERR_INVALID, call, group,
            "max_rows=%lld rows of these features do not fit in memory; use a smaller max_rows",
            (long long)tp->desc.max_rows);
    snprintf(description, sizeof description, "%s %s", call, desc);
    DDP_TRY(ddp_agree(group, call, result, ddp_hash(DDP_HASH_SEED, description, strlen(description)),
                      description));
    DDP_TRY(ddp_host_collective(group, DDP_CALL_ALL_REDUCE, &largest, &largest, 1, DDP_U64, DDP_OP_MAX, -1));
    if (largest <= tp->workspace_bytes) return DDP_OK;
    DDP_TRY(ddp_group_alloc(group, (size_t)largest, &larger));
    if (tp->workspace) DDP_TRY(ddp_group_free(group, tp->workspace));
    tp->workspace = (unsigned char *)larger;
    tp->workspace_bytes = tp->stats.workspace_bytes = (size_t)largest;
    return DDP_OK;
}

/* The end of every layer's create. *out: an allocated copy of `layer`, if all ranks succeed; otherwise NULL.
   result: this rank's error before this call. desc: text of the fields that must be equal on all ranks. */
static ddp_result ddp__tp_finish_create(ddp_tp *tp, const char *call, ddp_result result, const char *desc,
                                        size_t workspace_bytes, const void *layer, size_t layer_bytes,
                                        void **out) {
    void *copy = result == DDP_OK ? ddp_host_alloc(tp->group, layer_bytes) : NULL;
    if (result == DDP_OK && !copy) result = DDP_ERR_NO_MEMORY;
    result = ddp__tp_reserve_workspace(tp->group, tp, call, result, desc, workspace_bytes);
    *out = NULL;
    if (result == DDP_OK)
        *out = memcpy(copy, layer, layer_bytes);
    else
        ddp_host_free(tp->group, copy);
    return result;
}

/* 1 = activations outside the column-row pairs are sharded by rows. Never for a group of one rank. */
static int ddp__tp_shards_rows(const ddp_tp *tp) { return tp->desc.sequence_parallel && tp->world_size > 1; }
/* Rows of an activation outside the pairs on this rank. */
static int64_t ddp__tp_local_rows(const ddp_tp *tp, int64_t rows) {
    return ddp__tp_shards_rows(tp) ? rows / tp->world_size : rows;
}

static ddp_result ddp__tp_check_rows(const ddp_tp *tp, const char *call, int64_t rows) {
    DDP_CHECK(call, tp->group, rows >= 0 && rows <= tp->desc.max_rows, "rows=%lld; use 0 to max_rows=%lld",
              (long long)rows, (long long)tp->desc.max_rows);
    DDP_CHECK(
        call, tp->group, !ddp__tp_shards_rows(tp) || rows % tp->world_size == 0,
        "rows=%lld is not a multiple of %d ranks, which sequence_parallel needs; use %lld, the next multiple",
        (long long)rows, tp->world_size, (long long)((rows / tp->world_size + 1) * tp->world_size));
    return DDP_OK;
}

/* --- collectives that update ddp_tp_stats. Counts are elements. work NULL blocks. A group of one rank sends
   nothing and is not counted. --- */

static ddp_result ddp__tp_record(ddp_tp *tp, ddp_result result, double start, uint64_t elements) {
    tp->stats.comm_seconds += ddp_now() - start;
    if (result != DDP_OK || tp->world_size == 1) return result;
    tp->stats.collectives++;
    tp->stats.elements_sent += elements;
    return DDP_OK;
}

/* In place. */
static ddp_result ddp__tp_all_reduce(ddp_tp *tp, void *data, size_t count, ddp_op op, ddp_work *work) {
    uint64_t others = (uint64_t)tp->world_size - 1, w = (uint64_t)tp->world_size;
    double start = ddp_now();
    if (tp->world_size == 1) return DDP_OK;
    return ddp__tp_record(tp, ddp_all_reduce(tp->group, data, data, count, tp->desc.dtype, op, work), start,
                          count / w * 2 * others + count % w * 2 * others / w);
}

/* recv: send_count of every rank. In place: send == recv + rank * send_count. */
static ddp_result ddp__tp_all_gather(ddp_tp *tp, const void *send, void *recv, size_t send_count,
                                     ddp_work *work) {
    double start = ddp_now();
    return ddp__tp_record(tp, ddp_all_gather(tp->group, send, recv, send_count, tp->desc.dtype, work), start,
                          (uint64_t)send_count * ((uint64_t)tp->world_size - 1));
}

/* recv: recv_count of the sum of send, world_size times as many. In place: recv == send + rank *
   recv_count. */
static ddp_result ddp__tp_reduce_scatter(ddp_tp *tp, const void *send, void *recv, size_t recv_count,
                                         ddp_work *work) {
    double start = ddp_now();
    return ddp__tp_record(
        tp, ddp_reduce_scatter(tp->group, send, recv, recv_count, tp->desc.dtype, DDP_OP_SUM, work), start,
        (uint64_t)recv_count * ((uint64_t)tp->world_size - 1));
}

static ddp_result ddp__tp_wait(ddp_tp *tp, ddp_work *work) {
    double start = ddp_now();
    ddp_result result = ddp_wait(tp->group, work);
    tp->stats.comm_seconds += ddp_now() - start;
    return result;
}

/* *work: for the next chunk's collective. Waits for the collective that used it before. */
static ddp_result ddp__tp_next_work(ddp_tp *tp, ddp__tp_pending *pending, ddp_work **work) {
    pending->next = pending->next % (DDP__TP_MAX_PENDING - 1) + 1;
    *work = &pending->works[pending->next];
    return ddp__tp_wait(tp, *work);
}

/* All-gathers one chunk: rows [first, first + rows) of each rank's local_rows. `full` is (world_size *
   local_rows, width). Pending on return. Chunk 1 of 2, with 2 ranks:
       rank 0  local [a0 a1]        full [ .  a1 | .  b1]
       rank 1  local [b0 b1]                                */
static ddp_result ddp__tp_gather_rows(ddp_tp *tp, const void *local, int64_t local_rows, int64_t first,
                                      int64_t rows, int64_t width, void *full, ddp__tp_pending *pending,
                                      ddp_work **work) {
    size_t *offsets = tp->counts + tp->world_size, count = (size_t)(rows * width);
    DDP_TRY(ddp__tp_next_work(tp, pending, work));
    double start = ddp_now();
    for (int r = 0; r < tp->world_size; r++) {
        tp->counts[r] = count;
        offsets[r] = (size_t)((r * local_rows + first) * width);
    }
    return ddp__tp_record(tp,
                          ddp_all_gather_v(tp->group, ddp__tp_at(tp, local, first * width), count, full,
                                           tp->counts, offsets, tp->desc.dtype, *work),
                          start, (uint64_t)count * ((uint64_t)tp->world_size - 1));
}

/* After an error of this rank inside a layer, poisons the group: the other ranks would wait for it. */
static ddp_result ddp__tp_poison_on_error(const ddp_tp *tp, ddp_result result) {
    ddp_saved_error error = DDP_ZERO;
    if (result == DDP_OK || tp->world_size == 1) return result;
    ddp_error_save(&error, result);
    ddp_group_poison(tp->group, result, error.text);
    return ddp_error_restore(&error);
}

/* The end of a call: waits for all pending collectives, also after an error. */
static ddp_result ddp__tp_wait_all(ddp_tp *tp, ddp__tp_pending *pending, ddp_result result) {
    ddp_saved_error error = DDP_ZERO;
    for (int i = 0; i < DDP__TP_MAX_PENDING && result == DDP_OK; i++)
        result = ddp__tp_wait(tp, &pending->works[i]);
    if (result == DDP_OK) return DDP_OK;
    ddp_error_save(&error, ddp__tp_poison_on_error(tp, result));
    for (int i = 0; i < DDP__TP_MAX_PENDING; i++) (void)ddp_wait(tp->group, &pending->works[i]);
    return ddp_error_restore(&error);
}

static ddp_result ddp__tp_resolve_desc(ddp_group *group, const ddp_tp_desc *desc, ddp_tp_desc *d) {
    const char *call = "ddp_tp_create";
    const ddp_layer_kernels *kernels = ddp_group_device(group)->layers;
    if (!desc) return ddp_fail_in(DDP_ERR_INVALID, call, group, "desc is NULL");
    *d = *desc;
    if (d->dtype == DDP_DTYPE_DEFAULT) d->dtype = DDP_F32;
    if (d->chunk_count == 0) d->chunk_count = 1;
    d->sequence_parallel = d->sequence_parallel != 0;
    d->accumulate_grads = d->accumulate_grads != 0;
    DDP_TRY(ddp_check_kernels(group, call, kernels ? &kernels->version : NULL, "ddp_tensor.h"));
    if (d->dtype != DDP_F32 && d->dtype != DDP_F64)
        return ddp_fail_in(DDP_ERR_INVALID, call, group, "dtype=%s (%d); use f32 or f64",
                           ddp_dtype_name(d->dtype), (int)d->dtype);
    if (d->max_rows < 1)
        return ddp_fail_in(DDP_ERR_INVALID, call, group,
                           "max_rows=%lld; use the largest number of rows of an activation",
                           (long long)d->max_rows);
    if (d->chunk_count < 0 || d->chunk_count > DDP__TP_MAX_CHUNKS)
        return ddp_fail_in(DDP_ERR_INVALID, call, group, "chunk_count=%d; use 0 to %d", d->chunk_count,
                           DDP__TP_MAX_CHUNKS);
    return DDP_OK;
}

/* Starts as many collectives as a layer has in flight at most. The group allocates their state now, so that
   layers allocate nothing later. */
static ddp_result ddp__tp_warm_up(ddp_tp *tp) {
    ddp__tp_pending pending = DDP_ZERO;
    ddp_result result;
    memset(tp->counts, 0, 2 * (size_t)tp->world_size * sizeof *tp->counts);
    result = ddp_all_gather_v(tp->group, NULL, 0, tp->workspace, tp->counts, tp->counts + tp->world_size,
                              tp->desc.dtype, NULL);
    /* Every rank gets this error, and no rank waits for another: the group stays usable. */
    if (result == DDP_ERR_UNSUPPORTED)
        return ddp_fail_in(result, "ddp_tp_create", tp->group,
                           "chunk_count=%d needs ddp_all_gather_v, which this backend does not have; use "
                           "chunk_count=1",
                           tp->desc.chunk_count);
    for (int i = 0; i < DDP__TP_MAX_PENDING && result == DDP_OK; i++)
        result = ddp_all_gather_v(tp->group, NULL, 0, tp->workspace, tp->counts, tp->counts + tp->world_size,
                                  tp->desc.dtype, &pending.works[i]);
    return ddp__tp_wait_all(tp, &pending, result);
}

/* Fills in a context. */
static ddp_result ddp__tp_init(ddp_tp *tp, const ddp_tp_desc *desc) {
    ddp_group *group = tp->group;
    ddp_gemm none = DDP_ZERO;
    tp->device = ddp_group_device(group);
    tp->kernels = (tp->device->layers ? tp->device->layers : ddp__host_layers) + (desc->dtype == DDP_F64);
    tp->desc = *desc;
    if (!desc->gemm) {
        tp->desc.gemm = tp->kernels->gemm;
        tp->desc.gemm_user = group;
    }
    tp->rank = ddp_rank(group);
    tp->world_size = ddp_world_size(group);
    tp->size = ddp_dtype_size(desc->dtype);
    tp->counts = (size_t *)(void *)(tp + 1);
    if (!tp->device->layers) return DDP_OK;
    none.dtype = desc->dtype; /* an empty product: the device allocates its state for products now */
    DDP_TRY(ddp_device_begin(group));
    DDP_USER_CALLBACK;
    return tp->desc.gemm(&none, tp->desc.gemm_user);
}

DDPDEF ddp_result ddp_tp_create(ddp_tp **out, ddp_group *group, const ddp_tp_desc *desc) {
    DDP_PUBLIC_CALL(ddp_tp_create);
    char description[160];
    ddp_tp_desc d = DDP_ZERO;
    if (out) *out = NULL;
    if (!out || !group) return ddp_fail(DDP_ERR_INVALID, "ddp_tp_create: %s is NULL", out ? "group" : "out");
    ddp_result result = ddp__tp_resolve_desc(group, desc, &d);
    size_t size = sizeof(ddp_tp) + 2 * (size_t)ddp_world_size(group) * sizeof(size_t);
    ddp_tp *tp = (ddp_tp *)ddp_host_alloc(group, size);
    if (!tp && result == DDP_OK) result = DDP_ERR_NO_MEMORY;
    if (tp) tp->group = group;
    if (result == DDP_OK) result = ddp__tp_init(tp, &d);
    snprintf(description, sizeof description,
             "dtype=%s max_rows=%lld sequence_parallel=%d chunk_count=%d accumulate_grads=%d",
             ddp_dtype_name(d.dtype), (long long)d.max_rows, d.sequence_parallel, d.chunk_count,
             d.accumulate_grads);
    /* of cross-entropy, which is not created */
    size_t bytes = ddp__tp_bytes(3, d.max_rows, ddp_dtype_size(d.dtype));
    result = ddp__tp_reserve_workspace(group, tp, "ddp_tp_create", result, description,
                                       bytes > 64 * DDP__TP_MAX_PENDING ? bytes : 64 * DDP__TP_MAX_PENDING);
    if (result == DDP_OK && tp->world_size > 1 && d.chunk_count > 1) result = ddp__tp_warm_up(tp);
    if (result == DDP_OK)
        *out = tp;
    else
        ddp_tp_destroy(tp);
    return result;
}

DDPDEF void ddp_tp_destroy(ddp_tp *tp) {
    DDP_PUBLIC_CALL(ddp_tp_destroy);
    DDP_KEEP_ERROR;
    if (!tp) return;
    /* after a failure it is the group's to free */
    if (tp->workspace) (void)ddp_group_free(tp->group, tp->workspace);
    ddp_host_free(tp->group, tp);
}

DDPDEF ddp_result ddp_tp_get_stats(const ddp_tp *tp, ddp_tp_stats *stats) {
    if (!tp || !stats) return ddp_fail(DDP_ERR_INVALID, "ddp_tp_get_stats: %s is NULL", tp ? "stats" : "tp");
    *stats = tp->stats;
    return DDP_OK;
}

DDPDEF void ddp_tp_reset_stats(ddp_tp *tp) {
    if (!tp) return;
    memset(&tp->stats, 0, sizeof tp->stats);
    tp->stats.workspace_bytes = tp->workspace_bytes;
}

//== linear layers: products ========================================================== >>impl-tp-linear
/* The products of column-parallel and row-parallel linears, with the collectives before or after them.
   Called by forward and backward in the next section. W is (N, K); the ranks hold blocks of it:

     COLUMN  rows of W       rank 0 [W0]      ROW  columns of W    rank 0 [W0 | ..]
             (out features)  rank 1 [W1]           (in features)   rank 1 [.. | W1]

     pass             input                          product        output
     COLUMN forward   x; SP: rows all-gathered       y  = x W0'     this rank's features of y, all-gathered
                                                                    with gather_output
     COLUMN backward  dy: this rank's features       dx = dy W0     all-reduce; SP: reduce-scatter of rows
                      x; SP: gathered again          dW0 = dy' x
     ROW forward      x: this rank's features        y  = x W0'     all-reduce; SP: reduce-scatter of rows
     ROW backward     dy; SP: rows all-gathered      dx = dy W0     this rank's features of dx, all-gathered
                                                     dW0 = dy' x    with scatter_input

   SP: sequence_parallel. With chunk_count > 1, rows travel in chunks during the product of other rows. */

#define DDP__TP_LINEAR_PARTS 3

struct ddp_tp_linear {
    ddp_tp *tp;
    ddp_tp_linear_desc desc; /* with every default resolved */
    /* parts that are sharded separately: 1; 3 of fused query, key, value; 2 of gate and up */
    int part_count;
    int64_t part[DDP__TP_LINEAR_PARTS]; /* features in each, over all ranks */
    int64_t local_in, local_out;        /* columns and rows of this rank's weight */
    int64_t max_local;                  /* sharded features of rank 0, which has the most */
};

/* out (M, n) = in (M, k) times a block of the weight: W' in forward, W for the gradient of inputs. The
   product of any rows can be computed separately. */
typedef struct ddp__tp_linear_product {
    const void *weight, *in;
    void *out;
    int64_t in_step, out_step; /* elements from row to row */
    int forward;
} ddp__tp_linear_product;

/* Memory for the gradients of the weight and the bias. wanted: the same on every rank. A rank with an empty
   weight may pass NULL. */
typedef struct ddp__tp_linear_grads {
    int wanted;
    void *weight, *bias;
} ddp__tp_linear_grads;

/* Returns the number of features of a part that a rank has. *global: the first of them among all features of
   the layer. *local: the first among the rank's features. Query, key, value on 2 ranks:
       layer    [q0 q1 | k0 k1 | v0 v1]       rank 1    [q1 | k1 | v1] */
static int64_t ddp__tp_linear_shard(const ddp_tp_linear *l, int part, int rank, int64_t *global,
                                    int64_t *local) {
    int64_t global_part = 0, local_part = 0, first, count;
    for (int p = 0; p < part; p++) {
        global_part += l->part[p];
        local_part += ddp__tensor_shard_range(l->part[p], rank, l->tp->world_size, NULL);
    }
    count = ddp__tensor_shard_range(l->part[part], rank, l->tp->world_size, &first);
    if (global) *global = global_part + first;
    if (local) *local = local_part;
    return count;
}

static int64_t ddp__tp_linear_local_features(const ddp_tp_linear *l, int rank) {
    int64_t count = 0;
    for (int p = 0; p < l->part_count; p++) count += ddp__tp_linear_shard(l, p, rank, NULL, NULL);
    return count;
}

/* The features that are sharded, over all ranks. */
static int64_t ddp__tp_linear_sharded_features(const ddp_tp_linear *l) {
    return l->desc.split == DDP_TP_ROW ? l->desc.in_features : l->desc.out_features;
}

/* Empty products go to the kernel, which writes the zeros: the caller's gemm never sees one. */
static ddp_result ddp__tp_multiply(const ddp_tp *tp, const ddp_gemm *g) {
    if (!g->m || !g->n || !g->k || tp->desc.gemm == tp->kernels->gemm) return tp->kernels->gemm(g, tp->group);
    DDP_USER_CALLBACK;
    return tp->desc.gemm(g, tp->desc.gemm_user);
}

/* Multiplies `rows` rows of p->in, starting at row `first`, into out. */
static ddp_result ddp__tp_linear_multiply_rows(const ddp_tp_linear *l, const ddp__tp_linear_product *p,
                                               int64_t first, int64_t rows, void *out) {
    ddp_gemm g = DDP_ZERO;
    g.m = rows;
    g.n = p->forward ? l->local_out : l->local_in;
    g.k = p->forward ? l->local_in : l->local_out;
    g.lda = p->in_step;
    g.ldb = l->local_in;
    g.ldc = p->out_step;
    g.a = ddp__tp_at(l->tp, p->in, first * p->in_step);
    g.b = p->weight;
    g.c = out;
    g.dtype = l->tp->desc.dtype;
    g.trans_b = p->forward;
    return ddp__tp_multiply(l->tp, &g);
}

/* weight_grad (local_out, local_in) = dy' x over all rows, and bias_grad = the sum of dy's rows; with
   accumulate_grads both are added. Waits for pending's works[0], which gathers x. */
static ddp_result ddp__tp_linear_weight_grads(const ddp_tp_linear *l, const void *dy, const void *x,
                                              int64_t x_step, int64_t rows, const ddp__tp_linear_grads *grads,
                                              ddp__tp_pending *pending) {
    const ddp_tp *tp = l->tp;
    const int accumulate = tp->desc.accumulate_grads;
    ddp_gemm g = DDP_ZERO;
    if (!grads->wanted) return DDP_OK;
    if (grads->bias)
        DDP_TRY(ddp__tp_poison_on_error(
            tp, tp->kernels->sum_rows(rows, l->local_out, dy, accumulate, grads->bias)));
    DDP_TRY(ddp__tp_wait(l->tp, &pending->works[0]));
    g.m = l->local_out;
    g.n = l->local_in;
    g.k = rows;
    g.lda = l->local_out;
    g.ldb = x_step;
    g.ldc = l->local_in;
    g.a = dy;
    g.b = x;
    g.c = grads->weight;
    g.dtype = tp->desc.dtype;
    g.trans_a = 1;
    g.accumulate = accumulate;
    return ddp__tp_multiply(tp, &g);
}

static ddp_result ddp__tp_linear_add_bias(const ddp_tp_linear *l, void *y, int64_t y_step, const void *bias,
                                          int64_t rows) {
    if (!bias) return DDP_OK;
    return ddp__tp_poison_on_error(l->tp, l->tp->kernels->add_bias(rows, l->local_out, bias, y, y_step));
}

/* Copies gathered features to rows of all features. slots has one slot per rank, (rows, max_local), with that
   rank's features in its first columns. 2 rows, 3 features on 2 ranks:
       slots  [a b / d e] [c . / f .]      full  [a b c / d e f] */
static ddp_result ddp__tp_linear_join_features(const ddp_tp_linear *l, const void *slots, void *full,
                                               int64_t rows) {
    const ddp_tp *tp = l->tp;
    int64_t global, local;
    for (int r = 0; r < tp->world_size; r++)
        for (int p = 0; p < l->part_count; p++) {
            int64_t count = ddp__tp_linear_shard(l, p, r, &global, &local);
            DDP_TRY(ddp__tp_poison_on_error(
                tp, tp->kernels->copy_rows(
                        rows, count, ddp__tp_at(tp, slots, r * rows * l->max_local + local), l->max_local,
                        ddp__tp_at(tp, full, global), ddp__tp_linear_sharded_features(l))));
        }
    return DDP_OK;
}

/* Copies this rank's features of rows of all features, without gaps between rows. */
static ddp_result ddp__tp_linear_slice_features(const ddp_tp_linear *l, const void *full, void *shard,
                                                int64_t rows) {
    const ddp_tp *tp = l->tp;
    int64_t global, local, shard_step = ddp__tp_linear_local_features(l, tp->rank);
    for (int p = 0; p < l->part_count; p++) {
        int64_t count = ddp__tp_linear_shard(l, p, tp->rank, &global, &local);
        DDP_TRY(
            ddp__tp_poison_on_error(tp, tp->kernels->copy_rows(rows, count, ddp__tp_at(tp, full, global),
                                                               ddp__tp_linear_sharded_features(l),
                                                               ddp__tp_at(tp, shard, local), shard_step)));
    }
    return DDP_OK;
}

/* The product of all rows, where each rank has its own rows of `in`: p->in is (local_rows, in_step). All
   ranks' rows are gathered at `gathered`, in rank order, and p->in points there afterwards. p->out NULL:
   gathers only. 2 ranks with 2 rows each, 2 chunks, on rank 0:

       all-gather  | chunk 0: x0 x2 | chunk 1: x1 x3 |              gathered  [x0 x1 x2 x3]
       product     | own rows x0 x1 | row x2         | row x3 |               rank 0 rank 1 */
static ddp_result ddp__tp_linear_multiply_gathered(const ddp_tp_linear *l, ddp__tp_linear_product *p,
                                                   int64_t local_rows, void *gathered,
                                                   ddp__tp_pending *pending) {
    ddp_tp *tp = l->tp;
    int chunks = tp->desc.chunk_count;
    const void *local = p->in;
    ddp_work *work = NULL, *next_work = NULL;
    int64_t first, next_first, next_rows, rows = ddp__tensor_shard_range(local_rows, 0, chunks, &first);
    if (chunks == 1) {
        p->in = gathered;
        DDP_TRY(ddp__tp_all_gather(tp, local, gathered, (size_t)(local_rows * p->in_step), NULL));
        return p->out ? ddp__tp_linear_multiply_rows(l, p, 0, local_rows * tp->world_size, p->out) : DDP_OK;
    }
    if (rows)
        DDP_TRY(
            ddp__tp_gather_rows(tp, local, local_rows, first, rows, p->in_step, gathered, pending, &work));
    if (p->out) /* this rank's own rows are there already */
        DDP_TRY(ddp__tp_linear_multiply_rows(l, p, 0, local_rows,
                                             ddp__tp_at(tp, p->out, tp->rank * local_rows * p->out_step)));
    p->in = gathered;
    for (int i = 0; rows; i++, work = next_work, first = next_first, rows = next_rows) {
        next_rows = i + 1 < chunks ? ddp__tensor_shard_range(local_rows, i + 1, chunks, &next_first) : 0;
        if (next_rows)
            DDP_TRY(ddp__tp_gather_rows(tp, local, local_rows, next_first, next_rows, p->in_step, gathered,
                                        pending, &next_work));
        DDP_TRY(ddp__tp_wait(tp, work));
        for (int64_t r = 0; r < tp->world_size && p->out; r++) {
            int64_t row = r * local_rows + first;
            if (r == tp->rank) continue;
            DDP_TRY(ddp__tp_linear_multiply_rows(l, p, row, rows, ddp__tp_at(tp, p->out, row * p->out_step)));
        }
    }
    return DDP_OK;
}

/* The product of all rows, summed over the ranks, chunk by chunk. Each rank receives all rows in p->out; in
   sequence parallelism only its own. Then `partial` has memory for all rows: chunk by chunk, and in a chunk
   the rows of rank 0, of rank 1, ... Pending on return. 2 ranks with 2 rows each, 2 chunks:

       product         | y0 y2 | y1 y3                  |            partial  [y0 y2 | y1 y3]
       reduce-scatter          | chunk 0: rank 0 has y0 | chunk 1: rank 0 has y1 |
                               |          rank 1 has y2 |          rank 1 has y3 | */
static ddp_result ddp__tp_linear_multiply_reduced(const ddp_tp_linear *l, const ddp__tp_linear_product *p,
                                                  int64_t rows, void *partial, ddp__tp_pending *pending) {
    ddp_tp *tp = l->tp;
    const int chunks = tp->world_size == 1 ? 1 : tp->desc.chunk_count;
    const int shards = ddp__tp_shards_rows(tp) ? tp->world_size : 1;
    for (int i = 0; i < chunks; i++) {
        int64_t first, count = ddp__tensor_shard_range(rows / shards, i, chunks, &first);
        size_t elements = (size_t)(count * p->out_step);
        void *out = ddp__tp_at(tp, p->out, first * p->out_step);
        void *sums = shards == 1 ? out : ddp__tp_at(tp, partial, first * shards * p->out_step);
        ddp_work *work = NULL;
        if (!count) break;
        for (int64_t r = 0; r < shards; r++)
            DDP_TRY(ddp__tp_linear_multiply_rows(l, p, r * (rows / shards) + first, count,
                                                 ddp__tp_at(tp, sums, r * count * p->out_step)));
        if (chunks > 1) DDP_TRY(ddp__tp_next_work(tp, pending, &work));
        if (shards > 1)
            DDP_TRY(ddp__tp_reduce_scatter(tp, sums, out, elements, work));
        else
            DDP_TRY(ddp__tp_all_reduce(tp, out, elements, DDP_OP_SUM, work));
    }
    return DDP_OK;
}

/* The product of all rows, for this rank's features. bias: NULL, or added. With gather_features, p->out
   has the features of all ranks instead: each rank writes its product to its slot of the workspace, and
   the slots are gathered. */
static ddp_result ddp__tp_linear_multiply_features(const ddp_tp_linear *l, ddp__tp_linear_product *p,
                                                   const void *bias, int64_t rows, int gather_features,
                                                   ddp__tp_pending *pending) {
    ddp_tp *tp = l->tp;
    void *out = p->out;
    if (gather_features) {
        p->out = ddp__tp_at(tp, tp->workspace, tp->rank * rows * l->max_local);
        p->out_step = l->max_local;
    }
    if (ddp__tp_shards_rows(tp))
        DDP_TRY(ddp__tp_linear_multiply_gathered(l, p, rows / tp->world_size, tp->workspace, pending));
    else if (p->out)
        DDP_TRY(ddp__tp_linear_multiply_rows(l, p, 0, rows, p->out));
    DDP_TRY(ddp__tp_linear_add_bias(l, p->out, p->out_step, bias, rows));
    if (!gather_features) return DDP_OK;
    DDP_TRY(ddp__tp_all_gather(tp, p->out, tp->workspace, (size_t)(rows * l->max_local), NULL));
    return ddp__tp_linear_join_features(l, tp->workspace, out, rows);
}

//== linear layers: forward and backward ======================================= >>impl-tp-linear-passes
/* ddp_tp_linear_forward and ddp_tp_linear_backward: which products and collectives a column and a row linear
   run. The MLP calls ddp__tp_linear_forward and _backward directly.

   Workspace in sequence parallelism:     [rows of all ranks]
       in a column linear's backward      [x of all ranks | partial dx]
   With gather_output or scatter_input:   [slot of rank 0 | slot of rank 1 | ...] */

/* A row linear's input. With scatter_input: this rank's columns of the full x. */
static const void *ddp__tp_linear_row_input(const ddp_tp_linear *l, const void *x, int64_t *x_step) {
    int64_t first = 0;
    *x_step = l->desc.scatter_input ? l->desc.in_features : l->local_in;
    if (l->desc.scatter_input) (void)ddp__tp_linear_shard(l, 0, l->tp->rank, &first, NULL);
    return ddp__tp_at(l->tp, x, first);
}

static ddp_result ddp__tp_linear_forward(ddp_tp_linear *l, const void *weight, const void *bias,
                                         const void *x, int64_t rows, void *y) {
    ddp_tp *tp = l->tp;
    ddp__tp_linear_product p = {weight, x, y, l->local_in, l->local_out, 1};
    ddp__tp_pending pending = DDP_ZERO;
    ddp_result result;
    DDP_TRY(ddp_device_begin(tp->group));
    if (l->desc.split == DDP_TP_COLUMN) {
        int gather_features = l->desc.gather_output && tp->world_size > 1;
        result = ddp__tp_linear_multiply_features(l, &p, bias, rows, gather_features, &pending);
        return ddp__tp_wait_all(tp, &pending, result);
    }
    p.in = ddp__tp_linear_row_input(l, x, &p.in_step);
    result = ddp__tp_linear_multiply_reduced(l, &p, rows, tp->workspace, &pending);
    DDP_TRY(ddp__tp_wait_all(tp, &pending, result));
    return ddp__tp_linear_add_bias(l, y, l->local_out, bias, ddp__tp_local_rows(tp, rows));
}

/* In sequence parallelism x is gathered again for the weight's gradient, while dx is computed. */
static ddp_result ddp__tp_linear_backward_column(const ddp_tp_linear *l, ddp__tp_linear_product *p,
                                                 const void *x, int64_t rows,
                                                 const ddp__tp_linear_grads *grads,
                                                 ddp__tp_pending *pending) {
    ddp_tp *tp = l->tp;
    unsigned char *partial = tp->workspace + ddp_round_up((size_t)(rows * l->local_in) * tp->size, 64);
    if (l->desc.gather_output && tp->world_size > 1) {
        DDP_TRY(ddp__tp_linear_slice_features(l, p->in, tp->workspace, rows));
        p->in = tp->workspace;
    }
    /* A rank without features may pass NULL gradients in any case, so `wanted` may differ there: if the last
       rank has none, all ranks gather. */
    if (ddp__tp_shards_rows(tp) && (grads->wanted || !ddp__tp_linear_local_features(l, tp->world_size - 1))) {
        ddp_work *work = tp->desc.chunk_count > 1 ? &pending->works[0] : NULL;
        size_t local_count = (size_t)(rows / tp->world_size * l->local_in);
        DDP_TRY(ddp__tp_all_gather(tp, x, tp->workspace, local_count, work));
        x = tp->workspace;
    }
    if (p->out) DDP_TRY(ddp__tp_linear_multiply_reduced(l, p, rows, partial, pending));
    return ddp__tp_linear_weight_grads(l, p->in, x, l->local_in, rows, grads, pending);
}

static ddp_result ddp__tp_linear_backward_row(const ddp_tp_linear *l, ddp__tp_linear_product *p,
                                              const void *x, int64_t rows, const ddp__tp_linear_grads *grads,
                                              ddp__tp_pending *pending) {
    int64_t x_step;
    int gather_features = l->desc.scatter_input && l->tp->world_size > 1 && p->out;
    DDP_TRY(ddp__tp_linear_multiply_features(l, p, NULL, rows, gather_features, pending));
    x = ddp__tp_linear_row_input(l, x, &x_step);
    return ddp__tp_linear_weight_grads(l, p->in, x, x_step, rows, grads, pending);
}

static ddp_result ddp__tp_linear_backward(ddp_tp_linear *l, const void *weight, const void *x, const void *dy,
                                          int64_t rows, void *dx, const ddp__tp_linear_grads *grads) {
    ddp__tp_linear_product p = {weight, dy, dx, l->local_out, l->local_in, 0};
    ddp__tp_pending pending = DDP_ZERO;
    ddp_result result;
    DDP_TRY(ddp_device_begin(l->tp->group));
    if (l->desc.split == DDP_TP_COLUMN)
        result = ddp__tp_linear_backward_column(l, &p, x, rows, grads, &pending);
    else
        result = ddp__tp_linear_backward_row(l, &p, x, rows, grads, &pending);
    return ddp__tp_wait_all(l->tp, &pending, result);
}

/* A pointer may be NULL if it has no elements to point to. */
static ddp_result ddp__tp_linear_check(const ddp_tp_linear *l, const char *call, const void *weight,
                                       const void *x, int64_t rows, const char *y_name, const void *y) {
    DDP_TRY(ddp__tp_check_rows(l->tp, call, rows));
    DDP_CHECK(call, l->tp->group, weight || !l->local_in || !l->local_out, "weight is NULL");
    DDP_CHECK(call, l->tp->group, x || !rows || (!l->local_in && !l->desc.scatter_input), "x is NULL");
    DDP_CHECK(call, l->tp->group, y || !rows || (!l->local_out && !l->desc.gather_output), "%s is NULL",
              y_name);
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_linear_forward(ddp_tp_linear *linear, const void *weight, const void *bias,
                                        const void *x, int64_t rows, void *y) {
    DDP_PUBLIC_CALL(ddp_tp_linear_forward);
    if (!linear) return ddp_fail(DDP_ERR_INVALID, "%s: linear is NULL", __func__);
    DDP_TRY(ddp__tp_linear_check(linear, __func__, weight, x, rows, "y", y));
    DDP_CHECK(__func__, linear->tp->group, !bias == !!linear->desc.no_bias || !linear->local_out,
              "bias is %s, but no_bias=%d", bias ? "given" : "NULL", linear->desc.no_bias);
    return ddp__tp_linear_forward(linear, weight, bias, x, rows, y);
}

DDPDEF ddp_result ddp_tp_linear_backward(ddp_tp_linear *linear, const void *weight, const void *x,
                                         const void *dy, int64_t rows, void *dx, void *weight_grad,
                                         void *bias_grad) {
    DDP_PUBLIC_CALL(ddp_tp_linear_backward);
    const ddp__tp_linear_grads grads = {weight_grad || bias_grad, weight_grad, bias_grad};
    if (!linear) return ddp_fail(DDP_ERR_INVALID, "%s: linear is NULL", __func__);
    DDP_TRY(ddp__tp_linear_check(linear, __func__, weight, x, rows, "dy", dy));
    DDP_CHECK(__func__, linear->tp->group,
              !weight_grad || !bias_grad == !!linear->desc.no_bias || !linear->local_out,
              "bias_grad is %s, but no_bias=%d", bias_grad ? "given" : "NULL", linear->desc.no_bias);
    DDP_CHECK(__func__, linear->tp->group,
              weight_grad || !bias_grad || !linear->local_in || !linear->local_out,
              "bias_grad is given, but weight_grad is NULL; pass both, or neither");
    return ddp__tp_linear_backward(linear, weight, x, dy, rows, dx, &grads);
}

//== linear layers: creation =================================================== >>impl-tp-linear-create
/* ddp_tp_linear_create: resolves the desc into the features of this rank and the size of the workspace,
   and compares it on all ranks. Boxes of weights and biases for checkpoints. The MLP calls
   ddp__tp_linear_init. */

/* The multiple of the ranks that is nearest to n, at least one of each. */
static int64_t ddp__tp_nearest_multiple(int64_t n, int64_t ranks) {
    int64_t below = n / ranks * ranks;
    return below && n - below < below + ranks - n ? below : below + ranks;
}

/* Fused query, key and value: resolves heads, kv_heads and head_size, and sets l's parts. */
static ddp_result ddp__tp_linear_resolve_heads(ddp_tp_linear *l, const char *call) {
    ddp_tp *tp = l->tp;
    ddp_tp_linear_desc *d = &l->desc;
    int64_t ranks = tp->world_size;
    if (d->kv_heads == 0) d->kv_heads = d->heads;
    DDP_CHECK(call, tp->group, d->split == DDP_TP_COLUMN,
              "heads=%d, but split is DDP_TP_ROW; set heads=0, or use DDP_TP_COLUMN", d->heads);
    DDP_CHECK(call, tp->group, d->heads > 0 && d->kv_heads > 0, "heads=%d kv_heads=%d; use positive numbers",
              d->heads, d->kv_heads);
    DDP_CHECK(call, tp->group, d->heads % ranks == 0,
              "heads=%d is not a multiple of %lld ranks; use %lld, the nearest multiple", d->heads,
              (long long)ranks, (long long)ddp__tp_nearest_multiple(d->heads, ranks));
    DDP_CHECK(call, tp->group, d->kv_heads % ranks == 0,
              "kv_heads=%d is not a multiple of %lld ranks; use %lld, the nearest multiple", d->kv_heads,
              (long long)ranks, (long long)ddp__tp_nearest_multiple(d->kv_heads, ranks));
    DDP_CHECK(call, tp->group, d->heads % d->kv_heads == 0, "heads=%d is not a multiple of kv_heads=%d",
              d->heads, d->kv_heads);
    DDP_CHECK(call, tp->group, d->head_size != 0 || d->in_features % d->heads == 0,
              "in_features=%lld is not a multiple of heads=%d; set head_size, or use %lld features",
              (long long)d->in_features, d->heads,
              (long long)ddp__tp_nearest_multiple(d->in_features, d->heads));
    if (d->head_size == 0) d->head_size = d->in_features / d->heads;
    DDP_CHECK(call, tp->group, d->head_size > 0 && d->head_size <= 1 << 24,
              "head_size=%lld; use 1 to 16777216", (long long)d->head_size);
    l->part_count = 3;
    l->part[0] = d->heads * d->head_size;
    l->part[1] = l->part[2] = d->kv_heads * d->head_size;
    if (d->out_features == 0) d->out_features = l->part[0] + 2 * l->part[1];
    DDP_CHECK(call, tp->group, d->out_features == l->part[0] + 2 * l->part[1],
              "out_features=%lld, but heads=%d and kv_heads=%d of head_size=%lld need %lld; use that, or 0",
              (long long)d->out_features, d->heads, d->kv_heads, (long long)d->head_size,
              (long long)(l->part[0] + 2 * l->part[1]));
    return DDP_OK;
}

static ddp_result ddp__tp_linear_resolve(ddp_tp_linear *l, const char *call) {
    ddp_tp *tp = l->tp;
    ddp_tp_linear_desc *d = &l->desc;
    DDP_CHECK(call, tp->group, d->split == DDP_TP_COLUMN || d->split == DDP_TP_ROW,
              "split=%d is not a ddp_tp_split; use DDP_TP_COLUMN or DDP_TP_ROW", (int)d->split);
    DDP_CHECK(call, tp->group, d->in_features > 0 && d->in_features <= INT64_C(1) << 48,
              "in_features=%lld; use the number of columns of the global weight", (long long)d->in_features);
    DDP_CHECK(call, tp->group, d->heads != 0 || (d->kv_heads == 0 && d->head_size == 0),
              "kv_heads=%d head_size=%lld with heads=0; set heads too", d->kv_heads, (long long)d->head_size);
    if (d->heads != 0) DDP_TRY(ddp__tp_linear_resolve_heads(l, call));
    DDP_CHECK(call, tp->group, d->out_features > 0 && d->out_features <= INT64_C(1) << 60,
              "out_features=%lld; use the number of rows of the global weight", (long long)d->out_features);
    DDP_CHECK(call, tp->group, ddp__tp_bytes(d->out_features, d->in_features, 2 * tp->size) != SIZE_MAX,
              "a weight of %lld x %lld does not fit in memory", (long long)d->out_features,
              (long long)d->in_features);
    DDP_CHECK(call, tp->group, !d->gather_output || d->split == DDP_TP_COLUMN,
              "gather_output=%d, but split is DDP_TP_ROW; set gather_output=0", d->gather_output);
    DDP_CHECK(call, tp->group, !d->scatter_input || d->split == DDP_TP_ROW,
              "scatter_input=%d, but split is DDP_TP_COLUMN; set scatter_input=0", d->scatter_input);
    DDP_CHECK(call, tp->group, !tp->desc.sequence_parallel || (!d->gather_output && !d->scatter_input),
              "%s=1 cannot be combined with sequence_parallel=1, which shards rows",
              d->gather_output ? "gather_output" : "scatter_input");
    if (l->part_count) return DDP_OK;
    l->part_count = 1;
    l->part[0] = ddp__tp_linear_sharded_features(l);
    return DDP_OK;
}

/* Resolves l from its tp, desc and parts (of gate and up). *bytes: of workspace. Not collective. */
static ddp_result ddp__tp_linear_init(ddp_tp_linear *l, const char *call, size_t *bytes) {
    ddp_tp *tp = l->tp;
    const ddp_tp_linear_desc *d = &l->desc;
    int64_t rows = tp->desc.max_rows;
    DDP_TRY(ddp__tp_linear_resolve(l, call));
    l->local_in = d->split == DDP_TP_ROW ? ddp__tp_linear_local_features(l, tp->rank) : d->in_features;
    l->local_out = d->split == DDP_TP_ROW ? d->out_features : ddp__tp_linear_local_features(l, tp->rank);
    l->max_local = ddp__tp_linear_local_features(l, 0);
    *bytes = 0;
    if (ddp__tp_shards_rows(tp)) {
        *bytes = ddp_round_up(
            ddp__tp_bytes(rows, d->split == DDP_TP_ROW ? d->out_features : d->in_features, tp->size), 64);
        if (d->split == DDP_TP_COLUMN)
            *bytes = ddp__tp_add_bytes(*bytes, *bytes); /* x, and the gradient of it */
    } else if (tp->world_size > 1 && (d->gather_output || d->scatter_input))
        *bytes = ddp__tp_bytes(rows, l->max_local, tp->size * (size_t)tp->world_size);
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_linear_create(ddp_tp_linear **out, ddp_tp *tp, const ddp_tp_linear_desc *desc) {
    DDP_PUBLIC_CALL(ddp_tp_linear_create);
    char fields[280];
    ddp_tp_linear layer = DDP_ZERO;
    const ddp_tp_linear_desc *d = &layer.desc;
    void *created;
    size_t bytes = 0;
    ddp_result result;
    if (out) *out = NULL;
    if (!out || !tp) return ddp_fail(DDP_ERR_INVALID, "%s: %s is NULL", __func__, out ? "tp" : "out");
    layer.tp = tp;
    if (desc) layer.desc = *desc;
    if (!desc)
        result = ddp_fail_in(DDP_ERR_INVALID, __func__, tp->group, "desc is NULL");
    else
        result = ddp__tp_linear_init(&layer, __func__, &bytes);
    snprintf(fields, sizeof fields,
             "in_features=%lld out_features=%lld split=%d no_bias=%d gather_output=%d scatter_input=%d "
             "heads=%d kv_heads=%d "
             "head_size=%lld",
             (long long)d->in_features, (long long)d->out_features, (int)d->split, d->no_bias != 0,
             d->gather_output != 0, d->scatter_input != 0, d->heads, d->kv_heads, (long long)d->head_size);
    result = ddp__tp_finish_create(tp, __func__, result, fields, bytes, &layer, sizeof layer, &created);
    *out = (ddp_tp_linear *)created;
    return result;
}

DDPDEF void ddp_tp_linear_destroy(ddp_tp_linear *linear) {
    if (linear) ddp_host_free(linear->tp->group, linear);
}

DDPDEF int64_t ddp_tp_linear_in_features(const ddp_tp_linear *linear) {
    return linear ? linear->local_in : 0;
}
DDPDEF int64_t ddp_tp_linear_out_features(const ddp_tp_linear *linear) {
    return linear ? linear->local_out : 0;
}

/* The box of a weight (ndim 2) or of a bias (1). */
static ddp_result ddp__tp_linear_box(const ddp_tp_linear *l, const char *call, int part, int ndim,
                                     ddp_tensor_box *box) {
    if (!l || !box) return ddp_fail(DDP_ERR_INVALID, "%s: %s is NULL", call, l ? "box" : "linear");
    DDP_CHECK(call, l->tp->group, part >= 0 && part < l->part_count,
              "part=%d of a linear with %d parts; use 0 to parts - 1", part, l->part_count);
    DDP_CHECK(call, l->tp->group, ndim == 2 || !l->desc.no_bias,
              "the linear was created with no_bias=1 and has no bias");
    int cut = l->desc.split == DDP_TP_ROW;
    memset(box, 0, sizeof *box);
    box->ndim = ndim;
    box->global_shape[0] = box->shape[0] = l->desc.out_features;
    if (ndim == 2) box->global_shape[1] = box->shape[1] = l->desc.in_features;
    if (cut < ndim) box->shape[cut] = ddp__tp_linear_shard(l, part, l->tp->rank, &box->offset[cut], NULL);
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_linear_weight_box(const ddp_tp_linear *linear, int part, ddp_tensor_box *box) {
    return ddp__tp_linear_box(linear, "ddp_tp_linear_weight_box", part, 2, box);
}
DDPDEF ddp_result ddp_tp_linear_bias_box(const ddp_tp_linear *linear, int part, ddp_tensor_box *box) {
    return ddp__tp_linear_box(linear, "ddp_tp_linear_bias_box", part, 1, box);
}

//== MLP ================================================================================= >>impl-tp-mlp
/* ddp_tp_mlp: a column linear, the activation, and a row linear. Between them nothing is sent: each rank has
   the hidden features that its weights produce.
       forward     x --column--> h (rows, hidden/t) --activation--> a --row--> y         saved = [h | a]
       backward    dx <-column-- dh <--------------activation------ da <-row-- dy        workspace: [da | dh]
   Gated: h and dh have 2 hidden/t columns, the gate and the up projection. Otherwise dh overwrites da. */

struct ddp_tp_mlp {
    ddp_tp_mlp_desc desc;
    ddp_tp_linear column, row;
    size_t grad_offset; /* of da and dh in the workspace, after the part that the linears use */
};

static int ddp__tp_mlp_gated(const ddp_tp_mlp *m) { return m->desc.activation == DDP_TP_SILU_GATED; }

/* Initialises the two linears. *bytes: of the workspace, with da and dh. */
static ddp_result ddp__tp_mlp_init(ddp_tp_mlp *m, ddp_tp *tp, const char *call, size_t *bytes) {
    const ddp_tp_mlp_desc *d = &m->desc;
    size_t column_bytes = 0, row_bytes = 0;
    DDP_CHECK(call, tp->group, d->channels > 0 && d->hidden > 0 && d->hidden <= INT64_C(1) << 46,
              "channels=%lld hidden=%lld; use positive numbers", (long long)d->channels,
              (long long)d->hidden);
    DDP_CHECK(call, tp->group,
              d->activation == DDP_TP_GELU || d->activation == DDP_TP_RELU
                  || d->activation == DDP_TP_SILU_GATED,
              "activation=%d is not a ddp_tp_activation; use DDP_TP_GELU, DDP_TP_RELU or DDP_TP_SILU_GATED",
              (int)d->activation);
    m->column.tp = m->row.tp = tp;
    m->column.desc.split = DDP_TP_COLUMN;
    m->column.desc.in_features = m->row.desc.out_features = d->channels;
    m->column.desc.out_features = ddp__tp_mlp_gated(m) ? 2 * d->hidden : d->hidden;
    m->column.desc.no_bias = m->row.desc.no_bias = d->no_bias;
    m->row.desc.split = DDP_TP_ROW;
    m->row.desc.in_features = d->hidden;
    if (ddp__tp_mlp_gated(m)) {
        m->column.part_count = 2;
        m->column.part[0] = m->column.part[1] = d->hidden;
    }
    DDP_TRY(ddp__tp_linear_init(&m->column, call, &column_bytes));
    DDP_TRY(ddp__tp_linear_init(&m->row, call, &row_bytes));
    m->grad_offset = ddp_round_up(column_bytes > row_bytes ? column_bytes : row_bytes, 64);
    *bytes = ddp__tp_add_bytes(m->grad_offset, ddp__tp_bytes(tp->desc.max_rows, m->row.max_local,
                                                             (ddp__tp_mlp_gated(m) ? 3 : 1) * tp->size));
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_mlp_create(ddp_tp_mlp **out, ddp_tp *tp, const ddp_tp_mlp_desc *desc) {
    DDP_PUBLIC_CALL(ddp_tp_mlp_create);
    char fields[160];
    ddp_tp_mlp layer = DDP_ZERO;
    ddp_result result;
    void *created;
    size_t bytes = 0;
    if (out) *out = NULL;
    if (!out || !tp) return ddp_fail(DDP_ERR_INVALID, "%s: %s is NULL", __func__, out ? "tp" : "out");
    if (desc) layer.desc = *desc;
    if (!desc)
        result = ddp_fail_in(DDP_ERR_INVALID, __func__, tp->group, "desc is NULL");
    else
        result = ddp__tp_mlp_init(&layer, tp, __func__, &bytes);
    snprintf(fields, sizeof fields, "channels=%lld hidden=%lld activation=%d no_bias=%d",
             (long long)layer.desc.channels, (long long)layer.desc.hidden, (int)layer.desc.activation,
             layer.desc.no_bias != 0);
    result = ddp__tp_finish_create(tp, __func__, result, fields, bytes, &layer, sizeof layer, &created);
    *out = (ddp_tp_mlp *)created;
    return result;
}

DDPDEF void ddp_tp_mlp_destroy(ddp_tp_mlp *mlp) {
    if (mlp) ddp_host_free(mlp->column.tp->group, mlp);
}

DDPDEF size_t ddp_tp_mlp_saved_count(const ddp_tp_mlp *mlp, int64_t rows) {
    return mlp && rows > 0 ? (size_t)rows * (size_t)(mlp->column.local_out + mlp->row.local_in) : 0;
}

DDPDEF ddp_tp_linear *ddp_tp_mlp_linear(ddp_tp_mlp *mlp, int which) {
    if (!mlp || which < 0 || which > 1) return NULL;
    return which ? &mlp->row : &mlp->column;
}

static ddp_result ddp__tp_mlp_check(const ddp_tp_mlp *m, const char *call, const void *const weights[4],
                                    const void *x, const void *saved, int64_t rows, const char *y_name,
                                    const void *y) {
    const ddp_tp *tp = m->column.tp;
    DDP_CHECK(call, tp->group, weights, "weights is NULL");
    DDP_TRY(ddp__tp_linear_check(&m->column, call, weights[0], x, rows, "saved", saved));
    return ddp__tp_linear_check(&m->row, call, weights[2], saved, rows, y_name, y);
}

/* saved: the output of the column linear, (rows, column.local_out), then that of the activation, (rows,
   row.local_in). */
DDPDEF ddp_result ddp_tp_mlp_forward(ddp_tp_mlp *mlp, const void *const weights[4], const void *x,
                                     int64_t rows, void *saved, void *y) {
    DDP_PUBLIC_CALL(ddp_tp_mlp_forward);
    if (!mlp) return ddp_fail(DDP_ERR_INVALID, "%s: mlp is NULL", __func__);
    ddp_tp *tp = mlp->column.tp;
    DDP_TRY(ddp__tp_mlp_check(mlp, __func__, weights, x, saved, rows, "y", y));
    DDP_CHECK(__func__, tp->group,
              (!weights[1] == !!mlp->desc.no_bias || !mlp->column.local_out)
                  && !weights[3] == !!mlp->desc.no_bias,
              "biases are %s and %s, but no_bias=%d", weights[1] ? "given" : "NULL",
              weights[3] ? "given" : "NULL", mlp->desc.no_bias);
    void *act = ddp__tp_at(tp, saved, rows * mlp->column.local_out);
    DDP_TRY(ddp__tp_linear_forward(&mlp->column, weights[0], weights[1], x, rows, saved));
    DDP_TRY(ddp__tp_poison_on_error(
        tp, tp->kernels->activate(mlp->desc.activation, rows, mlp->row.local_in, saved, act)));
    return ddp__tp_linear_forward(&mlp->row, weights[2], weights[3], act, rows, y);
}

DDPDEF ddp_result ddp_tp_mlp_backward(ddp_tp_mlp *mlp, const void *const weights[4], const void *x,
                                      const void *saved, const void *dy, int64_t rows, void *dx,
                                      void *const grads[4]) {
    DDP_PUBLIC_CALL(ddp_tp_mlp_backward);
    ddp__tp_linear_grads to[2] = {{0, NULL, NULL}, {0, NULL, NULL}};
    if (!mlp) return ddp_fail(DDP_ERR_INVALID, "%s: mlp is NULL", __func__);
    ddp_tp *tp = mlp->column.tp;
    DDP_TRY(ddp__tp_mlp_check(mlp, __func__, weights, x, saved, rows, "dy", dy));
    for (int i = 0; i < 2 && grads; i++) {
        const ddp__tp_linear_grads given = {1, grads[2 * i], grads[2 * i + 1]};
        to[i] = given;
        DDP_CHECK(
            __func__, tp->group, (given.weight && !given.bias == !!mlp->desc.no_bias) || !mlp->row.local_in,
            "grads[%d] is %s and grads[%d] is %s, but no_bias=%d", 2 * i, given.weight ? "given" : "NULL",
            2 * i + 1, given.bias ? "given" : "NULL", mlp->desc.no_bias);
    }
    void *d_act = tp->workspace + mlp->grad_offset;
    void *d_in = ddp__tp_mlp_gated(mlp) ? ddp__tp_at(tp, d_act, rows * mlp->row.local_in) : d_act;
    DDP_TRY(ddp__tp_linear_backward(
        &mlp->row, weights[2], ddp__tp_at(tp, saved, rows * mlp->column.local_out), dy, rows, d_act, &to[1]));
    DDP_TRY(
        ddp__tp_poison_on_error(tp, tp->kernels->activate_backward(mlp->desc.activation, rows,
                                                                   mlp->row.local_in, saved, d_act, d_in)));
    return ddp__tp_linear_backward(&mlp->column, weights[0], x, d_in, rows, dx, &to[0]);
}

//== embedding and cross-entropy ======================================================= >>impl-tp-vocab
/* Vocabulary-parallel layers, as in Megatron-LM. Rank r has the rows of the embedding table, and the columns
   of the logits, for words [first, first + count).

     embedding       each rank looks up its own words, the others are rows of zeros. The sum is the output:
                     all-reduce, or reduce-scatter of rows in sequence parallelism.
                         tokens  7 2 5       rank 0 (words 0 to 3)  [ 0  e2  0 ]     sum  [ e7 e2 e5 ]
                                             rank 1 (words 4 to 7)  [ e7  0  e5]
     cross-entropy   all-reduce MAX of the largest logits, then one all-reduce SUM of the exponentials and of
                     the targets' logits. See the kernel loss_max. */

struct ddp_tp_embedding {
    ddp_tp *tp;
    ddp_tp_embedding_desc desc; /* with padded_vocab resolved */
    int64_t first, count;       /* this rank's rows of the table */
};

static ddp_result ddp__tp_embedding_resolve(ddp_tp_embedding *e, const char *call,
                                            const ddp_tp_embedding_desc *desc) {
    const ddp_tp *tp = e->tp;
    ddp_tp_embedding_desc *d = &e->desc;
    DDP_CHECK(call, tp->group, desc, "desc is NULL");
    *d = *desc;
    if (d->padded_vocab == 0) d->padded_vocab = d->vocab;
    DDP_CHECK(call, tp->group, d->vocab > 0 && d->channels > 0,
              "vocab=%lld, channels=%lld; use positive numbers", (long long)d->vocab, (long long)d->channels);
    DDP_CHECK(call, tp->group, d->padded_vocab >= d->vocab, "padded_vocab=%lld is less than vocab=%lld",
              (long long)d->padded_vocab, (long long)d->vocab);
    DDP_CHECK(call, tp->group, ddp__tp_bytes(d->padded_vocab, d->channels, tp->size) != SIZE_MAX,
              "%lld rows of %lld channels do not fit in memory", (long long)d->padded_vocab,
              (long long)d->channels);
    e->count = ddp__tensor_shard_range(d->padded_vocab, tp->rank, tp->world_size, &e->first);
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_embedding_create(ddp_tp_embedding **out, ddp_tp *tp,
                                          const ddp_tp_embedding_desc *desc) {
    DDP_PUBLIC_CALL(ddp_tp_embedding_create);
    ddp_tp_embedding layer = DDP_ZERO;
    char fields[160];
    void *created;
    if (out) *out = NULL;
    if (!out || !tp)
        return ddp_fail(DDP_ERR_INVALID, "ddp_tp_embedding_create: %s is NULL", out ? "tp" : "out");
    layer.tp = tp;
    ddp_result result = ddp__tp_embedding_resolve(&layer, __func__, desc);
    size_t bytes = ddp__tp_shards_rows(tp) ? ddp__tp_bytes(tp->desc.max_rows, layer.desc.channels, tp->size)
                                           : 0;
    snprintf(fields, sizeof fields, "vocab=%lld padded_vocab=%lld channels=%lld", (long long)layer.desc.vocab,
             (long long)layer.desc.padded_vocab, (long long)layer.desc.channels);
    result = ddp__tp_finish_create(tp, __func__, result, fields, bytes, &layer, sizeof layer, &created);
    *out = (ddp_tp_embedding *)created;
    return result;
}

DDPDEF void ddp_tp_embedding_destroy(ddp_tp_embedding *embedding) {
    if (embedding) ddp_host_free(embedding->tp->group, embedding);
}

DDPDEF ddp_result ddp_tp_embedding_box(const ddp_tp_embedding *embedding, ddp_tensor_box *box) {
    ddp_tensor_box b = DDP_ZERO;
    if (!embedding || !box)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s is NULL", __func__, embedding ? "box" : "embedding");
    b.ndim = 2;
    b.global_shape[0] = embedding->desc.padded_vocab;
    b.global_shape[1] = b.shape[1] = embedding->desc.channels;
    b.offset[0] = embedding->first;
    b.shape[0] = embedding->count;
    *box = b;
    return DDP_OK;
}

/* Rows and tokens are the same on every rank. Therefore an error occurs on all ranks, or on none. */
static ddp_result ddp__tp_embedding_check(const ddp_tp_embedding *embedding, const char *call,
                                          const int32_t *tokens, int64_t rows) {
    const ddp_tp *tp = embedding->tp;
    DDP_TRY(ddp__tp_check_rows(tp, call, rows));
    DDP_CHECK(call, tp->group, tokens || rows == 0, "tokens is NULL");
    for (int64_t i = 0; i < rows; i++)
        DDP_CHECK(call, tp->group, tokens[i] >= 0 && tokens[i] < embedding->desc.vocab,
                  "tokens[%lld]=%d; use 0 to %lld", (long long)i, (int)tokens[i],
                  (long long)embedding->desc.vocab - 1);
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_embedding_forward(ddp_tp_embedding *embedding, const void *weight,
                                           const int32_t *tokens, int64_t rows, void *y) {
    DDP_PUBLIC_CALL(ddp_tp_embedding_forward);
    if (!embedding) return ddp_fail(DDP_ERR_INVALID, "%s: embedding is NULL", __func__);
    ddp_tp *tp = embedding->tp;
    int64_t channels = embedding->desc.channels;
    const ddp_lookup op = {rows,
                           channels,
                           tokens,
                           embedding->first,
                           embedding->count,
                           weight,
                           ddp__tp_shards_rows(tp) ? tp->workspace : y};
    DDP_TRY(ddp__tp_embedding_check(embedding, __func__, tokens, rows));
    if (rows == 0) return DDP_OK;
    DDP_CHECK(__func__, tp->group, y && (weight || embedding->count == 0), "%s is NULL", y ? "weight" : "y");
    DDP_TRY(ddp_device_begin(tp->group));
    DDP_TRY(ddp__tp_poison_on_error(tp, tp->kernels->lookup(&op)));
    if (ddp__tp_shards_rows(tp))
        return ddp__tp_reduce_scatter(tp, tp->workspace, y, (size_t)(rows / tp->world_size * channels), NULL);
    return ddp__tp_all_reduce(tp, y, (size_t)(rows * channels), DDP_OP_SUM, NULL);
}

DDPDEF ddp_result ddp_tp_embedding_backward(ddp_tp_embedding *embedding, const int32_t *tokens,
                                            const void *dy, int64_t rows, void *weight_grad) {
    if (!embedding) return ddp_fail(DDP_ERR_INVALID, "%s: embedding is NULL", __func__);
    ddp_tp *tp = embedding->tp;
    int64_t channels = embedding->desc.channels;
    const ddp_lookup op = {rows,
                           channels,
                           tokens,
                           embedding->first,
                           embedding->count,
                           ddp__tp_shards_rows(tp) ? tp->workspace : dy,
                           weight_grad};
    DDP_TRY(ddp__tp_embedding_check(embedding, __func__, tokens, rows));
    DDP_CHECK(__func__, tp->group, (dy || rows == 0) && (weight_grad || embedding->count == 0), "%s is NULL",
              dy || rows == 0 ? "weight_grad" : "dy");
    DDP_TRY(ddp_device_begin(tp->group));
    if (ddp__tp_shards_rows(tp) && rows)
        DDP_TRY(ddp__tp_all_gather(tp, dy, tp->workspace, (size_t)(rows / tp->world_size * channels), NULL));
    if (!tp->desc.accumulate_grads && embedding->count)
        tp->device->fill_zero(weight_grad, (size_t)(embedding->count * channels) * tp->size);
    DDP_TRY(ddp__tp_poison_on_error(tp, tp->kernels->lookup_backward(&op)));
    return ddp_device_check(tp->group);
}

/* The arguments are the same on every rank, and therefore errors are too. *counted_rows: rows that are not
   ignored. */
static ddp_result ddp__tp_loss_check(const ddp_tp *tp, const char *call, const ddp_tp_loss_desc *desc,
                                     const int32_t *targets, int64_t rows, int64_t *counted_rows) {
    int64_t ignore = desc->ignore_index ? desc->ignore_index : -100;
    DDP_CHECK(call, tp->group, desc->vocab > 0, "vocab=%lld; use a positive number", (long long)desc->vocab);
    DDP_CHECK(call, tp->group, desc->padded_vocab == 0 || desc->padded_vocab >= desc->vocab,
              "padded_vocab=%lld is less than vocab=%lld", (long long)desc->padded_vocab,
              (long long)desc->vocab);
    DDP_CHECK(call, tp->group, desc->z_loss >= 0 && desc->z_loss < (double)INFINITY,
              "z_loss=%g; use 0 or more", desc->z_loss);
    DDP_CHECK(call, tp->group, desc->scale > -(double)INFINITY && desc->scale < (double)INFINITY,
              "scale=%g; use a finite number", desc->scale);
    DDP_TRY(ddp__tp_check_rows(tp, call, rows));
    DDP_CHECK(call, tp->group, targets || rows == 0, "targets is NULL");
    *counted_rows = 0;
    for (int64_t i = 0; i < rows; i++) {
        if (targets[i] == ignore) continue;
        ++*counted_rows;
        DDP_CHECK(call, tp->group, targets[i] >= 0 && targets[i] < desc->vocab,
                  "targets[%lld]=%d; use 0 to %lld, or ignore_index=%lld", (long long)i, (int)targets[i],
                  (long long)desc->vocab - 1, (long long)ignore);
    }
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_cross_entropy(ddp_tp *tp, const ddp_tp_loss_desc *desc, const void *logits,
                                       const int32_t *targets, int64_t rows, void *losses, double *mean,
                                       void *dlogits) {
    DDP_PUBLIC_CALL(ddp_tp_cross_entropy);
    ddp_loss op = DDP_ZERO;
    double total = 0;
    int64_t counted_rows = 0;
    if (!tp || !desc) return ddp_fail(DDP_ERR_INVALID, "%s: %s is NULL", __func__, tp ? "desc" : "tp");
    DDP_TRY(ddp__tp_loss_check(tp, __func__, desc, targets, rows, &counted_rows));
    op.rows = rows;
    op.columns = ddp__tensor_shard_range(desc->padded_vocab ? desc->padded_vocab : desc->vocab, tp->rank,
                                         tp->world_size, &op.first);
    if (op.first < desc->vocab)
        op.count = desc->vocab - op.first < op.columns ? desc->vocab - op.first : op.columns;
    op.targets = targets;
    op.ignore = desc->ignore_index ? desc->ignore_index : -100;
    op.z_loss = desc->z_loss;
    op.scale = desc->scale;
    if (op.scale == 0 && counted_rows) op.scale = 1 / (double)counted_rows;
    op.total = mean ? &total : NULL;
    op.logits = logits;
    op.max = tp->workspace;                            /* (rows) */
    op.sums = tp->workspace + (size_t)rows * tp->size; /* (2, rows) */
    op.dlogits = dlogits;
    op.losses = losses;
    DDP_CHECK(__func__, tp->group, logits || rows == 0 || op.columns == 0, "logits is NULL");
    if (mean) *mean = 0;
    if (rows == 0) return DDP_OK;
    DDP_TRY(ddp_device_begin(tp->group));
    DDP_TRY(ddp__tp_poison_on_error(tp, tp->kernels->loss_max(&op)));
    DDP_TRY(ddp__tp_all_reduce(tp, op.max, (size_t)rows, DDP_OP_MAX, NULL));
    DDP_TRY(ddp__tp_poison_on_error(tp, tp->kernels->loss_sum(&op)));
    DDP_TRY(ddp__tp_all_reduce(tp, op.sums, 2 * (size_t)rows, DDP_OP_SUM, NULL));
    DDP_TRY(ddp__tp_poison_on_error(tp, tp->kernels->loss_end(&op)));
    /* the host has waited for the device, meanwhile the group may have failed */
    if (mean) DDP_TRY(ddp_group_status(tp->group));
    if (mean && counted_rows) *mean = total / (double)counted_rows;
    return ddp__tp_poison_on_error(tp, ddp_device_check(tp->group));
}

//== norms ============================================================================== >>impl-tp-norm
/* Layer norm and RMS norm of the last dimension. In sequence parallelism every rank normalises other rows, so
   the gradients of weight and bias are summed over the ranks. */

struct ddp_tp_layer_norm {
    ddp_tp *tp;
    ddp_tp_layer_norm_desc desc; /* with eps resolved */
};

static ddp_result ddp__tp_norm_resolve(const ddp_tp *tp, const char *call, const ddp_tp_layer_norm_desc *desc,
                                       ddp_tp_layer_norm_desc *d) {
    DDP_CHECK(call, tp->group, desc, "desc is NULL");
    *d = *desc;
    d->rms = d->rms != 0;
    DDP_CHECK(call, tp->group, d->channels > 0 && ddp__tp_bytes(2, d->channels, tp->size) != SIZE_MAX,
              "channels=%lld; use the number of elements of a row", (long long)d->channels);
    DDP_CHECK(call, tp->group, d->eps >= 0 && d->eps < (double)INFINITY, "eps=%g; use 0 or more", d->eps);
    if (d->eps == 0) d->eps = 1e-5;
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_layer_norm_create(ddp_tp_layer_norm **out, ddp_tp *tp,
                                           const ddp_tp_layer_norm_desc *desc) {
    DDP_PUBLIC_CALL(ddp_tp_layer_norm_create);
    ddp_tp_layer_norm layer = DDP_ZERO;
    const ddp_tp_layer_norm_desc *d = &layer.desc;
    char fields[160];
    void *created;
    if (out) *out = NULL;
    if (!out || !tp)
        return ddp_fail(DDP_ERR_INVALID, "ddp_tp_layer_norm_create: %s is NULL", out ? "tp" : "out");
    layer.tp = tp;
    ddp_result result = ddp__tp_norm_resolve(tp, __func__, desc, &layer.desc);
    snprintf(fields, sizeof fields, "channels=%lld rms=%d eps=%.17g", (long long)d->channels, d->rms, d->eps);
    result = ddp__tp_finish_create(tp, __func__, result, fields, ddp__tp_bytes(2, d->channels, tp->size),
                                   &layer, sizeof layer, &created);
    *out = (ddp_tp_layer_norm *)created;
    return result;
}

DDPDEF void ddp_tp_layer_norm_destroy(ddp_tp_layer_norm *norm) {
    if (norm) ddp_host_free(norm->tp->group, norm);
}

static ddp_result ddp__tp_norm_check(const ddp_tp_layer_norm *norm, const char *call, const void *weight,
                                     const void *x, int64_t rows, const void *stats) {
    const ddp_tp *tp = norm->tp;
    int64_t max_rows = ddp__tp_local_rows(tp, tp->desc.max_rows);
    DDP_CHECK(call, tp->group, rows >= 0 && rows <= max_rows,
              "rows=%lld; use 0 to %lld on this rank, as max_rows allows", (long long)rows,
              (long long)max_rows);
    DDP_CHECK(call, tp->group, weight, "weight is NULL");
    DDP_CHECK(call, tp->group, (x && stats) || rows == 0, "%s is NULL", x ? "stats" : "x");
    return DDP_OK;
}

DDPDEF ddp_result ddp_tp_layer_norm_forward(ddp_tp_layer_norm *norm, const void *weight, const void *bias,
                                            const void *x, int64_t rows, void *stats, void *y) {
    if (!norm) return ddp_fail(DDP_ERR_INVALID, "%s: norm is NULL", __func__);
    DDP_TRY(ddp__tp_norm_check(norm, __func__, weight, x, rows, stats));
    DDP_CHECK(__func__, norm->tp->group, y || rows == 0, "y is NULL");
    DDP_CHECK(__func__, norm->tp->group, !norm->desc.rms == !!bias, "%s",
              norm->desc.rms ? "bias is given, but RMSNorm has none; pass NULL" : "bias is NULL");
    const ddp_norm op = {rows, norm->desc.channels, norm->desc.rms, norm->desc.eps, x, weight, bias, stats,
                         y};
    DDP_TRY(ddp_device_begin(norm->tp->group));
    return ddp__tp_poison_on_error(norm->tp, norm->tp->kernels->norm(&op));
}

/* The gradients are summed in the workspace first: over the rows, then over the ranks. Only the result is
   written or added to the caller's gradients. */
DDPDEF ddp_result ddp_tp_layer_norm_backward(ddp_tp_layer_norm *norm, const void *weight, const void *x,
                                             const void *stats, const void *dy, int64_t rows, void *dx,
                                             void *weight_grad, void *bias_grad) {
    DDP_PUBLIC_CALL(ddp_tp_layer_norm_backward);
    if (!norm) return ddp_fail(DDP_ERR_INVALID, "%s: norm is NULL", __func__);
    ddp_tp *tp = norm->tp;
    int64_t n = norm->desc.channels;
    size_t bytes = (size_t)n * tp->size;
    const ddp_norm_backward op = {
        rows, n, norm->desc.rms, x, weight, stats, dy, dx, weight_grad ? tp->workspace : NULL};
    DDP_TRY(ddp__tp_norm_check(norm, __func__, weight, x, rows, stats));
    DDP_CHECK(__func__, tp->group, dy || rows == 0, "dy is NULL");
    DDP_CHECK(__func__, tp->group, !!bias_grad == (weight_grad && !norm->desc.rms), "%s",
              norm->desc.rms ? "bias_grad is given, but RMSNorm has no bias; pass NULL"
                             : "one of weight_grad and bias_grad is NULL; pass both, or neither");
    DDP_TRY(ddp_device_begin(tp->group));
    if (weight_grad) tp->device->fill_zero(tp->workspace, 2 * bytes);
    DDP_TRY(ddp__tp_poison_on_error(tp, tp->kernels->norm_backward(&op)));
    if (!weight_grad) return DDP_OK;
    if (ddp__tp_shards_rows(tp))
        DDP_TRY(
            ddp__tp_all_reduce(tp, tp->workspace, (size_t)(norm->desc.rms ? n : 2 * n), DDP_OP_SUM, NULL));
    for (int i = 0; i < (bias_grad ? 2 : 1); i++) {
        void *grad = i ? bias_grad : weight_grad, *from = tp->workspace + (size_t)i * bytes;
        if (!tp->desc.accumulate_grads)
            tp->device->copy(grad, from, bytes);
        else
            tp->device->add(grad, grad, from, (size_t)n, tp->desc.dtype);
    }
    return ddp__tp_poison_on_error(tp, ddp_device_check(tp->group));
}

//== random numbers =================================================================== >>impl-tp-random
/* ddp_tp_dropout and ddp_tensor_init_normal. The random number of an element depends only on its position
   in the global tensor, not on the number of ranks. */

DDPDEF ddp_result ddp_tp_dropout(ddp_tp *tp, const ddp_tp_dropout_desc *desc, const void *x, int64_t rows,
                                 int64_t columns, void *y) {
    int64_t end;
    if (!tp || !desc) return ddp_fail(DDP_ERR_INVALID, "ddp_tp_dropout: %s is NULL", tp ? "desc" : "tp");
    DDP_CHECK(__func__, tp->group, desc->rate >= 0 && desc->rate < 1, "rate=%g; use 0 or more and below 1",
              desc->rate);
    DDP_CHECK(__func__, tp->group, rows >= 0 && columns >= 0, "rows=%lld, columns=%lld; use 0 or more",
              (long long)rows, (long long)columns);
    DDP_CHECK(__func__, tp->group, (x && y) || rows == 0 || columns == 0, "%s is NULL", x ? "y" : "x");
    const int64_t width = desc->columns ? desc->columns : columns;
    DDP_CHECK(__func__, tp->group,
              desc->first_row >= 0 && desc->first_column >= 0 && columns <= width
                  && desc->first_column <= width - columns,
              "%lld columns from first_column=%lld, first_row=%lld are outside an activation of %lld columns",
              (long long)columns, (long long)desc->first_column, (long long)desc->first_row,
              (long long)width);
    DDP_CHECK(__func__, tp->group,
              !__builtin_add_overflow(desc->first_row, rows, &end)
                  && !__builtin_mul_overflow(end, width, &end),
              "%lld rows from first_row=%lld of %lld columns have more than 2^63 elements", (long long)rows,
              (long long)desc->first_row, (long long)width);
    const int64_t first = desc->first_row * width + desc->first_column; /* fits, as checked above */
    ddp_dropout op = {
        rows, columns, first, width, desc->key, (uint32_t)(desc->rate * 4294967296.0), 1 / (1 - desc->rate),
        x,    y};
    if (columns == width) { /* one long row */
        op.columns *= rows;
        op.rows = rows > 0;
    }
    DDP_TRY(ddp_device_begin(tp->group));
    if (desc->rate > 0) return ddp__tp_poison_on_error(tp, tp->kernels->dropout(&op));
    if (x != y && rows && columns) tp->device->copy(y, x, (size_t)rows * (size_t)columns * tp->size);
    return ddp_device_check(tp->group);
}

/* A standard normal value for one element, from u in (0, 1] and v in [0, 1) with 53 bits each (Box and Muller
   1958). */
static double ddp__tp_normal(uint64_t key, uint64_t index) {
    const double unit = 1.0 / 9007199254740992.0; /* 2^-53 */
    uint32_t w[4] = {(uint32_t)index, (uint32_t)(index >> 32), DDP__TP_STREAM_NORMAL, 0};
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u)
        ddp__tp_philox_round(&w[0], &w[1], &w[2], &w[3], k0, k1);
    double u = (double)((((uint64_t)w[0] << 32 | w[1]) >> 11) + 1) * unit,
           v = (double)(((uint64_t)w[2] << 32 | w[3]) >> 11) * unit;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* Fills the box row by row of its last dimension. `element` is the position of a row's first element in the
   global tensor. */
static void ddp__tp_init_rows(const ddp_tensor_box *b, ddp_dtype dtype, uint64_t key, double mean,
                              double deviation, void *out, size_t count) {
    int last = b->ndim - 1;
    int64_t index_in_box[DDP_MAX_NDIM] = {0}, row = b->ndim ? b->shape[last] : 1;
    for (size_t done = 0; done < count; done += (size_t)row) {
        uint64_t element = 0;
        for (int d = 0; d < b->ndim; d++)
            element = element * (uint64_t)b->global_shape[d] + (uint64_t)(b->offset[d] + index_in_box[d]);
        for (size_t j = 0; j < (size_t)row; j++) {
            double value = mean + deviation * ddp__tp_normal(key, element + j);
            if (dtype == DDP_F32)
                ((float *)out)[done + j] = (float)value;
            else
                ((double *)out)[done + j] = value;
        }
        for (int d = last - 1; d >= 0 && ++index_in_box[d] == b->shape[d]; d--) index_in_box[d] = 0;
    }
}

DDPDEF ddp_result ddp_tensor_init_normal(const ddp_tensor_box *box, ddp_dtype dtype, uint64_t key,
                                         double mean, double deviation, void *out) {
    const char *call = "ddp_tensor_init_normal";
    uint64_t whole = 1;
    size_t count = 1;
    if (!box) return ddp_fail(DDP_ERR_INVALID, "%s: box is NULL", call);
    if (box->ndim < 0 || box->ndim > DDP_MAX_NDIM)
        return ddp_fail(DDP_ERR_INVALID, "%s: ndim=%d; use 0 to %d", call, box->ndim, DDP_MAX_NDIM);
    if (dtype != DDP_F32 && dtype != DDP_F64)
        return ddp_fail(DDP_ERR_INVALID, "%s: dtype=%s (%d); use f32 or f64", call, ddp_dtype_name(dtype),
                        (int)dtype);
    for (int d = 0; d < box->ndim; d++) {
        long long all = (long long)box->global_shape[d], first = (long long)box->offset[d],
                  n = (long long)box->shape[d];
        if (all < 0 || first < 0 || n < 0 || first > all || n > all - first)
            return ddp_fail(DDP_ERR_INVALID,
                            "%s: dimension %d: entries [%lld, %lld + %lld) are outside a size of %lld", call,
                            d, first, first, n, all);
        if (__builtin_mul_overflow(whole, (uint64_t)all, &whole) || whole > (uint64_t)INT64_MAX)
            return ddp_fail(DDP_ERR_INVALID, "%s: global_shape has more than 2^63 elements", call);
        count *= (size_t)n;
    }
    if (!(deviation >= 0) || !isfinite(deviation) || !isfinite(mean))
        return ddp_fail(DDP_ERR_INVALID,
                        "%s: mean=%g deviation=%g; use finite numbers, and a deviation of 0 or more", call,
                        mean, deviation);
    if (!out && count) return ddp_fail(DDP_ERR_INVALID, "%s: out is NULL", call);
    ddp__tp_init_rows(box, dtype, key, mean, deviation, out, count);
    return DDP_OK;
}

//== public: tensors as text ============================================================= >>impl-public
/* ddp_tensor_print: a summary of a tensor as text. The other public calls are in the sections above. */

/* Appends text to a summary. ddp_tensor_print never writes more than its size. */
static void ddp__tensor_append(char summary[2048], const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void ddp__tensor_append(char summary[2048], const char *format, ...) {
    size_t used = strlen(summary);
    va_list args;
    va_start(args, format);
    vsnprintf(summary + used, 2048 - used, format, args);
    va_end(args);
}

static void ddp__tensor_append_value(char summary[2048], ddp_dtype dtype, const unsigned char *bits) {
    ddp__tensor_element element;
    double value;
    memcpy(&element, bits, ddp_dtype_size(dtype));
    switch (dtype) {
    case DDP_I8: ddp__tensor_append(summary, " %11d", element.i8); break;
    case DDP_U8: ddp__tensor_append(summary, " %11d", element.u8); break;
    case DDP_I32: ddp__tensor_append(summary, " %11ld", (long)element.i32); break;
    case DDP_I64: ddp__tensor_append(summary, " %11lld", (long long)element.i64); break;
    case DDP_U64: ddp__tensor_append(summary, " %11llu", (unsigned long long)element.u64); break;
    default:
        ddp_device_cpu()->cast(&value, DDP_F64, bits, dtype, 1);
        ddp__tensor_append(summary, " %11.5g", value);
    }
}

DDPDEF ddp_result ddp_tensor_print(ddp_group *group, const ddp_tensor *tensor, ddp_placement placement,
                                   char *text, size_t *size_bytes) {
    unsigned char bits[64];
    char summary[2048] = "";
    ddp__tensor_text shape;
    DDP_TRY(ddp__tensor_check(__func__, group, "tensor", tensor, 1));
    if (placement < DDP_PARTIAL || placement > tensor->ndim)
        return DDP__TENSOR_INVALID(group, "%s is invalid for a tensor of shape %s",
                                   ddp_placement_name(placement),
                                   ddp__tensor_shape(tensor->ndim, tensor->shape, &shape));
    if (!size_bytes) return DDP__TENSOR_INVALID(group, "size_bytes is NULL");
    size_t size = ddp_dtype_size(tensor->dtype), length;
    int n = tensor->ndim;
    int64_t rows = n > 1 ? tensor->shape[n - 2] : 1;
    int64_t columns = n > 0 ? tensor->shape[n - 1] : 1;
    int shown_rows = rows < 4 ? (int)rows : 4;
    int shown_columns = columns < 8 ? (int)columns : 8;
    if (group && ddp_world_size(group) > 1)
        ddp__tensor_append(summary, "rank %d/%d ", ddp_rank(group), ddp_world_size(group));
    ddp__tensor_append(summary, "%s %s %s\n", ddp_dtype_name(tensor->dtype),
                       ddp__tensor_shape(n, tensor->shape, &shape), ddp_placement_name(placement));
    if (ddp__tensor_bytes(tensor) == 0) {
        ddp__tensor_append(summary, "  no elements\n");
        shown_rows = 0;
    } else if (n > 2) {
        ddp__tensor_append(summary, "  at [");
        for (int i = 0; i < n - 2; i++) ddp__tensor_append(summary, "0, ");
        ddp__tensor_append(summary, ":%d, :%d]\n", shown_rows, shown_columns);
    }
    DDP_TRY(ddp_device_begin(group));
    for (int row = 0; row < shown_rows; row++) {
        const char *values = (const char *)tensor->data + (size_t)row * (size_t)columns * size;
        ddp__tensor_device(group)->copy(bits, values, (size_t)shown_columns * size);
        for (int i = 0; i < shown_columns; i++)
            ddp__tensor_append_value(summary, tensor->dtype, bits + (size_t)i * size);
        ddp__tensor_append(summary, columns > shown_columns ? " ...\n" : "\n");
    }
    if (shown_rows && rows > shown_rows) ddp__tensor_append(summary, "         ...\n");
    DDP_TRY(ddp_device_check(group));
    length = strlen(summary) + 1;
    if (text && *size_bytes < length) {
        ddp_fail_in(DDP_ERR_INVALID, __func__, group, "*size_bytes=%llu is too small; the text needs %llu",
                    (unsigned long long)*size_bytes, (unsigned long long)length);
        *size_bytes = length;
        return DDP_ERR_INVALID;
    }
    *size_bytes = length;
    if (text) memcpy(text, summary, length);
    return DDP_OK;
}

#ifdef __cplusplus
}
#endif
#undef DDP__TENSOR_BODIES
#endif /* the second part of the bodies */
#endif /* DDP__KERNELS_ONLY */

/*
    MIT License

    Copyright (c) 2026 the ddp authors

    Permission is hereby granted, free of charge, to any person obtaining a copy
    of this software and associated documentation files (the "Software"), to deal
    in the Software without restriction, including without limitation the rights
    to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
    copies of the Software, and to permit persons to whom the Software is
    furnished to do so, subject to the following conditions:

    The above copyright notice and this permission notice shall be included in all
    copies or substantial portions of the Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
    IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
    FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
    AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
    LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
    OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
    SOFTWARE.
*/

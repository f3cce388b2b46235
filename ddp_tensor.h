/*  ddp_tensor.h - tensors that know how they lie across ranks, and tensor-parallel and sequence-parallel layers on them.

    A tensor is whole on every rank, cut along a dimension, or a sum that has yet to be made; one call takes it from any of these to any other by
    the cheapest collective. On that stand the layers of a transformer whose weights are cut over the ranks of a group: forward and backward, explicit
    buffers, no autograd.

USAGE
    #define DDP_IMPLEMENTATION             in exactly one source file of the program: the bodies of ddp.h and of this header
    #include "ddp_tensor.h"
    Or DDP_TENSOR_IMPLEMENTATION for the bodies of this header alone. Link with -lpthread -lm.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp_tensor.h"
    #include <stdio.h>

    static ddp_result rank(ddp_group *group, void *user) {            // columns of a 4 x 6 matrix become rows
        ddp_tensor columns = DDP_ZERO, rows = DDP_ZERO, whole = DDP_ZERO;
        int64_t shape[2] = {4, 6};
        char text[512];
        size_t room = sizeof text;
        if (ddp_tensor_create(group, &whole, DDP_F32, 2, shape) || ddp_tensor_fill(group, &whole, 1)) return DDP_ERR_NO_MEMORY;
        if (ddp_tensor_shard(group, &whole, DDP_SHARD(1), &columns) || ddp_tensor_shard(group, &whole, DDP_SHARD(0), &rows)) return DDP_ERR_INVALID;
        ddp_result result = ddp_tensor_redistribute(group, &columns, DDP_SHARD(1), DDP_SHARD(0), &rows);
        if (!result && ddp_rank(group) == 0 && !ddp_tensor_print(group, &rows, DDP_SHARD(0), text, &room)) puts(text);
        ddp_tensor_free(group, &whole), ddp_tensor_free(group, &columns), ddp_tensor_free(group, &rows);
        return (void)user, result;
    }
    int main(void) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = 2;
        if (ddp_launch(&desc, rank, NULL) != DDP_OK) return puts(ddp_last_error()), 1;
        return 0;
    }

CONTENTS      (search for the tags)
    >>config  >>types  >>descs  >>api  >>impl-structs  >>impl-tensor-memory  >>impl-tensor-boxes  >>impl-tensor-text  >>impl-tensor-npy
    >>impl-tensor-layout  >>impl-tensor-plan  >>impl-tp-context  >>impl-tp-gemm  >>impl-tp-linear  >>impl-tp-mlp  >>impl-tp-embedding  >>impl-tp-loss
    >>impl-tp-norm  >>impl-tp-random  >>impl-public

CONCEPTS
    Placement  how one global tensor lies over the W ranks of a group. REPLICATE: whole on every rank. SHARD(d): dimension d, of n entries, is cut
               into pieces of c = ceil(n / W): rank r has entries [rc, (r+1)c), fewer at the end, or none. PARTIAL: every rank has a summand of its
               shape; the tensor is their sum.
               n = 5, W = 3:    rank 0  [0 1]    rank 1  [2 3]    rank 2  [4]
    Layout     a placement along each axis of a mesh. Axes cut one after the other: SHARD(0) along both of 2 x 2 gives rank (i, j) piece j of piece i.
    Box        a rectangular part of a global tensor: an offset and a shape. What a rank has is one box of it, which is what a checkpoint stores
               (ddp_fsdp_param's global_shape and global_offset are the global shape and this offset).
    Tensor parallelism (Shoeybi et al. 2019): a column linear has rows of W cut (columns of its transpose), so y comes out cut; a row linear takes a
    cut input, and its products add up over the ranks. Between the two nothing is sent:

                   x (M, K) --column--> y (M, N/t) --activation--> --row--> z (M, K), one all-reduce; and one in backward, of dx

    Sequence parallelism (Korthikanti et al. 2022): outside these pairs the M rows (tokens) are cut over the ranks too. The all-reduce becomes a
    reduce-scatter of rows behind the row linear and an all-gather of rows before the column linear, of as many bytes together.
    Overlap    chunk_count pieces of the gather, or the scatter, travel while the product of another piece is computed.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). Shapes that do not fit are told with both sides:
      rank 1/2 ddp_tensor_redistribute group=world: out is (3, 4), but SHARD(0) of (5, 4) on rank 1 of 2 is (2, 4)

CONFIG MACROS (define before including)
    DDP_TENSOR_IMPLEMENTATION   also compile the bodies of this header, here. DDP_IMPLEMENTATION does so too
    DDP_USE_CBLAS               products by cblas_sgemm and cblas_dgemm: include path and -lopenblas (or another CBLAS) are the program's

NOT DONE HERE
    No autograd, no attention (heads are local: any attention works), no strides. Layers compute in host memory; tensors live on the group's device.
*/
#ifndef DDP_TENSOR_H
#define DDP_TENSOR_H

//== config ============================================================================================== >>config
#include "ddp.h"

#ifdef __cplusplus
extern "C" {
#endif

//== types ================================================================================================ >>types

/* How a tensor lies over the ranks of a group. Zero is REPLICATE. Constants, so that they may stand in initialisers. */
typedef int32_t ddp_placement;
#define DDP_REPLICATE ((ddp_placement)0)
#define DDP_PARTIAL ((ddp_placement)-1)
#define DDP_SHARD(dim) ((ddp_placement)(1 + (dim))) /* dim from 0 */

/* A rectangular part of a global tensor. */
typedef struct ddp_tensor_box {
    int ndim;
    int64_t global_shape[DDP_MAX_NDIM], offset[DDP_MAX_NDIM], shape[DDP_MAX_NDIM]; /* [offset, offset + shape) of global_shape */
} ddp_tensor_box;

/* What a redistribution does on this rank. */
typedef struct ddp_tensor_plan {
    const char *collective;    /* "ddp_all_gather_v" and its like, "copy" (no rank sends), or "none"; static text */
    size_t sent_bytes;         /* to other ranks, as a ring sends them: all-reduce 2(W-1)/W of the tensor, all-gather and reduce-scatter (W-1)/W */
    size_t workspace_bytes;    /* taken from the group's allocator while it runs */
} ddp_tensor_plan;

typedef struct ddp_tp ddp_tp;                     /* what the layers of a model share on a tensor group: products, workspace, counters */
typedef struct ddp_tp_linear ddp_tp_linear;
typedef struct ddp_tp_mlp ddp_tp_mlp;
typedef struct ddp_tp_embedding ddp_tp_embedding;
typedef struct ddp_tp_layer_norm ddp_tp_layer_norm;

/* c (m, n) = op(a) op(b), or added to it. Row-major; lda, ldb, ldc elements from row to row. op(a) is (m, k): a is (m, k), or (k, m) with trans_a;
   op(b) is (k, n): b is (k, n), or (n, k) with trans_b. m, n and k may be 0. */
typedef struct ddp_gemm {
    int64_t m, n, k, lda, ldb, ldc;
    const void *a, *b;
    void *c;
    ddp_dtype dtype;            /* DDP_F32 or DDP_F64 */
    int trans_a, trans_b, accumulate;
} ddp_gemm;
typedef ddp_result (*ddp_gemm_fn)(const ddp_gemm *gemm, void *user);

//== descs ================================================================================================ >>descs

/* A global tensor over the axes of a mesh, or over one group. */
typedef struct ddp_tensor_layout {
    int ndim;                                 /* of the global tensor; 0 is one element */
    int64_t shape[DDP_MAX_NDIM];              /* global */
    int axis_count;                           /* 0 = the tensor is this rank's alone */
    ddp_group *axes[DDP_MAX_NDIM];            /* the mesh's groups, outermost first; the same on every rank */
    ddp_placement placement[DDP_MAX_NDIM];    /* along each axis; 0 = replicate */
} ddp_tensor_layout;

typedef struct ddp_tp_desc {
    ddp_dtype dtype;          /* 0 = DDP_F32; or DDP_F64: of activations, weights and gradients */
    int64_t max_rows;         /* required; M, rows (tokens of all sequences) of a whole activation, at most */
    int sequence_parallel;    /* 1 = activations between the pairs are cut by rows; M is then a multiple of the ranks */
    int chunk_count;          /* 0 = 1, no overlap; otherwise rows travel in so many pieces while others are multiplied */
    int accumulate_grads;     /* 1 = backward adds to gradients of weights; 0 = it overwrites them */
    ddp_gemm_fn gemm;         /* NULL = CBLAS with DDP_USE_CBLAS, otherwise a built-in kernel for one core */
    void *gemm_user;
} ddp_tp_desc;

/* Which counts of a context have moved since it was made, or since ddp_tp_reset_stats. */
typedef struct ddp_tp_stats {
    uint64_t collectives;
    uint64_t elements_sent;   /* by this rank, as a ring sends them */
    double comm_seconds;      /* blocked in collectives: what compute did not hide */
    size_t workspace_bytes;
} ddp_tp_stats;

typedef enum ddp_tp_split { DDP_TP_COLUMN = 0, DDP_TP_ROW } ddp_tp_split;

/* y = x W' + b, W (out_features, in_features) as in PyTorch. */
typedef struct ddp_tp_linear_desc {
    ddp_tp_split split;       /* COLUMN: out_features are cut, ROW: in_features; by the rule of SHARD */
    int64_t in_features, out_features; /* required; global. With heads, out_features 0 = (heads + 2 kv_heads) head_size */
    int no_bias;              /* ROW: the bias is whole on every rank, added once behind the sum */
    int gather_output;        /* COLUMN: y is whole on every rank. Not with sequence_parallel */
    int scatter_input;        /* ROW: x is whole on every rank, which takes its columns itself. Not with sequence_parallel */
    int heads, kv_heads;      /* COLUMN: fused query, key, value: W's rows are all queries' heads, then all keys', then all values'; each is cut by
                                 heads, so y's columns are this rank's [queries | keys | values]. kv_heads 0 = heads; fewer: grouped-query attention.
                                 Both are multiples of the ranks */
    int64_t head_size;        /* with heads: 0 = in_features / heads */
} ddp_tp_linear_desc;

typedef enum ddp_tp_activation {
    DDP_TP_GELU = 0,          /* tanh form, as GPT-2 */
    DDP_TP_RELU,
    DDP_TP_SILU_GATED         /* SwiGLU: silu(g) u of a first linear of 2 hidden: [g | u] */
} ddp_tp_activation;

typedef struct ddp_tp_mlp_desc {
    int64_t channels, hidden; /* required; hidden is cut */
    ddp_tp_activation activation;
    int no_bias;
} ddp_tp_mlp_desc;

typedef struct ddp_tp_embedding_desc {
    int64_t vocab, channels;  /* required */
    int64_t padded_vocab;     /* 0 = vocab; rows of the table, which are cut; those from vocab on are never looked up. Do not let it depend on the
                                 ranks: checkpoints have this many */
} ddp_tp_embedding_desc;

typedef struct ddp_tp_loss_desc {
    int64_t vocab;            /* required */
    int64_t padded_vocab;     /* 0 = vocab; logits from vocab on count as minus infinity */
    int32_t ignore_index;     /* 0 = -100: rows with this target do not count */
    double z_loss;            /* adds z_loss * (log sum exp)^2 to each row's loss (PaLM, Chowdhery et al. 2022); 0 = none */
    double scale;             /* of the gradient; 0 = 1 / rows that count, so that it is that of the mean */
} ddp_tp_loss_desc;

typedef struct ddp_tp_layer_norm_desc {
    int64_t channels;         /* required */
    double eps;               /* 0 = 1e-5 */
    int rms;                  /* 1 = RMS norm: no mean, no bias (Zhang and Sennrich 2019) */
} ddp_tp_layer_norm_desc;

/* Which elements of a global activation a buffer holds, for dropout: element (i, j) of the buffer is (first_row + i, first_column + j) of one with so
   many columns. */
typedef struct ddp_tp_dropout_desc {
    double rate;              /* probability of zero, 0 to below 1 */
    uint64_t key;             /* of this step and this layer: the same on all ranks that share the activation */
    int64_t first_row, first_column, columns; /* columns 0 = the buffer's */
} ddp_tp_dropout_desc;

//== api ==================================================================================================== >>api

/* --- tensors ---
   Row-major and contiguous, in memory of the group's device; group NULL = the CPU, malloc. Views own nothing and live as long as what they look at.
   Not collective, and blocking, where nothing else is said. out's fields are set only on success. Errors: DDP_ERR_INVALID names shapes;
   DDP_ERR_NO_MEMORY. */

/* Zeroed memory for shape[0] * ... * shape[ndim - 1] elements from the group's allocator. Entries may be 0. A shape whose bytes overflow is
   DDP_ERR_INVALID. */
DDPDEF ddp_result ddp_tensor_create(ddp_group *group, ddp_tensor *out, ddp_dtype dtype, int ndim, const int64_t *shape);
/* Frees what ddp_tensor_create or a call below has made, and empties it. NULL and empty ones are ignored. */
DDPDEF void ddp_tensor_free(ddp_group *group, ddp_tensor *tensor);

/* The same elements under another shape; one entry may be -1: what is left. */
DDPDEF ddp_result ddp_tensor_view(const ddp_tensor *in, int ndim, const int64_t *shape, ddp_tensor *out);
/* Entries [begin, end) of a dimension as a view. All dimensions before it must be 1, otherwise they do not lie together: see ddp_tensor_copy_box. */
DDPDEF ddp_result ddp_tensor_slice(const ddp_tensor *in, int dim, int64_t begin, int64_t end, ddp_tensor *out);

/* What follows writes to out's memory, whose shape must fit; out->data NULL: out is made as by ddp_tensor_create. out->dtype 0 = in's. */

/* Equal shapes; converts where dtypes differ. Floats to each other, rounding to nearest even; integers only to the same dtype. */
DDPDEF ddp_result ddp_tensor_copy(ddp_group *group, const ddp_tensor *in, ddp_tensor *out);
/* The box of extent[] entries from in_offset[] goes to out_offset[]; offsets NULL = 0. The same ndim and dtype; no overlap. out is not made. */
DDPDEF ddp_result ddp_tensor_copy_box(ddp_group *group, const ddp_tensor *in, const int64_t *in_offset, ddp_tensor *out, const int64_t *out_offset,
                                      const int64_t *extent);
/* Dimension i of out is dimension order[i] of in. */
DDPDEF ddp_result ddp_tensor_transpose(ddp_group *group, const ddp_tensor *in, const int *order, ddp_tensor *out);
/* in at offset before[] (NULL = 0) of out, which is larger and whose other elements become value. out's shape is required. */
DDPDEF ddp_result ddp_tensor_pad(ddp_group *group, const ddp_tensor *in, const int64_t *before, double value, ddp_tensor *out);
/* Every element becomes value. One that an integer dtype does not hold exactly is DDP_ERR_INVALID. */
DDPDEF ddp_result ddp_tensor_fill(ddp_group *group, ddp_tensor *tensor, double value);

/* A summary of a few lines: rank, dtype, shape, placement, and the corner of at most 4 x 8 values of its last two dimensions. *size_bytes: room at
   text; set to what it takes with the 0 at its end. text NULL: only that. */
DDPDEF ddp_result ddp_tensor_print(ddp_group *group, const ddp_tensor *tensor, ddp_placement placement, char *text, size_t *size_bytes);

/* NumPy's files (format 1.0 to 3.0, C order). bf16, which NumPy does not know, is stored as its bits, u16, and read back where out->dtype is
   DDP_BF16. Writing goes to a file beside, synced and renamed: a failure leaves the old one. What follows the values in a file is not read.
   Errors: DDP_ERR_SYSTEM; DDP_ERR_CORRUPT names what is damaged and where; DDP_ERR_UNSUPPORTED (Fortran order, a dtype that there is not). */
DDPDEF ddp_result ddp_tensor_save_npy(ddp_group *group, const ddp_tensor *tensor, const char *path);
DDPDEF ddp_result ddp_tensor_load_npy(ddp_group *group, const char *path, ddp_tensor *out);

/* --- placements --- */

/* "REPLICATE", "SHARD(1)" and its like; text of this thread, valid until its fourth next call. */
DDPDEF const char *ddp_placement_name(ddp_placement placement);
/* The box of rank's part of a tensor of that global shape. PARTIAL and REPLICATE: all of it. */
DDPDEF ddp_result ddp_placement_box(ddp_placement placement, int ndim, const int64_t *global_shape, int rank, int world_size, ddp_tensor_box *box);

/* This rank's part of a tensor that every rank has whole. Sends nothing. PARTIAL: rank 0 keeps the values, others get zeros. */
DDPDEF ddp_result ddp_tensor_shard(ddp_group *group, const ddp_tensor *whole, ddp_placement to, ddp_tensor *out);
/* The same from root alone, whole is read there only: its shape and dtype travel along. Collective, blocking. */
DDPDEF ddp_result ddp_tensor_distribute(ddp_group *group, const ddp_tensor *whole, int root, ddp_placement to, ddp_tensor *out);

/* The inverse: the whole tensor on root, out is made (or written) there only. global_shape: ndim entries. Collective, blocking. */
DDPDEF ddp_result ddp_tensor_gather(ddp_group *group, const ddp_tensor *in, ddp_placement from, const int64_t *global_shape, int root,
                                    ddp_tensor *out);

/* Takes a tensor from one placement to another. in and out are this rank's parts; out's shape is required (together they tell the global shape), its
   dtype is in's. Collective, blocking, the same placements and global shape on every rank. in is only read; in == out memory where the plan says
   "none" or an all-reduce.
       REPLICATE -> SHARD, PARTIAL   copy             SHARD(a) -> SHARD(b)   all-to-all
       SHARD -> REPLICATE            all-gather       SHARD -> PARTIAL       copy into zeros
       PARTIAL -> REPLICATE          all-reduce       PARTIAL -> SHARD       reduce-scatter; uneven: of parts filled up with zeros
   Sums are in the group's order. Errors: DDP_ERR_INVALID prints both sides; those of collectives. */
DDPDEF ddp_result ddp_tensor_redistribute(ddp_group *group, const ddp_tensor *in, ddp_placement from, ddp_placement to, ddp_tensor *out);
/* What that would do, without doing it. Not collective; data need not be set. */
DDPDEF ddp_result ddp_tensor_redistribute_plan(ddp_group *group, const ddp_tensor *in, ddp_placement from, ddp_placement to, const ddp_tensor *out,
                                               ddp_tensor_plan *plan);

/* The box of this rank under a layout. */
DDPDEF ddp_result ddp_tensor_layout_box(const ddp_tensor_layout *layout, ddp_tensor_box *box);
/* From one layout to another of the same global shape and axes, axis by axis. Where inner axes cut what an outer one has to change, they are gathered
   first. Collective over all axes, blocking. PARTIAL along several axes is summed one after the other, innermost first. in is this rank's part; out
   is written, or made by axes[0]. *plan (may be NULL): sent_bytes is the sum over the steps, workspace_bytes with tensors between steps, at most;
   collective names the step that sends most. out NULL: plan alone, in's data need not be set. */
DDPDEF ddp_result ddp_tensor_relayout(const ddp_tensor *in, const ddp_tensor_layout *from, const ddp_tensor_layout *to, ddp_tensor *out,
                                      ddp_tensor_plan *plan);

/* --- layers ---
   M rows, t ranks, K and N features. Buffers are the caller's, contiguous, of the context's dtype, in host memory, and read or written until the call
   returns. Weights and gradients are passed with every call, so that ddp_fsdp.h or a reducer may own them. In sequence parallelism activations
   outside the column-row pairs have M/t rows, SHARD(0). A gradient of inputs (dx) may be NULL: not wanted. Collective over the tensor group,
   blocking, the same rows on every rank. Errors: DDP_ERR_INVALID before anything is sent; those of collectives. */

/* Collective, as is the creation of layers, which may grow the shared workspace (group memory) and is not done while a layer is at work. After that
   no call allocates. */
DDPDEF ddp_result ddp_tp_create(ddp_tp **out, ddp_group *group, const ddp_tp_desc *desc);
DDPDEF void ddp_tp_destroy(ddp_tp *tp); /* after its layers; collective; NULL is ignored */
DDPDEF ddp_result ddp_tp_get_stats(const ddp_tp *tp, ddp_tp_stats *stats);
DDPDEF void ddp_tp_reset_stats(ddp_tp *tp);

/* The product that layers use where desc.gemm is NULL; alone it needs no group. user is not read. */
DDPDEF ddp_result ddp_gemm_builtin(const ddp_gemm *gemm, void *user);

DDPDEF ddp_result ddp_tp_linear_create(ddp_tp_linear **out, ddp_tp *tp, const ddp_tp_linear_desc *desc);
DDPDEF void ddp_tp_linear_destroy(ddp_tp_linear *linear); /* NULL is ignored */
/* Which box of the global weight (out_features, in_features) this rank's weight is. Fused query, key, value has three parts, 0 to 2, one below the
   other in the rank's weight; otherwise part is 0. bias likewise, of (out_features). */
DDPDEF ddp_result ddp_tp_linear_weight_box(const ddp_tp_linear *linear, int part, ddp_tensor_box *box);
DDPDEF ddp_result ddp_tp_linear_bias_box(const ddp_tp_linear *linear, int part, ddp_tensor_box *box);
DDPDEF int64_t ddp_tp_linear_in_features(const ddp_tp_linear *linear);  /* columns of this rank's weight */
DDPDEF int64_t ddp_tp_linear_out_features(const ddp_tp_linear *linear); /* rows of it */

/* COLUMN: x (M, K) whole, or (M/t, K) in sequence parallelism -> y (M, N/t), or (M, N) with gather_output.
   ROW:    x (M, K/t), or (M, K) with scatter_input -> y (M, N), or (M/t, N) in sequence parallelism.
   rows is M. bias NULL with no_bias. */
DDPDEF ddp_result ddp_tp_linear_forward(ddp_tp_linear *linear, const void *weight, const void *bias, const void *x, int64_t rows, void *y);
/* dy as y, dx as x, weight_grad and bias_grad as weight and bias. In sequence parallelism x is gathered again, beside the product that gives dx.
   weight_grad NULL: gradients of weights are not wanted. */
DDPDEF ddp_result ddp_tp_linear_backward(ddp_tp_linear *linear, const void *weight, const void *x, const void *dy, int64_t rows, void *dx,
                                         void *weight_grad, void *bias_grad);

/* A column linear (hidden, channels), the activation, a row linear (channels, hidden). weights and grads: weight and bias of the first, then of the
   second; biases NULL with no_bias. SILU_GATED: the first has 2 hidden rows, all gates, then all ups, each cut. saved: ddp_tp_mlp_saved_count
   elements that forward leaves for backward. */
DDPDEF ddp_result ddp_tp_mlp_create(ddp_tp_mlp **out, ddp_tp *tp, const ddp_tp_mlp_desc *desc);
DDPDEF void ddp_tp_mlp_destroy(ddp_tp_mlp *mlp);
DDPDEF size_t ddp_tp_mlp_saved_count(const ddp_tp_mlp *mlp, int64_t rows);
DDPDEF ddp_tp_linear *ddp_tp_mlp_linear(ddp_tp_mlp *mlp, int which); /* 0 the column, 1 the row; the mlp's own, for their boxes */
DDPDEF ddp_result ddp_tp_mlp_forward(ddp_tp_mlp *mlp, const void *const weights[4], const void *x, int64_t rows, void *saved, void *y);
DDPDEF ddp_result ddp_tp_mlp_backward(ddp_tp_mlp *mlp, const void *const weights[4], const void *x, const void *saved, const void *dy, int64_t rows,
                                      void *dx, void *const grads[4]);

/* weight: this rank's rows of (padded_vocab, channels). tokens: M of them, the same on every rank; one outside 0 to vocab - 1 is DDP_ERR_INVALID
   naming its place, on every rank. y (M, channels), or (M/t, channels) in sequence parallelism. */
DDPDEF ddp_result ddp_tp_embedding_create(ddp_tp_embedding **out, ddp_tp *tp, const ddp_tp_embedding_desc *desc);
DDPDEF void ddp_tp_embedding_destroy(ddp_tp_embedding *embedding);
DDPDEF ddp_result ddp_tp_embedding_box(const ddp_tp_embedding *embedding, ddp_tensor_box *box);
DDPDEF ddp_result ddp_tp_embedding_forward(ddp_tp_embedding *embedding, const void *weight, const int32_t *tokens, int64_t rows, void *y);
DDPDEF ddp_result ddp_tp_embedding_backward(ddp_tp_embedding *embedding, const int32_t *tokens, const void *dy, int64_t rows, void *weight_grad);

/* Cross-entropy of logits cut along the vocabulary, (M, this rank's share of padded_vocab): two collectives, an all-reduce MAX and one fused SUM
   (Megatron-LM). losses (M), may be NULL: each row's, 0 where it does not count. *mean (may be NULL): over the rows that count; 0 where none does.
   dlogits as logits, may be the same memory; NULL = not wanted. Nothing else is saved. All ranks get the same bits. A target outside 0 to vocab - 1
   that is not ignore_index is DDP_ERR_INVALID naming its row. */
DDPDEF ddp_result ddp_tp_cross_entropy(ddp_tp *tp, const ddp_tp_loss_desc *desc, const void *logits, const int32_t *targets, int64_t rows,
                                       void *losses, double *mean, void *dlogits);

/* Over the last dimension of x (rows, channels); rows is this rank's, M/t in sequence parallelism. stats: 2 rows elements for backward. bias NULL
   with rms. In sequence parallelism the gradients of weight and bias are summed over the group by one all-reduce: then collective. */
DDPDEF ddp_result ddp_tp_layer_norm_create(ddp_tp_layer_norm **out, ddp_tp *tp, const ddp_tp_layer_norm_desc *desc);
DDPDEF void ddp_tp_layer_norm_destroy(ddp_tp_layer_norm *norm);
DDPDEF ddp_result ddp_tp_layer_norm_forward(ddp_tp_layer_norm *norm, const void *weight, const void *bias, const void *x, int64_t rows, void *stats,
                                            void *y);
DDPDEF ddp_result ddp_tp_layer_norm_backward(ddp_tp_layer_norm *norm, const void *weight, const void *x, const void *stats, const void *dy,
                                             int64_t rows, void *dx, void *weight_grad, void *bias_grad);

/* y = x / (1 - rate) or 0, by a random number of each element's place in the global activation: ranks that hold the same element agree on it, however
   it is cut. Backward is the same call on dy. In place: y == x. Not collective. */
DDPDEF ddp_result ddp_tp_dropout(ddp_tp *tp, const ddp_tp_dropout_desc *desc, const void *x, int64_t rows, int64_t columns, void *y);

/* Normal values of a global tensor, element by element from its place in it: any cut of it has the bits of the whole. out: box->shape, of dtype f32
   or f64. Not collective. */
DDPDEF ddp_result ddp_tensor_init_normal(const ddp_tensor_box *box, ddp_dtype dtype, uint64_t key, double mean, double deviation, void *out);

#ifdef __cplusplus
}
#endif
#endif /* DDP_TENSOR_H */

#if (defined(DDP_IMPLEMENTATION) || defined(DDP_TENSOR_IMPLEMENTATION)) && !defined(DDP_TENSOR_IMPLEMENTATION_INCLUDED)
#define DDP_TENSOR_IMPLEMENTATION_INCLUDED

//== structs ======================================================================================== >>impl-structs
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(DDP_USE_CBLAS)
#include <cblas.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define DDP__TENSOR_TRY(call) do { ddp_result ddp__tensor_tried = (call); if (ddp__tensor_tried != DDP_OK) return ddp__tensor_tried; } while (0)
#define DDP__TENSOR_BAD(group, ...) ddp__tensor_fail(DDP_ERR_INVALID, __func__, group, __VA_ARGS__)

/* The error line of the public function `who`: rank, function and group, then what is wrong. group may be NULL. */
static ddp_result ddp__tensor_fail(ddp_result result, const char *who, const ddp_group *group, const char *format, ...)
    __attribute__((format(printf, 4, 5), unused));
static ddp_result ddp__tensor_fail(ddp_result result, const char *who, const ddp_group *group, const char *format, ...) {
    char text[480];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!group) return ddp_fail(result, "%s: %s", who, text);
    return ddp_fail(result, "rank %d/%d %s group=%s: %s", ddp_rank(group), ddp_world_size(group), who, ddp_group_name(group), text);
}

//== memory of tensors ========================================================================== >>impl-tensor-memory

//== boxes ======================================================================================= >>impl-tensor-boxes

//== tensors as text ============================================================================= >>impl-tensor-text

//== .npy files ================================================================================== >>impl-tensor-npy

//== who has which part ========================================================================== >>impl-tensor-layout

//== from one placement to another =============================================================== >>impl-tensor-plan

//== what layers share =========================================================================== >>impl-tp-context

//== products ==================================================================================== >>impl-tp-gemm

//== linear layers =============================================================================== >>impl-tp-linear

//== the pair of an MLP ========================================================================== >>impl-tp-mlp

//== embedding =================================================================================== >>impl-tp-embedding

//== cross-entropy =============================================================================== >>impl-tp-loss

//== norms ======================================================================================= >>impl-tp-norm

//== random numbers ============================================================================== >>impl-tp-random

//== public calls ================================================================================ >>impl-public

#ifdef __cplusplus
}
#endif
#endif /* DDP_IMPLEMENTATION or DDP_TENSOR_IMPLEMENTATION */

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

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
    >>impl-tensor-layout  >>impl-tensor-plan  >>impl-tp-gemm  >>impl-tp-context  >>impl-tp-linear  >>impl-tp-mlp  >>impl-tp-embedding  >>impl-tp-loss
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

//== products ==================================================================================== >>impl-tp-gemm
/* C = A B, after Goto and van de Geijn (2008): blocks of A and B are packed so that the innermost loop reads both with stride one and keeps a tile
   of C in registers, MR rows by two vectors. A tile begins with what C holds and is written back after KC terms, so an element of C is one chain of
   additions in the order of k, however m, n or k is cut.

             2 vectors    B: packed in panels of two vectors' columns
           +----+----+
        MR | C tile  |    A: packed in panels of MR rows
           +----+----+
   The packed blocks lie on the stack: no memory is taken, and any number of threads may multiply. */

#if defined(__AVX512F__)
#define DDP__GEMM_VECTOR 64 /* bytes */
#elif defined(__AVX__)
#define DDP__GEMM_VECTOR 32
#else
#define DDP__GEMM_VECTOR 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define DDP__GEMM_MR 12 /* 24 sums of 32 registers */
#else
#define DDP__GEMM_MR 6  /* 12 of 16 */
#endif
#define DDP__GEMM_WIDE (2 * DDP__GEMM_VECTOR)  /* bytes of a tile's row */
#define DDP__GEMM_KC_BYTES 1024                /* terms of a packed block: so many bytes */
#define DDP__GEMM_MC (2 * DDP__GEMM_MR)        /* rows of A packed at a time */
#define DDP__GEMM_NC_BYTES 896                 /* columns of B packed at a time: so many bytes */
#define DDP__GEMM_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define DDP__GEMM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define DDP__GEMM_UNROLL _Pragma("GCC unroll 16")
#endif

typedef float ddp__gemm_f32 __attribute__((vector_size(DDP__GEMM_VECTOR)));
typedef double ddp__gemm_f64 __attribute__((vector_size(DDP__GEMM_VECTOR)));

/* Element (i, k), i < count, k < depth, at in[i * outer + k * step] goes to out[panel][k][i - panel * width]. The last panel is filled with zeros. */
DDP__GEMM_INLINE void ddp__gemm_pack(const size_t size, const int64_t width, unsigned char *out, int64_t count, int64_t depth,
                                     const unsigned char *in, int64_t outer, int64_t step) {
    const int64_t s = (int64_t)size;
    for (int64_t first = 0; first < count; first += width, out += width * depth * s) {
        const unsigned char *from = in + first * outer * s;
        int64_t w = count - first < width ? count - first : width, i = 0;
        if (w < width) memset(out, 0, (size_t)(width * depth * s));
        if (outer == 1 && w == width) {
            for (int64_t k = 0; k < depth; k++) memcpy(out + k * width * s, from + k * step * s, (size_t)width * size);
            continue;
        }
        for (; i + 4 <= w; i += 4)
            for (int64_t k = 0; k < depth; k++)
                for (int64_t j = i; j < i + 4; j++) memcpy(out + (k * width + j) * s, from + (j * outer + k * step) * s, size);
        for (; i < w; i++)
            for (int64_t k = 0; k < depth; k++) memcpy(out + (k * width + i) * s, from + (i * outer + k * step) * s, size);
    }
}

/* One tile: rows (a constant at each call, so that the sums stay in registers) by two vectors, over depth; m x n of it are wanted. fresh: C is 0. */
#define DDP__GEMM_TILE(name, type, vec)                                                                                                            \
    DDP__GEMM_INLINE void name(const int rows, int64_t depth, const type *a, const type *b, type *c, int64_t ldc, int m, int n, int fresh) {       \
        enum { lanes = DDP__GEMM_VECTOR / sizeof(type), wide = 2 * lanes };                                                                        \
        int inside = m >= rows && n >= wide, m_edge = inside ? 0 : m < rows ? m : rows;                                                            \
        size_t edge_bytes = (size_t)(n < wide ? n : wide) * sizeof(type);                                                                          \
        type edge[DDP__GEMM_MR * wide], *to = inside ? c : edge;                                                                                   \
        int64_t row = inside ? ldc : (int64_t)wide;                                                                                                \
        vec sum[DDP__GEMM_MR][2];                                                                                                                  \
        if (!inside) memset(edge, 0, sizeof edge);                                                                                                 \
        for (int i = 0; i < m_edge && !fresh; i++) memcpy(edge + i * wide, c + i * ldc, edge_bytes);                                               \
        DDP__GEMM_UNROLL                                                                                                                           \
        for (int i = 0; i < rows; i++) {                                                                                                           \
            if (fresh) memset(sum[i], 0, sizeof sum[i]);                                                                                           \
            else memcpy(sum[i], to + i * row, sizeof sum[i]);                                                                                      \
        }                                                                                                                                          \
        for (int64_t k = 0; k < depth; k++, a += DDP__GEMM_MR, b += wide) {                                                                        \
            vec left, right;                                                                                                                       \
            memcpy(&left, b, sizeof left);                                                                                                         \
            memcpy(&right, b + lanes, sizeof right);                                                                                               \
            DDP__GEMM_UNROLL                                                                                                                       \
            for (int i = 0; i < rows; i++) {                                                                                                       \
                sum[i][0] += a[i] * left;                                                                                                          \
                sum[i][1] += a[i] * right;                                                                                                         \
            }                                                                                                                                      \
        }                                                                                                                                          \
        DDP__GEMM_UNROLL                                                                                                                           \
        for (int i = 0; i < rows; i++) memcpy(to + i * row, sum[i], sizeof sum[i]);                                                                \
        for (int i = 0; i < m_edge; i++) memcpy(c + i * ldc, edge + i * wide, edge_bytes);                                                         \
    }
DDP__GEMM_TILE(ddp__gemm_tile_f32, float, ddp__gemm_f32)
DDP__GEMM_TILE(ddp__gemm_tile_f64, double, ddp__gemm_f64)
#undef DDP__GEMM_TILE

/* The tiles of a packed block of A and one of B. */
#define DDP__GEMM_BLOCK(name, type, tile)                                                                                                          \
    static void name(int64_t m, int64_t n, int64_t depth, const void *packed_a, const void *packed_b, void *to, int64_t ldc, int fresh) {          \
        const type *a = (const type *)packed_a, *b = (const type *)packed_b;                                                                       \
        const int wide = DDP__GEMM_WIDE / (int)sizeof(type), third = DDP__GEMM_MR / 3;                                                             \
        for (int64_t j = 0; j < n; j += wide, b += wide * depth) {                                                                                 \
            const type *panel = a;                                                                                                                 \
            for (int64_t i = 0; i < m; i += DDP__GEMM_MR, panel += DDP__GEMM_MR * depth) {                                                         \
                int rows = m - i < DDP__GEMM_MR ? (int)(m - i) : DDP__GEMM_MR, columns = n - j < wide ? (int)(n - j) : wide;                       \
                type *at = (type *)to + i * ldc + j;                                                                                               \
                if (rows > 2 * third) tile(DDP__GEMM_MR, depth, panel, b, at, ldc, rows, columns, fresh);                                          \
                else if (rows > third) tile(DDP__GEMM_MR / 3 * 2, depth, panel, b, at, ldc, rows, columns, fresh);                                 \
                else tile(DDP__GEMM_MR / 3, depth, panel, b, at, ldc, rows, columns, fresh);                                                       \
            }                                                                                                                                      \
        }                                                                                                                                          \
    }
DDP__GEMM_BLOCK(ddp__gemm_block_f32, float, ddp__gemm_tile_f32)
DDP__GEMM_BLOCK(ddp__gemm_block_f64, double, ddp__gemm_tile_f64)
#undef DDP__GEMM_BLOCK

DDP__GEMM_INLINE void ddp__gemm_run(const size_t size, const ddp_gemm *g) {
    const int64_t s = (int64_t)size, wide = DDP__GEMM_WIDE / s, kc = DDP__GEMM_KC_BYTES / s, nc = DDP__GEMM_NC_BYTES / DDP__GEMM_WIDE * wide;
    const int64_t a_row = g->trans_a ? 1 : g->lda, a_step = g->trans_a ? g->lda : 1;
    const int64_t b_row = g->trans_b ? 1 : g->ldb, b_step = g->trans_b ? g->ldb : 1;
    const unsigned char *a = (const unsigned char *)g->a, *b = (const unsigned char *)g->b;
    unsigned char pack_a[DDP__GEMM_MC * DDP__GEMM_KC_BYTES] __attribute__((aligned(64)));
    unsigned char pack_b[DDP__GEMM_NC_BYTES * (DDP__GEMM_KC_BYTES / sizeof(float))] __attribute__((aligned(64)));
    for (int64_t j = 0; j < g->n; j += nc) {
        int64_t columns = g->n - j < nc ? g->n - j : nc;
        for (int64_t p = 0; p < g->k; p += kc) {
            int64_t depth = g->k - p < kc ? g->k - p : kc;
            ddp__gemm_pack(size, wide, pack_b, columns, depth, b + (p * b_row + j * b_step) * s, b_step, b_row);
            for (int64_t i = 0; i < g->m; i += DDP__GEMM_MC) {
                int64_t rows = g->m - i < DDP__GEMM_MC ? g->m - i : DDP__GEMM_MC;
                unsigned char *c = (unsigned char *)g->c + (i * g->ldc + j) * s;
                int fresh = p == 0 && !g->accumulate;
                ddp__gemm_pack(size, DDP__GEMM_MR, pack_a, rows, depth, a + (i * a_row + p * a_step) * s, a_row, a_step);
                if (size == sizeof(float)) ddp__gemm_block_f32(rows, columns, depth, pack_a, pack_b, c, g->ldc, fresh);
                else ddp__gemm_block_f64(rows, columns, depth, pack_a, pack_b, c, g->ldc, fresh);
            }
        }
    }
}

static __attribute__((noinline)) void ddp__gemm_run_f32(const ddp_gemm *g) { ddp__gemm_run(sizeof(float), g); }
static __attribute__((noinline)) void ddp__gemm_run_f64(const ddp_gemm *g) { ddp__gemm_run(sizeof(double), g); }

#define DDP__GEMM_NEED(condition, ...) do { if (!(condition)) return ddp_fail(DDP_ERR_INVALID, "ddp_gemm: " __VA_ARGS__); } while (0)

static ddp_result ddp__gemm_check(const ddp_gemm *g) {
    int64_t a_columns, b_columns;
    DDP__GEMM_NEED(g, "gemm is NULL");
    DDP__GEMM_NEED(g->m >= 0 && g->n >= 0 && g->k >= 0, "m=%lld n=%lld k=%lld must not be negative", (long long)g->m, (long long)g->n,
                   (long long)g->k);
    DDP__GEMM_NEED(g->dtype == DDP_F32 || g->dtype == DDP_F64, "dtype=%s (%d), allowed are f32 and f64", ddp_dtype_name(g->dtype), (int)g->dtype);
    a_columns = g->trans_a ? g->m : g->k;
    b_columns = g->trans_b ? g->k : g->n;
    DDP__GEMM_NEED(g->lda >= a_columns, "lda=%lld is less than a's %lld columns", (long long)g->lda, (long long)a_columns);
    DDP__GEMM_NEED(g->ldb >= b_columns, "ldb=%lld is less than b's %lld columns", (long long)g->ldb, (long long)b_columns);
    DDP__GEMM_NEED(g->ldc >= g->n, "ldc=%lld is less than c's %lld columns", (long long)g->ldc, (long long)g->n);
    DDP__GEMM_NEED(g->c || !g->m || !g->n, "c is NULL");
    DDP__GEMM_NEED((g->a && g->b) || !g->m || !g->n || !g->k, "%s is NULL", g->a ? "b" : "a");
    return DDP_OK;
}

/* What is left to do where m, n or k is 0. */
static int ddp__gemm_empty(const ddp_gemm *g) {
    size_t size = ddp_dtype_size(g->dtype);
    if (g->m && g->n && g->k) return 0;
    for (int64_t i = 0; i < g->m && g->n && !g->accumulate; i++)
        memset((unsigned char *)g->c + (size_t)(i * g->ldc) * size, 0, (size_t)g->n * size);
    return 1;
}

DDPDEF ddp_result ddp_gemm_builtin(const ddp_gemm *gemm, void *user) {
    ddp_result result = ddp__gemm_check(gemm);
    (void)user;
    if (result != DDP_OK || ddp__gemm_empty(gemm)) return result;
    if (gemm->dtype == DDP_F32) ddp__gemm_run_f32(gemm);
    else ddp__gemm_run_f64(gemm);
    return DDP_OK;
}

#if defined(DDP_USE_CBLAS)
static ddp_result ddp__gemm_cblas(const ddp_gemm *g, void *user) {
    const int64_t sizes[6] = {g ? g->m : 0, g ? g->n : 0, g ? g->k : 0, g ? g->lda : 0, g ? g->ldb : 0, g ? g->ldc : 0};
    static const char *const names[6] = {"m", "n", "k", "lda", "ldb", "ldc"};
    ddp_result result = ddp__gemm_check(g);
    CBLAS_TRANSPOSE ta = g && g->trans_a ? CblasTrans : CblasNoTrans, tb = g && g->trans_b ? CblasTrans : CblasNoTrans;
    (void)user;
    if (result != DDP_OK || ddp__gemm_empty(g)) return result;
    for (int i = 0; i < 6; i++)
        DDP__GEMM_NEED(sizes[i] <= 2147483647, "%s=%lld is more than CBLAS takes, 2147483647; set the desc's gemm to ddp_gemm_builtin", names[i],
                       (long long)sizes[i]);
    if (g->dtype == DDP_F32)
        cblas_sgemm(CblasRowMajor, ta, tb, (int)g->m, (int)g->n, (int)g->k, 1.0f, (const float *)g->a, (int)g->lda, (const float *)g->b, (int)g->ldb,
                    g->accumulate ? 1.0f : 0.0f, (float *)g->c, (int)g->ldc);
    else
        cblas_dgemm(CblasRowMajor, ta, tb, (int)g->m, (int)g->n, (int)g->k, 1.0, (const double *)g->a, (int)g->lda, (const double *)g->b, (int)g->ldb,
                    g->accumulate ? 1.0 : 0.0, (double *)g->c, (int)g->ldc);
    return DDP_OK;
}
static ddp_gemm_fn ddp__gemm_default(void) { return ddp__gemm_cblas; }
#else
static ddp_gemm_fn ddp__gemm_default(void) { return ddp_gemm_builtin; }
#endif

//== what layers share =========================================================================== >>impl-tp-context

#define DDP__TP_TRY(call) do { ddp_result ddp__tp_tried = (call); if (ddp__tp_tried != DDP_OK) return ddp__tp_tried; } while (0)
#define DDP__TP_FAIL(group, result, call, text, ...) \
    ddp_fail(result, "rank %d/%d %s group=%s: " text, ddp_rank(group), ddp_world_size(group), call, ddp_group_name(group), __VA_ARGS__)
#define DDP__TP_NEED(tp, call, condition, ...) \
    do { if (!(condition)) return DDP__TP_FAIL((tp)->group, DDP_ERR_INVALID, call, __VA_ARGS__); } while (0)
#define DDP__TP_FIELDS 12
#define DDP__TP_CHUNKS 64 /* chunk_count at most */
#define DDP__TP_WORKS 4   /* collectives of one layer under way at once, at most */

struct ddp_tp {
    ddp_group *group;
    ddp_tp_desc desc;          /* with every default resolved */
    int rank, world_size;
    size_t size;               /* bytes of an element */
    unsigned char *workspace;  /* group memory, as much as the neediest layer asked for; what lies there outlives no call */
    size_t workspace_bytes;
    ddp_tp_stats stats;
};

typedef struct ddp__tp_field { const char *name; int64_t value; } ddp__tp_field;

/* What ranks tell each other when they create something together. */
typedef struct ddp__tp_notice {
    int64_t result, value[DDP__TP_FIELDS];
    uint64_t bytes;
    char call[40], text[400];
} ddp__tp_notice;

/* rows * columns elements of so many bytes; SIZE_MAX when that overflows, or a factor is negative. */
static size_t ddp__tp_bytes(int64_t rows, int64_t columns, size_t size) {
    uint64_t count, bytes;
    if (rows < 0 || columns < 0 || __builtin_mul_overflow((uint64_t)rows, (uint64_t)columns, &count)) return SIZE_MAX;
    if (__builtin_mul_overflow(count, (uint64_t)size, &bytes) || bytes > (uint64_t)PTRDIFF_MAX) return SIZE_MAX;
    return (size_t)bytes;
}

static size_t ddp__tp_pad(size_t bytes) { return bytes > SIZE_MAX - 63 ? SIZE_MAX : (bytes + 63) / 64 * 64; }
static size_t ddp__tp_sum(size_t a, size_t b) { return a > SIZE_MAX - b ? SIZE_MAX : a + b; }

/* Entries of n that a rank has by the rule of SHARD; *begin (may be NULL): the first. */
static int64_t ddp__tp_cut(int64_t n, int rank, int world_size, int64_t *begin) {
    int64_t piece = n / world_size + (n % world_size != 0), first = piece * rank < n ? piece * rank : n;
    if (begin) *begin = first;
    return n - first < piece ? n - first : piece;
}

static ddp_result ddp__tp_compare(ddp_group *group, const char *call, const ddp__tp_notice *all, const ddp__tp_field *fields, int count) {
    int me = ddp_rank(group), world_size = ddp_world_size(group);
    for (int r = 0; r < world_size; r++)
        if (all[(me + r) % world_size].result != DDP_OK)
            return ddp_fail((ddp_result)all[(me + r) % world_size].result, "%s", all[(me + r) % world_size].text);
    for (int r = 1; r < world_size; r++) {
        if (strcmp(all[r].call, all[0].call) != 0)
            return DDP__TP_FAIL(group, DDP_ERR_MISMATCH, call, "rank 0 is in %s, rank %d in %s; make the same calls on every rank",
                                all[0].call, r, all[r].call);
        for (int f = 0; f < count; f++)
            if (all[r].value[f] != all[0].value[f])
                return DDP__TP_FAIL(group, DDP_ERR_MISMATCH, call, "%s is %lld on rank 0 and %lld on rank %d; give every rank the same",
                                    fields[f].name, (long long)all[0].value[f], (long long)all[r].value[f], r);
    }
    return DDP_OK;
}

/* Collective. What is wrong on one rank (own) is known to all, as is the first field in which ranks differ; *bytes becomes the largest. */
static ddp_result ddp__tp_agree(ddp_group *group, const char *call, ddp_result own, const ddp__tp_field *fields, int count, size_t *bytes) {
    int world_size = ddp_world_size(group);
    ddp__tp_notice mine, *all;
    ddp_result result;
    if (world_size == 1) return own;
    memset(&mine, 0, sizeof mine);
    mine.result = own;
    mine.bytes = *bytes;
    for (int f = 0; f < count; f++) mine.value[f] = fields[f].value;
    snprintf(mine.call, sizeof mine.call, "%s", call);
    if (own != DDP_OK) snprintf(mine.text, sizeof mine.text, "%.399s", ddp_last_error());
    all = (ddp__tp_notice *)ddp_group_malloc(group, (size_t)world_size * sizeof *all);
    if (!all) {
        ddp_group_poison(group, DDP_ERR_NO_MEMORY, ddp_last_error());
        return DDP_ERR_NO_MEMORY;
    }
    result = ddp_all_gather(group, &mine, all, sizeof mine, DDP_U8, NULL);
    if (result == DDP_OK) result = ddp__tp_compare(group, call, all, fields, count);
    for (int r = 0; r < world_size && result == DDP_OK; r++)
        if (all[r].bytes > *bytes) *bytes = (size_t)all[r].bytes;
    ddp_group_mfree(group, all);
    return result;
}

/* The end of every layer's creation: as ddp__tp_agree, and the workspace has room for bytes. */
static ddp_result ddp__tp_settle(ddp_tp *tp, const char *call, ddp_result own, const ddp__tp_field *fields, int count, size_t bytes) {
    void *larger = NULL;
    if (own == DDP_OK && bytes > (size_t)PTRDIFF_MAX)
        own = DDP__TP_FAIL(tp->group, DDP_ERR_INVALID, call, "max_rows=%lld of such features do not fit in memory", (long long)tp->desc.max_rows);
    DDP__TP_TRY(ddp__tp_agree(tp->group, call, own, fields, count, &bytes));
    if (bytes <= tp->workspace_bytes) return DDP_OK;
    DDP__TP_TRY(ddp_group_alloc(tp->group, bytes, &larger));
    if (tp->workspace) DDP__TP_TRY(ddp_group_free(tp->group, tp->workspace));
    tp->workspace = (unsigned char *)larger;
    tp->workspace_bytes = tp->stats.workspace_bytes = bytes;
    return DDP_OK;
}

/* Whether activations outside the pairs are cut by rows: a group of one has nothing to cut. */
static int ddp__tp_cuts_rows(const ddp_tp *tp) { return tp->desc.sequence_parallel && tp->world_size > 1; }
/* Rows of such an activation on this rank. */
static int64_t ddp__tp_own_rows(const ddp_tp *tp, int64_t rows) { return ddp__tp_cuts_rows(tp) ? rows / tp->world_size : rows; }

static ddp_result ddp__tp_check_rows(const ddp_tp *tp, const char *call, int64_t rows) {
    int64_t next;
    DDP__TP_NEED(tp, call, rows >= 0 && rows <= tp->desc.max_rows, "rows=%lld; the context allows 0 to max_rows=%lld", (long long)rows,
                 (long long)tp->desc.max_rows);
    next = (rows / tp->world_size + 1) * tp->world_size;
    DDP__TP_NEED(tp, call, !ddp__tp_cuts_rows(tp) || rows % tp->world_size == 0,
                 "rows=%lld do not divide by %d ranks, which sequence_parallel needs; the next number is %lld", (long long)rows, tp->world_size,
                 (long long)next);
    return DDP_OK;
}

/* --- collectives, counted. Counts are elements of dtype; work NULL blocks. A group of one sends nothing and counts nothing. --- */

static ddp_result ddp__tp_count(ddp_tp *tp, ddp_result result, double start, uint64_t elements) {
    tp->stats.comm_seconds += ddp_now() - start;
    if (result != DDP_OK || tp->world_size == 1) return result;
    tp->stats.collectives++;
    tp->stats.elements_sent += elements;
    return DDP_OK;
}

/* In place. */
static ddp_result ddp__tp_all_reduce(ddp_tp *tp, void *data, size_t count, ddp_dtype dtype, ddp_op op, ddp_work *work) {
    uint64_t others = (uint64_t)tp->world_size - 1, w = (uint64_t)tp->world_size;
    double start = ddp_now();
    if (tp->world_size == 1) return DDP_OK;
    return ddp__tp_count(tp, ddp_all_reduce(tp->group, data, data, count, dtype, op, work), start,
                         count / w * 2 * others + count % w * 2 * others / w);
}

/* recv: send_count of every rank. In place: send == recv + rank * send_count. */
static ddp_result ddp__tp_all_gather(ddp_tp *tp, const void *send, void *recv, size_t send_count, ddp_dtype dtype, ddp_work *work) {
    double start = ddp_now();
    return ddp__tp_count(tp, ddp_all_gather(tp->group, send, recv, send_count, dtype, work), start,
                         (uint64_t)send_count * ((uint64_t)tp->world_size - 1));
}

/* recv: recv_count of the sum of send, world_size times as many. In place: recv == send + rank * recv_count. */
static ddp_result ddp__tp_reduce_scatter(ddp_tp *tp, const void *send, void *recv, size_t recv_count, ddp_dtype dtype, ddp_work *work) {
    double start = ddp_now();
    return ddp__tp_count(tp, ddp_reduce_scatter(tp->group, send, recv, recv_count, dtype, DDP_OP_SUM, work), start,
                         (uint64_t)recv_count * ((uint64_t)tp->world_size - 1));
}

static ddp_result ddp__tp_wait(ddp_tp *tp, ddp_work *work) {
    double start = ddp_now();
    ddp_result result = ddp_wait(tp->group, work);
    tp->stats.comm_seconds += ddp_now() - start;
    return result;
}

/* Ends what is under way in a call that fails half-way through, and tells the other ranks, who wait for this one. */
static ddp_result ddp__tp_give_up(ddp_tp *tp, ddp_result result, ddp_work *works, int count) {
    char text[400];
    snprintf(text, sizeof text, "%.399s", ddp_last_error());
    if (tp->world_size > 1) ddp_group_poison(tp->group, result, text);
    for (int i = 0; i < count; i++) (void)ddp_wait(tp->group, &works[i]);
    return ddp_fail(result, "%s", text);
}

static ddp_result ddp__tp_resolve(ddp_group *group, const ddp_tp_desc *desc, ddp_tp_desc *d) {
    const char *call = "ddp_tp_create";
    const ddp_device *device = ddp_group_device(group);
    memset(d, 0, sizeof *d);
    if (!desc) return DDP__TP_FAIL(group, DDP_ERR_INVALID, call, "%s", "desc is NULL");
    *d = *desc;
    if (d->dtype == DDP_DTYPE_DEFAULT) d->dtype = DDP_F32;
    if (d->chunk_count == 0) d->chunk_count = 1;
    d->sequence_parallel = d->sequence_parallel != 0;
    d->accumulate_grads = d->accumulate_grads != 0;
    if (!d->gemm) { d->gemm = ddp__gemm_default(); d->gemm_user = NULL; }
    if (device->update || device->open)
        return DDP__TP_FAIL(group, DDP_ERR_UNSUPPORTED, call, "layers compute in host memory, this group has that of device %s; give one on the CPU",
                            device->name);
    if (d->dtype != DDP_F32 && d->dtype != DDP_F64)
        return DDP__TP_FAIL(group, DDP_ERR_INVALID, call, "dtype=%s (%d), allowed are f32 and f64", ddp_dtype_name(d->dtype), (int)d->dtype);
    if (d->max_rows < 1)
        return DDP__TP_FAIL(group, DDP_ERR_INVALID, call, "max_rows=%lld; set it to the most rows of an activation", (long long)d->max_rows);
    if (d->chunk_count < 0 || d->chunk_count > DDP__TP_CHUNKS)
        return DDP__TP_FAIL(group, DDP_ERR_INVALID, call, "chunk_count=%d, allowed are 0 to %d", d->chunk_count, DDP__TP_CHUNKS);
    return DDP_OK;
}

/* As many collectives under way as a layer ever has: what the group keeps for them is allocated now and not in some later call. */
static ddp_result ddp__tp_warm_up(ddp_tp *tp) {
    ddp_work works[DDP__TP_WORKS];
    ddp_result result = DDP_OK;
    unsigned char *data = tp->workspace;
    memset(works, 0, sizeof works);
    for (int i = 0; i < DDP__TP_WORKS && result == DDP_OK; i++)
        result = ddp_all_reduce(tp->group, data + 64 * i, data + 64 * i, 1, tp->desc.dtype, DDP_OP_SUM, &works[i]);
    if (result != DDP_OK) return ddp__tp_give_up(tp, result, works, DDP__TP_WORKS);
    for (int i = 0; i < DDP__TP_WORKS; i++) {
        ddp_result waited = ddp_wait(tp->group, &works[i]);
        if (result == DDP_OK) result = waited;
    }
    return result;
}

DDPDEF ddp_result ddp_tp_create(ddp_tp **out, ddp_group *group, const ddp_tp_desc *desc) {
    const char *call = "ddp_tp_create";
    ddp__tp_field fields[5];
    size_t bytes = 0;
    ddp_tp_desc d;
    ddp_tp *tp;
    ddp_result result;
    if (!out || !group) return ddp_fail(DDP_ERR_INVALID, "ddp_tp_create: %s is NULL", out ? "group" : "out");
    *out = NULL;
    result = ddp__tp_resolve(group, desc, &d);
    tp = (ddp_tp *)ddp_group_malloc(group, sizeof *tp);
    if (!tp && result == DDP_OK) result = DDP_ERR_NO_MEMORY;
    fields[0].name = "dtype", fields[0].value = d.dtype;
    fields[1].name = "max_rows", fields[1].value = d.max_rows;
    fields[2].name = "sequence_parallel", fields[2].value = d.sequence_parallel;
    fields[3].name = "chunk_count", fields[3].value = d.chunk_count;
    fields[4].name = "accumulate_grads", fields[4].value = d.accumulate_grads;
    result = ddp__tp_agree(group, call, result, fields, 5, &bytes);
    if (result != DDP_OK) {
        ddp_group_mfree(group, tp);
        return result;
    }
    memset(tp, 0, sizeof *tp);
    tp->group = group;
    tp->desc = d;
    tp->rank = ddp_rank(group);
    tp->world_size = ddp_world_size(group);
    tp->size = ddp_dtype_size(d.dtype);
    result = ddp__tp_settle(tp, call, DDP_OK, NULL, 0, 64 * DDP__TP_WORKS);
    if (result == DDP_OK && tp->world_size > 1 && d.chunk_count > 1) result = ddp__tp_warm_up(tp);
    if (result == DDP_OK) *out = tp;
    else ddp_tp_destroy(tp);
    return result;
}

DDPDEF void ddp_tp_destroy(ddp_tp *tp) {
    if (!tp) return;
    if (tp->workspace) (void)ddp_group_free(tp->group, tp->workspace); /* after a failure it is the group's to free */
    ddp_group_mfree(tp->group, tp);
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

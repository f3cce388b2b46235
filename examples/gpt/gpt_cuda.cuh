/*  gpt_cuda.cuh - the GPT of gpt.h on a GPU, in bf16, f16 or f32: products by cuBLASLt, all other work by own
   kernels.

USAGE
    #define DDP_IMPLEMENTATION             in the .cu file of the program, which includes this header
    #include "gpt_cuda.cuh"                nvcc -std=c++17 trainer.cu -lcublasLt -lnccl -lpthread -lm

EXAMPLE
    gpt_cuda_desc desc = DDP_ZERO;                             // bf16
    desc.config = config;
    desc.batch = 32;
    desc.length = 1024;
    desc.group = gpus;                                         // from ddp_cuda_group_create
    desc.stream = stream;
    gpt_cuda *model;
    if (gpt_cuda_create(&model, &desc) != DDP_OK) return puts(ddp_last_error());
    for (int u = 0; u <= config.layers + 1; u++)
        gpt_cuda_unit_forward(model, u, 0, values[u], batch, NULL, NULL);
    for (int u = config.layers + 1; u >= 0; u--)
        gpt_cuda_unit_backward(model, u, 0, values[u], grads[u], batch, NULL, NULL, NULL);
    gpt_cuda_loss(model, 0, sum);
    gpt_cuda_destroy(model);

CONTENTS
    api  batch  tensor parallelism  memory  kernels on rows  layer norm  embedding  loss  launches of kernels
    products  units  graphs  public

CONCEPTS
    Unit        As in gpt.h: 0 is the embedding, 1 to layers are blocks, layers + 1 is the head. A rank can
                have a range of them.
    Slot        Activations of one micro-batch between forward and backward. A pipeline has several in flight.
    Memory      Parameters and gradients belong to the caller: each call gets the pointers of its unit.
                Activations belong to the model, in one allocation of gpt_cuda_create. Later calls do not
                allocate, except that the first product makes the group allocate
                DDP_CUDA_GEMM_WORKSPACE_BYTES.
    Stream      All work is enqueued on desc.stream, and calls do not wait. The device of gpt_cuda_create must
                be current in each call.
    Tensor      With a tensor group each rank has some heads and some hidden channels of every block (Shoeybi
    parallelism et al. 2019): qkv and fc are split by rows, the two projections by columns. Partial outputs,
                and partial gradients of the layer norms' outputs, are all-reduced. Embedding and head are
                replicated.
    Head        All slots share one buffer of logits. The pass that computes the losses overwrites the logits
                with their gradient. If another slot has used the buffer before backward, they are computed
                again. If the vocabulary is not a multiple of 64, padded copies of the head's matrix and
                gradient are used.

DETERMINISM
    Sums have a fixed order: no floating-point atomics, and no split-K products that add in completion order.
    The same calls give the same bits in every run on the same GPU model and cuBLASLt version, with or without
    graphs and recomputation.

    Compiles for sm_80 and sm_90; has not run on a GPU. Tests run it on the CPU, kernels thread by thread, and
    compare it with gpt.h.
*/
#ifndef GPT_CUDA_CUH
#define GPT_CUDA_CUH

#if !defined(DDP_USE_CUBLASLT)
#define DDP_USE_CUBLASLT
#endif
#include "../../ddp_cuda.cuh"
#if defined(__NVCC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675 /* a pragma of gcc */
#endif
#include "gpt.h"
#if defined(__NVCC__)
#pragma nv_diagnostic pop
#endif
#include "gpt_cuda_base.cuh"
#include "gpt_cuda_attention.cuh"
#include <stdarg.h>

//== api ====================================================================================================

typedef struct gpt_cuda_desc {
    gpt_config config;        /* of the full model. channels: a multiple of 8 */
    ddp_dtype dtype;          /* of parameters, activations and gradients. 0 = DDP_BF16; DDP_F16; DDP_F32 for
                                 checks */
    int batch, length;        /* B and T of a micro-batch */
    int slots;                /* micro-batches in flight. 0 = 1 */
    int first_unit, end_unit; /* units of this rank: first_unit to end_unit - 1. end_unit 0 = layers + 2 */
    int recompute;            /* 1 = store only the input of each block, and repeat its forward in backward */
    int graphs; /* 1 = capture forward and backward of each unit, and each gpt_cuda_micro_batch, as a CUDA
                   graph in the second call with the same pointers. Needs a stream other than 0, and no tensor
                   group */
    /* 1 = wte and head.weight have one gradient, the same memory in both tables: the backward of the
       embedding adds to what that of the head has written. 0 = each overwrites its own */
    int tied_grads;
    /* NULL = 1. Otherwise device memory with the factor of the loss in backward. It is read when the kernels
       of the head run, also in graphs. Losses are not multiplied. For f16: see ddp_scaler */
    const float *loss_scale;
    ddp_group *group;  /* GPUs with this rank, for ddp_cuda_gemm: destroyed after the model. gpt_cuda_create
                         requires it, other functions of a desc do not */
    ddp_group *tensor; /* GPUs of tensor parallelism; NULL = none. Unit calls are then collective */
    int tensor_ranks; /* 0 = size of tensor, or 1. gpt_cuda_check, _bytes, _flops and _param_boxes do not need
                          the group */
    int tensor_rank;  /* used if tensor is NULL */
    cudaStream_t stream; /* 0 = CUDA's default stream */
    /* Profiling. NULL = none. Called after each launch of a kernel or product with its FLOPs and the minimum
       of bytes that it moves. Not called for graph launches. */
    void (*note)(void *user, const char *kernel, double flops, double bytes);
    /* NULL = none. Called before each product, also with note_user. For a tuner of ddp_cuda_gemm. */
    void (*note_product)(void *user, const ddp_cuda_gemm_desc *product);
    void *note_user;
} gpt_cuda_desc;

typedef struct gpt_cuda gpt_cuda;

/* Returns NULL for a valid desc, otherwise the error as one sentence. Needs no GPU. The text is valid until
   the next call of this thread. */
GPT_DEF const char *gpt_cuda_check(const gpt_cuda_desc *desc);

/* Bytes of device memory that gpt_cuda_create allocates: activations, buffers. Needs no GPU. desc must be
   valid. */
GPT_DEF size_t gpt_cuda_bytes(const gpt_cuda_desc *desc);

/* FLOPs of forward and backward of one micro-batch in the units of this rank, without recomputation: 6 per
   token and element of a weight matrix (wte only in the head), and 6 T C per token and block for causal
   attention. */
GPT_DEF double gpt_cuda_flops(const gpt_cuda_desc *desc);

/* Size of a micro-batch of n tokens in int32, as it is copied to the GPU:
       tokens[n]  targets[n]  order[n]  begin[n + 1]  count, repeated up to a multiple of 4
   order: positions sorted by token. begin: start of each distinct token in order. count: distinct tokens. */
GPT_DEF size_t gpt_cuda_batch_ints(int tokens);

/* Computes order, begin and count, for the backward of the embedding. Host memory, any thread.
   Returns -1 if a token or target is not in [0, vocab); then nothing is written. */
GPT_DEF int gpt_cuda_batch_sort(int32_t *batch, int tokens, int vocab);

/* The part of a parameter on this rank, in rows and columns of the full parameter. A vector has one
   column. */
typedef struct gpt_cuda_box {
    int64_t row, rows, column, columns;
} gpt_cuda_box;

/* Sets the boxes of parameter `index` of gpt_param_info and returns their number: 3 for weight and bias of
   qkv under tensor parallelism (queries, keys, values), otherwise 1. 0 for an invalid index. */
GPT_DEF int gpt_cuda_param_boxes(const gpt_cuda_desc *desc, int index, gpt_cuda_box box[3]);

/* Allocates the model's memory on the current device. *out is NULL on failure. Free it with gpt_cuda_destroy.
   Errors: DDP_ERR_INVALID (gpt_cuda_check), DDP_ERR_NO_MEMORY, DDP_ERR_ENGINE. */
GPT_DEF ddp_result gpt_cuda_create(gpt_cuda **out, const gpt_cuda_desc *desc);

/* Waits for the stream. NULL is ignored. */
GPT_DEF void gpt_cuda_destroy(gpt_cuda *model);

/* Forward of a unit. Asynchronous.
   values   Pointers to the unit's parameters in the order of gpt_param_info, three per parameter:
            values[3 * i + k] is box k of parameter i of this unit (embedding: wte, wpe; block:
            GPT_LN1_WEIGHT...; head: ln_f.weight, ln_f.bias, head.weight). If it is NULL for k > 0, box k
            follows box k - 1 in memory. Device memory of desc.dtype, row-major, aligned to 16 bytes. The
            table is read before the call returns.
   batch    Device memory, used by embedding and head.
   in, out  (B T, C), not the same memory. NULL = gpt_cuda_stream_of(model, unit, slot), and that of the next
            unit. The embedding has no in. The head has no out: it stores the losses. */
GPT_DEF ddp_result gpt_cuda_unit_forward(gpt_cuda *model, int unit, int slot, void *const *values,
                                         const int32_t *batch, const void *in, void *out);

/* Backward of a unit for the mean of the B T losses, times loss_scale. Follows its forward in the same slot
   with the same values, batch and in. Overwrites grads, a table like values; see also tied_grads. d_out,
   d_in: gradients of output and input, (B T, C), may be the same memory; NULL = gpt_cuda_d_stream_of(model).
   The head has no d_out, the embedding no d_in. Asynchronous. */
GPT_DEF ddp_result gpt_cuda_unit_backward(gpt_cuda *model, int unit, int slot, void *const *values,
                                          void *const *grads, const int32_t *batch, const void *in,
                                          const void *d_out, void *d_in);

/* Calls gpt_cuda_unit_forward of all units, first to last, then gpt_cuda_unit_backward, last to first, with
   the model's own memory between units. values[u], grads[u]: tables of unit u. With graphs it is one graph.
   The rank must have all units. gpt_cuda_loss returns the loss. */
GPT_DEF ddp_result gpt_cuda_micro_batch(gpt_cuda *model, int slot, void *const *const *values,
                                        void *const *const *grads, const int32_t *batch);

/* *sum = sum of the B T losses of the slot's last head forward, in f64 and in a fixed order. sum: device
   memory or pinned host memory, aligned to 8 bytes. Asynchronous. */
GPT_DEF ddp_result gpt_cuda_loss(gpt_cuda *model, int slot, double *sum);

/* Logits (device memory, vocab floats) of position `position` of sequence 0, to sample text after the forward
   of the units before the head. values: table of the head. Asynchronous. */
GPT_DEF ddp_result gpt_cuda_logits(gpt_cuda *model, int slot, void *const *values, int position,
                                   float *logits);

/* The model's buffer for the input of a unit, (B T, C) in desc.dtype: units 1 to layers + 1 of this rank, and
   the unit after its last one. NULL for other units. Valid from the forward that writes it to the backward of
   the unit. */
GPT_DEF void *gpt_cuda_stream_of(gpt_cuda *model, int unit, int slot);

/* The model's buffer for the gradient of the residual stream, (B T, C), shared by all units and slots. */
GPT_DEF void *gpt_cuda_d_stream_of(gpt_cuda *model);

#define GPT_CUDA__ALIGN 16 /* bytes, of every matrix and vector */
#define GPT_CUDA__CHANNELS \
    12288 /* maximum: backward of layer norm has two sums per channel in shared memory */

//== batch ==================================================================================================

GPT_DEF size_t gpt_cuda_batch_ints(int tokens) { return ((size_t)tokens * 4 + 2 + 3) / 4 * 4; }

/* Stable radix sort of the positions by token, with 8 bits per pass (Knuth, volume 3, 5.2.5). spare: as long
   as order. */
static inline void gpt_cuda__sort(const int32_t *token, int32_t *order, int32_t *spare, int n, int vocab) {
    for (int i = 0; i < n; i++) order[i] = i;
    for (int shift = 0; shift < 31 && (vocab - 1) >> shift > 0; shift += 8) {
        int32_t at[257] = {0};
        for (int i = 0; i < n; i++) at[(token[i] >> shift & 255) + 1]++;
        for (int i = 0; i < 256; i++) at[i + 1] += at[i];
        memcpy(spare, order, (size_t)n * sizeof *order);
        for (int i = 0; i < n; i++) order[at[token[spare[i]] >> shift & 255]++] = spare[i];
    }
}

GPT_DEF int gpt_cuda_batch_sort(int32_t *batch, int tokens, int vocab) {
    int32_t *order = batch + 2 * (size_t)tokens, *begin = order + tokens, count = 0;
    for (size_t i = 0; i < 2 * (size_t)tokens; i++)
        if (batch[i] < 0 || batch[i] >= vocab) return -1;
    gpt_cuda__sort(batch, order, begin, tokens, vocab);
    for (int i = 0; i < tokens; i++)
        if (i == 0 || batch[order[i]] != batch[order[i - 1]]) begin[count++] = i;
    for (int i = count; i <= tokens; i++) begin[i] = tokens;
    for (size_t i = 4 * (size_t)tokens + 1; i < gpt_cuda_batch_ints(tokens); i++) batch[i] = count;
    return 0;
}

//== tensor parallelism =====================================================================================

/* Returns desc with defaults resolved. */
static inline gpt_cuda_desc gpt_cuda__resolve(const gpt_cuda_desc *desc) {
    gpt_cuda_desc d = *desc;
    if (d.dtype == DDP_DTYPE_DEFAULT) d.dtype = DDP_BF16;
    if (d.slots == 0) d.slots = 1;
    if (d.end_unit == 0) d.end_unit = d.config.layers + 2;
    if (d.tensor) {
        d.tensor_ranks = ddp_world_size(d.tensor);
        d.tensor_rank = ddp_rank(d.tensor);
    }
    if (d.tensor_ranks == 0) d.tensor_ranks = 1;
    return d;
}

static inline const char *gpt_cuda__message(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline const char *gpt_cuda__message(const char *format, ...) {
    static thread_local char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

/* Attention over the heads of this rank. */
static inline gpt_cuda_attention gpt_cuda__attention_of(const gpt_cuda_desc *d) {
    gpt_cuda_attention it = DDP_ZERO;
    it.batch = d->batch;
    it.length = d->length;
    it.heads = d->config.heads / d->tensor_ranks;
    it.head_size = d->config.channels / d->config.heads;
    it.dtype = d->dtype;
    it.stream = d->stream;
    return it;
}

GPT_DEF const char *gpt_cuda_check(const gpt_cuda_desc *desc) {
    gpt_cuda_attention attention;
    gpt_cuda_desc d;
    const gpt_config *c;
    const char *wrong;
    if (!desc) return "desc is NULL";
    d = gpt_cuda__resolve(desc);
    c = &d.config;
    wrong = gpt_config_check(c);
    if (wrong) return gpt_cuda__message("config: %s", wrong);
    if (d.dtype != DDP_BF16 && d.dtype != DDP_F16 && d.dtype != DDP_F32)
        return gpt_cuda__message("dtype is %s; the model is bf16, f16 or f32", ddp_dtype_name(d.dtype));
    if (c->channels % 8 || c->channels > GPT_CUDA__CHANNELS)
        return gpt_cuda__message(
            "%d channels are not a multiple of 8 up to %d; the kernels read 16 bytes at a time", c->channels,
            GPT_CUDA__CHANNELS);
    if (d.tensor && desc->tensor_ranks && desc->tensor_ranks != d.tensor_ranks)
        return gpt_cuda__message("tensor_ranks is %d, but the tensor group has %d ranks; leave it 0",
                                 desc->tensor_ranks, d.tensor_ranks);
    if (d.tensor_ranks < 1 || d.tensor_rank < 0 || d.tensor_rank >= d.tensor_ranks)
        return gpt_cuda__message("tensor_rank is %d of %d; ranks are numbered from 0", d.tensor_rank,
                                 d.tensor_ranks);
    if (c->heads % d.tensor_ranks)
        return gpt_cuda__message("%d tensor ranks do not divide %d heads; each rank has whole heads",
                                 d.tensor_ranks, c->heads);
    if (c->channels / d.tensor_ranks % 8)
        return gpt_cuda__message("%d channels over %d tensor ranks are %d each; that must be a multiple of 8",
                                 c->channels, d.tensor_ranks, c->channels / d.tensor_ranks);
    if (d.batch < 1 || d.length < 1)
        return gpt_cuda__message("batch %d and length %d must be at least 1", d.batch, d.length);
    if (d.length > c->context)
        return gpt_cuda__message("length %d is more than the context of %d positions", d.length, c->context);
    if ((int64_t)d.batch * d.length > (1 << 26))
        return gpt_cuda__message(
            "batch %d times length %d is more than %d tokens; use more, smaller micro-batches", d.batch,
            d.length, 1 << 26);
    if (d.slots < 1 || d.slots > 4096)
        return gpt_cuda__message("slots is %d; 1 to 4096 micro-batches can be kept", d.slots);
    if (d.first_unit < 0 || d.first_unit >= d.end_unit || d.end_unit > c->layers + 2)
        return gpt_cuda__message("units %d to %d are not part of the model's, 0 to %d", d.first_unit,
                                 d.end_unit - 1, c->layers + 1);
    if (d.graphs && d.tensor_ranks > 1)
        return "graphs is set with a tensor group; its collectives are not captured, so leave one of them "
               "out";
    attention = gpt_cuda__attention_of(&d);
    wrong = c->layers > 0 ? gpt_cuda_attention_check(&attention) : NULL;
    return wrong ? gpt_cuda__message("attention: %s", wrong) : NULL;
}

GPT_DEF int gpt_cuda_param_boxes(const gpt_cuda_desc *desc, int index, gpt_cuda_box box[3]) {
    gpt_cuda_desc d = gpt_cuda__resolve(desc);
    int kind = (index - 2) % GPT_BLOCK_PARAMS, count = 1;
    int64_t ranks = d.tensor_ranks, rank = d.tensor_rank;
    gpt_param p;
    memset(box, 0, 3 * sizeof *box);
    if (gpt_param_info(&d.config, index, &p) != 0) return 0;
    box[0].rows = p.shape[0];
    box[0].columns = p.shape[1];
    if (p.unit < 1 || p.unit > d.config.layers || ranks == 1) return 1;
    if (kind == GPT_QKV_WEIGHT || kind == GPT_QKV_BIAS) count = 3;
    if (count == 3 || kind == GPT_FC_WEIGHT || kind == GPT_FC_BIAS)
        for (int k = 0; k < count; k++) {
            int64_t rows = p.shape[0] / count;
            box[k].row = rows * k + rows / ranks * rank;
            box[k].rows = rows / ranks;
            box[k].columns = p.shape[1];
        }
    if (kind == GPT_ATTN_WEIGHT || kind == GPT_MLP_WEIGHT) {
        box[0].columns = p.shape[1] / ranks;
        box[0].column = box[0].columns * rank;
    }
    return count;
}

GPT_DEF double gpt_cuda_flops(const gpt_cuda_desc *desc) {
    gpt_cuda_desc d = gpt_cuda__resolve(desc);
    double C = d.config.channels, tokens = (double)d.batch * d.length, flops = 0;
    for (int unit = d.first_unit; unit < d.end_unit; unit++)
        if (unit == d.config.layers + 1)
            flops += 6 * C * d.config.vocab;
        else if (unit > 0)
            flops += (6 * 12 * C * C + 6 * C * d.length) / d.tensor_ranks;
    return tokens * flops;
}

//== memory =================================================================================================

enum {
    GPT_CUDA__NORM_BLOCKS = 528, /* blocks with partial sums over rows, in layer norm */
    GPT_CUDA__GRAPHS = 4         /* graphs per unit, direction and slot, and of micro-batches */
};

/* Activations of a block for its backward. L = C / tensor ranks. */
typedef struct gpt_cuda__acts {
    char *ln1, *qkv, *attention;          /* (B, T, C) (B, T, 3L) (B, T, L) */
    char *middle, *ln2, *fc, *gelu;       /* (B, T, C) (B, T, C) (B, T, 4L) (B, T, 4L) */
    float *mean1, *rstd1, *mean2, *rstd2; /* (B, T) */
    float *lse;                           /* (B, heads of this rank, T) */
} gpt_cuda__acts;

typedef struct gpt_cuda__head {
    char *ln;                    /* (B, T, C) */
    float *mean, *rstd, *losses; /* (B, T) */
} gpt_cuda__head;

enum {
    GPT_CUDA__TABLES = 6 * GPT_BLOCK_PARAMS, /* pointers to values and gradients of a unit */
    GPT_CUDA__KEY = GPT_CUDA__TABLES + 6     /* pointers of a unit's call */
};

/* A CUDA graph of a unit or of a micro-batch. The key has all pointers of the call. */
typedef struct gpt_cuda__graph {
    const void **key;
    int seen;      /* the work has run once with this key */
    uint64_t used; /* clock of the last use */
    cudaGraphExec_t exec;
} gpt_cuda__graph;

struct gpt_cuda {
    gpt_cuda_desc desc;      /* resolved */
    int f32, rows, L, heads; /* rows = B T; L channels and heads of this rank */
    size_t size, bytes;      /* of an element; of memory */
    int64_t padded;          /* V rounded up to a multiple of 64: columns of logits */
    char *memory;
    int block_sets;           /* sets of activations: one per slot and block, or one with recompute */
    gpt_cuda__acts *blocks;   /* [slot][block of this rank] */
    gpt_cuda__head *heads_of; /* [slot] */
    char **stream;            /* [slot][unit - first + 1]: inputs; last: output of the last unit */
    char *d_stream, *d_middle, *d_norm, *d_wide; /* (B, T, C) three times, (B, T, 4L) */
    char *logits;                                /* (B, T, padded), then their gradient */
    char *head,
        *d_head;     /* (padded, C): padded copies of the head's matrix and gradient; NULL if V == padded */
    float *partial;  /* GPT_CUDA__NORM_BLOCKS partial sums of 2 C */
    char *attention; /* workspace of attention */
    int stored_unit, stored_slot; /* recompute: unit and slot of the stored activations; -1 = none */
    int logits_slot;              /* slot of the stored logits; -1 = none */
    int capturing;
    int in_micro_batch; /* units are called by gpt_cuda_micro_batch, which makes one graph of them */
    /* [unit - first][direction][slot][GPT_CUDA__GRAPHS], followed by GPT_CUDA__GRAPHS of micro-batches */
    gpt_cuda__graph *graphs;
    const void **keys, **key; /* keys of all graphs; key of the current micro-batch */
    uint64_t clock;           /* counts uses of graphs */
};

static inline char *gpt_cuda__alloc(char *memory, size_t *used, size_t bytes) {
    char *at = memory ? memory + *used : NULL;
    *used += (bytes + 255) / 256 * 256;
    return at;
}

static inline void gpt_cuda__place_block(const gpt_cuda *m, char *memory, size_t *used, gpt_cuda__acts *a) {
    size_t rows = (size_t)m->rows, C = (size_t)m->desc.config.channels * m->size, L = (size_t)m->L * m->size,
           column = rows * sizeof(float);
    a->ln1 = gpt_cuda__alloc(memory, used, rows * C);
    a->qkv = gpt_cuda__alloc(memory, used, rows * 3 * L);
    a->attention = gpt_cuda__alloc(memory, used, rows * L);
    a->middle = gpt_cuda__alloc(memory, used, rows * C);
    a->ln2 = gpt_cuda__alloc(memory, used, rows * C);
    a->fc = gpt_cuda__alloc(memory, used, rows * 4 * L);
    a->gelu = gpt_cuda__alloc(memory, used, rows * 4 * L);
    a->mean1 = (float *)gpt_cuda__alloc(memory, used, column);
    a->rstd1 = (float *)gpt_cuda__alloc(memory, used, column);
    a->mean2 = (float *)gpt_cuda__alloc(memory, used, column);
    a->rstd2 = (float *)gpt_cuda__alloc(memory, used, column);
    a->lse = (float *)gpt_cuda__alloc(memory, used, column * (size_t)m->heads);
}

/* Allocates the buffers that all units share. */
static inline void gpt_cuda__place_shared(gpt_cuda *m, char *memory, size_t *used) {
    size_t rows = (size_t)m->rows, C = (size_t)m->desc.config.channels, L = (size_t)m->L;
    int layers = m->desc.config.layers, has_head = m->desc.end_unit == layers + 2;
    int has_block = m->desc.first_unit <= layers && m->desc.end_unit > 1 && layers > 0;
    gpt_cuda_attention attention = gpt_cuda__attention_of(&m->desc);
    m->d_stream = gpt_cuda__alloc(memory, used, rows * C * m->size);
    if (!has_block && !has_head) return;
    m->d_norm = gpt_cuda__alloc(memory, used, rows * C * m->size);
    m->partial = (float *)gpt_cuda__alloc(memory, used, 2 * C * GPT_CUDA__NORM_BLOCKS * sizeof(float));
    if (has_head) m->logits = gpt_cuda__alloc(memory, used, rows * (size_t)m->padded * m->size);
    if (has_head && m->padded != m->desc.config.vocab) {
        m->head = gpt_cuda__alloc(memory, used, (size_t)m->padded * C * m->size);
        m->d_head = gpt_cuda__alloc(memory, used, (size_t)m->padded * C * m->size);
    }
    if (!has_block) return;
    m->d_middle = gpt_cuda__alloc(memory, used, rows * C * m->size);
    m->d_wide = gpt_cuda__alloc(memory, used, rows * 4 * L * m->size);
    m->attention = gpt_cuda__alloc(memory, used, gpt_cuda_attention_workspace(&attention));
}

/* Assigns all device memory and returns its size. memory NULL: only computes the size. */
static inline size_t gpt_cuda__layout(gpt_cuda *m, char *memory) {
    const gpt_cuda_desc *d = &m->desc;
    size_t used = 0, rows = (size_t)m->rows, C = (size_t)d->config.channels * m->size;
    int layers = d->config.layers, first = d->first_unit > 1 ? d->first_unit : 1,
        last = d->end_unit <= layers ? d->end_unit : layers + 1;
    for (int slot = 0; slot < d->slots; slot++) {
        for (int unit = first; unit <= last; unit++) {
            char *at = gpt_cuda__alloc(memory, &used, rows * C);
            if (m->stream) m->stream[slot * (d->end_unit - d->first_unit + 1) + unit - d->first_unit] = at;
        }
        for (int unit = first; unit <= layers && unit < d->end_unit; unit++) {
            gpt_cuda__acts acts, *at = m->blocks ? &m->blocks[slot * layers + unit - 1] : &acts;
            if (d->recompute && (slot > 0 || unit > first)) {
                if (m->blocks) *at = m->blocks[first - 1];
            } else
                gpt_cuda__place_block(m, memory, &used, at);
        }
        if (d->end_unit == layers + 2) {
            gpt_cuda__head head;
            head.ln = gpt_cuda__alloc(memory, &used, rows * C);
            head.mean = (float *)gpt_cuda__alloc(memory, &used, rows * sizeof(float));
            head.rstd = (float *)gpt_cuda__alloc(memory, &used, rows * sizeof(float));
            head.losses = (float *)gpt_cuda__alloc(memory, &used, rows * sizeof(float));
            if (m->heads_of) m->heads_of[slot] = head;
        }
    }
    gpt_cuda__place_shared(m, memory, &used);
    return used;
}

/* Sets the sizes of a model, without memory. */
static inline void gpt_cuda__shape(gpt_cuda *m, const gpt_cuda_desc *desc) {
    memset(m, 0, sizeof *m);
    m->desc = gpt_cuda__resolve(desc);
    m->f32 = m->desc.dtype == DDP_F32;
    m->size = m->f32 ? 4 : 2;
    m->rows = m->desc.batch * m->desc.length;
    m->L = m->desc.config.channels / m->desc.tensor_ranks;
    m->heads = m->desc.config.heads / m->desc.tensor_ranks;
    m->padded = ((int64_t)m->desc.config.vocab + 63) / 64 * 64;
    m->stored_unit = -1;
    m->stored_slot = -1;
    m->logits_slot = -1;
}

GPT_DEF size_t gpt_cuda_bytes(const gpt_cuda_desc *desc) {
    gpt_cuda m;
    gpt_cuda__shape(&m, desc);
    return gpt_cuda__layout(&m, NULL);
}

//== kernels on rows ========================================================================================
/* Rows are accessed in packs of 16 bytes, so their length is a multiple of 8 (16-bit) or 4 (f32) elements. */

#if defined(GPT_CUDA_ON_CPU)
#define GPT_CUDA__THREADS(...)
#define GPT_CUDA__IN_FLIGHT /* unrolls a loop, so that the loads of four iterations are in flight */
#else
#define GPT_CUDA__THREADS(...) \
    __launch_bounds__(__VA_ARGS__) /* threads per block, blocks per multiprocessor */
#define GPT_CUDA__IN_FLIGHT _Pragma("unroll 4")
#endif
#define GPT_CUDA__LOG2E 1.44269504f

template <class T> struct alignas(16) gpt_cuda__vector { T v[16 / sizeof(T)]; };

/* out = x + bias + residual. bias (columns) and residual may be NULL. One block per row. */
template <class T>
static __global__ void gpt_cuda__add_kernel(T *out, const T *x, const T *bias, const T *residual,
                                            int columns) {
    enum { K = 16 / sizeof(T) };
    size_t row = (size_t)blockIdx.x * (size_t)columns;
    for (int j = (int)threadIdx.x * K; j < columns; j += (int)blockDim.x * K) {
        T a[K], b[K], r[K];
        gpt_cuda_load<K>(a, x + row + j);
        if (bias) gpt_cuda_load<K>(b, bias + j);
        if (residual) gpt_cuda_load<K>(r, residual + row + j);
        for (int i = 0; i < K; i++) {
            float sum = gpt_cuda_to_float(a[i]);
            if (bias) sum += gpt_cuda_to_float(b[i]);
            if (residual) sum += gpt_cuda_to_float(r[i]);
            a[i] = gpt_cuda_from_float<T>(sum);
        }
        gpt_cuda_store<K>(out + row + j, a);
    }
}

/* Sums partial (parts, columns) over parts. Columns before `split` are stored to first, the others to second.
   A block has 32 warps for 32 columns. Warps alternate parts and are added in order. */
template <class T>
static __global__ void GPT_CUDA__THREADS(1024)
    gpt_cuda__column_sum_kernel(T *first, T *second, int split, const float *partial, int parts,
                                int columns) {
    GPT_CUDA_SHARED(float, sums, 32 * 33);
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, column = (int)blockIdx.x * 32 + lane;
    int end = column < columns ? parts : 0;
    float sum = 0;
    GPT_CUDA__IN_FLIGHT for (int part = warp; part < end; part += 32) {
        float x;
        gpt_cuda_load<1>(&x, partial + (size_t)part * (size_t)columns + column);
        sum += x;
    }
    sums[warp * 33 + lane] = sum;
    gpt_cuda_sync();
    if (warp != 0 || column >= columns) return;
    for (int other = 1; other < 32; other++) sum += sums[other * 33 + lane];
    T rounded = gpt_cuda_from_float<T>(sum);
    gpt_cuda_store<1>(column < split ? first + column : second + (column - split), &rounded);
}

/* out (V) = w (V, C) x (C), in f32. One warp per element. */
template <class T>
static __global__ void GPT_CUDA__THREADS(256)
    gpt_cuda__matrix_vector_kernel(float *out, const T *w, const T *x, int V, int C) {
    enum { K = 16 / sizeof(T) };
    int lane = (int)threadIdx.x % 32, row = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32;
    float sum = 0;
    if (row >= V) return;
    for (int j = lane * K; j < C; j += 32 * K) {
        T a[K], b[K];
        gpt_cuda_load<K>(a, w + (size_t)row * (size_t)C + j);
        gpt_cuda_load<K>(b, x + j);
        for (int i = 0; i < K; i++) sum += gpt_cuda_to_float(a[i]) * gpt_cuda_to_float(b[i]);
    }
    sum = gpt_cuda_warp_sum(sum);
    if (lane == 0) gpt_cuda_store<1>(out + row, &sum);
}

//== layer norm =============================================================================================

/* Layer norm of rows of C: out = (x - mean) rstd weight + shift; stores mean and rstd. With residual, first
   x += bias + residual, rounded to T and stored in sum (may be x); bias may be NULL. One warp per row. Shared
   memory holds the row; each lane reads only its own packs. */
template <class T>
static __global__ void GPT_CUDA__THREADS(256)
    gpt_cuda__norm_kernel(T *out, float *mean, float *rstd, T *sum, const T *x, const T *bias,
                          const T *residual, const T *weight, const T *shift, int rows, int C) {
    enum { K = 16 / sizeof(T) };
    GPT_CUDA_DYNAMIC_SHARED(memory);
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32,
        row = (int)(blockIdx.x * blockDim.x / 32) + warp;
    gpt_cuda__vector<T> *kept = (gpt_cuda__vector<T> *)(void *)memory + (size_t)warp * (size_t)(C / K);
    size_t at = (size_t)row * (size_t)C;
    float total = 0, square = 0, m, r;
    if (row >= rows) return;
    for (int j = lane; j < C / K; j += 32) {
        gpt_cuda__vector<T> a, b;
        gpt_cuda_load<K>(a.v, x + at + j * K);
        if (residual) {
            float value[K];
            gpt_cuda_load<K>(b.v, residual + at + j * K);
            for (int i = 0; i < K; i++) value[i] = gpt_cuda_to_float(a.v[i]) + gpt_cuda_to_float(b.v[i]);
            if (bias) gpt_cuda_load<K>(b.v, bias + j * K);
            for (int i = 0; i < K; i++)
                a.v[i] = gpt_cuda_from_float<T>(bias ? value[i] + gpt_cuda_to_float(b.v[i]) : value[i]);
            gpt_cuda_store<K>(sum + at + j * K, a.v);
        }
        for (int i = 0; i < K; i++) total += gpt_cuda_to_float(a.v[i]);
        kept[j] = a;
    }
    m = gpt_cuda_warp_sum(total) / (float)C;
    for (int j = lane; j < C / K; j += 32) {
        gpt_cuda__vector<T> a = kept[j];
        for (int i = 0; i < K; i++)
            square += (gpt_cuda_to_float(a.v[i]) - m) * (gpt_cuda_to_float(a.v[i]) - m);
    }
    r = gpt_cuda_rsqrt(gpt_cuda_warp_sum(square) / (float)C + 1e-5f);
    for (int j = lane; j < C / K; j += 32) {
        gpt_cuda__vector<T> a = kept[j], w, b;
        gpt_cuda_load<K>(w.v, weight + j * K);
        gpt_cuda_load<K>(b.v, shift + j * K);
        for (int i = 0; i < K; i++)
            a.v[i] = gpt_cuda_from_float<T>((gpt_cuda_to_float(a.v[i]) - m) * r * gpt_cuda_to_float(w.v[i])
                                            + gpt_cuda_to_float(b.v[i]));
        gpt_cuda_store<K>(out + at + j * K, a.v);
    }
    if (lane) return;
    gpt_cuda_store<1>(mean + row, &m);
    gpt_cuda_store<1>(rstd + row, &r);
}

/* Backward of layer norm: dx = add + rstd (g - mean(g) - n mean(g n)), with n = (x - mean) rstd and g = d_out
   weight. dx may be add; add may be NULL. partial (gridDim.x, 2, C): this block's sums of d_out n and of
   d_out. Warps alternate rows. Each warp has its sums in shared memory, each lane those of its own columns;
   at the end they are added in warp order. The i-th sums of the 32 lanes are neighbours, so they are in
   different banks. */
template <class T>
static __global__ void GPT_CUDA__THREADS(256)
    gpt_cuda__norm_backward_kernel(T *dx, const T *add, float *partial, const T *d_out, const T *x,
                                   const float *mean, const float *rstd, const T *weight, int rows, int C) {
    enum { K = 16 / sizeof(T) };
    GPT_CUDA_DYNAMIC_SHARED(memory);
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int wide = (C + 32 * K - 1) / (32 * K) * (32 * K);
    float *all = (float *)(void *)memory, *sums = all + (size_t)warp * 2 * (size_t)wide;
    for (int j = lane; j < 2 * wide; j += 32) sums[j] = 0;
    for (int row = (int)blockIdx.x * warps + warp; row < rows; row += (int)gridDim.x * warps) {
        size_t at = (size_t)row * (size_t)C;
        float sum_g = 0, sum_gn = 0, m, r;
        T d[K], v[K], w[K], a[K];
        gpt_cuda_load<1>(&m, mean + row);
        gpt_cuda_load<1>(&r, rstd + row);
        for (int j = lane * K; j < C; j += 32 * K) {
            gpt_cuda_load<K>(d, d_out + at + j);
            gpt_cuda_load<K>(v, x + at + j);
            gpt_cuda_load<K>(w, weight + j);
            for (int i = 0; i < K; i++) {
                float n = (gpt_cuda_to_float(v[i]) - m) * r, di = gpt_cuda_to_float(d[i]),
                      g = di * gpt_cuda_to_float(w[i]);
                sum_g += g;
                sum_gn += g * n;
                sums[j - lane * K + i * 32 + lane] += di * n;
                sums[wide + j - lane * K + i * 32 + lane] += di;
            }
        }
        sum_g = gpt_cuda_warp_sum(sum_g) / (float)C;
        sum_gn = gpt_cuda_warp_sum(sum_gn) / (float)C;
        for (int j = lane * K; j < C; j += 32 * K) {
            gpt_cuda_load<K>(d, d_out + at + j);
            gpt_cuda_load<K>(v, x + at + j);
            gpt_cuda_load<K>(w, weight + j);
            if (add) gpt_cuda_load<K>(a, add + at + j);
            for (int i = 0; i < K; i++) {
                float n = (gpt_cuda_to_float(v[i]) - m) * r,
                      g = gpt_cuda_to_float(d[i]) * gpt_cuda_to_float(w[i]);
                float value = (g - sum_g - n * sum_gn) * r;
                a[i] = gpt_cuda_from_float<T>(add ? value + gpt_cuda_to_float(a[i]) : value);
            }
            gpt_cuda_store<K>(dx + at + j, a);
        }
    }
    gpt_cuda_sync();
    for (int j = (int)threadIdx.x * 4; j < 2 * C; j += (int)blockDim.x * 4) {
        float sum[4] = {0, 0, 0, 0};
        for (int i = 0; i < 4; i++) {
            int column = j < C ? j + i : j - C + i;
            int at = (j < C ? 0 : wide) + column / (32 * K) * (32 * K) + column % K * 32 + column / K % 32;
            for (int other = 0; other < warps; other++) sum[i] += all[(size_t)other * 2 * (size_t)wide + at];
        }
        gpt_cuda_store<4>(partial + (size_t)blockIdx.x * 2 * (size_t)C + j, sum);
    }
}

//== embedding ==============================================================================================

/* out (rows, C) = wte[token] + wpe[row % T]. One warp per row. */
template <class T>
static __global__ void GPT_CUDA__THREADS(256)
    gpt_cuda__embed_kernel(T *out, const T *wte, const T *wpe, const int32_t *tokens, int rows, int length,
                           int C) {
    enum { K = 16 / sizeof(T) };
    int lane = (int)threadIdx.x % 32, row = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32, token;
    if (row >= rows) return;
    gpt_cuda_load<1>(&token, tokens + row);
    for (int j = lane * K; j < C; j += 32 * K) {
        T a[K], b[K];
        gpt_cuda_load<K>(a, wte + (size_t)token * (size_t)C + j);
        gpt_cuda_load<K>(b, wpe + (size_t)(row % length) * (size_t)C + j);
        for (int i = 0; i < K; i++)
            a[i] = gpt_cuda_from_float<T>(gpt_cuda_to_float(a[i]) + gpt_cuda_to_float(b[i]));
        gpt_cuda_store<K>(out + (size_t)row * (size_t)C + j, a);
    }
}

/* Row of d_wte for each distinct token of the batch: the sum of d_out over its positions, added to the row if
   `add` is 1. Other rows are not written. A block of 8 warps has one token and 32 packs of columns. Warps
   alternate positions and are added in order. */
template <class T>
static __global__ void GPT_CUDA__THREADS(256)
    gpt_cuda__embed_backward_kernel(T *d_wte, const T *d_out, const int32_t *batch, int rows, int C,
                                    int add) {
    enum { K = 16 / sizeof(T), WARPS = 8 };
    GPT_CUDA_SHARED(float, sums, WARPS * 32 * K);
    const int32_t *order = batch + 2 * (size_t)rows, *begin = order + rows;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int j = ((int)blockIdx.y * 32 + lane) * K, count, from, to, token;
    float sum[K];
    gpt_cuda_load<1>(&count, begin + rows + 1);
    if ((int)blockIdx.x >= count) return;
    gpt_cuda_load<1>(&from, begin + blockIdx.x);
    gpt_cuda_load<1>(&to, begin + blockIdx.x + 1);
    for (int i = 0; i < K; i++) sum[i] = 0;
    for (int at = from + warp; at < to && j < C; at += 4 * WARPS) { /* four rows in flight */
        int position[4];
        T d[4][K];
        for (int u = 0; u < 4; u++)
            if (at + u * WARPS < to) gpt_cuda_load<1>(&position[u], order + at + u * WARPS);
        for (int u = 0; u < 4; u++)
            if (at + u * WARPS < to) gpt_cuda_load<K>(d[u], d_out + (size_t)position[u] * (size_t)C + j);
        for (int u = 0; u < 4; u++)
            for (int i = 0; i < K && at + u * WARPS < to; i++) sum[i] += gpt_cuda_to_float(d[u][i]);
    }
    for (int i = 0; i < K; i++) sums[(warp * K + i) * 32 + lane] = sum[i];
    gpt_cuda_sync();
    if (warp != 0 || j >= C) return;
    for (int other = 1; other < WARPS; other++)
        for (int i = 0; i < K; i++) sum[i] += sums[(other * K + i) * 32 + lane];
    T row[K];
    gpt_cuda_load<1>(&from, order + from);
    gpt_cuda_load<1>(&token, batch + from);
    T *d_row = d_wte + (size_t)token * (size_t)C + j;
    if (add) gpt_cuda_load<K>(row, d_row);
    for (int i = 0; i < K; i++)
        row[i] = gpt_cuda_from_float<T>(add ? gpt_cuda_to_float(row[i]) + sum[i] : sum[i]);
    gpt_cuda_store<K>(d_row, row);
}

/* d_wpe (context, C): the sum of d_out over the sequences, in order. Positions from T on become 0. One warp
   per position. */
template <class T>
static __global__ void GPT_CUDA__THREADS(256)
    gpt_cuda__position_backward_kernel(T *d_wpe, const T *d_out, int sequences, int length, int context,
                                       int C) {
    enum { K = 16 / sizeof(T) };
    int lane = (int)threadIdx.x % 32, t = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= context) return;
    for (int j = lane * K; j < C; j += 32 * K) {
        float sum[K];
        T d[4][K];
        for (int i = 0; i < K; i++) sum[i] = 0;
        for (int b = 0; b < sequences && t < length; b += 4) {
            for (int u = 0; u < 4; u++)
                if (b + u < sequences)
                    gpt_cuda_load<K>(d[u],
                                     d_out + ((size_t)(b + u) * (size_t)length + (size_t)t) * (size_t)C + j);
            for (int u = 0; u < 4; u++)
                for (int i = 0; i < K && b + u < sequences; i++) sum[i] += gpt_cuda_to_float(d[u][i]);
        }
        for (int i = 0; i < K; i++) d[0][i] = gpt_cuda_from_float<T>(sum[i]);
        gpt_cuda_store<K>(d_wpe + (size_t)t * (size_t)C + j, d[0]);
    }
}

//== loss ===================================================================================================

/* Online softmax (Milakov and Gimelshein 2018): merges maximum and sum of exp(x - maximum) of two sets. */
GPT_CUDA_DEVICE void gpt_cuda__softmax_join(float *top, float *sum, float other_top, float other_sum) {
    float both = fmaxf(*top, other_top);
    float mine = *top == both ? *sum : *sum * gpt_cuda_exp2((*top - both) * GPT_CUDA__LOG2E);
    float other = other_top == both ? other_sum
                                    : other_sum * gpt_cuda_exp2((other_top - both) * GPT_CUDA__LOG2E);
    *top = both;
    *sum = mine + other;
}

GPT_CUDA_DEVICE void gpt_cuda__softmax_join_warp(float *top, float *sum) {
    for (int mask = 16; mask > 0; mask /= 2) {
        float other_top = gpt_cuda_shuffle_xor(*top, mask), other_sum = gpt_cuda_shuffle_xor(*sum, mask);
        gpt_cuda__softmax_join(top, sum, other_top, other_sum);
    }
}

/* Rounds floats to a pack of 16 bytes, two 16-bit numbers per instruction. */
GPT_CUDA_DEVICE void gpt_cuda__round_pack(float *v, const float *x) { memcpy(v, x, 16); }
template <class T> GPT_CUDA_DEVICE void gpt_cuda__round_pack(T *v, const float *x) {
    uint32_t pair[4];
    GPT_CUDA_UNROLL for (int i = 0; i < 4; i++) pair[i] = gpt_cuda_pack<T>(x[2 * i], x[2 * i + 1]);
    memcpy(v, pair, 16);
}

/* Cross-entropy of a row of logits (rows, padded), of which V columns are used: losses[row] = -log
   softmax[target]. Replaces the row by the gradient of factor * loss, times *scale unless it is NULL; padding
   becomes 0. One block per row.
   CACHED: shared memory holds the row between the two passes, so global memory is read and written once. Only
   the packs with the end of V or the target test single elements, so that the kernel is bound by memory. */
template <class T, int CACHED>
static __global__ void GPT_CUDA__THREADS(1024, 2)
    gpt_cuda__classifier_kernel(T *logits, float *losses, const int32_t *targets, int V, int padded,
                                float factor, const float *scale) {
    enum { K = 16 / sizeof(T) };
    GPT_CUDA_DYNAMIC_SHARED(memory);
    GPT_CUDA_SHARED(float, tops, 32);
    GPT_CUDA_SHARED(float, sums, 32);
    gpt_cuda__vector<T> *kept = (gpt_cuda__vector<T> *)(void *)memory;
    T *x = logits + (size_t)blockIdx.x * (size_t)padded, at_target;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32, target;
    float top = -INFINITY, sum = 0, lse, x_of[K];
    gpt_cuda_load<1>(&target, targets + blockIdx.x);
    gpt_cuda_load<1>(&at_target, x + target);
    if (scale) {
        float times;
        gpt_cuda_load<1>(&times, scale);
        factor *= times;
    }
    for (int j = (int)threadIdx.x; j < padded / K; j += (int)blockDim.x) {
        gpt_cuda__vector<T> a;
        float both = top;
        gpt_cuda_load_stream<K>(a.v, x + j * K);
        if (CACHED) kept[j] = a;
        if (j * K >= V) continue;
        GPT_CUDA_UNROLL for (int i = 0; i < K; i++) x_of[i] = gpt_cuda_to_float(a.v[i]);
        if ((j + 1) * K > V)
            GPT_CUDA_UNROLL for (int i = 0; i < K; i++) x_of[i] = j * K + i < V ? x_of[i] : -INFINITY;
        GPT_CUDA_UNROLL for (int i = 0; i < K; i++) both = fmaxf(both, x_of[i]);
        sum *= gpt_cuda_exp2((top - both) * GPT_CUDA__LOG2E);
        top = both;
        GPT_CUDA_UNROLL for (int i = 0; i < K; i++) sum += gpt_cuda_exp2((x_of[i] - top) * GPT_CUDA__LOG2E);
    }
    gpt_cuda__softmax_join_warp(&top, &sum);
    if (lane == 0) {
        tops[warp] = top;
        sums[warp] = sum;
    }
    gpt_cuda_sync();
    top = lane < warps ? tops[lane] : -INFINITY;
    sum = lane < warps ? sums[lane] : 0;
    gpt_cuda__softmax_join_warp(&top, &sum);
    lse = top + logf(sum);
    for (int j = (int)threadIdx.x; j < padded / K; j += (int)blockDim.x) {
        gpt_cuda__vector<T> a;
        if (CACHED)
            a = kept[j];
        else
            gpt_cuda_load_stream<K>(a.v, x + j * K);
        GPT_CUDA_UNROLL for (int i = 0; i < K; i++)
            x_of[i] = gpt_cuda_exp2((gpt_cuda_to_float(a.v[i]) - lse) * GPT_CUDA__LOG2E) * factor;
        if (j == target / K)
            GPT_CUDA_UNROLL for (int i = 0; i < K; i++) x_of[i] -= j * K + i == target ? factor : 0.0f;
        if ((j + 1) * K > V)
            GPT_CUDA_UNROLL for (int i = 0; i < K; i++) x_of[i] = j * K + i < V ? x_of[i] : 0.0f;
        gpt_cuda__round_pack(a.v, x_of);
        gpt_cuda_store_stream<K>(x + j * K, a.v);
    }
    if (threadIdx.x) return;
    lse -= gpt_cuda_to_float(at_target);
    gpt_cuda_store<1>(losses + blockIdx.x, &lse);
}

/* *out = sum of x (count), in f64. One block of 256 threads, then a tree. */
static __global__ void GPT_CUDA__THREADS(256) gpt_cuda__sum_kernel(double *out, const float *x, int count) {
    GPT_CUDA_SHARED(double, sums, 256);
    int thread = (int)threadIdx.x;
    double sum = 0;
    for (int i = thread; i < count; i += 256) {
        float value;
        gpt_cuda_load<1>(&value, x + i);
        sum += (double)value;
    }
    sums[thread] = sum;
    for (int half = 128; half > 0; half /= 2) {
        gpt_cuda_sync();
        if (thread < half) sums[thread] += sums[thread + half];
    }
    if (thread == 0) gpt_cuda_store<1>(out, &sums[0]);
}

//== launches of kernels ====================================================================================
/* Void pointers point to memory of the model's dtype. */

/* Calls a function template with the type of the model. */
#define GPT_CUDA__AS(m, function, ...) \
    gpt_cuda__as((m)->desc.dtype, [&](auto type) { return function<decltype(type)>(m, __VA_ARGS__); })
template <class F> static inline ddp_result gpt_cuda__as(ddp_dtype dtype, const F &call) {
    if (dtype == DDP_F32) return call(float());
    if (dtype == DDP_F16) return call(gpt_f16());
    return call(gpt_bf16());
}

static inline void gpt_cuda__note(const gpt_cuda *m, const char *name, double flops, double bytes) {
    if (m->desc.note && !m->capturing) m->desc.note(m->desc.note_user, name, flops, bytes);
}

/* Threads of a block for a row of `columns`: one per pack, a multiple of 32, at most max. */
static inline unsigned gpt_cuda__threads(const gpt_cuda *m, int64_t columns, int64_t max) {
    int64_t packs = columns * (int64_t)m->size / 16, threads = (packs + 31) / 32 * 32;
    return (unsigned)(threads < max ? threads : max);
}

template <class T>
static ddp_result gpt_cuda__add(gpt_cuda *m, void *out, const void *x, const void *bias, const void *residual,
                                int rows, int columns) {
    DDP_TRY(GPT_CUDA_LAUNCH(gpt_cuda__add_kernel<T>, (unsigned)rows, gpt_cuda__threads(m, columns, 256), 0,
                            m->desc.stream, (T *)out, (const T *)x, (const T *)bias, (const T *)residual,
                            columns));
    gpt_cuda__note(m, "bias, residual", 0, (2.0 + (residual != NULL)) * rows * columns * sizeof(T));
    return DDP_OK;
}

template <class T>
static ddp_result gpt_cuda__partial_sum(gpt_cuda *m, void *first, void *second, int split, int parts,
                                        int columns) {
    return GPT_CUDA_LAUNCH(gpt_cuda__column_sum_kernel<T>, (unsigned)(columns + 31) / 32, 1024, 0,
                           m->desc.stream, (T *)first, (T *)second, split, m->partial, parts, columns);
}

/* residual NULL: normalises x, and does not write sum. */
template <class T>
static ddp_result gpt_cuda__norm(gpt_cuda *m, void *out, float *mean, float *rstd, void *sum, const void *x,
                                 const void *bias, const void *residual, const void *weight,
                                 const void *shift, int rows) {
    int C = m->desc.config.channels, warps = (int)(49152 / ((size_t)C * sizeof(T)));
    if (warps < 1) warps = 1;
    if (warps > 8) warps = 8;
    DDP_TRY(GPT_CUDA_LAUNCH(gpt_cuda__norm_kernel<T>, (unsigned)((rows + warps - 1) / warps),
                            (unsigned)warps * 32, (size_t)warps * (size_t)C * sizeof(T), m->desc.stream,
                            (T *)out, mean, rstd, (T *)sum, (const T *)x, (const T *)bias,
                            (const T *)residual, (const T *)weight, (const T *)shift, rows, C));
    gpt_cuda__note(m, residual ? "residual, layer norm" : "layer norm", 0,
                   (residual ? 4.0 : 2.0) * rows * C * sizeof(T));
    return DDP_OK;
}

template <class T>
static ddp_result gpt_cuda__norm_backward(gpt_cuda *m, void *dx, const void *add, void *d_weight,
                                          void *d_shift, const void *d_out, const void *x, const float *mean,
                                          const float *rstd, const void *weight) {
    int C = m->desc.config.channels, rows = m->rows, pass = 32 * 16 / (int)sizeof(T), blocks, warps;
    size_t sums = 8 * (size_t)((C + pass - 1) / pass * pass); /* bytes per warp */
    warps = 98304 / sums > 8 ? 8 : (int)(98304 / sums);
    blocks = (rows + warps - 1) / warps;
    if (blocks > GPT_CUDA__NORM_BLOCKS) blocks = GPT_CUDA__NORM_BLOCKS;
    DDP_TRY(GPT_CUDA_LAUNCH(gpt_cuda__norm_backward_kernel<T>, (unsigned)blocks, (unsigned)warps * 32,
                            (size_t)warps * sums, m->desc.stream, (T *)dx, (const T *)add, m->partial,
                            (const T *)d_out, (const T *)x, mean, rstd, (const T *)weight, rows, C));
    DDP_TRY(gpt_cuda__partial_sum<T>(m, d_weight, d_shift, C, blocks, 2 * C));
    gpt_cuda__note(m, "layer norm backward", 0, (add ? 4.0 : 3.0) * rows * C * sizeof(T));
    return DDP_OK;
}

template <class T>
static ddp_result gpt_cuda__embed(gpt_cuda *m, void *out, const void *wte, const void *wpe,
                                  const int32_t *batch) {
    int C = m->desc.config.channels;
    DDP_TRY(GPT_CUDA_LAUNCH(gpt_cuda__embed_kernel<T>, (unsigned)(m->rows + 7) / 8, 256, 0, m->desc.stream,
                            (T *)out, (const T *)wte, (const T *)wpe, batch, m->rows, m->desc.length, C));
    gpt_cuda__note(m, "embedding", 0, 2.0 * m->rows * C * sizeof(T));
    return DDP_OK;
}

static inline ddp_result gpt_cuda__fail(cudaError_t error, const char *call, const char *what) {
    return ddp_fail(error == cudaErrorMemoryAllocation ? DDP_ERR_NO_MEMORY : DDP_ERR_ENGINE,
                    "gpt_cuda: %s of %s: %s (%s)", call, what, cudaGetErrorString(error),
                    cudaGetErrorName(error));
}

template <class T>
static ddp_result gpt_cuda__embed_backward(gpt_cuda *m, void *d_wte, void *d_wpe, const int32_t *batch,
                                           const void *d_out) {
    const gpt_config *c = &m->desc.config;
    int C = c->channels, width = 32 * 16 / (int)sizeof(T), tokens = m->rows < c->vocab ? m->rows : c->vocab;
    size_t bytes = (size_t)c->vocab * (size_t)C * sizeof(T);
    if (!m->desc.tied_grads) {
        cudaError_t error = cudaMemsetAsync(d_wte, 0, bytes, m->desc.stream);
        if (error != cudaSuccess) return gpt_cuda__fail(error, "cudaMemsetAsync", "the gradient of wte");
        gpt_cuda__note(m, "embedding gradient, zeros", 0, (double)bytes);
    }
    DDP_TRY(GPT_CUDA_LAUNCH(
        gpt_cuda__embed_backward_kernel<T>, dim3((unsigned)tokens, (unsigned)((C + width - 1) / width)), 256,
        0, m->desc.stream, (T *)d_wte, (const T *)d_out, batch, m->rows, C, m->desc.tied_grads));
    gpt_cuda__note(m, "embedding backward", 0, (2.0 + m->desc.tied_grads) * m->rows * C * sizeof(T));
    DDP_TRY(GPT_CUDA_LAUNCH(gpt_cuda__position_backward_kernel<T>, (unsigned)(c->context + 7) / 8, 256, 0,
                            m->desc.stream, (T *)d_wpe, (const T *)d_out, m->desc.batch, m->desc.length,
                            c->context, C));
    gpt_cuda__note(m, "position backward", 0, 1.0 * m->rows * C * sizeof(T));
    return DDP_OK;
}

/* Shared memory for a row of logits: with static memory below 99 KiB, the limit of a block on every GPU since
   sm_80. */
#define GPT_CUDA__ROW_BYTES 100864

/* Computes losses and replaces logits by their gradient, for the mean over rows. */
template <class T>
static ddp_result gpt_cuda__classify(gpt_cuda *m, void *logits, float *losses, const int32_t *targets) {
    size_t row = (size_t)m->padded * sizeof(T);
    unsigned threads = gpt_cuda__threads(m, m->padded, 1024);
    float factor = 1.0f / (float)m->rows;
    int V = m->desc.config.vocab, padded = (int)m->padded;
    if (row <= GPT_CUDA__ROW_BYTES)
        DDP_TRY(GPT_CUDA_LAUNCH((gpt_cuda__classifier_kernel<T, 1>), (unsigned)m->rows, threads, row,
                                m->desc.stream, (T *)logits, losses, targets, V, padded, factor,
                                m->desc.loss_scale));
    else
        DDP_TRY(GPT_CUDA_LAUNCH((gpt_cuda__classifier_kernel<T, 0>), (unsigned)m->rows, threads, 0,
                                m->desc.stream, (T *)logits, losses, targets, V, padded, factor,
                                m->desc.loss_scale));
    gpt_cuda__note(m, "classifier", 0, (row <= GPT_CUDA__ROW_BYTES ? 2.0 : 3.0) * m->rows * (double)row);
    return DDP_OK;
}

//== products ===============================================================================================

/* A product, row-major, in the model's dtype. */
typedef struct gpt_cuda__product {
    const char *name;
    ddp_cuda_gemm_desc gemm;
    int64_t padding; /* multiplications for padding, not counted in notes */
} gpt_cuda__product;

static inline ddp_result gpt_cuda__multiply(gpt_cuda *m, const gpt_cuda__product *p) {
    const ddp_cuda_gemm_desc *d = &p->gemm;
    double rows = (double)d->m, columns = (double)d->n, depth = (double)d->k;
    double elements = rows * depth + depth * columns;
    if (m->desc.note_product && !m->capturing) m->desc.note_product(m->desc.note_user, d);
    DDP_TRY(ddp_cuda_gemm(m->desc.group, d, m->desc.stream));
    elements += rows * columns * (1 + (d->addend != NULL) + (d->aux != NULL));
    gpt_cuda__note(m, p->name, 2 * (rows * columns * depth - (double)p->padding), (double)m->size * elements);
    return DDP_OK;
}

/* y (rows, N) = x (rows, K) weight (N, K)^T. The caller adds the epilogue. */
static inline gpt_cuda__product gpt_cuda__linear(const gpt_cuda *m, const char *name, void *y, const void *x,
                                                 const void *weight, int64_t K, int64_t N) {
    gpt_cuda__product p = DDP_ZERO;
    p.name = name;
    p.gemm.m = m->rows;
    p.gemm.n = N;
    p.gemm.k = K;
    p.gemm.a = x;
    p.gemm.b = weight;
    p.gemm.trans_b = 1;
    p.gemm.c = y;
    p.gemm.dtype = m->desc.dtype;
    return p;
}

/* dx (rows, K) = dy (rows, N) weight (N, K) */
static inline gpt_cuda__product gpt_cuda__linear_input(const gpt_cuda *m, const char *name, void *dx,
                                                       const void *dy, const void *weight, int64_t K,
                                                       int64_t N) {
    gpt_cuda__product p = DDP_ZERO;
    p.name = name;
    p.gemm.m = m->rows;
    p.gemm.n = K;
    p.gemm.k = N;
    p.gemm.a = dy;
    p.gemm.b = weight;
    p.gemm.c = dx;
    p.gemm.dtype = m->desc.dtype;
    return p;
}

/* d_weight (N, K) = dy^T x, d_bias (N) = sum of the rows of dy. d_bias may be NULL. */
static inline gpt_cuda__product gpt_cuda__linear_weight(const gpt_cuda *m, const char *name, void *d_weight,
                                                        void *d_bias, const void *dy, const void *x,
                                                        int64_t K, int64_t N) {
    gpt_cuda__product p = DDP_ZERO;
    p.name = name;
    p.gemm.m = N;
    p.gemm.n = K;
    p.gemm.k = m->rows;
    p.gemm.a = dy;
    p.gemm.trans_a = 1;
    p.gemm.b = x;
    p.gemm.c = d_weight;
    p.gemm.dtype = m->desc.dtype;
    if (d_bias) {
        p.gemm.epilogue = DDP_CUDA_EPILOGUE_BIAS_GRAD;
        p.gemm.bias_grad = d_bias;
    }
    return p;
}

//== units ==================================================================================================

/* Pointers to the values or gradients of a unit, by parameter and box. */
typedef struct gpt_cuda__table {
    char *at[GPT_BLOCK_PARAMS][3];
} gpt_cuda__table;

/* Arguments of a call of a unit. */
typedef struct gpt_cuda__call {
    int unit, slot, backward;
    int again; /* backward first repeats the forward, because another call has overwritten the activations */
    gpt_cuda__table values, grads;
    const int32_t *batch;
    const char *in, *d_out;
    char *out, *d_in;
} gpt_cuda__call;

/* Whether queries, keys and values are contiguous, in weight and bias. */
static inline int gpt_cuda__qkv_contiguous(const gpt_cuda *m, const gpt_cuda__table *t) {
    size_t bias = (size_t)m->L * m->size, weight = bias * (size_t)m->desc.config.channels;
    for (int k = 1; k < 3; k++)
        if (t->at[GPT_QKV_WEIGHT][k] != t->at[GPT_QKV_WEIGHT][0] + (size_t)k * weight
            || t->at[GPT_QKV_BIAS][k] != t->at[GPT_QKV_BIAS][0] + (size_t)k * bias)
            return 0;
    return 1;
}

/* All-reduces a partial result (B, T, C) over the tensor ranks, in place. */
static inline ddp_result gpt_cuda__sum_ranks(gpt_cuda *m, void *data) {
    size_t count = (size_t)m->rows * (size_t)m->desc.config.channels;
    if (m->desc.tensor_ranks == 1) return DDP_OK;
    DDP_TRY(ddp_cuda_set_stream(m->desc.tensor, m->desc.stream));
    DDP_TRY(ddp_all_reduce(m->desc.tensor, data, data, count, m->desc.dtype, DDP_OP_SUM, NULL));
    gpt_cuda__note(m, "all-reduce over tensor ranks", 0, 2.0 * (double)count * (double)m->size);
    return DDP_OK;
}

static inline ddp_result gpt_cuda__attend(gpt_cuda *m, const gpt_cuda__acts *a) {
    gpt_cuda_attention it = gpt_cuda__attention_of(&m->desc);
    DDP_TRY(gpt_cuda_attention_forward(&it, a->qkv, a->attention, a->lse));
    gpt_cuda__note(m, "attention", gpt_cuda_attention_flops(&it, 0), 4.0 * m->rows * m->L * (double)m->size);
    return DDP_OK;
}

static inline ddp_result gpt_cuda__attend_backward(gpt_cuda *m, void *d_qkv, const void *d_out,
                                                   const gpt_cuda__acts *a) {
    gpt_cuda_attention it = gpt_cuda__attention_of(&m->desc);
    DDP_TRY(gpt_cuda_attention_backward(&it, a->qkv, a->attention, a->lse, d_out, d_qkv, m->attention));
    gpt_cuda__note(m, "attention backward", gpt_cuda_attention_flops(&it, 1),
                   8.0 * m->rows * m->L * (double)m->size);
    return DDP_OK;
}

/* qkv (B, T, 3L): one product, or three if the boxes are not contiguous. */
static inline ddp_result gpt_cuda__qkv(gpt_cuda *m, const gpt_cuda__table *w, char *qkv, const char *ln) {
    int64_t C = m->desc.config.channels, L = m->L;
    int whole = gpt_cuda__qkv_contiguous(m, w);
    for (int k = 0; k < (whole ? 1 : 3); k++) {
        gpt_cuda__product p = gpt_cuda__linear(m, "qkv", qkv + (size_t)k * (size_t)L * m->size, ln,
                                               w->at[GPT_QKV_WEIGHT][k], C, whole ? 3 * L : L);
        p.gemm.ldc = 3 * L;
        p.gemm.epilogue = DDP_CUDA_EPILOGUE_BIAS;
        p.gemm.bias = w->at[GPT_QKV_BIAS][k];
        DDP_TRY(gpt_cuda__multiply(m, &p));
    }
    return DDP_OK;
}

static inline ddp_result gpt_cuda__qkv_backward(gpt_cuda *m, const gpt_cuda__table *w,
                                                const gpt_cuda__table *g, char *d_ln, const char *d_qkv,
                                                const char *ln) {
    int64_t C = m->desc.config.channels, L = m->L;
    int whole = gpt_cuda__qkv_contiguous(m, g);
    for (int k = 0; k < (whole ? 1 : 3); k++) {
        gpt_cuda__product p = gpt_cuda__linear_weight(
            m, "qkv weight gradient", g->at[GPT_QKV_WEIGHT][k], g->at[GPT_QKV_BIAS][k],
            d_qkv + (size_t)k * (size_t)L * m->size, ln, C, whole ? 3 * L : L);
        p.gemm.lda = 3 * L;
        DDP_TRY(gpt_cuda__multiply(m, &p));
    }
    whole = gpt_cuda__qkv_contiguous(m, w);
    for (int k = 0; k < (whole ? 1 : 3); k++) {
        gpt_cuda__product p = gpt_cuda__linear_input(m, "qkv input gradient", d_ln,
                                                     d_qkv + (size_t)k * (size_t)L * m->size,
                                                     w->at[GPT_QKV_WEIGHT][k], C, whole ? 3 * L : L);
        p.gemm.lda = 3 * L;
        p.gemm.addend = k ? d_ln : NULL;
        DDP_TRY(gpt_cuda__multiply(m, &p));
    }
    return DDP_OK;
}

/* middle = in + attention(ln1(in)), out = middle + mlp(ln2(middle)), as gpt_block_forward. out NULL: leaves
   out the last product, which backward does not need. */
static inline ddp_result gpt_cuda__block_forward(gpt_cuda *m, const gpt_cuda__table *w, gpt_cuda__acts *a,
                                                 const char *in, char *out) {
    int64_t C = m->desc.config.channels, L = m->L;
    gpt_cuda__product p;
    DDP_TRY(GPT_CUDA__AS(m, gpt_cuda__norm, a->ln1, a->mean1, a->rstd1, NULL, in, NULL, NULL,
                         w->at[GPT_LN1_WEIGHT][0], w->at[GPT_LN1_BIAS][0], m->rows));
    DDP_TRY(gpt_cuda__qkv(m, w, a->qkv, a->ln1));
    DDP_TRY(gpt_cuda__attend(m, a));
    p = gpt_cuda__linear(m, "attention projection", a->middle, a->attention, w->at[GPT_ATTN_WEIGHT][0], L, C);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    DDP_TRY(gpt_cuda__sum_ranks(m, a->middle));
    DDP_TRY(GPT_CUDA__AS(m, gpt_cuda__norm, a->ln2, a->mean2, a->rstd2, a->middle, a->middle,
                         w->at[GPT_ATTN_BIAS][0], in, w->at[GPT_LN2_WEIGHT][0], w->at[GPT_LN2_BIAS][0],
                         m->rows));
    p = gpt_cuda__linear(m, "mlp up, gelu", a->gelu, a->ln2, w->at[GPT_FC_WEIGHT][0], C, 4 * L);
    p.gemm.epilogue = DDP_CUDA_EPILOGUE_GELU;
    p.gemm.bias = w->at[GPT_FC_BIAS][0];
    p.gemm.aux = a->fc;
    DDP_TRY(gpt_cuda__multiply(m, &p));
    if (!out) return DDP_OK;
    p = gpt_cuda__linear(m, "mlp down, residual", out, a->gelu, w->at[GPT_MLP_WEIGHT][0], 4 * L, C);
    if (m->desc.tensor_ranks == 1) {
        p.gemm.epilogue = DDP_CUDA_EPILOGUE_BIAS;
        p.gemm.bias = w->at[GPT_MLP_BIAS][0];
        p.gemm.addend = a->middle;
        return gpt_cuda__multiply(m, &p);
    }
    DDP_TRY(gpt_cuda__multiply(m, &p));
    DDP_TRY(gpt_cuda__sum_ranks(m, out));
    return GPT_CUDA__AS(m, gpt_cuda__add, out, out, w->at[GPT_MLP_BIAS][0], a->middle, m->rows, (int)C);
}

/* Computes d_in and all gradients of the block from d_out. d_in may be d_out: the backward of ln1 reads it
   last. */
static inline ddp_result gpt_cuda__block_backward(gpt_cuda *m, const gpt_cuda__table *w,
                                                  const gpt_cuda__table *g, gpt_cuda__acts *a, const char *in,
                                                  const char *d_out, char *d_in) {
    int64_t C = m->desc.config.channels, L = m->L;
    gpt_cuda__product p = gpt_cuda__linear_weight(m, "mlp down weight gradient", g->at[GPT_MLP_WEIGHT][0],
                                                  g->at[GPT_MLP_BIAS][0], d_out, a->gelu, 4 * L, C);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    p = gpt_cuda__linear_input(m, "mlp down input gradient, gelu", m->d_wide, d_out, w->at[GPT_MLP_WEIGHT][0],
                               4 * L, C);
    p.gemm.epilogue = DDP_CUDA_EPILOGUE_GELU_GRAD;
    p.gemm.aux = a->fc;
    DDP_TRY(gpt_cuda__multiply(m, &p));
    p = gpt_cuda__linear_weight(m, "mlp up weight gradient", g->at[GPT_FC_WEIGHT][0], g->at[GPT_FC_BIAS][0],
                                m->d_wide, a->ln2, C, 4 * L);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    p = gpt_cuda__linear_input(m, "mlp up input gradient", m->d_norm, m->d_wide, w->at[GPT_FC_WEIGHT][0], C,
                               4 * L);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    DDP_TRY(gpt_cuda__sum_ranks(m, m->d_norm));
    DDP_TRY(GPT_CUDA__AS(m, gpt_cuda__norm_backward, m->d_middle, d_out, g->at[GPT_LN2_WEIGHT][0],
                         g->at[GPT_LN2_BIAS][0], m->d_norm, a->middle, a->mean2, a->rstd2,
                         w->at[GPT_LN2_WEIGHT][0]));
    p = gpt_cuda__linear_weight(m, "attention projection weight gradient", g->at[GPT_ATTN_WEIGHT][0],
                                g->at[GPT_ATTN_BIAS][0], m->d_middle, a->attention, L, C);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    p = gpt_cuda__linear_input(m, "attention projection input gradient", m->d_norm, m->d_middle,
                               w->at[GPT_ATTN_WEIGHT][0], L, C);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    DDP_TRY(gpt_cuda__attend_backward(m, m->d_wide, m->d_norm, a));
    DDP_TRY(gpt_cuda__qkv_backward(m, w, g, m->d_norm, m->d_wide, a->ln1));
    DDP_TRY(gpt_cuda__sum_ranks(m, m->d_norm));
    return GPT_CUDA__AS(m, gpt_cuda__norm_backward, d_in, m->d_middle, g->at[GPT_LN1_WEIGHT][0],
                        g->at[GPT_LN1_BIAS][0], m->d_norm, in, a->mean1, a->rstd1, w->at[GPT_LN1_WEIGHT][0]);
}

/* Multiplications of a product of the head for the padding rows. */
static inline int64_t gpt_cuda__head_padding(const gpt_cuda *m) {
    return (m->padded - m->desc.config.vocab) * m->rows * m->desc.config.channels;
}

/* Copies the V rows of the head's matrix to or from its padded copy. */
static inline ddp_result gpt_cuda__copy_head(gpt_cuda *m, void *to, const void *from) {
    size_t bytes = (size_t)m->desc.config.vocab * (size_t)m->desc.config.channels * m->size;
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, m->desc.stream);
    if (error != cudaSuccess) return gpt_cuda__fail(error, "cudaMemcpyAsync", "the head's matrix");
    gpt_cuda__note(m, "head matrix, padded", 0, 2.0 * (double)bytes);
    return DDP_OK;
}

/* Computes logits from the normalised input, then the losses, and replaces the logits by their gradient.
   Tensor cores need dimensions that are multiples of 16 bytes for full speed. 50257 is none, so the products
   of the head use a matrix with zero rows up to `padded`. */
static inline ddp_result gpt_cuda__head_loss(gpt_cuda *m, const gpt_cuda__call *call) {
    const gpt_cuda__head *h = &m->heads_of[call->slot];
    const char *weight = call->values.at[2][0];
    gpt_cuda__product p;
    if (m->head) DDP_TRY(gpt_cuda__copy_head(m, m->head, weight));
    p = gpt_cuda__linear(m, "logits", m->logits, h->ln, m->head ? m->head : weight, m->desc.config.channels,
                         m->padded);
    p.padding = gpt_cuda__head_padding(m);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    return GPT_CUDA__AS(m, gpt_cuda__classify, m->logits, h->losses, call->batch + m->rows);
}

static inline ddp_result gpt_cuda__head_forward(gpt_cuda *m, const gpt_cuda__call *call) {
    const gpt_cuda__head *h = &m->heads_of[call->slot];
    DDP_TRY(GPT_CUDA__AS(m, gpt_cuda__norm, h->ln, h->mean, h->rstd, NULL, call->in, NULL, NULL,
                         call->values.at[0][0], call->values.at[1][0], m->rows));
    return gpt_cuda__head_loss(m, call);
}

static inline ddp_result gpt_cuda__head_backward(gpt_cuda *m, const gpt_cuda__call *call) {
    const gpt_cuda__head *h = &m->heads_of[call->slot];
    char *weight = m->head ? m->head : call->values.at[2][0],
         *d_weight = m->head ? m->d_head : call->grads.at[2][0];
    int64_t C = m->desc.config.channels;
    gpt_cuda__product p;
    if (call->again) DDP_TRY(gpt_cuda__head_loss(m, call));
    p = gpt_cuda__linear_weight(m, "head weight gradient", d_weight, NULL, m->logits, h->ln, C, m->padded);
    p.padding = gpt_cuda__head_padding(m);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    if (m->head) DDP_TRY(gpt_cuda__copy_head(m, call->grads.at[2][0], m->d_head));
    p = gpt_cuda__linear_input(m, "head input gradient", m->d_norm, m->logits, weight, C, m->padded);
    p.padding = gpt_cuda__head_padding(m);
    DDP_TRY(gpt_cuda__multiply(m, &p));
    return GPT_CUDA__AS(m, gpt_cuda__norm_backward, call->d_in, NULL, call->grads.at[0][0],
                        call->grads.at[1][0], m->d_norm, call->in, h->mean, h->rstd, call->values.at[0][0]);
}

/* Enqueues all work of a call. */
static inline ddp_result gpt_cuda__work(gpt_cuda *m, const gpt_cuda__call *call) {
    int layers = m->desc.config.layers;
    gpt_cuda__acts *a;
    if (call->unit == 0 && call->backward)
        return GPT_CUDA__AS(m, gpt_cuda__embed_backward, call->grads.at[0][0], call->grads.at[1][0],
                            call->batch, call->d_out);
    if (call->unit == 0)
        return GPT_CUDA__AS(m, gpt_cuda__embed, call->out, call->values.at[0][0], call->values.at[1][0],
                            call->batch);
    if (call->unit == layers + 1)
        return call->backward ? gpt_cuda__head_backward(m, call) : gpt_cuda__head_forward(m, call);
    a = &m->blocks[call->slot * layers + call->unit - 1];
    if (!call->backward) return gpt_cuda__block_forward(m, &call->values, a, call->in, call->out);
    if (call->again) DDP_TRY(gpt_cuda__block_forward(m, &call->values, a, call->in, NULL));
    return gpt_cuda__block_backward(m, &call->values, &call->grads, a, call->in, call->d_out, call->d_in);
}

//== graphs =================================================================================================
/* The first call with a set of pointers runs without a graph, because it queries cuBLASLt and loads kernels.
   The second call captures a graph, which it and later calls launch. Each unit, direction and slot has
   GPT_CUDA__GRAPHS sets of pointers, of which the least recently used is replaced; micro-batches have as
   many. */

typedef ddp_result (*gpt_cuda__work_fn)(gpt_cuda *m, const void *arguments);

static inline size_t gpt_cuda__unit_graphs(const gpt_cuda *m) {
    return (size_t)(m->desc.end_unit - m->desc.first_unit) * 2 * (size_t)m->desc.slots * GPT_CUDA__GRAPHS;
}

/* Pointers in the key of a micro-batch: its batch, the losses of its slot, and the tables of all units. */
static inline size_t gpt_cuda__micro_batch_key(const gpt_cuda *m) {
    return (size_t)(m->desc.end_unit - m->desc.first_unit) * GPT_CUDA__TABLES + 2;
}

static inline ddp_result gpt_cuda__make_graphs(gpt_cuda *m) {
    size_t units = gpt_cuda__unit_graphs(m), whole = gpt_cuda__micro_batch_key(m);
    if (!m->desc.graphs) return DDP_OK;
    m->graphs = (gpt_cuda__graph *)calloc(units + GPT_CUDA__GRAPHS, sizeof *m->graphs);
    m->keys = (const void **)calloc(units * GPT_CUDA__KEY + (GPT_CUDA__GRAPHS + 1) * whole, sizeof *m->keys);
    if (!m->graphs || !m->keys)
        return ddp_fail(DDP_ERR_NO_MEMORY, "gpt_cuda_create: out of host memory for the graphs");
    m->key = m->keys + units * GPT_CUDA__KEY;
    for (size_t i = 0; i < units; i++) m->graphs[i].key = m->keys + i * GPT_CUDA__KEY;
    for (size_t i = 0; i < GPT_CUDA__GRAPHS; i++) m->graphs[units + i].key = m->key + (i + 1) * whole;
    return DDP_OK;
}

static inline void gpt_cuda__graph_drop(gpt_cuda__graph *graph) {
    if (graph->exec) cudaGraphExecDestroy(graph->exec);
    graph->exec = NULL;
    graph->seen = 0;
    graph->used = 0;
}

/* Finds the graph with this key in a list of GPT_CUDA__GRAPHS. Otherwise replaces the least recently used
   one. */
static inline gpt_cuda__graph *gpt_cuda__graph_of(gpt_cuda *m, gpt_cuda__graph *list, const void *const *key,
                                                  size_t key_count) {
    gpt_cuda__graph *graph = list;
    for (int i = 0; i < GPT_CUDA__GRAPHS; i++) {
        if (list[i].seen && memcmp(list[i].key, key, key_count * sizeof *key) == 0) {
            list[i].used = ++m->clock;
            return &list[i];
        }
        if (list[i].used < graph->used) graph = &list[i];
    }
    gpt_cuda__graph_drop(graph);
    memcpy(graph->key, key, key_count * sizeof *key);
    graph->used = ++m->clock;
    return graph;
}

static inline ddp_result gpt_cuda__capture(gpt_cuda *m, gpt_cuda__work_fn work, const void *arguments,
                                           const char *what, cudaGraphExec_t *out) {
    cudaGraph_t graph = NULL;
    ddp_result result;
    cudaError_t error = cudaStreamBeginCapture(m->desc.stream, cudaStreamCaptureModeThreadLocal), ended;
    if (error != cudaSuccess) return gpt_cuda__fail(error, "cudaStreamBeginCapture", what);
    m->capturing = 1;
    result = work(m, arguments);
    m->capturing = 0;
    ended = cudaStreamEndCapture(m->desc.stream, &graph);
    if (result == DDP_OK && ended != cudaSuccess)
        result = gpt_cuda__fail(ended, "cudaStreamEndCapture", what);
    if (result == DDP_OK) {
        error = cudaGraphInstantiate(out, graph, 0);
        if (error != cudaSuccess) {
            *out = NULL;
            result = gpt_cuda__fail(error, "cudaGraphInstantiate", what);
        }
    }
    if (graph) cudaGraphDestroy(graph);
    return result;
}

/* Enqueues the work, directly or as a graph. */
static inline ddp_result gpt_cuda__run(gpt_cuda *m, gpt_cuda__graph *graph, gpt_cuda__work_fn work,
                                       const void *arguments, const char *what) {
    cudaError_t error;
    if (!graph->seen) {
        DDP_TRY(work(m, arguments));
        graph->seen = 1;
        return DDP_OK;
    }
    if (!graph->exec) DDP_TRY(gpt_cuda__capture(m, work, arguments, what, &graph->exec));
    error = cudaGraphLaunch(graph->exec, m->desc.stream);
    return error == cudaSuccess ? DDP_OK : gpt_cuda__fail(error, "cudaGraphLaunch", what);
}

static inline ddp_result gpt_cuda__unit_work(gpt_cuda *m, const void *call) {
    return gpt_cuda__work(m, (const gpt_cuda__call *)call);
}

static inline ddp_result gpt_cuda__issue(gpt_cuda *m, const gpt_cuda__call *call) {
    const void *key[GPT_CUDA__KEY] = {call->batch, call->in,   call->d_out,
                                      call->out,   call->d_in, call->again ? m : NULL};
    int place = ((call->unit - m->desc.first_unit) * 2 + call->backward) * m->desc.slots + call->slot;
    if (!m->graphs || m->in_micro_batch) return gpt_cuda__work(m, call);
    memcpy(key + 6, &call->values, sizeof call->values);
    memcpy(key + 6 + 3 * GPT_BLOCK_PARAMS, &call->grads, sizeof call->grads);
    return gpt_cuda__run(m, gpt_cuda__graph_of(m, m->graphs + place * GPT_CUDA__GRAPHS, key, GPT_CUDA__KEY),
                         gpt_cuda__unit_work, call, "a unit");
}

//== public =================================================================================================

GPT_DEF void gpt_cuda_destroy(gpt_cuda *m) {
    if (!m) return;
    if (m->memory) cudaStreamSynchronize(m->desc.stream);
    for (size_t i = 0; m->graphs && i < gpt_cuda__unit_graphs(m) + GPT_CUDA__GRAPHS; i++)
        gpt_cuda__graph_drop(&m->graphs[i]);
    if (m->memory) ddp_device_cuda()->free(NULL, m->memory);
    free(m->graphs);
    free(m->keys);
    free(m->stream);
    free(m->heads_of);
    free(m->blocks);
    free(m);
}

static inline ddp_result gpt_cuda__fill(gpt_cuda *m) {
    const gpt_cuda_desc *d = &m->desc;
    size_t units = (size_t)(d->end_unit - d->first_unit), slots = (size_t)d->slots;
    void *memory = NULL;
    m->blocks = (gpt_cuda__acts *)calloc(slots * (size_t)d->config.layers + 1, sizeof *m->blocks);
    m->heads_of = (gpt_cuda__head *)calloc(slots, sizeof *m->heads_of);
    m->stream = (char **)calloc(slots * (units + 1), sizeof *m->stream);
    if (!m->blocks || !m->heads_of || !m->stream)
        return ddp_fail(DDP_ERR_NO_MEMORY, "gpt_cuda_create: out of host memory");
    DDP_TRY(gpt_cuda__make_graphs(m));
    m->bytes = gpt_cuda__layout(m, NULL);
    if (ddp_device_cuda()->alloc(NULL, m->bytes, &memory) != DDP_OK) {
        char cause[512];
        snprintf(cause, sizeof cause, "%s", ddp_last_error());
        return ddp_fail(
            DDP_ERR_NO_MEMORY,
            "gpt_cuda_create: cannot allocate %.1f MiB of device memory; use a smaller batch, fewer "
            "slots or recompute: %s",
            (double)m->bytes / 1048576, cause);
    }
    m->memory = (char *)memory;
    gpt_cuda__layout(m, m->memory);
    if (m->head) {
        size_t rows = (size_t)m->desc.config.channels * m->size, end = (size_t)m->desc.config.vocab * rows;
        cudaError_t error = cudaMemsetAsync(m->head + end, 0, (size_t)m->padded * rows - end, d->stream);
        if (error != cudaSuccess)
            return gpt_cuda__fail(error, "cudaMemsetAsync", "rows behind the head's matrix");
    }
    return DDP_OK;
}

GPT_DEF ddp_result gpt_cuda_create(gpt_cuda **out, const gpt_cuda_desc *desc) {
    const char *wrong = out ? gpt_cuda_check(desc) : "out is NULL";
    gpt_cuda *m;
    ddp_result result;
    if (out) *out = NULL;
    if (wrong) return ddp_fail(DDP_ERR_INVALID, "gpt_cuda_create: %s", wrong);
    if (!desc->group || ddp_group_device(desc->group) != ddp_device_cuda())
        return ddp_fail(DDP_ERR_INVALID,
                        "gpt_cuda_create: group has no GPUs; set it to one of ddp_cuda_group_create");
    if (desc->tensor_ranks > 1 && !desc->tensor)
        return ddp_fail(DDP_ERR_INVALID, "gpt_cuda_create: %d tensor ranks without a group; set tensor",
                        desc->tensor_ranks);
    if (desc->graphs && !desc->stream)
        return ddp_fail(
            DDP_ERR_INVALID,
            "gpt_cuda_create: graphs need a stream of their own, as CUDA's default one cannot be captured");
    m = (gpt_cuda *)malloc(sizeof *m);
    if (!m) return ddp_fail(DDP_ERR_NO_MEMORY, "gpt_cuda_create: no host memory for a model");
    gpt_cuda__shape(m, desc);
    result = gpt_cuda__fill(m);
    if (result == DDP_OK)
        *out = m;
    else
        gpt_cuda_destroy(m);
    return result;
}

GPT_DEF void *gpt_cuda_stream_of(gpt_cuda *m, int unit, int slot) {
    const gpt_cuda_desc *d = &m->desc;
    if (unit < d->first_unit || unit > d->end_unit || slot < 0 || slot >= d->slots) return NULL;
    return m->stream[slot * (d->end_unit - d->first_unit + 1) + unit - d->first_unit];
}

GPT_DEF void *gpt_cuda_d_stream_of(gpt_cuda *m) { return m->d_stream; }

/* Builds the table of a unit from a list with three pointers per parameter. */
static inline ddp_result gpt_cuda__table_of(const gpt_cuda *m, const char *call, int unit, const char *what,
                                            void *const *list, gpt_cuda__table *t) {
    int block = unit > 0 && unit <= m->desc.config.layers, count = unit == 0 ? 2
                                                                   : block   ? GPT_BLOCK_PARAMS
                                                                             : 3;
    if (!list) return ddp_fail(DDP_ERR_INVALID, "%s: unit %d: %s is NULL", call, unit, what);
    for (int i = 0; i < count; i++) {
        size_t box = (size_t)m->L * m->size * (size_t)(i == GPT_QKV_WEIGHT ? m->desc.config.channels : 1);
        int boxes = block && (i == GPT_QKV_WEIGHT || i == GPT_QKV_BIAS) ? 3 : 1;
        for (int k = 0; k < boxes; k++) {
            t->at[i][k] = (char *)list[3 * i + k];
            if (k && !t->at[i][k]) t->at[i][k] = t->at[i][k - 1] + box;
            if (!t->at[i][k] || (uintptr_t)t->at[i][k] % GPT_CUDA__ALIGN)
                return ddp_fail(DDP_ERR_INVALID,
                                "%s: unit %d: %s[%d], of parameter %d, is %p; it must be device memory "
                                "aligned to %d bytes",
                                call, unit, what, 3 * i + k, i, (void *)t->at[i][k], GPT_CUDA__ALIGN);
        }
    }
    return DDP_OK;
}

static inline ddp_result gpt_cuda__call_check(const gpt_cuda *m, const char *call, int unit, int slot,
                                              const void *batch) {
    if (!m) return ddp_fail(DDP_ERR_INVALID, "%s: model is NULL", call);
    if (unit < m->desc.first_unit || unit >= m->desc.end_unit)
        return ddp_fail(DDP_ERR_INVALID, "%s: unit %d is not this rank's; it has %d to %d", call, unit,
                        m->desc.first_unit, m->desc.end_unit - 1);
    if (slot < 0 || slot >= m->desc.slots)
        return ddp_fail(DDP_ERR_INVALID, "%s: slot %d of %d", call, slot, m->desc.slots);
    if ((unit == 0 || unit == m->desc.config.layers + 1) && !batch)
        return ddp_fail(DDP_ERR_INVALID, "%s: unit %d needs batch, which is NULL", call, unit);
    return DDP_OK;
}

/* Checks the alignment of in, out, d_in and d_out. */
static inline ddp_result gpt_cuda__rows_check(const char *call, int unit, const char *what,
                                              const void *rows) {
    if (rows && (uintptr_t)rows % GPT_CUDA__ALIGN == 0) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID, "%s: unit %d: %s is %p; it must be device memory aligned to %d bytes",
                    call, unit, what, (void *)(uintptr_t)rows, GPT_CUDA__ALIGN);
}

GPT_DEF ddp_result gpt_cuda_unit_forward(gpt_cuda *m, int unit, int slot, void *const *values,
                                         const int32_t *batch, const void *in, void *out) {
    static const char *const name = "gpt_cuda_unit_forward";
    gpt_cuda__call call = DDP_ZERO;
    int head, block;
    ddp_result result;
    DDP_TRY(gpt_cuda__call_check(m, name, unit, slot, batch));
    head = unit == m->desc.config.layers + 1;
    block = unit > 0 && !head;
    call.unit = unit;
    call.slot = slot;
    call.batch = block ? NULL : batch;
    DDP_TRY(gpt_cuda__table_of(m, name, unit, "values", values, &call.values));
    if (unit > 0) call.in = (const char *)(in ? in : gpt_cuda_stream_of(m, unit, slot));
    if (!head) call.out = (char *)(out ? out : gpt_cuda_stream_of(m, unit + 1, slot));
    if (unit > 0) DDP_TRY(gpt_cuda__rows_check(name, unit, "in", call.in));
    if (!head) DDP_TRY(gpt_cuda__rows_check(name, unit, "out", call.out));
    if (call.in && call.in == call.out)
        return ddp_fail(DDP_ERR_INVALID,
                        "%s: unit %d: in and out are the same memory; backward reads in again", name, unit);
    if (block) m->stored_unit = -1;
    if (head) m->logits_slot = -1;
    result = gpt_cuda__issue(m, &call);
    if (block && result == DDP_OK) {
        m->stored_unit = unit;
        m->stored_slot = slot;
    }
    if (head && result == DDP_OK) m->logits_slot = slot;
    return result;
}

GPT_DEF ddp_result gpt_cuda_unit_backward(gpt_cuda *m, int unit, int slot, void *const *values,
                                          void *const *grads, const int32_t *batch, const void *in,
                                          const void *d_out, void *d_in) {
    static const char *const name = "gpt_cuda_unit_backward";
    gpt_cuda__call call = DDP_ZERO;
    int head, block;
    ddp_result result;
    DDP_TRY(gpt_cuda__call_check(m, name, unit, slot, batch));
    head = unit == m->desc.config.layers + 1;
    block = unit > 0 && !head;
    call.unit = unit;
    call.slot = slot;
    call.backward = 1;
    call.batch = block ? NULL : batch;
    if (unit > 0) DDP_TRY(gpt_cuda__table_of(m, name, unit, "values", values, &call.values));
    DDP_TRY(gpt_cuda__table_of(m, name, unit, "grads", grads, &call.grads));
    if (unit > 0)
        call.in = (const char *)(in ? in : gpt_cuda_stream_of(m, unit, slot)),
        call.d_in = (char *)(d_in ? d_in : m->d_stream);
    if (!head) call.d_out = (const char *)(d_out ? d_out : m->d_stream);
    if (unit > 0) DDP_TRY(gpt_cuda__rows_check(name, unit, "in", call.in));
    if (unit > 0) DDP_TRY(gpt_cuda__rows_check(name, unit, "d_in", call.d_in));
    if (!head) DDP_TRY(gpt_cuda__rows_check(name, unit, "d_out", call.d_out));
    call.again = head ? m->logits_slot != slot
                      : block && m->desc.recompute && (m->stored_unit != unit || m->stored_slot != slot);
    if (call.again && head) m->logits_slot = -1;
    if (call.again && block) m->stored_unit = -1;
    result = gpt_cuda__issue(m, &call);
    if (call.again && head && result == DDP_OK) m->logits_slot = slot;
    if (call.again && block && result == DDP_OK) {
        m->stored_unit = unit;
        m->stored_slot = slot;
    }
    return result;
}

/* Arguments of gpt_cuda_micro_batch. */
typedef struct gpt_cuda__micro_batch {
    int slot;
    void *const *const *values, *const *const *grads;
    const int32_t *batch;
} gpt_cuda__micro_batch;

static inline ddp_result gpt_cuda__each_unit(gpt_cuda *m, const void *arguments) {
    const gpt_cuda__micro_batch *it = (const gpt_cuda__micro_batch *)arguments;
    int units = m->desc.end_unit;
    ddp_result result = DDP_OK;
    m->in_micro_batch = 1;
    for (int u = 0; u < units && result == DDP_OK; u++)
        result = gpt_cuda_unit_forward(m, u, it->slot, it->values[u], it->batch, NULL, NULL);
    for (int u = units - 1; u >= 0 && result == DDP_OK; u--)
        result = gpt_cuda_unit_backward(m, u, it->slot, it->values[u], it->grads[u], it->batch, NULL, NULL,
                                        NULL);
    m->in_micro_batch = 0;
    return result;
}

/* Writes the key of a micro-batch to m->key. */
static inline ddp_result gpt_cuda__micro_batch_key_of(gpt_cuda *m, const gpt_cuda__micro_batch *it) {
    m->key[0] = it->batch;
    m->key[1] = m->heads_of[it->slot].losses;
    for (int u = 0; u < m->desc.end_unit; u++) {
        gpt_cuda__table tables[2] = DDP_ZERO;
        DDP_TRY(gpt_cuda__table_of(m, "gpt_cuda_micro_batch", u, "values", it->values[u], &tables[0]));
        DDP_TRY(gpt_cuda__table_of(m, "gpt_cuda_micro_batch", u, "grads", it->grads[u], &tables[1]));
        memcpy(m->key + 2 + (size_t)u * GPT_CUDA__TABLES, tables, sizeof tables);
    }
    return DDP_OK;
}

GPT_DEF ddp_result gpt_cuda_micro_batch(gpt_cuda *m, int slot, void *const *const *values,
                                        void *const *const *grads, const int32_t *batch) {
    static const char *const name = "gpt_cuda_micro_batch";
    const gpt_cuda__micro_batch it = {slot, values, grads, batch};
    gpt_cuda__graph *graph;
    ddp_result result;
    DDP_TRY(gpt_cuda__call_check(m, name, m ? m->desc.first_unit : 0, slot, batch));
    if (m->desc.first_unit > 0 || m->desc.end_unit < m->desc.config.layers + 2)
        return ddp_fail(DDP_ERR_INVALID,
                        "%s: this rank has units %d to %d; a micro-batch goes through all, 0 to %d", name,
                        m->desc.first_unit, m->desc.end_unit - 1, m->desc.config.layers + 1);
    if (!values || !grads)
        return ddp_fail(DDP_ERR_INVALID, "%s: values or grads is NULL; give a table for each unit", name);
    if (!m->graphs) return gpt_cuda__each_unit(m, &it);
    DDP_TRY(gpt_cuda__micro_batch_key_of(m, &it));
    graph = gpt_cuda__graph_of(m, m->graphs + gpt_cuda__unit_graphs(m), m->key, gpt_cuda__micro_batch_key(m));
    result = gpt_cuda__run(m, graph, gpt_cuda__each_unit, &it, "a micro-batch");
    m->stored_unit = result == DDP_OK ? 1 : -1; /* as after the captured calls */
    m->stored_slot = slot;
    m->logits_slot = result == DDP_OK ? slot : -1;
    return result;
}

GPT_DEF ddp_result gpt_cuda_loss(gpt_cuda *m, int slot, double *sum) {
    DDP_TRY(gpt_cuda__call_check(m, "gpt_cuda_loss", m ? m->desc.config.layers + 1 : 0, slot, m));
    if (!sum || (uintptr_t)sum % 8)
        return ddp_fail(
            DDP_ERR_INVALID,
            "gpt_cuda_loss: sum is %p; it must be memory of 8 bytes that a GPU reaches, aligned to 8",
            (void *)sum);
    DDP_TRY(GPT_CUDA_LAUNCH(gpt_cuda__sum_kernel, 1, 256, 0, m->desc.stream, sum, m->heads_of[slot].losses,
                            m->rows));
    gpt_cuda__note(m, "sum of losses", 0, 4.0 * m->rows);
    return DDP_OK;
}

template <class T>
static ddp_result gpt_cuda__logits_of(gpt_cuda *m, const void *row, const gpt_cuda__table *w, float *logits) {
    int V = m->desc.config.vocab, C = m->desc.config.channels;
    DDP_TRY(gpt_cuda__norm<T>(m, m->d_norm, m->partial, m->partial + 4, NULL, row, NULL, NULL, w->at[0][0],
                              w->at[1][0], 1));
    DDP_TRY(GPT_CUDA_LAUNCH(gpt_cuda__matrix_vector_kernel<T>, (unsigned)(V + 7) / 8, 256, 0, m->desc.stream,
                            logits, (const T *)(const void *)w->at[2][0], (const T *)(const void *)m->d_norm,
                            V, C));
    gpt_cuda__note(m, "logits of one position", 2.0 * V * C, (double)V * C * sizeof(T));
    return DDP_OK;
}

GPT_DEF ddp_result gpt_cuda_logits(gpt_cuda *m, int slot, void *const *values, int position, float *logits) {
    gpt_cuda__table w;
    int head = m ? m->desc.config.layers + 1 : 0;
    DDP_TRY(gpt_cuda__call_check(m, "gpt_cuda_logits", head, slot, m));
    DDP_TRY(gpt_cuda__table_of(m, "gpt_cuda_logits", head, "values", values, &w));
    if (position < 0 || position >= m->desc.length)
        return ddp_fail(DDP_ERR_INVALID, "gpt_cuda_logits: position %d of %d", position, m->desc.length);
    if (!logits)
        return ddp_fail(DDP_ERR_INVALID, "gpt_cuda_logits: logits is NULL; give device memory for %d floats",
                        m->desc.config.vocab);
    return GPT_CUDA__AS(m, gpt_cuda__logits_of,
                        (char *)gpt_cuda_stream_of(m, head, slot)
                            + (size_t)position * (size_t)m->desc.config.channels * m->size,
                        &w, logits);
}

#endif /* GPT_CUDA_CUH */

/* MIT License: see LICENSE. */

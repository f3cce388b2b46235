/*  comm_hooks.h - gradient compression for ddp_reducer (bf16, int8, PowerSGD); delayed gradients; local SGD.

USAGE
    Copy it next to ddp.h and include it after ddp.h, in one source file. Link with -lm. All functions are
    static.

EXAMPLE
    comm_hook *hook;
    comm_hook_desc desc = DDP_ZERO;             // zero means default, field by field
    desc.kind = COMM_HOOK_POWERSGD;
    desc.params = params;                       // the array of the reducer
    desc.param_count = param_count;
    if (comm_hook_create(&hook, group, &desc) != DDP_OK) return puts(ddp_last_error());
    reducer_desc.hook = comm_hook_run;
    reducer_desc.hook_user = hook;              // before ddp_reducer_create
    ...                                         // train
    ddp_reducer_destroy(reducer);
    comm_hook_destroy(hook);

CONCEPTS
    Kind       Bytes sent of an f32 gradient, and method
    BF16, F16  1/2. Casts before the all-reduce, which adds in f32, divides, and rounds once (PyTorch's
               bf16_compress_hook, fp16_compress_hook). Same bits as ddp_reducer_desc.comm_dtype; the hook
               also counts bytes. An f16 above 65504 becomes infinite, so prefer BF16.
    INT8       1/4, plus 4 bytes per block. Each block is quantized to multiples of max / 127 (block-wise,
               Dettmers et al. 2021, with uniform steps). The rounding error is added to the gradient of the
               next step (error feedback, Seide et al. 2014, Karimireddy et al. 2019). An all-to-all sends
               each block to its owner rank. The owner adds in f32 in rank order, quantizes the sum and
               all-gathers it; it keeps the second rounding error (DoubleSqueeze, Tang et al. 2019).
    POWERSGD   (n + m) * rank numbers of an n x m matrix M (Vogels et al. 2019):

                   P = all-reduce(M Q)  ->  orthonormalize P  ->  Q = all-reduce(M' P)  ->  gradient = P Q'

               The next step starts from Q (warm start). Error feedback: each rank keeps M - P Q', with the
               Q of this rank. n is dimension 0, m the product of the others. Tensors with fewer than 2
               dimensions, and tensors that would not become smaller, are all-reduced without compression.
    DELAY      All bytes, one step later (Pipe-SGD, Li et al. 2018): a step applies the averages of the
               previous step. Its own all-reduce runs in a separate group during the next forward and
               backward pass. The first step gets zeros; the averages of the last step are not applied.
               It does not work with per_token.
    Local SGD and DiLoCo average parameters, not gradients: see local_sgd below.

    Determinism   All ranks get the same bits, and so does a second run of the same build. The bits differ
                  from those of the plain all-reduce and depend on the number of ranks. With one rank every
                  kind only divides.
    Error         The applied gradients (times the divisor) plus the errors of all ranks equal the sum of all
                  gradients, up to f32 rounding. Errors belong to parameters, not buckets: they survive the
                  rebuild of the buckets after the first step.
    NaN           A block or matrix that is not finite on one rank becomes NaN on every rank, so that a loss
                  scaler sees it; its error is reset to zero. If a scaler skips a step or changes its scale,
                  the errors do not change: they have the scale of the step that produced them.
    Memory        4 bytes per element and rank (INT8, POWERSGD) or 8 (DELAY), allocated in the first steps.
    Devices       BF16 and F16: any. Others: host memory, gradients in f32, f16 or bf16. INT8 needs a backend
                  with all-to-all.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). ddp_reducer_wait returns the errors of a hook on all ranks.

NOT DONE HERE
    No compression on a GPU except casts, no top-k sparsification, no FSDP.
*/
#ifndef DDP_EXAMPLE_COMM_HOOKS_H
#define DDP_EXAMPLE_COMM_HOOKS_H

#ifndef DDP_H
#include "../../ddp.h"
#endif

#include <math.h>
#include <string.h>

#define COMM_DEF static __attribute__((unused))

//== api ====================================================================================================

typedef enum comm_hook_kind {
    COMM_HOOK_BF16 = 1,
    COMM_HOOK_F16,
    COMM_HOOK_INT8,
    COMM_HOOK_POWERSGD,
    COMM_HOOK_DELAY
} comm_hook_kind;

typedef struct comm_hook_desc {
    comm_hook_kind kind;     /* required */
    const ddp_param *params; /* the array of the reducer; not needed for BF16, F16. Must outlive the hook */
    int param_count;
    int start_step; /* first steps with a plain all-reduce, for POWERSGD and DELAY */
    int block;      /* INT8: elements per scale. 0 = 256; a multiple of 16, at most 65536 */
    int rank;       /* POWERSGD: columns of P and Q. 0 = 4; at most 64 */
    uint64_t seed;  /* POWERSGD: seed of the initial Q */
} comm_hook_desc;

/* Bytes since comm_hook_create. Both count all-reduce payload; an all-to-all plus all-gather counts once. */
typedef struct comm_hook_stats {
    uint64_t gradient_bytes; /* of the gradients before compression */
    uint64_t sent_bytes;     /* after compression; 0 with one rank */
} comm_hook_stats;

typedef struct comm_hook comm_hook;

/* Creates a hook. Collective, blocking. desc must be the same on every rank. *out is NULL on failure.
   Free it with comm_hook_destroy.
   Errors: DDP_ERR_INVALID on the rank with the invalid desc, DDP_ERR_MISMATCH on the others;
   DDP_ERR_UNSUPPORTED (device memory), DDP_ERR_NO_MEMORY. */
COMM_DEF ddp_result comm_hook_create(comm_hook **out, ddp_group *group, const comm_hook_desc *desc);

/* The function for ddp_reducer_desc.hook; hook_user is the comm_hook. Use one hook per reducer. */
COMM_DEF ddp_result comm_hook_run(ddp_group *group, ddp_bucket *bucket, void *hook);

/* Call this, and comm_hook_save, between ddp_reducer_wait and the next backward pass. Not collective. */
COMM_DEF ddp_result comm_hook_get_stats(const comm_hook *hook, comm_hook_stats *stats);

/* Copies the error and Q of this rank to memory. memory NULL: sets *size_bytes to the required size.
   Otherwise *size_bytes is the size of memory on entry and the used size on return.
   The gradients in flight of DELAY are not saved: a resumed run begins with zeros. Byte order and format are
   those of this machine. Not collective. DDP_ERR_INVALID if memory is too small. */
COMM_DEF ddp_result comm_hook_save(comm_hook *hook, void *memory, size_t *size_bytes);

/* Loads saved states of hooks with the same desc and parameters. Call it before the first step.
   The number of ranks may change: with W ranks now, rank r loads the states of the saved ranks r, r + W,
   r + 2W, ... (none, one or several) and adds their errors, so no error is lost. Q comes from rank 0.
   With the same number of ranks POWERSGD continues with the bits of an uninterrupted run. So does INT8, if
   the buckets are the same (a new reducer rebuilds them after its first step, unless find_unused is set).
   start_step counts from zero again. Collective, blocking.
   Errors: DDP_ERR_INVALID, DDP_ERR_CORRUPT; DDP_ERR_MISMATCH on the ranks with valid states. */
COMM_DEF ddp_result comm_hook_load(comm_hook *hook, const void *const *states, const size_t *state_bytes,
                                   int state_count);

/* Frees a hook. Call it after ddp_reducer_destroy. Collective; waits for the gradients in flight of DELAY.
   NULL is ignored. */
COMM_DEF void comm_hook_destroy(comm_hook *hook);

/* Local SGD (Stich 2018; McMahan et al. 2017): every rank trains by itself, and the ranks average their
   parameters every H steps, so the traffic falls to 1/H. With a momentum it is DiLoCo (Douillard et al.
   2023): the average change since the last outer step is the gradient of an outer SGD with Nesterov momentum.
   Train without a reducer, or with ddp_reducer_no_sync, and call local_sgd_step after each optimizer step.
   Optimizer state is not averaged. */
typedef struct local_sgd_desc {
    ddp_param *params; /* required; values in f32. Tied values are averaged once. Must outlive the object */
    int param_count;
    int every;             /* required; H, optimizer steps per outer step */
    double outer_lr;       /* 0 = 1, a plain average; DiLoCo uses 0.7 */
    double outer_momentum; /* 0 = none; DiLoCo uses 0.9 */
} local_sgd_desc;

typedef struct local_sgd local_sgd;

/* Creates the object and broadcasts the parameters of rank 0. Collective, blocking; errors as for
   comm_hook_create. Free it with local_sgd_destroy.
   With outer_lr 1 and no momentum it allocates no copies, and with one rank it changes nothing. Otherwise it
   allocates 4 bytes per value, 8 with a momentum, in host memory, and one rank performs outer steps, too.
   Later calls do not allocate. */
COMM_DEF ddp_result local_sgd_create(local_sgd **out, ddp_group *group, const local_sgd_desc *desc);

/* Counts an optimizer step. Every H-th call performs the outer step, after which all ranks have the same
   parameters, bit for bit, and sets *synced (may be NULL) to 1. Other calls set it to 0 and send nothing.
   The outer step is collective and blocking. After an error the parameters are undefined. */
COMM_DEF ddp_result local_sgd_step(local_sgd *local, int *synced);

/* gradient_bytes is what a reducer would have reduced. Not collective. */
COMM_DEF ddp_result local_sgd_get_stats(const local_sgd *local, comm_hook_stats *stats);

/* Save and load like comm_hook_save and comm_hook_load, with one state per rank. Not collective.
   A state saved after an outer step is the same on every rank and can be loaded on any number of ranks.
   The trainer saves the parameters. */
COMM_DEF ddp_result local_sgd_save(local_sgd *local, void *memory, size_t *size_bytes);
COMM_DEF ddp_result local_sgd_load(local_sgd *local, const void *state, size_t state_bytes);

/* Not collective. NULL is ignored. */
COMM_DEF void local_sgd_destroy(local_sgd *local);

//== structs ================================================================================================

#define COMM__NONE ((size_t)-1)
#ifndef COMM__PIECE
#define COMM__PIECE \
    ((size_t)1 << 18) /* BF16, F16: elements per cast and all-reduce, so that they fit in cache */
#endif
#define COMM__LANES 16                                 /* independent sums, so that compilers vectorize */
#define COMM__STATE_MAGIC UINT64_C(0x31306b6f6f686463) /* first word of a saved state */

/* One parameter. Its error is stored at error[start], count elements. POWERSGD sees it as an n x m matrix;
   its Q is stored at q[q_start] as `columns` rows of m numbers. */
typedef struct comm__param {
    size_t start, count, n, m, q_start;
    int columns; /* 0 = not compressed */
} comm__param;

/* DELAY: gradients in flight of one step, bucket after bucket. A hook has two: the averages of the previous
   step are copied from one while the gradients of the current step fill the other. */
typedef struct comm__pending {
    unsigned char *memory; /* allocated by delay_group */
    size_t *at;            /* per parameter: offset in memory; COMM__NONE = not in this step */
    int *bucket;           /* per parameter: index in works */
    ddp_work *works;       /* per bucket */
    size_t used;
    uint64_t step; /* step of the buckets, plus 1 */
} comm__pending;

typedef struct comm__buffer {
    void *memory;
    size_t bytes;
} comm__buffer;

struct comm_hook {
    ddp_group *group;
    comm_hook_desc desc; /* with every default resolved */
    comm__param *params; /* param_count; the arrays of params and pending share one block with this struct */
    comm__pending pending[2];
    size_t total, q_total;    /* elements of error and of q */
    float *error, *q;         /* error feedback; POWERSGD: Q of the next step */
    comm__buffer work;        /* host memory: a bucket in f32 plus its error, then the new error */
    comm__buffer exchange[2]; /* group memory: data to send and receive */
    ddp_group *delay_group;   /* DELAY: other calls of the trainer do not wait for its all-reduces */
    comm_hook_stats stats;
};

typedef struct comm__state_header {
    uint64_t magic, kind, detail, total, q_total;
} comm__state_header;

//== agreement ==============================================================================================

/* Finalizer of splitmix64. */
static uint64_t comm__mix(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Returns an error on every rank if `result` is an error on any rank, or if the keys differ. A failed rank
   returns its own error. Collective. */
static ddp_result comm__agree(ddp_group *group, const char *function, ddp_result result, uint64_t key) {
    int64_t word[3], bits = (int64_t)(key >> 2);
    char text[512];
    size_t length = strlen(ddp_last_error());
    if (length >= sizeof text) length = sizeof text - 1;
    memcpy(text, ddp_last_error(), length);
    text[length] = 0;
    word[0] = result == DDP_OK ? INT64_MAX : ddp_rank(group);
    word[1] = result == DDP_OK ? bits : 0;
    word[2] = result == DDP_OK ? -bits : 0;
    DDP_TRY(ddp_all_reduce(group, word, word, 3, DDP_I64, DDP_OP_MIN, NULL));
    if (result != DDP_OK) return ddp_fail(result, "%s", text);
    if (word[0] != INT64_MAX)
        return ddp_fail(DDP_ERR_MISMATCH, "%s: rank %d has failed; see its error", function, (int)word[0]);
    if (word[1] != -word[2])
        return ddp_fail(DDP_ERR_MISMATCH,
                        "%s: desc or parameters differ between ranks; pass the same on every rank", function);
    return DDP_OK;
}

static int comm__is_host_memory(ddp_group *group) { return ddp_group_device(group)->host_memory; }

/* Grows a buffer to at least `bytes`; its contents are lost. group_memory 1: group memory, and the call is
   collective; buckets have the same size on every rank. 0: host memory. */
static ddp_result comm__reserve(ddp_group *group, comm__buffer *buffer, size_t bytes, int group_memory) {
    if (bytes <= buffer->bytes) return DDP_OK;
    buffer->bytes = 0;
    if (group_memory) {
        DDP_TRY(ddp_group_free(group, buffer->memory));
        buffer->memory = NULL;
        DDP_TRY(ddp_group_alloc(group, bytes, &buffer->memory));
    } else {
        ddp_host_free(group, buffer->memory);
        buffer->memory = ddp_host_alloc(group, bytes);
        if (!buffer->memory)
            return ddp_fail(DDP_ERR_NO_MEMORY,
                            "comm_hook_run: %zu bytes for a bucket; use a smaller bucket_cap_bytes", bytes);
    }
    buffer->bytes = bytes;
    return DDP_OK;
}

/* Sums over ranks and divides once, in one call. Same bits as the reducer without a hook. */
static ddp_result comm__average(ddp_group *group, void *data, size_t count, ddp_dtype dtype, uint64_t divisor,
                                ddp_work *work) {
    ddp_call call = DDP_ZERO;
    call.kind = DDP_CALL_ALL_REDUCE;
    call.dtype = dtype;
    call.op = DDP_OP_AVG;
    call.root = -1;
    call.send = data;
    call.recv = data;
    call.count = count;
    call.divisor = divisor;
    return ddp_group_call(group, &call, work);
}

//== buckets ================================================================================================

/* Checks that the bucket contains exactly its parameters, with the counts of the hook's desc. */
static ddp_result comm__check_bucket(const comm_hook *hook, const ddp_bucket *bucket) {
    size_t count = 0;
    for (int k = 0; k < bucket->param_count; k++) {
        int i = bucket->params[k];
        if (i < 0 || i >= hook->desc.param_count) count = COMM__NONE;
        if (count != COMM__NONE) count += hook->params[i].count;
    }
    if (count != bucket->count)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_run: bucket %d has %zu elements, which does not match the hook's desc; "
                        "set the params and param_count of the reducer",
                        bucket->index, bucket->count);
    if (bucket->dtype == DDP_F32 || bucket->dtype == DDP_F16 || bucket->dtype == DDP_BF16) return DDP_OK;
    return ddp_fail(DDP_ERR_UNSUPPORTED,
                    "comm_hook_run: gradients of bucket %d are %s; use f32, f16 or bf16, or COMM_HOOK_BF16",
                    bucket->index, ddp_dtype_name(bucket->dtype));
}

/* work = gradients + error */
static void comm__load_bucket(comm_hook *hook, const ddp_bucket *bucket, float *work) {
    const float *from = bucket->dtype == DDP_F32 ? (const float *)bucket->data : work;
    if (from == work)
        ddp_group_device(hook->group)->cast(work, DDP_F32, bucket->data, bucket->dtype, bucket->count);
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__param *info = &hook->params[bucket->params[k]];
        const float *error = hook->error + info->start;
        for (size_t i = 0; i < info->count; i++) work[i] = from[i] + error[i];
        from += info->count;
        work += info->count;
    }
}

/* Buffer for the result in f32: the bucket if it is f32, otherwise work, which comm__store_result casts. */
static float *comm__result_buffer(const ddp_bucket *bucket, float *work) {
    return bucket->dtype == DDP_F32 ? (float *)bucket->data : work;
}

static void comm__store_result(const comm_hook *hook, const ddp_bucket *bucket, const float *result) {
    if (bucket->dtype != DDP_F32)
        ddp_group_device(hook->group)->cast(bucket->data, bucket->dtype, result, DDP_F32, bucket->count);
}

/* error = work */
static void comm__store_error(comm_hook *hook, const ddp_bucket *bucket, const float *work) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__param *info = &hook->params[bucket->params[k]];
        memcpy(hook->error + info->start, work, info->count * sizeof(float));
        work += info->count;
    }
}

//== BF16, F16 ==============================================================================================

/* A 16-bit bucket is reduced in its own dtype; any other bucket is cast, piece by piece. */
static ddp_result comm__run_16bit(comm_hook *hook, ddp_bucket *bucket) {
    const ddp_device *device = ddp_group_device(hook->group);
    ddp_dtype half = hook->desc.kind == COMM_HOOK_BF16 ? DDP_BF16 : DDP_F16;
    if (ddp_dtype_size(bucket->dtype) <= 2) half = bucket->dtype;
    hook->stats.sent_bytes += bucket->count * 2;
    if (half == bucket->dtype)
        return comm__average(hook->group, bucket->data, bucket->count, half, bucket->divisor, NULL);
    size_t size = ddp_dtype_size(bucket->dtype), n;
    DDP_TRY(comm__reserve(hook->group, &hook->exchange[0], COMM__PIECE * 2, 1));
    for (size_t at = 0; at < bucket->count; at += n) {
        unsigned char *data = (unsigned char *)bucket->data + at * size;
        n = bucket->count - at < COMM__PIECE ? bucket->count - at : COMM__PIECE;
        device->cast(hook->exchange[0].memory, half, data, bucket->dtype, n);
        DDP_TRY(comm__average(hook->group, hook->exchange[0].memory, n, half, bucket->divisor, NULL));
        device->cast(data, bucket->dtype, hook->exchange[0].memory, half, n);
    }
    return DDP_OK;
}

//== INT8 ===================================================================================================

/* A bucket is split into one shard per rank, and a shard into blocks:

       shard:  scale of each of its shard_blocks blocks (f32), then `block` bytes for each block

   The last block of the bucket can be shorter, and the last shards can have no elements. */

/* Quantizes one block: q = round(x / scale), and x becomes the rounding error. If x is not finite, scale
   is NaN and x becomes 0. If max / 127 is below the smallest normal float, scale and q are
   0 and x is unchanged. */
static void comm__quantize(float *x, size_t count, float *scale, int8_t *q) {
    const float magic = 12582912.0f; /* 3 * 2^22: adding it rounds to an integer, in the low bits */
    uint32_t max = 0, bits;
    float step, inverse;
    for (size_t i = 0; i < count; i++) { /* bits without the sign have the order of absolute values */
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffffu;
        max = bits > max ? bits : max;
    }
    memcpy(&step, &max, 4);
    step /= 127.0f;
    if (max >= 0x7f800000u) step = NAN;
    if (step < 1.17549435e-38f) step = 0;
    memcpy(scale, &step, 4);
    if (!(step > 0)) {
        memset(q, 0, count);
        if (step != 0) memset(x, 0, count * sizeof *x);
        return;
    }
    inverse = 1 / step;
    for (size_t i = 0; i < count; i++) {
        float shifted = x[i] * inverse + magic;
        memcpy(&bits, &shifted, 4);
        int32_t whole = (int32_t)(bits - 0x4b400000u);
        q[i] = (int8_t)whole;
        x[i] -= (float)whole * step;
    }
}

/* x = q scale, or x += q scale if add is set. */
static void comm__dequantize(float *x, size_t count, float scale, const int8_t *q, int add) {
    if (add)
        for (size_t i = 0; i < count; i++) x[i] += (float)q[i] * scale;
    else
        for (size_t i = 0; i < count; i++) x[i] = (float)q[i] * scale;
}

/* Block `index` of a bucket of `count` elements: sets *begin and returns its length. */
static size_t comm__block(size_t index, size_t block, size_t count, size_t *begin) {
    *begin = index * block;
    if (*begin >= count) return 0;
    return count - *begin < block ? count - *begin : block;
}

/* Owner of a shard: adds the shards of all ranks (in) in rank order, quantizes the sum to out, and adds the
   rounding error to the error of this rank (work). */
static void comm__reduce_shard(const unsigned char *in, unsigned char *out, float *work, float *sum,
                               size_t count, size_t block, size_t shard_blocks, int rank, int ranks) {
    size_t shard_bytes = shard_blocks * (4 + block), begin;
    for (size_t b = 0; b < shard_blocks; b++) {
        size_t n = comm__block((size_t)rank * shard_blocks + b, block, count, &begin);
        for (int r = 0; r < ranks; r++) {
            const unsigned char *from = in + (size_t)r * shard_bytes;
            comm__dequantize(sum, n, ((const float *)(const void *)from)[b],
                             (const int8_t *)from + 4 * shard_blocks + b * block, r > 0);
        }
        comm__quantize(sum, n, (float *)(void *)out + b, (int8_t *)out + 4 * shard_blocks + b * block);
        for (size_t i = 0; i < n; i++) work[begin + i] += sum[i];
    }
}

/*                           all-to-all                        sum           all-gather
       rank 0: [shard 0 | shard 1]  -->  rank 0: shard 0 of 0 and 1  -->  shard 0  -->  [shard 0 | shard 1]
       rank 1: [shard 0 | shard 1]  -->  rank 1: shard 1 of 0 and 1  -->  shard 1  -->  on every rank */
static ddp_result comm__run_int8(comm_hook *hook, ddp_bucket *bucket) {
    int rank = ddp_rank(hook->group), ranks = ddp_world_size(hook->group);
    size_t block = (size_t)hook->desc.block, count = bucket->count, blocks = (count + block - 1) / block;
    size_t shard_blocks = (blocks + (size_t)ranks - 1) / (size_t)ranks;
    size_t shard_bytes = shard_blocks * (4 + block), begin;
    float *work, *sum, *result, divisor = (float)bucket->divisor;
    unsigned char *out, *in;
    DDP_TRY(comm__reserve(hook->group, &hook->work, (count + block) * sizeof(float), 0));
    for (int k = 0; k < 2; k++)
        DDP_TRY(comm__reserve(hook->group, &hook->exchange[k], shard_bytes * (size_t)ranks, 1));
    work = (float *)hook->work.memory;
    sum = work + count; /* one block */
    out = (unsigned char *)hook->exchange[0].memory;
    in = (unsigned char *)hook->exchange[1].memory;

    comm__load_bucket(hook, bucket, work);
    for (size_t b = 0; b < shard_blocks * (size_t)ranks; b++) {
        unsigned char *to = out + b / shard_blocks * shard_bytes;
        size_t n = comm__block(b, block, count, &begin), at = b % shard_blocks;
        comm__quantize(work + (n ? begin : 0), n, (float *)(void *)to + at,
                       (int8_t *)to + 4 * shard_blocks + at * block);
    }
    DDP_TRY(ddp_all_to_all(hook->group, out, in, shard_bytes, DDP_U8, NULL));
    comm__reduce_shard(in, out + (size_t)rank * shard_bytes, work, sum, count, block, shard_blocks, rank,
                       ranks);
    DDP_TRY(ddp_all_gather(hook->group, out + (size_t)rank * shard_bytes, out, shard_bytes, DDP_U8, NULL));
    comm__store_error(hook, bucket, work);
    result = comm__result_buffer(bucket, work);
    for (size_t b = 0; b < blocks; b++) {
        const unsigned char *from = out + b / shard_blocks * shard_bytes;
        size_t n = comm__block(b, block, count, &begin), at = b % shard_blocks;
        comm__dequantize(result + begin, n, ((const float *)(const void *)from)[at] / divisor,
                         (const int8_t *)from + 4 * shard_blocks + at * block, 0);
    }
    comm__store_result(hook, bucket, result);
    hook->stats.sent_bytes += shard_bytes * (size_t)ranks;
    return DDP_OK;
}

//== POWERSGD ===============================================================================================

/* M is n x m, row-major. P is stored as `columns` rows of n numbers, Q as `columns` rows of m numbers. */

/* Fills a column of Q with random numbers in [-1, 1), the same on every rank. */
static void comm__random_column(const comm_hook *hook, int param, int column, uint64_t step, float *out,
                                size_t count) {
    uint64_t key = comm__mix(hook->desc.seed
                             ^ comm__mix((uint64_t)param << 20 ^ (uint64_t)column ^ step << 44));
    for (size_t j = 0; j < count; j++)
        out[j] = (float)(int32_t)(comm__mix(key + j) >> 32) * (1.0f / 2147483648.0f);
}

/* Dot product in f64. */
static double comm__dot(const float *a, const float *b, size_t count) {
    double lanes[COMM__LANES], sum = 0;
    size_t i = 0;
    for (int l = 0; l < COMM__LANES; l++) lanes[l] = 0;
    for (; i + COMM__LANES <= count; i += COMM__LANES)
        for (int l = 0; l < COMM__LANES; l++) lanes[l] += (double)a[i + (size_t)l] * b[i + (size_t)l];
    for (; i < count; i++) lanes[0] += (double)a[i] * b[i];
    for (int l = 0; l < COMM__LANES; l++) sum += lanes[l];
    return sum;
}

/* Dot product in f32. */
static float comm__row_dot(const float *a, const float *b, size_t count) {
    float lanes[COMM__LANES], sum = 0;
    size_t i = 0;
    for (int l = 0; l < COMM__LANES; l++) lanes[l] = 0;
    for (; i + COMM__LANES <= count; i += COMM__LANES)
        for (int l = 0; l < COMM__LANES; l++) lanes[l] += a[i + (size_t)l] * b[i + (size_t)l];
    for (; i < count; i++) lanes[0] += a[i] * b[i];
    for (int l = 0; l < COMM__LANES; l++) sum += lanes[l];
    return sum;
}

/* y += factor x */
static void comm__axpy(float *y, const float *x, size_t count, float factor) {
    for (size_t i = 0; i < count; i++) y[i] += factor * x[i];
}

static int comm__is_finite(const float *x, size_t count) {
    uint32_t max = 0, bits;
    for (size_t i = 0; i < count; i++) {
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffffu;
        max = bits > max ? bits : max;
    }
    return max < 0x7f800000u;
}

/* Makes the columns of P orthonormal. Gram-Schmidt runs twice per column, which is enough in floating point.
   A column that depends linearly on earlier ones is only rounding noise afterwards and becomes zero. */
static void comm__gram_schmidt(float *p, size_t n, int columns) {
    for (int k = 0; k < columns; k++) {
        float *column = p + (size_t)k * n;
        double before = sqrt(comm__dot(column, column, n)), after;
        for (int pass = 0; pass < 2; pass++)
            for (int l = 0; l < k; l++)
                comm__axpy(column, p + (size_t)l * n, n, (float)-comm__dot(p + (size_t)l * n, column, n));
        after = sqrt(comm__dot(column, column, n));
        if (!(after > before * 1e-5))
            memset(column, 0, n * sizeof *column);
        else
            for (size_t i = 0; i < n; i++) column[i] = (float)(column[i] / after);
    }
}

/* P = M Q */
static void comm__compute_p(const comm__param *info, const float *m, const float *q, float *p) {
    for (size_t i = 0; i < info->n; i++)
        for (int k = 0; k < info->columns; k++)
            p[(size_t)k * info->n + i] = comm__row_dot(m + i * info->m, q + (size_t)k * info->m, info->m);
}

/* Q = M' P with an orthonormal P, then M -= P Q', which is the error. */
static void comm__compute_q(const comm__param *info, float *m, const float *p, float *q) {
    memset(q, 0, (size_t)info->columns * info->m * sizeof *q);
    for (size_t i = 0; i < info->n; i++)
        for (int k = 0; k < info->columns; k++)
            comm__axpy(q + (size_t)k * info->m, m + i * info->m, info->m, p[(size_t)k * info->n + i]);
    for (size_t i = 0; i < info->n; i++)
        for (int k = 0; k < info->columns; k++)
            comm__axpy(m + i * info->m, q + (size_t)k * info->m, info->m, -p[(size_t)k * info->n + i]);
}

/* out = P Q' / divisor */
static void comm__decompress(const comm__param *info, float *out, const float *p, const float *q,
                             float divisor) {
    for (size_t i = 0; i < info->n; i++, out += info->m) {
        float first = p[i] / divisor;
        for (size_t j = 0; j < info->m; j++) out[j] = first * q[j];
        for (int k = 1; k < info->columns; k++)
            comm__axpy(out, q + (size_t)k * info->m, info->m, p[(size_t)k * info->n + i] / divisor);
    }
}

/* Stores Q for the next step, the same on every rank. Columns that are zero or not finite are drawn again. */
static void comm__store_q(comm_hook *hook, int param, const float *q, uint64_t step) {
    const comm__param *info = &hook->params[param];
    float *kept = hook->q + info->q_start;
    for (int k = 0; k < info->columns; k++, kept += info->m, q += info->m) {
        size_t j = 0;
        while (j < info->m && q[j] == 0) j++;
        if (j < info->m && comm__is_finite(q, info->m))
            memcpy(kept, q, info->m * sizeof *q);
        else
            comm__random_column(hook, param, k, step + 1, kept, info->m);
    }
}

static size_t comm__p_count(const comm__param *info) {
    return info->columns ? (size_t)info->columns * info->n : info->count;
}
static size_t comm__q_count(const comm__param *info) { return (size_t)info->columns * info->m; }

/* Before the first all-reduce: writes P of each parameter to p, or the gradient of an uncompressed one. */
static void comm__powersgd_p(comm_hook *hook, const ddp_bucket *bucket, const float *m, float *p) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__param *info = &hook->params[bucket->params[k]];
        if (info->columns)
            comm__compute_p(info, m, hook->q + info->q_start, p);
        else
            memcpy(p, m, info->count * sizeof *m);
        p += comm__p_count(info);
        m += info->count;
    }
}

/* Between the all-reduces: orthonormalizes P, writes Q of each parameter to q and its error to m. If P is not
   finite, Q becomes NaN, on every rank. */
static void comm__powersgd_q(comm_hook *hook, const ddp_bucket *bucket, float *m, float *p, float *q) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__param *info = &hook->params[bucket->params[k]];
        if (info->columns && comm__is_finite(p, comm__p_count(info))) {
            comm__gram_schmidt(p, info->n, info->columns);
            comm__compute_q(info, m, p, q);
        } else {
            memset(m, 0, info->count * sizeof *m);
            for (size_t j = 0; j < comm__q_count(info); j++) q[j] = NAN;
        }
        p += comm__p_count(info);
        q += comm__q_count(info);
        m += info->count;
    }
}

/* After the second all-reduce: stores the error m and Q, and sets out = P Q' / divisor. out may be m. */
static void comm__powersgd_finish(comm_hook *hook, const ddp_bucket *bucket, float *m, float *out,
                                  const float *p, const float *q) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__param *info = &hook->params[bucket->params[k]];
        if (!comm__is_finite(q, comm__q_count(info))) memset(m, 0, info->count * sizeof *m);
        memcpy(hook->error + info->start, m, info->count * sizeof *m);
        if (info->columns) {
            comm__decompress(info, out, p, q, (float)bucket->divisor);
        } else { /* divide like the plain all-reduce, bit for bit */
            memcpy(out, p, info->count * sizeof *out);
            const ddp_tensor mean = {out, DDP_F32, 1, {(int64_t)info->count}};
            ddp_group_device(hook->group)->divide(&mean, 1, bucket->divisor);
        }
        comm__store_q(hook, bucket->params[k], q, bucket->step);
        p += comm__p_count(info);
        q += comm__q_count(info);
        m += info->count;
        out += info->count;
    }
}

static ddp_result comm__run_powersgd(comm_hook *hook, ddp_bucket *bucket) {
    size_t p_total = 0, q_total_count = 0;
    for (int k = 0; k < bucket->param_count; k++) {
        p_total += comm__p_count(&hook->params[bucket->params[k]]);
        q_total_count += comm__q_count(&hook->params[bucket->params[k]]);
    }
    DDP_TRY(comm__reserve(hook->group, &hook->work, bucket->count * sizeof(float), 0));
    DDP_TRY(comm__reserve(hook->group, &hook->exchange[0], p_total * sizeof(float), 1));
    DDP_TRY(comm__reserve(hook->group, &hook->exchange[1], q_total_count * sizeof(float), 1));
    float *work = (float *)hook->work.memory, *p = (float *)hook->exchange[0].memory,
          *q = (float *)hook->exchange[1].memory;

    comm__load_bucket(hook, bucket, work);
    comm__powersgd_p(hook, bucket, work, p);
    DDP_TRY(ddp_all_reduce(hook->group, p, p, p_total, DDP_F32, DDP_OP_SUM, NULL));
    comm__powersgd_q(hook, bucket, work, p, q);
    if (q_total_count) DDP_TRY(ddp_all_reduce(hook->group, q, q, q_total_count, DDP_F32, DDP_OP_SUM, NULL));
    comm__powersgd_finish(hook, bucket, work, comm__result_buffer(bucket, work), p, q);
    comm__store_result(hook, bucket, work);
    hook->stats.sent_bytes += (p_total + q_total_count) * sizeof(float);
    return DDP_OK;
}

//== DELAY ==================================================================================================

/* Starts the all-reduce of this step's gradients on delay_group, and copies the averages of the previous step
   to the bucket. Averages are found by parameter, because the buckets of the two steps can differ. */
static ddp_result comm__run_delay(comm_hook *hook, ddp_bucket *bucket) {
    comm__pending *current = &hook->pending[bucket->step & 1], *previous = &hook->pending[~bucket->step & 1];
    unsigned char *data = (unsigned char *)bucket->data;
    size_t size = ddp_dtype_size(bucket->dtype), bytes = bucket->count * size, begin;
    if (current->step != bucket->step + 1) { /* first bucket of a step: reuse the memory of two steps ago */
        for (int b = 0; b < hook->desc.param_count; b++)
            DDP_TRY(ddp_wait(hook->delay_group, &current->works[b]));
        current->used = 0;
        current->step = bucket->step + 1;
    }
    begin = current->used;
    memcpy(current->memory + begin, data, bytes);
    current->used += (bytes + 63) / 64 * 64;
    for (int k = 0; k < bucket->param_count; k++) {
        int i = bucket->params[k];
        size_t part_bytes = hook->params[i].count * size, from = previous->at[i];
        if (from == COMM__NONE)
            memset(data, 0, part_bytes);
        else {
            DDP_TRY(ddp_wait(hook->delay_group, &previous->works[previous->bucket[i]]));
            memcpy(data, previous->memory + from, part_bytes);
        }
        previous->at[i] = COMM__NONE;
        current->at[i] = begin;
        current->bucket[i] = bucket->index;
        data += part_bytes;
        begin += part_bytes;
    }
    hook->stats.sent_bytes += bytes;
    return comm__average(hook->delay_group, current->memory + (begin - bytes), bucket->count, bucket->dtype,
                         bucket->divisor, &current->works[bucket->index]);
}

//== create, run, destroy ===================================================================================

/* Checks desc and copies it with every default resolved. */
static ddp_result comm__desc_resolve(const comm_hook_desc *desc, comm_hook_desc *d) {
    if (!desc) return ddp_fail(DDP_ERR_INVALID, "comm_hook_create: desc is NULL");
    *d = *desc;
    if (d->kind < COMM_HOOK_BF16 || d->kind > COMM_HOOK_DELAY)
        return ddp_fail(DDP_ERR_INVALID, "comm_hook_create: kind=%d; set one of comm_hook_kind",
                        (int)d->kind);
    if (d->start_step < 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_create: start_step=%d; set the number of uncompressed steps, 0 or more",
                        d->start_step);
    if (d->kind <= COMM_HOOK_F16) {
        d->params = NULL;
        d->param_count = 0;
        return DDP_OK;
    }
    if (!d->params || d->param_count <= 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_create: param_count=%d or params is NULL; set the array of the reducer",
                        d->param_count);
    if (d->block == 0) d->block = 256;
    if (d->rank == 0) d->rank = 4;
    if (d->block < 16 || d->block > 65536 || d->block % 16 != 0)
        return ddp_fail(DDP_ERR_INVALID, "comm_hook_create: block=%d; set a multiple of 16 from 16 to 65536",
                        d->block);
    if (d->rank < 1 || d->rank > 64)
        return ddp_fail(DDP_ERR_INVALID, "comm_hook_create: rank=%d; set 1 to 64 columns", d->rank);
    for (int i = 0; i < d->param_count; i++)
        if (ddp_tensor_count(&d->params[i].value) < 0)
            return ddp_fail(DDP_ERR_INVALID,
                            "comm_hook_create: params[%d] (%s) has a negative dimension or too many elements",
                            i, d->params[i].name ? d->params[i].name : "no name");
    return DDP_OK;
}

/* Hash of a resolved desc and the shapes of its parameters. */
static uint64_t comm__desc_key(const comm_hook_desc *d) {
    uint64_t key = comm__mix((uint64_t)d->block << 32 ^ (uint64_t)d->rank ^ comm__mix(d->seed));
    key = comm__mix((uint64_t)d->kind ^ comm__mix((uint64_t)d->start_step ^ key));
    for (int i = 0; i < d->param_count; i++) {
        const ddp_tensor *value = &d->params[i].value;
        key = comm__mix(key ^ (uint64_t)value->ndim);
        for (int k = 0; k < value->ndim; k++) key = comm__mix(key ^ (uint64_t)value->shape[k]);
    }
    return key;
}

/* Fills hook->params: offsets of errors and of Q, and which parameters POWERSGD compresses. */
static void comm__plan_params(comm_hook *hook) {
    for (int i = 0; i < hook->desc.param_count; i++) {
        const ddp_tensor *value = &hook->desc.params[i].value;
        comm__param *info = &hook->params[i];
        size_t columns = (size_t)hook->desc.rank;
        info->start = hook->total;
        info->count = (size_t)ddp_tensor_count(value);
        info->q_start = hook->q_total;
        hook->total += info->count;
        if (hook->desc.kind != COMM_HOOK_POWERSGD || value->ndim < 2 || info->count == 0) continue;
        info->n = (size_t)value->shape[0];
        info->m = info->count / info->n;
        if (columns * (info->n + info->m) >= info->count) continue;
        info->columns = hook->desc.rank;
        hook->q_total += columns * info->m;
    }
}

/* Allocates the errors and Q, or the gradients in flight of DELAY, for which delay_group must exist. */
static ddp_result comm__allocate(comm_hook *hook) {
    size_t n = (size_t)hook->desc.param_count, floats = hook->total + hook->q_total;
    if (hook->desc.kind == COMM_HOOK_DELAY) {
        for (int f = 0; f < 2; f++) {
            void *memory = NULL; /* each bucket begins at a multiple of 64 bytes */
            DDP_TRY(ddp_group_alloc(hook->delay_group, hook->total * sizeof(float) + n * 64, &memory));
            hook->pending[f].memory = (unsigned char *)memory;
        }
        return DDP_OK;
    }
    hook->error = (float *)ddp_host_alloc(hook->group, (floats ? floats : 1) * sizeof(float));
    if (!hook->error)
        return ddp_fail(DDP_ERR_NO_MEMORY, "comm_hook_create: %zu bytes for error feedback",
                        floats * sizeof(float));
    memset(hook->error, 0, hook->total * sizeof(float));
    hook->q = hook->error + hook->total;
    for (int i = 0; i < hook->desc.param_count; i++)
        for (int k = 0; k < hook->params[i].columns; k++)
            comm__random_column(hook, i, k, 0,
                                hook->q + hook->params[i].q_start + (size_t)k * hook->params[i].m,
                                hook->params[i].m);
    return DDP_OK;
}

/* The local part of comm_hook_create: one block with the struct, params, and the arrays of pending. */
static ddp_result comm__hook_new(comm_hook **out, ddp_group *group, const comm_hook_desc *desc) {
    comm_hook_desc d = DDP_ZERO;
    DDP_TRY(comm__desc_resolve(desc, &d));
    if (d.kind > COMM_HOOK_F16 && !comm__is_host_memory(group))
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "comm_hook_create: this kind needs host memory, but the group's device is %s; use "
                        "COMM_HOOK_BF16 or COMM_HOOK_F16",
                        ddp_group_device(group)->name);
    size_t n = (size_t)d.param_count;
    size_t param_bytes = sizeof(comm__param) + 2 * (sizeof(ddp_work) + sizeof(size_t) + sizeof(int));
    size_t bytes = sizeof(comm_hook) + n * param_bytes;
    comm_hook *hook = (comm_hook *)ddp_host_alloc(group, bytes);
    if (!hook) return ddp_fail(DDP_ERR_NO_MEMORY, "comm_hook_create: %zu bytes", bytes);
    memset(hook, 0, bytes);
    hook->group = group;
    hook->desc = d;
    hook->params = (comm__param *)(hook + 1);
    hook->pending[0].works = (ddp_work *)(hook->params + n);
    hook->pending[1].works = hook->pending[0].works + n;
    hook->pending[0].at = (size_t *)(hook->pending[1].works + n);
    hook->pending[1].at = hook->pending[0].at + n;
    hook->pending[0].bucket = (int *)(hook->pending[1].at + n);
    hook->pending[1].bucket = hook->pending[0].bucket + n;
    for (size_t i = 0; i < 2 * n; i++) hook->pending[0].at[i] = COMM__NONE;
    comm__plan_params(hook);
    *out = hook;
    return DDP_OK;
}

COMM_DEF ddp_result comm_hook_create(comm_hook **out, ddp_group *group, const comm_hook_desc *desc) {
    comm_hook *hook = NULL;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "comm_hook_create: group is NULL");
    if (out) *out = NULL;
    ddp_result result;
    if (out)
        result = comm__hook_new(&hook, group, desc);
    else
        result = ddp_fail(DDP_ERR_INVALID, "comm_hook_create: out is NULL");
    result = comm__agree(group, "comm_hook_create", result, hook ? comm__desc_key(&hook->desc) : 0);
    if (result == DDP_OK && ddp_world_size(group) > 1) {
        if (hook->desc.kind == COMM_HOOK_DELAY)
            result = ddp_group_split(group, 0, ddp_rank(group), &hook->delay_group);
        if (result == DDP_OK && hook->desc.kind > COMM_HOOK_F16) result = comm__allocate(hook);
        result = comm__agree(group, "comm_hook_create", result, 0);
    }
    if (result == DDP_OK) {
        *out = hook;
        return DDP_OK;
    }
    if (hook) {
        ddp_group_destroy(hook->delay_group);
        ddp_host_free(group, hook->error);
        ddp_host_free(group, hook);
    }
    return result;
}

/* One rank, after comm_hook_load: adds the loaded errors to the gradients, once. */
static ddp_result comm__add_error(comm_hook *hook, ddp_bucket *bucket) {
    DDP_TRY(comm__check_bucket(hook, bucket));
    DDP_TRY(comm__reserve(hook->group, &hook->work, bucket->count * sizeof(float), 0));
    float *work = (float *)hook->work.memory;
    comm__load_bucket(hook, bucket, work);
    ddp_group_device(hook->group)->cast(bucket->data, bucket->dtype, work, DDP_F32, bucket->count);
    memset(work, 0, bucket->count * sizeof *work);
    comm__store_error(hook, bucket, work);
    return DDP_OK;
}

COMM_DEF ddp_result comm_hook_run(ddp_group *group, ddp_bucket *bucket, void *user) {
    comm_hook *hook = (comm_hook *)user;
    if (!hook) return ddp_fail(DDP_ERR_INVALID, "comm_hook_run: hook_user is NULL; set it to the comm_hook");
    if (hook->group != group)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_run: the hook was created on another group; use the reducer's group");
    hook->stats.gradient_bytes += bucket->count * ddp_dtype_size(bucket->dtype);
    if (ddp_world_size(group) == 1) {
        if (hook->error) DDP_TRY(comm__add_error(hook, bucket));
        const ddp_tensor mean = {bucket->data, bucket->dtype, 1, {(int64_t)bucket->count}};
        ddp_group_device(group)->divide(&mean, 1, bucket->divisor);
        return DDP_OK;
    }
    if (hook->desc.kind == COMM_HOOK_DELAY && bucket->divisor <= 1 && bucket->step == 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_run: COMM_HOOK_DELAY needs averages, but per_token, or a single active "
                        "rank, gives sums, which the next step would divide by its own tokens; leave "
                        "per_token 0");
    if (bucket->step < (uint64_t)hook->desc.start_step) {
        hook->stats.sent_bytes += bucket->count * ddp_dtype_size(bucket->dtype);
        return comm__average(group, bucket->data, bucket->count, bucket->dtype, bucket->divisor, NULL);
    }
    if (hook->desc.kind <= COMM_HOOK_F16) return comm__run_16bit(hook, bucket);
    DDP_TRY(comm__check_bucket(hook, bucket));
    if (hook->desc.kind == COMM_HOOK_INT8) return comm__run_int8(hook, bucket);
    return hook->desc.kind == COMM_HOOK_POWERSGD ? comm__run_powersgd(hook, bucket)
                                                 : comm__run_delay(hook, bucket);
}

COMM_DEF ddp_result comm_hook_get_stats(const comm_hook *hook, comm_hook_stats *stats) {
    if (!hook || !stats) return ddp_fail(DDP_ERR_INVALID, "comm_hook_get_stats: hook or stats is NULL");
    *stats = hook->stats;
    return DDP_OK;
}

static comm__state_header comm__state_header_of(const comm_hook *hook) {
    comm__state_header header = DDP_ZERO;
    header.magic = COMM__STATE_MAGIC;
    header.kind = (uint64_t)hook->desc.kind;
    header.detail = comm__desc_key(&hook->desc);
    if (hook->desc.kind == COMM_HOOK_INT8 || hook->desc.kind == COMM_HOOK_POWERSGD) {
        header.total = hook->total;
        header.q_total = hook->q_total;
    }
    return header;
}

COMM_DEF ddp_result comm_hook_save(comm_hook *hook, void *memory, size_t *size_bytes) {
    if (!hook || !size_bytes) return ddp_fail(DDP_ERR_INVALID, "comm_hook_save: hook or size_bytes is NULL");
    comm__state_header header = comm__state_header_of(hook);
    size_t bytes = (size_t)(header.total + header.q_total) * sizeof(float), room = *size_bytes;
    unsigned char *to = (unsigned char *)memory;
    *size_bytes = sizeof header + bytes;
    if (!memory) return DDP_OK;
    if (room < *size_bytes)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_save: *size_bytes is %zu, but %zu are needed; query it with memory NULL",
                        room, *size_bytes);
    memcpy(to, &header, sizeof header);
    if (hook->error)
        memcpy(to + sizeof header, hook->error, bytes);
    else if (bytes)
        memset(to + sizeof header, 0, bytes); /* one rank; comm_hook_load draws a Q of zeros again */
    return DDP_OK;
}

static ddp_result comm__check_states(const comm_hook *hook, const void *const *states,
                                     const size_t *state_bytes, int state_count) {
    comm__state_header want = comm__state_header_of(hook), have;
    size_t needed = sizeof want + (size_t)(want.total + want.q_total) * sizeof(float);
    if (hook->stats.gradient_bytes != 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_load: the hook has run already; call it before the first step");
    if (state_count < 0 || (state_count > 0 && (!states || !state_bytes)))
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_load: state_count=%d is negative, or states or state_bytes is NULL",
                        state_count);
    if (state_count == 0 && ddp_rank(hook->group) == 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "comm_hook_load: rank 0 has no state; pass the one that rank 0 saved");
    for (int s = 0; s < state_count; s++) {
        if (!states[s] || state_bytes[s] < sizeof have)
            return ddp_fail(DDP_ERR_CORRUPT, "comm_hook_load: state %d is truncated; pass all saved bytes",
                            s);
        memcpy(&have, states[s], sizeof have);
        if (have.magic != want.magic)
            return ddp_fail(DDP_ERR_CORRUPT, "comm_hook_load: state %d was not written by comm_hook_save", s);
        if (have.kind != want.kind || have.detail != want.detail)
            return ddp_fail(DDP_ERR_INVALID,
                            "comm_hook_load: state %d is of a hook with another desc or other parameters; "
                            "create the same hook, or do not load",
                            s);
        if (state_bytes[s] != needed)
            return ddp_fail(DDP_ERR_CORRUPT, "comm_hook_load: state %d has %zu bytes, not %zu", s,
                            state_bytes[s], needed);
    }
    return DDP_OK;
}

COMM_DEF ddp_result comm_hook_load(comm_hook *hook, const void *const *states, const size_t *state_bytes,
                                   int state_count) {
    if (!hook) return ddp_fail(DDP_ERR_INVALID, "comm_hook_load: hook is NULL");
    comm__state_header header = comm__state_header_of(hook);
    ddp_result result = comm__check_states(hook, states, state_bytes, state_count);
    if (result == DDP_OK && header.total && !hook->error) result = comm__allocate(hook);
    DDP_TRY(comm__agree(hook->group, "comm_hook_load", result, comm__desc_key(&hook->desc)));
    if (!header.total) return DDP_OK;
    memset(hook->error, 0, hook->total * sizeof(float));
    for (int s = 0; s < state_count; s++) {
        const unsigned char *from = (const unsigned char *)states[s] + sizeof header;
        float number;
        for (size_t i = 0; i < hook->total; i++) {
            memcpy(&number, from + i * sizeof number, sizeof number);
            hook->error[i] += number;
        }
        if (s == 0) memcpy(hook->q, from + hook->total * sizeof(float), hook->q_total * sizeof(float));
    }
    DDP_TRY(ddp_broadcast(hook->group, hook->q, hook->q_total, DDP_F32, 0, NULL));
    for (int i = 0; i < hook->desc.param_count; i++)
        comm__store_q(hook, i, hook->q + hook->params[i].q_start, 0);
    return DDP_OK;
}

COMM_DEF void comm_hook_destroy(comm_hook *hook) {
    if (!hook) return;
    for (int f = 0; f < 2; f++)
        for (int b = 0; b < hook->desc.param_count && hook->delay_group; b++)
            ddp_wait(hook->delay_group, &hook->pending[f].works[b]);
    for (int k = 0; k < 2; k++) ddp_group_free(hook->group, hook->exchange[k].memory);
    ddp_group_destroy(hook->delay_group); /* frees the memory of pending */
    ddp_host_free(hook->group, hook->work.memory);
    ddp_host_free(hook->group, hook->error);
    ddp_host_free(hook->group, hook);
}

//== local SGD, DiLoCo ======================================================================================

struct local_sgd {
    ddp_group *group;
    local_sgd_desc desc; /* with every default resolved */
    size_t total;
    float *last_values; /* values after the last outer step; NULL = not needed */
    float *momentum;    /* NULL = none */
    uint64_t steps;     /* optimizer steps since create */
    comm_hook_stats stats;
};

/* 1 for a parameter with elements that is not tied to an earlier one. Tied values are averaged once. */
static int comm__is_first_of_tied(const ddp_param *params, int index) {
    for (int i = 0; i < index; i++)
        if (params[i].value.data == params[index].value.data && ddp_tensor_count(&params[i].value) > 0)
            return 0;
    return ddp_tensor_count(&params[index].value) > 0;
}

static ddp_result comm__local_resolve(ddp_group *group, const local_sgd_desc *desc, local_sgd_desc *d) {
    if (!desc) return ddp_fail(DDP_ERR_INVALID, "local_sgd_create: desc is NULL");
    *d = *desc;
    if (!d->params || d->param_count <= 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "local_sgd_create: param_count=%d or params is NULL; set the trained parameters",
                        d->param_count);
    if (d->every < 1)
        return ddp_fail(DDP_ERR_INVALID,
                        "local_sgd_create: every=%d; set the optimizer steps per outer step, 1 or more",
                        d->every);
    if (d->outer_lr == 0) d->outer_lr = 1;
    if (!(d->outer_lr > 0 && d->outer_lr <= 10))
        return ddp_fail(DDP_ERR_INVALID,
                        "local_sgd_create: outer_lr=%g; set more than 0 and at most 10, or 0 for 1",
                        d->outer_lr);
    if (!(d->outer_momentum >= 0 && d->outer_momentum < 1))
        return ddp_fail(DDP_ERR_INVALID, "local_sgd_create: outer_momentum=%g; set 0 to less than 1",
                        d->outer_momentum);
    for (int i = 0; i < d->param_count; i++) {
        const ddp_param *param = &d->params[i];
        int64_t count = ddp_tensor_count(&param->value);
        if (param->value.dtype != DDP_F32 || count < 0 || (count > 0 && !param->value.data))
            return ddp_fail(DDP_ERR_INVALID,
                            "local_sgd_create: params[%d] (%s): value is %s, not f32, or has no data or an "
                            "invalid shape",
                            i, param->name ? param->name : "no name", ddp_dtype_name(param->value.dtype));
    }
    if ((d->outer_lr == 1 && d->outer_momentum == 0) || comm__is_host_memory(group)) return DDP_OK;
    return ddp_fail(DDP_ERR_UNSUPPORTED,
                    "local_sgd_create: the outer step needs host memory, but the group's device is %s; leave "
                    "outer_lr and outer_momentum 0",
                    ddp_group_device(group)->name);
}

static uint64_t comm__local_key(const local_sgd *local) {
    comm_hook_desc d = DDP_ZERO;
    double numbers[2] = {local->desc.outer_lr, local->desc.outer_momentum};
    d.kind = (comm_hook_kind)0;
    d.params = local->desc.params;
    d.param_count = local->desc.param_count;
    d.start_step = local->desc.every;
    memcpy(&d.seed, &numbers[0], sizeof d.seed);
    uint64_t key = comm__desc_key(&d), bits;
    memcpy(&bits, &numbers[1], sizeof bits);
    return comm__mix(key ^ bits);
}

static ddp_result comm__local_new(local_sgd **out, ddp_group *group, const local_sgd_desc *desc) {
    local_sgd_desc d = DDP_ZERO;
    size_t total = 0;
    DDP_TRY(comm__local_resolve(group, desc, &d));
    for (int i = 0; i < d.param_count; i++)
        if (comm__is_first_of_tied(d.params, i)) total += (size_t)ddp_tensor_count(&d.params[i].value);
    int outer = d.outer_lr != 1 || d.outer_momentum > 0;
    int copies = outer + (d.outer_momentum > 0);
    size_t bytes = sizeof(local_sgd) + total * (size_t)copies * sizeof(float);
    local_sgd *local = (local_sgd *)ddp_host_alloc(group, bytes);
    if (!local) return ddp_fail(DDP_ERR_NO_MEMORY, "local_sgd_create: %zu bytes", bytes);
    memset(local, 0, bytes);
    local->group = group;
    local->desc = d;
    local->total = total;
    if (outer) local->last_values = (float *)(local + 1);
    if (copies == 2) local->momentum = local->last_values + total;
    *out = local;
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_create(local_sgd **out, ddp_group *group, const local_sgd_desc *desc) {
    local_sgd *local = NULL;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "local_sgd_create: group is NULL");
    if (out) *out = NULL;
    ddp_result result;
    if (out)
        result = comm__local_new(&local, group, desc);
    else
        result = ddp_fail(DDP_ERR_INVALID, "local_sgd_create: out is NULL");
    result = comm__agree(group, "local_sgd_create", result, local ? comm__local_key(local) : 0);
    float *last = local ? local->last_values : NULL;
    for (int i = 0; result == DDP_OK && i < local->desc.param_count; i++) {
        const ddp_tensor *value = &local->desc.params[i].value;
        size_t count = (size_t)ddp_tensor_count(value);
        if (!comm__is_first_of_tied(local->desc.params, i)) continue;
        result = ddp_broadcast(group, value->data, count, DDP_F32, 0, NULL);
        if (last) {
            memcpy(last, value->data, count * sizeof *last);
            last += count;
        }
    }
    if (result == DDP_OK)
        *out = local;
    else
        ddp_host_free(group, local);
    return result;
}

/* Outer SGD with Nesterov momentum, for one parameter:
       d = average over ranks of last - w
       v = momentum * v + d
       w = last - lr * (d + momentum * v)         v NULL: w = last - lr * d
   and last = w. */
static ddp_result comm__outer_step(local_sgd *local, float *w, float *last, float *v, size_t count) {
    float lr = (float)local->desc.outer_lr, momentum = (float)local->desc.outer_momentum;
    for (size_t i = 0; i < count; i++) w[i] = last[i] - w[i];
    DDP_TRY(comm__average(local->group, w, count, DDP_F32, (uint64_t)ddp_world_size(local->group), NULL));
    for (size_t i = 0; i < count; i++) {
        float d = w[i];
        if (v) {
            v[i] = momentum * v[i] + d;
            d += momentum * v[i];
        }
        last[i] -= lr * d;
        w[i] = last[i];
    }
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_step(local_sgd *local, int *synced) {
    if (!local) return ddp_fail(DDP_ERR_INVALID, "local_sgd_step: local is NULL");
    int is_outer = (local->steps + 1) % (uint64_t)local->desc.every == 0;
    int ranks = ddp_world_size(local->group);
    size_t at = 0;
    if (synced) *synced = 0;
    for (int i = 0; is_outer && i < local->desc.param_count; i++) {
        const ddp_tensor *value = &local->desc.params[i].value;
        size_t count = (size_t)ddp_tensor_count(value);
        float *w = (float *)value->data;
        float *v = local->momentum ? local->momentum + at : NULL;
        if (!comm__is_first_of_tied(local->desc.params, i)) continue;
        if (local->last_values)
            DDP_TRY(comm__outer_step(local, w, local->last_values + at, v, count));
        else if (ranks > 1)
            DDP_TRY(comm__average(local->group, w, count, DDP_F32, (uint64_t)ranks, NULL));
        at += count;
    }
    local->steps++;
    local->stats.gradient_bytes += local->total * sizeof(float);
    if (is_outer && ranks > 1) local->stats.sent_bytes += local->total * sizeof(float);
    if (synced) *synced = is_outer;
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_get_stats(const local_sgd *local, comm_hook_stats *stats) {
    if (!local || !stats) return ddp_fail(DDP_ERR_INVALID, "local_sgd_get_stats: local or stats is NULL");
    *stats = local->stats;
    return DDP_OK;
}

/* Elements of last_values and momentum. */
static size_t comm__local_floats(const local_sgd *local) {
    if (!local->last_values) return 0;
    return local->momentum ? 2 * local->total : local->total;
}

COMM_DEF ddp_result local_sgd_save(local_sgd *local, void *memory, size_t *size_bytes) {
    if (!local || !size_bytes)
        return ddp_fail(DDP_ERR_INVALID, "local_sgd_save: local or size_bytes is NULL");
    comm__state_header header = {COMM__STATE_MAGIC, 0, comm__local_key(local), comm__local_floats(local),
                                 local->steps};
    size_t bytes = (size_t)header.total * sizeof(float), room = *size_bytes;
    *size_bytes = sizeof header + bytes;
    if (!memory) return DDP_OK;
    if (room < *size_bytes)
        return ddp_fail(DDP_ERR_INVALID,
                        "local_sgd_save: *size_bytes is %zu, but %zu are needed; query it with memory NULL",
                        room, *size_bytes);
    memcpy(memory, &header, sizeof header);
    if (bytes) memcpy((unsigned char *)memory + sizeof header, local->last_values, bytes);
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_load(local_sgd *local, const void *state, size_t state_bytes) {
    comm__state_header have;
    if (!local || !state) return ddp_fail(DDP_ERR_INVALID, "local_sgd_load: local or state is NULL");
    if (state_bytes < sizeof have)
        return ddp_fail(DDP_ERR_CORRUPT, "local_sgd_load: the state is truncated; pass all saved bytes");
    memcpy(&have, state, sizeof have);
    if (have.magic != COMM__STATE_MAGIC || have.kind != 0)
        return ddp_fail(DDP_ERR_CORRUPT, "local_sgd_load: the state was not written by local_sgd_save");
    if (have.detail != comm__local_key(local))
        return ddp_fail(DDP_ERR_INVALID, "local_sgd_load: the state is of another desc or other "
                                         "parameters; create the same, or do not load");
    size_t bytes = comm__local_floats(local) * sizeof(float);
    if (state_bytes != sizeof have + bytes)
        return ddp_fail(DDP_ERR_CORRUPT, "local_sgd_load: the state has %zu bytes, not %zu", state_bytes,
                        sizeof have + bytes);
    if (local->last_values) memcpy(local->last_values, (const unsigned char *)state + sizeof have, bytes);
    local->steps = have.q_total;
    return DDP_OK;
}

COMM_DEF void local_sgd_destroy(local_sgd *local) {
    if (local) ddp_host_free(local->group, local);
}

#endif /* DDP_EXAMPLE_COMM_HOOKS_H */

/* MIT License: see LICENSE. */

/*  comm_hooks.h - sends fewer bytes of gradients, or sends them later, or seldom: bucket hooks for a ddp_reducer, and local SGD.

USAGE
    Copy it beside ddp.h and include it in one source file, after ddp.h. Everything is static. Link with -lm.

    comm_hook *hook;
    comm_hook_desc how = DDP_ZERO;              // zero means default, field by field
    how.kind = COMM_HOOK_POWERSGD;
    how.params = params;                        // the reducer's own array
    how.param_count = param_count;
    if (comm_hook_create(&hook, group, &how) != DDP_OK) return puts(ddp_last_error());
    reducer_desc.hook = comm_hook_run;
    reducer_desc.hook_user = hook;              // then ddp_reducer_create, and train as ever
    ...
    ddp_reducer_destroy(reducer);
    comm_hook_destroy(hook);

KINDS                what is sent of an f32 gradient, and where it comes from
    BF16, F16        1/2. Cast; the 16-bit all-reduce adds in f32, divides and rounds once (PyTorch's bf16_ and fp16_compress_hook). The bits are those of
                     the reducer's own comm_dtype, which needs no hook; this one also counts bytes. A f16 beyond 65504 becomes infinite: think of BF16 first.
    INT8             1/4 and 4 bytes per block. Numbers of a block are multiples of its largest / 127 (block-wise, Dettmers et al. 2021, with equal steps).
                     What rounding leaves is remembered and added in the next step (error feedback, Seide et al. 2014, Karimireddy et al. 2019). Blocks
                     go to their owners (all-to-all), which add them in f32 in rank order, round again and send the sums to everybody
                     (all-gather); what the second rounding leaves stays in the owner's memory (DoubleSqueeze, Tang et al. 2019).
    POWERSGD         a matrix of n x m as (n + m) x rank numbers (Vogels et al. 2019): P = M Q summed over ranks, made orthonormal by Gram-Schmidt; Q = M'P
                     summed; the gradient becomes P Q'. Q is where the next step starts. Error feedback: a rank remembers M - P Q' with its own Q.
                     n is dimension 0, m the rest. Tensors of fewer than 2 dimensions, and those that would not get smaller, go as they are, exactly.
                     Two all-reduces per bucket.
    DELAY            all of it, but a step later (Pipe-SGD, Li et al. 2018, with a pipeline of two): a step gets the averages of the step before while its own
                     gradients travel on a group of their own, behind the next forward and backward. The first step gets zeros; the last one's
                     averages are never applied. Saves no bytes. Not with per_token: a step's sums would be divided by the tokens of the next.
    Local SGD and DiLoCo are no hooks, they have no gradients to send: local_sgd below.

WHAT HOLDS
    All ranks get the same bits, and the same again in another run, if all run one build: P Q' is worked out on each. The bits differ from those of the
    plain all-reduce, so runs on 1, 2 and 4 ranks differ too. On one rank every kind only divides: exact, nothing is sent, remembered or late.
    Nothing is lost: what was applied (times the divisor) plus the memories of all ranks is the sum of all gradients, but for f32 rounding.
    Memory belongs to parameters, not to buckets: when the reducer regroups buckets after its first step, what a parameter has left stays with it, and Q.
    A block or matrix that is not finite on some rank is NaN on every rank, for a loss scaler to see; its memory starts again from zero. A scaler that
    skips a step, or changes its scale, does not change the memories: they are gradients of the scale they were made with.
    The memory is 4 bytes per element on each rank (INT8, POWERSGD), 8 (DELAY). After the second step nothing is allocated.
    Any device for BF16 and F16; the others compute in host memory, on f32, f16 or bf16 gradients. INT8 needs a backend with all-to-all.

    Functions return ddp_result; ddp_last_error() is the sentence. Errors inside a hook come out of ddp_reducer_wait, on every rank. */
#ifndef DDP_EXAMPLE_COMM_HOOKS_H
#define DDP_EXAMPLE_COMM_HOOKS_H

#ifndef DDP_H
#include "../../ddp.h"
#endif

#include <math.h>
#include <string.h>

#define COMM_DEF static __attribute__((unused))

//== what a trainer calls ======================================================================================

typedef enum comm_hook_kind {
    COMM_HOOK_BF16 = 1,
    COMM_HOOK_F16,
    COMM_HOOK_INT8,
    COMM_HOOK_POWERSGD,
    COMM_HOOK_DELAY
} comm_hook_kind;

typedef struct comm_hook_desc {
    comm_hook_kind kind; /* required */
    const ddp_param *
        params; /* required but for BF16 and F16: the array that the reducer is given; must outlive the hook */
    int param_count;
    int start_step; /* so many steps of the reducer go through the plain all-reduce first; PowerSGD and DELAY like it, while gradients are wild */
    int block;      /* INT8: elements per scale; 0 = 256; a multiple of 16, at most 65536 */
    int rank;       /* POWERSGD: columns of P and Q; 0 = 4; at most 64 */
    uint64_t seed;  /* POWERSGD: of the first Q */
} comm_hook_desc;

/* Since create. An all-reduce of so many bytes is what both compare: an all-to-all with its all-gather counts as one of their size. */
typedef struct comm_hook_stats {
    uint64_t gradient_bytes; /* of the gradients that came along */
    uint64_t sent_bytes;     /* what was sent instead; 0 on one rank */
} comm_hook_stats;

typedef struct comm_hook comm_hook;

/* The desc is the same on every rank, which is compared. Collective, blocking. *out is NULL on failure. DDP_ERR_INVALID on the rank whose desc is wrong,
   DDP_ERR_MISMATCH on the others; DDP_ERR_UNSUPPORTED, DDP_ERR_NO_MEMORY. */
COMM_DEF ddp_result comm_hook_create(comm_hook **out, ddp_group *group, const comm_hook_desc *desc);

/* A ddp_bucket_hook: ddp_reducer_desc.hook, with the comm_hook as hook_user. One hook serves one reducer. */
COMM_DEF ddp_result comm_hook_run(ddp_group *group, ddp_bucket *bucket, void *hook);

/* Between ddp_reducer_wait and the next backward, as are the next two. */
COMM_DEF ddp_result comm_hook_get_stats(const comm_hook *hook, comm_hook_stats *stats);

/* This rank's memory and Q. memory NULL: *size_bytes becomes what is needed; otherwise it says how much there is. What DELAY has under way is
   not saved: a resumed run starts with zeros again. Numbers as this machine has them. Not collective. */
COMM_DEF ddp_result comm_hook_save(comm_hook *hook, void *memory, size_t *size_bytes);

/* Takes up what hooks of the same desc and parameters have saved, before the first step: rank r is given what the ranks r, r + W, r + 2W ... have saved, be it
   none or several, and adds their memories up, so that nothing is lost on another number of ranks. On the same one POWERSGD goes on with the bits of a
   run that was not stopped, INT8 too where buckets are cut alike (a new reducer regroups them after its first step, unless find_unused). start_step
   counts anew. Q comes from rank 0. Collective, blocking. DDP_ERR_INVALID, DDP_ERR_CORRUPT; DDP_ERR_MISMATCH on ranks whose own states were right. */
COMM_DEF ddp_result comm_hook_load(comm_hook *hook, const void *const *states, const size_t *state_bytes,
                                   int state_count);

/* After ddp_reducer_destroy. Collective; waits for what DELAY has under way. NULL is ignored. */
COMM_DEF void comm_hook_destroy(comm_hook *hook);

/* Local SGD (Stich 2018; McMahan et al. 2017): ranks train on their own and average their values every H steps. With a momentum it is DiLoCo (Douillard
   et al. 2023): the average difference since the last time is the gradient of an outer Nesterov SGD. Bytes fall to 1/H. A trainer makes no reducer, or sets
   ddp_reducer_no_sync, and calls local_sgd_step after each optimizer step; the optimizer's own state stays with its rank. */
typedef struct local_sgd_desc {
    ddp_param
        *params; /* required; their values are f32. Tied values are taken once. Must outlive the object */
    int param_count;
    int every;             /* required; H, optimizer steps between two outer ones */
    double outer_lr;       /* 0 = 1, which averages; DiLoCo takes 0.7 */
    double outer_momentum; /* 0 = none; DiLoCo takes 0.9 */
} local_sgd_desc;

typedef struct local_sgd local_sgd;

/* Values become rank 0's. Collective, blocking, as comm_hook_create. With 1 and 0 nothing is kept and one rank keeps its bits; otherwise 4 bytes per
   value, 8 with a momentum, in host memory, and one rank takes outer steps too. Allocates here alone. */
COMM_DEF ddp_result local_sgd_create(local_sgd **out, ddp_group *group, const local_sgd_desc *desc);

/* Counts an optimizer step; the H-th is followed by the outer step, after which values are equal on all ranks, bit for bit: *synced (may be NULL) = 1. That
   one is collective and blocks, the others send nothing. After a failure values are of no use. */
COMM_DEF ddp_result local_sgd_step(local_sgd *local, int *synced);
COMM_DEF ddp_result local_sgd_get_stats(
    const local_sgd *local, comm_hook_stats *stats); /* gradient_bytes: what a reducer would have reduced */

/* As comm_hook_save, and comm_hook_load with one state per rank; not collective. Saved after an outer step it is the same on every rank and fits any number of
   them; the trainer saves the values. */
COMM_DEF ddp_result local_sgd_save(local_sgd *local, void *memory, size_t *size_bytes);
COMM_DEF ddp_result local_sgd_load(local_sgd *local, const void *state, size_t state_bytes);
COMM_DEF void local_sgd_destroy(local_sgd *local); /* not collective; NULL is ignored */

//== structs ===================================================================================================

#define COMM__TRY(call)                                  \
    do {                                                 \
        ddp_result comm__result = (call);                \
        if (comm__result != DDP_OK) return comm__result; \
    } while (0)
#define COMM__NEED(condition, ...)                                       \
    do {                                                                 \
        if (!(condition)) return ddp_fail(DDP_ERR_INVALID, __VA_ARGS__); \
    } while (0)
#define COMM__NOWHERE ((size_t)-1)
#ifndef COMM__PIECE
#define COMM__PIECE \
    ((size_t)1 << 18) /* elements that BF16 and F16 cast and send at once: both sides stay in cache */
#endif
#define COMM__LANES 16 /* sums that run side by side, so that compilers use vectors */
#define COMM__SAVED UINT64_C(0x31306b6f6f686463) /* first word of a saved state */

/* What is known of a parameter. Its numbers lie in error from start on; a matrix has its Q as columns rows of m numbers, from q_start on. */
typedef struct comm__part {
    size_t start, count, n, m, q_start;
    int columns; /* POWERSGD: 0 = goes as it is */
} comm__part;

/* DELAY: one step's gradients on their way, bucket after bucket. Two take turns: averages of the last step leave one while the other is filled. */
typedef struct comm__flight {
    unsigned char *memory; /* of own */
    size_t *at;            /* where a parameter's bytes are; COMM__NOWHERE = not in this flight */
    int *bucket;           /* and in which work */
    ddp_work *works;       /* by bucket */
    size_t used;
    uint64_t step; /* the bucket's, plus 1 */
} comm__flight;

typedef struct comm__room {
    void *memory;
    size_t bytes;
} comm__room;

struct comm_hook {
    ddp_group *group;
    comm_hook_desc desc; /* with every default resolved */
    comm__part *parts;   /* param_count, in one block with the struct and with what comes next */
    comm__flight flights[2];
    size_t total, q_total;
    float *error, *q;
    comm__room work;     /* a bucket in f32: gradient plus memory, then what is left; this rank's memory */
    comm__room wires[2]; /* group memory */
    ddp_group *
        own; /* DELAY: where gradients travel, so that what the trainer calls meanwhile does not wait for them */
    comm_hook_stats stats;
};

typedef struct comm__saved {
    uint64_t magic, kind, detail, total, q_total;
} comm__saved;

//== agreeing ==================================================================================================

static uint64_t comm__mix(uint64_t x) { /* splitmix64's last part */
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* What one rank found wrong becomes everybody's failure, as does a key that differs. Collective. */
static ddp_result comm__agree(ddp_group *group, const char *what, ddp_result result, uint64_t key) {
    int64_t word[3], bits = (int64_t)(key >> 2);
    char text[512];
    size_t length = strlen(ddp_last_error());
    if (length >= sizeof text) length = sizeof text - 1;
    memcpy(text, ddp_last_error(), length);
    text[length] = 0;
    word[0] = result == DDP_OK ? INT64_MAX : ddp_rank(group);
    word[1] = result == DDP_OK ? bits : 0;
    word[2] = result == DDP_OK ? -bits : 0;
    COMM__TRY(ddp_all_reduce(group, word, word, 3, DDP_I64, DDP_OP_MIN, NULL));
    if (result != DDP_OK) return ddp_fail(result, "%s", text);
    if (word[0] != INT64_MAX)
        return ddp_fail(DDP_ERR_MISMATCH, "%s: rank %d has failed, and says why; the others stop with it",
                        what, (int)word[0]);
    if (word[1] != -word[2])
        return ddp_fail(DDP_ERR_MISMATCH,
                        "%s: ranks were given different descs or parameters; give all the same", what);
    return DDP_OK;
}

static int comm__is_host(ddp_group *group) { return ddp_group_device(group)->host_memory; }

/* Memory of at least so many bytes, for good. Group memory: collective, and buckets ask for the same on every rank. */
static ddp_result comm__grow(ddp_group *group, comm__room *room, size_t bytes, int shared) {
    if (bytes <= room->bytes) return DDP_OK;
    room->bytes = 0;
    if (shared) {
        COMM__TRY(ddp_group_free(group, room->memory));
        room->memory = NULL;
        COMM__TRY(ddp_group_alloc(group, bytes, &room->memory));
    } else {
        ddp_host_free(group, room->memory);
        room->memory = ddp_host_alloc(group, bytes);
        if (!room->memory)
            return ddp_fail(DDP_ERR_NO_MEMORY,
                            "comm_hook_run: %zu bytes for a bucket; use a smaller bucket_cap_bytes", bytes);
    }
    room->bytes = bytes;
    return DDP_OK;
}

/* SUM over ranks and one division, in one call: the reducer's own, bit for bit. */
static ddp_result comm__average(ddp_group *group, void *data, size_t count, ddp_dtype dtype, uint64_t divisor,
                                ddp_work *work) {
    ddp_call call = DDP_ZERO;
    call.kind = DDP_CALL_ALL_REDUCE;
    call.dtype = dtype;
    call.op = DDP_OP_AVG;
    call.root = -1;
    call.send = call.recv = data;
    call.count = count;
    call.divisor = divisor;
    return ddp_group_call(group, &call, work);
}

//== a bucket in f32 ===========================================================================================

/* The bucket is what this hook was made for: its parameters fill it. */
static ddp_result comm__check_bucket(const comm_hook *hook, const ddp_bucket *bucket) {
    size_t count = 0;
    for (int k = 0; k < bucket->param_count; k++) {
        int i = bucket->params[k];
        if (i < 0 || i >= hook->desc.param_count) count = COMM__NOWHERE;
        if (count != COMM__NOWHERE) count += hook->parts[i].count;
    }
    COMM__NEED(count == bucket->count,
               "comm_hook_run: bucket %d holds %zu elements, its parameters have another number in the "
               "hook's desc; give the hook "
               "the reducer's params and param_count",
               bucket->index, bucket->count);
    if (bucket->dtype == DDP_F32 || bucket->dtype == DDP_F16 || bucket->dtype == DDP_BF16) return DDP_OK;
    return ddp_fail(DDP_ERR_UNSUPPORTED,
                    "comm_hook_run: gradients of bucket %d are %s; use f32, f16 or bf16, or COMM_HOOK_BF16",
                    bucket->index, ddp_dtype_name(bucket->dtype));
}

/* work = gradients, plus what is remembered. */
static void comm__load_bucket(comm_hook *hook, const ddp_bucket *bucket, float *work) {
    const float *from = bucket->dtype == DDP_F32 ? (const float *)bucket->data : work;
    if (from == work)
        ddp_group_device(hook->group)->cast(work, DDP_F32, bucket->data, bucket->dtype, bucket->count);
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__part *part = &hook->parts[bucket->params[k]];
        const float *error = hook->error + part->start;
        for (size_t i = 0; i < part->count; i++) work[i] = from[i] + error[i];
        from += part->count, work += part->count;
    }
}

/* Where a result in f32 is made: in the bucket, or in work, which comm__deliver then casts. */
static float *comm__result(const ddp_bucket *bucket, float *work) {
    return bucket->dtype == DDP_F32 ? (float *)bucket->data : work;
}

static void comm__deliver(const comm_hook *hook, const ddp_bucket *bucket, const float *result) {
    if (bucket->dtype != DDP_F32)
        ddp_group_device(hook->group)->cast(bucket->data, bucket->dtype, result, DDP_F32, bucket->count);
}

/* What is left in work is remembered. */
static void comm__remember(comm_hook *hook, const ddp_bucket *bucket, const float *work) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__part *part = &hook->parts[bucket->params[k]];
        memcpy(hook->error + part->start, work, part->count * sizeof(float));
        work += part->count;
    }
}

//== 16 bits ===================================================================================================

static ddp_result comm__half(comm_hook *hook, ddp_bucket *bucket) {
    const ddp_device *device = ddp_group_device(hook->group);
    ddp_dtype half = hook->desc.kind == COMM_HOOK_BF16 ? DDP_BF16 : DDP_F16;
    if (ddp_dtype_size(bucket->dtype) <= 2) half = bucket->dtype; /* it is small already */
    hook->stats.sent_bytes += bucket->count * 2;
    if (half == bucket->dtype)
        return comm__average(hook->group, bucket->data, bucket->count, half, bucket->divisor, NULL);
    size_t size = ddp_dtype_size(bucket->dtype), n;
    COMM__TRY(comm__grow(hook->group, &hook->wires[0], COMM__PIECE * 2, 1));
    for (size_t at = 0; at < bucket->count; at += n) {
        unsigned char *data = (unsigned char *)bucket->data + at * size;
        n = bucket->count - at < COMM__PIECE ? bucket->count - at : COMM__PIECE;
        device->cast(hook->wires[0].memory, half, data, bucket->dtype, n);
        COMM__TRY(comm__average(hook->group, hook->wires[0].memory, n, half, bucket->divisor, NULL));
        device->cast(data, bucket->dtype, hook->wires[0].memory, half, n);
    }
    return DDP_OK;
}

//== 8 bits ====================================================================================================

/* A share is so many blocks (each): their scales, then their numbers, one byte each. The bucket's last block may be short, and shares may have none. */

/* x = q scale + what stays in x. A block that is not finite has the scale NaN and leaves nothing; one too small for scales leaves all. */
static void comm__quantise(float *x, size_t count, float *scale, int8_t *q) {
    const float magic = 12582912.0f; /* 3 * 2^22: adding it rounds to a whole number, in the low bits */
    uint32_t most = 0, bits;
    float step, inverse;
    for (size_t i = 0; i < count; i++) {
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    memcpy(&step, &most, 4);
    step /= 127.0f;
    if (most >= 0x7f800000u) step = NAN;
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

static void comm__expand(float *x, size_t count, float scale, const int8_t *q, int add) {
    if (add)
        for (size_t i = 0; i < count; i++) x[i] += (float)q[i] * scale;
    else
        for (size_t i = 0; i < count; i++) x[i] = (float)q[i] * scale;
}

/* A block of a bucket of count elements: where it begins, and how long it is. */
static size_t comm__block(size_t index, size_t block, size_t count, size_t *begin) {
    *begin = index * block;
    return *begin >= count ? 0 : count - *begin < block ? count - *begin : block;
}

/* The owner: adds up what all ranks have sent of its share, rounds again into out; what that leaves is added to this rank's own work. */
static void comm__own_share(const unsigned char *in, unsigned char *out, float *work, float *sum,
                            size_t count, size_t block, size_t each, int rank, int ranks) {
    size_t share = each * (4 + block), begin;
    for (size_t b = 0; b < each; b++) {
        size_t n = comm__block((size_t)rank * each + b, block, count, &begin);
        for (int r = 0; r < ranks; r++) {
            const unsigned char *from = in + (size_t)r * share;
            comm__expand(sum, n, ((const float *)(const void *)from)[b],
                         (const int8_t *)from + 4 * each + b * block, r > 0);
        }
        comm__quantise(sum, n, (float *)(void *)out + b, (int8_t *)out + 4 * each + b * block);
        for (size_t i = 0; i < n; i++) work[begin + i] += sum[i];
    }
}

/*      rank 0's bucket  [share 0 | share 1]  --all-to-all-->  rank 0: share 0 of 0, share 0 of 1 --sum-->  share 0   --all-gather-->  both
        rank 1's bucket  [share 0 | share 1]                   rank 1: share 1 of 0, share 1 of 1 --sum-->  share 1                            */
static ddp_result comm__int8(comm_hook *hook, ddp_bucket *bucket) {
    int rank = ddp_rank(hook->group), ranks = ddp_world_size(hook->group);
    size_t block = (size_t)hook->desc.block, count = bucket->count, blocks = (count + block - 1) / block;
    size_t each = (blocks + (size_t)ranks - 1) / (size_t)ranks, share = each * (4 + block), begin;
    COMM__TRY(comm__grow(hook->group, &hook->work, (count + block) * sizeof(float), 0));
    for (int k = 0; k < 2; k++) COMM__TRY(comm__grow(hook->group, &hook->wires[k], share * (size_t)ranks, 1));
    float *work = (float *)hook->work.memory, *sum = work + count;
    unsigned char *out = (unsigned char *)hook->wires[0].memory, *in = (unsigned char *)hook->wires[1].memory;

    comm__load_bucket(hook, bucket, work);
    for (size_t b = 0; b < each * (size_t)ranks; b++) {
        unsigned char *to = out + b / each * share;
        size_t n = comm__block(b, block, count, &begin), at = b % each;
        comm__quantise(work + (n ? begin : 0), n, (float *)(void *)to + at,
                       (int8_t *)to + 4 * each + at * block);
    }
    COMM__TRY(ddp_all_to_all(hook->group, out, in, share, DDP_U8, NULL));
    comm__own_share(in, out + (size_t)rank * share, work, sum, count, block, each, rank, ranks);
    COMM__TRY(ddp_all_gather(hook->group, out + (size_t)rank * share, out, share, DDP_U8, NULL));
    comm__remember(hook, bucket, work);
    float *result = comm__result(bucket, work), divisor = (float)bucket->divisor;
    for (size_t b = 0; b < blocks; b++) {
        const unsigned char *from = out + b / each * share;
        size_t n = comm__block(b, block, count, &begin), at = b % each;
        comm__expand(result + begin, n, ((const float *)(const void *)from)[at] / divisor,
                     (const int8_t *)from + 4 * each + at * block, 0);
    }
    comm__deliver(hook, bucket, result);
    hook->stats.sent_bytes += share * (size_t)ranks;
    return DDP_OK;
}

//== PowerSGD ==================================================================================================

/* Where there is nothing to start from: numbers in [-1, 1) that all ranks draw alike. */
static void comm__draw(const comm_hook *hook, int param, int column, uint64_t step, float *out,
                       size_t count) {
    uint64_t key = comm__mix(hook->desc.seed
                             ^ comm__mix((uint64_t)param << 20 ^ (uint64_t)column ^ step << 44));
    for (size_t j = 0; j < count; j++)
        out[j] = (float)(int32_t)(comm__mix(key + j) >> 32) * (1.0f / 2147483648.0f);
}

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

/* One row of M times one of Q, in f32. */
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
    uint32_t most = 0, bits;
    for (size_t i = 0; i < count; i++) {
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000u;
}

/* Makes the columns of P, columns rows of n here, orthonormal. Each is cleared of the earlier ones twice, which is enough in floating point; what is
   left then of a column that was one of their sums is noise: it becomes zeros. */
static void comm__gram_schmidt(float *p, size_t n, int columns) {
    for (int k = 0; k < columns; k++) {
        float *column = p + (size_t)k * n;
        double before = sqrt(comm__dot(column, column, n)), after;
        for (int twice = 0; twice < 2; twice++)
            for (int l = 0; l < k; l++)
                comm__axpy(column, p + (size_t)l * n, n, (float)-comm__dot(p + (size_t)l * n, column, n));
        after = sqrt(comm__dot(column, column, n));
        if (!(after > before * 1e-5))
            memset(column, 0, n * sizeof *column);
        else
            for (size_t i = 0; i < n; i++) column[i] = (float)(column[i] / after);
    }
}

/* P, columns rows of n, from M and Q. */
static void comm__left(const comm__part *part, const float *m, const float *q, float *p) {
    for (size_t i = 0; i < part->n; i++)
        for (int k = 0; k < part->columns; k++)
            p[(size_t)k * part->n + i] = comm__row_dot(m + i * part->m, q + (size_t)k * part->m, part->m);
}

/* Q from M and an orthonormal P; then M keeps what P Q' does not have. */
static void comm__right(const comm__part *part, float *m, const float *p, float *q) {
    memset(q, 0, (size_t)part->columns * part->m * sizeof *q);
    for (size_t i = 0; i < part->n; i++)
        for (int k = 0; k < part->columns; k++)
            comm__axpy(q + (size_t)k * part->m, m + i * part->m, part->m, p[(size_t)k * part->n + i]);
    for (size_t i = 0; i < part->n; i++)
        for (int k = 0; k < part->columns; k++)
            comm__axpy(m + i * part->m, q + (size_t)k * part->m, part->m, -p[(size_t)k * part->n + i]);
}

/* out = P Q' / divisor */
static void comm__product(const comm__part *part, float *out, const float *p, const float *q, float divisor) {
    for (size_t i = 0; i < part->n; i++, out += part->m) {
        float first = p[i] / divisor;
        for (size_t j = 0; j < part->m; j++) out[j] = first * q[j];
        for (int k = 1; k < part->columns; k++)
            comm__axpy(out, q + (size_t)k * part->m, part->m, p[(size_t)k * part->n + i] / divisor);
    }
}

/* The Q of the next step is this step's, the same on every rank; columns that tell nothing are drawn anew. */
static void comm__keep_q(comm_hook *hook, int param, const float *q, uint64_t step) {
    const comm__part *part = &hook->parts[param];
    float *kept = hook->q + part->q_start;
    for (int k = 0; k < part->columns; k++, kept += part->m, q += part->m) {
        size_t j = 0;
        while (j < part->m && q[j] == 0) j++;
        if (j < part->m && comm__is_finite(q, part->m))
            memcpy(kept, q, part->m * sizeof *q);
        else
            comm__draw(hook, param, k, step + 1, kept, part->m);
    }
}

static size_t comm__left_count(const comm__part *part) {
    return part->columns ? (size_t)part->columns * part->n : part->count;
}
static size_t comm__right_count(const comm__part *part) { return (size_t)part->columns * part->m; }

/* Before the first sum: p holds, one parameter after the other, its gradient or its P. */
static void comm__power_begin(comm_hook *hook, const ddp_bucket *bucket, const float *m, float *p) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__part *part = &hook->parts[bucket->params[k]];
        if (part->columns)
            comm__left(part, m, hook->q + part->q_start, p);
        else
            memcpy(p, m, part->count * sizeof *m);
        p += comm__left_count(part), m += part->count;
    }
}

/* Between the sums: q holds one Q after the other, m what is to be remembered. */
static void comm__power_middle(comm_hook *hook, const ddp_bucket *bucket, float *m, float *p, float *q) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__part *part = &hook->parts[bucket->params[k]];
        if (part->columns && comm__is_finite(p, comm__left_count(part))) {
            comm__gram_schmidt(p, part->n, part->columns);
            comm__right(part, m, p, q);
        } else {
            memset(m, 0, part->count * sizeof *m);
            for (size_t j = 0; j < comm__right_count(part); j++)
                q[j] = NAN; /* a matrix that is not finite, on every rank */
        }
        p += comm__left_count(part), q += comm__right_count(part), m += part->count;
    }
}

/* After them: the memory leaves m, the result enters out, which may be m. */
static void comm__power_end(comm_hook *hook, const ddp_bucket *bucket, float *m, float *out, const float *p,
                            const float *q) {
    for (int k = 0; k < bucket->param_count; k++) {
        const comm__part *part = &hook->parts[bucket->params[k]];
        if (!comm__is_finite(q, comm__right_count(part))) memset(m, 0, part->count * sizeof *m);
        memcpy(hook->error + part->start, m, part->count * sizeof *m);
        if (part->columns)
            comm__product(part, out, p, q, (float)bucket->divisor);
        else {
            memcpy(out, p, part->count * sizeof *out);
            ddp_group_device(hook->group)
                ->divide(out, part->count, DDP_F32, bucket->divisor); /* as the plain all-reduce does */
        }
        comm__keep_q(hook, bucket->params[k], q, bucket->step);
        p += comm__left_count(part), q += comm__right_count(part), m += part->count, out += part->count;
    }
}

static ddp_result comm__power(comm_hook *hook, ddp_bucket *bucket) {
    size_t lefts = 0, rights = 0;
    for (int k = 0; k < bucket->param_count; k++) {
        lefts += comm__left_count(&hook->parts[bucket->params[k]]);
        rights += comm__right_count(&hook->parts[bucket->params[k]]);
    }
    COMM__TRY(comm__grow(hook->group, &hook->work, bucket->count * sizeof(float), 0));
    COMM__TRY(comm__grow(hook->group, &hook->wires[0], lefts * sizeof(float), 1));
    COMM__TRY(comm__grow(hook->group, &hook->wires[1], rights * sizeof(float), 1));
    float *work = (float *)hook->work.memory, *p = (float *)hook->wires[0].memory,
          *q = (float *)hook->wires[1].memory;

    comm__load_bucket(hook, bucket, work);
    comm__power_begin(hook, bucket, work, p);
    COMM__TRY(ddp_all_reduce(hook->group, p, p, lefts, DDP_F32, DDP_OP_SUM, NULL));
    comm__power_middle(hook, bucket, work, p, q);
    if (rights) COMM__TRY(ddp_all_reduce(hook->group, q, q, rights, DDP_F32, DDP_OP_SUM, NULL));
    comm__power_end(hook, bucket, work, comm__result(bucket, work), p, q);
    comm__deliver(hook, bucket, work);
    hook->stats.sent_bytes += (lefts + rights) * sizeof(float);
    return DDP_OK;
}

//== one step late =============================================================================================

/* The step's own gradients leave on a group of their own; the averages of the step before take their place. Buckets may have been regrouped in between. */
static ddp_result comm__delay(comm_hook *hook, ddp_bucket *bucket) {
    comm__flight *leaving = &hook->flights[bucket->step & 1], *arriving = &hook->flights[~bucket->step & 1];
    unsigned char *data = (unsigned char *)bucket->data;
    size_t size = ddp_dtype_size(bucket->dtype), bytes = bucket->count * size, begin;
    if (leaving->step != bucket->step + 1) { /* the step begins: what was here two steps ago is done with */
        for (int b = 0; b < hook->desc.param_count; b++) COMM__TRY(ddp_wait(hook->own, &leaving->works[b]));
        leaving->used = 0;
        leaving->step = bucket->step + 1;
    }
    begin = leaving->used;
    memcpy(leaving->memory + begin, data, bytes);
    leaving->used += (bytes + 63) / 64 * 64;
    for (int k = 0; k < bucket->param_count; k++) {
        int i = bucket->params[k];
        size_t part_bytes = hook->parts[i].count * size, from = arriving->at[i];
        if (from == COMM__NOWHERE)
            memset(data, 0, part_bytes);
        else {
            COMM__TRY(ddp_wait(hook->own, &arriving->works[arriving->bucket[i]]));
            memcpy(data, arriving->memory + from, part_bytes);
        }
        arriving->at[i] = COMM__NOWHERE; /* used up */
        leaving->at[i] = begin;
        leaving->bucket[i] = bucket->index;
        data += part_bytes, begin += part_bytes;
    }
    hook->stats.sent_bytes += bytes;
    return comm__average(hook->own, leaving->memory + (begin - bytes), bucket->count, bucket->dtype,
                         bucket->divisor, &leaving->works[bucket->index]);
}

//== the hook ==================================================================================================

static ddp_result comm__desc_resolve(const comm_hook_desc *desc, comm_hook_desc *d) {
    COMM__NEED(desc, "comm_hook_create: desc is NULL");
    *d = *desc;
    COMM__NEED(d->kind >= COMM_HOOK_BF16 && d->kind <= COMM_HOOK_DELAY,
               "comm_hook_create: kind is %d; set one of comm_hook_kind", (int)d->kind);
    COMM__NEED(d->start_step >= 0,
               "comm_hook_create: start_step=%d; set how many steps go uncompressed, or 0", d->start_step);
    if (d->kind <= COMM_HOOK_F16) {
        d->params = NULL, d->param_count = 0;
        return DDP_OK;
    }
    COMM__NEED(d->params && d->param_count > 0,
               "comm_hook_create: param_count=%d or params is NULL; give the array that the reducer is given",
               d->param_count);
    if (d->block == 0) d->block = 256;
    if (d->rank == 0) d->rank = 4;
    COMM__NEED(d->block >= 16 && d->block <= 65536 && d->block % 16 == 0,
               "comm_hook_create: block=%d; set a multiple of 16 from 16 to 65536", d->block);
    COMM__NEED(d->rank >= 1 && d->rank <= 64, "comm_hook_create: rank=%d; set 1 to 64 columns", d->rank);
    for (int i = 0; i < d->param_count; i++)
        COMM__NEED(ddp_tensor_count(&d->params[i].value) >= 0,
                   "comm_hook_create: params[%d] (%s) has a negative dimension or too many elements", i,
                   d->params[i].name ? d->params[i].name : "no name");
    return DDP_OK;
}

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

/* How each parameter is seen, and where its state is. */
static void comm__plan_parts(comm_hook *hook) {
    for (int i = 0; i < hook->desc.param_count; i++) {
        const ddp_tensor *value = &hook->desc.params[i].value;
        comm__part *part = &hook->parts[i];
        size_t columns = (size_t)hook->desc.rank;
        part->start = hook->total;
        part->count = (size_t)ddp_tensor_count(value);
        part->q_start = hook->q_total;
        hook->total += part->count;
        if (hook->desc.kind != COMM_HOOK_POWERSGD || value->ndim < 2 || part->count == 0) continue;
        part->n = (size_t)value->shape[0];
        part->m = part->count / part->n;
        if (columns * (part->n + part->m) >= part->count) continue;
        part->columns = hook->desc.rank;
        hook->q_total += columns * part->m;
    }
}

/* Memory of the state; own is there already. */
static ddp_result comm__allocate(comm_hook *hook) {
    size_t n = (size_t)hook->desc.param_count, floats = hook->total + hook->q_total;
    if (hook->desc.kind == COMM_HOOK_DELAY) {
        for (int f = 0; f < 2; f++) {
            void *memory = NULL;
            COMM__TRY(ddp_group_alloc(hook->own, hook->total * sizeof(float) + n * 64,
                                      &memory)); /* each bucket begins at a multiple of 64 */
            hook->flights[f].memory = (unsigned char *)memory;
        }
        return DDP_OK;
    }
    hook->error = (float *)ddp_host_alloc(hook->group, (floats ? floats : 1) * sizeof(float));
    if (!hook->error)
        return ddp_fail(DDP_ERR_NO_MEMORY, "comm_hook_create: %zu bytes to remember what was not sent",
                        floats * sizeof(float));
    memset(hook->error, 0, hook->total * sizeof(float));
    hook->q = hook->error + hook->total;
    for (int i = 0; i < hook->desc.param_count; i++)
        for (int k = 0; k < hook->parts[i].columns; k++)
            comm__draw(hook, i, k, 0, hook->q + hook->parts[i].q_start + (size_t)k * hook->parts[i].m,
                       hook->parts[i].m);
    return DDP_OK;
}

/* This rank's part of create: the struct, with all that has an entry per parameter behind it. */
static ddp_result comm__make(comm_hook **out, ddp_group *group, const comm_hook_desc *desc) {
    comm_hook_desc d = DDP_ZERO;
    COMM__TRY(comm__desc_resolve(desc, &d));
    if (d.kind > COMM_HOOK_F16 && !comm__is_host(group))
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "comm_hook_create: this kind computes in host memory, and the group's device is %s; "
                        "use COMM_HOOK_BF16 or "
                        "COMM_HOOK_F16",
                        ddp_group_device(group)->name);
    size_t n = (size_t)d.param_count,
           each = sizeof(comm__part) + 2 * (sizeof(ddp_work) + sizeof(size_t) + sizeof(int)),
           bytes = sizeof(comm_hook) + n * each;
    comm_hook *hook = (comm_hook *)ddp_host_alloc(group, bytes);
    if (!hook) return ddp_fail(DDP_ERR_NO_MEMORY, "comm_hook_create: %zu bytes", bytes);
    memset(hook, 0, bytes);
    hook->group = group;
    hook->desc = d;
    hook->parts = (comm__part *)(hook + 1);
    hook->flights[0].works = (ddp_work *)(hook->parts + n),
    hook->flights[1].works = hook->flights[0].works + n;
    hook->flights[0].at = (size_t *)(hook->flights[1].works + n),
    hook->flights[1].at = hook->flights[0].at + n;
    hook->flights[0].bucket = (int *)(hook->flights[1].at + n),
    hook->flights[1].bucket = hook->flights[0].bucket + n;
    for (size_t i = 0; i < 2 * n; i++) hook->flights[0].at[i] = COMM__NOWHERE;
    comm__plan_parts(hook);
    *out = hook;
    return DDP_OK;
}

COMM_DEF ddp_result comm_hook_create(comm_hook **out, ddp_group *group, const comm_hook_desc *desc) {
    comm_hook *hook = NULL;
    COMM__NEED(group, "comm_hook_create: group is NULL");
    if (out) *out = NULL;
    ddp_result result = out ? comm__make(&hook, group, desc)
                            : ddp_fail(DDP_ERR_INVALID, "comm_hook_create: out is NULL");
    result = comm__agree(group, "comm_hook_create", result, hook ? comm__desc_key(&hook->desc) : 0);
    if (result == DDP_OK && ddp_world_size(group) > 1) {
        if (hook->desc.kind == COMM_HOOK_DELAY)
            result = ddp_group_split(group, 0, ddp_rank(group), &hook->own);
        if (result == DDP_OK && hook->desc.kind > COMM_HOOK_F16) result = comm__allocate(hook);
        result = comm__agree(group, "comm_hook_create", result, 0);
    }
    if (result == DDP_OK) {
        *out = hook;
        return DDP_OK;
    }
    if (hook) {
        ddp_group_destroy(hook->own);
        ddp_host_free(group, hook->error);
        ddp_host_free(group, hook);
    }
    return result;
}

/* One rank, after comm_hook_load: what several ranks had remembered is applied at once. */
static ddp_result comm__pay_back(comm_hook *hook, ddp_bucket *bucket) {
    COMM__TRY(comm__check_bucket(hook, bucket));
    COMM__TRY(comm__grow(hook->group, &hook->work, bucket->count * sizeof(float), 0));
    float *work = (float *)hook->work.memory;
    comm__load_bucket(hook, bucket, work);
    ddp_group_device(hook->group)->cast(bucket->data, bucket->dtype, work, DDP_F32, bucket->count);
    memset(work, 0, bucket->count * sizeof *work);
    comm__remember(hook, bucket, work);
    return DDP_OK;
}

COMM_DEF ddp_result comm_hook_run(ddp_group *group, ddp_bucket *bucket, void *user) {
    comm_hook *hook = (comm_hook *)user;
    COMM__NEED(hook, "comm_hook_run: hook_user is NULL; set it to the comm_hook");
    COMM__NEED(hook->group == group,
               "comm_hook_run: the hook was created on another group; create it on the reducer's");
    hook->stats.gradient_bytes += bucket->count * ddp_dtype_size(bucket->dtype);
    if (ddp_world_size(group) == 1) {
        if (hook->error) COMM__TRY(comm__pay_back(hook, bucket));
        ddp_group_device(group)->divide(bucket->data, bucket->count, bucket->dtype, bucket->divisor);
        return DDP_OK;
    }
    COMM__NEED(hook->desc.kind != COMM_HOOK_DELAY || bucket->divisor > 1 || bucket->step > 0,
               "comm_hook_run: COMM_HOOK_DELAY is for averages, but "
               "these are sums, of per_token or of one active rank: the next step would divide them by its "
               "own tokens; leave per_token 0");
    if (bucket->step < (uint64_t)hook->desc.start_step) {
        hook->stats.sent_bytes += bucket->count * ddp_dtype_size(bucket->dtype);
        return comm__average(group, bucket->data, bucket->count, bucket->dtype, bucket->divisor, NULL);
    }
    if (hook->desc.kind <= COMM_HOOK_F16) return comm__half(hook, bucket);
    COMM__TRY(comm__check_bucket(hook, bucket));
    if (hook->desc.kind == COMM_HOOK_INT8) return comm__int8(hook, bucket);
    return hook->desc.kind == COMM_HOOK_POWERSGD ? comm__power(hook, bucket) : comm__delay(hook, bucket);
}

COMM_DEF ddp_result comm_hook_get_stats(const comm_hook *hook, comm_hook_stats *stats) {
    COMM__NEED(hook && stats, "comm_hook_get_stats: hook or stats is NULL");
    *stats = hook->stats;
    return DDP_OK;
}

static comm__saved comm__saved_header(const comm_hook *hook) {
    int remembers = hook->desc.kind == COMM_HOOK_INT8 || hook->desc.kind == COMM_HOOK_POWERSGD;
    comm__saved header = {COMM__SAVED, (uint64_t)hook->desc.kind, comm__desc_key(&hook->desc), 0, 0};
    if (remembers) header.total = hook->total, header.q_total = hook->q_total;
    return header;
}

COMM_DEF ddp_result comm_hook_save(comm_hook *hook, void *memory, size_t *size_bytes) {
    COMM__NEED(hook && size_bytes, "comm_hook_save: hook or size_bytes is NULL");
    comm__saved header = comm__saved_header(hook);
    size_t bytes = (size_t)(header.total + header.q_total) * sizeof(float), room = *size_bytes;
    unsigned char *to = (unsigned char *)memory;
    *size_bytes = sizeof header + bytes;
    if (!memory) return DDP_OK;
    COMM__NEED(room >= *size_bytes,
               "comm_hook_save: there are %zu bytes, and %zu are needed; ask with memory NULL", room,
               *size_bytes);
    memcpy(to, &header, sizeof header);
    if (hook->error)
        memcpy(to + sizeof header, hook->error, bytes);
    else if (bytes)
        memset(to + sizeof header, 0, bytes); /* one rank: who loads a Q of zeros draws it anew */
    return DDP_OK;
}

static ddp_result comm__check_states(const comm_hook *hook, const void *const *states,
                                     const size_t *state_bytes, int state_count) {
    comm__saved want = comm__saved_header(hook), have;
    size_t needed = sizeof want + (size_t)(want.total + want.q_total) * sizeof(float);
    COMM__NEED(hook->stats.gradient_bytes == 0,
               "comm_hook_load: the hook has run already; load before the first step");
    COMM__NEED(state_count >= 0 && (state_count == 0 || (states && state_bytes)),
               "comm_hook_load: state_count=%d, states or state_bytes is NULL", state_count);
    COMM__NEED(state_count > 0 || ddp_rank(hook->group) > 0,
               "comm_hook_load: rank 0 has no state; give it the one that rank 0 has saved");
    for (int s = 0; s < state_count; s++) {
        if (!states[s] || state_bytes[s] < sizeof have)
            return ddp_fail(DDP_ERR_CORRUPT, "comm_hook_load: state %d is cut short; give all that was saved",
                            s);
        memcpy(&have, states[s], sizeof have);
        if (have.magic != want.magic)
            return ddp_fail(DDP_ERR_CORRUPT, "comm_hook_load: state %d was not written by comm_hook_save", s);
        COMM__NEED(have.kind == want.kind && have.detail == want.detail,
                   "comm_hook_load: state %d is of a hook with another desc or other parameters; "
                   "create the same, or start without",
                   s);
        if (state_bytes[s] != needed)
            return ddp_fail(DDP_ERR_CORRUPT, "comm_hook_load: state %d has %zu bytes, not %zu", s,
                            state_bytes[s], needed);
    }
    return DDP_OK;
}

COMM_DEF ddp_result comm_hook_load(comm_hook *hook, const void *const *states, const size_t *state_bytes,
                                   int state_count) {
    COMM__NEED(hook, "comm_hook_load: hook is NULL");
    comm__saved header = comm__saved_header(hook);
    ddp_result result = comm__check_states(hook, states, state_bytes, state_count);
    if (result == DDP_OK && header.total && !hook->error) result = comm__allocate(hook);
    COMM__TRY(comm__agree(hook->group, "comm_hook_load", result, comm__desc_key(&hook->desc)));
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
    COMM__TRY(ddp_broadcast(hook->group, hook->q, hook->q_total, DDP_F32, 0, NULL));
    for (int i = 0; i < hook->desc.param_count; i++)
        comm__keep_q(hook, i, hook->q + hook->parts[i].q_start, 0);
    return DDP_OK;
}

COMM_DEF void comm_hook_destroy(comm_hook *hook) {
    if (!hook) return;
    for (int f = 0; f < 2; f++)
        for (int b = 0; b < hook->desc.param_count && hook->own; b++)
            ddp_wait(hook->own, &hook->flights[f].works[b]);
    for (int k = 0; k < 2; k++) ddp_group_free(hook->group, hook->wires[k].memory);
    ddp_group_destroy(hook->own); /* and the flights */
    ddp_host_free(hook->group, hook->work.memory);
    ddp_host_free(hook->group, hook->error);
    ddp_host_free(hook->group, hook);
}

//== local SGD, DiLoCo =========================================================================================

struct local_sgd {
    ddp_group *group;
    local_sgd_desc desc; /* with every default resolved */
    size_t total;
    float *old, *speed; /* values after the last outer step, and its momentum; NULL = not needed */
    uint64_t steps;     /* optimizer steps since create */
    comm_hook_stats stats;
};

/* The first of the parameters with these values; tied ones move once. */
static int comm__is_first(const ddp_param *params, int index) {
    for (int i = 0; i < index; i++)
        if (params[i].value.data == params[index].value.data && ddp_tensor_count(&params[i].value) > 0)
            return 0;
    return ddp_tensor_count(&params[index].value) > 0;
}

static ddp_result comm__local_resolve(ddp_group *group, const local_sgd_desc *desc, local_sgd_desc *d) {
    COMM__NEED(desc, "local_sgd_create: desc is NULL");
    *d = *desc;
    COMM__NEED(d->params && d->param_count > 0,
               "local_sgd_create: param_count=%d or params is NULL; give the trained parameters",
               d->param_count);
    COMM__NEED(d->every >= 1,
               "local_sgd_create: every=%d; set the optimizer steps between two averages, at least 1",
               d->every);
    if (d->outer_lr == 0) d->outer_lr = 1;
    COMM__NEED(d->outer_lr > 0 && d->outer_lr <= 10,
               "local_sgd_create: outer_lr=%g; set more than 0 and at most 10, or 0 for 1", d->outer_lr);
    COMM__NEED(d->outer_momentum >= 0 && d->outer_momentum < 1,
               "local_sgd_create: outer_momentum=%g; set 0 to less than 1", d->outer_momentum);
    for (int i = 0; i < d->param_count; i++) {
        const ddp_param *param = &d->params[i];
        COMM__NEED(
            param->value.dtype == DDP_F32 && ddp_tensor_count(&param->value) >= 0
                && (param->value.data || !ddp_tensor_count(&param->value)),
            "local_sgd_create: the value of params[%d] (%s) has no data, a bad shape, or is %s; give f32", i,
            param->name ? param->name : "no name", ddp_dtype_name(param->value.dtype));
    }
    if ((d->outer_lr == 1 && d->outer_momentum == 0) || comm__is_host(group)) return DDP_OK;
    return ddp_fail(DDP_ERR_UNSUPPORTED,
                    "local_sgd_create: the outer step computes in host memory, and the group's device is %s; "
                    "leave outer_lr and "
                    "outer_momentum 0",
                    ddp_group_device(group)->name);
}

static uint64_t comm__local_key(const local_sgd *local) {
    comm_hook_desc d = DDP_ZERO;
    double numbers[2] = {local->desc.outer_lr, local->desc.outer_momentum};
    d.kind = (comm_hook_kind)0;
    d.params = local->desc.params, d.param_count = local->desc.param_count;
    d.start_step = local->desc.every;
    memcpy(&d.seed, &numbers[0], sizeof d.seed);
    uint64_t key = comm__desc_key(&d), bits;
    memcpy(&bits, &numbers[1], sizeof bits);
    return comm__mix(key ^ bits);
}

static ddp_result comm__local_make(local_sgd **out, ddp_group *group, const local_sgd_desc *desc) {
    local_sgd_desc d = DDP_ZERO;
    size_t total = 0;
    COMM__TRY(comm__local_resolve(group, desc, &d));
    for (int i = 0; i < d.param_count; i++)
        if (comm__is_first(d.params, i)) total += (size_t)ddp_tensor_count(&d.params[i].value);
    int outer = d.outer_lr != 1 || d.outer_momentum > 0, kept = outer + (d.outer_momentum > 0);
    size_t bytes = sizeof(local_sgd) + total * (size_t)kept * sizeof(float);
    local_sgd *local = (local_sgd *)ddp_host_alloc(group, bytes);
    if (!local) return ddp_fail(DDP_ERR_NO_MEMORY, "local_sgd_create: %zu bytes", bytes);
    memset(local, 0, bytes);
    local->group = group;
    local->desc = d;
    local->total = total;
    if (outer) local->old = (float *)(local + 1);
    if (kept == 2) local->speed = local->old + total;
    *out = local;
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_create(local_sgd **out, ddp_group *group, const local_sgd_desc *desc) {
    local_sgd *local = NULL;
    COMM__NEED(group, "local_sgd_create: group is NULL");
    if (out) *out = NULL;
    ddp_result result = out ? comm__local_make(&local, group, desc)
                            : ddp_fail(DDP_ERR_INVALID, "local_sgd_create: out is NULL");
    result = comm__agree(group, "local_sgd_create", result, local ? comm__local_key(local) : 0);
    float *old = local ? local->old : NULL;
    for (int i = 0; result == DDP_OK && i < local->desc.param_count; i++) {
        const ddp_tensor *value = &local->desc.params[i].value;
        size_t count = (size_t)ddp_tensor_count(value);
        if (!comm__is_first(local->desc.params, i)) continue;
        result = ddp_broadcast(group, value->data, count, DDP_F32, 0, NULL);
        if (old) memcpy(old, value->data, count * sizeof *old), old += count;
    }
    if (result == DDP_OK)
        *out = local;
    else
        ddp_host_free(group, local);
    return result;
}

/* w = old - lr (d + momentum v), where d is the average over ranks of old - w, and v = momentum v + d; without a momentum w = old - lr d. */
static ddp_result comm__outer_step(local_sgd *local, float *w, float *old, float *speed, size_t count) {
    float lr = (float)local->desc.outer_lr, momentum = (float)local->desc.outer_momentum;
    for (size_t i = 0; i < count; i++) w[i] = old[i] - w[i];
    COMM__TRY(comm__average(local->group, w, count, DDP_F32, (uint64_t)ddp_world_size(local->group), NULL));
    for (size_t i = 0; i < count; i++) {
        float d = w[i];
        if (speed) speed[i] = momentum * speed[i] + d, d += momentum * speed[i];
        w[i] = old[i] -= lr * d;
    }
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_step(local_sgd *local, int *synced) {
    COMM__NEED(local, "local_sgd_step: local is NULL");
    int now = (local->steps + 1) % (uint64_t)local->desc.every == 0, many = ddp_world_size(local->group) > 1;
    size_t at = 0;
    if (synced) *synced = 0;
    for (int i = 0; now && i < local->desc.param_count; i++) {
        const ddp_tensor *value = &local->desc.params[i].value;
        size_t count = (size_t)ddp_tensor_count(value);
        float *w = (float *)value->data;
        if (!comm__is_first(local->desc.params, i)) continue;
        if (local->old)
            COMM__TRY(
                comm__outer_step(local, w, local->old + at, local->speed ? local->speed + at : NULL, count));
        else if (many)
            COMM__TRY(
                comm__average(local->group, w, count, DDP_F32, (uint64_t)ddp_world_size(local->group), NULL));
        at += count;
    }
    local->steps++;
    local->stats.gradient_bytes += local->total * sizeof(float);
    if (now && many) local->stats.sent_bytes += local->total * sizeof(float);
    if (synced) *synced = now;
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_get_stats(const local_sgd *local, comm_hook_stats *stats) {
    COMM__NEED(local && stats, "local_sgd_get_stats: local or stats is NULL");
    *stats = local->stats;
    return DDP_OK;
}

static size_t comm__local_floats(const local_sgd *local) {
    return local->old ? local->total * (local->speed ? 2 : 1) : 0;
}

COMM_DEF ddp_result local_sgd_save(local_sgd *local, void *memory, size_t *size_bytes) {
    COMM__NEED(local && size_bytes, "local_sgd_save: local or size_bytes is NULL");
    comm__saved header = {COMM__SAVED, 0, comm__local_key(local), comm__local_floats(local), local->steps};
    size_t bytes = (size_t)header.total * sizeof(float), room = *size_bytes;
    *size_bytes = sizeof header + bytes;
    if (!memory) return DDP_OK;
    COMM__NEED(room >= *size_bytes,
               "local_sgd_save: there are %zu bytes, and %zu are needed; ask with memory NULL", room,
               *size_bytes);
    memcpy(memory, &header, sizeof header);
    if (bytes) memcpy((unsigned char *)memory + sizeof header, local->old, bytes);
    return DDP_OK;
}

COMM_DEF ddp_result local_sgd_load(local_sgd *local, const void *state, size_t state_bytes) {
    comm__saved have;
    COMM__NEED(local && state, "local_sgd_load: local or state is NULL");
    if (state_bytes < sizeof have)
        return ddp_fail(DDP_ERR_CORRUPT, "local_sgd_load: the state is cut short; give all that was saved");
    memcpy(&have, state, sizeof have);
    if (have.magic != COMM__SAVED || have.kind != 0)
        return ddp_fail(DDP_ERR_CORRUPT, "local_sgd_load: the state was not written by local_sgd_save");
    COMM__NEED(have.detail == comm__local_key(local), "local_sgd_load: the state is of another desc or other "
                                                      "parameters; create the same, or start without");
    size_t bytes = comm__local_floats(local) * sizeof(float);
    if (state_bytes != sizeof have + bytes)
        return ddp_fail(DDP_ERR_CORRUPT, "local_sgd_load: the state has %zu bytes, not %zu", state_bytes,
                        sizeof have + bytes);
    if (local->old) memcpy(local->old, (const unsigned char *)state + sizeof have, bytes);
    local->steps = have.q_total;
    return DDP_OK;
}

COMM_DEF void local_sgd_destroy(local_sgd *local) {
    if (local) ddp_host_free(local->group, local);
}

#endif /* DDP_EXAMPLE_COMM_HOOKS_H */

/* MIT License: see LICENSE. */

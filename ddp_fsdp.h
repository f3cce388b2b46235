/*  ddp_fsdp.h - sharded training: parameters, gradients and optimizer state split over ranks, with checkpoints that outlive the world size.

    ZeRO-1, ZeRO-2, ZeRO-3 (FSDP) and plain data parallelism through the same calls, each also in a hybrid form; optimizers, learning-rate
    schedules and a loss scaler on plain or sharded tensors; checkpoints in plain safetensors files.

USAGE
    #define DDP_IMPLEMENTATION             in exactly one source file of the program: the bodies of ddp.h and of this header
    #include "ddp_fsdp.h"
    Or DDP_FSDP_IMPLEMENTATION for the bodies of this header alone. Link with -lpthread -lm.

EXAMPLE
    ddp_fsdp_param weight = DDP_ZERO;                      // one tensor of 1024 x 64; its values are made shard by shard
    ddp_fsdp_unit_desc unit = {"layer", &weight, 1};       // a unit is what is gathered at once
    ddp_fsdp_desc desc = DDP_ZERO;                         // zero means default: ZeRO-3, AdamW, f32
    ddp_fsdp *fsdp;
    weight.param.name = "layer.weight";
    weight.param.value.dtype = DDP_F32;
    weight.param.value.ndim = 2;
    weight.param.value.shape[0] = 1024;
    weight.param.value.shape[1] = 64;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.init_fn = fill_rows;
    if (ddp_fsdp_create(&fsdp, world, &desc) != DDP_OK) return puts(ddp_last_error());
    for (int step = 0; step < steps; step++) {
        ddp_fsdp_unit_gather(fsdp, 0);                     // weight.param.value.data and grad.data point to whole tensors now
        forward_and_backward((float *)weight.param.value.data, (float *)weight.param.grad.data);
        ddp_fsdp_unit_reduce(fsdp, 0);
        ddp_fsdp_unit_release(fsdp, 0);
        if (ddp_fsdp_step(fsdp, 1e-3f) != DDP_OK) return puts(ddp_last_error());
    }
    ddp_fsdp_save(fsdp, "checkpoint");
    ddp_fsdp_destroy(fsdp);

CONTENTS      (search for the tags)
    >>types  >>descs  >>api  >>impl-structs  >>impl-error  >>impl-optimizer  >>impl-rates  >>impl-scaler  >>impl-crc  >>impl-json
    >>impl-safetensors  >>impl-checkpoint  >>impl-units

CONCEPTS
    Shard      each parameter of d rows (its first dimension) is cut into W pieces of c = ceil(d / W) rows: rank r keeps rows [rc, (r+1)c),
               the last ranks fewer, or none. Rows are never split.
    Unit       the parameters that are gathered, released and reduced together, such as a transformer block. Parameters that belong to no
               block form a root unit, which stays gathered longer. A unit inside another one is a unit of its own.
    Gather     brings the whole parameters of a unit to every rank: param.value.data points to them until the release.
    Reduce     adds the whole gradients of a unit over ranks and leaves each rank its rows of the sum.

                   rank 0   rank 1      gather      rank 0 and 1     backward    rank 0    rank 1      reduce    rank 0    rank 1
        weight    |rows 0-1|rows 2-3|  ------->    |rows 0 1 2 3|  --------->   |grad 0-3||grad 0-3|  ------->  |sum 0-1| |sum 2-3|

    Strategy   what is split, and what each rank keeps whole. P parameters, f32 and AdamW, W ranks, bytes per rank:
                   NO_SHARD      values, gradients, moments whole: plain data parallelism     16 P
                   SHARD_OPTIM   ZeRO-1: moments split                                        8 P +  8 P / W
                   SHARD_GRAD    ZeRO-2: gradients too                                        4 P + 12 P / W
                   FULL_SHARD    ZeRO-3: values too                                           16 P / W
    Hybrid     split inside one group, replicated across another (HSDP): the ranks that hold the same shard form `replicas`.
    Master     the f32 values that the optimizer updates. With param_dtype = DDP_BF16 what is gathered is a 16-bit copy of them.
    Micro-batch  SHARD_GRAD and FULL_SHARD add over ranks after every micro-batch, then over micro-batches, pairwise like a binary counter;
               the others add over micro-batches first. In both ways the sum is the tree over the micro-batches of the step, where rank
               r's micro-batch k is number kW + r in the first way (W a power of two), and a block of 2^k per rank is given in the second.
               So W ranks under any strategy end with the bits of one.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). A mistake in a desc names the unit and the parameter. What fails while ranks
    communicate poisons the group, on every rank.

CONFIG MACROS (define before including)
    DDP_FSDP_IMPLEMENTATION   also compile the bodies of this header, here. DDP_IMPLEMENTATION does so too

NOT DONE HERE
    No autograd: the caller runs forward and backward, unit by unit. No model parts: see ddp_tensor.h for tensor parallelism.
*/
#ifndef DDP_FSDP_H
#define DDP_FSDP_H

#include "ddp.h"

#ifdef __cplusplus
extern "C" {
#endif

//== types ================================================================================================ >>types

typedef struct ddp_fsdp ddp_fsdp;
typedef struct ddp_optimizer ddp_optimizer;

typedef enum ddp_fsdp_strategy {
    DDP_FSDP_FULL_SHARD = 0, /* ZeRO-3: values, gradients and optimizer state are split (Rajbhandari et al. 2020; FSDP, Zhao et al. 2023) */
    DDP_FSDP_SHARD_GRAD,     /* ZeRO-2: values stay whole between steps */
    DDP_FSDP_SHARD_OPTIM,    /* ZeRO-1: gradients stay whole too, until the step's last micro-batch */
    DDP_FSDP_NO_SHARD        /* everything whole on every rank */
} ddp_fsdp_strategy;

typedef enum ddp_fsdp_offload {
    DDP_FSDP_OFFLOAD_NONE = 0,
    DDP_FSDP_OFFLOAD_HOST,   /* optimizer state and master copy lie in host memory; for devices that have their own */
    DDP_FSDP_OFFLOAD_FILE    /* they lie in a file in offload_dir, mapped: a model larger than memory still steps */
} ddp_fsdp_offload;

typedef enum ddp_optimizer_kind {
    DDP_OPTIMIZER_ADAMW = 0, /* Loshchilov and Hutter 2019; eps is added after the bias correction, as PyTorch does */
    DDP_OPTIMIZER_SGD,       /* with momentum, dampening and nesterov as PyTorch defines them */
    DDP_OPTIMIZER_LAMB,      /* You et al. 2020: AdamW's update, scaled per tensor by |w| / |update| */
    DDP_OPTIMIZER_LARS       /* You et al. 2017: momentum whose rate is scaled per tensor by |w| / (|g| + weight_decay |w|) */
} ddp_optimizer_kind;

typedef enum ddp_lr_kind {
    DDP_LR_CONSTANT = 0, DDP_LR_COSINE, DDP_LR_LINEAR, DDP_LR_POLYNOMIAL,
    DDP_LR_WSD               /* warm-up, stable, decay: constant until the last decay_steps, then linear (Hu et al. 2024) */
} ddp_lr_kind;

//== descs ================================================================================================ >>descs

/* A parameter of a unit. param.value: dtype (floats) and shape are required; data holds the first values, on every rank the whole tensor, and is read in
   ddp_fsdp_create alone; NULL with init_fn. From then on value.data and grad.data are set by gather and release. ndim 0 counts as one row. */
typedef struct ddp_fsdp_param {
    ddp_param param;
    int64_t global_shape[DDP_MAX_NDIM];  /* all zero = param.value's: this is a slice of a tensor of that shape, which is what a checkpoint holds, ... */
    int64_t global_offset[DDP_MAX_NDIM]; /* ... starting there */
    const char *tied_to; /* name of the earlier parameter whose value this one shares; needed when they are in different units, or without data */
    int frozen;          /* 1 = not trained: no gradient, no optimizer state */
    int index;           /* set by ddp_fsdp_wrap: the parameter's place in its list */
} ddp_fsdp_param;

typedef struct ddp_fsdp_unit_desc {
    const char *name;        /* appears in errors; NULL = "unit 3" and its like */
    ddp_fsdp_param *params;  /* required; the caller's, must outlive the ddp_fsdp */
    int param_count;         /* at least 1 */
} ddp_fsdp_unit_desc;

typedef struct ddp_fsdp_wrap_desc {
    const char *const *prefixes; /* one unit for each different match. "*" stands for one part of a name: "h.*" makes units "h.0", "h.1", ... from
                                    "h.0.fc.weight" and its like. The longest match wins, so units nest. What matches nothing is in the unit "root" */
    int prefix_count;
    size_t min_unit_bytes;       /* without prefixes: parameters in their order, a unit is full once it has so many bytes; 0 = 25 MiB */
    ddp_fsdp_param *storage;     /* required; param_count entries, where the units' params will lie */
} ddp_fsdp_wrap_desc;

typedef struct ddp_optimizer_desc {
    ddp_optimizer_kind kind;
    float beta1, beta2, eps;     /* ADAMW, LAMB: 0 = 0.9, 0.999, 1e-8 (LAMB 1e-6); a beta of -1 is 0 */
    float momentum, dampening;   /* SGD, LARS: 0 = none (LARS 0.9; -1 = none) */
    int nesterov;                /* SGD */
    float trust_coefficient;     /* LARS: 0 = 0.001. LAMB: 0 = 1 */
    float weight_decay;          /* 0 = none. ADAMW, LAMB decoupled; SGD, LARS added to the gradient */
    int decay_matrices_only;     /* 1 = tensors of fewer than two dimensions (biases, norms) are not decayed, nor scaled by a trust ratio */
    ddp_param *params;           /* ddp_optimizer_create alone, as is all that follows: values and gradients, f32 or f64. Entries with the same value.data
                                    are uses of one parameter: their gradients are added into the first before the step */
    int param_count;
    ddp_group *shard_group;      /* NULL = tensors are whole; otherwise each is this rank's rows, and LAMB and LARS take norms over this group */
    void *(*state_alloc_fn)(size_t size_bytes, void *user); /* NULL = the device's memory of the group; zeroed; set both or neither */
    void (*state_free_fn)(void *memory, void *user);
    void *state_user;
} ddp_optimizer_desc;

typedef struct ddp_lr_desc {
    ddp_lr_kind kind;
    float peak;              /* required; the highest rate */
    float floor;             /* the rate at the end; 0 = 0 */
    int64_t warmup_steps;    /* linear from 0: step s of them has peak * s / warmup_steps */
    int64_t total_steps;     /* required but for DDP_LR_CONSTANT */
    int64_t decay_steps;     /* WSD: 0 = a tenth of total_steps */
    float power;             /* POLYNOMIAL: 0 = 1 */
} ddp_lr_desc;

typedef struct ddp_scaler_desc {
    float init_scale;        /* 0 = 65536 */
    float growth_factor;     /* 0 = 2 */
    float backoff_factor;    /* 0 = 0.5 */
    int growth_interval;     /* 0 = 2000 */
    ddp_group *groups[4];    /* every group that splits or replicates the gradients; ddp_fsdp adds its own */
    int group_count;
} ddp_scaler_desc;

/* Plain numbers without padding bytes: may be written to a file as it is. */
typedef struct ddp_scaler_state { double scale; int64_t growth_tracker; } ddp_scaler_state;

/* Loss scaling for f16 gradients, as PyTorch's GradScaler: the caller's own, made by ddp_scaler_init. The fields are private. */
typedef struct ddp_scaler {
    ddp_scaler_desc desc;    /* with every default resolved */
    float scale;
    int growth_tracker;
    int unscaled;            /* since the last update */
    int found_inf;           /* on some rank of some group */
} ddp_scaler;

/* What a checkpoint keeps beside tensors: the caller's own numbers. Without padding bytes. */
typedef struct ddp_fsdp_state {
    int64_t step;            /* set by ddp_fsdp_step: optimizer steps taken */
    ddp_sampler_state sampler;
    ddp_scaler_state scaler; /* set from desc.scaler by ddp_fsdp_save */
    uint64_t rng[4];
    double user[8];
} ddp_fsdp_state;

typedef struct ddp_fsdp_desc {
    ddp_fsdp_unit_desc *units;     /* required; copied, their params are not */
    int unit_count;
    ddp_fsdp_strategy strategy;    /* 0 = FULL_SHARD */
    ddp_group *replicas;           /* hybrid: the ranks that hold the same shard. While ddp_fsdp lives, only it issues calls there between the first
                                      ddp_fsdp_unit_reduce of a step and the end of ddp_fsdp_step. NULL = none */
    ddp_dtype param_dtype;         /* what is gathered: 0 = as the parameter. DDP_BF16, DDP_F16: the master copy is f32 */
    ddp_dtype reduce_dtype;        /* what gradients are added in: 0 = as the gradient. Gradients are of param_dtype, unless param.grad.dtype says otherwise */
    int micro_batch_count;         /* 0 = 1; per rank and step: ddp_fsdp_unit_reduce comes so often for each unit */
    int plain_accumulation;        /* 1 = micro-batches are added one after the other, in one buffer: outside the promise of equal bits */
    int prefetch;                  /* 0 = 1; units gathered ahead, in the order that the first step had; -1 = none */
    size_t max_gathered_bytes;     /* 0 = no limit; no unit is gathered ahead beyond it */
    int keep_after_forward;        /* FULL_SHARD: 1 = a unit whose gradients have not been reduced yet stays gathered through its release */
    int overwrite_gradients;       /* 1 = every backward writes all gradients of a unit; otherwise gradient memory is cleared for it */
    int quantize_gather;           /* FULL_SHARD: 1 = parameters travel in 8 bits, in blocks of 256 with a scale (ZeRO++ qwZ, Wang et al. 2023). A value is off by
                                      at most 1/254 of the largest magnitude in its block, alike on every rank; master values stay exact. CPU memory alone */
    ddp_fsdp_offload offload;
    const char *offload_dir;       /* OFFLOAD_FILE: NULL = "."; the file has no name, nothing stays behind */
    ddp_optimizer_desc optimizer;  /* zero = AdamW; its params, shard_group and allocators are not read */
    ddp_scaler *scaler;            /* NULL = none; outlives the ddp_fsdp. clip_grad_norm and step then unscale, and a step with an infinity changes no value */
    /* Fills rows [first_row, first_row + row_count) of a parameter, in its dtype (param.value.dtype, or f32 where that is a 16-bit one): only this rank's rows */
    ddp_result (*init_fn)(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out, void *user);
    void *init_user;
    int skip_initial_broadcast;    /* 1 = first values are equal on all ranks already; otherwise rank 0's are taken (of the replicas' rank 0) */
    ddp_fsdp_state *state;         /* NULL = none; saved with the checkpoint and filled in by ddp_fsdp_load */
    size_t max_file_bytes;         /* of a checkpoint's files; 0 = 4 GiB; a larger tensor has a file of its own */
    int keep_checkpoints;          /* 0 = 1; older ones are dir.1, dir.2, ... */
    int save_in_background;        /* 1 = ddp_fsdp_save returns once a copy is made, a thread writes it; see ddp_fsdp_save_wait */
} ddp_fsdp_desc;

/* Bytes by purpose, as asked for from the group's allocator and from group memory. */
typedef struct ddp_fsdp_bytes {
    size_t shards;        /* values that stay between steps: master copies, 16-bit shards, whole values where the strategy keeps them */
    size_t gathered;      /* whole values that gather brings and release frees */
    size_t gradients;     /* whole gradients, their shards, and what pairwise accumulation keeps */
    size_t optimizer;     /* moments */
    size_t communication; /* staging where ranks cannot read each other's memory, 8-bit copies, a checkpoint's copy */
    size_t bookkeeping;   /* tables */
    size_t total;
} ddp_fsdp_bytes;

typedef struct ddp_fsdp_memory {
    ddp_fsdp_bytes now;
    ddp_fsdp_bytes peak;      /* each purpose at its own highest; total: the highest sum */
    ddp_fsdp_bytes predicted; /* from the formulas: what the peak should be, without bookkeeping */
} ddp_fsdp_memory;

//== api ==================================================================================================== >>api

/* --- sharded training --- */

/* Splits the units' parameters over the group. Collective; the same desc on every rank, but for data and callbacks. The shards are this object's.
   No rank ever holds more than one parameter's rows beside its shards when init_fn makes the values. Parameters with the same value.data are uses of one: one
   shard, a gradient for each use, added after the reduction.
   Errors: DDP_ERR_INVALID names unit and parameter (a dtype that is not a float, the same memory in two units without tied_to, no values and no init_fn);
   DDP_ERR_MISMATCH on every rank when ranks describe different units; DDP_ERR_NO_MEMORY; DDP_ERR_SYSTEM (offload_dir). *out is NULL on failure. */
DDPDEF ddp_result ddp_fsdp_create(ddp_fsdp **out, ddp_group *group, const ddp_fsdp_desc *desc);

/* Whole parameters of the unit are there: value.data and grad.data of its params point to them, in param_dtype and the gradient's dtype, until release. Gradients are
   zero, unless overwrite_gradients. Collective where something has to be sent; a unit that is there is not sent again. The next units of the recorded order are on
   their way when it returns. Call it before forward and again before backward, or a recomputation. */
DDPDEF ddp_result ddp_fsdp_unit_gather(ddp_fsdp *fsdp, int unit);

/* This rank is done with the unit's parameters for now; FULL_SHARD frees them, value.data is NULL then. Gradients that have not been given to
   ddp_fsdp_unit_reduce are dropped. Never blocks. */
DDPDEF ddp_result ddp_fsdp_unit_release(ddp_fsdp *fsdp, int unit);

/* Whole gradients of the unit are final for this micro-batch: adding them over ranks starts. Collective, does not block; grad.data is this object's from here on.
   Call it with the unit gathered. More often than micro_batch_count in one step is DDP_ERR_INVALID. */
DDPDEF ddp_result ddp_fsdp_unit_reduce(ddp_fsdp *fsdp, int unit);

/* on = 1: forward alone. Gathers bring no gradients and releases free, whatever keep_after_forward says; the order of gathers is not recorded. */
DDPDEF ddp_result ddp_fsdp_no_grad(ddp_fsdp *fsdp, int on);

/* Scales all gradients by max_norm / norm when the global norm exceeds max_norm. *norm (may be NULL) is the norm before. Collective; after the last unit's last
   reduce, before the step, which it waits for. Squares add per row in a fixed order and rows add exactly, so that the bits are those of any other sharding, and each
   element counts once. A norm that is not finite scales nothing. DDP_ERR_INVALID names a unit that has not been reduced. */
DDPDEF ddp_result ddp_fsdp_clip_grad_norm(ddp_fsdp *fsdp, float max_norm, float *norm);

/* Waits for the reductions, divides the sums once by ranks and micro-batches, and updates this rank's shards. Collective. Gathered parameters are out of date from here
   on. DDP_ERR_INVALID names a unit that has not been reduced micro_batch_count times; DDP_ERR_MISMATCH when ranks gathered or reduced in different orders. */
DDPDEF ddp_result ddp_fsdp_step(ddp_fsdp *fsdp, float lr);

/* Forgets the gradients of the step so far, on all ranks: to start a step anew. Collective. */
DDPDEF ddp_result ddp_fsdp_drop_gradients(ddp_fsdp *fsdp);

/* This rank's rows of a parameter: its master values and, between the last reduce and the step, their gradients (sums, not divided yet). Any of the three may be
   NULL. data is NULL where there are no rows. Not collective; waits for this rank's reductions when grad is asked for. */
DDPDEF ddp_result ddp_fsdp_get_shard(ddp_fsdp *fsdp, int unit, int param, ddp_tensor *value, ddp_tensor *grad, int64_t *first_row);

/* Writes a checkpoint to the folder dir: model-00001-of-0000N.safetensors with whole tensors in master precision under their names, model.safetensors.index.json,
   optimizer-*.safetensors with the moments, state.json. Collective. Written beside, synced and renamed: dir always is a whole checkpoint, old or new.
   Errors: DDP_ERR_SYSTEM on every rank, and what was there is untouched. */
DDPDEF ddp_result ddp_fsdp_save(ddp_fsdp *fsdp, const char *dir);

/* save_in_background: blocks until the last save is on disk, and returns its result. Collective. Otherwise DDP_OK at once. */
DDPDEF ddp_result ddp_fsdp_save_wait(ddp_fsdp *fsdp);

/* Reads this rank's part of a checkpoint that was written on any world size, strategy, wrapping and param_dtype. Collective, between steps. Errors on every rank, with
   the model as it was: DDP_ERR_CORRUPT (truncated, overlapping, checksum) and DDP_ERR_MISMATCH (missing, extra, other dtype or shape) name file, tensor and
   byte range; DDP_ERR_SYSTEM. */
DDPDEF ddp_result ddp_fsdp_load(ddp_fsdp *fsdp, const char *dir);

DDPDEF ddp_result ddp_fsdp_get_memory(const ddp_fsdp *fsdp, ddp_fsdp_memory *memory);

/* Waits for what is under way and frees everything. Collective. NULL is ignored. */
DDPDEF void ddp_fsdp_destroy(ddp_fsdp *fsdp);

/* Groups parameters into units, in the order of each unit's first parameter. Returns the number of units, out[0] to out[cap - 1] are filled in; a negative
   ddp_result on failure: DDP_ERR_INVALID (more than cap units: says how many; a prefix that matches nothing; two parameters of one name). Not collective. */
DDPDEF int ddp_fsdp_wrap(const ddp_param *params, int param_count, const ddp_fsdp_wrap_desc *desc, ddp_fsdp_unit_desc *out, int cap);

/* --- optimizers --- */

/* An optimizer over tensors of the caller's: whole, or this rank's rows. group says where memory lives and comes from. Not collective. The params array and its
   tensors must outlive it. DDP_ERR_INVALID names the parameter (a dtype that is not f32 or f64, no gradient) or the field. */
DDPDEF ddp_result ddp_optimizer_create(ddp_optimizer **out, ddp_group *group, const ddp_optimizer_desc *desc);

/* One update of every value from its gradient. Collective over shard_group where the kind takes norms, otherwise not. Elements are computed alike wherever they lie in a
   shard, so the bits do not depend on the sharding. */
DDPDEF ddp_result ddp_optimizer_step(ddp_optimizer *optimizer, float lr);

/* State number `which` of a parameter, as a tensor of the value's shape, and its name in checkpoints ("exp_avg", "exp_avg_sq", "momentum_buffer").
   DDP_ERR_INVALID when there is none. */
DDPDEF ddp_result ddp_optimizer_get_state(ddp_optimizer *optimizer, int param, int which, const char **name, ddp_tensor *state);

/* Steps taken, which the bias correction counts; to set after a load. */
DDPDEF int64_t ddp_optimizer_get_step(const ddp_optimizer *optimizer);
DDPDEF void ddp_optimizer_set_step(ddp_optimizer *optimizer, int64_t step);

DDPDEF void ddp_optimizer_destroy(ddp_optimizer *optimizer);

/* The learning rate of step `step`, counted from 1. After total_steps it stays at the floor. A pure function; 0 for a desc that ddp_lr_check refuses. */
DDPDEF float ddp_lr_at(const ddp_lr_desc *desc, int64_t step);
DDPDEF ddp_result ddp_lr_check(const ddp_lr_desc *desc);

/* --- loss scaling --- */

/* DDP_ERR_INVALID names the field. */
DDPDEF ddp_result ddp_scaler_init(ddp_scaler *scaler, const ddp_scaler_desc *desc);

/* What the loss is multiplied by before backward. */
DDPDEF float ddp_scaler_scale(const ddp_scaler *scaler);

/* Multiplies gradients by the inverse scale and finds out whether any of them, on any rank of the groups, is not finite. Collective. group: whose memory it is.
   Once per update: again is DDP_ERR_INVALID. */
DDPDEF ddp_result ddp_scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients, int gradient_count);

/* 1 when the gradients of this update are not finite somewhere: leave the step out. */
DDPDEF int ddp_scaler_found_inf(const ddp_scaler *scaler);

/* Ends a step: the scale backs off after an infinity, and grows after growth_interval steps without one. DDP_ERR_INVALID before an unscale. */
DDPDEF ddp_result ddp_scaler_update(ddp_scaler *scaler);

DDPDEF void ddp_scaler_save(const ddp_scaler *scaler, ddp_scaler_state *state);
DDPDEF ddp_result ddp_scaler_load(ddp_scaler *scaler, const ddp_scaler_state *state); /* DDP_ERR_CORRUPT when the state is not one of ddp_scaler_save */

#ifdef __cplusplus
}
#endif
#endif /* DDP_FSDP_H */

#if (defined(DDP_IMPLEMENTATION) || defined(DDP_FSDP_IMPLEMENTATION)) && !defined(DDP_FSDP_IMPLEMENTATION_INCLUDED)
#define DDP_FSDP_IMPLEMENTATION_INCLUDED

//== structs ======================================================================================== >>impl-structs
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

//== errors ============================================================================================ >>impl-error

/* Leaves the function with a failure of call. */
#define DDP__FSDP_TRY(call) do { ddp_result ddp__tried = (call); if (ddp__tried != DDP_OK) return ddp__tried; } while (0)

/* An argument of the public function `who` is wrong. group may be NULL. */
static __attribute__((format(printf, 3, 4))) ddp_result ddp__fsdp_bad(const char *who, const ddp_group *group, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!group) return ddp_fail(DDP_ERR_INVALID, "%s: %s", who, text);
    return ddp_fail(DDP_ERR_INVALID, "rank %d/%d %s group=%s: %s", ddp_rank(group), ddp_world_size(group), who, ddp_group_name(group), text);
}

/* Leave the public function unless the condition holds; what follows it is what to tell. */
#define DDP__FSDP_NEED(condition, ...) do { if (!(condition)) return ddp__fsdp_bad(__func__, NULL, __VA_ARGS__); } while (0)

//== optimizers ==================================================================================== >>impl-optimizer
//== learning rates ==================================================================================== >>impl-rates
//== loss scaling ===================================================================================== >>impl-scaler
//== checksums =========================================================================================== >>impl-crc
//== JSON =============================================================================================== >>impl-json
//== tensor files ================================================================================ >>impl-safetensors
//== checkpoints ================================================================================== >>impl-checkpoint
//== units ============================================================================================= >>impl-units

#endif /* DDP_IMPLEMENTATION or DDP_FSDP_IMPLEMENTATION */

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

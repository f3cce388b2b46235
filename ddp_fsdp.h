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
    DDP_OPTIMIZER_LAMB,      /* You et al. 2020: AdamW's update with its bias correction, scaled per tensor by |w| / |update|, as NVIDIA's Apex with use_nvlamb */
    DDP_OPTIMIZER_LARS       /* You et al. 2017: momentum of lr (g + weight_decay w), scaled per tensor by |w| / (|g| + weight_decay |w|); no length: by 1 */
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
    void *(*state_alloc_fn)(size_t size_bytes, void *user); /* NULL = the device's memory of the group. Called once, gives zeros; set both or neither */
    void (*state_free_fn)(void *memory, void *user);
    void *state_user;
} ddp_optimizer_desc;

typedef struct ddp_lr_desc {
    ddp_lr_kind kind;
    double peak;             /* required; the highest rate */
    double floor;            /* the rate at the end; 0 = 0 */
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
   tensors must outlive it; grad.data may change between steps. DDP_ERR_INVALID names the parameter (a dtype that is not f32 or f64, no gradient) or the field. */
DDPDEF ddp_result ddp_optimizer_create(ddp_optimizer **out, ddp_group *group, const ddp_optimizer_desc *desc);

/* One update of every value from its gradient. Collective over shard_group where the kind takes norms, otherwise not. Elements are computed alike wherever they lie in a
   shard, so the bits do not depend on the sharding. Gradients of tied entries end up added in the first; LAMB leaves its update in place of the gradient. */
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

/* DDP_ERR_INVALID names the field. */
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
#if defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#define DDP__UPDATE_BYTES 32 /* of a vector; wider ones gain nothing */
#else
#define DDP__UPDATE_BYTES 16
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#endif

/* The bits of an update depend on nothing but its inputs: not on where an element lies, on the compiler, or on its options. Each operation is rounded on its
   own, so vectors, the last short piece, and a GPU come to the same. What could break that is a product fused with the addition that follows, which
   compilers do unasked where the CPU can: a product passes through a register whose contents they cannot follow. */
#if defined(__SSE2__)
#define DDP__ROUNDED(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define DDP__ROUNDED(x) __asm__("" : "+w"(x))
#else
#define DDP__ROUNDED(x) __asm__("" : "+m"(x))
#endif
#define DDP__UPDATE_INLINE static inline __attribute__((always_inline))

/* Loads and stores take any alignment; `left` elements are there. */
#define DDP__UPDATE_VECTOR(real, suffix)                                                                                           \
    typedef real ddp__vector_##suffix __attribute__((vector_size(DDP__UPDATE_BYTES)));                                                            \
    typedef struct ddp__factors_##suffix {                                                                                         \
        real *w, *g, *m, *v;                                                                                                       \
        real rate, beta1, rest1, beta2, rest2, root, eps, keep, decay, scale;                                                      \
        int first, nesterov, lamb;                                                                                                 \
    } ddp__factors_##suffix;                                                                                                       \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__get_##suffix(const real *at, size_t left) {                                       \
        ddp__vector_##suffix x = {0};                                                                                              \
        memcpy(&x, at, left * sizeof(real));                                                                                       \
        return x;                                                                                                                  \
    }                                                                                                                              \
    DDP__UPDATE_INLINE void ddp__put_##suffix(real *at, ddp__vector_##suffix x, size_t left) { memcpy(at, &x, left * sizeof(real)); } \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__square_##suffix(ddp__vector_##suffix x) { x = x * x; DDP__ROUNDED(x); return x; } \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__times_##suffix(real factor, ddp__vector_##suffix x) {                             \
        x = factor * x;                                                                                                            \
        DDP__ROUNDED(x);                                                                                                           \
        return x;                                                                                                                  \
    }
DDP__UPDATE_VECTOR(float, f32)
DDP__UPDATE_VECTOR(double, f64)
#undef DDP__UPDATE_VECTOR

DDP__UPDATE_INLINE ddp__vector_f32 ddp__root_f32(ddp__vector_f32 x) {
#if DDP__UPDATE_BYTES == 32
    return (ddp__vector_f32)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (ddp__vector_f32)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < 4; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

DDP__UPDATE_INLINE ddp__vector_f64 ddp__root_f64(ddp__vector_f64 x) {
#if DDP__UPDATE_BYTES == 32
    return (ddp__vector_f64)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
    return (ddp__vector_f64)_mm_sqrt_pd((__m128d)x);
#else
    for (int i = 0; i < 2; i++) x[i] = sqrt(x[i]);
    return x;
#endif
}

/* struct ddp_update has the formulas. A function for ADAMW and LAMB, one for SGD, and the loop over both. */
#define DDP__UPDATE_FNS(real, suffix)                                                                                              \
    DDP__UPDATE_INLINE void ddp__update_adam_##suffix(const ddp__factors_##suffix *f, size_t at, size_t left) {                    \
        ddp__vector_##suffix g = ddp__get_##suffix(f->g + at, left), w = ddp__get_##suffix(f->w + at, left), d;                    \
        ddp__vector_##suffix m = ddp__times_##suffix(f->beta1, ddp__get_##suffix(f->m + at, left)) + ddp__times_##suffix(f->rest1, g); \
        ddp__vector_##suffix v = ddp__times_##suffix(f->beta2, ddp__get_##suffix(f->v + at, left)) +                               \
                                 ddp__times_##suffix(f->rest2, ddp__square_##suffix(g));                                           \
        d = ddp__times_##suffix(f->rate, m) / (ddp__times_##suffix(f->root, ddp__root_##suffix(v)) + f->eps);                      \
        if (!f->lamb) ddp__put_##suffix(f->w + at, ddp__times_##suffix(f->keep, w) - d, left);                                     \
        else ddp__put_##suffix(f->g + at, f->decay != 0 ? d + ddp__times_##suffix(f->decay, w) : d, left);                         \
        ddp__put_##suffix(f->m + at, m, left);                                                                                     \
        ddp__put_##suffix(f->v + at, v, left);                                                                                     \
    }                                                                                                                              \
    DDP__UPDATE_INLINE void ddp__update_sgd_##suffix(const ddp__factors_##suffix *f, size_t at, size_t left) {                     \
        ddp__vector_##suffix w = ddp__get_##suffix(f->w + at, left), d = ddp__get_##suffix(f->g + at, left), m;                    \
        if (f->decay != 0) d = d + ddp__times_##suffix(f->decay, w);                                                               \
        d = ddp__times_##suffix(f->scale, d);                                                                                      \
        if (f->m) {                                                                                                                \
            m = f->first ? d : ddp__times_##suffix(f->beta1, ddp__get_##suffix(f->m + at, left)) + ddp__times_##suffix(f->rest1, d); \
            d = f->nesterov ? d + ddp__times_##suffix(f->beta1, m) : m;                                                            \
            ddp__put_##suffix(f->m + at, m, left);                                                                                 \
        }                                                                                                                          \
        ddp__put_##suffix(f->w + at, w - ddp__times_##suffix(f->rate, d), left);                                                   \
    }                                                                                                                              \
    static void ddp__update_##suffix(const ddp_update *u) {                                                                        \
        ddp__factors_##suffix f = {(real *)u->value, (real *)u->grad, (real *)u->state0, (real *)u->state1, (real)u->rate,         \
                                   (real)u->beta1, (real)u->rest1, (real)u->beta2, (real)u->rest2, (real)u->root, (real)u->eps,    \
                                   (real)u->keep, (real)u->decay, (real)u->scale, u->first, u->nesterov, u->kind == DDP_UPDATE_LAMB}; \
        size_t lanes = DDP__UPDATE_BYTES / sizeof(real), whole = u->count / lanes * lanes, rest = u->count - whole;                               \
        if (u->kind == DDP_UPDATE_SGD) {                                                                                           \
            for (size_t i = 0; i < whole; i += lanes) ddp__update_sgd_##suffix(&f, i, lanes);                                      \
            if (rest) ddp__update_sgd_##suffix(&f, whole, rest);                                                                   \
        } else {                                                                                                                   \
            for (size_t i = 0; i < whole; i += lanes) ddp__update_adam_##suffix(&f, i, lanes);                                     \
            if (rest) ddp__update_adam_##suffix(&f, whole, rest);                                                                  \
        }                                                                                                                          \
    }
DDP__UPDATE_FNS(float, f32)
DDP__UPDATE_FNS(double, f64)
#undef DDP__UPDATE_FNS

/* A parameter, or a later use of one. */
typedef struct ddp__optimizer_param {
    int first_use;  /* the entry of the same value that is stepped; its own number where there is none earlier */
    int squares;    /* the sums of squares of its value and of its gradient are numbers squares and squares + 1; -1 = it has no trust ratio */
    size_t count, rows;
    void *state[2]; /* NULL where there is none */
} ddp__optimizer_param;

struct ddp_optimizer {
    ddp_optimizer_desc desc;      /* with every default resolved */
    ddp_group *group;
    const ddp_device *device;     /* of group: values, gradients and squares are its memory */
    const ddp_device *wire;       /* of shard_group */
    ddp__optimizer_param *params;
    int state_count;              /* tensors of state of each parameter */
    int square_count;             /* the same on all ranks of shard_group, whichever rows they have */
    int64_t step;
    void *state;                  /* one allocation */
    ddp_exact_sum *squares;       /* on the device */
    ddp_exact_sum *sent;          /* those that travel: on the device of shard_group; squares where that is the same one */
    ddp_exact_sum *sums;          /* what came of them, in host memory */
};

static const char *const ddp__optimizer_states[][2] = {{"exp_avg", "exp_avg_sq"}, {"momentum_buffer", NULL}, {"exp_avg", "exp_avg_sq"},
                                                       {"momentum_buffer", NULL}}; /* by kind */

#define DDP__OPTIMIZER_NEED(condition, ...) do { if (!(condition)) return ddp__fsdp_bad("ddp_optimizer_create", group, __VA_ARGS__); } while (0)

static int ddp__optimizer_is_adam(const ddp_optimizer_desc *desc) { return desc->kind == DDP_OPTIMIZER_ADAMW || desc->kind == DDP_OPTIMIZER_LAMB; }
static int ddp__optimizer_has_trust(const ddp_optimizer_desc *desc) { return desc->kind == DDP_OPTIMIZER_LAMB || desc->kind == DDP_OPTIMIZER_LARS; }

/* 0 to 3.4e38: neither a NaN nor an infinity. */
static int ddp__is_amount(double x) { return x >= 0 && x <= 3.4028234663852886e38; }

/* Defaults and ranges of what is not a parameter. Fields of other kinds are not looked at. */
static ddp_result ddp__optimizer_resolve(ddp_group *group, ddp_optimizer_desc *d) {
    int lars = d->kind == DDP_OPTIMIZER_LARS;
    DDP__OPTIMIZER_NEED((unsigned)d->kind <= DDP_OPTIMIZER_LARS, "kind=%d is not one of ddp_optimizer_kind", (int)d->kind);
    d->beta1 = d->beta1 == 0 ? 0.9f : d->beta1 == -1 ? 0 : d->beta1;
    d->beta2 = d->beta2 == 0 ? 0.999f : d->beta2 == -1 ? 0 : d->beta2;
    if (d->eps == 0) d->eps = d->kind == DDP_OPTIMIZER_LAMB ? 1e-6f : 1e-8f;
    d->momentum = d->momentum == -1 ? 0 : lars && d->momentum == 0 ? 0.9f : d->momentum;
    if (d->trust_coefficient == 0) d->trust_coefficient = lars ? 0.001f : 1.0f;
    if (ddp__optimizer_is_adam(d)) {
        DDP__OPTIMIZER_NEED(d->beta1 >= 0 && d->beta1 < 1, "beta1=%g; pass a number from 0 (as -1) to below 1", (double)d->beta1);
        DDP__OPTIMIZER_NEED(d->beta2 >= 0 && d->beta2 < 1, "beta2=%g; pass a number from 0 (as -1) to below 1", (double)d->beta2);
        DDP__OPTIMIZER_NEED(ddp__is_amount(d->eps), "eps=%g; pass a positive number", (double)d->eps);
    } else {
        DDP__OPTIMIZER_NEED(ddp__is_amount(d->momentum), "momentum=%g; pass 0 or more", (double)d->momentum);
        DDP__OPTIMIZER_NEED(ddp__is_amount(d->dampening), "dampening=%g; pass 0 or more", (double)d->dampening);
        DDP__OPTIMIZER_NEED(!d->nesterov || lars || (d->momentum > 0 && d->dampening == 0), "nesterov with momentum=%g and dampening=%g; it needs momentum and no dampening",
                            (double)d->momentum, (double)d->dampening);
    }
    DDP__OPTIMIZER_NEED(!ddp__optimizer_has_trust(d) || ddp__is_amount(d->trust_coefficient), "trust_coefficient=%g; pass a positive number", (double)d->trust_coefficient);
    DDP__OPTIMIZER_NEED(ddp__is_amount(d->weight_decay), "weight_decay=%g; pass 0 or more", (double)d->weight_decay);
    DDP__OPTIMIZER_NEED(d->params && d->param_count > 0, "param_count=%d or params is NULL; pass the array of parameters to update", d->param_count);
    DDP__OPTIMIZER_NEED(!d->state_alloc_fn == !d->state_free_fn, "set both state_alloc_fn and state_free_fn, or neither");
    return DDP_OK;
}

/* Looks at parameter i, and finds earlier uses of its value: rows that are not there are the same memory by accident. */
static ddp_result ddp__optimizer_take(ddp_optimizer *o, int i) {
    ddp_group *group = o->group;
    const ddp_param *param = &o->desc.params[i];
    ddp__optimizer_param *p = &o->params[i];
    const char *name = param->name ? param->name : "";
    int64_t count = ddp_tensor_count(&param->value);
    DDP__OPTIMIZER_NEED(param->value.dtype == DDP_F32 || param->value.dtype == DDP_F64, "params[%d] \"%s\" is %s; only f32 and f64 are updated", i, name,
                        ddp_dtype_name(param->value.dtype));
    DDP__OPTIMIZER_NEED(count >= 0, "params[%d] \"%s\": value.ndim=%d or its shape is wrong", i, name, param->value.ndim);
    DDP__OPTIMIZER_NEED(!count || param->value.data, "params[%d] \"%s\": value.data is NULL", i, name);
    DDP__OPTIMIZER_NEED(!count || param->grad.data, "params[%d] \"%s\" has no gradient: grad.data is NULL", i, name);
    DDP__OPTIMIZER_NEED(!param->grad.dtype || param->grad.dtype == param->value.dtype, "params[%d] \"%s\" is %s, but its gradient %s; they have to be alike", i, name,
                        ddp_dtype_name(param->value.dtype), ddp_dtype_name(param->grad.dtype));
    DDP__OPTIMIZER_NEED((!param->grad.dtype && !param->grad.ndim) || ddp_tensor_count(&param->grad) == count, "params[%d] \"%s\" has %lld elements, but its gradient %lld", i,
                        name, (long long)count, (long long)ddp_tensor_count(&param->grad));
    p->count = (size_t)count;
    p->rows = param->value.ndim > 0 && count ? (size_t)param->value.shape[0] : 1;
    p->squares = -1;
    if (ddp__optimizer_has_trust(&o->desc) && (!o->desc.decay_matrices_only || param->value.ndim > 1)) {
        p->squares = o->square_count;
        o->square_count += 2;
    }
    for (p->first_use = 0; p->first_use < i; p->first_use++)
        if (count && o->desc.params[p->first_use].value.data == param->value.data) break;
    DDP__OPTIMIZER_NEED(o->params[p->first_use].count == p->count && o->desc.params[p->first_use].value.dtype == param->value.dtype,
                        "params[%d] \"%s\" shares its values with params[%d], but has another shape or dtype", i, name, p->first_use);
    return DDP_OK;
}

/* Says where each tensor of state lies; memory NULL only counts. Returns the bytes of all. */
static size_t ddp__optimizer_place(ddp_optimizer *o, unsigned char *memory) {
    size_t used = 0;
    for (int i = 0; i < o->desc.param_count; i++)
        for (int k = 0; k < o->state_count && o->params[i].first_use == i; k++) {
            if (memory && o->params[i].count) o->params[i].state[k] = memory + used;
            used += (o->params[i].count * ddp_dtype_size(o->desc.params[i].value.dtype) + 63) / 64 * 64;
        }
    return used;
}

static ddp_result ddp__optimizer_alloc_state(ddp_optimizer *o) {
    size_t bytes = ddp__optimizer_place(o, NULL);
    if (!bytes) return DDP_OK;
    if (!o->desc.state_alloc_fn) DDP__FSDP_TRY(o->device->alloc(o->group, bytes, &o->state));
    else o->state = o->desc.state_alloc_fn(bytes, o->desc.state_user);
    if (!o->state) return ddp_fail(DDP_ERR_NO_MEMORY, "ddp_optimizer_create: state_alloc_fn gave no memory for %llu bytes", (unsigned long long)bytes);
    ddp__optimizer_place(o, (unsigned char *)o->state);
    return DDP_OK;
}

static ddp_result ddp__optimizer_build(ddp_optimizer *o) {
    size_t bytes;
    void *memory;
    o->state_count = ddp__optimizer_is_adam(&o->desc) ? 2 : o->desc.momentum != 0;
    o->params = (ddp__optimizer_param *)ddp_group_malloc(o->group, (size_t)o->desc.param_count * sizeof *o->params);
    if (!o->params) return DDP_ERR_NO_MEMORY;
    memset(o->params, 0, (size_t)o->desc.param_count * sizeof *o->params);
    for (int i = 0; i < o->desc.param_count; i++) DDP__FSDP_TRY(ddp__optimizer_take(o, i));
    DDP__FSDP_TRY(ddp__optimizer_alloc_state(o));
    if (!o->square_count) return DDP_OK;
    bytes = (size_t)o->square_count * sizeof(ddp_exact_sum);
    o->sums = (ddp_exact_sum *)ddp_group_malloc(o->group, bytes);
    if (!o->sums) return DDP_ERR_NO_MEMORY;
    DDP__FSDP_TRY(o->device->alloc(o->group, bytes, &memory));
    o->squares = o->sent = (ddp_exact_sum *)memory;
    if (o->wire == o->device) return DDP_OK;
    o->sent = NULL;
    DDP__FSDP_TRY(o->wire->alloc(o->desc.shard_group, bytes, &memory));
    o->sent = (ddp_exact_sum *)memory;
    return DDP_OK;
}

DDPDEF ddp_result ddp_optimizer_create(ddp_optimizer **out, ddp_group *group, const ddp_optimizer_desc *desc) {
    ddp_optimizer_desc resolved;
    ddp_optimizer *o;
    ddp_result result;
    DDP__FSDP_NEED(out, "out is NULL");
    *out = NULL;
    DDP__FSDP_NEED(group && desc, "group or desc is NULL");
    resolved = *desc;
    DDP__FSDP_TRY(ddp__optimizer_resolve(group, &resolved));
    o = (ddp_optimizer *)ddp_group_malloc(group, sizeof *o);
    if (!o) return DDP_ERR_NO_MEMORY;
    memset(o, 0, sizeof *o);
    o->desc = resolved;
    o->group = group;
    o->device = ddp_group_device(group);
    o->wire = resolved.shard_group ? ddp_group_device(resolved.shard_group) : o->device;
    result = ddp__optimizer_build(o);
    if (result == DDP_OK) *out = o;
    else ddp_optimizer_destroy(o);
    return result;
}

DDPDEF void ddp_optimizer_destroy(ddp_optimizer *optimizer) {
    ddp_optimizer *o = optimizer;
    if (!o) return;
    if (o->sent && o->sent != o->squares) o->wire->free(o->desc.shard_group, o->sent);
    if (o->squares) o->device->free(o->group, o->squares);
    if (o->state && !o->desc.state_alloc_fn) o->device->free(o->group, o->state);
    else if (o->state) o->desc.state_free_fn(o->state, o->desc.state_user);
    ddp_group_mfree(o->group, o->sums);
    ddp_group_mfree(o->group, o->params);
    ddp_group_mfree(o->group, o);
}

/* What the step is for all tensors of one dtype: in double where that is exact, rounded to dtype as often as arithmetic in dtype would. */
static double ddp__in_dtype(ddp_dtype dtype, double x) { return dtype == DDP_F32 ? (double)(float)x : x; }

static ddp_update ddp__optimizer_factors(const ddp_optimizer *o, ddp_dtype dtype, float lr) {
    const ddp_optimizer_desc *d = &o->desc;
    ddp_update u;
    double bias = 1.0 - pow((double)d->beta1, (double)o->step);
    memset(&u, 0, sizeof u);
    u.dtype = dtype;
    u.scale = 1;
    if (ddp__optimizer_is_adam(d)) {
        u.kind = d->kind == DDP_OPTIMIZER_LAMB ? DDP_UPDATE_LAMB : DDP_UPDATE_ADAMW;
        u.beta1 = d->beta1;
        u.beta2 = d->beta2;
        u.rest1 = ddp__in_dtype(dtype, 1.0 - u.beta1);
        u.rest2 = ddp__in_dtype(dtype, 1.0 - u.beta2);
        u.rate = ddp__in_dtype(dtype, (u.kind == DDP_UPDATE_LAMB ? 1.0 : lr) / bias);
        u.root = ddp__in_dtype(dtype, 1.0 / sqrt(1.0 - pow(u.beta2, (double)o->step)));
        u.eps = d->eps;
    } else {
        u.kind = DDP_UPDATE_SGD;
        u.rate = lr;
        u.beta1 = d->momentum;
        u.rest1 = ddp__in_dtype(dtype, 1.0 - d->dampening);
        u.first = o->step == 1;
        u.nesterov = d->nesterov && d->kind == DDP_OPTIMIZER_SGD;
    }
    return u;
}

static float ddp__optimizer_decay(const ddp_optimizer *o, int i) {
    return o->desc.decay_matrices_only && o->desc.params[i].value.ndim < 2 ? 0 : o->desc.weight_decay;
}

static int ddp__optimizer_steps(const ddp_optimizer *o, int i) { return o->params[i].first_use == i && o->params[i].count > 0; }

static ddp_result ddp__fsdp_enter(ddp_group *group) {
    const ddp_device *device = ddp_group_device(group);
    return device->enter ? device->enter(group, DDP_LANE_COMPUTE) : DDP_OK;
}

/* Sums of squares of all values and gradients (LAMB: updates) that have a trust ratio, over all ranks: rows add exactly. */
static ddp_result ddp__optimizer_norms(ddp_optimizer *o) {
    size_t bytes = (size_t)o->square_count * sizeof(ddp_exact_sum);
    o->device->fill_zero(o->squares, bytes);
    for (int i = 0; i < o->desc.param_count; i++) {
        const ddp__optimizer_param *p = &o->params[i];
        const ddp_param *param = &o->desc.params[i];
        if (p->squares < 0 || !ddp__optimizer_steps(o, i)) continue;
        o->device->sum_squares(o->squares + p->squares, param->value.data, p->rows, p->count / p->rows, param->value.dtype);
        o->device->sum_squares(o->squares + p->squares + 1, param->grad.data, p->rows, p->count / p->rows, param->value.dtype);
    }
    if (o->sent != o->squares) (o->device->enter ? o->device : o->wire)->copy(o->sent, o->squares, bytes);
    if (o->desc.shard_group) {
        DDP__FSDP_TRY(ddp_all_reduce(o->desc.shard_group, o->sent, o->sent, bytes / sizeof(int64_t), DDP_I64, DDP_OP_SUM, NULL));
        DDP__FSDP_TRY(ddp__fsdp_enter(o->desc.shard_group));
    }
    o->wire->copy(o->sums, o->sent, bytes);
    return ddp__fsdp_enter(o->group);
}

/* |w| over |update| for LAMB, over |g| + weight_decay |w| for LARS. Where either has no length there is nothing to compare: 1. */
static double ddp__optimizer_trust(const ddp_optimizer *o, int i) {
    int squares = o->params[i].squares;
    double value, grad, decayed;
    if (squares < 0) return 1;
    value = sqrt(ddp_exact_sum_value(o->sums + squares));
    grad = sqrt(ddp_exact_sum_value(o->sums + squares + 1));
    if (value == 0 || grad == 0) return 1;
    decayed = (double)ddp__optimizer_decay(o, i) * value;
    DDP__ROUNDED(decayed);
    return (double)o->desc.trust_coefficient * value / (o->desc.kind == DDP_OPTIMIZER_LARS ? grad + decayed : grad);
}

/* A pass over parameter i; *u is what all have in common. LAMB has two: moments and update, then a step of plain SGD along the update. In LARS the rate is
   part of what the momentum adds up, as in the paper. */
static void ddp__optimizer_pass(const ddp_optimizer *o, int i, ddp_update u, float lr, int last) {
    const ddp_param *param = &o->desc.params[i];
    double decay = (double)ddp__optimizer_decay(o, i), rate = last ? ddp__in_dtype(u.dtype, (double)lr * ddp__optimizer_trust(o, i)) : 0;
    u.value = param->value.data;
    u.grad = param->grad.data;
    u.state0 = o->params[i].state[0];
    u.state1 = o->params[i].state[1];
    u.count = o->params[i].count;
    u.decay = decay;
    if (o->desc.kind == DDP_OPTIMIZER_ADAMW) u.keep = ddp__in_dtype(u.dtype, 1.0 - ddp__in_dtype(u.dtype, (double)lr * decay));
    else if (o->desc.kind == DDP_OPTIMIZER_LARS) {
        u.scale = rate;
        u.rate = 1;
    } else if (o->desc.kind == DDP_OPTIMIZER_LAMB && last) {
        u.kind = DDP_UPDATE_SGD;
        u.rate = rate;
        u.decay = 0;
        u.state0 = NULL;
    }
    if (o->device->update) o->device->update(&u);
    else if (u.dtype == DDP_F32) ddp__update_f32(&u);
    else ddp__update_f64(&u);
}

DDPDEF ddp_result ddp_optimizer_step(ddp_optimizer *optimizer, float lr) {
    ddp_optimizer *o = optimizer;
    ddp_update common[2];
    DDP__FSDP_NEED(o, "optimizer is NULL");
    DDP__FSDP_NEED(ddp__is_amount(lr), "lr=%g; pass 0 or more", (double)lr);
    for (int i = 0; i < o->desc.param_count; i++)
        DDP__FSDP_NEED(!o->params[i].count || (o->desc.params[i].value.data && o->desc.params[i].grad.data), "params[%d] \"%s\" has no %s", i,
                       o->desc.params[i].name ? o->desc.params[i].name : "", o->desc.params[i].value.data ? "gradient" : "values");
    DDP__FSDP_TRY(ddp__fsdp_enter(o->group));
    for (int i = 0; i < o->desc.param_count; i++) {
        void *first = o->desc.params[o->params[i].first_use].grad.data;
        if (o->params[i].first_use != i) o->device->add(first, first, o->desc.params[i].grad.data, o->params[i].count, o->desc.params[i].value.dtype);
    }
    o->step++;
    common[0] = ddp__optimizer_factors(o, DDP_F32, lr);
    common[1] = ddp__optimizer_factors(o, DDP_F64, lr);
    for (int last = o->desc.kind != DDP_OPTIMIZER_LAMB; last < 2; last++) {
        if (last && o->square_count) DDP__FSDP_TRY(ddp__optimizer_norms(o));
        for (int i = 0; i < o->desc.param_count; i++)
            if (ddp__optimizer_steps(o, i)) ddp__optimizer_pass(o, i, common[o->desc.params[i].value.dtype == DDP_F64], lr, last);
    }
    return o->device->check ? o->device->check(o->group) : DDP_OK;
}

DDPDEF ddp_result ddp_optimizer_get_state(ddp_optimizer *optimizer, int param, int which, const char **name, ddp_tensor *state) {
    const ddp_optimizer *o = optimizer;
    DDP__FSDP_NEED(o && state, "optimizer or state is NULL");
    DDP__FSDP_NEED(param >= 0 && param < o->desc.param_count, "param=%d, there are %d parameters, numbered from 0", param, o->desc.param_count);
    DDP__FSDP_NEED(which >= 0 && which < o->state_count, "which=%d, there are %d states of a parameter, numbered from 0", which, o->state_count);
    *state = o->desc.params[param].value;
    state->data = o->params[o->params[param].first_use].state[which];
    if (name) *name = ddp__optimizer_states[o->desc.kind][which];
    return DDP_OK;
}

DDPDEF int64_t ddp_optimizer_get_step(const ddp_optimizer *optimizer) { return optimizer ? optimizer->step : 0; }
DDPDEF void ddp_optimizer_set_step(ddp_optimizer *optimizer, int64_t step) { if (optimizer) optimizer->step = step; }

#undef DDP__OPTIMIZER_NEED

//== learning rates ==================================================================================== >>impl-rates

DDPDEF ddp_result ddp_lr_check(const ddp_lr_desc *desc) {
    int64_t after;
    DDP__FSDP_NEED(desc, "desc is NULL");
    DDP__FSDP_NEED((unsigned)desc->kind <= DDP_LR_WSD, "kind=%d is not one of ddp_lr_kind", (int)desc->kind);
    DDP__FSDP_NEED(desc->peak > 0 && ddp__is_amount(desc->peak), "peak=%g; pass a positive number", desc->peak);
    DDP__FSDP_NEED(desc->floor >= 0 && desc->floor <= desc->peak, "floor=%g; pass 0 to peak=%g", desc->floor, desc->peak);
    DDP__FSDP_NEED(desc->warmup_steps >= 0, "warmup_steps=%lld; pass 0 or more", (long long)desc->warmup_steps);
    if (desc->kind == DDP_LR_CONSTANT) return DDP_OK;
    DDP__FSDP_NEED(desc->total_steps >= 1, "total_steps=%lld; pass how many steps there are", (long long)desc->total_steps);
    after = desc->total_steps - desc->warmup_steps;
    DDP__FSDP_NEED(after >= 0, "warmup_steps=%lld is more than total_steps=%lld", (long long)desc->warmup_steps, (long long)desc->total_steps);
    DDP__FSDP_NEED(desc->kind != DDP_LR_WSD || (desc->decay_steps >= 0 && desc->decay_steps <= after),
                   "decay_steps=%lld; pass 0 to %lld, the steps after the warm-up", (long long)desc->decay_steps, (long long)after);
    DDP__FSDP_NEED(desc->kind != DDP_LR_POLYNOMIAL || ddp__is_amount((double)desc->power), "power=%g; pass a positive number", (double)desc->power);
    return DDP_OK;
}

DDPDEF float ddp_lr_at(const ddp_lr_desc *desc, int64_t step) {
    int64_t warm, total, decay;
    double share, power, left;
    if (ddp_lr_check(desc) != DDP_OK) return 0;
    warm = desc->warmup_steps;
    total = desc->total_steps;
    if (step < 0) step = 0;
    if (step <= warm && warm) return (float)(desc->peak * (double)step / (double)warm);
    if (desc->kind == DDP_LR_CONSTANT) return (float)desc->peak;
    if (step > total || total == warm) return (float)desc->floor;
    if (desc->kind == DDP_LR_COSINE) {
        share = desc->floor / desc->peak;
        return (float)(desc->peak * (0.5 * (1 + share) + 0.5 * (1 - share) * cos(3.14159265358979323846 * (double)(step - warm) / (double)(total - warm))));
    }
    decay = total - warm;
    if (desc->kind == DDP_LR_WSD && (desc->decay_steps || total / 10 < decay)) decay = desc->decay_steps ? desc->decay_steps : total < 10 ? 1 : total / 10;
    if (step <= total - decay) return (float)desc->peak;
    power = desc->kind == DDP_LR_POLYNOMIAL && desc->power != 0 ? (double)desc->power : 1;
    left = (double)(total - step) / (double)decay;
    left = (desc->peak - desc->floor) * (power == 1 ? left : pow(left, power));
    DDP__ROUNDED(left);
    return (float)(desc->floor + left);
}

//== loss scaling ===================================================================================== >>impl-scaler

#define DDP__SCALER_TAG 100            /* of a call on host memory, whatever the device is */
#define DDP__SCALER_BLOCK ((size_t)4096) /* elements that are tested while they are in the cache */

DDPDEF ddp_result ddp_scaler_init(ddp_scaler *scaler, const ddp_scaler_desc *desc) {
    ddp_scaler_desc d = DDP_ZERO;
    DDP__FSDP_NEED(scaler, "scaler is NULL");
    memset(scaler, 0, sizeof *scaler);
    if (desc) d = *desc;
    if (d.init_scale == 0) d.init_scale = 65536;
    if (d.growth_factor == 0) d.growth_factor = 2;
    if (d.backoff_factor == 0) d.backoff_factor = 0.5f;
    if (d.growth_interval == 0) d.growth_interval = 2000;
    DDP__FSDP_NEED(d.init_scale > 0 && ddp__is_amount(d.init_scale), "init_scale=%g; pass a positive number", (double)d.init_scale);
    DDP__FSDP_NEED(d.growth_factor > 1 && ddp__is_amount(d.growth_factor), "growth_factor=%g; pass a number above 1", (double)d.growth_factor);
    DDP__FSDP_NEED(d.backoff_factor > 0 && d.backoff_factor < 1, "backoff_factor=%g; pass a number between 0 and 1", (double)d.backoff_factor);
    DDP__FSDP_NEED(d.growth_interval >= 1, "growth_interval=%d; pass 1 or more", d.growth_interval);
    DDP__FSDP_NEED(d.group_count >= 0 && d.group_count <= 4, "group_count=%d; pass 0 to 4", d.group_count);
    for (int i = 0; i < d.group_count; i++) DDP__FSDP_NEED(d.groups[i], "groups[%d] is NULL", i);
    scaler->desc = d;
    scaler->scale = d.init_scale;
    return DDP_OK;
}

DDPDEF float ddp_scaler_scale(const ddp_scaler *scaler) { return scaler ? scaler->scale : 0; }
DDPDEF int ddp_scaler_found_inf(const ddp_scaler *scaler) { return scaler ? scaler->found_inf : 0; }

/* Whether all bits of the exponent are set in one of count elements. */
#define DDP__NON_FINITE_FN(word, suffix)                                                          \
    typedef word __attribute__((may_alias, aligned(1))) ddp__exponent_##suffix;                   \
    static int ddp__non_finite_##suffix(const void *data, size_t count, word mask) {              \
        const ddp__exponent_##suffix *x = (const ddp__exponent_##suffix *)data;                   \
        word bad = 0;                                                                             \
        for (; count >= 64; count -= 64, x += 64) /* a fixed number of them: compilers see vectors */ \
            for (int i = 0; i < 64; i++) bad |= (word)-((x[i] & mask) == mask);                   \
        for (size_t i = 0; i < count; i++) bad |= (word)-((x[i] & mask) == mask);                 \
        return bad != 0;                                                                          \
    }
DDP__NON_FINITE_FN(uint16_t, 16)
DDP__NON_FINITE_FN(uint32_t, 32)
DDP__NON_FINITE_FN(uint64_t, 64)
#undef DDP__NON_FINITE_FN

static int ddp__non_finite(const void *data, size_t count, ddp_dtype dtype) {
    if (dtype == DDP_F32) return ddp__non_finite_32(data, count, UINT32_C(0x7f800000));
    if (dtype == DDP_F64) return ddp__non_finite_64(data, count, UINT64_C(0x7ff) << 52);
    return ddp__non_finite_16(data, count, (uint16_t)(dtype == DDP_F16 ? 0x7c00 : 0x7f80));
}

/* Multiplies host memory by factor and tests it block by block: it is read once. */
static int ddp__unscale_host(const ddp_tensor *tensor, size_t count, float factor) {
    unsigned char *at = (unsigned char *)tensor->data;
    size_t size = ddp_dtype_size(tensor->dtype);
    int bad = 0;
    for (size_t n; count; at += n * size, count -= n) {
        n = count < DDP__SCALER_BLOCK ? count : DDP__SCALER_BLOCK;
        if (factor != 1) ddp_device_cpu()->scale(at, n, tensor->dtype, factor);
        bad |= ddp__non_finite(at, n, tensor->dtype);
    }
    return bad;
}

/* On a device the sum of squares tells: it is finite if all elements are (f64: below 1e154). scratch: an exact sum in its memory. */
static ddp_result ddp__unscale_device(ddp_group *group, const ddp_tensor *gradients, int gradient_count, float factor, void *scratch, int *bad) {
    const ddp_device *device = ddp_group_device(group);
    ddp_exact_sum sum;
    double squares;
    device->fill_zero(scratch, sizeof sum);
    for (int i = 0; i < gradient_count; i++) {
        size_t count = (size_t)ddp_tensor_count(&gradients[i]);
        if (!count) continue;
        if (factor != 1) device->scale(gradients[i].data, count, gradients[i].dtype, factor);
        device->sum_squares((ddp_exact_sum *)scratch, gradients[i].data, 1, count, gradients[i].dtype);
    }
    device->copy(&sum, scratch, sizeof sum);
    squares = ddp_exact_sum_value(&sum);
    *bad = !(squares - squares == 0);
    return device->check ? device->check(group) : DDP_OK;
}

/* scratch: memory of the device for an exact sum, or NULL on the CPU. */
static ddp_result ddp__scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients, int gradient_count, void *scratch) {
    float inverse = (float)(1.0 / (double)scaler->scale);
    int32_t found = 0;
    int bad = 0;
    if (scratch) DDP__FSDP_TRY(ddp__unscale_device(group, gradients, gradient_count, inverse, scratch, &bad));
    else for (int i = 0; i < gradient_count; i++) bad |= ddp__unscale_host(&gradients[i], (size_t)ddp_tensor_count(&gradients[i]), inverse);
    for (int i = 0; i < scaler->desc.group_count; i++) { /* what one of them found reaches the members of the next one */
        ddp_call call;
        memset(&call, 0, sizeof call);
        call.kind = DDP_CALL_ALL_REDUCE;
        call.dtype = DDP_I32;
        call.op = DDP_OP_MAX;
        call.root = -1;
        call.tag = DDP__SCALER_TAG;
        found = bad;
        call.send = call.recv = &found;
        call.count = 1;
        DDP__FSDP_TRY(ddp_group_call(scaler->desc.groups[i], &call, NULL));
        bad = found;
    }
    scaler->found_inf = bad;
    scaler->unscaled = 1;
    return DDP_OK;
}

DDPDEF ddp_result ddp_scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients, int gradient_count) {
    const ddp_device *device;
    ddp_result result;
    void *scratch = NULL;
    DDP__FSDP_NEED(scaler && group, "scaler or group is NULL");
    DDP__FSDP_NEED(gradient_count >= 0 && (gradients || !gradient_count), "gradient_count=%d, and gradients is NULL or the count negative", gradient_count);
    DDP__FSDP_NEED(!scaler->unscaled, "gradients have been unscaled since the last ddp_scaler_update; once per update");
    for (int i = 0; i < gradient_count; i++) {
        ddp_dtype dtype = gradients[i].dtype;
        DDP__FSDP_NEED(dtype >= DDP_F32 && dtype <= DDP_BF16, "gradients[%d] is %s; only floats have a scale", i, ddp_dtype_name(dtype));
        DDP__FSDP_NEED(ddp_tensor_count(&gradients[i]) >= 0, "gradients[%d]: ndim=%d or its shape is wrong", i, gradients[i].ndim);
        DDP__FSDP_NEED(gradients[i].data || !ddp_tensor_count(&gradients[i]), "gradients[%d].data is NULL", i);
    }
    device = ddp_group_device(group);
    DDP__FSDP_TRY(ddp__fsdp_enter(group));
    if (device != ddp_device_cpu()) DDP__FSDP_TRY(device->alloc(group, sizeof(ddp_exact_sum), &scratch));
    result = ddp__scaler_unscale(scaler, group, gradients, gradient_count, scratch);
    if (scratch) device->free(group, scratch);
    return result;
}

/* An infinity and a growth as in PyTorch's _amp_update_scale_, with factors of f32. */
DDPDEF ddp_result ddp_scaler_update(ddp_scaler *scaler) {
    DDP__FSDP_NEED(scaler, "scaler is NULL");
    DDP__FSDP_NEED(scaler->unscaled, "no gradients have been unscaled since the last update");
    if (scaler->found_inf) {
        scaler->scale *= scaler->desc.backoff_factor;
        scaler->growth_tracker = 0;
    } else if (++scaler->growth_tracker >= scaler->desc.growth_interval) {
        double grown = (double)scaler->scale * (double)scaler->desc.growth_factor;
        if (ddp__is_amount((double)(float)grown)) scaler->scale = (float)grown;
        scaler->growth_tracker = 0;
    }
    scaler->unscaled = scaler->found_inf = 0;
    return DDP_OK;
}

DDPDEF void ddp_scaler_save(const ddp_scaler *scaler, ddp_scaler_state *state) {
    state->scale = (double)scaler->scale;
    state->growth_tracker = scaler->growth_tracker;
}

DDPDEF ddp_result ddp_scaler_load(ddp_scaler *scaler, const ddp_scaler_state *state) {
    DDP__FSDP_NEED(scaler && state, "scaler or state is NULL");
    if (!ddp__is_amount(state->scale) || (double)(float)state->scale != state->scale || state->growth_tracker < 0 || state->growth_tracker > INT32_MAX - 1)
        return ddp_fail(DDP_ERR_CORRUPT, "ddp_scaler_load: scale=%g growth_tracker=%lld is nothing that ddp_scaler_save writes", state->scale,
                        (long long)state->growth_tracker);
    scaler->scale = (float)state->scale;
    scaler->growth_tracker = (int)state->growth_tracker;
    scaler->unscaled = scaler->found_inf = 0;
    return DDP_OK;
}

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

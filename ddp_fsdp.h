/*  ddp_fsdp.h - sharded training: parameters, gradients and optimizer state split over ranks, with checkpoints that outlive the world size.

    ZeRO-1, ZeRO-2, ZeRO-3 (FSDP) and plain data parallelism through the same calls, each also in a hybrid form; optimizers, learning-rate
    schedules and a loss scaler on plain or sharded tensors; checkpoints in plain safetensors files.

USAGE
    #define DDP_IMPLEMENTATION             in exactly one source file of the program: the bodies of ddp.h and of this header
    #include "ddp_fsdp.h"
    Or DDP_FSDP_IMPLEMENTATION for the bodies of this header alone. Link with -lpthread -lm.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp_fsdp.h"
    #include <stdio.h>

    static ddp_result train(ddp_group *world, void *user) {           // runs once per rank
        float start[8] = {0};
        ddp_fsdp_param p = DDP_ZERO;
        ddp_fsdp_unit_desc unit = {"layer", &p, 1};                   // what is gathered at once
        ddp_fsdp_desc desc = DDP_ZERO;                                // zero means default: ZeRO-3, AdamW, f32
        ddp_fsdp *fsdp;
        p.param.name = "w", p.param.value.data = start, p.param.value.dtype = DDP_F32, p.param.value.ndim = 1, p.param.value.shape[0] = 8;
        desc.units = &unit, desc.unit_count = 1;
        if (ddp_fsdp_create(&fsdp, world, &desc) != DDP_OK) return DDP_ERR_INVALID;
        for (int step = 0; step < 400; step++) {
            ddp_fsdp_unshard(fsdp, 0);                            // value.data and grad.data point to whole tensors now
            float *w = (float *)p.param.value.data, *g = (float *)p.param.grad.data;
            for (int i = 0; i < 8; i++) g[i] = w[i] - (float)i;
            if (step == 399 && ddp_rank(world) == 0) printf("w[7] = %g\n", w[7]);
            ddp_fsdp_reduce_grads(fsdp, 0);                            // adds g over ranks, each keeps its rows of the sum
            if (ddp_fsdp_step(fsdp, 0.05f) != DDP_OK) break;
        }
        ddp_fsdp_destroy(fsdp);
        return user ? DDP_ERR_INVALID : ddp_group_status(world);
    }
    int main(void) { ddp_launch_desc all = DDP_ZERO; return ddp_launch(&all, train, NULL) != DDP_OK; }

CONTENTS      (search for the tags)
    >>config  >>kernels  >>types  >>descs  >>api  >>impl-structs  >>impl-error  >>impl-optimizer  >>impl-rates  >>impl-scaler  >>impl-crc  >>impl-json
    >>impl-safetensors  >>impl-files  >>impl-boxes  >>impl-save  >>impl-load  >>impl-sharding  >>impl-layout  >>impl-gather
    >>impl-shard-reduce  >>impl-step  >>impl-saver  >>impl-create  >>impl-wrap  >>impl-public

CONCEPTS
    Shard      each parameter of d rows (its first dimension) is cut into W pieces of c = ceil(d / W) rows: rank r keeps rows [rc, (r+1)c),
               the last ranks fewer, or none. Rows are never split.
    Unit       the parameters that are gathered, released and reduced together, such as a transformer block. Parameters that belong to no
               block form a root unit, which stays gathered longer. A unit inside another one is a unit of its own.
    Gather     brings the whole parameters of a unit to every rank: param.value.data points to them until the release.
    Reduce     adds the whole gradients of a unit over ranks and leaves each rank its rows of the sum.

                   rank 0   rank 1      gather      rank 0 and 1     backward    rank 0    rank 1      reduce    rank 0    rank 1
        weight    |rows 0-1|rows 2-3|  ------->    |rows 0 1 2 3|  --------->   |grad 0-3||grad 0-3|  ------->  |sum 0-1| |sum 2-3|

    Strategy   what is split, and what each rank keeps whole. Bytes per rank for P parameters, W ranks and
               AdamW, without bookkeeping. 16-bit: param_dtype is BF16 or F16; master values, sums of
               gradients and moments are f32. U: parameters of the largest unit times 1 + prefetch (2 by
               default); all units share its buffers.

                                                               f32                    16-bit
                   NO_SHARD      nothing: data parallelism     16 P                   20 P
                   SHARD_OPTIM   ZeRO-1: moments (16-bit:      8 P +  8 P / W         4 P + 16 P / W
                                 master values, sums too)
                   SHARD_GRAD    ZeRO-2: gradients too         4 P + 12 P / W + 4 U   2 P + 16 P / W + 2 U
                   FULL_SHARD    ZeRO-3: values too                  16 P / W + 8 U         18 P / W + 4 U

               U holds gradients, under FULL_SHARD values too. Several micro-batches m add floor(log2 m) sums:
               of 4 P / W each with SHARD_GRAD and FULL_SHARD; of 4 P each with the others. These then keep no
               other sums of 16-bit gradients, and stage the largest unit's gradients in f32. Ranks that do
               not read each other's memory stage one unit more: its gathered values and its f32 gradients.
    Traffic    bytes that each rank sends, times (W - 1) / W. A gather sends 4 P, 16-bit 2 P: once per step;
               FULL_SHARD twice per micro-batch, once with no_reshard_after_forward. A reduction of gradients sends
               4 P, also of 16-bit ones, which are added in f32: once per step; SHARD_GRAD and FULL_SHARD once
               per micro-batch. NO_SHARD has no gather, and its all-reduce sends 8 P. Ranks that read each
               other's memory read 16-bit gradients as they are: 2 P, sums over micro-batches 4 P.
    Hybrid     split inside one group, replicated across another (HSDP): the ranks that hold the same shard form `replicas`.
    Master     the f32 values that the optimizer updates. With param_dtype = DDP_BF16 what is gathered is a 16-bit copy of them.
    Micro-batch  SHARD_GRAD and FULL_SHARD add over ranks after every micro-batch, then over micro-batches, pairwise like a binary counter;
               the others add over micro-batches first. In both ways the sum is the tree over the micro-batches of the step, where rank
               r's micro-batch k is number kW + r in the first way (W a power of two), and a block of 2^k per rank is given in the second.
               So W ranks under any strategy end with the bits of one. 16-bit gradients are added in f32
               everywhere. Outside this promise: reduce_dtype, sequential accumulation (sequential_accumulation),
               quantize_gather.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). A mistake in a desc names the unit and the parameter. What fails while ranks
    communicate poisons the group, on every rank.

CONFIG MACROS (define before including)
    DDP_FSDP_IMPLEMENTATION   also compile the bodies of this header, here. DDP_IMPLEMENTATION does so too

NOT DONE HERE
    No autograd: the caller runs forward and backward, unit by unit. No model parts: tensor parallelism is the caller's, global_shape tells checkpoints of it.
*/
#ifndef DDP_FSDP_KERNELS_H
#define DDP_FSDP_KERNELS_H

//== config ============================================================================================== >>config
#include "ddp.h"

//== kernels ============================================================================================ >>kernels

/* One step of an optimizer over count elements of dtype f32 or f64. w, g, m, v are elements of value, grad, state0 and state1. g is first multiplied by grad_scale.
   Every product, sum, root and quotient is rounded to dtype: nothing is fused. The factors are numbers of dtype.
     ADAMW   m = beta1 m + one_minus_beta1 g;  v = beta2 v + one_minus_beta2 (g g);
             w = w decay_factor - (rate m) / (sqrt(v) inv_sqrt_bias_correction2 + eps)
     LAMB    m and v as above;  g = (rate m) / (sqrt(v) inv_sqrt_bias_correction2 + eps) + decay w, the last term only if decay is not 0
     SGD     d = scale (g + decay w), the last term only if decay is not 0;
             with state0: m = first ? d : beta1 m + one_minus_beta1 d, then d = nesterov ? d + beta1 m : m;  w = w - rate d */
typedef enum ddp_update_kind { DDP_UPDATE_ADAMW, DDP_UPDATE_LAMB, DDP_UPDATE_SGD } ddp_update_kind;
typedef struct ddp_update {
    ddp_update_kind kind;
    ddp_dtype dtype;
    void *value, *grad, *state0, *state1;
    size_t count;
    double rate, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay;
    double scale, grad_scale;         /* grad_scale 0 = 1 */
    double decay_factor;              /* 1 - rate * weight decay */
    double inv_sqrt_bias_correction2; /* 1 / sqrt(1 - beta2^step) */
    int first, nesterov;
    const float *grad_scale_at; const double *scale_at; /* not NULL: the factor is stored there, in the device's memory, and is read when the work runs */
} ddp_update;

/* The functions of ddp_device.optimizer. All pointers are the device's memory. Work goes to the stream that the calling thread uses and returns at once; ddp_device.check
   reports failures. n(k) is the root of sum number k.
     update    one step
     scale     data, f32 or f64, is multiplied by *factor
     clip      *norm = n(0), as f32; it may be pinned memory. *factor = limit / *norm if that norm is finite and above limit, otherwise 1
     trust     out[i] = lr times c n(2i) / (n(2i+1) + decay n(2i)), or lr if either n is 0. decay -1: without the second term */
#define DDP_OPTIMIZER_KERNELS(X)                                                                        \
    X(update, (const ddp_update *update))                                                               \
    X(scale, (void *data, size_t count, ddp_dtype dtype, const float *factor))                          \
    X(clip, (const ddp_exact_sum *sum, float limit, float *factor, float *norm))                        \
    X(trust, (const ddp_exact_sum *sums, size_t count, double lr, double c, double decay, double *out))

typedef struct ddp_optimizer_kernels {
    int version; /* DDP_VERSION of the header that filled in the table */
#define DDP_X(name, arguments) void (*name) arguments;
    DDP_OPTIMIZER_KERNELS(DDP_X)
#undef DDP_X
} ddp_optimizer_kernels;

#endif /* DDP_FSDP_KERNELS_H */

#if !defined(DDP__KERNELS_ONLY) /* ddp_cuda.cuh takes the kernels alone */
#ifndef DDP_FSDP_H
#define DDP_FSDP_H

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
    DDP_FSDP_OFFLOAD_HOST,   /* optimizer state and master copy lie in host memory, and the host steps, piece by piece while others travel; for devices
                                that have their own. Its memory is pinned, with room for this rank's gradients. Over several ranks LAMB and LARS wait
                                for norms in between */
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

/* A parameter of a unit. param.value: dtype (floats) and shape are required; data holds the first values, on every rank the whole tensor, and is used in
   ddp_fsdp_create alone, which puts rank 0's values there unless skip_initial_broadcast; NULL with init_fn. From then on
   value.data and grad.data are set by gather and release. ndim 0 counts as one row. */
typedef struct ddp_fsdp_param {
    ddp_param param;
    int64_t global_shape[DDP_MAX_NDIM];  /* all zero = param.value's: this is a slice of a tensor of that shape, which is what a checkpoint holds, ... */
    int64_t global_offset[DDP_MAX_NDIM]; /* ... starting there. Ranks may hold the same slice (all of it, where it is not split): the lowest one's is saved */
    const char *tied_to; /* name of the earlier parameter whose value this one shares; needed when they are in different units, or without data */
    int frozen;          /* 1 = not trained: no gradient, no optimizer state */
    int index;           /* set by ddp_fsdp_wrap: the parameter's place in its list ... */
    char unit[48];       /* ... and, in the first of a unit, the unit's name */
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
    double max_lr;           /* required; the highest rate */
    double min_lr;           /* the rate at the end; 0 = 0 */
    int64_t batch, base_batch; /* 0 = none; otherwise max_lr and min_lr are right for base_batch samples a step and grow with batch: the linear-scaling rule of
                                  large batches (Goyal et al. 2017) */
    int64_t warmup_steps;    /* linear from 0: step s of them has max_lr * s / warmup_steps */
    int64_t total_steps;     /* required but for DDP_LR_CONSTANT */
    int64_t decay_steps;     /* WSD: 0 = a tenth of total_steps */
    float power;             /* POLYNOMIAL: 0 = 1 */
} ddp_lr_desc;

typedef struct ddp_scaler_desc {
    float init_scale;        /* 0 = 65536 */
    float growth_factor;     /* 0 = 2 */
    float backoff_factor;    /* 0 = 0.5 */
    int growth_interval;     /* 0 = 2000 */
    ddp_group *groups[4];    /* every group that splits or replicates the gradients; ddp_fsdp asks its own beside them */
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

/* What a checkpoint keeps beside tensors: the caller's own numbers. Those of rank 0 are written, all ranks get them back. Without padding bytes. */
typedef struct ddp_fsdp_state {
    int64_t step;            /* set by ddp_fsdp_step: optimizer steps taken */
    ddp_sampler_state sampler;
    ddp_scaler_state scaler; /* in what ddp_fsdp_save writes: desc.scaler's, where there is one */
    uint64_t rng[4];
    double user[8];
} ddp_fsdp_state;

typedef struct ddp_fsdp_desc {
    ddp_fsdp_unit_desc *units;     /* required; copied, their params are not */
    int unit_count;
    ddp_fsdp_strategy strategy;    /* 0 = FULL_SHARD */
    ddp_group *replicas;           /* hybrid: the ranks that hold the same shard. While ddp_fsdp lives, only it issues calls there between the first
                                      ddp_fsdp_reduce_grads of a step and the end of ddp_fsdp_step. NULL = none */
    ddp_dtype param_dtype;         /* what is gathered: 0 = as the parameter. DDP_BF16, DDP_F16: the master copy is f32 */
    /* The dtype in which gradients are added over ranks. 0 = f32, f64 for f64 parameters. Backward writes
       gradients in param.grad.dtype (0 = param_dtype); they are cast on the way. DDP_BF16 or DDP_F16 halves
       the bytes of each reduce-scatter: every gradient is rounded before it is sent, and every sum over ranks
       once more. Any value except 0 is outside the promise of equal bits, unless it is the default's dtype */
    ddp_dtype reduce_dtype;
    int micro_batch_count;         /* 0 = 1; per rank and step: ddp_fsdp_reduce_grads comes so often for each unit */
    int per_token;                 /* 1 = gradients are of a loss summed over tokens; see ddp_fsdp_mean */
    int sequential_accumulation;        /* 1 = micro-batches are added one after the other, in one buffer: outside the promise of equal bits */
    int prefetch;                  /* 0 = 1; units gathered ahead, in the order that the first step had; -1 = none. FULL_SHARD: whatever is gathered takes as much
                                      memory as the largest unit, so that units of like size waste least: an embedding of 8 blocks' size costs 8 for each block ahead */
    size_t max_gathered_bytes;     /* 0 = no limit; no unit is gathered ahead beyond it */
    int no_reshard_after_forward;        /* FULL_SHARD: 1 = a unit whose gradients have not been reduced yet stays gathered through its release */
    int overwrite_gradients;       /* 1 = every backward writes all gradients of a unit; otherwise every gather, a forward's too, clears their memory */
    int quantize_gather;           /* FULL_SHARD: 1 = parameters travel in 8 bits, in blocks of 256 with a scale (ZeRO++ qwZ, Wang et al. 2023). A value is off by
                                      at most 1/254 of the largest magnitude in its block, by the same amount
                                      on every rank; master values stay exact. CPU memory only. Outside the
                                      promise of equal bits: blocks begin where shards do */
    ddp_fsdp_offload offload;
    const char *offload_dir;       /* OFFLOAD_FILE: NULL = "."; the file has no name, nothing stays behind */
    ddp_optimizer_desc optimizer;  /* zero = AdamW; its params, shard_group and allocators are not read */
    ddp_scaler *scaler;            /* NULL = none; outlives the ddp_fsdp. clip_grad_norm and step then unscale, and a step with an infinity changes no value: the host
                                      waits in every step until it knows. BF16 needs none */
    /* Fills rows [first_row, first_row + row_count) of a parameter, in its dtype (param.value.dtype, or f32 where that is a 16-bit one): only this rank's rows */
    ddp_result (*init_fn)(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out, void *user);
    void *init_user;
    int skip_initial_broadcast;    /* 1 = first values are equal on all ranks already; otherwise rank 0's are taken (of the replicas' rank 0) */
    ddp_fsdp_state *state;         /* NULL = none: what was loaded is saved again; otherwise saved with the checkpoint and filled in by ddp_fsdp_load */
    size_t max_file_bytes;         /* of a checkpoint's files; 0 = 4 GiB; a larger tensor has a file of its own */
    int keep_checkpoints;          /* 0 = 1; older ones are dir.1, dir.2, ...; a save deletes those that are more */
    ddp_group *checkpoint_group;   /* NULL = group; with slices of larger tensors (global_shape) all ranks that hold a part of them. Create, save and load are then
                                      collective over it: what fails in one group fails in all, but for memory that create lacks */
    int save_in_background;        /* 1 = ddp_fsdp_save returns once a copy is made, a thread writes it (MPI: MPI_THREAD_MULTIPLE); see ddp_fsdp_save_wait */
    void *(*alloc_fn)(size_t size_bytes, void *user); /* host memory; NULL = the group's; set both or neither. While they run, save and load
                                      take what they need from the group's, the thread too */
    void (*free_fn)(void *memory, void *user);
    void *user;
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
    size_t group_bytes;       /* of now.total: group memory, which no allocator sees */
    size_t file_bytes;        /* in the offload file; not part of any total */
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
DDPDEF ddp_result ddp_fsdp_unshard(ddp_fsdp *fsdp, int unit);

/* This rank is done with the unit's parameters for now; FULL_SHARD frees them, value.data is NULL then. Gradients that have not been given to
   ddp_fsdp_reduce_grads are dropped. Never blocks. */
DDPDEF ddp_result ddp_fsdp_reshard(ddp_fsdp *fsdp, int unit);

/* Whole gradients of the unit are final for this micro-batch: adding them over ranks starts. Collective; grad.data is this object's from here on. Does
   not block, with one exception: SHARD_OPTIM with several micro-batches of 16-bit gradients waits until all
   ranks have read the previous unit's sums. Call it with the unit gathered. More often than micro_batch_count
   in one step is DDP_ERR_INVALID. */
DDPDEF ddp_result ddp_fsdp_reduce_grads(ddp_fsdp *fsdp, int unit);

/* on = 1: forward alone. Gathers bring no gradients and releases free, whatever no_reshard_after_forward says; the order of gathers is not recorded. */
DDPDEF ddp_result ddp_fsdp_no_grad(ddp_fsdp *fsdp, int on);

/* Scales all gradients by max_norm / norm when the global norm exceeds max_norm. *norm is the norm before. Collective; after the last unit's last
   reduce, before the step, which it waits for. Squares add per row in a fixed order and rows add exactly, so that the bits are those of any other sharding, and each
   element counts once. A norm that is not finite scales nothing. DDP_ERR_INVALID names a unit that has not been reduced. With norm NULL a device decides itself,
   with the same bits, and the host does not wait for it. */
DDPDEF ddp_result ddp_fsdp_clip_grad_norm(ddp_fsdp *fsdp, float max_norm, float *norm);

/* The norm of the last ddp_fsdp_clip_grad_norm, until the next one. Waits until the device has come there, not for what was put behind it: asked for once the
   next step's work is on its way, it costs nothing. Not collective. DDP_ERR_INVALID before the first; a failure of the group ends the wait. */
DDPDEF ddp_result ddp_fsdp_get_norm(ddp_fsdp *fsdp, float *norm);

/* With per_token, in every step between its last reduce and clip_grad_norm or step, which then divide by the tokens of all ranks, replicas and micro-batches.
   *loss: what this rank has added up, becomes the mean over all of them. Collective. As ddp_reducer_wait_mean. */
DDPDEF ddp_result ddp_fsdp_mean(ddp_fsdp *fsdp, ddp_mean *loss);

/* Waits for the reductions, divides the sums once by ranks and micro-batches, and updates this rank's shards. Collective. From the second step on no call keeps the
   host waiting for a device, but for a norm that is asked for, a scaler, OFFLOAD_HOST and staged groups; hosts of ranks meet here. Units that are
   gathered are released: their values are out of date. DDP_ERR_INVALID names a unit that has not been reduced micro_batch_count times; DDP_ERR_MISMATCH
   when ranks gathered or reduced in different orders. */
DDPDEF ddp_result ddp_fsdp_step(ddp_fsdp *fsdp, float lr);

/* Forgets the gradients of the step so far, on all ranks: to start a step anew. Collective. */
DDPDEF ddp_result ddp_fsdp_zero_grad(ddp_fsdp *fsdp);

/* This rank's rows of a parameter: its master values and, between the last reduce and the step, their gradients (sums, not divided yet). Any of the three may be
   NULL. data is NULL where there are no rows. Not collective; waits for this rank's reductions when grad is asked for. */
DDPDEF ddp_result ddp_fsdp_get_shard(ddp_fsdp *fsdp, int unit, int param, ddp_tensor *value, ddp_tensor *grad, int64_t *first_row);

/* This rank's rows of optimizer state number `which` of a parameter, where the master values lie; a tied one has its source's. name (may be NULL), data and
   errors: as ddp_optimizer_get_state and ddp_fsdp_get_shard; DDP_ERR_INVALID for a frozen parameter too. */
DDPDEF ddp_result ddp_fsdp_get_state(ddp_fsdp *fsdp, int unit, int param, int which, const char **name, ddp_tensor *state);

/* Steps taken, which the bias correction counts: to set once init_fn has filled in values, and the caller get_state's state, of an earlier run. Values that are
   written to get_shard's rows are not gathered before the next step. Not collective, but the same on every rank. DDP_ERR_INVALID when it is negative. */
DDPDEF ddp_result ddp_fsdp_set_step(ddp_fsdp *fsdp, int64_t step);

/* Writes a checkpoint to the folder dir: model-00001-of-0000N.safetensors with whole tensors in master precision under their names, model.safetensors.index.json,
   optimizer-*.safetensors with the moments, state.json. Collective. Written beside, synced and renamed: dir always is a whole checkpoint, old or new.
   Errors, on every rank, and what was there is untouched: DDP_ERR_SYSTEM; DDP_ERR_INVALID (other files in dir, a name that is none); DDP_ERR_MISMATCH (ranks give other
   dirs, slices leave a hole); DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_fsdp_save(ddp_fsdp *fsdp, const char *dir);

/* save_in_background: blocks until the last save is on disk, and returns its result, once. Collective. Otherwise DDP_OK at once. Save and load begin with it: what
   failed in the background is their result then, and they do nothing else. */
DDPDEF ddp_result ddp_fsdp_save_wait(ddp_fsdp *fsdp);

/* Reads this rank's part of a checkpoint that was written on any world size, strategy, wrapping and param_dtype; or a model of another program, in safetensors: moments
   become zero then, steps start again from 0. A tied weight may have the name of any of its uses; several
   names must have equal bytes. Files must be regular files: symbolic links are not followed. Collective,
   between steps. Errors on every rank, with
   the model as it was: DDP_ERR_CORRUPT (truncated, overlapping, checksum) and DDP_ERR_MISMATCH (missing, extra, other dtype or shape) name file, tensor and
   byte range; DDP_ERR_SYSTEM. AdamW and LAMB take each other's moments, SGD and LARS too; of other kinds they are missing or extra. */
DDPDEF ddp_result ddp_fsdp_load(ddp_fsdp *fsdp, const char *dir);

DDPDEF ddp_result ddp_fsdp_get_memory(const ddp_fsdp *fsdp, ddp_fsdp_memory *memory); /* bytes of this rank; not collective */

/* Waits for what is under way, as long as the group's timeout for a peer or a device that does not get there, and frees everything. Collective. NULL is ignored. */
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

/* The same with gradients times grad_scale, rounded as if they had been multiplied before, in the one pass over memory: to unscale and to clip. LARS, which
   takes the gradients' norms first, leaves them multiplied. DDP_ERR_INVALID when grad_scale is not positive and finite. */
DDPDEF ddp_result ddp_optimizer_step_scaled(ddp_optimizer *optimizer, float lr, float grad_scale);

/* State number `which` of a parameter, as a tensor of the value's shape, and its name in checkpoints ("exp_avg", "exp_avg_sq", "momentum_buffer").
   DDP_ERR_INVALID when there is none. */
DDPDEF ddp_result ddp_optimizer_get_state(ddp_optimizer *optimizer, int param, int which, const char **name, ddp_tensor *state);

/* Steps taken, which the bias correction counts; to set after a load, a negative number as 0. */
DDPDEF int64_t ddp_optimizer_get_step(const ddp_optimizer *optimizer);
DDPDEF void ddp_optimizer_set_step(ddp_optimizer *optimizer, int64_t step);

DDPDEF void ddp_optimizer_destroy(ddp_optimizer *optimizer); /* not collective; NULL is ignored */

/* The learning rate of step `step`, counted from 1. After total_steps it stays at min_lr. A pure function.
   An invalid desc: 0; the error line names the field. */
DDPDEF float ddp_lr_at(const ddp_lr_desc *desc, int64_t step);

/* --- loss scaling --- */

/* The caller's own: nothing to free. Not collective; the same desc on every rank, whose groups outlive it. DDP_ERR_INVALID names the field. */
DDPDEF ddp_result ddp_scaler_init(ddp_scaler *scaler, const ddp_scaler_desc *desc);

/* What the loss is multiplied by before backward. */
DDPDEF float ddp_scaler_scale(const ddp_scaler *scaler);

/* Multiplies gradients by the inverse scale and finds out whether any of them, on any rank of the groups, is
   not finite. Collective. group: whose memory it is. Once per update: a second call before ddp_scaler_update,
   and one before ddp_scaler_init, is DDP_ERR_INVALID. */
DDPDEF ddp_result ddp_scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients, int gradient_count);

/* 1 when the gradients of this update are not finite somewhere: leave the step out. */
DDPDEF int ddp_scaler_found_inf(const ddp_scaler *scaler);

/* Ends a step: the scale backs off after an infinity, and grows after growth_interval steps without one. Not collective. DDP_ERR_INVALID before an unscale. */
DDPDEF ddp_result ddp_scaler_update(ddp_scaler *scaler);

DDPDEF void ddp_scaler_save(const ddp_scaler *scaler, ddp_scaler_state *state);       /* neither is collective */
DDPDEF ddp_result ddp_scaler_load(ddp_scaler *scaler, const ddp_scaler_state *state); /* DDP_ERR_CORRUPT when the state is not one of ddp_scaler_save */

#ifdef __cplusplus
}
#endif
#endif /* DDP_FSDP_H */

#include "ddp.h" /* once more, for its check of the options with which bodies are compiled */
#if (defined(DDP_IMPLEMENTATION) || defined(DDP_FSDP_IMPLEMENTATION)) && !defined(DDP_FSDP_IMPLEMENTATION_INCLUDED)
#define DDP_FSDP_IMPLEMENTATION_INCLUDED

//== structs ======================================================================================== >>impl-structs
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

//== errors ============================================================================================ >>impl-error

#define ddp__fsdp_bad(who, group, ...) ddp_fail_in(DDP_ERR_INVALID, who, group, __VA_ARGS__) /* an argument is wrong */

/* result with the current error line. */
static ddp_saved_error ddp__fsdp_error(ddp_result result) {
    ddp_saved_error saved = DDP_ZERO;
    ddp_error_save(&saved, result);
    return saved;
}

/* Leave the public function unless the condition holds; what follows it is what to tell. */
#define DDP__FSDP_NEED(condition, ...) do { if (!(condition)) return ddp__fsdp_bad(__func__, NULL, __VA_ARGS__); } while (0)

/* Makes this thread's device functions follow the caller's own work; what they have come to. */
#define DDP__ON_DEVICE(group, call, ...) (ddp_group_device(group)->call ? ddp_group_device(group)->call(__VA_ARGS__) : DDP_OK)
static ddp_result ddp__fsdp_enter(ddp_group *group) {
    if (ddp_group_is_forked(group)) return ddp_group_status(group); /* the shards there are the rank's */
    return DDP__ON_DEVICE(group, use_stream, group, DDP_STREAM_COMPUTE);
}
static ddp_result ddp__fsdp_check(ddp_group *group) { return DDP__ON_DEVICE(group, check, group); }

/* data becomes op over ranks of data, which is host memory. */
static ddp_result ddp__host_reduce(ddp_group *group, void *data, size_t count, ddp_dtype dtype, ddp_op op) {
    return ddp_host_collective(group, DDP_CALL_ALL_REDUCE, data, data, count, dtype, op, -1);
}

/* data, which is host memory, becomes that of root. */
static ddp_result ddp__host_broadcast(ddp_group *group, void *data, size_t count, ddp_dtype dtype, int root) {
    return ddp_host_collective(group, DDP_CALL_BROADCAST, data, data, count, dtype, DDP_OP_SUM, root);
}

//== optimizers ==================================================================================== >>impl-optimizer
#if defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#define DDP__UPDATE_BYTES 32 /* of a vector; wider ones gain nothing */
#define DDP__ROOT_f32(x) x = (ddp__vector_f32)_mm256_sqrt_ps((__m256)x)
#define DDP__ROOT_f64(x) x = (ddp__vector_f64)_mm256_sqrt_pd((__m256d)x)
#elif defined(__SSE2__)
#include <emmintrin.h>
#define DDP__UPDATE_BYTES 16
#define DDP__ROOT_f32(x) x = (ddp__vector_f32)_mm_sqrt_ps((__m128)x)
#define DDP__ROOT_f64(x) x = (ddp__vector_f64)_mm_sqrt_pd((__m128d)x)
#else
#define DDP__UPDATE_BYTES 16
#define DDP__ROOT_f32(x) for (int i = 0; i < 4; i++) x[i] = sqrtf(x[i])
#define DDP__ROOT_f64(x) for (int i = 0; i < 2; i++) x[i] = sqrt(x[i])
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

/* struct ddp_update has the formulas. Loads and stores take any alignment; from `at` on `left` elements are there. */
#define DDP__UPDATE_FNS(real, suffix)                                                                                              \
    typedef real ddp__vector_##suffix __attribute__((vector_size(DDP__UPDATE_BYTES)));                                             \
    typedef struct ddp__factors_##suffix {                                                                                         \
        real *w, *g, *m, *v, rate, beta1, rest1, beta2, rest2, root, eps, keep, decay, scale, grad_scale;                          \
        int first, nesterov, lamb;                                                                                                 \
    } ddp__factors_##suffix;                                                                                                       \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__get_##suffix(const real *memory, size_t at, size_t left) {                        \
        ddp__vector_##suffix x = {0};                                                                                              \
        memcpy(&x, memory + at, left * sizeof(real));                                                                              \
        return x;                                                                                                                  \
    }                                                                                                                              \
    DDP__UPDATE_INLINE void ddp__put_##suffix(real *memory, size_t at, ddp__vector_##suffix x, size_t left) {                      \
        memcpy(memory + at, &x, left * sizeof(real));                                                                              \
    }                                                                                                                              \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__times_##suffix(real factor, ddp__vector_##suffix x) {                             \
        x = factor * x;                                                                                                            \
        DDP__ROUNDED(x);                                                                                                           \
        return x;                                                                                                                  \
    }                                                                                                                              \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__get_grad_##suffix(const ddp__factors_##suffix *f, size_t at, size_t left) {       \
        return f->grad_scale != 1 ? ddp__times_##suffix(f->grad_scale, ddp__get_##suffix(f->g, at, left)) : ddp__get_##suffix(f->g, at, left); \
    }                                                                                                                              \
    DDP__UPDATE_INLINE void ddp__update_adam_##suffix(const ddp__factors_##suffix *f, size_t at, size_t left) {                    \
        ddp__vector_##suffix g = ddp__get_grad_##suffix(f, at, left), w = ddp__get_##suffix(f->w, at, left), square = g * g;       \
        DDP__ROUNDED(square);                                                                                                      \
        ddp__vector_##suffix m = ddp__times_##suffix(f->beta1, ddp__get_##suffix(f->m, at, left)) + ddp__times_##suffix(f->rest1, g); \
        ddp__vector_##suffix v = ddp__times_##suffix(f->beta2, ddp__get_##suffix(f->v, at, left)) + ddp__times_##suffix(f->rest2, square); \
        ddp__vector_##suffix root = v;                                                                                             \
        DDP__ROOT_##suffix(root);                                                                                                  \
        ddp__vector_##suffix d = ddp__times_##suffix(f->rate, m) / (ddp__times_##suffix(f->root, root) + f->eps);                  \
        if (!f->lamb) ddp__put_##suffix(f->w, at, ddp__times_##suffix(f->keep, w) - d, left);                                      \
        else ddp__put_##suffix(f->g, at, f->decay != 0 ? d + ddp__times_##suffix(f->decay, w) : d, left);                          \
        ddp__put_##suffix(f->m, at, m, left);                                                                                      \
        ddp__put_##suffix(f->v, at, v, left);                                                                                      \
    }                                                                                                                              \
    DDP__UPDATE_INLINE void ddp__update_sgd_##suffix(const ddp__factors_##suffix *f, size_t at, size_t left) {                     \
        ddp__vector_##suffix w = ddp__get_##suffix(f->w, at, left), d = ddp__get_grad_##suffix(f, at, left), m;                    \
        if (f->decay != 0) d = d + ddp__times_##suffix(f->decay, w);                                                               \
        d = ddp__times_##suffix(f->scale, d);                                                                                      \
        if (f->m) {                                                                                                                \
            m = f->first ? d : ddp__times_##suffix(f->beta1, ddp__get_##suffix(f->m, at, left)) + ddp__times_##suffix(f->rest1, d); \
            d = f->nesterov ? d + ddp__times_##suffix(f->beta1, m) : m;                                                            \
            ddp__put_##suffix(f->m, at, m, left);                                                                                  \
        }                                                                                                                          \
        ddp__put_##suffix(f->w, at, w - ddp__times_##suffix(f->rate, d), left);                                                    \
    }                                                                                                                              \
    static void ddp__update_##suffix(const ddp_update *u) {                                                                        \
        const double scale = u->scale_at ? *u->scale_at : u->scale, grad_scale = u->grad_scale != 0 ? u->grad_scale : 1;           \
        const ddp__factors_##suffix f = {(real *)u->value, (real *)u->grad, (real *)u->state0, (real *)u->state1, (real)u->rate,   \
            (real)u->beta1, (real)u->one_minus_beta1, (real)u->beta2, (real)u->one_minus_beta2,                                    \
            (real)u->inv_sqrt_bias_correction2, (real)u->eps, (real)u->decay_factor, (real)u->decay, (real)scale,                  \
            (real)(u->grad_scale_at ? (double)*u->grad_scale_at : grad_scale), u->first, u->nesterov, u->kind == DDP_UPDATE_LAMB}; \
        size_t lanes = DDP__UPDATE_BYTES / sizeof(real), whole = u->count / lanes * lanes, rest = u->count - whole;                \
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

static void ddp__host_update(const ddp_update *u) {
    if (u->dtype == DDP_F32) ddp__update_f32(u);
    else ddp__update_f64(u);
}

static void ddp__host_scale(void *data, size_t count, ddp_dtype dtype, const float *factor) { ddp_device_cpu()->scale(data, count, dtype, *factor); }

static void ddp__host_clip(const ddp_exact_sum *sum, float limit, float *factor, float *norm) {
    *norm = (float)sqrt(ddp_exact_sum_value(sum));
    *factor = *norm > limit && *norm <= 3.402823466e38f ? limit / *norm : 1;
}

/* |w| over |update| for LAMB, over |g| + weight_decay |w| for LARS. */
static void ddp__host_trust(const ddp_exact_sum *sums, size_t count, double lr, double c, double decay, double *out) {
    for (size_t i = 0; i < count; i++) {
        double value = sqrt(ddp_exact_sum_value(sums + 2 * i)), grad = sqrt(ddp_exact_sum_value(sums + 2 * i + 1)), decayed = decay * value;
        DDP__ROUNDED(decayed);
        out[i] = lr;
        if (value != 0 && grad != 0) out[i] *= c * value / (decay < 0 ? grad : grad + decayed);
    }
}

#define DDP_X(name, arguments) ddp__host_##name,
static const ddp_optimizer_kernels ddp__host_kernels = {DDP_VERSION, DDP_OPTIMIZER_KERNELS(DDP_X)};
#undef DDP_X
static const ddp_optimizer_kernels *ddp__kernels_of(const ddp_device *device) { return device->optimizer ? device->optimizer : &ddp__host_kernels; }

#if !defined(DDP__HOST_PIECE)
#define DDP__HOST_PIECE ((size_t)1 << 20) /* elements that travel at once between a device and an optimizer on the host */
#endif

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
    const ddp_optimizer_kernels *kernels; /* of device */
    const ddp_device *wire;       /* of shard_group */
    ddp__optimizer_param *params;
    int state_count;              /* tensors of state of each parameter */
    int square_count;             /* the same on all ranks of shard_group, whichever rows they have */
    int64_t step;
    void *state;                  /* one allocation */
    ddp_exact_sum *squares;       /* on the device */
    ddp_exact_sum *sent;          /* those that travel: on the device of shard_group; squares where that is the same one */
    ddp_result (*piece_fn)(void *user, int param, size_t from, size_t count, int stepped); /* NULL, or called before and after elements from to from + count of a
                                     parameter are stepped; its user is desc.state_user */
    double *rates;                /* on the device: lr times the trust ratio of each pair of squares */
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
    const ddp_optimizer_kernels *kernels = ddp_group_device(group)->optimizer;
    DDP_TRY(ddp_check_kernels(group, "ddp_optimizer_create", kernels ? &kernels->version : NULL, "ddp_fsdp.h"));
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
    return DDP_OK;
}

/* Looks at parameter i, and finds earlier uses of its value: rows that are not there are the same memory by accident. */
static ddp_result ddp__optimizer_take(ddp_optimizer *o, int i) {
    ddp_group *group = o->group;
    const ddp_param *param = &o->desc.params[i];
    ddp__optimizer_param *p = &o->params[i];
    const char *name = param->name ? param->name : "";
    int64_t count = ddp_tensor_count(&param->value);
    ddp_tensor grad = ddp_param_grad(param);
    DDP__OPTIMIZER_NEED(param->value.dtype == DDP_F32 || param->value.dtype == DDP_F64, "params[%d] \"%s\" is %s; only f32 and f64 are updated", i, name,
                        ddp_dtype_name(param->value.dtype));
    DDP__OPTIMIZER_NEED(count >= 0, "params[%d] \"%s\": value.ndim=%d or its shape is wrong", i, name, param->value.ndim);
    DDP__OPTIMIZER_NEED(!count || param->value.data, "params[%d] \"%s\": value.data is NULL", i, name);
    DDP__OPTIMIZER_NEED(!count || param->grad.data, "params[%d] \"%s\" has no gradient: grad.data is NULL", i, name);
    DDP__OPTIMIZER_NEED(grad.dtype == param->value.dtype, "params[%d] \"%s\" is %s, but its gradient %s; they have to be alike", i, name,
                        ddp_dtype_name(param->value.dtype), ddp_dtype_name(grad.dtype));
    DDP__OPTIMIZER_NEED(ddp_tensor_count(&grad) == count, "params[%d] \"%s\" has %lld elements, but its gradient %lld", i, name, (long long)count,
                        (long long)ddp_tensor_count(&grad));
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
            used += ddp_round_up(o->params[i].count * ddp_dtype_size(o->desc.params[i].value.dtype), 64);
        }
    return used;
}

static ddp_result ddp__optimizer_build(ddp_optimizer *o) {
    const ddp_optimizer_desc *d = &o->desc;
    ddp_group *group = o->group;
    void *memory;
    DDP_TRY(ddp__optimizer_resolve(group, &o->desc));
    DDP__OPTIMIZER_NEED(d->params && d->param_count > 0, "param_count=%d or params is NULL; pass the array of parameters to update", d->param_count);
    DDP__OPTIMIZER_NEED(!d->state_alloc_fn == !d->state_free_fn, "set both state_alloc_fn and state_free_fn, or neither");
    o->wire = o->desc.shard_group ? ddp_group_device(o->desc.shard_group) : o->device;
    o->state_count = ddp__optimizer_is_adam(&o->desc) ? 2 : o->desc.momentum != 0;
    o->params = (ddp__optimizer_param *)ddp_host_alloc(o->group, (size_t)o->desc.param_count * sizeof *o->params);
    if (!o->params) return DDP_ERR_NO_MEMORY;
    memset(o->params, 0, (size_t)o->desc.param_count * sizeof *o->params);
    for (int i = 0; i < o->desc.param_count; i++) DDP_TRY(ddp__optimizer_take(o, i));
    size_t bytes = ddp__optimizer_place(o, NULL);
    if (bytes && !o->desc.state_alloc_fn) DDP_TRY(o->device->alloc(o->group, bytes, &o->state));
    else if (bytes) o->state = o->desc.state_alloc_fn(bytes, o->desc.state_user);
    if (bytes && !o->state) return ddp_fail(DDP_ERR_NO_MEMORY, "ddp_optimizer_create: state_alloc_fn gave no memory for %llu bytes", (unsigned long long)bytes);
    ddp__optimizer_place(o, (unsigned char *)o->state);
    if (!o->square_count) return DDP_OK;
    bytes = (size_t)o->square_count * sizeof(ddp_exact_sum);
    DDP_TRY(o->device->alloc(o->group, bytes + (size_t)o->square_count / 2 * sizeof *o->rates, &memory));
    o->squares = o->sent = (ddp_exact_sum *)memory;
    o->rates = (double *)(void *)(o->squares + o->square_count);
    if (o->wire == o->device) return DDP_OK;
    o->sent = NULL;
    DDP_TRY(o->wire->alloc(o->desc.shard_group, bytes, &memory));
    o->sent = (ddp_exact_sum *)memory;
    return DDP_OK;
}

DDPDEF ddp_result ddp_optimizer_create(ddp_optimizer **out, ddp_group *group, const ddp_optimizer_desc *desc) {
    DDP__FSDP_NEED(out, "out is NULL");
    *out = NULL;
    DDP__FSDP_NEED(group && desc, "group or desc is NULL");
    ddp_optimizer *o = (ddp_optimizer *)ddp_host_alloc(group, sizeof *o);
    if (!o) return DDP_ERR_NO_MEMORY;
    memset(o, 0, sizeof *o);
    o->desc = *desc;
    o->group = group;
    o->device = ddp_group_device(group);
    o->kernels = ddp__kernels_of(o->device);
    ddp_result result = ddp__optimizer_build(o);
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
    ddp_host_free(o->group, o->params);
    ddp_host_free(o->group, o);
}

/* What the step is for all tensors of one dtype: in double where that is exact, rounded to dtype as often as arithmetic in dtype would. */
static double ddp__in_dtype(ddp_dtype dtype, double x) { return dtype == DDP_F32 ? (double)(float)x : x; }

static ddp_update ddp__optimizer_factors(const ddp_optimizer *o, ddp_dtype dtype, float lr) {
    const ddp_optimizer_desc *d = &o->desc;
    int adam = ddp__optimizer_is_adam(d), lamb = d->kind == DDP_OPTIMIZER_LAMB;
    ddp_update u = DDP_ZERO;
    u.kind = lamb ? DDP_UPDATE_LAMB : adam ? DDP_UPDATE_ADAMW : DDP_UPDATE_SGD;
    u.dtype = dtype;
    u.scale = 1;
    u.beta1 = adam ? d->beta1 : d->momentum;
    u.beta2 = d->beta2;
    u.one_minus_beta1 = ddp__in_dtype(dtype, 1.0 - (double)(adam ? d->beta1 : d->dampening));
    u.one_minus_beta2 = ddp__in_dtype(dtype, 1.0 - u.beta2);
    u.rate = adam ? ddp__in_dtype(dtype, (lamb ? 1.0 : lr) / (1.0 - pow(u.beta1, (double)o->step))) : lr;
    u.inv_sqrt_bias_correction2 = ddp__in_dtype(dtype, 1.0 / sqrt(1.0 - pow(u.beta2, (double)o->step)));
    u.eps = d->eps;
    u.first = o->step == 1;
    u.nesterov = d->nesterov && d->kind == DDP_OPTIMIZER_SGD;
    return u;
}

static int ddp__optimizer_steps(const ddp_optimizer *o, int i) { return o->params[i].first_use == i && o->params[i].count > 0; }

/* Sums of squares of all values and gradients (LAMB: updates) that have a trust ratio, over all ranks: rows add exactly. Then rates. */
static ddp_result ddp__optimizer_norms(ddp_optimizer *o, float lr) {
    size_t bytes = (size_t)o->square_count * sizeof(ddp_exact_sum);
    o->device->fill_zero(o->squares, bytes);
    for (int i = 0; i < o->desc.param_count; i++) {
        const ddp__optimizer_param *p = &o->params[i];
        const ddp_param *param = &o->desc.params[i];
        if (p->squares < 0 || !ddp__optimizer_steps(o, i)) continue;
        o->device->sum_squares(o->squares + p->squares, param->value.data, p->rows, p->count / p->rows, param->value.dtype);
        o->device->sum_squares(o->squares + p->squares + 1, param->grad.data, p->rows, p->count / p->rows, param->value.dtype);
    }
    void (*copy)(void *, const void *, size_t) = (o->device->use_stream ? o->device : o->wire)->copy; /* from the one device to the other */
    if (o->sent != o->squares) copy(o->sent, o->squares, bytes);
    if (o->desc.shard_group) {
        DDP_TRY(ddp_all_reduce(o->desc.shard_group, o->sent, o->sent, bytes / sizeof(int64_t), DDP_I64, DDP_OP_SUM, NULL));
        DDP_TRY(ddp__fsdp_enter(o->desc.shard_group));
    }
    if (o->sent != o->squares) copy(o->squares, o->sent, bytes);
    DDP_TRY(ddp__fsdp_enter(o->group));
    o->kernels->trust(o->squares, (size_t)o->square_count / 2, (double)lr, (double)o->desc.trust_coefficient,
                      o->desc.kind == DDP_OPTIMIZER_LARS ? (double)o->desc.weight_decay : -1, o->rates);
    return DDP_OK;
}

/* A pass over parameter i; *u is what all have in common. LAMB has two: moments and update, then a step of plain SGD along the update. In LARS the rate is
   part of what the momentum adds up, as in the paper. */
static ddp_result ddp__optimizer_pass(const ddp_optimizer *o, int i, ddp_update u, float lr, int last) {
    const ddp_param *param = &o->desc.params[i];
    const ddp__optimizer_param *p = &o->params[i];
    int lamb = o->desc.kind == DDP_OPTIMIZER_LAMB;
    size_t piece = o->piece_fn ? DDP__HOST_PIECE : p->count, size = ddp_dtype_size(u.dtype);
    if (!o->desc.decay_matrices_only || param->value.ndim > 1) u.decay = (double)o->desc.weight_decay;
    u.decay_factor = ddp__in_dtype(u.dtype, 1.0 - ddp__in_dtype(u.dtype, (double)lr * u.decay));
    u.state0 = p->state[0];
    u.state1 = p->state[1];
    if (lamb && last) {
        u.kind = DDP_UPDATE_SGD;
        u.decay = 0;
        u.state0 = NULL;
    }
    if (last && ddp__optimizer_has_trust(&o->desc)) {
        u.scale = lr;
        u.rate = 1;
        if (p->squares >= 0) u.scale_at = o->rates + p->squares / 2;
    }
    for (size_t from = 0; from < p->count; from += piece) {
        ddp_update part = u;
        part.count = p->count - from < piece ? p->count - from : piece;
        part.value = (char *)param->value.data + from * size;
        part.grad = (char *)param->grad.data + from * size;
        if (u.state0) part.state0 = (char *)u.state0 + from * size;
        if (u.state1) part.state1 = (char *)u.state1 + from * size;
        if (o->piece_fn && !(lamb && last)) DDP_TRY(o->piece_fn(o->desc.state_user, i, from, part.count, 0));
        o->kernels->update(&part);
        if (o->piece_fn && last) DDP_TRY(o->piece_fn(o->desc.state_user, i, from, part.count, 1));
    }
    return DDP_OK;
}

/* Gradients times factor, or times what lies at `at` on the device. */
static void ddp__grad_scale(const ddp_device *device, void *grad, size_t count, ddp_dtype dtype, float factor, const float *at) {
    if (at) ddp__kernels_of(device)->scale(grad, count, dtype, at);
    else if (factor != 1) device->scale(grad, count, dtype, factor);
}

#define DDP__STEP_NEED(condition, ...) do { if (!(condition)) return ddp__fsdp_bad("ddp_optimizer_step", NULL, __VA_ARGS__); } while (0)

/* at: NULL, or where the device has grad_scale. */
static ddp_result ddp__optimizer_step(ddp_optimizer *o, float lr, float grad_scale, const float *at) {
    ddp_update common[2];
    DDP__STEP_NEED(o, "optimizer is NULL");
    DDP__STEP_NEED(ddp__is_amount(lr), "lr=%g; pass 0 or more", (double)lr);
    DDP__STEP_NEED(grad_scale > 0 && ddp__is_amount((double)grad_scale), "grad_scale=%g; pass a positive number, 1 for none", (double)grad_scale);
    for (int i = 0; i < o->desc.param_count; i++)
        DDP__STEP_NEED(!o->params[i].count || (o->desc.params[i].value.data && o->desc.params[i].grad.data), "params[%d] \"%s\" has no %s", i,
                       o->desc.params[i].name ? o->desc.params[i].name : "", o->desc.params[i].value.data ? "gradient" : "values");
    DDP_TRY(ddp__fsdp_enter(o->group));
    for (int i = 0; i < o->desc.param_count; i++) {
        void *first = o->desc.params[o->params[i].first_use].grad.data;
        if (o->params[i].first_use != i) o->device->add(first, first, o->desc.params[i].grad.data, o->params[i].count, o->desc.params[i].value.dtype);
    }
    for (int i = 0; i < o->desc.param_count && o->desc.kind == DDP_OPTIMIZER_LARS; i++)
        if (ddp__optimizer_steps(o, i)) ddp__grad_scale(o->device, o->desc.params[i].grad.data, o->params[i].count, o->desc.params[i].value.dtype, grad_scale, at);
    o->step++;
    common[0] = ddp__optimizer_factors(o, DDP_F32, lr);
    common[1] = ddp__optimizer_factors(o, DDP_F64, lr);
    for (int last = o->desc.kind != DDP_OPTIMIZER_LAMB; last < 2; last++) {
        int scaled = o->desc.kind == DDP_OPTIMIZER_LARS || (last && o->desc.kind == DDP_OPTIMIZER_LAMB);
        common[0].grad_scale = common[1].grad_scale = scaled ? 1 : grad_scale;
        common[0].grad_scale_at = common[1].grad_scale_at = scaled ? NULL : at;
        if (last && o->square_count) DDP_TRY(ddp__optimizer_norms(o, lr));
        for (int i = 0; i < o->desc.param_count; i++)
            if (ddp__optimizer_steps(o, i)) DDP_TRY(ddp__optimizer_pass(o, i, common[o->desc.params[i].value.dtype == DDP_F64], lr, last));
    }
    return ddp__fsdp_check(o->group);
}

DDPDEF ddp_result ddp_optimizer_step(ddp_optimizer *optimizer, float lr) {
    DDP_PUBLIC_CALL(ddp_optimizer_step);
    return ddp__optimizer_step(optimizer, lr, 1, NULL);
}
DDPDEF ddp_result ddp_optimizer_step_scaled(ddp_optimizer *optimizer, float lr, float grad_scale) {
    DDP_PUBLIC_CALL(ddp_optimizer_step_scaled);
    return ddp__optimizer_step(optimizer, lr, grad_scale, NULL);
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
DDPDEF void ddp_optimizer_set_step(ddp_optimizer *optimizer, int64_t step) { if (optimizer) optimizer->step = step > 0 ? step : 0; }

//== learning rates ==================================================================================== >>impl-rates

#define DDP__LR_NEED(condition, ...) do { if (!(condition)) return ddp__fsdp_bad("ddp_lr_at", NULL, __VA_ARGS__); } while (0)
static ddp_result ddp__lr_check(const ddp_lr_desc *desc) {
    DDP__LR_NEED(desc, "desc is NULL");
    DDP__LR_NEED((unsigned)desc->kind <= DDP_LR_WSD, "kind=%d is not one of ddp_lr_kind", (int)desc->kind);
    DDP__LR_NEED(desc->max_lr > 0 && ddp__is_amount(desc->max_lr), "max_lr=%g; pass a positive number", desc->max_lr);
    DDP__LR_NEED(desc->min_lr >= 0 && desc->min_lr <= desc->max_lr, "min_lr=%g; pass 0 to max_lr=%g", desc->min_lr, desc->max_lr);
    DDP__LR_NEED(desc->batch >= 0 && desc->base_batch >= 0 && !desc->batch == !desc->base_batch, "batch=%lld and base_batch=%lld; give both, or neither",
                 (long long)desc->batch, (long long)desc->base_batch);
    DDP__LR_NEED(desc->warmup_steps >= 0, "warmup_steps=%lld; pass 0 or more", (long long)desc->warmup_steps);
    if (desc->kind == DDP_LR_CONSTANT) return DDP_OK;
    DDP__LR_NEED(desc->total_steps >= 1, "total_steps=%lld; pass how many steps there are", (long long)desc->total_steps);
    int64_t after = desc->total_steps - desc->warmup_steps;
    DDP__LR_NEED(after >= 0, "warmup_steps=%lld is more than total_steps=%lld", (long long)desc->warmup_steps, (long long)desc->total_steps);
    DDP__LR_NEED(desc->kind != DDP_LR_WSD || (desc->decay_steps >= 0 && desc->decay_steps <= after),
                 "decay_steps=%lld; pass 0 to %lld, the steps after the warm-up", (long long)desc->decay_steps, (long long)after);
    DDP__LR_NEED(desc->kind != DDP_LR_POLYNOMIAL || ddp__is_amount((double)desc->power), "power=%g; pass a positive number", (double)desc->power);
    return DDP_OK;
}

DDPDEF float ddp_lr_at(const ddp_lr_desc *desc, int64_t step) {
    if (ddp__lr_check(desc) != DDP_OK) return 0;
    int64_t warm = desc->warmup_steps, total = desc->total_steps, decay = total - warm;
    double grown = desc->batch ? (double)desc->batch / (double)desc->base_batch : 1, peak = desc->max_lr * grown, low = desc->min_lr * grown;
    if (step < 0) step = 0;
    if (step <= warm && warm) return (float)(peak * (double)step / (double)warm);
    if (desc->kind == DDP_LR_CONSTANT) return (float)peak;
    if (step > total) return (float)low;
    if (desc->kind == DDP_LR_COSINE) {
        double share = low / peak;
        return (float)(peak * (0.5 * (1 + share) + 0.5 * (1 - share) * cos(3.14159265358979323846 * (double)(step - warm) / (double)(total - warm))));
    }
    if (desc->kind == DDP_LR_WSD && (desc->decay_steps || total / 10 < decay)) decay = desc->decay_steps ? desc->decay_steps : total < 10 ? 1 : total / 10;
    if (step <= total - decay) return (float)peak;
    double power = desc->kind == DDP_LR_POLYNOMIAL && desc->power != 0 ? (double)desc->power : 1, left = (double)(total - step) / (double)decay;
    left = (peak - low) * (power == 1 ? left : pow(left, power));
    DDP__ROUNDED(left);
    return (float)(low + left);
}

//== loss scaling ===================================================================================== >>impl-scaler

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
    scaler->desc = d, scaler->scale = d.init_scale;
    return DDP_OK;
}

DDPDEF float ddp_scaler_scale(const ddp_scaler *scaler) { return scaler ? scaler->scale : 0; }
DDPDEF int ddp_scaler_found_inf(const ddp_scaler *scaler) { return scaler ? scaler->found_inf : 0; }

/* Whether all bits of the exponent, mask, are set in one of count elements: adding its lowest bit then reaches the sign's. */
#define DDP__NON_FINITE_FN(word, suffix)                                                             \
    typedef word __attribute__((may_alias, aligned(1))) ddp__exponent_##suffix;                      \
    static int ddp__non_finite_##suffix(const void *data, size_t count, word mask) {                 \
        const ddp__exponent_##suffix *x = (const ddp__exponent_##suffix *)data;                      \
        word lowest = (word)(mask & (~mask + 1)), seen = 0;                                          \
        for (; count >= 64; count -= 64, x += 64) /* a fixed number of them: compilers see vectors */ \
            for (int i = 0; i < 64; i++) seen |= (word)((x[i] & mask) + lowest);                     \
        for (size_t i = 0; i < count; i++) seen |= (word)((x[i] & mask) + lowest);                   \
        return (int)(seen >> (suffix - 1) & 1);                                                      \
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

/* scratch: the device's memory for an exact sum, NULL on the CPU. On a device the sum of squares tells: finite if all elements are (f64: below 1e154). */
static ddp_result ddp__scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients, int gradient_count, void *scratch) {
    const ddp_device *device = ddp_group_device(group);
    float inverse = (float)(1.0 / (double)scaler->scale);
    ddp_exact_sum sum;
    int32_t found = 0;
    if (scratch) device->fill_zero(scratch, sizeof sum);
    for (const ddp_tensor *g = gradients; g < gradients + gradient_count; g++) {
        size_t count = (size_t)ddp_tensor_count(g);
        if (!scratch) found |= ddp__unscale_host(g, count, inverse);
        if (!scratch || !count) continue;
        if (inverse != 1) device->scale(g->data, count, g->dtype, inverse);
        device->sum_squares((ddp_exact_sum *)scratch, g->data, 1, count, g->dtype);
    }
    if (scratch) {
        device->copy(&sum, scratch, sizeof sum);
        double squares = ddp_exact_sum_value(&sum);
        found = !(squares - squares == 0);
        DDP_TRY(ddp__fsdp_check(group));
    }
    for (int i = 0; i < scaler->desc.group_count; i++) /* what one of them found reaches the members of the next one */
        DDP_TRY(ddp__host_reduce(scaler->desc.groups[i], &found, 1, DDP_I32, DDP_OP_MAX));
    scaler->found_inf = found, scaler->unscaled = 1;
    return DDP_OK;
}

DDPDEF ddp_result ddp_scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients, int gradient_count) {
    DDP_PUBLIC_CALL(ddp_scaler_unscale);
    void *scratch = NULL;
    DDP__FSDP_NEED(scaler && group, "scaler or group is NULL");
    DDP__FSDP_NEED(gradient_count >= 0 && (gradients || !gradient_count), "gradient_count=%d, and gradients is NULL or the count negative", gradient_count);
    DDP__FSDP_NEED(scaler->scale > 0,
                   "the scale is 0: ddp_scaler_init has not been called, or no step of many was finite");
    DDP__FSDP_NEED(!scaler->unscaled, "gradients have been unscaled since the last ddp_scaler_update; once per update");
    for (int i = 0; i < gradient_count; i++) {
        ddp_dtype dtype = gradients[i].dtype;
        DDP__FSDP_NEED(dtype >= DDP_F32 && dtype <= DDP_BF16, "gradients[%d] is %s; only floats have a scale", i, ddp_dtype_name(dtype));
        DDP__FSDP_NEED(ddp_tensor_count(&gradients[i]) >= 0, "gradients[%d]: ndim=%d or its shape is wrong", i, gradients[i].ndim);
        DDP__FSDP_NEED(gradients[i].data || !ddp_tensor_count(&gradients[i]), "gradients[%d].data is NULL", i);
    }
    const ddp_device *device = ddp_group_device(group);
    DDP_TRY(ddp__fsdp_enter(group));
    if (device != ddp_device_cpu()) DDP_TRY(device->alloc(group, sizeof(ddp_exact_sum), &scratch));
    ddp_result result = ddp__scaler_unscale(scaler, group, gradients, gradient_count, scratch);
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
    state->scale = (double)scaler->scale, state->growth_tracker = scaler->growth_tracker;
}

DDPDEF ddp_result ddp_scaler_load(ddp_scaler *scaler, const ddp_scaler_state *state) {
    DDP__FSDP_NEED(scaler && state, "scaler or state is NULL");
    DDP__FSDP_NEED(scaler->desc.growth_interval > 0, "the scaler has no desc; call ddp_scaler_init first");
    if (!ddp__is_amount(state->scale) || (double)(float)state->scale != state->scale || state->growth_tracker < 0 || state->growth_tracker > INT32_MAX - 1)
        return ddp_fail(DDP_ERR_CORRUPT, "ddp_scaler_load: scale=%g growth_tracker=%lld is nothing that ddp_scaler_save writes", state->scale,
                        (long long)state->growth_tracker);
    scaler->scale = (float)state->scale;
    scaler->growth_tracker = (int)state->growth_tracker;
    scaler->unscaled = scaler->found_inf = 0;
    return DDP_OK;
}

//== checksums =========================================================================================== >>impl-crc
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

/* CRC-32C (Castagnoli): remainders of polynomials over GF(2), bits reversed, so bit 31 is x^0. Without the customary inversion of the first and the last value
   they are linear: the remainder of a tensor is the xor of those of its runs, each times x^(8 * bytes behind the run), whoever computed them, in any order. */
#define DDP__CRC_ONE 0x80000000u

static uint32_t ddp__crc_step(uint32_t remainder) { return (remainder >> 1) ^ (0x82f63b78u & (0u - (remainder & 1u))); }

static uint32_t ddp__crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1, b = ddp__crc_step(b)) product ^= b & (0u - (a >> 31));
    return product;
}

/* x^(8 * size_bytes): what a remainder is multiplied by when so many zero bytes follow. */
static uint32_t ddp__crc_shift(uint64_t size_bytes) {
    uint32_t power = DDP__CRC_ONE, square = DDP__CRC_ONE >> 8;
    for (; size_bytes; size_bytes >>= 1, square = ddp__crc_multiply(square, square))
        if (size_bytes & 1) power = ddp__crc_multiply(square, power);
    return power;
}

/* By a table, which is made anew: 2 microseconds. */
static uint32_t ddp__crc_portable(uint32_t remainder, const unsigned char *data, size_t size) {
    uint32_t table[256];
    for (uint32_t i = 0; i < 256 && size; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = ddp__crc_step(table[i]);
    }
    for (; size; size--) remainder = (remainder >> 8) ^ table[(remainder ^ *data++) & 255];
    return remainder;
}

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(DDP__CRC_PORTABLE) /* a test of the other way */
#if defined(__x86_64__)
static int ddp__crc_hardware(void) { return __builtin_cpu_supports("sse4.2"); }
#define DDP__CRC_WORD(remainder, word) __asm__("crc32q %1, %0" : "+r"(remainder) : "r"(word))
#else
static int ddp__crc_hardware(void) { return (getauxval(AT_HWCAP) >> 7 & 1) != 0; } /* HWCAP_CRC32 */
#define DDP__CRC_WORD(remainder, word) __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(remainder) : "r"(word))
#endif

static uint64_t ddp__crc_load(const unsigned char *data) { uint64_t word; memcpy(&word, data, sizeof word); return word; }

/* An instruction takes three cycles and one can start in each: three lanes at once, of 16 KiB, then of 1 KiB. */
static uint32_t ddp__crc_lanes(uint32_t remainder, const unsigned char *data, size_t size) {
    uint64_t last = remainder;
    for (int small = 0; small < 2; small++) {
        size_t lane = small ? 1024 : 16384;
        uint32_t shift = small ? 0xe4172b16u : 0xbf455269u; /* x^(8 * lane) */
        for (; size >= 3 * lane; size -= 3 * lane, data += 3 * lane) {
            uint64_t first = last, second = 0, third = 0;
            for (size_t i = 0; i < lane; i += 8) {
                DDP__CRC_WORD(first, ddp__crc_load(data + i));
                DDP__CRC_WORD(second, ddp__crc_load(data + lane + i));
                DDP__CRC_WORD(third, ddp__crc_load(data + 2 * lane + i));
            }
            last = ddp__crc_multiply(shift, ddp__crc_multiply(shift, (uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
        }
    }
    for (; size >= 8; size -= 8, data += 8) DDP__CRC_WORD(last, ddp__crc_load(data));
    return ddp__crc_portable((uint32_t)last, data, size);
}
#else
static int ddp__crc_hardware(void) { return 0; }
#define ddp__crc_lanes ddp__crc_portable
#endif

/* The remainder once size more bytes have followed; 0 before the first one. */
static uint32_t ddp__crc_feed(uint32_t remainder, const void *data, size_t size) {
    return (ddp__crc_hardware() ? ddp__crc_lanes : ddp__crc_portable)(remainder, (const unsigned char *)data, size);
}

/* The CRC-32C of size_bytes bytes with that remainder. */
static uint32_t ddp__crc_finish(uint32_t remainder, uint64_t size_bytes) { return ~(remainder ^ ddp__crc_multiply(ddp__crc_shift(size_bytes), 0xffffffffu)); }
static uint32_t ddp__crc32c(const void *data, size_t size) { return ~ddp__crc_feed(0xffffffffu, data, size); }

/* Collective: crc becomes the xor over ranks. A byte for each bit: the lowest bit of a sum of bits is their xor. */
static ddp_result ddp__crc_combine(ddp_group *group, uint32_t *crc, int count) {
    unsigned char bits[1024];
    for (int first = 0; first < count; first += 32) {
        int n = count - first < 32 ? count - first : 32;
        for (int b = 0; b < n * 32; b++) bits[b] = (unsigned char)(crc[first + b / 32] >> b % 32 & 1);
        DDP_TRY(ddp__host_reduce(group, bits, (size_t)n * 32, DDP_U8, DDP_OP_SUM));
        memset(crc + first, 0, (size_t)n * sizeof *crc);
        for (int b = 0; b < n * 32; b++) crc[first + b / 32] |= (uint32_t)(bits[b] & 1) << b % 32;
    }
    return DDP_OK;
}

//== JSON =============================================================================================== >>impl-json

/* A string of a text: zero-terminated, where it has no zeros of its own. */
typedef struct ddp__words { const char *at; size_t length; } ddp__words;

/* Reads the text [at, end) front to back, and never beyond. Strings are decoded where they lie. Every function gives 0 once something was wrong, and error and
   at then tell what and where. */
typedef struct ddp__json { char *begin, *at, *end; const char *error; int depth; } ddp__json;

static ddp__json ddp__json_of(char *text, size_t length) { ddp__json json = {text, text, text + length, NULL, 0}; return json; }

static int ddp__json_fail(ddp__json *j, const char *what) {
    if (!j->error) j->error = what;
    return 0;
}

/* The next character that is no white space; 0 at the end. */
static char ddp__json_peek(ddp__json *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t')) j->at++;
    return j->at < j->end ? *j->at : '\0';
}

static int ddp__json_take(ddp__json *j, char c) {
    if (j->error || ddp__json_peek(j) != c) return 0;
    j->at++;
    return 1;
}

static int ddp__json_need(ddp__json *j, char c, const char *what) { return ddp__json_take(j, c) ? 1 : ddp__json_fail(j, what); }

/* Bytes of the UTF-8 character at the start of [at, end), 0 when there is none: too long a form, a surrogate, beyond U+10FFFF, cut off. */
static int ddp__utf8_length(const char *at, const char *end) {
    const unsigned char *c = (const unsigned char *)at;
    int length = c[0] < 0x80 ? 1 : c[0] >= 0xc2 && c[0] <= 0xdf ? 2 : (c[0] & 0xf0) == 0xe0 ? 3 : c[0] >= 0xf0 && c[0] <= 0xf4 ? 4 : 0;
    if (length == 0 || end - at < length) return 0;
    for (int i = 1; i < length; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    if ((c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xed && c[1] > 0x9f) || (c[0] == 0xf0 && c[1] < 0x90) || (c[0] == 0xf4 && c[1] > 0x8f)) return 0;
    return length;
}

static int ddp__json_hex4(ddp__json *j, uint32_t *value) {
    *value = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        char c = j->at < j->end ? *j->at : 0;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return ddp__json_fail(j, "four hexadecimal digits are missing");
        *value = *value << 4 | (uint32_t)digit;
    }
    return 1;
}

/* What follows a backslash, as UTF-8 at *out. It is never longer than what stood for it. */
static int ddp__json_escape(ddp__json *j, char **out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *known = j->at < j->end && *j->at ? strchr(from, *j->at) : NULL;
    uint32_t code, second = 0;
    if (known) { j->at++; *(*out)++ = to[known - from]; return 1; }
    if (j->at == j->end || *j->at++ != 'u') return ddp__json_fail(j, "an escape that JSON does not have");
    if (!ddp__json_hex4(j, &code)) return 0;
    if ((code & 0xf800) == 0xd800) { /* one of two: the first has ten bits, and the second */
        int paired = code < 0xdc00 && j->end - j->at > 2 && *j->at++ == '\\' && *j->at++ == 'u' && ddp__json_hex4(j, &second);
        if (!paired || (second & 0xfc00) != 0xdc00) return ddp__json_fail(j, "half of a surrogate pair");
        code = 0x10000 + ((code & 0x3ff) << 10) + (second & 0x3ff);
    }
    if (code < 0x80) { *(*out)++ = (char)code; return 1; }
    if (code >= 0x10000) *(*out)++ = (char)(0xf0 | code >> 18);
    if (code >= 0x800) *(*out)++ = (char)(code >= 0x10000 ? 0x80 | (code >> 12 & 63) : 0xe0 | code >> 12);
    *(*out)++ = (char)(code >= 0x800 ? 0x80 | (code >> 6 & 63) : 0xc0 | code >> 6);
    *(*out)++ = (char)(0x80 | (code & 63));
    return 1;
}

static int ddp__json_string(ddp__json *j, ddp__words *string) {
    char *out;
    if (!ddp__json_need(j, '"', "a string is missing")) return 0;
    for (string->at = out = j->at; j->at < j->end && *j->at != '"';) {
        int length = (unsigned char)*j->at < 0x20 ? 0 : ddp__utf8_length(j->at, j->end);
        if (length == 0) return ddp__json_fail(j, "a control character, or a byte that is not UTF-8");
        if (*j->at == '\\') {
            j->at++;
            if (!ddp__json_escape(j, &out)) return 0;
            continue;
        }
        memmove(out, j->at, (size_t)length);
        out += length;
        j->at += length;
    }
    if (j->at == j->end) return ddp__json_fail(j, "a string has no end");
    j->at++;
    *out = '\0'; /* where the quote was, or before */
    string->length = (size_t)(out - string->at);
    return 1;
}

static int ddp__json_digits(ddp__json *j) {
    const char *first = j->at;
    while (j->at < j->end && *j->at >= '0' && *j->at <= '9') j->at++;
    return j->at > first ? 1 : ddp__json_fail(j, "a number lacks a digit");
}

/* A number: kind 'u' = a u64 in *value, 'i' = the bits of an i64, 'n' = any, passed over. */
static int ddp__json_number(ddp__json *j, char kind, uint64_t *value) {
    int negative = ddp__json_take(j, '-');
    const char *first = j->at; /* no white space may follow a sign */
    uint64_t most = kind == 'u' ? UINT64_MAX : (uint64_t)INT64_MAX + (uint64_t)negative;
    *value = 0;
    if (j->error || !ddp__json_digits(j)) return 0;
    if (*first == '0' && j->at - first > 1) return ddp__json_fail(j, "a number starts with 0");
    for (; kind != 'n' && first < j->at; first++) {
        uint64_t digit = (uint64_t)(*first - '0');
        if (*value > (most - digit) / 10) return ddp__json_fail(j, "a number is too large");
        *value = *value * 10 + digit;
    }
    if (negative) *value = UINT64_C(0) - *value;
    if (kind == 'u' && negative) return ddp__json_fail(j, "a number is negative");
    if (kind != 'n') return j->at < j->end && (*j->at == '.' || *j->at == 'e' || *j->at == 'E') ? ddp__json_fail(j, "a number is not whole") : 1;
    if (j->at < j->end && *j->at == '.') {
        j->at++;
        if (!ddp__json_digits(j)) return 0;
    }
    if (j->at == j->end || (*j->at != 'e' && *j->at != 'E')) return 1;
    j->at++;
    if (j->at < j->end && (*j->at == '+' || *j->at == '-')) j->at++;
    return ddp__json_digits(j);
}

/* Is there another entry before the bracket closes? It is opened where *count, which counts them, is 0. */
static int ddp__json_more(ddp__json *j, const char *brackets, int *count) {
    if (*count == 0 && !ddp__json_need(j, brackets[0], *brackets == '{' ? "an object is missing" : "a list is missing")) return 0;
    if (j->error || ddp__json_take(j, brackets[1])) return 0;
    return (*count)++ == 0 || ddp__json_need(j, ',', "a comma or a closing bracket is missing");
}

/* An entry of an object; its value is next. */
static int ddp__json_entry(ddp__json *j, int *count, ddp__words *name) {
    return ddp__json_more(j, "{}", count) && ddp__json_string(j, name) && ddp__json_need(j, ':', "a colon is missing");
}

/* Passes over one value of any kind. */
static int ddp__json_skip(ddp__json *j) {
    static const char *const words[] = {"true", "false", "null"};
    ddp__words string;
    uint64_t value;
    int count = 0;
    char c = ddp__json_peek(j);
    if (c == '{' || c == '[') {
        if (j->depth++ == 64) return ddp__json_fail(j, "brackets are nested too deeply");
        while (c == '{' ? ddp__json_entry(j, &count, &string) : ddp__json_more(j, "[]", &count)) (void)ddp__json_skip(j);
        j->depth--;
        return j->error == NULL;
    }
    if (c == '"') return ddp__json_string(j, &string);
    for (size_t i = 0, n; i < 3; i++)
        if (n = strlen(words[i]), (size_t)(j->end - j->at) >= n && memcmp(j->at, words[i], n) == 0) { j->at += n; return 1; }
    return c == '-' || (c >= '0' && c <= '9') ? ddp__json_number(j, 'n', &value) : ddp__json_fail(j, "a value is missing");
}

static int ddp__json_end(ddp__json *j) { return !j->error && (!ddp__json_peek(j) && j->at == j->end ? 1 : ddp__json_fail(j, "something follows the end")); }

/* Compares two records that start with a ddp__words by those. */
static int ddp__words_compare(const void *a, const void *b) {
    const ddp__words *left = (const ddp__words *)a, *right = (const ddp__words *)b;
    int order = memcmp(left->at, right->at, left->length < right->length ? left->length : right->length);
    return order ? order : (left->length > right->length) - (left->length < right->length);
}

static ddp__words ddp__words_of(const char *text) { ddp__words words = {text, strlen(text)}; return words; }
static int ddp__words_are(ddp__words words, const char *text) { return words.length == strlen(text) && memcmp(words.at, text, words.length) == 0; }

/* A text that grows; failed once there was no memory. */
typedef struct ddp__draft {
    ddp_group *group;
    char *at;
    size_t length, room;
    int failed;
} ddp__draft;

static char *ddp__draft_room(ddp__draft *d, size_t more) {
    if (!d->failed && d->room - d->length < more) {
        size_t room = (d->room + more) * 2 + 4096;
        char *grown = (char *)ddp_host_alloc(d->group, room);
        if (grown && d->length) memcpy(grown, d->at, d->length);
        ddp_host_free(d->group, d->at);
        d->failed = !grown, d->at = grown, d->room = room;
    }
    return d->failed ? NULL : d->at + d->length;
}

static __attribute__((format(printf, 2, 3))) void ddp__draft_add(ddp__draft *d, const char *format, ...) {
    char *at = ddp__draft_room(d, 512); /* longer than any format makes */
    va_list args;
    if (!at) return;
    va_start(args, format);
    d->length += (size_t)vsnprintf(at, 512, format, args);
    va_end(args);
}

/* With quotes and escapes; start is plain and stands in front. */
static void ddp__draft_string(ddp__draft *d, const char *start, const char *text) {
    ddp__draft_add(d, "\"%s", start);
    char *at = ddp__draft_room(d, 6 * strlen(text) + 2);
    for (; at && *text; text++) {
        if (*text == '"' || *text == '\\') *at++ = '\\';
        if ((unsigned char)*text < 32) at += snprintf(at, 7, "\\u%04x", *text);
        else *at++ = *text;
    }
    if (!at) return;
    *at++ = '"';
    d->length = (size_t)(at - d->at);
}

//== tensor files ================================================================================ >>impl-safetensors

#define DDP__HEADER_MAX ((uint64_t)100 << 20) /* bytes of JSON that the format allows */

/* The dtypes of the format; those without a ddp_dtype are known by size alone. */
static const struct ddp__file_dtype { const char *name; ddp_dtype dtype; int size; } ddp__file_dtypes[] = {
    {"F32", DDP_F32, 4}, {"F64", DDP_F64, 8}, {"F16", DDP_F16, 2}, {"BF16", DDP_BF16, 2}, {"I8", DDP_I8, 1}, {"U8", DDP_U8, 1}, {"I32", DDP_I32, 4},
    {"I64", DDP_I64, 8}, {"U64", DDP_U64, 8}, {"I16", DDP_DTYPE_DEFAULT, 2}, {"BOOL", DDP_DTYPE_DEFAULT, 1}, {"U16", DDP_DTYPE_DEFAULT, 2},
    {"U32", DDP_DTYPE_DEFAULT, 4}, {"F8_E4M3", DDP_DTYPE_DEFAULT, 1}, {"F8_E5M2", DDP_DTYPE_DEFAULT, 1}, {"C64", DDP_DTYPE_DEFAULT, 8}};
#define DDP__FILE_DTYPES ((int)(sizeof ddp__file_dtypes / sizeof ddp__file_dtypes[0]))

/* The name of a ddp_dtype, or NULL. */
static const char *ddp__file_dtype_name(ddp_dtype dtype) {
    for (int i = 0; i < DDP__FILE_DTYPES; i++)
        if (ddp__file_dtypes[i].dtype == dtype && dtype != DDP_DTYPE_DEFAULT) return ddp__file_dtypes[i].name;
    return NULL;
}

/* A tensor as a file's header describes it. */
typedef struct ddp__stored {
    ddp__words name;
    const struct ddp__file_dtype *dtype;
    int ndim;                    /* may be more than DDP_MAX_NDIM: then shape has the first ones */
    int64_t shape[DDP_MAX_NDIM];
    uint64_t count;              /* elements */
    uint64_t begin, end;         /* bytes, from the end of the header */
    uint32_t crc;
    int has_crc;
} ddp__stored;

/* A header that has been read: records by name. Names lie in its text. */
typedef struct ddp__header { ddp__stored *records; int count; } ddp__header;

typedef struct ddp__pair { ddp__words key, value; } ddp__pair;

static int ddp__stored_compare_place(const void *a, const void *b) {
    const ddp__stored *left = (const ddp__stored *)a, *right = (const ddp__stored *)b;
    int order = (left->begin > right->begin) - (left->begin < right->begin);
    return order ? order : (left->end > right->end) - (left->end < right->end);
}

static ddp__stored *ddp__stored_find(const ddp__header *header, ddp__words name) {
    return header->count == 0 ? NULL : (ddp__stored *)bsearch(&name, header->records, (size_t)header->count, sizeof *header->records, ddp__words_compare);
}

/* An error of a tensor, with its byte range in the file, whose data start at data_at. The name cannot break the line. */
static ddp_result ddp__stored_fail(ddp_result result, const char *path, uint64_t data_at, const ddp__stored *r, const char *what) {
    char name[100];
    snprintf(name, sizeof name, "%s", r->name.at);
    for (char *c = name; *c; c++) if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    return ddp_fail(result, "%s: tensor '%s' at bytes [%llu, %llu) of the file %s", path, name, (unsigned long long)(data_at + r->begin),
                    (unsigned long long)(data_at + r->end), what);
}

/* {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, in any order. */
static int ddp__stored_read(ddp__json *j, ddp__stored *r) {
    static const char *const names[] = {"dtype", "shape", "data_offsets"};
    static const char wrong[] = "a tensor has dtype, shape and data_offsets, each once";
    const uint64_t most = (uint64_t)INT64_MAX / 16;
    ddp__words word;
    uint64_t value;
    int keys = 0, seen = 0;
    r->count = 1;
    while (ddp__json_entry(j, &keys, &word)) {
        int which = 0, count = 0;
        while (which < 3 && !ddp__words_are(word, names[which])) which++;
        if (which == 3 || (seen >> which & 1)) return ddp__json_fail(j, wrong);
        seen |= 1 << which;
        if (which == 0) {
            if (!ddp__json_string(j, &word)) return 0;
            for (int i = 0; i < DDP__FILE_DTYPES; i++) if (ddp__words_are(word, ddp__file_dtypes[i].name)) r->dtype = &ddp__file_dtypes[i];
            if (!r->dtype) return ddp__json_fail(j, "a dtype that is not known");
            continue;
        }
        while (ddp__json_more(j, "[]", &count)) {
            if (!ddp__json_number(j, 'u', &value)) return 0;
            if (which == 2) { *(count == 1 ? &r->begin : &r->end) = value; continue; }
            if (value > most || (value && r->count > most / value)) return ddp__json_fail(j, "a shape is too large");
            r->count *= value;
            if (r->ndim++ < DDP_MAX_NDIM) r->shape[r->ndim - 1] = (int64_t)value;
        }
        if (which == 2 && count != 2) return ddp__json_fail(j, "data_offsets are two numbers");
    }
    return seen == 7 ? 1 : ddp__json_fail(j, wrong);
}

/* Eight hexadecimal digits. */
static int ddp__hex_read(ddp__words word, uint32_t *value) {
    ddp__json digits = ddp__json_of((char *)(uintptr_t)word.at, word.length);
    uint32_t low;
    if (word.length != 8 || !ddp__json_hex4(&digits, value) || !ddp__json_hex4(&digits, &low)) return 0;
    *value = *value << 16 | low;
    return 1;
}

/* Tensors fill the data without overlap or hole, and are as large as dtype and shape say; then by name. "crc32c:name" in the metadata tells a checksum. */
static ddp_result ddp__header_check(const char *path, uint64_t data_at, uint64_t data_bytes, ddp__header *header, const ddp__pair *pairs, int pair_count) {
    ddp__stored *r = header->records;
    uint64_t at = 0;
    qsort(r, (size_t)header->count, sizeof *r, ddp__stored_compare_place);
    for (int i = 0; i < header->count; at = r[i++].end) {
        const char *what = r[i].end < r[i].begin || r[i].end > data_bytes ? "lies outside of the file"
                         : r[i].end - r[i].begin != r[i].count * (uint64_t)r[i].dtype->size ? "is not as large as its dtype and shape say"
                         : r[i].begin < at ? "overlaps the one before it" : r[i].begin > at ? "has a hole before it" : NULL;
        if (what) return ddp__stored_fail(DDP_ERR_CORRUPT, path, data_at, &r[i], what);
    }
    if (at != data_bytes)
        return ddp_fail(DDP_ERR_CORRUPT, "%s: the tensors end at byte %llu of the data, which has %llu", path, (unsigned long long)at, (unsigned long long)data_bytes);
    qsort(r, (size_t)header->count, sizeof *r, ddp__words_compare);
    for (int i = 1; i < header->count; i++)
        if (ddp__words_compare(&r[i - 1], &r[i]) == 0) return ddp__stored_fail(DDP_ERR_CORRUPT, path, data_at, &r[i], "has a name that is there twice");
    for (int i = 0; i < pair_count; i++) {
        ddp__words name = pairs[i].key;
        if (name.length < 7 || memcmp(name.at, "crc32c:", 7) != 0) continue;
        name.at += 7;
        name.length -= 7;
        r = ddp__stored_find(header, name);
        if (r && !ddp__hex_read(pairs[i].value, &r->crc)) return ddp__stored_fail(DDP_ERR_CORRUPT, path, data_at, r, "has a checksum that is not 8 hexadecimal digits");
        if (r) r->has_crc = 1;
    }
    return DDP_OK;
}

/* Reads the header text of a file with data_bytes bytes of data. The text is changed and must outlive the records, which are the caller's to free. */
static ddp_result ddp__header_read(ddp_group *group, const char *path, char *text, size_t length, uint64_t data_bytes, ddp__header *header) {
    ddp__json j = ddp__json_of(text, length);
    ddp__pair *pairs;
    size_t colons = 1;
    int pair_count = 0, count = 0, metadata = 0;
    memset(header, 0, sizeof *header);
    for (size_t i = 0; i < length; i++) colons += text[i] == ':'; /* no more keys than colons, of which a tensor has four */
    header->records = (ddp__stored *)ddp_host_alloc(group, (colons / 4 + 1) * sizeof *header->records);
    pairs = header->records ? (ddp__pair *)ddp_host_alloc(group, colons * sizeof *pairs) : NULL;
    if (!pairs) return DDP_ERR_NO_MEMORY;
    if (length == 0 || *text != '{') (void)ddp__json_fail(&j, "a header starts with {");
    for (ddp__words name; ddp__json_entry(&j, &count, &name);) {
        ddp__stored *record = &header->records[header->count];
        memset(record, 0, sizeof *record);
        record->name = name;
        if (!ddp__words_are(name, "__metadata__")) header->count += ddp__stored_read(&j, record);
        else if (metadata++) (void)ddp__json_fail(&j, "metadata is there twice");
        else for (int n = 0; ddp__json_entry(&j, &n, &pairs[pair_count].key);) pair_count += ddp__json_string(&j, &pairs[pair_count].value);
    }
    qsort(pairs, (size_t)pair_count, sizeof *pairs, ddp__words_compare);
    for (int i = 1; i < pair_count; i++)
        if (ddp__words_compare(&pairs[i - 1], &pairs[i]) == 0) (void)ddp__json_fail(&j, "metadata has a key twice");

    ddp_result result = ddp__json_end(&j) ? ddp__header_check(path, 8 + length, data_bytes, header, pairs, pair_count)
                      : ddp_fail(DDP_ERR_CORRUPT, "%s: the header is damaged at byte %zu: %s", path, 8 + (size_t)(j.at - j.begin), j.error);
    ddp_host_free(group, pairs);
    return result;
}

//== checkpoints: files and folders =============================================================== >>impl-files
#include <dirent.h>
#include <sys/syscall.h>

#define DDP__STATE_FILE "state.json"
#define DDP__STATE_START "{\"format\": \"ddp checkpoint\""
#define DDP__DIR_MAX 1000                  /* bytes of a folder's path, ... */
#define DDP__PATH_MAX (DDP__DIR_MAX + 300) /* ... and of a path in it */

static const char *const ddp__kind_names[2] = {"model", "optimizer"};

static ddp_result ddp__file_fail(const char *what, const char *path) {
    int error = errno;
    return ddp_fail(DDP_ERR_SYSTEM, "%s %s: %s (errno %d)", what, path, strerror(error), error);
}

/* Opens a regular file of a folder, and nothing else: a FIFO would wait for its other end, and a symbolic
   link or a device lets others choose what is read or overwritten. Leaves the path in path. On failure *fd is
   negative: DDP__FILE_MISSING where there is no such file. */
enum { DDP__FILE_MISSING = -2 };
static ddp_result ddp__file_open(const char *dir, const char *name, int flags, char path[DDP__PATH_MAX], int *fd) {
    const char *kind = "a device or a socket";
    struct stat info;
    snprintf(path, DDP__PATH_MAX, "%.*s/%s", DDP__DIR_MAX + 10, dir, name);
    *fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    int missing = *fd < 0 && errno == ENOENT;
    ddp_result result = *fd < 0 || fstat(*fd, &info) != 0 ? ddp__file_fail("opening", path) : DDP_OK;
    if ((result == DDP_OK || lstat(path, &info) == 0) && !S_ISREG(info.st_mode)) {
        if (S_ISLNK(info.st_mode)) kind = "a symbolic link";
        if (S_ISFIFO(info.st_mode)) kind = "a FIFO";
        if (S_ISDIR(info.st_mode)) kind = "a folder";
        result = ddp_fail(DDP_ERR_SYSTEM, "%s is %s, not a regular file; put the file itself there", path, kind);
    }
    if (result == DDP_OK) return DDP_OK;
    if (*fd >= 0) close(*fd);
    *fd = missing ? DDP__FILE_MISSING : -1;
    return result;
}

/* Ends the writing of a file or a folder: on disk, and closed. EINVAL: a file system that does not know how to sync a folder. */
static ddp_result ddp__file_end(int fd, const char *path, ddp_result result) {
    if (result == DDP_OK && fsync(fd) != 0 && errno != EINVAL) result = ddp__file_fail("syncing", path);
    if (close(fd) != 0 && result == DDP_OK) result = ddp__file_fail("closing", path);
    return result;
}

/* Reads or writes size bytes of a file, from byte `at` on. */
enum { DDP__FILE_READ, DDP__FILE_WRITE };
static ddp_result ddp__transfer(int fd, int way, const void *data, uint64_t size, uint64_t at, const char *path) {
    char *memory = (char *)(uintptr_t)data;
    for (ssize_t n; size; memory += n, at += (uint64_t)n, size -= (uint64_t)n) {
        n = way == DDP__FILE_WRITE ? pwrite(fd, memory, (size_t)size, (off_t)at) : pread(fd, memory, (size_t)size, (off_t)at);
        if (n == 0 && way == DDP__FILE_READ)
            return ddp_fail(DDP_ERR_CORRUPT, "%s: the file ends at byte %llu, %llu more belong to it", path, (unsigned long long)at, (unsigned long long)size);
        if (n == 0) errno = ENOSPC;
        if (n == 0 || (n < 0 && errno != EINTR)) return ddp__file_fail(way == DDP__FILE_WRITE ? "writing" : "reading", path);
        if (n < 0) n = 0;
    }
    return DDP_OK;
}

/* What was written is on its way to the disk before it has to be: a sync waits less. */
static void ddp__write_begin(int fd, uint64_t at, uint64_t size) {
#if defined(SYS_sync_file_range)
    (void)syscall(SYS_sync_file_range, fd, (off_t)at, (off_t)size, 2 /* SYNC_FILE_RANGE_WRITE */);
#endif
}

/* Writes data to the start of a file; data NULL: reserves size bytes on the disk. */
static ddp_result ddp__file_make(const char *dir, const char *name, const void *data, uint64_t size) {
    char path[DDP__PATH_MAX];
    struct rlimit limit;
    int fd;
    DDP_TRY(ddp__file_open(dir, name, O_CREAT | O_WRONLY, path, &fd));
    errno = 0;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && size > limit.rlim_cur) errno = EFBIG; /* writing would raise a signal */
    else if (!data && syscall(SYS_fallocate, fd, 0, (off_t)0, (off_t)size) == 0) errno = 0;
    if (!data && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL)) errno = ftruncate(fd, (off_t)size) == 0 ? 0 : errno;
    ddp_result result = errno ? ddp__file_fail("making room in", path) : DDP_OK;
    if (data && result == DDP_OK) result = ddp__transfer(fd, DDP__FILE_WRITE, data, size, 0, path);
    return ddp__file_end(fd, path, result);
}

static ddp_result ddp__folder_sync(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? ddp__file_fail("opening", path) : ddp__file_end(fd, path, DDP_OK);
}

static int ddp__is_our_file(const char *name) {
    const char *dot = strchr(name, '.');
    for (int kind = 0; kind < 2; kind++) {
        size_t length = strlen(ddp__kind_names[kind]);
        if (!dot || strncmp(name, ddp__kind_names[kind], length) != 0) continue;
        if (strcmp(name + length, ".safetensors.index.json") == 0 || (name[length] == '-' && strcmp(dot, ".safetensors") == 0)) return 1;
    }
    return strcmp(name, DDP__STATE_FILE) == 0;
}

enum { DDP__FOLDER_MISSING, DDP__FOLDER_EMPTY, DDP__FOLDER_OURS };

static int ddp__is_entry(const struct dirent *entry) { return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0; }

/* What is at path; anything but a checkpoint of ours, whole or begun, is DDP_ERR_INVALID: it is not to be replaced. clear: deletes it; last, by its name, the
   state, which tells that it is ours. */
static ddp_result ddp__folder_look(const char *path, int clear, int *kind) {
    char file[DDP__PATH_MAX], stranger[100] = "files without " DDP__STATE_FILE, start[sizeof DDP__STATE_START] = "";
    struct dirent **entry;
    ddp_result result = DDP_OK;
    int fd, ours = 0, count = scandir(path, &entry, ddp__is_entry, alphasort);
    *kind = count < 0 ? DDP__FOLDER_MISSING : count == 0 ? DDP__FOLDER_EMPTY : DDP__FOLDER_OURS;
    if (count < 0) return errno == ENOENT ? DDP_OK : ddp__file_fail("opening", path);
    if (count && ddp__file_open(path, DDP__STATE_FILE, O_RDONLY, file, &fd) == DDP_OK) {
        ssize_t got = pread(fd, start, sizeof start - 1, 0);
        ours = got >= 0 && strncmp(start, DDP__STATE_START, (size_t)got) == 0;
        close(fd);
    }
    for (int i = 0; i < count; i++)
        if (!ddp__is_our_file(entry[i]->d_name)) ours = 0, snprintf(stranger, sizeof stranger, "%.90s", entry[i]->d_name);
    for (int i = 0; i < count; free(entry[i++])) {
        snprintf(file, sizeof file, "%.*s/%s", DDP__DIR_MAX + 20, path, entry[i]->d_name);
        if (clear && ours && result == DDP_OK && unlink(file) != 0 && errno != ENOENT) result = ddp__file_fail("deleting", file);
    }
    free(entry);
    if (count && !ours)
        return ddp_fail(DDP_ERR_INVALID, "%s holds '%s', which is not part of a checkpoint of ours: saving replaces the whole folder, so choose another or move it away",
                        path, stranger);
    return result != DDP_OK || !clear || rmdir(path) == 0 ? result : ddp__file_fail("deleting", path);
}

static ddp_result ddp__folder_delete(const char *path) { int kind; return ddp__folder_look(path, 1, &kind); }

/* dir without slashes at its end; where it exists, without links. */
static ddp_result ddp__folder_name(const char *dir, char out[DDP__PATH_MAX]) {
    size_t length = dir ? strlen(dir) : 0;
    char *real = length ? realpath(dir, NULL) : NULL;
    if (length && !real && readlink(dir, out, 1) >= 0) return ddp_fail(DDP_ERR_INVALID, "dir=%.200s is a link to nothing; make the folder that it names", dir);
    while (length > 1 && dir[length - 1] == '/') length--;
    if (real) length = strlen(real);
    if (length && length <= DDP__DIR_MAX) snprintf(out, DDP__PATH_MAX, "%.*s", (int)length, real ? real : dir);
    free(real);
    return length && length <= DDP__DIR_MAX ? DDP_OK : ddp_fail(DDP_ERR_INVALID, "dir is NULL, empty or longer than %d bytes; name a folder", DDP__DIR_MAX);
}

static void ddp__parent_name(const char *path, char out[DDP__PATH_MAX]) {
    const char *last = strrchr(path, '/');
    snprintf(out, DDP__PATH_MAX, "%.*s", !last || last == path ? 1 : (int)(last - path), last ? path : ".");
}

enum { DDP__NEW = -1, DDP__OLD }; /* or the number of an older checkpoint */
static void ddp__beside_name(const char *dir, int which, char out[DDP__PATH_MAX]) {
    if (which > 0) snprintf(out, DDP__PATH_MAX, "%.*s.%d", DDP__DIR_MAX, dir, which);
    else snprintf(out, DDP__PATH_MAX, "%.*s.%s", DDP__DIR_MAX, dir, which == DDP__OLD ? "old" : "tmp");
}

//== checkpoints: boxes =========================================================================== >>impl-boxes

/* The box of a tensor that this rank holds: offset and extent in the global tensor, row-major and contiguous at data, in host memory. data NULL or an empty
   extent: nothing. Every rank has the same list of tensors, each with its own boxes, which together tile each tensor. */
typedef struct ddp__slice {
    const char *name;
    ddp_dtype dtype;
    int ndim;
    int64_t shape[DDP_MAX_NDIM], offset[DDP_MAX_NDIM], extent[DDP_MAX_NDIM];
    void *data;
    int file_kind; /* 0 = model-*, 1 = optimizer-* */
    int tied_to;   /* loading: 1 + the number of an earlier tensor that files may store under this name */
    int may_repeat; /* where other ranks hold the same box, the lowest of them writes it */
} ddp__slice;

/* "F32 [2,3]" */
typedef struct ddp__shown { char text[200]; } ddp__shown;
static ddp__shown ddp__show(const char *dtype, int ndim, const int64_t *shape) {
    ddp__shown shown;
    size_t length = (size_t)snprintf(shown.text, sizeof shown.text, "%s [", dtype);
    for (int d = 0; d < ndim && d < DDP_MAX_NDIM; d++)
        length += (size_t)snprintf(shown.text + length, sizeof shown.text - length, d ? ",%lld" : "%lld", (long long)shape[d]);
    snprintf(shown.text + length, sizeof shown.text - length, "%s]", ndim > DDP_MAX_NDIM ? ",..." : "");
    return shown;
}

/* Bytes of the tensor, or of what this rank holds of it. */
static uint64_t ddp__slice_bytes(const ddp__slice *s, int held) {
    uint64_t bytes = held && !s->data ? 0 : ddp_dtype_size(s->dtype);
    for (int d = 0; d < s->ndim; d++) bytes *= (uint64_t)(held ? s->extent[d] : s->shape[d]);
    return bytes;
}

/* A box as runs of elements that lie together in the tensor; they come in ascending order, and so they lie in the box. */
typedef struct ddp__box_runs {
    const ddp__slice *slice;
    int outer;                      /* dimensions that are walked; those behind them are one run */
    int64_t index[DDP_MAX_NDIM];
    uint64_t length, number, count; /* elements of a run; runs given and in all */
} ddp__box_runs;

static ddp__box_runs ddp__runs_of(const ddp__slice *s) {
    ddp__box_runs runs = DDP_ZERO;
    runs.slice = s, runs.length = runs.count = 1;
    for (runs.outer = s->ndim; runs.outer > 0;) {
        int d = --runs.outer;
        runs.length *= (uint64_t)s->extent[d];
        if (s->extent[d] != s->shape[d]) break;
    }
    for (int d = 0; d < runs.outer; d++) runs.count *= (uint64_t)s->extent[d];
    if (!s->data || runs.length == 0) runs.count = 0;
    return runs;
}

/* The next run starts at element *at of the tensor and *from of the box; 0 after the last one. */
static int ddp__runs_next(ddp__box_runs *runs, uint64_t *at, uint64_t *from) {
    const ddp__slice *s = runs->slice;
    if (runs->number == runs->count) return 0;
    *at = 0;
    for (int d = 0; d < s->ndim; d++) *at = *at * (uint64_t)s->shape[d] + (uint64_t)(s->offset[d] + runs->index[d]);
    *from = runs->number++ * runs->length;
    for (int d = runs->outer - 1; d >= 0 && ++runs->index[d] == s->extent[d]; d--) runs->index[d] = 0;
    return 1;
}

/* A number of a box, modulo the prime 2^31 - 1, such that boxes tile a tensor when theirs add up to the tensor's: the product over dimensions of
   x^(offset + extent) - x^offset, a polynomial that holds each element of the box once. Other boxes pass with a chance of 1e-5 at a point x, and there are two. */
#define DDP__PRIME UINT64_C(2147483647)
static uint64_t ddp__power(uint64_t x, uint64_t exponent) {
    uint64_t power = 1;
    for (; exponent; exponent >>= 1, x = x * x % DDP__PRIME)
        if (exponent & 1) power = power * x % DDP__PRIME;
    return power;
}

static uint64_t ddp__box_number(const ddp__slice *s, int whole, int point) {
    uint64_t number = whole || s->data;
    for (int d = 0; d < s->ndim; d++) {
        uint64_t x = (UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(point * DDP_MAX_NDIM + d + 1) >> 24) % (DDP__PRIME - 3) + 2;
        uint64_t from = whole ? 0 : (uint64_t)s->offset[d], to = whole ? (uint64_t)s->shape[d] : from + (uint64_t)s->extent[d];
        number = number * ((ddp__power(x, to) + DDP__PRIME - ddp__power(x, from)) % DDP__PRIME) % DDP__PRIME;
    }
    return number;
}

typedef struct ddp__key { ddp__words name; int kind, index; } ddp__key;

static int ddp__key_compare(const void *a, const void *b) {
    int order = ((const ddp__key *)a)->kind - ((const ddp__key *)b)->kind;
    return order ? order : ddp__words_compare(a, b);
}

/* Can a tensor in a file have this name, of at most so many bytes? */
static int ddp__is_tensor_name(const char *name, size_t most) {
    size_t length = strlen(name), at = 0;
    for (int bytes = 1; at < length && bytes; at += (size_t)bytes) bytes = ddp__utf8_length(name + at, name + length);
    return length > 0 && length <= most && at == length && strcmp(name, "__metadata__") != 0;
}

/* What one rank can find wrong with its list. Sorts keys. */
static ddp_result ddp__slices_check(const ddp__slice *slices, int count, ddp__key *keys) {
    for (int i = 0; i < count; i++) {
        const ddp__slice *s = &slices[i];
        ddp_tensor tensor = DDP_ZERO;
        if (!s->name || !ddp__is_tensor_name(s->name, 10000))
            return ddp_fail(DDP_ERR_INVALID, "tensor %d has no name, or one that a file cannot have (UTF-8, at most 10000 bytes)", i);
        tensor.ndim = s->ndim;
        memcpy(tensor.shape, s->shape, sizeof tensor.shape);
        int64_t elements = ddp_tensor_count(&tensor);
        if (elements < 0 || elements > INT64_MAX / 16 || !ddp__file_dtype_name(s->dtype))
            return ddp_fail(DDP_ERR_INVALID, "tensor '%.100s' has an impossible shape or dtype", s->name);
        for (int d = 0; d < s->ndim; d++)
            if (s->offset[d] < 0 || s->extent[d] < 0 || s->extent[d] > s->shape[d] || s->offset[d] > s->shape[d] - s->extent[d])
                return ddp_fail(DDP_ERR_INVALID, "tensor '%.100s': %lld from %lld on is outside of dimension %d, which has %lld", s->name, (long long)s->extent[d],
                                (long long)s->offset[d], d, (long long)s->shape[d]);
        const ddp__key key = {ddp__words_of(s->name), s->file_kind != 0, i};
        keys[i] = key;
    }
    qsort(keys, (size_t)count, sizeof *keys, ddp__key_compare);
    for (int i = 1; i < count; i++)
        if (ddp__key_compare(&keys[i - 1], &keys[i]) == 0) return ddp_fail(DDP_ERR_INVALID, "two tensors have the name '%.100s'", slices[keys[i].index].name);
    return DDP_OK;
}

/* What a save and a load begin with. */
typedef struct ddp__task {
    ddp_group *group;
    const char *who;
    const ddp__slice *slices;
    int count;
    char dir[DDP__PATH_MAX];
    ddp__key *keys;      /* the list by name; one allocation, with what follows */
    int64_t *mine, *all; /* 2 per tensor: the numbers of this rank's box, and of the boxes of all ranks */
    uint32_t *crc;       /* per tensor */
    unsigned char *left; /* per tensor: 1 = a lower rank writes this rank's box */
} ddp__task;

static ddp__task ddp__task_of(ddp_group *group, const char *who, const ddp__slice *slices, int count) {
    ddp__task task = {group, who, slices, count, "", NULL, NULL, NULL, NULL, NULL};
    return task;
}

/* What must be equal on all ranks is a list of entries: options, then tensors. The hash continues that of the
   entry before. text may be cut short; the hash is not. */
typedef struct ddp__task_entry { uint64_t hash; char text[400]; } ddp__task_entry;
static ddp__task_entry ddp__task_entry_of(const ddp__task *t, const char *options, int index, uint64_t hash) {
    const ddp__slice *s = index ? &t->slices[index - 1] : NULL;
    const char *name = s ? s->name : t->dir;
    size_t length = strlen(name);
    ddp__task_entry entry;
    if (s)
        snprintf(entry.text, sizeof entry.text, "tensor %d '%.80s' %s of the %s", index - 1, name,
                 ddp__show(ddp_dtype_name(s->dtype), s->ndim, s->shape).text, ddp__kind_names[s->file_kind != 0]);
    else
        snprintf(entry.text, sizeof entry.text, "tensors=%d%s dir=%.150s", t->count, options, length > 150 ? name + length - 150 : name);
    hash = ddp_hash(hash, name, length);
    entry.hash = ddp_hash(hash, entry.text, strlen(entry.text) + 1);
    return entry;
}

/* Collective: every rank has the same options (which text describes), dir and tensors. own: how this rank fares so far. */
static ddp_result ddp__task_begin(ddp__task *t, const char *dir, const char *options, ddp_result own) {
    ddp__task_entry entry = {0, ""};
    size_t n = (size_t)t->count + 1;
    if (own == DDP_OK) own = ddp__folder_name(dir, t->dir);
    t->keys = (ddp__key *)ddp_host_alloc(t->group, n * (sizeof *t->keys + 4 * sizeof *t->mine + sizeof *t->crc + 1));
    if (!t->keys) own = DDP_ERR_NO_MEMORY;
    if (own == DDP_OK) own = ddp__slices_check(t->slices, t->count, t->keys);
    for (int i = 0; i <= t->count && own == DDP_OK; i++) entry = ddp__task_entry_of(t, options, i, entry.hash);
    ddp_result result = ddp_agree(t->group, t->who, own, entry.hash, "");
    entry.hash = 0;
    for (int i = 0; i <= t->count && result == DDP_ERR_MISMATCH; i++) { /* to the first entry that differs */
        entry = ddp__task_entry_of(t, options, i, entry.hash);
        DDP_TRY(ddp_agree(t->group, t->who, DDP_OK, entry.hash, entry.text));
    }
    if (result != DDP_OK) return result;
    t->mine = (int64_t *)(t->keys + n);
    t->all = t->mine + 2 * n;
    t->crc = (uint32_t *)(t->all + 2 * n);
    t->left = (unsigned char *)(t->crc + n);
    memset(t->crc, 0, n * sizeof *t->crc);
    memset(t->left, 0, n);
    return DDP_OK;
}

/* Collective: adds the numbers of the boxes that are written. *hole: the first tensor that they do not tile, or the count. */
static ddp_result ddp__boxes_add(ddp__task *t, int *hole) {
    int i = 0;
    for (int k = 0; k < 2 * t->count; k++) t->all[k] = t->left[k / 2] ? 0 : t->mine[k];
    DDP_TRY(ddp__host_reduce(t->group, t->all, 2 * (size_t)t->count, DDP_I64, DDP_OP_SUM));
    while (i < 2 * t->count && (uint64_t)t->all[i] % DDP__PRIME == ddp__box_number(&t->slices[i / 2], 1, i % 2)) i++;
    *hole = i / 2;
    return DDP_OK;
}

/* Collective: the boxes of all ranks tile each tensor, once the lowest of ranks with the same box keeps it, where they may repeat. */
static ddp_result ddp__boxes_check(ddp__task *t) {
    size_t numbers = 2 * (size_t)t->count;
    int hole, rank = ddp_rank(t->group);
    for (int i = 0; i < 2 * t->count; i++) t->mine[i] = (int64_t)ddp__box_number(&t->slices[i / 2], 0, i % 2);
    DDP_TRY(ddp__boxes_add(t, &hole));
    if (hole == t->count) return DDP_OK;
    for (int r = 0; r < ddp_world_size(t->group) - 1; r++) {
        memcpy(t->all, t->mine, numbers * sizeof *t->all);
        DDP_TRY(ddp__host_broadcast(t->group, t->all, numbers, DDP_I64, r));
        for (int i = 0; i < t->count && rank > r; i++)
            t->left[i] |= t->slices[i].may_repeat && t->mine[2 * i] && memcmp(&t->mine[2 * i], &t->all[2 * i], 2 * sizeof *t->mine) == 0;
    }
    DDP_TRY(ddp__boxes_add(t, &hole));
    return hole == t->count ? DDP_OK : ddp_fail_in(DDP_ERR_MISMATCH, t->who, t->group, "tensor '%.100s': what the ranks hold of it leaves a hole or overlaps",
                                                   t->slices[hole].name);
}

/* The fields of ddp_fsdp_state as state.json has them, each a number or a list of them, which lie one behind the other: i64, u64, i32 (4). Of doubles the bits,
   as u64: exact, whatever they are and in any locale. */
static const struct ddp__state_field { const char *name, *kinds; size_t at; } ddp__state_fields[] = {
    {"step", "i", offsetof(ddp_fsdp_state, step)}, {"sampler", "uuiiiii44", offsetof(ddp_fsdp_state, sampler)}, {"scaler", "ui", offsetof(ddp_fsdp_state, scaler)},
    {"rng", "uuuu", offsetof(ddp_fsdp_state, rng)}, {"user", "uuuuuuuu", offsetof(ddp_fsdp_state, user)}};
#define DDP__STATE_FIELDS ((int)(sizeof ddp__state_fields / sizeof ddp__state_fields[0]))

//== checkpoints: saving =========================================================================== >>impl-save

#define DDP__PIECE ((uint64_t)1 << 20)     /* bytes that are summed up, and then written while they lie in a cache; or brought into memory at once */

/* A file of the checkpoint that is being written: tensors [first, last) of the list `order`. */
typedef struct ddp__out_file {
    char name[64];
    int kind, first, last;
    uint64_t header_bytes, data_bytes; /* header: with its length */
    uint32_t crc;                      /* of the header */
} ddp__out_file;

typedef struct ddp__saving {
    ddp__task task;
    char tmp[DDP__PATH_MAX];
    int keep;
    size_t max_file_bytes;
    int *order;                        /* the tensors as they lie in the files: by kind, as given */
    uint64_t *begin;                   /* per tensor: where its bytes lie in its file's data */
    ddp__out_file *files;              /* behind them, once they are written, the indexes */
    int file_count, kind_count[2], index_count;
    ddp__draft draft;
} ddp__saving;

/* The header of a file with its length in front, padded so that the data starts at a multiple of 8. Checksums are what crc has by now: the length is the same. */
static void ddp__draft_header(ddp__saving *s, const ddp__out_file *file) {
    ddp__draft *d = &s->draft;
    d->length = 0;
    ddp__draft_add(d, "12345678{\"__metadata__\":{\"format\":\"pt\""); /* what Python's loaders look for */
    for (int i = file->first; i < file->last; i++) {
        ddp__draft_add(d, ",");
        ddp__draft_string(d, "crc32c:", s->task.slices[s->order[i]].name);
        ddp__draft_add(d, ":\"%08x\"", s->task.crc[s->order[i]]);
    }
    ddp__draft_add(d, "}");
    for (int i = file->first; i < file->last; i++) {
        const ddp__slice *slice = &s->task.slices[s->order[i]];
        uint64_t begin = s->begin[s->order[i]];
        ddp__draft_add(d, ",");
        ddp__draft_string(d, "", slice->name);
        ddp__draft_add(d, ":{\"dtype\":\"%s\",\"shape\":[", ddp__file_dtype_name(slice->dtype));
        for (int k = 0; k < slice->ndim; k++) ddp__draft_add(d, k ? ",%lld" : "%lld", (long long)slice->shape[k]);
        ddp__draft_add(d, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin, (unsigned long long)(begin + ddp__slice_bytes(slice, 0)));
    }
    ddp__draft_add(d, "}%*s", (int)(7 - d->length % 8), "");
    for (int i = 0; i < 8 && !d->failed; i++) d->at[i] = (char)((d->length - 8) >> 8 * i & 255);
}

/* Deals the tensors to files. An entry of a header takes at most so much: the name twice, digits, words. */
static ddp_result ddp__save_plan(ddp__saving *s) {
    ddp__out_file *file = NULL;
    uint64_t used = 0, limit = s->max_file_bytes ? s->max_file_bytes : (uint64_t)4 << 30;
    int n = 0;
    for (int i = 0; i < 2 * s->task.count; i++)
        if ((s->task.slices[i % s->task.count].file_kind != 0) == i / s->task.count) s->order[n++] = i % s->task.count;
    for (int i = 0; i < n; i++) {
        const ddp__slice *slice = &s->task.slices[s->order[i]];
        uint64_t bytes = ddp__slice_bytes(slice, 0), entry;
        int kind = slice->file_kind != 0;
        s->draft.length = 0;
        ddp__draft_string(&s->draft, "", slice->name);
        entry = 2 * s->draft.length + 160 + 21 * (uint64_t)slice->ndim;
        if (!file || file->kind != kind || bytes + entry > limit || used > limit - bytes - entry) {
            file = &s->files[s->file_count++];
            memset(file, 0, sizeof *file);
            file->kind = kind, file->first = i;
            s->kind_count[kind]++;
            used = 64;
        }
        s->begin[s->order[i]] = file->data_bytes;
        file->data_bytes += bytes;
        file->last = i + 1;
        used += bytes + entry;
    }
    for (int f = 0; f < s->file_count; f++) {
        file = &s->files[f];
        snprintf(file->name, sizeof file->name, "%s-%05d-of-%05d.safetensors", ddp__kind_names[file->kind], f + 1 - (file->kind ? s->kind_count[0] : 0),
                 s->kind_count[file->kind]);
        ddp__draft_header(s, file);
        file->header_bytes = s->draft.length;
        if (s->draft.length > DDP__HEADER_MAX) return ddp_fail(DDP_ERR_INVALID, "so many tensors in one file need a header of more than 100 MB; lower max_file_bytes");
    }
    return s->draft.failed ? DDP_ERR_NO_MEMORY : DDP_OK;
}

/* On rank 0: an empty folder beside dir, with all files, which have their size already. Before it, all that is to be replaced is looked at. */
static ddp_result ddp__save_begin(ddp__saving *s) {
    char path[DDP__PATH_MAX];
    struct stat info;
    int kind;
    DDP_TRY(ddp__folder_look(s->task.dir, 0, &kind));
    for (int i = 0; i < s->keep && (i < 2 || kind != DDP__FOLDER_MISSING); i++) {
        ddp__beside_name(s->task.dir, i, path);
        DDP_TRY(ddp__folder_look(path, 0, &kind));
    }
    ddp__parent_name(s->task.dir, path);
    if (stat(path, &info) != 0) return ddp__file_fail("the folder that dir is to be in,", path);
    DDP_TRY(ddp__folder_sync(path)); /* what cannot be done now cannot be done after the swap either */
    DDP_TRY(ddp__folder_delete(s->tmp));
    if (mkdir(s->tmp, 0777) != 0) return ddp__file_fail("creating", s->tmp);
    DDP_TRY(ddp__file_make(s->tmp, DDP__STATE_FILE, DDP__STATE_START, sizeof DDP__STATE_START - 1)); /* ours, but not whole yet */
    for (int f = 0; f < s->file_count; f++) DDP_TRY(ddp__file_make(s->tmp, s->files[f].name, NULL, s->files[f].header_bytes + s->files[f].data_bytes));
    return DDP_OK;
}

/* Writes this rank's runs of a tensor, whose bytes start at byte `at` of the file; *crc is their remainder within the whole tensor. */
static ddp_result ddp__save_slice(const ddp__slice *slice, int fd, uint64_t at, const char *path, uint32_t *crc) {
    ddp__box_runs runs = ddp__runs_of(slice);
    uint64_t element = ddp_dtype_size(slice->dtype), size = runs.length * element, to, from, done = 0, gap = 0;
    uint32_t remainder = 0, shift = DDP__CRC_ONE; /* x^(8 * gap) */
    while (ddp__runs_next(&runs, &to, &from)) {
        const char *data = (const char *)slice->data + from * element;
        if (to * element - done != gap) shift = ddp__crc_shift(gap = to * element - done);
        if (gap) remainder = ddp__crc_multiply(remainder, shift);
        for (uint64_t piece, p = 0; p < size; p += piece) {
            piece = size - p < DDP__PIECE ? size - p : DDP__PIECE;
            remainder = ddp__crc_feed(remainder, data + p, (size_t)piece);
            DDP_TRY(ddp__transfer(fd, DDP__FILE_WRITE, data + p, piece, at + to * element + p, path));
            if (piece == DDP__PIECE) ddp__write_begin(fd, at + to * element + p, piece);
        }
        done = to * element + size;
    }
    *crc = ddp__crc_multiply(remainder, ddp__crc_shift(ddp__slice_bytes(slice, 0) - done));
    return DDP_OK;
}

static int ddp__save_has(const ddp__saving *s, int index) { return !s->task.left[index] && ddp__runs_of(&s->task.slices[index]).count > 0; }

static ddp_result ddp__save_slices(ddp__saving *s) {
    for (const ddp__out_file *file = s->files; file < s->files + s->file_count; file++) {
        char path[DDP__PATH_MAX];
        ddp_result result = DDP_OK;
        int fd, i = file->first;
        while (i < file->last && !ddp__save_has(s, s->order[i])) i++;
        if (i == file->last) continue;
        DDP_TRY(ddp__file_open(s->tmp, file->name, O_WRONLY, path, &fd));
        for (; i < file->last && result == DDP_OK; i++)
            if (ddp__save_has(s, s->order[i])) result = ddp__save_slice(&s->task.slices[s->order[i]], fd, file->header_bytes + s->begin[s->order[i]], path, &s->task.crc[s->order[i]]);
        DDP_TRY(ddp__file_end(fd, path, result));
    }
    return DDP_OK;
}

static void ddp__draft_state(ddp__saving *s, const ddp_fsdp_state *state) {
    ddp__draft *d = &s->draft;
    d->length = 0;
    ddp__draft_add(d, DDP__STATE_START ", \"version\": 1,\n \"world_size\": %d", ddp_world_size(s->task.group));
    for (int f = 0; f < DDP__STATE_FIELDS; f++) {
        const char *at = (const char *)state + ddp__state_fields[f].at, *kind = ddp__state_fields[f].kinds;
        ddp__draft_add(d, ",\n \"%s\": %s", ddp__state_fields[f].name, kind[1] ? "[" : "");
        for (int i = 0; kind[i]; at += kind[i++] == '4' ? 4 : 8) {
            uint64_t bits = 0;
            memcpy(&bits, at, kind[i] == '4' ? 4 : 8);
            if (i) ddp__draft_add(d, ", ");
            if (kind[i] == 'u') ddp__draft_add(d, "%llu", (unsigned long long)bits);
            else ddp__draft_add(d, "%lld", kind[i] == '4' ? (long long)(int32_t)(uint32_t)bits : (long long)(int64_t)bits);
        }
        ddp__draft_add(d, "%s", kind[1] ? "]" : "");
    }
    ddp__draft_add(d, ",\n \"files\": {");
    for (int f = 0; f < s->file_count + s->index_count; f++) ddp__draft_add(d, "%s\n  \"%s\": \"%08x\"", f ? "," : "", s->files[f].name, s->files[f].crc);
    ddp__draft_add(d, "},\n \"crc32c\": \"");
    if (!d->failed) ddp__draft_add(d, "%08x\"}\n", ddp__crc32c(d->at, d->length));
}

static void ddp__draft_index(ddp__saving *s, int kind) {
    ddp__draft *d = &s->draft;
    uint64_t total = 0;
    int entries = 0;
    for (int f = 0; f < s->file_count; f++) if (s->files[f].kind == kind) total += s->files[f].data_bytes;
    d->length = 0;
    ddp__draft_add(d, "{\"metadata\": {\"total_size\": %llu}, \"weight_map\": {", (unsigned long long)total);
    for (int f = 0; f < s->file_count; f++)
        for (int i = s->files[f].first; s->files[f].kind == kind && i < s->files[f].last; i++) {
            ddp__draft_add(d, entries++ ? ",\n  " : "\n  ");
            ddp__draft_string(d, "", s->task.slices[s->order[i]].name);
            ddp__draft_add(d, ": \"%s\"", s->files[f].name);
        }
    ddp__draft_add(d, "}}\n");
}

static ddp_result ddp__save_draft(ddp__saving *s, const char *name, uint32_t *crc) {
    if (s->draft.failed) return DDP_ERR_NO_MEMORY;
    *crc = ddp__crc32c(s->draft.at, s->draft.length);
    return ddp__file_make(s->tmp, name, s->draft.at, s->draft.length);
}

/* On rank 0, once the data of all ranks is on disk: headers, lists of tensors, and last the state, which vouches for them. */
static ddp_result ddp__save_end(ddp__saving *s, const ddp_fsdp_state *state) {
    uint32_t crc;
    for (int i = 0; i < s->task.count; i++) s->task.crc[i] = ddp__crc_finish(s->task.crc[i], ddp__slice_bytes(&s->task.slices[i], 0));
    for (int f = 0; f < s->file_count; f++) {
        ddp__draft_header(s, &s->files[f]);
        DDP_TRY(ddp__save_draft(s, s->files[f].name, &s->files[f].crc));
    }
    for (int kind = 0; kind < 2; kind++) {
        ddp__out_file *index = &s->files[s->file_count + s->index_count];
        if (s->kind_count[kind] == 0) continue;
        s->index_count++;
        snprintf(index->name, sizeof index->name, "%s.safetensors.index.json", ddp__kind_names[kind]);
        ddp__draft_index(s, kind);
        DDP_TRY(ddp__save_draft(s, index->name, &index->crc));
    }
    ddp__draft_state(s, state);
    DDP_TRY(ddp__save_draft(s, DDP__STATE_FILE, &crc));
    return ddp__folder_sync(s->tmp);
}

/* dir.1 becomes dir.2 and so on, up to the first gap, and previous becomes dir.1; what is too many goes, the oldest first. */
static ddp_result ddp__save_rotate(const ddp__saving *s, const char *previous) {
    char from[DDP__PATH_MAX], to[DDP__PATH_MAX];
    int number = s->keep - 1, kind;
    do ddp__beside_name(s->task.dir, ++number, to);
    while (ddp__folder_look(to, 0, &kind) == DDP_OK && kind == DDP__FOLDER_OURS);
    while (--number >= s->keep) {
        ddp__beside_name(s->task.dir, number, to);
        DDP_TRY(ddp__folder_delete(to));
    }
    DDP_TRY(ddp__folder_look(previous, 0, &kind));
    if (s->keep == 1 || kind != DDP__FOLDER_OURS) return ddp__folder_delete(previous);
    for (number = 1; number < s->keep - 1; number++) {
        ddp__beside_name(s->task.dir, number, to);
        DDP_TRY(ddp__folder_look(to, 0, &kind));
        if (kind == DDP__FOLDER_MISSING) break;
    }
    ddp__beside_name(s->task.dir, number, to);
    DDP_TRY(ddp__folder_delete(to));
    for (; number > 0; number--, memcpy(to, from, sizeof to)) {
        if (number > 1) ddp__beside_name(s->task.dir, number - 1, from);
        else memcpy(from, previous, sizeof from);
        if (rename(from, to) != 0) return ddp__file_fail("renaming to", to);
    }
    return DDP_OK;
}

/* On rank 0: swaps the names of dir and dir.tmp. Where the file system cannot, the old checkpoint is at dir.old for a moment before the new one is at dir:
   ddp__load_run looks there. From here on the new one is what dir holds, and what becomes of the old one is no reason to fail. */
static ddp_result ddp__save_commit(ddp__saving *s) {
    char previous[DDP__PATH_MAX], parent[DDP__PATH_MAX], text[440];
    struct stat info;
    int there = lstat(s->task.dir, &info) == 0, swapped = 0;
    ddp__parent_name(s->task.dir, parent);
    memcpy(previous, s->tmp, sizeof previous);
#if defined(SYS_renameat2)
    swapped = there && syscall(SYS_renameat2, AT_FDCWD, s->tmp, AT_FDCWD, s->task.dir, 2 /* RENAME_EXCHANGE */) == 0;
#endif
    if (!swapped) {
        ddp__beside_name(s->task.dir, DDP__OLD, previous);
        if (there) DDP_TRY(ddp__folder_delete(previous)); /* of a save that was killed after its second rename */
        if (there && rename(s->task.dir, previous) != 0) return ddp__file_fail("renaming", s->task.dir);
        if (rename(s->tmp, s->task.dir) != 0) {
            ddp_result result = ddp__file_fail("renaming", s->tmp);
            return there && rename(previous, s->task.dir) != 0 ? DDP_ERR_SYSTEM : result;
        }
    }
    s->tmp[0] = '\0'; /* what is there now is not to be deleted, should saving fail */
    if (ddp__folder_sync(parent) != DDP_OK)
        return ddp_fail(DDP_ERR_SYSTEM, "the new checkpoint is in its place, the old one beside it, but a crash of the machine may undo that: %.400s",
                        ddp_last_error());
    if (ddp__save_rotate(s, previous) != DDP_OK) {
        snprintf(text, sizeof text, "the checkpoint is saved, but the one before it could not be put away: %.350s", ddp_last_error());
        ddp_group_log(s->task.group, text);
    }
    return DDP_OK;
}

static ddp_result ddp__save_run(ddp__saving *s, const char *dir, const ddp_fsdp_state *state) {
    ddp__task *t = &s->task;
    size_t n = (size_t)t->count + 2;
    int rank = ddp_rank(t->group);
    char options[96];
    ddp_result result = s->keep < 0 ? ddp_fail(DDP_ERR_INVALID, "keep_checkpoints=%d; set how many, or 0 for one", s->keep) : DDP_OK;
    s->files = (ddp__out_file *)ddp_host_alloc(t->group, n * (sizeof *s->files + sizeof *s->begin + sizeof *s->order));
    if (!s->files) result = DDP_ERR_NO_MEMORY;
    s->begin = (uint64_t *)(s->files + n), s->order = (int *)(s->begin + n);
    snprintf(options, sizeof options, " max_file_bytes=%zu keep_checkpoints=%d", s->max_file_bytes, s->keep);
    DDP_TRY(ddp__task_begin(t, dir, options, result));
    DDP_TRY(ddp__boxes_check(t));
    ddp__beside_name(t->dir, DDP__NEW, s->tmp);
    result = ddp__save_plan(s);
    if (result == DDP_OK && rank == 0) result = ddp__save_begin(s);
    result = ddp_agree(t->group, t->who, result, 0, "");
    if (result == DDP_OK) result = ddp_agree(t->group, t->who, ddp__save_slices(s), 0, "");
    if (result == DDP_OK) result = ddp__crc_combine(t->group, t->crc, t->count);
    if (result == DDP_OK) {
        if (rank == 0) result = ddp__save_end(s, state);
        if (rank == 0 && result == DDP_OK) result = ddp__save_commit(s);
        result = ddp_agree(t->group, t->who, result, 0, "");
    }
    if (result != DDP_OK && rank == 0 && s->tmp[0]) {
        ddp_saved_error told = ddp__fsdp_error(result);
        (void)ddp__folder_delete(s->tmp);
        return ddp_error_restore(&told);
    }
    return result;
}

/* Collective; see ddp_fsdp_save. state may be NULL, max_file_bytes and keep 0. */
static ddp_result ddp__checkpoint_save(ddp_group *group, const char *dir, const ddp__slice *slices, int count, const ddp_fsdp_state *state,
                                       size_t max_file_bytes, int keep) {
    ddp_fsdp_state none = DDP_ZERO;
    ddp__saving saving = DDP_ZERO;
    saving.draft.group = group;
    saving.task = ddp__task_of(group, "ddp_fsdp_save", slices, count);
    saving.keep = keep ? keep : 1, saving.max_file_bytes = max_file_bytes;
    ddp_result result = ddp__save_run(&saving, dir, state ? state : &none);
    ddp_host_free(group, saving.draft.at);
    ddp_host_free(group, saving.files);
    ddp_host_free(group, saving.task.keys);
    return result;
}

//== checkpoints: loading ========================================================================== >>impl-load

#define DDP__AHEAD 32         /* pieces that a load reads ahead of those that it sums up */
#define DDP__POPULATE_READ 22 /* MADV_POPULATE_READ, which older libc headers lack */

typedef struct ddp__in_file {
    const char *name;          /* in the text that tells the files */
    int kind;
    uint32_t crc, want_crc;    /* of the header */
    char *text;                /* the header */
    uint64_t data_at;
    const unsigned char *map;  /* the whole file */
    size_t map_bytes;
    ddp__header header;
} ddp__in_file;

/* Where a tensor of the list is; file NULL = nowhere. */
typedef struct ddp__source { const ddp__in_file *file; const ddp__stored *record; const unsigned char *data; uint64_t bytes; } ddp__source;

typedef struct ddp__loading {
    ddp__task task;            /* its crc: what the ranks' parts come to */
    ddp__source *sources;      /* per tensor */
    ddp__in_file *files;
    int file_count;
    int foreign;               /* no state.json: not written here, may lack checksums and have other float dtypes */
    char *text;                /* state.json, or the index of a foreign model */
    uint32_t text_crc;
    ddp_fsdp_state state;
    int copies, next, stops;   /* whether the pass copies; the next tensor to copy; the sums are done */
    sem_t room;                /* pieces that the helper may still bring into memory before they are summed up */
    ddp_saved_error helped;          /* what came of the helper's copies */
} ddp__loading;

/* A whole small file; *text is NULL, and the result DDP_OK, when there is none. */
static ddp_result ddp__text_load(ddp__loading *l, const char *name, char **text, size_t *length) {
    char path[DDP__PATH_MAX];
    struct stat info;
    int fd;
    ddp_result result = ddp__file_open(l->task.dir, name, O_RDONLY, path, &fd);
    *text = NULL;
    if (result != DDP_OK) return fd == DDP__FILE_MISSING ? DDP_OK : result;
    if (fstat(fd, &info) != 0) result = ddp__file_fail("reading", path);
    else if ((uint64_t)info.st_size > DDP__HEADER_MAX) result = ddp_fail(DDP_ERR_CORRUPT, "%s: is larger than 100 MB", path);
    else {
        *length = (size_t)info.st_size;
        *text = (char *)ddp_host_alloc(l->task.group, *length + 1);
        result = *text ? ddp__transfer(fd, DDP__FILE_READ, *text, *length, 0, path) : DDP_ERR_NO_MEMORY;
    }
    close(fd);
    return result;
}

/* Makes room for the files of a text: an entry has seven characters or more. */
static ddp_result ddp__in_files_make(ddp__loading *l, size_t length) {
    l->files = (ddp__in_file *)ddp_host_alloc(l->task.group, (length / 7 + 1) * sizeof *l->files);
    return l->files ? DDP_OK : DDP_ERR_NO_MEMORY;
}

/* A file of the list, which is there once; NULL for a name that leads to another folder. */
static ddp__in_file *ddp__in_file_add(ddp__loading *l, ddp__words name, uint32_t want_crc) {
    ddp__in_file *file = l->files;
    if (name.length == 0 || name.length > 255 || name.at[0] == '.' || strlen(name.at) != name.length || strchr(name.at, '/')) return NULL;
    while (file < l->files + l->file_count && strcmp(file->name, name.at) != 0) file++;
    if (file < l->files + l->file_count) return file;
    memset(file, 0, sizeof *file);
    l->file_count++;
    file->name = name.at, file->want_crc = want_crc;
    return file;
}

static ddp_result ddp__json_result(const ddp__loading *l, const char *name, const ddp__json *j) {
    return ddp_fail(DDP_ERR_CORRUPT, "%s/%s: damaged at byte %zu: %s", l->task.dir, name, (size_t)(j->at - j->begin), j->error);
}

/* The numbers of a field, one behind the other from `at` on. */
static int ddp__state_numbers(ddp__json *j, const char *kinds, char *at) {
    int n = 0, list = kinds[1] != 0, count = 0;
    for (; kinds[n] && (!list || ddp__json_more(j, "[]", &count)); at += kinds[n++] == '4' ? 4 : 8) {
        uint64_t bits;
        if (!ddp__json_number(j, kinds[n] == 'u' ? 'u' : 'i', &bits)) return 0;
        int32_t narrow = (int32_t)(int64_t)bits;
        if (kinds[n] == '4' && narrow != (int64_t)bits) return ddp__json_fail(j, "a number is too large");
        memcpy(at, kinds[n] == '4' ? (const void *)&narrow : (const void *)&bits, kinds[n] == '4' ? 4 : 8);
    }
    return !kinds[n] && (!list || ddp__json_take(j, ']')) ? 1 : ddp__json_fail(j, "a list has another length");
}

/* The files of an object: its names, and their checksums; or, in the index of a model from elsewhere, its values. */
static int ddp__files_read(ddp__loading *l, ddp__json *j, int sums) {
    ddp__words name, value;
    uint32_t crc = 0;
    for (int count = 0; ddp__json_entry(j, &count, &name);) {
        if (!ddp__json_string(j, &value)) return 0;
        if ((sums && !ddp__hex_read(value, &crc)) || !ddp__in_file_add(l, sums ? name : value, crc))
            return ddp__json_fail(j, sums ? "not a file and its checksum" : "not the name of a file in the folder");
    }
    return j->error == NULL;
}

static int ddp__state_read(ddp__loading *l, ddp__json *j) {
    int count = 0, seen = 0;
    uint64_t version = 0;
    for (ddp__words key; ddp__json_entry(j, &count, &key);) {
        int f = 0;
        while (f < DDP__STATE_FIELDS && !ddp__words_are(key, ddp__state_fields[f].name)) f++;
        if (f < DDP__STATE_FIELDS) seen += ddp__state_numbers(j, ddp__state_fields[f].kinds, (char *)&l->state + ddp__state_fields[f].at);
        else if (ddp__words_are(key, "version")) seen += ddp__json_number(j, 'u', &version);
        else if (ddp__words_are(key, "files")) seen += ddp__files_read(l, j, 1);
        else (void)ddp__json_skip(j);
        if (seen && version != 1) return ddp__json_fail(j, "of a version that this one cannot read");
    }
    return ddp__json_end(j) && (seen == DDP__STATE_FIELDS + 2 ? 1 : ddp__json_fail(j, "something is missing"));
}

/* state.json ends with its own checksum, that of all bytes up to its digits. In its list of files are the indexes too: they are checked here, and leave it. */
static ddp_result ddp__load_state(ddp__loading *l, size_t length) {
    static const char tail[] = "\"crc32c\": \"01234567\"}\n";
    size_t size = sizeof tail - 1;
    ddp__words word = {l->text, 8};
    uint32_t crc;
    if (length < size || memcmp(l->text, DDP__STATE_START, sizeof DDP__STATE_START - 1) != 0 || memcmp(l->text + length - size, tail, size - 11) != 0)
        return ddp_fail(DDP_ERR_CORRUPT, "%s/" DDP__STATE_FILE ": not a whole " DDP__STATE_FILE " of a checkpoint", l->task.dir);
    word.at += length - 11;
    l->text_crc = ddp__crc32c(l->text, length - 11);
    if (!ddp__hex_read(word, &crc) || crc != l->text_crc)
        return ddp_fail(DDP_ERR_CORRUPT, "%s/" DDP__STATE_FILE ": damaged, its checksum is %08x, not %.8s", l->task.dir, l->text_crc, word.at);
    DDP_TRY(ddp__in_files_make(l, length));
    ddp__json j = ddp__json_of(l->text, length);
    if (!ddp__state_read(l, &j)) return ddp__json_result(l, DDP__STATE_FILE, &j);
    int all = l->file_count;
    for (int f = l->file_count = 0; f < all; f++) {
        ddp__in_file file = l->files[f];
        char *text;
        file.kind = strncmp(file.name, ddp__kind_names[1], strlen(ddp__kind_names[1])) == 0;
        if (strcmp(file.name + strlen(file.name) - (strlen(file.name) < 5 ? 0 : 5), ".json") != 0) { l->files[l->file_count++] = file; continue; }
        ddp_result result = ddp__text_load(l, file.name, &text, &length);
        if (result == DDP_OK && (!text || ddp__crc32c(text, length) != file.want_crc))
            result = ddp_fail(DDP_ERR_CORRUPT, "%s/%s %s", l->task.dir, file.name, text ? "is damaged: its checksum is not that in " DDP__STATE_FILE : "is missing");
        ddp_host_free(l->task.group, text);
        DDP_TRY(result);
    }
    return DDP_OK;
}

/* The index of a model from elsewhere tells the files; what is in them they tell themselves. */
static int ddp__index_read(ddp__loading *l, ddp__json *j) {
    int count = 0, found = 0;
    for (ddp__words key; ddp__json_entry(j, &count, &key);) {
        if (!ddp__words_are(key, "weight_map")) (void)ddp__json_skip(j);
        else if (found++) (void)ddp__json_fail(j, "weight_map is there twice");
        else (void)ddp__files_read(l, j, 0);
    }
    return ddp__json_end(j) && (found ? 1 : ddp__json_fail(j, "weight_map is missing"));
}

/* A model from elsewhere: model.safetensors, or the files that its index names. */
static ddp_result ddp__load_foreign(ddp__loading *l) {
    static const char index_name[] = "model.safetensors.index.json";
    size_t length = 0;
    struct dirent *entry;
    DIR *folder = opendir(l->task.dir);
    int optimizer = 0;
    if (!folder) return ddp__file_fail("opening", l->task.dir);
    while ((entry = readdir(folder)) != NULL) optimizer += strncmp(entry->d_name, "optimizer", 9) == 0 && ddp__is_our_file(entry->d_name);
    closedir(folder);
    if (optimizer) return ddp_fail(DDP_ERR_CORRUPT, "%s/" DDP__STATE_FILE " is missing", l->task.dir);
    l->foreign = 1;
    DDP_TRY(ddp__text_load(l, index_name, &l->text, &length));
    DDP_TRY(ddp__in_files_make(l, length));
    ddp__json j = ddp__json_of(l->text, length);
    if (!l->text) (void)ddp__in_file_add(l, ddp__words_of("model.safetensors"), 0);
    else if (!ddp__index_read(l, &j)) return ddp__json_result(l, index_name, &j);
    return DDP_OK;
}

/* Reads and checks the header of an open file, and maps the file. */
static ddp_result ddp__in_file_read(ddp__loading *l, ddp__in_file *file, int fd, const char *path) {
    unsigned char size[8];
    struct stat info;
    uint64_t length = 0;
    if (fstat(fd, &info) != 0) return ddp__file_fail("reading", path);
    DDP_TRY(ddp__transfer(fd, DDP__FILE_READ, size, sizeof size, 0, path));
    for (int i = 0; i < 8; i++) length |= (uint64_t)size[i] << 8 * i;
    if (length > DDP__HEADER_MAX || length > (uint64_t)info.st_size - 8)
        return ddp_fail(DDP_ERR_CORRUPT, "%s: the header claims %llu bytes, allowed are 100 MB, and the file has %llu behind its start", path,
                        (unsigned long long)length, (unsigned long long)info.st_size - 8);
    file->data_at = 8 + length;
    file->text = (char *)ddp_host_alloc(l->task.group, (size_t)length + 1);
    if (!file->text) return DDP_ERR_NO_MEMORY;
    DDP_TRY(ddp__transfer(fd, DDP__FILE_READ, file->text, length, 8, path));
    file->crc = ~ddp__crc_feed(ddp__crc_feed(0xffffffffu, size, 8), file->text, (size_t)length);
    if (!l->foreign && file->crc != file->want_crc)
        return ddp_fail(DDP_ERR_CORRUPT, "%s: the header, bytes [0, %llu), is damaged: its checksum is %08x, not %08x", path,
                        (unsigned long long)file->data_at, file->crc, file->want_crc);
    DDP_TRY(ddp__header_read(l->task.group, path, file->text, (size_t)length, (uint64_t)info.st_size - file->data_at, &file->header));
    void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) return ddp__file_fail("mapping", path);
    file->map = (const unsigned char *)map;
    file->map_bytes = (size_t)info.st_size;
    return DDP_OK;
}

static ddp_result ddp__in_file_open(ddp__loading *l, ddp__in_file *file) {
    char path[DDP__PATH_MAX];
    int fd;
    ddp_result result = ddp__file_open(l->task.dir, file->name, O_RDONLY, path, &fd);
    if (fd == DDP__FILE_MISSING) return ddp_fail(DDP_ERR_CORRUPT, "%s is missing", path);
    if (result != DDP_OK) return result;
    result = ddp__in_file_read(l, file, fd, path);
    close(fd);
    return result;
}

static ddp_result ddp__source_fail(const ddp__loading *l, ddp_result result, const ddp__in_file *file, const ddp__stored *r, const char *what) {
    char path[DDP__PATH_MAX];
    snprintf(path, sizeof path, "%.*s/%s", DDP__DIR_MAX, l->task.dir, file->name);
    return ddp__stored_fail(result, path, file->data_at, r, what);
}

static ddp_result ddp__load_match(ddp__loading *l, const ddp__in_file *file, const ddp__stored *r) {
    ddp__shown has = ddp__show(r->dtype->name, r->ndim, r->shape);
    const ddp__key key = {r->name, file->kind, 0};
    char what[500];
    ddp__key *found = (ddp__key *)bsearch(&key, l->task.keys, (size_t)l->task.count, sizeof key, ddp__key_compare);
    if (!found) {
        snprintf(what, sizeof what, "(%s) is none of the %d tensors that are loaded", has.text, l->task.count);
        return ddp__source_fail(l, DDP_ERR_MISMATCH, file, r, what);
    }
    const ddp__slice *s = &l->task.slices[found->index];
    ddp__source *source = &l->sources[found->index];
    if (r->ndim != s->ndim || memcmp(r->shape, s->shape, sizeof r->shape[0] * (size_t)s->ndim) != 0 ||
        (r->dtype->dtype != s->dtype && !(l->foreign && ddp_is_float(r->dtype->dtype) && ddp_is_float(s->dtype)))) {
        snprintf(what, sizeof what, "is %s, and %s is to be loaded", has.text, ddp__show(ddp__file_dtype_name(s->dtype), s->ndim, s->shape).text);
        return ddp__source_fail(l, DDP_ERR_MISMATCH, file, r, what);
    }
    if (source->file || (!l->foreign && !r->has_crc)) return ddp__source_fail(l, DDP_ERR_CORRUPT, file, r, source->file ? "is in another file too" : "has no checksum");
    source->file = file, source->record = r, source->data = file->map + file->data_at + r->begin;
    source->bytes = r->end - r->begin;
    return DDP_OK;
}

/* Two names of one tied weight differ in the file. */
static ddp_result ddp__tied_fail(const ddp__loading *l, int index, const char *what) {
    const ddp__source *source = &l->sources[index];
    char text[400];
    const char *first = l->task.slices[l->task.slices[index].tied_to - 1].name;
    snprintf(text, sizeof text, "and tensor '%.100s' are one weight here, but %s; remove the wrong one from the "
             "files, or do not tie them", first, what);
    return ddp__source_fail(l, DDP_ERR_MISMATCH, source->file, source->record, text);
}

/* A tied weight has several names; files have one or more of them. The first one found is read; the others
   must have its bytes. */
static ddp_result ddp__load_ties(ddp__loading *l) {
    for (int i = 0; i < l->task.count; i++) {
        ddp__source *source = &l->sources[i];
        if (!l->task.slices[i].tied_to || !source->file) continue;
        ddp__source *first = &l->sources[l->task.slices[i].tied_to - 1];
        if (!first->file) {
            *first = *source;
            memset(source, 0, sizeof *source);
        } else if (first->record->dtype != source->record->dtype) {
            return ddp__tied_fail(l, i, "their dtypes differ");
        }
    }
    return DDP_OK;
}

/* Finds, opens and checks all that can be checked without the data. */
static ddp_result ddp__load_open(ddp__loading *l) {
    size_t length = 0;
    DDP_TRY(ddp__text_load(l, DDP__STATE_FILE, &l->text, &length));
    DDP_TRY(l->text ? ddp__load_state(l, length) : ddp__load_foreign(l));
    for (int f = 0; f < l->file_count; f++) DDP_TRY(ddp__in_file_open(l, &l->files[f]));
    for (int f = 0; f < l->file_count; f++)
        for (int i = 0; i < l->files[f].header.count; i++) DDP_TRY(ddp__load_match(l, &l->files[f], &l->files[f].header.records[i]));
    DDP_TRY(ddp__load_ties(l));
    for (int i = 0; i < l->task.count; i++) {
        const ddp__slice *s = &l->task.slices[i];
        if (!l->sources[i].file && !s->tied_to && !(l->foreign && s->file_kind != 0))
            return ddp_fail(DDP_ERR_MISMATCH, "%s: tensor '%.100s' (%s) is in none of the files", l->task.dir, s->name,
                            ddp__show(ddp__file_dtype_name(s->dtype), s->ndim, s->shape).text);
    }
    return DDP_OK;
}

/* Brings bytes [begin, end) of a tensor into memory, so that what the disk has to say is a result here and not a signal when they are touched. */
static ddp_result ddp__load_touch(const ddp__loading *l, const ddp__source *source, uint64_t begin, uint64_t end) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = source->file->data_at + source->record->begin, low = (first + begin) / page * page;
    if (madvise((void *)(uintptr_t)(source->file->map + low), (size_t)(first + end - low), DDP__POPULATE_READ) != 0 && errno != EINVAL) /* EINVAL: Linux < 5.14 */
        return ddp__source_fail(l, DDP_ERR_SYSTEM, source->file, source->record, "cannot be read: the disk fails, or the file has just been cut short");
    return DDP_OK;
}

/* Where a place of a sequence lies in a part of total bytes that has so many before it. */
static uint64_t ddp__place_in(uint64_t place, uint64_t before, uint64_t total) {
    return place < before ? 0 : place - before < total ? place - before : total;
}

/* Sums up this rank's share. On one machine, whose ranks have one disk, that is one stretch of all tensors one behind the other: where each rank skips the
   others' rows, reading is slower by a third. Otherwise rows [rank * ceil(rows / ranks), ...) of every tensor, which in the usual sharding is what this rank
   copies afterwards. ahead: only brings the share into memory, so that the disk does not wait for sums; at most DDP__AHEAD pieces before these. */
static ddp_result ddp__load_sum(ddp__loading *l, int ahead) {
    uint64_t ranks = (uint64_t)ddp_world_size(l->task.group), rank = (uint64_t)ddp_rank(l->task.group), all = 0, before = 0;
    int together = ddp_local_world_size(l->task.group) == ddp_world_size(l->task.group);
    for (int i = 0; i < l->task.count && together; i++) all += l->sources[i].bytes;
    for (int i = 0; i < l->task.count; before += together ? l->sources[i].bytes : 0, i++) {
        const ddp__source *source = &l->sources[i];
        int tied_to = l->task.slices[i].tied_to;
        const ddp__source *first = tied_to ? &l->sources[tied_to - 1] : NULL; /* must have the same bytes */
        uint64_t total = source->bytes, rows = l->task.slices[i].ndim && total ? (uint64_t)l->task.slices[i].shape[0] : 1;
        uint64_t each = together ? all / ranks + 1 : (rows + ranks - 1) / ranks * (total / rows);
        uint64_t at = ddp__place_in(each * rank, before, total), end = ddp__place_in(each * (rank + 1), before, total);
        for (uint64_t piece; at < end; at += piece) {
            piece = end - at < DDP__PIECE ? end - at : DDP__PIECE;
            while (ahead && sem_wait(&l->room) != 0) {}
            if (ahead && __atomic_load_n(&l->stops, __ATOMIC_RELAXED)) return DDP_OK;
            DDP_TRY(ddp__load_touch(l, source, at, at + piece));
            if (ahead) continue;
            if (first && source->file) {
                DDP_TRY(ddp__load_touch(l, first, at, at + piece));
                int same = memcmp(first->data + at, source->data + at, (size_t)piece) == 0;
                if (!same) return ddp__tied_fail(l, i, "their bytes differ");
            }
            l->task.crc[i] = ddp__crc_feed(l->task.crc[i], source->data + at, (size_t)piece);
            sem_post(&l->room);
        }
        if (!ahead) l->task.crc[i] = ddp__crc_multiply(l->task.crc[i], ddp__crc_shift(total - end));
    }
    return DDP_OK;
}

static ddp_result ddp__load_compare_sums(const ddp__loading *l) {
    for (int i = 0; i < l->task.count; i++) {
        const ddp__stored *r = l->sources[i].record;
        uint32_t crc = r ? ddp__crc_finish(l->task.crc[i], r->end - r->begin) : 0;
        char what[100];
        if (!r || !r->has_crc || crc == r->crc) continue;
        snprintf(what, sizeof what, "is damaged: its checksum is %08x, not %08x", crc, r->crc);
        return ddp__source_fail(l, DDP_ERR_CORRUPT, l->sources[i].file, r, what);
    }
    return DDP_OK;
}

/* Copies this rank's box, changing the dtype on the way where it is another one. A tensor that is in no file becomes zero. */
static ddp_result ddp__load_copy(const ddp__loading *l, int index) {
    const ddp__slice *s = &l->task.slices[index];
    const ddp__source *source = &l->sources[index];
    ddp_dtype dtype = source->file ? source->record->dtype->dtype : s->dtype;
    ddp__box_runs runs = ddp__runs_of(s);
    uint64_t size = ddp_dtype_size(s->dtype), file_size = ddp_dtype_size(dtype), at, to, n, begin, ready = 0;
    double stage[512]; /* what cast reads is aligned */
    while (ddp__runs_next(&runs, &at, &to))
        for (uint64_t done = 0; done < runs.length; done += n) {
            uint64_t most = dtype == s->dtype ? DDP__PIECE / size : sizeof stage / file_size;
            char *out = (char *)s->data + (to + done) * size;
            n = runs.length - done < most ? runs.length - done : most;
            begin = (at + done) * file_size;
            if (!source->file) { memset(out, 0, (size_t)(n * size)); continue; }
            if (begin + n * file_size > ready) { /* where runs are short, a piece for many */
                ready = begin + DDP__PIECE < source->bytes ? begin + DDP__PIECE : source->bytes;
                DDP_TRY(ddp__load_touch(l, source, begin, ready));
            }
            memcpy(dtype == s->dtype ? (void *)out : (void *)stage, source->data + begin, (size_t)(n * file_size));
            if (dtype != s->dtype) ddp_device_cpu()->cast(out, s->dtype, stage, dtype, (size_t)n);
        }
    return DDP_OK;
}

/* Copies tensors that the other thread has not come to. */
static ddp_result ddp__load_copies(ddp__loading *l) {
    for (int i; (i = __atomic_fetch_add(&l->next, 1, __ATOMIC_RELAXED)) < l->task.count;) DDP_TRY(ddp__load_copy(l, i));
    return DDP_OK;
}

static void *ddp__load_main(void *argument) {
    ddp__loading *l = (ddp__loading *)argument;
    if (l->copies) l->helped = ddp__fsdp_error(ddp__load_copies(l));
    else (void)ddp__load_sum(l, 1); /* what fails here fails for who sums up */
    return NULL;
}

/* Sums up or copies, with a helper where there is a thread to be had. */
static ddp_result ddp__load_pass(ddp__loading *l, int copies) {
    pthread_t helper;
    l->copies = copies;
    sem_init(&l->room, 0, DDP__AHEAD);
    int helped = pthread_create(&helper, NULL, ddp__load_main, l) == 0;
    ddp_result result = copies ? ddp__load_copies(l) : ddp__load_sum(l, 0);
    __atomic_store_n(&l->stops, 1, __ATOMIC_RELAXED);
    sem_post(&l->room);
    if (helped) pthread_join(helper, NULL);
    sem_destroy(&l->room);
    return result == DDP_OK ? ddp_error_restore(&l->helped) : result;
}

/* What this rank has found, for the error line of ranks that find different checkpoints. */
static void ddp__load_describe(const ddp__loading *l, char text[300]) {
    snprintf(text, 300, "finds checkpoint %08x in %.100s (is the folder shared? did a save end just now?)", l->text_crc, l->task.dir);
}

/* All that can be wrong, before anything is written to. */
static ddp_result ddp__load_check(ddp__loading *l, const char *dir, const ddp_scaler *scaler) {
    ddp__task *t = &l->task;
    ddp_scaler probe = DDP_ZERO; /* finds out whether the scaler would accept the checkpoint's numbers */
    struct stat info;
    char text[300];
    l->sources = (ddp__source *)ddp_host_alloc(t->group, ((size_t)t->count + 1) * sizeof *l->sources);
    if (l->sources) memset(l->sources, 0, (size_t)t->count * sizeof *l->sources);
    DDP_TRY(ddp__task_begin(t, dir, "", l->sources ? DDP_OK : DDP_ERR_NO_MEMORY));
    if (stat(t->dir, &info) != 0) { /* killed in the middle of ddp__save_commit */
        size_t length = strlen(t->dir);
        memcpy(t->dir + length, ".old", 5);
        if (stat(t->dir, &info) != 0) t->dir[length] = '\0';
    }
    ddp_result result = ddp__load_open(l);
    if (scaler) probe = *scaler;
    if (result == DDP_OK && scaler && l->state.scaler.scale > 0) result = ddp_scaler_load(&probe, &l->state.scaler);
    for (int f = 0; f < l->file_count && result == DDP_OK; f++) l->text_crc = ddp__crc_feed(l->text_crc, &l->files[f].crc, sizeof l->files[f].crc);
    ddp__load_describe(l, text);
    DDP_TRY(ddp_agree(t->group, t->who, result, l->text_crc, text));
    DDP_TRY(ddp_agree(t->group, t->who, ddp__load_pass(l, 0), 0, ""));
    DDP_TRY(ddp__crc_combine(t->group, t->crc, t->count));
    return ddp_agree(t->group, t->who, ddp__load_compare_sums(l), 0, "");
}

static ddp_result ddp__load_run(ddp__loading *l, ddp_group *replicas, const char *dir, const ddp_scaler *scaler, ddp_fsdp_state *state) {
    ddp_group *const groups[2] = {l->task.group, replicas};
    char text[300];
    ddp_result result = ddp__load_check(l, dir, scaler);
    ddp__load_describe(l, text);
    if (replicas) result = ddp_agree(replicas, l->task.who, result, l->text_crc, text);
    if (result != DDP_OK) return result;
    DDP_TRY(ddp_agree_groups(groups, 2, l->task.who, ddp__load_pass(l, 1), 0, "")); /* the pass is the first write to the caller's memory */
    if (state && l->foreign) state->step = 0;
    else if (state) *state = l->state;
    if (l->foreign && ddp_rank(l->task.group) == 0)
        ddp_group_log(l->task.group, "loaded a model without " DDP__STATE_FILE ": optimizer state starts at zero, at step 0");
    return DDP_OK;
}

/* Collective. Fills this rank's boxes, which need not tile the tensors, from a checkpoint of any world size, or from a model of another program: then optimizer tensors
   become zero and of *state, which may be NULL, only the step changes. On failure nothing has been written to, unless the disk failed between the check and the copy.
   replicas, may be NULL: groups that load the same; all fail or none. scaler, may be NULL: is to take its state from *state. */
static ddp_result ddp__checkpoint_load(ddp_group *group, ddp_group *replicas, const char *dir, const ddp__slice *slices, int count, const ddp_scaler *scaler,
                                       ddp_fsdp_state *state) {
    ddp__loading loading = DDP_ZERO;
    loading.task = ddp__task_of(group, "ddp_fsdp_load", slices, count);
    ddp_result result = ddp__load_run(&loading, replicas, dir, scaler, state);
    for (ddp__in_file *file = loading.files; file < loading.files + loading.file_count; file++) {
        if (file->map) munmap((void *)(uintptr_t)file->map, file->map_bytes);
        ddp_host_free(group, file->header.records);
        ddp_host_free(group, file->text);
    }
    ddp_host_free(group, loading.files);
    ddp_host_free(group, loading.sources);
    ddp_host_free(group, loading.text);
    ddp_host_free(group, loading.task.keys);
    return result;
}

//== sharding: tables and memory ====================================================================== >>impl-sharding

/* What each rank holds of a parameter of 5 rows on 3 ranks (chunk 2), under FULL_SHARD and under the strategies that keep values whole:

       FULL_SHARD   shard  rank 0 |0 1|   rank 1 |2 3|   rank 2 |4 -|      padded to chunk rows, alike on every rank
                    whole  a slot from gather to release |0 1 2 3 4|
       otherwise    whole  |0 1 2 3 4| on every rank; the own rows are the shard, the others are as old as the last gather

   A rank reads its peers' rows where they lie, if ddp_group_peer finds them (direct); otherwise they travel in wire blocks, one per rank. */

/* As the fields of ddp_fsdp_bytes, whose last is the total. */
enum { DDP__OF_SHARDS, DDP__OF_GATHERED, DDP__OF_GRADIENTS, DDP__OF_OPTIMIZER, DDP__OF_COMMUNICATION, DDP__OF_BOOKKEEPING, DDP__PURPOSES };
enum { DDP__MEMORY_HOST, DDP__MEMORY_DEVICE, DDP__MEMORY_GROUP, DDP__MEMORY_FILE, DDP__MEMORY_PINNED };
enum { DDP__UNIT_GONE, DDP__UNIT_COMING, DDP__UNIT_THERE }; /* the whole values of a unit */
enum { DDP__GRADS, DDP__CASTED, DDP__SUMS }; /* layouts of gradients: whole as backward writes them, whole with the wire's dtype, and this rank's rows */
enum { DDP__LEVELS = 32 };                                 /* of the binary counter of micro-batches */

typedef struct ddp__holding { /* one piece of memory; the host's lies behind this */
    void *memory, *raw;
    size_t size, extra; /* counted under its purpose; beside it */
    int purpose, kind;
    struct ddp__holding *next;
} ddp__holding;

typedef struct ddp__slot { /* memory for one unit's whole values, or whole gradients */
    unsigned char *memory;
    struct ddp__unit *reducing; /* gradients: whose reduction still reads it */
    uint64_t given;             /* gradients: number of the last reduction from here, which peers read */
    int number;                 /* gradients: how many were made before, on every rank */
    uint64_t used;              /* gradients: grows from use to use */
    int busy;
    struct ddp__slot *next;
} ddp__slot;

typedef struct ddp__weight { /* a parameter of a unit: one use */
    ddp_fsdp_param *entry;
    struct ddp__weight *source;  /* the use whose shard this one shares, or itself */
    struct ddp__unit *unit;
    const char *name;
    ddp_dtype master_dtype, dtype, grad_dtype, wire_dtype; /* of master and sums; of what is gathered; of whole gradients; of what is added over ranks */
    size_t rows, row_count, chunk, first, mine;            /* rows of the whole, elements of one; rows of a shard; this rank's rows */
    size_t whole_at, grad_at, cast_at, shard_at, sum_at, master_at; /* bytes from the start of the unit's memory of that kind */
    size_t gather_at;            /* bytes from the start of a rank's block of a gather */
    size_t wire_at;              /* elements from the start of a wire block of wire_dtype */
    unsigned char *shard, *master; /* this rank's rows: as they are gathered (quantize_gather: in 8 bits), and as they are updated */
    int in_place;                /* the sum of its gradients lies in the whole gradients */
    int is_slice;                /* of a larger tensor */
    int master_number;           /* what the optimizer knows it by: a source that is trained */
    int listed;                  /* its number in the list of tensors of a checkpoint: a source */
} ddp__weight;

typedef struct ddp__unit {
    ddp_fsdp *fsdp;
    char name[64];
    int index, count, trained;
    int layout;                    /* of its gradients when they are added over ranks */
    int converts;                  /* 1 = some gradients are added over ranks in another dtype than theirs */
    ddp__weight *weights;
    size_t whole_bytes, grad_bytes, cast_bytes, shard_bytes, sum_bytes, master_bytes, gather_bytes;
    size_t wire_count[DDP_U64 + 1]; /* elements of a wire block, by dtype */
    unsigned char *whole, *grads, *shard;
    ddp__slot *whole_slot, *grad_slot;
    unsigned char *level[DDP__LEVELS]; /* sums over 2^k micro-batches: of shards, or of whole gradients */
    int depth;                     /* levels in use */
    int state, in_use, attached;   /* attached: gradient memory is there for a backward */
    int reduced;                   /* micro-batches of this step whose gradients were handed in */
    ddp_work gathering, reducing;
    ddp__slot *reducing_slot;
    uint64_t given;                /* number of its last reduction, where peers read it */
} ddp__unit;

struct ddp_fsdp {
    ddp_fsdp_desc desc;
    const char *who;               /* the public function under way, or the last one, that takes memory */
    ddp_group *group;
    const ddp_device *device;
    int world, rank;               /* over which things are split: 1 and 0 under NO_SHARD */
    ddp_group *copies[2];          /* over which they are replicated */
    int copy_count;
    float grad_scale;              /* of the sums, still to be multiplied: clipping. Or, where the device decides: */
    float *factor, *factor_now;    /* its memory for it, NULL = the host decides; and the same, or NULL while there is nothing to multiply */
    float *norm, last_norm;        /* of the last clipping: memory that the device writes until `clipped`; the host's own */
    void *clipped;                 /* an event */
    int has_norm;
    uint64_t divisor;              /* ranks times micro-batches; per_token: the step's tokens, 0 = not known yet */
    int keeps_whole, reduces_each, direct, finished, no_grad;
    int in_shard;                  /* FULL_SHARD of one rank on a device: a shard has every row, and is what a gather points to */
    ddp__unit *units;
    ddp__weight *weights;
    int unit_count, weight_count;
    ddp__slot *whole_slots, *grad_slots;
    size_t whole_slot_bytes, grad_slot_bytes;
    unsigned char *cast, *tile, *send, *receive; /* staging, see impl-shard-reduce */
    size_t cast_bytes, tile_bytes, send_bytes, receive_bytes;
    int *order, order_count, now_count, order_cap; /* units in the order of gathers: of the last step, over which this one writes its own */
    int following;                 /* this step has had the last one's order so far: what is behind now_count still is the last one's */
    int most_in_use, in_use, slots_ready;
    uint64_t order_hash;
    uint64_t **turns;              /* direct: every rank's words by which ranks keep in step, see impl-shard-reduce */
    ddp__unit **given_units;       /* whose reductions this rank has handed in, by number */
    unsigned char **slot_memory;   /* of grad_slots, by number */
    int grad_slot_count;
    uint64_t grad_slots_used;      /* how often */
    uint64_t given, taken, cast_given; /* numbers of the last reduction handed in, carried out, and handed in through cast */
    ddp_optimizer *optimizer;
    ddp_param *masters;            /* what the optimizer sees */
    ddp__weight **master_of;       /* the weight behind each of them */
    int master_count;
    ddp_tensor *sums;              /* the sums of their gradients, on the device */
    ddp_group *host;               /* OFFLOAD_HOST on a device with memory of its own: a world of one on the CPU, in which the optimizer works */
    unsigned char *host_sums, *host_rows; /* in memory that the device copies at once: gradients of this rank's rows; two pieces of values on their way */
    size_t host_rows_bytes, host_sums_bytes;
    void **arrived, *left[2];      /* events: pieces of gradients are there; the pieces of values have gone */
    int pieces, piece, turn_up;    /* of gradients, in order; the next one that is stepped; the piece of values that is filled next */
    ddp_exact_sum *squares;        /* the device's memory */
    void *turn;                    /* an event, where a device has lanes and there are replicas */
    struct ddp__saver *saver;
    ddp_fsdp_state state;
    int64_t step;
    ddp__holding *holdings;
    ddp_fsdp_bytes now, peak;
    size_t group_bytes, file_bytes;
    int file;
    off_t file_size;
    ddp_saved_error state_told;          /* why there was no memory for moments */
    void *own_raw;
    size_t own_counted;
};

static void ddp__size_at_least(size_t *size, size_t needed) { if (*size < needed) *size = needed; }
/* Replicas wait for ranks of other groups: what fails in one of the two groups fails in the other. */
static ddp_result ddp__fsdp_failed(const ddp_fsdp *f, ddp_result result) {
    if (result == DDP_OK || !f->desc.replicas) return result;
    ddp_saved_error told = ddp__fsdp_error(result);
    ddp_group_pass_on(f->group, f->desc.replicas);
    ddp_group_pass_on(f->desc.replicas, f->group);
    return ddp_error_restore(&told);
}

/* The others will wait for this rank, or have failed too. */
static ddp_result ddp__fsdp_give_up(const ddp_fsdp *f, ddp_result result) {
    ddp_saved_error told = ddp__fsdp_error(result);
    ddp_group_poison(f->group, result, told.text);
    return ddp__fsdp_failed(f, ddp_error_restore(&told));
}

static ddp_result ddp__fsdp_fail(const ddp_fsdp *f, ddp_result result, const char *who, const ddp__unit *unit) {
    ddp_saved_error told = ddp__fsdp_error(result);
    char begin[128];
    who = ddp_public_call_name(who);
    (void)ddp__fsdp_give_up(f, result);
    snprintf(begin, sizeof begin, "rank %d/%d %s ", ddp_rank(f->group), ddp_world_size(f->group), who);
    if (strncmp(told.text, begin, strlen(begin)) == 0) /* the line names the call already */
        return ddp_fail(result, "%sunit=%s %s", begin, unit->name, told.text + strlen(begin));
    return ddp_fail(result, "%s unit=%s: %s", who, unit->name, told.text);
}

static void ddp__fsdp_count(ddp_fsdp *f, int purpose, size_t size, int add) {
    size_t *now = (size_t *)(void *)&f->now, *peak = (size_t *)(void *)&f->peak;
    for (int i = purpose, left = 2; left-- > 0; i = DDP__PURPOSES) { /* the purpose, then the total */
        now[i] += add ? size : 0 - size;
        ddp__size_at_least(&peak[i], now[i]);
    }
}

static void ddp__holding_count(ddp_fsdp *f, const ddp__holding *h, int add) {
    ddp__fsdp_count(f, DDP__OF_BOOKKEEPING, h->extra, add);
    if (h->kind != DDP__MEMORY_FILE) ddp__fsdp_count(f, h->purpose, h->size, add);
    if (h->kind == DDP__MEMORY_FILE) f->file_bytes += add ? h->size : 0 - h->size;
    if (h->kind == DDP__MEMORY_GROUP) f->group_bytes += add ? h->size : 0 - h->size;
}

/* Host memory by the desc's allocator or the group's. */
static void *ddp__fsdp_host(ddp_fsdp *f, size_t size, void **raw, size_t *counted) {
    int own = f->desc.alloc_fn != NULL;
    *counted = size + (own ? 64 : DDP_MALLOC_EXTRA);
    *raw = own ? f->desc.alloc_fn(size + 64, f->desc.user) : ddp_host_alloc(f->group, size);
    if (!*raw) ddp_fail_in(DDP_ERR_NO_MEMORY, f->who, f->group, "%zu bytes could not be allocated", size);
    return *raw && own ? (void *)(((uintptr_t)*raw + 63) / 64 * 64) : *raw;
}

static void ddp__fsdp_unhost(ddp_fsdp *f, void *raw) {
    if (f->desc.alloc_fn) f->desc.free_fn(raw, f->desc.user);
    else ddp_host_free(f->group, raw);
}

/* The next pages of the offload file, mapped. */
static void *ddp__fsdp_map(ddp_fsdp *f, size_t size) {
    off_t start = f->file_size, page = (off_t)sysconf(_SC_PAGESIZE);
    struct rlimit limit;
    void *memory = MAP_FAILED;
    int error = EFBIG; /* beyond the limit a call would be a signal, as would the first write to a page that a full disk has no room for */
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || (rlim_t)start + (rlim_t)size <= limit.rlim_cur)
        error = posix_fallocate(f->file, start, (off_t)size);
    if (error == EOPNOTSUPP) error = ftruncate(f->file, start + (off_t)size) == 0 ? 0 : errno;
    if (!error) memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, f->file, start);
    if (memory == MAP_FAILED) {
        ddp_fail(DDP_ERR_SYSTEM, "ddp_fsdp offload_dir=%s: %zu bytes of file could not be had: %s", f->desc.offload_dir, size, strerror(error ? error : errno));
        return NULL;
    }
    f->file_size = (start + (off_t)size + page - 1) / page * page;
    return memory;
}

/* Zeroed memory, counted under its purpose until ddp__fsdp_give or the end. Group memory: collective. */
static ddp_result ddp__fsdp_take(ddp_fsdp *f, int purpose, int kind, size_t size, void *out) {
    ddp_result result = DDP_OK;
    size_t counted, behind, node = ddp_round_up(sizeof(ddp__holding), 64);
    void *raw, *memory = NULL;
    if (kind == DDP__MEMORY_GROUP && ddp_world_size(f->group) == 1) kind = DDP__MEMORY_DEVICE;
    if (kind == DDP__MEMORY_DEVICE && f->device == ddp_device_cpu()) kind = DDP__MEMORY_HOST;
    if (kind == DDP__MEMORY_PINNED && !f->device->alloc_pinned) kind = DDP__MEMORY_HOST;
    size = size ? size : 64, behind = kind == DDP__MEMORY_HOST ? size : 0;
    memset(out, 0, sizeof memory);
    ddp__holding *h = (ddp__holding *)ddp__fsdp_host(f, node + behind, &raw, &counted);
    if (!h && kind == DDP__MEMORY_GROUP) ddp_group_poison(f->group, DDP_ERR_NO_MEMORY, ddp_last_error()); /* the others are about to wait for this rank */
    if (!h) return DDP_ERR_NO_MEMORY;
    memset(h, 0, node + behind);
    if (kind == DDP__MEMORY_GROUP) result = ddp_group_alloc(f->group, size, &memory);
    else if (kind == DDP__MEMORY_DEVICE) result = f->device->alloc(f->group, size, &memory);
    else if (kind == DDP__MEMORY_FILE) result = (memory = ddp__fsdp_map(f, size)) != NULL ? DDP_OK : DDP_ERR_SYSTEM;
    else if (kind == DDP__MEMORY_PINNED) result = f->device->alloc_pinned(f->group, size, &memory);
    else memory = (unsigned char *)h + node;
    if (result != DDP_OK) {
        ddp__fsdp_unhost(f, raw);
        return result;
    }
    const ddp__holding holding = {memory, raw, size, counted - behind, purpose, kind, f->holdings};
    *h = holding;
    f->holdings = h;
    ddp__holding_count(f, h, 1);
    memcpy(out, &memory, sizeof memory);
    if (kind == DDP__MEMORY_PINNED) memset(memory, 0, size);
    return DDP_OK;
}

/* Gives memory of ddp__fsdp_take back. Group memory: collective. NULL is ignored. */
static void ddp__fsdp_give(ddp_fsdp *f, void *memory) {
    ddp__holding **link = &f->holdings, *h;
    while (*link && (*link)->memory != memory) link = &(*link)->next;
    if (!memory || !(h = *link)) return;
    *link = h->next;
    ddp__holding_count(f, h, 0);
    if (h->kind == DDP__MEMORY_GROUP) ddp_group_free(f->group, memory);
    else if (h->kind == DDP__MEMORY_DEVICE) f->device->free(f->group, memory);
    else if (h->kind == DDP__MEMORY_FILE) munmap(memory, h->size);
    else if (h->kind == DDP__MEMORY_PINNED) f->device->free_pinned(memory);
    ddp__fsdp_unhost(f, h->raw);
}

static const int ddp__offload_kinds[] = {DDP__MEMORY_DEVICE, DDP__MEMORY_HOST, DDP__MEMORY_FILE};
static void *ddp__fsdp_state_alloc(size_t size_bytes, void *user) {
    ddp_fsdp *f = (ddp_fsdp *)user;
    void *memory;
    f->state_told = ddp__fsdp_error(ddp__fsdp_take(f, DDP__OF_OPTIMIZER, ddp__offload_kinds[f->desc.offload], size_bytes, &memory));
    return memory;
}

static void ddp__fsdp_state_free(void *memory, void *user) { ddp__fsdp_give((ddp_fsdp *)user, memory); }

//== sharding: layout =================================================================================== >>impl-layout

static size_t ddp__weight_bytes(const ddp__weight *w, size_t rows, ddp_dtype dtype) { return rows * w->row_count * ddp_dtype_size(dtype); }
static size_t ddp__mine(const ddp__weight *w) { return w->mine * w->row_count; } /* elements of this rank's rows */
static size_t ddp__rows_first(const ddp__weight *w, int rank) { size_t first = w->chunk * (size_t)rank; return first < w->rows ? first : w->rows; }
static size_t ddp__rows_of(const ddp__weight *w, int rank) { return ddp__rows_first(w, rank + 1) - ddp__rows_first(w, rank); }

/* A use of a parameter that an earlier one in reach of it has brought: the same unit's, or, where values stay whole, any. */
static int ddp__is_alias(const ddp_fsdp *f, const ddp__weight *w) { return w->source != w && (w->source->unit == w->unit || f->keeps_whole); }
static int ddp__is_trained(const ddp__weight *w) { return !w->entry->frozen; }
#define DDP__EACH_WEIGHT(unit, w) for (ddp__weight *w = (unit)->weights; w < (unit)->weights + (unit)->count; w++)
#define DDP__EACH_TRAINED(unit, w) DDP__EACH_WEIGHT(unit, w) if (ddp__is_trained(w))
#define DDP__EACH_UNIT(f, unit) for (ddp__unit *unit = (f)->units; unit < (f)->units + (f)->unit_count; unit++)

static int ddp__has_master(const ddp_fsdp *f, const ddp__weight *w) { /* beside what is gathered */
    return w->dtype != w->master_dtype || f->desc.offload != DDP_FSDP_OFFLOAD_NONE || f->desc.quantize_gather;
}

#define DDP__WEIGHT_BAD(f, w, text, ...) \
    ddp__fsdp_bad("ddp_fsdp_create", (f)->group, "unit %s, parameter %.200s: " text, (w)->unit->name, (w)->name, __VA_ARGS__)

/* Which earlier use holds this one's shard. */
static ddp_result ddp__weight_find_source(ddp_fsdp *f, ddp__weight *w) {
    const ddp_tensor *value = &w->entry->param.value;
    const char *tied_to = w->entry->tied_to;
    w->source = w;
    for (const ddp__weight *other = f->weights; other < w; other++)
        if (!strcmp(other->name, w->name)) return DDP__WEIGHT_BAD(f, w, "unit %.64s has a parameter of this name too; give each its own", other->unit->name);
    for (const ddp__weight *other = f->weights; other < w; other++) {
        int same_data = value->data && other->entry->param.value.data == value->data;
        if (!same_data && !(tied_to && !strcmp(other->name, tied_to))) continue;
        if (same_data && other->unit != w->unit && !tied_to)
            return DDP__WEIGHT_BAD(f, w, "shares its memory with %.80s of unit %.64s; put both into one unit, or set tied_to", other->name, other->unit->name);
        if (other->rows != w->rows || other->row_count != w->row_count || other->master_dtype != w->master_dtype || other->dtype != w->dtype)
            return DDP__WEIGHT_BAD(f, w, "is tied to %.80s, a parameter of another shape or dtype", other->name);
        if (!other->entry->frozen != !w->entry->frozen)
            return DDP__WEIGHT_BAD(f, w, "is tied to %.80s of unit %.64s, and one of them is frozen; freeze both, or neither", other->name, other->unit->name);
        w->source = other->source;
        return DDP_OK;
    }
    if (tied_to) return DDP__WEIGHT_BAD(f, w, "tied_to=%.80s: no earlier parameter has that name", tied_to);
    return value->data || f->desc.init_fn ? DDP_OK : DDP__WEIGHT_BAD(f, w, "has no values; set value.data, or init_fn of the %s", "desc");
}

static ddp_result ddp__weight_describe(ddp_fsdp *f, ddp__weight *w) {
    const ddp_tensor *value = &w->entry->param.value;
    const int64_t *shape = w->entry->global_shape, *offset = w->entry->global_offset;
    ddp_dtype grad = w->entry->param.grad.dtype;
    int64_t count = ddp_tensor_count(value), global = 0, inside = 1;
    for (int i = 0; i < value->ndim && count >= 0; i++) {
        global |= shape[i];
        inside &= offset[i] >= 0 && shape[i] >= value->shape[i] && offset[i] <= shape[i] - value->shape[i];
    }
    const char *wrong = !w->entry->param.name || !w->entry->param.name[0] ? "has no name; checkpoints need one"
                      : !ddp__is_tensor_name(w->name, 9900) ? "its name is not valid UTF-8 of at most 9900 bytes, or __metadata__; checkpoints need one that is"
                      : count < 0 ? "its shape is not one: ndim or an entry is negative, or the product overflows"
                      : !ddp_is_float(value->dtype) ? "its dtype is not a float; keep it outside the units"
                      : grad != DDP_DTYPE_DEFAULT && !ddp_is_float(grad) ? "the dtype of its gradient is not a float"
                      : global && !inside ? "global_offset and its shape reach beyond global_shape" : NULL;
    if (wrong) return DDP__WEIGHT_BAD(f, w, "%s", wrong);
    w->is_slice = global != 0;
    w->rows = value->ndim ? (size_t)value->shape[0] : 1;
    w->row_count = w->rows ? (size_t)count / w->rows : 0;
    w->chunk = (w->rows + (size_t)f->world - 1) / (size_t)f->world;
    w->first = ddp__rows_first(w, f->rank);
    w->mine = ddp__rows_of(w, f->rank);
    w->master_dtype = value->dtype == DDP_F64 ? DDP_F64 : DDP_F32;
    w->dtype = f->desc.param_dtype != DDP_DTYPE_DEFAULT ? f->desc.param_dtype : value->dtype;
    w->grad_dtype = grad != DDP_DTYPE_DEFAULT ? grad : w->dtype;
    w->wire_dtype = f->desc.reduce_dtype != DDP_DTYPE_DEFAULT ? f->desc.reduce_dtype : w->master_dtype;
    return ddp__weight_find_source(f, w);
}

/* This rank's rows of the master values. */
static ddp_tensor ddp__weight_rows(const ddp__weight *w) {
    ddp_tensor rows = w->entry->param.value;
    rows.data = ddp__mine(w) ? w->source->master : NULL, rows.dtype = w->master_dtype;
    if (rows.ndim || !w->mine) rows.shape[0] = (int64_t)w->mine;
    if (!w->mine && !rows.ndim) rows.ndim = 1;
    return rows;
}

static size_t ddp__lay(size_t *at, size_t size) { /* the next 64-byte aligned place for size bytes */
    size_t place = *at;
    *at += ddp_round_up(size, 64);
    return place;
}

enum { DDP__QUANT_BLOCK = 256 };

static size_t ddp__quant_scales(const ddp__weight *w) { return (w->chunk * w->row_count + DDP__QUANT_BLOCK - 1) / DDP__QUANT_BLOCK; }

/* Bytes of one rank's rows of w as they are gathered. */
static size_t ddp__weight_wire(const ddp_fsdp *f, const ddp__weight *w) {
    size_t count = w->chunk * w->row_count;
    return f->desc.quantize_gather ? count + ddp__quant_scales(w) * sizeof(float) : count * ddp_dtype_size(w->dtype);
}

/* Whether whole gradients are cast before anything is added: where micro-batches are added first, and where
   copies are added in another dtype than the master's. Everywhere else the cast is a part of the addition, or
   of the copy that is sent. */
static int ddp__casts_whole(const ddp_fsdp *f, const ddp__weight *w) {
    int adds_micro_batches = !f->reduces_each && f->desc.micro_batch_count > 1;
    int adds_copies = f->world == 1 && w->wire_dtype != w->master_dtype;
    return w->wire_dtype != w->grad_dtype && (adds_micro_batches || adds_copies);
}

/* Where the parts of a unit lie in its memory of each kind. */
static void ddp__unit_layout(ddp_fsdp *f, ddp__unit *unit) {
    DDP__EACH_TRAINED(unit, w) unit->converts |= w->wire_dtype != w->grad_dtype;
    DDP__EACH_WEIGHT(unit, w) {
        size_t shard_count = w->chunk * w->row_count;
        if (w->source == w) {
            w->shard_at = ddp__lay(&unit->shard_bytes, ddp__weight_wire(f, w));
            if (ddp__has_master(f, w)) w->master_at = ddp__lay(&unit->master_bytes, shard_count * ddp_dtype_size(w->master_dtype));
        }
        if (!ddp__is_alias(f, w)) {
            w->whole_at = ddp__lay(&unit->whole_bytes, ddp__weight_bytes(w, w->rows, w->dtype));
            w->gather_at = ddp__lay(&unit->gather_bytes, ddp__weight_wire(f, w));
        } else if (w->source->unit == unit) w->whole_at = w->source->whole_at;
        if (!ddp__is_trained(w)) continue;
        unit->trained++;
        if (ddp__casts_whole(f, w)) unit->layout = DDP__CASTED;
        w->grad_at = ddp__lay(&unit->grad_bytes, ddp__weight_bytes(w, w->rows, w->grad_dtype));
        w->cast_at = ddp__lay(&unit->cast_bytes, ddp__weight_bytes(w, w->rows, w->wire_dtype));
        w->in_place = !f->reduces_each && w->grad_dtype == w->master_dtype && w->wire_dtype == w->master_dtype && (f->world == 1 || f->copy_count == 0);
        if (f->world == 1 && unit->converts) w->in_place = 0; /* all sums of the unit are together */
        if (!w->in_place) w->sum_at = ddp__lay(&unit->sum_bytes, shard_count * ddp_dtype_size(w->master_dtype));
        w->wire_at = unit->wire_count[w->wire_dtype];
        unit->wire_count[w->wire_dtype] += shard_count;
    }
}

static size_t ddp__wire_bytes(const size_t *wire_count) { /* one block of each dtype */
    size_t bytes = 0;
    for (int d = 0; d <= DDP_U64; d++) bytes += ddp_round_up(wire_count[d] * ddp_dtype_size((ddp_dtype)d), 64);
    return bytes;
}
//== sharding: gather ==================================================================================== >>impl-gather

/* This rank's rows in 8 bits: for each block of 256 its largest magnitude, then the values in 127ths of that, rounded. */
static void ddp__quantize(const ddp__weight *w, unsigned char *out) {
    size_t count = ddp__mine(w);
    float *scale = (float *)(void *)out, x[DDP__QUANT_BLOCK];
    int8_t *q = (int8_t *)(void *)(out + ddp__quant_scales(w) * sizeof(float));
    for (size_t from = 0; from < count; from += DDP__QUANT_BLOCK) {
        size_t n = count - from < (size_t)DDP__QUANT_BLOCK ? count - from : (size_t)DDP__QUANT_BLOCK;
        float most = 0;
        ddp_device_cpu()->cast(x, DDP_F32, w->master + from * ddp_dtype_size(w->master_dtype), w->master_dtype, n);
        for (size_t i = 0; i < n; i++) most = fabsf(x[i]) > most || x[i] != x[i] ? fabsf(x[i]) : most;
        scale[from / DDP__QUANT_BLOCK] = most; /* NaN and infinities spread over their block */
        for (size_t i = 0; i < n; i++) q[from + i] = (int8_t)(most > 0 && most <= 3.402823466e38f ? lrintf(x[i] / most * 127.0f) : 0);
    }
}

static void ddp__dequantize(const ddp__weight *w, unsigned char *out, const unsigned char *in, size_t count) {
    const float *scale = (const float *)(const void *)in;
    const int8_t *q = (const int8_t *)(const void *)(in + ddp__quant_scales(w) * sizeof(float));
    float x[DDP__QUANT_BLOCK];
    for (size_t from = 0; from < count; from += DDP__QUANT_BLOCK) {
        size_t n = count - from < (size_t)DDP__QUANT_BLOCK ? count - from : (size_t)DDP__QUANT_BLOCK;
        float most = scale[from / DDP__QUANT_BLOCK], step = most / 127.0f;
        if (most < 1e-30f) for (size_t i = 0; i < n; i++) x[i] = (float)((double)most * q[from + i] / 127); /* the step has few bits there, or none */
        else for (size_t i = 0; i < n; i++) x[i] = step * (float)q[from + i];
        ddp_device_cpu()->cast(out + from * ddp_dtype_size(w->dtype), w->dtype, x, DDP_F32, n);
    }
}

/* Marks an event; the host waits until a lane has come to it. NULL where the device's calls are done when they return. A failed group ends the wait, unless what
   the event stands for uses memory that is about to go: then only the time `until` does, where it is not 0. */
static ddp_result ddp__fsdp_mark(const ddp_fsdp *f, ddp_stream_kind lane, void *event) { return event ? f->device->event_record(f->group, lane, event) : DDP_OK; }
static ddp_result ddp__fsdp_await(const ddp_fsdp *f, void *event, double until) {
    const struct timespec nap = {0, 20000};
    for (int done = !event; !done;) {
        DDP_TRY(f->device->event_test(f->group, event, &done));
        if (!done && until == 0) DDP_TRY(ddp_group_status(f->group));
        if (!done && until > 0 && ddp_now() > until) return DDP_ERR_TIMEOUT;
        if (!done) nanosleep(&nap, NULL);
    }
    return DDP_OK;
}

/* OFFLOAD_HOST: sends elements of the master copy up, as they are gathered. One piece is filled while the other one travels. */
static ddp_result ddp__host_publish(ddp_fsdp *f, const ddp__weight *w, size_t from, size_t count) {
    for (size_t n, size = ddp_dtype_size(w->dtype); count; from += n, count -= n, f->turn_up ^= 1) {
        unsigned char *near = f->host_rows + (size_t)f->turn_up * f->host_rows_bytes / 2;
        n = count < DDP__HOST_PIECE ? count : DDP__HOST_PIECE;
        DDP_TRY(ddp__fsdp_await(f, f->left[f->turn_up], 0));
        ddp_device_cpu()->cast(near, w->dtype, w->master + from * ddp_dtype_size(w->master_dtype), w->master_dtype, n);
        (f->device->copy_async ? f->device->copy_async : f->device->copy)(w->shard + from * size, near, n * size);
        DDP_TRY(ddp__fsdp_mark(f, DDP_STREAM_COMPUTE, f->left[f->turn_up]));
    }
    return DDP_OK;
}

/* Casts on the device, of which neighbours on both sides are one: few launches where tensors are many. count 0 ends the last one. */
typedef struct ddp__casting { unsigned char *dst; const unsigned char *src; ddp_dtype to, from; size_t count; } ddp__casting;

static void ddp__cast_next(const ddp_device *d, ddp__casting *c, unsigned char *dst, ddp_dtype to, const unsigned char *src, ddp_dtype from, size_t count) {
    int joins = count && to == c->to && from == c->from && dst == c->dst + c->count * ddp_dtype_size(to) && src == c->src + c->count * ddp_dtype_size(from);
    if (c->count && !joins) d->cast(c->dst, c->to, c->src, c->from, c->count);
    if (!joins) c->dst = dst, c->src = src, c->to = to, c->from = from, c->count = 0;
    c->count += count;
}

/* Makes this rank's rows of a unit ready for its peers, once the master values have changed. */
static ddp_result ddp__unit_publish(ddp_fsdp *f, ddp__unit *unit) {
    ddp__casting run = DDP_ZERO;
    DDP__EACH_WEIGHT(unit, w) {
        if (w->source != w) continue;
        if (f->desc.quantize_gather) ddp__quantize(w, w->shard);
        else if (f->host) DDP_TRY(ddp__host_publish(f, w, 0, ddp__mine(w)));
        else if (w->shard != w->master) ddp__cast_next(f->device, &run, w->shard, w->dtype, w->master, w->master_dtype, ddp__mine(w));
    }
    ddp__cast_next(f->device, &run, NULL, DDP_F32, NULL, DDP_F32, 0);
    return DDP_OK;
}

/* Rank's published rows of w, where this rank can read them. */
static const unsigned char *ddp__weight_published(ddp_fsdp *f, const ddp__weight *w, int rank) {
    const ddp__weight *s = w->source;
    const unsigned char *mine = f->keeps_whole ? s->unit->whole : s->unit->shard;
    const unsigned char *base = rank == f->rank ? mine : (const unsigned char *)ddp_group_peer(f->group, mine, rank);
    return base + (f->keeps_whole ? s->whole_at + ddp__weight_bytes(s, ddp__rows_first(s, rank), s->dtype) : s->shard_at);
}

static void ddp__weight_place(ddp_fsdp *f, const ddp__weight *w, int rank, const unsigned char *rows) {
    unsigned char *out = w->unit->whole + w->whole_at + ddp__weight_bytes(w, ddp__rows_first(w, rank), w->dtype);
    size_t count = ddp__rows_of(w, rank) * w->row_count;
    if (!count || (rank == f->rank && f->keeps_whole)) return;
    if (f->desc.quantize_gather) ddp__dequantize(w, out, rows, count);
    else f->device->copy(out, rows, count * ddp_dtype_size(w->dtype));
}

/* Fills the whole values of a unit. A task. Peers' rows are read where they lie: nobody changes them between the barriers of two steps. Otherwise
   each rank sends a block with its rows of all parameters. */
static ddp_result ddp__gather_task(ddp_group *group, void *argument) {
    ddp__unit *unit = (ddp__unit *)argument;
    ddp_fsdp *f = unit->fsdp;
    if (!f->direct) {
        DDP__EACH_WEIGHT(unit, w) {
            size_t bytes = f->desc.quantize_gather ? ddp__weight_wire(f, w) : ddp__mine(w) * ddp_dtype_size(w->dtype);
            if (!ddp__is_alias(f, w)) f->device->copy(f->send + w->gather_at, ddp__weight_published(f, w, f->rank), bytes);
        }
        DDP_TRY(ddp_all_gather(group, f->send, f->receive, unit->gather_bytes, DDP_U8, NULL));
    }
    DDP__EACH_WEIGHT(unit, w)
        for (int r = 0; r < f->world && !ddp__is_alias(f, w); r++)
            ddp__weight_place(f, w, r, f->direct ? ddp__weight_published(f, w, r) : f->receive + (size_t)r * unit->gather_bytes + w->gather_at);
    return ddp__fsdp_check(group);
}

/* A slot in front of a list. */
static ddp_result ddp__slot_make(ddp_fsdp *f, ddp__slot **list, int purpose, int kind, size_t size, ddp__slot **out) {
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, sizeof **out, out));
    DDP_TRY(ddp__fsdp_take(f, purpose, kind, size, &(*out)->memory));
    (*out)->next = *list;
    *list = *out;
    return DDP_OK;
}

/* Free memory for a unit's whole values; allocates while the first step finds out how much is needed. */
static ddp_result ddp__whole_slot_take(ddp_fsdp *f, ddp__unit *unit) {
    ddp__slot *slot = f->whole_slots;
    while (slot && slot->busy) slot = slot->next;
    if (!slot) DDP_TRY(ddp__slot_make(f, &f->whole_slots, DDP__OF_GATHERED, DDP__MEMORY_DEVICE, f->whole_slot_bytes, &slot));
    slot->busy = 1, unit->whole_slot = slot, unit->whole = slot->memory;
    return DDP_OK;
}

static int ddp__has_own_whole(const ddp_fsdp *f) { return f->keeps_whole || f->in_shard || f->desc.no_reshard_after_forward; }

static ddp_result ddp__unit_forget(ddp__unit *unit, ddp_result result) {
    unit->state = DDP__UNIT_GONE;
    if (unit->whole_slot) {
        unit->whole_slot->busy = 0, unit->whole_slot = NULL, unit->whole = NULL;
    }
    return result;
}

static ddp_result ddp__unit_arrive(ddp_fsdp *f, ddp__unit *unit) {
    if (unit->state != DDP__UNIT_COMING) return DDP_OK;
    ddp_result result = ddp_wait(f->group, &unit->gathering);
    unit->state = DDP__UNIT_THERE;
    return result == DDP_OK ? DDP_OK : ddp__unit_forget(unit, result);
}

/* Sends for the whole values of a unit; ahead: ddp__unit_arrive waits for them, otherwise they are there on return. */
static ddp_result ddp__unit_fetch(ddp_fsdp *f, ddp__unit *unit, int ahead) {
    if (!ddp__has_own_whole(f)) DDP_TRY(ddp__whole_slot_take(f, unit));
    ddp_result result = f->in_shard ? DDP_OK : ddp_group_enqueue(f->group, ddp__gather_task, unit, ahead ? &unit->gathering : NULL);
    unit->state = ahead && !f->in_shard ? DDP__UNIT_COMING : DDP__UNIT_THERE;
    return result == DDP_OK ? DDP_OK : ddp__unit_forget(unit, result);
}

/* The whole values of a unit are not needed, or out of date. */
static ddp_result ddp__unit_drop(ddp_fsdp *f, ddp__unit *unit) { return ddp__unit_forget(unit, ddp__unit_arrive(f, unit)); }

/* Whether the recorded order wants the unit within the next `reach` gathers, of which the very next one always is. */
static int ddp__is_next(const ddp_fsdp *f, int unit, int reach) {
    for (int i = f->now_count; (i == f->now_count || i < f->now_count + reach) && i < f->order_count; i++)
        if (f->following && f->order[i] == unit) return 1;
    return 0;
}

/* What a unit takes while it is gathered: memory for the largest, where units share it. */
static size_t ddp__gathered_bytes(const ddp_fsdp *f, const ddp__unit *unit) { return ddp__has_own_whole(f) ? unit->whole_bytes : f->whole_slot_bytes; }

/* How many units are gathered at a time, where so many are in use. */
static int ddp__slots_wanted(const ddp_fsdp *f, int in_use) {
    size_t most = f->desc.max_gathered_bytes && f->whole_slot_bytes ? f->desc.max_gathered_bytes / f->whole_slot_bytes : SIZE_MAX;
    int wanted = in_use + f->desc.prefetch;
    if (wanted > f->unit_count) wanted = f->unit_count;
    if ((size_t)wanted > most) wanted = (int)most;
    return wanted > in_use ? wanted : in_use;
}

/* Sends for the units that come next in the recorded order, and drops what was sent for and has not come up. */
static ddp_result ddp__fetch_ahead(ddp_fsdp *f) {
    size_t bytes = 0;
    DDP__EACH_UNIT(f, unit) {
        if (unit->state != DDP__UNIT_GONE && !unit->in_use && !ddp__has_own_whole(f) && !ddp__is_next(f, unit->index, f->desc.prefetch))
            DDP_TRY(ddp__unit_drop(f, unit));
        if (unit->state != DDP__UNIT_GONE && !f->keeps_whole) bytes += ddp__gathered_bytes(f, unit);
    }
    for (int i = f->now_count; f->following && !f->no_grad && i < f->now_count + f->desc.prefetch && i < f->order_count; i++) {
        ddp__unit *unit = &f->units[f->order[i]];
        if (unit->state != DDP__UNIT_GONE) continue;
        if (!f->keeps_whole) bytes += ddp__gathered_bytes(f, unit);
        if (f->desc.max_gathered_bytes && bytes > f->desc.max_gathered_bytes) break;
        DDP_TRY(ddp__unit_fetch(f, unit, 1));
    }
    return DDP_OK;
}

/* Drops what nobody uses, where a unit that is about to be gathered would go beyond the limit, or beyond the memory of the first step. */
static ddp_result ddp__make_room(ddp_fsdp *f, const ddp__unit *unit) {
    int in_use = f->in_use + !unit->in_use, held = 1, room = ddp__slots_wanted(f, in_use > f->most_in_use ? in_use : f->most_in_use);
    if (ddp__has_own_whole(f) || unit->state != DDP__UNIT_GONE) return DDP_OK;
    for (int u = 0; u < f->unit_count; u++) held += f->units[u].state != DDP__UNIT_GONE;
    for (int wanted = 0; wanted < 2; wanted++) /* first what the order does not want soon */
        for (int u = 0; u < f->unit_count && held > room; u++) {
            if (f->units[u].state == DDP__UNIT_GONE || f->units[u].in_use || ddp__is_next(f, u, f->desc.prefetch + 1) > wanted) continue;
            DDP_TRY(ddp__unit_drop(f, &f->units[u]));
            held--;
        }
    return DDP_OK;
}

/* Notes a gather in this step's order, and whether that is the last step's still. */
static ddp_result ddp__order_note(ddp_fsdp *f, int unit) {
    int *larger;
    if (f->now_count == f->order_cap) {
        int cap = f->order_cap ? 2 * f->order_cap : 4 * f->unit_count;
        DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)cap * sizeof(int), &larger));
        if (f->order) memcpy(larger, f->order, (size_t)f->order_cap * sizeof(int));
        ddp__fsdp_give(f, f->order);
        f->order = larger;
        f->order_cap = cap;
    }
    f->following = f->following && f->now_count < f->order_count && f->order[f->now_count] == unit;
    f->order[f->now_count++] = unit;
    return DDP_OK;
}

//== sharding: reduce ==================================================================================== >>impl-shard-reduce

/* The way of a unit's gradients. Sums have the master's dtype; what is added over ranks has the wire's.

       whole gradients --(cast, if the wire has another dtype)--> added over ranks --> this rank's rows --(cast)--> level 0 --> pairs of micro-batches
                                                                  direct: read where they lie, otherwise reduce_scatter of blocks
       Where each rank has every row (NO_SHARD), they are all-reduced where they lie instead. Copies of the
       shard add up theirs afterwards.

   16-bit gradients are cast to f32 without memory for a whole unit wherever that is possible:

       direct        a tile of each rank's gradients at a time       cast by the rank that adds
       packed        into the block that is sent                     twice the bytes of the gradients travel
       one rank, or NO_SHARD with one micro-batch                    into the sums; copies are added there
       micro-batches added first (SHARD_OPTIM, NO_SHARD)             into `cast`, which all units share */

enum { DDP__TILE = 1024 }; /* elements of each rank */

static unsigned char *ddp__weight_sum(const ddp__weight *w, int level) {
    const ddp__unit *unit = w->unit;
    if (w->in_place) return unit->grads + w->grad_at + ddp__weight_bytes(w, w->first, w->grad_dtype);
    return unit->level[level] + w->sum_at;
}

static ddp_dtype ddp__grads_at(const ddp__weight *w, int layout, size_t *at, size_t *count) {
    *at = layout == DDP__GRADS ? w->grad_at : layout == DDP__CASTED ? w->cast_at : w->sum_at;
    *count = (layout == DDP__SUMS ? w->mine : w->rows) * w->row_count;
    return layout == DDP__GRADS ? w->grad_dtype : layout == DDP__CASTED ? w->wire_dtype : w->master_dtype;
}

/* Where whole gradients have row first. */
static size_t ddp__rows_at(const ddp__weight *w, int layout, size_t first) {
    size_t at, count;
    ddp_dtype dtype = ddp__grads_at(w, layout, &at, &count);
    return at + ddp__weight_bytes(w, first, dtype);
}

/* Adds, or copies where left is NULL, memory of one layout. */
static void ddp__unit_add(ddp_fsdp *f, const ddp__unit *unit, unsigned char *dst, const unsigned char *left, const unsigned char *right, int layout) {
    DDP__EACH_TRAINED(unit, w) {
        size_t at, count;
        ddp_dtype dtype = ddp__grads_at(w, layout, &at, &count);
        if (!count) continue;
        if (left) f->device->add(dst + at, left + at, right + at, count, dtype);
        else f->device->copy(dst + at, right + at, count * ddp_dtype_size(dtype));
    }
}

/* Sums over ranks from where each one's whole gradients lie. */
static void ddp__reduce_direct(ddp_fsdp *f, ddp__unit *unit, const unsigned char *const *theirs) {
    const void *sources[DDP_MAX_LOCAL_RANKS];
    DDP__EACH_TRAINED(unit, w) {
        ddp_dtype from = unit->layout == DDP__GRADS ? w->grad_dtype : w->wire_dtype;
        size_t at = ddp__rows_at(w, unit->layout, w->first), count = ddp__mine(w), n;
        size_t from_size = ddp_dtype_size(from), wire_size = ddp_dtype_size(w->wire_dtype);
        size_t sum_size = ddp_dtype_size(w->master_dtype);
        int casts = from != w->wire_dtype || w->wire_dtype != w->master_dtype;
        unsigned char *sum = ddp__weight_sum(w, unit->depth);
        for (size_t done = 0; done < count; done += n) {
            unsigned char *rows = sum + done * sum_size, *out = rows;
            n = casts && count - done > (size_t)DDP__TILE ? (size_t)DDP__TILE : count - done;
            for (int r = 0; r < f->world; r++) {
                unsigned char *tile = f->tile + (size_t)r * DDP__TILE * wire_size;
                sources[r] = theirs[r] + at + done * from_size;
                if (from == w->wire_dtype) continue;
                f->device->cast(tile, w->wire_dtype, sources[r], from, n);
                sources[r] = tile;
            }
            if (w->wire_dtype != w->master_dtype) out = f->tile + (size_t)f->world * DDP__TILE * wire_size;
            ddp_reduce_tree(out, sources, f->world, n, w->wire_dtype, DDP_OP_SUM, 1);
            if (out != rows) f->device->cast(rows, w->master_dtype, out, w->wire_dtype, n);
        }
    }
}

/* This rank's gradients of rank r's rows, as they are sent. */
static void ddp__block_fill(ddp_fsdp *f, const ddp__weight *w, int r, unsigned char *out,
                            const unsigned char *whole) {
    ddp_dtype from = w->unit->layout == DDP__GRADS ? w->grad_dtype : w->wire_dtype;
    const unsigned char *rows = whole + ddp__rows_at(w, w->unit->layout, ddp__rows_first(w, r));
    size_t count = ddp__rows_of(w, r) * w->row_count;
    if (!count) return;
    if (from == w->wire_dtype) f->device->copy(out, rows, count * ddp_dtype_size(from));
    else f->device->cast(out, w->wire_dtype, rows, from, count);
}

/* Sums over ranks by a reduce_scatter per dtype on the wire. */
static ddp_result ddp__reduce_packed(ddp_fsdp *f, ddp__unit *unit, const unsigned char *from) {
    size_t send_at = 0, receive_at = 0;
    for (int d = 0; d <= DDP_U64; d++) {
        size_t n = unit->wire_count[d], size = ddp_dtype_size((ddp_dtype)d);
        if (!n) continue;
        f->device->fill_zero(f->send + send_at, n * size * (size_t)f->world);
        DDP__EACH_TRAINED(unit, w)
            for (int r = 0; r < f->world && w->wire_dtype == (ddp_dtype)d; r++)
                ddp__block_fill(f, w, r, f->send + send_at + ((size_t)r * n + w->wire_at) * size, from);
        DDP_TRY(ddp_reduce_scatter(f->group, f->send + send_at, f->receive + receive_at, n, (ddp_dtype)d, DDP_OP_SUM, NULL));
        DDP__EACH_TRAINED(unit, w)
            if (w->wire_dtype == (ddp_dtype)d && ddp__mine(w))
                f->device->cast(ddp__weight_sum(w, unit->depth), w->master_dtype, f->receive + receive_at + w->wire_at * size, w->wire_dtype, ddp__mine(w));
        send_at += ddp_round_up(n * size * (size_t)f->world, 64);
        receive_at += ddp_round_up(n * size, 64);
    }
    return DDP_OK;
}

/* Adds over one group, inside a task of f->group. Another group's call follows the compute lane of a device: it has to wait for what lies on the communication lane,
   and that for the call. */
static ddp_result ddp__reduce_copy(ddp_fsdp *f, ddp_group *copies, void *memory, size_t count, ddp_dtype dtype) {
    const ddp_device *d = f->device;
    int lanes = copies != f->group && f->turn;
    if (lanes) DDP_TRY(d->event_record(f->group, DDP_STREAM_COMM, f->turn));
    if (lanes) DDP_TRY(d->event_wait(f->group, DDP_STREAM_COMPUTE, f->turn));
    DDP_TRY(ddp_all_reduce(copies, memory, memory, count, dtype, DDP_OP_SUM, NULL));
    if (!lanes) return DDP_OK;
    DDP_TRY(d->event_record(f->group, DDP_STREAM_COMPUTE, f->turn));
    DDP_TRY(d->event_wait(f->group, DDP_STREAM_COMM, f->turn));
    return d->use_stream(f->group, DDP_STREAM_COMM);
}

/* Adds memory of a unit over the ranks that hold copies of it, run by run of one dtype. */
static ddp_result ddp__reduce_copies(ddp_fsdp *f, const ddp__unit *unit, unsigned char *memory, int layout) {
    for (int i = 0, next; i < unit->count; i = next) {
        ddp_dtype dtype = DDP_DTYPE_DEFAULT;
        size_t begin = 0, end = 0;
        for (next = i; next < unit->count; next++) {
            const ddp__weight *w = &unit->weights[next];
            size_t at, count;
            ddp_dtype own = ddp__grads_at(w, layout, &at, &count);
            if (!ddp__is_trained(w)) continue;
            if (dtype == DDP_DTYPE_DEFAULT) { dtype = own; begin = at; }
            if (own != dtype) break;
            end = at + count * ddp_dtype_size(own);
        }
        for (int c = 0; c < f->copy_count && dtype != DDP_DTYPE_DEFAULT && end > begin; c++)
            DDP_TRY(ddp__reduce_copy(f, f->copies[c], memory + begin, (end - begin) / ddp_dtype_size(dtype), dtype));
    }
    return DDP_OK;
}

/* A binary counter of micro-batches: sums of equal size are added, older + newer, and after the last one all that are left. newest: where those of
   the latest micro-batch lie: in level[depth], or, if they are whole, where backward has written them, and there the last sum stays. */
static void ddp__unit_carry(ddp_fsdp *f, ddp__unit *unit, unsigned char *newest, int layout) {
    int last = unit->reduced == f->desc.micro_batch_count, stays = last && layout != DDP__SUMS;
    for (int n = unit->reduced - 1; unit->depth > 0 && (last || f->desc.sequential_accumulation || (n & 1)); n >>= 1) {
        unsigned char *left = unit->level[--unit->depth], *sum = stays ? newest : left;
        ddp__unit_add(f, unit, sum, left, newest, layout);
        newest = sum;
    }
    if (stays) return;
    if (newest != unit->level[unit->depth]) ddp__unit_add(f, unit, unit->level[unit->depth], NULL, newest, layout);
    unit->depth++;
}

/* The gradients that were handed in, with the wire's dtype: what is to be added over ranks, each micro-batch's or the sum in the last one's place. NULL: later. */
static unsigned char *ddp__unit_cast(ddp_fsdp *f, ddp__unit *unit) {
    unsigned char *from = unit->reducing_slot ? unit->reducing_slot->memory : unit->grads;
    if (unit->layout == DDP__CASTED) {
        DDP__EACH_TRAINED(unit, w) f->device->cast(f->cast + w->cast_at, w->wire_dtype, from + w->grad_at, w->grad_dtype, w->rows * w->row_count);
        from = f->cast;
    }
    if (!f->reduces_each) ddp__unit_carry(f, unit, from, unit->layout);
    return f->reduces_each || unit->reduced == f->desc.micro_batch_count ? from : NULL;
}

/* What follows the sum over ranks, on this rank's rows. */
static ddp_result ddp__reduce_rest(ddp_fsdp *f, ddp__unit *unit) {
    if (f->world > 1 && f->copy_count) DDP_TRY(ddp__reduce_copies(f, unit, unit->level[unit->depth], DDP__SUMS));
    if (f->reduces_each) ddp__unit_carry(f, unit, unit->level[unit->depth], DDP__SUMS);
    return ddp__fsdp_check(f->group);
}

/* One micro-batch's gradients of a unit, where no rank reads another's. */
static ddp_result ddp__unit_reduce_now(ddp_fsdp *f, ddp__unit *unit) {
    unsigned char *from = ddp__unit_cast(f, unit);
    ddp__casting run = DDP_ZERO;
    if (!from) return ddp__fsdp_check(f->group);
    int casts_first = f->world == 1 && unit->converts && unit->layout == DDP__GRADS;
    if (f->world > 1) DDP_TRY(ddp__reduce_packed(f, unit, from));
    else if (!casts_first) DDP_TRY(ddp__reduce_copies(f, unit, from, unit->layout));
    if (f->world == 1) DDP__EACH_TRAINED(unit, w) {
        size_t at, count;
        ddp_dtype dtype = ddp__grads_at(w, unit->layout, &at, &count);
        if (!w->in_place || unit->layout == DDP__CASTED) ddp__cast_next(f->device, &run, ddp__weight_sum(w, unit->depth), w->master_dtype, from + at, dtype, count);
    }
    ddp__cast_next(f->device, &run, NULL, DDP_F32, NULL, DDP_F32, 0);
    if (casts_first) DDP_TRY(ddp__reduce_copies(f, unit, unit->level[unit->depth], DDP__SUMS));
    return ddp__reduce_rest(f, unit);
}

/* Ranks that read each other's gradients number the reductions of a step as they hand them in, and keep in step by words of group memory: how many a rank
   has given and how many it has taken, that is, added up its own rows of; behind them which units, and in which slots. A rank adds up what all have
   given when it comes by, and waits only where it has no memory for more gradients, or the step ends:

       rank 0   give 1 . give 2 take 1 . . . give 3 take 2 3 . .      it may write over the gradients of 1 once all have taken 1
       rank 1   . . give 1 take 1 . . give 2 take 2 give 3 . take 3 */
enum { DDP__TURN_GIVEN = 0, DDP__TURN_TAKEN = 8, DDP__TURN_UNITS = 16 }; /* words; the first two on lines of their own */

/* Of how many units and slots is known: more are never under way. */
static int ddp__turns_kept(const ddp_fsdp *f) { return 2 * f->unit_count + 2; }

static int ddp__turn_reached(const ddp_fsdp *f, int word, uint64_t number) {
    for (int r = 0; r < f->world; r++)
        if (__atomic_load_n(&f->turns[r][word], __ATOMIC_ACQUIRE) < number) return 0;
    return 1;
}

static ddp_result ddp__turn_await(ddp_fsdp *f, int word, uint64_t number) {
    return ddp__turn_reached(f, word, number) ? DDP_OK : ddp_group_wait_signal(f->group, f->turns[f->rank] + word, number);
}

/* A rank that gave up may have freed its gradients while they were read. */
static ddp_result ddp__turn_alive(ddp_fsdp *f) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return ddp_group_cause(f->group) == DDP_OK ? DDP_OK : ddp_barrier(f->group);
}

static ddp_result ddp__turn_mismatch(ddp_fsdp *f, uint64_t number, int rank) {
    uint64_t at = DDP__TURN_UNITS + number % (uint64_t)ddp__turns_kept(f), other = (uint32_t)f->turns[rank][at];
    DDP_TRY(ddp__turn_alive(f));
    return ddp_fail_in(DDP_ERR_MISMATCH, "ddp_fsdp_reduce_grads", f->group, "rank %d reduces unit %s where this rank reduces unit %s; make the same calls on every rank",
                          rank, other < (uint64_t)f->unit_count ? f->units[other].name : "?", f->units[(uint32_t)f->turns[f->rank][at]].name);
}

/* Carries out the next reduction; waits until all ranks have handed it in. */
static ddp_result ddp__reduce_take_next(ddp_fsdp *f) {
    uint64_t number = f->taken + 1, at = number % (uint64_t)ddp__turns_kept(f);
    const unsigned char *theirs[DDP_MAX_LOCAL_RANKS];
    ddp__unit *unit = f->given_units[at];
    DDP_TRY(ddp__turn_await(f, DDP__TURN_GIVEN, number));
    DDP_TRY(ddp__turn_alive(f)); /* or else this rank may have given the slot up */
    for (int r = 0; r < f->world; r++) { /* ranks that released units at other times have other slots free */
        uint64_t word = f->turns[r][DDP__TURN_UNITS + at];
        if ((uint32_t)word != (uint32_t)unit->index) return ddp__turn_mismatch(f, number, r);
        const unsigned char *from = unit->layout == DDP__CASTED ? f->cast : unit->reducing_slot ? f->slot_memory[word >> 32] : unit->grads;
        theirs[r] = (const unsigned char *)ddp_group_peer(f->group, from, r);
    }
    ddp__reduce_direct(f, unit, theirs);
    DDP_TRY(ddp__turn_alive(f));
    ddp_group_signal(f->group, f->turns[f->rank] + DDP__TURN_TAKEN, f->taken = number);
    return ddp__reduce_rest(f, unit);
}

static ddp_result ddp__reduce_task(ddp_group *group, void *argument) {
    ddp__unit *unit = (ddp__unit *)argument;
    ddp_fsdp *f = unit->fsdp;
    (void)group;
    return ddp__fsdp_failed(f, f->turns ? ddp__reduce_take_next(f) : ddp__unit_reduce_now(f, unit));
}

/* Carries out the reductions that all ranks have handed in; those up to number least are waited for. */
static ddp_result ddp__reduce_take(ddp_fsdp *f, uint64_t least) {
    while (f->turns && !f->copy_count && f->taken < f->given && (f->taken < least || ddp__turn_reached(f, DDP__TURN_GIVEN, f->taken + 1)))
        DDP_TRY(ddp__reduce_take_next(f));
    return DDP_OK;
}

static ddp_result ddp__reduce_end(ddp_fsdp *f, ddp__unit *unit) {
    ddp_result result = ddp__reduce_take(f, unit->given);
    if (result == DDP_OK) result = ddp_wait(f->group, &unit->reducing);
    return result == DDP_OK ? DDP_OK : ddp__fsdp_fail(f, result, "ddp_fsdp_reduce_grads", unit);
}

static ddp_result ddp__reduce_wait(ddp_fsdp *f, ddp__unit *unit) {
    ddp_result result = ddp__reduce_end(f, unit);
    if (unit->reducing_slot) {
        unit->reducing_slot->busy = 0, unit->reducing_slot->reducing = NULL, unit->reducing_slot = NULL;
    }
    return result;
}

/* Hands one micro-batch's gradients of a unit in. */
static ddp_result ddp__reduce_give(ddp_fsdp *f, ddp__unit *unit) {
    uint64_t *mine = f->turns[f->rank], slot_number = unit->reducing_slot ? (uint64_t)unit->reducing_slot->number : 0;
    if (unit->layout == DDP__CASTED && f->cast_given) { /* all units share the memory for it */
        DDP_TRY(ddp__reduce_end(f, f->given_units[f->cast_given % (uint64_t)ddp__turns_kept(f)]));
        DDP_TRY(ddp__turn_await(f, DDP__TURN_TAKEN, f->cast_given));
    }
    if (!ddp__unit_cast(f, unit)) return DDP_OK;
    unit->given = ++f->given;
    if (unit->layout == DDP__CASTED) f->cast_given = f->given;
    if (unit->reducing_slot) unit->reducing_slot->given = f->given;
    f->given_units[f->given % (uint64_t)ddp__turns_kept(f)] = unit;
    mine[DDP__TURN_UNITS + f->given % (uint64_t)ddp__turns_kept(f)] = (uint64_t)unit->index | slot_number << 32;
    ddp_group_signal(f->group, mine + DDP__TURN_GIVEN, f->given);
    if (!f->copy_count) return ddp__reduce_take(f, 0);
    return ddp_group_enqueue(f->group, ddp__reduce_task, unit, &unit->reducing); /* collectives of two groups need the same order on all ranks */
}

/* Memory for a unit's whole gradients. More than one micro-batch's work may be reduced behind: at most prefetch units, then the oldest is waited for. The
   choice follows from the order of calls alone, as group memory is taken by all ranks together. */
static ddp_result ddp__grad_slot_take(ddp_fsdp *f, ddp__unit *unit) {
    ddp__slot *slot = NULL, *oldest = NULL;
    int behind = 0;
    for (ddp__slot *s = f->grad_slots; s; s = s->next) {
        if (!s->busy && (!slot || s->used < slot->used)) slot = s;
        if (s->reducing && (!oldest || s->used < oldest->used)) oldest = s;
        behind += s->reducing != NULL;
    }
    if (!slot && behind > f->desc.prefetch) {
        DDP_TRY(ddp__reduce_wait(f, oldest->reducing));
        slot = oldest;
    }
    if (!slot) {
        DDP_TRY(ddp__slot_make(f, &f->grad_slots, DDP__OF_GRADIENTS, DDP__MEMORY_GROUP, f->grad_slot_bytes, &slot));
        slot->number = f->grad_slot_count++;
        if (f->turns) f->slot_memory[slot->number] = slot->memory;
    }
    slot->used = ++f->grad_slots_used;
    if (f->turns) DDP_TRY(ddp__turn_await(f, DDP__TURN_TAKEN, slot->given));
    slot->busy = 1;
    unit->grad_slot = slot;
    unit->grads = slot->memory;
    return DDP_OK;
}

/* Gradient memory for a backward of the unit. Under NO_SHARD and SHARD_OPTIM it always is the same. */
static ddp_result ddp__grads_attach(ddp_fsdp *f, ddp__unit *unit) {
    DDP_TRY(ddp__reduce_take(f, 0));
    if (!unit->trained || unit->attached || f->no_grad || unit->reduced >= f->desc.micro_batch_count) return DDP_OK;
    if (f->reduces_each) DDP_TRY(ddp__grad_slot_take(f, unit));
    else DDP_TRY(ddp__reduce_wait(f, unit));
    unit->attached = 1;
    if (!f->desc.overwrite_gradients) f->device->fill_zero(unit->grads, unit->grad_bytes);
    return DDP_OK;
}

static void ddp__grads_drop(ddp_fsdp *f, ddp__unit *unit) {
    unit->attached = 0;
    if (!f->reduces_each || !unit->grad_slot) return;
    unit->grad_slot->busy = 0, unit->grad_slot = NULL, unit->grads = NULL;
}

//== sharding: the step =================================================================================== >>impl-step

/* Ends the reductions of a step: divides the sums once and adds the uses of tied parameters, as ddp_reducer_wait does, then unscales. */
static ddp_result ddp__fsdp_finish(ddp_fsdp *f, const char *who) {
    if (f->finished) return DDP_OK;
    DDP__EACH_UNIT(f, unit)
        if (unit->trained && unit->reduced != f->desc.micro_batch_count)
            return ddp__fsdp_bad(who, f->group, "unit %s was reduced %d times in this step, micro_batch_count is %d; call ddp_fsdp_reduce_grads for every unit in every micro-batch",
                                 unit->name, unit->reduced, f->desc.micro_batch_count);
    if (!f->divisor) return ddp__fsdp_bad(who, f->group, "per_token is set, and nothing tells the tokens of this step; call ddp_fsdp_mean first");
    if (f->desc.scaler && f->desc.scaler->unscaled)
        return ddp__fsdp_bad(who, f->group, "the scaler has unscaled gradients since its last update; call ddp_scaler_update after every ddp_fsdp_step");
    DDP__EACH_UNIT(f, unit) DDP_TRY(ddp__reduce_wait(f, unit));
    DDP_TRY(ddp__fsdp_enter(f->group));
    for (const ddp__weight *w = f->weights; w < f->weights + f->weight_count; w++) {
        size_t count = ddp__mine(w);
        if (!ddp__is_trained(w) || !count) continue;
        if (f->divisor > 1) f->device->divide(ddp__weight_sum(w, 0), count, w->master_dtype, f->divisor);
        if (w->source != w) f->device->add(ddp__weight_sum(w->source, 0), ddp__weight_sum(w->source, 0), ddp__weight_sum(w, 0), count, w->master_dtype);
    }
    f->finished = 1;
    if (!f->desc.scaler) return ddp__fsdp_check(f->group);
    DDP_TRY(ddp__scaler_unscale(f->desc.scaler, f->group, f->sums, f->master_count, f->device == ddp_device_cpu() ? NULL : f->squares));
    for (int i = 0; i < 2; i++) { /* these groups beside its own */
        ddp_group *group = i ? f->desc.replicas : f->group;
        if (group && ddp_world_size(group) > 1) DDP_TRY(ddp__host_reduce(group, &f->desc.scaler->found_inf, 1, DDP_I32, DDP_OP_MAX));
    }
    return DDP_OK;
}

/* What clipping left to the step, done now. */
static void ddp__fsdp_scale(ddp_fsdp *f) {
    for (const ddp_tensor *sum = f->sums; sum < f->sums + f->master_count; sum++)
        if (ddp_tensor_count(sum)) ddp__grad_scale(f->device, sum->data, (size_t)ddp_tensor_count(sum), sum->dtype, f->grad_scale, f->factor_now);
    f->grad_scale = 1, f->factor_now = NULL;
}

/* The norm, from the exact sum of squares of all gradients over the ranks that they are split over, and what the step multiplies by, in its pass over the
   gradients. Replicas have the same. */
static ddp_result ddp__fsdp_clip(ddp_fsdp *f, float max_norm) {
    ddp_exact_sum sum;
    ddp__fsdp_scale(f);
    f->device->fill_zero(f->squares, sizeof sum);
    for (int i = 0; i < f->master_count; i++) {
        const ddp__weight *w = f->master_of[i];
        if (ddp__mine(w)) f->device->sum_squares(f->squares, ddp__weight_sum(w, 0), w->mine, w->row_count, w->master_dtype);
    }
    if (f->world > 1) DDP_TRY(ddp_all_reduce(f->group, f->squares, f->squares, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, NULL));
    if (f->factor) {
        ddp__kernels_of(f->device)->clip(f->squares, max_norm, f->factor, f->norm);
        DDP_TRY(f->device->event_record(f->group, DDP_STREAM_COMPUTE, f->clipped));
    } else f->device->copy(&sum, f->squares, sizeof sum);
    DDP_TRY(ddp__fsdp_check(f->group)); /* until here there is no norm, and nothing to multiply by */
    f->has_norm = 1;
    f->factor_now = f->factor;
    if (f->factor) return DDP_OK;
    ddp__host_clip(&sum, max_norm, &f->grad_scale, &f->last_norm);
    if (f->grad_scale == 0) ddp__fsdp_scale(f);
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_mean(ddp_fsdp *fsdp, ddp_mean *loss) {
    DDP_PUBLIC_CALL(ddp_fsdp_mean);
    DDP__FSDP_NEED(fsdp && loss, "fsdp or loss is NULL");
    DDP__FSDP_NEED(fsdp->desc.per_token && !fsdp->divisor, "%s", fsdp->divisor && fsdp->desc.per_token ? "this step's tokens are known already; call it once"
                   : "per_token is 0 in the desc, the gradients will be divided by ranks and micro-batches; set it");
    DDP__EACH_UNIT(fsdp, unit) DDP_TRY(ddp__reduce_wait(fsdp, unit)); /* which may be at work in replicas */
    ddp_mean all = *loss;
    ddp_result result = ddp_mean_reduce(fsdp->group, &all);
    if (result == DDP_ERR_INVALID) all.count = -1; /* replicas hear of it too */
    if (fsdp->desc.replicas && (result == DDP_OK || result == DDP_ERR_INVALID)) result = ddp_mean_reduce(fsdp->desc.replicas, &all);
    if (result == DDP_OK) fsdp->divisor = all.count ? (uint64_t)all.count : 1, *loss = all;
    return result != DDP_ERR_INVALID ? result : ddp__fsdp_bad(__func__, fsdp->group, "a rank's count is negative, here it is %lld; counts of tokens add up",
                                                              (long long)loss->count);
}

DDPDEF ddp_result ddp_fsdp_clip_grad_norm(ddp_fsdp *fsdp, float max_norm, float *norm) {
    DDP_PUBLIC_CALL(ddp_fsdp_clip_grad_norm);
    DDP__FSDP_NEED(fsdp, "fsdp is NULL");
    DDP__FSDP_NEED(max_norm > 0, "max_norm=%g; pass a positive number", (double)max_norm);
    fsdp->has_norm = 0;
    ddp_result result = ddp__fsdp_finish(fsdp, __func__);
    if (result == DDP_OK) result = ddp__fsdp_enter(fsdp->group);
    if (result == DDP_OK) result = ddp__fsdp_clip(fsdp, max_norm);
    if (result != DDP_OK) return ddp__fsdp_failed(fsdp, result);
    return norm ? ddp_fsdp_get_norm(fsdp, norm) : DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_get_norm(ddp_fsdp *fsdp, float *norm) {
    DDP__FSDP_NEED(fsdp && norm, "fsdp or norm is NULL");
    DDP__FSDP_NEED(fsdp->has_norm, "no norm has been taken, or taking the last one failed; call ddp_fsdp_clip_grad_norm first");
    if (fsdp->factor) DDP_TRY(ddp__fsdp_await(fsdp, fsdp->clipped, 0));
    *norm = fsdp->factor ? *fsdp->norm : fsdp->last_norm;
    return DDP_OK;
}

/* Collective: *told becomes the failure of the lowest rank that has one; *first is that rank, or the number of ranks. *same: stays 1 where it was on every rank
   and all gave the same number. */
static ddp_result ddp__fsdp_agree(ddp_group *group, uint64_t number, int *same, ddp_saved_error *told, int *first) {
    uint64_t low[3] = {*same ? number : 0, *same ? ~number : 0, (uint64_t)(told->result == DDP_OK ? ddp_world_size(group) : ddp_rank(group))};
    DDP_TRY(ddp__host_reduce(group, low, 3, DDP_U64, DDP_OP_MIN));
    *same = low[0] == ~low[1];
    *first = (int)low[2];
    return *first == ddp_world_size(group) ? DDP_OK : ddp__host_broadcast(group, told, sizeof *told, DDP_U8, *first);
}

/* Whether all ranks, replicas too, have the same number. own: how this rank has fared, before anything depends on it; where one failed, all do, with its text. */
static ddp_result ddp__fsdp_agree_all(const ddp_fsdp *f, ddp_result own, uint64_t number, int *same) {
    const ddp_saved_error mine = ddp__fsdp_error(own);
    ddp_saved_error told = mine;
    int first;
    *same = 1;
    for (int i = 0; i < 2; i++) { /* what one group found reaches the others by the replicas */
        ddp_group *group = i ? f->desc.replicas : f->group;
        if (group && ddp_world_size(group) > 1) DDP_TRY(ddp__fsdp_agree(group, number, same, &told, &first));
    }
    if (own != DDP_OK) return ddp_error_restore(&mine);
    if (told.result == DDP_OK) return DDP_OK;
    return ddp_fail_in((ddp_result)told.result, "ddp_fsdp_create", f->group, "another rank failed: %.400s", told.text);
}

/* All ranks are here, have gathered and reduced in the same order, and read no shard any more. */
static ddp_result ddp__fsdp_meet(ddp_fsdp *f, const char *who) {
    int same = 1;
    DDP__EACH_UNIT(f, unit) DDP_TRY(ddp__unit_arrive(f, unit));
    DDP_TRY(ddp__fsdp_agree_all(f, DDP_OK, f->order_hash, &same));
    return same ? DDP_OK : ddp_fail_in(DDP_ERR_MISMATCH, who, f->group,
                                          "ranks gathered or reduced units in different orders in this step; make the same calls on every rank");
}

/* Master values have changed: ranks may read each other's new rows once all have met. sent: they have gone up already. */
static ddp_result ddp__fsdp_publish(ddp_fsdp *f, int sent) {
    DDP_TRY(ddp__fsdp_enter(f->group));
    DDP__EACH_UNIT(f, unit) {
        if (!sent) DDP_TRY(ddp__unit_publish(f, unit));
        DDP_TRY(ddp__unit_drop(f, unit));
        if (f->world == 1 && f->keeps_whole) unit->state = DDP__UNIT_THERE;
    }
    DDP_TRY(ddp__fsdp_check(f->group));
    return f->world > 1 && f->direct ? ddp_barrier(f->group) : DDP_OK;
}

static void ddp__unit_point(const ddp_fsdp *f, ddp__unit *unit, int values, int grads) {
    DDP__EACH_WEIGHT(unit, w) {
        const ddp__weight *from = ddp__is_alias(f, w) ? w->source : w;
        w->entry->param.value.data = values && f->in_shard ? w->source->shard : values && from->unit->whole ? from->unit->whole + from->whole_at : NULL;
        w->entry->param.grad.data = grads && ddp__is_trained(w) && unit->grads ? unit->grads + w->grad_at : NULL;
    }
}

/* Ready for the next step: every gradient is forgotten. */
static void ddp__fsdp_begin(ddp_fsdp *f) {
    DDP__EACH_UNIT(f, unit) unit->reduced = unit->depth = 0;
    if (f->finished) f->order_count = f->now_count;
    else if (!f->following) f->order_count = 0; /* a step that is begun anew, or a load, tells nothing of the order */
    if (f->desc.per_token) f->divisor = 0;
    f->grad_scale = 1;
    f->factor_now = NULL;
    f->finished = f->now_count = 0;
    f->following = 1;
    f->order_hash = UINT64_C(0xcbf29ce484222325);
}

/* Slots for the units that will be gathered ahead, once the first step has shown how many are in use at a time. */
static ddp_result ddp__slots_complete(ddp_fsdp *f) {
    int count = 0, wanted = ddp__slots_wanted(f, f->most_in_use);
    if (f->slots_ready || ddp__has_own_whole(f) || f->order_count == 0) return DDP_OK;
    f->slots_ready = 1;
    for (const ddp__slot *slot = f->whole_slots; slot; slot = slot->next) count++;
    for (ddp__slot *slot; count < wanted; count++)
        DDP_TRY(ddp__slot_make(f, &f->whole_slots, DDP__OF_GATHERED, DDP__MEMORY_DEVICE, f->whole_slot_bytes, &slot));
    return DDP_OK;
}

/* OFFLOAD_HOST: gradients come down on the communication lane, which is idle, piece by piece: one is stepped while the next ones travel, and values go up on
   the other lane. LARS, which begins with norms, waits for all. */
static ddp_result ddp__host_fetch(ddp_fsdp *f) {
    ddp_result result = DDP_OK, back;
    ddp__fsdp_scale(f);
    DDP_TRY(ddp__fsdp_mark(f, DDP_STREAM_COMPUTE, f->arrived[0]));
    if (f->arrived[0]) DDP_TRY(f->device->event_wait(f->group, DDP_STREAM_COMM, f->arrived[0]));
    DDP_TRY(DDP__ON_DEVICE(f->group, use_stream, f->group, DDP_STREAM_COMM));
    f->piece = 0;
    for (int i = 0; i < f->master_count && result == DDP_OK; i++) {
        size_t size = ddp_dtype_size(f->sums[i].dtype), bytes = ddp__mine(f->master_of[i]) * size, most = DDP__HOST_PIECE * size;
        for (size_t at = 0; at < bytes && result == DDP_OK; at += most) {
            void (*copy)(void *, const void *, size_t) = f->device->copy_async ? f->device->copy_async : f->device->copy;
            copy((char *)f->masters[i].grad.data + at, (char *)f->sums[i].data + at, bytes - at < most ? bytes - at : most);
            result = ddp__fsdp_mark(f, DDP_STREAM_COMM, f->arrived[f->piece++]);
        }
    }
    f->piece = 0;
    back = ddp__fsdp_enter(f->group); /* whatever happened: this thread's own work does not belong on the communication lane */
    if (result != DDP_OK || back != DDP_OK) return result != DDP_OK ? result : back;
    return f->desc.optimizer.kind == DDP_OPTIMIZER_LARS ? ddp__fsdp_await(f, f->arrived[f->pieces - 1], 0) : DDP_OK;
}

static ddp_result ddp__host_piece(void *user, int i, size_t from, size_t count, int stepped) {
    ddp_fsdp *f = (ddp_fsdp *)user;
    return stepped ? ddp__host_publish(f, f->master_of[i], from, count) : ddp__fsdp_await(f, f->arrived[f->piece++], 0);
}

static ddp_result ddp__fsdp_step(ddp_fsdp *fsdp, float lr) {
    DDP_TRY(ddp__fsdp_finish(fsdp, "ddp_fsdp_step"));
    DDP_TRY(ddp__fsdp_meet(fsdp, "ddp_fsdp_step"));
    if (!fsdp->desc.scaler || !ddp_scaler_found_inf(fsdp->desc.scaler)) {
        DDP_TRY(ddp__fsdp_enter(fsdp->group));
        if (fsdp->pieces) DDP_TRY(ddp__host_fetch(fsdp));
        if (fsdp->optimizer) DDP_TRY(ddp__optimizer_step(fsdp->optimizer, lr, fsdp->grad_scale, fsdp->factor_now));
        fsdp->step++;
        if (fsdp->desc.state) fsdp->desc.state->step = fsdp->step;
    }
    DDP_TRY(ddp__fsdp_publish(fsdp, fsdp->host != NULL));
    DDP__EACH_UNIT(fsdp, unit) {
        unit->in_use = 0;
        ddp__grads_drop(fsdp, unit);
        ddp__unit_point(fsdp, unit, fsdp->keeps_whole, !fsdp->reduces_each);
    }
    fsdp->in_use = 0;
    ddp__fsdp_begin(fsdp);
    DDP_TRY(ddp__slots_complete(fsdp));
    return ddp__fetch_ahead(fsdp);
}

DDPDEF ddp_result ddp_fsdp_step(ddp_fsdp *fsdp, float lr) {
    DDP_PUBLIC_CALL(ddp_fsdp_step);
    DDP__FSDP_NEED(fsdp, "fsdp is NULL");
    DDP__FSDP_NEED(ddp__is_amount((double)lr), "lr=%g; pass a number that is not negative", (double)lr);
    fsdp->who = __func__;
    ddp_result result = ddp__fsdp_step(fsdp, lr);
    return result == DDP_OK || result == DDP_ERR_INVALID || result == DDP_ERR_MISMATCH ? result : ddp__fsdp_give_up(fsdp, result);
}

//== sharding: checkpoints ================================================================================= >>impl-saver

/* A save on its way: the slices and a copy of what they point to. */
typedef struct ddp__saver {
    ddp_group *group;          /* of its own, where a thread saves */
    ddp__slice *slices;
    char *names;               /* of states, name_room bytes each */
    size_t name_room;
    int count, capacity;
    unsigned char *copy;
    size_t copy_bytes;
    ddp_fsdp_state state;
    char dir[DDP__PATH_MAX];   /* cut off where it is too long to be saved to */
    pthread_t thread;
    int running;
    ddp_saved_error told;            /* what came of it */
    ddp_fsdp *fsdp;
} ddp__saver;

enum { DDP__STATES_MAX = 2, DDP__STATE_ROOM = 32 }; /* of a parameter, and of a state's name */
enum { DDP__LIST_SHARE, DDP__LIST_ALL, DDP__LIST_NOTHING }; /* of what this rank holds: what it is to write, all, or none */

static ddp_group *ddp__fsdp_file_group(const ddp_fsdp *f) { return f->desc.checkpoint_group ? f->desc.checkpoint_group : f->group; }

static ddp_result ddp__saver_create(ddp_fsdp *f) {
    ddp__saver *s;
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, sizeof *s, &f->saver));
    s = f->saver, s->fsdp = f, s->capacity = f->weight_count * (1 + DDP__STATES_MAX);
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)s->capacity * sizeof *s->slices, &s->slices));
    for (int i = 0; i < f->weight_count; i++) ddp__size_at_least(&s->name_room, strlen(f->weights[i].name) + DDP__STATE_ROOM);
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)s->capacity * s->name_room, &s->names));
    return f->desc.save_in_background ? ddp_group_split(ddp__fsdp_file_group(f), 0, ddp_rank(ddp__fsdp_file_group(f)), &s->group) : DDP_OK;
}

/* One tensor of the checkpoint: this rank's rows of it. Where each rank has every row, the ranks of the group take a share each. tensor: rows of w. */
static void ddp__saver_add(ddp_fsdp *f, const ddp__weight *w, const char *state, const ddp_tensor *tensor, int list) {
    ddp__saver *s = f->saver;
    ddp__slice *slice = &s->slices[s->count];
    const ddp_tensor *value = &w->entry->param.value;
    size_t ranks = (size_t)ddp_world_size(f->group), share = (w->rows + ranks - 1) / ranks, skip = 0, rows = w->mine;
    if (f->world == 1 && list == DDP__LIST_SHARE) {
        skip = ddp__place_in(share * (size_t)ddp_rank(f->group), 0, w->rows);
        rows = ddp__place_in(share, 0, w->rows - skip);
    }
    memset(slice, 0, sizeof *slice);
    slice->name = s->names + (size_t)s->count * s->name_room;
    snprintf(s->names + (size_t)s->count++ * s->name_room, s->name_room, state ? "%s.%s" : "%s", w->name, state);
    slice->dtype = tensor->dtype, slice->ndim = value->ndim, slice->file_kind = state != NULL;
    slice->may_repeat = w->is_slice; /* who says nothing of a larger tensor may have forgotten to */
    for (int i = 0; i < value->ndim; i++) {
        slice->shape[i] = w->is_slice ? w->entry->global_shape[i] : value->shape[i];
        slice->offset[i] = (w->is_slice ? w->entry->global_offset[i] : 0) + (i ? 0 : (int64_t)(w->first + skip));
        slice->extent[i] = i ? value->shape[i] : (int64_t)rows;
    }
    if (list != DDP__LIST_NOTHING && rows && w->row_count && tensor->data) /* otherwise nothing of it is held here */
        slice->data = (unsigned char *)tensor->data + ddp__weight_bytes(w, skip, tensor->dtype);
}

/* Every tensor of the checkpoint, the same list on every rank. A tied weight is saved under the name of its
   first use; a load takes the names of later uses too. */
static void ddp__saver_list(ddp_fsdp *f, int list) {
    f->saver->count = 0;
    for (ddp__weight *w = f->weights; w < f->weights + f->weight_count; w++) {
        const char *name = NULL;
        ddp_tensor tensor = ddp__weight_rows(w);
        int first = f->saver->count;
        if (w->source != w && list != DDP__LIST_ALL) continue;
        ddp__saver_add(f, w, NULL, &tensor, w->source == w ? list : DDP__LIST_NOTHING);
        if (w->source == w) w->listed = first;
        else f->saver->slices[first].tied_to = w->source->listed + 1;
        if (w->source != w) continue;
        for (int k = 0; ddp__is_trained(w) && k < f->optimizer->state_count; k++) {
            (void)ddp_optimizer_get_state(f->optimizer, w->master_number, k, &name, &tensor);
            ddp__saver_add(f, w, name, &tensor, list);
        }
    }
}

/* Puts the slices into memory of their own: what a thread writes, or what a device's host can read. back: brings them from there. */
static ddp_result ddp__saver_copy(ddp_fsdp *f, int back) {
    ddp__saver *s = f->saver;
    size_t bytes = 0, at = 0;
    for (int i = 0; i < s->count; i++) bytes += ddp_round_up((size_t)ddp__slice_bytes(&s->slices[i], 1), 64);
    if (bytes > s->copy_bytes) {
        ddp__fsdp_give(f, s->copy);
        s->copy_bytes = 0;
        DDP_TRY(ddp__fsdp_take(f, DDP__OF_COMMUNICATION, DDP__MEMORY_HOST, bytes, &s->copy));
        s->copy_bytes = bytes;
    }
    for (int i = 0; i < s->count; i++) {
        size_t held = (size_t)ddp__slice_bytes(&s->slices[i], 1);
        if (held) f->device->copy(back ? s->slices[i].data : s->copy + at, back ? s->copy + at : s->slices[i].data, held);
        if (held && !back) s->slices[i].data = s->copy + at;
        at += ddp_round_up(held, 64);
    }
    return ddp__fsdp_check(f->group);
}

static ddp_result ddp__saver_write(ddp__saver *s, ddp_group *group) {
    return ddp__checkpoint_save(group, s->dir, s->slices, s->count, &s->state, s->fsdp->desc.max_file_bytes, s->fsdp->desc.keep_checkpoints);
}

static void *ddp__saver_main(void *argument) {
    ddp__saver *s = (ddp__saver *)argument;
    s->told = ddp__fsdp_error(ddp__saver_write(s, s->group));
    return NULL;
}

/* A failure of one replica is everybody's, in its words. */
static ddp_result ddp__fsdp_share_result(ddp_fsdp *f, const char *who, ddp_result result) {
    return f->desc.replicas && !f->desc.checkpoint_group ? ddp_agree(f->desc.replicas, who, result, 0, "") : result;
}

/* Lists the tensors and, where they are not written or read in place, copies them. Then no rank goes on alone: not to a save that others have not begun. */
static ddp_result ddp__saver_prepare(ddp_fsdp *f, const char *who, int list, int copy) {
    f->who = who;
    ddp_result result = ddp__fsdp_enter(f->group);
    ddp__saver_list(f, list);
    if (result == DDP_OK && copy) result = ddp__saver_copy(f, 0);
    return ddp__fsdp_share_result(f, who, ddp_agree(ddp__fsdp_file_group(f), who, result, 0, ""));
}

DDPDEF ddp_result ddp_fsdp_save_wait(ddp_fsdp *fsdp) {
    DDP_PUBLIC_CALL(ddp_fsdp_save_wait);
    DDP__FSDP_NEED(fsdp, "fsdp is NULL");
    ddp__saver *s = fsdp->saver;
    if (!s->running) return DDP_OK;
    if (s->running == 2) pthread_join(s->thread, NULL);
    s->running = 0;
    return ddp__fsdp_share_result(fsdp, "ddp_fsdp_save", ddp_error_restore(&s->told));
}

DDPDEF ddp_result ddp_fsdp_save(ddp_fsdp *fsdp, const char *dir) {
    DDP_PUBLIC_CALL(ddp_fsdp_save);
    DDP__FSDP_NEED(fsdp && dir && dir[0], "fsdp or dir is NULL, or dir is empty; name a folder");
    ddp__saver *s = fsdp->saver;
    DDP_TRY(ddp_fsdp_save_wait(fsdp));
    int replica = fsdp->desc.replicas && ddp_rank(fsdp->desc.replicas) > 0, writes = !replica || fsdp->desc.checkpoint_group;
    snprintf(s->dir, sizeof s->dir, "%s", dir);
    DDP_TRY(ddp__saver_prepare(fsdp, __func__, replica ? DDP__LIST_NOTHING : DDP__LIST_SHARE,
                                      writes && (fsdp->desc.save_in_background || fsdp->device != ddp_device_cpu())));
    s->state = fsdp->desc.state ? *fsdp->desc.state : fsdp->state;
    s->state.step = fsdp->step;
    if (fsdp->desc.scaler) ddp_scaler_save(fsdp->desc.scaler, &s->state.scaler);
    if (!fsdp->desc.save_in_background) return ddp__fsdp_share_result(fsdp, __func__, writes ? ddp__saver_write(s, ddp__fsdp_file_group(fsdp)) : DDP_OK);
    s->told.result = DDP_OK, s->running = 1;
    if (writes && pthread_create(&s->thread, NULL, ddp__saver_main, s) == 0) s->running = 2;
    else if (writes) ddp__saver_main(s); /* no thread to be had: it is written now */
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_load(ddp_fsdp *fsdp, const char *dir) {
    DDP_PUBLIC_CALL(ddp_fsdp_load);
    DDP__FSDP_NEED(fsdp && dir && dir[0], "fsdp or dir is NULL, or dir is empty; name a folder");
    DDP_TRY(ddp_fsdp_save_wait(fsdp));
    DDP_TRY(ddp__fsdp_meet(fsdp, __func__));
    ddp__saver *s = fsdp->saver;
    int host = fsdp->device == ddp_device_cpu();
    DDP_TRY(ddp__saver_prepare(fsdp, __func__, DDP__LIST_ALL, !host));
    s->state = fsdp->desc.state ? *fsdp->desc.state : fsdp->state;
    if (fsdp->desc.scaler) ddp_scaler_save(fsdp->desc.scaler, &s->state.scaler); /* what it keeps where the checkpoint has none */
    DDP_TRY(ddp__checkpoint_load(ddp__fsdp_file_group(fsdp), fsdp->desc.checkpoint_group ? NULL : fsdp->desc.replicas, dir, s->slices, s->count,
                                       fsdp->desc.scaler, &s->state));
    ddp__saver_list(fsdp, DDP__LIST_ALL); /* of the device's memory again */
    if (!host) DDP_TRY(ddp__saver_copy(fsdp, 1));
    if (fsdp->desc.scaler && s->state.scaler.scale > 0) DDP_TRY(ddp_scaler_load(fsdp->desc.scaler, &s->state.scaler));
    fsdp->step = s->state.step;
    *(fsdp->desc.state ? fsdp->desc.state : &fsdp->state) = s->state;
    if (fsdp->optimizer) ddp_optimizer_set_step(fsdp->optimizer, fsdp->step);
    DDP_TRY(ddp__fsdp_publish(fsdp, 0));
    return ddp_fsdp_zero_grad(fsdp);
}

//== sharding: create and destroy ======================================================================= >>impl-create

static ddp_result ddp__fsdp_desc_resolve(ddp_fsdp *f, ddp_group *group, const ddp_fsdp_desc *desc) {
    const char *who = "ddp_fsdp_create";
    ddp_fsdp_desc *d = &f->desc;
    *d = *desc;
    f->group = group;
    f->who = who;
    f->file = -1;
    if (d->replicas == group) d->replicas = NULL;
    if (!d->units || d->unit_count < 1) return ddp__fsdp_bad(who, group, "there are no units");
    if ((unsigned)d->strategy > DDP_FSDP_NO_SHARD) return ddp__fsdp_bad(who, group, "strategy=%d is unknown", (int)d->strategy);
    if ((unsigned)d->offload > DDP_FSDP_OFFLOAD_FILE) return ddp__fsdp_bad(who, group, "offload=%d is unknown", (int)d->offload);
    if (d->param_dtype != DDP_DTYPE_DEFAULT && !ddp_is_float(d->param_dtype)) return ddp__fsdp_bad(who, group, "param_dtype is not a float");
    if (d->reduce_dtype != DDP_DTYPE_DEFAULT && !ddp_is_float(d->reduce_dtype)) return ddp__fsdp_bad(who, group, "reduce_dtype is not a float");
    if (d->micro_batch_count < 0) return ddp__fsdp_bad(who, group, "micro_batch_count=%d is negative", d->micro_batch_count);
    if (!d->alloc_fn != !d->free_fn) return ddp__fsdp_bad(who, group, "set both alloc_fn and free_fn, or neither");
    if (desc->replicas == group) return ddp__fsdp_bad(who, group, "replicas is the group that things are split over; give the ranks that hold the same shard");
    if (d->quantize_gather && d->strategy != DDP_FSDP_FULL_SHARD) return ddp__fsdp_bad(who, group, "quantize_gather is for FULL_SHARD, where parameters are gathered in every step");
    if (d->prefetch < -1) return ddp__fsdp_bad(who, group, "prefetch=%d; pass how many units, 0 for one or -1 for none", d->prefetch);
    if (d->keep_checkpoints < 0) return ddp__fsdp_bad(who, group, "keep_checkpoints=%d is negative", d->keep_checkpoints);
    if (!d->micro_batch_count) d->micro_batch_count = 1;
    d->prefetch = d->prefetch < 0 ? 0 : !d->prefetch ? 1 : d->prefetch < d->unit_count ? d->prefetch : d->unit_count;
    if (!d->offload_dir) d->offload_dir = ".";
    if (!d->keep_checkpoints) d->keep_checkpoints = 1;
    f->device = ddp_group_device(group);
    f->unit_count = d->unit_count;
    if (f->device == ddp_device_cpu() && d->offload == DDP_FSDP_OFFLOAD_HOST) d->offload = DDP_FSDP_OFFLOAD_NONE; /* it lies there */
    if (f->device != ddp_device_cpu() && (d->quantize_gather || d->offload == DDP_FSDP_OFFLOAD_FILE))
        return ddp_fail(DDP_ERR_UNSUPPORTED, "ddp_fsdp_create group=%s: %s works on CPU memory alone, this group has %s; leave it out", ddp_group_name(group),
                        d->quantize_gather ? "quantize_gather" : "offload to a file", f->device->name);
    f->world = d->strategy == DDP_FSDP_NO_SHARD ? 1 : ddp_world_size(group);
    f->rank = f->world > 1 ? ddp_rank(group) : 0;
    if (f->world == 1 && ddp_world_size(group) > 1) f->copies[f->copy_count++] = group;
    if (d->replicas && ddp_world_size(d->replicas) > 1) f->copies[f->copy_count++] = d->replicas;
    f->divisor = d->per_token ? 0 : (uint64_t)d->micro_batch_count * (uint64_t)ddp_world_size(group) * (uint64_t)(d->replicas ? ddp_world_size(d->replicas) : 1);
    f->keeps_whole = d->strategy != DDP_FSDP_FULL_SHARD;
    f->in_shard = !f->keeps_whole && f->world == 1 && f->device != ddp_device_cpu();
    f->reduces_each = d->strategy == DDP_FSDP_FULL_SHARD || d->strategy == DDP_FSDP_SHARD_GRAD;
    return DDP_OK;
}

/* All that a rank can find wrong alone: tables of units and weights, described and laid out. */
static ddp_result ddp__fsdp_describe(ddp_fsdp *f) {
    ddp_optimizer_desc optimizer = f->desc.optimizer;
    int next = 0;
    for (int u = 0; u < f->unit_count; u++) {
        const ddp_fsdp_unit_desc *d = &f->desc.units[u];
        if (!d->params || d->param_count < 1) return ddp__fsdp_bad("ddp_fsdp_create", f->group, "unit %d (%s) has no parameters", u, d->name ? d->name : "no name");
        f->weight_count += d->param_count;
    }
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)f->unit_count * sizeof *f->units, &f->units));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)f->weight_count * sizeof *f->weights, &f->weights));
    for (int u = 0; u < f->unit_count; u++) {
        const ddp_fsdp_unit_desc *d = &f->desc.units[u];
        ddp__unit *unit = &f->units[u];
        unit->fsdp = f, unit->index = u, unit->weights = f->weights + next, unit->count = d->param_count;
        if (d->name) snprintf(unit->name, sizeof unit->name, "%s", d->name);
        else snprintf(unit->name, sizeof unit->name, "unit %d", u);
        for (int i = 0; i < unit->count; i++, next++) {
            ddp__weight *w = &f->weights[next];
            w->entry = &d->params[i];
            w->unit = unit;
            w->name = w->entry->param.name ? w->entry->param.name : "(no name)";
            DDP_TRY(ddp__weight_describe(f, w));
        }
    }
    DDP__EACH_UNIT(f, unit) ddp__unit_layout(f, unit);
    return ddp__optimizer_resolve(f->group, &optimizer); /* its numbers, before anybody waits */
}

typedef struct ddp__option { const char *name; double value; } ddp__option;

/* Options have to be equal on all ranks; the first one that is not is an error on each of them, with the least and the greatest value. */
static ddp_result ddp__options_compare(const ddp_fsdp *f) {
    const ddp_fsdp_desc *d = &f->desc;
#define DDP__OPTION(field) {#field, (double)d->field}
    const ddp__option option[] = {
        {"checkpoint_group", d->checkpoint_group ? 1.0 : 0.0}, DDP__OPTION(unit_count), {"the number of parameters", (double)f->weight_count},
        DDP__OPTION(strategy), DDP__OPTION(param_dtype), DDP__OPTION(reduce_dtype), DDP__OPTION(micro_batch_count), DDP__OPTION(per_token),
        DDP__OPTION(sequential_accumulation), DDP__OPTION(prefetch), DDP__OPTION(max_gathered_bytes), DDP__OPTION(no_reshard_after_forward),
        DDP__OPTION(overwrite_gradients), DDP__OPTION(quantize_gather), DDP__OPTION(offload), DDP__OPTION(save_in_background),
        DDP__OPTION(skip_initial_broadcast), DDP__OPTION(max_file_bytes), DDP__OPTION(keep_checkpoints), {"scaler", d->scaler ? 1.0 : 0.0},
        DDP__OPTION(optimizer.kind), DDP__OPTION(optimizer.nesterov), DDP__OPTION(optimizer.decay_matrices_only), DDP__OPTION(optimizer.beta1),
        DDP__OPTION(optimizer.beta2), DDP__OPTION(optimizer.eps), DDP__OPTION(optimizer.momentum), DDP__OPTION(optimizer.dampening),
        DDP__OPTION(optimizer.trust_coefficient), DDP__OPTION(optimizer.weight_decay)};
#undef DDP__OPTION
    enum { COUNT = sizeof option / sizeof option[0] };
    double low[2 * COUNT]; /* of values, and of their negatives */
    for (int k = 0; k < 2 * COUNT; k++) low[k] = k % 2 ? -option[k / 2].value : option[k / 2].value;
    DDP_TRY(ddp__host_reduce(f->group, low, 2 * COUNT, DDP_F64, DDP_OP_MIN));
    if (d->replicas) DDP_TRY(ddp__host_reduce(d->replicas, low, 2 * COUNT, DDP_F64, DDP_OP_MIN));
    int i = 0;
    while (i < COUNT && low[2 * i] >= -low[2 * i + 1]) i++;
    if (i == COUNT) return DDP_OK;
    ddp_result result = ddp_fail_in(DDP_ERR_MISMATCH, "ddp_fsdp_create", f->group, "the descs of ranks differ: %s is %.9g on one rank and %.9g on another; "
                                       "give every rank the same", option[i].name, low[2 * i], -low[2 * i + 1]);
    if (i == 0 && d->checkpoint_group) ddp_group_poison(d->checkpoint_group, result, ddp_last_error()); /* whose ranks are not all about to agree there */
    return result;
}

/* What has to be equal of a parameter, as a number. */
static uint32_t ddp__weight_number(const ddp_fsdp *f, const ddp__weight *w) {
    const ddp_tensor *value = &w->entry->param.value;
    int64_t numbers[] = {w->unit->index, value->dtype, value->ndim, w->grad_dtype, w->source - f->weights, w->entry->frozen != 0, value->data != NULL};
    size_t shape_bytes = (size_t)value->ndim * sizeof value->shape[0];
    uint32_t crc = ddp__crc_feed(ddp__crc32c(w->name, strlen(w->name)), numbers, sizeof numbers);
    crc = ddp__crc_feed(crc, value->shape, shape_bytes);
    crc = ddp__crc_feed(crc, w->entry->global_shape, shape_bytes);
    return ddp__crc_feed(crc, w->entry->global_offset, shape_bytes);
}

/* Collective: fails on every rank, since w is another one somewhere: ranks that have something else than rank 0 say what, and the others hear it. */
static ddp_result ddp__weight_mismatch(const ddp_fsdp *f, const ddp__weight *w) {
    const ddp_tensor *value = &w->entry->param.value;
    ddp_result own = DDP_OK;
    char mine[160] = "", first[160];
    int same, number = (int)(w - f->weights);
    snprintf(mine, sizeof mine, "'%.60s' %.60s%s%s%s", w->name, ddp__show(ddp_dtype_name(value->dtype), value->ndim, value->shape).text,
             w->entry->frozen ? " frozen" : "", w->source != w ? " tied" : "", value->data ? "" : " without values");
    memcpy(first, mine, sizeof first);
    if (f->desc.replicas) DDP_TRY(ddp__host_broadcast(f->desc.replicas, first, sizeof first, DDP_U8, 0));
    DDP_TRY(ddp__host_broadcast(f->group, first, sizeof first, DDP_U8, 0));
    if (strcmp(mine, first) != 0) {
        own = DDP_ERR_MISMATCH;
        (void)DDP__WEIGHT_BAD(f, w, "ranks describe parameter number %d differently: here %s, on rank 0 %s", number, mine, first);
    }
    DDP_TRY(ddp__fsdp_agree_all(f, own, 0, &same));
    (void)DDP__WEIGHT_BAD(f, w, "ranks describe parameter number %d differently (the rest of its name, unit, dtype of the gradient, tie, global shape or offset)", number);
    return DDP_ERR_MISMATCH;
}

/* The first thing that ranks describe differently is an error on all of them, as is what one of them cannot do. */
static ddp_result ddp__fsdp_compare(const ddp_fsdp *f, ddp_result own) {
    int same, copies = f->desc.replicas ? ddp_world_size(f->desc.replicas) : 0;
    DDP_TRY(ddp__fsdp_agree_all(f, own, (uint64_t)copies, &same)); /* before anybody waits among replicas for who has none */
    if (!same) return ddp_fail_in(DDP_ERR_MISMATCH, "ddp_fsdp_create", f->group, "the descs of ranks differ: replicas has %d ranks here, but not on every rank; "
                                     "give every rank a group of as many", copies);
    DDP_TRY(ddp__options_compare(f));
    for (const ddp__weight *w = f->weights; w < f->weights + f->weight_count; w++) {
        DDP_TRY(ddp__fsdp_agree_all(f, DDP_OK, ddp__weight_number(f, w), &same));
        if (!same) return ddp__weight_mismatch(f, w);
    }
    return DDP_OK;
}

/* Levels of the binary counter: sums of shards, or of whole gradients besides the one that backward writes. */
static int ddp__fsdp_levels(const ddp_fsdp *f) {
    int levels = 0;
    for (int m = f->desc.micro_batch_count; m > 1; m >>= 1) levels++;
    if (f->desc.sequential_accumulation && levels > 1) levels = 1;
    return f->reduces_each ? levels + 1 : levels;
}

static ddp_result ddp__unit_take_memory(ddp_fsdp *f, ddp__unit *unit) {
    int levels = ddp__fsdp_levels(f), shared = f->world > 1 ? DDP__MEMORY_GROUP : DDP__MEMORY_DEVICE;
    unsigned char *master = NULL;
    if (unit->whole_bytes && ddp__has_own_whole(f) && !f->in_shard)
        DDP_TRY(ddp__fsdp_take(f, f->keeps_whole ? DDP__OF_SHARDS : DDP__OF_GATHERED, f->keeps_whole ? shared : DDP__MEMORY_DEVICE, unit->whole_bytes, &unit->whole));
    if (!f->keeps_whole && unit->shard_bytes)
        DDP_TRY(ddp__fsdp_take(f, f->desc.quantize_gather ? DDP__OF_COMMUNICATION : DDP__OF_SHARDS, shared, unit->shard_bytes, &unit->shard));
    if (!f->reduces_each && unit->trained) DDP_TRY(ddp__fsdp_take(f, DDP__OF_GRADIENTS, DDP__MEMORY_GROUP, unit->grad_bytes, &unit->grads));
    if (unit->master_bytes) DDP_TRY(ddp__fsdp_take(f, DDP__OF_SHARDS, ddp__offload_kinds[f->desc.offload], unit->master_bytes, &master));
    DDP__EACH_WEIGHT(unit, w) {
        if (w->source != w) continue;
        w->shard = f->keeps_whole ? unit->whole + w->whole_at + ddp__weight_bytes(w, w->first, w->dtype) : unit->shard + w->shard_at;
        w->master = ddp__has_master(f, w) ? master + w->master_at : w->shard;
    }
    for (int l = 0; l < levels || (l == 0 && unit->sum_bytes); l++) {
        size_t bytes = f->reduces_each ? unit->sum_bytes : l < levels ? unit->cast_bytes : 0;
        if (l == 0 && bytes < unit->sum_bytes) bytes = unit->sum_bytes;
        int adds_copies = f->world == 1 && f->copy_count && unit->converts && unit->layout == DDP__GRADS;
        int kind = adds_copies ? DDP__MEMORY_GROUP : DDP__MEMORY_DEVICE;
        if (unit->trained) DDP_TRY(ddp__fsdp_take(f, DDP__OF_GRADIENTS, kind, bytes, &unit->level[l]));
    }
    return DDP_OK;
}

/* Where the optimizer works beside the device. */
static ddp_result ddp__fsdp_take_host(ddp_fsdp *f) {
    ddp_group_desc alone = DDP_ZERO;
    alone.init_method = "self://";
    DDP_TRY(ddp_group_create(&f->host, &alone));
    for (const ddp__weight *w = f->weights; w < f->weights + f->weight_count; w++) {
        size_t count = ddp__mine(w), size = ddp_dtype_size(w->master_dtype);
        ddp__size_at_least(&f->host_rows_bytes, 2 * ddp_round_up((count < DDP__HOST_PIECE ? count : DDP__HOST_PIECE) * size, 64));
        if (w->source != w || !ddp__is_trained(w)) continue;
        f->host_sums_bytes += ddp_round_up(count * size, 64);
        f->pieces += (int)((count + DDP__HOST_PIECE - 1) / DDP__HOST_PIECE);
    }
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_COMMUNICATION, DDP__MEMORY_PINNED, f->host_rows_bytes, &f->host_rows));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_GRADIENTS, DDP__MEMORY_PINNED, f->host_sums_bytes, &f->host_sums));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)f->pieces * sizeof *f->arrived, &f->arrived));
    for (int i = 0; i < f->pieces + 2 && f->device->use_stream; i++) DDP_TRY(f->device->event_create(f->group, i < 2 ? &f->left[i] : &f->arrived[i - 2]));
    return DDP_OK;
}

/* What all units share: the largest of them says how much. */
static ddp_result ddp__fsdp_take_staging(ddp_fsdp *f) {
    int packs = f->world > 1 && !f->direct;
    DDP__EACH_UNIT(f, unit) {
        ddp__size_at_least(&f->whole_slot_bytes, f->in_shard ? 0 : unit->whole_bytes);
        ddp__size_at_least(&f->grad_slot_bytes, unit->grad_bytes);
        if (unit->layout == DDP__CASTED) ddp__size_at_least(&f->cast_bytes, unit->cast_bytes);
        DDP__EACH_TRAINED(unit, w) {
            size_t tiles = (size_t)(f->world + 1) * DDP__TILE * ddp_dtype_size(w->wire_dtype);
            int casts = w->wire_dtype != w->grad_dtype && unit->layout == DDP__GRADS;
            casts |= w->wire_dtype != w->master_dtype;
            if (casts && f->world > 1 && f->direct) ddp__size_at_least(&f->tile_bytes, tiles);
        }
        if (!packs) continue;
        ddp__size_at_least(&f->send_bytes, unit->gather_bytes);
        ddp__size_at_least(&f->send_bytes, (ddp__wire_bytes(unit->wire_count) + 64) * (size_t)f->world);
        ddp__size_at_least(&f->receive_bytes, unit->gather_bytes * (size_t)f->world);
        ddp__size_at_least(&f->receive_bytes, ddp__wire_bytes(unit->wire_count));
    }
    if (f->cast_bytes) DDP_TRY(ddp__fsdp_take(f, DDP__OF_COMMUNICATION, DDP__MEMORY_GROUP, f->cast_bytes, &f->cast));
    if (f->tile_bytes)
        DDP_TRY(ddp__fsdp_take(f, DDP__OF_COMMUNICATION, DDP__MEMORY_DEVICE, f->tile_bytes, &f->tile));
    if (f->send_bytes) DDP_TRY(ddp__fsdp_take(f, DDP__OF_COMMUNICATION, DDP__MEMORY_GROUP, f->send_bytes, &f->send));
    if (f->receive_bytes) DDP_TRY(ddp__fsdp_take(f, DDP__OF_COMMUNICATION, DDP__MEMORY_GROUP, f->receive_bytes, &f->receive));
    if (f->desc.offload == DDP_FSDP_OFFLOAD_HOST) DDP_TRY(ddp__fsdp_take_host(f));
    int clips = f->device->alloc_pinned && f->device->use_stream; /* the device decides */
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_DEVICE, sizeof *f->squares + (clips ? 64 : 0), &f->squares));
    if (!clips) return DDP_OK;
    f->factor = (float *)(void *)(f->squares + 1);
    DDP_TRY(f->device->event_create(f->group, &f->clipped));
    return ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_PINNED, 64, &f->norm);
}

/* The words by which ranks that read each other's memory keep in step. */
static ddp_result ddp__fsdp_take_turns(ddp_fsdp *f) {
    uint64_t *mine;
    int kept = ddp__turns_kept(f);
    if (f->world == 1 || !f->direct) return DDP_OK;
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)kept * sizeof *f->given_units, &f->given_units));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)kept * sizeof *f->slot_memory, &f->slot_memory));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_GROUP, (size_t)(DDP__TURN_UNITS + kept) * sizeof *mine, &mine));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)f->world * sizeof *f->turns, &f->turns));
    for (int r = 0; r < f->world; r++) f->turns[r] = (uint64_t *)ddp_group_peer(f->group, mine, r);
    return DDP_OK;
}

static ddp_result ddp__fsdp_take_memory(ddp_fsdp *f) {
    char path[4096];
    if (f->device->use_stream && f->desc.replicas) DDP_TRY(f->device->event_create(f->group, &f->turn));
    if (f->desc.offload == DDP_FSDP_OFFLOAD_FILE) {
        snprintf(path, sizeof path, "%s/ddp-offload-XXXXXX", f->desc.offload_dir);
        f->file = mkstemp(path);
        if (f->file >= 0) unlink(path); /* it loses its name at once */
        if (f->file < 0 || fcntl(f->file, F_SETFD, FD_CLOEXEC) != 0)
            return ddp_fail(DDP_ERR_SYSTEM, "ddp_fsdp_create group=%s: offload_dir=%s: no file can be made there: %s", ddp_group_name(f->group),
                            f->desc.offload_dir, strerror(errno));
    }
    DDP__EACH_UNIT(f, unit) DDP_TRY(ddp__unit_take_memory(f, unit));
    f->direct = f->world <= DDP_MAX_LOCAL_RANKS;
    DDP__EACH_UNIT(f, unit) {
        const unsigned char *shared = f->keeps_whole ? unit->whole : unit->shard;
        for (int r = 0; r < f->world && shared && f->direct; r++) f->direct = r == f->rank || ddp_group_peer(f->group, shared, r) != NULL;
    }
    DDP_TRY(ddp__fsdp_take_turns(f));
    return ddp__fsdp_take_staging(f);
}

/* The first values of this rank's rows. */
static ddp_result ddp__weight_fill(ddp_fsdp *f, ddp__weight *w) {
    const ddp_tensor *value = &w->entry->param.value;
    unsigned char *rows = w->master;
    if (value->data && !f->desc.skip_initial_broadcast) {
        if (f->desc.replicas) DDP_TRY(ddp_broadcast(f->desc.replicas, value->data, w->rows * w->row_count, value->dtype, 0, NULL));
        DDP_TRY(ddp_broadcast(f->group, value->data, w->rows * w->row_count, value->dtype, 0, NULL));
    }
    if (!ddp__mine(w)) return DDP_OK;
    if (value->data) { /* from the device's memory, by way of the host's where the master copy is there */
        const unsigned char *from = (unsigned char *)value->data + ddp__weight_bytes(w, w->first, value->dtype);
        size_t size = ddp_dtype_size(value->dtype), most = f->host ? DDP__HOST_PIECE : ddp__mine(w);
        for (size_t at = 0, n; at < ddp__mine(w); at += n) {
            n = ddp__mine(w) - at < most ? ddp__mine(w) - at : most;
            if (f->host) f->device->copy(f->host_rows, from + at * size, n * size);
            (f->host ? ddp_device_cpu() : f->device)->cast(w->master + at * ddp_dtype_size(w->master_dtype), w->master_dtype, f->host ? f->host_rows : from, value->dtype, n);
        }
        return ddp__fsdp_check(f->group);
    }
    if (f->device == ddp_device_cpu() || f->host) return f->desc.init_fn(w->entry, (int64_t)w->first, (int64_t)w->mine, w->master, f->desc.init_user);
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_COMMUNICATION, DDP__MEMORY_HOST, ddp__mine(w) * ddp_dtype_size(w->master_dtype), &rows));
    ddp_result result = f->desc.init_fn(w->entry, (int64_t)w->first, (int64_t)w->mine, rows, f->desc.init_user);
    f->device->copy(w->master, rows, ddp__mine(w) * ddp_dtype_size(w->master_dtype));
    ddp__fsdp_give(f, rows);
    return result;
}

/* What an optimizer takes beside its state: from its group's allocator, or of devices' memory. */
static size_t ddp__optimizer_tables(const ddp_optimizer *o, int of_device) {
    size_t sums = (size_t)o->square_count * sizeof(ddp_exact_sum), here = sums + (size_t)o->square_count / 2 * sizeof *o->rates;
    int on_host = o->device == ddp_device_cpu();
    if (of_device) return (on_host ? 0 : here) + (o->sent != o->squares ? sums : 0);
    size_t bytes = sizeof *o + (size_t)o->desc.param_count * sizeof *o->params + 2 * DDP_MALLOC_EXTRA;
    return o->square_count && on_host ? bytes + here + DDP_MALLOC_EXTRA : bytes;
}

/* The optimizer sees this rank's rows of each trained parameter. */
static ddp_result ddp__fsdp_make_optimizer(ddp_fsdp *f) {
    ddp_optimizer_desc d = f->desc.optimizer;
    size_t host_at = 0;
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)f->weight_count * sizeof *f->masters, &f->masters));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)f->weight_count * sizeof *f->master_of, &f->master_of));
    DDP_TRY(ddp__fsdp_take(f, DDP__OF_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)f->weight_count * sizeof *f->sums, &f->sums));
    for (ddp__weight *w = f->weights; w < f->weights + f->weight_count; w++) {
        ddp_param *p = &f->masters[f->master_count];
        if (w->source != w || !ddp__is_trained(w)) continue;
        p->name = w->name, p->value = p->grad = ddp__weight_rows(w), p->grad.data = ddp__weight_sum(w, 0);
        f->sums[f->master_count] = p->grad;
        if (f->host) p->grad.data = f->host_sums + ddp__lay(&host_at, ddp__mine(w) * ddp_dtype_size(w->master_dtype));
        w->master_number = f->master_count;
        f->master_of[f->master_count++] = w;
    }
    if (!f->master_count) return DDP_OK;
    d.params = f->masters, d.param_count = f->master_count, d.shard_group = f->world > 1 ? f->group : NULL;
    d.state_alloc_fn = ddp__fsdp_state_alloc, d.state_free_fn = ddp__fsdp_state_free, d.state_user = f;
    ddp_result result = ddp_optimizer_create(&f->optimizer, f->host ? f->host : f->group, &d);
    if (result == DDP_OK && f->host) f->optimizer->piece_fn = ddp__host_piece;
    if (result == DDP_OK) ddp__fsdp_count(f, DDP__OF_BOOKKEEPING, ddp__optimizer_tables(f->optimizer, 1), 1);
    if (result == DDP_OK && !f->desc.alloc_fn) ddp__fsdp_count(f, DDP__OF_BOOKKEEPING, ddp__optimizer_tables(f->optimizer, 0), 1);
    return result == DDP_OK || f->state_told.result == DDP_OK ? result : ddp_error_restore(&f->state_told);
}

static ddp_result ddp__fsdp_build(ddp_fsdp *f) {
    DDP_TRY(ddp__fsdp_enter(f->group));
    DDP_TRY(ddp__fsdp_take_memory(f));
    for (int i = 0; i < f->weight_count; i++)
        if (f->weights[i].source == &f->weights[i]) DDP_TRY(ddp__weight_fill(f, &f->weights[i]));
    DDP_TRY(ddp__fsdp_make_optimizer(f));
    DDP_TRY(ddp__saver_create(f));
    for (int i = 0; i < f->weight_count; i++) {
        ddp_param *p = &f->weights[i].entry->param;
        p->value.dtype = f->weights[i].dtype, p->grad = p->value, p->grad.dtype = f->weights[i].grad_dtype;
    }
    DDP__EACH_UNIT(f, unit) ddp__unit_point(f, unit, f->keeps_whole, !f->reduces_each);
    DDP_TRY(ddp__fsdp_meet(f, "ddp_fsdp_create"));
    DDP_TRY(ddp__fsdp_publish(f, 0));
    ddp__fsdp_begin(f);
    return DDP_OK;
}

static void ddp__fsdp_free(ddp_fsdp *f) {
    if (f->saver && f->saver->running == 2) pthread_join(f->saver->thread, NULL);
    if (f->saver) ddp_group_destroy(f->saver->group);
    for (int u = 0; u < f->unit_count && f->units; u++) {
        ddp__reduce_wait(f, &f->units[u]);
        ddp__unit_arrive(f, &f->units[u]);
    }
    double until = ddp_now() + ddp_group_timeout_ms(f->group) * 1e-3;
    for (int i = 0; i < (f->arrived ? f->pieces : 0) + 3; i++) { /* pinned memory is not in use any more */
        void *event = i < 2 ? f->left[i] : i == 2 ? f->clipped : f->arrived[i - 3];
        ddp__fsdp_await(f, event, until);
        if (event) f->device->event_destroy(f->group, event);
    }
    ddp_optimizer_destroy(f->optimizer);
    for (int i = 0; i < f->weight_count && f->weights; i++)
        if (f->weights[i].entry) f->weights[i].entry->param.value.data = f->weights[i].entry->param.grad.data = NULL;
    while (f->holdings) ddp__fsdp_give(f, f->holdings->memory);
    if (f->file >= 0) close(f->file);
    if (f->turn) f->device->event_destroy(f->group, f->turn);
    ddp_group_destroy(f->host);
    ddp_fsdp last = *f;
    ddp__fsdp_unhost(&last, last.own_raw);
}

DDPDEF ddp_result ddp_fsdp_create(ddp_fsdp **out, ddp_group *group, const ddp_fsdp_desc *desc) {
    DDP_PUBLIC_CALL(ddp_fsdp_create);
    ddp_fsdp first = DDP_ZERO, *f = NULL;
    if (out) *out = NULL;
    DDP__FSDP_NEED(out && group && desc, "out, group or desc is NULL");
    ddp_result result = ddp__fsdp_desc_resolve(&first, group, desc);
    if (result == DDP_OK && !(f = (ddp_fsdp *)ddp__fsdp_host(&first, sizeof first, &first.own_raw, &first.own_counted))) result = DDP_ERR_NO_MEMORY;
    if (f) {
        *f = first;
        ddp__fsdp_count(f, DDP__OF_BOOKKEEPING, f->own_counted, 1);
        result = ddp__fsdp_describe(f);
    }
    result = ddp__fsdp_compare(f ? f : &first, result);
    if (desc->checkpoint_group) result = ddp_agree(desc->checkpoint_group, __func__, result, 0, "");
    if (result == DDP_OK) {
        result = ddp__fsdp_build(f);
        if (result != DDP_OK) result = ddp__fsdp_give_up(f, result);
        if (result != DDP_OK && desc->checkpoint_group) ddp_group_poison(desc->checkpoint_group, result, ddp_last_error());
    }
    if (result == DDP_OK) *out = f;
    if (result == DDP_OK || !f) return result;
    ddp_saved_error told = ddp__fsdp_error(result);
    for (int i = 0; i < f->weight_count && f->weights; i++) f->weights[i].entry = NULL; /* the caller's values stay */
    ddp__fsdp_free(f);
    return ddp_error_restore(&told);
}

DDPDEF void ddp_fsdp_destroy(ddp_fsdp *fsdp) {
    DDP_PUBLIC_CALL(ddp_fsdp_destroy);
    if (fsdp && !ddp_group_is_forked(fsdp->group)) ddp__fsdp_free(fsdp);
}

//== sharding: memory and wrapping ======================================================================= >>impl-wrap

/* The formulas of the opening comment, element by element: P / W of what is split, no padding. */
static ddp_fsdp_bytes ddp__fsdp_predict(const ddp_fsdp *f) {
    ddp_fsdp_bytes out = DDP_ZERO;
    double w = f->world, levels = ddp__fsdp_levels(f), bytes[DDP__PURPOSES] = {0}, sum_whole = 0;
    double states = f->optimizer ? f->optimizer->state_count : 0;
    int window = 1 + f->desc.prefetch;
    for (const ddp__weight *p = f->weights; p < f->weights + f->weight_count; p++) {
        double count = (double)p->rows * (double)p->row_count, wide = (double)ddp_dtype_size(p->master_dtype);
        if (p->source == p) {
            bytes[DDP__OF_SHARDS] += f->keeps_whole ? count * (double)ddp_dtype_size(p->dtype) : f->desc.quantize_gather ? 0 : count * (double)ddp_dtype_size(p->dtype) / w;
            if (ddp__has_master(f, p) && f->desc.offload != DDP_FSDP_OFFLOAD_FILE) bytes[DDP__OF_SHARDS] += count * wide / w;
            if (f->desc.quantize_gather) bytes[DDP__OF_COMMUNICATION] += count / w * (1 + 4.0 / (double)DDP__QUANT_BLOCK);
            if (ddp__is_trained(p) && f->desc.offload != DDP_FSDP_OFFLOAD_FILE) bytes[DDP__OF_OPTIMIZER] += states * count * wide / w;
        }
        if (!ddp__is_alias(f, p)) sum_whole += count * (double)ddp_dtype_size(p->dtype);
        if (!ddp__is_trained(p)) continue;
        if (f->reduces_each) bytes[DDP__OF_GRADIENTS] += levels * count * wide / w;
        else {
            bytes[DDP__OF_GRADIENTS] += count * (double)ddp_dtype_size(p->grad_dtype);
            bytes[DDP__OF_GRADIENTS] += levels * count * (double)ddp_dtype_size(p->wire_dtype);
            if (!p->in_place && levels == 0) bytes[DDP__OF_GRADIENTS] += count * wide / w;
        }
    }
    if (window > f->unit_count) window = f->unit_count;
    if (f->desc.no_reshard_after_forward && !f->keeps_whole && !f->in_shard) bytes[DDP__OF_GATHERED] += sum_whole;
    else if (!f->keeps_whole) bytes[DDP__OF_GATHERED] += (double)ddp__slots_wanted(f, 1) * (double)f->whole_slot_bytes;
    if (f->reduces_each) bytes[DDP__OF_GRADIENTS] += (double)window * (double)f->grad_slot_bytes;
    bytes[DDP__OF_GRADIENTS] += (double)f->host_sums_bytes;
    bytes[DDP__OF_COMMUNICATION] += (double)(f->cast_bytes + f->tile_bytes + f->host_rows_bytes);
    bytes[DDP__OF_COMMUNICATION] += (double)(f->send_bytes + f->receive_bytes);
    for (int i = 0; i < DDP__PURPOSES; i++) out.total += ((size_t *)(void *)&out)[i] = (size_t)(bytes[i] + 0.5);
    return out;
}

DDPDEF ddp_result ddp_fsdp_get_memory(const ddp_fsdp *fsdp, ddp_fsdp_memory *memory) {
    DDP__FSDP_NEED(fsdp && memory, "fsdp or memory is NULL");
    memory->now = fsdp->now, memory->peak = fsdp->peak, memory->predicted = ddp__fsdp_predict(fsdp);
    memory->group_bytes = fsdp->group_bytes, memory->file_bytes = fsdp->file_bytes;
    return DDP_OK;
}

/* Bytes of the name that the prefix matches, up to the end of a part; 0 = it does not. "*" is one part. */
static size_t ddp__prefix_match(const char *prefix, const char *name) {
    const char *at = name;
    for (; *prefix && (*prefix != '.' || prefix[1] || *at); prefix++) { /* a point at its end may lack in the name */
        size_t part = *prefix == '*' ? strcspn(at, ".") : *prefix == *at;
        if (!part) return 0;
        at += part;
    }
    if (at > name && at[-1] == '.') at--;
    return *at == '.' || !*at ? (size_t)(at - name) : 0;
}

/* Bytes of a parameter's name that name its unit: the longest match. 0 = the root. */
static size_t ddp__wrap_length(const ddp_fsdp_wrap_desc *d, const char *name) {
    size_t longest = 0;
    for (int p = 0; p < d->prefix_count; p++) ddp__size_at_least(&longest, ddp__prefix_match(d->prefixes[p], name));
    return longest;
}

/* The first parameter of the same unit. */
static int ddp__wrap_first(const ddp_param *params, int index, const ddp_fsdp_wrap_desc *d, size_t *length) {
    *length = ddp__wrap_length(d, params[index].name);
    for (int i = 0; i < index; i++)
        if (ddp__wrap_length(d, params[i].name) == *length && !strncmp(params[i].name, params[index].name, *length)) return i;
    return index;
}

DDPDEF int ddp_fsdp_wrap(const ddp_param *params, int param_count, const ddp_fsdp_wrap_desc *desc, ddp_fsdp_unit_desc *out, int cap) {
    int units = 0, placed = 0;
    size_t full = desc && desc->min_unit_bytes ? desc->min_unit_bytes : (size_t)25 << 20, length;
    DDP__FSDP_NEED(params && desc && desc->storage && (out || cap == 0), "params, desc, its storage or out is NULL");
    DDP__FSDP_NEED(param_count > 0, "param_count=%d; pass at least one parameter", param_count);
    DDP__FSDP_NEED(desc->prefix_count >= 0 && (desc->prefixes || !desc->prefix_count), "prefix_count=%d, but prefixes is NULL", desc->prefix_count);
    for (int i = 0; i < param_count; i++) {
        DDP__FSDP_NEED(params[i].name && params[i].name[0], "parameter %d has no name", i);
        for (int k = 0; k < i; k++) DDP__FSDP_NEED(strcmp(params[k].name, params[i].name), "parameter %d and parameter %d are both named %s; give each its own name", k, i, params[i].name);
    }
    for (int p = 0; p < desc->prefix_count; p++) {
        int used = 0;
        DDP__FSDP_NEED(desc->prefixes[p] && desc->prefixes[p][0], "prefixes[%d] is NULL or empty; what matches no prefix is in unit root", p);
        for (int i = 0; i < param_count && !used; i++) used = ddp__prefix_match(desc->prefixes[p], params[i].name) > 0;
        DDP__FSDP_NEED(used, "no parameter's name begins with prefix %s", desc->prefixes[p]);
    }
    for (int i = 0, next = 1; i < param_count; i = next++) {
        ddp_fsdp_param *first = desc->storage + placed;
        size_t bytes = 0, unused;
        int all = desc->prefix_count, count = 0;
        if (all && ddp__wrap_first(params, i, desc, &length) != i) continue; /* came with an earlier one */
        for (int k = i; k < param_count && (all || bytes < full); k++) {
            if (all && ddp__wrap_first(params, k, desc, &unused) != i) continue;
            memset(&first[count], 0, sizeof *first);
            first[count].param = params[k];
            first[count++].index = k;
            bytes += ddp_tensor_bytes(&params[k].value);
            if (!all) next = k + 1;
        }
        placed += count;
        if (units++ >= cap) continue;
        ddp_fsdp_unit_desc *unit = &out[units - 1];
        unit->name = all ? first->unit : NULL, unit->params = first, unit->param_count = count;
        if (all) snprintf(first->unit, sizeof first->unit, "%.*s", length ? (int)length : 4, length ? params[i].name : "root");
    }
    DDP__FSDP_NEED(units <= cap, "there are %d units, out has room for %d", units, cap);
    return units;
}
//== public ============================================================================================ >>impl-public

#define DDP__UNIT_NEED(fsdp, unit)                                      \
    DDP__FSDP_NEED(fsdp, "fsdp is NULL");                               \
    DDP__FSDP_NEED((unit) >= 0 && (unit) < (fsdp)->unit_count, "unit=%d, there are units 0 to %d", unit, (fsdp)->unit_count - 1)

/* Whole values of the unit, and of those units whose whole values it shares. */
static ddp_result ddp__unit_bring(ddp_fsdp *f, ddp__unit *unit) {
    for (int i = f->keeps_whole ? 0 : unit->count; i <= unit->count; i++) {
        ddp__unit *needed = i < unit->count ? unit->weights[i].source->unit : unit;
        if (needed->state == DDP__UNIT_GONE) DDP_TRY(ddp__unit_fetch(f, needed, 0));
        DDP_TRY(ddp__unit_arrive(f, needed));
    }
    return DDP_OK;
}

static void ddp__order_hash(ddp_fsdp *f, int what, int unit) { f->order_hash = (f->order_hash ^ (uint64_t)(2 * unit + what)) * UINT64_C(0x100000001b3); }

DDPDEF ddp_result ddp_fsdp_unshard(ddp_fsdp *fsdp, int unit) {
    DDP_PUBLIC_CALL(ddp_fsdp_unshard);
    DDP__UNIT_NEED(fsdp, unit);
    ddp__unit *u = &fsdp->units[unit];
    fsdp->who = __func__;
    DDP_TRY(ddp__fsdp_enter(fsdp->group));
    ddp__order_hash(fsdp, 0, unit);
    ddp_result result = fsdp->no_grad ? DDP_OK : ddp__order_note(fsdp, unit);
    if (result == DDP_OK) result = ddp__make_room(fsdp, u);
    if (result == DDP_OK) result = ddp__unit_bring(fsdp, u);
    if (result != DDP_OK) return ddp__fsdp_fail(fsdp, result, __func__, u);
    if (!u->in_use && ++fsdp->in_use > fsdp->most_in_use) fsdp->most_in_use = fsdp->in_use;
    u->in_use = 1;
    result = ddp__grads_attach(fsdp, u);
    if (result == DDP_OK) result = ddp__fetch_ahead(fsdp);
    if (result != DDP_OK) return ddp__fsdp_fail(fsdp, result, __func__, u);
    ddp__unit_point(fsdp, u, 1, u->attached);
    return ddp__fsdp_check(fsdp->group);
}

DDPDEF ddp_result ddp_fsdp_reshard(ddp_fsdp *fsdp, int unit) {
    DDP_PUBLIC_CALL(ddp_fsdp_reshard);
    DDP__UNIT_NEED(fsdp, unit);
    ddp__unit *u = &fsdp->units[unit];
    DDP__FSDP_NEED(u->in_use, "unit %s is not gathered", u->name);
    u->in_use = 0;
    fsdp->in_use--;
    if (u->attached) ddp__grads_drop(fsdp, u);
    ddp__unit_point(fsdp, u, fsdp->keeps_whole, !fsdp->reduces_each);
    if (fsdp->keeps_whole || ddp__is_next(fsdp, unit, fsdp->desc.prefetch)) return DDP_OK;
    if (fsdp->desc.no_reshard_after_forward && !fsdp->no_grad && u->trained && u->reduced < fsdp->desc.micro_batch_count) return DDP_OK;
    return ddp__unit_drop(fsdp, u);
}

DDPDEF ddp_result ddp_fsdp_reduce_grads(ddp_fsdp *fsdp, int unit) {
    DDP_PUBLIC_CALL(ddp_fsdp_reduce_grads);
    DDP__UNIT_NEED(fsdp, unit);
    ddp__unit *u = &fsdp->units[unit];
    DDP__FSDP_NEED(u->reduced < fsdp->desc.micro_batch_count, "unit %s was reduced %d times in this step already, as micro_batch_count says; call ddp_fsdp_step first",
                   u->name, u->reduced);
    DDP__FSDP_NEED(!u->trained || u->attached, "unit %s has no gradients; gather it before its backward", u->name);
    ddp__order_hash(fsdp, 1, unit);
    if (!u->trained) return DDP_OK;
    DDP_TRY(ddp__fsdp_enter(fsdp->group));
    DDP_TRY(ddp__reduce_wait(fsdp, u));
    u->reduced++;
    u->attached = 0;
    if (fsdp->reduces_each) {
        u->reducing_slot = u->grad_slot, u->reducing_slot->reducing = u, u->grad_slot = NULL, u->grads = NULL;
        ddp__unit_point(fsdp, u, 1, 0);
    }
    ddp_result result = fsdp->turns ? ddp__fsdp_failed(fsdp, ddp__reduce_give(fsdp, u)) : ddp_group_enqueue(fsdp->group, ddp__reduce_task, u, &u->reducing);
    return result == DDP_OK ? DDP_OK : ddp__fsdp_fail(fsdp, result, __func__, u);
}

DDPDEF ddp_result ddp_fsdp_no_grad(ddp_fsdp *fsdp, int on) {
    DDP__FSDP_NEED(fsdp, "fsdp is NULL");
    fsdp->no_grad = on != 0;
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_zero_grad(ddp_fsdp *fsdp) {
    DDP_PUBLIC_CALL(ddp_fsdp_zero_grad);
    DDP__FSDP_NEED(fsdp, "fsdp is NULL");
    DDP__EACH_UNIT(fsdp, unit) DDP_TRY(ddp__reduce_wait(fsdp, unit));
    DDP__EACH_UNIT(fsdp, unit) {
        ddp__grads_drop(fsdp, unit);
        ddp__unit_point(fsdp, unit, fsdp->keeps_whole || unit->in_use, !fsdp->reduces_each);
    }
    fsdp->order_hash = 0; /* ranks that had come apart start anew too */
    DDP_TRY(ddp__fsdp_meet(fsdp, __func__));
    if (fsdp->finished && fsdp->desc.scaler) fsdp->desc.scaler->unscaled = fsdp->desc.scaler->found_inf = 0;
    ddp__fsdp_begin(fsdp);
    return DDP_OK;
}

#define DDP__WEIGHT_NEED(fsdp, unit, param)                             \
    DDP__UNIT_NEED(fsdp, unit);                                         \
    DDP__FSDP_NEED((param) >= 0 && (param) < (fsdp)->units[unit].count, "param=%d, unit %s has parameters 0 to %d", param, (fsdp)->units[unit].name, \
                   (fsdp)->units[unit].count - 1)

DDPDEF ddp_result ddp_fsdp_get_shard(ddp_fsdp *fsdp, int unit, int param, ddp_tensor *value, ddp_tensor *grad, int64_t *first_row) {
    DDP_PUBLIC_CALL(ddp_fsdp_get_shard);
    DDP__WEIGHT_NEED(fsdp, unit, param);
    const ddp__weight *w = &fsdp->units[unit].weights[param];
    ddp_tensor rows = ddp__weight_rows(w);
    if (value) *value = rows;
    if (first_row) *first_row = (int64_t)w->first;
    if (!grad) return DDP_OK;
    if (ddp__is_trained(w)) DDP_TRY(ddp__reduce_end(fsdp, w->unit)); /* its memory stays taken: who looks is this rank's business */
    DDP_TRY(ddp__fsdp_enter(fsdp->group));
    ddp__fsdp_scale(fsdp);
    DDP_TRY(ddp__fsdp_check(fsdp->group));
    rows.data = rows.data && ddp__is_trained(w) && w->unit->reduced == fsdp->desc.micro_batch_count ? ddp__weight_sum(w, 0) : NULL;
    *grad = rows;
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_get_state(ddp_fsdp *fsdp, int unit, int param, int which, const char **name, ddp_tensor *state) {
    DDP__WEIGHT_NEED(fsdp, unit, param);
    DDP__FSDP_NEED(state, "state is NULL");
    const ddp__weight *w = &fsdp->units[unit].weights[param];
    DDP__FSDP_NEED(ddp__is_trained(w), "unit %s, parameter %.200s is frozen: it has no optimizer state", w->unit->name, w->name);
    DDP__FSDP_NEED(which >= 0 && which < fsdp->optimizer->state_count, "which=%d, there are %d states of a parameter, numbered from 0", which,
                   fsdp->optimizer->state_count);
    return ddp_optimizer_get_state(fsdp->optimizer, w->source->master_number, which, name, state);
}

DDPDEF ddp_result ddp_fsdp_set_step(ddp_fsdp *fsdp, int64_t step) {
    DDP__FSDP_NEED(fsdp && step >= 0, "fsdp is NULL, or step=%lld is negative", (long long)step);
    fsdp->step = step;
    if (fsdp->optimizer) ddp_optimizer_set_step(fsdp->optimizer, step);
    if (fsdp->desc.state) fsdp->desc.state->step = step;
    return DDP_OK;
}

#endif /* DDP_IMPLEMENTATION or DDP_FSDP_IMPLEMENTATION */
#endif /* DDP__KERNELS_ONLY */

/*
    MIT License
    Copyright (c) 2026 the ddp authors

    Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
    files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
    modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
    Software is furnished to do so, subject to the following conditions:

    The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
    Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
    WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
    COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
    OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*/

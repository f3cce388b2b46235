/*  ddp_fsdp.h - sharded training: parameters, gradients and optimizer state split over ranks.

    Contains: ZeRO-1, ZeRO-2, ZeRO-3 (FSDP) and plain data parallelism through the same calls, each also in a
    hybrid form (HSDP); optimizers, learning-rate schedules and a loss scaler for plain or sharded tensors;
    checkpoints in safetensors files, which can be loaded on any number of ranks.

USAGE
    #define DDP_IMPLEMENTATION       in exactly one source file: the bodies of ddp.h and of this header
    #include "ddp_fsdp.h"
    Or DDP_FSDP_IMPLEMENTATION for only the bodies of this header. Link with -lpthread -lm.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp_fsdp.h"
    #include <stdio.h>

    static ddp_result train(ddp_group *world, void *user) {  // runs once per rank
        float start[8] = {0};
        ddp_tensor value = {start, DDP_F32, 1, {8}};
        ddp_fsdp_param p = DDP_ZERO;
        ddp_fsdp_unit_desc unit = {"layer", &p, 1};          // parameters that are unsharded together
        ddp_fsdp_desc desc = DDP_ZERO;                       // zero means default: ZeRO-3, AdamW, f32
        ddp_fsdp *fsdp;
        p.param.name = "w", p.param.value = value;
        desc.units = &unit, desc.unit_count = 1;
        DDP_TRY(ddp_fsdp_create(&fsdp, world, &desc));
        for (int step = 0; step < *(int *)user; step++) {
            DDP_TRY(ddp_fsdp_unshard(fsdp, 0));              // value.data, grad.data: full tensors
            float *w = (float *)p.param.value.data, *g = (float *)p.param.grad.data;
            for (int i = 0; i < 8; i++) g[i] = w[i] - (float)i;
            if (step % 100 == 99) printf("rank %d: w[7] = %g\n", ddp_rank(world), w[7]);
            DDP_TRY(ddp_fsdp_reduce_grads(fsdp, 0));         // adds g over ranks, keeps own rows
            DDP_TRY(ddp_fsdp_step(fsdp, 0.05f));
        }
        ddp_fsdp_destroy(fsdp);
        return DDP_OK;
    }
    int main(void) { int steps = 400; return ddp_launch(NULL, train, &steps) != DDP_OK; }

CONTENTS      (search for the tags)
    >>config  >>kernels  >>types  >>descs  >>api  >>impl-structs  >>impl-update  >>impl-optimizer
    >>impl-optimizer-step  >>impl-scaler  >>impl-crc  >>impl-json  >>impl-safetensors  >>impl-files
    >>impl-boxes  >>impl-save-layout  >>impl-save  >>impl-load-state  >>impl-load-files  >>impl-load
    >>impl-sharding  >>impl-memory  >>impl-layout  >>impl-unshard  >>impl-shard-reduce
    >>impl-reduce-order  >>impl-step  >>impl-saver  >>impl-create-check  >>impl-create-memory
    >>impl-create  >>impl-wrap  >>impl-export  >>impl-public

CONCEPTS
    Shard      A parameter of d rows (its first dimension) is cut into W pieces of c = ceil(d / W) rows. Rank
               r keeps rows [rc, (r+1)c); the last ranks have fewer rows or none. Rows are never split.
    Unit       Parameters that are unsharded, resharded and reduced together, such as a transformer block.
               Parameters outside all blocks form a root unit, which stays unsharded longer. A unit inside
               another one is a separate unit.
    Unshard    Brings the full parameters of a unit to every rank. param.value.data points to them until the
               unit is resharded, at the latest by ddp_fsdp_step.
    Reduce     Adds the full gradients of a unit over ranks. Each rank keeps its rows of the sum.

               rank 0   rank 1   unshard   ranks 0, 1    backward  rank 0    rank 1   reduce  rank 0   rank 1
       weight |rows 0-1|rows 2-3| -----> |rows 0 1 2 3| -------> |grad 0-3||grad 0-3| ----> |sum 0-1||sum 2-3|

    Strategy   What is split, and what each rank keeps in full. Bytes per rank for P parameters, W ranks and
               AdamW, without bookkeeping; ddp_fsdp_predict computes them for any desc. 16-bit: param_dtype is
               BF16 or F16; master values, sums of gradients and moments are f32. U: parameters of the largest
               unit times 1 + prefetch (2 by default); all units share its buffers.

                                                               f32                    16-bit
                   NO_SHARD      nothing: data parallelism     16 P                   20 P
                   SHARD_OPTIM   ZeRO-1: moments (16-bit:      8 P +  8 P / W         4 P + 16 P / W
                                 master values, sums too)
                   SHARD_GRAD    ZeRO-2: gradients too         4 P + 12 P / W + 4 U   2 P + 16 P / W + 2 U
                   FULL_SHARD    ZeRO-3: values too                  16 P / W + 8 U         18 P / W + 4 U

               U holds gradients, and values under FULL_SHARD. m > 1 micro-batches add floor(log2 m) sums: of
               4 P / W each with SHARD_GRAD and FULL_SHARD, of 4 P each with SHARD_OPTIM and NO_SHARD.
               SHARD_OPTIM and NO_SHARD with 16-bit gradients differ. With m > 1 they keep no other sums, and
               the largest unit's gradients are also staged in f32. With m = 1 on one rank they keep no sums:
               AdamW and SGD read the 16-bit gradients. LAMB, LARS, a scaler, per_token, tied parameters and a
               ddp_pipeline need the sums. Reading a gradient with ddp_fsdp_get_shard, or a second clip in a
               step, allocates them. Ranks that cannot read each other's memory stage one more unit: its
               gathered values and its f32 gradients. f32 sums from a ddp_pipeline need the largest unit's
               gradients in f32.
    Traffic    Bytes that each rank sends, times (W - 1) / W. An unshard sends 4 P, 16-bit 2 P: once per step;
               FULL_SHARD at most twice per micro-batch, or once per step with no_reshard_after_forward. A
               reduction of gradients sends 4 P, also of 16-bit ones, which are added in f32: once per step;
               SHARD_GRAD and FULL_SHARD once per micro-batch. NO_SHARD has no unshard, and its all-reduce
               sends 8 P. Ranks that read each other's memory read 16-bit gradients as they are, 2 P; sums
               over micro-batches are 4 P.
    Hybrid     Split inside one group and replicated across another (HSDP). The ranks that hold the same shard
               form the group `replicas`.
    Master     The f32 values that the optimizer updates. With param_dtype = DDP_BF16, an unshard sends a
               16-bit copy of them.
    Offload    OFFLOAD_HOST keeps optimizer state and master values in host memory; OFFLOAD_PARAMS also shards
               and sums of gradients. The device then has only U, and staging that all units share: two
               buffers of the largest unit's shard, and two of its f32 sums (one if m = 1).
    Micro-batches   SHARD_GRAD and FULL_SHARD add over ranks after every micro-batch, then over micro-batches,
               pairwise like a binary counter. SHARD_OPTIM and NO_SHARD add over micro-batches first, and over
               ranks only after the last one. Both sums are the tree over the micro-batches of the step. In
               the first way, micro-batch i of rank r is number iW + r of the step (W a power of two). In the
               second, each rank has a block of consecutive micro-batches; their number is a power of two. So
               W ranks under any strategy end with the bits of one rank. 16-bit gradients are added in f32
               everywhere, also over the replicas of a ddp_pipeline. Outside this promise: reduce_dtype,
               sequential_accumulation, quantize_gather.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). An error in a desc names the unit and the parameter. A
    failure of communication poisons the group, on every rank.

CONFIG MACROS (define before including)
    DDP_FSDP_IMPLEMENTATION   also compile the bodies of this header, here. DDP_IMPLEMENTATION implies it

NOT DONE HERE
    No autograd: the caller runs forward and backward, unit by unit. No model parts: the caller does tensor
    parallelism, and describes it to checkpoints by global_shape.
*/
#ifndef DDP_FSDP_KERNELS_H
#define DDP_FSDP_KERNELS_H

//== config =================================================================================== >>config
#include "ddp.h"

//== kernels ================================================================================= >>kernels

/* The kinds of a ddp_update. LARS is an SGD with a scale. */
typedef enum ddp_update_kind { DDP_UPDATE_ADAMW, DDP_UPDATE_LAMB, DDP_UPDATE_SGD } ddp_update_kind;

/* One tensor of a ddp_update. The arrays have count elements and do not overlap. */
typedef struct ddp_update_tensor {
    void *value, *grad;     /* of dtype; of grad_dtype */
    void *state0, *state1;  /* of dtype; NULL where the formula needs none */
    void *copy;             /* NULL, or receives the new values, rounded to copy_dtype; not with LAMB */
    const double *scale_at; /* NULL = ddp_update.scale; otherwise the device's memory with that factor,
                               which is read when the work runs */
    size_t count;           /* may be 0 */
} ddp_update_tensor;

/* One step of an optimizer over a list of tensors. w, g, m and v are elements of value, grad, state0 and
   state1. g is first converted to dtype and multiplied by grad_scale. Every product, sum, root and quotient
   is rounded to dtype: no fused multiply-add. The factors are rounded to dtype beforehand.
     ADAMW   m = beta1 m + one_minus_beta1 g;  v = beta2 v + one_minus_beta2 (g g);
             w = w decay_factor - (rate m) / (sqrt(v) inv_sqrt_bias_correction2 + eps)
     LAMB    m and v as above;
             g = (rate m) / (sqrt(v) inv_sqrt_bias_correction2 + eps) + decay w, without decay w if decay is 0
     SGD     d = scale (g + decay w), without decay w if decay is 0;
             with state0: m = first ? d : beta1 m + one_minus_beta1 d, then d = nesterov ? d + beta1 m : m;
             w = w - rate d */
typedef struct ddp_update {
    ddp_update_kind kind;             /* which of the formulas */
    ddp_dtype dtype;                  /* F32 or F64 */
    ddp_dtype grad_dtype;             /* dtype; or F16 or BF16 with dtype F32, except LAMB, which writes g */
    ddp_dtype copy_dtype;             /* a float; not read without copies */
    const ddp_update_tensor *tensors; /* the list */
    int tensor_count;                 /* entries of tensors */
    double rate; /* ADAMW: lr / (1 - beta1^step). LAMB: 1 / (1 - beta1^step). SGD: lr. LARS: 1 */
    double beta1, one_minus_beta1;             /* SGD, LARS: momentum and 1 - dampening */
    double beta2, one_minus_beta2, eps, decay; /* the other factors of the formulas */
    double scale, grad_scale;                  /* grad_scale 0 = 1 */
    double decay_factor;                       /* ADAMW: 1 - lr * weight decay */
    double inv_sqrt_bias_correction2;          /* 1 / sqrt(1 - beta2^step) */
    int first, nesterov;                       /* SGD: 1 = the first step; 1 = Nesterov momentum */
    const float *grad_scale_at; /* NULL = grad_scale; otherwise the device's memory with that factor, which is
                                   read when the work runs */
} ddp_update;

/* The functions of ddp_device.optimizer. All pointers are in the device's memory. Work goes to the stream
   that the calling thread uses, and the call returns at once. ddp_device.check reports failures. n(k) is the
   root of sum k. */
#define DDP_OPTIMIZER_KERNELS(X)                                                                            \
    /* one step of a list of tensors */                                                                     \
    X(update, (const ddp_update *update))                                                                   \
    /* multiplies each tensor by *factor */                                                                 \
    X(scale, (const ddp_tensor *tensors, int tensor_count, const float *factor))                            \
    /* *norm = n(0) as f32; may be pinned. *factor = limit / *norm for a finite norm above limit, else 1 */ \
    X(clip, (const ddp_exact_sum *sum, float limit, float *factor, float *norm))                            \
    /* out[i] = lr c n(2i) / (n(2i+1) + decay n(2i)), or lr if an n is 0; decay -1: no decay n(2i) */       \
    X(trust, (const ddp_exact_sum *sums, size_t count, double lr, double c, double decay, double *out))

// clang-format off
/* The table of these functions: ddp_device.optimizer. */
typedef struct ddp_optimizer_kernels {
    int version; /* DDP_VERSION of the header that filled in the table */
#define DDP_X(name, arguments) void (*name) arguments;
    DDP_OPTIMIZER_KERNELS(DDP_X)
#undef DDP_X
    // clang-format on
} ddp_optimizer_kernels;

#endif /* DDP_FSDP_KERNELS_H */

#if !defined(DDP__KERNELS_ONLY) /* ddp_cuda.cuh includes only the part above */
#ifndef DDP_FSDP_H
#define DDP_FSDP_H

#ifdef __cplusplus
extern "C" {
#endif

//== types ===================================================================================== >>types

typedef struct ddp_fsdp ddp_fsdp;           /* a sharded model; see ddp_fsdp_create */
typedef struct ddp_optimizer ddp_optimizer; /* see ddp_optimizer_create */

/* The strategies: see CONCEPTS. */
typedef enum ddp_fsdp_strategy {
    /* ZeRO-3: values, gradients and optimizer state are split (Rajbhandari et al. 2020; FSDP, Zhao et al.
       2023) */
    DDP_FSDP_FULL_SHARD = 0,
    DDP_FSDP_SHARD_GRAD,  /* ZeRO-2: full values stay between steps */
    DDP_FSDP_SHARD_OPTIM, /* ZeRO-1: full gradients also stay, until the step's last micro-batch */
    DDP_FSDP_NO_SHARD     /* everything in full on every rank */
} ddp_fsdp_strategy;

/* The place of optimizer state and master values. */
typedef enum ddp_fsdp_offload {
    DDP_FSDP_OFFLOAD_NONE = 0,
    /* For devices with their own memory. Optimizer state and master values are stored in host memory, with
       pinned space for this rank's gradients. The host steps piece by piece while other pieces are
       transferred. Over several ranks, LAMB and LARS wait for norms between pieces */
    DDP_FSDP_OFFLOAD_HOST,
    /* They are stored in a mapped file in offload_dir: a model larger than memory can step. CPU memory
       only */
    DDP_FSDP_OFFLOAD_FILE,
    /* For devices with their own memory, with FULL_SHARD: a model larger than the device can train. As
       OFFLOAD_HOST; shards and sums of gradients are stored in pinned host memory too (ZeRO-Infinity,
       Rajbhandari et al. 2021). The device has buffers for 1 + prefetch units, and none that grows with the
       number of units. An unshard copies this rank's rows to one of two staging buffers, and all-gathers from
       there. Traffic per element of a shard: 2 bytes to the device for each unshard (f32: 4), 4 bytes to the
       host for each reduction. Each micro-batch except the first adds 4 bytes to the device. The host clips
       and steps */
    DDP_FSDP_OFFLOAD_PARAMS
} ddp_fsdp_offload;

/* The optimizers. */
typedef enum ddp_optimizer_kind {
    DDP_OPTIMIZER_ADAMW = 0, /* Loshchilov and Hutter 2019; eps is added after the bias correction, as in
                                PyTorch */
    DDP_OPTIMIZER_SGD,       /* with momentum, dampening and nesterov as PyTorch defines them */
    /* You et al. 2020: AdamW's update with its bias correction, scaled per tensor by |w| / |update|, as
       NVIDIA's Apex with use_nvlamb */
    DDP_OPTIMIZER_LAMB,
    /* You et al. 2017: momentum of lr (g + weight_decay w), scaled per tensor by
       |w| / (|g| + weight_decay |w|), or by 1 if a norm is 0 */
    DDP_OPTIMIZER_LARS
} ddp_optimizer_kind;

/* Learning rates after the warm-up. Each falls from max_lr at step warmup_steps to min_lr at step
   total_steps, except CONSTANT. t grows from 0 to 1 between these two steps. */
typedef enum ddp_lr_kind {
    DDP_LR_CONSTANT = 0, /* max_lr */
    DDP_LR_COSINE,       /* min_lr + (max_lr - min_lr) (1 + cos(pi t)) / 2 */
    DDP_LR_LINEAR,       /* min_lr + (max_lr - min_lr) (1 - t) */
    DDP_LR_POLYNOMIAL,   /* min_lr + (max_lr - min_lr) (1 - t)^power */
    DDP_LR_WSD           /* warm-up, stable, decay: max_lr until the last decay_steps, then linear (Hu et al.
                            2024) */
} ddp_lr_kind;

//== descs ===================================================================================== >>descs

/* A parameter of a unit. Required: param.name, and dtype (a float) and shape of param.value. param.grad.dtype
   is the dtype in which backward writes gradients; 0 = param_dtype. ndim 0 counts as one row.
   param.value.data: the first values, the full tensor on every rank, in the caller's memory (of the device,
   if the group has one). NULL = init_fn provides them. Only ddp_fsdp_create uses that memory. Unless
   skip_initial_broadcast is set, it overwrites this memory with the values that it broadcasts. From then on
   the ddp_fsdp sets value.data and grad.data. */
typedef struct ddp_fsdp_param {
    ddp_param param; /* name, value and gradient */
    /* All zero = param.value's shape. Otherwise this parameter is a slice of a tensor of this shape, starting
       at global_offset, and a checkpoint holds the whole tensor. Several ranks may hold the same slice; the
       lowest rank saves it. A tensor that is not split is one slice. */
    int64_t global_shape[DDP_MAX_NDIM];
    int64_t global_offset[DDP_MAX_NDIM]; /* see global_shape */
    /* NULL, or the name of the earlier parameter that this one shares its value with. Two parameters of one
       unit with the same value.data are tied without it. Required for ties between units or without data */
    const char *tied_to;
    int frozen;    /* 1 = not trained: no gradient, no optimizer state */
    int index;     /* set by ddp_fsdp_wrap: the parameter's index in its params argument */
    char unit[48]; /* set by ddp_fsdp_wrap: in the first parameter of a unit, the unit's name */
} ddp_fsdp_param;

/* A unit: parameters that are unsharded and reduced together. */
typedef struct ddp_fsdp_unit_desc {
    const char *name;       /* appears in errors; NULL = "unit 3" or similar */
    ddp_fsdp_param *params; /* required; owned by the caller, outlives the ddp_fsdp */
    int param_count;        /* entries of params, at least 1 */
} ddp_fsdp_unit_desc;

/* For ddp_fsdp_wrap. */
typedef struct ddp_fsdp_wrap_desc {
    /* One unit for each different match. The parts of a name are separated by dots. A match ends at the end
       of a part: "h.1" does not match "h.10.w". "*" matches one part: "h.*" makes units "h.0", "h.1", ...
       from "h.0.fc.weight" and so on. The longest match wins, so units can be nested. Parameters without a
       match form the unit "root" */
    const char *const *prefixes;
    int prefix_count;        /* entries of prefixes; 0 = units by size */
    size_t min_unit_bytes;   /* without prefixes: a unit takes parameters in order until it has this size; 0 =
                                25 MiB */
    ddp_fsdp_param *storage; /* required: one entry per parameter, overwritten; see ddp_fsdp_wrap */
} ddp_fsdp_wrap_desc;

/* For ddp_optimizer_create, and ddp_fsdp_desc.optimizer. Zero means default, except for params and
   param_count. */
typedef struct ddp_optimizer_desc {
    ddp_optimizer_kind kind;   /* 0 = ADAMW */
    float beta1, beta2, eps;   /* ADAMW, LAMB: 0 = 0.9, 0.999, 1e-8 (LAMB 1e-6); a beta of -1 is 0 */
    float momentum, dampening; /* SGD, LARS: 0 = none (LARS 0.9; -1 = none) */
    int nesterov;              /* SGD */
    float trust_coefficient;   /* LARS: 0 = 0.001. LAMB: 0 = 1 */
    float weight_decay;        /* 0 = none (PyTorch's AdamW: 0.01). ADAMW, LAMB decoupled; SGD, LARS added to
                                  the gradient */
    int decay_matrices_only;   /* 1 = tensors of fewer than two dimensions (biases, norms) get neither weight
                                  decay nor a trust ratio */
    /* From here on only for ddp_optimizer_create. Required. Values are f32 or f64; a gradient has the dtype
       and shape of its value. Entries with the same value.data are uses of one tied parameter. A tensor
       without elements may have data NULL */
    ddp_param *params;
    int param_count;        /* entries of params */
    ddp_group *shard_group; /* NULL = tensors are complete. Otherwise each is this rank's rows, and LAMB and
                               LARS compute norms over this group: params have the same order on its ranks */
    /* Allocator of the optimizer state. Returns zeroed memory of the group's device; called at most once.
       NULL = the group's device allocates; set both or neither */
    void *(*state_alloc_fn)(size_t size_bytes, void *user);
    void (*state_free_fn)(void *memory, void *user); /* of memory from state_alloc_fn */
    void *state_user;                                /* passed to state_alloc_fn and state_free_fn */
} ddp_optimizer_desc;

/* For ddp_lr_at. */
typedef struct ddp_lr_desc {
    ddp_lr_kind kind;          /* 0 = CONSTANT */
    double max_lr;             /* required, positive; the highest rate */
    double min_lr;             /* 0 to max_lr; the rate at the end */
    int64_t batch, base_batch; /* both 0 = none. Otherwise max_lr and min_lr are meant for base_batch samples
                                  per step, and are multiplied by batch / base_batch: linear scaling (Goyal et
                                  al. 2017) */
    int64_t warmup_steps;      /* 0 = no warm-up; also for CONSTANT. Linear from 0: warm-up step s has
                                  max_lr * s / warmup_steps */
    int64_t total_steps;       /* warm-up included; required except for DDP_LR_CONSTANT */
    int64_t decay_steps;       /* WSD: at most total_steps - warmup_steps; 0 = a tenth of total_steps */
    float power;               /* POLYNOMIAL: 0 = 1 */
} ddp_lr_desc;

/* For ddp_scaler_init. Zero means default, field by field. */
typedef struct ddp_scaler_desc {
    float init_scale;     /* 0 = 65536 */
    float growth_factor;  /* above 1; 0 = 2 */
    float backoff_factor; /* between 0 and 1; 0 = 0.5 */
    int growth_interval;  /* steps; 0 = 2000 */
    ddp_group *groups[4]; /* every group that splits or replicates the gradients. With a ddp_fsdp: only
                             further groups, such as that of tensor parallelism. The group and replicas of the
                             ddp_fsdp take part without being listed */
    int group_count;      /* entries of groups; 0 = only this rank */
} ddp_scaler_desc;

/* The state of a scaler. Plain numbers without padding bytes: may be written to a file as it is. */
typedef struct ddp_scaler_state {
    double scale;           /* the factor for the loss */
    int64_t growth_tracker; /* steps without an infinity since its last reset */
} ddp_scaler_state;

/* Loss scaling for f16 gradients, as PyTorch's GradScaler. The caller owns it; ddp_scaler_init fills it in.
   Its fields are private. */
typedef struct ddp_scaler {
    ddp_scaler_desc desc; /* defaults resolved */
    float scale;          /* the factor for the loss */
    int growth_tracker;   /* steps without an infinity since its last reset */
    int unscaled;         /* 1 = gradients were unscaled since the last update */
    int found_inf;        /* 1 = on some rank of some group, a gradient was not finite */
} ddp_scaler;

/* Numbers that a checkpoint stores in addition to tensors. The caller owns it. ddp_fsdp_save stores those of
   rank 0. ddp_fsdp_load sets them on every rank, except per_rank. Without padding bytes. */
typedef struct ddp_fsdp_state {
    int64_t step;              /* optimizer steps taken; set by ddp_fsdp_step, ddp_fsdp_set_step and load */
    ddp_sampler_state sampler; /* of ddp_sampler_save or ddp_loader_save; set by the caller */
    ddp_scaler_state scaler;   /* with ddp_fsdp_desc.scaler: ddp_fsdp_save stores that scaler's state instead
                                  of this field, and ddp_fsdp_load also restores the scaler */
    uint64_t rng[4];           /* for the caller */
    double user[8];            /* for the caller */
    /* Set by the caller, the same on every rank. 1 = rng and user differ between ranks, such as the state of
       a random-number generator: a save stores those of each rank, and a load gives each rank its own. A load
       with 1 returns DDP_ERR_MISMATCH if the checkpoint was saved with 0, or on another number of ranks times
       replicas. A load with 0 reads it: every rank receives those of rank 0, and must seed its generator
       again */
    int64_t per_rank;
} ddp_fsdp_state;

/* For ddp_fsdp_predict: the facts that ddp_fsdp_create takes from its groups. Zero = CPU ranks of one machine
   that read each other's memory, without replicas. */
typedef struct ddp_fsdp_ranks {
    int replica_count;  /* ranks of ddp_fsdp_desc.replicas; 0 = 1 */
    int gpu;            /* 1 = GPUs of ddp_cuda.cuh, 0 = CPU memory */
    int no_peer_memory; /* 1 = CPU ranks that do not read each other's memory, as on several machines */
} ddp_fsdp_ranks;

/* For ddp_fsdp_create. Zero means default, except for units and unit_count. */
typedef struct ddp_fsdp_desc {
    ddp_fsdp_unit_desc *units;  /* required; copied, but their params are not */
    int unit_count;             /* entries of units */
    ddp_fsdp_strategy strategy; /* 0 = FULL_SHARD */
    /* Hybrid: the group of ranks that hold the same shard; NULL = none. Between the first
       ddp_fsdp_reduce_grads of a step and the end of ddp_fsdp_step, only the ddp_fsdp may issue calls on
       this group */
    ddp_group *replicas;
    ddp_dtype param_dtype; /* dtype of full parameters: 0 = the parameter's. DDP_BF16, DDP_F16: master values
                              are f32 */
    /* The dtype in which gradients are added over ranks; they are cast from param.grad.dtype. 0 = f32, f64
       for f64 parameters. DDP_BF16 or DDP_F16 halves the bytes of each reduce-scatter: every gradient is
       rounded before it is sent, and every sum over ranks once more. Any value except 0 is outside the
       promise of equal bits, unless it is the default's dtype */
    ddp_dtype reduce_dtype;
    int micro_batch_count;       /* 0 = 1; per rank and step: the number of ddp_fsdp_reduce_grads calls for
                                    each unit */
    int per_token;               /* 1 = gradients are those of a loss summed over tokens; see ddp_fsdp_mean */
    int sequential_accumulation; /* 1 = micro-batches are added one after the other, in one internal sum
                                    instead of log2 many: outside the promise of equal bits */
    /* Units unsharded ahead, in the order of the last complete step. 0 = 1; -1 = none. The first step has no
       such order. FULL_SHARD: each unit ahead needs a buffer of the size of the largest unit, so make units
       similar in size. On GPUs over NCCL it needs two: for received and for full parameters. A unit of one
       parameter needs one, if the ranks have equally many rows */
    int prefetch;
    size_t max_gathered_bytes;    /* 0 = no limit; no unit is unsharded ahead beyond it */
    int no_reshard_after_forward; /* FULL_SHARD: 1 = values stay in memory from the first unshard of a step to
                                     the reshard after the unit's last reduce_grads. An earlier reshard only
                                     sets value.data to NULL; the next unshard sends nothing */
    int overwrite_gradients;      /* 1 = every backward writes all gradients of a unit. Otherwise
                                     ddp_fsdp_unshard sets new gradients to zero, also before a forward */
    /* FULL_SHARD: 1 = parameters are sent in 8 bits, in blocks of 256 with a scale (ZeRO++ qwZ, Wang et al.
       2023). A value is off by at most 1/254 of the largest magnitude in its block, by the same amount on
       every rank; master values stay exact. CPU memory only. Outside the promise of equal bits: blocks begin
       where shards do */
    int quantize_gather;
    ddp_fsdp_offload offload; /* 0 = none. On the CPU, HOST and PARAMS change nothing: memory is the host's */
    /* OFFLOAD_FILE: folder of the file; NULL = ".". The file has no name, and nothing remains of it */
    const char *offload_dir;
    ddp_optimizer_desc optimizer; /* zero = AdamW; its params, shard_group and allocators are not read */
    /* NULL = none; outlives the ddp_fsdp. ddp_fsdp_clip_grad_norm or ddp_fsdp_step then unscales: do not call
       ddp_scaler_unscale. Call ddp_scaler_update after every ddp_fsdp_step, and not before it. A step with an
       infinity changes no value; the host waits for this decision in every step. BF16 needs no scaler */
    ddp_scaler *scaler;
    /* NULL = values come from param.value.data. Writes this rank's rows [first_row, first_row + row_count) of
       a parameter to `out`, in host memory. dtype: param.value.dtype, or f32 if that has 16 bits */
    ddp_result (*init_fn)(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                          void *user);
    void *init_user;            /* passed to init_fn */
    int skip_initial_broadcast; /* 1 = values in param.value.data are already equal on all ranks. Otherwise
                                   create broadcasts those of the rank that is rank 0 of group and of
                                   replicas. Values of init_fn are never broadcast. The same for buffers */
    ddp_fsdp_state *state;      /* saved with the checkpoint; filled in by ddp_fsdp_load. NULL = a save writes
                                   the state of the last load again, with rng and user of rank 0 */
    size_t max_file_bytes;      /* of a checkpoint's files; 0 = 4 GiB; a larger tensor has its own file */
    int keep_checkpoints;       /* checkpoints that remain after a save, dir included; 0 = 1. Older ones are
                                   dir.1, dir.2, ...; a save deletes the rest, up to the first number that is
                                   missing. Folders with a number above a gap stay as they are */
    /* Tensors of any dtype that are not trained, such as running statistics, in memory of the group's device.
       create broadcasts them; later the caller keeps them equal with ddp_fsdp_sync_buffers. A checkpoint
       stores those of rank 0 of checkpoint_group, with the parameters. A load sets them on every rank. The
       list is copied; the memory and the names stay the caller's and must outlive the ddp_fsdp */
    const ddp_tensor *buffers;
    /* Required with buffers: their names in checkpoints, such as "norm.running_var". Each differs from the
       others and from the names of parameters */
    const char *const *buffer_names;
    int buffer_count; /* entries of buffers and of buffer_names */
    /* NULL = group. With slices of larger tensors (global_shape): all ranks that hold a part of them,
       replicas included. Create, save and load are then collective over it too, and an error in one group is
       returned in all */
    ddp_group *checkpoint_group;
    int save_in_background; /* 1 = ddp_fsdp_save returns after making a copy, and a thread writes it (MPI:
                               MPI_THREAD_MULTIPLE); see ddp_fsdp_save_wait */
    /* Allocator of host memory; NULL = the group's allocator; set both or neither. Save and load use the
       group's allocator for their temporary memory, also on the background thread; the copy that such a save
       makes is from alloc_fn */
    void *(*alloc_fn)(size_t size_bytes, void *user);
    void (*free_fn)(void *memory, void *user); /* of memory from alloc_fn */
    void *user;                                /* passed to alloc_fn and free_fn */
    ddp_fsdp_ranks ranks;                      /* only ddp_fsdp_predict reads it */
} ddp_fsdp_desc;

/* Bytes by purpose, as requested from the host allocator (alloc_fn, or else the group's), from the device,
   and as group memory. */
typedef struct ddp_fsdp_bytes {
    size_t shards;        /* values that stay between steps: master values, 16-bit shards, full values of
                             strategies that keep them */
    size_t gathered;      /* full values between unshard and reshard */
    size_t gradients;     /* full gradients, their shards, and sums of pairwise accumulation */
    size_t optimizer;     /* moments */
    size_t communication; /* staging where ranks cannot read each other's memory, 8-bit copies, packed
                             buffers, a checkpoint's copy */
    size_t bookkeeping;   /* tables */
    size_t total;         /* of all purposes */
    size_t device;        /* the part of total in the memory of the group's device, without bookkeeping: what
                             must fit on a GPU. Offloading reduces it */
} ddp_fsdp_bytes;

/* Memory of this rank: see ddp_fsdp_get_memory. */
typedef struct ddp_fsdp_memory {
    ddp_fsdp_bytes now;       /* at the time of the call */
    ddp_fsdp_bytes peak;      /* the maximum of each purpose; total: the maximum of the sum */
    ddp_fsdp_bytes predicted; /* the expected peak: as ddp_fsdp_predict, but without bookkeeping */
    size_t group_bytes;       /* part of now.total: group memory, which does not come from an allocator */
    size_t file_bytes;        /* in the offload file; not part of any total */
} ddp_fsdp_memory;

//== api ========================================================================================= >>api

/* --- sharded training ---
   A training step:

     for each micro-batch:
         forward    for each unit:   ddp_fsdp_unshard, compute, ddp_fsdp_reshard
         backward   for each unit:   ddp_fsdp_unshard, compute, ddp_fsdp_reduce_grads, ddp_fsdp_reshard
     ddp_fsdp_mean                   with per_token
     ddp_fsdp_clip_grad_norm         optional
     ddp_fsdp_step
     ddp_scaler_update               with a scaler

   Collective: every rank of group and of replicas makes the call, in the same order of calls. This holds also
   in evaluation, and for a call that sends nothing. Different orders of unshards or reductions are
   DDP_ERR_MISMATCH, at the latest in ddp_fsdp_step. Several ddp_fsdp may share a group, and the caller may
   issue its own calls on it between those of a ddp_fsdp; for replicas see ddp_fsdp_desc.
   Blocking: on a group of GPUs, calls follow the work of the user's stream. Kernels that use a tensor may
   still be queued there when the unit is resharded or reduced. A call that blocks makes that stream wait, not
   the host, unless its comment states otherwise: see ddp_cuda_group_create.
   Errors: DDP_ERR_INVALID changes nothing. Unless the comment states otherwise, any other failure poisons
   group and replicas. A failure of work in flight is returned by a later call. */

/* Splits the units' parameters over the group, and creates gradients and optimizer state. With init_fn, a
   rank fills in only its own rows, so no rank needs the full values. Parameters with the same value.data are
   uses of one parameter: one shard, and a gradient for each use; these are added after the reduction. To
   reduce one gradient for all uses, list the parameter once, keep its unit unsharded from the first use to
   the last, and add to its grad.data: see --tied-grads of examples/gpt/train_gpt_cuda.cu. On return,
   value.dtype is param_dtype, and grad has its dtype and the shape of value. value.data is NULL with
   FULL_SHARD, until an unshard; with the other strategies it points to the full values of the ddp_fsdp.
   Collective over group, replicas and checkpoint_group; blocks. On every rank of group and replicas the desc
   is the same, except for groups, values, callbacks, offload_dir and user pointers. Over checkpoint_group,
   slices differ.
   Ownership: the shards belong to the ddp_fsdp. The desc, its units and their names are copied. The params
   arrays and the names in them stay the caller's and must outlive the ddp_fsdp.
   Errors, on every rank, and *out is NULL: DDP_ERR_INVALID names unit and parameter (a name that is missing,
   repeated or not UTF-8; dtype is not a float; the same memory in two units without tied_to; neither values
   nor init_fn), or the buffer or the field (OFFLOAD_PARAMS without FULL_SHARD); DDP_ERR_MISMATCH when ranks
   describe different units or buffers; DDP_ERR_UNSUPPORTED (quantize_gather or OFFLOAD_FILE on a device);
   DDP_ERR_NO_MEMORY; DDP_ERR_SYSTEM (offload_dir). The groups stay usable. Exception: if only some ranks set
   replicas or checkpoint_group, that group fails. */
DDPDEF ddp_result ddp_fsdp_create(ddp_fsdp **out, ddp_group *group, const ddp_fsdp_desc *desc);

/* Makes the full parameters of the unit available: value.data and grad.data of its params. Call it before
   forward, and again before backward or a recomputation. A unit that is still in memory is not sent again. A
   unit with tied parameters does not need the unit of their source. Any number of units may be unsharded at a
   time.
   Gradients: an unshard provides new ones if the unit has none: in the first unshard of a step, and after
   ddp_fsdp_reshard, ddp_fsdp_reduce_grads or ddp_fsdp_zero_grad. New gradients are zero; with
   overwrite_gradients they are undefined. Further unshards leave them unchanged. grad.data is NULL for a
   frozen parameter, after the unit's last reduce_grads of the step, and in ddp_fsdp_no_grad.
   Collective. Blocks. On return, the next `prefetch` units in the order of the last complete step are in
   flight.
   Ownership: the memory belongs to the ddp_fsdp. Its address may differ after each unshard. value.data is
   valid until ddp_fsdp_reshard, ddp_fsdp_step or ddp_fsdp_load; grad.data until one of these, reduce_grads or
   ddp_fsdp_zero_grad. */
DDPDEF ddp_result ddp_fsdp_unshard(ddp_fsdp *fsdp, int unit);

/* Ends this rank's use of the unit's full parameters, after any number of unshards. With FULL_SHARD,
   value.data is then NULL. The values stay in memory if the unit is among the next max(1, prefetch) unshards
   of the recorded order, or with no_reshard_after_forward: the next unshard then sends nothing. Otherwise
   other units may use the memory. With the other strategies, value.data stays valid until ddp_fsdp_step or
   ddp_fsdp_load. Gradients that were not passed to ddp_fsdp_reduce_grads are dropped. The call is optional:
   ddp_fsdp_step reshards all units.
   Sends nothing, and never blocks. Every rank makes it at the same place in the order of calls, because it
   decides whether a later unshard allocates gradient memory, which is collective. Errors: DDP_ERR_INVALID if
   the unit is not unsharded. */
DDPDEF ddp_result ddp_fsdp_reshard(ddp_fsdp *fsdp, int unit);

/* Marks the unit's full gradients as final for this micro-batch. SHARD_GRAD and FULL_SHARD start to add them
   over ranks; SHARD_OPTIM and NO_SHARD do so after the last micro-batch. ddp_fsdp_step divides the sums. Call
   it in every micro-batch for every unit with a trained parameter, while the unit is unsharded. A rank that
   did not use the unit passes zeros. The unit stays unsharded.
   Collective. Blocks only until this unit's previous reduction is done. SHARD_OPTIM with several
   micro-batches of 16-bit gradients, and f32 sums of a ddp_pipeline, also wait until all ranks have read the
   gradients of the previous reduction, of any unit. The first f32 sums of a ddp_pipeline allocate group
   memory.
   Ownership: grad.data belongs to the ddp_fsdp until the next unshard. Errors: DDP_ERR_INVALID, only on this
   rank, without new gradients from ddp_fsdp_unshard, and for more than micro_batch_count calls in a step.
   DDP_ERR_MISMATCH when ranks reduce different units. */
DDPDEF ddp_result ddp_fsdp_reduce_grads(ddp_fsdp *fsdp, int unit);

/* Announces that only forward passes follow (on is not 0), or training again (0). While it is on, unshard
   provides no new gradients and starts no prefetch. The order of unshards is not recorded. Reshard frees
   regardless of no_reshard_after_forward. Allowed at any time: sums of earlier micro-batches stay, and so do
   gradients of a unit that stays unsharded. Every rank makes the same number of forward passes.
   Not collective, but the same on every rank. Never blocks. */
DDPDEF ddp_result ddp_fsdp_no_grad(ddp_fsdp *fsdp, int on);

/* Scales all gradients by max_norm / norm when the global norm exceeds max_norm. The norm is that of the
   averaged and unscaled gradients of all parameters of this ddp_fsdp. *norm is the norm before scaling; norm
   may be NULL: see ddp_fsdp_get_norm. Call it after the last unit's last reduce_grads and before the step. A
   second call in a step scales the scaled gradients. INFINITY as max_norm only computes the norm.
   Squares add per row in a fixed order and rows add exactly: the bits do not depend on the sharding. Each
   element counts once, and a tied parameter as the sum of its uses. Slices on other ranks and other ddp_fsdp
   do not count. For a norm over several, pass INFINITY, add the squares of ddp_fsdp_get_shard's gradients
   over ranks, and scale these gradients.
   Collective. Blocks until the reductions are done. The host waits for the device only if norm is not
   NULL. Ranks may differ in this; the bits are the same. A norm that is not finite is stored and scales
   nothing. With a scaler the step then changes no value.
   Errors: DDP_ERR_INVALID, only on this rank: max_norm is not positive; units, ddp_fsdp_mean or the scaler
   are not ready for a step: see ddp_fsdp_step. */
DDPDEF ddp_result ddp_fsdp_clip_grad_norm(ddp_fsdp *fsdp, float max_norm, float *norm);

/* Stores the norm of the last ddp_fsdp_clip_grad_norm, before scaling, in *norm. Blocks the host until the
   device has computed it, but not for work that was enqueued later. Called after ddp_fsdp_step and before the
   next clip, it does not delay the device. Not collective. Errors: DDP_ERR_INVALID before the first clip and
   after a failed one. A failure of the group ends the wait with the code of ddp_group_status. */
DDPDEF ddp_result ddp_fsdp_get_norm(ddp_fsdp *fsdp, float *norm);

/* Makes the step divide by the number of tokens of all ranks, replicas and micro-batches. With per_token,
   call it once in every step, after the last reduce_grads and before clip_grad_norm or step. In: loss->sum is
   this rank's sum of losses in this step, and loss->count the number of its tokens in this step: see
   ddp_mean_add. Out: *loss is the exact total over ranks, sum and count; ddp_mean_value gives the mean. With
   a total count of 0, gradients stay sums. ddp_fsdp_step and ddp_fsdp_zero_grad end its effect.
   Collective; the hosts of all ranks wait for each other. Errors, also failures of communication, leave *loss
   unchanged. DDP_ERR_INVALID only on this rank: without per_token; a second call in a step. DDP_ERR_INVALID
   on every rank: a negative count; the call may be repeated. */
DDPDEF ddp_result ddp_fsdp_mean(ddp_fsdp *fsdp, ddp_mean *loss);

/* Ends a step: waits for the reductions, also those over replicas, divides the sums once, and updates this
   rank's shards. The divisor is ranks times replicas times micro-batches; with per_token it is that of
   ddp_fsdp_mean. After ddp_fsdp_clip_grad_norm the sums are divided already. Then reshards all units, because
   their full values are outdated. The next step needs no ddp_fsdp_zero_grad.
   With a scaler and an infinity, the call returns DDP_OK, changes no value, and does not count the step.
   ddp_scaler_found_inf then returns 1, until ddp_scaler_update.
   Collective; the hosts of all ranks wait for each other. After the first step they do not wait for their
   devices, except for: a requested norm; a scaler; OFFLOAD_HOST; OFFLOAD_PARAMS, also in
   ddp_fsdp_clip_grad_norm; groups with DDP_CUDA_ENGINE_STAGED.
   Errors, after which no value has changed and the groups stay usable:
     DDP_ERR_INVALID     only on this rank: names a unit that has not been reduced micro_batch_count times (a
                         unit of frozen parameters needs no reduction); ddp_fsdp_mean was not called in this
                         step; ddp_scaler_update was not called after the previous step, or was called after
                         the ddp_fsdp_clip_grad_norm of this step: ddp_fsdp_zero_grad starts it again; the
                         scale is 0; lr is negative or not finite
     DDP_ERR_MISMATCH    on every rank: ranks unsharded or reduced in different orders. ddp_fsdp_zero_grad
                         starts the step again. A mismatch that a reduction has found poisons the group
     DDP_ERR_NO_MEMORY   on every rank, for prefetch in the first step; the call may be repeated
   Any other failure may leave only some values updated. */
DDPDEF ddp_result ddp_fsdp_step(ddp_fsdp *fsdp, float lr);

/* Drops the gradients of the current step on all ranks, to start the step again, such as after a
   DDP_ERR_MISMATCH of ddp_fsdp_step. Counts of micro-batches, ddp_fsdp_mean, clipping and a found infinity
   are reset. Values do not change, and units stay unsharded. Unshard a unit again before its next backward.
   Allowed at any time in a step.
   Collective; the hosts of all ranks wait for each other. All ranks must have made the same calls of
   ddp_fsdp_reduce_grads in this step; otherwise the error is DDP_ERR_MISMATCH, and the group is poisoned. */
DDPDEF ddp_result ddp_fsdp_zero_grad(ddp_fsdp *fsdp);

/* Returns views of this rank's rows of a parameter. Each of the three outputs may be NULL.
     value       master values: f32, or f64 for an f64 parameter. shape[0] is the number of rows
     grad        their gradients, of the same dtype and shape, between the unit's last reduce_grads and the
                 step. Until ddp_fsdp_clip_grad_norm: sums over ranks, replicas and micro-batches, times the
                 loss scale, and of this use of a tied parameter. After it: averages, unscaled and clipped;
                 a tied parameter's first use has the sum of all uses
     first_row   index of the first row in the full parameter
   data is NULL if this rank has no rows: shape[0] is then 0. grad->data is also NULL for a frozen parameter
   and outside the time above.
   Not collective. With grad, it blocks until the unit's reduction is done.
   Ownership: the memory belongs to the ddp_fsdp. value is valid until ddp_fsdp_destroy; desc.offload states
   where it is stored. grad is valid until ddp_fsdp_step or ddp_fsdp_zero_grad. It is in device memory; in
   host memory with OFFLOAD_PARAMS. The caller may change grad, equally on all replicas, and values between
   steps. With OFFLOAD_PARAMS, synchronize the device before changing values: an evaluation may still read
   them. The full parameters of all ranks have the new values after the next ddp_fsdp_step; parameters without
   a separate master copy may show them earlier. */
DDPDEF ddp_result ddp_fsdp_get_shard(ddp_fsdp *fsdp, int unit, int param, ddp_tensor *value, ddp_tensor *grad,
                                     int64_t *first_row);

/* Returns a view of this rank's rows of optimizer state number `which` of a parameter. Its dtype, shape,
   memory and lifetime are those of the value of ddp_fsdp_get_shard. The caller may change it between steps. A
   tied parameter has the state of its source. Numbers and *name (may be NULL): as ddp_optimizer_get_state.
   Not collective, never blocks. Errors: DDP_ERR_INVALID for a frozen parameter, and when `which` is out of
   range. */
DDPDEF ddp_result ddp_fsdp_get_state(ddp_fsdp *fsdp, int unit, int param, int which, const char **name,
                                     ddp_tensor *state);

/* Sets the number of steps taken, which the bias correction uses, also in desc.state. Use it between steps,
   to resume an earlier run by hand: init_fn has provided the values, and the caller has written the optimizer
   state through ddp_fsdp_get_state. Not collective, but the same on every rank; never blocks. Errors:
   DDP_ERR_INVALID when negative. */
DDPDEF ddp_result ddp_fsdp_set_step(ddp_fsdp *fsdp, int64_t step);

/* Broadcasts desc.buffers from the rank that is rank `root` of group and rank 0 of replicas, in one packed
   message per group. Call it before the first forward of a step, as PyTorch DDP does with broadcast_buffers:
   a rank changes running statistics by its own data. Without buffers it does nothing.
   Collective, with the same root; blocks. Errors, only on this rank: DDP_ERR_INVALID for an invalid root, and
   between the first ddp_fsdp_reduce_grads of a step and its ddp_fsdp_step. */
DDPDEF ddp_result ddp_fsdp_sync_buffers(ddp_fsdp *fsdp, int root);

/* Copies a complete parameter in master precision to host memory of one rank: rank `root` of group which is
   rank 0 of replicas. The ranks send their rows in pieces of at most 2 MiB, so other ranks need no memory for
   the parameter. With slices (global_shape), the slice of this group is complete.
   out: read on the receiving rank; may be NULL on others. dtype is f32, or f64 for an f64 parameter. ndim and
   shape are those of param.value. data is the caller's host memory for ddp_tensor_count elements.
   Collective, with the same arguments except out; blocks the hosts. Call it between steps: the values are
   those after the last ddp_fsdp_step. It unshards and reshards no unit. Each call allocates the pieces and
   frees them.
   Errors, on every rank: DDP_ERR_INVALID (unit, param or root is out of range; out differs from the
   parameter); DDP_ERR_MISMATCH when ranks pass different arguments; DDP_ERR_NO_MEMORY. The groups stay
   usable. DDP_ERR_INVALID only on this rank between the first ddp_fsdp_reduce_grads of a step and its
   ddp_fsdp_step. */
DDPDEF ddp_result ddp_fsdp_get_full(ddp_fsdp *fsdp, int unit, int param, int root, ddp_tensor *out);

/* Writes the whole model to one safetensors file: parameters in master precision and buffers, under their
   names, a tied parameter under that of its first use. Only the rank that is rank 0 of group and of replicas
   writes, so no shared file system is needed. It needs host memory for the largest parameter. ddp_fsdp_load
   reads a folder with this file as model.safetensors.
   path: read on the writing rank. The file is written as path.tmp and synced; it then takes the name path. A
   file of that name is replaced.
   Collective; blocks the hosts. Call it between steps. Begins with ddp_fsdp_save_wait.
   Errors, on every rank; path is unchanged, and the groups stay usable: DDP_ERR_INVALID (path is NULL, empty,
   too long or ends with a slash); DDP_ERR_UNSUPPORTED with slices of larger tensors: ddp_fsdp_save writes
   complete tensors; DDP_ERR_SYSTEM of the file system; DDP_ERR_NO_MEMORY. Exception: if only the last sync
   fails, the error states that the new file is in place. DDP_ERR_INVALID only on this rank between the first
   ddp_fsdp_reduce_grads of a step and its ddp_fsdp_step. */
DDPDEF ddp_result ddp_fsdp_export(ddp_fsdp *fsdp, const char *path);

/* Writes a checkpoint to the folder dir: model-00001-of-0000N.safetensors with complete tensors in master
   precision and desc.buffers under their names, model.safetensors.index.json, optimizer-*.safetensors with
   the moments, state.json. Gradients are not saved. All ranks reach dir under this path, on a shared file
   system. Its parent folder exists. If dir is a link, the folder it refers to is replaced.
   The files are written to the folder dir.tmp and synced to disk; it then takes the name dir. At any time dir
   is a complete checkpoint, old or new. Exception: where the file system cannot swap names, dir is missing
   for a moment. dir.old is then the complete checkpoint, and ddp_fsdp_load reads it.
   Collective, also over checkpoint_group. Blocks the host. If a rank writes for longer than timeout_ms, the
   others return DDP_ERR_TIMEOUT, and the groups are poisoned.
   With save_in_background, the call returns once this rank's tensors, dir and desc.state are copied, and
   training continues. Failures of writing are then returned by the next ddp_fsdp_save_wait.
   Errors, on every rank. dir is unchanged, and the groups stay usable.
     DDP_ERR_INVALID     dir is NULL, empty, too long or a link to a missing folder; dir, dir.tmp, dir.old or
                         an older checkpoint has a file that is not part of a checkpoint; state->per_rank is
                         not 0 or 1
     DDP_ERR_MISMATCH    ranks pass different dirs or state->per_rank; slices do not cover a tensor
     DDP_ERR_SYSTEM      of the file system. Exception: if only the last sync fails, the error states that the
                         new checkpoint is in place
     DDP_ERR_NO_MEMORY */
DDPDEF ddp_result ddp_fsdp_save(ddp_fsdp *fsdp, const char *dir);

/* Blocks the host until the last background save is on disk, and returns its result, the same on every rank.
   Returns DDP_OK at once if no save is pending: none was started, or its result was returned before. Save and
   load begin with this wait: if the background save failed, they return its result and do nothing else.
   Collective. */
DDPDEF ddp_result ddp_fsdp_save_wait(ddp_fsdp *fsdp);

/* Reads this rank's part of a checkpoint that was written with any world size, strategy, wrapping and
   param_dtype: values, buffers, moments, number of steps, desc.state and the state of desc.scaler. If dir is
   missing, it reads dir.old.
   Also reads a model of another program: a folder without state.json, and with model.safetensors or
   model.safetensors.index.json. Values of any float dtype are converted; moments become zero; steps start
   again from 0, and the rest of desc.state is unchanged. A folder with only the model files of a checkpoint
   is such a model: use it to change the optimizer.
   The files contain exactly the parameters of the units and desc.buffers. A tied parameter may have the name
   of any of its uses; several names must have equal bytes. Files must be regular files: symbolic links are
   not followed.
   Collective, also over checkpoint_group; between steps: gradients of an unfinished step are dropped. Blocks
   the host. Then reshards all units, as ddp_fsdp_step does: unshard a unit again before its values are used.
   Errors, on every rank. The model is unchanged, and the groups stay usable.
     DDP_ERR_INVALID    dir is NULL, empty, too long or a link to a missing folder; state->per_rank is not 0
                        or 1
     DDP_ERR_CORRUPT    truncated, overlapping, checksum: names file, tensor and byte range
     DDP_ERR_MISMATCH   a tensor is missing, extra or of another shape; in a checkpoint also of another dtype,
                        and moments of another kind. AdamW and LAMB accept each other's moments, as do SGD and
                        LARS. Ranks find different checkpoints, or have made different calls.
                        state->per_rank, without the state of this number of ranks
     DDP_ERR_SYSTEM     of the file system; a missing folder or a link. Exception: if the disk fails while
                        checked data is copied, some values have changed; load again
     DDP_ERR_NO_MEMORY */
DDPDEF ddp_result ddp_fsdp_load(ddp_fsdp *fsdp, const char *dir);

/* Stores the memory that this rank uses in *memory. Not collective, never blocks. */
DDPDEF ddp_result ddp_fsdp_get_memory(const ddp_fsdp *fsdp, ddp_fsdp_memory *memory);

/* Stores the memory that rank 0 of world_size ranks will have used after some steps: the peak that
   ddp_fsdp_get_memory then reports. No rank uses more. It needs no group, and reads no values: value.data,
   init_fn and the data of buffers may be NULL. desc->ranks describes the ranks; the groups of the desc are
   not read.
   It assumes the training step above: one unit at a time is unsharded, twice per micro-batch. Not included: a
   background save, f32 sums of a ddp_pipeline, and the sums that a 16-bit gradient gets when it is read or
   clipped twice (see CONCEPTS).
   Not collective, never blocks. It allocates only tables of the units and parameters, and frees them before
   it returns. Errors leave *bytes unchanged: those of ddp_fsdp_create that one rank can find; DDP_ERR_INVALID
   when world_size is below 1, replica_count is negative, or their product is above INT32_MAX. */
DDPDEF ddp_result ddp_fsdp_predict(const ddp_fsdp_desc *desc, int world_size, ddp_fsdp_bytes *bytes);

/* Waits until a background save has ended, however long it takes, and for pending calls and device work at
   most the group's timeout. Then frees everything: value.data and grad.data of the params become NULL, and
   views end. The result of the background save is lost: call ddp_fsdp_save_wait before. Collective. NULL on
   all ranks is ignored. */
DDPDEF void ddp_fsdp_destroy(ddp_fsdp *fsdp);

/* Groups parameters into units, in the order of each unit's first parameter. Fills in the first n of cap
   entries of out, and returns n, or a negative ddp_result. Not collective.
   desc->storage becomes a copy of params, ordered by unit, and the units point there. index is the position
   in params. Set frozen, tied_to and global_shape in storage, before ddp_fsdp_create. value.data and
   grad.data are then set in storage, and not in params. Ownership: storage and the names stay the caller's
   and must outlive the ddp_fsdp.
   Errors leave out and storage undefined: DDP_ERR_INVALID (more than cap units: ddp_last_error has their
   number; a prefix without a match; two parameters with one name). */
DDPDEF int ddp_fsdp_wrap(const ddp_param *params, int param_count, const ddp_fsdp_wrap_desc *desc,
                         ddp_fsdp_unit_desc *out, int cap);

/* --- optimizers --- */

/* Creates an optimizer for the caller's tensors: complete ones, or this rank's rows. Its state has the dtype
   and shape of the values, in memory of the group's device. Not collective, sends nothing.
   Ownership: the desc is copied. The params array, the values and the groups must outlive the optimizer.
   grad.data may change between steps. Errors: DDP_ERR_INVALID names the parameter (dtype is not f32 or f64;
   value.data or grad.data is NULL; grad has another dtype or shape) or the field; DDP_ERR_NO_MEMORY;
   DDP_ERR_UNSUPPORTED when the device has no kernels of this header. */
DDPDEF ddp_result ddp_optimizer_create(ddp_optimizer **out, ddp_group *group, const ddp_optimizer_desc *desc);

/* Updates every value once from its gradient, and counts the step. Gradients stay as they are, with two
   exceptions: those of later uses of a tied parameter are added into that of the first use; LAMB overwrites
   gradients with its updates. ddp_reducer_wait has already added these uses: after it, pass the optimizer
   only the first use. The result for an element does not depend on its place in a shard, so the bits do not
   depend on the sharding.
   Collective over shard_group with LAMB and LARS, otherwise not. On a device it enqueues work; the host waits
   only for norms over a shard_group. Errors: DDP_ERR_INVALID when lr is negative or not finite, or a value or
   gradient is NULL. A failure of shard_group leaves values, gradients and state undefined. */
DDPDEF ddp_result ddp_optimizer_step(ddp_optimizer *optimizer, float lr);

/* Like ddp_optimizer_step, with gradients times grad_scale, the same on every rank: to unscale and to clip.
   The bits are those of multiplying the gradients before the step. Gradients of tied uses are added before
   they are multiplied. The stored gradients do not change, except with LARS, which needs their norms. The
   caller skips a step with an infinity. Errors: also DDP_ERR_INVALID when grad_scale is not positive and
   finite. */
DDPDEF ddp_result ddp_optimizer_step_scaled(ddp_optimizer *optimizer, float lr, float grad_scale);

/* Returns a view of state number `which` of a parameter, with the value's shape and dtype, and in *name (may
   be NULL) its name in checkpoints, a static text. ADAMW and LAMB have 0 "exp_avg" and 1 "exp_avg_sq". SGD
   and LARS have 0 "momentum_buffer", without momentum no state. All uses of a tied parameter have one state.
   Not collective, never blocks. Ownership: the view is valid until ddp_optimizer_destroy; the caller may
   change it between steps. Errors: DDP_ERR_INVALID when param or `which` is out of range. */
DDPDEF ddp_result ddp_optimizer_get_state(ddp_optimizer *optimizer, int param, int which, const char **name,
                                          ddp_tensor *state);

/* The number of steps taken, which the bias correction uses. 0 for NULL. */
DDPDEF int64_t ddp_optimizer_get_step(const ddp_optimizer *optimizer);
/* Sets the number of steps taken, the same on every rank. Call it after writing the state of an earlier run
   through ddp_optimizer_get_state. It changes no state. A negative number counts as 0, since the call has no
   result; ddp_fsdp_set_step rejects it. */
DDPDEF void ddp_optimizer_set_step(ddp_optimizer *optimizer, int64_t step);

/* Frees the optimizer and its state. Not collective. NULL is ignored. */
DDPDEF void ddp_optimizer_destroy(ddp_optimizer *optimizer);

/* The learning rate of step `step`, counted from 1: for the next step of a ddp_fsdp, state->step + 1. After
   total_steps it stays at min_lr (CONSTANT: max_lr). A negative step counts as 0. The result depends only on
   the arguments.
   Errors: 0 for an invalid desc; ddp_last_error names the field. A valid desc gives 0 only in step 0 of a
   warm-up, and at the end if min_lr is 0. */
DDPDEF float ddp_lr_at(const ddp_lr_desc *desc, int64_t step);

/* --- loss scaling ---
   In each step, the same on every rank:

     ddp_scaler_scale        the caller multiplies the loss by it before backward
     ddp_scaler_unscale      once, with all gradients, after their reduction
     ddp_scaler_found_inf    1: the caller skips the optimizer step
     ddp_scaler_update

   With ddp_fsdp_desc.scaler, ddp_fsdp_step unscales, and skips the update of values. The caller still
   multiplies the loss, and calls ddp_scaler_update after ddp_fsdp_step. */

/* Initializes the caller's scaler; nothing has to be freed. Copies the desc; NULL: all defaults. Not
   collective, but the desc is the same on every rank, except for groups. The groups must outlive the scaler,
   and *scaler must not move while a ddp_fsdp uses it. Errors: DDP_ERR_INVALID names the field; *scaler is
   then zero. */
DDPDEF ddp_result ddp_scaler_init(ddp_scaler *scaler, const ddp_scaler_desc *desc);

/* The factor for the loss before backward. It changes only in ddp_scaler_update and ddp_scaler_load. */
DDPDEF float ddp_scaler_scale(const ddp_scaler *scaler);

/* Multiplies gradients by the inverse scale, in place and in their dtype (any float: small numbers become 0
   in f16, so prefer f32 gradients). Determines whether any gradient on any rank of the groups of
   ddp_scaler_desc is not finite: see ddp_scaler_found_inf. Gradients are multiplied in both cases. group
   provides the device of their memory. Ranks may pass different numbers of gradients, also 0.
   Collective over the groups of ddp_scaler_desc; blocks the host. Errors: DDP_ERR_INVALID, only on this rank:
   a second call before ddp_scaler_update; before ddp_scaler_init; after infinities have made the scale 0. */
DDPDEF ddp_result ddp_scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients,
                                     int gradient_count);

/* 1 if the unscale since the last ddp_scaler_update found a gradient that is not finite, otherwise 0. */
DDPDEF int ddp_scaler_found_inf(const ddp_scaler *scaler);

/* Ends a step: the scale shrinks after an infinity, and grows after growth_interval steps without one, unless
   it would overflow. Not collective. Errors: DDP_ERR_INVALID before an unscale. */
DDPDEF ddp_result ddp_scaler_update(ddp_scaler *scaler);

/* Stores scale and growth tracker in *state. An unscale without its ddp_scaler_update is not stored.
   ddp_fsdp_save does this for desc.scaler. */
DDPDEF void ddp_scaler_save(const ddp_scaler *scaler, ddp_scaler_state *state);
/* Restores scale and growth tracker, and forgets an unscale without its ddp_scaler_update. ddp_fsdp_load does
   this for desc.scaler. Not collective, but the same on every rank. Errors leave *scaler unchanged:
   DDP_ERR_CORRUPT when the scale is not a positive f32 number, or the growth tracker is out of range;
   DDP_ERR_INVALID for a zeroed *scaler without ddp_scaler_init. */
DDPDEF ddp_result ddp_scaler_load(ddp_scaler *scaler, const ddp_scaler_state *state);

#ifdef __cplusplus
}
#endif
#endif /* DDP_FSDP_H */

#include "ddp.h" /* once more, for its check of the options with which bodies are compiled */
#if (defined(DDP_IMPLEMENTATION) || defined(DDP_FSDP_IMPLEMENTATION)) \
    && !defined(DDP_FSDP_IMPLEMENTATION_INCLUDED)
#define DDP_FSDP_IMPLEMENTATION_INCLUDED

//== includes and argument checks ============================================================ >>impl-structs
/* Used by all sections below: system headers, short forms for argument checks, and the entry into a public
   call. Each struct is in the section of the code that owns it; struct ddp_fsdp is in >>impl-sharding. */

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Fails with DDP_ERR_INVALID. call: the name of the public function. */
#define ddp__fsdp_invalid(call, group, ...) ddp_fail_in(DDP_ERR_INVALID, call, group, __VA_ARGS__)

/* DDP_CHECK for use inside a public function: the error names that function. */
#define DDP__FSDP_CHECK(condition, ...) DDP_CHECK(__func__, NULL, condition, __VA_ARGS__)

/* Checks the unit, and the parameter, of a call for an fsdp. */
#define DDP__UNIT_CHECK(fsdp, unit)                                                           \
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");                                                    \
    DDP__FSDP_CHECK((unit) >= 0 && (unit) < (fsdp)->unit_count, "unit=%d; use 0 to %d", unit, \
                    (fsdp)->unit_count - 1)

#define DDP__PARAM_CHECK(fsdp, unit, param)                                                         \
    DDP__UNIT_CHECK(fsdp, unit);                                                                    \
    DDP__FSDP_CHECK((param) >= 0 && (param) < (fsdp)->units[unit].end - (fsdp)->units[unit].shards, \
                    "param=%d in unit %s; use 0 to %d", param, (fsdp)->units[unit].name,            \
                    (int)((fsdp)->units[unit].end - (fsdp)->units[unit].shards) - 1)

/* result together with the current error line. */
static ddp_saved_error ddp__saved_error_of(ddp_result result) {
    ddp_saved_error saved = DDP_ZERO;
    ddp_error_save(&saved, result);
    return saved;
}

/* Begins the device work of a public call. A process that was forked inside the rank gets an error, since the
   shards are the rank's. */
static ddp_result ddp__fsdp_device_begin(ddp_group *group) {
    return ddp_group_is_forked(group) ? ddp_group_status(group) : ddp_device_begin(group);
}

/* 0 to 3.4e38: neither a NaN nor an infinity. */
static int ddp__is_finite_nonnegative(double x) { return x >= 0 && x <= 3.4028234663852886e38; }

//== optimizers: CPU kernels ================================================================== >>impl-update
/* The functions of DDP_OPTIMIZER_KERNELS for CPU memory. ddp_optimizer_step calls them through the table of
   its device. struct ddp_update has the formulas.

   The bits of an update depend only on its inputs, not on the element's position, the compiler or its
   options. Each operation is rounded separately. Vectors, the last short piece and a GPU therefore give the
   same bits. */

#if defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#define DDP__UPDATE_BYTES 32 /* of a vector; wider ones gain nothing */
#elif defined(__SSE2__)
#include <emmintrin.h>
#define DDP__UPDATE_BYTES 16
#else
#define DDP__UPDATE_BYTES 16
#endif
#define DDP__UPDATE_INLINE static inline __attribute__((always_inline))

typedef float ddp__vector_f32 __attribute__((vector_size(DDP__UPDATE_BYTES)));
typedef double ddp__vector_f64 __attribute__((vector_size(DDP__UPDATE_BYTES)));

DDP__UPDATE_INLINE ddp__vector_f32 ddp__vec_sqrt_f32(ddp__vector_f32 x) {
#if defined(__AVX__) && !defined(__CUDACC__)
    return (ddp__vector_f32)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (ddp__vector_f32)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < 4; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

DDP__UPDATE_INLINE ddp__vector_f64 ddp__vec_sqrt_f64(ddp__vector_f64 x) {
#if defined(__AVX__) && !defined(__CUDACC__)
    return (ddp__vector_f64)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
    return (ddp__vector_f64)_mm_sqrt_pd((__m128d)x);
#else
    for (int i = 0; i < 2; i++) x[i] = sqrt(x[i]);
    return x;
#endif
}

/* Compilers may fuse a product with the addition that follows (FMA). DDP__ROUNDED prevents it: the product
   passes through an asm operand that the compiler cannot see through. */
#if defined(__SSE2__)
#define DDP__ROUNDED(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define DDP__ROUNDED(x) __asm__("" : "+w"(x))
#else
#define DDP__ROUNDED(x) __asm__("" : "+m"(x))
#endif

/* C has no templates, so macros define each function for float (f32) and for double (f64).
   DDP__VECTOR_FNS(float, f32) defines:
       ddp__vec_load_f32(base, i, count)       elements [i, i + count) of an array, at any alignment. count is
                                               at most a vector; the rest of the vector is 0
       ddp__vec_store_f32(base, i, count, x)
       ddp__vec_product_f32(factor, x)         factor times x, rounded
       ddp__vec_load_grad_f32(u, t, i, count)  the gradient of tensor t, times grad_scale */
#define DDP__VECTOR_FNS(real, suffix)                                                            \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__vec_load_##suffix(const void *base, size_t i,   \
                                                                   size_t count) {               \
        ddp__vector_##suffix x = {0};                                                            \
        memcpy(&x, (const real *)base + i, count * sizeof(real));                                \
        return x;                                                                                \
    }                                                                                            \
    DDP__UPDATE_INLINE void ddp__vec_store_##suffix(void *base, size_t i, size_t count,          \
                                                    ddp__vector_##suffix x) {                    \
        memcpy((real *)base + i, &x, count * sizeof(real));                                      \
    }                                                                                            \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__vec_product_##suffix(double factor,             \
                                                                      ddp__vector_##suffix x) {  \
        x = (real)factor * x;                                                                    \
        DDP__ROUNDED(x);                                                                         \
        return x;                                                                                \
    }                                                                                            \
    DDP__UPDATE_INLINE ddp__vector_##suffix ddp__vec_load_grad_##suffix(                         \
        const ddp_update *u, const ddp_update_tensor *t, size_t i, size_t count) {               \
        ddp__vector_##suffix grad = ddp__vec_load_##suffix(t->grad, i, count);                   \
        return (real)u->grad_scale != 1 ? ddp__vec_product_##suffix(u->grad_scale, grad) : grad; \
    }
DDP__VECTOR_FNS(float, f32)
DDP__VECTOR_FNS(double, f64)

/* DDP__ADAM_FN(float, f32) defines ddp__adam_f32(u, t, i, count): ADAMW or LAMB for elements [i, i + count),
   at most one vector. */
#define DDP__ADAM_FN(real, suffix)                                                                        \
    DDP__UPDATE_INLINE void ddp__adam_##suffix(const ddp_update *u, const ddp_update_tensor *t, size_t i, \
                                               size_t count) {                                            \
        ddp__vector_##suffix value = ddp__vec_load_##suffix(t->value, i, count);                          \
        ddp__vector_##suffix grad = ddp__vec_load_grad_##suffix(u, t, i, count);                          \
        ddp__vector_##suffix square = grad * grad;                                                        \
        DDP__ROUNDED(square);                                                                             \
        ddp__vector_##suffix m = ddp__vec_product_##suffix(u->beta1,                                      \
                                                           ddp__vec_load_##suffix(t->state0, i, count))   \
                                 + ddp__vec_product_##suffix(u->one_minus_beta1, grad);                   \
        ddp__vector_##suffix v = ddp__vec_product_##suffix(u->beta2,                                      \
                                                           ddp__vec_load_##suffix(t->state1, i, count))   \
                                 + ddp__vec_product_##suffix(u->one_minus_beta2, square);                 \
        ddp__vector_##suffix root = ddp__vec_product_##suffix(u->inv_sqrt_bias_correction2,               \
                                                              ddp__vec_sqrt_##suffix(v));                 \
        ddp__vector_##suffix change = ddp__vec_product_##suffix(u->rate, m) / (root + (real)u->eps);      \
        if (u->kind != DDP_UPDATE_LAMB) {                                                                 \
            value = ddp__vec_product_##suffix(u->decay_factor, value) - change;                           \
            ddp__vec_store_##suffix(t->value, i, count, value);                                           \
        } else {                                                                                          \
            if ((real)u->decay != 0) change = change + ddp__vec_product_##suffix(u->decay, value);        \
            ddp__vec_store_##suffix(t->grad, i, count, change);                                           \
        }                                                                                                 \
        ddp__vec_store_##suffix(t->state0, i, count, m);                                                  \
        ddp__vec_store_##suffix(t->state1, i, count, v);                                                  \
    }
DDP__ADAM_FN(float, f32)
DDP__ADAM_FN(double, f64)

/* DDP__SGD_FN(float, f32) defines ddp__sgd_f32(u, t, i, count): the same for SGD. */
#define DDP__SGD_FN(real, suffix)                                                                           \
    DDP__UPDATE_INLINE void ddp__sgd_##suffix(const ddp_update *u, const ddp_update_tensor *t, size_t i,    \
                                              size_t count) {                                               \
        ddp__vector_##suffix value = ddp__vec_load_##suffix(t->value, i, count);                            \
        ddp__vector_##suffix change = ddp__vec_load_grad_##suffix(u, t, i, count);                          \
        if ((real)u->decay != 0) change = change + ddp__vec_product_##suffix(u->decay, value);              \
        change = ddp__vec_product_##suffix(u->scale, change);                                               \
        if (t->state0) {                                                                                    \
            ddp__vector_##suffix momentum = change;                                                         \
            if (!u->first)                                                                                  \
                momentum = ddp__vec_product_##suffix(u->beta1, ddp__vec_load_##suffix(t->state0, i, count)) \
                           + ddp__vec_product_##suffix(u->one_minus_beta1, change);                         \
            ddp__vec_store_##suffix(t->state0, i, count, momentum);                                         \
            change = u->nesterov ? change + ddp__vec_product_##suffix(u->beta1, momentum) : momentum;       \
        }                                                                                                   \
        ddp__vec_store_##suffix(t->value, i, count, value - ddp__vec_product_##suffix(u->rate, change));    \
    }
DDP__SGD_FN(float, f32)
DDP__SGD_FN(double, f64)

/* A copy in which the factors are known: on the CPU, those in the device's memory can be read. */
DDP__UPDATE_INLINE ddp_update ddp__update_with_factors(const ddp_update *update,
                                                       const ddp_update_tensor *tensor) {
    ddp_update u = *update;
    if (tensor->scale_at) u.scale = *tensor->scale_at;
    if (u.grad_scale == 0) u.grad_scale = 1;
    if (u.grad_scale_at) u.grad_scale = (double)*u.grad_scale_at;
    return u;
}

/* DDP__UPDATE_FN(float, f32) defines ddp__update_f32(update, tensor): all elements of a tensor, a vector at a
   time, and then the rest. The gradients are of dtype, and copy is not written. */
#define DDP__UPDATE_FN(real, suffix)                                                                   \
    static void ddp__update_##suffix(const ddp_update *update, const ddp_update_tensor *tensor) {      \
        const ddp_update u = ddp__update_with_factors(update, tensor);                                 \
        const ddp_update_tensor t = *tensor;                                                           \
        size_t lanes = DDP__UPDATE_BYTES / sizeof(real), rest = t.count % lanes, end = t.count - rest; \
        if (u.kind == DDP_UPDATE_SGD) {                                                                \
            for (size_t i = 0; i < end; i += lanes) ddp__sgd_##suffix(&u, &t, i, lanes);               \
            if (rest) ddp__sgd_##suffix(&u, &t, end, rest);                                            \
        } else {                                                                                       \
            for (size_t i = 0; i < end; i += lanes) ddp__adam_##suffix(&u, &t, i, lanes);              \
            if (rest) ddp__adam_##suffix(&u, &t, end, rest);                                           \
        }                                                                                              \
    }
DDP__UPDATE_FN(float, f32)
DDP__UPDATE_FN(double, f64)
#undef DDP__VECTOR_FNS
#undef DDP__ADAM_FN
#undef DDP__SGD_FN
#undef DDP__UPDATE_FN

/* Elements [from, from + count) of a tensor. */
static ddp_update_tensor ddp__update_part(const ddp_update *u, const ddp_update_tensor *tensor, size_t from,
                                          size_t count) {
    ddp_update_tensor part = *tensor;
    size_t at = from * ddp_dtype_size(u->dtype);
    part.value = (char *)part.value + at;
    part.grad = (char *)part.grad + from * ddp_dtype_size(u->grad_dtype);
    if (part.state0) part.state0 = (char *)part.state0 + at;
    if (part.state1) part.state1 = (char *)part.state1 + at;
    if (part.copy) part.copy = (char *)part.copy + from * ddp_dtype_size(u->copy_dtype);
    part.count = count;
    return part;
}

enum { DDP__UPDATE_BLOCK = 4096 }; /* elements that stay in the cache between the steps of a block */

static void ddp__host_update(const ddp_update *update) {
    float grad[DDP__UPDATE_BLOCK];
    int converts = update->grad_dtype != update->dtype;
    for (const ddp_update_tensor *t = update->tensors; t < update->tensors + update->tensor_count; t++) {
        size_t max = converts || t->copy ? (size_t)DDP__UPDATE_BLOCK : t->count;
        for (size_t from = 0; from < t->count; from += max) {
            size_t count = t->count - from < max ? t->count - from : max;
            ddp_update_tensor part = ddp__update_part(update, t, from, count);
            if (converts) ddp_device_cpu()->cast(grad, DDP_F32, part.grad, update->grad_dtype, count);
            if (converts) part.grad = grad;
            if (update->dtype == DDP_F32)
                ddp__update_f32(update, &part);
            else
                ddp__update_f64(update, &part);
            if (part.copy)
                ddp_device_cpu()->cast(part.copy, update->copy_dtype, part.value, update->dtype, count);
        }
    }
}

static void ddp__host_scale(const ddp_tensor *tensors, int tensor_count, const float *factor) {
    ddp_device_cpu()->scale(tensors, tensor_count, *factor);
}

static void ddp__host_clip(const ddp_exact_sum *sum, float limit, float *factor, float *norm) {
    *factor = ddp_clip_factor(sum, limit, norm);
}

/* Trust ratios: |w| / |update| for LAMB, |w| / (|g| + weight_decay |w|) for LARS. */
static void ddp__host_trust(const ddp_exact_sum *sums, size_t count, double lr, double c, double decay,
                            double *out) {
    for (size_t i = 0; i < count; i++) {
        double value = sqrt(ddp_exact_sum_value(sums + 2 * i));
        double grad = sqrt(ddp_exact_sum_value(sums + 2 * i + 1));
        double decayed = decay * value;
        DDP__ROUNDED(decayed);
        out[i] = lr;
        if (value != 0 && grad != 0) out[i] *= c * value / (decay < 0 ? grad : grad + decayed);
    }
}

// clang-format off
#define DDP_X(name, arguments) ddp__host_##name,
static const ddp_optimizer_kernels ddp__host_kernels = {DDP_VERSION, DDP_OPTIMIZER_KERNELS(DDP_X)};
#undef DDP_X
// clang-format on
static const ddp_optimizer_kernels *ddp__optimizer_kernels_of(const ddp_device *device) {
    return device->optimizer ? device->optimizer : &ddp__host_kernels;
}

//== optimizers: creation ============================================================== >>impl-optimizer
/* struct ddp_optimizer: AdamW, SGD, LAMB and LARS for the caller's tensors. ddp_fsdp_create makes one for
   this rank's rows. It owns the optimizer state and, for LAMB and LARS, the memory of the norms. */

/* A parameter, or a later use of one. */
typedef struct ddp__optimizer_param {
    /* index of the first entry with the same value; only that entry is stepped. Its own index otherwise */
    int first_use;
    /* index of the sum of squares of its value; that of its gradient follows. -1 = no trust ratio */
    int square_index;
    size_t count;
    void *state[2]; /* NULL = unused */
    void *copy;     /* NULL, or where each step also writes the values, rounded to copy_dtype */
    ddp_dtype copy_dtype;
} ddp__optimizer_param;

struct ddp_optimizer {
    ddp_optimizer_desc desc; /* with every default resolved */
    ddp_group *group;
    const ddp_device *device; /* of group: values, gradients and squares are its memory */
    ddp__optimizer_param *params;
    ddp_update_tensor *tensors; /* room for a list of all parameters; part of the allocation of params */
    int state_count;            /* tensors of state of each parameter */
    int square_count;           /* the same on all ranks of shard_group, whichever rows they have */
    int64_t step;
    void *state;            /* one allocation */
    ddp_exact_sum *squares; /* on the device */
    /* host memory in which they are reduced; NULL if shard_group has the same device */
    ddp_exact_sum *host_squares;
    /* NULL, or called before and after elements [from, from + count) of a parameter are stepped; user is
       desc.state_user */
    ddp_result (*piece_fn)(void *user, int param, size_t from, size_t count, int stepped);
    double *trust_rates; /* on the device: lr times the trust ratio of each pair of squares */
};

/* By ddp_optimizer_kind. */
static const char *const ddp__optimizer_state_names[][2] = {
    {"exp_avg", "exp_avg_sq"},
    {"momentum_buffer", NULL},
    {"exp_avg", "exp_avg_sq"},
    {"momentum_buffer", NULL},
};

#define DDP__OPTIMIZER_CHECK(condition, ...) DDP_CHECK("ddp_optimizer_create", group, condition, __VA_ARGS__)

/* The value of a field in which 0 means the default and -1 means 0. */
static float ddp__optimizer_default(float value, float default_value) {
    if (value == 0) return default_value;
    return value == -1 ? 0 : value;
}

static int ddp__optimizer_is_adam(const ddp_optimizer_desc *desc) {
    return desc->kind == DDP_OPTIMIZER_ADAMW || desc->kind == DDP_OPTIMIZER_LAMB;
}
static int ddp__optimizer_has_trust(const ddp_optimizer_desc *desc) {
    return desc->kind == DDP_OPTIMIZER_LAMB || desc->kind == DDP_OPTIMIZER_LARS;
}

/* Whether weight decay applies to parameter i. */
static int ddp__optimizer_decays(const ddp_optimizer_desc *d, int i) {
    return !d->decay_matrices_only || d->params[i].value.ndim > 1;
}

/* Tensors of state of each parameter. desc: with defaults. */
static int ddp__optimizer_state_count(const ddp_optimizer_desc *desc) {
    return ddp__optimizer_is_adam(desc) ? 2 : desc->momentum != 0;
}

/* Fills in defaults, and checks all fields except the parameters. Fields of other kinds are ignored. group
   NULL: of a prediction, which runs no kernels. */
static ddp_result ddp__optimizer_resolve(ddp_group *group, ddp_optimizer_desc *d) {
    int lars = d->kind == DDP_OPTIMIZER_LARS;
    const ddp_optimizer_kernels *kernels = group ? ddp_group_device(group)->optimizer : NULL;
    if (group)
        DDP_TRY(ddp_check_kernels(group, "ddp_optimizer_create", kernels ? &kernels->version : NULL,
                                  "ddp_fsdp.h"));
    DDP__OPTIMIZER_CHECK((unsigned)d->kind <= DDP_OPTIMIZER_LARS, "kind=%d is not a ddp_optimizer_kind",
                         (int)d->kind);
    d->beta1 = ddp__optimizer_default(d->beta1, 0.9f);
    d->beta2 = ddp__optimizer_default(d->beta2, 0.999f);
    if (d->eps == 0) d->eps = d->kind == DDP_OPTIMIZER_LAMB ? 1e-6f : 1e-8f;
    d->momentum = ddp__optimizer_default(d->momentum, lars ? 0.9f : 0);
    if (d->trust_coefficient == 0) d->trust_coefficient = lars ? 0.001f : 1.0f;
    if (ddp__optimizer_is_adam(d)) {
        DDP__OPTIMIZER_CHECK(d->beta1 >= 0 && d->beta1 < 1,
                             "beta1=%g; use a number above 0 and below 1, or -1 for 0", (double)d->beta1);
        DDP__OPTIMIZER_CHECK(d->beta2 >= 0 && d->beta2 < 1,
                             "beta2=%g; use a number above 0 and below 1, or -1 for 0", (double)d->beta2);
        DDP__OPTIMIZER_CHECK(ddp__is_finite_nonnegative(d->eps), "eps=%g; use a positive number",
                             (double)d->eps);
    } else {
        DDP__OPTIMIZER_CHECK(ddp__is_finite_nonnegative(d->momentum), "momentum=%g; use 0 or more",
                             (double)d->momentum);
        DDP__OPTIMIZER_CHECK(ddp__is_finite_nonnegative(d->dampening), "dampening=%g; use 0 or more",
                             (double)d->dampening);
        DDP__OPTIMIZER_CHECK(
            !d->nesterov || lars || (d->momentum > 0 && d->dampening == 0),
            "nesterov=1 with momentum=%g and dampening=%g; use a positive momentum and dampening 0",
            (double)d->momentum, (double)d->dampening);
    }
    DDP__OPTIMIZER_CHECK(!ddp__optimizer_has_trust(d) || ddp__is_finite_nonnegative(d->trust_coefficient),
                         "trust_coefficient=%g; use a positive number", (double)d->trust_coefficient);
    DDP__OPTIMIZER_CHECK(ddp__is_finite_nonnegative(d->weight_decay), "weight_decay=%g; use 0 or more",
                         (double)d->weight_decay);
    return DDP_OK;
}

/* Checks parameter i and finds the first use of its value. Parameters without elements have no memory to
   compare: each is its own first use. */
static ddp_result ddp__optimizer_add_param(ddp_optimizer *o, int i) {
    ddp_group *group = o->group;
    const ddp_param *param = &o->desc.params[i];
    ddp__optimizer_param *p = &o->params[i];
    const char *name = param->name ? param->name : "";
    int64_t count = ddp_tensor_count(&param->value);
    ddp_tensor grad = ddp_param_grad(param);
    DDP__OPTIMIZER_CHECK(param->value.dtype == DDP_F32 || param->value.dtype == DDP_F64,
                         "params[%d] \"%s\": value.dtype is %s; use f32 or f64", i, name,
                         ddp_dtype_name(param->value.dtype));
    DDP__OPTIMIZER_CHECK(count >= 0,
                         "params[%d] \"%s\": value.ndim=%d or value.shape is invalid; fill in its ddp_tensor",
                         i, name, param->value.ndim);
    DDP__OPTIMIZER_CHECK(!count || param->value.data, "params[%d] \"%s\": value.data is NULL", i, name);
    DDP__OPTIMIZER_CHECK(!count || param->grad.data, "params[%d] \"%s\": grad.data is NULL", i, name);
    DDP__OPTIMIZER_CHECK(grad.dtype == param->value.dtype,
                         "params[%d] \"%s\": value is %s, but grad is %s; give both the same dtype", i, name,
                         ddp_dtype_name(param->value.dtype), ddp_dtype_name(grad.dtype));
    DDP__OPTIMIZER_CHECK(
        ddp_tensor_count(&grad) == count,
        "params[%d] \"%s\": value has %lld elements, but grad has %lld; give both the same shape", i, name,
        (long long)count, (long long)ddp_tensor_count(&grad));
    p->count = (size_t)count;
    p->square_index = -1;
    if (ddp__optimizer_has_trust(&o->desc) && ddp__optimizer_decays(&o->desc, i)) {
        p->square_index = o->square_count;
        o->square_count += 2;
    }
    for (p->first_use = 0; p->first_use < i; p->first_use++)
        if (count && o->desc.params[p->first_use].value.data == param->value.data) break;
    DDP__OPTIMIZER_CHECK(o->params[p->first_use].count == p->count
                             && o->desc.params[p->first_use].value.dtype == param->value.dtype,
                         "params[%d] \"%s\" and params[%d] share value.data but differ in shape or dtype; "
                         "give both uses of a tied parameter the same",
                         i, name, p->first_use);
    return DDP_OK;
}

/* Assigns parts of memory to the tensors of state. memory NULL: only counts. Returns the total bytes. */
static size_t ddp__optimizer_assign_state(ddp_optimizer *o, unsigned char *memory) {
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
    DDP__OPTIMIZER_CHECK(d->params && d->param_count > 0,
                         "param_count=%d or params is NULL; set both, to the array of parameters to update",
                         d->param_count);
    DDP__OPTIMIZER_CHECK(!d->state_alloc_fn == !d->state_free_fn,
                         "set both state_alloc_fn and state_free_fn, or neither");
    o->state_count = ddp__optimizer_state_count(&o->desc);
    o->params = (ddp__optimizer_param *)ddp_host_alloc(
        o->group, (size_t)o->desc.param_count * (sizeof *o->params + sizeof *o->tensors));
    if (!o->params) return DDP_ERR_NO_MEMORY;
    o->tensors = (ddp_update_tensor *)(void *)(o->params + o->desc.param_count);
    for (int i = 0; i < o->desc.param_count; i++) DDP_TRY(ddp__optimizer_add_param(o, i));
    size_t bytes = ddp__optimizer_assign_state(o, NULL);
    if (bytes && !o->desc.state_alloc_fn)
        DDP_TRY(o->device->alloc(o->group, bytes, &o->state));
    else if (bytes)
        o->state = o->desc.state_alloc_fn(bytes, o->desc.state_user);
    if (bytes && !o->state)
        return ddp_fail(DDP_ERR_NO_MEMORY,
                        "ddp_optimizer_create: %llu bytes could not be allocated by state_alloc_fn",
                        (unsigned long long)bytes);
    ddp__optimizer_assign_state(o, (unsigned char *)o->state);
    if (!o->square_count) return DDP_OK;
    bytes = (size_t)o->square_count * sizeof(ddp_exact_sum);
    DDP_TRY(
        o->device->alloc(o->group, bytes + (size_t)o->square_count / 2 * sizeof *o->trust_rates, &memory));
    o->squares = (ddp_exact_sum *)memory;
    o->trust_rates = (double *)(void *)(o->squares + o->square_count);
    if (!d->shard_group || ddp_group_device(d->shard_group) == o->device) return DDP_OK;
    o->host_squares = (ddp_exact_sum *)ddp_host_alloc(group, bytes);
    return o->host_squares ? DDP_OK : DDP_ERR_NO_MEMORY;
}

DDPDEF ddp_result ddp_optimizer_create(ddp_optimizer **out, ddp_group *group,
                                       const ddp_optimizer_desc *desc) {
    DDP__FSDP_CHECK(out, "out is NULL");
    *out = NULL;
    DDP__FSDP_CHECK(group && desc, "group or desc is NULL");
    ddp_optimizer *o = (ddp_optimizer *)ddp_host_alloc(group, sizeof *o);
    if (!o) return DDP_ERR_NO_MEMORY;
    o->desc = *desc;
    o->group = group;
    o->device = ddp_group_device(group);
    ddp_result result = ddp__optimizer_build(o);
    if (result == DDP_OK)
        *out = o;
    else
        ddp_optimizer_destroy(o);
    return result;
}

DDPDEF void ddp_optimizer_destroy(ddp_optimizer *optimizer) {
    DDP_KEEP_ERROR;
    ddp_optimizer *o = optimizer;
    if (!o) return;
    if (o->squares) o->device->free(o->group, o->squares);
    if (o->state && !o->desc.state_alloc_fn)
        o->device->free(o->group, o->state);
    else if (o->state)
        o->desc.state_free_fn(o->state, o->desc.state_user);
    ddp_host_free(o->group, o->host_squares);
    ddp_host_free(o->group, o->params);
    ddp_host_free(o->group, o);
}

//== optimizers: the step, learning rates ============================================= >>impl-optimizer-step
/* A step updates each parameter once. LAMB makes two passes; LAMB and LARS need norms over shard_group before
   the last one. Also ddp_lr_at, the learning rate of a step.

              gradients          moments, update      norms over ranks     values
     ADAMW    .                  .                    .                    one pass: moments and values
     SGD      .                  .                    .                    one pass: momentum and values
     LAMB     .                  first pass           |w|, |update|        last pass: w - lr ratio update
     LARS     times grad_scale   .                    |w|, |gradient|      last pass: momentum and values */

/* elements per copy between a device and an optimizer on the host; see ddp_optimizer.piece_fn */
#if !defined(DDP__HOST_PIECE)
#define DDP__HOST_PIECE ((size_t)1 << 20)
#endif

/* Factors are computed in double. They are rounded to dtype wherever arithmetic in dtype would round. */
static double ddp__round_to_dtype(ddp_dtype dtype, double x) {
    return dtype == DDP_F32 ? (double)(float)x : x;
}

static int ddp__optimizer_is_stepped(const ddp_optimizer *o, int i) {
    return o->params[i].first_use == i && o->params[i].count > 0;
}

enum { DDP__OPTIMIZER_LIST = 64 }; /* tensors of a call of the device, an even number */

/* The values of parameter i, or its gradients. */
static ddp_tensor ddp__optimizer_array(const ddp_optimizer *o, int i, int grad) {
    ddp_tensor array = o->desc.params[i].value;
    if (grad) array.data = o->desc.params[i].grad.data;
    return array;
}

/* Computes trust_rates, from the sums of squares of all values and gradients (LAMB: updates) that have a
   trust ratio. The sums are exact, so adding them over shard_group gives the same bits for any sharding. */
static ddp_result ddp__optimizer_norms(ddp_optimizer *o, float lr) {
    const ddp_tensor empty = {NULL, DDP_F32, 1, {0}};
    size_t bytes = (size_t)o->square_count * sizeof(ddp_exact_sum);
    ddp_tensor list[DDP__OPTIMIZER_LIST];
    int first = 0, count = 0;
    o->device->fill_zero(o->squares, bytes);
    for (int i = 0; i < o->desc.param_count; i++) {
        const ddp__optimizer_param *p = &o->params[i];
        if (p->square_index < 0) continue;
        for (int grad = 0; grad < 2; grad++)
            list[count++] = ddp__optimizer_is_stepped(o, i) ? ddp__optimizer_array(o, i, grad) : empty;
        if (count < DDP__OPTIMIZER_LIST && p->square_index + 2 < o->square_count) continue;
        o->device->sum_squares(o->squares + first, 1, list, count);
        first += count;
        count = 0;
    }
    if (o->host_squares) {
        o->device->copy(o->host_squares, o->squares, bytes);
        DDP_TRY(ddp_host_collective(o->desc.shard_group, DDP_CALL_ALL_REDUCE, o->host_squares,
                                    o->host_squares, bytes / sizeof(int64_t), DDP_I64, DDP_OP_SUM, -1));
        o->device->copy(o->squares, o->host_squares, bytes);
    } else if (o->desc.shard_group) {
        DDP_TRY(ddp_all_reduce(o->desc.shard_group, o->squares, o->squares, bytes / sizeof(int64_t), DDP_I64,
                               DDP_OP_SUM, NULL));
    }
    DDP_TRY(ddp__fsdp_device_begin(o->group));
    ddp__optimizer_kernels_of(o->device)->trust(
        o->squares, (size_t)o->square_count / 2, (double)lr, (double)o->desc.trust_coefficient,
        o->desc.kind == DDP_OPTIMIZER_LARS ? (double)o->desc.weight_decay : -1, o->trust_rates);
    return DDP_OK;
}

/* Factors that all parameters share in a step. */
typedef struct ddp__optimizer_step_factors {
    float lr, grad_scale;
    const float *grad_scale_at;                         /* NULL, or the device memory of grad_scale */
    double bias_correction1, inv_sqrt_bias_correction2; /* of AdamW and LAMB */
} ddp__optimizer_step_factors;

static ddp__optimizer_step_factors ddp__optimizer_factors(const ddp_optimizer *o, float lr, float grad_scale,
                                                          const float *grad_scale_at) {
    ddp__optimizer_step_factors step = {lr, grad_scale, grad_scale_at, 1, 1};
    if (!ddp__optimizer_is_adam(&o->desc)) return step;
    step.bias_correction1 = 1.0 - pow((double)o->desc.beta1, (double)o->step);
    step.inv_sqrt_bias_correction2 = 1.0 / sqrt(1.0 - pow((double)o->desc.beta2, (double)o->step));
    return step;
}

/* The kernel of each ddp_optimizer_kind. */
static const ddp_update_kind ddp__update_kinds[] = {DDP_UPDATE_ADAMW, DDP_UPDATE_SGD, DDP_UPDATE_LAMB,
                                                    DDP_UPDATE_SGD};

/* The factors of a pass over parameter i. The list of tensors is left to the caller. */
static ddp_update ddp__optimizer_update(const ddp_optimizer *o, const ddp__optimizer_step_factors *step,
                                        int i, int last) {
    const ddp_optimizer_desc *d = &o->desc;
    const ddp_param *param = &d->params[i];
    const ddp_dtype dtype = param->value.dtype;
    int lamb = d->kind == DDP_OPTIMIZER_LAMB;
    ddp_update u = DDP_ZERO;
    u.kind = ddp__update_kinds[d->kind];
    u.dtype = dtype;
    u.grad_dtype = ddp_param_grad(param).dtype;
    u.copy_dtype = o->params[i].copy_dtype;
    u.first = o->step == 1;
    u.nesterov = d->nesterov && d->kind == DDP_OPTIMIZER_SGD;
    u.scale = 1;
    u.grad_scale = step->grad_scale;
    u.grad_scale_at = step->grad_scale_at;
    if (ddp__optimizer_decays(d, i)) u.decay = (double)d->weight_decay;
    u.decay_factor = ddp__round_to_dtype(dtype, 1.0 - ddp__round_to_dtype(dtype, (double)step->lr * u.decay));
    u.rate = step->lr;
    u.eps = d->eps;
    if (ddp__optimizer_is_adam(d)) {
        double rate = (lamb ? 1.0 : (double)step->lr) / step->bias_correction1;
        u.rate = ddp__round_to_dtype(dtype, rate);
        u.beta1 = d->beta1;
        u.beta2 = d->beta2;
        u.one_minus_beta1 = ddp__round_to_dtype(dtype, 1.0 - u.beta1);
        u.one_minus_beta2 = ddp__round_to_dtype(dtype, 1.0 - u.beta2);
        u.inv_sqrt_bias_correction2 = ddp__round_to_dtype(dtype, step->inv_sqrt_bias_correction2);
    } else {
        u.beta1 = d->momentum;
        u.one_minus_beta1 = ddp__round_to_dtype(dtype, 1.0 - (double)d->dampening);
    }
    if (!last || !ddp__optimizer_has_trust(d)) return u;
    /* the gradients are multiplied by grad_scale already; ddp_update_tensor.scale_at has the trust ratios */
    u.scale = step->lr;
    u.rate = 1;
    u.grad_scale = 1;
    u.grad_scale_at = NULL;
    if (lamb) { /* value = value - scale * update */
        u.kind = DDP_UPDATE_SGD;
        u.decay = 0;
    }
    return u;
}

/* Parameter i in a pass. */
static ddp_update_tensor ddp__optimizer_tensor(const ddp_optimizer *o, int i, int last) {
    const ddp_param *param = &o->desc.params[i];
    const ddp__optimizer_param *p = &o->params[i];
    int lamb = o->desc.kind == DDP_OPTIMIZER_LAMB;
    ddp_update_tensor t = DDP_ZERO;
    t.value = param->value.data;
    t.grad = param->grad.data;
    t.count = p->count;
    if (last) t.copy = p->copy;
    if (!last || !lamb) { /* LAMB's last pass follows the update that the first one has left in grad */
        t.state0 = p->state[0];
        t.state1 = p->state[1];
    }
    /* the device has lr times the trust ratio */
    if (last && p->square_index >= 0) t.scale_at = o->trust_rates + p->square_index / 2;
    return t;
}

/* A pass over parameter i in pieces, between calls of piece_fn. */
static ddp_result ddp__optimizer_pieces(const ddp_optimizer *o, ddp_update *u, int i, int last) {
    const ddp_update_tensor t = ddp__optimizer_tensor(o, i, last);
    int waits = !(last && o->desc.kind == DDP_OPTIMIZER_LAMB); /* LAMB's first pass has waited */
    for (size_t from = 0, count; from < t.count; from += count) {
        count = t.count - from < DDP__HOST_PIECE ? t.count - from : DDP__HOST_PIECE;
        const ddp_update_tensor part = ddp__update_part(u, &t, from, count);
        u->tensors = &part;
        u->tensor_count = 1;
        if (waits) DDP_TRY(o->piece_fn(o->desc.state_user, i, from, count, 0));
        ddp__optimizer_kernels_of(o->device)->update(u);
        if (last) DDP_TRY(o->piece_fn(o->desc.state_user, i, from, count, 1));
    }
    return DDP_OK;
}

/* Whether parameters i and k have the same factors, so that one call of the kernel can update both. */
static int ddp__optimizer_same_factors(const ddp_optimizer *o, int i, int k) {
    return o->desc.params[i].value.dtype == o->desc.params[k].value.dtype
           && ddp_param_grad(&o->desc.params[i]).dtype == ddp_param_grad(&o->desc.params[k]).dtype
           && ddp__optimizer_decays(&o->desc, i) == ddp__optimizer_decays(&o->desc, k)
           && o->params[i].copy_dtype == o->params[k].copy_dtype;
}

/* A pass over all parameters: one call of the kernel for all that have the same factors. LAMB has two passes:
   moments and update, then a step of plain SGD along the update. In LARS the momentum accumulates updates
   that include the rate, as in the paper. */
static ddp_result ddp__optimizer_pass(const ddp_optimizer *o, const ddp__optimizer_step_factors *step,
                                      int last) {
    for (int i = 0; i < o->desc.param_count; i++) {
        int earlier = 0, count = 0;
        if (!ddp__optimizer_is_stepped(o, i)) continue;
        ddp_update u = ddp__optimizer_update(o, step, i, last);
        if (o->piece_fn) {
            DDP_TRY(ddp__optimizer_pieces(o, &u, i, last));
            continue;
        }
        while (!ddp__optimizer_is_stepped(o, earlier) || !ddp__optimizer_same_factors(o, earlier, i))
            earlier++;
        if (earlier < i) continue;
        for (int k = i; k < o->desc.param_count; k++)
            if (ddp__optimizer_is_stepped(o, k) && ddp__optimizer_same_factors(o, i, k))
                o->tensors[count++] = ddp__optimizer_tensor(o, k, last);
        u.tensors = o->tensors;
        u.tensor_count = count;
        ddp__optimizer_kernels_of(o->device)->update(&u);
    }
    return DDP_OK;
}

/* Multiplies gradients by factor, or by *factor_at, a float on the device, if factor_at is not NULL. */
static void ddp__scale_grads(const ddp_device *device, const ddp_tensor *grads, int grad_count, float factor,
                             const float *factor_at) {
    if (factor_at)
        ddp__optimizer_kernels_of(device)->scale(grads, grad_count, factor_at);
    else if (factor != 1)
        device->scale(grads, grad_count, factor);
}

/* grad_scale_at: NULL, or where the device stores grad_scale. */
static ddp_result ddp__optimizer_step(ddp_optimizer *o, float lr, float grad_scale,
                                      const float *grad_scale_at) {
    DDP__FSDP_CHECK(o, "optimizer is NULL");
    DDP__FSDP_CHECK(ddp__is_finite_nonnegative(lr), "lr=%g; use 0 or more", (double)lr);
    DDP__FSDP_CHECK(grad_scale > 0 && ddp__is_finite_nonnegative((double)grad_scale),
                    "grad_scale=%g; use a positive number, or 1 for no scale", (double)grad_scale);
    for (int i = 0; i < o->desc.param_count; i++)
        DDP__FSDP_CHECK(!o->params[i].count || (o->desc.params[i].value.data && o->desc.params[i].grad.data),
                        "params[%d] \"%s\": %s.data is NULL", i,
                        o->desc.params[i].name ? o->desc.params[i].name : "",
                        o->desc.params[i].value.data ? "grad" : "value");
    DDP_TRY(ddp__fsdp_device_begin(o->group));
    for (int i = 0; i < o->desc.param_count; i++) {
        void *first = o->desc.params[o->params[i].first_use].grad.data;
        if (o->params[i].first_use != i)
            o->device->add(first, first, o->desc.params[i].grad.data, o->params[i].count,
                           o->desc.params[i].value.dtype);
    }
    ddp_tensor grads[DDP__OPTIMIZER_LIST];
    for (int i = 0, count = 0; i < o->desc.param_count && o->desc.kind == DDP_OPTIMIZER_LARS; i++) {
        if (ddp__optimizer_is_stepped(o, i)) grads[count++] = ddp__optimizer_array(o, i, 1);
        if (count < DDP__OPTIMIZER_LIST && i + 1 < o->desc.param_count) continue;
        ddp__scale_grads(o->device, grads, count, grad_scale, grad_scale_at);
        count = 0;
    }
    o->step++;
    const ddp__optimizer_step_factors step = ddp__optimizer_factors(o, lr, grad_scale, grad_scale_at);
    for (int last = o->desc.kind != DDP_OPTIMIZER_LAMB; last < 2; last++) {
        if (last && o->square_count) DDP_TRY(ddp__optimizer_norms(o, lr));
        DDP_TRY(ddp__optimizer_pass(o, &step, last));
    }
    return ddp_device_check(o->group);
}

DDPDEF ddp_result ddp_optimizer_step(ddp_optimizer *optimizer, float lr) {
    DDP_PUBLIC_CALL(ddp_optimizer_step);
    return ddp__optimizer_step(optimizer, lr, 1, NULL);
}
DDPDEF ddp_result ddp_optimizer_step_scaled(ddp_optimizer *optimizer, float lr, float grad_scale) {
    DDP_PUBLIC_CALL(ddp_optimizer_step_scaled);
    return ddp__optimizer_step(optimizer, lr, grad_scale, NULL);
}

DDPDEF ddp_result ddp_optimizer_get_state(ddp_optimizer *optimizer, int param, int which, const char **name,
                                          ddp_tensor *state) {
    const ddp_optimizer *o = optimizer;
    DDP__FSDP_CHECK(o && state, "optimizer or state is NULL");
    DDP__FSDP_CHECK(param >= 0 && param < o->desc.param_count,
                    "param=%d with %d parameters; use 0 to param_count - 1", param, o->desc.param_count);
    DDP__FSDP_CHECK(which >= 0 && which < o->state_count,
                    "which=%d, but each parameter has %d states; count from 0", which, o->state_count);
    *state = o->desc.params[param].value;
    state->data = o->params[o->params[param].first_use].state[which];
    if (name) *name = ddp__optimizer_state_names[o->desc.kind][which];
    return DDP_OK;
}

DDPDEF int64_t ddp_optimizer_get_step(const ddp_optimizer *optimizer) {
    return optimizer ? optimizer->step : 0;
}
DDPDEF void ddp_optimizer_set_step(ddp_optimizer *optimizer, int64_t step) {
    if (optimizer) optimizer->step = step > 0 ? step : 0;
}

/* --- learning rates --- */

#define DDP__LR_CHECK(condition, ...) DDP_CHECK("ddp_lr_at", NULL, condition, __VA_ARGS__)
static ddp_result ddp__lr_check(const ddp_lr_desc *desc) {
    DDP__LR_CHECK(desc, "desc is NULL");
    DDP__LR_CHECK((unsigned)desc->kind <= DDP_LR_WSD, "kind=%d is not a ddp_lr_kind", (int)desc->kind);
    DDP__LR_CHECK(desc->max_lr > 0 && ddp__is_finite_nonnegative(desc->max_lr),
                  "max_lr=%g; use a positive number", desc->max_lr);
    DDP__LR_CHECK(desc->min_lr >= 0 && desc->min_lr <= desc->max_lr, "min_lr=%g; use 0 to max_lr=%g",
                  desc->min_lr, desc->max_lr);
    DDP__LR_CHECK(desc->batch >= 0 && desc->base_batch >= 0 && !desc->batch == !desc->base_batch,
                  "batch=%lld and base_batch=%lld; set both, or neither", (long long)desc->batch,
                  (long long)desc->base_batch);
    DDP__LR_CHECK(desc->warmup_steps >= 0, "warmup_steps=%lld; use 0 or more", (long long)desc->warmup_steps);
    if (desc->kind == DDP_LR_CONSTANT) return DDP_OK;
    DDP__LR_CHECK(desc->total_steps >= 1, "total_steps=%lld; use 1 or more", (long long)desc->total_steps);
    int64_t after = desc->total_steps - desc->warmup_steps;
    DDP__LR_CHECK(after >= 0, "warmup_steps=%lld is more than total_steps=%lld",
                  (long long)desc->warmup_steps, (long long)desc->total_steps);
    DDP__LR_CHECK(desc->kind != DDP_LR_WSD || (desc->decay_steps >= 0 && desc->decay_steps <= after),
                  "decay_steps=%lld; use 0 to %lld, the steps after the warmup", (long long)desc->decay_steps,
                  (long long)after);
    DDP__LR_CHECK(desc->kind != DDP_LR_POLYNOMIAL || ddp__is_finite_nonnegative((double)desc->power),
                  "power=%g; use a positive number", (double)desc->power);
    return DDP_OK;
}

DDPDEF float ddp_lr_at(const ddp_lr_desc *desc, int64_t step) {
    if (ddp__lr_check(desc) != DDP_OK) return 0;
    int64_t warmup = desc->warmup_steps, total = desc->total_steps, decay = total - warmup;
    double batch_scale = desc->batch ? (double)desc->batch / (double)desc->base_batch : 1;
    double max_lr = desc->max_lr * batch_scale, min_lr = desc->min_lr * batch_scale;
    if (step < 0) step = 0;
    if (step <= warmup && warmup) return (float)(max_lr * (double)step / (double)warmup);
    if (desc->kind == DDP_LR_CONSTANT) return (float)max_lr;
    if (step > total) return (float)min_lr;
    if (desc->kind == DDP_LR_COSINE) {
        double ratio = min_lr / max_lr;
        double angle = 3.14159265358979323846 * (double)(step - warmup) / (double)(total - warmup);
        return (float)(max_lr * (0.5 * (1 + ratio) + 0.5 * (1 - ratio) * cos(angle)));
    }
    if (desc->kind == DDP_LR_WSD && desc->decay_steps)
        decay = desc->decay_steps;
    else if (desc->kind == DDP_LR_WSD && total / 10 < decay)
        decay = total < 10 ? 1 : total / 10;
    if (step <= total - decay) return (float)max_lr;
    double power = desc->kind == DDP_LR_POLYNOMIAL && desc->power != 0 ? (double)desc->power : 1;
    double remaining = (double)(total - step) / (double)decay;
    double above_min = (max_lr - min_lr) * (power == 1 ? remaining : pow(remaining, power));
    DDP__ROUNDED(above_min);
    return (float)(min_lr + above_min);
}

//== loss scaling ============================================================================== >>impl-scaler
/* ddp_scaler: dynamic loss scaling for 16-bit gradients, as PyTorch's GradScaler. Called by the caller, or by
   ddp_fsdp_step on shards. All ranks of all groups agree whether any gradient is not finite: if one is, every
   rank skips the step and the scale shrinks. */

#define DDP__SCALER_BLOCK ((size_t)4096) /* elements that fit into the cache */

DDPDEF ddp_result ddp_scaler_init(ddp_scaler *scaler, const ddp_scaler_desc *desc) {
    ddp_scaler_desc d = DDP_ZERO;
    DDP__FSDP_CHECK(scaler, "scaler is NULL");
    memset(scaler, 0, sizeof *scaler);
    if (desc) d = *desc;
    if (d.init_scale == 0) d.init_scale = 65536;
    if (d.growth_factor == 0) d.growth_factor = 2;
    if (d.backoff_factor == 0) d.backoff_factor = 0.5f;
    if (d.growth_interval == 0) d.growth_interval = 2000;
    DDP__FSDP_CHECK(d.init_scale > 0 && ddp__is_finite_nonnegative(d.init_scale),
                    "init_scale=%g; use a positive number", (double)d.init_scale);
    DDP__FSDP_CHECK(d.growth_factor > 1 && ddp__is_finite_nonnegative(d.growth_factor),
                    "growth_factor=%g; use a number above 1", (double)d.growth_factor);
    DDP__FSDP_CHECK(d.backoff_factor > 0 && d.backoff_factor < 1,
                    "backoff_factor=%g; use a number between 0 and 1", (double)d.backoff_factor);
    DDP__FSDP_CHECK(d.growth_interval >= 1, "growth_interval=%d; use 1 or more", d.growth_interval);
    DDP__FSDP_CHECK(d.group_count >= 0 && d.group_count <= 4, "group_count=%d; use 0 to 4", d.group_count);
    for (int i = 0; i < d.group_count; i++) DDP__FSDP_CHECK(d.groups[i], "groups[%d] is NULL", i);
    scaler->desc = d;
    scaler->scale = d.init_scale;
    return DDP_OK;
}

DDPDEF float ddp_scaler_scale(const ddp_scaler *scaler) { return scaler ? scaler->scale : 0; }
DDPDEF int ddp_scaler_found_inf(const ddp_scaler *scaler) { return scaler ? scaler->found_inf : 0; }

/* DDP__NON_FINITE_FN(uint16_t, 16) defines ddp__non_finite_16(data, count, mask): whether one of count
   elements is infinite or NaN, which have all bits of the exponent set. mask: these bits. Adding the lowest
   of them then carries into the sign bit. */
#define DDP__NON_FINITE_FN(word, suffix)                                                       \
    typedef word __attribute__((may_alias, aligned(1))) ddp__exponent_##suffix;                \
    static int ddp__non_finite_##suffix(const void *data, size_t count, word mask) {           \
        const ddp__exponent_##suffix *x = (const ddp__exponent_##suffix *)data;                \
        word lowest = (word)(mask & (~mask + 1)), seen = 0;                                    \
        for (; count >= 64; count -= 64, x += 64) /* a fixed number: compilers vectorize it */ \
            for (int i = 0; i < 64; i++) seen |= (word)((x[i] & mask) + lowest);               \
        for (size_t i = 0; i < count; i++) seen |= (word)((x[i] & mask) + lowest);             \
        return (int)(seen >> (suffix - 1) & 1);                                                \
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

/* Multiplies host memory by factor, and returns 1 if an element is not finite. Works in blocks, so that
   memory is read once. */
static int ddp__unscale_host(const ddp_tensor *tensor, size_t count, float factor) {
    unsigned char *at = (unsigned char *)tensor->data;
    size_t size = ddp_dtype_size(tensor->dtype);
    int non_finite = 0;
    for (size_t n; count; at += n * size, count -= n) {
        n = count < DDP__SCALER_BLOCK ? count : DDP__SCALER_BLOCK;
        const ddp_tensor block = {at, tensor->dtype, 1, {(int64_t)n}};
        if (factor != 1) ddp_device_cpu()->scale(&block, 1, factor);
        non_finite |= ddp__non_finite(at, n, tensor->dtype);
    }
    return non_finite;
}

/* Unscales gradients and sets found_inf. scratch: device memory for an exact sum; NULL on the CPU. A device
   tests the sum of squares, which is finite if all elements are (f64: below 1e154). */
static ddp_result ddp__scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients,
                                      int gradient_count, void *scratch) {
    const ddp_device *device = ddp_group_device(group);
    float inverse = (float)(1.0 / (double)scaler->scale);
    ddp_exact_sum sum;
    int32_t found = 0;
    if (scratch) device->fill_zero(scratch, sizeof sum);
    for (const ddp_tensor *g = gradients; g < gradients + gradient_count && !scratch; g++)
        found |= ddp__unscale_host(g, (size_t)ddp_tensor_count(g), inverse);
    if (scratch) {
        if (inverse != 1) device->scale(gradients, gradient_count, inverse);
        device->sum_squares((ddp_exact_sum *)scratch, 0, gradients, gradient_count);
        device->copy(&sum, scratch, sizeof sum);
        double squares = ddp_exact_sum_value(&sum);
        found = !(squares - squares == 0);
        DDP_TRY(ddp_device_check(group));
    }
    /* each group passes its result on to the next one: all ranks of all groups get it */
    for (int i = 0; i < scaler->desc.group_count; i++)
        DDP_TRY(ddp_host_collective(scaler->desc.groups[i], DDP_CALL_ALL_REDUCE, &found, &found, 1, DDP_I32,
                                    DDP_OP_MAX, -1));
    scaler->found_inf = found;
    scaler->unscaled = 1;
    return DDP_OK;
}

DDPDEF ddp_result ddp_scaler_unscale(ddp_scaler *scaler, ddp_group *group, const ddp_tensor *gradients,
                                     int gradient_count) {
    DDP_PUBLIC_CALL(ddp_scaler_unscale);
    void *scratch = NULL;
    DDP__FSDP_CHECK(scaler && group, "scaler or group is NULL");
    DDP__FSDP_CHECK(gradient_count >= 0 && (gradients || !gradient_count),
                    "gradient_count=%d is negative, or gradients is NULL; pass the array of gradients",
                    gradient_count);
    DDP__FSDP_CHECK(scaler->scale > 0, "scaler->scale is 0: every recent step overflowed, or the scaler is "
                                       "not initialized; call ddp_scaler_init first");
    DDP__FSDP_CHECK(
        !scaler->unscaled,
        "gradients were already unscaled in this step; call ddp_scaler_update after each ddp_scaler_unscale");
    for (int i = 0; i < gradient_count; i++) {
        ddp_dtype dtype = gradients[i].dtype;
        DDP__FSDP_CHECK(dtype >= DDP_F32 && dtype <= DDP_BF16,
                        "gradients[%d].dtype is %s; use a floating-point dtype", i, ddp_dtype_name(dtype));
        DDP__FSDP_CHECK(ddp_tensor_count(&gradients[i]) >= 0,
                        "gradients[%d]: ndim=%d or shape is invalid; fill in its ddp_tensor", i,
                        gradients[i].ndim);
        DDP__FSDP_CHECK(gradients[i].data || !ddp_tensor_count(&gradients[i]), "gradients[%d].data is NULL",
                        i);
    }
    const ddp_device *device = ddp_group_device(group);
    DDP_TRY(ddp__fsdp_device_begin(group));
    if (device != ddp_device_cpu()) DDP_TRY(device->alloc(group, sizeof(ddp_exact_sum), &scratch));
    ddp_result result = ddp__scaler_unscale(scaler, group, gradients, gradient_count, scratch);
    if (scratch) device->free(group, scratch);
    return result;
}

/* As PyTorch's _amp_update_scale_, with factors of f32. */
DDPDEF ddp_result ddp_scaler_update(ddp_scaler *scaler) {
    DDP__FSDP_CHECK(scaler, "scaler is NULL");
    DDP__FSDP_CHECK(scaler->unscaled,
                    "no gradients were unscaled in this step; call ddp_scaler_unscale first");
    if (scaler->found_inf) {
        scaler->scale *= scaler->desc.backoff_factor;
        scaler->growth_tracker = 0;
    } else if (++scaler->growth_tracker >= scaler->desc.growth_interval) {
        double grown = (double)scaler->scale * (double)scaler->desc.growth_factor;
        if (ddp__is_finite_nonnegative((double)(float)grown)) scaler->scale = (float)grown;
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
    DDP__FSDP_CHECK(scaler && state, "scaler or state is NULL");
    DDP__FSDP_CHECK(scaler->desc.growth_interval > 0,
                    "the scaler is not initialized; call ddp_scaler_init first");
    if (!(state->scale > 0) || !ddp__is_finite_nonnegative(state->scale)
        || (double)(float)state->scale != state->scale || state->growth_tracker < 0
        || state->growth_tracker > INT32_MAX - 1)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "ddp_scaler_load: scale=%g growth_tracker=%lld is not the state of a working scaler; "
                        "use a state that ddp_scaler_save stored while the scale was above 0",
                        state->scale, (long long)state->growth_tracker);
    scaler->scale = (float)state->scale;
    scaler->growth_tracker = (int)state->growth_tracker;
    scaler->unscaled = scaler->found_inf = 0;
    return DDP_OK;
}

//== checksums ==================================================================================== >>impl-crc
/* CRC-32C of checkpoint files, by CPU instructions or a table. Each rank computes the remainder of its pieces
   of a tensor. ddp__crc_combine adds them to that of the full tensor. */

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

/* CRC-32C (Castagnoli): remainders of polynomials over GF(2). Bits are reversed: bit 31 is x^0. Without the
   usual inversion of the first and the last value, remainders are linear. The remainder of a tensor is the
   xor of the remainders of its runs, each times x^(8 * bytes after the run). Ranks can therefore compute them
   in any order. */
#define DDP__CRC_ONE 0x80000000u

static uint32_t ddp__crc_step(uint32_t remainder) {
    return (remainder >> 1) ^ (0x82f63b78u & (0u - (remainder & 1u)));
}

static uint32_t ddp__crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1, b = ddp__crc_step(b)) product ^= b & (0u - (a >> 31));
    return product;
}

/* x^(8 * size_bytes): the factor of a remainder when size_bytes zero bytes follow. */
static uint32_t ddp__crc_shift(uint64_t size_bytes) {
    uint32_t power = DDP__CRC_ONE, square = DDP__CRC_ONE >> 8;
    for (; size_bytes; size_bytes >>= 1, square = ddp__crc_multiply(square, square))
        if (size_bytes & 1) power = ddp__crc_multiply(square, power);
    return power;
}

/* Every call computes the table again, which takes 2 microseconds. */
static uint32_t ddp__crc_portable(uint32_t remainder, const unsigned char *data, size_t size) {
    uint32_t table[256];
    for (uint32_t i = 0; i < 256 && size; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = ddp__crc_step(table[i]);
    }
    for (; size; size--) remainder = (remainder >> 8) ^ table[(remainder ^ *data++) & 255];
    return remainder;
}

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(DDP__CRC_PORTABLE) /* set by a test */
#if defined(__x86_64__)
static int ddp__crc_hardware(void) { return __builtin_cpu_supports("sse4.2"); }
#define DDP__CRC_WORD(remainder, word) __asm__("crc32q %1, %0" : "+r"(remainder) : "r"(word))
#else
static int ddp__crc_hardware(void) { return (getauxval(AT_HWCAP) >> 7 & 1) != 0; } /* HWCAP_CRC32 */
#define DDP__CRC_WORD(remainder, word) \
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(remainder) : "r"(word))
#endif

typedef uint64_t __attribute__((may_alias, aligned(1))) ddp__crc_word; /* at any address */

/* An instruction takes three cycles, and one can start in each cycle. So three lanes of 16 KiB run at once,
   then lanes of 1 KiB. */
static uint32_t ddp__crc_lanes(uint32_t remainder, const unsigned char *data, size_t size) {
    uint64_t last = remainder;
    for (int small = 0; small < 2; small++) {
        size_t lane = small ? 1024 : 16384;
        uint32_t shift = small ? 0xe4172b16u : 0xbf455269u; /* x^(8 * lane) */
        for (; size >= 3 * lane; size -= 3 * lane, data += 3 * lane) {
            uint64_t first = last, second = 0, third = 0;
            for (size_t i = 0; i < lane; i += 8) {
                DDP__CRC_WORD(first, *(const ddp__crc_word *)(data + i));
                DDP__CRC_WORD(second, *(const ddp__crc_word *)(data + lane + i));
                DDP__CRC_WORD(third, *(const ddp__crc_word *)(data + 2 * lane + i));
            }
            last = ddp__crc_multiply(shift, ddp__crc_multiply(shift, (uint32_t)first) ^ (uint32_t)second)
                   ^ (uint32_t)third;
        }
    }
    for (; size >= 8; size -= 8, data += 8) DDP__CRC_WORD(last, *(const ddp__crc_word *)data);
    return ddp__crc_portable((uint32_t)last, data, size);
}
#else
static int ddp__crc_hardware(void) { return 0; }
#define ddp__crc_lanes ddp__crc_portable
#endif

/* The remainder after size more bytes. It is 0 before the first byte. */
static uint32_t ddp__crc_update(uint32_t remainder, const void *data, size_t size) {
    return (ddp__crc_hardware() ? ddp__crc_lanes : ddp__crc_portable)(remainder, (const unsigned char *)data,
                                                                      size);
}

/* The CRC-32C of size_bytes bytes that have this remainder. */
static uint32_t ddp__crc_finish(uint32_t remainder, uint64_t size_bytes) {
    return ~(remainder ^ ddp__crc_multiply(ddp__crc_shift(size_bytes), 0xffffffffu));
}
static uint32_t ddp__crc32c(const void *data, size_t size) {
    return ~ddp__crc_update(0xffffffffu, data, size);
}

/* Collective. Replaces crc by the xor over ranks. Each bit is sent as a byte: the lowest bit of a sum is the
   xor of the bits. */
static ddp_result ddp__crc_combine(ddp_group *group, uint32_t *crc, int count) {
    unsigned char bits[1024];
    for (int first = 0; first < count; first += 32) {
        int n = count - first < 32 ? count - first : 32;
        for (int b = 0; b < n * 32; b++) bits[b] = (unsigned char)(crc[first + b / 32] >> b % 32 & 1);
        DDP_TRY(ddp_host_collective(group, DDP_CALL_ALL_REDUCE, bits, bits, (size_t)n * 32, DDP_U8,
                                    DDP_OP_SUM, -1));
        memset(crc + first, 0, (size_t)n * sizeof *crc);
        for (int b = 0; b < n * 32; b++) crc[first + b / 32] |= (uint32_t)(bits[b] & 1) << b % 32;
    }
    return DDP_OK;
}

//== JSON ======================================================================================== >>impl-json
/* A JSON reader for file headers, indexes and state.json, and a text buffer (ddp__text) that writes them. The
   input is not trusted. */

/* A part of a text. A zero follows it; it may also contain zeros. */
typedef struct ddp__string_view {
    const char *text;
    size_t length;
} ddp__string_view;

/* Reads the text [at, end) from front to back, never beyond its end. Strings are decoded in place. After an
   error every function returns 0; `error` is the reason and `at` the position. */
typedef struct ddp__json {
    char *begin, *at, *end;
    const char *error;
    int depth;
} ddp__json;

static ddp__json ddp__json_reader(char *text, size_t length) {
    ddp__json json = {text, text, text + length, NULL, 0};
    return json;
}

static int ddp__json_fail(ddp__json *j, const char *reason) {
    if (!j->error) j->error = reason;
    return 0;
}

/* The next character after white space, which stays unread; 0 at the end. */
static char ddp__json_peek(ddp__json *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t')) j->at++;
    return j->at < j->end ? *j->at : '\0';
}

/* Reads c, if it is next. */
static int ddp__json_accept(ddp__json *j, char c) {
    if (j->error || ddp__json_peek(j) != c) return 0;
    j->at++;
    return 1;
}

static int ddp__json_expect(ddp__json *j, char c, const char *reason) {
    return ddp__json_accept(j, c) ? 1 : ddp__json_fail(j, reason);
}

/* Bytes of the UTF-8 character at the start of [at, end), 0 if invalid: an overlong form, a surrogate,
   above U+10FFFF, or truncated. */
static int ddp__utf8_length(const char *at, const char *end) {
    const unsigned char *c = (const unsigned char *)at;
    int length = 0;
    if (c[0] < 0x80)
        length = 1;
    else if (c[0] >= 0xc2 && c[0] <= 0xdf)
        length = 2;
    else if ((c[0] & 0xf0) == 0xe0)
        length = 3;
    else if (c[0] >= 0xf0 && c[0] <= 0xf4)
        length = 4;
    if (length == 0 || end - at < length) return 0;
    for (int i = 1; i < length; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    if ((c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xed && c[1] > 0x9f) || (c[0] == 0xf0 && c[1] < 0x90)
        || (c[0] == 0xf4 && c[1] > 0x8f))
        return 0;
    return length;
}

static int ddp__json_hex(ddp__json *j, int count, uint32_t *value) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    *value = 0;
    for (int i = 0; i < count; i++, j->at++) {
        const char *digit = j->at < j->end && *j->at ? strchr(digits, *j->at) : NULL;
        if (!digit) return ddp__json_fail(j, "expected a hexadecimal digit");
        *value = *value << 4 | ((uint32_t)(digit - digits) & 15);
    }
    return 1;
}

/* Writes the character of an escape as UTF-8 to *out. It is never longer than the escape. The caller
   has read the backslash. */
static int ddp__json_escape(ddp__json *j, char **out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *known = j->at < j->end && *j->at ? strchr(from, *j->at) : NULL;
    uint32_t code, second = 0;
    if (known) {
        j->at++;
        *(*out)++ = to[known - from];
        return 1;
    }
    if (j->at == j->end || *j->at++ != 'u') return ddp__json_fail(j, "invalid escape sequence");
    if (!ddp__json_hex(j, 4, &code)) return 0;
    if ((code & 0xf800) == 0xd800) { /* a surrogate pair: each has ten bits of the character */
        int paired = code < 0xdc00 && j->end - j->at > 2 && *j->at++ == '\\' && *j->at++ == 'u'
                     && ddp__json_hex(j, 4, &second);
        if (!paired || (second & 0xfc00) != 0xdc00) return ddp__json_fail(j, "incomplete surrogate pair");
        code = 0x10000 + ((code & 0x3ff) << 10) + (second & 0x3ff);
    }
    /* bytes after the first, of six bits each */
    unsigned more = (code >= 0x80u) + (unsigned)(code >= 0x800) + (unsigned)(code >= 0x10000);
    *(*out)++ = (char)(more ? (0xff00u >> (more + 1)) | code >> 6 * more : code);
    while (more-- > 0) *(*out)++ = (char)(0x80 | (code >> 6 * more & 63));
    return 1;
}

static int ddp__json_string(ddp__json *j, ddp__string_view *string) {
    char *out;
    if (!ddp__json_expect(j, '"', "expected a string")) return 0;
    for (string->text = out = j->at; j->at < j->end && *j->at != '"';) {
        int length = (unsigned char)*j->at < 0x20 ? 0 : ddp__utf8_length(j->at, j->end);
        if (length == 0) return ddp__json_fail(j, "invalid UTF-8 or a control character");
        if (*j->at == '\\') {
            j->at++;
            if (!ddp__json_escape(j, &out)) return 0;
            continue;
        }
        memmove(out, j->at, (size_t)length);
        out += length;
        j->at += length;
    }
    if (j->at == j->end) return ddp__json_fail(j, "unterminated string");
    j->at++;
    *out = '\0'; /* where the quote was, or before */
    string->length = (size_t)(out - string->text);
    return 1;
}

static int ddp__json_digits(ddp__json *j) {
    const char *first = j->at;
    while (j->at < j->end && *j->at >= '0' && *j->at <= '9') j->at++;
    return j->at > first ? 1 : ddp__json_fail(j, "expected a digit");
}

/* Reads a number. kind 'u': a u64, in *value. 'i': an i64, its bits in *value. 'n': any, skipped. */
static int ddp__json_number(ddp__json *j, char kind, uint64_t *value) {
    int negative = ddp__json_accept(j, '-');
    const char *first = j->at; /* no white space may follow a sign */
    uint64_t max = kind == 'u' ? UINT64_MAX : (uint64_t)INT64_MAX + (uint64_t)negative;
    *value = 0;
    if (j->error || !ddp__json_digits(j)) return 0;
    if (*first == '0' && j->at - first > 1) return ddp__json_fail(j, "number with a leading zero");
    for (; kind != 'n' && first < j->at; first++) {
        uint64_t digit = (uint64_t)(*first - '0');
        if (*value > (max - digit) / 10) return ddp__json_fail(j, "number out of range");
        *value = *value * 10 + digit;
    }
    if (negative) *value = UINT64_C(0) - *value;
    if (kind == 'u' && negative) return ddp__json_fail(j, "negative number");
    if (kind != 'n') {
        int has_fraction = j->at < j->end && (*j->at == '.' || *j->at == 'e' || *j->at == 'E');
        return has_fraction ? ddp__json_fail(j, "expected an integer") : 1;
    }
    if (j->at < j->end && *j->at == '.') {
        j->at++;
        if (!ddp__json_digits(j)) return 0;
    }
    if (j->at == j->end || (*j->at != 'e' && *j->at != 'E')) return 1;
    j->at++;
    if (j->at < j->end && (*j->at == '+' || *j->at == '-')) j->at++;
    return ddp__json_digits(j);
}

/* Moves to the next item of a list or object: opens the bracket if *count, the number of items until now, is
   0; otherwise reads a comma. Returns 0 at the closing bracket. */
static int ddp__json_next_item(ddp__json *j, const char *brackets, int *count) {
    if (*count == 0
        && !ddp__json_expect(j, brackets[0], *brackets == '{' ? "expected an object" : "expected a list"))
        return 0;
    if (j->error || ddp__json_accept(j, brackets[1])) return 0;
    return (*count)++ == 0 || ddp__json_expect(j, ',', "expected a comma or a closing bracket");
}

/* Moves to the next member of an object and reads its name. Its value is next. */
static int ddp__json_next_member(ddp__json *j, int *count, ddp__string_view *name) {
    return ddp__json_next_item(j, "{}", count) && ddp__json_string(j, name)
           && ddp__json_expect(j, ':', "expected a colon");
}

/* Skips one value of any kind. */
static int ddp__json_skip(ddp__json *j) {
    static const char *const words[] = {"true", "false", "null"};
    ddp__string_view string;
    uint64_t value;
    int count = 0;
    char c = ddp__json_peek(j);
    if (c == '{' || c == '[') {
        if (j->depth++ == 64) return ddp__json_fail(j, "brackets are nested too deeply");
        while (c == '{' ? ddp__json_next_member(j, &count, &string) : ddp__json_next_item(j, "[]", &count))
            (void)ddp__json_skip(j);
        j->depth--;
        return j->error == NULL;
    }
    if (c == '"') return ddp__json_string(j, &string);
    for (size_t i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(j->end - j->at) >= n && memcmp(j->at, words[i], n) == 0) {
            j->at += n;
            return 1;
        }
    }
    return c == '-' || (c >= '0' && c <= '9') ? ddp__json_number(j, 'n', &value)
                                              : ddp__json_fail(j, "expected a value");
}

static int ddp__json_end(ddp__json *j) {
    return !j->error
           && (!ddp__json_peek(j) && j->at == j->end ? 1
                                                     : ddp__json_fail(j, "unexpected data after the end"));
}

/* Sets the error line for a file. Its JSON begins at byte `start`. */
static ddp_result ddp__json_file_error(const char *dir, const char *name, size_t start, const ddp__json *j) {
    return ddp_fail(DDP_ERR_CORRUPT, "%s/%s: %sdamaged at byte %zu: %s", dir, name,
                    start ? "the header is " : "", start + (size_t)(j->at - j->begin), j->error);
}

/* Compares two records by the ddp__string_view at their start. */
static int ddp__string_compare(const void *a, const void *b) {
    const ddp__string_view *left = (const ddp__string_view *)a, *right = (const ddp__string_view *)b;
    int order = memcmp(left->text, right->text, left->length < right->length ? left->length : right->length);
    return order ? order : (left->length > right->length) - (left->length < right->length);
}

static ddp__string_view ddp__string_view_of(const char *text) {
    ddp__string_view words = {text, strlen(text)};
    return words;
}
static int ddp__string_equals(ddp__string_view words, const char *text) {
    return words.length == strlen(text) && memcmp(words.text, text, words.length) == 0;
}

/* A text buffer that grows. failed: out of memory. */
typedef struct ddp__text {
    ddp_group *group;
    char *data;
    size_t length, capacity;
    int failed;
} ddp__text;

/* Appends formatted text. If it does not fit, the buffer grows and a second try follows. */
static __attribute__((format(printf, 2, 3))) void ddp__text_append(ddp__text *d, const char *format, ...) {
    for (int grown = 0; grown < 2 && !d->failed; grown++) {
        va_list args;
        va_start(args, format);
        size_t more = (size_t)vsnprintf(d->capacity ? d->data + d->length : NULL, d->capacity - d->length,
                                        format, args);
        va_end(args);
        if (more < d->capacity - d->length) {
            d->length += more;
            return;
        }
        d->capacity = (d->length + more) * 2 + 4096;
        char *larger = (char *)ddp_host_alloc(d->group, d->capacity);
        if (larger && d->length) memcpy(larger, d->data, d->length);
        ddp_host_free(d->group, d->data);
        d->data = larger;
        d->failed = !larger;
    }
}

/* Appends a JSON string: `start`, which needs no escapes, and text. */
static void ddp__text_append_json(ddp__text *d, const char *start, const char *text) {
    static const char special[] =
        "\"\\\1\2\3\4\5\6\7\10\11\12\13\14\15\16\17\20\21\22\23\24\25\26\27\30\31\32\33\34\35\36\37";
    ddp__text_append(d, "\"%s", start);
    for (size_t plain; *text; text += plain ? plain : 1) {
        plain = strcspn(text, special);
        if (plain)
            ddp__text_append(d, "%.*s", (int)plain, text);
        else
            ddp__text_append(d, (unsigned char)*text < 32 ? "\\u%04x" : "\\%c", *text);
    }
    ddp__text_append(d, "\"");
}

//== tensor files ========================================================================= >>impl-safetensors
/* Headers of safetensors files: parsing, checking, and the names of dtypes. Used by >>impl-load-files. The
   input is not trusted. */

#define DDP__HEADER_MAX ((uint64_t)100 << 20) /* bytes of JSON that the format allows */

/* The dtypes of the format; for those without a ddp_dtype only the size is known. */
static const struct ddp__file_dtype {
    const char *name;
    ddp_dtype dtype;
    int size;
} ddp__file_dtypes[] = {
    {"F32", DDP_F32, 4},
    {"F64", DDP_F64, 8},
    {"F16", DDP_F16, 2},
    {"BF16", DDP_BF16, 2},
    {"I8", DDP_I8, 1},
    {"U8", DDP_U8, 1},
    {"I32", DDP_I32, 4},
    {"I64", DDP_I64, 8},
    {"U64", DDP_U64, 8},
    {"I16", DDP_DTYPE_DEFAULT, 2},
    {"BOOL", DDP_DTYPE_DEFAULT, 1},
    {"U16", DDP_DTYPE_DEFAULT, 2},
    {"U32", DDP_DTYPE_DEFAULT, 4},
    {"F8_E4M3", DDP_DTYPE_DEFAULT, 1},
    {"F8_E5M2", DDP_DTYPE_DEFAULT, 1},
    {"C64", DDP_DTYPE_DEFAULT, 8},
};
#define DDP__FILE_DTYPES ((int)(sizeof ddp__file_dtypes / sizeof ddp__file_dtypes[0]))

/* The name of a ddp_dtype, or NULL. */
static const char *ddp__file_dtype_name(ddp_dtype dtype) {
    for (int i = 0; i < DDP__FILE_DTYPES; i++)
        if (ddp__file_dtypes[i].dtype == dtype && dtype != DDP_DTYPE_DEFAULT) return ddp__file_dtypes[i].name;
    return NULL;
}

/* A tensor as a file's header describes it. */
typedef struct ddp__file_tensor {
    ddp__string_view name;
    const struct ddp__file_dtype *dtype;
    int ndim; /* if it exceeds DDP_MAX_NDIM, shape has the first ones */
    int64_t shape[DDP_MAX_NDIM];
    uint64_t count;      /* elements */
    uint64_t begin, end; /* bytes, from the end of the header */
    uint32_t crc;
    int has_crc;
} ddp__file_tensor;

/* A tensor file. Its header, once read, is a list of tensors sorted by name. */
typedef struct ddp__load_file {
    const char *dir, *name;
    int kind;                 /* 0 = model-*, 1 = optimizer-*; 0 for a model of another program */
    uint32_t crc, want_crc;   /* of the header */
    char *text;               /* the header; names of the records are parts of it */
    uint64_t data_at;         /* bytes before the tensors */
    const unsigned char *map; /* of all bytes of the file */
    size_t map_bytes;
    ddp__file_tensor *records;
    int count;
} ddp__load_file;

typedef struct ddp__metadata_entry {
    ddp__string_view key, value;
} ddp__metadata_entry;

static int ddp__file_tensor_compare_offset(const void *a, const void *b) {
    const ddp__file_tensor *left = (const ddp__file_tensor *)a, *right = (const ddp__file_tensor *)b;
    int order = (left->begin > right->begin) - (left->begin < right->begin);
    return order ? order : (left->end > right->end) - (left->end < right->end);
}

static ddp__file_tensor *ddp__file_tensor_find(const ddp__load_file *file, ddp__string_view name) {
    if (file->count == 0) return NULL;
    return (ddp__file_tensor *)bsearch(&name, file->records, (size_t)file->count, sizeof *file->records,
                                       ddp__string_compare);
}

/* Sets the error line for a tensor of a file: its name without control characters, its byte range in the
   file, and the formatted text. */
static __attribute__((format(printf, 4, 5))) ddp_result ddp__file_tensor_fail(ddp_result result,
                                                                              const ddp__load_file *file,
                                                                              const ddp__file_tensor *r,
                                                                              const char *format, ...) {
    char name[100], what[500];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(name, sizeof name, "%s", r->name.text);
    for (char *c = name; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    return ddp_fail(result, "%s/%s: tensor '%s' at bytes [%llu, %llu) of the file %s", file->dir, file->name,
                    name, (unsigned long long)(file->data_at + r->begin),
                    (unsigned long long)(file->data_at + r->end), what);
}

/* {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, in any order. */
static int ddp__file_tensor_read(ddp__json *j, ddp__file_tensor *r) {
    static const char *const names[] = {"dtype", "shape", "data_offsets"};
    static const char wrong[] = "expected dtype, shape and data_offsets, each once";
    const uint64_t max = (uint64_t)INT64_MAX / 16;
    ddp__string_view word;
    uint64_t value;
    int keys = 0, seen = 0;
    r->count = 1;
    while (ddp__json_next_member(j, &keys, &word)) {
        int which = 0, count = 0;
        while (which < 3 && !ddp__string_equals(word, names[which])) which++;
        if (which == 3 || (seen >> which & 1)) return ddp__json_fail(j, wrong);
        seen |= 1 << which;
        if (which == 0) {
            if (!ddp__json_string(j, &word)) return 0;
            for (int i = 0; i < DDP__FILE_DTYPES; i++)
                if (ddp__string_equals(word, ddp__file_dtypes[i].name)) r->dtype = &ddp__file_dtypes[i];
            if (!r->dtype) return ddp__json_fail(j, "unknown dtype");
            continue;
        }
        while (ddp__json_next_item(j, "[]", &count) && ddp__json_number(j, 'u', &value)) {
            if (which == 2) {
                *(count == 1 ? &r->begin : &r->end) = value;
                continue;
            }
            if (value > max || (value && r->count > max / value))
                return ddp__json_fail(j, "shape out of range");
            r->count *= value;
            if (r->ndim++ < DDP_MAX_NDIM) r->shape[r->ndim - 1] = (int64_t)value;
        }
        if (which == 2 && count != 2) return ddp__json_fail(j, "expected two numbers in data_offsets");
    }
    return seen == 7 && !j->error ? 1 : ddp__json_fail(j, wrong);
}

/* Reads eight hexadecimal digits. */
static int ddp__hex_read(ddp__string_view word, uint32_t *value) {
    ddp__json digits = ddp__json_reader((char *)(uintptr_t)word.text, word.length);
    return word.length == 8 && ddp__json_hex(&digits, 8, value);
}

/* Checks that the tensors fill the data without overlaps and gaps, and that their sizes match dtype and
   shape. Sorts them by name. "crc32c:name" in the metadata is the checksum of a tensor. */
static ddp_result ddp__header_check(ddp__load_file *file, uint64_t data_bytes,
                                    const ddp__metadata_entry *pairs, int pair_count) {
    ddp__file_tensor *r = file->records;
    uint64_t at = 0;
    qsort(r, (size_t)file->count, sizeof *r, ddp__file_tensor_compare_offset);
    for (int i = 0; i < file->count; at = r[i++].end) {
        const char *what = NULL;
        if (r[i].end < r[i].begin || r[i].end > data_bytes)
            what = "is outside the file";
        else if (r[i].end - r[i].begin != r[i].count * (uint64_t)r[i].dtype->size)
            what = "does not have the size of its dtype and shape";
        else if (r[i].begin < at)
            what = "overlaps the tensor before it";
        else if (r[i].begin > at)
            what = "has unused bytes before it";
        if (what) return ddp__file_tensor_fail(DDP_ERR_CORRUPT, file, &r[i], "%s", what);
    }
    if (at != data_bytes)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s/%s: the tensors end at byte %llu, but the file has %llu bytes of data", file->dir,
                        file->name, (unsigned long long)at, (unsigned long long)data_bytes);
    qsort(r, (size_t)file->count, sizeof *r, ddp__string_compare);
    for (int i = 1; i < file->count; i++)
        if (ddp__string_compare(&r[i - 1], &r[i]) == 0)
            return ddp__file_tensor_fail(DDP_ERR_CORRUPT, file, &r[i], "has the name of another tensor");
    for (int i = 0; i < pair_count; i++) {
        if (pairs[i].key.length < 7 || memcmp(pairs[i].key.text, "crc32c:", 7) != 0) continue;
        const ddp__string_view name = {pairs[i].key.text + 7, pairs[i].key.length - 7};
        r = ddp__file_tensor_find(file, name);
        if (!r) continue;
        if (!ddp__hex_read(pairs[i].value, &r->crc))
            return ddp__file_tensor_fail(DDP_ERR_CORRUPT, file, r,
                                         "has a checksum that is not 8 hexadecimal digits");
        r->has_crc = 1;
    }
    return DDP_OK;
}

/* Reads and checks the header in file->text, which strings are decoded in. data_bytes: bytes after the
   header. */
static ddp_result ddp__header_read(ddp_group *group, ddp__load_file *file, size_t length,
                                   uint64_t data_bytes) {
    ddp__json j = ddp__json_reader(file->text, length);
    size_t colons = 1;
    int pair_count = 0, count = 0, metadata = 0;
    file->data_at = 8 + length;
    /* room: at most one key for each colon; a tensor has four colons */
    for (size_t i = 0; i < length; i++) colons += file->text[i] == ':';
    file->records = (ddp__file_tensor *)ddp_host_alloc(group, (colons / 4 + 1) * sizeof *file->records);
    ddp__metadata_entry *pairs = file->records
                                     ? (ddp__metadata_entry *)ddp_host_alloc(group, colons * sizeof *pairs)
                                     : NULL;
    if (!pairs) return DDP_ERR_NO_MEMORY;
    if (length == 0 || *file->text != '{') (void)ddp__json_fail(&j, "expected an object");
    for (ddp__string_view name; ddp__json_next_member(&j, &count, &name);) {
        ddp__file_tensor *record = &file->records[file->count];
        record->name = name;
        if (!ddp__string_equals(name, "__metadata__"))
            file->count += ddp__file_tensor_read(&j, record);
        else if (metadata++)
            (void)ddp__json_fail(&j, "duplicate __metadata__");
        else
            for (int n = 0; ddp__json_next_member(&j, &n, &pairs[pair_count].key);)
                pair_count += ddp__json_string(&j, &pairs[pair_count].value);
    }
    qsort(pairs, (size_t)pair_count, sizeof *pairs, ddp__string_compare);
    for (int i = 1; i < pair_count; i++)
        if (ddp__string_compare(&pairs[i - 1], &pairs[i]) == 0)
            (void)ddp__json_fail(&j, "duplicate key in __metadata__");
    ddp_result result = ddp__json_end(&j) ? ddp__header_check(file, data_bytes, pairs, pair_count)
                                          : ddp__json_file_error(file->dir, file->name, 8, &j);
    ddp_host_free(group, pairs);
    return result;
}

//== checkpoints: files and folders ============================================================= >>impl-files
/* Files and folders of a checkpoint: paths, reading, writing, syncing, deleting. Used by save and load. */

#include <dirent.h>
#include <sys/syscall.h>

#define DDP__STATE_FILE "state.json"
#define DDP__STATE_START "{\"format\": \"ddp checkpoint\""
#define DDP__DIR_MAX 1000                  /* bytes of a folder's path, ... */
#define DDP__PATH_MAX (DDP__DIR_MAX + 300) /* ... and of a path in it */

static const char *const ddp__file_kind_names[2] = {"model", "optimizer"};

static ddp_result ddp__file_fail(const char *what, const char *path) {
    int error = errno;
    return ddp_fail(DDP_ERR_SYSTEM, "%s %s: %s (errno %d)", what, path, strerror(error), error);
}

/* An open file. fd is negative if it could not be opened: DDP__FILE_MISSING if it does not exist. */
enum { DDP__FILE_MISSING = -2 };
typedef struct ddp__file {
    int fd;
    uint64_t size; /* when it was opened */
    char path[DDP__PATH_MAX];
} ddp__file;

static void ddp__file_close(const ddp__file *file) {
    if (file->fd >= 0) close(file->fd);
}
#define DDP__AUTO_CLOSE \
    __attribute__((cleanup(ddp__file_close))) /* of a ddp__file that is passed to ddp__file_open */

/* Opens a file of a folder. It must be a regular file: a FIFO could block, and through a symbolic link or a
   device other users could choose the data that is read or overwritten. */
static ddp_result ddp__file_open(const char *dir, const char *name, int flags, ddp__file *file) {
    const char *kind = "a device or a socket";
    struct stat info;
    snprintf(file->path, sizeof file->path, "%.*s/%s", DDP__DIR_MAX + 10, dir, name);
    file->fd = open(file->path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    int missing = file->fd < 0 && errno == ENOENT;
    ddp_result result = file->fd < 0 || fstat(file->fd, &info) != 0
                            ? ddp__file_fail("cannot open", file->path)
                            : DDP_OK;
    if ((result == DDP_OK || lstat(file->path, &info) == 0) && !S_ISREG(info.st_mode)) {
        if (S_ISLNK(info.st_mode)) kind = "a symbolic link";
        if (S_ISFIFO(info.st_mode)) kind = "a FIFO";
        if (S_ISDIR(info.st_mode)) kind = "a folder";
        result = ddp_fail(DDP_ERR_SYSTEM, "%s is %s; replace it by a regular file", file->path, kind);
    }
    if (result != DDP_OK) {
        ddp__file_close(file);
        file->fd = missing ? DDP__FILE_MISSING : -1;
        return result;
    }
    file->size = (uint64_t)info.st_size;
    return DDP_OK;
}

/* Syncs and closes a written file or folder. EINVAL is ignored: the file system cannot sync a folder. */
static ddp_result ddp__file_sync_close(int fd, const char *path, ddp_result result) {
    if (result == DDP_OK && fsync(fd) != 0 && errno != EINVAL) result = ddp__file_fail("cannot sync", path);
    if (close(fd) != 0 && result == DDP_OK) result = ddp__file_fail("cannot close", path);
    return result;
}

/* Reads or writes size bytes of a file, from byte `at` on. */
enum { DDP__FILE_READ, DDP__FILE_WRITE };
static ddp_result ddp__file_transfer(const ddp__file *file, int direction, const void *data, uint64_t size,
                                     uint64_t at) {
    char *memory = (char *)(uintptr_t)data;
    for (ssize_t n; size; memory += n, at += (uint64_t)n, size -= (uint64_t)n) {
        n = direction == DDP__FILE_WRITE ? pwrite(file->fd, memory, (size_t)size, (off_t)at)
                                         : pread(file->fd, memory, (size_t)size, (off_t)at);
        if (n == 0 && direction == DDP__FILE_READ)
            return ddp_fail(DDP_ERR_CORRUPT,
                            "%s: truncated: the file ends at byte %llu, %llu bytes are missing", file->path,
                            (unsigned long long)at, (unsigned long long)size);
        if (n == 0) errno = ENOSPC;
        if (n == 0 || (n < 0 && errno != EINTR))
            return ddp__file_fail(direction == DDP__FILE_WRITE ? "cannot write" : "cannot read", file->path);
        if (n < 0) n = 0;
    }
    return DDP_OK;
}

/* Starts to write bytes back to the disk, so that the later sync takes less time. */
static void ddp__file_start_writeback(int fd, uint64_t at, uint64_t size) {
#if defined(SYS_sync_file_range)
    (void)syscall(SYS_sync_file_range, fd, (off_t)at, (off_t)size, 2 /* SYNC_FILE_RANGE_WRITE */);
#endif
}

/* Creates a file with size bytes of data. data NULL: only reserves them on the disk. */
static ddp_result ddp__file_create(const char *dir, const char *name, const void *data, uint64_t size) {
    struct rlimit limit;
    ddp__file file;
    DDP_TRY(ddp__file_open(dir, name, O_CREAT | O_WRONLY, &file));
    errno = 0;
    /* writing beyond the limit would raise a signal */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && size > limit.rlim_cur)
        errno = EFBIG;
    else if (!data && syscall(SYS_fallocate, file.fd, 0, (off_t)0, (off_t)size) == 0)
        errno = 0;
    if (!data && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL))
        errno = ftruncate(file.fd, (off_t)size) == 0 ? 0 : errno;
    ddp_result result = errno ? ddp__file_fail("cannot allocate space for", file.path) : DDP_OK;
    if (data && result == DDP_OK) result = ddp__file_transfer(&file, DDP__FILE_WRITE, data, size, 0);
    return ddp__file_sync_close(file.fd, file.path, result);
}

static ddp_result ddp__folder_sync(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? ddp__file_fail("cannot open", path) : ddp__file_sync_close(fd, path, DDP_OK);
}

static int ddp__is_checkpoint_file(const char *name) {
    const char *dot = strchr(name, '.');
    for (int kind = 0; kind < 2; kind++) {
        size_t length = strlen(ddp__file_kind_names[kind]);
        if (!dot || strncmp(name, ddp__file_kind_names[kind], length) != 0) continue;
        if (strcmp(name + length, ".safetensors.index.json") == 0
            || (name[length] == '-' && strcmp(dot, ".safetensors") == 0))
            return 1;
    }
    return strcmp(name, DDP__STATE_FILE) == 0;
}

static int ddp__is_folder_entry(const struct dirent *entry) {
    return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

/* Checks that a folder may be replaced. *found: 1 = it has a checkpoint of ours, complete or not; 0 = it is
   empty or missing. Anything else is DDP_ERR_INVALID. */
static ddp_result ddp__folder_check(const char *path, int *found) {
    ddp__file file;
    char other_file[100] = "files without " DDP__STATE_FILE, start[sizeof DDP__STATE_START] = "";
    struct dirent **entry;
    int ours = 0, count = scandir(path, &entry, ddp__is_folder_entry, alphasort);
    *found = count > 0;
    if (count < 0) return errno == ENOENT ? DDP_OK : ddp__file_fail("cannot open", path);
    if (count && ddp__file_open(path, DDP__STATE_FILE, O_RDONLY, &file) == DDP_OK) {
        ssize_t size = pread(file.fd, start, sizeof start - 1, 0);
        ours = size >= 0 && strncmp(start, DDP__STATE_START, (size_t)size) == 0;
        ddp__file_close(&file);
    }
    for (int i = 0; i < count; free(entry[i++])) {
        if (ddp__is_checkpoint_file(entry[i]->d_name)) continue;
        ours = 0;
        snprintf(other_file, sizeof other_file, "%.90s", entry[i]->d_name);
    }
    free(entry);
    if (!count || ours) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID,
                    "%s has '%s', which is not part of a checkpoint, and a save replaces the folder; use "
                    "another folder, or move it away",
                    path, other_file);
}

/* Deletes a folder that ddp__folder_check accepts. state.json, the last file by name, goes last: it shows
   that the folder is ours. */
static ddp_result ddp__folder_delete(const char *path) {
    struct dirent **entry;
    ddp_result result = DDP_OK;
    int found;
    DDP_TRY(ddp__folder_check(path, &found));
    int count = scandir(path, &entry, ddp__is_folder_entry, alphasort);
    if (count < 0) return errno == ENOENT ? DDP_OK : ddp__file_fail("cannot open", path);
    for (int i = 0; i < count; free(entry[i++])) {
        char name[DDP__PATH_MAX];
        snprintf(name, sizeof name, "%.*s/%s", DDP__DIR_MAX + 20, path, entry[i]->d_name);
        if (result == DDP_OK && unlink(name) != 0 && errno != ENOENT)
            result = ddp__file_fail("cannot delete", name);
    }
    free(entry);
    return result != DDP_OK || rmdir(path) == 0 ? result : ddp__file_fail("cannot delete", path);
}

/* Writes dir to out, without slashes at its end and, if it exists, without symbolic links. */
static ddp_result ddp__folder_path(const char *dir, char out[DDP__PATH_MAX]) {
    size_t length = dir ? strlen(dir) : 0;
    char *real = length ? realpath(dir, NULL) : NULL;
    if (length && !real && readlink(dir, out, 1) >= 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "dir=%.200s is a symbolic link to a missing folder; create that folder", dir);
    while (length > 1 && dir[length - 1] == '/') length--;
    if (real) length = strlen(real);
    if (length && length <= DDP__DIR_MAX)
        snprintf(out, DDP__PATH_MAX, "%.*s", (int)length, real ? real : dir);
    free(real);
    return length && length <= DDP__DIR_MAX
               ? DDP_OK
               : ddp_fail(DDP_ERR_INVALID,
                          "dir is NULL, empty or longer than %d bytes; use the path of a folder",
                          DDP__DIR_MAX);
}

static void ddp__parent_path(const char *path, char out[DDP__PATH_MAX]) {
    const char *slash = strrchr(path, '/');
    if (slash && slash != path)
        snprintf(out, DDP__PATH_MAX, "%.*s", (int)(slash - path), path);
    else
        snprintf(out, DDP__PATH_MAX, "%s", slash ? "/" : ".");
}

enum { DDP__SIBLING_NEW = -1, DDP__SIBLING_OLD }; /* or the number of an older checkpoint */
static void ddp__sibling_path(const char *dir, int which, char out[DDP__PATH_MAX]) {
    if (which > 0)
        snprintf(out, DDP__PATH_MAX, "%.*s.%d", DDP__DIR_MAX, dir, which);
    else
        snprintf(out, DDP__PATH_MAX, "%.*s.%s", DDP__DIR_MAX, dir, which == DDP__SIBLING_OLD ? "old" : "tmp");
}

//== checkpoints: boxes ========================================================================= >>impl-boxes
/* The part of each tensor that a rank holds is a box. Save and load see a checkpoint as a list of tensors,
   the same on every rank, with this rank's box of each. Together the boxes of all ranks tile each tensor.

       tensor, 4 x 5       rank 0: offset 0 0, extent 4 2     in memory: |0 1 5 6 10 11 15 16|
         0  1 | 2  3  4    rank 1: offset 0 2, extent 4 3     in memory: |2 3 4 7 8 9 12 13 14 17 18 19|
         5  6 | 7  8  9
        10 11 |12 13 14    in a file, by runs of contiguous elements:
        15 16 |17 18 19      |0 1|2 3 4|5 6|7 8 9|10 11|12 13 14|15 16|17 18 19|
                              r0   r1   r0   r1    r0     r1      r0     r1 */

/* This rank's box of a tensor: offset and extent in the full tensor; row-major and contiguous at data, in
   host memory. data NULL or an empty extent: no elements. */
typedef struct ddp__checkpoint_slice {
    const char *name;
    ddp_dtype dtype;
    int ndim;
    int64_t shape[DDP_MAX_NDIM], offset[DDP_MAX_NDIM], extent[DDP_MAX_NDIM];
    void *data;
    int file_kind;  /* 0 = model-*, 1 = optimizer-* */
    int tied_to;    /* loading: 1 + the number of an earlier tensor that files may store under this name */
    int may_repeat; /* 1 = other ranks may hold the same box; the lowest of them writes it */
} ddp__checkpoint_slice;

static uint64_t ddp__slice_tensor_bytes(const ddp__checkpoint_slice *s) {
    uint64_t bytes = ddp_dtype_size(s->dtype);
    for (int d = 0; d < s->ndim; d++) bytes *= (uint64_t)s->shape[d];
    return bytes;
}

static uint64_t ddp__slice_box_bytes(const ddp__checkpoint_slice *s) {
    uint64_t bytes = s->data ? ddp_dtype_size(s->dtype) : 0;
    for (int d = 0; d < s->ndim; d++) bytes *= (uint64_t)s->extent[d];
    return bytes;
}

/* Iterates over a box in runs of elements that are contiguous in the tensor, in ascending order. In the box
   they follow each other in the same order. */
typedef struct ddp__box_runs {
    const ddp__checkpoint_slice *slice;
    int outer; /* dimensions to iterate over; the remaining inner ones form one run */
    int64_t index[DDP_MAX_NDIM];
    uint64_t length;      /* elements of a run */
    uint64_t done, count; /* runs that were returned; all runs */
} ddp__box_runs;

static ddp__box_runs ddp__runs_of(const ddp__checkpoint_slice *s) {
    ddp__box_runs runs = DDP_ZERO;
    runs.slice = s;
    runs.length = runs.count = 1;
    for (runs.outer = s->ndim; runs.outer > 0;) {
        int d = --runs.outer;
        runs.length *= (uint64_t)s->extent[d];
        if (s->extent[d] != s->shape[d]) break;
    }
    for (int d = 0; d < runs.outer; d++) runs.count *= (uint64_t)s->extent[d];
    if (!s->data || runs.length == 0) runs.count = 0;
    return runs;
}

/* Returns the next run, which starts at element *at of the tensor and *from of the box; 0 after the last
   one. */
static int ddp__runs_next(ddp__box_runs *runs, uint64_t *at, uint64_t *from) {
    const ddp__checkpoint_slice *s = runs->slice;
    if (runs->done == runs->count) return 0;
    *at = 0;
    for (int d = 0; d < s->ndim; d++)
        *at = *at * (uint64_t)s->shape[d] + (uint64_t)(s->offset[d] + runs->index[d]);
    *from = runs->done++ * runs->length;
    for (int d = runs->outer - 1; d >= 0 && ++runs->index[d] == s->extent[d]; d--) runs->index[d] = 0;
    return 1;
}

/* The fingerprint of a box is a number modulo the prime 2^31 - 1. Boxes tile a tensor if their fingerprints
   add up to the tensor's. A fingerprint is the product over dimensions of x^(offset + extent) - x^offset: a
   polynomial with one term for each element of the box. Other boxes pass with a chance of 1e-5 at a point x;
   two points are used. */
#define DDP__FINGERPRINT_PRIME UINT64_C(2147483647)
static uint64_t ddp__power_mod_prime(uint64_t x, uint64_t exponent) {
    uint64_t power = 1;
    for (; exponent; exponent >>= 1, x = x * x % DDP__FINGERPRINT_PRIME)
        if (exponent & 1) power = power * x % DDP__FINGERPRINT_PRIME;
    return power;
}

/* Of this rank's box, or of the full tensor. point: 0 or 1. */
static uint64_t ddp__box_fingerprint(const ddp__checkpoint_slice *s, int full_tensor, int point) {
    uint64_t product = full_tensor || s->data;
    for (int d = 0; d < s->ndim; d++) {
        uint64_t random = UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(point * DDP_MAX_NDIM + d + 1) >> 24;
        uint64_t x = random % (DDP__FINGERPRINT_PRIME - 3) + 2;
        uint64_t begin = full_tensor ? 0 : (uint64_t)s->offset[d];
        uint64_t end = full_tensor ? (uint64_t)s->shape[d] : begin + (uint64_t)s->extent[d];
        uint64_t factor = ddp__power_mod_prime(x, end) + DDP__FINGERPRINT_PRIME
                          - ddp__power_mod_prime(x, begin);
        product = product * (factor % DDP__FINGERPRINT_PRIME) % DDP__FINGERPRINT_PRIME;
    }
    return product;
}

typedef struct ddp__tensor_key {
    ddp__string_view name;
    int kind, index;
} ddp__tensor_key;

static int ddp__tensor_key_compare(const void *a, const void *b) {
    int order = ((const ddp__tensor_key *)a)->kind - ((const ddp__tensor_key *)b)->kind;
    return order ? order : ddp__string_compare(a, b);
}

/* Whether a tensor in a file may have this name, of limited length. */
static int ddp__is_tensor_name(const char *name, size_t max_bytes) {
    size_t length = strlen(name), at = 0;
    for (int bytes = 1; at < length && bytes; at += (size_t)bytes)
        bytes = ddp__utf8_length(name + at, name + length);
    return length > 0 && length <= max_bytes && at == length && strcmp(name, "__metadata__") != 0;
}

/* Checks a list of tensors without the other ranks. Fills in keys and sorts them. */
static ddp_result ddp__slices_check(const ddp__checkpoint_slice *slices, int count, ddp__tensor_key *keys) {
    for (int i = 0; i < count; i++) {
        const ddp__checkpoint_slice *s = &slices[i];
        ddp_tensor tensor = DDP_ZERO;
        if (!s->name || !ddp__is_tensor_name(s->name, 10000))
            return ddp_fail(DDP_ERR_INVALID,
                            "tensor %d: the name is missing or invalid; use UTF-8 of at most 10000 bytes", i);
        tensor.ndim = s->ndim;
        memcpy(tensor.shape, s->shape, sizeof tensor.shape);
        int64_t elements = ddp_tensor_count(&tensor);
        if (elements < 0 || elements > INT64_MAX / 16 || !ddp__file_dtype_name(s->dtype))
            return ddp_fail(DDP_ERR_INVALID,
                            "tensor '%.100s': shape or dtype is invalid; fill in its ddp_tensor", s->name);
        for (int d = 0; d < s->ndim; d++)
            if (s->offset[d] < 0 || s->extent[d] < 0 || s->extent[d] > s->shape[d]
                || s->offset[d] > s->shape[d] - s->extent[d])
                return ddp_fail(
                    DDP_ERR_INVALID,
                    "tensor '%.100s': %lld entries from %lld are outside dimension %d of size %lld", s->name,
                    (long long)s->extent[d], (long long)s->offset[d], d, (long long)s->shape[d]);
        const ddp__tensor_key key = {ddp__string_view_of(s->name), s->file_kind, i};
        keys[i] = key;
    }
    qsort(keys, (size_t)count, sizeof *keys, ddp__tensor_key_compare);
    for (int i = 1; i < count; i++)
        if (ddp__tensor_key_compare(&keys[i - 1], &keys[i]) == 0)
            return ddp_fail(DDP_ERR_INVALID, "two tensors have the name '%.100s'; give each its own name",
                            slices[keys[i].index].name);
    return DDP_OK;
}

/* State that save and load share. The tables are one allocation; the caller frees it through keys. */
typedef struct ddp__checkpoint_common {
    ddp_group *group;
    const char *call; /* the public call */
    const ddp__checkpoint_slice *slices;
    int count;
    char dir[DDP__PATH_MAX];
    const char *options;       /* text that must be equal on all ranks */
    ddp__tensor_key *keys;     /* the list by name */
    int64_t *own_fingerprints; /* two per tensor: of this rank's box */
    int64_t *sum_fingerprints; /* two per tensor: of the boxes of all ranks */
    void *extra;               /* extra_size bytes per tensor, and for two more; see ddp__checkpoint_begin */
    uint32_t *crc;             /* per tensor */
    unsigned char *skip_write; /* per tensor: 1 = a lower rank writes this rank's box */
} ddp__checkpoint_common;

static ddp__checkpoint_common ddp__checkpoint_common_of(ddp_group *group, const char *call,
                                                        const ddp__checkpoint_slice *slices, int count) {
    ddp__checkpoint_common common = {group, call, slices, count, "", "", NULL, NULL, NULL, NULL, NULL, NULL};
    return common;
}

/* Describes an entry of the list that must be equal on all ranks: options and dir, then tensors. The hash
   also covers values that are too long for the text. */
static uint64_t ddp__checkpoint_agree_entry(const void *list, int index, char *text) {
    const ddp__checkpoint_common *c = (const ddp__checkpoint_common *)list;
    const ddp__checkpoint_slice *s = index ? &c->slices[index - 1] : NULL;
    const char *name = s ? s->name : c->dir;
    size_t length = strlen(name);
    if (s)
        snprintf(text, DDP_AGREE_TEXT, "tensor %d '%.80s' %.100s of the %s", index - 1, name,
                 ddp_describe_shape(ddp_dtype_name(s->dtype), s->ndim, s->shape).text,
                 ddp__file_kind_names[s->file_kind]);
    else
        snprintf(text, DDP_AGREE_TEXT, "tensors=%d%s dir=%.150s", c->count, c->options,
                 length > 150 ? name + length - 150 : name);
    uint64_t hash = ddp_hash(DDP_HASH_SEED, name, length);
    if (s) hash = ddp_hash(hash, s->shape, (size_t)s->ndim * sizeof s->shape[0]);
    return ddp_hash(hash, text, strlen(text) + 1);
}

/* Collective. Allocates the tables, and fails unless all ranks pass the same options (as text), dir and list
   of tensors. extra_size: bytes per tensor of `extra`, a multiple of 8. result: of this rank before the
   call. */
static ddp_result ddp__checkpoint_begin(ddp__checkpoint_common *c, const char *dir, const char *options,
                                        size_t extra_size, ddp_result result) {
    size_t n = (size_t)c->count + 2;
    c->options = options;
    if (result == DDP_OK) result = ddp__folder_path(dir, c->dir);
    c->keys = (ddp__tensor_key *)ddp_host_alloc(
        c->group, n * (sizeof *c->keys + 4 * sizeof *c->own_fingerprints + extra_size + sizeof *c->crc + 1));
    if (c->keys) {
        c->own_fingerprints = (int64_t *)(c->keys + n);
        c->sum_fingerprints = c->own_fingerprints + 2 * n;
        c->extra = c->sum_fingerprints + 2 * n;
        c->crc = (uint32_t *)((char *)c->extra + n * extra_size);
        c->skip_write = (unsigned char *)(c->crc + n);
    } else {
        result = DDP_ERR_NO_MEMORY;
    }
    if (result == DDP_OK) result = ddp__slices_check(c->slices, c->count, c->keys);
    return ddp_agree_list(c->group, c->call, result, c, c->count + 1, ddp__checkpoint_agree_entry, NULL);
}

/* Collective. Sets skip_write for the boxes that a lower rank holds too, if they may repeat. */
static ddp_result ddp__boxes_skip_repeated(ddp__checkpoint_common *c) {
    size_t fingerprints = 2 * (size_t)c->count, box_bytes = 2 * sizeof *c->own_fingerprints;
    int64_t *other = c->sum_fingerprints; /* of rank r */
    for (int r = 0; r < ddp_world_size(c->group) - 1; r++) {
        memcpy(other, c->own_fingerprints, fingerprints * sizeof *other);
        DDP_TRY(ddp_host_collective(c->group, DDP_CALL_BROADCAST, other, other, fingerprints, DDP_I64,
                                    DDP_OP_SUM, r));
        if (ddp_rank(c->group) <= r) continue;
        for (int i = 0; i < c->count; i++) {
            const int64_t *own = &c->own_fingerprints[2 * i];
            if (c->slices[i].may_repeat && own[0] && memcmp(own, &other[2 * i], box_bytes) == 0)
                c->skip_write[i] = 1;
        }
    }
    return DDP_OK;
}

/* Collective. Sums the fingerprints of the boxes that ranks write. *wrong: the first tensor with a sum that
   is not its fingerprint, or the number of tensors. */
static ddp_result ddp__boxes_sum(ddp__checkpoint_common *c, int *wrong) {
    int fingerprints = 2 * c->count, k = 0;
    int64_t *sum = c->sum_fingerprints;
    for (int i = 0; i < fingerprints; i++) sum[i] = c->skip_write[i / 2] ? 0 : c->own_fingerprints[i];
    DDP_TRY(ddp_host_collective(c->group, DDP_CALL_ALL_REDUCE, sum, sum, (size_t)fingerprints, DDP_I64,
                                DDP_OP_SUM, -1));
    for (; k < fingerprints; k++) {
        uint64_t expected = ddp__box_fingerprint(&c->slices[k / 2], 1, k % 2);
        if ((uint64_t)sum[k] % DDP__FINGERPRINT_PRIME != expected) break;
    }
    *wrong = k / 2;
    return DDP_OK;
}

/* Collective. Checks that the boxes of all ranks tile each tensor. If they do not, the lowest rank writes
   each box that several ranks hold, and the others do not count. */
static ddp_result ddp__boxes_check_tiling(ddp__checkpoint_common *c) {
    int wrong;
    for (int i = 0; i < 2 * c->count; i++)
        c->own_fingerprints[i] = (int64_t)ddp__box_fingerprint(&c->slices[i / 2], 0, i % 2);
    DDP_TRY(ddp__boxes_sum(c, &wrong));
    if (wrong == c->count) return DDP_OK;
    DDP_TRY(ddp__boxes_skip_repeated(c));
    DDP_TRY(ddp__boxes_sum(c, &wrong));
    if (wrong == c->count) return DDP_OK;
    return ddp_fail_in(DDP_ERR_MISMATCH, c->call, c->group,
                       "tensor '%.100s': the parts of the ranks overlap or leave a gap; set global_offset "
                       "and global_shape so that they cover it once",
                       c->slices[wrong].name);
}

/* The numbers of ddp_fsdp_state.per_rank: those of one rank, and of all ranks that load and save together. */
typedef struct ddp__rank_numbers {
    uint64_t rng[4];
    double user[8];
} ddp__rank_numbers;
typedef struct ddp__rank_list {
    ddp__rank_numbers *numbers; /* by rank */
    int count, own;             /* ranks; this rank */
} ddp__rank_list;
#define DDP__RANK_STATE_KINDS "uuuuuuuuuuuu" /* as in ddp__state_fields */

/* The fields of ddp_fsdp_state in state.json. Each is a number or a list of numbers, adjacent in memory: i64,
   u64, i32 (4). Doubles are stored as their bits in a u64: exact for any value and in any locale. */
static const struct ddp__state_field {
    const char *name, *kinds;
    size_t at;
} ddp__state_fields[] = {
    {"step", "i", offsetof(ddp_fsdp_state, step)},
    {"sampler", "uuiiiii44", offsetof(ddp_fsdp_state, sampler)},
    {"scaler", "ui", offsetof(ddp_fsdp_state, scaler)},
    {"rng", "uuuu", offsetof(ddp_fsdp_state, rng)},
    {"user", "uuuuuuuu", offsetof(ddp_fsdp_state, user)},
};
#define DDP__STATE_FIELDS ((int)(sizeof ddp__state_fields / sizeof ddp__state_fields[0]))

//== checkpoints: layout of files ========================================================= >>impl-save-layout
/* Plans the files of a checkpoint, and formats their headers, indexes and state.json. Every rank computes the
   same plan from the list of tensors.

       dir.tmp, then dir                         written by
         model-00001-of-00002.safetensors        all ranks
         model-00002-of-00002.safetensors        all ranks
         model.safetensors.index.json            rank 0
         optimizer-00001-of-00001.safetensors    all ranks
         optimizer.safetensors.index.json        rank 0
         state.json                              rank 0, last: it has the checksums of all others

   A .safetensors file; tensor a has 3 ranks' rows, tensor b is one rank's:

       byte 0    8                    header_bytes      + data_offset[b]
       |length  |JSON, padded        |a: rows 0-1|a: 2-3|a: 4|b           |
        rank 0   rank 0               rank 0      rank 1 rank 2 rank 1

   The JSON has name, dtype, shape and data_offsets of each tensor, and its checksum (crc32c) as metadata. */

/* A file of the checkpoint. It has the tensors of its kind in [first_tensor, end_tensor) of the list. */
typedef struct ddp__save_file {
    char name[64];
    int kind, first_tensor, end_tensor;
    uint64_t header_bytes, data_bytes; /* header: with its length */
    uint32_t crc;                      /* of the header */
} ddp__save_file;

typedef struct ddp__save_state {
    ddp__checkpoint_common common;
    char tmp[DDP__PATH_MAX];
    int keep_count;
    size_t max_file_bytes;
    uint64_t *data_offset; /* per tensor: its first byte in the data of its file */
    ddp__save_file *files; /* the indexes are at the end, once they are written */
    int file_count, kind_count[2];
    ddp__text text;
} ddp__save_state;

/* Formats the header of a file with its length in front, padded so that the data starts at a multiple of 8.
   It uses the current values of crc. Their text has a fixed length, so the plan can use it before they are
   known. */
static void ddp__save_format_header(ddp__save_state *s, const ddp__save_file *file) {
    ddp__text *d = &s->text;
    const ddp__checkpoint_slice *slices = s->common.slices;
    d->length = 0;
    ddp__text_append(d, "12345678{\"__metadata__\":{\"format\":\"pt\""); /* Python's loaders expect it */
    for (int i = file->first_tensor; i < file->end_tensor; i++) {
        if (slices[i].file_kind != file->kind) continue;
        ddp__text_append(d, ",");
        ddp__text_append_json(d, "crc32c:", slices[i].name);
        ddp__text_append(d, ":\"%08x\"", s->common.crc[i]);
    }
    ddp__text_append(d, "}");
    for (int i = file->first_tensor; i < file->end_tensor; i++) {
        if (slices[i].file_kind != file->kind) continue;
        ddp__text_append(d, ",");
        ddp__text_append_json(d, "", slices[i].name);
        ddp__text_append(d, ":{\"dtype\":\"%s\",\"shape\":[", ddp__file_dtype_name(slices[i].dtype));
        for (int k = 0; k < slices[i].ndim; k++)
            ddp__text_append(d, k ? ",%lld" : "%lld", (long long)slices[i].shape[k]);
        ddp__text_append(d, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)s->data_offset[i],
                         (unsigned long long)(s->data_offset[i] + ddp__slice_tensor_bytes(&slices[i])));
    }
    ddp__text_append(d, "}%*s", (int)(7 - d->length % 8), "");
    for (int i = 0; i < 8 && !d->failed; i++) d->data[i] = (char)((d->length - 8) >> 8 * i & 255);
}

/* Distributes the tensors over files. An entry of a header takes at most entry_bytes: the name twice, digits,
   keywords. */
static ddp_result ddp__save_plan(ddp__save_state *s) {
    ddp__save_file *file = NULL;
    uint64_t used = 0, limit = s->max_file_bytes ? s->max_file_bytes : (uint64_t)4 << 30;
    for (int k = 0; k < 2 * s->common.count; k++) { /* first the model, then the optimizer */
        int i = k % s->common.count, kind = k / s->common.count;
        const ddp__checkpoint_slice *slice = &s->common.slices[i];
        if (slice->file_kind != kind) continue;
        s->text.length = 0;
        ddp__text_append_json(&s->text, "", slice->name);
        uint64_t bytes = ddp__slice_tensor_bytes(slice);
        uint64_t entry_bytes = 2 * s->text.length + 160 + 21 * (uint64_t)slice->ndim;
        if (!file || file->kind != kind || bytes + entry_bytes > limit
            || used > limit - bytes - entry_bytes) {
            file = &s->files[s->file_count++];
            file->kind = kind;
            file->first_tensor = i;
            s->kind_count[kind]++;
            used = 64;
        }
        s->data_offset[i] = file->data_bytes;
        file->data_bytes += bytes;
        file->end_tensor = i + 1;
        used += bytes + entry_bytes;
    }
    for (int f = 0; f < s->file_count; f++) {
        file = &s->files[f];
        int number = f + 1 - (file->kind ? s->kind_count[0] : 0);
        snprintf(file->name, sizeof file->name, "%s-%05d-of-%05d.safetensors",
                 ddp__file_kind_names[file->kind], number, s->kind_count[file->kind]);
        ddp__save_format_header(s, file);
        file->header_bytes = s->text.length;
        if (s->text.length > DDP__HEADER_MAX)
            return ddp_fail(
                DDP_ERR_INVALID,
                "the tensors of one file need a header of more than 100 MB; use a smaller max_file_bytes");
    }
    return s->text.failed ? DDP_ERR_NO_MEMORY : DDP_OK;
}

/* Appends a number of a field of ddp_fsdp_state, and returns the address of the next one. */
static const char *ddp__text_append_number(ddp__text *text, char kind, const char *at) {
    uint64_t bits;
    int32_t narrow;
    if (kind == '4') {
        memcpy(&narrow, at, sizeof narrow);
        ddp__text_append(text, "%d", (int)narrow);
        return at + sizeof narrow;
    }
    memcpy(&bits, at, sizeof bits);
    if (kind == 'u')
        ddp__text_append(text, "%llu", (unsigned long long)bits);
    else
        ddp__text_append(text, "%lld", (long long)(int64_t)bits);
    return at + sizeof bits;
}

/* Appends adjacent numbers, separated by commas. */
static void ddp__text_append_numbers(ddp__text *text, const char *kinds, const void *at) {
    const char *next = (const char *)at;
    for (int i = 0; kinds[i]; i++) {
        if (i) ddp__text_append(text, ", ");
        next = ddp__text_append_number(text, kinds[i], next);
    }
}

/* ranks: NULL, or the numbers of each rank. */
static void ddp__save_format_state(ddp__save_state *s, const ddp_fsdp_state *state,
                                   const ddp__rank_list *ranks) {
    ddp__text *d = &s->text;
    d->length = 0;
    ddp__text_append(d, DDP__STATE_START ", \"version\": 1,\n \"world_size\": %d",
                     ddp_world_size(s->common.group));
    for (int f = 0; f < DDP__STATE_FIELDS; f++) {
        const char *kinds = ddp__state_fields[f].kinds;
        ddp__text_append(d, ",\n \"%s\": %s", ddp__state_fields[f].name, kinds[1] ? "[" : "");
        ddp__text_append_numbers(d, kinds, (const char *)state + ddp__state_fields[f].at);
        ddp__text_append(d, "%s", kinds[1] ? "]" : "");
    }
    for (int r = 0; ranks && r < ranks->count; r++) {
        ddp__text_append(d, r ? ",\n  [" : ",\n \"ranks\": [\n  [");
        ddp__text_append_numbers(d, DDP__RANK_STATE_KINDS, &ranks->numbers[r]);
        ddp__text_append(d, r + 1 < ranks->count ? "]" : "]]");
    }
    ddp__text_append(d, ",\n \"files\": {");
    for (int f = 0; f < s->file_count; f++)
        ddp__text_append(d, "%s\n  \"%s\": \"%08x\"", f ? "," : "", s->files[f].name, s->files[f].crc);
    ddp__text_append(d, "},\n \"crc32c\": \"");
    if (!d->failed) ddp__text_append(d, "%08x\"}\n", ddp__crc32c(d->data, d->length));
}

static void ddp__save_format_index(ddp__save_state *s, int kind) {
    ddp__text *d = &s->text;
    uint64_t total = 0;
    int entries = 0;
    for (int f = 0; f < s->file_count; f++)
        if (s->files[f].kind == kind) total += s->files[f].data_bytes;
    d->length = 0;
    ddp__text_append(d, "{\"metadata\": {\"total_size\": %llu}, \"weight_map\": {",
                     (unsigned long long)total);
    for (const ddp__save_file *file = s->files; file < s->files + s->file_count; file++)
        for (int i = file->first_tensor; i < file->end_tensor; i++) {
            if (file->kind != kind || s->common.slices[i].file_kind != kind) continue;
            ddp__text_append(d, entries++ ? ",\n  " : "\n  ");
            ddp__text_append_json(d, "", s->common.slices[i].name);
            ddp__text_append(d, ": \"%s\"", file->name);
        }
    ddp__text_append(d, "}}\n");
}

//== checkpoints: saving ========================================================================= >>impl-save
/* Writes a checkpoint in the order of ddp__checkpoint_save:

       1. all ranks   compare the list of tensors, check that the boxes tile each tensor, plan the files
       2. rank 0      creates dir.tmp, with all files in their final size
       3. all ranks   write their boxes and sync the files
       4. all ranks   combine the checksums of their boxes
       5. rank 0      writes headers, indexes and state.json; swaps the names dir.tmp and dir

   After each part all ranks agree on its result. */

/* bytes per piece: a save computes the checksum of a piece and writes it while it is in the cache; a load
   reads in such pieces too */
#define DDP__FILE_PIECE ((uint64_t)1 << 20)

/* Plans the files. Rank 0 creates the folder dir.tmp with all files in their final size. Before that it
   checks every folder that the save will replace. */
static ddp_result ddp__save_begin(ddp__save_state *s) {
    char path[DDP__PATH_MAX];
    struct stat info;
    int found;
    ddp__sibling_path(s->common.dir, DDP__SIBLING_NEW, s->tmp);
    DDP_TRY(ddp__save_plan(s));
    if (ddp_rank(s->common.group) != 0) return DDP_OK;
    DDP_TRY(ddp__folder_check(s->common.dir, &found));
    for (int i = 0; i < s->keep_count && (i < 2 || found); i++) {
        ddp__sibling_path(s->common.dir, i, path);
        DDP_TRY(ddp__folder_check(path, &found));
    }
    ddp__parent_path(s->common.dir, path);
    if (stat(path, &info) != 0) return ddp__file_fail("cannot open the folder of dir,", path);
    DDP_TRY(ddp__folder_sync(path)); /* find now an error that would also occur after the swap */
    DDP_TRY(ddp__folder_delete(s->tmp));
    if (mkdir(s->tmp, 0777) != 0) return ddp__file_fail("cannot create", s->tmp);
    /* an incomplete state.json shows that the folder is ours */
    DDP_TRY(ddp__file_create(s->tmp, DDP__STATE_FILE, DDP__STATE_START, sizeof DDP__STATE_START - 1));
    for (int f = 0; f < s->file_count; f++)
        DDP_TRY(ddp__file_create(s->tmp, s->files[f].name, NULL,
                                 s->files[f].header_bytes + s->files[f].data_bytes));
    return DDP_OK;
}

/* Writes this rank's runs of a tensor that starts at byte `start` of the file. *crc is their remainder within
   the full tensor: the bytes of other ranks count as zeros. */
static ddp_result ddp__save_slice(const ddp__checkpoint_slice *slice, const ddp__file *file, uint64_t start,
                                  uint32_t *crc) {
    ddp__box_runs runs = ddp__runs_of(slice);
    uint64_t element_size = ddp_dtype_size(slice->dtype), size = runs.length * element_size, to, from;
    uint64_t done = 0, gap = 0;                   /* bytes of the tensor; bytes between two runs */
    uint32_t remainder = 0, shift = DDP__CRC_ONE; /* x^(8 * gap) */
    while (ddp__runs_next(&runs, &to, &from)) {
        const char *data = (const char *)slice->data + from * element_size;
        uint64_t offset = to * element_size;
        if (offset - done != gap) {
            gap = offset - done;
            shift = ddp__crc_shift(gap);
        }
        if (gap) remainder = ddp__crc_multiply(remainder, shift);
        for (uint64_t piece, p = 0; p < size; p += piece) {
            piece = size - p < DDP__FILE_PIECE ? size - p : DDP__FILE_PIECE;
            remainder = ddp__crc_update(remainder, data + p, (size_t)piece);
            DDP_TRY(ddp__file_transfer(file, DDP__FILE_WRITE, data + p, piece, start + offset + p));
            if (piece == DDP__FILE_PIECE) ddp__file_start_writeback(file->fd, start + offset + p, piece);
        }
        done = offset + size;
    }
    *crc = ddp__crc_multiply(remainder, ddp__crc_shift(ddp__slice_tensor_bytes(slice) - done));
    return DDP_OK;
}

/* Writes this rank's boxes of all tensors. Opens only the files that have one. */
static ddp_result ddp__save_slices(ddp__save_state *s) {
    for (const ddp__save_file *out = s->files; out < s->files + s->file_count; out++) {
        ddp_result result = DDP_OK;
        ddp__file file;
        file.fd = -1;
        for (int i = out->first_tensor; i < out->end_tensor && result == DDP_OK; i++) {
            const ddp__checkpoint_slice *slice = &s->common.slices[i];
            if (slice->file_kind != out->kind || s->common.skip_write[i] || ddp__slice_box_bytes(slice) == 0)
                continue;
            if (file.fd < 0) DDP_TRY(ddp__file_open(s->tmp, out->name, O_WRONLY, &file));
            result = ddp__save_slice(slice, &file, out->header_bytes + s->data_offset[i], &s->common.crc[i]);
        }
        if (file.fd >= 0) DDP_TRY(ddp__file_sync_close(file.fd, file.path, result));
    }
    return DDP_OK;
}

static ddp_result ddp__save_text(ddp__save_state *s, const char *name, uint32_t *crc) {
    if (s->text.failed) return DDP_ERR_NO_MEMORY;
    *crc = ddp__crc32c(s->text.data, s->text.length);
    return ddp__file_create(s->tmp, name, s->text.data, s->text.length);
}

/* dir.1 becomes dir.2 and so on, up to the first gap, and previous becomes dir.1. Those above keep_count are
   deleted, the oldest first. */
static ddp_result ddp__save_rotate(const ddp__save_state *s, const char *previous) {
    char from[DDP__PATH_MAX], to[DDP__PATH_MAX];
    int number = 0, found;
    DDP_TRY(ddp__folder_check(previous, &found));
    if (!found) return ddp__folder_delete(previous);
    do ddp__sibling_path(s->common.dir, ++number, to);
    while (ddp__folder_check(to, &found) == DDP_OK && found);
    for (; number > 0; number--, memcpy(to, from, sizeof to)) { /* to: dir.number, which is unused */
        if (number > 1)
            ddp__sibling_path(s->common.dir, number - 1, from);
        else
            memcpy(from, previous, sizeof from);
        if (number >= s->keep_count)
            DDP_TRY(ddp__folder_delete(from));
        else if (rename(from, to) != 0)
            return ddp__file_fail("cannot rename a checkpoint to", to);
    }
    return DDP_OK;
}

/* On rank 0: swaps the names of dir and dir.tmp. If the file system cannot swap, the old checkpoint is at
   dir.old until the new one is at dir; ddp__load_check also looks there. After the swap dir is the new
   checkpoint. An error in rotating the old one is logged, and the save still succeeds. */
static ddp_result ddp__save_commit(ddp__save_state *s) {
    char previous[DDP__PATH_MAX], parent[DDP__PATH_MAX], text[440];
    struct stat info;
    int exists = lstat(s->common.dir, &info) == 0, swapped = 0;
    ddp__parent_path(s->common.dir, parent);
    memcpy(previous, s->tmp, sizeof previous);
#if defined(SYS_renameat2)
    swapped = exists
              && syscall(SYS_renameat2, AT_FDCWD, s->tmp, AT_FDCWD, s->common.dir, 2 /* RENAME_EXCHANGE */)
                     == 0;
#endif
    if (!swapped) {
        ddp__sibling_path(s->common.dir, DDP__SIBLING_OLD, previous);
        /* left by a save that was killed after its second rename */
        if (exists) DDP_TRY(ddp__folder_delete(previous));
        if (exists && rename(s->common.dir, previous) != 0)
            return ddp__file_fail("cannot rename", s->common.dir);
        if (rename(s->tmp, s->common.dir) != 0) {
            ddp_result result = ddp__file_fail("cannot rename", s->tmp);
            return exists && rename(previous, s->common.dir) != 0 ? DDP_ERR_SYSTEM : result;
        }
    }
    s->tmp[0] = '\0'; /* on a later error nothing is deleted */
    if (ddp__folder_sync(parent) != DDP_OK)
        return ddp_fail(DDP_ERR_SYSTEM,
                        "the checkpoint is saved, but a crash of the machine can still replace it with the "
                        "previous one: %.400s",
                        ddp_last_error());
    if (ddp__save_rotate(s, previous) != DDP_OK) {
        snprintf(text, sizeof text,
                 "the checkpoint is saved, but the previous one could not be renamed or deleted: %.350s",
                 ddp_last_error());
        ddp_group_log(s->common.group, text);
    }
    return DDP_OK;
}

/* Rank 0, once the data of all ranks is on disk, writes headers, indexes, and last the state, which has their
   checksums. Then dir becomes the new checkpoint. */
static ddp_result ddp__save_end(ddp__save_state *s, const ddp_fsdp_state *state,
                                const ddp__rank_list *ranks) {
    uint32_t crc;
    for (int i = 0; i < s->common.count; i++)
        s->common.crc[i] = ddp__crc_finish(s->common.crc[i], ddp__slice_tensor_bytes(&s->common.slices[i]));
    for (ddp__save_file *file = s->files; file < s->files + s->file_count; file++) {
        ddp__save_format_header(s, file);
        DDP_TRY(ddp__save_text(s, file->name, &file->crc));
    }
    for (int kind = 0; kind < 2; kind++) {
        if (s->kind_count[kind] == 0) continue;
        ddp__save_format_index(s, kind);
        ddp__save_file *index = &s->files[s->file_count++];
        snprintf(index->name, sizeof index->name, "%s.safetensors.index.json", ddp__file_kind_names[kind]);
        DDP_TRY(ddp__save_text(s, index->name, &index->crc));
    }
    ddp__save_format_state(s, state, ranks);
    DDP_TRY(ddp__save_text(s, DDP__STATE_FILE, &crc));
    DDP_TRY(ddp__folder_sync(s->tmp));
    return ddp__save_commit(s);
}

/* Collective; see ddp_fsdp_save. ranks: NULL without per_rank. max_file_bytes and keep_checkpoints may be
   0. */
static ddp_result ddp__checkpoint_save(ddp_group *group, const char *dir, const ddp__checkpoint_slice *slices,
                                       int count, const ddp_fsdp_state *state, const ddp__rank_list *ranks,
                                       size_t max_file_bytes, int keep_checkpoints) {
    ddp__save_state saving = DDP_ZERO, *s = &saving;
    ddp__checkpoint_common *c = &s->common;
    char options[96];
    *c = ddp__checkpoint_common_of(group, "ddp_fsdp_save", slices, count);
    s->text.group = group;
    s->max_file_bytes = max_file_bytes;
    s->keep_count = keep_checkpoints ? keep_checkpoints : 1;
    ddp_result result = keep_checkpoints < 0
                            ? ddp_fail(DDP_ERR_INVALID, "keep_checkpoints=%d; use 1 or more, or 0 for 1",
                                       keep_checkpoints)
                            : DDP_OK;
    snprintf(options, sizeof options, " max_file_bytes=%zu keep_checkpoints=%d", max_file_bytes,
             s->keep_count);
    result = ddp__checkpoint_begin(c, dir, options, sizeof *s->files + sizeof *s->data_offset, result);
    if (result == DDP_OK) {
        s->files = (ddp__save_file *)c->extra;
        s->data_offset = (uint64_t *)(s->files + count + 2);
        result = ddp__boxes_check_tiling(c);
    }
    if (result == DDP_OK) result = ddp_agree(group, c->call, ddp__save_begin(s), 0, "");
    if (result == DDP_OK) result = ddp_agree(group, c->call, ddp__save_slices(s), 0, "");
    if (result == DDP_OK) result = ddp__crc_combine(group, c->crc, count);
    if (result == DDP_OK)
        result = ddp_agree(group, c->call, ddp_rank(group) == 0 ? ddp__save_end(s, state, ranks) : DDP_OK, 0,
                           "");
    if (result != DDP_OK && ddp_rank(group) == 0 && s->tmp[0]) {
        ddp_saved_error error = ddp__saved_error_of(result);
        (void)ddp__folder_delete(s->tmp);
        (void)ddp_error_restore(&error);
    }
    ddp_host_free(group, s->text.data);
    ddp_host_free(group, c->keys);
    return result;
}

//== checkpoints: state.json and indexes =================================================== >>impl-load-state
/* Reads the small JSON files of a checkpoint: state.json, with ddp_fsdp_state and the list of files, and the
   index of a foreign model, with only the list. The input is not trusted. */

/* The stored data of a tensor of the list. file NULL = in no file. */
typedef struct ddp__load_source {
    const ddp__load_file *file;
    const ddp__file_tensor *record;
    const unsigned char *data;
    uint64_t bytes;
} ddp__load_source;

typedef struct ddp__load_state {
    ddp__checkpoint_common common; /* its crc: the checksum of all ranks' parts of each tensor */
    ddp__load_source *sources;     /* per tensor */
    ddp__load_file *files;
    int file_count;
    int foreign;       /* no state.json: a model of another program */
    char *text;        /* state.json, or the index of a foreign model */
    uint32_t text_crc; /* of the state, and of the headers of all files */
    char found[300];   /* describes text_crc, for an error if ranks find different checkpoints */
    ddp_fsdp_state state;
    int rank_count, own;           /* ranks in the file; this rank, or -1 without per_rank */
    ddp__rank_numbers own_numbers; /* its numbers */
    int copying;                   /* 1 = the pass copies, 0 = it computes checksums */
    int next_copy;                 /* the next tensor to copy */
    ddp_saved_error thread_error;  /* the result of the second thread */
} ddp__load_state;

/* Reads a small file as a whole. If it is missing, *text is NULL and the result is DDP_OK. */
static ddp_result ddp__load_text(ddp__load_state *l, const char *name, char **text, size_t *length) {
    ddp__file file DDP__AUTO_CLOSE;
    ddp_result result = ddp__file_open(l->common.dir, name, O_RDONLY, &file);
    if (result != DDP_OK) return file.fd == DDP__FILE_MISSING ? DDP_OK : result;
    if (file.size > DDP__HEADER_MAX) return ddp_fail(DDP_ERR_CORRUPT, "%s is larger than 100 MB", file.path);
    *length = (size_t)file.size;
    *text = (char *)ddp_host_alloc(l->common.group, *length + 1);
    return *text ? ddp__file_transfer(&file, DDP__FILE_READ, *text, *length, 0) : DDP_ERR_NO_MEMORY;
}

/* Adds a file to the list, unless it is there. Returns 0 for a name that leads to another folder. */
static int ddp__load_add_file(ddp__load_state *l, ddp__string_view name, uint32_t want_crc) {
    ddp__load_file *file = l->files;
    if (name.length == 0 || name.length > 255 || name.text[0] == '.' || strlen(name.text) != name.length
        || strchr(name.text, '/'))
        return 0;
    for (; file < l->files + l->file_count; file++)
        if (strcmp(file->name, name.text) == 0) return 1;
    l->file_count++;
    file->dir = l->common.dir;
    file->name = name.text;
    file->want_crc = want_crc;
    file->kind = !l->foreign
                 && strncmp(file->name, ddp__file_kind_names[1], strlen(ddp__file_kind_names[1])) == 0;
    return 1;
}

/* Reads the numbers of a field into adjacent memory at `at`. */
static int ddp__state_read_numbers(ddp__json *j, const char *kinds, char *at) {
    int is_list = kinds[1] != 0, count = 0;
    for (; *kinds && (!is_list || ddp__json_next_item(j, "[]", &count)); kinds++) {
        uint64_t bits;
        if (!ddp__json_number(j, *kinds == 'u' ? 'u' : 'i', &bits)) return 0;
        if (*kinds != '4') {
            memcpy(at, &bits, sizeof bits);
            at += sizeof bits;
            continue;
        }
        int32_t narrow = (int32_t)(int64_t)bits;
        if (narrow != (int64_t)bits) return ddp__json_fail(j, "number out of range");
        memcpy(at, &narrow, sizeof narrow);
        at += sizeof narrow;
    }
    if (*kinds || (is_list && !ddp__json_accept(j, ']')))
        return ddp__json_fail(j, "unexpected number of entries in a list");
    return 1;
}

/* Adds the files of an object to the list. In state.json the names are keys and the values are checksums; in
   the index of a foreign model the names are values. */
static int ddp__load_read_file_names(ddp__load_state *l, ddp__json *j, int with_checksums) {
    ddp__string_view key, value;
    uint32_t crc = 0;
    for (int count = 0; ddp__json_next_member(j, &count, &key);) {
        if (!ddp__json_string(j, &value)) return 0;
        if (with_checksums && (!ddp__hex_read(value, &crc) || !ddp__load_add_file(l, key, crc)))
            return ddp__json_fail(j, "expected a file name and its checksum");
        if (!with_checksums && !ddp__load_add_file(l, value, 0))
            return ddp__json_fail(j, "expected the name of a file in the folder");
    }
    return j->error == NULL;
}

/* Reads the numbers of each rank, and keeps this rank's. */
static int ddp__state_read_ranks(ddp__load_state *l, ddp__json *j) {
    if (l->rank_count) return ddp__json_fail(j, "duplicate ranks");
    while (ddp__json_next_item(j, "[]", &l->rank_count)) {
        ddp__rank_numbers state;
        if (!ddp__state_read_numbers(j, DDP__RANK_STATE_KINDS, (char *)&state)) return 0;
        if (l->rank_count - 1 == l->own) l->own_numbers = state;
    }
    return j->error == NULL;
}

static int ddp__state_read(ddp__load_state *l, ddp__json *j) {
    int count = 0, seen = 0;
    uint64_t version = 0;
    for (ddp__string_view key; ddp__json_next_member(j, &count, &key);) {
        int f = 0;
        while (f < DDP__STATE_FIELDS && !ddp__string_equals(key, ddp__state_fields[f].name)) f++;
        if (f < DDP__STATE_FIELDS)
            seen += ddp__state_read_numbers(j, ddp__state_fields[f].kinds,
                                            (char *)&l->state + ddp__state_fields[f].at);
        else if (ddp__string_equals(key, "version"))
            seen += ddp__json_number(j, 'u', &version);
        else if (ddp__string_equals(key, "files"))
            seen += ddp__load_read_file_names(l, j, 1);
        else if (ddp__string_equals(key, "ranks"))
            (void)ddp__state_read_ranks(l, j);
        else
            (void)ddp__json_skip(j);
        if (seen && version != 1) return ddp__json_fail(j, "unsupported version; use a newer ddp_fsdp.h");
    }
    return ddp__json_end(j)
           && (seen == DDP__STATE_FIELDS + 2 ? 1 : ddp__json_fail(j, "missing or duplicate field"));
}

/* With per_rank: sets this rank's numbers in the state. count: ranks that load together. */
static ddp_result ddp__state_take_own(ddp__load_state *l, int count) {
    if (!l->rank_count)
        return ddp_fail(DDP_ERR_MISMATCH,
                        "%s/" DDP__STATE_FILE " has no state of each rank: it was saved with "
                        "state.per_rank=0; set it to 0 for this load",
                        l->common.dir);
    if (l->rank_count != count)
        return ddp_fail(DDP_ERR_MISMATCH,
                        "%s/" DDP__STATE_FILE " has the state of %d ranks, but %d ranks load it with "
                        "state.per_rank=1; set it to 0 for this load, and seed each rank again",
                        l->common.dir, l->rank_count, count);
    memcpy(l->state.rng, l->own_numbers.rng, sizeof l->state.rng);
    memcpy(l->state.user, l->own_numbers.user, sizeof l->state.user);
    return DDP_OK;
}

/* state.json ends with the checksum of all bytes before the digits of that checksum. */
static ddp_result ddp__state_check(ddp__load_state *l, size_t length) {
    static const char tail[] = "\"crc32c\": \"01234567\"}\n";
    size_t size = sizeof tail - 1;
    ddp__string_view word = {l->text, 8};
    uint32_t crc;
    if (length < size || memcmp(l->text, DDP__STATE_START, sizeof DDP__STATE_START - 1) != 0
        || memcmp(l->text + length - size, tail, size - 11) != 0)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s/" DDP__STATE_FILE ": truncated, or not the " DDP__STATE_FILE " of a checkpoint",
                        l->common.dir);
    word.text += length - 11;
    l->text_crc = ddp__crc32c(l->text, length - 11);
    if (ddp__hex_read(word, &crc) && crc == l->text_crc) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "%s/" DDP__STATE_FILE " is damaged: its checksum is %08x, not %.8s",
                    l->common.dir, l->text_crc, word.text);
}

/* Reads the files of a model of another program from its index. The headers of the files list the tensors. */
static int ddp__index_read(ddp__load_state *l, ddp__json *j) {
    int count = 0, found = 0;
    for (ddp__string_view key; ddp__json_next_member(j, &count, &key);) {
        if (!ddp__string_equals(key, "weight_map"))
            (void)ddp__json_skip(j);
        else if (found++)
            (void)ddp__json_fail(j, "duplicate weight_map");
        else
            (void)ddp__load_read_file_names(l, j, 0);
    }
    return ddp__json_end(j) && (found ? 1 : ddp__json_fail(j, "missing weight_map"));
}

//== checkpoints: files of a load ========================================================== >>impl-load-files
/* Finds the files of a checkpoint, reads their headers, and matches the stored tensors with the list that the
   caller wants. Every rank reads all headers. Two kinds of folders:

       a checkpoint of ours     state.json lists all files with the checksums of their headers
       a foreign model          of another program: model.safetensors.index.json, or only model.safetensors.
                                It may lack checksums and have other float dtypes, and has no optimizer
                                state */

/* Fails if the folder has optimizer files: it is then a checkpoint without its state.json instead of a
   foreign model. */
static ddp_result ddp__foreign_check(const ddp__load_state *l) {
    struct dirent *entry;
    DIR *folder = opendir(l->common.dir);
    int optimizer = 0;
    if (!folder) return ddp__file_fail("cannot open", l->common.dir);
    while ((entry = readdir(folder)) != NULL)
        optimizer += strncmp(entry->d_name, "optimizer", 9) == 0 && ddp__is_checkpoint_file(entry->d_name);
    closedir(folder);
    return optimizer ? ddp_fail(DDP_ERR_CORRUPT, "%s/" DDP__STATE_FILE " is missing", l->common.dir) : DDP_OK;
}

/* Lists the files of the checkpoint: those in state.json, or in the index of a foreign model, or
   model.safetensors. */
static ddp_result ddp__load_list_files(ddp__load_state *l) {
    const char *name = DDP__STATE_FILE;
    size_t length = 0;
    DDP_TRY(ddp__load_text(l, name, &l->text, &length));
    if (l->text) {
        DDP_TRY(ddp__state_check(l, length));
    } else {
        name = "model.safetensors.index.json";
        l->foreign = 1;
        DDP_TRY(ddp__foreign_check(l));
        DDP_TRY(ddp__load_text(l, name, &l->text, &length));
    }
    /* an entry has at least seven characters */
    l->files = (ddp__load_file *)ddp_host_alloc(l->common.group, (length / 7 + 1) * sizeof *l->files);
    if (!l->files) return DDP_ERR_NO_MEMORY;
    ddp__json j = ddp__json_reader(l->text, length);
    if (!l->text)
        (void)ddp__load_add_file(l, ddp__string_view_of("model.safetensors"), 0);
    else if (!(l->foreign ? ddp__index_read(l, &j) : ddp__state_read(l, &j)))
        return ddp__json_file_error(l->common.dir, name, 0, &j);
    return DDP_OK;
}

/* Reads and checks a file's header. The file stays mapped. An index in the list of state.json has only its
   checksum compared. */
static ddp_result ddp__load_open_file(ddp__load_state *l, ddp__load_file *file) {
    ddp__file in DDP__AUTO_CLOSE;
    unsigned char start[8];
    int index = !l->foreign && strstr(file->name, ".json");
    ddp_result result = ddp__file_open(l->common.dir, file->name, O_RDONLY, &in);
    if (in.fd == DDP__FILE_MISSING) return ddp_fail(DDP_ERR_CORRUPT, "%s is missing", in.path);
    if (result != DDP_OK) return result;
    uint64_t at = index ? 0 : sizeof start;
    uint64_t length = index ? in.size : 0;
    DDP_TRY(ddp__file_transfer(&in, DDP__FILE_READ, start, at, 0));
    for (uint64_t i = 0; i < at; i++) length |= (uint64_t)start[i] << 8 * i;
    if (length > DDP__HEADER_MAX || length > in.size - at)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s: truncated: the header needs %llu bytes (at most 100 MB), the file has %llu",
                        in.path, (unsigned long long)length, (unsigned long long)(in.size - at));
    file->text = (char *)ddp_host_alloc(l->common.group, (size_t)length + 1);
    if (!file->text) return DDP_ERR_NO_MEMORY;
    DDP_TRY(ddp__file_transfer(&in, DDP__FILE_READ, file->text, length, at));
    file->crc = ~ddp__crc_update(ddp__crc_update(0xffffffffu, start, (size_t)at), file->text, (size_t)length);
    int damaged = !l->foreign && file->crc != file->want_crc;
    if (index && damaged)
        return ddp_fail(DDP_ERR_CORRUPT, "%s is damaged: its checksum differs from " DDP__STATE_FILE,
                        in.path);
    if (index) return DDP_OK;
    if (damaged)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%s: the header, bytes [0, %llu), is damaged: its checksum is %08x, not %08x",
                        in.path, (unsigned long long)(at + length), file->crc, file->want_crc);
    DDP_TRY(ddp__header_read(l->common.group, file, (size_t)length, in.size - at - length));
    void *map = mmap(NULL, (size_t)in.size, PROT_READ, MAP_SHARED, in.fd, 0);
    if (map == MAP_FAILED) return ddp__file_fail("cannot map", in.path);
    file->map = (const unsigned char *)map;
    file->map_bytes = (size_t)in.size;
    return DDP_OK;
}

/* Finds the tensor of the list that a file has stored as r. Both must have the same shape and dtype. */
static ddp_result ddp__load_match(ddp__load_state *l, const ddp__load_file *file, const ddp__file_tensor *r) {
    ddp_shape_text has = ddp_describe_shape(r->dtype->name, r->ndim, r->shape);
    const ddp__tensor_key key = {r->name, file->kind, 0};
    ddp__tensor_key *found = (ddp__tensor_key *)bsearch(&key, l->common.keys, (size_t)l->common.count,
                                                        sizeof key, ddp__tensor_key_compare);
    if (!found)
        return ddp__file_tensor_fail(DDP_ERR_MISMATCH, file, r, "(%s) is not among the %d tensors to load",
                                     has.text, l->common.count);
    const ddp__checkpoint_slice *s = &l->common.slices[found->index];
    ddp__load_source *source = &l->sources[found->index];
    if (r->ndim != s->ndim || memcmp(r->shape, s->shape, sizeof r->shape[0] * (size_t)s->ndim) != 0
        || (r->dtype->dtype != s->dtype
            && !(l->foreign && ddp_is_float(r->dtype->dtype) && ddp_is_float(s->dtype))))
        return ddp__file_tensor_fail(
            DDP_ERR_MISMATCH, file, r, "is %s, but the tensor to load is %s", has.text,
            ddp_describe_shape(ddp__file_dtype_name(s->dtype), s->ndim, s->shape).text);
    if (source->file) return ddp__file_tensor_fail(DDP_ERR_CORRUPT, file, r, "is also in another file");
    if (!l->foreign && !r->has_crc) return ddp__file_tensor_fail(DDP_ERR_CORRUPT, file, r, "has no checksum");
    const ddp__load_source stored = {file, r, file->map + file->data_at + r->begin, r->end - r->begin};
    *source = stored;
    return DDP_OK;
}

/* The error if two names of one tied parameter differ in the files. reason: how. */
static ddp_result ddp__tied_fail(const ddp__load_state *l, int index, const char *reason) {
    const char *first = l->common.slices[l->common.slices[index].tied_to - 1].name;
    return ddp__file_tensor_fail(DDP_ERR_MISMATCH, l->sources[index].file, l->sources[index].record,
                                 "and tensor '%.100s' are one tied parameter, but %s; remove one of them "
                                 "from the files, or do not tie them",
                                 first, reason);
}

/* A tied parameter has several names, and files have one or more of them. The first one found is read; the
   others must have the same bytes. */
static ddp_result ddp__load_ties(ddp__load_state *l) {
    for (int i = 0; i < l->common.count; i++) {
        ddp__load_source *source = &l->sources[i];
        if (!l->common.slices[i].tied_to || !source->file) continue;
        ddp__load_source *first = &l->sources[l->common.slices[i].tied_to - 1];
        if (!first->file) {
            *first = *source;
            memset(source, 0, sizeof *source);
        } else if (first->record->dtype != source->record->dtype) {
            return ddp__tied_fail(l, i, "their dtypes differ");
        }
    }
    return DDP_OK;
}

/* Finds and opens the files, and checks everything except the data of the tensors. */
static ddp_result ddp__load_open_files(ddp__load_state *l) {
    DDP_TRY(ddp__load_list_files(l));
    for (ddp__load_file *file = l->files; file < l->files + l->file_count; file++) {
        DDP_TRY(ddp__load_open_file(l, file));
        for (int i = 0; i < file->count; i++) DDP_TRY(ddp__load_match(l, file, &file->records[i]));
        l->text_crc = ddp__crc_update(l->text_crc, &file->crc, sizeof file->crc);
    }
    DDP_TRY(ddp__load_ties(l));
    for (int i = 0; i < l->common.count; i++) {
        const ddp__checkpoint_slice *s = &l->common.slices[i];
        if (!l->sources[i].file && !s->tied_to && !(l->foreign && s->file_kind != 0))
            return ddp_fail(DDP_ERR_MISMATCH, "%s: tensor '%.100s' (%s) is not in the files", l->common.dir,
                            s->name,
                            ddp_describe_shape(ddp__file_dtype_name(s->dtype), s->ndim, s->shape).text);
    }
    return DDP_OK;
}

//== checkpoints: loading ======================================================================== >>impl-load
/* Loads in two passes over the tensors, each with two threads per rank. The first computes checksums: every
   byte is read once by some rank, and all ranks compare. The second copies this rank's boxes. Only then is
   the caller's memory written, so that a damaged checkpoint leaves the model unchanged. */

#define DDP__POPULATE_READ 22 /* MADV_POPULATE_READ, which older libc headers lack */

/* Brings bytes [begin, end) of a tensor into memory. A disk that fails is then an error here, instead of a
   signal when the bytes are read. */
static ddp_result ddp__load_pages(const ddp__load_source *source, uint64_t begin, uint64_t end) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = source->file->data_at + source->record->begin,
             low = (first + begin) / page * page;
    /* EINVAL: Linux < 5.14 */
    if (madvise((void *)(uintptr_t)(source->file->map + low), (size_t)(first + end - low), DDP__POPULATE_READ)
            != 0
        && errno != EINVAL)
        return ddp__file_tensor_fail(DDP_ERR_SYSTEM, source->file, source->record,
                                     "cannot be read: the disk failed, or the file was truncated");
    return DDP_OK;
}

/* The offset of a position of a sequence within a part of it, [begin, begin + size), at least 0 and at most
   size. */
static uint64_t ddp__clamp_to_part(uint64_t position, uint64_t begin, uint64_t size) {
    if (position < begin) return 0;
    return position - begin < size ? position - begin : size;
}

/* Adds the checksum of bytes [begin, end) of tensor i to its crc. A tied tensor is compared with the first
   name's tensor, which must have the same bytes. */
static ddp_result ddp__load_checksum_range(ddp__load_state *l, int i, uint64_t begin, uint64_t end) {
    const ddp__load_source *source = &l->sources[i];
    int tied_to = l->common.slices[i].tied_to;
    const ddp__load_source *first = tied_to ? &l->sources[tied_to - 1] : NULL;
    uint32_t remainder = 0;
    for (uint64_t at = begin, piece; at < end; at += piece) {
        piece = end - at < DDP__FILE_PIECE ? end - at : DDP__FILE_PIECE;
        DDP_TRY(ddp__load_pages(source, at, at + piece));
        if (first) {
            DDP_TRY(ddp__load_pages(first, at, at + piece));
            int same = memcmp(first->data + at, source->data + at, (size_t)piece) == 0;
            if (!same) return ddp__tied_fail(l, i, "their bytes differ");
        }
        remainder = ddp__crc_update(remainder, source->data + at, (size_t)piece);
    }
    remainder = ddp__crc_multiply(remainder, ddp__crc_shift(source->bytes - end));
    (void)__atomic_fetch_xor(&l->common.crc[i], remainder, __ATOMIC_RELAXED);
    return DDP_OK;
}

/* Computes checksums of half of this rank's share: thread 0 or 1.

       one machine        |tensor a     |tensor b              |tensor c|
                          |rank 0, 0|rank 0, 1|rank 1, 0|rank 1, 1      |    rank, thread
       several machines   each tensor is cut like that

   On one machine the ranks share a disk. Reading is a third slower there if each rank skips the bytes of the
   others. On several machines a share is about the rows that the rank copies afterwards. */
static ddp_result ddp__load_checksum_share(ddp__load_state *l, int thread) {
    uint64_t shares = 2 * (uint64_t)ddp_world_size(l->common.group);
    uint64_t share = 2 * (uint64_t)ddp_rank(l->common.group) + (uint64_t)thread;
    uint64_t all_bytes = 0, tensor_begin = 0;
    int one_machine = ddp_local_world_size(l->common.group) == ddp_world_size(l->common.group);
    for (int i = 0; i < l->common.count; i++) all_bytes += l->sources[i].bytes;
    for (int i = 0; i < l->common.count; i++) {
        uint64_t bytes = l->sources[i].bytes, share_bytes = (one_machine ? all_bytes : bytes) / shares + 1;
        uint64_t begin = ddp__clamp_to_part(share_bytes * share, tensor_begin, bytes);
        uint64_t end = ddp__clamp_to_part(share_bytes * (share + 1), tensor_begin, bytes);
        DDP_TRY(ddp__load_checksum_range(l, i, begin, end));
        if (one_machine) tensor_begin += bytes;
    }
    return DDP_OK;
}

static ddp_result ddp__load_compare_checksums(const ddp__load_state *l) {
    for (int i = 0; i < l->common.count; i++) {
        const ddp__load_source *source = &l->sources[i];
        uint32_t crc = ddp__crc_finish(l->common.crc[i], source->bytes);
        if (source->file && source->record->has_crc && crc != source->record->crc)
            return ddp__file_tensor_fail(DDP_ERR_CORRUPT, source->file, source->record,
                                         "is damaged: its checksum is %08x, not %08x", crc,
                                         source->record->crc);
    }
    return DDP_OK;
}

/* Copies this rank's box of a tensor from its file, and casts it to the dtype of the list. A tensor that is
   in no file becomes zero. */
static ddp_result ddp__load_copy(const ddp__load_state *l, int index) {
    const ddp__checkpoint_slice *s = &l->common.slices[index];
    const ddp__load_source *source = &l->sources[index];
    size_t box_bytes = (size_t)ddp__slice_box_bytes(s);
    if (!source->file && box_bytes) memset(s->data, 0, box_bytes);
    if (!source->file) return DDP_OK;
    ddp_dtype file_dtype = source->record->dtype->dtype;
    uint64_t size = ddp_dtype_size(s->dtype), file_size = ddp_dtype_size(file_dtype), at, to, n;
    uint64_t ready = 0; /* bytes of the tensor that are in memory */
    double stage[512];  /* aligned for any dtype that is cast */
    int casts = file_dtype != s->dtype;
    uint64_t max = casts ? sizeof stage / file_size : DDP__FILE_PIECE / size;
    ddp__box_runs runs = ddp__runs_of(s);
    while (ddp__runs_next(&runs, &at, &to)) {
        for (uint64_t done = 0; done < runs.length; done += n) {
            char *out = (char *)s->data + (to + done) * size;
            uint64_t begin = (at + done) * file_size;
            n = runs.length - done < max ? runs.length - done : max;
            if (begin + n * file_size > ready) { /* a piece has many short runs */
                ready = begin + DDP__FILE_PIECE < source->bytes ? begin + DDP__FILE_PIECE : source->bytes;
                DDP_TRY(ddp__load_pages(source, begin, ready));
            }
            memcpy(casts ? (void *)stage : (void *)out, source->data + begin, (size_t)(n * file_size));
            if (casts) ddp_device_cpu()->cast(out, s->dtype, stage, file_dtype, (size_t)n);
        }
    }
    return DDP_OK;
}

/* The work of a thread in a pass. In the second pass, each thread copies the next tensor that none has
   copied. */
static ddp_result ddp__load_thread_work(ddp__load_state *l, int thread) {
    if (!l->copying) return ddp__load_checksum_share(l, thread);
    for (int i; (i = __atomic_fetch_add(&l->next_copy, 1, __ATOMIC_RELAXED)) < l->common.count;)
        DDP_TRY(ddp__load_copy(l, i));
    return DDP_OK;
}

static void *ddp__load_thread_main(void *argument) {
    ddp__load_state *l = (ddp__load_state *)argument;
    l->thread_error = ddp__saved_error_of(ddp__load_thread_work(l, 1));
    return NULL;
}

/* A pass: computes checksums, or copies. While one thread computes, the other one waits for the disk. If the
   system has no thread, this one does both parts. */
static ddp_result ddp__load_pass(ddp__load_state *l, int copying) {
    pthread_t thread;
    l->copying = copying;
    int has_thread = pthread_create(&thread, NULL, ddp__load_thread_main, l) == 0;
    ddp_result result = ddp__load_thread_work(l, 0);
    if (has_thread)
        pthread_join(thread, NULL);
    else if (result == DDP_OK)
        result = ddp__load_thread_work(l, 1);
    return result == DDP_OK ? ddp_error_restore(&l->thread_error) : result;
}

/* The first pass, after opening the files: finds every error before the caller's memory is written. */
static ddp_result ddp__load_check(ddp__load_state *l, const char *dir, const ddp_scaler *scaler,
                                  const ddp__rank_list *ranks) {
    ddp__checkpoint_common *c = &l->common;
    struct stat info;
    DDP_TRY(ddp__checkpoint_begin(c, dir, "", sizeof *l->sources, DDP_OK));
    l->sources = (ddp__load_source *)c->extra;
    if (stat(c->dir, &info) != 0) { /* killed in the middle of ddp__save_commit */
        size_t length = strlen(c->dir);
        memcpy(c->dir + length, ".old", 5);
        if (stat(c->dir, &info) != 0) c->dir[length] = '\0';
    }
    l->own = ranks ? ranks->own : -1;
    ddp_result result = ddp__load_open_files(l);
    if (result == DDP_OK && ranks && !l->foreign) result = ddp__state_take_own(l, ranks->count);
    if (result == DDP_OK && scaler && l->state.scaler.scale != 0) { /* 0: saved without a scaler */
        ddp_scaler probe = *scaler; /* finds out whether the scaler would accept the checkpoint's numbers */
        result = ddp_scaler_load(&probe, &l->state.scaler);
    }
    snprintf(l->found, sizeof l->found,
             "finds checkpoint %08x in %.100s (the folder is not shared, or a save ended during the load)",
             l->text_crc, c->dir);
    DDP_TRY(ddp_agree(c->group, c->call, result, l->text_crc, l->found));
    DDP_TRY(ddp_agree(c->group, c->call, ddp__load_pass(l, 0), 0, ""));
    DDP_TRY(ddp__crc_combine(c->group, c->crc, c->count));
    return ddp_agree(c->group, c->call, ddp__load_compare_checksums(l), 0, "");
}

/* Collective. Fills this rank's boxes from a checkpoint of any world size, or from a model of another
   program. The boxes may leave parts of the tensors out. A foreign model sets optimizer tensors to zero and,
   of *state, only the step. On failure the caller's memory is unchanged, unless the disk failed between the
   two passes. replicas: groups that load the same, or NULL; all fail or none. scaler: NULL, or the scaler
   that takes its state from *state later. ranks: NULL, or with per_rank this rank's place; numbers is not
   read. */
static ddp_result ddp__checkpoint_load(ddp_group *group, ddp_group *replicas, const char *dir,
                                       const ddp__checkpoint_slice *slices, int count,
                                       const ddp_scaler *scaler, const ddp__rank_list *ranks,
                                       ddp_fsdp_state *state) {
    ddp_group *const groups[2] = {group, replicas};
    ddp__load_state loading = DDP_ZERO, *l = &loading;
    l->common = ddp__checkpoint_common_of(group, "ddp_fsdp_load", slices, count);
    ddp_result result = ddp__load_check(l, dir, scaler, ranks);
    if (replicas) result = ddp_agree(replicas, l->common.call, result, l->text_crc, l->found);
    /* the first write to the caller's memory */
    if (result == DDP_OK) result = ddp_agree_groups(groups, 2, l->common.call, ddp__load_pass(l, 1), 0, "");
    if (result == DDP_OK && l->foreign) {
        state->step = 0;
        if (ddp_rank(group) == 0)
            ddp_group_log(group, "loaded a model without " DDP__STATE_FILE
                                 ": optimizer state starts at zero, at step 0");
    } else if (result == DDP_OK) {
        *state = l->state;
    }
    for (ddp__load_file *file = l->files; file < l->files + l->file_count; file++) {
        if (file->map) munmap((void *)(uintptr_t)file->map, file->map_bytes);
        ddp_host_free(group, file->records);
        ddp_host_free(group, file->text);
    }
    ddp_host_free(group, l->files);
    ddp_host_free(group, l->text);
    ddp_host_free(group, l->common.keys);
    return result;
}

//== FSDP: structs =========================================================================== >>impl-sharding
/* struct ddp_fsdp and its parts. A part is a struct with the state of one topic; its functions are in the
   section of that topic: allocator, unshard, reduce, clip, offload, saver.

   Memory of a parameter of 5 rows on 3 ranks (rows_per_rank 2):

                    rank 0        rank 1        rank 2
       FULL_SHARD
         shard      |0 1|         |2 3|         |4 -|           padded to rows_per_rank rows
         full       |0 1 2 3 4|   |0 1 2 3 4|   |0 1 2 3 4|     in a buffer, from unshard to reshard
       other strategies
         full       |0 1 2 3 4|   |0 1 2 3 4|   |0 1 2 3 4|     always; the rank's own rows are the shard, the
                     ^ ^               ^ ^               ^      others are those of the last unshard

   Two transports, the same on every rank of a ddp_fsdp:
       peer memory   Shards and gradients are group memory. Each rank reads its peers' rows in place
                     (ddp_group_peer).
       collectives   Each rank packs a block of its rows. All-gather and reduce-scatter move the blocks. */

/* The fields of ddp_fsdp_bytes, in order. */
enum {
    DDP__FOR_SHARDS,
    DDP__FOR_FULL_PARAMS,
    DDP__FOR_GRADIENTS,
    DDP__FOR_OPTIMIZER,
    DDP__FOR_COMMUNICATION,
    DDP__FOR_BOOKKEEPING,
    DDP__TOTAL_BYTES,
    DDP__DEVICE_BYTES
};

enum { DDP__MEMORY_HOST, DDP__MEMORY_DEVICE, DDP__MEMORY_GROUP, DDP__MEMORY_FILE, DDP__MEMORY_PINNED };

/* The gradients of a unit in memory. */
enum {
    DDP__FULL_GRADS, /* full, as backward writes them */
    DDP__CAST_GRADS, /* full, in the dtype that is added over ranks */
    DDP__SHARD_SUMS, /* sums of this rank's rows */
    DDP__GRAD_LAYOUTS
};

enum { DDP__PARTIAL_SUMS_MAX = 32 }; /* of the binary counter of micro-batches */

/* Memory for the full parameters, the gathered blocks or the full gradients of one unit at a time. */
typedef struct ddp__fsdp_buffer {
    unsigned char *memory;
    int in_use;
    /* only of gradients: */
    struct ddp__fsdp_unit *reducing_unit; /* its reduction still reads them */
    uint64_t last_issued;                 /* number of the last reduction from here, which peers read */
    uint64_t last_use;                    /* grows from use to use */
} ddp__fsdp_buffer;

/* The gradients of one shard in one layout. */
typedef struct ddp__fsdp_grad_range {
    size_t offset; /* bytes from the start of the unit's memory */
    size_t count;  /* elements */
    ddp_dtype dtype;
} ddp__fsdp_grad_range;

/* This rank's rows of one parameter of a unit. A tied parameter has one per use. */
typedef struct ddp__fsdp_shard {
    ddp_fsdp_param *user_param;
    struct ddp__fsdp_shard *source; /* the use with which this one shares memory, or itself */
    struct ddp__fsdp_unit *unit;
    const char *name;
    ddp_dtype dtype;            /* of the full parameter */
    ddp_dtype master_dtype;     /* of master values and sums of gradients */
    ddp_dtype reduce_dtype;     /* of the addition over ranks */
    size_t rows, row_elements;  /* of the full parameter */
    size_t rows_per_rank;       /* of a shard, with padding */
    size_t first_row;           /* of this rank */
    size_t own_rows, own_count; /* rows and elements of this rank */
    /* bytes from the start of the unit's memory of that kind */
    size_t full_offset, shard_offset, master_offset;
    size_t block_offset;  /* bytes from the start of a rank's block of an all-gather */
    size_t reduce_offset; /* elements from the start of a rank's block of a reduce-scatter */
    ddp__fsdp_grad_range range[DDP__GRAD_LAYOUTS];
    unsigned char *sent_rows;   /* this rank's rows as an unshard sends them; 8 bits with quantize_gather */
    unsigned char *master_rows; /* this rank's rows as the optimizer updates them */
    int trained;                /* not frozen */
    int is_slice;               /* of a larger tensor (global_shape) */
    int uses_pipeline_sum;      /* the gradients that are reduced now are a ddp_pipeline's f32 sum */
    int has_master;             /* master values have memory of their own, next to the sent values */
    int shares_full_params;     /* the source's full values are also this one's */
    int sum_in_full_grads;      /* the sum of its gradients is stored in the full gradients */
    int optimizer_index;        /* of a trained source, in optimizer_params */
    int slice_index;            /* of a source, in the slices of a checkpoint */
} ddp__fsdp_shard;

typedef struct ddp__fsdp_unit {
    ddp_fsdp *fsdp;
    char name[64];
    int index;
    int trained_count; /* parameters that are trained */
    int reduce_layout; /* of the gradients that are added over ranks: FULL_GRADS or CAST_GRADS */
    int casts_grads;   /* some gradients are added over ranks in another dtype than theirs */
    int half_sums;     /* the sums are the 16-bit gradients themselves: nothing is added to them */
    /* copies that collectives do without */
    int packs_block;      /* 0 = sent_rows are the block that an all-gather sends */
    int gathers_in_place; /* an all-gather receives the full parameters */
    int sums_in_place;    /* a reduce-scatter receives the sums */
    ddp__fsdp_shard *shards, *end;
    size_t full_bytes, shard_bytes, master_bytes, block_bytes, grad_bytes[DDP__GRAD_LAYOUTS];
    size_t reduce_count[DDP_U64 + 1]; /* elements of a rank's block of a reduce-scatter, by dtype */
    unsigned char *full_memory, *shard_memory, *master_memory, *grad_memory;
    unsigned char *gathered; /* the blocks of all ranks, received by an all-gather */
    /* owners of such memory, or NULL. With gather_buffer the gathered blocks are not unpacked yet */
    ddp__fsdp_buffer *full_buffer, *gather_buffer, *grad_buffer, *reducing_buffer;
    /* sums over 2^k micro-batches: of this rank's rows, or of full gradients */
    unsigned char *partial_sum[DDP__PARTIAL_SUMS_MAX];
    int partial_count;  /* partial sums in use */
    int unsharded;      /* full parameters are complete or in flight */
    int in_use;         /* between unshard and reshard */
    int grads_attached; /* it has gradient memory for a backward */
    int reduced_count;  /* reductions of this step, one per micro-batch */
    ddp_work unshard_work, reduce_work;
    uint64_t last_issued; /* peer memory: number of its last reduction */
} ddp__fsdp_unit;

typedef struct ddp__fsdp_allocation {
    void *memory;
    size_t size;
    int purpose, kind;
} ddp__fsdp_allocation;

/* All memory of a ddp_fsdp except the struct itself. */
typedef struct ddp__fsdp_allocator {
    ddp__fsdp_allocation *allocations; /* in order. Group memory has the same order on every rank */
    int count;
    ddp_fsdp_bytes now, peak, predicted; /* predicted: the peak after some steps */
    size_t group_bytes, file_bytes;
    int counts_only; /* a prediction: nothing is allocated */
    int file;        /* OFFLOAD_FILE; -1 = none */
    off_t file_size;
    ddp_saved_error error; /* the first failure. create continues: no rank may miss a collective call */
} ddp__fsdp_allocator;

/* Full parameters: their memory, and the order in which the caller unshards units. */
typedef struct ddp__fsdp_unshard_state {
    ddp__fsdp_buffer *buffers; /* room for unit_count of them */
    int buffer_count;
    int prefetch_buffers_ready; /* the buffers include those for prefetch */
    size_t buffer_bytes;
    /* a device with streams: gathered blocks that the compute stream unpacks. No buffers = f->recv */
    ddp__fsdp_buffer *gather_buffers;
    unsigned char *gather_memory;
    int gather_buffer_count;
    size_t gather_bytes;
    int *order, order_capacity;   /* unit numbers. This step overwrites the last step's */
    int order_count;              /* unshards of the last step */
    int order_position;           /* unshards of this step until now */
    int order_matches;            /* until now, this step has the order of the last one */
    int in_use_count, in_use_max; /* units between unshard and reshard: now; the largest number yet */
} ddp__fsdp_unshard_state;

/* Reductions of gradients: their memory, and with peer memory their numbers. */
typedef struct ddp__fsdp_reduce_state {
    ddp__fsdp_buffer *buffers; /* full gradients of FULL_SHARD and SHARD_GRAD */
    int buffer_count;
    size_t buffer_bytes;
    uint64_t buffer_uses;
    unsigned char *cast_grads, *tile; /* full gradients in reduce_dtype; DDP__REDUCE_TILE elements per rank */
    size_t cast_grads_bytes, tile_bytes;
    uint64_t **progress;           /* every rank's progress words. NULL = by collectives */
    ddp__fsdp_unit **issued_units; /* by number, modulo ddp__reduce_window */
    uint64_t issued, done;         /* number of the last reduction that this rank issued; that it executed */
    uint64_t cast_issued;          /* number of the last reduction that reads cast_grads */
    void *event;                   /* orders the streams of group and replicas */
} ddp__fsdp_reduce_state;

/* The factor with which clipping scales the gradients of the next step. */
typedef struct ddp__fsdp_clip_state {
    ddp_exact_sum *squares;     /* in shard_device's memory */
    float scale;                /* 1 = none, or the device has the factor: */
    float *factor, *factor_now; /* in the device's memory; the same, or NULL if there is nothing to scale */
    float *norm, last_norm;     /* written by the device until `event`; by the host */
    int has_norm;
    void *event;
} ddp__fsdp_clip_state;

/* OFFLOAD_HOST and OFFLOAD_PARAMS on a device with its own memory. Host memory is pinned. */
typedef struct ddp__fsdp_offload_state {
    ddp_group *host_group;                    /* a world of one rank on the CPU, for the optimizer */
    unsigned char *host_grads, *value_pieces; /* this rank's gradients; two pieces of values in flight */
    size_t host_grads_bytes, value_pieces_bytes;
    void **downloaded, *uploaded[2]; /* events of the pieces of gradients, and of values */
    int piece_count, next_piece;     /* of gradients */
    int upload_index;                /* which of the two pieces of values is filled next */
    /* only with OFFLOAD_PARAMS: */
    unsigned char *staged_rows; /* two device buffers of staged_bytes: rows that an all-gather sends */
    unsigned char *staged_sums; /* two device buffers of sums_bytes: the newest sums; older ones */
    size_t staged_bytes, sums_bytes;
    int staged_index;             /* the buffer of rows that was filled last */
    void *filled[2], *emptied[2]; /* events: rows have arrived; the all-gather has read them */
    void *sums_arrived;           /* event: all sums of the step are on the host */
} ddp__fsdp_offload_state;

/* A save in progress: the slices, and a copy of the data that they point to. */
typedef struct ddp__fsdp_saver {
    ddp_group *groups[2];    /* writes and reads files; replicas that wait for it, or NULL */
    ddp_group *thread_group; /* save_in_background: a split of groups[0] for the thread */
    ddp__checkpoint_slice *slices;
    int count;
    char *names; /* name_size bytes per slice */
    size_t name_size;
    unsigned char *staged; /* the copy */
    size_t staged_bytes;
    ddp_fsdp_state state;    /* without desc.state: kept from a load to the next save */
    ddp__rank_list ranks;    /* of desc.state, with per_rank */
    char dir[DDP__PATH_MAX]; /* cut off if it is too long for a checkpoint */
    pthread_t thread;
    int pending, has_thread;
    ddp_saved_error result;
} ddp__fsdp_saver;

struct ddp_fsdp {
    ddp_fsdp_desc desc;            /* with defaults */
    ddp_group *group, *groups[3];  /* groups: group, replicas, checkpoint_group. NULL in a prediction */
    int group_size, replica_count; /* ranks of group and replicas */
    const ddp_device *device;
    const ddp_device *shard_device; /* of sent_rows and sums: the CPU with OFFLOAD_PARAMS, else device */
    int world_size, rank;           /* among the ranks that split parameters: 1 and 0 under NO_SHARD */
    ddp_group *replica_groups[2];   /* of ranks that hold the same rows */
    int replica_group_count;
    /* full parameters stay: not FULL_SHARD, or one rank on a device that holds its shard */
    int keeps_full_params;
    int reduces_per_micro_batch; /* FULL_SHARD, SHARD_GRAD: gradients are reduced after every micro-batch */
    int peer_memory;             /* the transport; 0 = collectives */
    ddp_result (*unshard_task)(ddp_group *group, void *unit); /* fills the full parameters of a unit */
    ddp__fsdp_unit *units, *units_end;
    ddp__fsdp_shard *shards, *shards_end;
    int unit_count, shard_count;
    unsigned char *send, *recv; /* blocks of collectives */
    size_t send_bytes, recv_bytes;
    uint64_t grad_divisor; /* ranks times micro-batches; per_token: the step's tokens, 0 = unknown yet */
    uint64_t call_hash;    /* of this step's unshards and reductions, in order */
    int sums_divided;      /* this step's sums have been divided by grad_divisor */
    int no_grad;
    int64_t step;
    ddp_optimizer *optimizer;
    ddp_param *optimizer_params; /* master values and the gradients that the optimizer reads */
    ddp_tensor *grad_sums;       /* their gradients on the device, then those of later uses when tied */
    ddp__fsdp_shard **optimizer_shards;
    int optimizer_param_count, grad_sum_count;
    ddp__fsdp_allocator allocator;
    ddp__fsdp_unshard_state unshard;
    ddp__fsdp_reduce_state reduce;
    ddp__fsdp_clip_state clip;
    ddp__fsdp_offload_state offload;
    ddp__fsdp_saver saver;
    void *buffer_message; /* desc.buffers, packed for a broadcast */
    size_t buffer_message_bytes;
};

//== FSDP: memory and failures ================================================================ >>impl-memory
/* Allocates memory by purpose and kind, for ddp_fsdp_get_memory, and frees it. Makes a failure of this rank a
   failure of every group that waits for it. Also events, copies and casts that several sections use. */

static void ddp__size_at_least(size_t *size, size_t needed) {
    if (*size < needed) *size = needed;
}

/* A failure of the group or of its replicas becomes a failure of both: their ranks wait for each other. */
static ddp_result ddp__fsdp_failed(const ddp_fsdp *f, ddp_result result) {
    if (result == DDP_OK || !f->desc.replicas) return result;
    const ddp_saved_error error = ddp__saved_error_of(result);
    ddp_group_pass_on(f->group, f->desc.replicas);
    ddp_group_pass_on(f->desc.replicas, f->group);
    return ddp_error_restore(&error);
}

/* Makes the group fail, since peers wait for this rank. */
static ddp_result ddp__fsdp_poison(const ddp_fsdp *f, ddp_result result) {
    const ddp_saved_error error = ddp__saved_error_of(result);
    ddp_group_poison(f->group, result, error.text);
    return ddp__fsdp_failed(f, ddp_error_restore(&error));
}

/* As ddp__fsdp_poison, with an error line that names the unit. */
static ddp_result ddp__unit_failed(const ddp__fsdp_unit *unit, ddp_result result, const char *call) {
    const ddp_group *group = unit->fsdp->group;
    const ddp_saved_error error = ddp__saved_error_of(result);
    char begin[128];
    call = ddp_public_call_name(call);
    (void)ddp__fsdp_poison(unit->fsdp, result);
    snprintf(begin, sizeof begin, "rank %d/%d %s ", ddp_rank(group), ddp_world_size(group), call);
    if (strncmp(error.text, begin, strlen(begin)) == 0) /* the line already names the call */
        return ddp_fail(result, "%sunit=%s %s", begin, unit->name, error.text + strlen(begin));
    return ddp_fail(result, "%s unit=%s: %s", call, unit->name, error.text);
}

/* Adds size to the bytes of a purpose and to the total, or subtracts it. */
static void ddp__fsdp_count_bytes(ddp_fsdp *f, int purpose, size_t size, int add) {
    size_t *now = (size_t *)(void *)&f->allocator.now, *peak = (size_t *)(void *)&f->allocator.peak;
    const int counted[2] = {purpose, DDP__TOTAL_BYTES};
    for (int k = 0; k < 2; k++) {
        int i = counted[k];
        now[i] += add ? size : 0 - size;
        ddp__size_at_least(&peak[i], now[i]);
    }
}

static void ddp__fsdp_count_allocation(ddp_fsdp *f, const ddp__fsdp_allocation *a, int add) {
    ddp__fsdp_allocator *m = &f->allocator;
    size_t change = add ? a->size : 0 - a->size;
    int on_device = a->kind == DDP__MEMORY_DEVICE || a->kind == DDP__MEMORY_GROUP;
    if (a->kind == DDP__MEMORY_HOST) ddp__fsdp_count_bytes(f, DDP__FOR_BOOKKEEPING, DDP_MALLOC_EXTRA, add);
    if (a->kind != DDP__MEMORY_FILE) ddp__fsdp_count_bytes(f, a->purpose, a->size, add);
    if (a->kind == DDP__MEMORY_FILE) m->file_bytes += change;
    if (a->kind == DDP__MEMORY_GROUP) m->group_bytes += change;
    if (a->kind == DDP__MEMORY_HOST && f->device == ddp_device_cpu()) on_device = 1;
    if (!on_device || a->purpose == DDP__FOR_BOOKKEEPING) return;
    m->now.device += change;
    ddp__size_at_least(&m->peak.device, m->now.device);
}

/* Describes an allocation. Memory of a kind that the group or the device lacks is of another one. */
static ddp__fsdp_allocation ddp__fsdp_allocation_of(const ddp_fsdp *f, int purpose, int kind, size_t size) {
    ddp__fsdp_allocation a = {NULL, size ? size : 64, purpose, kind};
    if (a.kind == DDP__MEMORY_GROUP && f->group_size == 1) a.kind = DDP__MEMORY_DEVICE;
    if (a.kind == DDP__MEMORY_DEVICE && f->device == ddp_device_cpu()) a.kind = DDP__MEMORY_HOST;
    if (a.kind == DDP__MEMORY_PINNED && !f->device->alloc_pinned) a.kind = DDP__MEMORY_HOST;
    return a;
}

/* Zeroed host memory from the allocator of the desc, or else of the group. The allocator of the desc receives
   DDP_MALLOC_EXTRA bytes more; its pointer is stored before the memory. */
static void *ddp__fsdp_host_alloc(ddp_fsdp *f, size_t size) {
    int own = f->desc.alloc_fn != NULL;
    void *raw = own ? f->desc.alloc_fn(size + DDP_MALLOC_EXTRA, f->desc.user)
                    : ddp_host_alloc(f->group, size);
    if (!raw)
        ddp_fail_in(DDP_ERR_NO_MEMORY, "ddp_fsdp_create", f->group, "%zu bytes could not be allocated", size);
    if (!raw || !own) return raw;
    void **memory = (void **)(((uintptr_t)raw + DDP_MALLOC_EXTRA) / 64 * 64);
    memory[-1] = raw;
    return memset((void *)memory, 0, size);
}

static void ddp__fsdp_host_free(ddp_fsdp *f, void *memory) {
    if (f->desc.alloc_fn)
        f->desc.free_fn(((void **)memory)[-1], f->desc.user);
    else
        ddp_host_free(f->group, memory);
}

/* Maps the next pages of the offload file. */
static ddp_result ddp__fsdp_map(ddp_fsdp *f, size_t size, void **out) {
    ddp__fsdp_allocator *m = &f->allocator;
    struct rlimit limit;
    void *memory = MAP_FAILED;
    /* Reserves the pages. Later a write beyond the limit, or to a page that a full disk has no room for,
       would raise a signal */
    int error = EFBIG;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY
        || (rlim_t)m->file_size + (rlim_t)size <= limit.rlim_cur)
        error = posix_fallocate(m->file, m->file_size, (off_t)size);
    if (error == EOPNOTSUPP) error = ftruncate(m->file, m->file_size + (off_t)size) == 0 ? 0 : errno;
    if (!error) memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, m->file, m->file_size);
    if (memory == MAP_FAILED)
        return ddp_fail(DDP_ERR_SYSTEM,
                        "ddp_fsdp offload_dir=%s: %zu bytes of a file could not be allocated: %s",
                        f->desc.offload_dir, size, strerror(error ? error : errno));
    m->file_size += (off_t)ddp_round_up(size, (size_t)sysconf(_SC_PAGESIZE));
    *out = memory;
    return DDP_OK;
}

/* Allocates zeroed memory, which counts under its purpose until ddp__fsdp_free. *out is NULL on failure, and
   in a prediction. Group memory is collective. */
static ddp_result ddp__fsdp_alloc(ddp_fsdp *f, int purpose, int kind, size_t size, void *out) {
    ddp__fsdp_allocation a = ddp__fsdp_allocation_of(f, purpose, kind, size);
    ddp_result result = DDP_OK;
    if (f->allocator.counts_only) {
        memcpy(out, &a.memory, sizeof a.memory);
        ddp__fsdp_count_allocation(f, &a, 1);
        return DDP_OK;
    }
    if (a.kind == DDP__MEMORY_GROUP)
        result = ddp_group_alloc(f->group, a.size, &a.memory);
    else if (a.kind == DDP__MEMORY_DEVICE)
        result = f->device->alloc(f->group, a.size, &a.memory);
    else if (a.kind == DDP__MEMORY_PINNED)
        result = f->device->alloc_pinned(f->group, a.size, &a.memory);
    else if (a.kind == DDP__MEMORY_FILE)
        result = ddp__fsdp_map(f, a.size, &a.memory);
    else if (!(a.memory = ddp__fsdp_host_alloc(f, a.size)))
        result = DDP_ERR_NO_MEMORY;
    if (result != DDP_OK) a.memory = NULL;
    memcpy(out, &a.memory, sizeof a.memory);
    ddp_error_save(&f->allocator.error, result);
    if (result != DDP_OK) return result;
    if (a.kind == DDP__MEMORY_PINNED) memset(a.memory, 0, a.size);
    f->allocator.allocations[f->allocator.count++] = a;
    ddp__fsdp_count_allocation(f, &a, 1);
    return DDP_OK;
}

/* Frees memory of ddp__fsdp_alloc. Group memory is collective. NULL is ignored. */
static void ddp__fsdp_free(ddp_fsdp *f, void *memory) {
    ddp__fsdp_allocator *m = &f->allocator;
    int i = 0;
    while (i < m->count && m->allocations[i].memory != memory) i++;
    if (!memory || i == m->count) return;
    const ddp__fsdp_allocation a = m->allocations[i];
    memmove(m->allocations + i, m->allocations + i + 1, (size_t)(--m->count - i) * sizeof a);
    ddp__fsdp_count_allocation(f, &a, 0);
    if (a.kind == DDP__MEMORY_GROUP)
        ddp_group_free(f->group, memory);
    else if (a.kind == DDP__MEMORY_DEVICE)
        f->device->free(f->group, memory);
    else if (a.kind == DDP__MEMORY_FILE)
        munmap(memory, a.size);
    else if (a.kind == DDP__MEMORY_PINNED)
        f->device->free_pinned(memory);
    else
        ddp__fsdp_host_free(f, memory);
}

/* Allocates a table in host memory. */
static ddp_result ddp__fsdp_table_alloc(ddp_fsdp *f, int count, size_t size, void *out) {
    return ddp__fsdp_alloc(f, DDP__FOR_BOOKKEEPING, DDP__MEMORY_HOST, (size_t)count * size, out);
}

static const int ddp__offload_kinds[] = {DDP__MEMORY_DEVICE, DDP__MEMORY_HOST, DDP__MEMORY_FILE,
                                         DDP__MEMORY_HOST};
static void *ddp__fsdp_state_alloc(size_t size_bytes, void *user) {
    ddp_fsdp *f = (ddp_fsdp *)user;
    void *memory;
    (void)ddp__fsdp_alloc(f, DDP__FOR_OPTIMIZER, ddp__offload_kinds[f->desc.offload], size_bytes, &memory);
    return memory;
}

static void ddp__fsdp_state_free(void *memory, void *user) { ddp__fsdp_free((ddp_fsdp *)user, memory); }

/* Records an event on a stream. event NULL: the device's calls are complete when they return. */
static ddp_result ddp__fsdp_event_record(const ddp_fsdp *f, ddp_stream_kind stream, void *event) {
    return event ? f->device->event_record(f->group, stream, event) : DDP_OK;
}

/* Makes a stream of the device wait for an event. event NULL: as above. */
static ddp_result ddp__fsdp_stream_wait(const ddp_fsdp *f, ddp_stream_kind stream, void *event) {
    return event ? f->device->event_wait(f->group, stream, event) : DDP_OK;
}

static ddp_result ddp__fsdp_use_stream(const ddp_fsdp *f, ddp_stream_kind stream) {
    return f->device->use_stream ? f->device->use_stream(f->group, stream) : DDP_OK;
}

/* Copies between the device and pinned memory. Does not wait, if the device can do that. */
static void ddp__fsdp_copy_async(const ddp_fsdp *f, void *dst, const void *src, size_t size_bytes) {
    (f->device->copy_async ? f->device->copy_async : f->device->copy)(dst, src, size_bytes);
}

//== FSDP: layout of units ===================================================================== >>impl-layout
/* Checks and describes each parameter: its rows per rank, dtypes and ties, and its offsets in the memory of
   its unit. Called by ddp_fsdp_create. */

static size_t ddp__shard_rows_bytes(const ddp__fsdp_shard *s, size_t rows, ddp_dtype dtype) {
    return rows * s->row_elements * ddp_dtype_size(dtype);
}

/* The first row of a rank. For rank = the number of ranks: the number of rows. */
static size_t ddp__shard_first_row(const ddp__fsdp_shard *s, int rank) {
    size_t first = s->rows_per_rank * (size_t)rank;
    return first < s->rows ? first : s->rows;
}

#define DDP__SHARD_INVALID(s, text, ...)                                                             \
    ddp__fsdp_invalid("ddp_fsdp_create", (s)->unit->fsdp->group, "unit %s, parameter %.200s: " text, \
                      (s)->unit->name, (s)->name, __VA_ARGS__)

/* Finds the earlier use with which this one shares memory. */
static ddp_result ddp__shard_find_source(ddp_fsdp *f, ddp__fsdp_shard *s) {
    const ddp_tensor *value = &s->user_param->param.value;
    const char *tied_to = s->user_param->tied_to;
    s->source = s;
    for (const ddp__fsdp_shard *other = f->shards; other < s; other++)
        if (!strcmp(other->name, s->name))
            return DDP__SHARD_INVALID(
                s, "unit %.64s also has a parameter of this name; give each its own name", other->unit->name);
    for (const ddp__fsdp_shard *other = f->shards; other < s; other++) {
        int same_data = value->data && other->user_param->param.value.data == value->data;
        if (!same_data && !(tied_to && !strcmp(other->name, tied_to))) continue;
        if (same_data && other->unit != s->unit && !tied_to)
            return DDP__SHARD_INVALID(
                s, "shares value.data with %.80s of unit %.64s; put both into one unit, or set tied_to",
                other->name, other->unit->name);
        if (other->rows != s->rows || other->row_elements != s->row_elements
            || other->master_dtype != s->master_dtype || other->dtype != s->dtype)
            return DDP__SHARD_INVALID(
                s, "is tied to %.80s, but differs in shape or dtype; give both the same", other->name);
        if (other->trained != s->trained)
            return DDP__SHARD_INVALID(
                s, "is tied to %.80s of unit %.64s, but only one of them is frozen; freeze both, or neither",
                other->name, other->unit->name);
        s->source = other->source;
        return DDP_OK;
    }
    if (tied_to)
        return DDP__SHARD_INVALID(s, "tied_to=%.80s is not the name of an earlier parameter", tied_to);
    return value->data || f->desc.init_fn || !f->group
               ? DDP_OK
               : DDP__SHARD_INVALID(s, "has no values; set value.data, or init_fn of the %s", "desc");
}

static ddp_result ddp__shard_describe(ddp_fsdp *f, ddp__fsdp_shard *s) {
    const ddp_tensor *value = &s->user_param->param.value;
    const int64_t *shape = s->user_param->global_shape, *offset = s->user_param->global_offset;
    ddp_dtype grad = s->user_param->param.grad.dtype;
    int64_t count = ddp_tensor_count(value), global = 0, inside = 1;
    for (int i = 0; i < value->ndim && count >= 0; i++) {
        global |= shape[i];
        inside &= offset[i] >= 0 && shape[i] >= value->shape[i] && offset[i] <= shape[i] - value->shape[i];
    }
    const char *wrong = NULL;
    if (!s->user_param->param.name || !s->user_param->param.name[0])
        wrong = "has no name; set param.name, which checkpoints need";
    else if (!ddp__is_tensor_name(s->name, 9900))
        wrong = "the name is invalid; use UTF-8 of at most 9900 bytes other than __metadata__";
    else if (count < 0)
        wrong = "the shape is invalid: ndim or an entry is out of range, or the product overflows";
    else if (!ddp_is_float(value->dtype))
        wrong = "the dtype is not a floating-point dtype; keep the parameter outside the units";
    else if (grad != DDP_DTYPE_DEFAULT && !ddp_is_float(grad))
        wrong = "grad.dtype is not a floating-point dtype";
    else if (global && !inside)
        wrong = "global_offset and the shape exceed global_shape";
    if (wrong) return DDP__SHARD_INVALID(s, "%s", wrong);
    s->trained = !s->user_param->frozen;
    s->is_slice = global != 0;
    s->rows = value->ndim ? (size_t)value->shape[0] : 1;
    s->row_elements = s->rows ? (size_t)count / s->rows : 0;
    s->rows_per_rank = (s->rows + (size_t)f->world_size - 1) / (size_t)f->world_size;
    s->first_row = ddp__shard_first_row(s, f->rank);
    s->own_rows = ddp__shard_first_row(s, f->rank + 1) - s->first_row;
    s->own_count = s->own_rows * s->row_elements;
    s->master_dtype = value->dtype == DDP_F64 ? DDP_F64 : DDP_F32;
    s->dtype = f->desc.param_dtype != DDP_DTYPE_DEFAULT ? f->desc.param_dtype : value->dtype;
    s->reduce_dtype = f->desc.reduce_dtype != DDP_DTYPE_DEFAULT ? f->desc.reduce_dtype : s->master_dtype;
    s->has_master = s->dtype != s->master_dtype || f->desc.offload == DDP_FSDP_OFFLOAD_HOST
                    || f->desc.offload == DDP_FSDP_OFFLOAD_FILE || f->desc.quantize_gather;
    const ddp__fsdp_grad_range parts[DDP__GRAD_LAYOUTS] = {
        {0, s->rows * s->row_elements, grad != DDP_DTYPE_DEFAULT ? grad : s->dtype},
        {0, s->rows * s->row_elements, s->reduce_dtype},
        {0, s->own_count, s->master_dtype},
    };
    memcpy(s->range, parts, sizeof parts);
    return ddp__shard_find_source(f, s);
}

/* This rank's rows of the master values. */
static ddp_tensor ddp__shard_tensor(const ddp__fsdp_shard *s) {
    ddp_tensor rows = s->user_param->param.value;
    rows.data = s->own_count ? s->source->master_rows : NULL;
    rows.dtype = s->master_dtype;
    if (rows.ndim || !s->own_rows) rows.shape[0] = (int64_t)s->own_rows;
    if (!s->own_rows && !rows.ndim) rows.ndim = 1;
    return rows;
}

/* Appends size bytes to memory of *total bytes, and returns their offset, a multiple of 64. */
static size_t ddp__layout_append(size_t *total, size_t size) {
    size_t offset = *total;
    *total += ddp_round_up(size, 64);
    return offset;
}

enum { DDP__QUANT_BLOCK = 256 };
static size_t ddp__quant_scales(const ddp__fsdp_shard *s) {
    return (s->rows_per_rank * s->row_elements + DDP__QUANT_BLOCK - 1) / DDP__QUANT_BLOCK;
}

/* Bytes of one rank's rows as they are sent. */
static size_t ddp__shard_sent_bytes(const ddp_fsdp *f, const ddp__fsdp_shard *s) {
    size_t count = s->rows_per_rank * s->row_elements;
    return f->desc.quantize_gather ? count + ddp__quant_scales(s) * sizeof(float)
                                   : count * ddp_dtype_size(s->dtype);
}

/* Finds the copies that collectives do without, since memory already has the layout of their blocks:
   - shard memory is the block of an all-gather, unless a value is in the memory of another unit;
   - the full values of a single parameter are the blocks of all ranks if its rows divide evenly;
   - sums are the block of a reduce-scatter if they are added over ranks in one dtype, their own. */
static void ddp__unit_layout_blocks(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    const ddp__fsdp_shard *gathered = NULL, *trained = NULL;
    int gathered_count = 0;
    unit->packs_block = f->keeps_full_params;
    unit->sums_in_place = f->world_size > 1 && unit->trained_count > 0;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        if (!s->shares_full_params) {
            gathered = s;
            gathered_count++;
            unit->packs_block |= s->source->unit != unit;
        }
        if (!s->trained) continue;
        if (!trained) trained = s;
        unit->sums_in_place &= s->reduce_dtype == s->master_dtype && !s->sum_in_full_grads;
        unit->sums_in_place &= s->reduce_dtype == trained->reduce_dtype;
    }
    if (gathered_count == 1 && gathered->rows == gathered->rows_per_rank * (size_t)f->world_size
        && !f->desc.quantize_gather) {
        unit->gathers_in_place = 1;
        unit->packs_block = 0;
        unit->block_bytes = ddp__shard_sent_bytes(f, gathered); /* nothing between the blocks */
    }
    if (!unit->sums_in_place || unit->trained_count == 1) return;
    size_t size = ddp_dtype_size(trained->reduce_dtype);
    for (ddp__fsdp_shard *s = unit->shards; s < unit->end; s++)
        if (s->trained) s->reduce_offset = s->range[DDP__SHARD_SUMS].offset / size;
    unit->reduce_count[trained->reduce_dtype] = unit->grad_bytes[DDP__SHARD_SUMS] / size;
}

/* The single trained parameter of the unit, if its full gradients are the blocks of all ranks, and a
   reduce-scatter sends them as they are. Otherwise NULL. */
static const ddp__fsdp_shard *ddp__unit_sends_grads(const ddp_fsdp *f, const ddp__fsdp_unit *unit) {
    const ddp__fsdp_shard *s = unit->shards;
    if (unit->trained_count != 1) return NULL;
    while (!s->trained) s++;
    int divides = s->rows == s->rows_per_rank * (size_t)f->world_size;
    return divides && s->range[unit->reduce_layout].dtype == s->reduce_dtype ? s : NULL;
}

/* Whether norm and optimizer can read the unit's 16-bit gradients: no rank, micro-batch or use of a tied
   parameter adds to them, and only the optimizer multiplies them. */
static int ddp__unit_has_half_sums(const ddp_fsdp *f, const ddp__fsdp_unit *unit) {
    const ddp_fsdp_desc *d = &f->desc;
    int adamw_or_sgd = d->optimizer.kind == DDP_OPTIMIZER_ADAMW || d->optimizer.kind == DDP_OPTIMIZER_SGD;
    if (f->reduces_per_micro_batch || f->world_size > 1 || f->replica_group_count) return 0;
    if (d->micro_batch_count > 1 || d->scaler || d->per_token || d->offload || !adamw_or_sgd) return 0;
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++)
        if (s->trained && s->source != s) return 0;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        ddp_dtype grad_dtype = s->range[DDP__FULL_GRADS].dtype;
        if (s->trained && (ddp_sum_dtype(grad_dtype) == grad_dtype || s->reduce_dtype != DDP_F32)) return 0;
    }
    return 1;
}

/* Lays out the shards of a unit in its memory of each kind. Full gradients are cast before any addition
   (CAST_GRADS) in two cases: micro-batches are added first, or replicas are added in another dtype than the
   master's. In all other cases the cast is a part of the addition, or of packing the block that is sent. */
static void ddp__unit_layout(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    int adds_micro_batches = !f->reduces_per_micro_batch && f->desc.micro_batch_count > 1;
    for (ddp__fsdp_shard *s = unit->shards; s < unit->end; s++)
        unit->casts_grads |= s->trained && s->reduce_dtype != s->range[DDP__FULL_GRADS].dtype;
    for (ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        size_t shard_count = s->rows_per_rank * s->row_elements;
        ddp_dtype grad_dtype = s->range[DDP__FULL_GRADS].dtype;
        s->shares_full_params = s->source != s && (s->source->unit == unit || f->keeps_full_params);
        if (s->source == s) {
            s->shard_offset = ddp__layout_append(&unit->shard_bytes, ddp__shard_sent_bytes(f, s));
            if (s->has_master)
                s->master_offset = ddp__layout_append(&unit->master_bytes,
                                                      shard_count * ddp_dtype_size(s->master_dtype));
        }
        if (!s->shares_full_params) {
            s->full_offset = ddp__layout_append(&unit->full_bytes,
                                                ddp__shard_rows_bytes(s, s->rows, s->dtype));
            s->block_offset = ddp__layout_append(&unit->block_bytes, ddp__shard_sent_bytes(f, s));
        } else if (s->source->unit == unit)
            s->full_offset = s->source->full_offset;
        if (!s->trained) continue;
        unit->trained_count++;
        if (s->reduce_dtype != grad_dtype
            && (adds_micro_batches || (f->world_size == 1 && s->reduce_dtype != s->master_dtype)))
            unit->reduce_layout = DDP__CAST_GRADS;
        s->sum_in_full_grads = !f->reduces_per_micro_batch && grad_dtype == s->master_dtype
                               && s->reduce_dtype == s->master_dtype
                               && (f->world_size == 1 || f->replica_group_count == 0);
        if (f->world_size == 1 && unit->casts_grads)
            s->sum_in_full_grads = 0; /* all sums of the unit are together */
        for (int layout = 0; layout < DDP__GRAD_LAYOUTS - s->sum_in_full_grads; layout++) {
            size_t count = layout == DDP__SHARD_SUMS ? shard_count : s->range[layout].count;
            s->range[layout].offset = ddp__layout_append(&unit->grad_bytes[layout],
                                                         count * ddp_dtype_size(s->range[layout].dtype));
        }
        s->reduce_offset = unit->reduce_count[s->reduce_dtype];
        unit->reduce_count[s->reduce_dtype] += shard_count;
    }
    unit->half_sums = unit->trained_count && ddp__unit_has_half_sums(f, unit);
    for (ddp__fsdp_shard *s = unit->shards; s < unit->end && unit->half_sums; s++)
        s->sum_in_full_grads = s->trained;
    ddp__unit_layout_blocks(f, unit);
}

//== FSDP: unshard ============================================================================ >>impl-unshard
/* Fills the full parameters of a unit from the shards of all ranks: at once in ddp_fsdp_unshard, or as a task
   of the communication stream in a prefetch. Owns the buffers of full parameters.

   A parameter of 4 rows, 2 ranks:

                      rank 0                                rank 1
     sent_rows        |0 1|                                 |2 3|
       |  peer memory: copy |0 1| from here, |2 3| from rank 1; the same on rank 1
       |  collectives: pack |0 1| into send; all-gather; gathered is |0 1|2 3|; unpack from there
     full_memory      |0 1 2 3|                             |0 1 2 3|

   ddp__unit_layout_blocks finds units that need no pack, or no unpack either.

   quantize_gather: sent_rows are 8-bit values and scales, and the copy converts them. Strategies that keep
   full parameters: sent_rows are a part of full_memory, and only the other ranks' rows are copied. No rank
   writes shards between the barriers of two steps, so peer memory needs no further synchronisation.

   Prefetch: the first step records the order of unshards. Later steps unshard ahead in that order:

     call       unshard a                 unshard b                 reshard a
     in flight  a, then b ahead           b is ready; c ahead       the buffer of a is free for others

   A device with streams: ddp_fsdp_unshard unpacks on the compute stream, after it has started the prefetch.
   The all-gather of c therefore does not wait until b is unpacked. Gathered blocks have as many buffers as
   units are unsharded ahead, and one more:

     communication stream   all-gather a   all-gather b    all-gather c
     compute stream                        unpack a  use   unpack b  use

   OFFLOAD_PARAMS: the task first copies sent_rows from the host to one of two staging buffers, on the copy
   stream. The copy waits until the all-gather before the last has read its buffer:

     copy stream            copy a   copy b         copy c
     communication stream            all-gather a   all-gather b   all-gather c
     compute stream                                 use a          use b

   A single rank needs no all-gather, and copies to the full parameters. */

/* This rank's rows in 8 bits: the largest magnitude of each block of 256, then the values in 127ths of it,
   rounded. */
static void ddp__quantize(const ddp__fsdp_shard *s) {
    float *scale = (float *)(void *)s->sent_rows, x[DDP__QUANT_BLOCK];
    int8_t *q = (int8_t *)(void *)(s->sent_rows + ddp__quant_scales(s) * sizeof(float));
    for (size_t from = 0; from < s->own_count; from += DDP__QUANT_BLOCK) {
        size_t n = s->own_count - from < (size_t)DDP__QUANT_BLOCK ? s->own_count - from
                                                                  : (size_t)DDP__QUANT_BLOCK;
        float max = 0;
        ddp_device_cpu()->cast(x, DDP_F32, s->master_rows + from * ddp_dtype_size(s->master_dtype),
                               s->master_dtype, n);
        for (size_t i = 0; i < n; i++)
            if (fabsf(x[i]) > max || x[i] != x[i]) max = fabsf(x[i]);
        scale[from / DDP__QUANT_BLOCK] = max; /* a NaN or an infinity spreads over its block */
        for (size_t i = 0; i < n; i++)
            q[from + i] = (int8_t)(max > 0 && max <= 3.402823466e38f ? lrintf(x[i] / max * 127.0f) : 0);
    }
}

static void ddp__dequantize(const ddp__fsdp_shard *s, unsigned char *out, const unsigned char *in,
                            size_t count) {
    const float *scale = (const float *)(const void *)in;
    const int8_t *q = (const int8_t *)(const void *)(in + ddp__quant_scales(s) * sizeof(float));
    float x[DDP__QUANT_BLOCK];
    for (size_t from = 0; from < count; from += DDP__QUANT_BLOCK) {
        size_t n = count - from < (size_t)DDP__QUANT_BLOCK ? count - from : (size_t)DDP__QUANT_BLOCK;
        float max = scale[from / DDP__QUANT_BLOCK], step = max / 127.0f;
        if (max < 1e-30f) /* max / 127 may be denormal */
            for (size_t i = 0; i < n; i++) x[i] = (float)((double)max * q[from + i] / 127);
        else
            for (size_t i = 0; i < n; i++) x[i] = step * (float)q[from + i];
        ddp_device_cpu()->cast(out + from * ddp_dtype_size(s->dtype), s->dtype, x, DDP_F32, n);
    }
}

/* OFFLOAD_PARAMS: copies this rank's rows of the unit from the host to the device, laid out as the block of
   an all-gather. */
static void ddp__unshard_copy_rows(const ddp_fsdp *f, const ddp__fsdp_unit *unit, unsigned char *to) {
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        if (s->shares_full_params) continue;
        if (!unit->packs_block) { /* the rows of all parameters have this layout on the host too */
            ddp__fsdp_copy_async(f, to, s->source->sent_rows, unit->block_bytes);
            return;
        }
        ddp__fsdp_copy_async(f, to + s->block_offset, s->source->sent_rows,
                             s->own_count * ddp_dtype_size(s->dtype));
    }
}

/* OFFLOAD_PARAMS: makes the communication stream wait until this rank's rows are on the device, at *rows. On
   one rank they are the full parameters: that memory is free when the communication stream gets here. */
static ddp_result ddp__unshard_fetch(ddp_fsdp *f, const ddp__fsdp_unit *unit, const unsigned char **rows) {
    ddp__fsdp_offload_state *o = &f->offload;
    int i = o->staged_index ^= 1;
    unsigned char *to = f->world_size > 1 ? o->staged_rows + (size_t)i * o->staged_bytes : unit->full_memory;
    *rows = to;
    if (f->world_size == 1) DDP_TRY(ddp__fsdp_event_record(f, DDP_STREAM_COMM, o->emptied[i]));
    ddp_result result = ddp__fsdp_use_stream(f, DDP_STREAM_COPY);
    if (result == DDP_OK) result = ddp__fsdp_stream_wait(f, DDP_STREAM_COPY, o->emptied[i]);
    if (result == DDP_OK) ddp__unshard_copy_rows(f, unit, to);
    if (result == DDP_OK) result = ddp__fsdp_event_record(f, DDP_STREAM_COPY, o->filled[i]);
    DDP_TRY(ddp__fsdp_use_stream(f, DDP_STREAM_COMM));
    DDP_TRY(result);
    return ddp__fsdp_stream_wait(f, DDP_STREAM_COMM, o->filled[i]);
}

/* Collectives: each rank sends a block with its rows of all parameters of the unit. */
static ddp_result ddp__unshard_all_gather(ddp_fsdp *f, const ddp__fsdp_unit *unit) {
    const unsigned char *send = NULL;
    ddp_copy_list list = DDP_ZERO;
    list.device = f->device;
    if (f->desc.offload == DDP_FSDP_OFFLOAD_PARAMS) {
        DDP_TRY(ddp__unshard_fetch(f, unit, &send));
        if (f->world_size == 1) return DDP_OK;
        DDP_TRY(ddp_all_gather(f->group, send, unit->gathered, unit->block_bytes, DDP_U8, NULL));
        return ddp__fsdp_event_record(f, DDP_STREAM_COMM, f->offload.emptied[f->offload.staged_index]);
    }
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        ddp_dtype dtype = f->desc.quantize_gather ? DDP_U8 : s->dtype;
        if (s->shares_full_params) continue;
        if (!send) send = unit->packs_block ? f->send : s->source->sent_rows;
        if (!unit->packs_block) break;
        ddp_copy_list_add(&list, f->send + s->block_offset, dtype, s->source->sent_rows, dtype,
                          f->desc.quantize_gather ? ddp__shard_sent_bytes(f, s) : s->own_count);
    }
    ddp_copy_list_end(&list);
    return ddp_all_gather(f->group, send, unit->gathered, unit->block_bytes, DDP_U8, NULL);
}

/* The address to read rank r's rows from. full: the place of these rows in this rank's full parameters. */
static const unsigned char *ddp__unshard_rows_of(const ddp_fsdp *f, const ddp__fsdp_shard *s, int r,
                                                 const unsigned char *full) {
    const unsigned char *own = s->source->sent_rows;
    if (!f->peer_memory) return s->unit->gathered + (size_t)r * s->unit->block_bytes + s->block_offset;
    if (f->keeps_full_params) return (unsigned char *)ddp_group_peer(f->group, full, r);
    return r == f->rank ? own : (unsigned char *)ddp_group_peer(f->group, own, r);
}

/* Copies every rank's rows to the full parameters of a unit: from peer memory, or from gathered blocks. */
static ddp_result ddp__unshard_copy(ddp_group *group, void *argument) {
    const ddp__fsdp_unit *unit = (const ddp__fsdp_unit *)argument;
    const ddp_fsdp *f = unit->fsdp;
    ddp_copy_list list = DDP_ZERO;
    list.device = f->device;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        if (s->shares_full_params) continue;
        for (int r = 0; r < f->world_size; r++) {
            size_t first = ddp__shard_first_row(s, r);
            size_t count = (ddp__shard_first_row(s, r + 1) - first) * s->row_elements;
            if (!count || (r == f->rank && f->keeps_full_params)) continue;
            unsigned char *full = unit->full_memory + s->full_offset
                                  + ddp__shard_rows_bytes(s, first, s->dtype);
            const unsigned char *rows = ddp__unshard_rows_of(f, s, r, full);
            if (f->desc.quantize_gather)
                ddp__dequantize(s, full, rows, count);
            else if (f->peer_memory)
                f->device->copy(full, rows, count * ddp_dtype_size(s->dtype));
            else
                ddp_copy_list_add(&list, full, s->dtype, rows, s->dtype, count);
        }
    }
    ddp_copy_list_end(&list);
    return ddp_device_check(group);
}

/* Collectives: gathers the full parameters of a unit. Also unpacks them, unless that is left to the compute
   stream. */
static ddp_result ddp__unshard_gather(ddp_group *group, void *argument) {
    const ddp__fsdp_unit *unit = (const ddp__fsdp_unit *)argument;
    DDP_TRY(ddp__unshard_all_gather(unit->fsdp, unit));
    if (unit->fsdp->world_size == 1 || unit->gathers_in_place || unit->gather_buffer)
        return ddp_device_check(group);
    return ddp__unshard_copy(group, argument);
}

/* Each unit has memory for its full parameters; otherwise units share buffers. */
static int ddp__full_memory_is_per_unit(const ddp_fsdp *f) {
    return f->keeps_full_params || f->desc.no_reshard_after_forward;
}

static ddp__fsdp_buffer *ddp__buffer_acquire(ddp__fsdp_buffer *buffer, unsigned char **pointer) {
    buffer->in_use = 1;
    *pointer = buffer->memory;
    return buffer;
}

/* Allocates buffers until there are `count` for full parameters. */
static ddp_result ddp__full_buffers_alloc(ddp_fsdp *f, int count) {
    ddp__fsdp_unshard_state *u = &f->unshard;
    for (; u->buffer_count < count; u->buffer_count++)
        DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_FULL_PARAMS, DDP__MEMORY_DEVICE, u->buffer_bytes,
                                &u->buffers[u->buffer_count].memory));
    return DDP_OK;
}

/* Frees a buffer for other units. NULL is ignored. *pointer, into the buffer, becomes NULL. */
static void ddp__buffer_release(ddp__fsdp_buffer **buffer, unsigned char **pointer) {
    if (!*buffer) return;
    (*buffer)->in_use = 0;
    (*buffer)->reducing_unit = NULL;
    *buffer = NULL;
    if (pointer) *pointer = NULL;
}

/* Frees the full parameters of the unit. Returns result, for a caller that failed. */
static ddp_result ddp__full_params_release(ddp__fsdp_unit *unit, ddp_result result) {
    unit->unsharded = 0;
    ddp__buffer_release(&unit->full_buffer, &unit->full_memory);
    ddp__buffer_release(&unit->gather_buffer, &unit->gathered);
    return result;
}

/* Waits for the unit's prefetch, if it has one. */
static ddp_result ddp__unshard_wait(const ddp_fsdp *f, ddp__fsdp_unit *unit) {
    ddp_result result = ddp_wait(f->group, &unit->unshard_work);
    return result == DDP_OK ? DDP_OK : ddp__full_params_release(unit, result);
}

/* Waits for the unit's prefetch. Unpacks the gathered blocks on the compute stream, if that is left to do. */
static ddp_result ddp__unshard_finish(const ddp_fsdp *f, ddp__fsdp_unit *unit) {
    DDP_TRY(ddp__unshard_wait(f, unit));
    if (!unit->gather_buffer) return DDP_OK;
    ddp_result result = ddp__unshard_copy(f->group, unit);
    ddp__buffer_release(&unit->gather_buffer, &unit->gathered);
    return result;
}

/* Gives a unit memory for the blocks that an all-gather receives. If all buffers are in use, since the order
   of unshards has changed, one of the units is unpacked early. */
static ddp_result ddp__gather_buffer_acquire(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    ddp__fsdp_unshard_state *u = &f->unshard;
    int i = 0;
    unit->gathered = unit->gathers_in_place ? unit->full_memory : f->recv;
    if (unit->gathers_in_place || u->gather_buffer_count == 0) return DDP_OK;
    while (i < u->gather_buffer_count && u->gather_buffers[i].in_use) i++;
    if (i == u->gather_buffer_count) {
        ddp__fsdp_unit *other = f->units;
        while (!other->gather_buffer) other++;
        i = (int)(other->gather_buffer - u->gather_buffers);
        DDP_TRY(ddp__unshard_finish(f, other));
    }
    unit->gather_buffer = ddp__buffer_acquire(&u->gather_buffers[i], &unit->gathered);
    return DDP_OK;
}

/* Gives a unit memory for its full parameters, which f->unshard_task fills next. Allocates a buffer if none
   is free: the first step finds out how many are needed. */
static ddp_result ddp__full_params_acquire(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    const ddp__fsdp_unshard_state *u = &f->unshard;
    if (!ddp__full_memory_is_per_unit(f)) {
        int i = 0;
        while (i < u->buffer_count && u->buffers[i].in_use) i++;
        DDP_TRY(ddp__full_buffers_alloc(f, i + 1));
        unit->full_buffer = ddp__buffer_acquire(&u->buffers[i], &unit->full_memory);
    }
    unit->unsharded = 1;
    ddp_result result = ddp__gather_buffer_acquire(f, unit);
    return result == DDP_OK ? DDP_OK : ddp__full_params_release(unit, result);
}

static ddp_result ddp__unit_reshard(const ddp_fsdp *f, ddp__fsdp_unit *unit) {
    return ddp__full_params_release(unit, ddp__unshard_wait(f, unit));
}

/* Whether the recorded order has the unit among the next `ahead` unshards, of which there is at least one. */
static int ddp__unshard_is_soon(const ddp_fsdp *f, int unit, int ahead) {
    const ddp__fsdp_unshard_state *u = &f->unshard;
    int end = u->order_position + (ahead > 1 ? ahead : 1);
    for (int i = u->order_position; u->order_matches && i < end && i < u->order_count; i++)
        if (u->order[i] == unit) return 1;
    return 0;
}

/* The number of units that have full parameters at a time, if in_use of them are in use. */
static int ddp__full_buffers_needed(const ddp_fsdp *f, int in_use) {
    size_t max = SIZE_MAX;
    if (f->desc.max_gathered_bytes && f->unshard.buffer_bytes)
        max = f->desc.max_gathered_bytes / f->unshard.buffer_bytes;
    int needed = in_use + f->desc.prefetch;
    if (needed > f->unit_count) needed = f->unit_count;
    if ((size_t)needed > max) needed = (int)max;
    return needed > in_use ? needed : in_use;
}

/* Allocates buffers for prefetch, once the first step has shown how many units are in use at a time. */
static ddp_result ddp__full_buffers_for_prefetch(ddp_fsdp *f) {
    ddp__fsdp_unshard_state *u = &f->unshard;
    if (u->prefetch_buffers_ready || ddp__full_memory_is_per_unit(f) || u->order_position == 0) return DDP_OK;
    DDP_TRY(ddp__full_buffers_alloc(f, ddp__full_buffers_needed(f, u->in_use_max)));
    u->prefetch_buffers_ready = 1;
    return DDP_OK;
}

/* Bytes of full parameters that the unit takes when it is unsharded. */
static size_t ddp__unsharded_bytes(const ddp_fsdp *f, const ddp__fsdp_unit *unit) {
    return ddp__full_memory_is_per_unit(f) ? unit->full_bytes : f->unshard.buffer_bytes;
}

/* Starts to unshard the units that come next in the recorded order. First reshards units that an earlier
   prefetch has started and the order does not need soon. */
static ddp_result ddp__fsdp_prefetch(ddp_fsdp *f) {
    const ddp__fsdp_unshard_state *u = &f->unshard;
    int prefetch = f->desc.prefetch, end = u->order_position + prefetch;
    size_t bytes = 0;
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        if (unit->unsharded && !unit->in_use && !ddp__full_memory_is_per_unit(f)
            && !ddp__unshard_is_soon(f, unit->index, prefetch))
            DDP_TRY(ddp__unit_reshard(f, unit));
        if (unit->unsharded) bytes += ddp__unsharded_bytes(f, unit);
    }
    if (!u->order_matches || f->no_grad) return DDP_OK;
    for (int i = u->order_position; i < end && i < u->order_count; i++) {
        ddp__fsdp_unit *unit = &f->units[u->order[i]];
        if (unit->unsharded) continue;
        bytes += ddp__unsharded_bytes(f, unit);
        if (f->desc.max_gathered_bytes && !f->keeps_full_params && bytes > f->desc.max_gathered_bytes) break;
        DDP_TRY(ddp__full_params_acquire(f, unit));
        ddp_result result = ddp_group_enqueue(f->group, f->unshard_task, unit, &unit->unshard_work);
        if (result != DDP_OK) return ddp__full_params_release(unit, result);
    }
    return DDP_OK;
}

/* Before an unshard of `unit`: reshards units that are not in use until there is room for it, first those
   that the order does not need soon. */
static ddp_result ddp__reshard_idle_units(ddp_fsdp *f, const ddp__fsdp_unit *unit) {
    int in_use = f->unshard.in_use_count + !unit->in_use, unsharded = 1;
    if (ddp__full_memory_is_per_unit(f) || unit->unsharded) return DDP_OK;
    int max = ddp__full_buffers_needed(f, in_use > f->unshard.in_use_max ? in_use : f->unshard.in_use_max);
    for (const ddp__fsdp_unit *other = f->units; other < f->units_end; other++) unsharded += other->unsharded;
    for (int soon = 0; soon < 2; soon++) {
        for (ddp__fsdp_unit *other = f->units; other < f->units_end && unsharded > max; other++) {
            if (!other->unsharded || other->in_use) continue;
            if (!soon && ddp__unshard_is_soon(f, other->index, f->desc.prefetch + 1)) continue;
            DDP_TRY(ddp__unit_reshard(f, other));
            unsharded--;
        }
    }
    return DDP_OK;
}

/* Appends an unshard to this step's order, and compares it with the last step's. */
static ddp_result ddp__unshard_order_record(ddp_fsdp *f, int unit) {
    ddp__fsdp_unshard_state *u = &f->unshard;
    int *larger, capacity = u->order_capacity ? 2 * u->order_capacity : 4 * f->unit_count;
    if (u->order_position == u->order_capacity) {
        DDP_TRY(ddp__fsdp_table_alloc(f, capacity, sizeof *larger, &larger));
        if (u->order) memcpy(larger, u->order, (size_t)u->order_capacity * sizeof *larger);
        ddp__fsdp_free(f, u->order);
        u->order = larger;
        u->order_capacity = capacity;
    }
    u->order_matches = u->order_matches && u->order_position < u->order_count
                       && u->order[u->order_position] == unit;
    u->order[u->order_position++] = unit;
    return DDP_OK;
}

//== FSDP: reduce ======================================================================== >>impl-shard-reduce
/* Turns the full gradients of a unit into sums of this rank's rows. ddp_fsdp_reduce_grads starts it once per
   micro-batch; >>impl-reduce-order decides when it runs. The step divides the sums, and the optimizer reads
   them.

   A parameter of 4 rows, 2 ranks; g and h are the gradients of rank 0 and rank 1:

                               rank 0               rank 1
     backward                  g0 g1 g2 g3          h0 h1 h2 h3         full, in the gradient's dtype
       |  cast                                                          to reduce_dtype
     sum over ranks            g0+h0 g1+h1          g2+h2 g3+h3         this rank's rows, in master_dtype
       |  all-reduce                                                    over replicas that hold the same rows
     sum over micro-batches    partial_sum[k]       partial_sum[k]      a binary counter
       |  ddp_fsdp_step                                                 divide, optimizer, master_rows

   FULL_SHARD and SHARD_GRAD go down this path for every micro-batch. SHARD_OPTIM and NO_SHARD add full
   gradients over micro-batches first, and over ranks after the last one. Under NO_SHARD each rank has every
   row: the sum over ranks is an all-reduce, and `replica_groups` includes the group itself.

   The sum over ranks, by transport:

     peer memory   each rank reads its rows from every rank's gradients, and adds them
                     rank 0:  g0 g1 (own)  +  h0 h1 (read from rank 1)
     collectives   each rank packs its gradients in blocks by owner; then a reduce-scatter
                     rank 0 sends  |g0 g1|g2 g3|    rank 1 sends  |h0 h1|h2 h3|

   The cast to reduce_dtype needs as little memory as possible:

     peer memory                     a tile of each rank's gradients at a time, by the rank that adds
     collectives                     into the block that is sent
     all rows on each rank           into the sums; replicas then add the sums
     micro-batches are added first   into cast_grads (CAST_GRADS), which all units share */

enum { DDP__REDUCE_TILE = 1024 }; /* elements of each rank */

/* This rank's sum of gradients. sums: of the unit, where they are not a part of the full gradients. */
static unsigned char *ddp__shard_sum_in(const ddp__fsdp_shard *s, unsigned char *sums) {
    const ddp__fsdp_grad_range *full = &s->range[DDP__FULL_GRADS];
    if (s->sum_in_full_grads)
        return s->unit->grad_memory + full->offset + ddp__shard_rows_bytes(s, s->first_row, full->dtype);
    return sums + s->range[DDP__SHARD_SUMS].offset;
}

/* This rank's sum of gradients of the step. */
static unsigned char *ddp__shard_sum(const ddp__fsdp_shard *s) {
    return ddp__shard_sum_in(s, s->unit->partial_sum[0]);
}

/* The memory that receives the unit's sums over ranks: the next partial sum. OFFLOAD_PARAMS: of the device,
   from where ddp__accumulate_micro_batch copies them to the host. */
static unsigned char *ddp__newest_sums(const ddp__fsdp_unit *unit) {
    unsigned char *staged = unit->fsdp->offload.staged_sums;
    return staged ? staged : unit->partial_sum[unit->partial_count];
}

/* Gives all units f32 sums in place of 16-bit ones, for this and all later steps. The sums of this step are
   cast. Called before anything changes the sums or hands them out. */
static ddp_result ddp__half_sums_end(ddp_fsdp *f) {
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        ddp_copy_list list = DDP_ZERO;
        if (!unit->half_sums) continue;
        DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_GRADIENTS, DDP__MEMORY_DEVICE, unit->grad_bytes[DDP__SHARD_SUMS],
                                &unit->partial_sum[0]));
        list.device = f->device;
        for (ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
            if (!s->trained) continue;
            const unsigned char *half = ddp__shard_sum(s);
            ddp_tensor *sum = &f->grad_sums[s->optimizer_index];
            s->sum_in_full_grads = 0;
            sum->data = ddp__shard_sum(s);
            sum->dtype = s->master_dtype;
            f->optimizer_params[s->optimizer_index].grad = *sum;
            ddp_copy_list_add(&list, sum->data, sum->dtype, half, s->range[DDP__FULL_GRADS].dtype,
                              s->own_count);
        }
        ddp_copy_list_end(&list);
        unit->half_sums = 0;
    }
    return DDP_OK;
}

/* Gradients of a unit in one layout: dst = left + right, or dst = right if left is NULL. */
static void ddp__unit_add_grads(const ddp_fsdp *f, const ddp__fsdp_unit *unit, unsigned char *dst,
                                const unsigned char *left, const unsigned char *right, int layout) {
    ddp_copy_list list = DDP_ZERO;
    list.device = f->device;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        const ddp__fsdp_grad_range *p = &s->range[layout];
        if (!s->trained || !p->count) continue;
        if (left)
            f->device->add(dst + p->offset, left + p->offset, right + p->offset, p->count, p->dtype);
        else
            ddp_copy_list_add(&list, dst + p->offset, p->dtype, right + p->offset, p->dtype, p->count);
    }
    ddp_copy_list_end(&list);
}

/* Peer memory: sums elements [first, first + count) of this rank's rows. grads: every rank's gradients of the
   unit. The tiles of all ranks are followed by one for the result. */
static void ddp__reduce_rows_from_peers(const ddp_fsdp *f, const ddp__fsdp_shard *s,
                                        const unsigned char *const *grads, size_t first, size_t count) {
    const ddp__fsdp_grad_range *p = &s->range[s->unit->reduce_layout];
    size_t at = p->offset + ddp__shard_rows_bytes(s, s->first_row, p->dtype)
                + first * ddp_dtype_size(p->dtype);
    size_t tile_bytes = DDP__REDUCE_TILE * ddp_dtype_size(s->reduce_dtype);
    unsigned char *sum = ddp__shard_sum_in(s, ddp__newest_sums(s->unit))
                         + first * ddp_dtype_size(s->master_dtype);
    unsigned char *out = sum;
    const void *sources[DDP_MAX_LOCAL_RANKS];
    for (int r = 0; r < f->world_size; r++) {
        unsigned char *tile = f->reduce.tile + (size_t)r * tile_bytes;
        sources[r] = grads[r] + at;
        if (p->dtype == s->reduce_dtype) continue;
        f->device->cast(tile, s->reduce_dtype, sources[r], p->dtype, count);
        sources[r] = tile;
    }
    if (s->reduce_dtype != s->master_dtype) out = f->reduce.tile + (size_t)f->world_size * tile_bytes;
    ddp_reduce_tree(out, sources, f->world_size, count, s->reduce_dtype, DDP_OP_SUM, 1);
    if (out != sum) f->device->cast(sum, s->master_dtype, out, s->reduce_dtype, count);
}

/* Peer memory: the sum over ranks. */
static void ddp__reduce_from_peers(const ddp_fsdp *f, const ddp__fsdp_unit *unit,
                                   const unsigned char *const *grads) {
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        int casts = s->range[unit->reduce_layout].dtype != s->reduce_dtype
                    || s->reduce_dtype != s->master_dtype;
        size_t max = casts ? (size_t)DDP__REDUCE_TILE : s->own_count;
        for (size_t first = 0; first < s->own_count && s->trained; first += max)
            ddp__reduce_rows_from_peers(f, s, grads, first,
                                        s->own_count - first < max ? s->own_count - first : max);
    }
}

/* Collectives: packs this rank's gradients of one dtype. Block r, of n elements, is of the rows of rank r. */
static void ddp__reduce_pack(const ddp_fsdp *f, const ddp__fsdp_unit *unit, ddp_dtype dtype, size_t n,
                             unsigned char *send, const unsigned char *full) {
    size_t size = ddp_dtype_size(dtype), count = 0;
    ddp_copy_list list = DDP_ZERO;
    list.device = f->device;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++)
        if (s->trained && s->reduce_dtype == dtype) count += s->rows * s->row_elements;
    if (count < n * (size_t)f->world_size) f->device->fill_zero(send, n * size * (size_t)f->world_size);
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        const ddp__fsdp_grad_range *p = &s->range[unit->reduce_layout];
        if (!s->trained || s->reduce_dtype != dtype) continue;
        for (int r = 0; r < f->world_size; r++) {
            size_t first = ddp__shard_first_row(s, r);
            size_t row_count = ddp__shard_first_row(s, r + 1) - first;
            ddp_copy_list_add(&list, send + ((size_t)r * n + s->reduce_offset) * size, dtype,
                              full + p->offset + ddp__shard_rows_bytes(s, first, p->dtype), p->dtype,
                              row_count * s->row_elements);
        }
    }
    ddp_copy_list_end(&list);
}

/* Collectives: casts the sums of one dtype into their memory. */
static void ddp__reduce_unpack(const ddp_fsdp *f, const ddp__fsdp_unit *unit, ddp_dtype dtype,
                               const unsigned char *recv) {
    ddp_copy_list list = DDP_ZERO;
    list.device = f->device;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        if (!s->trained || s->reduce_dtype != dtype) continue;
        ddp_copy_list_add(&list, ddp__shard_sum_in(s, ddp__newest_sums(unit)), s->master_dtype,
                          recv + s->reduce_offset * ddp_dtype_size(dtype), dtype, s->own_count);
    }
    ddp_copy_list_end(&list);
}

/* Collectives: the sum over ranks, a reduce-scatter for each dtype. The block of rank r is n elements:

       send   |rank 0: rows of w, rows of b, ...|rank 1: rows of w, rows of b, ...|   zeros for padding
       recv   |this rank: sums of w, sums of b, ...|     with sums_in_place the memory of the sums */
static ddp_result ddp__reduce_by_reduce_scatter(const ddp_fsdp *f, const ddp__fsdp_unit *unit,
                                                const unsigned char *full) {
    const ddp__fsdp_shard *sent = ddp__unit_sends_grads(f, unit);
    size_t send_at = 0, recv_at = 0;
    for (int d = 0; d <= DDP_U64; d++) {
        ddp_dtype dtype = (ddp_dtype)d;
        size_t n = unit->reduce_count[d], size = ddp_dtype_size(dtype);
        unsigned char *recv = unit->sums_in_place ? ddp__newest_sums(unit) : f->recv + recv_at;
        if (!n) continue;
        if (!sent) ddp__reduce_pack(f, unit, dtype, n, f->send + send_at, full);
        DDP_TRY(ddp_reduce_scatter(f->group,
                                   sent ? full + sent->range[unit->reduce_layout].offset : f->send + send_at,
                                   recv, n, dtype, DDP_OP_SUM, NULL));
        if (!unit->sums_in_place) ddp__reduce_unpack(f, unit, dtype, recv);
        send_at += ddp_round_up(n * size * (size_t)f->world_size, 64);
        recv_at += ddp_round_up(n * size, 64);
    }
    return DDP_OK;
}

/* An all-reduce of another group inside a task of f->group. On a device with streams, the other group's calls
   follow the compute stream. The compute stream therefore waits for the communication stream before the call,
   and the communication stream for the compute stream after it. */
static ddp_result ddp__all_reduce_in_task(const ddp_fsdp *f, ddp_group *replicas, void *memory, size_t count,
                                          ddp_dtype dtype) {
    const ddp_device *d = f->device;
    void *event = replicas != f->group ? f->reduce.event : NULL;
    if (event) DDP_TRY(d->event_record(f->group, DDP_STREAM_COMM, event));
    if (event) DDP_TRY(d->event_wait(f->group, DDP_STREAM_COMPUTE, event));
    DDP_TRY(ddp_all_reduce(replicas, memory, memory, count, dtype, DDP_OP_SUM, NULL));
    if (!event) return DDP_OK;
    DDP_TRY(d->event_record(f->group, DDP_STREAM_COMPUTE, event));
    DDP_TRY(d->event_wait(f->group, DDP_STREAM_COMM, event));
    return d->use_stream(f->group, DDP_STREAM_COMM);
}

/* Adds gradients of a unit over the ranks that hold the same rows. One call covers [s, next): shards of one
   dtype, which are adjacent in memory. */
static ddp_result ddp__reduce_over_replicas(const ddp_fsdp *f, const ddp__fsdp_unit *unit,
                                            unsigned char *memory, int layout) {
    const ddp__fsdp_shard *next;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s = next) {
        const ddp__fsdp_grad_range *first = &s->range[layout], *last = first;
        next = s + 1;
        if (!s->trained) continue;
        for (; next < unit->end; next++) {
            if (!next->trained) continue;
            if (next->range[layout].dtype != first->dtype) break;
            last = &next->range[layout];
        }
        size_t count = (last->offset - first->offset) / ddp_dtype_size(first->dtype) + last->count;
        for (int g = 0; g < f->replica_group_count && count; g++)
            DDP_TRY(ddp__all_reduce_in_task(f, f->replica_groups[g], memory + first->offset, count,
                                            first->dtype));
    }
    return DDP_OK;
}

/* Adds the newest micro-batch to the partial sums, like a binary counter: equal numbers of micro-batches are
   added, older + newer. After the last micro-batch all partial sums are added.

       micro-batch       1        2        3              4
       partial_sum       [1]      [1+2]    [1+2] [3]      [(1+2) + (3+4)]

   newest: sums of this rank's rows, in the next free partial sum; or full gradients, where backward has
   written them. The total of full gradients replaces the newest.
   OFFLOAD_PARAMS: newest is on the device. Partial sums are on the host; an older one is copied to the device
   to be added, and the sum is copied back. All this is work of the communication stream. */
static void ddp__accumulate_micro_batch(const ddp_fsdp *f, ddp__fsdp_unit *unit, unsigned char *newest,
                                        int layout) {
    int older_count = unit->reduced_count - 1; /* micro-batches */
    int last = unit->reduced_count == f->desc.micro_batch_count;
    const ddp__fsdp_offload_state *o = &f->offload;
    int replaces_newest = o->staged_sums || (last && layout != DDP__SHARD_SUMS);
    while (unit->partial_count > 0 && (last || f->desc.sequential_accumulation || (older_count & 1))) {
        unsigned char *older = unit->partial_sum[--unit->partial_count];
        if (o->staged_sums) {
            ddp__fsdp_copy_async(f, o->staged_sums + o->sums_bytes, older, unit->grad_bytes[layout]);
            older = o->staged_sums + o->sums_bytes;
        }
        unsigned char *sum = replaces_newest ? newest : older;
        ddp__unit_add_grads(f, unit, sum, older, newest, layout);
        newest = sum;
        older_count >>= 1;
    }
    if (o->staged_sums)
        ddp__fsdp_copy_async(f, unit->partial_sum[unit->partial_count], newest, unit->grad_bytes[layout]);
    else if (replaces_newest)
        return;
    else if (newest != unit->partial_sum[unit->partial_count])
        ddp__unit_add_grads(f, unit, unit->partial_sum[unit->partial_count], NULL, newest, layout);
    unit->partial_count++;
}

/* CAST_GRADS: casts the unit's gradients to reduce_dtype. full: as backward has written them. */
static unsigned char *ddp__cast_full_grads(const ddp_fsdp *f, const ddp__fsdp_unit *unit,
                                           const unsigned char *full) {
    ddp_copy_list list = DDP_ZERO;
    list.device = f->device;
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        const ddp__fsdp_grad_range *p = &s->range[DDP__FULL_GRADS];
        unsigned char *cast = f->reduce.cast_grads + s->range[DDP__CAST_GRADS].offset;
        if (!s->trained) continue;
        if (s->uses_pipeline_sum)
            ddp_copy_list_add(&list, cast, DDP_F32, s->user_param->param.sum.data, DDP_F32, p->count);
        else
            ddp_copy_list_add(&list, cast, s->reduce_dtype, full + p->offset, p->dtype, p->count);
    }
    ddp_copy_list_end(&list);
    return f->reduce.cast_grads;
}

/* Returns the full gradients to add over ranks: of this micro-batch; or the total of all, which replaces
   those of the last one. NULL = more micro-batches follow. */
static unsigned char *ddp__grads_to_reduce(const ddp_fsdp *f, ddp__fsdp_unit *unit) {
    unsigned char *full = unit->reducing_buffer ? unit->reducing_buffer->memory : unit->grad_memory;
    if (unit->reduce_layout == DDP__CAST_GRADS) full = ddp__cast_full_grads(f, unit, full);
    if (f->reduces_per_micro_batch) return full;
    ddp__accumulate_micro_batch(f, unit, full, unit->reduce_layout);
    return unit->reduced_count == f->desc.micro_batch_count ? full : NULL;
}

/* Each rank has all rows: the sum over ranks is an all-reduce. Casts gradients into the sums, before or after
   it. */
static ddp_result ddp__reduce_unsharded(const ddp_fsdp *f, const ddp__fsdp_unit *unit, unsigned char *full) {
    int casts_first = unit->casts_grads && unit->reduce_layout == DDP__FULL_GRADS;
    ddp_copy_list list = DDP_ZERO;
    list.device = f->device;
    if (!casts_first) DDP_TRY(ddp__reduce_over_replicas(f, unit, full, unit->reduce_layout));
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        const ddp__fsdp_grad_range *p = &s->range[unit->reduce_layout];
        if (!s->trained || (s->sum_in_full_grads && unit->reduce_layout != DDP__CAST_GRADS)) continue;
        ddp_copy_list_add(&list, ddp__shard_sum_in(s, ddp__newest_sums(unit)), s->master_dtype,
                          full + p->offset, p->dtype, p->count);
    }
    ddp_copy_list_end(&list);
    if (!casts_first) return DDP_OK;
    return ddp__reduce_over_replicas(f, unit, ddp__newest_sums(unit), DDP__SHARD_SUMS);
}

/* The last part of the path, from the sum over ranks on. */
static ddp_result ddp__reduce_after_ranks(const ddp_fsdp *f, ddp__fsdp_unit *unit) {
    if (f->world_size > 1 && f->replica_group_count)
        DDP_TRY(ddp__reduce_over_replicas(f, unit, ddp__newest_sums(unit), DDP__SHARD_SUMS));
    if (f->reduces_per_micro_batch)
        ddp__accumulate_micro_batch(f, unit, ddp__newest_sums(unit), DDP__SHARD_SUMS);
    return ddp_device_check(f->group);
}

/* The whole path of one micro-batch without peer memory. */
static ddp_result ddp__reduce_by_collectives(const ddp_fsdp *f, ddp__fsdp_unit *unit) {
    unsigned char *full = ddp__grads_to_reduce(f, unit);
    if (!full) return ddp_device_check(f->group);
    DDP_TRY(f->world_size > 1 ? ddp__reduce_by_reduce_scatter(f, unit, full)
                              : ddp__reduce_unsharded(f, unit, full));
    return ddp__reduce_after_ranks(f, unit);
}

//== FSDP: order of reductions ========================================================== >>impl-reduce-order
/* Decides when a reduction runs, and which memory backward writes gradients to. Called by ddp_fsdp_unshard,
   ddp_fsdp_reduce_grads and ddp_fsdp_step.

   Collectives, and replicas with any transport: reductions are tasks of the group's queue, in the order of
   calls.

   Peer memory without replicas: the caller's thread runs them, inside calls of this ddp_fsdp. Each rank
   numbers the reductions that it issues. It publishes its progress in words of group memory:

       PROGRESS_ISSUED      the last number that it has issued
       PROGRESS_DONE        the last number for which it has summed its own rows
       PROGRESS_UNITS + n   unit and buffer of number n, modulo ddp__reduce_window

   At each call a rank runs the reductions that all ranks have issued. It waits only when it has no memory for
   more gradients, or at the end of the step. The gradients of number 1 may be overwritten when all ranks have
   done 1:

       rank 0   issue 1 . issue 2 do 1 . . . issue 3 do 2 3 . .
       rank 1   . . issue 1 do 1 . . issue 2 do 2 issue 3 . do 3 */

/* Indexes of words. The first two words have cache lines of their own. */
enum { DDP__PROGRESS_ISSUED = 0, DDP__PROGRESS_DONE = 8, DDP__PROGRESS_UNITS = 16 };

/* The number of units and buffers that are kept: more are never in flight. */
static int ddp__reduce_window(const ddp_fsdp *f) { return 2 * f->unit_count + 2; }

static int ddp__progress_reached(const ddp_fsdp *f, int word, uint64_t number) {
    for (int r = 0; r < f->world_size; r++)
        if (__atomic_load_n(&f->reduce.progress[r][word], __ATOMIC_ACQUIRE) < number) return 0;
    return 1;
}

static ddp_result ddp__progress_wait(const ddp_fsdp *f, int word, uint64_t number) {
    return ddp__progress_reached(f, word, number)
               ? DDP_OK
               : ddp_group_wait_signal(f->group, f->reduce.progress[f->rank] + word, number);
}

/* Fails if a rank has failed: it may have freed its gradients while this rank read them. */
static ddp_result ddp__check_peers_alive(const ddp_fsdp *f) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return ddp_group_cause(f->group) == DDP_OK ? DDP_OK : ddp_barrier(f->group);
}

/* The gradients of the unit's reduction that is next. buffer: of the rank that wrote them. Buffers are
   allocated in the same order on every rank, so that this rank's address leads to the peer's. */
static const unsigned char *ddp__issued_grads(const ddp_fsdp *f, const ddp__fsdp_unit *unit, size_t buffer) {
    if (unit->reduce_layout == DDP__CAST_GRADS) return f->reduce.cast_grads;
    return unit->reducing_buffer ? f->reduce.buffers[buffer].memory : unit->grad_memory;
}

/* Runs the next reduction. Waits until all ranks have issued it. */
static ddp_result ddp__reduce_run_next(ddp_fsdp *f) {
    ddp__fsdp_reduce_state *reduce = &f->reduce;
    uint64_t number = reduce->done + 1, at = number % (uint64_t)ddp__reduce_window(f);
    const unsigned char *grads[DDP_MAX_LOCAL_RANKS];
    ddp__fsdp_unit *unit = reduce->issued_units[at];
    DDP_TRY(ddp__progress_wait(f, DDP__PROGRESS_ISSUED, number));
    DDP_TRY(ddp__check_peers_alive(f)); /* a failure may have released this rank's buffer */
    for (int r = 0; r < f->world_size; r++) {
        uint64_t word = reduce->progress[r][DDP__PROGRESS_UNITS + at], other = (uint32_t)word;
        if (other != (uint64_t)unit->index) {
            DDP_TRY(ddp__check_peers_alive(f));
            return ddp_fail_in(
                DDP_ERR_MISMATCH, "ddp_fsdp_reduce_grads", f->group,
                "rank %d reduces unit %s, but this rank reduces unit %s; make the same calls on every rank",
                r, other < (uint64_t)f->unit_count ? f->units[other].name : "?", unit->name);
        }
        /* a rank that resharded units at other times uses another buffer */
        const unsigned char *own = ddp__issued_grads(f, unit, (size_t)(word >> 32));
        grads[r] = (const unsigned char *)ddp_group_peer(f->group, own, r);
    }
    ddp__reduce_from_peers(f, unit, grads);
    DDP_TRY(ddp__check_peers_alive(f));
    reduce->done = number;
    ddp_group_signal(f->group, reduce->progress[f->rank] + DDP__PROGRESS_DONE, number);
    return ddp__reduce_after_ranks(f, unit);
}

static ddp_result ddp__reduce_task(ddp_group *group, void *argument) {
    ddp__fsdp_unit *unit = (ddp__fsdp_unit *)argument;
    ddp_fsdp *f = unit->fsdp;
    (void)group;
    return ddp__fsdp_failed(f, f->reduce.progress ? ddp__reduce_run_next(f)
                                                  : ddp__reduce_by_collectives(f, unit));
}

/* Peer memory: runs the reductions that all ranks have issued. Waits for those up to number min_number. */
static ddp_result ddp__reduce_run_issued(ddp_fsdp *f, uint64_t min_number) {
    ddp__fsdp_reduce_state *reduce = &f->reduce;
    while (reduce->progress && !f->replica_group_count && reduce->done < reduce->issued
           && (reduce->done < min_number || ddp__progress_reached(f, DDP__PROGRESS_ISSUED, reduce->done + 1)))
        DDP_TRY(ddp__reduce_run_next(f));
    return DDP_OK;
}

/* Waits for a unit's reduction. The unit keeps its gradient buffer. */
static ddp_result ddp__reduce_wait(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    ddp_result result = ddp__reduce_run_issued(f, unit->last_issued);
    if (result == DDP_OK) result = ddp_wait(f->group, &unit->reduce_work);
    return result == DDP_OK ? DDP_OK : ddp__unit_failed(unit, result, "ddp_fsdp_reduce_grads");
}

/* Waits for a unit's reduction, and frees its gradient buffer. */
static ddp_result ddp__reduce_wait_release(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    ddp_result result = ddp__reduce_wait(f, unit);
    ddp__buffer_release(&unit->reducing_buffer, NULL);
    return result;
}

/* Waits for the reductions of all units. */
static ddp_result ddp__reduce_wait_all(ddp_fsdp *f) {
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++)
        DDP_TRY(ddp__reduce_wait_release(f, unit));
    return DDP_OK;
}

/* ddp_grad_sum.drain: a pipeline is about to overwrite its sums. */
static void ddp__reduce_drain(void *fsdp) { ddp__reduce_wait_all((ddp_fsdp *)fsdp); }

/* Whether a pipeline hands over f32 sums of these gradients. */
static int ddp__accepts_pipeline_sum(const ddp__fsdp_shard *s) {
    return s->trained && s->reduce_dtype == DDP_F32
           && ddp_sum_dtype(s->range[DDP__FULL_GRADS].dtype) != s->range[DDP__FULL_GRADS].dtype;
}

/* Uses the f32 sums that a pipeline has handed over, if any: from now on the unit's gradients are f32, in
   cast_grads. Collective when the first unit gets sums. */
static ddp_result ddp__accept_pipeline_sums(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    int count = 0;
    for (ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        ddp_grad_sum *sum = &s->user_param->param.sum;
        s->uses_pipeline_sum = sum->is_set && sum->data && sum->reader == f && ddp__accepts_pipeline_sum(s);
        sum->is_set = 0;
        count += s->uses_pipeline_sum;
    }
    if (count == 0) return DDP_OK;
    DDP_TRY(ddp__half_sums_end(f));
    unit->reduce_layout = DDP__CAST_GRADS;
    if (f->reduce.cast_grads) return DDP_OK;
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++)
        if (ddp__accepts_pipeline_sum(s))
            ddp__size_at_least(&f->reduce.cast_grads_bytes, s->unit->grad_bytes[DDP__CAST_GRADS]);
    return ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_GROUP, f->reduce.cast_grads_bytes,
                           &f->reduce.cast_grads);
}

/* Issues the reduction of one micro-batch's gradients with peer memory. */
static ddp_result ddp__reduce_issue(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    ddp__fsdp_reduce_state *reduce = &f->reduce;
    uint64_t window = (uint64_t)ddp__reduce_window(f), *own = reduce->progress[f->rank];
    uint64_t buffer = unit->reducing_buffer ? (uint64_t)(unit->reducing_buffer - reduce->buffers) : 0;
    if (unit->reduce_layout == DDP__CAST_GRADS && reduce->cast_issued) { /* all units share this memory */
        DDP_TRY(ddp__reduce_wait(f, reduce->issued_units[reduce->cast_issued % window]));
        DDP_TRY(ddp__progress_wait(f, DDP__PROGRESS_DONE, reduce->cast_issued));
    }
    if (!ddp__grads_to_reduce(f, unit)) return DDP_OK;
    unit->last_issued = ++reduce->issued;
    if (unit->reduce_layout == DDP__CAST_GRADS) reduce->cast_issued = unit->last_issued;
    if (unit->reducing_buffer) unit->reducing_buffer->last_issued = unit->last_issued;
    reduce->issued_units[unit->last_issued % window] = unit;
    own[DDP__PROGRESS_UNITS + unit->last_issued % window] = (uint64_t)unit->index | buffer << 32;
    ddp_group_signal(f->group, own + DDP__PROGRESS_ISSUED, unit->last_issued);
    if (!f->replica_group_count) return ddp__reduce_run_issued(f, 0);
    /* all ranks need one order for the collectives of two groups */
    return ddp_group_enqueue(f->group, ddp__reduce_task, unit, &unit->reduce_work);
}

/* Gives a unit memory for its full gradients: the free buffer that was used least recently. If all are in
   use, and more than `prefetch` reductions are in flight, it waits for the oldest one. Otherwise it allocates
   group memory. That is collective, so the choice depends only on the order of calls. */
static ddp_result ddp__grad_buffer_acquire(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    ddp__fsdp_reduce_state *reduce = &f->reduce;
    ddp__fsdp_buffer *buffer = NULL, *oldest = NULL;
    int in_flight = 0;
    for (ddp__fsdp_buffer *b = reduce->buffers; b < reduce->buffers + reduce->buffer_count; b++) {
        if (!b->in_use && (!buffer || b->last_use < buffer->last_use)) buffer = b;
        if (b->reducing_unit && (!oldest || b->last_use < oldest->last_use)) oldest = b;
        in_flight += b->reducing_unit != NULL;
    }
    if (!buffer && in_flight > f->desc.prefetch) {
        DDP_TRY(ddp__reduce_wait_release(f, oldest->reducing_unit));
        buffer = oldest;
    }
    if (!buffer) {
        buffer = reduce->buffers + reduce->buffer_count;
        DDP_TRY(
            ddp__fsdp_alloc(f, DDP__FOR_GRADIENTS, DDP__MEMORY_GROUP, reduce->buffer_bytes, &buffer->memory));
        reduce->buffer_count++;
    }
    buffer->last_use = ++reduce->buffer_uses;
    if (reduce->progress) DDP_TRY(ddp__progress_wait(f, DDP__PROGRESS_DONE, buffer->last_issued));
    unit->grad_buffer = ddp__buffer_acquire(buffer, &unit->grad_memory);
    return DDP_OK;
}

/* Gives a unit gradient memory for a backward. Under NO_SHARD and SHARD_OPTIM it is always the same. */
static ddp_result ddp__grads_attach(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    DDP_TRY(ddp__reduce_run_issued(f, 0));
    if (!unit->trained_count || unit->grads_attached || f->no_grad
        || unit->reduced_count >= f->desc.micro_batch_count)
        return DDP_OK;
    DDP_TRY(f->reduces_per_micro_batch ? ddp__grad_buffer_acquire(f, unit)
                                       : ddp__reduce_wait_release(f, unit));
    unit->grads_attached = 1;
    if (!f->desc.overwrite_gradients)
        f->device->fill_zero(unit->grad_memory, unit->grad_bytes[DDP__FULL_GRADS]);
    return DDP_OK;
}

static void ddp__grads_detach(ddp__fsdp_unit *unit) {
    unit->grads_attached = 0;
    ddp__buffer_release(&unit->grad_buffer, &unit->grad_memory);
}

//== FSDP: the step ============================================================================== >>impl-step
/* The end of a step: from sums of gradients to new full parameters.

     ddp_fsdp_mean            per_token: the tokens of all ranks become grad_divisor
     ddp_fsdp_clip_grad_norm  finish, then the norm; the optimizer multiplies by the factor
     ddp_fsdp_step            finish     wait for reductions, divide, add uses of tied parameters, unscale
                              agree      all ranks made the same calls, and none reads shards any more
                              optimizer  updates master_rows from the sums, and sent_rows in the same pass
                              publish    sent_rows of frozen parameters; all units are resharded
                              barrier    peers may read sent_rows
                              begin      empty sums, then prefetch for the next step

   OFFLOAD_HOST works in pieces, of which several are in flight:

     communication stream     gradients 0   gradients 1   gradients 2
     host, optimizer                        step 0        step 1        step 2
     compute stream                                       values 0      values 1      values 2

   OFFLOAD_PARAMS: sums, master values and sent_rows are on the host. The host waits until the last sums have
   arrived, and then works as on the CPU. By then all copies from sent_rows have run: they precede the last
   reduction on the communication stream. */

/* OFFLOAD_PARAMS: blocks the host until it has the sums of all reductions, which the compute stream already
   waits for. */
static ddp_result ddp__offload_wait_sums(const ddp_fsdp *f) {
    if (f->desc.offload != DDP_FSDP_OFFLOAD_PARAMS) return DDP_OK;
    DDP_TRY(ddp__fsdp_event_record(f, DDP_STREAM_COMPUTE, f->offload.sums_arrived));
    return ddp_event_wait_host(f->group, f->offload.sums_arrived, 0);
}

/* Finishes the reductions of a step: divides the sums once, adds the uses of tied parameters, and unscales.
   The second call in a step does nothing. */
static ddp_result ddp__fsdp_finish(ddp_fsdp *f, const char *call) {
    ddp_scaler *scaler = f->desc.scaler;
    if (f->sums_divided && scaler && !scaler->unscaled && ddp_group_status(f->group) == DDP_OK)
        return ddp__fsdp_invalid(
            call, f->group,
            "ddp_scaler_update was called between ddp_fsdp_clip_grad_norm and ddp_fsdp_step; call "
            "ddp_fsdp_zero_grad to start the step again, and ddp_scaler_update after ddp_fsdp_step");
    if (f->sums_divided) return ddp__fsdp_device_begin(f->group);
    for (const ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++)
        if (unit->trained_count && unit->reduced_count != f->desc.micro_batch_count)
            return ddp__fsdp_invalid(call, f->group,
                                     "unit %s was reduced %d times in this step, but micro_batch_count=%d; "
                                     "call ddp_fsdp_reduce_grads for every unit in every micro-batch",
                                     unit->name, unit->reduced_count, f->desc.micro_batch_count);
    if (!f->grad_divisor)
        return ddp__fsdp_invalid(
            call, f->group,
            "per_token=1, but the number of tokens of this step is unknown; call ddp_fsdp_mean first");
    if (scaler && !(scaler->scale > 0))
        return ddp__fsdp_invalid(call, f->group,
                                 "the scale of desc.scaler is 0: every recent step overflowed, or the "
                                 "scaler is not initialized; call ddp_scaler_init first");
    if (scaler && scaler->unscaled)
        return ddp__fsdp_invalid(call, f->group,
                                 "the scaler has already unscaled gradients in this step; call "
                                 "ddp_scaler_update after every ddp_fsdp_step");
    DDP_TRY(ddp__reduce_wait_all(f));
    DDP_TRY(ddp__fsdp_device_begin(f->group));
    DDP_TRY(ddp__offload_wait_sums(f));
    if (f->grad_divisor > 1) f->shard_device->divide(f->grad_sums, f->grad_sum_count, f->grad_divisor);
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        if (!s->trained || !s->own_count || s->source == s) continue;
        unsigned char *first = ddp__shard_sum(s->source);
        f->shard_device->add(first, first, ddp__shard_sum(s), s->own_count, s->master_dtype);
    }
    f->sums_divided = 1;
    if (!scaler) return ddp_device_check(f->group);
    DDP_TRY(ddp__scaler_unscale(scaler, f->group, f->grad_sums, f->optimizer_param_count,
                                f->shard_device == ddp_device_cpu() ? NULL : f->clip.squares));
    for (int i = 0; i < 2; i++) /* these groups in addition to the scaler's own */
        if (f->groups[i] && ddp_world_size(f->groups[i]) > 1)
            DDP_TRY(ddp_host_collective(f->groups[i], DDP_CALL_ALL_REDUCE, &scaler->found_inf,
                                        &scaler->found_inf, 1, DDP_I32, DDP_OP_MAX, -1));
    return DDP_OK;
}

/* Multiplies the sums by the factor that clipping has left for the step. */
static ddp_result ddp__clip_apply(ddp_fsdp *f) {
    if (f->clip.scale != 1 || f->clip.factor_now) DDP_TRY(ddp__half_sums_end(f));
    ddp__scale_grads(f->shard_device, f->grad_sums, f->optimizer_param_count, f->clip.scale,
                     f->clip.factor_now);
    f->clip.scale = 1;
    f->clip.factor_now = NULL;
    return DDP_OK;
}

/* Computes the norm and the factor, from the exact sum of squares of this rank's sums, added over the ranks
   that split the parameters. Replicas have the same. */
static ddp_result ddp__fsdp_clip(ddp_fsdp *f, float max_norm) {
    ddp__fsdp_clip_state *clip = &f->clip;
    ddp_exact_sum sum;
    DDP_TRY(ddp__clip_apply(f));
    f->shard_device->fill_zero(clip->squares, sizeof sum);
    f->shard_device->sum_squares(clip->squares, 0, f->grad_sums, f->optimizer_param_count);
    if (f->world_size > 1 && f->shard_device != f->device)
        DDP_TRY(ddp_host_collective(f->group, DDP_CALL_ALL_REDUCE, clip->squares, clip->squares,
                                    DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, -1));
    else if (f->world_size > 1)
        DDP_TRY(ddp_all_reduce(f->group, clip->squares, clip->squares, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM,
                               NULL));
    if (clip->factor)
        ddp__optimizer_kernels_of(f->device)->clip(clip->squares, max_norm, clip->factor, clip->norm);
    else
        f->shard_device->copy(&sum, clip->squares, sizeof sum);
    DDP_TRY(ddp__fsdp_event_record(f, DDP_STREAM_COMPUTE, clip->event));
    DDP_TRY(ddp_device_check(f->group)); /* a failure leaves neither norm nor factor */
    clip->has_norm = 1;
    clip->factor_now = clip->factor;
    if (clip->factor) return DDP_OK;
    clip->scale = ddp_clip_factor(&sum, max_norm, &clip->last_norm);
    return clip->scale == 0 ? ddp__clip_apply(f) : DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_mean(ddp_fsdp *fsdp, ddp_mean *loss) {
    DDP_PUBLIC_CALL(ddp_fsdp_mean);
    DDP__FSDP_CHECK(fsdp && loss, "fsdp or loss is NULL");
    DDP__FSDP_CHECK(
        fsdp->desc.per_token,
        "desc.per_token=0, so gradients are averages over ranks and micro-batches; set per_token=1");
    DDP__FSDP_CHECK(!fsdp->grad_divisor,
                    "ddp_fsdp_mean was already called in this step; call it once per step");
    DDP_TRY(ddp__reduce_wait_all(fsdp)); /* they may use the replicas, too */
    ddp_mean all = *loss;
    ddp_result result = DDP_OK;
    for (int i = 0; i < 2 && (result == DDP_OK || result == DDP_ERR_INVALID); i++) {
        if (fsdp->groups[i]) result = ddp_mean_reduce(fsdp->groups[i], &all);
        if (result == DDP_ERR_INVALID) all.count = -1; /* replicas receive it too */
    }
    if (result == DDP_ERR_INVALID)
        return ddp__fsdp_invalid(__func__, fsdp->group,
                                 "loss->count is negative on a rank, and %lld on this rank; use 0 or more",
                                 (long long)loss->count);
    DDP_TRY(result);
    fsdp->grad_divisor = all.count ? (uint64_t)all.count : 1;
    *loss = all;
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_clip_grad_norm(ddp_fsdp *fsdp, float max_norm, float *norm) {
    DDP_PUBLIC_CALL(ddp_fsdp_clip_grad_norm);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    DDP__FSDP_CHECK(max_norm > 0, "max_norm=%g; use a positive number", (double)max_norm);
    fsdp->clip.has_norm = 0;
    ddp_result result = ddp__fsdp_finish(fsdp, __func__);
    if (result == DDP_OK) result = ddp__fsdp_clip(fsdp, max_norm);
    if (result != DDP_OK) return ddp__fsdp_failed(fsdp, result);
    return norm ? ddp_fsdp_get_norm(fsdp, norm) : DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_get_norm(ddp_fsdp *fsdp, float *norm) {
    DDP__FSDP_CHECK(fsdp && norm, "fsdp or norm is NULL");
    DDP__FSDP_CHECK(fsdp->clip.has_norm, "no norm is available; call ddp_fsdp_clip_grad_norm first");
    DDP_TRY(ddp_event_wait_host(fsdp->group, fsdp->clip.event, 0));
    *norm = fsdp->clip.factor ? *fsdp->clip.norm : fsdp->clip.last_norm;
    return DDP_OK;
}

/* Agrees with all ranks, replicas too, that they made the same calls and read no shard any more. Otherwise
   all fail with the first cause. result: of this rank until now. */
static ddp_result ddp__fsdp_agree_calls(ddp_fsdp *f, const char *call, ddp_result result) {
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end && result == DDP_OK; unit++)
        result = ddp__unshard_wait(f, unit);
    char calls[32];
    snprintf(calls, sizeof calls, "calls=%016llx", (unsigned long long)f->call_hash);
    result = ddp_agree_groups(f->groups, 2, call, result, f->call_hash, calls);
    const char *differ = result == DDP_ERR_MISMATCH ? strstr(ddp_last_error(), "ranks differ: ") : NULL;
    if (!differ) return result;
    return ddp_fail_in(result, call, f->group,
                       "ranks unsharded or reduced units in different orders in this step; make the same "
                       "calls on every rank (%.*s)",
                       (int)strcspn(differ, ";"), differ);
}

/* OFFLOAD_HOST: copies elements of the master values to the device's sent_rows, through two pinned pieces.
   One is filled while the other one is in flight. */
static ddp_result ddp__offload_upload(ddp_fsdp *f, const ddp__fsdp_shard *s, size_t from, size_t count) {
    ddp__fsdp_offload_state *o = &f->offload;
    for (size_t n, size = ddp_dtype_size(s->dtype); count; from += n, count -= n, o->upload_index ^= 1) {
        unsigned char *piece = o->value_pieces + (size_t)o->upload_index * o->value_pieces_bytes / 2;
        n = count < DDP__HOST_PIECE ? count : DDP__HOST_PIECE;
        DDP_TRY(ddp_event_wait_host(f->group, o->uploaded[o->upload_index], 0));
        ddp_device_cpu()->cast(piece, s->dtype, s->master_rows + from * ddp_dtype_size(s->master_dtype),
                               s->master_dtype, n);
        ddp__fsdp_copy_async(f, s->sent_rows + from * size, piece, n * size);
        DDP_TRY(ddp__fsdp_event_record(f, DDP_STREAM_COMPUTE, o->uploaded[o->upload_index]));
    }
    return DDP_OK;
}

/* Whether the optimizer's step also writes sent_rows, so that no cast has to follow. The pieces of
   OFFLOAD_HOST are uploaded instead. */
static int ddp__shard_is_stepped_with_copy(const ddp__fsdp_shard *s) {
    const ddp_fsdp *f = s->unit->fsdp;
    return s->trained && s->own_count && s->sent_rows != s->master_rows && !f->desc.quantize_gather
           && f->desc.offload != DDP_FSDP_OFFLOAD_HOST;
}

/* Publishes changed master values: updates this rank's sent_rows, which peers read after ddp__shards_barrier,
   and reshards all units. stepped: the optimizer has already written the rows of trained shards. With
   OFFLOAD_HOST or OFFLOAD_PARAMS, nothing is left to do. */
static ddp_result ddp__fsdp_publish(ddp_fsdp *f, int stepped) {
    ddp_copy_list list = DDP_ZERO;
    int uploaded = stepped && f->offload.host_group;
    list.device = f->shard_device;
    DDP_TRY(ddp__fsdp_device_begin(f->group));
    for (ddp__fsdp_shard *s = f->shards; s < f->shards_end && !uploaded; s++) {
        if (s->source != s || (stepped && ddp__shard_is_stepped_with_copy(s))) continue;
        if (f->desc.quantize_gather)
            ddp__quantize(s);
        else if (f->desc.offload == DDP_FSDP_OFFLOAD_HOST)
            DDP_TRY(ddp__offload_upload(f, s, 0, s->own_count));
        else if (s->sent_rows != s->master_rows)
            ddp_copy_list_add(&list, s->sent_rows, s->dtype, s->master_rows, s->master_dtype, s->own_count);
    }
    ddp_copy_list_end(&list);
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        DDP_TRY(ddp__unit_reshard(f, unit));
        unit->in_use = 0;
        if (f->world_size == 1 && f->keeps_full_params) unit->unsharded = 1;
    }
    f->unshard.in_use_count = 0;
    return ddp_device_check(f->group);
}

static ddp_result ddp__shards_barrier(const ddp_fsdp *f) {
    return f->world_size > 1 && f->peer_memory ? ddp_barrier(f->group) : DDP_OK;
}

/* Points value.data and grad.data of the unit's parameters to full tensors, or to NULL. */
static void ddp__set_param_pointers(const ddp__fsdp_unit *unit, int values, int grads) {
    for (const ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
        const ddp__fsdp_shard *from = s->shares_full_params ? s->source : s;
        unsigned char *full = from->unit->full_memory ? from->unit->full_memory + from->full_offset : NULL;
        s->user_param->param.value.data = values ? full : NULL;
        s->user_param->param.grad.data = grads && s->trained && unit->grad_memory
                                             ? unit->grad_memory + s->range[DDP__FULL_GRADS].offset
                                             : NULL;
    }
}

/* Begins a step: no gradients, no partial sums. */
static void ddp__fsdp_begin(ddp_fsdp *f) {
    ddp__fsdp_unshard_state *u = &f->unshard;
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        unit->reduced_count = unit->partial_count = 0;
        ddp__grads_detach(unit);
        ddp__set_param_pointers(unit, f->desc.strategy != DDP_FSDP_FULL_SHARD || unit->in_use,
                                !f->reduces_per_micro_batch);
    }
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++)
        if (s->user_param->param.sum.reader == f) s->user_param->param.sum.is_set = 0;
    if (f->sums_divided)
        u->order_count = u->order_position;
    else if (!u->order_matches)
        u->order_count = 0; /* an interrupted step, or a load, has no order to prefetch along */
    u->order_position = f->sums_divided = 0;
    u->order_matches = 1;
    if (f->desc.per_token) f->grad_divisor = 0;
    f->clip.scale = 1;
    f->clip.factor_now = NULL;
    f->call_hash = DDP_HASH_SEED;
}

/* OFFLOAD_HOST: starts to copy the sums to the host on the communication stream, which is idle now, piece by
   piece. LARS begins with norms and therefore waits for all pieces. */
static ddp_result ddp__offload_download(ddp_fsdp *f) {
    ddp__fsdp_offload_state *o = &f->offload;
    ddp_result result = DDP_OK;
    DDP_TRY(ddp__clip_apply(f));
    DDP_TRY(ddp__fsdp_event_record(f, DDP_STREAM_COMPUTE, o->downloaded[0]));
    DDP_TRY(ddp__fsdp_stream_wait(f, DDP_STREAM_COMM, o->downloaded[0]));
    DDP_TRY(ddp__fsdp_use_stream(f, DDP_STREAM_COMM));
    o->next_piece = 0;
    for (int i = 0; i < f->optimizer_param_count; i++) {
        size_t size = ddp_dtype_size(f->grad_sums[i].dtype), bytes = f->optimizer_shards[i]->own_count * size,
               max = DDP__HOST_PIECE * size;
        for (size_t at = 0; at < bytes && result == DDP_OK; at += max) {
            ddp__fsdp_copy_async(f, (char *)f->optimizer_params[i].grad.data + at,
                                 (char *)f->grad_sums[i].data + at, bytes - at < max ? bytes - at : max);
            result = ddp__fsdp_event_record(f, DDP_STREAM_COMM, o->downloaded[o->next_piece++]);
        }
    }
    /* also on error: later work of this thread belongs to the compute stream */
    ddp_result stream_result = ddp__fsdp_device_begin(f->group);
    DDP_TRY(result != DDP_OK ? result : stream_result);
    o->next_piece = 0;
    return f->desc.optimizer.kind == DDP_OPTIMIZER_LARS
               ? ddp_event_wait_host(f->group, o->downloaded[o->piece_count - 1], 0)
               : DDP_OK;
}

/* Called by the optimizer before and after it steps a piece: waits for its gradients, or uploads its
   values. */
static ddp_result ddp__offload_piece(void *user, int i, size_t from, size_t count, int stepped) {
    ddp_fsdp *f = (ddp_fsdp *)user;
    return stepped ? ddp__offload_upload(f, f->optimizer_shards[i], from, count)
                   : ddp_event_wait_host(f->group, f->offload.downloaded[f->offload.next_piece++], 0);
}

/* The step, once all ranks have agreed to it. Allocates nothing. */
static ddp_result ddp__fsdp_update(ddp_fsdp *f, float lr) {
    int steps = !f->desc.scaler || !f->desc.scaler->found_inf;
    if (steps) {
        DDP_TRY(ddp__fsdp_device_begin(f->group));
        if (f->offload.piece_count) DDP_TRY(ddp__offload_download(f));
        if (f->optimizer) DDP_TRY(ddp__optimizer_step(f->optimizer, lr, f->clip.scale, f->clip.factor_now));
        f->step++;
        if (f->desc.state) f->desc.state->step = f->step;
    }
    DDP_TRY(ddp__fsdp_publish(f, steps || f->offload.host_group));
    DDP_TRY(ddp__shards_barrier(f));
    ddp__fsdp_begin(f);
    return ddp__fsdp_prefetch(f);
}

DDPDEF ddp_result ddp_fsdp_step(ddp_fsdp *fsdp, float lr) {
    DDP_PUBLIC_CALL(ddp_fsdp_step);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    DDP__FSDP_CHECK(ddp__is_finite_nonnegative((double)lr), "lr=%g; use 0 or more", (double)lr);
    ddp_result result = ddp__fsdp_finish(fsdp, __func__);
    if (result == DDP_OK) {
        ddp_result agreed = ddp__fsdp_agree_calls(fsdp, __func__, ddp__full_buffers_for_prefetch(fsdp));
        if (agreed != DDP_OK) return ddp__fsdp_failed(fsdp, agreed); /* on every rank: nothing has changed */
        result = ddp__fsdp_update(fsdp, lr);
    }
    return result == DDP_OK || result == DDP_ERR_INVALID || result == DDP_ERR_MISMATCH
               ? result
               : ddp__fsdp_poison(fsdp, result);
}

//== FSDP: checkpoints ========================================================================== >>impl-saver

/* Lists this rank's part of a checkpoint as slices, for >>impl-save and >>impl-load. Copies them to the host
   where the device has its own memory or a thread writes in the background. Public calls: ddp_fsdp_save,
   ddp_fsdp_save_wait, ddp_fsdp_load. */

enum { DDP__STATES_MAX = 2, DDP__STATE_NAME_MAX = 32 }; /* states of a parameter; bytes of a state's name */
/* Which of this rank's rows to list: those that it writes, all, or none. */
enum { DDP__LIST_SHARE, DDP__LIST_ALL, DDP__LIST_NOTHING };

/* Allocates the tables. Collective with save_in_background. */
static ddp_result ddp__saver_create(ddp_fsdp *f) {
    ddp__fsdp_saver *saver = &f->saver;
    ddp__rank_list *ranks = &saver->ranks;
    int capacity = f->shard_count * (1 + DDP__STATES_MAX) + f->desc.buffer_count;
    saver->groups[0] = f->desc.checkpoint_group ? f->desc.checkpoint_group : f->group;
    saver->groups[1] = f->desc.checkpoint_group ? NULL : f->desc.replicas;
    ranks->count = f->group ? ddp_world_size(saver->groups[0]) : f->group_size * f->replica_count;
    ranks->own = ddp_rank(saver->groups[0]);
    if (saver->groups[1]) {
        ranks->own += ddp_rank(saver->groups[1]) * ranks->count;
        ranks->count *= ddp_world_size(saver->groups[1]);
    }
    if (f->desc.state) (void)ddp__fsdp_table_alloc(f, ranks->count, sizeof *ranks->numbers, &ranks->numbers);
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++)
        ddp__size_at_least(&saver->name_size, strlen(s->name) + DDP__STATE_NAME_MAX);
    (void)ddp__fsdp_table_alloc(f, capacity, sizeof *saver->slices, &saver->slices);
    (void)ddp__fsdp_table_alloc(f, capacity, saver->name_size, &saver->names);
    return f->group && f->desc.save_in_background
               ? ddp_group_split(saver->groups[0], 0, ddp_rank(saver->groups[0]), &saver->thread_group)
               : DDP_OK;
}

/* Adds a tensor of the checkpoint with this rank's rows. If each rank has all rows, each writes an equal
   share of them. tensor: the rows of s. state: the name of the optimizer state, or NULL for the values. */
static void ddp__saver_add(ddp_fsdp *f, const ddp__fsdp_shard *s, const char *state, const ddp_tensor *tensor,
                           int list) {
    ddp__fsdp_saver *saver = &f->saver;
    ddp__checkpoint_slice *slice = &saver->slices[saver->count];
    char *name = saver->names + (size_t)saver->count++ * saver->name_size;
    const ddp_tensor *value = &s->user_param->param.value;
    size_t ranks = (size_t)ddp_world_size(f->group), share = (s->rows + ranks - 1) / ranks, skip = 0,
           rows = s->own_rows;
    if (f->world_size == 1 && list == DDP__LIST_SHARE) {
        skip = ddp__clamp_to_part(share * (size_t)ddp_rank(f->group), 0, s->rows);
        rows = ddp__clamp_to_part(share, 0, s->rows - skip);
    }
    snprintf(name, saver->name_size, state ? "%s.%s" : "%s", s->name, state);
    /* only a slice may repeat: a parameter without global_shape may be one by mistake */
    const ddp__checkpoint_slice new_slice = {name, tensor->dtype, value->ndim,   {0}, {0},
                                             {0},  NULL,          state != NULL, 0,   s->is_slice};
    *slice = new_slice;
    for (int i = 0; i < value->ndim; i++) {
        slice->shape[i] = s->is_slice ? s->user_param->global_shape[i] : value->shape[i];
        slice->offset[i] = s->is_slice ? s->user_param->global_offset[i] : 0;
        if (i == 0) slice->offset[i] += (int64_t)(s->first_row + skip);
        slice->extent[i] = i ? value->shape[i] : (int64_t)rows;
    }
    if (list != DDP__LIST_NOTHING && rows && s->row_elements && tensor->data)
        slice->data = (unsigned char *)tensor->data + ddp__shard_rows_bytes(s, skip, tensor->dtype);
}

/* Adds a buffer. Rank 0 of the group that writes the files has all of it. */
static void ddp__saver_add_buffer(ddp_fsdp *f, int index, int list) {
    const ddp_tensor *buffer = &f->desc.buffers[index];
    ddp__checkpoint_slice *slice = &f->saver.slices[f->saver.count++];
    memset(slice, 0, sizeof *slice);
    slice->name = f->desc.buffer_names[index];
    slice->dtype = buffer->dtype;
    slice->ndim = buffer->ndim;
    memcpy(slice->shape, buffer->shape, sizeof slice->shape);
    memcpy(slice->extent, buffer->shape, sizeof slice->extent);
    if (list == DDP__LIST_ALL || ddp_rank(f->saver.groups[0]) == 0) slice->data = buffer->data;
}

/* Lists every tensor of the checkpoint, the same on every rank. A tied parameter is saved under the name of
   its first use; a load accepts the names of later uses too. */
static void ddp__saver_list(ddp_fsdp *f, int list) {
    ddp__fsdp_saver *saver = &f->saver;
    saver->count = 0;
    for (ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        const char *name = NULL;
        ddp_tensor tensor = ddp__shard_tensor(s);
        if (s->source != s && list != DDP__LIST_ALL) continue;
        s->slice_index = saver->count;
        ddp__saver_add(f, s, NULL, &tensor, s->source == s ? list : DDP__LIST_NOTHING);
        if (s->source != s) saver->slices[s->slice_index].tied_to = s->source->slice_index + 1;
        for (int k = 0; s->source == s && s->trained && k < f->optimizer->state_count; k++) {
            (void)ddp_optimizer_get_state(f->optimizer, s->optimizer_index, k, &name, &tensor);
            ddp__saver_add(f, s, name, &tensor, list);
        }
    }
    for (int i = 0; i < f->desc.buffer_count; i++) ddp__saver_add_buffer(f, i, list);
}

/* Copies the data of the slices to host memory, which the slices then point to. back: from there to the
   data. */
static ddp_result ddp__saver_copy(ddp_fsdp *f, int back) {
    ddp__fsdp_saver *saver = &f->saver;
    size_t bytes = 0, at = 0;
    for (int i = 0; i < saver->count; i++)
        bytes += ddp_round_up((size_t)ddp__slice_box_bytes(&saver->slices[i]), 64);
    if (bytes > saver->staged_bytes) {
        ddp__fsdp_free(f, saver->staged);
        saver->staged_bytes = 0;
        DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_HOST, bytes, &saver->staged));
        saver->staged_bytes = bytes;
    }
    for (ddp__checkpoint_slice *slice = saver->slices; slice < saver->slices + saver->count; slice++) {
        size_t box_bytes = (size_t)ddp__slice_box_bytes(slice);
        if (box_bytes && back) f->device->copy(slice->data, saver->staged + at, box_bytes);
        if (box_bytes && !back) f->device->copy(saver->staged + at, slice->data, box_bytes);
        if (box_bytes && !back) slice->data = saver->staged + at;
        at += ddp_round_up(box_bytes, 64);
    }
    return ddp_device_check(f->group);
}

/* Writes the checkpoint, on the background thread or on the caller's. */
static void *ddp__saver_main(void *argument) {
    const ddp_fsdp *f = (ddp_fsdp *)argument;
    ddp__fsdp_saver *saver = &((ddp_fsdp *)argument)->saver;
    saver->result = ddp__saved_error_of(ddp__checkpoint_save(
        saver->thread_group ? saver->thread_group : saver->groups[0], saver->dir, saver->slices, saver->count,
        &saver->state, saver->state.per_rank ? &saver->ranks : NULL, f->desc.max_file_bytes,
        f->desc.keep_checkpoints));
    return NULL;
}

/* Lists the tensors, and copies them if copy is set. Then all ranks continue, or none. */
static ddp_result ddp__saver_prepare(ddp_fsdp *f, const char *call, const char *dir, int list, int copy) {
    ddp_result result = dir && dir[0] ? ddp__fsdp_device_begin(f->group)
                                      : ddp__fsdp_invalid(call, f->group,
                                                          "dir is NULL or empty; use the path of a folder");
    char description[64];
    ddp__saver_list(f, list);
    if (result == DDP_OK && copy) result = ddp__saver_copy(f, 0);
    if (f->desc.state) f->saver.state = *f->desc.state;
    int64_t per_rank = f->saver.state.per_rank;
    if (result == DDP_OK && per_rank != 0 && per_rank != 1)
        result = ddp__fsdp_invalid(call, f->group, "state.per_rank=%lld; use 0 or 1", (long long)per_rank);
    snprintf(description, sizeof description, "state.per_rank=%lld", (long long)per_rank);
    /* a load of a checkpoint without a scaler keeps this state */
    if (f->desc.scaler) ddp_scaler_save(f->desc.scaler, &f->saver.state.scaler);
    return ddp_agree_groups(f->saver.groups, 2, call, result, (uint64_t)per_rank, description);
}

/* Gathers the numbers of each rank: over the ranks that write together, then over the replicas. A broadcast
   may be larger than one message. */
static ddp_result ddp__saver_gather_states(ddp_fsdp *f) {
    ddp__fsdp_saver *saver = &f->saver;
    ddp__rank_numbers *own = &saver->ranks.numbers[saver->ranks.own];
    size_t words = sizeof *own / sizeof(uint64_t);
    int ranks = ddp_world_size(saver->groups[0]);
    memcpy(own->rng, saver->state.rng, sizeof own->rng);
    memcpy(own->user, saver->state.user, sizeof own->user);
    DDP_TRY(ddp_host_collective(saver->groups[0], DDP_CALL_ALL_GATHER, own, own - ddp_rank(saver->groups[0]),
                                words, DDP_U64, DDP_OP_SUM, -1));
    for (int r = 0; saver->groups[1] && r < ddp_world_size(saver->groups[1]); r++) {
        ddp__rank_numbers *block = saver->ranks.numbers + (size_t)r * (size_t)ranks;
        DDP_TRY(ddp_host_collective(saver->groups[1], DDP_CALL_BROADCAST, block, block, (size_t)ranks * words,
                                    DDP_U64, DDP_OP_SUM, r));
    }
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_save_wait(ddp_fsdp *fsdp) {
    DDP_PUBLIC_CALL(ddp_fsdp_save_wait);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    ddp__fsdp_saver *saver = &fsdp->saver;
    if (!saver->pending) return DDP_OK;
    if (saver->has_thread) pthread_join(saver->thread, NULL);
    saver->pending = saver->has_thread = 0;
    ddp_result result = ddp_error_restore(&saver->result);
    return saver->groups[1] ? ddp_agree(saver->groups[1], "ddp_fsdp_save", result, 0, "") : result;
}

DDPDEF ddp_result ddp_fsdp_save(ddp_fsdp *fsdp, const char *dir) {
    DDP_PUBLIC_CALL(ddp_fsdp_save);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    ddp__fsdp_saver *saver = &fsdp->saver;
    DDP_TRY(ddp_fsdp_save_wait(fsdp));
    int replica = fsdp->desc.replicas && ddp_rank(fsdp->desc.replicas) > 0,
        writes = !replica || fsdp->desc.checkpoint_group;
    int copies = writes && (fsdp->desc.save_in_background || fsdp->device != ddp_device_cpu());
    snprintf(saver->dir, sizeof saver->dir, "%s", dir ? dir : "");
    DDP_TRY(ddp__saver_prepare(fsdp, __func__, dir, replica ? DDP__LIST_NOTHING : DDP__LIST_SHARE, copies));
    if (saver->state.per_rank) {
        ddp_result gathered = ddp__saver_gather_states(fsdp);
        if (gathered != DDP_OK) return ddp__fsdp_failed(fsdp, gathered);
    }
    saver->state.step = fsdp->step;
    saver->result.result = DDP_OK;
    saver->pending = 1;
    saver->has_thread = writes && fsdp->desc.save_in_background
                        && pthread_create(&saver->thread, NULL, ddp__saver_main, fsdp) == 0;
    if (writes && !saver->has_thread) ddp__saver_main(fsdp); /* also if the system has no thread */
    return fsdp->desc.save_in_background ? DDP_OK : ddp_fsdp_save_wait(fsdp);
}

DDPDEF ddp_result ddp_fsdp_load(ddp_fsdp *fsdp, const char *dir) {
    DDP_PUBLIC_CALL(ddp_fsdp_load);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    DDP_TRY(ddp_fsdp_save_wait(fsdp));
    ddp_result agreed = ddp__fsdp_agree_calls(fsdp, __func__, DDP_OK);
    if (fsdp->desc.checkpoint_group) agreed = ddp_agree(fsdp->desc.checkpoint_group, __func__, agreed, 0, "");
    if (agreed != DDP_OK) return agreed;
    ddp__fsdp_saver *saver = &fsdp->saver;
    int copies = fsdp->device != ddp_device_cpu();
    DDP_TRY(ddp__saver_prepare(fsdp, __func__, dir, DDP__LIST_ALL, copies));
    DDP_TRY(ddp__checkpoint_load(saver->groups[0], saver->groups[1], dir, saver->slices, saver->count,
                                 fsdp->desc.scaler, saver->state.per_rank ? &saver->ranks : NULL,
                                 &saver->state));
    ddp__saver_list(fsdp, DDP__LIST_ALL); /* the slices point to the device's memory again */
    if (copies) DDP_TRY(ddp__saver_copy(fsdp, 1));
    if (fsdp->desc.scaler && saver->state.scaler.scale != 0)
        DDP_TRY(ddp_scaler_load(fsdp->desc.scaler, &saver->state.scaler));
    if (fsdp->desc.state) {
        saver->state.per_rank = fsdp->desc.state->per_rank;
        *fsdp->desc.state = saver->state;
    }
    fsdp->step = saver->state.step;
    ddp_optimizer_set_step(fsdp->optimizer, fsdp->step);
    DDP_TRY(ddp__fsdp_publish(fsdp, 0));
    DDP_TRY(ddp__shards_barrier(fsdp));
    return ddp_fsdp_zero_grad(fsdp);
}

//== FSDP: creation, checks and agreement =============================================== >>impl-create-check
/* ddp_fsdp_create makes three agreements. All ranks of group, replicas and checkpoint_group take part:

     1. descs      valid on each rank, and equal where they must be
     2. memory     a rank without memory still takes part in the collective allocations
     3. values     first values are in place, the optimizer exists

   A failure of one rank is therefore an error on every rank, and the groups stay usable. This section has
   agreement 1: defaults, checks, and the descriptions that ranks compare. */

#define DDP__CREATE_INVALID(group, ...) ddp__fsdp_invalid("ddp_fsdp_create", group, __VA_ARGS__)

static ddp_result ddp__fsdp_buffers_check(ddp_group *group, const ddp_fsdp_desc *d) {
    DDP_TRY(ddp_buffers_check("ddp_fsdp_create", group, d->buffers, d->buffer_count, group != NULL));
    if (d->buffer_count && !d->buffer_names)
        return DDP__CREATE_INVALID(group, "buffer_names is NULL; set a name for each of the %d buffers",
                                   d->buffer_count);
    for (int i = 0; i < d->buffer_count; i++) {
        const char *name = d->buffer_names[i];
        if (!name || !ddp__is_tensor_name(name, 9900))
            return DDP__CREATE_INVALID(group,
                                       "buffer %d: the name is missing or invalid; use UTF-8 of at most 9900 "
                                       "bytes other than __metadata__",
                                       i);
        for (int k = 0; k < i; k++)
            if (!strcmp(d->buffer_names[k], name))
                return DDP__CREATE_INVALID(
                    group, "buffers %d and %d have the name %.200s; give each its own name", k, i, name);
        for (int u = 0; u < d->unit_count; u++)
            for (int k = 0; k < d->units[u].param_count; k++) {
                const char *param = d->units[u].params[k].param.name;
                if (param && !strcmp(param, name))
                    return DDP__CREATE_INVALID(
                        group, "buffer %d has the name of parameter %.200s; give each its own name", i, name);
            }
    }
    return DDP_OK;
}

/* The checks of a desc that need neither its parameters nor other ranks. */
static ddp_result ddp__fsdp_desc_check(ddp_group *group, const ddp_fsdp_desc *d, int *param_count) {
    const struct {
        int wrong;
        const char *text;
        int value;
    } checks[] = {
        {!d->units || d->unit_count < 1, "unit_count is below 1 or units is NULL; set both", 0},
        {(unsigned)d->strategy > DDP_FSDP_NO_SHARD, "strategy=%d is not a ddp_fsdp_strategy",
         (int)d->strategy},
        {(unsigned)d->offload > DDP_FSDP_OFFLOAD_PARAMS, "offload=%d is not a ddp_fsdp_offload",
         (int)d->offload},
        {d->param_dtype != DDP_DTYPE_DEFAULT && !ddp_is_float(d->param_dtype),
         "param_dtype is not a floating-point dtype", 0},
        {d->reduce_dtype != DDP_DTYPE_DEFAULT && !ddp_is_float(d->reduce_dtype),
         "reduce_dtype is not a floating-point dtype", 0},
        {d->micro_batch_count < 0, "micro_batch_count=%d; use 1 or more, or 0 for 1", d->micro_batch_count},
        {!d->alloc_fn != !d->free_fn, "set both alloc_fn and free_fn, or neither", 0},
        {group && d->replicas == group,
         "replicas is the shard group itself; set it to the group of ranks with the same shard", 0},
        {d->quantize_gather && d->strategy != DDP_FSDP_FULL_SHARD,
         "quantize_gather=1 needs strategy DDP_FSDP_FULL_SHARD", 0},
        {d->offload == DDP_FSDP_OFFLOAD_PARAMS && d->strategy != DDP_FSDP_FULL_SHARD,
         "offload=DDP_FSDP_OFFLOAD_PARAMS needs strategy DDP_FSDP_FULL_SHARD: the others keep full "
         "parameters on the device; use DDP_FSDP_OFFLOAD_HOST",
         0},
        {d->prefetch < -1, "prefetch=%d; use 1 or more units, 0 for 1 or -1 for none", d->prefetch},
        {d->keep_checkpoints < 0, "keep_checkpoints=%d; use 1 or more, or 0 for 1", d->keep_checkpoints},
    };
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++)
        if (checks[i].wrong) return DDP__CREATE_INVALID(group, checks[i].text, checks[i].value);
    for (int u = 0; u < d->unit_count; u++) {
        const ddp_fsdp_unit_desc *unit = &d->units[u];
        if (!unit->params || unit->param_count < 1)
            return DDP__CREATE_INVALID(group, "unit %d (%s) has no parameters; set params and param_count", u,
                                       unit->name ? unit->name : "no name");
        *param_count += unit->param_count;
    }
    return ddp__fsdp_buffers_check(group, d);
}

/* Checks and copies the desc, and derives what depends only on it and the groups. f has group, group_size,
   replica_count and device. */
static ddp_result ddp__fsdp_desc_resolve(ddp_fsdp *f, const ddp_fsdp_desc *desc) {
    ddp_group *group = f->group;
    ddp_fsdp_desc *d = &f->desc;
    *d = *desc;
    if (d->replicas == group) d->replicas = NULL; /* the check fails, without a second wait in that group */
    f->groups[1] = d->replicas;
    f->groups[2] = d->checkpoint_group;
    f->allocator.file = -1;
    DDP_TRY(ddp__fsdp_desc_check(group, desc, &f->shard_count));
    if (!d->micro_batch_count) d->micro_batch_count = 1;
    if (!d->prefetch) d->prefetch = 1;
    if (d->prefetch < 0) d->prefetch = 0;
    if (d->prefetch > d->unit_count) d->prefetch = d->unit_count;
    if (!d->offload_dir) d->offload_dir = ".";
    if (!d->keep_checkpoints) d->keep_checkpoints = 1;
    f->unit_count = d->unit_count;
    if (f->device == ddp_device_cpu() && d->offload != DDP_FSDP_OFFLOAD_FILE)
        d->offload = DDP_FSDP_OFFLOAD_NONE; /* everything is in host memory already */
    if (f->device != ddp_device_cpu() && (d->quantize_gather || d->offload == DDP_FSDP_OFFLOAD_FILE))
        return ddp_fail_in(DDP_ERR_UNSUPPORTED, "ddp_fsdp_create", group,
                           "%s needs CPU memory, but the group's device is %s; turn it off",
                           d->quantize_gather ? "quantize_gather" : "offload to a file", f->device->name);
    int offloads_params = d->offload == DDP_FSDP_OFFLOAD_PARAMS;
    f->shard_device = offloads_params ? ddp_device_cpu() : f->device;
    f->world_size = d->strategy == DDP_FSDP_NO_SHARD ? 1 : f->group_size;
    f->rank = group && f->world_size > 1 ? ddp_rank(group) : 0;
    if (f->world_size == 1 && f->group_size > 1) f->replica_groups[f->replica_group_count++] = group;
    if (f->replica_count > 1) f->replica_groups[f->replica_group_count++] = d->replicas;
    f->grad_divisor = (uint64_t)d->micro_batch_count * (uint64_t)f->group_size * (uint64_t)f->replica_count;
    if (d->per_token) f->grad_divisor = 0; /* ddp_fsdp_mean sets it in every step */
    f->keeps_full_params = d->strategy != DDP_FSDP_FULL_SHARD
                           || (f->world_size == 1 && f->device != ddp_device_cpu() && !offloads_params);
    f->reduces_per_micro_batch = d->strategy == DDP_FSDP_FULL_SHARD || d->strategy == DDP_FSDP_SHARD_GRAD;
    return DDP_OK;
}

/* The number of partial sums over micro-batches: of shards, or of full gradients besides those that backward
   writes. */
static int ddp__fsdp_partial_sums(const ddp_fsdp *f) {
    int count = 0;
    for (int m = f->desc.micro_batch_count; m > 1; m >>= 1) count++;
    if (f->desc.sequential_accumulation && count > 1) count = 1;
    return f->reduces_per_micro_batch ? count + 1 : count;
}

/* Copies the lists of buffers and of their names. */
static ddp_result ddp__fsdp_buffers_copy(ddp_fsdp *f) {
    ddp_fsdp_desc *d = &f->desc;
    size_t count = (size_t)d->buffer_count;
    ddp_tensor *buffers;
    const char **names;
    if (!count) return DDP_OK;
    DDP_TRY(ddp__fsdp_table_alloc(f, d->buffer_count, sizeof *buffers + sizeof *names, &buffers));
    names = (const char **)(void *)(buffers + count);
    memcpy(buffers, d->buffers, count * sizeof *buffers);
    memcpy((void *)names, (const void *)d->buffer_names, count * sizeof *names);
    d->buffers = buffers;
    d->buffer_names = names;
    return DDP_OK;
}

/* Allocates the object, followed by the list of its allocations. Describes units and shards, and finds every
   error that one rank can find without the others. */
static ddp_result ddp__fsdp_describe(ddp_fsdp *resolved, ddp_fsdp **out) {
    ddp_optimizer_desc optimizer = resolved->desc.optimizer;
    size_t allocations = (size_t)resolved->unit_count * (size_t)(ddp__fsdp_partial_sums(resolved) + 9) + 40;
    size_t own = ddp_round_up(sizeof *resolved, 64), size = own + allocations * sizeof(ddp__fsdp_allocation);
    ddp_fsdp *f = (ddp_fsdp *)ddp__fsdp_host_alloc(resolved, size);
    if (!f) return DDP_ERR_NO_MEMORY;
    *f = *resolved;
    *out = f;
    f->allocator.allocations = (ddp__fsdp_allocation *)(void *)((unsigned char *)f + own);
    ddp__fsdp_count_bytes(f, DDP__FOR_BOOKKEEPING, size + DDP_MALLOC_EXTRA, 1);
    DDP_TRY(ddp__fsdp_table_alloc(f, f->unit_count, sizeof *f->units, &f->units));
    DDP_TRY(ddp__fsdp_table_alloc(f, f->shard_count, sizeof *f->shards, &f->shards));
    DDP_TRY(ddp__fsdp_buffers_copy(f));
    f->units_end = f->units + f->unit_count;
    f->shards_end = f->shards;
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        const ddp_fsdp_unit_desc *d = &f->desc.units[unit - f->units];
        unit->fsdp = f;
        unit->index = (int)(unit - f->units);
        unit->shards = f->shards_end;
        unit->end = f->shards_end += d->param_count;
        if (d->name)
            snprintf(unit->name, sizeof unit->name, "%s", d->name);
        else
            snprintf(unit->name, sizeof unit->name, "unit %d", unit->index);
        for (ddp__fsdp_shard *s = unit->shards; s < unit->end; s++) {
            s->user_param = &d->params[s - unit->shards];
            s->unit = unit;
            s->name = s->user_param->param.name ? s->user_param->param.name : "(no name)";
            DDP_TRY(ddp__shard_describe(f, s));
        }
    }
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) ddp__unit_layout(f, unit);
    return ddp__optimizer_resolve(f->group, &optimizer); /* only checks its numbers, before any rank waits */
}

/* Describes a buffer for a comparison between ranks, and returns its hash. */
static uint64_t ddp__buffer_describe(const ddp_fsdp_desc *d, int index, char *text) {
    const ddp_tensor *buffer = &d->buffers[index];
    const char *name = d->buffer_names[index];
    snprintf(text, DDP_AGREE_TEXT, "buffer %d '%.100s' %.60s", index, name,
             ddp_describe_shape(ddp_dtype_name(buffer->dtype), buffer->ndim, buffer->shape).text);
    uint64_t hash = ddp_hash(DDP_HASH_SEED, name, strlen(name) + 1);
    hash = ddp_hash(hash, &buffer->dtype, sizeof buffer->dtype);
    return ddp_hash(hash, buffer->shape, (size_t)buffer->ndim * sizeof buffer->shape[0]);
}

enum { DDP__FSDP_OPTIONS = 32 };

/* Describes entry i of the list that must be equal on all ranks: options, parameters, buffers. Returns its
   hash. */
static uint64_t ddp__fsdp_agree_entry(const void *list, int i, char *text) {
    const ddp_fsdp *f = (const ddp_fsdp *)list;
    const ddp_fsdp_desc *d = &f->desc;
#define DDP__OPTION(field) \
    { #field, (double)d->field }
    const struct {
        const char *name;
        double value;
    } options[DDP__FSDP_OPTIONS] = {{"checkpoint_group", d->checkpoint_group ? 1.0 : 0.0},
                                    {"replicas", (double)(d->replicas ? ddp_world_size(d->replicas) : 0)},
                                    DDP__OPTION(unit_count),
                                    {"param_count", (double)f->shard_count},
                                    DDP__OPTION(buffer_count),
                                    {"scaler", d->scaler ? 1.0 : 0.0},
                                    DDP__OPTION(strategy),
                                    DDP__OPTION(param_dtype),
                                    DDP__OPTION(reduce_dtype),
                                    DDP__OPTION(micro_batch_count),
                                    DDP__OPTION(per_token),
                                    DDP__OPTION(sequential_accumulation),
                                    DDP__OPTION(prefetch),
                                    DDP__OPTION(max_gathered_bytes),
                                    DDP__OPTION(no_reshard_after_forward),
                                    DDP__OPTION(overwrite_gradients),
                                    DDP__OPTION(quantize_gather),
                                    DDP__OPTION(offload),
                                    DDP__OPTION(save_in_background),
                                    DDP__OPTION(skip_initial_broadcast),
                                    DDP__OPTION(max_file_bytes),
                                    DDP__OPTION(keep_checkpoints),
                                    DDP__OPTION(optimizer.kind),
                                    DDP__OPTION(optimizer.nesterov),
                                    DDP__OPTION(optimizer.decay_matrices_only),
                                    DDP__OPTION(optimizer.beta1),
                                    DDP__OPTION(optimizer.beta2),
                                    DDP__OPTION(optimizer.eps),
                                    DDP__OPTION(optimizer.momentum),
                                    DDP__OPTION(optimizer.dampening),
                                    DDP__OPTION(optimizer.trust_coefficient),
                                    DDP__OPTION(optimizer.weight_decay)};
#undef DDP__OPTION
    if (i < DDP__FSDP_OPTIONS) {
        snprintf(text, DDP_AGREE_TEXT, "%s=%.9g", options[i].name, options[i].value);
        return ddp_hash(DDP_HASH_SEED, &options[i].value, sizeof options[i].value);
    }
    i -= DDP__FSDP_OPTIONS;
    if (i >= f->shard_count) return ddp__buffer_describe(d, i - f->shard_count, text);
    const ddp__fsdp_shard *s = &f->shards[i];
    const ddp_tensor *value = &s->user_param->param.value;
    const char *grad = ddp_dtype_name(s->range[DDP__FULL_GRADS].dtype);
    const int64_t numbers[] = {
        s->unit->index,        value->dtype, value->ndim,        s->range[DDP__FULL_GRADS].dtype,
        s->source - f->shards, s->trained,   value->data != NULL};
    size_t shape_bytes = (size_t)value->ndim * sizeof value->shape[0];
    ddp_shape_text shape = ddp_describe_shape(ddp_dtype_name(value->dtype), value->ndim, value->shape),
                   part = ddp_describe_shape("", value->ndim, s->user_param->global_offset);
    ddp_shape_text global = ddp_describe_shape("", value->ndim, s->user_param->global_shape);
    const char *frozen = s->trained ? "" : " frozen";
    const char *tied = s->source != s ? " tied" : "";
    const char *no_values = value->data ? "" : " without values";
    snprintf(text, DDP_AGREE_TEXT, "unit %.40s, parameter '%.60s' %.40s, gradient %s%s%s%s", s->unit->name,
             s->name, shape.text, grad, frozen, tied, no_values);
    if (s->is_slice)
        snprintf(text + strlen(text), DDP_AGREE_TEXT - strlen(text), " at%.40s of%.40s", part.text,
                 global.text);
    uint64_t hash = ddp_hash(ddp_hash(DDP_HASH_SEED, s->name, strlen(s->name)), numbers, sizeof numbers);
    hash = ddp_hash(ddp_hash(hash, value->shape, shape_bytes), s->user_param->global_shape, shape_bytes);
    return ddp_hash(hash, s->user_param->global_offset, shape_bytes);
}

/* All ranks of a group create the same object, or all fail. result: of this rank until now. */
static ddp_result ddp__fsdp_compare(const ddp_fsdp *f, ddp_group *group, ddp_result result) {
    int differs = 2;
    result = ddp_agree_list(group, "ddp_fsdp_create", result, f,
                            DDP__FSDP_OPTIONS + f->shard_count + f->desc.buffer_count, ddp__fsdp_agree_entry,
                            &differs);
    /* entries 0 and 1 are the groups: a rank lacks one of them, and no rank must wait for it there */
    for (int g = 1; g < 3 && differs < 2 && group == f->group; g++)
        if (f->groups[g]) ddp_group_poison(f->groups[g], result, ddp_last_error());
    return result;
}

//== FSDP: creation, memory =========================================================== >>impl-create-memory
/* Agreement 2 of ddp_fsdp_create: allocates all memory of units, shards, reductions, clipping and offload. A
   rank continues after a failure, since other ranks wait for it in collective allocations. */

/* Memory for the partial sums of a unit, and for its final sums. */
static void ddp__unit_alloc_sums(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    int partial_sums = ddp__fsdp_partial_sums(f), kind = DDP__MEMORY_DEVICE;
    size_t partial_bytes = unit->grad_bytes[f->reduces_per_micro_batch ? DDP__SHARD_SUMS : DDP__CAST_GRADS];
    size_t sum_bytes = unit->half_sums ? 0 : unit->grad_bytes[DDP__SHARD_SUMS];
    /* ddp__reduce_unsharded then adds sums over replicas */
    if (f->world_size == 1 && f->replica_group_count && unit->casts_grads
        && unit->reduce_layout == DDP__FULL_GRADS)
        kind = DDP__MEMORY_GROUP;
    if (f->desc.offload == DDP_FSDP_OFFLOAD_PARAMS) kind = DDP__MEMORY_PINNED;
    for (int i = 0; i < partial_sums || (i == 0 && sum_bytes); i++) {
        size_t bytes = i < partial_sums ? partial_bytes : 0;
        if (i == 0) ddp__size_at_least(&bytes, sum_bytes); /* number 0 becomes the final sum */
        (void)ddp__fsdp_alloc(f, DDP__FOR_GRADIENTS, kind, bytes, &unit->partial_sum[i]);
    }
}

static void ddp__unit_alloc(ddp_fsdp *f, ddp__fsdp_unit *unit) {
    int shared = f->world_size > 1 ? DDP__MEMORY_GROUP : DDP__MEMORY_DEVICE;
    if (f->keeps_full_params)
        (void)ddp__fsdp_alloc(f, DDP__FOR_SHARDS, shared, unit->full_bytes, &unit->full_memory);
    else if (ddp__full_memory_is_per_unit(f))
        (void)ddp__fsdp_alloc(f, DDP__FOR_FULL_PARAMS, DDP__MEMORY_DEVICE, unit->full_bytes,
                              &unit->full_memory);
    if (!f->keeps_full_params)
        (void)ddp__fsdp_alloc(f, f->desc.quantize_gather ? DDP__FOR_COMMUNICATION : DDP__FOR_SHARDS,
                              f->desc.offload == DDP_FSDP_OFFLOAD_PARAMS ? DDP__MEMORY_PINNED : shared,
                              unit->shard_bytes, &unit->shard_memory);
    if (!f->reduces_per_micro_batch && unit->trained_count)
        (void)ddp__fsdp_alloc(f, DDP__FOR_GRADIENTS, DDP__MEMORY_GROUP, unit->grad_bytes[DDP__FULL_GRADS],
                              &unit->grad_memory);
    if (unit->master_bytes)
        (void)ddp__fsdp_alloc(f, DDP__FOR_SHARDS, ddp__offload_kinds[f->desc.offload], unit->master_bytes,
                              &unit->master_memory);
    if (unit->trained_count) ddp__unit_alloc_sums(f, unit);
}

/* OFFLOAD_HOST and OFFLOAD_PARAMS: a world of one rank on the CPU for the optimizer, and pinned memory and
   events for copies between it and the device. */
static ddp_result ddp__offload_create(ddp_fsdp *f) {
    ddp__fsdp_offload_state *o = &f->offload;
    ddp_group_desc alone = DDP_ZERO;
    int offloads_params = f->desc.offload == DDP_FSDP_OFFLOAD_PARAMS;
    int has_events = f->group && f->device->use_stream;
    alone.init_method = "self://";
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        size_t size = ddp_dtype_size(s->master_dtype),
               piece = s->own_count < DDP__HOST_PIECE ? s->own_count : DDP__HOST_PIECE;
        ddp__size_at_least(&o->value_pieces_bytes, 2 * ddp_round_up(piece * size, 64));
        if (s->source != s || !s->trained || offloads_params) continue;
        o->host_grads_bytes += ddp_round_up(s->own_count * size, 64);
        o->piece_count += (int)((s->own_count + DDP__HOST_PIECE - 1) / DDP__HOST_PIECE);
    }
    if (f->group) DDP_TRY(ddp_group_create(&o->host_group, &alone));
    DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_PINNED, o->value_pieces_bytes,
                            &o->value_pieces));
    for (int i = 0; i < 2 && offloads_params && has_events; i++) {
        DDP_TRY(f->device->event_create(f->group, &o->filled[i]));
        DDP_TRY(f->device->event_create(f->group, &o->emptied[i]));
    }
    if (offloads_params) return has_events ? f->device->event_create(f->group, &o->sums_arrived) : DDP_OK;
    DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_GRADIENTS, DDP__MEMORY_PINNED, o->host_grads_bytes, &o->host_grads));
    DDP_TRY(ddp__fsdp_table_alloc(f, o->piece_count, sizeof *o->downloaded, &o->downloaded));
    for (int i = 0; i < o->piece_count + 2 && has_events; i++)
        DDP_TRY(f->device->event_create(f->group, i < 2 ? &o->uploaded[i] : &o->downloaded[i - 2]));
    return DDP_OK;
}

/* The unit that is unsharded now, and those that are unsharded ahead. */
static int ddp__prefetch_window(const ddp_fsdp *f) {
    return 1 + f->desc.prefetch < f->unit_count ? 1 + f->desc.prefetch : f->unit_count;
}

/* Memory that all units share, of the size that the largest unit needs. */
static void ddp__staging_alloc(ddp_fsdp *f) {
    ddp__fsdp_unshard_state *u = &f->unshard;
    ddp__fsdp_reduce_state *reduce = &f->reduce;
    ddp__fsdp_offload_state *o = &f->offload;
    int offloads_params = f->desc.offload == DDP_FSDP_OFFLOAD_PARAMS;
    size_t world = (size_t)f->world_size;
    size_t *gather_bytes = f->device->use_stream ? &u->gather_bytes : &f->recv_bytes;
    for (const ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        size_t reduce_bytes = 0;
        for (int d = 0; d <= DDP_U64; d++)
            reduce_bytes += ddp_round_up(unit->reduce_count[d] * ddp_dtype_size((ddp_dtype)d), 64);
        ddp__size_at_least(&f->unshard.buffer_bytes, unit->full_bytes);
        ddp__size_at_least(&o->staged_bytes, ddp_round_up(unit->block_bytes, 64));
        ddp__size_at_least(&o->sums_bytes, unit->grad_bytes[DDP__SHARD_SUMS]);
        ddp__size_at_least(&reduce->buffer_bytes, unit->grad_bytes[DDP__FULL_GRADS]);
        if (unit->reduce_layout == DDP__CAST_GRADS)
            ddp__size_at_least(&reduce->cast_grads_bytes, unit->grad_bytes[DDP__CAST_GRADS]);
        for (const ddp__fsdp_shard *s = unit->shards; s < unit->end && world > 1 && f->peer_memory; s++)
            if (s->trained
                && (s->range[unit->reduce_layout].dtype != s->reduce_dtype
                    || s->reduce_dtype != s->master_dtype))
                ddp__size_at_least(&reduce->tile_bytes,
                                   (world + 1) * DDP__REDUCE_TILE * ddp_dtype_size(s->reduce_dtype));
        if (world == 1 || f->peer_memory) continue;
        if (unit->packs_block && !offloads_params) ddp__size_at_least(&f->send_bytes, unit->block_bytes);
        if (!unit->gathers_in_place) ddp__size_at_least(gather_bytes, unit->block_bytes * world);
        if (!ddp__unit_sends_grads(f, unit)) ddp__size_at_least(&f->send_bytes, (reduce_bytes + 64) * world);
        if (!unit->sums_in_place) ddp__size_at_least(&f->recv_bytes, reduce_bytes);
    }
    if (reduce->cast_grads_bytes)
        (void)ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_GROUP, reduce->cast_grads_bytes,
                              &reduce->cast_grads);
    if (reduce->tile_bytes)
        (void)ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_DEVICE, reduce->tile_bytes,
                              &reduce->tile);
    if (f->send_bytes)
        (void)ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_GROUP, f->send_bytes, &f->send);
    if (f->recv_bytes)
        (void)ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_GROUP, f->recv_bytes, &f->recv);
    f->buffer_message_bytes = ddp_buffers_message_bytes(f->desc.buffers, f->desc.buffer_count);
    if (f->buffer_message_bytes)
        (void)ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_GROUP, f->buffer_message_bytes,
                              &f->buffer_message);
    if (offloads_params && world > 1)
        (void)ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_GROUP, 2 * o->staged_bytes,
                              &o->staged_rows);
    if (offloads_params)
        (void)ddp__fsdp_alloc(f, DDP__FOR_GRADIENTS, DDP__MEMORY_GROUP,
                              (f->desc.micro_batch_count > 1 ? 2 : 1) * o->sums_bytes, &o->staged_sums);
    if (!u->gather_bytes) return;
    int count = ddp__prefetch_window(f);
    (void)ddp__fsdp_table_alloc(f, count, sizeof *u->gather_buffers, &u->gather_buffers);
    (void)ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_GROUP, (size_t)count * u->gather_bytes,
                          &u->gather_memory);
    if (!u->gather_buffers || !u->gather_memory) return;
    for (int i = 0; i < count; i++)
        u->gather_buffers[i].memory = u->gather_memory + (size_t)i * u->gather_bytes;
    u->gather_buffer_count = count;
}

/* Memory for clipping. A device with pinned memory and streams computes the factor, if it has the sums. */
static ddp_result ddp__clip_create(ddp_fsdp *f) {
    ddp__fsdp_clip_state *clip = &f->clip;
    int on_device = f->shard_device == f->device;
    int decides = on_device && f->device->alloc_pinned && f->device->use_stream;
    DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_BOOKKEEPING, on_device ? DDP__MEMORY_DEVICE : DDP__MEMORY_HOST,
                            sizeof *clip->squares + (decides ? 64 : 0), &clip->squares));
    if (!decides) return DDP_OK;
    DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_BOOKKEEPING, DDP__MEMORY_PINNED, 64, &clip->norm));
    if (!f->group) return DDP_OK;
    clip->factor = (float *)(void *)(clip->squares + 1);
    return f->device->event_create(f->group, &clip->event);
}

/* OFFLOAD_FILE: creates the file and removes its name. */
static ddp_result ddp__offload_open(ddp_fsdp *f) {
    char path[4096];
    snprintf(path, sizeof path, "%s/ddp-offload-XXXXXX", f->desc.offload_dir);
    f->allocator.file = mkstemp(path);
    if (f->allocator.file >= 0) unlink(path);
    if (f->allocator.file >= 0 && fcntl(f->allocator.file, F_SETFD, FD_CLOEXEC) == 0) return DDP_OK;
    return ddp_fail(DDP_ERR_SYSTEM,
                    "ddp_fsdp_create group=%s: offload_dir=%s: a file could not be created: %s",
                    ddp_group_name(f->group), f->desc.offload_dir, strerror(errno));
}

/* Allocates all memory, or counts it for a prediction. The first failure is in f->allocator.error. Collective
   allocations continue after it. */
static void ddp__fsdp_alloc_all(ddp_fsdp *f) {
    ddp_saved_error *error = &f->allocator.error;
    ddp__fsdp_reduce_state *reduce = &f->reduce;
    int window = ddp__reduce_window(f);
    uint64_t *own;
    if (f->group && f->device->use_stream && f->desc.replicas)
        ddp_error_save(error, f->device->event_create(f->group, &reduce->event));
    if (f->group && f->desc.offload == DDP_FSDP_OFFLOAD_FILE) ddp_error_save(error, ddp__offload_open(f));
    (void)ddp__fsdp_table_alloc(f, f->unit_count, sizeof *f->unshard.buffers, &f->unshard.buffers);
    (void)ddp__fsdp_table_alloc(f, window, sizeof *reduce->buffers, &reduce->buffers);
    (void)ddp__fsdp_table_alloc(f, f->shard_count, sizeof *f->optimizer_params, &f->optimizer_params);
    (void)ddp__fsdp_table_alloc(f, f->shard_count, sizeof *f->optimizer_shards, &f->optimizer_shards);
    (void)ddp__fsdp_table_alloc(f, f->shard_count, sizeof *f->grad_sums, &f->grad_sums);
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) ddp__unit_alloc(f, unit);
    f->peer_memory = f->world_size <= DDP_MAX_LOCAL_RANKS && f->desc.offload != DDP_FSDP_OFFLOAD_PARAMS
                     && (f->group || !f->desc.ranks.no_peer_memory);
    for (const ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        const unsigned char *shared = f->keeps_full_params ? unit->full_memory : unit->shard_memory;
        for (int r = 0; r < f->world_size && shared && f->peer_memory; r++)
            f->peer_memory = r == f->rank || ddp_group_peer(f->group, shared, r) != NULL;
    }
    f->unshard_task = f->peer_memory ? ddp__unshard_copy : ddp__unshard_gather;
    if (f->world_size > 1 && f->peer_memory) {
        (void)ddp__fsdp_table_alloc(f, window, sizeof *reduce->issued_units, &reduce->issued_units);
        (void)ddp__fsdp_alloc(f, DDP__FOR_BOOKKEEPING, DDP__MEMORY_GROUP,
                              (size_t)(DDP__PROGRESS_UNITS + window) * sizeof *own, &own);
        (void)ddp__fsdp_table_alloc(f, f->world_size, sizeof *reduce->progress, &reduce->progress);
        for (int r = 0; r < f->world_size && own && reduce->progress; r++)
            reduce->progress[r] = (uint64_t *)ddp_group_peer(f->group, own, r);
    }
    ddp__staging_alloc(f);
    if (f->desc.offload == DDP_FSDP_OFFLOAD_HOST || f->desc.offload == DDP_FSDP_OFFLOAD_PARAMS)
        ddp_error_save(error, ddp__offload_create(f));
    ddp_error_save(error, ddp__clip_create(f));
    ddp_error_save(error, ddp__saver_create(f));
}

//== FSDP: creation, values; destruction ======================================================= >>impl-create
/* Agreement 3 of ddp_fsdp_create: fills in the first values and creates the optimizer. Also ddp_fsdp_create
   itself and ddp_fsdp_destroy. */

/* Fills in the first values of this rank's rows: from param.value.data, or by init_fn. With OFFLOAD_HOST and
   OFFLOAD_PARAMS, the device's values reach the master values through offload.value_pieces. */
static ddp_result ddp__shard_fill(ddp_fsdp *f, const ddp__fsdp_shard *s) {
    const ddp_tensor *value = &s->user_param->param.value;
    const ddp_device *to = f->offload.host_group ? ddp_device_cpu() : f->device;
    size_t size = ddp_dtype_size(value->dtype), master_size = ddp_dtype_size(s->master_dtype);
    unsigned char *rows = s->master_rows;
    if (!s->own_count) return DDP_OK;
    if (value->data) {
        const unsigned char *from = (unsigned char *)value->data
                                    + ddp__shard_rows_bytes(s, s->first_row, value->dtype);
        size_t max = f->offload.host_group ? DDP__HOST_PIECE : s->own_count;
        for (size_t at = 0, n; at < s->own_count; at += n) {
            n = s->own_count - at < max ? s->own_count - at : max;
            if (f->offload.host_group) f->device->copy(f->offload.value_pieces, from + at * size, n * size);
            to->cast(s->master_rows + at * master_size, s->master_dtype,
                     f->offload.host_group ? f->offload.value_pieces : from, value->dtype, n);
        }
        return ddp_device_check(f->group);
    }
    if (!to->host_memory)
        DDP_TRY(
            ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_HOST, s->own_count * master_size, &rows));
    ddp_result result;
    {
        DDP_USER_CALLBACK;
        result = f->desc.init_fn(s->user_param, (int64_t)s->first_row, (int64_t)s->own_rows, rows,
                                 f->desc.init_user);
    }
    if (rows != s->master_rows) f->device->copy(s->master_rows, rows, s->own_count * master_size);
    if (rows != s->master_rows) ddp__fsdp_free(f, rows);
    return result;
}

/* Bytes that an optimizer allocates in addition to its state: of its device, or from its group's
   allocator. */
static size_t ddp__optimizer_tables(const ddp_optimizer *o, int of_device) {
    size_t sums = (size_t)o->square_count * sizeof(ddp_exact_sum),
           here = sums + (size_t)o->square_count / 2 * sizeof *o->trust_rates;
    int on_host = o->device == ddp_device_cpu();
    if (of_device) return on_host ? 0 : here;
    size_t param_bytes = sizeof *o->params + sizeof *o->tensors;
    size_t bytes = sizeof *o + (size_t)o->desc.param_count * param_bytes + 2 * DDP_MALLOC_EXTRA;
    if (o->host_squares) bytes += sums + DDP_MALLOC_EXTRA;
    return o->square_count && on_host ? bytes + here + DDP_MALLOC_EXTRA : bytes;
}

static void ddp__optimizer_count_tables(ddp_fsdp *f, const ddp_optimizer *o) {
    ddp__fsdp_count_bytes(f, DDP__FOR_BOOKKEEPING, ddp__optimizer_tables(o, 1), 1);
    if (!f->desc.alloc_fn) ddp__fsdp_count_bytes(f, DDP__FOR_BOOKKEEPING, ddp__optimizer_tables(o, 0), 1);
}

/* The optimizer updates this rank's rows of each trained parameter. */
static ddp_result ddp__fsdp_create_optimizer(ddp_fsdp *f) {
    ddp_optimizer_desc d = f->desc.optimizer;
    size_t host_at = 0;
    for (ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        ddp_param *p = &f->optimizer_params[f->optimizer_param_count];
        if (s->source != s || !s->trained) continue;
        p->name = s->name;
        p->value = p->grad = ddp__shard_tensor(s);
        p->grad.data = ddp__shard_sum(s);
        f->grad_sums[f->optimizer_param_count] = p->grad;
        if (f->desc.offload == DDP_FSDP_OFFLOAD_HOST)
            p->grad.data = f->offload.host_grads
                           + ddp__layout_append(&host_at, s->own_count * ddp_dtype_size(s->master_dtype));
        s->optimizer_index = f->optimizer_param_count;
        f->optimizer_shards[f->optimizer_param_count++] = s;
    }
    f->grad_sum_count = f->optimizer_param_count;
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        if (s->source == s || !s->trained) continue;
        ddp_tensor *sum = &f->grad_sums[f->grad_sum_count++];
        *sum = ddp__shard_tensor(s);
        sum->data = ddp__shard_sum(s);
    }
    if (!f->optimizer_param_count) return DDP_OK;
    d.params = f->optimizer_params;
    d.param_count = f->optimizer_param_count;
    d.shard_group = f->world_size > 1 ? f->group : NULL;
    d.state_alloc_fn = ddp__fsdp_state_alloc;
    d.state_free_fn = ddp__fsdp_state_free;
    d.state_user = f;
    DDP_TRY(
        ddp_optimizer_create(&f->optimizer, f->offload.host_group ? f->offload.host_group : f->group, &d));
    if (f->desc.offload == DDP_FSDP_OFFLOAD_HOST) f->optimizer->piece_fn = ddp__offload_piece;
    for (int i = 0; i < f->optimizer_param_count; i++) {
        const ddp__fsdp_shard *s = f->optimizer_shards[i];
        if (s->unit->half_sums) {
            f->grad_sums[i].dtype = s->range[DDP__FULL_GRADS].dtype;
            f->optimizer_params[i].grad.dtype = f->grad_sums[i].dtype;
        }
        if (!ddp__shard_is_stepped_with_copy(s)) continue;
        f->optimizer->params[i].copy = s->sent_rows;
        f->optimizer->params[i].copy_dtype = s->dtype;
    }
    ddp__optimizer_count_tables(f, f->optimizer);
    return DDP_OK;
}

/* Points each source shard to its memory, and fills in its first values, by default those of rank 0. Errors
   go to f->allocator.error: every rank takes part in the broadcasts. */
static void ddp__fsdp_fill_shards(ddp_fsdp *f) {
    ddp_saved_error *error = &f->allocator.error;
    for (ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        const ddp_tensor *value = &s->user_param->param.value;
        if (s->source != s) continue;
        s->sent_rows = f->keeps_full_params ? s->unit->full_memory + s->full_offset
                                                  + ddp__shard_rows_bytes(s, s->first_row, s->dtype)
                                            : s->unit->shard_memory + s->shard_offset;
        s->master_rows = s->has_master ? s->unit->master_memory + s->master_offset : s->sent_rows;
        int broadcasts = value->data && !f->desc.skip_initial_broadcast;
        for (int i = 1; i >= 0 && broadcasts;
             i--) /* over the replicas first: rank 0 of both has the values */
            if (f->groups[i])
                ddp_error_save(error, ddp_broadcast(f->groups[i], value->data, s->rows * s->row_elements,
                                                    value->dtype, 0, NULL));
        if (error->result == DDP_OK) ddp_error_save(error, ddp__shard_fill(f, s));
    }
}

/* Broadcasts the buffers: over the replicas from their rank 0, then over the group from root. */
static ddp_result ddp__fsdp_broadcast_buffers(ddp_fsdp *f, int root) {
    const ddp_fsdp_desc *d = &f->desc;
    if (d->replicas)
        DDP_TRY(ddp_buffers_broadcast(d->replicas, d->buffers, d->buffer_count, f->buffer_message, 0));
    return ddp_buffers_broadcast(f->group, d->buffers, d->buffer_count, f->buffer_message, root);
}

/* The peak after some steps, if no unit is unsharded while another one is. It adds what the first steps
   allocate to the memory that exists. */
static ddp_fsdp_bytes ddp__fsdp_peak_of_steps(ddp_fsdp *f) {
    const ddp__fsdp_allocator saved = f->allocator;
    size_t unshards = 2 * (size_t)f->unit_count * (size_t)f->desc.micro_batch_count;
    int full = ddp__full_memory_is_per_unit(f) ? 0 : ddp__full_buffers_needed(f, 1);
    int window = f->reduces_per_micro_batch ? ddp__prefetch_window(f) : 0, grads = 0;
    size_t capacity = 4 * (size_t)f->unit_count, outgrown = 0; /* of ddp__unshard_order_record */
    void *ignored;
    f->allocator.counts_only = 1;
    for (int i = 0; i < full; i++)
        (void)ddp__fsdp_alloc(f, DDP__FOR_FULL_PARAMS, DDP__MEMORY_DEVICE, f->unshard.buffer_bytes, &ignored);
    for (const ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) grads += unit->trained_count > 0;
    if (grads && f->desc.micro_batch_count > 1) grads++; /* a forward, while all reductions are in flight */
    for (int i = 0; i < grads && i < window; i++)
        (void)ddp__fsdp_alloc(f, DDP__FOR_GRADIENTS, DDP__MEMORY_GROUP, f->reduce.buffer_bytes, &ignored);
    for (; capacity < unshards; capacity *= 2) outgrown = capacity;
    (void)ddp__fsdp_alloc(f, DDP__FOR_BOOKKEEPING, DDP__MEMORY_HOST, (capacity + outgrown) * sizeof(int),
                          &ignored);
    const ddp_fsdp_bytes peak = f->allocator.peak;
    f->allocator = saved;
    return peak;
}

/* Agreements 2 and 3. */
static ddp_result ddp__fsdp_build(ddp_fsdp *f) {
    ddp_saved_error *error = &f->allocator.error;
    ddp_error_save(error, ddp__fsdp_device_begin(f->group));
    ddp__fsdp_alloc_all(f);
    DDP_TRY(ddp_agree_groups(f->groups, 3, "ddp_fsdp_create", ddp_error_restore(error), 0, ""));
    ddp__fsdp_fill_shards(f);
    if (!f->desc.skip_initial_broadcast) ddp_error_save(error, ddp__fsdp_broadcast_buffers(f, 0));
    if (error->result == DDP_OK) ddp_error_save(error, ddp__fsdp_create_optimizer(f));
    if (error->result == DDP_OK) ddp_error_save(error, ddp__fsdp_publish(f, 0));
    DDP_TRY(ddp_agree_groups(f->groups, 3, "ddp_fsdp_create", ddp_error_restore(error), 0, ""));
    DDP_TRY(ddp__shards_barrier(f));
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        ddp_param *p = &s->user_param->param;
        p->value.dtype = s->dtype;
        p->grad = p->value;
        p->grad.dtype = s->range[DDP__FULL_GRADS].dtype;
        p->first_use = s->source;
        p->sum.is_set = 0;
        if (!ddp__accepts_pipeline_sum(s)) continue;
        p->sum.reader = f;
        p->sum.drain = ddp__reduce_drain;
    }
    ddp__fsdp_begin(f);
    f->allocator.predicted = ddp__fsdp_peak_of_steps(f);
    return DDP_OK;
}

/* Waits until the event has been reached, or until the time `until`, and frees it. NULL is ignored. */
static void ddp__fsdp_event_destroy(const ddp_fsdp *f, void *event, double until) {
    if (!event) return;
    ddp_event_wait_host(f->group, event, until);
    f->device->event_destroy(f->group, event);
}

/* Frees the object. created: it was returned to the caller, and the caller's parameters point into it. */
static void ddp__fsdp_delete(ddp_fsdp *f, int created) {
    ddp__fsdp_offload_state *o = &f->offload;
    if (f->saver.has_thread) pthread_join(f->saver.thread, NULL);
    ddp_group_destroy(f->saver.thread_group);
    for (ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++) {
        if (unit->fsdp) ddp__reduce_wait_release(f, unit);
        if (unit->fsdp) ddp__unshard_wait(f, unit);
    }
    double until = ddp_now() + ddp_group_timeout_ms(f->group) * 1e-3;
    /* the device may still use pinned memory */
    for (int i = 0; i < 2; i++) {
        ddp__fsdp_event_destroy(f, o->uploaded[i], until);
        ddp__fsdp_event_destroy(f, o->filled[i], until);
        ddp__fsdp_event_destroy(f, o->emptied[i], until);
    }
    ddp__fsdp_event_destroy(f, o->sums_arrived, until);
    ddp__fsdp_event_destroy(f, f->clip.event, until);
    for (int i = 0; o->downloaded && i < o->piece_count; i++)
        ddp__fsdp_event_destroy(f, o->downloaded[i], until);
    ddp_optimizer_destroy(f->optimizer);
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end && created; s++) {
        ddp_param *param = &s->user_param->param;
        param->value.data = param->grad.data = NULL;
        if (param->sum.reader == f) param->sum.reader = NULL;
        if (param->first_use == s->source) param->first_use = NULL;
    }
    while (f->allocator.count) ddp__fsdp_free(f, f->allocator.allocations[f->allocator.count - 1].memory);
    if (f->allocator.file >= 0) close(f->allocator.file);
    if (f->reduce.event) f->device->event_destroy(f->group, f->reduce.event);
    ddp_group_destroy(o->host_group);
    ddp_fsdp copy = *f; /* has the allocator that frees f */
    ddp__fsdp_host_free(&copy, f);
}

DDPDEF ddp_result ddp_fsdp_create(ddp_fsdp **out, ddp_group *group, const ddp_fsdp_desc *desc) {
    DDP_PUBLIC_CALL(ddp_fsdp_create);
    ddp_fsdp resolved = DDP_ZERO, *f = NULL;
    if (out) *out = NULL;
    DDP__FSDP_CHECK(group, "group is NULL");
    resolved.group = resolved.groups[0] = group;
    resolved.group_size = ddp_world_size(group);
    resolved.replica_count = desc && desc->replicas ? ddp_world_size(desc->replicas) : 1;
    resolved.device = ddp_group_device(group);
    ddp_result result = desc ? ddp__fsdp_desc_resolve(&resolved, desc)
                             : ddp__fsdp_invalid(__func__, group, "desc is NULL");
    if (result == DDP_OK && !out) result = ddp__fsdp_invalid(__func__, group, "out is NULL");
    if (result == DDP_OK) result = ddp__fsdp_describe(&resolved, &f);
    for (int i = 0; i < 2; i++) /* a mismatch in one group reaches the others through the replicas */
        if (i == 0 || resolved.groups[i])
            result = ddp__fsdp_compare(f ? f : &resolved, resolved.groups[i], result);
    if (resolved.groups[2]) result = ddp_agree(resolved.groups[2], __func__, result, 0, "");
    if (result == DDP_OK) result = ddp__fsdp_build(f);
    if (result == DDP_OK) *out = f;
    if (result == DDP_OK || !f) return result;
    const ddp_saved_error error = ddp__saved_error_of(result);
    ddp__fsdp_delete(f, 0);
    return ddp_error_restore(&error);
}

DDPDEF void ddp_fsdp_destroy(ddp_fsdp *fsdp) {
    DDP_PUBLIC_CALL(ddp_fsdp_destroy);
    DDP_KEEP_ERROR;
    if (fsdp && !ddp_group_is_forked(fsdp->group)) ddp__fsdp_delete(fsdp, 1);
}

//== FSDP: predicted memory, wrapping ============================================================ >>impl-wrap

/* ddp_fsdp_predict runs the code that allocates memory for ddp_fsdp_create, with an allocator that only
   counts. Memory that ddp__fsdp_alloc_all allocates is therefore predicted without further code. Also
   ddp_fsdp_wrap, which groups parameters into units by their names.

     ddp__fsdp_alloc_all       memory of creation, except the next two
     ddp__predict_fill         first values
     ddp__predict_optimizer    optimizer state
     ddp__fsdp_peak_of_steps   memory that the first steps add; ddp_fsdp_create also calls it */

/* Never called: a device with these functions has streams and pinned memory. */
static ddp_result ddp__predict_use_stream(ddp_group *group, ddp_stream_kind stream) {
    return group && stream == DDP_STREAM_COMPUTE ? DDP_OK : DDP_ERR_UNSUPPORTED;
}
static ddp_result ddp__predict_alloc_pinned(ddp_group *group, size_t size_bytes, void **out) {
    *out = NULL;
    return group && size_bytes ? DDP_ERR_NO_MEMORY : DDP_ERR_UNSUPPORTED;
}

/* In a prediction: the memory that ddp__fsdp_fill_shards allocates for values of init_fn, one parameter after
   the other. */
static void ddp__predict_fill(ddp_fsdp *f) {
    if (f->device->host_memory || f->desc.offload != DDP_FSDP_OFFLOAD_NONE) return;
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        if (s->source != s || !s->own_count || s->user_param->param.value.data) continue;
        const ddp__fsdp_allocation rows = ddp__fsdp_allocation_of(
            f, DDP__FOR_COMMUNICATION, DDP__MEMORY_HOST, s->own_count * ddp_dtype_size(s->master_dtype));
        for (int add = 1; add >= 0; add--) ddp__fsdp_count_allocation(f, &rows, add);
    }
}

/* In a prediction: the memory of ddp__fsdp_create_optimizer. */
static ddp_result ddp__predict_optimizer(ddp_fsdp *f) {
    ddp_optimizer o = DDP_ZERO;
    ddp_exact_sum square;
    size_t bytes = 0;
    o.desc = f->desc.optimizer;
    o.desc.param_count = 0;
    o.device = f->desc.offload == DDP_FSDP_OFFLOAD_NONE ? f->device : ddp_device_cpu();
    DDP_TRY(ddp__optimizer_resolve(NULL, &o.desc));
    o.state_count = ddp__optimizer_state_count(&o.desc);
    for (const ddp__fsdp_shard *s = f->shards; s < f->shards_end; s++) {
        if (s->source != s || !s->trained) continue;
        o.desc.param_count++;
        o.desc.params = &s->user_param->param;
        if (ddp__optimizer_has_trust(&o.desc) && ddp__optimizer_decays(&o.desc, 0)) o.square_count += 2;
        bytes += (size_t)o.state_count * ddp_round_up(s->own_count * ddp_dtype_size(s->master_dtype), 64);
    }
    if (!o.desc.param_count) return DDP_OK;
    if (bytes) (void)ddp__fsdp_state_alloc(bytes, f);
    if (o.square_count && f->world_size > 1 && o.device != f->device) o.host_squares = &square;
    ddp__optimizer_count_tables(f, &o);
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_predict(const ddp_fsdp_desc *desc, int world_size, ddp_fsdp_bytes *bytes) {
    DDP_PUBLIC_CALL(ddp_fsdp_predict);
    ddp_fsdp resolved = DDP_ZERO, *f = NULL;
    ddp_device gpu = *ddp_device_cpu();
    DDP__FSDP_CHECK(desc && bytes, "desc or bytes is NULL");
    DDP__FSDP_CHECK(world_size > 0, "world_size=%d; use 1 or more", world_size);
    DDP__FSDP_CHECK(desc->ranks.replica_count >= 0, "ranks.replica_count=%d; use 1 or more, or 0 for 1",
                    desc->ranks.replica_count);
    DDP__FSDP_CHECK(desc->ranks.replica_count <= INT32_MAX / world_size,
                    "world_size=%d times ranks.replica_count=%d is too large; use at most %d ranks",
                    world_size, desc->ranks.replica_count, INT32_MAX);
    gpu.name = "cuda";
    gpu.host_memory = 0;
    gpu.use_stream = ddp__predict_use_stream;
    gpu.alloc_pinned = ddp__predict_alloc_pinned;
    ddp_fsdp_desc alone = *desc;
    alone.replicas = alone.checkpoint_group = NULL;
    alone.ranks.no_peer_memory |= alone.ranks.gpu; /* NCCL has no peer memory */
    resolved.group_size = world_size;
    resolved.replica_count = desc->ranks.replica_count > 0 ? desc->ranks.replica_count : 1;
    resolved.device = desc->ranks.gpu ? &gpu : ddp_device_cpu();
    DDP_TRY(ddp__fsdp_desc_resolve(&resolved, &alone));
    ddp_result result = ddp__fsdp_describe(&resolved, &f);
    if (result == DDP_OK) {
        f->allocator.counts_only = 1;
        ddp__fsdp_alloc_all(f);
        ddp__predict_fill(f);
        result = ddp__predict_optimizer(f);
    }
    if (result == DDP_OK) *bytes = ddp__fsdp_peak_of_steps(f);
    while (f && f->allocator.count)
        ddp__fsdp_free(f, f->allocator.allocations[f->allocator.count - 1].memory);
    if (f) ddp__fsdp_host_free(&resolved, f);
    return result;
}

DDPDEF ddp_result ddp_fsdp_get_memory(const ddp_fsdp *fsdp, ddp_fsdp_memory *memory) {
    DDP__FSDP_CHECK(fsdp && memory, "fsdp or memory is NULL");
    const ddp__fsdp_allocator *m = &fsdp->allocator;
    ddp_fsdp_memory out = {m->now, m->peak, m->predicted, m->group_bytes, m->file_bytes};
    out.predicted.total -= out.predicted.bookkeeping;
    out.predicted.bookkeeping = 0;
    *memory = out;
    return DDP_OK;
}

/* Bytes of the name that the prefix matches; 0 = no match. A match ends at the end of a part of the name. "*"
   matches one part. */
static size_t ddp__prefix_match(const char *prefix, const char *name) {
    const char *at = name;
    /* a point at the end of the prefix may be missing in the name */
    for (; *prefix && (*prefix != '.' || prefix[1] || *at); prefix++) {
        size_t part = *prefix == '*' ? strcspn(at, ".") : *prefix == *at;
        if (!part) return 0;
        at += part;
    }
    if (at > name && at[-1] == '.') at--;
    return *at == '.' || !*at ? (size_t)(at - name) : 0;
}

/* Bytes of a parameter's name that are the name of its unit: the longest match. 0 = the root unit. */
static size_t ddp__wrap_length(const ddp_fsdp_wrap_desc *d, const char *name) {
    size_t longest = 0;
    for (int p = 0; p < d->prefix_count; p++)
        ddp__size_at_least(&longest, ddp__prefix_match(d->prefixes[p], name));
    return longest;
}

/* The first parameter of the same unit. */
static int ddp__wrap_first(const ddp_param *params, int index, const ddp_fsdp_wrap_desc *d) {
    size_t length = ddp__wrap_length(d, params[index].name);
    for (int i = 0; i < index; i++)
        if (ddp__wrap_length(d, params[i].name) == length
            && !strncmp(params[i].name, params[index].name, length))
            return i;
    return index;
}

DDPDEF int ddp_fsdp_wrap(const ddp_param *params, int param_count, const ddp_fsdp_wrap_desc *desc,
                         ddp_fsdp_unit_desc *out, int cap) {
    DDP__FSDP_CHECK(params && desc && desc->storage && (out || cap == 0),
                    "params, desc, its storage or out is NULL");
    DDP__FSDP_CHECK(param_count > 0, "param_count=%d; use 1 or more", param_count);
    DDP__FSDP_CHECK(desc->prefix_count >= 0 && (desc->prefixes || !desc->prefix_count),
                    "prefix_count=%d, but prefixes is NULL; set both, or neither", desc->prefix_count);
    for (int i = 0; i < param_count; i++) {
        DDP__FSDP_CHECK(params[i].name && params[i].name[0], "params[%d] has no name; set its name", i);
        for (int k = 0; k < i; k++)
            DDP__FSDP_CHECK(strcmp(params[k].name, params[i].name),
                            "params[%d] and params[%d] have the name %s; give each its own name", k, i,
                            params[i].name);
    }
    for (int p = 0; p < desc->prefix_count; p++) {
        int used = 0;
        DDP__FSDP_CHECK(
            desc->prefixes[p] && desc->prefixes[p][0],
            "prefixes[%d] is NULL or empty; leave it out: parameters without a prefix are in unit root", p);
        for (int i = 0; i < param_count && !used; i++)
            used = ddp__prefix_match(desc->prefixes[p], params[i].name) > 0;
        DDP__FSDP_CHECK(used, "no parameter name begins with prefix %s", desc->prefixes[p]);
    }
    size_t max_bytes = desc->min_unit_bytes ? desc->min_unit_bytes : (size_t)25 << 20;
    int units = 0, by_name = desc->prefix_count;
    ddp_fsdp_param *first = desc->storage;
    for (int i = 0, next = 1; i < param_count; i = next++) {
        int count = 0;
        size_t bytes = 0;
        /* in the unit of an earlier parameter */
        if (by_name && ddp__wrap_first(params, i, desc) != i) continue;
        for (int k = i; k < param_count && (by_name || bytes < max_bytes); k++) {
            if (by_name && ddp__wrap_first(params, k, desc) != i) continue;
            memset(&first[count], 0, sizeof *first);
            first[count].param = params[k];
            first[count++].index = k;
            bytes += ddp_tensor_bytes(&params[k].value);
            if (!by_name) next = k + 1;
        }
        if (units < cap) {
            size_t length = ddp__wrap_length(desc, params[i].name);
            const ddp_fsdp_unit_desc unit = {by_name ? first->unit : NULL, first, count};
            out[units] = unit;
            if (by_name && length)
                snprintf(first->unit, sizeof first->unit, "%.*s", (int)length, params[i].name);
            else if (by_name)
                snprintf(first->unit, sizeof first->unit, "root");
        }
        first += count;
        units++;
    }
    DDP__FSDP_CHECK(units <= cap, "%d units do not fit in out with %d entries; pass a larger array", units,
                    cap);
    return units;
}

//== FSDP: full tensors on one rank ============================================================ >>impl-export
/* ddp_fsdp_get_full gathers the rows of a parameter on one rank, in pieces. ddp_fsdp_export gathers one
   parameter after the other on rank 0, which writes them to a safetensors file. */

enum { DDP__FULL_PIECE = 1 << 18 }; /* elements that each rank sends in one message */

static size_t ddp__full_piece_count(const ddp__fsdp_shard *s) {
    size_t count = s->rows_per_rank * s->row_elements;
    return count < DDP__FULL_PIECE ? count : (size_t)DDP__FULL_PIECE;
}

/* Whether this rank is among those of the first replica, which send their rows. */
static int ddp__is_first_replica(const ddp_fsdp *f) {
    return !f->desc.replicas || ddp_rank(f->desc.replicas) == 0;
}
static int ddp__full_receives(const ddp_fsdp *f, int root) {
    return ddp__is_first_replica(f) && ddp_rank(f->group) == root;
}

/* Allocates memory for the messages: a piece of this rank and, on the receiving one, a piece of each. */
static ddp_result ddp__full_pieces_alloc(ddp_fsdp *f, size_t piece_bytes, int root, unsigned char **pieces) {
    size_t count = ddp__full_receives(f, root) ? 1 + (size_t)f->world_size : 1;
    if (f->world_size == 1 || !piece_bytes || !ddp__is_first_replica(f)) return DDP_OK;
    return ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_DEVICE,
                           count * ddp_round_up(piece_bytes, 64), pieces);
}

/* Gathers a parameter in `out` on rank root. Collective over the first replica. With one shard, root has all
   rows. */
static ddp_result ddp__full_gather(ddp_fsdp *f, const ddp__fsdp_shard *s, int root, unsigned char *pieces,
                                   unsigned char *out) {
    size_t size = ddp_dtype_size(s->master_dtype), count = s->rows_per_rank * s->row_elements;
    size_t max = ddp__full_piece_count(s);
    unsigned char *received = ddp_rank(f->group) == root ? pieces + ddp_round_up(max * size, 64) : NULL;
    DDP_TRY(ddp__fsdp_device_begin(f->group));
    if (f->world_size == 1) {
        if (ddp_rank(f->group) == root && count) f->device->copy(out, s->source->master_rows, count * size);
        return ddp_device_check(f->group);
    }
    for (size_t at = 0, n; at < count; at += n) {
        n = count - at < max ? count - at : max;
        size_t part = (size_t)ddp__clamp_to_part(s->own_count, at, n);
        if (part) f->device->copy(pieces, s->source->master_rows + at * size, part * size);
        DDP_TRY(ddp_device_check(f->group));
        DDP_TRY(ddp_gather(f->group, pieces, received, n, s->master_dtype, root, NULL));
        DDP_TRY(ddp__fsdp_device_begin(f->group));
        for (int r = 0; r < f->world_size && received; r++) {
            size_t first = ddp__shard_first_row(s, r) * s->row_elements;
            size_t end = ddp__shard_first_row(s, r + 1) * s->row_elements;
            part = (size_t)ddp__clamp_to_part(end - first, at, n);
            if (part)
                f->device->copy(out + (first + at) * size, received + (size_t)r * n * size, part * size);
        }
    }
    return ddp_device_check(f->group);
}

/* Fails between the first reduction of a step and its end. Then only the reductions may use the replicas. */
static ddp_result ddp__fsdp_check_between_steps(const ddp_fsdp *f, const char *call) {
    for (const ddp__fsdp_unit *unit = f->units; unit < f->units_end; unit++)
        if (unit->reduced_count)
            return ddp__fsdp_invalid(
                call, f->group,
                "unit %s has already been reduced in this step; call %s before the first "
                "ddp_fsdp_reduce_grads of a step, or after ddp_fsdp_step",
                unit->name, call);
    return DDP_OK;
}

/* Checks the arguments of ddp_fsdp_get_full, and returns the shard in *shard. */
static ddp_result ddp__full_check(const ddp_fsdp *fsdp, int unit, int param, int root, const ddp_tensor *out,
                                  const ddp__fsdp_shard **shard) {
    DDP__PARAM_CHECK(fsdp, unit, param);
    DDP__FSDP_CHECK(root >= 0 && root < ddp_world_size(fsdp->group),
                    "root=%d is not a rank of the group; use 0 to %d", root, ddp_world_size(fsdp->group) - 1);
    const ddp__fsdp_shard *s = *shard = &fsdp->units[unit].shards[param];
    const ddp_tensor *value = &s->user_param->param.value;
    if (!ddp__full_receives(fsdp, root)) return DDP_OK;
    size_t shape_bytes = (size_t)value->ndim * sizeof value->shape[0];
    DDP__FSDP_CHECK(out, "out is NULL on rank %d, which is root; pass a ddp_tensor", root);
    DDP__FSDP_CHECK(out->dtype == s->master_dtype && out->ndim == value->ndim
                        && memcmp(out->shape, value->shape, shape_bytes) == 0,
                    "unit %s, parameter %.200s: out is %.60s; use %s and the shape of param.value",
                    s->unit->name, s->name,
                    ddp_describe_shape(ddp_dtype_name(out->dtype), out->ndim, out->shape).text,
                    ddp_dtype_name(s->master_dtype));
    DDP__FSDP_CHECK(out->data || !s->rows_per_rank || !s->row_elements,
                    "unit %s, parameter %.200s: out->data is NULL; set it to host memory of %zu bytes",
                    s->unit->name, s->name, ddp_tensor_bytes(out));
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_get_full(ddp_fsdp *fsdp, int unit, int param, int root, ddp_tensor *out) {
    DDP_PUBLIC_CALL(ddp_fsdp_get_full);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    DDP_TRY(ddp__fsdp_check_between_steps(fsdp, __func__));
    ddp_group *const groups[2] = {fsdp->group, fsdp->desc.replicas};
    const int arguments[3] = {unit, param, root};
    const ddp__fsdp_shard *s = NULL;
    unsigned char *pieces = NULL;
    char description[80];
    snprintf(description, sizeof description, "unit=%d param=%d root=%d", unit, param, root);
    ddp_result result = ddp__full_check(fsdp, unit, param, root, out, &s);
    if (result == DDP_OK)
        result = ddp__full_pieces_alloc(fsdp, ddp__full_piece_count(s) * ddp_dtype_size(s->master_dtype),
                                        root, &pieces);
    result = ddp_agree_groups(groups, 2, __func__, result,
                              ddp_hash(DDP_HASH_SEED, arguments, sizeof arguments), description);
    if (result == DDP_OK && ddp__is_first_replica(fsdp)) {
        result = ddp__full_gather(fsdp, s, root, pieces,
                                  ddp__full_receives(fsdp, root) ? (unsigned char *)out->data : NULL);
        if (result != DDP_OK) result = ddp__fsdp_poison(fsdp, result);
    }
    ddp__fsdp_free(fsdp, pieces);
    return result;
}

/* An export. All fields except pieces are the writing rank's. */
typedef struct ddp__export_state {
    ddp__save_state save; /* plans one file of all tensors of the model */
    ddp__save_file files[2];
    ddp__file file; /* path.tmp; its fd is negative while it is closed */
    void *tables;
    unsigned char *tensor; /* the tensor that is written next */
    unsigned char *pieces; /* see ddp__full_pieces_alloc */
} ddp__export_state;

/* Allocates the pieces and, on the writing rank, plans and creates the file. */
static ddp_result ddp__export_begin(ddp_fsdp *f, ddp__export_state *e, const char *path) {
    ddp__save_state *s = &e->save;
    size_t piece_bytes = 0, tensor_bytes = 0, count = (size_t)f->saver.count;
    char parent[DDP__PATH_MAX], name[300];
    for (const ddp__fsdp_shard *shard = f->shards; shard < f->shards_end; shard++) {
        size_t size = ddp_dtype_size(shard->master_dtype);
        ddp__size_at_least(&piece_bytes, ddp__full_piece_count(shard) * size);
        ddp__size_at_least(&tensor_bytes, shard->rows * shard->row_elements * size);
    }
    for (int i = 0; i < f->desc.buffer_count; i++)
        ddp__size_at_least(&tensor_bytes, ddp_tensor_bytes(&f->desc.buffers[i]));
    DDP_TRY(ddp__full_pieces_alloc(f, piece_bytes, 0, &e->pieces));
    if (!ddp__full_receives(f, 0)) return DDP_OK;
    const char *slash = path ? strrchr(path, '/') : NULL;
    const char *base = slash ? slash + 1 : path;
    if (!path || !*base || strlen(path) > DDP__DIR_MAX || strlen(base) > 250)
        return ddp_fail(DDP_ERR_INVALID,
                        "path is NULL or empty, ends with a slash, or is longer than %d bytes (the name: "
                        "250); use the path of a file",
                        DDP__DIR_MAX);
    s->common = ddp__checkpoint_common_of(f->group, "ddp_fsdp_export", f->saver.slices, f->saver.count);
    s->text.group = f->group;
    s->max_file_bytes = SIZE_MAX;
    s->files = e->files;
    DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_HOST,
                            count * (sizeof *s->data_offset + sizeof *s->common.crc), &e->tables));
    DDP_TRY(ddp__fsdp_alloc(f, DDP__FOR_COMMUNICATION, DDP__MEMORY_HOST, tensor_bytes, &e->tensor));
    s->data_offset = (uint64_t *)e->tables;
    s->common.crc = (uint32_t *)(void *)(s->data_offset + count);
    DDP_TRY(ddp__save_plan(s));
    ddp__parent_path(path, parent);
    snprintf(name, sizeof name, "%s.tmp", base);
    snprintf(s->tmp, sizeof s->tmp, "%.*s.tmp", DDP__DIR_MAX, path);
    if (unlink(s->tmp) != 0 && errno != ENOENT) return ddp__file_fail("cannot delete", s->tmp);
    DDP_TRY(ddp__file_create(parent, name, NULL, e->files[0].header_bytes + e->files[0].data_bytes));
    return ddp__file_open(parent, name, O_WRONLY, &e->file);
}

/* Writes e->tensor as tensor `index` of the list. */
static ddp_result ddp__export_write(ddp__export_state *e, int index) {
    ddp__save_state *s = &e->save;
    ddp__checkpoint_slice slice = s->common.slices[index];
    uint64_t bytes = ddp__slice_tensor_bytes(&slice);
    memcpy(slice.extent, slice.shape, sizeof slice.extent); /* from the first row on, which is this rank's */
    slice.data = e->tensor;
    DDP_TRY(ddp__save_slice(&slice, &e->file, e->files[0].header_bytes + s->data_offset[index],
                            &s->common.crc[index]));
    s->common.crc[index] = ddp__crc_finish(s->common.crc[index], bytes);
    return DDP_OK;
}

/* On the writing rank: writes the buffers and the header, and gives the file its name. */
static ddp_result ddp__export_end(ddp_fsdp *f, ddp__export_state *e, const char *path) {
    char parent[DDP__PATH_MAX];
    int first = f->saver.count - f->desc.buffer_count;
    for (int i = 0; i < f->desc.buffer_count; i++) {
        size_t size_bytes = ddp_tensor_bytes(&f->desc.buffers[i]);
        if (size_bytes) f->device->copy(e->tensor, f->desc.buffers[i].data, size_bytes);
        DDP_TRY(ddp_device_check(f->group));
        DDP_TRY(ddp__export_write(e, first + i));
    }
    ddp__save_format_header(&e->save, &e->files[0]);
    if (e->save.text.failed) return DDP_ERR_NO_MEMORY;
    ddp_result result = ddp__file_transfer(&e->file, DDP__FILE_WRITE, e->save.text.data, e->save.text.length,
                                           0);
    int fd = e->file.fd;
    e->file.fd = -1;
    DDP_TRY(ddp__file_sync_close(fd, e->file.path, result));
    if (rename(e->save.tmp, path) != 0) return ddp__file_fail("cannot replace", path);
    e->save.tmp[0] = '\0';
    ddp__parent_path(path, parent);
    if (ddp__folder_sync(parent) != DDP_OK)
        return ddp_fail(DDP_ERR_SYSTEM,
                        "the file is written, but a crash of the machine can still replace it with the "
                        "previous one: %.400s",
                        ddp_last_error());
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_export(ddp_fsdp *fsdp, const char *path) {
    DDP_PUBLIC_CALL(ddp_fsdp_export);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    DDP_TRY(ddp__fsdp_check_between_steps(fsdp, __func__));
    for (const ddp__fsdp_shard *s = fsdp->shards; s < fsdp->shards_end; s++)
        if (s->is_slice)
            return ddp_fail_in(DDP_ERR_UNSUPPORTED, __func__, fsdp->group,
                               "unit %s, parameter %.200s is a slice of a larger tensor; use ddp_fsdp_save, "
                               "which writes complete tensors",
                               s->unit->name, s->name);
    DDP_TRY(ddp_fsdp_save_wait(fsdp)); /* a background save uses the list of tensors */
    ddp_group *const groups[2] = {fsdp->group, fsdp->desc.replicas};
    ddp__export_state e = DDP_ZERO;
    int writes = ddp__full_receives(fsdp, 0);
    e.file.fd = -1;
    ddp__saver_list(fsdp, DDP__LIST_NOTHING);
    ddp_result result = ddp_agree_groups(groups, 2, __func__, ddp__export_begin(fsdp, &e, path), 0, "");
    for (const ddp__fsdp_shard *s = fsdp->shards; s < fsdp->shards_end && result == DDP_OK; s++) {
        if (s->source != s) continue;
        if (ddp__is_first_replica(fsdp)) result = ddp__full_gather(fsdp, s, 0, e.pieces, e.tensor);
        if (result != DDP_OK) {
            result = ddp__fsdp_poison(fsdp, result);
            break;
        }
        if (writes) result = ddp__export_write(&e, s->slice_index);
        result = ddp_agree_groups(groups, 2, __func__, result, 0, "");
    }
    if (result == DDP_OK)
        result = ddp_agree_groups(groups, 2, __func__, writes ? ddp__export_end(fsdp, &e, path) : DDP_OK, 0,
                                  "");
    const ddp_saved_error error = ddp__saved_error_of(result);
    ddp__file_close(&e.file);
    if (e.save.tmp[0]) (void)unlink(e.save.tmp);
    ddp_host_free(fsdp->group, e.save.text.data);
    ddp__fsdp_free(fsdp, e.tables);
    ddp__fsdp_free(fsdp, e.tensor);
    ddp__fsdp_free(fsdp, e.pieces);
    return ddp_error_restore(&error);
}

//== FSDP: public calls ======================================================================== >>impl-public
/* The public calls of a training step, and the access to shards. */

/* Adds a call to the hash of this step's calls. kind: 0 = the unit's unshard, 1 = its reduction. */
static void ddp__fsdp_hash_call(ddp_fsdp *f, int kind, int unit) {
    int call = 2 * unit + kind;
    f->call_hash = ddp_hash(f->call_hash, &call, sizeof call);
}

DDPDEF ddp_result ddp_fsdp_unshard(ddp_fsdp *fsdp, int unit) {
    DDP_PUBLIC_CALL(ddp_fsdp_unshard);
    DDP__UNIT_CHECK(fsdp, unit);
    ddp__fsdp_unit *target = &fsdp->units[unit];
    DDP_TRY(ddp__fsdp_device_begin(fsdp->group));
    ddp__fsdp_hash_call(fsdp, 0, unit);
    ddp_result result = fsdp->no_grad ? DDP_OK : ddp__unshard_order_record(fsdp, unit);
    if (result == DDP_OK) result = ddp__reshard_idle_units(fsdp, target);
    /* first the units that own parameters which this unit shares (keeps_full_params), then the unit itself */
    for (ddp__fsdp_shard *s = fsdp->keeps_full_params ? target->shards : target->end;
         s <= target->end && result == DDP_OK; s++) {
        ddp__fsdp_unit *needed = s < target->end ? s->source->unit : target;
        result = ddp__unshard_wait(fsdp, needed);
        if (result != DDP_OK || needed->unsharded) continue;
        result = ddp__full_params_acquire(fsdp, needed);
        if (result == DDP_OK && fsdp->peer_memory)
            result = fsdp->unshard_task(fsdp->group, needed);
        else if (result == DDP_OK)
            result = ddp_group_enqueue(fsdp->group, fsdp->unshard_task, needed, NULL);
        if (result != DDP_OK) ddp__full_params_release(needed, result);
    }
    if (result == DDP_OK) {
        if (!target->in_use && ++fsdp->unshard.in_use_count > fsdp->unshard.in_use_max)
            fsdp->unshard.in_use_max = fsdp->unshard.in_use_count;
        target->in_use = 1;
        result = ddp__fsdp_prefetch(fsdp); /* first: it does not wait for the work that follows here */
    }
    for (ddp__fsdp_shard *s = fsdp->keeps_full_params ? target->shards : target->end;
         s <= target->end && result == DDP_OK; s++)
        result = ddp__unshard_finish(fsdp, s < target->end ? s->source->unit : target);
    if (result == DDP_OK) result = ddp__grads_attach(fsdp, target);
    if (result != DDP_OK) return ddp__unit_failed(target, result, __func__);
    ddp__set_param_pointers(target, 1, target->grads_attached);
    return ddp_device_check(fsdp->group);
}

DDPDEF ddp_result ddp_fsdp_reshard(ddp_fsdp *fsdp, int unit) {
    DDP_PUBLIC_CALL(ddp_fsdp_reshard);
    DDP__UNIT_CHECK(fsdp, unit);
    ddp__fsdp_unit *target = &fsdp->units[unit];
    DDP__FSDP_CHECK(target->in_use, "unit %s is not unsharded; call ddp_fsdp_unshard first", target->name);
    target->in_use = 0;
    fsdp->unshard.in_use_count--;
    if (target->grads_attached) ddp__grads_detach(target);
    ddp__set_param_pointers(target, fsdp->desc.strategy != DDP_FSDP_FULL_SHARD,
                            !fsdp->reduces_per_micro_batch);
    if (fsdp->keeps_full_params || ddp__unshard_is_soon(fsdp, unit, fsdp->desc.prefetch)) return DDP_OK;
    if (fsdp->desc.no_reshard_after_forward && !fsdp->no_grad && target->trained_count
        && target->reduced_count < fsdp->desc.micro_batch_count)
        return DDP_OK;
    return ddp__unit_reshard(fsdp, target);
}

DDPDEF ddp_result ddp_fsdp_reduce_grads(ddp_fsdp *fsdp, int unit) {
    DDP_PUBLIC_CALL(ddp_fsdp_reduce_grads);
    DDP__UNIT_CHECK(fsdp, unit);
    ddp__fsdp_unit *target = &fsdp->units[unit];
    DDP__FSDP_CHECK(target->reduced_count < fsdp->desc.micro_batch_count,
                    "unit %s was already reduced %d times in this step, which is micro_batch_count; call "
                    "ddp_fsdp_step first",
                    target->name, target->reduced_count);
    DDP__FSDP_CHECK(!target->trained_count || target->grads_attached,
                    "unit %s has no gradients; call ddp_fsdp_unshard before its backward", target->name);
    ddp__fsdp_hash_call(fsdp, 1, unit);
    if (!target->trained_count) return DDP_OK;
    DDP_TRY(ddp__fsdp_device_begin(fsdp->group));
    DDP_TRY(ddp__reduce_wait_release(fsdp, target));
    ddp_result result = ddp__accept_pipeline_sums(fsdp, target);
    if (result != DDP_OK) return ddp__unit_failed(target, result, __func__);
    target->reduced_count++;
    target->grads_attached = 0;
    if (fsdp->reduces_per_micro_batch) {
        target->reducing_buffer = target->grad_buffer;
        target->reducing_buffer->reducing_unit = target;
        target->grad_buffer = NULL;
        target->grad_memory = NULL;
        ddp__set_param_pointers(target, 1, 0);
    }
    result = fsdp->reduce.progress
                 ? ddp__reduce_issue(fsdp, target)
                 : ddp_group_enqueue(fsdp->group, ddp__reduce_task, target, &target->reduce_work);
    return result == DDP_OK ? DDP_OK : ddp__unit_failed(target, result, __func__);
}

DDPDEF ddp_result ddp_fsdp_no_grad(ddp_fsdp *fsdp, int on) {
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    fsdp->no_grad = on != 0;
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_zero_grad(ddp_fsdp *fsdp) {
    DDP_PUBLIC_CALL(ddp_fsdp_zero_grad);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    DDP_TRY(ddp__reduce_wait_all(fsdp));
    fsdp->call_hash = 0; /* so that ranks with different calls can start again */
    DDP_TRY(ddp__fsdp_agree_calls(fsdp, __func__, DDP_OK));
    if (fsdp->sums_divided && fsdp->desc.scaler)
        fsdp->desc.scaler->unscaled = fsdp->desc.scaler->found_inf = 0;
    ddp__fsdp_begin(fsdp);
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_get_shard(ddp_fsdp *fsdp, int unit, int param, ddp_tensor *value, ddp_tensor *grad,
                                     int64_t *first_row) {
    DDP_PUBLIC_CALL(ddp_fsdp_get_shard);
    DDP__PARAM_CHECK(fsdp, unit, param);
    const ddp__fsdp_shard *s = &fsdp->units[unit].shards[param];
    ddp_tensor rows = ddp__shard_tensor(s);
    if (value) *value = rows;
    if (first_row) *first_row = (int64_t)s->first_row;
    if (!grad) return DDP_OK;
    /* this call is not collective, so the unit keeps its gradient buffer */
    if (s->trained) DDP_TRY(ddp__reduce_wait(fsdp, s->unit));
    DDP_TRY(ddp__fsdp_device_begin(fsdp->group));
    DDP_TRY(ddp__offload_wait_sums(fsdp));
    DDP_TRY(ddp__half_sums_end(fsdp));
    DDP_TRY(ddp__clip_apply(fsdp));
    DDP_TRY(ddp_device_check(fsdp->group));
    rows.data = rows.data && s->trained && s->unit->reduced_count == fsdp->desc.micro_batch_count
                    ? ddp__shard_sum(s)
                    : NULL;
    *grad = rows;
    return DDP_OK;
}

DDPDEF ddp_result ddp_fsdp_get_state(ddp_fsdp *fsdp, int unit, int param, int which, const char **name,
                                     ddp_tensor *state) {
    DDP__PARAM_CHECK(fsdp, unit, param);
    DDP__FSDP_CHECK(state, "state is NULL");
    const ddp__fsdp_shard *s = &fsdp->units[unit].shards[param];
    DDP__FSDP_CHECK(s->trained, "unit %s, parameter %.200s is frozen and has no optimizer state",
                    s->unit->name, s->name);
    DDP__FSDP_CHECK(which >= 0 && which < fsdp->optimizer->state_count,
                    "which=%d, but each parameter has %d states; count from 0", which,
                    fsdp->optimizer->state_count);
    return ddp_optimizer_get_state(fsdp->optimizer, s->source->optimizer_index, which, name, state);
}

DDPDEF ddp_result ddp_fsdp_sync_buffers(ddp_fsdp *fsdp, int root) {
    DDP_PUBLIC_CALL(ddp_fsdp_sync_buffers);
    DDP__FSDP_CHECK(fsdp, "fsdp is NULL");
    DDP__FSDP_CHECK(root >= 0 && root < ddp_world_size(fsdp->group),
                    "root=%d is not a rank of the group; use 0 to %d", root, ddp_world_size(fsdp->group) - 1);
    DDP_TRY(ddp__fsdp_check_between_steps(fsdp, __func__));
    DDP_TRY(ddp__fsdp_device_begin(fsdp->group));
    return ddp__fsdp_failed(fsdp, ddp__fsdp_broadcast_buffers(fsdp, root));
}

DDPDEF ddp_result ddp_fsdp_set_step(ddp_fsdp *fsdp, int64_t step) {
    DDP__FSDP_CHECK(fsdp && step >= 0, "fsdp is NULL, or step=%lld is negative; use 0 or more",
                    (long long)step);
    fsdp->step = step;
    ddp_optimizer_set_step(fsdp->optimizer, step);
    if (fsdp->desc.state) fsdp->desc.state->step = step;
    return DDP_OK;
}

#endif /* DDP_IMPLEMENTATION or DDP_FSDP_IMPLEMENTATION */
#endif /* DDP__KERNELS_ONLY */

/*
    MIT License
    Copyright (c) 2026 the ddp authors

    Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
    associated documentation files (the "Software"), to deal in the Software without restriction, including
    without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
    copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the
    following conditions:

    The above copyright notice and this permission notice shall be included in all copies or substantial
    portions of the Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
    LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO
    EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER
    IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR
    THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*/

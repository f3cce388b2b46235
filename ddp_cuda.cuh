/*  ddp_cuda.cuh - GPUs for ddp.h: groups over NCCL, device memory as a ddp_device, kernels of a training
   step.

    All calls of ddp.h work with device pointers: collectives, messages, the reducer. Events order them, and
    the host does not block. The kernels of >>api give the same bits as the CPU.

USAGE
    #define DDP_CUDA_IMPLEMENTATION    in exactly one .cu file of the program, before including this header
    #include "ddp_cuda.cuh"
    DDP_IMPLEMENTATION there also compiles the bodies of ddp.h. Other files, also in C, only include it, and
    need CUDA's include directory. Link with -lnccl -lpthread -lm.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp_cuda.cuh"
    #include <stdio.h>

    static ddp_result train(ddp_group *world, void *user) {      // per rank, on the GPU of its local rank
        ddp_group *gpus;
        void *gradient;
        ddp_result result = ddp_cuda_group_create(&gpus, world, (const ddp_cuda_desc *)user);
        if (result != DDP_OK) return result;
        result = ddp_group_alloc(gpus, 4000, &gradient);         // zeros; any other device memory works too
        if (result == DDP_OK)
            result = ddp_all_reduce(gpus, gradient, gradient, 1000, DDP_F32, DDP_OP_AVG, NULL);
        if (result == DDP_OK && cudaStreamSynchronize(0) != cudaSuccess)
            result = ddp_fail(DDP_ERR_ENGINE, "cudaStreamSynchronize failed");
        ddp_group_destroy(gpus);
        return result;
    }

    int main(void) {
        ddp_cuda_desc desc = DDP_ZERO;                           // zero means default, field by field
        ddp_launch_desc launch = DDP_ZERO;
        launch.world_size = 2;
        if (ddp_launch(&launch, train, &desc) == DDP_OK) return 0;
        fprintf(stderr, "%s\n", ddp_last_error());
        return 1;
    }

CONTENTS      (search for the tags)
    >>config  >>types  >>descs  >>api  >>spi  >>impl-structs  >>impl-pick  >>impl-numbers
    >>impl-elements  >>impl-launch  >>impl-tree  >>impl-multi  >>impl-rows  >>impl-optimizers
    >>impl-optimizer-calls  >>impl-quantise  >>impl-layers  >>impl-layer-rows  >>impl-streams
    >>impl-device  >>impl-products  >>impl-tables  >>impl-nccl  >>impl-nccl-tree  >>impl-nccl-calls
    >>impl-watchdog  >>impl-nccl-memory  >>impl-nccl-group  >>impl-staged  >>impl-staged-rounds
    >>impl-staged-messages  >>impl-staged-groups  >>impl-public

CONCEPTS
    Group      ddp_cuda_group_create creates one from the ranks of a CPU group, its control group. Calls on it
               enqueue work on the group's own communication stream, after the work of the user's stream.
               ddp_wait makes the user's stream wait, not the host. This holds with NCCL; calls on a staged
               group block like those of a CPU group.
    Watchdog   One thread per group. It queries CUDA and NCCL for errors, and exchanges progress with the
               watchdogs of the other ranks over the control group. A failure on one rank ends the
               communication on all ranks, with one cause.
    Stream     The user's stream of a group (ddp_cuda_set_stream): calls on the group are ordered with it.
               The reducer, the accumulator, clipping and the optimizers compute on it.
               The thread's stream (ddp_cuda_use_stream): direct calls of the functions of ddp_device_cuda()
               run on it. Calls on a group set it to the user's stream of that group.
               ddp_cuda_gemm and the kernels below take their stream as an argument.
    Element    The code for one element also compiles for the CPU, where tests compare it with ddp.h. A kernel
               only distributes elements over threads, 16 bytes at a time where all its pointers allow it.
    Order      ddp_cuda_reduce_tree adds in the order of DDP_ORDER_TREE, and sums of squares in that of
               ddp_device_cpu(): the same bits for the same inputs. NaNs are NaNs on both, but their payloads
               differ.
    Sizes      Counts have 64 bits and may be 0. Arrays of elements may have any alignment; 16 bytes is
               fastest. A ddp_cuda_norm and ddp_cuda_step_desc.skip need 8 bytes.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). An error of CUDA becomes DDP_ERR_ENGINE (out of memory:
    DDP_ERR_NO_MEMORY). The line names the call that failed, with CUDA's own text:
      ddp_cuda_adamw: cudaLaunchKernel: no kernel image is available for execution on the device
      (cudaErrorNoKernelImageForDevice)
    A timeout names the missing ranks, and their last calls:
      rank 0/2 ddp_all_reduce group=world seq=3 f32 count=1000: timed out after 60000 ms: seq=3 ddp_all_reduce
      f32 count=1000 sum of group=world is pending on rank 0; missing: rank 1, whose last call is seq=2
      ddp_broadcast f32 count=10 root=0
    A failure inside a kernel is reported by a later call, as always with CUDA. The functions of ddp_device
    that return nothing store their thread's first failure for ddp_cuda_check.

CONFIG MACROS (define before including)
    DDP_CUDA_IMPLEMENTATION  also compile the bodies of this header, here (nvcc)
    DDP_IMPLEMENTATION       also compile the bodies of this header and of ddp.h, here
    DDP_STATIC               make every function static: a private copy for one source file
    DDP_NO_NCCL              build without NCCL. Supported versions of NCCL: 2.18 to 2.30
    DDP_USE_CUBLASLT         declares ddp_cuda_gemm, matrix products by cuBLASLt: link with -lcublasLt. The
                             layers of ddp_tensor.h use it. Without it, they use a plain kernel, which is slow
    Compile the implementation without --use_fast_math and -ftz=true. They flush subnormal numbers to zero,
    which the CPU keeps, and nvcc defines no macro by which this header could reject them.

NOT DONE HERE
    Ranks that share a device communicate through host memory, for development: slow. Do not give
    ddp_device_cuda() to a group of a backend of ddp.h: these read memory with the CPU. On NCCL, messages of
    all_to_all_v with different counts are only detected by the timeout.
    Nothing in this header has run on a GPU, or with NCCL or cuBLASLt. It compiles and links for sm_80, sm_90
    and PTX. Tests on the CPU cover device selection, element code and dispatch. Groups are tested on a fake
    machine (tests/support/fake_gpu.h and others) that runs streams in many orders, finds races, and makes
    every call fail once. tests/gpu/run.sh is ready for a device. No speed has been measured.
*/
#ifndef DDP_CUDA_CUH
#define DDP_CUDA_CUH

#include "ddp.h"

//== config ===================================================================================== >>config
#include <cuda_runtime_api.h>

/* Elements that share a scale in ddp_cuda_quantise8. */
#define DDP_CUDA_QUANT_BLOCK 256

/* Bytes of device memory that a group keeps for ddp_cuda_gemm: NVIDIA's advice for its largest devices. */
#define DDP_CUDA_GEMM_WORKSPACE_BYTES ((size_t)32 << 20)

#ifdef __cplusplus
extern "C" {
#endif

//== types ======================================================================================= >>types

/* One tensor of a list, and its position in the flat buffer. */
typedef struct ddp_cuda_range {
    void *data;    /* on the device */
    size_t count;  /* elements */
    size_t offset; /* elements from the start of the flat buffer */
} ddp_cuda_range;

/* The sums that ddp_cuda_unscale adds to, in device memory. The caller zeroes it in stream order before the
   first call. All cells are int64. Those of several ranks add as DDP_I64 SUM over sizeof(ddp_cuda_norm) / 8
   elements, exactly and in any order. */
typedef struct ddp_cuda_norm {
    ddp_exact_sum squares; /* of the values as stored. ddp_exact_sum_value of a host copy is the sum: a NaN
                              or an infinity if a value is one */
    int64_t non_finite;    /* number of values that were NaN or infinite before or after the scaling */
} ddp_cuda_norm;

//== descs ======================================================================================= >>descs

/* For ddp_cuda_pick. Zero means default, field by field. */
typedef struct ddp_cuda_pick_desc {
    const int *devices; /* local rank r uses devices[r]. NULL = ddp_launch_desc.devices. If that is NULL too:
                           device 0 if the rank sees only one GPU, otherwise device r */
    int device_count;   /* entries of devices */
    const char *uuid;   /* NULL = by number. Otherwise the UUID of this rank's device, as nvidia-smi -L prints
                           it, such as "GPU-8f6d0c1e-...", or a beginning that only one device has. Not
                           together with devices */
    int allow_shared;   /* 1 = this rank may share its device with others that set it too. Without a list,
                           local rank r then uses device r modulo the number of devices */
} ddp_cuda_pick_desc;

/* The way in which a group of GPUs communicates. */
typedef enum ddp_cuda_engine {
    DDP_CUDA_ENGINE_DEFAULT = 0, /* NCCL. Staged, with a notice to log_fn, if ranks share a device or NCCL is
                                    not built in */
    DDP_CUDA_ENGINE_NCCL,        /* with allow_shared, ranks may share a device with NCCL 2.30 or newer and
                                    NCCL_MULTI_RANK_GPU_ENABLE=1 */
    DDP_CUDA_ENGINE_STAGED       /* through host memory and the control group: slow, for development */
} ddp_cuda_engine;

/* For ddp_cuda_group_create. Zero means default, field by field. */
typedef struct ddp_cuda_desc {
    const int *devices;       /* as in ddp_cuda_pick_desc, except that NULL = the device of comm, if that is
                               set */
    int device_count;         /* entries of devices */
    const char *uuid;         /* as in ddp_cuda_pick_desc */
    int allow_shared;         /* as in ddp_cuda_pick_desc; implied by DDP_CUDA_ENGINE_STAGED */
    ddp_cuda_engine engine;   /* equal on all ranks */
    ddp_order order;          /* 0 = any with NCCL, tree when staged; equal on all ranks */
    const char *name;         /* NULL = control's */
    int timeout_ms;           /* 0 = control's */
    cudaStream_t stream;      /* the user's stream: calls follow its work, and ddp_wait makes it wait; see
                                 ddp_cuda_set_stream. 0 = CUDA's default stream */
    cudaStream_t comm_stream; /* the stream for communication; 0 = the group creates one of high priority */
    struct ncclComm *comm;    /* NULL = created by the group. Otherwise the user's ncclComm_t with control's
                                 ranks. The group does not destroy it, but aborts it if the group fails
                                 (ddp_group_status); then it is invalid */
} ddp_cuda_desc;

/* One tensor in a step of AdamW or SGD. All pointers are device memory. The arrays do not overlap each other
   or those of other descs of the call. The struct itself is host memory, read before the call returns. */
typedef struct ddp_cuda_step_desc {
    float *master;          /* required; the parameters in f32, updated in place */
    const void *grad;       /* required */
    ddp_dtype grad_dtype;   /* 0 = F32; F16, BF16 */
    float *first;           /* AdamW: required, first moment, zero before step 1. SGD: the momentum buffer,
                             required when momentum is not 0; step 1 only writes it */
    float *second;          /* AdamW: required, second moment, zero before step 1 */
    void *copy;             /* NULL = none; the updated parameters in copy_dtype, written in the same pass */
    ddp_dtype copy_dtype;   /* 0 = BF16; F16, F32 */
    size_t count;           /* elements of each array */
    int64_t step;           /* required; counts from 1. The caller decides if a skipped step counts */
    float lr, weight_decay; /* the learning rate; weight decay, 0 = none */
    float beta1, beta2;     /* AdamW; 0 = 0.9 and 0.999 */
    float eps;              /* AdamW; 0 = 1e-8 */
    float momentum, dampening; /* SGD */
    int nesterov;              /* SGD; 1 = on */
    float grad_factor;         /* 0 = 1; multiplies gradients first: clipping, or 1 / loss scale */
    const int64_t *skip;       /* NULL = never; on the device: if not 0, nothing is written. Such as
                                  &norm->non_finite, added over ranks first: all then skip the same steps */
    int stochastic;            /* 1 = a BF16 copy is rounded up or down at random, with the exact value as
                                  average. Another copy_dtype is then DDP_ERR_INVALID */
    uint64_t seed;        /* stochastic: random bits depend only on seed, step and first_index + i, not on the
                             sharding */
    uint64_t first_index; /* stochastic: index of element 0 among all parameters */
} ddp_cuda_step_desc;

#if defined(DDP_USE_CUBLASLT)
/* The last operation of a product, on p = op(a) op(b) + addend. GELU is the tanh form, as in GPT-2:
   gelu(x) = x s(1.5957691216057307 (x + 0.044715 x^3)), s(x) = 1 / (1 + exp(-x)). */
typedef enum ddp_cuda_epilogue {
    DDP_CUDA_EPILOGUE_NONE = 0,  /* c = p */
    DDP_CUDA_EPILOGUE_BIAS,      /* c = p + bias, for every row */
    DDP_CUDA_EPILOGUE_GELU,      /* aux = p + bias, c = gelu(aux) */
    DDP_CUDA_EPILOGUE_GELU_GRAD, /* c = p gelu'(aux) */
    DDP_CUDA_EPILOGUE_BIAS_GRAD  /* c = p, and bias_grad[i] = the sum of row i of op(a) */
} ddp_cuda_epilogue;

/* A way to compute a product, from ddp_cuda_gemm_algos. Valid for products with the same sizes, strides,
   flags and alignment up to 16 bytes, on the same GPU model with the same version of cuBLASLt. */
typedef struct ddp_cuda_gemm_algo {
    uint64_t data[8]; /* cublasLtMatmulAlgo_t: cuBLASLt allows to store it for use with the same version */
    int separate;     /* 1 = without the epilogue, which kernels of this header compute afterwards */
} ddp_cuda_gemm_algo;

/* For ddp_cuda_gemm: c (m, n) = op(a) op(b). op(a) is (m, k), and op(b) is (k, n). Zero means default, field
   by field. All pointers are device memory. The struct itself is host memory, read before the call
   returns. */
typedef struct ddp_cuda_gemm_desc {
    int64_t m, n, k;       /* may be 0 */
    const void *a, *b;     /* required; row-major: a is (m, k), or (k, m) with trans_a; b is (k, n), or
                                   (n, k) with trans_b */
    void *c;               /* required; row-major; overlaps no other array, except that it may be addend */
    int64_t lda, ldb, ldc; /* elements from row to row. 0 = no gaps */
    int trans_a, trans_b;  /* 1 = op transposes */
    ddp_dtype dtype;       /* of every array. 0 = F32; F64, F16, BF16 */
    const void *addend;    /* NULL = none; (m, n) with ldc, added to the product. c = c + op(a) op(b) if it
                                   is c */
    ddp_cuda_epilogue epilogue; /* 0 = none */
    const void *bias;           /* BIAS, GELU: required, n elements */
    void *bias_grad;            /* BIAS_GRAD: required, m elements, overwritten */
    void *aux;                  /* GELU: required, written. GELU_GRAD: required, read. (m, n) without gaps */
    int allow_tf32;             /* 1 = F32 factors may be rounded to TF32 (10 bits of mantissa) */
    const ddp_cuda_gemm_algo *algo; /* NULL = that of the group's table (ddp_cuda_gemm_load). If it has none:
                                       cuBLASLt's first choice */
} ddp_cuda_gemm_desc;
#endif

//== api =========================================================================================== >>api

/* Chooses the device of this rank, makes it current for the calling thread and stores its number in *device.
   ddp_cuda_group_create also chooses, in the same way. Call this one only if a rank needs its device before
   the group, or has no such group. Other threads of the rank call cudaSetDevice themselves.
   Collective over control, any CPU group; blocks until all ranks have chosen. control NULL: one rank.
   desc NULL: all defaults; it may differ between ranks. Call it after ddp_launch has started the ranks and
   before any other CUDA call.
   Errors, on every rank; *device is -1, and the current device does not change:
     DDP_ERR_INVALID  a missing device (the error lists the present ones), or one that two ranks use (the
                      error names both ranks, the host and the UUID)
     DDP_ERR_ENGINE   CUDA does not work on a rank */
DDPDEF ddp_result ddp_cuda_pick(ddp_group *control, const ddp_cuda_pick_desc *desc, int *device);

/* Makes a group over device memory of the ranks of control, any CPU group. All calls of ddp.h work on it,
   with device pointers. desc NULL: all defaults. The device is chosen as by ddp_cuda_pick and becomes
   current. Collective over control; blocks at most timeout_ms. Ownership: free *out with ddp_group_destroy,
   before control. The group communicates over splits of control, so the caller may still use control itself.

   Below, the user's stream is desc.stream or that of ddp_cuda_set_stream. With NCCL:

     calls      are enqueued on the group's communication stream, after the work that the user's stream
                holds. They return at once, also with work == NULL. The host never waits for their results.
                With work == NULL, the call makes the user's stream wait for the communication. Otherwise
                ddp_wait does. Synchronize the user's stream before the host reads results. ddp_test queries
                the device. ddp_barrier blocks the host.
     order      DDP_ORDER_ANY leaves sums to NCCL. DDP_ORDER_TREE gives the bits of the CPU backends, by an
                all-to-all, a kernel and an all-gather, on at most 8191 ranks. MIN and MAX of floats (NaNs
                stay) and AVG of integers always run in this way. A call that needs a larger buffer than
                those before it allocates, and waits for the device.
                On one machine the tree sends as many bytes as a ring. Across machines, ranks reduce inside
                their machine first, in aligned blocks of 2^k consecutive ranks. With m machines of 2^k
                consecutive ranks each, W ranks and S bytes of data, each rank sends 2 S (m - 1) / W to other
                machines in an all_reduce: as a ring over machines does. 16-bit floats send 3 S (m - 1) / W,
                since their partial sums are f32. Other placements have smaller blocks, or none: all ranks
                then reduce at once, which sends up to 2 S.
     messages   between two ranks match in the order issued, whatever their tags, and run one after the other.
                Two ranks that send to each other need ddp_p2p_begin and ddp_p2p_end.
     failures   of a rank, of CUDA or NCCL, mismatched calls, or timeout_ms without progress end the
                communication on every rank. A later ddp_wait or call returns the cause. Work that is
                already on streams ends with undefined data.
     graphs     calls and ddp_wait can be captured into a CUDA graph, but ddp_test cannot. Launches of the
                graph have no timeout. Destroy such graphs before the group: NCCL waits for them.
     launches   each group has its own communication stream. Calls on several groups reach NCCL in program
                order, which must be the same on every rank. Set NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26) in
                the environment: the GPU then starts the kernels in that order, too. Without this variable,
                finish the calls of one group before those of another. Two GPUs could otherwise start kernels
                of two groups in opposite orders. Kernels that do not fit on a GPU together would then wait
                for each other until the timeout.
     memory     ddp_group_alloc returns memory that is registered with NCCL, as windows from 2.27. Unlike
                shared memory of CPU groups, no peer reads it in place.
     destroy    ddp_group_destroy waits for the work on the communication stream, and at most 2 s for the
                other ranks to destroy the group.
     sharing    of a device needs NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1. Ranks that are threads must then
                not free device memory while another rank is in a call: cudaFree waits for the whole device.

   Staged: every call behaves as on a CPU group, and follows the work of the user's stream. A blocking call
   returns when its results are in device memory. A call cannot be captured into a graph.

   Errors, on every rank: those of ddp_cuda_pick; DDP_ERR_INVALID also for a desc.comm of another rank, size
   or device; DDP_ERR_MISMATCH when engine, order or version of NCCL differ, or only some ranks set comm;
   DDP_ERR_TIMEOUT; DDP_ERR_UNSUPPORTED when the build or NCCL's version does not support the engine;
   DDP_ERR_NO_MEMORY; DDP_ERR_SYSTEM; DDP_ERR_ENGINE with NCCL's text. */
DDPDEF ddp_result ddp_cuda_group_create(ddp_group **out, ddp_group *control, const ddp_cuda_desc *desc);

/* Sets the user's stream of the group, see ddp_cuda_group_create. Later calls on the group start after its
   work. A ddp_wait makes the stream wait that is set at that moment, also for older calls. A split begins
   with the stream that its parent has at the split.
   stream is one of the group's device, and stays the caller's. It must exist until another one is set, or the
   group is destroyed. Not collective, does not block; may change from call to call. Errors: DDP_ERR_INVALID
   for a group without GPUs. */
DDPDEF ddp_result ddp_cuda_set_stream(ddp_group *group, cudaStream_t stream);

/* The stream of the group's communication, for a ddp_bucket_hook: it enqueues its kernels there, and may
   return before they have run. Calls on the group inside the hook run in order with them. The stream stays
   the same, and must not be destroyed, until ddp_group_destroy. Each split has its own. A staged group has
   one, too. 0 for a group without GPUs, and for NULL. */
DDPDEF cudaStream_t ddp_cuda_comm_stream(const ddp_group *group);

/* The function table of CUDA devices: memory, copies and arithmetic. Static, never NULL. Its functions act on
   the device that is current when they are called, and on the thread's stream (ddp_cuda_use_stream). Those
   that return nothing store their failures for ddp_cuda_check. >>spi lists what they promise in addition to
   struct ddp_device. ddp_cuda_group_create gives the table to its groups. Use it in ddp_group_desc.device
   only with a backend of your own that accepts device memory. */
DDPDEF const ddp_device *ddp_device_cuda(void);

/* Sets the stream of the calling thread, for its direct calls of functions of ddp_device_cuda(). Returns the
   previous one. stream is one of the device that is current in those calls, and stays the caller's. It does
   not change the stream of any group: see ddp_cuda_set_stream. A call on a group of GPUs sets the thread's
   stream to the user's stream of that group: call this function again after it. Does not block. Initially 0:
   CUDA's default stream. It and all other streams wait for each other, except non-blocking ones. */
DDPDEF cudaStream_t ddp_cuda_use_stream(cudaStream_t stream);

/* Returns the first failure, since the last ddp_cuda_check of this thread, of its calls of functions of
   ddp_device_cuda(); or DDP_OK. Reading it clears it. Sets ddp_last_error. Does not wait for the device: a
   failure inside a kernel is found later. Errors: DDP_ERR_ENGINE; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_cuda_check(void);

#if defined(DDP_USE_CUBLASLT)
/* Multiplies matrices in device memory by cuBLASLt, on `stream`. Declared only with DDP_USE_CUBLASLT.
   group is a group of GPUs. It keeps a cuBLASLt handle and DDP_CUDA_GEMM_WORKSPACE_BYTES, from the first
   product until it is destroyed. This first call blocks, and cannot be captured into a CUDA graph. Later
   calls do not block. The group's device must be current. Not collective.
   Products with one group share the workspace: they must not run at the same time on two streams.
   Sums over k are in f32, in f64 for F64. The result rounds once to dtype. If cuBLASLt does not support an
   epilogue, and for GELU in F32 and F64, the product rounds to dtype, and kernels of this header follow.
   Bits: the same for the same sizes, strides, flags and alignment up to 16 bytes, on the same GPU model, with
   the same version of cuBLASLt and the same table (ddp_cuda_gemm_load). They are not those of the CPU.
   Errors: DDP_ERR_INVALID names the field, and nothing is enqueued; DDP_ERR_NO_MEMORY; DDP_ERR_ENGINE names
   cuBLASLt's status. */
DDPDEF ddp_result ddp_cuda_gemm(ddp_group *group, const ddp_cuda_gemm_desc *desc, cudaStream_t stream);
struct ddp_gemm;
/* A ddp_tp_desc.gemm that may round f32 factors to TF32: ddp_cuda_gemm with allow_tf32, on the thread's
   stream. Set gemm_user to a group of GPUs. With ddp_tp_desc.gemm NULL, the layers on a group of GPUs use
   ddp_cuda_gemm without TF32. */
DDPDEF ddp_result ddp_cuda_gemm_tf32(const struct ddp_gemm *gemm, void *user);

/* --- tables of algorithms. A tuner such as bench/gpu/bench_gpt.cu lists ways to compute a product, measures
   them, and saves the fastest ones. A trainer loads the table. --- */

/* Lists ways to compute a product, for ddp_cuda_gemm_desc.algo: at most `capacity`, cuBLASLt's first choice
   first. With an epilogue, the second half computes it separately. All give the same bits in every run, but
   not the bits of each other. *count is their number, at least 1. Enqueues nothing. Not collective. The
   group's device must be current. Errors: those of ddp_cuda_gemm; DDP_ERR_INVALID for a capacity below 1. */
DDPDEF ddp_result ddp_cuda_gemm_algos(ddp_group *group, const ddp_cuda_gemm_desc *desc,
                                      ddp_cuda_gemm_algo *algos, int capacity, int *count);
/* Writes a table for ddp_cuda_gemm_load: a text file with algos[i] for products like descs[i], count of them,
   and the name of the group's GPU and the version of cuBLASLt. Pointers of a desc count by their alignment.
   Not collective: one rank writes the file. Errors: DDP_ERR_INVALID, also for more than 1,024 products;
   DDP_ERR_SYSTEM when the file cannot be written. */
DDPDEF ddp_result ddp_cuda_gemm_save(ddp_group *group, const char *path, const ddp_cuda_gemm_desc *descs,
                                     const ddp_cuda_gemm_algo *algos, int count);
/* Later products with this group use the algorithms of a table. For a product that it lacks, cuBLASLt's first
   choice remains. The same table gives the same bits. Replaces the table of an earlier call. A product in a
   CUDA graph that was captured before stays as it is. *used, which may be NULL, is the number of products for
   this rank's GPU and version of cuBLASLt. Those for others are skipped. To join tables, write their parts
   from chip to end one after the other, and one line end. Splits of the group do not inherit the table.
   Collective and blocking: all ranks must read the same content. The group's device must be current.
   Errors, on every rank; the group then keeps the table that it has: DDP_ERR_INVALID for a malformed file
   names the line, also when cuBLASLt refuses an algorithm; DDP_ERR_SYSTEM for a file that cannot be read;
   DDP_ERR_MISMATCH when the ranks read different content; DDP_ERR_NO_MEMORY; DDP_ERR_ENGINE. */
DDPDEF ddp_result ddp_cuda_gemm_load(ddp_group *group, const char *path, int *used);
#endif

/* --- kernels ---
   All pointers to data are device memory. The device of the stream must be current. Lists of pointers and
   ranges are host memory, read before the call returns. No call is collective, and none blocks. Data is in
   use until the stream has executed the call. A count of 0 does nothing, and its data may be NULL.
   Errors: DDP_ERR_INVALID, before a launch, names the argument; DDP_ERR_ENGINE when a launch fails. */

/* Reduces src_count (1 to 64) arrays of count elements, in tree order over the index of the array. Writes the
   result to each of dst_count (1 to 64) arrays. A destination may be one of the sources. Otherwise,
   destinations overlap neither sources nor each other. AVG divides the sum by divisor: pass src_count for the
   average of the sources. A divisor of 0 counts as 1. Other ops do not read it. 16-bit floats add in f32 and
   round once, integers wrap. The bits are those of the CPU backends. */
DDPDEF ddp_result ddp_cuda_reduce_tree(void *const *dst, int dst_count, const void *const *src, int src_count,
                                       size_t count, ddp_dtype dtype, ddp_op op, uint64_t divisor,
                                       cudaStream_t stream);

/* Copies many tensors of `dtype` into one flat buffer of flat_dtype, with one launch per 64 tensors:
   flat[offset + i] = factor * data[i], rounded once to nearest even. factor 1 copies; 0 is no default. Both
   dtypes are floats. Computes in f64 when either is F64, otherwise in f32. Elements of flat outside of all
   ranges are not written. No range overlaps another one in flat, and no tensor overlaps flat. */
DDPDEF ddp_result ddp_cuda_flatten(void *flat, ddp_dtype flat_dtype, const ddp_cuda_range *ranges,
                                   int range_count, ddp_dtype dtype, float factor, cudaStream_t stream);
/* The reverse: data[i] = factor * flat[offset + i]. Tensors do not overlap each other; ranges in flat may.
   Otherwise like ddp_cuda_flatten. */
DDPDEF ddp_result ddp_cuda_unflatten(const void *flat, ddp_dtype flat_dtype, const ddp_cuda_range *ranges,
                                     int range_count, ddp_dtype dtype, float factor, cudaStream_t stream);

/* Multiplies `rows` contiguous rows of row_count elements by factor, in place. To remove a loss scale, pass
   1 / scale. The dtype is a float; products are rounded to it. The same pass adds to *norm:
     squares       the squares of the products, in f64, in a fixed order in each row; sums of rows add exactly
     non_finite    1 for each element that is not finite before or after the product
   Several calls add to one *norm. A sharding that does not split rows does not change the sum. Its bits are
   those of ddp_device_cpu()'s scale followed by sum_squares. */
DDPDEF ddp_result ddp_cuda_unscale(void *data, size_t rows, size_t row_count, ddp_dtype dtype, float factor,
                                   ddp_cuda_norm *norm, cudaStream_t stream);

/* One step of AdamW (Loshchilov and Hutter 2019) for each of `count` descs. They may be tensors, or parts of
   tensors. One launch updates up to 56 of them, if they differ only in pointers, count and first_index. If
   one desc is invalid, the error names its index, and nothing is launched.
   w = master, m = first, v = second, t = step, b1 = beta1, b2 = beta2, wd = weight_decay. r and c are
   computed in f64 and rounded once. All other operations are rounded in f32:
     r = lr / (1 - b1^t)
     c = 1 / sqrt(1 - b2^t)
     g = grad_factor * grad
     m = b1 * m + (1 - b1) * g
     v = b2 * v + (1 - b2) * (g * g)
     w = (1 - lr * wd) * w - (r * m) / (c * sqrt(v) + eps)
   Fields of SGD are not read. */
DDPDEF ddp_result ddp_cuda_adamw(const ddp_cuda_step_desc *descs, int count, cudaStream_t stream);

/* One step of SGD as in PyTorch for each of `count` descs, every operation rounded in f32. w = master,
   b = first, wd = weight_decay:
     g = grad_factor * grad + wd * w
     b = g in step 1, then momentum * b + (1 - dampening) * g
     w = w - lr * b, or with nesterov w - lr * (g + momentum * b)
   Without momentum, b is g and is not stored. Fields of AdamW are not read. Launches are those of
   ddp_cuda_adamw. */
DDPDEF ddp_result ddp_cuda_sgd(const ddp_cuda_step_desc *descs, int count, cudaStream_t stream);

/* Converts count elements of src (F32, F16 or BF16) to signed bytes, q[count]. Each block of
   DDP_CUDA_QUANT_BLOCK (256) elements, counted from src[0], has one f32 scale: scales[ceil(count / 256)].
   scale = A / 127, where A is the largest magnitude of the block; q = x / scale, rounded to nearest even. A
   block with A below 2^-100 gets the scale 0 and zeros. A block with a NaN or an infinity gets the scale NaN
   and zeros. Equal blocks give equal bits. src, q and scales do not overlap. */
DDPDEF ddp_result ddp_cuda_quantise8(int8_t *q, float *scales, const void *src, ddp_dtype src_dtype,
                                     size_t count, cudaStream_t stream);
/* Converts back: dst[i] = q[i] * scales[i / 256], rounded to dst_dtype (F32, F16 or BF16). Before that
   rounding, it differs from the element that ddp_cuda_quantise8 has converted by at most A / 253.9, or by A
   if A is below 2^-100. A block with the scale NaN becomes NaNs, also where src was finite or infinite. q,
   scales and dst do not overlap. */
DDPDEF ddp_result ddp_cuda_dequantise8(void *dst, ddp_dtype dst_dtype, const int8_t *q, const float *scales,
                                       size_t count, cudaStream_t stream);

//== device functions ============================================================================== >>spi
/* ddp_device_cuda() promises in addition to struct ddp_device:
     alloc        blocks until the memory is zeroed: any stream may use it at once.
     copy         between device pointers, it is in stream order. If either side is host memory, it is
                  complete on return.
     copy_many    is one launch per 64 ranges, of device memory only.
     the others   are in stream order and return at once; add, divide, cast and copy_many accept any
                  alignment.
   The functions act on the current device of the calling thread. Calls on a group with this device set the
   thread's current device and stream to the group's device and compute stream. */

#ifdef __cplusplus
}
#endif
#endif /* DDP_CUDA_CUH */

#include "ddp.h" /* again, to check the options with which bodies are compiled */
#if (defined(DDP_IMPLEMENTATION) || defined(DDP_CUDA_IMPLEMENTATION)) \
    && !defined(DDP_CUDA_IMPLEMENTATION_INCLUDED)
#define DDP_CUDA_IMPLEMENTATION_INCLUDED

#if !defined(__CUDACC__)
#error "ddp_cuda.cuh: define DDP_CUDA_IMPLEMENTATION or DDP_IMPLEMENTATION in a .cu file, compiled by nvcc"
#endif

//== structs and errors =================================================================== >>impl-structs
/* Includes, limits, and the table of CUDA runtime calls, which tests replace by a fake machine. Then CUDA
   errors as a ddp_result with a text. */
#include <ctype.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <errno.h>
#include <math.h>
#if defined(DDP_USE_CUBLASLT)
#include <cublasLt.h>
#endif
#if !defined(DDP_NO_NCCL)
#include <nccl.h>
#if !defined(DDP__NCCL_VERSION)
#define DDP__NCCL_VERSION NCCL_VERSION_CODE /* tests set it to compile the code for older versions */
#endif
#if DDP__NCCL_VERSION < 21800
#error "ddp_cuda.cuh needs NCCL 2.18 or newer: update it, or define DDP_NO_NCCL"
#endif
#endif
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <type_traits>
#include <utility>
#include <unistd.h>

/* Includes the kernel types of ddp_fsdp.h and ddp_tensor.h if these headers exist. The rest of such a header
   follows when the program includes it. */
#define DDP__KERNELS_ONLY
#if __has_include("ddp_fsdp.h")
#include "ddp_fsdp.h"
#endif
#if __has_include("ddp_tensor.h")
#include "ddp_tensor.h"
#endif
#undef DDP__KERNELS_ONLY

#if !defined(DDP__HD)
#define DDP__HD __host__ __device__ __forceinline__
#endif
#if !defined(DDP__CUDA_KERNEL)
#define DDP__CUDA_KERNEL(...) (const void *)__VA_ARGS__ /* replaced in tests on the CPU */
#endif
#if defined(__CUDA_ARCH__)
#define DDP__UNROLL _Pragma("unroll")
#define DDP__UNROLL_4 _Pragma("unroll 4")
#else
#define DDP__UNROLL
#define DDP__UNROLL_4
#endif
#if !defined(DDP__CUDA_RECORD_ACCESS)
#define DDP__CUDA_RECORD_ACCESS(n, address, size_bytes) \
    (void)0 /* tests record the accesses made on the CPU */
#endif
#define DDP__CUDA_TEXT_MAX 512          /* bytes of an error line of ddp.h */
#define DDP__CUDA_THREADS 256           /* threads per block */
#define DDP__CUDA_BLOCKS 4096           /* largest grid: some waves on any GPU; kernels loop over the rest */
#define DDP__CUDA_TREE_MAX_SOURCES 8191 /* most sources of a reduction: 4 * 2^11 - 1 */
#define DDP__CUDA_LAUNCH_RANGES DDP_COPY_RANGES /* per launch: a kernel's arguments are limited to 4 KiB */
#define DDP__CUDA_CHUNK ((size_t)16384)         /* elements of a tensor that one block copies */

/* Every call of the CUDA runtime goes through this table. */
typedef struct ddp__cuda_runtime {
    /* 1 = tests without a device: kernels are loops on the CPU over host memory, run by host_work. */
    int on_host;
    cudaError_t (*device_count)(int *count);
    cudaError_t (*device_identity)(int device, char name[256], unsigned char uuid[16]);
    cudaError_t (*set_device)(int device);
    cudaError_t (*malloc)(void **out, size_t size_bytes);
    cudaError_t (*free)(void *memory);
    cudaError_t (*memcpy_async)(void *dst, const void *src, size_t size_bytes, cudaMemcpyKind kind,
                                cudaStream_t stream);
    cudaError_t (*memset_async)(void *dst, int value, size_t size_bytes, cudaStream_t stream);
    cudaError_t (*synchronize)(cudaStream_t stream);
    cudaError_t (*is_device_memory)(const void *pointer, int *yes);
    cudaError_t (*launch)(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                          cudaStream_t stream);
    cudaError_t (*clear_error)(void);
    cudaError_t (*get_device)(int *device);
    cudaError_t (*stream_create)(cudaStream_t *out, int high_priority); /* a non-blocking stream */
    cudaError_t (*stream_destroy)(cudaStream_t stream);
    cudaError_t (*stream_wait_event)(cudaStream_t stream, cudaEvent_t event);
    cudaError_t (*stream_query)(cudaStream_t stream);
    cudaError_t (*stream_capturing)(cudaStream_t stream, int *yes);
    cudaError_t (*relax_capture)(void); /* calls of this thread do not invalidate captures of other threads */
    cudaError_t (*event_create)(cudaEvent_t *out); /* without timing */
    cudaError_t (*event_destroy)(cudaEvent_t event);
    cudaError_t (*event_record)(cudaEvent_t event, cudaStream_t stream);
    cudaError_t (*event_query)(cudaEvent_t event);
    cudaError_t (*host_alloc)(void **out, size_t size_bytes); /* pinned */
    cudaError_t (*host_free)(void *memory);
    /* on_host: enqueues run(copy) on the stream. copy: a copy of the argument, aligned to 16 bytes. */
    cudaError_t (*host_work)(void (*run)(void *copy), const void *argument, size_t argument_bytes,
                             cudaStream_t stream);
} ddp__cuda_runtime;

#if !defined(DDP__CUDA_RUNTIME)
static cudaError_t ddp__cuda_identity(int device, char name[256], unsigned char uuid[16]) {
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess) return error;
    snprintf(name, 256, "%.255s", properties.name);
    memcpy(uuid, &properties.uuid, 16);
    return cudaSuccess;
}

static cudaError_t ddp__cuda_is_device_memory(const void *pointer, int *yes) {
    cudaPointerAttributes attributes;
    cudaError_t error = cudaPointerGetAttributes(&attributes, pointer);
    *yes = error == cudaSuccess && attributes.type == cudaMemoryTypeDevice;
    return error;
}

static cudaError_t ddp__cuda_stream_create(cudaStream_t *out, int high_priority) {
    int lowest = 0, highest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    return error == cudaSuccess
               ? cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, high_priority ? highest : lowest)
               : error;
}

static cudaError_t ddp__cuda_stream_wait_event(cudaStream_t stream, cudaEvent_t event) {
    return cudaStreamWaitEvent(stream, event, 0);
}

static cudaError_t ddp__cuda_stream_capturing(cudaStream_t stream, int *yes) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(stream, &status);
    *yes = error == cudaSuccess && status != cudaStreamCaptureStatusNone;
    return error;
}

static cudaError_t ddp__cuda_relax_capture(void) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return cudaThreadExchangeStreamCaptureMode(&mode);
}

static cudaError_t ddp__cuda_event_create(cudaEvent_t *out) {
    return cudaEventCreateWithFlags(out, cudaEventDisableTiming);
}
static cudaError_t ddp__cuda_host_alloc(void **out, size_t size_bytes) {
    return cudaHostAlloc(out, size_bytes, cudaHostAllocPortable);
}

static const ddp__cuda_runtime *ddp__cuda_real_runtime(void) {
    static const ddp__cuda_runtime table = {0,
                                            cudaGetDeviceCount,
                                            ddp__cuda_identity,
                                            cudaSetDevice,
                                            cudaMalloc,
                                            cudaFree,
                                            cudaMemcpyAsync,
                                            cudaMemsetAsync,
                                            cudaStreamSynchronize,
                                            ddp__cuda_is_device_memory,
                                            cudaLaunchKernel,
                                            cudaGetLastError,
                                            cudaGetDevice,
                                            ddp__cuda_stream_create,
                                            cudaStreamDestroy,
                                            ddp__cuda_stream_wait_event,
                                            cudaStreamQuery,
                                            ddp__cuda_stream_capturing,
                                            ddp__cuda_relax_capture,
                                            ddp__cuda_event_create,
                                            cudaEventDestroy,
                                            cudaEventRecord,
                                            cudaEventQuery,
                                            ddp__cuda_host_alloc,
                                            cudaFreeHost,
                                            NULL};
    return &table;
}
#define DDP__CUDA_RUNTIME ddp__cuda_real_runtime()
#endif

/* --- errors. Functions of ddp_device that return nothing store the first failure of their thread for
   ddp_cuda_check. --- */

/* State per thread, for the functions of the device table: they have no group. */
typedef struct ddp__cuda_thread {
    cudaStream_t stream;
    const struct ddp__cuda_open_args
        *args;                     /* set while the thread is in ddp_cuda_group_create; otherwise NULL */
    ddp_saved_error first_failure; /* first failure that ddp_cuda_check has not reported yet */
} ddp__cuda_thread;

static thread_local ddp__cuda_thread ddp__cuda_this_thread;

/* Returns the result of a CUDA call. call: its name; function: the name of its caller, for the error. */
static ddp_result ddp__cuda_fail(cudaError_t error, const char *function, const char *call) {
    if (error == cudaSuccess) return DDP_OK;
    DDP__CUDA_RUNTIME->clear_error(); /* otherwise the user's next cudaGetLastError would report it again */
    return ddp_fail(error == cudaErrorMemoryAllocation ? DDP_ERR_NO_MEMORY : DDP_ERR_ENGINE,
                    "%s: %s: %s (%s)", function, call, cudaGetErrorString(error), cudaGetErrorName(error));
}

/* Returns from the enclosing function if a CUDA call fails. called: its name. */
#define DDP__CUDA_TRY(function, called, call) DDP_TRY(ddp__cuda_fail(call, function, called))

/* Returns the result of a query; *done = 1 once the work has finished. Clears "not ready", which CUDA would
   report as an error. */
static ddp_result ddp__cuda_query(cudaError_t error, const char *function, const char *call, int *done) {
    *done = error == cudaSuccess;
    if (error != cudaErrorNotReady) return ddp__cuda_fail(error, function, call);
    DDP__CUDA_RUNTIME->clear_error();
    return DDP_OK;
}

/* Stores the first failure of a function that returns nothing. */
static void ddp__cuda_save_failure(ddp_result result) {
    ddp_error_save(&ddp__cuda_this_thread.first_failure, result);
}

static void ddp__cuda_save_error(cudaError_t error, const char *function, const char *call) {
    ddp__cuda_save_failure(ddp__cuda_fail(error, function, call));
}

/* Holds a mutex until the end of the block. */
struct ddp__cuda_lock {
    pthread_mutex_t *mutex;
    explicit ddp__cuda_lock(pthread_mutex_t *held) : mutex(held) { pthread_mutex_lock(mutex); }
    ~ddp__cuda_lock() { pthread_mutex_unlock(mutex); }
};

//== device selection ======================================================================== >>impl-pick
/* Chooses the device of each rank by UUID, list or local rank. All ranks then compare their devices, so that
   two ranks share one only with allow_shared. Used by ddp_cuda_pick and ddp_cuda_group_create. */

/* The device of a rank, as ranks exchange it. */
typedef struct ddp__cuda_slot {
    int32_t device;
    int32_t allow_shared;
    unsigned char uuid[16];
    char host[64];
} ddp__cuda_slot;

static void ddp__cuda_uuid_text(char out[48], const unsigned char uuid[16]) {
    int at = snprintf(out, 48, "GPU-");
    for (int i = 0; i < 16; i++)
        at += snprintf(out + at, 48 - (size_t)at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                       uuid[i]);
}

/* Lists devices: "0 (NVIDIA H100), 1 (NVIDIA H100)", or with UUIDs. After four only the number of others. */
static void ddp__cuda_list_devices(char *out, size_t size, int count, int with_uuid) {
    int at = 0;
    snprintf(out, size, "none");
    for (int i = 0; i < count && i < 4 && (size_t)at < size; i++) {
        char name[256] = "unknown", uuid_text[48];
        unsigned char uuid[16] = {0};
        DDP__CUDA_RUNTIME->device_identity(i, name, uuid);
        ddp__cuda_uuid_text(uuid_text, uuid);
        at += snprintf(out + at, size - (size_t)at, "%s%d (%.40s)", i ? ", " : "", i,
                       with_uuid ? uuid_text : name);
    }
    if (count > 4 && (size_t)at < size)
        snprintf(out + at, size - (size_t)at, " and %d more, up to %d", count - 4, count - 1);
}

/* Returns 1 if the UUID begins with the user's text. Accepts upper case and a missing "GPU-". */
static int ddp__cuda_uuid_has_prefix(const char *uuid, const char *prefix) {
    uuid += 4;
    if (strncmp(prefix, "GPU-", 4) == 0 || strncmp(prefix, "MIG-", 4) == 0) prefix += 4;
    while (*prefix && tolower((unsigned char)*prefix) == *uuid) {
        prefix++;
        uuid++;
    }
    return !*prefix;
}

static ddp_result ddp__cuda_by_uuid(const char *prefix, int count, int *device) {
    char devices[300], text[48], name[256];
    unsigned char uuid[16];
    *device = -1;
    for (int i = 0; i < count; i++) {
        DDP__CUDA_TRY("on this machine", "cudaGetDeviceProperties",
                      DDP__CUDA_RUNTIME->device_identity(i, name, uuid));
        ddp__cuda_uuid_text(text, uuid);
        if (!ddp__cuda_uuid_has_prefix(text, prefix)) continue;
        if (*device >= 0)
            return ddp_fail(DDP_ERR_INVALID, "uuid %.48s matches devices %d and %d; use a longer prefix",
                            prefix, *device, i);
        *device = i;
    }
    if (*device >= 0) return DDP_OK;
    ddp__cuda_list_devices(devices, sizeof devices, count, 1);
    return ddp_fail(DDP_ERR_INVALID, "uuid %.48s matches no device of this machine, which has %s", prefix,
                    devices);
}

/* Chooses a device by list or local rank. preset: the device of ddp_launch_desc or of the user's comm;
   -1 = none. If the launcher shows each rank only one GPU (CUDA_VISIBLE_DEVICES), it is number 0 on every
   rank; ddp__cuda_pick detects ranks that share it. */
static ddp_result ddp__cuda_by_number(const ddp_cuda_pick_desc *desc, int local_rank, int preset, int count,
                                      int *device) {
    char devices[300];
    const char *remedy = "";
    int by_local_rank = !desc->devices && preset < 0;
    if (desc->devices && local_rank >= desc->device_count)
        return ddp_fail(DDP_ERR_INVALID,
                        "local rank %d, but device_count=%d; list one device for each rank of this machine",
                        local_rank, desc->device_count);
    if (desc->devices)
        *device = desc->devices[local_rank];
    else if (preset >= 0)
        *device = preset;
    else if (count == 1)
        *device = 0;
    else if (desc->allow_shared && count)
        *device = local_rank % count;
    else
        *device = local_rank;
    if (*device >= 0 && *device < count) return DDP_OK;
    if (by_local_rank) remedy = "; start fewer ranks, or set allow_shared";
    if (count == 0) remedy = "; check nvidia-smi and CUDA_VISIBLE_DEVICES";
    ddp__cuda_list_devices(devices, sizeof devices, count, 0);
    return ddp_fail(DDP_ERR_INVALID, "device %d%s does not exist on this machine, which has %s%s", *device,
                    by_local_rank ? " (the local rank)" : "", devices, remedy);
}

/* Selects the device of this rank. Returns an error if the device is missing. */
static ddp_result ddp__cuda_choose_device(const ddp_cuda_pick_desc *desc, int local_rank, int preset,
                                          ddp__cuda_slot *slot) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    int count = 0;
    char name[256];
    cudaError_t error;
    if (desc->devices && desc->uuid) return ddp_fail(DDP_ERR_INVALID, "set devices or uuid, not both");
    if (!desc->devices != !desc->device_count || desc->device_count < 0)
        return ddp_fail(DDP_ERR_INVALID, "set both devices and device_count, or neither");
    error = cuda->device_count(&count);
    if (error == cudaErrorNoDevice) {
        cuda->clear_error();
        count = 0;
    } else
        DDP_TRY(ddp__cuda_fail(error, "on this machine", "cudaGetDeviceCount"));
    DDP_TRY(desc->uuid ? ddp__cuda_by_uuid(desc->uuid, count, &slot->device)
                       : ddp__cuda_by_number(desc, local_rank, preset, count, &slot->device));
    return ddp__cuda_fail(cuda->device_identity(slot->device, name, slot->uuid), "on this machine",
                          "cudaGetDeviceProperties");
}

/* Chooses the device of this rank: *own. Collective over control; NULL = one rank.
     preset   the device of the user's communicator; -1 = none
     result   this rank's result of earlier checks
     equal    describes what must be equal on all ranks; may be empty
     *shared  1 = two ranks have the same device
   Returns the same result on all ranks. */
static ddp_result ddp__cuda_pick(ddp_group *control, const ddp_cuda_pick_desc *desc, int preset,
                                 ddp_result result, const char *equal, ddp__cuda_slot *own, int *shared) {
    const char *call_name = "ddp_cuda_pick";
    int world_size = control ? ddp_world_size(control) : 1;
    char uuid[48];
    ddp__cuda_slot *slots;
    *shared = 0;
    memset(own, 0, sizeof *own);
    if (gethostname(own->host, sizeof own->host - 1) != 0) snprintf(own->host, sizeof own->host, "unknown");
    own->allow_shared = desc->allow_shared;
    if (preset < 0 && control) preset = ddp_group_device_index(control);
    if (result == DDP_OK)
        result = ddp__cuda_choose_device(desc, control ? ddp_local_rank(control) : 0, preset, own);
    if (result != DDP_OK)
        ddp_fail_in(result, call_name, control, "on host %s: %s", own->host, ddp_last_error());
    if (!control) return result;
    slots = (ddp__cuda_slot *)ddp_host_alloc(control, sizeof *slots * (size_t)world_size);
    if (result == DDP_OK && !slots) result = DDP_ERR_NO_MEMORY;
    result = ddp_agree(control, call_name, result, ddp_hash(DDP_HASH_SEED, equal, strlen(equal)), equal);
    if (result == DDP_OK) result = ddp_all_gather(control, own, slots, sizeof *slots, DDP_U8, NULL);
    for (int i = 0; i < world_size && result == DDP_OK; i++)
        for (int k = i + 1; k < world_size && result == DDP_OK; k++) {
            if (memcmp(slots[i].uuid, slots[k].uuid, 16) != 0) continue;
            *shared = 1;
            if (slots[i].allow_shared && slots[k].allow_shared) continue;
            ddp__cuda_uuid_text(uuid, slots[i].uuid);
            result = ddp_fail_in(DDP_ERR_INVALID, call_name, control,
                                 "ranks %d and %d on host %s both use device %d (%s); list one device for "
                                 "each rank in devices, start fewer ranks, or set allow_shared",
                                 i, k, slots[k].host, slots[k].device, uuid);
        }
    ddp_host_free(control, slots);
    return result;
}

//== arithmetic =========================================================================== >>impl-numbers
/* Functions for one element, compiled for GPU and CPU. The bits are the same, except NaN payloads. */

/* Arithmetic that rounds every operation. Neither compiler may fuse a multiplication with an addition. */
#if defined(__CUDA_ARCH__)
#define DDP__CUDA_DEVICE_OR_HOST(device, host) (device)
#else
#define DDP__CUDA_DEVICE_OR_HOST(device, host) (host)
#endif
static DDP__HD float ddp__cuda_add(float a, float b) {
    return DDP__CUDA_DEVICE_OR_HOST(__fadd_rn(a, b), a + b);
}
static DDP__HD float ddp__cuda_mul(float a, float b) {
    return DDP__CUDA_DEVICE_OR_HOST(__fmul_rn(a, b), a * b);
}
static DDP__HD float ddp__cuda_div(float a, float b) {
    return DDP__CUDA_DEVICE_OR_HOST(__fdiv_rn(a, b), a / b);
}
static DDP__HD float ddp__cuda_sqrt(float a) { return DDP__CUDA_DEVICE_OR_HOST(__fsqrt_rn(a), sqrtf(a)); }
static DDP__HD double ddp__cuda_add(double a, double b) {
    return DDP__CUDA_DEVICE_OR_HOST(__dadd_rn(a, b), a + b);
}
static DDP__HD double ddp__cuda_mul(double a, double b) {
    return DDP__CUDA_DEVICE_OR_HOST(__dmul_rn(a, b), a * b);
}
static DDP__HD double ddp__cuda_div(double a, double b) {
    return DDP__CUDA_DEVICE_OR_HOST(__ddiv_rn(a, b), a / b);
}
static DDP__HD double ddp__cuda_sqrt(double a) { return DDP__CUDA_DEVICE_OR_HOST(__dsqrt_rn(a), sqrt(a)); }

template <class To, class From> static DDP__HD To ddp__cuda_bit_cast(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static DDP__HD uint32_t ddp__cuda_bits(float x) { return ddp__cuda_bit_cast<uint32_t>(x); }
static DDP__HD uint64_t ddp__cuda_bits(double x) { return ddp__cuda_bit_cast<uint64_t>(x); }
static DDP__HD float ddp__cuda_from_bits(uint32_t bits) { return ddp__cuda_bit_cast<float>(bits); }
static DDP__HD double ddp__cuda_from_bits(uint64_t bits) { return ddp__cuda_bit_cast<double>(bits); }
static DDP__HD int ddp__cuda_finite(float x) { return (ddp__cuda_bits(x) & 0x7f800000u) != 0x7f800000u; }
static DDP__HD int ddp__cuda_finite(double x) { return (ddp__cuda_bits(x) >> 52 & 0x7ff) != 0x7ff; }

/* Conversions of 16-bit floats, rounding to nearest even. The GPU uses one instruction. Only NaN payloads
   differ from the code for the CPU. */
static DDP__HD float ddp__cuda_from_bf16(uint16_t half) { return ddp__cuda_from_bits((uint32_t)half << 16); }

static DDP__HD uint16_t ddp__cuda_to_bf16(float x) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    uint32_t bits = ddp__cuda_bits(x);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

static DDP__HD float ddp__cuda_from_f16(uint16_t half) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(half));
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude < 0x400)
        return ddp__cuda_from_bits(sign | ddp__cuda_bits((float)magnitude * (1.0f / 16777216.0f)));
    if (magnitude >= 0x7c00)
        return ddp__cuda_from_bits(sign | 0x7f800000u | (magnitude & 0x3ff) << 13
                                   | (magnitude > 0x7c00 ? 0x400000u : 0));
    return ddp__cuda_from_bits(sign | ((magnitude << 13) + (112u << 23)));
#endif
}

/* Below 2^-14 the addition of 0.5, with a last place of 2^-24, rounds to a subnormal. */
static DDP__HD uint16_t ddp__cuda_to_f16(float x) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(x));
#else
    uint32_t bits = ddp__cuda_bits(x), magnitude = bits & 0x7fffffff, half;
    if (magnitude > 0x7f800000u)
        half = 0x7e00 | (magnitude >> 13 & 0x3ff);
    else if (magnitude >= 143u << 23)
        half = 0x7c00;
    else if (magnitude < 113u << 23)
        half = ddp__cuda_bits(ddp__cuda_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    else
        half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
#endif
}

/* Rounds to odd: an inexact result gets an odd last place. A second rounding to 16 bits then gives the same
   result as a single one. */
static DDP__HD float ddp__cuda_round_odd(double x) {
    float nearest = (float)x;
    double back = (double)nearest;
    uint32_t bits = ddp__cuda_bits(nearest);
    if (back == x || x != x) return nearest;
    if ((back < 0 ? -back : back) > (x < 0 ? -x : x)) bits--;
    return ddp__cuda_from_bits(bits | 1);
}

/* Properties of a dtype: `store` is the type in memory, `math` the type of the arithmetic, `wrap` the
   unsigned type in which integers wrap. load and save convert between store and math. The line for DDP_BF16
   becomes

       template <> struct ddp__cuda_type<DDP_BF16> {
           typedef uint16_t store;
           typedef float math;
           typedef float wrap;
           static float load(uint16_t x) { return ddp__cuda_from_bf16(x); }
           static uint16_t save(float x) { return ddp__cuda_to_bf16(x); }
       };  */
template <ddp_dtype D> struct ddp__cuda_type;
#define DDP__CUDA_TYPE(dtype, store_type, math_type, wrap_type, to_math, to_store) \
    template <> struct ddp__cuda_type<dtype> {                                     \
        typedef store_type store;                                                  \
        typedef math_type math;                                                    \
        typedef wrap_type wrap;                                                    \
        static DDP__HD math load(store x) { return to_math(x); }                   \
        static DDP__HD store save(math x) { return to_store(x); }                  \
    };
DDP__CUDA_TYPE(DDP_F32, float, float, float, float, float)
DDP__CUDA_TYPE(DDP_F64, double, double, double, double, double)
DDP__CUDA_TYPE(DDP_F16, uint16_t, float, float, ddp__cuda_from_f16, ddp__cuda_to_f16)
DDP__CUDA_TYPE(DDP_BF16, uint16_t, float, float, ddp__cuda_from_bf16, ddp__cuda_to_bf16)
DDP__CUDA_TYPE(DDP_I8, int8_t, int8_t, uint8_t, int8_t, int8_t)
DDP__CUDA_TYPE(DDP_U8, uint8_t, uint8_t, uint8_t, uint8_t, uint8_t)
DDP__CUDA_TYPE(DDP_I32, int32_t, int32_t, uint32_t, int32_t, int32_t)
DDP__CUDA_TYPE(DDP_I64, int64_t, int64_t, uint64_t, int64_t, int64_t)
DDP__CUDA_TYPE(DDP_U64, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t)
#undef DDP__CUDA_TYPE

/* Calls f(C) with a runtime value as a compile-time constant, decltype(C)::value. value: one of the list; any
   other value counts as the last one. */
template <auto FIRST, auto... MORE, class T, class F>
static ddp_result ddp__cuda_dispatch(T value, const F &f) {
    if constexpr (sizeof...(MORE) > 0) {
        if (value != FIRST) return ddp__cuda_dispatch<MORE...>(value, f);
    }
    return f(std::integral_constant<T, FIRST>());
}
#define DDP__CUDA_FLOATS_32 DDP_F32, DDP_F16, DDP_BF16 /* dtypes with f32 arithmetic */
#define DDP__CUDA_FLOATS DDP_F64, DDP__CUDA_FLOATS_32

/* Rounds x, a value in f32 or f64, once to dtype D. */
template <ddp_dtype D, class M> static DDP__HD typename ddp__cuda_type<D>::store ddp__cuda_round(M x) {
    typedef typename ddp__cuda_type<D>::math math;
    if constexpr (sizeof(M) == 8 && (D == DDP_F16 || D == DDP_BF16))
        return ddp__cuda_type<D>::save(ddp__cuda_round_odd(x));
    else
        return ddp__cuda_type<D>::save((math)x);
}

/* GELU in its tanh form is x times the gate sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). */
template <class T> static DDP__HD T ddp__cuda_sigmoid(T x) { return 1 / (1 + exp(-x)); }
template <class T> static DDP__HD T ddp__cuda_gelu_gate(T x) {
    return ddp__cuda_sigmoid((T)1.5957691216057307 * (x + (T)0.044715 * x * x * x));
}
/* Returns the derivative of GELU at x. s: the gate there. */
template <class T> static DDP__HD T ddp__cuda_gelu_slope(T x, T s) {
    return s + x * s * (1 - s) * (T)1.5957691216057307 * (1 + (T)(3 * 0.044715) * x * x);
}

/* Returns the minimum or maximum of floats. They follow IEEE 754-2019: NaN if either is NaN, and
   -0 is below +0. */
template <int GREATEST, class T> static DDP__HD T ddp__cuda_min_max(T a, T b) {
    auto x = ddp__cuda_bits(a), y = ddp__cuda_bits(b);
    auto other = GREATEST ? x & y : x | y; /* equal values with different bits are +0 and -0 */
    int is_a = GREATEST ? a > b : a < b;
    if (a != b) other = y;
    return ddp__cuda_from_bits(a != a || is_a ? x : other);
}

/* Combines two values of a reduction. Integers wrap. */
template <ddp_op OP, class Wrap, class T> static DDP__HD T ddp__cuda_combine(T a, T b) {
    if constexpr (std::is_floating_point<T>::value) {
        if (OP == DDP_OP_MIN) return ddp__cuda_min_max<0>(a, b);
        if (OP == DDP_OP_MAX) return ddp__cuda_min_max<1>(a, b);
        return OP == DDP_OP_PROD ? ddp__cuda_mul(a, b) : ddp__cuda_add(a, b);
    } else {
        if (OP == DDP_OP_MIN) return a < b ? a : b;
        if (OP == DDP_OP_MAX) return a > b ? a : b;
        return OP == DDP_OP_PROD ? (T)(Wrap)((Wrap)a * (Wrap)b) : (T)(Wrap)((Wrap)a + (Wrap)b);
    }
}

/* The divisor of an average, prepared on the CPU. A power of two is replaced by its reciprocal, which is
   exact: the product has the same bits and is faster. */
typedef struct ddp__cuda_divisor {
    uint64_t n; /* 1 = no division */
    int power_of_two;
    float f32; /* reciprocal of a power of two, otherwise n */
    double f64;
} ddp__cuda_divisor;

static ddp__cuda_divisor ddp__cuda_divisor_of(uint64_t n) {
    ddp__cuda_divisor d;
    d.n = n ? n : 1;
    d.power_of_two = !(d.n & (d.n - 1));
    d.f32 = d.power_of_two ? 1.0f / (float)d.n : (float)d.n;
    d.f64 = d.power_of_two ? 1.0 / (double)d.n : (double)d.n;
    return d;
}

static DDP__HD float ddp__cuda_divide(float x, const ddp__cuda_divisor &d) {
    return d.power_of_two ? ddp__cuda_mul(x, d.f32) : ddp__cuda_div(x, d.f32);
}
static DDP__HD double ddp__cuda_divide(double x, const ddp__cuda_divisor &d) {
    return d.power_of_two ? ddp__cuda_mul(x, d.f64) : ddp__cuda_div(x, d.f64);
}

/* Divides integers, truncating towards zero. The divisor may be too large for the signed type. */
template <class T> static DDP__HD T ddp__cuda_divide(T x, const ddp__cuda_divisor &d) {
    int negative = x < (T)1 && x != (T)0 && (T)-1 < (T)1;
    uint64_t magnitude = negative ? UINT64_C(0) - (uint64_t)(int64_t)x : (uint64_t)x;
    uint64_t quotient = (magnitude | d.n) >> 32 ? magnitude / d.n : (uint32_t)magnitude / (uint32_t)d.n;
    return (T)(negative ? UINT64_C(0) - quotient : quotient);
}

/* The mix function of SplitMix64 (Steele, Lea and Flood 2014). Applied to a counter and a key per step, it
   gives 16 random bits per element. */
static DDP__HD uint64_t ddp__cuda_splitmix64(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Stochastic rounding: rounds up with probability (dropped bits) / 2^16, so that the expected value is x. */
static DDP__HD uint16_t ddp__cuda_to_bf16_random(float x, uint64_t key, uint64_t index) {
    uint32_t bits = ddp__cuda_bits(x);
    uint32_t random = (uint32_t)(ddp__cuda_splitmix64(key + index * UINT64_C(0x9e3779b97f4a7c15)) >> 48);
    return ddp__cuda_finite(x) ? (uint16_t)((bits + random) >> 16) : ddp__cuda_to_bf16(x);
}

//== loads and stores ==================================================================== >>impl-elements
/* Loads and stores of up to 16 bytes, and the distribution of elements over threads. Every element kernel
   below uses them. */

/* Returns a value of the largest word of 16, 8, 4 or 1 bytes that divides BYTES. */
template <int BYTES> static DDP__HD auto ddp__cuda_word_of() {
    if constexpr (BYTES % 16 == 0)
        return uint4{};
    else if constexpr (BYTES % 8 == 0)
        return uint2{};
    else if constexpr (BYTES % 4 == 0)
        return uint32_t{};
    else
        return (unsigned char)0;
}

/* N elements in registers, loaded and stored as words of up to 16 bytes. */
template <int N, class T> union ddp__cuda_pack {
    enum { BYTES = N * sizeof(T) };
    typedef decltype(ddp__cuda_word_of<BYTES>()) word;
    enum { WORDS = BYTES / sizeof(word) };
    T at[N];
    word words[WORDS];
    unsigned char bytes[BYTES];
};

/* Loads N elements from index `at`. N > 1: the address is aligned to 16 bytes, or to the size of N elements
   if that is smaller. N = 1: any address. */
template <int N, class T> static DDP__HD void ddp__cuda_load(T *out, const void *base, size_t at) {
    const unsigned char *from = (const unsigned char *)base + at * sizeof(T);
#if defined(__CUDA_ARCH__)
    typedef ddp__cuda_pack<N, T> pack;
    pack in;
    if (N == 1 && (uintptr_t)from % sizeof(T)) {
        for (int i = 0; i < (int)pack::BYTES; i++) in.bytes[i] = from[i];
    } else {
        DDP__UNROLL
        for (int i = 0; i < (int)pack::WORDS; i++) in.words[i] = ((const typename pack::word *)from)[i];
    }
    DDP__UNROLL
    for (int i = 0; i < N; i++) out[i] = in.at[i];
#else
    DDP__CUDA_RECORD_ACCESS(N, from, N * sizeof(T));
    memcpy(out, from, N * sizeof(T));
#endif
}

/* Stores N elements from index `at`, with the same rules. */
template <int N, class T> static DDP__HD void ddp__cuda_store(const T *in, void *base, size_t at) {
    unsigned char *to = (unsigned char *)base + at * sizeof(T);
#if defined(__CUDA_ARCH__)
    typedef ddp__cuda_pack<N, T> pack;
    pack out;
    DDP__UNROLL
    for (int i = 0; i < N; i++) out.at[i] = in[i];
    if (N == 1 && (uintptr_t)to % sizeof(T)) {
        for (int i = 0; i < (int)pack::BYTES; i++) to[i] = out.bytes[i];
    } else {
        DDP__UNROLL
        for (int i = 0; i < (int)pack::WORDS; i++) ((typename pack::word *)to)[i] = out.words[i];
    }
#else
    DDP__CUDA_RECORD_ACCESS(N, to, N * sizeof(T));
    memcpy(to, in, N * sizeof(T));
#endif
}

/* Division of `count` elements: `head` single elements, `vectors` groups of WIDTH elements that are aligned
   in every array, and the remaining single elements:

       head      vectors                     rest
       . .       [. . . .] [. . . .] ...     . . .  */
typedef struct ddp__cuda_vectors {
    size_t head, vectors, count;
} ddp__cuda_vectors;

/* Returns `mask` without the heads after which `array` is not aligned. Bit h of mask: after a head of h
   elements, groups of `width` elements are aligned in every array checked until now. */
static DDP__HD uint32_t ddp__cuda_aligned_heads(uint32_t mask, const void *array, int size, int width) {
    uintptr_t align = (uintptr_t)(width * size < 16 ? width * size : 16);
    for (int h = 0; h < width; h++)
        if (((uintptr_t)array + (uintptr_t)(h * size)) % align) mask &= ~(1u << h);
    return mask;
}

static DDP__HD ddp__cuda_vectors ddp__cuda_vectors_of(uint32_t mask, size_t count, int width) {
    ddp__cuda_vectors split = {0, 0, count};
    for (; split.head < (size_t)width && !(mask >> split.head & 1); split.head++) {
    }
    if (split.head == (size_t)width || split.head > count) split.head = count;
    split.vectors = (count - split.head) / (size_t)width;
    return split;
}

/* Processes the share of thread `first` of `stride` threads. */
template <class F>
static DDP__HD void ddp__cuda_run_elements(const F &f, const ddp__cuda_vectors &split, size_t first,
                                           size_t stride) {
    size_t rest = split.count - split.vectors * F::WIDTH;
    for (size_t i = first; i < split.vectors; i += stride)
        f.template run<F::WIDTH>(split.head + i * F::WIDTH);
    for (size_t i = first; i < rest; i += stride)
        f.template run<1>(i < split.head ? i : i + split.vectors * F::WIDTH);
}

//== kernel launches ======================================================================= >>impl-launch
/* One kernel for all functors. It distributes work in three ways: element by element
   (ddp__cuda_launch_elements), chunks of tensors (ddp__cuda_launch_chunks), and rows with a team of threads
   each (ddp__cuda_launch_rows). */

#define DDP__CUDA_HOST_THREADS 7 /* threads that tests on the CPU simulate */

/* Work of a launch: device() is the share of one thread; host() is all of it, for tests on the CPU. */
template <class Work> static __global__ void ddp__cuda_kernel(const __grid_constant__ Work work) {
    work.device();
}
template <class Work> static void ddp__cuda_run_on_host(void *copy) { ((Work *)copy)->host(); }

template <class Work>
static ddp_result ddp__cuda_launch(const Work &work, size_t blocks, cudaStream_t stream,
                                   const char *function) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    dim3 grid((unsigned)(blocks < DDP__CUDA_BLOCKS ? blocks : DDP__CUDA_BLOCKS)), block(DDP__CUDA_THREADS);
    void *arguments[1] = {(void *)&work};
    cudaError_t error;
    if (blocks == 0) return DDP_OK;
    if (cuda->on_host)
        error = cuda->host_work(ddp__cuda_run_on_host<Work>, &work, sizeof work, stream);
    else
        error = cuda->launch(DDP__CUDA_KERNEL(ddp__cuda_kernel<Work>), grid, block, arguments, 0, stream);
    return ddp__cuda_fail(error, function, cuda->on_host ? "cudaLaunchHostFunc" : "cudaLaunchKernel");
}

/* Work on arrays of one length, by element. F has WIDTH, and run<N>(at) for N elements from index `at` on. */
template <class F> struct ddp__cuda_elements_work {
    F f;
    ddp__cuda_vectors split;
    __device__ __forceinline__ void device() const {
        ddp__cuda_run_elements(f, split, (size_t)blockIdx.x * blockDim.x + threadIdx.x,
                               (size_t)gridDim.x * blockDim.x);
    }
    __forceinline__ void host() const {
        for (size_t t = 0; t < DDP__CUDA_HOST_THREADS; t++)
            ddp__cuda_run_elements(f, split, t, DDP__CUDA_HOST_THREADS);
    }
};

/* Launches f on count elements. mask: the result of ddp__cuda_aligned_heads for all arrays. */
template <class F>
static ddp_result ddp__cuda_launch_elements(const F &f, uint32_t mask, size_t count, cudaStream_t stream,
                                            const char *function) {
    const ddp__cuda_vectors split = ddp__cuda_vectors_of(mask, count, F::WIDTH);
    size_t rest = split.count - split.vectors * F::WIDTH;
    size_t longest = split.vectors > rest ? split.vectors : rest;
    const ddp__cuda_elements_work<F> work = {f, split};
    return ddp__cuda_launch(work, (longest + DDP__CUDA_THREADS - 1) / DDP__CUDA_THREADS, stream, function);
}

/* Returns the tensor of chunk `number`, by bisection: the last one with first[r] at most number. */
template <class T> static DDP__HD int ddp__cuda_find(const T *first, int count, size_t number) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (first[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Work on chunks of a list of tensors, one block per chunk. F has chunk(number, thread, threads). */
template <class F> struct ddp__cuda_chunks_work {
    F f;
    size_t chunks;
    __device__ __forceinline__ void device() const {
        for (size_t i = blockIdx.x; i < chunks; i += gridDim.x) f.chunk(i, threadIdx.x, blockDim.x);
    }
    __forceinline__ void host() const {
        for (size_t i = 0; i < chunks; i++)
            for (size_t t = 0; t < DDP__CUDA_HOST_THREADS; t++) f.chunk(i, t, DDP__CUDA_HOST_THREADS);
    }
};

template <class F>
static ddp_result ddp__cuda_launch_chunks(const F &f, size_t chunks, cudaStream_t stream,
                                          const char *function) {
    const ddp__cuda_chunks_work<F> work = {f, chunks};
    return ddp__cuda_launch(work, chunks, stream, function);
}

/* Work on a list of tensors. Tensor r has chunks first[r] to first[r + 1] - 1. F has
     item, SIZE                              a tensor in the kernel's arguments, and the most per launch
     part(item, at, count, thread, threads)  the share of a thread in elements [at, at + count) of a tensor */
template <class F> struct ddp__cuda_list {
    F f;
    int count;
    uint32_t first[F::SIZE + 1];
    typename F::item item[F::SIZE];
    size_t length[F::SIZE];
    DDP__HD void chunk(size_t number, size_t thread, size_t threads) const {
        int r = ddp__cuda_find(first, count, number);
        size_t at = (number - first[r]) * DDP__CUDA_CHUNK;
        size_t n = length[r] - at < DDP__CUDA_CHUNK ? length[r] - at : DDP__CUDA_CHUNK;
        f.part(item[r], at, n, thread, threads);
    }
};

/* Launches the tensors that the list holds, and empties it. */
template <class F>
static ddp_result ddp__cuda_list_launch(ddp__cuda_list<F> *list, cudaStream_t stream, const char *function) {
    static_assert(sizeof(ddp__cuda_chunks_work<ddp__cuda_list<F>>) <= 4096, "arguments of a kernel");
    size_t chunks = list->first[list->count];
    const ddp_result result = ddp__cuda_launch_chunks(*list, chunks, stream, function);
    list->count = 0;
    return result;
}

/* Appends a tensor of `length` elements. Launches the list first if it is full. */
template <class F>
static ddp_result ddp__cuda_list_add(ddp__cuda_list<F> *list, const typename F::item &item, size_t length,
                                     cudaStream_t stream, const char *function) {
    if (length == 0) return DDP_OK;
    if (list->count == F::SIZE) DDP_TRY(ddp__cuda_list_launch(list, stream, function));
    int r = list->count++;
    size_t chunks = length / DDP__CUDA_CHUNK + (length % DDP__CUDA_CHUNK != 0);
    list->item[r] = item;
    list->length[r] = length;
    list->first[r + 1] = list->first[r] + (uint32_t)chunks;
    return DDP_OK;
}

/* Independent sums in one thread. */
template <int N> struct ddp__cuda_sums { double at[N]; };

/* Returns the value of another lane of the team. All lanes of the warp must call it. */
template <class T>
static __device__ __forceinline__ T ddp__cuda_from_lane(T value, int lane, int team, unsigned full_mask) {
    return __shfl_sync(full_mask, value, lane, team);
}
template <int N>
static __device__ __forceinline__ ddp__cuda_sums<N> ddp__cuda_from_lane(ddp__cuda_sums<N> value, int lane,
                                                                        int team, unsigned full_mask) {
    DDP__UNROLL
    for (int i = 0; i < N; i++) value.at[i] = __shfl_sync(full_mask, value.at[i], lane, team);
    return value;
}

/* Work on rows, with a team of F::TEAM threads of a warp per row. F has a type `value` and
     partial(row, lane, cells)        returns the value of a lane, 0 to TEAM - 1, for its part of the row
     join(a, b)                       combines lanes e and e + half, for half = TEAM / 2, ..., 2, 1; then lane
                                      0 has the value of the row
     finish(row, value, lane, cells)  is called by every lane with the value of the row
     CELLS                            number of int64 sums of a block in shared memory
     owner(row)                       the sum that the cells of a row belong to, the same for all rows that a
                                      block processes at a time
     flush(cells, owner)              adds the cells to that sum; called by one thread of the block, at the
                                      end and before the next owner */
template <class F> struct ddp__cuda_rows_work {
    F f;
    size_t rows;
    __device__ __forceinline__ void device() const {
        __shared__ int64_t cells[F::CELLS];
        const unsigned full_mask = 0xffffffffu, teams = DDP__CUDA_THREADS / F::TEAM;
        int lane = threadIdx.x % F::TEAM;
        size_t owner = 0;
        for (int i = threadIdx.x; i < F::CELLS; i += blockDim.x) cells[i] = 0;
        __syncthreads();
        /* All threads stay in the loop while a team of the block has a row, for shuffles and barriers. */
        for (size_t first = (size_t)blockIdx.x * teams; first < rows; first += (size_t)gridDim.x * teams) {
            size_t row = first + threadIdx.x / F::TEAM, next = f.owner(first);
            typename F::value value = {};
            if (next != owner) {
                __syncthreads();
                if (threadIdx.x == 0) f.flush(cells, owner);
                __syncthreads();
                for (int i = threadIdx.x; i < F::CELLS; i += blockDim.x) cells[i] = 0;
                __syncthreads();
                owner = next;
            }
            if (row < rows) value = f.partial(row, lane, cells);
            DDP__UNROLL
            for (int half = F::TEAM / 2; half; half /= 2)
                value = F::join(value, ddp__cuda_from_lane(value, lane + half, F::TEAM, full_mask));
            value = ddp__cuda_from_lane(value, 0, F::TEAM, full_mask);
            if (row < rows) f.finish(row, value, lane, cells);
        }
        __syncthreads();
        if (threadIdx.x == 0) f.flush(cells, owner);
    }
    __forceinline__ void host() const {
        int64_t cells[F::CELLS] = {0};
        size_t owner = 0;
        for (size_t row = 0; row < rows; row++) {
            typename F::value value[F::TEAM];
            size_t next = f.owner(row);
            if (next != owner) {
                f.flush(cells, owner);
                memset(cells, 0, sizeof cells);
                owner = next;
            }
            for (int lane = 0; lane < F::TEAM; lane++) value[lane] = f.partial(row, lane, cells);
            for (int half = F::TEAM / 2; half; half /= 2)
                for (int lane = 0; lane < half; lane++)
                    value[lane] = F::join(value[lane], value[lane + half]);
            for (int lane = 0; lane < F::TEAM; lane++) f.finish(row, value[0], lane, cells);
        }
        f.flush(cells, owner);
    }
};

template <class F>
static ddp_result ddp__cuda_launch_rows(const F &f, size_t rows, cudaStream_t stream, const char *function) {
    const ddp__cuda_rows_work<F> work = {f, rows};
    return ddp__cuda_launch(
        work, rows / (DDP__CUDA_THREADS / F::TEAM) + (rows % (DDP__CUDA_THREADS / F::TEAM) != 0), stream,
        function);
}

/* Adds to a cell in shared or device memory. Integer sums do not depend on the order of additions. */
static DDP__HD void ddp__cuda_atomic_add(int64_t *cell, int64_t value) {
#if defined(__CUDA_ARCH__)
    atomicAdd((unsigned long long *)cell, (unsigned long long)value);
#else
    *cell += value;
#endif
}

//== tree reduction ========================================================================== >>impl-tree
/* Reduces arrays in the order of DDP_ORDER_TREE, with the bits of the CPU backends. Used by
   ddp_cuda_reduce_tree, the NCCL backend, and add and divide of the device. */

/* The tree over sources. Four sources form a subtree. A binary counter joins subtrees of equal size as they
   appear. At the end the remaining subtrees are joined, from the smallest up:

       W=11:  [0..7] [8..10]      W=28:  [0..15] [16..23] [24..27]

   level[k] is a subtree of 4 * 2^k sources. All indices are compile-time constants, so levels stay in
   registers. With few levels there are registers for 16 bytes per thread. */
template <ddp_dtype D, ddp_op OP, int LEVELS> struct ddp__cuda_tree {
    typedef ddp__cuda_type<D> type;
    typedef typename type::store store;
    typedef typename type::math math;
    typedef typename type::wrap wrap;
    enum { WIDTH = LEVELS > 5 ? 1 : 16 / sizeof(store) };
    int src_count, dst_count, own;
    ddp_dtype dst_dtype;
    size_t stride_bytes;
    ddp__cuda_divisor divisor;
    const void *src[DDP_MAX_LOCAL_RANKS];
    void *dst[DDP_MAX_LOCAL_RANKS];

    template <int N> DDP__HD void join(math *out, const math *a, const math *b) const {
        DDP__UNROLL
        for (int i = 0; i < N; i++) out[i] = ddp__cuda_combine<OP, wrap>(a[i], b[i]);
    }
    template <int N> DDP__HD void load(math *out, int source, size_t at) const {
        store in[N];
        const void *base = src[0];
        if (!stride_bytes)
            base = src[source];
        else if (source == own)
            base = src[1];
        else
            base = (const unsigned char *)base + (size_t)source * stride_bytes;
        ddp__cuda_load<N>(in, base, at);
        DDP__UNROLL
        for (int i = 0; i < N; i++) out[i] = type::load(in[i]);
    }
    /* Reduces n sources (1 to 4) from `base` on: (0 + 1) + (2 + 3). */
    template <int N> DDP__HD void leaf(math *out, int base, int n, size_t at) const {
        math a[N], b[N], c[N];
        load<N>(out, base, at);
        if (n > 1) load<N>(a, base + 1, at);
        if (n > 2) load<N>(b, base + 2, at);
        if (n > 3) load<N>(c, base + 3, at);
        if (n > 1) join<N>(out, out, a);
        if (n > 3) join<N>(b, b, c);
        if (n > 2) join<N>(out, out, b);
    }
    template <int N> DDP__HD void run(size_t at) const {
        math level[LEVELS][N] = {}, value[N] = {};
        int groups = src_count / 4, rest = src_count % 4, has_value = rest;
        for (int g = 0; g < groups; g++) {
            int carry = 1;
            leaf<N>(value, 4 * g, 4, at);
            DDP__UNROLL
            for (int k = 0; k < LEVELS; k++) {
                if (!carry) continue;
                if (g >> k & 1)
                    join<N>(value, level[k], value);
                else {
                    carry = 0;
                    copy<N>(level[k], value);
                }
            }
        }
        if (rest) leaf<N>(value, 4 * groups, rest, at);
        DDP__UNROLL
        for (int k = 0; k < LEVELS; k++) {
            if (!(groups >> k & 1)) continue;
            if (has_value)
                join<N>(value, level[k], value);
            else
                copy<N>(value, level[k]);
            has_value = 1;
        }
        finish<N>(value, at);
    }
    template <int N> DDP__HD void copy(math *out, const math *in) const {
        DDP__UNROLL
        for (int i = 0; i < N; i++) out[i] = in[i];
    }
    template <int N> DDP__HD void finish(math *value, size_t at) const {
        DDP__UNROLL
        for (int i = 0; i < N; i++)
            if (divisor.n > 1) value[i] = ddp__cuda_divide(value[i], divisor);
        if (dst_dtype == D) return save<N, D>(value, at);
        if constexpr (D == DDP_F16 || D == DDP_BF16) save<N, DDP_F32>(value, at);
        if constexpr (D == DDP_F32) {
            if (dst_dtype == DDP_F16)
                save<N, DDP_F16>(value, at);
            else
                save<N, DDP_BF16>(value, at);
        }
    }
    template <int N, ddp_dtype TO> DDP__HD void save(const math *value, size_t at) const {
        typename ddp__cuda_type<TO>::store out[N];
        DDP__UNROLL
        for (int i = 0; i < N; i++) out[i] = ddp__cuda_type<TO>::save(value[i]);
        for (int k = 0; k < dst_count; k++) ddp__cuda_store<N>(out, dst[k], at);
    }
};

typedef struct ddp__cuda_tree_call {
    void *const *dst;
    int dst_count;
    const void *const *src;
    int src_count;
    size_t count;
    ddp_op op;
    uint64_t divisor; /* 1 = none */
    cudaStream_t stream;
    const char *function;
    /* Not 0: source r starts at src[0] + r * stride_bytes, except source `own`, which is src[1]. */
    size_t stride_bytes;
    int own;
    /* The dtype of the sources. 16-bit sources may also have F32 results, and F32 sources 16-bit results: the
       partial sums of 16-bit floats are F32. */
    ddp_dtype dst_dtype;
} ddp__cuda_tree_call;

template <ddp_dtype D, ddp_op OP, int LEVELS>
static ddp_result ddp__cuda_tree_launch(const ddp__cuda_tree_call *call) {
    ddp__cuda_tree<D, OP, LEVELS> f = {
        call->src_count,
        call->dst_count,
        call->own,
        call->dst_dtype,
        call->stride_bytes,
        ddp__cuda_divisor_of(call->divisor),
        {},
        {},
    };
    const int size = (int)sizeof(typename ddp__cuda_type<D>::store), width = f.WIDTH;
    uint32_t mask = (1u << width) - 1;
    for (int k = 0; k < (call->stride_bytes ? 2 : call->src_count); k++) {
        f.src[k] = call->src[k];
        mask = ddp__cuda_aligned_heads(mask, call->src[k], size, width);
    }
    for (int k = 0; k < call->dst_count; k++) {
        f.dst[k] = call->dst[k];
        mask = ddp__cuda_aligned_heads(mask, call->dst[k], (int)ddp_dtype_size(f.dst_dtype), width);
    }
    return ddp__cuda_launch_elements(f, mask, call->count, call->stream, call->function);
}

static ddp_result ddp__cuda_tree_reduce(const ddp__cuda_tree_call *call, ddp_dtype dtype) {
    if (ddp_dtype_size(dtype) == 0)
        return ddp_fail(DDP_ERR_INVALID, "%s: dtype=%d is invalid; use DDP_F32 to DDP_U64", call->function,
                        (int)dtype);
    return ddp__cuda_dispatch<DDP__CUDA_FLOATS, DDP_I8, DDP_U8, DDP_I32, DDP_I64, DDP_U64>(
        dtype, [&](auto D) {
            return ddp__cuda_dispatch<DDP_OP_MIN, DDP_OP_MAX, DDP_OP_PROD, DDP_OP_SUM>(
                call->op, [&](auto OP) {
                    if (call->src_count > DDP_MAX_LOCAL_RANKS)
                        return ddp__cuda_tree_launch<decltype(D)::value, decltype(OP)::value, 11>(call);
                    return ddp__cuda_tree_launch<decltype(D)::value, decltype(OP)::value, 5>(call);
                });
        });
}

//== lists of tensors ======================================================================= >>impl-multi
/* Copies, casts and scaling of lists of ranges: copy_many, cast and scale of the device, ddp_cuda_flatten and
   ddp_cuda_unflatten. */

/* Computes dst = src * factor, rounded once. dst may be src. */
template <ddp_dtype D, ddp_dtype S, class M> struct ddp__cuda_convert {
    typedef typename ddp__cuda_type<D>::store dst_type;
    typedef typename ddp__cuda_type<S>::store src_type;
    enum { WIDTH = D == S && sizeof(dst_type) == 2 ? 8 : 4 };
    void *dst;
    const void *src;
    float factor;
    const float *factor_at; /* device memory with the factor; NULL = use `factor` */
    template <int N> DDP__HD void run(size_t at) const {
        src_type in[N];
        dst_type out[N];
        float by = factor;
        if (factor_at) ddp__cuda_load<1>(&by, factor_at, 0);
        ddp__cuda_load<N>(in, src, at);
        DDP__UNROLL
        for (int i = 0; i < N; i++) {
            M x = (M)ddp__cuda_type<S>::load(in[i]);
            out[i] = ddp__cuda_round<D>(by == 1.0f ? x : ddp__cuda_mul(x, (M)by));
        }
        ddp__cuda_store<N>(out, dst, at);
    }
};

/* Copies the bits of elements. */
template <class T> struct ddp__cuda_move {
    typedef T dst_type, src_type;
    enum { WIDTH = 16 / sizeof(T) };
    void *dst;
    const void *src;
    template <int N> DDP__HD void run(size_t at) const {
        T value[N];
        ddp__cuda_load<N>(value, src, at);
        ddp__cuda_store<N>(value, dst, at);
    }
};

/* One launch for up to 64 ranges, each processed by a copy of f: a ddp__cuda_convert or ddp__cuda_move. Range
   r has chunks first[r] to first[r + 1] - 1. */
template <class F> struct ddp__cuda_ranges {
    F f;
    int range_count;
    ddp_copy_range range[DDP__CUDA_LAUNCH_RANGES];
    size_t first[DDP__CUDA_LAUNCH_RANGES + 1];

    DDP__HD void chunk(size_t number, size_t thread, size_t threads) const {
        typedef typename F::dst_type dst_type;
        typedef typename F::src_type src_type;
        int tensor = ddp__cuda_find(first, range_count, number);
        const ddp_copy_range &r = range[tensor];
        size_t at = (number - first[tensor]) * DDP__CUDA_CHUNK;
        size_t n = r.count - at < DDP__CUDA_CHUNK ? r.count - at : DDP__CUDA_CHUNK;
        F own = f;
        own.dst = (dst_type *)r.dst + at;
        own.src = (const src_type *)r.src + at;
        uint32_t mask = ddp__cuda_aligned_heads((1u << F::WIDTH) - 1, own.dst, sizeof(dst_type), F::WIDTH);
        mask = ddp__cuda_aligned_heads(mask, own.src, sizeof(src_type), F::WIDTH);
        ddp__cuda_run_elements(own, ddp__cuda_vectors_of(mask, n, F::WIDTH), thread, threads);
    }
};

/* A list of copies: dst = src * factor. Equal dtypes with factor 1 keep their bits. Other ranges are
   floats. */
typedef struct ddp__cuda_ranges_call {
    const ddp_copy_range *ranges;
    int range_count;
    ddp_dtype dst_dtype, src_dtype;
    float factor;
    cudaStream_t stream;
    const char *function;
} ddp__cuda_ranges_call;

template <class F> static ddp_result ddp__cuda_launch_ranges(const ddp__cuda_ranges_call *call, F function) {
    ddp__cuda_ranges<F> f = {function, 0, {}, {0}};
    for (int done = 0; done < call->range_count; done += f.range_count) {
        f.range_count = call->range_count - done;
        if (f.range_count > DDP__CUDA_LAUNCH_RANGES) f.range_count = DDP__CUDA_LAUNCH_RANGES;
        for (int i = 0; i < f.range_count; i++) {
            f.range[i] = call->ranges[done + i];
            f.first[i + 1] = f.first[i] + f.range[i].count / DDP__CUDA_CHUNK
                             + (f.range[i].count % DDP__CUDA_CHUNK != 0);
        }
        DDP_TRY(ddp__cuda_launch_chunks(f, f.first[f.range_count], call->stream, call->function));
    }
    return DDP_OK;
}

static ddp_result ddp__cuda_copy_ranges(const ddp__cuda_ranges_call *call) {
    ddp_dtype dst = call->dst_dtype, src = call->src_dtype;
    if (dst == src && call->factor == 1.0f) {
        size_t size = ddp_dtype_size(dst);
        if (size == 1) return ddp__cuda_launch_ranges(call, ddp__cuda_move<uint8_t>{});
        if (size == 2) return ddp__cuda_launch_ranges(call, ddp__cuda_move<uint16_t>{});
        if (size == 4) return ddp__cuda_launch_ranges(call, ddp__cuda_move<uint32_t>{});
        return ddp__cuda_launch_ranges(call, ddp__cuda_move<uint64_t>{});
    }
    if (!ddp_is_float(dst) || !ddp_is_float(src))
        return ddp_fail(DDP_ERR_INVALID, "%s: cannot convert %s to %s; use floating-point dtypes",
                        call->function, ddp_dtype_name(src), ddp_dtype_name(dst));
    return ddp__cuda_dispatch<DDP__CUDA_FLOATS>(dst, [&](auto D) {
        return ddp__cuda_dispatch<DDP__CUDA_FLOATS>(src, [&](auto S) {
            typedef typename ddp__cuda_type<decltype(D)::value>::math dst_math;
            typedef typename ddp__cuda_type<decltype(S)::value>::math src_math;
            typedef decltype(dst_math() + src_math()) M;
            const ddp__cuda_convert<decltype(D)::value, decltype(S)::value, M> f = {NULL, NULL, call->factor,
                                                                                    NULL};
            return ddp__cuda_launch_ranges(call, f);
        });
    });
}

/* Copies tensors of `dtype` into a flat buffer (pack 1), or out of it (pack 0). */
static ddp_result ddp__cuda_copy_flat(void *flat, ddp_dtype flat_dtype, const ddp_cuda_range *tensors,
                                      int tensor_count, ddp_dtype dtype, int pack,
                                      ddp__cuda_ranges_call *call) {
    ddp_copy_range ranges[DDP__CUDA_LAUNCH_RANGES];
    if (!ddp_is_float(flat_dtype) || !ddp_is_float(dtype))
        return ddp_fail(DDP_ERR_INVALID, "%s: cannot convert %s to %s; use floating-point dtypes",
                        call->function, ddp_dtype_name(pack ? dtype : flat_dtype),
                        ddp_dtype_name(pack ? flat_dtype : dtype));
    if (tensor_count < 0 || (tensor_count && (!tensors || !flat)))
        return ddp_fail(DDP_ERR_INVALID, "%s: range_count=%d is negative, or flat or ranges is NULL",
                        call->function, tensor_count);
    for (int i = 0; i < tensor_count; i++)
        if (tensors[i].count && !tensors[i].data)
            return ddp_fail(DDP_ERR_INVALID, "%s: ranges[%d].data is NULL", call->function, i);
    call->ranges = ranges;
    call->dst_dtype = pack ? flat_dtype : dtype;
    call->src_dtype = pack ? dtype : flat_dtype;
    for (int done = 0; done < tensor_count; done += call->range_count) {
        call->range_count = tensor_count - done;
        if (call->range_count > DDP__CUDA_LAUNCH_RANGES) call->range_count = DDP__CUDA_LAUNCH_RANGES;
        for (int i = 0; i < call->range_count; i++) {
            const ddp_cuda_range *tensor = &tensors[done + i];
            void *at = (char *)flat + tensor->offset * ddp_dtype_size(flat_dtype);
            ranges[i].dst = pack ? at : tensor->data;
            ranges[i].src = pack ? tensor->data : at;
            ranges[i].count = tensor->count;
        }
        DDP_TRY(ddp__cuda_copy_ranges(call));
    }
    return DDP_OK;
}

/* Processes each tensor of a list in place, by a copy of f: a ddp__cuda_convert or ddp__cuda_quotients. */
template <class F> struct ddp__cuda_in_place_list {
    typedef void *item;
    enum { SIZE = 64 };
    F f;
    DDP__HD void part(void *data, size_t at, size_t count, size_t thread, size_t threads) const {
        typedef typename F::dst_type type;
        F own = f;
        own.dst = (type *)data + at;
        own.src = own.dst;
        uint32_t mask = ddp__cuda_aligned_heads((1u << F::WIDTH) - 1, own.dst, sizeof(type), F::WIDTH);
        ddp__cuda_run_elements(own, ddp__cuda_vectors_of(mask, count, F::WIDTH), thread, threads);
    }
};

/* Computes dst = src / divisor, rounded once. dst may be src. */
template <ddp_dtype D> struct ddp__cuda_quotients {
    typedef typename ddp__cuda_type<D>::store dst_type;
    enum { WIDTH = 16 / sizeof(dst_type) };
    void *dst;
    const void *src;
    ddp__cuda_divisor divisor;
    template <int N> DDP__HD void run(size_t at) const {
        dst_type x[N];
        ddp__cuda_load<N>(x, src, at);
        DDP__UNROLL
        for (int i = 0; i < N; i++)
            x[i] = ddp__cuda_type<D>::save(ddp__cuda_divide(ddp__cuda_type<D>::load(x[i]), divisor));
        ddp__cuda_store<N>(x, dst, at);
    }
};

/* Calls launch(dtype) for each dtype of the tensors. */
template <class F>
static ddp_result ddp__cuda_each_dtype(const ddp_tensor *tensors, int tensor_count, const F &launch) {
    uint32_t seen = 0;
    for (int i = 0; i < tensor_count; i++) {
        uint32_t bit = 1u << (int)tensors[i].dtype;
        if (!(seen & bit)) DDP_TRY(launch(tensors[i].dtype));
        seen |= bit;
    }
    return DDP_OK;
}

/* Processes the tensors of a dtype, by the thread's stream. */
template <class F>
static ddp_result ddp__cuda_in_place(const F &f, ddp_dtype dtype, const ddp_tensor *tensors, int tensor_count,
                                     const char *function) {
    ddp__cuda_list<ddp__cuda_in_place_list<F>> list = {{f}, 0, {}, {}, {}};
    const cudaStream_t stream = ddp__cuda_this_thread.stream;
    for (const ddp_tensor *t = tensors; t < tensors + tensor_count; t++)
        if (t->dtype == dtype)
            DDP_TRY(ddp__cuda_list_add(&list, t->data, (size_t)ddp_tensor_count(t), stream, function));
    return ddp__cuda_list_launch(&list, stream, function);
}

/* Multiplies tensors of floats by factor, or by *factor_at if that is not NULL. A failure is stored. */
static void ddp__cuda_scale_list(const ddp_tensor *tensors, int tensor_count, float factor,
                                 const float *factor_at) {
    ddp__cuda_save_failure(ddp__cuda_each_dtype(tensors, tensor_count, [&](ddp_dtype dtype) {
        if (!ddp_is_float(dtype)) return DDP_OK;
        return ddp__cuda_dispatch<DDP__CUDA_FLOATS>(dtype, [&](auto D) {
            typedef typename ddp__cuda_type<decltype(D)::value>::math math;
            const ddp__cuda_convert<decltype(D)::value, decltype(D)::value, math> f = {NULL, NULL, factor,
                                                                                       factor_at};
            return ddp__cuda_in_place(f, dtype, tensors, tensor_count, "ddp_device_cuda scale");
        });
    }));
}

//== sums of squares by rows ================================================================= >>impl-rows
/* Adds squares with the bits of ddp_device_cpu(), for ddp_cuda_unscale and sum_squares of the device. */

/* Order of additions. A row is cut into pieces of up to 4096 elements. In a piece, lane e of 32 adds the
   squares of elements e and e + 32 of every 64; then the lanes are added in halves.

   The additions of a lane are one sequential chain. A thread runs several chains: as many lanes as fit into
   16 bytes, or four. So a load has 16 bytes, and neighbouring threads read whole cache lines. A piece needs 8
   threads (16-bit floats: 4), and a warp processes several pieces:

       f32   thread 0: lanes 0 1 2 3   thread 1: lanes 4 5 6 7   ...   thread 7: lanes 28 29 30 31

   The sums of pieces are added exactly, on any number of warps (Kulisch's long accumulator, with the cells of
   >>impl-exact in ddp.h). */
#define DDP__CUDA_PIECE ((size_t)4096)
enum {
    DDP__CUDA_EXACT_NAN = 68,
    DDP__CUDA_EXACT_PLUS = 69,
    DDP__CUDA_EXACT_BOUND = 71,
    DDP__CUDA_NON_FINITE = DDP_EXACT_CELLS
};

/* Adds a value >= 0 to an exact sum. The caller counts it in cell DDP__CUDA_EXACT_BOUND. */
static DDP__HD void ddp__cuda_exact_add(int64_t *cells, double value) {
    uint64_t bits = ddp__cuda_bits(value), mantissa = bits & ((UINT64_C(1) << 52) - 1), low, high;
    int exponent = (int)(bits >> 52 & 0x7ff), shift, digit;
    if (exponent == 0x7ff) {
        ddp__cuda_atomic_add(cells + (mantissa ? DDP__CUDA_EXACT_NAN : DDP__CUDA_EXACT_PLUS), 1);
        return;
    }
    if (value == 0) return;
    if (exponent)
        mantissa |= UINT64_C(1) << 52;
    else
        exponent = 1;
    digit = (exponent - 1) >> 5;
    shift = (exponent - 1) & 31;
    low = (mantissa & 0xffffffff) << shift;
    high = ((mantissa >> 32) << shift) + (low >> 32);
    ddp__cuda_atomic_add(cells + digit, (int64_t)(low & 0xffffffff));
    ddp__cuda_atomic_add(cells + digit + 1, (int64_t)(high & 0xffffffff));
    if (high >> 32) ddp__cuda_atomic_add(cells + digit + 2, (int64_t)(high >> 32));
}

/* One tensor of a list. Its pieces are numbered row by row. */
typedef struct ddp__cuda_squares_tensor {
    void *data;
    size_t row_count, row_pieces, pieces; /* elements and pieces of a row; pieces of all rows */
    size_t sum;                           /* index of the sum that it is added to */
} ddp__cuda_squares_tensor;

/* The squares of a list of tensors. Tensor r has pieces first[r] to first[r + 1] - 1 of the launch. Their
   number is rounded up, so that all pieces that a block adds at a time belong to one tensor:

       256 threads    64 teams of 4, or 32 of 8      a tensor of 70 pieces: 128, or 96; the last have no work

   UNSCALE = 1: multiplies by factor in place and counts non-finite values. 0: data is only read. */
template <ddp_dtype D, int UNSCALE> struct ddp__cuda_squares {
    typedef ddp__cuda_type<D> type;
    typedef typename type::store store;
    typedef typename type::math math;
    enum { CELLS = DDP_EXACT_CELLS + 1, WIDTH = sizeof(store) == 2 ? 8 : 4, TEAM = 32 / WIDTH, SIZE = 64 };
    typedef ddp__cuda_sums<WIDTH> value;
    math factor;
    int64_t *sums; /* of DDP_EXACT_CELLS cells each; UNSCALE: one, of CELLS cells */
    int count;
    size_t first[SIZE + 1];
    ddp__cuda_squares_tensor tensor[SIZE];

    /* The sum of a piece. */
    DDP__HD size_t owner(size_t piece) const { return tensor[ddp__cuda_find(first, count, piece)].sum; }

    /* Returns the square of an element. With UNSCALE, scales the element in place first. */
    DDP__HD double square(store *kept, int *bad) const {
        math x = type::load(*kept);
        if (UNSCALE) {
            int finite = ddp__cuda_finite(x);
            *kept = type::save(ddp__cuda_mul(x, factor));
            x = type::load(*kept);
            *bad += !finite || !ddp__cuda_finite(x);
        }
        return ddp__cuda_mul((double)x, (double)x);
    }
    /* Adds to lanes: squares of N elements at `low` + squares of N elements at `low` + 32, if has_high. */
    template <int N> DDP__HD void pair(double *lanes, void *data, size_t low, int has_high, int *bad) const {
        store a[N], b[N] = {};
        ddp__cuda_load<N>(a, data, low);
        if (has_high) ddp__cuda_load<N>(b, data, low + 32);
        DDP__UNROLL
        for (int i = 0; i < N; i++) {
            double sum = square(a + i, bad);
            if (has_high) sum = ddp__cuda_add(sum, square(b + i, bad));
            lanes[i] = ddp__cuda_add(lanes[i], sum);
        }
        if (UNSCALE) ddp__cuda_store<N>(a, data, low);
        if (UNSCALE && has_high) ddp__cuda_store<N>(b, data, low + 32);
    }
    DDP__HD value partial(size_t number, int lane, int64_t *cells) const {
        int r = ddp__cuda_find(first, count, number);
        const ddp__cuda_squares_tensor &t = tensor[r];
        size_t piece = number - first[r], row = t.row_pieces == 1 ? piece : piece / t.row_pieces;
        size_t begin = (piece - row * t.row_pieces) * DDP__CUDA_PIECE, start = row * t.row_count + begin;
        size_t length = t.row_count - begin < DDP__CUDA_PIECE ? t.row_count - begin : DDP__CUDA_PIECE;
        size_t at = (size_t)lane * WIDTH;
        value lanes = {};
        int bad = 0;
        if (piece >= t.pieces) return lanes;
        if (((uintptr_t)t.data + start * sizeof(store)) % 16 == 0) {
            DDP__UNROLL_4
            for (; at + 32 + WIDTH <= length; at += 64) pair<WIDTH>(lanes.at, t.data, start + at, 1, &bad);
        }
        DDP__UNROLL
        for (int i = 0; i < WIDTH; i++)
            for (size_t e = at + (size_t)i; e < length; e += 64)
                pair<1>(lanes.at + i, t.data, start + e, e + 32 < length, &bad);
        if (bad) ddp__cuda_atomic_add(cells + DDP__CUDA_NON_FINITE, bad);
        return lanes;
    }
    static DDP__HD value join(value a, const value &b) {
        DDP__UNROLL
        for (int i = 0; i < WIDTH; i++) a.at[i] = ddp__cuda_add(a.at[i], b.at[i]);
        return a;
    }
    DDP__HD void finish(size_t number, value lanes, int lane, int64_t *cells) const {
        int r = ddp__cuda_find(first, count, number);
        if (lane || number - first[r] >= tensor[r].pieces) return;
        DDP__UNROLL
        for (int half = WIDTH / 2; half; half /= 2) {
            DDP__UNROLL
            for (int i = 0; i < half; i++) lanes.at[i] = ddp__cuda_add(lanes.at[i], lanes.at[i + half]);
        }
        ddp__cuda_exact_add(cells, lanes.at[0]);
        ddp__cuda_atomic_add(cells + DDP__CUDA_EXACT_BOUND, 1);
    }
    DDP__HD void flush(const int64_t *cells, size_t sum) const {
        for (int i = 0; i < CELLS; i++)
            if (cells[i]) ddp__cuda_atomic_add(sums + sum * DDP_EXACT_CELLS + (size_t)i, cells[i]);
    }
};

/* Launches the tensors of dtype D. */
template <ddp_dtype D, int UNSCALE>
static ddp_result ddp__cuda_squares_launch(const ddp_tensor *tensors, int tensor_count, float factor,
                                           void *sums, int sum_stride, cudaStream_t stream,
                                           const char *function) {
    ddp__cuda_squares<D, UNSCALE> f = {(typename ddp__cuda_type<D>::math)factor, (int64_t *)sums, 0, {}, {}};
    const size_t round = DDP__CUDA_THREADS / f.TEAM;
    static_assert(sizeof(ddp__cuda_rows_work<ddp__cuda_squares<D, UNSCALE>>) <= 4096,
                  "arguments of a kernel");
    for (int i = 0; i < tensor_count; i++) {
        const ddp_tensor *t = &tensors[i];
        size_t length = (size_t)ddp_tensor_count(t), rows = t->ndim > 0 ? (size_t)t->shape[0] : 1;
        if (t->dtype != D || !length) continue;
        if (f.count == f.SIZE) {
            DDP_TRY(ddp__cuda_launch_rows(f, f.first[f.count], stream, function));
            f.count = 0;
        }
        ddp__cuda_squares_tensor *added = &f.tensor[f.count];
        added->data = t->data;
        added->row_count = length / rows;
        added->row_pieces = (added->row_count + DDP__CUDA_PIECE - 1) / DDP__CUDA_PIECE;
        added->pieces = rows * added->row_pieces;
        added->sum = (size_t)(i * sum_stride);
        f.first[f.count + 1] = f.first[f.count] + (added->pieces + round - 1) / round * round;
        f.count++;
    }
    return ddp__cuda_launch_rows(f, f.first[f.count], stream, function);
}

/* ddp_exact_sum_value for a sum without negative terms. Its carries are >= 0, so one pass over the cells,
   from the lowest one, is enough. It finds the highest digit that is not 0, the two digits before it, and
   whether any lower digit is not 0. */
static DDP__HD double ddp__cuda_exact_value(const ddp_exact_sum *sum) {
    uint64_t digits[2] = {0, 0}; /* the two digits before the current one */
    uint64_t carry = 0, under = 0, bits = 0, low = 0, rest = 0;
    int top = 1, shift = 0;
    int64_t cells[DDP_EXACT_CELLS];
    ddp__cuda_load<DDP_EXACT_CELLS>(cells, sum, 0);
    if (cells[DDP__CUDA_EXACT_NAN] || cells[DDP__CUDA_EXACT_PLUS])
        return cells[DDP__CUDA_EXACT_NAN] ? (double)NAN : HUGE_VAL;
    DDP__UNROLL
    for (int k = 0; k < DDP__CUDA_EXACT_NAN; k++) {
        uint64_t digit = (uint64_t)cells[k] + carry;
        carry = digit >> 32;
        if (k + 1 < DDP__CUDA_EXACT_NAN) digit &= 0xffffffff;
        if (k == 1 || (k > 1 && digit)) {
            top = k;
            bits = digit << 32 | digits[0];
            low = digits[1];
            rest = under;
        }
        under |= digits[1];
        digits[1] = digits[0];
        digits[0] = digit;
    }
    for (; bits && !(bits >> 63); shift++) {
        bits = bits << 1 | low >> 31;
        low = low << 1 & 0xffffffff;
    }
    return ldexp((double)(bits | ((low | rest) != 0)), 32 * (top - 1) - 1074 - shift);
}

template <int UNSCALE>
static ddp_result ddp__cuda_sum_squares(const ddp_tensor *tensors, int tensor_count, float factor, void *sums,
                                        int sum_stride, cudaStream_t stream, const char *function) {
    return ddp__cuda_each_dtype(tensors, tensor_count, [&](ddp_dtype dtype) {
        if (!ddp_is_float(dtype))
            return ddp_fail(DDP_ERR_INVALID, "%s: dtype=%s; use a floating-point dtype", function,
                            ddp_dtype_name(dtype));
        return ddp__cuda_dispatch<DDP__CUDA_FLOATS>(dtype, [&](auto D) {
            return ddp__cuda_squares_launch<decltype(D)::value, UNSCALE>(tensors, tensor_count, factor, sums,
                                                                         sum_stride, stream, function);
        });
    });
}

//== optimizers ============================================================================ >>impl-optimizers
/* AdamW, LAMB and SGD, one pass over all state, for ddp_cuda_adamw, ddp_cuda_sgd and the optimizer of
   ddp_fsdp.h. Every operation is rounded, so the bits are those of the CPU. */

/* One tensor of a step. T: f32 or f64. */
template <class T> struct ddp__cuda_step_tensor {
    T *value;
    void *grad;
    T *state0, *state1; /* SGD: state0 is NULL without momentum */
    void *copy;         /* NULL = none; the new values in copy_dtype, for the next forward pass */
    const double *scale_at;
    uint64_t first_index; /* of element 0, for stochastic rounding of the copy */
};

/* One step of AdamW or LAMB (ADAM 1), or SGD (ADAM 0), from a struct ddp_update or a list of
   ddp_cuda_step_desc. G: dtype of the gradient. Parameters and arithmetic are f32, or f64 if G is f64. The
   fields are those of struct ddp_update, and equal for all tensors of a launch. */
template <ddp_dtype G, int ADAM> struct ddp__cuda_update {
    typedef typename ddp__cuda_type<G>::math T;
    typedef ddp__cuda_step_tensor<T> item;
    enum { WIDTH = 16 / sizeof(T), SIZE = 56 };
    T rate, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, scale, grad_scale, decay_factor,
        inv_sqrt_bias_correction2;
    int first, nesterov;
    const float *grad_scale_at;
    int lamb;             /* 1 = writes the update to grad and does not change value */
    ddp_dtype copy_dtype; /* of the copies */
    int copy_size;        /* bytes of an element of them */
    int stochastic;       /* 1 = copies are rounded at random, by key and the index of the element */
    uint64_t key;
    const int64_t *skip; /* if *skip is not 0, nothing is written; NULL = never skip */

    /* Returns b + factor * a. */
    static DDP__HD T add(T b, T factor, T a) { return ddp__cuda_add(b, ddp__cuda_mul(factor, a)); }
    template <int N> DDP__HD void adam(const item &t, T *w, T *g, size_t at) const {
        T m[N], v[N];
        ddp__cuda_load<N>(m, t.state0, at);
        ddp__cuda_load<N>(v, t.state1, at);
        DDP__UNROLL
        for (int i = 0; i < N; i++) {
            T d;
            m[i] = add(ddp__cuda_mul(beta1, m[i]), one_minus_beta1, g[i]);
            v[i] = add(ddp__cuda_mul(beta2, v[i]), one_minus_beta2, ddp__cuda_mul(g[i], g[i]));
            d = ddp__cuda_div(ddp__cuda_mul(rate, m[i]),
                              add(eps, inv_sqrt_bias_correction2, ddp__cuda_sqrt(v[i])));
            g[i] = decay != 0 ? add(d, decay, w[i]) : d;
            w[i] = ddp__cuda_add(ddp__cuda_mul(decay_factor, w[i]), -d);
        }
        ddp__cuda_store<N>(m, t.state0, at);
        ddp__cuda_store<N>(v, t.state1, at);
    }
    template <int N> DDP__HD void sgd(const item &t, T *w, const T *g, size_t at) const {
        T m[N] = {};
        T factor = scale;
        double stored;
        if (t.scale_at) {
            ddp__cuda_load<1>(&stored, t.scale_at, 0);
            factor = (T)stored;
        }
        if (t.state0 && !first) ddp__cuda_load<N>(m, t.state0, at);
        DDP__UNROLL
        for (int i = 0; i < N; i++) {
            T d = ddp__cuda_mul(factor, decay != 0 ? add(g[i], decay, w[i]) : g[i]);
            m[i] = first ? d : add(ddp__cuda_mul(beta1, m[i]), one_minus_beta1, d);
            if (t.state0) d = nesterov ? add(d, beta1, m[i]) : m[i];
            w[i] = ddp__cuda_add(w[i], -ddp__cuda_mul(rate, d));
        }
        if (t.state0) ddp__cuda_store<N>(m, t.state0, at);
    }
    template <ddp_dtype C, int N> DDP__HD void write_rounded(const item &t, const T *w, size_t at) const {
        typename ddp__cuda_type<C>::store out[N];
        DDP__UNROLL
        for (int i = 0; i < N; i++) out[i] = ddp__cuda_round<C>(w[i]);
        ddp__cuda_store<N>(out, t.copy, at);
    }
    template <int N> DDP__HD void write_copy(const item &t, const T *w, size_t at) const {
        uint16_t random[N];
        if (copy_dtype == DDP_F32) return write_rounded<DDP_F32, N>(t, w, at);
        if (copy_dtype == DDP_F64) return write_rounded<DDP_F64, N>(t, w, at);
        if (copy_dtype == DDP_F16) return write_rounded<DDP_F16, N>(t, w, at);
        if (!stochastic) return write_rounded<DDP_BF16, N>(t, w, at);
        DDP__UNROLL
        for (int i = 0; i < N; i++)
            random[i] = ddp__cuda_to_bf16_random((float)w[i], key, t.first_index + at + (size_t)i);
        ddp__cuda_store<N>(random, t.copy, at);
    }
    template <int N> DDP__HD void run(const item &t, size_t at) const {
        typename ddp__cuda_type<G>::store in[N];
        T w[N], g[N], factor = grad_scale;
        float stored;
        if (skip && *skip) return;
        if (grad_scale_at) {
            ddp__cuda_load<1>(&stored, grad_scale_at, 0);
            factor = (T)stored;
        }
        ddp__cuda_load<N>(in, t.grad, at);
        ddp__cuda_load<N>(w, t.value, at);
        DDP__UNROLL
        for (int i = 0; i < N; i++) g[i] = ddp__cuda_mul(factor, ddp__cuda_type<G>::load(in[i]));
        if (ADAM)
            adam<N>(t, w, g, at);
        else
            sgd<N>(t, w, g, at);
        if (lamb)
            ddp__cuda_store<N>(g, t.grad, at);
        else
            ddp__cuda_store<N>(w, t.value, at);
        if (t.copy) write_copy<N>(t, w, at);
    }

    /* A tensor, for ddp__cuda_run_elements. */
    struct elements {
        enum { WIDTH = ddp__cuda_update::WIDTH };
        const ddp__cuda_update &f;
        const item &t;
        size_t begin;
        template <int N> DDP__HD void run(size_t at) const { f.template run<N>(t, begin + at); }
    };
    DDP__HD void part(const item &t, size_t at, size_t count, size_t thread, size_t threads) const {
        const elements f = {*this, t, at};
        const void *arrays[5] = {t.value, t.state0, t.state1, t.grad, t.copy};
        const int size = (int)sizeof(T);
        const int sizes[5] = {size, size, size, (int)sizeof(typename ddp__cuda_type<G>::store), copy_size};
        uint32_t mask = (1u << WIDTH) - 1;
        DDP__UNROLL
        for (int i = 0; i < 5; i++)
            if (arrays[i])
                mask = ddp__cuda_aligned_heads(mask, (const char *)arrays[i] + at * (size_t)sizes[i],
                                               sizes[i], WIDTH);
        ddp__cuda_run_elements(f, ddp__cuda_vectors_of(mask, count, WIDTH), thread, threads);
    }
};

//== optimizers: descs and calls ====================================================== >>impl-optimizer-calls
/* Turns the descs of ddp_cuda_adamw and ddp_cuda_sgd, and struct ddp_update of ddp_fsdp.h, into the kernel of
   the section above. The other functions of the optimizer table follow: scale, clip and trust. */

/* Copies desc to out with its defaults resolved. */
static void ddp__cuda_resolve_step_desc(const ddp_cuda_step_desc *desc, ddp_cuda_step_desc *out) {
    *out = *desc;
    if (!out->grad_dtype) out->grad_dtype = DDP_F32;
    if (!out->copy_dtype) out->copy_dtype = DDP_BF16;
    if (out->beta1 == 0) out->beta1 = 0.9f;
    if (out->beta2 == 0) out->beta2 = 0.999f;
    if (out->eps == 0) out->eps = 1e-8f;
    if (out->grad_factor == 0) out->grad_factor = 1.0f;
}

/* Checks a desc with resolved defaults. index: in the list, for the error. */
static ddp_result ddp__cuda_check_step_desc(const ddp_cuda_step_desc *d, int index, int adam,
                                            const char *function) {
    if (d->step < 1)
        return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d]: step=%lld; use 1 or more", function, index,
                        (long long)d->step);
    if (d->count && (!d->master || !d->grad))
        return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d]: master or grad is NULL; set both", function, index);
    if (d->grad_dtype == DDP_F64 || !ddp_is_float(d->grad_dtype))
        return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d]: grad_dtype=%s; use f32, f16 or bf16", function,
                        index, ddp_dtype_name(d->grad_dtype));
    if (d->copy_dtype == DDP_F64 || !ddp_is_float(d->copy_dtype))
        return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d]: copy_dtype=%s; use bf16, f16 or f32", function,
                        index, ddp_dtype_name(d->copy_dtype));
    if (d->stochastic && d->copy_dtype != DDP_BF16)
        return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d]: stochastic rounding with copy_dtype=%s; use bf16",
                        function, index, ddp_dtype_name(d->copy_dtype));
    if (adam && d->count && (!d->first || !d->second))
        return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d]: first or second is NULL; set both", function, index);
    if (!adam && d->count && d->momentum != 0 && !d->first)
        return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d]: momentum=%g, but first is NULL; set it", function,
                        index, (double)d->momentum);
    return DDP_OK;
}

/* Whether two tensors can share a launch: all fields except those of ddp__cuda_step_tensor are equal. */
static int ddp__cuda_same_step(const ddp_cuda_step_desc *a, const ddp_cuda_step_desc *b) {
    return a->grad_dtype == b->grad_dtype && a->copy_dtype == b->copy_dtype && a->step == b->step
           && a->lr == b->lr && a->weight_decay == b->weight_decay && a->beta1 == b->beta1
           && a->beta2 == b->beta2 && a->eps == b->eps && a->momentum == b->momentum
           && a->dampening == b->dampening && a->nesterov == b->nesterov && a->grad_factor == b->grad_factor
           && a->skip == b->skip && a->stochastic == b->stochastic && a->seed == b->seed;
}

/* The factors of a desc with resolved defaults. */
template <ddp_dtype G, int ADAM>
static ddp__cuda_update<G, ADAM> ddp__cuda_update_of(const ddp_cuda_step_desc *d) {
    const double step = (double)d->step, lr = (double)d->lr;
    /* The conversion to float keeps the host compiler from fusing the two operations. */
    const float decay_factor = 1.0f - (float)(lr * d->weight_decay);
    const float inv_sqrt_bias_correction2 = (float)(1.0 / sqrt(1.0 - pow((double)d->beta2, step)));
    ddp__cuda_update<G, ADAM> u = {};
    u.scale = 1;
    u.grad_scale = d->grad_factor;
    u.skip = d->skip;
    u.copy_dtype = d->copy_dtype;
    u.copy_size = (int)ddp_dtype_size(d->copy_dtype);
    u.stochastic = d->stochastic;
    u.key = ddp__cuda_splitmix64(ddp__cuda_splitmix64(d->seed + UINT64_C(0x9e3779b97f4a7c15))
                                 + (uint64_t)d->step);
    if (ADAM) {
        u.rate = (float)(lr / (1.0 - pow((double)d->beta1, step)));
        u.beta1 = d->beta1;
        u.one_minus_beta1 = 1.0f - d->beta1;
        u.beta2 = d->beta2;
        u.one_minus_beta2 = 1.0f - d->beta2;
        u.eps = d->eps;
        u.decay_factor = decay_factor;
        u.inv_sqrt_bias_correction2 = inv_sqrt_bias_correction2;
    } else {
        u.rate = d->lr;
        u.beta1 = d->momentum;
        u.one_minus_beta1 = 1.0f - d->dampening;
        u.decay = d->weight_decay;
        u.first = d->step == 1;
        u.nesterov = d->nesterov;
    }
    return u;
}

/* Launches all descs from index `from` on that can share a launch with it. */
template <ddp_dtype G, int ADAM>
static ddp_result ddp__cuda_step_launch(const ddp_cuda_step_desc *descs, int from, int count,
                                        cudaStream_t stream, const char *function) {
    ddp_cuda_step_desc first, d;
    ddp__cuda_list<ddp__cuda_update<G, ADAM>> list = {};
    ddp__cuda_resolve_step_desc(&descs[from], &first);
    list.f = ddp__cuda_update_of<G, ADAM>(&first);
    for (int i = from; i < count; i++) {
        ddp__cuda_resolve_step_desc(&descs[i], &d);
        if (!ddp__cuda_same_step(&first, &d)) continue;
        float *state0 = ADAM || d.momentum != 0 ? d.first : NULL;
        const ddp__cuda_step_tensor<float> tensor = {d.master, (void *)d.grad, state0,       d.second,
                                                     d.copy,   NULL,           d.first_index};
        DDP_TRY(ddp__cuda_list_add(&list, tensor, d.count, stream, function));
    }
    return ddp__cuda_list_launch(&list, stream, function);
}

template <int ADAM>
static ddp_result ddp__cuda_step(const ddp_cuda_step_desc *descs, int count, cudaStream_t stream,
                                 const char *function) {
    ddp_cuda_step_desc d, earlier;
    if (count < 0 || (count && !descs))
        return ddp_fail(DDP_ERR_INVALID, "%s: count=%d is negative, or descs is NULL", function, count);
    for (int i = 0; i < count; i++) {
        ddp__cuda_resolve_step_desc(&descs[i], &d);
        DDP_TRY(ddp__cuda_check_step_desc(&d, i, ADAM, function));
    }
    for (int i = 0; i < count; i++) {
        int launched = 0;
        ddp__cuda_resolve_step_desc(&descs[i], &d);
        for (int k = 0; k < i && !launched; k++) {
            ddp__cuda_resolve_step_desc(&descs[k], &earlier);
            launched = ddp__cuda_same_step(&earlier, &d);
        }
        if (launched) continue;
        DDP_TRY(ddp__cuda_dispatch<DDP__CUDA_FLOATS_32>(d.grad_dtype, [&](auto G) {
            return ddp__cuda_step_launch<decltype(G)::value, ADAM>(descs, i, count, stream, function);
        }));
    }
    return DDP_OK;
}

#if defined(DDP_FSDP_KERNELS_H)
template <ddp_dtype G, int ADAM> static ddp_result ddp__cuda_update_run(const ddp_update *u) {
    typedef typename ddp__cuda_type<G>::math T;
    const char *function = "ddp_device_cuda update";
    const cudaStream_t stream = ddp__cuda_this_thread.stream;
    ddp__cuda_list<ddp__cuda_update<G, ADAM>> list = {};
    ddp__cuda_update<G, ADAM> *f = &list.f;
    f->rate = (T)u->rate;
    f->beta1 = (T)u->beta1;
    f->one_minus_beta1 = (T)u->one_minus_beta1;
    f->beta2 = (T)u->beta2;
    f->one_minus_beta2 = (T)u->one_minus_beta2;
    f->eps = (T)u->eps;
    f->decay = (T)u->decay;
    f->scale = (T)u->scale;
    f->grad_scale = (T)(u->grad_scale ? u->grad_scale : 1);
    f->decay_factor = (T)u->decay_factor;
    f->inv_sqrt_bias_correction2 = (T)u->inv_sqrt_bias_correction2;
    f->first = u->first;
    f->nesterov = u->nesterov;
    f->grad_scale_at = u->grad_scale_at;
    f->lamb = u->kind == DDP_UPDATE_LAMB;
    f->copy_dtype = u->copy_dtype;
    f->copy_size = (int)ddp_dtype_size(u->copy_dtype);
    for (const ddp_update_tensor *t = u->tensors; t < u->tensors + u->tensor_count; t++) {
        const ddp__cuda_step_tensor<T> tensor = {
            (T *)t->value, t->grad, (T *)t->state0, (T *)t->state1, t->copy, t->scale_at, 0};
        DDP_TRY(ddp__cuda_list_add(&list, tensor, t->count, stream, function));
    }
    return ddp__cuda_list_launch(&list, stream, function);
}

/* clip and trust of ddp_optimizer_kernels. One thread computes one number. */
struct ddp__cuda_clip {
    enum { WIDTH = 1 };
    const ddp_exact_sum *sum;
    float limit, *factor, *norm;
    template <int N> DDP__HD void run(size_t) const {
        float n = (float)ddp__cuda_sqrt(ddp__cuda_exact_value(sum));
        float f = n > limit && n <= 3.402823466e38f ? ddp__cuda_div(limit, n) : 1.0f;
        ddp__cuda_store<1>(&f, factor, 0);
        ddp__cuda_store<1>(&n, norm, 0);
    }
};

struct ddp__cuda_trust {
    enum { WIDTH = 1 };
    const ddp_exact_sum *sums;
    double lr, c, decay, *out;
    template <int N> DDP__HD void run(size_t at) const {
        double value = ddp__cuda_sqrt(ddp__cuda_exact_value(sums + 2 * at));
        double grad = ddp__cuda_sqrt(ddp__cuda_exact_value(sums + 2 * at + 1));
        double below = decay < 0 ? grad : ddp__cuda_add(grad, ddp__cuda_mul(decay, value));
        double rate = lr;
        if (value != 0 && grad != 0) rate = ddp__cuda_mul(lr, ddp__cuda_div(ddp__cuda_mul(c, value), below));
        ddp__cuda_store<1>(&rate, out, at);
    }
};

static void ddp__cuda_optimizer_update(const ddp_update *u) {
    ddp__cuda_save_failure(ddp__cuda_dispatch<DDP__CUDA_FLOATS>(u->grad_dtype, [&](auto G) {
        if (u->kind == DDP_UPDATE_SGD) return ddp__cuda_update_run<decltype(G)::value, 0>(u);
        return ddp__cuda_update_run<decltype(G)::value, 1>(u);
    }));
}

static void ddp__cuda_optimizer_scale(const ddp_tensor *tensors, int tensor_count, const float *factor) {
    ddp__cuda_scale_list(tensors, tensor_count, 1, factor);
}

static void ddp__cuda_optimizer_clip(const ddp_exact_sum *sum, float limit, float *factor, float *norm) {
    const ddp__cuda_clip f = {sum, limit, factor, norm};
    ddp__cuda_save_failure(
        ddp__cuda_launch_elements(f, 1, 1, ddp__cuda_this_thread.stream, "ddp_device_cuda clip"));
}

static void ddp__cuda_optimizer_trust(const ddp_exact_sum *sums, size_t count, double lr, double c,
                                      double decay, double *out) {
    const ddp__cuda_trust f = {sums, lr, c, decay, out};
    ddp__cuda_save_failure(
        ddp__cuda_launch_elements(f, 1, count, ddp__cuda_this_thread.stream, "ddp_device_cuda trust"));
}

// clang-format off
#define DDP_X(name, arguments) ddp__cuda_optimizer_##name,
static const ddp_optimizer_kernels ddp__cuda_optimizer = {DDP_VERSION, DDP_OPTIMIZER_KERNELS(DDP_X)};
#undef DDP_X
// clang-format on
#define DDP__CUDA_OPTIMIZER &ddp__cuda_optimizer
#else
#define DDP__CUDA_OPTIMIZER NULL
#endif

//== 8-bit quantisation ================================================================== >>impl-quantise
/* ddp_cuda_quantise8 and ddp_cuda_dequantise8. */

/* A row is a block of 256 elements, eight per lane. The last block may be shorter. Magnitudes are compared as
   integers, where NaN is the largest. */
template <ddp_dtype S> struct ddp__cuda_quantise {
    typedef ddp__cuda_type<S> type;
    typedef typename type::store store;
    typedef uint32_t value;
    enum { CELLS = 1, TEAM = 32, EACH = DDP_CUDA_QUANT_BLOCK / 32 };
    const void *src;
    int8_t *q;
    float *scales;
    size_t count;
    int src_aligned, q_aligned; /* to 16 and 8 bytes */

    /* Loads up to EACH elements. Returns their number. */
    DDP__HD int load(store *in, size_t at) const {
        size_t rest = at < count ? count - at : 0;
        int n = rest < EACH ? (int)rest : (int)EACH;
        if (n == EACH && src_aligned)
            ddp__cuda_load<EACH>(in, src, at);
        else
            for (int i = 0; i < EACH; i++)
                if (i < n) ddp__cuda_load<1>(in + i, src, at + (size_t)i);
        return n;
    }
    DDP__HD uint32_t partial(size_t block, int lane, int64_t *) const {
        store in[EACH] = {};
        uint32_t largest = 0;
        int n = load(in, block * DDP_CUDA_QUANT_BLOCK + (size_t)(lane * EACH));
        for (int i = 0; i < EACH; i++) {
            uint32_t bits = i < n ? ddp__cuda_bits(type::load(in[i])) & 0x7fffffff : 0;
            if (bits > largest) largest = bits;
        }
        return largest;
    }
    static DDP__HD uint32_t join(uint32_t a, uint32_t b) { return a > b ? a : b; }
    static DDP__HD int8_t quantise(float x, float scale) {
        float ratio = ddp__cuda_div(x, scale);
        /* The addition of 1.5 * 2^23 leaves the integer nearest to ratio in the low bits. */
        return (int8_t)((int32_t)ddp__cuda_bits(ddp__cuda_add(ratio, 12582912.0f)) - 0x4b400000);
    }
    DDP__HD void finish(size_t block, uint32_t largest, int lane, int64_t *) const {
        store in[EACH] = {};
        int8_t out[EACH];
        size_t at = block * DDP_CUDA_QUANT_BLOCK + (size_t)(lane * EACH);
        int n = load(in, at), special = largest >= 0x7f800000u, zero = largest < (27u << 23); /* 2^-100 */
        float scale = ddp__cuda_div(ddp__cuda_from_bits(largest), 127.0f);
        if (zero) scale = 0.0f;
        if (special) scale = ddp__cuda_from_bits(0x7fc00000u); /* NaN */
        /* The division has rounded up, and scale * 127 overflows: use the next smaller scale. */
        if (!special && !ddp__cuda_finite(ddp__cuda_mul(scale, 127.0f)))
            scale = ddp__cuda_from_bits(ddp__cuda_bits(scale) - 1);
        for (int i = 0; i < EACH; i++)
            out[i] = special || zero ? (int8_t)0 : quantise(type::load(in[i]), scale);
        if (n == EACH && q_aligned)
            ddp__cuda_store<EACH>(out, q, at);
        else
            for (int i = 0; i < EACH; i++)
                if (i < n) ddp__cuda_store<1>(out + i, q, at + (size_t)i);
        if (lane == 0) ddp__cuda_store<1>(&scale, scales, block);
    }
    DDP__HD size_t owner(size_t) const { return 0; }
    DDP__HD void flush(const int64_t *, size_t) const {}
};

/* Only a head of 0 is allowed, so that a group of four elements is inside one block; otherwise all elements
   are processed one by one. */
template <ddp_dtype D> struct ddp__cuda_dequantise {
    enum { WIDTH = 4 };
    void *dst;
    const int8_t *q;
    const float *scales;
    template <int N> DDP__HD void run(size_t at) const {
        int8_t in[N];
        typename ddp__cuda_type<D>::store out[N];
        float scale;
        ddp__cuda_load<N>(in, q, at);
        ddp__cuda_load<1>(&scale, scales, at / DDP_CUDA_QUANT_BLOCK);
        DDP__UNROLL
        for (int i = 0; i < N; i++) out[i] = ddp__cuda_type<D>::save(ddp__cuda_mul((float)in[i], scale));
        ddp__cuda_store<N>(out, dst, at);
    }
};

template <ddp_dtype S>
static ddp_result ddp__cuda_quantise_launch(int8_t *q, float *scales, const void *src, size_t count,
                                            cudaStream_t stream) {
    const ddp__cuda_quantise<S> f = {src, q, scales, count, (uintptr_t)src % 16 == 0, (uintptr_t)q % 8 == 0};
    return ddp__cuda_launch_rows(f, count / DDP_CUDA_QUANT_BLOCK + (count % DDP_CUDA_QUANT_BLOCK != 0),
                                 stream, "ddp_cuda_quantise8");
}

template <ddp_dtype D>
static ddp_result ddp__cuda_dequantise_launch(void *dst, const int8_t *q, const float *scales, size_t count,
                                              cudaStream_t stream) {
    const ddp__cuda_dequantise<D> f = {dst, q, scales};
    uint32_t mask = ddp__cuda_aligned_heads(1, dst, (int)sizeof(typename ddp__cuda_type<D>::store), 4);
    return ddp__cuda_launch_elements(f, ddp__cuda_aligned_heads(mask, q, 1, 4), count, stream,
                                     "ddp_cuda_dequantise8");
}

//== layers: elements ========================================================================== >>impl-layers
/* ddp_layer_kernels of ddp_tensor.h in T, f32 or f64. Here: kernels in which a thread computes an element.
   The section below has those in which a team of threads computes a row or a column. Unlike in the
   optimizers, the compiler may fuse multiplications with additions: bits differ from the CPU's, but not
   between runs.

   A kernel is a struct with its arguments and cell(i, j), which computes row i, column j of the output. */
#if defined(DDP_TENSOR_KERNELS_H)
#define DDP__CUDA_LAYER "ddp_device_cuda layer"
#if defined(__CUDA_ARCH__) /* memory of layers is aligned to its elements */
template <class T> static DDP__HD T ddp__cuda_layer_load(const void *base, int64_t i) {
    return ((const T *)base)[i];
}
template <class T> static DDP__HD void ddp__cuda_layer_store(void *base, int64_t i, T x) {
    ((T *)base)[i] = x;
}
#else
template <class T> static DDP__HD T ddp__cuda_layer_load(const void *base, int64_t i) {
    T x;
    ddp__cuda_load<1>(&x, base, (size_t)i);
    return x;
}
template <class T> static DDP__HD void ddp__cuda_layer_store(void *base, int64_t i, T x) {
    ddp__cuda_store<1>(&x, base, (size_t)i);
}
#endif

/* Returns word e % 4 of block e / 4 of Philox 4x32-10 (Salmon et al. 2011). */
static DDP__HD uint32_t ddp__cuda_philox(uint64_t key, uint64_t e) {
    uint32_t c0 = (uint32_t)(e / 4), c1 = (uint32_t)(e / 4 >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    if (e & 2) return e & 1 ? c3 : c2;
    return e & 1 ? c1 : c0;
}

/* Work on the elements of a matrix. F has cell(i, j). */
template <class F> struct ddp__cuda_layer_cells {
    enum { WIDTH = 1 };
    F f;
    int64_t columns;
    template <int N> DDP__HD void run(size_t at) const { /* a division of 32 bits takes a third of the time */
        int64_t i = (at | (size_t)columns) >> 32 ? (int64_t)at / columns
                                                 : (int64_t)((uint32_t)at / (uint32_t)columns);
        f.cell(i, (int64_t)at - i * columns);
    }
};

/* Launches F, made of these fields, on all elements of a matrix. */
template <class F, class... Fields>
static ddp_result ddp__cuda_launch_cells(int64_t rows, int64_t columns, Fields... fields_of_f) {
    const ddp__cuda_layer_cells<F> all = {{fields_of_f...}, columns};
    return ddp__cuda_launch_elements(all, 1, (size_t)(rows * columns), ddp__cuda_this_thread.stream,
                                     DDP__CUDA_LAYER);
}

/* c = op(a) op(b), or c += op(a) op(b): the matrix product without cuBLASLt. */
template <class T> struct ddp__cuda_gemm_cell {
    ddp_gemm g;
    DDP__HD void cell(int64_t i, int64_t j) const {
        T sum = g.accumulate ? ddp__cuda_layer_load<T>(g.c, i * g.ldc + j) : 0;
        for (int64_t k = 0; k < g.k; k++)
            sum += ddp__cuda_layer_load<T>(g.a, g.trans_a ? k * g.lda + i : i * g.lda + k)
                   * ddp__cuda_layer_load<T>(g.b, g.trans_b ? j * g.ldb + k : k * g.ldb + j);
        ddp__cuda_layer_store<T>(g.c, i * g.ldc + j, sum);
    }
};
template <class T> static ddp_result ddp__cuda_plain_gemm(const ddp_gemm *g) {
    return ddp__cuda_launch_cells<ddp__cuda_gemm_cell<T>>(g->m, g->n, *g);
}

/* y = x, for matrices with a distance between rows. */
template <class T> struct ddp__cuda_copy_cell {
    const void *x;
    int64_t x_step;
    void *y;
    int64_t y_step;
    DDP__HD void cell(int64_t i, int64_t j) const {
        ddp__cuda_layer_store<T>(y, i * y_step + j, ddp__cuda_layer_load<T>(x, i * x_step + j));
    }
};
template <class T>
static ddp_result ddp__cuda_copy_rows(int64_t rows, int64_t columns, const void *x, int64_t x_step, void *y,
                                      int64_t y_step) {
    return ddp__cuda_launch_cells<ddp__cuda_copy_cell<T>>(rows, columns, x, x_step, y, y_step);
}

/* y += bias, for every row of y. */
template <class T> struct ddp__cuda_bias_cell {
    const void *bias;
    void *y;
    int64_t y_step;
    DDP__HD void cell(int64_t i, int64_t j) const {
        ddp__cuda_layer_store<T>(
            y, i * y_step + j, ddp__cuda_layer_load<T>(y, i * y_step + j) + ddp__cuda_layer_load<T>(bias, j));
    }
};
template <class T>
static ddp_result ddp__cuda_add_bias(int64_t rows, int64_t columns, const void *bias, void *y,
                                     int64_t y_step) {
    return ddp__cuda_launch_cells<ddp__cuda_bias_cell<T>>(rows, columns, bias, y, y_step);
}

/* Activation, or its backward if dy is not NULL. A gated row has `columns` gates and `columns` ups:

       forward    out[i][j] = f(gate) * up            x: | gate gate ... | up up ... |
       backward   the gradients of x, with the same layout */
template <class T> struct ddp__cuda_activation_cell {
    ddp_tp_activation activation;
    int64_t columns;
    const void *x, *dy;
    void *out;
    DDP__HD void cell(int64_t i, int64_t j) const {
        int gated = activation == DDP_TP_SILU_GATED;
        int64_t at = i * columns + j, from = gated ? at + i * columns : at;
        T value = ddp__cuda_layer_load<T>(x, from),
          up = gated ? ddp__cuda_layer_load<T>(x, from + columns) : 1;
        T s = activation == DDP_TP_GELU ? ddp__cuda_gelu_gate(value) : ddp__cuda_sigmoid(value);
        if (!dy) {
            T y = value * s * up;
            if (activation == DDP_TP_RELU) y = value < 0 ? 0 : value; /* NaN stays NaN */
            ddp__cuda_layer_store<T>(out, at, y);
            return;
        }
        T d = ddp__cuda_layer_load<T>(dy, at);
        if (gated) ddp__cuda_layer_store<T>(out, from + columns, d * value * s);
        if (activation == DDP_TP_RELU) {
            if (!(value > 0)) d = value <= 0 ? 0 : value; /* NaN stays NaN */
        } else if (gated) {
            d *= up * s * (1 + value * (1 - s));
        } else {
            d *= ddp__cuda_gelu_slope(value, s);
        }
        ddp__cuda_layer_store<T>(out, from, d);
    }
};
template <class T>
static ddp_result ddp__cuda_activate_backward(ddp_tp_activation activation, int64_t rows, int64_t columns,
                                              const void *x, const void *dy, void *dx) {
    return ddp__cuda_launch_cells<ddp__cuda_activation_cell<T>>(rows, columns, activation, columns, x, dy,
                                                                dx);
}
template <class T>
static ddp_result ddp__cuda_activate(ddp_tp_activation activation, int64_t rows, int64_t columns,
                                     const void *x, void *y) {
    return ddp__cuda_activate_backward<T>(activation, rows, columns, x, NULL, y);
}

/* y = x * scale, or 0 where the random number of the element is below the threshold. */
template <class T> struct ddp__cuda_dropout_cell {
    ddp_dropout op;
    DDP__HD void cell(int64_t i, int64_t j) const {
        int64_t at = i * op.columns + j;
        int drop = ddp__cuda_philox(op.key, (uint64_t)(op.first + i * op.step + j)) < op.threshold;
        ddp__cuda_layer_store<T>(op.y, at, drop ? 0 : ddp__cuda_layer_load<T>(op.x, at) * (T)op.scale);
    }
};
template <class T> static ddp_result ddp__cuda_dropout(const ddp_dropout *op) {
    return ddp__cuda_launch_cells<ddp__cuda_dropout_cell<T>>(op->rows, op->columns, *op);
}

/* Work on rows with an index each: tokens or targets, which are in host memory. Each launch passes as many
   indices as fit into a kernel's arguments, so that the host does not wait for a copy. Row i of a launch is
   row begin + i of op. */
#define DDP__CUDA_LAUNCH_INDICES 896
template <class Op> struct ddp__cuda_indexed_rows {
    Op op;
    int64_t begin, count;
    int32_t index[DDP__CUDA_LAUNCH_INDICES];
};
static_assert(sizeof(ddp__cuda_indexed_rows<ddp_loss>) + sizeof(size_t) <= 4096,
              "a kernel's arguments are limited to 4 KiB");

template <class F, class Op>
static ddp_result ddp__cuda_launch_indexed(const Op *op, const int32_t *index,
                                           ddp_result (*launch)(const F &, size_t, cudaStream_t,
                                                                const char *)) {
    F f = {};
    f.op = *op;
    for (; f.begin < op->rows; f.begin += f.count) {
        f.count = op->rows - f.begin < DDP__CUDA_LAUNCH_INDICES ? op->rows - f.begin
                                                                : DDP__CUDA_LAUNCH_INDICES;
        memcpy(f.index, index + f.begin, (size_t)f.count * sizeof *f.index);
        DDP_TRY(launch(f, (size_t)f.count, ddp__cuda_this_thread.stream, DDP__CUDA_LAYER));
    }
    return DDP_OK;
}

/* Embedding lookup: out row i = table row of token i, if this rank has it; otherwise zeros. */
template <class T> struct ddp__cuda_lookup_row : ddp__cuda_indexed_rows<ddp_lookup> {
    DDP__HD void chunk(size_t i, size_t thread, size_t threads) const {
        int64_t n = op.columns, table_row = index[i] - op.first;
        int is_here = table_row >= 0 && table_row < op.count;
        for (int64_t j = (int64_t)thread; j < n; j += (int64_t)threads) {
            T x = is_here ? ddp__cuda_layer_load<T>(op.in, table_row * n + j) : 0;
            ddp__cuda_layer_store<T>(op.out, (begin + (int64_t)i) * n + j, x);
        }
    }
};
template <class T> static ddp_result ddp__cuda_lookup(const ddp_lookup *op) {
    return ddp__cuda_launch_indexed(op, op->index, ddp__cuda_launch_chunks<ddp__cuda_lookup_row<T>>);
}

/* Its backward: gradient of the table += gradients of its rows. The first row with a token adds all rows with
   this token, in order. These are the additions of the CPU. */
template <class T> struct ddp__cuda_lookup_backward_row : ddp__cuda_indexed_rows<ddp_lookup> {
    DDP__HD void chunk(size_t row, size_t thread, size_t threads) const {
        int64_t i = (int64_t)row, n = op.columns, table_row = index[i] - op.first;
        if (table_row < 0 || table_row >= op.count) return;
        for (int64_t k = 0; k < i; k++)
            if (index[k] == index[i]) return;
        for (int64_t j = (int64_t)thread; j < n; j += (int64_t)threads) {
            T x = ddp__cuda_layer_load<T>(op.out, table_row * n + j);
            for (int64_t k = i; k < count; k++)
                if (index[k] == index[i]) x += ddp__cuda_layer_load<T>(op.in, (begin + k) * n + j);
            ddp__cuda_layer_store<T>(op.out, table_row * n + j, x);
        }
    }
};
template <class T> static ddp_result ddp__cuda_lookup_backward(const ddp_lookup *op) {
    return ddp__cuda_launch_indexed(op, op->index, ddp__cuda_launch_chunks<ddp__cuda_lookup_backward_row<T>>);
}
#endif

//== layers: rows and columns ============================================================== >>impl-layer-rows
/* Layer kernels with sums: norms, the loss, and sums of columns. A team of threads of a warp computes a row
   (ddp__cuda_launch_rows). Each lane adds its elements in f64, then the lanes are joined in halves:

       row        0 1 2 ... 31 | 32 33 ... 63 | 64 ...       lane e: columns e, e + 32, e + 64 ...
       lanes      0   1   ...   15   16   ...   31           partial(): sums of a lane
                  0+16  1+17  ...  15+31                     join(): 16 sums, then 8, 4, 2, 1
                  all lanes have the sums of the row         finish(): lane e writes columns e, e + 32 ... */
#if defined(DDP_TENSOR_KERNELS_H)

/* Base of row kernels with N sums. */
template <int N, int THREADS, class Part> struct ddp__cuda_layer_rows : Part {
    enum { CELLS = 1, TEAM = THREADS };
    typedef ddp__cuda_sums<N> value;
    static DDP__HD value join(value a, const value &b) {
        for (int i = 0; i < N; i++) a.at[i] += b.at[i];
        return a;
    }
    DDP__HD size_t owner(size_t) const { return 0; }
    DDP__HD void flush(const int64_t *, size_t) const {}
};
template <class Op> struct ddp__cuda_plain_rows { Op op; };
template <class F, class Op> static ddp_result ddp__cuda_launch_sums(const Op &op, int64_t count) {
    F f = {};
    f.op = op;
    return ddp__cuda_launch_rows(f, (size_t)count, ddp__cuda_this_thread.stream, DDP__CUDA_LAYER);
}

/* Sums of columns, with a team of 8 threads per column: lane e adds rows e, e + 8 ... Sums of dy; or, with
   stats, of dy * h, where h is x normalized (norm_backward). The teams of four neighbouring columns read
   cache lines together. */
struct ddp__cuda_column_sums {
    int64_t rows, columns;
    const void *dy, *x, *stats;
    int accumulate, also_dy; /* also_dy: 1 = writes the sums of dy to the next row of out */
    void *out;
};
template <class T>
struct ddp__cuda_layer_columns : ddp__cuda_layer_rows<2, 8, ddp__cuda_plain_rows<ddp__cuda_column_sums>> {
    typedef ddp__cuda_sums<2> value;
    DDP__HD value partial(size_t column, int lane, int64_t *) const {
        const ddp__cuda_column_sums &op = this->op;
        value v = {};
        for (int64_t i = lane; i < op.rows; i += 8) {
            int64_t at = i * op.columns + (int64_t)column;
            T d = ddp__cuda_layer_load<T>(op.dy, at);
            v.at[1] += (double)d;
            if (op.stats)
                d *= (ddp__cuda_layer_load<T>(op.x, at) - ddp__cuda_layer_load<T>(op.stats, 2 * i))
                     * ddp__cuda_layer_load<T>(op.stats, 2 * i + 1);
            v.at[0] += (double)d;
        }
        return v;
    }
    DDP__HD void finish(size_t column, const value &v, int lane, int64_t *) const {
        const ddp__cuda_column_sums &op = this->op;
        int64_t to = (int64_t)column + lane * op.columns;
        if (lane <= op.also_dy)
            ddp__cuda_layer_store<T>(
                op.out, to,
                (T)(v.at[lane] + (op.accumulate ? (double)ddp__cuda_layer_load<T>(op.out, to) : 0)));
    }
};
template <class T>
static ddp_result ddp__cuda_sum_rows(int64_t rows, int64_t columns, const void *x, int accumulate,
                                     void *out) {
    const ddp__cuda_column_sums op = {rows, columns, x, NULL, NULL, accumulate, 0, out};
    return ddp__cuda_launch_sums<ddp__cuda_layer_columns<T>>(op, columns);
}

/* Layer norm and RMS norm. Three sums: the count, the mean, and the sum of squared deviations. Two parts are
   merged as in Chan et al. (1979). */
template <class T> struct ddp__cuda_layer_norm : ddp__cuda_layer_rows<3, 32, ddp__cuda_plain_rows<ddp_norm>> {
    DDP__HD double x(size_t row, int64_t j) const {
        return (double)ddp__cuda_layer_load<T>(op.x, (int64_t)row * op.columns + j);
    }
    DDP__HD value partial(size_t row, int lane, int64_t *) const {
        value v = {};
        for (int64_t j = lane; j < op.columns; j += 32) {
            v.at[0] += 1;
            v.at[1] += op.rms ? 0 : x(row, j);
        }
        if (v.at[0] > 0) v.at[1] /= v.at[0];
        for (int64_t j = lane; j < op.columns; j += 32)
            v.at[2] += (x(row, j) - v.at[1]) * (x(row, j) - v.at[1]);
        return v;
    }
    static DDP__HD value join(value a, const value &b) {
        double n = a.at[0] + b.at[0], difference = b.at[1] - a.at[1];
        if (b.at[0] <= 0) return a;
        a.at[1] += difference * (b.at[0] / n);
        a.at[2] += b.at[2] + difference * difference * (a.at[0] * b.at[0] / n);
        a.at[0] = n;
        return a;
    }
    DDP__HD void finish(size_t row, const value &v, int lane, int64_t *) const {
        double scale = 1 / sqrt(v.at[2] / (double)op.columns + op.eps);
        if (lane < 2)
            ddp__cuda_layer_store<T>(op.stats, 2 * (int64_t)row + lane, (T)(lane ? scale : v.at[1]));
        for (int64_t j = lane; j < op.columns; j += 32)
            ddp__cuda_layer_store<T>(op.y, (int64_t)row * op.columns + j,
                                     (T)((x(row, j) - v.at[1]) * scale)
                                             * ddp__cuda_layer_load<T>(op.weight, j)
                                         + (op.bias ? ddp__cuda_layer_load<T>(op.bias, j) : 0));
    }
};
template <class T> static ddp_result ddp__cuda_norm(const ddp_norm *op) {
    return ddp__cuda_launch_sums<ddp__cuda_layer_norm<T>>(*op, op->rows);
}

/* g: the gradient of the normalized x. h: x normalized. dx = scale * (g - mean(g) - h * mean(g * h)). */
template <class T>
struct ddp__cuda_layer_norm_backward : ddp__cuda_layer_rows<2, 32, ddp__cuda_plain_rows<ddp_norm_backward>> {
    DDP__HD T g(int64_t row, int64_t j) const {
        return ddp__cuda_layer_load<T>(op.dy, row * op.columns + j) * ddp__cuda_layer_load<T>(op.weight, j);
    }
    DDP__HD T h(int64_t row, int64_t j) const {
        return (ddp__cuda_layer_load<T>(op.x, row * op.columns + j)
                - ddp__cuda_layer_load<T>(op.stats, 2 * row))
               * ddp__cuda_layer_load<T>(op.stats, 2 * row + 1);
    }
    DDP__HD value partial(size_t row, int lane, int64_t *) const {
        value v = {};
        int64_t i = (int64_t)row;
        for (int64_t j = lane; j < op.columns; j += 32) {
            v.at[0] += op.rms ? 0 : (double)g(i, j);
            v.at[1] += (double)g(i, j) * (double)h(i, j);
        }
        return v;
    }
    DDP__HD void finish(size_t row, const value &v, int lane, int64_t *) const {
        int64_t i = (int64_t)row;
        T mean_g = (T)(v.at[0] / (double)op.columns), mean_gh = (T)(v.at[1] / (double)op.columns);
        T scale = ddp__cuda_layer_load<T>(op.stats, 2 * i + 1);
        for (int64_t j = lane; j < op.columns; j += 32)
            ddp__cuda_layer_store<T>(op.dx, i * op.columns + j,
                                     scale * (g(i, j) - mean_g - h(i, j) * mean_gh));
    }
};

/* The sums come first, since dx may be dy. */
template <class T> static ddp_result ddp__cuda_norm_backward(const ddp_norm_backward *op) {
    const ddp__cuda_column_sums sums = {op->rows,  op->columns, op->dy,   op->x,
                                        op->stats, 1,           !op->rms, op->sums};
    if (op->sums) DDP_TRY(ddp__cuda_launch_sums<ddp__cuda_layer_columns<T>>(sums, op->columns));
    return op->dx ? ddp__cuda_launch_sums<ddp__cuda_layer_norm_backward<T>>(*op, op->rows) : DDP_OK;
}

/* Cross-entropy in three steps, with a reduction over ranks after the first two. A value has three numbers:
   {logit of the target, sum of exponentials, largest logit}.
     STEP 0   loss_max   the largest logit of the row
     STEP 1   loss_sum   the target's logit, found by one lane of one rank, and the sum of exponentials
     STEP 2   loss_end   one lane reads all three for the others; max[i] becomes the loss */
template <class T, int STEP>
struct ddp__cuda_layer_loss : ddp__cuda_layer_rows<3, 32, ddp__cuda_indexed_rows<ddp_loss>> {
    typedef ddp__cuda_sums<3> value;
    static DDP__HD value join(const value &a, const value &b) {
        return {{a.at[0] + b.at[0], a.at[1] + b.at[1], b.at[2] > a.at[2] ? b.at[2] : a.at[2]}};
    }
    DDP__HD value partial(size_t row, int lane, int64_t *) const {
        const ddp_loss &op = this->op;
        int64_t i = this->begin + (int64_t)row, target = this->index[row] - op.first;
        value v = {{0, 0, -(double)INFINITY}};
        if (STEP == 2) {
            if (lane != 0) return v;
            v.at[0] = (double)ddp__cuda_layer_load<T>(op.sums, i);
            v.at[1] = (double)ddp__cuda_layer_load<T>(op.sums, op.rows + i);
            v.at[2] = (double)ddp__cuda_layer_load<T>(op.max, i);
            return v;
        }
        if (this->index[row] == op.ignore) return v;
        T max = STEP == 1 ? ddp__cuda_layer_load<T>(op.max, i) : 0;
        for (int64_t j = lane; j < op.count; j += 32) {
            T x = ddp__cuda_layer_load<T>(op.logits, i * op.columns + j) - max, e = exp(x);
            if ((double)x > v.at[2]) v.at[2] = (double)x;
            if (STEP == 0) continue;
            v.at[0] += j == target ? (double)x : 0;
            v.at[1] += (double)e;
            if (op.dlogits) ddp__cuda_layer_store<T>(op.dlogits, i * op.columns + j, e);
        }
        return v;
    }
    DDP__HD void finish(size_t row, const value &v, int lane, int64_t *) const {
        const ddp_loss &op = this->op;
        int64_t i = this->begin + (int64_t)row, at = i * op.columns, target = this->index[row] - op.first;
        if (STEP == 0 && lane == 0) ddp__cuda_layer_store<T>(op.max, i, (T)v.at[2]);
        if (STEP == 1 && lane < 2) ddp__cuda_layer_store<T>(op.sums, lane * op.rows + i, (T)v.at[lane]);
        if (STEP != 2) return;
        /* log_sum: of exp(logit - max). log_z: of exp(logit), which z_loss keeps small. */
        int ignored = this->index[row] == op.ignore;
        int64_t words = ignored ? 0 : op.count;
        double log_sum = log(v.at[1]), log_z = v.at[2] + log_sum;
        double factor = op.scale * (1 + 2 * op.z_loss * log_z) / v.at[1];
        T loss = (T)(log_sum - v.at[0] + (op.z_loss > 0 ? op.z_loss * log_z * log_z : 0));
        if (ignored) loss = 0;
        if (lane == 0) ddp__cuda_layer_store<T>(op.max, i, loss);
        if (lane == 0 && op.losses) ddp__cuda_layer_store<T>(op.losses, i, loss);
        for (int64_t j = lane; j < op.columns && op.dlogits; j += 32) {
            T d = j < words ? ddp__cuda_layer_load<T>(op.dlogits, at + j) * (T)factor : 0;
            if (j == target && j < words) d -= (T)op.scale;
            ddp__cuda_layer_store<T>(op.dlogits, at + j, d);
        }
    }
};
template <class T, int STEP> static ddp_result ddp__cuda_loss(const ddp_loss *op) {
    return ddp__cuda_launch_indexed(op, op->targets, ddp__cuda_launch_rows<ddp__cuda_layer_loss<T, STEP>>);
}
template <class T> static ddp_result ddp__cuda_loss_max(const ddp_loss *op) {
    return ddp__cuda_loss<T, 0>(op);
}
template <class T> static ddp_result ddp__cuda_loss_sum(const ddp_loss *op) {
    return ddp__cuda_loss<T, 1>(op);
}

/* The host waits for the total. */
template <class T> static ddp_result ddp__cuda_loss_end(const ddp_loss *op) {
    T total = 0;
    DDP_TRY((ddp__cuda_loss<T, 2>(op)));
    if (!op->total) return DDP_OK;
    ddp_result result = ddp__cuda_sum_rows<T>(op->rows, 1, op->max, 0, op->sums);
    ddp_device_cuda()->copy(&total, op->sums, sizeof total);
    *op->total = (double)total;
    return result;
}
#endif

//== streams and events of a group ======================================================== >>impl-streams
/* The part of ddp_device_cuda() that belongs to a group: its device, its compute and communication streams,
   and events between them. ddp.h calls these functions around every call on the group. */

/* Arguments of ddp_cuda_group_create for the open functions of the device and the backend. */
typedef struct ddp__cuda_open_args {
    ddp_group *control;
    int device;
    cudaStream_t stream, comm_stream; /* comm_stream 0 = the group creates one */
    void *comm;                       /* the user's ncclComm_t, or NULL */
} ddp__cuda_open_args;

/* State of ddp_device_cuda() per group. */
typedef struct ddp__cuda_streams {
    int device;
    cudaStream_t stream[3]; /* by ddp_stream_kind; COPY is 0 until its first use */
    int owns_comm;
    void *cublaslt; /* state of cuBLASLt; NULL until the first product */
    void (*close_cublaslt)(ddp_group *group, void *cublaslt);
    ddp_saved_error open_failure; /* failure of opening. The backend opens next and reports it to all ranks */
} ddp__cuda_streams;

/* Memory of ddp_group_alloc, in a list per group. */
typedef struct ddp__cuda_region {
    struct ddp__cuda_region *next;
    void *memory;
#if !defined(DDP_NO_NCCL)
    void *handle; /* of ncclCommRegister; NULL = not registered */
#if DDP__NCCL_VERSION >= 22700
    ncclWindow_t window; /* NULL = none. NCCL writes to this address, so it must live as long as the region */
#endif
#endif
} ddp__cuda_region;

/* Removes the region with this memory from the list that begins at *link. */
static ddp__cuda_region *ddp__cuda_region_remove(ddp__cuda_region **link, const void *memory) {
    while ((*link)->memory != memory) link = &(*link)->next;
    ddp__cuda_region *region = *link;
    *link = region->next;
    return region;
}

static ddp__cuda_streams *ddp__cuda_streams_of(const ddp_group *group) {
    return (ddp__cuda_streams *)ddp_group_device_state(group);
}

static ddp_result ddp__cuda_group_fail(const ddp_group *group, cudaError_t error, const char *call) {
    char text[96];
    if (error == cudaSuccess) return DDP_OK;
    snprintf(text, sizeof text, "rank %d/%d group=%s", ddp_rank(group), ddp_world_size(group),
             ddp_group_name(group));
    return ddp__cuda_fail(error, text, call);
}

/* Opens the device for a group. A split uses its parent's device and compute stream. A group that
   ddp_cuda_group_create did not create uses the thread's current device and stream. */
static ddp_result ddp__cuda_device_open(ddp_group *group, ddp_group *parent, void **state) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    const ddp__cuda_streams *parent_streams = parent ? ddp__cuda_streams_of(parent) : NULL;
    const ddp__cuda_open_args *args = parent_streams ? NULL : ddp__cuda_this_thread.args;
    ddp__cuda_streams *streams = (ddp__cuda_streams *)ddp_host_alloc(group, sizeof *streams);
    ddp_result result;
    *state = streams;
    if (!streams) return DDP_ERR_NO_MEMORY;
    const char *function = "creating the group";
    streams->stream[DDP_STREAM_COMPUTE] = ddp__cuda_this_thread.stream;
    if (args) {
        streams->device = args->device;
        streams->stream[DDP_STREAM_COMPUTE] = args->stream;
        streams->stream[DDP_STREAM_COMM] = args->comm_stream;
    }
    if (parent_streams) {
        streams->device = parent_streams->device;
        streams->stream[DDP_STREAM_COMPUTE] = parent_streams->stream[DDP_STREAM_COMPUTE];
    }
    if (parent_streams || args)
        result = ddp__cuda_fail(cuda->set_device(streams->device), function, "cudaSetDevice");
    else
        result = ddp__cuda_fail(cuda->get_device(&streams->device), function, "cudaGetDevice");
    if (result == DDP_OK && !streams->stream[DDP_STREAM_COMM]) {
        result = ddp__cuda_fail(cuda->stream_create(&streams->stream[DDP_STREAM_COMM], 1), function,
                                "cudaStreamCreateWithPriority");
        streams->owns_comm = result == DDP_OK;
    }
    ddp_error_save(&streams->open_failure, result);
    if (result == DDP_OK || parent_streams || args) return DDP_OK;
    ddp_host_free(group, streams);
    *state = NULL;
    return ddp_fail_in(DDP_ERR_ENGINE, "ddp_group_create", group, "%s", ddp_last_error());
}

static void ddp__cuda_device_close(ddp_group *group, void *state) {
    ddp__cuda_streams *streams = (ddp__cuda_streams *)state;
    if (streams->owns_comm) DDP__CUDA_RUNTIME->stream_destroy(streams->stream[DDP_STREAM_COMM]);
    if (streams->stream[DDP_STREAM_COPY]) DDP__CUDA_RUNTIME->stream_destroy(streams->stream[DDP_STREAM_COPY]);
    if (streams->cublaslt) streams->close_cublaslt(group, streams->cublaslt);
    ddp_host_free(group, streams);
}

static ddp_result ddp__cuda_device_use_stream(ddp_group *group, ddp_stream_kind kind) {
    ddp__cuda_streams *streams = ddp__cuda_streams_of(group);
    DDP_TRY(ddp__cuda_group_fail(group, DDP__CUDA_RUNTIME->set_device(streams->device), "cudaSetDevice"));
    if (kind == DDP_STREAM_COPY && !streams->stream[kind])
        DDP_TRY(ddp__cuda_group_fail(group, DDP__CUDA_RUNTIME->stream_create(&streams->stream[kind], 0),
                                     "cudaStreamCreateWithPriority"));
    ddp__cuda_this_thread.stream = streams->stream[kind];
    return DDP_OK;
}

static ddp_result ddp__cuda_device_check(ddp_group *) { return ddp_cuda_check(); }

static ddp_result ddp__cuda_device_event_create(ddp_group *group, void **event) {
    cudaEvent_t created = NULL;
    *event = NULL;
    DDP_TRY(ddp__cuda_group_fail(group, DDP__CUDA_RUNTIME->set_device(ddp__cuda_streams_of(group)->device),
                                 "cudaSetDevice"));
    DDP_TRY(
        ddp__cuda_group_fail(group, DDP__CUDA_RUNTIME->event_create(&created), "cudaEventCreateWithFlags"));
    *event = created;
    return DDP_OK;
}

static void ddp__cuda_device_event_destroy(ddp_group *, void *event) {
    DDP__CUDA_RUNTIME->event_destroy((cudaEvent_t)event);
}

static ddp_result ddp__cuda_device_event_record(ddp_group *group, ddp_stream_kind kind, void *event) {
    return ddp__cuda_group_fail(
        group, DDP__CUDA_RUNTIME->event_record((cudaEvent_t)event, ddp__cuda_streams_of(group)->stream[kind]),
        "cudaEventRecord");
}

static ddp_result ddp__cuda_device_event_wait(ddp_group *group, ddp_stream_kind kind, void *event) {
    return ddp__cuda_group_fail(
        group,
        DDP__CUDA_RUNTIME->stream_wait_event(ddp__cuda_streams_of(group)->stream[kind], (cudaEvent_t)event),
        "cudaStreamWaitEvent");
}

/* Queries an event. During a capture nothing runs, and a query would invalidate the capture. */
static ddp_result ddp__cuda_device_event_test(ddp_group *group, void *event, int *done) {
    int capturing = 0;
    cudaError_t error;
    *done = 0;
    DDP_TRY(ddp__cuda_group_fail(
        group,
        DDP__CUDA_RUNTIME->stream_capturing(ddp__cuda_streams_of(group)->stream[DDP_STREAM_COMM], &capturing),
        "cudaStreamIsCapturing"));
    if (capturing)
        return ddp_fail_in(
            DDP_ERR_INVALID, "ddp_test", group,
            "the stream is being captured into a CUDA graph, so no event completes; end the capture first");
    error = DDP__CUDA_RUNTIME->event_query((cudaEvent_t)event);
    *done = error != cudaErrorNotReady; /* ddp_wait reports a failure */
    return *done ? ddp__cuda_group_fail(group, error, "cudaEventQuery") : DDP_OK;
}

//== device functions ====================================================================== >>impl-device
/* The functions of ddp_device_cuda(), on the stream and current device of the calling thread. See >>spi. */

/* Allocates memory by cudaMalloc or cudaHostAlloc, on the device of group; NULL = the current device. call:
   name for the error. */
static ddp_result ddp__cuda_alloc_by(cudaError_t (*alloc)(void **out, size_t size_bytes), ddp_group *group,
                                     size_t size_bytes, void **out, const char *function, const char *call) {
    const ddp__cuda_streams *streams = group ? ddp__cuda_streams_of(group) : NULL;
    char text[64];
    *out = NULL;
    if (streams) DDP__CUDA_TRY(function, "cudaSetDevice", DDP__CUDA_RUNTIME->set_device(streams->device));
    snprintf(text, sizeof text, "%s of %llu bytes", call, (unsigned long long)size_bytes);
    cudaError_t error = alloc(out, size_bytes ? size_bytes : 1);
    if (error != cudaSuccess) *out = NULL;
    return ddp__cuda_fail(error, function, text);
}

static ddp_result ddp__cuda_device_alloc(ddp_group *group, size_t size_bytes, void **out) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    const char *function = "ddp_device_cuda alloc";
    cudaStream_t stream = ddp__cuda_this_thread.stream;
    DDP_TRY(ddp__cuda_alloc_by(cuda->malloc, group, size_bytes, out, function, "cudaMalloc"));
    ddp_result result = ddp__cuda_fail(cuda->memset_async(*out, 0, size_bytes ? size_bytes : 1, stream),
                                       function, "cudaMemsetAsync");
    if (result == DDP_OK)
        result = ddp__cuda_fail(cuda->synchronize(stream), function, "cudaStreamSynchronize");
    if (result == DDP_OK) return DDP_OK;
    cuda->free(*out);
    *out = NULL;
    return result;
}

static void ddp__cuda_device_free(ddp_group *, void *memory) {
    if (memory) ddp__cuda_save_error(DDP__CUDA_RUNTIME->free(memory), "ddp_device_cuda free", "cudaFree");
}

static ddp_result ddp__cuda_device_alloc_pinned(ddp_group *group, size_t size_bytes, void **out) {
    return ddp__cuda_alloc_by(DDP__CUDA_RUNTIME->host_alloc, group, size_bytes, out,
                              "ddp_device_cuda alloc_pinned", "cudaHostAlloc");
}

static void ddp__cuda_device_free_pinned(void *memory) {
    if (memory)
        ddp__cuda_save_error(DDP__CUDA_RUNTIME->host_free(memory), "ddp_device_cuda free_pinned",
                             "cudaFreeHost");
}

/* Copies in stream order. If one side is host memory, waits for the copy: the CPU may use it on return. */
static void ddp__cuda_device_copy(void *dst, const void *src, size_t size_bytes) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    const char *function = "ddp_device_cuda copy";
    cudaStream_t stream = ddp__cuda_this_thread.stream;
    int dst_on_device = 0, src_on_device = 0;
    if (size_bytes == 0) return;
    ddp_result result = ddp__cuda_fail(cuda->is_device_memory(dst, &dst_on_device), function,
                                       "cudaPointerGetAttributes");
    if (result == DDP_OK)
        result = ddp__cuda_fail(cuda->is_device_memory(src, &src_on_device), function,
                                "cudaPointerGetAttributes");
    if (result == DDP_OK)
        result = ddp__cuda_fail(cuda->memcpy_async(dst, src, size_bytes, cudaMemcpyDefault, stream), function,
                                "cudaMemcpyAsync");
    if (result == DDP_OK && !(dst_on_device && src_on_device))
        result = ddp__cuda_fail(cuda->synchronize(stream), function, "cudaStreamSynchronize");
    ddp__cuda_save_failure(result);
}

static void ddp__cuda_device_copy_async(void *dst, const void *src, size_t size_bytes) {
    if (size_bytes)
        ddp__cuda_save_error(DDP__CUDA_RUNTIME->memcpy_async(dst, src, size_bytes, cudaMemcpyDefault,
                                                             ddp__cuda_this_thread.stream),
                             "ddp_device_cuda copy_async", "cudaMemcpyAsync");
}

static void ddp__cuda_device_fill_zero(void *dst, size_t size_bytes) {
    if (size_bytes)
        ddp__cuda_save_error(
            DDP__CUDA_RUNTIME->memset_async(dst, 0, size_bytes, ddp__cuda_this_thread.stream),
            "ddp_device_cuda fill_zero", "cudaMemsetAsync");
}

/* One or more ranges. A failure is stored. */
static void ddp__cuda_device_convert(const ddp_copy_range *ranges, int range_count, ddp_dtype dst_dtype,
                                     ddp_dtype src_dtype, float factor, const char *function) {
    const ddp__cuda_ranges_call call = {
        ranges, range_count, dst_dtype, src_dtype, factor, ddp__cuda_this_thread.stream, function};
    ddp__cuda_save_failure(ddp__cuda_copy_ranges(&call));
}

static void ddp__cuda_device_cast(void *dst, ddp_dtype dst_dtype, const void *src, ddp_dtype src_dtype,
                                  size_t count) {
    const ddp_copy_range range = {dst, src, count};
    cudaError_t error;
    if (count == 0 || (dst == src && dst_dtype == src_dtype)) return;
    if (dst_dtype != src_dtype) {
        ddp__cuda_device_convert(&range, 1, dst_dtype, src_dtype, 1.0f, "ddp_device_cuda cast");
        return;
    }
    error = DDP__CUDA_RUNTIME->memcpy_async(dst, src, count * ddp_dtype_size(dst_dtype),
                                            cudaMemcpyDeviceToDevice, ddp__cuda_this_thread.stream);
    ddp__cuda_save_error(error, "ddp_device_cuda cast", "cudaMemcpyAsync");
}

static void ddp__cuda_device_copy_many(const ddp_copy_range *ranges, int range_count, ddp_dtype dst_dtype,
                                       ddp_dtype src_dtype) {
    ddp__cuda_device_convert(ranges, range_count, dst_dtype, src_dtype, 1.0f, "ddp_device_cuda copy_many");
}

static void ddp__cuda_device_add(void *dst, const void *left, const void *right, size_t count,
                                 ddp_dtype dtype) {
    const void *sources[2] = {left, right};
    ddp__cuda_tree_call call = {
        &dst, 1, sources, 2, count, DDP_OP_SUM, 1, ddp__cuda_this_thread.stream, "ddp_device_cuda add",
        0,    0, dtype};
    ddp__cuda_save_failure(ddp__cuda_tree_reduce(&call, dtype));
}

static void ddp__cuda_device_scale(const ddp_tensor *tensors, int tensor_count, float factor) {
    ddp__cuda_scale_list(tensors, tensor_count, factor, NULL);
}

static void ddp__cuda_device_divide(const ddp_tensor *tensors, int tensor_count, uint64_t divisor) {
    const ddp__cuda_divisor by = ddp__cuda_divisor_of(divisor);
    if (by.n == 1) return;
    ddp__cuda_save_failure(ddp__cuda_each_dtype(tensors, tensor_count, [&](ddp_dtype dtype) {
        return ddp__cuda_dispatch<DDP__CUDA_FLOATS, DDP_I8, DDP_U8, DDP_I32, DDP_I64, DDP_U64>(
            dtype, [&](auto D) {
                const ddp__cuda_quotients<decltype(D)::value> f = {NULL, NULL, by};
                return ddp__cuda_in_place(f, dtype, tensors, tensor_count, "ddp_device_cuda divide");
            });
    }));
}

static void ddp__cuda_device_sum_squares(ddp_exact_sum *sums, int sum_stride, const ddp_tensor *tensors,
                                         int tensor_count) {
    ddp__cuda_save_failure(ddp__cuda_sum_squares<0>(tensors, tensor_count, 1.0f, sums, sum_stride,
                                                    ddp__cuda_this_thread.stream,
                                                    "ddp_device_cuda sum_squares"));
}

//== products by cuBLASLt ================================================================ >>impl-products
/* ddp_cuda_gemm, and the product of the layers of ddp_tensor.h. A group caches its choice for each of the
   last DDP__CUDA_LT_ALGORITHMS kinds of products: an algorithm of cuBLASLt that includes the epilogue, or one
   without it, followed by kernels of this section. */

#if defined(DDP_USE_CUBLASLT)
#define DDP__CUDA_LT_ALGORITHMS 64
#define DDP__CUDA_LT_TABLE_MAX 1024
#define DDP__CUDA_LT_QUERY_MAX 32
#define DDP__CUDA_LT_ALIGN 16 /* bytes: a larger alignment does not change the algorithm */

/* The choice for products of one kind. The key: sizes, strides, flags, alignment. */
typedef struct ddp__cuda_algorithm {
    int64_t key[8];
    ddp_cuda_gemm_algo algo;
} ddp__cuda_algorithm;

/* The products of a table that are for this GPU and this version of cuBLASLt. */
typedef struct ddp__cuda_lt_table {
    int count;
    ddp__cuda_algorithm products[DDP__CUDA_LT_TABLE_MAX];
} ddp__cuda_lt_table;

/* State of a group. */
typedef struct ddp__cuda_cublaslt {
    cublasLtHandle_t handle;
    void *workspace;
    ddp__cuda_lt_table *table; /* of ddp_cuda_gemm_load; NULL = none */
    int next;                  /* the entry that the next new kind replaces */
    ddp__cuda_algorithm algorithms[DDP__CUDA_LT_ALGORITHMS];
} ddp__cuda_cublaslt;

/* One product, from the check of its desc to its launch. */
typedef struct ddp__cuda_product {
    const char *function; /* the public function, for errors */
    ddp_group *group;
    ddp_cuda_gemm_desc desc; /* with all defaults filled in */
    cudaStream_t stream;
    ddp__cuda_cublaslt *state;
    uint32_t align; /* bytes: the alignment that all arrays have */
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c;
} ddp__cuda_product;

static ddp_result ddp__cuda_lt_result(const ddp__cuda_product *p, cublasStatus_t status, const char *call) {
    const ddp_cuda_gemm_desc *d = &p->desc;
    if (status == CUBLAS_STATUS_SUCCESS) return DDP_OK;
    return ddp_fail(status == CUBLAS_STATUS_ALLOC_FAILED ? DDP_ERR_NO_MEMORY : DDP_ERR_ENGINE,
                    "rank %d/%d group=%s %s %s m=%lld n=%lld k=%lld epilogue=%d: %s: %s (%s)",
                    ddp_rank(p->group), ddp_world_size(p->group), ddp_group_name(p->group), p->function,
                    ddp_dtype_name(d->dtype), (long long)d->m, (long long)d->n, (long long)d->k,
                    (int)d->epilogue, call, cublasLtGetStatusString(status), cublasLtGetStatusName(status));
}

static void ddp__cuda_cublaslt_close(ddp_group *group, void *state) {
    ddp__cuda_cublaslt *p = (ddp__cuda_cublaslt *)state;
    ddp__cuda_device_free(group, p->workspace);
    if (p->handle) cublasLtDestroy(p->handle);
    ddp_host_free(group, p->table);
    ddp_host_free(group, p);
}

/* Creates the group's state, without the workspace, or the part that an earlier failure left out. */
static ddp_result ddp__cuda_cublaslt_open(ddp__cuda_product *p) {
    ddp__cuda_streams *streams = ddp__cuda_streams_of(p->group);
    if (!streams->cublaslt) streams->cublaslt = ddp_host_alloc(p->group, sizeof *p->state);
    p->state = (ddp__cuda_cublaslt *)streams->cublaslt;
    if (!p->state) return DDP_ERR_NO_MEMORY;
    streams->close_cublaslt = ddp__cuda_cublaslt_close;
    if (p->state->handle) return DDP_OK;
    cublasStatus_t status = cublasLtCreate(&p->state->handle);
    if (status != CUBLAS_STATUS_SUCCESS) p->state->handle = NULL;
    return ddp__cuda_lt_result(p, status, "cublasLtCreate");
}

static ddp_result ddp__cuda_product_group(const char *function, const ddp_group *group) {
    if (group && ddp_group_device(group) == ddp_device_cuda()) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID, "%s: the group has no GPUs; pass one of ddp_cuda_group_create",
                    function);
}

/* Fills in the defaults of the desc and checks it. */
static ddp_result ddp__cuda_product_check(ddp__cuda_product *p) {
    ddp_cuda_gemm_desc *d = &p->desc;
    const struct {
        const char *name;
        const void *array;
        int64_t rows, columns, *step;
    } matrices[3] = {
        {"a", d->a, d->m, d->k, &d->lda},
        {"b", d->b, d->k, d->n, &d->ldb},
        {"c", d->c, d->m, d->n, &d->ldc},
    };
    const int transposed[3] = {d->trans_a, d->trans_b, 0};
    const char *missing = NULL;
    if (d->dtype == DDP_DTYPE_DEFAULT) d->dtype = DDP_F32;
    if (d->m < 0 || d->n < 0 || d->k < 0 || !ddp_is_float(d->dtype))
        return ddp_fail(DDP_ERR_INVALID,
                        "%s: m=%lld n=%lld k=%lld dtype=%s; use sizes of 0 or more and f32, f64, f16 or bf16",
                        p->function, (long long)d->m, (long long)d->n, (long long)d->k,
                        ddp_dtype_name(d->dtype));
    if ((unsigned)d->epilogue > DDP_CUDA_EPILOGUE_BIAS_GRAD)
        return ddp_fail(DDP_ERR_INVALID, "%s: epilogue=%d is invalid; use a ddp_cuda_epilogue", p->function,
                        (int)d->epilogue);
    for (int i = 0; i < 3; i++) {
        int64_t columns = transposed[i] ? matrices[i].rows : matrices[i].columns, *step = matrices[i].step;
        if (*step == 0) *step = columns;
        if (*step < columns)
            return ddp_fail(DDP_ERR_INVALID,
                            "%s: ld%s=%lld is below %lld, the elements of a row; 0 = no gaps", p->function,
                            matrices[i].name, (long long)*step, (long long)columns);
        if (!matrices[i].array && matrices[i].rows && matrices[i].columns) missing = matrices[i].name;
    }
    int uses_bias = d->epilogue == DDP_CUDA_EPILOGUE_BIAS || d->epilogue == DDP_CUDA_EPILOGUE_GELU;
    int uses_aux = d->epilogue == DDP_CUDA_EPILOGUE_GELU || d->epilogue == DDP_CUDA_EPILOGUE_GELU_GRAD;
    if (!uses_bias) d->bias = NULL;
    if (!uses_aux) d->aux = NULL;
    if (d->epilogue != DDP_CUDA_EPILOGUE_BIAS_GRAD) d->bias_grad = NULL;
    if (uses_bias && !d->bias && d->n) missing = "bias";
    if (uses_aux && !d->aux && d->m && d->n) missing = "aux";
    if (d->epilogue == DDP_CUDA_EPILOGUE_BIAS_GRAD && !d->bias_grad && d->m) missing = "bias_grad";
    if (missing)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s is NULL, and this product needs it", p->function, missing);
    return DDP_OK;
}

/* Begins a product. Only its desc is checked. */
static ddp_result ddp__cuda_product_begin(ddp__cuda_product *p, const char *function, ddp_group *group,
                                          const ddp_cuda_gemm_desc *desc, cudaStream_t stream) {
    DDP_TRY(ddp__cuda_product_group(function, group));
    if (!desc) return ddp_fail(DDP_ERR_INVALID, "%s: desc is NULL", function);
    memset(p, 0, sizeof *p);
    p->function = function;
    p->group = group;
    p->desc = *desc;
    p->stream = stream;
    p->state = (ddp__cuda_cublaslt *)ddp__cuda_streams_of(group)->cublaslt;
    p->align = DDP__CUDA_LT_ALIGN;
    DDP_TRY(ddp__cuda_product_check(p));
    const ddp_cuda_gemm_desc *d = &p->desc;
    uintptr_t addresses = (uintptr_t)d->a | (uintptr_t)d->b | (uintptr_t)d->c | (uintptr_t)d->addend;
    addresses |= (uintptr_t)d->bias | (uintptr_t)d->bias_grad | (uintptr_t)d->aux;
    while (addresses % p->align) p->align /= 2;
    return DDP_OK;
}

/* Describes a product to cuBLASLt, which is column-major. Row-major c = op(a) op(b) equals, read by columns,
   c' = op(b)' op(a)'. So cuBLASLt's A is b and its B is a, with the same transpositions. */
static cublasStatus_t ddp__cuda_lt_describe(ddp__cuda_product *p) {
    const ddp_cuda_gemm_desc *d = &p->desc;
    cudaDataType_t type = CUDA_R_32F, scale = CUDA_R_32F;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    if (d->dtype == DDP_F16) type = CUDA_R_16F;
    if (d->dtype == DDP_BF16) type = CUDA_R_16BF;
    if (d->dtype == DDP_F32 && d->allow_tf32) compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    if (d->dtype == DDP_F64) {
        type = CUDA_R_64F;
        scale = CUDA_R_64F;
        compute = CUBLAS_COMPUTE_64F;
    }
    cublasOperation_t a = d->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t b = d->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint64_t m = (uint64_t)d->m, n = (uint64_t)d->n, k = (uint64_t)d->k;
    cublasStatus_t s = cublasLtMatmulDescInit(&p->product, compute, scale);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = d->trans_b ? cublasLtMatrixLayoutInit(&p->a, type, k, n, d->ldb)
                       : cublasLtMatrixLayoutInit(&p->a, type, n, k, d->ldb);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = d->trans_a ? cublasLtMatrixLayoutInit(&p->b, type, m, k, d->lda)
                       : cublasLtMatrixLayoutInit(&p->b, type, k, m, d->lda);
    return s == CUBLAS_STATUS_SUCCESS ? cublasLtMatrixLayoutInit(&p->c, type, n, m, d->ldc) : s;
}

/* Adds the epilogue to the description. The names are those of a column-major product: BGRADB sums its B. */
static cublasStatus_t ddp__cuda_lt_describe_epilogue(ddp__cuda_product *p, const void *bias,
                                                     const void *aux) {
    static const uint32_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                         CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
                                         CUBLASLT_EPILOGUE_BGRADB};
    const ddp_cuda_gemm_desc *d = &p->desc;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (d->epilogue == DDP_CUDA_EPILOGUE_NONE) return s;
    s = cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogues[d->epilogue],
                                       sizeof epilogues[0]);
    if (s == CUBLAS_STATUS_SUCCESS && (d->bias || d->bias_grad))
        s = cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                           sizeof bias);
    if (s == CUBLAS_STATUS_SUCCESS && d->aux)
        s = cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux,
                                           sizeof aux);
    if (s == CUBLAS_STATUS_SUCCESS && d->aux)
        s = cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &d->n,
                                           sizeof d->n);
    return s;
}

/* Returns whether cuBLASLt does not support the epilogue of a product. It then also reports an invalid
   value. */
static int ddp__cuda_lt_refuses_epilogue(const ddp__cuda_product *p, cublasStatus_t s) {
    return p->desc.epilogue != DDP_CUDA_EPILOGUE_NONE
           && (s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_ARCH_MISMATCH
               || s == CUBLAS_STATUS_INVALID_VALUE);
}

/* Queries cuBLASLt for at most `capacity` algorithms, the best first. Partial sums over k must be added in
   the workspace, in a fixed order, instead of in place in order of completion: this gives the same bits in
   every run. Returns success if *count is at least 1. */
static cublasStatus_t ddp__cuda_lt_query(ddp__cuda_product *p, int separate, ddp_cuda_gemm_algo *algos,
                                         int capacity, int *count) {
    const void *aligned = (const void *)(uintptr_t)p->align; /* only its alignment is used */
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t found[DDP__CUDA_LT_QUERY_MAX];
    uint64_t bytes = DDP_CUDA_GEMM_WORKSPACE_BYTES;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    int returned = 0;
    *count = 0;
    cublasStatus_t s = ddp__cuda_lt_describe(p);
    if (s == CUBLAS_STATUS_SUCCESS && !separate) s = ddp__cuda_lt_describe_epilogue(p, aligned, aligned);
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatmulPreferenceInit(&preference);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                 &bytes, sizeof bytes);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                 &scheme, sizeof scheme);
    for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
         i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES && s == CUBLAS_STATUS_SUCCESS; i++)
        s = cublasLtMatmulPreferenceSetAttribute(&preference, (cublasLtMatmulPreferenceAttributes_t)i,
                                                 &p->align, sizeof p->align);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulAlgoGetHeuristic(p->state->handle, &p->product, &p->a, &p->b, &p->c, &p->c,
                                           &preference, capacity, found, &returned);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    for (int i = 0; i < returned; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        memcpy(algos[*count].data, found[i].algo.data, sizeof algos->data);
        algos[*count].separate = separate;
        ++*count;
    }
    if (*count) return CUBLAS_STATUS_SUCCESS;
    return returned ? found[0].state : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Returns whether the epilogue is always separate. cuBLASLt does not document the accuracy of its GELU, so
   F32 and F64 use that of this header. */
static int ddp__cuda_lt_is_separate(const ddp_cuda_gemm_desc *d) {
    return d->aux && ddp_dtype_size(d->dtype) >= 4;
}

/* Chooses how to compute a product. separate: 1 = without the epilogue. A failure leaves *out as it is. */
static ddp_result ddp__cuda_lt_choose(ddp__cuda_product *p, int separate, ddp_cuda_gemm_algo *out) {
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    int count;
    if (!separate) s = ddp__cuda_lt_query(p, 0, out, 1, &count);
    if (ddp__cuda_lt_refuses_epilogue(p, s)) separate = 1;
    if (separate) s = ddp__cuda_lt_query(p, 1, out, 1, &count);
    return ddp__cuda_lt_result(p, s, "cublasLtMatmulAlgoGetHeuristic");
}

/* Lists algorithms: first those that include the epilogue, then those without it. */
static ddp_result ddp__cuda_lt_list(ddp__cuda_product *p, ddp_cuda_gemm_algo *algos, int capacity,
                                    int *count) {
    int has_epilogue = p->desc.epilogue != DDP_CUDA_EPILOGUE_NONE, separate = 0;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    *count = 0;
    if (capacity > DDP__CUDA_LT_QUERY_MAX) capacity = DDP__CUDA_LT_QUERY_MAX;
    if (!ddp__cuda_lt_is_separate(&p->desc))
        s = ddp__cuda_lt_query(p, 0, algos, has_epilogue ? (capacity + 1) / 2 : capacity, count);
    if (ddp__cuda_lt_refuses_epilogue(p, s)) s = CUBLAS_STATUS_SUCCESS;
    if (s == CUBLAS_STATUS_SUCCESS && has_epilogue && *count < capacity)
        s = ddp__cuda_lt_query(p, 1, algos + *count, capacity - *count, &separate);
    *count += separate;
    return ddp__cuda_lt_result(p, s, "cublasLtMatmulAlgoGetHeuristic");
}

static void ddp__cuda_lt_key(const ddp__cuda_product *p, int64_t key[8]) {
    const ddp_cuda_gemm_desc *d = &p->desc;
    int64_t flags = (int)d->dtype << 8 | (int)d->epilogue << 4 | !!d->trans_a << 3 | !!d->trans_b << 2
                    | !!d->addend << 1 | !!d->allow_tf32;
    const int64_t all[8] = {d->m, d->n, d->k, d->lda, d->ldb, d->ldc, flags, p->align};
    memcpy(key, all, sizeof all);
}

static ddp__cuda_algorithm *ddp__cuda_lt_lookup(ddp__cuda_algorithm *list, int count, const int64_t key[8]) {
    for (int i = 0; i < count; i++)
        if (memcmp(list[i].key, key, sizeof list[i].key) == 0) return &list[i];
    return NULL;
}

/* Finds the cached choice for a product. Otherwise takes that of the table, or queries one. */
static ddp_result ddp__cuda_lt_find(ddp__cuda_product *p, ddp__cuda_algorithm **out) {
    ddp__cuda_cublaslt *state = p->state;
    ddp__cuda_algorithm chosen;
    memset(&chosen, 0, sizeof chosen);
    ddp__cuda_lt_key(p, chosen.key);
    *out = ddp__cuda_lt_lookup(state->algorithms, DDP__CUDA_LT_ALGORITHMS, chosen.key);
    if (*out) return DDP_OK;
    if (state->table) *out = ddp__cuda_lt_lookup(state->table->products, state->table->count, chosen.key);
    if (*out)
        chosen = **out;
    else
        DDP_TRY(ddp__cuda_lt_choose(p, ddp__cuda_lt_is_separate(&p->desc), &chosen.algo));
    *out = &state->algorithms[state->next];
    **out = chosen;
    state->next = (state->next + 1) % DDP__CUDA_LT_ALGORITHMS;
    return DDP_OK;
}

/* Enqueues a product, without its epilogue if that is separate. */
static cublasStatus_t ddp__cuda_lt_matmul(ddp__cuda_product *p, const ddp_cuda_gemm_algo *chosen) {
    const ddp_cuda_gemm_desc *d = &p->desc;
    const float f32[2] = {1, d->addend ? 1.0f : 0.0f};
    const double f64[2] = {1, d->addend ? 1.0 : 0.0};
    const void *alpha = f32, *beta = f32 + 1;
    cublasLtMatmulAlgo_t algo;
    memcpy(algo.data, chosen->data, sizeof chosen->data);
    if (d->dtype == DDP_F64) {
        alpha = f64;
        beta = f64 + 1;
    }
    cublasStatus_t s = ddp__cuda_lt_describe(p);
    if (s == CUBLAS_STATUS_SUCCESS && !chosen->separate)
        s = ddp__cuda_lt_describe_epilogue(p, d->bias ? d->bias : d->bias_grad, d->aux);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    return cublasLtMatmul(p->state->handle, &p->product, alpha, d->b, &p->a, d->a, &p->b, beta,
                          d->addend ? d->addend : d->c, &p->c, d->c, &p->c, &algo, p->state->workspace,
                          DDP_CUDA_GEMM_WORKSPACE_BYTES, p->stream);
}

/* The epilogues that compute element by element, on a product x that is in memory; NULL = zeros. c may be
   x. */
template <ddp_dtype D> struct ddp__cuda_epilogue_elements {
    typedef ddp__cuda_type<D> type;
    typedef typename type::store store;
    typedef typename type::math math;
    enum { WIDTH = 16 / sizeof(store) };
    ddp_cuda_epilogue epilogue;
    int64_t columns, step; /* step: from row to row of x and c */
    const void *x, *bias;
    void *aux, *c;
    template <int N> DDP__HD void run(size_t at) const {
        size_t row = at / (size_t)columns, column = at - row * (size_t)columns;
        size_t to = row * (size_t)step + column;
        store value[N], other[N];
        for (int i = 0; i < N; i++) value[i] = type::save(0);
        if (x) ddp__cuda_load<N>(value, x, to);
        if (bias) {
            ddp__cuda_load<N>(other, bias, column);
            DDP__UNROLL
            for (int i = 0; i < N; i++) value[i] = type::save(type::load(value[i]) + type::load(other[i]));
        }
        if (epilogue == DDP_CUDA_EPILOGUE_GELU) {
            ddp__cuda_store<N>(value, aux, at);
            DDP__UNROLL
            for (int i = 0; i < N; i++) {
                math before = type::load(value[i]);
                value[i] = type::save(before * ddp__cuda_gelu_gate(before));
            }
        }
        if (epilogue == DDP_CUDA_EPILOGUE_GELU_GRAD) {
            ddp__cuda_load<N>(other, aux, at);
            DDP__UNROLL
            for (int i = 0; i < N; i++) {
                math before = type::load(other[i]);
                math slope = ddp__cuda_gelu_slope(before, ddp__cuda_gelu_gate(before));
                value[i] = type::save(type::load(value[i]) * slope);
            }
        }
        ddp__cuda_store<N>(value, c, to);
    }
};

static ddp_result ddp__cuda_run_epilogue(const ddp__cuda_product *p, ddp_cuda_epilogue epilogue,
                                         const void *x) {
    const ddp_cuda_gemm_desc *d = &p->desc;
    return ddp__cuda_dispatch<DDP__CUDA_FLOATS>(d->dtype, [&](auto D) {
        typedef ddp__cuda_epilogue_elements<decltype(D)::value> F;
        F f = {epilogue, d->n, d->ldc, x, d->bias, d->aux, d->c};
        if (epilogue == DDP_CUDA_EPILOGUE_NONE) f.bias = NULL;
        int vectors = p->align == DDP__CUDA_LT_ALIGN && d->n % F::WIDTH == 0 && d->ldc % F::WIDTH == 0;
        return ddp__cuda_launch_elements(f, vectors ? 1 : 0, (size_t)(d->m * d->n), p->stream, p->function);
    });
}

/* partial (parts, columns): row r is the sum of rows r, r + parts, r + 2 parts ... of x, in f32 or f64. */
template <ddp_dtype D> struct ddp__cuda_partial_sums {
    typedef ddp__cuda_type<D> type;
    typedef typename type::store store;
    typedef typename type::math math;
    enum { WIDTH = 16 / sizeof(store) };
    int64_t rows, columns, step, parts;
    const void *x;
    void *partial;
    template <int N> DDP__HD void run(size_t at) const {
        int64_t part = (int64_t)at / columns, column = (int64_t)at - part * columns;
        math sum[N] = {};
        DDP__UNROLL_4
        for (int64_t row = part; row < rows; row += parts) {
            store value[N];
            ddp__cuda_load<N>(value, x, (size_t)(row * step + column));
            for (int i = 0; i < N; i++) sum[i] += type::load(value[i]);
        }
        ddp__cuda_store<N>(sum, partial, at);
    }
};

/* out[i] = the sum of x[i * row_step + j * step] over j < count, in f32 or f64. */
template <ddp_dtype X, ddp_dtype OUT> struct ddp__cuda_row_sums {
    typedef typename ddp__cuda_type<OUT>::math value;
    enum { CELLS = 1, TEAM = 32 };
    int64_t count, row_step, step;
    const void *x;
    void *out;
    DDP__HD value partial(size_t row, int lane, int64_t *) const {
        value sum = 0;
        for (int64_t j = lane; j < count; j += TEAM) {
            typename ddp__cuda_type<X>::store loaded;
            ddp__cuda_load<1>(&loaded, x, row * (size_t)row_step + (size_t)(j * step));
            sum += ddp__cuda_type<X>::load(loaded);
        }
        return sum;
    }
    static DDP__HD value join(value a, value b) { return a + b; }
    DDP__HD void finish(size_t row, value sum, int lane, int64_t *) const {
        typename ddp__cuda_type<OUT>::store rounded = ddp__cuda_type<OUT>::save(sum);
        if (lane == 0) ddp__cuda_store<1>(&rounded, out, row);
    }
    DDP__HD size_t owner(size_t) const { return 0; }
    DDP__HD void flush(const int64_t *, size_t) const {}
};

/* bias_grad = the sums of the rows of op(a). With trans_a they are sums of columns. Then many threads read
   neighbouring columns, and add some of the rows each, into the workspace:

       a (k, m)    . . . . | . . . .    one thread: 16 bytes of a row, in rows r, r + parts, r + 2 parts ...
                   . . . . | . . . .
       workspace   (parts, m)           then a team of threads per column adds the parts */
static ddp_result ddp__cuda_run_bias_grad(const ddp__cuda_product *p) {
    enum { THREADS = 65536 }; /* enough to fill a GPU */
    const ddp_cuda_gemm_desc *d = &p->desc;
    return ddp__cuda_dispatch<DDP__CUDA_FLOATS>(d->dtype, [&](auto D) {
        typedef ddp__cuda_partial_sums<decltype(D)::value> partial_sums;
        constexpr ddp_dtype math = decltype(D)::value == DDP_F64 ? DDP_F64 : DDP_F32;
        int64_t parts = THREADS * partial_sums::WIDTH / (d->m ? d->m : 1);
        if (parts > d->k) parts = d->k;
        if (!d->trans_a || parts < 2) {
            ddp__cuda_row_sums<decltype(D)::value, decltype(D)::value> sums = {d->k, d->lda, 1, d->a,
                                                                               d->bias_grad};
            if (d->trans_a) std::swap(sums.row_step, sums.step);
            return ddp__cuda_launch_rows(sums, (size_t)d->m, p->stream, p->function);
        }
        const partial_sums first = {d->k, d->m, d->lda, parts, d->a, p->state->workspace};
        const ddp__cuda_row_sums<math, decltype(D)::value> second = {parts, 1, d->m, p->state->workspace,
                                                                     d->bias_grad};
        int vectors = p->align == DDP__CUDA_LT_ALIGN && d->m % first.WIDTH == 0 && d->lda % first.WIDTH == 0;
        DDP_TRY(ddp__cuda_launch_elements(first, vectors ? 1 : 0, (size_t)(parts * d->m), p->stream,
                                          p->function));
        return ddp__cuda_launch_rows(second, (size_t)d->m, p->stream, p->function);
    });
}

/* Runs a product that has at least one term. *separate: 1 = without its epilogue. */
static ddp_result ddp__cuda_lt_multiply(ddp__cuda_product *p, int *separate) {
    const ddp_cuda_gemm_algo *given = p->desc.algo;
    ddp__cuda_algorithm *chosen = NULL;
    if (!given) DDP_TRY(ddp__cuda_lt_find(p, &chosen));
    const ddp_cuda_gemm_algo *algo = given ? given : &chosen->algo;
    cublasStatus_t s = ddp__cuda_lt_matmul(p, algo);
    if (!given && !algo->separate && ddp__cuda_lt_refuses_epilogue(p, s)) { /* although it was found for it */
        DDP_TRY(ddp__cuda_lt_choose(p, 1, &chosen->algo));
        s = ddp__cuda_lt_matmul(p, algo);
    }
    *separate = algo->separate;
    return ddp__cuda_lt_result(p, s, "cublasLtMatmul");
}

static ddp_result ddp__cuda_multiply(const char *function, ddp_group *group, const ddp_cuda_gemm_desc *desc,
                                     cudaStream_t stream) {
    ddp__cuda_product p;
    int separate = 1;
    DDP_TRY(ddp__cuda_product_begin(&p, function, group, desc, stream));
    const ddp_cuda_gemm_desc *d = &p.desc;
    DDP_TRY(ddp__cuda_cublaslt_open(&p));
    if (!p.state->workspace)
        DDP_TRY(ddp__cuda_device_alloc(group, DDP_CUDA_GEMM_WORKSPACE_BYTES, &p.state->workspace));
    if (d->m && d->n && d->k)
        DDP_TRY(ddp__cuda_lt_multiply(&p, &separate));
    else if (d->m && d->n)
        DDP_TRY(ddp__cuda_run_epilogue(&p, DDP_CUDA_EPILOGUE_NONE, d->addend));
    if (!separate || d->epilogue == DDP_CUDA_EPILOGUE_NONE) return DDP_OK;
    if (d->epilogue == DDP_CUDA_EPILOGUE_BIAS_GRAD) return ddp__cuda_run_bias_grad(&p);
    return ddp__cuda_run_epilogue(&p, d->epilogue, d->c);
}

#if defined(DDP_TENSOR_KERNELS_H)
/* A product of a layer, on the thread's stream. */
static ddp_result ddp__cuda_multiply_layer(const char *function, const ddp_gemm *g, void *group, int tf32) {
    ddp_cuda_gemm_desc desc = DDP_ZERO;
    if (!g) return ddp_fail(DDP_ERR_INVALID, "%s: gemm is NULL", function);
    if (!group)
        return ddp_fail(DDP_ERR_INVALID, "%s: user is NULL; set gemm_user to the group of the layers",
                        function);
    desc.m = g->m;
    desc.n = g->n;
    desc.k = g->k;
    desc.a = g->a;
    desc.b = g->b;
    desc.c = g->c;
    desc.lda = g->lda;
    desc.ldb = g->ldb;
    desc.ldc = g->ldc;
    desc.trans_a = g->trans_a;
    desc.trans_b = g->trans_b;
    desc.dtype = g->dtype;
    desc.addend = g->accumulate ? g->c : NULL;
    desc.allow_tf32 = tf32;
    return ddp__cuda_multiply(function, (ddp_group *)group, &desc, ddp__cuda_this_thread.stream);
}
#endif
#endif

#if defined(DDP_TENSOR_KERNELS_H)
template <class T> static ddp_result ddp__cuda_layer_gemm(const ddp_gemm *g, void *group) {
    (void)group;
#if defined(DDP_USE_CUBLASLT)
    return ddp__cuda_multiply_layer("ddp_cuda_gemm", g, group, 0);
#else
    return ddp__cuda_plain_gemm<T>(g);
#endif
}

#define DDP__CUDA_F32(name, arguments) ddp__cuda_##name<float>,
#define DDP__CUDA_F64(name, arguments) ddp__cuda_##name<double>,
static const ddp_layer_kernels ddp__cuda_layers[2] = {
    {DDP_VERSION, ddp__cuda_layer_gemm<float>, DDP_LAYER_KERNELS(DDP__CUDA_F32)},
    {DDP_VERSION, ddp__cuda_layer_gemm<double>, DDP_LAYER_KERNELS(DDP__CUDA_F64)},
};
#define DDP__CUDA_LAYERS ddp__cuda_layers
#else
#define DDP__CUDA_LAYERS NULL
#endif

//== tables of algorithms ==================================================================== >>impl-tables
/* Tables of ddp_cuda_gemm_save and ddp_cuda_gemm_load. They are text, so that people can read and join them.
   Sections of other GPUs and versions are checked, and skipped:

       ddp_cuda_gemm 1
       chip NVIDIA H200
       cublaslt 130101
       bf16 nt m=32768 n=2304 k=768 lda=768 ... epilogue=bias ... algo=0000000000000042 ...
       end 1                                     the number of products, in all sections

   A product has to be written exactly as ddp_cuda_gemm_save writes it. */

#if defined(DDP_USE_CUBLASLT)
#define DDP__CUDA_LT_LINE_MAX 512
#define DDP__CUDA_LT_FIRST_LINE "ddp_cuda_gemm 1"
static const char *const ddp__cuda_epilogue_names[] = {"none", "bias", "gelu", "gelu_grad", "bias_grad"};

/* Writes a product as a line. */
static void ddp__cuda_lt_print(char line[DDP__CUDA_LT_LINE_MAX], const ddp__cuda_product *p,
                               const ddp_cuda_gemm_algo *algo) {
    const ddp_cuda_gemm_desc *d = &p->desc;
    char a = d->trans_a ? 't' : 'n';
    char b = d->trans_b ? 't' : 'n';
    int used = snprintf(
        line, DDP__CUDA_LT_LINE_MAX,
        "%s %c%c m=%lld n=%lld k=%lld lda=%lld ldb=%lld ldc=%lld epilogue=%s addend=%d tf32=%d "
        "align=%u separate=%d algo=",
        ddp_dtype_name(d->dtype), a, b, (long long)d->m, (long long)d->n, (long long)d->k, (long long)d->lda,
        (long long)d->ldb, (long long)d->ldc, ddp__cuda_epilogue_names[d->epilogue], d->addend != NULL,
        d->allow_tf32 != 0, p->align, algo->separate != 0);
    for (int i = 0; i < 8; i++)
        used += snprintf(line + used, (size_t)(DDP__CUDA_LT_LINE_MAX - used), i ? " %016llx" : "%016llx",
                         (unsigned long long)algo->data[i]);
}

static void ddp__cuda_lt_write(FILE *file, char line[DDP__CUDA_LT_LINE_MAX]) {
    size_t length = strlen(line);
    line[length] = '\n'; /* in place of its 0 */
    fwrite(line, 1, length + 1, file);
}

/* Reads a line that ddp__cuda_lt_print wrote. Returns 0 for any other line. */
static int ddp__cuda_lt_scan(const char *line, ddp__cuda_product *p, ddp_cuda_gemm_algo *algo) {
    ddp_cuda_gemm_desc d = DDP_ZERO;
    char dtype[8], transposed[3], epilogue[16], again[DDP__CUDA_LT_LINE_MAX];
    long long size[6];
    unsigned long long word[8];
    unsigned align;
    int addend;
    int fields = sscanf(
        line,
        "%7s %2s m=%lld n=%lld k=%lld lda=%lld ldb=%lld ldc=%lld epilogue=%15s addend=%d tf32=%d "
        "align=%u separate=%d algo=%llx %llx %llx %llx %llx %llx %llx %llx",
        dtype, transposed, &size[0], &size[1], &size[2], &size[3], &size[4], &size[5], epilogue, &addend,
        &d.allow_tf32, &align, &algo->separate, &word[0], &word[1], &word[2], &word[3], &word[4], &word[5],
        &word[6], &word[7]);
    if (fields != 21 || align < 1 || align > DDP__CUDA_LT_ALIGN || (align & (align - 1))) return 0;
    for (int i = 0; i < 8; i++) algo->data[i] = word[i];
    for (int i = DDP_F32; i <= DDP_BF16; i++)
        if (strcmp(dtype, ddp_dtype_name((ddp_dtype)i)) == 0) d.dtype = (ddp_dtype)i;
    for (int i = 0; i <= DDP_CUDA_EPILOGUE_BIAS_GRAD; i++)
        if (strcmp(epilogue, ddp__cuda_epilogue_names[i]) == 0) d.epilogue = (ddp_cuda_epilogue)i;
    void *array = (void *)(uintptr_t)align; /* only its alignment is used */
    d.m = size[0];
    d.n = size[1];
    d.k = size[2];
    d.lda = size[3];
    d.ldb = size[4];
    d.ldc = size[5];
    d.trans_a = transposed[0] == 't';
    d.trans_b = transposed[1] == 't';
    d.a = d.b = d.bias = array;
    d.c = d.bias_grad = d.aux = array;
    d.addend = addend ? array : NULL;
    if (d.m < 1 || d.n < 1 || d.k < 1 || ddp__cuda_product_begin(p, p->function, p->group, &d, 0) != DDP_OK)
        return 0;
    ddp__cuda_lt_print(again, p, algo);
    return strcmp(line, again) == 0 && (algo->separate || !ddp__cuda_lt_is_separate(&p->desc))
           && (!algo->separate || d.epilogue != DDP_CUDA_EPILOGUE_NONE);
}

/* Returns whether cuBLASLt accepts an algorithm for a product. */
static int ddp__cuda_lt_accepts(ddp__cuda_product *p, const ddp_cuda_gemm_algo *algo) {
    cublasLtMatmulAlgo_t opaque;
    cublasLtMatmulHeuristicResult_t found;
    cublasStatus_t s = ddp__cuda_lt_describe(p);
    if (s == CUBLAS_STATUS_SUCCESS && !algo->separate)
        s = ddp__cuda_lt_describe_epilogue(p, p->desc.bias ? p->desc.bias : p->desc.bias_grad, p->desc.aux);
    memcpy(opaque.data, algo->data, sizeof algo->data);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulAlgoCheck(p->state->handle, &p->product, &p->a, &p->b, &p->c, &p->c, &opaque,
                                    &found);
    return s == CUBLAS_STATUS_SUCCESS && found.workspaceSize <= DDP_CUDA_GEMM_WORKSPACE_BYTES;
}

/* A table while it is read. */
typedef struct ddp__cuda_lt_reader {
    ddp__cuda_product product; /* of the current line */
    char chip[256];            /* of this rank's GPU */
    int has_chip, has_version; /* lines that the current section has had */
    int is_chip, is_used;      /* the current section is for this chip; and for this version of cuBLASLt */
    int lines, products, ended;
    uint64_t hash;             /* of all text */
    ddp__cuda_lt_table *table; /* the products that are used */
} ddp__cuda_lt_reader;

static const char *ddp__cuda_lt_read_product(ddp__cuda_lt_reader *r, const char *line) {
    ddp__cuda_lt_table *table = r->table;
    ddp__cuda_algorithm *entry = &table->products[table->count];
    if (!r->has_version) return "a product before the lines chip and cublaslt";
    if (!ddp__cuda_lt_scan(line, &r->product, &entry->algo))
        return "no product as ddp_cuda_gemm_save writes it";
    r->products++;
    if (!r->is_used) return NULL;
    if (table->count == DDP__CUDA_LT_TABLE_MAX) return "more than 1024 products for this GPU";
    ddp__cuda_lt_key(&r->product, entry->key);
    if (ddp__cuda_lt_lookup(table->products, table->count, entry->key))
        return "a product that an earlier line has";
    if (!ddp__cuda_lt_accepts(&r->product, &entry->algo))
        return "cuBLASLt refuses this algorithm on this GPU";
    table->count++;
    return NULL;
}

/* Reads a line without its end. Returns what is wrong with it, or NULL. */
static const char *ddp__cuda_lt_read_line(ddp__cuda_lt_reader *r, const char *line) {
    char expected[64];
    if (r->ended) return "text after the line end";
    if (r->lines == 1)
        return strcmp(line, DDP__CUDA_LT_FIRST_LINE) ? "the first line is not " DDP__CUDA_LT_FIRST_LINE
                                                     : NULL;
    if (strncmp(line, "chip ", 5) == 0) {
        r->is_chip = strcmp(line + 5, r->chip) == 0;
        r->has_chip = 1;
        r->has_version = 0;
        return NULL;
    }
    if (strncmp(line, "cublaslt ", 9) == 0) {
        if (!r->has_chip || strspn(line + 9, "0123456789") != strlen(line + 9))
            return "no version after a line chip";
        snprintf(expected, sizeof expected, "%zu", cublasLtGetVersion());
        r->is_used = r->is_chip && strcmp(line + 9, expected) == 0;
        r->has_version = 1;
        return NULL;
    }
    if (strncmp(line, "end ", 4) != 0) return ddp__cuda_lt_read_product(r, line);
    snprintf(expected, sizeof expected, "%d", r->products);
    r->ended = 1;
    return strcmp(line + 4, expected) ? "it counts other products than the file has" : NULL;
}

static ddp_result ddp__cuda_lt_read(ddp__cuda_lt_reader *r, const char *path) {
    char line[DDP__CUDA_LT_LINE_MAX + 1];
    const char *wrong = NULL;
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!path)
        return ddp_fail(DDP_ERR_INVALID, "path is NULL; pass the name of a file of ddp_cuda_gemm_save");
    if (!file) return ddp_fail(DDP_ERR_SYSTEM, "%s: %s", path, strerror(errno));
    while (!wrong && fgets(line, sizeof line, file)) {
        size_t length = strlen(line);
        r->lines++;
        r->hash = ddp_hash(r->hash, line, length);
        if (length == 0 || line[length - 1] != '\n') {
            wrong = "the line is cut off, or longer than 511 characters";
        } else {
            line[length - 1] = 0;
            wrong = ddp__cuda_lt_read_line(r, line);
        }
    }
    int failed = ferror(file) ? errno : 0;
    fclose(file);
    if (failed) return ddp_fail(DDP_ERR_SYSTEM, "%s: %s", path, strerror(failed));
    if (!wrong && !r->ended) wrong = "the line end is missing behind it";
    if (!wrong) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID, "%s: line %d: %s; write the table again, by ddp_cuda_gemm_save", path,
                    r->lines, wrong);
}

/* Loads a table into *table, without using it. *hash: of its text. */
static ddp_result ddp__cuda_lt_load(ddp_group *group, const char *path, ddp__cuda_lt_table **table,
                                    uint64_t *hash) {
    ddp__cuda_lt_reader *r = (ddp__cuda_lt_reader *)ddp_host_alloc(group, sizeof *r);
    ddp_result result = DDP_ERR_NO_MEMORY;
    *table = (ddp__cuda_lt_table *)ddp_host_alloc(group, sizeof **table);
    if (r && *table) {
        unsigned char uuid[16];
        r->product.function = "ddp_cuda_gemm_load";
        r->product.group = group;
        r->table = *table;
        r->hash = DDP_HASH_SEED;
        result = ddp__cuda_cublaslt_open(&r->product);
        if (result == DDP_OK)
            result = ddp__cuda_group_fail(
                group, DDP__CUDA_RUNTIME->device_identity(ddp__cuda_streams_of(group)->device, r->chip, uuid),
                "cudaGetDeviceProperties");
        if (result == DDP_OK) result = ddp__cuda_lt_read(r, path);
        *hash = r->hash;
    }
    ddp_host_free(group, r);
    return result;
}
#endif

//== the NCCL backend ======================================================================== >>impl-nccl

#if !defined(DDP_NO_NCCL)

/* The calling thread enqueues calls on the communication stream; ddp.h orders it with the compute stream. A
   thread per group, the watchdog, detects failures and timeouts. Ranks exchange small host messages over two
   splits of the control group: `control`, for calls that need an answer before they continue, and
   `watchdog.group`, for the watchdogs, which also run while the rank's own thread is stuck.

   Communicators are blocking (ncclConfig_t.blocking = 1), and the watchdog ends a stuck call with
   ncclCommAbort, as PyTorch's ProcessGroupNCCL does. The alternative, a non-blocking communicator, starts a
   thread for each collective (60 to 120 us of host time). In NCCL 2.18 to 2.30, every host wait of init,
   split, window registration and first connection polls the communicator's abort flag, which ncclCommAbort
   sets first. The stuck thread returns within microseconds. NCCL frees the memory after it has stopped its
   proxy threads.

   Except for that abort, only one thread at a time is inside NCCL with a communicator. In particular,
   ncclCommGetAsyncError completes and frees the job of a non-blocking communicator without a lock, so two
   threads that poll it corrupt the heap. The caller owns the communicator between ddp__nccl_begin and
   ddp__nccl_end; the watchdog polls only outside of that.

   Order: every call reaches NCCL on the thread that makes it, in program order, and no other thread of ddp
   launches NCCL kernels. Each group has its own stream, so the GPU may start kernels of two groups in either
   order. NCCL_LAUNCH_ORDER_IMPLICIT=1 (2.26) makes the GPU start them in the order of the calls. */

#define DDP__NCCL_MAX_OPS 32 /* operations in flight with an event each; further ones share the last event */
#define DDP__NCCL_COMPARED_CALLS 16 /* calls that ranks compare */
#if !defined(DDP__NCCL_WORKSPACE_MAX)
#define DDP__NCCL_WORKSPACE_MAX ((size_t)32 << 20) /* largest workspace of a tree-order reduction */
#endif
/* Workspace at the start, in addition to 256 bytes per rank: the least that a round needs. */
#define DDP__NCCL_WORKSPACE_FIRST ((size_t)64 << 10)
#if !defined(DDP__NCCL_WATCHDOG_MS)
#define DDP__NCCL_WATCHDOG_MS 20 /* time between two checks of the watchdog */
#endif
#if !defined(DDP__NCCL_CLOSE_TIMEOUT_MS)
#define DDP__NCCL_CLOSE_TIMEOUT_MS 2000 /* longest wait of ddp_group_destroy for the other ranks */
#endif

/* A call, as ranks exchange it and as errors describe it. */
typedef struct ddp__nccl_call_id {
    uint64_t seq;      /* 0 = a batch of messages, or no call */
    uint64_t words[2]; /* of ddp_call_pack */
    int32_t is_message, pad;
} ddp__nccl_call_id;

/* The state that each watchdog sends to the others in every round. */
typedef struct ddp__nccl_rank_state {
    int32_t result;  /* of the group on this rank; text is its cause */
    int32_t leaving; /* 1 = this rank destroys the group; this is its last state */
    ddp__nccl_call_id call
        [DDP__NCCL_COMPARED_CALLS]; /* collective number seq is stored at seq mod DDP__NCCL_COMPARED_CALLS */
    uint64_t issued;                /* number of collectives issued */
    char text[400];
} ddp__nccl_rank_state;

typedef struct ddp__nccl_op {
    ddp__nccl_call_id call;
    cudaEvent_t event;
    int recorded;
} ddp__nccl_op;

/* The communicator, and the thread that may call NCCL with it. */
typedef struct ddp__nccl_comm {
    ncclComm_t handle;       /* NULL once aborted */
    ncclComm_t initializing; /* set by ncclCommInitRankConfig before it waits for peers */
    int owned;               /* 0 = the user's communicator */
    int in_group;            /* open calls of ncclGroupStart */
    int busy;                /* 1 = the caller is inside NCCL; the watchdog may only call ncclCommAbort */
    int aborted;             /* 1 = the watchdog has aborted handle or making */
    const char *host_call;   /* NCCL call that blocks the caller until every rank has made it; or NULL */
    double host_since;       /* start of that call */
} ddp__nccl_comm;

/* Device memory for calls. */
typedef struct ddp__nccl_workspace {
    void *memory; /* receive buffer of a reduction in tree order */
    size_t size_bytes;
    void *barrier_operand; /* of a barrier's all-reduce */
} ddp__nccl_workspace;

/* Operations in flight: `count` entries from index `first` on, in issue order. */
typedef struct ddp__nccl_ops {
    ddp__nccl_op at[DDP__NCCL_MAX_OPS];
    int first, count;
    int current;  /* the operation that the caller is issuing */
    double since; /* time since which the first operation has been the first */
} ddp__nccl_ops;

/* The thread that detects failures and timeouts, and exchanges the states of ranks. */
typedef struct ddp__nccl_watchdog {
    ddp_group *group; /* of all watchdogs: a split of control */
    pthread_t thread;
    int running, stopping;
    int left_rank_plus_1; /* 1 + a rank that has left the group; 0 = none */
    ddp__nccl_rank_state own;
} ddp__nccl_watchdog;

/* The first failure of this group, and whether the communicator has been aborted because of it. */
typedef struct ddp__nccl_failure {
    ddp_result cause;
    int from_peer;    /* 1 = another rank reported it */
    int comm_aborted; /* 1 = the communicator is aborted */
    char text[DDP__CUDA_TEXT_MAX];
} ddp__nccl_failure;

typedef struct ddp__nccl {
    ddp_group *group, *control;
    ddp__cuda_streams *streams;
    int rank, world_size;
    uint64_t *machines;     /* ddp_machine_id of each rank */
    int block_ranks;        /* ranks of a block of >>impl-nccl-tree; world_size = one block */
    int capturing;          /* 1 = the current call is captured into a CUDA graph */
    unsigned char leave[2]; /* send and receive buffer of ddp__nccl_wait_all_leave */
    ddp__nccl_workspace workspace;
    ddp__cuda_region *regions; /* memory of ddp_group_alloc */
    pthread_mutex_t lock;      /* protects the following fields */
    pthread_cond_t changed;
    ddp__nccl_comm comm;
    ddp__nccl_ops ops;
    ddp__nccl_watchdog watchdog;
    ddp__nccl_failure failure;
} ddp__nccl;

/* Indexed by ddp_dtype. Headers before 2.24 declare ncclBfloat16 (9) only if cuda_bf16.h was included first,
   which a program cannot always do. */
static const ncclDataType_t ddp__nccl_dtype[] = {ncclNumTypes,      ncclFloat32, ncclFloat64, ncclFloat16,
                                                 (ncclDataType_t)9, ncclInt8,    ncclUint8,   ncclInt32,
                                                 ncclInt64,         ncclUint64};

static ddp_result ddp__nccl_status(const ddp_group *, void *state) {
    ddp__nccl *n = (ddp__nccl *)state;
    if (__atomic_load_n(&n->failure.cause, __ATOMIC_ACQUIRE) == DDP_OK) return DDP_OK;
    return ddp_fail(n->failure.cause, "%s", n->failure.text);
}

/* Stores the first cause. The text is complete before other threads can see the cause. */
static void ddp__nccl_set_cause(ddp__nccl *n, ddp_result cause, const char *text, int from_peer) {
    const ddp__cuda_lock lock(&n->lock);
    if (n->failure.cause != DDP_OK) return;
    snprintf(n->failure.text, sizeof n->failure.text, "%.*s", (int)sizeof n->failure.text - 1, text);
    n->failure.from_peer = from_peer;
    __atomic_store_n(&n->failure.cause, cause, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&n->changed);
}

static void ddp__nccl_poison(ddp_group *, void *state, ddp_result cause, const char *text) {
    ddp__nccl_set_cause((ddp__nccl *)state, cause, text, 0);
}

static ddp_result ddp__nccl_result(ncclResult_t error, const char *call) {
    if (error == ncclSuccess) return DDP_OK;
    const char *last = ncclGetLastError(NULL); /* per process: NCCL ignores the communicator */
    int more = last && last[0];
    return ddp_fail(DDP_ERR_ENGINE, "%s: %s%s%s", call, ncclGetErrorString(error), more ? ": " : "",
                    more ? last : "");
}

/* Pauses between two polls of the host. */
static void ddp__nccl_pause(int tries) {
    if (tries < 100)
        sched_yield();
    else
        usleep(50);
}

/* The caller owns the communicator from ddp__nccl_begin to ddp__nccl_end. host_call: an NCCL call that blocks
   the host until every rank has made it, and must end within the timeout; NULL for stream work. */
static ddp_result ddp__nccl_begin(ddp__nccl *n, const char *host_call) {
    const ddp__cuda_lock lock(&n->lock);
    DDP_TRY(ddp__nccl_status(n->group, n));
    n->comm.busy = 1;
    n->comm.host_call = host_call;
    n->comm.host_since = ddp_now();
    return DDP_OK;
}

static void ddp__nccl_end(ddp__nccl *n) {
    const ddp__cuda_lock lock(&n->lock);
    if (n->comm.aborted) n->comm.handle = NULL;
    n->comm.busy = 0;
    n->comm.host_call = NULL;
    pthread_cond_broadcast(&n->changed);
}

/* Returns the result of an NCCL call on the communicator. ncclInProgress occurs only with a non-blocking
   communicator of the user; this function then waits. */
static ddp_result ddp__nccl_complete(ddp__nccl *n, ncclResult_t error, const char *call) {
    for (int tries = 0; error == ncclInProgress && !n->comm.in_group; tries++) {
        ncclResult_t now = ncclSuccess;
        if (ddp__nccl_status(n->group, n) != DDP_OK) return DDP_ERR_POISONED;
        error = ncclCommGetAsyncError(n->comm.handle, &now);
        if (error != ncclSuccess) return ddp__nccl_result(error, "ncclCommGetAsyncError");
        error = now;
        if (error == ncclInProgress) ddp__nccl_pause(tries);
    }
    return error == ncclInProgress ? DDP_OK : ddp__nccl_result(error, call);
}

/* Begins an NCCL group, for sends and receives that run together. */
static ddp_result ddp__nccl_group_start(ddp__nccl *n) {
    ddp_result result = ddp__nccl_result(ncclGroupStart(), "ncclGroupStart");
    n->comm.in_group += result == DDP_OK;
    return result;
}

/* Ends the NCCL group, even after a failure `before`. */
static ddp_result ddp__nccl_group_end(ddp__nccl *n, ddp_result before) {
    ncclResult_t error = ncclGroupEnd();
    n->comm.in_group--;
    return before == DDP_OK ? ddp__nccl_complete(n, error, "ncclGroupEnd") : before;
}

/* The bytes that this rank sends to a peer and receives from it. The peer may be the rank itself. */
typedef struct ddp__nccl_transfer {
    int peer;
    ddp_bytes send, recv;
} ddp__nccl_transfer;

/* Executes transfer_of(0), ..., transfer_of(count - 1) in one NCCL group. A transfer to the rank itself is a
   copy. */
template <class F>
static ddp_result ddp__nccl_exchange(ddp__nccl *n, const void *send, void *recv, int count,
                                     const F &transfer_of) {
    cudaStream_t stream = n->streams->stream[DDP_STREAM_COMM];
    ddp_result result = ddp__nccl_group_start(n);
    if (result != DDP_OK) return result;
    for (int i = 0; i < count && result == DDP_OK; i++) {
        const ddp__nccl_transfer t = transfer_of(i);
        const unsigned char *from = t.send.size ? (const unsigned char *)send + t.send.begin : NULL;
        unsigned char *to = t.recv.size ? (unsigned char *)recv + t.recv.begin : NULL;
        if (t.peer != n->rank) {
            if (from)
                result = ddp__nccl_complete(
                    n, ncclSend(from, t.send.size, ncclUint8, t.peer, n->comm.handle, stream), "ncclSend");
            if (to && result == DDP_OK)
                result = ddp__nccl_complete(
                    n, ncclRecv(to, t.recv.size, ncclUint8, t.peer, n->comm.handle, stream), "ncclRecv");
        } else if (from && to && from != to)
            result = ddp__cuda_group_fail(
                n->group,
                DDP__CUDA_RUNTIME->memcpy_async(to, from, t.recv.size, cudaMemcpyDeviceToDevice, stream),
                "cudaMemcpyAsync");
    }
    return ddp__nccl_group_end(n, result);
}

//== NCCL: reductions in tree order ===================================================== >>impl-nccl-tree

/* Reductions with the bits of the CPU backends. A block is 2^k consecutive ranks on one machine: see
   ddp_machine_block. The sum over a block is a subtree of the tree over all ranks. Each rank owns one part of
   the data. A share is the parts of all ranks at the same position in their blocks. Two machines of 4 ranks:

       rank         0   1   2   3      4   5   6   7
       owns part    p0  p2  p4  p6     p1  p3  p5  p7

       position     0        1        2        3
       share        p0 p1    p2 p3    p4 p5    p6 p7

   The steps of rank 6, at position 2 of block 1:

       reduce in the block     receives p4 p5 of ranks 4, 5 and 7, and adds them: a partial sum
       reduce across blocks    receives the partial sum p5 of rank 2, adds, divides and rounds
       gather across blocks    exchanges the results p4 and p5 with rank 2
       gather in the block     exchanges the results of all shares with ranks 4, 5 and 7

   A reduce_scatter ends after the second step. Partial sums of 16-bit floats are f32. Only the steps across
   blocks send data to other machines: ddp_cuda_group_create states how much.

   A group on one machine has one block of all ranks, and leaves out the steps across blocks. A group without
   blocks of two or more ranks does the same. The tree would also allow a last block with fewer ranks. Its
   ranks would own several parts each; a smaller block that divides W is used instead.

   Large calls run in rounds. All counts in this section are elements. */
typedef struct ddp__nccl_tree {
    const ddp_call *call;
    int block_ranks, blocks; /* ranks of a block; number of blocks */
    int block, position;     /* of this rank */
    ddp_dtype partial_dtype;
    size_t element, partial_element; /* in bytes */
    size_t first, count;             /* of a round: its range of the call's count elements */
    size_t part;                     /* of a rank in a round; the last parts may be smaller */
    /* Of a round: data of other ranks; partial sums of the share; results of the share; result of the part */
    unsigned char *arrived, *partial, *share_sum, *part_sum;
} ddp__nccl_tree;

typedef struct ddp__nccl_range {
    size_t begin, count;
} ddp__nccl_range;

/* Returns the part of a rank, as a range of the send buffer. */
static ddp__nccl_range ddp__nccl_part(const ddp__nccl_tree *t, int block, int position) {
    if (t->call->kind == DDP_CALL_REDUCE_SCATTER) {
        size_t rank = (size_t)(block * t->block_ranks + position);
        return {rank * t->call->count + t->first, t->count};
    }
    size_t begin = ((size_t)position * (size_t)t->blocks + (size_t)block) * t->part;
    if (begin > t->count) begin = t->count;
    return {t->first + begin, t->count - begin < t->part ? t->count - begin : t->part};
}

/* Returns the share of a position: one range, or in a reduce_scatter, range `block` of one for each block. */
static ddp__nccl_range ddp__nccl_share(const ddp__nccl_tree *t, int position, int block) {
    if (t->call->kind == DDP_CALL_REDUCE_SCATTER) return ddp__nccl_part(t, block, position);
    const ddp__nccl_range first = ddp__nccl_part(t, 0, position);
    const ddp__nccl_range last = ddp__nccl_part(t, t->blocks - 1, position);
    return {first.begin, last.begin + last.count - first.begin};
}

static int ddp__nccl_receives(const ddp__nccl_tree *t, int rank) {
    return t->call->kind == DDP_CALL_ALL_REDUCE || rank == t->call->root;
}

/* `count` arrays: array `own` is at own_data, array i has arrived at arrived + i * stride_bytes. */
typedef struct ddp__nccl_sources {
    const unsigned char *arrived;
    size_t stride_bytes;
    int count, own;
    const unsigned char *own_data;
    ddp_dtype dtype;
} ddp__nccl_sources;

/* Adds `count` elements of the sources. divides: 1 = the last sum, which an average divides. */
static ddp_result ddp__nccl_add(ddp__nccl *n, const ddp_call *call, const ddp__nccl_sources *sources,
                                size_t count, int divides, void *dst, ddp_dtype dst_dtype) {
    const void *two[2] = {sources->arrived, sources->own_data};
    ddp__cuda_tree_call add = DDP_ZERO;
    if (count == 0) return DDP_OK;
    add.dst = &dst;
    add.dst_count = 1;
    add.dst_dtype = dst_dtype;
    add.src = two;
    add.src_count = sources->count;
    add.stride_bytes = sources->stride_bytes;
    add.own = sources->own;
    add.count = count;
    add.op = call->op;
    add.divisor = divides && call->op == DDP_OP_AVG && call->divisor ? call->divisor : 1;
    add.stream = n->streams->stream[DDP_STREAM_COMM];
    add.function = "the reduction in tree order";
    return ddp__cuda_tree_reduce(&add, sources->dtype);
}

/* The ranges of a share in a reduce_scatter are not adjacent in the send buffer: one kernel for each. */
static ddp_result ddp__nccl_reduce_in_block(ddp__nccl *n, const ddp__nccl_tree *t) {
    const ddp_call *call = t->call;
    const unsigned char *send = (const unsigned char *)call->send;
    const int ranges = call->kind == DDP_CALL_REDUCE_SCATTER ? t->blocks : 1;
    const size_t part_bytes = t->part * t->element, share_bytes = part_bytes * (size_t)t->blocks;
    DDP_TRY(ddp__nccl_exchange(n, send, t->arrived, ranges * t->block_ranks, [&](int i) {
        const int position = i % t->block_ranks, k = i / t->block_ranks;
        const ddp__nccl_range own = ddp__nccl_share(t, t->position, k);
        const size_t to = (size_t)position * share_bytes + (size_t)k * part_bytes;
        ddp__nccl_range share = ddp__nccl_share(t, position, k);
        if (position == t->position) share.count = 0;
        return ddp__nccl_transfer{t->block * t->block_ranks + position,
                                  {share.begin * t->element, share.count * t->element},
                                  {to, own.count * t->element}};
    }));
    for (int k = 0; k < ranges; k++) {
        const ddp__nccl_range own = ddp__nccl_share(t, t->position, k);
        const ddp__nccl_sources sources = {
            t->arrived + (size_t)k * part_bytes, share_bytes, t->block_ranks, t->position,
            send + own.begin * t->element,       call->dtype};
        unsigned char *partial = t->partial + (size_t)k * t->part * t->partial_element;
        if (t->blocks == 1)
            DDP_TRY(ddp__nccl_add(n, call, &sources, own.count, 1, t->part_sum, call->dtype));
        else
            DDP_TRY(ddp__nccl_add(n, call, &sources, own.count, 0, partial, t->partial_dtype));
    }
    return DDP_OK;
}

static ddp_result ddp__nccl_reduce_across_blocks(ddp__nccl *n, const ddp__nccl_tree *t) {
    const size_t element = t->partial_element, part_bytes = t->part * element;
    const size_t own_count = ddp__nccl_part(t, t->block, t->position).count;
    const ddp__nccl_sources sources = {
        t->arrived,      part_bytes, t->blocks, t->block, t->partial + (size_t)t->block * part_bytes,
        t->partial_dtype};
    DDP_TRY(ddp__nccl_exchange(n, t->partial, t->arrived, t->blocks, [&](int block) {
        const size_t begin = (size_t)block * part_bytes;
        const size_t count = block == t->block ? 0 : ddp__nccl_part(t, block, t->position).count;
        return ddp__nccl_transfer{
            block * t->block_ranks + t->position, {begin, count * element}, {begin, own_count * element}};
    }));
    return ddp__nccl_add(n, t->call, &sources, own_count, 1, t->part_sum, t->call->dtype);
}

/* Completes the share on the ranks of every block that has a receiver. */
static ddp_result ddp__nccl_gather_across_blocks(ddp__nccl *n, const ddp__nccl_tree *t) {
    const int root_block = t->call->root / t->block_ranks;
    const auto receives = [&](int block) {
        return t->call->kind == DDP_CALL_ALL_REDUCE || block == root_block;
    };
    const size_t own_bytes = ddp__nccl_part(t, t->block, t->position).count * t->element;
    const size_t part_bytes = t->part * t->element, own_begin = (size_t)t->block * part_bytes;
    return ddp__nccl_exchange(n, t->share_sum, t->share_sum, t->blocks, [&](int block) {
        size_t bytes = ddp__nccl_part(t, block, t->position).count * t->element;
        if (block == t->block || !receives(t->block)) bytes = 0;
        return ddp__nccl_transfer{block * t->block_ranks + t->position,
                                  {own_begin, receives(block) ? own_bytes : 0},
                                  {(size_t)block * part_bytes, bytes}};
    });
}

static ddp_result ddp__nccl_gather_in_block(ddp__nccl *n, const ddp__nccl_tree *t) {
    const size_t own_bytes = ddp__nccl_share(t, t->position, 0).count * t->element;
    const int first_rank = t->block * t->block_ranks;
    if (t->call->kind == DDP_CALL_REDUCE && t->call->root / t->block_ranks != t->block) return DDP_OK;
    return ddp__nccl_exchange(n, t->share_sum, t->call->recv, t->block_ranks, [&](int position) {
        ddp__nccl_range share = ddp__nccl_share(t, position, 0);
        if (position == t->position || !ddp__nccl_receives(t, n->rank)) share.count = 0;
        return ddp__nccl_transfer{first_rank + position,
                                  {0, ddp__nccl_receives(t, first_rank + position) ? own_bytes : 0},
                                  {share.begin * t->element, share.count * t->element}};
    });
}

/* Memory of a round, for one element of a part. The results of a share are in the receive buffer, or on ranks
   without one, in the workspace: with one block in place of the own share, which does not arrive. */
static size_t ddp__nccl_tree_bytes(const ddp__nccl_tree *t) {
    const size_t arrived = (size_t)t->block_ranks * (size_t)t->blocks * t->element;
    return t->blocks == 1 ? arrived : arrived + (size_t)t->blocks * (t->partial_element + t->element);
}

static ddp_result ddp__nccl_tree_round(ddp__nccl *n, ddp__nccl_tree *t) {
    const ddp_call *call = t->call;
    const size_t part_bytes = t->part * t->element, share_bytes = part_bytes * (size_t)t->blocks;
    t->arrived = (unsigned char *)n->workspace.memory;
    t->partial = t->arrived + share_bytes * (size_t)t->block_ranks;
    t->share_sum = t->arrived + share_bytes * (size_t)t->position;
    if (t->blocks > 1) t->share_sum = t->partial + t->part * (size_t)t->blocks * t->partial_element;
    if (ddp__nccl_receives(t, n->rank))
        t->share_sum = (unsigned char *)call->recv + ddp__nccl_share(t, t->position, 0).begin * t->element;
    t->part_sum = t->share_sum + part_bytes * (size_t)t->block;
    if (call->kind == DDP_CALL_REDUCE_SCATTER)
        t->part_sum = (unsigned char *)call->recv + t->first * t->element;
    DDP_TRY(ddp__nccl_reduce_in_block(n, t));
    if (t->blocks > 1) DDP_TRY(ddp__nccl_reduce_across_blocks(n, t));
    if (call->kind == DDP_CALL_REDUCE_SCATTER) return DDP_OK;
    if (t->blocks > 1) DDP_TRY(ddp__nccl_gather_across_blocks(n, t));
    return ddp__nccl_gather_in_block(n, t);
}

/* Replaces the memory of the workspace. cudaFree waits for the whole device. The caller synchronizes all
   ranks with ddp_agree afterwards. Otherwise, if two ranks share a device, work that one rank starts could
   wait for the other rank, which is still inside cudaFree. */
static ddp_result ddp__nccl_workspace_grow(ddp__nccl *n, size_t size) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    ddp__nccl_workspace *w = &n->workspace;
    DDP_TRY(ddp__cuda_group_fail(n->group, cuda->synchronize(n->streams->stream[DDP_STREAM_COMM]),
                                 "cudaStreamSynchronize"));
    cudaError_t error = cuda->free(w->memory);
    w->memory = NULL; /* even after a failure, so that it is not freed twice */
    DDP_TRY(ddp__cuda_group_fail(n->group, error, "cudaFree"));
    DDP_TRY(ddp__cuda_group_fail(n->group, cuda->malloc(&w->memory, size), "cudaMalloc"));
    w->size_bytes = size;
    return DDP_OK;
}

static ddp_result ddp__nccl_tree_reduce(ddp__nccl *n, const ddp_call *call) {
    enum { ALIGN = 16 }; /* parts begin at multiples of this */
    const size_t world_size = (size_t)n->world_size;
    const int scatters = call->kind == DDP_CALL_REDUCE_SCATTER;
    ddp__nccl_tree t = DDP_ZERO;
    size_t bytes = DDP__NCCL_WORKSPACE_FIRST, max_part;
    if (n->world_size > DDP__CUDA_TREE_MAX_SOURCES)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "DDP_ORDER_TREE has at most %d ranks, but the group has %d; use DDP_ORDER_ANY",
                        DDP__CUDA_TREE_MAX_SOURCES, n->world_size);
    if (n->world_size == 1)
        return ddp_cuda_reduce_tree((void *const *)&call->recv, 1, &call->send, 1, call->count, call->dtype,
                                    call->op, call->divisor, n->streams->stream[DDP_STREAM_COMM]);
    t.call = call;
    t.block_ranks = n->block_ranks;
    t.blocks = n->world_size / n->block_ranks;
    t.block = n->rank / n->block_ranks;
    t.position = n->rank % n->block_ranks;
    t.partial_dtype = ddp_sum_dtype(call->dtype);
    t.element = ddp_dtype_size(call->dtype);
    t.partial_element = ddp_dtype_size(t.partial_dtype);
    const size_t round_bytes = ddp__nccl_tree_bytes(&t);
    t.part = ddp_round_up(scatters ? call->count : (call->count + world_size - 1) / world_size, ALIGN);
    max_part = DDP__NCCL_WORKSPACE_MAX / round_bytes / ALIGN * ALIGN;
    if (t.part > max_part) t.part = max_part;
    while (bytes < t.part * round_bytes) bytes *= 2;
    /* A captured call cannot allocate and uses more rounds. Otherwise the first call of a size allocates. */
    if (t.part * round_bytes > n->workspace.size_bytes && !n->capturing)
        DDP_TRY(ddp_agree(n->control, "allocating the buffers of a reduction in tree order",
                          ddp__nccl_workspace_grow(n, bytes), 0, ""));
    max_part = n->workspace.size_bytes / round_bytes / ALIGN * ALIGN;
    if (t.part > max_part) t.part = max_part;
    const size_t round = scatters ? t.part : t.part * world_size;
    for (; t.first < call->count; t.first += t.count) {
        t.count = call->count - t.first < round ? call->count - t.first : round;
        DDP_TRY(ddp__nccl_tree_round(n, &t));
    }
    return DDP_OK;
}

//== NCCL: calls ======================================================================= >>impl-nccl-calls
/* Turns a ddp_call into NCCL calls on the communication stream: ddp__nccl_run -> op_begin, call, op_end. Each
   call is an operation with an event, which the watchdog observes. */

/* Returns 1 if a reduction runs in tree order. Some do with every order: NCCL's MIN and MAX do not keep NaNs,
   and its average of integers does not truncate. */
static int ddp__nccl_needs_tree(const ddp__nccl *n, const ddp_call *call) {
    int is_float = ddp_is_float(call->dtype);
    return ddp_group_order(n->group) == DDP_ORDER_TREE || (call->op == DDP_OP_AVG && !is_float)
           || ((call->op == DDP_OP_MIN || call->op == DDP_OP_MAX) && is_float);
}

/* Creates an average with a divisor other than world_size. It multiplies first, like NCCL's average. */
static ddp_result ddp__nccl_average(ddp__nccl *n, const ddp_call *call, ncclRedOp_t *op) {
    union {
        float f32;
        double f64;
        uint16_t half;
    } factor;
    float f32 = 1.0f / (float)call->divisor;
    if (call->dtype == DDP_F64)
        factor.f64 = 1.0 / (double)call->divisor;
    else if (call->dtype == DDP_F32)
        factor.f32 = f32;
    else
        factor.half = call->dtype == DDP_F16 ? ddp__cuda_to_f16(f32) : ddp__cuda_to_bf16(f32);
    return ddp__nccl_result(ncclRedOpCreatePreMulSum(op, &factor, ddp__nccl_dtype[call->dtype],
                                                     ncclScalarHostImmediate, n->comm.handle),
                            "ncclRedOpCreatePreMulSum");
}

static ddp_result ddp__nccl_reduce(ddp__nccl *n, const ddp_call *call) {
    static const ncclRedOp_t ops[] = {ncclSum, ncclAvg, ncclMin, ncclMax, ncclProd};
    cudaStream_t stream = n->streams->stream[DDP_STREAM_COMM];
    ncclDataType_t dtype = ddp__nccl_dtype[call->dtype];
    ncclRedOp_t op = ops[call->op];
    int custom_op = call->op == DDP_OP_AVG && call->divisor && call->divisor != (uint64_t)n->world_size;
    ddp_result result;
    if (ddp__nccl_needs_tree(n, call)) return ddp__nccl_tree_reduce(n, call);
    if (custom_op) DDP_TRY(ddp__nccl_average(n, call, &op));
    if (call->kind == DDP_CALL_ALL_REDUCE)
        result = ddp__nccl_complete(
            n, ncclAllReduce(call->send, call->recv, call->count, dtype, op, n->comm.handle, stream),
            "ncclAllReduce");
    else if (call->kind == DDP_CALL_REDUCE)
        result = ddp__nccl_complete(
            n, ncclReduce(call->send, call->recv, call->count, dtype, op, call->root, n->comm.handle, stream),
            "ncclReduce");
    else
        result = ddp__nccl_complete(
            n, ncclReduceScatter(call->send, call->recv, call->count, dtype, op, n->comm.handle, stream),
            "ncclReduceScatter");
    if (custom_op && ddp__nccl_status(n->group, n) == DDP_OK) ncclRedOpDestroy(op, n->comm.handle);
    return result;
}

static ddp_result ddp__nccl_all_gather_v(ddp__nccl *n, const ddp_call *call) {
    ddp_result result = ddp__nccl_group_start(n);
    if (result != DDP_OK) return result;
    for (int j = 0; j < n->world_size && result == DDP_OK; j++) {
        unsigned char *to = (unsigned char *)call->recv + call->recv_offsets[j] * ddp_dtype_size(call->dtype);
        if (call->recv_counts[j] == 0) continue;
        result = ddp__nccl_complete(n,
                                    ncclBroadcast(j == n->rank ? call->send : to, to, call->recv_counts[j],
                                                  ddp__nccl_dtype[call->dtype], j, n->comm.handle,
                                                  n->streams->stream[DDP_STREAM_COMM]),
                                    "ncclBroadcast");
    }
    return ddp__nccl_group_end(n, result);
}

/* Waits on the host until the communication stream of every rank has reached the barrier. A captured barrier
   only synchronizes the streams. */
static ddp_result ddp__nccl_barrier(ddp__nccl *n) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    const char *function = "waiting in ddp_barrier";
    cudaStream_t stream = n->streams->stream[DDP_STREAM_COMM];
    /* The watchdog reads this event only after ddp__nccl_op_end. */
    cudaEvent_t event = n->ops.at[n->ops.current].event;
    int done = 0;
    ddp_result result = ddp__nccl_complete(n,
                                           ncclAllReduce(n->workspace.barrier_operand,
                                                         n->workspace.barrier_operand, 1, ncclUint8, ncclMax,
                                                         n->comm.handle, stream),
                                           "ncclAllReduce");
    if (result != DDP_OK || n->capturing) return result;
    result = ddp__cuda_fail(cuda->event_record(event, stream), function, "cudaEventRecord");
    ddp__nccl_end(n);
    for (int tries = 0; result == DDP_OK; tries++) {
        result = ddp__cuda_query(cuda->event_query(event), function, "cudaEventQuery", &done);
        if (done) return ddp__nccl_begin(n, NULL);
        if (ddp__nccl_status(n->group, n) != DDP_OK) return DDP_ERR_POISONED;
        ddp__nccl_pause(tries);
    }
    return result;
}

static ddp_result ddp__nccl_call(ddp__nccl *n, const ddp_call *call) {
    cudaStream_t stream = n->streams->stream[DDP_STREAM_COMM];
    ncclDataType_t dtype = ddp__nccl_dtype[call->dtype];
    if (call->kind == DDP_CALL_BARRIER) return ddp__nccl_barrier(n);
    /* count is equal on all ranks; in all_gather_v it is the sum of counts. */
    if (call->count == 0 && call->kind != DDP_CALL_ALL_TO_ALL_V) return DDP_OK;
    switch (call->kind) {
    case DDP_CALL_BROADCAST:
        return ddp__nccl_complete(
            n, ncclBroadcast(call->recv, call->recv, call->count, dtype, call->root, n->comm.handle, stream),
            "ncclBroadcast");
    case DDP_CALL_ALL_GATHER:
        return ddp__nccl_complete(
            n, ncclAllGather(call->send, call->recv, call->count, dtype, n->comm.handle, stream),
            "ncclAllGather");
    case DDP_CALL_ALL_GATHER_V: return ddp__nccl_all_gather_v(n, call);
    case DDP_CALL_SEND:
        return ddp__nccl_complete(
            n, ncclSend(call->send, call->count, dtype, call->root, n->comm.handle, stream), "ncclSend");
    case DDP_CALL_RECV:
        return ddp__nccl_complete(
            n, ncclRecv(call->recv, call->count, dtype, call->root, n->comm.handle, stream), "ncclRecv");
    case DDP_CALL_ALL_REDUCE:
    case DDP_CALL_REDUCE:
    case DDP_CALL_REDUCE_SCATTER: return ddp__nccl_reduce(n, call);
    default: /* all_to_all, all_to_all_v, gather, scatter */
        return ddp__nccl_exchange(n, call->send, call->recv, n->world_size, [&](int j) {
            return ddp__nccl_transfer{j, ddp_call_sends(call, n->rank, j),
                                      ddp_call_receives(call, n->rank, j)};
        });
    }
}

/* Fails the group because of a failure of this rank. The watchdogs send the cause to the other ranks. */
static ddp_result ddp__nccl_fail(ddp__nccl *n, const ddp_call *call, ddp_result result) {
    char cause[DDP__CUDA_TEXT_MAX];
    ddp_saved_error error = DDP_ZERO;
    if (result == DDP_OK) return DDP_OK;
    ddp_error_save(&error, result);
    if (ddp__nccl_status(n->group, n) != DDP_OK) return result;
    snprintf(cause, sizeof cause, "rank %d in %s seq=%llu: %.380s", n->rank,
             ddp_public_call_name(ddp_call_name(call->kind)), (unsigned long long)call->seq, error.text);
    ddp__nccl_poison(n->group, n, result, n->world_size > 1 ? cause : error.text);
    return ddp_error_restore(&error);
}

/* Ends an operation: records its event and releases the communicator. result: of its NCCL calls. */
static ddp_result ddp__nccl_op_end(ddp__nccl *n, const ddp_call *call, ddp_result result) {
    ddp__nccl_op *op = &n->ops.at[n->ops.current];
    int runs = result == DDP_OK && !n->capturing;
    if (runs)
        result = ddp__cuda_group_fail(
            n->group, DDP__CUDA_RUNTIME->event_record(op->event, n->streams->stream[DDP_STREAM_COMM]),
            "cudaEventRecord");
    {
        const ddp__cuda_lock lock(&n->lock);
        if (!runs) n->ops.count -= n->ops.count > 0;
        op->recorded = runs && result == DDP_OK;
    }
    ddp__nccl_end(n);
    return ddp__nccl_fail(n, call, result);
}

/* Begins an operation, visible to the watchdog. The caller owns the communicator until ddp__nccl_op_end. */
static ddp_result ddp__nccl_op_begin(ddp__nccl *n, const ddp_call *call) {
    ddp__nccl_ops *ops = &n->ops;
    int p2p = call->kind == DDP_CALL_SEND || call->kind == DDP_CALL_RECV, left;
    ddp__nccl_call_id id = {call->seq, {0, 0}, p2p, 0};
    ddp_result result = ddp__nccl_begin(n, NULL);
    if (result != DDP_OK) return result;
    ddp_call_pack(call, id.words);
    result = ddp__cuda_group_fail(
        n->group, DDP__CUDA_RUNTIME->stream_capturing(n->streams->stream[DDP_STREAM_COMM], &n->capturing),
        "cudaStreamIsCapturing");
    {
        const ddp__cuda_lock lock(&n->lock);
        if (!p2p) {
            n->watchdog.own.call[call->seq % DDP__NCCL_COMPARED_CALLS] = id;
            n->watchdog.own.issued = call->seq;
        }
        if (ops->count < DDP__NCCL_MAX_OPS) ops->count++;
        ops->current = (ops->first + ops->count - 1) % DDP__NCCL_MAX_OPS;
        ops->at[ops->current].call = id;
        ops->at[ops->current].recorded = 0;
        if (ops->count == 1) ops->since = ddp_now();
        left = n->watchdog.left_rank_plus_1;
    }
    if (result == DDP_OK && left && (!p2p || call->root == left - 1))
        result = ddp_fail(DDP_ERR_PEER_LOST, "rank %d has destroyed the group", left - 1);
    return result == DDP_OK ? DDP_OK : ddp__nccl_op_end(n, call, result);
}

static ddp_result ddp__nccl_run(ddp_group *, void *state, const ddp_call *call) {
    ddp__nccl *n = (ddp__nccl *)state;
    if (call->flags & DDP_CALL_HOST_MEMORY) {
        DDP_TRY(ddp__nccl_status(n->group, n));
        return ddp__nccl_fail(n, call, ddp_group_call(n->control, call, NULL));
    }
    if (n->comm.in_group) return ddp__nccl_call(n, call); /* ddp__nccl_batch begins and ends the operation */
    DDP_TRY(ddp__nccl_op_begin(n, call));
    return ddp__nccl_op_end(n, call, ddp__nccl_call(n, call));
}

/* Begins or ends a batch of messages. To the watchdog it is one operation. */
static ddp_result ddp__nccl_batch(ddp_group *, void *state, int begin) {
    ddp__nccl *n = (ddp__nccl *)state;
    ddp_call call = DDP_ZERO;
    ddp_result result;
    call.kind = DDP_CALL_SEND;
    call.root = -1;
    if (begin) {
        DDP_TRY(ddp__nccl_op_begin(n, &call));
        result = ddp__nccl_group_start(n);
        return result == DDP_OK ? DDP_OK : ddp__nccl_op_end(n, &call, result);
    }
    if (!n->comm.in_group) return DDP_OK; /* the begin has failed */
    return ddp__nccl_op_end(n, &call, ddp__nccl_group_end(n, DDP_OK));
}

//== NCCL: the watchdog ================================================================== >>impl-watchdog
/* One thread per group. Every DDP__NCCL_WATCHDOG_MS it exchanges states with the other ranks, retires
   finished operations, and checks for errors and timeouts. It aborts the communicator of a failed group. */

/* Describes a call: "seq=412 ddp_all_reduce f32 count=1000 sum". */
static const char *ddp__nccl_describe(char out[160], const ddp__nccl_call_id *call) {
    if (!call->seq) return call->is_message ? "a batch of messages" : "nothing";
    int at = snprintf(out, 160, "seq=%llu ", (unsigned long long)call->seq);
    ddp_call_describe(out + at, 160 - (size_t)at, call->words);
    return out;
}

/* Describes ranks that have not made a call, and their last calls. states: the last ones of all ranks. */
static void ddp__nccl_describe_missing(const ddp__nccl *n, const ddp__nccl_rank_state *states,
                                       const ddp__nccl_call_id *call, char *out, size_t size) {
    size_t at = 0;
    int others = 0;
    char last[160];
    snprintf(out, size, "%s", n->world_size > 1 ? "every rank has issued it" : "it runs only on this rank");
    for (int r = 0; r < n->world_size && !call->is_message; r++) {
        if (r == n->rank || states[r].issued >= call->seq) continue;
        if (others++ >= 3) continue;
        at += (size_t)snprintf(
            out + at, size - at, "%srank %d, %s %s", others > 1 ? "; " : "missing: ", r,
            states[r].leaving ? "which destroyed the group after" : "whose last call is",
            ddp__nccl_describe(last, &states[r].call[states[r].issued % DDP__NCCL_COMPARED_CALLS]));
        if (at > size) at = size;
    }
    if (others > 3 && at < size) snprintf(out + at, size - at, " and %d more", others - 3);
    if (call->is_message)
        snprintf(out, size, "the peer has not issued its send or receive, or in another order");
}

/* Fails the group with an error such as "CAUSE; seq=3 ddp_all_reduce f32 count=1000 sum of group dp is ... on
   rank 0; ...", which names the missing ranks. Right after a call, the last states of the other ranks can be
   older than the call. In this case no rank is reported as missing. */
static void ddp__nccl_report(ddp__nccl *n, const ddp__nccl_rank_state *states, ddp_result cause,
                             const char *cause_text) {
    char text[640], call[160], missing[300] = "";
    ddp__nccl_call_id first = DDP_ZERO;
    int states_are_current = cause == DDP_ERR_TIMEOUT;
    {
        const ddp__cuda_lock lock(&n->lock);
        if (n->ops.count) first = n->ops.at[n->ops.first].call;
        states_are_current |= ddp_now() - n->ops.since > 10e-3 * DDP__NCCL_WATCHDOG_MS;
    }
    if (states_are_current && (first.seq || first.is_message))
        ddp__nccl_describe_missing(n, states, &first, missing, sizeof missing);
    snprintf(text, sizeof text, "%.180s; %s of group=%.60s is pending on rank %d%s%.160s", cause_text,
             ddp__nccl_describe(call, &first), ddp_group_name(n->group), n->rank, missing[0] ? "; " : "",
             missing);
    ddp__nccl_poison(n->group, n, cause, text);
}

/* Retires finished operations. Fails the group for errors of CUDA and NCCL, and for operations that exceed
   the timeout. Holds the lock during ncclCommGetAsyncError: only one thread may be inside NCCL with a
   communicator. */
static void ddp__nccl_check_ops(ddp__nccl *n, const ddp__nccl_rank_state *states) {
    int timeout_ms = ddp_group_timeout_ms(n->group), done = 1;
    double now = ddp_now();
    char problem[200] = "";
    const char *host_call = NULL;
    ddp__nccl_ops *ops = &n->ops;
    ncclResult_t comm_error = ncclSuccess, async_error = ncclSuccess;
    ddp_result result = DDP_OK;
    {
        const ddp__cuda_lock lock(&n->lock);
        while (ops->count && ops->at[ops->first].recorded && done) {
            result = ddp__cuda_query(DDP__CUDA_RUNTIME->event_query(ops->at[ops->first].event),
                                     "work on the GPU failed", "cudaEventQuery", &done);
            if (!done) break;
            ops->first = (ops->first + 1) % DDP__NCCL_MAX_OPS;
            ops->count--;
            ops->since = now;
        }
        if (ops->count && now - ops->since > timeout_ms * 1e-3)
            snprintf(problem, sizeof problem, "timed out after %d ms", timeout_ms);
        if (n->comm.host_call && now - n->comm.host_since > timeout_ms * 1e-3) host_call = n->comm.host_call;
        if (n->comm.handle && !n->comm.busy && n->failure.cause == DDP_OK)
            comm_error = ncclCommGetAsyncError(n->comm.handle, &async_error);
    }
    if (comm_error == ncclSuccess) comm_error = async_error == ncclInProgress ? ncclSuccess : async_error;
    if (result == DDP_OK) result = ddp__nccl_result(comm_error, "ncclCommGetAsyncError");
    if (result != DDP_OK) {
        ddp__nccl_report(n, states, DDP_ERR_ENGINE, ddp_last_error());
    } else if (host_call) {
        snprintf(problem, sizeof problem,
                 "%s: timed out after %d ms; check that the hosts of the ranks reach each other "
                 "(NCCL_DEBUG=INFO shows each attempt)",
                 host_call, timeout_ms);
        ddp__nccl_poison(n->group, n, DDP_ERR_TIMEOUT, problem);
    } else if (problem[0]) {
        ddp__nccl_report(n, states, DDP_ERR_TIMEOUT, problem);
    }
}

/* Reads the states of all ranks. Fails the group if another rank has failed, if two ranks have made different
   calls with the same number, or if a call in flight needs a rank that leaves. Returns 1 if a rank leaves,
   since that rank sends no further state. */
static int ddp__nccl_read_states(ddp__nccl *n, const ddp__nccl_rank_state *states) {
    int left = 0;
    char text[DDP__CUDA_TEXT_MAX], call_text[160];
    for (int r = 0; r < n->world_size; r++) {
        if (states[r].result != DDP_OK && r != n->rank)
            ddp__nccl_set_cause(n, (ddp_result)states[r].result, states[r].text, 1);
    }
    for (int r = 1; r < n->world_size; r++)
        for (int i = 0; i < DDP__NCCL_COMPARED_CALLS; i++) {
            const ddp__nccl_call_id *first = &states[0].call[i], *call = &states[r].call[i];
            if (call->seq && call->seq == first->seq
                && ddp_call_compare(0, first->words, r, call->words) != DDP_OK)
                ddp__nccl_poison(n->group, n, DDP_ERR_MISMATCH, ddp_last_error());
        }
    for (int r = 0; r < n->world_size; r++) {
        ddp__nccl_call_id needs = DDP_ZERO;
        if (!states[r].leaving || r == n->rank) continue;
        left = r + 1;
        {
            const ddp__cuda_lock lock(&n->lock);
            n->watchdog.left_rank_plus_1 = left;
            for (int i = 0; i < n->ops.count; i++) {
                const ddp__nccl_call_id *call = &n->ops.at[(n->ops.first + i) % DDP__NCCL_MAX_OPS].call;
                if (!call->is_message && call->seq > states[r].issued && needs.seq == 0) needs = *call;
            }
        }
        if (needs.seq == 0) continue;
        snprintf(text, sizeof text, "rank %d destroyed the group, but %s needs it", r,
                 ddp__nccl_describe(call_text, &needs));
        ddp__nccl_poison(n->group, n, DDP_ERR_PEER_LOST, text);
    }
    return left != 0;
}

/* Ends the kernels of a failed group, and every wait for them. A caller inside NCCL has one second to return.
   After that it is stuck there, waiting for a peer; ncclCommAbort from this thread then makes it return an
   error. If NCCL has not created the communicator yet, the watchdog calls this function again. */
static void ddp__nccl_abort(ddp__nccl *n) {
    double deadline = ddp_now() + 1;
    int aborted;
    ncclComm_t comm;
    pthread_mutex_lock(&n->lock);
    while (n->comm.busy && ddp_now() < deadline) {
        pthread_mutex_unlock(&n->lock);
        usleep(200);
        pthread_mutex_lock(&n->lock);
    }
    comm = n->comm.handle;
    if (!comm && n->comm.busy) comm = __atomic_load_n(&n->comm.initializing, __ATOMIC_ACQUIRE);
    if (n->comm.aborted) comm = NULL;
    if (comm) n->comm.aborted = 1;
    if (!n->comm.busy) n->comm.handle = NULL; /* otherwise ddp__nccl_end clears it */
    aborted = n->comm.aborted || !n->comm.busy;
    n->ops.count = 0;
    pthread_mutex_unlock(&n->lock);
    if (comm) ncclCommAbort(comm);
    /* A caller on any rank may wait in the control group. */
    if (n->control) ddp_group_poison(n->control, n->failure.cause, n->failure.text);
    if (aborted) __atomic_store_n(&n->failure.comm_aborted, 1, __ATOMIC_RELEASE);
}

/* Waits until the watchdog has aborted the communicator of a failed group. */
static void ddp__nccl_wait_abort(ddp__nccl *n) {
    while (!__atomic_load_n(&n->failure.comm_aborted, __ATOMIC_ACQUIRE)) usleep(200);
}

/* Waits until the next check, or until the state of the group changes. */
static void ddp__nccl_sleep(ddp__nccl *n, int milliseconds) {
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_nsec += milliseconds * 1000000L;
    deadline.tv_sec += deadline.tv_nsec / 1000000000L;
    deadline.tv_nsec %= 1000000000L;
    const ddp__cuda_lock lock(&n->lock);
    if (!__atomic_load_n(&n->watchdog.stopping, __ATOMIC_ACQUIRE)
        && (n->failure.cause == DDP_OK || n->failure.comm_aborted || n->comm.busy))
        pthread_cond_timedwait(&n->changed, &n->lock, &deadline);
}

/* Starts an all-gather of the states of all ranks, with the current state of this rank. */
static ddp_result ddp__nccl_send_state(ddp__nccl *n, ddp__nccl_rank_state *own, ddp__nccl_rank_state *states,
                                       ddp_work *work) {
    {
        const ddp__cuda_lock lock(&n->lock);
        n->watchdog.own.result = n->failure.cause;
        n->watchdog.own.leaving = __atomic_load_n(&n->watchdog.stopping, __ATOMIC_ACQUIRE);
        snprintf(n->watchdog.own.text, sizeof n->watchdog.own.text, "%.399s",
                 n->failure.cause == DDP_OK ? "" : n->failure.text);
        *own = n->watchdog.own;
    }
    return ddp_all_gather(n->watchdog.group, own, states, sizeof *own, DDP_U8, work);
}

/* The watchdog thread. Memory after n: the state of this rank (own), the last states of all ranks (states),
   and the states that are being received (incoming). All ranks receive a state in the same round. So after
   the state of a rank that leaves, no rank sends another one. */
static void *ddp__nccl_watchdog_main(void *argument) {
    ddp__nccl *n = (ddp__nccl *)argument;
    ddp__nccl_rank_state *own = (ddp__nccl_rank_state *)(n + 1), *states = own + 1,
                         *incoming = states + n->world_size;
    ddp_work work = DDP_ZERO;
    ddp_result result = DDP_OK;
    int exchanging = n->world_size > 1, pending = 0, done = 0, leaving = 0;
    DDP__CUDA_RUNTIME->set_device(n->streams->device);
    DDP__CUDA_RUNTIME->relax_capture();
    for (;;) {
        if (exchanging && !pending) {
            result = ddp__nccl_send_state(n, own, incoming, &work);
            leaving = own->leaving;
            pending = result == DDP_OK;
        }
        if (pending) {
            result = ddp_test(n->watchdog.group, &work, &done);
            if (result == DDP_OK && done) {
                result = ddp_wait(n->watchdog.group, &work);
                pending = 0;
                if (result == DDP_OK) memcpy(states, incoming, sizeof *states * (size_t)n->world_size);
                if (result == DDP_OK && ddp__nccl_read_states(n, states)) exchanging = 0;
                exchanging &= !leaving;
            }
        }
        if (exchanging && result != DDP_OK) { /* the cause follows the name of the watchdogs' own call */
            const char *cause = strstr(ddp_last_error(), ": ");
            ddp__nccl_report(n, states, result, cause ? cause + 2 : ddp_last_error());
            exchanging = pending = 0;
        }
        if (__atomic_load_n(&n->failure.cause, __ATOMIC_ACQUIRE) == DDP_OK) ddp__nccl_check_ops(n, states);
        if (__atomic_load_n(&n->failure.cause, __ATOMIC_ACQUIRE) != DDP_OK && !n->failure.comm_aborted)
            ddp__nccl_abort(n);
        if (!exchanging && !pending && __atomic_load_n(&n->watchdog.stopping, __ATOMIC_ACQUIRE)) return NULL;
        /* Every rank receives W states of almost 1 KiB: large groups exchange them less often. */
        ddp__nccl_sleep(n, DDP__NCCL_WATCHDOG_MS * (1 + n->world_size / 64));
    }
}

//== NCCL: group memory =================================================================== >>impl-nccl-memory
/* ddp_group_alloc and ddp_group_free. Memory is registered with NCCL, so that transfers need no copy through
   NCCL's own buffers. */

/* Registers the region with NCCL if that is possible. If NCCL refuses, the region works without. */
static void ddp__nccl_region_register(ddp__nccl *n, ddp__cuda_region *region, size_t size_bytes) {
#if DDP__NCCL_VERSION >= 22700
    ncclResult_t error = ncclCommWindowRegister(n->comm.handle, region->memory, size_bytes, &region->window,
                                                NCCL_WIN_COLL_SYMMETRIC);
    if (ddp__nccl_complete(n, error, "ncclCommWindowRegister") != DDP_OK) region->window = NULL;
    if (region->window || ddp__nccl_status(n->group, n) != DDP_OK) return;
#endif
#if DDP__NCCL_VERSION >= 21900
    if (ncclCommRegister(n->comm.handle, region->memory, size_bytes, &region->handle) != ncclSuccess)
        region->handle = NULL;
#else
    (void)n;
    (void)region;
    (void)size_bytes;
#endif
}

/* Frees a region. If the communicator has been aborted, the registrations have ended with it. */
static void ddp__nccl_region_free(ddp__nccl *n, ddp__cuda_region *region) {
    DDP__CUDA_RUNTIME->set_device(n->streams->device);
    if (ddp__nccl_begin(n, NULL) != DDP_OK) ddp__nccl_wait_abort(n);
#if DDP__NCCL_VERSION >= 22700
    if (region->window && n->comm.handle)
        ddp__nccl_complete(n, ncclCommWindowDeregister(n->comm.handle, region->window),
                           "ncclCommWindowDeregister");
#endif
#if DDP__NCCL_VERSION >= 21900
    if (region->handle && n->comm.handle) ncclCommDeregister(n->comm.handle, region->handle);
#endif
    ddp__nccl_end(n);
#if DDP__NCCL_VERSION >= 21900
    if (region->memory) ncclMemFree(region->memory);
#else
    if (region->memory) DDP__CUDA_RUNTIME->free(region->memory);
#endif
    ddp_host_free(n->group, region);
}

static ddp_result ddp__nccl_region_alloc(ddp__nccl *n, ddp__cuda_region *region, size_t size) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    const char *function = "allocating group memory";
    cudaStream_t stream = n->streams->stream[DDP_STREAM_COMM];
    DDP__CUDA_TRY(function, "cudaSetDevice", cuda->set_device(n->streams->device));
#if DDP__NCCL_VERSION >= 21900
    if (ddp__nccl_result(ncclMemAlloc(&region->memory, size), "ncclMemAlloc") != DDP_OK) {
        region->memory = NULL;
        return ddp_fail(DDP_ERR_NO_MEMORY, "%s", ddp_last_error());
    }
#else
    DDP__CUDA_TRY(function, "cudaMalloc", cuda->malloc(&region->memory, size));
#endif
    DDP__CUDA_TRY(function, "cudaMemsetAsync", cuda->memset_async(region->memory, 0, size, stream));
    return ddp__cuda_fail(cuda->synchronize(stream), function, "cudaStreamSynchronize");
}

static ddp_result ddp__nccl_alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    ddp__nccl *n = (ddp__nccl *)state;
    ddp__cuda_region *region = (ddp__cuda_region *)ddp_host_alloc(group, sizeof *region);
    size_t size = ddp_round_up(size_bytes, 4096); /* windows require whole pages */
    ddp_saved_error error = DDP_ZERO;
    ddp_result result = region ? ddp__nccl_region_alloc(n, region, size) : DDP_ERR_NO_MEMORY;
    result = ddp_agree(group, "ddp_group_alloc", result, 0, "");
    if (result == DDP_OK) result = ddp__nccl_begin(n, "ncclCommWindowRegister");
    if (result != DDP_OK) {
        ddp_error_save(&error, result);
        if (region) ddp__nccl_region_free(n, region);
        return ddp_error_restore(&error);
    }
    ddp__nccl_region_register(n, region, size);
    ddp__nccl_end(n);
    region->next = n->regions;
    n->regions = region;
    *out = region->memory;
    return DDP_OK;
}

/* Waits for both streams, which may still use the memory, then frees it. All ranks return together, for the
   reason given at ddp__nccl_workspace_grow. */
static ddp_result ddp__nccl_free(ddp_group *group, void *state, void *memory) {
    ddp__nccl *n = (ddp__nccl *)state;
    cudaError_t error = DDP__CUDA_RUNTIME->synchronize(n->streams->stream[DDP_STREAM_COMM]);
    if (error == cudaSuccess) error = DDP__CUDA_RUNTIME->synchronize(n->streams->stream[DDP_STREAM_COMPUTE]);
    ddp__nccl_region_free(n, ddp__cuda_region_remove(&n->regions, memory));
    return ddp_agree(group, "ddp_group_free", ddp__cuda_group_fail(group, error, "cudaStreamSynchronize"), 0,
                     "");
}

//== NCCL: creating and closing groups ===================================================== >>impl-nccl-group
/* Creates, splits and closes groups. Every step that needs all ranks begins with ddp_agree, so that a failure
   of one rank is returned on all:

       open    own state -> agree -> id of rank 0 -> control and watchdog groups -> watchdog -> communicator
       split   own state -> agree -> communicator -> control and watchdog groups -> watchdog
       close   own calls end -> watchdog ends -> wait for the other ranks -> free */

/* Returns 1 if every rank has finished its calls and destroys the group within DDP__NCCL_CLOSE_TIMEOUT_MS. */
static int ddp__nccl_wait_all_leave(ddp__nccl *n) {
    double deadline = ddp_now() + DDP__NCCL_CLOSE_TIMEOUT_MS * 1e-3;
    ddp_work work = DDP_ZERO;
    int done = 0;
    if (ddp__nccl_status(n->group, n) != DDP_OK) return 0;
    if (n->world_size == 1) return 1;
    if (ddp_all_reduce(n->control, &n->leave[0], &n->leave[1], 1, DDP_U8, DDP_OP_MAX, &work) != DDP_OK)
        return 0;
    while (ddp_test(n->control, &work, &done) == DDP_OK && !done && ddp_now() < deadline) usleep(50);
    return done && ddp_wait(n->control, &work) == DDP_OK;
}

/* Waits for this rank's calls, which the watchdog can still end, then for the other ranks, then frees. Aborts
   even a healthy communicator: ncclCommDestroy waits for the ranks of this machine without a timeout, and no
   operation is in flight that an abort could lose. A rank that destroys the group much earlier than its peers
   aborts before it frees memory that they may still access. */
static void ddp__nccl_close(ddp_group *, void *state) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    ddp__nccl *n = (ddp__nccl *)state;
    cuda->set_device(n->streams->device);
    while (ddp__nccl_status(n->group, n) == DDP_OK
           && cuda->stream_query(n->streams->stream[DDP_STREAM_COMM]) == cudaErrorNotReady) {
        cuda->clear_error();
        usleep(50);
    }
    {
        const ddp__cuda_lock lock(&n->lock);
        __atomic_store_n(&n->watchdog.stopping, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&n->changed);
    }
    if (n->watchdog.running) pthread_join(n->watchdog.thread, NULL);
    if (ddp__nccl_status(n->group, n) != DDP_OK && !n->failure.comm_aborted)
        ddp__nccl_abort(n); /* the group failed after the watchdog's last check */
    if (!ddp__nccl_wait_all_leave(n) && n->comm.owned && n->comm.handle) {
        ncclCommAbort(n->comm.handle);
        n->comm.handle = NULL;
    }
    while (n->regions) ddp__nccl_region_free(n, ddp__cuda_region_remove(&n->regions, n->regions->memory));
    if (n->comm.handle && n->comm.owned) ncclCommAbort(n->comm.handle);
    for (int i = 0; i < DDP__NCCL_MAX_OPS; i++)
        if (n->ops.at[i].event) cuda->event_destroy(n->ops.at[i].event);
    if (n->workspace.memory) cuda->free(n->workspace.memory);
    if (n->workspace.barrier_operand) cuda->free(n->workspace.barrier_operand);
    ddp_group_destroy(n->watchdog.group);
    ddp_group_destroy(n->control);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    ddp_host_free(n->group, n);
}

static ddp_result ddp__nccl_resources(ddp__nccl *n) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    const char *function = "creating the group";
    ddp__nccl_workspace *w = &n->workspace;
    DDP_TRY(ddp_error_restore(&n->streams->open_failure));
    DDP__CUDA_TRY(function, "cudaSetDevice", cuda->set_device(n->streams->device));
    for (int i = 0; i < DDP__NCCL_MAX_OPS; i++)
        DDP__CUDA_TRY(function, "cudaEventCreateWithFlags", cuda->event_create(&n->ops.at[i].event));
    w->size_bytes = DDP__NCCL_WORKSPACE_FIRST + 256 * (size_t)n->world_size;
    DDP__CUDA_TRY(function, "cudaMalloc", cuda->malloc(&w->memory, w->size_bytes));
    DDP__CUDA_TRY(function, "cudaMalloc", cuda->malloc(&w->barrier_operand, 16));
    return ddp__cuda_fail(cuda->memset_async(w->barrier_operand, 0, 16, n->streams->stream[DDP_STREAM_COMM]),
                          function, "cudaMemsetAsync");
}

/* Creates the part of the state that needs no other rank. Returns NULL if memory for the object runs out. */
static ddp__nccl *ddp__nccl_new(ddp_group *group, ddp_result *result) {
    const size_t world_size = (size_t)ddp_world_size(group);
    size_t states_bytes = sizeof(ddp__nccl_rank_state) * (2 * world_size + 1);
    size_t machines_bytes = sizeof(uint64_t) * world_size;
    ddp__nccl *n = (ddp__nccl *)ddp_host_alloc(group, sizeof *n + states_bytes + machines_bytes);
    pthread_condattr_t clock;
    *result = DDP_ERR_NO_MEMORY;
    if (!n) return NULL;
    n->group = group;
    n->streams = ddp__cuda_streams_of(group);
    n->rank = ddp_rank(group);
    n->world_size = ddp_world_size(group);
    n->machines = (uint64_t *)(void *)((unsigned char *)(n + 1) + states_bytes);
    pthread_mutex_init(&n->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&n->changed, &clock);
    pthread_condattr_destroy(&clock);
    *result = ddp__nccl_resources(n);
    return n;
}

/* Forms the blocks of >>impl-nccl-tree from n->machines. */
static void ddp__nccl_set_blocks(ddp__nccl *n) {
    const int block_ranks = ddp_machine_block(n->machines, n->world_size);
    int one_machine = 1;
    for (int r = 1; r < n->world_size; r++) one_machine &= n->machines[r] == n->machines[0];
    n->block_ranks = one_machine || block_ranks == 1 ? n->world_size : block_ranks;
}

static ddp_result ddp__nccl_start_watchdog(ddp__nccl *n) {
    sigset_t all, old;
    int error;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals are handled by the user's threads */
    error = pthread_create(&n->watchdog.thread, NULL, ddp__nccl_watchdog_main, n);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    n->watchdog.running = error == 0;
    if (error)
        return ddp_fail(DDP_ERR_SYSTEM, "the watchdog thread could not be started: %s", strerror(error));
    return DDP_OK;
}

/* Uses the user's communicator. It must have the rank, size and device of the group. */
static ddp_result ddp__nccl_use_comm(ddp__nccl *n, ncclComm_t comm) {
    int count = 0, rank = 0, device = 0;
    ncclResult_t error = ncclCommCount(comm, &count);
    if (error == ncclSuccess) error = ncclCommUserRank(comm, &rank);
    if (error == ncclSuccess) error = ncclCommCuDevice(comm, &device);
    n->comm.handle = comm;
    if (error != ncclSuccess) return ddp__nccl_result(error, "reading the ranks of desc.comm");
    if (count == n->world_size && rank == n->rank && device == n->streams->device) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID,
                    "desc.comm is rank %d of %d on device %d, but the group is rank %d of %d on device %d; "
                    "set it to the communicator of this rank",
                    rank, count, device, n->rank, n->world_size, n->streams->device);
}

/* Returns the result of a step that every rank executes. A rank that fails because of another one returns
   DDP_ERR_POISONED, so that ddp_agree chooses the first cause. */
static ddp_result ddp__nccl_result_for_agree(ddp__nccl *n) {
    ddp_result result = ddp__nccl_status(n->group, n);
    return result != DDP_OK && n->failure.from_peer ? DDP_ERR_POISONED : result;
}

/* Makes the NCCL call that creates a communicator. It blocks until every rank has made it, or the watchdog
   aborts. A failure fails the group, and the watchdogs send it to the other ranks. */
template <class F> static ddp_result ddp__nccl_connect(ddp__nccl *n, const char *name, const F &call) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    DDP_TRY(ddp__nccl_begin(n, name));
    ddp_result result = ddp__nccl_complete(n, call(&config), name);
    /* The group fails before the watchdog can poll the communicator. */
    if (result != DDP_OK) ddp__nccl_poison(n->group, n, result, ddp_last_error());
    ddp__nccl_end(n);
    return result;
}

static ddp_result ddp__nccl_init(ddp__nccl *n, const ncclUniqueId *id) {
    n->comm.owned = 1;
    ddp__nccl_connect(n, "ncclCommInitRankConfig", [&](ncclConfig_t *config) {
        ncclResult_t error = ncclCommInitRankConfig(&n->comm.initializing, n->world_size, *id, n->rank,
                                                    config);
        const ddp__cuda_lock lock(&n->lock);
        n->comm.handle = n->comm.initializing;
        n->comm.initializing = NULL;
        return error;
    });
    return ddp__nccl_result_for_agree(n);
}

/* The last step of creating a group, with a result that all ranks have agreed on. On failure it frees
   everything except the user's communicator. */
static ddp_result ddp__nccl_finish_open(ddp__nccl *n, ddp_result result, void **state) {
    ddp_saved_error error = DDP_ZERO;
    if (result == DDP_OK) {
        *state = n;
        return DDP_OK;
    }
    ddp_error_save(&error, result);
    {
        const ddp__cuda_lock lock(&n->lock);
        if (!n->comm.owned) n->comm.handle = NULL;
    }
    ddp__nccl_poison(n->group, n, result, error.text);
    ddp__nccl_close(n->group, n);
    return ddp_error_restore(&error);
}

/* Opens the backend for ddp_cuda_group_create. All ranks agree before each step that needs all of them. */
static ddp_result ddp__nccl_open(ddp_group *group, void **state) {
    const ddp__cuda_open_args *args = ddp__cuda_this_thread.args;
    const char *call_name = "ddp_cuda_group_create";
    const uint64_t machine = ddp_machine_id();
    ncclUniqueId id = DDP_ZERO;
    ddp_result result;
    ddp__nccl *n = ddp__nccl_new(group, &result);
    if (result == DDP_OK && args->comm)
        result = ddp__nccl_use_comm(n, (ncclComm_t)args->comm);
    else if (result == DDP_OK && n->rank == 0)
        result = ddp__nccl_result(ncclGetUniqueId(&id), "ncclGetUniqueId");
    result = ddp_agree(args->control, call_name, result, 0, "");
    if (result == DDP_OK && !args->comm)
        result = ddp_broadcast(args->control, id.internal, sizeof id.internal, DDP_U8, 0, NULL);
    if (!n) return result;
    if (result == DDP_OK) result = ddp_all_gather(args->control, &machine, n->machines, 1, DDP_U64, NULL);
    if (result == DDP_OK) ddp__nccl_set_blocks(n);
    if (result == DDP_OK) result = ddp_group_split(args->control, 0, n->rank, &n->control);
    if (result == DDP_OK) result = ddp_group_split(n->control, 0, n->rank, &n->watchdog.group);
    if (result == DDP_OK) result = ddp_agree(args->control, call_name, ddp__nccl_start_watchdog(n), 0, "");
    if (result == DDP_OK && !args->comm)
        result = ddp_agree(args->control, call_name, ddp__nccl_init(n, &id), 0, "");
    return ddp__nccl_finish_open(n, result, state);
}

/* Creates the child's communicator. *comm is NULL on ranks without a child. If the split fails, waits for the
   abort of the parent before it aborts *comm: a user's non-blocking parent has a thread that
   writes *comm. */
static ddp_result ddp__nccl_split_comm(ddp__nccl *p, int color, int key, ncclComm_t *comm) {
    ddp_result result = ddp__nccl_connect(p, "ncclCommSplit", [&](ncclConfig_t *config) {
        return ncclCommSplit(p->comm.handle, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, comm, config);
    });
    if (result == DDP_OK) return DDP_OK;
    ddp__nccl_wait_abort(p);
    if (*comm) ncclCommAbort(*comm);
    *comm = NULL;
    return ddp__nccl_result_for_agree(p);
}

/* Splits the group. child NULL with members: memory has run out on this rank, which only takes part in the
   agreement. */
static ddp_result ddp__nccl_split(ddp_group *group, void *state, ddp_group *child, const int *members,
                                  int member_count, void **child_state) {
    ddp__nccl *p = (ddp__nccl *)state, *n = NULL;
    int color = member_count > 0 ? members[0] : -1;
    int key = child ? ddp_rank(child) : 0;
    const char *call_name = "ddp_group_split";
    ncclComm_t comm = NULL;
    ddp_group *control = NULL;
    ddp_result result = DDP_OK;
    if (child)
        n = ddp__nccl_new(child, &result);
    else if (member_count > 0)
        result = DDP_ERR_NO_MEMORY;
    result = ddp_agree(group, call_name, result, 0, "");
    if (result == DDP_OK)
        result = ddp_agree(group, call_name, ddp__nccl_split_comm(p, color, key, &comm), 0, "");
    if (result == DDP_OK) result = ddp_group_split(p->control, color, key, &control);
    if (!n) return result == DDP_OK ? ddp_agree(group, call_name, result, 0, "") : result;
    for (int r = 0; r < member_count; r++) n->machines[r] = p->machines[members[r]];
    ddp__nccl_set_blocks(n);
    n->comm.handle = comm;
    n->comm.owned = 1;
    n->control = control;
    if (control) ddp_group_set_local(child, ddp_local_rank(control), ddp_local_world_size(control));
    if (result == DDP_OK) result = ddp_group_split(control, 0, n->rank, &n->watchdog.group);
    if (result == DDP_OK) result = ddp_agree(group, call_name, ddp__nccl_start_watchdog(n), 0, "");
    return ddp__nccl_finish_open(n, result, child_state);
}

static const ddp_backend *ddp__cuda_nccl_backend(void) {
    static const ddp_backend nccl = {
        "nccl",
        ddp__nccl_open,
        ddp__nccl_run,
        NULL,
        NULL,
        NULL,
        ddp__nccl_split,
        ddp__nccl_alloc,
        ddp__nccl_free,
        ddp__nccl_status,
        ddp__nccl_poison,
        ddp__nccl_close,
        1,
        DDP_ORDER_ANY,
        ddp__nccl_batch,
        NULL,
        NULL,
        NULL,
        NULL,
    };
    return &nccl;
}

#endif /* !DDP_NO_NCCL */

//== host-staged groups ==================================================================== >>impl-staged

/* Several ranks on one GPU, for development. Payloads go through pinned memory and the collectives of a CPU
   group, which determine bits and failures. A call is cut into rounds. While the CPU group executes one
   round, the next one is copied:

       copy stream    to host 0   to host 1              to device 0   to host 2   to device 1   ...
       CPU group                              round 0                  round 1                   ...

   A call returns after its results are copied, so every stream sees them. Host pointers also work. */

#if !defined(DDP__CUDA_STAGE_BYTES)
#define DDP__CUDA_STAGE_BYTES \
    ((size_t)1 << 21) /* bytes of one buffer: two rounds, each with input and output */
#endif

/* A send or receive. A complete message retains its memory and event; a later message that fits reuses it. */
typedef struct ddp__cuda_message {
    struct ddp__cuda_message *next;  /* in the list of sends that are being copied to the host */
    struct ddp__cuda_message *older; /* in the list of all messages */
    void *memory;                    /* pinned */
    size_t capacity;
    cudaEvent_t event;
    int stage; /* a send: TO_HOST, TRANSFER, FREE; a receive: TRANSFER, TO_DEVICE, FREE */
    ddp_call call;
    ddp_work work;
    ddp_result result; /* of its ddp_send, which the poll of another message may start */
} ddp__cuda_message;
enum { DDP__CUDA_TO_HOST, DDP__CUDA_TRANSFER, DDP__CUDA_TO_DEVICE, DDP__CUDA_FREE };

/* Sends and receives. They have their own CPU group and stream, and run in parallel with collectives. */
typedef struct ddp__cuda_messages {
    ddp_group *group; /* a split of the user's CPU group */
    cudaStream_t stream;
    pthread_mutex_t lock;       /* protects the following fields */
    ddp__cuda_message *copying; /* sends that are being copied to the host, in issue order */
    ddp__cuda_message *all;
} ddp__cuda_messages;

enum { DDP__CUDA_READY = 2 };

/* Collectives: host buffers of two rounds, and the stream that copies to and from them. */
typedef struct ddp__cuda_staging {
    cudaStream_t stream;
    /* [k & 1]: of round k. [DDP__CUDA_READY]: first the work on the caller's stream, later the last copy. */
    cudaEvent_t events[3];
    void *memory; /* in 0, in 1, out 0, out 1; pinned; NULL until the first call */
} ddp__cuda_staging;

typedef struct ddp__cuda_staged {
    ddp_group *owner, *control; /* control: a split of the user's CPU group, for collectives */
    int device, rank, world_size;
    ddp__cuda_staging staging;
    ddp__cuda_messages messages;
    ddp__cuda_region *regions;
} ddp__cuda_staged;

#define DDP__CUDA_STAGED_CALL "staging through the host"
static ddp_result ddp__cuda_staged_error(cudaError_t error, const char *call) {
    return ddp__cuda_fail(error, DDP__CUDA_STAGED_CALL, call);
}

/* Makes a device current for this thread until the end of the block. Calls run on several threads, and each
   thread has its own current device. */
struct ddp__cuda_device_guard {
    int before, device;
    ddp_result result;
    __forceinline__ explicit ddp__cuda_device_guard(int number) : before(number), device(number) {
        result = ddp__cuda_staged_error(DDP__CUDA_RUNTIME->get_device(&before), "cudaGetDevice");
        if (before != device)
            result = ddp__cuda_staged_error(DDP__CUDA_RUNTIME->set_device(device), "cudaSetDevice");
    }
    __forceinline__ ~ddp__cuda_device_guard() {
        if (before != device) DDP__CUDA_RUNTIME->set_device(before);
    }
};

/* Returns the failure of either CPU group. The error line is the cause only. */
static ddp_result ddp__cuda_staged_status(const ddp_group *, void *state) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    ddp_result result = ddp_group_cause(s->control);
    return result == DDP_OK ? ddp_group_cause(s->messages.group) : result;
}

static void ddp__cuda_staged_poison(ddp_group *, void *state, ddp_result cause, const char *text) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    ddp_group_poison(s->control, cause, text);
    ddp_group_poison(s->messages.group, cause, text);
}

/* Fails both CPU groups on all ranks. An earlier cause is retained. only_this_rank: 1 = no other rank
   has failed. */
static ddp_result ddp__cuda_staged_fail(ddp__cuda_staged *s, ddp_result result, int only_this_rank) {
    char text[DDP__CUDA_TEXT_MAX], prefix[20] = "";
    ddp_result first;
    if (only_this_rank) snprintf(prefix, sizeof prefix, "rank %d: ", s->rank);
    snprintf(text, sizeof text, "%s%.480s", prefix, ddp_last_error());
    first = ddp__cuda_staged_status(NULL, s);
    if (first != DDP_OK) snprintf(text, sizeof text, "%s", ddp_last_error());
    ddp__cuda_staged_poison(NULL, s, first == DDP_OK ? result : first, text);
    return ddp_fail(result, "%s", text);
}

/* Waits until the GPU has passed an event, or the group fails. */
static ddp_result ddp__cuda_staged_wait_event(ddp__cuda_staged *s, cudaEvent_t event, const char *work) {
    int timeout_ms = ddp_group_timeout_ms(s->owner);
    double deadline = ddp_now() + timeout_ms * 1e-3;
    int done = 0;
    for (int tries = 0;; tries++) {
        DDP_TRY(ddp__cuda_query(DDP__CUDA_RUNTIME->event_query(event), DDP__CUDA_STAGED_CALL,
                                "cudaEventQuery", &done));
        if (done) return DDP_OK;
        if (tries < 2000) {
            sched_yield();
            continue;
        }
        usleep(50);
        if (ddp__cuda_staged_status(NULL, s) != DDP_OK) return DDP_ERR_POISONED;
        if (ddp_now() <= deadline) continue;
        return ddp_fail(DDP_ERR_TIMEOUT, "timed out after %d ms: the GPU of rank %d has not finished %s",
                        timeout_ms, s->rank, work);
    }
}

//== host-staged groups: collectives in rounds ========================================== >>impl-staged-rounds
/* ddp__cuda_staged_run executes a collective. Its data moves through pinned memory (the stage), a part of
   each block per round:

       user's buffer (GPU)    [block 0: round 0 | round 1 ..][block 1: round 0 | round 1 ..]
            | ddp__cuda_stage_copy, for round k
       stage, in k & 1        [round k of block 0][round k of block 1] ...
            | the same collective on the CPU group, with smaller counts
       stage, out k & 1       [round k of block 0][round k of block 1] ...
            | ddp__cuda_stage_copy
       user's buffer (GPU) */

typedef struct ddp__cuda_rounds {
    const ddp_call *call;
    size_t max_count;      /* elements of the largest block of any rank */
    size_t round_elements; /* elements of a block per round */
    int in_place;          /* 1 = the call of the CPU group is in place, with one block */
} ddp__cuda_rounds;

/* Returns the number of elements that round k moves of a block with `count` elements. */
static size_t ddp__cuda_elements_of_round(const ddp__cuda_rounds *p, size_t count, size_t k) {
    size_t begin = k * p->round_elements;
    if (begin >= count) return 0;
    return count - begin < p->round_elements ? count - begin : p->round_elements;
}

static cudaError_t ddp__cuda_staging_copy(const ddp__cuda_staged *s, unsigned char *device,
                                          unsigned char *stage, size_t size_bytes, int to_device) {
    void *dst = to_device ? device : stage, *src = to_device ? stage : device;
    return DDP__CUDA_RUNTIME->memcpy_async(dst, src, size_bytes, cudaMemcpyDefault, s->staging.stream);
}

/* Copies the data of round k that this rank sends to the stage (to_device 0), or that it receives from the
   stage (to_device 1). On the stage, blocks are adjacent; in _v calls they are round_elements apart. A block
   that goes to all peers is copied once. If all blocks fit into one round, they are adjacent on both sides,
   and one copy moves them. */
static cudaError_t ddp__cuda_stage_copy(const ddp__cuda_staged *s, const ddp__cuda_rounds *p,
                                        unsigned char *stage, size_t k, int to_device) {
    const ddp_call *call = p->call;
    const size_t *counts = to_device ? call->recv_counts : call->send_counts;
    size_t element = ddp_dtype_size(call->dtype), round_bytes = p->round_elements * element;
    size_t stage_bytes = 0, last_begin = SIZE_MAX;
    int reads_recv = to_device || call->kind == DDP_CALL_BROADCAST;
    unsigned char *data = (unsigned char *)(reads_recv ? call->recv : (void *)call->send);
    int adjacent = !call->recv_counts && p->max_count <= p->round_elements;
    cudaError_t error = cudaSuccess;
    for (int j = 0; j < s->world_size && error == cudaSuccess; j++) {
        ddp_bytes block = to_device ? ddp_call_receives(call, s->rank, j) : ddp_call_sends(call, s->rank, j);
        size_t n = ddp__cuda_elements_of_round(p, block.size / element, k) * element;
        size_t stage_begin = counts ? (size_t)j * round_bytes : stage_bytes;
        if (n == 0 || (!counts && block.begin == last_begin)) continue;
        last_begin = block.begin;
        stage_bytes += n;
        if (!adjacent)
            error = ddp__cuda_staging_copy(s, data + block.begin + k * round_bytes, stage + stage_begin, n,
                                           to_device);
    }
    if (adjacent && stage_bytes) error = ddp__cuda_staging_copy(s, data, stage, stage_bytes, to_device);
    return error;
}

static ddp_result ddp__cuda_round_to_host(const ddp__cuda_staged *s, const ddp__cuda_rounds *p, size_t k) {
    const ddp__cuda_staging *staging = &s->staging;
    unsigned char *in = (unsigned char *)staging->memory + (k & 1) * DDP__CUDA_STAGE_BYTES;
    DDP_TRY(ddp__cuda_staged_error(ddp__cuda_stage_copy(s, p, in, k, 0), "cudaMemcpyAsync"));
    return ddp__cuda_staged_error(DDP__CUDA_RUNTIME->event_record(staging->events[k & 1], staging->stream),
                                  "cudaEventRecord");
}

/* Executes round k on the CPU group. */
static ddp_result ddp__cuda_round_call(ddp__cuda_staged *s, const ddp__cuda_rounds *p, size_t k,
                                       unsigned char *in, unsigned char *out) {
    size_t send_counts[DDP_MAX_LOCAL_RANKS], recv_counts[DDP_MAX_LOCAL_RANKS], offsets[DDP_MAX_LOCAL_RANKS];
    ddp_call call = *p->call;
    call.send = call.kind == DDP_CALL_BROADCAST ? NULL : in;
    call.recv = out;
    call.count = ddp__cuda_elements_of_round(p, p->max_count, k);
    if (call.recv_counts) {
        call.count = 0;
        for (int j = 0; j < s->world_size; j++) {
            recv_counts[j] = ddp__cuda_elements_of_round(p, call.recv_counts[j], k);
            send_counts[j] = call.send_counts ? ddp__cuda_elements_of_round(p, call.send_counts[j], k) : 0;
            offsets[j] = (size_t)j * p->round_elements;
            if (call.kind == DDP_CALL_ALL_GATHER_V) call.count += recv_counts[j];
        }
        call.recv_counts = recv_counts;
        call.recv_offsets = offsets;
        if (call.send_counts) {
            call.send_counts = send_counts;
            call.send_offsets = offsets;
        }
    }
    return ddp_group_call(s->control, &call, NULL);
}

static ddp_result ddp__cuda_rounds_run(ddp__cuda_staged *s, const ddp__cuda_rounds *p) {
    size_t rounds = p->max_count / p->round_elements + (p->max_count % p->round_elements != 0);
    int has_result = p->call->kind != DDP_CALL_BROADCAST || p->call->root != s->rank;
    if (rounds) DDP_TRY(ddp__cuda_round_to_host(s, p, 0));
    for (size_t k = 0; k < rounds; k++) {
        unsigned char *in = (unsigned char *)s->staging.memory + (k & 1) * DDP__CUDA_STAGE_BYTES,
                      *out = p->in_place ? in : in + 2 * DDP__CUDA_STAGE_BYTES;
        if (k + 1 < rounds) DDP_TRY(ddp__cuda_round_to_host(s, p, k + 1));
        DDP_TRY(ddp__cuda_staged_wait_event(s, s->staging.events[k & 1], "the work before this call"));
        DDP_TRY(ddp__cuda_round_call(s, p, k, in, out));
        if (has_result)
            DDP_TRY(ddp__cuda_staged_error(ddp__cuda_stage_copy(s, p, out, k, 1), "cudaMemcpyAsync"));
    }
    return DDP_OK;
}

/* Exchanges the counts of all ranks, which determine the number of rounds. If two ranks disagree, the error
   names both, with the same line on every rank. */
static ddp_result ddp__cuda_staged_counts(ddp__cuda_staged *s, ddp__cuda_rounds *p) {
    const ddp_call *call = p->call;
    size_t w = (size_t)s->world_size;
    uint64_t *own = (uint64_t *)s->staging.memory, *all = own + 2 * w;
    if (w > DDP_MAX_LOCAL_RANKS)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "calls with counts have at most %d ranks with DDP_CUDA_ENGINE_STAGED; use NCCL with "
                        "one device for each rank",
                        DDP_MAX_LOCAL_RANKS);
    for (size_t j = 0; j < w; j++) {
        own[j] = call->send_counts ? call->send_counts[j] : 0;
        own[w + j] = call->recv_counts[j];
    }
    ddp_result result = ddp_all_gather(s->control, own, all, 2 * w, DDP_U64, NULL);
    p->max_count = 0;
    for (size_t from = 0; from < w && result == DDP_OK; from++)
        for (size_t to = 0; to < w; to++) {
            uint64_t sent = call->send_counts ? all[2 * w * from + to] : all[w + from],
                     expected = all[2 * w * to + w + from];
            if (sent > p->max_count) p->max_count = (size_t)sent;
            if (sent == expected) continue;
            if (call->send_counts)
                return ddp_fail(DDP_ERR_MISMATCH,
                                "counts disagree: rank %d sends %llu elements to rank %d, which expects %llu",
                                (int)from, (unsigned long long)sent, (int)to, (unsigned long long)expected);
            return ddp_fail(DDP_ERR_MISMATCH,
                            "counts disagree: recv_counts[%d] is %llu on rank 0 and %llu on rank %d",
                            (int)from, (unsigned long long)sent, (unsigned long long)expected, (int)to);
        }
    return result;
}

/* Orders the copies of this call after the work on this thread's stream. */
static ddp_result ddp__cuda_staged_fence(cudaStream_t stream, cudaEvent_t event) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    cudaStream_t compute = ddp__cuda_this_thread.stream;
    int capturing = 0;
    DDP_TRY(ddp__cuda_staged_error(cuda->stream_capturing(compute, &capturing), "cudaStreamIsCapturing"));
    if (capturing)
        return ddp_fail(
            DDP_ERR_UNSUPPORTED,
            "a group staged through the host cannot be captured into a CUDA graph; end the capture first");
    DDP_TRY(ddp__cuda_staged_error(cuda->event_record(event, compute), "cudaEventRecord"));
    return stream ? ddp__cuda_staged_error(cuda->stream_wait_event(stream, event), "cudaStreamWaitEvent")
                  : DDP_OK;
}

static ddp_result ddp__cuda_staged_run(ddp_group *, void *state, const ddp_call *call) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    ddp__cuda_staging *staging = &s->staging;
    ddp__cuda_rounds p = {call, 0, 0, 0};
    uint64_t words[2];
    char text[200];
    int ranks_agree;
    ddp_result result, idle;
    if (call->flags & DDP_CALL_HOST_MEMORY) {
        result = ddp_group_call(s->control, call, NULL);
        return result == DDP_OK ? DDP_OK : ddp__cuda_staged_fail(s, result, 0);
    }
    const ddp__cuda_device_guard guard(s->device);
    result = guard.result;
    if (result == DDP_OK && !staging->memory)
        result = ddp__cuda_staged_error(
            DDP__CUDA_RUNTIME->host_alloc(&staging->memory, 4 * DDP__CUDA_STAGE_BYTES), "cudaHostAlloc");
    p.in_place = call->kind == DDP_CALL_ALL_REDUCE || call->kind == DDP_CALL_REDUCE
                 || call->kind == DDP_CALL_BROADCAST;
    p.round_elements = DDP__CUDA_STAGE_BYTES / ddp_dtype_size(call->dtype)
                       / (p.in_place ? 1 : (size_t)s->world_size);
    p.max_count = call->kind == DDP_CALL_BARRIER ? 0 : call->count;
    if (result == DDP_OK) result = ddp__cuda_staged_fence(staging->stream, staging->events[DDP__CUDA_READY]);
    ddp_call_pack(call, words);
    ddp_call_describe(text, sizeof text, words);
    result = ddp_agree(s->control, "a staged group", result, ddp_hash(DDP_HASH_SEED, text, strlen(text)),
                       text);
    /* The cause follows "rank 0/2 ddp_barrier group=world.0: ". */
    const char *cause = result == DDP_OK ? NULL : strstr(ddp_last_error(), ": ");
    if (cause) ddp_fail(result, "%s", cause + 2);
    if (result == DDP_OK && call->recv_counts) result = ddp__cuda_staged_counts(s, &p);
    ranks_agree = result == DDP_OK;
    if (ranks_agree) result = ddp__cuda_rounds_run(s, &p);
    if (result != DDP_OK) result = ddp__cuda_staged_fail(s, result, ranks_agree);
    idle = ddp__cuda_staged_error(
        DDP__CUDA_RUNTIME->event_record(staging->events[DDP__CUDA_READY], staging->stream),
        "cudaEventRecord");
    if (idle == DDP_OK)
        idle = ddp__cuda_staged_wait_event(s, staging->events[DDP__CUDA_READY], "copying the result");
    return result == DDP_OK && idle != DDP_OK ? ddp__cuda_staged_fail(s, idle, 1) : result;
}

//== host-staged groups: sends and receives =========================================== >>impl-staged-messages
/* A send is copied to pinned memory, then sent by the CPU group. A receive is received into pinned memory,
   then copied to the device. The polls of messages advance both. Messages run in parallel with
   collectives. */

/* Returns a free message with room for `size` bytes, or a new one. The caller holds the lock. */
static ddp_result ddp__cuda_message_alloc(ddp__cuda_messages *q, ddp_group *owner, size_t size,
                                          ddp__cuda_message **out) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    ddp__cuda_message *best = NULL;
    for (ddp__cuda_message *m = q->all; m; m = m->older)
        if (m->stage == DDP__CUDA_FREE && m->capacity >= size && (!best || m->capacity < best->capacity))
            best = m;
    *out = best;
    if (best) return DDP_OK;
    ddp__cuda_message *m = (ddp__cuda_message *)ddp_host_alloc(owner, sizeof *m);
    if (!m) return DDP_ERR_NO_MEMORY;
    *out = m;
    for (m->capacity = 4096; m->capacity < size;) m->capacity *= 2;
    m->older = q->all;
    q->all = m;
    DDP_TRY(ddp__cuda_staged_error(cuda->event_create(&m->event), "cudaEventCreateWithFlags"));
    return ddp__cuda_staged_error(cuda->host_alloc(&m->memory, m->capacity), "cudaHostAlloc");
}

static ddp_result ddp__cuda_message_copy(ddp__cuda_messages *q, ddp__cuda_message *m, void *dst,
                                         const void *src) {
    size_t size = m->call.count * ddp_dtype_size(m->call.dtype);
    if (size)
        DDP_TRY(ddp__cuda_staged_error(
            DDP__CUDA_RUNTIME->memcpy_async(dst, src, size, cudaMemcpyDefault, q->stream),
            "cudaMemcpyAsync"));
    return ddp__cuda_staged_error(DDP__CUDA_RUNTIME->event_record(m->event, q->stream), "cudaEventRecord");
}

static ddp_result ddp__cuda_message_start(ddp__cuda_messages *q, ddp__cuda_message *m) {
    const ddp_call *call = &m->call;
    ddp__cuda_message **link = &q->copying;
    if (call->kind == DDP_CALL_RECV) { /* after its event the user's buffer may be written */
        DDP_TRY(ddp__cuda_staged_fence(0, m->event));
        m->stage = DDP__CUDA_TRANSFER;
        return ddp_recv(q->group, m->memory, call->count, call->dtype, call->root, call->tag, &m->work);
    }
    DDP_TRY(ddp__cuda_staged_fence(q->stream, m->event));
    DDP_TRY(ddp__cuda_message_copy(q, m, m->memory, call->send));
    m->stage = DDP__CUDA_TO_HOST;
    m->next = NULL;
    while (*link) link = &(*link)->next;
    *link = m;
    return DDP_OK;
}

static ddp_result ddp__cuda_staged_p2p_start(ddp_group *, void *state, const ddp_call *call, void **request) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    ddp__cuda_messages *q = &s->messages;
    const ddp__cuda_device_guard guard(s->device);
    ddp_result result = guard.result;
    ddp__cuda_message *m = NULL;
    const ddp__cuda_lock lock(&q->lock);
    if (result == DDP_OK)
        result = ddp__cuda_message_alloc(q, s->owner, call->count * ddp_dtype_size(call->dtype), &m);
    if (result == DDP_OK) {
        m->call = *call;
        m->result = DDP_OK;
        result = ddp__cuda_message_start(q, m);
    }
    *request = m;
    return result == DDP_OK ? DDP_OK : ddp__cuda_staged_fail(s, result, 1);
}

/* Starts ddp_send for every message that has been copied to the host, in issue order. */
static void ddp__cuda_messages_send(ddp__cuda_messages *q) {
    int done;
    for (ddp__cuda_message *m = q->copying; m; m = q->copying) {
        m->result = ddp__cuda_query(DDP__CUDA_RUNTIME->event_query(m->event), DDP__CUDA_STAGED_CALL,
                                    "cudaEventQuery", &done);
        if (m->result == DDP_OK && !done) return;
        q->copying = m->next;
        m->stage = DDP__CUDA_TRANSFER;
        if (m->result == DDP_OK)
            m->result = ddp_send(q->group, m->memory, m->call.count, m->call.dtype, m->call.root, m->call.tag,
                                 &m->work);
    }
}

static ddp_result ddp__cuda_message_poll(ddp__cuda_messages *q, ddp__cuda_message *m, int *done) {
    int complete = 0;
    if (m->result != DDP_OK || m->stage == DDP__CUDA_TO_HOST) return m->result;
    if (m->stage == DDP__CUDA_TRANSFER) {
        DDP_TRY(ddp_test(q->group, &m->work, &complete));
        if (!complete) return DDP_OK;
        DDP_TRY(ddp_wait(q->group, &m->work));
        *done = m->call.kind == DDP_CALL_SEND;
        if (*done) return DDP_OK;
        m->stage = DDP__CUDA_TO_DEVICE;
        DDP_TRY(ddp__cuda_staged_error(DDP__CUDA_RUNTIME->stream_wait_event(q->stream, m->event),
                                       "cudaStreamWaitEvent"));
        DDP_TRY(ddp__cuda_message_copy(q, m, m->call.recv, m->memory));
    }
    return ddp__cuda_query(DDP__CUDA_RUNTIME->event_query(m->event), DDP__CUDA_STAGED_CALL, "cudaEventQuery",
                           done);
}

static ddp_result ddp__cuda_staged_p2p_poll(ddp_group *, void *state, void *request, int *done) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    ddp__cuda_messages *q = &s->messages;
    ddp__cuda_message *m = (ddp__cuda_message *)request;
    const ddp__cuda_device_guard guard(s->device);
    ddp_result result = guard.result;
    const ddp__cuda_lock lock(&q->lock);
    *done = 0;
    if (result == DDP_OK) {
        ddp__cuda_messages_send(q);
        result = ddp__cuda_message_poll(q, m, done);
    }
    if (result == DDP_OK && !*done && ddp__cuda_staged_status(NULL, s) != DDP_OK) result = DDP_ERR_POISONED;
    if (result != DDP_OK) {
        result = ddp__cuda_staged_fail(s, result, 1);
        if (m->work.op) ddp_wait(q->group, &m->work); /* does not block: the group has failed */
        ddp__cuda_staged_status(NULL, s);
    } else if (*done)
        m->stage = DDP__CUDA_FREE;
    return result;
}

//== host-staged groups: memory, creating and closing =================================== >>impl-staged-groups
/* Group memory of a staged group is private to each rank. A group has two splits of the user's CPU group: for
   collectives and for messages. */

/* ddp.h agrees before each of these two calls, which also waits for this rank's earlier collectives. */
static ddp_result ddp__cuda_staged_alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    ddp__cuda_region *region = (ddp__cuda_region *)ddp_host_alloc(group, sizeof *region);
    const ddp__cuda_device_guard guard(s->device);
    ddp_result result = region ? guard.result : DDP_ERR_NO_MEMORY;
    if (result == DDP_OK) result = ddp__cuda_device_alloc(group, size_bytes, &region->memory);
    if (result != DDP_OK) {
        ddp_host_free(group, region);
        return result;
    }
    region->next = s->regions;
    s->regions = region;
    *out = region->memory;
    return DDP_OK;
}

static ddp_result ddp__cuda_staged_free(ddp_group *group, void *state, void *memory) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    const ddp__cuda_device_guard guard(s->device);
    ddp_host_free(group, ddp__cuda_region_remove(&s->regions, memory));
    ddp__cuda_device_free(group, memory);
    return DDP_OK;
}

static void ddp__cuda_staged_close(ddp_group *group, void *state) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    ddp__cuda_messages *q = &s->messages;
    ddp__cuda_staging *staging = &s->staging;
    const ddp__cuda_device_guard guard(s->device);
    ddp_group_destroy(q->group);
    ddp_group_destroy(s->control);
    if (q->stream) cuda->synchronize(q->stream);
    for (ddp__cuda_message *m = q->all; m; m = q->all) {
        q->all = m->older;
        if (m->event) cuda->event_destroy(m->event);
        if (m->memory) cuda->host_free(m->memory);
        ddp_host_free(group, m);
    }
    while (s->regions) {
        cuda->free(s->regions->memory);
        ddp_host_free(group, ddp__cuda_region_remove(&s->regions, s->regions->memory));
    }
    if (staging->memory) cuda->host_free(staging->memory);
    for (int i = 0; i < 3; i++)
        if (staging->events[i]) cuda->event_destroy(staging->events[i]);
    if (staging->stream) cuda->stream_destroy(staging->stream);
    if (q->stream) cuda->stream_destroy(q->stream);
    pthread_mutex_destroy(&q->lock);
    ddp_host_free(group, s);
}

static ddp_result ddp__cuda_staged_resources(ddp__cuda_staged *s) {
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    const ddp__cuda_device_guard guard(s->device);
    DDP_TRY(guard.result);
    DDP_TRY(ddp_error_restore(&ddp__cuda_streams_of(s->owner)->open_failure));
    DDP_TRY(
        ddp__cuda_staged_error(cuda->stream_create(&s->staging.stream, 1), "cudaStreamCreateWithPriority"));
    DDP_TRY(
        ddp__cuda_staged_error(cuda->stream_create(&s->messages.stream, 1), "cudaStreamCreateWithPriority"));
    for (int i = 0; i < 3; i++)
        DDP_TRY(
            ddp__cuda_staged_error(cuda->event_create(&s->staging.events[i]), "cudaEventCreateWithFlags"));
    return DDP_OK;
}

/* Creates the state of a group from the ranks of control with the same color. A rank with a negative color
   only takes part in the split. */
static ddp_result ddp__cuda_staged_create(ddp_group *group, ddp_group *control, int color, int device,
                                          void **state) {
    ddp__cuda_staged *s = color < 0 ? NULL : (ddp__cuda_staged *)ddp_host_alloc(group, sizeof *s);
    ddp_group *split[2] = {NULL, NULL};
    ddp_saved_error error = DDP_ZERO;
    ddp_result result = s || color < 0 ? DDP_OK : DDP_ERR_NO_MEMORY;
    if (s) {
        s->owner = group;
        s->device = device;
        s->rank = ddp_rank(group);
        s->world_size = ddp_world_size(group);
        pthread_mutex_init(&s->messages.lock, NULL);
        result = ddp__cuda_staged_resources(s);
    }
    result = ddp_agree(control, "ddp_cuda_group_create", result, 0, "");
    for (int i = 0; i < 2 && result == DDP_OK; i++)
        result = ddp_group_split(control, color, group ? ddp_rank(group) : 0, &split[i]);
    if (!s) return result;
    s->control = split[0];
    s->messages.group = split[1];
    if (result == DDP_OK) {
        *state = s;
        return DDP_OK;
    }
    ddp_error_save(&error, result);
    ddp__cuda_staged_close(group, s);
    return ddp_error_restore(&error);
}

static ddp_result ddp__cuda_staged_open(ddp_group *group, void **state) {
    const ddp__cuda_open_args *args = ddp__cuda_this_thread.args;
    return ddp__cuda_staged_create(group, args->control, 0, args->device, state);
}

static ddp_result ddp__cuda_staged_split(ddp_group *, void *state, ddp_group *child, const int *members, int,
                                         void **child_state) {
    ddp__cuda_staged *s = (ddp__cuda_staged *)state;
    return ddp__cuda_staged_create(child, s->control, child ? members[0] : -1, s->device, child_state);
}

static const ddp_backend *ddp__cuda_staged_backend(void) {
    static const ddp_backend staged = {
        "host-staged",
        ddp__cuda_staged_open,
        ddp__cuda_staged_run,
        ddp__cuda_staged_p2p_start,
        ddp__cuda_staged_p2p_poll,
        NULL,
        ddp__cuda_staged_split,
        ddp__cuda_staged_alloc,
        ddp__cuda_staged_free,
        ddp__cuda_staged_status,
        ddp__cuda_staged_poison,
        ddp__cuda_staged_close,
        0,
        DDP_ORDER_TREE,
        NULL,
        NULL,
        NULL,
        NULL,
        NULL,
    };
    return &staged;
}

//== public: groups of GPUs, devices, kernels ============================================== >>impl-public
/* ddp_cuda_group_create chooses device and backend, and creates the group on them. The other public calls
   check their arguments and call a section above. */

/* Chooses the backend, the same on every rank.
     nccl_version   of the NCCL library, the same on every rank
     shared         1 = several ranks have the same device */
static ddp_result ddp__cuda_choose_backend(const ddp_cuda_desc *desc, int nccl_version, int shared,
                                           const ddp_backend **backend, const char **notice) {
    *notice = NULL;
    *backend = ddp__cuda_staged_backend();
#if defined(DDP_NO_NCCL)
    if (desc->engine == DDP_CUDA_ENGINE_NCCL || desc->comm)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "ddp_cuda_group_create: this build has no NCCL; compile without "
                                             "DDP_NO_NCCL, or use DDP_CUDA_ENGINE_STAGED");
    if (desc->engine == DDP_CUDA_ENGINE_DEFAULT)
        *notice = "this build has no NCCL: collectives go through host memory, which is slow";
#else
    if (desc->engine == DDP_CUDA_ENGINE_NCCL && shared && nccl_version < 23000)
        return ddp_fail(
            DDP_ERR_UNSUPPORTED,
            "ddp_cuda_group_create: ranks share a device, which NCCL %d.%d does not support; give each rank "
            "its own device, use NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1, or use DDP_CUDA_ENGINE_STAGED",
            nccl_version / 10000, nccl_version / 100 % 100);
    if (desc->engine == DDP_CUDA_ENGINE_NCCL || desc->comm
        || (desc->engine == DDP_CUDA_ENGINE_DEFAULT && !shared))
        *backend = ddp__cuda_nccl_backend();
    else if (desc->engine == DDP_CUDA_ENGINE_DEFAULT)
        *notice = "ranks share a device: collectives go through host memory, which is slow and meant for "
                  "development";
#endif
    (void)shared;
    (void)nccl_version;
    return DDP_OK;
}

DDPDEF ddp_result ddp_cuda_group_create(ddp_group **out, ddp_group *control, const ddp_cuda_desc *desc) {
    DDP_PUBLIC_CALL(ddp_cuda_group_create);
    const ddp_cuda_desc all_defaults = DDP_ZERO;
    ddp_group_desc group = DDP_ZERO;
    ddp__cuda_slot slot;
    const char *notice;
    char equal[96];
    ddp_result result = DDP_OK;
    int device = -1, nccl_version = 0, shared;
    if (out) *out = NULL;
    if (!out || !control)
        return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_group_create: out or control is NULL; pass a group of "
                                         "ddp_group_create or ddp_launch as control");
    if (!desc) desc = &all_defaults;
    const ddp_cuda_pick_desc pick = {desc->devices, desc->device_count, desc->uuid,
                                     desc->allow_shared || desc->engine == DDP_CUDA_ENGINE_STAGED};
#if !defined(DDP_NO_NCCL)
    if (desc->comm && ncclCommCuDevice(desc->comm, &device) != ncclSuccess) device = -1;
    /* The version of the library in use, which can be newer than its header. */
    if (desc->engine != DDP_CUDA_ENGINE_STAGED)
        result = ddp__nccl_result(ncclGetVersion(&nccl_version), "ncclGetVersion");
#endif
    if ((unsigned)desc->engine > DDP_CUDA_ENGINE_STAGED || (unsigned)desc->order > DDP_ORDER_ANY
        || desc->timeout_ms < 0)
        result = ddp_fail(DDP_ERR_INVALID,
                          "engine=%d order=%d timeout_ms=%d: one of them is invalid; use a ddp_cuda_engine, "
                          "a ddp_order and 0 or more ms",
                          (int)desc->engine, (int)desc->order, desc->timeout_ms);
    snprintf(equal, sizeof equal, "engine=%d order=%d comm=%s nccl=%d", (int)desc->engine, (int)desc->order,
             desc->comm ? "given" : "NULL", nccl_version);
    DDP_TRY(ddp__cuda_pick(control, &pick, device, result, equal, &slot, &shared));
    DDP_TRY(ddp__cuda_choose_backend(desc, nccl_version, shared, &group.backend, &notice));
    const ddp__cuda_open_args args = {control, slot.device, desc->stream, desc->comm_stream, desc->comm};
    group.device = ddp_device_cuda();
    group.order = desc->order;
    group.name = desc->name;
    group.timeout_ms = desc->timeout_ms;
    ddp__cuda_this_thread.args = &args;
    result = ddp_group_create_on(out, control, &group);
    ddp__cuda_this_thread.args = NULL;
    if (result == DDP_OK && notice) ddp_group_log(*out, notice);
    return result;
}

#ifdef __cplusplus
extern "C" {
#endif

DDPDEF ddp_result ddp_cuda_pick(ddp_group *control, const ddp_cuda_pick_desc *desc, int *device) {
    DDP_PUBLIC_CALL(ddp_cuda_pick);
    ddp_cuda_pick_desc all_defaults = DDP_ZERO;
    const ddp__cuda_runtime *cuda = DDP__CUDA_RUNTIME;
    ddp__cuda_slot own;
    int shared, before;
    if (!device) return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_pick: device is NULL");
    *device = -1;
    DDP_TRY(ddp__cuda_pick(control, desc ? desc : &all_defaults, -1, DDP_OK, "", &own, &shared));
    before = own.device;
    ddp_result result = ddp__cuda_fail(cuda->get_device(&before), "on this machine", "cudaGetDevice");
    if (result == DDP_OK)
        result = ddp__cuda_fail(cuda->set_device(own.device), "on this machine", "cudaSetDevice");
    if (result != DDP_OK)
        ddp_fail_in(result, "ddp_cuda_pick", control, "on host %s: %s", own.host, ddp_last_error());
    if (control) result = ddp_agree(control, "ddp_cuda_pick", result, 0, "");
    if (result == DDP_OK)
        *device = own.device;
    else if (before != own.device)
        cuda->set_device(before); /* CUDA keeps a device also if cudaSetDevice cannot initialize it */
    return result;
}

DDPDEF ddp_result ddp_cuda_set_stream(ddp_group *group, cudaStream_t stream) {
    if (!group || ddp_group_device(group) != ddp_device_cuda())
        return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_set_stream: group is %s",
                        group ? "not a CUDA group" : "NULL");
    ddp__cuda_streams_of(group)->stream[DDP_STREAM_COMPUTE] = stream;
    return DDP_OK;
}

DDPDEF cudaStream_t ddp_cuda_comm_stream(const ddp_group *group) {
    return group && ddp_group_device(group) == ddp_device_cuda()
               ? ddp__cuda_streams_of(group)->stream[DDP_STREAM_COMM]
               : 0;
}

DDPDEF const ddp_device *ddp_device_cuda(void) {
#define DDP_X(name, result, arguments) ddp__cuda_device_##name,
    static const ddp_device cuda = {
        "cuda",
        0,
        DDP_DEVICE_FUNCTIONS(DDP_X) DDP__CUDA_OPTIMIZER,
        DDP__CUDA_LAYERS,
    };
#undef DDP_X
    return &cuda;
}

DDPDEF cudaStream_t ddp_cuda_use_stream(cudaStream_t stream) {
    cudaStream_t before = ddp__cuda_this_thread.stream;
    ddp__cuda_this_thread.stream = stream;
    return before;
}

#if defined(DDP_USE_CUBLASLT)
DDPDEF ddp_result ddp_cuda_gemm(ddp_group *group, const ddp_cuda_gemm_desc *desc, cudaStream_t stream) {
    return ddp__cuda_multiply("ddp_cuda_gemm", group, desc, stream);
}
#if defined(DDP_TENSOR_KERNELS_H)
DDPDEF ddp_result ddp_cuda_gemm_tf32(const ddp_gemm *gemm, void *user) {
    return ddp__cuda_multiply_layer("ddp_cuda_gemm_tf32", gemm, user, 1);
}
#endif
DDPDEF ddp_result ddp_cuda_gemm_algos(ddp_group *group, const ddp_cuda_gemm_desc *desc,
                                      ddp_cuda_gemm_algo *algos, int capacity, int *count) {
    ddp__cuda_product p;
    DDP_TRY(ddp__cuda_product_begin(&p, "ddp_cuda_gemm_algos", group, desc, 0));
    if (!algos || !count || capacity < 1 || p.desc.m < 1 || p.desc.n < 1 || p.desc.k < 1)
        return ddp_fail(DDP_ERR_INVALID, "%s: algos or count is NULL, or capacity=%d, m, n or k is below 1",
                        p.function, capacity);
    DDP_TRY(ddp__cuda_cublaslt_open(&p));
    return ddp__cuda_lt_list(&p, algos, capacity, count);
}

DDPDEF ddp_result ddp_cuda_gemm_save(ddp_group *group, const char *path, const ddp_cuda_gemm_desc *descs,
                                     const ddp_cuda_gemm_algo *algos, int count) {
    ddp__cuda_product p;
    char line[DDP__CUDA_LT_LINE_MAX], chip[256];
    unsigned char uuid[16];
    const char *function = "ddp_cuda_gemm_save";
    if (!path || count < 0 || count > DDP__CUDA_LT_TABLE_MAX || (count && (!descs || !algos)))
        return ddp_fail(DDP_ERR_INVALID, "%s: path, descs or algos is NULL, or count=%d is not 0 to %d",
                        function, count, DDP__CUDA_LT_TABLE_MAX);
    DDP_TRY(ddp__cuda_product_group(function, group));
    for (int i = 0; i < count; i++) {
        ddp_cuda_gemm_algo algo;
        DDP_TRY(ddp__cuda_product_begin(&p, function, group, &descs[i], 0));
        ddp__cuda_lt_print(line, &p, &algos[i]);
        if (!ddp__cuda_lt_scan(line, &p, &algo))
            return ddp_fail(DDP_ERR_INVALID, "%s: descs[%d] has a size of 0, or algos[%d] is not for it",
                            function, i, i);
    }
    DDP_TRY(ddp__cuda_group_fail(
        group, DDP__CUDA_RUNTIME->device_identity(ddp__cuda_streams_of(group)->device, chip, uuid),
        "cudaGetDeviceProperties"));
    FILE *file = fopen(path, "w");
    if (!file) return ddp_fail(DDP_ERR_SYSTEM, "%s: %s: %s", function, path, strerror(errno));
    snprintf(line, sizeof line, "%s", DDP__CUDA_LT_FIRST_LINE);
    ddp__cuda_lt_write(file, line);
    snprintf(line, sizeof line, "chip %s", chip);
    ddp__cuda_lt_write(file, line);
    snprintf(line, sizeof line, "cublaslt %zu", cublasLtGetVersion());
    ddp__cuda_lt_write(file, line);
    for (int i = 0; i < count; i++) {
        ddp__cuda_product_begin(&p, function, group, &descs[i], 0);
        ddp__cuda_lt_print(line, &p, &algos[i]);
        ddp__cuda_lt_write(file, line);
    }
    snprintf(line, sizeof line, "end %d", count);
    ddp__cuda_lt_write(file, line);
    int failed = ferror(file);
    if (fclose(file) != 0 || failed)
        return ddp_fail(DDP_ERR_SYSTEM, "%s: %s cannot be written completely: %s", function, path,
                        strerror(errno));
    return DDP_OK;
}

DDPDEF ddp_result ddp_cuda_gemm_load(ddp_group *group, const char *path, int *used) {
    const char *function = "ddp_cuda_gemm_load";
    ddp__cuda_lt_table *table = NULL;
    uint64_t hash = 0;
    char text[DDP_AGREE_TEXT];
    DDP_TRY(ddp__cuda_product_group(function, group));
    ddp_result result = ddp__cuda_lt_load(group, path, &table, &hash);
    snprintf(text, sizeof text, "table=%016llx", (unsigned long long)hash);
    result = ddp_agree(group, function, result, hash, text);
    if (result == DDP_OK) {
        ddp__cuda_cublaslt *state = (ddp__cuda_cublaslt *)ddp__cuda_streams_of(group)->cublaslt;
        ddp__cuda_lt_table *before = state->table;
        state->table = table;
        table = before;
        memset(state->algorithms, 0, sizeof state->algorithms); /* chosen without this table */
        if (used) *used = state->table->count;
    }
    ddp_host_free(group, table);
    return result;
}
#endif

DDPDEF ddp_result ddp_cuda_check(void) {
    ddp_result first = ddp_error_restore(&ddp__cuda_this_thread.first_failure);
    ddp__cuda_this_thread.first_failure.result = DDP_OK;
    return first;
}

DDPDEF ddp_result ddp_cuda_reduce_tree(void *const *dst, int dst_count, const void *const *src, int src_count,
                                       size_t count, ddp_dtype dtype, ddp_op op, uint64_t divisor,
                                       cudaStream_t stream) {
    const char *function = "ddp_cuda_reduce_tree";
    ddp__cuda_tree_call call = {dst, dst_count, src, src_count, count, op, 1, stream, function, 0, 0, dtype};
    if (!dst || !src || dst_count < 1 || dst_count > DDP_MAX_LOCAL_RANKS || src_count < 1
        || src_count > DDP_MAX_LOCAL_RANKS)
        return ddp_fail(DDP_ERR_INVALID, "%s: dst_count=%d src_count=%d; use 1 to %d", function, dst_count,
                        src_count, DDP_MAX_LOCAL_RANKS);
    if ((unsigned)op > DDP_OP_PROD || ddp_dtype_size(dtype) == 0)
        return ddp_fail(DDP_ERR_INVALID, "%s: op=%d dtype=%d is invalid; use a ddp_op and DDP_F32 to DDP_U64",
                        function, (int)op, (int)dtype);
    for (int k = 0; count && k < src_count; k++)
        if (!src[k]) return ddp_fail(DDP_ERR_INVALID, "%s: src[%d] is NULL", function, k);
    for (int k = 0; count && k < dst_count; k++)
        if (!dst[k]) return ddp_fail(DDP_ERR_INVALID, "%s: dst[%d] is NULL", function, k);
    if (op == DDP_OP_AVG && divisor) call.divisor = divisor;
    if (src_count > 1 || call.divisor > 1) return ddp__cuda_tree_reduce(&call, dtype);
    for (int k = 0; k < dst_count; k++) {
        if (count == 0 || dst[k] == src[0]) continue;
        DDP__CUDA_TRY(function, "cudaMemcpyAsync",
                      DDP__CUDA_RUNTIME->memcpy_async(dst[k], src[0], count * ddp_dtype_size(dtype),
                                                      cudaMemcpyDeviceToDevice, stream));
    }
    return DDP_OK;
}

DDPDEF ddp_result ddp_cuda_flatten(void *flat, ddp_dtype flat_dtype, const ddp_cuda_range *ranges,
                                   int range_count, ddp_dtype dtype, float factor, cudaStream_t stream) {
    ddp__cuda_ranges_call call = {NULL, 0, dtype, dtype, factor, stream, "ddp_cuda_flatten"};
    return ddp__cuda_copy_flat(flat, flat_dtype, ranges, range_count, dtype, 1, &call);
}

DDPDEF ddp_result ddp_cuda_unflatten(const void *flat, ddp_dtype flat_dtype, const ddp_cuda_range *ranges,
                                     int range_count, ddp_dtype dtype, float factor, cudaStream_t stream) {
    ddp__cuda_ranges_call call = {NULL, 0, dtype, dtype, factor, stream, "ddp_cuda_unflatten"};
    return ddp__cuda_copy_flat((void *)flat, flat_dtype, ranges, range_count, dtype, 0, &call);
}

DDPDEF ddp_result ddp_cuda_unscale(void *data, size_t rows, size_t row_count, ddp_dtype dtype, float factor,
                                   ddp_cuda_norm *norm, cudaStream_t stream) {
    if (!norm || (!data && rows && row_count))
        return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_unscale: data or norm is NULL");
    const ddp_tensor tensor = {data, dtype, 2, {(int64_t)rows, (int64_t)row_count}};
    return ddp__cuda_sum_squares<1>(&tensor, 1, factor, norm, 0, stream, "ddp_cuda_unscale");
}

DDPDEF ddp_result ddp_cuda_adamw(const ddp_cuda_step_desc *descs, int count, cudaStream_t stream) {
    return ddp__cuda_step<1>(descs, count, stream, "ddp_cuda_adamw");
}
DDPDEF ddp_result ddp_cuda_sgd(const ddp_cuda_step_desc *descs, int count, cudaStream_t stream) {
    return ddp__cuda_step<0>(descs, count, stream, "ddp_cuda_sgd");
}

DDPDEF ddp_result ddp_cuda_quantise8(int8_t *q, float *scales, const void *src, ddp_dtype src_dtype,
                                     size_t count, cudaStream_t stream) {
    if (count && (!q || !scales || !src))
        return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_quantise8: q, scales or src is NULL");
    if (!ddp_is_float(src_dtype) || src_dtype == DDP_F64)
        return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_quantise8: src_dtype=%s; use f32, f16 or bf16",
                        ddp_dtype_name(src_dtype));
    return ddp__cuda_dispatch<DDP__CUDA_FLOATS_32>(src_dtype, [&](auto S) {
        return ddp__cuda_quantise_launch<decltype(S)::value>(q, scales, src, count, stream);
    });
}

DDPDEF ddp_result ddp_cuda_dequantise8(void *dst, ddp_dtype dst_dtype, const int8_t *q, const float *scales,
                                       size_t count, cudaStream_t stream) {
    if (count && (!dst || !q || !scales))
        return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_dequantise8: dst, q or scales is NULL");
    if (!ddp_is_float(dst_dtype) || dst_dtype == DDP_F64)
        return ddp_fail(DDP_ERR_INVALID, "ddp_cuda_dequantise8: dst_dtype=%s; use f32, f16 or bf16",
                        ddp_dtype_name(dst_dtype));
    return ddp__cuda_dispatch<DDP__CUDA_FLOATS_32>(dst_dtype, [&](auto D) {
        return ddp__cuda_dequantise_launch<decltype(D)::value>(dst, q, scales, count, stream);
    });
}

#ifdef __cplusplus
}
#endif

#endif /* DDP_IMPLEMENTATION or DDP_CUDA_IMPLEMENTATION */

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

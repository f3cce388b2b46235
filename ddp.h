/*  ddp.h - parallel training primitives for C, C++ and CUDA programs, in one header.

    Contains: launching ranks, collectives and messages between them, a gradient reducer, accumulation over
    micro-batches, data samplers and a data loader. It works on one machine by itself. Backends (MPI, NCCL)
    and devices (GPUs) extend the same calls to several machines and to device memory.

USAGE
    #define DDP_IMPLEMENTATION       in exactly one source file of the program, before including this header
    #include "ddp.h"
    Compile that file with -std=gnu11 or -std=c++17, or later, and link with -lpthread -lm.
    Every other file only includes ddp.h, also with -std=c11.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp.h"
    #include <stdio.h>

    static ddp_result train(ddp_group *world, void *user) {      // runs once per rank
        float gradient[1000] = {*(float *)user * (float)(ddp_rank(world) + 1)};
        ddp_result result = ddp_all_reduce(world, gradient, gradient, 1000, DDP_F32, DDP_OP_AVG, NULL);
        if (ddp_rank(world) == 0) printf("average of the first gradient: %g\n", gradient[0]);
        return result;
    }

    int main(void) {
        static float weights[1000] = {1};
        ddp_launch_desc desc = DDP_ZERO;                         // zero means default, field by field
        desc.world_size = 2;
        if (ddp_launch(&desc, train, weights) == DDP_OK) return 0;
        fprintf(stderr, "%s\n", ddp_last_error());
        return 1;
    }

CONTENTS      (search for the tags)
    >>config  >>types  >>descs  >>api  >>sampler  >>loader  >>trace  >>spi  >>impl-structs
    >>impl-error  >>impl-error-calls  >>impl-memory  >>impl-reduce  >>impl-half  >>impl-tree
    >>impl-tree-loops  >>impl-exact  >>impl-heap  >>impl-life  >>impl-local-state  >>impl-timeout
    >>impl-wait  >>impl-local-memory  >>impl-transfer  >>impl-local  >>impl-local-run  >>impl-p2p
    >>impl-p2p-requests  >>impl-local-group  >>impl-self  >>impl-trace  >>impl-calls  >>impl-queue
    >>impl-issue  >>impl-issue-p2p  >>impl-hmac  >>impl-identity  >>impl-rendezvous  >>impl-frames
    >>impl-secret  >>impl-address  >>impl-address-list  >>impl-rank0  >>impl-connect  >>impl-tcp
    >>impl-tcp-calls  >>impl-tcp-groups  >>impl-group  >>impl-agree  >>impl-group-state  >>impl-mpi
    >>impl-mpi-transfer  >>impl-mpi-calls  >>impl-mpi-groups  >>impl-mesh  >>impl-cores
    >>impl-launch  >>impl-buckets  >>impl-bucket-reduce  >>impl-schema  >>impl-reducer-create
    >>impl-reducer  >>impl-accumulator  >>impl-join  >>impl-sampler-random  >>impl-sampler-ranks
    >>impl-sampler-window  >>impl-sampler  >>impl-loader  >>impl-loader-calls  >>impl-public

CONCEPTS
    Rank       One worker of a group: a process, a thread or an MPI rank. Ranks of a group are numbered from 0
               to world_size - 1.
    Group      Holds all state of its ranks' communication. The library has no globals. A process may have
               many groups.
    Threads    One thread at a time may make calls on a group, or on other objects that communicate over it.
               Exceptions, until the group is destroyed: any thread may call ddp_group_status,
               ddp_group_abort, ddp_group_attempt, ddp_rank, ddp_world_size, ddp_local_rank and
               ddp_local_world_size.
    Collective A call that every rank of the group makes, in the same order. Its comment, or that of its
               section, states that it is collective, and which arguments must be equal on all ranks. The
               library compares those on arrival.
    Handle     A create call stores a new object in *out. After a failure *out is NULL. The caller frees the
               object with the destroy call of the same name, before the group or object that it was created
               on, unless its comment states otherwise. Destroy calls ignore NULL.
    Work       A call with work == NULL, or without a work argument, blocks unless its comment states
               otherwise. With a ddp_work it returns at once, and ddp_wait waits for it. The caller must not
               use the call's buffers until that ddp_wait has returned. A rank executes its collectives in the
               order issued, whether they block or not. A communication thread executes those with a ddp_work.
               If the call itself returns an error, there is nothing to wait for. On a group of GPUs over
               NCCL the host does not wait for results: see ddp_cuda_group_create.
    Tree order With DDP_ORDER_TREE, the default on CPU groups, SUM and AVG add in a fixed binary tree over
               rank index. A range of n ranks splits at the largest power of two below n: with 6 ranks,
               ((r0+r1)+(r2+r3))+(r4+r5). The bits of the result depend only on this tree, never on timing,
               sizes, buckets or the backend. PROD multiplies in the same tree. 16-bit floats are reduced in
               f32 and rounded once.
    Memory     In shared memory, a collective on memory from ddp_group_alloc needs no copy: the ranks of a
               machine read and write each other's group memory. Other memory is copied through small chunks
               that stay in cache.
    Security   Shared memory is protected by the user id: only processes of the same user can join. A
               rendezvous over TCP is protected by ddp_group_desc.secret. Data between machines is neither
               encrypted nor signed: use a network that others can neither read nor change.

ERRORS
    A call that can fail returns ddp_result, unless its comment states another result. DDP_OK is 0, errors are
    negative. ddp_last_error() returns the last failure of the calling thread as one line, such as
      rank 3/8 ddp_all_reduce group=world seq=412 f32 count=1048576: rank 5 (pid 4242) was killed by signal 9
    The line names the public call that the user made, also when the library made other calls inside it. A
    failure that began in another call or on another rank is reported with its origin:
      rank 2/4 ddp_barrier group=world seq=7: cause: rank 1 in ddp_recv tag=4: timed out after 500 ms: ...
    Comments do not repeat what holds everywhere:
      Arguments     A wrong argument, also a NULL handle, is DDP_ERR_INVALID. The call then changes nothing
                    except *out, unless its comment states otherwise.
      Agreement     Some collective calls first exchange the errors of all ranks: create calls on an existing
                    group, ddp_group_split, ddp_group_alloc, and calls with errors "on every rank" in their
                    comment. All ranks then return the error of one rank, also DDP_ERR_NO_MEMORY. Arguments
                    that must be equal, but differ, are DDP_ERR_MISMATCH. The group stays usable, unless the
                    comment states otherwise. A NULL group or out may be found before this exchange: see One
                    rank.
      One rank      In other collective calls, only the rank with the wrong argument returns. The group
                    stays usable. The other ranks wait until this rank makes the call correctly, or until the
                    timeout.
      Communication Calls that communicate also return the errors of collectives. Such a failure poisons the
                    group.
      Poisoned      A poisoned group can only be destroyed. Its first cause is kept: the pending or next call
                    of each rank returns its code, and later calls return DDP_ERR_POISONED with the same
                    cause. Other groups continue, unless they contain a rank that was lost or exceeded the
                    timeout: see ddp_group_desc.timeout_ms.
      Outputs       After a failure the contents of output buffers are undefined, unless the comment states
                    otherwise.
      Waiting       No call waits longer than timeout_ms for a peer. A call that waits several times may take
                    longer.

CONFIG MACROS (define before including)
    DDP_IMPLEMENTATION      also compile the function bodies, in this file
    DDP_STATIC              make every function static: a private copy for one source file
    DDP_USE_MPI             also compile the MPI backend, for large data between machines. Build with mpicc,
                            or with CMake's MPI::MPI_C
    DDP_ALLOW_FAST_MATH     allow -ffast-math and -Ofast in the file with the bodies, giving up the promise
                            that results have the same bits everywhere. Other files may use them without it.
                            Do not link with them: gcc before 13 then makes the whole program round
                            subnormal numbers to zero

NOT DONE HERE
    Large data between machines: Open MPI and NCCL transfer it; TCP is only for rendezvous and control. No
    matrix products, no autograd, no file formats.
*/
#ifndef DDP_H
#define DDP_H

#define DDP_VERSION_MAJOR 0
#define DDP_VERSION_MINOR 2
#define DDP_VERSION_PATCH 0
/* The version of this header: 200 for 0.2.0. */
#define DDP_VERSION (DDP_VERSION_MAJOR * 10000 + DDP_VERSION_MINOR * 100 + DDP_VERSION_PATCH)

//== config ======================================================================================= >>config
#include <stddef.h>
#include <stdint.h>
#if defined(DDP_USE_MPI)
#include <mpi.h>
#endif

#if !defined(DDP_STATIC)
#define DDPDEF extern
#else
#define DDPDEF static __attribute__((unused))
#endif

// clang-format off
#ifdef __cplusplus
#define DDP_ZERO {}
extern "C" {
#else
/* Initializes a struct with zeros: ddp_group_desc desc = DDP_ZERO. In a desc, zero means default. */
#define DDP_ZERO {0}
#endif
// clang-format on

//== types ========================================================================================= >>types

/* One list defines the enum, the names and the descriptions. */
#define DDP_RESULTS(X)                                                           \
    X(DDP_OK, 0, "success")                                                      \
    X(DDP_ERR_INVALID, -1, "an argument is invalid")                             \
    X(DDP_ERR_NO_MEMORY, -2, "memory could not be allocated")                    \
    X(DDP_ERR_SYSTEM, -3, "a system call failed")                                \
    X(DDP_ERR_TIMEOUT, -4, "a rank did not arrive within the timeout")           \
    X(DDP_ERR_PEER_LOST, -5, "a rank exited, died or destroyed the group")       \
    X(DDP_ERR_MISMATCH, -6, "ranks made different calls")                        \
    X(DDP_ERR_POISONED, -7, "the group failed earlier")                          \
    X(DDP_ERR_UNSUPPORTED, -8, "not available in this build or on this backend") \
    X(DDP_ERR_CORRUPT, -9, "stored data is damaged")                             \
    X(DDP_ERR_ENGINE, -10, "a call of MPI, NCCL or CUDA failed")

/* The result of a call: DDP_OK, or an error, which is negative. ddp_last_error() describes the error. */
typedef enum ddp_result {
#define DDP_X(name, value, text) name = value,
    DDP_RESULTS(DDP_X)
#undef DDP_X
} ddp_result;

/* The type of an element. F: IEEE float, BF: bfloat16, I: signed integer, U: unsigned integer; then the
   number of bits. */
typedef enum ddp_dtype {
    DDP_DTYPE_DEFAULT = 0, /* in descs: the dtype of the tensor concerned */
    DDP_F32,
    DDP_F64,
    DDP_F16,
    DDP_BF16,
    DDP_I8,
    DDP_U8,
    DDP_I32,
    DDP_I64,
    DDP_U64
} ddp_dtype;

/* The operation of a reduction: see CONCEPTS, Tree order. Integer sums wrap around; AVG divides the wrapped
   sum and truncates towards zero. MIN and MAX of floats return NaN when an input is NaN. */
typedef enum ddp_op { DDP_OP_SUM, DDP_OP_AVG, DDP_OP_MIN, DDP_OP_MAX, DDP_OP_PROD } ddp_op;

/* The order in which SUM and AVG add: see CONCEPTS, Tree order. TREE gives the same bits on every backend.
   ANY lets MPI or NCCL choose; shared memory and TCP use the tree. */
typedef enum ddp_order {
    DDP_ORDER_DEFAULT = 0, /* TREE on CPU backends, ANY on NCCL */
    DDP_ORDER_TREE,
    DDP_ORDER_ANY
} ddp_order;

/* The most dimensions of a tensor, and of a mesh. */
#define DDP_MAX_NDIM 8
/* The most ranks of one group on one machine. */
#define DDP_MAX_LOCAL_RANKS 64

/* A view of memory: row-major and contiguous. It owns nothing. ndim 0 is one element. */
typedef struct ddp_tensor {
    void *data;                  /* the elements */
    ddp_dtype dtype;             /* of the elements */
    int ndim;                    /* 0 to DDP_MAX_NDIM */
    int64_t shape[DDP_MAX_NDIM]; /* of the first ndim dimensions */
} ddp_tensor;

/* Passes the f32 sum of a 16-bit gradient over micro-batches to the reduction over ranks. Only the library
   writes it; initialize it to zero. A ddp_accumulator or ddp_pipeline sets data and is_set. A ddp_reducer or
   ddp_fsdp sets reader and drain, and reduces the sum instead of the rounded gradient. */
typedef struct ddp_grad_sum {
    void *data;                  /* as many floats as the gradient has elements; NULL = no such sum */
    int is_set;                  /* 1 = data holds this step's sum; cleared when the reduction takes it */
    void *reader;                /* the reducer or fsdp that takes sums; NULL = none */
    void (*drain)(void *reader); /* waits until no call of the reader reads data */
} ddp_grad_sum;

/* A trained parameter and its gradient. Entries with the same value.data are uses of one tied parameter. Each
   use has its own gradient. */
typedef struct ddp_param {
    const char *name;       /* the name in errors and in checkpoints; a reducer accepts NULL */
    ddp_tensor value, grad; /* grad: dtype and shape 0 = those of value; data NULL = the reducer allocates */
    ddp_grad_sum sum;       /* only for the library */
    const void *first_use;  /* only for the library; initialize it to NULL. A ddp_reducer or ddp_fsdp
                               adds the gradients of its parameters with the same one */
} ddp_param;

/* The cells of a ddp_exact_sum. */
#define DDP_EXACT_CELLS 72

/* An exact sum of doubles: digits of 32 bits in 64-bit cells, lowest first (Kulisch's long accumulator).
   Two sums add as DDP_I64 SUM of their cells, so an all-reduce of the whole struct is exact in any order. */
typedef struct ddp_exact_sum {
    int64_t cell[DDP_EXACT_CELLS]; /* the lowest digit first */
} ddp_exact_sum;

/* A mean over samples or tokens, for any distribution over ranks and micro-batches. Initialize it to zero. */
typedef struct ddp_mean {
    ddp_exact_sum sum; /* of all samples or tokens */
    int64_t count;     /* samples or tokens */
} ddp_mean;

typedef struct ddp_group ddp_group;             /* ranks that communicate; see ddp_group_create */
typedef struct ddp_backend ddp_backend;         /* transports the data of a group: >>spi */
typedef struct ddp_device ddp_device;           /* memory, streams and arithmetic: >>spi */
typedef struct ddp_reducer ddp_reducer;         /* averages gradients; see ddp_reducer_create */
typedef struct ddp_accumulator ddp_accumulator; /* adds micro-batches; see ddp_accumulator_create */
typedef struct ddp_join ddp_join;               /* for uneven inputs; see ddp_join_create */
typedef struct ddp_mesh ddp_mesh;               /* a grid of ranks; see ddp_mesh_create */

/* Handle of an asynchronous call. It is empty when zero-initialized and after its wait. Only an empty one may
   be passed to a new call. It may be copied, but only one copy may be waited for, once. */
typedef struct ddp_work {
    void *op;        /* private */
    uint64_t ticket; /* private */
} ddp_work;

//== descs ========================================================================================= >>descs

/* For ddp_group_create and ddp_launch. Zero means default, field by field. */
typedef struct ddp_group_desc {
    const char *init_method; /* NULL = "env://": rank variables of torchrun, mpirun or srun; none set = one
                                rank. "self://": one rank.
                                "tcp://host:port": rank 0 listens there.
                                "file:///path": on a disk that all ranks share. Rank 0 creates the file, with
                                its address, for its own user; a link, FIFO or another user's file is an
                                error. "mpi://", with DDP_USE_MPI: the ranks of MPI_COMM_WORLD */
    int rank, world_size;    /* world_size 0 = both come from the rank variables; otherwise this rank's
                                number and the number of ranks. With "env://", world_size must equal that of
                                the rank variables, if these are set; rank is then not read */
    int timeout_ms;          /* 0 = 600000; the longest time that a call waits for a peer. It must exceed the
                                longest computation of a rank between two calls. A rank that exceeds it, or is
                                lost (its process or fn has ended), fails every group that contains it, also
                                on other backends */
    ddp_order order;         /* 0 = DDP_ORDER_TREE on CPU backends */
    const char *name;        /* NULL = "world"; appears in errors; the first 31 bytes are kept */
    const ddp_backend *backend; /* NULL = chosen by the library: self for one rank, local for one machine, mpi
                                   or tcp for several machines */
    const ddp_device *device;   /* NULL = the CPU */
    void *backend_user;         /* of ddp_backend.open and ddp_device.open; see ddp_group_backend_user */
    void *(*alloc_fn)(size_t size_bytes, void *user); /* NULL = malloc; set both or neither; called on any
                                                         thread */
    void (*free_fn)(void *memory, void *user);        /* NULL = free */
    void *user;                                       /* passed to alloc_fn, free_fn and log_fn */
    /* NULL = silent. Receives notices: a fallback was taken, ranks have been missing for 5 s */
    void (*log_fn)(const char *text, void *user);
    const char *secret; /* For a rendezvous over TCP: ranks prove to each other that they have the same text.
                           Use 16 random bytes or more, such as from `openssl rand -hex 32`. NULL =
                           DDP_SECRET, or else the content of the file DDP_SECRET_FILE (mode 0600), or else
                           none: then any process can join that reaches the port and has the job id, see
                           ddp_group_create. Read only during that call. Shared memory does not need it: it
                           admits only processes of the same user. */
} ddp_group_desc;

/* Ranks of a ddp_launch are processes or threads. */
typedef enum ddp_launch_mode { DDP_LAUNCH_PROCESSES = 0, DDP_LAUNCH_THREADS } ddp_launch_mode;

/* For ddp_launch. Zero means default, field by field. */
typedef struct ddp_launch_desc {
    int world_size;       /* 0 = one rank per core that this process may use, at most DDP_MAX_LOCAL_RANKS, or
                             the ranks of a launcher, or of an enclosing ddp_launch. Another number than
                             theirs is an error */
    ddp_launch_mode mode; /* 0 = processes */
    int max_restarts;     /* 0 = none; after a failure all ranks start again, at most this many times:
                             ddp_group_attempt counts. No effect with threads or under a launcher */
    const int *devices;   /* for GPU backends: the rank with local rank r uses device devices[r], on every
                             machine. Ranks that ddp_launch starts are all on one machine: there r is the
                             rank. NULL = the backend chooses */
    int device_count;     /* entries of devices; at least one for each rank on this machine */
    int no_affinity;      /* 1 = do not change CPU affinity, OMP_NUM_THREADS, OPENBLAS_NUM_THREADS or the
                             thread pools of libraries */
    ddp_group_desc group; /* of the world: timeout_ms, order, name, backend, allocators ...; init_method, rank
                             and world_size are not read */
} ddp_launch_desc;

/* A grid of ranks, row-major: the last dimension varies fastest. shape {2, 2, 2}, names {"pp", "dp", "tp"}:

                   tp 0  1                  tp 0  1
       pp 0   dp 0    0  1      pp 1   dp 0    4  5        rank 6 is in tp {6, 7}, dp {4, 6} and pp {2, 6}
              dp 1    2  3             dp 1    6  7 */
typedef struct ddp_mesh_desc {
    int ndim;                        /* required; 1 to DDP_MAX_NDIM */
    int shape[DDP_MAX_NDIM];         /* ranks along each dimension; one entry may be 0 = inferred from the
                                        rest */
    const char *names[DDP_MAX_NDIM]; /* required, all different; 1 to 15 characters, no blanks and no = */
} ddp_mesh_desc;

/* The argument of a bucket hook: count contiguous elements with this rank's gradients, summed over its
   micro-batches. On return, data holds the reduced gradients, the same on every rank. The hook divides by
   divisor itself. */
typedef struct ddp_bucket {
    void *data;              /* the gradients */
    size_t count;            /* elements */
    ddp_dtype dtype;         /* as sent: f32 for sums of 16-bit gradients over micro-batches */
    int index, bucket_count; /* this bucket, from 0, and the buckets of a step */
    uint64_t divisor;        /* the hook must divide by it: ranks (with a ddp_join: active ranks) times
                                micro_batch_count; with per_token 1 */
    uint64_t step;           /* number of steps that have ended without an error */
    const int *params; /* indices of the parameters in the desc's params, in the order of their gradients
                               in data */
    int param_count;   /* entries of params */
} ddp_bucket;

/* Replaces the reducer's all-reduce. Runs once per bucket, in issue order, on the communication thread or on
   a thread that waits for the bucket. It may make blocking calls on the group; it must not wait for anything
   else. On a group of GPUs, data is device memory, and work goes to the stream of ddp_cuda_comm_stream. An
   error that it returns poisons the group. */
typedef ddp_result (*ddp_bucket_hook)(ddp_group *group, ddp_bucket *bucket, void *user);

/* For ddp_reducer_create. Zero means default, except for params and param_count. */
typedef struct ddp_reducer_desc {
    ddp_param *params;         /* required; in definition order; create fills in grad.data where it is NULL */
    int param_count;           /* entries of params */
    size_t bucket_cap_bytes;   /* 0 = 25 MiB */
    size_t first_bucket_bytes; /* 0 = 1 MiB; the cap of the first bucket of each dtype */
    int micro_batch_count;     /* 0 = 1; micro-batches that each rank accumulates before a step. The average
                                  divides once, by world_size * micro_batch_count */
    int find_unused;           /* 1 = a rank may leave out ddp_reducer_ready for parameters that it did not
                                  use. Their gradients count as zeros on this rank. ddp_reducer_is_unused
                                  reports those that no rank used */
    int static_graph;          /* 1 = like find_unused in the first step. Each rank must use the parameters of
                                  its first step in every later step, and no others. A gradient that no rank
                                  uses is set to zeros in the first step. Later steps leave it as it is, and
                                  ddp_reducer_clip_grad_norm leaves it out */
    /* 0 = the gradient's: 16-bit gradients are added in f32 and rounded once. Their sums over micro-batches,
       from a ddp_accumulator or ddp_pipeline, are sent as f32. DDP_F16 or DDP_BF16: every gradient and every
       such sum is rounded to 16 bits before it is sent. This halves the bytes, and is outside the promise of
       equal bits */
    ddp_dtype comm_dtype;
    ddp_bucket_hook hook;       /* NULL = all-reduce */
    void *hook_user;            /* passed to hook */
    int skip_initial_broadcast; /* 1 = values and buffers are already equal on all ranks */
    /* Tensors that are not trained, such as running statistics. create broadcasts them from rank 0; later the
       caller keeps them equal with ddp_reducer_sync_buffers */
    const ddp_tensor *buffers;
    int buffer_count; /* entries of buffers */
    int per_token;    /* 1 = gradients are those of a loss summed over tokens (or samples): ddp_reducer_wait
                      gives sums, ddp_reducer_wait_mean the mean. Sums are larger than averages and may
                      overflow DDP_F16 */
} ddp_reducer_desc;

/* Measurements of a reducer: see ddp_reducer_get_stats. */
typedef struct ddp_reducer_stats {
    int bucket_count;      /* in a step */
    int rebuilt;           /* 1 = buckets follow the ready order of rank 0; 0 in the first step, and with
                              find_unused */
    int unused_count;      /* parameters for which ddp_reducer_is_unused returns 1 */
    uint64_t steps;        /* that ended without an error, since create */
    size_t gradient_bytes; /* of all parameters */
    size_t bytes_reduced;  /* in the last step, as sent: in comm_dtype; f32 for sums of 16-bit gradients */
    size_t bytes_copied;   /* in the last step, packed into flat buckets and back */
    size_t largest_bucket_bytes; /* of a step */
    double comm_seconds; /* last step: time to reduce the buckets. 0, like overlap, on a backend that enqueues
                            on a device: the host does not wait there */
    double wait_seconds; /* last step: time inside ddp_reducer_wait, not hidden by compute */
    double total_comm_seconds, total_wait_seconds; /* sums over all steps */
    double overlap; /* last step: share of comm_seconds that compute hid, 0 to 1; 0 with one rank */
} ddp_reducer_stats;

/* For ddp_accumulator_create. */
typedef struct ddp_accumulator_desc {
    ddp_param *params; /* required, with every grad.data set; with a reducer, its array, after
                          ddp_reducer_create. It must outlive the accumulator */
    int param_count;   /* entries of params; with a reducer, those of the reducer */
    /* required; per rank and step, at least 1. The reducer's micro_batch_count is the same number, or 1: then
       it divides by the number of ranks only */
    int micro_batch_count;
    /* NULL = none: sums are not reduced over ranks, and not divided. Otherwise ddp_accumulator_ready calls
       ddp_reducer_ready once a sum over micro-batches is final. A reducer reads the f32 sums of 16-bit
       gradients only if its comm_dtype is 0, and only from the accumulator that was created last. Otherwise
       it reads the sum rounded to 16 bits */
    ddp_reducer *reducer;
} ddp_accumulator_desc;

/* The end of uneven inputs. SHADOW: a rank without a batch contributes zeros until the last rank has
   finished. STOP: all ranks stop as soon as one rank has no batch. */
typedef enum ddp_join_mode { DDP_JOIN_SHADOW = 0, DDP_JOIN_STOP } ddp_join_mode;

/* For ddp_join_create. */
typedef struct ddp_join_desc {
    ddp_reducer *reducer; /* required; must outlive the join */
    ddp_join_mode mode;   /* 0 = shadow; equal on all ranks */
    /* Only for shadow; set on all ranks, or NULL on all. ddp_join_step calls it on a rank without a batch,
       after each step of zeros. It does what the other ranks do after ddp_reducer_wait: clipping, the
       optimizer step, the learning rate. Values then stay equal. NULL = at the end, values of parameters are
       broadcast from the lowest rank of those active in the last step. Optimizer state is not */
    ddp_result (*step_fn)(void *user);
    void *user; /* passed to step_fn */
    /* Equal on all ranks. 1 = each ddp_join_step broadcasts the reducer's buffers, from the
       lowest rank that has a batch. The caller then makes no calls of ddp_reducer_sync_buffers */
    int sync_buffers;
} ddp_join_desc;

//== api ============================================================================================= >>api

/* --- results and tensors --- */

/* The name of a result, such as "DDP_ERR_TIMEOUT"; "unknown ddp_result" for any other value. Static text. */
DDPDEF const char *ddp_result_name(ddp_result result);
/* The last failure of this thread as one line, or "" if it had none. ddp_wait also sets it for a call that
   failed on the communication thread. A call without a ddp_result sets it only if its comment states that; a
   destroy never does, so it can be read after the objects are freed. Other calls may replace it. */
DDPDEF const char *ddp_last_error(void);

/* Bytes of one element; 0 for DDP_DTYPE_DEFAULT and unknown values. */
DDPDEF size_t ddp_dtype_size(ddp_dtype dtype);
/* The enum's suffix in lower case, such as "bf16"; "default" for DDP_DTYPE_DEFAULT, "unknown dtype" for
   unknown values. Static text. */
DDPDEF const char *ddp_dtype_name(ddp_dtype dtype);
/* Number of elements; 1 when ndim is 0. -1 when tensor is NULL, ndim is negative or above DDP_MAX_NDIM, an
   entry of shape is negative, or a product of the first entries overflows. */
DDPDEF int64_t ddp_tensor_count(const ddp_tensor *tensor);

/* --- ranks --- */

/* The program of one rank: see ddp_launch. Every result except DDP_OK is a failure. */
typedef ddp_result (*ddp_rank_fn)(ddp_group *world, void *user);

/* Starts desc->world_size ranks on this machine and runs fn(world, user) on each. Blocks until all have
   ended. Returns DDP_OK, or the failure that occurred first, with its ddp_last_error. It returns
   DDP_ERR_POISONED only if no rank failed in another way, such as after a ddp_group_abort. desc may be NULL.
   Call it before starting threads, CUDA or MPI.
   Joining: inside torchrun, mpirun, srun or another ddp_launch, it starts no rank. It creates a group of
   all ranks there, as ddp_group_create does, and runs fn on the calling thread. It returns when this fn has
   returned, with its result. desc->world_size must be 0 or the number of these ranks.
   One rank: fn runs on the calling thread, with processes as well, unless max_restarts is set.
   Ownership: ddp_launch creates and destroys the world; fn must not destroy it. No exception may leave fn.
   Cores: each rank that it starts gets its share. ddp_launch sets its affinity, and OMP_NUM_THREADS and
   OPENBLAS_NUM_THREADS unless the user has set them. OpenMP, OpenBLAS, MKL and BLIS have read such
   variables before the fork. ddp_launch therefore also lowers their number of threads to the share at run
   time, unless the user has set one of their variables. With a statically linked OpenMP this works only if
   the program refers to omp_set_num_threads and omp_get_max_threads. On return the caller's settings are
   restored.
   Lost ranks: a rank that returns while others still need it counts as lost.
   Processes: stdio is flushed, then ranks are forked; each rank flushes and ends with _exit. The caller
   does not see what a rank writes to *user. SIGINT and SIGTERM sent to the caller reach all ranks, and
   ranks end when the caller dies. After a failure the other ranks have timeout_ms to return, then they are
   killed. No child, zombie or file remains.
   Threads: one per rank. ddp_launch waits for each of them, also after a failure.
   Errors: the result of fn; DDP_ERR_PEER_LOST when a rank died (with its signal or exit status);
   DDP_ERR_INVALID (also a world_size that contradicts the world it joins); DDP_ERR_SYSTEM;
   DDP_ERR_NO_MEMORY; when joining, those of ddp_group_create. */
DDPDEF ddp_result ddp_launch(const ddp_launch_desc *desc, ddp_rank_fn fn, void *user);

/* Joins the world that a launcher has started, or creates a world of one rank. desc may be NULL. Collective
   over that world. Blocks until all ranks have joined, at most timeout_ms.
   Ownership: free *out with ddp_group_destroy. The backend, the device and the allocators of desc must
   outlive the group. The texts of desc are read only during the call.
   Inside a ddp_launch: creates one more group of all its ranks, with the fields of this desc. This call waits
   for the other ranks with the timeout of the launched world.
   One machine: ranks find each other through an abstract socket, keyed by user and job id, and share one
   anonymous memory file. The job id comes from the launcher's variables, or from MASTER_ADDR, MASTER_PORT
   and desc->name.
   Several machines: ranks connect to rank 0 over TCP. Its address comes from MASTER_ADDR and MASTER_PORT
   (or DDP_MASTER_PORT, if set), from the first node of a SLURM step, or from init_method. If the rendezvous
   shows that all ranks are on one machine, the group uses shared memory. Otherwise the group is for
   rendezvous and control. Its collectives go through rank 0. Send buffers above 64 KiB per rank,
   ddp_all_gather_v, ddp_all_to_all_v and messages are DDP_ERR_UNSUPPORTED. Group memory is private to each
   rank. A split with all ranks on one machine uses shared memory. Use TCP on private networks, or set
   desc->secret: without it, any process that reaches the port and has the job id can join.
   MPI: with DDP_USE_MPI, and started by mpirun or requested by "mpi://", ranks of several machines can use
   all calls. Ranks of one machine use shared memory. If the program has not initialized MPI, the library
   does so, and finalizes MPI at exit, unless a group is then open or has failed. In tree order the bits
   equal those of one machine. MPI executes broadcasts and, with DDP_ORDER_ANY, all_reduce and reduce. If one
   of these fails, MPI may still write to its buffers: do not free or reuse them before MPI is finalized.
   Errors: if a rank fails before it has joined, only this rank returns at once. The others wait for it, at
   most until the timeout. DDP_ERR_INVALID (variables or desc contradict each other); DDP_ERR_TIMEOUT (names
   the missing ranks, or the address where no process answers); DDP_ERR_MISMATCH (two ranks with one number,
   another world size or version, rank 0 of another job); DDP_ERR_SYSTEM (the port is in use: names the
   process that holds it); DDP_ERR_PEER_LOST; DDP_ERR_NO_MEMORY; DDP_ERR_UNSUPPORTED (the address of rank 0
   is unknown; more than DDP_MAX_LOCAL_RANKS ranks on one machine; "mpi://" without DDP_USE_MPI);
   DDP_ERR_ENGINE. */
DDPDEF ddp_result ddp_group_create(ddp_group **out, const ddp_group_desc *desc);

#if defined(DDP_USE_MPI)
/* Creates a group of the ranks of the program's own communicator, with the same rank numbers. Ranks of one
   machine use shared memory. A group on several machines runs over MPI: see ddp_group_create. desc may be
   NULL; its init_method, rank, world_size, backend and secret are not read. Collective over comm, blocks.
   Ownership: free *out with ddp_group_destroy. comm is duplicated and stays the caller's.
   MPI must be initialized, at any thread level, and may be finalized only after the group has been
   destroyed. Below MPI_THREAD_MULTIPLE, calls on the group must come from the threads that the level
   allows. A group over MPI then has no communication thread: asynchronous calls make progress only inside
   the caller's other calls, such as ddp_wait, and ddp_test blocks.
   Errors: if a rank fails before it communicates, the others wait for it until the timeout. DDP_ERR_INVALID
   (also MPI_COMM_NULL, an intercommunicator, MPI not initialized); DDP_ERR_MISMATCH (order);
   DDP_ERR_TIMEOUT; DDP_ERR_PEER_LOST; DDP_ERR_NO_MEMORY; DDP_ERR_SYSTEM; DDP_ERR_ENGINE. */
DDPDEF ddp_result ddp_group_from_mpi(ddp_group **out, MPI_Comm comm, const ddp_group_desc *desc);
#endif

/* Splits a group: ranks with the same color form a new group, ordered by key, then by old rank. A rank with
   a negative color makes the call too, and gets *out == NULL and DDP_OK. Collective, blocks; color and key
   may differ. The new group inherits the desc of its parent, and accepts group memory of its ancestors.
   Error lines name it after its parent and its color: "world.2".
   Ownership: free *out with ddp_group_destroy, before the parent.
   Failures: see timeout_ms for a lost or late rank. All other failures of a later call, such as
   DDP_ERR_MISMATCH or ddp_group_abort, poison only the group of that call, not its parent or its splits. */
DDPDEF ddp_result ddp_group_split(ddp_group *group, int color, int key, ddp_group **out);

/* Arranges the ranks of world, which may be any group, as a grid. Creates this rank's group along each
   dimension: the ranks that differ from it only in that position, in that order. These groups are splits of
   world: see ddp_group_split. Collective, with the same desc on every rank; blocks. Copies the desc.
   Ownership: free *out with ddp_mesh_destroy, before world. Errors, on every rank: DDP_ERR_INVALID (names;
   shape does not multiply to world_size); DDP_ERR_MISMATCH; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_mesh_create(ddp_mesh **out, ddp_group *world, const ddp_mesh_desc *desc);

/* The group along a dimension; its ddp_rank is this rank's position there. The mesh owns it: do not destroy
   it. NULL, with ddp_last_error set, if mesh or name is NULL or the name is unknown. Not collective. */
DDPDEF ddp_group *ddp_mesh_group(ddp_mesh *mesh, const char *name);
/* Frees the mesh and destroys its groups, each as ddp_group_destroy does. Not collective. */
DDPDEF void ddp_mesh_destroy(ddp_mesh *mesh);
/* DDP_OK while the group works; otherwise the code of its first failure, with the cause in ddp_last_error.
   It reports a failure of another rank once this rank has received it. A process that has died may go
   unreported until a call needs that rank. The next call still returns the code. Any thread; not
   collective; never blocks. */
DDPDEF ddp_result ddp_group_status(const ddp_group *group);
/* Poisons the group: pending and later calls on every rank return DDP_ERR_POISONED, and the error names
   this rank. A rank that cannot continue calls it, so that its peers do not wait for the timeout; so may a
   thread that monitors a blocked call. A group that has failed before keeps its first cause. The group's
   parent and splits continue. The aborted group must still be destroyed. Any thread; not collective; never
   blocks. */
DDPDEF ddp_result ddp_group_abort(ddp_group *group);

/* Leaves the group, and frees this rank's part of it, including its group memory. First wait for every
   ddp_work, and destroy all that was created on the group: splits, meshes, reducers and so on. Not
   collective. No barrier is needed first: a collective that has returned on this rank needs no more of it. A
   peer gets DDP_ERR_PEER_LOST if its call still needs this rank. If a call of this rank is still pending,
   the group fails on every rank with DDP_ERR_PEER_LOST. Waits for a ddp_bucket_hook that still runs, but
   not for the calls of other ranks; on a group of GPUs see ddp_cuda_group_create. */
DDPDEF void ddp_group_destroy(ddp_group *group);

/* For a NULL group, the next four calls return -1, 0, -1 and 0. The last two count only ranks of this
   group: to choose a GPU, use the ddp_local_rank of the world, not that of a split. */
DDPDEF int ddp_rank(const ddp_group *group);             /* this rank in the group, from 0 */
DDPDEF int ddp_world_size(const ddp_group *group);       /* ranks of the group */
DDPDEF int ddp_local_rank(const ddp_group *group);       /* this rank among those on its machine, from 0 */
DDPDEF int ddp_local_world_size(const ddp_group *group); /* ranks of the group on this machine */

/* The number of times that the job was restarted, the same on every rank: 0 in the first start. It comes from
   ddp_launch_desc.max_restarts, or from the launcher: torchrun (TORCHELASTIC_RESTART_COUNT), SLURM
   (SLURM_RESTART_COUNT). In an attempt above 0, load the newest checkpoint. Splits have the attempt of their
   parent. 0 for a NULL group. */
DDPDEF int ddp_group_attempt(const ddp_group *group);

/* --- collectives ---
   All are collective over the group. The call, its count, dtype, op and root must be equal on all ranks;
   for arrays of counts see the calls. Buffers may differ, and so may work: one rank may block while another
   does not. work == NULL blocks; otherwise ddp_wait completes the call (see CONCEPTS, Work). W is the world
   size, `rank` is this rank.
   Counts and offsets are in elements. `send + n` is the address of element n. A count may be 0. Buffers
   need only the alignment of their dtype. The call uses them until it, or its wait, returns. A buffer that
   this rank does not need, or one without elements, may be NULL.
   In place: send and recv may overlap only as the comment of the call states. Each rank decides this by
   itself. The call writes only recv: other blocks of send stay as they are. Any other overlap is
   DDP_ERR_INVALID.
   Errors:
     DDP_ERR_INVALID      only on this rank, before data is sent: see ERRORS, One rank
     DDP_ERR_UNSUPPORTED  on every rank, for a call that the tcp backend does not have; the group stays usable
     other errors         poison the group: DDP_ERR_MISMATCH, DDP_ERR_TIMEOUT, DDP_ERR_PEER_LOST,
                          DDP_ERR_POISONED, DDP_ERR_NO_MEMORY, DDP_ERR_SYSTEM, DDP_ERR_ENGINE
   After a failure the caller may reuse or free the buffers. Exceptions: MPI, see ddp_group_create; GPUs,
   see ddp_cuda_group_create. */

/* recv[i] on every rank = op over ranks of send[i]; count elements each. In place: send == recv. */
DDPDEF ddp_result ddp_all_reduce(ddp_group *group, const void *send, void *recv, size_t count,
                                 ddp_dtype dtype, ddp_op op, ddp_work *work);
/* recv[i] on root = op over ranks of send[i]; count elements each. Only root uses recv.
   In place on root: send == recv. */
DDPDEF ddp_result ddp_reduce(ddp_group *group, const void *send, void *recv, size_t count, ddp_dtype dtype,
                             ddp_op op, int root, ddp_work *work);
/* buf on every rank = buf of root; count elements. */
DDPDEF ddp_result ddp_broadcast(ddp_group *group, void *buf, size_t count, ddp_dtype dtype, int root,
                                ddp_work *work);
/* recv (W * send_count) on every rank = send (send_count) of every rank, in rank order.
   In place: send == recv + rank * send_count. */
DDPDEF ddp_result ddp_all_gather(ddp_group *group, const void *send, void *recv, size_t send_count,
                                 ddp_dtype dtype, ddp_work *work);
/* recv (recv_count) on rank r = op over ranks of block r of send (W * recv_count).
   In place: recv == send + rank * recv_count. */
DDPDEF ddp_result ddp_reduce_scatter(ddp_group *group, const void *send, void *recv, size_t recv_count,
                                     ddp_dtype dtype, ddp_op op, ddp_work *work);
/* Block i of recv on rank j = block j of send on rank i. Both buffers have W blocks of count_per_peer. Not
   in place. */
DDPDEF ddp_result ddp_all_to_all(ddp_group *group, const void *send, void *recv, size_t count_per_peer,
                                 ddp_dtype dtype, ddp_work *work);
/* recv (W * send_count) on root = send (send_count) of every rank, in rank order. Only root uses recv.
   In place on root: send == recv + root * send_count. */
DDPDEF ddp_result ddp_gather(ddp_group *group, const void *send, void *recv, size_t send_count,
                             ddp_dtype dtype, int root, ddp_work *work);
/* recv (recv_count) on rank r = block r of root's send (W * recv_count). Only root uses send.
   In place on root: recv == send + root * recv_count. */
DDPDEF ddp_result ddp_scatter(ddp_group *group, const void *send, void *recv, size_t recv_count,
                              ddp_dtype dtype, int root, ddp_work *work);

/* Every rank receives recv_counts[r] elements from rank r, at recv + recv_offsets[r]. Both arrays have W
   entries and are copied. All ranks pass the same counts; offsets may differ. recv_offsets NULL = packed in
   rank order. Blocks must not overlap. Elements outside the blocks are not written. In place: send is this
   rank's block of recv. Errors: DDP_ERR_INVALID if send_count is not recv_counts[rank]. */
DDPDEF ddp_result ddp_all_gather_v(ddp_group *group, const void *send, size_t send_count, void *recv,
                                   const size_t *recv_counts, const size_t *recv_offsets, ddp_dtype dtype,
                                   ddp_work *work);

/* Sends send_counts[j] elements at send + send_offsets[j] to rank j, and receives recv_counts[j] elements
   from rank j at recv + recv_offsets[j]. The arrays have W entries and are copied. Offsets NULL = packed in
   rank order. send_counts[j] on rank i must equal recv_counts[i] on rank j, also for i == j. Blocks of recv
   must not overlap. Not in place. Errors: DDP_ERR_MISMATCH names a pair of ranks with different counts; with
   one rank that is DDP_ERR_INVALID. */
DDPDEF ddp_result ddp_all_to_all_v(ddp_group *group, const void *send, const size_t *send_counts,
                                   const size_t *send_offsets, void *recv, const size_t *recv_counts,
                                   const size_t *recv_offsets, ddp_dtype dtype, ddp_work *work);

/* Returns when every rank has entered. Runs after this rank's earlier collectives, but does not wait for
   messages. On GPUs it also blocks the host. */
DDPDEF ddp_result ddp_barrier(ddp_group *group);

/* --- point to point ---
   Messages between two ranks; not collective. peer is another rank; tag >= 0. A receive takes the oldest
   message from peer with this tag. Count and dtype must be those of the send. Blocking and buffers: as for
   collectives.
   A message starts when it is issued, and does not wait for collectives before it. At most 16 messages from
   one rank to another are in flight at once; later ones wait for these, whatever their tags. Over NCCL the
   order is different: see ddp_cuda_group_create. A small blocking send may return before the receive is
   posted; do not rely on it.
   Errors: as for collectives. DDP_ERR_UNSUPPORTED over tcp, on this rank only. Another count or dtype is
   DDP_ERR_MISMATCH, and poisons the group. */

/* Sends count elements to peer. */
DDPDEF ddp_result ddp_send(ddp_group *group, const void *buf, size_t count, ddp_dtype dtype, int peer,
                           int tag, ddp_work *work);
/* Receives count elements from peer. */
DDPDEF ddp_result ddp_recv(ddp_group *group, void *buf, size_t count, ddp_dtype dtype, int peer, int tag,
                           ddp_work *work);

/* Begins a batch. Until ddp_p2p_end, sends and receives with work == NULL return at once, and their buffers
   stay in use. Other calls, also collectives and messages with a ddp_work, are not part of the batch. Not
   collective; does not block.
   Errors: DDP_ERR_INVALID if a batch is open: batches do not nest. */
DDPDEF ddp_result ddp_p2p_begin(ddp_group *group);
/* Ends the batch: blocks until all its messages are done. Its sends and receives may be issued in any order
   without a deadlock. Messages with the same peer and tag still match in the order issued. Not collective.
   Errors: the first failure of a message, in the order issued; the batch has ended in this case too.
   DDP_ERR_INVALID if no batch is open. */
DDPDEF ddp_result ddp_p2p_end(ddp_group *group);

/* --- asynchronous calls --- */

/* Blocks until the call is done, returns its result and empties *work, also after a failure. group is that
   of the call. Calls may be waited for in any order. An empty handle returns DDP_OK. On a group of GPUs
   over NCCL it makes the user's stream wait instead of the host: synchronize that stream before the host
   uses the buffers. Not collective. Errors: DDP_ERR_INVALID for another copy of a handle that was already
   waited for. */
DDPDEF ddp_result ddp_wait(ddp_group *group, ddp_work *work);
/* *done = 1 when the call is done or has failed, otherwise 0. An empty handle is done. On a group of GPUs
   over NCCL it queries the device: done means that the result is complete there. The handle still needs its
   ddp_wait, which returns the failure of the call. Not collective. Never blocks, except as ddp_group_from_mpi
   states. Errors: DDP_ERR_INVALID for a handle that was already waited for, and while the stream is captured
   into a CUDA graph; DDP_ERR_ENGINE. */
DDPDEF ddp_result ddp_test(ddp_group *group, ddp_work *work, int *done);

/* --- group memory --- */

/* Allocates size_bytes of zeroed memory per rank, 64-byte aligned. size_bytes is at least 1. Collectives on
   pointers into it need no copy where ranks share memory: see CONCEPTS, Memory. Over tcp the memory is
   private to each rank; on GPUs see ddp_cuda_group_create. Collective, with the same size on every rank;
   blocks. Ownership: ddp_group_free or ddp_group_destroy frees it. Errors, on every rank, and *out is NULL:
   DDP_ERR_INVALID, DDP_ERR_MISMATCH, DDP_ERR_NO_MEMORY. After these the group stays usable. */
DDPDEF ddp_result ddp_group_alloc(ddp_group *group, size_t size_bytes, void **out);

/* Frees one block of ddp_group_alloc, not the group. Collective, in the same order on every rank; blocks.
   NULL on all ranks is ignored. Errors: DDP_ERR_MISMATCH, on every rank, for different blocks (by order of
   allocation): none is freed. DDP_ERR_INVALID, on this rank only, if memory is not a block of this group.
   After any other error the block is freed. */
DDPDEF ddp_result ddp_group_free(ddp_group *group, void *memory);

/* --- gradients --- */

/* Creates a reducer. It averages gradients over ranks and micro-batches, bucket by bucket while backward
   runs. A bucket holds gradients of one dtype in reverse definition order. After the first step, buckets
   follow the order in which gradients became ready on rank 0, except with find_unused. Ranges of adjacent
   gradients are reduced in place if they are large or fill a bucket; others are copied. A NULL grad.data in
   desc->params is replaced by group memory, with gradients side by side; grad.dtype and grad.shape are
   filled in as well.
   Collective, blocks. Broadcasts values and buffers from rank 0. All fields of the desc must be equal,
   except addresses; a hook or a grad.data is NULL on all ranks or on none. Parameters agree in count, name,
   shape, dtype and order.
   Ownership: the params array and its names stay with the caller and must outlive the reducer.
   desc->buffers is copied. The memory of the buffers must outlive the reducer if ddp_reducer_sync_buffers
   or a ddp_join uses it.
   Other calls: ddp_reducer_ready issues the buckets that it completes, so ranks may issue them at different
   points. Make other collective calls on the group, also those of another reducer, before the first
   ddp_reducer_ready of a step or after its ddp_reducer_wait. Steps of several reducers may overlap if all
   ranks make the same ddp_reducer_ready and ddp_reducer_wait calls in the same order.
   Errors: DDP_ERR_MISMATCH on every rank names the first field, parameter or buffer that differs. After an
   error desc->params is unchanged; values may have been broadcast.
   Source: PyTorch DDP, Li et al. 2020. */
DDPDEF ddp_result ddp_reducer_create(ddp_reducer **out, ddp_group *group, const ddp_reducer_desc *desc);

/* Marks the gradient of params[param_index] as final for this step. Until ddp_reducer_wait returns, the
   caller must not read or write it.
   A bucket starts when its gradients, and those of earlier buckets, are ready. The last bucket starts in
   ddp_reducer_wait, except on a group of GPUs over NCCL. Ranks may call it in different orders. With several
   micro-batches, call it only in the last one: see ddp_reducer_no_sync and ddp_accumulator_ready. Each use of
   a tied parameter needs its own call. Not collective; does not block.
   Errors: DDP_ERR_INVALID names a parameter that is ready twice in a step, or that static_graph excludes;
   those of collectives. */
DDPDEF ddp_result ddp_reducer_ready(ddp_reducer *reducer, int param_index);

/* Ends a step. Blocks until every gradient is the average over ranks and micro-batches: their sum, divided
   once by world_size * micro_batch_count. With a ddp_join, active ranks replace world_size. With per_token it
   is the sum. Then adds the gradients of later uses of a tied parameter to that of its first use; the other
   uses keep their own averages.
   Collective, except with no_sync: then it does nothing.
   Unused parameters: with find_unused or static_graph, a gradient without ddp_reducer_ready counts as zeros
   on this rank, and the average overwrites it.
   Errors: DDP_ERR_INVALID, on every rank, names a parameter that never became ready on some rank, unless
   find_unused or static_graph allows it; the group stays usable. Every error ends the step, and leaves the
   contents of gradients undefined. */
DDPDEF ddp_result ddp_reducer_wait(ddp_reducer *reducer);

/* Adds sum to mean->sum, exactly, and count to mean->count. For a micro-batch, sum is the sum of its losses,
   and count the number of its tokens (or samples). A NaN or an infinity stays in the sum. Not collective. */
DDPDEF void ddp_mean_add(ddp_mean *mean, double sum, int64_t count);
/* Replaces *mean by the exact total over ranks: sum and count; ddp_mean_value gives the mean. mean is host
   memory, on a group of GPUs too. Collective, blocks. Errors: a negative count on any rank is
   DDP_ERR_INVALID on all ranks. After any error *mean is unchanged.
   To reduce over a mesh, call it once per axis. If a call fails, call ddp_group_abort on the groups of the
   remaining axes: ranks that had no failure already wait there. */
DDPDEF ddp_result ddp_mean_reduce(ddp_group *group, ddp_mean *mean);
/* The sum, rounded to nearest, divided by count; 0 when count is 0. mean must not be NULL. */
DDPDEF double ddp_mean_value(const ddp_mean *mean);

/* Ends a step like ddp_reducer_wait, but with the mean over all tokens (or samples) of all ranks and
   micro-batches. Requires per_token. In: loss->sum is this rank's sum of losses in this step, and
   loss->count is the number of its tokens. Out: *loss is the exact total over ranks, sum and count;
   ddp_mean_value gives the mean. Every gradient becomes its sum over ranks, divided once by the total
   count. The gradient of a tied parameter's first use includes all its uses. With a total count of 0,
   gradients stay sums. The bits do not depend on how tokens are distributed. With no_sync it does nothing.
   Collective, blocks. Errors leave *loss unchanged: those of ddp_reducer_wait; DDP_ERR_INVALID without
   per_token, on this rank only; DDP_ERR_INVALID for a negative count, on every rank. After a negative count
   the step has ended, and gradients stay sums. */
DDPDEF ddp_result ddp_reducer_wait_mean(ddp_reducer *reducer, ddp_mean *loss);

/* Sets no_sync to on. While it is 1, ddp_reducer_ready, ddp_reducer_wait and ddp_reducer_wait_mean do
   nothing and return DDP_OK: the caller accumulates micro-batches in params[i].grad on this rank. Set it to
   0 before the backward of the last micro-batch. desc.micro_batch_count must be the number of all these
   micro-batches, since the divisor does not change. Not collective, but the same on every rank. Errors:
   DDP_ERR_INVALID between the first ready of a step and its ddp_reducer_wait. */
DDPDEF ddp_result ddp_reducer_no_sync(ddp_reducer *reducer, int on);

/* Broadcasts desc.buffers from root to all ranks, in one packed message. Call it before the forward of a
   step, as PyTorch DDP does with broadcast_buffers: a rank changes running statistics by its own data. With
   no_sync on, or without buffers, it does nothing. The first call allocates the message.
   Collective, with the same root; blocks. With a ddp_join in mode shadow, set ddp_join_desc.sync_buffers
   instead. Errors: DDP_ERR_INVALID for an invalid root, between the first ddp_reducer_ready of a step and its
   ddp_reducer_wait, and in a step of a ddp_join in which other ranks have no batch. */
DDPDEF ddp_result ddp_reducer_sync_buffers(ddp_reducer *reducer, int root);

/* Scales all gradients by max_norm / norm when their global L2 norm exceeds max_norm. *norm (may be NULL)
   is the norm before scaling. Call it after ddp_reducer_wait, or with per_token after
   ddp_reducer_wait_mean. Not collective: every rank computes the same from equal gradients. Blocks until
   the device has computed the norm. Squares add per row (dim 0) in a fixed order and rows add exactly, so
   ddp_fsdp.h gets the same norm from its shards. INFINITY as max_norm only computes the norm. A tied
   parameter counts once, as the sum in its first use; every use is scaled. Gradients that no rank uses under
   static_graph neither count nor are scaled. A norm that is not finite scales nothing. Errors:
   DDP_ERR_INVALID when max_norm is not positive, with no_sync, when no such wait has followed the last
   ddp_reducer_ready, or when it has failed. */
DDPDEF ddp_result ddp_reducer_clip_grad_norm(ddp_reducer *reducer, float max_norm, float *norm);

/* Returns 1 when no rank used params[param_index]: with find_unused in the last step, with static_graph
   only in the first step. Otherwise 0, also for an invalid index. Each use of a tied parameter counts
   separately. */
DDPDEF int ddp_reducer_is_unused(const ddp_reducer *reducer, int param_index);
/* Stores the measurements of the reducer in *stats. Not collective; does not block. "The last step" is the
   last one that ended. */
DDPDEF ddp_result ddp_reducer_get_stats(const ddp_reducer *reducer, ddp_reducer_stats *stats);
/* Frees the reducer and the gradient memory that it allocated; those grad.data become NULL again. The
   params array must still exist. Collective, between steps: waits for buckets in flight and for the other
   ranks, at most timeout_ms. On a poisoned group it does not wait. */
DDPDEF void ddp_reducer_destroy(ddp_reducer *reducer);

/* Creates an accumulator. It adds the gradients of the m = micro_batch_count micro-batches of a step. Each
   backward overwrites params[i].grad, and does not add to it. A step always has m micro-batches:

       m times    backward; ddp_accumulator_ready for every parameter; ddp_accumulator_next
       once       ddp_reducer_wait, if there is a reducer

   After a step, params[i].grad holds the sum or, with a reducer, the average over ranks. 16-bit gradients are
   added in f32 and rounded once.
   Bits: the sum is the tree that reductions over ranks use. One rank with all micro-batches of a step, and
   several ranks with 2^k consecutive ones each, give the same bits.
   group is that of the reducer: it provides the device and the allocator. Not collective. Copies the desc.
   Allocates floor(log2 m) buffers of the gradients' size, in f32 for 16-bit gradients, on the device. Waits
   for the reducer's buckets in flight.
   Ownership: free *out with ddp_accumulator_destroy, before ddp_group_destroy.
   Errors: DDP_ERR_INVALID; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_accumulator_create(ddp_accumulator **out, ddp_group *group,
                                         const ddp_accumulator_desc *desc);

/* Marks this micro-batch's gradient in params[param_index].grad as final, and adds it. The next backward may
   overwrite the gradient once the call has returned. On a group of GPUs the additions are enqueued on the
   stream of ddp_cuda_set_stream. In the last micro-batch the sum becomes final, and ddp_reducer_ready is
   called for it. The reducer then uses the gradient until ddp_reducer_wait. With ddp_reducer_no_sync on,
   params[param_index].grad keeps this rank's sum. Not collective. Does not wait for other ranks. Errors:
   DDP_ERR_INVALID for a second call in a micro-batch, and while ddp_reducer_wait has not ended the step
   before; those of ddp_reducer_ready. */
DDPDEF ddp_result ddp_accumulator_ready(ddp_accumulator *accumulator, int param_index);

/* Ends a micro-batch. *last (may be NULL) = 1 after the last one of the step, otherwise 0. In the last one,
   ddp_reducer_wait may come before or after this call. Every parameter must be ready, also with find_unused:
   for one that was not used, fill its gradient with zeros. The reducer then counts it as used. Not
   collective, does not block. Errors: DDP_ERR_INVALID names a parameter that is not ready. The micro-batch
   then stays open, and *last is unchanged. */
DDPDEF ddp_result ddp_accumulator_next(ddp_accumulator *accumulator, int *last);

/* Frees the accumulator, before or after ddp_reducer_destroy. Sums that ddp_reducer_wait has not reduced are
   lost: once the last micro-batch has begun, call ddp_reducer_wait first. The reducer can be used without it
   afterwards. Waits for buckets in flight. Not collective. NULL is ignored. */
DDPDEF void ddp_accumulator_destroy(ddp_accumulator *accumulator);

/* Creates a join, for ranks with different numbers of batches (Join of PyTorch). group is that of the
   reducer. One join serves any number of epochs. A rank without a batch runs no forward and no backward, so
   these must not communicate over the ranks of group. Not collective. Copies the desc. Ownership: free *out
   with ddp_join_destroy. Errors: DDP_ERR_INVALID; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_join_create(ddp_join **out, ddp_group *group, const ddp_join_desc *desc);

/* Begins a step. Every rank calls it once before each optimizer step, also if that has several micro-batches.
   have_batch: 1 = this rank has the data of the step. *active = number of ranks that have a batch; 0 = the
   epoch has ended, on all ranks. Without per_token, end the step with ddp_reducer_wait. It then divides by
   *active * micro_batch_count. With per_token, end it with ddp_reducer_wait_mean, on every rank.
   Shadow: a rank without a batch runs steps of zeros inside the call, until no rank has a batch. It then
   returns *active 0 together with the others. At this end every rank receives the reducer's buffers from the
   lowest rank that was active in the last step.
   Stop: if one rank has no batch, *active is 0 on all. The others drop theirs.
   Collective, blocks. Errors: DDP_ERR_INVALID while ddp_reducer_wait has not ended the step before; those of
   ddp_reducer_wait; the result of step_fn. After an error of step_fn call ddp_group_abort: the other ranks
   are waiting. */
DDPDEF ddp_result ddp_join_step(ddp_join *join, int have_batch, int *active);

/* Frees the join. Its reducer then averages over all ranks again. Call it between steps, and before
   ddp_reducer_destroy. Not collective. NULL is ignored. */
DDPDEF void ddp_join_destroy(ddp_join *join);

//== samplers ==================================================================================== >>sampler
/* A sampler decides which samples of a dataset this rank takes in an epoch, and in what order. Ranks do not
   communicate, and no call waits: each rank makes its own sampler with the same desc except for rank.

   W = num_replicas, N = dataset_size, U = global_batch, or W without one.
       default      entries N, N+1 ... up to the next multiple of U repeat the order from its start (padding)
       drop_last    the N mod U last entries are left out
       no_pad       neither: the last round is short (with drop_last: as drop_last)
   Without global_batch, default and drop_last give the same indices as PyTorch's DistributedSampler:
       N=10 W=4 seed 0      order 4 1 7 5 3 9 0 8 6 2 | 4 1
                            rank 0: 4 3 6    rank 1: 1 9 2    rank 2: 7 0 4    rank 3: 5 8 1
   With global_batch the padded length does not depend on W, so the global batches of an epoch are the same on
   any W:
       N=10 W=2 global_batch 4      order [4 1 7 5] [3 9 0 8] [6 2 | 4 1]
                                    rank 0: 4 1  3 9  6 2        rank 1: 7 5  0 8  4 1
   desc.weights gives ranks of unequal speed unequal blocks of the same global batches. The block of rank r is
   the entries from U C[r] / C[W] to U C[r+1] / C[W], each rounded down. C[r] is the sum of weights[0] to
   weights[r-1]. The length of a block differs from U weights[r] / C[W] by less than 1, so equal weights give
   equal blocks if W divides U:
       N=10 W=2 global_batch 4      order [4 1 7 5] [3 9 0 8] [6 2 | 4 1]
       weights 3 1                  rank 0: 4 1 7  3 9 0  6 2 4     rank 1: 5  8  1
   A step must then average over samples, not over ranks. With a reducer or a ddp_fsdp, set per_token, and
   call ddp_reducer_wait_mean or ddp_fsdp_mean with the number of this rank's samples. With code that averages
   over ranks, multiply the gradient of each sample by W micro_batch_count / U. The mean is over the same
   samples as with equal blocks, and divided by the same count. For equal parameters the loss has the same
   bits, if ddp_mean_add gets the loss of each sample. Gradients are added in another order: they have the
   same bits if their sums are exact, as for integers, and otherwise differ by rounding.

   DDP_SHUFFLE_TORCH keeps no list of N entries. It computes a window of the order in one pass over the random
   draws, from the last to the first. The first window is small, so that an epoch starts at once; later ones
   grow up to desc.window. */

/* The order of an epoch, unless no_shuffle is set. */
typedef enum ddp_shuffle {
    DDP_SHUFFLE_TORCH = 0,    /* the same indices as PyTorch 2.6 and newer for the same seed and epoch */
    DDP_SHUFFLE_TORCH_LEGACY, /* PyTorch before 2.6: differs only from 214748364 samples on */
    DDP_SHUFFLE_HASHED        /* a keyed bijection: needs no memory; any position in constant time; up to 2^63
                                 - 1 samples */
} ddp_shuffle;

/* A position in an epoch. Plain numbers without padding bytes: it may be written to a file as it is. */
typedef struct ddp_sampler_state {
    uint64_t seed;        /* of the sampler's desc */
    uint64_t epoch;       /* of the position */
    int64_t dataset_size; /* of the sampler's desc */
    int64_t position;     /* entries [0, position) of the epoch's order are used ... */
    int64_t block_offset; /* ... and, if not 0, that many of each rank's block of the next global batch */
    int64_t num_replicas; /* of the sampler that saved; with global_batch it defines the blocks */
    int64_t global_batch; /* of the sampler that saved */
    int32_t shuffle, no_shuffle; /* of the sampler's desc */
} ddp_sampler_state;

/* For ddp_sampler_init. Zero means default, except for dataset_size. */
typedef struct ddp_sampler_desc {
    int64_t dataset_size; /* N, required, at least 1 */
    int num_replicas;     /* W, such as ddp_world_size; 0 = 1 */
    int rank;             /* such as ddp_rank; 0 to num_replicas - 1 */
    uint64_t seed;        /* the same on every rank; the TORCH orders use the low 32 bits of seed + epoch */
    int no_shuffle;       /* 1 = the order is 0, 1, 2 ... */
    int drop_last;        /* 1 = leave out the tail that does not fill a round (W samples, or a global
                             batch). An epoch may then be empty */
    int no_pad;           /* 1 = keep the last round short: every sample exactly once; ranks' lengths may
                             differ */
    ddp_shuffle shuffle;  /* 0 = TORCH; not read with no_shuffle */
    int64_t global_batch; /* 0 = rank r takes entries r, r+W, r+2W ... like PyTorch. Otherwise rank r takes
                             the r-th contiguous block, global_batch/W long, of each global batch. It must
                             be a multiple of W, except with weights */
    int64_t window;       /* TORCH orders: samples computed at once, about 16 bytes each; 0 = 4000000. Never
                             more than the rank's share. Each window takes a pass over the draws before it */
    void *(*alloc_fn)(size_t size_bytes, void *user); /* NULL = malloc; set both or neither */
    void (*free_fn)(void *memory, void *user);        /* NULL = free */
    void *user;                                       /* passed to alloc_fn and free_fn */
    /* NULL = blocks of equal length. Otherwise W numbers above 0, the same on every rank, such as the samples
       per second of each rank. They require a global_batch, any number from W to 1e12 / W.
       Only ddp_sampler_init reads them */
    const double *weights;
} ddp_sampler_desc;

/* A sampler. The caller owns it; ddp_sampler_init fills it in. Its fields are private. One thread at a time
   may use it. It may be moved, but not copied.
   It is empty if it is zero-initialized, after a failed ddp_sampler_init, and after ddp_sampler_free. An
   empty sampler has length 0 and no next sample. Seek, save and load return DDP_ERR_INVALID for it; set_epoch
   and free ignore it. NULL counts as empty. */
typedef struct ddp_sampler {
    ddp_sampler_desc desc;         /* defaults resolved */
    uint64_t epoch;                /* the current one */
    uint64_t round, block;         /* a round gives each rank a block: one sample, without global_batch */
    uint64_t block_start;          /* entries of a round before this rank's block */
    int has_unequal_blocks;        /* blocks of ranks differ in length */
    uint64_t origin;               /* entries of the order before this one were used before a load */
    uint64_t gap_count;            /* after a load inside a global batch: blocks of that batch */
    uint64_t gap_used;             /* entries of each such block that are used */
    uint64_t gap_block;            /* entries of each such block */
    uint64_t remaining;            /* entries of the order to distribute, without padding */
    uint64_t total;                /* entries of all ranks together, with padding */
    int64_t first_index, length;   /* length: samples of this rank; first: those before a load */
    int64_t cursor;                /* index of the sample that ddp_sampler_next returns next */
    int ended;                     /* ddp_sampler_next has returned -1 */
    int half_bits[2], round_count; /* HASHED: the Feistel network */
    uint64_t round_keys[32];       /* HASHED: one for each round */
    uint64_t hashed[32];           /* HASHED: the window's samples */
    uint64_t *table; /* TORCH: window_count samples; during a pass a hash table of them. One allocation
                           with mt */
    int64_t window_first, window_count; /* the entries of the order in table or hashed */
    uint32_t *mt;                       /* the generator's 624 words for draws 624 * mt_block and on */
    int64_t mt_block;                   /* -1 = not seeded for this epoch */
} ddp_sampler;

/* Initializes *sampler at the start of epoch 0. Earlier contents are overwritten, not freed. Copies the
   desc. Only this call allocates, and only for the TORCH orders. Ownership: ddp_sampler_free frees the
   memory, by the desc's free_fn. Errors: DDP_ERR_INVALID names the field; DDP_ERR_NO_MEMORY. *sampler is then
   empty. */
DDPDEF ddp_result ddp_sampler_init(ddp_sampler *sampler, const ddp_sampler_desc *desc);

/* Moves to the start of an epoch. Call it before each epoch, with the same number on every rank. The same
   number gives the same order again. Different numbers on ranks give different orders, so ranks may take the
   same samples. ddp_sampler_load sets the loaded epoch: do not set it again, since that would start the epoch
   from its beginning. Call ddp_sampler_set_epoch next for the epoch that follows. */
DDPDEF void ddp_sampler_set_epoch(ddp_sampler *sampler, uint64_t epoch);

/* Number of samples of this rank in a global batch: global_batch / num_replicas, or its share by weights. 1
   without a global_batch. With no_pad, the last batch of an epoch may have fewer. */
DDPDEF int64_t ddp_sampler_batch_size(const ddp_sampler *sampler);

/* Number of samples of this rank in the epoch, padding included. Taking samples does not change it. After a
   load, until the next set_epoch: samples from the loaded position to the end. */
DDPDEF int64_t ddp_sampler_length(const ddp_sampler *sampler);

/* The next sample, 0 to N-1. At the end of the epoch it is -1, and stays -1 until a set_epoch, seek or load.
   *is_padding (may be NULL) is 1 for an entry that repeats a sample only to give all ranks the same length,
   otherwise 0. Leave such entries out of an evaluation. */
DDPDEF int64_t ddp_sampler_next(ddp_sampler *sampler, int *is_padding);

/* Moves to sample number `position` of this rank's samples, 0 to ddp_sampler_length; at the latter the epoch
   ends. Number 0 is the first sample of the epoch, or after a load the one at the loaded position. HASHED and
   no_shuffle: constant time. TORCH: the next ddp_sampler_next makes one pass over the draws up to there,
   unless the sample is in the current window. */
DDPDEF ddp_result ddp_sampler_seek(ddp_sampler *sampler, int64_t position);

/* Stores the current position. Ranks that have taken the same number of samples store the same state; keep
   any one. At the end of an epoch with no_pad, ranks may have taken different numbers: their states are the
   same once ddp_sampler_next has returned -1 on all.
   With blocks of unequal length, it works only after whole global batches: DDP_ERR_INVALID inside one.
   A sampler that was loaded inside a global batch, with another W or global_batch, takes the rest of that
   batch first. Errors: DDP_ERR_INVALID from its first sample on, until the round in which that rest ends is
   complete (a round: W samples, or a global batch), or ddp_sampler_next has returned -1. Both errors state
   after how many more samples of this rank a save works. */
DDPDEF ddp_result ddp_sampler_save(const ddp_sampler *sampler, ddp_sampler_state *state);

/* Continues at a saved position, in the saved epoch, with any num_replicas, rank and weights. All ranks load
   the same state. It is only read. The entries of the order that are still unused become a shorter order,
   which is distributed to the ranks by the same rules. Padding still repeats the start of the epoch, and
   drop_last leaves out the tail of the shorter order. No other sample is repeated or lost. With the
   num_replicas, global_batch, weights, drop_last and no_pad of the save, each rank gets exactly the samples
   that it would have had.
   Errors change nothing: DDP_ERR_INVALID names a dataset_size, seed, shuffle or no_shuffle that differs from
   the sampler's; the other fields may differ. DDP_ERR_CORRUPT when ddp_sampler_save cannot have stored the
   state. */
DDPDEF ddp_result ddp_sampler_load(ddp_sampler *sampler, const ddp_sampler_state *state);

DDPDEF void ddp_sampler_free(ddp_sampler *sampler); /* frees its memory, and empties it */

/* Returns a key for the random numbers of one sample: dropout, augmentation. It depends only on the
   arguments: the seed of the run, the epoch, the index of the sample in the dataset, and stream, a number for
   each use of random numbers, such as that of a layer. A sample then gets the same numbers on any number of
   ranks and workers. Different arguments give unrelated keys. To draw numbers, use the key as the state of a
   generator, or call ddp_seed(key, 0, i, 0) for number i. */
DDPDEF uint64_t ddp_seed(uint64_t seed, uint64_t epoch, int64_t index, uint64_t stream);

//== loader ======================================================================================= >>loader
/* A loader has worker threads that fetch the sampler's samples into a ring of batches, ahead of the consumer.
   The consumer gets batches in the sampler's order for any number of workers. Workers share the samples of a
   batch. Threads also share their memory; nothing is allocated after create.
       batch   4  5 | 6 | 7  8  9  10     extra_valid_batches 2, prefetch 4: 4 and 5 may still be copied,
                                          6 is the newest, 7 is ready, 8 is being fetched;
               valid new   prefetch       ddp_loader_next returns 7, and lets a worker overwrite 4 with 11
   Lifetime of a batch: number b is valid until the call of ddp_loader_next that returns number
   b + extra_valid_batches + 1. Numbers count the batches returned since create. Failed calls, the empty batch
   at the end of an epoch, set_epoch, seek and load do not change this.
   One thread at a time may use a loader. Not collective: each rank creates its own loader, with the same desc
   except for sampler.rank. Only ddp_loader_next and ddp_loader_destroy wait.
   A loader with workers cannot be used in a process that was forked after ddp_loader_create. There, calls
   that need the workers return DDP_ERR_INVALID, and ddp_loader_destroy does nothing. */

/* The most fields of a sample. */
#define DDP_LOADER_FIELDS 8

/* Writes sample `index`: its field f to fields[f]. Runs on worker threads, for different samples at the same
   time. It may run again for the same sample. On failure it calls ddp_fail with a description. */
typedef ddp_result (*ddp_fetch_fn)(void *user, int64_t index, void *const *fields);
/* Like ddp_fetch_fn, for samples that change from epoch to epoch, such as augmented images: see ddp_seed. */
typedef ddp_result (*ddp_fetch_epoch_fn)(void *user, int64_t index, uint64_t epoch, void *const *fields);

typedef struct ddp_loader ddp_loader; /* see ddp_loader_create */

/* For ddp_loader_create. Zero means default, except for the required fields. */
typedef struct ddp_loader_desc {
    ddp_sampler_desc sampler; /* required: which samples, in what order; the loader makes its own sampler. Its
                                 alloc_fn NULL = the loader's */
    int64_t batch_size;       /* samples of this rank per batch; 0 = ddp_sampler_batch_size: its block of a
                                 global batch; required without a global_batch */
    const ddp_tensor *fields; /* required: dtype and shape of each field of ONE sample, up to DDP_MAX_NDIM
                                 - 1 dimensions; data is not read */
    int field_count;          /* required; 1 to DDP_LOADER_FIELDS */
    ddp_fetch_fn fetch;       /* required, except with fetch_epoch */
    void *fetch_user;         /* passed to fetch or fetch_epoch */
    int worker_count;         /* threads, at most 64; 0 = 1; -1 = none: ddp_loader_next fetches, without a
                                 timeout */
    int prefetch;             /* batches prepared ahead; 0 = 2 per worker; not read without workers */
    int extra_valid_batches;  /* older batches that stay valid in addition to the newest: for copies to a
                                 device in flight; 0 = 1 */
    ddp_group *group;         /* NULL = batches are in memory of alloc_fn. Otherwise they are in the kind of
                                 host memory from which the group's device copies fastest (pinned) */
    int timeout_ms;           /* 0 = 600000; the longest time that ddp_loader_next waits for its workers, and
                                 ddp_loader_destroy for a fetch */
    void *(*alloc_fn)(size_t size_bytes, void *user); /* NULL = the group's, or malloc; set both or neither;
                                                         called on any thread */
    void (*free_fn)(void *memory, void *user);        /* of memory from alloc_fn */
    void *user;                                       /* passed to alloc_fn and free_fn */
    ddp_fetch_epoch_fn fetch_epoch;                   /* NULL = fetch; otherwise fetch must be NULL */
} ddp_loader_desc;

/* The samples that ddp_loader_next returns, in host memory of the loader. At the end of an epoch, and after
   a failed fetch or a timeout, count is 0 and all pointers are NULL. */
typedef struct ddp_batch {
    int64_t count;                        /* samples; fewer in the last batch of an epoch */
    ddp_tensor fields[DDP_LOADER_FIELDS]; /* shape {count, then a sample's} */
    const int64_t *indices;               /* of the samples in the dataset */
    const uint8_t *is_padding;            /* 1 = a repetition that only gives all ranks the same length */
} ddp_batch;

/* Measurements of a loader since its creation: see ddp_loader_get_stats. */
typedef struct ddp_loader_stats {
    uint64_t batches, samples; /* returned by ddp_loader_next, with padding, without empty batches */
    double wait_seconds;  /* inside ddp_loader_next, for batches that were not ready; 0 without workers */
    double fetch_seconds; /* inside fetch, summed over threads; also for samples that were discarded */
} ddp_loader_stats;

/* Creates a loader at the start of epoch 0. Fetching begins with the first next, set_epoch, seek or load.
   Copies the desc, including the array desc->fields. Workers make no calls on the group, which must exist
   until ddp_loader_destroy has returned. Ownership: free *out with ddp_loader_destroy. Errors:
   DDP_ERR_INVALID names the field; DDP_ERR_NO_MEMORY; DDP_ERR_SYSTEM when a thread cannot be started. */
DDPDEF ddp_result ddp_loader_create(ddp_loader **out, const ddp_loader_desc *desc);

/* Moves to the start of an epoch, as ddp_sampler_set_epoch does; the same rules hold before an epoch and
   after a load. Allowed at any time. */
DDPDEF ddp_result ddp_loader_set_epoch(ddp_loader *loader, uint64_t epoch);
/* Number of batches that ddp_loader_next still returns in this epoch: each one makes it smaller by 1. 0 for
   NULL. */
DDPDEF int64_t ddp_loader_length(const ddp_loader *loader);

/* Waits for the next batch, at most timeout_ms. At the end of the epoch out->count is 0, and stays 0 until a
   set_epoch, seek or load. Errors: the result of fetch for the first sample of the batch that could not be
   fetched, with the error line "sample 123: " and the text of fetch; DDP_ERR_TIMEOUT names the sample of a
   fetch that blocks. The position does not move: the next call fetches the batch again, or waits again. */
DDPDEF ddp_result ddp_loader_next(ddp_loader *loader, ddp_batch *out);

/* Moves to batch number `batch` of the epoch, from 0 to the number of batches; at the latter the epoch ends.
   Number 0 is the first batch of the epoch, or after a load the one at the loaded position. Batches that
   were fetched ahead are discarded. */
DDPDEF ddp_result ddp_loader_seek(ddp_loader *loader, int64_t batch);

/* Stores the consumer's position, as ddp_sampler_save does and with its errors. The batches that
   ddp_loader_next has returned are used, those fetched ahead are not. Ranks store the same state after the
   same number of full batches, and after ddp_loader_next has returned count 0 on all. */
DDPDEF ddp_result ddp_loader_save(const ddp_loader *loader, ddp_sampler_state *state);
/* Continues at a saved position, as ddp_sampler_load does and with its errors. num_replicas, rank and
   batch_size may differ from those of the loader that saved. The first batch begins at the position. The
   epoch is set already: do not call ddp_loader_set_epoch for it. */
DDPDEF ddp_result ddp_loader_load(ddp_loader *loader, const ddp_sampler_state *state);
/* Stores the measurements of the loader in *stats. */
DDPDEF ddp_result ddp_loader_get_stats(const ddp_loader *loader, ddp_loader_stats *stats);

/* Ends the workers and frees the loader with all its batches. Copies from them must have ended. Waits for
   running fetches, at most timeout_ms, and at most one second if the last ddp_loader_next timed out. A fetch
   that blocks longer keeps its thread, and the memory that it writes to. The last such thread frees the
   memory when its fetch returns: until then fetch_user, and free_fn with its user, must stay usable. NULL is
   ignored. */
DDPDEF void ddp_loader_destroy(ddp_loader *loader);

//== timeline ===================================================================================== >>trace
/* Records when the calls of a group begin and end, and writes a timeline of all ranks for Perfetto
   (ui.perfetto.dev) and chrome://tracing. It shows waits for a slow rank, and buckets that overlap with
   backward:

       rank 0   caller          forward | backward                     | wait |
                communication             | all_reduce | all_reduce | all_reduce |
                messages        | send |

   Recording adds about 0.1 us to a call. On a device the times are those of the host: when it puts the call
   on the stream. */

/* Starts recording: the collectives and messages of this group, the waits for them, and the spans of
   ddp_trace_span. Each rank keeps its newest event_count events, of 80 bytes; 0 = 65536. Splits are recorded
   separately. Not collective: a rank that does not record contributes no events. ddp_group_destroy frees the
   memory. Errors: DDP_ERR_INVALID (recording already, or a negative event_count); DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_trace_start(ddp_group *group, int64_t event_count);

/* Adds work of the caller, such as "forward", from `start` (a result of ddp_now) to now. name is
   copied; longer than 31 bytes it is cut. Does nothing if the group does not record. Not collective. */
DDPDEF void ddp_trace_span(ddp_group *group, const char *name, double start);

/* Writes the events of all ranks as JSON to the file `path`, and deletes them. Recording continues. Only
   rank 0 reads path and writes; an existing file is replaced. Ranks of one machine share a clock; the clocks
   of several machines are aligned at the start of this call. Collective, blocks. Errors, on every rank;
   the events are kept: DDP_ERR_INVALID (path is NULL); DDP_ERR_SYSTEM (the file). */
DDPDEF ddp_result ddp_trace_write(ddp_group *group, const char *path);

//== backends and devices ============================================================================== >>spi
/* The interface for backends, devices and sibling headers. A program that only trains does not need it. */

/* The kinds of calls that the core passes to a backend. */
typedef enum ddp_call_kind {
    DDP_CALL_ALL_REDUCE,
    DDP_CALL_REDUCE,
    DDP_CALL_BROADCAST,
    DDP_CALL_ALL_GATHER,
    DDP_CALL_REDUCE_SCATTER,
    DDP_CALL_ALL_TO_ALL,
    DDP_CALL_GATHER,
    DDP_CALL_SCATTER,
    DDP_CALL_ALL_GATHER_V,
    DDP_CALL_ALL_TO_ALL_V,
    DDP_CALL_BARRIER,
    DDP_CALL_SEND,
    DDP_CALL_RECV
} ddp_call_kind;

/* A call that the core passes to a backend. Counts and offsets are elements. All arguments are valid. */
typedef struct ddp_call {
    ddp_call_kind kind; /* which call */
    ddp_dtype dtype;    /* of the elements */
    ddp_op op;          /* of a reduction */
    int root;           /* SEND, RECV: the peer. -1 for calls without a root */
    int tag;            /* SEND, RECV: the tag */
    int flags;          /* DDP_CALL_HOST_MEMORY */
    const void *send;   /* as in the public call; NULL if it has none */
    void *recv;         /* as in the public call; NULL if it has none */
    size_t count;       /* the count argument of the public call */
    const size_t *send_counts, *send_offsets, *recv_counts, *recv_offsets; /* _v calls: W entries each, never
                                                                              NULL where the call uses them */
    uint64_t divisor; /* AVG: divides the sum; 0 = world_size */
    uint64_t seq;     /* number of this collective in its group */
    int caller;       /* the ddp_public_call that made this call inside it; set by ddp.h */
} ddp_call;

/* ddp_call.flags: a blocking collective with buffers in host memory, whatever the device is. */
#define DDP_CALL_HOST_MEMORY 1

/* A backend transports bytes. `state` is the value that open or split returned. A function that fails sets
   the error line with ddp_fail.

   Threads: the core makes one call of a group at a time. Exceptions: the p2p functions may run at the same
   time as run, and poison at any time.

   A backend with `enqueues` only puts work on the device's communication stream. Its calls, messages
   included, run on the calling thread, after the work that the compute stream holds. ddp_wait makes the
   compute stream wait, and never the host. The backend itself detects work that fails or exceeds the timeout
   later, and poisons the group. */
struct ddp_backend {
    const char *name; /* appears in errors */
    /* Collective over the world. The group has its rank and size already. */
    ddp_result (*open)(ddp_group *group, void **state);
    /* Executes one collective on the calling thread and returns when it is complete. */
    ddp_result (*run)(ddp_group *group, void *state, const ddp_call *call);
    /* Starts a send or receive, and does not block. The backend owns *request. */
    ddp_result (*p2p_start)(ddp_group *group, void *state, const ddp_call *call, void **request);
    /* Advances a message until *done is 1 or an error is returned. Does not block. */
    ddp_result (*p2p_poll)(ddp_group *group, void *state, void *request, int *done);
    /* Sleeps until p2p_poll may make progress, at most timeout_ms; 0 = a short moment. NULL = the core yields
       instead. */
    void (*p2p_sleep)(ddp_group *group, void *state, int timeout_ms);
    /* Collective over the parent. Creates the state of child. members: its ranks, as ranks of the parent, in
       order. child NULL: this rank joins no group, or, with member_count > 0, has no memory for it. */
    ddp_result (*split)(ddp_group *parent, void *state, ddp_group *child, const int *members,
                        int member_count, void **child_state);
    /* Group memory. Collective. All ranks agree before and after it: a rank returns its own result, and sets
       *out only on success. If another rank failed, the core passes the memory to free. alloc and free NULL:
       the core allocates memory that is private to each rank. */
    ddp_result (*alloc)(ddp_group *group, void *state, size_t size_bytes, void **out);
    /* Collective. All ranks agree before and after it. */
    ddp_result (*free)(ddp_group *group, void *state, void *memory);
    /* DDP_OK, or the first cause; the error line is the cause without a prefix. */
    ddp_result (*status)(const ddp_group *group, void *state);
    /* Records the first cause and wakes all ranks. */
    void (*poison)(ddp_group *group, void *state, ddp_result cause, const char *text);
    /* Frees the state, and group memory that has not been freed. */
    void (*close)(ddp_group *group, void *state);
    int enqueues;            /* 1 = run returns once the work is on the communication stream */
    ddp_order default_order; /* 0 = tree */
    /* With enqueues: called before (begin 1) and after (begin 0) the messages of a batch. */
    ddp_result (*p2p_batch)(ddp_group *group, void *state, int begin);
    /* See ddp_group_peer. This one and the next two are set, or none. */
    void *(*peer)(ddp_group *group, void *state, const void *memory, int rank);
    /* See ddp_group_signal. */
    void (*signal)(ddp_group *group, void *state, uint64_t *word, uint64_t value);
    /* See ddp_group_wait_signal. It may run while the ranks that do not wait are inside run. */
    ddp_result (*wait_signal)(ddp_group *group, void *state, const uint64_t *word, uint64_t target);
    /* Ends the p2p_sleep of this rank's threads, or the next one of each. NULL = sleeps are short. */
    void (*p2p_wake)(ddp_group *group, void *state);
};

DDPDEF void ddp_exact_sum_clear(ddp_exact_sum *sum); /* sets it to 0, as memset does */
/* Adds value without rounding. A NaN or an infinity stays in the sum. */
DDPDEF void ddp_exact_sum_add(ddp_exact_sum *sum, double value);
DDPDEF double ddp_exact_sum_value(const ddp_exact_sum *sum); /* rounded once, to nearest even */
/* Gradient clipping. squares: the sum of all squared gradients. *norm is its square root. Returns the factor
   for the gradients: max_norm / norm if the norm is finite and exceeds max_norm, otherwise 1. */
DDPDEF float ddp_clip_factor(const ddp_exact_sum *squares, float max_norm, float *norm);

/* The streams of a device: the caller's own, and two of a group. COPY is for copies between the device and
   pinned memory that overlap with communication. ddp.h does not order it with the others; its users do so by
   events. A device may create it on its first use, or use COMM's stream for it. */
typedef enum ddp_stream_kind { DDP_STREAM_COMPUTE = 0, DDP_STREAM_COMM, DDP_STREAM_COPY } ddp_stream_kind;

/* One copy of a device's copy_many. */
typedef struct ddp_copy_range {
    void *dst;       /* written */
    const void *src; /* read */
    size_t count;    /* elements */
} ddp_copy_range;

/* A device: functions for its memory, streams and arithmetic. All pointers are to memory of this device. The
   table of the CPU is ddp_device_cpu().

   The lists below contain the functions in the order of the table, as X(name, result, arguments). A table of
   your own:
     #define MY_FIELD(name, result, arguments) my_##name,
     static const ddp_device mine = {"mine", 0, DDP_DEVICE_MEMORY(MY_FIELD) DDP_DEVICE_STREAMS(MY_FIELD)
                                     DDP_DEVICE_PINNED(DDP_NULL_FIELD) NULL, NULL}; */
// clang-format off
#define DDP_DEVICE_MEMORY(X)                                                                                 \
    /* allocates zeroed memory, aligned to 64 bytes */                                                       \
    X(alloc, ddp_result, (ddp_group *group, size_t size_bytes, void **out))                                  \
    /* frees memory of alloc */                                                                              \
    X(free, void, (ddp_group *group, void *memory))                                                          \
    /* copies size_bytes */                                                                                  \
    X(copy, void, (void *dst, const void *src, size_t size_bytes))                                           \
    /* sets size_bytes to 0 */                                                                               \
    X(fill_zero, void, (void *dst, size_t size_bytes))                                                       \
    /* converts count elements; floats are rounded to nearest even */                                        \
    X(cast, void, (void *dst, ddp_dtype dst_dtype, const void *src, ddp_dtype src_dtype, size_t count))      \
    /* casts each range, with few launches; equal dtypes keep their bits; no range overlaps another's dst */ \
    X(copy_many, void, (const ddp_copy_range *ranges, int count, ddp_dtype dst_dtype, ddp_dtype src_dtype))  \
    /* dst = left + right; dst may equal left or right */                                                    \
    X(add, void, (void *dst, const void *left, const void *right, size_t count, ddp_dtype dtype))            \
    /* multiplies each tensor by factor */                                                                   \
    X(scale, void, (const ddp_tensor *tensors, int tensor_count, float factor))                              \
    /* divides each tensor by divisor */                                                                     \
    X(divide, void, (const ddp_tensor *tensors, int tensor_count, uint64_t divisor))                         \
    /* adds the squares of each row of tensor i, in pieces of 4096 that add exactly, to sums[i * stride] */  \
    X(sum_squares, void, (ddp_exact_sum *sums, int stride, const ddp_tensor *tensors, int tensor_count))
// clang-format on

/* NULL if every function has completed when it returns, as on the CPU. Otherwise the functions of a device
   run on the stream that the calling thread uses, and copy has completed on return if either side is host
   memory. */
// clang-format off
#define DDP_DEVICE_STREAMS(X)                                                                                \
    /* creates the device's state of a group; parent: of a split, or NULL */                                 \
    X(open, ddp_result, (ddp_group *group, ddp_group *parent, void **state))                                 \
    /* frees that state */                                                                                   \
    X(close, void, (ddp_group *group, void *state))                                                          \
    /* selects the stream of this thread; ddp.h selects the compute stream again afterwards */               \
    X(use_stream, ddp_result, (ddp_group *group, ddp_stream_kind stream))                                    \
    /* the first failure of this thread's calls of the functions that return void, or DDP_OK */              \
    X(check, ddp_result, (ddp_group *group))                                                                 \
    /* creates an event */                                                                                   \
    X(event_create, ddp_result, (ddp_group *group, void **event))                                            \
    /* frees an event */                                                                                     \
    X(event_destroy, void, (ddp_group *group, void *event))                                                  \
    /* marks the end of the work that the stream holds now; a later call moves the mark */                   \
    X(event_record, ddp_result, (ddp_group *group, ddp_stream_kind stream, void *event))                     \
    /* makes the stream, not the host, wait for the mark */                                                  \
    X(event_wait, ddp_result, (ddp_group *group, ddp_stream_kind stream, void *event))                       \
    /* *done = 1 when the device has reached the mark; does not wait */                                      \
    X(event_test, ddp_result, (ddp_group *group, void *event, int *done))
// clang-format on

/* Pinned host memory. NULL = copies from any host memory are as fast. */
// clang-format off
#define DDP_DEVICE_PINNED(X)                                                                                 \
    /* allocates pinned memory */                                                                            \
    X(alloc_pinned, ddp_result, (ddp_group *group, size_t size_bytes, void **out))                           \
    /* frees memory of alloc_pinned; may run on any thread, also after the group is gone */                  \
    X(free_pinned, void, (void *memory))                                                                     \
    /* returns at once; the host side is memory of alloc_pinned, in use until the stream has copied */       \
    X(copy_async, void, (void *dst, const void *src, size_t size_bytes))
// clang-format on

/* All functions of a device, in the order of the table. */
#define DDP_DEVICE_FUNCTIONS(X) DDP_DEVICE_MEMORY(X) DDP_DEVICE_STREAMS(X) DDP_DEVICE_PINNED(X)
/* For a list of functions that a device lacks. */
#define DDP_NULL_FIELD(name, result, arguments) NULL,

// clang-format off
/* See DDP_DEVICE_MEMORY, DDP_DEVICE_STREAMS and DDP_DEVICE_PINNED for the functions. */
struct ddp_device {
    const char *name; /* appears in errors */
    int host_memory; /* 1 = the CPU reads and writes this device's memory */
#define DDP_X(name, result, arguments) result (*name) arguments;
    DDP_DEVICE_FUNCTIONS(DDP_X)
#undef DDP_X
    // clang-format on
    /* Kernels of ddp_fsdp.h. NULL = it uses its CPU functions if host_memory is 1, and otherwise returns
       DDP_ERR_UNSUPPORTED */
    const struct ddp_optimizer_kernels *optimizer;
    const struct ddp_layer_kernels *layers; /* the same for ddp_tensor.h; two tables, for f32 and f64 */
};

/* The CPU as a device. It has no streams and no pinned memory. */
DDPDEF const ddp_device *ddp_device_cpu(void);

/* Called before functions of a device: selects the compute stream for this thread. group NULL: the CPU. */
DDPDEF ddp_result ddp_device_begin(ddp_group *group);
/* Called after them: returns the first failure of this thread's calls. group NULL: the CPU. */
DDPDEF ddp_result ddp_device_check(ddp_group *group);
/* Blocks the host until the device has reached the event, which is one of the group's device. until 0: a
   failure of the group ends the wait, with its result. Otherwise only the time `until` (see ddp_now) ends it,
   with DDP_ERR_TIMEOUT: the caller is about to free memory, also of a group that has failed. event NULL:
   returns DDP_OK. */
DDPDEF ddp_result ddp_event_wait_host(ddp_group *group, void *event, double until);

enum { DDP_COPY_RANGES = 64 }; /* ranges that a ddp_copy_list collects */
/* Collects copies and casts for copy_many. Zero-initialise it and set device. */
typedef struct ddp_copy_list {
    const ddp_device *device;               /* required; copies the ranges */
    ddp_dtype dst_dtype, src_dtype;         /* of all ranges */
    int range_count;                        /* entries of ranges */
    ddp_copy_range ranges[DDP_COPY_RANGES]; /* those that are not copied yet */
} ddp_copy_list;
/* Adds a range of count elements, which ddp_copy_list_end copies at the latest. A list that is full, or has
   other dtypes, is copied first. Ranges that continue the last one on both sides are joined. */
DDPDEF void ddp_copy_list_add(ddp_copy_list *list, void *dst, ddp_dtype dst_dtype, const void *src,
                              ddp_dtype src_dtype, size_t count);
DDPDEF void ddp_copy_list_end(ddp_copy_list *list); /* copies the rest, and empties the list */

/* Buffers are tensors that are not trained, such as running statistics: ddp_reducer_desc.buffers and
   ddp_fsdp_desc.buffers. Returns DDP_ERR_INVALID for a wrong count, or a tensor that is not filled in.
   needs_data: 0 = data may be NULL. */
DDPDEF ddp_result ddp_buffers_check(const char *call_name, ddp_group *group, const ddp_tensor *buffers,
                                    int buffer_count, int needs_data);
/* Bytes of the message of ddp_buffers_broadcast. 0 with fewer than two buffers that are not empty. */
DDPDEF size_t ddp_buffers_message_bytes(const ddp_tensor *buffers, int buffer_count);
/* Broadcasts the buffers from root, packed into one message. message: memory of the group's device. A single
   buffer is sent as it is, without message. Collective, blocks. */
DDPDEF ddp_result ddp_buffers_broadcast(ddp_group *group, const ddp_tensor *buffers, int buffer_count,
                                        void *message, int root);

/* The group's device: ddp_group_desc.device, or the CPU. */
DDPDEF const ddp_device *ddp_group_device(const ddp_group *group);

/* Returns DDP_OK if a sibling header can compute on the group's device, otherwise DDP_ERR_UNSUPPORTED.
   version: the first field of the device's kernel table for this header, NULL = no table. `call_name`: the
   public call, for the error line. */
DDPDEF ddp_result ddp_check_kernels(const ddp_group *group, const char *call_name, const int *version,
                                    const char *header);

DDPDEF void *ddp_group_device_state(const ddp_group *group); /* set by the device's open; NULL without one */
DDPDEF int ddp_group_device_index(const ddp_group *group);   /* from ddp_launch_desc.devices; -1 = none */
DDPDEF int ddp_group_timeout_ms(const ddp_group *group);     /* ddp_group_desc.timeout_ms, never 0 */
DDPDEF ddp_order ddp_group_order(const ddp_group *group);    /* never DDP_ORDER_DEFAULT */

/* Address, in this process, of another rank's group memory. memory: a pointer into this rank's block; the
   result points to the same offset in the block of `rank`. This rank may read and write there between calls
   that synchronise the ranks. NULL if memory is not group memory, or the other rank's is not mapped here;
   then it is NULL on all ranks. Not collective. */
DDPDEF void *ddp_group_peer(ddp_group *group, const void *memory, int rank);

/* Stores value in this rank's word, after everything that this thread wrote before. Ranks that read each
   other's memory signal each other this way. word: an aligned u64 at the same offset of this group's memory
   on every rank; its values only grow. Not collective. Only where ddp_group_peer is not NULL. */
DDPDEF void ddp_group_signal(ddp_group *group, uint64_t *word, uint64_t value);
/* Blocks until the word of every rank has reached target. Runs in issue order with this rank's collectives
   and returns their errors. Not collective. Only where ddp_group_peer is not NULL. */
DDPDEF ddp_result ddp_group_wait_signal(ddp_group *group, const uint64_t *word, uint64_t target);
DDPDEF const char *ddp_group_name(const ddp_group *group); /* as in errors; valid while the group lives */
/* Passes a notice to log_fn, with the rank and the group's name in front. */
DDPDEF void ddp_group_log(const ddp_group *group, const char *text);
DDPDEF const char *ddp_call_name(ddp_call_kind kind); /* such as "ddp_all_reduce" */

/* Creates a group of the ranks of `control` over another backend, which may communicate over control in its
   open. Read from desc: backend, backend_user (NULL = control), device, order, name, timeout_ms; 0 = as
   control (order: the backend's default). Everything else is control's. Collective. */
DDPDEF ddp_result ddp_group_create_on(ddp_group **out, ddp_group *control, const ddp_group_desc *desc);
DDPDEF void *ddp_group_backend_user(const ddp_group *group); /* ddp_group_desc.backend_user */
/* In open and split: sets the rank within its machine, and the number of ranks there. */
DDPDEF void ddp_group_set_local(ddp_group *group, int local_rank, int local_world_size);

/* Reduces source_count (1 to 65536) arrays of count elements in tree order, for backends that only move
   bytes. dst may be one of the sources. AVG divides by divisor, 0 = source_count. */
DDPDEF void ddp_reduce_tree(void *dst, const void *const *sources, int source_count, size_t count,
                            ddp_dtype dtype, ddp_op op, uint64_t divisor);

/* A collective over host memory, whatever the group's device is. Blocking. send == recv: in place, as in
   NCCL. kind: DDP_CALL_ALL_REDUCE, DDP_CALL_BROADCAST or DDP_CALL_ALL_GATHER. root: -1, except for a
   broadcast. */
DDPDEF ddp_result ddp_host_collective(ddp_group *group, ddp_call_kind kind, const void *send, void *recv,
                                      size_t count, ddp_dtype dtype, ddp_op op, int root);

/* For a backend on top of another group: issues a checked call, unchanged. */
DDPDEF ddp_result ddp_group_call(ddp_group *group, const ddp_call *call, ddp_work *work);
/* For such a backend: fails the group with this cause. text: an error line of this rank, or a cause. */
DDPDEF void ddp_group_poison(ddp_group *group, ddp_result cause, const char *text);
/* DDP_OK, or the result of the first failure; the error line is then the cause. */
DDPDEF ddp_result ddp_group_cause(const ddp_group *group);
/* If group has failed, `to` fails with the same cause, which then names group. */
DDPDEF void ddp_group_pass_on(ddp_group *group, ddp_group *to);

/* 1 in a process that the rank has forked: the group memory and sockets there are the rank's. Calls that
   communicate return DDP_ERR_INVALID. A destroy function must leave everything as it is. */
DDPDEF int ddp_group_is_forked(const ddp_group *group);

/* --- calls of a backend ---
   For backends. The tcp and mpi backends of ddp.h use >>spi as any other backend does. */

/* A range of a buffer. */
typedef struct ddp_bytes {
    size_t begin, size; /* in bytes */
} ddp_bytes;
/* The bytes that `rank` sends to `peer` in a call, as a range of its send buffer (of recv in a broadcast). A
   rank also sends to itself. In _v calls `rank` must be this rank. */
DDPDEF ddp_bytes ddp_call_sends(const ddp_call *call, int rank, int peer);
/* The bytes that `rank` receives from `peer`, as a range of its recv buffer. In _v calls `rank` must be this
   rank. */
DDPDEF ddp_bytes ddp_call_receives(const ddp_call *call, int rank, int peer);
DDPDEF int ddp_call_adds(const ddp_call *call); /* 1 = the data of all ranks is reduced into that range */

/* Bytes of the send buffer of `rank` that other ranks read. Not for _v calls. */
DDPDEF size_t ddp_call_send_size(const ddp_call *call, int rank, int world_size);

/* Packs a call for a comparison between ranks: kind, dtype, op, root and caller into one word, the count into
   the other. */
DDPDEF void ddp_call_pack(const ddp_call *call, uint64_t words[2]);
/* A packed call as text: such as "ddp_all_reduce f32 count=10 sum", or the caller's name. */
DDPDEF void ddp_call_describe(char *out, size_t size, const uint64_t words[2]);
/* Returns DDP_OK, or DDP_ERR_MISMATCH with a line that describes the calls of both ranks. Callers may
   differ. */
DDPDEF ddp_result ddp_call_compare(int rank, const uint64_t words[2], int other,
                                   const uint64_t other_words[2]);
/* Equal on ranks that make the same call with the same number, and, for an all_gather_v, the same counts. */
DDPDEF uint64_t ddp_call_hash(const ddp_call *call, int world_size);

/* States of a rank when a call exceeds the timeout. BEHIND: it responds, but has not made the call. */
enum { DDP_RANK_SILENT, DDP_RANK_BEHIND, DDP_RANK_ARRIVED };
/* For a call that exceeded the timeout. Sets an error line with the ranks that arrived and those that are
   missing, or with the peer of a message. Marks silent ranks as ddp_group_mark_lost does. Returns
   DDP_ERR_TIMEOUT. state: DDP_RANK_... of each rank; for a message only the peer's is read. */
DDPDEF ddp_result ddp_call_timed_out(ddp_group *group, const ddp_call *call, const unsigned char *state);
/* Seconds that this thread has been blocked on a request; 0 = it only polls. */
DDPDEF double ddp_p2p_waited(const void *request);

/* DDP_OK, or the cause of the lowest lost rank of this group: see ddp_group_mark_lost. Reports it again only
   after another rank has been marked. */
DDPDEF ddp_result ddp_group_check_lost(ddp_group *group);
/* All lost ranks of the world, packed into two words that are sent with a failure. */
DDPDEF void ddp_group_get_lost(const ddp_group *group, uint64_t words[2]);
/* Marks the ranks in another rank's words as lost, with this cause. */
DDPDEF void ddp_group_add_lost(ddp_group *group, const uint64_t words[2], ddp_result cause, const char *text);

DDPDEF uint64_t ddp_machine_id(void); /* ranks with the same id can share memory */
/* Returns the largest power of two B that divides world_size and for which every B consecutive ranks, from a
   multiple of B on, are on one machine. The sum over such a block of ranks is a subtree of DDP_ORDER_TREE.
   machines: a number for each rank, equal if two ranks are on the same machine. */
DDPDEF int ddp_machine_block(const uint64_t *machines, int world_size);
DDPDEF uint64_t ddp_unique_id(void); /* a random number that cannot be guessed */

/* Creates a group of the local backend from `count` ranks of `parent` on this machine. ranks: in order; this
   rank is one of them. token: a string that only these ranks use. Collective over them. Allocator, log_fn and
   name are parent's. timeout_ms must be positive. The order is TREE and the device the CPU. Sets *out only on
   success. Call ddp_group_part_of afterwards. */
DDPDEF ddp_result ddp_group_create_local(ddp_group **out, ddp_group *parent, const char *token,
                                         const int *ranks, int count, int timeout_ms);
/* Rank r of `part` is rank ranks[r] of `parent`. Causes of failures name the rank of parent, and both groups
   share the record of lost ranks. */
DDPDEF void ddp_group_part_of(ddp_group *part, ddp_group *parent, const int *ranks);
/* In open and split: gives group the backend of `from`, a group of the same ranks, and frees from. Returns
   the state for open or split to return. */
DDPDEF void *ddp_group_take_over(ddp_group *group, ddp_group *from);

#if defined(DDP_USE_MPI)
/* ddp_group_create for init_method "mpi://". Initialises MPI if the program has not. rank and world_size of
   desc must equal MPI's, unless world_size is 0. */
DDPDEF ddp_result ddp_group_create_mpi(ddp_group **out, const ddp_group_desc *desc);
#endif

/* fn runs repeatedly while a collective of group waits for other ranks, for an engine that needs to be
   polled. */
DDPDEF void ddp_group_on_wait(ddp_group *group, void (*fn)(void *argument), void *argument);
/* fn runs at the start of ddp_group_destroy. */
DDPDEF void ddp_group_on_destroy(ddp_group *group, void (*fn)(ddp_group *group));
/* In open and split: the group gets no communication thread. Its queue advances only inside ddp_wait and
   ddp_test. */
DDPDEF void ddp_group_no_thread(ddp_group *group);

/* Chooses the fastest of several methods by their recent times. Initialize it to zero. */
typedef struct ddp_tuner {
    uint64_t calls, tries; /* of ddp_tuner_pick; of them, those that returned another method */
    double seconds[3];     /* of each method; 0: never tried */
} ddp_tuner;
/* The method to use, 0 to methods - 1: the fastest one, and sometimes another one, to measure it. methods: 2
   or 3. */
DDPDEF int ddp_tuner_pick(ddp_tuner *tuner, int methods);
/* Stores how long a method has taken. */
DDPDEF void ddp_tuner_learn(ddp_tuner *tuner, int method, double seconds);

/* --- errors ---
   For backends, devices and sibling headers. */

/* The public functions that make other public calls inside. An error line names the outermost one, on every
   rank. Peers receive its number with each collective. */
// clang-format off
#define DDP_PUBLIC_CALLS(X)                                                                        \
    X(ddp_group_create) X(ddp_group_from_mpi) X(ddp_group_create_on)                               \
    X(ddp_group_split) X(ddp_group_alloc) X(ddp_group_free) X(ddp_group_destroy)                   \
    X(ddp_mesh_create) X(ddp_mesh_destroy) X(ddp_mean_reduce) X(ddp_trace_write)                   \
    X(ddp_reducer_create) X(ddp_reducer_ready) X(ddp_reducer_wait) X(ddp_reducer_wait_mean)        \
    X(ddp_reducer_sync_buffers)                                                                    \
    X(ddp_reducer_destroy) X(ddp_accumulator_create) X(ddp_accumulator_ready)                      \
    X(ddp_accumulator_destroy) X(ddp_join_step)                                                    \
    X(ddp_loader_create) X(ddp_loader_seek) X(ddp_loader_save) X(ddp_loader_load)                  \
    X(ddp_optimizer_step) X(ddp_optimizer_step_scaled) X(ddp_scaler_unscale)                       \
    X(ddp_fsdp_create) X(ddp_fsdp_predict) X(ddp_fsdp_unshard) X(ddp_fsdp_reshard)                 \
    X(ddp_fsdp_reduce_grads)                                                                       \
    X(ddp_fsdp_zero_grad) X(ddp_fsdp_mean) X(ddp_fsdp_clip_grad_norm) X(ddp_fsdp_step)             \
    X(ddp_fsdp_save) X(ddp_fsdp_save_wait) X(ddp_fsdp_load) X(ddp_fsdp_get_shard)                  \
    X(ddp_fsdp_sync_buffers) X(ddp_fsdp_get_full) X(ddp_fsdp_export) X(ddp_fsdp_destroy)           \
    X(ddp_pipeline_create) X(ddp_pipeline_step) X(ddp_pipeline_evaluate)                           \
    X(ddp_pipeline_get_times) X(ddp_pipeline_clip_grad_norm) X(ddp_pipeline_destroy)               \
    X(ddp_tensor_redistribute) X(ddp_tensor_distribute) X(ddp_tensor_gather)                       \
    X(ddp_tensor_redistribute_mesh)                                                                \
    X(ddp_tp_create) X(ddp_tp_destroy) X(ddp_tp_linear_create) X(ddp_tp_linear_forward)            \
    X(ddp_tp_linear_backward) X(ddp_tp_mlp_create) X(ddp_tp_mlp_forward) X(ddp_tp_mlp_backward)    \
    X(ddp_tp_embedding_create) X(ddp_tp_embedding_forward) X(ddp_tp_cross_entropy)                 \
    X(ddp_tp_layer_norm_create) X(ddp_tp_layer_norm_backward)                                      \
    X(ddp_cuda_pick) X(ddp_cuda_group_create)
/* The numbers of these functions. */
typedef enum ddp_public_call {
    DDP_IN_NO_CALL = 0,
#define DDP_X(name) DDP_IN_##name,
    DDP_PUBLIC_CALLS(DDP_X)
#undef DDP_X
    DDP_PUBLIC_CALL_COUNT /* at most 256 */
} ddp_public_call;
// clang-format on
/* Begins a public function. This thread is in that call until the end of the block. Inside another public
   call it changes nothing. */
#define DDP_PUBLIC_CALL(name) \
    int ddp__outer_call       \
        __attribute__((unused, cleanup(ddp_public_call_end))) = ddp_public_call_begin(DDP_IN_##name)
/* Begins a block that runs a callback of the user. An error line names the calls inside it by their own
   names. */
#define DDP_USER_CALLBACK     \
    int ddp__interrupted_call \
        __attribute__((unused, cleanup(ddp_public_call_end))) = ddp_public_call_begin(DDP_IN_NO_CALL)
DDPDEF int ddp_public_call_begin(int call);         /* returns the call that this thread was in */
DDPDEF void ddp_public_call_end(const int *before); /* this thread is in that call again */
DDPDEF const char *ddp_public_call_of(int call);    /* "ddp_reducer_create"; NULL for DDP_IN_NO_CALL */
/* Returns the name of this thread's outermost public call, or the argument outside of every such call. */
DDPDEF const char *ddp_public_call_name(const char *call_name);

/* Records that `rank` of this group is lost (DDP_ERR_PEER_LOST) or does not respond (DDP_ERR_TIMEOUT).
   text: the cause. Every group that contains it fails with this cause, at its next call or while it waits.
   This concerns all groups that descend from the same handle of the world. Not collective; any thread. */
DDPDEF void ddp_group_mark_lost(ddp_group *group, int rank, ddp_result cause, const char *text);

/* All ranks continue, or all fail with the same first cause.
     own_result   this rank's result before the call; its error line is the text
     hash         of the values that must be equal on all ranks. `description` describes them in at most 300
                  characters. Of two descriptions "name=value name=value" the error line shows the first pair
                  that differs
     call_name    the public call, for the error line
   Collective and blocking. It allocates nothing: it fails on all ranks or on none.
   Every rank returns the same: DDP_OK; the result of the first rank that failed, with its text;
   DDP_ERR_MISMATCH with both descriptions, if no rank failed and hashes differ; or the group's failure. */
DDPDEF ddp_result ddp_agree(ddp_group *group, const char *call_name, ddp_result own_result, uint64_t hash,
                            const char *description);

/* Like ddp_agree, over several groups that have this rank in common, such as the axes of a mesh, or a shard
   group and its replicas. Each group receives the outcome of the ones before it, with its error line. So all
   ranks of a mesh return the same result, and an error line that came from another group names that group.
   Skips NULL and groups of one rank. groups[0] is not NULL. Every rank passes the same number of groups in
   the same order. After a failure of one group it still agrees over the remaining ones, so that their ranks
   do not wait. */
DDPDEF ddp_result ddp_agree_groups(ddp_group *const *groups, int count, const char *call_name,
                                   ddp_result own_result, uint64_t hash, const char *description);

/* Bytes of a description. */
#define DDP_AGREE_TEXT 300
/* Writes entry `index` of a list as text, at most DDP_AGREE_TEXT bytes, and returns its hash. */
typedef uint64_t (*ddp_describe_fn)(const void *list, int index, char *text);

/* Like ddp_agree, for a list that must be equal on all ranks. describe writes entry `index` as text and
   returns its hash. After a mismatch the ranks compare the entries one after the other. The error line
   describes the first one that differs, and *differs, which may be NULL, is its number. An early entry
   contains the count. `own_result` other than DDP_OK: the list is not read. */
DDPDEF ddp_result ddp_agree_list(ddp_group *group, const char *call_name, ddp_result own_result,
                                 const void *list, int count, ddp_describe_fn describe, int *differs);

/* Sets this thread's error line and returns result. */
DDPDEF ddp_result ddp_fail(ddp_result result, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Like ddp_fail, for a failure of a public call: "rank 1/4 ddp_agree group=world: ...". group may be NULL. */
DDPDEF ddp_result ddp_fail_in(ddp_result result, const char *call_name, const ddp_group *group,
                              const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Returns from the calling function with the result of `call`, unless that is DDP_OK. */
#define DDP_TRY(call)                                \
    do {                                             \
        ddp_result ddp__tried = (call);              \
        if (ddp__tried != DDP_OK) return ddp__tried; \
    } while (0)

/* Returns DDP_ERR_INVALID from the calling function unless the condition holds. The remaining arguments are
   the error line, as in ddp_fail_in. */
#define DDP_CHECK(call_name, group, condition, ...)                                           \
    do {                                                                                      \
        if (!(condition)) return ddp_fail_in(DDP_ERR_INVALID, call_name, group, __VA_ARGS__); \
    } while (0)

/* A result with its error line, which outlives later calls and can be sent to other ranks. Zero = DDP_OK. */
typedef struct ddp_saved_error {
    int32_t result; /* ddp_result */
    char text[512]; /* the error line */
} ddp_saved_error;
/* Stores result and this thread's error line, unless saved already has a failure. */
DDPDEF void ddp_error_save(ddp_saved_error *saved, ddp_result result);
/* Sets this thread's error line, and returns the result. */
DDPDEF ddp_result ddp_error_restore(const ddp_saved_error *saved);
/* Begins a block that frees something. At its end this thread's error line is as before, so that a caller can
   free its objects and then read why a call has failed. */
#define DDP_KEEP_ERROR             \
    ddp_saved_error ddp__error_now \
        __attribute__((unused, cleanup(ddp_error_keep_end))) = ddp_error_keep_begin()
DDPDEF ddp_saved_error ddp_error_keep_begin(void);           /* the present error line */
DDPDEF void ddp_error_keep_end(const ddp_saved_error *kept); /* sets that line again */

/* --- helpers ---
   For backends, devices and sibling headers. */

/* The hash of no data. */
#define DDP_HASH_SEED UINT64_C(14695981039346656037)
/* Continues an FNV-1a hash, which starts as DDP_HASH_SEED. */
DDPDEF uint64_t ddp_hash(uint64_t hash, const void *data, size_t size_bytes);

/* The next multiple; SIZE_MAX on overflow. */
DDPDEF size_t ddp_round_up(size_t n, size_t multiple);

DDPDEF int ddp_is_float(ddp_dtype dtype);        /* f32, f64, f16 or bf16 */
DDPDEF ddp_dtype ddp_sum_dtype(ddp_dtype dtype); /* dtype of sums: f32 for f16 and bf16, otherwise dtype */
/* 0 for a tensor without elements or with an invalid shape. */
DDPDEF size_t ddp_tensor_bytes(const ddp_tensor *tensor);
/* The result of ddp_describe_shape. */
typedef struct ddp_shape_text {
    char text[200]; /* with a 0 at its end */
} ddp_shape_text;
/* A dtype and a shape as text: "f32 [2,3]". The text ends with ",...]" if ndim is more than DDP_MAX_NDIM. */
DDPDEF ddp_shape_text ddp_describe_shape(const char *dtype, int ndim, const int64_t *shape);
DDPDEF ddp_tensor ddp_param_grad(const ddp_param *param); /* param->grad with its defaults resolved */
/* Called before `data` is freed. If it is sum->data: waits until its reader has read it, and sets sum->data
   to NULL. */
DDPDEF void ddp_grad_sum_release(ddp_grad_sum *sum, const void *data);
/* A gradient in memory, and the byte offset of its sum in a buffer of sums. */
typedef struct ddp_grad_place {
    uintptr_t address; /* of the gradient; may be 0 */
    int index;         /* of the parameter */
    ddp_dtype dtype;   /* of the gradient */
    size_t count;      /* elements */
    size_t sum_at;     /* set by ddp_place_sums */
} ddp_grad_place;
/* Sorts the places by address, sets the offsets, and returns the bytes of a buffer. Sums have ddp_sum_dtype.
   Gradients that are adjacent in memory get adjacent sums, with the same distances in elements: a reducer
   then reduces them as one range. */
DDPDEF size_t ddp_place_sums(ddp_grad_place *places, int count);

/* Bytes that ddp_host_alloc allocates in addition to its size_bytes. */
#define DDP_MALLOC_EXTRA (64 + sizeof(void *))
/* Allocates zeroed memory, 64-byte aligned, with the group's alloc_fn; group NULL: with malloc. Returns NULL
   and sets the error line on failure. */
DDPDEF void *ddp_host_alloc(ddp_group *group, size_t size_bytes);
/* Frees memory of ddp_host_alloc, with the same group. NULL is ignored. */
DDPDEF void ddp_host_free(ddp_group *group, void *memory);

/* A task: see ddp_group_enqueue. */
typedef ddp_result (*ddp_task_fn)(ddp_group *group, void *argument);
/* Issues a task: fn(group, argument) runs in issue order with the group's collectives, on its communication
   thread and communication stream. Blocking calls inside fn run in place. The reducer and similar layers
   overlap a sequence of calls with compute this way. A backend with `enqueues` runs fn on the calling thread,
   at once. */
DDPDEF ddp_result ddp_group_enqueue(ddp_group *group, ddp_task_fn fn, void *argument, ddp_work *work);

DDPDEF double ddp_now(void); /* a monotonic clock in seconds */

#ifdef __cplusplus
}
#endif
#endif /* DDP_H */

/* Compiler options that the implementations of this header and its siblings do not support. There is one
   #error, and the implementations are left out, so that no other error follows. A plain include is not
   affected. */
#if !defined(DDP__REFUSED)                                                            \
    && (defined(DDP_IMPLEMENTATION) || defined(DDP_FSDP_IMPLEMENTATION)               \
        || defined(DDP_PIPELINE_IMPLEMENTATION) || defined(DDP_TENSOR_IMPLEMENTATION) \
        || defined(DDP_CUDA_IMPLEMENTATION))
#if defined(__GLIBC__) && !defined(__USE_MISC)
#define DDP__STRICT_C
#elif !defined(__GLIBC__) && defined(__STRICT_ANSI__) && !defined(_DEFAULT_SOURCE) && !defined(_GNU_SOURCE)
#define DDP__STRICT_C
#endif
#if defined(__FAST_MATH__) && !defined(DDP_ALLOW_FAST_MATH)
#define DDP__REFUSED
#error "-ffast-math and -Ofast change bits: compile this file without them, or define DDP_ALLOW_FAST_MATH"
#elif defined(DDP__STRICT_C)
#define DDP__REFUSED
#error "-std=c11 hides what ddp.h needs: use -std=gnu11, or define _DEFAULT_SOURCE before the first #include"
#endif
#if defined(DDP__REFUSED)
#define DDP_IMPLEMENTATION_INCLUDED
#define DDP_FSDP_IMPLEMENTATION_INCLUDED
#define DDP_PIPELINE_IMPLEMENTATION_INCLUDED
#define DDP_TENSOR_IMPLEMENTATION_INCLUDED
#define DDP_CUDA_IMPLEMENTATION_INCLUDED
#endif
#endif

#if defined(DDP_IMPLEMENTATION) && !defined(DDP_IMPLEMENTATION_INCLUDED)
#define DDP_IMPLEMENTATION_INCLUDED

//== structs ================================================================================== >>impl-structs
/* Includes and private types: the memory that all ranks of a machine share, then the objects of one rank. */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <ifaddrs.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__F16C__) && !defined(__CUDACC__)
#include <immintrin.h>
#define DDP__HAVE_F16C 1
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__cplusplus)
#define DDP__THREAD_LOCAL thread_local
#define DDP__RESTRICT __restrict__
#define DDP__NOEXCEPT noexcept
extern "C" {
#else
#define DDP__THREAD_LOCAL _Thread_local
#define DDP__RESTRICT restrict
#define DDP__NOEXCEPT
#endif

/* All accesses to memory that ranks share use these. */
#define ddp__load(pointer) __atomic_load_n(pointer, __ATOMIC_ACQUIRE)
#define ddp__load_relaxed(pointer) __atomic_load_n(pointer, __ATOMIC_RELAXED)
#define ddp__store(pointer, value) __atomic_store_n(pointer, value, __ATOMIC_RELEASE)
#define ddp__fetch_add(pointer, value) __atomic_fetch_add(pointer, value, __ATOMIC_SEQ_CST)

#define DDP__TEXT_MAX 512 /* bytes of an error line */
#define DDP__LINE 128     /* two cache lines, because the CPU prefetches neighbours in pairs */
#define DDP__OWN_LINE __attribute__((aligned(DDP__LINE))) /* this member starts a new cache line */
#define DDP__ALIGN 64
/* Added between the buffers of ranks. Buffers at distances of a power of two evict each other (cache way
   prediction). */
#define DDP__SKEW 69632

/* Bytes of a slot: the data in flight per rank and round. 256 to 768 KiB are equally fast, other sizes are
   slower. */
#define DDP__CHUNK (512 * 1024)
#define DDP__SLOTS 3       /* rounds in flight: one is filled, one reduced, one drained */
#define DDP__PAYLOAD 16384 /* bytes of a small message, which travels with the announcement */

/* --- shared by all ranks of a job, in the heap --- */

#ifndef DDP__P2P_SLICE_MS
/* The longest sleep in a wait for messages. Between sleeps the thread looks for lost ranks. A thread that
   completes a message wakes the waiting ones. */
#define DDP__P2P_SLICE_MS 5
#endif
/* The words of the wait that a rank publishes (ddp__publish_wait): signature + 1 of the call, 0 = no wait;
   count and seq of the call; name of the group (4 words); time of the update in ns; job rank of the peer,
   plus 1. */
enum { DDP__WAIT_NAME = 3, DDP__WAIT_TIME = 7, DDP__WAIT_PEER, DDP__WAIT_WORDS };
enum { DDP__RESPONSIVE, DDP__UNRESPONSIVE_SOON, DDP__UNRESPONSIVE };
enum { DDP__RANK_ABSENT = 0, DDP__RANK_ALIVE, DDP__RANK_LEFT, DDP__RANK_LOST };

typedef struct ddp__job_rank {
    uint32_t state;
    int32_t pid, signal_number, exit_status;
    int32_t result;           /* of its ddp_rank_fn */
    uint64_t start_time;      /* of the process; a later process with the same pid has another one */
    char text[DDP__TEXT_MAX]; /* its error line, when result is not 0 */
    uint64_t wait[DDP__WAIT_WORDS];
    uint32_t unresponsive;   /* DDP__UNRESPONSIVE: a group timed out because of it; all its groups fail */
    int32_t unresponsive_ms; /* the timeout of that group, and its name */
    char unresponsive_in[32];
} ddp__job_rank;

typedef struct ddp__job {
    uint32_t world_size;
    uint64_t next_offset; /* next unused heap offset. Offsets are never reused; freed pages are */
    uint64_t limit;       /* size of the file */
    char folder[16];      /* folder of the unlinked file; "" = a memfd */
    uint32_t reserves;    /* 1 = control memory gets its pages at once, not at the first access */
    uint32_t launched;    /* 1 = a parent process monitors the ranks and records their exit */
    uint32_t cores;
    /* 1 = caches as on AMD, see ddp__own_lines. The size of chunks depends on it, so all ranks use this one
       value, even a rank that runs in an emulator. */
    uint32_t is_amd;
    uint32_t failed_rank_plus_1; /* the first rank that returned an error */
    uint32_t cause_rank_plus_1;  /* the first one with another error than DDP_ERR_POISONED */
    uint64_t world;              /* heap offset of the world's control memory */
    ddp__job_rank rank[DDP_MAX_LOCAL_RANKS];
} ddp__job;

/* A rank's announcement of its next collective, in one cache line: the call, the addresses of its buffers,
   and up to 24 bytes of data. */
typedef struct ddp__post {
    DDP__OWN_LINE uint64_t seq; /* stored last: when it has the value, the other fields are valid */
    uint64_t words[2];          /* kind, dtype, op and root in one word, see ddp__signature; count */
    uint64_t send, recv;        /* addresses of ddp__shared_address */
    unsigned char data[24];
} ddp__post;

typedef struct ddp__sleeper {
    DDP__OWN_LINE uint32_t word; /* futex */
    uint32_t sleeping;           /* number of threads */
    int32_t waits_for;           /* rank */
} ddp__sleeper;

/* Counters of a rank. FILLED: rounds that it has written into its slot. FINISHED: rounds in which it has
   finished with the slots of all ranks. */
enum { DDP__FILLED, DDP__FINISHED };
typedef struct ddp__round_counter {
    DDP__OWN_LINE uint64_t rounds;
} ddp__round_counter;

typedef struct ddp__rank_state {
    ddp__round_counter count[2];
    ddp__sleeper collective, p2p;
    DDP__OWN_LINE uint32_t left; /* 1 = the rank has destroyed its handle */
    uint32_t peer_accesses;      /* number of its threads that access buffers of other ranks */
    /* An address in this rank's process, and the value there. Peers read it to test process_vm_readv: in
       their pid namespace the pid may be another process. */
    uint64_t probe, probe_word;
} ddp__rank_state;

typedef struct ddp__control {
    DDP__OWN_LINE uint32_t sleepers; /* number of ranks that sleep in a collective; read after every post */
    DDP__OWN_LINE uint32_t poison;   /* 0 = healthy, 1 = the failure is being written, 2 = failed */
    int32_t poison_code;
    char poison_text[DDP__TEXT_MAX];
    uint32_t closed; /* handles destroyed; the last one frees the memory */
} ddp__control;

/* --- private to one rank --- */

/* The anonymous file with all shared memory of a job. Ranks that are threads share this object; processes
   have one each. */
typedef struct ddp__heap {
    int fd;
    int threads; /* 1 = ranks are threads: a pointer is valid on all ranks */
    int references;
    pthread_mutex_t lock;
    struct ddp__region *mappings;
    ddp__job *job;
} ddp__heap;

/* A range of the heap, mapped at base. In group memory the part of rank r starts at base + r * stride. */
typedef struct ddp__region {
    unsigned char *base;
    uint64_t offset;
    size_t stride, total;
    unsigned char *own_part; /* this rank's part */
    const struct ddp__local *owner;
    int references; /* of a mapping: number of ddp__heap_map calls that returned it */
    struct ddp__region *next;
} ddp__region;

/* The handle of an issued call or task. After the struct: 4 * world_size numbers, the copies of the counts
   and offsets of a _v call. */
typedef struct ddp__op {
    ddp_call call;
    ddp_task_fn task; /* NULL: a send or receive that the backend starts */
    void *argument;   /* of task */
    void *request;    /* the backend's, of a started send or receive */
    int polling;      /* 1 = a thread is inside the backend's p2p_poll */
    double start;     /* of a send or receive, while the group records a timeline */
    int done;
    /* 1 = event is used: first it marks the preceding work of the compute stream, then the end of this op on
       the communication stream. */
    int has_event;
    uint64_t ticket; /* compared with ddp_work.ticket; 0 = free */
    struct ddp__op *next;
    /* The following fields survive a reuse of the handle. */
    ddp_group *group;
    struct ddp__op *next_allocated; /* list of all handles of the group */
    void *event;                    /* the device's, if it has streams */
    ddp_saved_error outcome;
} ddp__op;

/* One rank's entry in ddp_agree's exchange. ddp_group_split uses the same memory for the colors and keys of
   all ranks and for the members. */
typedef struct ddp__agree_entry {
    int32_t result, reserved;
    uint64_t hash;
} ddp__agree_entry;

/* An event of the timeline. */
typedef struct ddp__trace_event {
    double start, end; /* seconds of ddp_now */
    uint64_t count, seq;
    int32_t kind, dtype, peer; /* ddp_call_kind, or -1: a span or a wait; peer: of a message */
    int32_t row;               /* ddp__trace_row */
    char name[32];
} ddp__trace_event;
enum ddp__trace_row { DDP__TRACE_CALLER, DDP__TRACE_COMMUNICATION, DDP__TRACE_MESSAGES, DDP__TRACE_ROWS };

/* A ring with the newest events of this rank. */
typedef struct ddp__trace {
    pthread_mutex_t lock;
    uint64_t capacity, next; /* next: number of events since the last ddp_trace_write */
    double start;            /* time of ddp_trace_start */
    int is_writing;          /* 1 = inside ddp_trace_write: nothing is recorded */
    ddp__trace_event *event; /* follows the struct; event number n is at n % capacity */
} ddp__trace;

/* Memory of ddp_group_alloc. number: the same on every rank. */
typedef struct ddp__allocation {
    void *memory;
    uint64_t number;
    struct ddp__allocation *next;
} ddp__allocation;

/* The ranks of a world that were found lost or unresponsive. All groups that descend from one handle of the
   world share this record, whatever their backends are. */
enum { DDP__LOST_CAUSES = 4 };
typedef struct ddp__lost_ranks {
    pthread_mutex_t lock;
    int references, world_size;
    uint32_t mark_count;
    ddp_saved_error cause[DDP__LOST_CAUSES]; /* when all are in use, later ranks share the last one */
    unsigned char *cause_of; /* per rank: index of its cause + 1, or 0; stored after this struct */
} ddp__lost_ranks;

struct ddp_group {
    ddp_group_desc desc; /* defaults resolved */
    char name[32];
    int rank, world_size, local_rank, local_world_size;
    const ddp_backend *backend;
    const ddp_device *device;
    void *state, *device_state; /* of the backend; of the device */
    int device_index;
    int attempt;                /* see ddp_group_attempt */
    const int *in_rank_process; /* 1; 0 in a process that the rank has forked (a page that fork clears) */
    void (*wait_fn)(void *argument);      /* from ddp_group_on_wait, or NULL */
    void *wait_argument;                  /* of wait_fn */
    void (*destroy_fn)(ddp_group *group); /* from ddp_group_on_destroy, or NULL */
    ddp__allocation *allocations;         /* group memory */
    uint64_t allocation_count;
    ddp__trace *trace; /* NULL: no timeline is recorded */

    /* Failures */
    ddp__agree_entry *agree_entries; /* world_size entries, stored after this struct */
    ddp__lost_ranks *lost;
    int *world_rank;         /* per rank; stored after agree_entries */
    uint32_t lost_mark_seen; /* lost->mark_count at the last ddp_group_check_lost */
    /* 1 = a call has failed because of the group's failure; 1 = a caller has received its code. */
    int cause_seen, cause_delivered;

    /* The queue of calls, >>impl-queue */
    uint64_t seq, p2p_seq, last_ticket; /* numbers of the last collective, message and handle */
    pthread_mutex_t lock;
    pthread_cond_t work_cond, done_cond; /* there is work for the communication thread; an op is done */
    pthread_t thread, runner;            /* runner: executes a call or task while running is 1 */
    int running;
    int on_comm_thread; /* 1 = that call runs on the communication thread */
    int needs_queue;    /* 1 = blocking calls must look at the queue */
    int no_thread;      /* 1 = no communication thread: ddp_wait and ddp_test advance the queue */
    int thread_started;
    ddp__op thread_end; /* when done is set, the communication thread returns */
    int p2p_waiters;    /* threads that sleep in ddp__p2p_wait */
    int in_batch;       /* 1 = between ddp_p2p_begin and ddp_p2p_end */
    ddp__op *head, *tail, *batch, *batch_tail;
    ddp__op *pending_p2p; /* asynchronous sends and receives */
    ddp__op *free_ops, *all_ops;
};

//== errors ===================================================================================== >>impl-error
/* Error lines, results and the descriptions of calls in them. A failure has a first cause, recorded once per
   group. The error line of a call names this rank, the call and that cause. */

static DDP__THREAD_LOCAL char ddp__error_text[DDP__TEXT_MAX];
static DDP__THREAD_LOCAL int ddp__public_call; /* the outermost public call of this thread */
/* Set while this thread polls the messages of this group one by one, after it has advanced all of them;
   otherwise NULL. Polls of another group inside a poll are not affected. */
static DDP__THREAD_LOCAL const ddp_group *ddp__polling_all_of;
/* The group that this thread is the communication thread of; otherwise NULL. */
static DDP__THREAD_LOCAL const ddp_group *ddp__comm_thread_of;
/* The request that this thread waits for, or NULL; and the start of that wait. */
static DDP__THREAD_LOCAL const void *ddp__waited_request;
static DDP__THREAD_LOCAL double ddp__waited_since;
/* ddp_call.flags of a send or receive without ddp_work: a thread waits for it, now or at the end of its
   batch. */
#define DDP__CALL_BLOCKS 2

DDPDEF const char *ddp_last_error(void) { return ddp__error_text; }

DDPDEF ddp_result ddp_fail(ddp_result result, const char *format, ...) {
    char text[DDP__TEXT_MAX]; /* an argument may be the old text */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(ddp__error_text, text, sizeof text);
    return result;
}

DDPDEF ddp_result ddp_fail_in(ddp_result result, const char *call_name, const ddp_group *group,
                              const char *format, ...) {
    char text[DDP__TEXT_MAX];
    va_list args;
    call_name = ddp_public_call_name(call_name);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!group) return ddp_fail(result, "%s: %s", call_name, text);
    return ddp_fail(result, "rank %d/%d %s group=%s: %s", group->rank, group->world_size, call_name,
                    group->name, text);
}

DDPDEF uint64_t ddp_hash(uint64_t hash, const void *data, size_t size_bytes) {
    const unsigned char *byte = (const unsigned char *)data;
    for (size_t i = 0; i < size_bytes; i++) hash = (hash ^ byte[i]) * UINT64_C(1099511628211);
    return hash;
}

DDPDEF size_t ddp_round_up(size_t n, size_t multiple) {
    return n > SIZE_MAX - (multiple - 1) ? SIZE_MAX : (n + multiple - 1) / multiple * multiple;
}

// clang-format off
static const char *const ddp__public_calls[] = {
    NULL,
#define DDP_X(name) #name,
    DDP_PUBLIC_CALLS(DDP_X)
#undef DDP_X
};
// clang-format on

DDPDEF int ddp_public_call_begin(int call) {
    int before = ddp__public_call;
    if (!before || !call) ddp__public_call = call;
    return before;
}

DDPDEF void ddp_public_call_end(const int *before) { ddp__public_call = *before; }

DDPDEF const char *ddp_public_call_of(int call) {
    return call > 0 && call < DDP_PUBLIC_CALL_COUNT ? ddp__public_calls[call] : NULL;
}

DDPDEF const char *ddp_public_call_name(const char *call_name) {
    return ddp__public_call ? ddp__public_calls[ddp__public_call] : call_name;
}

/* Error lines that begin with the rank. `of` points to any struct with a rank and a world_size. */
#define DDP__RANK_FAIL(of, result, text, ...) \
    ddp_fail(result, "rank %d/%d " text, (of)->rank, (of)->world_size, __VA_ARGS__)
#define DDP__GROUP_FAIL(group, result, text, ...) \
    DDP__RANK_FAIL(group, result, "group=%s: " text, (group)->name, __VA_ARGS__)

/* DDP_ERR_INVALID for an argument of a public call. group may be NULL. */
#define ddp__bad(who, group, ...) ddp_fail_in(DDP_ERR_INVALID, who, group, __VA_ARGS__)

/* A process that the rank has forked shares its memory and sockets. Peers could not distinguish its calls
   from those of the rank. */
static ddp_result ddp__forked(const ddp_group *group, const char *who) {
    return DDP__RANK_FAIL(
        group, DDP_ERR_INVALID,
        "%s group=%s: process %d was forked from the rank and is not part of the group; make the "
        "call in the rank's own process",
        ddp_public_call_name(who), group->name, (int)getpid());
}
#define DDP__NOT_FORKED(group, who)                                                          \
    do {                                                                                     \
        if (__builtin_expect(!*(group)->in_rank_process, 0)) return ddp__forked(group, who); \
    } while (0)

/* DDP_CHECK for the arguments of the enclosing public function. */
#define DDP__NEED(condition, ...) DDP_CHECK(__func__, NULL, condition, __VA_ARGS__)

DDPDEF void ddp_error_save(ddp_saved_error *saved, ddp_result result) {
    if (result == DDP_OK || saved->result != DDP_OK) return;
    saved->result = result;
    memcpy(saved->text, ddp__error_text, sizeof saved->text);
}

DDPDEF ddp_result ddp_error_restore(const ddp_saved_error *saved) {
    return saved->result == DDP_OK ? DDP_OK : ddp_fail((ddp_result)saved->result, "%s", saved->text);
}

DDPDEF ddp_saved_error ddp_error_keep_begin(void) {
    ddp_saved_error kept = {DDP_OK, ""};
    memcpy(kept.text, ddp__error_text, sizeof kept.text);
    return kept;
}

DDPDEF void ddp_error_keep_end(const ddp_saved_error *kept) {
    memcpy(ddp__error_text, kept->text, sizeof kept->text);
}

DDPDEF const char *ddp_result_name(ddp_result result) {
    switch (result) {
// clang-format off
#define DDP_X(name, value, text) case name: return #name;
    DDP_RESULTS(DDP_X)
#undef DDP_X
        // clang-format on
    }
    return "unknown ddp_result";
}

//== calls in error lines ================================================================ >>impl-error-calls
/* The properties of each kind of call, and how an error line describes a call: of this rank, or of a peer
   that announced it by its signature. */

/* Properties of a call. A call moves pieces from rank to rank.
     SPLITS    send contains a piece for each rank      FROM_ROOT, TO_ROOT  only the root sends, receives
     JOINS     recv contains a piece from each rank     NO_SEND, NO_RECV    the call has no such buffer
     ADDS      the received pieces are reduced          COUNTED             arrays of counts give sizes */
enum {
    DDP__FROM_ROOT = 1,
    DDP__TO_ROOT = 2,
    DDP__SPLITS = 4,
    DDP__JOINS = 8,
    DDP__ADDS = 16,
    DDP__NO_SEND = 32,
    DDP__NO_RECV = 64,
    DDP__COUNTED = 128
};

static const struct ddp__call_shape {
    const char *name, *root; /* names of the call and of its root argument */
    int shape;
} ddp__call_shapes[] = {
    {"ddp_all_reduce", NULL, DDP__ADDS},
    {"ddp_reduce", "root", DDP__ADDS | DDP__TO_ROOT},
    {"ddp_broadcast", "root", DDP__FROM_ROOT | DDP__NO_SEND},
    {"ddp_all_gather", NULL, DDP__JOINS},
    {"ddp_reduce_scatter", NULL, DDP__ADDS | DDP__SPLITS},
    {"ddp_all_to_all", NULL, DDP__SPLITS | DDP__JOINS},
    {"ddp_gather", "root", DDP__TO_ROOT | DDP__JOINS},
    {"ddp_scatter", "root", DDP__FROM_ROOT | DDP__SPLITS},
    {"ddp_all_gather_v", NULL, DDP__JOINS | DDP__COUNTED},
    {"ddp_all_to_all_v", NULL, DDP__SPLITS | DDP__JOINS | DDP__COUNTED},
    {"ddp_barrier", NULL, DDP__NO_SEND | DDP__NO_RECV},
    {"ddp_send", "peer", DDP__NO_RECV},
    {"ddp_recv", "peer", DDP__NO_SEND},
};

DDPDEF const char *ddp_call_name(ddp_call_kind kind) { return ddp__call_shapes[kind].name; }

static int ddp__has_op(ddp_call_kind kind) { return ddp__call_shapes[kind].shape & DDP__ADDS; }
static int ddp__is_p2p(ddp_call_kind kind) { return kind == DDP_CALL_SEND || kind == DDP_CALL_RECV; }

/* A call without a root. The caller of this function sets op, flags and the other fields. */
static ddp_call ddp__call_of(ddp_call_kind kind, const void *send, void *recv, size_t count,
                             ddp_dtype dtype) {
    ddp_call call = {kind,  dtype, DDP_OP_SUM, -1,   0,    0, send, recv,
                     count, NULL,  NULL,       NULL, NULL, 0, 0,    DDP_IN_NO_CALL};
    return call;
}

/* call->tag of a collective that ddp.h makes for another purpose. Ranks compare it. */
enum { DDP__TAG_TASK = 1, DDP__TAG_WAIT_SIGNAL };

/* The public call that an error line names: the outermost one. */
static const char *ddp__call_title(const ddp_call *call) {
    static const char *const names[] = {NULL, "ddp_group_enqueue", "ddp_group_wait_signal"};
    const char *name = !ddp__is_p2p(call->kind) && call->tag > 0 && call->tag <= DDP__TAG_WAIT_SIGNAL
                           ? names[call->tag]
                           : NULL;
    if (call->caller) return ddp__public_calls[call->caller];
    return name ? name : ddp_call_name(call->kind);
}

/* A collective is described by two words: this signature, and its count.
       bits     0  kind  8  dtype  16  op  24  tag  32  root + 1  56  caller  63
   Ranks compare all of it except the caller: one rank may start a bucket in ddp_reducer_ready, another one in
   ddp_reducer_wait. */
enum { DDP__CALLER_SHIFT = 56 };
static uint64_t ddp__signature(const ddp_call *call) {
    return (uint64_t)call->kind | (uint64_t)call->dtype << 8
           | (uint64_t)(ddp__has_op(call->kind) ? call->op : 0) << 16
           | (uint64_t)(call->tag | call->flags << 7) << 24
           | (uint64_t)((uint32_t)(call->root + 1) & 0xffffff) << 32
           | (uint64_t)(uint32_t)call->caller << DDP__CALLER_SHIFT;
}

static uint64_t ddp__compared_bits(uint64_t signature) {
    return signature & ((UINT64_C(1) << DDP__CALLER_SHIFT) - 1);
}

static int ddp__same_call(const uint64_t a[2], const uint64_t b[2]) {
    return ddp__compared_bits(a[0] ^ b[0]) == 0 && a[1] == b[1];
}

/* The signature of a send or receive. The tag does not fit into it. */
static uint64_t ddp__p2p_signature(const ddp_call *call) {
    return (uint64_t)call->kind | (uint64_t)call->dtype << 8 | (uint64_t)(uint32_t)(call->root + 1) << 32
           | (uint64_t)(uint32_t)call->caller << DDP__CALLER_SHIFT;
}

/* Restores a call from its signature and count. Returns 0 if the signature is not one of this version,
   because other processes write it. An unknown call becomes a barrier. */
static int ddp__call_unpack(ddp_call *call, const uint64_t words[2]) {
    const unsigned kind = words[0] & 255;
    const unsigned caller = (unsigned)(words[0] >> DDP__CALLER_SHIFT);
    const int known = kind <= DDP_CALL_RECV && caller < DDP_PUBLIC_CALL_COUNT;
    *call = ddp__call_of(known ? (ddp_call_kind)kind : DDP_CALL_BARRIER, NULL, NULL, (size_t)words[1],
                         (ddp_dtype)(words[0] >> 8 & 255));
    call->tag = (int)(words[0] >> 24 & 127);
    call->root = (int)(words[0] >> 32 & 0xffffff) - 1;
    call->caller = known ? (int)caller : DDP_IN_NO_CALL;
    return known;
}

/* In words: "ddp_all_reduce f32 count=10 sum", "ddp_recv f32 count=10 peer=1", "ddp_reducer_create".
   inside: also the collective that this public call makes, "ddp_reducer_create (all_gather u8 count=560)". */
static void ddp__describe(char *out, size_t size, const uint64_t words[2], int inside) {
    static const char *const ops[] = {" sum", " avg", " min", " max", " prod", " unknown op"};
    const unsigned op = words[0] >> 16 & 255;
    char root[32] = "", step[128];
    ddp_call call;
    const int known = ddp__call_unpack(&call, words);
    const unsigned long long count = call.count;
    const char *title = ddp__call_title(&call);
    const char *name = call.caller ? ddp_call_name(call.kind) + strlen("ddp_") : title;
    if (call.root >= 0)
        snprintf(root, sizeof root, " %s=%d", ddp__is_p2p(call.kind) ? "peer" : "root", call.root);
    if (call.kind == DDP_CALL_BARRIER && count && !call.tag)
        snprintf(step, sizeof step, "%s number %llu", name, count);
    else if (call.kind == DDP_CALL_BARRIER)
        snprintf(step, sizeof step, "%s", name);
    else
        snprintf(step, sizeof step, "%s %s count=%llu%s%s", name, ddp_dtype_name(call.dtype), count,
                 !ddp__has_op(call.kind) ? "" : ops[op < 5 ? op : 5], root);
    if (!known)
        snprintf(out, size, "an unknown call");
    else if (!call.caller)
        snprintf(out, size, "%s", step);
    else if (!inside)
        snprintf(out, size, "%s", title);
    else
        snprintf(out, size, "%s (%s)", title, step);
}

/* Sets the error line for the calls of two ranks, the lower rank first. Two different steps of the same
   public call are both named. */
static ddp_result ddp__mismatch(int low, const uint64_t low_words[2], int high,
                                const uint64_t high_words[2]) {
    char text[2][160];
    int inside = low_words[0] >> DDP__CALLER_SHIFT == high_words[0] >> DDP__CALLER_SHIFT;
    ddp__describe(text[0], sizeof text[0], low_words, inside);
    ddp__describe(text[1], sizeof text[1], high_words, inside);
    return ddp_fail(DDP_ERR_MISMATCH, "ranks made different calls: rank %d %s, rank %d %s", low, text[0],
                    high, text[1]);
}

/* "cause: rank 1 in ddp_send tag=4: ", or "cause: rank 1 in ddp_barrier seq=3: ". It begins a recorded cause,
   since other calls and other ranks report it as well. */
#define DDP__CAUSE "cause: "
static void ddp__cause_begin(char *out, size_t size, int rank, const ddp_call *call) {
    const char *title = ddp__call_title(call);
    if (ddp__is_p2p(call->kind))
        snprintf(out, size, DDP__CAUSE "rank %d in %s tag=%d: ", rank, title, call->tag);
    else
        snprintf(out, size, DDP__CAUSE "rank %d in %s seq=%llu: ", rank, title,
                 (unsigned long long)call->seq);
}

/* Inserts the same before a text, for the collective with this signature and count. */
static void ddp__cause_of_collective(char *text, size_t size, int rank, const uint64_t words[2],
                                     uint64_t seq) {
    char begin[96], bare[DDP__TEXT_MAX];
    ddp_call call;
    ddp__call_unpack(&call, words);
    call.seq = seq;
    ddp__cause_begin(begin, sizeof begin, rank, &call);
    snprintf(bare, sizeof bare, "%s", text);
    snprintf(text, size, "%s%.*s", begin, (int)(DDP__TEXT_MAX - sizeof begin), bare);
}

/* Skips the beginning of a cause if it names the call that reports it: this message, or this collective. */
static const char *ddp__cause_here(const ddp_group *group, const ddp_call *call, const char *cause) {
    char own[96];
    int rank = group->rank;
    if (strncmp(cause, DDP__CAUSE "rank ", strlen(DDP__CAUSE "rank ")) != 0) return cause;
    /* the cause may come from any rank of this collective */
    if (!ddp__is_p2p(call->kind)) rank = atoi(cause + strlen(DDP__CAUSE "rank "));
    ddp__cause_begin(own, sizeof own, rank, call);
    return strncmp(cause, own, strlen(own)) == 0 ? cause + strlen(own) : cause;
}

/* Sets the error line of a call of this rank: the rank, the call, then the cause. */
static ddp_result ddp__set_call_error(const ddp_group *group, const ddp_call *call, ddp_result result,
                                      const char *cause) {
    char details[80] = "", seq[32] = "";
    if (call->seq) snprintf(seq, sizeof seq, " seq=%llu", (unsigned long long)call->seq);
    if (call->kind != DDP_CALL_BARRIER && ddp__call_title(call) == ddp_call_name(call->kind))
        snprintf(details, sizeof details, " %s count=%llu", ddp_dtype_name(call->dtype),
                 (unsigned long long)call->count);
    cause = ddp__cause_here(group, call, cause);
    if (ddp__is_p2p(call->kind) && !call->caller)
        snprintf(details + strlen(details), sizeof details - strlen(details), " peer=%d tag=%d", call->root,
                 call->tag);
    /* seq is of the call before it */
    int follows = call->kind == DDP_CALL_BARRIER && call->tag == DDP__TAG_WAIT_SIGNAL;
    return ddp_fail(result, "rank %d/%d %s group=%s%s%s%s: %s", group->rank, group->world_size,
                    ddp__call_title(call), group->name, follows ? " after" : "", seq, details, cause);
}

/* number: the peer's rank in the group that the text is for. */
static void ddp__p2p_timeout_text(const ddp_group *group, const ddp_call *call, int number, char *out,
                                  size_t size) {
    char begin[96];
    ddp__cause_begin(begin, sizeof begin, group->rank, call);
    snprintf(out, size, "%stimed out after %d ms: rank %d did not %s (tag %d)", begin, group->desc.timeout_ms,
             number, call->kind == DDP_CALL_SEND ? "receive" : "send", call->tag);
}

/* Notices of conditions that do not fail but cost speed. */
DDPDEF void ddp_group_log(const ddp_group *group, const char *text) {
    char line[DDP__TEXT_MAX];
    if (!group->desc.log_fn) return;
    snprintf(line, sizeof line, "rank %d/%d group=%s: %s", group->rank, group->world_size, group->name, text);
    DDP_USER_CALLBACK;
    group->desc.log_fn(line, group->desc.user);
}

//== memory, dtypes, time ====================================================================== >>impl-memory
/* Aligned allocation through the group's allocator, sizes and names of dtypes, shapes, and the clock. */

static void *ddp__malloc_default(size_t size_bytes, void *user) {
    (void)user;
    return malloc(size_bytes);
}
static void ddp__free_default(void *memory, void *user) {
    (void)user;
    free(memory);
}

/* The allocator's own pointer is stored directly before the aligned block. */
static void *ddp__aligned_alloc(void *(*alloc_fn)(size_t, void *), void *user, size_t size_bytes) {
    size_t extra = DDP_MALLOC_EXTRA;
    void *raw = size_bytes <= SIZE_MAX - extra ? alloc_fn(size_bytes + extra, user) : NULL;
    if (!raw) return NULL;
    void **aligned = (void **)(((uintptr_t)raw + extra - 1) / DDP__ALIGN * DDP__ALIGN);
    aligned[-1] = raw;
    return aligned;
}

static void ddp__aligned_free(void (*free_fn)(void *, void *), void *user, void *memory) {
    if (memory) free_fn(((void **)memory)[-1], user);
}

DDPDEF void *ddp_host_alloc(ddp_group *group, size_t size_bytes) {
    void *(*alloc_fn)(size_t, void *) = group ? group->desc.alloc_fn : ddp__malloc_default;
    void *user = group ? group->desc.user : NULL;
    void *memory = ddp__aligned_alloc(alloc_fn, user, size_bytes ? size_bytes : 1);
    if (memory)
        memset(memory, 0, size_bytes);
    else if (group)
        DDP__GROUP_FAIL(group, DDP_ERR_NO_MEMORY, "%llu bytes could not be allocated",
                        (unsigned long long)size_bytes);
    else
        ddp_fail(DDP_ERR_NO_MEMORY, "%llu bytes could not be allocated", (unsigned long long)size_bytes);
    return memory;
}

DDPDEF void ddp_host_free(ddp_group *group, void *memory) {
    void *user = group ? group->desc.user : NULL;
    ddp__aligned_free(group ? group->desc.free_fn : ddp__free_default, user, memory);
}

/* Indexed by ddp_dtype. The last entry is for any other value. */
static const struct {
    const char *name;
    size_t size;
} ddp__dtypes[] = {
    {"default", 0}, {"f32", 4}, {"f64", 8}, {"f16", 2}, {"bf16", 2},          {"i8", 1},
    {"u8", 1},      {"i32", 4}, {"i64", 8}, {"u64", 8}, {"unknown dtype", 0},
};
DDPDEF size_t ddp_dtype_size(ddp_dtype dtype) {
    return ddp__dtypes[(unsigned)dtype <= DDP_U64 ? dtype : DDP_U64 + 1].size;
}
DDPDEF const char *ddp_dtype_name(ddp_dtype dtype) {
    return ddp__dtypes[(unsigned)dtype <= DDP_U64 ? dtype : DDP_U64 + 1].name;
}
static int ddp__is_half(ddp_dtype dtype) { return dtype == DDP_F16 || dtype == DDP_BF16; }
DDPDEF int ddp_is_float(ddp_dtype dtype) { return dtype >= DDP_F32 && dtype <= DDP_BF16; }
DDPDEF ddp_dtype ddp_sum_dtype(ddp_dtype dtype) { return ddp__is_half(dtype) ? DDP_F32 : dtype; }

DDPDEF int64_t ddp_tensor_count(const ddp_tensor *tensor) {
    int64_t count = 1;
    if (!tensor || tensor->ndim < 0 || tensor->ndim > DDP_MAX_NDIM) return -1;
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] < 0 || __builtin_mul_overflow(count, tensor->shape[i], &count)) return -1;
    return count;
}

DDPDEF size_t ddp_tensor_bytes(const ddp_tensor *tensor) {
    int64_t count = ddp_tensor_count(tensor);
    return count > 0 ? (size_t)count * ddp_dtype_size(tensor->dtype) : 0;
}

DDPDEF ddp_shape_text ddp_describe_shape(const char *dtype, int ndim, const int64_t *shape) {
    ddp_shape_text out;
    size_t length = (size_t)snprintf(out.text, sizeof out.text, "%s [", dtype);
    for (int d = 0; d < ndim && d < DDP_MAX_NDIM; d++)
        length += (size_t)snprintf(out.text + length, sizeof out.text - length, d ? ",%lld" : "%lld",
                                   (long long)shape[d]);
    snprintf(out.text + length, sizeof out.text - length, "%s]", ndim > DDP_MAX_NDIM ? ",..." : "");
    return out;
}

DDPDEF ddp_tensor ddp_param_grad(const ddp_param *param) {
    ddp_tensor grad = param->grad.ndim ? param->grad : param->value;
    grad.data = param->grad.data;
    grad.dtype = param->grad.dtype != DDP_DTYPE_DEFAULT ? param->grad.dtype : param->value.dtype;
    return grad;
}

DDPDEF void ddp_grad_sum_release(ddp_grad_sum *sum, const void *data) {
    if (sum->data != data) return;
    if (sum->reader) sum->drain(sum->reader);
    sum->data = NULL;
    sum->is_set = 0;
}

static int ddp__grad_place_compare(const void *a, const void *b) {
    const ddp_grad_place *left = (const ddp_grad_place *)a, *right = (const ddp_grad_place *)b;
    if (left->address == right->address) return left->index - right->index;
    return left->address < right->address ? -1 : 1;
}

DDPDEF size_t ddp_place_sums(ddp_grad_place *places, int count) {
    const ddp_grad_place *left = NULL; /* the last one that is not empty */
    size_t end = 0;
    qsort(places, (size_t)count, sizeof *places, ddp__grad_place_compare);
    for (ddp_grad_place *place = places; place < places + count; place++) {
        size_t size = ddp_dtype_size(place->dtype), sum_size = ddp_dtype_size(ddp_sum_dtype(place->dtype));
        place->sum_at = ddp_round_up(end, DDP__ALIGN);
        if (!place->count) continue;
        if (left && left->dtype == place->dtype) {
            size_t distance = place->address - left->address, bytes = left->count * size;
            if (distance >= bytes && distance <= ddp_round_up(bytes, DDP__ALIGN))
                place->sum_at = left->sum_at + distance / size * sum_size;
        }
        end = place->sum_at + place->count * sum_size;
        left = place;
    }
    return ddp_round_up(end, DDP__ALIGN);
}

DDPDEF double ddp_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

//== reduction kernels ========================================================================= >>impl-reduce

/* Element-wise reduction of the arrays of several ranks: sum, product, minimum, maximum. The order is a fixed
   binary tree, so the bits depend only on the number of sources. They do not depend on vector width, block,
   offset, alignment or method. No expression multiplies and then adds, so no compiler can fuse the two. */
/* A block in the dtype of the sum. The working set, at most ten blocks, stays in the first-level cache. */
#define DDP__BLOCK_BYTES 2048
#define DDP__STREAM_BLOCK_BYTES 512 /* short bursts of streaming stores keep reads and writes in flight */
enum {
    DDP__HINT_CACHED = 0,
    DDP__HINT_LARGE,
    DDP__HINT_STREAM
};                                         /* size class of a reduction, see ddp__reduce_tree */
#define DDP__RUN_STEP_BYTES ((size_t)2048) /* bytes of one run before the next run continues */
#if !defined(DDP__MIN_RUN_BYTES)
#define DDP__MIN_RUN_BYTES ((size_t)64 << 10)
#endif

/* Iterations are independent even if an output is also an input: each one reads its element of every input
   before it writes. */
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed" /* a loop full of sanitizer checks may stay scalar */
#define DDP__INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DDP__INDEPENDENT _Pragma("GCC ivdep")
#endif
#if defined(__clang__) || defined(__CUDACC__)
#define DDP__UNROLLED DDP__INDEPENDENT
#else
/* for short statements: up to a third faster at -O2 */
#define DDP__UNROLLED _Pragma("GCC ivdep") _Pragma("GCC unroll 8")
#endif
#define DDP__ALIGNED64 __attribute__((aligned(64)))
#define DDP__FORCED_INLINE static inline __attribute__((always_inline))
#define DDP__MEMORY_BARRIER __asm__ __volatile__("" : : : "memory") /* affects only the compiler */

/* Types for user memory of any declared type and any alignment. */
#define DDP__ANY(type, suffix) typedef type __attribute__((may_alias, aligned(1))) ddp__any_##suffix;
DDP__ANY(float, f32)
DDP__ANY(double, f64)
DDP__ANY(int8_t, i8)
DDP__ANY(uint8_t, u8)
DDP__ANY(uint16_t, u16)
DDP__ANY(int32_t, i32)
DDP__ANY(uint32_t, u32)
DDP__ANY(int64_t, i64)
DDP__ANY(uint64_t, u64)
#undef DDP__ANY

/* Executes statement for each i in 0 ... count * runs - 1. The loop takes DDP__LANES elements of each run in
   turn, because some compilers vectorise only fixed trip counts at -O2. With several runs, count is a
   multiple of DDP__LANES. It is 64, because gcc -O3 unrolls loops of up to 16 trips before it vectorises, and
   then no longer treats their iterations as independent. */
#define DDP__LANES 64
#define DDP__LOOP(how, count, runs, statement)                                     \
    do {                                                                           \
        size_t at_ = 0;                                                            \
        for (; at_ + DDP__LANES <= (count); at_ += DDP__LANES)                     \
            for (size_t from_ = at_; from_ < (count) * (runs); from_ += (count)) { \
                how for (size_t lane_ = 0; lane_ < DDP__LANES; lane_++) {          \
                    size_t i = from_ + lane_;                                      \
                    statement;                                                     \
                }                                                                  \
            }                                                                      \
        DDP__INDEPENDENT                                                           \
        for (size_t i = at_; i < (count); i++) {                                   \
            statement;                                                             \
        }                                                                          \
    } while (0)
#define DDP__FOR_EACH(count, statement) DDP__LOOP(DDP__INDEPENDENT, count, (size_t)1, statement)

/* Executes STEP(type, at) for f32. at(x) is one element of x. With wide it is a cache line of 16 elements,
   and the loop takes one line of each run in turn. Wide needs a CPU that stores whole cache lines at once;
   others transfer a line that two cores write alternately in two halves. 16 KiB take 40% less, 1 MiB takes
   12% less. A function for such CPUs is marked DDP__WIDE and called only if ddp__has_wide_stores(). */
typedef float ddp__any_line __attribute__((vector_size(64), may_alias, aligned(1)));
#define DDP__AT_LINE(x) (*(ddp__any_line *)(void *)((x) + i))
#define DDP__AT_ONE(x) (x)[i]
#define DDP__BY_LINE(wide, count, runs, STEP)                                         \
    do {                                                                              \
        size_t lines_ = (wide) ? (count) / 16 * 16 : 0;                               \
        for (size_t line_ = 0; line_ < lines_; line_ += 16)                           \
            for (size_t i = line_; i < (count) * (runs); i += (count)) {              \
                STEP(ddp__any_line, DDP__AT_LINE)                                     \
            }                                                                         \
        if (!(wide)) DDP__LOOP(DDP__UNROLLED, count, runs, STEP(float, DDP__AT_ONE)); \
        for (size_t i = lines_; (wide) && i < (count); i++) {                         \
            STEP(float, DDP__AT_ONE)                                                  \
        }                                                                             \
    } while (0)
#if defined(__x86_64__) && !defined(DDP__NARROW) /* defined by tests of the narrow loops */
#define DDP__WIDE __attribute__((target("avx512f")))
/* vbmi2: CPUs without it lower their clock for 512-bit instructions. */
static int ddp__has_wide_stores(void) { return __builtin_cpu_supports("avx512vbmi2"); }
#else
#define DDP__WIDE
static int ddp__has_wide_stores(void) { return 0; }
#endif

//== 16-bit floats, casts and division =========================================================== >>impl-half
/* Conversions between f16, bf16 and f32, and the cast, scale and divide functions of the CPU device, which
   use them. They give the same bits with and without F16C. The bits of a number:

             sign   exponent   mantissa   exponent bias
       f32    1        8          23          127
       bf16   1        8           7          127        the upper half of an f32
       f16    1        5          10           15        up to 65504

   The f16 functions contain these exponents. The largest exponent of a dtype marks infinity and NaN:
       112 = 127 - 15   difference of the biases        113 << 23   2^-14 in f32, the smallest normal f16
       224 = 255 - 31   difference of the largest       143 << 23   2^16 in f32, too large for f16 */

DDP__FORCED_INLINE uint32_t ddp__f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
DDP__FORCED_INLINE float ddp__f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
DDP__FORCED_INLINE uint64_t ddp__f64_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
DDP__FORCED_INLINE double ddp__f64_from_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

DDP__FORCED_INLINE float ddp__bf16_to_f32(uint16_t half) { return ddp__f32_from_bits((uint32_t)half << 16); }

/* Rounds to nearest even. A NaN keeps its upper bits and becomes quiet: rounding could make it infinite. */
DDP__FORCED_INLINE uint16_t ddp__f32_to_bf16(float value) {
    uint32_t bits = ddp__f32_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40;
    return (uint16_t)((int32_t)(bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

/* Computes every case and selects one by mask, so that loops vectorise. A subnormal f16 is its integer times
   2^-24. That is a normal f32, so flush-to-zero settings do not change it. */
DDP__FORCED_INLINE float ddp__f16_to_f32(uint16_t half) {
    int32_t magnitude = half & 0x7fff;
    int32_t is_small = -(magnitude < 0x400);
    int32_t is_special = -(magnitude >= 0x7c00);
    int32_t is_nan = -(magnitude > 0x7c00);
    int32_t normal = (magnitude << 13) + ((112 << 23) & ~is_special) + ((224 << 23) & is_special);
    int32_t small = (int32_t)ddp__f32_bits((float)magnitude * (1.0f / 16777216.0f));
    int32_t bits = (small & is_small) | (normal & ~is_small) | (0x400000 & is_nan);
    return ddp__f32_from_bits((uint32_t)bits | (uint32_t)(half & 0x8000) << 16);
}

/* Rounds to nearest even, by masks as well. Below 2^-14 the addition of 0.5 rounds: the last place of 0.5 is
   2^-24, as that of a subnormal f16. */
DDP__FORCED_INLINE uint16_t ddp__f32_to_f16(float value) {
    uint32_t bits = ddp__f32_bits(value);
    int32_t magnitude = (int32_t)(bits & 0x7fffffff);
    int32_t is_small = -(magnitude < 113 << 23);
    int32_t is_special = -(magnitude >= 143 << 23);
    int32_t is_nan = -(magnitude > 255 << 23);
    int32_t normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    int32_t small = (int32_t)(ddp__f32_bits(ddp__f32_from_bits((uint32_t)magnitude) + 0.5f) - 0x3f000000u);
    int32_t special = 0x7c00 | ((0x200 | (magnitude >> 13 & 0x3ff)) & is_nan);
    int32_t half = (small & is_small) | (special & is_special) | (normal & ~is_small & ~is_special);
    return (uint16_t)((uint32_t)half | (bits >> 16 & 0x8000));
}

/* Rounds to odd: an inexact result is cut off towards zero, and its last bit is set. A second rounding, to
   f16 or bf16, then gives the same bits as one rounding of the f64. */
static float ddp__f64_to_f32_odd(double value) {
    float nearest = (float)value;
    if ((double)nearest == value || value != value) return nearest;
    return ddp__f32_from_bits((ddp__f32_bits(nearest) - (fabs((double)nearest) > fabs(value))) | 1);
}

#define DDP__F32_BLOCK (DDP__BLOCK_BYTES / sizeof(float)) /* elements */

/* Converts from any float dtype. odd: an f64 is rounded to odd, because a rounding to 16 bits follows. F16C
   converts 8 elements at a time; the code without it converts the remaining ones. */
static void ddp__load_f32(float *DDP__RESTRICT out, const void *data, ddp_dtype dtype, size_t count,
                          int odd) {
    const ddp__any_u16 *half = (const ddp__any_u16 *)data;
    const ddp__any_f64 *wide = (const ddp__any_f64 *)data;
#if defined(DDP__HAVE_F16C)
    for (; dtype == DDP_F16 && count >= 8; count -= 8, half += 8, out += 8)
        _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)half)));
#endif
    if (dtype == DDP_F16)
        DDP__FOR_EACH(count, out[i] = ddp__f16_to_f32(half[i]));
    else if (dtype == DDP_BF16)
        DDP__FOR_EACH(count, out[i] = ddp__bf16_to_f32(half[i]));
    else if (dtype == DDP_F32)
        memcpy(out, data, count * sizeof *out);
    else if (odd)
        for (size_t i = 0; i < count; i++) out[i] = ddp__f64_to_f32_odd(wide[i]);
    else
        DDP__FOR_EACH(count, out[i] = (float)wide[i]);
}

/* Converts to any float dtype, rounded to nearest even. */
static void ddp__store_f32(void *data, ddp_dtype dtype, const float *DDP__RESTRICT in, size_t count) {
    ddp__any_u16 *half = (ddp__any_u16 *)data;
    ddp__any_f64 *wide = (ddp__any_f64 *)data;
#if defined(DDP__HAVE_F16C)
    for (; dtype == DDP_F16 && count >= 8; count -= 8, in += 8, half += 8)
        _mm_storeu_si128((__m128i *)(void *)half,
                         _mm256_cvtps_ph(_mm256_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT));
#endif
    if (dtype == DDP_F16)
        DDP__FOR_EACH(count, half[i] = ddp__f32_to_f16(in[i]));
    else if (dtype == DDP_BF16)
        DDP__FOR_EACH(count, half[i] = ddp__f32_to_bf16(in[i]));
    else if (dtype == DDP_F32)
        memcpy(data, in, count * sizeof *in);
    else
        DDP__FOR_EACH(count, wide[i] = (double)in[i]);
}

/* --- the CPU device: cast, scale and divide. AVG divides with them after the last addition. --- */

/* Computes x / divisor * factor in place. The divisor or the factor is 1, so this rounds once. If the divisor
   is a power of two, its reciprocal is exact: a multiplication gives the same bits, also of subnormals, and
   is faster. */
#define DDP__SCALE_FN(type, suffix)                                                                      \
    static void ddp__scale_##suffix(ddp__any_##suffix *x, size_t count, uint64_t divisor, type factor) { \
        type d = (type)divisor, r = factor / d;                                                          \
        if (divisor & (divisor - 1))                                                                     \
            DDP__FOR_EACH(count, x[i] = x[i] / d);                                                       \
        else                                                                                             \
            DDP__FOR_EACH(count, x[i] = x[i] * r);                                                       \
    }
DDP__SCALE_FN(float, f32)
DDP__SCALE_FN(double, f64)
#undef DDP__SCALE_FN

/* Converts between float dtypes and scales, in f32. Without scaling it rounds once, to nearest even. A scaled
   result is rounded to f32 and then to dst_dtype. dst and src do not overlap, or are equal and have dtypes of
   the same size. */
static void ddp__convert_via_f32(void *dst, ddp_dtype dst_dtype, const void *src, ddp_dtype src_dtype,
                                 size_t count, uint64_t divisor, float factor) {
    float DDP__ALIGNED64 block[DDP__F32_BLOCK];
    size_t dst_size = ddp_dtype_size(dst_dtype), src_size = ddp_dtype_size(src_dtype);
    unsigned char *out = (unsigned char *)dst;
    const unsigned char *in = (const unsigned char *)src;
    for (size_t n; count; in += n * src_size, out += n * dst_size, count -= n) {
        n = count < DDP__F32_BLOCK ? count : DDP__F32_BLOCK;
        ddp__load_f32(block, in, src_dtype, n, dst_size == 2);
        if (divisor != 1 || factor != 1.0f) ddp__scale_f32(block, n, divisor, factor);
        ddp__store_f32(out, dst_dtype, block, n);
    }
}

static void ddp__cast(void *dst, ddp_dtype dst_dtype, const void *src, ddp_dtype src_dtype, size_t count) {
    if (dst_dtype != src_dtype)
        ddp__convert_via_f32(dst, dst_dtype, src, src_dtype, count, 1, 1.0f);
    else if (count && dst != src)
        memcpy(dst, src, count * ddp_dtype_size(dst_dtype));
}

/* Returns 0 for an integer dtype; data is then unchanged. */
static int ddp__scale_floats(void *data, size_t count, ddp_dtype dtype, uint64_t divisor, float factor) {
    if (dtype == DDP_F32)
        ddp__scale_f32((ddp__any_f32 *)data, count, divisor, factor);
    else if (dtype == DDP_F64)
        ddp__scale_f64((ddp__any_f64 *)data, count, divisor, (double)factor);
    else if (ddp__is_half(dtype))
        ddp__convert_via_f32(data, dtype, data, dtype, count, divisor, factor);
    else
        return 0;
    return 1;
}

static void ddp__scale(void *data, size_t count, ddp_dtype dtype, float factor) {
    ddp__scale_floats(data, count, dtype, 1, factor);
}

/* Truncates towards zero, for any divisor, also above INT64_MAX. Numbers of 32 bits take the faster 32-bit
   division. */
DDP__FORCED_INLINE int64_t ddp__divide_signed(int64_t value, uint64_t divisor) {
    uint64_t magnitude = value < 0 ? UINT64_C(0) - (uint64_t)value : (uint64_t)value;
    uint64_t quotient = (magnitude | divisor) >> 32 ? magnitude / divisor
                                                    : (uint32_t)magnitude / (uint32_t)divisor;
    return (int64_t)(value < 0 ? UINT64_C(0) - quotient : quotient);
}

/* Divides in place. Integers are truncated towards zero. A divisor of 0 counts as 1. */
static void ddp__divide(void *data, size_t count, ddp_dtype dtype, uint64_t divisor) {
    if (divisor <= 1 || ddp__scale_floats(data, count, dtype, divisor, 1.0f)) return;
#define DDP__DIVIDE(type, x) (x)[i] = (type)ddp__divide_signed((int64_t)(x)[i], divisor)
    for (size_t i = 0; i < count; i++)
        if (dtype == DDP_I8)
            DDP__DIVIDE(int8_t, (int8_t *)data);
        else if (dtype == DDP_U8)
            DDP__DIVIDE(uint8_t, (uint8_t *)data);
        else if (dtype == DDP_I32)
            DDP__DIVIDE(int32_t, (ddp__any_i32 *)data);
        else if (dtype == DDP_I64)
            DDP__DIVIDE(int64_t, (ddp__any_i64 *)data);
        else
            ((ddp__any_u64 *)data)[i] /= divisor;
#undef DDP__DIVIDE
}

//== tree reduction ============================================================================== >>impl-tree
/* Reduces arrays in tree order. Collectives call ddp__reduce_tree; backends call ddp_reduce_tree.

     ddp__reduce_tree       splits large data into runs; copies if there is nothing to add
       ddp__reduce_fused    f32 sums of 2 to 4 sources: one loop per number of sources and destinations
         ddp__fused_loop    with and without wide stores, division, streaming stores
       ddp__reduce_run      everything else, in blocks, so that partial sums stay in the first-level cache
         ddp__reduce_block    ddp__merge_OP_DTYPE adds 2 or 4 sources at a time, up the tree
         ddp__divide          AVG
         memcpy, or ddp__copy_stream, to each destination */

/* Reduces one or two levels of the tree in one pass: out[i] = a op b, or, with in_count 4,
   (a op b) op (c op d). out may be any of the inputs. */
typedef void (*ddp__merge_fn)(void *out, const void *const *in, int in_count, size_t count);
#define DDP__MERGE_FN(op, suffix)                                                                          \
    static void ddp__merge_##op##_##suffix(void *out, const void *const *in, int in_count, size_t count) { \
        ddp__any_##suffix *o = (ddp__any_##suffix *)out;                                                   \
        const ddp__any_##suffix *a = (const ddp__any_##suffix *)in[0];                                     \
        const ddp__any_##suffix *b = (const ddp__any_##suffix *)in[1];                                     \
        const ddp__any_##suffix *c = (const ddp__any_##suffix *)in[in_count - 2];                          \
        const ddp__any_##suffix *d = (const ddp__any_##suffix *)in[in_count - 1];                          \
        if (in_count == 2)                                                                                 \
            DDP__LOOP(DDP__UNROLLED, count, (size_t)1, o[i] = ddp__##op##_##suffix(a[i], b[i]));           \
        else                                                                                               \
            DDP__LOOP(DDP__UNROLLED, count, (size_t)1,                                                     \
                      o[i] = ddp__##op##_##suffix(ddp__##op##_##suffix(a[i], b[i]),                        \
                                                  ddp__##op##_##suffix(c[i], d[i])));                      \
    }
#define DDP__MERGE(op, type, suffix, expression)                                                \
    DDP__FORCED_INLINE type ddp__##op##_##suffix(type a, type b) { return (type)(expression); } \
    DDP__MERGE_FN(op, suffix)
#define DDP__SUM_PROD(type, suffix)      \
    DDP__MERGE(sum, type, suffix, a + b) \
    DDP__MERGE(prod, type, suffix, (a) * (b))
#define DDP__MIN_MAX(type, suffix)               \
    DDP__MERGE(min, type, suffix, a < b ? a : b) \
    DDP__MERGE(max, type, suffix, a > b ? a : b)
DDP__SUM_PROD(float, f32)
DDP__SUM_PROD(double, f64)
DDP__SUM_PROD(uint8_t, u8)
DDP__SUM_PROD(uint32_t, u32)
DDP__SUM_PROD(uint64_t, u64)
DDP__MIN_MAX(int8_t, i8)
DDP__MIN_MAX(uint8_t, u8)
DDP__MIN_MAX(int32_t, i32)
DDP__MIN_MAX(int64_t, i64)
DDP__MIN_MAX(uint64_t, u64)

/* Minimum and maximum of IEEE 754-2019: NaN if an operand is NaN, and -0 is less than +0. So the result does
   not depend on the order. If a and b are equal, `one` and `other` are the two values, and their signs are
   combined by or (min) and by and (max). The selections follow each other, because nested ones do not
   vectorise. */
#define DDP__FLOAT_LESS(op, less, join, type, suffix)                                                \
    DDP__FORCED_INLINE type ddp__##op##_##suffix(type a, type b) {                                   \
        type one = a less b ? a : b;                                                                 \
        type other = b less a ? b : a;                                                               \
        one = ddp__##suffix##_from_bits(ddp__##suffix##_bits(one) join ddp__##suffix##_bits(other)); \
        one = b != b ? b : one;                                                                      \
        return a != a ? a : one;                                                                     \
    }                                                                                                \
    DDP__MERGE_FN(op, suffix)
DDP__FLOAT_LESS(min, <, |, float, f32)
DDP__FLOAT_LESS(min, <, |, double, f64)
DDP__FLOAT_LESS(max, >, &, float, f32)
DDP__FLOAT_LESS(max, >, &, double, f64)

/* Integer sums and products wrap, so signed dtypes use the unsigned functions. f16 and bf16 are converted to
   f32 before. */
static ddp__merge_fn ddp__merge_fn_of(ddp_dtype dtype, ddp_op op) {
#define DDP__BY_OP(wrapping, ordered)                                                             \
    {                                                                                             \
        ddp__merge_sum_##wrapping, ddp__merge_sum_##wrapping /* AVG */, ddp__merge_min_##ordered, \
            ddp__merge_max_##ordered, ddp__merge_prod_##wrapping                                  \
    }
    static const ddp__merge_fn by_dtype[][5] = {DDP__BY_OP(f32, f32),
                                                DDP__BY_OP(f64, f64),
                                                DDP__BY_OP(f32, f32) /* F16 */,
                                                DDP__BY_OP(f32, f32) /* BF16 */,
                                                DDP__BY_OP(u8, i8),
                                                DDP__BY_OP(u8, u8),
                                                DDP__BY_OP(u32, i32),
                                                DDP__BY_OP(u64, i64),
                                                DDP__BY_OP(u64, u64)};
    return by_dtype[dtype - DDP_F32][op];
}

static int ddp__cpu_is_amd(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

/* The number of runs through large data, see ddp__reduce_tree. Two runs at a distance of a power of two share
   their cache sets. On Intel three runs take 5% to 10% less time than two, at 64 MiB a quarter less. */
static size_t ddp__run_count(void) { return ddp__cpu_is_amd() ? 2 : 3; }

/* A memcpy for lines that another core has just written. For large sizes memcpy itself uses string
   instructions, which read such lines at half the speed of plain loads. Copies several runs at once, see
   ddp__reduce_tree. */
static void ddp__copy_across(void *dst, const void *src, size_t size_bytes) {
    unsigned char *out = (unsigned char *)dst;
    const unsigned char *in = (const unsigned char *)src;
    size_t runs = size_bytes < DDP__MIN_RUN_BYTES ? 0 : ddp__run_count();
    size_t each = runs ? size_bytes / runs / 64 * 64 : 0;
    for (size_t at = 0; at < each; at += 64)
        for (size_t from = at; from < runs * each; from += each) {
            memcpy(out + from, in + from, 64);
            DDP__MEMORY_BARRIER; /* a loop, not one memcpy */
        }
    memcpy(out + runs * each, in + runs * each, size_bytes - runs * each);
}

/* Streaming stores, which bypass the caches, where the CPU has them. Other cores see the stores before
   ddp__stream_end earlier than any store after it. */
typedef float ddp__any_f32x4 __attribute__((vector_size(16), may_alias, aligned(1)));
#if defined(__SSE2__)
#define DDP__STREAM(out, value) _mm_stream_ps((float *)(void *)(out), (__m128)(value))
static void ddp__stream_end(void) { _mm_sfence(); }
#else
#define DDP__STREAM(out, value) (*(ddp__any_f32x4 *)(void *)(out) = (value))
static void ddp__stream_end(void) {}
#endif

/* Copies whole cache lines with streaming stores, and the two ends with memcpy. */
static void ddp__copy_stream(void *dst, const void *src, size_t size_bytes) {
    unsigned char *out = (unsigned char *)dst;
    const unsigned char *in = (const unsigned char *)src;
    size_t head = -(uintptr_t)out & 63;
    if (head > size_bytes) head = size_bytes;
    memcpy(out, in, head);
    for (out += head, in += head, size_bytes -= head; size_bytes >= 64; out += 64, in += 64, size_bytes -= 64)
        for (int i = 0; i < 64; i += 16)
            DDP__STREAM(out + i, *(const ddp__any_f32x4 *)(const void *)(in + i));
    memcpy(out, in, size_bytes);
}

//== tree reduction: loops ================================================================ >>impl-tree-loops
/* The two ways to reduce: one fused loop over memory for f32 sums of few sources, and blocks for the rest.
   ddp__reduce_tree chooses. */

/* The arguments of one ddp__reduce_tree. */
typedef struct ddp__reduction {
    void *const *dst;
    const void *const *src;
    int dst_count, src_count;
    ddp_dtype dtype;
    size_t size; /* of an element */
    uint64_t divisor;
    ddp__merge_fn merge;
    int is_half; /* 1 = f16 or bf16, added in f32 */
    int streams; /* 1 = streaming stores write all outputs, none of which is a source */
    /* NULL except in ddp__staged_step_fused: the loop also copies copy_from[k] to copy_to[k]. */
    void *const *copy_to, *const *copy_from;
} ddp__reduction;

/* The loop for gradients: f32 SUM and AVG of W = 2 to 4 sources into D = 1 or W destinations, in one pass
   over memory. W and D are constants where it is inlined. A SUM is multiplied by 1, which changes no bit and
   takes no time while the loop waits for loads. Walks `runs` runs of count elements, which follow each other
   in memory. Each element, with the sources a to d and the destinations w to z:

       W=2   a + b              W=3   (a + b) + d              W=4   (a + b) + (c + d)
                                   |
                       * factor, or / factor if divide
                                   |
                 +-----------+-----+-----+-----------+
                 w           x           y           z            D of them */
#define DDP__F32_AT(array, k) ((ddp__any_f32 *)array[k] + first)
#define DDP__FOUR(x) (*(const ddp__any_f32x4 *)(x + i))
/* Declares value: the result for one element, cache line, or four elements. */
#define DDP__FUSED_VALUE(type, at)               \
    type value = at(a) + at(b);                  \
    if (W == 3) value = value + at(d);           \
    if (W == 4) value = value + (at(c) + at(d)); \
    value = divide ? value / factor : value * factor;
#define DDP__FUSED_STEP(type, at)    \
    DDP__FUSED_VALUE(type, at)       \
    if (copies) at(to0) = at(from0); \
    at(w) = value;                   \
    if (D > 1) at(x) = value;        \
    if (D > 3) at(y) = value;        \
    if (D > 2) at(z) = value;        \
    if (copies) at(to1) = at(from1);
DDP__FORCED_INLINE void ddp__fused_loop(const ddp__reduction *r, int W, int D, int copies, int divide,
                                        int wide, size_t first, size_t count, size_t runs) {
    const ddp__any_f32 *a = DDP__F32_AT(r->src, 0), *b = DDP__F32_AT(r->src, 1);
    const ddp__any_f32 *c = DDP__F32_AT(r->src, W - 2), *d = DDP__F32_AT(r->src, W - 1);
    ddp__any_f32 *w = DDP__F32_AT(r->dst, 0), *x = DDP__F32_AT(r->dst, D > 1);
    ddp__any_f32 *y = DDP__F32_AT(r->dst, D / 2), *z = DDP__F32_AT(r->dst, D - 1);
    ddp__any_f32 *to0 = copies ? DDP__F32_AT(r->copy_to, 0) : w;
    ddp__any_f32 *to1 = copies ? DDP__F32_AT(r->copy_to, 1) : w;
    const ddp__any_f32 *from0 = copies ? DDP__F32_AT(r->copy_from, 0) : w;
    const ddp__any_f32 *from1 = copies ? DDP__F32_AT(r->copy_from, 1) : w;
    float factor = divide ? (float)r->divisor : 1.0f / (float)r->divisor;
    if (D == 1 && r->streams) {
        for (size_t i = 0; i < count; i += 4) {
            DDP__FUSED_VALUE(ddp__any_f32x4, DDP__FOUR)
            DDP__STREAM(w + i, value);
        }
    } else {
        DDP__BY_LINE(wide, count, runs, DDP__FUSED_STEP);
    }
}

/* Multiplies by the reciprocal if the divisor is a power of two: the same bits, and faster. */
DDP__FORCED_INLINE int ddp__fused_shape(const ddp__reduction *r, int W, int D, int wide, size_t first,
                                        size_t count, size_t runs) {
    if (r->divisor & (r->divisor - 1))
        ddp__fused_loop(r, W, D, 0, 1, wide, first, count, runs);
    else
        ddp__fused_loop(r, W, D, 0, 0, wide, first, count, runs);
    return 1;
}

/* Picks the loop for a number of sources and destinations. Returns 0 if no loop fits. */
DDP__FORCED_INLINE int ddp__fused_dispatch(const ddp__reduction *r, int wide, size_t first, size_t count,
                                           size_t runs) {
    if (r->dtype != DDP_F32 || r->merge != ddp__merge_sum_f32) return 0;
    /* for streaming stores to several destinations, blocks are faster */
    if (r->streams && (r->dst_count > 1 || runs > 1 || count % 4 || (uintptr_t)DDP__F32_AT(r->dst, 0) % 16))
        return 0;
    if (r->copy_to) {
        ddp__fused_loop(r, 2, 2, 1, 0, wide, first, count, runs);
        return 1;
    }
    switch (100 * r->src_count + r->dst_count) {
    case 201: return ddp__fused_shape(r, 2, 1, wide, first, count, runs);
    case 202: return ddp__fused_shape(r, 2, 2, wide, first, count, runs);
    case 301: return ddp__fused_shape(r, 3, 1, wide, first, count, runs);
    case 303: return ddp__fused_shape(r, 3, 3, wide, first, count, runs);
    case 401: return ddp__fused_shape(r, 4, 1, wide, first, count, runs);
    case 404: return ddp__fused_shape(r, 4, 4, wide, first, count, runs);
    default: return 0;
    }
}
DDP__WIDE static int ddp__reduce_fused_wide(const ddp__reduction *r, size_t first, size_t count,
                                            size_t runs) {
    return ddp__fused_dispatch(r, 1, first, count, runs);
}
static int ddp__reduce_fused(const ddp__reduction *r, size_t first, size_t count, size_t runs) {
    return ddp__has_wide_stores() ? ddp__reduce_fused_wide(r, first, count, runs)
                                  : ddp__fused_dispatch(r, 0, first, count, runs);
}

typedef unsigned char DDP__ALIGNED64 ddp__block[DDP__BLOCK_BYTES];

static void ddp__merge_two(const ddp__reduction *r, void *left, const void *right, size_t count) {
    const void *const in[2] = {left, right};
    r->merge(left, in, 2, count);
}

/* Reduces one block of the tree, like a binary counter. After t sources there is one level per set bit of t:
   a subtree of that many sources, the largest in level[0]. Two subtrees of equal size are added as soon as
   both exist. At the end all levels are added, the smallest first:
       W=11: [0..7] [8 9] 10   W=28: [0..15] [16..23] [24..27]
   Each step adds a subtree of at most four sources. level[0] receives the result. 64 sources need five
   levels, 65536 sources need all 15. */
static void ddp__reduce_block(const ddp__reduction *r, ddp__block level[15], size_t first, size_t count) {
    ddp__block room[4];
    const void *in[4];
    int depth = 0, t = 0, n;
    while ((n = r->src_count - t) > 0) {
        if (n > 4) n = 4;
        if (n == 3) n = 2;
        for (int i = 0; i < n; i++) {
            in[i] = (const unsigned char *)r->src[t + i] + first * r->size;
            if (!r->is_half) continue;
            ddp__load_f32((float *)(void *)room[i], in[i], r->dtype, count, 0);
            in[i] = room[i];
        }
        if (n > 1)
            r->merge(level[depth++], in, n, count);
        else if (depth)
            ddp__merge_two(r, level[depth - 1], in[0], count);
        else
            memcpy(level[depth++], in[0], count * (r->is_half ? sizeof(float) : r->size));
        for (t += n; depth > (t < r->src_count ? __builtin_popcount((unsigned)t) : 1); depth--)
            ddp__merge_two(r, level[depth - 2], level[depth - 1], count);
    }
}

/* Reduces elements first to first + count - 1. With streaming stores the first block is short, so that later
   blocks begin on a cache line. */
static void ddp__reduce_run(const ddp__reduction *r, size_t first, size_t count) {
    ddp__block level[15];
    size_t n, step = (r->streams ? DDP__STREAM_BLOCK_BYTES : DDP__BLOCK_BYTES)
                     / (r->is_half ? sizeof(float) : r->size);
    if (ddp__reduce_fused(r, first, count, 1)) return;
    for (; count; first += n, count -= n) {
        size_t at = first * r->size;
        n = r->streams ? step - (((uintptr_t)r->dst[0] + at) & 63) / r->size : step;
        if (n > count) n = count;
        ddp__reduce_block(r, level, first, n);
        ddp__divide(level[0], n, r->is_half ? DDP_F32 : r->dtype, r->divisor);
        if (r->is_half) ddp__store_f32(level[1], r->dtype, (const float *)(const void *)level[0], n);
        for (int k = 0; k < r->dst_count; k++)
            if (r->streams)
                ddp__copy_stream((unsigned char *)r->dst[k] + at, level[r->is_half], n * r->size);
            else
                memcpy((unsigned char *)r->dst[k] + at, level[r->is_half], n * r->size);
    }
}

/* Reduces src_count (1 to 65536) arrays of count elements and writes the result to dst_count (1 to 64)
   arrays. A destination may be one of the sources; otherwise they do not overlap. AVG divides the sum by
   divisor (0 counts as 1); other operations ignore it. hint:
     DDP__HINT_CACHED   The data is in this core's caches.
     DDP__HINT_LARGE    The data does not fit the caches, or another core has just written it. The loop walks
                        several runs at once: hardware prefetchers stop at the end of a page, and while one
                        run starts a page the others stream. 5% to 20% faster than one run.
     DDP__HINT_STREAM   As DDP__HINT_LARGE, and no core reads the outputs soon. Streaming stores write them,
                        unless an output is a source. */
static void ddp__reduce_tree(void *const *dst, int dst_count, const void *const *src, int src_count,
                             size_t count, ddp_dtype dtype, ddp_op op, uint64_t divisor, int hint) {
    ddp__reduction r = {dst,
                        src,
                        dst_count,
                        src_count,
                        dtype,
                        ddp_dtype_size(dtype),
                        op == DDP_OP_AVG && divisor ? divisor : 1,
                        ddp__merge_fn_of(dtype, op),
                        ddp__is_half(dtype),
                        hint == DDP__HINT_STREAM,
                        NULL,
                        NULL};
    size_t step = DDP__RUN_STEP_BYTES / r.size;
    size_t runs = !hint || count * r.size < DDP__MIN_RUN_BYTES ? 0 : ddp__run_count();
    size_t each = runs ? count / runs / step * step : 0;
    for (int k = 0; r.streams && k < dst_count * src_count; k++)
        r.streams = dst[k / src_count] != src[k % src_count];
    if (src_count == 1 && r.divisor == 1) {
        for (int k = 0; k < dst_count; k++)
            if (count && dst[k] != src[0]) memcpy(dst[k], src[0], count * r.size);
        return;
    }
    if (!each || !ddp__reduce_fused(&r, 0, each, runs))
        for (size_t first = 0; first < each; first += step)
            for (size_t from = first; from < runs * each; from += each) ddp__reduce_run(&r, from, step);
    ddp__reduce_run(&r, runs * each, count - runs * each);
    if (r.streams) ddp__stream_end();
}

DDPDEF void ddp_reduce_tree(void *dst, const void *const *sources, int source_count, size_t count,
                            ddp_dtype dtype, ddp_op op, uint64_t divisor) {
    ddp__reduce_tree(&dst, 1, sources, source_count, count, dtype, op,
                     divisor ? divisor : (uint64_t)source_count, DDP__HINT_LARGE);
}

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

//== exact sums ================================================================================= >>impl-exact
/* Sums of doubles without rounding, so that gradient norms do not depend on the world size. */

/* Kulisch's long accumulator: a fixed-point number that spans every double.
       cell[0..67]   digits; digit k has the weight 2^(32k-1074) and either sign
       cell[68..70]  number of NaN, +infinity and -infinity that were added
       cell[71]      bound: no digit exceeds bound * 2^32 in magnitude

   An all_reduce of the cells as DDP_I64 adds the digits of all ranks, and also their bounds. No digit
   overflows while the sum of the bounds is less than 2^31. ddp_exact_sum_add keeps each bound below 2^16,
   which is enough for 2^15 ranks.

   The 53 bits of a double's mantissa, shifted by up to 31 bits, are added to three digits:

       digit          k+2           k+1            k
                 |        mm | mmmmmmmmmmm | mmmmmm      |     k     = (exponent - 1) / 32
                                                  |shift|      shift = (exponent - 1) % 32   */
enum {
    DDP__EXACT_DIGITS = 68,
    DDP__EXACT_NAN = 68,
    DDP__EXACT_PLUS = 69,
    DDP__EXACT_MINUS = 70,
    DDP__EXACT_BOUND = 71
};
#define DDP__EXACT_BOUND_MAX (INT64_C(1) << 16)
#define DDP__EXACT_LANES 32             /* partial sums of a piece, see ddp__row_squares */
#define DDP__EXACT_PIECE ((size_t)4096) /* elements of a row that are added in f64; a multiple of 64 */

/* Propagates carries. Afterwards every digit except the last is in [0, 2^32); the last one has the sign of
   the sum. No double reaches the last two digits, so they have room for all carries. */
static void ddp__exact_normalise(ddp_exact_sum *sum) {
    int64_t carry = 0;
    for (int k = 0; k < DDP__EXACT_DIGITS - 1; k++) {
        int64_t digit = sum->cell[k] + carry;
        sum->cell[k] = digit & INT64_C(0xffffffff);
        carry = (digit - sum->cell[k]) / (INT64_C(1) << 32);
    }
    sum->cell[DDP__EXACT_DIGITS - 1] += carry;
    sum->cell[DDP__EXACT_BOUND] = 1;
}

DDPDEF void ddp_exact_sum_clear(ddp_exact_sum *sum) { memset(sum, 0, sizeof *sum); }

DDPDEF void ddp_exact_sum_add(ddp_exact_sum *sum, double value) {
    uint64_t bits = ddp__f64_bits(value);
    uint64_t mantissa = bits & ((UINT64_C(1) << 52) - 1);
    uint64_t low, high;
    int exponent = (int)(bits >> 52 & 0x7ff);
    int64_t negative = -(int64_t)(bits >> 63); /* 0 or -1: (x ^ negative) - negative is x or -x */
    if (exponent == 0x7ff) {
        int infinity = negative ? DDP__EXACT_MINUS : DDP__EXACT_PLUS;
        sum->cell[mantissa ? DDP__EXACT_NAN : infinity]++;
        return;
    }
    if (exponent)
        mantissa |= UINT64_C(1) << 52;
    else
        exponent = 1;
    int64_t *digit = sum->cell + ((exponent - 1) >> 5);
    int shift = (exponent - 1) & 31;
    low = (mantissa & 0xffffffff) << shift;
    high = (mantissa >> 32 << shift) + (low >> 32); /* below 2^52 */
    digit[0] += ((int64_t)(low & 0xffffffff) ^ negative) - negative;
    digit[1] += ((int64_t)(high & 0xffffffff) ^ negative) - negative;
    digit[2] += ((int64_t)(high >> 32) ^ negative) - negative;
    if (++sum->cell[DDP__EXACT_BOUND] >= DDP__EXACT_BOUND_MAX) ddp__exact_normalise(sum);
}

/* The value of an empty sum, and of one that cancels, is +0. */
DDPDEF double ddp_exact_sum_value(const ddp_exact_sum *exact) {
    ddp_exact_sum sum = *exact;
    int top = DDP__EXACT_DIGITS - 1, negative;
    if (sum.cell[DDP__EXACT_NAN] || (sum.cell[DDP__EXACT_PLUS] && sum.cell[DDP__EXACT_MINUS]))
        return (double)NAN;
    if (sum.cell[DDP__EXACT_PLUS] || sum.cell[DDP__EXACT_MINUS])
        return sum.cell[DDP__EXACT_PLUS] ? HUGE_VAL : -HUGE_VAL;
    ddp__exact_normalise(&sum);
    negative = sum.cell[top] < 0;
    for (int k = 0; k < DDP__EXACT_DIGITS && negative; k++) sum.cell[k] = -sum.cell[k];
    if (negative) ddp__exact_normalise(&sum);
    while (top > 1 && !sum.cell[top]) top--;
    /* Collects 64 bits, from the highest set bit on. The last of them is also set if any bit below is:

           digit      top       top-1      top-2     top-3 ... 0
                    |   1xxxx | xxxxxxxx | xxx xxxxx | xxxxxxxx |
                        '------ 64 bits -----' '----- below ----'

       Their conversion to the 53 bits of a double is the only rounding, to nearest even. A subnormal has at
       most 52 bits, so it is exact. */
    uint64_t bits = (uint64_t)sum.cell[top] << 32 | (uint64_t)sum.cell[top - 1];
    uint64_t below = top > 1 ? (uint64_t)sum.cell[top - 2] : 0;
    int shift = bits ? __builtin_clzll(bits) : 0;
    bits = bits << shift | below << shift >> 32;
    below = below << shift & 0xffffffff;
    for (int k = 0; k < top - 2; k++) below |= (uint64_t)sum.cell[k];
    return ldexp((double)(bits | (below != 0)), 32 * (top - 1) - 1074 - shift) * (negative ? -1.0 : 1.0);
}

DDPDEF float ddp_clip_factor(const ddp_exact_sum *squares, float max_norm, float *norm) {
    *norm = (float)sqrt(ddp_exact_sum_value(squares));
    return *norm > max_norm && *norm <= 3.402823466e38f ? max_norm / *norm : 1;
}

/* Add the squares of 64 elements to 32 partial sums: lane[e] receives those of elements e and e+32. The
   square of an f32 is exact in f64, so a fused multiply-add gives the same bits. The square of an f64 is
   rounded, and a fused multiply-add would skip this rounding: the squares go through memory. */
static void ddp__add_squares_f32(double *DDP__RESTRICT lane, const ddp__any_f32 *x) {
    for (int e = 0; e < DDP__EXACT_LANES; e++)
        lane[e] += (double)x[e] * (double)x[e]
                   + (double)x[e + DDP__EXACT_LANES] * (double)x[e + DDP__EXACT_LANES];
}

static void ddp__add_squares_f64(double *DDP__RESTRICT lane, const ddp__any_f64 *x) {
    double DDP__ALIGNED64 square[2 * DDP__EXACT_LANES];
    for (int e = 0; e < 2 * DDP__EXACT_LANES; e++) square[e] = x[e] * x[e];
    __asm__ __volatile__("" : : "r"(square) : "memory");
    for (int e = 0; e < DDP__EXACT_LANES; e++) lane[e] += square[e] + square[e + DDP__EXACT_LANES];
}

/* Returns the sum of the squares of count elements in f64. The order depends only on count, not on the vector
   width of the CPU:

       lane[e]   squares of elements e + e+32, then of e+64 + e+96, ...
       result    lane[e] += lane[e+16], then += lane[e+8], ... += lane[e+1]: lane[0]

   Zeros fill up the last step of 64 elements and change no bit. */
static double ddp__row_squares(const void *data, size_t count, ddp_dtype dtype) {
    union {
        double f64[2 * DDP__EXACT_LANES];
        float f32[2 * DDP__EXACT_LANES];
    } DDP__ALIGNED64 block;
    double DDP__ALIGNED64 lane[DDP__EXACT_LANES];
    const unsigned char *at = (const unsigned char *)data;
    size_t size = ddp_dtype_size(dtype), step = 2 * DDP__EXACT_LANES;

    memset(lane, 0, sizeof lane);
    for (; count; at += step * size) {
        size_t n = count < step ? count : step;
        const void *x = at;
        if (n < step) memset(&block, 0, sizeof block);
        if (ddp__is_half(dtype)) {
            ddp__load_f32(block.f32, at, dtype, n, 0);
            x = &block;
        } else if (n < step) {
            memcpy(&block, at, n * size);
            x = &block;
        }
        if (dtype == DDP_F64)
            ddp__add_squares_f64(lane, (const ddp__any_f64 *)x);
        else
            ddp__add_squares_f32(lane, (const ddp__any_f32 *)x);
        count -= n;
    }
    for (int half = DDP__EXACT_LANES / 2; half; half /= 2)
        for (int e = 0; e < half; e++) lane[e] += lane[e + half];
    return lane[0];
}

/* Adds the squares of rows of row_count elements, of a float dtype. Each piece of a row, of at most
   DDP__EXACT_PIECE elements, is summed in f64. The sums of pieces are added exactly. So the result does not
   depend on which rank has which row, and a GPU can compute pieces in parallel. */
static void ddp__exact_add_squares(ddp_exact_sum *sum, const void *data, size_t rows, size_t row_count,
                                   ddp_dtype dtype) {
    const unsigned char *at = (const unsigned char *)data;
    size_t size = ddp_dtype_size(dtype);
    float DDP__ALIGNED64 block[64];
    if (row_count == 1 && dtype != DDP_F64) /* such as biases: one square per row, which is exact */
        for (size_t n; rows; at += n * size, rows -= n) {
            n = rows < 64 ? rows : 64;
            ddp__load_f32(block, at, dtype, n, 0);
            for (size_t i = 0; i < n; i++) ddp_exact_sum_add(sum, (double)block[i] * (double)block[i]);
        }
    else
        for (size_t n; rows; rows--)
            for (size_t left = row_count; left; at += n * size, left -= n)
                ddp_exact_sum_add(
                    sum, ddp__row_squares(at, n = left < DDP__EXACT_PIECE ? left : DDP__EXACT_PIECE, dtype));
}

//== shared memory =============================================================================== >>impl-heap

/* The heap is one anonymous file with all shared memory of a job. It is far larger than memory but sparse:
   only pages that were accessed or reserved need memory. The file has no name, so nothing remains after a
   crash.

       offset 0    2 MiB                                                        next_offset    limit
       | ddp__job  | control memory | control memory | group memory    | ...    | unused       |
                     of the world     of a split       of ddp_group_alloc

   A range begins at a multiple of 2 MiB. One rank allocates it: it moves next_offset up atomically, without a
   message, and sends the offset to the ranks that map the range. Offsets are never reused; when a range is
   freed, its pages return to the system. */

#define DDP__HUGE ((size_t)2 << 20)
/* Sizes of mapped and of freed ranges are multiples of it. 64 KiB on some arm64 systems. */
#define DDP__PAGE ((size_t)sysconf(_SC_PAGESIZE))

/* Places for the file, in the order in which they are tried. Only the machine's memory limits a memfd. The
   folders are for old kernels and strict sandboxes, which have no memfd. A /dev/shm with less than 1 GiB free
   is tried last: containers have 64 MB there. */
enum { DDP__HEAP_MEMFD, DDP__HEAP_SHM, DDP__HEAP_TMP, DDP__HEAP_HERE, DDP__HEAP_SMALL_SHM, DDP__HEAP_PLACES };
static const char *const ddp__heap_folders[DDP__HEAP_PLACES] = {"", "/dev/shm", "/tmp", ".", "/dev/shm"};

#ifdef SYS_memfd_create
#define DDP__MEMFD_CREATE SYS_memfd_create
#else
#define DDP__MEMFD_CREATE (-1) /* fails with ENOSYS */
#endif

/* Opens the file and removes its name. Returns -1 and sets errno. */
static int ddp__heap_open_file(int place) {
    struct statvfs disk;
    char path[64];
    const char *folder = ddp__heap_folders[place];
    if (place == DDP__HEAP_MEMFD) return (int)syscall(DDP__MEMFD_CREATE, "ddp", 1u /* MFD_CLOEXEC */);
    if (place == DDP__HEAP_SHM
        && (statvfs(folder, &disk) != 0 || (uint64_t)disk.f_bavail * disk.f_frsize < UINT64_C(1) << 30))
        return -1; /* DDP__HEAP_SMALL_SHM tries it again, and sets errno if that fails */
    snprintf(path, sizeof path, "%s/ddp-XXXXXX", folder);
    int fd = mkstemp(path);
    if (fd < 0) return -1;
    unlink(path);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    return fd;
}

/* Returns 1 if the first access to a page can end in SIGBUS because the place is full. Pages must then be
   reserved before the access, so that a lack of room is an error:

       folder                           1: its file system can be full
       memfd, overcommit_memory=2       1: the system limits the memory that all processes commit
       memfd, overcommit_memory=0, 1    0: the file stays sparse

   Sparse control memory matters: a group of 64 ranks has 752 MiB of it and touches 5 to 100 MiB. Reserving
   all of it takes a second. Reserving does not help against the memory limit of a cgroup: its OOM killer also
   ends a process that reserves pages. */
static int ddp__heap_needs_reserve(int place) {
    char mode = 0;
    if (place != DDP__HEAP_MEMFD) return 1;
    int fd = open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
    int known = fd >= 0 && read(fd, &mode, 1) == 1;
    if (fd >= 0) close(fd);
    return known && mode == '2';
}

/* Names the limit that a heap with reserved pages has reached, for error lines. folder: as in ddp__job. */
static const char *ddp__heap_limit_name(const char *folder) {
    return *folder ? folder : "the system's commit limit (vm.overcommit_memory=2)";
}

/* Allocates the pages of a range of the file, before the first access. Returns 0 or an errno. */
static int ddp__reserve_pages(int fd, uint64_t offset, size_t size) {
    int error = EINTR;
    while (error == EINTR) error = posix_fallocate(fd, (off_t)offset, (off_t)size);
    return error;
}

/* Maps a range of the file at a multiple of 2 MiB, which huge pages need. mmap cannot align, so this reserves
   2 MiB more address space, maps the range inside it, and unmaps both ends:

       space      start                        start + size      space + size + DDP__HUGE
       | unmapped | [offset, offset + size)    | unmapped        |   */
static void *ddp__map_aligned(int fd, uint64_t offset, size_t size) {
    unsigned char *space = (unsigned char *)mmap(NULL, size + DDP__HUGE, PROT_NONE,
                                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned char *start = (unsigned char *)ddp_round_up((uintptr_t)space, DDP__HUGE);
    if (space == (unsigned char *)MAP_FAILED) return NULL;
    if (mmap(start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED) {
        munmap(space, size + DDP__HUGE);
        return NULL;
    }
    if (start > space) munmap(space, (size_t)(start - space));
    munmap(start + size, (size_t)(space + DDP__HUGE - start));
    if (size >= DDP__HUGE) madvise(start, size, 14 /* MADV_HUGEPAGE */);
    return start;
}

/* Maps [offset, offset + size), a range of one ddp__heap_alloc. If ranks are threads, they share one mapping
   of the range, which counts its references. */
static void *ddp__heap_map(ddp__heap *heap, uint64_t offset, size_t size) {
    if (size > DDP__HUGE) size = ddp_round_up(size, DDP__HUGE); /* as ddp__heap_alloc did */
    pthread_mutex_lock(&heap->lock);
    ddp__region *m = heap->mappings;
    while (m && m->offset != offset) m = m->next;
    if (m) {
        m->references++;
    } else if ((m = (ddp__region *)calloc(1, sizeof *m)) != NULL) {
        m->base = (unsigned char *)ddp__map_aligned(heap->fd, offset, size);
        m->offset = offset;
        m->total = size;
        m->references = 1;
        m->next = heap->mappings;
        if (m->base) {
            heap->mappings = m;
        } else {
            free(m);
            m = NULL;
        }
    }
    pthread_mutex_unlock(&heap->lock);
    return m ? m->base : NULL;
}

static void ddp__heap_unmap(ddp__heap *heap, void *memory) {
    pthread_mutex_lock(&heap->lock);
    ddp__region **link = &heap->mappings;
    while (*link && (*link)->base != memory) link = &(*link)->next;
    ddp__region *m = *link;
    if (m && --m->references == 0) {
        *link = m->next;
        munmap(m->base, m->total);
        free(m);
    }
    pthread_mutex_unlock(&heap->lock);
}

static void ddp__heap_release(ddp__heap *heap) {
    if (__atomic_sub_fetch(&heap->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    ddp__heap_unmap(heap, heap->job); /* the only mapping: owners of others hold references to the heap */
    close(heap->fd);
    pthread_mutex_destroy(&heap->lock);
    free(heap);
}

/* Allocates a range of the file. Returns its offset, or 0 if it does not fit (offset 0 is ddp__job). */
static uint64_t ddp__heap_alloc(ddp__heap *heap, size_t size) {
    uint64_t length = ddp_round_up(size, DDP__HUGE), offset = ddp__load(&heap->job->next_offset);
    do {
        /* length < size: rounding up has overflowed */
        if (length < size || offset > heap->job->limit || length > heap->job->limit - offset) return 0;
    } while (!__atomic_compare_exchange_n(&heap->job->next_offset, &offset, offset + length, 0,
                                          __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return offset;
}

/* Returns the pages of a range to the system. Calls fallocate(2) by number, because its declaration needs
   _GNU_SOURCE. */
static void ddp__heap_free(ddp__heap *heap, uint64_t offset, size_t size) {
    syscall(SYS_fallocate, heap->fd, 3 /* KEEP_SIZE | PUNCH_HOLE */, (long)offset, (long)size);
}

/* Requests huge pages for the bytes [begin, end) of a mapping, from Linux 6.1 on. By default Linux uses none
   for shared memory. With them an all_reduce of 25 MiB takes 2% less, and pages are allocated faster. */
static void ddp__request_huge_pages(unsigned char *mapping, size_t begin, size_t end) {
    for (size_t at = ddp_round_up(begin, DDP__HUGE); at < end; at += DDP__HUGE) {
        /* MADV_COLLAPSE needs an allocated page in the range. After EAGAIN for one range the next one may
           succeed. */
        if (madvise(mapping + at, 4096, 23 /* MADV_POPULATE_WRITE */) != 0) return;
        if (madvise(mapping + at, DDP__HUGE, 25 /* MADV_COLLAPSE */) != 0 && errno != EAGAIN) return;
    }
}

/* Allocates the pages of memory, which starts at a page and is mapped from `offset` of the file. A lack of
   memory is then an error here and not a SIGBUS later. Returns 0 on such an error. Returns 1 also if the
   system has neither function: the first access then allocates. */
static int ddp__allocate_pages(ddp__heap *heap, void *memory, uint64_t offset, size_t size) {
    if (madvise(memory, size, 23 /* MADV_POPULATE_WRITE, Linux 5.14 */) == 0) return 1;
    if (errno != EINVAL) return 0;
    return syscall(SYS_fallocate, heap->fd, 0, (long)offset, (long)size) == 0 || errno == EOPNOTSUPP
           || errno == ENOSYS;
}

/* Creates this process's heap object for a file and maps its ddp__job. Takes ownership of fd, also on
   failure. */
static ddp__heap *ddp__heap_wrap(int fd, int threads) {
    ddp__heap *heap = (ddp__heap *)calloc(1, sizeof *heap);
    if (!heap) {
        close(fd);
        return NULL;
    }
    heap->fd = fd;
    heap->threads = threads;
    heap->references = 1;
    pthread_mutex_init(&heap->lock, NULL);
    heap->job = (ddp__job *)ddp__heap_map(heap, 0, ddp_round_up(sizeof(ddp__job), DDP__PAGE));
    if (!heap->job) {
        ddp__heap_release(heap);
        return NULL;
    }
    return heap;
}

/* The cores that this process may run on: one bit for each of 1024, as sched_getaffinity writes them. On a
   larger system that call fails, and all online cores count. */
enum { DDP__CPU_BITS = 8 * (int)sizeof(unsigned long), DDP__CPU_WORDS = 1024 / DDP__CPU_BITS };
typedef struct ddp__cpus {
    unsigned long word[DDP__CPU_WORDS];
} ddp__cpus;

static int ddp__usable_cores(ddp__cpus *cpus) {
    int cores = 0;
    memset(cpus, 0, sizeof *cpus);
    syscall(SYS_sched_getaffinity, 0, sizeof *cpus, cpus);
    for (int i = 0; i < DDP__CPU_WORDS; i++) cores += __builtin_popcountl(cpus->word[i]);
    if (cores < 1) cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    return cores < 1 ? 1 : cores;
}

static uint64_t ddp__control_create(ddp__heap *heap, int world_size);

/* Creates a job of world_size ranks in a file at one place. On failure frees everything. */
static ddp_result ddp__heap_create_at(ddp__heap **out, int place, int world_size, int threads, int launched) {
    struct rlimit limit;
    uint64_t size = UINT64_C(1) << 42; /* 4 TiB, or less if the limits of process and place are lower */
    ddp__cpus cpus;
    int fd = ddp__heap_open_file(place);
    int error = fd < 0 ? errno : 0;
    int reserves = ddp__heap_needs_reserve(place);
    if (fd < 0)
        return ddp_fail(DDP_ERR_SYSTEM, "shared memory: an anonymous file could not be created: %s",
                        strerror(error));
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && size > limit.rlim_cur)
        size = limit.rlim_cur;
    while (size >= 2 * DDP__HUGE && ftruncate(fd, (off_t)size) != 0) size /= 2;
    if (size < 2 * DDP__HUGE) {
        close(fd);
        return ddp_fail(
            DDP_ERR_NO_MEMORY,
            "shared memory: the file size limit of %llu bytes is too small; raise it with `ulimit -f`",
            (unsigned long long)limit.rlim_cur);
    }
    if (reserves) error = ddp__reserve_pages(fd, 0, ddp_round_up(sizeof(ddp__job), DDP__PAGE));
    if (error) {
        close(fd);
        return ddp_fail(DDP_ERR_NO_MEMORY, "shared memory: no space in %s for the job's header: %s",
                        ddp__heap_limit_name(ddp__heap_folders[place]), strerror(error));
    }
    ddp__heap *heap = ddp__heap_wrap(fd, threads);
    if (!heap)
        return ddp_fail(DDP_ERR_NO_MEMORY, "shared memory: the job's header could not be mapped: %s",
                        strerror(errno));
    snprintf(heap->job->folder, sizeof heap->job->folder, "%s", ddp__heap_folders[place]);
    heap->job->reserves = (uint32_t)reserves;
    heap->job->world_size = (uint32_t)world_size;
    heap->job->next_offset = DDP__HUGE;
    heap->job->limit = size;
    heap->job->launched = (uint32_t)launched;
    heap->job->cores = (uint32_t)ddp__usable_cores(&cpus);
    heap->job->is_amd = ddp__cpu_is_amd() != 0;
    heap->job->world = ddp__control_create(heap, world_size);
    if (heap->job->world == 0) {
        ddp__heap_release(heap);
        return DDP_ERR_NO_MEMORY;
    }
    *out = heap;
    return DDP_OK;
}

/* Creates a job of world_size ranks, at the first place that has room for it. */
static ddp_result ddp__heap_create(ddp__heap **out, int world_size, int threads, int launched) {
    ddp_result result = DDP_ERR_SYSTEM;
    char reasons[DDP__TEXT_MAX] = "";
    const char *remedy = "enlarge /dev/shm or /tmp (docker: --shm-size=1g), or allow memfd_create";
    *out = NULL;
    for (int place = 0; place < DDP__HEAP_PLACES; place++) {
        ddp_result here = ddp__heap_create_at(out, place, world_size, threads, launched);
        if (here == DDP_OK) return DDP_OK;
        if (result == DDP_ERR_SYSTEM) result = here; /* NO_MEMORY of any place is the better reason */
        if (here == result) snprintf(reasons, sizeof reasons, "%s", ddp_last_error());
        /* a limit of the process or the system, which also applies to the folders */
        if (place == DDP__HEAP_MEMFD && here == DDP_ERR_NO_MEMORY) {
            remedy = "raise vm.overcommit_ratio, or end other programs";
            break;
        }
    }
    if (!strstr(reasons, "no space in")) return ddp_fail(result, "%s", reasons);
    return ddp_fail(result, "%.300s; %s", reasons, remedy);
}

//== liveness of ranks =========================================================================== >>impl-life
/* Detects processes that have ended, and records the ranks that are lost or do not respond. Two records:

       ddp__job.rank     in shared memory, for the ranks of one machine. ddp_launch writes how a rank ended.
       ddp__lost_ranks   in this process, for the ranks of a world, also on other machines. All groups that
                         descend from one handle of the world share it, so a rank that is lost in one group
                         is lost in all of them. */

#define DDP__START_UNKNOWN UINT64_MAX
#ifdef SYS_pidfd_open
#define DDP__PIDFD_OPEN SYS_pidfd_open
#else
#define DDP__PIDFD_OPEN (-1) /* fails with ENOSYS */
#endif

/* Returns when a process started, in clock ticks since boot (field 22 of /proc/PID/stat). Other results:

       0                    the process has ended, perhaps as a zombie (state Z or X in field 3)
       DDP__START_UNKNOWN   /proc has no entry for it, or is that of an outer PID namespace. There, /proc/PID
                            is another process, and /proc/self names another pid than getpid(). */
static uint64_t ddp__process_start_time(int pid) {
    char self[16], path[32], line[512];
    int fields = 2;
    ssize_t n = readlink("/proc/self", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = atoi(self) == (int)getpid() ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return DDP__START_UNKNOWN;
    n = read(fd, line, sizeof line - 1);
    close(fd);
    line[n > 0 ? n : 0] = 0;
    char *p = strrchr(line, ')'); /* end of field 2, the name, which may contain spaces and ')' */
    if (!p || !p[1] || strchr("ZX", p[2])) return 0;
    for (p += 2; *p && fields < 21; p++) fields += *p == ' ';
    return strtoull(p, NULL, 10);
}

/* Returns 1 if a process has ended, also as a zombie. start_time: of the process when it joined, or
   DDP__START_UNKNOWN; a process that started at another time only reuses the pid. Without a usable /proc, a
   pidfd becomes readable when the process ends. Before Linux 5.3 pidfds are missing, and a zombie then counts
   as alive. */
static int ddp__process_has_ended(int pid, uint64_t start_time) {
    if (kill(pid, 0) != 0 && errno == ESRCH) return 1;
    uint64_t start = ddp__process_start_time(pid);
    if (start == 0) return 1;
    if (start != DDP__START_UNKNOWN) return start_time != DDP__START_UNKNOWN && start != start_time;
    struct pollfd ended = {(int)syscall(DDP__PIDFD_OPEN, pid, 0), POLLIN, 0};
    if (ended.fd < 0) return errno == ESRCH;
    int gone = poll(&ended, 1, 0) > 0;
    close(ended.fd);
    return gone;
}

/* Records that process pid is rank `rank` of the job. pid 0: of another PID namespace, so peers cannot check
   the process. */
static void ddp__rank_register(ddp__heap *heap, int rank, int pid) {
    ddp__job_rank *me = &heap->job->rank[rank];
    me->pid = (int32_t)pid;
    me->start_time = ddp__process_start_time(pid);
    ddp__store(&me->state, (uint32_t)DDP__RANK_ALIVE);
}

/* Returns 1 if the rank can no longer take part in calls, and writes the reason to text. Under ddp_launch it
   relies on the record of the launcher; otherwise it checks the process. */
static int ddp__rank_is_gone(ddp__heap *heap, int rank, int cause_rank, char *text, size_t size) {
    ddp__job_rank *r = &heap->job->rank[rank];
    uint32_t state = ddp__load(&r->state);
    if (state == DDP__RANK_LOST && r->signal_number)
        snprintf(text, size, "rank %d (pid %d) was killed by signal %d", cause_rank, r->pid,
                 r->signal_number);
    else if (state == DDP__RANK_LOST)
        snprintf(text, size, "rank %d (pid %d) exited with status %d", cause_rank, r->pid, r->exit_status);
    else if (state == DDP__RANK_LEFT && r->result)
        snprintf(text, size, "rank %d (pid %d) returned %s", cause_rank, r->pid,
                 ddp_result_name((ddp_result)r->result));
    else if (state == DDP__RANK_LEFT)
        snprintf(text, size, "rank %d (pid %d) has returned from its function and does not make this call",
                 cause_rank, r->pid);
    else {
        if (state == DDP__RANK_ABSENT || heap->job->launched || heap->threads) return 0;
        if (r->pid == 0) return 0;
        if (!ddp__process_has_ended(r->pid, r->start_time)) return 0;
        snprintf(text, size, "rank %d (pid %d) no longer exists", cause_rank, r->pid);
    }
    return 1;
}

/* --- the record of lost ranks in this process --- */

static void ddp__lost_release(ddp_group *group) {
    ddp__lost_ranks *lost = group->lost;
    group->lost = NULL;
    if (!lost || __atomic_sub_fetch(&lost->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    pthread_mutex_destroy(&lost->lock);
    ddp_host_free(group, lost);
}

/* Creates the record of a world, in which rank r of group is world rank r. */
static ddp_result ddp__lost_create(ddp_group *group) {
    size_t w = (size_t)group->world_size;
    ddp__lost_ranks *lost = (ddp__lost_ranks *)ddp_host_alloc(group, sizeof *lost + w);
    if (!lost) return DDP_ERR_NO_MEMORY;
    pthread_mutex_init(&lost->lock, NULL);
    lost->references = 1;
    lost->world_size = group->world_size;
    lost->cause_of = (unsigned char *)(lost + 1);
    group->lost = lost;
    for (int r = 0; r < group->world_size; r++) group->world_rank[r] = r;
    return DDP_OK;
}

/* Makes a group share the record of the group that it descends from. members: for each rank of group, its
   rank in `from`; NULL = the same rank. */
static void ddp__lost_share(ddp_group *group, ddp_group *from, const int *members) {
    ddp__lost_release(group);
    group->lost = from->lost;
    if (group->lost) __atomic_add_fetch(&group->lost->references, 1, __ATOMIC_RELAXED);
    for (int r = 0; r < group->world_size; r++)
        group->world_rank[r] = from->world_rank[members ? members[r] : r];
}

/* Marks a rank of the world as lost, unless it is this one. The first cause of a rank stays. */
static void ddp__lost_mark(ddp_group *group, int world_rank, ddp_result result, const char *cause) {
    ddp__lost_ranks *lost = group->lost;
    char text[DDP__TEXT_MAX];
    int i = 0; /* index of the cause with this text, else of an unused one, else of the last one */
    if (!lost || world_rank >= lost->world_size || world_rank == group->world_rank[group->rank]) return;
    if (strncmp(cause, DDP__CAUSE, strlen(DDP__CAUSE)) == 0 && strstr(cause + strlen(DDP__CAUSE), ": "))
        cause = strstr(cause + strlen(DDP__CAUSE), ": ") + 2; /* without the rank and call that found it */
    snprintf(text, sizeof text, "group=%s: %.400s", group->name, cause);
    pthread_mutex_lock(&lost->lock);
    while (i < DDP__LOST_CAUSES - 1 && lost->cause[i].result && strcmp(lost->cause[i].text, text) != 0) i++;
    if (!lost->cause_of[world_rank]) {
        if (!lost->cause[i].result) memcpy(lost->cause[i].text, text, sizeof text);
        if (!lost->cause[i].result) lost->cause[i].result = result;
        ddp__store(&lost->cause_of[world_rank], (unsigned char)(i + 1));
        ddp__store(&lost->mark_count, lost->mark_count + 1);
    }
    pthread_mutex_unlock(&lost->lock);
}

DDPDEF void ddp_group_mark_lost(ddp_group *group, int rank, ddp_result cause, const char *text) {
    if (group->lost) ddp__lost_mark(group, group->world_rank[rank], cause, text);
}

/* Returns DDP_OK, or sets the error line if a rank of this group is marked. After an error it returns DDP_OK
   until a further rank of the world is marked. */
DDPDEF ddp_result ddp_group_check_lost(ddp_group *group) {
    ddp__lost_ranks *lost = group->lost;
    ddp_result result = DDP_OK;
    if (__builtin_expect(!lost || ddp__load(&lost->mark_count) == ddp__load_relaxed(&group->lost_mark_seen),
                         1))
        return DDP_OK;
    pthread_mutex_lock(&lost->lock);
    __atomic_store_n(&group->lost_mark_seen, lost->mark_count, __ATOMIC_RELAXED);
    for (int r = 0; r < group->world_size && result == DDP_OK; r++) {
        int world_rank = group->world_rank[r], index = lost->cause_of[world_rank] - 1;
        const ddp_saved_error *cause;
        if (r == group->rank || index < 0) continue;
        cause = &lost->cause[index];
        result = ddp_fail((ddp_result)cause->result, "rank %d (world rank %d) %s in %s", r, world_rank,
                          cause->result == DDP_ERR_TIMEOUT ? "did not respond" : "was lost", cause->text);
    }
    pthread_mutex_unlock(&lost->lock);
    return result;
}

/* Poisons the group if one of its ranks is marked. */
static ddp_result ddp__lost_check(ddp_group *group) {
    ddp_result result = ddp_group_check_lost(group);
    if (result != DDP_OK) group->backend->poison(group, group->state, result, ddp_last_error());
    return result;
}

/* Packs the marked ranks into two words of a message to other ranks of the world. They hold four ranges of
   world ranks, each as its first rank and its length, of 16 bits. Further ranges are left out:

       out[0]   first, length   first, length        out[1]   first, length   first, length   */
enum { DDP__LOST_RANGES = 4 };
DDPDEF void ddp_group_get_lost(const ddp_group *group, uint64_t out[2]) {
    const ddp__lost_ranks *lost = group->lost;
    uint16_t range[DDP__LOST_RANGES][2] = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
    int count = 0;
    for (int r = 0; lost && ddp__load(&lost->mark_count) && r < lost->world_size && r < UINT16_MAX; r++) {
        if (!ddp__load(&lost->cause_of[r])) continue;
        int extends = count && range[count - 1][0] + range[count - 1][1] == r;
        if (!extends && count == DDP__LOST_RANGES) break;
        if (!extends) range[count++][0] = (uint16_t)r;
        range[count - 1][1]++;
    }
    memcpy(out, range, sizeof range);
}

/* Marks the ranks in the words of such a message. */
DDPDEF void ddp_group_add_lost(ddp_group *group, const uint64_t in[2], ddp_result cause, const char *text) {
    uint16_t range[DDP__LOST_RANGES][2];
    memcpy(range, in, sizeof range);
    for (int i = 0; i < DDP__LOST_RANGES; i++)
        for (int r = 0; r < range[i][1] && group->lost && range[i][0] + r < group->lost->world_size; r++)
            ddp__lost_mark(group, range[i][0] + r, cause, text);
}

//== the local backend: state ============================================================ >>impl-local-state
/* The local backend connects ranks of one machine through shared memory. This section has its state, wakes
   sleeping peers, and records the first failure of the group. */

/* Control memory of one group of W ranks. Rank 0 of the group allocates it from the heap, and every rank maps
   it. The parts, in this order, each from a multiple of 4096 bytes on:

       ddp__control      1           number of sleepers, failure of the group
       ddp__rank_state   [W]         round counters and futex words of a rank
       ddp__post         [W][2]      announcements: kind, count and buffers of a call
       payload           [W][2]      16 KiB: the data of a small call, or the counts of a _v call
       slot              [W][3]      512 KiB: the data of one round of a large call
       ddp__channel      [W][W]      messages: [sender][receiver]

   The posts, payloads and slots of row r belong to rank r. A peer reads them, and may overwrite data there
   that it has read: in a staged all_reduce it returns its sums in this way.

   Call seq uses post and payload seq % 2. Two are enough: rank r announces call n+2 after it has seen the
   announcements of n+1 of all ranks, and each of them has read the posts and payloads of n before it
   announced n+1.

   Each use of the slots is a round, and round k uses slot k % DDP__SLOTS. Rounds count over all calls of the
   group, see >>impl-wait. */

typedef struct ddp__channel ddp__channel;
typedef struct ddp__request ddp__request;

/* Methods of a large call. For private memory, chosen by a ddp_tuner (see ddp__method_propose):
       STAGED     through slots that stay in cache
       STREAMED   through slots, with streaming stores
       READ       process_vm_readv from the peers' buffers
   For buffers that peers can access, which are group memory or of ranks that are threads:
       DIRECT     loads from the peers' buffers
       PUSH       streaming stores into the peers' buffers */
enum {
    DDP__METHOD_STAGED,
    DDP__METHOD_STREAMED,
    DDP__METHOD_READ,
    DDP__TUNED_METHODS,
    DDP__METHOD_DIRECT,
    DDP__METHOD_PUSH
};
/* Kinds of calls that have their own tuners: calls that reduce, calls that only move data, and calls in which
   only the root sends. */
enum { DDP__TUNER_REDUCE, DDP__TUNER_COPY, DDP__TUNER_ONE_SENDER, DDP__TUNER_KINDS };
/* Messages up to 256 KiB, up to 4 MiB, and larger ones. */
enum { DDP__MESSAGE_SIZES = 3 };

typedef struct ddp__local {
    ddp__heap *heap;
    int rank, world_size, owns_rank; /* owns_rank: 1 = the rank's world; closing it sets DDP__RANK_LEFT */
    int spins, yields;               /* polls before a sleep, see >>impl-wait */
    int in_wait_signal;              /* 1 = inside ddp_group_wait_signal */
    /* A set bit ends the current or the next p2p_sleep: 2 = of the communication thread, 1 = of another
       thread. The thread that sleeps clears its bit. */
    int wake_bits;
    int job_rank[DDP_MAX_LOCAL_RANKS]; /* rank in this group -> rank of the job */
    /* Rank in this group -> rank in the texts of failures. It differs if this group is one machine's part of
       a larger group: texts then name the rank in the larger group. */
    int cause_rank[DDP_MAX_LOCAL_RANKS];
    uint64_t offset; /* of the control memory in the heap */
    size_t size;
    ddp__control *control;
    ddp__rank_state *line;
    ddp__post *posts;
    unsigned char *payloads, *slots;
    ddp__channel *channels;
    struct ddp__local *parent; /* its group memory, and that of its parents, is group memory here too */
    ddp__region *regions;      /* group memory of this group; changed under heap->lock */
    uint64_t round;            /* the last round of the last call */
    ddp_tuner tuner[DDP__TUNER_KINDS][16]; /* by kind and power of two of the size */
    ddp_tuner message_tuner[DDP_MAX_LOCAL_RANKS][DDP__MESSAGE_SIZES]; /* by peer; in seconds per byte */
    uint64_t seen[2][DDP_MAX_LOCAL_RANKS]; /* round counters of the peers at the last read */
    pthread_mutex_t p2p_lock;
    ddp__request *requests, *free_requests;   /* pending sends and receives in issue order; unused ones */
    uint64_t send_order[DDP_MAX_LOCAL_RANKS]; /* messages sent to each peer */
    uint64_t probe_word;                      /* different in every process, see ddp__can_read */
    /* process_vm_readv of this peer: 1 = it works, -1 = the system refuses it, 0 = not tried yet. */
    int can_read[DDP_MAX_LOCAL_RANKS];
    int read_refused;           /* 1 = refused for a peer, 2 = and log_fn has been called */
    int is_amd;                 /* as in ddp__job */
    int stage_flags;            /* DDP__STAGE_* flags of the last ddp__requests_progress; under p2p_lock */
    double lost_checked_at;     /* time of the last check in ddp__local_p2p_poll; under p2p_lock */
    uint64_t status_checked_at; /* time of the last check in ddp__local_status, in ms */
} ddp__local;

/* Offset of payloads and slots from the start of a page. Large private buffers begin near the start of a
   page. If both had the same offset, loads from one would wait for unrelated stores to the other (4 KiB
   aliasing). From 64 KiB to 1 MiB that cost 10% to 25%. */
#define DDP__OFF_PAGE 2048
#define DDP__PAYLOAD_STRIDE (2 * DDP__PAYLOAD + 4096 + DDP__LINE)
#define DDP__SLOT_STRIDE (DDP__SLOTS * (size_t)DDP__CHUNK + DDP__SKEW)

/* The rank `distance` steps above this one, cyclically. Loops over all peers use the distances 1 to
   world_size - 1, so that the ranks begin with different peers. */
static int ddp__peer_at(const ddp__local *l, int distance) { return (l->rank + distance) % l->world_size; }

static ddp__post *ddp__post_of(const ddp__local *l, int rank, uint64_t seq) {
    return &l->posts[2 * rank + (int)(seq & 1)];
}
static unsigned char *ddp__payload_of(const ddp__local *l, int rank, uint64_t seq) {
    return l->payloads + (size_t)rank * DDP__PAYLOAD_STRIDE + (seq & 1) * (DDP__PAYLOAD + DDP__LINE);
}
static unsigned char *ddp__slot_of(const ddp__local *l, int rank, uint64_t round) {
    return l->slots + (size_t)rank * DDP__SLOT_STRIDE + (size_t)(round % DDP__SLOTS) * DDP__CHUNK;
}

/* Without FUTEX_PRIVATE_FLAG, because processes share the word. */
static void ddp__futex_wait(uint32_t *word, uint32_t value, int timeout_us) {
    struct timespec t = {timeout_us / 1000000, (long)(timeout_us % 1000000) * 1000};
    syscall(SYS_futex, word, 0 /* FUTEX_WAIT */, value, &t, NULL, 0);
}

static void ddp__pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static void ddp__prefetch_write(const void *line) {
#if defined(__x86_64__)
    /* The builtin prefetches for reading unless the compiler is given a CPU. */
    __asm__ __volatile__("prefetchw %0" : : "m"(*(const unsigned char *)line));
#else
    __builtin_prefetch(line, 1);
#endif
}

/* Changes the word first, so that a thread that is about to sleep does not. */
static void ddp__wake(ddp__sleeper *sleeper) {
    ddp__fetch_add(&sleeper->word, 1u);
    syscall(SYS_futex, &sleeper->word, 1 /* FUTEX_WAKE */, 64, NULL, NULL, 0);
}

static void ddp__wake_one(ddp__sleeper *sleeper) {
    if (ddp__load_relaxed(&sleeper->sleeping)) ddp__wake(sleeper);
}

static void ddp__wake_peers_slow(ddp__local *l) {
    for (int r = 0; r < l->world_size; r++) {
        ddp__sleeper *sleeper = &l->line[r].collective;
        if (r != l->rank && ddp__load_relaxed(&sleeper->waits_for) == l->rank) ddp__wake_one(sleeper);
    }
}

/* Wakes the ranks that sleep until this rank announces something. Called after each announcement. It reads
   the number of sleepers without a full fence, because a fence would wait for the store buffer in every call.
   So it can miss a rank that goes to sleep at this moment; that sleep lasts at most 2 ms. */
static inline void ddp__wake_peers(ddp__local *l) {
    if (__builtin_expect(ddp__load_relaxed(&l->control->sleepers) != 0, 0)) ddp__wake_peers_slow(l);
}

/* Records the first cause of the group's failure and wakes all ranks. Later causes are ignored. */
static void ddp__local_poison(ddp_group *group, void *state, ddp_result code, const char *text) {
    ddp__local *l = (ddp__local *)state;
    ddp__control *c = l->control;
    uint32_t healthy = 0;
    (void)group;
    if (!__atomic_compare_exchange_n(&c->poison, &healthy, 1u, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)) return;
    c->poison_code = (int32_t)code;
    snprintf(c->poison_text, sizeof c->poison_text, "%s", text);
    ddp__store(&c->poison, 2u);
    for (int r = 0; r < l->world_size; r++) {
        ddp__wake(&l->line[r].collective);
        ddp__wake(&l->line[r].p2p);
    }
}

#define DDP__POISON(l, code, ...) ddp__local_poison(NULL, l, ddp_fail(code, __VA_ARGS__), ddp_last_error())

/* Returns the pid of a rank of the job. 0: it has not joined, or is in another PID namespace. */
static int ddp__job_pid(const ddp__job *job, int job_rank) {
    return ddp__load(&job->rank[job_rank].state) == DDP__RANK_ABSENT ? 0 : job->rank[job_rank].pid;
}

static int ddp__pid_of(const ddp__local *l, int rank) {
    return ddp__job_pid(l->heap->job, l->job_rank[rank]);
}

/* Returns DDP_OK if the rank can take part in calls of this group. Otherwise writes the reason to text and
   returns DDP_ERR_PEER_LOST, or DDP_ERR_TIMEOUT if a group has timed out because of this rank. */
static ddp_result ddp__member_lost(ddp__local *l, int rank, char *text, size_t size) {
    ddp__job_rank *r = &l->heap->job->rank[l->job_rank[rank]];
    if (ddp__rank_is_gone(l->heap, l->job_rank[rank], l->cause_rank[rank], text, size))
        return DDP_ERR_PEER_LOST;
    if (ddp__load(&l->line[rank].left)) {
        snprintf(text, size, "rank %d (pid %d) has destroyed this group", l->cause_rank[rank], r->pid);
        return DDP_ERR_PEER_LOST;
    }
    if (ddp__load(&r->unresponsive) != DDP__UNRESPONSIVE) return DDP_OK;
    snprintf(text, size, "rank %d (pid %d) did not respond within %d ms in group=%s", l->cause_rank[rank],
             ddp__job_pid(l->heap->job, l->job_rank[rank]), r->unresponsive_ms, r->unresponsive_in);
    return DDP_ERR_TIMEOUT;
}

//== the local backend: timeouts ============================================================= >>impl-timeout
/* Each waiting rank publishes the call and the peer that it waits for. After a timeout these records lead to
   the rank that blocks the others. The waits may be in different groups:

       rank 2 waits for rank 0 ---> rank 0 waits for rank 3 ---> rank 3 waits for no rank: it blocks both  */

/* Publishes that this rank waits for rank `peer` in the call of words. It stores the words of the record one
   by one, without a lock. A reader may see a mix of two waits, and name a wrong call or rank. */
static void ddp__publish_wait(const ddp_group *group, ddp__local *l, const uint64_t words[2], uint64_t seq,
                              int peer) {
    uint64_t word[DDP__WAIT_WORDS] = {words[0] + 1, words[1], seq};
    uint64_t *wait = l->heap->job->rank[l->job_rank[l->rank]].wait;
    memcpy(word + DDP__WAIT_NAME, group->name, sizeof group->name);
    word[DDP__WAIT_TIME] = (uint64_t)(ddp_now() * 1e9);
    word[DDP__WAIT_PEER] = (uint64_t)(l->job_rank[peer] + 1);
    for (int i = 0; i < DDP__WAIT_WORDS; i++) __atomic_store_n(&wait[i], word[i], __ATOMIC_RELAXED);
}

static void ddp__publish_no_wait(ddp__local *l) {
    __atomic_store_n(&l->heap->job->rank[l->job_rank[l->rank]].wait[0], UINT64_C(0), __ATOMIC_RELAXED);
}

/* Reads the wait that a rank of the job has published. Returns 0 if the rank does not wait. A waiting rank
   renews its record every few milliseconds, so a record does not count if it is older than 1 s (or than half
   the timeout, if that is less). */
static int ddp__wait_of(const ddp__local *l, int job_rank, int timeout_ms, uint64_t word[DDP__WAIT_WORDS]) {
    double fresh = timeout_ms < 2000 ? timeout_ms * 0.5e-3 : 1.0;
    for (int i = 0; i < DDP__WAIT_WORDS; i++)
        word[i] = ddp__load_relaxed(&l->heap->job->rank[job_rank].wait[i]);
    return word[0] && ddp_now() - (double)word[DDP__WAIT_TIME] * 1e-9 < fresh;
}

/* Returns the rank of the job that blocks `job_rank`: follows the published waits to a rank that does not
   wait. Returns -1 if the waits form a cycle. Returns -1 also if the group has failed: ranks then stop
   waiting because of the failure, so another one than the last of the chain may be the cause. */
static int ddp__blocking_rank(const ddp__local *l, int job_rank, int timeout_ms) {
    uint64_t word[DDP__WAIT_WORDS];
    int blocker = job_rank;
    for (int steps = 0; steps < DDP_MAX_LOCAL_RANKS; steps++) {
        if (!ddp__wait_of(l, blocker, timeout_ms, word) || !word[DDP__WAIT_PEER])
            return ddp__load(&l->control->poison) ? -1 : blocker;
        blocker = (int)((word[DDP__WAIT_PEER] - 1) % DDP_MAX_LOCAL_RANKS);
    }
    return -1;
}

/* Called when this rank's timeout has passed while it waited for `rank`. Marks the rank that blocks `rank`,
   or `rank` itself, as unresponsive. Every other group with that rank then fails at once, not after a timeout
   of its own:
     local groups                                through ddp__job.rank, which all ranks read
     groups of this process on other backends    through ddp_group_mark_lost
   Of several groups that time out, the first one is recorded in ddp__job.rank. */
static void ddp__mark_unresponsive(ddp_group *group, ddp__local *l, int rank) {
    char text[64];
    int blocker = ddp__blocking_rank(l, l->job_rank[rank], group->desc.timeout_ms);
    uint32_t responsive = DDP__RESPONSIVE;
    if (blocker < 0 || blocker == l->job_rank[l->rank]) return;
    ddp__job_rank *r = &l->heap->job->rank[blocker];
    if (__atomic_compare_exchange_n(&r->unresponsive, &responsive, DDP__UNRESPONSIVE_SOON, 0,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        r->unresponsive_ms = group->desc.timeout_ms;
        memcpy(r->unresponsive_in, group->name, sizeof r->unresponsive_in);
        ddp__store(&r->unresponsive, (uint32_t)DDP__UNRESPONSIVE);
    }
    snprintf(text, sizeof text, "no response within %d ms (pid %d)", group->desc.timeout_ms,
             ddp__job_pid(l->heap->job, blocker));
    for (int p = 0; p < l->world_size; p++)
        if (l->job_rank[p] == blocker) ddp_group_mark_lost(group, p, DDP_ERR_TIMEOUT, text);
}

/* Describes a missing rank in the text of a timeout. If it waits in another call: this call, and the rank
   that blocks it. Otherwise: its world rank and pid. */
static void ddp__waiting_text(const ddp_group *group, const ddp__local *l, int rank, char *out, size_t size) {
    const ddp__job *job = l->heap->job;
    uint64_t word[DDP__WAIT_WORDS];
    int member = l->job_rank[rank], at;
    int blocker = ddp__blocking_rank(l, member, group->desc.timeout_ms);
    char call[72];
    if (!ddp__wait_of(l, member, group->desc.timeout_ms, word)) {
        int pid = ddp__job_pid(job, member);
        if (pid && l->parent)
            snprintf(out, size, " (rank %d: world rank %d, pid %d)", l->cause_rank[rank], member, pid);
        else if (pid)
            snprintf(out, size, " (rank %d: pid %d)", l->cause_rank[rank], pid);
        return;
    }
    word[0]--;
    ddp_call_describe(call, sizeof call, word);
    at = snprintf(out, size, "; rank %d was waiting in %s of group=%.31s (seq=%llu)", l->cause_rank[rank],
                  call, (const char *)(word + DDP__WAIT_NAME), (unsigned long long)word[2]);
    if (blocker >= 0 && blocker != member && at < (int)size)
        snprintf(out + at, size - (size_t)at, " for world rank %d (pid %d)", blocker,
                 ddp__job_pid(job, blocker));
}

/* Appends a rank to a list such as "0,1,5". A rank that does not fit is left out. */
static void ddp__list_rank(char *list, size_t room, int rank) {
    size_t used = strlen(list);
    if (used + 11 < room) snprintf(list + used, room - used, "%s%d", used ? "," : "", rank);
}

#define DDP__MISSING_TEXT "timed out after %d ms: arrived: rank %s; missing: rank %s"

/* Returns a rank's word of a wait, see >>impl-wait. */
static inline uint64_t ddp__load_word(const uint64_t *words, size_t stride, int rank) {
    return ddp__load((const uint64_t *)(const void *)((const unsigned char *)words + (size_t)rank * stride));
}

/* Called when this rank's timeout has passed. Writes the text with the ranks that have arrived and those that
   are missing, according to their words. Marks the ranks that block the missing ones. */
static void ddp__timeout_text(ddp_group *group, ddp__local *l, const uint64_t *words, size_t stride,
                              uint64_t target, char *out, size_t size) {
    char here[90] = "", missing[190] = "", waiting[176] = "";
    for (int r = 0; r < l->world_size; r++) {
        int arrived = r == l->rank || ddp__load_word(words, stride, r) >= target;
        ddp__list_rank(arrived ? here : missing, arrived ? sizeof here : sizeof missing, l->cause_rank[r]);
        if (arrived) continue;
        if (!waiting[0]) ddp__waiting_text(group, l, r, waiting, sizeof waiting);
        ddp__mark_unresponsive(group, l, r);
    }
    snprintf(out, size, DDP__MISSING_TEXT "%s", group->desc.timeout_ms, here[0] ? here : "none", missing,
             waiting);
}

//== the local backend: waiting ================================================================= >>impl-wait
/* Waits until a word of a peer, which only grows, reaches a target. Every rank has such a word, at the same
   distance from that of the rank before:

       words        words + stride     words + 2 * stride
       | rank 0     | rank 1           | rank 2             bytes

       wait for             words                          stride                      target
       an announcement      posts[seq % 2].seq             2 * sizeof(ddp__post)       seq of the call
       a round              line[0].count[c].rounds        sizeof(ddp__rank_state)     a round
       ddp_group_signal     word of rank 0                 stride of the region        the caller's

   The two round counters of a rank protect the slots. Round k uses slot k % 3 of each rank (DDP__SLOTS is 3):

       rank r   waits until FINISHED of all ranks >= k-3 --> writes its slot      --> its FILLED = k
       peer p   waits until FILLED of rank r >= k        --> reads that slot      --> its FINISHED = k

   A wait has three phases:

       spins    CPU pause          4000 polls       if ranks share cores: 20 polls
       yields   sched_yield        20 polls                               200 polls
       sleeps   futex              0.5, 1, then 2 ms each, until the peer announces something

   From the second phase on, each poll checks for a failure of the group and advances pending messages. After
   a sleep it checks the timeout, and every few milliseconds lost ranks. */

static void ddp__local_progress(ddp_group *group, ddp__local *l, const ddp__request *own, int may_skip);

/* Sleeps until the peer announces something, at most timeout_us. The value of the futex word is read before
   the last look at the peer's word: ddp__wake changes it, and the sleep then ends at once. */
static void ddp__sleep_for(ddp__local *l, int peer, const uint64_t *words, size_t stride, uint64_t target,
                           int timeout_us) {
    ddp__sleeper *me = &l->line[l->rank].collective;
    uint32_t value = ddp__load(&me->word);
    __atomic_store_n(&me->waits_for, peer, __ATOMIC_RELAXED);
    __atomic_store_n(&me->sleeping, 1u, __ATOMIC_SEQ_CST);
    ddp__fetch_add(&l->control->sleepers, 1u);
    if (ddp__load_word(words, stride, peer) < target && ddp__load(&l->control->poison) == 0)
        ddp__futex_wait(&me->word, value, timeout_us);
    ddp__fetch_add(&l->control->sleepers, (uint32_t)-1);
    __atomic_store_n(&me->sleeping, 0u, __ATOMIC_RELAXED);
}

/* Poisons the group if a rank that has not reached target is lost. Checks all of them: the rank that this
   wait is for may itself wait for the lost one. */
static void ddp__check_lost_ranks(ddp__local *l, const uint64_t *words, size_t stride, uint64_t target) {
    char text[DDP__TEXT_MAX];
    for (int r = 0; r < l->world_size; r++) {
        if (r == l->rank || ddp__load_word(words, stride, r) >= target) continue;
        ddp_result lost = ddp__member_lost(l, r, text, sizeof text);
        if (lost != DDP_OK
            && ddp__load_word(words, stride, r) < target) /* it may have reached target before it left */
            ddp__local_poison(NULL, l, lost, text);
    }
}

/* For ddp_group_wait_signal. If a rank announces its next collective before its word has reached target, the
   ranks make different calls and would wait for each other. Poisons the group in that case. */
static void ddp__check_missed_signal(const ddp_group *group, ddp__local *l, const uint64_t *words,
                                     size_t stride, uint64_t target) {
    char call[72];
    for (int r = 0; r < l->world_size && l->in_wait_signal; r++) {
        const ddp__post *post = ddp__post_of(l, r, group->seq + 1);
        if (r == l->rank || ddp__load(&post->seq) != group->seq + 1
            || ddp__load_word(words, stride, r) >= target)
            continue;
        ddp_call_describe(call, sizeof call, post->words);
        DDP__POISON(
            l, DDP_ERR_MISMATCH,
            "rank %d called %s before the signal that rank %d waits for; make the same calls on every rank",
            l->cause_rank[r], call, l->cause_rank[l->rank]);
    }
}

/* Publishes what this rank waits for: ddp_group_wait_signal, or the collective that it announced last. */
static void ddp__publish_own_wait(const ddp_group *group, ddp__local *l, int peer) {
    const uint64_t *words = ddp__post_of(l, l->rank, group->seq)->words;
    uint64_t signal[2];
    if (l->in_wait_signal) {
        ddp_call call = ddp__call_of(DDP_CALL_BARRIER, NULL, NULL, 0, DDP_U8);
        call.tag = DDP__TAG_WAIT_SIGNAL;
        ddp_call_pack(&call, signal);
        words = signal;
    }
    ddp__publish_wait(group, l, words, group->seq, peer);
}

/* The second and third phase of a wait. */
static ddp_result ddp__wait_word_slow(ddp_group *group, ddp__local *l, int peer, const uint64_t *words,
                                      size_t stride, uint64_t target) {
    char text[DDP__TEXT_MAX];
    double start = ddp_now(), checked = start;
    for (int tries = 0, slice_us = 500; ddp__load_word(words, stride, peer) < target; tries++) {
        if (ddp__load(&l->control->poison)) return DDP_ERR_POISONED;
        ddp__local_progress(group, l, NULL, 1);
        if (group->wait_fn) group->wait_fn(group->wait_argument);
        if (tries < l->yields) {
            sched_yield();
            continue;
        }
        ddp__sleep_for(l, peer, words, stride, target, slice_us);
        if (slice_us < 2000) slice_us *= 2;
        double now = ddp_now();
        /* The check of a process takes about 10 us: at most 1.25% of the time, for any number of ranks. */
        if (now - checked > 0.004 + 0.0008 * l->world_size) {
            checked = now;
            ddp__publish_own_wait(group, l, peer);
            ddp__check_lost_ranks(l, words, stride, target);
            ddp__check_missed_signal(group, l, words, stride, target);
        }
        if (now - start > group->desc.timeout_ms * 1e-3) {
            ddp__timeout_text(group, l, words, stride, target, text, sizeof text);
            if (!l->in_wait_signal)
                ddp__cause_of_collective(text, sizeof text, l->cause_rank[l->rank],
                                         ddp__post_of(l, l->rank, group->seq)->words, group->seq);
            if (ddp__load_word(words, stride, peer) < target)
                ddp__local_poison(NULL, l, DDP_ERR_TIMEOUT, text);
        }
    }
    ddp__publish_no_wait(l);
    return DDP_OK;
}

static inline ddp_result ddp__wait_word(ddp_group *group, ddp__local *l, int peer, const uint64_t *words,
                                        size_t stride, uint64_t target) {
    int spins = group->on_comm_thread ? l->spins / 16
                                      : l->spins; /* the communication thread competes with compute */
    for (int i = 0; i < spins; i++) {
        if (ddp__load_word(words, stride, peer) >= target) return DDP_OK;
        ddp__pause();
    }
    return ddp__wait_word_slow(group, l, peer, words, stride, target);
}

/* Waits until a counter of a peer has reached a round. Looks at the peer's line only if the last value that
   was read is too low. The signed difference makes a round before the first one, which has wrapped around,
   count as reached. */
static inline ddp_result ddp__wait_round(ddp_group *group, ddp__local *l, int counter, int peer,
                                         uint64_t round) {
    if ((int64_t)(l->seen[counter][peer] - round) >= 0) return DDP_OK;
    DDP_TRY(
        ddp__wait_word(group, l, peer, &l->line[0].count[counter].rounds, sizeof(ddp__rank_state), round));
    l->seen[counter][peer] = ddp__load(&l->line[peer].count[counter].rounds);
    return DDP_OK;
}

static ddp_result ddp__wait_all_finished(ddp_group *group, ddp__local *l, uint64_t round) {
    for (int i = 1; i < l->world_size; i++)
        DDP_TRY(ddp__wait_round(group, l, DDP__FINISHED, ddp__peer_at(l, i), round));
    return DDP_OK;
}

static void ddp__publish_round(ddp__local *l, int counter, uint64_t round) {
    ddp__store(&l->line[l->rank].count[counter].rounds, round);
    ddp__wake_peers(l);
}

//== the local backend: memory of peers ================================================= >>impl-local-memory
/* Addresses that are valid on all ranks of the machine, and access to the buffers of peers. A buffer is in:

     group memory      every process has mapped it: an offset of the heap, translated on each rank
     thread's memory   ranks are threads of one process: the pointer itself
     private memory    of another process: only process_vm_readv can read it, and the system may refuse */

/* Returns the group memory, of this group or a parent, that contains an offset of the heap or, with here, an
   address in this process. NULL = none. */
static const ddp__region *ddp__region_of(const ddp__local *l, uint64_t place, int here) {
    const ddp__region *region = NULL;
    pthread_mutex_t *lock = &l->heap->lock;
    pthread_mutex_lock(lock);
    for (; l && !region; l = l->parent)
        for (region = l->regions; region; region = region->next) {
            uint64_t start = here ? (uintptr_t)region->base : region->offset;
            if (place - start < region->total) break;
        }
    pthread_mutex_unlock(lock);
    return region;
}

/* Returns the pointer, in this process, to a buffer of a peer that is not private. */
static unsigned char *ddp__peer_pointer(const ddp__local *l, uint64_t address) {
    if (!address || l->heap->threads) return (unsigned char *)(uintptr_t)address;
    const ddp__region *region = ddp__region_of(l, address - 1, 0);
    return region ? region->base + (address - 1 - region->offset) : NULL;
}

/* Returns the address of [pointer, pointer + size) for peers: the pointer if ranks are threads; the heap
   offset + 1 of group memory; otherwise the pointer, marked as private. 0 = no buffer. */
#define DDP__PRIVATE (UINT64_C(1) << 63)
static uint64_t ddp__shared_address(const ddp__local *l, const void *pointer, size_t size) {
    if (!pointer || l->heap->threads) return (uint64_t)(uintptr_t)pointer;
    const ddp__region *region = ddp__region_of(l, (uintptr_t)pointer, 1);
    size_t inside = region ? (size_t)((const unsigned char *)pointer - region->base) : 0;
    return region && size <= region->total - inside ? region->offset + inside + 1
                                                    : DDP__PRIVATE | (uint64_t)(uintptr_t)pointer;
}

/* Copies from the memory of another process. Returns 0 if the system refuses it or the address is invalid. */
static int ddp__vm_read(int pid, void *dst, uint64_t address, size_t size_bytes) {
    for (size_t done = 0; done < size_bytes;) {
        struct iovec here = {(unsigned char *)dst + done, size_bytes - done};
        struct iovec there = {(unsigned char *)(uintptr_t)address + done, size_bytes - done};
        long n = syscall(SYS_process_vm_readv, (long)pid, &here, 1ul, &there, 1ul, 0ul);
        if (n <= 0) return 0;
        done += (size_t)n;
    }
    return 1;
}

/* Returns 1 if this rank can read the process of rank r, 0 if rank r has not published its probe yet, -1 if
   the system refuses or the pid belongs to another process here. */
static int ddp__can_read(ddp__local *l, int r) {
    uint64_t word = 0, probe = ddp__load(&l->line[r].probe);
    int can = ddp__load(&l->can_read[r]);
    if (can || !probe) return can;
    int reads = ddp__vm_read(ddp__pid_of(l, r), &word, probe, sizeof word);
    can = reads && word == l->line[r].probe_word ? 1 : -1;
    if (can < 0 && !ddp__load(&l->read_refused)) ddp__store(&l->read_refused, 1);
    ddp__store(&l->can_read[r], can);
    return can;
}

static int ddp__can_read_peers(ddp__local *l) {
    for (int i = 1; i < l->world_size; i++)
        if (l->heap->threads || ddp__can_read(l, ddp__peer_at(l, i)) <= 0) return 0;
    return 1;
}

/* Returns 1 if peers that can read this process can read the buffer. The system refuses pages of devices, and
   pinned or secret memory. */
static int ddp__can_be_read(const void *buffer, size_t size) {
    uint64_t first = (uint64_t)(uintptr_t)buffer;
    char byte;
    int pid = (int)getpid();
    return !buffer || !size
           || (ddp__vm_read(pid, &byte, first, 1) && ddp__vm_read(pid, &byte, first + size - 1, 1));
}

/* Ranks that are threads access each other's buffers. After the group has failed, no rank begins such an
   access. A failed call returns when the accesses of its peers have ended, because the caller then owns the
   buffers again. */
static int ddp__peer_access_begin(ddp__local *l) {
    if (!l->heap->threads) return 1;
    ddp__fetch_add(&l->line[l->rank].peer_accesses, 1u);
    if (__atomic_load_n(&l->control->poison, __ATOMIC_SEQ_CST) == 0) return 1;
    ddp__fetch_add(&l->line[l->rank].peer_accesses, (uint32_t)-1);
    return 0;
}

static void ddp__peer_access_end(ddp__local *l) {
    if (l->heap->threads) ddp__fetch_add(&l->line[l->rank].peer_accesses, (uint32_t)-1);
}

static void ddp__peer_access_wait(const ddp__local *l) {
    for (int r = 0; r < l->world_size && l->heap->threads; r++)
        while (r != l->rank && __atomic_load_n(&l->line[r].peer_accesses, __ATOMIC_SEQ_CST)) sched_yield();
}

/* Copies from a peer's buffer, group memory or private. A failed read poisons the group. */
static int ddp__read_peer(ddp__local *l, int peer, void *dst, uint64_t address, size_t size) {
    char text[DDP__TEXT_MAX];
    if (!(address & DDP__PRIVATE)) {
        memcpy(dst, ddp__peer_pointer(l, address), size);
        return 1;
    }
    if (ddp__vm_read(ddp__pid_of(l, peer), dst, address ^ DDP__PRIVATE, size)) return 1;
    int error = errno; /* the launcher may need a moment to record how the peer ended */
    for (double until = ddp_now() + 0.1; ddp_now() < until && !ddp__load(&l->control->poison); usleep(500))
        if (ddp__member_lost(l, peer, text, sizeof text) == DDP_ERR_PEER_LOST)
            ddp__local_poison(NULL, l, DDP_ERR_PEER_LOST, text);
    if (error == ESRCH)
        DDP__POISON(l, DDP_ERR_PEER_LOST, "rank %d (pid %d) no longer exists", l->cause_rank[peer],
                    ddp__pid_of(l, peer));
    else
        DDP__POISON(l, DDP_ERR_SYSTEM, "rank %d could not read the buffer of rank %d: %s",
                    l->cause_rank[l->rank], l->cause_rank[peer], strerror(error));
    return 0;
}

//== the local backend: the data of a call =================================================== >>impl-transfer
/* Describes one collective from the view of this rank: the bytes for and from each peer, their division into
   rounds, and the two steps that all methods of >>impl-local share: packing a round for the peers, and
   reducing or copying the data of the peers. */

#if !defined(DDP__LARGE_BYTES)
/* From this size on, a rank's share leaves the caches before its next use. Tests make it small. */
#define DDP__LARGE_BYTES ((size_t)4 << 20)
#endif
/* From this size on, a tuner chooses the method for private data. */
#define DDP__TUNED_BYTES (DDP__LARGE_BYTES / 4)

/* Sizes are in bytes. */
typedef struct ddp__transfer {
    const ddp_call *call;
    int shape;     /* DDP__ADDS and so on, from ddp__call_shapes */
    int same_data; /* 1 = all peers receive the same bytes */
    /* 1 = an all_reduce or reduce of more than a small message: rank r reduces share r of each chunk for all
       ranks that receive the result. */
    int shared;
    const unsigned char *send;
    unsigned char *recv;
    size_t element_bytes;
    size_t block_bytes;   /* count elements */
    size_t max_range;     /* the largest range between two ranks, over all pairs */
    size_t rounds;        /* number of rounds */
    size_t round_bytes;   /* room for one range in a round */
    size_t chunk;         /* shared: bytes of a round in a slot */
    size_t first_share;   /* shared: a rank's share in round 0; that chunk may be shorter */
    int method;           /* DDP__METHOD_* */
    size_t rounds_packed; /* rounds that are in this rank's slots already */
    ddp_tuner *tuner;     /* learns the time of the proposed method; or NULL */
} ddp__transfer;

DDP__FORCED_INLINE ddp__transfer ddp__transfer_of(const ddp_call *call) {
    ddp__transfer t;
    memset(&t, 0, sizeof t);
    t.call = call;
    t.shape = ddp__call_shapes[call->kind].shape;
    t.same_data = !(t.shape & DDP__SPLITS);
    t.send = (const unsigned char *)(call->kind == DDP_CALL_BROADCAST ? call->recv : call->send);
    t.recv = (unsigned char *)call->recv;
    t.element_bytes = ddp_dtype_size(call->dtype);
    t.block_bytes = call->count * t.element_bytes;
    t.max_range = t.block_bytes;
    t.round_bytes = t.block_bytes;
    t.method = DDP__METHOD_STAGED;
    return t;
}

/* Returns 1 if a rank receives the result of an all_reduce or reduce. */
static int ddp__receives(const ddp_call *call, int rank) {
    return call->kind == DDP_CALL_ALL_REDUCE || rank == call->root;
}

/* A rank's share of size bytes, in whole cache lines. The last ranks may have less or nothing. */
static size_t ddp__share_bytes(size_t size, int world_size) {
    return ((size + (size_t)world_size - 1) / (size_t)world_size + DDP__ALIGN - 1) / DDP__ALIGN * DDP__ALIGN;
}

static ddp_bytes ddp__share_range(size_t size, size_t share, int rank) {
    size_t begin = share * (size_t)rank < size ? share * (size_t)rank : size;
    ddp_bytes range = {begin, size - begin < share ? size - begin : share};
    return range;
}

/* Returns the bytes of a chunk of a shared call.
   On AMD medium sizes overlap, and chunks of 256 to 768 KiB are equally fast.
   On other CPUs the data of two rounds should fit the second-level cache, but chunks that fit the first-level
   cache are slow to read from another core. Chunks of 96 and 256 KiB take 10% more than chunks of 128 KiB,
   and 256 KiB of data in chunks of 64 KiB take 30% more. */
static size_t ddp__chunk_bytes(const ddp__local *l, size_t block_bytes) {
    size_t lines = (size_t)l->world_size * DDP__ALIGN; /* shares of whole cache lines */
    size_t max_chunk = DDP__CHUNK / lines * lines;
    if (!l->is_amd) return DDP__CHUNK / 4;
    size_t chunk = block_bytes <= 4 * 65536 ? 65536 : ddp_round_up(block_bytes / 4, lines);
    return chunk < max_chunk ? chunk : max_chunk;
}

/* Divides a call into rounds through slots. */
static void ddp__transfer_set_rounds(const ddp__local *l, ddp__transfer *t) {
    size_t w = (size_t)l->world_size;
    if (t->shared) {
        t->chunk = ddp__chunk_bytes(l, t->block_bytes);
        t->rounds = (t->block_bytes + t->chunk - 1) / t->chunk;
        t->round_bytes = ddp__share_bytes(t->chunk, l->world_size);
        t->first_share = ddp__share_bytes(t->block_bytes - (t->rounds - 1) * t->chunk, l->world_size);
    } else {
        t->round_bytes = t->same_data ? DDP__CHUNK : DDP__CHUNK / w / DDP__ALIGN * DDP__ALIGN;
        t->rounds = (t->max_range + t->round_bytes - 1) / t->round_bytes;
    }
}

/* The bytes of `send` that `rank` sends to a peer, which may be the rank itself. */
DDP__FORCED_INLINE ddp_bytes ddp__send_range(int rank, const ddp__transfer *t, int peer) {
    const ddp_call *call = t->call;
    ddp_bytes range = {t->same_data ? 0 : (size_t)peer * t->block_bytes, t->block_bytes};
    if (t->shape & DDP__FROM_ROOT && rank != call->root) range.size = 0;
    if (t->shape & DDP__TO_ROOT && peer != call->root) range.size = 0;
    if (!call->recv_counts) return range;
    range.begin = t->same_data ? 0 : call->send_offsets[peer] * t->element_bytes;
    range.size = (t->same_data ? call->recv_counts[rank] : call->send_counts[peer]) * t->element_bytes;
    return range;
}

/* The bytes of `recv` that `rank` receives from a peer, which may be the rank itself. */
DDP__FORCED_INLINE ddp_bytes ddp__recv_range(int rank, const ddp__transfer *t, int peer) {
    const ddp_call *call = t->call;
    const int joins = t->shape & DDP__JOINS;
    ddp_bytes range = {joins ? (size_t)peer * t->block_bytes : 0, t->block_bytes};
    if (t->shape & DDP__FROM_ROOT && peer != call->root) range.size = 0;
    if (t->shape & DDP__TO_ROOT && rank != call->root) range.size = 0;
    if (!call->recv_counts) return range;
    range.begin = joins ? call->recv_offsets[peer] * t->element_bytes : 0;
    range.size = call->recv_counts[peer] * t->element_bytes;
    return range;
}

/* Returns the part of a range, or of a rank's share, that round k transfers. Shared chunks go in reverse
   order, because the owner wrote the end of a buffer last and has it in its cache: 64 MiB take 10% less.

       not shared   |- round 0 -|- round 1 -|- 2 -|      shared   |- round 2 -|- round 1 -|- 0 -|   */
DDP__FORCED_INLINE ddp_bytes ddp__round_range(const ddp__transfer *t, ddp_bytes range, size_t k, int rank) {
    size_t at = k * t->round_bytes;
    if (t->shared) {
        at = (t->rounds - 1 - k) * t->chunk;
        range = k ? ddp__share_range(t->chunk, t->round_bytes, rank)
                  : ddp__share_range(t->block_bytes - at, t->first_share, rank);
    } else if (range.size <= at) {
        range.size = 0;
    } else {
        range.size = range.size - at < t->round_bytes ? range.size - at : t->round_bytes;
    }
    range.begin += at;
    return range;
}

/* The offset, in a payload or slot, of the data for rank `to`. */
DDP__FORCED_INLINE size_t ddp__slot_offset(const ddp__transfer *t, int to) {
    return t->same_data ? 0 : (size_t)to * t->round_bytes;
}

/* Copies the data that a rank sends to itself. Reductions read it as one of their sources instead. */
DDP__FORCED_INLINE void ddp__copy_own_range(int rank, const ddp__transfer *t) {
    if (t->shape & DDP__ADDS) return;
    ddp_bytes from = ddp__send_range(rank, t, rank), to = ddp__recv_range(rank, t, rank);
    if (from.size && to.size && t->recv + to.begin != t->send + from.begin)
        memcpy(t->recv + to.begin, t->send + from.begin, to.size);
}

/* Copies round k from send into this rank's payload or slot. */
DDP__FORCED_INLINE void ddp__pack_round(const ddp__local *l, const ddp__transfer *t, unsigned char *out,
                                        size_t k, int streaming) {
    for (int p = 0; p < l->world_size; p++) {
        if (p == l->rank) continue;
        ddp_bytes from = ddp__round_range(t, ddp__send_range(l->rank, t, p), k, p);
        if (!from.size) continue;
        (streaming ? ddp__copy_stream : ddp__copy_across)(out + ddp__slot_offset(t, p), t->send + from.begin,
                                                          from.size);
        if (t->same_data) break;
    }
    if (streaming) ddp__stream_end();
}

/* Prepares the reduction of round k. sources[p]: this rank's share of the data of peer p; this rank becomes a
   source, too. Sets *out_count and outs: this rank's part of recv if it receives the result in this call,
   and, in a shared call, results[p] of each other rank that receives it. Returns the number of
   elements. */
DDP__FORCED_INLINE size_t ddp__reduce_outputs(const ddp__local *l, const ddp__transfer *t, void **sources,
                                              void *const *results, size_t k, void **outs, int *out_count) {
    const ddp_call *call = t->call;
    int n = 0;
    ddp_bytes to = ddp__round_range(t, ddp__recv_range(l->rank, t, l->rank), k, l->rank);
    ddp_bytes from = ddp__round_range(t, ddp__send_range(l->rank, t, l->rank), k, l->rank);
    if (!t->shared || ddp__receives(call, l->rank)) outs[n++] = t->recv + to.begin;
    for (int r = 0; r < l->world_size && t->shared; r++)
        if (r != l->rank && ddp__receives(call, r)) outs[n++] = results[r];
    sources[l->rank] = (void *)(uintptr_t)(t->send + from.begin); /* ddp__reduce_tree only reads it */
    *out_count = n;
    return to.size >> __builtin_ctzll(t->element_bytes); /* a division takes 5 ns */
}

/* For data with one reader, on AMD: the reader writes a byte into every line that it has read, and so owns
   the line. The sender's next write into it then takes 1 to 2.5 ns instead of 7 to 28 ns. 1 KiB takes half
   the time, a staged all-gather between distant cores a third. On Intel the next write takes the same time,
   and the byte costs 10%. */
static void ddp__own_lines(unsigned char *data, size_t size) {
    for (size_t i = 0; i < size && size > sizeof((ddp__post *)0)->data; i += 64)
        *(volatile unsigned char *)(data + i) = 0;
}

/* Reduces or copies round k into recv. sources[p]: the data of peer p for this rank, in payloads or slots. */
DDP__FORCED_INLINE void ddp__unpack_round(const ddp__local *l, const ddp__transfer *t, void **sources,
                                          size_t k, int hint) {
    int adds = t->shape & DDP__ADDS;
    int streaming = hint == DDP__HINT_STREAM;
    int one_reader = !t->shared && (!t->same_data || l->world_size == 2);
    int own_lines = l->is_amd && !streaming && one_reader;
    if (adds) {
        void *outs[DDP_MAX_LOCAL_RANKS];
        int out_count;
        size_t count = ddp__reduce_outputs(l, t, sources, sources, k, outs, &out_count);
        if (count)
            ddp__reduce_tree(outs, out_count, (const void *const *)sources, l->world_size, count,
                             t->call->dtype, t->call->op, t->call->divisor, hint);
    }
    for (int p = 0; p < l->world_size && (!adds || own_lines); p++) {
        ddp_bytes to = ddp__round_range(t, ddp__recv_range(l->rank, t, p), k, p);
        if (p == l->rank || !to.size) continue;
        if (!adds) (streaming ? ddp__copy_stream : ddp__copy_across)(t->recv + to.begin, sources[p], to.size);
        if (own_lines) ddp__own_lines((unsigned char *)sources[p], to.size);
    }
    if (streaming) ddp__stream_end();
}

/* --- the counts of _v calls --- */

/* Per peer: elements to send, their offset in send, and elements to receive. Each rank stores its counts in
   its payload. */
typedef struct ddp__counts {
    uint64_t send[DDP_MAX_LOCAL_RANKS], send_offset[DDP_MAX_LOCAL_RANKS], recv[DDP_MAX_LOCAL_RANKS];
} ddp__counts;

static ddp__counts *ddp__counts_of(const ddp__local *l, int rank, const ddp_call *call) {
    return (ddp__counts *)(void *)ddp__payload_of(l, rank, call->seq);
}

/* Stores this rank's counts in its payload, before the announcement. */
static void ddp__counts_publish(const ddp__local *l, ddp__transfer *t) {
    const ddp_call *call = t->call;
    ddp__counts *counts = ddp__counts_of(l, l->rank, call);
    t->max_range = 0;
    for (int p = 0; p < l->world_size; p++) {
        size_t recv_bytes = call->recv_counts[p] * t->element_bytes;
        if (recv_bytes > t->max_range) t->max_range = recv_bytes;
        counts->send[p] = call->send_counts ? call->send_counts[p] : call->recv_counts[l->rank];
        counts->send_offset[p] = call->send_offsets ? call->send_offsets[p] : 0;
        counts->recv[p] = call->recv_counts[p];
    }
}

/* Compares the counts that all ranks have announced, and computes the number of rounds. Returns 0 after a
   mismatch; the failure names the ranks that disagree. */
static int ddp__counts_compare(ddp__local *l, ddp__transfer *t) {
    for (int from = 0; from < l->world_size; from++)
        for (int to = 0; to < l->world_size; to++) {
            unsigned long long sent = ddp__counts_of(l, from, t->call)->send[to];
            unsigned long long expected = ddp__counts_of(l, to, t->call)->recv[from];
            if (sent * t->element_bytes > t->max_range) t->max_range = (size_t)sent * t->element_bytes;
            if (sent == expected) continue;
            if (t->same_data)
                DDP__POISON(l, DDP_ERR_MISMATCH,
                            "counts disagree: recv_counts[%d] is %llu on rank %d and %llu on rank %d", from,
                            sent, from, expected, to);
            else
                DDP__POISON(l, DDP_ERR_MISMATCH,
                            "counts disagree: rank %d sends %llu elements to rank %d, which expects %llu",
                            from, sent, to, expected);
            return 0;
        }
    ddp__transfer_set_rounds(l, t);
    return 1;
}

//== the local backend: collectives ============================================================= >>impl-local
/* Executes a collective by one of three methods. All ranks choose the same one, >>impl-local-run.

   small    The sender's payload contains the data when its announcement arrives. Every rank reads all
            payloads. One wait.
   direct   Ranks access the buffers of their peers. Rank r reduces share r of all buffers and stores the sum
            in all of them. Two waits.
   staged   Private memory goes through slots in shared memory, chunk by chunk.

   A direct all-reduce with W=2; rank 0 has the share 0, rank 1 the share 1:
       rank 0   a0 + b0 --> recv0[0], recv1[0]           rank 1   a1 + b1 --> recv0[1], recv1[1]

   A staged all-reduce with W=2, one round. (The last writer of a line determines the cost of the next write.)
       rank 0   send [a0|a1] --a1--> slot0 [  |a1]            recv [a0+b0| <- slot0 ]
       rank 1   send [b0|b1] --b0--> slot1 [b0|  ]            recv [ slot1 ->|a1+b1]
                rank 0 stores a0 + slot1.b0 in recv and slot1
                rank 1 stores slot0.a1 + b1 in recv and slot0

   Three rounds are in flight, one per slot, so that round k+1 is packed before the wait for round k:
       step     0        1         2         3         4
       pack     round 0  round 1   round 2   round 3
       reduce            round 0   round 1   round 2   round 3     (or copy to recv)
       drain                       round 0   round 1   round 2     (all_reduce and reduce) */

/* Announces the call and waits until all ranks have announced the same. */
static ddp_result ddp__post_call(ddp_group *group, ddp__local *l, const ddp_call *call, uint64_t send,
                                 uint64_t recv) {
    ddp__post *mine = ddp__post_of(l, l->rank, call->seq);
    uint64_t signature = ddp__signature(call);
    mine->words[0] = signature;
    mine->words[1] = call->count;
    mine->send = send;
    mine->recv = recv;
    ddp__store(&mine->seq, call->seq);
    ddp__wake_peers(l);
    for (int i = 1; i < l->world_size; i++) {
        int peer = ddp__peer_at(l, i);
        const ddp__post *post = ddp__post_of(l, peer, call->seq);
        DDP_TRY(
            ddp__wait_word(group, l, peer, &l->posts[call->seq & 1].seq, 2 * sizeof(ddp__post), call->seq));
        if (ddp__compared_bits(post->words[0] ^ signature) == 0 && post->words[1] == call->count) continue;
        ddp__local_poison(NULL, l, ddp_call_compare(peer, post->words, l->rank, mine->words),
                          ddp_last_error());
        return DDP_ERR_POISONED;
    }
    return DDP_OK;
}

/* The data of a rank in a small call: in its announcement if it fits there, otherwise in its payload. */
static unsigned char *ddp__small_of(const ddp__local *l, int rank, const ddp_call *call, size_t size) {
    return size <= sizeof l->posts->data ? ddp__post_of(l, rank, call->seq)->data
                                         : ddp__payload_of(l, rank, call->seq);
}

DDP__FORCED_INLINE ddp_result ddp__transfer_small(ddp_group *group, ddp__local *l, const ddp__transfer *t) {
    size_t size = t->same_data ? t->block_bytes : t->block_bytes * (size_t)l->world_size;
    void *sources[DDP_MAX_LOCAL_RANKS];
    ddp__pack_round(l, t, ddp__small_of(l, l->rank, t->call, size), 0, 0);
    DDP_TRY(ddp__post_call(group, l, t->call, 0, 0));
    /* The next call writes into the payload of the previous call, which no rank reads any more. Its lines are
       prefetched for writing now, while this rank waits for the data of its peers: 1 KiB takes a third
       less. */
    unsigned char *next = ddp__payload_of(l, l->rank, t->call->seq + 1);
    for (size_t i = 0; i < size && size > sizeof l->posts->data; i += 64) ddp__prefetch_write(next + i);
    ddp__copy_own_range(l->rank, t);
    for (int p = 0; p < l->world_size; p++)
        sources[p] = ddp__small_of(l, p, t->call, size) + ddp__slot_offset(t, l->rank);
    ddp__unpack_round(l, t, sources, 0, DDP__HINT_CACHED);
    return DDP_OK;
}

/* --- direct --- */

/* Returns the hint of ddp__reduce_tree for a share of group memory. Data that a peer has just written is
   read in several runs at any size, except on AMD: 1 MiB takes 16% less. */
static int ddp__share_hint(const ddp__local *l, size_t size) {
    if (size >= DDP__LARGE_BYTES / 4) return DDP__HINT_STREAM;
    return l->is_amd ? DDP__HINT_CACHED : DDP__HINT_LARGE;
}

/* The address of the data that a peer sends to this rank in round k. part: the part of round k, as a range of
   the buffer of a shared call. */
static uint64_t ddp__peer_data(const ddp__local *l, const ddp__transfer *t, int peer, ddp_bytes part,
                               size_t k) {
    uint64_t send = ddp__post_of(l, peer, t->call->seq)->send;
    uint64_t begin = 0; /* of the data for this rank in the peer's buffer */
    if (t->shared) return send + part.begin;
    if (t->call->recv_counts)
        begin = ddp__counts_of(l, peer, t->call)->send_offset[l->rank] * t->element_bytes;
    else if (!t->same_data)
        begin = (size_t)l->rank * t->block_bytes;
    return send + begin + k * t->round_bytes;
}

/* PUSH: writes this rank's block into the buffers of all peers, with streaming stores. So no rank reads lines
   that are new in another core's cache, which is slow. */
static void ddp__push_block(const ddp__local *l, const ddp__transfer *t) {
    for (int i = 1; i < l->world_size; i++) {
        const ddp__post *post = ddp__post_of(l, ddp__peer_at(l, i), t->call->seq);
        unsigned char *recv = ddp__peer_pointer(l, post->recv);
        ddp__copy_stream(recv + (size_t)l->rank * t->block_bytes, t->send, t->block_bytes);
    }
    ddp__stream_end();
}

/* Reads the buffers of the senders, and writes shared results into the buffers of the receivers.
     DIRECT   The buffers that peers access are group memory, or ranks are threads.
     READ     Private memory is read in one copy. Sources of a reduction are read round by round into this
              rank's slot, which stays in cache.
     PUSH     A large all-gather, see ddp__push_block. */
static ddp_result ddp__transfer_direct(ddp_group *group, ddp__local *l, ddp__transfer *t) {
    int adds = t->shape & DDP__ADDS, read = t->method == DDP__METHOD_READ;
    unsigned char *scratch = ddp__slot_of(l, l->rank, l->round);
    void *sources[DDP_MAX_LOCAL_RANKS], *results[DDP_MAX_LOCAL_RANKS];
    void *outs[DDP_MAX_LOCAL_RANKS];
    int out_count;
    t->first_share = ddp__share_bytes(t->block_bytes, l->world_size);
    int hint = ddp__share_hint(l, t->shared ? t->first_share : t->max_range);
    if (adds && read) {
        DDP_TRY(ddp__wait_all_finished(group, l, l->round)); /* peers have finished with the slot */
    } else {
        t->rounds = t->method != DDP__METHOD_PUSH;
        t->round_bytes = t->max_range;
    }
    if (!ddp__peer_access_begin(l)) return DDP_ERR_POISONED;
    ddp__copy_own_range(l->rank, t);
    for (size_t k = 0; k < t->rounds; k++) {
        for (int i = 1; i < l->world_size; i++) {
            int p = ddp__peer_at(l, i);
            const ddp__post *post = ddp__post_of(l, p, t->call->seq);
            ddp_bytes part = ddp__round_range(t, ddp__recv_range(l->rank, t, p), k, l->rank);
            uint64_t address = ddp__peer_data(l, t, p, part, k);
            if (part.size == 0) continue;
            if (!adds)
                sources[p] = t->recv + part.begin;
            else if (read)
                sources[p] = scratch + (size_t)p * t->round_bytes;
            else
                sources[p] = ddp__peer_pointer(l, address);
            results[p] = sources[p];
            if (t->shared && post->recv && post->recv != post->send)
                results[p] = ddp__peer_pointer(l, post->recv) + part.begin;
            if ((read || !adds) && !ddp__read_peer(l, p, sources[p], address, part.size)) {
                ddp__peer_access_end(l);
                return DDP_ERR_POISONED;
            }
        }
        if (!adds) continue;
        size_t count = ddp__reduce_outputs(l, t, sources, results, k, outs, &out_count);
        if (count)
            ddp__reduce_tree(outs, out_count, (const void *const *)sources, l->world_size, count,
                             t->call->dtype, t->call->op, t->call->divisor, hint);
    }
    if (t->method == DDP__METHOD_PUSH) ddp__push_block(l, t);
    ddp__peer_access_end(l);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    /* after a failure a peer may have changed its buffer */
    if (ddp__load(&l->control->poison)) return DDP_ERR_POISONED;
    ddp__publish_round(l, DDP__FINISHED, ++l->round);
    /* until all ranks have finished with this rank's buffers */
    return ddp__wait_all_finished(group, l, l->round);
}

/* --- staged --- */

/* Returns 1 if one loop packs round k, reduces round k - 1 and drains round k - 2 (two ranks only). Reads
   from memory and reads of lines that the other core wrote then overlap. With stores of whole lines 1 MiB
   takes 3% less and 4 MiB take 10% less; without them it is faster from 16 MiB on. On AMD it has not been
   measured. */
static int ddp__can_fuse_step(const ddp__local *l, const ddp__transfer *t, size_t k) {
    const ddp_call *call = t->call;
    int power_of_two = (call->divisor & (call->divisor - 1)) == 0;
    int is_sum = call->op == DDP_OP_SUM || (call->op == DDP_OP_AVG && power_of_two);
    size_t min_bytes = ddp__has_wide_stores() ? DDP__LARGE_BYTES / 8 : 2 * DDP__LARGE_BYTES;
    return k > 2 && k < t->rounds && t->shared && l->world_size == 2 && !l->is_amd
           && t->block_bytes >= min_bytes && call->kind == DDP_CALL_ALL_REDUCE && call->dtype == DDP_F32
           && is_sum;
}

/* Executes that loop for step k:
       pack     this rank's send           -> this rank's slot of round k
       reduce   own send + the peer's slot -> recv and the peer's slot, round k - 1
       drain    this rank's slot           -> recv, round k - 2 */
static ddp_result ddp__staged_step_fused(ddp_group *group, ddp__local *l, const ddp__transfer *t,
                                         uint64_t first, size_t k) {
    int me = l->rank, peer = !me;
    /* all parts have the same size, because none is in round 0 */
    ddp_bytes pack = ddp__round_range(t, ddp__send_range(l->rank, t, peer), k, peer);
    ddp_bytes sum = ddp__round_range(t, ddp__recv_range(l->rank, t, me), k - 1, me);
    ddp_bytes drain = ddp__round_range(t, ddp__send_range(l->rank, t, peer), k - 2, peer);
    void *peer_slot = ddp__slot_of(l, peer, first + k - 1) + ddp__slot_offset(t, me);
    void *own_send = (void *)(uintptr_t)(t->send + sum.begin);
    const void *sources[2] = {me ? peer_slot : own_send, me ? own_send : peer_slot}; /* in rank order */
    void *sums[2] = {t->recv + sum.begin, peer_slot};
    void *copy_to[2] = {ddp__slot_of(l, me, first + k) + ddp__slot_offset(t, peer), t->recv + drain.begin};
    void *copy_from[2] = {(void *)(uintptr_t)(t->send + pack.begin),
                          ddp__slot_of(l, me, first + k - 2) + ddp__slot_offset(t, peer)};
    uint64_t divisor = t->call->op == DDP_OP_AVG && t->call->divisor ? t->call->divisor : 1;
    const ddp__reduction r = {
        sums, sources, 2, 2, DDP_F32, sizeof(float), divisor, ddp__merge_sum_f32, 0, 0, copy_to, copy_from};
    size_t count = sum.size / sizeof(float), runs = ddp__run_count();
    size_t run = count / runs / DDP__LANES * DDP__LANES;
    DDP_TRY(ddp__wait_all_finished(group, l, first + k - 2));
    DDP_TRY(ddp__wait_round(group, l, DDP__FILLED, peer, first + k - 1));
    ddp__reduce_fused(&r, 0, run, runs);
    ddp__reduce_fused(&r, runs * run, count - runs * run, 1);
    ddp__publish_round(l, DDP__FILLED, first + k);
    ddp__publish_round(l, DDP__FINISHED, first + k - 1);
    return DDP_OK;
}

/* Transfers data round by round through slots. Step k packs round k, reduces or copies round k - 1, and
   drains round k - 2. */
static ddp_result ddp__transfer_staged(ddp_group *group, ddp__local *l, const ddp__transfer *t) {
    uint64_t first = l->round + 1;
    int streaming = t->method == DDP__METHOD_STREAMED;
    void *sources[DDP_MAX_LOCAL_RANKS];
    l->round += t->rounds;
    for (size_t k = t->rounds_packed; k <= t->rounds + (size_t)t->shared; k++) {
        if (ddp__can_fuse_step(l, t, k)) {
            DDP_TRY(ddp__staged_step_fused(group, l, t, first, k));
            continue;
        }
        if (k < t->rounds) {
            /* no rank uses the slot any more */
            DDP_TRY(ddp__wait_all_finished(group, l, first + k - DDP__SLOTS));
            ddp__pack_round(l, t, ddp__slot_of(l, l->rank, first + k), k, streaming);
            ddp__publish_round(l, DDP__FILLED, first + k);
        }
        if (k == t->rounds_packed) ddp__copy_own_range(l->rank, t);
        if (k > 0 && k <= t->rounds) {
            for (int i = 1; i < l->world_size; i++) {
                int p = ddp__peer_at(l, i);
                int receives = t->shared
                               || ddp__round_range(t, ddp__recv_range(l->rank, t, p), k - 1, p).size;
                if (receives) DDP_TRY(ddp__wait_round(group, l, DDP__FILLED, p, first + k - 1));
                sources[p] = ddp__slot_of(l, p, first + k - 1) + ddp__slot_offset(t, l->rank);
            }
            ddp__unpack_round(l, t, sources, k - 1, streaming ? DDP__HINT_STREAM : DDP__HINT_LARGE);
            ddp__publish_round(l, DDP__FINISHED, first + k - 1);
        }
        if (k < 2 || !t->shared) continue;
        /* the peers have stored their sums in this rank's slot */
        DDP_TRY(ddp__wait_all_finished(group, l, first + k - 2));
        for (int p = 0; p < l->world_size && ddp__receives(t->call, l->rank); p++) {
            ddp_bytes part = ddp__round_range(t, ddp__send_range(l->rank, t, p), k - 2, p);
            unsigned char *slot = ddp__slot_of(l, l->rank, first + k - 2);
            if (p != l->rank)
                ddp__copy_across(t->recv + part.begin, slot + ddp__slot_offset(t, p), part.size);
        }
    }
    return DDP_OK;
}

//== the local backend: choice of the method ================================================ >>impl-local-run
/* Announces a call, with a proposal for its method, and runs it. Large private data has three methods:
     STAGED     through slots that stay in cache
     STREAMED   through slots that bypass the caches. Fast if reading lines that are new in another core's
                cache takes longer than reading memory (distant cores of AMD)
     READ       in one copy by process_vm_readv, if the system allows it (the fastest on Intel)
   The best method changes over time, because virtual cores migrate. So rank 0 proposes the method that was
   fastest recently, or from time to time another one. Every rank announces whether its buffer can be read. */

typedef struct ddp__proposal {
    uint8_t method, readable;
} ddp__proposal;

static ddp__proposal *ddp__proposal_of(const ddp__local *l, int rank, const ddp_call *call) {
    return (ddp__proposal *)(void *)ddp__post_of(l, rank, call->seq)->data;
}

/* Returns the fastest method, or from time to time another one. */
DDPDEF int ddp_tuner_pick(ddp_tuner *tuner, int methods) {
    int best = 0;
    for (int method = 1; method < methods; method++)
        if (tuner->seconds[method] < tuner->seconds[best]) best = method; /* 0: never tried */
    if (++tuner->calls % 64 == 0 || (tuner->calls & (tuner->calls - 1)) == 0)
        best = (best + 1 + (int)(tuner->tries++ % (uint64_t)(methods - 1))) % methods;
    return best;
}

/* A faster time counts at once, a slower one gradually: another process may have caused it. */
DDPDEF void ddp_tuner_learn(ddp_tuner *tuner, int method, double seconds) {
    double *known = &tuner->seconds[method];
    *known = *known > 0 && seconds > *known * 1.05 ? *known * 1.05 : seconds;
}

/* Proposes a method in this rank's announcement. Returns its tuner, or NULL for sizes at which all methods
   are equally fast. send_bytes: bytes of send that peers read. */
static ddp_tuner *ddp__method_propose(ddp__local *l, const ddp__transfer *t, size_t send_bytes) {
    int kind = t->shape & DDP__FROM_ROOT ? DDP__TUNER_ONE_SENDER : DDP__TUNER_COPY;
    int power = 0;
    size_t size = t->max_range;
    if (t->shape & DDP__ADDS) {
        kind = DDP__TUNER_REDUCE;
        size *= (size_t)l->world_size;
    }
    if (size < DDP__TUNED_BYTES) return NULL;
    while (power < 15 && size >> (power + 21)) power++;
    ddp_tuner *tuner = &l->tuner[kind][power];
    ddp__proposal *proposal = ddp__proposal_of(l, l->rank, t->call);
    proposal->method = (uint8_t)ddp_tuner_pick(tuner, DDP__TUNED_METHODS);
    proposal->readable = (uint8_t)(ddp__can_read_peers(l) && ddp__can_be_read(t->send, send_bytes));
    return tuner;
}

/* Announces a call of more than a small message, or a _v call. All ranks choose the same method for it. */
static ddp_result ddp__transfer_begin(ddp_group *group, ddp__local *l, ddp__transfer *t) {
    const ddp_call *call = t->call;
    int push = call->kind == DDP_CALL_ALL_GATHER && t->block_bytes >= DDP__LARGE_BYTES;
    size_t send_bytes = 0; /* from the start of send to the end of the last range that peers read */
    for (int p = 0; p < l->world_size; p++) {
        ddp_bytes range = ddp__send_range(l->rank, t, p);
        if (range.size && range.begin + range.size > send_bytes) send_bytes = range.begin + range.size;
    }
    uint64_t send = ddp__shared_address(l, send_bytes ? t->send : NULL, send_bytes);
    uint64_t sends = send, recv = 0, recvs = 0;
    t->shared = t->same_data && t->shape & DDP__ADDS;
    t->same_data &= !t->shared;
    if (t->shared && ddp__receives(call, l->rank))
        recv = call->recv == call->send ? send : ddp__shared_address(l, t->recv, t->block_bytes);
    if (push) recv = ddp__shared_address(l, t->recv, t->block_bytes * (size_t)l->world_size);
    if (call->recv_counts) ddp__counts_publish(l, t);
    int tuned = !call->send_counts && !t->shared;
    ddp_tuner *tuner = tuned ? ddp__method_propose(l, t, send_bytes) : NULL;
    /* the call is staged in any case, so the first round is in the slot before the announcement */
    t->rounds_packed = !tuner && !call->recv_counts && (send | recv) & DDP__PRIVATE;
    ddp__transfer_set_rounds(l, t);
    if (t->rounds_packed) {
        DDP_TRY(ddp__wait_all_finished(group, l, l->round + 1 - DDP__SLOTS));
        ddp__pack_round(l, t, ddp__slot_of(l, l->rank, l->round + 1), 0, 0);
        ddp__store(&l->line[l->rank].count[DDP__FILLED].rounds, l->round + 1);
    }
    DDP_TRY(ddp__post_call(group, l, call, send, recv));
    if (call->recv_counts && !ddp__counts_compare(l, t)) return DDP_ERR_POISONED;
    int readable = 1;
    for (int r = 0; r < l->world_size; r++) {
        sends |= ddp__post_of(l, r, call->seq)->send;
        recvs |= ddp__post_of(l, r, call->seq)->recv;
        readable &= ddp__proposal_of(l, r, call)->readable;
    }
    uint64_t accessed = t->shared ? sends | recvs : sends; /* the buffers that peers access */
    if (push && !(recvs & DDP__PRIVATE)) {
        t->method = DDP__METHOD_PUSH;
    } else if (!(accessed & DDP__PRIVATE)) {
        t->method = DDP__METHOD_DIRECT;
    } else if (tuner) {
        t->tuner = tuner;
        t->method = ddp__proposal_of(l, 0, call)->method;
        if (t->method == DDP__METHOD_READ && !readable) t->method = DDP__METHOD_STAGED;
    }
    return DDP_OK;
}

static ddp_result ddp__local_run(ddp_group *group, void *state, const ddp_call *call) {
    ddp__local *l = (ddp__local *)state;
    ddp__transfer t = ddp__transfer_of(call);
    int small = t.block_bytes <= (l->world_size == 2 ? 1024 : 512)
                && t.block_bytes * (t.same_data ? 1 : (size_t)l->world_size) <= DDP__PAYLOAD;
    ddp_result result;
    if (ddp__load(&l->control->poison)) return DDP_ERR_POISONED;
    if (call->kind == DDP_CALL_BARRIER) {
        result = ddp__post_call(group, l, call, 0, 0);
    } else if (!small || call->recv_counts) {
        ddp__transfer large = t; /* so that t stays in registers */
        result = ddp__transfer_begin(group, l, &large);
        double start = large.tuner ? ddp_now() : 0;
        if (result == DDP_OK && large.method >= DDP__METHOD_READ)
            result = ddp__transfer_direct(group, l, &large);
        else if (result == DDP_OK)
            result = ddp__transfer_staged(group, l, &large);
        if (large.tuner)
            ddp_tuner_learn(large.tuner, ddp__proposal_of(l, 0, call)->method, ddp_now() - start);
    } else if (t.shape != DDP__ADDS) {
        result = ddp__transfer_small(group, l, &t);
    } else {
        t.shape = DDP__ADDS; /* constants: the compiler makes a copy for all_reduce, which takes 8 ns less */
        t.same_data = 1;
        result = ddp__transfer_small(group, l, &t);
    }
    if (result != DDP_OK) ddp__peer_access_wait(l);
    return result;
}

//== the local backend: point to point =========================================================== >>impl-p2p

/* There is one channel per ordered pair of ranks. A send posts a message in the channel. The receiver claims
   the oldest message with the requested tag. Size and memory decide how the data moves:

     inline    The message contains the data. The send is complete at once.
     in place  The receiver copies from the sender's buffer; from private memory by process_vm_readv.
     staged    Through chunks of the channel: the sender fills one while the receiver drains another. Only for
               private memory, if process_vm_readv is refused, or both ranks block in their calls and each has
               a core. Two cores then copy, which is fast if they are near. Between distant cores of AMD,
               streaming stores, or process_vm_readv, take a third of the time: a ddp_tuner of the receiver
               chooses between the three, as for collectives. */

enum { DDP__MESSAGES = 16, DDP__INLINE = 2048, DDP__STAGE = 65536, DDP__STAGES = 2 };
enum { DDP__FREE = 0, DDP__POSTED, DDP__CLAIMED, DDP__TAKEN };
enum { DDP__STAGE_WAITS = 1, DDP__STAGE_MOVED = 2 };
/* THROUGH_: the chunks of the channel. With streaming stores the data passes through memory. */
enum ddp__message_method { DDP__IN_PLACE, DDP__THROUGH_CACHE, DDP__THROUGH_MEMORY, DDP__MESSAGE_METHODS };

typedef struct ddp__message {
    /* The sender sets POSTED; the receiver CLAIMED, then TAKEN; the sender FREE. Inline: the receiver sets
       FREE after CLAIMED. */
    DDP__OWN_LINE uint32_t state;
    int32_t tag;
    int32_t staged; /* ddp__message_method; written by the receiver */
    uint32_t dtype;
    int32_t sender_blocks; /* 1 = the sender blocks until the message is received; written by the sender */
    uint64_t count, order, address;
    DDP__OWN_LINE unsigned char data[DDP__INLINE];
} ddp__message;

struct ddp__channel {
    DDP__OWN_LINE uint32_t active; /* 1 = a message is being staged; written by the receiver */
    DDP__OWN_LINE uint64_t filled; /* number of chunks since the channel exists; so is drained */
    DDP__OWN_LINE uint64_t drained;
    ddp__message message[DDP__MESSAGES];
    unsigned char stage[DDP__STAGES][DDP__STAGE];
};

struct ddp__request {
    ddp_call call;
    size_t size, moved;
    ddp__channel *channel;
    ddp__message *message; /* NULL until posted or matched */
    int done, published;   /* published: ddp__publish_wait has been called for it */
    ddp_tuner *tuner;      /* of a receive, if it chose the method; otherwise NULL */
    double start;          /* of its transfer */
    ddp__request *next;
};

static void ddp__wake_p2p(ddp__local *l, int peer) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    ddp__wake_one(&l->line[peer].p2p);
}

/* Returns a free message of a channel, or NULL when all are in use. */
static ddp__message *ddp__free_message(ddp__channel *c) {
    for (int i = 0; i < DDP__MESSAGES; i++)
        if (ddp__load(&c->message[i].state) == DDP__FREE) return &c->message[i];
    return NULL;
}

/* A receiver often answers with a message of the same size. This prefetches the lines of that message for
   writing: 1 KiB in both directions takes a third less. */
static void ddp__prefetch_reply(ddp__channel *back, size_t size) {
    ddp__message *next = ddp__free_message(back);
    if (next) ddp__prefetch_write(next);
    for (size_t i = 0; next && i < size; i += 64) ddp__prefetch_write(next->data + i);
}

/* Posts a send in a free message, if there is one. */
static void ddp__send_post(ddp__local *l, ddp__request *r) {
    ddp__message *m = ddp__free_message(r->channel);
    if (!m) return;
    m->tag = r->call.tag;
    m->dtype = (uint32_t)r->call.dtype;
    m->count = r->call.count;
    m->order = l->send_order[r->call.root]++;
    r->done = r->size <= DDP__INLINE;
    m->staged = 0;
    if (!r->done)
        m->address = ddp__shared_address(l, r->call.send, r->size);
    else if (r->size)
        memcpy(m->data, r->call.send, r->size);
    m->sender_blocks = r->call.flags & DDP__CALL_BLOCKS;
    r->message = m;
    ddp__store(&m->state, (uint32_t)DDP__POSTED);
    ddp__wake_p2p(l, r->call.root);
}

/* Fills or drains as many chunks of a staged message as possible. */
static void ddp__stage_progress(ddp__local *l, ddp__request *r) {
    ddp__channel *c = r->channel;
    int send = r->call.kind == DDP_CALL_SEND;
    /* this rank's counter; the peer's counter limits it */
    uint64_t *chunks = send ? &c->filled : &c->drained;
    while (r->moved < r->size
           && *chunks < (send ? ddp__load(&c->drained) + DDP__STAGES : ddp__load(&c->filled))) {
        unsigned char *stage = c->stage[*chunks % DDP__STAGES];
        size_t n = r->size - r->moved < DDP__STAGE ? r->size - r->moved : (size_t)DDP__STAGE;
        if (send && r->message->staged == DDP__THROUGH_MEMORY) {
            ddp__copy_stream(stage, (const unsigned char *)r->call.send + r->moved, n);
            ddp__stream_end();
        } else if (send)
            memcpy(stage, (const unsigned char *)r->call.send + r->moved, n);
        else
            memcpy((unsigned char *)r->call.recv + r->moved, stage, n);
        r->moved += n;
        l->stage_flags |= DDP__STAGE_MOVED;
        ddp__store(chunks, *chunks + 1);
        ddp__wake_p2p(l, r->call.root);
    }
    if (r->moved < r->size) l->stage_flags |= DDP__STAGE_WAITS;
}

/* The sender's side of a posted message: fills chunks of a staged one, and frees the message at the end. */
static void ddp__send_progress(ddp__local *l, ddp__request *r, int blocks) {
    uint32_t state = ddp__load(&r->message->state);
    if (blocks && !r->message->sender_blocks) ddp__store(&r->message->sender_blocks, 1);
    r->done = state == DDP__TAKEN;
    if (r->done)
        ddp__store(&r->message->state, (uint32_t)DDP__FREE);
    else if (state == DDP__CLAIMED && ddp__load(&r->message->staged))
        ddp__stage_progress(l, r);
}

/* Returns the order of the newest message that a peer has posted to this rank, plus 1. A sender posts in
   order, so all older messages are visible, too. */
static uint64_t ddp__posted_end(const ddp__channel *c) {
    uint64_t end = 0;
    for (const ddp__message *m = c->message; m < c->message + DDP__MESSAGES; m++)
        if (ddp__load(&m->state) == DDP__POSTED && m->order >= end) end = m->order + 1;
    return end;
}

/* Claims the oldest message with the requested tag and an order less than `end`. Messages from end on may
   have arrived after an earlier receive was matched, and a scan may see a newer one of them but not an older
   one. */
static void ddp__recv_match(ddp__local *l, ddp__request *r, uint64_t end) {
    ddp__message *first = r->channel->message, *best = NULL;
    for (ddp__message *m = first; m < first + DDP__MESSAGES; m++)
        if (ddp__load(&m->state) == DDP__POSTED && m->order < end && m->tag == r->call.tag
            && (!best || m->order < best->order))
            best = m;
    if (!best) return;
    if (best->count == r->call.count && best->dtype == (uint32_t)r->call.dtype) {
        r->message = best;
        ddp__store(&best->state, (uint32_t)DDP__CLAIMED);
    } else
        DDP__POISON(l, DDP_ERR_MISMATCH,
                    "ranks made different calls: rank %d ddp_send %s count=%zu, rank %d ddp_recv %s "
                    "count=%zu (tag %d)",
                    r->call.root, ddp_dtype_name((ddp_dtype)best->dtype), (size_t)best->count, l->rank,
                    ddp_dtype_name(r->call.dtype), r->call.count, r->call.tag);
}

/* Copies from the sender's buffer. Returns 0 if the system refuses that or the group has failed, because a
   failed sender may have changed its buffer. */
static int ddp__recv_in_place(ddp__local *l, ddp__request *r) {
    int peer = r->call.root;
    uint64_t address = r->message->address;
    if (address & DDP__PRIVATE) {
        if (ddp__can_read(l, peer) <= 0
            || !ddp__vm_read(ddp__pid_of(l, peer), r->call.recv, address ^ DDP__PRIVATE, r->size))
            return 0;
    } else {
        if (!ddp__peer_access_begin(l)) return 0;
        memcpy(r->call.recv, ddp__peer_pointer(l, address), r->size);
        ddp__peer_access_end(l);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return !ddp__load(&l->control->poison);
}

/* Chooses the method for a claimed message from private memory. */
static int ddp__choose_method(ddp__local *l, ddp__request *r) {
    int size = (r->size > (size_t)256 << 10) + (r->size > (size_t)4 << 20);
    r->tuner = &l->message_tuner[r->call.root][size];
    r->start = ddp_now();
    return ddp_tuner_pick(r->tuner, DDP__MESSAGE_METHODS);
}

/* The receiver's side of a claimed message. blocks: a thread of this rank blocks until the message has
   arrived. Private memory may be staged if the sender blocks too, and ranks do not share cores. */
static void ddp__recv_progress(ddp__local *l, ddp__request *r, int blocks) {
    ddp__message *m = r->message;
    int is_inline = r->size <= DDP__INLINE, active = (int)r->channel->active, staged = 0;
    if (is_inline) {
        if (r->size) memcpy(r->call.recv, m->data, r->size);
        r->done = 1;
    } else if (m->staged) {
        staged = m->staged;
        ddp__stage_progress(l, r);
        r->done = r->moved == r->size;
        r->channel->active = !r->done;
    } else {
        int may_stage = blocks && m->address & DDP__PRIVATE && !active && l->spins > l->yields
                        && ddp__load(&m->sender_blocks);
        staged = may_stage ? ddp__choose_method(l, r) : DDP__IN_PLACE;
        if (!staged) r->done = ddp__recv_in_place(l, r);
        if (!r->done) {
            if (active) return; /* a channel stages one message at a time */
            r->channel->active = 1;
            ddp__store(&m->staged, staged ? staged : DDP__THROUGH_CACHE);
        }
    }
    if (r->done && r->tuner) ddp_tuner_learn(r->tuner, staged, (ddp_now() - r->start) / (double)r->size);
    /* inline: from here on the message belongs to the sender */
    if (r->done) ddp__store(&m->state, (uint32_t)(is_inline ? DDP__FREE : DDP__TAKEN));
    ddp__wake_p2p(l, r->call.root);
    if (is_inline) ddp__prefetch_reply(&l->channels[l->rank * l->world_size + r->call.root], r->size);
}

//== the local backend: pending messages ================================================ >>impl-p2p-requests
/* Advances all pending sends and receives of a group; the p2p functions of the backend. >>impl-queue calls
   them; a thread that waits in a collective advances messages, too. */

static void ddp__local_p2p_wake(ddp_group *group, void *state) {
    ddp__local *l = (ddp__local *)state;
    (void)group;
    ddp__store(&l->wake_bits, 3);
    ddp__wake_p2p(l, l->rank);
}

/* With the lock held, advances every pending request, the oldest first, so that sends are posted and receives
   match in issue order. If a request other than `own` completes, wakes the threads that wait. */
static void ddp__requests_progress(ddp__local *l, const ddp__request *own) {
    int ended = 0;
    uint64_t blocked = 0; /* peers with an earlier send that found no free message */
    uint64_t end[DDP_MAX_LOCAL_RANKS];
    uint64_t looked = 0; /* the peers for which end is set */
    if (ddp__load(&l->control->poison)) return;
    for (ddp__request *r = l->requests; r; r = r->next) {
        int peer = r->call.root;
        uint64_t bit = UINT64_C(1) << peer;
        /* 1 = a thread blocks until r completes */
        int blocks = r->call.flags & DDP__CALL_BLOCKS || r == ddp__waited_request;
        if (r->done) continue;
        if (r->call.kind == DDP_CALL_SEND) {
            if (r->message)
                ddp__send_progress(l, r, blocks);
            else if (!(blocked & bit))
                ddp__send_post(l, r);
            if (!r->message) blocked |= bit;
        } else {
            if (!r->message && !(looked & bit)) {
                end[peer] = ddp__posted_end(r->channel);
                looked |= bit;
            }
            if (!r->message) ddp__recv_match(l, r, end[peer]);
            if (r->message) ddp__recv_progress(l, r, blocks);
        }
        ended |= r->done && r != own;
    }
    if (ended) ddp__local_p2p_wake(NULL, l);
}

static void ddp__local_progress(ddp_group *group, ddp__local *l, const ddp__request *own, int may_skip) {
    if ((may_skip ? pthread_mutex_trylock : pthread_mutex_lock)(&l->p2p_lock) != 0) return;
    int tries = 0;
    do {
        l->stage_flags = 0;
        ddp__requests_progress(l, own);
        tries = l->stage_flags & DDP__STAGE_MOVED ? 0 : tries + 1;
        /* A chunk takes microseconds, less than a sleep between two chunks. */
    } while (ddp__waited_request && (l->stage_flags & DDP__STAGE_WAITS) && tries < l->spins);
    pthread_mutex_unlock(&l->p2p_lock);
    if (ddp__load_relaxed(&l->read_refused) == 1
        && __atomic_exchange_n(&l->read_refused, 2, __ATOMIC_RELAXED) == 1)
        ddp_group_log(
            group,
            "process_vm_readv is not permitted: large messages between private buffers are copied twice");
}

/* Called while this thread waits for a request: publishes the wait; poisons the group after the timeout. */
static void ddp__request_publish_wait(ddp_group *group, ddp__local *l, ddp__request *r) {
    const uint64_t words[2] = {ddp__p2p_signature(&r->call), r->call.count};
    char text[DDP__TEXT_MAX];
    ddp__publish_wait(group, l, words, r->call.seq, r->call.root);
    r->published = 1;
    if (ddp_now() - ddp__waited_since <= group->desc.timeout_ms * 1e-3) return;
    ddp__p2p_timeout_text(group, &r->call, l->cause_rank[r->call.root], text, sizeof text);
    ddp__waiting_text(group, l, r->call.root, text + strlen(text), sizeof text - strlen(text));
    ddp__mark_unresponsive(group, l, r->call.root);
    ddp__local_poison(group, l, DDP_ERR_TIMEOUT, text);
}

/* With the lock held, poisons the group if the peer of a pending request is lost. */
static void ddp__requests_check_lost(ddp__local *l) {
    uint64_t alive = 0;
    char text[DDP__TEXT_MAX];
    for (ddp__request *r = l->requests; r; r = r->next) {
        if (r->done || (alive >> r->call.root & 1)) continue;
        ddp_result lost = ddp__member_lost(l, r->call.root, text, sizeof text);
        if (lost != DDP_OK) ddp__requests_progress(l, NULL); /* the peer may have sent before it left */
        if (lost == DDP_OK)
            alive |= UINT64_C(1) << r->call.root;
        else if (!r->done)
            ddp__local_poison(NULL, l, lost, text);
    }
}

static ddp_result ddp__local_p2p_start(ddp_group *group, void *state, const ddp_call *call, void **out) {
    ddp__local *l = (ddp__local *)state;
    int send = call->kind == DDP_CALL_SEND;
    int from = send ? l->rank : call->root;
    int to = send ? call->root : l->rank;
    pthread_mutex_lock(&l->p2p_lock);
    ddp__request *r = l->free_requests;
    if (r)
        l->free_requests = r->next;
    else
        r = (ddp__request *)ddp_host_alloc(group, sizeof *r);
    if (r) {
        ddp__request **end = &l->requests;
        memset(r, 0, sizeof *r);
        r->call = *call;
        r->size = call->count * ddp_dtype_size(call->dtype);
        r->channel = &l->channels[from * l->world_size + to];
        while (*end) end = &(*end)->next;
        *end = r;
    }
    pthread_mutex_unlock(&l->p2p_lock);
    *out = r;
    if (!r) return DDP_ERR_NO_MEMORY;
    ddp__local_progress(group, l, r, 1);
    return DDP_OK;
}

static ddp_result ddp__local_p2p_poll(ddp_group *group, void *state, void *request, int *done) {
    ddp__local *l = (ddp__local *)state;
    ddp__request *r = (ddp__request *)request;
    if (ddp__polling_all_of != group) ddp__local_progress(group, l, r, 1);
    pthread_mutex_lock(&l->p2p_lock);
    if (!r->done && ddp_now() - l->lost_checked_at > 0.004 + 0.0008 * l->world_size) {
        l->lost_checked_at = ddp_now();
        if (ddp__waited_request == request) ddp__request_publish_wait(group, l, r);
        ddp__requests_check_lost(l);
    }
    *done = r->done;
    int failed = !r->done && ddp__load(&l->control->poison);
    if (r->done || failed) {
        ddp__request **link = &l->requests;
        if (r->published) ddp__publish_no_wait(l);
        while (*link != r) link = &(*link)->next;
        *link = r->next;
        r->next = l->free_requests;
        l->free_requests = r;
    }
    pthread_mutex_unlock(&l->p2p_lock);
    if (failed) ddp__peer_access_wait(l);
    return failed ? DDP_ERR_POISONED : DDP_OK;
}

static void ddp__local_p2p_sleep(ddp_group *group, void *state, int timeout_ms) {
    ddp__local *l = (ddp__local *)state;
    ddp__sleeper *me = &l->line[l->rank].p2p;
    uint32_t value = ddp__load(&me->word);
    int bit = 1 << (ddp__comm_thread_of == group);
    if (timeout_ms == 0) {
        if (l->spins > l->yields && !group->on_comm_thread)
            ddp__pause();
        else
            sched_yield();
        return;
    }
    ddp__fetch_add(&me->sleeping, 1u);
    /* Either ddp__wake_p2p sees that this thread sleeps, or ddp__local_progress sees the peer's change. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    ddp__local_progress(group, l, NULL, 0);
    if (!(__atomic_fetch_and(&l->wake_bits, ~bit, __ATOMIC_SEQ_CST) & bit) && !ddp__load(&l->control->poison))
        ddp__futex_wait(&me->word, value, timeout_ms * 1000);
    ddp__fetch_add(&me->sleeping, (uint32_t)-1);
}

//== the local backend: groups and group memory =========================================== >>impl-local-group
/* Creates, splits and closes groups of the local backend, and allocates their group memory from the heap. */

/* Sets the pointers into the control memory of a group, which begins at address `at`. Returns its end. With
   at 0 that is its size. The parts are drawn in >>impl-local-state. */
static uintptr_t ddp__control_layout(ddp__local *l, uintptr_t at, int world_size) {
    size_t w = (size_t)world_size;
    l->control = (ddp__control *)at;
    l->line = (ddp__rank_state *)(at = ddp_round_up(at + sizeof *l->control, 4096));
    l->posts = (ddp__post *)(at = ddp_round_up(at + w * sizeof *l->line, 4096));
    l->payloads = (unsigned char *)(at = ddp_round_up(at + 2 * w * sizeof *l->posts, 4096) + DDP__OFF_PAGE);
    l->slots = (unsigned char *)(at = ddp_round_up(at + w * DDP__PAYLOAD_STRIDE, 4096) + DDP__OFF_PAGE);
    l->channels = (ddp__channel *)(at = ddp_round_up(at + w * DDP__SLOT_STRIDE, 4096));
    return ddp_round_up(at + w * w * sizeof *l->channels, DDP__PAGE);
}

/* Allocates the control memory of a new group. Returns its offset in the heap. On failure sets the error line
   and returns 0. */
static uint64_t ddp__control_create(ddp__heap *heap, int world_size) {
    ddp__local layout;
    size_t size = ddp__control_layout(&layout, 0, world_size);
    uint64_t offset = ddp__heap_alloc(heap, size);
    int error = offset && heap->job->reserves ? ddp__reserve_pages(heap->fd, offset, size) : 0;
    if (offset && !error) return offset;
    if (offset) {
        ddp__heap_free(heap, offset, size);
        ddp_fail(DDP_ERR_NO_MEMORY,
                 "shared memory: no space in %s for %zu bytes, for a group of %d ranks: %s",
                 ddp__heap_limit_name(heap->job->folder), size, world_size, strerror(error));
    } else {
        ddp_fail(DDP_ERR_NO_MEMORY,
                 "shared memory: no space for a group of %d ranks: the file size limit is %llu bytes; raise "
                 "it with `ulimit -f`",
                 world_size, (unsigned long long)heap->job->limit);
    }
    return 0;
}

/* Creates this rank's state of a group with control memory at `offset`. members: its ranks in the parent.
   parent NULL: the group has all ranks of the job. Takes a reference to heap, except on failure. */
static ddp__local *ddp__local_attach(ddp_group *group, ddp__heap *heap, uint64_t offset, ddp__local *parent,
                                     const int *members) {
    ddp__local *l = (ddp__local *)ddp_host_alloc(group, sizeof *l);
    int enough_cores = heap->job->world_size <= heap->job->cores;
    if (!l) return NULL;
    l->size = ddp__control_layout(l, 0, group->world_size);
    void *memory = ddp__heap_map(heap, offset, l->size);
    if (!memory) {
        DDP__GROUP_FAIL(group, DDP_ERR_NO_MEMORY, "%zu bytes of shared memory could not be mapped: %s",
                        l->size, strerror(errno));
        ddp_host_free(group, l);
        return NULL;
    }
    ddp__control_layout(l, (uintptr_t)memory, group->world_size);
    ddp__fetch_add(&heap->references, 1);
    l->heap = heap;
    l->offset = offset;
    l->rank = group->rank;
    l->world_size = group->world_size;
    l->spins = enough_cores ? 4000 : 20; /* the peer may need this core: yield early */
    l->yields = enough_cores ? 20 : 200;
    l->parent = parent;
    for (int i = 0; i < group->world_size; i++)
        l->job_rank[l->cause_rank[i] = i] = parent ? parent->job_rank[members[i]] : i;
    l->is_amd = (int)heap->job->is_amd;
    l->probe_word = (uint64_t)(ddp_now() * 1e9) * DDP_MAX_LOCAL_RANKS + (uint64_t)l->rank;
    l->line[l->rank].probe_word = l->probe_word;
    ddp__store(&l->line[l->rank].probe, (uint64_t)(uintptr_t)&l->probe_word);
    pthread_mutex_init(&l->p2p_lock, NULL);
    return l;
}

/* Rank 0 of each new group allocates its control memory. An all_gather in the parent distributes the offsets:
   a rank finds that of its group at members[0]. 0 = no group, or the allocation failed. child NULL: this rank
   joins no group. */
static ddp_result ddp__local_split(ddp_group *parent, void *state, ddp_group *child, const int *members,
                                   int member_count, void **child_state) {
    ddp__local *l = (ddp__local *)state;
    uint64_t offsets[DDP_MAX_LOCAL_RANKS];
    uint64_t mine = child && child->rank == 0 ? ddp__control_create(l->heap, member_count) : 0;
    ddp_result result = ddp_all_gather(parent, &mine, offsets, 1, DDP_U64, NULL);
    *child_state = NULL;
    if (result != DDP_OK || !child) return result;
    if (!offsets[members[0]]) {
        const ddp__job *job = l->heap->job;
        const char *where = job->reserves ? ddp__heap_limit_name(job->folder) : NULL;
        return DDP__RANK_FAIL(parent, DDP_ERR_NO_MEMORY, "%s: no shared memory for the new group%s%s",
                              ddp_public_call_name("ddp_group_split"), where ? " in " : "",
                              where ? where : "");
    }
    *child_state = ddp__local_attach(child, l->heap, offsets[members[0]], l, members);
    return *child_state ? DDP_OK : DDP_ERR_NO_MEMORY;
}

/* Rank 0 allocates the range. Every rank maps all of it and allocates the pages of its own part:

       base                      base + stride              base + 2 * stride
       | rank 0: size_bytes      | rank 1: size_bytes       | ...        total = world_size * stride

   stride exceeds size_bytes by at least DDP__SKEW. After a failure of any rank, ddp_group_alloc frees the
   memory on all of them. */
static ddp_result ddp__local_alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    ddp__local *l = (ddp__local *)state;
    size_t stride = ddp_round_up(size_bytes + DDP__SKEW, DDP__PAGE);
    size_t total = 0, before = (size_t)l->rank * stride;
    ddp__region *region = (ddp__region *)ddp_host_alloc(group, sizeof *region);
    int fits = stride >= size_bytes && !__builtin_mul_overflow(stride, (size_t)l->world_size, &total);
    uint64_t offset = group->rank == 0 && region && fits ? ddp__heap_alloc(l->heap, total) : 0;
    ddp_result result = ddp_broadcast(group, &offset, 1, DDP_U64, 0, NULL);
    int mapped = result == DDP_OK && offset && region;
    unsigned char *base = mapped ? (unsigned char *)ddp__heap_map(l->heap, offset, total) : NULL;
    if (base) {
        ddp__region made = {base, offset, stride, total, base + before, l, 0, NULL};
        *region = made;
        if (size_bytes >= DDP__HUGE) ddp__request_huge_pages(base, before, before + stride);
        if (ddp__allocate_pages(l->heap, region->own_part, offset + before, size_bytes)) {
            pthread_mutex_lock(&l->heap->lock); /* communication threads, also of splits, read the list */
            region->next = l->regions;
            l->regions = region;
            pthread_mutex_unlock(&l->heap->lock);
            *out = region->own_part;
            return DDP_OK;
        }
        ddp__heap_unmap(l->heap, base);
    }
    if (offset) ddp__heap_free(l->heap, offset + before, stride);
    ddp_host_free(group, region);
    if (result != DDP_OK) return result;
    return ddp_fail_in(DDP_ERR_NO_MEMORY, "ddp_group_alloc", group,
                       "%d ranks x %zu bytes of shared memory could not be allocated", l->world_size,
                       size_bytes);
}

static ddp_result ddp__local_free(ddp_group *group, void *state, void *memory) {
    ddp__local *l = (ddp__local *)state;
    ddp__region **link = &l->regions;
    while ((*link)->own_part != memory) link = &(*link)->next;
    ddp__region *region = *link;
    pthread_mutex_lock(&l->heap->lock);
    *link = region->next;
    pthread_mutex_unlock(&l->heap->lock);
    ddp__heap_free(l->heap, region->offset + (size_t)l->rank * region->stride, region->stride);
    ddp__heap_unmap(l->heap, region->base);
    ddp_host_free(group, region);
    return DDP_OK;
}

/* Checks for lost ranks, then returns the group's failure:

       ranks of ddp_launch              finds the ranks that the launcher has recorded as lost
       others, with ddp_group_on_wait   finds processes that have ended, at most every 5 ms
       others                           finds none: only a call that needs a lost rank fails */
static ddp_result ddp__local_status(const ddp_group *group, void *state) {
    ddp__local *l = (ddp__local *)state;
    const ddp__job *job = l->heap->job;
    char text[DDP__TEXT_MAX];
    uint64_t now = job->launched || !group->wait_fn ? 0 : (uint64_t)(ddp_now() * 1e3);
    int checks_processes = now >= ddp__load_relaxed(&l->status_checked_at) + 5;
    if (checks_processes) __atomic_store_n(&l->status_checked_at, now, __ATOMIC_RELAXED);
    for (int r = 0; r < l->world_size && !ddp__load(&l->control->poison); r++) {
        if (r == l->rank
            || !(checks_processes
                 || (job->launched && ddp__load(&job->rank[l->job_rank[r]].state) == DDP__RANK_LOST)))
            continue;
        ddp_result lost = ddp__member_lost(l, r, text, sizeof text);
        /* a rank has destroyed this group: only a call that needs the rank fails */
        if (lost == DDP_OK || (checks_processes && ddp__load(&l->line[r].left))) continue;
        if (checks_processes) ddp_group_mark_lost((ddp_group *)(uintptr_t)group, r, lost, text);
        ddp__local_poison(NULL, l, lost, text);
    }
    uint32_t poison = ddp__load(&l->control->poison);
    if (poison == 0) return DDP_OK;
    for (double start = ddp_now(); poison == 1 && ddp_now() - start < 5.0;
         poison = ddp__load(&l->control->poison))
        sched_yield();
    if (poison == 1) return ddp_fail(DDP_ERR_PEER_LOST, "a rank died while reporting a failure");
    return ddp_fail((ddp_result)l->control->poison_code, "%s", l->control->poison_text);
}

/* Marks this rank as left, wakes the peers that may wait for it, and frees its state. The last rank also
   frees the pages of the control memory. */
static void ddp__local_close(ddp_group *group, void *state) {
    ddp__local *l = (ddp__local *)state;
    if (ddp__load(&l->control->poison)) ddp__peer_access_wait(l);
    ddp__store(&l->line[l->rank].left, 1u);
    if (l->owns_rank) ddp__store(&l->heap->job->rank[l->rank].state, (uint32_t)DDP__RANK_LEFT);
    for (int r = 0; r < l->world_size; r++)
        if (r != l->rank) {
            ddp__wake_one(&l->line[r].collective);
            ddp__wake_one(&l->line[r].p2p);
        }
    for (ddp__region *region; (region = l->regions) != NULL; ddp_host_free(group, region)) {
        l->regions = region->next;
        ddp__heap_unmap(l->heap, region->base);
    }
    for (ddp__request *r; (r = l->requests ? l->requests : l->free_requests) != NULL; ddp_host_free(group, r))
        *(l->requests ? &l->requests : &l->free_requests) = r->next;
    if (ddp__fetch_add(&l->control->closed, 1u) + 1 == (uint32_t)l->world_size)
        ddp__heap_free(l->heap, l->offset, l->size);
    ddp__heap_unmap(l->heap, l->control);
    pthread_mutex_destroy(&l->p2p_lock);
    ddp__heap_release(l->heap);
    ddp_host_free(group, l);
}

/* The parts of a region are in the rank order of the group that has allocated it: this group or a parent. */
static void *ddp__local_peer(ddp_group *group, void *state, const void *memory, int rank) {
    const ddp__local *l = (const ddp__local *)state;
    const ddp__region *region = ddp__region_of(l, (uintptr_t)memory, 1);
    int rank_in_owner = 0;
    (void)group;
    if (!region || (size_t)((const unsigned char *)memory - region->own_part) >= region->stride) return NULL;
    while (region->owner->job_rank[rank_in_owner] != l->job_rank[rank]) rank_in_owner++;
    return (unsigned char *)(uintptr_t)memory
           + (ptrdiff_t)region->stride * (rank_in_owner - region->owner->rank);
}

static void ddp__local_signal(ddp_group *group, void *state, uint64_t *word, uint64_t value) {
    (void)group;
    ddp__store(word, value);
    ddp__wake_peers((ddp__local *)state);
}

static ddp_result ddp__local_wait_signal(ddp_group *group, void *state, const uint64_t *word,
                                         uint64_t target) {
    ddp__local *l = (ddp__local *)state;
    /* word is memory of this group, so the words of all ranks have the distance of these two */
    const uint64_t *first = (const uint64_t *)ddp__local_peer(group, state, word, 0);
    const uint64_t *second = (const uint64_t *)ddp__local_peer(group, state, word, 1);
    ddp_result result = DDP_OK;
    l->in_wait_signal = 1;
    for (int i = 1; i < l->world_size && result == DDP_OK; i++)
        result = ddp__wait_word(group, l, ddp__peer_at(l, i), first, (size_t)(second - first) * sizeof *first,
                                target);
    l->in_wait_signal = 0;
    return result;
}

static const ddp_backend ddp__backend_local = {
    "local",
    NULL,
    ddp__local_run,
    ddp__local_p2p_start,
    ddp__local_p2p_poll,
    ddp__local_p2p_sleep,
    ddp__local_split,
    ddp__local_alloc,
    ddp__local_free,
    ddp__local_status,
    ddp__local_poison,
    ddp__local_close,
    0,
    DDP_ORDER_TREE,
    NULL,
    ddp__local_peer,
    ddp__local_signal,
    ddp__local_wait_signal,
    ddp__local_p2p_wake,
};

//== the CPU device and the self backend ========================================================= >>impl-self
/* The function table of the CPU, calls of the device of a group, and the backend of groups of one rank. That
   backend copies from send to recv. Its state is a ddp_saved_error, the cause of the group's failure. */

static ddp_result ddp__cpu_alloc(ddp_group *group, size_t size_bytes, void **out) {
    return (*out = ddp_host_alloc(group, size_bytes)) != NULL ? DDP_OK : DDP_ERR_NO_MEMORY;
}

static void ddp__cpu_copy(void *dst, const void *src, size_t size_bytes) { memcpy(dst, src, size_bytes); }
static void ddp__cpu_fill_zero(void *dst, size_t size_bytes) { memset(dst, 0, size_bytes); }

static void ddp__cpu_copy_many(const ddp_copy_range *ranges, int range_count, ddp_dtype dst_dtype,
                               ddp_dtype src_dtype) {
    for (int i = 0; i < range_count; i++)
        ddp__cast(ranges[i].dst, dst_dtype, ranges[i].src, src_dtype, ranges[i].count);
}

static void ddp__cpu_add(void *dst, const void *left, const void *right, size_t count, ddp_dtype dtype) {
    const void *sources[2] = {left, right};
    ddp__reduce_tree(&dst, 1, sources, 2, count, dtype, DDP_OP_SUM, 1, DDP__HINT_CACHED);
}

static void ddp__cpu_scale(const ddp_tensor *tensors, int tensor_count, float factor) {
    for (const ddp_tensor *t = tensors; t < tensors + tensor_count; t++)
        ddp__scale(t->data, (size_t)ddp_tensor_count(t), t->dtype, factor);
}

static void ddp__cpu_divide(const ddp_tensor *tensors, int tensor_count, uint64_t divisor) {
    for (const ddp_tensor *t = tensors; t < tensors + tensor_count; t++)
        ddp__divide(t->data, (size_t)ddp_tensor_count(t), t->dtype, divisor);
}

static void ddp__cpu_sum_squares(ddp_exact_sum *sums, int sum_stride, const ddp_tensor *tensors,
                                 int tensor_count) {
    for (int i = 0; i < tensor_count; i++) {
        const ddp_tensor *t = &tensors[i];
        size_t count = (size_t)ddp_tensor_count(t), rows = t->ndim > 0 ? (size_t)t->shape[0] : 1;
        if (count) ddp__exact_add_squares(sums + i * sum_stride, t->data, rows, count / rows, t->dtype);
    }
}

DDPDEF ddp_result ddp_device_begin(ddp_group *group) {
    if (!group || !group->device->use_stream) return DDP_OK;
    return group->device->use_stream(group, DDP_STREAM_COMPUTE);
}

DDPDEF ddp_result ddp_device_check(ddp_group *group) {
    return group && group->device->check ? group->device->check(group) : DDP_OK;
}
DDPDEF ddp_result ddp_event_wait_host(ddp_group *group, void *event, double until) {
    const struct timespec nap = {0, 20000};
    for (int done = !event; !done;) {
        DDP_TRY(group->device->event_test(group, event, &done));
        if (!done && until == 0) DDP_TRY(ddp_group_status(group));
        if (!done && until > 0 && ddp_now() > until) return DDP_ERR_TIMEOUT;
        if (!done) nanosleep(&nap, NULL);
    }
    return DDP_OK;
}

DDPDEF void ddp_copy_list_end(ddp_copy_list *list) {
    if (list->range_count)
        list->device->copy_many(list->ranges, list->range_count, list->dst_dtype, list->src_dtype);
    list->range_count = 0;
}

DDPDEF void ddp_copy_list_add(ddp_copy_list *list, void *dst, ddp_dtype dst_dtype, const void *src,
                              ddp_dtype src_dtype, size_t count) {
    const ddp_copy_range range = {dst, src, count};
    int same_dtypes = dst_dtype == list->dst_dtype && src_dtype == list->src_dtype;
    if (count == 0) return;
    if (list->range_count && same_dtypes) {
        ddp_copy_range *last = &list->ranges[list->range_count - 1];
        const char *dst_end = (const char *)last->dst + last->count * ddp_dtype_size(dst_dtype);
        const char *src_end = (const char *)last->src + last->count * ddp_dtype_size(src_dtype);
        if (dst == (const void *)dst_end && src == (const void *)src_end) {
            last->count += count;
            return;
        }
    }
    if (!same_dtypes || list->range_count == DDP_COPY_RANGES) ddp_copy_list_end(list);
    list->dst_dtype = dst_dtype;
    list->src_dtype = src_dtype;
    list->ranges[list->range_count++] = range;
}

DDPDEF const ddp_device *ddp_device_cpu(void) {
    static const ddp_device cpu = {
        "cpu",
        1,
        ddp__cpu_alloc,
        ddp_host_free,
        ddp__cpu_copy,
        ddp__cpu_fill_zero,
        ddp__cast,
        ddp__cpu_copy_many,
        ddp__cpu_add,
        ddp__cpu_scale,
        ddp__cpu_divide,
        ddp__cpu_sum_squares,
        DDP_DEVICE_STREAMS(DDP_NULL_FIELD) DDP_DEVICE_PINNED(DDP_NULL_FIELD) NULL,
        NULL,
    };
    return &cpu;
}

DDPDEF ddp_result ddp_check_kernels(const ddp_group *group, const char *call_name, const int *version,
                                    const char *header) {
    const ddp_device *device = ddp_group_device(group);
    if (version ? *version == DDP_VERSION : device->host_memory) return DDP_OK;
    if (version)
        return ddp_fail_in(DDP_ERR_UNSUPPORTED, call_name, group,
                           "device %s has kernels for version %d of %s, but that header has version %d; use "
                           "all headers of one release",
                           device->name, *version, header, DDP_VERSION);
    return ddp_fail_in(DDP_ERR_UNSUPPORTED, call_name, group,
                       "device %s has no kernels for %s; put %s into the folder of ddp_cuda.cuh, or fill in "
                       "the device's function table",
                       device->name, header, header);
}

static ddp_result ddp__self_open(ddp_group *group, void **state) {
    return ddp__cpu_alloc(group, sizeof(ddp_saved_error), state);
}

static ddp_result ddp__self_run(ddp_group *group, void *state, const ddp_call *call) {
    ddp__transfer t = ddp__transfer_of(call);
    ddp_bytes from = ddp__send_range(0, &t, 0), to = ddp__recv_range(0, &t, 0);
    (void)group;
    if (((ddp_saved_error *)state)->result != DDP_OK) return DDP_ERR_POISONED;
    if (to.size && t.send + from.begin != t.recv + to.begin)
        memmove(t.recv + to.begin, t.send + from.begin, to.size);
    if (t.shape & DDP__ADDS && call->op == DDP_OP_AVG && call->divisor > 1)
        ddp__divide(call->recv, call->count, call->dtype, call->divisor);
    return DDP_OK;
}

static ddp_result ddp__self_split(ddp_group *parent, void *state, ddp_group *child, const int *members,
                                  int member_count, void **child_state) {
    (void)parent;
    (void)state;
    (void)members;
    (void)member_count;
    *child_state = NULL;
    return child ? ddp__self_open(child, child_state) : DDP_OK;
}

static ddp_result ddp__self_status(const ddp_group *group, void *state) {
    (void)group;
    return ddp_error_restore((const ddp_saved_error *)state);
}

static void ddp__self_poison(ddp_group *group, void *state, ddp_result cause, const char *text) {
    ddp_saved_error *first = (ddp_saved_error *)state;
    (void)group;
    if (first->result != DDP_OK) return;
    snprintf(first->text, sizeof first->text, "%s", text);
    first->result = cause;
}

static const ddp_backend ddp__backend_self = {
    "self",
    ddp__self_open,
    ddp__self_run,
    NULL,
    NULL,
    NULL,
    ddp__self_split,
    NULL,
    NULL,
    ddp__self_status,
    ddp__self_poison,
    ddp_host_free,
    0,
    DDP_ORDER_TREE,
    NULL,
    NULL,
    NULL,
    NULL,
    NULL,
};

//== timeline ================================================================================ >>impl-trace
/* ddp__run_call, ddp_wait and ddp__p2p_poll record events here, if the group has a ring for them.
   ddp_trace_write broadcasts the events of one rank after the other, in pieces, and rank 0 writes them. */

static void ddp__trace_add(ddp_group *group, enum ddp__trace_row row, const char *name, const ddp_call *call,
                           double start) {
    ddp__trace *trace = ddp__load(&group->trace);
    ddp__trace_event event;
    memset(&event, 0, sizeof event);
    event.start = start;
    event.end = ddp_now();
    event.row = (int32_t)row;
    event.kind = -1;
    event.peer = -1;
    if (call) {
        event.kind = (int32_t)call->kind;
        event.dtype = (int32_t)call->dtype;
        event.count = call->count;
        event.seq = call->seq;
        event.peer = ddp__is_p2p(call->kind) ? call->root : -1;
    }
    for (size_t i = 0; i < sizeof event.name - 1 && name[i]; i++) {
        int needs_escape = (unsigned char)name[i] < ' ' || name[i] == '"' || name[i] == '\\'; /* in JSON */
        event.name[i] = needs_escape ? '_' : name[i];
    }
    pthread_mutex_lock(&trace->lock);
    if (!trace->is_writing) trace->event[trace->next++ % trace->capacity] = event;
    pthread_mutex_unlock(&trace->lock);
}

/* The start of an event; 0 if the group does not record. */
static double ddp__trace_begin(ddp_group *group) { return ddp__load(&group->trace) ? ddp_now() : 0; }

/* Adds a collective that this thread has executed. */
static void ddp__trace_call(ddp_group *group, const ddp_call *call, double start) {
    int on_comm_thread = group->thread_started && pthread_equal(group->thread, pthread_self());
    ddp__trace_add(group, on_comm_thread ? DDP__TRACE_COMMUNICATION : DDP__TRACE_CALLER,
                   ddp__call_title(call), call, start);
}

DDPDEF ddp_result ddp_trace_start(ddp_group *group, int64_t event_count) {
    DDP__NEED(group, "group is NULL");
    DDP__NOT_FORKED(group, __func__);
    DDP_CHECK(__func__, group, event_count >= 0 && event_count <= INT64_MAX / 128,
              "event_count=%lld; use 0 for 65536, or a number of events", (long long)event_count);
    DDP_CHECK(__func__, group, !group->trace, "a timeline is recorded already; call ddp_trace_start once");
    size_t capacity = event_count ? (size_t)event_count : 65536;
    ddp__trace *trace = (ddp__trace *)ddp_host_alloc(group,
                                                     sizeof *trace + capacity * sizeof(ddp__trace_event));
    if (!trace) return ddp_fail_in(DDP_ERR_NO_MEMORY, __func__, group, "%s", ddp_last_error());
    trace->capacity = capacity;
    trace->event = (ddp__trace_event *)(void *)(trace + 1);
    trace->start = ddp_now();
    pthread_mutex_init(&trace->lock, NULL);
    ddp__store(&group->trace, trace);
    return DDP_OK;
}

static void ddp__trace_free(ddp_group *group) {
    if (!group->trace) return;
    pthread_mutex_destroy(&group->trace->lock);
    ddp_host_free(group, group->trace);
}

DDPDEF void ddp_trace_span(ddp_group *group, const char *name, double start) {
    if (group && name && ddp__load(&group->trace))
        ddp__trace_add(group, DDP__TRACE_CALLER, name, NULL, start);
}

#define DDP__TRACE_PIECE ((size_t)128) /* events in one broadcast */

/* Opens the file on rank 0. Other ranks: *fd = -1. */
static ddp_result ddp__trace_open(ddp_group *group, const char *path, int *fd) {
    *fd = -1;
    if (group->rank != 0) return DDP_OK;
    if (!path) return ddp_fail(DDP_ERR_INVALID, "path is NULL");
    *fd = open(path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0644);
    if (*fd < 0) return ddp_fail(DDP_ERR_SYSTEM, "%s: %s", path, strerror(errno));
    if (ftruncate(*fd, 0) == 0) return DDP_OK; /* fails unless it is a regular file */
    close(*fd);
    *fd = -1;
    return ddp_fail(DDP_ERR_SYSTEM, "%s is not a regular file; use another path", path);
}

/* Writes all bytes. Returns 0 with errno set if that fails. */
static int ddp__write_all(int fd, const char *data, size_t size_bytes) {
    while (size_bytes) {
        ssize_t n = write(fd, data, size_bytes);
        if (n < 0 && errno != EINTR) return 0;
        if (n < 0) continue;
        data += n;
        size_bytes -= (size_t)n;
    }
    return 1;
}

/* The file of rank 0; fd -1 on other ranks. failed: errno of the first write that failed. */
typedef struct ddp__trace_file {
    int fd, failed, count; /* count: of the written objects */
} ddp__trace_file;

/* Appends a JSON object to the array in the file. */
static void ddp__trace_put(ddp__trace_file *file, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void ddp__trace_put(ddp__trace_file *file, const char *format, ...) {
    char text[400] = ",\n";
    va_list args;
    va_start(args, format);
    vsnprintf(text + 2, sizeof text - 2, format, args);
    va_end(args);
    if (file->count++ == 0) text[0] = '[';
    if (file->fd >= 0 && !file->failed && !ddp__write_all(file->fd, text, strlen(text))) file->failed = errno;
}

/* An event in microseconds after `base`. A message is a pair of objects, since messages overlap. */
static void ddp__trace_put_event(ddp__trace_file *file, const ddp__trace_event *e, int rank, double base) {
    char arguments[200] = "";
    const char *name = e->name;
    double start = (e->start - base) * 1e6, duration = (e->end - e->start) * 1e6;
    unsigned long long seq = e->seq;
    if (e->kind >= 0 && e->kind <= DDP_CALL_RECV) {
        name = ddp_call_name((ddp_call_kind)e->kind);
        snprintf(arguments, sizeof arguments,
                 "\"in\":\"%s\",\"seq\":%llu,\"dtype\":\"%s\",\"count\":%llu,\"peer\":%d", e->name, seq,
                 ddp_dtype_name((ddp_dtype)e->dtype), (unsigned long long)e->count, e->peer);
    }
    if (e->row != DDP__TRACE_MESSAGES)
        ddp__trace_put(file,
                       "{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d,"
                       "\"args\":{%s}}",
                       name, start, duration, rank, e->row, arguments);
    for (int end = 0; end < 2 && e->row == DDP__TRACE_MESSAGES; end++)
        ddp__trace_put(file,
                       "{\"name\":\"%s\",\"cat\":\"message\",\"id\":\"%d.%llu\",\"ph\":\"%c\",\"ts\":%.3f,"
                       "\"pid\":%d,\"tid\":%d,\"args\":{%s}}",
                       name, rank, seq, "be"[end], start + end * duration, rank, e->row, arguments);
}

/* Names the rows of a rank. */
static void ddp__trace_put_rows(ddp__trace_file *file, const ddp_group *group, int rank) {
    static const char *const rows[DDP__TRACE_ROWS] = {"caller", "communication", "messages"};
    ddp__trace_put(file,
                   "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"%s rank %d\"}}",
                   rank, group->name, rank);
    for (int row = 0; row < DDP__TRACE_ROWS; row++)
        ddp__trace_put(
            file, "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
            rank, row, rows[row]);
}

/* Broadcasts `count` events of `rank`, and writes them. first: the number of the first one. */
static ddp_result ddp__trace_send(ddp_group *group, int rank, uint64_t first, uint64_t count, double base,
                                  ddp__trace_file *file) {
    ddp__trace_event piece[DDP__TRACE_PIECE];
    ddp__trace_put_rows(file, group, rank);
    for (uint64_t at = 0; at < count; at += DDP__TRACE_PIECE) {
        size_t n = count - at < DDP__TRACE_PIECE ? (size_t)(count - at) : DDP__TRACE_PIECE;
        for (size_t i = 0; i < n && rank == group->rank; i++)
            piece[i] = group->trace->event[(first + at + i) % group->trace->capacity];
        DDP_TRY(ddp_host_collective(group, DDP_CALL_BROADCAST, piece, piece, n * sizeof *piece, DDP_U8,
                                    DDP_OP_SUM, rank));
        for (size_t i = 0; i < n && file->fd >= 0; i++) {
            piece[i].name[sizeof piece[i].name - 1] = 0;
            ddp__trace_put_event(file, &piece[i], rank, base);
        }
    }
    return DDP_OK;
}

static ddp_result ddp__trace_send_all(ddp_group *group, ddp__trace_file *file) {
    ddp__trace *trace = group->trace;
    double clock = ddp_now(), base = trace ? trace->start : clock;
    uint64_t end = trace ? trace->next : 0; /* of this rank */
    int one_machine = group->local_world_size == group->world_size;
    for (int rank = 0; rank < group->world_size; rank++) {
        uint64_t held = !trace || end < trace->capacity ? end : trace->capacity;
        double header[2] = {(double)held, clock};
        DDP_TRY(ddp_host_collective(group, DDP_CALL_BROADCAST, header, header, 2, DDP_F64, DDP_OP_SUM, rank));
        double shift = one_machine ? 0 : header[1] - clock;
        DDP_TRY(ddp__trace_send(group, rank, end - held, (uint64_t)header[0], base + shift, file));
    }
    if (file->fd >= 0 && !file->failed && !ddp__write_all(file->fd, "\n]\n", 3)) file->failed = errno;
    return DDP_OK;
}

/* Stops or continues recording. deletes: 1 = the recorded events are deleted. */
static void ddp__trace_set_writing(ddp__trace *trace, int is_writing, int deletes) {
    if (!trace) return;
    pthread_mutex_lock(&trace->lock);
    trace->is_writing = is_writing;
    if (deletes) trace->next = 0;
    pthread_mutex_unlock(&trace->lock);
}

DDPDEF ddp_result ddp_trace_write(ddp_group *group, const char *path) {
    DDP_PUBLIC_CALL(ddp_trace_write);
    ddp__trace_file file = {-1, 0, 0};
    DDP__NEED(group, "group is NULL");
    DDP__NOT_FORKED(group, __func__);
    ddp__trace_set_writing(group->trace, 1, 0);
    ddp_result result = ddp_agree(group, __func__, ddp__trace_open(group, path, &file.fd), 0, "");
    if (result == DDP_OK) {
        result = ddp__trace_send_all(group, &file);
        if (file.fd >= 0 && close(file.fd) != 0 && !file.failed) file.failed = errno;
        file.fd = -1;
        ddp_result written = DDP_OK;
        if (file.failed) written = ddp_fail(DDP_ERR_SYSTEM, "%s: %s", path, strerror(file.failed));
        if (result == DDP_OK) result = ddp_agree(group, __func__, written, 0, "");
    }
    if (file.fd >= 0) close(file.fd);
    ddp__trace_set_writing(group->trace, 0, result == DDP_OK);
    return result;
}

//== properties and failures of calls =========================================================== >>impl-calls
/* For backends (tcp, mpi and those of a user): the bytes of a call, its comparison between ranks, its
   timeout. For >>impl-queue: one call, and the failure of the group that it reports. */

static ddp_bytes ddp__call_bytes(const ddp_call *call, int rank, int peer, int sends) {
    ddp_bytes none = {0, 0};
    ddp__transfer t = ddp__transfer_of(call);
    int is_send = call->kind == DDP_CALL_SEND;
    if (ddp__is_p2p(call->kind) && (peer != call->root || sends != is_send)) return none;
    return sends ? ddp__send_range(rank, &t, peer) : ddp__recv_range(rank, &t, peer);
}

DDPDEF ddp_bytes ddp_call_sends(const ddp_call *call, int rank, int peer) {
    return ddp__call_bytes(call, rank, peer, 1);
}
DDPDEF ddp_bytes ddp_call_receives(const ddp_call *call, int rank, int peer) {
    return ddp__call_bytes(call, rank, peer, 0);
}
DDPDEF int ddp_call_adds(const ddp_call *call) { return ddp__has_op(call->kind) != 0; }

DDPDEF size_t ddp_call_send_size(const ddp_call *call, int rank, int world_size) {
    int to_root = ddp__call_shapes[call->kind].shape & DDP__TO_ROOT;
    ddp_bytes last = ddp_call_sends(call, rank, to_root ? call->root : world_size - 1);
    return last.size ? last.begin + last.size : 0;
}

DDPDEF void ddp_call_pack(const ddp_call *call, uint64_t words[2]) {
    words[0] = ddp__is_p2p(call->kind) ? ddp__p2p_signature(call) : ddp__signature(call);
    words[1] = call->count;
}

DDPDEF void ddp_call_describe(char *out, size_t size, const uint64_t words[2]) {
    ddp__describe(out, size, words, 0);
}

DDPDEF ddp_result ddp_call_compare(int rank, const uint64_t words[2], int other,
                                   const uint64_t other_words[2]) {
    if (ddp__same_call(words, other_words)) return DDP_OK;
    return rank < other ? ddp__mismatch(rank, words, other, other_words)
                        : ddp__mismatch(other, other_words, rank, words);
}

DDPDEF uint64_t ddp_call_hash(const ddp_call *call, int world_size) {
    uint64_t words[3] = {ddp__compared_bits(ddp__signature(call)), call->count, call->seq};
    uint64_t hash = ddp_hash(DDP_HASH_SEED, words, sizeof words);
    if (call->kind != DDP_CALL_ALL_GATHER_V) return hash;
    return ddp_hash(hash, call->recv_counts, (size_t)world_size * sizeof *call->recv_counts);
}

DDPDEF ddp_result ddp_call_timed_out(ddp_group *group, const ddp_call *call, const unsigned char *state) {
    char here[90] = "", missing[190] = "", text[DDP__TEXT_MAX], begin[96];
    int is_message = ddp__is_p2p(call->kind);
    for (int r = 0; r < group->world_size; r++) {
        int arrived = state[r] == DDP_RANK_ARRIVED;
        ddp__list_rank(arrived ? here : missing, arrived ? sizeof here : sizeof missing, r);
    }
    snprintf(text, sizeof text, DDP__MISSING_TEXT, group->desc.timeout_ms, here,
             missing[0] ? missing : "none");
    if (is_message) ddp__p2p_timeout_text(group, call, call->root, text, sizeof text);
    for (int r = 0; r < group->world_size; r++)
        if (state[r] == DDP_RANK_SILENT && (!is_message || r == call->root))
            ddp_group_mark_lost(group, r, DDP_ERR_TIMEOUT, text);
    ddp__cause_begin(begin, sizeof begin, group->rank, call);
    return ddp_fail(DDP_ERR_TIMEOUT, "%s%.400s", is_message ? "" : begin, text);
}

DDPDEF double ddp_p2p_waited(const void *request) {
    return request == ddp__waited_request ? ddp_now() - ddp__waited_since : 0;
}

/* Sets the error line of a failed call. All pending calls return the code of the group's failure, until a
   caller has received it. */
static ddp_result ddp__call_failed(ddp_group *group, const ddp_call *call, ddp_result result) {
    ddp_result first = group->backend->status(group, group->state);
    if (first != DDP_OK) {
        ddp__store(&group->cause_seen, 1);
        result = ddp__load(&group->cause_delivered) ? DDP_ERR_POISONED : first;
    }
    return ddp__set_call_error(group, call, result, ddp_last_error());
}

/* Passes a result to the caller. Once it has received the failure, later calls return DDP_ERR_POISONED. */
static ddp_result ddp__deliver(ddp_group *group, ddp_result result) {
    if (result != DDP_OK && ddp__load(&group->cause_seen)) ddp__store(&group->cause_delivered, 1);
    return result;
}

/* A failure of the device on one rank fails the group, because its peers need the data. */
static ddp_result ddp__poison_on_error(ddp_group *group, ddp_result result) {
    if (result != DDP_OK) group->backend->poison(group, group->state, result, ddp_last_error());
    return result;
}

/* Executes a call on this thread, in issue order: this thread is the runner, or the group has no queue. It is
   a ddp_task_fn; its argument is the ddp_call. */
static ddp_result ddp__run_call(ddp_group *group, void *argument) {
    ddp_call *call = (ddp_call *)argument;
    call->caller = ddp__public_call;
    if (!ddp__is_p2p(call->kind)) call->seq = ++group->seq;
    ddp_result result = ddp__lost_check(group);
    double start = ddp__trace_begin(group);
    if (result == DDP_OK) result = group->backend->run(group, group->state, call);
    if (start > 0) ddp__trace_call(group, call, start);
    if (result == DDP_OK) return DDP_OK;
    result = ddp__call_failed(group, call, result);
    return group->backend->enqueues ? ddp__poison_on_error(group, result) : result;
}

//== the queue of calls ========================================================================= >>impl-queue
/* Executes the calls and tasks of a group in issue order, one at a time. The thread that executes one is the
   runner: the communication thread, or a thread that waits for an op. >>impl-issue adds ops to the queue and
   waits for them.

     ddp_all_reduce(..., &work)      head                   tail
     ddp_group_enqueue(...)           v                      v
              |                    +----+    +----+    +----+
              +-- append --------> | op | -> | op | -> | op |      the runner takes the head
                                   +----+    +----+    +----+
     ddp_send(..., &work)          +----+    +----+
              +-- started -------> | op | -> | op |  pending_p2p   polled in any order by the communication
                                   +----+    +----+                thread, or by a thread that waits

   group->lock protects both lists, running, runner, p2p_waiters and op->done. No call runs with it held. */

/* --- device streams: an op runs on the communication stream, between two events --- */

/* Selects the compute stream for this thread's device functions. */
static ddp_result ddp__use_compute_stream(ddp_group *group) {
    return ddp__poison_on_error(group, ddp_device_begin(group));
}

/* The first failure of this thread's device functions, or DDP_OK. */
static ddp_result ddp__device_check(ddp_group *group) {
    return ddp__poison_on_error(group, ddp_device_check(group));
}

/* Called when an op is issued. Marks the work that the compute stream contains now: the op runs after it. */
static ddp_result ddp__op_record_compute(ddp_group *group, ddp__op *op) {
    const ddp_device *device = group->device;
    if (!device->use_stream) return DDP_OK;
    ddp_result result = op->event ? DDP_OK : device->event_create(group, &op->event);
    if (result == DDP_OK) result = device->event_record(group, DDP_STREAM_COMPUTE, op->event);
    op->has_event = result == DDP_OK;
    return ddp__poison_on_error(group, result);
}

/* Called by the runner before an op. Selects the communication stream and makes it wait for that mark. */
static ddp_result ddp__op_enter_stream(ddp_group *group, ddp__op *op) {
    if (!op->has_event) return DDP_OK;
    ddp_result result = group->device->use_stream(group, DDP_STREAM_COMM);
    if (result == DDP_OK) result = group->device->event_wait(group, DDP_STREAM_COMM, op->event);
    return ddp__poison_on_error(group, result);
}

/* Called by the runner after an op. The event now marks the end of the op on the communication stream. */
static ddp_result ddp__op_leave_stream(ddp_group *group, ddp__op *op, ddp_result result) {
    if (!op->has_event) return result;
    if (result == DDP_OK)
        result = ddp__poison_on_error(group, group->device->event_record(group, DDP_STREAM_COMM, op->event));
    group->device->use_stream(group, DDP_STREAM_COMPUTE);     /* also after a failure */
    if (op->argument != &op->call) op->call.seq = group->seq; /* a task: for the error line of ddp_wait */
    return result;
}

/* --- handles --- */

static void ddp__op_free(ddp_group *group, ddp__op *op) {
    if (!op) return;
    pthread_mutex_lock(&group->lock);
    op->ticket = 0;
    op->next = group->free_ops;
    group->free_ops = op;
    pthread_mutex_unlock(&group->lock);
}

/* Returns NULL with the error line set if memory is missing. call NULL: a task of the user. task NULL: a
   send or receive that the backend starts. */
static ddp__op *ddp__op_alloc(ddp_group *group, const ddp_call *call, ddp_task_fn task, void *argument) {
    size_t w = (size_t)group->world_size;
    pthread_mutex_lock(&group->lock);
    ddp__op *op = group->free_ops;
    if (op) {
        group->free_ops = op->next;
    } else if ((op = (ddp__op *)ddp_host_alloc(group, sizeof *op + 4 * w * sizeof(size_t))) != NULL) {
        op->group = group;
        op->next_allocated = group->all_ops;
        group->all_ops = op;
    }
    pthread_mutex_unlock(&group->lock);
    if (!op) return NULL;
    memset(op, 0, offsetof(ddp__op, group));
    op->outcome.result = DDP_OK;
    /* atomic, because tasks on the communication thread create handles, too */
    op->ticket = __atomic_add_fetch(&group->last_ticket, 1, __ATOMIC_RELAXED);
    op->task = task;
    op->argument = call ? &op->call : argument;
    op->call.tag = DDP__TAG_TASK;
    if (call) op->call = *call;
    op->call.caller = ddp__public_call;
    if (!op->call.recv_counts) return op;
    /* The caller may free the arrays of a _v call before the call ends. */
    const size_t **list[4] = {&op->call.send_counts, &op->call.send_offsets, &op->call.recv_counts,
                              &op->call.recv_offsets};
    size_t *copy = (size_t *)(void *)(op + 1);
    for (int i = 0; i < 4; i++, copy += w)
        if (*list[i]) *list[i] = (const size_t *)memcpy(copy, *list[i], w * sizeof *copy);
    return op;
}

static void ddp__op_append(ddp__op **head, ddp__op **tail, ddp__op *op) {
    if (*head)
        (*tail)->next = op;
    else
        *head = op;
    *tail = op;
}

/* Wakes threads from a wait for messages. */
static void ddp__p2p_wake(ddp_group *group) {
    if (group->backend->p2p_wake) group->backend->p2p_wake(group, group->state);
}

/* With the lock held. */
static void ddp__op_complete(ddp_group *group, ddp__op *op, ddp_result result) {
    ddp_error_save(&op->outcome, result);
    op->done = 1;
    pthread_cond_broadcast(&group->done_cond);
    if (ddp__is_p2p(op->call.kind) && group->p2p_waiters) ddp__p2p_wake(group);
}

/* --- pending sends and receives --- */

/* With the lock held, advances one send or receive. Two threads never poll the same one. op->next stays
   valid: only the thread that polls an op removes it from the list, and handles are freed under the lock. */
static void ddp__p2p_poll(ddp_group *group, ddp__op *op) {
    int done = 0;
    if (op->done || op->polling) return;
    op->polling = 1;
    pthread_mutex_unlock(&group->lock);
    ddp_result result = group->backend->p2p_poll(group, group->state, op->request, &done);
    if (result != DDP_OK) result = ddp__call_failed(group, &op->call, result);
    pthread_mutex_lock(&group->lock);
    op->polling = 0;
    if (!done && result == DDP_OK) return;
    for (ddp__op **link = &group->pending_p2p; *link; link = &(*link)->next)
        if (*link == op) {
            *link = op->next;
            break;
        }
    if (op->start > 0)
        ddp__trace_add(group, DDP__TRACE_MESSAGES, ddp__call_title(&op->call), &op->call, op->start);
    ddp__op_complete(group, op, result);
}

/* With the lock held, advances all sends and receives. The local backend advances all of them in the first
   poll, and skips that in the following ones (ddp__polling_all_of). */
static void ddp__p2p_poll_all(ddp_group *group) {
    for (ddp__op *op = group->pending_p2p; op; op = op->next) {
        ddp__p2p_poll(group, op);
        ddp__polling_all_of = group;
    }
    ddp__polling_all_of = NULL;
}

/* Sleeps until a message may have advanced, at most timeout_ms; 0 = a short moment. */
static void ddp__p2p_sleep(ddp_group *group, int timeout_ms) {
    if (group->backend->p2p_sleep)
        group->backend->p2p_sleep(group, group->state, timeout_ms);
    else if (timeout_ms == 0)
        sched_yield();
    else
        usleep(50);
}

/* --- the runner --- */

/* With the lock held, returns 1 if this thread is inside a task or call of the group. */
static int ddp__is_runner(const ddp_group *group) {
    return group->running && pthread_equal(group->runner, pthread_self());
}

/* With the lock held. No thread may be the runner. */
static void ddp__become_runner(ddp_group *group) {
    group->running = 1;
    group->runner = pthread_self();
}

/* Executes the ops of the queue until the op `argument` is done, unless another thread executes them. If this
   thread is the runner already, its task waits for a queued op. The lock is released while an op runs. Calls
   inside an op belong to the public call that issued it.
   It is the main function of the communication thread, with group->thread_end. Queued ops come first there.
   While messages are pending and no other thread polls them, it polls and sleeps for short times. */
static void *ddp__run_queue(void *argument) {
    const ddp__op *until = (const ddp__op *)argument;
    ddp_group *group = until->group;
    int is_comm_thread = until == &group->thread_end;
    if (is_comm_thread) {
        prctl(PR_SET_NAME, "ddp-comm");
        ddp__comm_thread_of = group;
    }
    pthread_mutex_lock(&group->lock);
    while (!until->done) {
        ddp__op *op = group->head;
        int nested = ddp__is_runner(group);
        if (op && (!group->running || nested)) {
            group->head = op->next;
            if (!nested) {
                ddp__become_runner(group);
                group->on_comm_thread = is_comm_thread;
            }
            pthread_mutex_unlock(&group->lock);
            int outer_call = ddp__public_call;
            ddp__public_call = op->call.caller;
            ddp_result result = ddp__op_enter_stream(group, op);
            if (result == DDP_OK) result = op->task(group, op->argument);
            result = ddp__op_leave_stream(group, op, result);
            ddp__public_call = outer_call;
            pthread_mutex_lock(&group->lock);
            group->running = nested;
            group->on_comm_thread &= nested;
            ddp__op_complete(group, op, result);
            if (group->head) {
                pthread_cond_signal(&group->work_cond);
                ddp__p2p_wake(group);
            }
        } else if (!is_comm_thread) {
            pthread_cond_wait(&group->done_cond, &group->lock);
        } else if (!group->pending_p2p || group->p2p_waiters) {
            pthread_cond_wait(&group->work_cond, &group->lock);
        } else {
            ddp__p2p_poll_all(group);
            int can_run = group->head && !group->running;
            if (!group->pending_p2p || group->p2p_waiters || can_run) continue;
            pthread_mutex_unlock(&group->lock);
            ddp__p2p_sleep(group, DDP__P2P_SLICE_MS);
            pthread_mutex_lock(&group->lock);
        }
    }
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

/* Starts a thread that blocks all signals: threads of the user receive them. Returns 0 or an errno. */
static int ddp__start_thread(pthread_t *thread, void *(*main_fn)(void *), void *argument) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(thread, NULL, main_fn, argument);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

/* Starts the communication thread if it is missing and the backend allows one. */
static ddp_result ddp__comm_thread_start(ddp_group *group) {
    if (group->no_thread) group->needs_queue = 1;
    if (group->thread_started || group->no_thread) return DDP_OK;
    group->thread_end.group = group;
    int error = ddp__start_thread(&group->thread, ddp__run_queue, &group->thread_end);
    if (error)
        return DDP__GROUP_FAIL(group, DDP_ERR_SYSTEM, "the communication thread could not be started: %s",
                               strerror(error));
    group->thread_started = 1;
    group->needs_queue = 1;
    return DDP_OK;
}

//== issuing calls and waiting for them ========================================================= >>impl-issue
/* A call or a task is executed in one of five ways. The public calls, the reducer and other layers use
   ddp_group_enqueue, ddp__issue and ddp__p2p_issue.

     without queue   A blocking call, while the group has never needed the queue. No lock, no handle.
     in place        Issued inside a task, by the runner. The place of the task in the order covers it.
     direct          It blocks, and the queue is empty: this thread becomes the runner. No handle.
     by the caller   Through the queue, executed by this thread after the ops before it: it blocks while
                     ops are queued, the backend only enqueues device work, or the group has one rank.
     asynchronous    Through the queue, executed by the communication thread, or inside ddp_wait. */

/* Waits for a send or receive. Polls for a short time, then sleeps between polls. A thread that sleeps here
   advances all messages in place of the communication thread. */
static void ddp__p2p_wait(ddp_group *group, ddp__op *op) {
    double start = ddp_now();
    double poll_seconds = group->backend->p2p_sleep ? 100e-6 : 1e-3;
    int sleeps = 0;
    ddp__waited_since = start;
    ddp__waited_request = op->request;
    pthread_mutex_lock(&group->lock);
    ddp__p2p_poll(group, op);
    while (!op->done) {
        double waited = ddp_now() - start;
        int overdue = waited > group->desc.timeout_ms * 1e-3;
        sleeps = waited > poll_seconds;
        group->p2p_waiters += sleeps;
        pthread_mutex_unlock(&group->lock);
        ddp__p2p_sleep(group, sleeps ? DDP__P2P_SLICE_MS : 0);
        pthread_mutex_lock(&group->lock);
        group->p2p_waiters -= sleeps;
        ddp__p2p_poll(group, op); /* first, because the local backend reports a timeout with its cause */
        if (overdue && !op->done) {
            char text[DDP__TEXT_MAX];
            pthread_mutex_unlock(&group->lock);
            ddp__p2p_timeout_text(group, &op->call, op->call.root, text, sizeof text);
            group->backend->poison(group, group->state, DDP_ERR_TIMEOUT, text);
            pthread_mutex_lock(&group->lock);
        }
        if (sleeps && !op->done) ddp__p2p_poll_all(group);
    }
    ddp__waited_request = NULL;
    /* from here on the communication thread polls the messages again */
    if (sleeps && group->pending_p2p) pthread_cond_signal(&group->work_cond);
    pthread_mutex_unlock(&group->lock);
}

/* Waits for an op, and frees it. On a device the compute stream waits for the op's work, and the host does
   not. */
static ddp_result ddp__op_wait(ddp_group *group, ddp__op *op) {
    if (ddp__is_p2p(op->call.kind))
        ddp__p2p_wait(group, op);
    else
        ddp__run_queue(op);
    ddp_result result = ddp_error_restore(&op->outcome);
    if (result == DDP_OK && op->has_event) {
        result = group->backend->status(group, group->state);
        if (result != DDP_OK)
            result = ddp__call_failed(group, &op->call, result);
        else
            result = ddp__poison_on_error(group,
                                          group->device->event_wait(group, DDP_STREAM_COMPUTE, op->event));
    }
    ddp__op_free(group, op);
    return ddp__deliver(group, result);
}

/* Without work, waits for the op. With work, stores the op in it. */
static ddp_result ddp__op_wait_or_store(ddp_group *group, ddp__op *op, ddp_work *work) {
    if (!work) return ddp__op_wait(group, op);
    work->op = op;
    work->ticket = op->ticket;
    return DDP_OK;
}

/* Called if this rank has no memory for the handle of a collective or task (call NULL), or cannot start its
   communication thread. Its peers wait for it, so the group fails. */
static ddp_result ddp__issue_failed(ddp_group *group, const ddp_call *call, ddp_result result) {
    const char *cause = strstr(ddp_last_error(), ": "); /* after the names of rank and group */
    ddp_call task = ddp__call_of(DDP_CALL_ALL_REDUCE, NULL, NULL, 0, DDP_F32);
    char text[DDP__TEXT_MAX];
    task.tag = DDP__TAG_TASK;
    if (!call) call = &task;
    snprintf(text, sizeof text, "rank %d in %s: %.300s", group->rank, ddp__call_title(call),
             cause ? cause + 2 : ddp_last_error());
    ddp_fail(result, "%s", text);
    if (group->world_size > 1) group->backend->poison(group, group->state, result, text);
    return ddp__deliver(group, ddp__call_failed(group, call, result));
}

/* The "direct" way. This thread is the runner already. */
static ddp_result ddp__run_direct(ddp_group *group, ddp_task_fn fn, void *argument) {
    ddp_result result = ddp__use_compute_stream(group);
    if (result == DDP_OK) result = fn(group, argument);
    pthread_mutex_lock(&group->lock);
    group->running = 0;
    if (group->head) { /* issued meanwhile by another thread */
        pthread_cond_signal(&group->work_cond);
        pthread_cond_broadcast(&group->done_cond);
        ddp__p2p_wake(group);
    }
    pthread_mutex_unlock(&group->lock);
    return ddp__deliver(group, result);
}

/* Issues fn(group, argument): a task of the user, or a call of the library. */
DDPDEF ddp_result ddp_group_enqueue(ddp_group *group, ddp_task_fn fn, void *argument, ddp_work *work) {
    DDP__NEED(group && fn, "group or fn is NULL");
    DDP__NOT_FORKED(group, __func__);
    const ddp_call *call = fn == ddp__run_call ? (const ddp_call *)argument : NULL; /* NULL: a task */
    if (work) memset(work, 0, sizeof *work);
    /* 1 = the call only puts work on the communication stream. Collectives with flags do not. */
    int enqueues = group->backend->enqueues && (!call || ddp__is_p2p(call->kind) || !call->flags);
    int needs_event = enqueues || (!call && group->device->use_stream);
    pthread_mutex_lock(&group->lock);
    int in_place = ddp__is_runner(group);
    int direct = !work && !needs_event && !group->head && !group->running;
    if (direct) ddp__become_runner(group);
    pthread_mutex_unlock(&group->lock);
    if (in_place) return fn(group, argument);
    if (direct) return ddp__run_direct(group, fn, argument);

    int by_caller = !work || enqueues || group->world_size == 1;
    ddp__op *op = ddp__op_alloc(group, call, fn, argument);
    ddp_result result = op ? ddp__op_record_compute(group, op) : DDP_ERR_NO_MEMORY;
    if (result == DDP_OK && !by_caller) result = ddp__comm_thread_start(group);
    if (result != DDP_OK) {
        ddp__op_free(group, op);
        return ddp__issue_failed(group, call, result);
    }
    pthread_mutex_lock(&group->lock);
    ddp__op_append(&group->head, &group->tail, op);
    if (!by_caller) {
        pthread_cond_signal(&group->work_cond);
        ddp__p2p_wake(group);
    }
    pthread_mutex_unlock(&group->lock);
    if (by_caller) ddp__run_queue(op);
    return ddp__op_wait_or_store(group, op, work);
}

/* Issues a checked call. */
static ddp_result ddp__issue(ddp_group *group, ddp_call *call, ddp_work *work) {
    DDP__NOT_FORKED(group, ddp__call_title(call));
    if (work || group->needs_queue) return ddp_group_enqueue(group, ddp__run_call, call, work);
    return ddp__deliver(group, ddp__run_call(group, call));
}

DDPDEF ddp_result ddp_group_call(ddp_group *group, const ddp_call *call, ddp_work *work) {
    ddp_call copy = *call;
    if (copy.op == DDP_OP_AVG && !copy.divisor) copy.divisor = (uint64_t)group->world_size;
    return ddp__issue(group, &copy, work);
}

#if !defined(DDP__CALL_BYTES)
/* Limit of one collective on host memory, because the tcp backend accepts 64 KiB. Tests make it small. */
#define DDP__CALL_BYTES 32768
#endif

DDPDEF ddp_result ddp_host_collective(ddp_group *group, ddp_call_kind kind, const void *send, void *recv,
                                      size_t count, ddp_dtype dtype, ddp_op op, int root) {
    size_t size = ddp_dtype_size(dtype);
    size_t piece = kind == DDP_CALL_ALL_GATHER ? count : DDP__CALL_BYTES / size;
    for (size_t at = 0; at < count; at += piece) {
        size_t n = count - at < piece ? count - at : piece;
        ddp_call call = ddp__call_of(kind, (const char *)send + at * size, (char *)recv + at * size, n,
                                     dtype);
        call.op = op;
        call.root = root;
        call.flags = DDP_CALL_HOST_MEMORY;
        DDP_TRY(ddp_group_call(group, &call, NULL));
    }
    return DDP_OK;
}

/* Returns the op of a ddp_work, or NULL with the error line set. */
static ddp__op *ddp__op_of_work(ddp_group *group, const ddp_work *work, const char *who) {
    ddp__op *op = (ddp__op *)work->op;
    pthread_mutex_lock(&group->lock);
    int is_current = op->ticket == work->ticket;
    pthread_mutex_unlock(&group->lock);
    if (is_current) return op;
    ddp__bad(who, group, "work was already waited for; wait once for each ddp_work");
    return NULL;
}

DDPDEF ddp_result ddp_wait(ddp_group *group, ddp_work *work) {
    DDP__NEED(group && work, "group or work is NULL");
    DDP__NOT_FORKED(group, __func__);
    if (!work->op) return DDP_OK;
    ddp__op *op = ddp__op_of_work(group, work, __func__);
    memset(work, 0, sizeof *work);
    if (!op) return DDP_ERR_INVALID;
    double start = ddp__trace_begin(group);
    ddp_result result = ddp__op_wait(group, op);
    if (start > 0) ddp__trace_add(group, DDP__TRACE_CALLER, ddp_public_call_name(__func__), NULL, start);
    return result;
}

DDPDEF ddp_result ddp_test(ddp_group *group, ddp_work *work, int *done) {
    DDP__NEED(group && work && done, "group, work or done is NULL");
    *done = 1;
    DDP__NOT_FORKED(group, __func__);
    if (!work->op) return DDP_OK;
    ddp__op *op = ddp__op_of_work(group, work, __func__);
    ddp__op *last = NULL; /* without a communication thread: the last op that this call executes */
    if (!op) return DDP_ERR_INVALID;
    pthread_mutex_lock(&group->lock);
    if (ddp__is_p2p(op->call.kind)) ddp__p2p_poll(group, op);
    if (group->no_thread && !op->done && !group->running && group->head)
        last = ddp__is_p2p(op->call.kind) ? group->tail : op;
    *done = op->done;
    pthread_mutex_unlock(&group->lock);
    if (last) {
        ddp__run_queue(last);
        *done = op->done;
    }
    if (!*done || op->outcome.result != DDP_OK || !op->has_event
        || group->backend->status(group, group->state) != DDP_OK)
        return DDP_OK;
    return group->device->event_test(group, op->event, done);
}

//== sends, receives and batches ============================================================ >>impl-issue-p2p
/* Starts sends and receives. They do not use the queue, except for a backend that enqueues. They start at
   once and are polled until they are done. A batch of ddp_p2p_begin collects its messages in group->batch. */

/* Sets the error line of a send or receive that was not started. Without memory the group fails, because the
   peer waits for this message. */
static ddp_result ddp__p2p_issue_failed(ddp_group *group, const ddp_call *call, ddp_result result) {
    if (result == DDP_ERR_NO_MEMORY) {
        char begin[96], text[128];
        ddp__cause_begin(begin, sizeof begin, group->rank, call);
        snprintf(text, sizeof text, "%smemory could not be allocated", begin);
        group->backend->poison(group, group->state, result, text);
    }
    return ddp__deliver(group, ddp__call_failed(group, call, result));
}

/* Starts a checked send or receive. Inside a batch it becomes part of the batch. Otherwise, without work,
   this thread waits for it. */
static ddp_result ddp__p2p_issue(ddp_group *group, ddp_call *call, ddp_work *work) {
    call->caller = ddp__public_call;
    DDP__NOT_FORKED(group, ddp_call_name(call->kind));
    int enqueues = group->backend->enqueues;
    if (!enqueues && !group->backend->p2p_start)
        return DDP__RANK_FAIL(
            group, DDP_ERR_UNSUPPORTED,
            "%s group=%s: the %s backend has no point-to-point calls; use a group with another backend",
            ddp_public_call_name(ddp_call_name(call->kind)), group->name, group->backend->name);
    if (work)
        memset(work, 0, sizeof *work);
    else
        call->flags = DDP__CALL_BLOCKS;
    call->seq = __atomic_add_fetch(&group->p2p_seq, 1, __ATOMIC_RELAXED);
    if (enqueues && (work || !group->in_batch)) return ddp__issue(group, call, work);
    ddp__op *op = ddp__op_alloc(group, call, NULL, NULL);
    ddp_result result = op ? ddp_group_cause(group) : DDP_ERR_NO_MEMORY;
    if (op) op->start = ddp__trace_begin(group);
    if (result == DDP_OK && work) {
        pthread_mutex_lock(&group->lock);
        int in_place = ddp__is_runner(group);
        pthread_mutex_unlock(&group->lock);
        if (!in_place) result = ddp__comm_thread_start(group);
    }
    if (result == DDP_OK && !enqueues)
        result = group->backend->p2p_start(group, group->state, &op->call, &op->request);
    if (result != DDP_OK) {
        ddp__op_free(group, op);
        return ddp__p2p_issue_failed(group, call, result);
    }
    if (!work && group->in_batch) {
        ddp__op_append(&group->batch, &group->batch_tail, op);
        return DDP_OK;
    }
    if (work) {
        pthread_mutex_lock(&group->lock);
        op->next = group->pending_p2p;
        group->pending_p2p = op;
        pthread_cond_signal(&group->work_cond);
        pthread_mutex_unlock(&group->lock);
    }
    return ddp__op_wait_or_store(group, op, work);
}

DDPDEF ddp_result ddp_p2p_begin(ddp_group *group) {
    DDP__NEED(group, "group is NULL");
    DDP__NOT_FORKED(group, __func__);
    DDP_CHECK(__func__, group, !group->in_batch, "a batch is already open; call ddp_p2p_end first");
    group->in_batch = 1;
    return DDP_OK;
}

/* A task that runs the messages of a batch, on a backend that enqueues. */
static ddp_result ddp__run_batch(ddp_group *group, void *argument) {
    ddp_result result = group->backend->p2p_batch(group, group->state, 1);
    (void)argument;
    for (ddp__op *op = group->batch; op && result == DDP_OK; op = op->next)
        result = group->backend->run(group, group->state, &op->call);
    ddp_result end = group->backend->p2p_batch(group, group->state, 0);
    if (result == DDP_OK) result = end;
    return result == DDP_OK ? DDP_OK : ddp__call_failed(group, &group->batch->call, result);
}

DDPDEF ddp_result ddp_p2p_end(ddp_group *group) {
    ddp_saved_error first;
    first.result = DDP_OK;
    DDP__NEED(group, "group is NULL");
    DDP__NOT_FORKED(group, __func__);
    DDP_CHECK(__func__, group, group->in_batch, "no batch is open; call ddp_p2p_begin first");
    group->in_batch = 0;
    if (group->batch && group->backend->enqueues) {
        ddp_error_save(&first, ddp_group_enqueue(group, ddp__run_batch, NULL, NULL));
        for (ddp__op *op = group->batch; op; op = op->next) op->done = 1;
    }
    while (group->batch) {
        ddp__op *op = group->batch;
        group->batch = op->next;
        ddp_error_save(&first, ddp__op_wait(group, op));
    }
    return ddp_error_restore(&first);
}

//== HMAC-SHA-256 ================================================================================ >>impl-hmac

/* SHA-256 (FIPS 180-4) and HMAC (RFC 2104). >>impl-secret uses them to prove desc.secret. */

static uint32_t ddp__rotate_right(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

static void ddp__sha256_block(uint32_t state[8], const unsigned char block[64]) {
    static const uint32_t constants[64] = {
        0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u,
        0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu,
        0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu,
        0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u,
        0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu,
        0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu,
        0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u,
        0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
        0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
        0xc67178f2u};
    uint32_t w[64], s[8];
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16
               | (uint32_t)block[4 * t + 2] << 8 | (uint32_t)block[4 * t + 3];
    for (int t = 16; t < 64; t++) {
        uint32_t small0 = ddp__rotate_right(w[t - 15], 7) ^ ddp__rotate_right(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t small1 = ddp__rotate_right(w[t - 2], 17) ^ ddp__rotate_right(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = small1 + w[t - 7] + small0 + w[t - 16];
    }
    memcpy(s, state, sizeof s);
    for (int t = 0; t < 64; t++) {
        uint32_t big1 = ddp__rotate_right(s[4], 6) ^ ddp__rotate_right(s[4], 11)
                        ^ ddp__rotate_right(s[4], 25);
        uint32_t big0 = ddp__rotate_right(s[0], 2) ^ ddp__rotate_right(s[0], 13)
                        ^ ddp__rotate_right(s[0], 22);
        uint32_t choose = (s[4] & s[5]) ^ (~s[4] & s[6]);
        uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        uint32_t first = s[7] + big1 + choose + constants[t] + w[t];
        for (int i = 7; i > 0; i--) s[i] = s[i - 1];
        s[4] += first;
        s[0] = first + big0 + majority;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

/* Computes the hash of a message in two parts. Padding fills the last block: 0x80, zeros, and the message
   length in bits as 8 bytes. */
static void ddp__sha256(const void *first, size_t first_bytes, const void *second, size_t second_bytes,
                        unsigned char out[32]) {
    uint32_t state[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                         0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    const size_t size = first_bytes + second_bytes, padded = (size + 9 + 63) / 64 * 64;
    unsigned char block[64];
    for (size_t at = 0; at < padded; at++) {
        unsigned char byte = 0;
        if (at < first_bytes)
            byte = ((const unsigned char *)first)[at];
        else if (at < size)
            byte = ((const unsigned char *)second)[at - first_bytes];
        else if (at == size)
            byte = 0x80;
        else if (at >= padded - 8)
            byte = (unsigned char)((uint64_t)size * 8 >> 8 * (padded - 1 - at));
        block[at % 64] = byte;
        if (at % 64 == 63) ddp__sha256_block(state, block);
    }
    for (int i = 0; i < 32; i++) out[i] = (unsigned char)(state[i / 4] >> (24 - 8 * (i % 4)));
}

static void ddp__hmac_sha256(const void *key, size_t key_bytes, const void *message, size_t message_bytes,
                             unsigned char out[32]) {
    unsigned char pad[64] = {0};
    if (key_bytes > sizeof pad)
        ddp__sha256(key, key_bytes, NULL, 0, pad);
    else
        memcpy(pad, key, key_bytes);
    for (int i = 0; i < 64; i++) pad[i] ^= 0x36;
    ddp__sha256(pad, sizeof pad, message, message_bytes, out);
    for (int i = 0; i < 64; i++) pad[i] ^= 0x36 ^ 0x5c;
    ddp__sha256(pad, sizeof pad, out, 32, out);
}

/* Takes the same time wherever the two differ, so that the time reveals nothing about a proof. */
static int ddp__equal_in_constant_time(const void *a_bytes, const void *b_bytes, size_t size_bytes) {
    const unsigned char *a = (const unsigned char *)a_bytes, *b = (const unsigned char *)b_bytes;
    volatile unsigned char different = 0;
    for (size_t i = 0; i < size_bytes; i++) different = (unsigned char)(different | (a[i] ^ b[i]));
    return different == 0;
}

/* Fills memory with random bytes from the kernel. Returns 0 if getrandom fails. */
static int ddp__random_bytes(void *out, size_t size_bytes) {
    for (size_t done = 0; done < size_bytes;) {
        long n = syscall(SYS_getrandom, (unsigned char *)out + done, size_bytes - done, 0ul);
        if (n < 0 && errno != EINTR) return 0;
        if (n > 0) done += (size_t)n;
    }
    return 1;
}

//== rank discovery: environment and launchers =============================================== >>impl-identity

/* Determines the identity of this rank: rank, world size and job token. They come from the desc, from the
   variables of a launcher (torchrun, Open MPI, MPICH, SLURM), or from an enclosing ddp_launch.
   ddp_group_create and ddp_launch call ddp__identity_resolve before any rank connects to another. */

/* The schemes of init_method. A host or a path follows the last two. */
enum {
    DDP__SCHEME_SELF,
    DDP__SCHEME_ENV,
    DDP__SCHEME_MPI,
    DDP__SCHEME_TCP,
    DDP__SCHEME_FILE,
    DDP__SCHEME_COUNT
};

/* This rank and its world, as init_method, the desc and the environment define them. */
typedef struct ddp__identity {
    int rank, world_size, local_rank, local_world_size;
    int device_plus_1;         /* its device, from ddp_launch_desc.devices; 0 = none */
    int attempt;               /* see ddp_group_attempt */
    ddp__heap *heap;           /* of the ddp_launch that runs this thread as a rank; NULL = none */
    const char *size_variable; /* the variable with the launcher's world size; NULL = no launcher */
    char token[416];           /* the same on all ranks of a job, different for other jobs of this user */
    ddp_group *world;          /* the world of that ddp_launch, once it exists */
} ddp__identity;

/* Set while a ddp_rank_fn runs, so that a launch or a create inside it joins the same ranks. If that launch
   has joined a launcher, or has one rank, only world_size and device_plus_1 are set. */
static DDP__THREAD_LOCAL ddp__identity ddp__launch_identity;

/* The environment variables of a launcher. Without the local ones the world is on this machine, unless
   MASTER_ADDR names another one. */
typedef struct ddp__launcher {
    const char *name, *rank, *size, *local_rank, *local_size, *restarts;
    const char *job[4]; /* up to four variables that together identify a job */
} ddp__launcher;

#define DDP__CREATE_CHECK(condition, ...) DDP_CHECK("ddp_group_create", NULL, condition, __VA_ARGS__)

static const char *ddp__env_text(const char *name) {
    const char *text = getenv(name);
    return text ? text : "";
}

/* Reads a whole number from the environment. *out is fallback if the variable is not set. */
static ddp_result ddp__env_int(const char *name, int fallback, int *out) {
    const char *text = ddp__env_text(name);
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    *out = *text ? (int)value : fallback;
    DDP__CREATE_CHECK(
        !*text || (!*end && !errno && value >= 0 && value <= 1 << 30),
        "%s=%.60s in the environment is not an integer from 0 to %d; unset it, or use a launcher that "
        "sets it",
        name, text, 1 << 30);
    return DDP_OK;
}

static ddp_result ddp__identity_from_launcher(ddp__identity *id, const ddp__launcher *from) {
    DDP_TRY(ddp__env_int(from->rank, -1, &id->rank));
    DDP_TRY(ddp__env_int(from->size, -1, &id->world_size));
    DDP__CREATE_CHECK(id->world_size != 0,
                      "%s=0 in the environment, but a world has at least 1 rank; unset it, or use a launcher "
                      "that sets it",
                      from->size);
    DDP__CREATE_CHECK(id->rank >= 0, "%s is set in the environment, but %s is not; set both, or neither",
                      from->size, from->rank);
    DDP__CREATE_CHECK(id->world_size >= 0,
                      "%s is set in the environment, but %s is not; set both, or neither", from->rank,
                      from->size);
    DDP_TRY(ddp__env_int(from->local_rank, id->rank, &id->local_rank));
    DDP_TRY(ddp__env_int(from->local_size, id->world_size, &id->local_world_size));
    DDP_TRY(ddp__env_int(from->restarts, 0, &id->attempt));
    DDP__CREATE_CHECK(id->rank < id->world_size, "%s=%d with %s=%d; use ranks 0 to %d", from->rank, id->rank,
                      from->size, id->world_size, id->world_size - 1);
    DDP__CREATE_CHECK(id->local_world_size >= 1 && id->local_world_size <= id->world_size
                          && id->local_rank < id->local_world_size,
                      "%s=%d and %s=%d contradict %s=%d in the environment; unset them, or use a launcher "
                      "that sets all of them",
                      from->local_rank, id->local_rank, *from->local_size ? from->local_size : "local ranks",
                      id->local_world_size, from->size, id->world_size);
    int length = snprintf(id->token, sizeof id->token, "%s", from->name);
    for (int i = 0; i < 4 && from->job[i]; i++)
        length += snprintf(id->token + length, sizeof id->token - (size_t)length, ":%.100s",
                           ddp__env_text(from->job[i]));
    id->size_variable = from->size;
    return DDP_OK;
}

/* Uses the first launcher that has set its variables: torchrun, Open MPI, Hydra (MPICH), SLURM under srun.
   Without one the world has one rank. */
static ddp_result ddp__identity_from_env(ddp__identity *id) {
    // clang-format off
    static const ddp__launcher launchers[] = {
        {"torch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
                  {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
        {"ompi",  "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                  "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "",
                  {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
        {"pmi",   "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", {"PMI_PORT"}},
        {"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_RESTART_COUNT",
                  {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
    };
    // clang-format on
    enum { LAUNCHERS = sizeof launchers / sizeof launchers[0], PMI = 2, SLURM = 3 };
    memset(id, 0, sizeof *id);
    id->world_size = id->local_world_size = 1;
    for (int i = 0; i < LAUNCHERS && !id->size_variable; i++) {
        /* A batch script itself has SLURM_PROCID=0 and is not a rank. */
        if (i == SLURM && !*ddp__env_text("SLURM_STEP_ID")) break;
        if (!*ddp__env_text(launchers[i].rank) && !*ddp__env_text(launchers[i].size)) continue;
        DDP_TRY(ddp__identity_from_launcher(id, &launchers[i]));
        if (i == PMI && !*ddp__env_text("PMI_PORT"))
            snprintf(id->token, sizeof id->token, "pmi:%d", (int)getppid());
        int tasks_per_node = i == SLURM ? atoi(ddp__env_text("SLURM_STEP_TASKS_PER_NODE")) : 0;
        if (tasks_per_node > 0 && tasks_per_node < id->world_size) id->local_world_size = tasks_per_node;
    }
    return DDP_OK;
}

/* Fails if the caller wants another world size than a launcher has set. The launcher's variables may be
   stale. */
static ddp_result ddp__check_world_size(const char *who, const ddp__identity *launched, int wanted) {
    int found = launched->world_size;
    if (wanted == 0 || wanted == found || !launched->size_variable) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID,
                    "%s: desc.world_size=%d contradicts %s=%d in the environment; set desc.world_size to 0 "
                    "to join that world, or unset the variables of the launcher",
                    who, wanted, launched->size_variable, found);
}

/* Derives this rank's identity from a resolved desc and the environment. scheme: of init_method. */
static ddp_result ddp__identity_resolve(ddp__identity *id, const ddp_group_desc *desc, int scheme) {
    ddp__identity launched;
    memset(id, 0, sizeof *id);
    if (desc->world_size > 0) {
        if (scheme == DDP__SCHEME_ENV && !ddp__launch_identity.heap
            && ddp__identity_from_env(&launched) == DDP_OK) {
            DDP_TRY(ddp__check_world_size("ddp_group_create", &launched, desc->world_size));
            id->attempt = launched.attempt;
        }
        id->rank = desc->rank;
        id->world_size = desc->world_size;
        snprintf(id->token, sizeof id->token, "desc:%.60s:%.20s:%.60s", ddp__env_text("MASTER_ADDR"),
                 ddp__env_text("MASTER_PORT"), desc->name);
    } else if (scheme == DDP__SCHEME_SELF) {
        id->world_size = 1;
    } else if (ddp__launch_identity.heap && scheme < DDP__SCHEME_TCP) {
        *id = ddp__launch_identity;
    } else {
        DDP_TRY(ddp__identity_from_env(id));
    }
    if (id->local_world_size > 0) return DDP_OK;
    id->local_rank = id->rank;
    id->local_world_size = id->world_size;
    return DDP_OK;
}

//== rendezvous: peers ===================================================================== >>impl-rendezvous

/* Ranks that no common ddp_launch has started connect to rank 0 over a socket: an abstract Unix socket on one
   machine, otherwise TCP. This section has the data of a rendezvous and opens connections; the sections
   up to >>impl-connect implement the protocol. The tcp backend uses the connections after the rendezvous.

       rank r                                            rank 0
         |---- connect ----------------------------------->|  accepts: an unauthenticated peer
         |---- HELLO      token, version, rank, Nr ------->|  checks the fields
         |                                                 |
         |<--- CHALLENGE  N0 ------------------------------|  these two only if the ranks have a secret,
         |---- PROOF      HMAC of rank r, Nr, N0 --------->|  see >>impl-secret
         |                                                 |
         |<--- STATUS     ADMITTED, HMAC of rank 0 --------|  the peer is rank r from here on
         |                                                 |  waits until all ranks are admitted
         |<--- STATUS     0 (+ descriptor of the heap) ----|  sent to all ranks at the same time

   Instead of a STATUS above, rank 0 sends OTHER_JOB or an error to a peer that it refuses. It sends the same
   error to all ranks if a rank is missing at the deadline, or ends before the others have arrived. */

/* Identifies a process among all machines. The ranks of a tcp group exchange these, to find out which of them
   can share memory. */
enum {
    DDP__PROCESS_MACHINE,
    DDP__PROCESS_NONCE,
    DDP__PROCESS_PID,
    DDP__PROCESS_START_TIME,
    DDP__PROCESS_WORDS
};
typedef uint64_t ddp__process_id[DDP__PROCESS_WORDS];

static void ddp__process_id_self(ddp__process_id out) {
    const int pid = (int)getpid();
    out[DDP__PROCESS_MACHINE] = ddp_machine_id();
    out[DDP__PROCESS_NONCE] = ddp_unique_id();
    out[DDP__PROCESS_PID] = (uint64_t)pid;
    out[DDP__PROCESS_START_TIME] = ddp__process_start_time(pid);
}

#if !defined(DDP__WAIT_REPORT_SECONDS)
#define DDP__WAIT_REPORT_SECONDS 5.0 /* a wait for peers that is longer is reported through log_fn */
#endif
#define DDP__WAIT_REPORT_INTERVAL 60.0 /* seconds until the next report */
#define DDP__UNAUTHENTICATED_MAX 128   /* unauthenticated peers at a time */
#define DDP__HANDSHAKE_SECONDS 5.0     /* the longest wait for their hello or proof */
#define DDP__ADDRESSES_MAX 1024        /* bytes of an address list: about 60 addresses, >>impl-address-list */

/* A rendezvous as one rank sees it. */
typedef struct ddp__rendezvous {
    ddp_group *group;
    char token[416];            /* as in ddp__identity */
    int is_local;               /* 1 = over the abstract Unix socket at address; 0 = over TCP */
    struct sockaddr_un address; /* address_length bytes of it are in use */
    socklen_t address_length;
    /* Over TCP: */
    char hosts[DDP__ADDRESSES_MAX]; /* names or addresses of rank 0, tried in order, with blanks between */
    int numeric_hosts;              /* 1 = hosts are addresses, so that no name is resolved */
    int port, port_count;  /* rank 0 listens at the first free one of these ports; other ranks try each */
    const char *file_path; /* file://: rank 0 writes hosts and port there; NULL = no file */
    /* Rank 0: all ranks, then DDP__UNAUTHENTICATED_MAX peers, then the listener. Other ranks: rank 0. */
    struct ddp__peer *peer;
    int peer_count;
    struct pollfd *poll_fds;
    int has_secret;         /* 1 = peers must prove that they have the key */
    unsigned char key[32];  /* derived from desc.secret */
    char last_refusal[200]; /* rank 0: the last refused rank, and the reason */
    int refusal_count;      /* rank 0 */
    double deadline;        /* on rank 0 the earliest of all ranks: it sends all of them the missing ranks */
    double next_report;     /* when log_fn is called if this rank still waits */
    double grace_period;    /* other ranks wait longer than rank 0, because it names the missing ranks */
    const ddp__process_id *process; /* of ranks that connected over TCP before; NULL = none */
    const int *process_index;       /* of each rank; NULL = its rank */
    ddp_result result;              /* of the rendezvous; the error line describes a failure */
} ddp__rendezvous;

/* The kinds of frames. */
enum {
    DDP__FRAME_HELLO = 1,
    DDP__FRAME_STATUS,
    DDP__FRAME_DATA,
    DDP__FRAME_CHALLENGE,
    DDP__FRAME_PROOF,
    DDP__FRAME_LAST = DDP__FRAME_PROOF
};
enum {
    DDP__ALLOW_HELLO = 1 << DDP__FRAME_HELLO,
    DDP__ALLOW_STATUS = 1 << DDP__FRAME_STATUS,
    DDP__ALLOW_DATA = 1 << DDP__FRAME_DATA,
    DDP__ALLOW_CHALLENGE = 1 << DDP__FRAME_CHALLENGE,
    DDP__ALLOW_PROOF = 1 << DDP__FRAME_PROOF
};

/* Sent in each hello. Increase the protocol number if frames or their order change. */
enum { DDP__PROTOCOL = 2, DDP__HELLO_VERSION = DDP__PROTOCOL * 1000000 + DDP_VERSION };

/* Results in a STATUS frame of rank 0, before the outcome. OTHER_JOB: try another address. */
enum { DDP__ADMITTED = 1, DDP__OTHER_JOB = 2 };
#define DDP__FRAME_MAGIC UINT64_C(0x3170616568706464) /* "ddpheap1" */
typedef struct ddp__frame {
    uint64_t magic;
    uint32_t kind;
    /* STATUS: why the group failed; 0 = the rendezvous has succeeded, or the sender leaves the group. DATA: 1
       = the data is too large, and nothing follows. Other kinds: 0. */
    int32_t result;
    uint64_t size; /* bytes that follow */
    /* DATA: signature and count of the call. HELLO, CHALLENGE: a nonce. STATUS: the lost ranks, from
       ddp_group_get_lost. */
    uint64_t words[2];
} ddp__frame;
/* A frame of any kind except DATA. */
typedef struct ddp__text_frame {
    ddp__frame head;
    char text[DDP__TEXT_MAX];
} ddp__text_frame;

#define DDP__TCP_PAYLOAD 65536 /* bytes that a rank can send in one call */

/* Memory that grows to the size of the largest message. */
typedef struct ddp__buffer {
    unsigned char *bytes;
    size_t capacity;
} ddp__buffer;

/* A connection to another rank, or to an unauthenticated peer. */
typedef struct ddp__peer {
    int fd;                    /* -1 = not connected */
    int arrived;               /* 1 = its hello, or in a call all of its data, has arrived */
    ddp__frame head;           /* of the frame that is arriving */
    size_t received;           /* bytes of that frame, with its head */
    ddp__frame data_head;      /* of the last DATA frame */
    char text[DDP__TEXT_MAX];  /* of any other frame */
    char hello[DDP__TEXT_MAX]; /* rank 0: the hello of an unauthenticated peer */
    /* Rank 0, once it has sent a challenge: the proof that the peer must send, and its own. */
    char expected_proof[65], rank0_proof[65];
    unsigned char network[16]; /* its IPv4 address, or the first half of its IPv6 address */
    int heap_fd;               /* descriptor of the heap that came with a frame, or -1 */
    double opened_at;
    char name[96]; /* in error lines: "pid 77 on hostb", or its address until it has sent a hello */
} ddp__peer;

/* Has the layout of struct ucred, which needs _GNU_SOURCE. */
typedef struct ddp__ucred {
    pid_t pid;
    uid_t uid;
    gid_t gid;
} ddp__ucred;

static uint64_t ddp__hash_text(const char *text) { return ddp_hash(DDP_HASH_SEED, text, strlen(text)); }

/* Writes the address of a job's abstract socket on this machine. Returns its length. */
static socklen_t ddp__job_socket_address(struct sockaddr_un *address, const char *token) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "ddp-%ld-%016llx", (long)geteuid(),
             (unsigned long long)ddp__hash_text(token));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(address->sun_path + 1));
}

/* Creates a non-blocking socket: a blocking connect would wait while the backlog is full. */
static int ddp__socket(int family) { return socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

/* Waits until a socket can be read or written. Returns 0 if the deadline has passed. */
static int ddp__fd_ready(int fd, short events, double deadline) {
    struct pollfd wait = {fd, events, 0};
    for (;;) {
        double remaining = deadline - ddp_now();
        int wait_ms = 1000;
        if (remaining < 1) wait_ms = remaining > 0 ? (int)(remaining * 1e3) + 1 : 0;
        if (poll(&wait, 1, wait_ms) > 0) return 1;
        if (remaining <= 0) return 0;
    }
}

/* Returns pid and user of the process at the other end of a Unix socket. */
static ddp__ucred ddp__peer_credentials(int fd) {
    ddp__ucred peer = DDP_ZERO;
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) peer.uid = (uid_t)-1;
    return peer;
}

/* Initialises a peer with a connection; fd -1 = none. Sets the name from the socket. */
static void ddp__peer_init(ddp__peer *p, int fd) {
    struct sockaddr_storage address = DDP_ZERO; /* stays zero without a peer */
    const struct in6_addr *ipv6 = &((struct sockaddr_in6 *)(void *)&address)->sin6_addr;
    socklen_t length = sizeof address;
    char host[72] = "an unknown address", port[8] = "?";
    memset(p, 0, sizeof *p);
    p->fd = fd;
    p->heap_fd = -1;
    p->opened_at = ddp_now();
    getpeername(fd, (struct sockaddr *)&address, &length);
    if (address.ss_family == AF_INET)
        memcpy(p->network, &((struct sockaddr_in *)(void *)&address)->sin_addr, 4);
    if (address.ss_family == AF_INET6) memcpy(p->network, ipv6, IN6_IS_ADDR_V4MAPPED(ipv6) ? 16 : 8);
    getnameinfo((struct sockaddr *)&address, length, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(p->name, sizeof p->name, "%s port %s", host, port);
    if (address.ss_family == AF_UNIX)
        snprintf(p->name, sizeof p->name, "pid %d", (int)ddp__peer_credentials(fd).pid);
}

static void ddp__peer_close(ddp__peer *p) {
    if (p->fd >= 0) close(p->fd);
    if (p->heap_fd >= 0) close(p->heap_fd);
    p->fd = p->heap_fd = -1;
}

/* Returns 1 while a connection is open. A rank may end before all have arrived, for example when its launcher
   restarts it. */
static int ddp__peer_is_connected(ddp__peer *p) {
    char byte;
    /* A valid peer sends nothing at this point. */
    ssize_t n = p->fd < 0 ? -1 : recv(p->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    if (p->fd >= 0 && (n >= 0 || (errno != EAGAIN && errno != EINTR))) ddp__peer_close(p);
    return p->fd >= 0;
}

/* Allocates the memory of a rendezvous on this rank. Connects nothing. */
static ddp_result ddp__rendezvous_alloc(ddp__rendezvous *rv, ddp_group *group) {
    int count = group->rank ? 1 : group->world_size + DDP__UNAUTHENTICATED_MAX + 1;
    rv->group = group;
    rv->peer = (ddp__peer *)ddp_host_alloc(group, (size_t)count * (sizeof *rv->peer + sizeof *rv->poll_fds));
    if (!rv->peer) return DDP_ERR_NO_MEMORY;
    rv->poll_fds = (struct pollfd *)(void *)(rv->peer + count);
    for (; rv->peer_count < count; rv->peer_count++) ddp__peer_init(&rv->peer[rv->peer_count], -1);
    return DDP_OK;
}

/* Returns the descriptor of rank 0's listener: its last peer. */
static int *ddp__rendezvous_listener(const ddp__rendezvous *rv) { return &rv->peer[rv->peer_count - 1].fd; }

static void ddp__rendezvous_close(ddp__rendezvous *rv) {
    for (; rv->peer_count; rv->peer_count--) ddp__peer_close(&rv->peer[rv->peer_count - 1]);
    ddp_host_free(rv->group, rv->peer);
    rv->peer = NULL;
}

/* Sleeps for 20 ms, or until a peer sends. */
static void ddp__rendezvous_poll(ddp__rendezvous *rv) {
    nfds_t open = 0; /* poll fails for more entries than files may be open */
    for (int i = 0; i < rv->peer_count; i++) {
        rv->poll_fds[open].fd = rv->peer[i].fd;
        rv->poll_fds[open].events = POLLIN;
        open += rv->peer[i].fd >= 0;
    }
    poll(rv->poll_fds, open, 20);
}

//== rendezvous: frames ======================================================================== >>impl-frames

/* Sends, receives and checks frames. A frame has a head, ddp__frame, and then bytes (DATA) or a text
   (all other kinds). A head is checked before its fields are used, because the peer may be any process. */

/* Sends or receives bytes, and a descriptor with them. *fd: the descriptor to send, -1 = none; a received one
   replaces it. Returns the result of sendmsg or recvmsg. */
static ssize_t ddp__send_or_recv(int socket, int receives, void *bytes, size_t size, int *fd) {
    uint64_t control[(CMSG_SPACE(sizeof(int)) + 7) / 8] = {0};
    struct cmsghdr *header = (struct cmsghdr *)(void *)control;
    struct iovec data = {bytes, size};
    struct msghdr message = DDP_ZERO;
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    /* Not CMSG_SPACE: its padding would hold a second descriptor. */
    message.msg_controllen = receives || *fd >= 0 ? CMSG_LEN(sizeof(int)) : 0;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(header), fd, sizeof *fd);
    if (!receives) return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    ssize_t n = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 || message.msg_controllen < CMSG_LEN(sizeof(int))) return n;
    if (*fd >= 0) close(*fd);
    memcpy(fd, CMSG_DATA(header), sizeof *fd);
    return n;
}

/* Sends a frame with a text. Never blocks: the socket buffer has room for it, unless the peer is stuck, and
   then nothing is sent. words: NULL = zeros. heap_fd: a descriptor to send with it; -1 = none. */
static void ddp__send_text_frame(int fd, uint32_t kind, int result, const uint64_t words[2], const char *text,
                                 int heap_fd) {
    ddp__text_frame frame = {{DDP__FRAME_MAGIC, kind, (int32_t)result, sizeof frame.text, {0, 0}}, ""};
    if (words) memcpy(frame.head.words, words, sizeof frame.head.words);
    snprintf(frame.text, sizeof frame.text, "%s", text);
    ddp__send_or_recv(fd, 0, &frame, sizeof frame, &heap_fd);
}

/* Sends the outcome and the lost ranks to every connected peer. heap_fd: as above. */
static void ddp__send_status_to_peers(const ddp__rendezvous *rv, int result, const char *text, int heap_fd) {
    uint64_t lost[2];
    ddp_group_get_lost(rv->group, lost);
    for (int i = 0; i < rv->peer_count; i++)
        if (rv->peer[i].fd >= 0)
            ddp__send_text_frame(rv->peer[i].fd, DDP__FRAME_STATUS, result, lost, text, heap_fd);
}

/* Makes a buffer hold size bytes. The previous content is lost. */
static ddp_result ddp__buffer_reserve(ddp_group *group, ddp__buffer *buffer, size_t size) {
    if (size <= buffer->capacity) return DDP_OK;
    ddp_host_free(group, buffer->bytes);
    buffer->bytes = (unsigned char *)ddp_host_alloc(group, size);
    buffer->capacity = buffer->bytes ? size : 0;
    return buffer->bytes ? DDP_OK
                         : ddp_fail(DDP_ERR_NO_MEMORY,
                                    "%zu bytes for rendezvous messages could not be allocated", size);
}

/* Text from a peer goes into error lines and logs. Bytes other than printable ASCII become \xNN, such as
   \x1b: no peer controls a terminal or adds a line. Escaped text stays as it is. */
static void ddp__escape_text(char text[DDP__TEXT_MAX]) {
    char out[DDP__TEXT_MAX] = "";
    size_t n = 0;
    text[DDP__TEXT_MAX - 1] = 0;
    for (const char *in = text; *in && n + 5 < sizeof out; in++) {
        if (*in >= ' ' && *in <= '~')
            out[n++] = *in;
        else
            n += (size_t)snprintf(out + n, sizeof out - n, "\\x%02x", (unsigned char)*in);
    }
    memset(out + n, 0, sizeof out - n);
    memcpy(text, out, sizeof out);
}

/* Returns 1 if a number is a ddp_result of this version. */
static int ddp__is_result(int number) {
    switch (number) {
// clang-format off
#define DDP_X(name, value, text) case value: return 1;
    DDP_RESULTS(DDP_X)
#undef DDP_X
        // clang-format on
    }
    return 0;
}

/* Checks the head of a frame. allowed: DDP__ALLOW_... bits of the connection's state. group: of which the
   frame may carry data; NULL = this is the rendezvous. */
static int ddp__frame_is_valid(const ddp_group *group, const ddp__peer *p, unsigned allowed) {
    const ddp__frame *frame = &p->head;
    if (frame->kind > DDP__FRAME_LAST || !(allowed >> frame->kind & 1)) return 0;
    if (frame->kind == DDP__FRAME_DATA) {
        /* Rank 0 receives the data of one rank, the others receive the data of all ranks. */
        size_t max_bytes = DDP__TCP_PAYLOAD;
        if (group && group->rank) max_bytes *= (size_t)group->world_size;
        if (!group || frame->result == 1) max_bytes = 0;
        if (p->arrived || frame->result < 0 || frame->result > 1) return 0; /* one frame per peer and call */
        return frame->size <= max_bytes;
    }
    if (frame->size != sizeof p->text) return 0;
    if (frame->kind != DDP__FRAME_STATUS) return frame->result == 0;
    int is_reply = !group && (frame->result == DDP__ADMITTED || frame->result == DDP__OTHER_JOB);
    return is_reply || ddp__is_result(frame->result);
}

/* Reads a frame from a connection. Never blocks: a later call continues.
   Returns 0         the frame is complete: p->head, and p->text or data. The next call begins another one
           EAGAIN    more must arrive
           others    the connection has ended: ECONNRESET by the peer, EPROTO by an invalid frame
   data: buffer for DATA frames. group, allowed: as in ddp__frame_is_valid. */
static int ddp__peer_read_frame(ddp_group *group, ddp__peer *p, ddp__buffer *data, unsigned allowed) {
    const size_t magic = sizeof p->head.magic, head = sizeof p->head;
    /* Three parts: the magic number, the rest of the head, and the data or text. */
    for (;;) {
        int is_data = p->head.kind == DDP__FRAME_DATA;
        if (p->received == magic && p->head.magic != DDP__FRAME_MAGIC) return EPROTO;
        if (p->received == head && !ddp__frame_is_valid(group, p, allowed)) return EPROTO;
        if (p->received == head && is_data && ddp__buffer_reserve(group, data, p->head.size) != DDP_OK)
            return ENOMEM;
        size_t end = p->received < magic ? magic : head;
        if (p->received >= head) end += p->head.size;
        if (p->received == end) {
            p->received = 0;
            if (!is_data) ddp__escape_text(p->text);
            return 0;
        }
        unsigned char *to = (unsigned char *)&p->head + p->received;
        if (p->received >= head)
            to = (is_data ? data->bytes : (unsigned char *)p->text) + (p->received - head);
        ssize_t n = ddp__send_or_recv(p->fd, 1, to, end - p->received, &p->heap_fd);
        if (n == 0) return ECONNRESET;
        if (n < 0 && errno != EINTR) return errno;
        if (n > 0) p->received += (size_t)n;
    }
}

/* Returns 1 if a frame begins as on a machine with the other byte order. */
static int ddp__has_other_byte_order(const ddp__peer *p) {
    return p->received == sizeof p->head.magic && p->head.magic == __builtin_bswap64(DDP__FRAME_MAGIC);
}

//== rendezvous: hello and secret ============================================================== >>impl-secret

/* The hello of a rank, and the proof that it has the secret of the job. K is a key derived from the secret,
   H the text of the hello. Nr and N0 are random nonces of 128 bits, one of each side and connection. The
   messages are drawn in >>impl-rendezvous; the proofs in them are

       rank r    HMAC(K, "rank"   Nr N0 H)    rank 0 compares it, and closes the connection if it is wrong
       rank 0    HMAC(K, "rank 0" Nr N0 H)    rank r compares it: another process may listen at the port

   Replay: a recorded proof is useless, since N0 and Nr are new on every connection.
   Reflection: the proofs of the two roles differ, so no side accepts its own proof. A rank never answers a
   hello, and rank 0 never sends one.
   Another context: H has the job token, version, world size, order and rank number. A proof is valid for
   nothing else.
   Order: the connecting rank proves first. Any process can connect to rank 0, but only one that holds its
   port or is on the network path can pose as rank 0. Rank 0 sends no HMAC to a peer that has not proven the
   secret: an unauthenticated peer gets nothing on which it could test guesses of a weak secret.
   The proof covers the handshake only. Frames after it can be changed on the network path. */

/* Reads DDP_SECRET_FILE without the newline at its end. Only this user may have access to the file. */
static ddp_result ddp__secret_file_read(const char *path, char *out, size_t capacity, size_t *size) {
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK), error = errno;
    const char *reason = NULL;
    struct stat s;
    ssize_t n = 0;
    DDP__CREATE_CHECK(fd >= 0 || error == ELOOP, "DDP_SECRET_FILE=%.200s cannot be opened: %s", path,
                      strerror(error));
    if (fd < 0)
        reason = "is a symbolic link; use the path of the file itself";
    else if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode))
        reason = "is not a regular file";
    else if (s.st_uid != geteuid())
        reason = "belongs to another user; copy it to a file of this user";
    else if (s.st_mode & 077)
        reason = "is accessible to other users; run chmod 600 on it";
    else if ((n = read(fd, out, capacity)) < 0)
        reason = "cannot be read";
    else if ((size_t)n == capacity)
        reason = "is too large for a secret; use 16 to 4000 bytes";
    close(fd);
    DDP__CREATE_CHECK(!reason, "DDP_SECRET_FILE=%.200s %s", path, reason);
    while (n > 0 && (out[n - 1] == '\n' || out[n - 1] == '\r')) n--;
    DDP__CREATE_CHECK(
        n > 0, "DDP_SECRET_FILE=%.200s is empty; write a secret into it, such as from `openssl rand -hex 32`",
        path);
    *size = (size_t)n;
    return DDP_OK;
}

/* Derives the key of a TCP rendezvous from the first of these that is set: desc.secret, DDP_SECRET
   (variable), the file at DDP_SECRET_FILE (path). Without them has_secret stays 0. */
static ddp_result ddp__rendezvous_set_key(ddp__rendezvous *rv, const char *secret, const char *variable,
                                          const char *path) {
    static const char purpose[] = "ddp.h key 1";
    char content[4001];
    size_t size = 0;
    DDP__CREATE_CHECK(!secret || *secret,
                      "desc.secret is empty; use NULL for the secret of DDP_SECRET, or for none");
    if (!secret && *variable) secret = variable;
    if (secret)
        size = strlen(secret);
    else if (*path)
        DDP_TRY(ddp__secret_file_read(path, content, sizeof content, &size));
    if (!size) return DDP_OK;
    ddp__hmac_sha256(secret ? secret : content, size, purpose, sizeof purpose, rv->key);
    rv->has_secret = 1;
    explicit_bzero(content, sizeof content);
    return DDP_OK;
}

/* Writes "token version world_size order rank remaining_ms has_secret name". remaining_ms: how long this rank
   still waits. name: of this process, such as "pid 77 on hostb"; over a Unix socket it has no host. */
static void ddp__hello_write(char out[DDP__TEXT_MAX], const ddp__rendezvous *rv, unsigned version) {
    double remaining = rv->deadline - ddp_now();
    int remaining_ms = remaining > 0 ? (int)(remaining * 1e3) : 0;
    char host[64] = "";
    if (!rv->is_local) gethostname(host, sizeof host - 1);
    snprintf(out, DDP__TEXT_MAX, "%016llx %u %d %d %d %d %d pid %d%s%.50s",
             (unsigned long long)ddp__hash_text(rv->token), version, rv->group->world_size,
             (int)rv->group->desc.order, rv->group->rank, remaining_ms, rv->has_secret, (int)getpid(),
             *host ? " on " : "", host);
    ddp__escape_text(out);
}

/* The fields of a hello. */
typedef struct ddp__hello {
    unsigned long long token;
    unsigned version;
    int world_size, order, rank, remaining_ms, has_secret;
    const char *name; /* of the process */
} ddp__hello;

/* Returns 0 if a field of the hello is missing. */
static int ddp__hello_parse(ddp__hello *h, const char *text) {
    int version_end = 0, name_begin = 0;
    memset(h, 0, sizeof *h);
    if (sscanf(text, "%16llx %u %n", &h->token, &h->version, &version_end) != 2) return 0;
    if (h->version != DDP__HELLO_VERSION) return 1; /* another version may have other fields */
    sscanf(text + version_end, "%d %d %d %d %d %n", &h->world_size, &h->order, &h->rank, &h->remaining_ms,
           &h->has_secret, &name_begin);
    h->name = text + version_end + name_begin;
    return name_begin > 0 && strncmp(h->name, "pid ", 4) == 0;
}

/* Writes the proof of one role as text. role: 'r' = rank r, '0' = rank 0. */
static void ddp__proof_write(char out[65], const unsigned char key[32], char role,
                             const uint64_t rank_nonce[2], const uint64_t rank0_nonce[2],
                             const char hello[DDP__TEXT_MAX]) {
    unsigned char message[64 + DDP__TEXT_MAX] = "ddp.h rendezvous 1", mac[32];
    message[31] = (unsigned char)role;
    memcpy(message + 32, rank_nonce, 16);
    memcpy(message + 48, rank0_nonce, 16);
    memcpy(message + 64, hello, DDP__TEXT_MAX);
    ddp__hmac_sha256(key, 32, message, sizeof message, mac);
    for (int i = 0; i < 32; i++) snprintf(out + 2 * i, 3, "%02x", mac[i]);
}

static int ddp__proof_matches(const char text[DDP__TEXT_MAX], const char expected[65]) {
    return ddp__equal_in_constant_time(text, expected, 65); /* with the zero at the end */
}

/* Compares a hello's version and has_secret with those of rank 0, and checks the proof if the peer has sent
   it. */
static ddp_result ddp__hello_check(const ddp__rendezvous *rv, const ddp__peer *p, const ddp__hello *h) {
    unsigned release = h->version % 1000000;
    if (h->version != DDP__HELLO_VERSION)
        return ddp_fail(DDP_ERR_MISMATCH,
                        "the rank at %s has ddp.h %u.%u.%u (protocol %u), rank 0 has %d.%d.%d (protocol %d); "
                        "build all ranks with the same header",
                        p->name, release / 10000, release / 100 % 100, release % 100, h->version / 1000000,
                        DDP_VERSION_MAJOR, DDP_VERSION_MINOR, DDP_VERSION_PATCH, DDP__PROTOCOL);
    if (rv->has_secret && !h->has_secret)
        return ddp_fail(DDP_ERR_MISMATCH,
                        "rank 0 has a secret and rank %d (%.71s) has none; give every rank the same "
                        "DDP_SECRET, DDP_SECRET_FILE or desc.secret",
                        h->rank, h->name);
    if (!rv->has_secret && h->has_secret)
        return ddp_fail(DDP_ERR_MISMATCH,
                        "rank %d (%.71s) has a secret and rank 0 has none; give every rank the same "
                        "DDP_SECRET, DDP_SECRET_FILE or desc.secret",
                        h->rank, h->name);
    if (*p->expected_proof && !ddp__proof_matches(p->text, p->expected_proof))
        return ddp_fail(DDP_ERR_MISMATCH,
                        "rank %d (%.71s) and rank 0 have different secrets; give every rank the same "
                        "DDP_SECRET, DDP_SECRET_FILE or desc.secret",
                        h->rank, h->name);
    return DDP_OK;
}

//== rendezvous: the address of rank 0 ======================================================== >>impl-address

/* Finds the host and port of rank 0, in the environment or in init_method (called by ddp__create_world), and
   opens rank 0's listener there (called by ddp__accept_all_ranks). */

/* Copies the first host of a SLURM node list: "node[003-010,12],x" begins with node003. */
static void ddp__slurm_first_host(char *out, size_t size, const char *list) {
    size_t n = 0;
    for (int in_range = 0; *list && (in_range || *list != ',') && n + 1 < size; list++) {
        if (*list == '[' || *list == ']')
            in_range = *list == '[';
        else if (in_range && (*list == '-' || *list == ','))
            list += strcspn(list, "]") - 1;
        else
            out[n++] = *list;
    }
    out[n] = 0;
}

/* Sets hosts and port from MASTER_ADDR and MASTER_PORT, or from SLURM. */
static ddp_result ddp__rendezvous_from_env(ddp__rendezvous *rv, const ddp__identity *id) {
    const char *nodes = ddp__env_text("SLURM_STEP_NODELIST");
    int is_slurm = strncmp(rv->token, "slurm", 5) == 0;
    int agent_listens = strcmp(ddp__env_text("TORCHELASTIC_USE_AGENT_STORE"), "True") == 0;
    int port, own_port;
    if (!*nodes) nodes = ddp__env_text("SLURM_JOB_NODELIST");
    DDP_TRY(ddp__env_int("MASTER_PORT", 0, &port));
    DDP_TRY(ddp__env_int("DDP_MASTER_PORT", 0, &own_port));
    if (own_port) {
        rv->port = own_port;
    } else if (port && agent_listens) {
        /* The torchrun agent listens at MASTER_PORT itself. */
        rv->port = port + 1;
        rv->port_count = 16;
    } else if (port) {
        rv->port = port;
    } else if (is_slurm) {
        /* Below the range from which Linux assigns ports by itself. */
        rv->port = 20000 + (int)(ddp__hash_text(rv->token) % 10000);
        rv->port_count = 16;
    }
    snprintf(rv->hosts, sizeof rv->hosts, "%.255s", ddp__env_text("MASTER_ADDR"));
    if (!*rv->hosts && is_slurm) ddp__slurm_first_host(rv->hosts, sizeof rv->hosts, nodes);
    if (!*rv->hosts || !rv->port)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "ddp_group_create: world_size=%d, but only %d ranks are on this machine; set "
                        "MASTER_ADDR and MASTER_PORT to the address of rank 0, set desc.backend to a backend "
                        "for several machines, or start all ranks here",
                        id->world_size, id->local_world_size);
    DDP__CREATE_CHECK(rv->port + rv->port_count - 1 <= 65535,
                      "MASTER_PORT or DDP_MASTER_PORT: port %d is above 65535; use a lower port",
                      rv->port + rv->port_count - 1);
    return DDP_OK;
}

/* Sets hosts and port, or the file, and the token from "tcp://host:port", "tcp://[::1]:port" or
   "file:///path". */
static ddp_result ddp__rendezvous_from_url(ddp__rendezvous *rv, const ddp__identity *id,
                                           const ddp_group_desc *desc) {
    const char *host = strstr(desc->init_method, "://") + 3, *colon = strrchr(host, ':');
    const char *launcher_token = id->size_variable ? id->token : "";
    int length = colon ? (int)(colon - host) : 0;
    char *end = NULL;
    if (desc->init_method[0] == 'f') {
        rv->file_path = host;
        snprintf(rv->token, sizeof rv->token, "file:%.30s:%.299s", desc->name, launcher_token);
        DDP__CREATE_CHECK(host[0] == '/', "init_method \"%.60s\" does not have the form \"file:///path\"",
                          desc->init_method);
        return DDP_OK;
    }
    snprintf(rv->token, sizeof rv->token, "%.20s:%.30s:%.299s", host + length, desc->name, launcher_token);
    if (length > 1 && host[0] == '[' && colon[-1] == ']') {
        host++;
        length -= 2;
    }
    rv->port = colon ? (int)strtol(colon + 1, &end, 10) : 0;
    DDP__CREATE_CHECK(length > 0 && length < 250 && !memchr(host, ' ', (size_t)length) && rv->port > 0
                          && rv->port <= 65535 && !*end,
                      "init_method \"%.60s\" does not have the form \"tcp://host:port\"", desc->init_method);
    snprintf(rv->hosts, sizeof rv->hosts, "%.*s", length, host);
    return DDP_OK;
}

static int ddp__is_loopback_address(const struct sockaddr *at) {
    const struct in6_addr *ipv6 = &((const struct sockaddr_in6 *)(const void *)at)->sin6_addr;
    if (at->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)at)->sin_addr.s_addr) >> 24 == 127;
    if (at->sa_family != AF_INET6) return 0;
    return IN6_IS_ADDR_LOOPBACK(ipv6) || (IN6_IS_ADDR_V4MAPPED(ipv6) && ipv6->s6_addr[12] == 127);
}

/* Returns 1 for "localhost" and a loopback address. A name that resolves to loopback is not enough: Debian
   maps a host's own name to 127.0.1.1, and other machines use another address for it. */
static int ddp__is_loopback(const char *host) {
    struct addrinfo hints = DDP_ZERO, *list;
    int is_loopback = strcmp(host, "localhost") == 0;
    hints.ai_flags = AI_NUMERICHOST;
    if (is_loopback || !*host || getaddrinfo(host, NULL, &hints, &list) != 0) return is_loopback;
    is_loopback = ddp__is_loopback_address(list->ai_addr);
    freeaddrinfo(list);
    return is_loopback;
}

/* Returns 1 for an address of an interface of this machine, and for the unspecified address (all interfaces).
   A successful bind is no proof: ip_nonlocal_bind allows any address. */
static int ddp__is_own_address(const struct sockaddr *at) {
    static const unsigned char unspecified[16] = {0};
    int is_ipv4 = at->sa_family == AF_INET;
    size_t size = is_ipv4 ? 4 : 16;
    /* Both kinds of address are at fixed offsets after the family. */
    size_t offset = is_ipv4 ? offsetof(struct sockaddr_in, sin_addr)
                            : offsetof(struct sockaddr_in6, sin6_addr);
    const unsigned char *wanted = (const unsigned char *)at + offset;
    struct ifaddrs *list = NULL;
    int found = memcmp(wanted, unspecified, size) == 0;
    if (found || getifaddrs(&list) != 0) return found;
    for (const struct ifaddrs *a = list; a && !found; a = a->ifa_next)
        if (a->ifa_addr && a->ifa_addr->sa_family == at->sa_family)
            found = memcmp((const unsigned char *)a->ifa_addr + offset, wanted, size) == 0;
    freeifaddrs(list);
    return found;
}

/* Returns a socket that listens at an address, or -errno. */
static int ddp__listen_at(const struct sockaddr *at, socklen_t length) {
    int fd = ddp__socket(at->sa_family), on = 1, off = 0;
    if (fd < 0) return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, at, length) == 0 && listen(fd, 1024) == 0) return fd;
    int error = errno;
    close(fd);
    return -error;
}

/* Returns a socket that listens at the first free one of port_count ports, at the first address of host that
   belongs to this machine. host "": all interfaces. Skips loopback addresses, unless host is one itself. On
   failure returns -errno; -EADDRNOTAVAIL if host has no such address. */
static int ddp__tcp_listen(const char *host, int port, int port_count) {
    struct addrinfo hints = DDP_ZERO, *list = NULL;
    int fd = -EADDRNOTAVAIL, allows_loopback = ddp__is_loopback(host);
    hints.ai_socktype = SOCK_STREAM;
    if (!*host) {
        fd = ddp__tcp_listen("::", port, port_count); /* serves IPv4 too; fails without IPv6 */
        return fd >= 0 ? fd : ddp__tcp_listen("0.0.0.0", port, port_count);
    }
    if (getaddrinfo(host, NULL, &hints, &list) != 0) return fd;
    for (int i = 0; i < port_count && fd < 0; i++)
        for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
            if (!allows_loopback && ddp__is_loopback_address(a->ai_addr)) continue;
            if (!allows_loopback && !ddp__is_own_address(a->ai_addr)) continue;
            /* sin_port is at the same offset in IPv6. */
            ((struct sockaddr_in *)(void *)a->ai_addr)->sin_port = htons((uint16_t)(port + i));
            int opened = ddp__listen_at(a->ai_addr, a->ai_addrlen);
            if (opened >= 0 || fd != -EADDRINUSE) fd = opened;
        }
    freeaddrinfo(list);
    return fd;
}

/* Describes the process that listens at a port of this machine, if this user can see it: "pid 77
   (/usr/bin/python3)". */
static void ddp__port_owner(int port, char *out, size_t size) {
    enum { LISTEN = 10 };
    unsigned long inode, listener = 0;
    unsigned local_port, state;
    char line[512], exe[32];
    glob_t files = DDP_ZERO;
    snprintf(out, size, "another process");
    /* The kernel's tables have the inode of each socket. The owner has a descriptor of that inode. */
    for (int i = 0; i < 2; i++) {
        FILE *table = fopen(i ? "/proc/net/tcp" : "/proc/net/tcp6", "re");
        while (table && fgets(line, sizeof line, table)) {
            int fields = sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*s %x %*s %*s %*s %*s %*s %lu", &local_port,
                                &state, &inode);
            if (fields == 3 && (int)local_port == port && state == LISTEN) listener = inode;
        }
        if (table) fclose(table);
    }
    if (listener) glob("/proc/[0-9]*/fd/*", GLOB_NOSORT, NULL, &files);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        int pid = atoi(files.gl_pathv[i] + 6);
        ssize_t n = readlink(files.gl_pathv[i], line, sizeof line - 1);
        line[n > 0 ? n : 0] = 0;
        if (sscanf(line, "socket:[%lu]", &inode) != 1 || inode != listener) continue;
        snprintf(exe, sizeof exe, "/proc/%d/exe", pid);
        n = readlink(exe, line, sizeof line);
        snprintf(out, size, "pid %d (%.*s)", pid, (int)(n > 0 ? n : 0), line);
        break;
    }
    globfree(&files);
}

/* Returns the process that listens at the abstract socket of this job. pid 0: none. */
static ddp__ucred ddp__socket_owner(const ddp__rendezvous *rv) {
    int fd = ddp__socket(AF_UNIX);
    /* If this fails, the socket has no peer, and its pid stays 0. */
    connect(fd, (const struct sockaddr *)&rv->address, rv->address_length);
    ddp__ucred owner = ddp__peer_credentials(fd);
    close(fd);
    return owner;
}

/* Fails because another process uses the abstract socket of this job. Any user can compute its name and bind
   it. owner.pid 0: unknown. */
static ddp_result ddp__fail_socket_in_use(const ddp__rendezvous *rv, ddp__ucred owner) {
    const char *name = rv->address.sun_path + 1;
    const char *remedy = "set desc.init_method to \"file:///path\" on all ranks";
    if (strncmp(rv->token, "torch:", 6) == 0 || strncmp(rv->token, "desc:", 5) == 0)
        remedy = "set another MASTER_PORT, or desc.init_method to \"file:///path\", on all ranks";
    if (owner.pid && owner.uid == geteuid())
        return ddp_fail(
            DDP_ERR_MISMATCH,
            "another process (pid %d) is already rank 0 of job %.200s; give each job its own MASTER_PORT",
            (int)owner.pid, rv->token);
    if (owner.pid)
        return ddp_fail(
            DDP_ERR_SYSTEM,
            "socket @%s, the rendezvous of this job, is in use by pid %d of another user (uid %ld); %s", name,
            (int)owner.pid, (long)owner.uid, remedy);
    return ddp_fail(DDP_ERR_SYSTEM,
                    "socket @%s, the rendezvous of this job, is in use by a process that does not listen "
                    "(`ss -xap` shows it); %s",
                    name, remedy);
}

/* Opens rank 0's listener, unless it is open. Retries a port that is in use for one second: another rank may
   have tried to connect to it, or an earlier job may be ending. */
static ddp_result ddp__rendezvous_listen(const ddp__rendezvous *rv) {
    int fd = *ddp__rendezvous_listener(rv);
    double retry_until = ddp_now() + 1.0;
    const char *host = rv->hosts;
    char text[400], owner[160];
    if (fd < 0 && rv->is_local)
        fd = ddp__listen_at((const struct sockaddr *)&rv->address, rv->address_length);
    while (fd < 0 && !rv->is_local) {
        fd = ddp__tcp_listen(host, rv->port, rv->port_count);
        if (fd == -EADDRNOTAVAIL && *host) {
            snprintf(text, sizeof text,
                     "host \"%.200s\" has no address of this machine that other machines can reach: rank 0 "
                     "listens on all interfaces",
                     host);
            ddp_group_log(rv->group, text);
            host = "";
        } else if (fd != -EADDRINUSE || ddp_now() > retry_until) {
            break;
        } else {
            usleep(50000);
        }
    }
    *ddp__rendezvous_listener(rv) = fd;
    if (fd >= 0) return DDP_OK;
    if (rv->is_local && fd == -EADDRINUSE) return ddp__fail_socket_in_use(rv, ddp__socket_owner(rv));
    if (rv->is_local)
        return ddp_fail(DDP_ERR_SYSTEM, "the rendezvous socket could not be created: %s", strerror(-fd));
    if (fd != -EADDRINUSE)
        return ddp_fail(DDP_ERR_SYSTEM, "rank 0 cannot listen on port %d: %s", rv->port, strerror(-fd));
    ddp__port_owner(rv->port, owner, sizeof owner);
    return ddp_fail(
        DDP_ERR_SYSTEM,
        "port %d is in use by %s; set another port on all ranks, with DDP_MASTER_PORT or init_method",
        rv->port, owner);
}

//== rendezvous: address lists and files ================================================= >>impl-address-list

/* Rank 0's addresses as one line of text: "number port address address ...". The number becomes a part of the
   job token. A rendezvous file (init_method file://) contains this line. In a split of a tcp group, the rank
   0 of each new group sends its line to the members. */

/* Ranks with the same number can share memory: same boot, user, network namespace and process namespace. */
#if !defined(DDP__MACHINE_SALT)
#define DDP__MACHINE_SALT 0 /* tests use different values to simulate several machines */
#endif
DDPDEF uint64_t ddp_machine_id(void) {
    char boot[64] = "";
    uint64_t number[4] = {(uint64_t)geteuid(), (uint64_t)(DDP__MACHINE_SALT)};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    struct stat s;
    if (fd < 0 || read(fd, boot, sizeof boot - 1) <= 0) gethostname(boot, sizeof boot);
    if (fd >= 0) close(fd);
    for (int i = 0; i < 2; i++)
        if (stat(i ? "/proc/self/ns/pid" : "/proc/self/ns/net", &s) == 0) number[2 + i] = (uint64_t)s.st_ino;
    return ddp_hash(ddp_hash(DDP_HASH_SEED, boot, sizeof boot), number, sizeof number);
}

DDPDEF int ddp_machine_block(const uint64_t *machines, int world_size) {
    int block = 1;
    while (world_size % (2 * block) == 0) block *= 2;
    for (int r = 0; r < world_size; r++)
        while (machines[r] != machines[r / block * block]) block /= 2;
    return block;
}

/* Returns a number that no other process can guess. Without getrandom it is only different for each machine,
   process and time. */
DDPDEF uint64_t ddp_unique_id(void) {
    uint64_t number;
    if (ddp__random_bytes(&number, sizeof number)) return number;
    uint64_t seed[3] = {ddp_machine_id(), (uint64_t)getpid(), (uint64_t)(ddp_now() * 1e9)};
    return ddp_hash(DDP_HASH_SEED, seed, sizeof seed);
}

/* Writes the line: the port of a listener, 0 without one, and all addresses of this machine. */
static void ddp__addresses_write(int listener, char out[DDP__ADDRESSES_MAX]) {
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    struct ifaddrs *list = NULL;
    char host[80];
    int port = 0;
    /* sin_port is at the same offset in IPv6. */
    if (getsockname(listener, (struct sockaddr *)&address, &length) == 0)
        port = ntohs(((struct sockaddr_in *)(void *)&address)->sin_port);
    size_t n = (size_t)snprintf(out, DDP__ADDRESSES_MAX, "%016llx %d", (unsigned long long)ddp_unique_id(),
                                port);
    getifaddrs(&list);
    for (struct ifaddrs *a = list; a; a = a->ifa_next) {
        socklen_t size = sizeof(struct sockaddr_in6);
        if (!a->ifa_addr) continue;
        /* Fails for addresses that are not IP. */
        if (getnameinfo(a->ifa_addr, size, host, sizeof host, NULL, 0, NI_NUMERICHOST) != 0) continue;
        /* A % marks a link-local address. */
        if (!strchr(host, '%') && n + strlen(host) + 3 < DDP__ADDRESSES_MAX)
            n += (size_t)snprintf(out + n, DDP__ADDRESSES_MAX - n, " %s", host);
    }
    if (list) freeifaddrs(list);
    snprintf(out + n, DDP__ADDRESSES_MAX - n, "\n");
}

/* Parses the line. Returns 0 if it is incomplete. token_size: length of the token without the number. */
static int ddp__addresses_parse(ddp__rendezvous *rv, size_t token_size, const char *text) {
    char number[17];
    int n = 0;
    if (!strchr(text, '\n') || sscanf(text, "%16s %d %n", number, &rv->port, &n) != 2) return 0;
    if (rv->port < 0 || rv->port > 65535) return 0;
    rv->numeric_hosts = 1;
    snprintf(rv->token + token_size, sizeof rv->token - token_size, ":%s", number);
    snprintf(rv->hosts, sizeof rv->hosts, "%.*s", (int)strcspn(text + n, "\n"), text + n);
    return 1;
}

/* Returns 1 if the rendezvous file can be trusted. Otherwise sets the error line. */
static int ddp__rendezvous_file_check(const char *path, const struct stat *file) {
    char reason[100] = "";
    if (S_ISLNK(file->st_mode))
        snprintf(reason, sizeof reason, "is a symbolic link");
    else if (!S_ISREG(file->st_mode))
        snprintf(reason, sizeof reason, "is not a regular file");
    else if (file->st_uid != geteuid())
        snprintf(reason, sizeof reason, "belongs to uid %ld, but this rank runs as uid %ld",
                 (long)file->st_uid, (long)geteuid());
    else if (file->st_mode & (S_IWGRP | S_IWOTH))
        snprintf(reason, sizeof reason, "can be written by other users (mode %03o)",
                 (unsigned)(file->st_mode & 0777));
    if (!reason[0]) return 1;
    ddp_fail(
        DDP_ERR_SYSTEM,
        "init_method file://%.200s %s; remove it, or use a path in a folder where only this user can write",
        path, reason);
    return 0;
}

/* Reads the address of rank 0 from the rendezvous file. Never blocks, even if the file is a FIFO. The file of
   an earlier job has an address without a listener. token_size: as in ddp__addresses_parse.
   Errors: DDP_ERR_INVALID   rank 0 has not written the file yet
           DDP_ERR_SYSTEM    the file is unreadable or not trusted */
static ddp_result ddp__rendezvous_file_read(ddp__rendezvous *rv, size_t token_size) {
    char text[DDP__ADDRESSES_MAX];
    struct stat file;
    ssize_t n = 0;
    int fd = open(rv->file_path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY), error = errno;
    int exists = (fd >= 0 ? fstat(fd, &file) : lstat(rv->file_path, &file)) == 0;
    int is_trusted = !exists || ddp__rendezvous_file_check(rv->file_path, &file);
    if (fd >= 0) {
        if (is_trusted) n = read(fd, text, sizeof text - 1);
        close(fd);
    }
    if (!is_trusted) return DDP_ERR_SYSTEM;
    if (fd < 0 && (error == ENOENT || error == ESTALE))
        return ddp_fail(DDP_ERR_INVALID, "%.200s does not exist yet", rv->file_path);
    if (fd < 0)
        return ddp_fail(DDP_ERR_SYSTEM, "init_method file://%.200s cannot be read: %s", rv->file_path,
                        strerror(error));
    text[n > 0 ? n : 0] = 0;
    if (ddp__addresses_parse(rv, token_size, text)) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID, "%.200s: rank 0 has not written its address yet", rv->file_path);
}

/* Creates the rendezvous file, for this user only, and writes this rank's addresses. It replaces a file that
   an earlier job of this user left, and nothing else. */
static ddp_result ddp__rendezvous_file_write(ddp__rendezvous *rv, int listener) {
    char text[DDP__ADDRESSES_MAX];
    struct stat file;
    int fd = -1;
    ddp__addresses_write(listener, text);
    ddp__addresses_parse(rv, strlen(rv->token), text);
    for (int tries = 0; tries < 3 && fd < 0; tries++) {
        if (lstat(rv->file_path, &file) == 0) {
            if (!ddp__rendezvous_file_check(rv->file_path, &file)) return DDP_ERR_SYSTEM;
            unlink(rv->file_path);
        }
        fd = open(rv->file_path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
        if (fd < 0 && errno != EEXIST) break;
    }
    if (fd < 0)
        return ddp_fail(DDP_ERR_SYSTEM, "init_method file://%.200s cannot be created: %s", rv->file_path,
                        strerror(errno));
    int is_complete = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (close(fd) == 0 && is_complete) return DDP_OK;
    return ddp_fail(DDP_ERR_SYSTEM, "init_method file://%.200s cannot be written: %s", rv->file_path,
                    strerror(errno));
}

//== rendezvous: rank 0 ========================================================================= >>impl-rank0

/* Rank 0's side: accepts connections, authenticates the peers, admits them as ranks, and sends the outcome to
   all of them. ddp__accept_all_ranks calls the others.

   Any process can connect. Rank 0 limits the number of unauthenticated peers, the time for a handshake, and
   the lines that it logs. A peer ends the job only if it is authenticated. */

#define DDP__REFUSAL_REPORTS_MAX 256 /* a flood of connections must not fill the disk with log lines */

/* Reports through log_fn why this rank waits: first after DDP__WAIT_REPORT_SECONDS, then every minute. */
__attribute__((format(printf, 2, 3))) static void ddp__report_waiting(ddp__rendezvous *rv, const char *format,
                                                                      ...) {
    char text[440];
    va_list args;
    if (ddp_now() < rv->next_report) return;
    rv->next_report += DDP__WAIT_REPORT_INTERVAL;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ddp_group_log(rv->group, text);
}

/* Closes the connection of an unauthenticated peer, and reports it through log_fn. result: sent to the peer
   with the reason; 0 = sends nothing. */
static void ddp__refuse_peer(ddp__rendezvous *rv, ddp__peer *p, const char *reason, int result) {
    char text[440]; /* ddp_group_log puts the rank and the group's name before it */
    snprintf(text, sizeof text, "refused %s: %.320s", p->name, reason);
    if (result) ddp__send_text_frame(p->fd, DDP__FRAME_STATUS, result, NULL, reason, -1);
    if (result < 0) snprintf(rv->last_refusal, sizeof rv->last_refusal, "%.199s", reason);
    if (rv->refusal_count == DDP__REFUSAL_REPORTS_MAX)
        snprintf(text, sizeof text, "refused more connections; the rest is not reported");
    if (rv->refusal_count <= DDP__REFUSAL_REPORTS_MAX) ddp_group_log(rv->group, text);
    rv->refusal_count++;
    ddp__peer_close(p);
}

/* Returns the pid in the name of a rank, or 0. */
static int ddp__parse_pid(const char *name) {
    int pid = 0;
    return sscanf(name, "pid %d", &pid) == 1 ? pid : 0;
}

/* Admits the peer as the rank that its hello claims. */
static ddp_result ddp__admit_rank(ddp__rendezvous *rv, ddp__peer *p, const ddp__hello *h) {
    int world_size = rv->group->world_size, pid = ddp__parse_pid(h->name);
    int in_range = h->rank > 0 && h->rank < world_size;
    double deadline = ddp_now() + h->remaining_ms * 1e-3;
    ddp__peer *slot = &rv->peer[in_range ? h->rank : 0];
    if (h->world_size != world_size)
        return ddp_fail(
            DDP_ERR_MISMATCH,
            "rank %d (%.71s) has world_size=%d, rank 0 has world_size=%d; give every rank the same", h->rank,
            h->name, h->world_size, world_size);
    if (h->order != (int)rv->group->desc.order)
        return ddp_fail(DDP_ERR_MISMATCH,
                        "rank %d (%.71s) and rank 0 have different desc.order; give every rank the same",
                        h->rank, h->name);
    if (!in_range || ddp__peer_is_connected(slot))
        return ddp_fail(DDP_ERR_MISMATCH,
                        "two processes have rank %d: %s and %.71s; give each process its own rank", h->rank,
                        slot->name, h->name);
    if (rv->is_local && pid != (int)ddp__peer_credentials(p->fd).pid)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "rank %d (pid %d) and rank 0 are in different pid namespaces; start the containers "
                        "of one machine in one (docker: --pid=host)",
                        h->rank, pid);
    *slot = *p;
    slot->arrived = 1;
    snprintf(slot->name, sizeof slot->name, "%.71s", h->name);
    p->fd = p->heap_fd = -1;
    if (deadline < rv->deadline) rv->deadline = deadline;
    ddp__send_text_frame(slot->fd, DDP__FRAME_STATUS, DDP__ADMITTED, NULL, slot->rank0_proof, -1);
    return DDP_OK;
}

/* Sends a challenge to a peer that has sent its hello. The next frame must be the proof that answers it. */
static ddp_result ddp__send_challenge(const ddp__rendezvous *rv, ddp__peer *p) {
    uint64_t nonce[2];
    if (!ddp__random_bytes(nonce, sizeof nonce))
        return ddp_fail(DDP_ERR_SYSTEM, "getrandom failed: %s", strerror(errno));
    ddp__proof_write(p->expected_proof, rv->key, 'r', p->head.words, nonce, p->hello);
    ddp__proof_write(p->rank0_proof, rv->key, '0', p->head.words, nonce, p->hello);
    /* If this fails, the connection ends, and the next read reports it. */
    ddp__send_text_frame(p->fd, DDP__FRAME_CHALLENGE, 0, nonce, "", -1);
    return DDP_OK;
}

/* Reads from an unauthenticated peer: its hello, then its proof if the ranks have a secret. The peer is then
   admitted as a rank, stays unauthenticated, or is refused. If a rank of this job contradicts rank 0, the
   rendezvous fails if the rank is authenticated: by the secret, or as a process of this user. Otherwise rank
   0 refuses it and continues to wait. */
static void ddp__authenticate_peer(ddp__rendezvous *rv, ddp__peer *p) {
    int error = ddp__peer_read_frame(NULL, p, NULL, *p->expected_proof ? DDP__ALLOW_PROOF : DDP__ALLOW_HELLO);
    const char *reason = NULL;
    ddp__hello hello;
    if (error == EAGAIN && ddp_now() - p->opened_at <= DDP__HANDSHAKE_SECONDS) return;
    if (!error && !*p->expected_proof) memcpy(p->hello, p->text, sizeof p->hello);
    int is_rank = !error && ddp__hello_parse(&hello, p->hello);
    if (error == EAGAIN)
        reason = "it did not send its rank in time";
    else if (error == EPROTO && ddp__has_other_byte_order(p))
        reason = "its byte order differs; use machines with the same byte order";
    else if (error && error != EPROTO)
        reason = "it closed the connection before it sent its rank";
    else if (!is_rank)
        reason = "it does not use the ddp protocol";
    else if (hello.token != ddp__hash_text(rv->token))
        reason = "it has the token of another job";
    if (reason) {
        ddp__refuse_peer(rv, p, reason, is_rank ? DDP__OTHER_JOB : 0);
        return;
    }
    ddp_result result = ddp__hello_check(rv, p, &hello);
    if (result == DDP_OK && rv->has_secret && !*p->expected_proof) {
        result = ddp__send_challenge(rv, p);
        if (result == DDP_OK) return;
    }
    int is_authenticated = rv->is_local || (*p->expected_proof && result == DDP_OK);
    if (result == DDP_OK) result = ddp__admit_rank(rv, p, &hello);
    if (result == DDP_OK) return;
    if (is_authenticated)
        rv->result = result;
    else
        ddp__refuse_peer(rv, p, ddp_last_error(), (int)result);
}

/* Returns the slot for the next connection: a free one. If none is free, it returns the oldest connection of
   the network that has the most. A flood from one network then displaces its own connections. */
static ddp__peer *ddp__choose_connection_slot(ddp__peer *peer, int count) {
    ddp__peer *chosen = NULL;
    int chosen_neighbours = 0;
    for (int i = 0; i < count; i++) {
        if (peer[i].fd < 0) return &peer[i];
    }
    for (int i = 0; i < count; i++) {
        int neighbours = 0;
        for (int k = 0; k < count; k++)
            neighbours += memcmp(peer[i].network, peer[k].network, sizeof peer->network) == 0;
        if (chosen && neighbours < chosen_neighbours) continue;
        if (chosen && neighbours == chosen_neighbours && peer[i].opened_at >= chosen->opened_at) continue;
        chosen = &peer[i];
        chosen_neighbours = neighbours;
    }
    return chosen;
}

/* Accepts connections and reads the frames that have arrived. A connection that displaces another one is the
   only one of this call, so that every displaced peer has been read. A flood therefore keeps no rank out. */
static void ddp__accept_connections(ddp__rendezvous *rv) {
    int world_size = rv->group->world_size, listener = *ddp__rendezvous_listener(rv), out_of_files = 0;
    ddp__peer *unauthenticated = rv->peer + world_size, *silent = NULL;
    for (int accepted = 0; accepted < DDP__UNAUTHENTICATED_MAX; accepted++) {
        ddp__peer *slot = ddp__choose_connection_slot(unauthenticated, DDP__UNAUTHENTICATED_MAX);
        if (slot->fd >= 0 && accepted) break;
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) {
            out_of_files = (errno == EMFILE || errno == ENFILE) && ddp__fd_ready(listener, POLLIN, 0);
            break;
        }
        if (rv->is_local && ddp__peer_credentials(fd).uid != geteuid()) {
            close(fd);
            continue;
        }
        if (slot->fd >= 0)
            ddp__refuse_peer(rv, slot, "it did not send its rank, and other connections are waiting", 0);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
        fcntl(fd, F_SETFL, O_NONBLOCK);
        ddp__peer_init(slot, fd);
    }
    for (int i = 0; i < DDP__UNAUTHENTICATED_MAX && rv->result == DDP_OK; i++) {
        ddp__peer *p = &unauthenticated[i];
        if (p->fd >= 0) ddp__authenticate_peer(rv, p);
        if (p->fd >= 0) silent = p;
    }
    if (out_of_files && silent)
        ddp__refuse_peer(
            rv, silent,
            "it did not send its rank, and the limit of open files is reached; raise `ulimit -n` of rank 0",
            0);
    else if (out_of_files && !rv->result)
        rv->result = ddp_fail(DDP_ERR_SYSTEM,
                              "the limit of open files is too low for %d ranks; raise `ulimit -n` of rank 0",
                              world_size);
}

/* Reports the missing ranks and the address at which rank 0 listens. */
static void ddp__report_missing_ranks(ddp__rendezvous *rv, const char *missing) {
    struct sockaddr_storage address = DDP_ZERO;
    socklen_t length = sizeof address;
    char host[80] = "?", port[8] = "?", place[200];
    getsockname(*ddp__rendezvous_listener(rv), (struct sockaddr *)&address, &length);
    getnameinfo((struct sockaddr *)&address, length, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    if (rv->is_local)
        snprintf(place, sizeof place, "socket @%s of this machine", rv->address.sun_path + 1);
    else if (rv->file_path)
        snprintf(place, sizeof place, "%s port %s, as written in %.80s", host, port, rv->file_path);
    else
        snprintf(place, sizeof place, "%s port %s", host, port);
    ddp__report_waiting(rv, "still waiting for rank %.180s; this rank listens at %s", missing, place);
}

/* For a local rendezvous of ranks that have connected over TCP before. Returns DDP_ERR_PEER_LOST if one of
   their processes has ended. Takes about 10 us per rank. */
static ddp_result ddp__check_processes_alive(const ddp__rendezvous *rv) {
    const int *index = rv->process_index;
    for (int r = 0; rv->process && r < rv->group->world_size; r++) {
        const uint64_t *process = rv->process[index ? index[r] : r];
        int pid = (int)process[DDP__PROCESS_PID];
        if (ddp__process_has_ended(pid, process[DDP__PROCESS_START_TIME]))
            return ddp_fail(DDP_ERR_PEER_LOST,
                            "rank %d (pid %d) exited before it connected to the ranks of its machine", r,
                            pid);
    }
    return DDP_OK;
}

/* Returns 1 while rank 0 must wait for ranks. Returns 0 when all have arrived, or with rv->result set when
   the rendezvous has failed: the deadline has passed, a process has ended, or every missing rank has arrived
   and left again. */
static int ddp__ranks_are_missing(ddp__rendezvous *rv) {
    int some_not_arrived = 0, departed_rank = 0;
    char list[300] = "";
    for (int r = 1; r < rv->group->world_size; r++) {
        if (ddp__peer_is_connected(&rv->peer[r])) continue;
        ddp__list_rank(list, sizeof list, r);
        if (rv->peer[r].arrived)
            departed_rank = r;
        else
            some_not_arrived = 1;
    }
    if (!some_not_arrived && !departed_rank) return 0;
    if (rv->result == DDP_OK) rv->result = ddp__check_processes_alive(rv);
    if (rv->result != DDP_OK) return 0;
    if (!some_not_arrived) {
        rv->result = ddp_fail(DDP_ERR_PEER_LOST,
                              "rank %d (%s) closed the connection before all ranks had connected",
                              departed_rank, rv->peer[departed_rank].name);
        return 0;
    }
    if (ddp_now() <= rv->deadline) {
        ddp__report_missing_ranks(rv, list);
        return 1;
    }
    rv->result = ddp_fail(DDP_ERR_TIMEOUT, "timed out after %d ms: missing: rank %s%s%s",
                          rv->group->desc.timeout_ms, list, *rv->last_refusal ? "; refused: " : "",
                          rv->last_refusal);
    for (int r = 1; r < rv->group->world_size; r++)
        if (rv->peer[r].fd < 0) ddp_group_mark_lost(rv->group, r, DDP_ERR_TIMEOUT, ddp_last_error());
    return 0;
}

/* Rank 0's side of a rendezvous: waits for all ranks or for a failure, and sends the outcome to all of them.
   heap: as in ddp__connect_ranks. */
static void ddp__accept_all_ranks(ddp__rendezvous *rv, ddp__heap **heap) {
    int world_size = rv->group->world_size, heap_fd = -1;
    ddp__peer *rank = rv->peer;
    ddp__hello_write(rank[0].text, rv, DDP__HELLO_VERSION);
    snprintf(rank[0].name, sizeof rank->name, "%.71s", strstr(rank[0].text, "pid"));
    rv->result = ddp__rendezvous_listen(rv);
    if (rv->result == DDP_OK && rv->file_path)
        rv->result = ddp__rendezvous_file_write(rv, *ddp__rendezvous_listener(rv));
    if (rv->result == DDP_OK) {
        for (ddp__accept_connections(rv); ddp__ranks_are_missing(rv); ddp__accept_connections(rv))
            ddp__rendezvous_poll(rv);
        if (rv->file_path) unlink(rv->file_path);
    }
    if (heap && rv->result == DDP_OK) rv->result = ddp__heap_create(heap, world_size, 0, 0);
    if (heap && *heap) {
        heap_fd = (*heap)->fd;
        /* From here on a rank that ends is lost. */
        for (int r = 0; r < world_size; r++) ddp__rank_register(*heap, r, ddp__parse_pid(rank[r].name));
    }
    if (rv->result == DDP_OK) {
        /* Closes the listener and the unauthenticated peers. */
        while (rv->peer_count > world_size) ddp__peer_close(&rv->peer[--rv->peer_count]);
        ddp__send_status_to_peers(rv, DDP_OK, rank[0].name, heap_fd);
    } else {
        ddp__send_status_to_peers(rv, rv->result, ddp_last_error(), heap_fd);
    }
    for (int r = 0; r < world_size; r++) rank[r].arrived = 0;
}

//== rendezvous: the other ranks ============================================================== >>impl-connect

/* The side of the other ranks: they find rank 0, connect to it and wait for the outcome. Then both sides
   together: ddp__connect_ranks for a group over TCP, ddp__local_connect for a group in shared memory. */

/* Waits for the next frame of rank 0. Returns 0, ETIMEDOUT, or the errno of ddp__peer_read_frame. EPROTO:
   also if the peer sends this rank's hello back, or if the socket is connected to itself. */
static int ddp__wait_for_frame(ddp__peer *p, double deadline, unsigned allowed) {
    for (;;) {
        int error = ddp__peer_read_frame(NULL, p, NULL, allowed);
        if (error != EAGAIN) return error;
        if (!ddp__fd_ready(p->fd, POLLIN, deadline)) return ETIMEDOUT;
    }
}

/* Describes why a peer is not rank 0. */
static const char *ddp__not_rank0_reason(const ddp__peer *p, int error) {
    if (error == ETIMEDOUT) return "the process that listens there does not answer";
    if (error == EPROTO && ddp__has_other_byte_order(p))
        return "the process that listens there has another byte order";
    return error == EPROTO ? "the process that listens there does not use the ddp protocol" : strerror(error);
}

/* Sends a hello on a new connection, proves the secret if there is one, and waits for the reply. DDP_OK: rank
   0 has admitted this rank. DDP_ERR_INVALID: the peer is not rank 0 of this job; try again, or another
   address. outcome_by: rank 0 sends the outcome before this time. */
static ddp_result ddp__handshake_with_rank0(ddp__rendezvous *rv, ddp__peer *p, double outcome_by) {
    double reply_by = ddp_now() + DDP__HANDSHAKE_SECONDS;
    char hello[DDP__TEXT_MAX] = "", proof[65], rank0_proof[65] = "";
    uint64_t nonce[2] = {0, 0};
    unsigned allowed = rv->has_secret ? DDP__ALLOW_STATUS | DDP__ALLOW_CHALLENGE : DDP__ALLOW_STATUS;
    if (outcome_by < reply_by) reply_by = outcome_by;
    if (rv->has_secret && !ddp__random_bytes(nonce, sizeof nonce))
        return ddp_fail(DDP_ERR_SYSTEM, "getrandom failed: %s", strerror(errno));
    ddp__hello_write(hello, rv, DDP__HELLO_VERSION);
    /* If this fails, the next read reports why. */
    ddp__send_text_frame(p->fd, DDP__FRAME_HELLO, 0, nonce, hello, -1);
    int error = ddp__wait_for_frame(p, reply_by, allowed);
    if (!error && p->head.kind == DDP__FRAME_CHALLENGE) {
        ddp__proof_write(proof, rv->key, 'r', nonce, p->head.words, hello);
        ddp__proof_write(rank0_proof, rv->key, '0', nonce, p->head.words, hello);
        ddp__send_text_frame(p->fd, DDP__FRAME_PROOF, 0, NULL, proof, -1);
        error = ddp__wait_for_frame(p, reply_by, DDP__ALLOW_STATUS);
    }
    if (!error && p->head.result == 0) error = EPROTO;
    if (error) return ddp_fail(DDP_ERR_INVALID, "%s", ddp__not_rank0_reason(p, error));
    if (p->head.result == DDP__OTHER_JOB)
        return ddp_fail(DDP_ERR_INVALID, "rank 0 of another job listens there");
    if (p->head.result < 0) return ddp_fail((ddp_result)p->head.result, "%.400s", p->text);
    if (rv->has_secret && (!*rank0_proof || !ddp__proof_matches(p->text, rank0_proof)))
        return ddp_fail(DDP_ERR_INVALID,
                        "the process that listens there does not have the secret of this rank");
    return DDP_OK;
}

/* Waits until rank 0 sends the outcome, after it has admitted this rank. */
static ddp_result ddp__wait_for_outcome(ddp__rendezvous *rv, ddp__peer *p, double outcome_by) {
    int error;
    do {
        double wait_until = rv->next_report < outcome_by ? rv->next_report : outcome_by;
        error = ddp__wait_for_frame(p, wait_until, DDP__ALLOW_STATUS);
        if (error == ETIMEDOUT)
            ddp__report_waiting(rv, "still waiting for other ranks to connect to rank 0 (%s)", p->name);
    } while (error == ETIMEDOUT && ddp_now() < outcome_by);
    if (error == ETIMEDOUT) {
        ddp_fail(DDP_ERR_TIMEOUT, "rank 0 (%s) did not answer within the timeout: a rank is missing",
                 p->name);
        ddp_group_mark_lost(rv->group, 0, DDP_ERR_TIMEOUT, ddp_last_error());
        return DDP_ERR_TIMEOUT;
    }
    if (error == EPROTO || (!error && p->head.result > 0))
        return ddp_fail(DDP_ERR_MISMATCH,
                        "rank 0 (%s) sent an invalid frame; build all ranks with the same header", p->name);
    if (error) return ddp_fail(DDP_ERR_PEER_LOST, "rank 0 (%s) closed the connection", p->name);
    if (p->head.result == 0) return DDP_OK;
    ddp_group_add_lost(rv->group, p->head.words, (ddp_result)p->head.result, p->text);
    return ddp_fail((ddp_result)p->head.result, "%.400s", p->text);
}

/* Tries one address of rank 0. DDP_OK: all ranks have connected. DDP_ERR_INVALID: rank 0 of this job does not
   listen there. */
static ddp_result ddp__connect_to_address(ddp__rendezvous *rv, const struct sockaddr *to, socklen_t length) {
    double connect_by = ddp_now() + 3.0, outcome_by = rv->deadline + rv->grace_period;
    socklen_t size = sizeof(int);
    int fd = ddp__socket(to->sa_family), error = 0;
    ddp_result result;
    if (connect_by > rv->deadline) connect_by = rv->deadline;
    if (fd < 0 || connect(fd, to, length) != 0) error = errno;
    if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        if (ddp__fd_ready(fd, POLLOUT, connect_by)) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    ddp__peer_init(rv->peer, fd);
    if (error)
        result = ddp_fail(DDP_ERR_INVALID, "%s", strerror(error));
    else if (rv->is_local && ddp__peer_credentials(fd).uid != geteuid())
        result = ddp__fail_socket_in_use(rv, ddp__peer_credentials(fd));
    else
        result = ddp__handshake_with_rank0(rv, rv->peer, outcome_by);
    if (result == DDP_OK) result = ddp__wait_for_outcome(rv, rv->peer, outcome_by);
    if (result != DDP_OK) ddp__peer_close(rv->peer);
    return result;
}

/* Tries every port at every address of every host. Returns as ddp__connect_to_address. */
static ddp_result ddp__connect_to_hosts(ddp__rendezvous *rv) {
    struct addrinfo hints = DDP_ZERO, *list;
    ddp_result result = DDP_ERR_INVALID;
    char hosts[sizeof rv->hosts], number[16], *rest = NULL;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (rv->numeric_hosts ? AI_NUMERICHOST : 0);
    memcpy(hosts, rv->hosts, sizeof hosts);
    for (const char *host = strtok_r(hosts, " ", &rest); host; host = strtok_r(NULL, " ", &rest))
        for (int port = rv->port; port < rv->port + rv->port_count && result == DDP_ERR_INVALID; port++) {
            snprintf(number, sizeof number, "%d", port);
            int error = getaddrinfo(host, number, &hints, &list);
            if (error) {
                ddp_fail(result, "host \"%s\" has no address: %s", host, gai_strerror(error));
                break;
            }
            for (struct addrinfo *a = list; a && result == DDP_ERR_INVALID; a = a->ai_next) {
                result = ddp__connect_to_address(rv, a->ai_addr, a->ai_addrlen);
                if (result == DDP_ERR_INVALID)
                    ddp_fail(result, "%s port %d: %s", host, port, ddp_last_error());
            }
            freeaddrinfo(list);
        }
    return result;
}

/* Connects to rank 0, which may start later. Returns when all ranks have connected. */
static ddp_result ddp__connect_to_rank0(ddp__rendezvous *rv) {
    size_t token_size = strlen(rv->token);
    double checked = ddp_now();
    useconds_t pause_us = 1000;
    for (;;) {
        ddp_result result = DDP_OK;
        rv->peer->head.result = 0;
        if (rv->file_path) result = ddp__rendezvous_file_read(rv, token_size);
        if (rv->is_local)
            result = ddp__connect_to_address(rv, (struct sockaddr *)&rv->address, rv->address_length);
        else if (result == DDP_OK)
            result = ddp__connect_to_hosts(rv);
        if (result != DDP_ERR_INVALID) return result;
        if (ddp_now() - checked > 0.02) {
            checked = ddp_now();
            if (ddp__check_processes_alive(rv) != DDP_OK) return DDP_ERR_PEER_LOST;
        }
        if (rv->peer->head.result == DDP__OTHER_JOB && rv->port_count == 1 && !rv->file_path)
            return ddp_fail(DDP_ERR_MISMATCH, "%s; give each job its own port", ddp_last_error());
        if (rv->is_local)
            ddp__report_waiting(rv, "still waiting for rank 0 at socket @%s: %.280s",
                                rv->address.sun_path + 1, ddp_last_error());
        else
            ddp__report_waiting(rv, "still waiting for rank 0: %.280s", ddp_last_error());
        if (ddp_now() > rv->deadline)
            return ddp_fail(DDP_ERR_TIMEOUT, "timed out after %d ms: rank 0 did not arrive: %.250s",
                            rv->group->desc.timeout_ms, ddp_last_error());
        usleep(pause_us);
        if (!rv->is_local && pause_us <= 100000) pause_us *= 2;
    }
}

/* Connects the ranks of rv->group: rank 0 to every rank, and every other rank to rank 0. On failure frees the
   memory of rv.
   rv: from ddp__rendezvous_alloc; on rank 0 its listener may be open already.
   heap: rank 0 creates a heap for all ranks, and sends its descriptor to them; NULL = no heap. */
static ddp_result ddp__connect_ranks(ddp__rendezvous *rv, ddp__heap **heap) {
    ddp_group *group = rv->group;
    double now = ddp_now(), timeout = group->desc.timeout_ms * 1e-3;
    rv->deadline = now + timeout;
    rv->next_report = now + DDP__WAIT_REPORT_SECONDS;
    rv->grace_period = timeout < 9 ? 0.5 + 0.5 * timeout : 5;
    if (group->rank)
        rv->result = ddp__connect_to_rank0(rv);
    else
        ddp__accept_all_ranks(rv, heap);
    if (rv->result == DDP_OK) return DDP_OK;
    ddp__rendezvous_close(rv);
    return DDP__RANK_FAIL(group, rv->result, "ddp_group_create: %s", ddp_last_error());
}

/* Attaches this rank to the world of a heap. */
static ddp_result ddp__local_open_world(ddp_group *group, ddp__heap *heap, void **state) {
    char text[96];
    ddp__local *l = ddp__local_attach(group, heap, heap->job->world, NULL, NULL);
    *state = l;
    if (!l) return DDP_ERR_NO_MEMORY;
    l->owns_rank = 1;
    snprintf(text, sizeof text,
             "memfd_create is missing on this kernel: shared memory is an unlinked file in %s",
             heap->job->folder);
    if (heap->job->folder[0]) ddp_group_log(group, text);
    return DDP_OK;
}

/* Creates another group of all ranks of the world. group NULL: this rank has no memory for it, and only takes
   part, so that the others do not wait for it. */
static ddp_result ddp__local_duplicate(ddp_group *group, ddp_group *world) {
    int members[DDP_MAX_LOCAL_RANKS];
    void *no_state;
    void **state = group ? &group->state : &no_state;
    for (int r = 0; r < world->world_size; r++) members[r] = r;
    return ddp__local_split(world, world->state, group, members, world->world_size, state);
}

/* Connects the group's ranks in shared memory. The group then uses the local backend; a split of one rank
   uses the self backend. rv: its token, process and process_index are set, and it may be from
   ddp__rendezvous_alloc. Frees all its memory. */
static ddp_result ddp__local_connect(ddp_group *group, ddp__rendezvous *rv, void **state) {
    ddp__heap *heap = NULL;
    group->backend = rv->process_index && group->world_size == 1 ? &ddp__backend_self : &ddp__backend_local;
    if (group->backend == &ddp__backend_self) {
        ddp__rendezvous_close(rv);
        return ddp__self_open(group, state);
    }
    if (group->world_size > DDP_MAX_LOCAL_RANKS)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "ddp_group_create: %d ranks on one machine; use at most %d",
                        group->world_size, DDP_MAX_LOCAL_RANKS);
    if (!rv->peer) DDP_TRY(ddp__rendezvous_alloc(rv, group));
    rv->is_local = 1;
    rv->address_length = ddp__job_socket_address(&rv->address, rv->token);
    DDP_TRY(ddp__connect_ranks(rv, &heap));
    int is_sent = rv->peer->heap_fd >= 0;
    if (is_sent) heap = ddp__heap_wrap(rv->peer->heap_fd, 0);
    rv->peer->heap_fd = -1;
    ddp__rendezvous_close(rv);
    if (!heap && is_sent)
        return DDP__RANK_FAIL(group, DDP_ERR_NO_MEMORY, "ddp_group_create: %s",
                              "the job's shared memory could not be mapped");
    if (!heap)
        return DDP__RANK_FAIL(group, DDP_ERR_SYSTEM, "ddp_group_create: %s",
                              "rank 0 did not send the job's shared memory");
    ddp_result result = ddp__local_open_world(group, heap, state);
    if (result != DDP_OK) { /* the other ranks are connected, and would wait for this one */
        heap->job->rank[group->rank].result = (int32_t)result;
        ddp__store(&heap->job->rank[group->rank].state, (uint32_t)DDP__RANK_LEFT);
    }
    ddp__heap_release(heap);
    return result;
}

//== the tcp backend: frames and failures ========================================================= >>impl-tcp

/* The tcp backend bootstraps other backends and carries small control messages. It is written like a user's
   own backend: it calls >>spi, and the sections >>impl-rendezvous to >>impl-connect, and nothing else of this
   file.

   Every rank keeps its connection to rank 0. This section reads and sends frames, detects lost ranks, and
   forwards failures: a rank that fails reports this to rank 0, and rank 0 reports it to all ranks. */

typedef struct ddp__tcp {
    ddp_saved_error cause;      /* the first failure */
    ddp__rendezvous rendezvous; /* peers: on rank 0 all ranks, itself included; on others rank 0 */
    pthread_mutex_t lock;       /* protects everything that the running call does not own */
    const ddp_call *call;       /* the running call, which uses the connections, or NULL */
    int failure_sent;           /* 1 = this rank has sent the failure to its peers */
    int failure_from_rank0;     /* 1 = rank 0 has sent the failure to this rank */
    ddp__process_id *process;   /* of each rank */
    const void **sources;       /* of each rank: its data, for ddp_reduce_tree */
    unsigned char *rank_state;  /* DDP_RANK_... of each rank */
    char *addresses;            /* in a split: of each rank, at most DDP__ADDRESSES_MAX bytes */
    ddp__buffer *received;      /* data of each connection; on rank 0 also its own */
    ddp__buffer to_send;        /* a frame */
} ddp__tcp;

/* Sends all bytes, and waits for room in the socket buffer. Returns 0 if the connection or the deadline
   ends. */
static int ddp__send_all(int fd, const void *data, size_t size, double deadline) {
    for (size_t done = 0; done < size;) {
        ssize_t n = sendto(fd, (const char *)data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
        if (n < 0 && errno != EAGAIN && errno != EINTR) return 0;
        if (n < 0 && !ddp__fd_ready(fd, POLLOUT, deadline)) return 0;
        if (n > 0) done += (size_t)n;
    }
    return 1;
}

/* With the lock held: sends the failure to the peers, once. While a call runs, only that call does this. */
static void ddp__tcp_send_failure(ddp__tcp *t) {
    if (t->cause.result == DDP_OK || t->failure_sent) return;
    ddp__send_status_to_peers(&t->rendezvous, t->cause.result, t->cause.text, -1);
    t->failure_sent = 1;
}

/* With the lock held, after a timeout: sets the error line. Rank 0 marks the ranks that have not arrived:
   DDP_RANK_SILENT, or DDP_RANK_BEHIND if the group has failed already. Other ranks only wait for rank 0. */
static ddp_result ddp__tcp_fail_timed_out(ddp_group *group, const ddp__tcp *t) {
    const ddp__peer *peer = t->rendezvous.peer;
    const int missing_state = t->cause.result == DDP_OK ? DDP_RANK_SILENT : DDP_RANK_BEHIND;
    if (ddp_rank(group))
        return ddp_fail(DDP_ERR_TIMEOUT, "timed out after %d ms: rank 0 (%s) does not answer",
                        ddp_group_timeout_ms(group), peer->name);
    for (int r = 0; r < ddp_world_size(group); r++)
        t->rank_state[r] = (unsigned char)(peer[r].arrived ? (int)DDP_RANK_ARRIVED : missing_state);
    return ddp_call_timed_out(group, t->call, t->rank_state);
}

/* With the lock held: handles a STATUS frame of a peer that has failed, or that leaves the group. A cause
   from rank 0 replaces the one that this rank has found. Rank 0 replaces the timeout of another rank by its
   own list of missing ranks. */
static void ddp__tcp_handle_status(ddp_group *group, ddp__tcp *t, ddp__peer *p) {
    ddp_result cause = (ddp_result)p->head.result;
    if (cause == DDP_OK) {
        ddp__peer_close(p);
        return;
    }
    ddp_group_add_lost(group, p->head.words, cause, p->text);
    ddp_result lost = ddp_group_check_lost(group);
    int is_rank0 = ddp_rank(group) == 0;
    if (!is_rank0) {
        t->cause.result = DDP_OK;
        t->failure_sent = t->failure_from_rank0 = 1;
    }
    if (is_rank0 && lost != DDP_OK)
        cause = lost; /* the error line describes it */
    else if (is_rank0 && t->call && cause == DDP_ERR_TIMEOUT)
        ddp__tcp_fail_timed_out(group, t);
    else
        ddp_fail(cause, "%s", p->text);
    ddp_error_save(&t->cause, cause);
}

/* Sets the error line for a connection that ended. */
static ddp_result ddp__tcp_fail_connection(int rank, const ddp__peer *p, int error) {
    if (error == ECONNRESET)
        return ddp_fail(DDP_ERR_PEER_LOST, "rank %d (%s) closed the connection", rank, p->name);
    if (error == ENOMEM) return DDP_ERR_NO_MEMORY; /* of this rank; ddp__buffer_reserve has set the line */
    if (error != EPROTO)
        return ddp_fail(DDP_ERR_PEER_LOST, "rank %d (%s): the connection failed: %s", rank, p->name,
                        strerror(error));
    return ddp_fail(DDP_ERR_MISMATCH,
                    "rank %d (%s) sent an invalid frame (kind %u, result %d, %llu bytes); build all "
                    "ranks with the same header",
                    rank, p->name, p->head.kind, (int)p->head.result, (unsigned long long)p->head.size);
}

/* With the lock held: reads the frames that have arrived, and handles failures and lost connections. Returns
   the number of peers that have not sent their data. */
static int ddp__tcp_read_frames(ddp_group *group, ddp__tcp *t) {
    int missing = 0, error = 0;
    for (int r = 0; r < t->rendezvous.peer_count; r++) {
        ddp__peer *p = &t->rendezvous.peer[r];
        /* A correct peer sends at most three frames before this rank answers: its data, a failure and that it
           leaves. */
        for (int frames = 0; frames < 3 && p->fd >= 0; frames++) {
            error = ddp__peer_read_frame(group, p, &t->received[r], DDP__ALLOW_STATUS | DDP__ALLOW_DATA);
            if (error) break;
            if (p->head.kind == DDP__FRAME_STATUS) {
                ddp__tcp_handle_status(group, t, p);
            } else {
                p->arrived = 1;
                p->data_head = p->head;
            }
        }
        if (p->fd >= 0 && error && error != EAGAIN) {
            ddp_result broken = ddp__tcp_fail_connection(r, p, error);
            if (broken == DDP_ERR_PEER_LOST && t->cause.result == DDP_OK)
                ddp_group_mark_lost(group, r, broken, ddp_last_error());
            ddp_error_save(&t->cause, broken);
            ddp__peer_close(p);
        }
        missing += !p->arrived;
    }
    return missing;
}

/* Waits for the data of all peers. A rank other than 0 that exceeds the timeout reports this to rank 0, and
   waits for the grace period: rank 0 names the missing ranks. */
static ddp_result ddp__tcp_wait_for_data(ddp_group *group, ddp__tcp *t, double deadline) {
    const int is_rank0 = ddp_rank(group) == 0;
    for (;;) {
        pthread_mutex_lock(&t->lock);
        int missing = ddp__tcp_read_frames(group, t);
        for (int r = 0; r < t->rendezvous.peer_count; r++) {
            const ddp__peer *p = &t->rendezvous.peer[r];
            if (!p->arrived && p->fd < 0)
                ddp_error_save(&t->cause, ddp_fail(DDP_ERR_PEER_LOST, "rank %d (%s) has destroyed this group",
                                                   r, p->name));
        }
        ddp_error_save(&t->cause, ddp_group_check_lost(group));
        double now = ddp_now();
        int is_overdue = missing && now > deadline;
        if (is_overdue) ddp_error_save(&t->cause, ddp__tcp_fail_timed_out(group, t));
        /* A rank that has the answer of rank 0 completes the call, even if the group has failed since. */
        int has_failed = t->cause.result != DDP_OK && (missing || is_rank0);
        ddp__tcp_send_failure(t);
        if (has_failed && is_overdue && !is_rank0 && t->cause.result == DDP_ERR_TIMEOUT
            && !t->failure_from_rank0) {
            has_failed = now >= deadline + t->rendezvous.grace_period;
            if (has_failed) ddp_group_mark_lost(group, 0, DDP_ERR_TIMEOUT, t->cause.text);
        }
        pthread_mutex_unlock(&t->lock);
        if (has_failed) return DDP_ERR_POISONED;
        if (!missing) return DDP_OK;
        ddp__rendezvous_poll(&t->rendezvous);
    }
}

static void ddp__tcp_poison(ddp_group *group, void *state, ddp_result cause, const char *text) {
    ddp__tcp *t = (ddp__tcp *)state;
    (void)group;
    pthread_mutex_lock(&t->lock);
    if (t->cause.result == DDP_OK) {
        snprintf(t->cause.text, sizeof t->cause.text, "%s", text);
        t->cause.result = (int32_t)cause;
    }
    if (!t->call) ddp__tcp_send_failure(t); /* otherwise the running call does this */
    pthread_mutex_unlock(&t->lock);
}

/* With the lock held: receives and forwards failures, unless a running call does this. Returns the
   failure. */
static ddp_result ddp__tcp_forward_failures(ddp_group *group, ddp__tcp *t) {
    if (!t->call) {
        ddp__tcp_read_frames(group, t);
        ddp__tcp_send_failure(t);
    }
    return ddp_error_restore(&t->cause);
}

static ddp_result ddp__tcp_status(const ddp_group *group, void *state) {
    ddp__tcp *t = (ddp__tcp *)state;
    pthread_mutex_lock(&t->lock);
    ddp_result result = ddp__tcp_forward_failures((ddp_group *)(uintptr_t)group, t);
    pthread_mutex_unlock(&t->lock);
    return result;
}

//== the tcp backend: calls ================================================================= >>impl-tcp-calls

/* Executes collectives over the connections to rank 0. A frame has a head (the packed call and the size),
   then the data. Three ranks, an all_gather:

       rank 1  --- head | data 1 ------------------------->  rank 0   compares the heads with its own call
       rank 2  --- head | data 2 ------------------------->  rank 0   builds the answer

       rank 1  <-- head | data 0, data 1, data 2 ----------  rank 0   sends the same answer to all ranks
       rank 2  <-- head | data 0, data 1, data 2 ----------  rank 0

   Calls that add have the sum as the answer. Each rank copies its part of the answer to call->recv. Every
   rank can compute the head of every frame from its own call. It compares a head before it uses any data. */

/* Returns the head of a rank's frame for a call. */
static ddp__frame ddp__tcp_request_head(const ddp_call *call, int rank, int world_size) {
    ddp__frame frame = {DDP__FRAME_MAGIC, DDP__FRAME_DATA, 0, 0, {0, 0}};
    size_t size = call->recv_counts ? SIZE_MAX : ddp_call_send_size(call, rank, world_size);
    ddp_call_pack(call, frame.words);
    frame.result = size > DDP__TCP_PAYLOAD;
    if (!frame.result) frame.size = size;
    return frame;
}

/* Returns the head of rank 0's answer: the sum, or the data of all ranks. If one rank has too much data, the
   answer is empty for all. */
static ddp__frame ddp__tcp_answer_head(const ddp_call *call, int world_size) {
    ddp__frame answer = ddp__tcp_request_head(call, 0, world_size);
    for (int r = 1; r < world_size; r++) {
        ddp__frame frame = ddp__tcp_request_head(call, r, world_size);
        answer.result |= frame.result;
        if (!ddp_call_adds(call)) answer.size += frame.size;
    }
    if (answer.result) answer.size = 0;
    return answer;
}

/* Compares the head of a peer's frame with the expected one. */
static ddp_result ddp__tcp_check_head(const ddp_group *group, const ddp_call *call, int rank,
                                      const ddp__peer *p, const ddp__frame *expected) {
    const ddp__frame *frame = &p->data_head;
    DDP_TRY(ddp_call_compare(ddp_rank(group), expected->words, rank, frame->words));
    if (frame->size == expected->size && frame->result == expected->result) return DDP_OK;
    return ddp_fail(DDP_ERR_MISMATCH,
                    "rank %d (%s) sent a frame of %llu bytes for %s, which needs %llu; build all ranks "
                    "with the same header",
                    rank, p->name, (unsigned long long)frame->size, ddp_call_name(call->kind),
                    (unsigned long long)expected->size);
}

/* On rank 0, when the data of all ranks has arrived: compares the calls, and writes the answer to
   t->to_send. */
static ddp_result ddp__tcp_build_answer(ddp_group *group, ddp__tcp *t, const ddp_call *call,
                                        const ddp__frame *answer) {
    ddp__peer *peer = t->rendezvous.peer;
    size_t offset = sizeof *answer;
    int adds = ddp_call_adds(call), world_size = ddp_world_size(group);
    for (int r = 0; r < world_size; r++) {
        ddp__frame expected = ddp__tcp_request_head(call, r, world_size);
        DDP_TRY(ddp__tcp_check_head(group, call, r, &peer[r], &expected));
        t->sources[r] = t->received[r].bytes;
        peer[r].arrived = 0;
    }
    DDP_TRY(ddp__buffer_reserve(group, &t->to_send, offset + answer->size));
    memcpy(t->to_send.bytes, answer, sizeof *answer);
    if (!answer->size) return DDP_OK;
    if (adds) {
        ddp_reduce_tree(t->to_send.bytes + offset, t->sources, world_size,
                        answer->size / ddp_dtype_size(call->dtype), call->dtype, call->op, call->divisor);
        return DDP_OK;
    }
    for (int r = 0; r < world_size; r++) {
        size_t size = peer[r].data_head.size;
        if (size) memcpy(t->to_send.bytes + offset, t->received[r].bytes, size);
        offset += size;
    }
    return DDP_OK;
}

/* Copies the part of this rank from the answer. */
static void ddp__tcp_unpack_answer(const ddp_group *group, const ddp_call *call,
                                   const unsigned char *answer) {
    int part_count = ddp_call_adds(call) ? 1 : ddp_world_size(group);
    for (int r = 0; r < part_count; r++) {
        ddp_bytes from = ddp_call_sends(call, r, ddp_rank(group));
        ddp_bytes to = ddp_call_receives(call, ddp_rank(group), r);
        if (to.size) memcpy((unsigned char *)call->recv + to.begin, answer + from.begin, to.size);
        answer += ddp_call_send_size(call, r, ddp_world_size(group));
    }
}

/* On rank 0: waits for the data of all ranks, and sends the answer to the others. */
static ddp_result ddp__tcp_exchange_on_rank0(ddp_group *group, ddp__tcp *t, const ddp_call *call,
                                             const ddp__frame *answer, double deadline) {
    const void *data = call->kind == DDP_CALL_BROADCAST ? call->recv : call->send;
    ddp__frame head = ddp__tcp_request_head(call, 0, ddp_world_size(group));
    ddp__peer *peer = t->rendezvous.peer;
    /* Rank 0 stores its own data with that of the others. */
    DDP_TRY(ddp__buffer_reserve(group, &t->received[0], head.size));
    if (head.size) memcpy(t->received[0].bytes, data, head.size);
    peer[0].data_head = head;
    peer[0].arrived = 1;
    DDP_TRY(ddp__tcp_wait_for_data(group, t, deadline));
    DDP_TRY(ddp__tcp_build_answer(group, t, call, answer));
    for (int r = 1; r < t->rendezvous.peer_count; r++) {
        /* After a failed send the connection is shut down, and the next call reports it. */
        if (!ddp__send_all(peer[r].fd, t->to_send.bytes, sizeof *answer + answer->size, deadline))
            shutdown(peer[r].fd, SHUT_RDWR);
    }
    return DDP_OK;
}

/* On the other ranks: sends the data to rank 0, and waits for the answer. */
static ddp_result ddp__tcp_exchange_with_rank0(ddp_group *group, ddp__tcp *t, const ddp_call *call,
                                               const ddp__frame *answer, double deadline) {
    const void *data = call->kind == DDP_CALL_BROADCAST ? call->recv : call->send;
    ddp__frame head = ddp__tcp_request_head(call, ddp_rank(group), ddp_world_size(group));
    size_t size = sizeof head + head.size;
    ddp__peer *rank0 = t->rendezvous.peer;
    DDP_TRY(ddp__buffer_reserve(group, &t->to_send, size));
    memcpy(t->to_send.bytes, &head, sizeof head);
    if (head.size) memcpy(t->to_send.bytes + sizeof head, data, head.size);
    rank0->arrived = 0;
    /* If this fails, the wait reports why. */
    if (rank0->fd >= 0) ddp__send_all(rank0->fd, t->to_send.bytes, size, deadline);
    DDP_TRY(ddp__tcp_wait_for_data(group, t, deadline));
    return ddp__tcp_check_head(group, call, 0, rank0, answer);
}

/* Executes a call. DDP_ERR_UNSUPPORTED leaves the group as it was. */
static ddp_result ddp__tcp_exchange(ddp_group *group, ddp__tcp *t, const ddp_call *call) {
    double deadline = ddp_now() + ddp_group_timeout_ms(group) * 1e-3;
    ddp__frame answer = ddp__tcp_answer_head(call, ddp_world_size(group));
    const unsigned char *data;
    if (ddp_rank(group) == 0) {
        DDP_TRY(ddp__tcp_exchange_on_rank0(group, t, call, &answer, deadline));
        data = t->to_send.bytes + sizeof answer;
    } else {
        DDP_TRY(ddp__tcp_exchange_with_rank0(group, t, call, &answer, deadline));
        data = t->received->bytes;
    }
    if (answer.result)
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "the tcp backend has at most 64 KiB per rank and no calls with counts; build with "
                        "DDP_USE_MPI, or use ddp_cuda.cuh for GPU memory");
    ddp__tcp_unpack_answer(group, call, data);
    return DDP_OK;
}

static ddp_result ddp__tcp_run(ddp_group *group, void *state, const ddp_call *call) {
    ddp__tcp *t = (ddp__tcp *)state;
    pthread_mutex_lock(&t->lock);
    ddp_result result = ddp__tcp_forward_failures(group, t);
    t->call = call;
    pthread_mutex_unlock(&t->lock);
    result = result == DDP_OK ? ddp__tcp_exchange(group, t, call) : DDP_ERR_POISONED;
    if (result != DDP_OK && result != DDP_ERR_UNSUPPORTED) {
        ddp__tcp_poison(group, t, result, ddp_last_error());
        result = DDP_ERR_POISONED;
    }
    pthread_mutex_lock(&t->lock);
    t->call = NULL;
    ddp__tcp_forward_failures(group, t);
    pthread_mutex_unlock(&t->lock);
    return result;
}

//== the tcp backend: groups =============================================================== >>impl-tcp-groups

/* Opens, splits and closes groups of the tcp backend. After a rendezvous the ranks exchange process ids. If
   all of them are on one machine, the group switches to shared memory. */

static void ddp__tcp_close(ddp_group *group, void *state) {
    ddp__tcp *t = (ddp__tcp *)state;
    ddp__send_status_to_peers(&t->rendezvous, DDP_OK, "", -1);
    ddp__rendezvous_close(&t->rendezvous);
    for (int r = 0; r < ddp_world_size(group); r++) ddp_host_free(group, t->received[r].bytes);
    ddp_host_free(group, t->to_send.bytes);
    pthread_mutex_destroy(&t->lock);
    ddp_host_free(group, t);
}

/* Makes the kernel send small frames at once, and detect within the timeout that the machine or network of a
   peer has failed, also while nothing is sent. */
static void ddp__tcp_set_socket_options(int fd, int timeout_ms) {
    int seconds = timeout_ms / 8000 > 0 ? timeout_ms / 8000 : 1;
    int options[][3] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, seconds}, {IPPROTO_TCP, TCP_KEEPINTVL, seconds},
        {IPPROTO_TCP, TCP_KEEPCNT, 3},        {IPPROTO_TCP, TCP_USER_TIMEOUT, timeout_ms - timeout_ms / 4},
    };
    for (int i = 0; i < 6; i++) setsockopt(fd, options[i][0], options[i][1], &options[i][2], sizeof(int));
}

/* Allocates the state of a group before its ranks connect, and all memory that it needs for its own creation,
   for a later split and for ddp_agree. rv: copied.
   Returns NULL without memory. In a split all ranks then agree on that. The ranks of a world (is_split 0)
   cannot: they connect without the buffers that could not be allocated, and the first call fails on all of
   them. */
static ddp__tcp *ddp__tcp_alloc(ddp_group *group, const ddp__rendezvous *rv, int is_split) {
    size_t w = (size_t)ddp_world_size(group);
    size_t bytes_per_rank = sizeof(ddp__process_id) + sizeof(void *) + sizeof(ddp__buffer) + 1
                            + DDP__ADDRESSES_MAX;
    ddp__tcp *t = (ddp__tcp *)ddp_host_alloc(group, sizeof *t + w * bytes_per_rank);
    if (!t) return NULL;
    pthread_mutex_init(&t->lock, NULL);
    t->process = (ddp__process_id *)(void *)(t + 1);
    t->sources = (const void **)(void *)(t->process + w);
    t->received = (ddp__buffer *)(void *)(t->sources + w);
    t->rank_state = (unsigned char *)(t->received + w);
    t->addresses = (char *)(t->rank_state + w);
    t->rendezvous = *rv;
    ddp_result result = ddp__rendezvous_alloc(&t->rendezvous, group);
    if (result == DDP_OK) result = ddp__buffer_reserve(group, &t->to_send, (w + 1) * DDP__ADDRESSES_MAX);
    for (int r = 0; r < t->rendezvous.peer_count && r < ddp_world_size(group) && result == DDP_OK; r++)
        result = ddp__buffer_reserve(group, &t->received[r], (ddp_rank(group) ? w : 1) * DDP__ADDRESSES_MAX);
    if (result == DDP_OK || (!is_split && t->rendezvous.peer)) return t;
    ddp__tcp_close(group, t);
    return NULL;
}

/* Connects the ranks, and gathers their process ids. */
static ddp_result ddp__tcp_connect(ddp_group *group, ddp__tcp *t) {
    ddp__process_id self;
    ddp_call call = DDP_ZERO;
    ddp__peer *p = t->rendezvous.peer;
    call.kind = DDP_CALL_ALL_GATHER;
    call.dtype = DDP_U64;
    call.root = -1;
    call.send = self;
    call.recv = t->process;
    call.count = DDP__PROCESS_WORDS;
    ddp__process_id_self(self);
    DDP_TRY(ddp__connect_ranks(&t->rendezvous, NULL));
    for (int r = 0; r < t->rendezvous.peer_count; r++)
        ddp__tcp_set_socket_options(p[r].fd, ddp_group_timeout_ms(group));
    if (ddp_rank(group)) {
        snprintf(p->name, sizeof p->name, "%.95s", p->text);
        /* Rank 0 only answers: data outside a call is invalid. */
        p->arrived = 1;
    }
    if (ddp__tcp_run(group, t, &call) == DDP_OK) return DDP_OK;
    return ddp_fail_in(ddp__tcp_status(group, t), "ddp_group_create", group, "%s", ddp_last_error());
}

/* Opens the group of t: connects its ranks. If all of them are on one machine, the group switches to shared
   memory and closes its connections. t: from ddp__tcp_alloc; NULL = no memory. */
static ddp_result ddp__tcp_open(ddp_group *group, ddp__tcp *t, void **state) {
    int world_size = ddp_world_size(group), local_count = 0, local_rank = 0;
    /* Not t->process[rank]: that has come from rank 0, which may have changed it. */
    const uint64_t machine = ddp_machine_id();
    ddp__process_id process[DDP_MAX_LOCAL_RANKS];
    if (!t) return DDP_ERR_NO_MEMORY;
    ddp_result result = ddp__tcp_connect(group, t);
    if (result != DDP_OK) {
        ddp__tcp_close(group, t);
        return result;
    }
    for (int r = 0; r < world_size; r++) {
        if (t->process[r][DDP__PROCESS_MACHINE] != machine) continue;
        local_rank += r < ddp_rank(group);
        local_count++;
    }
    ddp_group_set_local(group, local_rank, local_count);
    if (local_count < world_size || local_count > DDP_MAX_LOCAL_RANKS) {
        *state = t;
        return DDP_OK;
    }
    ddp__rendezvous local = DDP_ZERO;
    snprintf(local.token, sizeof local.token, "tcp:%016llx",
             (unsigned long long)t->process[0][DDP__PROCESS_NONCE]);
    memcpy(process, t->process, (size_t)world_size * sizeof *process);
    local.process = (const ddp__process_id *)process;
    ddp__tcp_close(group, t);
    return ddp__local_connect(group, &local, state);
}

/* Sends the address lists of the new groups to all ranks of the parent, and sets the address in rv. The
   leader of a group is its rank 0. Unless is_local, it opens a listener first.
   rv: of this rank's new group; NULL = it joins none. leader: of this rank's new group, as a rank of the
   parent. */
static ddp_result ddp__tcp_exchange_addresses(ddp_group *parent, const ddp__tcp *t, ddp__rendezvous *rv,
                                              int leader, int is_local) {
    char own_list[DDP__ADDRESSES_MAX] = "", *list;
    if (rv && leader == ddp_rank(parent)) {
        int *listener = ddp__rendezvous_listener(rv);
        if (!is_local) *listener = ddp__tcp_listen("", 0, 1);
        ddp__addresses_write(*listener, own_list);
    }
    uint64_t size = strlen(own_list) + 1;
    /* Usually small: few machines have many addresses. */
    DDP_TRY(ddp_all_reduce(parent, &size, &size, 1, DDP_U64, DDP_OP_MAX, NULL));
    if (size <= strlen(own_list) || size > sizeof own_list)
        return ddp_fail_in(DDP_ERR_MISMATCH, "ddp_group_split", parent,
                           "a rank sent an address of %llu bytes; use at most %zu", (unsigned long long)size,
                           sizeof own_list);
    DDP_TRY(ddp_all_gather(parent, own_list, t->addresses, size, DDP_U8, NULL));
    if (!rv) return DDP_OK;
    list = t->addresses + size * (uint64_t)leader;
    list[size - 1] = 0;
    if (ddp__addresses_parse(rv, 0, list) && (is_local || rv->port)) return DDP_OK;
    return ddp_fail_in(DDP_ERR_SYSTEM, "ddp_group_split", parent, "rank %d could not listen on any port",
                       leader);
}

/* If the members are on one machine, the child connects in shared memory and uses the local backend.
   Otherwise the members connect to the child's rank 0. Its addresses are sent over the parent. First all
   ranks agree that each has the memory for this, because a rank without memory would not connect, and the
   others would wait for it. */
static ddp_result ddp__tcp_split(ddp_group *parent, void *state, ddp_group *child, const int *members,
                                 int member_count, void **child_state) {
    const ddp__tcp *t = (const ddp__tcp *)state;
    int is_local = member_count <= DDP_MAX_LOCAL_RANKS;
    ddp__tcp *child_tcp = NULL;
    ddp__rendezvous start = DDP_ZERO, *rv = child ? &start : NULL;
    ddp_result result = member_count && !child ? DDP_ERR_NO_MEMORY : DDP_OK;
    *child_state = NULL;
    for (int i = 1; i < member_count; i++)
        is_local &= t->process[members[i]][DDP__PROCESS_MACHINE]
                    == t->process[members[0]][DDP__PROCESS_MACHINE];
    if (child && is_local) {
        start.process = (const ddp__process_id *)t->process;
        start.process_index = members;
        result = ddp__rendezvous_alloc(&start, child);
    } else if (child) {
        start.port_count = 1;
        start.has_secret = t->rendezvous.has_secret;
        memcpy(start.key, t->rendezvous.key, sizeof start.key);
        child_tcp = ddp__tcp_alloc(child, &start, 1);
        if (child_tcp)
            rv = &child_tcp->rendezvous;
        else
            result = DDP_ERR_NO_MEMORY;
    }
    result = ddp_agree(parent, "ddp_group_split", result, 0, "");
    if (result == DDP_OK)
        result = ddp__tcp_exchange_addresses(parent, t, rv, child ? members[0] : -1, is_local);
    if (result == DDP_OK && child_tcp) return ddp__tcp_open(child, child_tcp, child_state);
    if (result == DDP_OK && child) return ddp__local_connect(child, &start, child_state);
    if (child_tcp) ddp__tcp_close(child, child_tcp);
    ddp__rendezvous_close(&start);
    return result;
}

static const ddp_backend ddp__backend_tcp = {
    "tcp",
    NULL, /* open */
    ddp__tcp_run,
    NULL, /* p2p_start */
    NULL, /* p2p_poll */
    NULL, /* p2p_sleep */
    ddp__tcp_split,
    NULL, /* alloc */
    NULL, /* free */
    ddp__tcp_status,
    ddp__tcp_poison,
    ddp__tcp_close,
    0, /* enqueues */
    DDP_ORDER_TREE,
    NULL, /* p2p_batch */
    NULL, /* peer */
    NULL, /* signal */
    NULL, /* wait_signal */
    NULL, /* p2p_wake */
};

//== groups: creation =========================================================================== >>impl-group

/* Creates groups. ddp_group_create resolves the desc and the identity of this rank, chooses the backend and
   the rendezvous, and opens the group. ddp_launch and the backends open groups inside a world with the other
   functions. */

/* Copies a desc, with defaults for the fields that are 0. desc may be NULL. */
static ddp_result ddp__group_desc_resolve(const char *who, const ddp_group_desc *desc, ddp_group_desc *out) {
    ddp_group_desc none = DDP_ZERO;
    *out = desc ? *desc : none;
    if (!out->init_method) out->init_method = "env://";
    if (out->timeout_ms == 0) out->timeout_ms = 600000;
    if (!out->name) out->name = "world";
    if (!out->device) out->device = ddp_device_cpu();
    DDP_CHECK(who, NULL, out->timeout_ms >= 0, "timeout_ms=%d; use a positive number, or 0 for ten minutes",
              out->timeout_ms);
    DDP_CHECK(who, NULL,
              out->world_size == 0 || (out->world_size > 0 && out->rank >= 0 && out->rank < out->world_size),
              "rank=%d with world_size=%d; use ranks 0 to world_size - 1", out->rank, out->world_size);
    DDP_CHECK(who, NULL, (unsigned)out->order <= DDP_ORDER_ANY, "order=%d is not a ddp_order",
              (int)out->order);
    DDP_CHECK(who, NULL, !out->alloc_fn == !out->free_fn, "set both alloc_fn and free_fn, or neither");
    if (!out->alloc_fn) {
        out->alloc_fn = ddp__malloc_default;
        out->free_fn = ddp__free_default;
    }
    return DDP_OK;
}

static void ddp__allocation_free(ddp_group *group, ddp__allocation *a) {
    if (!group->backend->free) ddp_host_free(group, a->memory);
    ddp_host_free(group, a);
}

/* Frees a group, except for the state of its backend. */
static void ddp__group_delete(ddp_group *group) {
    while (group->allocations) {
        ddp__allocation *a = group->allocations;
        group->allocations = a->next;
        ddp__allocation_free(group, a);
    }
    ddp__trace_free(group);
    while (group->all_ops) {
        ddp__op *op = group->all_ops;
        if (op->event) group->device->event_destroy(group, op->event);
        group->all_ops = op->next_allocated;
        ddp_host_free(group, op);
    }
    if (group->device_state) group->device->close(group, group->device_state);
    pthread_cond_destroy(&group->done_cond);
    pthread_cond_destroy(&group->work_cond);
    pthread_mutex_destroy(&group->lock);
    munmap((void *)(uintptr_t)group->in_rank_process, DDP__PAGE);
    ddp__lost_release(group);
    ddp_host_free(group, group);
}

/* Creates a group without the state of its backend. desc is resolved. parent: of a split, or NULL. Sets *out
   only on success. */
static ddp_result ddp__group_alloc(ddp_group **out, const ddp_group_desc *desc, const ddp_backend *backend,
                                   int rank, int world_size, ddp_group *parent) {
    size_t w = (size_t)world_size, size = sizeof(ddp_group) + w * (sizeof(ddp__agree_entry) + sizeof(int));
    ddp_group *group = (ddp_group *)ddp__aligned_alloc(desc->alloc_fn, desc->user, size);
    if (!group)
        return ddp_fail(DDP_ERR_NO_MEMORY, "ddp_group_create: %zu bytes could not be allocated", size);
    memset(group, 0, size);
    int *in_rank_process = (int *)mmap(NULL, DDP__PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                                       -1, 0);
    if (in_rank_process == MAP_FAILED) {
        ddp__aligned_free(desc->free_fn, desc->user, group);
        return ddp_fail(DDP_ERR_NO_MEMORY, "ddp_group_create: a page of memory could not be mapped: %s",
                        strerror(errno));
    }
    madvise(in_rank_process, DDP__PAGE, 18 /* MADV_WIPEONFORK; Linux before 4.14 does without */);
    *in_rank_process = 1;
    group->in_rank_process = in_rank_process;
    group->agree_entries = (ddp__agree_entry *)(void *)(group + 1);
    group->world_rank = (int *)(void *)(group->agree_entries + w);
    group->desc = *desc;
    snprintf(group->name, sizeof group->name, "%s", desc->name);
    group->desc.name = group->name;
    group->desc.secret = NULL; /* the backend has a key that is derived from it */
    group->rank = group->local_rank = rank;
    group->world_size = group->local_world_size = world_size;
    group->backend = backend;
    group->device = desc->device;
    group->device_index = ddp__launch_identity.device_plus_1 - 1;
    group->attempt = parent ? parent->attempt : ddp__launch_identity.attempt;
    group->needs_queue = backend->enqueues || desc->device->use_stream;
    if (desc->order == DDP_ORDER_DEFAULT)
        group->desc.order = backend->default_order ? backend->default_order : DDP_ORDER_TREE;
    pthread_mutex_init(&group->lock, NULL);
    pthread_cond_init(&group->work_cond, NULL);
    pthread_cond_init(&group->done_cond, NULL);
    ddp_result result = ddp__lost_create(group);
    if (result == DDP_OK && group->device->open)
        result = group->device->open(group, parent, &group->device_state);
    if (result == DDP_OK)
        *out = group;
    else
        ddp__group_delete(group);
    return result;
}

/* Creates a group with the state of its backend. backend NULL: the tcp backend, with the rendezvous rv. The
   local backend uses the world or the heap of id, otherwise a rendezvous by rv->token. */
static ddp_result ddp__group_open(ddp_group **out, const ddp_group_desc *desc, const ddp_backend *backend,
                                  const ddp__identity *id, ddp__rendezvous *rv) {
    ddp_group *group = NULL;
    ddp_result result = ddp__group_alloc(&group, desc, backend ? backend : &ddp__backend_tcp, id->rank,
                                         id->world_size, NULL);
    if (result != DDP_OK && id->world && backend == &ddp__backend_local) {
        /* Takes part without a group, so that the other ranks do not wait for this one. */
        ddp_saved_error first = {DDP_OK, ""};
        ddp_error_save(&first, result);
        ddp__local_duplicate(NULL, id->world);
        return ddp_error_restore(&first);
    }
    if (result != DDP_OK) return result;
    if (id->attempt) group->attempt = id->attempt;
    if (!backend) {
        result = ddp__tcp_open(group, ddp__tcp_alloc(group, rv, 0), &group->state);
    } else if (backend != &ddp__backend_local) {
        ddp_group_set_local(group, id->local_rank, id->local_world_size);
        if (backend->open) result = backend->open(group, &group->state);
    } else if (id->world) {
        result = ddp__local_duplicate(group, id->world);
    } else if (id->heap) {
        result = ddp__local_open_world(group, id->heap, &group->state);
    } else {
        result = ddp__local_connect(group, rv, &group->state);
    }
    if (result == DDP_OK)
        *out = group;
    else
        ddp__group_delete(group);
    return result;
}

DDPDEF ddp_result ddp_group_create_local(ddp_group **out, ddp_group *parent, const char *token,
                                         const int *ranks, int count, int timeout_ms) {
    ddp_group_desc desc = parent->desc;
    ddp__identity identity = DDP_ZERO;
    ddp__rendezvous rv = DDP_ZERO;
    identity.world_size = count;
    identity.attempt = parent->attempt;
    while (ranks[identity.rank] != parent->rank) identity.rank++;
    snprintf(rv.token, sizeof rv.token, "%s", token);
    desc.order = DDP_ORDER_TREE;
    desc.device = ddp_device_cpu();
    desc.timeout_ms = timeout_ms;
    return ddp__group_open(out, &desc, &ddp__backend_local, &identity, &rv);
}

DDPDEF ddp_result ddp_group_create_on(ddp_group **out, ddp_group *control, const ddp_group_desc *desc) {
    DDP_PUBLIC_CALL(ddp_group_create_on);
    if (out) *out = NULL;
    DDP__NEED(out && control && desc && desc->backend, "out, control, desc or desc->backend is NULL");
    ddp_group_desc d = control->desc;
    ddp_group *group = NULL;
    d.backend = desc->backend;
    d.backend_user = desc->backend_user ? desc->backend_user : control;
    d.order = desc->order;
    if (desc->device) d.device = desc->device;
    if (desc->name) d.name = desc->name;
    if (desc->timeout_ms) d.timeout_ms = desc->timeout_ms;
    ddp_result result = ddp__group_desc_resolve(__func__, &d, &d);
    if (result == DDP_OK)
        result = ddp__group_alloc(&group, &d, d.backend, control->rank, control->world_size, NULL);
    if (result == DDP_OK) ddp__lost_share(group, control, NULL);
    if (result == DDP_OK) group->attempt = control->attempt;
    result = ddp_agree(control, "ddp_group_create", result, 0, ""); /* open needs every rank */
    if (result == DDP_OK && d.backend->open) {
        ddp_group_set_local(group, control->local_rank, control->local_world_size);
        result = d.backend->open(group, &group->state);
    }
    if (result == DDP_OK)
        *out = group;
    else if (group)
        ddp__group_delete(group);
    return result;
}

static const char *const ddp__scheme_prefixes[DDP__SCHEME_COUNT] = {"self://", "env://", "mpi://", "tcp://",
                                                                    "file://"};

/* Returns 1 if MASTER_ADDR may be another machine: it is no loopback address, and the number of ranks on this
   machine is unknown. */
static int ddp__master_may_be_remote(const ddp_group_desc *desc, const ddp__identity *id) {
    const char *host = ddp__env_text("MASTER_ADDR");
    if (!*host || !*ddp__env_text("MASTER_PORT") || ddp__is_loopback(host)) return 0;
    if (*ddp__env_text("LOCAL_WORLD_SIZE")) return 0;
    return desc->world_size > 0 || strncmp(id->token, "torch", 5) == 0;
}

/* Chooses the backend and the rendezvous of a world, and creates it:

     self://                                   self
     desc.backend                              that backend
     inside a ddp_launch                       local, with the heap of the launch
     one rank                                  self
     mpi://, or started by mpirun              mpi, if the build has it
     all ranks on this machine (env://)        local, after a rendezvous over an abstract socket
     otherwise, and tcp:// and file://         tcp, after a rendezvous over TCP */
static ddp_result ddp__create_world(ddp_group **out, const ddp_group_desc *desc, const ddp__identity *id,
                                    int scheme) {
    int is_url = scheme >= DDP__SCHEME_TCP, is_mpi = scheme == DDP__SCHEME_MPI;
    int is_self = scheme == DDP__SCHEME_SELF;
    ddp__rendezvous rv = DDP_ZERO;
    snprintf(rv.token, sizeof rv.token, "%s", id->token);
    DDP__CREATE_CHECK(!is_self || id->world_size <= 1,
                      "init_method \"self://\" has one rank, but world_size=%d; use world_size 0 or 1",
                      id->world_size);
    DDP__CREATE_CHECK(!is_url || desc->world_size > 0 || id->size_variable,
                      "init_method \"%.60s\" needs rank and world_size; set them in desc, or use a launcher "
                      "that sets its variables",
                      desc->init_method);
    if (!is_self && desc->backend) return ddp__group_open(out, desc, desc->backend, id, NULL);
    if (!is_mpi && id->heap) return ddp__group_open(out, desc, &ddp__backend_local, id, NULL);
    if (!is_mpi && id->world_size == 1) return ddp__group_open(out, desc, &ddp__backend_self, id, NULL);
#if defined(DDP_USE_MPI)
    is_mpi |= !is_url && (strncmp(id->token, "ompi:", 5) == 0 || strncmp(id->token, "pmi:", 4) == 0);
    if (is_mpi) {
        ddp_group_desc d = *desc;
        d.rank = id->rank;
        d.world_size = id->size_variable || desc->world_size > 0 ? id->world_size : 0;
        return ddp_group_create_mpi(out, &d);
    }
#endif
    if (is_mpi)
        return ddp_fail(
            DDP_ERR_UNSUPPORTED,
            "ddp_group_create: init_method \"mpi://\" needs the mpi backend; build with DDP_USE_MPI");
    if (!is_url && id->local_world_size == id->world_size && !ddp__master_may_be_remote(desc, id))
        return ddp__group_open(out, desc, &ddp__backend_local, id, &rv);
    rv.port_count = 1;
    DDP_TRY(is_url ? ddp__rendezvous_from_url(&rv, id, desc) : ddp__rendezvous_from_env(&rv, id));
    DDP_TRY(ddp__rendezvous_set_key(&rv, desc->secret, ddp__env_text("DDP_SECRET"),
                                    ddp__env_text("DDP_SECRET_FILE")));
    return ddp__group_open(out, desc, NULL, id, &rv);
}

DDPDEF ddp_result ddp_group_create(ddp_group **out, const ddp_group_desc *desc) {
    DDP_PUBLIC_CALL(ddp_group_create);
    int scheme = 0;
    ddp__identity id;
    ddp_group_desc d;
    if (out) *out = NULL;
    DDP__NEED(out, "out is NULL");
    DDP_TRY(ddp__group_desc_resolve(__func__, desc, &d));
    while (scheme < DDP__SCHEME_COUNT
           && strncmp(d.init_method, ddp__scheme_prefixes[scheme], strlen(ddp__scheme_prefixes[scheme])) != 0)
        scheme++;
    DDP__NEED(scheme < DDP__SCHEME_COUNT
                  && (scheme >= DDP__SCHEME_TCP || strcmp(d.init_method, ddp__scheme_prefixes[scheme]) == 0),
              "init_method \"%.60s\" is unknown; use \"env://\", \"tcp://host:port\", \"file:///path\" or "
              "\"self://\"",
              d.init_method);
    DDP_TRY(ddp__identity_resolve(&id, &d, scheme));
    return ddp__create_world(out, &d, &id, scheme);
}

//== groups: agreement and split ================================================================ >>impl-agree

/* ddp_agree makes all ranks return the same result. Every rank contributes its own result, and a hash of the
   arguments that must be the same:

       all_gather    result and hash of every rank, into group->agree_entries
       none failed, all hashes are the same        DDP_OK on all ranks
       rank f has failed, or has another hash      broadcast of its text from rank f; all ranks fail with it
       its hash differs                            before that a broadcast of the text of rank 0, to compare

   ddp_group_split makes groups of the ranks with the same color. */

/* Returns the first rank that failed by itself, else the first that failed because of another one, else the
   first that has another hash than rank 0 (*is_mismatch = 1), else -1. */
static int ddp__agree_first_failure(const ddp_group *group, int *is_mismatch) {
    const ddp__agree_entry *entry = group->agree_entries;
    int poisoned = -1, different = -1;
    for (int r = 0; r < group->world_size; r++) {
        if (entry[r].result != DDP_OK && entry[r].result != DDP_ERR_POISONED) return r;
        if (entry[r].result == DDP_ERR_POISONED && poisoned < 0) poisoned = r;
        if (entry[r].hash != entry[0].hash && different < 0) different = r;
    }
    *is_mismatch = poisoned < 0 && different >= 0;
    return poisoned >= 0 ? poisoned : different;
}

/* Returns the part of description a that differs from b: the first "name=value" with another value, or all of
   a. */
static const char *ddp__first_difference(const char *a, const char *b, int *length) {
    size_t word = 0, end;
    for (size_t i = 0; a[i] && a[i] == b[i]; i++)
        if (a[i] == ' ') word = i + 1;
    end = word + strcspn(a + word, " ");
    int has_name = memchr(a + word, '=', end - word) && memchr(b + word, '=', strcspn(b + word, " "));
    *length = has_name ? (int)(end - word) : DDP_AGREE_TEXT;
    return has_name ? a + word : a;
}

static ddp_result ddp__agree_broadcast(ddp_group *group, char text[DDP__TEXT_MAX], int root) {
    return ddp_host_collective(group, DDP_CALL_BROADCAST, text, text, DDP__TEXT_MAX, DDP_U8, DDP_OP_SUM,
                               root);
}

/* Fails with the difference between the descriptions of rank 0 and rank `other`. description: of this
   rank. */
static ddp_result ddp__agree_fail_mismatch(ddp_group *group, const char *who, int other,
                                           const char *description) {
    char text[2][DDP__TEXT_MAX];
    int length[2];
    for (int i = 0; i < 2; i++) {
        snprintf(text[i], sizeof text[i], "%.*s", DDP_AGREE_TEXT, description);
        DDP_TRY(ddp__agree_broadcast(group, text[i], i ? other : 0));
    }
    const char *difference0 = ddp__first_difference(text[0], text[1], &length[0]);
    const char *difference1 = ddp__first_difference(text[1], text[0], &length[1]);
    return ddp_fail_in(DDP_ERR_MISMATCH, who, group,
                       "ranks differ: rank 0 %.*s, rank %d %.*s; give every rank the same", length[0],
                       difference0, other, length[1], difference1);
}

/* Returns the part of an error line that every rank of this group can show after its own prefix (rank, call,
   group): "no memory" of "rank 1/2 ddp_fsdp_load group=dp: no memory". Of a line of another group the group's
   name stays, because the line names ranks of that group.
   *is_inner: 1 = the line is from a group of the same name and another size, which a backend keeps inside
   this group. Its rank numbers are cut off as well. */
static const char *ddp__strip_error_prefix(const ddp_group *group, const char *who, const char *line,
                                           int *is_inner) {
    char group_field[48];
    int length = 0, size = group->world_size, skipped = 0;
    snprintf(group_field, sizeof group_field, "group=%s", group->name);
    (void)sscanf(line, "rank %*d/%d %n", &size, &length);
    line += length;
    const char *prefix_end = strstr(line, ": "), *field = strstr(line, group_field);
    const char *after = field ? field + strlen(group_field) : "";
    *is_inner = size != group->world_size && *after == ':';
    if (length && field && prefix_end > field && strchr(": ", *after)) {
        if (*is_inner) (void)sscanf(prefix_end + 2, "rank %*d: %n", &skipped);
        return prefix_end + 2 + skipped;
    }
    if (strncmp(line, who, strlen(who)) != 0) return line;
    size_t gap = strspn(line + strlen(who), ": ");
    return gap ? line + strlen(who) + gap : line;
}

DDPDEF ddp_result ddp_agree(ddp_group *group, const char *call_name, ddp_result own_result, uint64_t hash,
                            const char *description) {
    call_name = ddp_public_call_name(call_name);
    char own_text[DDP__TEXT_MAX] = "", text[DDP__TEXT_MAX];
    ddp__agree_entry entry = {own_result, 0, hash};
    int is_mismatch = 0, is_inner = 0, name_length = 0;
    if (own_result != DDP_OK) snprintf(own_text, sizeof own_text, "%s", ddp_last_error());
    ddp_result result = ddp_host_collective(group, DDP_CALL_ALL_GATHER, &entry, group->agree_entries,
                                            sizeof entry, DDP_U8, DDP_OP_SUM, -1);
    if (result != DDP_OK && own_result != DDP_OK) return ddp_fail(own_result, "%s", own_text);
    /* The error line names the all_gather, a call that the user did not make. */
    if (result != DDP_OK)
        return ddp_fail_in(result, call_name, group, "%s",
                           ddp__strip_error_prefix(group, call_name, ddp_last_error(), &is_inner));
    int failed_rank = ddp__agree_first_failure(group, &is_mismatch);
    if (failed_rank < 0) return DDP_OK;
    if (is_mismatch) return ddp__agree_fail_mismatch(group, call_name, failed_rank, description);
    memcpy(text, own_text, sizeof own_text);
    DDP_TRY(ddp__agree_broadcast(group, text, failed_rank));
    result = (ddp_result)group->agree_entries[failed_rank].result;
    const char *cause = ddp__strip_error_prefix(group, call_name, text, &is_inner);
    if (failed_rank == group->rank && strstr(own_text, call_name) && !is_inner)
        return ddp_fail(result, "%s", own_text);
    /* An earlier ddp_agree of this group may have named the rank already. */
    (void)sscanf(cause, "rank %*d: %n", &name_length);
    if (name_length) return ddp_fail_in(result, call_name, group, "%s", cause);
    return ddp_fail_in(result, call_name, group, "rank %d: %s", failed_rank, cause);
}

DDPDEF ddp_result ddp_agree_groups(ddp_group *const *groups, int count, const char *call_name,
                                   ddp_result own_result, uint64_t hash, const char *description) {
    int agreed = 0;
    for (int i = 0; i < count; i++) {
        if (!groups[i] || groups[i]->world_size == 1) continue;
        own_result = ddp_agree(groups[i], call_name, own_result, hash, description);
        agreed = 1;
    }
    return agreed ? own_result : ddp_agree(groups[0], call_name, own_result, hash, description);
}

DDPDEF ddp_result ddp_agree_list(ddp_group *group, const char *call_name, ddp_result own_result,
                                 const void *list, int count, ddp_describe_fn describe, int *differs) {
    char text[DDP_AGREE_TEXT] = "";
    uint64_t all = DDP_HASH_SEED;
    for (int i = 0; i < count && own_result == DDP_OK; i++) {
        uint64_t hash = describe(list, i, text);
        all = ddp_hash(all, &hash, sizeof hash);
    }
    ddp_result result = ddp_agree(group, call_name, own_result, all, "");
    /* If `own_result` of any rank is DDP_ERR_MISMATCH, the loop ends at entry 0. */
    for (int i = 0; i < count && result == DDP_ERR_MISMATCH; i++) {
        uint64_t hash = own_result == DDP_OK ? describe(list, i, text) : 0;
        if (differs) *differs = i;
        DDP_TRY(ddp_agree(group, call_name, own_result == DDP_OK ? DDP_OK : result, hash, text));
    }
    return result;
}

/* Lists the members of this rank's color, ordered by key, then rank. Returns their number. table: color and
   key of each rank. *new_rank: this rank's index among the members. */
static int ddp__split_members(const int32_t *table, int world_size, int rank, int *members, int *new_rank) {
    int count = 0;
    for (int r = 0; r < world_size; r++) {
        int at = count;
        if (table[2 * r] != table[2 * rank]) continue;
        for (; at > 0 && table[2 * members[at - 1] + 1] > table[2 * r + 1]; at--)
            members[at] = members[at - 1];
        members[at] = r;
        count++;
    }
    *new_rank = 0;
    while (members[*new_rank] != rank) ++*new_rank;
    return count;
}

DDPDEF ddp_result ddp_group_split(ddp_group *group, int color, int key, ddp_group **out) {
    DDP_PUBLIC_CALL(ddp_group_split);
    if (out) *out = NULL;
    DDP__NEED(group && out, "group or out is NULL");
    if (!group->backend->split)
        return DDP__GROUP_FAIL(group, DDP_ERR_UNSUPPORTED, "%s: the %s backend cannot split a group",
                               ddp_public_call_name("ddp_group_split"), group->backend->name);
    int32_t own[2] = {color < 0 ? -1 : color, key};
    int32_t *table = (int32_t *)(void *)group->agree_entries;
    int *members = (int *)(table + 2 * group->world_size), count = 0, new_rank = 0;
    ddp_group *child = NULL;
    ddp_result child_result = DDP_OK;
    ddp_result result = ddp_host_collective(group, DDP_CALL_ALL_GATHER, own, table, 2, DDP_I32, DDP_OP_SUM,
                                            -1);
    if (result == DDP_OK && color >= 0) {
        count = ddp__split_members(table, group->world_size, group->rank, members, &new_rank);
        child_result = ddp__group_alloc(&child, &group->desc, group->backend, new_rank, count, group);
        if (child) {
            snprintf(child->name, sizeof child->name, "%.20s.%d", group->name, color);
            ddp__lost_share(child, group, members);
            /* A backend may call ddp_agree on the parent, which uses the parent's entries. */
            members = (int *)memcpy(child->agree_entries, members, (size_t)count * sizeof *members);
        }
    }
    /* A rank without memory for the child takes part, too, so that the other ranks do not wait for it. */
    if (result == DDP_OK) {
        void *state = NULL;
        result = group->backend->split(group, group->state, child, members, count, &state);
        if (child) child->state = state;
        if (result == DDP_OK) result = child_result;
        result = ddp_agree(group, __func__, result, 0, "");
    }
    if (result == DDP_OK) {
        *out = child;
    } else if (child) {
        DDP_KEEP_ERROR;
        if (child->state)
            ddp_group_destroy(child);
        else
            ddp__group_delete(child);
    }
    return result;
}

//== groups: state, signals and memory ==================================================== >>impl-group-state

/* The functions of >>api and >>spi on an existing group: its status and failure, its end, its fields,
   signals, and group memory. */

DDPDEF ddp_result ddp_group_status(const ddp_group *group) {
    DDP__NEED(group, "group is NULL");
    DDP__NOT_FORKED(group, __func__);
    ddp_result result = ddp_group_cause(group);
    return result == DDP_OK ? DDP_OK : DDP__GROUP_FAIL(group, result, "%s", ddp_last_error());
}

DDPDEF ddp_result ddp_group_abort(ddp_group *group) {
    char text[96];
    DDP__NEED(group, "group is NULL");
    DDP__NOT_FORKED(group, __func__);
    snprintf(text, sizeof text, "rank %d (pid %d) called ddp_group_abort", group->rank, (int)getpid());
    ddp_group_poison(group, DDP_ERR_POISONED, text);
    return DDP_OK;
}

DDPDEF int ddp_group_is_forked(const ddp_group *group) { return !*group->in_rank_process; }

DDPDEF void ddp_group_destroy(ddp_group *group) {
    DDP_PUBLIC_CALL(ddp_group_destroy);
    DDP_KEEP_ERROR;
    if (!group || ddp_group_is_forked(group)) return; /* a forked process must not touch the group */
    if (group->thread_started || group->no_thread) {
        char text[96];
        snprintf(text, sizeof text, "rank %d (pid %d) destroyed the group with pending work", group->rank,
                 (int)getpid());
        pthread_mutex_lock(&group->lock);
        int pending = group->head || group->running || group->pending_p2p;
        group->thread_end.done = 1;
        pthread_cond_signal(&group->work_cond);
        ddp__p2p_wake(group);
        pthread_mutex_unlock(&group->lock);
        if (pending) ddp_group_poison(group, DDP_ERR_PEER_LOST, text);
        if (group->thread_started) pthread_join(group->thread, NULL);
    }
    if (group->destroy_fn) group->destroy_fn(group);
    group->backend->close(group, group->state);
    ddp__group_delete(group);
}

DDPDEF int ddp_rank(const ddp_group *group) { return group ? group->rank : -1; }
DDPDEF int ddp_world_size(const ddp_group *group) { return group ? group->world_size : 0; }
DDPDEF int ddp_local_rank(const ddp_group *group) { return group ? group->local_rank : -1; }
DDPDEF int ddp_local_world_size(const ddp_group *group) { return group ? group->local_world_size : 0; }
DDPDEF int ddp_group_attempt(const ddp_group *group) { return group ? group->attempt : 0; }
DDPDEF const ddp_device *ddp_group_device(const ddp_group *group) { return group->device; }
DDPDEF void *ddp_group_device_state(const ddp_group *group) { return group->device_state; }
DDPDEF int ddp_group_device_index(const ddp_group *group) { return group->device_index; }
DDPDEF int ddp_group_timeout_ms(const ddp_group *group) { return group->desc.timeout_ms; }
DDPDEF ddp_order ddp_group_order(const ddp_group *group) { return group->desc.order; }
DDPDEF void *ddp_group_peer(ddp_group *group, const void *memory, int rank) {
    if (group->world_size == 1) return (void *)(uintptr_t)memory;
    return memory && group->backend->peer ? group->backend->peer(group, group->state, memory, rank) : NULL;
}
DDPDEF void ddp_group_signal(ddp_group *group, uint64_t *word, uint64_t value) {
    if (group->world_size > 1 && !ddp_group_is_forked(group))
        group->backend->signal(group, group->state, word, value);
}

typedef struct ddp__wait_signal_arguments {
    const uint64_t *word;
    uint64_t target;
} ddp__wait_signal_arguments;

static ddp_result ddp__wait_signal_task(ddp_group *group, void *argument) {
    const ddp__wait_signal_arguments *wait = (const ddp__wait_signal_arguments *)argument;
    ddp_call call = ddp__call_of(DDP_CALL_BARRIER, NULL, NULL, (size_t)wait->target, DDP_U8);
    ddp_result result = group->backend->wait_signal(group, group->state, wait->word, wait->target);
    call.tag = DDP__TAG_WAIT_SIGNAL;
    call.flags = DDP_CALL_HOST_MEMORY;
    call.seq = group->seq; /* of the last collective before it */
    return result == DDP_OK ? DDP_OK : ddp__call_failed(group, &call, result);
}

DDPDEF ddp_result ddp_group_wait_signal(ddp_group *group, const uint64_t *word, uint64_t target) {
    ddp__wait_signal_arguments wait = {word, target};
    return group->world_size > 1 ? ddp_group_enqueue(group, ddp__wait_signal_task, &wait, NULL) : DDP_OK;
}

DDPDEF const char *ddp_group_name(const ddp_group *group) { return group->name; }
DDPDEF void *ddp_group_backend_user(const ddp_group *group) { return group->desc.backend_user; }

/* text: a cause, or an error line of this rank. An error line becomes a cause: "rank 1/2 ddp_fsdp_load
   group=dp seq=3: no memory" becomes "cause: rank 1 in ddp_fsdp_load: no memory". A cause inside an error
   line stays as it is. In a forked process the call does nothing, because the failure is not the rank's. */
DDPDEF void ddp_group_poison(ddp_group *group, ddp_result cause, const char *text) {
    char line[DDP__TEXT_MAX], call[64], name[32] = "", of_group[48] = "";
    const char *known_cause = strstr(text, DDP__CAUSE), *message = NULL;
    int rank, size, call_end = 0;
    if (ddp_group_is_forked(group)) return;
    if (!known_cause && sscanf(text, "rank %d/%d %63[a-z0-9_]%n", &rank, &size, call, &call_end) == 3)
        message = strstr(text + call_end, ": ");
    if (message) {
        const char *group_field = strstr(text + call_end, " group=");
        if (group_field && group_field < message) sscanf(group_field, " group=%31[^ :]", name);
        if (name[0] && strcmp(name, group->name) != 0)
            snprintf(of_group, sizeof of_group, " of group=%s", name);
        snprintf(line, sizeof line, DDP__CAUSE "rank %d%s in %s: %.360s", rank, of_group, call, message + 2);
        text = line;
    }
    group->backend->poison(group, group->state, cause, known_cause ? known_cause : text);
}

DDPDEF void ddp_group_pass_on(ddp_group *group, ddp_group *to) {
    static const char prefix[] = DDP__CAUSE "rank ";
    char text[DDP__TEXT_MAX], line[DDP__TEXT_MAX];
    ddp_result cause = ddp_group_cause(group);
    if (cause == DDP_OK) return;
    snprintf(text, sizeof text, "%s", ddp_last_error());
    const char *in_call = strncmp(text, prefix, strlen(prefix)) == 0 ? strstr(text, " in ddp_") : NULL;
    /* A group before this one may have passed the cause on already. */
    if (strstr(text, " of group="))
        snprintf(line, sizeof line, "%s", text);
    else if (in_call)
        snprintf(line, sizeof line, "%s%d of group=%s%.400s", prefix, atoi(text + strlen(prefix)),
                 group->name, in_call);
    else
        snprintf(line, sizeof line, DDP__CAUSE "group=%s: %.400s", group->name, text);
    ddp_group_poison(to, cause, line);
}

DDPDEF ddp_result ddp_group_cause(const ddp_group *group) {
    ddp__lost_check((ddp_group *)(uintptr_t)group);
    return group->backend->status(group, group->state);
}

DDPDEF void ddp_group_part_of(ddp_group *part, ddp_group *parent, const int *ranks) {
    ddp__lost_share(part, parent, ranks);
    if (part->backend != &ddp__backend_local) return;
    memcpy(((ddp__local *)part->state)->cause_rank, ranks, (size_t)part->world_size * sizeof *ranks);
}

DDPDEF void *ddp_group_take_over(ddp_group *group, ddp_group *from) {
    group->backend = from->backend;
    group->state = from->state;
    ddp__group_delete(from);
    return group->state;
}

DDPDEF void ddp_group_on_wait(ddp_group *group, void (*fn)(void *argument), void *argument) {
    group->wait_fn = fn;
    group->wait_argument = argument;
}
DDPDEF void ddp_group_on_destroy(ddp_group *group, void (*fn)(ddp_group *group)) { group->destroy_fn = fn; }
DDPDEF void ddp_group_no_thread(ddp_group *group) { group->no_thread = 1; }

DDPDEF void ddp_group_set_local(ddp_group *group, int rank, int world_size) {
    group->local_rank = rank;
    group->local_world_size = world_size;
}

DDPDEF ddp_result ddp_group_alloc(ddp_group *group, size_t size_bytes, void **out) {
    DDP_PUBLIC_CALL(ddp_group_alloc);
    char what[64];
    if (out) *out = NULL;
    DDP__NEED(group && out, "group or out is NULL");
    const ddp_backend *backend = group->backend;
    ddp__allocation *a = (ddp__allocation *)ddp_host_alloc(group, sizeof *a);
    ddp_result result = a ? DDP_OK : DDP_ERR_NO_MEMORY;
    if (!size_bytes) result = ddp__bad(__func__, group, "size_bytes is 0; use 1 or more");
    int length = snprintf(what, sizeof what, "ddp_group_alloc size_bytes=%zu", size_bytes);
    result = ddp_agree(group, __func__, result, ddp_hash(DDP_HASH_SEED, what, (size_t)length), what);
    if (result == DDP_OK) {
        if (backend->alloc)
            result = backend->alloc(group, group->state, size_bytes, &a->memory);
        else if (!(a->memory = ddp_host_alloc(group, size_bytes)))
            result = DDP_ERR_NO_MEMORY;
        result = ddp_agree(group, __func__, result, 0, "");
        if (result != DDP_OK && a->memory && backend->free) backend->free(group, group->state, a->memory);
    }
    if (result != DDP_OK) {
        if (a) ddp__allocation_free(group, a);
        return result;
    }
    a->number = ++group->allocation_count;
    a->next = group->allocations;
    group->allocations = a;
    *out = a->memory;
    return DDP_OK;
}

DDPDEF ddp_result ddp_group_free(ddp_group *group, void *memory) {
    DDP_PUBLIC_CALL(ddp_group_free);
    char what[64];
    DDP__NEED(group, "group is NULL");
    DDP__NOT_FORKED(group, __func__);
    if (!memory) return DDP_OK;
    ddp__allocation **link = &group->allocations, *a;
    while (*link && (*link)->memory != memory) link = &(*link)->next;
    a = *link;
    DDP_CHECK(__func__, group, a, "memory=%p is not from ddp_group_alloc of this group", memory);
    int length = snprintf(what, sizeof what, "ddp_group_free block=%llu", (unsigned long long)a->number);
    ddp_result result = ddp_agree(group, __func__, DDP_OK, ddp_hash(DDP_HASH_SEED, what, (size_t)length),
                                  what);
    if (result == DDP_ERR_MISMATCH) return result; /* otherwise no rank uses it any more */
    *link = a->next;
    if (group->backend->free) {
        ddp_result freed = group->backend->free(group, group->state, memory);
        if (result == DDP_OK) result = freed;
    }
    ddp__allocation_free(group, a);
    return result;
}

//== the MPI backend: state and failures ========================================================== >>impl-mpi

/* Like a user's own backend, this one calls only >>spi. ddp_group_create calls it through
   ddp_group_create_mpi.

   The ranks of one machine also form a group of the local backend. If the whole group is on one machine, it
   becomes that local group. Otherwise the local group detects dead processes, records the cause of a failure,
   and owns the group memory.

   Control messages between any two ranks report failures and find out which ranks are late. Every wait polls
   MPI_Test, except for MPI_Comm_split, which blocks right after all ranks have agreed to it. After a failure
   MPI may still use the buffers of pending calls: they are not freed, and MPI is not finalised. Messages are
   cancelled. */

#if defined(DDP_USE_MPI)
#if !defined(DDP__MPI_PIECE_BYTES)             /* tests make them small */
#define DDP__MPI_PIECE_BYTES ((size_t)1 << 30) /* of one MPI call: its counts are int */
#define DDP__MPI_CHUNK_BYTES ((size_t)2 << 20) /* of a rank's data, reduced at a time; 16 KiB or more */
#endif
enum { DDP__MPI_DATA, DDP__MPI_CONTROL, DDP__MPI_TAGS /* the first tag of messages */ };
enum { DDP__MPI_LOCAL_EXTRA_MS = 3000 }; /* the timeout of the local group is longer by this */

/* A control message. seq: number of the sender's current call.
     FAILED    the group has failed: code and text of the first cause, lost ranks of ddp_group_get_lost
     QUERY     after a timeout: requests a REPLY
     REPLY     the sender waits in call seq
     LEFT      the sender destroys its handle after call seq */
enum { DDP__CONTROL_FAILED, DDP__CONTROL_QUERY, DDP__CONTROL_REPLY, DDP__CONTROL_LEFT, DDP__CONTROL_KINDS };
typedef struct ddp__mpi_control {
    int32_t kind, code;
    uint64_t seq, lost[2];
    char text[512];
} ddp__mpi_control;

/* A message. dtype, count and the user's buffer travel together: a receive overwrites all three. */
typedef struct ddp__mpi_message {
    uint64_t dtype, count;
    ddp_call call;
    MPI_Request request;
} ddp__mpi_message;

enum { DDP__MPI_BY_MACHINE, DDP__MPI_FLAT, DDP__MPI_METHODS };
enum { DDP__MPI_ALL_REDUCE, DDP__MPI_REDUCE, DDP__MPI_REDUCE_SCATTER, DDP__MPI_SUMS };
typedef struct ddp__mpi {
    MPI_Comm comm;
    ddp_group *local; /* the ranks of this machine */
    int rank, world_size;
    int one_thread;        /* 1 = only the main thread may call MPI, or one thread at a time */
    int ranks_per_machine; /* if every machine holds the same 2^k consecutive ranks; otherwise 1 */
    int stride, offset;   /* ranks offset, offset + stride, ... take part in the transfer, as rank / stride */
    uint64_t *machine_of; /* of each rank: the first rank of its machine */
    /* Failures */
    ddp__mpi_control control[DDP__CONTROL_KINDS]; /* of each kind, as sent: MPI may still read them */
    unsigned char *rank_state;                    /* DDP_RANK_... of each rank, by its CONTROL_REPLY */
    uint32_t failure_sent;   /* 1 = the failure has been sent to the other ranks, or came from one */
    int departed_rank;       /* the first rank that has destroyed its handle */
    uint64_t departed_after; /* seq of its last call */
    /* The collective in flight */
    ddp_call call;
    int method;            /* of a sum: one rank chooses it, and sends it with the hash of its call */
    MPI_Request *requests; /* at most four per rank */
    int request_count;
    int cancellable;   /* 1 = the requests are messages, not a collective of MPI */
    uint64_t words[9]; /* for MPI calls of this file; after a failure MPI may still write there */
    /* Memory for sums */
    unsigned char *scratch;             /* three chunks and one pointer per rank */
    size_t rank_chunk_bytes;            /* bytes of scratch for one chunk of one rank */
    size_t chunk_bytes;                 /* rank_chunk_bytes, or a multiple of it if fewer ranks take part */
    unsigned char *machine_sums;        /* of the method by machine: the third chunks of scratch */
    ddp_tuner tuner[DDP__MPI_SUMS][16]; /* by size */
} ddp__mpi;
/* Worlds that are open, or that have failed after their ranks began to communicate. MPI is not finalised
   before they are closed. */
static uint32_t ddp__mpi_open_worlds;

static ddp_result ddp__mpi_result(int error, const char *call) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (error == MPI_SUCCESS) return DDP_OK;
    MPI_Error_string(error, text, &length);
    return ddp_fail(DDP_ERR_ENGINE, "%s: %.300s", call, text);
}

/* Calls an MPI function. If it fails, returns from the calling function with MPI's text as the error line. */
#define DDP__MPI_TRY(function, ...) DDP_TRY(ddp__mpi_result(function(__VA_ARGS__), #function))

/* Sends a control message. The caller has set all its fields except the kind. Does not wait for it. */
static void ddp__mpi_send_control(ddp__mpi *s, int to, int kind) {
    MPI_Request request;
    ddp__mpi_control *message = &s->control[kind];
    message->kind = kind;
    if (to == s->rank) return;
    if (MPI_Isend(message, (int)sizeof *message, MPI_BYTE, to, DDP__MPI_CONTROL, s->comm, &request)
        == MPI_SUCCESS)
        MPI_Request_free(&request);
}

/* Records the cause in the local group, and sends the group's first cause to the other ranks, once. */
static void ddp__mpi_poison(ddp__mpi *s, ddp_result cause, const char *text) {
    ddp__mpi_control *message = &s->control[DDP__CONTROL_FAILED];
    if (!s->local) return; /* the group is being opened */
    ddp_group_poison(s->local, cause, text);
    if (__atomic_exchange_n(&s->failure_sent, 1u, __ATOMIC_SEQ_CST)) return;
    message->code = (int32_t)ddp_group_cause(s->local);
    snprintf(message->text, sizeof message->text, "%s", ddp_last_error());
    ddp_group_get_lost(s->local, message->lost);
    for (int r = 0; r < s->world_size; r++) ddp__mpi_send_control(s, r, DDP__CONTROL_FAILED);
}

/* Poisons the group, on any thread. If this thread must not call MPI, the next call of the main thread sends
   the failure to the other ranks. */
static void ddp__mpi_poison_from_any_thread(ddp_group *group, void *state, ddp_result cause,
                                            const char *text) {
    ddp__mpi *s = (ddp__mpi *)state;
    int may_call_mpi = 1;
    (void)group;
    if (s->one_thread) MPI_Is_thread_main(&may_call_mpi);
    if (may_call_mpi)
        ddp__mpi_poison(s, cause, text);
    else
        ddp_group_poison(s->local, cause, text);
}

/* Poisons with this thread's error line as the cause. Returns DDP_ERR_POISONED. */
static ddp_result ddp__mpi_fail(ddp__mpi *s, ddp_result cause) {
    ddp__mpi_poison(s, cause, ddp_last_error());
    return DDP_ERR_POISONED;
}

/* Receives pending control messages. This also lets MPI progress messages that it has accepted. */
static void ddp__mpi_receive_control(void *state) {
    ddp__mpi *s = (ddp__mpi *)state;
    for (;;) {
        ddp__mpi_control control;
        MPI_Message message;
        MPI_Status status;
        int has_message = 0;
        if (MPI_Improbe(MPI_ANY_SOURCE, DDP__MPI_CONTROL, s->comm, &has_message, &message, &status)
                != MPI_SUCCESS
            || !has_message)
            return;
        if (MPI_Mrecv(&control, (int)sizeof control, MPI_BYTE, &message, &status) != MPI_SUCCESS) return;
        int from = status.MPI_SOURCE;
        switch (control.kind) {
        case DDP__CONTROL_FAILED:
            __atomic_store_n(&s->failure_sent, 1u, __ATOMIC_RELEASE);
            ddp_group_add_lost(s->local, control.lost, (ddp_result)control.code, control.text);
            ddp_group_poison(s->local, (ddp_result)control.code, control.text);
            break;
        case DDP__CONTROL_QUERY: ddp__mpi_send_control(s, from, DDP__CONTROL_REPLY); break;
        case DDP__CONTROL_REPLY:
            s->rank_state[from] = control.seq >= s->call.seq ? DDP_RANK_ARRIVED : DDP_RANK_BEHIND;
            break;
        case DDP__CONTROL_LEFT:
            if (control.seq >= s->departed_after) break;
            s->departed_after = control.seq;
            s->departed_rank = from;
            break;
        }
    }
}

/* Runs on any thread. Below MPI_THREAD_MULTIPLE it does not call MPI. */
static ddp_result ddp__mpi_status(const ddp_group *group, void *state) {
    ddp__mpi *s = (ddp__mpi *)state;
    (void)group;
    if (!s->one_thread) ddp__mpi_receive_control(s);
    return ddp_group_cause(s->local);
}

/* Sends DDP__CONTROL_QUERY to the ranks first, first + stride, ... up to last, and fills rank_state with
   their answers. Ranks that wait for MPI answer within half a second; the others are silent. */
static void ddp__mpi_query_ranks(ddp__mpi *s, int first, int last, int stride) {
    memset(s->rank_state, DDP_RANK_ARRIVED, (size_t)s->world_size);
    for (int r = first; r <= last; r += stride) {
        if (r != s->rank) s->rank_state[r] = DDP_RANK_SILENT;
        ddp__mpi_send_control(s, r, DDP__CONTROL_QUERY);
    }
    const double reply_by = ddp_now() + 0.5;
    for (; ddp_now() < reply_by; usleep(1000)) ddp__mpi_receive_control(s);
}

/* After a timeout of a call: fails, with the ranks that rank_state describes as missing. */
static void ddp__mpi_fail_timed_out(ddp_group *group, ddp__mpi *s, const ddp_call *call) {
    if (ddp_group_cause(s->local) != DDP_OK) return; /* another rank has found the cause already */
    ddp__mpi_fail(s, ddp_call_timed_out(group, call, s->rank_state));
}

/* Returns 1 if a rank that was queried is in this state. */
static int ddp__mpi_has_state(const ddp__mpi *s, int state) {
    return memchr(s->rank_state, state, (size_t)s->world_size) != NULL;
}

/* After a timeout of a collective: looks for the ranks that it waits for, and fails with their names. If all
   leaders of a sum by machine have arrived, one of them waits for a rank of its machine. If a rank waits in
   an earlier call (DDP_RANK_BEHIND), this call lets that one fail first, since it names the cause. */
static void ddp__mpi_find_silent_ranks(ddp_group *group, ddp__mpi *s, double overdue_ms) {
    ddp__mpi_query_ranks(s, s->offset, s->world_size - 1, s->stride);
    if (!ddp__mpi_has_state(s, DDP_RANK_SILENT) && s->stride > 1)
        ddp__mpi_query_ranks(s, 0, s->world_size - 1, 1);
    if (!ddp__mpi_has_state(s, DDP_RANK_BEHIND) || overdue_ms > DDP__MPI_LOCAL_EXTRA_MS)
        ddp__mpi_fail_timed_out(group, s, &s->call);
}

/* Runs regularly during a wait: receives control messages, looks for lost ranks and for the timeout. Returns
   DDP_OK while the wait may continue. */
static ddp_result ddp__mpi_check_wait(ddp_group *group, ddp__mpi *s, double start) {
    const int timeout_ms = ddp_group_timeout_ms(group);
    const double overdue_ms = (ddp_now() - start) * 1e3 - timeout_ms;
    if (!s->local) /* the group is being opened */
        return overdue_ms <= 0 ? DDP_OK : ddp_fail(DDP_ERR_TIMEOUT, "timed out after %d ms", timeout_ms);
    ddp__mpi_receive_control(s);
    if (s->departed_after < s->call.seq)
        ddp__mpi_fail(s, ddp_fail(DDP_ERR_PEER_LOST, "rank %d has destroyed this group", s->departed_rank));
    ddp_result cause = ddp_group_check_lost(group);
    if (cause != DDP_OK) ddp__mpi_fail(s, cause);
    if (overdue_ms > 0 && ddp_group_cause(s->local) == DDP_OK)
        ddp__mpi_find_silent_ranks(group, s, overdue_ms);
    cause = ddp_group_cause(s->local);
    return cause == DDP_OK ? DDP_OK : ddp__mpi_fail(s, cause);
}
#endif /* DDP_USE_MPI */

//== the MPI backend: transfers ========================================================== >>impl-mpi-transfer

/* Transfers the data of collectives. Callers: >>impl-mpi-calls, after it has compared the calls of all ranks.
   Calls that add use one of three methods:

     native      all_reduce and reduce in any order, of the types that MPI has: MPI computes them
     by machine  if every machine holds 2^k consecutive ranks: their sum is a subtree
     flat        all others. ddp_tuner chooses between this method and the one by machine

   Flat, three ranks with the data a, b and c. Chunk by chunk, each rank receives its share of every rank's
   chunk, adds the shares in tree order, and sends the sum to all:

                 send buffer       receives and adds        sends the sum
       rank 0    a0 a1 a2          a0 + b0 + c0 = s0        s0 s1 s2
       rank 1    b0 b1 b2          a1 + b1 + c1 = s1        s0 s1 s2
       rank 2    c0 c1 c2          a2 + b2 + c2 = s2        s0 s1 s2

   By machine, an all_reduce on two machines of four ranks:

       ranks 0 1 2 3   reduce to 0 --+           +-- broadcast from 0 to 0 1 2 3
                                     +-- flat ---+
       ranks 4 5 6 7   reduce to 4 --+           +-- broadcast from 4 to 4 5 6 7

   A reduce to rank 6 adds on ranks 2 and 6, and ends there. A reduce_scatter has one flat exchange per rank
   of a machine:

       ranks 0 1 2 3   reduce_scatter: rank 1 holds this machine's sums of blocks 1 and 5 --+
                                                                                            +-- flat
       ranks 4 5 6 7   reduce_scatter: rank 5 holds this machine's sums of blocks 1 and 5 --+ */

#if defined(DDP_USE_MPI)
/* Waits for all requests that have been started. */
static ddp_result ddp__mpi_wait(ddp_group *group, ddp__mpi *s) {
    double start = 0;
    int done = 0;
    for (uint64_t tries = 0;; tries++) { /* more than an int holds in half an hour */
        DDP__MPI_TRY(MPI_Testall, s->request_count, s->requests, &done, MPI_STATUSES_IGNORE);
        if (done) break;
        if (tries < 1000) continue;
        if (tries == 1000) start = ddp_now();
        if (tries % 16 == 0) DDP_TRY(ddp__mpi_check_wait(group, s, start));
        sched_yield();
    }
    s->request_count = 0;
    return DDP_OK;
}

/* Runs a collective of MPI from its start to its end. */
#define DDP__MPI_TRY_COLLECTIVE(group, s, function, ...)                                      \
    do {                                                                                      \
        (s)->cancellable = 0;                                                                 \
        DDP__MPI_TRY(function, __VA_ARGS__, (s)->comm, &(s)->requests[(s)->request_count++]); \
        DDP_TRY(ddp__mpi_wait(group, s));                                                     \
    } while (0)

/* Starts to send or receive one message of two parts: head_bytes at memory, and size_bytes at memory +
   offset. MPI counts are int. A derived type describes a large part as rows and a rest. */
static ddp_result ddp__mpi_start_message(ddp__mpi *s, int sends, void *memory, size_t head_bytes,
                                         MPI_Aint offset, size_t size_bytes, int peer, int tag,
                                         MPI_Request *request) {
    enum { ROW = 65536 };
    int is_derived = head_bytes || size_bytes > DDP__MPI_PIECE_BYTES,
        count = is_derived ? 1 : (int)size_bytes;
    MPI_Datatype type = MPI_BYTE;
    if (is_derived) {
        int lengths[3] = {(int)head_bytes, (int)(size_bytes / ROW), (int)(size_bytes % ROW)};
        MPI_Aint displacements[3] = {0, offset, offset + (MPI_Aint)(size_bytes / ROW * ROW)};
        MPI_Datatype types[3] = {MPI_BYTE, MPI_BYTE, MPI_BYTE};
        DDP__MPI_TRY(MPI_Type_contiguous, ROW, MPI_BYTE, &types[1]);
        DDP__MPI_TRY(MPI_Type_create_struct, 3, lengths, displacements, types, &type);
        MPI_Type_free(&types[1]);
        DDP__MPI_TRY(MPI_Type_commit, &type);
    }
    int error = sends ? MPI_Isend(memory, count, type, peer, tag, s->comm, request)
                      : MPI_Irecv(memory, count, type, peer, tag, s->comm, request);
    if (is_derived) MPI_Type_free(&type); /* MPI frees it when the message is complete */
    return ddp__mpi_result(error, sends ? "MPI_Isend" : "MPI_Irecv");
}

/* Starts to send or receive a piece of a collective. peer: rank / stride. */
static ddp_result ddp__mpi_start_piece(ddp__mpi *s, int sends, const void *memory, size_t size_bytes,
                                       int peer) {
    if (!size_bytes) return DDP_OK;
    DDP_TRY(ddp__mpi_start_message(s, sends, (void *)(uintptr_t)memory, 0, 0, size_bytes,
                                   peer * s->stride + s->offset, DDP__MPI_DATA,
                                   &s->requests[s->request_count]));
    s->request_count++;
    s->cancellable = 1;
    return DDP_OK;
}

/* Returns the peer of round i of an exchange. In each round a rank sends to one peer and receives from
   another, and no two ranks send to the same one. */
static int ddp__mpi_peer(const ddp__mpi *s, int i) {
    return (s->rank / s->stride + i) % (s->world_size / s->stride);
}

/* Executes a call that adds nothing: one exchange. */
static ddp_result ddp__mpi_exchange(ddp_group *group, ddp__mpi *s, const ddp_call *call) {
    const unsigned char *send = (const unsigned char *)call->send;
    unsigned char *recv = (unsigned char *)call->recv;
    const int rank = s->rank, world_size = s->world_size;
    for (int i = 1; i < world_size; i++) {
        int to = ddp__mpi_peer(s, i), from = ddp__mpi_peer(s, world_size - i);
        ddp_bytes out = ddp_call_sends(call, rank, to), in = ddp_call_receives(call, rank, from);
        DDP_TRY(ddp__mpi_start_piece(s, 0, recv + in.begin, in.size, from));
        DDP_TRY(ddp__mpi_start_piece(s, 1, send + out.begin, out.size, to));
    }
    ddp_bytes out = ddp_call_sends(call, rank, rank), in = ddp_call_receives(call, rank, rank);
    if (in.size && out.size && recv + in.begin != send + out.begin)
        memcpy(recv + in.begin, send + out.begin, in.size);
    return ddp__mpi_wait(group, s);
}

/* Returns chunk k of the share that rank r reduces, as a range of every rank's send buffer. The share is rank
   r's block in a reduce_scatter; otherwise a part of the buffer, in full cache lines. */
static ddp_bytes ddp__mpi_reduced_chunk(const ddp__mpi *s, const ddp_call *call, int r, size_t k) {
    ddp_bytes share = ddp_call_sends(call, 0, call->root >= 0 ? call->root : r);
    size_t ranks = (size_t)(s->world_size / s->stride), begin = k * s->chunk_bytes;
    if (call->kind != DDP_CALL_REDUCE_SCATTER) {
        size_t max_size = ddp_round_up((share.size + ranks - 1) / ranks, 64),
               share_begin = max_size * (size_t)r;
        share.begin = share_begin < share.size ? share_begin : share.size;
        share.size -= share.begin;
        if (share.size > max_size) share.size = max_size;
    }
    size_t remaining = share.size > begin ? share.size - begin : 0;
    share.begin += begin;
    share.size = remaining < s->chunk_bytes ? remaining : s->chunk_bytes;
    return share;
}

/* Starts to send every rank its share of chunk k, and to receive this rank's share from every rank. The chunk
   of rank r arrives at arriving + r * chunk_bytes. */
static ddp_result ddp__mpi_start_scatter(ddp__mpi *s, const ddp_call *call, size_t k,
                                         unsigned char *arriving) {
    const unsigned char *send = (const unsigned char *)call->send;
    const int ranks = s->world_size / s->stride;
    ddp_bytes share = ddp__mpi_reduced_chunk(s, call, s->rank / s->stride, k);
    for (int i = 1; i < ranks; i++) {
        int to = ddp__mpi_peer(s, i), from = ddp__mpi_peer(s, ranks - i);
        ddp_bytes peer_share = ddp__mpi_reduced_chunk(s, call, to, k);
        DDP_TRY(ddp__mpi_start_piece(s, 0, arriving + (size_t)from * s->chunk_bytes, share.size, from));
        DDP_TRY(ddp__mpi_start_piece(s, 1, send + peer_share.begin, peer_share.size, to));
    }
    return DDP_OK;
}

/* Adds this rank's share of chunk k, which has arrived from every rank. Starts to send the sum to the ranks
   that receive it, and to receive the sums of the others. A reduce_scatter keeps its sum. */
static ddp_result ddp__mpi_reduce_and_start_gather(ddp__mpi *s, const ddp_call *call, size_t k,
                                                   unsigned char *arrived) {
    const int rank = s->rank / s->stride, ranks = s->world_size / s->stride;
    const int scatters = call->kind == DDP_CALL_REDUCE_SCATTER;
    const int receives = scatters || ddp_call_receives(call, rank, rank).size > 0;
    const void **sources = (const void **)(void *)s->scratch;
    unsigned char *recv = (unsigned char *)call->recv;
    ddp_bytes share = ddp__mpi_reduced_chunk(s, call, rank, k);
    void *sum = arrived + (size_t)rank * s->chunk_bytes;
    if (receives) sum = recv + (scatters ? k * s->chunk_bytes : share.begin);
    for (int r = 0; r < ranks; r++) sources[r] = arrived + (size_t)r * s->chunk_bytes;
    sources[rank] = (const unsigned char *)call->send + share.begin;
    ddp_reduce_tree(sum, sources, ranks, share.size / ddp_dtype_size(call->dtype), call->dtype, call->op,
                    call->divisor);
    for (int i = 1; i < ranks && !scatters; i++) {
        int to = ddp__mpi_peer(s, i), from = ddp__mpi_peer(s, ranks - i);
        ddp_bytes peer_share = ddp__mpi_reduced_chunk(s, call, from, k);
        if (receives) DDP_TRY(ddp__mpi_start_piece(s, 0, recv + peer_share.begin, peer_share.size, from));
        if (ddp_call_receives(call, to, to).size) DDP_TRY(ddp__mpi_start_piece(s, 1, sum, share.size, to));
    }
    return DDP_OK;
}

/* The flat method, among all ranks, or among ranks offset, offset + stride, ... While chunk k arrives, the
   rank adds and sends chunk k - 1:

       k    arrives      added and sent
       0    chunk 0
       1    chunk 1      chunk 0
       2                 chunk 1 */
static ddp_result ddp__mpi_flat(ddp_group *group, ddp__mpi *s, const ddp_call *call, int stride, int offset) {
    unsigned char *chunks = s->scratch + (size_t)s->world_size * sizeof(void *);
    size_t half, remaining = 1;
    s->stride = stride;
    s->offset = offset;
    s->chunk_bytes = s->rank_chunk_bytes * (size_t)stride; /* fewer ranks: more memory for each */
    half = (size_t)(s->world_size / stride) * s->chunk_bytes;
    for (size_t k = 0; remaining; k++) {
        unsigned char *arriving = chunks + (k & 1) * half, *arrived = chunks + (~k & 1) * half;
        remaining = ddp__mpi_reduced_chunk(s, call, 0, k).size; /* no share is larger than that of rank 0 */
        if (remaining) DDP_TRY(ddp__mpi_start_scatter(s, call, k, arriving));
        if (k > 0) DDP_TRY(ddp__mpi_reduce_and_start_gather(s, call, k - 1, arrived));
        DDP_TRY(ddp__mpi_wait(group, s));
    }
    return DDP_OK;
}

/* all_reduce and reduce by machine, in pieces: a reduce to one rank of each machine, the leader; the flat
   method among the leaders; in an all_reduce, a broadcast on each machine. The leaders include the root. */
static ddp_result ddp__mpi_reduce_by_machine(ddp_group *group, ddp__mpi *s, const ddp_call *call,
                                             ddp_dtype sum_dtype, ddp_op sum_op) {
    const ddp_device *cpu = ddp_device_cpu();
    const int to_all = call->kind == DDP_CALL_ALL_REDUCE, converts = sum_dtype != call->dtype;
    const int receives = to_all || s->rank == call->root;
    const int leader = to_all ? 0 : call->root % s->ranks_per_machine;
    const size_t element = ddp_dtype_size(call->dtype);
    const size_t max_count = (size_t)s->world_size * s->rank_chunk_bytes / ddp_dtype_size(sum_dtype);
    ddp_call part = *call;
    part.dtype = sum_dtype;
    if (!to_all) part.root = call->root / s->ranks_per_machine;
    for (size_t first = 0; first < call->count; first += part.count) {
        const unsigned char *send = (const unsigned char *)call->send + first * element;
        unsigned char *recv = receives ? (unsigned char *)call->recv + first * element : NULL;
        void *sum = converts || !receives ? s->machine_sums : recv;
        const void *own = converts ? sum : send;
        part.count = call->count - first < max_count ? call->count - first : max_count;
        part.send = sum;
        part.recv = sum;
        if (converts) cpu->cast(sum, sum_dtype, send, call->dtype, part.count);
        DDP_TRY(ddp_reduce(s->local, own, sum, part.count, sum_dtype, sum_op, leader, NULL));
        if (ddp_rank(s->local) == leader)
            DDP_TRY(ddp__mpi_flat(group, s, &part, s->ranks_per_machine, leader));
        if (ddp_rank(s->local) == leader && receives)
            cpu->cast(recv, call->dtype, sum, sum_dtype, part.count);
        if (to_all) DDP_TRY(ddp_broadcast(s->local, recv, part.count, call->dtype, 0, NULL));
    }
    return DDP_OK;
}

/* reduce_scatter by machine, in pieces of each block: a reduce_scatter on each machine, then the flat method
   among peers, the ranks at the same position on their machines. Between the two, a rank has its machine's
   sums of its own block and of the blocks of its peers. These are adjacent in machine_sums. */
static ddp_result ddp__mpi_reduce_scatter_by_machine(ddp_group *group, ddp__mpi *s, const ddp_call *call,
                                                     ddp_dtype sum_dtype, ddp_op sum_op) {
    const ddp_device *cpu = ddp_device_cpu();
    const int per_machine = s->ranks_per_machine, local = ddp_rank(s->local);
    const size_t machines = (size_t)(s->world_size / per_machine), machine = (size_t)(s->rank / per_machine);
    const size_t element = ddp_dtype_size(call->dtype), sum_element = ddp_dtype_size(sum_dtype);
    const size_t max_count = s->rank_chunk_bytes / sum_element;
    ddp_call part = *call;
    part.dtype = sum_dtype;
    for (size_t first = 0; first < call->count; first += part.count) {
        part.count = call->count - first < max_count ? call->count - first : max_count;
        const size_t block_bytes = part.count * sum_element, peers_bytes = machines * block_bytes;
        for (int r = 0; r < s->world_size; r++)
            cpu->cast(s->machine_sums + (size_t)(r % per_machine) * peers_bytes
                          + (size_t)(r / per_machine) * block_bytes,
                      sum_dtype,
                      (const unsigned char *)call->send + ((size_t)r * call->count + first) * element,
                      call->dtype, part.count);
        unsigned char *own = s->machine_sums + (size_t)local * peers_bytes;
        DDP_TRY(ddp_reduce_scatter(s->local, s->machine_sums, own, machines * part.count, sum_dtype, sum_op,
                                   NULL));
        part.send = own;
        part.recv = own + machine * block_bytes;
        DDP_TRY(ddp__mpi_flat(group, s, &part, per_machine, local));
        cpu->cast((unsigned char *)call->recv + first * element, call->dtype, part.recv, sum_dtype,
                  part.count);
    }
    return DDP_OK;
}

/* A sum by machine. Partial sums of 16-bit floats are f32. */
static ddp_result ddp__mpi_by_machine(ddp_group *group, ddp__mpi *s, const ddp_call *call) {
    const ddp_dtype sum_dtype = ddp_sum_dtype(call->dtype);
    const ddp_op sum_op = call->op == DDP_OP_AVG ? DDP_OP_SUM : call->op; /* the flat method divides */
    return call->kind == DDP_CALL_REDUCE_SCATTER
               ? ddp__mpi_reduce_scatter_by_machine(group, s, call, sum_dtype, sum_op)
               : ddp__mpi_reduce_by_machine(group, s, call, sum_dtype, sum_op);
}

/* Returns the MPI type for a sum that MPI computes, otherwise MPI_DATATYPE_NULL. MPI never computes MIN and
   MAX of floats, since NaN must win; sums of 16-bit floats; sums of bytes, since Open MPI's vector code
   saturates. A reduce_scatter is one exchange with either method. */
static MPI_Datatype ddp__mpi_native_sum_type(const ddp_group *group, const ddp_call *call) {
    static const MPI_Datatype none = MPI_DATATYPE_NULL,
                              types[] = {/* by ddp_dtype */
                                         none, MPI_FLOAT, MPI_DOUBLE,  none,        none,
                                         none, none,      MPI_INT32_T, MPI_INT64_T, MPI_UINT64_T};
    int keeps_nan = ddp_is_float(call->dtype) && (call->op == DDP_OP_MIN || call->op == DDP_OP_MAX);
    int reduces = call->kind == DDP_CALL_ALL_REDUCE || call->kind == DDP_CALL_REDUCE;
    return ddp_group_order(group) == DDP_ORDER_ANY && reduces && !keeps_nan ? types[call->dtype] : none;
}

/* Executes a call that MPI computes: a broadcast, or a sum in any order. */
static ddp_result ddp__mpi_native(ddp_group *group, ddp__mpi *s, const ddp_call *call, MPI_Datatype type) {
    static const MPI_Op ops[] = {MPI_SUM, MPI_SUM, MPI_MIN, MPI_MAX, MPI_PROD};
    MPI_Op op = ops[call->op];
    size_t element = ddp_dtype_size(call->dtype), max_count = DDP__MPI_PIECE_BYTES / element, count;
    int in_place = call->send == call->recv;
    int is_broadcast = call->kind == DDP_CALL_BROADCAST;
    int receives = call->kind == DDP_CALL_ALL_REDUCE || s->rank == call->root;
    for (size_t first = 0; first < call->count; first += count) {
        unsigned char *recv = (unsigned char *)call->recv + first * element;
        const void *send = MPI_IN_PLACE;
        if (!is_broadcast && !(in_place && receives))
            send = (const unsigned char *)call->send + first * element;
        count = call->count - first < max_count ? call->count - first : max_count;
        if (is_broadcast)
            DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Ibcast, recv, (int)(count * element), MPI_BYTE, call->root);
        else if (call->kind == DDP_CALL_ALL_REDUCE)
            DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Iallreduce, send, recv, (int)count, type, op);
        else
            DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Ireduce, send, receives ? recv : NULL, (int)count, type, op,
                                    call->root);
    }
    const ddp_tensor sums = {call->recv, call->dtype, 1, {(int64_t)call->count}};
    if (!is_broadcast && call->op == DDP_OP_AVG && receives)
        ddp_device_cpu()->divide(&sums, 1, call->divisor);
    return DDP_OK;
}
#endif /* DDP_USE_MPI */

//== the MPI backend: calls and messages ==================================================== >>impl-mpi-calls

/* Runs collectives, sends and receives. A collective begins with an MPI_Iallreduce that compares the calls of
   all ranks:

       every rank   MPI_Iallreduce(MAX)  hash of the call, its complement, method (one rank chooses it)
                    all hashes are equal: the transfer
                    otherwise:            MPI_Iallgather of the calls; the error line names two that differ

   The data of a message begins with dtype and count, so that the receiver can compare them. */

#if defined(DDP_USE_MPI)
/* Returns the tuner for the size of a sum: one for each factor of four, from 1 KiB. */
static ddp_tuner *ddp__mpi_tuner(ddp__mpi *s, const ddp_call *call) {
    int sum = DDP__MPI_ALL_REDUCE, size = 0;
    if (call->kind == DDP_CALL_REDUCE) sum = DDP__MPI_REDUCE;
    if (call->kind == DDP_CALL_REDUCE_SCATTER) sum = DDP__MPI_REDUCE_SCATTER;
    while (size < 15 && call->count * ddp_dtype_size(call->dtype) >> (2 * size + 10)) size++;
    return &s->tuner[sum][size];
}

/* Returns 1 on the rank that chooses the method of a sum: the root, which ends last, or rank 0. */
static int ddp__mpi_chooses_method(const ddp__mpi *s, const ddp_call *call) {
    int root = call->kind == DDP_CALL_REDUCE ? call->root : 0;
    return s->rank == root && s->ranks_per_machine > 1 && ddp_call_adds(call);
}

/* Compares the calls of all ranks: on DDP_OK they are the same. In an all_to_all_v each rank also compares
   the counts of its peers with its own. */
static ddp_result ddp__mpi_compare_calls(ddp_group *group, ddp__mpi *s, const ddp_call *call) {
    uint64_t *own_call = s->words, *own_max = s->words + 3, *max = s->words + 6,
             *all = (uint64_t *)(void *)s->scratch;
    int chooses = ddp__mpi_chooses_method(s, call), other = 1;
    ddp_call_pack(call, own_call);
    own_call[2] = own_max[0] = ddp_call_hash(call, s->world_size);
    own_max[1] = ~own_max[0]; /* its maximum is the minimum of hash[0] */
    own_max[2] = chooses ? (uint64_t)ddp_tuner_pick(ddp__mpi_tuner(s, call), DDP__MPI_METHODS) : 0;
    DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Iallreduce, own_max, max, 3, MPI_UINT64_T, MPI_MAX);
    s->method = s->ranks_per_machine > 1 ? (int)max[2] : DDP__MPI_FLAT;
    if (max[0] != own_max[0] || max[1] != own_max[1]) {
        DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Iallgather, own_call, 3, MPI_UINT64_T, all, 3, MPI_UINT64_T);
        while (other < s->world_size - 1 && all[2] == all[3 * other + 2]) other++;
        DDP_TRY(ddp_call_compare(0, all, other, all + 3 * other));
        return ddp_fail(DDP_ERR_MISMATCH, "counts disagree: recv_counts of rank 0 and rank %d differ", other);
    }
    if (!call->send_counts) return DDP_OK;
    size_t w = (size_t)s->world_size, rank = 0, *peer_counts = (size_t *)(void *)s->scratch,
           *counts = peer_counts + w;
    memcpy(counts, call->send_counts, w * sizeof *counts); /* after a failure MPI may still read them */
    DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Ialltoall, counts, sizeof *peer_counts, MPI_BYTE, peer_counts,
                            sizeof *peer_counts, MPI_BYTE);
    while (rank < w && peer_counts[rank] == call->recv_counts[rank]) rank++;
    if (rank == w) return DDP_OK;
    return ddp_fail(DDP_ERR_MISMATCH,
                    "counts disagree: rank %d sends %llu elements to rank %d, which expects %llu", (int)rank,
                    (unsigned long long)peer_counts[rank], s->rank,
                    (unsigned long long)call->recv_counts[rank]);
}

/* Executes a collective with the method that fits it. */
static ddp_result ddp__mpi_execute(ddp_group *group, ddp__mpi *s, const ddp_call *call) {
    MPI_Datatype type = ddp__mpi_native_sum_type(group, call);
    DDP_TRY(ddp_group_cause(s->local));
    DDP_TRY(ddp__mpi_compare_calls(group, s, call));
    if (call->count == 0 && !call->recv_counts) return DDP_OK; /* also a barrier */
    if (call->kind == DDP_CALL_BROADCAST || type != MPI_DATATYPE_NULL)
        return ddp__mpi_native(group, s, call, type);
    if (!ddp_call_adds(call)) return ddp__mpi_exchange(group, s, call);
    double start = ddp_now();
    DDP_TRY(s->method == DDP__MPI_FLAT ? ddp__mpi_flat(group, s, call, 1, 0)
                                       : ddp__mpi_by_machine(group, s, call));
    if (ddp__mpi_chooses_method(s, call))
        ddp_tuner_learn(ddp__mpi_tuner(s, call), s->method, ddp_now() - start);
    return DDP_OK;
}

static ddp_result ddp__mpi_run(ddp_group *group, void *state, const ddp_call *call) {
    ddp__mpi *s = (ddp__mpi *)state;
    for (int i = 0; i < DDP__CONTROL_KINDS; i++) s->control[i].seq = call->seq;
    s->call = *call;
    s->stride = 1;
    s->offset = 0;
    s->request_count = 0;
    ddp_result result = ddp__mpi_execute(group, s, call);
    if (result == DDP_OK) return DDP_OK;
    ddp__mpi_fail(s, result); /* the other ranks wait for this one */
    for (int i = 0; i < s->request_count && s->cancellable; i++)
        /* Cancelled, so that MPI no longer uses the caller's buffers. */
        if (s->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&s->requests[i]);
    return DDP_ERR_POISONED;
}

static ddp_result ddp__mpi_p2p_start(ddp_group *group, void *state, const ddp_call *call, void **out) {
    ddp__mpi *s = (ddp__mpi *)state;
    ddp__mpi_message *m = (ddp__mpi_message *)(*out = ddp_host_alloc(group, sizeof *m));
    const void *data = call->send ? call->send : call->recv;
    int tag = (int)(DDP__MPI_TAGS + (unsigned)call->tag); /* MPI checks its range */
    if (!m) return DDP_ERR_NO_MEMORY;
    m->call = *call;
    m->dtype = (uint64_t)call->dtype;
    m->count = call->count;
    ddp_result result = ddp__mpi_start_message(
        s, call->kind == DDP_CALL_SEND, m, 2 * sizeof(uint64_t), (MPI_Aint)((uintptr_t)data - (uintptr_t)m),
        call->count * ddp_dtype_size(call->dtype), call->root, tag, &m->request);
    if (result != DDP_OK) ddp_host_free(group, m);
    return result;
}

static ddp_result ddp__mpi_p2p_poll(ddp_group *group, void *state, void *request, int *done) {
    ddp__mpi *s = (ddp__mpi *)state;
    ddp__mpi_message *m = (ddp__mpi_message *)request;
    const ddp_call *call = &m->call;
    int error = MPI_Test(&m->request, done, MPI_STATUS_IGNORE), kind = error;
    if (error == MPI_SUCCESS && !*done) {
        if (ddp_p2p_waited(request) > ddp_group_timeout_ms(group) * 1e-3) {
            ddp__mpi_query_ranks(s, call->root, call->root, 1);
            ddp__mpi_fail_timed_out(group, s, call);
        }
        if (ddp__mpi_check_wait(group, s, ddp_now()) == DDP_OK) return DDP_OK;
        MPI_Cancel(&m->request);
        return DDP_ERR_POISONED;
    }
    int same = m->dtype == (uint64_t)call->dtype && m->count == call->count;
    if (error == MPI_SUCCESS && same) {
        ddp_host_free(group, m);
        return DDP_OK;
    }
    MPI_Error_class(error, &kind);
    if (kind != MPI_SUCCESS && kind != MPI_ERR_TRUNCATE)
        return ddp__mpi_fail(s, ddp__mpi_result(error, "MPI_Test"));
    ddp_fail(DDP_ERR_MISMATCH,
             "ranks made different calls: rank %d ddp_send %s count=%llu%s, rank %d ddp_recv "
             "%s count=%llu (tag %d)",
             call->root, ddp_dtype_name((ddp_dtype)m->dtype), (unsigned long long)m->count + (unsigned)same,
             same ? " or more" : "" /* truncated */, s->rank, ddp_dtype_name(call->dtype),
             (unsigned long long)call->count, call->tag);
    return ddp__mpi_fail(s, DDP_ERR_MISMATCH);
}
#endif /* DDP_USE_MPI */

//== the MPI backend: groups =============================================================== >>impl-mpi-groups

/* Opens, splits and closes groups over MPI communicators, and provides their group memory. The ranks of each
   machine connect in shared memory; the local group is s->local. */

#if defined(DDP_USE_MPI)
/* Group memory is memory of the local group, so that peers on this machine read it in place. */
static ddp_result ddp__mpi_alloc(ddp_group *group, void *state, size_t size_bytes, void **out) {
    (void)group;
    return ddp_group_alloc(((ddp__mpi *)state)->local, size_bytes, out);
}

static ddp_result ddp__mpi_free(ddp_group *group, void *state, void *memory) {
    (void)group;
    return ddp_group_free(((ddp__mpi *)state)->local, memory);
}

/* The communicator and the state stay until MPI ends: notices may still arrive. */
static void ddp__mpi_close(ddp_group *group, void *state) {
    ddp__mpi *s = (ddp__mpi *)state;
    ddp_result cause = ddp_group_cause(s->local);
    for (int r = 0; r < s->world_size && cause == DDP_OK; r++) ddp__mpi_send_control(s, r, DDP__CONTROL_LEFT);
    if (cause != DDP_OK) ddp__mpi_fail(s, cause);
    ddp_group_destroy(s->local);
    if (cause == DDP_OK) ddp_host_free(group, s->scratch);
}

/* Each rank sends these to all others when a group opens: its machine, a random number for the token of the
   local rendezvous, and its desc.order. */
enum { DDP__MPI_ID_MACHINE, DDP__MPI_ID_NONCE, DDP__MPI_ID_ORDER, DDP__MPI_ID_WORDS };

/* Divides the ranks by machine, into sets of at most DDP_MAX_LOCAL_RANKS. Sets machine_of and
   ranks_per_machine. Writes the ranks of this machine to `ranks`, and returns their number. */
static int ddp__mpi_group_by_machine(ddp__mpi *s, uint64_t (*ids)[DDP__MPI_ID_WORDS], int *ranks) {
    int count = 0, machines = 0;
    for (int r = 0; r < s->world_size; r++) {
        int earlier = 0, last = r;
        for (int q = 0; q < r; q++) {
            if (ids[q][DDP__MPI_ID_MACHINE] != ids[r][DDP__MPI_ID_MACHINE]) continue;
            earlier++;
            last = q;
        }
        s->machine_of[r] = earlier % DDP_MAX_LOCAL_RANKS ? s->machine_of[last] : (uint64_t)r;
        machines += s->machine_of[r] == (uint64_t)r;
    }
    int block = ddp_machine_block(s->machine_of, s->world_size);
    s->ranks_per_machine = block * machines == s->world_size ? block : 1;
    for (int r = 0; r < s->world_size; r++)
        if (s->machine_of[r] == s->machine_of[s->rank]) ranks[count++] = r;
    return count;
}

/* Connects the ranks of this machine, unless `local` is their group already. The result is DDP_OK on all
   ranks if the ranks of every machine have connected. */
static ddp_result ddp__mpi_connect(ddp_group *group, ddp__mpi *s, MPI_Comm comm, uint64_t machine,
                                   ddp_group *local) {
    uint64_t(*ids)[DDP__MPI_ID_WORDS] = (uint64_t(*)[DDP__MPI_ID_WORDS])(void *)s->scratch;
    int ranks[DDP_MAX_LOCAL_RANKS], count, timeout_ms = ddp_group_timeout_ms(group);
    char token[64];
    ddp_saved_error outcome = {DDP_OK, ""};
    DDP__MPI_TRY(MPI_Comm_idup, comm, &s->comm, &s->requests[s->request_count++]);
    DDP_TRY(ddp__mpi_wait(group, s));
    MPI_Comm_set_errhandler(s->comm, MPI_ERRORS_RETURN);
    s->local = local;
    s->words[DDP__MPI_ID_MACHINE] = machine;
    s->words[DDP__MPI_ID_NONCE] = ddp_unique_id();
    s->words[DDP__MPI_ID_ORDER] = (uint64_t)ddp_group_order(group);
    DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Iallgather, s->words, DDP__MPI_ID_WORDS, MPI_UINT64_T, ids,
                            DDP__MPI_ID_WORDS, MPI_UINT64_T);
    for (int r = 1; r < s->world_size; r++)
        if (ids[r][DDP__MPI_ID_ORDER] != ids[0][DDP__MPI_ID_ORDER])
            return ddp_fail(DDP_ERR_MISMATCH,
                            "rank %d and rank 0 have different desc.order; give every rank the same", r);
    count = ddp__mpi_group_by_machine(s, ids, ranks);
    snprintf(token, sizeof token, "mpi:%llx:%d", (unsigned long long)ids[ranks[0]][DDP__MPI_ID_NONCE],
             ranks[0]);
    /* A rank that waits in MPI times out first, and names the missing one. */
    if (count < s->world_size && timeout_ms < 1 << 30) timeout_ms += DDP__MPI_LOCAL_EXTRA_MS;
    if (!local)
        ddp_error_save(&outcome, ddp_group_create_local(&s->local, group, token, ranks, count, timeout_ms));
    if (s->local) {
        ddp_group_part_of(s->local, group, ranks);
        DDP_TRY(ddp_group_cause(s->local));
    }
    s->words[0] = outcome.result == DDP_OK;
    DDP__MPI_TRY_COLLECTIVE(group, s, MPI_Iallreduce, MPI_IN_PLACE, s->words, 1, MPI_UINT64_T, MPI_MIN);
    DDP_TRY(ddp_error_restore(&outcome));
    if (!s->words[0])
        return ddp_fail(
            DDP_ERR_SYSTEM,
            "the ranks of another machine could not allocate shared memory; see the error of those ranks");
    ddp_group_set_local(group, ddp_rank(s->local), count);
    return DDP_OK;
}

/* s NULL: does nothing. */
static void ddp__mpi_state_free(ddp_group *group, ddp__mpi *s) {
    if (s) ddp_host_free(group, s->scratch);
    ddp_host_free(group, s);
}

/* Allocates everything that this rank needs for a group over MPI. Without memory it returns NULL and sets the
   error line. */
static ddp__mpi *ddp__mpi_state_alloc(ddp_group *group) {
    size_t w = (size_t)ddp_world_size(group), room = DDP__MPI_CHUNK_BYTES / w / 64 * 64;
    ddp__mpi *s = (ddp__mpi *)ddp_host_alloc(
        group, sizeof *s + w * (4 * sizeof(MPI_Request) + sizeof(uint64_t) + 1));
    if (!s) return NULL;
    s->rank_chunk_bytes = room < 16384 ? 16384 : room;
    s->scratch = (unsigned char *)ddp_host_alloc(group, w * (3 * s->rank_chunk_bytes + sizeof(void *)));
    if (!s->scratch) {
        ddp__mpi_state_free(group, s);
        return NULL;
    }
    s->machine_sums = s->scratch + w * (2 * s->rank_chunk_bytes + sizeof(void *));
    s->requests = (MPI_Request *)(void *)(s + 1);
    s->machine_of = (uint64_t *)(void *)(s->requests + 4 * w);
    s->rank_state = (unsigned char *)(s->machine_of + w);
    s->rank = ddp_rank(group);
    s->world_size = ddp_world_size(group);
    s->stride = 1;
    s->departed_after = UINT64_MAX;
    return s;
}

/* Opens a group over a communicator. local: a group of the ranks of this machine, which the new group owns
   from here on; NULL = creates one. machine: the same number on all ranks of a machine. */
static ddp_result ddp__mpi_open_on(ddp_group *group, ddp__mpi *s, MPI_Comm comm, uint64_t machine,
                                   ddp_group *local, void **state) {
    int level;
    ddp_result result = ddp__mpi_connect(group, s, comm, machine, local);
    if (result != DDP_OK) {
        ddp__mpi_fail(s, ddp_fail_in(result, "ddp_group_create", group, "%s", ddp_last_error()));
        if (s->local)
            ddp__mpi_close(group, s);
        else
            ddp_group_destroy(local);
        return result;
    }
    if (ddp_world_size(s->local) == s->world_size) { /* one machine: the group becomes the local one */
        *state = ddp_group_take_over(group, s->local);
        MPI_Comm_free(&s->comm);
        ddp__mpi_state_free(group, s);
        return DDP_OK;
    }
    MPI_Query_thread(&level);
    s->one_thread = level < MPI_THREAD_MULTIPLE;
    if (s->one_thread) ddp_group_no_thread(group);
    ddp_group_on_wait(s->local, ddp__mpi_receive_control, s);
    *state = s;
    return DDP_OK;
}

/* backend_user: the communicator. */
static ddp_result ddp__mpi_open(ddp_group *group, void **state) {
    ddp__mpi *s = ddp__mpi_state_alloc(group);
    if (!s) return DDP_ERR_NO_MEMORY;
    __atomic_fetch_add(&ddp__mpi_open_worlds, 1u, __ATOMIC_SEQ_CST);
    return ddp__mpi_open_on(group, s, *(MPI_Comm *)ddp_group_backend_user(group), ddp_machine_id(), NULL,
                            state);
}

static ddp_result ddp__mpi_split(ddp_group *parent, void *state, ddp_group *child, const int *members,
                                 int member_count, void **child_state) {
    ddp__mpi *s = (ddp__mpi *)state;
    ddp_group *child_local = NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    int color = child ? members[0] : -1;
    int key = child ? ddp_rank(child) : 0;
    ddp_result result = ddp_group_split(s->local, color, key, &child_local);
    ddp__mpi *child_mpi = child && result == DDP_OK ? ddp__mpi_state_alloc(child) : NULL;
    /* The error line is that of the allocation. */
    if (result == DDP_OK && member_count && !child_mpi) result = DDP_ERR_NO_MEMORY;
    result = ddp_agree(parent, "ddp_group_split", result, 0, "");
    /* MPI_Comm_split blocks: all ranks call it, or none. */
    if (result == DDP_OK)
        result = ddp__mpi_result(MPI_Comm_split(s->comm, child ? color : MPI_UNDEFINED, key, &comm),
                                 "MPI_Comm_split");
    if (result != DDP_OK) {
        ddp__mpi_state_free(child, child_mpi);
        ddp_group_destroy(child_local);
    }
    if (result != DDP_OK || !child) return result;
    DDP_TRY(ddp__mpi_open_on(child, child_mpi, comm, s->machine_of[s->rank], child_local, child_state));
    MPI_Comm_free(&comm);
    return DDP_OK;
}

static const ddp_backend ddp__backend_mpi = {
    "mpi",
    ddp__mpi_open,
    ddp__mpi_run,
    ddp__mpi_p2p_start,
    ddp__mpi_p2p_poll,
    NULL, /* p2p_sleep */
    ddp__mpi_split,
    ddp__mpi_alloc,
    ddp__mpi_free,
    ddp__mpi_status,
    ddp__mpi_poison_from_any_thread,
    ddp__mpi_close,
    0, /* enqueues */
    DDP_ORDER_TREE,
    NULL, /* p2p_batch */
    NULL, /* peer */
    NULL, /* signal */
    NULL, /* wait_signal */
    NULL, /* p2p_wake */
};

/* Runs at exit, if the first group initialised MPI. */
static void ddp__mpi_finalize_at_exit(void) {
    int is_finalized = 0;
    MPI_Finalized(&is_finalized);
    if (!is_finalized && __atomic_load_n(&ddp__mpi_open_worlds, __ATOMIC_ACQUIRE) == 0) MPI_Finalize();
}

static void ddp__mpi_world_destroyed(ddp_group *group) {
    if (ddp_group_cause(group) == DDP_OK) __atomic_fetch_sub(&ddp__mpi_open_worlds, 1u, __ATOMIC_SEQ_CST);
}

/* Creates a group of the ranks of comm. desc: rank and world_size are those that a launcher or the caller
   expects; 0 = none. starts: 1 = initialises MPI if the program has not. */
static ddp_result ddp__mpi_create_world(const char *who, ddp_group **out, const ddp_group_desc *desc,
                                        MPI_Comm comm, int may_initialize) {
    ddp_group_desc d = *desc;
    int is_initialized = 0, is_finalized = 0, is_intercommunicator = 0, level;
    MPI_Initialized(&is_initialized);
    MPI_Finalized(&is_finalized);
    DDP_CHECK(who, NULL, !is_finalized,
              "MPI is finalized and cannot be initialized again; call MPI_Finalize after the last group");
    DDP_CHECK(who, NULL, is_initialized || may_initialize, "MPI is not initialized; call MPI_Init first");
    if (!is_initialized) {
        DDP__MPI_TRY(MPI_Init_thread, NULL, NULL, MPI_THREAD_MULTIPLE, &level);
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        atexit(ddp__mpi_finalize_at_exit);
    }
    DDP__MPI_TRY(MPI_Comm_test_inter, comm, &is_intercommunicator);
    DDP_CHECK(who, NULL, !is_intercommunicator,
              "comm is an intercommunicator; call MPI_Intercomm_merge first");
    DDP__MPI_TRY(MPI_Comm_rank, comm, &d.rank);
    DDP__MPI_TRY(MPI_Comm_size, comm, &d.world_size);
    DDP_CHECK(who, NULL, desc->world_size <= 0 || (desc->rank == d.rank && desc->world_size == d.world_size),
              "rank=%d world_size=%d by the launcher or desc, but rank=%d world_size=%d in MPI; start with "
              "the mpirun of the MPI that the program was built with",
              desc->rank, desc->world_size, d.rank, d.world_size);
    d.init_method = "mpi://";
    d.backend = &ddp__backend_mpi;
    d.backend_user = &comm;
    DDP_TRY(ddp_group_create(out, &d));
    ddp_group_on_destroy(*out, ddp__mpi_world_destroyed);
    return DDP_OK;
}

DDPDEF ddp_result ddp_group_create_mpi(ddp_group **out, const ddp_group_desc *desc) {
    return ddp__mpi_create_world("ddp_group_create", out, desc, MPI_COMM_WORLD, 1);
}

DDPDEF ddp_result ddp_group_from_mpi(ddp_group **out, MPI_Comm comm, const ddp_group_desc *desc) {
    DDP_PUBLIC_CALL(ddp_group_from_mpi);
    ddp_group_desc d = DDP_ZERO;
    if (out) *out = NULL;
    DDP_CHECK(__func__, NULL, out, "out is NULL");
    DDP_CHECK(__func__, NULL, comm != MPI_COMM_NULL, "comm is MPI_COMM_NULL");
    if (desc) d = *desc;
    d.world_size = 0;
    return ddp__mpi_create_world(__func__, out, &d, comm, 0);
}
#endif /* DDP_USE_MPI */

//== meshes ====================================================================================== >>impl-mesh

/* A mesh arranges the ranks of a world as a grid. Along each dimension every rank has a group of the ranks
   that differ from it only in that dimension. The last dimension varies fastest.

       dp=2 tp=3      tp 0 1 2      rank 4 (dp 1, tp 1): group "tp" = ranks 3 4 5
             dp 0        0 1 2                           group "dp" = ranks 1 4
             dp 1        3 4 5                                                       */

enum { DDP__MESH_NAME_MAX = 16 };
struct ddp_mesh {
    ddp_group *world, *group[DDP_MAX_NDIM];
    int ndim, shape[DDP_MAX_NDIM];
    char name[DDP_MAX_NDIM][DDP__MESH_NAME_MAX];
    char text[256]; /* "pp=2 dp=2 tp=2" */
};

static int ddp__mesh_dim(const ddp_mesh *mesh, const char *name) {
    int i = 0;
    while (i < mesh->ndim && strcmp(mesh->name[i], name) != 0) i++;
    return i;
}

/* Checks a desc and fills in the mesh. A dimension of 0 (inferred) gets the number of ranks that is left. */
static ddp_result ddp__mesh_resolve(ddp_mesh *mesh, const char *call_name, const ddp_mesh_desc *desc) {
    long long ranks = 1, world_size = mesh->world->world_size;
    int inferred = -1;
    DDP_CHECK(call_name, mesh->world, desc->ndim >= 1 && desc->ndim <= DDP_MAX_NDIM, "ndim=%d; use 1 to %d",
              desc->ndim, DDP_MAX_NDIM);
    for (int i = 0; i < desc->ndim; i++) {
        const char *name = desc->names[i] ? desc->names[i] : "";
        DDP_CHECK(call_name, mesh->world, *name && strlen(name) < DDP__MESH_NAME_MAX && !strpbrk(name, " ="),
                  "names[%d] is \"%.32s\"; use names of 1 to %d bytes without blanks or =", i, name,
                  DDP__MESH_NAME_MAX - 1);
        DDP_CHECK(call_name, mesh->world, ddp__mesh_dim(mesh, name) == mesh->ndim,
                  "two dimensions have the name \"%s\"; give each its own name", name);
        DDP_CHECK(call_name, mesh->world, desc->shape[i] > 0 || (desc->shape[i] == 0 && inferred < 0),
                  "shape[%d]=%d; use 1 or more, or 0 in at most one dimension for the remaining ranks", i,
                  desc->shape[i]);
        if (desc->shape[i] == 0)
            inferred = i;
        else
            ranks = ranks > INT32_MAX ? ranks : ranks * desc->shape[i];
        mesh->shape[i] = desc->shape[i];
        snprintf(mesh->name[i], sizeof mesh->name[i], "%s", name);
        mesh->ndim = i + 1;
    }
    if (inferred >= 0 && world_size % ranks == 0) {
        mesh->shape[inferred] = (int)(world_size / ranks);
        ranks = world_size;
    }
    for (int i = 0; i < mesh->ndim; i++) {
        size_t used = strlen(mesh->text);
        snprintf(mesh->text + used, sizeof mesh->text - used, "%s%s=%d", i ? " " : "", mesh->name[i],
                 mesh->shape[i]);
    }
    DDP_CHECK(call_name, mesh->world, inferred < 0 || ranks == world_size,
              "mesh %s is invalid: %lld ranks do not divide world_size=%lld", mesh->text, ranks, world_size);
    DDP_CHECK(call_name, mesh->world, ranks == world_size, "mesh %s has %lld ranks, but the world has %lld",
              mesh->text, ranks, world_size);
    return DDP_OK;
}

DDPDEF ddp_result ddp_mesh_create(ddp_mesh **out, ddp_group *world, const ddp_mesh_desc *desc) {
    DDP_PUBLIC_CALL(ddp_mesh_create);
    int stride = 1;
    if (out) *out = NULL;
    DDP__NEED(out && world, "out or world is NULL");
    ddp_mesh *mesh = (ddp_mesh *)ddp_host_alloc(world, sizeof *mesh);
    ddp_result result = mesh ? DDP_OK : DDP_ERR_NO_MEMORY;
    if (mesh) {
        mesh->world = world;
        result = desc ? ddp__mesh_resolve(mesh, __func__, desc) : ddp__bad(__func__, world, "desc is NULL");
    }
    const char *text = mesh ? mesh->text : "";
    result = ddp_agree(world, __func__, result, ddp_hash(DDP_HASH_SEED, text, strlen(text)), text);
    for (int i = mesh ? mesh->ndim - 1 : -1; i >= 0 && result == DDP_OK; i--) {
        int coordinate = world->rank / stride % mesh->shape[i];
        result = ddp_group_split(world, world->rank - coordinate * stride, coordinate, &mesh->group[i]);
        if (result == DDP_OK)
            snprintf(mesh->group[i]->name, sizeof mesh->group[i]->name, "%.14s.%s", world->name,
                     mesh->name[i]);
        stride *= mesh->shape[i];
    }
    if (result == DDP_OK)
        *out = mesh;
    else
        ddp_mesh_destroy(mesh);
    return result;
}

DDPDEF ddp_group *ddp_mesh_group(ddp_mesh *mesh, const char *name) {
    int i = mesh && name ? ddp__mesh_dim(mesh, name) : -1;
    if (i >= 0 && i < mesh->ndim) return mesh->group[i];
    if (i < 0)
        ddp_fail(DDP_ERR_INVALID, "ddp_mesh_group: mesh or name is NULL");
    else
        ddp_fail(DDP_ERR_INVALID, "ddp_mesh_group: name \"%.32s\" is not a dimension of mesh %s", name,
                 mesh->text);
    return NULL;
}

DDPDEF void ddp_mesh_destroy(ddp_mesh *mesh) {
    DDP_PUBLIC_CALL(ddp_mesh_destroy);
    for (int i = 0; mesh && i < mesh->ndim; i++) ddp_group_destroy(mesh->group[i]);
    if (mesh) ddp_host_free(mesh->world, mesh);
}

//== cores and thread pools ===================================================================== >>impl-cores

/* Divides the cores of this machine among the ranks that ddp_launch starts. Each rank is bound to its share.
   Numerical libraries (OpenMP, OpenBLAS, MKL, BLIS) would start one thread per core in every rank. Their
   thread pools are limited to the share of a rank. desc.no_affinity switches all of this off. */

/* The libraries read their variables when they are loaded, before ranks are forked. Therefore the number of
   threads is also set by their own functions. The references are weak: a program does not need to link any of
   these libraries. The names here are private, because the program may declare the real ones differently. */
extern void ddp__omp_set(int threads) __asm__("omp_set_num_threads") __attribute__((weak));
extern int ddp__omp_get(void) __asm__("omp_get_max_threads") __attribute__((weak));
extern void ddp__openblas_set(int threads) __asm__("openblas_set_num_threads") __attribute__((weak));
extern int ddp__openblas_get(void) __asm__("openblas_get_num_threads") __attribute__((weak));
extern void ddp__mkl_set(int threads) __asm__("MKL_Set_Num_Threads") __attribute__((weak));
extern int ddp__mkl_get(void) __asm__("MKL_Get_Max_Threads") __attribute__((weak));
extern void ddp__blis_set_i64(int64_t threads) __asm__("bli_thread_set_num_threads") __attribute__((weak));
extern int64_t ddp__blis_get_i64(void) __asm__("bli_thread_get_num_threads") __attribute__((weak));
static void ddp__blis_set(int threads) {
    if (ddp__blis_set_i64) ddp__blis_set_i64(threads);
}
static int ddp__blis_get(void) { return ddp__blis_get_i64 ? (int)ddp__blis_get_i64() : 0; }

enum { DDP__POOL_OMP, DDP__POOLS = 4 };
static const struct ddp__thread_pool {
    void (*set)(int threads);
    int (*get)(void);
    const char *variables[3]; /* if one is set, the pool is the user's */
} ddp__thread_pools[DDP__POOLS] = {
    {ddp__omp_set, ddp__omp_get, {"OMP_NUM_THREADS", NULL, NULL}},
    {ddp__openblas_set, ddp__openblas_get, {"OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"}},
    {ddp__mkl_set, ddp__mkl_get, {"MKL_NUM_THREADS", "OMP_NUM_THREADS", NULL}},
    {ddp__blis_set, ddp__blis_get, {"BLIS_NUM_THREADS", "OMP_NUM_THREADS", NULL}},
};

typedef struct ddp__core_plan {
    ddp__cpus cpus; /* the caller's */
    int cores, world_size;
    int disabled;                 /* desc.no_affinity */
    int threads_per_rank;         /* of each pool: one per core over all ranks */
    int pool_threads[DDP__POOLS]; /* of each pool before the launch; 0 = unchanged */
    int limits_omp;               /* 1 = rank threads lower their own number of OpenMP threads */
} ddp__core_plan;

/* Binds a rank to its contiguous share of the cores. With more ranks than cores it leaves this to the
   scheduler. */
static void ddp__bind_cores(const ddp__core_plan *plan, int rank) {
    ddp__cpus own = DDP_ZERO;
    int first = rank * plan->cores / plan->world_size, end = (rank + 1) * plan->cores / plan->world_size;
    int seen = 0;
    if (plan->disabled || plan->world_size > plan->cores) return;
    for (int cpu = 0; cpu < DDP__CPU_WORDS * DDP__CPU_BITS; cpu++) {
        unsigned long bit = plan->cpus.word[cpu / DDP__CPU_BITS] & 1ul << cpu % DDP__CPU_BITS;
        if (bit && seen >= first && seen < end) own.word[cpu / DDP__CPU_BITS] |= bit;
        seen += bit != 0;
    }
    syscall(SYS_sched_setaffinity, 0, sizeof own, &own);
}

static const char *const ddp__thread_variables[2] = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"};

static int ddp__pool_is_set_by_user(const struct ddp__thread_pool *pool) {
    for (int i = 0; i < 3 && pool->variables[i]; i++)
        if (*ddp__env_text(pool->variables[i])) return 1;
    return 0;
}

/* Limits each pool to the threads of a rank, before ranks are forked: a query in a rank would make OpenBLAS
   start its whole pool there. A smaller number is kept. */
static void ddp__limit_pools(ddp__core_plan *plan) {
    plan->limits_omp = !plan->disabled && !ddp__pool_is_set_by_user(&ddp__thread_pools[DDP__POOL_OMP]);
    for (int i = 0; i < DDP__POOLS; i++) {
        const struct ddp__thread_pool *pool = &ddp__thread_pools[i];
        int threads = 0;
        if (!plan->disabled && pool->set && pool->get && !ddp__pool_is_set_by_user(pool))
            threads = pool->get();
        plan->pool_threads[i] = threads > plan->threads_per_rank ? threads : 0;
        if (plan->pool_threads[i]) pool->set(plan->threads_per_rank);
    }
}

/* Sets OpenMP last: if OpenBLAS uses OpenMP, setting its pool sets both. */
static void ddp__restore_pools(const ddp__core_plan *plan) {
    for (int i = DDP__POOLS - 1; i >= 0; i--)
        if (plan->pool_threads[i]) ddp__thread_pools[i].set(plan->pool_threads[i]);
}

/* For a rank that is a thread. OpenMP has its own number of threads for each thread of the program. A new
   thread begins with the number of the whole process. */
static void ddp__limit_omp_of_this_thread(const ddp__core_plan *plan) {
    if (plan->limits_omp && ddp__omp_set && ddp__omp_get && ddp__omp_get() > plan->threads_per_rank)
        ddp__omp_set(plan->threads_per_rank);
}

/* Sets the variables for libraries and programs that are loaded later. Returns a bit for each one that it
   set. */
static int ddp__set_thread_variables(const ddp__core_plan *plan) {
    int set = 0;
    char text[16];
    snprintf(text, sizeof text, "%d", plan->threads_per_rank);
    for (int i = 0; i < 2 && !plan->disabled; i++)
        if (!getenv(ddp__thread_variables[i]) && setenv(ddp__thread_variables[i], text, 0) == 0)
            set |= 1 << i;
    return set;
}

static void ddp__unset_thread_variables(int set) {
    for (int i = 0; i < 2; i++)
        if (set >> i & 1) unsetenv(ddp__thread_variables[i]);
}

//== launch ==================================================================================== >>impl-launch

/* ddp_launch starts the ranks of a world as processes or threads of this machine, waits for them, and returns
   the first failure. Inside another launch, or under a launcher, it joins that world. */

typedef struct ddp__launch {
    ddp_launch_desc desc; /* resolved */
    ddp__heap *heap;
    ddp_rank_fn fn;
    void *user;
    int attempt;
    int interrupted; /* by SIGINT or SIGTERM */
    ddp__core_plan plan;
} ddp__launch;

/* Records the failure of a rank, and sets this thread's error line. ddp_launch reports the first failure. */
#define DDP__LAUNCH_FAIL(launch, rank, result, text, ...) \
    ddp__record_failure(                                  \
        launch, rank,                                     \
        ddp_fail(result, "ddp_launch: rank %d/%d " text, rank, (launch)->desc.world_size, __VA_ARGS__))

/* Stores the rank, unless another one was first. */
static void ddp__store_first(uint32_t *rank_plus_1, int rank) {
    uint32_t none = 0;
    __atomic_compare_exchange_n(rank_plus_1, &none, (uint32_t)rank + 1, 0, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
}

static void ddp__record_failure(const ddp__launch *launch, int rank, ddp_result result) {
    ddp__job *job = launch->heap->job;
    snprintf(job->rank[rank].text, DDP__TEXT_MAX, "%s", ddp_last_error());
    job->rank[rank].result = (int32_t)result;
    ddp__store_first(&job->failed_rank_plus_1, rank);
    if (result != DDP_ERR_POISONED) ddp__store_first(&job->cause_rank_plus_1, rank);
}

typedef struct ddp__rank_thread {
    ddp__launch *launch;
    int rank, started;
    pthread_t thread;
} ddp__rank_thread;

/* Runs one rank from start to end. An exception of fn terminates the program here: if it propagated, a forked
   rank would continue in the code of its parent. */
static ddp_result ddp__run_rank(ddp__launch *launch, int rank) DDP__NOEXCEPT {
    const ddp_launch_desc *desc = &launch->desc;
    const int world_size = desc->world_size, local_rank = rank; /* all ranks are on this machine */
    const int device = desc->devices ? desc->devices[local_rank] + 1 : 0;
    const ddp__identity saved_identity = ddp__launch_identity;
    const ddp__identity here = {rank,         world_size, local_rank, world_size, device, launch->attempt,
                                launch->heap, NULL,       "",         NULL};
    /* world: the group that peers and the launcher see. on_backend: the same ranks, on the desc's backend. */
    ddp_group *world = NULL, *on_backend = NULL;
    ddp__error_text[0] = 0;
    ddp__bind_cores(&launch->plan, rank);
    ddp__rank_register(launch->heap, rank, (int)getpid());
    ddp__launch_identity = here;
    ddp_result result = ddp__group_open(&world, &desc->group, &ddp__backend_local, &here, NULL);
    ddp__launch_identity.world = world;
    if (result == DDP_OK && desc->group.backend)
        result = ddp_group_create_on(&on_backend, world, &desc->group);
    if (result == DDP_OK) result = launch->fn(on_backend ? on_backend : world, launch->user);
    ddp__launch_identity = saved_identity;
    if (result != DDP_OK && !ddp_last_error()[0])
        DDP__LAUNCH_FAIL(launch, rank, result, "returned %s", ddp_result_name(result));
    else if (result != DDP_OK)
        ddp__record_failure(launch, rank, result);
    ddp_group_destroy(on_backend);
    if (world)
        ddp_group_destroy(world); /* sets the state to DDP__RANK_LEFT */
    else
        ddp__store(&launch->heap->job->rank[rank].state, (uint32_t)DDP__RANK_LEFT);
    return result;
}

/* --- ranks as processes --- */

static pid_t ddp__fork_rank(ddp__launch *launch, int rank, const sigset_t *mask) {
    pid_t parent = getpid(), pid = fork();
    ddp_result result = DDP_ERR_SYSTEM;
    if (pid != 0) return pid;
    pthread_sigmask(SIG_SETMASK, mask, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent) { /* otherwise the parent died before the line above */
        ddp__set_thread_variables(&launch->plan);
        result = ddp__run_rank(launch, rank);
    }
    fflush(NULL);
    _exit(result == DDP_OK ? 0 : 1);
}

/* Records how a child process ended. A rank that failed has recorded this itself, unless it ended too
   early. */
static void ddp__record_exit(ddp__launch *launch, int rank, int status) {
    ddp__job_rank *r = &launch->heap->job->rank[rank];
    int signal_number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (ddp__load(&r->state) == DDP__RANK_LEFT && !signal_number) return;
    r->signal_number = signal_number;
    r->exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    if (signal_number)
        DDP__LAUNCH_FAIL(launch, rank, DDP_ERR_PEER_LOST, "(pid %d) was killed by signal %d", r->pid,
                         signal_number);
    else
        DDP__LAUNCH_FAIL(launch, rank, DDP_ERR_PEER_LOST,
                         "(pid %d) exited with status %d before its function returned", r->pid,
                         r->exit_status);
    ddp__store(&r->state, (uint32_t)DDP__RANK_LOST);
}

static void ddp__signal_ranks(const pid_t *pids, int count, int signal_number) {
    for (int r = 0; r < count; r++)
        if (pids[r] > 0) kill(pids[r], signal_number);
}

/* Watches the children until the last one has ended. SIGINT, SIGTERM and SIGCHLD are blocked and received
   here. */
static void ddp__watch_ranks(ddp__launch *launch, pid_t *pids, const sigset_t *signals) {
    double deadline = 0; /* 0 = none: nothing has failed yet */
    const struct timespec slice = {0, 20000000};
    for (int alive = 1, world_size = launch->desc.world_size; alive;) {
        int signal_number = sigtimedwait(signals, NULL, &slice);
        if (signal_number == SIGINT || signal_number == SIGTERM) {
            launch->interrupted = 1;
            ddp__signal_ranks(pids, world_size, signal_number);
        }
        alive = 0;
        for (int r = 0; r < world_size; r++) {
            int status = 0;
            if (pids[r] > 0 && waitpid(pids[r], &status, WNOHANG) != 0) {
                ddp__record_exit(launch, r, status);
                pids[r] = 0;
            }
            alive |= pids[r] > 0;
        }
        if (deadline == 0 && (launch->interrupted || ddp__load(&launch->heap->job->failed_rank_plus_1)))
            deadline = ddp_now() + launch->desc.group.timeout_ms * 1e-3;
        if (deadline != 0 && ddp_now() > deadline) ddp__signal_ranks(pids, world_size, SIGKILL);
    }
}

static void ddp__launch_processes(ddp__launch *launch) {
    static const int handled[] = {SIGINT, SIGTERM, SIGCHLD};
    pid_t pids[DDP_MAX_LOCAL_RANKS] = DDP_ZERO;
    sigset_t signals, old_mask;
    sigemptyset(&signals);
    for (int i = 0; i < 3; i++) sigaddset(&signals, handled[i]);
    pthread_sigmask(SIG_BLOCK, &signals, &old_mask);
    fflush(NULL);
    for (int r = 0; r < launch->desc.world_size; r++) {
        pids[r] = ddp__fork_rank(launch, r, &old_mask);
        if (pids[r] >= 0) continue;
        DDP__LAUNCH_FAIL(launch, r, DDP_ERR_SYSTEM, "could not be forked: %s", strerror(errno));
        ddp__signal_ranks(pids, r, SIGKILL);
        break;
    }
    ddp__watch_ranks(launch, pids, &signals);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
}

/* --- ranks as threads --- */

static void *ddp__rank_thread_main(void *argument) {
    ddp__rank_thread *t = (ddp__rank_thread *)argument;
    ddp__launch *launch = t->launch;
    prctl(PR_SET_NAME, "ddp-rank");
    ddp__limit_omp_of_this_thread(&launch->plan);
    ddp__run_rank(launch, t->rank);
    return NULL;
}

static void ddp__launch_threads(ddp__launch *launch) {
    ddp__rank_thread threads[DDP_MAX_LOCAL_RANKS];
    int variables = ddp__set_thread_variables(&launch->plan), world_size = launch->desc.world_size;
    for (int r = 0; r < world_size; r++) {
        ddp__rank_thread *t = &threads[r];
        t->launch = launch;
        t->rank = r;
        int error = pthread_create(&t->thread, NULL, ddp__rank_thread_main, t);
        t->started = error == 0;
        if (!error) continue;
        DDP__LAUNCH_FAIL(launch, r, DDP_ERR_SYSTEM, "could not be started as a thread: %s", strerror(error));
        ddp__store(&launch->heap->job->rank[r].state, (uint32_t)DDP__RANK_LEFT);
    }
    for (int r = 0; r < world_size; r++)
        if (threads[r].started) pthread_join(threads[r].thread, NULL);
    ddp__unset_thread_variables(variables);
}

/* All ranks have ended: returns the failure to report, see ddp_launch. */
static ddp_result ddp__launch_result(const ddp__job *job) {
    uint32_t failed = ddp__load(&job->cause_rank_plus_1);
    if (!failed) failed = ddp__load(&job->failed_rank_plus_1);
    if (!failed) return DDP_OK;
    return ddp_fail((ddp_result)job->rank[failed - 1].result, "%s", job->rank[failed - 1].text);
}

/* Runs one attempt, with its own heap. */
static ddp_result ddp__launch_attempt(ddp__launch *launch) {
    int threads = launch->desc.mode == DDP_LAUNCH_THREADS, world_size = launch->desc.world_size;
    DDP_TRY(ddp__heap_create(&launch->heap, world_size, threads, 1));
    const ddp__job *job = launch->heap->job;
    launch->plan.cores = (int)job->cores;
    launch->plan.world_size = world_size;
    launch->plan.disabled = launch->desc.no_affinity;
    launch->plan.threads_per_rank = launch->plan.cores > world_size ? launch->plan.cores / world_size : 1;
    ddp__limit_pools(&launch->plan);
    if (threads)
        ddp__launch_threads(launch);
    else
        ddp__launch_processes(launch);
    ddp__restore_pools(&launch->plan);
    ddp_result result = ddp__launch_result(job);
    ddp__heap_release(launch->heap);
    return result;
}

/* Runs fn as a rank of the world that a launcher, or an enclosing ddp_launch, has started. */
static ddp_result ddp__launch_join(const ddp__launch *launch) {
    const ddp_launch_desc *desc = &launch->desc;
    ddp_group *world;
    ddp_saved_error outcome = {DDP_OK, ""};
    const ddp__identity saved_identity = ddp__launch_identity;
    DDP_TRY(ddp_group_create(&world, &desc->group));
    if (desc->devices && desc->device_count < world->local_world_size) {
        ddp_error_save(&outcome, ddp__bad("ddp_launch", world,
                                          "device_count=%d with %d ranks on this machine; list one device "
                                          "for each of them",
                                          desc->device_count, world->local_world_size));
    } else {
        ddp__launch_identity.world_size = world->world_size;
        if (desc->devices) ddp__launch_identity.device_plus_1 = desc->devices[world->local_rank] + 1;
        world->device_index = ddp__launch_identity.device_plus_1 - 1;
        ddp_error_save(&outcome, launch->fn(world, launch->user));
        ddp__launch_identity = saved_identity;
    }
    ddp_group_destroy(world);
    return ddp_error_restore(&outcome);
}

DDPDEF ddp_result ddp_launch(const ddp_launch_desc *desc, ddp_rank_fn fn, void *user) {
    ddp__launch launch = DDP_ZERO;
    ddp_launch_desc *d = &launch.desc;
    ddp__identity id;
    ddp_result result = DDP_OK;
    int cores = ddp__usable_cores(&launch.plan.cpus), wanted = desc ? desc->world_size : 0;
    int outer = ddp__launch_identity.world_size; /* of the enclosing ddp_launch; 0 = none */
    if (desc) *d = *desc;
    launch.fn = fn;
    launch.user = user;
    DDP__NEED(fn, "fn is NULL");
    DDP__NEED(d->world_size >= 0 && d->world_size <= DDP_MAX_LOCAL_RANKS,
              "world_size=%d; use 1 to %d, or 0 for one rank per core", d->world_size, DDP_MAX_LOCAL_RANKS);
    DDP__NEED((unsigned)d->mode <= DDP_LAUNCH_THREADS, "mode=%d is not a ddp_launch_mode", (int)d->mode);
    DDP__NEED(d->max_restarts >= 0, "max_restarts=%d is negative; use 0 or more", d->max_restarts);
    DDP__NEED(d->device_count == 0 || (d->device_count > 0 && d->devices),
              "device_count=%d, but devices is NULL; set both, or neither", d->device_count);
    if (d->world_size == 0) d->world_size = cores < DDP_MAX_LOCAL_RANKS ? cores : DDP_MAX_LOCAL_RANKS;
    d->group.init_method = NULL;
    d->group.rank = d->group.world_size = 0;
    DDP_TRY(ddp__group_desc_resolve(__func__, &d->group, &d->group));
    DDP_TRY(ddp__identity_resolve(&id, &d->group, DDP__SCHEME_ENV));
    DDP_TRY(ddp__check_world_size(__func__, &id, wanted));
    DDP__NEED(!outer || !wanted || wanted == outer,
              "desc.world_size=%d inside a ddp_launch of %d ranks; set desc.world_size to 0 to join them",
              wanted, outer);
    int restarts = d->max_restarts > 0 && d->mode == DDP_LAUNCH_PROCESSES;
    if (outer || id.size_variable || (d->world_size == 1 && !restarts)) return ddp__launch_join(&launch);
    DDP__NEED(!d->devices || d->device_count >= d->world_size,
              "device_count=%d with world_size=%d; list one device for each rank", d->device_count,
              d->world_size);
    for (; launch.attempt <= d->max_restarts; launch.attempt++) {
        result = ddp__launch_attempt(&launch);
        if (result == DDP_OK || launch.interrupted || d->mode == DDP_LAUNCH_THREADS) break;
    }
    return result;
}

//== gradient buckets ========================================================================= >>impl-buckets

/* A bucket is a list of parameters. Their gradients have the same dtype and are reduced together. Gradients
   of a bucket that are adjacent in memory on every rank form a range. A large range, or the only one of a
   bucket, is reduced in place. Small ranges, and ranges that must be cast, are copied into the flat buffer,
   reduced with one call, and copied back.

       gradients in memory    [p7 p6 p5]    [p2]    [p3]    [p4]    [p1 p0]        [ ] = a range
            | sort by address (ddp_grad_place), compare with all ranks
       links between          p7 -> p6 -> p5   p1 -> p0
            | fill buckets in the order in which gradients become ready
       order                  p7 p6 p5 | p4 p2 | p3 p1 p0                          | = end of a bucket
            | reduce
       bucket 0               one range          all-reduce of [p7 p6 p5] in place
       bucket 1               two small ranges   flat = [p4 p2], all-reduce of flat, copied back
       bucket 2               p3 small,          flat = [p3], all-reduce of flat, copied back;
                              [p1 p0] large      all-reduce of [p1 p0] in place

   A hook is called in place of each all-reduce. Its ddp_bucket points to the same memory.
   Buckets and ranges are the same on all ranks, except for addresses. They follow from what
   ddp_reducer_create has compared, from links that hold on every rank, and from an order that rank 0
   sends. */

/* Bytes from which a range is reduced in place. Packing costs two copies, a separate call about 1 us. */
#define DDP__RANGE_IN_PLACE ((size_t)64 * 1024)
#define DDP__DTYPES 10

typedef struct ddp__grad {
    unsigned char *data;
    size_t count, size_bytes;
    size_t range_count; /* elements of the range that begins here; 0 = none */
    ddp_dtype dtype;
    int first_use; /* the first parameter with this value: itself, unless tied */
    int bucket;    /* -1 = in none */
    /* Parameters with the next and previous gradient in memory, on every rank; -1 = none. */
    int next_in_memory, previous_in_memory;
    unsigned char in_place;     /* 1 = its range is reduced in place */
    unsigned char in_arena;     /* in the reducer's arena, 64-byte aligned; zeros up to the next one */
    unsigned char ready;        /* announced in this step */
    unsigned char has_f32_sum;  /* this step's gradient is the parameter's f32 sum */
    unsigned char expected;     /* waited for; 0 = static_graph has seen that this rank does not use it */
    unsigned char unused;       /* no rank used it in the last step */
    unsigned char has_tied_sum; /* a later use has been added to this first use */
} ddp__grad;

typedef struct ddp__bucket {
    ddp_reducer *reducer;
    int index, first, last; /* its parameters: reducer->order[first .. last] */
    int pending;            /* parameters still to be announced in this step */
    /* dtype: of the gradients. wire: on the wire; decided when the bucket is reduced, since sums are f32. */
    ddp_dtype dtype, wire;
    size_t flat_count; /* elements that are packed; 0 = all ranges are in place */
    uint64_t divisor;
    ddp_work work;
} ddp__bucket;

struct ddp_reducer {
    ddp_group *group;
    const ddp_device *device;
    ddp_reducer_desc desc; /* with defaults resolved; buffers: a copy */
    int active_ranks;      /* ranks that the average is over: world_size, or fewer during a join */
    int shadow;            /* 1 = this rank has no batch in this step, and contributes zeros */
    int no_sync;
    ddp_accumulator *accumulators; /* those with this reducer */
    /* These, ready_order and desc.buffers: one allocation, an entry per parameter or buffer. */
    ddp__bucket *buckets;
    ddp__grad *grads;
    int *order; /* parameters, bucket by bucket */
    /* Parameters in the order in which they were announced in this step. While buckets are planned: the order
       in which to fill them. */
    int *ready_order;
    int ready_count, next_bucket;
    /* 1 = gradients are those of a finished step: from ddp_reducer_wait to the next ready. */
    int averaged;
    /* Group memory. arena: gradients that were NULL. flat: the packed gradients of the bucket being
       reduced. */
    void *arena, *flat;
    size_t arena_bytes, flat_bytes;
    void *packed_buffers; /* group memory: the message of ddp_reducer_sync_buffers; NULL before the first */
    void *scratch;        /* small agreements between ranks, and scratch */
    void *sum_squares;    /* of all gradients: a ddp_exact_sum on the device */
    /* These three: of the present step. The thread that reduces a bucket writes them. */
    double comm_seconds;
    size_t bytes_reduced, bytes_copied;
    ddp_reducer_stats stats;
};

/* Returns 1 with one rank and no hook: gradients are only divided. */
static int ddp__reducer_is_local(const ddp_reducer *reducer) {
    return reducer->group->world_size == 1 && !reducer->desc.hook;
}

/* Returns the dtype in which gradients of a dtype are sent. */
static ddp_dtype ddp__wire_dtype(const ddp_reducer *reducer, ddp_dtype dtype) {
    ddp_dtype comm = reducer->group->world_size > 1 ? reducer->desc.comm_dtype : DDP_DTYPE_DEFAULT;
    return comm != DDP_DTYPE_DEFAULT && ddp_dtype_size(comm) < ddp_dtype_size(dtype) ? comm : dtype;
}

/* Returns 1 if the reducer reads f32 sums of gradients of this dtype. */
static int ddp__reads_f32_sums(const ddp_reducer *reducer, ddp_dtype dtype) {
    return ddp__is_half(dtype) && reducer->desc.comm_dtype == DDP_DTYPE_DEFAULT;
}

/* Returns 1 if a bucket is reduced as f32 sums: all its parameters have one. The same on every rank. */
static int ddp__bucket_has_f32_sums(const ddp__bucket *bucket) {
    const ddp_reducer *reducer = bucket->reducer;
    if (!ddp__reads_f32_sums(reducer, bucket->dtype)) return 0;
    for (int k = bucket->first; k <= bucket->last; k++) {
        int param = reducer->order[k];
        const ddp_grad_sum *sum = &reducer->desc.params[param].sum;
        if (reducer->grads[param].count && (!sum->data || sum->reader != reducer)) return 0;
    }
    return 1;
}

static int ddp__starts_range(const ddp__bucket *bucket, int param) {
    const ddp__grad *grads = bucket->reducer->grads;
    int previous = grads[param].previous_in_memory;
    return previous < 0 || grads[previous].bucket != bucket->index;
}

/* Sorts the bucket's part of the order, so that the gradients of a range follow each other as in memory. Sets
   range_count of the first gradient of each range. Returns the number of ranges that are not empty. */
static int ddp__bucket_find_ranges(ddp__bucket *bucket) {
    ddp__grad *grads = bucket->reducer->grads,
              *range = NULL; /* range: the first gradient of the current one */
    int *order = bucket->reducer->order, range_total = 0;
    for (int k = bucket->first; k <= bucket->last; k++) {
        int next = k > bucket->first ? grads[order[k - 1]].next_in_memory : -1;
        int continues = next >= 0 && grads[next].bucket == bucket->index;
        int j = k;
        while (continues ? order[j] != next : !ddp__starts_range(bucket, order[j])) j++;
        int param = order[j];
        order[j] = order[k];
        order[k] = param;
        ddp__grad *grad = &grads[param];
        grad->range_count = 0;
        if (!continues) {
            range = grad;
            range_total += grad->count > 0;
        }
        if (grad->count)
            range->range_count = (size_t)(grad->data + grad->size_bytes - range->data)
                                 / ddp_dtype_size(bucket->dtype);
    }
    return range_total;
}

/* Appends a bucket of the parameters order[first .. last], and decides which of its ranges are in place.
   Returns the bytes that it needs in the flat buffer. */
static size_t ddp__bucket_append(ddp_reducer *reducer, ddp_dtype dtype, int first, int last) {
    ddp__bucket new_bucket = {reducer, reducer->stats.bucket_count,     first, last, 0,
                              dtype,   ddp__wire_dtype(reducer, dtype), 0,     0,    DDP_ZERO};
    ddp__bucket *bucket = &reducer->buckets[reducer->stats.bucket_count++];
    *bucket = new_bucket;
    for (int k = first; k <= last; k++) reducer->grads[reducer->order[k]].bucket = bucket->index;
    int only_range = ddp__bucket_find_ranges(bucket) == 1;
    for (int k = first; k <= last; k++) {
        ddp__grad *grad = &reducer->grads[reducer->order[k]];
        int large = !reducer->desc.hook && grad->range_count * ddp_dtype_size(dtype) >= DDP__RANGE_IN_PLACE;
        grad->in_place = bucket->wire == dtype && (only_range || large || ddp__reducer_is_local(reducer));
        if (!grad->in_place) bucket->flat_count += grad->range_count;
    }
    return bucket->flat_count * ddp_dtype_size(ddp__reads_f32_sums(reducer, dtype) ? DDP_F32 : bucket->wire);
}

static void ddp__buckets_reset(ddp_reducer *reducer) {
    for (int i = 0; i < reducer->stats.bucket_count; i++) reducer->buckets[i].pending = 0;
    for (int i = 0; i < reducer->desc.param_count; i++) {
        ddp__grad *grad = &reducer->grads[i];
        grad->ready = grad->has_f32_sum = 0;
        if (grad->bucket >= 0) reducer->buckets[grad->bucket].pending += grad->expected;
    }
    reducer->next_bucket = reducer->ready_count = 0;
    reducer->bytes_reduced = reducer->bytes_copied = 0;
    reducer->comm_seconds = 0;
}

/* Fills buckets with the first `count` parameters of ready_order, separately for each dtype. A parameter is
   added to the open bucket of its dtype. Then the bucket is closed if it has reached the limit, so that
   buckets overshoot (PyTorch DDP's rule). Buckets are numbered in the order in which they close. They become
   ready in the same order. Collective: grows the flat buffer for the largest packed bucket. */
static ddp_result ddp__buckets_build(ddp_reducer *reducer, int count) {
    /* The open bucket of each dtype. first and last are indices into ready_order; last: of the dtype. */
    struct {
        size_t bytes, limit;
        int first, last;
    } open[DDP__DTYPES];
    const int *ready = reducer->ready_order;
    ddp__grad *grads = reducer->grads;
    size_t flat_bytes = 0;
    int placed = 0; /* parameters in reducer->order */
    memset(open, 0, sizeof open);
    for (int d = 0; d < DDP__DTYPES; d++) open[d].limit = reducer->desc.first_bucket_bytes;
    for (int i = 0; i < reducer->desc.param_count; i++) grads[i].bucket = -1;
    for (int k = 0; k < count; k++) open[grads[ready[k]].dtype].last = k;
    reducer->stats.bucket_count = 0;
    reducer->stats.largest_bucket_bytes = 0;
    for (int k = 0; k < count; k++) {
        ddp_dtype d = grads[ready[k]].dtype;
        int first = placed;
        open[d].bytes += grads[ready[k]].size_bytes;
        if (open[d].bytes < open[d].limit && k < open[d].last) continue;
        for (int j = open[d].first; j <= k; j++)
            if (grads[ready[j]].dtype == d) reducer->order[placed++] = ready[j];
        size_t bucket_bytes = ddp__bucket_append(reducer, d, first, placed - 1);
        if (bucket_bytes > flat_bytes) flat_bytes = bucket_bytes;
        if (open[d].bytes > reducer->stats.largest_bucket_bytes)
            reducer->stats.largest_bucket_bytes = open[d].bytes;
        open[d].first = k + 1;
        open[d].bytes = 0;
        open[d].limit = reducer->desc.bucket_cap_bytes;
    }
    ddp__buckets_reset(reducer);
    if (flat_bytes <= reducer->flat_bytes) return DDP_OK;
    ddp_result result = ddp_group_free(reducer->group, reducer->flat);
    reducer->flat = NULL;
    if (result == DDP_OK) result = ddp_group_alloc(reducer->group, flat_bytes, &reducer->flat);
    reducer->flat_bytes = result == DDP_OK ? flat_bytes : 0;
    return result;
}

//== reducing a bucket ================================================================== >>impl-bucket-reduce

/* ddp__bucket_reduce is a task of the group: it runs on the communication thread, or on the thread that calls
   ddp_reducer_wait. It packs gradients that are not in place, reduces, and copies them back. */

/* Runs the hook on data. If the hook fails on some ranks only, the others wait inside theirs. A failure
   therefore poisons the group. */
static ddp_result ddp__bucket_hook(ddp__bucket *bucket, void *data, size_t count) {
    ddp_reducer *reducer = bucket->reducer;
    ddp_group *group = reducer->group;
    ddp_bucket view = {data,
                       count,
                       bucket->wire,
                       bucket->index,
                       reducer->stats.bucket_count,
                       bucket->divisor,
                       reducer->stats.steps,
                       reducer->order + bucket->first,
                       bucket->last - bucket->first + 1};
    ddp_result result;
    {
        DDP_USER_CALLBACK;
        result = reducer->desc.hook(group, &view, reducer->desc.hook_user);
    }
    if (result == DDP_OK) return DDP_OK;
    DDP__RANK_FAIL(group, result, "%s: the hook returned %s for bucket %d of %d: %.300s",
                   ddp_public_call_name("ddp_reducer_wait"), ddp_result_name(result), bucket->index,
                   view.bucket_count, ddp_last_error());
    if (group->world_size > 1) ddp_group_poison(group, result, ddp_last_error()); /* keeps an earlier cause */
    return result;
}

/* Copies the packed ranges into the flat buffer (pack 1), or back (pack 0). Casts if the wire dtype
   differs. */
static void ddp__bucket_copy(ddp__bucket *bucket, int pack) {
    ddp_reducer *reducer = bucket->reducer;
    unsigned char *flat = (unsigned char *)reducer->flat;
    ddp_copy_list list = DDP_ZERO;
    list.device = reducer->device;
    for (int k = bucket->first; k <= bucket->last; k++) {
        const ddp__grad *grad = &reducer->grads[reducer->order[k]];
        size_t bytes = grad->range_count * ddp_dtype_size(bucket->wire);
        if (!grad->range_count || grad->in_place) continue;
        if (pack)
            ddp_copy_list_add(&list, flat, bucket->wire, grad->data, bucket->dtype, grad->range_count);
        else
            ddp_copy_list_add(&list, grad->data, bucket->dtype, flat, bucket->wire, grad->range_count);
        reducer->bytes_copied += bytes;
        flat += bytes;
    }
    ddp_copy_list_end(&list);
}

/* The same for a bucket of f32 sums. Gradients without a sum in this step are cast to f32. The sums of a
   range have the distances of its gradients, see ddp_place_sums. */
static void ddp__bucket_copy_f32(ddp__bucket *bucket, int pack) {
    ddp_reducer *reducer = bucket->reducer;
    const ddp__grad *range_head = NULL; /* the first of the range */
    ddp_copy_list list = DDP_ZERO;
    list.device = reducer->device;
    unsigned char *flat = (unsigned char *)reducer->flat, *flat_range = flat;
    for (int k = bucket->first; k <= bucket->last; k++) {
        const ddp__grad *grad = &reducer->grads[reducer->order[k]];
        unsigned char *sum = (unsigned char *)reducer->desc.params[reducer->order[k]].sum.data,
                      *f32_data = sum;
        if (!grad->count) continue;
        if (grad->range_count) {
            range_head = grad;
            flat_range = flat;
            if (!grad->in_place) flat += grad->range_count * sizeof(float);
        }
        size_t offset = (size_t)(grad->data - range_head->data) / ddp_dtype_size(bucket->dtype)
                        * sizeof(float);
        if (!range_head->in_place) f32_data = flat_range + offset;
        if (pack && grad->has_f32_sum && f32_data == sum) continue;
        if (!pack)
            ddp_copy_list_add(&list, grad->data, bucket->dtype, f32_data, DDP_F32, grad->count);
        else if (grad->has_f32_sum)
            ddp_copy_list_add(&list, f32_data, DDP_F32, sum, DDP_F32, grad->count);
        else
            ddp_copy_list_add(&list, f32_data, DDP_F32, grad->data, bucket->dtype, grad->count);
        reducer->bytes_copied += grad->count * sizeof(float);
    }
    ddp_copy_list_end(&list);
}

/* Reduces one bucket. A gradient that was not announced counts as zeros. */
static ddp_result ddp__bucket_reduce(ddp_group *group, void *argument) {
    ddp__bucket *bucket = (ddp__bucket *)argument;
    ddp_reducer *reducer = bucket->reducer;
    double begin = ddp_now();
    int f32_sums = ddp__bucket_has_f32_sums(bucket);
    bucket->wire = f32_sums ? DDP_F32 : ddp__wire_dtype(reducer, bucket->dtype);
    bucket->divisor = (uint64_t)reducer->active_ranks * (uint64_t)reducer->desc.micro_batch_count;
    if (reducer->desc.per_token) bucket->divisor = 1;
    /* The same on every rank: all ranks have the group memory, or none has. */
    if (bucket->flat_count && !reducer->flat)
        return DDP__RANK_FAIL(group, DDP_ERR_NO_MEMORY, "%s",
                              "reducer: group memory for the rebuilt buckets could not be allocated; free "
                              "group memory and create a new reducer");
    for (int k = bucket->first; k <= bucket->last; k++) {
        const ddp__grad *grad = &reducer->grads[reducer->order[k]];
        if (!grad->ready && grad->count) reducer->device->fill_zero(grad->data, grad->size_bytes);
    }
    if (ddp__reducer_is_local(reducer) && !f32_sums && bucket->divisor == 1) return ddp__device_check(group);
    if (f32_sums)
        ddp__bucket_copy_f32(bucket, 1);
    else
        ddp__bucket_copy(bucket, 1);
    /* first the flat part of the bucket, then the gradients that are reduced in place */
    for (int k = bucket->first - 1; k <= bucket->last; k++) {
        void *data = reducer->flat;
        size_t count = bucket->flat_count;
        if (k >= bucket->first) {
            int param = reducer->order[k];
            const ddp__grad *grad = &reducer->grads[param];
            data = f32_sums ? reducer->desc.params[param].sum.data : grad->data;
            count = grad->in_place ? grad->range_count : 0;
        }
        if (count == 0) continue;
        if (group->world_size > 1) reducer->bytes_reduced += count * ddp_dtype_size(bucket->wire);
        if (reducer->desc.hook) {
            DDP_TRY(ddp__bucket_hook(bucket, data, count));
        } else if (ddp__reducer_is_local(reducer)) {
            const ddp_tensor range = {data, bucket->wire, 1, {(int64_t)count}};
            reducer->device->divide(&range, 1, bucket->divisor);
        } else {
            ddp_call call = ddp__call_of(DDP_CALL_ALL_REDUCE, data, data, count, bucket->wire);
            call.op = DDP_OP_AVG;
            call.divisor = bucket->divisor;
            DDP_TRY(ddp__run_call(group, &call));
        }
    }
    if (f32_sums)
        ddp__bucket_copy_f32(bucket, 0);
    else
        ddp__bucket_copy(bucket, 0);
    if (!group->backend->enqueues) reducer->comm_seconds += ddp_now() - begin;
    return ddp__device_check(group);
}

//== comparing reducers across ranks =========================================================== >>impl-schema

/* ddp_reducer_create checks its arguments in two steps. First each rank checks and resolves its own desc, and
   allocates. Then ddp_agree_list compares a list of entries across ranks: options, parameters, buffers. The
   error line names the first entry that differs. */

#define DDP__SCHEMA_OPTIONS 9
#define DDP__CREATE_NEED(condition, ...) DDP_CHECK("ddp_reducer_create", NULL, condition, __VA_ARGS__)

typedef struct ddp__param_text {
    char text[128];
} ddp__param_text; /* "parameter 3 'wte'" */

static ddp__param_text ddp__describe_param(const ddp_param *params, int index) {
    ddp__param_text description;
    if (params[index].name)
        snprintf(description.text, sizeof description.text, "parameter %d '%.80s'", index,
                 params[index].name);
    else
        snprintf(description.text, sizeof description.text, "parameter %d", index);
    return description;
}

static uint64_t ddp__shape_hash(uint64_t hash, const ddp_tensor *tensor) {
    return ddp_hash(hash, tensor->shape, (size_t)tensor->ndim * sizeof tensor->shape[0]);
}

/* Describes entry `index` of the list that must be the same on all ranks: options, parameters, buffers. An
   end entry follows the last parameter and the last buffer, so that different counts are found. */
static uint64_t ddp__schema_entry(const void *list, int index, char *text) {
    const ddp_reducer *reducer = (const ddp_reducer *)list;
    const ddp_reducer_desc *d = &reducer->desc;
    const struct {
        const char *name;
        long long value;
    } options[DDP__SCHEMA_OPTIONS] = {
        {"bucket_cap_bytes", (long long)d->bucket_cap_bytes},
        {"first_bucket_bytes", (long long)d->first_bucket_bytes},
        {"micro_batch_count", d->micro_batch_count},
        {"find_unused", !!d->find_unused},
        {"static_graph", !!d->static_graph},
        {"comm_dtype", d->comm_dtype},
        {"hook", !!d->hook},
        {"skip_initial_broadcast", !!d->skip_initial_broadcast},
        {"per_token", !!d->per_token},
    };
    int param = index - DDP__SCHEMA_OPTIONS, buffer = param - d->param_count - 1;
    const char *kind = buffer < 0 ? "parameter" : "buffer";
    uint64_t hash = DDP_HASH_SEED;
    if (param < 0) {
        snprintf(text, DDP_AGREE_TEXT, "%s=%lld", options[index].name, options[index].value);
    } else if (param == d->param_count || buffer >= d->buffer_count) {
        snprintf(text, DDP_AGREE_TEXT, "no %s %d", kind, buffer < 0 ? param : buffer);
    } else if (buffer >= 0) {
        const ddp_tensor *tensor = &d->buffers[buffer];
        hash = ddp__shape_hash(hash, tensor);
        snprintf(text, DDP_AGREE_TEXT, "buffer %d %.96s", buffer,
                 ddp_describe_shape(ddp_dtype_name(tensor->dtype), tensor->ndim, tensor->shape).text);
    } else {
        const ddp__grad *grad_info = &reducer->grads[param];
        const char *name = d->params[param].name ? d->params[param].name : "";
        char tied[48] = "";
        const ddp_tensor *value = &d->params[param].value, grad = ddp_param_grad(&d->params[param]);
        hash = ddp__shape_hash(ddp__shape_hash(hash, value), &grad);
        hash = ddp_hash(hash, name, strlen(name));
        if (grad_info->first_use != param)
            snprintf(tied, sizeof tied, " tied to parameter %d", grad_info->first_use);
        snprintf(text, DDP_AGREE_TEXT, "parameter %d '%.40s' %.60s%s, gradient %.60s %s", param, name,
                 ddp_describe_shape(ddp_dtype_name(value->dtype), value->ndim, value->shape).text, tied,
                 ddp_describe_shape(ddp_dtype_name(grad.dtype), grad.ndim, grad.shape).text,
                 grad_info->in_arena ? "NULL" : "given");
    }
    return ddp_hash(hash, text, strlen(text) + 1);
}

/* Checks one parameter and fills in its entry of grads. */
static ddp_result ddp__reducer_add_param(ddp_reducer *reducer, int index) {
    const ddp_tensor *value = &reducer->desc.params[index].value;
    ddp__grad *grad_info = &reducer->grads[index];
    ddp_tensor grad = ddp_param_grad(&reducer->desc.params[index]);
    int64_t count = ddp_tensor_count(value), grad_count = ddp_tensor_count(&grad);
    ddp__param_text description = ddp__describe_param(reducer->desc.params, index);
    size_t size = ddp_dtype_size(grad.dtype);
    DDP__CREATE_NEED(ddp_dtype_size(value->dtype), "%s: value.dtype=%d is invalid; use DDP_F32 to DDP_U64",
                     description.text, (int)value->dtype);
    DDP__CREATE_NEED(count >= 0 && count <= INT64_MAX / 16,
                     "%s: value.ndim=%d or value.shape is invalid; use ndim 0 to %d and sizes of 0 or more",
                     description.text, value->ndim, DDP_MAX_NDIM);
    DDP__CREATE_NEED(count == 0 || value->data, "%s: value.data is NULL; set it to the parameter's memory",
                     description.text);
    DDP__CREATE_NEED(ddp_is_float(grad.dtype),
                     "%s: a gradient of dtype %s cannot be averaged; use f32, f64, f16 or bf16",
                     description.text, ddp_dtype_name(grad.dtype));
    DDP__CREATE_NEED(grad_count == count,
                     "%s: the gradient has %lld elements, but the value has %lld; give both the same shape",
                     description.text, (long long)grad_count, (long long)count);
    DDP__CREATE_NEED((uintptr_t)grad.data % size == 0, "%s: grad.data=%p is not aligned to the size of %s",
                     description.text, grad.data, ddp_dtype_name(grad.dtype));
    grad_info->data = (unsigned char *)grad.data;
    grad_info->dtype = grad.dtype;
    grad_info->count = (size_t)count;
    grad_info->size_bytes = (size_t)count * size;
    grad_info->in_arena = !grad.data;
    grad_info->expected = 1;
    grad_info->first_use = index;
    grad_info->next_in_memory = grad_info->previous_in_memory = -1;
    reducer->stats.gradient_bytes += grad_info->size_bytes;
    if (grad_info->in_arena) reducer->arena_bytes += ddp_round_up(grad_info->size_bytes, DDP__ALIGN);
    return DDP_OK;
}

/* Sorts the parameters that are not empty by the address of their value or gradient. Writes address and index
   of each to reducer->host, without NULL addresses, and returns their number. */
static int ddp__params_by_address(ddp_reducer *reducer, int by_value) {
    ddp_grad_place *places = (ddp_grad_place *)reducer->scratch;
    int count = 0;
    for (int i = 0; i < reducer->desc.param_count; i++) {
        const void *address = by_value ? reducer->desc.params[i].value.data : reducer->grads[i].data;
        if (!address || reducer->grads[i].count == 0) continue;
        places[count].address = (uintptr_t)address;
        places[count++].index = i;
    }
    qsort(places, (size_t)count, sizeof places[0], ddp__grad_place_compare);
    return count;
}

/* Parameters with the same value.data are uses of one tied parameter; first_use becomes the first of them.
   Fails if gradients overlap. */
static ddp_result ddp__reducer_check_memory(ddp_reducer *reducer) {
    const ddp_param *params = reducer->desc.params;
    const ddp_grad_place *places = (const ddp_grad_place *)reducer->scratch;
    ddp__grad *grads = reducer->grads;
    int count = ddp__params_by_address(reducer, 1);
    for (int k = 1; k < count; k++) {
        int i = places[k].index, first = grads[places[k - 1].index].first_use;
        if (places[k].address != places[k - 1].address) continue;
        DDP__CREATE_NEED(grads[i].count == grads[first].count && grads[i].dtype == grads[first].dtype,
                         "%s and %s share value.data but differ in shape or gradient dtype; give both uses "
                         "of a tied parameter the same",
                         ddp__describe_param(params, first).text, ddp__describe_param(params, i).text);
        grads[i].first_use = first;
    }
    count = ddp__params_by_address(reducer, 0);
    for (int k = 1; k < count; k++) {
        int previous = places[k - 1].index;
        DDP__CREATE_NEED(
            places[k].address - places[k - 1].address >= grads[previous].size_bytes,
            "the gradients of %s and %s overlap; give each its own memory, also uses of a tied parameter",
            ddp__describe_param(params, previous).text, ddp__describe_param(params, places[k].index).text);
    }
    return DDP_OK;
}

/* The checks and allocations that a rank makes without the others. */
static ddp_result ddp__reducer_prepare(ddp_reducer *reducer, const ddp_reducer_desc *desc) {
    DDP__CREATE_NEED(desc, "desc is NULL");
    DDP__CREATE_NEED(desc->params && desc->param_count > 0,
                     "param_count=%d or params is NULL; set both, to the array of trained parameters",
                     desc->param_count);
    DDP__CREATE_NEED(desc->micro_batch_count >= 0, "micro_batch_count=%d; use 1 or more, or 0 for 1",
                     desc->micro_batch_count);
    DDP__CREATE_NEED(desc->comm_dtype == DDP_DTYPE_DEFAULT || ddp__is_half(desc->comm_dtype),
                     "comm_dtype=%s; use DDP_F16, DDP_BF16 or 0", ddp_dtype_name(desc->comm_dtype));
    DDP_TRY(ddp_buffers_check("ddp_reducer_create", NULL, desc->buffers, desc->buffer_count, 1));
    size_t n = (size_t)desc->param_count, buffer_count = (size_t)desc->buffer_count;
    size_t bytes_per_param = sizeof(ddp__bucket) + sizeof(ddp__grad) + 2 * sizeof(int);
    reducer->buckets = (ddp__bucket *)ddp_host_alloc(reducer->group,
                                                     n * bytes_per_param + buffer_count * sizeof(ddp_tensor));
    if (!reducer->buckets) return DDP_ERR_NO_MEMORY;
    reducer->grads = (ddp__grad *)(reducer->buckets + n); /* in the order of decreasing alignment */
    ddp_tensor *buffers = (ddp_tensor *)(reducer->grads + n);
    reducer->order = (int *)(buffers + buffer_count);
    reducer->ready_order = reducer->order + n;
    reducer->desc = *desc;
    reducer->desc.buffers = buffers;
    if (buffer_count) memcpy(buffers, desc->buffers, buffer_count * sizeof *buffers);
    if (desc->bucket_cap_bytes == 0) reducer->desc.bucket_cap_bytes = (size_t)25 << 20;
    if (desc->first_bucket_bytes == 0) reducer->desc.first_bucket_bytes = (size_t)1 << 20;
    if (desc->micro_batch_count == 0) reducer->desc.micro_batch_count = 1;
    DDP_TRY(reducer->device->alloc(reducer->group, sizeof(ddp_exact_sum), &reducer->sum_squares));
    for (int i = 0; i < desc->param_count; i++) DDP_TRY(ddp__reducer_add_param(reducer, i));
    return ddp__reducer_check_memory(reducer);
}

//== creating a reducer ================================================================ >>impl-reducer-create

/* ddp_reducer_create checks the arguments, places gradients that were NULL, and builds the first buckets. It
   is collective: all ranks return the same result. */

/* Links gradients that are adjacent in memory. Collective: a link that is missing on some rank is dropped on
   all ranks. Alignment gaps of the arena hold zeros. They may be part of a range, except with a hook or a
   cast. */
static ddp_result ddp__reducer_link(ddp_reducer *reducer) {
    const ddp_grad_place *places = (const ddp_grad_place *)reducer->scratch;
    int32_t *links = (int32_t *)reducer->scratch;
    int count = ddp__params_by_address(reducer, 0), n = reducer->desc.param_count;
    for (int k = 1; k < count; k++) {
        ddp__grad *left = &reducer->grads[places[k - 1].index], *right = &reducer->grads[places[k].index];
        int gaps = left->in_arena && !reducer->desc.hook
                   && ddp__wire_dtype(reducer, left->dtype) == left->dtype;
        size_t left_bytes = gaps ? ddp_round_up(left->size_bytes, DDP__ALIGN) : left->size_bytes;
        if (left->dtype == right->dtype && left->in_arena == right->in_arena
            && left->data + left_bytes == right->data)
            left->next_in_memory = places[k].index;
    }
    /* After the call links[i] is the minimum over ranks, and links[n + i] is minus the maximum. */
    for (int i = 0; i < n; i++) {
        links[i] = reducer->grads[i].next_in_memory;
        links[n + i] = -links[i];
    }
    DDP_TRY(ddp_host_collective(reducer->group, DDP_CALL_ALL_REDUCE, links, links, (size_t)n * 2, DDP_I32,
                                DDP_OP_MIN, -1));
    for (int i = 0; i < n; i++) {
        if (links[i] != -links[n + i])
            reducer->grads[i].next_in_memory = -1;
        else if (links[i] >= 0)
            reducer->grads[links[i]].previous_in_memory = i;
    }
    return DDP_OK;
}

/* Broadcasts the first `count` shared tensors from root: values, then buffers. A tied value is sent once. */
static ddp_result ddp__reducer_broadcast(ddp_reducer *reducer, int count, int root) {
    int n = reducer->desc.param_count;
    for (int k = 0; k < count; k++) {
        const ddp_tensor *tensor = k < n ? &reducer->desc.params[k].value : &reducer->desc.buffers[k - n];
        size_t bytes = ddp_tensor_bytes(tensor);
        if (bytes > 0 && (k >= n || reducer->grads[k].first_use == k))
            DDP_TRY(ddp_broadcast(reducer->group, tensor->data, bytes, DDP_U8, root, NULL));
    }
    return DDP_OK;
}

DDPDEF ddp_result ddp_buffers_check(const char *call_name, ddp_group *group, const ddp_tensor *buffers,
                                    int buffer_count, int needs_data) {
    DDP_CHECK(call_name, group, buffer_count == 0 || (buffer_count > 0 && buffers),
              "buffer_count=%d or buffers is NULL; set both, or neither", buffer_count);
    for (int i = 0; i < buffer_count; i++) {
        int64_t count = ddp_tensor_count(&buffers[i]);
        int has_data = !needs_data || count == 0 || buffers[i].data;
        DDP_CHECK(call_name, group, count >= 0 && ddp_dtype_size(buffers[i].dtype) && has_data,
                  "buffer %d: data, dtype or shape is invalid; fill in its ddp_tensor", i);
    }
    return DDP_OK;
}

DDPDEF size_t ddp_buffers_message_bytes(const ddp_tensor *buffers, int buffer_count) {
    size_t message_bytes = 0;
    int sent_count = 0;
    for (int i = 0; i < buffer_count; i++) {
        size_t size_bytes = ddp_tensor_bytes(&buffers[i]);
        message_bytes += ddp_round_up(size_bytes, DDP__ALIGN);
        sent_count += size_bytes > 0;
    }
    return sent_count > 1 ? message_bytes : 0;
}

/* Copies the buffers to the message, or back. */
static void ddp__buffers_copy(const ddp_device *device, const ddp_tensor *buffers, int buffer_count,
                              void *message, int to_message) {
    unsigned char *place = (unsigned char *)message;
    ddp_copy_list list = DDP_ZERO;
    list.device = device;
    for (int i = 0; i < buffer_count; i++) {
        size_t size_bytes = ddp_tensor_bytes(&buffers[i]);
        if (to_message)
            ddp_copy_list_add(&list, place, DDP_U8, buffers[i].data, DDP_U8, size_bytes);
        else
            ddp_copy_list_add(&list, buffers[i].data, DDP_U8, place, DDP_U8, size_bytes);
        place += ddp_round_up(size_bytes, DDP__ALIGN);
    }
    ddp_copy_list_end(&list);
}

DDPDEF ddp_result ddp_buffers_broadcast(ddp_group *group, const ddp_tensor *buffers, int buffer_count,
                                        void *message, int root) {
    size_t message_bytes = ddp_buffers_message_bytes(buffers, buffer_count);
    if (group->world_size == 1) return DDP_OK;
    if (!message_bytes) {
        for (int i = 0; i < buffer_count; i++) {
            size_t size_bytes = ddp_tensor_bytes(&buffers[i]);
            if (size_bytes) return ddp_broadcast(group, buffers[i].data, size_bytes, DDP_U8, root, NULL);
        }
        return DDP_OK;
    }
    DDP_TRY(ddp__use_compute_stream(group));
    if (group->rank == root) ddp__buffers_copy(group->device, buffers, buffer_count, message, 1);
    DDP_TRY(ddp_broadcast(group, message, message_bytes, DDP_U8, root, NULL));
    DDP_TRY(ddp__use_compute_stream(group));
    if (group->rank != root) ddp__buffers_copy(group->device, buffers, buffer_count, message, 0);
    return ddp__device_check(group);
}

/* Broadcasts the buffers from root. The first call allocates the message. */
static ddp_result ddp__reducer_broadcast_buffers(ddp_reducer *reducer, int root) {
    const ddp_reducer_desc *d = &reducer->desc;
    if (reducer->group->world_size > 1 && !reducer->packed_buffers) {
        size_t message_bytes = ddp_buffers_message_bytes(d->buffers, d->buffer_count);
        if (message_bytes) DDP_TRY(ddp_group_alloc(reducer->group, message_bytes, &reducer->packed_buffers));
    }
    return ddp_buffers_broadcast(reducer->group, d->buffers, d->buffer_count, reducer->packed_buffers, root);
}

/* Waits for the buckets in flight. reduce_rest: 1 = also reduces the buckets that are not issued yet.
   Returns the first failure. */
static ddp_result ddp__reducer_drain(ddp_reducer *reducer, int reduce_rest) {
    ddp_saved_error first = {DDP_OK, ""};
    for (int i = 0; i < reducer->stats.bucket_count; i++) {
        ddp__bucket *bucket = &reducer->buckets[i];
        if (i < reducer->next_bucket)
            ddp_error_save(&first, ddp_wait(reducer->group, &bucket->work));
        else if (!reduce_rest || first.result != DDP_OK)
            continue;
        else if (ddp__reducer_is_local(reducer))
            ddp_error_save(&first, ddp__bucket_reduce(reducer->group, bucket));
        else
            ddp_error_save(&first, ddp_group_enqueue(reducer->group, ddp__bucket_reduce, bucket, NULL));
    }
    return ddp_error_restore(&first);
}

/* ddp_grad_sum.drain: no bucket reads f32 sums afterwards. */
static void ddp__reducer_drain_callback(void *reducer) { ddp__reducer_drain((ddp_reducer *)reducer, 0); }

/* Builds the buckets after all ranks have agreed on the list. Collective. Gradients that were NULL are placed
   one after the other in the arena, each dtype in the order of the first buckets. */
static ddp_result ddp__reducer_build(ddp_reducer *reducer) {
    int n = reducer->desc.param_count;
    size_t offset = 0;
    if (reducer->arena_bytes) DDP_TRY(ddp_group_alloc(reducer->group, reducer->arena_bytes, &reducer->arena));
    for (int d = 0; d < DDP__DTYPES; d++)
        for (int i = n - 1; i >= 0; i--) {
            ddp__grad *grad = &reducer->grads[i];
            if (!grad->in_arena || (int)grad->dtype != d) continue;
            grad->data = (unsigned char *)reducer->arena + offset;
            offset += ddp_round_up(grad->size_bytes, DDP__ALIGN);
        }
    DDP_TRY(ddp__reducer_link(reducer));
    for (int k = 0; k < n; k++) reducer->ready_order[k] = n - 1 - k;
    DDP_TRY(ddp__buckets_build(reducer, n));
    if (!reducer->desc.skip_initial_broadcast)
        DDP_TRY(ddp__reducer_broadcast(reducer, n + reducer->desc.buffer_count, 0));
    for (int i = 0; i < n; i++) {
        ddp_param *param = &reducer->desc.params[i];
        param->grad = ddp_param_grad(param);
        param->grad.data = reducer->grads[i].data;
        param->first_use = &reducer->grads[reducer->grads[i].first_use];
        param->sum.is_set = 0;
        if (!ddp__reads_f32_sums(reducer, reducer->grads[i].dtype)) continue;
        param->sum.reader = reducer;
        param->sum.drain = ddp__reducer_drain_callback;
    }
    return DDP_OK;
}

/* Collective if group memory was allocated. */
static void ddp__reducer_free(ddp_reducer *reducer) {
    ddp_group_free(reducer->group, reducer->packed_buffers);
    ddp_group_free(reducer->group, reducer->flat);
    ddp_group_free(reducer->group, reducer->arena);
    reducer->device->free(reducer->group, reducer->sum_squares);
    ddp_host_free(reducer->group, reducer->buckets);
    ddp_host_free(reducer->group, reducer);
}

DDPDEF ddp_result ddp_reducer_create(ddp_reducer **out, ddp_group *group, const ddp_reducer_desc *desc) {
    DDP_PUBLIC_CALL(ddp_reducer_create);
    if (out) *out = NULL;
    DDP__NEED(group, "group is NULL");
    /* Scratch holds a place per parameter, or a byte per rank. */
    size_t places = desc && desc->param_count > 0 ? (size_t)desc->param_count * sizeof(ddp_grad_place) : 0;
    size_t scratch = places > (size_t)group->world_size ? places : (size_t)group->world_size;
    ddp_reducer *reducer = (ddp_reducer *)ddp_host_alloc(group, sizeof *reducer + scratch);
    ddp_result result = DDP_ERR_NO_MEMORY;
    if (reducer) {
        reducer->group = group;
        reducer->device = group->device;
        reducer->active_ranks = group->world_size;
        reducer->scratch = reducer + 1;
        result = out ? ddp__reducer_prepare(reducer, desc)
                     : ddp__bad("ddp_reducer_create", NULL, "out is NULL");
    }
    int entries = 0;
    if (reducer)
        entries = DDP__SCHEMA_OPTIONS + reducer->desc.param_count + 1 + reducer->desc.buffer_count + 1;
    result = ddp_agree_list(group, "ddp_reducer_create", result, reducer, entries, ddp__schema_entry, NULL);
    if (result == DDP_OK) result = ddp__reducer_build(reducer);
    ddp_saved_error failure = {DDP_OK, ""};
    ddp_error_save(&failure, result);
    if (result == DDP_OK)
        *out = reducer;
    else if (reducer)
        ddp__reducer_free(reducer);
    return ddp_error_restore(&failure);
}

//== reducer ================================================================================== >>impl-reducer

/* The reducer averages gradients over ranks, bucket by bucket, while backward still runs. ddp_reducer_ready
   issues the buckets in their order, each once its gradients are ready. ddp_reducer_wait issues the rest,
   waits for all of them, and finishes the step. */

#define DDP__REDUCER_NEED(reducer, condition, ...) \
    DDP_CHECK(__func__, (reducer)->group, condition, __VA_ARGS__)

DDPDEF ddp_result ddp_reducer_ready(ddp_reducer *reducer, int param_index) {
    DDP_PUBLIC_CALL(ddp_reducer_ready);
    DDP__NEED(reducer, "reducer is NULL");
    DDP__REDUCER_NEED(reducer, param_index >= 0 && param_index < reducer->desc.param_count,
                      "param_index=%d with %d parameters; use 0 to param_count - 1", param_index,
                      reducer->desc.param_count);
    ddp__grad *grad = &reducer->grads[param_index];
    ddp_grad_sum *sum = &reducer->desc.params[param_index].sum;
    int has_sum = sum->is_set && sum->data && sum->reader == reducer;
    sum->is_set = 0;
    if (reducer->no_sync) return DDP_OK;
    DDP__REDUCER_NEED(reducer, !grad->ready,
                      "%s is ready twice in step %llu; call ddp_reducer_ready once per parameter and step, "
                      "and ddp_reducer_wait after the last",
                      ddp__describe_param(reducer->desc.params, param_index).text,
                      (unsigned long long)reducer->stats.steps);
    DDP__REDUCER_NEED(reducer, grad->expected,
                      "%s was not used in the first step, but static_graph=1 requires the same parameters in "
                      "every step; set static_graph=0 and find_unused=1",
                      ddp__describe_param(reducer->desc.params, param_index).text);
    grad->ready = 1;
    grad->has_f32_sum = (unsigned char)has_sum;
    reducer->averaged = 0;
    reducer->ready_order[reducer->ready_count++] = param_index;
    if (grad->bucket >= 0) reducer->buckets[grad->bucket].pending--;
    /* ddp_reducer_wait comes next and executes the last bucket on its own thread. With a backend that
       enqueues, this would save nothing, so the bucket is issued here. */
    int count = reducer->stats.bucket_count - !reducer->group->backend->enqueues;
    if (ddp__reducer_is_local(reducer)) count = 0;
    while (reducer->next_bucket < count && reducer->buckets[reducer->next_bucket].pending == 0) {
        ddp__bucket *bucket = &reducer->buckets[reducer->next_bucket];
        DDP_TRY(ddp_group_enqueue(reducer->group, ddp__bucket_reduce, bucket, &bucket->work));
        reducer->next_bucket++;
    }
    return DDP_OK;
}

/* Finds the parameters that no rank used. Collective. With static_graph the first step also decides which
   parameters later steps wait for. */
static ddp_result ddp__reducer_find_unused(ddp_reducer *reducer) {
    unsigned char *used = (unsigned char *)reducer->scratch;
    for (int i = 0; i < reducer->desc.param_count; i++) used[i] = reducer->grads[i].ready;
    DDP_TRY(ddp_host_collective(reducer->group, DDP_CALL_ALL_REDUCE, used, used,
                                (size_t)reducer->desc.param_count, DDP_U8, DDP_OP_MAX, -1));
    reducer->stats.unused_count = 0;
    for (int i = 0; i < reducer->desc.param_count; i++) {
        ddp__grad *grad = &reducer->grads[i];
        grad->unused = !used[i];
        reducer->stats.unused_count += grad->unused;
        if (reducer->desc.static_graph && reducer->stats.steps == 0)
            grad->expected = reducer->shadow ? used[i] : grad->ready;
    }
    return DDP_OK;
}

/* Fails on every rank if any rank has not announced a parameter. Collective. missing: this rank's first such
   parameter, or -1. A rank with a missing parameter has still reduced its buckets, so that the group remains
   usable. */
static ddp_result ddp__reducer_check_missing(ddp_reducer *reducer, int missing) {
    const ddp_group *group = reducer->group;
    int64_t *first = (int64_t *)reducer->scratch;
    *first = missing < 0 ? INT64_MAX : (int64_t)missing * group->world_size + group->rank;
    DDP_TRY(
        ddp_host_collective(reducer->group, DDP_CALL_ALL_REDUCE, first, first, 1, DDP_I64, DDP_OP_MIN, -1));
    DDP_CHECK("ddp_reducer_wait", group, *first == INT64_MAX,
              "%s never became ready on rank %d in step %llu; call ddp_reducer_ready for it in "
              "every step, or set find_unused",
              ddp__describe_param(reducer->desc.params, (int)(*first / group->world_size)).text,
              (int)(*first % group->world_size), (unsigned long long)reducer->stats.steps);
    return DDP_OK;
}

/* Rebuilds the buckets, once, in the order in which gradients became ready on rank 0. Parameters that no rank
   used under static_graph are in no bucket. */
static ddp_result ddp__reducer_rebuild(ddp_reducer *reducer) {
    int n = reducer->desc.param_count, count = reducer->ready_count;
    int *order = reducer->ready_order, *rank0_order = (int *)reducer->scratch;
    for (int i = n - 1; i >= 0; i--)
        if (!reducer->grads[i].ready && !(reducer->desc.static_graph && reducer->grads[i].unused))
            order[count++] = i;
    /* The minimum over ranks is the entry of rank 0. -1 follows its last entry. */
    for (int k = 0; k < n; k++) {
        rank0_order[k] = k < count ? order[k] : -1;
        if (reducer->group->rank > 0) rank0_order[k] = INT32_MAX;
    }
    DDP_TRY(ddp_host_collective(reducer->group, DDP_CALL_ALL_REDUCE, rank0_order, rank0_order, (size_t)n,
                                DDP_I32, DDP_OP_MIN, -1));
    for (count = 0; count < n && rank0_order[count] >= 0; count++) order[count] = rank0_order[count];
    DDP_TRY(ddp__buckets_build(reducer, count));
    reducer->stats.rebuilt = 1;
    return DDP_OK;
}

/* Returns 1 if ddp_reducer_wait writes this gradient. Otherwise no rank uses it under static_graph, and its
   memory is the caller's: it may differ between ranks. */
static int ddp__grad_is_reduced(const ddp__grad *grad) { return grad->bucket >= 0 || grad->has_tied_sum; }

enum { DDP__GRAD_LIST = 64 };

/* Collects the next gradients that ddp_reducer_wait writes, at most DDP__GRAD_LIST, and returns their number.
   0 = all have been collected. *next: 0 at first. first_uses: 1 = without later uses of tied parameters. */
static int ddp__reducer_list_grads(const ddp_reducer *reducer, int *next, int first_uses, ddp_tensor *list) {
    int count = 0;
    for (; *next < reducer->desc.param_count && count < DDP__GRAD_LIST; ++*next) {
        const ddp__grad *grad = &reducer->grads[*next];
        if (!grad->count || !ddp__grad_is_reduced(grad)) continue;
        if (first_uses && grad->first_use != *next) continue;
        list[count] = ddp_param_grad(&reducer->desc.params[*next]);
        list[count++].data = grad->data;
    }
    return count;
}

/* Adds the gradients of later uses of a tied parameter to that of the first use, in definition order. */
static void ddp__reducer_add_tied(ddp_reducer *reducer) {
    for (int i = 0; i < reducer->desc.param_count; i++) {
        ddp__grad *use = &reducer->grads[i], *first = &reducer->grads[use->first_use];
        if (use == first || !use->count || use->unused) continue;
        /* Under static_graph the first use may itself be unused, and in no bucket. */
        if (first->bucket < 0 && !first->ready) reducer->device->fill_zero(first->data, first->size_bytes);
        first->ready |= first->bucket < 0;
        first->has_tied_sum = 1;
        reducer->device->add(first->data, first->data, use->data, use->count, use->dtype);
    }
}

DDPDEF ddp_result ddp_reducer_wait(ddp_reducer *reducer) {
    DDP_PUBLIC_CALL(ddp_reducer_wait);
    double begin = ddp_now();
    DDP__NEED(reducer, "reducer is NULL");
    if (reducer->no_sync) return DDP_OK;
    reducer->averaged = 0;
    ddp_reducer_stats *stats = &reducer->stats;
    int missing = -1; /* the first parameter that was not announced in this step */
    int find_unused = reducer->desc.find_unused || (reducer->desc.static_graph && stats->steps == 0);
    for (int i = reducer->desc.param_count - 1; i >= 0 && !find_unused && !reducer->shadow; i--)
        if (!reducer->grads[i].ready && reducer->grads[i].expected) missing = i;
    ddp_result result = ddp__use_compute_stream(reducer->group);
    if (result == DDP_OK) result = ddp__reducer_drain(reducer, missing < 0 || reducer->group->world_size > 1);
    if (result == DDP_OK)
        result = find_unused ? ddp__reducer_find_unused(reducer)
                             : ddp__reducer_check_missing(reducer, missing);
    if (result == DDP_OK) ddp__reducer_add_tied(reducer);
    if (result == DDP_OK) result = ddp__device_check(reducer->group);
    stats->bytes_reduced = reducer->bytes_reduced;
    stats->bytes_copied = reducer->bytes_copied;
    stats->comm_seconds = reducer->comm_seconds;
    stats->wait_seconds = ddp_now() - begin;
    stats->overlap = 0;
    if (reducer->group->world_size > 1 && stats->wait_seconds < stats->comm_seconds)
        stats->overlap = 1 - stats->wait_seconds / stats->comm_seconds;
    stats->total_comm_seconds += stats->comm_seconds;
    stats->total_wait_seconds += stats->wait_seconds;
    stats->steps += result == DDP_OK;
    if (result == DDP_OK && stats->steps == 1 && !reducer->desc.find_unused)
        result = ddp__reducer_rebuild(reducer);
    ddp__buckets_reset(reducer);
    reducer->averaged = result == DDP_OK;
    return result;
}

DDPDEF void ddp_mean_add(ddp_mean *mean, double sum, int64_t count) {
    ddp_exact_sum_add(&mean->sum, sum);
    mean->count += count;
}

DDPDEF ddp_result ddp_mean_reduce(ddp_group *group, ddp_mean *mean) {
    DDP_PUBLIC_CALL(ddp_mean_reduce);
    struct {
        ddp_mean mean;
        int64_t negative;
    } total; /* consists of 64-bit words only */
    DDP__NEED(group && mean, "group or mean is NULL");
    total.mean = *mean;
    total.negative = mean->count < 0;
    DDP_TRY(ddp_host_collective(group, DDP_CALL_ALL_REDUCE, &total, &total, sizeof total / sizeof(int64_t),
                                DDP_I64, DDP_OP_SUM, -1));
    DDP_CHECK("ddp_mean_reduce", group, !total.negative,
              "mean->count is negative on %lld ranks, and %lld on this rank; use 0 or more",
              (long long)total.negative, (long long)mean->count);
    *mean = total.mean;
    return DDP_OK;
}

DDPDEF double ddp_mean_value(const ddp_mean *mean) {
    return mean->count ? ddp_exact_sum_value(&mean->sum) / (double)mean->count : 0;
}

DDPDEF ddp_result ddp_reducer_wait_mean(ddp_reducer *reducer, ddp_mean *loss) {
    DDP_PUBLIC_CALL(ddp_reducer_wait_mean);
    DDP__NEED(reducer && loss, "reducer or loss is NULL");
    DDP__REDUCER_NEED(
        reducer, reducer->desc.per_token,
        "desc.per_token=0, so gradients are averages over ranks; set per_token=1, or call ddp_reducer_wait");
    if (reducer->no_sync) return DDP_OK;
    DDP_TRY(ddp_reducer_wait(reducer));
    reducer->averaged = 0; /* still sums */
    DDP_TRY(ddp_mean_reduce(reducer->group, loss));
    DDP_TRY(ddp__use_compute_stream(reducer->group));
    ddp_tensor list[DDP__GRAD_LIST];
    for (int next = 0, n; loss->count > 1 && (n = ddp__reducer_list_grads(reducer, &next, 0, list)) > 0;)
        reducer->device->divide(list, n, (uint64_t)loss->count);
    DDP_TRY(ddp__device_check(reducer->group));
    reducer->averaged = 1;
    return DDP_OK;
}

DDPDEF ddp_result ddp_reducer_no_sync(ddp_reducer *reducer, int on) {
    DDP__NEED(reducer, "reducer is NULL");
    DDP__REDUCER_NEED(reducer, reducer->ready_count == 0,
                      "%d parameters of this step are already ready; call ddp_reducer_no_sync between "
                      "ddp_reducer_wait and the next backward",
                      reducer->ready_count);
    reducer->no_sync = on != 0;
    if (on) reducer->averaged = 0; /* gradients will accumulate on this rank only */
    return DDP_OK;
}

DDPDEF ddp_result ddp_reducer_sync_buffers(ddp_reducer *reducer, int root) {
    DDP_PUBLIC_CALL(ddp_reducer_sync_buffers);
    DDP__NEED(reducer, "reducer is NULL");
    DDP__REDUCER_NEED(reducer, root >= 0 && root < reducer->group->world_size,
                      "root=%d is not a rank of the group; use 0 to %d", root,
                      reducer->group->world_size - 1);
    if (reducer->no_sync) return DDP_OK;
    DDP__REDUCER_NEED(reducer, reducer->ready_count == 0,
                      "%d parameters of this step are already ready; call ddp_reducer_sync_buffers between "
                      "ddp_reducer_wait and the next backward",
                      reducer->ready_count);
    DDP__REDUCER_NEED(reducer, reducer->active_ranks == reducer->group->world_size,
                      "only %d of %d ranks have a batch in this step of a ddp_join; set "
                      "ddp_join_desc.sync_buffers instead",
                      reducer->active_ranks, reducer->group->world_size);
    return ddp__reducer_broadcast_buffers(reducer, root);
}

DDPDEF ddp_result ddp_reducer_clip_grad_norm(ddp_reducer *reducer, float max_norm, float *norm) {
    ddp_exact_sum sum;
    float unused;
    DDP__NEED(reducer, "reducer is NULL");
    DDP__REDUCER_NEED(reducer, max_norm > 0, "max_norm=%g; use a positive number", (double)max_norm);
    DDP__REDUCER_NEED(reducer, !reducer->no_sync,
                      "no_sync is on, so gradients are not reduced over ranks; turn it off, and call "
                      "ddp_reducer_clip_grad_norm after %s",
                      "ddp_reducer_wait");
    DDP__REDUCER_NEED(
        reducer, reducer->averaged,
        "the gradients of step %llu are not reduced over ranks; call ddp_reducer_clip_grad_norm after %s",
        (unsigned long long)reducer->stats.steps,
        reducer->desc.per_token ? "ddp_reducer_wait_mean" : "ddp_reducer_wait");
    DDP_TRY(ddp__use_compute_stream(reducer->group));
    reducer->device->fill_zero(reducer->sum_squares, sizeof sum);
    ddp_tensor list[DDP__GRAD_LIST];
    for (int next = 0, n; (n = ddp__reducer_list_grads(reducer, &next, 1, list)) > 0;)
        reducer->device->sum_squares((ddp_exact_sum *)reducer->sum_squares, 0, list, n);
    /* Only this copy makes the host wait for the device. */
    reducer->device->copy(&sum, reducer->sum_squares, sizeof sum);
    DDP_TRY(ddp__device_check(reducer->group));
    float factor = ddp_clip_factor(&sum, max_norm, norm ? norm : &unused);
    for (int next = 0, n; factor != 1 && (n = ddp__reducer_list_grads(reducer, &next, 0, list)) > 0;)
        reducer->device->scale(list, n, factor);
    return ddp__device_check(reducer->group);
}

DDPDEF int ddp_reducer_is_unused(const ddp_reducer *reducer, int param_index) {
    return reducer && param_index >= 0 && param_index < reducer->desc.param_count
               ? reducer->grads[param_index].unused
               : 0;
}

DDPDEF ddp_result ddp_reducer_get_stats(const ddp_reducer *reducer, ddp_reducer_stats *stats) {
    DDP__NEED(reducer && stats, "reducer or stats is NULL");
    *stats = reducer->stats;
    return DDP_OK;
}

static void ddp__reducer_detach_accumulators(ddp_reducer *reducer);

DDPDEF void ddp_reducer_destroy(ddp_reducer *reducer) {
    DDP_PUBLIC_CALL(ddp_reducer_destroy);
    DDP_KEEP_ERROR;
    if (!reducer || ddp_group_is_forked(reducer->group)) return;
    ddp__reducer_drain(reducer, 0);
    ddp__reducer_detach_accumulators(reducer);
    for (int i = 0; i < reducer->desc.param_count; i++) {
        ddp_param *param = &reducer->desc.params[i];
        if (param->sum.reader == reducer) param->sum.reader = NULL;
        if (param->first_use == &reducer->grads[reducer->grads[i].first_use]) param->first_use = NULL;
        if (reducer->grads[i].in_arena) param->grad.data = NULL;
    }
    ddp__reducer_free(reducer);
}

//== micro-batch accumulation ============================================================= >>impl-accumulator

#define DDP__ACCUMULATE_BLOCK 4096 /* elements, so that a chain of additions stays in L1 */

/* Adds the gradients of the micro-batches of a step, and announces the sums to the reducer. The levels form a
   binary counter of partial sums. After t micro-batches, level buffers 0 .. popcount(t) - 1 hold sums of
   blocks of 2^k micro-batches: one block per set bit of t, the earliest and largest block first.

       t = 6 = 110b     level[0] = ((g0+g1)+(g2+g3))     level[1] = (g4+g5)

   Gradient number t is added to the last c levels, where c is the number of trailing ones of t. The last
   gradient of a step is added to all levels. Earlier blocks are the left operands. The sum over any m
   micro-batches is therefore the tree that splits at the largest power of two below m.

   16-bit gradients are added in f32: levels hold f32, each gradient is cast to `scratch` when it arrives, and
   the sum of the step stays in level[0]. A reducer reads it there. Without a reducer it is rounded to the
   gradient. */
struct ddp_accumulator {
    ddp_group *group;
    ddp_accumulator_desc desc;
    unsigned char *announced; /* per parameter: 1 = announced in this micro-batch */
    ddp_accumulator *next;    /* of desc.reducer's list */
    size_t *sum_offset;       /* per parameter: byte offset in each level */
    void *levels, *scratch;   /* one allocation */
    size_t level_bytes;
    int micro_batch; /* t */
};

/* Called when the reducer is destroyed: accumulators continue without it. */
static void ddp__reducer_detach_accumulators(ddp_reducer *reducer) {
    for (ddp_accumulator *a = reducer->accumulators; a; a = a->next) a->desc.reducer = NULL;
}

/* Assigns each sum its offset in a level. *scratch: bytes needed to add 16-bit gradients, in addition to the
   levels. places: one entry per parameter. */
static void ddp__accumulator_layout(ddp_accumulator *accumulator, ddp_grad_place *places, size_t *scratch) {
    const ddp_accumulator_desc *desc = &accumulator->desc;
    *scratch = 0;
    for (int i = 0; i < desc->param_count; i++) {
        ddp_tensor tensor = ddp_param_grad(&desc->params[i]);
        size_t count = (size_t)ddp_tensor_count(&tensor),
               sum_size = ddp_dtype_size(ddp_sum_dtype(tensor.dtype));
        size_t block = accumulator->group->device->use_stream ? count : DDP__ACCUMULATE_BLOCK;
        places[i].address = (uintptr_t)tensor.data;
        places[i].index = i;
        places[i].dtype = tensor.dtype;
        places[i].count = count;
        if (ddp__is_half(tensor.dtype) && block * sum_size > *scratch) *scratch = block * sum_size;
    }
    accumulator->level_bytes = ddp_place_sums(places, desc->param_count);
    for (int i = 0; i < desc->param_count; i++) accumulator->sum_offset[places[i].index] = places[i].sum_at;
}

/* Returns the address of a step's final sum: in level[0]. */
static unsigned char *ddp__accumulator_sum(const ddp_accumulator *accumulator, int param_index) {
    return (unsigned char *)accumulator->levels + accumulator->sum_offset[param_index];
}

DDPDEF ddp_result ddp_accumulator_create(ddp_accumulator **out, ddp_group *group,
                                         const ddp_accumulator_desc *desc) {
    DDP_PUBLIC_CALL(ddp_accumulator_create);
    const ddp_reducer_desc *reducer_desc = desc && desc->reducer ? &desc->reducer->desc : NULL;
    if (out) *out = NULL;
    DDP__NEED(out && group, "out or group is NULL");
    DDP__NEED(desc, "desc is NULL");
    DDP__NEED(desc->params && desc->param_count > 0,
              "param_count=%d or params is NULL; set both, to the array of trained parameters",
              desc->param_count);
    DDP__NEED(desc->micro_batch_count > 0, "micro_batch_count=%d; use 1 or more", desc->micro_batch_count);
    DDP__NEED(!reducer_desc || desc->reducer->group == group,
              "desc->reducer belongs to another group; pass the group it was created with");
    DDP__NEED(!reducer_desc
                  || (desc->params == reducer_desc->params && desc->param_count == reducer_desc->param_count),
              "params and param_count differ from those of the reducer; give both the same");
    DDP__NEED(!reducer_desc || reducer_desc->micro_batch_count == 1
                  || reducer_desc->micro_batch_count == desc->micro_batch_count,
              "micro_batch_count=%d, but the reducer has micro_batch_count=%d; give both the same",
              desc->micro_batch_count, reducer_desc->micro_batch_count);
    for (int i = 0; i < desc->param_count; i++) {
        ddp_tensor grad = ddp_param_grad(&desc->params[i]);
        DDP__NEED(ddp_tensor_count(&grad) >= 0 && ddp_dtype_size(grad.dtype),
                  "%s: value.dtype or value.shape is invalid; fill in its ddp_tensor",
                  ddp__describe_param(desc->params, i).text);
        DDP__NEED(ddp_tensor_count(&grad) == 0 || grad.data,
                  "%s: grad.data is NULL; create the reducer first, or set grad.data",
                  ddp__describe_param(desc->params, i).text);
    }
    size_t count = (size_t)desc->param_count, entry = sizeof(ddp_grad_place) + sizeof(size_t) + 1;
    ddp_accumulator *accumulator = (ddp_accumulator *)ddp_host_alloc(group,
                                                                     sizeof *accumulator + count * entry);
    if (!accumulator) return DDP_ERR_NO_MEMORY;
    accumulator->group = group;
    accumulator->desc = *desc;
    ddp_grad_place *places = (ddp_grad_place *)(accumulator + 1);
    accumulator->sum_offset = (size_t *)(places + count);
    accumulator->announced = (unsigned char *)(accumulator->sum_offset + count);
    size_t level_count = 0, scratch;
    ddp__accumulator_layout(accumulator, places, &scratch);
    /* floor(log2 m) levels for m micro-batches, since no t below m has more bits set. */
    while (desc->micro_batch_count >> (level_count + 1)) level_count++;
    size_t levels_bytes = level_count * accumulator->level_bytes;
    int reducer_reads_sums = desc->reducer && desc->micro_batch_count > 1;
    ddp_result result = DDP_OK;
    if (levels_bytes > 0) result = group->device->alloc(group, levels_bytes + scratch, &accumulator->levels);
    /* Buckets in flight must end before sums change how they are reduced. */
    if (result == DDP_OK && reducer_reads_sums) result = ddp__reducer_drain(desc->reducer, 0);
    if (result != DDP_OK) {
        if (accumulator->levels) group->device->free(group, accumulator->levels);
        ddp_host_free(group, accumulator);
        return result;
    }
    accumulator->scratch = (unsigned char *)accumulator->levels + levels_bytes;
    for (int i = 0; i < desc->param_count && reducer_reads_sums; i++)
        if (desc->params[i].sum.reader) desc->params[i].sum.data = ddp__accumulator_sum(accumulator, i);
    if (desc->reducer) {
        accumulator->next = desc->reducer->accumulators;
        desc->reducer->accumulators = accumulator;
    }
    *out = accumulator;
    return DDP_OK;
}

/* Adds a gradient to the levels. The sum is stored in the lowest level that was added. In the last
   micro-batch of a step it is stored in the gradient, except for an f32 sum that the reducer reads from the
   level (handed_over 1). */
static ddp_result ddp__accumulate(ddp_accumulator *accumulator, int param_index, int last, int handed_over) {
    const ddp_device *device = accumulator->group->device;
    unsigned t = (unsigned)accumulator->micro_batch;
    /* depth: levels in use. lowest: the first level that is added. In the last micro-batch all are. */
    int depth = __builtin_popcount(t), lowest = last ? 0 : depth - __builtin_ctz(~t);
    ddp_tensor tensor = ddp_param_grad(&accumulator->desc.params[param_index]);
    ddp_dtype sum_dtype = ddp_sum_dtype(tensor.dtype);
    size_t size = ddp_dtype_size(tensor.dtype), sum_size = ddp_dtype_size(sum_dtype);
    size_t count = (size_t)ddp_tensor_count(&tensor);
    int is_cast = sum_dtype != tensor.dtype;
    /* This parameter's sum in level k is at levels + k * level_bytes. */
    unsigned char *levels = ddp__accumulator_sum(accumulator, param_index);
    /* A CPU adds in blocks that fit its cache, a device with as few launches as possible. */
    size_t block = device->use_stream ? count : DDP__ACCUMULATE_BLOCK;
    if (last && depth == 0) return DDP_OK; /* a step of one micro-batch has no levels */
    DDP_TRY(ddp__use_compute_stream(accumulator->group));
    for (size_t begin = 0; begin < count; begin += block) {
        size_t block_count = count - begin < block ? count - begin : block;
        /* The gradient is the first right operand, cast to sum_dtype. The left operands are the levels, from
           the newest (depth - 1) to `lowest`. Each sum is the next right operand. */
        unsigned char *grad = (unsigned char *)tensor.data + begin * size, *right = grad;
        unsigned char *left = levels + (size_t)depth * accumulator->level_bytes + begin * sum_size;
        if (is_cast) {
            right = lowest == depth ? left : (unsigned char *)accumulator->scratch;
            device->cast(right, sum_dtype, grad, tensor.dtype, block_count);
        } else if (lowest == depth) {
            device->copy(left, grad, block_count * size);
        }
        for (int k = depth - 1; k >= lowest; k--) {
            left -= accumulator->level_bytes;
            int to_level = k == lowest && (is_cast || !last); /* otherwise the sum overwrites `right` */
            device->add(to_level ? left : right, left, right, block_count, sum_dtype);
        }
        if (last && is_cast && !handed_over) device->cast(grad, tensor.dtype, left, sum_dtype, block_count);
    }
    return ddp__device_check(accumulator->group);
}

DDPDEF ddp_result ddp_accumulator_ready(ddp_accumulator *accumulator, int param_index) {
    DDP_PUBLIC_CALL(ddp_accumulator_ready);
    const ddp_accumulator_desc *desc = accumulator ? &accumulator->desc : NULL;
    DDP__NEED(desc, "accumulator is NULL");
    DDP__NEED(param_index >= 0 && param_index < desc->param_count,
              "param_index=%d with %d parameters; use 0 to param_count - 1", param_index, desc->param_count);
    DDP__NEED(!accumulator->announced[param_index],
              "%s is ready twice in micro-batch %d; call ddp_accumulator_next after each micro-batch",
              ddp__describe_param(desc->params, param_index).text, accumulator->micro_batch);
    int last = accumulator->micro_batch + 1 == desc->micro_batch_count;
    /* Gradients must not change while the reducer sends those of the last step. */
    if (desc->reducer) {
        const ddp_reducer *reducer = desc->reducer;
        DDP__NEED(last ? !reducer->grads[param_index].ready : reducer->ready_count == 0,
                  "%s: the reducer is still in step %llu; call ddp_reducer_wait after the last micro-batch",
                  ddp__describe_param(desc->params, param_index).text,
                  (unsigned long long)reducer->stats.steps);
        desc->reducer->averaged = 0;
    }
    accumulator->announced[param_index] = 1;
    ddp_grad_sum *sum = &desc->params[param_index].sum;
    int sum_is_here = accumulator->levels && sum->data == ddp__accumulator_sum(accumulator, param_index);
    int reducer_reads = desc->reducer && sum->reader == desc->reducer && !desc->reducer->no_sync;
    int handed_over = last && sum_is_here && reducer_reads;
    DDP_TRY(ddp__accumulate(accumulator, param_index, last, handed_over));
    if (handed_over) sum->is_set = 1;
    return last && desc->reducer ? ddp_reducer_ready(desc->reducer, param_index) : DDP_OK;
}

DDPDEF ddp_result ddp_accumulator_next(ddp_accumulator *accumulator, int *last) {
    DDP__NEED(accumulator, "accumulator is NULL");
    for (int i = 0; i < accumulator->desc.param_count; i++)
        DDP__NEED(accumulator->announced[i],
                  "%s is not ready in micro-batch %d; call ddp_accumulator_ready for it first",
                  ddp__describe_param(accumulator->desc.params, i).text, accumulator->micro_batch);
    memset(accumulator->announced, 0, (size_t)accumulator->desc.param_count);
    accumulator->micro_batch = (accumulator->micro_batch + 1) % accumulator->desc.micro_batch_count;
    if (last) *last = accumulator->micro_batch == 0;
    return DDP_OK;
}

DDPDEF void ddp_accumulator_destroy(ddp_accumulator *accumulator) {
    DDP_PUBLIC_CALL(ddp_accumulator_destroy);
    DDP_KEEP_ERROR;
    if (!accumulator) return;
    for (int i = 0; i < accumulator->desc.param_count && accumulator->levels; i++)
        ddp_grad_sum_release(&accumulator->desc.params[i].sum, ddp__accumulator_sum(accumulator, i));
    ddp_accumulator **link = accumulator->desc.reducer ? &accumulator->desc.reducer->accumulators : NULL;
    while (link && *link != accumulator) link = &(*link)->next;
    if (link) *link = accumulator->next;
    accumulator->group->device->free(accumulator->group, accumulator->levels);
    ddp_host_free(accumulator->group, accumulator);
}

//== uneven inputs =============================================================================== >>impl-join

/* Before each step all ranks exchange whether they have a batch. A rank without one contributes zeros to the
   buckets of the step, so that every rank makes the same calls (like Join, PyTorch's context manager for
   uneven inputs).

       rank 0       batch       batch    batch    end: broadcast parameters
       rank 1       batch       zeros    zeros    end: receive them, since it missed optimizer steps 1 and 2
       divided by   2 ranks     1        1

   Rank 1 is inside one call of ddp_join_step during steps 1 and 2. With desc.step_fn it makes the optimizer
   steps itself, and no parameter is broadcast. With DDP_JOIN_STOP all ranks end when the first one ends.
   Buffers are broadcast at the end of a shadow join; with desc.sync_buffers before each of its steps, too. */
struct ddp_join {
    ddp_join_desc desc;
    int lowest_active;   /* lowest rank with a batch in the last step that any rank made */
    int has_stale_ranks; /* 1 = some rank has missed optimizer steps */
};

DDPDEF ddp_result ddp_join_create(ddp_join **out, ddp_group *group, const ddp_join_desc *desc) {
    if (out) *out = NULL;
    DDP__NEED(out && group, "out or group is NULL");
    DDP__NEED(desc && desc->reducer, "desc or desc->reducer is NULL; create the reducer first");
    DDP__NEED(desc->reducer->group == group,
              "desc->reducer belongs to another group; pass the group it was created with");
    DDP__NEED((unsigned)desc->mode <= DDP_JOIN_STOP, "mode=%d; use DDP_JOIN_SHADOW or DDP_JOIN_STOP",
              (int)desc->mode);
    *out = (ddp_join *)ddp_host_alloc(group, sizeof **out);
    if (!*out) return DDP_ERR_NO_MEMORY;
    (*out)->desc = *desc;
    return DDP_OK;
}

DDPDEF ddp_result ddp_join_step(ddp_join *join, int have_batch, int *active) {
    DDP_PUBLIC_CALL(ddp_join_step);
    ddp_reducer *reducer = join ? join->desc.reducer : NULL;
    const unsigned char own = have_batch != 0, *have;
    DDP__NEED(reducer && active, "join or active is NULL");
    have = (const unsigned char *)reducer->scratch;
    *active = 0;
    DDP__REDUCER_NEED(
        reducer, reducer->ready_count == 0,
        "a step is pending; call ddp_join_step after ddp_reducer_wait and before the next backward");
    for (;;) {
        int world_size = reducer->group->world_size, count = 0;
        DDP_TRY(ddp_host_collective(reducer->group, DDP_CALL_ALL_GATHER, &own, reducer->scratch, 1, DDP_U8,
                                    DDP_OP_SUM, -1));
        for (int r = world_size - 1; r >= 0; r--)
            if (have[r]) {
                join->lowest_active = r;
                count++;
            }
        if (join->desc.mode == DDP_JOIN_STOP && count < world_size) return DDP_OK;
        /* Ranks that missed steps receive the values of a rank that made the last one. */
        if (count == 0) {
            int broadcast = join->has_stale_ranks && !join->desc.step_fn;
            join->has_stale_ranks = 0;
            reducer->active_ranks = world_size;
            if (broadcast)
                DDP_TRY(ddp__reducer_broadcast(reducer, reducer->desc.param_count, join->lowest_active));
            return ddp__reducer_broadcast_buffers(reducer, join->lowest_active);
        }
        join->has_stale_ranks |= count < world_size;
        reducer->active_ranks = count;
        if (join->desc.sync_buffers && !reducer->no_sync)
            DDP_TRY(ddp__reducer_broadcast_buffers(reducer, join->lowest_active));
        if (have_batch) *active = count;
        if (have_batch) return DDP_OK;
        reducer->shadow = 1;
        ddp_mean nothing = DDP_ZERO;
        ddp_result result = reducer->desc.per_token ? ddp_reducer_wait_mean(reducer, &nothing)
                                                    : ddp_reducer_wait(reducer);
        reducer->shadow = 0;
        if (result == DDP_OK && join->desc.step_fn) {
            DDP_USER_CALLBACK;
            result = join->desc.step_fn(join->desc.user);
        }
        if (result != DDP_OK) return result;
    }
}

DDPDEF void ddp_join_destroy(ddp_join *join) {
    if (!join) return;
    join->desc.reducer->active_ranks = join->desc.reducer->group->world_size;
    ddp_host_free(join->desc.reducer->group, join);
}

//== sampler: random numbers =========================================================== >>impl-sampler-random

/* The two generators of the sampler's orders: a keyed bijection for DDP_SHUFFLE_HASHED, and PyTorch's
   generator for the TORCH orders. */

enum {
    DDP__MT_WORDS = 624,
    DDP__MT_SHIFT = 397,
    DDP__SAMPLER_HASHED_MAX = (int)(sizeof((ddp_sampler *)0)->hashed / 8)
};
static int ddp__bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

/* -- HASHED: a Feistel network over the smallest power of two that holds N --
   A result outside [0, N) is hashed again until it is inside (Black and Rogaway 2002). The mapping stays a
   bijection, and takes two rounds at most on average. */

static uint64_t ddp__splitmix64(uint64_t x) { /* the finisher of splitmix64 (Steele et al. 2014) */
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

DDPDEF uint64_t ddp_seed(uint64_t seed, uint64_t epoch, int64_t index, uint64_t stream) {
    const uint64_t words[4] = {seed, epoch, (uint64_t)index, stream};
    uint64_t key = 0;
    for (int i = 0; i < 4; i++) key = ddp__splitmix64(key + words[i] + UINT64_C(0x9e3779b97f4a7c15));
    return key;
}

/* Sets the keys of the rounds. A small N has few bits to mix in a round, so it takes more rounds. */
static void ddp__feistel_setup(ddp_sampler *s) {
    uint64_t key = ddp__splitmix64(ddp__splitmix64(s->desc.seed + UINT64_C(0x9e3779b97f4a7c15)) + s->epoch);
    /* At least one bit for each half. */
    int bits = s->desc.dataset_size > 2 ? ddp__bit_length((uint64_t)s->desc.dataset_size - 1) : 2;
    s->half_bits[0] = bits / 2;
    s->half_bits[1] = bits - s->half_bits[0];
    if (bits >= 24)
        s->round_count = 6;
    else
        s->round_count = bits >= 12 ? 12 : 32;
    for (int i = 0; i < s->round_count; i++)
        s->round_keys[i] = ddp__splitmix64(key += UINT64_C(0x9e3779b97f4a7c15));
}

static inline uint64_t ddp__feistel_round(uint64_t half, uint64_t key) {
    uint64_t y = (half ^ key) * UINT64_C(0xd6e8feb86659fd93);
    return y >> 32 ^ y >> 51;
}

/* Hashes several positions at once: each round is a chain of dependent instructions, and the chains
   overlap. */
static void ddp__feistel(const ddp_sampler *s, uint64_t *x, int count) {
    uint64_t mask0 = (UINT64_C(1) << s->half_bits[0]) - 1, mask1 = (UINT64_C(1) << s->half_bits[1]) - 1;
    uint64_t left[DDP__SAMPLER_HASHED_MAX], right[DDP__SAMPLER_HASHED_MAX];
    for (int k = 0; k < count; k++) {
        left[k] = x[k] >> s->half_bits[1];
        right[k] = x[k] & mask1;
    }
    for (int i = 0; i < s->round_count; i += 2) {
        for (int k = 0; k < count; k++) left[k] ^= ddp__feistel_round(right[k], s->round_keys[i]) & mask0;
        for (int k = 0; k < count; k++) right[k] ^= ddp__feistel_round(left[k], s->round_keys[i + 1]) & mask1;
    }
    for (int k = 0; k < count; k++) x[k] = left[k] << s->half_bits[1] | right[k];
}

/* -- Mersenne twister (MT19937, Matsumoto and Nishimura 1998), block by block and in both directions -- */

static uint32_t ddp__mt_join(uint32_t upper, uint32_t lower) {
    return (upper & 0x80000000u) | (lower & 0x7fffffffu);
}
/* mix shifts out the low bit, but the top bit shows whether it was set, so unmix can restore it. */
static uint32_t ddp__mt_mix(uint32_t y) { return y >> 1 ^ ((0u - (y & 1u)) & 0x9908b0dfu); }
static uint32_t ddp__mt_unmix(uint32_t y) { return (y ^ ((0u - (y >> 31)) & 0x9908b0dfu)) << 1 | y >> 31; }

/* Computes the next block: word k + 624 is word k + 397 ^ mix(join(word k, word k + 1)). */
static void ddp__mt_forward(uint32_t *x) {
    uint32_t words[2 * DDP__MT_WORDS], *next = words + DDP__MT_WORDS;
    memcpy(words, x, DDP__MT_WORDS * sizeof *x);
    for (int k = 0; k < DDP__MT_WORDS; k++)
        next[k] = words[k + DDP__MT_SHIFT] ^ ddp__mt_mix(ddp__mt_join(words[k], words[k + 1]));
    memcpy(x, next, DDP__MT_WORDS * sizeof *x);
}

/* Computes the previous block. word k + 624 ^ word k + 397, unmixed, is the join of words k and k + 1. Two
   such joins give word k. */
static void ddp__mt_backward(uint32_t *x) {
    uint32_t words[2 * DDP__MT_WORDS], *y = words + DDP__MT_WORDS;
    memcpy(y, x, DDP__MT_WORDS * sizeof *x);
    for (int k = DDP__MT_WORDS - 1; k >= 0; k--)
        words[k] = ddp__mt_join(ddp__mt_unmix(y[k] ^ words[k + DDP__MT_SHIFT]),
                                ddp__mt_unmix(y[k - 1] ^ words[k + DDP__MT_SHIFT - 1]));
    memcpy(x, words, DDP__MT_WORDS * sizeof *x);
}

static uint32_t ddp__mt_temper(uint32_t y) {
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

/* Computes block number `block` of the epoch's draws in s->mt, if possible from an earlier block. */
static void ddp__sampler_seek_draws(ddp_sampler *s, int64_t block) {
    if (s->mt_block < 0 || s->mt_block > block) {
        s->mt[0] = (uint32_t)(s->desc.seed + s->epoch);
        for (uint32_t i = 1; i < DDP__MT_WORDS; i++)
            s->mt[i] = UINT32_C(1812433253) * (s->mt[i - 1] ^ s->mt[i - 1] >> 30) + i;
        ddp__mt_forward(s->mt);
        s->mt_block = 0;
    }
    for (; s->mt_block < block; s->mt_block++) ddp__mt_forward(s->mt);
}

//== sampler: distribution over ranks =================================================== >>impl-sampler-ranks

/* The sampler computes its next sample from the number of samples that were drawn before it:

       index in this rank's share    ddp_sampler.cursor
            | ddp__sampler_entry: rounds of single entries or of blocks; each rank has one per round
       entry, numbered over all ranks
            | ddp__sampler_entry_position: skip what was used before a load; padding wraps to the start
       position in the order
            | the identity, the Feistel network, or a window of PyTorch's randperm
       sample */

/* Returns how many of the first `entries` are in [from, from + length) of their round. */
static uint64_t ddp__count_in_rounds(uint64_t entries, uint64_t round, uint64_t from, uint64_t length) {
    uint64_t rest = entries % round > from ? entries % round - from : 0;
    return entries / round * length + (rest < length ? rest : length);
}

/* Returns how many of the first `entries` belong to this rank. */
static int64_t ddp__sampler_own_count(const ddp_sampler *s, uint64_t entries) {
    return (int64_t)ddp__count_in_rounds(entries, s->round, s->block_start, s->block);
}

static uint64_t ddp__sampler_entry(const ddp_sampler *s, int64_t index) {
    uint64_t k = (uint64_t)index;
    if (s->block == 1) return k * s->round + s->block_start; /* saves the divisions by 1 */
    return k / s->block * s->round + s->block_start + k % s->block;
}

/* Returns the position of an entry in the order. After a load inside a global batch, the rest of each of its
   blocks comes first:

       order    ... origin [#### 0 1 2 3][#### 4 5 6 7] 8 9 10 ...
                gap_count 2, gap_used 4 (#), gap_block 8 */
static uint64_t ddp__sampler_entry_position(const ddp_sampler *s, uint64_t entry) {
    uint64_t rest = s->gap_block - s->gap_used, in_gap = s->gap_count * rest;
    if (entry >= s->remaining) return (entry - s->remaining) % (uint64_t)s->desc.dataset_size;
    if (entry >= in_gap) return s->origin + s->gap_count * s->gap_used + entry;
    return s->origin + entry / rest * s->gap_block + s->gap_used + entry % rest;
}

static uint64_t ddp__sampler_position(const ddp_sampler *s, int64_t index) {
    return ddp__sampler_entry_position(s, ddp__sampler_entry(s, index));
}

/* Starts at position origin of an epoch. resumed: the state of a load inside a global batch, or NULL. */
static void ddp__sampler_start(ddp_sampler *s, uint64_t epoch, uint64_t origin,
                               const ddp_sampler_state *resumed) {
    uint64_t rest = (uint64_t)s->desc.dataset_size - origin, gap_entries;
    s->epoch = epoch;
    s->origin = origin;
    s->mt_block = -1;
    s->gap_count = resumed ? (uint64_t)resumed->num_replicas : 0;
    s->gap_used = resumed ? (uint64_t)resumed->block_offset : 0;
    s->gap_block = resumed ? (uint64_t)(resumed->global_batch / resumed->num_replicas) : 1;
    /* The epoch may end inside the batch. */
    gap_entries = s->gap_count * s->gap_block < rest ? s->gap_count * s->gap_block : rest;
    s->remaining = s->total = rest - ddp__count_in_rounds(gap_entries, s->gap_block, 0, s->gap_used);
    if (s->desc.drop_last)
        s->total -= s->remaining % s->round;
    else if (!s->desc.no_pad && s->remaining % s->round)
        s->total += s->round - s->remaining % s->round;
    s->length = ddp__sampler_own_count(s, s->total);
    s->first_index = s->cursor = s->window_count = 0;
    s->ended = 0;
    if (s->desc.shuffle == DDP_SHUFFLE_HASHED) ddp__feistel_setup(s);
}

/* HASHED: computes the window that starts with sample `first` of this rank. It is short, unless it follows
   the previous one. Results outside [0, N) are hashed again, together. */
static void ddp__hashed_window(ddp_sampler *s, int64_t first) {
    int64_t max_count = s->window_count && first == s->window_first + s->window_count
                            ? DDP__SAMPLER_HASHED_MAX
                            : 4;
    int count = (int)(s->length - first < max_count ? s->length - first : max_count),
        slot[DDP__SAMPLER_HASHED_MAX];
    uint64_t x[DDP__SAMPLER_HASHED_MAX];
    s->window_first = first;
    s->window_count = count;
    for (int k = 0; k < count; k++) {
        x[k] = ddp__sampler_position(s, first + k);
        slot[k] = k;
    }
    for (int outside_count; count; count = outside_count) {
        ddp__feistel(s, x, count);
        outside_count = 0;
        for (int k = 0; k < count; k++) {
            s->hashed[slot[k]] = x[outside_count] = x[k];
            slot[outside_count] = slot[k];
            outside_count += x[k] >= (uint64_t)s->desc.dataset_size;
        }
    }
}

//== sampler: windows of randperm ====================================================== >>impl-sampler-window

/* PyTorch's randperm(N) without a list of N entries. A window is a range of this rank's samples, computed at
   once. Draw j of randperm swaps entry j with its target, entry j or a later one. All draws are undone, the
   last one of the window first. Meanwhile a hash table has the location of each sample of the window:

       entries            0 1 2 3 4 5
       draw 0, target 4   4 1 2 3 0 5    ^  position 3: moves from 4 to 0, because draw 0 took it from there
       draw 1, target 1   4 1 2 3 0 5    |
       draw 2, target 5   4 1 5 3 0 2    |  position 2: starts at 5
       draw 3, target 4   4 1 5 0 3 2    |  position 3: starts at 4
                              ---           window of the positions 2 and 3: samples 5 and 0

   At the end a location is the sample. Later draws do not touch the window, so that the first window of an
   epoch needs few of them. */

#ifndef DDP__RANDPERM_INSIDE_OUT_FROM
#define DDP__RANDPERM_INSIDE_OUT_FROM INT64_C(214748364) /* UINT32_MAX / 20, as in PyTorch */
#endif
#define DDP__SAMPLER_WINDOW INT64_C(4000000) /* the default of desc.window */
/* The first window of an epoch covers this many positions. */
#define DDP__SAMPLER_FIRST_WINDOW 4096

/* Location of each sample of a window: a hash table of chains. A slot is an index in the window. */
typedef struct ddp__locations {
    /* By slot: location << slot_bits | next slot in the chain. Without a chain: the sample itself. */
    uint64_t *node;
    uint64_t *filter;              /* bit (location >> filter_shift) is 1: a slot is or was at the location */
    uint32_t *head;                /* by chain: the first slot */
    uint64_t chain_count, no_slot; /* no_slot: ends a chain; slot_bits ones */
    int slot_bits, filter_shift;
    int64_t next_slot; /* the next position of the window that a draw reaches, from the last to the first */
} ddp__locations;

static int64_t ddp__locations_chain_count(int64_t count) { return count + count / 4 + 2; }
static int64_t ddp__locations_filter_words(int64_t count) { return count / 4 + 1; }

static inline uint32_t *ddp__locations_chain(const ddp__locations *t, uint64_t location) {
    return &t->head[((location * UINT64_C(0x9e3779b97f4a7c15) >> 32) * t->chain_count) >> 32];
}

/* A location without a slot mostly has a 0 in the filter. Nearly all draws end here: the filter has 2 bytes
   per slot, the table 13. */
static inline uint64_t *ddp__filter_word(const ddp__locations *t, uint64_t location) {
    return &t->filter[location >> t->filter_shift >> 6];
}
static inline int ddp__filter_has(const ddp__locations *t, uint64_t location) {
    return *ddp__filter_word(t, location) >> (location >> t->filter_shift & 63) & 1;
}
static inline void ddp__filter_add(ddp__locations *t, uint64_t location) {
    *ddp__filter_word(t, location) |= UINT64_C(1) << (location >> t->filter_shift & 63);
}

static inline void ddp__locations_insert(ddp__locations *t, uint64_t location, uint64_t slot) {
    uint32_t *head = ddp__locations_chain(t, location);
    t->node[slot] = location << t->slot_bits | *head;
    *head = (uint32_t)slot;
    ddp__filter_add(t, location);
}

/* Removes the slot at a location from the table. Returns it, or no_slot. */
static inline uint64_t ddp__locations_remove(ddp__locations *t, uint64_t location) {
    uint32_t *head = ddp__locations_chain(t, location);
    uint64_t slot = ddp__filter_has(t, location) ? *head : t->no_slot, before = t->no_slot;
    for (; slot != t->no_slot && t->node[slot] >> t->slot_bits != location; slot = t->node[slot] & t->no_slot)
        before = slot;
    if (slot == t->no_slot) return slot;
    if (before == t->no_slot)
        *head = (uint32_t)(t->node[slot] & t->no_slot);
    else
        t->node[before] = (t->node[before] & ~t->no_slot) | (t->node[slot] & t->no_slot);
    return slot;
}

/* Undoes the draws [base, base + top] of a block. Undoing draw j moves the slot at its target to j. If j is a
   position of the window, its own slot starts at the target.

   Each block of draws is filtered first, so that loads of the filter and the table overlap. A draw is kept if
   j belongs to the window, or if its target is in the filter or inside the block. */
static void ddp__randperm_undo_swaps(const ddp_sampler *s, ddp__locations *t, const uint64_t *target,
                                     uint64_t base, int top) {
    int kept[DDP__MT_WORDS], kept_count = 0;
    unsigned char in_window[DDP__MT_WORDS] = {0};
    for (int64_t slot = t->next_slot; slot >= 0; slot--) {
        uint64_t position = ddp__sampler_position(s, s->window_first + slot);
        if (position < base) break;
        in_window[position - base] = 1;
        ddp__filter_add(t, target[position - base]);
    }
    for (int i = top; i >= 0; i--) {
        kept[kept_count] = i; /* without a branch: which draws are kept is random */
        kept_count += in_window[i] | (target[i] < base + DDP__MT_WORDS) | ddp__filter_has(t, target[i]);
    }
    for (int c = 0; c < kept_count; c++) {
        __builtin_prefetch(ddp__locations_chain(t, target[kept[c]]));
        __builtin_prefetch(ddp__locations_chain(t, base + (uint64_t)kept[c]));
    }
    for (int c = 0; c < kept_count; c++) {
        uint64_t slot = *ddp__locations_chain(t, target[kept[c]]);
        if (slot != t->no_slot) __builtin_prefetch(&t->node[slot]);
    }
    for (int c = 0; c < kept_count; c++) {
        uint64_t location = target[kept[c]], slot = ddp__locations_remove(t, location);
        if (slot != t->no_slot) ddp__locations_insert(t, base + (uint64_t)kept[c], slot);
        if (in_window[kept[c]]) ddp__locations_insert(t, location, (uint64_t)t->next_slot--);
    }
}

/* The same for the inside-out rule. Draw j moves the entry at its target to j, and puts sample j at the
   target. Undoing it: the slot at the target has sample j, and is complete. The slot at j moves to the
   target. */
static void ddp__randperm_undo_inside_out(ddp__locations *t, const uint64_t *target, uint64_t base, int top) {
    for (int i = top; i >= 0; i--) {
        uint64_t j = base + (uint64_t)i;
        uint64_t at_target = ddp__locations_remove(t, target[i]), at_j = ddp__locations_remove(t, j);
        if (at_target != t->no_slot) t->node[at_target] = j << t->slot_bits;
        if (at_j != t->no_slot) ddp__locations_insert(t, target[i], at_j);
    }
}

/* Bits of a slot, such that a location up to N and a slot fit into 64 bits. */
static int ddp__location_slot_bits(const ddp_sampler *s) {
    return s->desc.dataset_size >> 32 ? 63 - ddp__bit_length((uint64_t)s->desc.dataset_size) : 31;
}

static int ddp__randperm_is_inside_out(const ddp_sampler *s) {
    return s->desc.shuffle == DDP_SHUFFLE_TORCH && s->desc.dataset_size >= DDP__RANDPERM_INSIDE_OUT_FROM;
}

/* Returns the length of the window that starts with sample `first` of this rank. It ends where padding or a
   repetition of the order starts, so that its positions ascend. A window is three times as long as all before
   it together: few passes, and a quick first sample. The inside-out rule needs all draws in any case. */
static int64_t ddp__randperm_window_length(const ddp_sampler *s, int64_t first) {
    uint64_t entry = ddp__sampler_entry(s, first), end = s->remaining, n = (uint64_t)s->desc.dataset_size;
    int64_t replicas = (int64_t)(s->round / s->block), length = s->desc.window;
    if (!ddp__randperm_is_inside_out(s)) {
        int64_t before = (int64_t)(ddp__sampler_entry_position(s, entry) / (uint64_t)replicas);
        int64_t limit = DDP__SAMPLER_FIRST_WINDOW / replicas + before * 3;
        if (limit < 1) limit = 1;
        if (length > limit) length = limit;
    }
    if (entry >= s->remaining) end = s->remaining + ((entry - s->remaining) / n + 1) * n;
    if (end > s->total) end = s->total;
    int64_t available = ddp__sampler_own_count(s, end) - first;
    return length < available ? length : available;
}

/* Empties the table for a window of `count` samples. The table, the filter and the chains share s->table. */
static void ddp__locations_init(ddp__locations *t, const ddp_sampler *s, int64_t count) {
    uint64_t filter_words = (uint64_t)ddp__locations_filter_words(count);
    t->next_slot = count - 1;
    t->slot_bits = ddp__location_slot_bits(s);
    t->no_slot = (UINT64_C(1) << t->slot_bits) - 1;
    t->chain_count = (uint64_t)ddp__locations_chain_count(count);
    t->node = s->table;
    t->filter = t->node + count;
    t->head = (uint32_t *)(void *)(t->filter + filter_words);
    t->filter_shift = 0;
    while ((uint64_t)s->desc.dataset_size >> t->filter_shift >= filter_words * 64) t->filter_shift++;
    memset(t->filter, 0, (size_t)filter_words * sizeof *t->filter);
    for (uint64_t chain = 0; chain < t->chain_count; chain++) t->head[chain] = (uint32_t)t->no_slot;
}

/* Computes the window that starts with sample `first` of this rank, by one pass over the draws, block by
   block: base is the first draw of a block, top the last one, relative to base. A draw takes a word of the
   generator. The inside-out rule needs all N draws, of 64 bits: two words each, high half first. */
static void ddp__randperm_window(ddp_sampler *s, int64_t first) {
    uint64_t target[DDP__MT_WORDS], n = (uint64_t)s->desc.dataset_size;
    uint32_t x[DDP__MT_WORDS];
    int inside_out = ddp__randperm_is_inside_out(s);
    int draws = inside_out ? DDP__MT_WORDS / 2 : DDP__MT_WORDS;
    int64_t count = ddp__randperm_window_length(s, first), last = (int64_t)n - 1;
    ddp__locations t;
    s->window_first = first;
    s->window_count = count;
    ddp__locations_init(&t, s, count);
    if (!inside_out) last = (int64_t)ddp__sampler_position(s, first + t.next_slot);
    ddp__sampler_seek_draws(s, last / draws);
    memcpy(x, s->mt, sizeof x);
    for (; inside_out && t.next_slot >= 0; t.next_slot--)
        ddp__locations_insert(&t, ddp__sampler_position(s, first + t.next_slot), (uint64_t)t.next_slot);
    int top = (int)(last % draws);
    for (int64_t base = last - top; base >= 0; base -= draws, top = draws - 1) {
        for (int i = 0; i <= top; i++) {
            uint64_t j = (uint64_t)(base + i), room = n - j;
            uint32_t draw = ddp__mt_temper(x[inside_out ? 2 * i : i]);
            if (inside_out)
                target[i] = ((uint64_t)draw << 32 | ddp__mt_temper(x[2 * i + 1])) % (j + 1);
            else
                target[i] = j + (room <= UINT32_MAX ? draw % (uint32_t)room : draw);
            __builtin_prefetch(ddp__filter_word(&t, target[i]));
        }
        if (inside_out)
            ddp__randperm_undo_inside_out(&t, target, (uint64_t)base, top);
        else
            ddp__randperm_undo_swaps(s, &t, target, (uint64_t)base, top);
        if (base) ddp__mt_backward(x);
    }
    for (int64_t slot = 0; slot < count; slot++) s->table[slot] >>= t.slot_bits;
}

//== sampler: public calls ==================================================================== >>impl-sampler

/* Checks of a desc or a state, and the calls of >>sampler. */

#define DDP__SAMPLER_NEED(condition, ...) DDP_CHECK("ddp_sampler_init", NULL, condition, __VA_ARGS__)

/* Rounds U C[r] / C[W] down. Sums of weights have a relative error of up to about W 1e-16, so a quotient just
   below an integer represents that integer: with equal weights of 0.7 and U = 6 it is 2.9999999999999996. */
static int64_t ddp__round_quotient_down(double quotient, int replicas) {
    int64_t down = (int64_t)quotient;
    return (double)(down + 1) - quotient <= quotient * replicas * 1e-15 ? down + 1 : down;
}

/* Sets the block of this rank by desc.weights. Rounding is monotonic, so the blocks of a batch are adjacent,
   and the last one ends with the batch. */
static ddp_result ddp__sampler_set_weighted_block(ddp_sampler *s) {
    const double *weights = s->desc.weights;
    int replicas = s->desc.num_replicas;
    int64_t batch = s->desc.global_batch;
    double total = 0, sum = 0;
    DDP__SAMPLER_NEED(batch > 0 && (double)batch * replicas <= 1e12,
                      "global_batch=%lld with num_replicas=%d; with weights their product must be 1 to 1e12",
                      (long long)batch, replicas);
    for (int r = 0; r < replicas; r++) {
        DDP__SAMPLER_NEED(weights[r] > 0 && weights[r] < HUGE_VAL,
                          "weights[%d]=%g; use finite numbers above 0", r, weights[r]);
        total += weights[r];
    }
    DDP__SAMPLER_NEED((double)batch * total < HUGE_VAL,
                      "the sum of the weights is %g, which is too large; divide them by their maximum",
                      total);
    int64_t start = 0;
    for (int r = 0; r < replicas; r++) {
        sum += weights[r];
        int64_t end = batch;
        if (r + 1 < replicas) end = ddp__round_quotient_down((double)batch * sum / total, replicas);
        DDP__SAMPLER_NEED(end > start,
                          "weights[%d]=%g leaves rank %d no sample of global_batch=%lld; use a larger weight "
                          "or a larger global_batch",
                          r, weights[r], r, (long long)batch);
        if (r == s->desc.rank) {
            s->block_start = (uint64_t)start;
            s->block = (uint64_t)(end - start);
        }
        if (batch % replicas || end - start != batch / replicas) s->has_unequal_blocks = 1;
        start = end;
    }
    return DDP_OK;
}

/* Checks the desc, resolves its defaults, and allocates the window of the TORCH orders. */
static ddp_result ddp__sampler_setup(ddp_sampler *s) {
    ddp_sampler_desc *d = &s->desc;
    long long n = (long long)d->dataset_size;
    long long batch = (long long)d->global_batch, window = (long long)d->window;
    if (d->num_replicas == 0) d->num_replicas = 1;
    int replicas = d->num_replicas;
    DDP__SAMPLER_NEED(n >= 1, "dataset_size=%lld; use 1 or more", n);
    DDP__SAMPLER_NEED(replicas > 0, "num_replicas=%d; use 1 or more, or 0 for 1", replicas);
    DDP__SAMPLER_NEED(d->rank >= 0 && d->rank < replicas, "rank=%d; use 0 to %d with num_replicas=%d",
                      d->rank, replicas - 1, replicas);
    DDP__SAMPLER_NEED((unsigned)d->shuffle <= DDP_SHUFFLE_HASHED, "shuffle=%d is not a ddp_shuffle",
                      (int)d->shuffle);
    DDP__SAMPLER_NEED(batch >= 0, "global_batch=%lld is negative; use 0 or more", batch);
    DDP__SAMPLER_NEED(d->weights || batch % replicas == 0,
                      "global_batch=%lld is not a multiple of num_replicas=%d", batch, replicas);
    if (!batch) batch = replicas;
    DDP__SAMPLER_NEED(n <= INT64_MAX - (d->global_batch ? batch : batch - 1),
                      "dataset_size=%lld is too large to pad to a multiple of %lld", n, batch);
    DDP__SAMPLER_NEED(window >= 0, "window=%lld is negative; use 0 or more", window);
    DDP__SAMPLER_NEED(!d->alloc_fn == !d->free_fn, "set both alloc_fn and free_fn, or neither");
    if (!d->alloc_fn) {
        d->alloc_fn = ddp__malloc_default;
        d->free_fn = ddp__free_default;
    }
    s->round = (uint64_t)batch;
    s->block = s->round / (uint64_t)replicas;
    s->block_start = (uint64_t)d->rank * s->block;
    if (d->weights) DDP_TRY(ddp__sampler_set_weighted_block(s));
    d->weights = NULL; /* the caller's */
    ddp_sampler_set_epoch(s, 0);
    if (d->no_shuffle || d->shuffle == DDP_SHUFFLE_HASHED) return DDP_OK;

    long long window_max = (1LL << ddp__location_slot_bits(s)) - 1;
    if (window == 0) window = window_max < DDP__SAMPLER_WINDOW ? window_max : DDP__SAMPLER_WINDOW;
    if (window > s->length) window = s->length > 0 ? (long long)s->length : 1;
    DDP__SAMPLER_NEED(window > 0 && window <= window_max,
                      "window=%lld of dataset_size=%lld is too large for the TORCH orders; use a smaller "
                      "window or DDP_SHUFFLE_HASHED",
                      window, n);
    d->window = window;
    int64_t head_words = (ddp__locations_chain_count(window) + 1) / 2;
    size_t table_words = (size_t)(window + ddp__locations_filter_words(window) + head_words);
    size_t size_bytes = table_words * sizeof *s->table + DDP__MT_WORDS * sizeof *s->mt;
    s->table = (uint64_t *)d->alloc_fn(size_bytes, d->user);
    if (!s->table)
        return ddp_fail_in(DDP_ERR_NO_MEMORY, "ddp_sampler_init", NULL,
                           "%zu bytes for a window of %lld samples could not be allocated", size_bytes,
                           window);
    s->mt = (uint32_t *)(void *)(s->table + table_words);
    return DDP_OK;
}

DDPDEF ddp_result ddp_sampler_init(ddp_sampler *sampler, const ddp_sampler_desc *desc) {
    DDP__NEED(sampler, "sampler is NULL");
    memset(sampler, 0, sizeof *sampler);
    DDP__NEED(desc, "desc is NULL");
    sampler->desc = *desc;
    ddp_result result = ddp__sampler_setup(sampler);
    if (result != DDP_OK) memset(sampler, 0, sizeof *sampler);
    return result;
}

DDPDEF void ddp_sampler_set_epoch(ddp_sampler *sampler, uint64_t epoch) {
    if (sampler && sampler->desc.dataset_size > 0) ddp__sampler_start(sampler, epoch, 0, NULL);
}

DDPDEF int64_t ddp_sampler_batch_size(const ddp_sampler *sampler) {
    return sampler ? (int64_t)sampler->block : 0;
}

DDPDEF int64_t ddp_sampler_length(const ddp_sampler *sampler) {
    return sampler ? sampler->length - sampler->first_index : 0;
}

DDPDEF int64_t ddp_sampler_next(ddp_sampler *sampler, int *is_padding) {
    if (is_padding) *is_padding = 0;
    if (!sampler) return -1;
    if (sampler->cursor >= sampler->length) {
        sampler->ended = 1;
        return -1;
    }
    int64_t index = sampler->cursor++;
    if (is_padding) *is_padding = ddp__sampler_entry(sampler, index) >= sampler->remaining;
    if (sampler->desc.no_shuffle) return (int64_t)ddp__sampler_position(sampler, index);
    int hashed = sampler->desc.shuffle == DDP_SHUFFLE_HASHED;
    if (index < sampler->window_first || index - sampler->window_first >= sampler->window_count) {
        if (hashed)
            ddp__hashed_window(sampler, index);
        else
            ddp__randperm_window(sampler, index);
    }
    return (int64_t)(hashed ? sampler->hashed : sampler->table)[index - sampler->window_first];
}

DDPDEF ddp_result ddp_sampler_seek(ddp_sampler *sampler, int64_t position) {
    long long length = (long long)ddp_sampler_length(sampler);
    DDP__NEED(sampler && sampler->desc.dataset_size > 0,
              "sampler is NULL or not initialized; call ddp_sampler_init first");
    DDP__NEED(position >= 0 && position <= length, "position=%lld; use 0 to %lld on rank %d",
              (long long)position, length, sampler->desc.rank);
    sampler->cursor = sampler->first_index + position;
    sampler->ended = 0;
    return DDP_OK;
}

DDPDEF ddp_result ddp_sampler_save(const ddp_sampler *s, ddp_sampler_state *state) {
    DDP__NEED(s && state && s->desc.dataset_size > 0,
              "sampler or state is NULL, or sampler is not initialized; call ddp_sampler_init first");
    uint64_t in_block = s->ended ? 0 : (uint64_t)s->cursor % s->block;
    /* used: entries that all ranks together have drawn. */
    uint64_t used = s->ended ? s->total : (uint64_t)s->cursor / s->block * s->round;
    uint64_t in_gap = s->gap_count * (s->gap_block - s->gap_used);
    if (used > s->remaining) used = s->remaining;
    if (in_gap > s->remaining) in_gap = s->remaining;
    /* The epoch has ended inside the rest of the batch: drop_last leaves out what no rank has drawn. */
    if (s->ended && s->cursor > 0 && used < in_gap) used = s->remaining;
    const char *cause = NULL;
    int64_t end = 0; /* the cursor of this rank after the round in which a save works */
    if (used < in_gap && s->cursor > 0) {
        cause = "the sampler was loaded inside a global batch";
        end = (int64_t)((in_gap + s->round - 1) / s->round * s->block);
    } else if (in_block && s->has_unequal_blocks) {
        cause = "ranks have unequal blocks of a global batch";
        end = s->cursor - (int64_t)in_block + (int64_t)s->block;
    }
    if (end > s->length) return ddp__bad(__func__, NULL, "%s; save at the end of the epoch", cause);
    if (cause)
        return ddp__bad(__func__, NULL, "%s; save after %lld more samples of this rank", cause,
                        (long long)(end - s->cursor));
    state->seed = s->desc.seed;
    state->epoch = s->epoch;
    state->dataset_size = s->desc.dataset_size;
    state->shuffle = (int32_t)s->desc.shuffle;
    state->no_shuffle = s->desc.no_shuffle != 0;
    /* 1 = nothing was drawn since a load inside a batch: the same state is stored again. */
    int nothing_drawn = used < in_gap;
    uint64_t position = (uint64_t)s->desc.dataset_size;
    if (nothing_drawn)
        position = s->origin;
    else if (used != s->remaining)
        position = ddp__sampler_entry_position(s, used);
    state->position = (int64_t)position;
    state->block_offset = (int64_t)(nothing_drawn ? s->gap_used : in_block);
    state->num_replicas = nothing_drawn ? (int64_t)s->gap_count : s->desc.num_replicas;
    state->global_batch = nothing_drawn ? (int64_t)(s->gap_count * s->gap_block) : s->desc.global_batch;
    return DDP_OK;
}

DDPDEF ddp_result ddp_sampler_load(ddp_sampler *sampler, const ddp_sampler_state *state) {
    const ddp_sampler_desc *d = sampler ? &sampler->desc : NULL;
    DDP__NEED(d && state && d->dataset_size > 0,
              "sampler or state is NULL, or sampler is not initialized; call ddp_sampler_init first");
    long long n = (long long)state->dataset_size;
    long long position = (long long)state->position, offset = (long long)state->block_offset;
    long long replicas = (long long)state->num_replicas, batch = (long long)state->global_batch;
#define DDP__SAMPLER_NEED_SAME(name, saved, here, format, type)                                              \
    DDP__NEED((saved) == (here),                                                                             \
              "state has " name "=" format ", but sampler has " format "; use a sampler with the same desc", \
              (type)(saved), (type)(here))
    DDP__SAMPLER_NEED_SAME("dataset_size", n, d->dataset_size, "%lld", long long);
    DDP__SAMPLER_NEED_SAME("shuffle", state->shuffle, (int32_t)d->shuffle, "%d", int);
    DDP__SAMPLER_NEED_SAME("no_shuffle", state->no_shuffle != 0, (d->no_shuffle != 0), "%d", int);
    DDP__SAMPLER_NEED_SAME("seed", state->seed, d->seed, "%llu", unsigned long long);
#undef DDP__SAMPLER_NEED_SAME
    if (position < 0 || position > n || replicas < 1 || batch < 0 || offset < 0
        || (offset > 0 && (batch % replicas || offset >= batch / replicas || position == n)))
        return ddp_fail_in(DDP_ERR_CORRUPT, __func__, NULL,
                           "position=%lld block_offset=%lld num_replicas=%lld global_batch=%lld is invalid "
                           "in an epoch of %lld samples",
                           position, offset, replicas, batch, n);
    int other_blocks = replicas != d->num_replicas || batch != d->global_batch || sampler->has_unequal_blocks;
    ddp__sampler_start(sampler, state->epoch, (uint64_t)position, other_blocks && offset ? state : NULL);
    if (other_blocks) return DDP_OK;
    sampler->first_index = sampler->cursor = offset;
    /* This rank has used up its part of a short last batch. */
    if (sampler->length < sampler->first_index) sampler->length = sampler->first_index;
    return DDP_OK;
}

DDPDEF void ddp_sampler_free(ddp_sampler *sampler) {
    if (!sampler) return;
    if (sampler->table) sampler->desc.free_fn(sampler->table, sampler->desc.user);
    memset(sampler, 0, sizeof *sampler);
}

//== loader: workers =========================================================================== >>impl-loader

/* Worker threads fill a ring of batches ahead of the consumer, the thread that calls ddp_loader_next. Batches
   are numbered over all epochs. Batch b is stored in slot b % slot_count. With extra_valid_batches 2 and
   prefetch 4, the ring has 2 + 1 + 4 slots:

       batch      4      5      6     |  7      8         9           10
       state      valid  valid  newest|  ready  fetching  unclaimed   not drawn
                                      |  ^ returned       ^           ^ drawn
                                      |                   oldest_open
       consumer   waits until batch `returned` is ready, and returns it. Then the slot of batch 4 is free for
                  batch 11.
       worker     claims a chunk of batch oldest_open, and fetches its samples without the lock. Without an
                  unclaimed sample, one worker draws the indices of batch `drawn` from the sampler.

   A seek sets DDP__LOADER_RESTARTING: workers abandon their chunks. The last one discards the batches from
   `returned` on, and sets the sampler to the consumer's position. */

/* CHUNK_MAX: the largest number of samples that a worker fetches between two uses of the lock. */
enum { DDP__LOADER_CHUNK_MAX = 64, DDP__LOADER_MAX_WORKERS = 64, DDP__LOADER_MAX_PREFETCH = 1 << 16 };
enum { DDP__LOADER_RUNNING, DDP__LOADER_RESTARTING, DDP__LOADER_STOPPING };

typedef struct ddp__loader_slot {
    unsigned char *data; /* its fields, at field_offset */
    int64_t *indices;
    uint8_t *is_padding;
    int64_t count, claimed, done; /* samples: of the batch, claimed by workers, fetched or failed */
    int64_t failed_at;            /* the first sample that failed; count = none */
    int reported;                 /* 1 = ddp_loader_next has reported the failure */
    ddp_saved_error outcome;
} ddp__loader_slot;

typedef struct ddp__loader_worker {
    ddp_loader *loader;
    pthread_t thread;
    int has_ended;
    int64_t batch; /* of the chunk that it fetches; -1 = none */
    int64_t index; /* the sample that it fetches */
    char padding[DDP__LINE];
} ddp__loader_worker;

struct ddp_loader {
    ddp_loader_desc desc;                /* with all defaults resolved */
    ddp_tensor field[DDP_LOADER_FIELDS]; /* of a batch, without data */
    size_t sample_bytes[DDP_LOADER_FIELDS], field_offset[DDP_LOADER_FIELDS];
    void *buffers;
    void (*free_pinned)(void *memory); /* NULL: free_fn frees the buffers */
    ddp_sampler position;              /* of the consumer; no samples are drawn from it */
    ddp_sampler sampler;               /* samples are drawn from it, by the thread that has set drawing */
    int64_t slot_count, chunk;
    ddp__loader_slot *slot;
    ddp__loader_worker worker[DDP__LOADER_MAX_WORKERS];
    int threads;
    pid_t pid;            /* of the process that has the threads */
    pthread_mutex_t lock; /* protects all that follows */
    pthread_cond_t work, ready;
    int64_t returned, drawn, oldest_open; /* oldest_open may have unclaimed samples */
    int drawing, busy;                    /* a worker draws; workers that draw or fetch */
    int references;                       /* of the owner and each worker; the last frees the loader */
    int timed_out;                        /* the last ddp_loader_next exceeded the timeout */
    uint32_t phase; /* DDP__LOADER_RUNNING ...; a worker inside a chunk reads it without the lock */
    ddp_loader_stats stats;
};

static ddp__loader_slot *ddp__loader_slot_of(const ddp_loader *l, int64_t batch) {
    return &l->slot[batch % l->slot_count];
}
/* Returns 1 if the next batch is complete or has failed. */
static int ddp__loader_is_ready(const ddp_loader *l) {
    const ddp__loader_slot *slot = ddp__loader_slot_of(l, l->returned);
    return l->phase != DDP__LOADER_RESTARTING && l->returned < l->drawn && slot->done == slot->count;
}

/* Runs after a worker has finished something: completes a restart, and wakes the consumer if its batch is
   ready. */
static void ddp__loader_update(ddp_loader *l) {
    if (l->phase == DDP__LOADER_RESTARTING && l->busy == 0) {
        l->sampler = l->position;
        l->drawn = l->oldest_open = l->returned;
        ddp__store(&l->phase, (uint32_t)DDP__LOADER_RUNNING);
        pthread_cond_broadcast(&l->work);
    }
    if (ddp__loader_is_ready(l)) pthread_cond_signal(&l->ready);
}

/* Lets workers fetch the samples of a batch. */
static void ddp__loader_offer_batch(ddp_loader *l, int64_t batch) {
    ddp__loader_slot *slot = ddp__loader_slot_of(l, batch);
    slot->claimed = slot->done = slot->reported = 0;
    slot->failed_at = slot->count;
    if (l->oldest_open > batch) l->oldest_open = batch;
    if (slot->count > l->chunk)
        pthread_cond_broadcast(&l->work);
    else
        pthread_cond_signal(&l->work);
}

static void ddp__loader_draw_batch(ddp_loader *l) {
    ddp__loader_slot *slot = ddp__loader_slot_of(l, l->drawn);
    l->drawing = 1;
    pthread_mutex_unlock(&l->lock);
    int64_t remaining = l->sampler.length - l->sampler.cursor;
    slot->count = remaining < l->desc.batch_size ? remaining : l->desc.batch_size;
    for (int64_t i = 0; i < slot->count; i++) {
        int is_padding;
        slot->indices[i] = ddp_sampler_next(&l->sampler, &is_padding);
        slot->is_padding[i] = (uint8_t)is_padding;
    }
    pthread_mutex_lock(&l->lock);
    l->drawing = 0;
    ddp__loader_offer_batch(l, l->drawn++);
}

/* Fetches a chunk of the oldest batch with unclaimed samples. sample: index in the batch; after the loop, of
   the one that failed. */
static void ddp__loader_fetch_chunk(ddp_loader *l, ddp__loader_worker *w) {
    ddp__loader_slot *slot = ddp__loader_slot_of(l, l->oldest_open);
    int64_t begin = slot->claimed, sample = begin;
    int64_t end = slot->count - begin < l->chunk ? slot->count : begin + l->chunk;
    const char *error_text = ddp_last_error();
    ddp_result result = DDP_OK;
    void *destination[DDP_LOADER_FIELDS];
    slot->claimed = end;
    w->batch = l->oldest_open;
    pthread_mutex_unlock(&l->lock);
    double seconds = -ddp_now();
    for (int f = 0; f < l->desc.field_count; f++)
        destination[f] = slot->data + l->field_offset[f] + (size_t)sample * l->sample_bytes[f];
    for (; sample < end && ddp__load_relaxed(&l->phase) == DDP__LOADER_RUNNING; sample++) {
        __atomic_store_n(&w->index, slot->indices[sample], __ATOMIC_RELAXED);
        /* The epoch changes only while no worker is inside a chunk. */
        if (l->desc.fetch)
            result = l->desc.fetch(l->desc.fetch_user, slot->indices[sample], destination);
        else
            result = l->desc.fetch_epoch(l->desc.fetch_user, slot->indices[sample], l->sampler.epoch,
                                         destination);
        if (result != DDP_OK) break;
        for (int f = 0; f < l->desc.field_count; f++)
            destination[f] = (unsigned char *)destination[f] + l->sample_bytes[f];
    }
    seconds += ddp_now();
    pthread_mutex_lock(&l->lock);
    w->batch = -1;
    l->stats.fetch_seconds += seconds;
    slot->done += end - begin;
    if (result == DDP_OK) return;
    slot->done += slot->count - slot->claimed; /* the rest is not fetched in this attempt */
    slot->claimed = slot->count;
    /* Chunks are claimed in order, so that the first failing sample of the batch is always found. */
    if (sample >= slot->failed_at) return;
    slot->failed_at = sample;
    slot->outcome.result = result;
    snprintf(slot->outcome.text, sizeof slot->outcome.text, "sample %lld: %.450s",
             (long long)slot->indices[sample], error_text[0] ? error_text : ddp_result_name(result));
}

/* Draws a batch or fetches a chunk. Called with the lock held, and releases it meanwhile. Returns 0 if there
   is nothing to do. */
static int ddp__loader_work_once(ddp_loader *l, ddp__loader_worker *w) {
    if (l->phase == DDP__LOADER_RESTARTING) return 0;
    for (; l->oldest_open < l->drawn; l->oldest_open++) {
        const ddp__loader_slot *slot = ddp__loader_slot_of(l, l->oldest_open);
        if (slot->claimed < slot->count) break;
    }
    int all_claimed = l->oldest_open == l->drawn;
    int may_draw = !l->drawing && l->drawn < l->returned + l->desc.prefetch
                   && l->sampler.cursor < l->sampler.length;
    if (all_claimed && !may_draw) return 0;
    l->busy++;
    if (all_claimed)
        ddp__loader_draw_batch(l);
    else
        ddp__loader_fetch_chunk(l, w);
    l->busy--;
    ddp__loader_update(l);
    return 1;
}

static void ddp__loader_free(ddp_loader *l) {
    ddp_sampler_free(&l->sampler);
    if (l->free_pinned)
        l->free_pinned(l->buffers);
    else
        ddp__aligned_free(l->desc.free_fn, l->desc.user, l->buffers);
    pthread_cond_destroy(&l->work);
    pthread_cond_destroy(&l->ready);
    pthread_mutex_destroy(&l->lock);
    ddp__aligned_free(l->desc.free_fn, l->desc.user, l);
}

static void *ddp__loader_thread_main(void *argument) {
    ddp__loader_worker *w = (ddp__loader_worker *)argument;
    ddp_loader *l = w->loader;
    pthread_mutex_lock(&l->lock);
    while (l->phase != DDP__LOADER_STOPPING) {
        ddp__error_text[0] = 0; /* a fetch may fail without an error line */
        if (!ddp__loader_work_once(l, w)) pthread_cond_wait(&l->work, &l->lock);
    }
    w->has_ended = 1;
    int is_last = --l->references == 0;
    pthread_cond_signal(&l->ready);
    pthread_mutex_unlock(&l->lock);
    if (is_last) ddp__loader_free(l);
    return NULL;
}

//== loader: consumer and public calls =================================================== >>impl-loader-calls

/* The calls of >>loader. The consumer's calls take the lock; set_epoch, seek and load restart the workers at
   a new position. */

/* Waits for `ready`; may return early. Returns 0 after the deadline. */
static int ddp__loader_wait_until(ddp_loader *l, double deadline) {
    struct timespec t;
    t.tv_sec = (time_t)deadline;
    t.tv_nsec = (long)((deadline - (double)t.tv_sec) * 1e9);
    return pthread_cond_timedwait(&l->ready, &l->lock, &t) != ETIMEDOUT;
}

static ddp_result ddp__loader_wait_ready(ddp_loader *l) {
    const ddp__loader_worker *stuck = NULL; /* the worker with a chunk of the oldest batch */
    double start = ddp_now(), deadline = start + 1e-3 * l->desc.timeout_ms;
    if (!l->threads)
        while (!ddp__loader_is_ready(l)) ddp__loader_work_once(l, l->worker);
    while (!ddp__loader_is_ready(l) && ddp__loader_wait_until(l, deadline)) {
    }
    l->timed_out = !ddp__loader_is_ready(l);
    if (l->threads) l->stats.wait_seconds += ddp_now() - start;
    if (!l->timed_out) return DDP_OK;
    for (const ddp__loader_worker *w = l->worker; w < l->worker + l->threads; w++)
        if (w->batch >= 0 && (!stuck || w->batch < stuck->batch)) stuck = w;
    if (!stuck)
        return ddp_fail(DDP_ERR_TIMEOUT, "ddp_loader_next: timed out after %d ms: no sample is being fetched",
                        l->desc.timeout_ms);
    return ddp_fail(DDP_ERR_TIMEOUT,
                    "ddp_loader_next: sample %lld: timed out after %d ms: fetch has not returned",
                    (long long)ddp__load_relaxed(&stuck->index), l->desc.timeout_ms);
}

static ddp_result ddp__loader_next(ddp_loader *l, ddp_batch *out) {
    ddp__loader_slot *slot = ddp__loader_slot_of(l, l->returned);
    memcpy(out->fields, l->field, sizeof l->field);
    if (l->position.cursor >= l->position.length) {
        l->position.ended = 1;
        return DDP_OK;
    }
    ddp__loader_update(l);
    if (ddp__loader_is_ready(l) && slot->reported) ddp__loader_offer_batch(l, l->returned);
    if (!ddp__loader_is_ready(l)) DDP_TRY(ddp__loader_wait_ready(l));
    slot->reported = slot->failed_at < slot->count;
    if (slot->reported) return ddp_error_restore(&slot->outcome);
    out->count = slot->count;
    out->indices = slot->indices;
    out->is_padding = slot->is_padding;
    for (int f = 0; f < l->desc.field_count; f++) {
        out->fields[f].shape[0] = slot->count;
        out->fields[f].data = slot->data + l->field_offset[f];
    }
    l->returned++;
    l->position.cursor += slot->count;
    l->stats.batches++;
    l->stats.samples += (uint64_t)slot->count;
    /* Wakes a worker only when half of the batches are gone, not for every small batch. */
    if (2 * (l->drawn - l->returned) <= l->desc.prefetch) pthread_cond_signal(&l->work);
    return DDP_OK;
}

/* Returns 1 in a process forked from the one that created the loader: the workers are missing, and one of
   them may have held the lock at the fork. */
static int ddp__loader_is_forked(const ddp_loader *l) { return l->threads && l->pid != getpid(); }

static ddp_result ddp__loader_check(const ddp_loader *l, const char *call_name) {
    DDP_CHECK(call_name, NULL, l, "loader is NULL");
    DDP_CHECK(call_name, NULL, !ddp__loader_is_forked(l),
              "process %d was forked from process %d, which has the loader's workers; create a loader in the "
              "forked process",
              (int)getpid(), (int)l->pid);
    return DDP_OK;
}

DDPDEF ddp_result ddp_loader_next(ddp_loader *loader, ddp_batch *out) {
    DDP__NEED(loader && out, "loader or out is NULL");
    DDP_TRY(ddp__loader_check(loader, __func__));
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&loader->lock);
    ddp_result result = ddp__loader_next(loader, out);
    pthread_mutex_unlock(&loader->lock);
    return result;
}

static ddp_result ddp__loader_restart(ddp_loader *l, const ddp_sampler *position) {
    pthread_mutex_lock(&l->lock);
    l->position = *position;
    ddp__store(&l->phase, (uint32_t)DDP__LOADER_RESTARTING);
    ddp__loader_update(l);
    pthread_mutex_unlock(&l->lock);
    return DDP_OK;
}

DDPDEF ddp_result ddp_loader_set_epoch(ddp_loader *loader, uint64_t epoch) {
    DDP_TRY(ddp__loader_check(loader, __func__));
    ddp_sampler position = loader->position;
    ddp_sampler_set_epoch(&position, epoch);
    return ddp__loader_restart(loader, &position);
}

static int64_t ddp__loader_batch_count(const ddp_loader *l, int64_t samples) {
    return samples / l->desc.batch_size + (samples % l->desc.batch_size != 0);
}

DDPDEF int64_t ddp_loader_length(const ddp_loader *loader) {
    return loader ? ddp__loader_batch_count(loader, loader->position.length - loader->position.cursor) : 0;
}

DDPDEF ddp_result ddp_loader_seek(ddp_loader *loader, int64_t batch) {
    DDP_PUBLIC_CALL(ddp_loader_seek);
    DDP_TRY(ddp__loader_check(loader, __func__));
    ddp_sampler position = loader->position;
    int64_t samples = ddp_sampler_length(&position), batches = ddp__loader_batch_count(loader, samples);
    DDP__NEED(batch >= 0 && batch <= batches, "batch=%lld; use 0 to %lld", (long long)batch,
              (long long)batches);
    DDP_TRY(ddp_sampler_seek(&position, batch < batches ? batch * loader->desc.batch_size : samples));
    return ddp__loader_restart(loader, &position);
}

DDPDEF ddp_result ddp_loader_save(const ddp_loader *loader, ddp_sampler_state *state) {
    DDP_PUBLIC_CALL(ddp_loader_save);
    DDP__NEED(loader, "loader is NULL");
    DDP__NEED(state, "state is NULL");
    return ddp_sampler_save(&loader->position, state);
}

DDPDEF ddp_result ddp_loader_load(ddp_loader *loader, const ddp_sampler_state *state) {
    DDP_PUBLIC_CALL(ddp_loader_load);
    DDP_TRY(ddp__loader_check(loader, __func__));
    DDP__NEED(state, "state is NULL");
    ddp_sampler position = loader->position;
    DDP_TRY(ddp_sampler_load(&position, state));
    return ddp__loader_restart(loader, &position);
}

DDPDEF ddp_result ddp_loader_get_stats(const ddp_loader *loader, ddp_loader_stats *stats) {
    DDP__NEED(loader && stats, "loader or stats is NULL");
    DDP_TRY(ddp__loader_check(loader, __func__));
    pthread_mutex_t *lock = (pthread_mutex_t *)&loader->lock;
    pthread_mutex_lock(lock);
    *stats = loader->stats;
    pthread_mutex_unlock(lock);
    return DDP_OK;
}

DDPDEF void ddp_loader_destroy(ddp_loader *l) {
    DDP_KEEP_ERROR;
    if (!l || ddp__loader_is_forked(l)) return; /* a forked process must not touch the loader */
    pthread_mutex_lock(&l->lock);
    int timeout_ms = l->timed_out && l->desc.timeout_ms > 1000 ? 1000 : l->desc.timeout_ms;
    double deadline = ddp_now() + 1e-3 * timeout_ms;
    ddp__store(&l->phase, (uint32_t)DDP__LOADER_STOPPING);
    pthread_cond_broadcast(&l->work);
    while (l->references > 1 && ddp__loader_wait_until(l, deadline)) {
    }
    for (int i = 0; i < l->threads; i++) {
        if (l->worker[i].has_ended)
            pthread_join(l->worker[i].thread, NULL);
        else
            pthread_detach(l->worker[i].thread);
    }
    int is_last = --l->references == 0; /* otherwise the last worker frees it */
    pthread_mutex_unlock(&l->lock);
    if (is_last) ddp__loader_free(l);
}

#define DDP__LOADER_NEED(condition, ...) DDP_CHECK("ddp_loader_create", NULL, condition, __VA_ARGS__)

static ddp_result ddp__loader_resolve_desc(ddp_loader_desc *d) {
    const struct {
        const char *name;
        int *value, low, high, default_value;
    } ranges[] = {
        {"field_count", &d->field_count, 1, DDP_LOADER_FIELDS, 0},
        {"worker_count", &d->worker_count, -1, DDP__LOADER_MAX_WORKERS, 1},
        {"prefetch", &d->prefetch, 0, DDP__LOADER_MAX_PREFETCH, 0},
        {"extra_valid_batches", &d->extra_valid_batches, 0, DDP__LOADER_MAX_PREFETCH, 1},
        {"timeout_ms", &d->timeout_ms, 0, INT32_MAX, 600000},
    };
    DDP__LOADER_NEED(d->sampler.dataset_size >= 1, "sampler.dataset_size=%lld; use 1 or more",
                     (long long)d->sampler.dataset_size);
    DDP__LOADER_NEED(d->batch_size >= (d->sampler.global_batch == 0),
                     "batch_size=%lld; use 1 or more samples of this rank per batch",
                     (long long)d->batch_size);
    DDP__LOADER_NEED(d->fetch || d->fetch_epoch, "fetch is NULL; set it to a function that writes a sample");
    DDP__LOADER_NEED(!d->fetch || !d->fetch_epoch, "set fetch or fetch_epoch, not both");
    DDP__LOADER_NEED(d->fields, "fields is NULL; list the fields of a sample");
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        int *value = ranges[i].value, low = ranges[i].low, high = ranges[i].high;
        DDP__LOADER_NEED(*value >= low && *value <= high, "%s=%d; use %d to %d", ranges[i].name, *value, low,
                         high);
        if (*value == 0) *value = ranges[i].default_value;
    }
    DDP__LOADER_NEED(!d->alloc_fn == !d->free_fn, "set both alloc_fn and free_fn, or neither");
    if (d->worker_count == -1) d->worker_count = 0;
    if (!d->prefetch || !d->worker_count) d->prefetch = d->worker_count ? 2 * d->worker_count : 1;
    if (!d->alloc_fn && d->group) {
        d->alloc_fn = d->group->desc.alloc_fn;
        d->free_fn = d->group->desc.free_fn;
        d->user = d->group->desc.user;
    }
    if (!d->alloc_fn) {
        d->alloc_fn = ddp__malloc_default;
        d->free_fn = ddp__free_default;
    }
    if (!d->sampler.alloc_fn && !d->sampler.free_fn) {
        d->sampler.alloc_fn = d->alloc_fn;
        d->sampler.free_fn = d->free_fn;
        d->sampler.user = d->user;
    }
    return DDP_OK;
}

/* Allocates the slots. Each holds the fields of a batch, then the lists of indices and padding. */
static ddp_result ddp__loader_alloc_slots(ddp_loader *l) {
    const ddp_loader_desc *d = &l->desc;
    const ddp_device *device = d->group ? ddp_group_device(d->group) : ddp_device_cpu();
    /* max_bytes: of a field, so that the sizes below cannot overflow. */
    int64_t max_bytes = INT64_MAX / 4 / l->slot_count / DDP_LOADER_FIELDS;
    size_t batch = (size_t)d->batch_size, slots = (size_t)l->slot_count, size_bytes = 0;
    for (int f = 0; f < d->field_count; f++) {
        const ddp_tensor *t = &d->fields[f];
        int64_t bytes = (int64_t)ddp_dtype_size(t->dtype), elements = ddp_tensor_count(t);
        DDP__LOADER_NEED(bytes, "fields[%d].dtype=%d is invalid; use DDP_F32 to DDP_U64", f, (int)t->dtype);
        DDP__LOADER_NEED(t->ndim >= 0 && t->ndim < DDP_MAX_NDIM, "fields[%d].ndim=%d; use 0 to %d", f,
                         t->ndim, DDP_MAX_NDIM - 1);
        DDP__LOADER_NEED(elements > 0, "fields[%d].shape has an entry below 1, or its product overflows", f);
        DDP__LOADER_NEED(d->batch_size <= max_bytes / 16
                             && elements <= max_bytes / bytes / d->batch_size - DDP__ALIGN,
                         "batch_size=%lld: %lld batches of fields[%d] do not fit in memory; use a smaller "
                         "batch_size, prefetch or extra_valid_batches",
                         (long long)d->batch_size, (long long)l->slot_count, f);
        l->field_offset[f] = size_bytes;
        l->sample_bytes[f] = (size_t)(elements * bytes);
        size_bytes += ddp_round_up(l->sample_bytes[f] * batch, DDP__ALIGN);
        l->field[f].dtype = t->dtype;
        l->field[f].ndim = t->ndim + 1;
        memcpy(l->field[f].shape + 1, t->shape, (size_t)t->ndim * sizeof *t->shape);
    }
    size_t list_offset = size_bytes;
    size_bytes += ddp_round_up(batch * 9, DDP__ALIGN);
    if (device->alloc_pinned)
        DDP_TRY(device->alloc_pinned(d->group, slots * size_bytes, &l->buffers));
    else if (!(l->buffers = ddp__aligned_alloc(d->alloc_fn, d->user, slots * size_bytes)))
        return ddp_fail(DDP_ERR_NO_MEMORY,
                        "ddp_loader_create: %zu batches of %zu bytes could not be allocated; use a smaller "
                        "batch_size, prefetch or extra_valid_batches",
                        slots, size_bytes);
    l->free_pinned = device->alloc_pinned ? device->free_pinned : NULL;
    for (size_t i = 0; i < slots; i++) {
        l->slot[i].data = (unsigned char *)l->buffers + i * size_bytes;
        l->slot[i].indices = (int64_t *)(void *)(l->slot[i].data + list_offset);
        l->slot[i].is_padding = l->slot[i].data + list_offset + batch * 8;
    }
    return DDP_OK;
}

DDPDEF ddp_result ddp_loader_create(ddp_loader **out, const ddp_loader_desc *desc) {
    DDP_PUBLIC_CALL(ddp_loader_create);
    pthread_condattr_t clock;
    if (out) *out = NULL;
    DDP__NEED(out && desc, "out or desc is NULL");
    ddp_loader_desc d = *desc;
    DDP_TRY(ddp__loader_resolve_desc(&d));
    size_t slots = (size_t)d.prefetch + (size_t)d.extra_valid_batches + 1;
    size_t size_bytes = sizeof(ddp_loader) + slots * sizeof(ddp__loader_slot);
    ddp_loader *l = (ddp_loader *)ddp__aligned_alloc(d.alloc_fn, d.user, size_bytes);
    if (!l)
        return ddp_fail(DDP_ERR_NO_MEMORY, "ddp_loader_create: %zu bytes could not be allocated", size_bytes);
    memset(l, 0, size_bytes);
    l->desc = d;
    l->slot = (ddp__loader_slot *)(void *)(l + 1);
    l->slot_count = (int64_t)slots;
    l->phase = DDP__LOADER_RESTARTING; /* workers wait for the first next, set_epoch, seek or load */
    l->pid = getpid();
    pthread_mutex_init(&l->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&l->ready, &clock);
    pthread_cond_init(&l->work, NULL);
    pthread_condattr_destroy(&clock);
    ddp_result result = ddp_sampler_init(&l->sampler, &d.sampler);
    if (!d.batch_size) d.batch_size = l->desc.batch_size = ddp_sampler_batch_size(&l->sampler);
    l->chunk = d.worker_count > 1 ? (d.batch_size - 1) / d.worker_count + 1 : d.batch_size;
    if (l->chunk > DDP__LOADER_CHUNK_MAX) l->chunk = DDP__LOADER_CHUNK_MAX;
    if (result == DDP_OK) result = ddp__loader_alloc_slots(l);
    l->desc.fields = NULL; /* the caller's */
    l->position = l->sampler;
    while (result == DDP_OK && l->threads < d.worker_count) {
        ddp__loader_worker *w = &l->worker[l->threads];
        w->loader = l;
        w->batch = -1;
        int error = ddp__start_thread(&w->thread, ddp__loader_thread_main, w);
        if (error)
            result = ddp_fail(DDP_ERR_SYSTEM, "ddp_loader_create: worker %d could not be started: %s",
                              l->threads, strerror(error));
        else
            l->threads++;
    }
    l->references = 1 + l->threads;
    if (result == DDP_OK)
        *out = l;
    else
        ddp_loader_destroy(l);
    return result;
}

//== public collectives ======================================================================== >>impl-public

/* The public calls that transfer data. Each one fills in a ddp_call, which is checked here and issued by the
   queue (>>impl-queue). */

/* Returns the elements of the buffer of a call without counts; 0 = this rank needs no buffer. no_buffer,
   on_root, blocks: flags of the call's shape; blocks = one block per rank. */
static inline size_t ddp__buffer_elements(const ddp_group *group, const ddp_call *call, int no_buffer,
                                          int on_root, int blocks) {
    int shape = ddp__call_shapes[call->kind].shape;
    if (shape & no_buffer || (shape & on_root && call->root != group->rank)) return 0;
    return call->count * (size_t)(shape & blocks ? group->world_size : 1);
}

/* The same for a buffer with counts; SIZE_MAX if it does not fit in memory. Without *offsets the blocks are
   packed, and their offsets are written to packed. *sum: of all counts. */
static inline size_t ddp__buffer_elements_v(const ddp_group *group, size_t max_count, const size_t *counts,
                                            const size_t **offsets, size_t *packed, size_t *sum) {
    size_t end = 0;
    *sum = 0;
    for (int r = 0; r < group->world_size; r++) {
        packed[r] = *offsets ? (*offsets)[r] : *sum;
        if (counts[r] > max_count || packed[r] > max_count || *sum > max_count) return SIZE_MAX;
        if (counts[r] && packed[r] + counts[r] > end) end = packed[r] + counts[r];
        *sum += counts[r];
    }
    *offsets = packed;
    return end;
}

static int ddp__overlap(const void *a, size_t a_size, const void *b, size_t b_size) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a_size && b_size && x < y + b_size && y < x + a_size;
}

#define DDP__CALL_NEED(condition, ...) DDP_CHECK(form->name, group, condition, __VA_ARGS__)

/* Checks, completes and issues a call as the user made it. */
static ddp_result ddp__check_and_issue(ddp_group *group, ddp_call *call, ddp_work *work) {
    const struct ddp__call_shape *form = &ddp__call_shapes[call->kind];
    const int p2p = ddp__is_p2p(call->kind);
    size_t element = ddp_dtype_size(call->dtype);
    DDP__CALL_NEED(group, "group is NULL");
    DDP__CALL_NEED(!form->root || (call->root >= 0 && call->root < group->world_size),
                   "%s=%d; use ranks 0 to %d", form->root, call->root, group->world_size - 1);
    DDP__CALL_NEED(element, "dtype=%d is invalid; use DDP_F32 to DDP_U64", (int)call->dtype);
    DDP__CALL_NEED(!ddp__has_op(call->kind) || (unsigned)call->op <= DDP_OP_PROD, "op=%d is not a ddp_op",
                   (int)call->op);
    size_t blocks = p2p ? 1 : (size_t)group->world_size;
    size_t max_count = SIZE_MAX / 2 / element;
    DDP__CALL_NEED(call->count <= max_count / blocks, "count=%llu x %zu blocks of %s does not fit in memory",
                   (unsigned long long)call->count, blocks, ddp_dtype_name(call->dtype));
    size_t send_size = ddp__buffer_elements(group, call, DDP__NO_SEND, DDP__FROM_ROOT, DDP__SPLITS);
    size_t recv_size = ddp__buffer_elements(group, call, DDP__NO_RECV, DDP__TO_ROOT, DDP__JOINS);
    if (form->shape & DDP__COUNTED) {
        size_t *packed = (size_t *)__builtin_alloca(2 * blocks * sizeof *packed), sum;
        DDP__CALL_NEED(call->send_counts || !(form->shape & DDP__SPLITS), "send_counts is NULL");
        DDP__CALL_NEED(call->recv_counts, "recv_counts is NULL");
        if (call->send_counts)
            send_size = ddp__buffer_elements_v(group, max_count, call->send_counts, &call->send_offsets,
                                               packed, &sum);
        recv_size = ddp__buffer_elements_v(group, max_count, call->recv_counts, &call->recv_offsets,
                                           packed + blocks, &sum);
        DDP__CALL_NEED(send_size <= max_count && recv_size <= max_count,
                       "the sum of the counts does not fit in memory");
        DDP__CALL_NEED(call->send_counts || call->count == call->recv_counts[group->rank],
                       "send_count=%zu, but recv_counts[%d]=%zu; give both the same", call->count,
                       group->rank, call->recv_counts[group->rank]);
        DDP__CALL_NEED(!call->send_counts || group->world_size > 1
                           || call->send_counts[0] == call->recv_counts[0],
                       "send_counts[0]=%zu, but recv_counts[0]=%zu; give both the same", call->send_counts[0],
                       call->recv_counts[0]);
        call->count = call->send_counts ? 0 : sum;
    }
    DDP__CALL_NEED(!p2p || call->root != group->rank, "peer is this rank itself; copy the buffer");
    DDP__CALL_NEED(!p2p || call->tag >= 0, "tag is negative; use 0 or more");
    DDP__CALL_NEED(call->send || !send_size, "%s is NULL", p2p ? "buf" : "send");
    DDP__CALL_NEED(call->recv || !recv_size, "%s is NULL", p2p ? "buf" : "recv");
    if (ddp__overlap(call->send, send_size * element, call->recv, recv_size * element)) {
        DDP__CALL_NEED(call->kind != DDP_CALL_ALL_TO_ALL && call->kind != DDP_CALL_ALL_TO_ALL_V,
                       "send and recv overlap, but this call has no in-place form; use separate buffers");
        ddp_bytes out = ddp_call_sends(call, group->rank, group->rank);
        ddp_bytes in = ddp_call_receives(call, group->rank, group->rank);
        DDP__CALL_NEED((uintptr_t)call->send + out.begin == (uintptr_t)call->recv + in.begin,
                       "send and recv overlap outside the in-place rule of the call; use separate buffers");
    }
    if (call->op == DDP_OP_AVG) call->divisor = (uint64_t)group->world_size;
    return p2p ? ddp__p2p_issue(group, call, work) : ddp__issue(group, call, work);
}

static ddp_result ddp__collective(ddp_group *group, ddp_call_kind kind, const void *send, void *recv,
                                  size_t count, ddp_dtype dtype, ddp_op op, int root, ddp_work *work) {
    ddp_call call = ddp__call_of(kind, send, recv, count, dtype);
    call.op = op;
    call.root = root;
    return ddp__check_and_issue(group, &call, work);
}

DDPDEF ddp_result ddp_all_reduce(ddp_group *group, const void *send, void *recv, size_t count,
                                 ddp_dtype dtype, ddp_op op, ddp_work *work) {
    return ddp__collective(group, DDP_CALL_ALL_REDUCE, send, recv, count, dtype, op, -1, work);
}

DDPDEF ddp_result ddp_reduce(ddp_group *group, const void *send, void *recv, size_t count, ddp_dtype dtype,
                             ddp_op op, int root, ddp_work *work) {
    return ddp__collective(group, DDP_CALL_REDUCE, send, recv, count, dtype, op, root, work);
}

DDPDEF ddp_result ddp_broadcast(ddp_group *group, void *buf, size_t count, ddp_dtype dtype, int root,
                                ddp_work *work) {
    return ddp__collective(group, DDP_CALL_BROADCAST, NULL, buf, count, dtype, DDP_OP_SUM, root, work);
}

DDPDEF ddp_result ddp_gather(ddp_group *group, const void *send, void *recv, size_t send_count,
                             ddp_dtype dtype, int root, ddp_work *work) {
    return ddp__collective(group, DDP_CALL_GATHER, send, recv, send_count, dtype, DDP_OP_SUM, root, work);
}

DDPDEF ddp_result ddp_scatter(ddp_group *group, const void *send, void *recv, size_t recv_count,
                              ddp_dtype dtype, int root, ddp_work *work) {
    return ddp__collective(group, DDP_CALL_SCATTER, send, recv, recv_count, dtype, DDP_OP_SUM, root, work);
}

DDPDEF ddp_result ddp_all_gather(ddp_group *group, const void *send, void *recv, size_t send_count,
                                 ddp_dtype dtype, ddp_work *work) {
    return ddp__collective(group, DDP_CALL_ALL_GATHER, send, recv, send_count, dtype, DDP_OP_SUM, -1, work);
}

DDPDEF ddp_result ddp_reduce_scatter(ddp_group *group, const void *send, void *recv, size_t recv_count,
                                     ddp_dtype dtype, ddp_op op, ddp_work *work) {
    return ddp__collective(group, DDP_CALL_REDUCE_SCATTER, send, recv, recv_count, dtype, op, -1, work);
}

DDPDEF ddp_result ddp_all_to_all(ddp_group *group, const void *send, void *recv, size_t count_per_peer,
                                 ddp_dtype dtype, ddp_work *work) {
    return ddp__collective(group, DDP_CALL_ALL_TO_ALL, send, recv, count_per_peer, dtype, DDP_OP_SUM, -1,
                           work);
}

DDPDEF ddp_result ddp_send(ddp_group *group, const void *buf, size_t count, ddp_dtype dtype, int peer,
                           int tag, ddp_work *work) {
    ddp_call call = ddp__call_of(DDP_CALL_SEND, buf, NULL, count, dtype);
    call.root = peer;
    call.tag = tag;
    return ddp__check_and_issue(group, &call, work);
}

DDPDEF ddp_result ddp_recv(ddp_group *group, void *buf, size_t count, ddp_dtype dtype, int peer, int tag,
                           ddp_work *work) {
    ddp_call call = ddp__call_of(DDP_CALL_RECV, NULL, buf, count, dtype);
    call.root = peer;
    call.tag = tag;
    return ddp__check_and_issue(group, &call, work);
}

DDPDEF ddp_result ddp_barrier(ddp_group *group) {
    return ddp__collective(group, DDP_CALL_BARRIER, NULL, NULL, 0, DDP_U8, DDP_OP_SUM, -1, NULL);
}

DDPDEF ddp_result ddp_all_gather_v(ddp_group *group, const void *send, size_t send_count, void *recv,
                                   const size_t *recv_counts, const size_t *recv_offsets, ddp_dtype dtype,
                                   ddp_work *work) {
    ddp_call call = ddp__call_of(DDP_CALL_ALL_GATHER_V, send, recv, send_count, dtype);
    call.recv_counts = recv_counts;
    call.recv_offsets = recv_offsets;
    return ddp__check_and_issue(group, &call, work);
}

DDPDEF ddp_result ddp_all_to_all_v(ddp_group *group, const void *send, const size_t *send_counts,
                                   const size_t *send_offsets, void *recv, const size_t *recv_counts,
                                   const size_t *recv_offsets, ddp_dtype dtype, ddp_work *work) {
    ddp_call call = ddp__call_of(DDP_CALL_ALL_TO_ALL_V, send, recv, 0, dtype);
    call.send_counts = send_counts;
    call.send_offsets = send_offsets;
    call.recv_counts = recv_counts;
    call.recv_offsets = recv_offsets;
    return ddp__check_and_issue(group, &call, work);
}

#if defined(__cplusplus)
}
#endif

#endif /* DDP_IMPLEMENTATION */

/*  MIT License

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

/*  ddp_pipeline.h - pipeline parallelism: schedules as data that are checked before they run, and a runner.

    A model is cut into stages on different ranks. Micro-batches pass through them, forward and backward. A
    schedule is a list of actions per rank. It can be generated, read from a file or built from measured
    costs; then it is proven free of deadlocks, simulated, drawn and run.

USAGE
    #define DDP_IMPLEMENTATION       in exactly one source file: the bodies of ddp.h and of this header
    #include "ddp_pipeline.h"
    Or DDP_PIPELINE_IMPLEMENTATION for only the bodies of this header. Link with -lpthread -lm.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp_pipeline.h"
    #include <stdio.h>

    int main(void) {                                 // what would 4 ranks lose with 8 micro-batches?
        static char picture[4096];
        ddp_schedule_kind kinds[] = {DDP_SCHEDULE_GPIPE, DDP_SCHEDULE_1F1B, DDP_SCHEDULE_ZB_H1,
                                     DDP_SCHEDULE_ZB_H2};
        for (int k = 0; k < 4; k++) {
            ddp_schedule_desc desc = DDP_ZERO;
            ddp_schedule_report report = DDP_ZERO;
            ddp_schedule *schedule;
            size_t size_bytes = sizeof picture;
            desc.kind = kinds[k], desc.rank_count = 4, desc.microbatch_count = 8;
            if (ddp_schedule_create(&schedule, &desc) != DDP_OK) return puts(ddp_last_error()), 1;
            if (ddp_schedule_check(schedule) != DDP_OK) return puts(ddp_last_error()), 1;
            if (ddp_schedule_simulate(schedule, NULL, &report) != DDP_OK) return 1;
            if (ddp_schedule_write(schedule, DDP_SCHEDULE_TEXT, picture, &size_bytes) != DDP_OK) return 1;
            printf("%s: bubble %.3f, %d micro-batches in flight\n%s\n", ddp_schedule_kind_name(kinds[k]),
                   report.bubble_rate, report.peak_in_flight, picture);
            ddp_schedule_destroy(schedule);
        }
        return 0;
    }

CONTENTS      (search for the tags)
    >>config  >>types  >>descs  >>api  >>impl-structs  >>impl-schedule-kinds  >>impl-schedule-graph
    >>impl-schedule-check  >>impl-schedule-execute  >>impl-schedule-auto  >>impl-schedule-search
    >>impl-schedule-parse  >>impl-schedule-lower  >>impl-schedule-draw  >>impl-schedule-svg
    >>impl-schedule-trace  >>impl-schedule-balance  >>impl-pipeline-structs  >>impl-pipeline-check
    >>impl-pipeline-gradients  >>impl-pipeline-links  >>impl-pipeline-memory
    >>impl-pipeline-messages  >>impl-pipeline-offload  >>impl-pipeline-callbacks  >>impl-pipeline-step
    >>impl-pipeline-create  >>impl-pipeline-report  >>impl-public

CONCEPTS
    Stage      A contiguous part of the model, numbered from 0. With v chunks per rank, p ranks have p*v
               stages. "loop" puts stage s on rank s mod p; "V" puts stages r and 2p-1-r on rank r.
    Action     Work on one stage and one micro-batch. F: forward. I: gradient of the stage's inputs. W:
               gradient of its weights. B: I and W together. 1F1B with p=3 and m=4, one column per unit of
               time (B takes two); a micro-batch is in flight between its F and B:

                   rank 0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
                   rank 1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
                   rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

    Bubble     Time in which a rank is idle between actions. Splitting B fills it: I sends its result to the
               rank that waits for it, and W runs later, in a bubble.
    Lowering   Adds actions to a list of computations: SEND and RECV, UNSHARD and RESHARD, REDUCE_GRAD. Only a
               runner without lookahead needs them; ddp_pipeline_create does not.
    Edge       A tensor that one stage sends to a later one, once per micro-batch. Its gradient comes back.
    In flight  A micro-batch between the start of its F on a stage and the end of its W or B there. The stage
               keeps its inputs and saved memory. recompute or offload_saved keep no saved memory on the
               device.
    Version    PipeDream and PipeDream-2BW update weights while micro-batches are in flight: a backward uses
               the weights of its forward.
    Update     Gradients are added over update_interval micro-batches: all of the step, except for those two
               kinds. They are added pairwise by index like a binary counter, for any order of the actions;
               then over replicas; then over the uses of a tied parameter. Then weights change.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). The error of an invalid schedule names rank, position,
    action and cause:
      ddp_schedule_check: rank 2 position 14 2I5: its forward 2F5 comes later on this rank, at position 17
    A failure in a step or an evaluation poisons the group, which ends the call on every rank. The error names
    stage, action and micro-batch:
      rank 1/4 ddp_pipeline_step group=pp: the callback of 1B3 (stage 1, backward of micro-batch 3) failed:
      loss is not finite

CONFIG MACROS (define before including)
    DDP_PIPELINE_IMPLEMENTATION   also compile the bodies of this header, here. DDP_IMPLEMENTATION implies it

NOT DONE HERE
    No autograd: the caller's callbacks compute. A stage is not sharded over ranks here: hooks call
    ddp_fsdp.h, the reducer or tensor parallelism. PipeDream and PipeDream-2BW support neither tied parameters
    nor recomputation. Norms over all stages need unsharded gradients.
*/
#ifndef DDP_PIPELINE_H
#define DDP_PIPELINE_H

//== config =================================================================================== >>config
#include "ddp.h"

#ifdef __cplusplus
extern "C" {
#endif

//== types ===================================================================================== >>types

typedef struct ddp_schedule ddp_schedule; /* lists of actions; see ddp_schedule_create */
typedef struct ddp_pipeline ddp_pipeline; /* runs a schedule; see ddp_pipeline_create */

/* One list defines the enum and the names. p ranks, m micro-batches, v chunks per rank; r is a rank. The
   bubble is that of equal stages. F, I and W are the times of one micro-batch in all v stages of a rank, and
   S = F + I + W. For an m (or v) that a kind does not support, DDP_ERR_INVALID names the nearest one that it
   does. */
#define DDP_SCHEDULE_KINDS(X)                                                                         \
    /* v=1. Bubble (p-1)S; min(m, p-r) in flight (PipeDream-Flush, Narayanan et al. 2021) */          \
    X(DDP_SCHEDULE_1F1B, "1F1B")                                                                      \
    /* Any v. One micro-batch at a time */                                                            \
    X(DDP_SCHEDULE_NAIVE, "naive")                                                                    \
    /* v=1. Bubble (p-1)S; m in flight (Huang et al. 2019) */                                         \
    X(DDP_SCHEDULE_GPIPE, "GPipe")                                                                    \
    /* Any v; m < p, or m is a multiple of floor(m/p). (p-1)S/v if p divides m (Megatron-LM, 2021) */ \
    X(DDP_SCHEDULE_INTERLEAVED_1F1B, "interleaved-1F1B")                                              \
    /* Any v. (p-1)S/v; mv in flight (Lamy-Poirier 2022) */                                           \
    X(DDP_SCHEDULE_LOOPED_BFS, "looped-BFS")                                                          \
    /* v=1. (p-1)(F+I-W); p in flight (Zero Bubble, Qi et al. 2024) */                                \
    X(DDP_SCHEDULE_ZB_H1, "ZB-H1")                                                                    \
    /* v=1. (p-1)(F+I-2W); 2p-1 in flight */                                                          \
    X(DDP_SCHEDULE_ZB_H2, "ZB-H2")                                                                    \
    /* Any v, m a multiple of p. (p-1)(F+I-W)/v; vp in flight */                                      \
    X(DDP_SCHEDULE_INTERLEAVED_ZB_1P, "interleaved-ZB-1P")                                            \
    /* V, v=2. None at equal costs if m >= 2p-1; 2p in flight (Qi et al. 2024) */                     \
    X(DDP_SCHEDULE_ZB_V, "ZB-V")                                                                      \
    /* V, v=2, m >= 2p; 2p+1 in flight. F and B of different micro-batches overlap (DeepSeek 2025) */ \
    X(DDP_SCHEDULE_DUALPIPE_V, "DualPipeV")                                                           \
    /* v=1. An update every update_interval; p-r versions of weights (Harlap et al. 2018) */          \
    X(DDP_SCHEDULE_PIPEDREAM, "PipeDream")                                                            \
    /* v=1, update_interval >= p. Two versions (Narayanan et al. 2021) */                             \
    X(DDP_SCHEDULE_PIPEDREAM_2BW, "PipeDream-2BW")                                                    \
    /* v=1. Built from costs under memory_limit, as Zero Bubble's ZB-1p and ZB-2p */                  \
    X(DDP_SCHEDULE_AUTO, "AUTO")

/* The kinds of schedules: see DDP_SCHEDULE_KINDS for their letters. */
typedef enum ddp_schedule_kind {
#define DDP_X(kind, name) kind,
    DDP_SCHEDULE_KINDS(DDP_X)
#undef DDP_X
        DDP_SCHEDULE_KIND_COUNT
} ddp_schedule_kind;

/* Kinds of actions, with their text in a CSV file, between the stage and the micro-batch: 2F0. */
#define DDP_ACTIONS(X)                                                    \
    X(DDP_ACTION_IDLE, "") /* an empty cell */                            \
    X(DDP_ACTION_FORWARD, "F")                                            \
    X(DDP_ACTION_INPUT_GRAD, "I")                                         \
    X(DDP_ACTION_WEIGHT_GRAD, "W")                                        \
    X(DDP_ACTION_BACKWARD, "B")                                           \
    /* Without a micro-batch */                                           \
    X(DDP_ACTION_UNSHARD, "UNSHARD")                                      \
    X(DDP_ACTION_RESHARD, "RESHARD")                                      \
    X(DDP_ACTION_REDUCE_GRAD, "REDUCE_GRAD")                              \
    /* The stage is the one that sends or receives: 0SEND_F2, 1RECV_F2 */ \
    X(DDP_ACTION_SEND_F, "SEND_F")                                        \
    X(DDP_ACTION_RECV_F, "RECV_F")                                        \
    /* Gradients of the stage's inputs, to the stages that sent these */  \
    X(DDP_ACTION_SEND_B, "SEND_B")                                        \
    X(DDP_ACTION_RECV_B, "RECV_B")

/* The kinds of actions. */
typedef enum ddp_action_kind {
#define DDP_X(kind, name) kind,
    DDP_ACTIONS(DDP_X)
#undef DDP_X
        DDP_ACTION_KIND_COUNT
} ddp_action_kind;

/* An entry of a rank's list. The CSV cell (0F7;7B3)OVERLAP_F_B is two entries, in that order. */
typedef struct ddp_action {
    ddp_action_kind kind; /* IDLE: an empty cell */
    int stage;            /* -1: idle */
    int microbatch;       /* -1: none */
    int overlaps; /* 1 = runs together with the next entry of the list, which has 0: one is an F, the other an
                       I, W or B */
} ddp_action;

/* The formats of ddp_schedule_write and ddp_schedule_draw. */
typedef enum ddp_schedule_format {
    DDP_SCHEDULE_CSV = 0, /* a line per rank, cells such as 2F0 between commas: PyTorch's grammar */
    DDP_SCHEDULE_TEXT,    /* a grid for a terminal: a line per rank. A column lasts as long as the shortest F,
                             I, W or B, but at least a quarter of their mean */
    DDP_SCHEDULE_SVG,     /* boxes coloured by action, time axis, bubble rate; at most 2,000 px wide. Above
                             20,000 actions, or 1,920 of a rank, actions are merged: each pixel of a row has
                             the colour of one action, and each colour keeps its share of the row */
    DDP_SCHEDULE_TRACE    /* Chrome and Perfetto JSON, in microseconds; a unit of the costs counts as 1 s */
} ddp_schedule_format;

/* Parts of ddp_schedule_lower, which can be combined: DDP_LOWER_SHARD | DDP_LOWER_REDUCE. */
enum { DDP_LOWER_MERGE = 1, DDP_LOWER_SHARD = 2, DDP_LOWER_REDUCE = 4, DDP_LOWER_COMM = 8 };

//== descs ===================================================================================== >>descs

/* Durations of a stage's actions, in any unit of time, and the memory of a micro-batch in flight. */
typedef struct ddp_stage_cost {
    double forward, input_grad, weight_grad; /* B takes input_grad + weight_grad */
    double transfer;          /* from the end of this stage's F, I or B until its neighbour on another rank
                                 can begin */
    double overlapped;        /* F of this stage together with a B of another one; 0 = they run one after the
                                 other */
    double activation;        /* memory of a micro-batch from F to the end of I or B, in any unit; 0 = 1 */
    double weight_activation; /* what remains of it from the end of I to the end of W; 0 = half of it */
} ddp_stage_cost;

/* For ddp_schedule_create. Zero means default, except for the required fields. */
typedef struct ddp_schedule_desc {
    ddp_schedule_kind kind;      /* 0 = 1F1B */
    int rank_count;              /* required; p */
    int microbatch_count;        /* required; m, of the whole list */
    int chunk_count;             /* v; 0 = 1, for the V kinds 2 */
    int update_interval;         /* PIPEDREAM, PIPEDREAM_2BW: micro-batches per update, a divisor of m; 0 = 1,
                                    for 2BW m */
    const ddp_stage_cost *costs; /* AUTO: of each stage; NULL = F = I = W = 1. Read only by create */
    double memory_limit;         /* AUTO: the limit of a rank, in the unit of activation. 0 = p times the
                                    largest activation of a stage, the memory of ZB-1p. Twice that is the
                                    memory of ZB-2p. A larger limit never gives a slower schedule */
    void *(*alloc_fn)(size_t size_bytes, void *user); /* NULL = malloc; set both or neither */
    void (*free_fn)(void *memory, void *user);        /* NULL = free */
    void *user;                                       /* passed to alloc_fn and free_fn */
} ddp_schedule_desc;

/* The result of a simulation for one rank. Times are in the unit of the costs. */
typedef struct ddp_rank_report {
    double begin, end;   /* begin of its first and end of its last F, I, W or B; span is the difference */
    double busy;         /* computing */
    int peak_in_flight;  /* stages times micro-batches between the start of F and the end of W or B */
    double peak_memory;  /* in the unit of ddp_stage_cost.activation */
    int weight_versions; /* 1; PipeDream: the number of micro-batches in flight; PipeDream-2BW: 2 */
} ddp_rank_report;

/* The result of ddp_schedule_simulate. Times are in the unit of the costs. */
typedef struct ddp_schedule_report {
    ddp_rank_report *ranks; /* set by the caller: space for rank_count entries, which are filled in; NULL =
                               none */
    double makespan;        /* from the first begin of any rank to the last end */
    double span;            /* the longest span of a rank; see ddp_rank_report */
    double bubble_rate;     /* (span - work) / span; work: the most that a rank computes (Zero Bubble's
                               measure) */
    int peak_in_flight;     /* the largest of any rank */
    double peak_memory;     /* the largest of any rank */
    int weight_versions;    /* the largest of any rank */
} ddp_schedule_report;

/* Begin and end of an action, in seconds or in the unit of the costs. */
typedef struct ddp_action_time {
    double begin, end; /* since the start of the step: see ddp_pipeline_get_times */
} ddp_action_time;

/* A tensor that stage `from` sends to a later stage `to` for each micro-batch. to == stage count: to the
   loss. Several edges between the same two stages, and edges that skip stages, are allowed. data is not
   used. */
typedef struct ddp_pipeline_edge {
    int from, to;         /* stages */
    ddp_tensor tensor;    /* dtype and shape of one micro-batch */
    ddp_dtype grad_dtype; /* of the gradient that comes back; 0 = the tensor's */
    int no_grad;          /* 1 = no gradient comes back (integers, masks); implied by integer dtypes */
} ddp_pipeline_edge;

/* The argument of a stage's callbacks. Arrays follow the order of the desc's edges: inputs end at this stage,
   outputs begin here. Memory is that of the group's device, 64-byte aligned, and belongs to the runner.
   Pointers are valid only during the call. Inputs and output_grads stay where they were made: on one machine,
   in the memory of the rank that made them. They do not change until the last call that receives them has
   returned. */
typedef struct ddp_pipeline_call {
    ddp_action_kind kind;  /* FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD; FORWARD for the loss too */
    int stage, microbatch; /* of the action, from 0 */
    int evaluating;        /* 1 = ddp_pipeline_evaluate: no backward follows, saved memory is scratch */
    int recomputing; /* 1 = F again, just before I or B: same inputs, fills saved; outputs are scratch */
    int input_count, output_count;  /* edges that end at this stage, and that begin here */
    const ddp_tensor *inputs;       /* F I W B: read-only; the same bytes from F to W */
    const ddp_tensor *outputs;      /* F: write all of it. Loss: what the last stage wrote. Otherwise NULL */
    const ddp_tensor *output_grads; /* I W B: gradients of the outputs, the same in I and W; data NULL: no
                                       gradient. Loss: write all of it, not divided by the number
                                       of micro-batches; NULL when evaluating */
    const ddp_tensor *input_grads;  /* I B: write all of it; data is NULL for an edge without gradient. F W:
                                       NULL */
    void *saved;                    /* saved_bytes of this micro-batch, 64-byte aligned. F fills it, I W B
                                       read it; I may store data for W there */
    double *loss;                   /* F of the last stage, and the loss callback: in host memory; set it to
                                       the loss of the micro-batch, not divided by the number of
                                       micro-batches. Otherwise NULL */
    /* Version of the weights that this action uses: the number of updates since create. PipeDream: those
       before the micro-batch's F in its rank's list. 2BW: actions that contribute to update u use version
       u-2, or 0. Evaluating: all updates */
    int version;
} ddp_pipeline_call;

/* A result other than DDP_OK ends the step on all ranks. The error contains the text of ddp_fail, if set. */
typedef ddp_result (*ddp_pipeline_fn)(const ddp_pipeline_call *call, void *user);
/* See ddp_pipeline_stage.unshard and the fields after it. A result other than DDP_OK ends the step on all
   ranks. */
typedef ddp_result (*ddp_stage_hook)(int stage, void *user);
/* See ddp_pipeline_stage.get_sharded_grad. Sets *grad to this rank's part of a gradient. */
typedef ddp_result (*ddp_get_sharded_grad)(int stage, int param, ddp_tensor *grad, void *user);

/* The place at which the sum of a stage's gradients over an update is divided by update_interval. */
typedef enum ddp_grad_division {
    DDP_DIVIDE_DEFAULT = 0,   /* without reduce_grad, the runner divides after the last addition. With
                                 reduce_grad the runner does not divide: the hook must divide by ranks and
                                 micro-batches (ddp_reducer_desc.micro_batch_count = update_interval) */
    DDP_DIVIDE_BEFORE_REDUCE, /* by the runner, before reduce_grad, which divides only by ranks */
    DDP_DIVIDE_NONE           /* nowhere: gradients stay sums */
} ddp_grad_division;

/* One stage. Only the entries of this rank's stages are read. Callbacks run one at a time on the thread of
   ddp_pipeline_step, in the order of the schedule. On a device with streams they enqueue their work on the
   compute stream. They may call collectives of groups other than the pipeline's. Hooks are for data
   parallelism; each may be NULL. A hook returns before the next call for this stage. Replicas call the hooks
   in the same order. */
typedef struct ddp_pipeline_stage {
    const char *name;                        /* appears in errors; NULL = "stage 3" or similar */
    ddp_pipeline_fn forward;                 /* required */
    ddp_pipeline_fn backward;                /* B; NULL = input_grad, then weight_grad */
    ddp_pipeline_fn input_grad, weight_grad; /* required if the schedule has I, and W */
    void *user;                              /* passed to all callbacks and hooks of the stage */
    size_t saved_bytes;                      /* per micro-batch in flight; 0 = none */
    /* 1 = for devices with their own memory: the device has two buffers of saved_bytes, for any number of
       micro-batches in flight (Rajbhandari et al. 2021). After F, and after I, saved memory is copied to
       pinned host memory, unless the stage's next action is of the same micro-batch. It is copied back while
       the stage's previous action computes. No copy blocks the host. Bits are the same. Without effect: on
       the CPU; with at most two micro-batches in flight. Not with recompute. May differ between stages */
    int offload_saved;
    /* 1 = saved memory is freed after F, and F runs again before I or B (Chen et al. 2016). Inputs stay */
    int recompute;
    /* W or B writes (not adds) the gradients of one micro-batch to param->grad.data. The runner adds them
       pairwise by index and leaves the sum there. NULL = no parameters, or the callbacks accumulate and
       divide gradients themselves.
       Each entry is &param or &fsdp_param.param. The array and its entries outlive the pipeline. value.data
       and grad.data are read for each action, since ddp_fsdp_unshard changes them. NULL grad.data at create:
       the runner allocates gradients of grad.dtype (0 = value's) and sets grad.data; with unshard, that hook
       sets it, until reduce_grad.
       16-bit gradients are added and divided in f32 and rounded once. A ddp_reducer or ddp_fsdp reduces their
       f32 sums, so that any number of replicas gives the same bits. A reduce_grad that itself changes the
       values in grad.data must then set param->sum.is_set to 0; otherwise the unchanged f32 sums are reduced.
       PipeDream and 2BW: hooks see the newest values; while a callback uses older ones, value.data is a
       copy */
    ddp_param *const *params;
    int param_count;            /* entries of params */
    int zero_gradients;         /* 1 = gradient memory is cleared before each W or B */
    ddp_stage_hook unshard;     /* before the stage's first action of a step or evaluation, or at UNSHARD:
                                   ddp_fsdp_unshard */
    ddp_stage_hook reshard;     /* after its last one, or at RESHARD: ddp_fsdp_reshard */
    ddp_stage_hook reduce_grad; /* after its last W or B of an update, or at REDUCE_GRAD; sums are in
                                   grad.data: ddp_reducer_ready, ddp_fsdp_reduce_grads */
    ddp_stage_hook wait_grad;   /* at the end of the update, for local stages in ascending order:
                                   ddp_reducer_wait */
    /* Gradients are final: a step on the newest values. NULL = the caller steps after ddp_pipeline_step;
       required with PipeDream and 2BW. There, if unshard is set, the update hook must unshard again, since
       more actions of the step follow until reshard */
    ddp_stage_hook update;
    ddp_grad_division grad_division;       /* DDP_DIVIDE_BEFORE_REDUCE if reduce_grad is of a ddp_fsdp with
                                              micro_batch_count 1 */
    ddp_get_sharded_grad get_sharded_grad; /* NULL = grad.data; required for ties of parameters with unshard:
                                              ddp_fsdp_get_shard */
} ddp_pipeline_stage;

/* One parameter with two uses, such as the embedding and the last projection. Each use has its own ddp_param,
   with the same shape and gradient dtype. The caller gives both the same initial values; create does not
   compare them. After a step both gradients are the sum. A tie of two uses in one ddp_reducer or ddp_fsdp is
   DDP_ERR_INVALID: it adds their gradients itself. A ddp_optimizer also adds those of entries with the same
   value.data: leave the second use out of its params. */
typedef struct ddp_pipeline_tie {
    int first_stage, first_param;   /* first_param: index in that stage's params */
    int second_stage, second_param; /* a later stage, on the same rank or another one; or a later parameter of
                                       the same stage */
} ddp_pipeline_tie;

/* For ddp_pipeline_create. Zero means default, except for the required fields. */
typedef struct ddp_pipeline_desc {
    const ddp_schedule *schedule;     /* required; its rank_count is the group's world_size. SEND and RECV are
                                         ignored: F, I and B send and receive */
    const ddp_pipeline_stage *stages; /* required; one entry per stage of the schedule, on each rank */
    int stage_count;                  /* required; entries of stages: ddp_schedule_stage_count(schedule) */
    ddp_tensor boundary;              /* output of each stage for the next one: dtype and shape of one
                                         micro-batch; read when edges is NULL */
    ddp_tensor output;                /* output of the last stage for the loss; read when edges is NULL; dtype
                                         0 = none */
    const ddp_pipeline_edge *edges;   /* NULL = boundary and output; otherwise all edges, the same on every
                                         rank */
    int edge_count;                   /* entries of edges */
    ddp_pipeline_fn loss; /* runs right after the last stage's F, on its rank; set on every rank. NULL = the
                             last stage's F sets *call->loss, and its backward needs no output_grads */
    void *loss_user;      /* passed to loss */
    const ddp_pipeline_tie *ties; /* the same on every rank */
    int tie_count;                /* entries of ties */
    int prefetch; /* 0 = 2; receives per edge and direction that are posted ahead of the action that needs
                     them */
    int timed;    /* 1 = on a device with streams the host waits for each action: times and stats are those of
                     the device. 0 = those of enqueueing */
} ddp_pipeline_desc;

/* Measurements of a pipeline: see ddp_pipeline_get_stats. */
typedef struct ddp_pipeline_stats {
    uint64_t steps;               /* since create, without failed ones */
    double step_seconds;          /* this and the next three: of the last step, on this rank */
    double compute_seconds;       /* in callbacks of F, I, W, B and the loss */
    double wait_seconds;          /* waiting for the inputs of actions */
    double update_seconds;        /* in hooks, and adding tied gradients */
    double bubble_rate;           /* of the last step, over all ranks: (longest span - most compute) / longest
                                     span */
    double predicted_bubble_rate; /* ddp_schedule_simulate with the measured costs, without transfers */
    size_t bytes_sent;            /* last step: to other ranks, also those that read the tensors in place */
    size_t bytes_handed_over;     /* last step: between stages of this rank, and to the loss; read in place */
    size_t activation_bytes;      /* allocated on this rank: outputs, saved memory, gradients to send, and
                                     inputs that are not read in place */
    size_t accumulation_bytes, version_bytes; /* partial sums of gradients; copies of older weights */
    size_t offloaded_bytes;                   /* pinned host memory of offload_saved; in no other field */
} ddp_pipeline_stats;

/* For ddp_pipeline_profile: runs FORWARD, INPUT_GRAD or WEIGHT_GRAD of a layer, and returns when the device
   has finished it. */
typedef ddp_result (*ddp_layer_fn)(int layer, ddp_action_kind kind, void *user);

/* For ddp_pipeline_profile. */
typedef struct ddp_profile_desc {
    int layer_count;           /* required */
    ddp_layer_fn run;          /* required; all rounds of a layer, then the next one; a round is F, I, W */
    void *user;                /* passed to run */
    int rounds, warmup_rounds; /* 0 = 5 and 1. Warm-up rounds are not measured; -1 = none */
} ddp_profile_desc;

//== api ========================================================================================= >>api

/* --- schedules ---
   Not collective: ranks that make the same calls get the same schedule. The caller frees each schedule with
   ddp_schedule_destroy. The allocators of a desc must outlive its schedules, and those lowered from them. A
   parsed schedule uses malloc. Errors of calls that create, check, simulate or draw: also DDP_ERR_NO_MEMORY.
   If a schedule cannot be created, *out is NULL. */

/* Creates the lists of a kind, with F, I, W and B only; see ddp_schedule_lower. ddp_schedule_check accepts
   the result. The desc is copied, and costs is read only during the call. Errors: DDP_ERR_INVALID names the
   field and the nearest valid value (AUTO: also for a memory_limit that no schedule fits). */
DDPDEF ddp_result ddp_schedule_create(ddp_schedule **out, const ddp_schedule_desc *desc);

/* Creates a schedule from the text of a CSV file: line r is the list of rank r. Its stage and micro-batch
   counts are the largest numbers in the text, plus 1. An empty cell is IDLE. Ignores blanks around cells,
   empty lines at the end and a UTF-8 byte-order mark. A cell may be in double quotes, as spreadsheets write
   it. The schedule has one update, at its end, also if the CSV is that of a PipeDream schedule. It may be
   invalid: ddp_schedule_check reports that. Errors: DDP_ERR_INVALID names line and cell, both from 1, and
   cause. */
DDPDEF ddp_result ddp_schedule_parse(ddp_schedule **out, const char *csv);

/* Like ddp_schedule_draw without costs and times. ddp_schedule_parse reads the CSV, which does not contain
   the kind and update_interval. If the list of the last rank is empty, its line is a comma. */
DDPDEF ddp_result ddp_schedule_write(const ddp_schedule *schedule, ddp_schedule_format format, char *out,
                                     size_t *size_bytes);

/* Writes the schedule as text to out, with simulated times, or with measured ones if times is not NULL.
   costs: an entry for each stage; NULL = F = I = W = 1. times: an entry for each entry of the lists of
   ddp_schedule_actions, also IDLE, rank after rank. CSV ignores costs and times. The time axis of an SVG is
   in s, ms or us with times, otherwise in the unit of the costs.
   In: *size_bytes is the capacity of out. Out: it is the length of the text with the 0 at its end. If out is
   NULL, the call only sets *size_bytes. Errors: DDP_ERR_INVALID when the capacity is too small: *size_bytes
   is then the required length. Errors that leave *size_bytes unchanged: DDP_ERR_INVALID for an invalid cost
   or time and, except for CSV, for a schedule that ddp_schedule_check rejects. All errors leave out
   unchanged. */
DDPDEF ddp_result ddp_schedule_draw(const ddp_schedule *schedule, ddp_schedule_format format,
                                    const ddp_stage_cost *costs, const ddp_action_time *times, char *out,
                                    size_t *size_bytes);

/* Frees the schedule, and the lists that ddp_schedule_actions returned. Call it after the
   ddp_pipeline_destroy of each pipeline that uses it. NULL is ignored. */
DDPDEF void ddp_schedule_destroy(ddp_schedule *schedule);

/* Creates a schedule with more actions: see CONCEPTS, Lowering. It keeps the kind and update_interval. parts:
   DDP_LOWER_ flags; 0 = all, in this order:
   MERGE    I and W of one micro-batch next to each other become B; IDLE entries are removed
   SHARD    UNSHARD before a stage's first action, RESHARD after its last
   REDUCE   REDUCE_GRAD after a stage's last W or B of each update, before RESHARD
   COMM     SEND after the action that makes a tensor; RECV in the order of the peer's sends. Each SEND
            may wait for its RECV without a deadlock
   Errors: DDP_ERR_INVALID for a schedule that ddp_schedule_check rejects; for SHARD, REDUCE or COMM if the
   schedule already has those actions; for MERGE if it has SEND and RECV. */
DDPDEF ddp_result ddp_schedule_lower(ddp_schedule **out, const ddp_schedule *schedule, unsigned parts);

/* Proves the following. Every micro-batch passes every stage once in each direction; each stage is on one
   rank. I and B follow F, W follows I, and each waits only for tensors that will arrive. An overlapping pair
   is an F and an I, W or B. SENDs and RECVs, if present, are complete and match in order. No cycle of waits
   exists; with SEND and RECV, when one message fits from each rank to each other rank. UNSHARD and RESHARD,
   if present, enclose a stage's actions; REDUCE_GRAD, if present, follows the last W or B of each update.
   Errors: DDP_ERR_INVALID names rank, position in ddp_schedule_actions, action and cause. */
DDPDEF ddp_result ddp_schedule_check(const ddp_schedule *schedule);

/* Simulates the schedule: every action starts as soon as it can, in its rank's order. costs: an entry for
   each stage; NULL = F = I = W = 1. SEND and RECV take no time. A stage's tensor reaches another rank
   cost->transfer after its F, I or B, with the cost of the stage that sends. In: report->ranks, so initialize
   *report. Takes linear time in the number of actions. Errors leave *report unchanged: DDP_ERR_INVALID for a
   schedule that ddp_schedule_check rejects, or a cost that is negative or not finite. */
DDPDEF ddp_result ddp_schedule_simulate(const ddp_schedule *schedule, const ddp_stage_cost *costs,
                                        ddp_schedule_report *report);

DDPDEF int ddp_schedule_rank_count(const ddp_schedule *schedule);       /* 0 for NULL */
DDPDEF int ddp_schedule_stage_count(const ddp_schedule *schedule);      /* 0 for NULL */
DDPDEF int ddp_schedule_microbatch_count(const ddp_schedule *schedule); /* 0 for NULL */
/* Micro-batches per update; microbatch_count if there is one update; 0 for NULL. */
DDPDEF int ddp_schedule_update_interval(const ddp_schedule *schedule);
/* The kind of ddp_schedule_desc; DDP_SCHEDULE_KIND_COUNT for a parsed schedule and for NULL. */
DDPDEF ddp_schedule_kind ddp_schedule_get_kind(const ddp_schedule *schedule);
DDPDEF int ddp_schedule_stage_rank(const ddp_schedule *schedule, int stage); /* -1: NULL, or on no rank */

/* The list of a rank, also its IDLE entries, owned by the schedule. *count (may be NULL) is its length. For
   an invalid rank, NULL with ddp_last_error set, and *count 0. */
DDPDEF const ddp_action *ddp_schedule_actions(const ddp_schedule *schedule, int rank, int *count);

/* Such as "1F1B"; static text. "unknown ddp_schedule_kind" for a value that is not a kind. */
DDPDEF const char *ddp_schedule_kind_name(ddp_schedule_kind kind);

/* Finds a kind by name, ignoring case; '_' and '-' are the same. Errors: DDP_ERR_INVALID lists the names. */
DDPDEF ddp_result ddp_schedule_kind_find(const char *name, ddp_schedule_kind *kind);

/* --- balancing --- */

/* Cuts layers into contiguous stages, none empty, such that the largest sum of costs is minimal. Of several
   such cuts it returns the one with the most layers in the early stages. Ranks with the same costs therefore
   get the same cut. first_layer: stage_count entries; stage s begins with layer first_layer[s]. Costs are
   added from left to right. Not collective. Takes O(stage_count * layer_count^2) time, and frees its memory
   of 8 (stage_count + 1) (layer_count - stage_count + 1) bytes. Errors leave first_layer unchanged:
   DDP_ERR_INVALID for fewer layers than stages, or a cost that is negative or not finite;
   DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_pipeline_partition(const double *cost, int layer_count, int stage_count,
                                         int *first_layer);

/* Like ddp_pipeline_partition, for stages of unequal speed: the largest quotient of a stage's sum of costs
   and its speed is minimal. speed: stage_count entries, above 0, in any unit. A stage has the speed of the
   rank that runs it. With speeds of 1 the cut is that of ddp_pipeline_partition. Ranks need the same speeds:
   gather what each has measured. Errors: also DDP_ERR_INVALID for a speed that is not finite and above 0. */
DDPDEF ddp_result ddp_pipeline_partition_speed(const double *cost, int layer_count, const double *speed,
                                               int stage_count, int *first_layer);

/* Measures each layer by running it, and sets forward, input_grad and weight_grad of cost[0] to
   cost[layer_count - 1] to the medians, in seconds; other fields are unchanged. ddp_pipeline_partition takes
   the sum of the three; the cost of a stage is the sum over its layers. Not collective, and ranks measure
   different costs: broadcast those of one rank before ranks create stages or schedules from them. Errors: the
   result of run; DDP_ERR_INVALID names the field; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_pipeline_profile(const ddp_profile_desc *desc, ddp_stage_cost *cost);

/* --- runner ---

   With data parallelism, ranks are a mesh of shape {pipeline ranks, replicas}, names {"pp", "dp"}. Replica r
   works on micro-batches r m to r m + m - 1 of the step: its callbacks add r m to call->microbatch. With m a
   power of two, weights end with the bits of one process that runs all micro-batches. Replicas have schedules
   with the same update_interval. After a failed step, call ddp_group_abort on "dp": other replicas may be
   waiting in a hook. The reducer or fsdp of a stage is created on "dp", before the pipeline:

       ddp_result reduce(int stage, void *user) {       // a ddp_reducer for each stage; micro_batch_count = m
           model *m = (model *)user;
           for (int i = m->param_count[stage] - 1; i >= 0; i--)
               DDP_TRY(ddp_reducer_ready(m->reducer[stage], i));
           return DDP_OK;
       }
       ddp_result wait(int stage, void *user) { return ddp_reducer_wait(((model *)user)->reducer[stage]); }
       ddp_result update(int stage, void *user) {
           return ddp_optimizer_step(((model *)user)->optimizer[stage], ((model *)user)->lr);
       }
       stage->reduce_grad = reduce;
       stage->wait_grad = wait;
       stage->update = update;

   Or a ddp_fsdp of one unit for each stage:

       ddp_fsdp *fsdp_of(int stage, void *user) { return ((model *)user)->fsdp[stage]; }
       ddp_result unshard(int stage, void *user) { return ddp_fsdp_unshard(fsdp_of(stage, user), 0); }
       ddp_result reshard(int stage, void *user) { return ddp_fsdp_reshard(fsdp_of(stage, user), 0); }
       ddp_result reduce(int stage, void *user) { return ddp_fsdp_reduce_grads(fsdp_of(stage, user), 0); }
       ddp_result update(int stage, void *user) {
           return ddp_fsdp_step(fsdp_of(stage, user), ((model *)user)->lr);
       }
       stage->unshard = unshard;
       stage->reshard = reshard;
       stage->reduce_grad = reduce;
       stage->update = update;
       stage->grad_division = DDP_DIVIDE_BEFORE_REDUCE;

   Tied gradients of stages with unshard are added where get_sharded_grad points. It is called after all
   wait_grad hooks have returned, and returns this rank's part of the gradient. The two ranks of a pipeline
   that hold the two uses must have the same part. ddp_fsdp_get_shard returns it. With ddp_fsdp, let wait_grad
   call ddp_fsdp_clip_grad_norm(fsdp, INFINITY, NULL), which divides the sums: the parts are then averages. */

/* Checks the schedule, allocates the buffers of all steps, and connects the ranks: rank r of the group runs
   list r. On a device with streams, all messages of a rank run on the communication stream, one after the
   other, in the order of ddp_schedule_lower. Collective, blocks.
   Ownership: the desc, stages, edges and ties are copied. The schedule, and the name and params of each
   stage, must outlive the pipeline. While it lives, no other call may communicate on the group; a second
   pipeline needs its own group.
   Errors, on every rank, and *out is NULL:
     DDP_ERR_INVALID      names the stage or edge: a callback is missing; a shape is invalid; an edge goes to
                          an earlier stage; no edge with a gradient joins a stage to the next; a loss without
                          an edge to it, or such an edge without a loss; those of ddp_schedule_check
     DDP_ERR_MISMATCH     schedules, edges, ties, or the two uses of a tied parameter differ
     DDP_ERR_UNSUPPORTED  over tcp, which has no messages
     DDP_ERR_NO_MEMORY */
DDPDEF ddp_result ddp_pipeline_create(ddp_pipeline **out, ddp_group *group, const ddp_pipeline_desc *desc);

/* Runs the schedule once: all micro-batches, forward and backward, with their updates. On return the
   gradients of the last update are final in grad.data, except in a stage with an unshard hook that sets it.
   They have the bits of one process that adds the micro-batches pairwise. On a device with streams they are
   final for later work of the compute stream. Only the first step may allocate, in the groups that it uses.
   Collective, blocks.
   Errors, on every rank: the result of the callback that failed, DDP_ERR_PEER_LOST, DDP_ERR_TIMEOUT. The
   error names stage, action and micro-batch. After an error the group is poisoned, gradients are undefined,
   and some stages may have been updated: destroy the pipeline. */
DDPDEF ddp_result ddp_pipeline_step(ddp_pipeline *pipeline);

/* Runs only the forward actions and the loss, in the schedule's order, with the newest weights. The only
   hooks that run are unshard and reshard. Gradients, times and stats of the last step are kept, but its
   losses are replaced. Collective, blocks. Errors: as ddp_pipeline_step. */
DDPDEF ddp_result ddp_pipeline_evaluate(ddp_pipeline *pipeline);

/* Losses of the last step or evaluation of this replica, on every rank. *mean is the pairwise sum over
   micro-batches divided once by their number; each (may be NULL) has microbatch_count entries. Not
   collective. Errors: DDP_ERR_INVALID unless the last step or evaluation succeeded. */
DDPDEF ddp_result ddp_pipeline_get_loss(const ddp_pipeline *pipeline, double *mean, double *each);

/* Durations of the last step's actions, on every rank. Either output may be NULL, also on only some ranks.
   costs: one entry per stage, in seconds, means over micro-batches, for AUTO and the simulator. forward
   includes the loss; half of a B counts as I, half as W. transfer is the shortest time from the end of the
   stage's F to the next stage's F; on several machines it is 0, since clocks differ. Other fields are set to
   0.
   times: as ddp_schedule_draw expects them, for the schedule that the pipeline was created with. In seconds
   since the step's start; on several machines, since each rank's own start.
   Collective, blocks. Errors: DDP_ERR_INVALID unless the last step succeeded. */
DDPDEF ddp_result ddp_pipeline_get_times(ddp_pipeline *pipeline, ddp_stage_cost *costs,
                                         ddp_action_time *times);

/* Stores the measurements of the pipeline in *stats; before the first step, times and rates are 0. Not
   collective. Errors: DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_pipeline_get_stats(const ddp_pipeline *pipeline, ddp_pipeline_stats *stats);

/* Scales all gradients by max_norm / norm when the global norm over all stages exceeds max_norm. *norm (may
   be NULL) is the norm before scaling. Call it after ddp_pipeline_step and before the optimizer steps: an
   update hook has already used the gradients. Gradients outside the stages' params are left out. A tied
   parameter counts once, as the sum. Squares add per row in a fixed order and rows add exactly, so the cut
   into stages cannot change the result. A norm that is not finite scales nothing. Collective, with the same
   max_norm on every rank; blocks. Errors: DDP_ERR_INVALID when max_norm is not positive, when no stage has
   params, when a stage with unshard had a NULL grad.data at create, or unless the last step succeeded. */
DDPDEF ddp_result ddp_pipeline_clip_grad_norm(ddp_pipeline *pipeline, float max_norm, float *norm);

/* Frees everything, including gradient memory that the runner allocated; grad.data is then NULL. The reducer
   or fsdp of a stage may be destroyed before or after. Collective, blocks. NULL is ignored. */
DDPDEF void ddp_pipeline_destroy(ddp_pipeline *pipeline);

#ifdef __cplusplus
}
#endif
#endif /* DDP_PIPELINE_H */

#include "ddp.h" /* once more, for its check of the options with which bodies are compiled */
#if (defined(DDP_IMPLEMENTATION) || defined(DDP_PIPELINE_IMPLEMENTATION)) \
    && !defined(DDP_PIPELINE_IMPLEMENTATION_INCLUDED)
#define DDP_PIPELINE_IMPLEMENTATION_INCLUDED

//== structs and action lists =========================================================== >>impl-structs
/* Includes, limits, and struct ddp_schedule: one array with the lists of all ranks. Then the functions that
   allocate, fill and free schedules. The generators, the parser and lowering append actions rank by rank;
   ddp__schedule_finish then derives the stage and micro-batch counts. */
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DDP__MAX_STAGES 65536
#define DDP__MAX_MICROBATCHES (1 << 24)
#define DDP__MAX_ACTIONS (1 << 28)

struct ddp_schedule {
    ddp_schedule_kind kind; /* DDP_SCHEDULE_KIND_COUNT: parsed from CSV */
    int rank_count, stage_count, microbatch_count, update_interval;
    ddp_action *actions; /* lists of all ranks, in rank order; an action's index is its place here */
    int count, capacity;
    int *first;        /* rank r has actions[first[r]] to [first[r + 1] - 1]; follows the struct */
    int filled;        /* during construction: number of complete lists */
    int *stage_rank;   /* rank of each stage; -1 = on no rank */
    ddp_result failed; /* during construction: the first failure */
    void *(*alloc_fn)(size_t size_bytes, void *user);
    void (*free_fn)(void *memory, void *user);
    void *user;
};

// clang-format off
static const char *const ddp__action_names[] = {
#define DDP_X(kind, name) name,
    DDP_ACTIONS(DDP_X)
#undef DDP_X
};
// clang-format on

// clang-format off
static const char *const ddp__schedule_kind_names[] = {
#define DDP_X(kind, name) name,
    DDP_SCHEDULE_KINDS(DDP_X)
#undef DDP_X
};
// clang-format on

static void *ddp__schedule_malloc(size_t size_bytes, void *user) {
    (void)user;
    return malloc(size_bytes);
}
static void ddp__schedule_mfree(void *memory, void *user) {
    (void)user;
    free(memory);
}

/* Allocates count elements of size_bytes each. Returns NULL with the error set if memory runs out. */
static void *ddp__schedule_alloc(const ddp_schedule *s, size_t count, size_t size_bytes) {
    void *memory = NULL;
    if (count <= SIZE_MAX / size_bytes) memory = s->alloc_fn(count ? count * size_bytes : 1, s->user);
    if (!memory)
        ddp_fail(DDP_ERR_NO_MEMORY, "ddp_schedule: %zu entries of %zu bytes could not be allocated", count,
                 size_bytes);
    return memory;
}

static void ddp__schedule_free(const ddp_schedule *s, void *memory) {
    if (memory) s->free_fn(memory, s->user);
}

/* Creates an empty schedule. Reads the kind, rank count, update interval and allocator of desc. */
static ddp_schedule *ddp__schedule_new(const ddp_schedule_desc *desc) {
    ddp_schedule start = DDP_ZERO, *s;
    start.kind = desc->kind;
    start.rank_count = desc->rank_count;
    start.update_interval = desc->update_interval;
    start.alloc_fn = desc->alloc_fn ? desc->alloc_fn : ddp__schedule_malloc;
    start.free_fn = desc->alloc_fn ? desc->free_fn : ddp__schedule_mfree;
    start.user = desc->user;
    s = (ddp_schedule *)ddp__schedule_alloc(&start, 1,
                                            sizeof *s + ((size_t)desc->rank_count + 1) * sizeof *s->first);
    if (!s) return NULL;
    *s = start;
    s->first = (int *)(s + 1);
    s->first[0] = 0;
    return s;
}

/* Creates an empty schedule with the kind, rank count, update interval and allocator of another one. */
static ddp_schedule *ddp__schedule_new_like(const ddp_schedule *from) {
    ddp_schedule_desc desc = {from->kind,     from->rank_count, 0,         0, from->update_interval, NULL, 0,
                              from->alloc_fn, from->free_fn,    from->user};
    return ddp__schedule_new(&desc);
}

static void ddp__schedule_push_action(ddp_schedule *s, ddp_action action) {
    if (s->failed != DDP_OK) return;
    if (s->count == s->capacity) {
        int capacity = s->capacity ? 2 * s->capacity : 64;
        ddp_action *grown = s->count >= DDP__MAX_ACTIONS
                                ? NULL
                                : (ddp_action *)ddp__schedule_alloc(s, (size_t)capacity, sizeof *grown);
        if (!grown) {
            s->failed =
                s->count < DDP__MAX_ACTIONS
                    ? DDP_ERR_NO_MEMORY
                    : ddp_fail(DDP_ERR_INVALID,
                               "ddp_schedule: more than %d actions; use fewer ranks, micro-batches or chunks",
                               DDP__MAX_ACTIONS);
            return;
        }
        if (s->count) memcpy(grown, s->actions, (size_t)s->count * sizeof *grown);
        ddp__schedule_free(s, s->actions);
        s->actions = grown;
        s->capacity = capacity;
    }
    s->actions[s->count++] = action;
}

static void ddp__schedule_push(ddp_schedule *s, ddp_action_kind kind, int stage, int microbatch) {
    ddp_action action = {kind, stage, microbatch, 0};
    ddp__schedule_push_action(s, action);
}

static void ddp__schedule_end_rank(ddp_schedule *s) { s->first[++s->filled] = s->count; }

/* Stores the schedule in *out once all lists are complete, or frees it after a failure. Derives the stage and
   micro-batch counts from the lists. */
static ddp_result ddp__schedule_finish(ddp_schedule **out, ddp_schedule *s) {
    ddp_result result = s->failed;
    for (int i = 0; i < s->count; i++) {
        if (s->actions[i].stage >= s->stage_count) s->stage_count = s->actions[i].stage + 1;
        if (s->actions[i].microbatch >= s->microbatch_count)
            s->microbatch_count = s->actions[i].microbatch + 1;
    }
    if (!s->update_interval) s->update_interval = s->microbatch_count;
    if (result == DDP_OK)
        s->stage_rank = (int *)ddp__schedule_alloc(s, (size_t)s->stage_count, sizeof *s->stage_rank);
    if (result == DDP_OK && !s->stage_rank) result = DDP_ERR_NO_MEMORY;
    if (result != DDP_OK) {
        ddp_schedule_destroy(s);
        return result;
    }
    for (int stage = 0; stage < s->stage_count; stage++) s->stage_rank[stage] = -1;
    for (int rank = s->rank_count - 1; rank >= 0; rank--)
        for (int i = s->first[rank]; i < s->first[rank + 1]; i++)
            if (s->actions[i].stage >= 0) s->stage_rank[s->actions[i].stage] = rank;
    *out = s;
    return DDP_OK;
}

DDPDEF void ddp_schedule_destroy(ddp_schedule *schedule) {
    if (!schedule) return;
    ddp__schedule_free(schedule, schedule->actions);
    ddp__schedule_free(schedule, schedule->stage_rank);
    schedule->free_fn(schedule, schedule->user);
}

static int ddp__action_computes(ddp_action_kind kind) {
    return kind >= DDP_ACTION_FORWARD && kind <= DDP_ACTION_BACKWARD;
}
static int ddp__action_communicates(ddp_action_kind kind) {
    return kind >= DDP_ACTION_SEND_F && kind <= DDP_ACTION_RECV_B;
}
static int ddp__action_sends(ddp_action_kind kind) {
    return kind == DDP_ACTION_SEND_F || kind == DDP_ACTION_SEND_B;
}
static int ddp__action_ends(ddp_action_kind kind) {
    return kind == DDP_ACTION_WEIGHT_GRAD || kind == DDP_ACTION_BACKWARD;
}
static int ddp__action_is_sharding(ddp_action_kind kind) {
    return kind >= DDP_ACTION_UNSHARD && kind <= DDP_ACTION_REDUCE_GRAD;
}

typedef struct ddp__action_text {
    char text[64];
} ddp__action_text;

/* Returns the action as a CSV cell writes it: "2I5", "0UNSHARD". */
static ddp__action_text ddp__action_label(const ddp_action *a) {
    ddp__action_text label;
    if (a->kind == DDP_ACTION_IDLE)
        snprintf(label.text, sizeof label.text, "(idle)");
    else if (ddp__action_is_sharding(a->kind))
        snprintf(label.text, sizeof label.text, "%d%s", a->stage, ddp__action_names[a->kind]);
    else
        snprintf(label.text, sizeof label.text, "%d%s%d", a->stage, ddp__action_names[a->kind],
                 a->microbatch);
    return label;
}

static ddp__action_text ddp__action_label_of(ddp_action_kind kind, int stage, int microbatch) {
    ddp_action action = {kind, stage, microbatch, 0};
    return ddp__action_label(&action);
}

/* Returns the rank of the list that contains the action with this index. */
static int ddp__action_rank(const ddp_schedule *s, int index) {
    int low = 0, high = s->rank_count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (s->first[middle] <= index)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static int ddp__action_position(const ddp_schedule *s, int index) {
    return index - s->first[ddp__action_rank(s, index)];
}

//== schedule kinds ============================================================== >>impl-schedule-kinds
/* Generates the lists of every kind except AUTO, and checks ddp_schedule_desc. In this section p is the
   number of ranks, m of micro-batches and v of chunks per rank. */

#define DDP__SCHEDULE_INVALID(...) ddp_fail(DDP_ERR_INVALID, "ddp_schedule_create: " __VA_ARGS__)

/* Returns the number of rounds in which micro-batches pass through the chunks, as in PyTorch's
   ScheduleInterleaved1F1B. There is one round if m < p. A round has p micro-batches if m is a multiple of p,
   otherwise up to 2p - 1. */
static int ddp__schedule_rounds(int p, int m) { return m / p > 1 ? m / p : 1; }

/* Appends number k of a rank's forwards or backwards. The order is: one round of a chunk, then the same
   micro-batches of the next chunk. Backwards visit the chunks in reverse order. */
static void ddp__schedule_push_in_rounds(ddp_schedule *s, ddp_action_kind kind, int rank, int k, int v,
                                         int round) {
    int chunk = k / round % v, microbatch = k / (round * v) * round + k % round;
    if (kind != DDP_ACTION_FORWARD) chunk = v - 1 - chunk;
    ddp__schedule_push(s, kind, chunk * s->rank_count + rank, microbatch);
}

/* Generates all kinds of the 1F1B family. Warmup forwards fill the pipeline: those before the last
   chunk's first forward, and warmup_per_rank more for each rank after this one. Then forwards and
   backwards alternate, and the remaining backwards follow. weight_delay > 0: W follows its I after
   weight_delay * rank further I. */
static void ddp__schedule_generate_1f1b(ddp_schedule *s, const ddp_schedule_desc *d, int rank,
                                        int warmup_per_rank, int weight_delay) {
    int p = d->rank_count;
    int m = d->microbatch_count;
    int v = d->chunk_count;
    int round = m / ddp__schedule_rounds(p, m);
    int total = m * v, lag = weight_delay * rank;
    int64_t warmup = (int64_t)(v - 1) * round + (int64_t)warmup_per_rank * (p - 1 - rank);
    int fill = warmup < total ? (int)warmup : total;
    for (int k = 0; k < fill + total + lag; k++) {
        int b = k - fill, w = b - lag;
        if (k < total) ddp__schedule_push_in_rounds(s, DDP_ACTION_FORWARD, rank, k, v, round);
        if (b >= 0 && b < total)
            ddp__schedule_push_in_rounds(s, weight_delay ? DDP_ACTION_INPUT_GRAD : DDP_ACTION_BACKWARD, rank,
                                         b, v, round);
        if (weight_delay && w >= 0 && w < total)
            ddp__schedule_push_in_rounds(s, DDP_ACTION_WEIGHT_GRAD, rank, w, v, round);
    }
}

/* Generates all forwards of a block of micro-batches, chunk by chunk, then all its backwards. Blocks of m
   micro-batches give GPipe and looped BFS, blocks of 1 give naive. */
static void ddp__schedule_generate_blocks(ddp_schedule *s, int rank, int m, int v, int block) {
    int p = s->rank_count;
    for (int start = 0; start < m; start += block) {
        for (int chunk = 0; chunk < v; chunk++)
            for (int i = start; i < start + block; i++)
                ddp__schedule_push(s, DDP_ACTION_FORWARD, chunk * p + rank, i);
        for (int chunk = v - 1; chunk >= 0; chunk--)
            for (int i = start; i < start + block; i++)
                ddp__schedule_push(s, DDP_ACTION_BACKWARD, chunk * p + rank, i);
    }
}

/* A rank r of a V has two stages: stage[0] = r on the way down, stage[1] = 2p-1-r on the way up. */
typedef struct ddp__schedule_v {
    ddp_schedule *s;
    int stage[2], m;
    int next[2][DDP_ACTION_KIND_COUNT]; /* next micro-batch of each kind of action; I and B share a count */
    int searched;                       /* every I before actions[searched] has its W */
} ddp__schedule_v;

/* Appends the actions of a phase `times` times. Micro-batches beyond m are counted but not appended.
       f i w b   F I W B of the stage on the way down
       F I W B   F I W B of the stage on the way up
       d         W of the earliest I without W
       +         the action before it overlaps with the next one */
static void ddp__schedule_v_phase(ddp__schedule_v *v, int times, const char *phase) {
    static const char letters[] = "fiwbFIWB";
    ddp_schedule *s = v->s;
    for (int k = 0, length = (int)strlen(phase); k < times * length && s->failed == DDP_OK; k++) {
        char c = phase[k % length];
        if (c == '+')
            s->actions[s->count - 1].overlaps = 1;
        else if (c == 'd') {
            while (s->actions[v->searched].kind != DDP_ACTION_INPUT_GRAD) v->searched++;
            ddp__schedule_push(s, DDP_ACTION_WEIGHT_GRAD, s->actions[v->searched].stage,
                               s->actions[v->searched].microbatch);
            v->searched++;
        } else {
            int letter = (int)(strchr(letters, c) - letters), side = letter / 4;
            ddp_action_kind kind = (ddp_action_kind)(DDP_ACTION_FORWARD + letter % 4);
            int i = v->next[side][kind == DDP_ACTION_BACKWARD ? DDP_ACTION_INPUT_GRAD : kind]++;
            if (i < v->m) ddp__schedule_push(s, kind, v->stage[side], i);
        }
    }
}

/* Generates ZB-V for at least 2p-1 micro-batches. If m is smaller, the surplus is left out. */
static void ddp__schedule_generate_zb_v(ddp_schedule *s, int rank, int m) {
    int p = s->rank_count, n = m > 2 * p - 1 ? m : 2 * p - 1;
    ddp__schedule_v v = {s, {rank, 2 * p - 1 - rank}, m, {{0}}, s->count};
    ddp__schedule_v_phase(&v, 2 * (p - rank) - 1, "f");
    ddp__schedule_v_phase(&v, rank, "Ff");
    ddp__schedule_v_phase(&v, p - rank, "FIW");
    ddp__schedule_v_phase(&v, n - p, "fiwFIW");
    ddp__schedule_v_phase(&v, rank, "iI");
    ddp__schedule_v_phase(&v, p - rank, "iw");
    ddp__schedule_v_phase(&v, rank, "W");
    ddp__schedule_v_phase(&v, rank, "w");
}

/* Generates DualPipeV, in the order of DeepSeek's published code. On the rank at the tip of the V, the first
   forward and backward do not overlap, so that its two stages do not wait for each other. */
static void ddp__schedule_generate_dualpipe_v(ddp_schedule *s, int rank, int m) {
    int p = s->rank_count, late = p - 1 - rank, tip = late == 0;
    ddp__schedule_v v = {s, {rank, 2 * p - 1 - rank}, m, {{0}}, s->count};
    ddp__schedule_v_phase(&v, 2 * late, "f");
    ddp__schedule_v_phase(&v, rank + 1, "fF");
    ddp__schedule_v_phase(&v, late, "IdF");
    ddp__schedule_v_phase(&v, tip, "fBF+b");
    ddp__schedule_v_phase(&v, m - 2 * p + rank + 1 - tip, "f+BF+b");
    ddp__schedule_v_phase(&v, late, "BF+b");
    ddp__schedule_v_phase(&v, (rank + 1) / 2, "Bb");
    ddp__schedule_v_phase(&v, rank % 2 == 0, "Bi");
    ddp__schedule_v_phase(&v, (rank + 1) / 2, "Ii");
    ddp__schedule_v_phase(&v, late, "di");
    ddp__schedule_v_phase(&v, rank + 1, "d");
}

/* Checks that m is a multiple of `step` and not below `min`. The error names the nearest valid m. */
static ddp_result ddp__schedule_check_multiple(const ddp_schedule_desc *d, int step, int min) {
    int m = d->microbatch_count;
    int down = m / step * step;
    int nearest = m - down < step - (m - down) ? down : down + step;
    if (m % step == 0 && m >= min) return DDP_OK;
    if (nearest < min) nearest = (min + step - 1) / step * step;
    if (step > 1)
        return DDP__SCHEDULE_INVALID(
            "microbatch_count=%d, but %s on %d ranks needs a multiple of %d; use %d, the nearest", m,
            ddp_schedule_kind_name(d->kind), d->rank_count, step, nearest);
    return DDP__SCHEDULE_INVALID(
        "microbatch_count=%d, but %s on %d ranks needs at least %d; use %d, the nearest", m,
        ddp_schedule_kind_name(d->kind), d->rank_count, min, nearest);
}

/* Checks that all rounds of interleaved-1F1B have the same size. The error names the nearest valid m; of two,
   the one that is a multiple of p. */
static ddp_result ddp__schedule_check_rounds(const ddp_schedule_desc *d) {
    int p = d->rank_count;
    int m = d->microbatch_count;
    int rounds = ddp__schedule_rounds(p, m);
    int nearest = 0;
    if (m % rounds == 0) return DDP_OK;
    for (int distance = 1; !nearest; distance++) { /* ends at a multiple of p; m > p, since rounds > 1 */
        int below = m - distance, above = m + distance;
        if (above % ddp__schedule_rounds(p, above) == 0) nearest = above;
        if (below % ddp__schedule_rounds(p, below) == 0 && (!nearest || nearest % p != 0)) nearest = below;
    }
    return DDP__SCHEDULE_INVALID("microbatch_count=%d, but %s on %d ranks needs a multiple of %d "
                                 "(microbatch_count / rank_count, rounded down); use %d, the nearest",
                                 m, ddp_schedule_kind_name(d->kind), p, rounds, nearest);
}

static ddp_result ddp__schedule_check_interval(ddp_schedule_desc *d) {
    int m = d->microbatch_count;
    int two = d->kind == DDP_SCHEDULE_PIPEDREAM_2BW;
    int min = two ? d->rank_count : 1;
    if (d->kind != DDP_SCHEDULE_PIPEDREAM && !two) {
        if (d->update_interval && d->update_interval != m)
            return DDP__SCHEDULE_INVALID(
                "update_interval=%d, but %s updates once, after all %d micro-batches; set it to 0",
                d->update_interval, ddp_schedule_kind_name(d->kind), m);
        d->update_interval = m;
        return DDP_OK;
    }
    if (!d->update_interval) d->update_interval = two ? m : 1;
    if (two && m < min) return ddp__schedule_check_multiple(d, 1, min);
    if (d->update_interval >= min && d->update_interval <= m && m % d->update_interval == 0) return DDP_OK;
    for (int distance = 1;; distance++) /* m itself always works */
        for (int side = -1; side <= 1; side += 2) {
            int64_t near = (int64_t)d->update_interval + side * (int64_t)distance;
            if (near >= min && near <= m && m % near == 0)
                return DDP__SCHEDULE_INVALID(
                    "update_interval=%d, but %s needs a divisor of microbatch_count=%d "
                    "of at least %d; use %d, the nearest",
                    d->update_interval, ddp_schedule_kind_name(d->kind), m, min, (int)near);
        }
}

static ddp_result ddp__schedule_desc_resolve(const ddp_schedule_desc *desc, ddp_schedule_desc *d) {
    int vee, any, p, m;
    if (!desc) return DDP__SCHEDULE_INVALID("desc is NULL");
    *d = *desc;
    p = d->rank_count;
    m = d->microbatch_count;
    if ((int)d->kind < 0 || d->kind >= DDP_SCHEDULE_KIND_COUNT)
        return DDP__SCHEDULE_INVALID("kind=%d; use 0 to %d", (int)d->kind, DDP_SCHEDULE_KIND_COUNT - 1);
    if (!d->alloc_fn != !d->free_fn)
        return DDP__SCHEDULE_INVALID("set both alloc_fn and free_fn, or neither");
    vee = d->kind == DDP_SCHEDULE_ZB_V || d->kind == DDP_SCHEDULE_DUALPIPE_V;
    any = d->kind == DDP_SCHEDULE_NAIVE || d->kind == DDP_SCHEDULE_INTERLEAVED_1F1B
          || d->kind == DDP_SCHEDULE_LOOPED_BFS || d->kind == DDP_SCHEDULE_INTERLEAVED_ZB_1P;
    if (p < 1 || p > DDP__MAX_STAGES)
        return DDP__SCHEDULE_INVALID("rank_count=%d; use 1 to %d", p, DDP__MAX_STAGES);
    if (m < 1 || m > DDP__MAX_MICROBATCHES)
        return DDP__SCHEDULE_INVALID("microbatch_count=%d; use 1 to %d", m, DDP__MAX_MICROBATCHES);
    if (d->chunk_count == 0) d->chunk_count = vee ? 2 : 1;
    if (d->chunk_count < 0 || d->chunk_count > DDP__MAX_STAGES / p)
        return DDP__SCHEDULE_INVALID("chunk_count=%d; use 1 to %d, for at most %d stages", d->chunk_count,
                                     DDP__MAX_STAGES / p, DDP__MAX_STAGES);
    if (!any && d->chunk_count != 1 + vee)
        return DDP__SCHEDULE_INVALID("chunk_count=%d, but %s has %d; use another count only with "
                                     "interleaved-1F1B, looped-BFS, interleaved-ZB-1P and naive",
                                     d->chunk_count, ddp_schedule_kind_name(d->kind), 1 + vee);
    if ((int64_t)p * m * d->chunk_count > DDP__MAX_ACTIONS / 3)
        return DDP__SCHEDULE_INVALID(
            "%d ranks x %d micro-batches x %d chunks are more than %d actions; use fewer of them", p, m,
            d->chunk_count, DDP__MAX_ACTIONS);
    if (d->memory_limit < 0 || d->memory_limit != d->memory_limit)
        return DDP__SCHEDULE_INVALID("memory_limit=%g; use a positive limit, or 0 for the memory of ZB-1p",
                                     d->memory_limit);
    if (d->kind == DDP_SCHEDULE_INTERLEAVED_1F1B) DDP_TRY(ddp__schedule_check_rounds(d));
    if (d->kind == DDP_SCHEDULE_INTERLEAVED_ZB_1P) DDP_TRY(ddp__schedule_check_multiple(d, p, p));
    if (d->kind == DDP_SCHEDULE_DUALPIPE_V && m < 2 * p) return ddp__schedule_check_multiple(d, 1, 2 * p);
    return ddp__schedule_check_interval(d);
}

static void ddp__schedule_generate_rank(ddp_schedule *s, const ddp_schedule_desc *d, int rank) {
    int m = d->microbatch_count;
    ddp_schedule_kind kind = d->kind;
    if (kind == DDP_SCHEDULE_NAIVE)
        ddp__schedule_generate_blocks(s, rank, m, d->chunk_count, 1);
    else if (kind == DDP_SCHEDULE_GPIPE || kind == DDP_SCHEDULE_LOOPED_BFS)
        ddp__schedule_generate_blocks(s, rank, m, d->chunk_count, m);
    else if (kind == DDP_SCHEDULE_INTERLEAVED_1F1B)
        ddp__schedule_generate_1f1b(s, d, rank, 2, 0);
    else if (kind == DDP_SCHEDULE_ZB_H1 || kind == DDP_SCHEDULE_INTERLEAVED_ZB_1P)
        ddp__schedule_generate_1f1b(s, d, rank, 1, 1);
    else if (kind == DDP_SCHEDULE_ZB_H2)
        ddp__schedule_generate_1f1b(s, d, rank, 2, 2);
    else if (kind == DDP_SCHEDULE_ZB_V)
        ddp__schedule_generate_zb_v(s, rank, m);
    else if (kind == DDP_SCHEDULE_DUALPIPE_V)
        ddp__schedule_generate_dualpipe_v(s, rank, m);
    else
        ddp__schedule_generate_1f1b(s, d, rank, 1, 0); /* 1F1B, PipeDream and PipeDream-2BW */
}

/* Creates a schedule of any kind except AUTO. */
static ddp_result ddp__schedule_generate(ddp_schedule **out, const ddp_schedule_desc *d) {
    ddp_schedule *s = ddp__schedule_new(d);
    if (!s) return DDP_ERR_NO_MEMORY;
    for (int rank = 0; rank < d->rank_count; rank++) {
        ddp__schedule_generate_rank(s, d, rank);
        ddp__schedule_end_rank(s);
    }
    return ddp__schedule_finish(out, s);
}

//== dependencies between actions ================================================ >>impl-schedule-graph
/* The dependency graph of a schedule: which action of another rank an action waits for. ddp__graph_open fills
   it, and the next two sections check it and run it. Simulation, lowering, drawing and the runner use it. */

/* A schedule as a dependency graph. A table contains the index of the action of each cell, with cell = stage
   * m + micro-batch; -1 = the action is missing. A SEND or RECV uses the cell of the sending stage. Every
   action waits for at most one action of another list, and at most one such action waits for it:

       F of stage s      F of stage s-1, or its RECV_F, which comes earlier in the list
       I, B of stage s   I or B of stage s+1, or its RECV_B
       RECV              its SEND
       SEND              the RECV of the message before it to the same rank: one message is in flight */
typedef struct ddp__schedule_graph {
    const ddp_schedule *s;
    const ddp_stage_cost *costs; /* NULL = F, I and W take 1 */
    /* One table per kind that computes or communicates. B is entered in the tables of I and W. The table of F
       is the start of the allocation that contains everything except times. */
    int *table[DDP_ACTION_KIND_COUNT];
    int *previous_recv;  /* per action: the RECV that a SEND waits for, or -1 */
    int *waiting_rank;   /* per action: the rank that waits for it, or -1 */
    int *position;       /* per rank: index of its next action */
    int *stack;          /* ranks that may be able to continue */
    unsigned char *done; /* per action */
    int has_comm, has_sharding, has_reduce;
    int sequential_pairs;   /* an overlapping pair without `overlapped` cost: 1 = one after the other, 0 =
                               both take the sum */
    ddp_action_time *times; /* NULL = untimed */
} ddp__schedule_graph;

static __attribute__((format(printf, 3, 4))) ddp_result
ddp__schedule_fail_at(const ddp_schedule *s, int index, const char *format, ...) {
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_check: rank %d position %d %s: %s",
                    ddp__action_rank(s, index), ddp__action_position(s, index),
                    ddp__action_label(&s->actions[index]).text, text);
}

/* Returns the other stage of a SEND or RECV. */
static int ddp__action_peer_stage(const ddp_action *a) {
    return a->stage + (a->kind == DDP_ACTION_SEND_F || a->kind == DDP_ACTION_RECV_B ? 1 : -1);
}

static int ddp__graph_cell(const ddp__schedule_graph *graph, int stage, int microbatch) {
    return stage * graph->s->microbatch_count + microbatch;
}

/* Returns the cell of a computation or message. A message has the cell of the sending stage. */
static int ddp__graph_action_cell(const ddp__schedule_graph *graph, const ddp_action *a) {
    int received = ddp__action_communicates(a->kind) && !ddp__action_sends(a->kind);
    return ddp__graph_cell(graph, received ? ddp__action_peer_stage(a) : a->stage, a->microbatch);
}

static void ddp__graph_close(ddp__schedule_graph *graph) {
    ddp__schedule_free(graph->s, graph->table[DDP_ACTION_FORWARD]);
    ddp__schedule_free(graph->s, graph->times);
    graph->table[DDP_ACTION_FORWARD] = NULL;
    graph->times = NULL;
}

static ddp_result ddp__graph_alloc(ddp__schedule_graph *graph) {
    const ddp_schedule *s = graph->s;
    size_t cells = (size_t)s->stage_count * (size_t)s->microbatch_count;
    size_t actions = (size_t)s->count;
    size_t ranks = (size_t)s->rank_count;
    size_t numbers = 7 * cells + 2 * actions + 2 * ranks;
    int *next = (int *)ddp__schedule_alloc(s, 1, numbers * sizeof *next + actions);
    if (!next) return DDP_ERR_NO_MEMORY;
    for (size_t i = 0; i < numbers; i++) next[i] = -1;
    for (int kind = 0; kind < DDP_ACTION_KIND_COUNT; kind++) {
        if (!ddp__action_computes((ddp_action_kind)kind) && !ddp__action_communicates((ddp_action_kind)kind))
            continue;
        graph->table[kind] = kind == DDP_ACTION_BACKWARD ? graph->table[DDP_ACTION_INPUT_GRAD] : next;
        if (kind != DDP_ACTION_BACKWARD) next += cells;
    }
    graph->previous_recv = next;
    graph->waiting_rank = graph->previous_recv + actions;
    graph->position = graph->waiting_rank + actions;
    graph->stack = graph->position + ranks;
    graph->done = (unsigned char *)(graph->stack + ranks);
    return DDP_OK;
}

/* Checks that each stage is on a rank, and that the schedule has at least one action per cell. The second
   check bounds the memory of the tables. */
static ddp_result ddp__schedule_check_stages(const ddp_schedule *s) {
    int highest = 0;
    if (s->stage_count == 0 || s->microbatch_count == 0)
        return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_check: the lists have no computation (F, I, W or B)");
    for (int i = 0; i < s->count; i++)
        if (s->actions[i].stage > s->actions[highest].stage) highest = i;
    for (int stage = 0; stage < s->stage_count; stage++)
        if (s->stage_rank[stage] < 0)
            return ddp__schedule_fail_at(s, highest, "%d stages, but stage %d has no actions", s->stage_count,
                                         stage);
    if ((int64_t)s->stage_count * s->microbatch_count > s->count) {
        highest = 0;
        for (int i = 0; i < s->count; i++)
            if (s->actions[i].microbatch > s->actions[highest].microbatch) highest = i;
        return ddp__schedule_fail_at(
            s, highest, "%d stages x %d micro-batches need more than the %d actions of the schedule",
            s->stage_count, s->microbatch_count, s->count);
    }
    return DDP_OK;
}

/* Enters an action in its table. The cell must be free. B occupies the cells of I and W. */
static ddp_result ddp__graph_enter(ddp__schedule_graph *graph, int index) {
    const ddp_schedule *s = graph->s;
    const ddp_action *a = &s->actions[index];
    int sends = ddp__action_sends(a->kind), peer = ddp__action_peer_stage(a), cell, existing;
    graph->has_sharding |= a->kind == DDP_ACTION_UNSHARD || a->kind == DDP_ACTION_RESHARD;
    graph->has_reduce |= a->kind == DDP_ACTION_REDUCE_GRAD;
    if (ddp__action_communicates(a->kind)) {
        graph->has_comm = 1;
        if (peer < 0 || peer == s->stage_count)
            return ddp__schedule_fail_at(s, index, "stage %d has no neighbor to %s", a->stage,
                                         sends ? "send to" : "receive from");
        if (s->stage_rank[a->stage] == s->stage_rank[peer])
            return ddp__schedule_fail_at(s, index, "stage %d is on the same rank, so nothing is %s it", peer,
                                         sends ? "sent to" : "received from");
    } else if (!ddp__action_computes(a->kind))
        return DDP_OK;
    cell = ddp__graph_action_cell(graph, a);
    existing = graph->table[a->kind][cell];
    if (existing < 0 && a->kind == DDP_ACTION_BACKWARD) existing = graph->table[DDP_ACTION_WEIGHT_GRAD][cell];
    if (existing >= 0)
        return ddp__schedule_fail_at(
            s, index, "%s of the same stage and micro-batch is already at position %d",
            ddp__action_label(&s->actions[existing]).text, ddp__action_position(s, existing));
    graph->table[a->kind][cell] = index;
    if (a->kind == DDP_ACTION_BACKWARD) graph->table[DDP_ACTION_WEIGHT_GRAD][cell] = index;
    return DDP_OK;
}

//== schedule checks ============================================================= >>impl-schedule-check
/* Checks of ddp_schedule_check: each list, each micro-batch on each stage, messages and sharding. Every error
   names rank, position and action. ddp__graph_check_lists calls them in the order of this section.

     one cell (stage s, micro-batch i)          one pair of neighbouring stages on two ranks
         F  ->  I  ->  W     or  F  ->  B           F of s -> SEND_F ~~> RECV_F -> F of s+1
         each once, in this order                   I of s <- RECV_B <~~ SEND_B <- I of s+1      */

/* Checks that an overlapping pair is a forward and a backward, and that neither needs the other. */
static ddp_result ddp__schedule_check_overlap(const ddp_schedule *s, int index) {
    const ddp_action *a = &s->actions[index];
    int rank = ddp__action_rank(s, index);
    if (!a->overlaps) return DDP_OK;
    if (index + 1 == s->first[rank + 1])
        return ddp__schedule_fail_at(s, index, "no action follows to overlap with");
    if (a[1].overlaps) return ddp__schedule_fail_at(s, index, "more than two actions overlap");
    if (!ddp__action_computes(a[0].kind) || !ddp__action_computes(a[1].kind)
        || (a[0].kind == DDP_ACTION_FORWARD) == (a[1].kind == DDP_ACTION_FORWARD))
        return ddp__schedule_fail_at(s, index,
                                     "it overlaps with %s; only a forward and a backward can overlap",
                                     ddp__action_label(&a[1]).text);
    if (a[0].stage == a[1].stage && a[0].microbatch == a[1].microbatch)
        return ddp__schedule_fail_at(s, index, "it overlaps with %s, but one of them needs the other",
                                     ddp__action_label(&a[1]).text);
    return DDP_OK;
}

static ddp_result ddp__graph_check_order(const ddp__schedule_graph *graph, int index, int needs,
                                         const char *what) {
    if (needs < index) return DDP_OK;
    return ddp__schedule_fail_at(graph->s, index, "its %s %s comes later on this rank, at position %d", what,
                                 ddp__action_label(&graph->s->actions[needs]).text,
                                 ddp__action_position(graph->s, needs));
}

/* Checks that a cell has an action: `existing` is its index, -1 = missing. The error gives the position of
   `reported`, another action of the same cell, unless that is -1. */
static ddp_result ddp__graph_check_present(const ddp__schedule_graph *graph, int existing,
                                           ddp_action_kind kind, int stage, int microbatch, int reported,
                                           const char *what) {
    const ddp_schedule *s = graph->s;
    int rank = s->stage_rank[stage];
    if (existing >= 0) return DDP_OK;
    if (reported >= 0)
        return ddp__schedule_fail_at(s, reported, "its %s %s is missing on this rank", what,
                                     ddp__action_label_of(kind, stage, microbatch).text);
    return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_check: rank %d position %d: the list ends without %s",
                    rank, s->first[rank + 1] - s->first[rank],
                    ddp__action_label_of(kind, stage, microbatch).text);
}

/* Checks one micro-batch on one stage: one forward, then one backward. A tensor is computed before its SEND,
   and received before the action that uses it. */
static ddp_result ddp__graph_check_cell(const ddp__schedule_graph *graph, int stage, int i) {
    const ddp_schedule *s = graph->s;
    int cell = ddp__graph_cell(graph, stage, i);
    int f = graph->table[DDP_ACTION_FORWARD][cell];
    int g = graph->table[DDP_ACTION_INPUT_GRAD][cell];
    int w = graph->table[DDP_ACTION_WEIGHT_GRAD][cell];
    DDP_TRY(ddp__graph_check_present(graph, f, DDP_ACTION_FORWARD, stage, i, g >= 0 ? g : w, "forward"));
    if (w < 0) DDP_TRY(ddp__graph_check_present(graph, g, DDP_ACTION_BACKWARD, stage, i, f, "backward"));
    DDP_TRY(ddp__graph_check_present(graph, g, DDP_ACTION_INPUT_GRAD, stage, i, w, "input gradient"));
    DDP_TRY(ddp__graph_check_present(graph, w, DDP_ACTION_WEIGHT_GRAD, stage, i, g, "weight gradient"));
    DDP_TRY(ddp__graph_check_order(graph, g, f, "forward"));
    if (w != g) DDP_TRY(ddp__graph_check_order(graph, w, g, "input gradient"));
    for (int backward = 0; backward < 2 && graph->has_comm; backward++) {
        ddp_action_kind sending = backward ? DDP_ACTION_SEND_B : DDP_ACTION_SEND_F;
        ddp_action_kind receiving = backward ? DDP_ACTION_RECV_B : DDP_ACTION_RECV_F;
        int to = backward ? stage - 1 : stage + 1;
        int producer = backward ? g : f;
        int send = graph->table[sending][cell];
        int recv = graph->table[receiving][cell];
        int consumer;
        if (to < 0 || to == s->stage_count || s->stage_rank[to] == s->stage_rank[stage]) continue;
        consumer = graph->table[backward ? DDP_ACTION_INPUT_GRAD : DDP_ACTION_FORWARD]
                               [ddp__graph_cell(graph, to, i)];
        DDP_TRY(ddp__graph_check_present(graph, send, sending, stage, i, producer, "message"));
        if (consumer >= 0)
            DDP_TRY(ddp__graph_check_present(graph, recv, receiving, to, i, consumer, "message"));
        DDP_TRY(ddp__graph_check_order(graph, send, producer, "tensor"));
        if (consumer >= 0) DDP_TRY(ddp__graph_check_order(graph, consumer, recv, "message"));
    }
    return DDP_OK;
}

/* Returns the index of the RECV of a SEND, or of the SEND of a RECV. */
static int ddp__graph_message_partner(const ddp__schedule_graph *graph, int index) {
    const ddp_action *a = &graph->s->actions[index];
    int partner = ddp__action_sends(a->kind) ? (int)a->kind + 1 : (int)a->kind - 1;
    return graph->table[partner][ddp__graph_action_cell(graph, a)];
}

/* Checks a RECV: the message that its SEND follows is the one that it follows itself. previous: the RECV
   before it from the same peer, or -1. */
static ddp_result ddp__graph_check_receive_order(const ddp__schedule_graph *graph, int index, int peer,
                                                 int previous) {
    const ddp_schedule *s = graph->s;
    int expected = graph->previous_recv[ddp__graph_message_partner(graph, index)];
    if (expected == previous) return DDP_OK;
    if (expected < 0)
        return ddp__schedule_fail_at(
            s, index, "rank %d sends this message first, but this rank receives another one before it", peer);
    return ddp__schedule_fail_at(s, index,
                                 "messages from rank %d arrive in the order of their sends: %s "
                                 "must be received just before",
                                 peer, ddp__action_label(&s->actions[expected]).text);
}

/* Checks that two ranks send and receive their messages in the same order, and fills previous_recv. The first
   pass goes over all SENDs, the second over all RECVs. last: room for one index per rank, the latest message
   to or from it.

       rank 0   SEND x   SEND y      previous_recv of SEND y = RECV x
       rank 1   RECV x   RECV y      RECV y must follow RECV x          */
static ddp_result ddp__graph_check_messages(ddp__schedule_graph *graph, int *last) {
    const ddp_schedule *s = graph->s;
    for (int sends = 1; sends >= 0; sends--)
        for (int rank = 0; rank < s->rank_count; rank++) {
            for (int i = s->first[rank]; i < s->first[rank + 1]; i++)
                if (ddp__action_communicates(s->actions[i].kind))
                    last[s->stage_rank[ddp__action_peer_stage(&s->actions[i])]] = -1;
            for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
                const ddp_action *a = &s->actions[i];
                int peer;
                if (!ddp__action_communicates(a->kind) || ddp__action_sends(a->kind) != sends) continue;
                peer = s->stage_rank[ddp__action_peer_stage(a)];
                if (!sends) DDP_TRY(ddp__graph_check_receive_order(graph, i, peer, last[peer]));
                if (sends && last[peer] >= 0)
                    graph->previous_recv[i] = ddp__graph_message_partner(graph, last[peer]);
                last[peer] = i;
            }
        }
    return DDP_OK;
}

/* Checks that UNSHARD and RESHARD enclose a stage's actions, and that REDUCE_GRAD follows the last W or B of
   each update. state: room for 2 entries per stage. */
static ddp_result ddp__graph_check_sharding(const ddp__schedule_graph *graph, int *state) {
    const ddp_schedule *s = graph->s;
    int *unsharded = state, *accumulated = state + s->stage_count;
    for (int i = 0; i < 2 * s->stage_count; i++) state[i] = 0;
    for (int i = 0; i < s->count; i++) {
        const ddp_action *a = &s->actions[i];
        if (a->kind == DDP_ACTION_UNSHARD || a->kind == DDP_ACTION_RESHARD) {
            if (unsharded[a->stage] == (a->kind == DDP_ACTION_UNSHARD))
                return ddp__schedule_fail_at(s, i, "stage %d is already %s", a->stage,
                                             unsharded[a->stage] ? "unsharded" : "sharded");
            unsharded[a->stage] = !unsharded[a->stage];
        } else if (ddp__action_computes(a->kind) && graph->has_sharding && !unsharded[a->stage])
            return ddp__schedule_fail_at(s, i, "stage %d is sharded; put its UNSHARD before this action",
                                         a->stage);
        if (!graph->has_reduce) continue;
        if (ddp__action_ends(a->kind)) {
            if (accumulated[a->stage] == s->update_interval)
                return ddp__schedule_fail_at(
                    s, i, "the update is complete; put %dREDUCE_GRAD before this action", a->stage);
            accumulated[a->stage]++;
        } else if (a->kind == DDP_ACTION_REDUCE_GRAD) {
            if (accumulated[a->stage] != s->update_interval)
                return ddp__schedule_fail_at(s, i,
                                             "only %d of %d weight gradients of stage %d come before it",
                                             accumulated[a->stage], s->update_interval, a->stage);
            accumulated[a->stage] = 0;
        }
    }
    for (int stage = 0; stage < s->stage_count; stage++) {
        int rank = s->stage_rank[stage];
        if ((graph->has_reduce && accumulated[stage]) || (graph->has_sharding && unsharded[stage]))
            return ddp_fail(DDP_ERR_INVALID,
                            "ddp_schedule_check: rank %d position %d: the list ends without %d%s", rank,
                            s->first[rank + 1] - s->first[rank], stage,
                            graph->has_reduce && accumulated[stage] ? "REDUCE_GRAD" : "RESHARD");
    }
    return DDP_OK;
}

/* Checks each list, and the messages between lists. Allocates the tables of the graph. */
static ddp_result ddp__graph_check_lists(ddp__schedule_graph *graph) {
    const ddp_schedule *s = graph->s;
    DDP_TRY(ddp__schedule_check_stages(s));
    DDP_TRY(ddp__graph_alloc(graph));
    for (int rank = 0; rank < s->rank_count; rank++)
        for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
            int stage = s->actions[i].stage;
            if (stage >= 0 && s->stage_rank[stage] != rank)
                return ddp__schedule_fail_at(s, i, "stage %d is already on rank %d", stage,
                                             s->stage_rank[stage]);
            DDP_TRY(ddp__schedule_check_overlap(s, i));
            DDP_TRY(ddp__graph_enter(graph, i));
        }
    for (int stage = 0; stage < s->stage_count; stage++)
        for (int i = 0; i < s->microbatch_count; i++) DDP_TRY(ddp__graph_check_cell(graph, stage, i));
    if (graph->has_comm) DDP_TRY(ddp__graph_check_messages(graph, graph->position));
    /* Each stage has at least two actions, so waiting_rank has room for two entries per stage. */
    return graph->has_sharding || graph->has_reduce ? ddp__graph_check_sharding(graph, graph->waiting_rank)
                                                    : DDP_OK;
}

//== execution and times ======================================================= >>impl-schedule-execute
/* Runs all lists of a graph against each other, without callbacks. This proves that no rank waits forever,
   and gives the times of all actions. ddp__graph_open is the entry; ddp_schedule_check and
   ddp_schedule_simulate call it.

     rank 0   F0  F1  SEND ...            each rank runs until its next action waits for another rank;
     rank 1   RECV waits for rank 0       when that action is done, the waiting rank is pushed on the stack */

/* Returns the index of the action that computes the inputs of a forward, or the output gradients of a
   backward. Returns -1 at the ends of the pipeline and for other actions. */
static int ddp__graph_source(const ddp__schedule_graph *graph, int index) {
    const ddp_action *a = &graph->s->actions[index];
    if (a->kind == DDP_ACTION_FORWARD && a->stage > 0)
        return graph->table[DDP_ACTION_FORWARD][ddp__graph_cell(graph, a->stage - 1, a->microbatch)];
    if ((a->kind == DDP_ACTION_INPUT_GRAD || a->kind == DDP_ACTION_BACKWARD)
        && a->stage + 1 < graph->s->stage_count)
        return graph->table[DDP_ACTION_INPUT_GRAD][ddp__graph_cell(graph, a->stage + 1, a->microbatch)];
    return -1;
}

/* Returns the index of the pending action that this one waits for, or -1. In a schedule with messages a
   computation never waits for another rank: its RECV comes earlier in the list, so its source is done. */
static int ddp__graph_blocker(const ddp__schedule_graph *graph, int index) {
    ddp_action_kind kind = graph->s->actions[index].kind;
    int blocker;
    if (ddp__action_sends(kind))
        blocker = graph->previous_recv[index];
    else if (ddp__action_communicates(kind))
        blocker = ddp__graph_message_partner(graph, index);
    else
        blocker = ddp__graph_source(graph, index);
    return blocker >= 0 && !graph->done[blocker] ? blocker : -1;
}

/* Returns the costs of a stage with defaults filled in. */
static ddp_stage_cost ddp__schedule_stage_cost(const ddp_stage_cost *costs, int stage) {
    static const ddp_stage_cost unit = {1, 1, 1, 0, 0, 1, 0.5};
    ddp_stage_cost cost = costs ? costs[stage] : unit;
    if (!(cost.activation > 0)) cost.activation = 1;
    if (!(cost.weight_activation > 0)) cost.weight_activation = cost.activation / 2;
    return cost;
}

/* Returns the duration of an action. */
static double ddp__action_cost(const ddp_stage_cost *costs, const ddp_action *a) {
    ddp_stage_cost cost;
    if (!ddp__action_computes(a->kind)) return 0;
    cost = ddp__schedule_stage_cost(costs, a->stage);
    if (a->kind == DDP_ACTION_FORWARD) return cost.forward;
    if (a->kind == DDP_ACTION_INPUT_GRAD) return cost.input_grad;
    return a->kind == DDP_ACTION_WEIGHT_GRAD ? cost.weight_grad : cost.input_grad + cost.weight_grad;
}

/* Returns the time at which the action's tensors have arrived, but not before `at`. */
static double ddp__graph_arrival(const ddp__schedule_graph *graph, int index, double at) {
    const ddp_schedule *s = graph->s;
    int source = ddp__graph_source(graph, index), source_stage;
    double arrival;
    if (source < 0) return at;
    arrival = graph->times[source].end;
    source_stage = s->actions[source].stage;
    if (graph->costs && s->stage_rank[source_stage] != s->stage_rank[s->actions[index].stage])
        arrival += graph->costs[source_stage].transfer;
    return arrival > at ? arrival : at;
}

/* Sets the earliest times of an action, or of an overlapping pair, on a rank that is idle from free_at on. */
static void ddp__graph_set_times(ddp__schedule_graph *graph, int index, double free_at) {
    const ddp_action *a = &graph->s->actions[index];
    const ddp_action *f = a->kind == DDP_ACTION_FORWARD ? a : a + 1;
    ddp_action_time *t = &graph->times[index];
    double overlapped_cost = a->overlaps && graph->costs ? graph->costs[f->stage].overlapped : 0;
    if (!a->overlaps || (graph->sequential_pairs && !(overlapped_cost > 0))) {
        for (int k = 0; k <= a->overlaps; k++) {
            t[k].begin = ddp__graph_arrival(graph, index + k, free_at);
            free_at = t[k].end = t[k].begin + ddp__action_cost(graph->costs, &a[k]);
        }
        return;
    }
    double begin = ddp__graph_arrival(graph, index + 1, ddp__graph_arrival(graph, index, free_at));
    double cost = overlapped_cost;
    if (!(cost > 0)) cost = ddp__action_cost(graph->costs, a) + ddp__action_cost(graph->costs, a + 1);
    for (int k = 0; k < 2; k++) {
        t[k].begin = begin;
        t[k].end = begin + cost;
    }
}

/* Runs every list as far as possible: a rank runs until it has to wait, then the ranks that waited for it
   continue. Times are the earliest possible ones, and do not depend on the order in which ranks run. Returns
   the number of ranks that cannot finish. */
static int ddp__graph_run(ddp__schedule_graph *graph) {
    const ddp_schedule *s = graph->s;
    int depth = 0, stuck = 0;
    memset(graph->done, 0, (size_t)s->count);
    for (int i = 0; i < s->count; i++) graph->waiting_rank[i] = -1;
    for (int rank = s->rank_count - 1; rank >= 0; rank--) {
        graph->position[rank] = s->first[rank];
        graph->stack[depth++] = rank;
    }
    while (depth > 0) {
        int rank = graph->stack[--depth];
        while (graph->position[rank] < s->first[rank + 1]) {
            int i = graph->position[rank];
            int n = 1 + s->actions[i].overlaps;
            int blocker = ddp__graph_blocker(graph, i);
            if (blocker < 0 && n == 2) blocker = ddp__graph_blocker(graph, i + 1);
            if (blocker >= 0) {
                graph->waiting_rank[blocker] = rank;
                break;
            }
            if (graph->times)
                ddp__graph_set_times(graph, i, i > s->first[rank] ? graph->times[i - 1].end : 0);
            for (int k = i; k < i + n; k++) {
                graph->done[k] = 1;
                if (graph->waiting_rank[k] >= 0) graph->stack[depth++] = graph->waiting_rank[k];
            }
            graph->position[rank] += n;
        }
    }
    for (int rank = 0; rank < s->rank_count; rank++) stuck += graph->position[rank] < s->first[rank + 1];
    return stuck;
}

/* Returns the action that blocks a stuck rank: its next action, or the one that overlaps with that, waits. */
static int ddp__graph_blocked_by(const ddp__schedule_graph *graph, int rank) {
    int blocker = ddp__graph_blocker(graph, graph->position[rank]);
    return blocker >= 0 ? blocker : ddp__graph_blocker(graph, graph->position[rank] + 1);
}

/* Finds ranks that wait for each other in a circle, starting from a stuck rank, for the error. */
static ddp_result ddp__graph_report_deadlock(const ddp__schedule_graph *graph) {
    const ddp_schedule *s = graph->s;
    int rank = 0, blocker, other, length = 1;
    while (graph->position[rank] == s->first[rank + 1]) rank++;
    /* rank_count steps end inside the circle, wherever they start. */
    for (int k = 0; k < s->rank_count; k++) rank = ddp__action_rank(s, ddp__graph_blocked_by(graph, rank));
    blocker = ddp__graph_blocked_by(graph, rank);
    other = ddp__action_rank(s, blocker);
    for (int next = other; next != rank; length++)
        next = ddp__action_rank(s, ddp__graph_blocked_by(graph, next));
    return ddp__schedule_fail_at(
        s, graph->position[rank],
        "deadlock: it waits for %s at position %d of rank %d, which is blocked in %s "
        "at position %d: a cycle of %d rank%s%s",
        ddp__action_label(&s->actions[blocker]).text, ddp__action_position(s, blocker), other,
        ddp__action_label(&s->actions[graph->position[other]]).text,
        ddp__action_position(s, graph->position[other]), length, length == 1 ? "" : "s",
        graph->has_comm ? ", with one message in flight between two ranks" : "");
}

static ddp_result ddp__schedule_check_costs(int stage_count, const ddp_stage_cost *costs, const char *who) {
    static const char *const names[] = {"forward",    "input_grad", "weight_grad",      "transfer",
                                        "overlapped", "activation", "weight_activation"};
    for (int stage = 0; costs && stage < stage_count; stage++) {
        const ddp_stage_cost *c = &costs[stage];
        const double values[] = {c->forward,    c->input_grad, c->weight_grad,      c->transfer,
                                 c->overlapped, c->activation, c->weight_activation};
        for (int k = 0; k < 7; k++)
            if (!(values[k] >= 0 && values[k] <= DBL_MAX))
                return ddp_fail(DDP_ERR_INVALID, "%s: costs[%d].%s=%g; use a finite number of 0 or more", who,
                                stage, names[k], values[k]);
    }
    return DDP_OK;
}

/* Times of an overlapping pair without an `overlapped` cost. APART: the two run one after the other. PAIRED:
   they begin and end together; the order of messages is derived from these times. */
enum { DDP__TIMES_NONE, DDP__TIMES_SEQUENTIAL, DDP__TIMES_PAIRED };

/* Builds the graph of a schedule and proves that every list runs to its end. Computes times unless
   `timing` is DDP__TIMES_NONE. who: the public function, for errors. The caller frees the graph with
   ddp__graph_close. */
static ddp_result ddp__graph_open(ddp__schedule_graph *graph, const ddp_schedule *s,
                                  const ddp_stage_cost *costs, int timing, const char *who) {
    ddp_result result;
    memset(graph, 0, sizeof *graph);
    if (!s) return ddp_fail(DDP_ERR_INVALID, "%s: schedule is NULL", who);
    graph->s = s;
    graph->costs = costs;
    graph->sequential_pairs = timing == DDP__TIMES_SEQUENTIAL;
    result = ddp__graph_check_lists(graph);
    if (result == DDP_OK && timing != DDP__TIMES_NONE) {
        graph->times = (ddp_action_time *)ddp__schedule_alloc(s, (size_t)s->count, sizeof *graph->times);
        if (!graph->times) result = DDP_ERR_NO_MEMORY;
    }
    if (result == DDP_OK && ddp__graph_run(graph)) result = ddp__graph_report_deadlock(graph);
    if (result == DDP_OK) result = ddp__schedule_check_costs(s->stage_count, costs, who);
    if (result != DDP_OK) ddp__graph_close(graph);
    return result;
}

DDPDEF ddp_result ddp_schedule_check(const ddp_schedule *schedule) {
    ddp__schedule_graph graph;
    DDP_TRY(ddp__graph_open(&graph, schedule, NULL, DDP__TIMES_NONE, "ddp_schedule_check"));
    ddp__graph_close(&graph);
    return DDP_OK;
}

/* Reports one rank: its busy time, and the peak of micro-batches and of memory in flight. */
static ddp_rank_report ddp__schedule_report_rank(const ddp_schedule *s, int rank, const ddp_stage_cost *costs,
                                                 const ddp_action_time *times) {
    ddp_rank_report r;
    double memory = 0;
    int in_flight = 0, begun = 0;
    memset(&r, 0, sizeof r);
    for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
        const ddp_action *a = &s->actions[i];
        ddp_stage_cost cost;
        if (!ddp__action_computes(a->kind)) continue;
        if (!begun || times[i].begin < r.begin) r.begin = times[i].begin;
        if (!begun || times[i].end > r.end) r.end = times[i].end;
        begun = 1;
        if (i == s->first[rank] || !a[-1].overlaps || times[i].begin >= times[i - 1].end)
            r.busy += times[i].end - times[i].begin;
        cost = ddp__schedule_stage_cost(costs, a->stage);
        if (a->kind == DDP_ACTION_FORWARD) {
            in_flight++;
            memory += cost.activation;
        }
        if (in_flight > r.peak_in_flight) r.peak_in_flight = in_flight;
        if (memory > r.peak_memory) r.peak_memory = memory;
        if (ddp__action_ends(a->kind)) in_flight--;
        if (a->kind == DDP_ACTION_INPUT_GRAD) memory -= cost.activation - cost.weight_activation;
        if (a->kind == DDP_ACTION_WEIGHT_GRAD) memory -= cost.weight_activation;
        if (a->kind == DDP_ACTION_BACKWARD) memory -= cost.activation;
        if (memory > r.peak_memory) r.peak_memory = memory;
    }
    r.weight_versions = s->kind == DDP_SCHEDULE_PIPEDREAM_2BW ? 2 : 1;
    if (s->kind == DDP_SCHEDULE_PIPEDREAM) r.weight_versions = r.peak_in_flight;
    return r;
}

static void ddp__schedule_fill_report(const ddp_schedule *s, const ddp_stage_cost *costs,
                                      const ddp_action_time *times, ddp_schedule_report *report) {
    ddp_rank_report *ranks = report->ranks;
    double first = 0, last = 0, work = 0;
    memset(report, 0, sizeof *report);
    report->ranks = ranks;
    for (int rank = 0; rank < s->rank_count; rank++) {
        ddp_rank_report r = ddp__schedule_report_rank(s, rank, costs, times);
        if (ranks) ranks[rank] = r;
        if (rank == 0 || r.begin < first) first = r.begin;
        if (rank == 0 || r.end > last) last = r.end;
        if (r.end - r.begin > report->span) report->span = r.end - r.begin;
        if (r.busy > work) work = r.busy;
        if (r.peak_in_flight > report->peak_in_flight) report->peak_in_flight = r.peak_in_flight;
        if (r.peak_memory > report->peak_memory) report->peak_memory = r.peak_memory;
        if (r.weight_versions > report->weight_versions) report->weight_versions = r.weight_versions;
    }
    report->makespan = last - first;
    /* On a rank that never waits, rounding can make work one ulp larger than span. */
    report->bubble_rate = report->span > work ? (report->span - work) / report->span : 0;
}

DDPDEF ddp_result ddp_schedule_simulate(const ddp_schedule *schedule, const ddp_stage_cost *costs,
                                        ddp_schedule_report *report) {
    ddp__schedule_graph play;
    if (!report) return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_simulate: report is NULL");
    DDP_TRY(ddp__graph_open(&play, schedule, costs, DDP__TIMES_SEQUENTIAL, "ddp_schedule_simulate"));
    ddp__schedule_fill_report(schedule, costs, play.times, report);
    ddp__graph_close(&play);
    return DDP_OK;
}

//== cost-based schedules: one run ================================================ >>impl-schedule-auto
/* AUTO runs a list scheduler many times with different rules, and keeps the schedule with the shortest
   span. This section is one run; the next one searches over rules and memory limits. Each run has two
   clocks. The plan's clock decides what a rank does next; its transfers may be longer or shorter than the
   real ones. The real clock runs the same list with the real costs, as ddp_schedule_simulate does. A run
   stops early once the idle time of a rank makes its span at least that of the best schedule. */

/* Rules by which one run chooses between the possible actions. */
typedef struct ddp__auto_rules {
    int tie_break; /* F and I are both ready: 0 = run I, 1 = run the kind that did not run last, 2 = run F */
    int delay_backward; /* 1 = forwards may delay a rank's first I */
    int balance_waits;  /* 1 = the rank that would have waited longest of all starts a W instead of waiting */
    double patience;    /* W starts if F and I are not ready for this fraction of its duration */
    double transfer;    /* the plan's transfer times are the real ones times this */
} ddp__auto_rules;

/* Rules sorted by how much each one improved on those before it, over 400 random pipelines. A large pipeline
   only has time for the first ones. All combinations with the real transfers follow after the table. */
static const ddp__auto_rules ddp__auto_first_rules[] = {
    {0, 0, 1, 1, 1},       {1, 0, 1, 0.25, 1},    {0, 0, 1, 1, 0.9},     {0, 1, 1, 0.75, 0.5},
    {0, 1, 1, 1, 1},       {1, 0, 1, 0.75, 0.9},  {0, 0, 0, 0.9, 0.9},   {0, 1, 1, 0.25, 0.95},
    {0, 0, 1, 0.9, 1},     {1, 0, 0, 0.25, 2},    {1, 1, 0, 0.25, 0.5},  {1, 0, 1, 0.9, 2},
    {0, 0, 0, 0.75, 1.25}, {1, 1, 1, 0.25, 1.5},  {1, 0, 0, 0.25, 0.9},  {0, 1, 0, 0.75, 0.9},
    {0, 0, 0, 0.25, 1.5},  {1, 1, 1, 0.75, 1.25}, {0, 1, 0, 0.25, 1.5},  {0, 1, 1, 0.9, 0.95},
    {1, 0, 1, 0.75, 1.5},  {0, 0, 1, 0.25, 1.25}, {1, 0, 0, 0.75, 1.5},  {0, 1, 1, 0.25, 1.1},
    {1, 1, 1, 0.25, 2},    {0, 1, 1, 0.25, 0.5},  {0, 1, 1, 0.75, 1.1},  {0, 0, 1, 1, 0.5},
    {1, 0, 0, 0.9, 1.25},  {1, 0, 1, 0.75, 0.5},  {0, 0, 1, 0.75, 1.5},  {1, 0, 0, 0.25, 0.95},
    {1, 1, 0, 0.75, 0.9},  {1, 0, 1, 0.9, 1.1},   {0, 1, 0, 0.75, 2},    {1, 0, 1, 0.25, 0.5},
    {1, 0, 0, 0.9, 0.5},   {0, 0, 0, 0.75, 2},    {0, 1, 0, 0.25, 0.9},  {1, 1, 1, 0.25, 0.95},
    {0, 0, 0, 0.25, 1.1},  {0, 0, 1, 0.25, 2},    {1, 1, 0, 0.25, 1.25}, {0, 1, 0, 0.25, 0.95},
};
enum {
    DDP__AUTO_FIRST_RULES = (int)(sizeof ddp__auto_first_rules / sizeof ddp__auto_first_rules[0]),
    DDP__AUTO_RULES = DDP__AUTO_FIRST_RULES + 48
};

static ddp__auto_rules ddp__auto_rules_at(int index) {
    static const double patience[] = {1, 0.9, 0.75, 0.25};
    int i = index < DDP__AUTO_FIRST_RULES ? 0 : index - DDP__AUTO_FIRST_RULES;
    ddp__auto_rules rules = {i % 3, i / 3 % 2, i / 6 % 2, patience[i / 12], 1};
    return index < DDP__AUTO_FIRST_RULES ? ddp__auto_first_rules[index] : rules;
}

/* State of a rank during one run. Kinds of actions are numbered F = 0, I = 1, W = 2. */
typedef struct ddp__auto_rank {
    double cost[3], transfer; /* durations of F, I, W, and of a transfer to a neighbour */
    double planned_transfer;
    double activation, weight_activation; /* memory from F to I, and from I to W */
    double max_memory;                    /* the larger one */
    double work;                          /* duration of all of its actions */
    double first_forward;                 /* earliest begin of its first F, with the real transfers */
    double round_trip;                    /* from there to the earliest begin of its first I */
    double first_backward;                /* earliest begin of its first I, with the planned transfers */
    double idle_at, memory;               /* plan's clock: end of its last action; memory in use */
    double real_begin, real_end;          /* real clock: begin of its first action, end of its last one */
    double waited;                        /* plan's clock: idle time since its first F */
    int next[3], last;                    /* started actions of each kind; the kind that ran last, F or I */
    int length;                           /* actions in its list */
} ddp__auto_rank;

/* End of an F or I, on both clocks. */
typedef struct ddp__auto_end_times {
    double planned, real;
} ddp__auto_end_times;

/* The rank that is idle first decides next: every event that can influence its decision is then known. A
   tournament tree finds this rank: the leaves are ranks, node n contains the winner of nodes 2n and 2n+1. */
typedef struct ddp__auto {
    int p, m, leaves;
    double max_activation; /* memory of one micro-batch on the rank that needs most */
    double memory_limit;   /* memory of a rank in this run */
    double best_span;      /* span of the schedule in best; HUGE_VAL = none yet */
    ddp__auto_rules rules;
    ddp__auto_rank *ranks;
    ddp__auto_end_times *end[2]; /* ends of F and I at [rank * m + micro-batch] */
    int longest_waiting;         /* the rank that has waited longest */
    double *decides_at;          /* per leaf: time of its next decision; DBL_MAX = none */
    int *tree;
    unsigned char *lists, *best_lists; /* kinds of rank r from [3 * m * r] on; micro-batches count up */
} ddp__auto;

/* Returns the earliest start of this rank's next F (0) or I (1). DBL_MAX = its input or memory is missing. */
static double ddp__auto_ready(const ddp__auto *a, int kind, int rank) {
    const ddp__auto_rank *r = &a->ranks[rank], *neighbour;
    int from = kind ? rank + 1 : rank - 1, i = r->next[kind];
    double end;
    if (i == (kind ? r->next[0] : a->m)) return DBL_MAX;
    if (!kind && r->memory + r->max_memory > a->memory_limit) return DBL_MAX;
    if (from < 0 || from == a->p) return r->idle_at; /* an end of the pipeline: nothing has to arrive */
    neighbour = &a->ranks[from];
    if (neighbour->next[kind] <= i) return DBL_MAX;
    end = a->end[kind][(size_t)from * (size_t)a->m + (size_t)i].planned + neighbour->planned_transfer;
    return end > r->idle_at ? end : r->idle_at;
}

enum { DDP__AUTO_WAITS = 3, DDP__AUTO_TOO_LATE = -1 };

/* Appends an action to the rank's list. Returns its kind, or DDP__AUTO_TOO_LATE if this run can no longer
   beat the best schedule. */
static int ddp__auto_start(ddp__auto *a, int rank, int kind, double at) {
    ddp__auto_rank *r = &a->ranks[rank];
    int i = r->next[kind]++, neighbour = -1, waits = 0;
    double real_begin = r->real_end;
    if (kind == 0) neighbour = rank - 1;
    if (kind == 1) neighbour = rank + 1;
    if (neighbour >= 0 && neighbour < a->p) {
        const ddp__auto_end_times *end = &a->end[kind][(size_t)neighbour * (size_t)a->m + (size_t)i];
        double arrival = end->real + a->ranks[neighbour].transfer;
        waits = arrival > real_begin;
        if (waits) real_begin = arrival;
    }
    if (r->length == 0) r->real_begin = real_begin;
    r->idle_at = at + r->cost[kind];
    r->real_end = real_begin + r->cost[kind];
    if (kind < 2) {
        ddp__auto_end_times *end = &a->end[kind][(size_t)rank * (size_t)a->m + (size_t)i];
        end->planned = r->idle_at;
        end->real = r->real_end;
        r->last = kind;
    }
    if (kind == 0) r->memory += r->max_memory;
    if (kind == 1) r->memory += r->weight_activation - r->max_memory;
    if (kind == 2) r->memory += -r->weight_activation;
    a->lists[(size_t)rank * 3 * (size_t)a->m + (size_t)r->length++] = (unsigned char)kind;
    if (waits) {
        double done = 0;
        for (int k = 0; k < 3; k++) done += r->next[k] * r->cost[k];
        if (!(r->real_end - r->real_begin - done + r->work < a->best_span)) return DDP__AUTO_TOO_LATE;
    }
    return kind;
}

/* Returns 1 if no other rank has waited this long. */
static int ddp__auto_waits_longest(const ddp__auto *a, int rank, double waited) {
    return a->longest_waiting == rank || a->ranks[a->longest_waiting].waited < waited;
}

/* An idle rank starts the action that the rules choose, or waits for its next input. Returns DDP__AUTO_WAITS,
   or the result of ddp__auto_start. */
static int ddp__auto_decide(ddp__auto *a, int rank) {
    const ddp__auto_rules *rules = &a->rules;
    ddp__auto_rank *r = &a->ranks[rank];
    double now = r->idle_at;
    double forward = ddp__auto_ready(a, 0, rank);
    double gradient = ddp__auto_ready(a, 1, rank);
    double soon;
    if (!rules->delay_backward && r->next[1] == 0 && r->next[0] > 0 && forward < DBL_MAX && gradient > forward
        && forward + r->cost[0] > r->first_backward * (1 + 1e-12)) {
        if (gradient < DBL_MAX)
            forward = DBL_MAX;
        else if (r->first_backward > now)
            forward = r->first_backward;
    }
    soon = forward < gradient ? forward : gradient;
    if (soon > now && r->next[2] < r->next[1]) {
        int long_enough = soon - now >= rules->patience * r->cost[2];
        if (long_enough || (rules->balance_waits && ddp__auto_waits_longest(a, rank, r->waited + soon - now)))
            return ddp__auto_start(a, rank, 2, now);
    }
    if (soon > now) {
        if (r->next[0] > 0) r->waited += soon - now;
        if (r->waited > a->ranks[a->longest_waiting].waited) a->longest_waiting = rank;
        r->idle_at = soon;
        return DDP__AUTO_WAITS;
    }
    if (forward <= now
        && (gradient > now || rules->tie_break == 2 || (rules->tie_break == 1 && r->last == 1)))
        return ddp__auto_start(a, rank, 0, now);
    return ddp__auto_start(a, rank, 1, now);
}

/* Updates the time of a rank's next decision, and the tournament tree. */
static void ddp__auto_update_rank(ddp__auto *a, int rank) {
    const ddp__auto_rank *r = &a->ranks[rank];
    double at = r->length == 3 * a->m ? DBL_MAX : r->idle_at;
    if (at < DBL_MAX && r->next[2] == r->next[1]) { /* no W is left to fill a gap with */
        double forward = ddp__auto_ready(a, 0, rank);
        double gradient = ddp__auto_ready(a, 1, rank);
        at = forward < gradient ? forward : gradient;
    }
    if (at == a->decides_at[rank]) return;
    a->decides_at[rank] = at;
    for (int node = (a->leaves + rank) / 2; node > 0; node /= 2) { /* at equal times the higher rank wins */
        int left = a->tree[2 * node], right = a->tree[2 * node + 1];
        int winner = a->decides_at[right] <= a->decides_at[left] ? right : left;
        if (winner == a->tree[node] && winner != rank) break; /* the nodes above do not change */
        a->tree[node] = winner;
    }
}

/* Computes the earliest begin of each rank's first I, with transfers of `transfer` times their real time. */
static void ddp__auto_first_gradients(ddp__auto *a, double transfer) {
    double at = 0;
    for (int rank = 0; rank < a->p; rank++) {
        ddp__auto_rank *r = &a->ranks[rank];
        r->planned_transfer = r->transfer * transfer;
        at += r->cost[0] + (rank + 1 < a->p ? r->planned_transfer : 0);
    }
    for (int rank = a->p - 1; rank >= 0; rank--) {
        ddp__auto_rank *r = &a->ranks[rank];
        r->first_backward = at;
        at += r->cost[1] + (rank > 0 ? r->planned_transfer : 0);
    }
}

/* Generates the schedule of these rules in a->order. Returns its span, or HUGE_VAL if that is
   not below a->best_span. */
static double ddp__auto_run(ddp__auto *a, int rules) {
    double span = 0;
    a->rules = ddp__auto_rules_at(rules);
    a->longest_waiting = 0;
    ddp__auto_first_gradients(a, a->rules.transfer);
    for (int rank = 0; rank < a->p; rank++) {
        ddp__auto_rank *r = &a->ranks[rank];
        r->idle_at = r->memory = r->real_begin = r->real_end = r->waited = 0;
        r->next[0] = r->next[1] = r->next[2] = r->last = r->length = 0;
    }
    for (int leaf = 0; leaf < a->leaves; leaf++) {
        a->decides_at[leaf] = DBL_MAX;
        a->tree[a->leaves + leaf] = leaf;
    }
    for (int node = a->leaves - 1; node > 0; node--) a->tree[node] = a->tree[2 * node + 1];
    for (int rank = 0; rank < a->p; rank++) ddp__auto_update_rank(a, rank);
    while (a->decides_at[a->tree[1]] < DBL_MAX) {
        int rank = a->tree[1], started = ddp__auto_decide(a, rank);
        if (started == DDP__AUTO_TOO_LATE) return HUGE_VAL;
        ddp__auto_update_rank(a, rank);
        if (started == 0 && rank + 1 < a->p) ddp__auto_update_rank(a, rank + 1);
        if (started == 1 && rank > 0) ddp__auto_update_rank(a, rank - 1);
    }
    for (int rank = 0; rank < a->p; rank++) {
        const ddp__auto_rank *r = &a->ranks[rank];
        if (r->length < 3 * a->m) return HUGE_VAL;
        if (r->real_end - r->real_begin > span) span = r->real_end - r->real_begin;
    }
    return span < a->best_span ? span : HUGE_VAL;
}

//== cost-based schedules: search =============================================== >>impl-schedule-search
/* Tries rules and memory limits, and the kinds ZB-H1 and ZB-H2. ddp_schedule_create calls
   ddp__schedule_generate_auto for DDP_SCHEDULE_AUTO. */

/* Returns a lower bound of the span of any schedule that fits into memory_limit. A rank's first gradient must
   come back through all later ranks; until then memory limits the number of its forwards. Each micro-batch
   occupies memory for at least its round trip. */
static double ddp__auto_bound(const ddp__auto *a) {
    double bound = 0;
    for (int rank = 0; rank < a->p; rank++) {
        const ddp__auto_rank *r = &a->ranks[rank];
        double forwards = floor(a->memory_limit / r->max_memory), wait, span;
        double occupied = (r->round_trip + r->cost[1]) * r->activation
                          + r->cost[2] * r->weight_activation; /* memory times time */
        if (forwards > a->m) forwards = a->m;
        wait = r->round_trip - forwards * r->cost[0];
        span = wait > 0 ? r->work + wait : r->work;
        if (span < a->m * occupied / a->memory_limit) span = a->m * occupied / a->memory_limit;
        if (span > bound) bound = span;
    }
    return bound;
}

/* Runs the first `count` rules with `limit` memory per rank. Updates a->best and a->best_span. */
static void ddp__auto_try(ddp__auto *a, double limit, int count) {
    a->memory_limit = limit * (1 + 1e-12);
    for (int i = 0; i < count; i++) {
        double span;
        if (ddp__auto_bound(a) >= a->best_span * (1 - 1e-12)) return;
        span = ddp__auto_run(a, i);
        if (span < a->best_span * (1 - 1e-12)) {
            unsigned char *slower = a->best_lists;
            a->best_lists = a->lists;
            a->lists = slower;
            a->best_span = span;
        }
    }
}

/* Returns memory step i. Step 0 is the unit; there are per_octave steps per factor of 2. */
static double ddp__auto_step(double unit, int i, int per_octave) {
    int octave = i >= 0 ? i / per_octave : -((per_octave - 1 - i) / per_octave);
    return ldexp(unit * (1 + (double)(i - octave * per_octave) / per_octave), octave);
}

/* Tries every step of memory up to the limit, from the largest down. The steps, and the rules tried with
   each, do not depend on the limit: a larger limit only adds steps, so it never gives a slower schedule. The
   steps are fractions and multiples of p times the largest micro-batch, from one micro-batch to all of them.
   Small pipelines have more steps. Main steps, such as p times the largest micro-batch, try more rules. */
static void ddp__auto_try_steps(ddp__auto *a, double limit) {
    double actions = 3.0 * a->p * a->m;
    double unit = a->max_activation * a->p;
    double all = a->max_activation * a->m;
    int per_octave = actions > 3e5 ? 4 : 16, top = 0, main_rules = 8, other_rules = 1;
    if (actions < 1e3) per_octave = 64;
    if (actions * main_rules < 24e6) main_rules = (int)(24e6 / actions);
    if (main_rules > DDP__AUTO_RULES) main_rules = DDP__AUTO_RULES;
    if (actions < 3e5) other_rules = (int)(3e5 / actions);
    if (other_rules > 24) other_rules = 24;
    while (top < 64 * per_octave && ddp__auto_step(unit, top, per_octave) < all) top++;
    while (top > -32 * per_octave && ddp__auto_step(unit, top - 1, per_octave) >= all) top--;
    for (int i = top;; i--) {
        double step = ddp__auto_step(unit, i, per_octave);
        int last = step <= a->max_activation
                   || i <= -32 * per_octave; /* the second test is for infinite costs */
        int main_step = i == top || last || i % (per_octave > 4 ? per_octave / 4 : 2) == 0;
        if (step > all) step = all;
        if (last) step = a->max_activation;
        if (step <= limit * (1 + 1e-12) && (main_step || i < 2 * per_octave))
            ddp__auto_try(a, step, main_step ? main_rules : other_rules);
        if (last) return;
    }
}

/* Appends the best list of each rank to s. */
static void ddp__auto_lists(const ddp__auto *a, ddp_schedule *s) {
    for (int rank = 0; rank < a->p; rank++) {
        int next[3] = {0, 0, 0};
        for (int i = 0; i < 3 * a->m; i++) {
            int kind = a->best_lists[(size_t)rank * 3 * (size_t)a->m + (size_t)i];
            ddp__schedule_push(s, (ddp_action_kind)(DDP_ACTION_FORWARD + kind), rank, next[kind]++);
        }
        ddp__schedule_end_rank(s);
    }
}

/* Replaces *best by the schedule of a known kind, if that fits into the limit and has a span below *span. */
static ddp_result ddp__auto_try_kind(const ddp_schedule_desc *d, double limit, ddp_schedule_kind kind,
                                     double *span, ddp_schedule **best_lists) {
    ddp_schedule_desc known = *d;
    ddp_schedule_report report = DDP_ZERO;
    ddp_schedule *s = NULL;
    ddp_result result;
    known.kind = kind;
    DDP_TRY(ddp__schedule_generate(&s, &known));
    s->kind = d->kind;
    result = ddp_schedule_simulate(s, d->costs, &report);
    if (result == DDP_OK && report.peak_memory <= limit * (1 + 1e-9) && report.span < *span * (1 - 1e-12)) {
        ddp_schedule *slower = *best_lists;
        *best_lists = s;
        *span = report.span;
        s = slower;
    }
    ddp_schedule_destroy(s);
    return result;
}

/* Fills in the costs of each rank, and the round trip of its first micro-batch. */
static void ddp__auto_costs(ddp__auto *a, const ddp_stage_cost *costs) {
    double at = 0;
    for (int rank = 0; rank < a->p; rank++) {
        ddp__auto_rank *r = &a->ranks[rank];
        ddp_stage_cost cost = ddp__schedule_stage_cost(costs, rank);
        r->cost[0] = cost.forward;
        r->cost[1] = cost.input_grad;
        r->cost[2] = cost.weight_grad;
        r->transfer = cost.transfer;
        r->activation = cost.activation;
        r->weight_activation = cost.weight_activation;
        r->max_memory = r->weight_activation > r->activation ? r->weight_activation : r->activation;
        r->work = a->m * (r->cost[0] + r->cost[1] + r->cost[2]);
        r->first_forward = at;
        at += r->cost[0] + r->transfer;
        if (r->max_memory > a->max_activation) a->max_activation = r->max_memory;
    }
    ddp__auto_first_gradients(a, 1);
    for (int rank = 0; rank < a->p; rank++) {
        ddp__auto_rank *r = &a->ranks[rank];
        r->round_trip = r->first_backward - r->first_forward;
    }
}

/* Creates an AUTO schedule: the fastest one of all rules and the known kinds ZB-H1 and ZB-H2. */
static ddp_result ddp__schedule_generate_auto(ddp_schedule **out, const ddp_schedule_desc *d) {
    static const ddp_schedule_kind known[] = {DDP_SCHEDULE_ZB_H1, DDP_SCHEDULE_ZB_H2};
    size_t p = (size_t)d->rank_count;
    size_t cells = p * (size_t)d->microbatch_count;
    size_t leaves = 1;
    size_t bytes;
    ddp_schedule *s, *best_lists = NULL;
    ddp__auto a = DDP_ZERO;
    double limit, span;
    ddp_result result = DDP_OK;
    DDP_TRY(ddp__schedule_check_costs(d->rank_count, d->costs, "ddp_schedule_create"));
    s = ddp__schedule_new(d);
    if (!s) return DDP_ERR_NO_MEMORY;
    while (leaves < p) leaves *= 2;
    bytes = p * sizeof *a.ranks + 2 * cells * sizeof *a.end[0] + leaves * (sizeof(double) + 2 * sizeof(int))
            + 6 * cells;
    a.ranks = (ddp__auto_rank *)ddp__schedule_alloc(s, 1, bytes);
    if (!a.ranks) {
        ddp_schedule_destroy(s);
        return DDP_ERR_NO_MEMORY;
    }
    a.end[0] = (ddp__auto_end_times *)(a.ranks + p);
    a.end[1] = a.end[0] + cells;
    a.decides_at = (double *)(a.end[1] + cells);
    a.tree = (int *)(a.decides_at + leaves);
    a.lists = (unsigned char *)(a.tree + 2 * leaves);
    a.best_lists = a.lists + 3 * cells;
    a.best_span = HUGE_VAL;
    a.p = d->rank_count;
    a.m = d->microbatch_count;
    a.leaves = (int)leaves;
    ddp__auto_costs(&a, d->costs);
    limit = d->memory_limit > 0 ? d->memory_limit : a.max_activation * a.p;
    if (limit < a.max_activation)
        result = DDP__SCHEDULE_INVALID("memory_limit=%g, but one micro-batch needs %g; use at least %g",
                                       limit, a.max_activation, a.max_activation);
    else
        ddp__auto_try_steps(&a, limit);
    span = a.best_span;
    if (span < HUGE_VAL) ddp__auto_lists(&a, s);
    ddp__schedule_free(s, a.ranks);
    if (span < HUGE_VAL)
        result = ddp__schedule_finish(&best_lists, s);
    else
        ddp_schedule_destroy(s);
    for (int k = 0; k < 2 && result == DDP_OK; k++)
        result = ddp__auto_try_kind(d, limit, known[k], &span, &best_lists);
    if (result == DDP_OK && !best_lists)
        result = DDP__SCHEDULE_INVALID(
            "costs: the time of %d micro-batches is not a finite number; use smaller costs",
            d->microbatch_count);
    if (result == DDP_OK)
        *out = best_lists;
    else
        ddp_schedule_destroy(best_lists);
    return result;
}

//== CSV parser ================================================================== >>impl-schedule-parse
/* Reads the lists of a schedule from CSV text, one line per rank. The input comes from outside: every error
   names line, cell and text. ddp_schedule_check then judges the schedule itself. */

/* A position in the text. Lines and cells count from 1; end is the end of the cell. */
typedef struct ddp__csv_reader {
    const char *at, *end;
    int line, cell;
} ddp__csv_reader;

static ddp_result ddp__csv_fail(const ddp__csv_reader *c, const char *begin, const char *why) {
    int length = c->end - begin > 40 ? 40 : (int)(c->end - begin);
    char shown[41];
    for (int i = 0; i < length; i++)
        shown[i] = (unsigned char)begin[i] < 32 || (unsigned char)begin[i] > 126 ? '?' : begin[i];
    shown[length] = 0;
    return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_parse: line %d cell %d \"%s\": %s", c->line, c->cell,
                    shown, why);
}

static int ddp__csv_is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
static void ddp__csv_skip_blanks(ddp__csv_reader *c) {
    while (c->at < c->end && ddp__csv_is_blank(*c->at)) c->at++;
}

/* Parses a number of at most `max`. Returns -1 if it is missing, too large or has leading zeros, which
   writing could not reproduce. */
static int ddp__csv_number(ddp__csv_reader *c, int max) {
    const char *begin = c->at;
    int number = 0;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9') {
        if (number > max) return -1;
        number = number * 10 + (*c->at++ - '0');
    }
    return c->at == begin || number > max || (*begin == '0' && c->at - begin > 1) ? -1 : number;
}

/* Parses one action, such as 2F0 or 0UNSHARD. begin: start of the text that an error shows. */
static ddp_result ddp__csv_action(ddp__csv_reader *c, const char *begin, ddp_action *action) {
    size_t length = 0;
    int kind = DDP_ACTION_FORWARD;
    memset(action, 0, sizeof *action);
    action->stage = ddp__csv_number(c, DDP__MAX_STAGES - 1);
    action->microbatch = -1;
    if (action->stage < 0)
        return ddp__csv_fail(c, begin, "an action must start with its stage, 0 to 65535, such as 2F0");
    while (c->at + length < c->end
           && ((c->at[length] >= 'A' && c->at[length] <= 'Z') || c->at[length] == '_'))
        length++;
    while (
        kind < DDP_ACTION_KIND_COUNT
        && (strlen(ddp__action_names[kind]) != length || memcmp(ddp__action_names[kind], c->at, length) != 0))
        kind++;
    if (kind == DDP_ACTION_KIND_COUNT)
        return ddp__csv_fail(
            c, begin,
            length == 2 && memcmp(c->at, "BW", 2) == 0
                ? "BW is an old name; use B for a backward, or I and W for its halves"
                : "unknown action; use F I W B UNSHARD RESHARD REDUCE_GRAD SEND_F RECV_F SEND_B RECV_B");
    c->at += length;
    action->kind = (ddp_action_kind)kind;
    if (ddp__action_is_sharding(action->kind)) {
        if (c->at < c->end && *c->at >= '0' && *c->at <= '9')
            return ddp__csv_fail(c, begin, "this action has no micro-batch; use the form 2UNSHARD");
        return DDP_OK;
    }
    action->microbatch = ddp__csv_number(c, DDP__MAX_MICROBATCHES - 1);
    if (action->microbatch < 0)
        return ddp__csv_fail(c, begin, "an action must end with its micro-batch, 0 to 16777215, such as 2F0");
    return DDP_OK;
}

/* Parses a cell, the text between two commas: nothing, an action, or an overlapping pair. */
static ddp_result ddp__csv_cell(ddp_schedule *s, ddp__csv_reader *c) {
    static const char close[] = ")OVERLAP_F_B";
    const char *begin;
    ddp_action action[2];
    int pair;
    ddp__csv_skip_blanks(c);
    while (c->end > c->at && ddp__csv_is_blank(c->end[-1])) c->end--;
    begin = c->at;
    if (begin < c->end && *begin == '"') {
        if (c->end - begin < 2 || c->end[-1] != '"')
            return ddp__csv_fail(c, begin, "the quotation mark is not closed in this cell");
        c->at++;
        c->end--;
        ddp__csv_skip_blanks(c);
        begin = c->at;
    }
    if (begin == c->end) {
        ddp__schedule_push(s, DDP_ACTION_IDLE, -1, -1);
        return s->failed;
    }
    pair = *begin == '(';
    c->at += pair;
    DDP_TRY(ddp__csv_action(c, begin, &action[0]));
    if (pair) {
        if (c->at == c->end || *c->at++ != ';')
            return ddp__csv_fail(c, begin, "invalid overlapping pair; use the form (0F7;7B3)OVERLAP_F_B");
        DDP_TRY(ddp__csv_action(c, begin, &action[1]));
        if ((size_t)(c->end - c->at) < sizeof close - 1 || memcmp(c->at, close, sizeof close - 1) != 0)
            return ddp__csv_fail(c, begin, "invalid overlapping pair; use the form (0F7;7B3)OVERLAP_F_B");
        c->at += sizeof close - 1;
        action[0].overlaps = 1;
    }
    ddp__csv_skip_blanks(c);
    if (c->at != c->end)
        return ddp__csv_fail(c, begin, "unexpected text after the action; end a cell with a comma");
    for (int k = 0; k <= pair; k++) ddp__schedule_push_action(s, action[k]);
    return s->failed;
}

/* Returns the number of lines up to the last one with text. Blanks and an empty quoted cell are not text. */
static int ddp__csv_lines(const char *csv) {
    int last = 0;
    for (int line = 1; *csv; line++) {
        int quotes = 0, others = 0;
        for (; *csv && *csv != '\n'; csv++) {
            quotes += *csv == '"';
            others += *csv != '"' && !ddp__csv_is_blank(*csv);
        }
        if (others || (quotes && quotes != 2)) last = line;
        csv += *csv == '\n';
    }
    return last;
}

DDPDEF ddp_result ddp_schedule_parse(ddp_schedule **out, const char *csv) {
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_schedule *s;
    ddp__csv_reader c;
    if (out) *out = NULL;
    if (!out || !csv) return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_parse: out or csv is NULL");
    if (strncmp(csv, "\xef\xbb\xbf", 3) == 0) csv += 3; /* UTF-8 byte-order mark */
    desc.kind = DDP_SCHEDULE_KIND_COUNT;
    desc.rank_count = ddp__csv_lines(csv);
    if (desc.rank_count == 0) return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_parse: csv is empty");
    if (desc.rank_count > DDP__MAX_STAGES)
        return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_parse: %d lines, one per rank; use at most %d",
                        desc.rank_count, DDP__MAX_STAGES);
    s = ddp__schedule_new(&desc);
    if (!s) return DDP_ERR_NO_MEMORY;
    c.at = csv;
    for (c.line = 1; c.line <= desc.rank_count; c.line++) {
        const char *stop = c.at + strcspn(c.at, "\n");
        c.end = stop;
        ddp__csv_skip_blanks(&c);
        for (c.cell = 1; (c.cell > 1 || c.at < stop) && s->failed == DDP_OK; c.cell++) {
            const char *comma = c.at + strcspn(c.at, ",\n");
            c.end = comma;
            s->failed = ddp__csv_cell(s, &c);
            if (*comma != ',') break;
            c.at = comma + 1;
        }
        ddp__schedule_end_rank(s);
        c.at = stop + 1;
    }
    return ddp__schedule_finish(out, s);
}

//== lowering ==================================================================== >>impl-schedule-lower
/* ddp_schedule_lower: creates a schedule from another one, with the actions that a runtime executes.

     list of a rank       F0            F1   I0 W0                  I1 W1
     DDP_LOWER_MERGE      F0            F1   B0                     B1
     DDP_LOWER_SHARD      UNSHARD F0    F1   B0                     B1                RESHARD
     DDP_LOWER_REDUCE     UNSHARD F0    F1   B0                     B1 REDUCE_GRAD    RESHARD
     DDP_LOWER_COMM       ... F0 SEND_F0    F1 SEND_F1    RECV_B0 B0    RECV_B1 B1 ...           */

/* Returns 1 if actions i and i + 1 are I and W of one micro-batch. The list ends before `end`. */
static int ddp__schedule_lower_merges(const ddp_schedule *s, int i, int end) {
    const ddp_action *a = &s->actions[i];
    if (a->kind != DDP_ACTION_INPUT_GRAD || i + 1 == end) return 0;
    return a[1].kind == DDP_ACTION_WEIGHT_GRAD && !a[1].overlaps && a[1].stage == a->stage
           && a[1].microbatch == a->microbatch;
}

/* Creates the lists with all parts except COMM. Uses the per-action tables of graph as tables per stage; they
   are large enough, since each stage has at least two actions. */
static ddp_result ddp__schedule_lower_lists(ddp_schedule **out, const ddp__schedule_graph *graph,
                                            unsigned parts) {
    const ddp_schedule *s = graph->s;
    ddp_schedule *to = ddp__schedule_new_like(s);
    int *first = graph->previous_recv, *last = first + s->stage_count; /* per stage: first and last action */
    int *accumulated = graph->waiting_rank; /* per stage: W and B appended until now */
    if (!to) return DDP_ERR_NO_MEMORY;
    for (int stage = 0; stage < s->stage_count; stage++) {
        first[stage] = -1;
        accumulated[stage] = 0;
    }
    for (int i = 0; i < s->count; i++) {
        int stage = s->actions[i].stage;
        if (stage < 0
            || !(ddp__action_computes(s->actions[i].kind) || s->actions[i].kind == DDP_ACTION_REDUCE_GRAD))
            continue;
        if (first[stage] < 0) first[stage] = i;
        last[stage] = i;
    }
    for (int rank = 0; rank < s->rank_count; rank++) {
        for (int i = s->first[rank], n; i < s->first[rank + 1]; i += n) {
            const ddp_action *a = &s->actions[i];
            int merges = parts & DDP_LOWER_MERGE && ddp__schedule_lower_merges(s, i, s->first[rank + 1]);
            n = a->overlaps || merges ? 2 : 1;
            for (int k = 0; k < n && parts & DDP_LOWER_SHARD; k++)
                if (a[k].stage >= 0 && first[a[k].stage] == i + k)
                    ddp__schedule_push(to, DDP_ACTION_UNSHARD, a[k].stage, -1);
            if (merges) ddp__schedule_push(to, DDP_ACTION_BACKWARD, a->stage, a->microbatch);
            for (int k = 0; k < n && !merges; k++)
                if (a[k].kind != DDP_ACTION_IDLE || !(parts & DDP_LOWER_MERGE))
                    ddp__schedule_push_action(to, a[k]);
            for (int k = 0; k < n; k++) {
                int stage = a[k].stage;
                if (ddp__action_ends(a[k].kind) && ++accumulated[stage] % s->update_interval == 0
                    && parts & DDP_LOWER_REDUCE)
                    ddp__schedule_push(to, DDP_ACTION_REDUCE_GRAD, stage, -1);
                if (stage >= 0 && last[stage] == i + k && parts & DDP_LOWER_SHARD)
                    ddp__schedule_push(to, DDP_ACTION_RESHARD, stage, -1);
            }
        }
        ddp__schedule_end_rank(to);
    }
    return ddp__schedule_finish(out, to);
}

/* A SEND or RECV at the time when its tensor is ready. source: index of the F, I or B that computes it. */
typedef struct ddp__schedule_message {
    double time;
    int source;
    ddp_action action;
} ddp__schedule_message;

static int ddp__schedule_message_compare(const void *left, const void *right) {
    const ddp__schedule_message *l = (const ddp__schedule_message *)left;
    const ddp__schedule_message *r = (const ddp__schedule_message *)right;
    if (l->time != r->time) return l->time < r->time ? -1 : 1;
    return l->source < r->source ? -1 : l->source > r->source;
}

/* Appends a rank's actions from i on that begin before `at`. Returns the index of the next one. */
static int ddp__schedule_lower_until(ddp_schedule *to, const ddp__schedule_graph *graph, int rank, int i,
                                     double time) {
    const ddp_schedule *s = graph->s;
    while (i < s->first[rank + 1]
           && (graph->times[i].begin < time || (i > s->first[rank] && s->actions[i - 1].overlaps)))
        ddp__schedule_push_action(to, s->actions[i++]);
    return i;
}

/* Fills messages with the SENDs and RECVs of a rank, sorted by time. Returns their number. */
static int ddp__schedule_lower_messages(const ddp__schedule_graph *graph, int rank,
                                        ddp__schedule_message *messages) {
    const ddp_schedule *s = graph->s;
    int count = 0;
    for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
        const ddp_action *a = &s->actions[i];
        int source = ddp__graph_source(graph, i);
        int back = a->kind != DDP_ACTION_FORWARD;
        int to = back ? a->stage - 1 : a->stage + 1;
        if (!ddp__action_computes(a->kind) || a->kind == DDP_ACTION_WEIGHT_GRAD) continue;
        if (source >= 0 && s->stage_rank[s->actions[source].stage] != rank) {
            ddp__schedule_message message = {
                graph->times[source].end,
                source,
                {back ? DDP_ACTION_RECV_B : DDP_ACTION_RECV_F, a->stage, a->microbatch, 0},
            };
            messages[count++] = message;
        }
        if (to >= 0 && to < s->stage_count && s->stage_rank[to] != rank) {
            ddp__schedule_message message = {
                graph->times[i].end,
                i,
                {back ? DDP_ACTION_SEND_B : DDP_ACTION_SEND_F, a->stage, a->microbatch, 0},
            };
            messages[count++] = message;
        }
    }
    qsort(messages, (size_t)count, sizeof *messages, ddp__schedule_message_compare);
    return count;
}

/* Creates the lists with SEND and RECV. All ranks follow one order, the times with unit costs. A message
   enters it as a pair, SEND on one rank and RECV on the other, when its tensor is ready. Everything that an
   action waits for is earlier in this order. So there would be no deadlock even if each SEND waited for its
   RECV. */
static ddp_result ddp__schedule_lower_comm(ddp_schedule **out, const ddp_schedule *s) {
    ddp_schedule *to = ddp__schedule_new_like(s);
    ddp__schedule_message *messages;
    ddp__schedule_graph graph;
    int longest = 0;
    if (!to) return DDP_ERR_NO_MEMORY;
    for (int rank = 0; rank < s->rank_count; rank++)
        if (s->first[rank + 1] - s->first[rank] > longest) longest = s->first[rank + 1] - s->first[rank];
    to->failed = ddp__graph_open(&graph, s, NULL, DDP__TIMES_PAIRED, "ddp_schedule_lower");
    messages = to->failed == DDP_OK
                   ? (ddp__schedule_message *)ddp__schedule_alloc(s, 2 * (size_t)longest, sizeof *messages)
                   : NULL;
    if (to->failed == DDP_OK && !messages) to->failed = DDP_ERR_NO_MEMORY;
    for (int rank = 0; rank < s->rank_count && to->failed == DDP_OK; rank++) {
        int count = ddp__schedule_lower_messages(&graph, rank, messages), i = s->first[rank];
        for (int n = 0; n < count; n++) {
            i = ddp__schedule_lower_until(to, &graph, rank, i, messages[n].time);
            ddp__schedule_push_action(to, messages[n].action);
        }
        ddp__schedule_lower_until(to, &graph, rank, i, DBL_MAX);
        ddp__schedule_end_rank(to);
    }
    ddp__schedule_free(s, messages);
    ddp__graph_close(&graph);
    return ddp__schedule_finish(out, to);
}

DDPDEF ddp_result ddp_schedule_lower(ddp_schedule **out, const ddp_schedule *schedule, unsigned parts) {
    static const char who[] = "ddp_schedule_lower";
    const char *existing = NULL;
    unsigned all = DDP_LOWER_MERGE | DDP_LOWER_SHARD | DDP_LOWER_REDUCE | DDP_LOWER_COMM;
    ddp_schedule *lists = NULL;
    ddp_result result = DDP_OK;
    ddp__schedule_graph graph;
    if (out) *out = NULL;
    if (!out) return ddp_fail(DDP_ERR_INVALID, "%s: out is NULL", who);
    if (parts & ~all)
        return ddp_fail(DDP_ERR_INVALID, "%s: parts=%#x; use DDP_LOWER_ flags, or 0 for all", who, parts);
    if (!parts) parts = all;
    DDP_TRY(ddp__graph_open(&graph, schedule, NULL, DDP__TIMES_NONE, who));
    if (parts & DDP_LOWER_REDUCE && graph.has_reduce) existing = "REDUCE_GRAD";
    if (parts & DDP_LOWER_SHARD && graph.has_sharding) existing = "UNSHARD and RESHARD";
    if (parts & DDP_LOWER_COMM && graph.has_comm) existing = "SEND and RECV";
    if (existing)
        result = ddp_fail(DDP_ERR_INVALID, "%s: the schedule already has %s; leave that part out", who,
                          existing);
    else if (parts & DDP_LOWER_MERGE && graph.has_comm)
        result = ddp_fail(DDP_ERR_INVALID,
                          "%s: the schedule already has SEND and RECV; merge before they are added", who);
    else if (parts != DDP_LOWER_COMM)
        result = ddp__schedule_lower_lists(&lists, &graph, parts);
    ddp__graph_close(&graph);
    if (result != DDP_OK) return result;
    if (!(parts & DDP_LOWER_COMM)) {
        *out = lists;
        return DDP_OK;
    }
    result = ddp__schedule_lower_comm(out, lists ? lists : schedule);
    ddp_schedule_destroy(lists);
    return result;
}

//== drawing: CSV and text ======================================================== >>impl-schedule-draw
/* The formats CSV and text, and the data that all formats share. Each format is a function that prints a
   ddp__drawing to a ddp__schedule_output. ddp_schedule_draw runs it twice: the first pass only counts
   bytes. */

/* Output buffer. Text beyond `capacity` is counted in `used` but not stored. */
typedef struct ddp__schedule_output {
    char *out;
    size_t capacity, used;
} ddp__schedule_output;

static __attribute__((format(printf, 2, 3))) void ddp__schedule_print(ddp__schedule_output *output,
                                                                      const char *format, ...) {
    size_t available = output->used < output->capacity ? output->capacity - output->used : 0;
    va_list args;
    int length;
    va_start(args, format);
    length = vsnprintf(available ? output->out + output->used : NULL, available, format, args);
    va_end(args);
    if (length > 0) output->used += (size_t)length;
}

/* Formats a number with a decimal point, independent of the locale. */
static ddp__action_text ddp__schedule_decimal(double value, int decimals) {
    ddp__action_text text;
    long long scale = 1, digits;
    for (int i = 0; i < decimals; i++) scale *= 10;
    if (value * (double)scale > 9e17) value = 9e17 / (double)scale;
    digits = (long long)(value * (double)scale + 0.5);
    snprintf(text.text, sizeof text.text, "%lld.%0*lld", digits / scale, decimals, digits % scale);
    return text;
}

/* Unit of a time axis. size: in the unit of the times. */
typedef struct ddp__schedule_time_unit {
    double size;
    const char *name, *axis;
} ddp__schedule_time_unit;

/* Chooses the unit of the axis. Measured times are in seconds; the unit gives numbers from 1 to 1,000. The
   unit of costs is the caller's and has no name. Without costs, F, I and W take 1. */
static const ddp__schedule_time_unit *ddp__drawing_time_unit(double span, int has_costs, int has_times) {
    static const ddp__schedule_time_unit units[] = {
        {1, " s", "time in seconds"},
        {1e-3, " ms", "time in milliseconds"},
        {1e-6, " us", "time in microseconds"},
        {1, "", "time, in the unit of the costs"},
        {1, "", "time; F, I and W take 1 each"},
    };
    if (!has_times) return &units[has_costs ? 3 : 4];
    if (span >= 1 || span <= 0) return &units[0];
    return &units[span >= 1e-3 ? 1 : 2];
}

/* Input of all formats. */
typedef struct ddp__drawing {
    const ddp_schedule *s;
    ddp__schedule_graph graph;
    const ddp_action_time *times;
    ddp_schedule_report report;
    /* begin: of the first computation. shortest: duration of the shortest computation, but at least a quarter
       of the mean. */
    double begin, shortest;
    const ddp__schedule_time_unit *unit;
    struct ddp__svg_row *merged; /* SVG: buffer for a row of merged actions; NULL = one box per action */
} ddp__drawing;

static void ddp__drawing_measure(ddp__drawing *drawing, const ddp_stage_cost *costs) {
    const ddp_schedule *s = drawing->s;
    int any = 0;
    double sum = 0;
    for (int i = 0; i < s->count; i++) {
        double length = drawing->times[i].end - drawing->times[i].begin;
        if (!ddp__action_computes(s->actions[i].kind)) continue;
        if (!any || drawing->times[i].begin < drawing->begin) drawing->begin = drawing->times[i].begin;
        if (length > 0 && (drawing->shortest <= 0 || length < drawing->shortest)) drawing->shortest = length;
        sum += length;
        any++;
    }
    if (any && drawing->shortest < sum / any / 4) drawing->shortest = sum / any / 4;
    ddp__schedule_fill_report(s, costs, drawing->times, &drawing->report);
    if (drawing->shortest <= 0) drawing->shortest = 1;
}

static void ddp__draw_csv(const ddp__drawing *drawing, ddp__schedule_output *output) {
    const ddp_schedule *s = drawing->s;
    for (int rank = 0; rank < s->rank_count; rank++) {
        for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
            const ddp_action *a = &s->actions[i];
            const char *comma = i > s->first[rank] ? "," : "";
            if (a->kind == DDP_ACTION_IDLE)
                ddp__schedule_print(output, "%s", comma);
            else if (a->overlaps && i + 1 < s->first[rank + 1]) {
                ddp__schedule_print(output, "%s(%s;%s)OVERLAP_F_B", comma, ddp__action_label(a).text,
                                    ddp__action_label(a + 1).text);
                i++;
            } else
                ddp__schedule_print(output, "%s%s", comma, ddp__action_label(a).text);
        }
        /* Without text, the last line would not count as a rank. A comma is two idle slots. */
        if (rank == s->rank_count - 1 && s->first[rank] == s->first[rank + 1])
            ddp__schedule_print(output, ",");
        ddp__schedule_print(output, "\n");
    }
}

/* As ddp__action_label, but without the stage number if each rank has one stage. */
static ddp__action_text ddp__drawing_label(const ddp_schedule *s, const ddp_action *a) {
    ddp__action_text label = ddp__action_label(a);
    if (s->stage_count == s->rank_count)
        snprintf(label.text, sizeof label.text, "%s%d", ddp__action_names[a->kind], a->microbatch);
    size_t used = strlen(label.text);
    if (a->overlaps)
        snprintf(label.text + used, sizeof label.text - used, "+%.20s", ddp__action_label(a + 1).text);
    return label;
}

/* Draws one line per rank. A column is as long as the shortest action. An action starts in the column of its
   time, or in the next free one. */
static void ddp__draw_text(const ddp__drawing *drawing, ddp__schedule_output *output) {
    const ddp_schedule *s = drawing->s;
    double unit = drawing->shortest > drawing->report.makespan / 4096 ? drawing->shortest
                                                                      : drawing->report.makespan / 4096;
    int width = 0;
    for (int i = 0; i < s->count; i++)
        if (ddp__action_computes(s->actions[i].kind) && (i == 0 || !s->actions[i - 1].overlaps)) {
            int length = (int)strlen(ddp__drawing_label(s, &s->actions[i]).text);
            if (length + 1 > width) width = length + 1;
        }
    for (int rank = 0; rank < s->rank_count; rank++) {
        int column = 0, space = 1; /* space: blanks before the next text */
        ddp__schedule_print(output, "rank %-3d", rank);
        for (int i = s->first[rank], n; i < s->first[rank + 1]; i += n) {
            ddp__action_text label;
            int from, to, length;
            n = 1 + s->actions[i].overlaps;
            if (!ddp__action_computes(s->actions[i].kind)) continue;
            label = ddp__drawing_label(s, &s->actions[i]);
            length = (int)strlen(label.text);
            from = (int)((drawing->times[i].begin - drawing->begin) / unit + 0.5);
            to = (int)((drawing->times[i + n - 1].end - drawing->begin) / unit + 0.5);
            for (; column < from; column++, space = width - 1) ddp__schedule_print(output, "%*s.", space, "");
            if (to <= column) to = column + 1;
            ddp__schedule_print(output, "%*s%s", space, "", label.text);
            for (int k = (to - column) * width - 1 - length; k > 0 && to > column + 1; k--)
                ddp__schedule_print(output, "-");
            space = to > column + 1 ? 1 : width - length;
            column = to;
        }
        ddp__schedule_print(output, "\n");
    }
    ddp__schedule_print(output, "makespan %s, bubble %s, %d in flight\n",
                        ddp__schedule_decimal(drawing->report.makespan, 3).text,
                        ddp__schedule_decimal(drawing->report.bubble_rate, 4).text,
                        drawing->report.peak_in_flight);
}

static const char *const ddp__action_words[] = {"idle", "forward", "input gradient", "weight gradient",
                                                "backward"};

static const char *ddp__drawing_title(const ddp_schedule *s) {
    return s->kind == DDP_SCHEDULE_KIND_COUNT ? "schedule" : ddp_schedule_kind_name(s->kind);
}

//== drawing: SVG ================================================================== >>impl-schedule-svg
/* The format SVG: one row per rank, a box per action, a time axis and a legend.

     rank 0  | F0 | F1 |    | B0 | B1 |         an overlapping pair:  +----+  upper half: first action
     rank 1  |    | F0 | B0 | F1 | B1 |                               +----+  lower half: second action

   With more actions than pixels, a row is drawn as coloured runs of pixels instead (ddp__svg_row). */

/* Colours of forward (blue), input gradient (green), weight gradient (light green) and backward (orange).
   Every second chunk is darker. */
static const char *const ddp__drawing_colors[5][2] = {
    {"", ""}, {"#9ec5fe", "#5b94e8"}, {"#7fd1ae", "#3aa57a"}, {"#d3e9a8", "#a9cc62"}, {"#ffcf8f", "#f0a04b"},
};
enum { DDP__DRAWING_COLORS = 10 };

/* Draws the box of an action, with its micro-batch if that fits. */
static void ddp__draw_box(ddp__schedule_output *output, const ddp_schedule *s, const ddp_action *a, double x,
                          double y, double width, double height) {
    ddp__action_text number;
    double size = height < 18 ? 8 : 11;
    snprintf(number.text, sizeof number.text, "%d", a->microbatch);
    ddp__schedule_print(
        output, "<rect x=\"%s\" y=\"%s\" width=\"%s\" height=\"%s\" fill=\"%s\"><title>%s</title></rect>\n",
        ddp__schedule_decimal(x, 2).text, ddp__schedule_decimal(y, 2).text,
        ddp__schedule_decimal(width, 2).text, ddp__schedule_decimal(height, 2).text,
        ddp__drawing_colors[a->kind][a->stage / s->rank_count % 2], ddp__action_label(a).text);
    if (width >= 0.65 * size * (double)strlen(number.text) + 1)
        ddp__schedule_print(output, "<text x=\"%s\" y=\"%s\" font-size=\"%d\">%s</text>\n",
                            ddp__schedule_decimal(x + width / 2, 2).text,
                            ddp__schedule_decimal(y + height / 2 + 0.36 * size, 2).text, (int)size,
                            number.text);
}

/* Draws the frame around an overlapping pair. */
static void ddp__draw_frame(ddp__schedule_output *output, double x, double y, double width, double height,
                            const char *title) {
    ddp__schedule_print(output,
                        "<rect x=\"%s\" y=\"%s\" width=\"%s\" height=\"%s\" fill=\"none\" stroke=\"#202020\" "
                        "stroke-width=\"1.5\"><title>%s</title></rect>\n",
                        ddp__schedule_decimal(x, 2).text, ddp__schedule_decimal(y, 2).text,
                        ddp__schedule_decimal(width, 2).text, ddp__schedule_decimal(height, 2).text, title);
}

/* Draws the legend: the colours and frames that occur in the drawing. */
static void ddp__draw_legend(const ddp__drawing *drawing, ddp__schedule_output *output, double x, double y) {
    static const char text[] = "<text x=\"%d\" y=\"%d\" font-size=\"12\" text-anchor=\"start\">%s</text>\n";
    const ddp_schedule *s = drawing->s;
    unsigned kinds = 0; /* 1 << kind of each action */
    int pairs = 0;
    for (int i = 0; i < s->count; i++) {
        kinds |= 1u << s->actions[i].kind;
        pairs |= s->actions[i].overlaps && !drawing->merged;
    }
    for (int kind = DDP_ACTION_FORWARD; kind <= DDP_ACTION_BACKWARD; kind++) {
        ddp_action sample = {(ddp_action_kind)kind, 0, 0, 0};
        if (!(kinds >> kind & 1)) continue;
        ddp__draw_box(output, s, &sample, x, y, 22, 18);
        ddp__schedule_print(output, text, (int)x + 28, (int)y + 13, ddp__action_words[kind]);
        x += 48 + 8 * (double)strlen(ddp__action_words[kind]);
    }
    if (pairs) {
        ddp__draw_frame(output, x, y, 22, 18, "a pair that overlaps");
        ddp__schedule_print(output, text, (int)x + 28, (int)y + 13, "overlapped pair");
        x += 48 + 8 * (double)strlen("overlapped pair");
    }
    if (s->stage_count > s->rank_count)
        ddp__schedule_print(output, text, (int)x, (int)y + 13, "darker: every second chunk");
}

/* Returns 1 if actions i and i + 1 are an overlapping pair, and their times overlap too. */
static int ddp__drawing_overlaps(const ddp__drawing *drawing, int i) {
    return i >= 0 && drawing->s->actions[i].overlaps && drawing->times[i + 1].begin < drawing->times[i].end;
}

/* Returns the distance of two marks of the axis: 1, 2 or 5 times a power of ten, at least about 80 px. */
static double ddp__drawing_axis_step(double span, double pixels) {
    double step = 1;
    if (!(span > 1e-300 && span <= DBL_MAX)) return 1;
    while (step * pixels / span >= 80) step /= 10;
    while (step * pixels / span < 80) step *= 10;
    if (step / 5 * pixels / span >= 80) return step / 5;
    return step / 2 * pixels / span >= 80 ? step / 2 : step;
}

/* Draws the time axis: lines through the rows, with times below. scale: pixels per unit of time. */
static void ddp__draw_axis(const ddp__drawing *drawing, ddp__schedule_output *output, double left, double top,
                           double bottom, double scale) {
    double span = drawing->report.makespan / drawing->unit->size;
    double pixels = scale * drawing->report.makespan;
    double step = ddp__drawing_axis_step(span, pixels);
    const char *merged = "";
    int decimals = 0;
    if (drawing->merged) merged = ". Actions are merged: a pixel covers several and has the colour of one";
    for (double smaller = step; smaller < 0.999 && decimals < 9; smaller *= 10) decimals++;
    for (int i = 0; i * step <= span * (1 + 1e-9) && i <= 100; i++) {
        ddp__action_text x = ddp__schedule_decimal(left + i * step * drawing->unit->size * scale, 2), number;
        number = ddp__schedule_decimal(i * step, decimals);
        if (!decimals) *strchr(number.text, '.') = 0;
        ddp__schedule_print(output,
                            "<path d=\"M%s %dV%d\" stroke=\"#c0c0c0\"/>\n<text x=\"%s\" y=\"%d\" "
                            "font-size=\"11\">%s</text>\n",
                            x.text, (int)top, (int)bottom + 4, x.text, (int)bottom + 16, number.text);
    }
    ddp__schedule_print(output,
                        "<text x=\"%d\" y=\"%d\" font-size=\"11\" text-anchor=\"start\">%s%s</text>\n",
                        (int)left, (int)bottom + 31, drawing->unit->axis, merged);
}

/* Draws an action of a rank, and the frame of the pair that ends with it. y: top of the rank's row. */
static void ddp__draw_action(const ddp__drawing *drawing, ddp__schedule_output *output, int i, double left,
                             double y, double row, double scale) {
    const ddp_schedule *s = drawing->s;
    const ddp_action *a = &s->actions[i];
    int second = ddp__drawing_overlaps(drawing, i - 1);
    int half = second || ddp__drawing_overlaps(drawing, i);
    double x = left + scale * (drawing->times[i].begin - drawing->begin);
    double length = scale * (drawing->times[i].end - drawing->times[i].begin);
    double gap = length > 4 ? 1 : length / 4;
    if (!ddp__action_computes(a->kind)) return;
    length -= gap;
    ddp__draw_box(output, s, a, x, second ? y + row / 2 : y, length > 0.2 ? length : 0.2,
                  half ? row / 2 - 0.5 : row);
    if (i > 0 && a[-1].overlaps) {
        double begin = left + scale * (drawing->times[i - 1].begin - drawing->begin);
        double end = x + length;
        double first_end = left + scale * (drawing->times[i - 1].end - drawing->begin) - gap;
        ddp__action_text first = ddp__action_label(a - 1);
        char title[160];
        if (first_end > end) end = first_end;
        snprintf(title, sizeof title, "%s overlaps with %s", first.text, ddp__action_label(a).text);
        if (end - begin > 2) ddp__draw_frame(output, begin, y + 0.75, end - begin, row - 1.5, title);
    }
}

enum { DDP__SVG_WIDTH = 2000, DDP__SVG_LEFT = 64, DDP__SVG_RIGHT = 16, DDP__SVG_ROW = 26 };
enum { DDP__SVG_COLUMNS = DDP__SVG_WIDTH - DDP__SVG_LEFT - DDP__SVG_RIGHT, DDP__SVG_ACTIONS = 20000 };

/* A row of pixels. One pixel can cover several actions. */
typedef struct ddp__svg_row {
    float time[DDP__SVG_COLUMNS][DDP__DRAWING_COLORS]; /* share of each colour in a pixel */
    signed char fill[DDP__SVG_COLUMNS];                /* colour of each pixel: 2 * kind + shade; 0 = idle */
} ddp__svg_row;

/* Returns 1 if a rank has more actions than pixels, or the drawing too many boxes for a file. */
static int ddp__svg_merges(const ddp_schedule *s) {
    int count = 0;
    for (int rank = 0; rank < s->rank_count; rank++) {
        int before = count;
        for (int i = s->first[rank]; i < s->first[rank + 1]; i++)
            count += ddp__action_computes(s->actions[i].kind);
        if (count - before > DDP__SVG_COLUMNS) return 1;
    }
    return count > DDP__SVG_ACTIONS;
}

/* Fills row->time with the actions of a rank. Each action of an overlapping pair has half the height. */
static void ddp__svg_row_time(const ddp__drawing *drawing, ddp__svg_row *row, int rank, double scale) {
    const ddp_schedule *s = drawing->s;
    memset(row, 0, sizeof *row);
    for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
        const ddp_action *a = &s->actions[i];
        double share = ddp__drawing_overlaps(drawing, i - 1) || ddp__drawing_overlaps(drawing, i) ? 0.5 : 1;
        double begin = scale * (drawing->times[i].begin - drawing->begin);
        double end = scale * (drawing->times[i].end - drawing->begin);
        int fill = 2 * (int)a->kind + a->stage / s->rank_count % 2;
        if (!ddp__action_computes(a->kind)) continue;
        for (int x = (int)begin; x < end && x < DDP__SVG_COLUMNS; x++) {
            double from = begin > x ? begin : x;
            double to = end < x + 1 ? end : x + 1;
            row->time[x][fill] += (float)(share * (to - from));
        }
    }
}

/* Chooses the colour of each pixel. Time that a pixel does not show is carried to the next one. Up to each
   pixel, the number of busy pixels differs from the busy time by at most half a pixel. */
static void ddp__svg_row_fill(ddp__svg_row *row) {
    double remainder[DDP__DRAWING_COLORS] = {0}, busy_remainder = 0;
    for (int x = 0; x < DDP__SVG_COLUMNS; x++) {
        double busy = 0;
        int largest = 2;
        for (int k = 2; k < DDP__DRAWING_COLORS; k++) busy += (double)row->time[x][k];
        for (int k = 2; k < DDP__DRAWING_COLORS; k++) {
            remainder[k] += busy > 1 ? (double)row->time[x][k] / busy : (double)row->time[x][k];
            if (remainder[k] > remainder[largest]) largest = k;
        }
        busy_remainder += busy > 1 ? 1 : busy;
        if (busy_remainder < 0.5) continue;
        busy_remainder--;
        remainder[largest]--;
        row->fill[x] = (signed char)largest;
    }
}

/* Draws a rank's row of merged actions: one path per colour, along the middle of the row. */
static void ddp__svg_row_draw(const ddp__drawing *drawing, ddp__schedule_output *output, int rank,
                              double scale, int y) {
    ddp__svg_row *row = drawing->merged;
    ddp__svg_row_time(drawing, row, rank, scale);
    ddp__svg_row_fill(row);
    for (int k = 2; k < DDP__DRAWING_COLORS; k++) {
        int at = -1; /* end of the last run of this colour */
        for (int x = 0, end; x < DDP__SVG_COLUMNS; x = end) {
            end = x + 1;
            if (row->fill[x] != k) continue;
            while (end < DDP__SVG_COLUMNS && row->fill[end] == k) end++;
            if (at < 0)
                ddp__schedule_print(output, "<path stroke=\"%s\" d=\"M%d %dh%d",
                                    ddp__drawing_colors[k / 2][k % 2], DDP__SVG_LEFT + x,
                                    y + DDP__SVG_ROW / 2, end - x);
            else
                ddp__schedule_print(output, "m%d 0h%d", x - at, end - x);
            at = end;
        }
        if (at >= 0) ddp__schedule_print(output, "\"/>\n");
    }
}

static void ddp__draw_svg(const ddp__drawing *drawing, ddp__schedule_output *output) {
    const ddp_schedule *s = drawing->s;
    const double left = DDP__SVG_LEFT;
    const double right = DDP__SVG_RIGHT;
    const double top = 34;
    const double row = DDP__SVG_ROW;
    const double gap = 4;
    double scale = 22 / drawing->shortest;
    double span = drawing->report.makespan;
    double width = 860; /* the legend fits */
    double bottom = top + s->rank_count * (row + gap);
    int height = (int)bottom + 72;
    char title[256];
    snprintf(title, sizeof title,
             "%s: %d ranks, %d stages, %d micro-batches; bubble rate %s, %d in flight, makespan %s%s",
             ddp__drawing_title(s), s->rank_count, s->stage_count, s->microbatch_count,
             ddp__schedule_decimal(drawing->report.bubble_rate, 4).text, drawing->report.peak_in_flight,
             ddp__schedule_decimal(span / drawing->unit->size, 3).text, drawing->unit->name);
    if (scale * span > (double)DDP__SVG_COLUMNS) scale = (double)DDP__SVG_COLUMNS / span;
    if (left + 8.5 * (double)strlen(title) + right > width)
        width = left + 8.5 * (double)strlen(title) + right;
    if (left + scale * span + right > width) width = left + scale * span + right;
    ddp__schedule_print(
        output,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
        "font-family=\"sans-serif\" text-anchor=\"middle\">\n"
        "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n"
        "<text x=\"%d\" y=\"20\" font-size=\"14\" text-anchor=\"start\">%s</text>\n",
        (int)(width + 0.5), height, (int)(width + 0.5), height, (int)left, title);
    for (int rank = 0; rank < s->rank_count; rank++) {
        int y = (int)(top + rank * (row + gap));
        ddp__schedule_print(output,
                            "<text x=\"%d\" y=\"%d\" font-size=\"12\" text-anchor=\"end\">rank %d</text>\n"
                            "<rect x=\"%d\" y=\"%d\" width=\"%s\" height=\"%d\" fill=\"#f0f0f0\"/>\n",
                            (int)left - 8, y + 17, rank, (int)left, y,
                            ddp__schedule_decimal(scale * span, 2).text, (int)row);
    }
    ddp__draw_axis(drawing, output, left, top, bottom, scale);
    if (drawing->merged) ddp__schedule_print(output, "<g fill=\"none\" stroke-width=\"%d\">\n", DDP__SVG_ROW);
    for (int rank = 0; rank < s->rank_count; rank++) {
        double y = top + rank * (row + gap);
        if (drawing->merged)
            ddp__svg_row_draw(drawing, output, rank, scale, (int)y);
        else
            for (int i = s->first[rank]; i < s->first[rank + 1]; i++)
                ddp__draw_action(drawing, output, i, left, y, row, scale);
    }
    if (drawing->merged) ddp__schedule_print(output, "</g>\n");
    ddp__draw_legend(drawing, output, left, bottom + 44);
    ddp__schedule_print(output, "</svg>\n");
}

//== drawing: trace, public calls ================================================ >>impl-schedule-trace
/* The format TRACE (JSON for chrome://tracing and Perfetto), ddp_schedule_draw and ddp_schedule_write. */

/* Declares a row of the trace. Rows are sorted by rank; `second` is the row of overlapped actions. */
static void ddp__draw_trace_row(ddp__schedule_output *output, int tid, int rank, int second) {
    ddp__schedule_print(
        output,
        ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":%d,\"args\":{\"name\":\"rank %d%s\"}}"
        ",\n{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":0,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
        tid, rank, second ? ", overlapped" : "", tid, 2 * rank + second);
}

static void ddp__draw_trace(const ddp__drawing *drawing, ddp__schedule_output *output) {
    const ddp_schedule *s = drawing->s;
    ddp__schedule_print(
        output,
        "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"schedule\":\"%s\",\"bubble_rate\":\"%s\"},"
        "\"traceEvents\":[\n"
        "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{\"name\":\"%s\"}}",
        ddp__drawing_title(s), ddp__schedule_decimal(drawing->report.bubble_rate, 4).text,
        ddp__drawing_title(s));
    for (int rank = 0; rank < s->rank_count; rank++) {
        int named = 0;
        ddp__draw_trace_row(output, rank, rank, 0);
        for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
            const ddp_action *a = &s->actions[i];
            int second = ddp__drawing_overlaps(drawing,
                                               i - 1); /* has its own row: events of a row must nest */
            if (!ddp__action_computes(a->kind)) continue;
            if (second && !named++) ddp__draw_trace_row(output, s->rank_count + rank, rank, 1);
            ddp__schedule_print(
                output,
                ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":%d,\"ts\":%s,\"dur\":%s,"
                "\"args\":{\"stage\":%d,\"microbatch\":%d}}",
                ddp__action_label(a).text, ddp__action_words[a->kind], second ? s->rank_count + rank : rank,
                ddp__schedule_decimal((drawing->times[i].begin - drawing->begin) * 1e6, 3).text,
                ddp__schedule_decimal((drawing->times[i].end - drawing->times[i].begin) * 1e6, 3).text,
                a->stage, a->microbatch);
        }
    }
    ddp__schedule_print(output, "\n]}\n");
}

/* Prepares a drawing: times, report and unit. The caller frees graph and merged, even after a failure. */
static ddp_result ddp__drawing_open(ddp__drawing *drawing, ddp_schedule_format format,
                                    const ddp_stage_cost *costs, const ddp_action_time *times,
                                    const char *who) {
    const ddp_schedule *s = drawing->s;
    DDP_TRY(ddp__graph_open(&drawing->graph, s, costs, DDP__TIMES_SEQUENTIAL, who));
    for (int i = 0; i < s->count && times; i++)
        if (!(times[i].begin >= -DBL_MAX && times[i].end >= times[i].begin && times[i].end <= DBL_MAX))
            return ddp_fail(DDP_ERR_INVALID, "%s: times[%d] is from %g to %g; use an end after the begin",
                            who, i, times[i].begin, times[i].end);
    if (format == DDP_SCHEDULE_SVG && ddp__svg_merges(s)) {
        drawing->merged = (ddp__svg_row *)ddp__schedule_alloc(s, 1, sizeof *drawing->merged);
        if (!drawing->merged) return DDP_ERR_NO_MEMORY;
    }
    drawing->times = times ? times : drawing->graph.times;
    ddp__drawing_measure(drawing, costs);
    drawing->unit = ddp__drawing_time_unit(drawing->report.makespan, costs != NULL, times != NULL);
    return DDP_OK;
}

DDPDEF ddp_result ddp_schedule_draw(const ddp_schedule *schedule, ddp_schedule_format format,
                                    const ddp_stage_cost *costs, const ddp_action_time *times, char *out,
                                    size_t *size_bytes) {
    static void (*const draw[])(const ddp__drawing *, ddp__schedule_output *) = {
        ddp__draw_csv, ddp__draw_text, ddp__draw_svg, ddp__draw_trace};
    static const char who[] = "ddp_schedule_draw";
    ddp__drawing drawing;
    ddp__schedule_output output;
    ddp_result result = DDP_OK;
    if (!schedule || !size_bytes) return ddp_fail(DDP_ERR_INVALID, "%s: schedule or size_bytes is NULL", who);
    if ((int)format < 0 || format > DDP_SCHEDULE_TRACE)
        return ddp_fail(DDP_ERR_INVALID, "%s: format=%d; use 0 to %d", who, (int)format, DDP_SCHEDULE_TRACE);
    memset(&drawing, 0, sizeof drawing);
    drawing.s = schedule;
    if (format != DDP_SCHEDULE_CSV) result = ddp__drawing_open(&drawing, format, costs, times, who);
    for (int pass = 0; pass < 2 && result == DDP_OK; pass++) { /* the first pass only counts bytes */
        output.out = out;
        output.capacity = pass ? *size_bytes : 0;
        output.used = 0;
        draw[format](&drawing, &output);
        if (!out || output.used + 1 > *size_bytes) break;
    }
    ddp__schedule_free(schedule, drawing.merged);
    ddp__graph_close(&drawing.graph);
    if (result != DDP_OK) return result;
    if (out && output.used + 1 > *size_bytes)
        result = ddp_fail(DDP_ERR_INVALID, "%s: *size_bytes=%zu is too small; the text needs %zu", who,
                          *size_bytes, output.used + 1);
    *size_bytes = output.used + 1;
    return result;
}

DDPDEF ddp_result ddp_schedule_write(const ddp_schedule *schedule, ddp_schedule_format format, char *out,
                                     size_t *size_bytes) {
    return ddp_schedule_draw(schedule, format, NULL, NULL, out, size_bytes);
}

//== partitioning and profiling ================================================ >>impl-schedule-balance
/* Divides layers into stages of equal cost, and measures the cost of layers. */

/* Returns the time of the slowest stage from `stage` on in the best cut. next[k]: the same for the stages
   after it, if they begin k layers later than they could. Time grows with each layer of the stage. */
static double ddp__pipe_partition_least(const double *cost, double speed, const double *next, int count) {
    double sum = 0;
    double least = HUGE_VAL;
    for (int k = 0; k < count; k++) {
        sum += cost[k];
        double slowest = sum / speed;
        if (slowest >= least) break;
        if (slowest < next[k]) slowest = next[k];
        if (slowest < least) least = slowest;
    }
    return least;
}

/* Stage s begins with a layer s + i, 0 <= i < width, since every stage has a layer. Entry i of row s is the
   time of the slowest stage from s on, in the best cut. The last row ends the last stage.

       3 layers, 2 stages, costs 1 2 4, speeds 1 2
                  i = 0   i = 1
       row 0        3       2      layers 0 | 1 2 take 1 and 3; layers 0 1 | 2 take 3 and 2
       row 1        3       2      layers 1 2 take 6 / 2; layer 2 takes 4 / 2
       row 2       inf      0                                                                    */
static ddp_result ddp__pipe_partition(const char *who, const double *cost, int layer_count,
                                      const double *speed, int stage_count, int *first_layer) {
    if (!cost || !first_layer) return ddp_fail(DDP_ERR_INVALID, "%s: cost or first_layer is NULL", who);
    if (stage_count < 1 || layer_count < stage_count)
        return ddp_fail(DDP_ERR_INVALID, "%s: %d layers for %d stages; use at least one layer per stage", who,
                        layer_count, stage_count);
    for (int i = 0; i < layer_count; i++)
        if (!(cost[i] >= 0 && cost[i] <= DBL_MAX))
            return ddp_fail(DDP_ERR_INVALID, "%s: cost[%d]=%g; use a finite number of 0 or more", who, i,
                            cost[i]);
    for (int stage = 0; speed && stage < stage_count; stage++)
        if (!(speed[stage] > 0 && speed[stage] <= DBL_MAX))
            return ddp_fail(DDP_ERR_INVALID, "%s: speed[%d]=%g; use a finite number above 0", who, stage,
                            speed[stage]);
    size_t width = (size_t)(layer_count - stage_count) + 1;
    double *table = (double *)calloc((size_t)stage_count + 1, width * sizeof *table);
    if (!table)
        return ddp_fail(DDP_ERR_NO_MEMORY, "%s: memory for %d layers and %d stages could not be allocated",
                        who, layer_count, stage_count);
    for (size_t i = 0; i + 1 < width; i++) table[(size_t)stage_count * width + i] = HUGE_VAL;
    for (int stage = stage_count - 1; stage >= 0; stage--) {
        double *row = table + (size_t)stage * width;
        for (size_t i = 0; i < width; i++)
            row[i] = ddp__pipe_partition_least(cost + stage + i, speed ? speed[stage] : 1, row + width + i,
                                               (int)(width - i));
    }
    size_t i = 0; /* of the stage that is filled */
    for (int stage = 0; stage < stage_count; stage++) {
        const double *next = table + ((size_t)stage + 1) * width;
        double sum = 0;
        first_layer[stage] = stage + (int)i;
        for (size_t k = i; k < width; k++) {
            sum += cost[(size_t)stage + k];
            if (sum / (speed ? speed[stage] : 1) > table[0]) break;
            if (next[k] <= table[0]) i = k;
        }
    }
    free(table);
    return DDP_OK;
}

DDPDEF ddp_result ddp_pipeline_partition(const double *cost, int layer_count, int stage_count,
                                         int *first_layer) {
    return ddp__pipe_partition("ddp_pipeline_partition", cost, layer_count, NULL, stage_count, first_layer);
}

DDPDEF ddp_result ddp_pipeline_partition_speed(const double *cost, int layer_count, const double *speed,
                                               int stage_count, int *first_layer) {
    if (!speed) return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_partition_speed: speed is NULL");
    return ddp__pipe_partition("ddp_pipeline_partition_speed", cost, layer_count, speed, stage_count,
                               first_layer);
}

static int ddp__pipe_compare_doubles(const void *left, const void *right) {
    double l = *(const double *)left, r = *(const double *)right;
    return l < r ? -1 : l > r;
}

static double ddp__pipe_median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, ddp__pipe_compare_doubles);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* Returns the result of a callback. before: the error line before its call. If the callback failed without
   setting another line, the line is the name of the result. */
static ddp_result ddp__pipe_callback_error(ddp_result result, const char *before) {
    if (result == DDP_OK || strcmp(before, ddp_last_error()) != 0) return result;
    return ddp_fail(result, "%s", ddp_result_name(result));
}

DDPDEF ddp_result ddp_pipeline_profile(const ddp_profile_desc *desc, ddp_stage_cost *cost) {
    char before[512];
    ddp_result result = DDP_OK;
    int rounds, warmup;
    double *seconds;
    if (!desc || !cost || !desc->run)
        return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_profile: desc, desc->run or cost is NULL");
    if (desc->layer_count < 1 || desc->rounds < 0 || desc->rounds > 100000 || desc->warmup_rounds < -1)
        return ddp_fail(DDP_ERR_INVALID,
                        "ddp_pipeline_profile: layer_count=%d, rounds=%d, warmup_rounds=%d; use 1 or more "
                        "layers and 0 to 100000 rounds",
                        desc->layer_count, desc->rounds, desc->warmup_rounds);
    rounds = desc->rounds ? desc->rounds : 5;
    warmup = desc->warmup_rounds ? desc->warmup_rounds : 1;
    if (warmup < 0) warmup = 0;
    seconds = (double *)malloc(3 * (size_t)rounds * sizeof *seconds);
    if (!seconds)
        return ddp_fail(DDP_ERR_NO_MEMORY,
                        "ddp_pipeline_profile: memory for %d rounds could not be allocated", rounds);
    for (int layer = 0; layer < desc->layer_count && result == DDP_OK; layer++) {
        for (int n = -3 * warmup; n < 3 * rounds && result == DDP_OK; n++) { /* F, I and W of each round */
            int k = (n + 3 * warmup) % 3;
            snprintf(before, sizeof before, "%s", ddp_last_error());
            double begin = ddp_now();
            result = desc->run(layer, (ddp_action_kind)(DDP_ACTION_FORWARD + k), desc->user);
            if (n >= 0) seconds[k * rounds + n / 3] = ddp_now() - begin;
            if (ddp__pipe_callback_error(result, before) != DDP_OK)
                ddp_fail(result, "ddp_pipeline_profile: %s of layer %d failed: %s",
                         ddp__action_words[DDP_ACTION_FORWARD + k], layer, ddp_last_error());
        }
        if (result != DDP_OK) break;
        cost[layer].forward = ddp__pipe_median(seconds, rounds);
        cost[layer].input_grad = ddp__pipe_median(seconds + rounds, rounds);
        cost[layer].weight_grad = ddp__pipe_median(seconds + 2 * rounds, rounds);
    }
    free(seconds);
    return result;
}

//== runner: structs =========================================================== >>impl-pipeline-structs
/* A pipeline consists of: the stages of this rank, each with partial gradient sums and weight versions; one
   link per edge, with the slots of its tensors; queues, which define the order of messages; and the
   measurements of the last step. ddp_pipeline_create allocates all of it, ddp_pipeline_destroy frees it. */

enum { DDP__PIPE_NONE, DDP__PIPE_LOCAL, DDP__PIPE_OUT, DDP__PIPE_IN };

/* A link carries one tensor per micro-batch over a boundary between stages. A tensor occupies a slot while
   it is in use. Two ways to transfer it:

     copied     sender  OUT slots [t3|t4]   ---- send tensor ---->   receiver  IN slots [t2|t3]
     in_place   sender  OUT slots [t3|t4]   ---- send offset ---->   receiver  reads the sender's slot
                                            <--- same offset -----   after its last read: the slot is free

   in_place: ranks read each other's shared memory, and a message is the offset of a slot in the sender's. */
typedef struct ddp__pipe_offsets {
    uint64_t *slot_offsets;  /* per slot */
    uint64_t *returned;      /* OUT: offsets that came back, per slot; IN: to return, per micro-batch */
    ddp_work *return_works;  /* per entry of returned */
    uint64_t returned_count; /* OUT: offsets that came back since create */
} ddp__pipe_offsets;

/* Slots for one kind of tensor on this rank, one per micro-batch in flight.

              tensor            number of slots          acquired                     released
       LOCAL  stays on a rank   most in use at once      before an action writes it   after its last reader
       OUT    is sent           ddp__pipe_out_slots      before an action writes it   when its send is done;
                                                                                      in place: offset back
       IN     is received       most in use + prefetch   when its receive is posted   after its last reader */
typedef struct ddp__pipe_pool {
    int kind, peer, tag;
    ddp_tensor tensor;
    size_t stride;   /* bytes from slot to slot */
    int count, used; /* slots; slots in use, only during ddp__pipe_count_list */
    /* Free slots: LOCAL, IN, and OUT in place. */
    int free_count, *free_slots;
    int *slot;             /* per micro-batch; -1 = none */
    int buffer_count;      /* slots with memory; 0 = all. See ddp__pipe_offload */
    unsigned char *memory; /* in place: the shared memory of the sender */
    size_t offset;         /* OUT: of the first slot in the shared memory */
    int *order;            /* OUT, IN: per micro-batch, its index in the queue */
    ddp_work *works;       /* OUT, IN: per slot */
    uint64_t sent;         /* OUT: messages sent since create */
    ddp__pipe_offsets offsets;
} ddp__pipe_pool;

/* An edge. pools[0] carries values forward, pools[1] their gradients backward. In this header, the variable
   `backward` is this index. */
typedef struct ddp__pipe_link {
    ddp_pipeline_edge edge;
    ddp__pipe_pool pools[2];
    unsigned char *scratch; /* outputs of a recomputed forward; NULL = no recomputation */
} ddp__pipe_link;

/* A queue is all messages from one rank, in the order of its list. Receives are posted in this order. With
   single_queue, queue 0 contains all messages from and to this rank; see ddp__pipe_make_queues. */
typedef struct ddp__pipe_message {
    int link, backward, microbatch;
    int source; /* index of the action that makes the tensor */
    double at;  /* end of that action with unit costs */
} ddp__pipe_message;
typedef struct ddp__pipe_queue {
    ddp__pipe_message *messages;
    int count, next;
} ddp__pipe_queue;

/* Position of a parameter's gradient in a buffer of sums. 16-bit gradients are added in f32. */
typedef struct ddp__pipe_grad_place {
    size_t at, count, bytes;
    ddp_dtype dtype, sum_dtype;
    int allocated_here; /* 1 = the runner allocated param->grad */
} ddp__pipe_grad_place;

/* The sum of the gradients of micro-batches [index << level, (index + 1) << level) of an update. */
typedef struct ddp__pipe_sum {
    int level, index;
} ddp__pipe_sum;
enum { DDP__PIPE_FREE = -1 }; /* the level of a free buffer */

/* Partial gradient sums of a stage. */
typedef struct ddp__pipe_sums {
    ddp__pipe_grad_place *gradients; /* per parameter */
    size_t bytes;                    /* of a buffer: sums of all parameters, each padded */
    ddp__pipe_sum *table;            /* content of each buffer; `capacity` entries */
    int capacity, count;             /* count: allocated buffers */
    unsigned char *memory;
    int added; /* micro-batches of this update that are in the sums */
} ddp__pipe_sums;

typedef struct ddp__pipe_version_copy {
    uint64_t version;
    int used;
} ddp__pipe_version_copy;

/* Older weights of a stage that micro-batches in flight still use, with PipeDream and PipeDream-2BW. */
typedef struct ddp__pipe_versions {
    uint64_t newest;        /* updates since create */
    uint64_t *used_version; /* PipeDream: per micro-batch in flight, its version + 1; 0 = not in flight */
    size_t bytes;           /* of a copy */
    ddp__pipe_version_copy *table; /* content of each copy; `capacity` entries */
    int capacity, count; /* capacity 0 = weights change only between steps; count: allocated copies */
    unsigned char *memory;
    void **values; /* the parameters' own pointers while a copy replaces them */
} ddp__pipe_versions;

/* offload_saved: the slots of saved memory are in pinned host memory. The device has two buffers. An action
   uses one of them; the other one receives what the stage's next action needs. `buffers` below:

     compute stream   F2 uses 0            B0 uses 1            F3 uses 0           B1 uses 1
     copy stream      0 to buffer 1        buffer 0 to slot 2   1 to buffer 1       buffer 0 to slot 3

   The compute stream waits for the last copy from or to its buffer, and a copy for the buffer's last use. */
typedef struct ddp__pipe_offload {
    unsigned char *slots;      /* NULL = not offloaded */
    int microbatch[2];         /* content of the buffers; -1 = none */
    int current;               /* the buffer of the action that runs, or ran last */
    void *copied[2], *used[2]; /* events: the last copy of a buffer; the last action that used it */
} ddp__pipe_offload;

typedef struct ddp__pipe_stage {
    ddp_pipeline_stage desc;
    int stage_index;           /* -1 = on another rank; the other fields are then empty */
    ddp__pipe_link **links[2]; /* [0]: of inputs, [1]: of outputs */
    int link_count[2];
    ddp__pipe_pool saved;
    ddp__pipe_offload offload;     /* of saved */
    unsigned kinds;                /* 1 << kind for each action of the stage */
    int first, last, last_forward; /* positions in this rank's list */
    ddp__pipe_sums sums;
    ddp__pipe_versions versions;
} ddp__pipe_stage;

/* Measurements of a step or an evaluation. losses to seconds are parts of one array, which all ranks exchange
   at the end of the step. */
typedef struct ddp__pipe_measures {
    double *losses, *starts, *spans, *computes; /* losses: per micro-batch; the others: per rank */
    double *seconds;                            /* per stage: F, I, W, B */
    ddp_action_time *times;                     /* of all actions; only those of this rank are set */
    ddp_pipeline_stats stats;
} ddp__pipe_measures;

/* State of the step or evaluation that is running, or ran last. */
typedef struct ddp__pipe_run_state {
    ddp__pipe_measures measures[2],
        *current;          /* of the last step and the last evaluation; current: of this one */
    size_t exchange_count; /* numbers that ranks exchange */
    int evaluating;
    /* has_gradients: 1 = the last step succeeded. has_losses: the last step or evaluation succeeded. */
    int has_gradients, has_losses;
    int failure_reported; /* 1 = a call has returned the code of the group's failure */
    double start;
} ddp__pipe_run_state;

/* Messages of this rank: tensors that stages send to each other. */
typedef struct ddp__pipe_messages {
    ddp_group *group;
    ddp__pipe_link *links;
    int link_count;
    int microbatch_count;
    ddp__pipe_queue *queues; /* per rank; with single_queue, only the first one has messages */
    int queue_count;         /* ranks */
    int single_queue;        /* 1 = messages of both directions run in the order issued */
    int in_place;            /* 1 = ranks read each other's shared memory */
    int works;               /* max. messages in flight; after create: the largest of any rank */
    void *shared;            /* group memory: tensors that this rank sends */
    ddp__pipe_run_state *run;
} ddp__pipe_messages;

typedef struct ddp__pipe_allocation {
    struct ddp__pipe_allocation *next;
    void *device_memory;
} ddp__pipe_allocation;

struct ddp_pipeline {
    ddp_group *group;
    const ddp_device *device;
    const ddp_schedule *schedule;
    ddp_pipeline_desc desc;
    int rank, world_size, stage_count, microbatch_count, interval;
    const ddp_action *list; /* of this rank */
    int list_count;
    ddp__pipe_allocation *allocations; /* all memory except shared memory */
    ddp__pipe_stage *stages;
    ddp_tensor *tensors[4];  /* of a call: inputs, outputs, input_grads, output_grads */
    unsigned char *f32_grad; /* one parameter's 16-bit gradient, converted to f32 */
    size_t f32_grad_bytes;
    ddp_exact_sum *squares; /* on the device */
    int no_clip;            /* 1 = no rank has params, or unshard allocates gradients */
    /* Per tie: group of the two ranks that share the parameter. NULL = both uses are on one rank, or this
       rank has none of them. Ties of the same two ranks share a group. */
    ddp_group **tie_groups;
    ddp__pipe_messages messages;
    ddp__pipe_run_state run;
};

#define DDP__PIPE_INVALID(...) ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_create: " __VA_ARGS__)

static int ddp__pipe_min(int a, int b) { return a < b ? a : b; }

/* Allocates zeroed host memory. ddp__pipe_free frees it. */
static void *ddp__pipe_alloc_host(ddp_pipeline *p, size_t count, size_t size) {
    size_t bytes = count <= (SIZE_MAX - 64) / size ? 64 + count * size : 0;
    ddp__pipe_allocation *allocation = bytes ? (ddp__pipe_allocation *)ddp_host_alloc(p->group, bytes) : NULL;
    if (!bytes)
        ddp_fail(DDP_ERR_NO_MEMORY, "ddp_pipeline_create: %zu entries of %zu bytes could not be allocated",
                 count, size);
    if (!allocation) return NULL;
    allocation->next = p->allocations;
    p->allocations = allocation;
    return (unsigned char *)allocation + 64;
}

/* Allocates zeroed host memory for `count` elements in a function that returns ddp_result. */
#define DDP__PIPE_NEW(p, pointer, type, count)                                        \
    do {                                                                              \
        (pointer) = (type *)ddp__pipe_alloc_host((p), (size_t)(count), sizeof(type)); \
        if (!(pointer)) return DDP_ERR_NO_MEMORY;                                     \
    } while (0)

/* Allocates zeroed device memory. ddp__pipe_free frees it. */
static ddp_result ddp__pipe_alloc_device(ddp_pipeline *p, size_t size, void **out) {
    if (!ddp__pipe_alloc_host(p, 0, 1)) return DDP_ERR_NO_MEMORY;
    DDP_TRY(p->device->alloc(p->group, size ? size : 64, &p->allocations->device_memory));
    *out = p->allocations->device_memory;
    return DDP_OK;
}

/* Replaces data, in host memory, by its sum over all ranks. */
static ddp_result ddp__pipe_sum_over_ranks(ddp_pipeline *p, void *data, size_t count, ddp_dtype dtype) {
    return ddp_host_collective(p->group, DDP_CALL_ALL_REDUCE, data, data, count, dtype, DDP_OP_SUM, -1);
}

/* Returns this rank's next stage after s, or the first one if s is NULL. NULL after the last one. */
static ddp__pipe_stage *ddp__pipe_next_stage(const ddp_pipeline *p, const ddp__pipe_stage *s) {
    int stage = s ? s->stage_index + 1 : 0;
    while (stage < p->stage_count && p->stages[stage].stage_index < 0) stage++;
    return stage < p->stage_count ? &p->stages[stage] : NULL;
}

/* Returns the pool of a stage's input (side 0) or output (side 1) number k, for values (backward 0) or
   gradients (backward 1). NULL after the last one.

                             reads                    writes
       F      (backward 0)   inputs' values  (0, 0)   outputs' values (1, 0)
       I, B   (backward 1)   outputs' grads  (1, 1)   inputs' grads   (0, 1)

   So an action reads the pools (backward, backward) and writes the pools (!backward, backward). */
static ddp__pipe_pool *ddp__pipe_stage_pool(const ddp__pipe_stage *s, int side, int backward, int k) {
    return k < s->link_count[side] ? &s->links[side][k]->pools[backward] : NULL;
}

static int ddp__pipe_is_last_stage(const ddp_pipeline *p, const ddp__pipe_stage *s) {
    return s->stage_index + 1 == p->stage_count;
}
static int ddp__pipe_stage_has(const ddp__pipe_stage *s, ddp_action_kind kind) {
    return s->kinds >> kind & 1;
}

//== runner: argument checks ===================================================== >>impl-pipeline-check
/* Checks ddp_pipeline_desc on this rank, and copies stages and edges. Every error names the field. */

/* Returns 1 if weights change within a step. */
static int ddp__pipe_is_asynchronous(const ddp_pipeline *p) {
    return p->schedule->kind == DDP_SCHEDULE_PIPEDREAM || p->schedule->kind == DDP_SCHEDULE_PIPEDREAM_2BW;
}

/* Returns the name of a stage in errors: "stage 2" or "stage 2 (decoder)". */
static ddp__action_text ddp__pipe_stage_label(const ddp_pipeline *p, int stage) {
    ddp__action_text label;
    const char *name = p->stages[stage].desc.name;
    if (name)
        snprintf(label.text, sizeof label.text, "stage %d (%.32s)", stage, name);
    else
        snprintf(label.text, sizeof label.text, "stage %d", stage);
    return label;
}

static ddp_result ddp__pipe_check_param(const ddp_pipeline *p, int stage, int index, const char *label) {
    const ddp_param *param = p->stages[stage].desc.params[index];
    ddp_tensor grad;
    int64_t count;
    if (!param) return DDP__PIPE_INVALID("%s: params[%d] is NULL", label, index);
    grad = ddp_param_grad(param);
    count = ddp_tensor_count(&param->value);
    if (count < 0 || (uint64_t)count > SIZE_MAX >> 16 || !ddp_dtype_size(param->value.dtype)
        || !ddp_dtype_size(grad.dtype) || ddp_tensor_count(&grad) != count)
        return DDP__PIPE_INVALID(
            "%s: params[%d] (%.60s): value.dtype or value.shape is invalid; fill in its ddp_tensor", label,
            index, param->name ? param->name : "no name");
    for (int i = 0; i <= stage; i++) /* each use needs a gradient of its own until ties are added */
        for (int k = 0; k < (i < stage ? p->stages[i].desc.param_count : index); k++)
            if (p->stages[i].desc.params[k] == param)
                return DDP__PIPE_INVALID(
                    "%s: params[%d] is also params[%d] of stage %d; give each use its own "
                    "ddp_param, and tie them",
                    label, index, k, i);
    return DDP_OK;
}

/* Returns 1 if the parameter's gradient is only in memory from unshard to reduce_grad. */
static int ddp__pipe_grad_is_transient(const ddp_pipeline_stage *s, int param) {
    return s->unshard && !s->params[param]->grad.data;
}

/* Checks a stage of this rank, and finds its first and last action in the list. */
static ddp_result ddp__pipe_check_stage(ddp_pipeline *p, int stage_index) {
    ddp__pipe_stage *stage = &p->stages[stage_index];
    const ddp_pipeline_stage *s = &stage->desc;
    ddp__action_text label;
    stage->desc = p->desc.stages[stage_index];
    stage->stage_index = stage_index;
    stage->first = p->list_count;
    label = ddp__pipe_stage_label(p, stage_index);
    for (int i = 0; i < p->list_count; i++) {
        const ddp_action *a = &p->list[i];
        if (a->stage != stage_index) continue;
        stage->kinds |= 1u << a->kind;
        if (!ddp__action_computes(a->kind)) continue;
        stage->first = ddp__pipe_min(stage->first, i);
        stage->last = i;
        if (a->kind == DDP_ACTION_FORWARD) stage->last_forward = i;
    }
    if (!s->forward) return DDP__PIPE_INVALID("%s: forward is NULL", label.text);
    if ((unsigned)s->grad_division > DDP_DIVIDE_NONE)
        return DDP__PIPE_INVALID("%s: grad_division=%d is not a ddp_grad_division", label.text,
                                 (int)s->grad_division);
    if (ddp__pipe_stage_has(stage, DDP_ACTION_INPUT_GRAD) && !s->input_grad)
        return DDP__PIPE_INVALID("%s: input_grad is NULL, but the schedule has I", label.text);
    if (ddp__pipe_stage_has(stage, DDP_ACTION_WEIGHT_GRAD) && !s->weight_grad)
        return DDP__PIPE_INVALID("%s: weight_grad is NULL, but the schedule has W", label.text);
    if (ddp__pipe_stage_has(stage, DDP_ACTION_BACKWARD) && !s->backward && !(s->input_grad && s->weight_grad))
        return DDP__PIPE_INVALID(
            "%s: backward is NULL, but the schedule has B; set backward, or input_grad and weight_grad",
            label.text);
    if (s->param_count < 0 || (s->param_count && !s->params))
        return DDP__PIPE_INVALID("%s: param_count=%d, params=%p; set both, or neither", label.text,
                                 s->param_count, (const void *)s->params);
    if (ddp__pipe_is_asynchronous(p) && !s->update)
        return DDP__PIPE_INVALID("%s: update is NULL, but %s updates weights within a step", label.text,
                                 ddp_schedule_kind_name(p->schedule->kind));
    if (ddp__pipe_is_asynchronous(p) && s->recompute)
        return DDP__PIPE_INVALID("%s: recompute=1 cannot be combined with %s", label.text,
                                 ddp_schedule_kind_name(p->schedule->kind));
    if (s->offload_saved && s->recompute)
        return DDP__PIPE_INVALID(
            "%s: offload_saved=1 and recompute=1; recompute keeps no saved memory, so set only one of them",
            label.text);
    if (s->offload_saved && !s->saved_bytes)
        return DDP__PIPE_INVALID("%s: offload_saved=1, but saved_bytes=0; set saved_bytes", label.text);
    for (int i = 0; i < s->param_count; i++) DDP_TRY(ddp__pipe_check_param(p, stage_index, i, label.text));
    return DDP_OK;
}

/* Returns a use of a tied parameter, or NULL if it is on another rank. */
static const ddp_param *ddp__pipe_tie_use(const ddp_pipeline *p, int stage, int index) {
    const ddp__pipe_stage *s = &p->stages[stage];
    return s->stage_index < 0 ? NULL : s->desc.params[index];
}

/* Compares the second use of a tie with the first one, and with the second uses of earlier ties to it: a
   reducer or fsdp that has two of them adds their gradients already. */
static ddp_result ddp__pipe_check_added_once(const ddp_pipeline *p, int tie) {
    const ddp_pipeline_tie *t = &p->desc.ties[tie];
    const ddp_param *second = ddp__pipe_tie_use(p, t->second_stage, t->second_param);
    for (int k = 0; k <= tie && second && second->first_use; k++) {
        const ddp_pipeline_tie *other = &p->desc.ties[k];
        int end = k < tie;
        int stage = end ? other->second_stage : other->first_stage;
        int index = end ? other->second_param : other->first_param;
        if (other->first_stage != t->first_stage || other->first_param != t->first_param) continue;
        const ddp_param *use = ddp__pipe_tie_use(p, stage, index);
        if (!use || use->first_use != second->first_use) continue;
        return DDP__PIPE_INVALID(
            "ties[%d]: params[%d] of %s and params[%d] of %s are uses of one parameter in a ddp_reducer or "
            "ddp_fsdp, which already adds their gradients; remove this tie",
            tie, index, ddp__pipe_stage_label(p, stage).text, t->second_param,
            ddp__pipe_stage_label(p, t->second_stage).text);
    }
    return DDP_OK;
}

static ddp_result ddp__pipe_check_ties(const ddp_pipeline *p) {
    const ddp_pipeline_desc *d = &p->desc;
    if (d->tie_count < 0 || (d->tie_count && !d->ties))
        return DDP__PIPE_INVALID("tie_count=%d, ties=%p; set both, or neither", d->tie_count,
                                 (const void *)d->ties);
    if (d->tie_count && ddp__pipe_is_asynchronous(p))
        return DDP__PIPE_INVALID("ties cannot be combined with %s, whose stages update at different times",
                                 ddp_schedule_kind_name(p->schedule->kind));
    for (int i = 0; i < d->tie_count; i++) {
        const ddp_pipeline_tie *t = &d->ties[i];
        int later = t->second_stage > t->first_stage
                    || (t->second_stage == t->first_stage && t->second_param > t->first_param);
        if (t->first_stage < 0 || !later || t->second_stage >= p->stage_count)
            return DDP__PIPE_INVALID(
                "ties[%d]: first_stage=%d first_param=%d second_stage=%d second_param=%d; use stages 0 to "
                "%d, with the second use in a later stage, or as a later parameter of the same stage",
                i, t->first_stage, t->first_param, t->second_stage, t->second_param, p->stage_count - 1);
        for (int end = 0; end < 2; end++) {
            int stage = end ? t->second_stage : t->first_stage;
            int index = end ? t->second_param : t->first_param;
            const ddp_pipeline_stage *s = &p->stages[stage].desc;
            if (p->stages[stage].stage_index < 0) continue;
            if (index < 0 || index >= s->param_count)
                return DDP__PIPE_INVALID("ties[%d]: %s has no params[%d]", i,
                                         ddp__pipe_stage_label(p, stage).text, index);
            if (ddp__pipe_grad_is_transient(s, index) && !s->get_sharded_grad)
                return DDP__PIPE_INVALID("ties[%d]: the gradient of params[%d] of %s exists only while "
                                         "unsharded; set get_sharded_grad, which returns its sum",
                                         i, index, ddp__pipe_stage_label(p, stage).text);
        }
        for (int k = 0; k < d->tie_count; k++)
            if (k != i && t->second_stage == d->ties[k].second_stage
                && t->second_param == d->ties[k].second_param)
                return DDP__PIPE_INVALID("ties[%d] and ties[%d] have the same second parameter",
                                         i < k ? i : k, i < k ? k : i);
            else if (t->second_stage == d->ties[k].first_stage && t->second_param == d->ties[k].first_param)
                return DDP__PIPE_INVALID(
                    "ties[%d]: its second parameter is the first one of ties[%d]; tie all "
                    "uses to the first use",
                    i, k);
        DDP_TRY(ddp__pipe_check_added_once(p, i));
    }
    return DDP_OK;
}

static ddp_result ddp__pipe_check_edge(const ddp_pipeline *p, int index, const ddp_pipeline_edge *e) {
    int64_t count = ddp_tensor_count(&e->tensor);
    if (e->from < 0 || e->from >= p->stage_count || e->to <= e->from || e->to > p->stage_count)
        return DDP__PIPE_INVALID("edges[%d]: from=%d to=%d; use a later stage as `to`, or %d for the loss",
                                 index, e->from, e->to, p->stage_count);
    if (e->to == p->stage_count && e->from != p->stage_count - 1)
        return DDP__PIPE_INVALID("edges[%d]: from=%d to the loss; use the last stage, %d", index, e->from,
                                 p->stage_count - 1);
    if (!ddp_dtype_size(e->tensor.dtype) || count < 1 || !ddp_dtype_size(e->grad_dtype)
        || (uint64_t)count > SIZE_MAX / 64)
        return DDP__PIPE_INVALID(
            "edges[%d] (stage %d to %d): dtype or shape is invalid; fill in its ddp_tensor", index, e->from,
            e->to);
    return DDP_OK;
}

/* Creates the links from the edges of the desc, or from boundary and output. */
static ddp_result ddp__pipe_check_edges(ddp_pipeline *p) {
    const ddp_pipeline_desc *d = &p->desc;
    int count = d->edges ? d->edge_count : p->stage_count - 1 + (d->output.dtype != DDP_DTYPE_DEFAULT);
    int to_loss = 0;
    if (d->edge_count < 0 || d->edge_count > (1 << 20) || (d->edge_count && !d->edges))
        return DDP__PIPE_INVALID("edge_count=%d, edges=%p; set both, with at most %d edges, or neither",
                                 d->edge_count, (const void *)d->edges, 1 << 20);
    DDP__PIPE_NEW(p, p->messages.links, ddp__pipe_link, count);
    p->messages.link_count = count;
    for (int i = 0; i < count; i++) {
        ddp_pipeline_edge *e = &p->messages.links[i].edge;
        e->from = i;
        e->to = i + 1;
        e->tensor = i + 1 < p->stage_count ? d->boundary : d->output;
        if (d->edges) *e = d->edges[i];
        if (!e->grad_dtype) e->grad_dtype = e->tensor.dtype;
        DDP_TRY(ddp__pipe_check_edge(p, i, e));
        if (!ddp_is_float(e->tensor.dtype)) e->no_grad = 1;
        to_loss += e->to == p->stage_count;
    }
    for (int stage = 0; stage + 1 < p->stage_count; stage++) {
        int found = 0;
        for (int i = 0; i < count; i++)
            found |= p->messages.links[i].edge.from == stage && p->messages.links[i].edge.to == stage + 1
                     && !p->messages.links[i].edge.no_grad;
        if (!found)
            return DDP__PIPE_INVALID("edges: no edge with a gradient from stage %d to stage %d; add one",
                                     stage, stage + 1);
    }
    if (to_loss && !d->loss)
        return DDP__PIPE_INVALID(
            "the last stage has an edge to the loss, but loss is NULL; set loss, or leave "
            "out the edge and set *call->loss in the last forward");
    if (d->loss && !to_loss)
        return DDP__PIPE_INVALID("loss is set, but has no edge; set output, or add an edge to stage %d",
                                 p->stage_count);
    return DDP_OK;
}

static ddp_result ddp__pipe_check_desc(ddp_pipeline *p) {
    const ddp_pipeline_desc *d = &p->desc;
    if (!d->schedule || !d->stages) return DDP__PIPE_INVALID("schedule or stages is NULL");
    DDP_TRY(ddp_schedule_check(d->schedule));
    p->schedule = d->schedule;
    p->stage_count = d->schedule->stage_count;
    p->microbatch_count = p->messages.microbatch_count = d->schedule->microbatch_count;
    p->interval = d->schedule->update_interval;
    if (d->schedule->rank_count != p->world_size)
        return DDP__PIPE_INVALID("the schedule is for %d ranks, but the group has %d",
                                 d->schedule->rank_count, p->world_size);
    if (d->stage_count != p->stage_count)
        return DDP__PIPE_INVALID(
            "stage_count=%d, but the schedule has %d stages; give stages one entry per stage "
            "of the schedule, and set stage_count to ddp_schedule_stage_count(schedule)",
            d->stage_count, p->stage_count);
    if (d->prefetch < 0 || d->prefetch > 1024)
        return DDP__PIPE_INVALID("prefetch=%d; use 1 to 1024, or 0 for 2", d->prefetch);
    if (!d->prefetch) p->desc.prefetch = 2;
    p->list = ddp_schedule_actions(d->schedule, p->rank, &p->list_count);
    DDP__PIPE_NEW(p, p->stages, ddp__pipe_stage, p->stage_count);
    for (int stage = 0; stage < p->stage_count; stage++) p->stages[stage].stage_index = -1;
    for (int stage = 0; stage < p->stage_count; stage++)
        if (d->schedule->stage_rank[stage] == p->rank) DDP_TRY(ddp__pipe_check_stage(p, stage));
    return ddp__pipe_check_ties(p);
}

//== runner: gradients and weight versions =================================== >>impl-pipeline-gradients
/* Accumulates the gradients of micro-batches pairwise by index, so that the result does not depend on the
   order in which they arrive. Adds the gradients of tied parameters. Copies older weights before an update,
   and lets callbacks use them. Called by ddp__pipe_finish_action and ddp__pipe_update. */

/* A step of adding the gradients of a micro-batch. side -1: copy their current sum to a buffer. side 0, 1:
   add the buffer, with the current sum as the left (0) or the right (1) operand. */
typedef struct ddp__pipe_sum_step {
    int buffer, side;
} ddp__pipe_sum_step;
enum { DDP__PIPE_MAX_SUM_STEPS = 25 }; /* at most 1 << 24 micro-batches */

static int ddp__pipe_find_sum(const ddp__pipe_sums *sums, int level, int index) {
    for (int k = 0; k < sums->capacity; k++)
        if (sums->table[k].level == level && (level < 0 || sums->table[k].index == index)) return k;
    return -1;
}

/* Adds the gradients of a micro-batch to the tree that a binary counter builds. The tree does not depend on
   the order in which they arrive:

       update of 7        ((g0+g1)+(g2+g3))+((g4+g5)+g6)

   A block is added to its neighbour, or waits for it in a buffer. A last block without a neighbour moves up
   one level. Updates the table and fills in the steps. Returns their number. */
static int ddp__pipe_plan_sum(ddp__pipe_sums *sums, int interval, int microbatch, ddp__pipe_sum_step *steps) {
    int index = microbatch % interval, count = 0;
    sums->added = (sums->added + 1) % interval;
    for (int level = 0; 1 << level < interval; level++, index >>= 1) {
        int neighbour = index ^ 1, k;
        if (neighbour << level >= interval) continue;
        k = ddp__pipe_find_sum(sums, level, neighbour);
        steps[count].side = k < 0 ? -1 : index & 1;
        if (k >= 0) {
            sums->table[k].level = DDP__PIPE_FREE; /* steps[0].buffer is in use, and gets its level below */
            steps[count++].buffer = k;
            continue;
        }
        k = count ? steps[0].buffer : ddp__pipe_find_sum(sums, DDP__PIPE_FREE, 0);
        sums->table[k].level = level;
        sums->table[k].index = index;
        if (k >= sums->count) sums->count = k + 1;
        steps[count++].buffer = k;
        return count;
    }
    return count;
}

/* Executes a step for all gradients of a stage. The result is stored in grad.data. A sum of 16-bit gradients
   is f32 and is stored in buffer `newest`. newest -1: grad.data is the first term of such a sum, and the
   result is stored in the step's buffer. */
static void ddp__pipe_run_sum_step(const ddp_pipeline *p, const ddp__pipe_stage *s, ddp__pipe_sum_step step,
                                   int newest) {
    ddp_copy_list copies = DDP_ZERO;
    copies.device = p->device;
    for (int i = 0; i < s->desc.param_count; i++) {
        const ddp__pipe_grad_place *g = &s->sums.gradients[i];
        void *grad = s->desc.params[i]->grad.data;
        unsigned char *buffer = s->sums.memory + (size_t)step.buffer * s->sums.bytes + g->at;
        unsigned char *out = (unsigned char *)grad;
        unsigned char *right = out;
        if (!g->bytes) continue;
        if (step.side < 0) { /* an f32 sum of earlier steps is in the buffer already */
            if (g->sum_dtype == g->dtype || newest < 0)
                ddp_copy_list_add(&copies, buffer, g->sum_dtype, grad, g->dtype, g->count);
            continue;
        }
        if (g->sum_dtype != g->dtype && newest >= 0) {
            out = right = s->sums.memory + (size_t)newest * s->sums.bytes + g->at;
        } else if (g->sum_dtype != g->dtype) {
            right = p->f32_grad;
            out = buffer;
            p->device->cast(right, DDP_F32, grad, g->dtype, g->count);
        }
        if (step.side == 0) p->device->add(out, right, buffer, g->count, g->sum_dtype);
        if (step.side > 0) p->device->add(out, buffer, right, g->count, g->sum_dtype);
    }
    ddp_copy_list_end(&copies);
}

enum { DDP__PIPE_LIST = 64 }; /* tensors of a call of the device */

/* The sum of gradient i over the micro-batches of an update: grad.data, or an f32 sum in buffer `sum`. */
static ddp_tensor ddp__pipe_total(const ddp__pipe_stage *s, int i, int sum) {
    const ddp__pipe_grad_place *g = &s->sums.gradients[i];
    ddp_tensor total = {s->desc.params[i]->grad.data, g->sum_dtype, 1, {(int64_t)g->count}};
    if (sum >= 0 && g->sum_dtype != g->dtype)
        total.data = s->sums.memory + (size_t)sum * s->sums.bytes + g->at;
    if (!g->bytes) total.shape[0] = 0;
    return total;
}

/* Ends the sum over the micro-batches of an update. The sum is in grad.data; for 16-bit gradients it is in
   buffer `sum`, unless `sum` is -1. Divides it if the runner divides. Rounds 16-bit gradients once. A reducer
   or fsdp reads the f32 sum from the buffer, which does not change until the next update. */
static void ddp__pipe_finish_sum(const ddp_pipeline *p, const ddp__pipe_stage *s, int sum) {
    int before = s->desc.grad_division == DDP_DIVIDE_BEFORE_REDUCE;
    int without_reduce = s->desc.grad_division == DDP_DIVIDE_DEFAULT && !s->desc.reduce_grad;
    int divides = p->interval > 1 && (before || without_reduce);
    ddp_tensor totals[DDP__PIPE_LIST];
    ddp_copy_list casts = DDP_ZERO;
    casts.device = p->device;
    for (int i = 0, count = 0; i < s->desc.param_count && divides; i++) {
        totals[count++] = ddp__pipe_total(s, i, sum);
        if (count < DDP__PIPE_LIST && i + 1 < s->desc.param_count) continue;
        p->device->divide(totals, count, (uint64_t)p->interval);
        count = 0;
    }
    for (int i = 0; i < s->desc.param_count; i++) {
        const ddp__pipe_grad_place *g = &s->sums.gradients[i];
        const ddp_tensor total = ddp__pipe_total(s, i, sum);
        void *grad = s->desc.params[i]->grad.data;
        if (!g->bytes || total.data == grad) continue;
        ddp_copy_list_add(&casts, grad, g->dtype, total.data, DDP_F32, g->count);
        if (s->desc.reduce_grad) s->desc.params[i]->sum.data = total.data;
        s->desc.params[i]->sum.is_set = s->desc.reduce_grad != NULL;
    }
    ddp_copy_list_end(&casts);
}

/* Adds the gradients of a micro-batch, which are in grad.data. */
static void ddp__pipe_accumulate(const ddp_pipeline *p, ddp__pipe_stage *s, int microbatch) {
    ddp__pipe_sum_step steps[DDP__PIPE_MAX_SUM_STEPS];
    int count = ddp__pipe_plan_sum(&s->sums, p->interval, microbatch, steps);
    for (int k = 0; k < count; k++) ddp__pipe_run_sum_step(p, s, steps[k], k ? steps[0].buffer : -1);
    if (s->sums.added == 0) ddp__pipe_finish_sum(p, s, count ? steps[0].buffer : -1);
}

static void ddp__pipe_zero_gradients(const ddp_pipeline *p, const ddp__pipe_stage *s) {
    for (int i = 0; i < s->desc.param_count && s->desc.zero_gradients; i++)
        if (s->sums.gradients[i].bytes)
            p->device->fill_zero(s->desc.params[i]->grad.data, s->sums.gradients[i].bytes);
}

/* The two uses of a tied parameter: their ranks, and the gradients of those on this rank. */
typedef struct ddp__pipe_tie_grads {
    int rank[2];
    ddp_tensor grad[2]; /* data NULL = on another rank */
    size_t count[2];
} ddp__pipe_tie_grads;

static ddp_result ddp__pipe_get_tie_grads(ddp_pipeline *p, int tie, ddp__pipe_tie_grads *t) {
    const int stage[2] = {p->desc.ties[tie].first_stage, p->desc.ties[tie].second_stage};
    const int param[2] = {p->desc.ties[tie].first_param, p->desc.ties[tie].second_param};
    char before[512];
    memset(t, 0, sizeof *t);
    for (int k = 0; k < 2; k++) {
        const ddp_pipeline_stage *s = &p->stages[stage[k]].desc;
        t->rank[k] = p->schedule->stage_rank[stage[k]];
        if (t->rank[k] != p->rank) continue;
        t->grad[k] = ddp_param_grad(s->params[param[k]]);
        if (s->get_sharded_grad) {
            snprintf(before, sizeof before, "%s", ddp_last_error());
            DDP_USER_CALLBACK;
            DDP_TRY(ddp__pipe_callback_error(s->get_sharded_grad(stage[k], param[k], &t->grad[k], s->user),
                                             before));
        }
        DDP_TRY(ddp_device_begin(p->group));
        t->count[k] = t->grad[k].data ? (size_t)ddp_tensor_count(&t->grad[k]) : 0;
    }
    if (t->rank[0] == t->rank[1] && (t->count[0] != t->count[1] || t->grad[0].dtype != t->grad[1].dtype))
        return ddp_fail(DDP_ERR_INVALID,
                        "ties[%d]: get_sharded_grad returns %zu elements of %s and %zu of %s; return the "
                        "same for both",
                        tie, t->count[0], ddp_dtype_name(t->grad[0].dtype), t->count[1],
                        ddp_dtype_name(t->grad[1].dtype));
    return DDP_OK;
}

/* Returns 1 if a later tie adds to the first use of this one. */
static int ddp__pipe_tie_continues(const ddp_pipeline *p, int tie) {
    const ddp_pipeline_tie *t = &p->desc.ties[tie];
    for (int k = tie + 1; k < p->desc.tie_count; k++)
        if (p->desc.ties[k].first_stage == t->first_stage && p->desc.ties[k].first_param == t->first_param)
            return 1;
    return 0;
}

/* Replaces both gradients of each tied parameter by their sum, first use + second use. All sums are computed
   first. Then the uses that still have a partial sum receive the final one. A parameter with the uses a, b
   and c, and the ties (a, b) and (a, c), b and c on other ranks than a:

                         a        b      c
       sum of (a, b)     a+b      a+b    c          all-reduce
       sum of (a, c)     a+b+c    a+b    a+b+c      all-reduce
       copy to b         a+b+c    a+b+c  a+b+c      broadcast

   A sum over two ranks has the same bits in either order. Of two uses on one rank, only the first has the
   sum after the first loop. */
static ddp_result ddp__pipe_add_ties(ddp_pipeline *p) {
    ddp__pipe_tie_grads t;
    for (int tie = 0; tie < p->desc.tie_count; tie++) {
        ddp_group *pair_group = p->tie_groups[tie];
        DDP_TRY(ddp__pipe_get_tie_grads(p, tie, &t));
        if (pair_group) {
            const int own = t.rank[0] != p->rank;
            DDP_TRY(ddp_all_reduce(pair_group, t.grad[own].data, t.grad[own].data, t.count[own],
                                   t.grad[own].dtype, DDP_OP_SUM, NULL));
        } else if (t.rank[0] == p->rank)
            p->device->add(t.grad[0].data, t.grad[0].data, t.grad[1].data, t.count[0], t.grad[0].dtype);
    }
    for (int tie = 0; tie < p->desc.tie_count; tie++) {
        ddp_group *pair_group = p->tie_groups[tie];
        if (pair_group && !ddp__pipe_tie_continues(p, tie)) continue;
        DDP_TRY(ddp__pipe_get_tie_grads(p, tie, &t));
        if (pair_group) {
            const int own = t.rank[0] != p->rank;
            DDP_TRY(ddp_broadcast(pair_group, t.grad[own].data, t.count[own], t.grad[own].dtype,
                                  t.rank[0] > t.rank[1], NULL));
        } else if (t.rank[0] == p->rank)
            p->device->copy(t.grad[1].data, t.grad[0].data, t.count[1] * ddp_dtype_size(t.grad[1].dtype));
    }
    return DDP_OK;
}

/* --- weight versions of PipeDream and PipeDream-2BW: copies of older weights, which callbacks use --- */

/* Returns 1 if a micro-batch in flight uses this version. */
static int ddp__pipe_version_needed(const ddp_pipeline *p, const ddp__pipe_versions *v, uint64_t version) {
    for (int i = 0; i < p->microbatch_count; i++)
        if (v->used_version[i] == version + 1) return 1;
    return 0;
}

/* Returns the version that an action uses. PipeDream: the newest one at the micro-batch's forward. 2BW: the
   version before the one that its update starts from, so that all micro-batches of an update use the same. */
static uint64_t ddp__pipe_version(const ddp_pipeline *p, ddp__pipe_versions *v, const ddp_action *a) {
    if (p->run.evaluating) return v->newest;
    if (p->schedule->kind == DDP_SCHEDULE_PIPEDREAM_2BW) {
        uint64_t group = p->run.measures[0].stats.steps * (uint64_t)(p->microbatch_count / p->interval)
                         + (uint64_t)(a->microbatch / p->interval);
        return group ? group - 1 : 0;
    }
    if (p->interval == p->microbatch_count) return v->newest;
    if (a->kind == DDP_ACTION_FORWARD) v->used_version[a->microbatch] = v->newest + 1;
    return v->used_version[a->microbatch] - 1;
}

/* Called before an update. Frees the copies that no micro-batch uses. Returns the copy that receives the
   newest values, or -1 if no micro-batch uses them. */
static int ddp__pipe_save_version(const ddp_pipeline *p, ddp__pipe_versions *v) {
    int two_versions = p->schedule->kind == DDP_SCHEDULE_PIPEDREAM_2BW, k = 0;
    for (int i = 0; i < v->capacity; i++)
        if (v->table[i].used && (two_versions || !ddp__pipe_version_needed(p, v, v->table[i].version)))
            v->table[i].used = 0;
    if (!two_versions && !ddp__pipe_version_needed(p, v, v->newest)) return -1;
    while (v->table[k].used) k++;
    v->table[k].used = 1;
    v->table[k].version = v->newest;
    if (k >= v->count) v->count = k + 1;
    return k;
}

static void ddp__pipe_copy_values(const ddp_pipeline *p, const ddp__pipe_stage *s, int copy) {
    unsigned char *to = s->versions.memory + (size_t)copy * s->versions.bytes;
    for (int i = 0; i < s->desc.param_count; i++) {
        const ddp_tensor *value = &s->desc.params[i]->value;
        if (ddp_tensor_bytes(value)) p->device->copy(to, value->data, ddp_tensor_bytes(value));
        to += ddp_round_up(ddp_tensor_bytes(value), 64);
    }
}

/* Points the parameters to the values of an older version; restore = 1 undoes this. */
static void ddp__pipe_swap_values(const ddp__pipe_stage *s, uint64_t version, int restore) {
    const ddp__pipe_versions *v = &s->versions;
    int k = 0;
    unsigned char *from;
    if (version == v->newest) return;
    while (k < v->count && !(v->table[k].used && v->table[k].version == version)) k++;
    if (k == v->count) return;
    from = v->memory + (size_t)k * v->bytes;
    for (int i = 0; i < s->desc.param_count; i++) {
        ddp_tensor *value = &s->desc.params[i]->value;
        if (!restore) v->values[i] = value->data;
        value->data = restore ? v->values[i] : from;
        from += ddp_round_up(ddp_tensor_bytes(value), 64);
    }
}

//== runner: links and queues ==================================================== >>impl-pipeline-links
/* Initializes the links and stages of this rank: kind and peer of each pool of slots, the number of OUT
   slots, and the queues that define the order of messages. The first part of ddp_pipeline_create; it
   allocates no tensors.

     stage 0 on rank 0          stage 1 on rank 1          stage 2 on rank 1
        forward:   OUT slots  ----->  IN slots     LOCAL slots
        backward:  IN slots   <-----  OUT slots    LOCAL slots */

/* Returns the largest number of micro-batches that a stage of any rank has in flight. */
static int ddp__pipe_max_in_flight(const ddp_schedule *s, int stage) {
    int rank = s->stage_rank[stage], in_flight = 0, peak = 0;
    for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
        if (s->actions[i].stage != stage) continue;
        in_flight += s->actions[i].kind == DDP_ACTION_FORWARD;
        in_flight -= ddp__action_ends(s->actions[i].kind);
        if (in_flight > peak) peak = in_flight;
    }
    return peak;
}

/* Returns the number of OUT slots of a link. It is large enough that the sender never waits for a slot which
   the schedule has released.

   Gradients (backward 1): a slot in use belongs to a micro-batch that has begun its F on stage `from`. The
   end of the micro-batch there releases the slot, and this rank has not yet learned of that end. At the
   latest action of `from` that this rank has learned of, all such micro-batches are in flight. So the number
   of slots is the largest number in flight on `from`.

   Values (backward 0): such a micro-batch is in flight on `from`, or has ended there. In the second case its
   I on stage `to` is done. If the schedule has separate I and W, its W on `to` is still pending. It is then
   in flight at the latest action of `to` that this rank has learned of, so the number in flight on `to` is
   added. This is only necessary in place. If tensors are copied, the slots of the receiver wait for that W.

   An offset can come back after messages of that rank for which no receive is posted yet
   (messages_before). This does not happen if a gradient arrives from there later, since its receive was
   posted after all of them (receive_follows). With messages_before and without receive_follows, this rank
   learns of `to` only through other ranks. Each micro-batch then has a slot, and this rank never waits. */
static int ddp__pipe_out_slots(const ddp_pipeline *p, const ddp_pipeline_edge *link, int backward) {
    const ddp_schedule *s = p->schedule;
    int slots = ddp__pipe_max_in_flight(s, link->from);
    int rank = s->stage_rank[link->to];
    int separate_w = 0;
    int receive_follows = 0;
    int messages_before = 0;
    for (int i = s->first[rank]; i < s->first[rank + 1]; i++)
        separate_w |= s->actions[i].stage == link->to && s->actions[i].kind == DDP_ACTION_WEIGHT_GRAD;
    for (int i = 0; i < p->messages.link_count && p->messages.in_place && !backward; i++) {
        const ddp_pipeline_edge *e = &p->messages.links[i].edge;
        int from = s->stage_rank[e->from];
        int to = e->to < p->stage_count ? s->stage_rank[e->to] : -1;
        int returns_gradient = from == p->rank && to == rank && !e->no_grad;
        receive_follows |= returns_gradient && e->from >= link->from && e->to <= link->to;
        messages_before |= returns_gradient || (from == rank && to == p->rank);
    }
    if (messages_before && !receive_follows) return p->microbatch_count;
    if (p->messages.in_place && !backward && separate_w) slots += ddp__pipe_max_in_flight(s, link->to);
    return ddp__pipe_min(slots, p->microbatch_count);
}

/* Initializes a pool of tensors with `bytes` each. ddp__pipe_count_list counts its slots later. */
static ddp_result ddp__pipe_pool_init(ddp_pipeline *p, ddp__pipe_pool *pool, int kind, size_t bytes) {
    pool->kind = kind;
    pool->stride = ddp_round_up(bytes, 64);
    DDP__PIPE_NEW(p, pool->slot, int, p->microbatch_count);
    for (int i = 0; i < p->microbatch_count; i++) pool->slot[i] = -1;
    if (kind != DDP__PIPE_LOCAL) DDP__PIPE_NEW(p, pool->order, int, p->microbatch_count);
    return DDP_OK;
}

/* Initializes the pools of all edges on this rank. The loss is on the rank of the last stage. */
static ddp_result ddp__pipe_init_links(ddp_pipeline *p) {
    const int *rank_of = p->schedule->stage_rank;
    for (int i = 0; i < 2 * p->messages.link_count; i++) {
        const ddp_pipeline_edge *e = &p->messages.links[i / 2].edge;
        int backward = i % 2;
        int from = rank_of[e->from];
        int to = e->to < p->stage_count ? rank_of[e->to] : from;
        int producer = backward ? to : from;
        int consumer = backward ? from : to;
        int kind = producer == p->rank ? DDP__PIPE_OUT : DDP__PIPE_IN;
        ddp__pipe_pool *pool = &p->messages.links[i / 2].pools[backward];
        pool->tensor = e->tensor;
        pool->tensor.data = NULL;
        if (backward) pool->tensor.dtype = e->grad_dtype;
        if ((backward && e->no_grad) || (producer != p->rank && consumer != p->rank)) continue;
        pool->peer = producer == p->rank ? consumer : producer;
        pool->tag = i;
        if (producer == consumer) kind = DDP__PIPE_LOCAL;
        if (kind == DDP__PIPE_OUT) pool->count = ddp__pipe_out_slots(p, e, backward);
        DDP_TRY(ddp__pipe_pool_init(p, pool, kind, ddp_tensor_bytes(&pool->tensor)));
    }
    return DDP_OK;
}

/* Initializes a stage of this rank: its links, and all tables of a size known before the count. */
static ddp_result ddp__pipe_stage_init(ddp_pipeline *p, ddp__pipe_stage *s) {
    ddp__pipe_sums *sums = &s->sums;
    ddp__pipe_versions *versions = &s->versions;
    for (int side = 0; side < 2; side++) {
        DDP__PIPE_NEW(p, s->links[side], ddp__pipe_link *, p->messages.link_count);
        for (int i = 0; i < p->messages.link_count; i++)
            if ((side ? p->messages.links[i].edge.from : p->messages.links[i].edge.to) == s->stage_index)
                s->links[side][s->link_count[side]++] = &p->messages.links[i];
    }
    if (s->desc.saved_bytes) DDP_TRY(ddp__pipe_pool_init(p, &s->saved, DDP__PIPE_LOCAL, s->desc.saved_bytes));
    sums->capacity = p->interval / 2 + 2;
    DDP__PIPE_NEW(p, sums->table, ddp__pipe_sum, sums->capacity);
    for (int i = 0; i < sums->capacity; i++) sums->table[i].level = DDP__PIPE_FREE;
    DDP__PIPE_NEW(p, versions->used_version, uint64_t, p->microbatch_count);
    if (p->interval < p->microbatch_count || p->schedule->kind == DDP_SCHEDULE_PIPEDREAM_2BW)
        versions->capacity = ddp__pipe_max_in_flight(p->schedule, s->stage_index) + 1;
    DDP__PIPE_NEW(p, versions->table, ddp__pipe_version_copy, versions->capacity);
    DDP__PIPE_NEW(p, versions->values, void *, s->desc.param_count);
    DDP__PIPE_NEW(p, sums->gradients, ddp__pipe_grad_place, s->desc.param_count);
    for (int i = 0; i < s->desc.param_count; i++) {
        ddp__pipe_grad_place *g = &sums->gradients[i];
        ddp_tensor grad = ddp_param_grad(s->desc.params[i]);
        g->dtype = grad.dtype;
        g->sum_dtype = ddp_sum_dtype(g->dtype);
        g->bytes = ddp_tensor_bytes(&grad);
        g->count = g->bytes / ddp_dtype_size(g->dtype);
        versions->bytes += ddp_round_up(ddp_tensor_bytes(&s->desc.params[i]->value), 64);
    }
    return DDP_OK;
}

static int ddp__pipe_message_compare(const void *left, const void *right) {
    const ddp__pipe_message *l = (const ddp__pipe_message *)left;
    const ddp__pipe_message *r = (const ddp__pipe_message *)right;
    if (l->at != r->at) return l->at < r->at ? -1 : 1;
    if (l->source != r->source) return l->source < r->source ? -1 : 1;
    return l->link < r->link ? -1 : l->link > r->link;
}

/* Creates a queue with the messages that ranks `peer` to `last` send to this one: the outputs of each F, the
   input gradients of each I or B. They are in the order of the lists. With times, the queue also contains
   the messages that this rank sends, and all are sorted by time. */
static ddp_result ddp__pipe_queue_fill(ddp_pipeline *p, ddp__pipe_queue *queue, int peer, int last,
                                       const ddp_action_time *times) {
    const ddp_schedule *s = p->schedule;
    for (int pass = 0; pass < 2; pass++) { /* the first pass only counts */
        if (pass) DDP__PIPE_NEW(p, queue->messages, ddp__pipe_message, queue->count);
        queue->count = 0;
        for (int i = s->first[peer]; i < s->first[last + 1]; i++) {
            const ddp_action *a = &s->actions[i];
            int backward = a->kind != DDP_ACTION_FORWARD;
            if (!ddp__action_computes(a->kind) || a->kind == DDP_ACTION_WEIGHT_GRAD) continue;
            for (int k = 0; k < p->messages.link_count; k++) {
                const ddp__pipe_link *link = &p->messages.links[k];
                ddp__pipe_message message = {k, backward, a->microbatch, i, times ? times[i].end : 0};
                int kind = link->pools[backward].kind;
                if ((backward ? link->edge.to : link->edge.from) != a->stage
                    || !(kind == DDP__PIPE_IN || (times && kind == DDP__PIPE_OUT)))
                    continue;
                if (pass) queue->messages[queue->count] = message;
                queue->count++;
            }
        }
    }
    if (times)
        qsort(queue->messages, (size_t)queue->count, sizeof *queue->messages, ddp__pipe_message_compare);
    for (int i = 0; i < queue->count; i++) {
        const ddp__pipe_message *message = &queue->messages[i];
        p->messages.links[message->link].pools[message->backward].order[message->microbatch] = i;
    }
    return DDP_OK;
}

/* Creates the queues. With single_queue, all messages of a rank run one after the other: each waits for
   those before it, on this rank and on its peer. They are issued in the order of
   ddp__schedule_lower_comm: by the time at which unit costs make them. This order has no deadlock: take
   the first of all remaining computations, by begin, and messages. Everything that it needs comes
   earlier. A receive is issued right after the sends before it, possibly before its time. It then only
   precedes computations that make none of these sends. */
static ddp_result ddp__pipe_make_queues(ddp_pipeline *p) {
    ddp__schedule_graph play;
    ddp_result result;
    DDP__PIPE_NEW(p, p->messages.queues, ddp__pipe_queue, p->world_size);
    for (int peer = 0; peer < p->world_size && !p->messages.single_queue; peer++)
        if (peer != p->rank) DDP_TRY(ddp__pipe_queue_fill(p, &p->messages.queues[peer], peer, peer, NULL));
    if (!p->messages.single_queue) return DDP_OK;
    DDP_TRY(ddp__graph_open(&play, p->schedule, NULL, DDP__TIMES_PAIRED, "ddp_pipeline_create"));
    result = ddp__pipe_queue_fill(p, &p->messages.queues[0], 0, p->world_size - 1, play.times);
    ddp__graph_close(&play);
    return result;
}

//== runner: memory ============================================================= >>impl-pipeline-memory
/* Counts and allocates the memory of a step. ddp__pipe_count_list walks through this rank's list once,
   without callbacks and messages, and counts slots, partial sums and weight copies in use.
   ddp__pipe_alloc then allocates that many. */

/* Counts a slot as acquired (1) or released (-1). The number of OUT slots is already known. */
static void ddp__pipe_count_slot(ddp__pipe_pool *pool, int change) {
    if (pool->kind == DDP__PIPE_NONE || pool->kind == DDP__PIPE_OUT) return;
    pool->used += change;
    if (pool->used > pool->count) pool->count = pool->used;
}

/* Counts the receives that are posted before the message of this micro-batch is used or sent. */
static void ddp__pipe_count_receives(ddp__pipe_messages *m, const ddp__pipe_pool *pool, int microbatch) {
    ddp__pipe_queue *queue = &m->queues[m->single_queue ? 0 : pool->peer];
    for (; queue->next <= pool->order[microbatch]; queue->next++) {
        const ddp__pipe_message *message = &queue->messages[queue->next];
        ddp__pipe_count_slot(&m->links[message->link].pools[message->backward], 1);
    }
}

/* Counts what an action acquires and releases, in the same order as ddp__pipe_action. */
static void ddp__pipe_count_action(ddp_pipeline *p, const ddp_action *a) {
    ddp__pipe_stage *s = &p->stages[a->stage];
    ddp__pipe_versions *versions = &s->versions;
    ddp__pipe_sum_step steps[DDP__PIPE_MAX_SUM_STEPS];
    ddp__pipe_pool *pool;
    int i = a->microbatch;
    int backward = a->kind != DDP_ACTION_FORWARD;
    int produces = a->kind != DDP_ACTION_WEIGHT_GRAD;
    int ends = ddp__action_ends(a->kind);
    int update = a->kind == DDP_ACTION_REDUCE_GRAD;
    int loss = !backward && ddp__pipe_is_last_stage(p, s);
    if (ddp__action_computes(a->kind)) {
        for (int k = 0; (pool = ddp__pipe_stage_pool(s, backward, backward, k)) != NULL; k++)
            if (pool->kind == DDP__PIPE_IN) ddp__pipe_count_receives(&p->messages, pool, i);
        for (int k = 0; produces && (pool = ddp__pipe_stage_pool(s, !backward, backward, k)) != NULL; k++)
            ddp__pipe_count_slot(pool, 1);
        for (int k = 0; loss && (pool = ddp__pipe_stage_pool(s, 1, 1, k)) != NULL; k++)
            ddp__pipe_count_slot(pool, 1);
        if (!backward || (s->desc.recompute && produces)) ddp__pipe_count_slot(&s->saved, 1);
        ddp__pipe_version(p, versions, a);
        for (int k = 0; ends && (pool = ddp__pipe_stage_pool(s, 0, 0, k)) != NULL; k++)
            ddp__pipe_count_slot(pool, -1);
        for (int k = 0; ends && (pool = ddp__pipe_stage_pool(s, 1, 1, k)) != NULL; k++)
            ddp__pipe_count_slot(pool, -1);
        for (int k = 0; produces && (pool = ddp__pipe_stage_pool(s, !backward, backward, k)) != NULL; k++)
            if (p->messages.single_queue && pool->kind == DDP__PIPE_OUT)
                ddp__pipe_count_receives(&p->messages, pool, i);
        for (int k = 0; loss && (pool = ddp__pipe_stage_pool(s, 1, 0, k)) != NULL; k++)
            ddp__pipe_count_slot(pool, -1);
        if (ends || (!backward && s->desc.recompute)) ddp__pipe_count_slot(&s->saved, -1);
    }
    if (ends) {
        ddp__pipe_plan_sum(&s->sums, p->interval, i, steps);
        versions->used_version[i] = 0;
        update = s->sums.added == 0 && !ddp__pipe_stage_has(s, DDP_ACTION_REDUCE_GRAD);
    }
    if (!update || !versions->capacity) return;
    ddp__pipe_save_version(p, versions);
    versions->newest++;
}

static void ddp__pipe_count_list(ddp_pipeline *p) {
    for (int i = 0; i < p->list_count; i++)
        if (p->list[i].stage >= 0) ddp__pipe_count_action(p, &p->list[i]);
    /* no step has run yet */
    for (ddp__pipe_stage *s = ddp__pipe_next_stage(p, NULL); s; s = ddp__pipe_next_stage(p, s)) {
        s->versions.newest = 0;
        for (int k = 0; k < s->versions.capacity; k++) s->versions.table[k].used = 0;
    }
}

/* Allocates the slots of a pool. OUT slots are counted in *shared, the bytes of group memory to allocate. */
static ddp_result ddp__pipe_pool_alloc(ddp_pipeline *p, ddp__pipe_pool *pool, size_t *shared) {
    int returns, sends_offsets = p->messages.in_place && pool->kind != DDP__PIPE_LOCAL;
    size_t bytes;
    if (!pool->kind) return DDP_OK;
    if (pool->kind == DDP__PIPE_IN)
        pool->count = ddp__pipe_min(pool->count + p->desc.prefetch, p->microbatch_count);
    returns = pool->kind == DDP__PIPE_IN ? p->microbatch_count : pool->count;
    if (pool->stride > (SIZE_MAX / 2 - *shared) / ((size_t)pool->count + 1))
        return ddp_fail(DDP_ERR_NO_MEMORY,
                        "ddp_pipeline_create: %d micro-batches of %zu bytes do not fit in memory",
                        pool->count, pool->stride);
    if (pool->kind != DDP__PIPE_LOCAL) p->messages.works += pool->count + (sends_offsets ? returns : 0);
    DDP__PIPE_NEW(p, pool->works, ddp_work, pool->count);
    DDP__PIPE_NEW(p, pool->free_slots, int, pool->count);
    pool->free_count = pool->count;
    for (int i = 0; i < pool->count; i++) pool->free_slots[i] = pool->count - 1 - i;
    if (sends_offsets) {
        DDP__PIPE_NEW(p, pool->offsets.slot_offsets, uint64_t, pool->count);
        DDP__PIPE_NEW(p, pool->offsets.returned, uint64_t, returns);
        DDP__PIPE_NEW(p, pool->offsets.return_works, ddp_work, returns);
        if (pool->kind == DDP__PIPE_IN) return DDP_OK;
    }
    bytes = pool->stride * (size_t)(pool->buffer_count ? pool->buffer_count : pool->count);
    p->run.current->stats.activation_bytes += bytes;
    if (pool->kind != DDP__PIPE_OUT) return ddp__pipe_alloc_device(p, bytes, (void **)&pool->memory);
    pool->offset = *shared;
    *shared += bytes;
    for (int i = 0; i < pool->count && sends_offsets; i++)
        pool->offsets.slot_offsets[i] = pool->offset + (size_t)i * pool->stride;
    return DDP_OK;
}

/* The places of a stage's gradients in a buffer of sums. */
static ddp_result ddp__pipe_place_sums(ddp_pipeline *p, ddp__pipe_stage *s) {
    ddp__pipe_grad_place *gradients = s->sums.gradients;
    ddp_grad_place *places;
    DDP__PIPE_NEW(p, places, ddp_grad_place, s->desc.param_count);
    for (int i = 0; i < s->desc.param_count; i++) {
        places[i].address = (uintptr_t)s->desc.params[i]->grad.data;
        places[i].index = i;
        places[i].dtype = gradients[i].dtype;
        places[i].count = gradients[i].count;
    }
    s->sums.bytes = ddp_place_sums(places, s->desc.param_count);
    for (int i = 0; i < s->desc.param_count; i++) gradients[places[i].index].at = places[i].sum_at;
    return DDP_OK;
}

/* Allocates the pinned memory and the events of offload_saved, if the stage needs it. */
static ddp_result ddp__pipe_offload_alloc(ddp_pipeline *p, ddp__pipe_stage *s) {
    ddp__pipe_offload *o = &s->offload;
    size_t bytes = s->saved.stride * (size_t)s->saved.count;
    void *slots;
    if (!s->desc.offload_saved || s->saved.count <= 2 || p->device == ddp_device_cpu()) return DDP_OK;
    s->saved.buffer_count = 2;
    for (int k = 0; k < 2 && p->device->use_stream; k++) {
        DDP_TRY(p->device->event_create(p->group, &o->copied[k]));
        DDP_TRY(p->device->event_create(p->group, &o->used[k]));
    }
    if (p->device->alloc_pinned)
        DDP_TRY(p->device->alloc_pinned(p->group, bytes, &slots));
    else
        slots = ddp__pipe_alloc_host(p, bytes, 1);
    o->slots = (unsigned char *)slots;
    p->run.current->stats.offloaded_bytes += bytes;
    return slots ? DDP_OK : DDP_ERR_NO_MEMORY;
}

/* Frees them, when the device uses them no more: at the latest at the time `until`. */
static void ddp__pipe_offload_free(const ddp_pipeline *p, ddp__pipe_offload *o, double until) {
    for (int k = 0; k < 2; k++) {
        (void)ddp_event_wait_host(p->group, o->copied[k], until);
        if (o->copied[k]) p->device->event_destroy(p->group, o->copied[k]);
        if (o->used[k]) p->device->event_destroy(p->group, o->used[k]);
    }
    if (o->slots && p->device->alloc_pinned) p->device->free_pinned(o->slots);
}

/* Allocates memory of a stage: saved memory, gradients, partial sums, weight copies, scratch outputs. */
static ddp_result ddp__pipe_stage_alloc(ddp_pipeline *p, ddp__pipe_stage *s) {
    ddp__pipe_sums *sums = &s->sums;
    size_t sum_bytes, unused = 0;
    size_t version_bytes = (size_t)s->versions.count * s->versions.bytes;
    DDP_TRY(ddp__pipe_offload_alloc(p, s));
    DDP_TRY(ddp__pipe_pool_alloc(p, &s->saved, &unused));
    for (int i = 0; i < s->desc.param_count; i++) {
        ddp__pipe_grad_place *g = &s->sums.gradients[i];
        ddp_param *param = s->desc.params[i];
        ddp_tensor grad = ddp_param_grad(param);
        if (s->sums.count && g->sum_dtype != g->dtype && 2 * g->bytes > p->f32_grad_bytes)
            p->f32_grad_bytes = 2 * g->bytes;
        if (param->grad.data || s->desc.unshard) continue;
        DDP_TRY(ddp__pipe_alloc_device(p, g->bytes, &grad.data));
        param->grad = grad;
        g->allocated_here = 1;
    }
    DDP_TRY(ddp__pipe_place_sums(p, s));
    sum_bytes = (size_t)sums->count * sums->bytes;
    if (sum_bytes) DDP_TRY(ddp__pipe_alloc_device(p, sum_bytes, (void **)&sums->memory));
    /* A reducer reads these pointers before the first sum is final. */
    for (int i = 0; i < s->desc.param_count && sum_bytes && s->desc.reduce_grad; i++) {
        const ddp__pipe_grad_place *g = &sums->gradients[i];
        if (g->bytes && g->sum_dtype != g->dtype) s->desc.params[i]->sum.data = sums->memory + g->at;
    }
    if (version_bytes) DDP_TRY(ddp__pipe_alloc_device(p, version_bytes, (void **)&s->versions.memory));
    p->run.current->stats.accumulation_bytes += sum_bytes;
    p->run.current->stats.version_bytes += version_bytes;
    for (int i = 0; i < s->link_count[1] && s->desc.recompute; i++) {
        ddp__pipe_link *link = s->links[1][i];
        DDP_TRY(ddp__pipe_alloc_device(p, link->pools[0].stride, (void **)&link->scratch));
        p->run.current->stats.activation_bytes += link->pools[0].stride;
    }
    return DDP_OK;
}

/* Allocates everything except the shared memory, and stores its size in *shared. */
static ddp_result ddp__pipe_alloc(ddp_pipeline *p, size_t *shared) {
    DDP_TRY(ddp__pipe_make_queues(p));
    ddp__pipe_count_list(p);
    for (int i = 0; i < 4; i++) DDP__PIPE_NEW(p, p->tensors[i], ddp_tensor, p->messages.link_count);
    p->run.exchange_count = (size_t)p->microbatch_count + 3 * (size_t)p->world_size
                            + 4 * (size_t)p->stage_count;
    for (int k = 0; k < 2; k++) {
        ddp__pipe_measures *m = &p->run.measures[k];
        DDP__PIPE_NEW(p, m->losses, double, p->run.exchange_count);
        m->starts = m->losses + p->microbatch_count;
        m->spans = m->starts + p->world_size;
        m->computes = m->spans + p->world_size;
        m->seconds = m->computes + p->world_size;
        DDP__PIPE_NEW(p, m->times, ddp_action_time, p->schedule->count);
    }
    p->run.current = &p->run.measures[0];
    for (int i = 0; i < 2 * p->messages.link_count; i++)
        DDP_TRY(ddp__pipe_pool_alloc(p, &p->messages.links[i / 2].pools[i % 2], shared));
    for (ddp__pipe_stage *s = ddp__pipe_next_stage(p, NULL); s; s = ddp__pipe_next_stage(p, s))
        DDP_TRY(ddp__pipe_stage_alloc(p, s));
    if (p->f32_grad_bytes) DDP_TRY(ddp__pipe_alloc_device(p, p->f32_grad_bytes, (void **)&p->f32_grad));
    p->run.current->stats.accumulation_bytes += p->f32_grad_bytes;
    DDP__PIPE_NEW(p, p->tie_groups, ddp_group *, p->desc.tie_count);
    return ddp__pipe_alloc_device(p, sizeof *p->squares, (void **)&p->squares);
}

//== runner: slots and messages =============================================== >>impl-pipeline-messages
/* Sends and receives the tensors of a step. Receives are posted ahead of their use, in queue order, while
   slots are free. In place, only offsets are sent. Called by the next sections around each action:

     before an action   wait for the IN slots that it reads; acquire OUT and LOCAL slots for its results
     after it           free the slots that it read last; send the OUT slots; post further receives

     IN slot     free -- receive posted --> in flight -- wait --> readable -- last reader --> free
     OUT slot    free -- acquire --> written -- send --> in flight -- send done, or offset back --> free */

static void ddp__pipe_slot_alloc(ddp__pipe_pool *pool, int microbatch) {
    if (pool->kind) pool->slot[microbatch] = pool->free_slots[--pool->free_count];
}

static int ddp__pipe_return_tag(const ddp__pipe_messages *m, const ddp__pipe_pool *pool) {
    return 2 * m->link_count + pool->tag;
}

/* Frees the slot of a tensor that this rank no longer reads. In place, returns its offset to the sender. This
   does not wait for the offset to arrive; it waits at most for the offset of an earlier step. */
static ddp_result ddp__pipe_slot_free(const ddp__pipe_messages *m, ddp__pipe_pool *pool, int microbatch) {
    ddp__pipe_offsets *offsets = &pool->offsets;
    int slot;
    if (!pool->kind) return DDP_OK;
    slot = pool->free_slots[pool->free_count++] = pool->slot[microbatch];
    pool->slot[microbatch] = -1;
    if (pool->kind != DDP__PIPE_IN || !m->in_place) return DDP_OK;
    DDP_TRY(ddp_wait(m->group, &offsets->return_works[microbatch]));
    offsets->returned[microbatch] = offsets->slot_offsets[slot];
    return ddp_send(m->group, &offsets->returned[microbatch], 1, DDP_U64, pool->peer,
                    ddp__pipe_return_tag(m, pool), &offsets->return_works[microbatch]);
}

static void *ddp__pipe_data(const ddp__pipe_pool *pool, int microbatch) {
    int slot = pool->kind ? pool->slot[microbatch] : -1;
    if (slot < 0) return NULL;
    return pool->memory
           + (pool->kind == DDP__PIPE_IN && pool->offsets.slot_offsets
                  ? (size_t)pool->offsets.slot_offsets[slot]
                  : (size_t)slot * pool->stride);
}

/* Sends or receives the message of a micro-batch: the tensor in its slot, or the offset. */
static ddp_result ddp__pipe_post_message(ddp__pipe_messages *m, ddp__pipe_pool *pool, int microbatch) {
    int slot = pool->slot[microbatch];
    void *data = m->in_place ? (void *)&pool->offsets.slot_offsets[slot]
                             : (void *)(pool->memory + (size_t)slot * pool->stride);
    size_t count = m->in_place ? 1 : (size_t)ddp_tensor_count(&pool->tensor);
    ddp_dtype dtype = m->in_place ? DDP_U64 : pool->tensor.dtype;
    if (pool->kind == DDP__PIPE_OUT)
        return ddp_send(m->group, data, count, dtype, pool->peer, pool->tag, &pool->works[slot]);
    return ddp_recv(m->group, data, count, dtype, pool->peer, pool->tag, &pool->works[slot]);
}

/* Waits for the next offset that comes back, and frees its slot. */
static ddp_result ddp__pipe_reclaim_slot(ddp__pipe_messages *m, ddp__pipe_pool *pool) {
    int place = (int)(pool->offsets.returned_count++ % (uint64_t)pool->count);
    DDP_TRY(ddp_wait(m->group, &pool->offsets.return_works[place]));
    pool->free_slots[pool->free_count++] = (int)((pool->offsets.returned[place] - pool->offset)
                                                 / pool->stride);
    return DDP_OK;
}

/* Posts receives in queue order while slots are free, up to the next send. An evaluation skips gradients. */
static ddp_result ddp__pipe_post_receives(ddp__pipe_messages *m, ddp__pipe_queue *queue) {
    for (; queue->next < queue->count; queue->next++) {
        const ddp__pipe_message *message = &queue->messages[queue->next];
        ddp__pipe_pool *pool = &m->links[message->link].pools[message->backward];
        if (m->run->evaluating && message->backward) continue;
        if (pool->kind == DDP__PIPE_OUT || !pool->free_count) break;
        ddp__pipe_slot_alloc(pool, message->microbatch);
        DDP_TRY(ddp__pipe_post_message(m, pool, message->microbatch));
    }
    return DDP_OK;
}

static ddp_result ddp__pipe_post_all_receives(ddp__pipe_messages *m) {
    for (int peer = 0; peer < m->queue_count; peer++) DDP_TRY(ddp__pipe_post_receives(m, &m->queues[peer]));
    return DDP_OK;
}

/* Waits until the tensor of a micro-batch has arrived. */
static ddp_result ddp__pipe_wait_tensor(ddp__pipe_messages *m, ddp__pipe_pool *pool, int microbatch) {
    double begin = ddp_now();
    ddp_result result;
    if (pool->kind != DDP__PIPE_IN) return DDP_OK;
    if (pool->slot[microbatch] < 0) DDP_TRY(ddp__pipe_post_all_receives(m));
    if (pool->slot[microbatch] < 0)
        return ddp_fail(DDP_ERR_INVALID, "no free buffer for a message from rank %d", pool->peer);
    result = ddp_wait(m->group, &pool->works[pool->slot[microbatch]]);
    m->run->current->stats.wait_seconds += ddp_now() - begin;
    return result;
}

/* Acquires a slot to write to. In a step this does not block: the last send of an OUT slot is done, since a
   later micro-batch has already returned. In place, a slot has been returned. In an evaluation a forward
   waits for no gradient, so it can run ahead of the receivers and wait here. */
static ddp_result ddp__pipe_slot_acquire(ddp__pipe_messages *m, ddp__pipe_pool *pool, int microbatch) {
    if (pool->kind == DDP__PIPE_OUT && m->in_place && !pool->free_count)
        DDP_TRY(ddp__pipe_reclaim_slot(m, pool));
    if (pool->kind == DDP__PIPE_LOCAL || m->in_place)
        ddp__pipe_slot_alloc(pool, microbatch);
    else if (pool->kind == DDP__PIPE_OUT)
        pool->slot[microbatch] = (int)(pool->sent % (uint64_t)pool->count);
    return pool->kind == DDP__PIPE_OUT ? ddp_wait(m->group, &pool->works[pool->slot[microbatch]]) : DDP_OK;
}

static ddp_result ddp__pipe_send(ddp__pipe_messages *m, ddp__pipe_pool *pool, int microbatch) {
    if (pool->kind == DDP__PIPE_LOCAL)
        m->run->current->stats.bytes_handed_over += ddp_tensor_bytes(&pool->tensor);
    if (pool->kind != DDP__PIPE_OUT) return DDP_OK;
    if (m->single_queue) { /* post all receives before this send in the queue */
        DDP_TRY(ddp__pipe_post_receives(m, &m->queues[0]));
        if (m->queues[0].next++ != pool->order[microbatch])
            return ddp_fail(DDP_ERR_INVALID, "no free buffer for a message before the one to rank %d",
                            pool->peer);
    }
    m->run->current->stats.bytes_sent += ddp_tensor_bytes(&pool->tensor);
    if (m->in_place) { /* post the receive for the returned offset before sending it */
        uint64_t place = pool->sent % (uint64_t)pool->count;
        DDP_TRY(ddp_recv(m->group, &pool->offsets.returned[place], 1, DDP_U64, pool->peer,
                         ddp__pipe_return_tag(m, pool), &pool->offsets.return_works[place]));
    }
    pool->sent++;
    return ddp__pipe_post_message(m, pool, microbatch);
}

/* Waits for all messages in flight. wait_returns = 1, used after the last step or a failure: also waits for
   returned offsets, since peers read this rank's slots until the end of their step. Between steps this is not
   necessary: a step ends with a collective. */
static ddp_result ddp__pipe_wait_all(ddp__pipe_messages *m, int wait_returns) {
    ddp_saved_error first = DDP_ZERO;
    for (int i = 0; i < 2 * m->link_count; i++) {
        ddp__pipe_pool *pool = &m->links[i / 2].pools[i % 2];
        ddp__pipe_offsets *offsets = &pool->offsets;
        for (int k = 0; k < pool->count; k++) ddp_error_save(&first, ddp_wait(m->group, &pool->works[k]));
        if (!wait_returns || !m->in_place) continue;
        for (int k = 0; k < m->microbatch_count && pool->kind == DDP__PIPE_IN; k++)
            ddp_error_save(&first, ddp_wait(m->group, &offsets->return_works[k]));
        while (offsets->returned_count < pool->sent) ddp_error_save(&first, ddp__pipe_reclaim_slot(m, pool));
    }
    return ddp_error_restore(&first);
}

//== runner: offload of saved memory ============================================ >>impl-pipeline-offload
/* offload_saved: copies saved memory between the two device buffers of a stage and its slots in host memory.
   ddp__pipe_action calls ddp__pipe_offload_begin before the callbacks of an action, and ddp__pipe_offload_end
   after them. */

/* The stage's next action with a callback, after `position` of this rank's list. NULL = none, or an
   evaluation, which keeps nothing. */
static const ddp_action *ddp__pipe_next_action(const ddp_pipeline *p, int stage, int position) {
    for (int i = position + 1; i < p->list_count && !p->run.evaluating; i++)
        if (p->list[i].stage == stage && ddp__action_computes(p->list[i].kind)) return &p->list[i];
    return NULL;
}

static unsigned char *ddp__pipe_saved_data(const ddp__pipe_stage *s, int microbatch) {
    return s->offload.slots ? s->saved.memory + (size_t)s->offload.current * s->saved.stride
                            : (unsigned char *)ddp__pipe_data(&s->saved, microbatch);
}

/* Copies a buffer to the slot of its micro-batch, or back, on the copy stream and after its last use. */
static ddp_result ddp__pipe_offload_copy(ddp_pipeline *p, ddp__pipe_stage *s, int k, int fetches) {
    const ddp_device *d = p->device;
    ddp__pipe_offload *o = &s->offload;
    unsigned char *buffer = s->saved.memory + (size_t)k * s->saved.stride;
    unsigned char *slot = o->slots + (size_t)s->saved.slot[o->microbatch[k]] * s->saved.stride;
    void *dst = slot, *src = buffer;
    if (fetches) {
        dst = buffer;
        src = slot;
    }
    if (!d->use_stream) {
        d->copy(dst, src, s->desc.saved_bytes);
        return DDP_OK;
    }
    ddp_result result = d->use_stream(p->group, DDP_STREAM_COPY);
    if (result == DDP_OK) result = d->event_wait(p->group, DDP_STREAM_COPY, o->used[k]);
    if (result == DDP_OK) (d->copy_async ? d->copy_async : d->copy)(dst, src, s->desc.saved_bytes);
    if (result == DDP_OK) result = d->event_record(p->group, DDP_STREAM_COPY, o->copied[k]);
    DDP_TRY(ddp_device_begin(p->group)); /* also on error: the compute stream is current again */
    return result;
}

/* The buffer that has the micro-batch. -1 = none. */
static int ddp__pipe_offload_find(const ddp__pipe_offload *o, int microbatch) {
    for (int k = 0; k < 2; k++)
        if (o->microbatch[k] == microbatch) return k;
    return -1;
}

/* Chooses the buffer of an action and fetches its content. Starts to fetch what the next action needs. */
static ddp_result ddp__pipe_offload_begin(ddp_pipeline *p, ddp__pipe_stage *s, int position) {
    ddp__pipe_offload *o = &s->offload;
    const ddp_action *a = &p->list[position], *next;
    if (!o->slots) return DDP_OK;
    next = ddp__pipe_next_action(p, a->stage, position);
    int k = ddp__pipe_offload_find(o, a->microbatch), other;
    if (k < 0) { /* not the buffer that the next action reads */
        k = !o->current;
        if (next && o->microbatch[k] == next->microbatch) k = !k;
        o->microbatch[k] = a->microbatch;
        if (a->kind != DDP_ACTION_FORWARD) DDP_TRY(ddp__pipe_offload_copy(p, s, k, 1));
    }
    o->current = k;
    other = !k;
    if (next && next->kind != DDP_ACTION_FORWARD && ddp__pipe_offload_find(o, next->microbatch) < 0) {
        o->microbatch[other] = next->microbatch;
        DDP_TRY(ddp__pipe_offload_copy(p, s, other, 1));
    }
    return o->copied[k] ? p->device->event_wait(p->group, DDP_STREAM_COMPUTE, o->copied[k]) : DDP_OK;
}

/* Copies the buffer of an action to host memory, if a later action needs it and the next one does not. */
static ddp_result ddp__pipe_offload_end(ddp_pipeline *p, ddp__pipe_stage *s, int position) {
    ddp__pipe_offload *o = &s->offload;
    const ddp_action *a = &p->list[position], *next;
    int k = o->current;
    if (!o->slots) return DDP_OK;
    if (o->used[k]) DDP_TRY(p->device->event_record(p->group, DDP_STREAM_COMPUTE, o->used[k]));
    next = ddp__pipe_next_action(p, a->stage, position);
    if (ddp__action_ends(a->kind) || !next) {
        o->microbatch[k] = -1;
        return DDP_OK;
    }
    return next->microbatch == a->microbatch ? DDP_OK : ddp__pipe_offload_copy(p, s, k, 0);
}

//== runner: callbacks ======================================================= >>impl-pipeline-callbacks
/* Calls the functions of the user: forward, input_grad, weight_grad, backward, loss and hooks, with the
   tensors of an action. A failure poisons the group, so that no rank waits for this one. Called by the
   next section. */

/* Ends the step on all ranks after a failure on this one, or of a message that it waited for: poisons the
   group unless that has failed already. The current error contains the reason. what: "the callback of ". */
static ddp_result ddp__pipe_fail(ddp_pipeline *p, ddp_result result, const char *what, const ddp_action *a,
                                 const char *how) {
    const char *who = ddp_public_call_name("ddp_pipeline_step"), *first_cause;
    char action_text[160] = "", text[512], line[512];
    if (result == DDP_OK) return DDP_OK;
    snprintf(line, sizeof line, "%s", ddp_last_error());
    if (a) /* "1B3 (stage 1, backward of micro-batch 3)" */
        snprintf(action_text, sizeof action_text, "%s (%s, %s of micro-batch %d)", ddp__action_label(a).text,
                 ddp__pipe_stage_label(p, a->stage).text, ddp__action_words[a->kind], a->microbatch);
    if (ddp_group_cause(p->group) == DDP_OK) {
        first_cause = strstr(line, "cause: "); /* a line contains it at most once */
        snprintf(text, sizeof text, "cause: rank %d in %s: %s%s%s: %.250s", p->rank, who, what, action_text,
                 how, first_cause ? first_cause + strlen("cause: ") : line);
        ddp_group_poison(p->group, result, text);
    } else /* ddp_group_cause has set the first cause, without the call that met it */
        snprintf(line, sizeof line, "%s", ddp_last_error());
    for (int i = 0; i < p->desc.tie_count; i++) /* so that no rank waits for this one in a tie group */
        if (p->tie_groups[i]) ddp_group_pass_on(p->group, p->tie_groups[i]);
    return ddp_fail_in(result, who, p->group, "%s%s%s: %.300s", what, action_text, how, line);
}

/* Handles the result of a callback or hook. before: the error line before its call. */
static ddp_result ddp__pipe_callback_result(ddp_pipeline *p, ddp_result result, const char *before,
                                            const char *what, const ddp_action *a) {
    if (result == DDP_OK) result = ddp_device_begin(p->group);
    if (ddp__pipe_callback_error(result, before) == DDP_OK) return DDP_OK;
    return ddp__pipe_fail(p, result, what, a, " failed");
}

static ddp_result ddp__pipe_hook(ddp_pipeline *p, const ddp__pipe_stage *s, ddp_stage_hook hook,
                                 const char *name) {
    char what[96], before[512];
    double begin = ddp_now();
    ddp_result result;
    if (!hook) return DDP_OK;
    snprintf(what, sizeof what, "%s of %s", name, ddp__pipe_stage_label(p, s->stage_index).text);
    snprintf(before, sizeof before, "%s", ddp_last_error());
    {
        DDP_USER_CALLBACK;
        result = hook(s->stage_index, s->desc.user);
    }
    result = ddp__pipe_callback_result(p, result, before, what, NULL);
    p->run.current->stats.update_seconds += ddp_now() - begin;
    return result;
}

static ddp_result ddp__pipe_callback(ddp_pipeline *p, ddp_pipeline_fn fn, const ddp_pipeline_call *call,
                                     void *user, const ddp_action *a, const char *what) {
    ddp_result result;
    char before[512];
    snprintf(before, sizeof before, "%s", ddp_last_error());
    {
        DDP_USER_CALLBACK;
        result = fn(call, user);
    }
    return ddp__pipe_callback_result(p, result, before, what, a);
}

/* Fills in and returns an array of tensors for a call, p->tensors[2 * backward + side]. */
static const ddp_tensor *ddp__pipe_tensors(const ddp_pipeline *p, const ddp__pipe_stage *s, int side,
                                           int backward, int microbatch) {
    ddp_tensor *out = p->tensors[2 * backward + side];
    ddp__pipe_pool *pool;
    for (int k = 0; (pool = ddp__pipe_stage_pool(s, side, backward, k)) != NULL; k++) {
        out[k] = pool->tensor;
        out[k].data = ddp__pipe_data(pool, microbatch);
    }
    return out;
}

/* Runs the forward again. It fills the saved memory; outputs and loss are scratch. */
static ddp_result ddp__pipe_recompute(ddp_pipeline *p, const ddp__pipe_stage *s,
                                      const ddp_pipeline_call *call, const ddp_action *a) {
    ddp_pipeline_call call_again = *call;
    double loss = 0;
    call_again.kind = DDP_ACTION_FORWARD;
    call_again.recomputing = 1;
    call_again.output_grads = call_again.input_grads = NULL;
    call_again.outputs = ddp__pipe_tensors(p, s, 1, 0, a->microbatch);
    for (int i = 0; i < s->link_count[1]; i++) p->tensors[1][i].data = s->links[1][i]->scratch;
    if (ddp__pipe_is_last_stage(p, s)) call_again.loss = &loss;
    return ddp__pipe_callback(p, s->desc.forward, &call_again, s->desc.user, a, "the callback of ");
}

/* Calls the callbacks of an action. All of its tensors have arrived. */
static ddp_result ddp__pipe_call_stage(ddp_pipeline *p, ddp__pipe_stage *s, const ddp_action *a,
                                       uint64_t version) {
    static const char what[] = "the callback of ";
    int i = a->microbatch, kind = (int)a->kind, last = ddp__pipe_is_last_stage(p, s);
    ddp_pipeline_call call = {a->kind,
                              a->stage,
                              i,
                              p->run.evaluating,
                              0,
                              s->link_count[0],
                              s->link_count[1],
                              ddp__pipe_tensors(p, s, 0, 0, i),
                              NULL,
                              NULL,
                              NULL,
                              ddp__pipe_saved_data(s, i),
                              NULL,
                              (int)version};
    if (kind == DDP_ACTION_FORWARD) {
        call.outputs = ddp__pipe_tensors(p, s, 1, 0, i);
        call.loss = last ? &p->run.current->losses[i] : NULL;
        DDP_TRY(ddp__pipe_callback(p, s->desc.forward, &call, s->desc.user, a, what));
        if (!last || !p->desc.loss) return DDP_OK;
        call.inputs = NULL;
        call.input_count = 0;
        call.saved = NULL;
        call.output_grads = p->run.evaluating ? NULL : ddp__pipe_tensors(p, s, 1, 1, i);
        return ddp__pipe_callback(p, p->desc.loss, &call, p->desc.loss_user, a, "the loss after ");
    }
    call.output_grads = ddp__pipe_tensors(p, s, 1, 1, i);
    if (kind != DDP_ACTION_INPUT_GRAD) ddp__pipe_zero_gradients(p, s);
    if (kind != DDP_ACTION_WEIGHT_GRAD) {
        call.input_grads = ddp__pipe_tensors(p, s, 0, 1, i);
        if (s->desc.recompute) DDP_TRY(ddp__pipe_recompute(p, s, &call, a));
        if (kind == DDP_ACTION_BACKWARD && s->desc.backward)
            return ddp__pipe_callback(p, s->desc.backward, &call, s->desc.user, a, what);
        call.kind = DDP_ACTION_INPUT_GRAD;
        DDP_TRY(ddp__pipe_callback(p, s->desc.input_grad, &call, s->desc.user, a, what));
    }
    if (kind == DDP_ACTION_INPUT_GRAD) return DDP_OK;
    call.kind = DDP_ACTION_WEIGHT_GRAD;
    call.input_grads = NULL;
    return ddp__pipe_callback(p, s->desc.weight_grad, &call, s->desc.user, a, what);
}

/* Called after the last W or B of an update, or at REDUCE_GRAD. Reduces the gradients over replicas. If
   weights change within a step, copies the current version if needed and updates the weights. */
static ddp_result ddp__pipe_reduce(ddp_pipeline *p, ddp__pipe_stage *s) {
    int copy;
    DDP_TRY(ddp__pipe_hook(p, s, s->desc.reduce_grad, "reduce_grad"));
    if (!s->versions.capacity) return DDP_OK;
    DDP_TRY(ddp__pipe_hook(p, s, s->desc.wait_grad, "wait_grad"));
    copy = ddp__pipe_save_version(p, &s->versions);
    if (copy >= 0) ddp__pipe_copy_values(p, s, copy);
    DDP_TRY(ddp__pipe_hook(p, s, s->desc.update, "update"));
    s->versions.newest++;
    return DDP_OK;
}

//== runner: one step ============================================================= >>impl-pipeline-step
/* Runs this rank's list and completes the update: ddp_pipeline_step and ddp_pipeline_evaluate.

     ddp__pipe_run
       ddp__pipe_run_list
         for each action of the list: ddp__pipe_action
           prepare    wait for inputs from other ranks; acquire slots for results
           compute    call the callbacks, with the weights of the micro-batch's version
           finish     free slots; send results; accumulate gradients; after the last one reduce and update
         ddp__pipe_wait_all            sends in flight
         ddp__pipe_update              wait_grad, tied parameters, update
         ddp__pipe_exchange_results    losses and times of all ranks */

/* Waits for the inputs of an action, and acquires slots for its results. */
static ddp_result ddp__pipe_prepare_action(ddp_pipeline *p, ddp__pipe_stage *s, const ddp_action *a) {
    int i = a->microbatch;
    int backward = a->kind != DDP_ACTION_FORWARD;
    int produces = a->kind != DDP_ACTION_WEIGHT_GRAD;
    int loss = !backward && ddp__pipe_is_last_stage(p, s) && !p->run.evaluating;
    ddp__pipe_pool *pool;
    for (int k = 0; (pool = ddp__pipe_stage_pool(s, backward, backward, k)) != NULL; k++) {
        char how[48];
        snprintf(how, sizeof how, " waited for rank %d", pool->peer);
        DDP_TRY(ddp__pipe_fail(p, ddp__pipe_wait_tensor(&p->messages, pool, i), "", a, how));
    }
    for (int k = 0; produces && (pool = ddp__pipe_stage_pool(s, !backward, backward, k)) != NULL; k++)
        DDP_TRY(ddp__pipe_fail(p, ddp__pipe_slot_acquire(&p->messages, pool, i), "", a,
                               " waited for a buffer in flight"));
    for (int k = 0; loss && (pool = ddp__pipe_stage_pool(s, 1, 1, k)) != NULL; k++)
        ddp__pipe_slot_alloc(pool, i);
    if (!backward || (s->desc.recompute && produces)) ddp__pipe_slot_alloc(&s->saved, i);
    return DDP_OK;
}

/* Finishes an action. First releases the inputs and gradients that this rank no longer reads: a peer that
   learns of the action finds their slots free. Then sends the results. */
static ddp_result ddp__pipe_finish_action(ddp_pipeline *p, ddp__pipe_stage *s, const ddp_action *a) {
    static const char free_failed[] = " could not return the buffers that it read";
    int i = a->microbatch;
    int backward = a->kind != DDP_ACTION_FORWARD;
    int produces = a->kind != DDP_ACTION_WEIGHT_GRAD;
    int ends = ddp__action_ends(a->kind);
    int loss = !backward && ddp__pipe_is_last_stage(p, s);
    ddp__pipe_pool *pool;
    for (int k = 0; (ends || p->run.evaluating) && (pool = ddp__pipe_stage_pool(s, 0, 0, k)) != NULL; k++)
        DDP_TRY(ddp__pipe_fail(p, ddp__pipe_slot_free(&p->messages, pool, i), "", a, free_failed));
    for (int k = 0; ends && (pool = ddp__pipe_stage_pool(s, 1, 1, k)) != NULL; k++)
        DDP_TRY(ddp__pipe_fail(p, ddp__pipe_slot_free(&p->messages, pool, i), "", a, free_failed));
    for (int k = 0; produces && (pool = ddp__pipe_stage_pool(s, !backward, backward, k)) != NULL; k++)
        DDP_TRY(ddp__pipe_fail(p, ddp__pipe_send(&p->messages, pool, i), "", a, " could not send"));
    for (int k = 0; loss && (pool = ddp__pipe_stage_pool(s, 1, 0, k)) != NULL; k++)
        ddp__pipe_slot_free(&p->messages, pool, i);
    if (ends || (!backward && (p->run.evaluating || s->desc.recompute)))
        ddp__pipe_slot_free(&p->messages, &s->saved, i);
    if (ends) {
        ddp__pipe_accumulate(p, s, i);
        s->versions.used_version[i] = 0;
        if (s->sums.added == 0 && !ddp__pipe_stage_has(s, DDP_ACTION_REDUCE_GRAD))
            DDP_TRY(ddp__pipe_reduce(p, s));
    }
    return ddp__pipe_fail(p, ddp__pipe_post_all_receives(&p->messages), "", a, " could not post receives");
}

/* With desc.timed, waits for the compute stream of a device. Returns the seconds waited. */
static double ddp__pipe_sync_if_timed(const ddp_pipeline *p) {
    double begin = ddp_now();
    int64_t cell;
    if (!p->desc.timed) return 0;
    /* A copy to host memory is complete on return. */
    if (p->device->use_stream) p->device->copy(&cell, p->squares, sizeof cell);
    return ddp_now() - begin;
}

/* Calls the callbacks of an action with the weights of its version, and measures their time. */
static ddp_result ddp__pipe_compute(ddp_pipeline *p, ddp__pipe_stage *s, const ddp_action *a,
                                    ddp_action_time *time) {
    uint64_t version = ddp__pipe_version(p, &s->versions, a);
    ddp_result result;
    p->run.current->stats.wait_seconds += ddp__pipe_sync_if_timed(p);
    time->begin = ddp_now() - p->run.start;
    ddp__pipe_swap_values(s, version, 0);
    result = ddp__pipe_call_stage(p, s, a, version);
    ddp__pipe_swap_values(s, version, 1);
    ddp__pipe_sync_if_timed(p);
    time->end = ddp_now() - p->run.start;
    p->run.current->stats.compute_seconds += time->end - time->begin;
    p->run.current->seconds[4 * a->stage + (int)a->kind - DDP_ACTION_FORWARD] += time->end - time->begin;
    return result;
}

static ddp_result ddp__pipe_action(ddp_pipeline *p, int position) {
    const ddp_action *a = &p->list[position];
    ddp_action_time *time = &p->run.current->times[p->schedule->first[p->rank] + position];
    ddp__pipe_stage *s;
    time->begin = time->end = ddp_now() - p->run.start;
    if (a->stage < 0
        || (p->run.evaluating && a->kind != DDP_ACTION_FORWARD && a->kind != DDP_ACTION_UNSHARD
            && a->kind != DDP_ACTION_RESHARD))
        return DDP_OK;
    s = &p->stages[a->stage];
    if (a->kind == DDP_ACTION_UNSHARD) return ddp__pipe_hook(p, s, s->desc.unshard, "unshard");
    if (a->kind == DDP_ACTION_RESHARD) return ddp__pipe_hook(p, s, s->desc.reshard, "reshard");
    if (a->kind == DDP_ACTION_REDUCE_GRAD) return ddp__pipe_reduce(p, s);
    if (!ddp__action_computes(a->kind)) return DDP_OK; /* computations send and receive their messages */
    if (!ddp__pipe_stage_has(s, DDP_ACTION_UNSHARD) && position == s->first)
        DDP_TRY(ddp__pipe_hook(p, s, s->desc.unshard, "unshard"));
    DDP_TRY(ddp__pipe_prepare_action(p, s, a));
    DDP_TRY(
        ddp__pipe_fail(p, ddp__pipe_offload_begin(p, s, position), "", a, " could not fetch saved memory"));
    DDP_TRY(ddp__pipe_compute(p, s, a, time));
    DDP_TRY(
        ddp__pipe_fail(p, ddp__pipe_offload_end(p, s, position), "", a, " could not offload saved memory"));
    DDP_TRY(ddp__pipe_finish_action(p, s, a));
    if (ddp__pipe_stage_has(s, DDP_ACTION_RESHARD)
        || position != (p->run.evaluating ? s->last_forward : s->last))
        return DDP_OK;
    return ddp__pipe_hook(p, s, s->desc.reshard, "reshard");
}

/* Completes the update of stages with weights that change only between steps: wait_grad, ties, update. */
static ddp_result ddp__pipe_update(ddp_pipeline *p) {
    double begin;
    for (ddp__pipe_stage *s = ddp__pipe_next_stage(p, NULL); s; s = ddp__pipe_next_stage(p, s))
        if (!s->versions.capacity) DDP_TRY(ddp__pipe_hook(p, s, s->desc.wait_grad, "wait_grad"));
    begin = ddp_now();
    DDP_TRY(ddp__pipe_fail(p, ddp__pipe_add_ties(p), "", NULL, "tied parameters"));
    p->run.current->stats.update_seconds += ddp_now() - begin;
    for (ddp__pipe_stage *s = ddp__pipe_next_stage(p, NULL); s; s = ddp__pipe_next_stage(p, s)) {
        if (s->versions.capacity) continue;
        DDP_TRY(ddp__pipe_hook(p, s, s->desc.update, "update"));
        s->versions.newest++;
    }
    return DDP_OK;
}

/* Exchanges losses and times, so that every rank has all of them. Each entry is set on one rank and zero on
   the others, so the sum is exact. */
static ddp_result ddp__pipe_exchange_results(ddp_pipeline *p) {
    ddp__pipe_measures *m = p->run.current;
    double first = -1, last = 0;
    for (int i = 0; i < p->list_count; i++) {
        const ddp_action_time *time = &m->times[p->schedule->first[p->rank] + i];
        if (!ddp__action_computes(p->list[i].kind)) continue;
        if (first < 0) first = time->begin;
        last = time->end;
    }
    m->starts[p->rank] = p->run.start;
    m->spans[p->rank] = first < 0 ? 0 : last - first; /* 0 = this rank computes nothing */
    m->computes[p->rank] = m->stats.compute_seconds;
    return ddp__pipe_sum_over_ranks(p, m->losses, p->run.exchange_count, DDP_F64);
}

/* Returns DDP_OK unless the group has failed. As with collectives, the first call after the failure returns
   its code, later ones DDP_ERR_POISONED. */
static ddp_result ddp__pipe_status(ddp_pipeline *p) {
    ddp_result result = ddp__pipe_fail(p, ddp_group_status(p->group), "the group failed earlier", NULL, "");
    if (result != DDP_OK && p->run.failure_reported)
        return ddp_fail(DDP_ERR_POISONED, "%s", ddp_last_error());
    p->run.failure_reported |= result != DDP_OK;
    return result;
}

/* Runs this rank's list and completes the update. */
static ddp_result ddp__pipe_run_list(ddp_pipeline *p) {
    for (int peer = 0; peer < p->world_size; peer++) p->messages.queues[peer].next = 0;
    for (int stage = 0; stage < p->stage_count; stage++) {
        ddp__pipe_offload *o = &p->stages[stage].offload;
        o->microbatch[0] = o->microbatch[1] = -1;
    }
    DDP_TRY(ddp__pipe_fail(p, ddp__pipe_post_all_receives(&p->messages), "", NULL,
                           "receives could not be posted"));
    for (int position = 0; position < p->list_count; position++) DDP_TRY(ddp__pipe_action(p, position));
    DDP_TRY(ddp__pipe_fail(p, ddp__pipe_wait_all(&p->messages, 0), "", NULL, "pending sends"));
    if (!p->run.evaluating) DDP_TRY(ddp__pipe_update(p));
    DDP_TRY(ddp__pipe_fail(p, ddp_device_check(p->group), "", NULL, "the device"));
    return ddp__pipe_fail(p, ddp__pipe_exchange_results(p), "", NULL, "the end of the step");
}

static ddp_result ddp__pipe_run(ddp_pipeline *p, int evaluating) {
    ddp__pipe_measures *measures = &p->run.measures[evaluating];
    double max_span = 0, max_compute = 0;
    ddp_saved_error failure;
    DDP_TRY(ddp__pipe_status(p));
    DDP_TRY(ddp__pipe_fail(p, ddp_device_begin(p->group), "", NULL, "the device"));
    p->run.current = measures;
    p->run.evaluating = evaluating;
    p->run.has_losses = 0;
    if (!evaluating) p->run.has_gradients = 0;
    /* A sum of the previous step that no reduction has taken does not count. */
    for (int stage = 0; stage < p->stage_count && !evaluating; stage++)
        for (int i = 0; i < p->stages[stage].desc.param_count && p->stages[stage].desc.reduce_grad; i++)
            p->stages[stage].desc.params[i]->sum.is_set = 0;
    p->run.start = ddp_now();
    measures->stats.compute_seconds = measures->stats.wait_seconds = measures->stats.update_seconds = 0;
    measures->stats.bytes_sent = measures->stats.bytes_handed_over = 0;
    memset(measures->losses, 0, p->run.exchange_count * sizeof *measures->losses);
    failure.result = DDP_OK;
    ddp_error_save(&failure, ddp__pipe_run_list(p));
    if (failure.result != DDP_OK) {
        ddp__pipe_wait_all(&p->messages, 1);
        p->run.failure_reported = 1;
        return ddp_error_restore(&failure);
    }
    for (int rank = 0; rank < p->world_size; rank++) {
        if (measures->spans[rank] > max_span) max_span = measures->spans[rank];
        if (measures->computes[rank] > max_compute) max_compute = measures->computes[rank];
    }
    measures->stats.bubble_rate = max_span > max_compute ? (max_span - max_compute) / max_span : 0;
    measures->stats.step_seconds = ddp_now() - p->run.start;
    measures->stats.steps++;
    p->run.has_losses = 1;
    p->run.has_gradients |= !evaluating;
    return DDP_OK;
}

DDPDEF ddp_result ddp_pipeline_step(ddp_pipeline *pipeline) {
    DDP_PUBLIC_CALL(ddp_pipeline_step);
    if (!pipeline) return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_step: pipeline is NULL");
    return ddp__pipe_run(pipeline, 0);
}

DDPDEF ddp_result ddp_pipeline_evaluate(ddp_pipeline *pipeline) {
    DDP_PUBLIC_CALL(ddp_pipeline_evaluate);
    if (!pipeline) return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_evaluate: pipeline is NULL");
    DDP_TRY(ddp__pipe_run(pipeline, 1));
    memcpy(pipeline->run.measures[0].losses, pipeline->run.measures[1].losses,
           (size_t)pipeline->microbatch_count * sizeof(double));
    return DDP_OK;
}

//== runner: create and destroy ================================================= >>impl-pipeline-create
/* ddp_pipeline_create works in two phases. Each rank first checks its desc and allocates its own memory. All
   ranks then compare their plans with ddp_agree, and create shared memory and tie groups together. */

/* Describes the fields that must be equal on all ranks, for ddp_agree. */
static void ddp__pipe_describe_plan(const ddp_pipeline *p, char *out, size_t size) {
    const ddp_schedule *s = p->schedule;
    uint64_t schedule = ddp_hash(DDP_HASH_SEED, s->actions, (size_t)s->count * sizeof *s->actions);
    uint64_t edges = DDP_HASH_SEED;
    uint64_t ties = ddp_hash(DDP_HASH_SEED, p->desc.ties, (size_t)p->desc.tie_count * sizeof *p->desc.ties);
    schedule = ddp_hash(schedule, s->first, ((size_t)s->rank_count + 1) * sizeof *s->first);
    schedule = ddp_hash(schedule, &s->update_interval, sizeof s->update_interval) ^ (uint64_t)s->kind;
    for (int i = 0; i < p->messages.link_count; i++) {
        const ddp_pipeline_edge *e = &p->messages.links[i].edge;
        int fields[6] = {e->from,   e->to, (int)e->tensor.dtype, e->tensor.ndim, (int)e->grad_dtype,
                         e->no_grad};
        edges = ddp_hash(edges, fields, sizeof fields);
        edges = ddp_hash(edges, e->tensor.shape, (size_t)e->tensor.ndim * sizeof *e->tensor.shape);
    }
    snprintf(out, size, "schedule=%s:%d_stages:%d_microbatches:%016llx edges=%d:%016llx ties=%d:%016llx",
             ddp_schedule_kind_name(s->kind), p->stage_count, ddp_schedule_microbatch_count(s),
             (unsigned long long)schedule, p->messages.link_count, (unsigned long long)edges,
             p->desc.tie_count, (unsigned long long)ties);
}

/* Returns `result` of a call of the group. If the group has failed, the error gives the first cause. */
static ddp_result ddp__pipe_group_failed(const ddp_group *group, ddp_result result) {
    if (result == DDP_OK || ddp_group_cause(group) == DDP_OK) return result;
    return ddp_fail_in(result, "ddp_pipeline_create", group, "%.400s", ddp_last_error());
}

/* Values that create exchanges: it needs the largest of any rank. */
typedef struct ddp__pipe_maxima {
    uint64_t shared, works, unclipped, params;
} ddp__pipe_maxima;

/* Does everything that needs no other rank: checks the desc and allocates the memory of this rank. */
static ddp_result ddp__pipe_create_local(ddp_pipeline *p, const ddp_pipeline_desc *desc, char *description,
                                         size_t description_size, ddp__pipe_maxima *maxima) {
    ddp_pipeline_tie *ties;
    size_t shared = 0;
    if (!desc) return DDP__PIPE_INVALID("desc is NULL");
    p->desc = *desc;
    DDP_TRY(ddp__pipe_check_desc(p));
    DDP_TRY(ddp__pipe_check_edges(p));
    DDP_TRY(ddp__pipe_init_links(p));
    for (ddp__pipe_stage *s = ddp__pipe_next_stage(p, NULL); s; s = ddp__pipe_next_stage(p, s))
        DDP_TRY(ddp__pipe_stage_init(p, s));
    DDP__PIPE_NEW(p, ties, ddp_pipeline_tie, p->desc.tie_count);
    for (int i = 0; i < p->desc.tie_count; i++) ties[i] = desc->ties[i];
    p->desc.ties = ties;
    DDP_TRY(ddp__pipe_alloc(p, &shared));
    ddp__pipe_describe_plan(p, description, description_size);
    maxima->shared = shared;
    maxima->works = (uint64_t)p->messages.works;
    for (ddp__pipe_stage *s = ddp__pipe_next_stage(p, NULL); s; s = ddp__pipe_next_stage(p, s))
        for (int i = 0; i < s->desc.param_count; i++) {
            maxima->params = 1;
            maxima->unclipped |= (uint64_t)ddp__pipe_grad_is_transient(&s->desc, i);
        }
    return DDP_OK;
}

/* Numbers that describe one use of a tied parameter: the gradient's dtype, the value's ndim and shape. */
enum { DDP__PIPE_TIE_FIELDS = 2 + DDP_MAX_NDIM };

/* Checks that both uses of a tied parameter have the same shape and gradient dtype. Collective. Each use is
   described by one rank; the others contribute zeros to the sum. */
static ddp_result ddp__pipe_agree_tie(ddp_pipeline *p, int i) {
    const ddp_pipeline_tie *t = &p->desc.ties[i];
    int stage[2] = {t->first_stage, t->second_stage};
    int param[2] = {t->first_param, t->second_param};
    int rank[2];
    int64_t uses[2][DDP__PIPE_TIE_FIELDS];
    memset(uses, 0, sizeof uses);
    for (int k = 0; k < 2; k++) {
        const ddp_tensor *value = p->stages[stage[k]].stage_index < 0
                                      ? NULL
                                      : &p->stages[stage[k]].desc.params[param[k]]->value;
        rank[k] = p->schedule->stage_rank[stage[k]];
        if (!value) continue;
        uses[k][0] = (int64_t)p->stages[stage[k]].sums.gradients[param[k]].dtype;
        uses[k][1] = value->ndim;
        for (int n = 0; n < value->ndim; n++) uses[k][2 + n] = value->shape[n];
    }
    DDP_TRY(ddp__pipe_sum_over_ranks(p, uses, 2 * DDP__PIPE_TIE_FIELDS, DDP_I64));
    if (memcmp(uses[0], uses[1], sizeof uses[0]) == 0) return DDP_OK;
    const ddp_shape_text first = ddp_describe_shape(ddp_dtype_name((ddp_dtype)uses[0][0]), (int)uses[0][1],
                                                    &uses[0][2]);
    const ddp_shape_text second = ddp_describe_shape(ddp_dtype_name((ddp_dtype)uses[1][0]), (int)uses[1][1],
                                                     &uses[1][2]);
    return ddp_fail(rank[0] == rank[1] ? DDP_ERR_INVALID : DDP_ERR_MISMATCH,
                    "ddp_pipeline_create: ties[%d]: params[%d] of stage %d on rank %d is %s, params[%d] of "
                    "stage %d on rank %d is %s; give both the same shape and gradient dtype",
                    i, param[0], stage[0], rank[0], first.text, param[1], stage[1], rank[1], second.text);
}

/* Creates a group of the two ranks of each tie. Collective. */
static ddp_result ddp__pipe_tie_groups(ddp_pipeline *p) {
    const int *rank_of = p->schedule->stage_rank;
    for (int i = 0; i < p->desc.tie_count; i++) {
        int first = rank_of[p->desc.ties[i].first_stage];
        int second = rank_of[p->desc.ties[i].second_stage];
        int same = 0;
        DDP_TRY(ddp__pipe_agree_tie(p, i));
        for (; same < i; same++) {
            int a = rank_of[p->desc.ties[same].first_stage];
            int b = rank_of[p->desc.ties[same].second_stage];
            if ((a == first && b == second) || (a == second && b == first)) break;
        }
        if (same < i)
            p->tie_groups[i] = p->tie_groups[same];
        else if (first != second)
            DDP_TRY(ddp_group_split(p->group, p->rank == first || p->rank == second ? 0 : -1, p->rank,
                                    &p->tie_groups[i]));
    }
    return DDP_OK;
}

/* Sends as many messages at once as a step can have in flight, around the ring of ranks. The group allocates
   its memory per message now, instead of in a later step. The messages are a batch, since on a device with
   streams the host must not wait for any of them. bytes: works + 1 bytes of device memory. */
static ddp_result ddp__pipe_warm_up(ddp_pipeline *p, unsigned char *bytes) {
    int before = (p->rank + p->world_size - 1) % p->world_size;
    int after = (p->rank + 1) % p->world_size;
    int count = p->world_size > 1 ? p->messages.works : 0;
    ddp_result result = ddp_p2p_begin(p->group), ended;
    ddp_work first = DDP_ZERO; /* the handle of an asynchronous message starts the communication thread */
    for (int i = 0; i < count && result == DDP_OK; i++)
        result = ddp_recv(p->group, &bytes[i], 1, DDP_U8, before, 0,
                          i || p->messages.single_queue ? NULL : &first);
    /* The barrier holds all messages back until every receive is posted. */
    if (result == DDP_OK && count && !p->messages.single_queue) result = ddp_barrier(p->group);
    for (int i = 0; i < count && result == DDP_OK; i++)
        result = ddp_send(p->group, &bytes[count], 1, DDP_U8, after, 0, NULL);
    /* A backend without messages returns DDP_ERR_UNSUPPORTED on every rank: no rank waits for another. */
    if (result != DDP_OK && result != DDP_ERR_UNSUPPORTED)
        ddp_group_poison(p->group, result, ddp_last_error());
    ended = ddp_p2p_end(p->group);
    ddp_result received = ddp_wait(p->group, &first);
    if (ended == DDP_OK) ended = received;
    if (result == DDP_OK && ended != DDP_OK) ddp_group_poison(p->group, ended, ddp_last_error());
    if (result == DDP_OK) result = ended;
    /* Without the barrier a rank could succeed while another one has no memory for its last message. */
    return result == DDP_OK ? ddp_barrier(p->group) : result;
}

/* Removes all pointers from parameters to memory of the runner, and ends reductions that read it. */
static void ddp__pipe_detach(const ddp__pipe_stage *s) {
    uintptr_t first = (uintptr_t)s->sums.memory;
    uintptr_t end = first + (size_t)s->sums.count * s->sums.bytes;
    for (int i = 0; i < s->desc.param_count && s->sums.gradients; i++) {
        ddp_param *param = s->desc.params[i];
        uintptr_t sum = (uintptr_t)param->sum.data;
        if (s->sums.memory && sum >= first && sum < end) ddp_grad_sum_release(&param->sum, param->sum.data);
        if (s->sums.gradients[i].allocated_here) param->grad.data = NULL;
    }
}

static void ddp__pipe_free(ddp_pipeline *p) {
    for (int stage = 0; stage < p->stage_count && p->stages; stage++) ddp__pipe_detach(&p->stages[stage]);
    for (int i = 0; i < p->desc.tie_count && p->tie_groups; i++) {
        int k = 0;
        while (p->tie_groups[k] != p->tie_groups[i]) k++;
        if (k == i) ddp_group_destroy(p->tie_groups[i]);
    }
    double until = ddp_now() + ddp_group_timeout_ms(p->group) * 1e-3;
    for (int stage = 0; stage < p->stage_count && p->stages; stage++)
        ddp__pipe_offload_free(p, &p->stages[stage].offload, until);
    if (p->messages.shared) ddp_group_free(p->group, p->messages.shared);
    while (p->allocations) {
        ddp__pipe_allocation *allocation = p->allocations;
        p->allocations = allocation->next;
        if (allocation->device_memory) p->device->free(p->group, allocation->device_memory);
        ddp_host_free(p->group, allocation);
    }
    ddp_host_free(p->group, p);
}

/* Finds out whether ranks can read each other's memory, by allocating a piece of group memory. Collective. */
static ddp_result ddp__pipe_detect_in_place(ddp_group *group, int *in_place) {
    void *allocation;
    *in_place = ddp_world_size(group) > 1;
    if (!*in_place) return DDP_OK;
    DDP_TRY(ddp_group_alloc(group, 64, &allocation));
    for (int rank = 0; rank < ddp_world_size(group); rank++)
        *in_place &= ddp_group_peer(group, allocation, rank) != NULL;
    return ddp_group_free(group, allocation);
}

/* The collective part of create, after all ranks have agreed: tie groups, shared memory, first messages. */
static ddp_result ddp__pipe_create_collective(ddp_pipeline *p, size_t shared, unsigned char *bytes) {
    DDP_TRY(ddp__pipe_tie_groups(p));
    if (shared) DDP_TRY(ddp_group_alloc(p->group, shared, &p->messages.shared));
    for (int i = 0; i < 2 * p->messages.link_count; i++) {
        ddp__pipe_pool *pool = &p->messages.links[i / 2].pools[i % 2];
        if (pool->kind == DDP__PIPE_OUT) pool->memory = (unsigned char *)p->messages.shared + pool->offset;
        if (pool->kind == DDP__PIPE_IN && p->messages.in_place)
            pool->memory = (unsigned char *)ddp_group_peer(p->group, p->messages.shared, pool->peer);
    }
    return ddp__pipe_warm_up(p, bytes);
}

DDPDEF ddp_result ddp_pipeline_create(ddp_pipeline **out, ddp_group *group, const ddp_pipeline_desc *desc) {
    DDP_PUBLIC_CALL(ddp_pipeline_create);
    ddp__pipe_maxima maxima = {0, 0, 0, 0};
    ddp_saved_error failure = DDP_ZERO;
    ddp_result result;
    ddp_pipeline *p;
    char description[300] = "";
    void *bytes = NULL;
    int in_place;
    if (out) *out = NULL;
    if (!group) return DDP__PIPE_INVALID("group is NULL");
    DDP_TRY(ddp__pipe_group_failed(group, ddp__pipe_detect_in_place(group, &in_place)));
    p = (ddp_pipeline *)ddp_host_alloc(group, sizeof *p);
    if (!p)
        ddp_error_save(&failure, DDP_ERR_NO_MEMORY);
    else {
        p->group = group;
        p->device = ddp_group_device(group);
        p->rank = ddp_rank(group);
        p->world_size = ddp_world_size(group);
        p->messages.group = group;
        p->messages.run = &p->run;
        p->messages.queue_count = p->world_size;
        p->messages.in_place = in_place;
        p->messages.single_queue = p->device->use_stream && p->world_size > 1;
        p->run.current = &p->run.measures[0];
        ddp_error_save(&failure,
                       out ? ddp__pipe_create_local(p, desc, description, sizeof description, &maxima)
                           : DDP__PIPE_INVALID("out is NULL"));
    }
    ddp_error_save(&failure, ddp_host_collective(group, DDP_CALL_ALL_REDUCE, &maxima, &maxima, 4, DDP_U64,
                                                 DDP_OP_MAX, -1));
    if (failure.result == DDP_OK) {
        p->messages.works = (int)maxima.works;
        p->no_clip = maxima.unclipped || !maxima.params;
        ddp_error_save(&failure, ddp__pipe_alloc_device(p, (size_t)maxima.works + 1, &bytes));
    }
    result = ddp_agree(group, "ddp_pipeline_create", ddp_error_restore(&failure),
                       ddp_hash(DDP_HASH_SEED, description, strlen(description)), description);
    if (result == DDP_OK)
        result = ddp__pipe_group_failed(
            group, ddp__pipe_create_collective(p, (size_t)maxima.shared, (unsigned char *)bytes));
    if (result == DDP_OK) {
        *out = p;
        return DDP_OK;
    }
    failure.result = DDP_OK;
    ddp_error_save(&failure, result);
    if (p) ddp__pipe_free(p);
    return ddp_error_restore(&failure);
}

DDPDEF void ddp_pipeline_destroy(ddp_pipeline *pipeline) {
    DDP_PUBLIC_CALL(ddp_pipeline_destroy);
    DDP_KEEP_ERROR;
    if (!pipeline || ddp_group_is_forked(pipeline->group)) return;
    ddp__pipe_wait_all(&pipeline->messages, 1);
    ddp__pipe_free(pipeline);
}

//== runner: losses, times, gradient norms ====================================== >>impl-pipeline-report
/* Public calls that read the results of the last step. */

/* Adds values in tree order: a range splits at the largest power of two below its length. */
static double ddp__pipe_tree_sum(const double *values, int count) {
    int half = 1;
    if (count == 1) return values[0];
    while (2 * half < count) half *= 2;
    return ddp__pipe_tree_sum(values, half) + ddp__pipe_tree_sum(values + half, count - half);
}

DDPDEF ddp_result ddp_pipeline_get_loss(const ddp_pipeline *pipeline, double *mean, double *each) {
    const double *losses = pipeline ? pipeline->run.measures[0].losses : NULL;
    if (!pipeline || !mean)
        return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_get_loss: pipeline or mean is NULL");
    if (!pipeline->run.has_losses)
        return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_get_loss: no losses are available; call it after a "
                                         "ddp_pipeline_step or ddp_pipeline_evaluate that returned DDP_OK");
    *mean = ddp__pipe_tree_sum(losses, pipeline->microbatch_count) / pipeline->microbatch_count;
    if (each) memcpy(each, losses, (size_t)pipeline->microbatch_count * sizeof *each);
    return DDP_OK;
}

/* Returns an error unless the last step succeeded. If the group has failed, the error reports that failure.
   who: the public function. */
static ddp_result ddp__pipe_check_has_step(ddp_pipeline *p, const char *who) {
    if (p->run.has_gradients) return DDP_OK;
    DDP_TRY(ddp__pipe_status(p));
    return ddp_fail(DDP_ERR_INVALID,
                    "%s: no step has finished; call it after a ddp_pipeline_step that returned DDP_OK", who);
}

/* Computes the mean costs per micro-batch. Half of a B counts as I, half as W. */
static void ddp__pipe_costs(const ddp_pipeline *p, ddp_stage_cost *costs) {
    for (int stage = 0; stage < p->stage_count; stage++) {
        const double *seconds = p->run.measures[0].seconds + 4 * stage;
        const double m = p->microbatch_count;
        memset(&costs[stage], 0, sizeof costs[stage]);
        costs[stage].forward = seconds[0] / m;
        costs[stage].input_grad = (seconds[1] + seconds[3] / 2) / m;
        costs[stage].weight_grad = (seconds[2] + seconds[3] / 2) / m;
    }
}

/* Sets the transfer costs between ranks: the shortest time of any micro-batch from the end of a stage's F to
   the begin of the next stage's F. */
static void ddp__pipe_transfers(const ddp_pipeline *p, const ddp_action_time *times, double *ends,
                                ddp_stage_cost *costs) {
    const ddp_schedule *s = p->schedule;
    for (int stage = 0; stage + 1 < p->stage_count; stage++) {
        double shortest = DBL_MAX;
        if (s->stage_rank[stage] == s->stage_rank[stage + 1]) continue;
        for (int end = 0; end < 2; end++) {
            int rank = s->stage_rank[stage + end];
            for (int i = s->first[rank]; i < s->first[rank + 1]; i++) {
                const ddp_action *a = &s->actions[i];
                if (a->stage != stage + end || a->kind != DDP_ACTION_FORWARD) continue;
                if (!end)
                    ends[a->microbatch] = times[i].end;
                else if (times[i].begin - ends[a->microbatch] < shortest)
                    shortest = times[i].begin - ends[a->microbatch];
            }
        }
        costs[stage].transfer = shortest > 0 ? shortest : 0;
    }
}

DDPDEF ddp_result ddp_pipeline_get_times(ddp_pipeline *pipeline, ddp_stage_cost *costs,
                                         ddp_action_time *times) {
    DDP_PUBLIC_CALL(ddp_pipeline_get_times);
    ddp_pipeline *p = pipeline;
    if (!p) return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_get_times: pipeline is NULL");
    DDP_TRY(ddp__pipe_check_has_step(p, "ddp_pipeline_get_times"));
    const ddp__pipe_measures *m = &p->run.measures[0];
    const int one_clock = ddp_local_world_size(p->group) == p->world_size;
    size_t count = (size_t)p->schedule->count;
    ddp_action_time *all = p->run.measures[1].times; /* scratch: no evaluation reads it later */
    double shift = 0; /* without a common clock, times count from each rank's start */
    memset(all, 0, count * sizeof *all);
    for (int rank = 0; rank < p->world_size && one_clock; rank++)
        if (m->starts[p->rank] - m->starts[rank] > shift) shift = m->starts[p->rank] - m->starts[rank];
    for (int i = p->schedule->first[p->rank]; i < p->schedule->first[p->rank + 1]; i++) {
        all[i].begin = m->times[i].begin + shift;
        all[i].end = m->times[i].end + shift;
    }
    DDP_TRY(ddp__pipe_group_failed(p->group, ddp__pipe_sum_over_ranks(p, all, 2 * count, DDP_F64)));
    if (costs) ddp__pipe_costs(p, costs);
    if (costs && one_clock) ddp__pipe_transfers(p, all, p->run.measures[1].losses, costs);
    if (times) memcpy(times, all, count * sizeof *times);
    return DDP_OK;
}

DDPDEF ddp_result ddp_pipeline_get_stats(const ddp_pipeline *pipeline, ddp_pipeline_stats *stats) {
    ddp_schedule_report report = DDP_ZERO;
    ddp_stage_cost *costs;
    ddp_result result;
    if (!pipeline || !stats)
        return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_get_stats: pipeline or stats is NULL");
    costs = (ddp_stage_cost *)ddp_host_alloc(pipeline->group, (size_t)pipeline->stage_count * sizeof *costs);
    if (!costs) return DDP_ERR_NO_MEMORY;
    *stats = pipeline->run.measures[0].stats;
    ddp__pipe_costs(pipeline, costs);
    result = ddp_schedule_simulate(pipeline->schedule, costs, &report);
    ddp_host_free(pipeline->group, costs);
    if (result == DDP_OK) stats->predicted_bubble_rate = report.bubble_rate;
    return result;
}

static int ddp__pipe_is_second_use(const ddp_pipeline *p, int stage, int param) {
    for (int i = 0; i < p->desc.tie_count; i++)
        if (p->desc.ties[i].second_stage == stage && p->desc.ties[i].second_param == param) return 1;
    return 0;
}

/* Adds the squares of every gradient of this rank to p->squares, or scales every gradient by factor. */
static void ddp__pipe_each_gradient(const ddp_pipeline *p, int squares, float factor) {
    ddp_tensor grads[DDP__PIPE_LIST];
    for (ddp__pipe_stage *s = ddp__pipe_next_stage(p, NULL); s; s = ddp__pipe_next_stage(p, s))
        for (int i = 0, count = 0; i < s->desc.param_count; i++) {
            int skipped = squares ? ddp__pipe_is_second_use(p, s->stage_index, i)
                                  : s->sums.gradients[i].count == 0;
            if (!skipped) grads[count++] = ddp_param_grad(s->desc.params[i]);
            if (count < DDP__PIPE_LIST && i + 1 < s->desc.param_count) continue;
            if (squares)
                p->device->sum_squares(p->squares, 0, grads, count);
            else
                p->device->scale(grads, count, factor);
            count = 0;
        }
}

DDPDEF ddp_result ddp_pipeline_clip_grad_norm(ddp_pipeline *pipeline, float max_norm, float *norm) {
    DDP_PUBLIC_CALL(ddp_pipeline_clip_grad_norm);
    ddp_pipeline *p = pipeline;
    ddp_exact_sum sum;
    float factor, unused;
    if (!p) return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_clip_grad_norm: pipeline is NULL");
    if (!(max_norm > 0))
        return ddp_fail(DDP_ERR_INVALID, "ddp_pipeline_clip_grad_norm: max_norm=%g; use a positive number",
                        (double)max_norm);
    if (p->no_clip)
        return ddp_fail(DDP_ERR_INVALID,
                        "ddp_pipeline_clip_grad_norm: no stage has params, or the gradients of a stage exist "
                        "only while unsharded; set params to full parameters");
    DDP_TRY(ddp__pipe_check_has_step(p, "ddp_pipeline_clip_grad_norm"));
    DDP_TRY(ddp__pipe_group_failed(p->group, ddp_device_begin(p->group)));
    p->device->fill_zero(p->squares, sizeof sum);
    ddp__pipe_each_gradient(p, 1, 0);
    p->device->copy(&sum, p->squares, sizeof sum);
    DDP_TRY(
        ddp__pipe_group_failed(p->group, ddp__pipe_sum_over_ranks(p, sum.cell, DDP_EXACT_CELLS, DDP_I64)));
    factor = ddp_clip_factor(&sum, max_norm, norm ? norm : &unused);
    if (factor == 1) return DDP_OK;
    ddp__pipe_each_gradient(p, 0, factor);
    return ddp_device_check(p->group);
}

//== public ============================================================================== >>impl-public
/* Public calls that create and read schedules. The other public calls are in the sections of their topics. */

DDPDEF const char *ddp_schedule_kind_name(ddp_schedule_kind kind) {
    return (int)kind >= 0 && kind < DDP_SCHEDULE_KIND_COUNT ? ddp__schedule_kind_names[kind]
                                                            : "unknown ddp_schedule_kind";
}

/* Maps a letter of a name for comparison: upper case to lower case, '_' to '-'. */
static int ddp__schedule_name_letter(char c) {
    if (c == '_') return '-';
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
}

DDPDEF ddp_result ddp_schedule_kind_find(const char *name, ddp_schedule_kind *kind) {
    if (!name || !kind) return ddp_fail(DDP_ERR_INVALID, "ddp_schedule_kind_find: name or kind is NULL");
    for (int k = 0; k < DDP_SCHEDULE_KIND_COUNT; k++) {
        const char *known = ddp__schedule_kind_names[k];
        size_t i = 0;
        while (name[i] && ddp__schedule_name_letter(name[i]) == ddp__schedule_name_letter(known[i])) i++;
        if (!name[i] && !known[i]) {
            *kind = (ddp_schedule_kind)k;
            return DDP_OK;
        }
    }
    return ddp_fail(
        DDP_ERR_INVALID,
        "ddp_schedule_kind_find: name \"%.40s\" is not a schedule; use 1F1B, naive, GPipe, interleaved-1F1B, "
        "looped-BFS, ZB-H1, ZB-H2, interleaved-ZB-1P, ZB-V, DualPipeV, PipeDream, PipeDream-2BW or AUTO",
        name);
}

DDPDEF ddp_result ddp_schedule_create(ddp_schedule **out, const ddp_schedule_desc *desc) {
    ddp_schedule_desc d;
    if (!out) return DDP__SCHEDULE_INVALID("out is NULL");
    *out = NULL;
    DDP_TRY(ddp__schedule_desc_resolve(desc, &d));
    return d.kind == DDP_SCHEDULE_AUTO ? ddp__schedule_generate_auto(out, &d)
                                       : ddp__schedule_generate(out, &d);
}

DDPDEF int ddp_schedule_rank_count(const ddp_schedule *schedule) {
    return schedule ? schedule->rank_count : 0;
}
DDPDEF int ddp_schedule_stage_count(const ddp_schedule *schedule) {
    return schedule ? schedule->stage_count : 0;
}
DDPDEF int ddp_schedule_microbatch_count(const ddp_schedule *schedule) {
    return schedule ? schedule->microbatch_count : 0;
}
DDPDEF int ddp_schedule_update_interval(const ddp_schedule *schedule) {
    return schedule ? schedule->update_interval : 0;
}
DDPDEF ddp_schedule_kind ddp_schedule_get_kind(const ddp_schedule *schedule) {
    return schedule ? schedule->kind : DDP_SCHEDULE_KIND_COUNT;
}

DDPDEF int ddp_schedule_stage_rank(const ddp_schedule *schedule, int stage) {
    return schedule && stage >= 0 && stage < schedule->stage_count ? schedule->stage_rank[stage] : -1;
}

DDPDEF const ddp_action *ddp_schedule_actions(const ddp_schedule *schedule, int rank, int *count) {
    static const ddp_action none = {DDP_ACTION_IDLE, -1, -1, 0};
    if (count) *count = 0;
    if (!schedule || rank < 0 || rank >= schedule->rank_count) {
        ddp_fail(DDP_ERR_INVALID, "ddp_schedule_actions: rank=%d with %d ranks; use 0 to rank_count - 1",
                 rank, schedule ? schedule->rank_count : 0);
        return NULL;
    }
    if (count) *count = schedule->first[rank + 1] - schedule->first[rank];
    return schedule->count ? schedule->actions + schedule->first[rank] : &none;
}

#endif /* DDP_IMPLEMENTATION or DDP_PIPELINE_IMPLEMENTATION */

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

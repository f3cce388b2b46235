/*  ddp_pipeline.h - pipeline parallelism: schedules as data, checked before they run, and a runner that loses nothing to them.

    A model is cut into stages that lie on different ranks; micro-batches flow through them, forward and back. Who computes what next is a list of
    actions per rank: generated, read from a file or made to measure, proven free of deadlocks, simulated, drawn, and then run.

USAGE
    #define DDP_IMPLEMENTATION             in exactly one source file of the program: the bodies of ddp.h and of this header
    #include "ddp_pipeline.h"
    Or DDP_PIPELINE_IMPLEMENTATION for the bodies of this header alone. Link with -lpthread -lm.

EXAMPLE
    #define DDP_IMPLEMENTATION
    #include "ddp_pipeline.h"
    #include <stdio.h>

    int main(void) {                                                  // what would 4 ranks lose with 8 micro-batches?
        static char picture[4096];
        ddp_schedule_kind kinds[] = {DDP_SCHEDULE_GPIPE, DDP_SCHEDULE_1F1B, DDP_SCHEDULE_ZB_H1, DDP_SCHEDULE_ZB_H2};
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
            printf("%s: bubble %.3f, %d micro-batches in flight\n%s\n", ddp_schedule_kind_name(kinds[k]), report.bubble_rate, report.peak_in_flight, picture);
            ddp_schedule_destroy(schedule);
        }
        return 0;
    }

CONTENTS      (search for the tags)
    >>config  >>types  >>descs  >>api  >>impl-structs  >>impl-public

CONCEPTS
    Stage      a contiguous part of the model, numbered from 0. With v chunks per rank there are p*v of them: "loop" puts stage s on rank s mod p,
               "V" puts stages r and 2p-1-r on rank r.
    Action     F forward; I gradient of the stage's inputs; W gradient of its weights; B = I and W in one; of one stage and one micro-batch.
               1F1B, p=3, m=4, a column per unit of time (B takes two), what stands between F and B of a micro-batch is in flight:

                   rank 0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
                   rank 1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
                   rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

    Bubble     time in which a rank could compute and does not. Splitting B fills it: I goes on to the rank that waits for it, W waits for a hole.
    Lowering   what a list of computations needs beside them: SEND and RECV, UNSHARD and RESHARD, REDUCE_GRAD.
    Edge       a tensor that goes from one stage to a later one, once per micro-batch, and whose gradient comes back.
    In flight  a micro-batch whose F of a stage has begun and whose W or B has not ended: the stage keeps its inputs and saved memory.
    Version    PipeDream and PipeDream-2BW update weights while micro-batches are in flight: a backward takes the weights of its forward.
    Update     gradients are added over update_interval micro-batches (all of the step, but for those two kinds), pairwise by index like a binary
               counter, whatever the order of the actions; then over replicas; then over the uses of a tied parameter; then weights change.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). A wrong schedule is answered with rank, position, action and why:
      ddp_schedule_check: rank 2 position 14 2I5: its forward 2F5 comes later on this rank, at position 17
    What fails in a step poisons the group, so that the step ends on every rank, and names stage, action and micro-batch:
      rank 1/4 ddp_pipeline_step group=pp: the callback of 1B3 (stage 1, backward of micro-batch 3) failed: loss is not finite

CONFIG MACROS (define before including)
    DDP_PIPELINE_IMPLEMENTATION   also compile the bodies of this header, here. DDP_IMPLEMENTATION does so too

NOT DONE HERE
    No autograd: the caller's callbacks compute. No sharding of a stage over ranks: hooks call ddp_fsdp.h, the reducer or tensor parallelism.
    No tied parameters with PipeDream and PipeDream-2BW, and no recomputation with them.
*/
#ifndef DDP_PIPELINE_H
#define DDP_PIPELINE_H

//== config ============================================================================================== >>config
#include "ddp.h"

#ifdef __cplusplus
extern "C" {
#endif

//== types ================================================================================================ >>types

typedef struct ddp_schedule ddp_schedule;
typedef struct ddp_pipeline ddp_pipeline;

/* One list gives the enum and the names. p ranks, m micro-batches, v chunks per rank; the bubble is that of equal stages, S = F + I + W of one.
   What a definition does not allow is DDP_ERR_INVALID that names the nearest m (or v) that it does. */
#define DDP_SCHEDULE_KINDS(X)                                                                                                             \
    X(DDP_SCHEDULE_1F1B, "1F1B")                 /* v=1. Bubble (p-1)S; min(m, p-r) in flight (PipeDream-Flush, Narayanan et al. 2021) */ \
    X(DDP_SCHEDULE_NAIVE, "naive")               /* any v. One micro-batch at a time */                                                   \
    X(DDP_SCHEDULE_GPIPE, "GPipe")               /* v=1. Bubble (p-1)S; m in flight (Huang et al. 2019) */                                \
    X(DDP_SCHEDULE_INTERLEAVED_1F1B, "interleaved-1F1B") /* any v, m a multiple of p. (p-1)S/v (Megatron-LM, Narayanan et al. 2021) */    \
    X(DDP_SCHEDULE_LOOPED_BFS, "looped-BFS")     /* any v. (p-1)S/v; mv in flight (Lamy-Poirier 2022) */                                  \
    X(DDP_SCHEDULE_ZB_H1, "ZB-H1")               /* v=1. (p-1)(F+I-W); p in flight (Zero Bubble, Qi et al. 2024) */                       \
    X(DDP_SCHEDULE_ZB_H2, "ZB-H2")               /* v=1. (p-1)(F+I-2W); 2p-1 in flight */                                                 \
    X(DDP_SCHEDULE_INTERLEAVED_ZB_1P, "interleaved-ZB-1P") /* any v, m a multiple of p. (p-1)(F+I-W)/v; vp in flight */                   \
    X(DDP_SCHEDULE_ZB_V, "ZB-V")                 /* V, v=2. None at equal costs; 2p in flight (Qi et al. 2024) */                         \
    X(DDP_SCHEDULE_DUALPIPE_V, "DualPipeV")      /* V, v=2, m >= 2p. F and B of different micro-batches overlap (DeepSeek 2025) */        \
    X(DDP_SCHEDULE_PIPEDREAM, "PipeDream")       /* v=1. An update every update_interval; p-r versions of weights (Harlap et al. 2018) */ \
    X(DDP_SCHEDULE_PIPEDREAM_2BW, "PipeDream-2BW") /* v=1, update_interval >= p. Two versions (Narayanan et al. 2021) */                  \
    X(DDP_SCHEDULE_AUTO, "AUTO")                 /* v=1. Built from costs under memory_limit, as Zero Bubble's ZB-1p and ZB-2p */

typedef enum ddp_schedule_kind {
#define DDP_X(kind, name) kind,
    DDP_SCHEDULE_KINDS(DDP_X)
#undef DDP_X
    DDP_SCHEDULE_KIND_COUNT
} ddp_schedule_kind;

/* What a rank does next, and how the CSV grammar spells it after the stage's number. */
#define DDP_ACTIONS(X)                                                                                                                    \
    X(DDP_ACTION_IDLE, "")                  /* an empty cell */                                                                           \
    X(DDP_ACTION_FORWARD, "F") X(DDP_ACTION_INPUT_GRAD, "I") X(DDP_ACTION_WEIGHT_GRAD, "W") X(DDP_ACTION_BACKWARD, "B")                   \
    X(DDP_ACTION_UNSHARD, "UNSHARD") X(DDP_ACTION_RESHARD, "RESHARD") X(DDP_ACTION_REDUCE_GRAD, "REDUCE_GRAD") /* no micro-batch */       \
    X(DDP_ACTION_SEND_F, "SEND_F") X(DDP_ACTION_RECV_F, "RECV_F") /* the stage is the one that sends, or receives: 0SEND_F2, 1RECV_F2 */  \
    X(DDP_ACTION_SEND_B, "SEND_B") X(DDP_ACTION_RECV_B, "RECV_B") /* gradients of its inputs to where they came from */

typedef enum ddp_action_kind {
#define DDP_X(kind, name) kind,
    DDP_ACTIONS(DDP_X)
#undef DDP_X
    DDP_ACTION_KIND_COUNT
} ddp_action_kind;

/* An entry of a rank's list. (0F7;7B3)OVERLAP_F_B is two of them, in that order. */
typedef struct ddp_action {
    ddp_action_kind kind;
    int stage;      /* -1: idle */
    int microbatch; /* -1: none */
    int overlaps;   /* 1 = runs together with the next entry of the list, its partner: an F, with an I, W or B after it (or the other way round) */
} ddp_action;

typedef enum ddp_schedule_format {
    DDP_SCHEDULE_CSV = 0, /* a line per rank, cells such as 2F0 between commas: PyTorch's grammar */
    DDP_SCHEDULE_TEXT,    /* a grid for a terminal: a line per rank, a column per unit of time */
    DDP_SCHEDULE_SVG,     /* coloured by action, with numbers, legend and bubble rate */
    DDP_SCHEDULE_TRACE    /* Chrome and Perfetto JSON, in microseconds when times are seconds */
} ddp_schedule_format;

/* Parts of ddp_schedule_lower. */
enum { DDP_LOWER_MERGE = 1, DDP_LOWER_SHARD = 2, DDP_LOWER_REDUCE = 4, DDP_LOWER_COMM = 8 };

//== descs ================================================================================================ >>descs

/* What an action of a stage takes, in any unit of time, and what a micro-batch in flight keeps. */
typedef struct ddp_stage_cost {
    double forward, input_grad, weight_grad; /* B takes input_grad + weight_grad */
    double transfer;          /* from this stage's end of F, or of I or B, to when its neighbour on another rank can begin */
    double overlapped;        /* F of this stage together with a B of another one; 0 = the sum of the two */
    double activation;        /* memory from F to the end of I or B; 0 = 1 */
    double weight_activation; /* memory from I to the end of W; 0 = activation */
} ddp_stage_cost;

typedef struct ddp_schedule_desc {
    ddp_schedule_kind kind;      /* 0 = 1F1B */
    int rank_count;              /* required; p */
    int microbatch_count;        /* required; m, of the whole list */
    int chunk_count;             /* v; 0 = 1, for the V kinds 2 */
    int update_interval;         /* PIPEDREAM, PIPEDREAM_2BW: weights change after so many micro-batches, a divisor of m; 0 = 1, for 2BW m */
    const ddp_stage_cost *costs; /* AUTO: of each stage; NULL = F = I = W = 1. Not kept */
    double memory_limit;         /* AUTO: per rank, in units of activation; 0 = p times the largest activation, that of 1F1B and ZB-H1 */
    void *(*alloc_fn)(size_t size_bytes, void *user); /* NULL = malloc; set both or neither */
    void (*free_fn)(void *memory, void *user);
    void *user;
} ddp_schedule_desc;

typedef struct ddp_rank_report {
    double begin, end;      /* of the rank's first and last action; span is the difference */
    double busy;            /* computing */
    int peak_in_flight;     /* stages times micro-batches between the start of F and the end of W or B */
    double peak_memory;     /* in units of activation */
    int weight_versions;    /* 1; PipeDream: as many as are in flight; PipeDream-2BW: 2 */
} ddp_rank_report;

typedef struct ddp_schedule_report {
    ddp_rank_report *ranks; /* set by the caller: room for rank_count entries, which are filled in; NULL = not wanted */
    double makespan;        /* from the first action of any rank to the last end */
    double span;            /* the longest of a rank: from its first F to its last W or B */
    double bubble_rate;     /* (span - work) / span, work: the most that a rank computes; Zero Bubble's measure */
    int peak_in_flight;     /* these three: the largest of any rank */
    double peak_memory;
    int weight_versions;
} ddp_schedule_report;

/* When an action ran, or would; seconds, or the unit of the costs. */
typedef struct ddp_action_time { double begin, end; } ddp_action_time;

/* A tensor that stage from gives to stage to > from for each micro-batch; to == stage count: to the loss. More than one between the same two
   stages, and edges that skip stages, are fine. data is not used. */
typedef struct ddp_pipeline_edge {
    int from, to;
    ddp_tensor tensor;    /* dtype and shape of one micro-batch */
    ddp_dtype grad_dtype; /* of what comes back; 0 = the tensor's */
    int no_grad;          /* 1 = nothing comes back (integers, masks); always so for integer dtypes */
} ddp_pipeline_edge;

/* What a callback of a stage is given. Arrays follow the order of the desc's edges: inputs are those that end here, outputs those that
   begin here. Memory is the group's device's, 64-byte aligned, and the runner's own; pointers are valid during the call alone. */
typedef struct ddp_pipeline_call {
    ddp_action_kind kind;            /* FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD; FORWARD for the loss too */
    int stage, microbatch;
    int evaluating;                  /* 1 = ddp_pipeline_evaluate: no backward follows, saved memory is scratch */
    int recomputing;                 /* 1 = F once more, just before I or B: same inputs, fills saved; outputs are scratch */
    int input_count, output_count;
    const ddp_tensor *inputs;        /* F I W B: to be read alone; the same bytes from F to W */
    const ddp_tensor *outputs;       /* F: to be written, all of it. Loss: what the last stage wrote. Otherwise NULL */
    const ddp_tensor *output_grads;  /* I W B: what came back, the same bytes in I and W; data is NULL for an edge without gradient. Loss: to be
                                        written, all of it; NULL when evaluating */
    const ddp_tensor *input_grads;   /* I B: to be written, all of it; data is NULL for an edge without gradient. F W: NULL */
    void *saved;                     /* saved_bytes of this micro-batch, 64-byte aligned: F fills it, I W B read it; I may leave there what W needs */
    double *loss;                    /* F of the last stage, and the loss callback: set it to the micro-batch's loss, not scaled; otherwise NULL */
    int version;                     /* of the weights that this action takes: how many updates, counted from create, they have seen. PipeDream: those
                                        before the micro-batch's F in its rank's list. 2BW: what makes update u takes version u-2, or 0. Evaluating: all */
} ddp_pipeline_call;

/* A result other than DDP_OK ends the step on all ranks; the text of ddp_fail, if set, goes into the error. */
typedef ddp_result (*ddp_pipeline_fn)(const ddp_pipeline_call *call, void *user);
typedef ddp_result (*ddp_stage_hook)(int stage, void *user);

/* One stage. Only the entries of this rank's stages are read. Callbacks run on the thread of ddp_pipeline_step, one at a time, in the order of the
   schedule; on a device with lanes they put their work on the compute lane. They may call collectives of groups other than the pipeline's. */
typedef struct ddp_pipeline_stage {
    const char *name;             /* appears in errors; NULL = "stage 3" and its like */
    ddp_pipeline_fn forward;      /* required */
    ddp_pipeline_fn backward;     /* B; NULL = input_grad, then weight_grad */
    ddp_pipeline_fn input_grad;   /* required where the schedule has I */
    ddp_pipeline_fn weight_grad;  /* required where the schedule has W */
    void *user;
    size_t saved_bytes;           /* per micro-batch in flight; 0 = none */
    int recompute;                /* 1 = saved memory is not kept from F to I or B: F runs again (Chen et al. 2016). Inputs are kept */
    /* NULL = the callbacks add gradients themselves. Otherwise W or B writes (not adds) one micro-batch's gradients to param->grad.data, the
       runner adds them pairwise by micro-batch index and leaves the sum there. Each is &param or &fsdp_param.param; its pointers are read anew for
       each action, as ddp_fsdp_unit_gather moves them. NULL grad.data at create: the runner's memory, set there. PipeDream and 2BW: the newest values
       stay where they are, and hooks see them there; during a callback that takes older ones, value.data points to the runner's copy, read alone */
    ddp_param *const *params;
    int param_count;
    int zero_gradients;           /* 1 = gradient memory is cleared before each W or B */
    /* Data parallelism. All may be NULL; each returns before its next call for this stage, and replicas call them in the same order. */
    ddp_stage_hook unshard;       /* before the stage's first action of a step, or where the list has UNSHARD: ddp_fsdp_unit_gather */
    ddp_stage_hook reshard;       /* after its last one, or at RESHARD: ddp_fsdp_unit_release */
    ddp_stage_hook reduce_grad;   /* after its last W or B of an update, or at REDUCE_GRAD; sums are in grad.data: ddp_reducer_ready, ddp_fsdp_unit_reduce */
    ddp_stage_hook wait_grad;     /* at the end of the update, for local stages in ascending order: ddp_reducer_wait */
    ddp_stage_hook update;        /* gradients are final: the optimizer's step on the newest values. Required by PipeDream and 2BW; NULL elsewhere =
                                     the caller steps after ddp_pipeline_step */
} ddp_pipeline_stage;

/* One parameter used by two stages, such as the embedding and the last projection: equal shapes and first values. */
typedef struct ddp_pipeline_tie {
    int first_stage, first_param;   /* first_param: index in that stage's params */
    int second_stage, second_param; /* a later stage, on the same rank or another one */
} ddp_pipeline_tie;

typedef struct ddp_pipeline_desc {
    const ddp_schedule *schedule;     /* required; outlives the pipeline. With or without SEND and RECV; rank_count is the group's world_size */
    const ddp_pipeline_stage *stages; /* required; stage-count entries, copied */
    ddp_tensor boundary;              /* what each stage gives to the next one, dtype and shape of one micro-batch; read when edges is NULL */
    ddp_tensor output;                /* what the last stage gives to the loss; read when edges is NULL; dtype 0 = nothing */
    const ddp_pipeline_edge *edges;   /* NULL = boundary and output; otherwise all of them, the same on every rank; copied */
    int edge_count;
    ddp_pipeline_fn loss;             /* NULL = the last stage's F sets *call->loss and its backward needs no output_grads; otherwise runs right after that F */
    void *loss_user;
    const ddp_pipeline_tie *ties;     /* the same on every rank; copied */
    int tie_count;
    int no_divide;                    /* 1 = gradients stay sums. 0 = after the last addition the runner divides once by update_interval, but for stages with
                                         reduce_grad: whoever adds over replicas divides (ddp_reducer_desc.micro_batch_count = update_interval) */
    int prefetch;                     /* 0 = 2; receives per edge and direction that are posted ahead of the action that needs them */
} ddp_pipeline_desc;

typedef struct ddp_pipeline_stats {
    uint64_t steps;
    double step_seconds;     /* of the last step, this rank; as all that follows */
    double compute_seconds;  /* in callbacks of F, I, W, B and the loss */
    double wait_seconds;     /* of an action whose inputs had not come */
    double update_seconds;   /* hooks, ties, division */
    double bubble_rate;      /* measured: (longest span - most compute) / longest span, over all ranks */
    double predicted_bubble_rate; /* ddp_schedule_simulate with the measured costs */
    size_t bytes_sent;
    size_t bytes_handed_over;   /* of these: read in place by the receiver */
    size_t activation_bytes;    /* what this object holds: inputs, saved memory, gradients that travel */
    size_t accumulation_bytes;  /* partial sums of gradients */
    size_t version_bytes;       /* stashed weights */
} ddp_pipeline_stats;

/* ddp_pipeline_profile */
typedef ddp_result (*ddp_layer_fn)(int layer, ddp_action_kind kind, void *user); /* runs FORWARD, INPUT_GRAD or WEIGHT_GRAD and returns when it is done */
typedef struct ddp_profile_desc {
    int layer_count;     /* required */
    ddp_layer_fn run;    /* required; for each layer and round: F, I, W in this order */
    void *user;
    int rounds;          /* 0 = 5; the median counts */
    int warmup_rounds;   /* 0 = 1; -1 = none */
} ddp_profile_desc;

//== api ==================================================================================================== >>api

/* --- schedules --- */

/* Makes the lists of a kind: F, I, W and B only; see ddp_schedule_lower. Not collective: the same desc gives the same schedule on every rank. *out is
   NULL on failure. Errors: DDP_ERR_INVALID names the field and the nearest value that works; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_schedule_create(ddp_schedule **out, const ddp_schedule_desc *desc);

/* Reads a CSV file's text: any number of ranks (lines), stages and micro-batches. Blanks around cells and lines without text at the end are ignored.
   It is synchronous: one update at the end. Its lists need not make sense: ddp_schedule_check tells. Errors: DDP_ERR_INVALID names line, cell and
   what is wrong; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_schedule_parse(ddp_schedule **out, const char *csv);

/* Writes a schedule with unit costs, as ddp_schedule_draw does. */
DDPDEF ddp_result ddp_schedule_write(const ddp_schedule *schedule, ddp_schedule_format format, char *out, size_t *size_bytes);

/* Draws it as it runs with these costs (an entry for each stage; NULL = F = I = W = 1), or as it ran: times has an entry for each action, rank after
   rank, NULL = none. *size_bytes: room at out; set to what the text takes with the 0 at its end. out NULL: only that. Errors: DDP_ERR_INVALID (too
   little room: nothing is written; a picture of a schedule that cannot run to its end). */
DDPDEF ddp_result ddp_schedule_draw(const ddp_schedule *schedule, ddp_schedule_format format, const ddp_stage_cost *costs, const ddp_action_time *times,
                                    char *out, size_t *size_bytes);

DDPDEF void ddp_schedule_destroy(ddp_schedule *schedule); /* NULL is ignored */

/* Makes the lists that a runner without foresight would need; parts: DDP_LOWER_... or 0 = all, in this order. MERGE: I and W of one micro-batch next
   to each other become B, empty cells go. SHARD: UNSHARD before a stage's first action and RESHARD after its last. REDUCE: REDUCE_GRAD after a
   stage's last W or B. COMM: SEND after what makes a tensor, RECV in the order of the sends of its peer, so that each SEND could meet its RECV
   without any buffer. A part that is there already is DDP_ERR_INVALID, as is a schedule that ddp_schedule_check refuses. */
DDPDEF ddp_result ddp_schedule_lower(ddp_schedule **out, const ddp_schedule *schedule, unsigned parts);

/* Proves that every micro-batch passes every stage once in each direction, each stage on one rank; that I and B follow F, W follows I, and each waits
   only for what can come; that SENDs and RECVs, if there are any, are complete and match in order; and that nothing waits in a circle when one
   message fits between two ranks. UNSHARD, RESHARD and REDUCE_GRAD, if there are any, are where they belong. DDP_ERR_INVALID: the line says rank,
   position (from 0) and action that is wrong, and why. */
DDPDEF ddp_result ddp_schedule_check(const ddp_schedule *schedule);

/* What the schedule takes when every action starts as soon as it can in its rank's order; costs as in ddp_schedule_draw. SEND and RECV take no time,
   cost->transfer passes between the ranks. Linear in the number of actions. DDP_ERR_INVALID for a schedule that cannot run to its end, or a negative
   cost. */
DDPDEF ddp_result ddp_schedule_simulate(const ddp_schedule *schedule, const ddp_stage_cost *costs, ddp_schedule_report *report);

DDPDEF int ddp_schedule_rank_count(const ddp_schedule *schedule);
DDPDEF int ddp_schedule_stage_count(const ddp_schedule *schedule);
DDPDEF int ddp_schedule_microbatch_count(const ddp_schedule *schedule);
DDPDEF int ddp_schedule_update_interval(const ddp_schedule *schedule); /* micro-batches per update; microbatch_count where there is one update */
DDPDEF ddp_schedule_kind ddp_schedule_get_kind(const ddp_schedule *schedule); /* of a parsed one: DDP_SCHEDULE_KIND_COUNT */
DDPDEF int ddp_schedule_stage_rank(const ddp_schedule *schedule, int stage); /* -1: on none */

/* The list of a rank; the schedule's own. *count (may be NULL) is its length. NULL, with ddp_last_error set, for a rank that there is not. */
DDPDEF const ddp_action *ddp_schedule_actions(const ddp_schedule *schedule, int rank, int *count);

/* "1F1B" and its like; static text. */
DDPDEF const char *ddp_schedule_kind_name(ddp_schedule_kind kind);

/* The kind of that name, upper or lower case, '_' for '-'. DDP_ERR_INVALID lists the names. */
DDPDEF ddp_result ddp_schedule_kind_find(const char *name, ddp_schedule_kind *kind);

/* --- balancing --- */

/* Cuts layers into contiguous stages, none empty, so that the largest sum of costs is as small as possible. first_layer: stage_count entries, stage s
   begins there. Sums are taken from left to right. DDP_ERR_INVALID: fewer layers than stages, or a cost that is negative or not finite. */
DDPDEF ddp_result ddp_pipeline_partition(const double *cost, int layer_count, int stage_count, int *first_layer);

/* The same where stage s may hold at most memory_limit[s] of the sum of its layers' memory. DDP_ERR_INVALID also when no cut fits: names the stage
   reached. */
DDPDEF ddp_result ddp_pipeline_partition_memory(const double *cost, const double *memory, const double *memory_limit, int layer_count, int stage_count,
                                                int *first_layer);

/* Measures each layer by running it: forward, input_grad and weight_grad of cost[0] to cost[layer_count - 1], in seconds; the rest of an entry stays.
   */
DDPDEF ddp_result ddp_pipeline_profile(const ddp_profile_desc *desc, ddp_stage_cost *cost);

/* --- runner --- */

/* Checks the schedule, lays out all memory that steps will need, and connects the ranks: rank r of the group runs list r. Collective. While the
   pipeline lives, the group is its own. Errors, *out is NULL: DDP_ERR_INVALID names stage or edge (a callback that is missing, a shape; an edge to an
   earlier stage); what ddp_schedule_check finds; DDP_ERR_MISMATCH on every rank when schedules, edges or ties differ; DDP_ERR_NO_MEMORY. */
DDPDEF ddp_result ddp_pipeline_create(ddp_pipeline **out, ddp_group *group, const ddp_pipeline_desc *desc);

/* Runs the schedule once: all micro-batches, both ways, with the updates that fall into it. Collective, blocks. Afterwards gradients of the last
   update are final in grad.data, the same bits as one process gets that adds the micro-batches pairwise. After the first step it allocates nothing.
   Errors, on every rank: the result of the callback that failed, DDP_ERR_PEER_LOST, DDP_ERR_TIMEOUT; the line names stage, action and micro-batch. */
DDPDEF ddp_result ddp_pipeline_step(ddp_pipeline *pipeline);

/* Forward alone, in the schedule's order of F, with the newest weights. Collective, blocks. */
DDPDEF ddp_result ddp_pipeline_evaluate(ddp_pipeline *pipeline);

/* Losses of the last step or evaluation, on every rank: *mean is the pairwise sum over micro-batches divided once, each (may be NULL) has
   microbatch_count entries. */
DDPDEF ddp_result ddp_pipeline_get_loss(const ddp_pipeline *pipeline, double *mean, double *each);

/* What the last step's actions took: costs (stage-count entries, in seconds, means over micro-batches) for AUTO, the simulator and
   ddp_pipeline_partition; times (an entry for each action of all ranks, rank after rank, since the step's start) for ddp_schedule_draw. Either may be
   NULL. Collective; every rank gets all. */
DDPDEF ddp_result ddp_pipeline_get_times(ddp_pipeline *pipeline, ddp_stage_cost *costs, ddp_action_time *times);

DDPDEF ddp_result ddp_pipeline_get_stats(const ddp_pipeline *pipeline, ddp_pipeline_stats *stats);

/* Scales all gradients by max_norm / norm when the global norm over all stages exceeds max_norm; after ddp_pipeline_step, for whole (unsharded)
   gradients. A tied parameter counts once, as the sum. *norm (may be NULL) is the norm before. Squares add per row in a fixed order and rows exactly,
   so that the cut into stages cannot change the result. Collective. A norm that is not finite scales nothing. */
DDPDEF ddp_result ddp_pipeline_clip_grad_norm(ddp_pipeline *pipeline, float max_norm, float *norm);

/* Frees everything; gradient memory it placed is the runner's. Collective. NULL is ignored. */
DDPDEF void ddp_pipeline_destroy(ddp_pipeline *pipeline);

#ifdef __cplusplus
}
#endif
#endif /* DDP_PIPELINE_H */

#if (defined(DDP_IMPLEMENTATION) || defined(DDP_PIPELINE_IMPLEMENTATION)) && !defined(DDP_PIPELINE_IMPLEMENTATION_INCLUDED)
#define DDP_PIPELINE_IMPLEMENTATION_INCLUDED

//== structs ======================================================================================== >>impl-structs
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

//== public ========================================================================================= >>impl-public

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

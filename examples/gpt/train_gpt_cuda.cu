/*  train_gpt_cuda.cu - train_gpt on GPUs: bf16 with f32 master values, under every strategy, in one file.

USAGE
    nvcc -std=c++17 -O3 -arch=native examples/gpt/train_gpt_cuda.cu -o train_gpt_cuda -lcublasLt -lnccl -lpthread -lm
    ./train_gpt_cuda [flags] [files or folders]         one GPU; --help lists the flags
    ./train_gpt_cuda --gpus 0,1,2,3 --strategy full     a rank per GPU. Several may share one: --gpus 0,0, through host memory and slow
    ./train_gpt_cuda --layers 12 --heads 12 --channels 768 --context 1024 --micro-batch 32 --batch 32 --lr 6e-4 data/train_000.bin
    torchrun --no-python --nproc_per_node 8 ./train_gpt_cuda --stages 2 --tp 2

    Text is bytes, a vocabulary of 256, or token shards of llm.c, a vocabulary of 50257; a folder of shards is one stream, in the order of their names. Shards
    are not kept in memory: rank 0 reads all of them once at the start, and each rank a window when a batch needs it. --init takes first values from a GPT-2
    checkpoint of llm.c.

RANKS
    pp x dp x tp of them, as in train_gpt_3d: --stages along pp, --tp along tp, and what is left along dp, where --strategy says what ranks split.
    A group of GPUs is made along each axis.

    Without --stages the model's units are gathered and released one by one, as in train_gpt_fsdp: full and grad add gradients over ranks after each
    micro-batch, and micro-batch i belongs to rank i % ranks. With --stages each rank has one stage, which is gathered whole, as in train_gpt_3d.

A STEP
    The host puts a step on the streams and does not wait inside of it. While the device works at step s, the host packs the windows of step s + 1, which a
    copy stream takes to the device, and puts its micro-batches behind. Only then it waits for step s, whose loss and norm lie in pinned memory, and puts the
    update of step s + 1 behind: the device always has work. So the progress line, and a loss that is not a number, come one step late.

        host     pack 1 | micro-batches 1, update 1 | pack 2 | micro-batches 2 | read 1 | update 2 | pack 3 | micro-batches 3 | read 2 | ...
        copies         1                                   2                                             3
        device            | step 1                                             | step 2                                        | step 3

    On one rank, but for --offload, forward and backward of a micro-batch are one CUDA graph. Gradients are then kept whole under every --strategy, as one
    rank has nothing to split. So it is on several ranks for micro-batches in which optim and none put nothing between units: all but a step's first and
    last. Elsewhere each unit's forward and backward is a graph of its own, and gathers and reductions are calls: launches of a graph that has them would
    have no sequence numbers, no comparison with other ranks' calls and no timeouts. A rank that died would then be waited for without end. Norm and
    optimizer are launched by themselves, as their step and learning rate are the host's.

    With --stages the runner waits at the end of each step, and ranks that share a GPU wait for each other inside of it. --timeline draws it as it was,
    --profile says what each kernel took.

BITS
    Gradients are added in f32, in the tree of train_gpt, whatever --dtype: the same --batch and --micro-batch give the same weights on any number of
    GPUs along dp and under any strategy, and in every run. Not across --tp, and not across kinds of GPU.

CHECKPOINTS
    --checkpoint FILE is the format of train_gpt: f32 values and moments, which either program goes on from. A FOLDER, one that is there or ends in a slash,
    is written by all ranks together: train_gpt_fsdp reads it, with --tp 2 or more train_gpt_3d.

    It has run on the fake machine of tests/support, on up to 6 ranks; what has run on a GPU is in bench/README.md. */
#define DDP_IMPLEMENTATION
#include "gpt_cuda.cuh"
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#define TRAIN_PROMISE \
    "The same --batch, --micro-batch and --tp give the same weights on any number of GPUs, bit for bit."
#define TRAIN_RANKS "one per entry of --gpus, or as many as --stages and --tp need"
#include "checkpoint.h"
#include "folder.h"
#include "../extras/llmc.h"
#include "train.h"
#define TRY DDP_TRY
#define WRONG(...) ddp_fail(DDP_ERR_INVALID, __VA_ARGS__)

#include <float.h>

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--gpus", FLAG_TEXT, NOT_SAVED, AT(gpus), 0, 0,
     "LIST devices, such as 0,2: local rank r takes the r-th, round and round; default: by local rank"},
    {"--dtype", FLAG_TEXT, NOT_SAVED, AT(dtype), 0, 0,
     "NAME what the model computes in: bf16 (default) or f32"},
    {"--strategy", FLAG_TEXT, NOT_SAVED, AT(strategy), 0, 0,
     "NAME what ranks split: full (ZeRO-3, default), grad (ZeRO-2), optim (ZeRO-1) or none"},
    {"--stages", FLAG_INT32, NOT_SAVED, AT(stages), 1, DDP_MAX_LOCAL_RANKS,
     "N stages of the pipeline; default 1"},
    {"--schedule", FLAG_TEXT, NOT_SAVED, AT(schedule), 0, 0,
     "NAME of the pipeline: 1F1B (default), GPipe or naive"},
    {"--tp", FLAG_INT32, NOT_SAVED, AT(tensor), 1, DDP_MAX_LOCAL_RANKS,
     "N GPUs that heads and hidden channels are cut over; default 1"},
    RECOMPUTE_FLAG,
    {"--offload", FLAG_SWITCH, NOT_SAVED, AT(offload), 0, 1, "master values and moments lie in host memory"},
    {"--memory-limit", FLAG_INT32, NOT_SAVED, AT(memory_limit), 1, 1e9,
     "MIB that a rank may be expected to take of its GPU; default: what is\n"
     "                        free. What CUDA keeps there for graphs and libraries is not counted"},
    {"--no-graphs", FLAG_SWITCH, NOT_SAVED, AT(no_graphs), 0, 1,
     "launch kernels one by one, not as CUDA graphs of micro-batches and units; so it is with\n"
     "                        --tp 2 or more"},
    {"--timeline", FLAG_TEXT, NOT_SAVED, AT(timeline), 0, 0,
     "FILE write what host and device did in three steps, for chrome://tracing or Perfetto; a CUDA\n"
     "                        graph is one span, so that with --no-graphs there are more"},
    {"--profile", FLAG_SWITCH, NOT_SAVED, AT(profile), 0, 1,
     "print what each kernel took in one step; without graphs"},
    {"--init", FLAG_TEXT, NOT_SAVED, AT(init), 0, 0,
     "FILE first values from a GPT-2 checkpoint of llm.c, which also says the model's shape"},
    {"--write-random", FLAG_TEXT, NOT_SAVED, AT(write_random), 0, 0,
     "FILE write such a checkpoint with random values, GPT-2 124M but for flags, and end"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0,
     "PATH save there at every validation and at the end: a file, or a folder"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0,
     "PATH go on from a checkpoint, on any number of ranks under any strategy; a folder only with\n"
     "                        --tp 1 where that was so, and with 2 or more where it was more"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "this text"},
};
static const run_program PROGRAM = {"train_gpt_cuda", "trains a GPT on bytes or tokens on GPUs", FLAGS,
                                    (int)(sizeof FLAGS / sizeof FLAGS[0])};

enum { GPU_LIST = 64, TRACE_STEPS = 3 };

#define MIB 1048576.0
#ifndef WITHOUT_WAITING
#define WITHOUT_WAITING(call) (call) /* tests look whether it waits for the device */
#endif
#define CUDA(call)                                                            \
    do {                                                                      \
        cudaError_t cuda_error = (call);                                      \
        if (cuda_error != cudaSuccess) return cuda_failed(#call, cuda_error); \
    } while (0)

/* "cudaMemcpyAsync: out of memory (cudaErrorMemoryAllocation)" */
static ddp_result cuda_failed(const char *call, cudaError_t error) {
    return ddp_fail(error == cudaErrorMemoryAllocation ? DDP_ERR_NO_MEMORY : DDP_ERR_ENGINE, "%.*s: %s (%s)",
                    (int)strcspn(call, "("), call, cudaGetErrorString(error), cudaGetErrorName(error));
}

//== flags ================================================================================================== >>flags

/* "0,2" or "0 2" as numbers. How many; -1: this is no such list. */
static int read_gpus(const char *text, int *gpus) {
    int count = 0;
    while (text && *text) {
        char *end;
        long number = strtol(text, &end, 10);
        if (end == text || number < 0 || number > 4095 || count == GPU_LIST || (*end && !strchr(", ", *end)))
            return -1;
        gpus[count++] = (int)number;
        text = end + strspn(end, ", ");
    }
    return count;
}

/* What stands behind a list of devices that has blanks, as in --gpus 0 2: a number, and no file. NULL: nothing does. */
static const char *stray_gpu(const run_options *o) {
    for (int i = 0; o->gpus && i < o->path_count; i++)
        if (o->paths[i][0] && !o->paths[i][strspn(o->paths[i], "0123456789, ")]
            && access(o->paths[i], F_OK) != 0)
            return o->paths[i];
    return NULL;
}

/* What is wrong with single flags, and what follows from them before ranks start: how many to start where --ranks does not say. */
static int check_flags(run_options *o) {
    int gpus[GPU_LIST], strategy = find_strategy(o->strategy), count = read_gpus(o->gpus, gpus);
    int64_t least = (int64_t)(o->stages ? o->stages : 1) * (o->tensor ? o->tensor : 1);
    o->reads_tokens = 1;
    o->round_robin = !(o->stages > 1) && (strategy == DDP_FSDP_FULL_SHARD || strategy == DDP_FSDP_SHARD_GRAD);
    if (o->wrong[0]) return 1;
    if (strategy == STRATEGY_COUNT)
        snprintf(o->wrong, sizeof o->wrong, "--strategy %.60s: give full, grad, optim or none", o->strategy);
    else if (o->dtype && strcmp(o->dtype, "bf16") && strcmp(o->dtype, "f32"))
        snprintf(o->wrong, sizeof o->wrong, "--dtype %.60s: give bf16 or f32", o->dtype);
    else if (count < 0)
        snprintf(o->wrong, sizeof o->wrong, "--gpus %.60s: give up to %d numbers of devices, such as 0,2",
                 o->gpus, GPU_LIST);
    else if (stray_gpu(o))
        snprintf(o->wrong, sizeof o->wrong,
                 "--gpus %.60s, and %.60s is no file: put commas between devices, --gpus %.60s,%.60s",
                 o->gpus, stray_gpu(o), o->gpus, stray_gpu(o));
    else if (o->init && o->resume)
        snprintf(o->wrong, sizeof o->wrong,
                 "--init and --resume both say where values come from; leave one of them out");
    if (o->wrong[0] || least > DDP_MAX_LOCAL_RANKS)
        return 1; /* more are a launcher's; without one, the only rank says so */
    return count > least ? count : (int)least;
}

/* --write-random: GPT-2 124M, but for flags. The status of the process. */
static int write_random(const run_options *o) {
    llmc_header h = llmc_gpt2_124m();
    const run_config *c = &o->config;
    if (c->layers) h.config.layers = c->layers;
    if (c->heads) h.config.heads = c->heads;
    if (c->channels) h.config.channels = c->channels;
    if (c->context) h.config.context = c->context;
    h.dtype = o->dtype && !strcmp(o->dtype, "bf16") ? DDP_BF16 : DDP_F32;
    if (llmc_write_random(o->write_random, &h, c->seed < 0 ? 1 : (uint64_t)c->seed) != DDP_OK) {
        fprintf(stderr, "%s: %s\n", o->program->name, ddp_last_error());
        return 1;
    }
    printf("%s: %d layers, %d heads, %d channels, context %d, %lld bytes\n", o->write_random, h.config.layers,
           h.config.heads, h.config.channels, h.config.context, (long long)llmc_file_bytes(&h));
    return 0;
}

//== trainer ============================================================================================== >>trainer

/* A box of a parameter, as ddp_fsdp has it. With stages every rank has some of every parameter, so that all list the same tensors: of other stages',
   no rows. */
typedef struct slice {
    int param, box, unit; /* unit: of ddp_fsdp, */
    int place;            /* and its place there */
    int here;             /* this rank's stage has it */
    int counted; /* of the ranks that have the same, this is the one that counts for norm, hash and checkpoint */
    gpt_cuda_box at; /* in the whole parameter */
    char name[40];
} slice;

/* Something that was done: by the host from begin to end, by the device between two events. */
typedef struct span {
    const char *name;
    int unit, step;
    double begin, end;    /* seconds */
    cudaEvent_t from, to; /* NULL: the host alone */
} span;

/* What ran until the event, since the mark before it. */
typedef struct mark {
    const char *name;
    double flops, bytes;
    cudaEvent_t event;
} mark;

/* One rank. */
typedef struct trainer {
    struct run run;
    ddp_dtype dtype;
    ddp_fsdp_strategy strategy;
    int pp, dp, tp, stage, replica, tensor_rank;
    int device, sharing, any_share; /* its GPU, how many ranks use it, and whether any GPU has several */
    ddp_mesh *mesh;
    ddp_group *along_pp, *along_dp, *along_tp; /* GPUs along an axis; NULL for pp and tp where there is one */
    ddp_group *everybody; /* all GPUs, for the norm where pp or tp cut the model; otherwise NULL */
    const ddp_device *memory;
    cudaStream_t stream, copies;
    gpt_cuda_desc desc;
    gpt_cuda *model;
    int param_count, unit_count, first_unit,
        end_unit;     /* the model's; this rank's units are first_unit to end_unit - 1 */
    int *stage_begin; /* the first unit of each stage, and one more */

    int slice_count;
    slice *slices;
    int *slice_of;          /* param_count + 1: where a parameter's slices begin */
    ddp_fsdp_param *params; /* slice_count, as these */
    ddp_fsdp_unit_desc *units;
    ddp_fsdp *fsdp;
    ddp_fsdp_state state;  /* what a checkpoint keeps beside tensors */
    unsigned char *narrow; /* with stages and bf16: gradients of a unit as backward writes them */
    float *whole;          /* host memory: room for the largest parameter */

    ddp_loader *loader;
    int micro_count,
        loaded_first; /* micro-batches of this rank in a step; the first of them among those that the loader gives, */
    int loaded_every; /* and from one to the next */
    size_t batch_ints;
    int32_t *pinned[2],
        *staged
            [2]; /* micro_count batches of a step on their way: on the host, on the device; by the step's parity */
    int32_t **batch; /* on the device, one per slot: where the model reads */
    void *(*tables)
        [3
         * GPT_BLOCK_PARAMS]; /* for micro-batches in one graph: values of each unit, then gradients of each, */
    void *const **table_of;   /* and a pointer to each of these */
    double *sums[2];          /* pinned: the losses of a step */
    float *norms;             /* pinned: of two steps, where the model is cut; */
    ddp_exact_sum
        *squares; /* on the device: their squares, and behind them what gradients are multiplied by */
    cudaEvent_t copied[2], done[2];

    ddp_schedule *schedule;
    ddp_pipeline *pipeline;
    ddp_param **pointers; /* of this stage's parameters */
    int slots, *slot_of, *free_slots,
        free_count;     /* slots of the model: by micro-batch; those that are free */
    int parity;         /* of the step under way */
    int64_t validating; /* number of this replica's first validation micro-batch of an evaluation */
    ddp_pipeline_stats stats;

    llmc_model init;   /* --init */
    text_buffer saved; /* rank 0, while it plans: the file of --resume, whose header is in saved_header */
    checkpoint_header saved_header;
    const unsigned char *mapped; /* the same file, on every rank, */
    size_t mapped_bytes;
    int64_t *offset; /* and where in it a parameter's values begin, in elements; -1: it shares another's */

    size_t needed; /* bytes of GPU memory that were asked for */
    int trace_first, trace_last, tracing, step;
    span *spans;
    int span_count, span_room;
    cudaEvent_t origin;
    double origin_seconds, host_seconds,
        since; /* host_seconds: to put steps on the streams; since: until then train_seconds has counted */
    mark *marks;
    int mark_count, mark_room, profiling;
} trainer;

static int is_last(const trainer *t) { return t->stage == t->pp - 1; }
static size_t element_bytes(const trainer *t) { return ddp_dtype_size(t->dtype); }
static int is_folder(const char *path) {
    struct stat info;
    return path && (path[strlen(path) - 1] == '/' || (stat(path, &info) == 0 && S_ISDIR(info.st_mode)));
}

//== plan ==================================================================================================== >>plan

/* What flags leave open of the mesh. */
static void find_mesh(trainer *t) {
    const run_options *o = t->run.options;
    t->pp = o->stages ? o->stages : 1;
    t->tp = o->tensor ? o->tensor : 1;
    t->dp = t->run.world_size / (t->pp * t->tp);
    if (t->dp < 1) t->dp = 1;
    t->dtype = o->dtype && !strcmp(o->dtype, "f32") ? DDP_F32 : DDP_BF16;
    t->strategy = (ddp_fsdp_strategy)find_strategy(o->strategy);
}

static ddp_result make_schedule(trainer *t) {
    const run_config *c = &t->run.plan.config;
    const char *name = t->run.options->schedule;
    ddp_schedule_desc desc = DDP_ZERO;
    if (name) TRY(ddp_schedule_kind_find(name, &desc.kind));
    if (desc.kind != DDP_SCHEDULE_1F1B && desc.kind != DDP_SCHEDULE_GPIPE && desc.kind != DDP_SCHEDULE_NAIVE)
        return WRONG("--schedule %s takes backward apart, several stages per rank or late weights, which is "
                     "not done here; use 1F1B, GPipe or naive",
                     name);
    desc.rank_count = t->pp;
    desc.microbatch_count = c->batch / c->micro_batch / t->dp;
    return ddp_schedule_create(&t->schedule, &desc);
}

/* What the model is made from, without the group along tp. */
static void describe_model(trainer *t) {
    const run_config *c = &t->run.plan.config;
    const run_options *o = t->run.options;
    gpt_cuda_desc *d = &t->desc;
    memset(d, 0, sizeof *d);
    d->config = run_model_config(&t->run);
    d->dtype = t->dtype;
    d->batch = c->micro_batch;
    d->length = c->context;
    d->slots = t->slots ? t->slots : 1;
    d->recompute = o->recompute;
    d->graphs = !o->no_graphs && !o->profile && t->tp == 1;
    d->first_unit = t->first_unit;
    d->end_unit = t->end_unit;
    d->tensor_ranks = t->tp;
    d->tensor_rank = t->tensor_rank;
}

/* Rank 0: the shape that --init says, where flags leave it open. */
static ddp_result plan_init(trainer *t, run_options *o) {
    TRY(llmc_open(&t->init, o->init));
    const gpt_config has = t->init.header.config;
    const struct {
        int32_t *flag;
        int value;
        const char *name;
    } fields[] = {
        {&o->config.layers, has.layers, "--layers"},
        {&o->config.heads, has.heads, "--heads"},
        {&o->config.channels, has.channels, "--channels"},
    };
    for (int i = 0; i < 3; i++) {
        if (*fields[i].flag && *fields[i].flag != fields[i].value)
            return WRONG("--init %s has %s %d, not %d; leave %s out", o->init, fields[i].name,
                         fields[i].value, *fields[i].flag, fields[i].name);
        *fields[i].flag = fields[i].value;
    }
    if (!o->config.context) o->config.context = has.context;
    if (o->config.context <= has.context) return DDP_OK;
    return WRONG("--init %s has positions for --context %d, not %d; use that or less", o->init, has.context,
                 o->config.context);
}

static ddp_result check_mesh(const trainer *t) {
    int ranks = t->run.world_size, rest = t->pp * t->tp, units = t->run.plan.config.layers + 2;
    if (rest > ranks && rest > DDP_MAX_LOCAL_RANKS)
        return WRONG("--stages %d x --tp %d are %d ranks, and there are %d; start as many under torchrun, or "
                     "use %d at most",
                     t->pp, t->tp, rest, ranks, DDP_MAX_LOCAL_RANKS);
    if (ranks % rest || t->pp * t->dp * t->tp != ranks)
        return WRONG("--stages %d x --tp %d does not divide %d ranks; use --ranks %d", t->pp, t->tp, ranks,
                     (ranks + rest - 1) / rest * rest);
    if (t->run.plan.config.layers && t->pp > units)
        return WRONG("--stages %d: stages for an embedding, %d blocks and a head; use --layers %d or more",
                     t->pp, units - 2, t->pp - 2);
    return DDP_OK;
}

/* Rank 0: everything that can be wrong with the input is found here, before a GPU is asked for and before anything is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    run_options options = *r->options;
    const run_options *o = &options;
    const char *wrong;
    run_saved saved;
    memset(&saved, 0, sizeof saved);
    TRY(check_options(o, r->world_size));
    TRY(check_mesh(t));
    if (o->checkpoint)
        TRY(is_folder(o->checkpoint) ? folder_check(o->checkpoint) : check_writable(o->checkpoint));
    if (o->timeline) TRY(check_writable(o->timeline));
    if (o->init) TRY(plan_init(t, &options));
    if (o->resume && is_folder(o->resume)) {
        TRY(folder_read(o, &saved));
        TRY(folder_check_qkv(o->resume, t->tp > 1,
                             t->tp > 1 ? "use --tp 1, or go on with train_gpt_fsdp"
                                       : "use --tp 2 or more, or go on with train_gpt_3d"));
    } else if (o->resume) {
        TRY(checkpoint_read(o->resume, &t->saved, &t->saved_header));
        saved = t->saved_header.run;
    }
    TRY(make_plan(&r->plan, o, t->dp, o->resume ? &saved : NULL, &r->text));
    if (o->init && t->init.header.config.vocab != plan_vocab(&r->plan))
        return WRONG("--init %s has a vocabulary of %d, and the text one of %d; give token shards for "
                     "GPT-2's, text for one of 256",
                     o->init, t->init.header.config.vocab, plan_vocab(&r->plan));
    TRY(check_mesh(t));
    if (t->pp > 1 || o->schedule) TRY(make_schedule(t));
    ddp_schedule_destroy(t->schedule);
    t->schedule = NULL;
    describe_model(t);
    wrong = gpt_cuda_check(&t->desc);
    return wrong ? WRONG("%s", wrong) : DDP_OK;
}

/* Cuts the units into stages, blocks and a head by their cost. */
static ddp_result cut_stages(trainer *t) {
    double *cost;
    ddp_result result;
    t->unit_count = t->run.plan.config.layers + 2;
    t->stage_begin = (int *)calloc((size_t)t->pp + 1, sizeof *t->stage_begin);
    cost = (double *)calloc((size_t)t->unit_count, sizeof *cost);
    if (!cost || !t->stage_begin) {
        free(cost);
        return run_out_of_memory();
    }
    for (int u = 0; u < t->unit_count; u++) cost[u] = unit_cost(&t->run.plan, u);
    result = ddp_pipeline_partition(cost, t->unit_count, t->pp, t->stage_begin);
    free(cost);
    t->stage_begin[t->pp] = t->unit_count;
    t->first_unit = t->stage_begin[t->stage];
    t->end_unit = t->stage_begin[t->stage + 1];
    return result;
}

/* How many micro-batches a stage has under way at most: slots of the model. */
static ddp_result count_slots(trainer *t) {
    ddp_rank_report *ranks = (ddp_rank_report *)calloc((size_t)t->pp, sizeof *ranks);
    ddp_schedule_report report = DDP_ZERO;
    ddp_result result = ranks ? DDP_OK : run_out_of_memory();
    report.ranks = ranks;
    if (result == DDP_OK) result = ddp_schedule_simulate(t->schedule, NULL, &report);
    if (result == DDP_OK) t->slots = ranks[t->stage].peak_in_flight;
    free(ranks);
    return result;
}

/* The rest of what follows from the plan, without a GPU: places on the mesh, stages, slots. Collective. */
static ddp_result place_rank(trainer *t) {
    run *r = &t->run;
    ddp_mesh_desc mesh = DDP_ZERO;
    mesh.ndim = 3, mesh.names[0] = "pp", mesh.names[1] = "dp", mesh.names[2] = "tp";
    mesh.shape[0] = t->pp, mesh.shape[1] = t->dp, mesh.shape[2] = t->tp;
    TRY(ddp_mesh_create(&t->mesh, r->world, &mesh));
    t->stage = ddp_rank(ddp_mesh_group(t->mesh, "pp"));
    t->replica = ddp_rank(ddp_mesh_group(t->mesh, "dp"));
    t->tensor_rank = ddp_rank(ddp_mesh_group(t->mesh, "tp"));
    t->slots = 1;
    TRY(cut_stages(t));
    if (t->pp > 1) {
        TRY(make_schedule(t));
        TRY(count_slots(t));
    }
    describe_model(t);
    TRY(run_build_arrays(r));
    t->param_count = gpt_param_count(&t->desc.config);
    t->micro_count = r->plan.config.batch / r->plan.config.micro_batch / t->dp;
    t->batch_ints = gpt_cuda_batch_ints(r->plan.config.micro_batch * r->plan.config.context);
    return DDP_OK;
}

//== parameters ======================================================================================== >>parameters

/* "h.0.attn.qkv.weight" becomes "h.0.attn.q.weight" and its like where queries, keys and values are cut: each is a tensor of the checkpoint, and this
   rank's rows of it are one box. */
static void describe_slice(trainer *t, slice *s, ddp_fsdp_param *p, int boxes) {
    const gpt_param *info = &t->run.infos[s->param];
    const char *fused = boxes == 3 ? strstr(info->name, "qkv") : NULL;
    int64_t third = info->shape[0] / boxes;
    int cut = s->at.rows != third || s->at.columns != info->shape[1];
    if (fused)
        snprintf(s->name, sizeof s->name, "%.*s%c%s", (int)(fused - info->name), info->name, "qkv"[s->box],
                 fused + 3);
    else
        snprintf(s->name, sizeof s->name, "%s", info->name);
    s->here = (info->unit >= t->first_unit && info->unit < t->end_unit) || (s->param == 0 && is_last(t));
    s->counted = s->here && info->tied_to < 0 && (s->param != 0 || t->stage == 0)
                 && (cut || t->tensor_rank == 0);
    run_describe(&t->run, s->param, &p->param);
    p->param.name = s->name;
    p->param.value.shape[0] = s->here ? s->at.rows : 0;
    if (info->ndim > 1) p->param.value.shape[1] = s->at.columns;
    if (t->tp > 1 || t->pp > 1) {
        p->global_shape[0] = third, p->global_offset[0] = s->at.row - s->box * third;
        if (info->ndim > 1) p->global_shape[1] = info->shape[1], p->global_offset[1] = s->at.column;
    }
    p->index = (int)(s - t->slices);
    if (info->tied_to >= 0) p->tied_to = t->run.infos[info->tied_to].name;
    if (t->pp > 1 && t->dtype == DDP_BF16) p->param.grad.dtype = DDP_F32; /* the runner adds micro-batches */
}

/* What ddp_fsdp needs of the parameters: units as in train_gpt_fsdp, or the stage as one. The head's matrix is a second use of the embedding's; with stages
   both the first and the last have "wte", the same rows with the same gradients. */
static ddp_result build_slices(trainer *t) {
    size_t room = 3 * (size_t)t->param_count;
    int fsdp_units = t->pp > 1 ? 1 : t->unit_count;
    t->slices = (slice *)calloc(room, sizeof *t->slices);
    t->params = (ddp_fsdp_param *)calloc(room, sizeof *t->params);
    t->pointers = (ddp_param **)calloc(room, sizeof *t->pointers);
    t->slice_of = (int *)calloc((size_t)t->param_count + 1, sizeof *t->slice_of);
    t->units = (ddp_fsdp_unit_desc *)calloc((size_t)fsdp_units, sizeof *t->units);
    if (!t->slices || !t->params || !t->pointers || !t->slice_of || !t->units) return run_out_of_memory();
    for (int i = 0; i < t->param_count; i++) {
        gpt_cuda_box box[3];
        int unit = t->pp > 1 ? 0 : t->run.infos[i].unit, boxes = gpt_cuda_param_boxes(&t->desc, i, box);
        if (t->pp > 1 && t->run.infos[i].tied_to >= 0) boxes = 0;
        t->slice_of[i] = t->slice_count;
        for (int k = 0; k < boxes; k++) {
            slice *s = &t->slices[t->slice_count];
            s->param = i, s->box = k, s->unit = unit, s->at = box[k];
            if (!t->units[unit].params) t->units[unit].params = &t->params[t->slice_count];
            s->place = t->units[unit].param_count++;
            describe_slice(t, s, &t->params[t->slice_count++], boxes);
        }
    }
    t->slice_of[t->param_count] = t->slice_count;
    for (int u = 0; u < fsdp_units; u++) {
        char *name = t->units[u].params->unit;
        t->units[u].name = name;
        if (t->pp > 1)
            snprintf(name, sizeof t->params->unit, "stage");
        else if (u == 0)
            snprintf(name, sizeof t->params->unit, "embedding");
        else if (u + 1 == fsdp_units)
            snprintf(name, sizeof t->params->unit, "head");
        else
            snprintf(name, sizeof t->params->unit, "h.%d", u - 1);
    }
    return DDP_OK;
}

static size_t slice_elements(const trainer *t, int i) {
    return (size_t)ddp_tensor_count(&t->params[i].param.value);
}

/* The first parameter of a unit, and how many it has. */
static int unit_params(const trainer *t, int unit, int *first) {
    *first = unit == 0 ? 0 : unit + 1 == t->unit_count ? t->param_count - 3 : gpt_block_first_param(unit - 1);
    return unit == 0 ? 2 : unit + 1 == t->unit_count ? 3 : GPT_BLOCK_PARAMS;
}

/* Elements of this rank's part of a unit of the model. */
static size_t unit_elements(const trainer *t, int unit) {
    int first, count = unit_params(t, unit, &first);
    size_t elements = 0;
    for (int i = first; i < first + count; i++) {
        int from = t->pp > 1 && t->run.infos[i].tied_to >= 0 ? 0
                                                             : i; /* with stages the head's matrix is "wte" */
        for (int k = t->slice_of[from]; k < t->slice_of[from + 1]; k++)
            elements += (size_t)(t->slices[k].at.rows * t->slices[k].at.columns);
    }
    return elements;
}

//== memory ================================================================================================ >>memory

/* A way to run, and what it takes of a GPU, in bytes. */
typedef struct way {
    ddp_fsdp_strategy strategy;
    int dp, offload, micro_batch, recompute, graphs;
} way;

/* What ddp_fsdp is told: a graph of a micro-batch wants its gradients whole. */
static ddp_fsdp_strategy carried_strategy(const trainer *t, const way *w) {
    int whole = w->graphs && w->dp == 1 && t->pp == 1 && !w->offload;
    return whole && w->strategy != DDP_FSDP_NO_SHARD ? DDP_FSDP_SHARD_OPTIM : w->strategy;
}

/* What a group of GPUs keeps for sums in the tree's order, of rounds of up to 32 MiB: a power of two. */
static double tree_bytes(double payload) {
    double bytes = 65536;
    while (bytes < payload && bytes < 32 * MIB) bytes *= 2;
    return bytes;
}

/* What ddp_fsdp takes, by the formulas of its opening comment: P / W of what is split. */
static double sharded_bytes(const trainer *t, const way *w) {
    const ddp_fsdp_strategy strategy = carried_strategy(t, w);
    double all = 0, largest = 0, element = (double)element_bytes(t),
           split = strategy == DDP_FSDP_NO_SHARD ? 1 : w->dp, bytes = 0;
    int whole = strategy != DDP_FSDP_FULL_SHARD,
        each = strategy == DDP_FSDP_FULL_SHARD || strategy == DDP_FSDP_SHARD_GRAD, levels = 0;
    int64_t micros = t->run.plan.config.batch / w->micro_batch / w->dp;
    double tied = t->pp > 1 ? 0 : (double)t->run.infos[0].count;
    for (int u = t->first_unit; u < t->end_unit; u++) {
        double elements = (double)unit_elements(t, u);
        all += elements;
        if (elements > largest) largest = elements;
    }
    if (t->pp > 1) largest = all;
    for (int64_t m = t->pp > 1 ? 1 : micros; m > 1; m >>= 1) levels++;
    double own = all - tied, wide = t->pp > 1 ? 4 : element;
    bytes += whole ? own * element : own * element / split;   /* values as they are gathered */
    if (!w->offload && element < 4) bytes += own * 4 / split; /* master values */
    if (!w->offload) bytes += own * 8 / split;                /* moments */
    if (!whole && (t->pp > 1 || w->dp > 1))
        bytes += (t->pp > 1 ? 1 : 3) * largest
                 * element; /* gathered: one in use, two ahead; one rank has them */
    if (each)
        bytes += (t->pp > 1 ? 1 : w->dp > 1 ? 3 : 2) * largest * wide + (levels + 1) * all * 4 / split;
    else
        bytes += all * wide
                 + (levels     ? levels
                    : wide < 4 ? 1 / split
                               : 0)
                       * all * 4; /* f32 of one micro-batch is added up where it lies */
    if (wide < 4 && !each)
        bytes += largest * (levels > 0 || strategy == DDP_FSDP_NO_SHARD ? 4 : wide); /* cast on their way */
    if (w->dp > 1 && strategy != DDP_FSDP_NO_SHARD) bytes += 2 * largest * 4;        /* sent and received */
    if (w->dp > 1) bytes += tree_bytes(largest * 4);
    for (int64_t m = t->pp > 1 ? micros : 0; m > 0; m >>= 1) bytes += all * 4; /* the runner's sums */
    if (t->pp > 1 && element < 4) bytes += largest * element;
    return bytes;
}

static double way_bytes(const trainer *t, const way *w) {
    gpt_cuda_desc d = t->desc;
    const run_config *c = &t->run.plan.config;
    double micros = (double)c->batch / w->micro_batch / w->dp, tokens = (double)w->micro_batch * c->context;
    d.batch = w->micro_batch;
    d.recompute = w->recompute;
    double bytes = (double)gpt_cuda_bytes(&d) + sharded_bytes(t, w)
                   + 0.5 * MIB; /* that: sums of squares, flags and the like */
    bytes += (2 * micros + t->slots) * (double)gpt_cuda_batch_ints((int)tokens) * 4;
    if (t->pp > 1)
        bytes += (2.0 * t->slots + 4) * 2 * tokens * c->channels
                 * (double)element_bytes(t); /* what travels between stages */
    if (t->tp > 1) bytes += tree_bytes(tokens * c->channels * (double)element_bytes(t));
    return bytes;
}

static way way_now(const trainer *t) {
    way w;
    w.strategy = t->strategy, w.dp = t->dp, w.offload = t->run.options->offload;
    w.micro_batch = t->run.plan.config.micro_batch, w.recompute = t->run.options->recompute,
    w.graphs = t->desc.graphs;
    return w;
}

/* Appends ", --recompute saves 12.0 MiB" where another way takes less. */
static void say_saving(const trainer *t, char *out, size_t size, const char *flag, const way *other) {
    way now = way_now(t);
    double saved = way_bytes(t, &now) - way_bytes(t, other);
    size_t at = strlen(out);
    if (saved >= 0.05 * MIB)
        snprintf(out + at, size - at, "%s%s saves %.1f MiB", at ? ", " : "", flag, saved / MIB);
}

static void say_savings(const trainer *t, char *out, size_t size) {
    char flag[64];
    way w = way_now(t);
    out[0] = 0;
    if (!w.recompute) {
        w.recompute = 1;
        say_saving(t, out, size, "--recompute", &w);
        w.recompute = 0;
    }
    if (!w.offload) {
        w.offload = 1;
        say_saving(t, out, size, "--offload", &w);
        w.offload = 0;
    }
    if (w.graphs) {
        w.graphs = 0;
        say_saving(t, out, size, "--no-graphs", &w);
        w.graphs = 1;
    }
    if (w.micro_batch % 2 == 0) {
        w.micro_batch /= 2;
        snprintf(flag, sizeof flag, "--micro-batch %d", w.micro_batch);
        say_saving(t, out, size, flag, &w);
        w.micro_batch *= 2;
    }
    if (t->strategy != DDP_FSDP_FULL_SHARD && t->dp > 1) {
        w.strategy = DDP_FSDP_FULL_SHARD;
        say_saving(t, out, size, "--strategy full", &w);
        w.strategy = t->strategy;
    }
    if (t->run.plan.config.batch % (t->run.plan.config.micro_batch * t->dp * 2) == 0
        && t->strategy != DDP_FSDP_NO_SHARD) {
        w.dp *= 2;
        snprintf(flag, sizeof flag, "--ranks %d on as many GPUs", t->run.world_size * 2);
        say_saving(t, out, size, flag, &w);
    }
    if (!out[0]) snprintf(out, size, "use a smaller --channels, --layers or --context");
}

typedef struct seat {
    char host[64];
    int32_t device;
    int32_t pad;
    double needed, there;
} seat;

/* The same on every rank: the first rank whose GPU has not enough for all that share it, said by rank 0. */
static ddp_result compare_seats(trainer *t, const seat *seats) {
    run *r = &t->run;
    const seat *mine = &seats[r->rank];
    char savings[300];
    for (int i = 0; i < r->world_size; i++)
        t->sharing += !strcmp(seats[i].host, mine->host) && seats[i].device == mine->device;
    for (int i = 0; i < r->world_size; i++) {
        double needed = 0;
        int ranks = 0;
        for (int k = 0; k < r->world_size; k++)
            if (!strcmp(seats[i].host, seats[k].host) && seats[i].device == seats[k].device)
                needed += seats[k].needed, ranks++;
        t->any_share |= ranks > 1;
        if (needed <= seats[i].there) continue;
        if (r->rank != 0) return broadcast_result(r->world, DDP_OK);
        say_savings(t, savings, sizeof savings);
        return broadcast_result(
            r->world,
            ddp_fail(
                DDP_ERR_NO_MEMORY,
                "GPU %d of rank %d is too small: %s %.1f MiB, there are %.1f MiB, %.1f MiB are missing; %s",
                seats[i].device, i, ranks > 1 ? "its ranks together need" : "it needs", needed / MIB,
                seats[i].there / MIB, (needed - seats[i].there) / MIB, savings));
    }
    t->needed = (size_t)mine->needed;
    return DDP_OK;
}

/* Whether all ranks of each GPU fit there, asked before anything large is taken; and how many they are. Collective. */
static ddp_result check_memory(trainer *t) {
    run *r = &t->run;
    seat mine;
    size_t free_bytes = 0, total_bytes = 0;
    way now = way_now(t);
    memset(&mine, 0, sizeof mine);
    if (gethostname(mine.host, sizeof mine.host - 1) != 0) snprintf(mine.host, sizeof mine.host, "unknown");
    CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    mine.device = t->device;
    mine.needed = way_bytes(t, &now);
    mine.there = (double)free_bytes;
    if (r->options->memory_limit && mine.there > r->options->memory_limit * MIB)
        mine.there = r->options->memory_limit * MIB;
    TRY(run_gather(r, &mine, sizeof mine));
    return compare_seats(t, (const seat *)r->gathered);
}

/* Where memory runs out although it was there before, the error says what takes less. */
static ddp_result with_savings(const trainer *t, ddp_result result) {
    char error[600], savings[300];
    if (result != DDP_ERR_NO_MEMORY || !t->needed) return result;
    snprintf(error, sizeof error, "%s", ddp_last_error());
    say_savings(t, savings, sizeof savings);
    return ddp_fail(
        result, "%s; the estimate for the GPU was %.1f MiB, without what CUDA keeps for itself%s; %s", error,
        (double)t->needed / MIB, t->desc.graphs ? " and for graphs, which --no-graphs saves" : "", savings);
}

//== devices ============================================================================================== >>devices

/* This rank's GPU: of --gpus the one whose turn it is. It becomes current. Collective. */
static ddp_result pick_gpu(trainer *t) {
    int gpus[GPU_LIST], turn[DDP_MAX_LOCAL_RANKS], count = read_gpus(t->run.options->gpus, gpus),
                                                   ranks = ddp_local_world_size(t->run.world);
    ddp_cuda_pick_desc pick = DDP_ZERO;
    pick.allow_shared = 1;
    if (count && ranks <= DDP_MAX_LOCAL_RANKS) {
        for (int i = 0; i < ranks; i++) turn[i] = gpus[i % count];
        pick.devices = turn;
        pick.device_count = ranks;
    }
    return ddp_cuda_pick(t->run.world, &pick, &t->device);
}

/* The GPUs of a CPU group, each as chosen. In tree order, so that sums do not depend on how ranks talk. Collective. */
static ddp_result group_gpus(trainer *t, ddp_group *control, const char *name, ddp_group **out) {
    int mine[DDP_MAX_LOCAL_RANKS], ranks = ddp_local_world_size(control);
    ddp_cuda_desc desc = DDP_ZERO;
    for (int i = 0; i < DDP_MAX_LOCAL_RANKS; i++) mine[i] = t->device;
    desc.devices = mine;
    desc.device_count = ranks < DDP_MAX_LOCAL_RANKS ? ranks : DDP_MAX_LOCAL_RANKS;
    desc.allow_shared = 1;
    desc.order = DDP_ORDER_TREE;
    desc.name = name;
    desc.stream = t->stream;
    return ddp_cuda_group_create(out, control, &desc);
}

/* Streams, and groups of GPUs. Collective. */
static ddp_result build_device(trainer *t) {
    CUDA(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&t->copies, cudaStreamNonBlocking));
    for (int k = 0; k < 2; k++) {
        CUDA(cudaEventCreateWithFlags(&t->copied[k], cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&t->done[k], cudaEventDisableTiming));
    }
    ddp_cuda_use_stream(t->stream);
    TRY(group_gpus(t, ddp_mesh_group(t->mesh, "dp"), "dp", &t->along_dp));
    if (t->pp > 1) TRY(group_gpus(t, ddp_mesh_group(t->mesh, "pp"), "pp", &t->along_pp));
    if (t->tp > 1) TRY(group_gpus(t, ddp_mesh_group(t->mesh, "tp"), "tp", &t->along_tp));
    if (t->pp > 1 || t->tp > 1) TRY(group_gpus(t, t->run.world, "everybody", &t->everybody));
    t->memory = ddp_group_device(t->along_dp);
    return DDP_OK;
}

//== first values ======================================================================================== >>values

/* Columns of whole rows: what of each this rank has. */
static void take_columns(float *out, const float *rows, int64_t row_count, int64_t row_columns,
                         const gpt_cuda_box *at) {
    for (int64_t i = 0; i < row_count; i++)
        memcpy(out + i * at->columns, rows + i * row_columns + at->column,
               (size_t)at->columns * sizeof(float));
}

/* Whole rows of a parameter: from the checkpoint, from --init, or drawn from the seed. */
static ddp_result read_rows(const trainer *t, int param, int64_t first, int64_t count, float *out) {
    int64_t columns = t->run.infos[param].shape[1];
    const unsigned char *values = t->mapped ? t->mapped + sizeof(checkpoint_header) : NULL;
    if (values)
        memcpy(out, values + (size_t)(t->offset[param] + first * columns) * sizeof(float),
               (size_t)(count * columns) * sizeof(float));
    else if (t->run.options->init)
        return llmc_read(&t->init, param, first, count, out);
    else
        gpt_param_init(&t->desc.config, (uint64_t)t->run.plan.config.seed, param, first * columns,
                       count * columns, out);
    return DDP_OK;
}

/* Rows of this rank's slice, for ddp_fsdp. */
static ddp_result fill_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const trainer *t = (const trainer *)user;
    const slice *s = &t->slices[param->index];
    int64_t columns = t->run.infos[s->param].shape[1];
    if (s->at.columns == columns)
        return read_rows(t, s->param, s->at.row + first_row, row_count, (float *)out);
    for (int64_t i = 0; i < row_count; i++) {
        TRY(read_rows(t, s->param, s->at.row + first_row + i, 1, t->whole));
        take_columns((float *)out + i * s->at.columns, t->whole, 1, columns, &s->at);
    }
    return DDP_OK;
}

/* Where values lie in a checkpoint file, which rank 0 has found whole; every rank maps it. */
static ddp_result map_checkpoint(trainer *t) {
    run *r = &t->run;
    int64_t next = 0;
    const char *path = r->options->resume;
    ddp_result result = r->rank == 0 ? checkpoint_check(r, &t->saved_header) : DDP_OK;
    struct stat info;
    int file;
    TRY(broadcast_result(r->world, result));
    free(t->saved.bytes);
    memset(&t->saved, 0, sizeof t->saved);
    t->offset = (int64_t *)calloc((size_t)t->param_count, sizeof *t->offset);
    if (!t->offset) return run_out_of_memory();
    for (int i = 0; i < t->param_count; i++) {
        t->offset[i] = r->infos[i].tied_to < 0 ? next : t->offset[r->infos[i].tied_to];
        if (r->infos[i].tied_to < 0) next += r->infos[i].count;
    }
    file = open(path, O_RDONLY | O_CLOEXEC);
    t->mapped_bytes = sizeof(checkpoint_header) + (size_t)r->parameter_count * 12 + sizeof(uint64_t);
    if (file >= 0 && fstat(file, &info) == 0 && (size_t)info.st_size == t->mapped_bytes) {
        void *memory = mmap(NULL, t->mapped_bytes, PROT_READ, MAP_PRIVATE, file, 0);
        if (memory != MAP_FAILED) t->mapped = (const unsigned char *)memory;
    }
    if (file >= 0) close(file);
    return t->mapped ? DDP_OK
                     : WRONG("--resume %s: rank %d cannot read it; every machine needs the same file there",
                             path, r->rank);
}

/* This rank's rows of a slice: values (which -1), or optimizer state. As ddp_fsdp_get_shard; *first is the first row. */
static ddp_result own_rows(trainer *t, int i, int which, ddp_tensor *rows, int64_t *first) {
    const slice *s = &t->slices[i];
    ddp_tensor unused;
    TRY(ddp_fsdp_get_shard(t->fsdp, s->unit, s->place, which < 0 ? rows : &unused, NULL, first));
    return which < 0 ? DDP_OK : ddp_fsdp_get_state(t->fsdp, s->unit, s->place, which, NULL, rows);
}

/* Memory of the host or of the GPU, either way. It is done on return. */
static void move_rows(const trainer *t, void *to, const void *from, size_t size_bytes) {
    if (t->run.options->offload)
        memcpy(to, from, size_bytes);
    else
        t->memory->copy(to, from, size_bytes);
}

/* Moments and their step from a checkpoint file. */
static ddp_result fill_moments(trainer *t) {
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < t->slice_count; i++) {
            const slice *s = &t->slices[i];
            int64_t columns = t->run.infos[s->param].shape[1], first;
            const float *values = (const float *)(const void *)(t->mapped + sizeof(checkpoint_header));
            const float *from = values + (which + 1) * t->run.parameter_count + t->offset[s->param];
            ddp_tensor rows;
            if (!s->here || t->run.infos[s->param].tied_to >= 0) continue;
            TRY(own_rows(t, i, which, &rows, &first));
            if (!rows.data) continue;
            take_columns(t->whole, from + (s->at.row + first) * columns, rows.shape[0], columns, &s->at);
            move_rows(t, rows.data, t->whole, (size_t)ddp_tensor_count(&rows) * sizeof(float));
        }
    return ddp_fsdp_set_step(t->fsdp, t->run.plan.first_step);
}

/* Along dp: shards of the units, or of the stage. Collective. */
static ddp_result build_shards(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    size_t largest = 0, unit = 0;
    const way now = way_now(t);
    ddp_fsdp_desc desc = DDP_ZERO;
    for (int i = 0; i < t->param_count; i++)
        largest = (size_t)r->infos[i].count > largest ? (size_t)r->infos[i].count : largest;
    t->whole = (float *)malloc(largest * sizeof(float));
    if (!t->whole) return run_out_of_memory();
    if (o->init && r->rank != 0) TRY(llmc_open(&t->init, o->init));
    if (r->plan.first_step > 0 && !is_folder(o->resume)) TRY(map_checkpoint(t));
    desc.units = t->units;
    desc.unit_count = t->pp > 1 ? 1 : t->unit_count;
    desc.strategy = carried_strategy(t, &now);
    desc.param_dtype = t->dtype;
    desc.reduce_dtype = DDP_F32;
    desc.micro_batch_count = t->pp > 1 ? 1 : t->micro_count;
    desc.overwrite_gradients = 1; /* backward writes every gradient of a unit */
    desc.offload = o->offload ? DDP_FSDP_OFFLOAD_HOST : DDP_FSDP_OFFLOAD_NONE;
    desc.optimizer.beta2 = 0.95f;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = fill_rows;
    desc.init_user = t;
    desc.state = &t->state;
    desc.keep_checkpoints = 2;
    desc.checkpoint_group = r->world;
    TRY(ddp_fsdp_create(&t->fsdp, t->along_dp, &desc));
    for (int u = t->first_unit; u < t->end_unit; u++)
        unit = unit_elements(t, u) > unit ? unit_elements(t, u) : unit;
    if (t->pp > 1 && t->dtype == DDP_BF16) { /* each of them aligned */
        void *memory;
        TRY(t->memory->alloc(t->along_dp, unit * 2 + 3 * 64 * (size_t)GPT_BLOCK_PARAMS, &memory));
        t->narrow = (unsigned char *)memory;
    }
    if (t->mapped) TRY(fill_moments(t));
    if (r->plan.first_step == 0 || t->mapped) return DDP_OK;
    TRY(ddp_fsdp_load(t->fsdp, o->resume));
    if (t->state.step != r->plan.first_step)
        return WRONG("--resume %s: another run has just written it; give a checkpoint that stays", o->resume);
    r->plan.data = t->state.sampler;
    return DDP_OK;
}

//== batches ============================================================================================== >>batches

/* A window of context + 1 tokens, for the loader's threads. */
static ddp_result fetch_window(void *user, int64_t index, void *const *fields) {
    const run *r = (const run *)user;
    return run_tokens(r, index, r->plan.config.context + 1, (int *)fields[0]);
}

/* The loader gives this rank's part of each global batch; with round_robin, all of it. */
static ddp_result build_loader(trainer *t) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    int round_robin = r->options->round_robin, micros = t->micro_count;
    size_t bytes = t->batch_ints * sizeof(int32_t);
    ddp_loader_desc desc = DDP_ZERO;
    ddp_tensor window = DDP_ZERO;
    window.dtype = DDP_I32, window.ndim = 1, window.shape[0] = c->context + 1;
    desc.sampler = run_sampler_desc(r, round_robin ? 1 : t->dp, round_robin ? 0 : t->replica);
    desc.fields = &window;
    desc.field_count = 1;
    desc.fetch = fetch_window;
    desc.fetch_user = r;
    desc.worker_count = 2;
    TRY(ddp_loader_create(&t->loader, &desc));
    if (r->plan.first_step > 0) TRY(ddp_loader_load(t->loader, &r->plan.data));
    TRY(run_build_sampler(r, 1, 0)); /* what checkpoints are written with */
    t->loaded_first = round_robin ? t->replica : 0;
    t->loaded_every = round_robin ? t->dp : 1;
    t->batch = (int32_t **)calloc((size_t)t->slots, sizeof *t->batch);
    if (!t->batch) return run_out_of_memory();
    for (int k = 0; k < 2; k++) {
        CUDA(cudaHostAlloc((void **)&t->pinned[k], bytes * (size_t)micros, cudaHostAllocDefault));
        CUDA(cudaHostAlloc((void **)&t->sums[k], (size_t)micros * sizeof(double), cudaHostAllocDefault));
        CUDA(cudaMalloc((void **)&t->staged[k], bytes * (size_t)micros));
    }
    for (int s = 0; s < t->slots; s++) CUDA(cudaMalloc((void **)&t->batch[s], bytes));
    return DDP_OK;
}

static ddp_result sort_batch(const trainer *t, int32_t *batch) {
    const run_config *c = &t->run.plan.config;
    if (gpt_cuda_batch_sort(batch, c->micro_batch * c->context, plan_vocab(&t->run.plan)) == 0) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "a token of the text is not in the vocabulary");
}

/* The windows of a step, on their way to the device. */
static ddp_result prepare(trainer *t, int64_t step) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    int parity = (int)(step & 1), length = c->context;
    size_t n = (size_t)c->micro_batch * (size_t)length;
    ddp_batch batch;
    TRY(ddp_loader_next(t->loader, &batch));
    if (batch.count == 0) { /* the end of an epoch, which falls between two steps */
        TRY(ddp_loader_set_epoch(t->loader, ++r->epoch));
        TRY(ddp_loader_next(t->loader, &batch));
    }
    for (int micro = 0; micro < t->micro_count; micro++) {
        int32_t *out = t->pinned[parity] + (size_t)micro * t->batch_ints;
        for (int row = 0; row < c->micro_batch; row++) {
            int64_t number = (int64_t)(t->loaded_first + micro * t->loaded_every) * c->micro_batch + row;
            const int32_t *window = (const int32_t *)batch.fields[0].data + number * (length + 1);
            memcpy(out + row * length, window, (size_t)length * sizeof *out);
            memcpy(out + n + (size_t)(row * length), window + 1, (size_t)length * sizeof *out);
        }
        TRY(sort_batch(t, out));
    }
    CUDA(cudaMemcpyAsync(t->staged[parity], t->pinned[parity],
                         (size_t)t->micro_count * t->batch_ints * sizeof(int32_t), cudaMemcpyHostToDevice,
                         t->copies));
    CUDA(cudaEventRecord(t->copied[parity], t->copies));
    return DDP_OK;
}

/* Micro-batch `micro` of the step is where the model reads. */
static ddp_result place_batch(trainer *t, int micro, int slot) {
    size_t bytes = t->batch_ints * sizeof(int32_t);
    CUDA(cudaMemcpyAsync(t->batch[slot], t->staged[t->parity] + (size_t)micro * t->batch_ints, bytes,
                         cudaMemcpyDeviceToDevice, t->stream));
    return DDP_OK;
}

/* A batch of the validation text, or of a sample's tokens, which is in run.tokens and run.targets. Waits for the device. */
static ddp_result place_tokens(trainer *t, int slot) {
    const run_config *c = &t->run.plan.config;
    size_t n = (size_t)c->micro_batch * (size_t)c->context;
    CUDA(cudaStreamSynchronize(t->stream));
    for (size_t i = 0; i < n; i++)
        t->pinned[0][i] = t->run.tokens[i], t->pinned[0][n + i] = t->run.targets[i];
    TRY(sort_batch(t, t->pinned[0]));
    CUDA(cudaMemcpyAsync(t->batch[slot], t->pinned[0], t->batch_ints * sizeof(int32_t),
                         cudaMemcpyHostToDevice, t->stream));
    return DDP_OK;
}

//== what happened ====================================================================================== >>timeline

/* Where --timeline looks: three steps once all is warm, or the last ones. */
static void choose_trace(trainer *t) {
    const run_plan *p = &t->run.plan;
    t->trace_last = p->first_step + 6 < p->config.steps ? (int)p->first_step + 6 : p->config.steps;
    t->trace_first = t->trace_last - TRACE_STEPS + 1 > p->first_step ? t->trace_last - TRACE_STEPS + 1
                                                                     : (int)p->first_step + 1;
}

/* An event with a time, of what the compute stream holds now; NULL: there is none. */
static cudaEvent_t mark_stream(const trainer *t) {
    cudaEvent_t event;
    if (cudaEventCreateWithFlags(&event, cudaEventDefault) != cudaSuccess) return NULL;
    if (cudaEventRecord(event, t->stream) == cudaSuccess) return event;
    cudaEventDestroy(event);
    return NULL;
}

/* A span begins; on_device: its work too, which is put on the compute stream until it ends. -1: nobody looks. */
static int span_begin(trainer *t, const char *name, int unit, int on_device) {
    span *s;
    if (!t->tracing) return -1;
    if (t->span_count == t->span_room) {
        int room = t->span_room * 2 + 256;
        span *grown = (span *)realloc(t->spans, (size_t)room * sizeof *grown);
        if (!grown) return -1;
        t->spans = grown;
        t->span_room = room;
    }
    s = &t->spans[t->span_count];
    memset(s, 0, sizeof *s);
    s->name = name, s->unit = unit, s->step = t->step, s->begin = s->end = ddp_now();
    if (on_device) s->from = mark_stream(t);
    return t->span_count++;
}

static void span_end(trainer *t, int at) {
    span *s = at < 0 ? NULL : &t->spans[at];
    if (!s) return;
    s->end = ddp_now();
    if (s->from) s->to = mark_stream(t);
}

/* The device's clock and the host's at one moment: before the first step that is looked at. */
static ddp_result trace_begin(trainer *t) {
    CUDA(cudaEventCreateWithFlags(&t->origin, cudaEventDefault));
    CUDA(cudaStreamSynchronize(t->stream));
    CUDA(cudaEventRecord(t->origin, t->stream));
    CUDA(cudaEventSynchronize(t->origin));
    t->origin_seconds = ddp_now();
    t->tracing = 1;
    return DDP_OK;
}

/* One event of the trace format, in microseconds since the origin. */
static size_t trace_line(const trainer *t, char *out, size_t size, const span *s, const char *where, int lane,
                         double begin, double end) {
    char unit[24] = "";
    if (s->unit >= 0) snprintf(unit, sizeof unit, " unit %d", s->unit);
    return (size_t)snprintf(
        out, size,
        ",\n{\"name\":\"%s%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
        "\"args\":{\"step\":%d}}",
        s->name, unit, where, t->run.rank, lane, begin * 1e6, (end - begin) * 1e6, s->step);
}

/* This rank's events as text, which the caller frees. */
static ddp_result trace_text(trainer *t, char **out, size_t *length) {
    size_t room = (size_t)t->span_count * 2 * 256 + 512, at;
    char *text = (char *)malloc(room);
    if (!text) return ddp_fail(DDP_ERR_NO_MEMORY, "a timeline of %d spans", t->span_count);
    *out = text;
    at = (size_t)snprintf(
        text, room,
        "%s{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}},\n"
        "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"host\"}},\n"
        "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":1,\"args\":{\"name\":\"GPU %d\"}}",
        t->run.rank ? ",\n" : "", t->run.rank, t->run.rank, t->run.rank, t->run.rank, t->device);
    for (int i = 0; i < t->span_count; i++) {
        const span *s = &t->spans[i];
        float from, to;
        at += trace_line(t, text + at, room - at, s, "host", 0, s->begin - t->origin_seconds,
                         s->end - t->origin_seconds);
        if (!s->from || !s->to) continue;
        CUDA(cudaEventElapsedTime(&from, t->origin, s->from));
        CUDA(cudaEventElapsedTime(&to, t->origin, s->to));
        at += trace_line(t, text + at, room - at, s, "device", 1, from * 1e-3, to * 1e-3);
    }
    *length = at;
    return DDP_OK;
}

/* Rank 0 writes what all ranks have. Collective. */
static ddp_result write_timeline(trainer *t) {
    run *r = &t->run;
    const char *path = r->options->timeline;
    char *text = NULL;
    size_t length = 0;
    ddp_result result = trace_text(t, &text, &length);
    const size_t *lengths;
    FILE *file = NULL;
    if (r->rank == 0 && result == DDP_OK) {
        file = fopen(path, "w");
        if (!file)
            result = ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
        else
            fprintf(file, "{\"traceEvents\":[\n%.*s", (int)length, text);
    }
    if (result == DDP_OK) result = run_gather(r, &length, sizeof length);
    lengths = (const size_t *)r->gathered;
    for (int i = 1; i < r->world_size && result == DDP_OK; i++) {
        char *theirs = r->rank == 0 ? (char *)malloc(lengths[i]) : text;
        if (r->rank == i) result = ddp_send(r->world, text, length, DDP_U8, 0, 0, NULL);
        if (r->rank != 0) continue;
        result = theirs ? ddp_recv(r->world, theirs, lengths[i], DDP_U8, i, 0, NULL)
                        : ddp_fail(DDP_ERR_NO_MEMORY, "the timeline of rank %d", i);
        if (result == DDP_OK) fwrite(theirs, 1, lengths[i], file);
        free(theirs);
    }
    free(text);
    if (!file) return result;
    fprintf(file, "\n]}\n");
    if (fclose(file) != 0 && result == DDP_OK)
        result = ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
    if (result == DDP_OK) printf("%s: steps %d to %d\n", path, t->trace_first, t->trace_last);
    return result;
}

/* What was put on the compute stream since the mark before is called name. */
static void profile_mark(void *user, const char *name, double flops, double bytes) {
    trainer *t = (trainer *)user;
    mark *m;
    if (!t->profiling) return;
    if (t->mark_count == t->mark_room) {
        int room = t->mark_room * 2 + 1024;
        mark *grown = (mark *)realloc(t->marks, (size_t)room * sizeof *grown);
        if (!grown) return;
        t->marks = grown;
        t->mark_room = room;
    }
    m = &t->marks[t->mark_count];
    m->name = name, m->flops = flops, m->bytes = bytes, m->event = mark_stream(t);
    t->mark_count += m->event != NULL;
}

typedef struct profile_row {
    const char *name;
    int launches;
    double seconds, flops, bytes;
} profile_row;

static int profile_compare(const void *left, const void *right) {
    double l = ((const profile_row *)left)->seconds, r = ((const profile_row *)right)->seconds;
    return l < r ? 1 : l > r ? -1 : 0;
}

/* What the data sheet of a GPU says: multiplications and additions in bf16 per second, dense, and bytes of memory per second; 0 = not known.
   The first name that is a part of the device's counts; cards called NVL are slower than the H100 or H200 in their name. */
typedef struct gpu_peak {
    const char *name;
    double flops, bytes;
} gpu_peak;

static gpu_peak find_peak(int device) {
    static const gpu_peak known[] = {
        {" NVL", 0, 0},
        {"H100 PCIe", 756e12, 2.04e12},
        {"H100", 989.4e12, 3.35e12},
        {"GH200", 989.4e12, 4e12},
        {"H200", 989.4e12, 4.8e12},
        {"A100-SXM4-40GB", 312e12, 1.555e12},
        {"A100-SXM4-80GB", 312e12, 2.039e12},
        {"A100", 312e12, 1.555e12},
        {"L40S", 362e12, 0.864e12},
    };
    const gpu_peak none = {"", 0, 0};
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return none;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strstr(properties.name, known[i].name)) return known[i];
    return none;
}

/* Rank 0: a line for each kernel, those that took longest first. of limit: what it has to compute (in bf16) or
   to move, at the data sheet's speed, over its time. */
static ddp_result print_profile(trainer *t) {
    profile_row *rows = (profile_row *)calloc((size_t)t->mark_count + 1, sizeof *rows);
    const gpu_peak peak = find_peak(t->device);
    double whole = 0;
    int count = 0, bf16 = t->dtype == DDP_BF16;
    if (!rows) return ddp_fail(DDP_ERR_NO_MEMORY, "a profile of %d marks", t->mark_count);
    for (int i = 1; i < t->mark_count; i++) { /* the first one is the step's begin */
        const mark *m = &t->marks[i];
        float ms = 0;
        int k = 0;
        if (cudaEventElapsedTime(&ms, m[-1].event, m->event) != cudaSuccess) ms = 0;
        while (k < count && strcmp(rows[k].name, m->name)) k++;
        if (k == count) rows[count++].name = m->name;
        rows[k].launches++, rows[k].seconds += ms * 1e-3, rows[k].flops += m->flops,
            rows[k].bytes += m->bytes;
        whole += ms * 1e-3;
    }
    qsort(rows, (size_t)count, sizeof *rows, profile_compare);
    printf(
        "\n  step %4d of rank 0, %9.3f ms      launches         ms    share   TFLOP/s      GB/s   of limit\n",
        t->trace_last, whole * 1e3);
    for (int k = 0; k < count; k++) {
        const profile_row *row = &rows[k];
        double seconds = row->seconds > 0 ? row->seconds : 1e-12, least = 0;
        if (peak.bytes > 0) least = row->bytes / peak.bytes;
        if (bf16 && peak.flops > 0 && row->flops / peak.flops > least) least = row->flops / peak.flops;
        printf("  %-34s %8d   %8.3f   %5.1f%%   %7.1f   %7.0f   ", row->name, row->launches,
               row->seconds * 1e3, whole > 0 ? 100 * row->seconds / whole : 0, row->flops / seconds * 1e-12,
               row->bytes / seconds * 1e-9);
        if (least > 0)
            printf("%7.1f%%\n", 100 * least / seconds);
        else
            printf("       -\n");
    }
    printf("\n");
    free(rows);
    return DDP_OK;
}

//== units of the model ==================================================================================== >>units

/* Where the values of a unit of the model lie, or its gradients, as the model wants to know it. */
static void point_at(const trainer *t, int unit, int grads, void **table) {
    int first, count = unit_params(t, unit, &first);
    memset(table, 0, 3 * (size_t)GPT_BLOCK_PARAMS * sizeof *table);
    for (int i = 0; i < count; i++) {
        int from = t->pp > 1 && t->run.infos[first + i].tied_to >= 0 ? 0 : first + i;
        for (int k = t->slice_of[from]; k < t->slice_of[from + 1]; k++) {
            const ddp_param *param = &t->params[k].param;
            table[3 * i + t->slices[k].box] = grads ? param->grad.data : param->value.data;
        }
    }
}

static ddp_result unit_forward(trainer *t, int unit, int slot, const void *in, void *out) {
    void *values[3 * GPT_BLOCK_PARAMS];
    int span = span_begin(t, "forward", unit, 1);
    point_at(t, unit, 0, values);
    TRY(gpt_cuda_unit_forward(t->model, unit, slot, values, t->batch[slot], in, out));
    span_end(t, span);
    return DDP_OK;
}

/* With stages and bf16: the model's gradients go to t->narrow, and what is found there to those of ddp_fsdp, which the runner adds up in f32. */
static void narrow_grads(const trainer *t, int unit, void **grads, int widen) {
    int first, count = unit_params(t, unit, &first);
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        int from = t->run.infos[first + i].tied_to >= 0 ? 0 : first + i;
        for (int k = t->slice_of[from]; k < t->slice_of[from + 1]; k++) {
            void *narrow = t->narrow + at;
            if (widen)
                t->memory->cast(t->params[k].param.grad.data, DDP_F32, narrow, DDP_BF16,
                                slice_elements(t, k));
            grads[3 * i + t->slices[k].box] = narrow;
            at += (slice_elements(t, k) * 2 + 63) / 64 * 64;
        }
    }
}

static ddp_result unit_backward(trainer *t, int unit, int slot, const void *in, const void *d_out,
                                void *d_in) {
    void *values[3 * GPT_BLOCK_PARAMS], *grads[3 * GPT_BLOCK_PARAMS];
    int span = span_begin(t, "backward", unit, 1);
    point_at(t, unit, 0, values);
    point_at(t, unit, 1, grads);
    if (t->narrow) narrow_grads(t, unit, grads, 0);
    TRY(gpt_cuda_unit_backward(t->model, unit, slot, values, grads, t->batch[slot], in, d_out, d_in));
    if (t->narrow) narrow_grads(t, unit, grads, 1);
    if (t->narrow) profile_mark(t, "gradients to f32", 0, 0);
    span_end(t, span);
    return DDP_OK;
}

/* The unit's values, and its gradients outside of ddp_fsdp_no_grad, are there. Collective. */
static ddp_result gather(trainer *t, int unit) {
    int span = span_begin(t, "gather", unit, 1);
    TRY(ddp_fsdp_unshard(t->fsdp, unit));
    profile_mark(t, "gather", 0, 0);
    span_end(t, span);
    return DDP_OK;
}

/* Forward through all units. compute 0: this rank only gathers along. Collective. */
static ddp_result forward(trainer *t, int last_unit, int compute) {
    for (int unit = 0; unit <= last_unit; unit++) {
        TRY(gather(t, unit));
        if (compute) TRY(unit_forward(t, unit, 0, NULL, NULL));
        TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return DDP_OK;
}

/* The unit's gradients are there, and its values are not used any more. Collective. */
static ddp_result reduce(trainer *t, int unit) {
    int span = span_begin(t, "reduce", unit, 1);
    TRY(ddp_fsdp_reduce_grads(t->fsdp, unit));
    profile_mark(t, "reduce", 0, 0);
    span_end(t, span);
    return ddp_fsdp_reshard(t->fsdp, unit);
}

static ddp_result backward(trainer *t) {
    for (int unit = t->unit_count - 1; unit >= 0; unit--) {
        TRY(gather(t, unit));
        TRY(unit_backward(t, unit, 0, NULL, NULL, NULL));
        TRY(reduce(t, unit));
    }
    return DDP_OK;
}

static ddp_result build_tables(trainer *t) {
    size_t count = 2 * (size_t)t->unit_count;
    t->tables = (void *(*)[3 * GPT_BLOCK_PARAMS]) calloc(count, sizeof *t->tables);
    t->table_of = (void *const **)calloc(count, sizeof *t->table_of);
    if (!t->tables || !t->table_of) return run_out_of_memory();
    for (size_t i = 0; i < count; i++) t->table_of[i] = t->tables[i];
    return DDP_OK;
}

/* Whether ranks have nothing to do with each other between the units of a micro-batch: its gradients are added to those before, on this rank alone, and
   its values have been gathered. Not with --offload, whose copies go on beside the units. */
static int is_whole(const trainer *t, int micro) {
    int adds_later = t->strategy == DDP_FSDP_SHARD_OPTIM || t->strategy == DDP_FSDP_NO_SHARD;
    return t->desc.graphs && !t->run.options->offload
           && (t->dp == 1 || (adds_later && micro > 0 && micro + 1 < t->micro_count));
}

/* Forward and backward through all units as one graph. */
static ddp_result whole_micro_batch(trainer *t) {
    int span;
    for (int unit = 0; unit < t->unit_count; unit++) {
        TRY(gather(t, unit));
        point_at(t, unit, 0, t->tables[unit]);
        point_at(t, unit, 1, t->tables[t->unit_count + unit]);
    }
    span = span_begin(t, "micro-batch", -1, 1);
    TRY(gpt_cuda_micro_batch(t->model, 0, t->table_of, t->table_of + t->unit_count, t->batch[0]));
    span_end(t, span);
    for (int unit = t->unit_count - 1; unit >= 0; unit--) TRY(reduce(t, unit));
    return DDP_OK;
}

//== stages ================================================================================================ >>stages

/* Before a stage's first action, and after its last one: its values are there. Collective over dp. */
static ddp_result gather_stage(int stage, void *user) { return (void)stage, gather((trainer *)user, 0); }
static ddp_result release_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_reshard(((trainer *)user)->fsdp, 0);
}
static ddp_result reduce_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_reduce_grads(((trainer *)user)->fsdp, 0);
}
/* Averages of this rank's rows, which nothing clips yet. Collective over dp. */
static ddp_result average_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_clip_grad_norm(((trainer *)user)->fsdp, FLT_MAX, NULL);
}

/* Gradients of this rank's rows of slice i. */
static ddp_result gradient_of(const trainer *t, int i, ddp_tensor *grad) {
    return ddp_fsdp_get_shard(t->fsdp, t->slices[i].unit, t->slices[i].place, NULL, grad, NULL);
}
static ddp_result tied_gradient(int stage, int param, ddp_tensor *grad,
                                void *user) { /* "wte", the first slice */
    return (void)stage, (void)param, gradient_of((trainer *)user, 0, grad);
}

static ddp_result stage_forward(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    int slot = c->evaluating ? 0 : t->free_slots[--t->free_count];
    if (!c->evaluating) t->slot_of[c->microbatch] = slot;
    if (c->loss) *c->loss = 0; /* it is read later */
    if (c->evaluating) {
        int64_t last = validation_micro_batches(&t->run.plan) - 1, index = t->validating + c->microbatch;
        TRY(load_validation_batch(&t->run, index < last ? index : last));
        TRY(place_tokens(t, slot));
    } else
        TRY(place_batch(t, c->microbatch, slot));
    for (int u = t->first_unit; u < t->end_unit; u++) {
        const void *in = u == t->first_unit && c->input_count ? c->inputs[0].data : NULL;
        TRY(unit_forward(t, u, slot, in,
                         u + 1 == t->end_unit && c->output_count ? c->outputs[0].data : NULL));
    }
    return is_last(t) ? gpt_cuda_loss(t->model, slot, &t->sums[c->evaluating ? 0 : t->parity][c->microbatch])
                      : DDP_OK;
}

static ddp_result stage_backward(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    int slot = t->slot_of[c->microbatch];
    for (int u = t->end_unit - 1; u >= t->first_unit; u--) {
        const void *in = u == t->first_unit && c->input_count ? c->inputs[0].data : NULL;
        void *d_in = u == t->first_unit && c->input_count ? c->input_grads[0].data : NULL;
        TRY(unit_backward(t, u, slot, in,
                          u + 1 == t->end_unit && c->output_count ? c->output_grads[0].data : NULL, d_in));
    }
    t->free_slots[t->free_count++] = slot;
    return DDP_OK;
}

/* Along pp: the runner. Collective. */
static ddp_result build_pipeline(trainer *t) {
    const ddp_pipeline_tie tie = {0, 0, t->pp - 1, 0}; /* "wte" is the first parameter of both */
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_stage *stages = (ddp_pipeline_stage *)calloc((size_t)t->pp, sizeof *stages), *own;
    ddp_result result;
    t->slot_of = (int *)calloc((size_t)t->micro_count, sizeof *t->slot_of);
    t->free_slots = (int *)calloc((size_t)t->slots, sizeof *t->free_slots);
    if (!stages || !t->slot_of || !t->free_slots) {
        free(stages);
        return run_out_of_memory();
    }
    while (t->free_count < t->slots)
        t->free_slots[t->free_count] = t->slots - 1 - t->free_count, t->free_count++;
    own = stages + t->stage;
    own->forward = stage_forward;
    own->backward = stage_backward;
    own->user = t;
    own->params = t->pointers;
    for (int i = 0; i < t->slice_count; i++)
        if (t->slices[i].here) t->pointers[own->param_count++] = &t->params[i].param;
    own->unshard = gather_stage;
    own->reshard = release_stage;
    own->reduce_grad = reduce_stage;
    own->wait_grad = average_stage;
    own->get_sharded_grad = tied_gradient;
    own->grad_division = DDP_DIVIDE_BEFORE_REDUCE;
    desc.ties = &tie;
    desc.tie_count = 1;
    desc.schedule = t->schedule;
    desc.stages = stages;
    desc.stage_count = t->pp;
    desc.boundary.dtype = t->dtype;
    desc.boundary.ndim = 2;
    desc.boundary.shape[0] = (int64_t)t->desc.batch * t->desc.length,
    desc.boundary.shape[1] = t->desc.config.channels;
    result = ddp_pipeline_create(&t->pipeline, t->along_pp, &desc);
    free(stages);
    return result;
}

//== training ============================================================================================ >>training

/* Clips the gradients to a norm of 1 over the whole model, where --stages or --tp cut it. An exact sum of rows, so that neither stages nor shards change it;
   the device decides. Collective. */
static ddp_result clip_cut(trainer *t) {
    ddp_exact_sum *there = t->squares;
    float *factor = (float *)(void *)(there + 1);
    ddp_tensor grad;
    if (t->pp == 1) TRY(average_stage(0, t));
    t->memory->fill_zero(there, sizeof *there);
    for (int i = 0; i < t->slice_count; i++) {
        if (!t->slices[i].counted || (t->strategy == DDP_FSDP_NO_SHARD && t->replica > 0)) continue;
        TRY(gradient_of(t, i, &grad));
        if (grad.data)
            t->memory->sum_squares(there, grad.data, (size_t)grad.shape[0],
                                   (size_t)(ddp_tensor_count(&grad) / grad.shape[0]), DDP_F32);
    }
    TRY(ddp_all_reduce(t->everybody, there, there, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, NULL));
    t->memory->optimizer->clip(there, 1.0f, factor, &t->norms[t->parity]);
    for (int i = 0; i < t->slice_count; i++) {
        if (!t->slices[i].here || t->run.infos[t->slices[i].param].tied_to >= 0) continue;
        TRY(gradient_of(t, i, &grad));
        if (grad.data)
            t->memory->optimizer->scale(grad.data, (size_t)ddp_tensor_count(&grad), DDP_F32, factor);
    }
    return DDP_OK;
}

/* Forwards, backwards, and what adds gradients over ranks. */
static ddp_result put_micro_batches(trainer *t) {
    if (t->pipeline) {
        int span = span_begin(t, "pipeline", -1, 1);
        TRY(ddp_pipeline_step(t->pipeline));
        span_end(t, span);
        return DDP_OK;
    }
    for (int micro = 0; micro < t->micro_count; micro++) {
        int whole = is_whole(t, micro);
        TRY(place_batch(t, micro, 0));
        TRY(whole ? whole_micro_batch(t) : forward(t, t->unit_count - 1, 1));
        TRY(gpt_cuda_loss(t->model, 0, &t->sums[t->parity][micro]));
        if (!whole) TRY(backward(t));
    }
    return DDP_OK;
}

/* Puts the micro-batches of a step on the streams, and waits for nothing. Collective. */
static ddp_result put_begin(trainer *t, int64_t step) {
    t->parity = (int)(step & 1);
    t->profiling = step == t->trace_last && t->run.options->profile && t->run.rank == 0;
    CUDA(cudaStreamWaitEvent(t->stream, t->copied[t->parity], 0));
    profile_mark(t, "begin", 0, 0);
    return put_micro_batches(t);
}

/* The rest of it: norm and optimizer. Collective. */
static ddp_result put_update(trainer *t, int64_t step) {
    int span = span_begin(t, "clip", -1, 1);
    TRY(t->pp > 1 || t->tp > 1 ? clip_cut(t) : ddp_fsdp_clip_grad_norm(t->fsdp, 1.0f, NULL));
    profile_mark(t, "norm", 0, 0);
    span_end(t, span);
    span = span_begin(t, "optimizer", -1, 1);
    TRY(ddp_fsdp_step(t->fsdp, ddp_lr_at(&t->run.lr, step)));
    profile_mark(t, "optimizer", 0, 0);
    span_end(t, span);
    CUDA(cudaEventRecord(t->done[t->parity], t->stream));
    t->profiling = 0;
    return DDP_OK;
}

/* Number of this rank's micro-batch among those of the global batch. */
static int micro_number(const trainer *t, int micro) {
    return t->run.options->round_robin ? micro * t->dp + t->replica : t->replica * t->micro_count + micro;
}

/* Loss and norm of the last step that was put whole on the streams, once the device has done it. Collective. */
static ddp_result read_step(trainer *t, int64_t step) {
    run *r = &t->run;
    double tokens = (double)r->plan.config.micro_batch * r->plan.config.context, loss;
    int parity = (int)(step & 1), span = span_begin(t, "read the step before", -1, 0);
    float norm;
    CUDA(cudaEventSynchronize(t->done[parity]));
    span_end(t, span);
    norm = t->norms[parity];
    if (t->pp == 1 && t->tp == 1) TRY(ddp_fsdp_get_norm(t->fsdp, &norm));
    if (is_last(t) && t->tensor_rank == 0)
        for (int micro = 0; micro < t->micro_count; micro++)
            r->losses[micro_number(t, micro)] = t->sums[parity][micro] / tokens;
    TRY(run_mean_loss(r, (int64_t)t->micro_count * t->dp, &loss));
    r->train_seconds += ddp_now() - t->since;
    t->since = ddp_now();
    TRY(run_check_step(step, loss, norm));
    run_report_step(r, step, loss, norm);
    if (step == t->trace_last) t->tracing = 0;
    return DDP_OK;
}

/* Mean loss over the validation windows. Replicas take contiguous shares of the micro-batches, which are the same on any number of ranks; where a share is
   short, its ranks gather along. Waits for the device. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    double tokens = (double)r->plan.config.micro_batch * r->plan.config.context;
    int64_t count = validation_micro_batches(&r->plan), share = (count + t->dp - 1) / t->dp,
            first = t->replica * share;
    int64_t end = first + share < count ? first + share : count, every = t->pipeline ? t->micro_count : 1;
    int speaks = is_last(t) && t->tensor_rank == 0;
    if (!t->pipeline) TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (t->validating = first; t->validating < first + share; t->validating += every) {
        if (t->pipeline)
            TRY(ddp_pipeline_evaluate(t->pipeline));
        else {
            if (t->validating < end) {
                TRY(load_validation_batch(r, t->validating));
                TRY(place_tokens(t, 0));
            }
            TRY(forward(t, t->unit_count - 1, t->validating < end));
            if (t->validating < end) TRY(gpt_cuda_loss(t->model, 0, &t->sums[0][0]));
        }
        CUDA(cudaStreamSynchronize(t->stream));
        for (int64_t i = 0; i < every && t->validating + i < end; i++)
            if (speaks) r->losses[t->validating + i] = t->sums[0][i] / tokens;
    }
    if (!t->pipeline) TRY(ddp_fsdp_no_grad(t->fsdp, 0));
    return run_mean_loss(r, count, loss);
}

//== checkpoints ======================================================================================== >>checkpoints

/* The whole of a parameter, or of its moments, on every rank, in t->whole: each rank puts its rows among zeros, and bits add up. which: -1 = values.
   Collective. */
static ddp_result gather_whole(trainer *t, int param, int which) {
    size_t count = (size_t)t->run.infos[param].count;
    int64_t columns = t->run.infos[param].shape[1];
    memset(t->whole, 0, count * sizeof(float));
    for (int i = t->slice_of[param]; i < t->slice_of[param + 1]; i++) {
        const slice *s = &t->slices[i];
        ddp_tensor rows;
        int64_t first, own_count;
        float *own = NULL;
        if (!s->counted || (t->strategy == DDP_FSDP_NO_SHARD && t->replica > 0)) continue;
        TRY(own_rows(t, i, which, &rows, &first));
        if (!rows.data) continue;
        own_count = ddp_tensor_count(&rows);
        if (own_count >= 0) own = (float *)malloc((size_t)own_count * sizeof(float));
        if (!own)
            return ddp_fail(DDP_ERR_NO_MEMORY, "%s: rows of %lld elements", s->name, (long long)own_count);
        move_rows(t, own, rows.data, (size_t)own_count * sizeof(float));
        for (int64_t j = 0; j < rows.shape[0]; j++)
            memcpy(t->whole + (s->at.row + first + j) * columns + s->at.column, own + j * s->at.columns,
                   (size_t)s->at.columns * sizeof(float));
        free(own);
    }
    if (t->run.world_size == 1) return DDP_OK;
    return ddp_all_reduce(t->run.world, t->whole, t->whole, count, DDP_I32, DDP_OP_SUM, NULL);
}

/* The file of train_gpt, which rank 0 writes. Collective. */
static ddp_result save_file(trainer *t, const char *path, int64_t step) {
    run *r = &t->run;
    checkpoint_writer w;
    ddp_sampler_state state;
    ddp_result result = ddp_loader_save(t->loader, &state);
    memset(&w, 0, sizeof w);
    if (result == DDP_OK) result = ddp_sampler_load(&r->sampler, &state);
    if (result == DDP_OK && r->rank == 0) result = checkpoint_begin(&w, r, path, step);
    result = broadcast_result(r->world, result);
    for (int which = -1; which < 2; which++)
        for (int i = 0; i < t->param_count && result == DDP_OK; i++) {
            if (r->infos[i].tied_to >= 0) continue;
            result = gather_whole(t, i, which);
            if (result == DDP_OK && r->rank == 0)
                checkpoint_put(&w, t->whole, (size_t)r->infos[i].count * sizeof(float));
        }
    if (result != DDP_OK && w.file) {
        fclose(w.file);
        unlink(w.temporary);
    }
    if (result != DDP_OK) return result;
    return broadcast_result(r->world, r->rank == 0 ? checkpoint_end(&w, path) : DDP_OK);
}

static ddp_result save_checkpoint(trainer *t, int64_t step) {
    run *r = &t->run;
    const char *path = r->options->checkpoint;
    if (!is_folder(path)) return save_file(t, path, step);
    folder_state(&t->state, &r->plan);
    TRY(ddp_loader_save(t->loader, &t->state.sampler));
    return ddp_fsdp_save(t->fsdp, path);
}

/* The validation loss, and after training steps a checkpoint. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    return r->options->checkpoint && step > r->plan.first_step ? save_checkpoint(t, step) : DDP_OK;
}

static ddp_result train_steps(trainer *t, double *validation) {
    run *r = &t->run;
    int64_t first = r->plan.first_step, unread = first; /* steps up to this one are read */
    TRY(evaluate(t, first, validation));
    t->since = ddp_now();
    for (int64_t step = first + 1; step <= r->plan.config.steps; step++) {
        double begin, end;
        int span;
        t->step = (int)step;
        if (step == t->trace_first && r->options->timeline) TRY(trace_begin(t));
        span = span_begin(t, "pack", -1, 0);
        TRY(prepare(t, step));
        span_end(t, span);
        begin = ddp_now();
        TRY(WITHOUT_WAITING(put_begin(t, step)));
        t->host_seconds += ddp_now() - begin;
        if (unread < step - 1) TRY(read_step(t, ++unread));
        end = ddp_now();
        TRY(WITHOUT_WAITING(put_update(t, step)));
        t->host_seconds += ddp_now() - end;
        if (is_validation_step(r, step)) TRY(read_step(t, ++unread));
        if (!is_validation_step(r, step)) continue;
        TRY(evaluate(t, step, validation));
        t->since = ddp_now();
    }
    return DDP_OK;
}

//== the end ================================================================================================== >>end

/* What the model writes when it goes on from the start of the validation text. Rank 0 draws, the others compute along. Collective. */
static ddp_result generate(trainer *t) {
    run *r = &t->run;
    int tokens[32 + SAMPLE_BYTES], prompt, context = r->plan.config.context, vocab = plan_vocab(&r->plan),
                                           start = 0;
    size_t n = (size_t)r->plan.config.micro_batch * (size_t)context;
    void *logits = NULL, *values[3 * GPT_BLOCK_PARAMS];
    TRY(sample_prompt(r, tokens, &prompt));
    float *near = (float *)malloc((size_t)vocab * sizeof *near);
    ddp_result result = near ? t->memory->alloc(t->along_dp, (size_t)vocab * sizeof *near, &logits)
                             : run_out_of_memory();
    if (result == DDP_OK) result = ddp_fsdp_no_grad(t->fsdp, 1);
    for (int at = prompt; at < prompt + SAMPLE_BYTES && result == DDP_OK; at++) {
        if (at - start > context) start = at - (context + 1) / 2;
        memset(r->tokens, 0, n * sizeof *r->tokens);
        memset(r->targets, 0, n * sizeof *r->targets);
        memcpy(r->tokens, tokens + start, (size_t)(at - start) * sizeof *tokens);
        result = place_tokens(t, 0);
        if (result == DDP_OK) result = forward(t, t->unit_count - 2, 1);
        if (result == DDP_OK) result = gather(t, t->unit_count - 1);
        point_at(t, t->unit_count - 1, 0, values);
        if (result == DDP_OK) result = gpt_cuda_logits(t->model, 0, values, at - start - 1, (float *)logits);
        if (result == DDP_OK) result = ddp_fsdp_reshard(t->fsdp, t->unit_count - 1);
        if (result != DDP_OK) break;
        t->memory->copy(near, logits, (size_t)vocab * sizeof *near);
        tokens[at] = gpt_sample(near, vocab, 0.8f, gpt_sample_draw((uint64_t)r->plan.config.seed, at));
    }
    if (result == DDP_OK) result = ddp_fsdp_no_grad(t->fsdp, 0);
    if (result == DDP_OK && r->rank == 0) print_sample(&r->plan, tokens, prompt);
    if (logits) t->memory->free(t->along_dp, logits);
    free(near);
    return result;
}

/* Rank 0. memory: of ddp_fsdp here. */
static ddp_result print_table(const trainer *t, const ddp_fsdp_memory *memory) {
    const run *r = &t->run;
    const run_config *c = &r->plan.config;
    gpt_cuda_desc whole = t->desc;
    cudaDeviceProp properties;
    double tokens = tokens_per_second(r, c->steps), steps = (double)(c->steps - r->plan.first_step),
           gpus = (double)r->world_size / t->sharing, flops, peak;
    CUDA(cudaGetDeviceProperties(&properties, t->device));
    whole.first_unit = 0, whole.end_unit = t->unit_count, whole.tensor_ranks = 1, whole.tensor_rank = 0,
    whole.tensor = NULL;
    flops = gpt_cuda_flops(&whole) * tokens / ((double)c->micro_batch * c->context);
    peak = t->dtype == DDP_BF16 ? find_peak(t->device).flops * gpus : 0;
    printf(
        "\n  ranks   pp   dp   tp   strategy   dtype   tokens/s   TFLOP/s     MFU   host in a step   step\n");
    printf("  %5d   %2d   %2d   %2d   %-8s   %-5s   %8.0f   %7.2f   ", r->world_size, t->pp, t->dp, t->tp,
           strategy_name(t->strategy), t->dtype == DDP_BF16 ? "bf16" : "f32", tokens, flops * 1e-12);
    if (peak > 0)
        printf("%4.1f%%", 100 * flops / peak);
    else
        printf("    -");
    printf("   %11.2f ms   %.2f ms\n", steps > 0 ? t->host_seconds / steps * 1e3 : 0,
           steps > 0 ? r->train_seconds / steps * 1e3 : 0);
    printf("  %s; of each rank's GPU: %.1f MiB expected, %.1f MiB of activations, %.1f MiB of shards, "
           "gradients and moments at the peak\n",
           properties.name, (double)t->needed / MIB, (double)gpt_cuda_bytes(&t->desc) / MIB,
           (double)(memory->peak.total - memory->peak.bookkeeping
                    - (r->options->offload ? memory->now.optimizer : 0))
               / MIB);
    if (t->pp > 1) printf("  bubble: %.1f%% predicted\n", 100 * t->stats.predicted_bubble_rate);
    printf("\n");
    return DDP_OK;
}

/* Every rank hashes all values. Collective. */
static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    *hash = HASH_START;
    for (int i = 0; i < t->param_count; i++) {
        if (t->run.infos[i].tied_to >= 0) continue;
        TRY(gather_whole(t, i, -1));
        *hash = hash_bytes(*hash, t->whole, (size_t)t->run.infos[i].count * sizeof(float));
    }
    return DDP_OK;
}

/* Sample, tables, and what every run ends with. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    ddp_fsdp_memory memory = DDP_ZERO;
    uint64_t hash;
    TRY(ddp_fsdp_get_memory(t->fsdp, &memory));
    if (t->pipeline)
        TRY(ddp_pipeline_get_stats(t->pipeline, &t->stats));
    else
        TRY(generate(t));
    if (r->rank == 0) TRY(print_table(t, &memory));
    if (t->mark_count) TRY(print_profile(t));
    TRY(hash_weights(t, &hash));
    if (r->options->timeline) TRY(write_timeline(t));
    return run_finish(r, validation, hash);
}

static ddp_result build(trainer *t) {
    void *memory;
    TRY(place_rank(t));
    TRY(build_slices(t));
    TRY(pick_gpu(t));
    TRY(check_memory(t));
    TRY(build_device(t));
    TRY(build_shards(t));
    t->desc.stream = t->stream;
    t->desc.tensor = t->along_tp;
    if (t->run.options->profile && t->run.rank == 0) t->desc.note = profile_mark, t->desc.note_user = t;
    TRY(gpt_cuda_create(&t->model, &t->desc));
    TRY(build_loader(t));
    CUDA(cudaHostAlloc((void **)&t->norms, 2 * sizeof *t->norms, cudaHostAllocDefault));
    TRY(t->memory->alloc(t->along_dp, sizeof *t->squares + sizeof(float), &memory));
    t->squares = (ddp_exact_sum *)memory;
    return t->pp > 1 ? build_pipeline(t) : build_tables(t);
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0;
    find_mesh(t);
    TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    TRY(with_savings(t, build(t)));
    choose_trace(t);
    run_report_start(r);
    if (r->rank == 0 && t->any_share)
        printf("ranks share a GPU: what they tell each other goes through host memory, which is slow\n");
    TRY(with_savings(t, train_steps(t, &validation)));
    return finish(t, validation);
}

/* What one rank alone fails with, the others hear in the groups where they wait for it: memory goes back together. */
static ddp_result train_and_tell(void *user) {
    trainer *t = (trainer *)user;
    ddp_result result = train(t);
    ddp_group *groups[] = {t->along_tp, t->along_pp, t->along_dp, t->everybody, t->run.world};
    char error[512], cause[540];
    if (result == DDP_OK || !t->along_dp || t->run.world_size == 1) return result;
    snprintf(error, sizeof error, "%.511s", ddp_last_error());
    if (strncmp(error, "rank ", 5))
        snprintf(cause, sizeof cause, "rank %d: %s", t->run.rank, error);
    else
        snprintf(cause, sizeof cause, "%s", error);
    for (int i = 0; i < 5; i++)
        if (groups[i]) ddp_group_poison(groups[i], result, cause);
    return ddp_fail(result, "%s", cause);
}

static void free_events(trainer *t) {
    for (int k = 0; k < 2; k++) {
        if (t->copied[k]) cudaEventDestroy(t->copied[k]);
        if (t->done[k]) cudaEventDestroy(t->done[k]);
    }
    for (int i = 0; i < t->span_count; i++) {
        if (t->spans[i].from) cudaEventDestroy(t->spans[i].from);
        if (t->spans[i].to) cudaEventDestroy(t->spans[i].to);
    }
    for (int i = 0; i < t->mark_count; i++) cudaEventDestroy(t->marks[i].event);
    if (t->origin) cudaEventDestroy(t->origin);
}

static void trainer_free(void *user) {
    trainer *t = (trainer *)user;
    if (t->stream) cudaStreamSynchronize(t->stream);
    if (t->copies) cudaStreamSynchronize(t->copies);
    ddp_pipeline_destroy(t->pipeline);
    gpt_cuda_destroy(t->model);
    ddp_fsdp_destroy(t->fsdp);
    if (t->narrow) t->memory->free(t->along_dp, t->narrow);
    if (t->norms) cudaFreeHost(t->norms);
    if (t->squares) t->memory->free(t->along_dp, t->squares);
    ddp_loader_destroy(t->loader);
    for (int k = 0; k < 2; k++) {
        if (t->pinned[k]) cudaFreeHost(t->pinned[k]);
        if (t->sums[k]) cudaFreeHost(t->sums[k]);
        if (t->staged[k]) cudaFree(t->staged[k]);
    }
    for (int s = 0; s < t->slots && t->batch; s++)
        if (t->batch[s]) cudaFree(t->batch[s]);
    free_events(t);
    ddp_group_destroy(t->everybody);
    ddp_group_destroy(t->along_tp);
    ddp_group_destroy(t->along_pp);
    ddp_group_destroy(t->along_dp);
    ddp_cuda_use_stream(0);
    if (t->stream) cudaStreamDestroy(t->stream);
    if (t->copies) cudaStreamDestroy(t->copies);
    ddp_mesh_destroy(t->mesh);
    ddp_schedule_destroy(t->schedule);
    if (t->mapped) munmap((void *)t->mapped, t->mapped_bytes);
    llmc_close(&t->init);
    run_free(&t->run);
    free(t->saved.bytes);
    free(t->stage_begin);
    free(t->slices);
    free(t->slice_of);
    free(t->params);
    free(t->pointers);
    free(t->units);
    free(t->whole);
    free(t->batch);
    free(t->tables);
    free(t->table_of);
    free(t->slot_of);
    free(t->free_slots);
    free(t->offset);
    free(t->spans);
    free(t->marks);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    return run_trainer(world, (job *)user, sizeof(trainer), train_and_tell, trainer_free);
}

int main(int argc, char **argv) {
    job j;
    memset(&j, 0, sizeof j);
    parse_options(&PROGRAM, argc, argv, &j.options);
    j.ranks = check_flags(&j.options);
    if (j.options.write_random && !j.options.wrong[0] && !j.options.help) {
        int status = write_random(&j.options);
        free(j.options.paths);
        return status;
    }
    return run_main(&j, rank_main);
}

/* MIT License: see LICENSE. */

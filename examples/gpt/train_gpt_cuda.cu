/*  train_gpt_cuda.cu - trains a GPT on GPUs in bf16 or f16, with FSDP, pipeline and tensor parallelism.

USAGE
    nvcc -std=c++17 -O3 -arch=native examples/gpt/train_gpt_cuda.cu -o train_gpt_cuda \
         -lcublasLt -lnccl -lpthread -lm
    ./train_gpt_cuda [flags] [files or folders]         one GPU; --help lists the flags
    ./train_gpt_cuda --gpus 0,1,2,3 --strategy full     one rank per GPU; --gpus 0,0 shares a GPU and is slow
    ./train_gpt_cuda --layers 12 --heads 12 --channels 768 --context 1024 --micro-batch 32 --batch 32 \
                     --lr 6e-4 data/train_000.bin
    torchrun --no-python --nproc_per_node 8 ./train_gpt_cuda --stages 2 --tp 2

    The data is text (vocabulary: 256 bytes) or token shards of llm.c (vocabulary: 50257). The shards of a
    folder form one sequence, in the order of their names. Shards stay on disk: rank 0 checks all tokens at
    the start, and each rank reads the windows of its batches. --init loads initial values from a GPT-2
    checkpoint of llm.c.

RANKS
    A mesh of pp x dp x tp ranks, as in train_gpt_3d: --stages sets pp, --tp sets tp, the rest is dp.
    --strategy selects what the ranks along dp shard. Each axis has its own group of GPUs.

    Without --stages each unit of the model is an FSDP unit, as in train_gpt_fsdp. The strategies full and
    grad reduce gradients after each micro-batch. With --stages each rank has one stage, which is one FSDP
    unit, as in train_gpt_3d.

TIED EMBEDDING
    The embedding and the head share the matrix wte. --tied-grads chooses the number of its gradients:

        separate   One per use, as in train_gpt_fsdp. Both are reduced, and added afterwards. With --stages
                   the uses are on different ranks. This is the default. It has the same bits with and
                   without --stages.
        merged     One for both uses. The embedding's backward adds to what the head's has written, so wte is
                   reduced once. Unit 0, which has the matrix, stays unsharded from the first forward of a
                   micro-batch to the last backward. The strategy full then gathers wte once per micro-batch
                   instead of up to four times, and needs memory for one more unit. The bits are the same on
                   any number of GPUs along dp and with any strategy, but not those of `separate`. Not with
                   --stages. With --order any this is the default.

STEP
    The host enqueues a step and does not wait within it. While the device computes step s, the host packs the
    windows of step s + 1, which a copy stream transfers, and enqueues the micro-batches of step s + 1. Only
    then does it wait for step s and read its loss and norm from pinned memory. So the device always has work,
    and the progress line and the check for NaN are one step late.

        host     pack 1 | micro-batches 1, update 1 | pack 2 | micro-batches 2 | read 1 | update 2 | pack 3
        copies         1                                   2                                             3
        device            | step 1                                             | step 2

    CUDA graphs: on one rank without --offload, forward and backward of a micro-batch are one graph. On
    several ranks, micro-batches without communication are one graph too: with the strategies optim and none,
    all except the first and last of a step. Otherwise each unit's forward and each unit's backward is a
    graph, and collectives are ordinary calls: in a graph they would have no sequence numbers, no mismatch
    checks and no timeouts. Norm and optimizer are not captured, because step and learning rate change.

    With --stages the host waits at the end of each step. With --dtype f16 it waits once per step until the
    gradients are summed, because the device finds out whether the step counts: see LOSS SCALE. The device is
    idle until the host has enqueued more work. Ranks that share a GPU also wait for each other within a step.
    --timeline writes a trace, --profile prints the time of each kernel.

LOSS SCALE
    f16 holds magnitudes from 6e-8 to 65504. --dtype f16 therefore multiplies the gradient of the loss by a
    scale, as ddp_scaler describes: --loss-scale at the start, half of it after an overflow, twice of it after
    2000 steps without one. The scale is in device memory, where captured kernels read it. Averages of
    gradients are divided by it in f32. If one of them is not finite on any rank, the step changes no weight
    and does not count. The next batch takes its place, and a line shows the new scale. All ranks decide the
    same, so DETERMINISM holds for f16, too.

    A checkpoint folder stores the scale. A checkpoint file has no place for it, so --dtype f16 does not write
    one. A run that resumes a file starts with --loss-scale.

DETERMINISM
    Gradients are summed in f32, in the tree order of train_gpt, for every --dtype. The same --batch and
    --micro-batch give the same weights on any number of GPUs along dp, with any strategy, in every run. --tp
    and the GPU model can change the bits. With two flags, only a part of this promise holds:

        --order any            NCCL chooses the order of sums over ranks, along dp and tp. The bits can depend
                               on the number of GPUs along dp, the strategy and NCCL's version. With one GPU
                               along both, they do not change.
        --reduce-dtype bf16    Gradients are rounded to 16 bits before they are sent, and sums over ranks once
        --reduce-dtype f16     more. This halves the bytes. The strategies optim and none then also add
                               micro-batches in 16 bits. The bits can depend on the number of GPUs along dp
                               and on the strategy, but every run with the same flags has the same bits.

COST OF THE TREE
    Bytes that a rank sends in a reduce-scatter of P bytes over W = N G ranks: N nodes of G = 8 GPUs, with one
    network card for each GPU. An all-reduce sends twice as many. The tree is an all-to-all, a local tree and,
    in an all-reduce, an all-gather.

                                              per rank          of these, through its network card
        one node, ring or tree                P (W - 1) / W     -
        N nodes, ring of NCCL                 P (W - 1) / W     P (W - 1) / (W G)
        N nodes, flat tree                    P (W - 1) / W     P (N - 1) / N
        N nodes, tree inside nodes first      P (W - 1) / W     P (N - 1) / W

    Inside a node the tree sends the bytes of the ring, but in up to three stages, each of which waits for the
    one before. Across nodes a flat tree sends G^2 (N - 1) / (G N - 1) times the bytes of the ring through
    each card: 4.3 times for 2 nodes, 7.1 for 8, at most 8. A tree that reduces inside each node first sends
    no more than the ring. For a 16-bit --reduce-dtype it sends up to twice that, because its partial sums are
    f32. The groups of this program reduce inside nodes first if each node has 2^k consecutive ranks of the
    group: see ddp_cuda_group_create. Otherwise the tree is flat, and --order any sends less.

CHECKPOINTS
    --checkpoint FILE writes the format of train_gpt: f32 values and moments, which both programs can resume.
    All ranks together write a FOLDER, which exists or ends in a slash: train_gpt_fsdp reads it, or
    train_gpt_3d with --tp 2 or more.

    Tested on the fake GPU of tests/support with up to 6 ranks. It has not run on a GPU. */
#define DDP_IMPLEMENTATION
#include "gpt_cuda.cuh"
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#define TRAIN_PROMISE                                                                                      \
    "The same --batch, --micro-batch and --tp give the same weights on any number of GPUs, bit for bit,\n" \
    "except with --order any or a 16-bit --reduce-dtype."
#define TRAIN_RANKS "one per entry of --gpus, or as many as --stages and --tp need"
#include "checkpoint.h"
#include "folder.h"
#include "../extras/llmc.h"
#include "train.h"

static const flag FLAGS[] = {
    TRAIN_FLAGS,
    {"--gpus", FLAG_TEXT, NOT_SAVED, AT(gpus), 0, 0,
     "LIST devices, such as 0,2: local rank r uses entry r modulo the length; default: its local rank"},
    {"--dtype", FLAG_TEXT, NOT_SAVED, AT(dtype), 0, 0, "NAME dtype of the model: bf16 (default), f16 or f32"},
    {"--loss-scale", FLAG_DOUBLE, NOT_SAVED, AT(loss_scale), 1, 1e30,
     "X first loss scale of --dtype f16, a power of two; default 65536; a resumed folder has\n"
     "                        its own"},
    {"--order", FLAG_TEXT, NOT_SAVED, AT(order), 0, 0,
     "NAME order of sums over ranks: tree (default; fixed) or any (NCCL's; sends less between nodes)"},
    {"--reduce-dtype", FLAG_TEXT, NOT_SAVED, AT(reduce_dtype), 0, 0,
     "NAME dtype in which gradients are added over ranks: f32 (default), or bf16 or f16 (half the bytes;\n"
     "                        f16 needs --dtype f16)"},
    {"--tied-grads", FLAG_TEXT, NOT_SAVED, AT(tied_grads), 0, 0,
     "NAME gradients of the matrix that embedding and head share: separate (one per use) or\n"
     "                        merged (reduced once; not with --stages). Default: separate; with --order any\n"
     "                        and without --stages merged"},
    {"--strategy", FLAG_TEXT, NOT_SAVED, AT(strategy), 0, 0,
     "NAME sharding: full (ZeRO-3, default), grad (ZeRO-2), optim (ZeRO-1) or none"},
    {"--stages", FLAG_INT32, NOT_SAVED, AT(stages), 1, DDP_MAX_LOCAL_RANKS,
     "N stages of the pipeline; default 1"},
    {"--schedule", FLAG_TEXT, NOT_SAVED, AT(schedule), 0, 0,
     "NAME of the pipeline: 1F1B (default), GPipe or naive"},
    {"--tp", FLAG_INT32, NOT_SAVED, AT(tensor), 1, DDP_MAX_LOCAL_RANKS,
     "N ranks of tensor parallelism; default 1"},
    RECOMPUTE_FLAG("blocks"),
    {"--offload", FLAG_SWITCH, NOT_SAVED, AT(offload), 0, 1,
     "keep master weights and moments in host memory"},
    {"--offload-params", FLAG_SWITCH, NOT_SAVED, AT(offload_params), 0, 1,
     "also parameters and sums of gradients, for a model larger than the GPU; needs --strategy full"},
    {"--memory-limit", FLAG_INT32, NOT_SAVED, AT(memory_limit), 1, 1e9,
     "MIB GPU memory available to the ranks of a GPU; default: its free memory. CUDA's\n"
     "                        own memory for graphs and libraries is not counted"},
    {"--no-graphs", FLAG_SWITCH, NOT_SAVED, AT(no_graphs), 0, 1,
     "launch kernels one by one instead of CUDA graphs; always so with --tp 2 or more"},
    {"--timeline", FLAG_TEXT, NOT_SAVED, AT(timeline), 0, 0,
     "FILE write a trace of three steps for chrome://tracing or Perfetto; a CUDA graph is one\n"
     "                        span, so --no-graphs shows more"},
    {"--gemm-table", FLAG_TEXT, NOT_SAVED, AT(gemm_table), 0, 0,
     "FILE algorithms of cuBLASLt, from bench_gpt --tune; the same file gives the same bits"},
    {"--profile", FLAG_SWITCH, NOT_SAVED, AT(profile), 0, 1,
     "print the time of each kernel in one step; disables CUDA graphs"},
    {"--init", FLAG_TEXT, NOT_SAVED, AT(init), 0, 0,
     "FILE initial values and shape from a GPT-2 checkpoint of llm.c"},
    {"--write-random", FLAG_TEXT, NOT_SAVED, AT(write_random), 0, 0,
     "FILE write a checkpoint for --init with random values and exit; GPT-2 124M, unless flags\n"
     "                        change the shape"},
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0,
     "PATH file or folder to save to at every validation and at the end"},
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0,
     "PATH continue from a checkpoint, with any number of ranks and any strategy; a folder\n"
     "                        written with --tp 1 needs --tp 1, other folders need --tp 2 or more"},
    {"--help", FLAG_SWITCH, NOT_SAVED, AT(help), 0, 1, "print this text"},
};
static const run_program PROGRAM = {"train_gpt_cuda", "trains a GPT on bytes or tokens on GPUs", FLAGS,
                                    (int)(sizeof FLAGS / sizeof FLAGS[0])};

enum { GPU_LIST = 64, TRACE_STEPS = 3 };

#define MIB 1048576.0
#ifndef WITHOUT_WAITING
#define WITHOUT_WAITING(call) (call) /* tests check that it does not wait for the device */
#endif
#define CUDA(call)                                                            \
    do {                                                                      \
        cudaError_t cuda_error = (call);                                      \
        if (cuda_error != cudaSuccess) return cuda_failed(#call, cuda_error); \
    } while (0)

/* Error line such as "cudaMemcpyAsync: out of memory (cudaErrorMemoryAllocation)". */
static ddp_result cuda_failed(const char *call, cudaError_t error) {
    return ddp_fail(error == cudaErrorMemoryAllocation ? DDP_ERR_NO_MEMORY : DDP_ERR_ENGINE, "%.*s: %s (%s)",
                    (int)strcspn(call, "("), call, cudaGetErrorString(error), cudaGetErrorName(error));
}

//== flags ==================================================================================================

/* Parses a list such as "0,2" or "0 2" and returns its length, or -1 if it is invalid. */
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

/* The second number of --gpus 0 2, which looks like a list of devices but is parsed as a file. NULL: none. */
static const char *stray_gpu(const run_options *o) {
    for (int i = 0; o->gpus && i < o->path_count; i++)
        if (o->paths[i][0] && !o->paths[i][strspn(o->paths[i], "0123456789, ")]
            && access(o->paths[i], F_OK) != 0)
            return o->paths[i];
    return NULL;
}

/* Whether the value of a flag is one of two names. NULL is the default. */
static int is_one_of(const char *value, const char *one, const char *other) {
    return !value || !strcmp(value, one) || !strcmp(value, other);
}

/* Checks single flags. Returns the number of ranks to start if --ranks is not set. */
static int check_flags(run_options *o) {
    int gpus[GPU_LIST], exponent, strategy = find_strategy(o->strategy), count = read_gpus(o->gpus, gpus);
    int64_t stages = o->stages ? o->stages : 1;
    int64_t tensor = o->tensor ? o->tensor : 1, least = stages * tensor;
    ddp_dtype dtype = find_dtype(o->dtype, DDP_BF16), reduce_dtype = find_dtype(o->reduce_dtype, DDP_F32);
    o->reads_tokens = 1;
    o->round_robin = !(o->stages > 1) && (strategy == DDP_FSDP_FULL_SHARD || strategy == DDP_FSDP_SHARD_GRAD);
    if (o->offload_params) o->offload = 1;
    if (o->wrong[0]) return 1;
    if (strategy == STRATEGY_COUNT)
        snprintf(o->wrong, sizeof o->wrong, "--strategy %.60s: use full, grad, optim or none", o->strategy);
    else if (o->offload_params && (strategy != DDP_FSDP_FULL_SHARD || o->stages > 1))
        snprintf(o->wrong, sizeof o->wrong,
                 "--offload-params streams one unit at a time; use --strategy full and leave out --stages");
    else if (!dtype)
        snprintf(o->wrong, sizeof o->wrong, "--dtype %.60s: use bf16, f16 or f32", o->dtype);
    else if (dtype != DDP_F16 && o->loss_scale)
        snprintf(o->wrong, sizeof o->wrong, "--loss-scale %g needs --dtype f16; leave it out", o->loss_scale);
    else if (o->loss_scale && frexp(o->loss_scale, &exponent) != 0.5)
        snprintf(o->wrong, sizeof o->wrong, "--loss-scale %g: use a power of two, such as 65536",
                 o->loss_scale);
    else if (dtype == DDP_F16 && o->write_random)
        snprintf(o->wrong, sizeof o->wrong,
                 "--write-random %.60s: files of llm.c are bf16 or f32; use another --dtype",
                 o->write_random);
    else if (!is_one_of(o->order, "tree", "any"))
        snprintf(o->wrong, sizeof o->wrong, "--order %.60s: use tree or any", o->order);
    else if (!reduce_dtype)
        snprintf(o->wrong, sizeof o->wrong, "--reduce-dtype %.60s: use f32, bf16 or f16", o->reduce_dtype);
    else if (reduce_dtype == DDP_F16 && dtype != DDP_F16)
        snprintf(o->wrong, sizeof o->wrong,
                 "--reduce-dtype f16 overflows without a loss scale; use bf16, or --dtype f16");
    else if (!is_one_of(o->tied_grads, "separate", "merged"))
        snprintf(o->wrong, sizeof o->wrong, "--tied-grads %.60s: use separate or merged", o->tied_grads);
    else if (o->tied_grads && o->tied_grads[0] == 'm' && o->stages > 1)
        snprintf(o->wrong, sizeof o->wrong,
                 "--tied-grads merged: with --stages %d embedding and head are on different ranks; use "
                 "--tied-grads separate",
                 o->stages);
    else if (count < 0)
        snprintf(o->wrong, sizeof o->wrong, "--gpus %.60s: use up to %d device numbers, such as 0,2", o->gpus,
                 GPU_LIST);
    else if (stray_gpu(o))
        snprintf(o->wrong, sizeof o->wrong,
                 "--gpus %.60s: the file %.60s is missing; put commas between devices: --gpus %.60s,%.60s",
                 o->gpus, stray_gpu(o), o->gpus, stray_gpu(o));
    else if (o->init && o->resume)
        snprintf(o->wrong, sizeof o->wrong, "--init and --resume both load values; leave one of them out");
    if (o->wrong[0] || least > DDP_MAX_LOCAL_RANKS)
        return 1; /* more ranks need a launcher; without one, check_mesh reports it */
    return count > least ? count : (int)least;
}

/* --write-random: GPT-2 124M, unless flags change the shape. Returns the exit status. */
static int write_random(const run_options *o) {
    llmc_header h = llmc_gpt2_124m();
    const run_config *c = &o->config;
    if (c->layers) h.config.layers = c->layers;
    if (c->heads) h.config.heads = c->heads;
    if (c->channels) h.config.channels = c->channels;
    if (c->context) h.config.context = c->context;
    h.dtype = find_dtype(o->dtype, DDP_F32);
    if (llmc_write_random(o->write_random, &h, c->seed < 0 ? 1 : (uint64_t)c->seed) != DDP_OK) {
        fprintf(stderr, "%s: %s\n", o->program->name, ddp_last_error());
        return 1;
    }
    printf("%s: %d layers, %d heads, %d channels, context %d, %lld bytes\n", o->write_random, h.config.layers,
           h.config.heads, h.config.channels, h.config.context, (long long)llmc_file_bytes(&h));
    return 0;
}

//== trainer ================================================================================================

/* The part of a parameter that is one parameter of ddp_fsdp: a box of its rows and columns. With stages every
   rank lists all slices, because checkpoints need the same list on every rank; slices of other stages have no
   rows. */
typedef struct slice {
    int param, box;
    int unit, place; /* unit of ddp_fsdp and index in it */
    int here;        /* this rank's stage has it */
    int counted;     /* among ranks with the same values, this one contributes to norm, hash and checkpoint */
    gpt_cuda_box at; /* position in the full parameter */
    char name[40];
} slice;

/* One span of --timeline. */
typedef struct span {
    const char *name;
    int unit, step;
    double begin, end;    /* of the host, in seconds */
    cudaEvent_t from, to; /* of the device; NULL: host only */
} span;

/* One entry of --profile: the work between the previous event and this one. */
typedef struct mark {
    const char *name;
    double flops, bytes;
    cudaEvent_t event;
} mark;

/* One rank. */
typedef struct trainer {
    struct run run;
    ddp_dtype dtype;        /* of the model */
    ddp_dtype reduce_dtype; /* of sums of gradients over ranks */
    ddp_order order;        /* of sums over ranks */
    int merges_tied;        /* wte has one gradient for both uses; see TIED EMBEDDING */
    ddp_fsdp_strategy strategy;
    int pp, dp, tp, stage, replica, tensor_rank;
    int device, sharing; /* GPU of this rank, and the number of ranks on it */
    int any_share;       /* some GPU has several ranks */
    ddp_mesh *mesh;
    ddp_group *along_pp, *along_dp, *along_tp; /* GPUs along an axis; NULL for pp or tp of size 1 */
    ddp_group *all_gpus;                       /* for the norm with pp or tp above 1; otherwise NULL */
    const ddp_device *memory;
    cudaStream_t stream, copies;
    gpt_cuda_desc desc;
    gpt_cuda *model;
    int param_count, unit_count; /* of the full model */
    int first_unit, end_unit;    /* units of this rank: first_unit to end_unit - 1 */
    int *stage_begin;            /* first unit of each stage; pp + 1 entries */

    int slice_count;
    slice *slices;
    int *slice_of;          /* param_count + 1 entries: first slice of each parameter */
    ddp_fsdp_param *params; /* slice_count */
    ddp_fsdp_unit_desc *units;
    ddp_fsdp *fsdp;
    ddp_fsdp_state state;      /* part of a checkpoint folder */
    ddp_scaler scaler;         /* --dtype f16 */
    float *loss_scale;         /* device: its scale, which the model reads; NULL without a scaler */
    unsigned char *half_grads; /* with stages and 16 bits: gradients of one unit, as written by backward */
    float *full_param;         /* host memory for the largest parameter */

    ddp_loader *loader;
    int micro_count; /* micro-batches of this rank per step */
    int loaded_first,
        loaded_every; /* micro-batch m is number loaded_first + m * loaded_every of the loader's */
    size_t batch_ints;
    int32_t *pinned[2]; /* host: micro_count batches of a step, by parity of the step */
    int32_t *staged[2]; /* device: copy of pinned */
    int32_t **batch;    /* device: input of the model, one per slot */
    void *(
        *tables)[3 * GPT_BLOCK_PARAMS]; /* micro-batch as one graph: values of each unit, gradients of each */
    void *const **table_of;             /* pointers to the tables */
    double *sums[2];                    /* pinned: losses of a step */
    float *norms;                       /* pinned: norms of two steps, with pp or tp above 1 */
    ddp_exact_sum *squares;             /* device: sum of squares, followed by clip factor and loss scale */
    cudaEvent_t copied[2], done[2];

    ddp_schedule *schedule;
    ddp_pipeline *pipeline;
    ddp_param **pointers; /* parameters of this stage */
    int slots, *slot_of;  /* activation slots of the model; slot of each micro-batch in flight */
    int *free_slots, free_count;
    int parity;         /* of the current step */
    int64_t validating; /* this replica's first validation micro-batch in the current evaluation */
    ddp_pipeline_stats stats;

    llmc_model init;   /* --init */
    text_buffer saved; /* rank 0, during plan_run: the file of --resume */
    checkpoint_header saved_header;
    const unsigned char *mapped; /* the file of --resume, on every rank */
    size_t mapped_bytes;
    int64_t *offset; /* per parameter: first element of its values in the file; tied parameters share it */

    size_t needed; /* estimated bytes of GPU memory */
    int trace_first, trace_last, tracing, step;
    span *spans;
    int span_count, span_room;
    cudaEvent_t origin; /* common origin of the two clocks, with origin_seconds */
    double origin_seconds;
    double host_seconds; /* time to enqueue steps */
    double since;        /* train_seconds includes the time up to here */
    mark *marks;
    int mark_count, mark_room, profiling;
} trainer;

static int is_last(const trainer *t) { return t->stage == t->pp - 1; }
static size_t element_bytes(const trainer *t) { return ddp_dtype_size(t->dtype); }
static int is_folder(const char *path) {
    struct stat info;
    return path && (path[strlen(path) - 1] == '/' || (stat(path, &info) == 0 && S_ISDIR(info.st_mode)));
}

//== plan ===================================================================================================

/* Sets the shape of the mesh, dtypes, order and strategy from the flags. */
static void set_mesh(trainer *t) {
    const run_options *o = t->run.options;
    t->pp = o->stages ? o->stages : 1;
    t->tp = o->tensor ? o->tensor : 1;
    t->dp = t->run.world_size / (t->pp * t->tp);
    if (t->dp < 1) t->dp = 1;
    t->dtype = find_dtype(o->dtype, DDP_BF16);
    t->reduce_dtype = DDP_F32; /* a single rank along dp sends nothing */
    if (t->dp > 1) t->reduce_dtype = find_dtype(o->reduce_dtype, DDP_F32);
    t->order = o->order && !strcmp(o->order, "any") ? DDP_ORDER_ANY : DDP_ORDER_TREE;
    t->merges_tied = o->tied_grads ? o->tied_grads[0] == 'm' : t->order == DDP_ORDER_ANY && t->pp == 1;
    t->strategy = (ddp_fsdp_strategy)find_strategy(o->strategy);
}

static ddp_result make_schedule(trainer *t) {
    const run_config *c = &t->run.plan.config;
    const char *name = t->run.options->schedule;
    ddp_schedule_desc desc = DDP_ZERO;
    if (name) DDP_TRY(ddp_schedule_kind_find(name, &desc.kind));
    if (desc.kind != DDP_SCHEDULE_1F1B && desc.kind != DDP_SCHEDULE_GPIPE && desc.kind != DDP_SCHEDULE_NAIVE)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--schedule %s needs a split backward, several stages per rank or delayed weights, which "
            "this trainer does not support; use 1F1B, GPipe or naive",
            name);
    desc.rank_count = t->pp;
    desc.microbatch_count = c->batch / c->micro_batch / t->dp;
    return ddp_schedule_create(&t->schedule, &desc);
}

/* Fills the desc of the model, except the stream and the groups. */
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
    d->tied_grads = t->merges_tied;
    d->tensor_ranks = t->tp;
    d->tensor_rank = t->tensor_rank;
}

/* Rank 0: sets the shape from the checkpoint of --init and checks it against the flags. */
static ddp_result plan_init(trainer *t, run_options *o) {
    DDP_TRY(llmc_open(&t->init, o->init));
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
            return ddp_fail(DDP_ERR_INVALID, "--init %s: its %s is %d, not %d; leave %s out", o->init,
                            fields[i].name, fields[i].value, *fields[i].flag, fields[i].name);
        *fields[i].flag = fields[i].value;
    }
    if (!o->config.context) o->config.context = has.context;
    if (o->config.context <= has.context) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID, "--init %s has positions for --context %d, not %d; use that or less",
                    o->init, has.context, o->config.context);
}

static ddp_result check_mesh(const trainer *t) {
    int ranks = t->run.world_size, rest = t->pp * t->tp, units = t->run.plan.config.layers + 2;
    if (rest > ranks && rest > DDP_MAX_LOCAL_RANKS)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--stages %d x --tp %d are %d ranks, and there are %d; start as many under torchrun, or "
            "use %d at most",
            t->pp, t->tp, rest, ranks, DDP_MAX_LOCAL_RANKS);
    if (ranks % rest || t->pp * t->dp * t->tp != ranks)
        return ddp_fail(DDP_ERR_INVALID, "--stages %d x --tp %d does not divide %d ranks; use --ranks %d",
                        t->pp, t->tp, ranks, (ranks + rest - 1) / rest * rest);
    if (t->run.plan.config.layers && t->pp > units)
        return ddp_fail(DDP_ERR_INVALID,
                        "--stages %d: stages for an embedding, %d blocks and a head; use --layers %d or more",
                        t->pp, units - 2, t->pp - 2);
    return DDP_OK;
}

/* Rank 0: checks all input, before a GPU is used and before anything is written. */
static ddp_result plan_run(trainer *t) {
    run *r = &t->run;
    run_options options = *r->options;
    const run_options *o = &options;
    const char *wrong;
    run_saved saved;
    memset(&saved, 0, sizeof saved);
    DDP_TRY(check_options(o, r->world_size));
    DDP_TRY(check_mesh(t));
    if (o->checkpoint)
        DDP_TRY(is_folder(o->checkpoint) ? folder_check(o->checkpoint) : check_writable(o->checkpoint));
    if (o->checkpoint && !is_folder(o->checkpoint) && t->dtype == DDP_F16)
        return ddp_fail(
            DDP_ERR_INVALID,
            "--checkpoint %s: a file has no place for the loss scale of --dtype f16; use a folder: "
            "--checkpoint %s/",
            o->checkpoint, o->checkpoint);
    if (o->timeline) DDP_TRY(check_writable(o->timeline));
    if (o->init) DDP_TRY(plan_init(t, &options));
    if (o->resume && is_folder(o->resume)) {
        DDP_TRY(folder_read(o, &saved));
        DDP_TRY(folder_check_qkv(o->resume, t->tp > 1,
                                 t->tp > 1 ? "use --tp 1, or go on with train_gpt_fsdp"
                                           : "use --tp 2 or more, or go on with train_gpt_3d"));
    } else if (o->resume) {
        DDP_TRY(checkpoint_read(o->resume, &t->saved, &t->saved_header));
        saved = t->saved_header.run;
    }
    DDP_TRY(make_plan(&r->plan, o, t->dp, o->resume ? &saved : NULL, &r->text));
    if (o->init && t->init.header.config.vocab != plan_vocab(&r->plan))
        return ddp_fail(DDP_ERR_INVALID,
                        "--init %s has a vocabulary of %d, and the text one of %d; give token shards for "
                        "GPT-2's, text for one of 256",
                        o->init, t->init.header.config.vocab, plan_vocab(&r->plan));
    DDP_TRY(check_mesh(t));
    if (t->pp > 1 || o->schedule) DDP_TRY(make_schedule(t));
    ddp_schedule_destroy(t->schedule);
    t->schedule = NULL;
    describe_model(t);
    wrong = gpt_cuda_check(&t->desc);
    return wrong ? ddp_fail(DDP_ERR_INVALID, "%s", wrong) : DDP_OK;
}

/* Distributes the units over the stages by their cost. */
static ddp_result split_stages(trainer *t) {
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

/* Sets slots to the maximum number of micro-batches in flight on this stage. */
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

/* Sets everything that follows from the plan and needs no GPU: position in the mesh, stages, slots.
   Collective. */
static ddp_result place_rank(trainer *t) {
    run *r = &t->run;
    ddp_mesh_desc mesh = DDP_ZERO;
    mesh.ndim = 3;
    mesh.names[0] = "pp";
    mesh.names[1] = "dp";
    mesh.names[2] = "tp";
    mesh.shape[0] = t->pp;
    mesh.shape[1] = t->dp;
    mesh.shape[2] = t->tp;
    DDP_TRY(ddp_mesh_create(&t->mesh, r->world, &mesh));
    t->stage = ddp_rank(ddp_mesh_group(t->mesh, "pp"));
    t->replica = ddp_rank(ddp_mesh_group(t->mesh, "dp"));
    t->tensor_rank = ddp_rank(ddp_mesh_group(t->mesh, "tp"));
    t->slots = 1;
    DDP_TRY(split_stages(t));
    if (t->pp > 1) {
        DDP_TRY(make_schedule(t));
        DDP_TRY(count_slots(t));
    }
    describe_model(t);
    DDP_TRY(run_build_arrays(r));
    t->param_count = gpt_param_count(&t->desc.config);
    t->micro_count = r->plan.config.batch / r->plan.config.micro_batch / t->dp;
    t->batch_ints = gpt_cuda_batch_ints(r->plan.config.micro_batch * r->plan.config.context);
    return DDP_OK;
}

//== parameters =============================================================================================

/* With tensor parallelism "h.0.attn.qkv.weight" becomes three tensors of the checkpoint, "h.0.attn.q.weight"
   and so on, and this rank's rows of each are one box. */
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
        p->global_shape[0] = third;
        p->global_offset[0] = s->at.row - s->box * third;
        if (info->ndim > 1) {
            p->global_shape[1] = info->shape[1];
            p->global_offset[1] = s->at.column;
        }
    }
    p->index = (int)(s - t->slices);
    if (info->tied_to >= 0) p->tied_to = t->run.infos[info->tied_to].name;
    if (t->pp > 1 && t->dtype != DDP_F32) p->param.grad.dtype = DDP_F32; /* ddp_pipeline sums micro-batches */
}

/* Whether a parameter is a use of wte that has no slices of its own. */
static int uses_wte(const trainer *t, int param) {
    return (t->pp > 1 || t->merges_tied) && t->run.infos[param].tied_to >= 0;
}

/* Lists the parameters for ddp_fsdp: units as in train_gpt_fsdp, or one unit for the stage. The head's matrix
   is tied to the embedding; with merges_tied it is left out. With stages the first and the last stage both
   have "wte", with the same rows and gradients. */
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
        if (uses_wte(t, i)) boxes = 0;
        t->slice_of[i] = t->slice_count;
        for (int k = 0; k < boxes; k++) {
            slice *s = &t->slices[t->slice_count];
            s->param = i;
            s->box = k;
            s->unit = unit;
            s->at = box[k];
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

/* Sets *first to the first parameter of a unit and returns the number of its parameters. */
static int unit_params(const trainer *t, int unit, int *first) {
    if (unit == 0) {
        *first = 0;
        return 2;
    }
    if (unit + 1 == t->unit_count) {
        *first = t->param_count - 3;
        return 3;
    }
    *first = gpt_block_first_param(unit - 1);
    return GPT_BLOCK_PARAMS;
}

/* Parameter with the slices of `param`. */
static int sliced_param(const trainer *t, int param) { return uses_wte(t, param) ? 0 : param; }

/* Elements of a unit of the model on this rank. With merges_tied, wte counts only in unit 0. */
static size_t unit_elements(const trainer *t, int unit) {
    int first, count = unit_params(t, unit, &first);
    size_t elements = 0;
    for (int i = first; i < first + count; i++) {
        int from = t->merges_tied ? i : sliced_param(t, i);
        for (int k = t->slice_of[from]; k < t->slice_of[from + 1]; k++)
            elements += (size_t)(t->slices[k].at.rows * t->slices[k].at.columns);
    }
    return elements;
}

//== memory =================================================================================================

/* Strategy passed to ddp_fsdp. One rank that runs a micro-batch as one CUDA graph needs full gradients. */
static ddp_fsdp_strategy fsdp_strategy(const trainer *t) {
    int one_graph = t->desc.graphs && t->dp == 1 && t->pp == 1 && !t->run.options->offload;
    return one_graph && t->strategy != DDP_FSDP_NO_SHARD ? DDP_FSDP_SHARD_OPTIM : t->strategy;
}

/* Workspace of a GPU group for sums in tree order: a power of two, at most 32 MiB. */
static double tree_bytes(double payload) {
    double bytes = 65536;
    while (bytes < payload && bytes < 32 * MIB) bytes *= 2;
    return bytes;
}

/* The fields of ddp_fsdp_desc that memory depends on. */
static ddp_fsdp_desc fsdp_desc(trainer *t) {
    ddp_fsdp_desc desc = DDP_ZERO;
    desc.units = t->units;
    desc.unit_count = t->pp > 1 ? 1 : t->unit_count;
    desc.strategy = fsdp_strategy(t);
    desc.param_dtype = t->dtype;
    desc.reduce_dtype = t->reduce_dtype;
    desc.micro_batch_count = t->pp > 1 ? 1 : t->micro_count;
    desc.overwrite_gradients = 1; /* backward writes every gradient of a unit */
    if (t->run.options->offload_params)
        desc.offload = DDP_FSDP_OFFLOAD_PARAMS;
    else if (t->run.options->offload)
        desc.offload = DDP_FSDP_OFFLOAD_HOST;
    desc.scaler = t->dtype == DDP_F16 ? &t->scaler : NULL;
    return desc;
}

/* GPU memory in bytes: of ddp_fsdp, of its reductions, and of ddp_pipeline's gradients. */
static ddp_result fsdp_bytes(trainer *t, double *bytes) {
    ddp_fsdp_desc desc = fsdp_desc(t);
    ddp_fsdp_bytes predicted;
    double all = 0, largest = 0, element = (double)element_bytes(t);
    desc.ranks.gpu = 1;
    DDP_TRY(ddp_fsdp_predict(&desc, t->dp, &predicted));
    *bytes = (double)predicted.device;
    for (int u = t->first_unit; u < t->end_unit; u++) {
        double elements = (double)unit_elements(t, u);
        all += elements;
        if (elements > largest) largest = elements;
    }
    if (t->merges_tied) *bytes += 2 * largest * element; /* unit 0 keeps its values and gradients */
    if (t->pp > 1) largest = all;
    if (t->dp > 1 && t->order == DDP_ORDER_TREE)
        *bytes += tree_bytes(largest * (double)ddp_dtype_size(t->reduce_dtype));
    for (int64_t m = t->pp > 1 ? t->micro_count : 0; m > 0; m >>= 1)
        *bytes += all * 4;                                     /* ddp_pipeline's sums */
    if (t->pp > 1 && element < 4) *bytes += largest * element; /* half_grads */
    return DDP_OK;
}

/* GPU memory of this rank in bytes, without what CUDA uses for graphs and libraries. */
static ddp_result needed_bytes(trainer *t, double *needed) {
    const run_config *c = &t->run.plan.config;
    double tokens = (double)c->micro_batch * c->context, bytes;
    double boundary = tokens * c->channels * (double)element_bytes(t); /* activations between two stages */
    DDP_TRY(fsdp_bytes(t, &bytes));
    bytes += (double)gpt_cuda_bytes(&t->desc);
    if (t->end_unit > 1) bytes += (double)DDP_CUDA_GEMM_WORKSPACE_BYTES; /* an embedding has no product */
    bytes += 0.5 * MIB; /* sums of squares, flags and other small buffers */
    bytes += (2.0 * t->micro_count + t->slots) * (double)gpt_cuda_batch_ints((int)tokens) * 4;
    if (t->pp > 1) bytes += (2.0 * t->slots + 4) * 2 * boundary;
    if (t->tp > 1 && t->order == DDP_ORDER_TREE) bytes += tree_bytes(boundary);
    *needed = bytes;
    return DDP_OK;
}

#define LESS_MEMORY "use --recompute, --offload, --offload-params or a smaller --micro-batch"

/* GPU and memory of one rank, as gathered from all ranks. */
typedef struct gpu_use {
    char host[64];
    int32_t device;
    int32_t pad;
    double needed, available;
} gpu_use;

static int same_gpu(const gpu_use *a, const gpu_use *b) {
    return !strcmp(a->host, b->host) && a->device == b->device;
}

/* Fails on every rank if the ranks of a GPU need more memory than it has. Rank 0 has the error line. */
static ddp_result compare_gpu_use(trainer *t, const gpu_use *uses) {
    run *r = &t->run;
    const gpu_use *mine = &uses[r->rank];
    for (int i = 0; i < r->world_size; i++) t->sharing += same_gpu(&uses[i], mine);
    for (int i = 0; i < r->world_size; i++) {
        ddp_result result = DDP_OK;
        double needed = 0;
        int ranks = 0;
        for (int k = 0; k < r->world_size; k++) {
            if (!same_gpu(&uses[i], &uses[k])) continue;
            needed += uses[k].needed;
            ranks++;
        }
        t->any_share |= ranks > 1;
        if (needed <= uses[i].available) continue;
        if (r->rank == 0)
            result = ddp_fail(DDP_ERR_NO_MEMORY,
                              "GPU %d of rank %d is too small: %d rank(s) need %.1f MiB, but %.1f MiB are "
                              "available; " LESS_MEMORY,
                              uses[i].device, i, ranks, needed / MIB, uses[i].available / MIB);
        return broadcast_result(r->world, result);
    }
    t->needed = (size_t)mine->needed;
    return DDP_OK;
}

/* Checks that all ranks of each GPU fit in its memory, before anything large is allocated. Collective. */
static ddp_result check_memory(trainer *t) {
    run *r = &t->run;
    gpu_use mine;
    size_t free_bytes = 0, total_bytes = 0;
    memset(&mine, 0, sizeof mine);
    if (gethostname(mine.host, sizeof mine.host - 1) != 0) snprintf(mine.host, sizeof mine.host, "unknown");
    CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    mine.device = t->device;
    DDP_TRY(needed_bytes(t, &mine.needed));
    mine.available = (double)free_bytes;
    if (r->options->memory_limit && mine.available > r->options->memory_limit * MIB)
        mine.available = r->options->memory_limit * MIB;
    DDP_TRY(run_gather(r, &mine, sizeof mine));
    return compare_gpu_use(t, (const gpu_use *)r->gathered);
}

/* Adds the estimate and the flags to an out-of-memory error, which CUDA can return although check_memory
   passed: another program can allocate, and CUDA's own memory is not part of the estimate. */
static ddp_result explain_memory(const trainer *t, ddp_result result) {
    char error[600];
    if (result != DDP_ERR_NO_MEMORY || !t->needed) return result;
    snprintf(error, sizeof error, "%s", ddp_last_error());
    return ddp_fail(result,
                    "%s; the estimate was %.1f MiB, without CUDA's graphs and libraries; " LESS_MEMORY, error,
                    (double)t->needed / MIB);
}

//== devices ================================================================================================

/* Selects the GPU of this rank and makes it current. Collective. */
static ddp_result pick_gpu(trainer *t) {
    int gpus[GPU_LIST], devices[DDP_MAX_LOCAL_RANKS];
    int count = read_gpus(t->run.options->gpus, gpus), ranks = ddp_local_world_size(t->run.world);
    ddp_cuda_pick_desc pick = DDP_ZERO;
    pick.allow_shared = 1;
    if (count && ranks <= DDP_MAX_LOCAL_RANKS) {
        for (int i = 0; i < ranks; i++) devices[i] = gpus[i % count];
        pick.devices = devices;
        pick.device_count = ranks;
    }
    return ddp_cuda_pick(t->run.world, &pick, &t->device);
}

/* Creates the GPU group of a CPU group. In tree order, sums do not depend on the transport. Collective. */
static ddp_result group_gpus(trainer *t, ddp_group *control, const char *name, ddp_group **out) {
    int mine[DDP_MAX_LOCAL_RANKS], ranks = ddp_local_world_size(control);
    ddp_cuda_desc desc = DDP_ZERO;
    for (int i = 0; i < DDP_MAX_LOCAL_RANKS; i++) mine[i] = t->device;
    desc.devices = mine;
    desc.device_count = ranks < DDP_MAX_LOCAL_RANKS ? ranks : DDP_MAX_LOCAL_RANKS;
    desc.allow_shared = 1;
    desc.order = t->order;
    desc.name = name;
    desc.stream = t->stream;
    return ddp_cuda_group_create(out, control, &desc);
}

/* Creates streams, events and GPU groups. Collective. */
static ddp_result build_device(trainer *t) {
    CUDA(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&t->copies, cudaStreamNonBlocking));
    for (int k = 0; k < 2; k++) {
        CUDA(cudaEventCreateWithFlags(&t->copied[k], cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&t->done[k], cudaEventDisableTiming));
    }
    ddp_cuda_use_stream(t->stream);
    DDP_TRY(group_gpus(t, ddp_mesh_group(t->mesh, "dp"), "dp", &t->along_dp));
    if (t->pp > 1) DDP_TRY(group_gpus(t, ddp_mesh_group(t->mesh, "pp"), "pp", &t->along_pp));
    if (t->tp > 1) DDP_TRY(group_gpus(t, ddp_mesh_group(t->mesh, "tp"), "tp", &t->along_tp));
    if (t->pp > 1 || t->tp > 1) DDP_TRY(group_gpus(t, t->run.world, "all", &t->all_gpus));
    t->memory = ddp_group_device(t->along_dp);
    return DDP_OK;
}

//== first values ===========================================================================================

/* Copies the columns of a box from full rows. */
static void copy_columns(float *out, const float *rows, int64_t row_count, int64_t row_columns,
                         const gpt_cuda_box *at) {
    for (int64_t i = 0; i < row_count; i++)
        memcpy(out + i * at->columns, rows + i * row_columns + at->column,
               (size_t)at->columns * sizeof(float));
}

/* Full rows of a parameter: from the checkpoint, from --init, or drawn from the seed. */
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

/* ddp_fsdp_desc.init_fn: rows of a slice of this rank. */
static ddp_result fill_rows(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                            void *user) {
    const trainer *t = (const trainer *)user;
    const slice *s = &t->slices[param->index];
    int64_t columns = t->run.infos[s->param].shape[1];
    if (s->at.columns == columns)
        return read_rows(t, s->param, s->at.row + first_row, row_count, (float *)out);
    for (int64_t i = 0; i < row_count; i++) {
        DDP_TRY(read_rows(t, s->param, s->at.row + first_row + i, 1, t->full_param));
        copy_columns((float *)out + i * s->at.columns, t->full_param, 1, columns, &s->at);
    }
    return DDP_OK;
}

/* Maps the checkpoint file of --resume on every rank, after rank 0 has checked it, and sets offset.
   Collective. */
static ddp_result map_checkpoint(trainer *t) {
    run *r = &t->run;
    int64_t next = 0;
    const char *path = r->options->resume;
    ddp_result result = r->rank == 0 ? checkpoint_check(r, &t->saved_header) : DDP_OK;
    struct stat info;
    int file;
    DDP_TRY(broadcast_result(r->world, result));
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
    return t->mapped
               ? DDP_OK
               : ddp_fail(DDP_ERR_INVALID,
                          "--resume %s: rank %d cannot read it; put the same file there on every machine",
                          path, r->rank);
}

/* This rank's rows of a slice: values (which -1) or a moment (which 0, 1). *first is the first row. */
static ddp_result get_rows(trainer *t, int i, int which, ddp_tensor *rows, int64_t *first) {
    const slice *s = &t->slices[i];
    ddp_tensor unused;
    DDP_TRY(ddp_fsdp_get_shard(t->fsdp, s->unit, s->place, which < 0 ? rows : &unused, NULL, first));
    return which < 0 ? DDP_OK : ddp_fsdp_get_state(t->fsdp, s->unit, s->place, which, NULL, rows);
}

/* Copies between rows of get_rows and host memory, in either direction. Blocking. */
static void copy_rows(const trainer *t, void *to, const void *from, size_t size_bytes) {
    if (t->run.options->offload)
        memcpy(to, from, size_bytes);
    else
        t->memory->copy(to, from, size_bytes);
}

/* Loads moments and step from the checkpoint file. */
static ddp_result fill_moments(trainer *t) {
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < t->slice_count; i++) {
            const slice *s = &t->slices[i];
            int64_t columns = t->run.infos[s->param].shape[1], first;
            const float *values = (const float *)(const void *)(t->mapped + sizeof(checkpoint_header));
            const float *from = values + (which + 1) * t->run.parameter_count + t->offset[s->param];
            ddp_tensor rows;
            if (!s->here || t->run.infos[s->param].tied_to >= 0) continue;
            DDP_TRY(get_rows(t, i, which, &rows, &first));
            if (!rows.data) continue;
            copy_columns(t->full_param, from + (s->at.row + first) * columns, rows.shape[0], columns, &s->at);
            copy_rows(t, rows.data, t->full_param, (size_t)ddp_tensor_count(&rows) * sizeof(float));
        }
    return ddp_fsdp_set_step(t->fsdp, t->run.plan.first_step);
}

/* --dtype f16: creates the scaler. An infinity on a rank along dp, pp or tp makes all of them skip the step;
   ddp_fsdp covers dp. */
static ddp_result build_scaler(trainer *t) {
    ddp_scaler_desc desc = DDP_ZERO;
    if (t->dtype != DDP_F16) return DDP_OK;
    desc.init_scale = (float)t->run.options->loss_scale;
    if (t->along_pp) desc.groups[desc.group_count++] = t->along_pp;
    if (t->along_tp) desc.groups[desc.group_count++] = t->along_tp;
    t->loss_scale = (float *)(void *)(t->squares + 1) + 1;
    return ddp_scaler_init(&t->scaler, &desc);
}

/* Copies the loss scale to the device, after the work that has read the old one. Waits for the device. */
static void copy_loss_scale(const trainer *t) {
    float scale = ddp_scaler_scale(&t->scaler);
    if (t->loss_scale) t->memory->copy(t->loss_scale, &scale, sizeof scale);
}

/* Creates ddp_fsdp along dp and loads the checkpoint. Collective. */
static ddp_result build_shards(trainer *t) {
    run *r = &t->run;
    const run_options *o = r->options;
    size_t unit = 0;
    ddp_fsdp_desc desc = fsdp_desc(t);
    t->full_param = (float *)malloc(run_largest_param(r) * sizeof(float));
    if (!t->full_param) return run_out_of_memory();
    if (o->init && r->rank != 0) DDP_TRY(llmc_open(&t->init, o->init));
    if (r->plan.first_step > 0 && !is_folder(o->resume)) DDP_TRY(map_checkpoint(t));
    desc.optimizer.beta2 = 0.95f;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.decay_matrices_only = 1;
    desc.init_fn = fill_rows;
    desc.init_user = t;
    desc.state = &t->state;
    desc.keep_checkpoints = 2;
    desc.checkpoint_group = r->world;
    DDP_TRY(ddp_fsdp_create(&t->fsdp, t->along_dp, &desc));
    for (int u = t->first_unit; u < t->end_unit; u++)
        unit = unit_elements(t, u) > unit ? unit_elements(t, u) : unit;
    if (t->pp > 1 && t->dtype != DDP_F32) { /* each of them aligned */
        void *memory;
        DDP_TRY(t->memory->alloc(t->along_dp, unit * 2 + 3 * 64 * (size_t)GPT_BLOCK_PARAMS, &memory));
        t->half_grads = (unsigned char *)memory;
    }
    if (t->mapped) DDP_TRY(fill_moments(t));
    if (r->plan.first_step == 0 || t->mapped) return DDP_OK;
    DDP_TRY(ddp_fsdp_load(t->fsdp, o->resume));
    if (t->state.step != r->plan.first_step)
        return ddp_fail(DDP_ERR_INVALID,
                        "--resume %s: another run is writing it; use a checkpoint that does not change",
                        o->resume);
    r->plan.data = t->state.sampler;
    return DDP_OK;
}

//== batches ================================================================================================

/* ddp_loader_desc.fetch: a window of context + 1 tokens. */
static ddp_result fetch_window(void *user, int64_t index, void *const *fields) {
    const run *r = (const run *)user;
    return run_tokens(r, index, r->plan.config.context + 1, (int *)fields[0]);
}

/* Creates the loader and the batch buffers. The loader returns this rank's part of each global batch; with
   round_robin it returns the full batch. */
static ddp_result build_loader(trainer *t) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    int round_robin = r->options->round_robin, micros = t->micro_count;
    size_t bytes = t->batch_ints * sizeof(int32_t);
    ddp_loader_desc desc = DDP_ZERO;
    ddp_tensor window = DDP_ZERO;
    window.dtype = DDP_I32;
    window.ndim = 1;
    window.shape[0] = c->context + 1;
    if (round_robin)
        desc.sampler = run_sampler_desc(r, 1, 0);
    else
        desc.sampler = run_sampler_desc(r, t->dp, t->replica);
    desc.fields = &window;
    desc.field_count = 1;
    desc.fetch = fetch_window;
    desc.fetch_user = r;
    desc.worker_count = 2;
    DDP_TRY(ddp_loader_create(&t->loader, &desc));
    if (r->plan.first_step > 0) DDP_TRY(ddp_loader_load(t->loader, &r->plan.data));
    DDP_TRY(run_build_sampler(r, 1, 0)); /* for checkpoints */
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

/* Packs the windows of a step and starts their copy to the device. */
static ddp_result prepare(trainer *t, int64_t step) {
    run *r = &t->run;
    const run_config *c = &r->plan.config;
    int parity = (int)(step & 1), length = c->context;
    size_t n = (size_t)c->micro_batch * (size_t)length;
    ddp_batch batch;
    DDP_TRY(ddp_loader_next(t->loader, &batch));
    if (batch.count == 0) { /* end of an epoch */
        DDP_TRY(ddp_loader_set_epoch(t->loader, ++r->epoch));
        DDP_TRY(ddp_loader_next(t->loader, &batch));
    }
    for (int micro = 0; micro < t->micro_count; micro++) {
        int32_t *out = t->pinned[parity] + (size_t)micro * t->batch_ints;
        for (int row = 0; row < c->micro_batch; row++) {
            int64_t number = (int64_t)(t->loaded_first + micro * t->loaded_every) * c->micro_batch + row;
            const int32_t *window = (const int32_t *)batch.fields[0].data + number * (length + 1);
            memcpy(out + row * length, window, (size_t)length * sizeof *out);
            memcpy(out + n + (size_t)(row * length), window + 1, (size_t)length * sizeof *out);
        }
        DDP_TRY(sort_batch(t, out));
    }
    CUDA(cudaMemcpyAsync(t->staged[parity], t->pinned[parity],
                         (size_t)t->micro_count * t->batch_ints * sizeof(int32_t), cudaMemcpyHostToDevice,
                         t->copies));
    CUDA(cudaEventRecord(t->copied[parity], t->copies));
    return DDP_OK;
}

/* Copies micro-batch `micro` of the step to the input of the model. */
static ddp_result place_batch(trainer *t, int micro, int slot) {
    size_t bytes = t->batch_ints * sizeof(int32_t);
    CUDA(cudaMemcpyAsync(t->batch[slot], t->staged[t->parity] + (size_t)micro * t->batch_ints, bytes,
                         cudaMemcpyDeviceToDevice, t->stream));
    return DDP_OK;
}

/* Copies run.tokens and run.targets, for validation and sampling, to the input of the model. Waits for the
   device. */
static ddp_result place_tokens(trainer *t, int slot) {
    const run_config *c = &t->run.plan.config;
    size_t n = (size_t)c->micro_batch * (size_t)c->context;
    CUDA(cudaStreamSynchronize(t->stream));
    for (size_t i = 0; i < n; i++) {
        t->pinned[0][i] = t->run.tokens[i];
        t->pinned[0][n + i] = t->run.targets[i];
    }
    DDP_TRY(sort_batch(t, t->pinned[0]));
    CUDA(cudaMemcpyAsync(t->batch[slot], t->pinned[0], t->batch_ints * sizeof(int32_t),
                         cudaMemcpyHostToDevice, t->stream));
    return DDP_OK;
}

//== timeline and profile ===================================================================================

/* Selects the steps of --timeline: three steps after the warm-up, or the last three. */
static void choose_trace(trainer *t) {
    const run_plan *p = &t->run.plan;
    t->trace_last = p->first_step + 6 < p->config.steps ? (int)p->first_step + 6 : p->config.steps;
    t->trace_first = t->trace_last - TRACE_STEPS + 1;
    if (t->trace_first <= p->first_step) t->trace_first = (int)p->first_step + 1;
}

/* Records a timing event on the compute stream. NULL on failure. */
static cudaEvent_t mark_stream(const trainer *t) {
    cudaEvent_t event;
    if (cudaEventCreateWithFlags(&event, cudaEventDefault) != cudaSuccess) return NULL;
    if (cudaEventRecord(event, t->stream) == cudaSuccess) return event;
    cudaEventDestroy(event);
    return NULL;
}

/* Begins a span and returns its index, or -1 outside of the traced steps. on_device: also records the work
   that is enqueued on the compute stream until span_end. */
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
    s->name = name;
    s->unit = unit;
    s->step = t->step;
    s->begin = ddp_now();
    s->end = s->begin;
    if (on_device) s->from = mark_stream(t);
    return t->span_count++;
}

static void span_end(trainer *t, int at) {
    span *s;
    if (at < 0) return;
    s = &t->spans[at];
    s->end = ddp_now();
    if (s->from) s->to = mark_stream(t);
}

/* Records the same moment on the clocks of host and device, before the first traced step. */
static ddp_result trace_begin(trainer *t) {
    CUDA(cudaEventCreateWithFlags(&t->origin, cudaEventDefault));
    CUDA(cudaStreamSynchronize(t->stream));
    CUDA(cudaEventRecord(t->origin, t->stream));
    CUDA(cudaEventSynchronize(t->origin));
    t->origin_seconds = ddp_now();
    t->tracing = 1;
    return DDP_OK;
}

/* Formats one event of the trace format, in microseconds since the origin. */
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

/* Formats the spans of this rank. The caller frees *out. */
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

/* Rank 0 writes the spans of all ranks. Collective. */
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

/* gpt_cuda_desc.note: names the work that was enqueued since the previous mark. */
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
    m->name = name;
    m->flops = flops;
    m->bytes = bytes;
    m->event = mark_stream(t);
    t->mark_count += m->event != NULL;
}

typedef struct profile_row {
    const char *name;
    int launches;
    double seconds, flops, bytes;
} profile_row;

static int compare_rows(const void *left, const void *right) {
    double l = ((const profile_row *)left)->seconds, r = ((const profile_row *)right)->seconds;
    return (l < r) - (l > r); /* longest first */
}

/* Peak of a GPU according to its data sheet: dense 16-bit FLOP/s and memory bytes/s. 0 = unknown. The first
   entry with a name that is part of the device's name is used. NVL cards are slower than the H100 or H200 in
   their name. */
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

/* Rank 0: prints one line per kernel, longest first. "of limit" is the time for its FLOPs (16-bit) or bytes
   at the peak of the GPU, divided by its measured time. */
static ddp_result print_profile(trainer *t) {
    profile_row *rows = (profile_row *)calloc((size_t)t->mark_count + 1, sizeof *rows);
    const gpu_peak peak = find_peak(t->device);
    double whole = 0;
    int count = 0, half = t->dtype != DDP_F32;
    if (!rows) return ddp_fail(DDP_ERR_NO_MEMORY, "a profile of %d marks", t->mark_count);
    for (int i = 1; i < t->mark_count; i++) { /* mark 0 is the beginning of the step */
        const mark *m = &t->marks[i];
        float ms = 0;
        int k = 0;
        if (cudaEventElapsedTime(&ms, m[-1].event, m->event) != cudaSuccess) ms = 0;
        while (k < count && strcmp(rows[k].name, m->name)) k++;
        if (k == count) rows[count++].name = m->name;
        rows[k].launches++;
        rows[k].seconds += ms * 1e-3;
        rows[k].flops += m->flops;
        rows[k].bytes += m->bytes;
        whole += ms * 1e-3;
    }
    qsort(rows, (size_t)count, sizeof *rows, compare_rows);
    printf(
        "\n  step %4d of rank 0, %9.3f ms      launches         ms    share   TFLOP/s      GB/s   of limit\n",
        t->trace_last, whole * 1e3);
    for (int k = 0; k < count; k++) {
        const profile_row *row = &rows[k];
        double seconds = row->seconds > 0 ? row->seconds : 1e-12, least = 0;
        if (peak.bytes > 0) least = row->bytes / peak.bytes;
        if (half && peak.flops > 0 && row->flops / peak.flops > least) least = row->flops / peak.flops;
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

//== units of the model =====================================================================================

/* Fills the table of pointers to the values or gradients of a unit, in the order of gpt_cuda. */
static void fill_table(const trainer *t, int unit, int grads, void **table) {
    int first, count = unit_params(t, unit, &first);
    memset(table, 0, 3 * (size_t)GPT_BLOCK_PARAMS * sizeof *table);
    for (int i = 0; i < count; i++) {
        int from = sliced_param(t, first + i);
        for (int k = t->slice_of[from]; k < t->slice_of[from + 1]; k++) {
            const ddp_param *param = &t->params[k].param;
            table[3 * i + t->slices[k].box] = grads ? param->grad.data : param->value.data;
        }
    }
}

static ddp_result unit_forward(trainer *t, int unit, int slot, const void *in, void *out) {
    void *values[3 * GPT_BLOCK_PARAMS];
    int span = span_begin(t, "forward", unit, 1);
    fill_table(t, unit, 0, values);
    DDP_TRY(gpt_cuda_unit_forward(t->model, unit, slot, values, t->batch[slot], in, out));
    span_end(t, span);
    return DDP_OK;
}

/* With stages and 16 bits: points `grads` to half_grads, where backward writes. widen: also casts them to the
   f32 gradients of ddp_fsdp, which ddp_pipeline sums. */
static void cast_half_grads(const trainer *t, int unit, void **grads, int widen) {
    int first, count = unit_params(t, unit, &first);
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        int from = sliced_param(t, first + i);
        for (int k = t->slice_of[from]; k < t->slice_of[from + 1]; k++) {
            void *narrow = t->half_grads + at;
            if (widen)
                t->memory->cast(t->params[k].param.grad.data, DDP_F32, narrow, t->dtype,
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
    fill_table(t, unit, 0, values);
    fill_table(t, unit, 1, grads);
    if (t->half_grads) cast_half_grads(t, unit, grads, 0);
    DDP_TRY(gpt_cuda_unit_backward(t->model, unit, slot, values, grads, t->batch[slot], in, d_out, d_in));
    if (t->half_grads) cast_half_grads(t, unit, grads, 1);
    if (t->half_grads) profile_mark(t, "gradients to f32", 0, 0);
    span_end(t, span);
    return DDP_OK;
}

/* Unshards a unit. Collective. */
static ddp_result gather(trainer *t, int unit) {
    int span = span_begin(t, "gather", unit, 1);
    DDP_TRY(ddp_fsdp_unshard(t->fsdp, unit));
    profile_mark(t, "gather", 0, 0);
    span_end(t, span);
    return DDP_OK;
}

/* Forward through the units up to last_unit. compute 0: only takes part in the collectives. With merges_tied
   unit 0 stays unsharded, because the head uses wte: end with `backward` or `reshard_wte`. Collective. */
static ddp_result forward(trainer *t, int last_unit, int compute) {
    for (int unit = 0; unit <= last_unit; unit++) {
        DDP_TRY(gather(t, unit));
        if (compute) DDP_TRY(unit_forward(t, unit, 0, NULL, NULL));
        if (unit > 0 || !t->merges_tied) DDP_TRY(ddp_fsdp_reshard(t->fsdp, unit));
    }
    return DDP_OK;
}

/* Ends a forward that no backward follows. */
static ddp_result reshard_wte(trainer *t) { return t->merges_tied ? ddp_fsdp_reshard(t->fsdp, 0) : DDP_OK; }

/* Reduces the gradients of a unit and reshards it. Collective. */
static ddp_result reduce(trainer *t, int unit) {
    int span = span_begin(t, "reduce", unit, 1);
    DDP_TRY(ddp_fsdp_reduce_grads(t->fsdp, unit));
    profile_mark(t, "reduce", 0, 0);
    span_end(t, span);
    return ddp_fsdp_reshard(t->fsdp, unit);
}

static ddp_result backward(trainer *t) {
    for (int unit = t->unit_count - 1; unit >= 0; unit--) {
        DDP_TRY(gather(t, unit));
        DDP_TRY(unit_backward(t, unit, 0, NULL, NULL, NULL));
        DDP_TRY(reduce(t, unit));
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

/* Whether a micro-batch can be one CUDA graph: no collectives between its units, because gradients are only
   accumulated and values are unsharded already. Not with --offload, which copies between units. */
static int is_one_graph(const trainer *t, int micro) {
    int adds_later = t->strategy == DDP_FSDP_SHARD_OPTIM || t->strategy == DDP_FSDP_NO_SHARD;
    return t->desc.graphs && !t->run.options->offload
           && (t->dp == 1 || (adds_later && micro > 0 && micro + 1 < t->micro_count));
}

/* Forward and backward of a micro-batch as one graph. */
static ddp_result run_one_graph(trainer *t) {
    int span;
    for (int unit = 0; unit < t->unit_count; unit++) {
        DDP_TRY(gather(t, unit));
        fill_table(t, unit, 0, t->tables[unit]);
        fill_table(t, unit, 1, t->tables[t->unit_count + unit]);
    }
    span = span_begin(t, "micro-batch", -1, 1);
    DDP_TRY(gpt_cuda_micro_batch(t->model, 0, t->table_of, t->table_of + t->unit_count, t->batch[0]));
    span_end(t, span);
    for (int unit = t->unit_count - 1; unit >= 0; unit--) DDP_TRY(reduce(t, unit));
    return DDP_OK;
}

//== stages =================================================================================================

/* Callbacks of ddp_pipeline for the stage, which is FSDP unit 0. Collective over dp. */
static ddp_result unshard_stage(int stage, void *user) { return (void)stage, gather((trainer *)user, 0); }
static ddp_result reshard_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_reshard(((trainer *)user)->fsdp, 0);
}
static ddp_result reduce_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_reduce_grads(((trainer *)user)->fsdp, 0);
}
/* Waits for the averages of this rank's rows, without clipping. Collective over dp. */
static ddp_result average_stage(int stage, void *user) {
    return (void)stage, ddp_fsdp_clip_grad_norm(((trainer *)user)->fsdp, INFINITY, NULL);
}

/* Gradients of this rank's rows of slice i. */
static ddp_result gradient_of(const trainer *t, int i, ddp_tensor *grad) {
    return ddp_fsdp_get_shard(t->fsdp, t->slices[i].unit, t->slices[i].place, NULL, grad, NULL);
}
/* "wte" is the first slice. */
static ddp_result tied_gradient(int stage, int param, ddp_tensor *grad, void *user) {
    return (void)stage, (void)param, gradient_of((trainer *)user, 0, grad);
}

static ddp_result stage_forward(const ddp_pipeline_call *c, void *user) {
    trainer *t = (trainer *)user;
    int slot = c->evaluating ? 0 : t->free_slots[--t->free_count];
    if (!c->evaluating) t->slot_of[c->microbatch] = slot;
    if (c->loss) *c->loss = 0; /* read_step reads it */
    if (c->evaluating) {
        int64_t last = validation_micro_batches(&t->run.plan) - 1, index = t->validating + c->microbatch;
        DDP_TRY(load_validation_batch(&t->run, index < last ? index : last));
        DDP_TRY(place_tokens(t, slot));
    } else
        DDP_TRY(place_batch(t, c->microbatch, slot));
    for (int u = t->first_unit; u < t->end_unit; u++) {
        const void *in = u == t->first_unit && c->input_count ? c->inputs[0].data : NULL;
        DDP_TRY(unit_forward(t, u, slot, in,
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
        DDP_TRY(unit_backward(
            t, u, slot, in, u + 1 == t->end_unit && c->output_count ? c->output_grads[0].data : NULL, d_in));
    }
    t->free_slots[t->free_count++] = slot;
    return DDP_OK;
}

/* Creates ddp_pipeline along pp. Collective. */
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
    t->free_count = t->slots;
    for (int i = 0; i < t->slots; i++) t->free_slots[i] = t->slots - 1 - i;
    own = stages + t->stage;
    own->forward = stage_forward;
    own->backward = stage_backward;
    own->user = t;
    own->params = t->pointers;
    for (int i = 0; i < t->slice_count; i++)
        if (t->slices[i].here) t->pointers[own->param_count++] = &t->params[i].param;
    own->unshard = unshard_stage;
    own->reshard = reshard_stage;
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
    desc.boundary.shape[0] = (int64_t)t->desc.batch * t->desc.length;
    desc.boundary.shape[1] = t->desc.config.channels;
    result = ddp_pipeline_create(&t->pipeline, t->along_pp, &desc);
    free(stages);
    return result;
}

//== training ===============================================================================================

/* Clips the gradients to a norm of 1 over the full model, for --stages or --tp above 1. The sum of squares is
   exact, so it does not depend on stages and shards. The host does not wait. Collective. */
static ddp_result clip_full_norm(trainer *t) {
    ddp_exact_sum *there = t->squares;
    float *factor = (float *)(void *)(there + 1);
    ddp_tensor grad;
    if (t->pp == 1) DDP_TRY(average_stage(0, t));
    t->memory->fill_zero(there, sizeof *there);
    for (int i = 0; i < t->slice_count; i++) {
        if (!t->slices[i].counted || (t->strategy == DDP_FSDP_NO_SHARD && t->replica > 0)) continue;
        DDP_TRY(gradient_of(t, i, &grad));
        if (grad.data) t->memory->sum_squares(there, 0, &grad, 1);
    }
    DDP_TRY(ddp_all_reduce(t->all_gpus, there, there, DDP_EXACT_CELLS, DDP_I64, DDP_OP_SUM, NULL));
    t->memory->optimizer->clip(there, 1.0f, factor, &t->norms[t->parity]);
    for (int i = 0; i < t->slice_count; i++) {
        if (!t->slices[i].here || t->run.infos[t->slices[i].param].tied_to >= 0) continue;
        DDP_TRY(gradient_of(t, i, &grad));
        if (grad.data) t->memory->optimizer->scale(&grad, 1, factor);
    }
    return DDP_OK;
}

/* Enqueues forward, backward and gradient reduction of all micro-batches. */
static ddp_result enqueue_micro_batches(trainer *t) {
    if (t->pipeline) {
        int span = span_begin(t, "pipeline", -1, 1);
        DDP_TRY(ddp_pipeline_step(t->pipeline));
        span_end(t, span);
        return DDP_OK;
    }
    for (int micro = 0; micro < t->micro_count; micro++) {
        int whole = is_one_graph(t, micro);
        DDP_TRY(place_batch(t, micro, 0));
        DDP_TRY(whole ? run_one_graph(t) : forward(t, t->unit_count - 1, 1));
        DDP_TRY(gpt_cuda_loss(t->model, 0, &t->sums[t->parity][micro]));
        if (!whole) DDP_TRY(backward(t));
    }
    return DDP_OK;
}

/* Enqueues the micro-batches of a step. Collective, not blocking. */
static ddp_result enqueue_begin(trainer *t, int64_t step) {
    t->parity = (int)(step & 1);
    t->profiling = step == t->trace_last && t->run.options->profile && t->run.rank == 0;
    CUDA(cudaStreamWaitEvent(t->stream, t->copied[t->parity], 0));
    profile_mark(t, "begin", 0, 0);
    return enqueue_micro_batches(t);
}

/* Enqueues norm and optimizer of a step. Collective, not blocking. */
static ddp_result enqueue_update(trainer *t, int64_t step) {
    int span = span_begin(t, "clip", -1, 1);
    DDP_TRY(t->pp > 1 || t->tp > 1 ? clip_full_norm(t) : ddp_fsdp_clip_grad_norm(t->fsdp, 1.0f, NULL));
    profile_mark(t, "norm", 0, 0);
    span_end(t, span);
    span = span_begin(t, "optimizer", -1, 1);
    DDP_TRY(ddp_fsdp_step(t->fsdp, ddp_lr_at(&t->run.lr, step)));
    profile_mark(t, "optimizer", 0, 0);
    span_end(t, span);
    CUDA(cudaEventRecord(t->done[t->parity], t->stream));
    t->profiling = 0;
    return DDP_OK;
}

/* Index of this rank's micro-batch in the global batch. */
static int micro_number(const trainer *t, int micro) {
    return t->run.options->round_robin ? micro * t->dp + t->replica : t->replica * t->micro_count + micro;
}

/* Waits for a step, and computes its loss. Collective. */
static ddp_result wait_step(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    double tokens = (double)r->plan.config.micro_batch * r->plan.config.context;
    int parity = (int)(step & 1), span = span_begin(t, "read the step before", -1, 0);
    CUDA(cudaEventSynchronize(t->done[parity]));
    span_end(t, span);
    if (is_last(t) && t->tensor_rank == 0)
        for (int micro = 0; micro < t->micro_count; micro++)
            r->losses[micro_number(t, micro)] = t->sums[parity][micro] / tokens;
    return run_mean_loss(r, (int64_t)t->micro_count * t->dp, loss);
}

/* Waits for a step, then checks and reports its loss and norm. Collective. */
static ddp_result read_step(trainer *t, int64_t step) {
    run *r = &t->run;
    double loss;
    float norm;
    DDP_TRY(wait_step(t, step, &loss));
    norm = t->norms[step & 1];
    if (t->pp == 1 && t->tp == 1) DDP_TRY(ddp_fsdp_get_norm(t->fsdp, &norm));
    r->train_seconds += ddp_now() - t->since;
    t->since = ddp_now();
    DDP_TRY(run_check_step(step, loss, norm));
    run_report_step(r, step, loss, norm);
    if (step == t->trace_last) t->tracing = 0;
    return DDP_OK;
}

/* --dtype f16: ends a step for the scaler. *skipped 1: a gradient was not finite, so the step has changed
   nothing. If its loss is not finite either, a smaller scale does not help. Collective. */
static ddp_result adapt_scale(trainer *t, int64_t step, int *skipped) {
    run *r = &t->run;
    float before = ddp_scaler_scale(&t->scaler), after;
    double loss;
    *skipped = ddp_scaler_found_inf(&t->scaler);
    DDP_TRY(ddp_scaler_update(&t->scaler));
    after = ddp_scaler_scale(&t->scaler);
    if (after != before) copy_loss_scale(t);
    if (!*skipped) return DDP_OK;
    DDP_TRY(wait_step(t, step, &loss));
    DDP_TRY(run_check_step(step, loss, 0));
    if (r->rank == 0)
        printf("%sstep %lld: a gradient overflowed; skipped the batch, loss scale %g -> %g\n",
               r->report.terminal ? "\r\033[K" : "", (long long)step, (double)before, (double)after);
    return DDP_OK;
}

/* Mean loss over the validation windows. Each replica evaluates a contiguous range of micro-batches. A
   replica with a shorter range still takes part in the collectives. Waits for the device. Collective. */
static ddp_result validate(trainer *t, double *loss) {
    run *r = &t->run;
    double tokens = (double)r->plan.config.micro_batch * r->plan.config.context;
    int64_t count = validation_micro_batches(&r->plan), share = (count + t->dp - 1) / t->dp;
    int64_t first = t->replica * share, end = first + share < count ? first + share : count;
    int64_t every = t->pipeline ? t->micro_count : 1;
    int has_loss = is_last(t) && t->tensor_rank == 0;
    if (!t->pipeline) DDP_TRY(ddp_fsdp_no_grad(t->fsdp, 1));
    for (t->validating = first; t->validating < first + share; t->validating += every) {
        if (t->pipeline)
            DDP_TRY(ddp_pipeline_evaluate(t->pipeline));
        else {
            if (t->validating < end) {
                DDP_TRY(load_validation_batch(r, t->validating));
                DDP_TRY(place_tokens(t, 0));
            }
            DDP_TRY(forward(t, t->unit_count - 1, t->validating < end));
            DDP_TRY(reshard_wte(t));
            if (t->validating < end) DDP_TRY(gpt_cuda_loss(t->model, 0, &t->sums[0][0]));
        }
        CUDA(cudaStreamSynchronize(t->stream));
        for (int64_t i = 0; i < every && t->validating + i < end; i++)
            if (has_loss) r->losses[t->validating + i] = t->sums[0][i] / tokens;
    }
    if (!t->pipeline) DDP_TRY(ddp_fsdp_no_grad(t->fsdp, 0));
    return run_mean_loss(r, count, loss);
}

//== checkpoints ============================================================================================

/* Gathers a parameter (which -1) or a moment into full_param, on every rank: each rank writes its rows, the
   others are zero, and an integer sum combines the bits. Collective. */
static ddp_result gather_full(trainer *t, int param, int which) {
    size_t count = (size_t)t->run.infos[param].count;
    int64_t columns = t->run.infos[param].shape[1];
    memset(t->full_param, 0, count * sizeof(float));
    for (int i = t->slice_of[param]; i < t->slice_of[param + 1]; i++) {
        const slice *s = &t->slices[i];
        ddp_tensor rows;
        int64_t first, own_count;
        float *own = NULL;
        if (!s->counted || (t->strategy == DDP_FSDP_NO_SHARD && t->replica > 0)) continue;
        DDP_TRY(get_rows(t, i, which, &rows, &first));
        if (!rows.data) continue;
        own_count = ddp_tensor_count(&rows);
        if (own_count >= 0) own = (float *)malloc((size_t)own_count * sizeof(float));
        if (!own)
            return ddp_fail(DDP_ERR_NO_MEMORY, "%s: rows of %lld elements", s->name, (long long)own_count);
        copy_rows(t, own, rows.data, (size_t)own_count * sizeof(float));
        for (int64_t j = 0; j < rows.shape[0]; j++)
            memcpy(t->full_param + (s->at.row + first + j) * columns + s->at.column, own + j * s->at.columns,
                   (size_t)s->at.columns * sizeof(float));
        free(own);
    }
    if (t->run.world_size == 1) return DDP_OK;
    return ddp_all_reduce(t->run.world, t->full_param, t->full_param, count, DDP_I32, DDP_OP_SUM, NULL);
}

static ddp_result get_state(void *user, int which, int param, const float **full) {
    trainer *t = (trainer *)user;
    *full = t->full_param;
    return gather_full(t, param, which - 1);
}

/* Writes a checkpoint file in the format of train_gpt, on rank 0. Collective. */
static ddp_result save_file(trainer *t, int64_t step) {
    run *r = &t->run;
    ddp_sampler_state state;
    DDP_TRY(ddp_loader_save(t->loader, &state));
    DDP_TRY(ddp_sampler_load(&r->sampler, &state));
    return checkpoint_save(r, step, get_state, t);
}

static ddp_result save_checkpoint(trainer *t, int64_t step) {
    run *r = &t->run;
    const char *path = r->options->checkpoint;
    if (!is_folder(path)) return save_file(t, step);
    folder_state(&t->state, &r->plan);
    DDP_TRY(ddp_loader_save(t->loader, &t->state.sampler));
    return ddp_fsdp_save(t->fsdp, path);
}

/* Computes the validation loss, and writes a checkpoint if the run has trained. Collective. */
static ddp_result evaluate(trainer *t, int64_t step, double *loss) {
    run *r = &t->run;
    DDP_TRY(validate(t, loss));
    if (r->rank == 0) report_validation(&r->report, &r->plan, step, *loss);
    return r->options->checkpoint && step > r->plan.first_step ? save_checkpoint(t, step) : DDP_OK;
}

static ddp_result train_steps(trainer *t, double *validation) {
    run *r = &t->run;
    int64_t first = r->plan.first_step, last_read = first;
    DDP_TRY(evaluate(t, first, validation));
    t->since = ddp_now();
    for (int64_t step = first + 1; step <= r->plan.config.steps; step++) {
        double begin, end;
        int span, skipped = 0;
        t->step = (int)step;
        if (step == t->trace_first && r->options->timeline) DDP_TRY(trace_begin(t));
        span = span_begin(t, "pack", -1, 0);
        DDP_TRY(prepare(t, step));
        span_end(t, span);
        begin = ddp_now();
        DDP_TRY(t->loss_scale && t->pp > 1 ? enqueue_begin(t, step)
                                           : WITHOUT_WAITING(enqueue_begin(t, step)));
        t->host_seconds += ddp_now() - begin;
        if (last_read < step - 1) DDP_TRY(read_step(t, ++last_read));
        end = ddp_now();
        DDP_TRY(t->loss_scale ? enqueue_update(t, step) : WITHOUT_WAITING(enqueue_update(t, step)));
        t->host_seconds += ddp_now() - end;
        if (t->loss_scale) DDP_TRY(adapt_scale(t, step, &skipped));
        if (skipped) {
            step--; /* once more, with the next batch */
            continue;
        }
        if (!is_validation_step(r, step)) continue;
        DDP_TRY(read_step(t, ++last_read));
        DDP_TRY(evaluate(t, step, validation));
        t->since = ddp_now();
    }
    return DDP_OK;
}

//== results ================================================================================================

/* Samples a continuation of the start of the validation text. Rank 0 prints it. Collective. */
static ddp_result generate(trainer *t) {
    run *r = &t->run;
    int tokens[32 + SAMPLE_BYTES], prompt, start = 0;
    int context = r->plan.config.context, vocab = plan_vocab(&r->plan);
    size_t n = (size_t)r->plan.config.micro_batch * (size_t)context;
    void *logits = NULL, *values[3 * GPT_BLOCK_PARAMS];
    DDP_TRY(sample_prompt(r, tokens, &prompt));
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
        fill_table(t, t->unit_count - 1, 0, values);
        if (result == DDP_OK) result = gpt_cuda_logits(t->model, 0, values, at - start - 1, (float *)logits);
        if (result == DDP_OK) result = ddp_fsdp_reshard(t->fsdp, t->unit_count - 1);
        if (result == DDP_OK) result = reshard_wte(t);
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

/* Rank 0: prints the table. memory: that of ddp_fsdp on this rank. */
static ddp_result print_table(const trainer *t, const ddp_fsdp_memory *memory) {
    const run *r = &t->run;
    const run_config *c = &r->plan.config;
    gpt_cuda_desc full = t->desc;
    cudaDeviceProp properties;
    double tokens = tokens_per_second(r, c->steps), steps = (double)(c->steps - r->plan.first_step),
           gpus = (double)r->world_size / t->sharing, flops, peak, shards;
    CUDA(cudaGetDeviceProperties(&properties, t->device));
    full.first_unit = 0;
    full.end_unit = t->unit_count;
    full.tensor_ranks = 1;
    full.tensor_rank = 0;
    full.tensor = NULL;
    flops = gpt_cuda_flops(&full) * tokens / ((double)c->micro_batch * c->context);
    shards = (double)(memory->peak.total - memory->peak.bookkeeping);
    if (r->options->offload) shards -= (double)memory->now.optimizer;
    peak = t->dtype != DDP_F32 ? find_peak(t->device).flops * gpus : 0;
    printf(
        "\n  ranks   pp   dp   tp   strategy   dtype   tokens/s   TFLOP/s     MFU   host in a step   step\n");
    printf("  %5d   %2d   %2d   %2d   %-8s   %-5s   %8.0f   %7.2f   ", r->world_size, t->pp, t->dp, t->tp,
           strategy_name(t->strategy), ddp_dtype_name(t->dtype), tokens, flops * 1e-12);
    if (peak > 0)
        printf("%4.1f%%", 100 * flops / peak);
    else
        printf("    -");
    printf("   %11.2f ms   %.2f ms\n", steps > 0 ? t->host_seconds / steps * 1e3 : 0,
           steps > 0 ? r->train_seconds / steps * 1e3 : 0);
    printf("  %s; of each rank's GPU: %.1f MiB expected, %.1f MiB of activations, %.1f MiB of shards, "
           "gradients and moments at the peak\n",
           properties.name, (double)t->needed / MIB, (double)gpt_cuda_bytes(&t->desc) / MIB, shards / MIB);
    if (t->pp > 1) printf("  bubble: %.1f%% predicted\n", 100 * t->stats.predicted_bubble_rate);
    printf("\n");
    return DDP_OK;
}

/* Hash of all values, on every rank. Collective. */
static ddp_result hash_weights(trainer *t, uint64_t *hash) {
    *hash = HASH_START;
    for (int i = 0; i < t->param_count; i++) {
        if (t->run.infos[i].tied_to >= 0) continue;
        DDP_TRY(gather_full(t, i, -1));
        *hash = hash_bytes(*hash, t->full_param, (size_t)t->run.infos[i].count * sizeof(float));
    }
    return DDP_OK;
}

/* Prints the sample, the tables and the result of the run. Collective. */
static ddp_result finish(trainer *t, double validation) {
    run *r = &t->run;
    ddp_fsdp_memory memory = DDP_ZERO;
    uint64_t hash;
    DDP_TRY(ddp_fsdp_get_memory(t->fsdp, &memory));
    if (t->pipeline)
        DDP_TRY(ddp_pipeline_get_stats(t->pipeline, &t->stats));
    else
        DDP_TRY(generate(t));
    if (r->rank == 0) DDP_TRY(print_table(t, &memory));
    if (t->mark_count) DDP_TRY(print_profile(t));
    DDP_TRY(hash_weights(t, &hash));
    if (r->options->timeline) DDP_TRY(write_timeline(t));
    return run_finish(r, validation, hash);
}

/* Collective over all ranks: they must read the same table. */
static ddp_result load_gemm_table(trainer *t) {
    const char *path = t->run.options->gemm_table;
    int used;
    if (!path) return DDP_OK;
    DDP_TRY(ddp_cuda_gemm_load(t->desc.group, path, &used));
    if (t->run.rank == 0)
        printf("--gemm-table %s: algorithms for %d products on this GPU with this cuBLASLt\n", path, used);
    return DDP_OK;
}

static ddp_result build(trainer *t) {
    void *memory;
    DDP_TRY(place_rank(t));
    DDP_TRY(build_slices(t));
    DDP_TRY(pick_gpu(t));
    DDP_TRY(check_memory(t));
    DDP_TRY(build_device(t));
    DDP_TRY(t->memory->alloc(t->along_dp, sizeof *t->squares + 2 * sizeof(float), &memory));
    t->squares = (ddp_exact_sum *)memory;
    DDP_TRY(build_scaler(t));
    DDP_TRY(build_shards(t));
    copy_loss_scale(t);
    t->desc.loss_scale = t->loss_scale;
    t->desc.stream = t->stream;
    t->desc.group = t->all_gpus ? t->all_gpus : t->along_dp;
    t->desc.tensor = t->along_tp;
    DDP_TRY(load_gemm_table(t));
    if (t->run.options->profile && t->run.rank == 0) {
        t->desc.note = profile_mark;
        t->desc.note_user = t;
    }
    DDP_TRY(gpt_cuda_create(&t->model, &t->desc));
    DDP_TRY(build_loader(t));
    CUDA(cudaHostAlloc((void **)&t->norms, 2 * sizeof *t->norms, cudaHostAllocDefault));
    return t->pp > 1 ? build_pipeline(t) : build_tables(t);
}

static ddp_result train(void *user) {
    trainer *t = (trainer *)user;
    run *r = &t->run;
    double validation = 0;
    set_mesh(t);
    DDP_TRY(run_start(r, r->rank == 0 ? plan_run(t) : DDP_OK));
    DDP_TRY(explain_memory(t, build(t)));
    choose_trace(t);
    run_report_start(r);
    if (r->rank == 0 && t->any_share)
        printf("ranks share a GPU: they communicate through host memory, which is slow\n");
    DDP_TRY(explain_memory(t, train_steps(t, &validation)));
    return finish(t, validation);
}

/* If this rank fails, poisons its groups, so that ranks that wait in them return the same error. Group memory
   can then be freed, which is collective. */
static ddp_result train_and_poison(void *user) {
    trainer *t = (trainer *)user;
    ddp_result result = train(t);
    ddp_group *groups[] = {t->along_tp, t->along_pp, t->along_dp, t->all_gpus, t->run.world};
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
    if (t->half_grads) t->memory->free(t->along_dp, t->half_grads);
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
    ddp_group_destroy(t->all_gpus);
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
    free(t->full_param);
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
    return run_trainer(world, (job *)user, sizeof(trainer), train_and_poison, trainer_free);
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

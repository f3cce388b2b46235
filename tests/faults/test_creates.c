/*  test_creates.c - every collective that creates, splits, saves, loads or plans succeeds on all ranks or
    fails on all with the same cause, at once.

    test_creates [processes|threads|tcp|tcp_threads|mpi ...] [part of a name]

    Three ranks. For each call of the list below:
      memory   each allocation of rank 1 fails in turn, until none does
      fields   rank 1 passes one wrong argument or field at a time. (A group or an object pointer that is NULL
               is not among them: nothing can be sent along the former, and the latter is no field of a desc.)
    Afterwards all ranks have one result. A failure has the text of rank 1, or of a mismatch; nothing was
    created, and the group works on. Each call prints the longest time until a rank returned, which is a few
    milliseconds; the timeout of the groups is a minute, so a rank that waits for it fails the test. */
#include "../../ddp_fsdp.h"
#include "../../ddp_pipeline.h"
#include "../../ddp_tensor.h"
#include "../support/fail_alloc.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#define ODD 1 /* the rank that fails */
#define SECONDS (10.0 * DDP_TEST_SLOWDOWN)
#define TIMEOUT_MS 60000

//== the calls =====================================================================================

/* Everything that a call may use or create. Rank 1 spoils field `wrong` (from 1 on; 0 = none). */
typedef struct bench {
    ddp_group *world;
    int wrong;
    char folder[200], checkpoint[240];
    float values[3][64], grads[3][64];
    ddp_param params[3];
    ddp_fsdp_param fsdp_params[3];
    ddp_fsdp_unit_desc units[2];
    ddp_group *again[2]; /* the world once more, for descs; a create may fail them */
    ddp_group *outcomes; /* the world once more, in which outcomes are compared */
    ddp_fsdp *fsdp;
    ddp_tp *tp;
    ddp_schedule *schedule;
    ddp_param *stage_params[3][1];
    ddp_pipeline_stage stages[3];
} bench;

/* One call. make returns its result and sets *made; check: it returned an object exactly if it succeeded. */
typedef struct create {
    const char *name; /* of the public call */
    ddp_result (*make)(bench *b, void **made);
    void (*destroy)(bench *b, void *made);
    int fields; /* number of wrong arguments that make has */
    /* It sends messages, which the tcp backend does not have. A message without memory fails the group. */
    int messages;
} create;

static ddp_tensor tensor_of(void *data, int ndim, int64_t rows, int64_t columns) {
    ddp_tensor t = DDP_ZERO;
    t.data = data;
    t.dtype = DDP_F32;
    t.ndim = ndim;
    t.shape[0] = rows;
    t.shape[1] = columns;
    return t;
}

static ddp_result make_split(bench *b, void **made) {
    return ddp_group_split(b->world, 0, 0, (ddp_group **)made);
}
static void destroy_group(bench *b, void *made) { (void)b, ddp_group_destroy((ddp_group *)made); }

static ddp_result make_alloc(bench *b, void **made) {
    size_t size = b->wrong == 1 ? 128 : b->wrong == 2 ? SIZE_MAX : 64;
    return ddp_group_alloc(b->world, size, made);
}
static void destroy_alloc(bench *b, void *made) { ddp_group_free(b->world, made); }

static ddp_result make_mesh(bench *b, void **made) {
    ddp_mesh_desc desc = DDP_ZERO;
    desc.ndim = 2;
    desc.names[0] = "dp";
    desc.names[1] = "tp";
    desc.shape[1] = 1;
    switch (b->wrong) {
    case 1: desc.ndim = 0; break;
    case 2: desc.ndim = 1000; break;
    case 3: desc.names[1] = NULL; break;
    case 4: desc.names[1] = "dp"; break;
    case 5: desc.shape[1] = -1; break;
    case 6: desc.shape[1] = 1000; break;
    case 7: desc.names[1] = "other"; break;
    case 8: return ddp_mesh_create((ddp_mesh **)made, b->world, NULL);
    }
    return ddp_mesh_create((ddp_mesh **)made, b->world, &desc);
}
static void destroy_mesh(bench *b, void *made) { (void)b, ddp_mesh_destroy((ddp_mesh *)made); }

static ddp_result any_hook(ddp_group *group, ddp_bucket *bucket, void *user) {
    (void)group, (void)bucket, (void)user;
    return DDP_OK;
}

static ddp_result make_reducer(bench *b, void **made) {
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_tensor buffer = tensor_of(b->values[2], 1, 4, 0);
    desc.params = b->params;
    desc.param_count = 2;
    desc.buffers = &buffer;
    desc.buffer_count = 1;
    switch (b->wrong) {
    case 1: desc.params = NULL; break;
    case 2: desc.param_count = 0; break;
    case 3: desc.param_count = 1; break;
    case 4: desc.micro_batch_count = -1; break;
    case 5: desc.micro_batch_count = 2; break;
    case 6: desc.comm_dtype = DDP_I32; break;
    case 7: desc.comm_dtype = DDP_BF16; break;
    case 8: desc.bucket_cap_bytes = 4096; break;
    case 9: desc.first_bucket_bytes = 4096; break;
    case 10: desc.find_unused = 1; break;
    case 11: desc.static_graph = 1; break;
    case 12: desc.hook = any_hook; break;
    case 13: desc.skip_initial_broadcast = 1; break;
    case 14: desc.per_token = 1; break;
    case 15: desc.buffers = NULL; break;
    case 16: desc.buffer_count = 0; break;
    case 17: buffer.shape[0] = 3; break;
    case 18: b->params[1].value.dtype = DDP_F64; break;
    case 19: b->params[1].value.shape[0] = 7; break;
    case 20: b->params[1].value.data = NULL; break;
    case 21: b->params[1].value.ndim = 99; break;
    case 22: b->params[1].name = "other"; break;
    case 23: b->params[1].grad.data = b->grads[0] + 1; break; /* overlaps parameter 0's */
    case 24: return ddp_reducer_create((ddp_reducer **)made, b->world, NULL);
    }
    return ddp_reducer_create((ddp_reducer **)made, b->world, &desc);
}
static void destroy_reducer(bench *b, void *made) { (void)b, ddp_reducer_destroy((ddp_reducer *)made); }

static ddp_fsdp_desc fsdp_desc(bench *b) {
    ddp_fsdp_desc desc = DDP_ZERO;
    desc.units = b->units;
    desc.unit_count = 2;
    desc.optimizer.weight_decay = 0.1f;
    return desc;
}

static ddp_scaler some_scaler;

static ddp_result make_fsdp(bench *b, void **made) {
    ddp_fsdp_desc desc = fsdp_desc(b);
    switch (b->wrong) {
    case 1: desc.units = NULL; break;
    case 2: desc.unit_count = 0; break;
    case 3: desc.unit_count = 1; break;
    case 4: desc.strategy = (ddp_fsdp_strategy)99; break;
    case 5: desc.strategy = DDP_FSDP_NO_SHARD; break;
    case 6: desc.param_dtype = DDP_I32; break;
    case 7: desc.param_dtype = DDP_BF16; break;
    case 8: desc.reduce_dtype = DDP_I32; break;
    case 9: desc.reduce_dtype = DDP_BF16; break;
    case 10: desc.micro_batch_count = -1; break;
    case 11: desc.micro_batch_count = 2; break;
    case 12: desc.per_token = 1; break;
    case 13: desc.sequential_accumulation = 1; break;
    case 14: desc.prefetch = 7; break;
    case 15: desc.max_gathered_bytes = 64; break;
    case 16: desc.no_reshard_after_forward = 1; break;
    case 17: desc.quantize_gather = 1; break;
    case 18: desc.offload = (ddp_fsdp_offload)99; break;
    case 19: desc.offload = DDP_FSDP_OFFLOAD_FILE, desc.offload_dir = "/nowhere/at/all"; break;
    case 20: desc.optimizer.kind = (ddp_optimizer_kind)99; break;
    case 21: desc.optimizer.kind = DDP_OPTIMIZER_SGD; break;
    case 22: desc.optimizer.beta1 = 2; break;
    case 23: desc.optimizer.weight_decay = 0.2f; break;
    case 24: desc.scaler = &some_scaler; break;
    case 25: desc.skip_initial_broadcast = 1; break;
    case 26: desc.keep_checkpoints = -1; break;
    case 27: desc.save_in_background = 1; break;
    case 28: desc.alloc_fn = fail_alloc; break;
    case 29: desc.replicas = b->again[0]; break;
    case 30: desc.checkpoint_group = b->again[1]; break;
    case 31: b->units[1].param_count = 0; break;
    case 32: b->units[1].params = NULL; break;
    case 33: b->fsdp_params[1].param.value.dtype = DDP_I32; break;
    case 34: b->fsdp_params[1].param.value.shape[0] = 7; break;
    case 35: b->fsdp_params[1].param.value.data = NULL; break;
    case 36: b->fsdp_params[1].param.name = "other"; break;
    case 37: b->fsdp_params[1].param.name = NULL; break;
    case 38: b->fsdp_params[1].frozen = 1; break;
    case 39: b->fsdp_params[1].tied_to = "nobody"; break;
    case 40: b->fsdp_params[1].param.value.data = b->values[0]; break; /* another unit's memory */
    case 41: b->fsdp_params[1].global_shape[0] = 3; break;
    case 42: return ddp_fsdp_create((ddp_fsdp **)made, b->world, NULL);
    }
    return ddp_fsdp_create((ddp_fsdp **)made, b->world, &desc);
}
static ddp_result make_fsdp_whole(bench *b, void **made) {
    ddp_fsdp_desc desc = fsdp_desc(b);
    desc.strategy = DDP_FSDP_NO_SHARD;
    return ddp_fsdp_create((ddp_fsdp **)made, b->world, &desc);
}
static void destroy_fsdp(bench *b, void *made) { (void)b, ddp_fsdp_destroy((ddp_fsdp *)made); }

static ddp_result save_or_load(bench *b, ddp_result (*call)(ddp_fsdp *, const char *)) {
    char other[300];
    snprintf(other, sizeof other, "%s/other", b->folder);
    const char *dirs[] = {b->checkpoint, NULL, "", other, "/nowhere/at/all"};
    return call(b->fsdp, dirs[b->wrong]);
}
static ddp_result make_save(bench *b, void **made) {
    ddp_result result = save_or_load(b, ddp_fsdp_save);
    *made = result == DDP_OK ? b : NULL;
    return result;
}
static ddp_result make_load(bench *b, void **made) {
    ddp_result result = save_or_load(b, ddp_fsdp_load);
    *made = result == DDP_OK ? b : NULL;
    return result;
}

static ddp_result any_stage(const ddp_pipeline_call *call, void *user) {
    (void)call, (void)user;
    return DDP_OK;
}

static ddp_result make_pipeline(bench *b, void **made) {
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_pipeline_tie tie = DDP_ZERO;
    tie.second_stage = 2;
    desc.schedule = b->schedule;
    desc.stages = b->stages;
    desc.stage_count = 3;
    desc.boundary = tensor_of(NULL, 2, 2, 5);
    desc.output = tensor_of(NULL, 2, 2, 5);
    desc.loss = any_stage;
    desc.ties = &tie;
    desc.tie_count = 1;
    switch (b->wrong) {
    case 1: desc.schedule = NULL; break;
    case 2: desc.stages = NULL; break;
    case 3: desc.stage_count = 2; break;
    case 4: desc.boundary.shape[1] = 6; break;
    case 5: desc.boundary.dtype = DDP_F64; break;
    case 6: desc.boundary.ndim = 99; break;
    case 7: desc.output.shape[0] = 3; break;
    case 8: desc.loss = NULL; break;
    case 9: desc.ties = NULL; break;
    case 10: desc.tie_count = 0; break;
    case 11: tie.second_stage = 1; break;
    case 12: tie.first_param = 9; break;
    case 13: desc.prefetch = -1; break;
    case 14: b->stages[1].forward = NULL; break;
    case 15: b->stages[1].backward = NULL; break;
    case 16: b->stages[1].params = NULL; break;
    case 17: b->stage_params[1][0] = NULL; break;
    case 18: b->stages[1].param_count = -1; break;
    case 19: desc.edge_count = 1; break;
    case 20: return ddp_pipeline_create((ddp_pipeline **)made, b->world, NULL);
    }
    return ddp_pipeline_create((ddp_pipeline **)made, b->world, &desc);
}
static void destroy_pipeline(bench *b, void *made) { (void)b, ddp_pipeline_destroy((ddp_pipeline *)made); }

static ddp_result make_tp(bench *b, void **made) {
    ddp_tp_desc desc = DDP_ZERO;
    desc.max_rows = 6;
    switch (b->wrong) {
    case 1: desc.max_rows = 0; break;
    case 2: desc.max_rows = 12; break;
    case 3: desc.dtype = DDP_F64; break;
    case 4: desc.dtype = DDP_I32; break;
    case 5: desc.sequence_parallel = 1; break;
    case 6: desc.chunk_count = 2; break;
    case 7: desc.chunk_count = 1000; break;
    case 8: desc.accumulate_grads = 1; break;
    case 9: return ddp_tp_create((ddp_tp **)made, b->world, NULL);
    }
    return ddp_tp_create((ddp_tp **)made, b->world, &desc);
}
static void destroy_tp(bench *b, void *made) { (void)b, ddp_tp_destroy((ddp_tp *)made); }

static ddp_result make_linear(bench *b, void **made) {
    ddp_tp_linear_desc desc = DDP_ZERO;
    desc.in_features = 6;
    desc.out_features = 6;
    switch (b->wrong) {
    case 1: desc.in_features = 0; break;
    case 2: desc.in_features = 9; break;
    case 3: desc.out_features = -1; break;
    case 4: desc.out_features = 9; break;
    case 5: desc.split = DDP_TP_ROW; break;
    case 6: desc.split = (ddp_tp_split)9; break;
    case 7: desc.no_bias = 1; break;
    case 8: desc.gather_output = 1; break;
    case 9: desc.scatter_input = 1; break;
    case 10: desc.heads = 4; break;
    case 11: return ddp_tp_linear_create((ddp_tp_linear **)made, b->tp, NULL);
    }
    return ddp_tp_linear_create((ddp_tp_linear **)made, b->tp, &desc);
}
static void destroy_linear(bench *b, void *made) { (void)b, ddp_tp_linear_destroy((ddp_tp_linear *)made); }

static ddp_result make_mlp(bench *b, void **made) {
    ddp_tp_mlp_desc desc = DDP_ZERO;
    desc.channels = 6;
    desc.hidden = 12;
    switch (b->wrong) {
    case 1: desc.channels = 0; break;
    case 2: desc.channels = 9; break;
    case 3: desc.hidden = 24; break;
    case 4: desc.activation = DDP_TP_RELU; break;
    case 5: desc.activation = (ddp_tp_activation)9; break;
    case 6: desc.no_bias = 1; break;
    case 7: return ddp_tp_mlp_create((ddp_tp_mlp **)made, b->tp, NULL);
    }
    return ddp_tp_mlp_create((ddp_tp_mlp **)made, b->tp, &desc);
}
static void destroy_mlp(bench *b, void *made) { (void)b, ddp_tp_mlp_destroy((ddp_tp_mlp *)made); }

static ddp_result make_embedding(bench *b, void **made) {
    ddp_tp_embedding_desc desc = DDP_ZERO;
    desc.vocab = 9;
    desc.channels = 6;
    switch (b->wrong) {
    case 1: desc.vocab = 0; break;
    case 2: desc.vocab = 12; break;
    case 3: desc.channels = 3; break;
    case 4: desc.padded_vocab = 12; break;
    case 5: desc.padded_vocab = 1; break;
    case 6: return ddp_tp_embedding_create((ddp_tp_embedding **)made, b->tp, NULL);
    }
    return ddp_tp_embedding_create((ddp_tp_embedding **)made, b->tp, &desc);
}
static void destroy_embedding(bench *b, void *made) {
    (void)b, ddp_tp_embedding_destroy((ddp_tp_embedding *)made);
}

static ddp_result make_norm(bench *b, void **made) {
    ddp_tp_layer_norm_desc desc = DDP_ZERO;
    desc.channels = 6;
    switch (b->wrong) {
    case 1: desc.channels = 0; break;
    case 2: desc.channels = 9; break;
    case 3: desc.eps = -1; break;
    case 4: desc.eps = 0.5; break;
    case 5: desc.rms = 1; break;
    case 6: return ddp_tp_layer_norm_create((ddp_tp_layer_norm **)made, b->tp, NULL);
    }
    return ddp_tp_layer_norm_create((ddp_tp_layer_norm **)made, b->tp, &desc);
}
static void destroy_norm(bench *b, void *made) {
    (void)b, ddp_tp_layer_norm_destroy((ddp_tp_layer_norm *)made);
}

/* The tensors below are created by the call: a ddp_tensor on the heap, or NULL. */
static ddp_result keep(ddp_result result, const ddp_tensor *out, void **made) {
    if (!out->data) return result;
    *made = malloc(sizeof *out);
    *(ddp_tensor *)*made = *out;
    return result;
}
static void destroy_tensor(bench *b, void *made) {
    if (made) ddp_tensor_free(b->world, (ddp_tensor *)made);
    free(made);
}

static ddp_result make_distribute(bench *b, void **made) {
    ddp_tensor whole = tensor_of(b->values[0], 2, 6, 4), out = DDP_ZERO;
    ddp_placement to = DDP_SHARD(0);
    int root = 0;
    switch (b->wrong) {
    case 1: root = ODD; break;
    case 2: to = DDP_SHARD(1); break;
    case 3: to = DDP_SHARD(7); break;
    case 4: to = DDP_REPLICATE; break;
    case 5: out = tensor_of(b->grads[0], 2, 5, 5); break;
    }
    ddp_result result = ddp_tensor_distribute(b->world, &whole, root, to, &out);
    return out.data == (void *)b->grads[0] ? result : keep(result, &out, made);
}

static ddp_result make_redistribute(bench *b, void **made) {
    ddp_tensor in = tensor_of(b->values[0], 2, 2, 4), out = tensor_of(NULL, 2, 6, 4);
    ddp_placement from = DDP_SHARD(0), to = DDP_REPLICATE;
    switch (b->wrong) {
    case 1: to = DDP_SHARD(1), out.shape[0] = 6, out.shape[1] = 2; break;
    case 2: from = DDP_SHARD(7); break;
    case 3: in.shape[1] = 3; break;
    case 4: in.dtype = DDP_F64; break;
    case 5: in.data = NULL; break;
    case 6: out.shape[0] = 7; break;
    case 7: in.ndim = 99; break;
    }
    return keep(ddp_tensor_redistribute(b->world, &in, from, to, &out), &out, made);
}

static ddp_result make_mesh_redistribute(bench *b, void **made) {
    ddp_tensor in = tensor_of(b->values[0], 2, 2, 4), out = DDP_ZERO;
    ddp_tensor_layout from = DDP_ZERO, to;
    from.ndim = 2;
    from.shape[0] = 6;
    from.shape[1] = 4;
    from.axis_count = 1;
    from.axes[0] = b->world;
    from.placement[0] = DDP_SHARD(0);
    to = from;
    to.placement[0] = DDP_REPLICATE;
    switch (b->wrong) {
    case 1: to.placement[0] = DDP_SHARD(1); break;
    case 2: in.data = NULL; break;
    case 3: in.shape[0] = 5; break;
    }
    return keep(ddp_tensor_redistribute_mesh(&in, &from, &to, &out, NULL), &out, made);
}

static const create creates[] = {
    {"ddp_group_split", make_split, destroy_group, 0, 0},
    {"ddp_group_alloc", make_alloc, destroy_alloc, 2, 0},
    {"ddp_mesh_create", make_mesh, destroy_mesh, 8, 0},
    {"ddp_reducer_create", make_reducer, destroy_reducer, 24, 0},
    {"ddp_fsdp_create", make_fsdp, destroy_fsdp, 42, 0},
    {"ddp_fsdp_create", make_fsdp_whole, destroy_fsdp, 0, 0},
    {"ddp_fsdp_save", make_save, NULL, 4, 0},
    {"ddp_fsdp_load", make_load, NULL, 4, 0},
    {"ddp_pipeline_create", make_pipeline, destroy_pipeline, 20, 1},
    {"ddp_tp_create", make_tp, destroy_tp, 9, 0},
    {"ddp_tp_linear_create", make_linear, destroy_linear, 11, 0},
    {"ddp_tp_mlp_create", make_mlp, destroy_mlp, 7, 0},
    {"ddp_tp_embedding_create", make_embedding, destroy_embedding, 6, 0},
    {"ddp_tp_layer_norm_create", make_norm, destroy_norm, 6, 0},
    {"ddp_tensor_distribute", make_distribute, destroy_tensor, 5, 0},
    {"ddp_tensor_redistribute", make_redistribute, destroy_tensor, 7, 0},
    {"ddp_tensor_redistribute_mesh", make_mesh_redistribute, destroy_tensor, 3, 0},
};
enum { CREATES = sizeof creates / sizeof creates[0] };

//== one call on all ranks =========================================================================

typedef struct outcome {
    int32_t result, made, failed;
    double seconds;
    char text[512];
} outcome;

static __thread double longest;
static __thread char longest_call[40];

/* The text after "rank N/M CALL group=G: ", or "CALL: " where the group was not looked at yet. */
static const char *body_of(const create *c, const char *text) {
    const char *name = strstr(text, c->name), *body = name ? strstr(name, ": ") : NULL;
    return body ? body + 2 : text;
}

/* Of one launch, in memory that all ranks share. */
static struct progress {
    int problems;
    int next; /* the group has failed, as it may; the allocation with which the next launch begins */
} * progress;

/* Counts a difference, on rank 0, and continues: one run shows all. */
static void problem(ddp_group *world, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void problem(ddp_group *world, const char *format, ...) {
    va_list args;
    if (ddp_rank(world) != 0) return;
    progress->problems++;
    printf("FAIL ");
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

/* The error in the outcome of rank r, compared with that of the odd rank; NULL = none. */
static const char *wrong_with(const create *c, const outcome *o, const outcome *odd) {
    if (o->seconds >= SECONDS) return "it took too long";
    if (o->result != odd->result) return "another result";
    if (o->made != (o->result == DDP_OK)) return "an object after a failure, or none after success";
    if (o->result == DDP_OK || o == odd) return NULL;
    if (!strstr(o->text, c->name)) return "the text names another call";
    if (o->result == DDP_ERR_MISMATCH) return NULL; /* it describes two ranks, rank 1 or another one first */
    if (!strstr(o->text, "rank 1")) return "the text does not name the rank";
    /* One of the two failed first, and the other one's line contains the cause. */
    if (!strstr(o->text, body_of(c, odd->text)) && !strstr(odd->text, body_of(c, o->text)))
        return "another cause";
    return NULL;
}

/* Calls it on all ranks and compares. *more: an allocation failed. */
static ddp_result compare(bench *b, const create *c, const char *what, int n, int *more, ddp_result *result) {
    ddp_group *world = b->world;
    int w = ddp_world_size(world), same = 1;
    outcome mine, all[8];
    void *made = NULL;
    RANKS_OK(world, ddp_barrier(world));
    memset(&mine, 0, sizeof mine);
    ddp_fail(DDP_OK, "nothing"); /* the text before the call */
    fail_at = ddp_rank(world) == ODD && what[0] == 'a' ? n : 0;
    failed = 0;
    double start = ranks_now();
    mine.result = c->make(b, &made);
    mine.seconds = ranks_now() - start;
    fail_at = 0;
    snprintf(mine.text, sizeof mine.text, "%s", ddp_last_error());
    mine.made = made != NULL;
    mine.failed = failed;
    int group_failed = ddp_group_status(world) != DDP_OK;
    RANKS_CHECK(world, !group_failed || (c->messages && mine.result == DDP_ERR_NO_MEMORY),
                "%s, %s %d: the group failed: %s", c->name, what, n, ddp_last_error());
    RANKS_OK(world, ddp_all_gather(b->outcomes, &mine, all, sizeof mine, DDP_U8, NULL));
    if (group_failed) progress->next = n + 1;
    *more = all[ODD].failed;
    *result = (ddp_result)all[ODD].result;
    for (int r = 0; r < w; r++) {
        const outcome *o = &all[r];
        const char *wrong = wrong_with(c, o, &all[ODD]);
        if (o->seconds > longest) {
            longest = o->seconds;
            snprintf(longest_call, sizeof longest_call, "%s %d", what, n);
        }
        if (wrong)
            problem(world, "%s, %s %d: rank %d: %s: %s (%s), rank %d has %s (%s)", c->name, what, n, r, wrong,
                    ddp_result_name((ddp_result)o->result), o->text, ODD, ddp_result_name(*result),
                    all[ODD].text);
        same = same && o->result == *result;
    }
    if (*more != (*result == DDP_ERR_NO_MEMORY) && what[0] == 'a')
        problem(world, "%s, %s %d: %s (%s)", c->name, what, n, ddp_result_name(*result), all[ODD].text);
    RANKS_CHECK(world, same, "ranks have different results: the rest cannot run");
    if (*result == DDP_OK && c->destroy) c->destroy(b, made);
    return DDP_OK;
}

/* The objects that the calls work on, without faults. They are new for each call, which may have changed
   them. */
static void fill(bench *b) {
    static const char *const names[] = {"first", "second", "third"};
    memset(b->params, 0, sizeof b->params);
    memset(b->fsdp_params, 0, sizeof b->fsdp_params);
    memset(b->units, 0, sizeof b->units);
    memset(b->stages, 0, sizeof b->stages);
    for (int i = 0; i < 3; i++) {
        b->params[i].name = names[i];
        b->params[i].value = tensor_of(b->values[i], 2, 6, 4);
        b->params[i].grad.data = b->grads[i];
        b->fsdp_params[i].param.name = names[i];
        b->fsdp_params[i].param.value = tensor_of(b->values[i], 2, 6, 4);
        b->stage_params[i][0] = &b->params[i];
        b->stages[i].forward = any_stage;
        b->stages[i].backward = any_stage;
        b->stages[i].params = b->stage_params[i];
        b->stages[i].param_count = 1;
    }
    b->units[0].params = b->fsdp_params;
    b->units[0].param_count = 1;
    b->units[1].params = b->fsdp_params + 1;
    b->units[1].param_count = 2;
}

typedef struct plan {
    const create *call;
    const char *folder;
    int first; /* allocation to fail */
} plan;

static ddp_result sweep(bench *b, const plan *p) {
    const create *c = p->call;
    int odd = ddp_rank(b->world) == ODD, first = ddp_rank(b->world) == 0;
    int more = 1, allocations = 0, refused = 0;
    ddp_result result = DDP_OK;
    b->wrong = 0;
    for (int n = p->first; more; n++) {
        fill(b);
        DDP_TRY(compare(b, c, "allocation", n, &more, &result));
        if (progress->next) return DDP_OK;
        allocations = n - !more;
    }
    for (int field = 1; field <= c->fields; field++) {
        fill(b);
        b->wrong = odd ? field : 0;
        DDP_TRY(compare(b, c, "field", field, &more, &result));
        refused += result != DDP_OK;
        if (getenv("DDP_TEST_SHOW") && odd)
            printf("    %s field %d: %s: %s\n", c->name, field, ddp_result_name(result), ddp_last_error());
    }
    b->wrong = 0;
    if (first)
        printf("%-30s %3d allocations, %2d of %2d fields refused, at most %.1f ms (%s)\n", c->name,
               allocations, refused, c->fields, 1e3 * longest, longest_call);
    return DDP_OK;
}

//== a world for each call =========================================================================

static ddp_result run(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    bench *b = (bench *)calloc(1, sizeof *b);
    ddp_schedule_desc schedule = DDP_ZERO;
    ddp_tp_desc tp = DDP_ZERO;
    RANKS_CHECK(world, b, "memory");
    b->world = world;
    longest = 0;
    fill(b);
    snprintf(b->folder, sizeof b->folder, "%s", p->folder);
    RANKS_OK(world, ddp_broadcast(world, b->folder, sizeof b->folder, DDP_U8, 0, NULL));
    snprintf(b->checkpoint, sizeof b->checkpoint, "%s/checkpoint", b->folder);
    for (int i = 0; i < 2; i++) RANKS_OK(world, ddp_group_split(world, 0, 0, &b->again[i]));
    RANKS_OK(world, ddp_group_split(world, 0, 0, &b->outcomes));
    ddp_fsdp_desc fsdp = fsdp_desc(b);
    RANKS_OK(world, ddp_fsdp_create(&b->fsdp, world, &fsdp));
    RANKS_OK(world, ddp_fsdp_save(b->fsdp, b->checkpoint));
    tp.max_rows = 6;
    RANKS_OK(world, ddp_tp_create(&b->tp, world, &tp));
    schedule.rank_count = ddp_world_size(world);
    schedule.microbatch_count = 4;
    RANKS_OK(world, ddp_schedule_create(&b->schedule, &schedule));
    ddp_result swept = sweep(b, p);
    ddp_schedule_destroy(b->schedule);
    ddp_tp_destroy(b->tp);
    ddp_fsdp_destroy(b->fsdp);
    for (int i = 0; i < 2; i++) ddp_group_destroy(b->again[i]);
    ddp_group_destroy(b->outcomes);
    free(b);
    return swept;
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    char folder[] = "/tmp/ddp_test_creates_XXXXXX", command[100];
    int failures = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    watchdog_start(200);
    ranks_memory.alloc_fn = fail_alloc;
    ranks_memory.free_fn = fail_free;
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) return 2;
    progress = (struct progress *)ranks_shared(sizeof *progress);
    if (!mkdtemp(folder)) return perror(folder), 2;
    for (int i = 0; i < CREATES; i++) {
        plan p = {&creates[i], folder, 1};
        ddp_result result;
        if (creates[i].messages && ranks_backends[mode].is & RANKS_NO_MESSAGES) continue;
        if (argc > 2 && !strstr(creates[i].name, argv[2]) && !ranks_joins(mode)) continue;
        /* Over MPI the group must not fail: mpirun would end the program. */
        if (creates[i].messages && ranks_joins(mode)) p.first = 1000;
        do {
            memset(progress, 0, sizeof *progress);
            result = ranks_run(mode, 3, TIMEOUT_MS, run, &p);
            if (result != DDP_OK) printf("FAIL %s: %s\n", creates[i].name, ddp_last_error());
            failures += progress->problems + (result != DDP_OK);
            p.first = progress->next;
        } while (p.first && result == DDP_OK);
    }
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) != 0 || failures != 0;
}

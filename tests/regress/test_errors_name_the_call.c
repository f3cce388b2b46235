/*  test_errors_name_the_call.c - an error line names the public call that the user made, on every rank.

    A rank that destroyed a reducer while the others were in a barrier appeared there as "ddp_group_free of
    block 6291456", and one in ddp_reducer_create as "ddp_all_gather u8 count=560": the collectives that the
    library makes inside.

    test_errors_name_the_call [processes|threads|tcp|mpi] [part of a call's name; with mpi: the name] */
#include "../../ddp.h"
#include "../../ddp_fsdp.h"
#include "../../ddp_tensor.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

//== one rank makes the public call, the others a barrier ====================================

typedef struct objects {
    float values[64], grads[64];
    ddp_param param;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_join *join;
    ddp_mesh *mesh;
    ddp_fsdp_param fsdp_param;
    ddp_fsdp_unit_desc unit;
    ddp_fsdp *fsdp;
    ddp_tensor tensor, made;
    ddp_tp *tp;
    ddp_tp_linear *linear;
    void *memory;
} objects;

static ddp_result reducer_create(ddp_group *world, objects *o) {
    ddp_reducer_desc desc = DDP_ZERO;
    o->param.name = "w";
    o->param.value.data = o->values;
    o->param.value.dtype = DDP_F32;
    o->param.value.ndim = 1;
    o->param.value.shape[0] = 64;
    desc.params = &o->param;
    desc.param_count = 1;
    return ddp_reducer_create(&o->reducer, world, &desc);
}

static ddp_result reducer_ready_and_wait(ddp_group *world, objects *o) {
    (void)world;
    ddp_result result = ddp_reducer_ready(o->reducer, 0);
    return result == DDP_OK ? ddp_reducer_wait(o->reducer) : result;
}

static ddp_result reducer_destroy(ddp_group *world, objects *o) {
    ddp_reducer_destroy(o->reducer);
    o->reducer = NULL;
    return ddp_group_status(world); /* a destroy leaves the error line as it is */
}

static ddp_result join_create(ddp_group *world, objects *o) {
    ddp_join_desc desc = DDP_ZERO;
    ddp_result result = reducer_create(world, o);
    desc.reducer = o->reducer;
    return result == DDP_OK ? ddp_join_create(&o->join, world, &desc) : result;
}

static ddp_result join_step(ddp_group *world, objects *o) {
    int active;
    (void)world;
    return ddp_join_step(o->join, 1, &active);
}

static ddp_result mean_reduce(ddp_group *world, objects *o) {
    ddp_mean mean = DDP_ZERO;
    (void)o;
    ddp_mean_add(&mean, 1, 1);
    return ddp_mean_reduce(world, &mean);
}

static ddp_result mesh_create(ddp_group *world, objects *o) {
    ddp_mesh_desc desc = DDP_ZERO;
    desc.ndim = 1;
    desc.names[0] = "dp";
    return ddp_mesh_create(&o->mesh, world, &desc);
}

static ddp_result group_split(ddp_group *world, objects *o) {
    ddp_group *half;
    (void)o;
    return ddp_group_split(world, 0, 0, &half);
}

static ddp_result group_alloc(ddp_group *world, objects *o) {
    return ddp_group_alloc(world, 256, &o->memory);
}
static ddp_result group_free(ddp_group *world, objects *o) { return ddp_group_free(world, o->memory); }

static ddp_result fsdp_create(ddp_group *world, objects *o) {
    ddp_fsdp_desc desc = DDP_ZERO;
    o->fsdp_param.param.name = "w";
    o->fsdp_param.param.value.data = o->values;
    o->fsdp_param.param.value.dtype = DDP_F32;
    o->fsdp_param.param.value.ndim = 1;
    o->fsdp_param.param.value.shape[0] = 64;
    o->unit.name = "layer";
    o->unit.params = &o->fsdp_param;
    o->unit.param_count = 1;
    desc.units = &o->unit;
    desc.unit_count = 1;
    return ddp_fsdp_create(&o->fsdp, world, &desc);
}

static ddp_result fsdp_unit_gather(ddp_group *world, objects *o) {
    (void)world;
    return ddp_fsdp_unshard(o->fsdp, 0);
}

static ddp_result fsdp_to_step(ddp_group *world, objects *o) {
    ddp_result result = fsdp_create(world, o);
    if (result == DDP_OK) result = ddp_fsdp_unshard(o->fsdp, 0);
    if (result == DDP_OK) result = ddp_fsdp_reduce_grads(o->fsdp, 0);
    return result;
}

static ddp_result fsdp_clip(ddp_group *world, objects *o) {
    (void)world;
    return ddp_fsdp_clip_grad_norm(o->fsdp, 1, NULL);
}

static ddp_result fsdp_save(ddp_group *world, objects *o) {
    (void)world;
    return ddp_fsdp_save(o->fsdp, "/tmp/ddp_test_never_written");
}

static ddp_result fsdp_load(ddp_group *world, objects *o) {
    (void)world;
    return ddp_fsdp_load(o->fsdp, "/tmp/ddp_test_never_written");
}

static ddp_result fsdp_destroy(ddp_group *world, objects *o) {
    ddp_fsdp_destroy(o->fsdp);
    o->fsdp = NULL;
    return ddp_group_status(world);
}

static ddp_result tensor_make(ddp_group *world, objects *o) {
    int64_t shape[1] = {64};
    return ddp_tensor_create(world, &o->tensor, DDP_F32, 1, shape);
}

static ddp_result tensors_make(ddp_group *world, objects *o) {
    int64_t shape[1] = {64};
    ddp_result result = tensor_make(world, o);
    return result == DDP_OK ? ddp_tensor_create(world, &o->made, DDP_F32, 1, shape) : result;
}

static ddp_result tensor_gather(ddp_group *world, objects *o) {
    int64_t shape[1] = {64 * ddp_world_size(world)};
    return ddp_tensor_gather(world, &o->tensor, DDP_SHARD(0), shape, 0, &o->made);
}

static ddp_result tensor_redistribute(ddp_group *world, objects *o) {
    return ddp_tensor_redistribute(world, &o->tensor, DDP_PARTIAL, DDP_REPLICATE, &o->made);
}

static ddp_result tp_create(ddp_group *world, objects *o) {
    ddp_tp_desc desc = DDP_ZERO;
    desc.max_rows = 4;
    return ddp_tp_create(&o->tp, world, &desc);
}

static ddp_result linear_create(ddp_group *world, objects *o) {
    ddp_tp_linear_desc desc = DDP_ZERO;
    (void)world;
    desc.split = DDP_TP_ROW;
    desc.in_features = 8;
    desc.out_features = 8;
    return ddp_tp_linear_create(&o->linear, o->tp, &desc);
}

static ddp_result tp_and_linear(ddp_group *world, objects *o) {
    ddp_result result = tp_create(world, o);
    return result == DDP_OK ? linear_create(world, o) : result;
}

static ddp_result linear_forward(ddp_group *world, objects *o) {
    float y[32];
    (void)world;
    return ddp_tp_linear_forward(o->linear, o->values, o->grads, o->values, 1, y);
}

/* prepare: on all ranks. */
typedef struct public_call {
    const char *name;
    ddp_result (*prepare)(ddp_group *, objects *), (*call)(ddp_group *, objects *);
    const char *also; /* another public call that the line can name, or NULL */
} public_call;

static const public_call calls[] = {
    {"ddp_reducer_create", NULL, reducer_create, NULL},
    {"ddp_reducer_wait", reducer_create, reducer_ready_and_wait, "ddp_reducer_ready"},
    {"ddp_reducer_destroy", reducer_create, reducer_destroy, NULL},
    {"ddp_join_step", join_create, join_step, NULL},
    {"ddp_mean_reduce", NULL, mean_reduce, NULL},
    {"ddp_mesh_create", NULL, mesh_create, NULL},
    {"ddp_group_split", NULL, group_split, NULL},
    {"ddp_group_alloc", NULL, group_alloc, NULL},
    {"ddp_group_free", group_alloc, group_free, NULL},
    {"ddp_fsdp_create", NULL, fsdp_create, NULL},
    {"ddp_fsdp_unshard", fsdp_create, fsdp_unit_gather, NULL},
    {"ddp_fsdp_clip_grad_norm", fsdp_to_step, fsdp_clip, NULL},
    {"ddp_fsdp_save", fsdp_create, fsdp_save, NULL},
    {"ddp_fsdp_load", fsdp_create, fsdp_load, NULL},
    {"ddp_fsdp_destroy", fsdp_create, fsdp_destroy, NULL},
    {"ddp_tensor_gather", tensor_make, tensor_gather, NULL},
    {"ddp_tensor_redistribute", tensors_make, tensor_redistribute, NULL},
    {"ddp_tp_create", NULL, tp_create, NULL},
    {"ddp_tp_linear_create", tp_create, linear_create, NULL},
    {"ddp_tp_linear_forward", tp_and_linear, linear_forward, NULL},
};
enum { CALLS = sizeof calls / sizeof calls[0] };

static void destroy(objects *o) {
    ddp_join_destroy(o->join);
    ddp_reducer_destroy(o->reducer);
    ddp_mesh_destroy(o->mesh);
    ddp_fsdp_destroy(o->fsdp);
    ddp_tp_linear_destroy(o->linear);
    ddp_tp_destroy(o->tp);
}

/* odd: 0 = rank 0 makes the public call and comes last; 1 = rank 1, which comes first. */
typedef struct plan {
    const public_call *what;
    int odd, waits;
    ranks_mode mode;
} plan;

static ddp_result odd_main(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    objects *o = (objects *)calloc(1, sizeof *o);
    seen *s = seen_by(world);
    int odd = ddp_rank(world) == p->odd;
    if (p->what->prepare) RANKS_OK(world, p->what->prepare(world, o));
    RANKS_OK(world, ddp_barrier(world));
    if (p->waits && !odd) {
        heard(&stage_shared->counter, 1); /* the odd rank has reached its timeout */
    } else {
        if (odd != p->odd) ranks_sleep_us(20000);
        s->first = odd ? p->what->call(world, o) : ddp_barrier(world);
        snprintf(s->text, sizeof s->text, "%s", ddp_last_error());
        s->second = ddp_barrier(world);
        snprintf(s->text2, sizeof s->text2, "%s", ddp_last_error());
        s->done = 1;
        say(&stage_shared->counter);
    }
    if (!ranks_joins(p->mode)) meet_outside(ddp_world_size(world));
    destroy(o);
    if (o->tensor.data) ddp_tensor_free(world, &o->tensor);
    if (o->made.data) ddp_tensor_free(world, &o->made);
    free(o);
    return DDP_OK;
}

/* Every ddp_ word of the text is one of the three names. */
static void expect_only(int rank, const char *text, const char *a, const char *b, const char *c) {
    const char *allowed[3] = {a, b, c};
    for (const char *at = strstr(text, "ddp_"); at; at = strstr(at + 1, "ddp_")) {
        int known = 0;
        size_t n = strspn(at, "abcdefghijklmnopqrstuvwxyz0123456789_");
        for (int i = 0; i < 3; i++)
            known |= allowed[i] && strlen(allowed[i]) == n && strncmp(at, allowed[i], n) == 0;
        if (n > 9 && strncmp(at, "ddp_test_", 9) == 0) known = 1; /* a path */
        EXPECT(known, "rank %d names %.*s: '%s'", rank, (int)n, at, text);
    }
}

static void run(ranks_mode mode, int world_size, const plan *p, int timeout_ms) {
    char scenario[128], begin[96];
    int seen_here = 0;
    snprintf(scenario, sizeof scenario, "%s: %s on rank %d%s", ranks_mode_name(mode), p->what->name, p->odd,
             p->waits ? ", others do not come" : "");
    faults_begin(scenario);
    if (ranks_joins(mode))
        (void)ranks_run(mode, world_size, timeout_ms, odd_main, (void *)(uintptr_t)p);
    else
        (void)launch(mode, world_size, timeout_ms, odd_main, (void *)(uintptr_t)p);
    for (int r = 0; r < world_size; r++) {
        const seen *s = &stage_shared->rank[r];
        if (p->waits && r != p->odd) continue;
        if (ranks_joins(mode) && !s->done) continue; /* another process */
        seen_here++;
        EXPECT(s->done && s->first != DDP_OK, "rank %d: %s", r, ddp_result_name(s->first));
        expect_only(r, s->text, p->what->name, p->what->also, "ddp_barrier");
        expect_only(r, s->text2, p->what->name, p->what->also, "ddp_barrier");
        const char *own = r == p->odd ? p->what->name : "ddp_barrier";
        if (p->what->also && r == p->odd && says(s->text, p->what->also)) own = p->what->also;
        int is_status = r == p->odd && says(p->what->name, "_destroy");
        snprintf(begin, sizeof begin, "rank %d/%d %s", r, world_size, is_status ? "group=" : own);
        EXPECT(strstr(s->text, begin) == s->text, "rank %d's line does not begin with '%s': '%s'", r, begin,
               s->text);
        if (p->waits) continue;
        EXPECT(says(s->text, p->what->name) || (p->what->also && says(s->text, p->what->also)),
               "rank %d does not name %s: '%s'", r, p->what->name, s->text);
        EXPECT(says(s->text, "ddp_barrier"), "rank %d does not name ddp_barrier: '%s'", r, s->text);
        if (getenv("DDP_TEST_SHOW"))
            printf("%s\n   rank %d: %s\n   next:   %s\n", scenario, r, s->text, s->text2);
    }
    EXPECT(seen_here, "no rank has noted anything");
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    const char *only = argc > 2 ? argv[2] : "";
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) return 2;
    faults_start(250);
    /* A world that has failed: one call of each process. */
    for (int i = 0; i < CALLS && ranks_joins(mode); i++) {
        plan p = {&calls[i], 1, 0, mode};
        if (strcmp(calls[i].name, only) == 0) run(mode, 2, &p, 20000);
    }
#if defined(DDP_USE_MPI)
    /* after a failure the library leaves that out, which mpirun treats as one */
    if (ranks_joins(mode)) MPI_Finalize();
#endif
    if (ranks_joins(mode)) return faults_end();
    for (int i = 0; i < CALLS; i++) {
        if (!says(calls[i].name, only)) continue;
        /* Over tcp group memory is private to each rank, and calls that only free it send nothing. */
        if (mode == RANKS_TCP && (says(calls[i].name, "_free") || says(calls[i].name, "_destroy"))) continue;
        for (int odd = 0; odd < 2; odd++) {
            plan p = {&calls[i], odd, 0, mode};
            run(mode, 2, &p, 20000);
        }
    }
    if (says(calls[0].name, only)) { /* the others are missing */
        plan p = {&calls[0], 1, 1, mode};
        run(mode, 2, &p, RUN_INTO_MS / 4);
    }
    return faults_end();
}

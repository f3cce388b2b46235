/*  test_alone.c - one rank fails inside a call that all ranks make: all of them return, at once and with its
    cause.

    test_alone [processes|threads|tcp|tcp_threads|mpi ...]

    ddp_group_split, ddp_mesh_create and ddp_reducer_create, with each of rank 1's allocations failing in
    turn. A mesh with each field of its desc wrong. A batch of messages and an asynchronous collective for
    which rank 1 has no memory. In earlier versions the other ranks waited for the timeout. After
    ddp_reducer_create they returned DDP_ERR_POISONED without a cause. */
#include "../../ddp.h"
#include "../support/fail_alloc.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#define ODD 1 /* the rank that fails */
#define SECONDS (10.0 * DDP_TEST_SLOWDOWN)
#define TIMEOUT_MS 60000

/* All ranks have the same outcome: DDP_OK, or result with a text that names the odd rank. */
static ddp_result look(ddp_group *world, const char *what, int n, ddp_result got, ddp_result wanted,
                       double start) {
    char name[16];
    snprintf(name, sizeof name, "rank %d", ODD);
    RANKS_CHECK(world, ddp_now() - start < SECONDS, "%s %d took %.1f s", what, n, ddp_now() - start);
    RANKS_CHECK(world, got == wanted, "%s %d gives %s: %s", what, n, ddp_result_name(got), ddp_last_error());
    if (wanted != DDP_OK)
        RANKS_CHECK(world, strstr(ddp_last_error(), name) && strstr(ddp_last_error(), what), "%s %d: %s",
                    what, n, ddp_last_error());
    return DDP_OK;
}

enum { SPLIT, MESH, REDUCER, WRONG_FIELD, MESSAGES, ASYNCHRONOUS, CASES };

/* The objects of the first three cases. */
typedef struct made {
    ddp_group *group;
    ddp_mesh *grid;
    ddp_reducer *reducer;
    ddp_param param;
    float value[3], grad[3];
} made;

static ddp_result make_reducer(ddp_group *world, made *m) {
    ddp_reducer_desc desc = DDP_ZERO;
    m->param.name = "weight";
    m->param.value.data = m->value;
    m->param.value.dtype = DDP_F32;
    m->param.value.ndim = 1;
    m->param.value.shape[0] = 3;
    m->param.grad.data = m->grad;
    desc.params = &m->param;
    desc.param_count = 1;
    return ddp_reducer_create(&m->reducer, world, &desc);
}

static ddp_result make(ddp_group *world, int what, made *m) {
    ddp_mesh_desc desc = DDP_ZERO;
    memset(m, 0, sizeof *m);
    if (what == REDUCER) return make_reducer(world, m);
    desc.ndim = 2;
    desc.names[0] = "dp";
    desc.shape[0] = 0;
    desc.names[1] = "tp";
    desc.shape[1] = 1;
    return what == MESH ? ddp_mesh_create(&m->grid, world, &desc) : ddp_group_split(world, 0, 0, &m->group);
}

/* Each allocation of the odd rank fails in turn, until none does. */
static ddp_result without_memory(ddp_group *world, int made_case) {
    static const char *const texts[] = {"ddp_group_split", "ddp_mesh_create", "could not be allocated"};
    const char *what = texts[made_case];
    int mesh = made_case == MESH;
    int odd = ddp_rank(world) == ODD, more = 1;
    for (int n = 1; more; n++) {
        made m;
        double start = ddp_now();
        fail_at = odd ? n : 0;
        failed = 0;
        ddp_result got = make(world, made_case, &m), wanted;
        char text[512];
        snprintf(text, sizeof text, "%s", ddp_last_error());
        fail_at = 0;
        more = failed;
        RANKS_OK(world, ddp_all_reduce(world, &more, &more, 1, DDP_I32, DDP_OP_MAX,
                                       NULL)); /* the group still works */
        wanted = more ? DDP_ERR_NO_MEMORY : DDP_OK;
        if (got == wanted || !more) {
            ddp_fail(got, "%s", text);
            RANKS_OK(world,
                     look(world, mesh && more && strstr(text, "ddp_group_split") ? "ddp_group_split" : what,
                          n, got, wanted, start));
        } else
            RANKS_CHECK(world, got == wanted, "%s %d: %s: %s", what, n, ddp_result_name(got), text);
        RANKS_CHECK(world, !more == (m.group || m.grid || m.reducer), "%s %d: something was made", what, n);
        ddp_group_destroy(m.group);
        ddp_mesh_destroy(m.grid);
        ddp_reducer_destroy(m.reducer);
    }
    return DDP_OK;
}

/* The odd rank's desc has one wrong field. */
static ddp_result wrong_field(ddp_group *world) {
    int odd = ddp_rank(world) == ODD;
    for (int field = 0; field < 7; field++) {
        ddp_mesh_desc desc = DDP_ZERO;
        ddp_mesh *grid = NULL;
        double start = ddp_now();
        desc.ndim = 2;
        desc.names[0] = "dp";
        desc.names[1] = "tp";
        desc.shape[1] = 1;
        if (odd && field == 0) desc.ndim = 0;
        if (odd && field == 1) desc.ndim = 1000;
        if (odd && field == 2) desc.names[1] = NULL;
        if (odd && field == 3) desc.names[1] = "dp";
        if (odd && field == 4) desc.shape[1] = -1;
        if (odd && field == 5) desc.shape[1] = 1000;
        if (odd && field == 6) desc.names[1] = "other";
        RANKS_OK(world, look(world, "ddp_mesh_create", field, ddp_mesh_create(&grid, world, &desc),
                             field < 6 ? DDP_ERR_INVALID : DDP_ERR_MISMATCH, start));
        RANKS_CHECK(world, !grid, "field %d: a mesh", field);
    }
    return ddp_barrier(world);
}

/* A ring of messages in a batch; the odd rank has no memory for its second one. The group fails on all
   ranks. */
static ddp_result messages(ddp_group *world) {
    int w = ddp_world_size(world), next = (ddp_rank(world) + 1) % w, before = (ddp_rank(world) + w - 1) % w;
    float in[4] = {0}, out[4];
    double start;
    ddp_result result, end;
    RANKS_OK(world, ddp_barrier(world));
    start = ddp_now();
    RANKS_OK(world, ddp_p2p_begin(world));
    result = ddp_send(world, in, 4, DDP_F32, next, 0, NULL);
    fail_at = ddp_rank(world) == ODD ? 1 : 0;
    if (result == DDP_OK) result = ddp_recv(world, out, 4, DDP_F32, before, 0, NULL);
    fail_at = 0;
    end = ddp_p2p_end(world);
    if (result == DDP_OK) result = end;
    if (result == DDP_OK) /* A ring of small messages can complete without the odd rank's receive. */
        result = ddp_barrier(world);
    RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY || result == DDP_ERR_POISONED, "%s: %s",
                ddp_result_name(result), ddp_last_error());
    RANKS_CHECK(world, strstr(ddp_last_error(), "memory could not be allocated"), "%s", ddp_last_error());
    RANKS_CHECK(world,
                ddp_rank(world) == ODD || strstr(ddp_last_error(), "cause: rank 1 in ddp_recv tag=0: "), "%s",
                ddp_last_error());
    RANKS_CHECK(world, ddp_now() - start < SECONDS, "it took %.1f s", ddp_now() - start);
    return DDP_ERR_NO_MEMORY;
}

/* The odd rank has no memory for the handle of an asynchronous collective and makes no other call. The group
   fails on all ranks, as if the collective had begun. */
static ddp_result asynchronous(ddp_group *world) {
    float in[4] = {0}, out[4];
    ddp_work work = DDP_ZERO;
    double start;
    ddp_result result, end;
    RANKS_OK(world, ddp_barrier(world));
    start = ddp_now();
    fail_at = ddp_rank(world) == ODD ? 1 : 0;
    result = ddp_all_reduce(world, in, out, 4, DDP_F32, DDP_OP_SUM, &work);
    fail_at = 0;
    if (ddp_rank(world) == ODD)
        RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY && strstr(ddp_last_error(), "ddp_all_reduce"),
                    "%s: %s", ddp_result_name(result), ddp_last_error());
    if (ddp_rank(world) == ODD) ranks_sleep_us(200000); /* the others must not wait for its next call */
    end = ddp_wait(world, &work);
    if (result == DDP_OK) result = end;
    RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY, "%s: %s", ddp_result_name(result), ddp_last_error());
    RANKS_CHECK(world, strstr(ddp_last_error(), "rank 1 in ddp_all_reduce: "), "%s", ddp_last_error());
    RANKS_CHECK(world, ddp_group_status(world) == DDP_ERR_NO_MEMORY, "%s", ddp_last_error());
    RANKS_CHECK(world, ddp_now() - start < SECONDS, "it took %.1f s", ddp_now() - start);
    return DDP_ERR_NO_MEMORY;
}

typedef struct plan {
    int what;
} plan;
static ddp_result run(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    if (p->what == WRONG_FIELD) return wrong_field(world);
    if (p->what == MESSAGES) return messages(world);
    if (p->what == ASYNCHRONOUS) return asynchronous(world);
    return without_memory(world, p->what);
}

int main(int argc, char **argv) {
    static const char *const names[CASES] = {"split without memory",   "mesh without memory",
                                             "reducer without memory", "a wrong field",
                                             "a batch without memory", "a collective without memory"};
    ranks_mode mode = RANKS_PROCESSES;
    int failures = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    watchdog_start(150);
    ranks_memory.alloc_fn = fail_alloc;
    ranks_memory.free_fn = fail_free;
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) return 2;
    for (int what = 0; what < CASES; what++) {
        plan p = {what};
        int fails = what >= MESSAGES;
        if (what == MESSAGES && strstr(ranks_mode_name(mode), "tcp")) continue; /* tcp has no messages */
        if (fails && strstr(ranks_mode_name(mode), "mpi"))
            continue; /* for mpirun, a program with a failed MPI world ends abnormally */
        ddp_result result = ranks_run(mode, 3, TIMEOUT_MS, run, &p);
        int good = result == (fails ? DDP_ERR_NO_MEMORY : DDP_OK);
        printf("%-28s %s\n", names[what], good ? "ok" : ddp_last_error());
        failures += !good;
    }
    return failures != 0;
}

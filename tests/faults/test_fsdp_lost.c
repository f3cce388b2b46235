/*  test_fsdp_lost.c - a rank that dies or leaves in the middle of a step becomes an error that names it on
    all others, in time, in any wait.

    test_fsdp_lost [processes|threads]

    The others meanwhile gather (in place, or over a wire), reduce, or step, with replicas in a second group.
    After the error no rank returns values that had not arrived. Also: a model that does not fit into memory,
    except in shards, is an error on every rank. */
#include "ddp_fsdp.h"
#include "../support/ranks.h"
#include "../support/relay.h"

#include <sys/resource.h>

enum {
    W = 4,
    UNITS = 3,
    LEAVE_AT = 17,
    TIMEOUT_MS = 600000 /* a rank that waited that long would fail the test, or the watchdog would */
};

/* how: 0 kill, 1 exit, 2 destroys its objects; at: after this many calls. */
typedef struct plan {
    int how, at, packed, replicas;
    ddp_fsdp_strategy strategy;
} plan;
typedef struct seen {
    int done, pid;
    ddp_result result;
    char text[512];
} seen;
static seen *all;

static void leave(const plan *p) {
    if (p->how == 0) kill(getpid(), SIGKILL);
    if (p->how == 1) exit(3);
}

static ddp_result call(ddp_fsdp *fsdp, int number) {
    int u = number % (3 * UNITS + 1) / 3, k = number % (3 * UNITS + 1) % 3;
    if (u == UNITS) return ddp_fsdp_step(fsdp, 0.1f);
    return k == 0   ? ddp_fsdp_unshard(fsdp, u)
           : k == 1 ? ddp_fsdp_reduce_grads(fsdp, u)
                    : ddp_fsdp_reshard(fsdp, u);
}

static ddp_result ones(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                       void *user) {
    (void)first_row;
    (void)user;
    for (int64_t i = 0; i < row_count * param->param.value.shape[1]; i++) ((float *)out)[i] = 1;
    return DDP_OK;
}

static ddp_result survive(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    static const char *const names[UNITS] = {"a", "b", "c"};
    ddp_fsdp_param params[UNITS];
    ddp_fsdp_unit_desc units[UNITS];
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_group *part = world, *copies = NULL, *far = NULL;
    ddp_fsdp *fsdp;
    ddp_result result = DDP_OK;
    int rank = ddp_rank(world), inner = W / p->replicas, victim = rank == 1;
    seen *mine = &all[rank];
    memset(params, 0, sizeof params);
    memset(units, 0, sizeof units);
    for (int u = 0; u < UNITS; u++) {
        params[u].param.name = names[u];
        params[u].param.value.dtype = DDP_F32;
        params[u].param.value.ndim = 2;
        params[u].param.value.shape[0] = 8;
        params[u].param.value.shape[1] = 3;
        units[u].params = &params[u];
        units[u].param_count = 1;
    }
    mine->pid = getpid();
    if (p->replicas > 1) RANKS_OK(world, ddp_group_split(world, rank / inner, rank, &part));
    if (p->replicas > 1) RANKS_OK(world, ddp_group_split(world, rank % inner, rank, &copies));
    if (p->packed) RANKS_OK(world, relay_over(&far, part));
    desc.units = units;
    desc.unit_count = UNITS;
    desc.init_fn = ones;
    desc.strategy = p->strategy;
    desc.replicas = copies;
    RANKS_OK(world, ddp_fsdp_create(&fsdp, far ? far : part, &desc));
    for (int i = 0; result == DDP_OK && i < 1000; i++) {
        if (victim && i == p->at) {
            leave(p);
            break;
        }
        result = call(fsdp, i);
    }
    if (!victim) {
        int again = 0;
        mine->result = result;
        snprintf(mine->text, sizeof mine->text, "%s", ddp_last_error());
        for (int u = 0; u < UNITS && far; u++) { /* no rank sends any more */
            if (ddp_fsdp_unshard(fsdp, u) != DDP_OK) continue;
            for (int i = 0; i < 24; i++)
                again |= ((float *)params[u].param.value.data)[i] != ((float *)params[u].param.value.data)[0];
        }
        mine->done = again ? 2 : 1;
    }
    ddp_fsdp_destroy(fsdp);
    ddp_group_destroy(far);
    ddp_group_destroy(copies);
    if (part != world) ddp_group_destroy(part);
    return DDP_OK;
}

static int failures, runs;

static void run(ranks_mode mode, plan p) {
    char who[32];
    memset(all, 0, W * sizeof *all);
    runs++;
    ranks_run(mode, W, TIMEOUT_MS, survive, &p);
    snprintf(who, sizeof who, "rank 1 (pid %d)", all[1].pid);
    for (int r = 0; r < W; r++) {
        const seen *s = &all[r];
        int named = strstr(s->text, "rank 1") || strstr(s->text, who) || p.replicas > 1;
        if (r == 1
            || (s->done == 1
                && (s->result == DDP_ERR_PEER_LOST || s->result == DDP_ERR_POISONED
                    || (p.how == 2 && s->result == DDP_ERR_MISMATCH))
                && named))
            continue;
        fprintf(stderr, "FAIL %s how=%d at=%d packed=%d replicas=%d strategy=%d: rank %d: done=%d %s: %s\n",
                ranks_mode_name(mode), p.how, p.at, p.packed, p.replicas, (int)p.strategy, r, s->done,
                ddp_result_name(s->result), s->text);
        failures++;
    }
}

//== memory that has no room ================================================================

enum { SIDE = 1024, BLOCKS = 6 }; /* 24 MiB of values: 96 MiB whole, 24 MiB and slots in shards of 4 */

typedef struct room {
    ddp_fsdp_strategy strategy;
    int offload;
    size_t bytes, file_bytes;
} room;

static ddp_result fit(ddp_group *world, void *user) {
    const room *o = (const room *)user;
    static const char *const names[BLOCKS] = {"a", "b", "c", "d", "e", "f"};
    ddp_fsdp_param params[BLOCKS];
    ddp_fsdp_unit_desc units[BLOCKS];
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp;
    ddp_result result;
    struct rlimit limit;
    seen *mine = &all[ddp_rank(world)];
    long pages = 0, unused = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    memset(params, 0, sizeof params);
    memset(units, 0, sizeof units);
    for (int u = 0; u < BLOCKS; u++) {
        params[u].param.name = names[u];
        params[u].param.value.dtype = DDP_F32;
        params[u].param.value.ndim = 2;
        params[u].param.value.shape[0] = params[u].param.value.shape[1] = SIDE;
        units[u].params = &params[u];
        units[u].param_count = 1;
    }
    RANKS_CHECK(
        world,
        file
            && fscanf(file, "%ld %ld %ld %ld %ld %ld", &unused, &unused, &unused, &unused, &unused, &pages)
                   == 6,
        "statm");
    fclose(file);
    /* Private memory: data, stacks, and the mappings of malloc. */
    limit.rlim_cur = limit.rlim_max = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + o->bytes;
    RANKS_CHECK(world, setrlimit(RLIMIT_DATA, &limit) == 0, "setrlimit");
    limit.rlim_cur = limit.rlim_max = o->file_bytes;
    RANKS_CHECK(world, !o->file_bytes || setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
    desc.units = units;
    desc.unit_count = BLOCKS;
    desc.init_fn = ones;
    desc.strategy = o->strategy;
    desc.overwrite_gradients = 1;
    desc.offload = o->offload ? DDP_FSDP_OFFLOAD_FILE : DDP_FSDP_OFFLOAD_NONE;
    desc.offload_dir = "/tmp";
    result = ddp_fsdp_create(&fsdp, world, &desc);
    for (int i = 0; i < 2 * (3 * BLOCKS + 1) && result == DDP_OK; i++) {
        int u = i % (3 * BLOCKS + 1) / 3, k = i % (3 * BLOCKS + 1) % 3;
        if (u == BLOCKS)
            result = ddp_fsdp_step(fsdp, 0.1f);
        else
            result = k == 0   ? ddp_fsdp_unshard(fsdp, u)
                     : k == 1 ? ddp_fsdp_reduce_grads(fsdp, u)
                              : ddp_fsdp_reshard(fsdp, u);
    }
    mine->result = result;
    snprintf(mine->text, sizeof mine->text, "%s", ddp_last_error());
    mine->done = 1;
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

static void run_room(int world, room o, int fits) {
    memset(all, 0, W * sizeof *all);
    runs++;
    ranks_run(RANKS_PROCESSES, world, TIMEOUT_MS, fit, &o);
    for (int r = 0; r < world; r++) {
        const seen *s = &all[r];
        if (s->done && fits && s->result == DDP_OK) continue;
        if (s->done && !fits && !o.file_bytes && s->result == DDP_ERR_NO_MEMORY
            && strstr(s->text, "could not be allocated") && strstr(s->text, "ddp_"))
            continue;
        if (s->done && !fits && o.file_bytes && s->result == DDP_ERR_SYSTEM
            && strstr(s->text, "offload_dir=/tmp"))
            continue;
        fprintf(stderr, "FAIL strategy=%d offload=%d in %zu bytes: rank %d: done=%d %s: %s\n",
                (int)o.strategy, o.offload, o.bytes, r, s->done, ddp_result_name(s->result), s->text);
        failures++;
    }
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    all = (seen *)ranks_shared(W * sizeof *all);
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) return 2;
    watchdog_start(120);
    for (int at = 0, turn = 0; at <= LEAVE_AT; at += mode == RANKS_THREADS ? 3 : 2, turn++) {
        plan p;
        memset(&p, 0, sizeof p);
        p.how = mode == RANKS_THREADS ? 2 : turn % 3;
        p.at = at;
        p.strategy = (ddp_fsdp_strategy)(turn % 4 == 3 ? 1 + turn / 4 : 0);
        for (int way = 0; way < 4; way++) {
            p.packed = way & 1;
            p.replicas = way & 2 ? 2 : 1;
            run(mode, p);
        }
    }
    if (mode == RANKS_PROCESSES && strcmp(DDP_TEST_FLAVOUR, "asan")) {
        static const room shards = {DDP_FSDP_FULL_SHARD, 0, (size_t)40 << 20, 0},
                          whole = {DDP_FSDP_NO_SHARD, 0, (size_t)40 << 20, 0},
                          file = {DDP_FSDP_FULL_SHARD, 1, (size_t)36 << 20, 0},
                          memory = {DDP_FSDP_FULL_SHARD, 0, (size_t)36 << 20, 0},
                          no_values = {DDP_FSDP_FULL_SHARD, 1, (size_t)200 << 20, 5000000},
                          no_moments = {DDP_FSDP_FULL_SHARD, 1, (size_t)200 << 20, 20000000};
        run_room(W, shards, 1);
        run_room(W, whole, 0);
        run_room(2, file, 1);
        run_room(2, memory, 0);
        run_room(2, no_values, 0);
        run_room(2, no_moments, 0);
    }
    printf("%d runs, %d failures\n", runs, failures);
    return failures != 0;
}

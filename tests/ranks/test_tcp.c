/*  test_tcp.c - a group over TCP gives what the local backend gives, bit for bit, and finds shared memory where there is some.

    test_tcp processes|threads [W ...]

    Each rank of a local world also joins a world over TCP, as if every rank, or some of them, were on a machine of its own, and makes
    each call on both. */
static __thread int machine_salt; /* ranks with different ones do not share a machine */
#define DDP__MACHINE_SALT machine_salt
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#include "../support/ranks.h"

enum { MOST = 700 };

typedef struct rig {
    ddp_group *local, *tcp;
    unsigned char *send, *want, *have;
    long ran;
} rig;

/* A port that is free now; the same on all ranks. */
static int some_port(ddp_group *world) {
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    int32_t port = 0;
    if (ddp_rank(world) == 0) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        memset(&address, 0, sizeof address);
        address.sin_family = AF_INET;
        if (bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && getsockname(fd, (struct sockaddr *)&address, &size) == 0) port = ntohs(address.sin_port);
        close(fd);
    }
    return ddp_broadcast(world, &port, 1, DDP_I32, 0, NULL) == DDP_OK ? port : 0;
}

/* Joins over TCP; salt: this rank's machine. */
static ddp_result join(ddp_group *world, const char *host, int salt, ddp_group **out) {
    ddp_group_desc desc = DDP_ZERO;
    char url[64];
    snprintf(url, sizeof url, "tcp://%s:%d", host, some_port(world));
    machine_salt = salt;
    desc.init_method = url;
    desc.rank = ddp_rank(world);
    desc.world_size = ddp_world_size(world);
    desc.timeout_ms = 60000 * DDP_TEST_SLOWDOWN;
    desc.name = "net";
    return ddp_group_create(out, &desc);
}

static ddp_result call_on(ddp_group *group, const ddp_call *c, const void *send, void *recv, ddp_work *work) {
    switch (c->kind) {
    case DDP_CALL_ALL_REDUCE: return ddp_all_reduce(group, send, recv, c->count, c->dtype, c->op, work);
    case DDP_CALL_REDUCE: return ddp_reduce(group, send, recv, c->count, c->dtype, c->op, c->root, work);
    case DDP_CALL_BROADCAST: return ddp_broadcast(group, recv, c->count, c->dtype, c->root, work);
    case DDP_CALL_ALL_GATHER: return ddp_all_gather(group, send, recv, c->count, c->dtype, work);
    case DDP_CALL_REDUCE_SCATTER: return ddp_reduce_scatter(group, send, recv, c->count, c->dtype, c->op, work);
    case DDP_CALL_ALL_TO_ALL: return ddp_all_to_all(group, send, recv, c->count, c->dtype, work);
    case DDP_CALL_GATHER: return ddp_gather(group, send, recv, c->count, c->dtype, c->root, work);
    case DDP_CALL_SCATTER: return ddp_scatter(group, send, recv, c->count, c->dtype, c->root, work);
    default: return ddp_barrier(group);
    }
}

static ddp_result compare(rig *g, ddp_call *c, int async) {
    size_t bytes = MOST * 8 * (size_t)ddp_world_size(g->local);
    int me = ddp_rank(g->local);
    ranks_data data;
    ddp_work work;
    long differs;
    data.dtype = c->dtype;
    data.seed = (uint64_t)g->ran;
    data.specials = g->ran % 3 == 0;
    ranks_fill(g->send, &data, me, 0, bytes / 8);
    memset(g->want, 0x5a, bytes);
    ranks_fill(g->want, &data, me, 0, c->kind == DDP_CALL_BROADCAST ? c->count : 0);
    memcpy(g->have, g->want, bytes);
    RANKS_OK(g->local, call_on(g->local, c, g->send, g->want, NULL));
    RANKS_OK(g->local, call_on(g->tcp, c, g->send, g->have, async ? &work : NULL));
    if (async && c->kind != DDP_CALL_BARRIER) RANKS_OK(g->local, ddp_wait(g->tcp, &work));
    differs = ranks_compare(g->have, g->want, bytes / ranks_dtype_size(c->dtype), c->dtype, 0, NULL); /* any NaN is as good as another */
    RANKS_CHECK(g->local, differs < 0, "%s %s op=%d count=%zu root=%d: element %ld", ddp_call_name(c->kind), ddp_dtype_name(c->dtype), (int)c->op, c->count,
                c->root, differs);
    g->ran++;
    return DDP_OK;
}

static ddp_result same_bits(rig *g, int few) {
    static const size_t counts[] = {0, 1, 5, 64, 129};
    long number = 0;
    for (int kind = DDP_CALL_ALL_REDUCE; kind <= DDP_CALL_BARRIER; kind++) {
        if (kind == DDP_CALL_ALL_GATHER_V || kind == DDP_CALL_ALL_TO_ALL_V) continue;
        for (int dtype = DDP_F32; dtype <= DDP_U64; dtype++)
            for (int op = DDP_OP_SUM; op <= (ddp__has_op((ddp_call_kind)kind) ? DDP_OP_PROD : DDP_OP_SUM); op++)
                for (int n = 0; n < 5; n++) {
                    ddp_call c = ddp__call_of((ddp_call_kind)kind, NULL, NULL, counts[n], (ddp_dtype)dtype);
                    ddp_result result;
                    if (++number % few) continue;
                    c.op = (ddp_op)op;
                    c.root = (n + dtype) % ddp_world_size(g->local);
                    result = compare(g, &c, (n + op) % 2);
                    if (result != DDP_OK) return result;
                }
    }
    return DDP_OK;
}

/* What a small group would do in place, and what it cannot do. */
static ddp_result limits(rig *g) {
    int w = ddp_world_size(g->local), me = ddp_rank(g->local);
    float *large = (float *)calloc(65536, sizeof *large), one[2];
    size_t counts[64] = {0};
    void *memory;
    ddp_result result;
    for (int i = 0; i < 65536; i++) large[i] = (float)(i + me);
    RANKS_OK(g->local, ddp_all_reduce(g->tcp, large, large, 16384, DDP_F32, DDP_OP_MAX, NULL)); /* 64 KiB exactly, in place */
    for (int i = 0; i < 16384; i++) RANKS_CHECK(g->local, large[i] == (float)(i + w - 1), "element %d is %g", i, large[i]);
    result = ddp_all_reduce(g->tcp, large, large, 16385, DDP_F32, DDP_OP_MAX, NULL);
    RANKS_CHECK(g->local, result == DDP_ERR_UNSUPPORTED && strstr(ddp_last_error(), "64 KiB") && strstr(ddp_last_error(), "DDP_USE_MPI"), "%s", ddp_last_error());
    result = ddp_broadcast(g->tcp, large, 65536, DDP_F32, w - 1, NULL); /* too much on one rank only: everybody learns of it */
    RANKS_CHECK(g->local, result == DDP_ERR_UNSUPPORTED, "%s", ddp_result_name(result));
    result = ddp_all_gather_v(g->tcp, large, 0, large, counts, NULL, DDP_F32, NULL);
    RANKS_CHECK(g->local, result == DDP_ERR_UNSUPPORTED && strstr(ddp_last_error(), "counts"), "%s", ddp_last_error());
    result = me == 0 ? ddp_send(g->tcp, one, 1, DDP_F32, 1, 0, NULL) : me == 1 ? ddp_recv(g->tcp, one, 1, DDP_F32, 0, 0, NULL) : DDP_ERR_UNSUPPORTED;
    RANKS_CHECK(g->local, result == DDP_ERR_UNSUPPORTED, "%s", ddp_result_name(result));
    RANKS_OK(g->local, ddp_group_status(g->tcp)); /* none of this breaks the group */
    RANKS_OK(g->local, ddp_group_alloc(g->tcp, 4096, &memory));
    memset(memory, me, 4096);
    RANKS_OK(g->local, ddp_broadcast(g->tcp, memory, 4096, DDP_U8, 0, NULL));
    RANKS_CHECK(g->local, ((unsigned char *)memory)[4095] == 0, "%d", ((unsigned char *)memory)[4095]);
    RANKS_OK(g->local, ddp_group_free(g->tcp, memory));
    free(large);
    return ddp_barrier(g->tcp);
}

/* Splits a group whose ranks lie on machines of `per` ranks each. */
static ddp_result splits(ddp_group *world, ddp_group *tcp, int per) {
    static const char *const want[2][4] = {{"self", "local", "tcp", "tcp"}, {"self", "tcp", "tcp", "tcp"}};
    int w = ddp_world_size(world), me = ddp_rank(world);
    for (int way = 0; way < 4; way++) {
        /* alone; the ranks of a machine; every other rank, backwards; all but rank 0 */
        int color = way == 0 ? me : way == 1 ? me / 2 : way == 2 ? me % 2 : me == 0 ? -1 : 7, size = 0, key = way == 2 ? -me : me;
        int64_t sum = me, expect = 0, one = 1;
        ddp_group *part = NULL, *again = NULL;
        for (int r = 0; r < w; r++)
            if ((way == 0 ? r : way == 1 ? r / 2 : way == 2 ? r % 2 : r == 0 ? -1 : 7) == color) { size++; expect += r; }
        RANKS_OK(world, ddp_group_split(tcp, color, key, &part));
        RANKS_CHECK(world, (part != NULL) == (color >= 0), "way %d", way);
        if (!part) continue;
        RANKS_CHECK(world, ddp_world_size(part) == size, "way %d: %d of %d", way, ddp_world_size(part), size);
        RANKS_CHECK(world, strcmp(part->backend->name, size == 1 ? "self" : want[per == 1][way]) == 0, "way %d per %d: %s", way, per, part->backend->name);
        RANKS_OK(world, ddp_all_reduce(part, &sum, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
        RANKS_CHECK(world, sum == expect, "way %d: %lld, not %lld", way, (long long)sum, (long long)expect);
        RANKS_OK(world, ddp_group_split(part, 0, 0, &again)); /* and once more */
        RANKS_OK(world, ddp_all_reduce(again, &one, &one, 1, DDP_I64, DDP_OP_SUM, NULL));
        RANKS_CHECK(world, one == size, "way %d: %lld of %d", way, (long long)one, size);
        ddp_group_destroy(again);
        ddp_group_destroy(part);
    }
    return DDP_OK;
}

/* Rank 0 calls it off while the others wait in work, and look at the group's state meanwhile. */
static ddp_result aborted(ddp_group *world) {
    int me = ddp_rank(world), done = 0;
    ddp_group *tcp = NULL;
    ddp_work work = DDP_ZERO;
    float x = 1;
    RANKS_OK(world, join(world, "127.0.0.1", me + 1, &tcp));
    if (me == 0) RANKS_OK(world, ddp_group_abort(tcp));
    else RANKS_OK(world, ddp_all_reduce(tcp, &x, &x, 1, DDP_F32, DDP_OP_SUM, &work));
    while (me != 0 && !done) {
        (void)!ddp_group_status(tcp);
        RANKS_OK(world, ddp_test(tcp, &work, &done));
    }
    RANKS_CHECK(world, me == 0 || ddp_wait(tcp, &work) == DDP_ERR_POISONED, "%s", ddp_last_error());
    RANKS_CHECK(world, ddp_barrier(tcp) == DDP_ERR_POISONED && strstr(ddp_last_error(), "rank 0 (pid ") && strstr(ddp_last_error(), "called ddp_group_abort"), "%s",
                ddp_last_error());
    RANKS_OK(world, ddp_barrier(world));
    ddp_group_destroy(tcp);
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int w = ddp_world_size(world), me = ddp_rank(world), few = w > 8 ? 29 : *(ranks_mode *)user == RANKS_THREADS || DDP_TEST_SLOWDOWN > 1 ? 5 : 1;
    size_t bytes = MOST * 8 * (size_t)w;
    ddp_group *pairs = NULL, *here = NULL;
    rig g;
    memset(&g, 0, sizeof g);
    g.local = world;
    g.send = (unsigned char *)malloc(bytes);
    g.want = (unsigned char *)malloc(bytes);
    g.have = (unsigned char *)malloc(bytes);
    RANKS_OK(world, join(world, "127.0.0.1", me + 1, &g.tcp)); /* everybody alone */
    if (w > 1) {
        RANKS_CHECK(world, strcmp(g.tcp->backend->name, "tcp") == 0 && ddp_local_rank(g.tcp) == 0 && ddp_local_world_size(g.tcp) == 1, "%s %d/%d", g.tcp->backend->name,
                    ddp_local_rank(g.tcp), ddp_local_world_size(g.tcp));
        RANKS_RUN(world, same_bits(&g, few));
        RANKS_RUN(world, limits(&g));
        RANKS_RUN(world, splits(world, g.tcp, 1));
        RANKS_RUN(world, aborted(world));
        RANKS_OK(world, join(world, "localhost", me / 2 + 1, &pairs)); /* two and two */
        RANKS_CHECK(world, (w == 2) == (strcmp(pairs->backend->name, "local") == 0), "%s", pairs->backend->name);
        RANKS_CHECK(world, ddp_local_rank(pairs) == me % 2 && ddp_local_world_size(pairs) == (me == w - 1 && w % 2 ? 1 : 2), "%d/%d", ddp_local_rank(pairs),
                    ddp_local_world_size(pairs));
        if (w > 2) RANKS_RUN(world, splits(world, pairs, 2));
        ddp_group_destroy(pairs);
    }
    if (*(ranks_mode *)user == RANKS_PROCESSES) {
        RANKS_OK(world, join(world, "[::1]", 0, &here)); /* all together, and by IPv6 */
        RANKS_CHECK(world, strcmp(here->backend->name, w == 1 ? "self" : "local") == 0 && ddp_local_rank(here) == me && ddp_local_world_size(here) == w, "%s", here->backend->name);
        RANKS_OK(world, ddp_barrier(here));
        RANKS_OK(world, ddp_barrier(world));
        ddp_group_destroy(here);
    }
    ddp_group_destroy(g.tcp);
    free(g.send); free(g.want); free(g.have);
    if (me == 0) printf("ok: W=%d: %ld calls\n", w, g.ran);
    return ddp_barrier(world);
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 3, 5, 0};
    ranks_mode mode;
    setvbuf(stdout, NULL, _IOLBF, 0);
    return ranks_each(argc, argv, defaults, 110, &mode, rank_main) != 0;
}

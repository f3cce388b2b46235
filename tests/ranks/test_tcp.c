/*  test_tcp.c - properties that only a group over TCP has: its limits, and shared memory found by the group
    and its splits.

    test_tcp processes|threads [W ...]

    Each rank of a local world also joins a world over TCP, as if every rank, or some of them, were on a
    separate machine. The other files test the results of calls, also over TCP. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/ports.h"

/* Rank 0's port, on all ranks. */
static int some_port(ddp_group *world) {
    int32_t port = ddp_rank(world) == 0 ? some_ports(1) : 0;
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

/* Calls that a group over TCP supports only up to a size, and those that it does not support. */
static ddp_result limits(ddp_group *world, ddp_group *tcp) {
    int w = ddp_world_size(world), me = ddp_rank(world);
    float *large = (float *)calloc(65536, sizeof *large), one[2];
    size_t counts[64] = {0};
    void *memory;
    ddp_result result;
    for (int i = 0; i < 65536; i++) large[i] = (float)(i + me);
    /* 64 KiB exactly, in place. */
    RANKS_OK(world, ddp_all_reduce(tcp, large, large, 16384, DDP_F32, DDP_OP_MAX, NULL));
    for (int i = 0; i < 16384; i++)
        RANKS_CHECK(world, large[i] == (float)(i + w - 1), "element %d is %g", i, large[i]);
    result = ddp_all_reduce(tcp, large, large, 16385, DDP_F32, DDP_OP_MAX, NULL);
    RANKS_CHECK(world,
                result == DDP_ERR_UNSUPPORTED && strstr(ddp_last_error(), "64 KiB")
                    && strstr(ddp_last_error(), "DDP_USE_MPI"),
                "%s", ddp_last_error());
    /* Too large on one rank only: all ranks return the error. */
    result = ddp_broadcast(tcp, large, 65536, DDP_F32, w - 1, NULL);
    RANKS_CHECK(world, result == DDP_ERR_UNSUPPORTED, "%s", ddp_result_name(result));
    result = ddp_all_gather_v(tcp, large, 0, large, counts, NULL, DDP_F32, NULL);
    RANKS_CHECK(world, result == DDP_ERR_UNSUPPORTED && strstr(ddp_last_error(), "counts"), "%s",
                ddp_last_error());
    result = me == 0   ? ddp_send(tcp, one, 1, DDP_F32, 1, 0, NULL)
             : me == 1 ? ddp_recv(tcp, one, 1, DDP_F32, 0, 0, NULL)
                       : DDP_ERR_UNSUPPORTED;
    RANKS_CHECK(world, result == DDP_ERR_UNSUPPORTED, "%s", ddp_result_name(result));
    RANKS_OK(world, ddp_group_status(tcp)); /* none of this breaks the group */
    RANKS_OK(world, ddp_group_alloc(tcp, 4096, &memory));
    memset(memory, me, 4096);
    RANKS_OK(world, ddp_broadcast(tcp, memory, 4096, DDP_U8, 0, NULL));
    RANKS_CHECK(world, ((unsigned char *)memory)[4095] == 0, "%d", ((unsigned char *)memory)[4095]);
    RANKS_OK(world, ddp_group_free(tcp, memory));
    free(large);
    return ddp_barrier(tcp);
}

/* Splits a group with per ranks on each machine. */
static ddp_result splits(ddp_group *world, ddp_group *tcp, int per) {
    static const char *const want[2][4] = {{"self", "local", "tcp", "tcp"}, {"self", "tcp", "tcp", "tcp"}};
    int w = ddp_world_size(world), me = ddp_rank(world);
    for (int way = 0; way < 4; way++) {
        /* only this rank; the ranks of a machine; every other rank, in reverse; all except rank 0 */
        int color = way == 0   ? me
                    : way == 1 ? me / 2
                    : way == 2 ? me % 2
                    : me == 0  ? -1
                               : 7,
            size = 0, key = way == 2 ? -me : me;
        int64_t sum = me, expect = 0, one = 1;
        ddp_group *part = NULL, *again = NULL;
        for (int r = 0; r < w; r++)
            if ((way == 0 ? r : way == 1 ? r / 2 : way == 2 ? r % 2 : r == 0 ? -1 : 7) == color) {
                size++;
                expect += r;
            }
        RANKS_OK(world, ddp_group_split(tcp, color, key, &part));
        RANKS_CHECK(world, (part != NULL) == (color >= 0), "way %d", way);
        if (!part) continue;
        RANKS_CHECK(world, ddp_world_size(part) == size, "way %d: %d of %d", way, ddp_world_size(part), size);
        RANKS_CHECK(world, strcmp(inner.backend_name(part), size == 1 ? "self" : want[per == 1][way]) == 0,
                    "way %d per %d: %s", way, per, inner.backend_name(part));
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

/* Rank 0 aborts while the others wait for work, and query the group's status meanwhile. */
static ddp_result aborted(ddp_group *world) {
    int me = ddp_rank(world), done = 0;
    ddp_group *tcp = NULL;
    ddp_work work = DDP_ZERO;
    float x = 1;
    RANKS_OK(world, join(world, "127.0.0.1", me + 1, &tcp));
    if (me == 0)
        RANKS_OK(world, ddp_group_abort(tcp));
    else
        RANKS_OK(world, ddp_all_reduce(tcp, &x, &x, 1, DDP_F32, DDP_OP_SUM, &work));
    while (me != 0 && !done) {
        (void)!ddp_group_status(tcp);
        RANKS_OK(world, ddp_test(tcp, &work, &done));
    }
    RANKS_CHECK(world, me == 0 || ddp_wait(tcp, &work) == DDP_ERR_POISONED, "%s", ddp_last_error());
    RANKS_CHECK(world,
                ddp_barrier(tcp) == DDP_ERR_POISONED && strstr(ddp_last_error(), "rank 0 (pid ")
                    && strstr(ddp_last_error(), "called ddp_group_abort"),
                "%s", ddp_last_error());
    RANKS_OK(world, ddp_barrier(world));
    ddp_group_destroy(tcp);
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int w = ddp_world_size(world), me = ddp_rank(world);
    ddp_group *tcp = NULL, *pairs = NULL, *here = NULL;
    RANKS_OK(world, join(world, "127.0.0.1", me + 1, &tcp)); /* every rank by itself */
    if (w > 1) {
        RANKS_CHECK(world,
                    strcmp(inner.backend_name(tcp), "tcp") == 0 && ddp_local_rank(tcp) == 0
                        && ddp_local_world_size(tcp) == 1,
                    "%s %d/%d", inner.backend_name(tcp), ddp_local_rank(tcp), ddp_local_world_size(tcp));
        RANKS_RUN(world, limits(world, tcp));
        RANKS_RUN(world, splits(world, tcp, 1));
        RANKS_RUN(world, aborted(world));
        RANKS_OK(world, join(world, "localhost", me / 2 + 1, &pairs)); /* two and two */
        RANKS_CHECK(world, (w == 2) == (strcmp(inner.backend_name(pairs), "local") == 0), "%s",
                    inner.backend_name(pairs));
        RANKS_CHECK(world,
                    ddp_local_rank(pairs) == me % 2
                        && ddp_local_world_size(pairs) == (me == w - 1 && w % 2 ? 1 : 2),
                    "%d/%d", ddp_local_rank(pairs), ddp_local_world_size(pairs));
        if (w > 2) RANKS_RUN(world, splits(world, pairs, 2));
        ddp_group_destroy(pairs);
    }
    if (*(ranks_mode *)user == RANKS_PROCESSES) {
        /* All together, also over IPv6 if available. */
        RANKS_OK(world, join(world, ports_have_ipv6() ? "[::1]" : "127.0.0.1", 0, &here));
        RANKS_CHECK(world,
                    strcmp(inner.backend_name(here), w == 1 ? "self" : "local") == 0
                        && ddp_local_rank(here) == me && ddp_local_world_size(here) == w,
                    "%s", inner.backend_name(here));
        RANKS_OK(world, ddp_barrier(here));
        RANKS_OK(world, ddp_barrier(world));
        ddp_group_destroy(here);
    }
    ddp_group_destroy(tcp);
    if (me == 0) printf("ok: W=%d\n", w);
    return ddp_barrier(world);
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 3, 5, 0};
    ranks_mode mode;
    setvbuf(stdout, NULL, _IOLBF, 0);
    return ranks_each(argc, argv, defaults, 110, &mode, rank_main) != 0;
}

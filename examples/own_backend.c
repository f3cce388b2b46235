/*  own_backend.c - a backend of your own: bytes travel through a file

        cc -O3 -march=native examples/own_backend.c -o own_backend -lm -lpthread
        ./own_backend               2 ranks
        ./own_backend 4             4 ranks
        mpirun --oversubscribe -n 4 ./own_backend 4    the ranks of a launcher

    A backend transports bytes. ddp.h does the rest: it checks arguments, queues asynchronous calls and
    reports errors. Collectives, the reducer, FSDP, tensors and pipelines run over any backend. To use a
    network of your own, replace put() and get(). The control group is an ordinary group of the same ranks. It
    carries failures, agreements and barriers.

        a collective   1 compare the call with that of the other ranks   2 put the data of each peer
                       3 barrier                                         4 get, and add in tree order

    This backend has no messages (p2p_start, p2p_poll): ddp_send returns DDP_ERR_UNSUPPORTED. It has no alloc
    either: group memory is private to each rank. ddp.h (>>spi) describes every function of the table. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct own {
    ddp_group *control;
    int owns_control; /* 1 = split created it */
    int rank, size;
    int file; /* the same file on every rank */
} own;

/* Fails the group on every rank, with the error line of this thread. */
static ddp_result failed(own *s, ddp_result result) {
    ddp_group_poison(s->control, result, ddp_last_error());
    return result;
}

/* The offset of the data that rank `from` sends to rank `to`. The file has holes of 4 GiB. */
static off_t place(const own *s, int from, int to) { return ((off_t)from * s->size + to) << 32; }

static ddp_result put(own *s, int to, const void *data, size_t size) {
    if (size == 0 || pwrite(s->file, data, size, place(s, s->rank, to)) == (ssize_t)size) return DDP_OK;
    return failed(s,
                  ddp_fail(DDP_ERR_ENGINE, "rank %d could not write %zu bytes to the file", s->rank, size));
}

static ddp_result get(own *s, int from, void *data, size_t size) {
    if (size == 0 || pread(s->file, data, size, place(s, from, s->rank)) == (ssize_t)size) return DDP_OK;
    return failed(s, ddp_fail(DDP_ERR_ENGINE, "rank %d could not read the data of rank %d", s->rank, from));
}

/* Checks that all ranks make the same call. When it returns, every rank has read the data of the call before.
   calls has an entry for each rank. */
static ddp_result begin(own *s, const ddp_call *call, uint64_t (*calls)[2]) {
    ddp_call_pack(call, calls[s->rank]);
    DDP_TRY(ddp_all_gather(s->control, calls[s->rank], calls, 2, DDP_U64, NULL));
    for (int r = 0; r < s->size; r++) {
        ddp_result result = ddp_call_compare(s->rank, calls[s->rank], r, calls[r]);
        if (result != DDP_OK) return failed(s, result);
    }
    return DDP_OK;
}

/* memory holds the packed calls, which are replaced by pointers to the sources of a sum, and these sources of
   size bytes each. */
static ddp_result execute(own *s, const ddp_call *call, char *memory, size_t size) {
    const char *send = (const char *)(call->kind == DDP_CALL_BROADCAST ? call->recv : call->send);
    const void **sources = (const void **)(void *)memory;
    char *received = memory + (size_t)s->size * 2 * sizeof(uint64_t);
    DDP_TRY(begin(s, call, (uint64_t(*)[2])(void *)memory));
    for (int r = 0; r < s->size; r++) {
        ddp_bytes part = ddp_call_sends(call, s->rank, r);
        DDP_TRY(put(s, r, send + part.begin, part.size));
    }
    DDP_TRY(ddp_barrier(s->control));
    ddp_bytes sum = ddp_call_receives(call, s->rank, s->rank);
    for (int r = 0; r < s->size; r++) {
        ddp_bytes part = ddp_call_receives(call, s->rank, r);
        sources[r] = ddp_call_adds(call) ? received + (size_t)r * size : (char *)call->recv + part.begin;
        DDP_TRY(get(s, r, (void *)(uintptr_t)sources[r], part.size));
    }
    if (ddp_call_adds(call) && sum.size)
        ddp_reduce_tree(call->recv, sources, s->size, call->count, call->dtype, call->op, call->divisor);
    return DDP_OK;
}

static ddp_result run(ddp_group *group, void *state, const ddp_call *call) {
    own *s = (own *)state;
    size_t size = ddp_call_adds(call) ? ddp_round_up(call->count * ddp_dtype_size(call->dtype), 64) : 0;
    char *memory = (char *)ddp_host_alloc(group, (size_t)s->size * (2 * sizeof(uint64_t) + size));
    if (!memory) return failed(s, DDP_ERR_NO_MEMORY);
    ddp_result result = execute(s, call, memory, size);
    ddp_host_free(group, memory);
    return result;
}

static ddp_result status(const ddp_group *group, void *state) {
    (void)group;
    return ddp_group_cause(((own *)state)->control);
}

static void poison(ddp_group *group, void *state, ddp_result cause, const char *text) {
    (void)group;
    ddp_group_poison(((own *)state)->control, cause, text);
}

/* Rank 0 creates a file without a name. The other ranks of its machine open it through /proc. All ranks
   create their state, or none does. */
static ddp_result create(ddp_group *group, ddp_group *control, int owns_control, void **state) {
    char path[64] = "own_backend.XXXXXX";
    own *s = (own *)ddp_host_alloc(group, sizeof *s);
    ddp_result result = s ? DDP_OK : DDP_ERR_NO_MEMORY;
    int rank = ddp_rank(control), file = rank == 0 ? mkstemp(path) : -1;
    if (file >= 0) unlink(path);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), file);
    ddp_result sent = ddp_broadcast(control, path, sizeof path, DDP_U8, 0, NULL);
    if (sent == DDP_OK && rank > 0) file = open(path, O_RDWR);
    if (file < 0) result = ddp_fail(DDP_ERR_SYSTEM, "the file %s could not be created or opened", path);
    result = ddp_agree(control, "ddp_group_create", result, 0, "");
    if (result != DDP_OK) {
        if (file >= 0) close(file);
        if (owns_control) ddp_group_destroy(control);
        ddp_host_free(group, s);
        return result;
    }
    *s = (own){control, owns_control, rank, ddp_world_size(control), file};
    *state = s;
    return DDP_OK;
}

static ddp_result open_group(ddp_group *group, void **state) {
    return create(group, (ddp_group *)ddp_group_backend_user(group), 0, state);
}

static ddp_result split(ddp_group *parent, void *state, ddp_group *child, const int *members, int count,
                        void **child_state) {
    ddp_group *control = NULL;
    int color = child ? members[0] : -1, key = child ? ddp_rank(child) : 0;
    (void)parent;
    (void)count;
    DDP_TRY(ddp_group_split(((own *)state)->control, color, key, &control));
    return child ? create(child, control, 1, child_state) : DDP_OK;
}

static void close_group(ddp_group *group, void *state) {
    own *s = (own *)state;
    close(s->file);
    if (s->owns_control) ddp_group_destroy(s->control);
    ddp_host_free(group, s);
}

static const ddp_backend own_backend = {
    .name = "own",
    .open = open_group,
    .run = run,
    .split = split,
    .status = status,
    .poison = poison,
    .close = close_group,
    .default_order = DDP_ORDER_TREE,
};

/* An all-reduce over all ranks must have the bits of the built-in backend. Then the ranks with even and with
   odd numbers form a group each, over this backend too, and gather. */
static ddp_result rank_main(ddp_group *world, void *user) {
    enum { COUNT = 1000, GATHER = 10 };
    ddp_group_desc desc = {.backend = &own_backend};
    ddp_group *group, *half;
    float in[COUNT], out[COUNT], expected[COUNT], parts[DDP_MAX_LOCAL_RANKS * GATHER];
    (void)user;
    DDP_TRY(ddp_group_create_on(&group, world, &desc));
    DDP_TRY(ddp_group_split(group, ddp_rank(world) % 2, 0, &half));

    for (int i = 0; i < COUNT; i++) in[i] = (float)(ddp_rank(world) + 1) / (float)(i + 1);
    DDP_TRY(ddp_all_reduce(world, in, expected, COUNT, DDP_F32, DDP_OP_AVG, NULL));
    DDP_TRY(ddp_all_reduce(group, in, out, COUNT, DDP_F32, DDP_OP_AVG, NULL));
    if (memcmp(out, expected, sizeof out) != 0)
        return ddp_fail(DDP_ERR_CORRUPT, "rank %d: the average has other bits than with the built-in backend",
                        ddp_rank(world));

    DDP_TRY(ddp_all_gather(half, in, parts, GATHER, DDP_F32, NULL));
    for (int r = 0; r < ddp_world_size(half); r++)
        if (parts[GATHER * r] != (float)(2 * r + ddp_rank(world) % 2 + 1))
            return ddp_fail(DDP_ERR_CORRUPT, "rank %d: the data of rank %d of its half is missing",
                            ddp_rank(world), r);
    if (ddp_rank(world) == 0) printf("own_backend: %d ranks ok\n", ddp_world_size(world));
    ddp_group_destroy(half);
    ddp_group_destroy(group);
    return DDP_OK;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = DDP_OK;
    if (argc > 2 || desc.world_size < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

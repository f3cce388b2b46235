/*  own_backend.c - a backend of one's own on one page: bytes travel through a file.

        cc -std=gnu11 -O2 own_backend.c -lm -pthread -o own_backend && ./own_backend 4

    A backend moves bytes. ddp.h does the rest: it checks arguments, queues asynchronous calls, reports errors.
    Collectives, the reducer, FSDP, tensors and pipelines run over it. Replace put() and get() by a network. The
    control group, over which the group is made, carries failures, agreements and waits.

        a call   1 all ranks compare it   2 put what each peer gets   3 wait   4 get, and add in tree order

    Messages are left out (p2p_start, p2p_poll): ddp_send returns DDP_ERR_UNSUPPORTED. Without alloc, group
    memory is each rank's own. ddp.h (>>spi) describes every function of the table. */
#define DDP_IMPLEMENTATION
#include "../../ddp.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct own {
    ddp_group *control;
    int owns_control; /* 1 = a split has made it */
    int rank, size, file;
} own;

static ddp_result failed(own *s, ddp_result result) {
    ddp_group_poison(s->control, result, ddp_last_error());
    return result;
}

/* What rank `from` sends to rank `to` is stored at a place of its own: the file has holes. */
static off_t place(const own *s, int from, int to) { return ((off_t)from * s->size + to) << 32; }

static ddp_result put(own *s, int to, const void *data, size_t size) {
    if (!size || pwrite(s->file, data, size, place(s, s->rank, to)) == (ssize_t)size) return DDP_OK;
    return failed(s, ddp_fail(DDP_ERR_ENGINE, "rank %d could not write %zu bytes", s->rank, size));
}

static ddp_result get(own *s, int from, void *data, size_t size) {
    if (!size || pread(s->file, data, size, place(s, from, s->rank)) == (ssize_t)size) return DDP_OK;
    return failed(s, ddp_fail(DDP_ERR_ENGINE, "rank %d could not read from rank %d", s->rank, from));
}

/* Every rank is in this call, and in the same one. Nobody still reads what the last call put. */
static ddp_result begin(own *s, const ddp_call *call, uint64_t (*calls)[2]) {
    ddp_call_pack(call, calls[s->rank]);
    DDP_TRY(ddp_all_gather(s->control, calls[s->rank], calls, 2, DDP_U64, NULL));
    for (int r = 0; r < s->size; r++) {
        ddp_result result = ddp_call_compare(s->rank, calls[s->rank], r, calls[r]);
        if (result != DDP_OK) return failed(s, result);
    }
    return DDP_OK;
}

/* memory: for the sources of a sum, of which each has size bytes, and for a pointer to each. */
static ddp_result carry_out(own *s, const ddp_call *call, char *memory, size_t size) {
    const char *send = (const char *)(call->kind == DDP_CALL_BROADCAST ? call->recv : call->send);
    const void **sources = (const void **)(void *)memory;
    char *came = memory + (size_t)s->size * 2 * sizeof(uint64_t);
    DDP_TRY(begin(s, call, (uint64_t(*)[2])(void *)memory));
    for (int r = 0; r < s->size; r++) {
        ddp_bytes part = ddp_call_sends(call, s->rank, r);
        DDP_TRY(put(s, r, send + part.begin, part.size));
    }
    DDP_TRY(ddp_barrier(s->control));
    ddp_bytes sum = ddp_call_receives(call, s->rank, s->rank);
    for (int r = 0; r < s->size; r++) {
        ddp_bytes part = ddp_call_receives(call, s->rank, r);
        sources[r] = ddp_call_adds(call) ? came + (size_t)r * size : (char *)call->recv + part.begin;
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
    ddp_result result = carry_out(s, call, memory, size);
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

/* Rank 0 makes the file, and the other ranks of its machine open it by its name in /proc. */
static ddp_result meet(ddp_group *group, ddp_group *control, int owns_control, void **state) {
    char path[64] = "own_backend.XXXXXX";
    own *s = (own *)ddp_host_alloc(group, sizeof *s);
    ddp_result result = s ? DDP_OK : DDP_ERR_NO_MEMORY;
    int rank = ddp_rank(control), file = rank == 0 ? mkstemp(path) : -1;
    if (file >= 0) unlink(path);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), file);
    ddp_result told = ddp_broadcast(control, path, sizeof path, DDP_U8, 0, NULL);
    if (told == DDP_OK && rank) file = open(path, O_RDWR);
    if (file < 0) result = ddp_fail(DDP_ERR_SYSTEM, "the file %s could not be made or opened", path);
    result = ddp_agree(control, "ddp_group_create", result, 0, ""); /* all ranks continue, or none does */
    if (result != DDP_OK) {
        if (file >= 0) close(file);
        if (owns_control) ddp_group_destroy(control);
        ddp_host_free(group, s);
        return result;
    }
    own made = {control, owns_control, rank, ddp_world_size(control), file};
    *s = made;
    *state = s;
    return DDP_OK;
}

static ddp_result open_group(ddp_group *group, void **state) {
    return meet(group, (ddp_group *)ddp_group_backend_user(group), 0, state);
}

static ddp_result split(ddp_group *parent, void *state, ddp_group *child, const int *members, int count,
                        void **child_state) {
    ddp_group *control = NULL;
    int color = child ? members[0] : -1, key = child ? ddp_rank(child) : 0;
    (void)parent;
    (void)count;
    DDP_TRY(ddp_group_split(((own *)state)->control, color, key, &control));
    return child ? meet(child, control, 1, child_state) : DDP_OK;
}

static void close_group(ddp_group *group, void *state) {
    own *s = (own *)state;
    close(s->file);
    if (s->owns_control) ddp_group_destroy(s->control);
    ddp_host_free(group, s);
}

static const ddp_backend own_backend = {
    "own",  open_group,  run, NULL,           NULL, NULL, split, NULL, NULL, status,
    poison, close_group, 0,   DDP_ORDER_TREE, NULL, NULL, NULL,  NULL, NULL,
};

/* Sums over all ranks, and over the even and the odd ones: the same bits as without the backend. */
static ddp_result rank_main(ddp_group *world, void *user) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *groups[2] = {NULL, NULL};
    float in[1000], out[1000], want[1000];
    (void)user;
    desc.backend = &own_backend;
    DDP_TRY(ddp_group_create_on(&groups[0], world, &desc));
    DDP_TRY(ddp_group_split(groups[0], ddp_rank(world) % 2, 0, &groups[1]));
    for (int i = 0; i < 1000; i++) in[i] = (float)(ddp_rank(world) + 1) / (float)(i + 1);
    DDP_TRY(ddp_all_reduce(world, in, want, 1000, DDP_F32, DDP_OP_AVG, NULL));
    DDP_TRY(ddp_all_reduce(groups[0], in, out, 1000, DDP_F32, DDP_OP_AVG, NULL));
    if (memcmp(out, want, sizeof out) != 0) return ddp_fail(DDP_ERR_CORRUPT, "the sums differ");
    DDP_TRY(ddp_all_gather(groups[1], in, out, 10, DDP_F32, NULL));
    for (int r = 0; r < ddp_world_size(groups[1]); r++)
        if (out[10 * r] != (float)(2 * r + ddp_rank(world) % 2 + 1))
            return ddp_fail(DDP_ERR_CORRUPT, "the data of rank %d is missing", r);
    if (ddp_rank(world) == 0) printf("own_backend: %d ranks ok\n", ddp_world_size(world));
    for (int i = 1; i >= 0; i--) ddp_group_destroy(groups[i]);
    return DDP_OK;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = argc > 1 ? atoi(argv[1]) : 2;
    if (ddp_launch(&desc, rank_main, NULL) == DDP_OK) return 0;
    fprintf(stderr, "%s\n", ddp_last_error());
    return 1;
}

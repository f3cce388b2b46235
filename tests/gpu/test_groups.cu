/*  test_groups.cu - groups beyond single collectives: messages, splits, group memory, aborts, timeouts, other
    failures, and leaks.

    test_groups processes|threads [W ...]      Built with -DDDP_TEST_ON_CPU it runs on the fake GPU, as
                                               test_conformance.cu.

    Groups are staged through the host, or run over NCCL with DDP_TEST_ENGINE=nccl. A test that needs another
    engine, or the fake GPU, prints a line "not run: TEST: REASON". */
#include "../support/device.h"

#define LARGEST (2 * DDP__CUDA_STAGE_BYTES + DDP__CUDA_STAGE_BYTES / 2 + 3) /* three rounds */
#define SCRATCH (LARGEST > 100000 ? LARGEST : 100000)

/* A device buffer and the host's view of it. */
typedef struct pair {
    unsigned char *near, *far;
} pair;

static ddp_result pair_make(device_rank *d, pair *p, size_t size_bytes) {
    void *memory = NULL;
    p->near = (unsigned char *)calloc(1, size_bytes + 1);
    RANKS_OK(d->cpu, ddp_device_cuda()->alloc(NULL, size_bytes + 1, &memory));
    p->far = (unsigned char *)memory;
    return DDP_OK;
}
/* Collective. cudaFree waits for all work of the GPU, which ranks can share. So no rank issues its next call
   before every rank has freed its memory. */
static ddp_result pair_free(device_rank *d, pair *p) {
    free(p->near);
    ddp_device_cuda()->free(NULL, p->far);
    return ddp_barrier(d->cpu);
}

/* The contents of message number. */
static void message(unsigned char *out, size_t size_bytes, uint64_t number) {
    ranks_data data;
    data.dtype = DDP_U8;
    data.seed = number * 7919u;
    data.specials = 0;
    ranks_fill(out, &data, 0, 0, size_bytes);
}

static ddp_result message_up(device_rank *d, pair *p, size_t size_bytes, uint64_t number) {
    message(p->near, size_bytes, number);
    return device_up(d, p->far, p->near, size_bytes);
}

static ddp_result message_down(device_rank *d, pair *p, size_t size_bytes, uint64_t number) {
    unsigned char *want = (unsigned char *)malloc(size_bytes + 1);
    ddp_result result = device_down(d, p->near, p->far, size_bytes);
    message(want, size_bytes, number);
    if (result == DDP_OK && memcmp(want, p->near, size_bytes) != 0)
        result = ranks_failed(d->cpu, __FILE__, __LINE__, ranks_current, "message %llu of %zu bytes is wrong",
                              (unsigned long long)number, size_bytes);
    free(want);
    return result;
}

/* Reports a test that this build or engine cannot run. */
static ddp_result not_run(device_rank *d, const char *reason) {
    if (ddp_rank(d->group) == 0) printf("not run: %s: %s\n", ranks_current, reason);
    return DDP_OK;
}

#define TRY(call)                                    \
    do {                                             \
        ddp_result try_result = (call);              \
        if (try_result != DDP_OK) return try_result; \
    } while (0)

//== messages ===============================================================================

/* Every ordered pair, blocking; the sender overwrites its buffer, after the call on its stream. */
static ddp_result all_pairs(device_rank *d) {
    static const size_t sizes[] = {0, 1, 7, 1000, 4097, 65537, LARGEST};
    int rank = ddp_rank(d->group), w = ddp_world_size(d->group);
    pair p;
    TRY(pair_make(d, &p, SCRATCH));
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        for (int from = 0; from < w; from++)
            for (int to = 0; to < w; to++) {
                uint64_t number = n * 10000 + (uint64_t)(from * 100 + to);
                if (from == to) continue;
                if (rank == from) {
                    TRY(message_up(d, &p, sizes[n], number));
                    RANKS_OK(d->cpu, ddp_send(d->group, p.far, sizes[n], DDP_U8, to, from + to, NULL));
                    ddp_device_cuda()->fill_zero(p.far, sizes[n]);
                } else if (rank == to) {
                    RANKS_OK(d->cpu, ddp_recv(d->group, p.far, sizes[n], DDP_U8, from, from + to, NULL));
                    TRY(message_down(d, &p, sizes[n], number));
                }
            }
    TRY(pair_free(d, &p));
    return DDP_OK;
}

/* A ring with 40 messages each way, more than can be in flight, during all-reduces; waited for in another
   order than sent. Odd ranks receive first: over NCCL, two ranks that send to each other would both wait. */
static ddp_result many_beside_collectives(device_rank *d) {
    enum { COUNT = 40, SIZE = 3001 };
    int rank = ddp_rank(d->group), w = ddp_world_size(d->group), next = (rank + 1) % w,
        previous = (rank + w - 1) % w;
    pair out[COUNT], in[COUNT], sum[4];
    ddp_work sent[COUNT], received[COUNT], reduced[4];
    const int tag = 5; /* the same for all: the order counts */
    for (int i = 0; i < COUNT; i++) {
        TRY(pair_make(d, &out[i], SIZE));
        TRY(pair_make(d, &in[i], SIZE));
    }
    for (int i = 0; i < 4; i++) TRY(pair_make(d, &sum[i], 40000));
    for (int i = 0; i < COUNT; i++) {
        TRY(message_up(d, &out[i], SIZE, (uint64_t)(rank * 1000 + i)));
        if (rank % 2)
            RANKS_OK(d->cpu, ddp_recv(d->group, in[i].far, SIZE, DDP_U8, previous, tag, &received[i]));
        RANKS_OK(d->cpu, ddp_send(d->group, out[i].far, SIZE, DDP_U8, next, tag, &sent[i]));
        if (rank % 2 == 0)
            RANKS_OK(d->cpu, ddp_recv(d->group, in[i].far, SIZE, DDP_U8, previous, tag, &received[i]));
        if (i % 10) continue;
        for (int k = 0; k < 10000; k++)
            ((float *)(void *)sum[i / 10].near)[k] = (float)(rank + 1) * (float)(k % 7);
        TRY(device_up(d, sum[i / 10].far, sum[i / 10].near, 40000));
        RANKS_OK(d->cpu, ddp_all_reduce(d->group, sum[i / 10].far, sum[i / 10].far, 10000, DDP_F32,
                                        DDP_OP_SUM, &reduced[i / 10]));
    }
    for (int i = 0; i < COUNT; i++) {
        int k = (i * 7 + rank) % COUNT, done = 0;
        while (i % 3 == 0 && !done) RANKS_OK(d->cpu, ddp_test(d->group, &received[k], &done));
        RANKS_OK(d->cpu, ddp_wait(d->group, &received[k]));
        TRY(message_down(d, &in[k], SIZE, (uint64_t)(previous * 1000 + k)));
    }
    for (int i = 0; i < COUNT; i++) RANKS_OK(d->cpu, ddp_wait(d->group, &sent[i]));
    for (int i = 0; i < 4; i++) {
        RANKS_OK(d->cpu, ddp_wait(d->group, &reduced[i]));
        TRY(device_down(d, sum[i].near, sum[i].far, 40000));
        for (int k = 0; k < 10000; k++)
            RANKS_CHECK(d->cpu,
                        ((float *)(void *)sum[i].near)[k] == (float)(w * (w + 1) / 2) * (float)(k % 7),
                        "all-reduce %d, element %d", i, k);
        TRY(pair_free(d, &sum[i]));
    }
    for (int i = 0; i < COUNT; i++) {
        TRY(pair_free(d, &out[i]));
        TRY(pair_free(d, &in[i]));
    }
    return DDP_OK;
}

/* All ranks with all ranks at once; in a batch the order does not matter. */
static ddp_result batches(device_rank *d) {
    int rank = ddp_rank(d->group), w = ddp_world_size(d->group);
    pair out[DDP_MAX_LOCAL_RANKS], in[DDP_MAX_LOCAL_RANKS];
    for (int r = 0; r < w; r++) {
        TRY(pair_make(d, &out[r], 70000));
        TRY(pair_make(d, &in[r], 70000));
        TRY(message_up(d, &out[r], 70000, (uint64_t)(rank * 64 + r)));
    }
    RANKS_OK(d->cpu, ddp_p2p_begin(d->group));
    for (int r = 0; r < w; r++)
        if (r != rank) RANKS_OK(d->cpu, ddp_send(d->group, out[r].far, 70000, DDP_U8, r, 0, NULL));
    for (int r = w - 1; r >= 0; r--)
        if (r != rank) RANKS_OK(d->cpu, ddp_recv(d->group, in[r].far, 70000, DDP_U8, r, 0, NULL));
    RANKS_OK(d->cpu, ddp_p2p_end(d->group));
    for (int r = 0; r < w; r++) {
        if (r != rank) TRY(message_down(d, &in[r], 70000, (uint64_t)(r * 64 + rank)));
        TRY(pair_free(d, &out[r]));
        TRY(pair_free(d, &in[r]));
    }
    return DDP_OK;
}

//== splits, divisors, group memory =========================================================

static ddp_result one_sum(device_rank *d, ddp_group *group, float mine, float wanted) {
    pair p;
    float *x;
    TRY(pair_make(d, &p, 4 * 777));
    x = (float *)(void *)p.near;
    for (int i = 0; i < 777; i++) x[i] = mine;
    TRY(device_up(d, p.far, p.near, 4 * 777));
    RANKS_OK(d->cpu, ddp_all_reduce(group, p.far, p.far, 777, DDP_F32, DDP_OP_SUM, NULL));
    TRY(device_down(d, p.near, p.far, 4 * 777));
    for (int i = 0; i < 777; i++)
        RANKS_CHECK(d->cpu, x[i] == wanted, "element %d is %g, wanted %g", i, (double)x[i], (double)wanted);
    TRY(pair_free(d, &p));
    return DDP_OK;
}

static ddp_result splits(device_rank *d) {
    int rank = ddp_rank(d->group), w = ddp_world_size(d->group);
    ddp_group *half, *alone, *none, *reversed;
    float wanted = 0;
    for (int r = rank % 2; r < w; r += 2) wanted += (float)(r + 1);
    RANKS_OK(d->cpu, ddp_group_split(d->group, rank % 2, rank, &half));
    TRY(one_sum(d, half, (float)(rank + 1), wanted));
    RANKS_OK(d->cpu, ddp_group_split(half, ddp_rank(half), 0, &alone));
    RANKS_CHECK(d->cpu, ddp_world_size(alone) == 1, "%d ranks", ddp_world_size(alone));
    TRY(one_sum(d, alone, 3, 3));
    RANKS_OK(d->cpu, ddp_group_split(d->group, rank == 0 ? -1 : 4, 0, &none));
    RANKS_CHECK(d->cpu, (none == NULL) == (rank == 0), "a rank that requested no group has one");
    RANKS_OK(d->cpu, ddp_group_split(d->group, 0, -rank, &reversed));
    RANKS_CHECK(d->cpu, ddp_rank(reversed) == w - 1 - rank, "rank %d", ddp_rank(reversed));
    TRY(one_sum(d, reversed, 1, (float)w));
    TRY(one_sum(d, d->group, 2, (float)(2 * w)));
    ddp_group_destroy(reversed);
    ddp_group_destroy(none);
    ddp_group_destroy(alone);
    ddp_group_destroy(half);
    return DDP_OK;
}

/* An average over more than the ranks, as in the reducer, rounds once: the bits of the CPU group. */
static ddp_result divisors(device_rank *d) {
    static const ddp_dtype dtypes[] = {DDP_F32, DDP_BF16, DDP_F16, DDP_I32};
    for (size_t t = 0; t < 4; t++)
        for (uint64_t divisor = 1; divisor < 13; divisor += 5) {
            size_t size = ranks_dtype_size(dtypes[t]), count = 3001;
            ranks_data data;
            ddp_call call;
            pair p;
            unsigned char *want = (unsigned char *)malloc(count * size);
            data.dtype = dtypes[t];
            data.seed = divisor;
            data.specials = 1;
            TRY(pair_make(d, &p, count * size));
            ranks_fill(p.near, &data, ddp_rank(d->group), 0, count);
            memcpy(want, p.near, count * size);
            TRY(device_up(d, p.far, p.near, count * size));
            memset(&call, 0, sizeof call);
            call.kind = DDP_CALL_ALL_REDUCE;
            call.dtype = dtypes[t];
            call.op = DDP_OP_AVG;
            call.root = -1;
            call.count = count;
            call.divisor = divisor * (uint64_t)ddp_world_size(d->group);
            call.send = call.recv = p.far;
            RANKS_OK(d->cpu, ddp_group_call(d->group, &call, NULL));
            call.send = call.recv = want;
            RANKS_OK(d->cpu, ddp_group_call(d->cpu, &call, NULL));
            TRY(device_down(d, p.near, p.far, count * size));
            RANKS_CHECK(d->cpu, ranks_compare(p.near, want, count, dtypes[t], 0, NULL) < 0, "%s divisor=%d",
                        ddp_dtype_name(dtypes[t]), (int)divisor);
            TRY(pair_free(d, &p));
            free(want);
        }
    return DDP_OK;
}

/* Every rank sends a block of group memory to every rank, which receives it in other group memory. */
static ddp_result exchange(device_rank *d, unsigned char *out, unsigned char *in) {
    enum { SIZE = 301 };
    int rank = ddp_rank(d->group), w = ddp_world_size(d->group);
    pair p = {NULL, out};
    p.near = (unsigned char *)malloc(SIZE);
    for (int r = 0; r < w; r++) {
        p.far = out + r * SIZE;
        TRY(message_up(d, &p, SIZE, (uint64_t)(rank * 64 + r)));
    }
    RANKS_OK(d->cpu, ddp_all_to_all(d->group, out, in, SIZE, DDP_U8, NULL));
    for (int r = 0; r < w; r++) {
        p.far = in + r * SIZE;
        TRY(message_down(d, &p, SIZE, (uint64_t)(r * 64 + rank)));
    }
    free(p.near);
    return DDP_OK;
}

static ddp_result group_memory(device_rank *d) {
    unsigned char zeros[5000];
    void *memory[3] = {NULL, NULL, NULL}, *much = d;
    for (int i = 0; i < 3; i++) {
        RANKS_OK(d->cpu, ddp_group_alloc(d->group, sizeof zeros, &memory[i]));
        memset(zeros, 1, sizeof zeros);
        ddp_device_cuda()->copy(zeros, memory[i], sizeof zeros);
        for (size_t k = 0; k < sizeof zeros; k++)
            RANKS_CHECK(d->cpu, zeros[k] == 0, "byte %d of new memory is %d", (int)k, zeros[k]);
        ddp_device_cuda()->copy(memory[i], "dirty", 5);
    }
    TRY(exchange(d, (unsigned char *)memory[0], (unsigned char *)memory[1]));
    RANKS_OK(d->cpu, ddp_group_free(d->group, memory[1])); /* destroying the group frees the others */
    TRY(exchange(d, (unsigned char *)memory[2], (unsigned char *)memory[0]));
    RANKS_CHECK(d->cpu, ddp_group_free(d->group, memory[1]) == DDP_ERR_INVALID, "memory was freed twice");
    RANKS_CHECK(d->cpu, ddp_group_alloc(d->group, (size_t)1 << 50, &much) == DDP_ERR_NO_MEMORY && !much,
                "a petabyte: %s", ddp_last_error());
    RANKS_CHECK(d->cpu,
                strstr(ddp_last_error(), "ddp_group_alloc") != NULL
                    && strstr(ddp_last_error(), device_uses_nccl() ? "ncclMemAlloc" : "cudaMalloc") != NULL,
                "%s", ddp_last_error());
    return one_sum(d, d->group, 1, (float)ddp_world_size(d->group));
}

//== failures ===============================================================================

/* Over NCCL a call returns when it is enqueued: waits for its failure, and returns that. */
static ddp_result outcome(ddp_group *group, ddp_result issued) {
    ddp_result result = issued;
    for (int i = 0; i < 1000 && result == DDP_OK && device_uses_nccl(); i++) {
        result = ddp_barrier(group);
        ranks_sleep_us(1000);
    }
    return result;
}

/* Every rank gets wanted and a line that contains text; later calls are poisoned with the same text. On a
   separate group. */
static ddp_result failed_everywhere(device_rank *d, ddp_group *group, ddp_result result, ddp_result wanted,
                                    const char *text) {
    char line[512];
    void *memory;
    snprintf(line, sizeof line, "%s", ddp_last_error());
    RANKS_CHECK(d->cpu, result == wanted && strstr(line, text), "%s: %s", ddp_result_name(result), line);
    result = ddp_barrier(group);
    RANKS_CHECK(d->cpu, result == DDP_ERR_POISONED && strstr(ddp_last_error(), text), "the next call: %s: %s",
                ddp_result_name(result), ddp_last_error());
    RANKS_CHECK(d->cpu, ddp_group_status(group) == wanted && strstr(ddp_last_error(), text), "status: %s",
                ddp_last_error());
    RANKS_CHECK(d->cpu, ddp_group_alloc(group, 8, &memory) != DDP_OK && strstr(ddp_last_error(), text),
                "alloc: %s", ddp_last_error());
    if (ddp_world_size(group) > 1) {
        result = ddp_recv(group, d->scratch, 1, DDP_U8, (ddp_rank(group) + 1) % ddp_world_size(group), 0,
                          NULL);
        RANKS_CHECK(d->cpu, result == DDP_ERR_POISONED && strstr(ddp_last_error(), text), "recv: %s: %s",
                    ddp_result_name(result), ddp_last_error());
    }
    return DDP_OK;
}

/* The watchdog compares the calls while they wait on the device. */
static ddp_result mismatch_over_nccl(device_rank *d) {
    int is_last = ddp_rank(d->group) == ddp_world_size(d->group) - 1;
    unsigned char *x = d->scratch;
    ddp_group *group;
    ddp_result result;
    RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
    device_expect(1);
    result = ddp_broadcast(group, x, is_last ? 11 : 10, DDP_F32, 0, NULL);
    RANKS_CHECK(d->cpu, result == DDP_OK, "%s", ddp_last_error());
    TRY(failed_everywhere(d, group, outcome(group, result), DDP_ERR_MISMATCH, "count=10"));
    RANKS_CHECK(d->cpu, ddp_group_status(group) != DDP_OK && strstr(ddp_last_error(), "count=11"), "%s",
                ddp_last_error());
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    ddp_group_destroy(group);
    device_expect(0);
    return DDP_OK;
}

static ddp_result mismatches(device_rank *d) {
    int rank = ddp_rank(d->group), last = ddp_world_size(d->group) - 1;
    char text[200];
    ddp_group *group;
    ddp_result result;
    unsigned char *x = d->scratch;
    size_t counts[DDP_MAX_LOCAL_RANKS];
    if (device_uses_nccl()) return mismatch_over_nccl(d);
    for (int what = 0; what < 4; what++) {
        RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
        if (what == 0) {
            result = ddp_all_reduce(group, x, x, rank == last ? 11 : 10, DDP_F32, DDP_OP_SUM, NULL);
            snprintf(text, sizeof text, "rank %d/%d ddp_all_reduce group=gpu seq=1 f32 count=%d: ", rank,
                     last + 1, rank == last ? 11 : 10);
            RANKS_CHECK(d->cpu, strncmp(ddp_last_error(), text, strlen(text)) == 0, "%s", ddp_last_error());
            snprintf(text, sizeof text,
                     ": ranks differ: rank 0 count=10, rank %d count=11; give every rank the same", last);
        } else if (what == 1) {
            result = rank == last ? ddp_broadcast(group, x, 4, DDP_I8, 0, NULL) : ddp_barrier(group);
            snprintf(text, sizeof text,
                     "ranks differ: rank 0 ddp_barrier, rank %d ddp_broadcast i8 count=4 root=0", last);
        } else if (what == 2) {
            for (int r = 0; r <= last; r++) counts[r] = rank == last && r == 0 ? 3 : 2;
            result = ddp_all_to_all_v(group, x, counts, NULL, x + 50000, counts, NULL, DDP_F32, NULL);
            snprintf(text, sizeof text,
                     "counts disagree: rank 0 sends 2 elements to rank %d, which expects 3", last);
        } else {
            for (int r = 0; r <= last; r++)
                counts[r] = rank == last && r != last ? (r == 0 ? 3 : r == 1 ? 1 : 2) : 2;
            /* Two ranks cannot disagree with equal totals. */
            if (last < 2) {
                ddp_group_destroy(group);
                continue;
            }
            result = ddp_all_gather_v(group, x, 2, x + 50000, counts, NULL, DDP_F32, NULL);
            snprintf(text, sizeof text, "counts disagree: recv_counts[0] is 2 on rank 0 and 3 on rank %d",
                     last);
        }
        TRY(failed_everywhere(d, group, result, DDP_ERR_MISMATCH, text));
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        ddp_group_destroy(group);
    }
    return DDP_OK;
}

static ddp_result aborts_and_losses(device_rank *d) {
    int rank = ddp_rank(d->group), last = ddp_world_size(d->group) - 1;
    ddp_group *group;
    ddp_work work;
    char text[64];
    RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
    device_expect(1);
    snprintf(text, sizeof text, device_uses_nccl() ? "rank %d" : "rank %d (pid ", last);
    if (rank == last) RANKS_OK(d->cpu, ddp_group_abort(group));
    TRY(failed_everywhere(d, group, ddp_barrier(group), DDP_ERR_POISONED, text));
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    ddp_group_destroy(group);

    /* The last rank leaves while the others wait for its message, or reduce. */
    RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
    if (rank != last) RANKS_OK(d->cpu, ddp_recv(group, d->scratch, 10, DDP_F32, last, 0, &work));
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    if (rank == last) {
        ddp_group_destroy(group);
    } else {
        ddp_result result = outcome(group, ddp_all_reduce(group, d->scratch + 4096, d->scratch + 4096, 1000,
                                                          DDP_F32, DDP_OP_SUM, NULL));
        RANKS_CHECK(d->cpu, result == DDP_ERR_PEER_LOST && strstr(ddp_last_error(), text), "%s: %s",
                    ddp_result_name(result), ddp_last_error());
        result = ddp_wait(group, &work);
        RANKS_CHECK(d->cpu, result != DDP_OK && strstr(ddp_last_error(), text), "%s: %s",
                    ddp_result_name(result), ddp_last_error());
    }
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    if (rank != last) ddp_group_destroy(group);
    device_expect(0);
    return DDP_OK;
}

/* The last rank never calls. The others get the timeout with its number, from a barrier and from a collective
   on the device. Its next call returns the same. */
static ddp_result timeouts(device_rank *d) {
    if (!device_uses_nccl()) return not_run(d, "staged, a timeout ends the launch; tests/faults does that");
    int last = ddp_world_size(d->group) - 1, is_last = ddp_rank(d->group) == last, timeout_ms;
    char text[64];
    device_expect(1);
    snprintf(text, sizeof text, "missing: rank %d", last);
    for (int collective = 0; collective < 2; collective++) {
        double start = ddp_now();
        ddp_group *group;
        ddp_result result;
        timeout_ms = 1000 * DDP_TEST_SLOWDOWN;
        RANKS_OK(d->cpu, device_group_with(d->cpu, d->stream, timeout_ms, &group));
        if (is_last) RANKS_OK(d->cpu, ddp_barrier(d->cpu)); /* the others have their error */
        if (collective)
            result = outcome(group, ddp_broadcast(group, d->scratch, 1000, DDP_F32, last, NULL));
        else
            result = ddp_barrier(group);
        if (!is_last) RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        TRY(failed_everywhere(d, group, result, DDP_ERR_TIMEOUT, text));
        RANKS_CHECK(d->cpu, ddp_now() - start < 20 * 1e-3 * timeout_ms, "%.1f s", ddp_now() - start);
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        ddp_group_destroy(group);
    }
    device_expect(0);
    return DDP_OK;
}

/* A failing copy on one rank is a failure of all ranks, with CUDA's text; at every place where a call
   copies. */
static ddp_result failing_copies(device_rank *d) {
#if defined(DDP_TEST_ON_CPU)
    int rank = ddp_rank(d->group), last = ddp_world_size(d->group) - 1, device;
    if (device_uses_nccl()) return not_run(d, "needs a group that is staged");
    device_get(&device);
    for (int nth = 1; nth <= 6; nth++) { /* three rounds each way */
        ddp_group *group;
        ddp_result result;
        char text[100];
        RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        if (rank == last) fake_fail("cudaMemcpyAsync", device, nth, cudaErrorIllegalAddress, 0);
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        result = ddp_all_reduce(group, d->scratch, d->scratch, LARGEST / 4, DDP_F32, DDP_OP_MAX, NULL);
        snprintf(text, sizeof text, ": rank %d: staging through the host: cudaMemcpyAsync: ", last);
        if (nth < 6 || rank == last) TRY(failed_everywhere(d, group, result, DDP_ERR_ENGINE, text));
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        ddp_group_destroy(group);
    }
    return DDP_OK;
#else
    return not_run(d, "a real device that has failed stays failed");
#endif
}

/* The thread that progresses messages starts on device 0: if it cannot select the group's device, it does
   nothing on the wrong one. */
static ddp_result failing_device(device_rank *d) {
#if defined(DDP_TEST_ON_CPU)
    int rank = ddp_rank(d->group), last = ddp_world_size(d->group) - 1;
    ddp_result result = DDP_OK;
    ddp_group *group;
    ddp_work work;
    if (device_uses_nccl()) return not_run(d, "needs a group that is staged");
    RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    if (rank == last) {
        fake_fail("cudaSetDevice", 0, 1, cudaErrorInvalidDevice, 0);
        RANKS_OK(d->cpu, ddp_recv(group, d->scratch, 100, DDP_F32, 0, 0, &work));
        while (!fake_fault_fired(0)) usleep(1000); /* the thread selects another device */
        (void)fake_fault_fired(1);
    }
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    if (rank == last) result = ddp_wait(group, &work);
    if (rank == 0) result = ddp_send(group, d->scratch, 100, DDP_F32, last, 0, NULL);
    if (rank == 0 || rank == last)
        TRY(failed_everywhere(d, group, result, DDP_ERR_ENGINE, "staging through the host: cudaSetDevice: "));
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    ddp_group_destroy(group);
    return DDP_OK;
#else
    return not_run(d, "needs the fake GPU");
#endif
}

/* Memory is never allocated on a wrong device: the error of cudaSetDevice is the result. */
static ddp_result failing_memory(device_rank *d) {
#if defined(DDP_TEST_ON_CPU)
    const ddp_device *device = ddp_group_device(d->group);
    int pinned, number, last = ddp_rank(d->group) == ddp_world_size(d->group) - 1;
    device_get(&number);
    for (pinned = 0; pinned < 2; pinned++) {
        void *memory = d;
        ddp_result result;
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        if (last) {
            fake_fail("cudaSetDevice", number, 1, cudaErrorInvalidDevice, 0);
            result = pinned ? device->alloc_pinned(d->group, 64, &memory)
                            : device->alloc(d->group, 64, &memory);
            RANKS_CHECK(d->cpu, result == DDP_ERR_ENGINE && !memory, "pinned %d: %s", pinned,
                        ddp_result_name(result));
            RANKS_CHECK(
                d->cpu,
                strstr(ddp_last_error(), pinned ? "alloc_pinned: cudaSetDevice: " : "alloc: cudaSetDevice: "),
                "%s", ddp_last_error());
            RANKS_CHECK(d->cpu, fake_fault_fired(1), "the device has not been changed");
        }
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    }
    return DDP_OK;
#else
    return not_run(d, "needs the fake GPU");
#endif
}

//== a loader with batches in pinned memory ================================================

static ddp_result loaded_sample(void *user, int64_t index, void *const *fields) {
    (void)user;
    message((unsigned char *)fields[0], 1000, (uint64_t)index);
    return DDP_OK;
}

/* Batches are copied to the device after the work in the stream, from where they were loaded, while workers
   load the next: extra_valid_batches keeps them valid. */
static ddp_result batches_go_up(device_rank *d) {
    ddp_tensor field = DDP_ZERO;
    ddp_loader_desc desc = DDP_ZERO;
    ddp_loader *loader;
    ddp_batch batch;
    int64_t order[20];
    int count = 0;
    pair p;
    field.dtype = DDP_U8;
    field.ndim = 1;
    field.shape[0] = 1000;
    desc.sampler.dataset_size = 20;
    desc.batch_size = 4;
    desc.extra_valid_batches = 4;
    desc.fields = &field;
    desc.field_count = 1;
    desc.fetch = loaded_sample;
    desc.worker_count = 2;
    desc.group = d->group;
    TRY(pair_make(d, &p, 20000));
    RANKS_OK(d->cpu, ddp_loader_create(&loader, &desc));
    device_delay(d->stream);
    for (; count < 20; count += 4) {
        RANKS_OK(d->cpu, ddp_loader_next(loader, &batch));
        memcpy(order + count, batch.indices, sizeof *order * 4);
        RANKS_CHECK(
            d->cpu,
            device_copy(p.far + 1000 * count, batch.fields[0].data, 4000, cudaMemcpyHostToDevice, d->stream)
                == cudaSuccess,
            "copying a batch up");
    }
    TRY(device_down(d, p.near, p.far, 20000));
    for (int i = 0; i < 20; i++) {
        unsigned char want[1000];
        message(want, sizeof want, (uint64_t)order[i]);
        RANKS_CHECK(d->cpu, memcmp(want, p.near + 1000 * i, sizeof want) == 0, "sample %d is wrong",
                    (int)order[i]);
    }
    ddp_loader_destroy(loader);
    TRY(pair_free(d, &p));
    return DDP_OK;
}

//== leaks =================================================================================

static ddp_result rank_main(ddp_group *world, void *user) {
    device_rank device, *d = &device;
    int w = ddp_world_size(world);
    (void)user;
    TRY(device_rank_open(d, world, SCRATCH));
    if (w > 1) {
        RANKS_RUN(world, all_pairs(d));
        RANKS_RUN(world, many_beside_collectives(d));
        RANKS_RUN(world, batches(d));
        RANKS_RUN(world, mismatches(d));
        RANKS_RUN(world, aborts_and_losses(d));
        RANKS_RUN(world, timeouts(d));
        RANKS_RUN(world, failing_device(d));
        RANKS_RUN(world, failing_memory(d));
    }
    RANKS_RUN(world, splits(d));
    RANKS_RUN(world, divisors(d));
    RANKS_RUN(world, group_memory(d));
    RANKS_RUN(world, failing_copies(d));
    RANKS_RUN(world, batches_go_up(d));
    TRY(device_rank_close(d));
    return DDP_OK;
}

/* Bytes, or objects, in use. */
static long long taken(void) {
#if defined(DDP_TEST_ON_CPU)
    return 0; /* the fake GPU detects it, and device_rank_close reports it */
#else
    size_t available = 0, total = 0;
    cudaMemPool_t pool;
    if (cudaDeviceSynchronize() == cudaSuccess && cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess)
        cudaMemPoolTrimTo(pool, 0);
    return cudaMemGetInfo(&available, &total) == cudaSuccess ? (long long)(total - available) : -1;
#endif
}

/* A second run of ranks as threads uses the memory that the first one left, and no more: the first one loads
   kernels, which stay. */
int main(int argc, char **argv) {
    static const int defaults[] = {2, 3, 4, 0};
    ranks_mode mode;
    long long before, after;
    int failures = ranks_each(argc, argv, defaults, 120, &mode, rank_main);
    if (failures < 0) return 2;
    if (mode == RANKS_THREADS && !getenv("DDP_TEST_SANITIZED")) { /* a sanitizer has memory of its own */
        before = taken();
        if (ranks_run(mode, 2, 60000 * DDP_TEST_SLOWDOWN, rank_main, &mode) != DDP_OK) failures++;
        after = taken();
        if (after > before) {
            printf("FAIL: %lld bytes of device memory leaked\n", after - before);
            failures++;
        }
    }
    if (!failures) printf("ok: %s\n", ranks_mode_name(mode));
    return failures != 0;
}

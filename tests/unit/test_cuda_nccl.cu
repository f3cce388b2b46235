/*  test_cuda_nccl.cu - groups over NCCL, on the fake GPUs of support/fake_nccl.h: ranks are threads with a
    device each.

    Every program runs with many seeds, which choose the order of streams. With all of them no two accesses
    race, no data is wrong, the fake reports no failure, and nothing leaks. Also tested: the exact calls of
    CUDA and NCCL, which call waits for which, the reaction of watchdogs to a missing rank, and an error at
    every single call. Nothing here applies to a real GPU. */
#if !defined(DDP_TEST_ON_CPU)
#define DDP_TEST_ON_CPU
#endif
#include "../support/device.h"

#define N 600      /* elements of a buffer; W divides it */
#define MANY 20000 /* elements that the scratch of reductions in tree order has to grow for */
#define MAX_RANKS 4
#define MAX_MACHINE_RANKS 16 /* of programs on several machines */

/* ---- running a program ---- */

typedef struct rank_state {
    ddp_group *cpu, *group;
    cudaStream_t stream;
    int rank, size, device;
    float *in, *out, *keep, *spare; /* N, N, 16 N and MANY floats on the device */
    int kept, counts[16];
    float expected[16 * N]; /* the contents that keep must have at the end */
} rank_state;

typedef ddp_result (*program_fn)(rank_state *s);

static struct {
    program_fn run;
    ddp_cuda_desc desc;
    ddp_order order;
    /* fault: the number of the call on device 1 that fails. */
    int timeout_ms, silence_ms, may_fail, patient, mismatch, fault, sticky;
    int own_comm; /* 1 = the user's own communicator, blocking; 2 = non-blocking */
    int connects; /* fake_nccl.connects */
    int held;     /* fake_nccl.held */
    /* left: of no_memory_at, after the group was created; 0 = the allocation failed */
    int no_memory_at, allocations_left;
    int shared, staged;            /* all ranks are on device 0; their group goes through host memory */
    int nccl_version;              /* 0 = that of the header */
    const char *function;          /* of which function; NULL any */
    const struct cluster *cluster; /* NULL = all ranks are on one machine */
    ddp_result result[MAX_MACHINE_RANKS];
    char line[MAX_MACHINE_RANKS][512];
} job;

/* Machines of ranks. */
typedef struct cluster {
    const char *name;
    int size, machine[MAX_MACHINE_RANKS];
    int block; /* ranks of a block that reduces inside a machine first; 0 = none: all ranks at once */
} cluster;

/* Rank 1's allocation number job.no_memory_at fails while it creates its group. */
static thread_local int allocation;
static void *alloc_fn(size_t size_bytes, void *) {
    return allocation && --allocation == 0 ? NULL : malloc(size_bytes);
}
static void free_fn(void *memory, void *) { free(memory); }

static int failures, checks;

static void check(int good, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void check(int good, const char *format, ...) {
    va_list args;
    __atomic_add_fetch(&checks, 1, __ATOMIC_RELAXED);
    if (good || __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED) > 40) return;
    va_start(args, format);
    printf("%s, seed %llu: ", ranks_current, (unsigned long long)fake.seed);
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

static float *floats(size_t count) {
    void *p = NULL;
    return fake_malloc(&p, count * sizeof(float)) == cudaSuccess ? (float *)p : NULL;
}

static float value(int rank, int round, int i) { return (float)((rank + 1) * (round + 2) + i % 17); }

/* Kernels of the compute stream. */
static void fill(rank_state *s, float *p, int count, int round) {
    int rank = s->rank;
    fake_launch_work(s->stream, "fill", {{p, (size_t)count * 4, 1}}, [p, count, rank, round] {
        for (int i = 0; i < count; i++) ((float *)fake_view(p))[i] = value(rank, round, i);
    });
}
static void spoil(rank_state *s, float *p, int count) {
    fake_launch_work(s->stream, "spoil", {{p, (size_t)count * 4, 1}}, [p, count] {
        for (int i = 0; i < count; i++) ((float *)fake_view(p))[i] = -1e9f;
    });
}
/* Records the contents of p for the current work, and the expected contents. */
static float *keep(rank_state *s, const float *p, int count) {
    float *to = s->keep + s->kept * N, *expected = s->expected + s->kept * N;
    s->counts[s->kept++] = count;
    fake_launch_work(s->stream, "keep", {{p, (size_t)count * 4, 0}, {to, (size_t)count * 4, 1}},
                     [p, to, count] { memcpy(fake_view(to), fake_view(p), (size_t)count * 4); });
    return expected;
}

static ddp_result look_back(rank_state *s) {
    static thread_local float host[16 * N];
    RANKS_CHECK(s->cpu,
                fake_memcpy(host, s->keep, (size_t)s->kept * N * 4, cudaMemcpyDeviceToHost, s->stream)
                    == cudaSuccess,
                "copying back");
    for (int k = 0; k < s->kept; k++)
        for (int i = k * N; i < k * N + s->counts[k]; i++)
            RANKS_CHECK(s->cpu, host[i] == s->expected[i],
                        "seed %d: result %d element %d is %g instead of %g", (int)fake.seed, k, i % N,
                        (double)host[i], (double)s->expected[i]);
    return DDP_OK;
}

/* The user's own communicator and communication stream, which outlive the group. */
static ddp_result make_own(rank_state *s, ddp_cuda_desc *desc) {
    ncclUniqueId id;
    if (ddp_rank(s->cpu) == 0) ncclGetUniqueId(&id);
    RANKS_OK(s->cpu, ddp_broadcast(s->cpu, &id, sizeof id, DDP_U8, 0, NULL));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t made, state = ncclInProgress;
    config.blocking = job.own_comm != 2;
    made = ncclCommInitRankConfig(&desc->comm, s->size, id, s->rank, &config);
    while (made == ncclInProgress) {
        made = ncclCommGetAsyncError(desc->comm, &state);
        if (made == ncclSuccess) made = state;
    }
    RANKS_CHECK(s->cpu, made == ncclSuccess, "no communicator");
    RANKS_CHECK(s->cpu, fake_stream_create(&desc->comm_stream, 1) == cudaSuccess, "no stream");
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    rank_state *s = (rank_state *)calloc(1, sizeof *s);
    ddp_cuda_desc desc = job.desc;
    ddp_result result;
    (void)user;
    s->cpu = world;
    s->rank = ddp_rank(world);
    s->size = ddp_world_size(world);
    s->device = job.shared ? 0 : s->rank;
    if (job.nccl_version) fake_nccl_version = job.nccl_version;
    fake_set_device(s->device);
    fake_stream_create(&s->stream, 0);
    s->in = floats(N);
    s->out = floats(N);
    s->keep = floats(16 * N);
    s->spare = floats(MANY);
    fake_memset(s->keep, 0, 16 * N * 4, s->stream);
    fake_memset(s->spare, 0, MANY * 4, s->stream);
    fake_synchronize(s->stream);
    fake_record_from_here();
    desc.stream = s->stream;
    desc.order = job.order;
    desc.timeout_ms = job.timeout_ms;
    if (job.fault && s->rank == 1) fake_fail(job.function, 1, job.fault, 0, job.sticky);
    if (job.own_comm && make_own(s, &desc) != DDP_OK) return DDP_ERR_ENGINE;
    if (s->rank == 1) allocation = job.no_memory_at;
    machine_salt = job.cluster ? 1 + job.cluster->machine[s->rank] : 0;
    result = ddp_cuda_group_create(&s->group, world, &desc);
    if (s->rank == 1) {
        job.allocations_left = allocation;
        allocation = 0;
    }
    if (result == DDP_OK) result = job.run(s);
    job.result[s->rank] = result;
    snprintf(job.line[s->rank], sizeof job.line[0], "%s", result == DDP_OK ? "" : ddp_last_error());
    ddp_group_destroy(s->group);
    if (job.fault && s->rank == 1) fake_fault_fired(1);
    if (job.own_comm) {
        check(ncclCommDestroy(desc.comm) == ncclSuccess,
              "the user's communicator was destroyed with the group");
        fake_stream_destroy(desc.comm_stream);
    }
    fake_free(s->in);
    fake_free(s->out);
    fake_free(s->keep);
    fake_free(s->spare);
    fake_stream_destroy(s->stream);
    free(s);
    return job.may_fail ? DDP_OK : result;
}

static int notices; /* that payloads go through the host */
static void take_notice(const char *text, void *user) {
    (void)user;
    if (strstr(text, "ranks share a device: collectives go through host memory, which is slow"))
        __atomic_add_fetch(&notices, 1, __ATOMIC_SEQ_CST);
}

/* Runs a program on ranks with one device each. */
static void run_on(int size, uint64_t seed, program_fn program) {
    ddp_launch_desc launch = DDP_ZERO;
    ddp_result result;
    std::string left;
    job.run = program;
    fake_start(size, seed);
    fake_nccl_fresh();
    fake_nccl.connects = job.connects;
    fake_nccl.held = job.held;
    launch.world_size = size;
    launch.mode = DDP_LAUNCH_THREADS;
    /* The timeout of the watchdogs too: a machine that stands still for a moment makes no rank fail. */
    launch.group.timeout_ms = job.silence_ms ? job.silence_ms : 30000;
    launch.group.log_fn = take_notice;
    launch.group.alloc_fn = alloc_fn;
    launch.group.free_fn = free_fn;
    launch.no_affinity = 1;
    fake.patient = job.patient;
    memset(job.result, 0, sizeof job.result);
    result = ddp_launch(&launch, rank_main, NULL);
    fake_host_fence();
    if (job.mismatch) check(fake_expect("mismatch: collective") > 0, "W=%d: the calls did not differ", size);
    check(result == DDP_OK, "W=%d: %s", size, ddp_last_error());
    if (!job.patient && !job.may_fail)
        check(fake_nccl.dropped == 0, "W=%d: an abort ended %d registrations or operations", size,
              fake_nccl.dropped);
    check(fake_failures() == 0, "W=%d: the fake reports failures%s%s", size,
          job.fault ? " after the failure of " : "", fake.fault.text.c_str());
    left = fake_left();
    check(left.empty(), "W=%d: leaked%s%s\n%s", size, job.fault ? " after the failure of " : "",
          fake.fault.text.c_str(), left.c_str());
}

static void run_seeds(program_fn program, int seeds) {
    seeds = seeds / DDP_TEST_SLOWDOWN + (DDP_TEST_SLOWDOWN > 1);
    for (int size = 1; size <= MAX_RANKS; size++)
        for (int seed = 0; seed < seeds && (DDP_TEST_SLOWDOWN == 1 || size != 2); seed++)
            run_on(size, (uint64_t)(seeds > 1 ? seed : size), program);
}

/* The calls of a rank on its device since fake_record_from_here must contain none of these. */
static ddp_result never(rank_state *s, const char *const *words) {
    std::string record = fake_record(s->device);
    for (; *words; words++)
        RANKS_CHECK(s->cpu, record.find(*words) == std::string::npos, "%s appears in\n%s", *words,
                    record.c_str());
    return DDP_OK;
}
static const char *const no_host_waits[] = {
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMalloc(", "cudaFree(", "FAILS", NULL};

/* ---- collectives ---- */

static float summed(int size, int round, int i) {
    float sum = 0;
    for (int r = 0; r < size; r++) sum += value(r, round, i);
    return sum;
}

/* One collective between kernels that fill its input and overwrite both buffers afterwards. */
static ddp_result collective(rank_state *s, int kind, int round, int async) {
    ddp_work work = DDP_ZERO, *w = async ? &work : NULL;
    int part = N / s->size, root = round % s->size, me = s->rank, n = N;
    float *expected;
    size_t counts[MAX_RANKS], mine[MAX_RANKS];
    for (int r = 0; r < s->size; r++) {
        counts[r] = (size_t)(part - r);
        mine[r] = (size_t)(part - me);
    }
    fill(s, s->in, N, round);
    spoil(s, s->out, N);
    if (kind == 0) RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, w));
    if (kind == 1) RANKS_OK(s->cpu, ddp_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_MAX, root, w));
    if (kind == 2) RANKS_OK(s->cpu, ddp_broadcast(s->group, s->in, N, DDP_F32, root, w));
    if (kind == 3) RANKS_OK(s->cpu, ddp_all_gather(s->group, s->in, s->out, (size_t)part, DDP_F32, w));
    if (kind == 4)
        RANKS_OK(s->cpu, ddp_reduce_scatter(s->group, s->in, s->out, (size_t)part, DDP_F32, DDP_OP_SUM, w));
    if (kind == 5) RANKS_OK(s->cpu, ddp_all_to_all(s->group, s->in, s->out, (size_t)part, DDP_F32, w));
    if (kind == 6) RANKS_OK(s->cpu, ddp_gather(s->group, s->in, s->out, (size_t)part, DDP_F32, root, w));
    if (kind == 7) RANKS_OK(s->cpu, ddp_scatter(s->group, s->in, s->out, (size_t)part, DDP_F32, root, w));
    if (kind == 8)
        RANKS_OK(s->cpu, ddp_all_gather_v(s->group, s->in, mine[0], s->out, counts, NULL, DDP_F32, w));
    if (kind == 9)
        RANKS_OK(s->cpu, ddp_all_to_all_v(s->group, s->in, counts, NULL, s->out, mine, NULL, DDP_F32, w));
    if (kind == 10) RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->in, N, DDP_F32, DDP_OP_AVG, w));
    if (async) fill(s, s->spare, N, round);
    RANKS_OK(s->cpu, ddp_wait(s->group, &work));
    if (kind == 1 || kind == 6) n = me == root ? N : 0;
    if (kind == 4 || kind == 7) n = part;
    if (kind == 8) n = s->size * part - s->size * (s->size - 1) / 2;
    if (kind == 9) n = s->size * (int)mine[0];
    if (n > 0) {
        expected = keep(s, kind == 2 || kind == 10 ? s->in : s->out, n);
        for (int i = 0, r = 0, at = 0; i < n; i++, at++) { /* element at of the part from rank r */
            int length = kind == 8 ? (int)counts[r] : kind == 9 ? (int)mine[0] : part;
            if (at == length) {
                at = 0;
                r++;
            }
            int start = 0; /* of this rank's part within the data of rank r */
            for (int k = 0; kind == 9 && k < me; k++) start += part - k;
            expected[i] = kind == 0                             ? summed(s->size, round, i)
                          : kind == 1                           ? value(s->size - 1, round, i)
                          : kind == 2                           ? value(root, round, i)
                          : kind == 3 || kind == 6 || kind == 8 ? value(r, round, at)
                          : kind == 4                           ? summed(s->size, round, me * part + i)
                          : kind == 5                           ? value(r, round, me * part + at)
                          : kind == 7                           ? value(root, round, me * part + i)
                          : kind == 9                           ? value(r, round, start + at)
                                                                : summed(s->size, round, i) / (float)s->size;
        }
    }
    spoil(s, s->in, N);
    spoil(s, s->out, N);
    return DDP_OK;
}

static ddp_result collectives(rank_state *s) {
    for (int kind = 0; kind < 11; kind++) { /* the first call of each kind can allocate buffers */
        RANKS_OK(s->cpu, collective(s, kind, kind, kind % 2));
    }
    RANKS_OK(s->cpu, look_back(s));
    s->kept = 0;
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    fake_record_from_here();
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    for (int kind = 0; kind < 11; kind++) RANKS_OK(s->cpu, collective(s, kind, kind + 1, (kind + 1) % 2));
    RANKS_OK(s->cpu, never(s, no_host_waits));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu)); /* the rank that shares the device has checked too */
    return look_back(s);
}

/* Several calls in flight at once, waited for in another order. */
static ddp_result several(rank_state *s) {
    ddp_work work[3] = {DDP_ZERO, DDP_ZERO, DDP_ZERO};
    float *expected;
    for (int round = 0; round < 3; round++) {
        for (int k = 0; k < 3; k++) {
            fill(s, s->in + 200 * k, 200, round + k);
            RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in + 200 * k, s->in + 200 * k, 200, DDP_F32,
                                            DDP_OP_SUM, &work[k]));
        }
        for (int k = 2; k >= 0; k--) {
            RANKS_OK(s->cpu, ddp_wait(s->group, &work[k]));
            expected = keep(s, s->in + 200 * k, 200);
            for (int i = 0; i < 200; i++) expected[i] = summed(s->size, round + k, i);
        }
    }
    return look_back(s);
}

/* ddp_test returns done only after the data has arrived. */
static ddp_result tested(rank_state *s) {
    ddp_work work = DDP_ZERO;
    int done = 0;
    fill(s, s->in, N, 1);
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, &work));
    while (!done) RANKS_OK(s->cpu, ddp_test(s->group, &work, &done));
    RANKS_CHECK(s->cpu, ((float *)fake_view(s->out))[N - 1] == summed(s->size, 1, N - 1),
                "done, but the data has not arrived");
    RANKS_OK(s->cpu, ddp_wait(s->group, &work));
    return DDP_OK;
}

/* Calls follow the stream that was set last. */
static ddp_result other_stream(rank_state *s) {
    cudaStream_t first = s->stream, second;
    float *expected;
    RANKS_CHECK(s->cpu,
                ddp_cuda_set_stream(NULL, first) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "group is NULL"),
                "%s", ddp_last_error());
    RANKS_CHECK(s->cpu,
                ddp_cuda_set_stream(s->cpu, first) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "group is not a CUDA group"),
                "%s", ddp_last_error());
    RANKS_CHECK(s->cpu, ddp_cuda_comm_stream(NULL) == 0 && ddp_cuda_comm_stream(s->cpu) == 0,
                "a stream of no group of GPUs");
    RANKS_CHECK(s->cpu, ddp_cuda_comm_stream(s->group) != 0 && ddp_cuda_comm_stream(s->group) != first,
                "the group has no stream of its own");
    fake_stream_create(&second, 0);
    for (int round = 0; round < 4; round++) {
        s->stream = round % 2 ? second : first;
        RANKS_OK(s->cpu, ddp_cuda_set_stream(s->group, s->stream));
        fill(s, round % 2 ? s->in : s->spare, N, round);
        RANKS_OK(s->cpu, ddp_all_reduce(s->group, round % 2 ? s->in : s->spare, round % 2 ? s->in : s->spare,
                                        N, DDP_F32, DDP_OP_SUM, NULL));
        expected = keep(s, round % 2 ? s->in : s->spare, N);
        for (int i = 0; i < N; i++) expected[i] = summed(s->size, round, i);
    }
    fake_synchronize(first);
    fake_synchronize(second);
    RANKS_OK(s->cpu, look_back(s));
    RANKS_OK(s->cpu, ddp_cuda_set_stream(s->group, first));
    fake_stream_destroy(second);
    s->stream = first;
    return DDP_OK;
}

/* Sends and receives: a ring in a batch, a pair without one, and asynchronous ones. */
static ddp_result messages(rank_state *s) {
    int next = (s->rank + 1) % s->size, before = (s->rank + s->size - 1) % s->size;
    ddp_work work = DDP_ZERO, back = DDP_ZERO;
    float *expected;
    if (s->size == 1) return DDP_OK;
    for (int round = 0; round < 3; round++) {
        fill(s, s->in, N, round);
        spoil(s, s->out, N);
        if (round == 0) {
            RANKS_OK(s->cpu, ddp_p2p_begin(s->group));
            RANKS_OK(s->cpu, ddp_send(s->group, s->in, N, DDP_F32, next, 3, NULL));
            RANKS_OK(s->cpu, ddp_recv(s->group, s->out, N, DDP_F32, before, 3, NULL));
            RANKS_OK(s->cpu, ddp_p2p_end(s->group));
        } else if (round == 1) {
            if (s->rank % 2 == 0 && s->rank + 1 < s->size)
                RANKS_OK(s->cpu, ddp_send(s->group, s->in, N, DDP_F32, s->rank + 1, 0, NULL));
            if (s->rank % 2 == 1)
                RANKS_OK(s->cpu, ddp_recv(s->group, s->out, N, DDP_F32, s->rank - 1, 0, NULL));
            if (s->rank % 2 == 0) {
                spoil(s, s->in, N);
                continue;
            }
        } else {
            if (s->rank == 0) RANKS_OK(s->cpu, ddp_send(s->group, s->in, N, DDP_F32, next, 0, &work));
            RANKS_OK(s->cpu, ddp_recv(s->group, s->out, N, DDP_F32, before, 0, &back));
            if (s->rank != 0) {
                RANKS_OK(s->cpu, ddp_wait(s->group, &back));
                RANKS_OK(s->cpu, ddp_send(s->group, s->in, N, DDP_F32, next, 0, &work));
            }
            RANKS_OK(s->cpu, ddp_wait(s->group, &work));
            RANKS_OK(s->cpu, ddp_wait(s->group, &back));
        }
        expected = keep(s, s->out, N);
        for (int i = 0; i < N; i++) expected[i] = value(before, round, i);
        spoil(s, s->in, N);
    }
    return look_back(s);
}

/* The bits of the CPU, whatever NCCL's own order is. */
static ddp_result tree(rank_state *s) {
    static const ddp_op ops[] = {DDP_OP_SUM, DDP_OP_AVG};
    float *mine = (float *)malloc(N * 4), *expected, *from = s->in;
    int rank = s->rank, odd = N - 7;
    for (int k = 0; k < 6; k++) {
        size_t count = k < 2 ? (size_t)odd : (size_t)(N / s->size); /* per rank: reduce_scatter */
        ddp_work work = DDP_ZERO;
        for (int i = 0; i < N; i++) mine[i] = ldexpf((float)(random() % 20011), (int)(random() % 30) - rank);
        float *copy = (float *)malloc(N * 4);
        memcpy(copy, mine, N * 4);
        fake_launch_work(s->stream, "fill", {{from, N * 4, 1}}, [from, copy] {
            memcpy(fake_view(from), copy, N * 4);
            free(copy);
        });
        spoil(s, s->out, N);
        if (k < 2)
            RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, count, DDP_F32, ops[k % 2], NULL));
        else if (k < 4)
            RANKS_OK(s->cpu, ddp_reduce_scatter(s->group, s->in, s->out, count, DDP_F32, ops[k % 2], &work));
        else
            RANKS_OK(s->cpu,
                     ddp_reduce(s->group, s->in, s->out, count, DDP_F32, ops[k % 2], s->size - 1, &work));
        RANKS_OK(s->cpu, ddp_wait(s->group, &work));
        if (k >= 4 && s->rank != s->size - 1) {
            RANKS_OK(s->cpu, ddp_reduce(s->cpu, mine, NULL, count, DDP_F32, ops[k % 2], s->size - 1, NULL));
            continue;
        }
        expected = keep(s, s->out, (int)count);
        if (k < 2)
            RANKS_OK(s->cpu, ddp_all_reduce(s->cpu, mine, expected, count, DDP_F32, ops[k % 2], NULL));
        else if (k < 4)
            RANKS_OK(s->cpu, ddp_reduce_scatter(s->cpu, mine, expected, count, DDP_F32, ops[k % 2], NULL));
        else
            RANKS_OK(s->cpu,
                     ddp_reduce(s->cpu, mine, expected, count, DDP_F32, ops[k % 2], s->size - 1, NULL));
        spoil(s, s->in, N);
        spoil(s, s->out, N);
    }
    free(mine);
    return look_back(s);
}

/* Splits work next to their parent, and end before it. */
static ddp_result splits(rank_state *s) {
    ddp_group *half = NULL, *none = NULL;
    float *expected;
    /* Ranks compare their texts, which are in host memory: once they were passed to NCCL unchanged. */
    ddp_mesh *mesh;
    ddp_mesh_desc desc = DDP_ZERO;
    desc.ndim = 2, desc.shape[0] = 1, desc.shape[1] = s->size, desc.names[0] = "pp", desc.names[1] = "dp";
    RANKS_OK(s->cpu, ddp_mesh_create(&mesh, s->group, &desc));
    RANKS_CHECK(s->cpu, ddp_world_size(ddp_mesh_group(mesh, "dp")) == s->size, "a mesh of %d ranks", s->size);
    ddp_mesh_destroy(mesh);
    RANKS_OK(s->cpu, ddp_group_split(s->group, s->rank % 2, -s->rank, &half));
    RANKS_OK(s->cpu, ddp_group_split(s->group, s->rank == 0 ? -1 : 7, 0, &none));
    RANKS_CHECK(s->cpu, !none == (s->rank == 0), "a split without color");
    for (int round = 0; round < 3; round++) {
        fill(s, s->in, N, round);
        RANKS_OK(s->cpu, ddp_all_reduce(half, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL));
        expected = keep(s, s->out, N);
        for (int i = 0; i < N; i++) {
            expected[i] = 0;
            for (int r = s->rank % 2; r < s->size; r += 2) expected[i] += value(r, round, i);
        }
        RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->in, N, DDP_F32, DDP_OP_SUM, NULL));
        expected = keep(s, s->in, N);
        for (int i = 0; i < N; i++) expected[i] = summed(s->size, round, i);
    }
    RANKS_OK(s->cpu, look_back(s));
    ddp_group_destroy(none);
    ddp_group_destroy(half);
    return DDP_OK;
}

/* Calls on two groups reach NCCL in program order, in whatever order they are waited for: the order that
   NCCL_LAUNCH_ORDER_IMPLICIT=1 keeps on the GPU. */
static ddp_result launch_order(rank_state *s) {
    ddp_group *twin = NULL;
    ddp_work work[6];
    std::string order, record;
    RANKS_OK(s->cpu, ddp_group_split(s->group, 0, 0, &twin));
    fill(s, s->in, N, 0);
    fill(s, s->spare, N, 0);
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    fake_record_from_here();
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    for (int k = 0; k < 6; k++) {
        int second = (k * 5 + 1) % 3 == 0;
        RANKS_OK(s->cpu, ddp_all_reduce(second ? twin : s->group, second ? s->spare : s->in,
                                        second ? s->spare : s->in, N, DDP_F32, DDP_OP_SUM, &work[k]));
        if (k == 2) RANKS_OK(s->cpu, ddp_wait(s->group, &work[0]));
        order += second ? "2" : "1";
    }
    record = fake_record(s->device);
    for (size_t at = 0, k = 0; (at = record.find("ncclAllReduce(", at)) != std::string::npos; at++, k++) {
        size_t comm = record.find(", c", at);
        RANKS_CHECK(s->cpu, k < 6 && record[comm + 3] == order[k], "call %d of %s in\n%s", (int)k,
                    order.c_str(), record.c_str());
        order[k] = '.';
    }
    RANKS_CHECK(s->cpu, order == "......", "calls are missing: %s", order.c_str());
    for (int k = 1; k < 6; k++) RANKS_OK(s->cpu, ddp_wait((k * 5 + 1) % 3 == 0 ? twin : s->group, &work[k]));
    ddp_group_destroy(twin);
    return DDP_OK;
}

/* Group memory is zeroed before its first use, and freed with the group. */
static ddp_result group_memory(rank_state *s) {
    void *first = NULL, *second = NULL;
    float *expected;
    RANKS_OK(s->cpu, ddp_group_alloc(s->group, N * 4, &first));
    RANKS_OK(s->cpu, ddp_group_alloc(s->group, N * 4, &second));
    expected = keep(s, (float *)first, N);
    for (int i = 0; i < N; i++) expected[i] = 0;
    fill(s, (float *)first, N, 1);
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, first, second, N, DDP_F32, DDP_OP_SUM, NULL));
    expected = keep(s, (float *)second, N);
    for (int i = 0; i < N; i++) expected[i] = summed(s->size, 1, i);
    RANKS_OK(s->cpu, look_back(s));
    return ddp_group_free(s->group, first); /* second stays */
}

/* A captured step is launched again and again. */
static ddp_result captured_step(rank_state *s) {
    ddp_work work = DDP_ZERO;
    float *expected;
    RANKS_OK(s->cpu, collective(s, 0, 0, 0)); /* one-time allocations happen before the capture */
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->spare, N, DDP_F32, DDP_OP_MAX, NULL));
    RANKS_OK(s->cpu, look_back(s));
    s->kept = 0;
    fake_relax_capture();
    fake_synchronize(s->stream);
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    fake_capture_begin(s->stream);
    fill(s, s->in, N, 5);
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->out, s->spare, N, DDP_F32, DDP_OP_MAX, &work));
    RANKS_OK(s->cpu, ddp_wait(s->group, &work));
    spoil(s, s->in, N);
    fake_graph *graph = fake_capture_end(s->stream);
    for (int round = 0; round < 3; round++) {
        spoil(s, s->spare, N);
        fake_graph_launch(graph, s->stream);
        expected = keep(s, s->spare, N);
        for (int i = 0; i < N; i++) expected[i] = summed(s->size, 5, i);
    }
    return look_back(s);
}

/* Reductions larger than the scratch are still captured, in more rounds: nothing is allocated, and no rank
   waits for another one. No watchdog waits for captured work. */
static ddp_result captured_large(rank_state *s) {
    static const char *const no_allocation[] = {"cudaStreamSynchronize", "cudaMalloc(", "cudaFree(", "FAILS",
                                                NULL};
    int count = MANY / s->size, first = s->rank * count;
    float last, scattered[2];
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_MAX, NULL));
    fake_relax_capture();
    fake_synchronize(s->stream);
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    fake_record_from_here();
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    fake_capture_begin(s->stream);
    fill(s, s->spare, MANY, 5);
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->spare, s->spare, MANY, DDP_F32, DDP_OP_MAX, NULL));
    RANKS_OK(s->cpu, ddp_reduce(s->group, s->spare, s->rank == 1 ? s->spare : NULL, MANY, DDP_F32, DDP_OP_MAX,
                                1, NULL));
    RANKS_OK(s->cpu,
             ddp_reduce_scatter(s->group, s->spare, s->keep, (size_t)count, DDP_F32, DDP_OP_MAX, NULL));
    fake_graph *graph = fake_capture_end(s->stream);
    RANKS_OK(s->cpu, never(s, no_allocation));
    ranks_sleep_us(2 * 1000 * job.timeout_ms);
    RANKS_OK(s->cpu, ddp_group_status(s->group));
    fake_graph_launch(graph, s->stream);
    for (int k = 0; k < 2; k++)
        RANKS_CHECK(
            s->cpu,
            fake_memcpy(&scattered[k], s->keep + k * (count - 1), 4, cudaMemcpyDeviceToHost, s->stream)
                == cudaSuccess,
            "copying back");
    RANKS_CHECK(s->cpu,
                fake_memcpy(&last, s->spare + MANY - 1, 4, cudaMemcpyDeviceToHost, s->stream) == cudaSuccess,
                "copying back");
    RANKS_CHECK(s->cpu, last == value(s->size - 1, 5, MANY - 1), "the last element is %g", (double)last);
    RANKS_CHECK(s->cpu,
                scattered[0] == value(s->size - 1, 5, first)
                    && scattered[1] == value(s->size - 1, 5, first + count - 1),
                "the block of this rank is from %g to %g", (double)scattered[0], (double)scattered[1]);
    return ddp_barrier(s->cpu);
}

/* A group is destroyed while its work is still on the stream. */
static ddp_result not_waited_for(rank_state *s) {
    ddp_work work = DDP_ZERO;
    fill(s, s->in, N, 1);
    return ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, &work);
}

/* the calling thread can have another current device */
static ddp_result from_elsewhere(rank_state *s) {
    for (int kind = 0; kind < 3; kind++) {
        fake_set_device(s->rank);
        fill(s, s->in, N, kind);
        fake_set_device((s->rank + 1) % s->size);
        RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32,
                                        kind == 2 ? DDP_OP_MAX : DDP_OP_SUM, NULL));
        fake_set_device(s->rank);
        float *expected = keep(s, s->out, N);
        for (int i = 0; i < N; i++)
            expected[i] = kind == 2 ? value(s->size - 1, kind, i) : summed(s->size, kind, i);
    }
    return look_back(s);
}

/* ---- gradients ---- */

#define PARAMS 5
static int uses[] = {100, 60, 200, 40, 200}; /* elements of each parameter: N in all */

typedef struct training {
    int adjacent, given, steps;
    ddp_dtype comm_dtype;
    int find_unused, hook;
} training;
static training plan;

static void backward(rank_state *s, float *grad, int count, int step, int p) {
    int rank = s->rank;
    fake_launch_work(s->stream, "backward", {{grad, (size_t)count * 4, 1}}, [grad, count, step, p, rank] {
        for (int i = 0; i < count; i++) ((float *)fake_view(grad))[i] = value(rank, step + p, i);
    });
}

static void optimizer(rank_state *s, const float *grad, float *weight, int count) {
    fake_launch_work(
        s->stream, "optimizer",
        {{grad, (size_t)count * 4, 0}, {weight, (size_t)count * 4, 0}, {weight, (size_t)count * 4, 1}},
        [grad, weight, count] {
            for (int i = 0; i < count; i++) ((float *)fake_view(weight))[i] += ((float *)fake_view(grad))[i];
        });
}

/* A bucket hook: its kernels, on the communication stream, run after those that make the gradients, before
   and after the all-reduce. */
static ddp_result doubles(ddp_group *group, ddp_bucket *bucket, void *user) {
    float *p = (float *)bucket->data;
    size_t count = bucket->count;
    ddp_result result = DDP_OK;
    for (int side = 0; side < 2 && result == DDP_OK; side++) {
        fake_launch_work(ddp_cuda_comm_stream(group), "hook", {{p, count * 4, 0}, {p, count * 4, 1}},
                         [p, count, side] {
                             for (size_t i = 0; i < count; i++)
                                 ((float *)fake_view(p))[i] = side ? ((float *)fake_view(p))[i] - 1
                                                                   : ((float *)fake_view(p))[i] * 2;
                         });
        if (side == 0) result = ddp_all_reduce(group, p, p, count, DDP_F32, DDP_OP_AVG, NULL);
    }
    return (void)user, result;
}

/* Buckets are reduced after the kernels that make their gradients, and before those that use them. After the
   first step the host never waits for it. */
static ddp_result trains(rank_state *s) {
    ddp_param params[PARAMS];
    ddp_reducer *reducer = NULL;
    ddp_reducer_desc desc = DDP_ZERO;
    float *weights = s->keep, *grads = s->spare;
    memset(params, 0, sizeof params);
    for (int p = 0, at = 0; p < PARAMS; at += uses[p++]) {
        params[p].value.data = weights + at;
        params[p].value.dtype = DDP_F32;
        params[p].value.ndim = 1;
        params[p].value.shape[0] = uses[p];
        if (plan.given) params[p].grad.data = plan.adjacent ? grads + at : (p % 2 ? s->in : s->spare) + at;
    }
    desc.params = params;
    desc.param_count = PARAMS;
    desc.bucket_cap_bytes = 800;
    desc.first_bucket_bytes = 400;
    desc.comm_dtype = plan.comm_dtype;
    desc.find_unused = plan.find_unused;
    desc.hook = plan.hook ? doubles : NULL;
    RANKS_OK(s->cpu, ddp_reducer_create(&reducer, s->group, &desc));
    for (int step = 0; step < plan.steps; step++) {
        if (step == 2) {
            RANKS_OK(s->cpu, ddp_barrier(s->cpu));
            fake_record_from_here();
            RANKS_OK(s->cpu, ddp_barrier(s->cpu));
        }
        for (int p = PARAMS - 1; p >= 0; p--) {
            if (plan.find_unused && p == 1 && step % 2) continue;
            backward(s, (float *)params[p].grad.data, uses[p], step, p);
            RANKS_OK(s->cpu, ddp_reducer_ready(reducer, p));
        }
        RANKS_OK(s->cpu, ddp_reducer_wait(reducer));
        for (int p = 0; p < PARAMS; p++)
            optimizer(s, (float *)params[p].grad.data, (float *)params[p].value.data, uses[p]);
    }
    if (!plan.find_unused && s->size > 1) RANKS_OK(s->cpu, never(s, no_host_waits));
    s->kept = 1;
    s->counts[0] = N;
    for (int p = 0, at = 0; p < PARAMS; at += uses[p++])
        for (int i = 0; i < uses[p]; i++) {
            s->expected[at + i] = 0;
            for (int step = 0; step < plan.steps; step++)
                if (!(plan.find_unused && p == 1 && step % 2))
                    s->expected[at + i] += plan.hook ? 2 * summed(s->size, step + p, i) / (float)s->size - 1
                                                     : summed(s->size, step + p, i) / (float)s->size;
        }
    RANKS_OK(s->cpu, look_back(s));
    ddp_reducer_destroy(reducer);
    return DDP_OK;
}

static void reducers(void) {
    for (int way = 0; way < 6; way++) {
        memset(&plan, 0, sizeof plan);
        plan.steps = 5;
        plan.given = way != 0;
        plan.adjacent = way == 1;
        plan.find_unused = way == 3;
        if (way == 4) plan.comm_dtype = DDP_BF16;
        plan.hook = way == 5;
        for (int seed = 0; seed < (DDP_TEST_SLOWDOWN > 1 ? 1 : 4); seed++) {
            run_on(2, (uint64_t)(seed + way), trains);
            run_on(4, (uint64_t)(seed + way), trains);
        }
    }
}

/* ---- failures ---- */

static int settled; /* ranks that have their error */

/* Waits for the group to fail; its line. */
static ddp_result fails(rank_state *s, char *line, size_t size_bytes) {
    double limit = ddp_now() + 20 * DDP_TEST_SLOWDOWN;
    ddp_result result = DDP_OK;
    while (result == DDP_OK && ddp_now() < limit) {
        result = ddp_group_status(s->group);
        if (result == DDP_OK) ranks_sleep_us(1000);
    }
    snprintf(line, size_bytes, "%s", ddp_last_error());
    RANKS_CHECK(s->cpu, result != DDP_OK, "the group did not fail");
    __atomic_add_fetch(&settled, 1, __ATOMIC_SEQ_CST);
    return DDP_OK;
}

/* The last rank is missing. The watchdog frees the streams of the others; their errors name the missing rank
   and the call. */
static ddp_result one_is_missing(rank_state *s) {
    ddp_work work = DDP_ZERO;
    char line[512], name[32];
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    if (s->rank < s->size - 1) {
        ddp_result result = ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, &work);
        if (result == DDP_OK) result = ddp_wait(s->group, &work);
        fake_synchronize(s->stream); /* returns once the communicator is aborted */
    } else {
        while (__atomic_load_n(&settled, __ATOMIC_SEQ_CST) < s->size - 1) ranks_sleep_us(1000);
    }
    RANKS_OK(s->cpu, fails(s, line, sizeof line));
    snprintf(name, sizeof name, "missing: rank %d", s->size - 1);
    RANKS_CHECK(s->cpu,
                strstr(line, name) && strstr(line, "seq=2 ddp_all_reduce f32 count=600 sum of group=world")
                    && strstr(line, "whose last call is seq=1"),
                "the line is: %s", line);
    RANKS_CHECK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL) != DDP_OK,
                "a failed group works");
    RANKS_CHECK(s->cpu, strstr(ddp_last_error(), name), "the line is: %s", ddp_last_error());
    return DDP_OK;
}

/* The watchdog of the last rank is silent: the errors of the others name it and their current call. */
static ddp_result one_is_silent(rank_state *s) {
    char line[512], name[48];
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    if (s->rank < s->size - 1) {
        ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL);
        fake_synchronize(s->stream);
        RANKS_OK(s->cpu, fails(s, line, sizeof line));
        snprintf(name, sizeof name, "missing: rank %d", s->size - 1);
        RANKS_CHECK(s->cpu, strstr(line, name) && strstr(line, "seq=2 ddp_all_reduce"), "the line is: %s",
                    line);
        return DDP_OK;
    }
    __atomic_store_n(&fake.mute, s->device + 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&settled, __ATOMIC_SEQ_CST) < s->size - 1) ranks_sleep_us(1000);
    __atomic_store_n(&fake.mute, 0, __ATOMIC_RELEASE);
    return fails(s, line, sizeof line);
}

/* NCCL reports an asynchronous error on one rank. */
static ddp_result error_from_behind(rank_state *s) {
    char line[512];
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    if (s->rank == s->size - 1) fake_async_error(s->rank, ncclRemoteError);
    RANKS_OK(s->cpu, fails(s, line, sizeof line));
    RANKS_CHECK(s->cpu,
                strstr(line, ncclGetErrorString(ncclRemoteError)) && strstr(line, "of group=world")
                    && !strstr(line, "missing: rank"),
                "the line is: %s", line);
    RANKS_CHECK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL) != DDP_OK,
                "a failed group works");
    return DDP_OK;
}

/* NCCL reports an error on rank 0 while it waits for the last rank, which is missing: every rank's error
   names the error, the call and the missing rank. */
static ddp_result error_while_behind(rank_state *s) {
    char line[512], name[80];
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    if (s->rank < s->size - 1) ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL);
    if (s->rank == 0) {
        ranks_sleep_us(1000000); /* the others have published their progress */
        fake_async_error(0, ncclRemoteError);
    }
    RANKS_OK(s->cpu, fails(s, line, sizeof line));
    if (s->rank < s->size - 1) fake_synchronize(s->stream);
    snprintf(name, sizeof name, "missing: rank %d, whose last call is seq=1 ddp_all_reduce", s->size - 1);
    RANKS_CHECK(s->cpu,
                strstr(line, ncclGetErrorString(ncclRemoteError))
                    && strstr(line, "seq=2 ddp_all_reduce f32 count=600 sum of group=world")
                    && strstr(line, name),
                "the line is: %s", line);
    return DDP_OK;
}

/* All except the last rank wait for it over the control group, in a call of the host, when NCCL reports an
   error there: their wait also ends. */
static ddp_result error_while_voting(rank_state *s) {
    char line[512];
    void *memory;
    double begin = ddp_now();
    if (s->rank < s->size - 1) {
        RANKS_CHECK(s->cpu, ddp_group_alloc(s->group, 4096, &memory) != DDP_OK,
                    "there is memory without the last rank");
        RANKS_CHECK(s->cpu, strstr(ddp_last_error(), ncclGetErrorString(ncclRemoteError)), "the line is: %s",
                    ddp_last_error());
        RANKS_CHECK(s->cpu, ddp_now() - begin < 10 * DDP_TEST_SLOWDOWN, "it took %.1f s", ddp_now() - begin);
    } else {
        ranks_sleep_us(100000);
        fake_async_error(s->rank, ncclRemoteError);
    }
    return fails(s, line, sizeof line);
}

static ddp_result one_aborts(rank_state *s) {
    char line[512];
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu)); /* all have issued their call */
    if (s->rank == 0) RANKS_OK(s->cpu, ddp_group_abort(s->group));
    RANKS_OK(s->cpu, fails(s, line, sizeof line));
    RANKS_CHECK(s->cpu, strstr(line, "rank 0"), "the line is: %s", line);
    return DDP_OK;
}

/* A rank leaves while the others wait for it. */
static ddp_result one_leaves(rank_state *s) {
    char line[512];
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    if (s->rank == 0) return DDP_OK;
    ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL);
    fake_synchronize(s->stream);
    RANKS_OK(s->cpu, fails(s, line, sizeof line));
    RANKS_CHECK(s->cpu,
                strstr(line, "rank 0") && strstr(line, "destroyed the group")
                    && ddp_group_status(s->group) == DDP_ERR_PEER_LOST,
                "the line is: %s", line);
    return DDP_OK;
}

/* The count of the last rank differs: every rank's error names both calls. */
static ddp_result different_calls(rank_state *s) {
    char line[512];
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu)); /* all have issued their call */
    ddp_all_reduce(s->group, s->in, s->out, s->rank == s->size - 1 ? N - 4 : N, DDP_F32, DDP_OP_SUM, NULL);
    RANKS_OK(s->cpu, fails(s, line, sizeof line));
    RANKS_CHECK(s->cpu,
                strstr(line, "count=600") && strstr(line, "count=596")
                    && ddp_group_status(s->group) == DDP_ERR_MISMATCH,
                "the line is: %s", line);
    return DDP_OK;
}

/* The last rank calls after the others' timeout. Each of them is stuck inside ncclCommSplit until its
   watchdog aborts. */
static ddp_result split_is_stuck(rank_state *s) {
    ddp_group *half = NULL;
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    __atomic_store_n(&fake_nccl.held, s->size, __ATOMIC_RELEASE);
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    ddp_result result = ddp_group_split(s->group, 0, 0, &half);
    RANKS_CHECK(s->cpu, result == DDP_ERR_TIMEOUT && !half, "a split without the last rank: %s",
                ddp_result_name(result));
    RANKS_CHECK(s->cpu, strstr(ddp_last_error(), "ncclCommSplit: timed out after"), "%s", ddp_last_error());
    return DDP_OK;
}

/* The same inside ncclCommInitRankConfig. No group is made, and every rank returns with one cause. */
static void init_is_stuck(int size) {
    job.held = size;
    job.may_fail = job.patient = 1;
    job.timeout_ms = 1000 * DDP_TEST_SLOWDOWN;
    run_on(size, (uint64_t)size, collectives);
    for (int r = 0; r < size; r++)
        check(job.result[r] == DDP_ERR_TIMEOUT
                  && strstr(job.line[r], "ncclCommInitRankConfig: timed out after"),
              "rank %d: %s: %s", r, ddp_result_name(job.result[r]), job.line[r]);
    job.held = job.may_fail = job.patient = job.timeout_ms = 0;
}

/* Every allocation of rank 1 fails in turn while a group is created: every rank returns with that cause, and
   none waits for the timeout. */
static void no_memory_alone(ddp_cuda_engine engine) {
    job.may_fail = job.patient = 1;
    job.desc.engine = engine;
    for (job.no_memory_at = 1, job.allocations_left = 0; !job.allocations_left && job.no_memory_at < 100;
         job.no_memory_at++) {
        double start = ddp_now();
        run_on(3, (uint64_t)job.no_memory_at, several);
        check(ddp_now() - start < 15 * DDP_TEST_SLOWDOWN, "allocation %d: %.1f s", job.no_memory_at,
              ddp_now() - start);
        for (int r = 0; r < 3 && !job.allocations_left; r++)
            check(job.result[r] == DDP_ERR_NO_MEMORY && (r == 1 || strstr(job.line[r], "rank 1")),
                  "allocation %d, rank %d: %s: %s", job.no_memory_at, r, ddp_result_name(job.result[r]),
                  job.line[r]);
    }
    check(job.allocations_left && job.no_memory_at > 5, "%d allocations", job.no_memory_at);
    job.no_memory_at = job.may_fail = job.patient = 0;
    job.desc = ddp_cuda_desc();
}

static void fails_on(int size, int seed, program_fn program) {
    settled = 0;
    job.patient = 1;
    run_on(size, (uint64_t)seed, program);
    job.timeout_ms = job.silence_ms = job.patient = job.mismatch = 0;
}

/* Call number failing.number of a function fails on the last rank, which then stays in the group. Every rank
   gets that cause with the number of the rank and its call. */
static struct {
    const char *function;
    int number;
} failing = {"cudaEventRecord", 2}; /* the first one orders the streams */
static ddp_result one_call_fails(rank_state *s) {
    char line[512], name[64];
    int last = s->rank == s->size - 1;
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    if (last) fake_fail(failing.function, s->device, failing.number, 0, 0);
    ddp_result result = ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL);
    if (last) RANKS_CHECK(s->cpu, result == DDP_ERR_ENGINE, "%s", ddp_result_name(result));
    RANKS_OK(s->cpu, fails(s, line, sizeof line));
    fake_synchronize(s->stream); /* returns once the communicator is aborted */
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    if (last) RANKS_CHECK(s->cpu, fake_fault_fired(1), "no call %d", failing.number);
    snprintf(name, sizeof name, "rank %d in ddp_all_reduce seq=2: ", s->size - 1);
    RANKS_CHECK(s->cpu, strstr(line, name) && strstr(line, failing.function), "the line is: %s", line);
    return DDP_OK;
}

/* A timeout is short only if it is what ends the group; then calls that must succeed before take a small part
   of it. */
static void watchdogs(void) {
    static const program_fn programs[] = {error_from_behind, one_aborts, one_leaves, different_calls};
    int seeds = DDP_TEST_SLOWDOWN > 1 ? 1 : 4;
    for (int size = 2; size <= MAX_RANKS; size++) {
        if (DDP_TEST_SLOWDOWN > 1 && size != 3) continue;
        /* On the device, and on the host, inside NCCL. */
        for (job.connects = 0; job.connects < 2; job.connects++) {
            job.timeout_ms = 1000 * DDP_TEST_SLOWDOWN;
            fails_on(size, size, one_is_missing);
        }
        job.connects = 0;
        job.timeout_ms = 1000 * DDP_TEST_SLOWDOWN;
        fails_on(size, size, split_is_stuck);
        init_is_stuck(size);
    }
    job.silence_ms = 2000;
    job.timeout_ms = 30000;
    fails_on(3, 0, one_is_silent);
    fails_on(3, 0, error_while_behind);
    fails_on(3, 0, error_while_voting);
    for (int k = 0; k < 4; k++)
        for (int size = 2; size <= MAX_RANKS; size++)
            for (int seed = 0; seed < seeds; seed++) {
                job.mismatch = programs[k] == different_calls;
                fails_on(size, seed, programs[k]);
            }
}

/* Some of every kind of call. Created objects are destroyed in any case. */
static ddp_result everything_in(rank_state *s, ddp_group **half, ddp_reducer **reducer, ddp_param *params) {
    ddp_work work = DDP_ZERO;
    ddp_reducer_desc desc = DDP_ZERO;
    void *memory = NULL;
    ddp_result result = ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL);
    if (result == DDP_OK)
        result = ddp_all_reduce(s->group, s->spare, s->spare, MANY, DDP_F32, DDP_OP_MAX, NULL);
    if (result == DDP_OK) result = ddp_all_to_all(s->group, s->in, s->out, N / 4, DDP_F32, &work);
    if (result == DDP_OK) result = ddp_wait(s->group, &work);
    if (result == DDP_OK) result = ddp_p2p_begin(s->group);
    if (result == DDP_OK) result = ddp_send(s->group, s->in, N, DDP_F32, 1 - s->rank, 0, NULL);
    if (result == DDP_OK) result = ddp_recv(s->group, s->out, N, DDP_F32, 1 - s->rank, 0, NULL);
    if (result == DDP_OK) result = ddp_p2p_end(s->group);
    if (result == DDP_OK) result = ddp_group_split(s->group, 0, -s->rank, half);
    if (result == DDP_OK) result = ddp_all_reduce(*half, s->in, s->out, N, DDP_F32, DDP_OP_AVG, NULL);
    if (result == DDP_OK) result = ddp_group_alloc(s->group, 4096, &memory);
    if (result == DDP_OK) result = ddp_group_free(s->group, memory);
    for (int p = 0; p < 2; p++) {
        params[p].value.data = s->keep + p * N;
        params[p].value.dtype = DDP_F32;
        params[p].value.ndim = 1;
        params[p].value.shape[0] = 100;
    }
    desc.params = params;
    desc.param_count = 2;
    if (result == DDP_OK) result = ddp_reducer_create(reducer, s->group, &desc);
    for (int step = 0; step < 3; step++) {
        for (int p = 0; p < 2 && result == DDP_OK; p++) {
            backward(s, (float *)params[p].grad.data, 100, step, p);
            result = ddp_reducer_ready(*reducer, p);
        }
        if (result == DDP_OK) result = ddp_reducer_wait(*reducer);
        for (int p = 0; p < 2 && result == DDP_OK; p++)
            optimizer(s, (float *)params[p].grad.data, (float *)params[p].value.data, 100);
    }
    if (result != DDP_OK) return result;
    s->kept = 2;
    s->counts[0] = s->counts[1] = 100;
    for (int p = 0; p < 2; p++)
        for (int i = 0; i < 100; i++) {
            s->expected[p * N + i] = 0;
            for (int step = 0; step < 3; step++)
                s->expected[p * N + i] += summed(s->size, step + p, i) / (float)s->size;
        }
    return DDP_OK;
}

static ddp_result everything(rank_state *s) {
    ddp_group *half = NULL;
    ddp_reducer *reducer = NULL;
    ddp_param params[2];
    memset(params, 0, sizeof params);
    ddp_result result = everything_in(s, &half, &reducer, params);
    std::string text = result == DDP_OK ? "" : ddp_last_error();
    if (result == DDP_OK) result = ddp_group_status(s->group);
    if (!fake_fault_fired(result == DDP_OK && s->rank == 1) && result == DDP_OK) result = look_back(s);
    ddp_reducer_destroy(reducer);
    ddp_group_destroy(half);
    return text.empty() ? result : ddp_fail(result, "%s", text.c_str());
}

/* The nth call of function (NULL: of any except polling) fails on rank 1, once or permanently. 0: no such
   call was made. */
static int told, silent;
static int error_at(const char *function, int n, int sticky) {
    static std::vector<std::string> seen; /* each call fails once */
    std::string name;
    const char *call, *line = job.line[1];
    /* A permanent failure may have to be waited for. */
    job.timeout_ms = (sticky ? 400 : 5000) * DDP_TEST_SLOWDOWN;
    device_patience_ms = 50;
    job.patient = job.may_fail = 1;
    job.fault = n;
    job.function = function;
    job.sticky = sticky;
    run_on(2, (uint64_t)n, everything);
    job.timeout_ms = job.patient = job.may_fail = job.fault = job.sticky = 0;
    job.function = NULL;
    device_patience_ms = 30000;
    if (!fake_fault_fired(1)) return 0;
    if (job.result[1] == DDP_OK) {
        silent++;
        return 1;
    }
    told++;
    call = fake.fault.text.c_str();
    name = fake.fault.text.substr(0, fake.fault.text.find('('));
    if (name == "kernel") name = "cudaLaunch";
    if (sticky || std::find(seen.begin(), seen.end(), name) != seen.end()) return 1;
    if (!strstr(line, name.c_str()) || strstr(job.line[0], "timed out")
        || (!function && job.result[0] == DDP_OK))
        seen.push_back(name);
    check(strstr(line, name.c_str()) != NULL, "call %d, %s, fails, and the line is: %s", n, call, line);
    check(!strstr(job.line[0], "timed out"), "call %d, %s, fails on rank 1, and rank 0 only times out: %s", n,
          call, job.line[0]);
    /* polls: it can be complete */
    check(function || job.result[0] != DDP_OK, "call %d, %s, fails on rank 1, and rank 0 returns no error", n,
          call);
    return 1;
}

/* An error at every single call: reported with the name of the call, no rank hangs, no leak, no wrong
   order. */
static void errors_everywhere(void) {
    static const char *const polls[] = {"cudaSetDevice", "cudaStreamQuery", "cudaEventQuery",
                                        "ncclCommGetAsyncError", "cudaThreadExchangeStreamCaptureMode"};
    int strides = DDP_TEST_SLOWDOWN > 3 ? 61 : DDP_TEST_SLOWDOWN > 1 ? 13 : 1;
    for (int sticky = 0; sticky < 2; sticky++) {
        int stride = sticky ? 2 * strides + 1 : strides;
        for (int n = 1; failures < 40 && error_at(NULL, n, sticky); n += stride) {
        }
        for (int k = 0; k < 5; k++)
            for (int n = 1; n < 40 && failures < 40 && error_at(polls[k], n, sticky); n += stride) {
            }
    }
    printf("errors_everywhere: %d errors reported, %d without consequence\n", told, silent);
    check(told > silent && told * strides > 300, "%d errors were reported, %d were not", told, silent);
}

/* ---- several machines ---- */

static const cluster clusters[] = {
    {"2 x 8", 16, {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}, 8},
    {"4 x 2", 8, {0, 0, 1, 1, 2, 2, 3, 3}, 2},
    {"8 + 4", 12, {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1}, 4}, /* 8 does not divide 12 */
    {"2 x 6", 12, {0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}, 2}, /* no 4 ranks from 4 on are on one machine */
    {"1 x 6", 6, {0}, 0},
    {"2 x 3", 6, {0, 0, 0, 1, 1, 1}, 0},
    {"2 x 4, in turn", 8, {0, 1, 0, 1, 0, 1, 0, 1}, 0},
    {"2 x 2", 4, {0, 0, 1, 1}, 2},
};

/* Values with f32 sums that depend on their order, and finite products. */
static void random_values(void *data, size_t count, ddp_dtype dtype, ddp_op op) {
    unsigned char *to = (unsigned char *)data;
    size_t size = ddp_dtype_size(dtype);
    for (size_t i = 0; i < count; i++, to += size) {
        uint64_t bits = (uint64_t)random() << 32 ^ (uint64_t)random() << 11 ^ (uint64_t)random();
        double x = 0.5 + (double)(random() % 100003) / 100003.0;
        if (op != DDP_OP_PROD) x = ldexp(x, (int)(random() % 24) - 12);
        if (random() % 2) x = -x;
        float f32 = (float)x;
        if (dtype == DDP_F64)
            memcpy(to, &x, 8);
        else if (ddp_is_float(dtype))
            ddp_device_cpu()->cast(to, dtype, &f32, DDP_F32, 1);
        else
            memcpy(to, &bits, size);
    }
}

typedef struct cluster_call {
    ddp_call_kind kind;
    ddp_dtype dtype;
    ddp_op op;
    size_t count;
    int root, in_place;
} cluster_call;

static ddp_result run_call(ddp_group *group, const cluster_call *c, const void *send, void *recv) {
    if (c->kind == DDP_CALL_ALL_REDUCE)
        return ddp_all_reduce(group, send, recv, c->count, c->dtype, c->op, NULL);
    if (c->kind == DDP_CALL_REDUCE)
        return ddp_reduce(group, send, recv, c->count, c->dtype, c->op, c->root, NULL);
    return ddp_reduce_scatter(group, send, recv, c->count, c->dtype, c->op, NULL);
}

/* The call on GPUs gives the bits of the CPU group. */
static ddp_result same_bits(rank_state *s, ddp_group *gpu, ddp_group *cpu, const cluster_call *c) {
    const size_t bytes = c->count * ddp_dtype_size(c->dtype);
    const int scatters = c->kind == DDP_CALL_REDUCE_SCATTER;
    const int receives = c->kind != DDP_CALL_REDUCE || ddp_rank(cpu) == c->root;
    const size_t send_bytes = scatters ? bytes * (size_t)ddp_world_size(cpu) : bytes;
    unsigned char *near = (unsigned char *)malloc(send_bytes), *wanted = (unsigned char *)malloc(bytes);
    unsigned char *send = (unsigned char *)floats(send_bytes / 4 + 1);
    unsigned char *recv = (unsigned char *)floats(bytes / 4 + 1);
    unsigned char *to = c->in_place ? send + (scatters ? bytes * (size_t)ddp_rank(cpu) : 0) : recv;
    random_values(near, send_bytes / ddp_dtype_size(c->dtype), c->dtype, c->op);
    RANKS_CHECK(s->cpu, send && recv, "no memory");
    fake_memcpy(send, near, send_bytes, cudaMemcpyHostToDevice, s->stream);
    RANKS_OK(s->cpu, run_call(cpu, c, near, receives ? wanted : NULL));
    RANKS_OK(s->cpu, run_call(gpu, c, send, receives ? to : NULL));
    if (receives) fake_memcpy(near, to, bytes, cudaMemcpyDeviceToHost, s->stream);
    fake_synchronize(s->stream);
    RANKS_CHECK(s->cpu, !receives || memcmp(near, wanted, bytes) == 0,
                "%s: call %d of %zu %s, op %d, root %d, in place %d: other bits than the CPU",
                job.cluster->name, (int)c->kind, c->count, ddp_dtype_name(c->dtype), (int)c->op, c->root,
                c->in_place);
    fake_free(send);
    fake_free(recv);
    free(near);
    free(wanted);
    return DDP_OK;
}

static const ddp_call_kind reductions[] = {DDP_CALL_ALL_REDUCE, DDP_CALL_REDUCE, DDP_CALL_REDUCE_SCATTER};

/* Every dtype and op, and counts that fill all parts, some of them or one. */
static ddp_result cluster_bits(rank_state *s) {
    static const size_t counts[] = {1, 37, 601};
    int k = 0;
    for (int kind = 0; kind < 3; kind++)
        for (int dtype = DDP_F32; dtype <= DDP_U64; dtype++)
            for (int op = DDP_OP_SUM; op <= DDP_OP_PROD; op++, k++) {
                const cluster_call c = {reductions[kind], (ddp_dtype)dtype, (ddp_op)op,
                                        counts[k % 3],    k % s->size,      k / 3 % 2};
                RANKS_OK(s->cpu, same_bits(s, s->group, s->cpu, &c));
            }
    return DDP_OK;
}

/* The bytes that this rank sends to other machines in a call; with one machine, to other ranks. */
static ddp_result bytes_across(rank_state *s, ddp_group *gpu, ddp_group *cpu, const cluster_call *c,
                               size_t *bytes) {
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    memset(fake_nccl.sent[s->device], 0, sizeof fake_nccl.sent[0]);
    RANKS_OK(s->cpu, same_bits(s, gpu, cpu, c));
    *bytes = 0;
    for (int peer = 0; peer < s->size; peer++)
        if (job.cluster->machine[peer] != job.cluster->machine[s->rank]
            || job.cluster->machine[s->size - 1] == 0)
            *bytes += fake_nccl.sent[s->device][peer];
    return DDP_OK;
}

/* Bytes to other machines, of a rank with a network card of its own. S is the size of the data, m the number
   of machines, g the ranks of a machine, W = m g, p the size of a partial sum divided by that of an element:

                            all_reduce                 reduce_scatter, S = the data of all ranks
       all ranks at once    2 S (W - g) / W            S (W - g) / W
       a block first        (1 + p) S (m - 1) / W      p S (m - 1) / W     with blocks of g ranks
       a ring of machines   2 S (m - 1) / W            S (m - 1) / W       g cards share its 2 S (m - 1) / m

   S is 2304 elements. */
static ddp_result cluster_bytes(rank_state *s) {
    static const struct {
        const char *cluster;
        int rank; /* and all others of its machine */
        size_t all_reduce_f32, all_reduce_bf16, scatter_f32, scatter_bf16;
        size_t at_once_f32, ring_f32; /* of an all_reduce */
    } wanted[] = {
        {"2 x 8", 0, 1152, 864, 576, 576, 9216, 1152},
        {"2 x 8", 8, 1152, 864, 576, 576, 9216, 1152},
        {"4 x 2", 0, 6912, 5184, 3456, 3456, 13824, 6912},
        {"8 + 4", 0, 1536, 1152, 768, 768, 6144, 1152}, /* a ring with 8 and 4 cards */
        {"8 + 4", 8, 3072, 2304, 1536, 1536, 12288, 2304},
        {"2 x 6", 0, 4608, 3456, 2304, 2304, 9216, 1536},
        {"1 x 6", 0, 15360, 7680, 7680, 3840, 0, 0},      /* to all ranks, as a ring: 2 S 5 / 6 and S 5 / 6 */
        {"2 x 3", 0, 9216, 4608, 4608, 2304, 9216, 3072}, /* no blocks: all ranks at once */
        {"2 x 4, in turn", 0, 9216, 4608, 4608, 2304, 9216, 2304},
        {"2 x 2", 0, 4608, 3456, 2304, 2304, 9216, 4608},
    };
    const size_t count = 2304;
    const cluster *cluster = job.cluster;
    size_t bytes[4], machines = 0, cards = 0, foreign = 0;
    for (int r = 0; r < s->size; r++) {
        if ((size_t)cluster->machine[r] >= machines) machines = (size_t)cluster->machine[r] + 1;
        cards += cluster->machine[r] == cluster->machine[s->rank];
        foreign += cluster->machine[r] != cluster->machine[s->rank];
    }
    for (int k = 0; k < 4; k++) {
        const int scatters = k / 2;
        const cluster_call c = {scatters ? DDP_CALL_REDUCE_SCATTER : DDP_CALL_ALL_REDUCE,
                                k % 2 ? DDP_BF16 : DDP_F32,
                                DDP_OP_SUM,
                                scatters ? count / (size_t)s->size : count,
                                -1,
                                0};
        RANKS_OK(s->cpu, bytes_across(s, s->group, s->cpu, &c, &bytes[k]));
    }
    for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++) {
        if (strcmp(wanted[k].cluster, cluster->name)
            || cluster->machine[wanted[k].rank] != cluster->machine[s->rank])
            continue;
        RANKS_CHECK(s->cpu,
                    bytes[0] == wanted[k].all_reduce_f32 && bytes[1] == wanted[k].all_reduce_bf16
                        && bytes[2] == wanted[k].scatter_f32 && bytes[3] == wanted[k].scatter_bf16,
                    "%s: %zu and %zu bytes in an all_reduce, %zu and %zu in a reduce_scatter", cluster->name,
                    bytes[0], bytes[1], bytes[2], bytes[3]);
        RANKS_CHECK(s->cpu,
                    wanted[k].at_once_f32 == 2 * count * 4 * foreign / (size_t)s->size
                        && wanted[k].ring_f32 == 2 * count * 4 * (machines - 1) / machines / cards,
                    "%s: the formulas", cluster->name);
    }
    return DDP_OK;
}

/* Splits of 4 x 2 ranks: the first and last four have blocks of 2; every second rank has a machine of its
   own. A rank sends parts of 192 elements, in f32 where it is a partial sum. */
static ddp_result cluster_splits(rank_state *s) {
    const cluster_call c = {DDP_CALL_ALL_REDUCE, DDP_BF16, DDP_OP_AVG, 768, -1, 1};
    for (int strided = 0; strided < 2; strided++) {
        ddp_group *gpu = NULL, *cpu = NULL;
        size_t bytes, expected = strided ? (3 + 3) * 192 * 2 : 192 * (4 + 2);
        int color = strided ? s->rank % 2 : s->rank / 4;
        RANKS_OK(s->cpu, ddp_group_split(s->group, color, 0, &gpu));
        RANKS_OK(s->cpu, ddp_group_split(s->cpu, color, 0, &cpu));
        RANKS_OK(s->cpu, bytes_across(s, gpu, cpu, &c, &bytes));
        RANKS_CHECK(s->cpu, bytes == expected, "strided %d: %zu bytes", strided, bytes);
        ddp_group_destroy(gpu);
        ddp_group_destroy(cpu);
    }
    return DDP_OK;
}

static void on_clusters(program_fn program, int first, int end) {
    job.order = DDP_ORDER_TREE;
    for (int k = first; k < end; k++) {
        job.cluster = &clusters[k];
        run_on(job.cluster->size, (uint64_t)k, program);
    }
    job.cluster = NULL;
    job.order = DDP_ORDER_DEFAULT;
}

static void several_machines(void) {
    static const program_fn programs[] = {collectives, tree, captured_step};
    const int all = sizeof clusters / sizeof *clusters, small = all - 1;
    on_clusters(cluster_bytes, 0, all);
    if (DDP_TEST_SLOWDOWN == 1) on_clusters(cluster_bits, 2, 3);
    on_clusters(cluster_bits, small, all);
    on_clusters(cluster_splits, 1, 2);
    for (size_t k = 0; k < sizeof programs / sizeof *programs; k++) on_clusters(programs[k], small, all);
    job.timeout_ms = 500 * DDP_TEST_SLOWDOWN;
    on_clusters(captured_large, small, all);
    job.order = DDP_ORDER_TREE;
    job.cluster = &clusters[small];
    failing.function = "ncclSend"; /* one for each step of the reduction */
    for (failing.number = 1; failing.number <= 4; failing.number++)
        fails_on(4, failing.number, one_call_fails);
    job.timeout_ms = 1000 * DDP_TEST_SLOWDOWN;
    fails_on(4, 0, one_is_missing);
    job.timeout_ms = 0;
    job.cluster = NULL;
    job.order = DDP_ORDER_DEFAULT;
}

/* ---- the exact calls ---- */

/* Successive creations or destructions of events become one line. */
static std::string folded(const std::string &record) {
    std::string out, last;
    int times = 0;
    for (size_t at = 0, end; at <= record.size(); at = end + 1) {
        end = std::min(record.find('\n', at), record.size());
        std::string line = record.substr(at, end - at), name = line.substr(0, line.find('('));
        int event = name == "cudaEventCreateWithFlags" || name == "cudaEventDestroy";
        if (times && (!event || name != last.substr(0, last.find('(')))) {
            out += times > 1 ? std::to_string(times) + " x " + last.substr(0, last.find('(')) + "\n"
                             : last + "\n";
            times = 0;
        }
        if (event) {
            times++;
            last = line;
        } else if (!line.empty())
            out += line + "\n";
    }
    return out;
}

/* The calls of rank 0 of 2 since the last check, without polling, must be these. Both ranks call this. */
static ddp_result calls_are(rank_state *s, const char *what, const char *wanted) {
    std::string record;
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    record = folded(fake_record(0));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    fake_record_from_here();
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    if (s->rank == 0) check(record == wanted, "%s calls\n%sinstead of\n%s", what, record.c_str(), wanted);
    return DDP_OK;
}

/* NCCL added its support for group memory in two steps. */
#if DDP__NCCL_VERSION >= 21900
#define GROUP_ALLOC "ncclMemAlloc"
#define GROUP_FREE "ncclMemFree"
#else
#define GROUP_ALLOC "cudaMalloc"
#define GROUP_FREE "cudaFree"
#endif
#if DDP__NCCL_VERSION >= 22700
#define GROUP_REGISTER "ncclCommWindowRegister(c1, m7, 4096, 1)\n"
#define GROUP_DEREGISTER "ncclCommWindowDeregister(c1)\n"
#elif DDP__NCCL_VERSION >= 21900
#define GROUP_REGISTER "ncclCommRegister(c1, m7, 4096)\n"
#define GROUP_DEREGISTER "ncclCommDeregister(c1)\n"
#else
#define GROUP_REGISTER
#define GROUP_DEREGISTER
#endif
static ddp_result sequences(rank_state *s) {
    ddp_group *half = NULL;
    ddp_work work[2] = {DDP_ZERO, DDP_ZERO};
    void *memory = NULL;
    RANKS_OK(s->cpu, calls_are(s, "ddp_cuda_group_create",
                               "cudaStreamCreateWithPriority(non-blocking, high) = s2\n"
                               "32 x cudaEventCreateWithFlags\n"
                               "cudaMalloc(66048) = m5\n"
                               "cudaMalloc(16) = m6\n"
                               "cudaMemsetAsync(m6, 0, 16, s2)\n"
                               "ncclGetUniqueId()\n"
                               "ncclCommInitRankConfig(2, 0, blocking) = c1\n"));
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_OK(s->cpu, calls_are(s, "the first ddp_all_reduce",
                               "cudaEventCreateWithFlags(no timing) = e33\n"
                               "cudaEventRecord(e33, s1)\n"
                               "cudaStreamWaitEvent(s2, e33)\n"
                               "ncclAllReduce(m1, m2, 600 f32, sum, c1, s2)\n"
                               "cudaEventRecord(e1, s2)\n"
                               "cudaEventRecord(e33, s2)\n"
                               "cudaStreamWaitEvent(s1, e33)\n"));
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_OK(s->cpu, calls_are(s, "ddp_all_reduce",
                               "cudaEventRecord(e33, s1)\n"
                               "cudaStreamWaitEvent(s2, e33)\n"
                               "ncclAllReduce(m1, m2, 600 f32, sum, c1, s2)\n"
                               "cudaEventRecord(e2, s2)\n"
                               "cudaEventRecord(e33, s2)\n"
                               "cudaStreamWaitEvent(s1, e33)\n"));
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->in, N, DDP_F32, DDP_OP_SUM, &work[0]));
    RANKS_OK(s->cpu, ddp_broadcast(s->group, s->out, N, DDP_F32, 1, &work[1]));
    RANKS_OK(s->cpu, calls_are(s, "two asynchronous calls",
                               "cudaEventRecord(e33, s1)\n"
                               "cudaStreamWaitEvent(s2, e33)\n"
                               "ncclAllReduce(m1, m1, 600 f32, sum, c1, s2)\n"
                               "cudaEventRecord(e3, s2)\n"
                               "cudaEventRecord(e33, s2)\n"
                               "cudaEventCreateWithFlags(no timing) = e34\n"
                               "cudaEventRecord(e34, s1)\n"
                               "cudaStreamWaitEvent(s2, e34)\n"
                               "ncclBroadcast(m2, m2, 600 f32, 1, c1, s2)\n"
                               "cudaEventRecord(e4, s2)\n"
                               "cudaEventRecord(e34, s2)\n"));
    RANKS_OK(s->cpu, ddp_wait(s->group, &work[0]));
    RANKS_OK(s->cpu, ddp_wait(s->group, &work[1]));
    RANKS_OK(s->cpu, calls_are(s, "their waits",
                               "cudaStreamWaitEvent(s1, e33)\n"
                               "cudaStreamWaitEvent(s1, e34)\n"));
    RANKS_OK(s->cpu, ddp_all_to_all(s->group, s->in, s->out, N / 2, DDP_F32, NULL));
    RANKS_OK(s->cpu, calls_are(s, "ddp_all_to_all",
                               "cudaEventRecord(e34, s1)\n"
                               "cudaStreamWaitEvent(s2, e34)\n"
                               "ncclGroupStart()\n"
                               "cudaMemcpyAsync(m2, m1, 1200, DeviceToDevice, s2)\n"
                               "ncclSend(m1+1200, 1200 u8, 1, c1, s2)\n"
                               "ncclRecv(m2+1200, 1200 u8, 1, c1, s2)\n"
                               "ncclGroupEnd()\n"
                               "cudaEventRecord(e5, s2)\n"
                               "cudaEventRecord(e34, s2)\n"
                               "cudaStreamWaitEvent(s1, e34)\n"));
    /* Makes the scratch. */
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_MAX, NULL));
    RANKS_OK(s->cpu, calls_are(s, "the first reduction in tree order",
                               "cudaEventRecord(e34, s1)\n"
                               "cudaStreamWaitEvent(s2, e34)\n"
                               "ncclGroupStart()\n"
                               "ncclSend(m1+1216, 1184 u8, 1, c1, s2)\n"
                               "ncclRecv(m5+1216, 1216 u8, 1, c1, s2)\n"
                               "ncclGroupEnd()\n"
                               "kernel(s2)\n"
                               "ncclGroupStart()\n"
                               "ncclSend(m2, 1216 u8, 1, c1, s2)\n"
                               "ncclRecv(m2+1216, 1184 u8, 1, c1, s2)\n"
                               "ncclGroupEnd()\n"
                               "cudaEventRecord(e6, s2)\n"
                               "cudaEventRecord(e34, s2)\n"
                               "cudaStreamWaitEvent(s1, e34)\n"));
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->in, s->out, N, DDP_F32, DDP_OP_MAX, NULL));
    RANKS_OK(s->cpu, calls_are(s, "a reduction in tree order",
                               "cudaEventRecord(e34, s1)\n"
                               "cudaStreamWaitEvent(s2, e34)\n"
                               "ncclGroupStart()\n"
                               "ncclSend(m1+1216, 1184 u8, 1, c1, s2)\n"
                               "ncclRecv(m5+1216, 1216 u8, 1, c1, s2)\n"
                               "ncclGroupEnd()\n"
                               "kernel(s2)\n"
                               "ncclGroupStart()\n"
                               "ncclSend(m2, 1216 u8, 1, c1, s2)\n"
                               "ncclRecv(m2+1216, 1184 u8, 1, c1, s2)\n"
                               "ncclGroupEnd()\n"
                               "cudaEventRecord(e7, s2)\n"
                               "cudaEventRecord(e34, s2)\n"
                               "cudaStreamWaitEvent(s1, e34)\n"));
    RANKS_OK(s->cpu, ddp_p2p_begin(s->group));
    RANKS_OK(s->cpu, ddp_send(s->group, s->in, N, DDP_F32, 1 - s->rank, 0, NULL));
    RANKS_OK(s->cpu, ddp_recv(s->group, s->out, N, DDP_F32, 1 - s->rank, 0, NULL));
    RANKS_OK(s->cpu, ddp_p2p_end(s->group));
    RANKS_OK(s->cpu, calls_are(s, "a batch",
                               "cudaEventCreateWithFlags(no timing) = e35\n"
                               "cudaEventRecord(e35, s1)\n"
                               "cudaStreamWaitEvent(s2, e35)\n"
                               "ncclGroupStart()\n"
                               "ncclSend(m1, 600 f32, 1, c1, s2)\n"
                               "ncclRecv(m2, 600 f32, 1, c1, s2)\n"
                               "ncclGroupEnd()\n"
                               "cudaEventRecord(e8, s2)\n"
                               "cudaEventRecord(e35, s2)\n"
                               "cudaStreamWaitEvent(s1, e35)\n"));
    RANKS_OK(s->cpu, ddp_group_alloc(s->group, 4096, &memory));
    RANKS_OK(s->cpu, calls_are(s, "ddp_group_alloc",
                               GROUP_ALLOC "(4096) = m7\n"
                                           "cudaMemsetAsync(m7, 0, 4096, s2)\n"
                                           "cudaStreamSynchronize(s2)\n" GROUP_REGISTER));
    RANKS_OK(s->cpu, ddp_group_free(s->group, memory));
    RANKS_OK(s->cpu, calls_are(s, "ddp_group_free",
                               "cudaStreamSynchronize(s2)\n"
                               "cudaStreamSynchronize(s1)\n" GROUP_DEREGISTER GROUP_FREE "(m7)\n"));
    RANKS_OK(s->cpu, ddp_group_split(s->group, 0, -s->rank, &half));
    RANKS_OK(s->cpu, calls_are(s, "ddp_group_split",
                               "cudaStreamCreateWithPriority(non-blocking, high) = s3\n"
                               "32 x cudaEventCreateWithFlags\n"
                               "cudaMalloc(66048) = m8\n"
                               "cudaMalloc(16) = m9\n"
                               "cudaMemsetAsync(m9, 0, 16, s3)\n"
                               "ncclCommSplit(c1, 1, 1) = c2\n"));
    ddp_group_destroy(half);
    RANKS_OK(s->cpu, calls_are(s, "ddp_group_destroy of a split",
                               "ncclCommAbort(c2)\n"
                               "32 x cudaEventDestroy\n"
                               "cudaFree(m8)\n"
                               "cudaFree(m9)\n"
                               "cudaStreamDestroy(s3)\n"));
    ddp_group_destroy(s->group);
    s->group = NULL;
    return calls_are(s, "ddp_group_destroy",
                     "ncclCommAbort(c1)\n"
                     "32 x cudaEventDestroy\n"
                     "cudaFree(m5)\n"
                     "cudaFree(m6)\n"
                     "3 x cudaEventDestroy\n"
                     "cudaStreamDestroy(s2)\n");
}

/* ---- groups that cannot be created ---- */

/* All ranks reject desc, with text, and create nothing. */
static ddp_result refuses(rank_state *s, const ddp_cuda_desc *desc, ddp_result wanted, const char *text) {
    ddp_group *none = s->group;
    ddp_result result = ddp_cuda_group_create(&none, s->cpu, desc);
    RANKS_CHECK(s->cpu, result == wanted && strstr(ddp_last_error(), text) && !none, "%s, and not '%s': %s",
                ddp_result_name(result), text, ddp_last_error());
    return DDP_OK;
}

/* Every rank returns the same error for one rank's invalid argument; the ranks continue. */
static ddp_result wrong_groups(rank_state *s) {
    static const int one[] = {0};
    ddp_cuda_desc good = job.desc, desc = good, own = good;
    ddp_group *none = NULL;
    int last = s->rank == s->size - 1;
    good.stream = s->stream;
    RANKS_CHECK(s->cpu,
                ddp_cuda_group_create(NULL, s->cpu, &good) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "out or control is NULL"),
                "%s", ddp_last_error());
    RANKS_CHECK(s->cpu,
                ddp_cuda_group_create(&none, NULL, &good) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "out or control is NULL"),
                "%s", ddp_last_error());
#define WRONG(field, value, result, text)                  \
    do {                                                   \
        desc = good;                                       \
        if (last) desc.field = (value);                    \
        RANKS_OK(s->cpu, refuses(s, &desc, result, text)); \
    } while (0)
    WRONG(engine, (ddp_cuda_engine)3, DDP_ERR_INVALID,
          "engine=3 order=0 timeout_ms=0: one of them is invalid; use a ddp_cuda_engine, a ddp_order and 0 "
          "or more ms");
    WRONG(order, (ddp_order)3, DDP_ERR_INVALID, "engine=0 order=3 timeout_ms=0: one of them");
    WRONG(timeout_ms, -1, DDP_ERR_INVALID, "engine=0 order=0 timeout_ms=-1: one of them");
    WRONG(devices, one, DDP_ERR_INVALID, "set both devices and device_count, or neither");
    WRONG(device_count, 1, DDP_ERR_INVALID, "set both devices and device_count, or neither");
    WRONG(uuid, "GPU-ff", DDP_ERR_INVALID,
          "uuid GPU-ff matches no device of this machine, which has 0 (GPU-");
    WRONG(order, DDP_ORDER_TREE, DDP_ERR_MISMATCH,
          "ranks differ: rank 0 order=0, rank 1 order=1; give every rank the same");
    WRONG(engine, DDP_CUDA_ENGINE_NCCL, DDP_ERR_MISMATCH,
          "ranks differ: rank 0 engine=0, rank 1 engine=1; give");
    fake_nccl_version = last ? 23000 : 22809;
    RANKS_OK(s->cpu,
             refuses(s, &good, DDP_ERR_MISMATCH, "ranks differ: rank 0 nccl=22809, rank 1 nccl=23000; give"));
    fake_nccl_version = NCCL_VERSION_CODE;
    RANKS_OK(s->cpu, make_own(s, &own));
    WRONG(comm, own.comm, DDP_ERR_MISMATCH, "ranks differ: rank 0 comm=NULL, rank 1 comm=given; give");
    RANKS_CHECK(s->cpu,
                ncclCommDestroy(own.comm) == ncclSuccess
                    && fake_stream_destroy(own.comm_stream) == cudaSuccess,
                "an object of the user was destroyed");
    own = good;
    s->rank = s->size - 1 - s->rank; /* a communicator with the ranks the other way around */
    RANKS_OK(s->cpu, make_own(s, &own));
    s->rank = s->size - 1 - s->rank;
    desc = good, desc.comm = own.comm;
    RANKS_OK(s->cpu,
             refuses(s, &desc, DDP_ERR_INVALID,
                     "desc.comm is rank 1 of 2 on device 0, but the group is rank 0 of 2 on device 0; "
                     "set it to the communicator of this rank"));
    RANKS_CHECK(s->cpu,
                ncclCommDestroy(own.comm) == ncclSuccess
                    && fake_stream_destroy(own.comm_stream) == cudaSuccess,
                "an object of the user was destroyed");
#undef WRONG
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    return look_back(s);
}

/* ---- sharing a device ---- */

static ddp_result on_one_device(rank_state *s) {
    int staged;
    RANKS_OK(s->cpu, collective(s, 0, 0, 0));
    RANKS_OK(s->cpu, look_back(s));
    s->kept = 0;
    staged = fake_record(0).find("cudaHostAlloc") != std::string::npos;
    RANKS_CHECK(s->cpu, staged == job.staged, "the group %s through host memory",
                staged ? "goes" : "does not go");
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    return staged ? DDP_OK : collectives(s);
}

/* Group memory is freed, and the scratch of reductions in tree order grows: cudaFree waits for all work on
   the device, including that of other ranks. */
static ddp_result frees_on_one_device(rank_state *s) {
    void *memory = NULL;
    float last;
    RANKS_OK(s->cpu, ddp_group_alloc(s->group, 4096, &memory));
    RANKS_OK(s->cpu, ddp_barrier(s->cpu));
    if (s->rank) ranks_sleep_us(100000);
    RANKS_OK(s->cpu, ddp_group_free(s->group, memory));
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->spare, s->out, N, DDP_F32, DDP_OP_SUM, NULL));
    if (s->rank) ranks_sleep_us(100000);
    fill(s, s->spare, MANY, 1);
    RANKS_OK(s->cpu, ddp_all_reduce(s->group, s->spare, s->spare, MANY, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_CHECK(s->cpu,
                fake_memcpy(&last, s->spare + MANY - 1, 4, cudaMemcpyDeviceToHost, s->stream) == cudaSuccess,
                "copying back");
    RANKS_CHECK(s->cpu, last == summed(s->size, 1, MANY - 1), "the last element is %g", (double)last);
    return ddp_barrier(s->cpu);
}

/* All ranks return the error, with text in the line. */
static void refused(ddp_result result, const char *text) {
    job.may_fail = 1;
    run_on(3, 0, on_one_device);
    job.may_fail = 0;
    for (int r = 0; r < 3; r++)
        check(job.result[r] == result && strstr(job.line[r], text), "rank %d: %s: %s", r,
              ddp_result_name(job.result[r]), job.line[r]);
}

/* More ranks than a call with counts supports, detected before anything is written. */
static void too_many_to_stage(void) {
    ddp__cuda_staged staged = DDP_ZERO;
    ddp__cuda_rounds rounds = DDP_ZERO;
    size_t counts[DDP_MAX_LOCAL_RANKS + 1] = {0};
    ddp_call call = DDP_ZERO;
    call.kind = DDP_CALL_ALL_TO_ALL_V;
    call.send_counts = call.recv_counts = counts;
    rounds.call = &call;
    staged.world_size = DDP_MAX_LOCAL_RANKS + 1;
    check(ddp__cuda_staged_counts(&staged, &rounds) == DDP_ERR_UNSUPPORTED
              && strstr(ddp_last_error(), "at most 64 ranks"),
          "%s", ddp_last_error());
}

/* NCCL allows ranks that share a device from 2.30 on, if the user enables it in NCCL and in ddp. */
static void sharing(void) {
    static const int zeros[MAX_RANKS] = {0};
    too_many_to_stage();
    job.shared = job.staged = job.desc.allow_shared = 1;
    job.desc.devices = zeros;
    job.desc.device_count = MAX_RANKS;
    check(notices == 0, "%d notices, and no ranks shared a device", notices);
    run_on(3, 0, on_one_device);
    check(notices == 3, "%d notices of 3 ranks", notices);
    job.staged = 0;
    job.desc.engine = DDP_CUDA_ENGINE_NCCL;
    refused(DDP_ERR_UNSUPPORTED,
            "use NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1, or use DDP_CUDA_ENGINE_STAGED");
    job.nccl_version = 23000;
    refused(DDP_ERR_ENGINE, "ncclCommInitRankConfig: invalid usage");
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    for (uint64_t seed = 0; seed < 8; seed++) {
        job.order = seed & 1 ? DDP_ORDER_TREE : DDP_ORDER_ANY;
        for (int size = 2; size <= MAX_RANKS; size++) run_on(size, seed, on_one_device);
    }
    job.order = DDP_ORDER_TREE;
    for (int size = 2; size <= MAX_RANKS; size++) run_on(size, 0, frees_on_one_device);
    unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    job.nccl_version = job.shared = 0;
    job.order = DDP_ORDER_DEFAULT;
    job.desc = ddp_cuda_desc();
}

/* ---- main ---- */

static void both_orders(program_fn program, int seeds) {
    job.order = DDP_ORDER_ANY;
    run_seeds(program, seeds);
    job.order = DDP_ORDER_TREE;
    run_seeds(program, seeds);
    job.order = DDP_ORDER_DEFAULT;
}

static const char *only; /* a part of a case's name */
#define CASE(...)                                      \
    do {                                               \
        ranks_current = #__VA_ARGS__;                  \
        if (strstr(#__VA_ARGS__, only) && !failures) { \
            __VA_ARGS__;                               \
        }                                              \
    } while (0)
int main(int argc, char **argv) {
    only = argc > 1 ? argv[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    watchdog_start(150);
    device_patience_ms = 30000;
    CASE(run_on(2, 0, sequences));
    CASE(both_orders(collectives, 6));
    CASE(run_seeds(several, 8));
    CASE(run_seeds(tested, 4));
    CASE(both_orders(other_stream, 4));
    CASE(run_seeds(messages, 8));
    job.order = DDP_ORDER_TREE;
    CASE(run_seeds(tree, 8));
    job.order = DDP_ORDER_DEFAULT;
    CASE(run_seeds(splits, 4));
    CASE(run_seeds(launch_order, 2));
    CASE(run_seeds(group_memory, 4));
    CASE(both_orders(captured_step, 4));
    job.timeout_ms = 500 * DDP_TEST_SLOWDOWN;
    CASE(run_on(3, 0, captured_large));
    job.timeout_ms = 0;
    CASE(run_seeds(not_waited_for, 8));
    CASE(both_orders(from_elsewhere, 4));
    for (job.own_comm = 1; job.own_comm < 3; job.own_comm++) CASE(both_orders(collectives, 4));
    job.own_comm = 0;
    job.connects = 1;
    CASE(both_orders(collectives, 4));
    CASE(run_seeds(splits, 4));
    job.connects = 0;
    CASE(reducers());
    CASE(watchdogs());
    CASE(fails_on(3, 0, one_call_fails));
    /* parts of watchdogs as cases of their own */
    CASE(fails_on(2, 0, error_from_behind));
    CASE(fails_on(2, 0, one_leaves));
    job.mismatch = 1;
    CASE(fails_on(2, 0, different_calls));
    job.mismatch = 0;
    CASE(no_memory_alone(DDP_CUDA_ENGINE_NCCL));
    CASE(no_memory_alone(DDP_CUDA_ENGINE_STAGED));
    CASE(run_on(2, 0, wrong_groups));
    CASE(sharing());
    CASE(several_machines());
    CASE(errors_everywhere());
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}

/*  test_mpi.c - properties that only the MPI backend has.

    mpirun -n W test_mpi SCENARIO       each is a separate program, since a process initialises and finalises
                                        MPI once

    This program intercepts the calls from ddp.h to MPI (MPI's profiling interface): it records them, and can
    make them fail. */
#include <mpi.h>

#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#include <limits.h>
#include <sys/syscall.h>

//== interception of MPI ====================================================================

/* granted: the thread level that MPI_Init_thread returns. */
static int finalized, fails_next, granted = -1;

int MPI_Finalize(void) {
    finalized++;
    return PMPI_Finalize();
}

/* by_machine_only: 1 = sums take the method by machine. is_compared: 1 = the comparison of a call runs. */
static int by_machine_only, is_compared, stalls_after_compare;

int MPI_Iallreduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request *request) {
    static uint64_t words[3]; /* hash, its complement, method */
    int fail = fails_next;
    fails_next = 0;
    if (by_machine_only && count == 3) {
        memcpy(words, send, sizeof words);
        words[2] = 0; /* DDP__MPI_BY_MACHINE */
        send = words;
        is_compared = 1;
    }
    return fail ? MPI_ERR_OTHER : PMPI_Iallreduce(send, recv, count, type, op, comm, request);
}

/* A word of shared memory: 1 while the leader of a machine sleeps in its transfer, until its neighbour probes
   and sets 2. probes: by this rank meanwhile. */
static int *leader_sleeps, is_sleepy_leader, probes;
static int64_t bytes_across; /* of data that this rank has sent to other machines */
enum { DATA_TAG = 0 };       /* DDP__MPI_DATA of ddp.h */

int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
    if (is_sleepy_leader) {
        is_sleepy_leader = 0;
        __atomic_store_n(leader_sleeps, 1, __ATOMIC_RELEASE);
        double until = ranks_now() + 10; /* a machine with other work can stand still for seconds */
        while (__atomic_load_n(leader_sleeps, __ATOMIC_ACQUIRE) == 1 && ranks_now() < until)
            ranks_sleep_us(1000);
        __atomic_store_n(leader_sleeps, 0, __ATOMIC_RELEASE);
    }
    int rank, element;
    MPI_Comm_rank(comm, &rank);
    MPI_Type_size(type, &element);
    if (tag == DATA_TAG && rank / ranks_per_machine() != to / ranks_per_machine())
        bytes_across += (int64_t)count * element;
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}

int MPI_Improbe(int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *status) {
    if (leader_sleeps && __atomic_load_n(leader_sleeps, __ATOMIC_ACQUIRE) == 1) {
        __atomic_store_n(leader_sleeps, 2, __ATOMIC_RELEASE);
        probes++;
    }
    return PMPI_Improbe(from, tag, comm, flag, message, status);
}

/* Between the comparison of a call and its transfer, a rank stalls: longer than the timeout and two queries,
   shorter than the timeout of its local group. */
int MPI_Testall(int count, MPI_Request requests[], int *done, MPI_Status statuses[]) {
    int error = PMPI_Testall(count, requests, done, statuses);
    if (!*done || !is_compared) return error;
    is_compared = 0;
    if (stalls_after_compare) ranks_sleep_us(4300000);
    return error;
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    return PMPI_Init_thread(argc, argv, granted < 0 ? required : granted, provided);
}

/* At exit, after ddp.h. A job whose MPI is not finalised would count as failed. */
static int finalized_at_exit = -1; /* the expected number of finalisations by then */
static void last_look(void) {
    int over = 0;
    MPI_Finalized(&over);
    if (finalized_at_exit >= 0 && finalized != finalized_at_exit) {
        fprintf(stderr, "FAIL MPI was finalised %d times, wanted %d\n", finalized, finalized_at_exit);
        _exit(1);
    }
    if (!over) PMPI_Finalize();
}

static int is_running(void) {
    int started = 0, over = 0;
    MPI_Initialized(&started);
    MPI_Finalized(&over);
    return started && !over;
}

//== tools ==================================================================================

/* This rank's number out of a world over init_method "mpi://". */
static ddp_result join(ddp_group **world, ddp_order order, int timeout_ms) {
    ddp_group_desc desc = DDP_ZERO;
    desc.init_method = "mpi://";
    desc.order = order;
    desc.timeout_ms = timeout_ms > INT_MAX / DDP_TEST_SLOWDOWN ? timeout_ms : timeout_ms * DDP_TEST_SLOWDOWN;
    return ddp_group_create(world, &desc);
}

/* A blocking and three asynchronous sums, a message round, and a task. */
static ddp_result double_it(ddp_group *g, void *argument) {
    int32_t *value = (int32_t *)argument;
    return ddp_all_reduce(g, value, value, 1, DDP_I32, DDP_OP_MAX, NULL);
}

static ddp_result work_of_all_sorts(ddp_group *g) {
    int w = ddp_world_size(g), rank = ddp_rank(g), done = 0;
    int32_t in[3], out[3], came = -1, mine = rank, most = rank;
    ddp_work work[3], sent, task;
    for (int i = 0; i < 3; i++) {
        in[i] = rank + i;
        RANKS_OK(g, ddp_all_reduce(g, &in[i], &out[i], 1, DDP_I32, DDP_OP_SUM, &work[i]));
    }
    while (!done) RANKS_OK(g, ddp_test(g, &work[1], &done));
    for (int i = 2; i >= 0; i--) RANKS_OK(g, ddp_wait(g, &work[i]));
    for (int i = 0; i < 3; i++) RANKS_CHECK(g, out[i] == w * (w - 1) / 2 + i * w, "sum %d is %d", i, out[i]);
    RANKS_OK(g, ddp_send(g, &mine, 1, DDP_I32, (rank + 1) % w, 5, &sent));
    RANKS_OK(g, ddp_recv(g, &came, 1, DDP_I32, (rank + w - 1) % w, 5, NULL));
    RANKS_OK(g, ddp_wait(g, &sent));
    RANKS_CHECK(g, came == (rank + w - 1) % w, "came %d", came);
    RANKS_OK(g, ddp_group_enqueue(g, double_it, &most, &task));
    RANKS_OK(g, ddp_wait(g, &task));
    RANKS_CHECK(g, most == w - 1, "most %d", most);
    RANKS_OK(g, ddp_barrier(g));
    return DDP_OK;
}

#define SAYS(g, ...)                                                                                        \
    do {                                                                                                    \
        char wanted[300];                                                                                   \
        snprintf(wanted, sizeof wanted, __VA_ARGS__);                                                       \
        RANKS_CHECK(g, strstr(ddp_last_error(), wanted), "\"%s\" has no \"%s\"", ddp_last_error(), wanted); \
    } while (0)

//== scenarios ==============================================================================

/* Under mpirun, a group uses MPI, which the first group initialises. It is finalised at exit, once. */
static ddp_result chosen(void) {
    ddp_group *a = NULL, *b = NULL;
    RANKS_CHECK(NULL, !is_running(), "MPI runs");
    RANKS_OK(NULL, ddp_group_create(&a, NULL));
    RANKS_CHECK(a, is_running() && ddp_world_size(a) > 1, "size %d", ddp_world_size(a));
    RANKS_OK(a, work_of_all_sorts(a));
    RANKS_OK(NULL, join(&b, DDP_ORDER_ANY, 20000)); /* in addition to the first */
    RANKS_OK(b, work_of_all_sorts(b));
    ddp_group_destroy(a);
    RANKS_OK(b, work_of_all_sorts(b));
    ddp_group_destroy(b);
    RANKS_CHECK(NULL, is_running() && !finalized, "it is finalised");
    RANKS_OK(NULL, join(&a, DDP_ORDER_TREE, 2147483647)); /* after it, with a full timeout */
    RANKS_OK(a, work_of_all_sorts(a));
    ddp_group_destroy(a);
    finalized_at_exit = 1;
    return DDP_OK;
}

/* A rank that waits for a rank of its own machine lets MPI progress: in an all_reduce by machine, while the
   leader exchanges data with other machines. */
static ddp_result probing(void) {
    enum { COUNT = 1000 };
    ddp_group *g = NULL;
    float data[COUNT] = {0};
    int *word, unit;
    MPI_Win window;
    MPI_Aint size;
    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    RANKS_CHECK(g, ddp_world_size(g) == 4 && ranks_per_machine() == 2, "it needs 4by2");
    MPI_Win_allocate_shared(sizeof *word, sizeof *word, MPI_INFO_NULL, MPI_COMM_WORLD, &word, &window);
    *word = 0;
    MPI_Win_shared_query(window, ddp_rank(g) / 2 * 2, &size, &unit, &word); /* of the leader */
    MPI_Barrier(MPI_COMM_WORLD);
    leader_sleeps = word;
    for (int round = 0; round < 8; round++) { /* both methods have their turns */
        is_sleepy_leader = ddp_local_rank(g) == 0;
        probes = 0;
        RANKS_OK(g, ddp_all_reduce(g, data, data, COUNT, DDP_F32, DDP_OP_SUM, NULL));
        RANKS_CHECK(g, !is_sleepy_leader, "the leader has sent nothing");
        RANKS_CHECK(g, ddp_local_rank(g) == 0 || probes > 0, "round %d: MPI was not called in 10 s", round);
    }
    leader_sleeps = NULL;
    MPI_Win_free(&window);
    ddp_group_destroy(g);
    return DDP_OK;
}

/* Elements that all ranks send to other machines in a sum of COUNT elements, on two machines of two ranks. By
   machine, one rank per machine sends, instead of two. */
static ddp_result across(void) {
    enum { COUNT = 4096, ROOT = 1 };
    static const struct {
        const char *name;
        int64_t flat, by_machine;
    } sums[] = {{"all_reduce", 4 * COUNT, 2 * COUNT},
                {"reduce", 5 * COUNT / 2, 3 * COUNT / 2},
                {"reduce_scatter", 8 * COUNT, 4 * COUNT}};
    static float data[4 * COUNT], out[COUNT];
    ddp_group *g = NULL;
    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    RANKS_CHECK(g, ddp_world_size(g) == 4 && ranks_per_machine() == 2, "it needs 4by2");
    for (int kind = 0; kind < 3; kind++) {
        int methods_used[2] = {0};
        for (int round = 0; round < 8; round++) { /* both methods have their turns */
            int64_t elements;
            bytes_across = 0;
            if (kind == 0) RANKS_OK(g, ddp_all_reduce(g, data, out, COUNT, DDP_F32, DDP_OP_SUM, NULL));
            if (kind == 1) RANKS_OK(g, ddp_reduce(g, data, out, COUNT, DDP_F32, DDP_OP_SUM, ROOT, NULL));
            if (kind == 2) RANKS_OK(g, ddp_reduce_scatter(g, data, out, COUNT, DDP_F32, DDP_OP_SUM, NULL));
            MPI_Allreduce(&bytes_across, &elements, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
            elements /= (int64_t)sizeof *data;
            RANKS_CHECK(g, elements == sums[kind].flat || elements == sums[kind].by_machine,
                        "%s: %lld elements", sums[kind].name, (long long)elements);
            methods_used[elements == sums[kind].by_machine]++;
        }
        RANKS_CHECK(g, methods_used[0] && methods_used[1], "%s: %d flat, %d by machine", sums[kind].name,
                    methods_used[0], methods_used[1]);
    }
    ddp_group_destroy(g);
    finalized_at_exit = 1;
    return DDP_OK;
}

/* A rank that stalls inside a sum by machine is named, although the leaders of all machines have arrived and
   answer. In a reduce, a rank that has ended early waits in the next call: it waits for the cause, too. */
static ddp_result stalled(void) {
    enum { COUNT = 1000 };
    static float data[4 * COUNT], out[COUNT];
    for (int kind = 0; kind < 3; kind++) {
        ddp_group *g = NULL;
        if (kind > 0) MPI_Barrier(MPI_COMM_WORLD); /* rank 3 is late */
        RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 2000));
        RANKS_CHECK(g, ddp_world_size(g) == 4 && ranks_per_machine() == 2, "it needs 4by2");
        RANKS_OK(g, ddp_barrier(g));
        by_machine_only = 1;
        stalls_after_compare = ddp_rank(g) == 3;
        ddp_result result = DDP_OK;
        if (kind == 0) result = ddp_all_reduce(g, data, out, COUNT, DDP_F32, DDP_OP_SUM, NULL);
        if (kind == 1) result = ddp_reduce(g, data, out, COUNT, DDP_F32, DDP_OP_SUM, 0, NULL);
        if (kind == 2) result = ddp_reduce_scatter(g, data, out, COUNT, DDP_F32, DDP_OP_SUM, NULL);
        if (result == DDP_OK) result = ddp_barrier(g);
        RANKS_CHECK(g, result != DDP_OK, "kind %d: no rank has found the stalled one", kind);
        /* And ranks that stand still at this moment. */
        const char *missing = strstr(ddp_last_error(), "missing: rank ");
        RANKS_CHECK(g, missing && strchr(missing, '3'), "kind %d: %s", kind, ddp_last_error());
        by_machine_only = 0;
        stalls_after_compare = 0;
        ddp_group_destroy(g);
    }
    finalized_at_exit = 0;
    return DDP_OK;
}

/* MPI belongs to the program, at each thread level: it stays initialised, and work that needs a thread
   progresses inside ddp_wait and ddp_test. */
static ddp_result users(int level) {
    ddp_group *g = NULL, *half = NULL;
    int got = -1, rank;
    granted = level;
    MPI_Init_thread(NULL, NULL, level, &got);
    RANKS_CHECK(NULL, got == level, "level %d", got);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int order = DDP_ORDER_TREE; order <= DDP_ORDER_ANY; order++) {
        RANKS_OK(NULL, join(&g, (ddp_order)order, 20000));
        RANKS_OK(g, work_of_all_sorts(g));
        RANKS_OK(g, ddp_group_split(g, rank % 2, 0, &half));
        if (ddp_world_size(half) > 1) RANKS_OK(half, work_of_all_sorts(half));
        ddp_group_destroy(half);
        ddp_group_destroy(g);
    }
    RANKS_CHECK(NULL, is_running() && !finalized, "it is finalised");
    MPI_Finalize();
    RANKS_CHECK(NULL, join(&g, DDP_ORDER_TREE, 20000) == DDP_ERR_INVALID && !g, "a group after the end");
    SAYS(NULL, "MPI is finalized and cannot be initialized again");
    finalized_at_exit = 1;
    return DDP_OK;
}
static ddp_result users_single(void) { return users(MPI_THREAD_SINGLE); }
static ddp_result users_multiple(void) { return users(MPI_THREAD_MULTIPLE); }

/* Groups of the program's own communicators. */
static ddp_result from_mpi(void) {
    ddp_group *g = (ddp_group *)&g;
    MPI_Comm turned, joined, half;
    ddp_group_desc desc = DDP_ZERO;
    int rank, size, sum = 0, side;
    desc.order = DDP_ORDER_ANY;
    desc.name = "turned";
    RANKS_CHECK(NULL, ddp_group_from_mpi(&g, MPI_COMM_WORLD, NULL) == DDP_ERR_INVALID && !g,
                "before MPI_Init");
    SAYS(NULL, "ddp_group_from_mpi: MPI is not initialized; call MPI_Init first");
    MPI_Init(NULL, NULL);
    RANKS_CHECK(NULL, ddp_group_from_mpi(NULL, MPI_COMM_WORLD, NULL) == DDP_ERR_INVALID, "out is NULL");
    RANKS_CHECK(NULL, ddp_group_from_mpi(&g, MPI_COMM_NULL, NULL) == DDP_ERR_INVALID, "no communicator");
    SAYS(NULL, "MPI_COMM_NULL");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    side = rank >= size / 2;
    MPI_Comm_split(MPI_COMM_WORLD, side, rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, side ? 0 : size / 2, 1, &joined);
    RANKS_CHECK(NULL, ddp_group_from_mpi(&g, joined, NULL) == DDP_ERR_INVALID, "two groups");
    SAYS(NULL, "MPI_Intercomm_merge");
    MPI_Comm_free(&joined);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &turned);
    for (int i = 0; i < 3; i++) {
        RANKS_OK(NULL, ddp_group_from_mpi(&g, i == 2 ? half : turned, i ? NULL : &desc));
        if (i < 2)
            RANKS_CHECK(g, ddp_rank(g) == size - 1 - rank && ddp_world_size(g) == size, "rank %d",
                        ddp_rank(g));
        else
            RANKS_CHECK(g, ddp_rank(g) == rank - side * (size / 2), "rank %d", ddp_rank(g));
        RANKS_CHECK(g, strcmp(ddp_group_name(g), i ? "world" : "turned") == 0, "%s", ddp_group_name(g));
        if (ddp_world_size(g) > 1) RANKS_OK(g, work_of_all_sorts(g));
        ddp_group_destroy(g);
        MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, turned);
        RANKS_CHECK(NULL, sum == size * (size - 1) / 2, "the program's communicator: %d", sum);
    }
    MPI_Comm_free(&turned);
    MPI_Comm_free(&half);
    MPI_Finalize();
    finalized_at_exit = 1;
    return DDP_OK;
}

/* A failure inside MPI has MPI's own text and reaches all ranks; then MPI is not finalised. */
static ddp_result text(void) {
    ddp_group *g = NULL;
    float x = 1;
    ddp_result result;
    int rank;
    RANKS_OK(NULL, join(&g, DDP_ORDER_ANY, 20000));
    rank = ddp_rank(g);
    RANKS_OK(g, ddp_barrier(g));
    fails_next = rank == 1;
    result = ddp_all_reduce(g, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL);
    RANKS_CHECK(g, result == DDP_ERR_ENGINE, "%s: %s", ddp_result_name(result), ddp_last_error());
    SAYS(g, "rank %d/%d ddp_all_reduce group=world seq=%d f32 count=1: MPI_Iallreduce: MPI_ERR_OTHER", rank,
         ddp_world_size(g), 2);
    RANKS_CHECK(g, ddp_barrier(g) == DDP_ERR_POISONED, "the next call");
    ddp_group_destroy(g);
    finalized_at_exit = 0;
    return DDP_OK;
}

/* Ranks of one world add in one order: the others would use other methods. */
static ddp_result orders(void) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    ddp_group *g = NULL;
    ddp_result result = join(&g, rank && atoi(rank) == 2 ? DDP_ORDER_ANY : DDP_ORDER_TREE, 20000);
    RANKS_CHECK(NULL, result == DDP_ERR_MISMATCH && !g, "%s: %s", ddp_result_name(result), ddp_last_error());
    SAYS(NULL, "rank %d and rank 0 have different desc.order", 2);
    finalized_at_exit = 0;
    return DDP_OK;
}

/* ddp_launch_desc.devices is indexed by local rank: two entries serve two ranks on each machine. */
static ddp_result has_device(ddp_group *world, void *user) {
    int local = ddp_local_rank(world), index = ddp_group_device_index(world);
    (void)user;
    RANKS_CHECK(world, index == 7 - local, "local rank %d has device %d", local, index);
    return DDP_OK;
}
static ddp_result devices(void) {
    static const int list[] = {7, 6};
    ddp_launch_desc desc = DDP_ZERO;
    desc.devices = list;
    desc.device_count = 2;
    RANKS_OK(NULL, ddp_launch(&desc, has_device, NULL));
    finalized_at_exit = 1;
    return DDP_OK;
}

/* Creates that fail before any rank communicates do not keep MPI from being finalised at exit. */
static int allocations_left;
static void *alloc_some(size_t size_bytes, void *user) {
    (void)user;
    return allocations_left-- > 0 ? malloc(size_bytes) : NULL;
}
static void free_some(void *memory, void *user) {
    (void)user;
    free(memory);
}
static ddp_result memory(void) {
    ddp_group *g = NULL;
    ddp_group_desc desc = DDP_ZERO;
    desc.init_method = "mpi://";
    desc.alloc_fn = alloc_some;
    desc.free_fn = free_some;
    for (int count = 0; count < 2; count++) {
        allocations_left = count;
        RANKS_CHECK(NULL, ddp_group_create(&g, &desc) == DDP_ERR_NO_MEMORY && !g, "%d allocations: %s", count,
                    ddp_last_error());
    }
    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    RANKS_OK(g, work_of_all_sorts(g));
    ddp_group_destroy(g);
    finalized_at_exit = 1;
    return DDP_OK;
}

/* If ranks make different calls, or none, the errors name them: on one machine and across machines. */
static ddp_result named(void) {
    ddp_group *g = NULL;
    float x[8] = {0}, y[8];
    size_t gives[4] = {1, 1, 1, 1}, takes[4] = {1, 1, 1, 1};
    int rank, last;
    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    rank = ddp_rank(g);
    last = ddp_world_size(g) - 1;
    RANKS_CHECK(g,
                ddp_all_reduce(g, x, x, rank == last ? 2 : 1, DDP_F32, DDP_OP_SUM, NULL) == DDP_ERR_MISMATCH,
                "other counts");
    SAYS(g, "ranks made different calls: rank ");
    SAYS(g, "rank %d ddp_all_reduce f32 count=2 sum", last);
    ddp_group_destroy(g);

    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    if (rank == last) gives[0] = 2;
    RANKS_CHECK(g, ddp_all_to_all_v(g, x, gives, NULL, y, takes, NULL, DDP_F32, NULL) == DDP_ERR_MISMATCH,
                "%s", ddp_last_error());
    SAYS(g, "counts disagree: rank %d sends 2 elements to rank 0, which expects 1", last);
    ddp_group_destroy(g);

    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    memset(takes, 0, sizeof takes);
    takes[rank == last] = 2; /* as many in all */
    RANKS_CHECK(g, ddp_all_gather_v(g, x, takes[rank], y, takes, NULL, DDP_F32, NULL) == DDP_ERR_MISMATCH,
                "%s", ddp_last_error());
    SAYS(g, "counts disagree: recv_counts");
    ddp_group_destroy(g);

    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    if (rank == 0)
        RANKS_CHECK(g, ddp_send(g, x, 3, DDP_F32, last, 7, NULL) == DDP_OK || ddp_group_status(g) != DDP_OK,
                    "%s", ddp_last_error());
    if (rank == last)
        RANKS_CHECK(g, ddp_recv(g, x, 2, DDP_F32, 0, 7, NULL) == DDP_ERR_MISMATCH, "%s", ddp_last_error());
    RANKS_CHECK(g, ddp_barrier(g) != DDP_OK, "after a message of another count");
    SAYS(g, "rank 0 ddp_send f32 count=3");
    SAYS(g, "rank %d ddp_recv f32 count=2", last);
    ddp_group_destroy(g);

    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    ddp_result met = ddp_barrier(g); /* the abort may reach a rank that has not left the barrier yet */
    RANKS_CHECK(g, met == DDP_OK || (rank != 0 && met == DDP_ERR_POISONED), "%s", ddp_last_error());
    if (rank == 0) RANKS_OK(g, ddp_group_abort(g));
    while (ddp_group_status(g) == DDP_OK) ranks_sleep_us(1000); /* without a call */
    SAYS(g, "rank 0 (pid ");
    ddp_group_destroy(g);

    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 8000)); /* longer than a rank can stand still */
    /* It arrives after the timeout of the others. */
    while (rank == last && ddp_group_status(g) == DDP_OK) ranks_sleep_us(1000);
    RANKS_CHECK(g, ddp_barrier(g) == DDP_ERR_TIMEOUT, "a rank that does not come: %s", ddp_last_error());
    /* And ranks that stand still at this moment. */
    const char *missing = strstr(ddp_last_error(), "missing: rank ");
    RANKS_CHECK(g, missing && strchr(missing, '0' + last) && strstr(ddp_last_error(), "timed out after"),
                "%s", ddp_last_error());
    ddp_group_destroy(g);

    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 20000));
    if (rank != last) {
        RANKS_CHECK(g, ddp_barrier(g) == DDP_ERR_PEER_LOST, "a rank has left: %s", ddp_last_error());
        RANKS_CHECK(g,
                    strstr(ddp_last_error(), "has destroyed this group")
                        || strstr(ddp_last_error(), "has returned"),
                    "%s", ddp_last_error());
        SAYS(g, ": rank %d ", last);
    }
    ddp_group_destroy(g);
    finalized_at_exit = 0;
    return DDP_OK;
}

/* More ranks than the local backend supports, in blocks and in other orders: sums in tree order, counts,
   splits. */
static ddp_result many(void) {
    enum { COUNT = 3000, MOST = 256 };
    static float rows[MOST][COUNT], want[COUNT], have[COUNT];
    static int32_t blocks[MOST], came[2 * MOST];
    size_t gives[MOST], takes[MOST], offsets[MOST];
    ddp_group *g = NULL, *part = NULL;
    ddp_work work;
    int w, rank, n = 0;
    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 200000));
    w = ddp_world_size(g);
    rank = ddp_rank(g);
    RANKS_CHECK(g, w > DDP_MAX_LOCAL_RANKS && w <= MOST, "%d ranks", w);
    for (int r = 0; r < w; r++)
        for (int i = 0; i < COUNT; i++) rows[r][i] = (float)((r * 7919 + i * 104729) % 2003 - 1001) / 37.0f;
    memcpy(want, rows, sizeof want);
    for (int step = 1; step < w; step *= 2) /* the tree: neighbours, then their sums */
        for (int r = 0; r + step < w; r += 2 * step)
            for (int i = 0; i < COUNT; i++) rows[r][i] += rows[r + step][i];
    for (int i = 0; i < COUNT; i++) {
        float own = (float)((rank * 7919 + i * 104729) % 2003 - 1001) / 37.0f;
        want[i] = rows[0][i];
        have[i] = own;
    }
    RANKS_OK(g, ddp_all_reduce(g, have, have, COUNT, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_CHECK(g, memcmp(have, want, sizeof have) == 0, "%g, wanted %g", (double)have[0], (double)want[0]);
    for (int r = 0; r < w; r++) {
        gives[r] = (size_t)(r % 3 == rank % 3);
        takes[r] = gives[r];
        offsets[r] = (size_t)(2 * r);
        blocks[r] = rank * 1000 + r;
        n += r % 3 == rank % 3;
    }
    memset(came, -1, sizeof came);
    for (int r = 0, at = 0; r < w; r++)
        if (gives[r]) blocks[at++] = rank * 1000 + r;
    RANKS_OK(g, ddp_all_to_all_v(g, blocks, gives, NULL, came, takes, offsets, DDP_I32, &work));
    memset(gives, 255, sizeof gives); /* they were copied */
    RANKS_OK(g, ddp_wait(g, &work));
    for (int r = 0; r < w; r++)
        RANKS_CHECK(g, came[2 * r] == (r % 3 == rank % 3 ? r * 1000 + rank : -1) && came[2 * r + 1] == -1,
                    "from %d: %d", r, came[2 * r]);
    for (int r = 0; r < w; r++) takes[r] = (size_t)(r % 2);
    RANKS_OK(g, ddp_all_gather_v(g, &blocks[0], takes[rank], came, takes, NULL, DDP_I32, NULL));
    RANKS_OK(g, ddp_group_split(g, rank % 2, -rank, &part));
    RANKS_CHECK(g, ddp_world_size(part) == (w + !(rank % 2)) / 2, "%d", ddp_world_size(part));
    n = 1;
    RANKS_OK(part, ddp_all_reduce(part, &n, &n, 1, DDP_I32, DDP_OP_SUM, NULL));
    RANKS_CHECK(part, n == ddp_world_size(part), "%d", n);
    ddp_group_destroy(part);
    RANKS_OK(g, ddp_barrier(g));
    ddp_group_destroy(g);
    finalized_at_exit = 1;
    return DDP_OK;
}

/* More than 2^31 bytes and elements, in memory that maps the same few pages repeatedly. */
static ddp_result large(void) {
    const size_t page = (size_t)1 << 24, pages = 129, count = page * pages - 77;
    int fd = (int)syscall(SYS_memfd_create, "large", 0u), rank;
    unsigned char *space = (unsigned char *)mmap(NULL, page * (pages + 1), PROT_NONE,
                                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ddp_group *g = NULL;
    RANKS_CHECK(NULL,
                fd >= 0 && space != (unsigned char *)MAP_FAILED && ftruncate(fd, (off_t)(2 * page)) == 0,
                "%s", strerror(errno));
    for (size_t i = 0; i < pages; i++) { /* the last one has separate pages */
        int own = i == pages - 1;
        RANKS_CHECK(NULL,
                    mmap(space + i * page, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                         own ? (off_t)page : 0)
                        != MAP_FAILED,
                    "%s", strerror(errno));
    }
    RANKS_OK(NULL, join(&g, DDP_ORDER_TREE, 60000));
    rank = ddp_rank(g);
#define LARGE(call, first, last)                                                                             \
    do {                                                                                                     \
        memset(space, rank + 1, page);                                                                       \
        memset(space + (pages - 1) * page, 10 * (rank + 1), page);                                           \
        RANKS_OK(g, call);                                                                                   \
        RANKS_CHECK(g, space[0] == (first) && space[count - 1] == (last) && space[count] == 10 * (rank + 1), \
                    "%d %d %d", space[0], space[count - 1], space[count]);                                   \
    } while (0)
    LARGE(ddp_broadcast(g, space, count, DDP_U8, 1, NULL), 2, 20);
    LARGE(rank ? ddp_send(g, space, count, DDP_U8, 0, 1, NULL)
               : ddp_recv(g, space, count, DDP_U8, 1, 1, NULL),
          2, 20);
    LARGE(ddp_reduce(g, space, space, count, DDP_U8, DDP_OP_MAX, 0, NULL), 2, 20);
    ddp_group_destroy(g);
    finalized_at_exit = 1;
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        ddp_result (*run)(void);
    } scenarios[] = {
        {"chosen", chosen},
        {"users_single", users_single},
        {"users_multiple", users_multiple},
        {"from_mpi", from_mpi},
        {"text", text},
        {"orders", orders},
        {"memory", memory},
        {"devices", devices},
        {"named", named},
        {"many", many},
        {"large", large},
        {"probing", probing},
        {"across", across},
        {"stalled", stalled},
    };
    watchdog_start(240);
    inner.mpi_chunk_bytes = (size_t)2 << 20; /* the normal size */
    inner.mpi_piece_bytes = (size_t)1 << 30;
    atexit(last_look);
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        if (argc < 2 || strcmp(argv[1], scenarios[i].name) != 0) continue;
        ddp_result result = scenarios[i].run();
        if (result == DDP_OK) return 0;
        fprintf(stderr, "FAIL %s: %s: %s\n", argv[1], ddp_result_name(result), ddp_last_error());
        _exit(1);
    }
    fprintf(stderr, "usage: mpirun -n W %s SCENARIO\n", argv[0]);
    return 2;
}

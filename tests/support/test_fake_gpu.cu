/*  test_fake_gpu.cu - the fake GPU of support/fake_gpu.h and fake_nccl.h: each rule of CUDA and NCCL that it
    emulates, with programs that are known to be right or wrong. A wrong one must be detected with every
    seed. */
#include "host_only.h"
#include "fake_nccl.h"
#include "watchdog.h"

#define SEEDS 24
#define N 1024
#define BYTES (N * sizeof(float))

static int failures, checks;
static const char *doing = "";

static void check_at(int good, int line, const char *what) {
    __atomic_add_fetch(&checks, 1, __ATOMIC_RELAXED);
    if (good || __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED) > 20) return;
    printf("%s, line %d, seed %llu: %s\n", doing, line, (unsigned long long)fake.seed, what);
}
#define CHECK(good) check_at((good) != 0, __LINE__, #good)
#define CLEAN() check_at(fake_failures() == 0, __LINE__, "nothing is out of order")
#define FOUND(text) check_at(fake_expect(text) > 0, __LINE__, "found: " text)

/* ---- programs ---- */

static float *device_floats(float value) {
    float *p = NULL;
    fake_malloc((void **)&p, BYTES);
    for (int i = 0; i < N; i++) ((float *)fake_view(p))[i] = value;
    return p;
}

static cudaError_t add_one(cudaStream_t s, float *p) {
    return fake_launch_work(s, "add_one", {{p, BYTES, 0}, {p, BYTES, 1}}, [p] {
        for (int i = 0; i < N; i++) ((float *)fake_view(p))[i] += 1;
    });
}
static cudaError_t doubled(cudaStream_t s, float *to, const float *from) {
    return fake_launch_work(s, "doubled", {{from, BYTES, 0}, {to, BYTES, 1}}, [to, from] {
        for (int i = 0; i < N; i++) ((float *)fake_view(to))[i] = 2 * ((float *)fake_view(from))[i];
    });
}
static float last(const float *p) { return ((float *)fake_view(p))[N - 1]; }

typedef void (*rank_fn)(int rank, int size);
static struct {
    rank_fn fn;
    int size;
    pthread_barrier_t all_here;
} job;
static void *rank_main(void *argument) {
    int rank = (int)(intptr_t)argument;
    fake_set_device(rank);
    job.fn(rank, job.size);
    return NULL;
}
static void ranks(int size, rank_fn fn) {
    pthread_t threads[8];
    job.fn = fn;
    job.size = size;
    pthread_barrier_init(&job.all_here, NULL, (unsigned)size);
    for (int r = 0; r < size; r++) pthread_create(&threads[r], NULL, rank_main, (void *)(intptr_t)r);
    for (int r = 0; r < size; r++) pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&job.all_here);
    fake_host_fence();
}

/* ---- memory ---- */

static void memory_is_checked(void) {
    float host[N], *p = device_floats(1), *other;
    int yes = 7;
    CHECK(fake_is_device(p, &yes) == cudaSuccess && yes == 1);
    CHECK(fake_is_device(host, &yes) == cudaSuccess && yes == 0);
    CHECK(fake_memset(host, 0, BYTES, 0) != cudaSuccess);
    FOUND("is memory of the host");
    CHECK(fake_memset(p, 0, BYTES + 1, 0) != cudaSuccess);
    FOUND("runs over the end");
    fake_set_device(1);
    other = device_floats(1);
    CHECK(fake_memset(p, 0, BYTES, 0) != cudaSuccess);
    FOUND("another device");
    CHECK(fake_free(other) == cudaSuccess);
    fake_set_device(0);
    CHECK(fake_free(p) == cudaSuccess);
    CHECK(fake_memset(p, 0, BYTES, 0) != cudaSuccess);
    FOUND("has been freed");
    CHECK(fake_free(p) != cudaSuccess);
    FOUND("freed already");
    CHECK(fake_host_free(host) != cudaSuccess);
    FOUND("never allocated so");
    fake_memcpy(host, device_floats(1), BYTES, cudaMemcpyHostToDevice, 0);
    FOUND("kind does not fit");
    CLEAN();
}

static void cpu_may_not_touch(void) {
    float *p = device_floats(1);
    int status;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        close(2);
        _exit(*(volatile float *)p == 1 ? 0 : 1);
    }
    waitpid(child, &status, 0);
    CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
}

/* Ordinary memory of the host is read at once, and written on return. */
static void copies_with_the_host(void) {
    float host[N], *p = device_floats(0);
    for (int i = 0; i < N; i++) host[i] = 3;
    fake_memcpy(p, host, BYTES, cudaMemcpyHostToDevice, 0);
    for (int i = 0; i < N; i++) host[i] = 4;
    add_one(0, p);
    CHECK(last(p) == 0); /* nothing has forced the stream to run */
    fake_memcpy(host, p, BYTES, cudaMemcpyDefault, 0);
    CHECK(host[0] == 4 && host[N - 1] == 4);
    CLEAN();
}

static void pinned_memory(void) {
    float *pinned, *p = device_floats(0);
    cudaStream_t s;
    fake_stream_create(&s, 0);
    fake_host_alloc((void **)&pinned, BYTES);
    for (int i = 0; i < N; i++) pinned[i] = 5;
    fake_host_access(pinned, BYTES, 1);
    fake_memcpy(p, pinned, BYTES, cudaMemcpyHostToDevice, s);
    fake_synchronize(s);
    fake_host_access(pinned, BYTES, 1);
    CHECK(last(p) == 5);
    CLEAN();
    fake_memcpy(p, pinned, BYTES, cudaMemcpyHostToDevice, s);
    fake_host_access(pinned, BYTES, 0); /* two reads */
    CLEAN();
    fake_host_access(pinned, BYTES, 1);
    fake_synchronize(s);
    FOUND("race: ");
    fake_memcpy(pinned, p, BYTES, cudaMemcpyDeviceToHost, s);
    fake_host_access(pinned + 7, 4, 0);
    fake_synchronize(s);
    FOUND("race: ");
    CLEAN();
}

/* A free waits for the device; stream-ordered frees and allocations are work of their stream. */
static void freeing(void) {
    cudaStream_t a, b;
    cudaEvent_t e;
    float *p = device_floats(0), *q, *r;
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_event_create(&e);
    add_one(a, p);
    CHECK(fake_free(p) == cudaSuccess);
    CLEAN();
    fake_malloc_async((void **)&q, BYTES, a);
    add_one(a, q);
    fake_event_record(e, a);
    fake_stream_wait_event(b, e);
    add_one(b, q);
    fake_free_async(q, b);
    fake_synchronize(b);
    CLEAN();
    fake_malloc_async((void **)&r, BYTES, a);
    fake_synchronize(a);
    add_one(a, r);
    fake_free_async(r, b); /* a can still be running */
    fake_synchronize(a);
    fake_synchronize(b);
    CHECK(fake_expect("race: ") + fake_expect("has been freed") > 0);
    CLEAN();
}

/* ---- streams and events ---- */

struct loop {
    float *to;
    const float *from;
};
static void run_loop(void *argument) {
    loop *l = (loop *)argument;
    for (int i = 0; i < N; i++) {
        fake_seen((const void *)(l->from + i), sizeof(float));
        fake_seen((void *)(l->to + i), sizeof(float));
        l->to[i] = l->from[i] + 1;
    }
}

static int wrong_data;

static void without_a_wait(void) {
    cudaStream_t a, b;
    float *p = device_floats(1), *q = device_floats(0);
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 1);
    add_one(a, p);
    doubled(b, q, p);
    CHECK(last(q) == 0);
    fake_synchronize(b);
    fake_synchronize(a);
    wrong_data |= 1 << (last(q) == 2 ? 1 : 0);
    CHECK(last(q) == 2 || last(q) == 4);
    FOUND("race: ");
    CLEAN();
}

static void event_orders(void) {
    cudaStream_t a, b, c;
    cudaEvent_t e, f;
    float *p = device_floats(1), *q = device_floats(0);
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_stream_create(&c, 0);
    fake_event_create(&e);
    fake_event_create(&f);
    add_one(a, p);
    fake_event_record(e, a);
    fake_stream_wait_event(c, e); /* through a third stream */
    fake_event_record(f, c);
    fake_event_destroy(e); /* does not remove the wait */
    fake_stream_wait_event(b, f);
    doubled(b, q, p);
    fake_stream_destroy(a); /* its work still runs */
    fake_synchronize(b);
    CHECK(last(q) == 4);
    CHECK(fake_event_query(f) == cudaSuccess);
    CLEAN();
    fake_stream_wait_event(b, e);
    FOUND("event has been destroyed");
    fake_synchronize(a);
    FOUND("stream has been destroyed");
}

/* A forked rank has separate fake GPUs. */
static void in_a_process(void) {
    int status = -1;
    float *p = device_floats(1);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        fake_start(1, fake.seed);
        failures = 0;
        event_orders();
        _exit(failures != 0);
    }
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0 && last(p) == 1);
    CLEAN();
}

/* A wait before any record does nothing. */
static void event_never_recorded(void) {
    cudaStream_t a, b;
    cudaEvent_t e;
    float *p = device_floats(1), *q = device_floats(0);
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_event_create(&e);
    CHECK(fake_event_query(e) == cudaSuccess && fake_event_synchronize(e) == cudaSuccess);
    add_one(a, p);
    fake_stream_wait_event(b, e);
    fake_event_record(e, a);
    doubled(b, q, p);
    fake_synchronize(b);
    fake_synchronize(a);
    FOUND("race: ");
    CLEAN();
}

/* A wait is for the last record before it, not for later ones. */
static void event_recorded_again(void) {
    cudaStream_t a, b;
    cudaEvent_t e;
    float *p = device_floats(1), *q = device_floats(0), *r = device_floats(0);
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_event_create(&e);
    add_one(a, p);
    fake_event_record(e, a);
    fake_stream_wait_event(b, e);
    add_one(a, q);
    fake_event_record(e, a);
    doubled(b, r, p);
    fake_synchronize(b);
    CHECK(last(r) == 4);
    CLEAN();
    doubled(b, r, q);
    fake_synchronize(b);
    fake_synchronize(a);
    FOUND("race: ");
    add_one(a, q);
    fake_event_record(e, a);
    fake_event_synchronize(e); /* this one is for the last record */
    doubled(b, r, q);
    fake_synchronize(b);
    CHECK(last(r) == 4);
    CLEAN();
}

/* Work that the host has waited for is ordered before the work that it issues next. */
static void host_orders(void) {
    cudaStream_t a, b;
    cudaEvent_t e;
    float *p = device_floats(1), *q = device_floats(0);
    int way = (int)(fake.seed / 4 % 4);
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_event_create(&e);
    add_one(a, p);
    fake_event_record(e, a);
    if (way == 0) fake_synchronize(a);
    if (way == 1) fake_event_synchronize(e);
    if (way == 2)
        while (fake_stream_query(a) == cudaErrorNotReady) {
        }
    if (way == 3)
        while (fake_event_query(e) == cudaErrorNotReady) {
        }
    doubled(b, q, p);
    fake_synchronize(b);
    CHECK(last(q) == 4);
    CLEAN();
    add_one(a, p);
    fake_stream_query(a); /* a query is not a wait; it may have run the work */
    fake_event_query(e);
    doubled(b, q, p);
    fake_synchronize(b);
    fake_synchronize(a);
    fake_expect("race: ");
    CLEAN();
}

/* Waiting for an event does not wait for work after its record. */
static void event_is_not_its_stream(void) {
    cudaStream_t a, b;
    cudaEvent_t e;
    float *p = device_floats(1), *q = device_floats(0);
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_event_create(&e);
    fake_event_record(e, a);
    add_one(a, p);
    fake_event_synchronize(e);
    doubled(b, q, p);
    fake_synchronize(b);
    fake_synchronize(a);
    FOUND("race: ");
    CLEAN();
}

/* The legacy stream waits for blocking streams, and they wait for it. Non-blocking streams are
   independent. */
static void legacy_stream(void) {
    cudaStream_t blocking, apart;
    float *p = device_floats(1), *q = device_floats(0), *r = device_floats(0);
    fake_stream_create_blocking(&blocking);
    fake_stream_create(&apart, 0);
    add_one(0, p);
    doubled(blocking, q, p);
    doubled(0, r, q);
    add_one(blocking, r);
    fake_synchronize(0);
    fake_synchronize(blocking);
    CHECK(last(q) == 4 && last(r) == 9);
    CLEAN();
    add_one(0, p);
    doubled(apart, q, p);
    fake_synchronize(apart);
    fake_synchronize(0);
    FOUND("race: ");
    add_one(apart, q);
    doubled(cudaStreamLegacy, r, q);
    fake_synchronize(apart);
    fake_synchronize(0);
    FOUND("race: ");
    CLEAN();
}

/* Two reads, and accesses to different bytes, are no race. */
static void no_race(void) {
    cudaStream_t a, b;
    float *p = device_floats(1), *q = device_floats(0), *r = device_floats(0);
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    doubled(a, q, p);
    doubled(b, r, p);
    fake_synchronize(a);
    fake_synchronize(b);
    fake_memset(p, 0, BYTES / 2, a);
    fake_memset(p + N / 2, 0, BYTES / 2, b);
    fake_synchronize(a);
    fake_synchronize(b);
    CLEAN();
    fake_memset(p, 0, BYTES / 2 + 1, a);
    fake_memset(p + N / 2, 0, BYTES / 2, b);
    fake_synchronize(a);
    fake_synchronize(b);
    FOUND("race: ");
    CLEAN();
}

/* fake.strict: a wait of one thread does not order another thread. */
static cudaStream_t shared_stream;
static float *shared_floats;
static void *second_thread(void *) {
    cudaStream_t b;
    fake_stream_create(&b, 0);
    if (fake.seed & 8) fake_host_fence();
    add_one(b, shared_floats);
    fake_synchronize(b);
    return NULL;
}
static void threads_by_themselves(void) {
    pthread_t thread;
    fake.strict = (fake.seed & 4) != 0;
    shared_floats = device_floats(1);
    fake_stream_create(&shared_stream, 0);
    add_one(shared_stream, shared_floats);
    fake_synchronize(shared_stream);
    pthread_create(&thread, NULL, second_thread, NULL);
    pthread_join(thread, NULL);
    CHECK(last(shared_floats) == 3);
    if (fake.strict && !(fake.seed & 8)) FOUND("race: ");
    CLEAN();
}

/* A stream takes kernels and records while its device is current; waits cross devices. */
static void devices(void) {
    cudaStream_t a, b;
    cudaEvent_t e;
    float *p = device_floats(1);
    int device = -1, count = -1;
    char name[256];
    unsigned char uuid[16];
    CHECK(fake_identity(2, name, uuid) == cudaSuccess && strcmp(name, "Fake 2") == 0 && uuid[0] == 2
          && fake_identity(3, name, uuid) == cudaErrorInvalidDevice);
    CHECK(fake_launch(NULL, dim3(7), dim3(256), NULL, 0, 0) == cudaSuccess
          && fake_record(0).find("cudaLaunchKernel(7, 256, s0)\n") != std::string::npos);
    CHECK(fake_clear_error() == cudaSuccess);
    CHECK(fake_device_count(&count) == cudaSuccess && count == 3);
    CHECK(fake_set_device(3) == cudaErrorInvalidDevice && fake_get_device(&device) == cudaSuccess
          && device == 0);
    fake_stream_create(&a, 0);
    fake_event_create(&e);
    fake_set_device(1);
    fake_stream_create(&b, 0);
    add_one(a, p);
    FOUND("the stream is another device's");
    fake_expect("another device");
    CHECK(fake_event_record(e, b) != cudaSuccess);
    FOUND("different devices");
    CHECK(fake_event_record(e, a) == cudaSuccess && fake_stream_wait_event(b, e) == cudaSuccess
          && fake_synchronize(b) == cudaSuccess);
    CLEAN();
}

/* Loops of kernels run in stream order, on device addresses, and their reported accesses are checked. */
static void loops(void) {
    cudaStream_t a, b;
    float *p = device_floats(1), *q = device_floats(0);
    loop l = {q, p};
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    CHECK(fake_host_work(run_loop, &l, sizeof l, a) == cudaSuccess);
    l.to = NULL; /* the argument was copied */
    CHECK(last(q) == 0);
    fake_synchronize(a);
    CHECK(last(q) == 2);
    CLEAN();
    l.to = q;
    fake_host_work(run_loop, &l, sizeof l, a);
    fake_memset(p, 0, 4, b);
    fake_synchronize(a);
    fake_synchronize(b);
    FOUND("race: ");
    CLEAN();
    fake_set_device(1);
    CHECK(fake_host_work(run_loop, &l, sizeof l, a) != cudaSuccess);
    FOUND("another device");
}

/* ---- capture ---- */

static void *relaxed_thread(void *) {
    cudaEvent_t e;
    fake_relax_capture();
    fake_event_create(&e);
    CHECK(fake_event_query(e) == cudaSuccess);
    return NULL;
}

static void capture(void) {
    cudaStream_t a, b;
    cudaEvent_t e, f;
    pthread_t thread;
    int yes = 7;
    float *p = device_floats(0), *q = device_floats(0), *r = device_floats(0);
    loop l = {r, q};
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_event_create(&e);
    fake_event_create(&f);
    fake_capture_begin(a);
    CHECK(fake_stream_capturing(a, &yes) == cudaSuccess && yes == 1);
    CHECK(fake_stream_capturing(b, &yes) == cudaSuccess && yes == 0);
    add_one(a, p);
    fake_event_record(e, a);
    fake_stream_wait_event(b, e); /* b is drawn in */
    CHECK(fake_stream_capturing(b, &yes) == cudaSuccess && yes == 1);
    doubled(b, q, p);
    fake_host_work(run_loop, &l, sizeof l, b);
    fake_event_record(f, b);
    fake_stream_wait_event(a, f);
    add_one(a, q);
    pthread_create(&thread, NULL, relaxed_thread, NULL);
    pthread_join(thread, NULL);
    CLEAN();
    fake_graph *graph = fake_capture_end(a);
    fake_synchronize(a);
    CHECK(last(p) == 0 && last(q) == 0 && graph);
    for (int i = 0; i < 3; i++) fake_graph_launch(graph, a);
    fake_synchronize(a);
    CHECK(last(p) == 3 && last(q) == 7 && last(r) == 7);
    CLEAN();
}

static void capture_gone_wrong(void) {
    cudaStream_t a, b;
    cudaEvent_t e, f;
    float *p = device_floats(0);
    void *out;
    fake_stream_create(&a, 0);
    fake_stream_create(&b, 0);
    fake_event_create(&e);
    fake_event_create(&f);
    fake_event_record(f, b);
    fake_capture_begin(a);
    CHECK(fake_synchronize(a) != cudaSuccess);
    FOUND("not allowed while a stream captures");
    CHECK(fake_malloc(&out, 64) != cudaSuccess);
    FOUND("not allowed while a stream captures");
    CHECK(fake_stream_wait_event(a, f) != cudaSuccess);
    FOUND("work outside of the capture");
    fake_event_record(e, a);
    CHECK(fake_event_query(e) == cudaErrorCapturedEvent);
    FOUND("event was captured");
    fake_stream_wait_event(b, e);
    add_one(b, p);
    fake_capture_end(a);
    FOUND("has not joined again");
    CLEAN();
}

/* ---- faults, the record, leaks ---- */

static void faults(void) {
    void *p = NULL, *q = NULL;
    cudaStream_t s;
    fake_fail("cudaMalloc", -1, 2, cudaErrorMemoryAllocation, 0);
    CHECK(fake_malloc(&p, 64) == cudaSuccess && fake_malloc(&q, 64) == cudaErrorMemoryAllocation && !q
          && fake.fault.fired);
    CHECK(fake_malloc(&q, 64) == cudaSuccess);
    fake_fail(NULL, 1, 1, 0, 1);
    CHECK(fake_memset(p, 0, 64, 0) == cudaSuccess);
    fake_set_device(1);
    CHECK(fake_stream_create(&s, 0) == cudaErrorUnknown && !s && fake_malloc(&p, 64) == cudaErrorUnknown);
    fake_set_device(0);
    fake_fail("cudaFree", -1, 1, 0, 0);
    CHECK(fake_free(q) == cudaErrorUnknown && fake_free(q) != cudaSuccess); /* the first one freed */
    FOUND("freed already");
    CLEAN();
}

static void the_record(void) {
    cudaStream_t s;
    cudaEvent_t e;
    float *p;
    fake_stream_create(&s, 1);
    fake_event_create(&e);
    fake_malloc((void **)&p, 64);
    fake_record_from_here();
    fake_memset(p + 1, 0, 60, s);
    fake_event_record(e, s);
    fake_stream_wait_event(0, e);
    fake_event_query(e);
    CHECK(fake_record(0)
          == "cudaMemsetAsync(m1+4, 0, 60, s1)\ncudaEventRecord(e1, s1)\ncudaStreamWaitEvent(s0, e1)\n");
    CHECK(fake_record(1) == "");
    fake_free(p);
    fake_stream_destroy(s);
    CHECK(fake_left() == "device 0: event e1\n");
    fake_event_destroy(e);
    CHECK(fake_left() == "");
    CLEAN();
}

/* ---- NCCL ---- */

static ncclUniqueId id;
static ncclComm_t comms[8];
static cudaStream_t streams[8];
static float *in[8], *out[8];
static int nonblocking;

static ncclResult_t settle(ncclComm_t c, ncclResult_t result) {
    while (result == ncclInProgress)
        if (ncclCommGetAsyncError(c, &result) != ncclSuccess) return ncclInternalError;
    return result;
}

static void make_comm(int rank, int size) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = !nonblocking;
    CHECK(settle(comms[rank], ncclCommInitRankConfig(&comms[rank], size, id, rank, &config)) == ncclSuccess);
    fake_stream_create(&streams[rank], 1);
    in[rank] = device_floats((float)(rank + 1));
    out[rank] = device_floats(-1);
}

static void begin(int size) {
    fake_nccl_fresh();
    ncclGetUniqueId(&id);
    ranks(size, make_comm);
}

static void end_rank(int rank, int) {
    CHECK(settle(comms[rank], ncclCommFinalize(comms[rank])) == ncclSuccess
          && ncclCommDestroy(comms[rank]) == ncclSuccess);
    fake_free(in[rank]);
    fake_free(out[rank]);
    fake_stream_destroy(streams[rank]);
}

static void end(int size) {
    ranks(size, end_rank);
    CHECK(fake_left() == "");
    CLEAN();
}

static float at(const float *p, int i) { return ((float *)fake_view(p))[i]; }

static void collectives_rank(int rank, int size) {
    ncclComm_t c = comms[rank];
    cudaStream_t s = streams[rank];
    float *a = in[rank], *b = out[rank];
    size_t part = N / 4;
    ncclRedOp_t op;
    float half = 0.5f;
    int n = 0;
    CHECK(ncclCommCount(c, &n) == ncclSuccess && n == size && ncclCommUserRank(c, &n) == ncclSuccess
          && n == rank && ncclCommCuDevice(c, &n) == ncclSuccess && n == rank);
    CHECK(settle(c, ncclAllReduce(a, b, N, ncclFloat32, ncclSum, c, s)) == ncclSuccess);
    fake_synchronize(s);
    CHECK(at(b, 0) == 6 && at(b, N - 1) == 6);
    CHECK(settle(c, ncclAllReduce(a, b, N, ncclFloat32, ncclAvg, c, s)) == ncclSuccess
          && fake_synchronize(s) == cudaSuccess && at(b, 5) == 2);
    CHECK(settle(c, ncclAllReduce(a, b, N, ncclFloat32, ncclMax, c, s)) == ncclSuccess
          && fake_synchronize(s) == cudaSuccess && at(b, 5) == 3);
    CHECK(settle(c, ncclAllReduce(a, b, N, ncclFloat32, ncclProd, c, s)) == ncclSuccess
          && fake_synchronize(s) == cudaSuccess && at(b, 5) == 6);
    CHECK(ncclRedOpCreatePreMulSum(&op, &half, ncclFloat32, ncclScalarHostImmediate, c) == ncclSuccess);
    CHECK(settle(c, ncclAllReduce(a, b, N, ncclFloat32, op, c, s)) == ncclSuccess
          && fake_synchronize(s) == cudaSuccess && at(b, 5) == 3);
    CHECK(ncclRedOpDestroy(op, c) == ncclSuccess);
    CHECK(settle(c, ncclReduce(a, b, N, ncclFloat32, ncclMin, 1, c, s)) == ncclSuccess
          && fake_synchronize(s) == cudaSuccess && at(b, 5) == (rank == 1 ? 1 : 3));
    CHECK(settle(c, ncclBroadcast(a, b, N, ncclFloat32, 2, c, s)) == ncclSuccess
          && fake_synchronize(s) == cudaSuccess && at(b, 5) == 3);
    CHECK(settle(c, ncclAllGather(a, b, part, ncclFloat32, c, s)) == ncclSuccess
          && fake_synchronize(s) == cudaSuccess);
    for (int r = 0; r < size; r++) CHECK(at(b, r * N / 4) == (float)(r + 1));
    CHECK(settle(c, ncclReduceScatter(b, b + (size_t)rank * part, part, ncclFloat32, ncclSum, c, s))
              == ncclSuccess
          && fake_synchronize(s) == cudaSuccess); /* in place */
    CHECK(at(b, rank * N / 4) == (float)(3 * (rank + 1)));
    CHECK(settle(c, ncclGroupStart()) == ncclSuccess); /* an exchange between all pairs of ranks */
    for (int r = 0; r < size; r++) {
        CHECK(ncclSend(a, part, ncclFloat32, r, c, s) == ncclSuccess);
        CHECK(ncclRecv(b + (size_t)r * part, part, ncclFloat32, r, c, s) == ncclSuccess);
    }
    CHECK(settle(c, ncclGroupEnd()) == ncclSuccess && fake_synchronize(s) == cudaSuccess);
    for (int r = 0; r < size; r++) CHECK(at(b, r * N / 4 + 3) == (float)(r + 1));
}

static void collectives(void) {
    nonblocking = (int)(fake.seed & 1);
    begin(3);
    ranks(3, collectives_rank);
    end(3);
}

template <class T>
static void dtype_case(int rank, ncclDataType_t dtype, double (*value)(T), T (*made)(double)) {
    T *p = (T *)fake_view(in[rank]);
    for (int i = 0; i < 16; i++) p[i] = made(rank + i);
    CHECK(ncclAllReduce(in[rank], out[rank], 16, dtype, ncclSum, comms[rank], streams[rank]) == ncclSuccess
          && fake_synchronize(streams[rank]) == cudaSuccess);
    for (int i = 0; i < 16; i++) CHECK(value(((T *)fake_view(out[rank]))[i]) == 3 + 3 * i);
}
template <class T> static double plain_value(T x) { return (double)x; }
template <class T> static T plain_made(double x) { return (T)x; }
static double f16_value(__half x) { return (double)__half2float(x); }
static __half f16_made(double x) { return __float2half((float)x); }
static double bf16_value(__nv_bfloat16 x) { return (double)__bfloat162float(x); }
static __nv_bfloat16 bf16_made(double x) { return __float2bfloat16((float)x); }

static void dtypes_rank(int rank, int) {
    dtype_case<int8_t>(rank, ncclInt8, plain_value, plain_made);
    dtype_case<uint8_t>(rank, ncclUint8, plain_value, plain_made);
    dtype_case<int32_t>(rank, ncclInt32, plain_value, plain_made);
    dtype_case<int64_t>(rank, ncclInt64, plain_value, plain_made);
    dtype_case<uint64_t>(rank, ncclUint64, plain_value, plain_made);
    dtype_case<double>(rank, ncclFloat64, plain_value, plain_made);
    dtype_case<__half>(rank, ncclFloat16, f16_value, f16_made);
    dtype_case<__nv_bfloat16>(rank, ncclBfloat16, bf16_value, bf16_made);
}

static void dtypes(void) {
    nonblocking = 0;
    begin(3);
    ranks(3, dtypes_rank);
    end(3);
}

/* Different calls under one number; a real kernel would do anything. */
static void mismatch_rank(int rank, int) {
    ncclAllReduce(in[rank], out[rank], rank == 1 && fake.seed % 3 == 0 ? N - 1 : N, ncclFloat32,
                  rank == 1 && fake.seed % 3 == 1 ? ncclMax : ncclSum, comms[rank], streams[rank]);
    if (rank == 1 && fake.seed % 3 == 2)
        ncclBroadcast(in[rank], out[rank], 8, ncclFloat32, 0, comms[rank], streams[rank]);
    if (rank == 0 && fake.seed % 3 == 2)
        ncclAllGather(in[rank], out[rank], 8, ncclFloat32, comms[rank], streams[rank]);
    fake_synchronize(streams[rank]);
}

static void mismatch(void) {
    nonblocking = 0;
    begin(2);
    ranks(2, mismatch_rank);
    FOUND("mismatch: collective");
    end(2);
}

/* One rank is missing: the stream is blocked until the communicator is aborted, and continues then. */
static void missing_rank(int rank, int) {
    if (rank == 0) return;
    CHECK(ncclAllReduce(in[rank], in[rank], N, ncclFloat32, ncclSum, comms[rank], streams[rank])
          == ncclSuccess);
    add_one(streams[rank], out[rank]);
    for (int i = 0; i < 50; i++) CHECK(fake_stream_query(streams[rank]) == cudaErrorNotReady);
    CHECK(ncclCommAbort(comms[rank]) == ncclSuccess);
    CHECK(fake_synchronize(streams[rank]) == cudaSuccess && at(out[rank], 0) == 0);
    CHECK(ncclAllReduce(in[rank], in[rank], N, ncclFloat32, ncclSum, comms[rank], streams[rank])
          != ncclSuccess);
}

static void missing(void) {
    nonblocking = 0;
    begin(3);
    ranks(3, missing_rank);
    FOUND("communicator has been destroyed");
    CLEAN();
    CHECK(fake_left().find("communicator c1") != std::string::npos);
}

/* Both send first: valid in a group, a deadlock without one. */
static void ring_rank(int rank, int size) {
    int grouped = fake.seed & 1, next = (rank + 1) % size, before = (rank + size - 1) % size;
    if (grouped) ncclGroupStart();
    ncclSend(in[rank], N, ncclFloat32, next, comms[rank], streams[rank]);
    ncclRecv(out[rank], N, ncclFloat32, before, comms[rank], streams[rank]);
    if (grouped) ncclGroupEnd();
    if (grouped)
        CHECK(fake_synchronize(streams[rank]) == cudaSuccess && at(out[rank], 0) == (float)(before + 1));
    else
        CHECK(fake_synchronize(streams[rank]) != cudaSuccess);
    pthread_barrier_wait(&job.all_here);
    if (!grouped) ncclCommAbort(comms[rank]);
}

static void ring(void) {
    nonblocking = 0;
    begin(3);
    ranks(3, ring_rank);
    if (fake.seed & 1)
        end(3);
    else
        FOUND("deadlock: ");
    CLEAN();
}

/* Every rank waits on the host for a collective that the other rank has not issued yet. */
static void crossed_rank(int rank, int) {
    if (rank == 0)
        ncclSend(in[rank], N, ncclFloat32, 1, comms[rank], streams[rank]);
    else
        ncclAllReduce(in[rank], in[rank], N, ncclFloat32, ncclSum, comms[rank], streams[rank]);
    CHECK(fake_synchronize(streams[rank]) != cudaSuccess);
    pthread_barrier_wait(&job.all_here);
    ncclCommAbort(comms[rank]);
}

static void crossed(void) {
    nonblocking = 0;
    begin(2);
    ranks(2, crossed_rank);
    FOUND("deadlock: ");
    CLEAN();
}

/* A buffer that another stream still writes to. */
static void buffer_rank(int rank, int) {
    cudaStream_t other;
    cudaEvent_t e;
    fake_stream_create(&other, 0);
    fake_event_create(&e);
    add_one(other, in[rank]);
    fake_event_record(e, other);
    if (fake.seed & 1) fake_stream_wait_event(streams[rank], e);
    ncclAllReduce(in[rank], in[rank], N, ncclFloat32, ncclSum, comms[rank], streams[rank]);
    if (fake.seed & 2) {
        fake_event_record(e, streams[rank]);
        fake_stream_wait_event(other, e);
    }
    add_one(other, in[rank]);
    fake_synchronize(streams[rank]);
    fake_synchronize(other);
    fake_stream_destroy(other);
    fake_event_destroy(e);
}

static void buffers(void) {
    nonblocking = 0;
    begin(2);
    ranks(2, buffer_rank);
    if ((fake.seed & 3) == 3)
        CHECK(last(in[0]) == 6 && last(in[1]) == 6);
    else
        FOUND("race: ");
    end(2);
}

/* A non-blocking communicator must not be used before it is ready. Its calls enter the stream only after it
   has returned ncclSuccess. */
static void nonblocking_rank(int rank, int size) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    cudaEvent_t e;
    cudaStream_t other;
    config.blocking = 0;
    fake_stream_create(&streams[rank], 0);
    fake_stream_create(&other, 0);
    fake_event_create(&e);
    in[rank] = device_floats(1);
    out[rank] = device_floats(1);
    CHECK(ncclCommInitRankConfig(&comms[rank], size, id, rank, &config) == ncclInProgress);
    CHECK(ncclAllReduce(in[rank], in[rank], N, ncclFloat32, ncclSum, comms[rank], streams[rank])
          == ncclInvalidArgument);
    CHECK(settle(comms[rank], ncclInProgress) == ncclSuccess);
    CHECK(ncclAllReduce(in[rank], in[rank], N, ncclFloat32, ncclSum, comms[rank], streams[rank])
          == ncclInProgress);
    if (fake.seed & 1) CHECK(settle(comms[rank], ncclInProgress) == ncclSuccess);
    fake_event_record(e, streams[rank]);
    CHECK(settle(comms[rank], ncclInProgress) == ncclSuccess);
    fake_stream_wait_event(other, e);
    add_one(other, in[rank]);
    fake_synchronize(streams[rank]);
    fake_synchronize(other);
    fake_stream_destroy(other);
    fake_event_destroy(e);
}

static void in_progress(void) {
    fake_nccl_fresh();
    ncclGetUniqueId(&id);
    ranks(3, nonblocking_rank);
    FOUND("still in progress");
    if (!(fake.seed & 1)) FOUND("race: ");
    end(3);
}

/* Even ranks, turned around, and odd ranks; rank 4 in neither. */
static void split_rank(int rank, int size) {
    ncclComm_t child = NULL;
    int n = -1, r = -1;
    CHECK(settle(comms[rank], ncclCommSplit(comms[rank], rank == 4 ? NCCL_SPLIT_NOCOLOR : rank % 2,
                                            size - rank, &child, NULL))
          == ncclSuccess);
    CHECK(!child == (rank == 4));
    if (!child) return;
    CHECK(settle(child, ncclInProgress) == ncclSuccess);
    CHECK(ncclCommCount(child, &n) == ncclSuccess && n == 2 && ncclCommUserRank(child, &r) == ncclSuccess
          && r == (rank < 2));
    CHECK(settle(child, ncclAllReduce(in[rank], out[rank], N, ncclFloat32, ncclSum, child, streams[rank]))
          == ncclSuccess);
    CHECK(fake_synchronize(streams[rank]) == cudaSuccess && at(out[rank], 0) == (rank % 2 ? 6 : 4));
    CHECK(ncclCommDestroy(child) == ncclSuccess);
}

static void split(void) {
    nonblocking = (int)(fake.seed & 1);
    begin(5);
    ranks(5, split_rank);
    end(5);
}

/* Ranks share a device only if NCCL allows it explicitly, from 2.30 on. */
static int library_version;
static void same_device_rank(int rank, int size) {
    ncclComm_t c;
    fake_set_device(0);
    fake_nccl_version = library_version;
    int shares = library_version >= 23000 && getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    CHECK(ncclCommInitRank(&c, size, id, rank) == (shares ? ncclSuccess : ncclInvalidUsage));
    ncclCommAbort(c);
}

static void same_device(void) {
    fake_nccl_fresh();
    for (int i = 0; i < 4; i++) {
        library_version = i & 1 ? 23000 : 22999;
        if (i == 2) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
        ncclGetUniqueId(&id);
        ranks(2, same_device_rank);
        CLEAN();
    }
    unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

/* A group of one rank: registered memory, asynchronous errors, and leaks. */
static void registration(void) {
    void *p, *handle;
    ncclResult_t state;
    begin(1);
    CHECK(ncclMemAlloc(&p, 4096) == ncclSuccess
          && ncclCommRegister(comms[0], p, 4096, &handle) == ncclSuccess);
    CHECK(ncclCommDeregister(comms[0], handle) == ncclSuccess
          && ncclCommDeregister(comms[0], handle) != ncclSuccess);
    FOUND("nothing is registered so");
    CHECK(ncclCommRegister(comms[0], p, 4096, &handle) == ncclSuccess && ncclMemFree(p) == ncclSuccess);
    FOUND("registrations with NCCL hold it");
    fake_async_error(0, ncclRemoteError);
    CHECK(ncclCommGetAsyncError(comms[0], &state) == ncclSuccess && state == ncclRemoteError);
    if (fake.seed & 1)
        CHECK(ncclCommAbort(comms[0]) == ncclSuccess);
    else
        CHECK(ncclCommDestroy(comms[0]) == ncclSuccess);
    if (!(fake.seed & 1)) FOUND("is left registered");
    CLEAN();
}

/* Captured collectives run when the graph is launched. */
static void captured_rank(int rank, int) {
    fake_relax_capture();
    fake_capture_begin(streams[rank]);
    add_one(streams[rank], in[rank]);
    CHECK(ncclAllReduce(in[rank], out[rank], N, ncclFloat32, ncclSum, comms[rank], streams[rank])
          == ncclSuccess);
    fake_graph *graph = fake_capture_end(streams[rank]);
    for (int i = 0; i < 2; i++) fake_graph_launch(graph, streams[rank]);
    fake_synchronize(streams[rank]);
    CHECK(at(out[rank], 0) == 7);
}

static void captured(void) {
    nonblocking = 0;
    begin(2);
    ranks(2, captured_rank);
    end(2);
}

/* ---- main ---- */

#define CASE(name) \
    { #name, name }
int main(void) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {CASE(memory_is_checked),
                 CASE(cpu_may_not_touch),
                 CASE(copies_with_the_host),
                 CASE(pinned_memory),
                 CASE(freeing),
                 CASE(without_a_wait),
                 CASE(event_orders),
                 CASE(in_a_process),
                 CASE(event_never_recorded),
                 CASE(event_recorded_again),
                 CASE(host_orders),
                 CASE(event_is_not_its_stream),
                 CASE(legacy_stream),
                 CASE(no_race),
                 CASE(threads_by_themselves),
                 CASE(devices),
                 CASE(loops),
                 CASE(capture),
                 CASE(capture_gone_wrong),
                 CASE(faults),
                 CASE(the_record),
                 CASE(collectives),
                 CASE(dtypes),
                 CASE(mismatch),
                 CASE(missing),
                 CASE(ring),
                 CASE(crossed),
                 CASE(buffers),
                 CASE(in_progress),
                 CASE(split),
                 CASE(same_device),
                 CASE(registration),
                 CASE(captured)};
    watchdog_start(50);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        doing = cases[k].name;
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            fake_start(strstr(doing, "split") ? 5 : 3, seed);
            cases[k].run();
        }
    }
    check_at(wrong_data == 3, __LINE__,
             "a missing wait gives right data with some seeds and wrong data with others");
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}

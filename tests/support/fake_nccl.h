/*  fake_nccl.h - NCCL on the fake GPU of fake_gpu.h: the functions of <nccl.h> under their own names.

    Kernel    A call, or all calls of a group on one communicator, is one piece of work of its stream. It
              starts when the stream reaches it. It ends when each of its transfers has met its counterpart in
              a kernel that has started too; the bytes move then. So a send before the matching receive on
              both ranks is a deadlock, which is detected and reported.
    Matching  Collectives of a communicator match by number, sends and receives by pair of ranks in order.
    Calls that do
              not fit are a failure that names both. If a rank never calls, the streams of the others are
              blocked until ncclCommAbort.
    Rounding  Sums are added from rank 1 on, rank 0 last, so that no caller can rely on an order.
    Waiting   A communicator created with blocking = 0 returns ncclInProgress several times from creation,
              split, destroy and its first calls. These enter the stream only after ncclCommGetAsyncError has
              returned ncclSuccess.
    Meeting   Creating and splitting a blocking communicator return when every rank has called. While
              fake_nccl.connects is set, so do its collectives, as in NCCL when ranks connect for the first
              time. ncclCommAbort ends such a wait with an error. fake_nccl.held: ncclCommInitRankConfig and
              ncclCommSplit of that device wait until a communicator is aborted.
    Threads   Two threads inside NCCL with one communicator are a failure, except in ncclCommAbort. So is
              polling an operation in progress from a thread that did not start it: NCCL completes and frees
              the job without a lock.
    Counting  fake_nccl.sent has the bytes of sends by pair of devices, when they are called.
    Omitted   Each rank registers windows independently. One stream per communicator in a group. No limit of
              concurrency. */
#ifndef DDP_TEST_FAKE_NCCL_H
#define DDP_TEST_FAKE_NCCL_H

#include "fake_gpu.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <nccl.h>
#include <type_traits>

/* ---- communicators ---- */

struct fake_task {
    const char *function;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t dtype;
    int op, root, line, done; /* root: of a send or receive the peer */
    ncclComm_t comm;
};

struct fake_kernel {
    std::vector<fake_task> tasks;
    ncclComm_t comm;
    cudaStream_t stream;
    int started, aborted;
};
typedef std::shared_ptr<fake_kernel> fake_kernel_ref;

struct fake_slot {
    fake_kernel_ref kernel;
    size_t index;
    fake_task &task() const { return kernel->tasks[index]; }
};
struct fake_split {
    int color, key;
    ncclComm_t comm, *out;
    int blocking;
};
struct fake_world {
    int size, duplicate;
    std::map<int, ncclComm_t> members;                        /* by rank */
    std::map<uint64_t, std::map<int, fake_slot>> collectives; /* by number, then rank */
    /* By source and destination, not matched yet. */
    std::map<std::pair<int, int>, std::deque<fake_slot>> sends, recvs;
    std::map<int, std::map<int, fake_split>> splits; /* by number, then rank */
};

struct ncclComm {
    int rank, device, number, blocking, live, finalized, splits, meetings, inside;
    uint64_t collectives;
    fake_world *world;
    fake_thread *thread; /* that called last */
    /* Thread that started the operation in progress: the only one that may poll. */
    fake_thread *starter;
    ncclResult_t error;         /* asynchronous */
    int polls;                  /* polls until the operation can end */
    std::function<int()> ready; /* the operation in progress: whether it can end, and its result */
    std::function<void()> finish;
    std::vector<fake_kernel_ref> kernels;
    std::vector<float> factors; /* of ncclRedOpCreatePreMulSum; NaN = destroyed */
    std::map<void *, fake_block *> registered;
};

static struct {
    int generation, ids;
    std::deque<ncclComm> comms;
    std::deque<fake_world> worlds;
    std::map<std::string, fake_world *> by_id;
    int connects, held, aborts;              /* held: 1 + a device */
    size_t sent[FAKE_DEVICES][FAKE_DEVICES]; /* bytes of ncclSend from device to device */
    int dropped; /* registrations and reduction operations that aborts have freed */
    char handle;
} fake_nccl;
/* The version of the library that the rank of this thread has loaded. */
static thread_local int fake_nccl_version = NCCL_VERSION_CODE;
static thread_local struct {
    int depth;
    std::vector<std::pair<fake_task, cudaStream_t>> tasks;
} fake_group;

/* Forgets the objects of an earlier test. */
static void fake_nccl_fresh(void) {
    if (fake_nccl.generation == fake.generation) return;
    fake_nccl.comms.clear();
    fake_nccl.worlds.clear();
    fake_nccl.by_id.clear();
    fake_nccl.aborts = fake_nccl.dropped = 0;
    memset(fake_nccl.sent, 0, sizeof fake_nccl.sent);
    fake_nccl.generation = fake.generation;
}

static std::string fake_name(ncclComm_t c) { return c ? fake_format("c%d", c->number) : "NULL"; }

static ncclComm_t fake_comm_new(int device, int rank, int blocking) {
    fake_nccl.comms.push_back(ncclComm());
    ncclComm_t c = &fake_nccl.comms.back();
    c->rank = rank;
    c->device = device;
    c->blocking = blocking;
    c->live = 1;
    c->number = ++fake.device[device].comms;
    return c;
}

/* A communicator that can be used now. busy: 1 = also with an operation in progress, 2 = also while a thread
   waits inside NCCL. */
static int fake_comm_check(ncclComm_t c, fake_call &call, int busy) {
    int known = 0;
    fake_nccl_fresh();
    for (ncclComm &comm : fake_nccl.comms) known |= &comm == c;
    if (!known || !c->live)
        fake_failed("the communicator has been destroyed, or never was: %s", fake_where(call.line).c_str());
    else if (!busy && c->ready)
        fake_failed("the communicator is still in progress: %s", fake_where(call.line).c_str());
    else if (busy < 2 && c->inside)
        fake_failed("another thread is inside NCCL with the communicator: %s", fake_where(call.line).c_str());
    else {
        c->thread = &fake_me;
        return 1;
    }
    return 0;
}

/* The caller waits inside NCCL. Returns 0 if the communicator was aborted meanwhile. */
static int fake_wait_inside(ncclComm_t c, fake_call &call, const std::function<int()> &ready) {
    c->inside++;
    fake_force([c, ready] { return !c->live || ready(); }, NULL, call.line);
    c->inside--;
    return c->live;
}

/* An operation that lasts until ready(), then ends with finish(). */
static ncclResult_t fake_under_way(ncclComm_t c, fake_call &call, const std::function<int()> &ready,
                                   const std::function<void()> &finish) {
    if (!c->blocking) {
        c->ready = ready;
        c->finish = finish;
        c->starter = &fake_me;
        c->polls = 2;
        return ncclInProgress;
    }
    if (!fake_wait_inside(c, call, ready)) return ncclSystemError;
    finish();
    pthread_cond_broadcast(&fake.changed);
    return c->error;
}

/* ---- arithmetic ---- */

static size_t fake_size(ncclDataType_t dtype) {
    switch ((int)dtype) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
    }
}

template <class T> static T fake_load(const char *at, size_t i) {
    T x;
    memcpy(&x, at + i * sizeof x, sizeof x);
    return x;
}
template <class T> static void fake_store(char *at, size_t i, T x) {
    memcpy(at + i * sizeof x, &x, sizeof x);
}
struct fake_f16 {
    typedef float wide;
    static float get(const char *p, size_t i) { return __half2float(fake_load<__half>(p, i)); }
    static void put(char *p, size_t i, float x) { fake_store(p, i, __float2half(x)); }
};
struct fake_bf16 {
    typedef float wide;
    static float get(const char *p, size_t i) { return __bfloat162float(fake_load<__nv_bfloat16>(p, i)); }
    static void put(char *p, size_t i, float x) { fake_store(p, i, __float2bfloat16(x)); }
};
template <class T> struct fake_plain {
    typedef T wide;
    static T get(const char *p, size_t i) { return fake_load<T>(p, i); }
    static void put(char *p, size_t i, T x) { fake_store<T>(p, i, x); }
};

template <class T> static T fake_sum(T a, T b) {
    return std::is_integral<T>::value ? (T)((uint64_t)a + (uint64_t)b) : (T)(a + b);
}
template <class T> static T fake_product(T a, T b) {
    return std::is_integral<T>::value ? (T)((uint64_t)a * (uint64_t)b) : (T)(a * b);
}

/* out[i] = reduction over ranks of in[rank][i]; integers wrap. */
template <class E>
static void fake_reduce_as(char *out, const std::vector<const char *> &in, const std::vector<float> &factor,
                           size_t count, int op) {
    typedef typename E::wide T;
    size_t n = in.size();
    for (size_t i = 0; i < count; i++) {
        T sum = T();
        for (size_t k = 0; k < n; k++) {
            size_t rank = (k + 1) % n;
            T x = E::get(in[rank], i);
            if (op >= ncclNumOps) x = (T)(x * (T)factor[rank]);
            sum = k == 0           ? x
                  : op == ncclProd ? fake_product(sum, x)
                  : op == ncclMax  ? std::max(sum, x)
                  : op == ncclMin  ? std::min(sum, x)
                                   : fake_sum(sum, x);
        }
        E::put(out, i, op == ncclAvg ? (T)(sum / (T)n) : sum);
    }
}

static void fake_reduce(char *out, const std::vector<const char *> &in, const std::vector<float> &factor,
                        size_t count, ncclDataType_t dtype, int op) {
    switch ((int)dtype) {
    case ncclInt8: fake_reduce_as<fake_plain<int8_t>>(out, in, factor, count, op); break;
    case ncclUint8: fake_reduce_as<fake_plain<uint8_t>>(out, in, factor, count, op); break;
    case ncclInt32: fake_reduce_as<fake_plain<int32_t>>(out, in, factor, count, op); break;
    case ncclUint32: fake_reduce_as<fake_plain<uint32_t>>(out, in, factor, count, op); break;
    case ncclInt64: fake_reduce_as<fake_plain<int64_t>>(out, in, factor, count, op); break;
    case ncclUint64: fake_reduce_as<fake_plain<uint64_t>>(out, in, factor, count, op); break;
    case ncclFloat16: fake_reduce_as<fake_f16>(out, in, factor, count, op); break;
    case ncclBfloat16: fake_reduce_as<fake_bf16>(out, in, factor, count, op); break;
    case ncclFloat32: fake_reduce_as<fake_plain<float>>(out, in, factor, count, op); break;
    default: fake_reduce_as<fake_plain<double>>(out, in, factor, count, op); break;
    }
}

/* ---- transfers ---- */

static int fake_is_p2p(const fake_task &t) {
    return !strcmp(t.function, "ncclSend") || !strcmp(t.function, "ncclRecv");
}

/* The ranges that a task reads and writes on its own rank, in elements: all-gather reads count and writes W *
   count, and so on. */
static void fake_task_ranges(const fake_task &t, std::vector<fake_range> &ranges) {
    std::string f = t.function;
    size_t bytes = t.count * fake_size(t.dtype), all = bytes * (size_t)t.comm->world->size;
    int is_root = t.root == t.comm->rank,
        from_all = f == "ncclReduceScatter" || f == "ncclAlltoAll" || f == "ncclScatter";
    int to_all = f == "ncclAllGather" || f == "ncclAlltoAll" || f == "ncclGather";
    int reads = f != "ncclRecv" && ((f != "ncclBroadcast" && f != "ncclScatter") || is_root);
    int writes = f != "ncclSend" && ((f != "ncclReduce" && f != "ncclGather") || is_root);
    if (reads) ranges.push_back({t.send, from_all ? all : bytes, 0});
    if (writes && !(f == "ncclBroadcast" && is_root && t.send == t.recv))
        ranges.push_back({t.recv, to_all ? all : bytes, 1});
}

/* Moves the bytes of a collective after the tasks of all ranks have started. All inputs are read first, so
   in-place calls are valid. */
static void fake_move(std::map<int, fake_slot> &slots) {
    fake_task &first = slots[0].task();
    std::string f = first.function;
    size_t n = slots.size(), bytes = first.count * fake_size(first.dtype);
    std::vector<std::string> held(n);
    std::vector<const char *> in(n);
    std::vector<float> factor(n);
    int from_all = f == "ncclReduceScatter" || f == "ncclAlltoAll" || f == "ncclScatter";
    for (size_t r = 0; r < n; r++) {
        fake_task &t = slots[(int)r].task();
        if ((f == "ncclBroadcast" || f == "ncclScatter") && (int)r != first.root) continue;
        held[r].assign(fake_real(t.send), from_all ? bytes * n : bytes);
        in[r] = held[r].data();
        if (t.op >= ncclNumOps) factor[r] = t.comm->factors[(size_t)(t.op - ncclNumOps)];
    }
    for (size_t r = 0; r < n; r++) {
        fake_task &t = slots[(int)r].task();
        char *out = fake_real(t.recv);
        int is_root = (int)r == first.root;
        if (f == "ncclAllReduce" || (f == "ncclReduce" && is_root))
            fake_reduce(out, in, factor, t.count, t.dtype, t.op);
        if (f == "ncclBroadcast") memcpy(out, in[(size_t)first.root], bytes);
        if (f == "ncclScatter") memcpy(out, in[(size_t)first.root] + r * bytes, bytes);
        if (f == "ncclAllGather" || (f == "ncclGather" && is_root))
            for (size_t k = 0; k < n; k++) memcpy(out + k * bytes, in[k], bytes);
        if (f == "ncclAlltoAll")
            for (size_t k = 0; k < n; k++) memcpy(out + k * bytes, in[k] + r * bytes, bytes);
        if (f == "ncclReduceScatter") {
            std::vector<const char *> part(n);
            for (size_t k = 0; k < n; k++) part[k] = in[k] + r * bytes;
            fake_reduce(out, part, factor, t.count, t.dtype, t.op);
        }
    }
}

static int fake_all_started(const std::map<int, fake_slot> &slots, int size) {
    if ((int)slots.size() < size) return 0;
    for (const std::pair<const int, fake_slot> &slot : slots)
        if (!slot.second.kernel->started || slot.second.kernel->aborted) return 0;
    return 1;
}

/* Performs every transfer of a communicator whose two sides have started. */
static void fake_progress(fake_world *world) {
    for (std::map<uint64_t, std::map<int, fake_slot>>::iterator i = world->collectives.begin();
         i != world->collectives.end();) {
        if (!fake_all_started(i->second, world->size)) {
            ++i;
            continue;
        }
        fake_move(i->second);
        for (std::pair<const int, fake_slot> &slot : i->second) slot.second.task().done = 1;
        i = world->collectives.erase(i);
    }
    for (std::pair<const std::pair<int, int>, std::deque<fake_slot>> &entry : world->sends) {
        std::deque<fake_slot> &sends = entry.second, &recvs = world->recvs[entry.first];
        while (!sends.empty() && !recvs.empty()) {
            fake_kernel_ref a = sends.front().kernel, b = recvs.front().kernel;
            fake_task &send = sends.front().task(), &recv = recvs.front().task();
            if (!a->started || !b->started || a->aborted || b->aborted) break;
            if (send.count * fake_size(send.dtype) != recv.count * fake_size(recv.dtype))
                fake_failed("mismatch: [%s] sends %zu elements to [%s] of %zu", fake_where(send.line).c_str(),
                            send.count, fake_where(recv.line).c_str(), recv.count);
            memcpy(fake_real(recv.recv), fake_real(send.send),
                   std::min(send.count * fake_size(send.dtype), recv.count * fake_size(recv.dtype)));
            send.done = recv.done = 1;
            sends.pop_front();
            recvs.pop_front();
        }
    }
}

/* ---- kernels as work of streams ---- */

/* Takes the next number, and compares the call with those of other ranks under that number. */
static void fake_nccl_enqueued(fake_kernel_ref kernel, cudaStream_t stream) {
    ncclComm_t c = kernel->comm;
    kernel->stream = stream;
    c->kernels.push_back(kernel);
    for (size_t i = 0; i < kernel->tasks.size(); i++) {
        fake_task &t = kernel->tasks[i];
        fake_slot slot = {kernel, i};
        if (!strcmp(t.function, "ncclSend")) {
            c->world->sends[{c->rank, t.root}].push_back(slot);
            continue;
        }
        if (!strcmp(t.function, "ncclRecv")) {
            c->world->recvs[{t.root, c->rank}].push_back(slot);
            continue;
        }
        std::map<int, fake_slot> &slots = c->world->collectives[++c->collectives];
        if (!slots.empty()) {
            fake_task &other = slots.begin()->second.task();
            if (strcmp(t.function, other.function) || t.count != other.count || t.dtype != other.dtype
                || t.root != other.root
                || std::min(t.op, (int)ncclNumOps) != std::min(other.op, (int)ncclNumOps))
                fake_failed("mismatch: collective %llu of a communicator is [%s] and [%s]",
                            (unsigned long long)c->collectives, fake_where(other.line).c_str(),
                            fake_where(t.line).c_str());
        }
        slots[c->rank] = slot;
    }
}

static int fake_all_done(const fake_kernel &k) {
    for (const fake_task &t : k.tasks)
        if (!t.done) return 0;
    return 1;
}

static int fake_nccl_runnable(const fake_op &op) {
    return !op.kernel->started || op.kernel->aborted || fake_all_done(*op.kernel);
}

static int fake_nccl_run(cudaStream_t s, fake_op &op) {
    fake_kernel &k = *op.kernel;
    if (!k.started && !k.aborted) {
        k.started = 1;
        for (const fake_task &t : k.tasks) {
            std::vector<fake_range> ranges;
            fake_task_ranges(t, ranges);
            for (const fake_range &range : ranges)
                if (fake_check_range(range.at, range.bytes, s->device, t.line))
                    fake_touch(range, s->timeline, s->clock, t.line);
                else
                    k.aborted = 1;
        }
        fake_progress(k.comm->world);
        pthread_cond_broadcast(&fake.changed);
    }
    return k.aborted || fake_all_done(k);
}

/* The streams that block a kernel: those where its counterparts are queued, or where the rank that has not
   issued them is blocked. */
static void fake_nccl_edge(fake_world *world, int rank, const fake_slot *slot,
                           std::vector<cudaStream_t> &edges) {
    ncclComm_t peer = world->members[rank];
    if (slot && !slot->kernel->started) edges.push_back(slot->kernel->stream);
    if (!slot && peer && peer->live && peer->thread && peer->thread->waits_for)
        edges.push_back(peer->thread->waits_for);
}

static void fake_nccl_edges(const fake_op &op, std::vector<cudaStream_t> &edges) {
    ncclComm_t c = op.kernel->comm;
    fake_world *world = c->world;
    for (const fake_task &t : op.kernel->tasks) {
        if (t.done) continue;
        if (fake_is_p2p(t)) {
            int is_send = !strcmp(t.function, "ncclSend");
            std::deque<fake_slot> &theirs = is_send ? world->recvs[{c->rank, t.root}]
                                                    : world->sends[{t.root, c->rank}];
            fake_nccl_edge(world, t.root, theirs.empty() ? NULL : &theirs.front(), edges);
            continue;
        }
        for (std::pair<const uint64_t, std::map<int, fake_slot>> &entry : world->collectives) {
            if (!entry.second.count(c->rank) || entry.second[c->rank].kernel != op.kernel) continue;
            for (int rank = 0; rank < world->size; rank++)
                if (rank != c->rank)
                    fake_nccl_edge(world, rank, entry.second.count(rank) ? &entry.second[rank] : NULL, edges);
        }
    }
}

static fake_kernel_ref fake_nccl_again(const fake_kernel_ref &kernel) {
    fake_kernel_ref copy = std::make_shared<fake_kernel>(*kernel);
    copy->started = 0;
    for (fake_task &t : copy->tasks) t.done = 0;
    return copy;
}

static int fake_comm_idle(ncclComm_t c) {
    for (const fake_kernel_ref &k : c->kernels)
        if (!k->aborted && !fake_all_done(*k)) return 0;
    return 1;
}

static ncclResult_t fake_launch_kernel(ncclComm_t c, cudaStream_t stream, const std::vector<fake_task> &tasks,
                                       fake_call &call) {
    fake_kernel_ref kernel = std::make_shared<fake_kernel>();
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (!s) return ncclInvalidArgument;
    if (s->device != c->device) {
        fake_failed("the stream is another device's: %s", fake_where(call.line).c_str());
        return ncclInvalidArgument;
    }
    kernel->tasks = tasks;
    kernel->comm = c;
    if (fake_comm_idle(c)) c->kernels.clear();
    fake_op op = {FAKE_NCCL, call.line, fake_me.clock, nullptr, {}, nullptr, kernel};
    if (c->blocking || s->graph || (c->collectives && fake_random(4))) {
        int collects = 0, number;
        for (const fake_task &t : tasks) collects |= !fake_is_p2p(t);
        fake_enqueue(s, op);
        if (!c->blocking || !collects || s->graph) return ncclSuccess;
        number = ++c->meetings;
        pthread_cond_broadcast(&fake.changed);
        if (!__atomic_load_n(&fake_nccl.connects, __ATOMIC_ACQUIRE)) return ncclSuccess;
        return fake_wait_inside(c, call,
                                [c, number] {
                                    for (std::pair<const int, ncclComm_t> &other : c->world->members)
                                        if (other.second->meetings < number) return 0;
                                    return 1;
                                })
                   ? ncclSuccess
                   : ncclSystemError;
    }
    return fake_under_way(
        c, call, [] { return 1; }, [s, op] { fake_enqueue(s, op); });
}

static ncclResult_t fake_group_end(fake_call &call) {
    std::vector<std::pair<fake_task, cudaStream_t>> tasks;
    std::vector<ncclComm_t> comms;
    ncclResult_t result = ncclSuccess;
    tasks.swap(fake_group.tasks);
    for (std::pair<fake_task, cudaStream_t> &t : tasks)
        if (std::find(comms.begin(), comms.end(), t.first.comm) == comms.end()) comms.push_back(t.first.comm);
    for (ncclComm_t c : comms) {
        std::vector<fake_task> mine;
        cudaStream_t stream = NULL;
        for (std::pair<fake_task, cudaStream_t> &t : tasks) {
            if (t.first.comm != c) continue;
            if (!mine.empty() && t.second != stream)
                fake_failed("several streams for one communicator in a group are not modelled: %s",
                            fake_where(t.first.line).c_str());
            stream = t.second;
            mine.push_back(t.first);
        }
        ncclResult_t one = fake_launch_kernel(c, stream, mine, call);
        if (one != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) result = one;
    }
    return result;
}

static ncclResult_t fake_transfer(const char *function, const void *send, void *recv, size_t count,
                                  ncclDataType_t dtype, int op, int root, ncclComm_t c, cudaStream_t stream) {
    static const char *const dtypes[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
    static const char *const ops[] = {"sum", "prod", "max", "min", "avg", "premul"};
    fake_call call;
    std::string text = function;
    if ((int)dtype < 0 || dtype > ncclBfloat16) {
        fake_failed("%s: datatype %d", function, (int)dtype);
        return ncclInvalidArgument;
    }
    text += "(" + (send ? fake_name(send) : "") + (send && recv ? ", " : "") + (recv ? fake_name(recv) : "")
            + fake_format(", %zu %s", count, dtypes[dtype]);
    if (op >= 0) text += fake_format(", %s", ops[std::min(op, (int)ncclNumOps)]);
    if (root >= 0) text += fake_format(", %d", root);
    call.begin(0, text + ", " + fake_name(c) + ", " + fake_name(stream) + ")");
    if (call.fault) return (ncclResult_t)call.fault;
    if (!fake_comm_check(c, call, 0)) return ncclInvalidArgument;
    if (c->error != ncclSuccess) return c->error;
    if (root >= c->world->size || (op >= ncclNumOps && (size_t)(op - ncclNumOps) >= c->factors.size())) {
        fake_failed("no such rank or operation: %s", fake_where(call.line).c_str());
        return ncclInvalidArgument;
    }
    if (!strcmp(function, "ncclSend"))
        fake_nccl.sent[c->device][c->world->members[root]->device] += count * fake_size(dtype);
    fake_group.tasks.push_back({{function, send, recv, count, dtype, op, root, call.line, 0, c}, stream});
    return fake_group.depth ? ncclSuccess : fake_group_end(call);
}

/* ---- <nccl.h> ---- */

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
    *version = fake_nccl_version;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned)result < 8 ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t) { return "the fake NCCL says no more"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    FAKE_CALL(0, "ncclGetUniqueId()");
    fake_nccl_fresh();
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "fake id %d of process %d", ++fake_nccl.ids, (int)getpid());
    return (ncclResult_t)call.fault;
}

static int fake_is_held(int device) {
    return __atomic_load_n(&fake_nccl.held, __ATOMIC_ACQUIRE) == device + 1
           && !__atomic_load_n(&fake_nccl.aborts, __ATOMIC_ACQUIRE);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    int blocking = !config || config->blocking != 0;
    while (fake_is_held(fake_me.device)) usleep(1000); /* no communicator exists yet that could be aborted */
    FAKE_CALL(0, "ncclCommInitRankConfig(%d, %d, %s)", size, rank, blocking ? "blocking" : "non-blocking");
    fake_nccl_fresh();
    __atomic_store_n(out, (ncclComm_t)NULL, __ATOMIC_RELEASE);
    if (call.fault) return (ncclResult_t)call.fault;
    if (size < 1 || rank < 0 || rank >= size) {
        fake_failed("no such rank: %s", fake_where(call.line).c_str());
        return ncclInvalidArgument;
    }
    if (strcmp(strrchr(id.internal, ' ') ? strrchr(id.internal, ' ') + 1 : "",
               std::to_string(getpid()).c_str())) {
        fake_failed("ranks of the fake NCCL are threads of one process: %s", fake_where(call.line).c_str());
        return ncclSystemError;
    }
    fake_world *&world = fake_nccl.by_id[id.internal];
    if (!world) {
        fake_nccl.worlds.push_back(fake_world());
        world = &fake_nccl.worlds.back();
        world->size = size;
    }
    ncclComm_t c = fake_comm_new(fake_me.device, rank, blocking);
    c->world = world;
    c->thread = &fake_me;
    if (world->size != size || world->members.count(rank))
        fake_failed("mismatch: size or rank differs from those of others: %s", fake_where(call.line).c_str());
    const char *enabled = fake_nccl_version >= 23000 ? getenv("NCCL_MULTI_RANK_GPU_ENABLE") : NULL;
    for (std::pair<const int, ncclComm_t> &other : world->members)
        world->duplicate |= other.second->device == fake_me.device && (!enabled || strcmp(enabled, "1") != 0);
    world->members[rank] = c;
    pthread_cond_broadcast(&fake.changed);
    /* Before it waits for peers, so that an abort of it ends the wait. */
    __atomic_store_n(out, c, __ATOMIC_RELEASE);
    fake.lines[(size_t)call.line].text += " = " + fake_name(c);
    return fake_under_way(
        c, call, [c] { return (int)c->world->members.size() == c->world->size; },
        [c] {
            if (c->world->duplicate) c->error = ncclInvalidUsage;
        });
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(out, size, id, rank, NULL);
}

/* With a non-blocking parent, the child is valid when the parent returns ncclSuccess. */
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    FAKE_CALL(0, "ncclCommSplit(%s, %d, %d)", fake_name(c).c_str(), color, key);
    *out = NULL;
    if (call.fault) return (ncclResult_t)call.fault;
    if (!fake_comm_check(c, call, 0)) return ncclInvalidArgument;
    if (fake_is_held(c->device) && !fake_wait_inside(c, call, [c] { return !fake_is_held(c->device); }))
        return ncclSystemError;
    std::map<int, fake_split> *all = &c->world->splits[c->splits++];
    (*all)[c->rank] = {color, key, NULL, out,
                       config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking : c->blocking};
    pthread_cond_broadcast(&fake.changed);
    int line = call.line;
    return fake_under_way(
        c, call, [c, all] { return (int)all->size() == c->world->size; },
        [c, all, color, line] {
            fake_split &mine = (*all)[c->rank];
            std::vector<std::pair<int, int>> order; /* key, then rank of the parent */
            fake_world *world = NULL;
            if (color < 0) return;
            for (std::pair<const int, fake_split> &other : *all) {
                if (other.second.color != color) continue;
                order.push_back({other.second.key, other.first});
                if (other.second.comm) world = other.second.comm->world;
            }
            std::sort(order.begin(), order.end());
            if (!world) {
                fake_nccl.worlds.push_back(fake_world());
                world = &fake_nccl.worlds.back();
                world->size = (int)order.size();
            }
            int rank = (int)(std::find(order.begin(), order.end(), std::make_pair(mine.key, c->rank))
                             - order.begin());
            mine.comm = fake_comm_new(c->device, rank, mine.blocking);
            mine.comm->world = world;
            mine.comm->thread = c->thread;
            world->members[rank] = *mine.out = mine.comm;
            fake.lines[(size_t)line].text += " = " + fake_name(mine.comm);
        });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *state) {
    while (__atomic_load_n(&fake.mute, __ATOMIC_ACQUIRE) == c->device + 1) usleep(1000);
    FAKE_CALL(2, "ncclCommGetAsyncError(%s)", fake_name(c).c_str());
    if (call.fault || !fake_comm_check(c, call, 1))
        return call.fault ? (ncclResult_t)call.fault : ncclInvalidArgument;
    if (c->ready && c->starter != &fake_me)
        fake_failed("two threads poll a communicator in progress: %s", fake_where(call.line).c_str());
    if (c->ready) fake_chance();
    *state = ncclInProgress;
    call.not_yet = c->error == ncclSuccess && c->ready && (c->polls-- > 0 || !c->ready());
    if (call.not_yet) return ncclSuccess;
    if (c->error == ncclSuccess && c->ready) {
        std::function<void()> finish = c->finish;
        c->ready = nullptr;
        finish();
        pthread_cond_broadcast(&fake.changed);
    }
    *state = c->error;
    return ncclSuccess;
}

/* Waits for all work on streams, and for the other ranks to finalize. */
ncclResult_t ncclCommFinalize(ncclComm_t c) {
    FAKE_CALL(0, "ncclCommFinalize(%s)", fake_name(c).c_str());
    if (call.fault || !fake_comm_check(c, call, 0))
        return call.fault ? (ncclResult_t)call.fault : ncclInvalidArgument;
    if (c->finalized) fake_failed("finalized twice: %s", fake_where(call.line).c_str());
    c->finalized = 1;
    pthread_cond_broadcast(&fake.changed);
    return fake_under_way(
        c, call,
        [c] {
            for (std::pair<const int, ncclComm_t> &other : c->world->members)
                if (other.second->live && !other.second->finalized) return 0;
            return fake_comm_idle(c);
        },
        [] {});
}

/* An abort frees all of it. */
static void fake_comm_end(ncclComm_t c, fake_call &call, int aborts) {
    for (size_t i = 0; i < c->factors.size(); i++)
        if (!aborts && c->factors[i] == c->factors[i])
            fake_failed("a reduction operation is left on a communicator that ends: %s",
                        fake_where(call.line).c_str());
    for (std::pair<void *const, fake_block *> &r : c->registered) {
        if (!aborts)
            fake_failed("%s is left registered on a communicator that ends: %s", r.second->name.c_str(),
                        fake_where(call.line).c_str());
        r.second->registered--;
    }
    if (aborts) {
        fake_nccl.dropped += (int)c->registered.size();
        for (float factor : c->factors) fake_nccl.dropped += factor == factor;
        __atomic_add_fetch(&fake_nccl.aborts, 1, __ATOMIC_RELEASE);
    }
    c->live = 0;
    c->ready = nullptr;
    pthread_cond_broadcast(&fake.changed);
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    FAKE_CALL(0, "ncclCommDestroy(%s)", fake_name(c).c_str());
    if (!c) return ncclSuccess;
    if (!fake_comm_check(c, call, 0)) return ncclInvalidArgument;
    fake_force([c] { return fake_comm_idle(c); }, c->kernels.empty() ? NULL : c->kernels.back()->stream,
               call.line);
    fake_comm_end(c, call, 0);
    return (ncclResult_t)call.fault;
}

/* Ends the communicator's kernels immediately. */
ncclResult_t ncclCommAbort(ncclComm_t c) {
    FAKE_CALL(0, "ncclCommAbort(%s)", fake_name(c).c_str());
    if (!c) return ncclSuccess;
    if (!fake_comm_check(c, call, 2)) return ncclInvalidArgument;
    for (const fake_kernel_ref &k : c->kernels) {
        if (fake_all_done(*k)) continue;
        k->aborted = 1;
        k->stream->dead = 0;
    }
    fake_comm_end(c, call, 1);
    return (ncclResult_t)call.fault;
}

ncclResult_t ncclCommCount(const ncclComm_t c, int *count) {
    FAKE_CALL(1, "ncclCommCount(%s)", fake_name(c).c_str());
    if (call.fault || !fake_comm_check(c, call, 0))
        return call.fault ? (ncclResult_t)call.fault : ncclInvalidArgument;
    *count = c->world->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) {
    FAKE_CALL(1, "ncclCommUserRank(%s)", fake_name(c).c_str());
    if (call.fault || !fake_comm_check(c, call, 0))
        return call.fault ? (ncclResult_t)call.fault : ncclInvalidArgument;
    *rank = c->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *device) {
    FAKE_CALL(1, "ncclCommCuDevice(%s)", fake_name(c).c_str());
    if (call.fault || !fake_comm_check(c, call, 0))
        return call.fault ? (ncclResult_t)call.fault : ncclInvalidArgument;
    *device = c->device;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t c, cudaStream_t s) {
    return fake_transfer("ncclAllReduce", send, recv, count, dtype, (int)op, -1, c, s);
}
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                        int root, ncclComm_t c, cudaStream_t s) {
    return fake_transfer("ncclReduce", send, recv, count, dtype, (int)op, root, c, s);
}
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root,
                           ncclComm_t c, cudaStream_t s) {
    return fake_transfer("ncclBroadcast", send, recv, count, dtype, -1, root, c, s);
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t c,
                       cudaStream_t s) {
    return fake_transfer("ncclBroadcast", buffer, buffer, count, dtype, -1, root, c, s);
}
ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t dtype,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return fake_transfer("ncclReduceScatter", send, recv, count, dtype, (int)op, -1, c, s);
}
ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t c,
                           cudaStream_t s) {
    return fake_transfer("ncclAllGather", send, recv, count, dtype, -1, -1, c, s);
}
#if NCCL_VERSION_CODE >= 22800
ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t c,
                          cudaStream_t s) {
    return fake_transfer("ncclAlltoAll", send, recv, count, dtype, -1, -1, c, s);
}
ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root,
                        ncclComm_t c, cudaStream_t s) {
    return fake_transfer("ncclGather", send, recv, count, dtype, -1, root, c, s);
}
ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root,
                         ncclComm_t c, cudaStream_t s) {
    return fake_transfer("ncclScatter", send, recv, count, dtype, -1, root, c, s);
}
#endif
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t dtype, int peer, ncclComm_t c,
                      cudaStream_t s) {
    return fake_transfer("ncclSend", send, NULL, count, dtype, -1, peer, c, s);
}
ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t dtype, int peer, ncclComm_t c,
                      cudaStream_t s) {
    return fake_transfer("ncclRecv", NULL, recv, count, dtype, -1, peer, c, s);
}

ncclResult_t ncclGroupStart(void) {
    FAKE_CALL(0, "ncclGroupStart()");
    if (!call.fault) fake_group.depth++;
    return (ncclResult_t)call.fault;
}

ncclResult_t ncclGroupEnd(void) {
    FAKE_CALL(0, "ncclGroupEnd()");
    if (fake_group.depth == 0) {
        fake_failed("a group ends that has not begun: %s", fake_where(call.line).c_str());
        return ncclInvalidUsage;
    }
    if (--fake_group.depth > 0) return (ncclResult_t)call.fault;
    if (!call.fault) return fake_group_end(call);
    fake_group.tasks.clear();
    return (ncclResult_t)call.fault;
}

ncclResult_t ncclMemAlloc(void **out, size_t bytes) {
    FAKE_CALL(0, "ncclMemAlloc(%zu)", bytes);
    if (call.fault) {
        *out = NULL;
        return (ncclResult_t)call.fault;
    }
    return fake_malloc_any(out, bytes, 1, call) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void *memory) {
    FAKE_CALL(0, "ncclMemFree(%s)", fake_name(memory).c_str());
    int fault = call.fault;
    call.fault = 0;
    return fake_free_any(memory, 1, call) == cudaSuccess ? (ncclResult_t)fault : ncclUnhandledCudaError;
}

static ncclResult_t fake_register(ncclComm_t c, void *buffer, size_t bytes, void **handle, fake_call &call) {
    *handle = NULL;
    if (call.fault || !fake_comm_check(c, call, 0))
        return call.fault ? (ncclResult_t)call.fault : ncclInvalidArgument;
    if (!fake_check_range(buffer, bytes, c->device, call.line)) return ncclInvalidArgument;
    *handle = &fake_nccl.handle + ++fake_nccl.ids; /* never followed */
    c->registered[*handle] = fake_block_of(buffer);
    fake_block_of(buffer)->registered++;
    return ncclSuccess;
}
static ncclResult_t fake_deregister(ncclComm_t c, void *handle, fake_call &call) {
    if (!fake_comm_check(c, call, 0)) return ncclInvalidArgument;
    if (!c->registered.count(handle)) {
        fake_failed("nothing is registered so: %s", fake_where(call.line).c_str());
        return ncclInvalidArgument;
    }
    c->registered[handle]->registered--;
    c->registered.erase(handle);
    return (ncclResult_t)call.fault;
}
ncclResult_t ncclCommRegister(const ncclComm_t c, void *buffer, size_t bytes, void **handle) {
    FAKE_CALL(0, "ncclCommRegister(%s, %s, %zu)", fake_name(c).c_str(), fake_name(buffer).c_str(), bytes);
    return fake_register(c, buffer, bytes, handle, call);
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *handle) {
    FAKE_CALL(0, "ncclCommDeregister(%s)", fake_name(c).c_str());
    return fake_deregister(c, handle, call);
}
#if NCCL_VERSION_CODE >= 22700
ncclResult_t ncclCommWindowRegister(ncclComm_t c, void *buffer, size_t bytes, ncclWindow_t *window,
                                    int flags) {
    FAKE_CALL(0, "ncclCommWindowRegister(%s, %s, %zu, %d)", fake_name(c).c_str(), fake_name(buffer).c_str(),
              bytes, flags);
    return fake_register(c, buffer, bytes, (void **)window, call);
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t window) {
    FAKE_CALL(0, "ncclCommWindowDeregister(%s)", fake_name(c).c_str());
    return fake_deregister(c, (void *)window, call);
}
#endif

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t c) {
    FAKE_CALL(0, "ncclRedOpCreatePreMulSum(%s)", fake_name(c).c_str());
    const char *p = (const char *)scalar;
    if (call.fault || !fake_comm_check(c, call, 0))
        return call.fault ? (ncclResult_t)call.fault : ncclInvalidArgument;
    if (residence != ncclScalarHostImmediate || fake_in_arena(scalar)) {
        fake_failed("only scalars read at once are modelled: %s", fake_where(call.line).c_str());
        return ncclInvalidArgument;
    }
    c->factors.push_back(dtype == ncclFloat32    ? fake_load<float>(p, 0)
                         : dtype == ncclFloat64  ? (float)fake_load<double>(p, 0)
                         : dtype == ncclFloat16  ? fake_f16::get(p, 0)
                         : dtype == ncclBfloat16 ? fake_bf16::get(p, 0)
                                                 : (float)fake_load<int8_t>(p, 0));
    *op = (ncclRedOp_t)(ncclNumOps + (int)c->factors.size() - 1);
    return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) {
    FAKE_CALL(0, "ncclRedOpDestroy(%s)", fake_name(c).c_str());
    size_t i = (size_t)((int)op - ncclNumOps);
    if (!fake_comm_check(c, call, 0)) return ncclInvalidArgument;
    if (i >= c->factors.size() || c->factors[i] != c->factors[i]) {
        fake_failed("no such operation: %s", fake_where(call.line).c_str());
        return ncclInvalidArgument;
    }
    c->factors[i] = NAN;
    return (ncclResult_t)call.fault;
}

} /* extern "C" */

/* Every communicator on a device (-1: any) has this asynchronous error from now on. */
static inline void fake_async_error(int device, ncclResult_t error) {
    pthread_mutex_lock(&fake.lock);
    for (ncclComm &c : fake_nccl.comms)
        if (c.live && (device < 0 || c.device == device)) c.error = error;
    pthread_mutex_unlock(&fake.lock);
}

static std::string fake_nccl_left(void) {
    std::string left;
    for (ncclComm &c : fake_nccl.comms)
        if (c.live && fake_nccl.generation == fake.generation)
            left += fake_format("device %d: communicator c%d\n", c.device, c.number);
    return left;
}

#endif /* DDP_TEST_FAKE_NCCL_H */

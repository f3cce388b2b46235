/*  fake_gpu.h - GPUs emulated on the CPU: devices, memory, streams, events. fake_nccl.h adds NCCL.

    Tests link it instead of the CUDA runtime: FAKE_GPU_RUNTIME is the table that ddp_cuda.cuh calls. Ranks
    are threads of one process.

    Memory    Device memory is a separate region, for work on streams only. An access by the CPU crashes, with
              a line on stderr. Tests read it with fake_view. A pointer of another device, out of bounds or
              freed is a failure.
    Streams   Work is queued and runs as late as possible: when a call waits for it, or at random in a query.
              The seed chooses the next stream, so a missing wait gives wrong data with some seeds.
    Races     Every piece of work names the bytes that it reads and writes, and carries a vector clock of
              streams and threads. Two accesses to one byte, at least one of them a write, must be ordered by
              a stream, an event or a synchronisation. Otherwise they are a failure, with every seed. Threads
              of one rank (with the same current device) count as ordered among themselves, since locks are
              invisible here; fake.strict separates them.
    Record    Every call is a line. fake_record(device) returns those of a device, without polling.
    Failures  Errors of the program under test. fake_failures() prints and counts them; fake_expect removes
              an expected one.
    Faults    fake_fail makes the n-th call fail.

    test_fake_gpu.cu tests each assumption about CUDA. Speed is not emulated. */
#ifndef DDP_TEST_FAKE_GPU_H
#define DDP_TEST_FAKE_GPU_H

#include <cuda_runtime.h>
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)0)
#endif
#ifndef DDP_TEST_SLOWDOWN
#define DDP_TEST_SLOWDOWN 1
#endif

#define FAKE_ARENA ((size_t)1 << 34)  /* of addresses; freed blocks release their memory */
#define FAKE_MEMORY ((size_t)1 << 32) /* of a device, in bytes */
#define FAKE_DEVICES 16

/* ---- the state of the fake GPUs ---- */

typedef std::vector<uint32_t> fake_clock; /* the latest known time of each timeline (stream or thread) */

struct fake_range {
    const void *at;
    size_t bytes;
    int write;
};
struct fake_access {
    const char *at;
    size_t bytes;
    int write, timeline;
    uint32_t epoch;
    int line;
};

/* One allocation. Addresses are never used again, so that accesses to freed memory are detected. */
struct fake_block {
    char *at;
    size_t bytes;
    int device, is_device, live, registered;
    std::string name;
    std::vector<fake_access> seen; /* accesses that can still race with a later one */
};

struct fake_graph;
/* The state captured by one cudaEventRecord. */
struct fake_version {
    int done = 0;
    fake_clock clock;
    cudaStream_t stream = NULL;
    fake_graph *graph = NULL;
    int works = 0; /* that had run */
};
typedef std::shared_ptr<fake_version> fake_version_ref;

struct fake_kernel; /* of NCCL */
enum fake_kind { FAKE_WORK, FAKE_RECORD, FAKE_WAIT, FAKE_NCCL };
struct fake_op {
    fake_kind kind;
    int line; /* in the record */
    fake_clock issued;
    std::function<void()> run;
    std::vector<fake_range> ranges;
    fake_version_ref version;
    std::shared_ptr<fake_kernel> kernel;
};

struct CUstream_st {
    int device, blocking, live, timeline, number, dead; /* dead: part of a deadlock */
    fake_graph *graph;                                  /* being captured into */
    std::deque<fake_op> queue;
    fake_clock clock;
};
struct CUevent_st {
    int device, live, number;
    fake_version_ref version;
    int timing = 0;
};
struct fake_graph {
    cudaStream_t origin;
    std::vector<std::pair<cudaStream_t, fake_op>> ops;
    int mode, thread, owned = 0; /* of the capture; owned: 1 = must be destroyed explicitly */
};
/* streams of a capture, and the streams that play them */
typedef std::map<cudaStream_t, cudaStream_t> fake_players;
struct fake_exec {
    fake_graph *graph;
    int device, live;
    fake_players players;
};

struct fake_line {
    int device, quiet;
    std::string text;
};
struct fake_device {
    int streams, events, blocks, comms, calls;
    CUstream_st *legacy;
    fake_clock host;
    /* Bytes of memory; most: the maximum held; taken: by others, after the free size was queried. */
    size_t total, held, most, taken;
};

struct fake_thread {
    /* asked: number of queries answered "not ready"; captures: in mode thread-local. */
    int device, timeline, relaxed, asked, captures;
    int early;              /* of these, queries of a stream or an event */
    cudaStream_t waits_for; /* the stream that this thread waits for */
    fake_clock clock;
};

static struct fake_machine {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    /* works: number of pieces that have run. */
    int device_count, generation, timelines, strict, captures, works;
    int patient; /* 1 = deadlocks are not detected: another event will end them */
    int mute;    /* 1 + the device on which ncclCommGetAsyncError blocks */
    size_t from; /* fake_record begins at this line */
    uint64_t seed, random;
    cudaStream_t running; /* the stream of the work that runs now */
    char *base, *real;    /* the region as programs see it, and where it can be read and written */
    size_t used[2];       /* of the upper half, which is pinned memory, and of the lower half, the devices' */
    fake_device device[FAKE_DEVICES];
    std::map<uintptr_t, fake_block> blocks;
    std::deque<CUstream_st> streams;
    std::deque<CUevent_st> events;
    std::deque<fake_graph> graphs;
    std::deque<fake_exec> execs;
    std::deque<fake_thread> threads;
    std::vector<fake_line> lines;
    std::vector<std::string> failures;
    struct {
        const char *function;
        int device, nth, code, sticky, fired, seen;
        std::string text;
    } fault;
} fake;

/* set inside calls; threads of an earlier fake_start get a new one */
static thread_local fake_thread *fake_mine;
static thread_local int fake_mine_generation;
#define fake_me (*fake_mine)
/* fake_seen appends the accesses of a kernel here. */
static thread_local std::vector<fake_range> *fake_collecting;

static void fake_failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void fake_failed(const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (std::string &known : fake.failures)
        if (known == text) return;
    fake.failures.push_back(text);
}

static std::string fake_format(const char *format, ...) __attribute__((format(printf, 1, 2)));
static std::string fake_format(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

static uint64_t fake_random(uint64_t below) {
    fake.random ^= fake.random << 13;
    fake.random ^= fake.random >> 7;
    fake.random ^= fake.random << 17;
    return fake.random % below;
}

/* ---- clocks ---- */

static void fake_join(fake_clock &into, const fake_clock &other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

static uint32_t fake_tick(fake_clock &clock, int timeline) {
    if ((int)clock.size() <= timeline) clock.resize((size_t)timeline + 1);
    return ++clock[(size_t)timeline];
}

static uint32_t fake_at(const fake_clock &clock, int timeline) {
    return timeline < (int)clock.size() ? clock[(size_t)timeline] : 0;
}

/* ---- calls ---- */

/* Every call holds one: the lock, its line in the record, and the fault injected into it. */
struct fake_call {
    /* The call answers "not ready" and is repeated; it sometimes sleeps a little, since the awaited thread
       needs the CPU. */
    int line, fault, not_yet;
    fake_call() : line(-1), fault(0), not_yet(0) {
        pthread_mutex_lock(&fake.lock);
        if (!fake_mine || fake_mine_generation != fake.generation) {
            fake.threads.push_back(fake_thread());
            fake_mine = &fake.threads.back();
            fake_mine_generation = fake.generation;
            fake_me.timeline = fake.timelines++;
        }
        if (!fake.strict) fake_join(fake_me.clock, fake.device[fake_me.device].host);
        fake_tick(fake_me.clock, fake_me.timeline);
    }
    /* quiet: 1 = not in the record, 2 = also not counted as a call of any name: calls of helper threads, at
       arbitrary times. */
    void begin(int quiet, const std::string &text) {
        line = (int)fake.lines.size();
        fake.lines.push_back({fake_me.device, quiet, text});
        if (!fake.fault.function && quiet == 2) return;
        if (fake.fault.nth == 0 || (fake.fault.device >= 0 && fake.fault.device != fake_me.device)) return;
        if (fake.fault.function && text.substr(0, text.find('(')) != fake.fault.function) return;
        if (++fake.fault.seen != fake.fault.nth && !(fake.fault.sticky && fake.fault.fired)) return;
        if (!fake.fault.fired) fake.fault.text = text;
        fake.fault.fired = 1;
        fault = fake.fault.code                   ? fake.fault.code
                : text.compare(0, 4, "nccl") == 0 ? 2 /* ncclSystemError */
                                                  : (int)cudaErrorUnknown;
        fake.lines.back().text += " FAILS";
    }
    ~fake_call() {
        int pause = not_yet && ++fake_me.asked % 16 == 0;
        fake_join(fake.device[fake_me.device].host, fake_me.clock);
        pthread_mutex_unlock(&fake.lock);
        if (pause) usleep(20);
    }
    cudaError_t error() const { return (cudaError_t)fault; }
};
#define FAKE_CALL(quiet, ...) \
    fake_call call;           \
    call.begin(quiet, fake_format(__VA_ARGS__))

static std::string fake_where(int line) {
    return line < 0 ? "the test"
                    : fake_format("#%d %d: %s", line, fake.lines[(size_t)line].device,
                                  fake.lines[(size_t)line].text.c_str());
}

/* ---- memory ---- */

static int fake_in_arena(const void *p) {
    return (const char *)p >= fake.base && (const char *)p < fake.base + FAKE_ARENA;
}
static char *fake_real(const void *p) {
    return fake_in_arena(p) ? fake.real + ((const char *)p - fake.base) : (char *)p;
}

static fake_block *fake_block_of(const void *p) {
    std::map<uintptr_t, fake_block>::iterator i = fake.blocks.upper_bound((uintptr_t)p);
    if (i == fake.blocks.begin()) return NULL;
    --i;
    return (uintptr_t)p < i->first + i->second.bytes ? &i->second : NULL;
}

static std::string fake_name(const void *p) {
    fake_block *block = p ? fake_block_of(p) : NULL;
    if (!block) return p ? "host" : "NULL";
    size_t offset = (size_t)((const char *)p - block->at);
    return block->name + (offset ? fake_format("+%zu", offset) : "");
}

/* A closed page separates allocations, so that an overrun crashes. */
static void *fake_allocate(size_t bytes, int is_device) {
    int device = fake_me.device;
    size_t pages = (bytes + 4095) / 4096 * 4096 + 4096;
    fake_device &d = fake.device[device];
    if (fake.used[is_device] + pages > FAKE_ARENA / 2 || (is_device && bytes + d.taken > d.total - d.held))
        return NULL;
    if (is_device) d.most = std::max(d.most, d.held += bytes);
    char *at = fake.base + (is_device ? 0 : FAKE_ARENA / 2) + fake.used[is_device];
    fake.used[is_device] += pages;
    memset(fake_real(at), 0xee, bytes);
    if (!is_device) mprotect(at, pages - 4096, PROT_READ | PROT_WRITE);
    ASAN_POISON_MEMORY_REGION(at + bytes, pages - bytes);
    fake.blocks[(uintptr_t)at] = {
        at, bytes, device, is_device, 1, 0, fake_format("m%d", ++fake.device[device].blocks), {}};
    return at;
}

static void fake_release(fake_block *block) {
    block->live = 0;
    if (block->is_device) fake.device[block->device].held -= block->bytes;
    if (block->registered)
        fake_failed("%s is freed while %d registrations with NCCL hold it", block->name.c_str(),
                    block->registered);
    if (!block->is_device) mprotect(block->at, (block->bytes + 4095) / 4096 * 4096, PROT_NONE);
    ASAN_POISON_MEMORY_REGION(block->at, block->bytes);
    madvise(fake_real(block->at), (block->bytes + 4095) / 4096 * 4096, MADV_REMOVE);
}

/* Checks whether work on a device can access a range. device -1: the range can also be host memory that is
   not pinned. */
static int fake_check_range(const void *at, size_t bytes, int device, int line) {
    fake_block *block = fake_block_of(at);
    const char *wrong = NULL;
    if (bytes == 0 || (device < 0 && !fake_in_arena(at))) return 1;
    if (!block)
        wrong = fake_in_arena(at) ? "lies outside every allocation" : "is memory of the host";
    else if (!block->live)
        wrong = "has been freed";
    else if ((const char *)at + bytes > block->at + block->bytes)
        wrong = "runs over the end of its allocation";
    else if (device >= 0 && block->is_device && block->device != device)
        wrong = "is memory of another device";
    if (wrong)
        fake_failed("%zu bytes at %s: %s, in %s", bytes, fake_name(at).c_str(), wrong,
                    fake_where(line).c_str());
    return !wrong;
}

/* Compares an access with earlier ones, and forgets those that it covers. */
static void fake_touch(const fake_range &range, int timeline, const fake_clock &clock, int line) {
    fake_block *block = fake_block_of(range.at);
    const char *at = (const char *)range.at, *end = at + range.bytes;
    size_t kept = 0;
    if (!block || range.bytes == 0) return;
    for (fake_access &old : block->seen) {
        int ordered = old.epoch <= fake_at(clock, old.timeline),
            meets = old.at < end && at < old.at + old.bytes;
        if (meets && !ordered && (old.write || range.write)) {
            fake_failed("race: %s of %s in [%s] and %s of %s in [%s] are not ordered",
                        old.write ? "write" : "read", fake_name(old.at).c_str(), fake_where(old.line).c_str(),
                        range.write ? "write" : "read", fake_name(at).c_str(), fake_where(line).c_str());
        }
        int covered = at <= old.at && old.at + old.bytes <= end && ordered && (range.write || !old.write);
        if (!covered) block->seen[kept++] = old;
    }
    block->seen.resize(kept);
    block->seen.push_back({at, range.bytes, range.write, timeline, fake_at(clock, timeline), line});
}

/* ---- streams ---- */

static std::string fake_name(cudaStream_t s) {
    if (!s || s == cudaStreamLegacy) return "s0";
    if (s == cudaStreamPerThread) return "per-thread";
    return fake_format(s->device == fake_me.device ? "s%d" : "s%d@%d", s->number, s->device);
}

static std::string fake_name(cudaEvent_t e) { return e ? fake_format("e%d", e->number) : "NULL"; }

static cudaStream_t fake_stream_new(int device, int blocking, int number) {
    fake.streams.push_back({device, blocking, 1, fake.timelines++, number, 0, NULL, {}, {}});
    return &fake.streams.back();
}

/* The stream of a handle; NULL after a failure. */
static cudaStream_t fake_stream_of(cudaStream_t s, int line) {
    if (!s || s == cudaStreamLegacy) return fake.device[fake_me.device].legacy;
    if (s == cudaStreamPerThread) {
        fake_failed("the per-thread stream is not modelled: %s", fake_where(line).c_str());
        return NULL;
    }
    for (CUstream_st &known : fake.streams)
        if (&known == s && known.live) return s;
    fake_failed("the stream has been destroyed, or never was: %s", fake_where(line).c_str());
    return NULL;
}

static void fake_nccl_enqueued(std::shared_ptr<fake_kernel> kernel, cudaStream_t stream);
static int fake_nccl_runnable(const fake_op &op);
static int fake_nccl_run(cudaStream_t stream, fake_op &op); /* 1 when it has ended */
static void fake_nccl_edges(const fake_op &op, std::vector<cudaStream_t> &edges);

static void fake_push(cudaStream_t s, const fake_op &op) {
    if (s->graph) {
        s->graph->ops.push_back({s, op});
        return;
    }
    s->queue.push_back(op);
    if (op.kind == FAKE_NCCL) fake_nccl_enqueued(op.kernel, s);
    pthread_cond_broadcast(&fake.changed);
}

static void fake_marker(cudaStream_t from, cudaStream_t to) {
    fake_version_ref version = std::make_shared<fake_version>();
    version->stream = from;
    fake_push(from, {FAKE_RECORD, -1, fake_clock(), nullptr, {}, version, nullptr});
    fake_push(to, {FAKE_WAIT, -1, fake_clock(), nullptr, {}, version, nullptr});
}

/* Adds work to a stream. The legacy stream waits for all blocking streams of its device, and they wait for
   it. */
static void fake_enqueue(cudaStream_t s, fake_op op) {
    cudaStream_t legacy = fake.device[s->device].legacy;
    op.issued = fake_me.clock;
    if (s == legacy) {
        for (CUstream_st &other : fake.streams)
            if (other.device == s->device && other.blocking && &other != s) {
                if (other.graph)
                    fake_failed("the legacy stream is used while a blocking stream captures: %s",
                                fake_where(op.line).c_str());
                else
                    fake_marker(&other, s);
            }
    } else if (s->blocking && !s->graph) {
        fake_marker(legacy, s);
    }
    fake_push(s, op);
}

static cudaError_t fake_enqueue_work(cudaStream_t stream, int line, std::vector<fake_range> ranges,
                                     std::function<void()> run) {
    cudaStream_t s = fake_stream_of(stream, line);
    if (!s) return cudaErrorInvalidResourceHandle;
    for (const fake_range &range : ranges)
        if (!fake_check_range(range.at, range.bytes, -1, line)) return cudaErrorInvalidValue;
    fake_enqueue(s, {FAKE_WORK, line, fake_clock(), run, ranges, nullptr, nullptr});
    return cudaSuccess;
}

static int fake_runnable(const CUstream_st &s) {
    if (s.queue.empty()) return 0;
    const fake_op &op = s.queue.front();
    return op.kind == FAKE_WAIT ? op.version->done : op.kind == FAKE_NCCL ? fake_nccl_runnable(op) : 1;
}

/* Runs the first piece of work of a stream. */
static void fake_run(cudaStream_t s) {
    fake_op &op = s->queue.front();
    fake_join(s->clock, op.issued);
    if (op.kind == FAKE_WAIT) fake_join(s->clock, op.version->clock);
    fake_tick(s->clock, s->timeline);
    if (op.kind == FAKE_NCCL && !fake_nccl_run(s, op)) return;
    for (const fake_range &range : op.ranges)
        if (fake_check_range(range.at, range.bytes, -1, op.line))
            fake_touch(range, s->timeline, s->clock, op.line);
    fake.running = s;
    if (op.run) op.run();
    fake.works += op.kind == FAKE_WORK || op.kind == FAKE_NCCL;
    if (op.kind == FAKE_RECORD) {
        op.version->clock = s->clock;
        op.version->works = fake.works;
        op.version->done = 1;
    }
    s->queue.pop_front();
    pthread_cond_broadcast(&fake.changed);
}

/* Runs one piece of work of some stream: a random one, or always the oldest or the newest stream that can
   run, by the seed. */
static int fake_step(void) {
    std::vector<cudaStream_t> runnable;
    for (CUstream_st &s : fake.streams)
        if (fake_runnable(s)) runnable.push_back(&s);
    if (runnable.empty()) return 0;
    size_t way = fake.seed % 4;
    fake_run(way == 1   ? runnable.front()
             : way == 2 ? runnable.back()
                        : runnable[fake_random(runnable.size())]);
    return 1;
}

/* Work can run at any call. */
static void fake_chance(void) {
    for (uint64_t n = fake_random(4); n > 0 && fake_step(); n--) {
    }
}

/* Whether a stream waits for one that waits for itself, through others. */
static int fake_cycle(cudaStream_t s, std::vector<cudaStream_t> &path, std::vector<cudaStream_t> &clear) {
    std::vector<cudaStream_t> edges;
    std::string text;
    if (std::find(clear.begin(), clear.end(), s) != clear.end() || s->queue.empty() || fake_runnable(*s))
        return 0;
    std::vector<cudaStream_t>::iterator i = std::find(path.begin(), path.end(), s);
    if (i != path.end()) {
        for (; i != path.end(); ++i) text += "\n    " + fake_where((*i)->queue.front().line);
        for (cudaStream_t waiting : path) waiting->dead = 1;
        fake_failed("deadlock: each of these waits for the next, and the last for the first:%s",
                    text.c_str());
        return 1;
    }
    const fake_op &op = s->queue.front();
    if (op.kind == FAKE_WAIT) edges.push_back(op.version->stream);
    if (op.kind == FAKE_NCCL) fake_nccl_edges(op, edges);
    path.push_back(s);
    for (cudaStream_t next : edges)
        if (fake_cycle(next, path, clear)) return 1;
    path.pop_back();
    clear.push_back(s);
    return 0;
}

static double fake_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Runs work, or lets other threads run, until done(). Returns 0, and reports it, if that can never happen.
   on: the stream waited for. */
static int fake_force(const std::function<int()> &done, cudaStream_t on, int line) {
    double limit = fake_now() + 20.0 * DDP_TEST_SLOWDOWN;
    fake_me.waits_for = on;
    while (!done()) {
        struct timespec until;
        std::vector<cudaStream_t> path, clear;
        if (fake_step()) continue;
        if (!fake.patient && on && (on->dead || fake_cycle(on, path, clear))) break;
        if (fake_now() > limit) {
            fake_failed("stuck: %s waits for ever%s%s", fake_where(line).c_str(),
                        on && !on->queue.empty() ? "; the stream stands at " : "",
                        on && !on->queue.empty() ? fake_where(on->queue.front().line).c_str() : "");
            break;
        }
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50 * 1000 * 1000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&fake.changed, &fake.lock, &until);
    }
    fake_me.waits_for = NULL;
    return done();
}

static int fake_force_version(const fake_version_ref &version, int line) {
    if (!fake_force([version] { return version->done; }, version->stream, line)) return 0;
    fake_join(fake_me.clock, version->clock);
    return 1;
}

/* Waits for all current work of a stream. */
static int fake_drain(cudaStream_t s, int line) {
    fake_version_ref version = std::make_shared<fake_version>();
    version->stream = s;
    if (s == fake.device[s->device].legacy || s->blocking)
        fake_enqueue(s, {FAKE_RECORD, -1, fake_clock(), nullptr, {}, version, nullptr});
    else
        fake_push(s, {FAKE_RECORD, -1, fake_clock(), nullptr, {}, version, nullptr});
    return fake_force_version(version, line);
}

/* cudaFree and its like wait for the whole device. */
static int fake_drain_device(int device, int line) {
    int drained = 1;
    for (size_t i = 0; i < fake.streams.size(); i++)
        if (fake.streams[i].device == device && !fake.streams[i].graph)
            drained &= fake_drain(&fake.streams[i], line);
    return drained;
}

/* A call that would invalidate a capture: one of any thread that has not relaxed (thread-local: of the
   capturing thread), or one on a capturing stream. */
static int fake_spoils(cudaStream_t s, int line) {
    if (!(s && s->graph) && (fake_me.relaxed || !(fake.captures || fake_me.captures))) return 0;
    fake_failed("not allowed while a stream captures: %s", fake_where(line).c_str());
    return 1;
}

/* ---- the table of runtime calls ---- */

static cudaError_t fake_device_count(int *count) {
    FAKE_CALL(1, "cudaGetDeviceCount()");
    *count = fake.device_count;
    return call.fault ? call.error() : fake.device_count ? cudaSuccess : cudaErrorNoDevice;
}

static cudaError_t fake_identity(int device, char name[256], unsigned char uuid[16]) {
    FAKE_CALL(1, "cudaGetDeviceProperties(%d)", device);
    if (call.fault || device < 0 || device >= fake.device_count)
        return call.fault ? call.error() : cudaErrorInvalidDevice;
    snprintf(name, 256, "Fake %d", device);
    memset(uuid, 0xfa, 16);
    uuid[0] = (unsigned char)device;
    return cudaSuccess;
}

static cudaError_t fake_set_device(int device) {
    FAKE_CALL(2, "cudaSetDevice(%d)", device);
    if (call.fault || device < 0 || device >= fake.device_count)
        return call.fault ? call.error() : cudaErrorInvalidDevice;
    fake_me.device = device;
    return cudaSuccess;
}

static cudaError_t fake_get_device(int *device) {
    FAKE_CALL(1, "cudaGetDevice()");
    *device = fake_me.device;
    return call.error();
}

static cudaError_t fake_malloc_any(void **out, size_t bytes, int is_device, fake_call &call) {
    *out = NULL;
    if (call.fault) return call.error();
    if (fake_spoils(NULL, call.line)) return cudaErrorStreamCaptureUnsupported;
    *out = fake_allocate(bytes, is_device);
    if (!*out) return cudaErrorMemoryAllocation;
    fake.lines[(size_t)call.line].text += " = " + fake_name(*out);
    return cudaSuccess;
}

static cudaError_t fake_free_any(void *memory, int is_device, fake_call &call) {
    fake_block *block = fake_block_of(memory);
    if (!memory) return call.error();
    if (fake_spoils(NULL, call.line)) return cudaErrorStreamCaptureUnsupported;
    if (!block || block->at != memory || block->is_device != is_device || !block->live) {
        fake_failed("%s: %s", fake_where(call.line).c_str(),
                    block && !block->live ? "it has been freed already" : "this was never allocated so");
        return cudaErrorInvalidValue;
    }
    if (!fake_drain_device(block->device, call.line)) return cudaErrorLaunchTimeout;
    fake_touch({block->at, block->bytes, 1}, fake_me.timeline, fake_me.clock, call.line);
    fake_release(block);
    return call.error();
}

static cudaError_t fake_malloc(void **out, size_t bytes) {
    FAKE_CALL(0, "cudaMalloc(%zu)", bytes);
    return fake_malloc_any(out, bytes, 1, call);
}
static cudaError_t fake_free(void *memory) {
    FAKE_CALL(0, "cudaFree(%s)", fake_name(memory).c_str());
    return fake_free_any(memory, 1, call);
}
static cudaError_t fake_host_alloc(void **out, size_t bytes) {
    FAKE_CALL(0, "cudaHostAlloc(%zu)", bytes);
    return fake_malloc_any(out, bytes, 0, call);
}
static cudaError_t fake_host_free(void *memory) {
    FAKE_CALL(0, "cudaFreeHost(%s)", fake_name(memory).c_str());
    return fake_free_any(memory, 0, call);
}

/* Stream-ordered memory: valid from the allocation to the free, in stream order. */
static inline cudaError_t fake_malloc_async(void **out, size_t bytes, cudaStream_t stream) {
    FAKE_CALL(0, "cudaMallocAsync(%zu, %s)", bytes, fake_name(stream).c_str());
    *out = NULL;
    if (call.fault) return call.error();
    *out = fake_allocate(bytes, 1);
    if (!*out) return cudaErrorMemoryAllocation;
    fake.lines[(size_t)call.line].text += " = " + fake_name(*out);
    return fake_enqueue_work(stream, call.line, {{*out, bytes, 1}}, nullptr);
}

static inline cudaError_t fake_free_async(void *memory, cudaStream_t stream) {
    FAKE_CALL(0, "cudaFreeAsync(%s, %s)", fake_name(memory).c_str(), fake_name(stream).c_str());
    fake_block *block = fake_block_of(memory);
    cudaError_t error;
    if (!block || block->at != memory || !block->live) {
        fake_failed("%s: this is no live allocation", fake_where(call.line).c_str());
        return cudaErrorInvalidValue;
    }
    error = fake_enqueue_work(stream, call.line, {{memory, block->bytes, 1}},
                              [block] { fake_release(block); });
    return call.fault ? call.error() : error;
}

/* Host memory that is not pinned: it is read before the call returns, and written on return. */
static cudaError_t fake_memcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                               cudaStream_t stream) {
    static const char *const kinds[] = {"HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice",
                                        "Default"};
    FAKE_CALL(0, "cudaMemcpyAsync(%s, %s, %zu, %s, %s)", fake_name(dst).c_str(), fake_name(src).c_str(),
              bytes, kinds[kind], fake_name(stream).c_str());
    fake_block *to = fake_block_of(dst), *from = fake_block_of(src);
    int to_device = to && to->is_device, from_device = from && from->is_device;
    cudaStream_t s = fake_stream_of(stream, call.line);
    cudaError_t error;
    if (call.fault || !s) return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if ((kind == cudaMemcpyDeviceToDevice && !(to_device && from_device))
        || (kind == cudaMemcpyDeviceToHost && (to_device || !from_device))
        || (kind == cudaMemcpyHostToDevice && (!to_device || from_device))
        || (kind == cudaMemcpyHostToHost && (to_device || from_device)))
        fake_failed("the kind does not fit the pointers: %s", fake_where(call.line).c_str());
    if ((!to || !from) && fake_spoils(s->graph ? s : NULL, call.line))
        return cudaErrorStreamCaptureUnsupported;
    if (!from && !fake_in_arena(src)) {
        std::string copy((const char *)src, bytes);
        error = fake_enqueue_work(stream, call.line, {{dst, bytes, 1}},
                                  [dst, copy] { memcpy(fake_real(dst), copy.data(), copy.size()); });
    } else {
        error = fake_enqueue_work(stream, call.line, {{src, bytes, 0}, {dst, bytes, 1}},
                                  [dst, src, bytes] { memmove(fake_real(dst), fake_real(src), bytes); });
    }
    if (error == cudaSuccess && !to && !fake_drain(s, call.line)) error = cudaErrorLaunchTimeout;
    return error;
}

static cudaError_t fake_memset(void *dst, int value, size_t bytes, cudaStream_t stream) {
    FAKE_CALL(0, "cudaMemsetAsync(%s, %d, %zu, %s)", fake_name(dst).c_str(), value, bytes,
              fake_name(stream).c_str());
    if (call.fault) return call.error();
    if (!fake_check_range(dst, bytes, fake_me.device, call.line)) return cudaErrorInvalidValue;
    return fake_enqueue_work(stream, call.line, {{dst, bytes, 1}},
                             [dst, value, bytes] { memset(fake_real(dst), value, bytes); });
}

static cudaError_t fake_synchronize(cudaStream_t stream) {
    FAKE_CALL(0, "cudaStreamSynchronize(%s)", fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (call.fault || !s) return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (fake_spoils(s, call.line)) return cudaErrorStreamCaptureUnsupported;
    return fake_drain(s, call.line) ? cudaSuccess : cudaErrorLaunchTimeout;
}

static cudaError_t fake_is_device(const void *pointer, int *yes) {
    FAKE_CALL(1, "cudaPointerGetAttributes(%s)", fake_name(pointer).c_str());
    fake_block *block = fake_block_of(pointer);
    *yes = block && block->live && block->is_device;
    return call.error();
}

/* Kernels of a device cannot run here: on_host 0 only records them. */
static cudaError_t fake_launch(const void *, dim3 grid, dim3 block, void **, size_t, cudaStream_t stream) {
    FAKE_CALL(0, "cudaLaunchKernel(%u, %u, %s)", grid.x, block.x, fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (s && s->device != fake_me.device)
        fake_failed("the stream is another device's: %s", fake_where(call.line).c_str());
    return call.fault ? call.error() : fake_enqueue_work(stream, call.line, {}, nullptr);
}

static cudaError_t fake_clear_error(void) { return cudaSuccess; }

static cudaError_t fake_stream_create_any(cudaStream_t *out, int blocking, fake_call &call) {
    if (call.fault) {
        *out = NULL;
        return call.error();
    }
    *out = fake_stream_new(fake_me.device, blocking, ++fake.device[fake_me.device].streams);
    fake.lines[(size_t)call.line].text += " = " + fake_name(*out);
    return cudaSuccess;
}
static cudaError_t fake_stream_create(cudaStream_t *out, int high_priority) {
    FAKE_CALL(0, "cudaStreamCreateWithPriority(non-blocking, %s)", high_priority ? "high" : "low");
    return fake_stream_create_any(out, 0, call);
}
static inline cudaError_t fake_stream_create_blocking(cudaStream_t *out) {
    FAKE_CALL(0, "cudaStreamCreate()");
    return fake_stream_create_any(out, 1, call);
}

static cudaError_t fake_stream_destroy(cudaStream_t stream) {
    FAKE_CALL(0, "cudaStreamDestroy(%s)", fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (!stream || s->graph)
        fake_failed("a stream that is 0 or captures is destroyed: %s", fake_where(call.line).c_str());
    else
        s->live = 0; /* its work still runs */
    return call.error();
}

/* The event of a handle. */
static cudaEvent_t fake_event_of(cudaEvent_t event, int line) {
    for (CUevent_st &known : fake.events)
        if (&known == event && known.live) return event;
    fake_failed("the event has been destroyed, or never was: %s", fake_where(line).c_str());
    return NULL;
}

static cudaError_t fake_event_create_any(cudaEvent_t *out, int timing, fake_call &call) {
    *out = NULL;
    if (call.fault) return call.error();
    fake.events.push_back({fake_me.device, 1, ++fake.device[fake_me.device].events, nullptr, timing});
    *out = &fake.events.back();
    fake.lines[(size_t)call.line].text += " = " + fake_name(*out);
    return cudaSuccess;
}
static cudaError_t fake_event_create(cudaEvent_t *out) {
    FAKE_CALL(0, "cudaEventCreateWithFlags(no timing)");
    return fake_event_create_any(out, 0, call);
}
static inline cudaError_t fake_event_create_timing(cudaEvent_t *out) {
    FAKE_CALL(0, "cudaEventCreate()");
    return fake_event_create_any(out, 1, call);
}

/* No real time is emulated: the time between two events is the number of pieces of work, of all streams,
   between them. */
static inline cudaError_t fake_event_elapsed(float *ms, cudaEvent_t start, cudaEvent_t end) {
    FAKE_CALL(0, "cudaEventElapsedTime(%s, %s)", fake_name(start).c_str(), fake_name(end).c_str());
    if (call.fault || !fake_event_of(start, call.line) || !fake_event_of(end, call.line))
        return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (!start->timing || !end->timing || !start->version || !end->version) {
        fake_failed("an event takes no time, or was never recorded: %s", fake_where(call.line).c_str());
        return cudaErrorInvalidResourceHandle;
    }
    if (!start->version->done || !end->version->done) return cudaErrorNotReady;
    *ms = (float)(end->version->works - start->version->works);
    return cudaSuccess;
}

static cudaError_t fake_event_destroy(cudaEvent_t event) {
    FAKE_CALL(0, "cudaEventDestroy(%s)", fake_name(event).c_str());
    if (!fake_event_of(event, call.line)) return cudaErrorInvalidResourceHandle;
    event->live = 0;
    return call.error();
}

static cudaError_t fake_event_record(cudaEvent_t event, cudaStream_t stream) {
    FAKE_CALL(0, "cudaEventRecord(%s, %s)", fake_name(event).c_str(), fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (call.fault || !s || !fake_event_of(event, call.line))
        return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (event->device != s->device) {
        fake_failed("event and stream are of different devices: %s", fake_where(call.line).c_str());
        return cudaErrorInvalidResourceHandle;
    }
    event->version = std::make_shared<fake_version>();
    event->version->stream = s;
    event->version->graph = s->graph;
    fake_enqueue(s, {FAKE_RECORD, call.line, fake_clock(), nullptr, {}, event->version, nullptr});
    return cudaSuccess;
}

/* Waits for the last record of the event before this call; if it was never recorded, does nothing. A captured
   event adds the stream to the capture. */
static cudaError_t fake_stream_wait_event(cudaStream_t stream, cudaEvent_t event) {
    FAKE_CALL(0, "cudaStreamWaitEvent(%s, %s)", fake_name(stream).c_str(), fake_name(event).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (call.fault || !s || !fake_event_of(event, call.line))
        return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (!event->version) return cudaSuccess;
    if (event->version->graph && !s->graph) s->graph = event->version->graph;
    if (s->graph && s->graph != event->version->graph) {
        fake_failed("a stream that captures waits for work outside of the capture: %s",
                    fake_where(call.line).c_str());
        return cudaErrorStreamCaptureIsolation;
    }
    fake_enqueue(s, {FAKE_WAIT, call.line, fake_clock(), nullptr, {}, event->version, nullptr});
    return cudaSuccess;
}

static cudaError_t fake_stream_query(cudaStream_t stream) {
    FAKE_CALL(2, "cudaStreamQuery(%s)", fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (call.fault || !s) return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (fake_spoils(s, call.line)) return cudaErrorStreamCaptureUnsupported;
    fake_chance();
    fake_me.early += call.not_yet = !s->queue.empty();
    if (call.not_yet) return cudaErrorNotReady;
    fake_join(fake_me.clock, s->clock);
    return cudaSuccess;
}

static cudaError_t fake_stream_capturing(cudaStream_t stream, int *yes) {
    FAKE_CALL(1, "cudaStreamIsCapturing(%s)", fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    *yes = s && s->graph;
    return call.error();
}

static cudaError_t fake_relax_capture(void) {
    FAKE_CALL(2, "cudaThreadExchangeStreamCaptureMode(relaxed)");
    if (!call.fault) fake_me.relaxed = 1;
    return call.error();
}

static cudaError_t fake_event_ask(cudaEvent_t event, fake_call &call, int wait) {
    if (call.fault || !fake_event_of(event, call.line))
        return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (event->version && event->version->graph) {
        fake_failed("the event was captured: %s", fake_where(call.line).c_str());
        return cudaErrorCapturedEvent;
    }
    if (fake_spoils(NULL, call.line)) return cudaErrorStreamCaptureUnsupported;
    if (!event->version) return cudaSuccess;
    if (wait) return fake_force_version(event->version, call.line) ? cudaSuccess : cudaErrorLaunchTimeout;
    fake_chance();
    fake_me.early += call.not_yet = !event->version->done;
    if (call.not_yet) return cudaErrorNotReady;
    fake_join(fake_me.clock, event->version->clock);
    return cudaSuccess;
}
static cudaError_t fake_event_query(cudaEvent_t event) {
    FAKE_CALL(2, "cudaEventQuery(%s)", fake_name(event).c_str());
    return fake_event_ask(event, call, 0);
}
static inline cudaError_t fake_event_synchronize(cudaEvent_t event) {
    FAKE_CALL(0, "cudaEventSynchronize(%s)", fake_name(event).c_str());
    return fake_event_ask(event, call, 1);
}

/* The loops of ddp_cuda.cuh on the CPU report their accesses with DDP__CUDA_RECORD_ACCESS. The type
   of the pointer shows whether they write. */
static inline void fake_seen(const void *at, size_t bytes) {
    if (fake_collecting) fake_collecting->push_back({at, bytes, 0});
}
static inline void fake_seen(void *at, size_t bytes) {
    if (fake_collecting) fake_collecting->push_back({at, bytes, 1});
}

/* Sorted, with neighbours of one kind joined. */
static void fake_merge_ranges(std::vector<fake_range> &ranges) {
    size_t kept = 0;
    std::sort(ranges.begin(), ranges.end(), [](const fake_range &a, const fake_range &b) {
        return a.write != b.write ? a.write < b.write : (uintptr_t)a.at < (uintptr_t)b.at;
    });
    for (const fake_range &range : ranges) {
        fake_range *last = kept ? &ranges[kept - 1] : NULL;
        const char *end = last ? (const char *)last->at + last->bytes : NULL;
        if (last && last->write == range.write && (const char *)range.at <= end)
            last->bytes = (size_t)(std::max(end, (const char *)range.at + range.bytes)
                                   - (const char *)last->at);
        else
            ranges[kept++] = range;
    }
    ranges.resize(kept);
}

/* Runs the loop of a kernel when its stream reaches it. Device memory is accessible meanwhile; the accesses
   are checked afterwards. */
static void fake_run_loop(void (*run)(void *), void *argument, int line) {
    cudaStream_t s = fake.running;
    std::vector<fake_range> ranges;
    fake_collecting = &ranges;
    mprotect(fake.base, fake.used[1], PROT_READ | PROT_WRITE);
    run(argument);
    mprotect(fake.base, fake.used[1], PROT_NONE);
    fake_collecting = NULL;
    fake_merge_ranges(ranges);
    for (const fake_range &range : ranges)
        if (fake_check_range(range.at, range.bytes, s->device, line))
            fake_touch(range, s->timeline, s->clock, line);
}

static cudaError_t fake_host_work(void (*run)(void *copy), const void *argument, size_t bytes,
                                  cudaStream_t stream) {
    FAKE_CALL(0, "kernel(%s)", fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    void *copy = NULL;
    int line = call.line;
    if (call.fault || !s) return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (s->device != fake_me.device) {
        fake_failed("the stream is another device's: %s", fake_where(line).c_str());
        return cudaErrorInvalidResourceHandle;
    }
    if (posix_memalign(&copy, 64, bytes) != 0) return cudaErrorMemoryAllocation;
    memcpy(copy, argument, bytes);
    std::shared_ptr<void> held(copy, free);
    return fake_enqueue_work(stream, line, {}, [run, held, line] { fake_run_loop(run, held.get(), line); });
}

/* In the order of struct ddp__cuda_runtime. */
#define FAKE_GPU_RUNTIME(on_host)                                                                          \
    {                                                                                                      \
        on_host, fake_device_count, fake_identity, fake_set_device, fake_malloc, fake_free, fake_memcpy,   \
            fake_memset, fake_synchronize, fake_is_device, fake_launch, fake_clear_error, fake_get_device, \
            fake_stream_create, fake_stream_destroy, fake_stream_wait_event, fake_stream_query,            \
            fake_stream_capturing, fake_relax_capture, fake_event_create, fake_event_destroy,              \
            fake_event_record, fake_event_query, fake_host_alloc, fake_host_free, fake_host_work           \
    }

/* ---- capture ---- */

static inline void fake_capture_count(const fake_graph &graph, int by) {
    if (graph.mode == cudaStreamCaptureModeGlobal) fake.captures += by;
    if (graph.mode == cudaStreamCaptureModeThreadLocal) fake_me.captures += by;
}

static inline cudaError_t fake_capture_begin(cudaStream_t stream,
                                             cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    FAKE_CALL(0, "cudaStreamBeginCapture(%s)", fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (call.fault || !s) return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    if (s == fake.device[s->device].legacy || s->graph) {
        fake_failed("the legacy stream, or one that captures already, cannot capture: %s",
                    fake_where(call.line).c_str());
        return s->graph ? cudaErrorIllegalState : cudaErrorStreamCaptureUnsupported;
    }
    fake.graphs.push_back({stream, {}, mode, fake_me.timeline});
    stream->graph = &fake.graphs.back();
    fake_capture_count(fake.graphs.back(), 1);
    return cudaSuccess;
}

/* Every stream that joined the capture must have joined the origin stream again. */
static inline fake_graph *fake_capture_end(cudaStream_t stream) {
    FAKE_CALL(0, "cudaStreamEndCapture(%s)", fake_name(stream).c_str());
    fake_graph *graph = stream->graph;
    std::map<cudaStream_t, fake_clock> clocks;
    std::map<fake_version *, fake_clock> versions;
    if (!graph || graph->origin != stream) {
        fake_failed("this stream began no capture: %s", fake_where(call.line).c_str());
        return NULL;
    }
    if (graph->mode != cudaStreamCaptureModeRelaxed && graph->thread != fake_me.timeline)
        fake_failed("another thread began the capture: %s", fake_where(call.line).c_str());
    for (std::pair<cudaStream_t, fake_op> &entry : graph->ops) {
        fake_clock &clock = clocks[entry.first];
        if (entry.second.kind == FAKE_WAIT)
            fake_join(clock, versions[entry.second.version.get()]);
        else if (entry.second.kind != FAKE_RECORD)
            fake_tick(clock, entry.first->timeline);
        if (entry.second.kind == FAKE_RECORD) versions[entry.second.version.get()] = clock;
    }
    for (std::pair<const cudaStream_t, fake_clock> &entry : clocks)
        if (fake_at(entry.second, entry.first->timeline) > fake_at(clocks[stream], entry.first->timeline))
            fake_failed("%s was drawn into the capture and has not joined again: %s",
                        fake_name(entry.first).c_str(), fake_where(call.line).c_str());
    for (CUstream_st &s : fake.streams)
        if (s.graph == graph) s.graph = NULL;
    fake_capture_count(*graph, -1);
    return call.fault ? NULL : graph;
}

static std::shared_ptr<fake_kernel> fake_nccl_again(const std::shared_ptr<fake_kernel> &kernel);

/* Another stream plays each stream of the capture: a new one in every launch, or the same one, then ordered
   after the launch before it. */
static inline cudaError_t fake_graph_launch(fake_graph *graph, cudaStream_t stream,
                                            fake_players *kept = NULL) {
    FAKE_CALL(0, "cudaGraphLaunch(%s)", fake_name(stream).c_str());
    cudaStream_t onto = fake_stream_of(stream, call.line);
    if (call.fault || !onto) return call.fault ? call.error() : cudaErrorInvalidResourceHandle;
    fake_players mine, &player = kept ? *kept : mine;
    std::vector<cudaStream_t> begun;
    std::map<fake_version *, fake_version_ref> version;
    for (std::pair<cudaStream_t, fake_op> &entry : graph->ops) {
        cudaStream_t &s = player[entry.first];
        fake_op op = entry.second;
        if (!s) {
            s = fake_stream_new(entry.first->device, 0, entry.first->number);
            s->live = 0;
        }
        if (std::find(begun.begin(), begun.end(), s) == begun.end()) {
            fake_marker(onto, s);
            begun.push_back(s);
        }
        op.issued = fake_me.clock;
        if (op.version) {
            fake_version_ref &played = version[op.version.get()];
            if (!played) {
                played = std::make_shared<fake_version>();
                played->stream = s;
            }
            op.version = played;
        }
        if (op.kernel) op.kernel = fake_nccl_again(op.kernel);
        fake_push(s, op);
    }
    if (player[graph->origin]) fake_marker(player[graph->origin], onto);
    return cudaSuccess;
}

/* ---- interface of the tests ---- */

static inline void fake_crash(int signal_number, siginfo_t *info, void *) {
    static const char text[] =
        "fake_gpu: the CPU touched device memory, or memory of the fake that is freed\n";
    if (fake_in_arena(info->si_addr)
        && write(2, text, sizeof text - 1) < 0) { /* the signal ends the process in any case */
    }
    signal(signal_number, SIG_DFL);
}

/* Starts with new devices. No thread is inside a call. */
static inline void fake_start(int device_count, uint64_t seed) {
    static int memory = -1;
    static pid_t owner;
    pthread_mutex_lock(&fake.lock);
    for (int half = 0; half < 2 && fake.base; half++)
        ASAN_UNPOISON_MEMORY_REGION(fake.base + (half ? 0 : FAKE_ARENA / 2), fake.used[half]);
    if (fake.base) {
        munmap(fake.base, FAKE_ARENA);
        munmap(fake.real, FAKE_ARENA);
    }
    if (memory >= 0 && owner == getpid()) close(memory);
    owner = getpid();
    memory = memfd_create("fake_gpu", 0);
    if (memory < 0 || ftruncate(memory, (off_t)FAKE_ARENA) != 0) {
        perror("fake_gpu: memfd_create");
        _exit(1);
    }
    fake.base = (char *)mmap(NULL, FAKE_ARENA, PROT_NONE, MAP_SHARED, memory, 0);
    fake.real = (char *)mmap(NULL, FAKE_ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (fake.base == MAP_FAILED || fake.real == MAP_FAILED) {
        perror("fake_gpu: mmap");
        _exit(1);
    }
    fake.used[0] = fake.used[1] = 0;
    fake.blocks.clear();
    fake.streams.clear();
    fake.events.clear();
    fake.graphs.clear();
    fake.execs.clear();
    fake.threads.clear();
    fake.lines.clear();
    fake.failures.clear();
    fake.generation++;
    fake.timelines = fake.strict = fake.captures = fake.patient = fake.mute = fake.works = 0;
    fake.from = 0;
    fake.seed = seed;
    fake.random = seed * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x2545f4914f6cdd1d);
    fake.fault = {NULL, -1, 0, 0, 0, 0, 0, ""};
    fake.device_count = device_count;
    for (int i = 0; i < FAKE_DEVICES; i++) {
        fake.device[i] = fake_device();
        fake.device[i].legacy = fake_stream_new(i, 1, 0);
        fake.device[i].total = FAKE_MEMORY;
    }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they install their own handlers */
    struct sigaction action = {};
    action.sa_sigaction = fake_crash;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, NULL);
#endif
    pthread_mutex_unlock(&fake.lock);
}

/* The nth call from now on fails: of function ("cudaMalloc", "ncclGroupEnd"; NULL: any except polling), made
   on device (-1: any), with code (0: some error of its library). sticky: all calls after it fail too. Calls
   that free still free. */
static inline void fake_fail(const char *function, int device, int nth, int code, int sticky) {
    pthread_mutex_lock(&fake.lock);
    fake.fault = {function, device, nth, code, sticky, 0, 0, ""};
    pthread_mutex_unlock(&fake.lock);
}

/* Whether a failure was reported; if stop is set, later ones are not. */
static inline int fake_fault_fired(int stop) {
    pthread_mutex_lock(&fake.lock);
    int fired = fake.fault.fired;
    if (stop) fake.fault.nth = 0;
    pthread_mutex_unlock(&fake.lock);
    return fired;
}

/* A kernel of the test: body runs when the stream reaches it, and accesses memory through fake_view. */
static inline cudaError_t fake_launch_work(cudaStream_t stream, const char *name,
                                           const std::vector<fake_range> &ranges,
                                           const std::function<void()> &body) {
    FAKE_CALL(0, "%s(%s)", name, fake_name(stream).c_str());
    cudaStream_t s = fake_stream_of(stream, call.line);
    if (s && s->device != fake_me.device)
        fake_failed("the stream is another device's: %s", fake_where(call.line).c_str());
    for (const fake_range &range : ranges) fake_check_range(range.at, range.bytes, fake_me.device, call.line);
    return fake_enqueue_work(stream, call.line, ranges, body);
}

/* Sets the memory of the device. fake.device[device] has the free bytes and the maximum held. */
static inline void fake_set_memory(int device, size_t total) {
    pthread_mutex_lock(&fake.lock);
    fake.device[device].total = total;
    pthread_mutex_unlock(&fake.lock);
}

/* Device memory as a CPU pointer. It does not order anything: fake_host_access does. */
static inline void *fake_view(const void *device_pointer) { return fake_real(device_pointer); }

/* The CPU reads or writes pinned memory at this point. */
static inline void fake_host_access(const void *at, size_t bytes, int write) {
    FAKE_CALL(0, "host %s(%s, %zu)", write ? "writes" : "reads", fake_name(at).c_str(), bytes);
    if (fake_check_range(at, bytes, -1, call.line))
        fake_touch({at, bytes, write}, fake_me.timeline, fake_me.clock, call.line);
}

/* Everything that any thread has done is ordered before the next call of this one: after a join, or a
   barrier. */
static inline void fake_host_fence(void) {
    FAKE_CALL(1, "host fence()");
    for (fake_device &device : fake.device) fake_join(fake_me.clock, device.host);
}

/* fake_record leaves out the calls up to now. */
static inline void fake_record_from_here(void) {
    pthread_mutex_lock(&fake.lock);
    fake.from = fake.lines.size();
    pthread_mutex_unlock(&fake.lock);
}

/* The calls made on a device, one per line. */
static inline std::string fake_record(int device) {
    std::string all;
    pthread_mutex_lock(&fake.lock);
    for (size_t i = fake.from; i < fake.lines.size(); i++)
        if (fake.lines[i].device == device && !fake.lines[i].quiet) all += fake.lines[i].text + "\n";
    pthread_mutex_unlock(&fake.lock);
    return all;
}

static inline int fake_failures(void) {
    pthread_mutex_lock(&fake.lock);
    int count = (int)fake.failures.size();
    for (const std::string &text : fake.failures)
        printf("fake_gpu (seed %llu): %s\n", (unsigned long long)fake.seed, text.c_str());
    pthread_mutex_unlock(&fake.lock);
    return count;
}

/* Removes the failures that contain the text; returns their number. */
static inline int fake_expect(const char *text) {
    pthread_mutex_lock(&fake.lock);
    std::vector<std::string> others;
    for (const std::string &f : fake.failures)
        if (f.find(text) == std::string::npos) others.push_back(f);
    int count = (int)(fake.failures.size() - others.size());
    fake.failures.swap(others);
    pthread_mutex_unlock(&fake.lock);
    return count;
}

static std::string fake_nccl_left(void);

/* Objects that were created and not destroyed, and work that has not run. "" if nothing is left. */
static inline std::string fake_left(void) {
    std::string left;
    pthread_mutex_lock(&fake.lock);
    for (CUstream_st &s : fake.streams) {
        if (s.live && s.number) left += fake_format("device %d: stream s%d\n", s.device, s.number);
        if (!s.queue.empty())
            left += fake_format("device %d: stream s%d stands at %s\n", s.device, s.number,
                                fake_where(s.queue.front().line).c_str());
    }
    for (CUevent_st &e : fake.events)
        if (e.live) left += fake_format("device %d: event e%d\n", e.device, e.number);
    for (std::pair<const uintptr_t, fake_block> &b : fake.blocks)
        if (b.second.live)
            left += fake_format("device %d: %zu bytes %s\n", b.second.device, b.second.bytes,
                                b.second.name.c_str());
    for (const fake_graph &graph : fake.graphs)
        if (graph.owned) left += fake_format("device %d: a graph\n", graph.origin->device);
    for (const fake_exec &exec : fake.execs)
        if (exec.live) left += fake_format("device %d: an instance of a graph\n", exec.device);
    left += fake_nccl_left();
    pthread_mutex_unlock(&fake.lock);
    return left;
}

#endif /* DDP_TEST_FAKE_GPU_H */

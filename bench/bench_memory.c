/*  bench_memory.c - the bare loops: only the memory accesses of a collective between 2 ranks, measured as in
    bench.h.

    cc -O3 -march=native bench_memory.c -o bench_memory -lpthread
    sh bench/run.sh                        in turns with ddp and every peer

    One thread per rank. They announce nothing, check nothing and handle no failure; they only wait for data.
    With 4 ranks: only all_reduce in group memory.

    group     Both threads can access every byte, in huge pages.
                all_reduce      a[i] = b[i] = a[i] + b[i] on both ranks' buffers, one half per thread
                reduce_scatter  out[i] = a[i] + b[i]; non-temporal stores unless out is a or b
                all_gather      non-temporal stores of the own block into the other's buffer
                copy            memcpy of each thread's own buffer
    private   A thread accesses only its own buffer and shared slots, as a process can. Plain pages.
              --setting slots-8, slots-128, slots-256, slots-512 (KiB)
                all_reduce, chunk by chunk:   fill    own slot <- the part that the other rank adds
                                              add     own part += other's slot; the sum also goes into that
                                                      slot
                                              drain   the other part <- own slot
                reduce_scatter: fill, add without the sum in the slot. all_gather: fill, copy from the slot.
              --setting line-64, line-128
                all_reduce: one loop fills a chunk, adds the chunk before it and drains the one before that, a
                cache line of each in turn.
              --setting read
                process_vm_readv reads the other's buffer in pieces of 256 KiB. reduce_scatter adds from
                there; all_reduce then reads the sums.
*/
#define _GNU_SOURCE
#include "bench.h"

#include <pthread.h>
#include <sys/uio.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { SLOTS = 3, PIECE = 256 * 1024, SKEW = 69632 };

/* Number of the last chunk; never reset. */
typedef struct rank_words {
    bench_word filled, passed;
} rank_words;

typedef struct memory_shared {
    float *group[4], *private_data[4];
    char *slots[4]; /* SLOTS * 512 KiB each */
    rank_words words[4];
} memory_shared;

typedef struct memory_user {
    bench *b;
    memory_shared *s;
    int me;
    float *out[2], *copy; /* per kind */
    char *piece;
    uint64_t round;
} memory_user;

//== loops

typedef float line __attribute__((vector_size(64), may_alias, aligned(4)));

/* Loops over several runs at once, a cache line of each in turn: while one run starts a page, the others
   stream. Two runs are fastest on AMD, three elsewhere. */
static int three_runs;
#define RUNS_OF(count, runs, STEP)                        \
    do {                                                  \
        size_t each_ = (count) / (16 * (runs)) * 16;      \
        for (size_t at_ = 0; at_ < each_; at_ += 16) {    \
            {                                             \
                size_t i = at_;                           \
                STEP(line)                                \
            }                                             \
            {                                             \
                size_t i = at_ + each_;                   \
                STEP(line)                                \
            }                                             \
            if ((runs) == 3) {                            \
                size_t i = at_ + 2 * each_;               \
                STEP(line)                                \
            }                                             \
        }                                                 \
        for (size_t i = (runs)*each_; i < (count); i++) { \
            STEP(float)                                   \
        }                                                 \
    } while (0)
#define RUNS(count, STEP)            \
    do {                             \
        if (three_runs)              \
            RUNS_OF(count, 3, STEP); \
        else                         \
            RUNS_OF(count, 2, STEP); \
    } while (0)
#define AT(T, p) (*(T *)((p) + i))

static void copy_lines(float *out, float *in, size_t count) {
#define COPY(T) AT(T, out) = AT(T, in);
    RUNS(count, COPY);
}

static void pair_add(float *left, float *right, size_t count) {
#define PAIR(T)                         \
    T sum = AT(T, left) + AT(T, right); \
    AT(T, left) = sum;                  \
    AT(T, right) = sum;
    RUNS(count, PAIR);
}

static void add_to(float *left, float *right, size_t count) {
#define ADD(T) AT(T, left) += AT(T, right);
    RUNS(count, ADD);
}

static void quad_add(float *const data[4], size_t begin, size_t count) {
    float *a = data[0] + begin, *b = data[1] + begin, *c = data[2] + begin, *d = data[3] + begin;
#define QUAD(T)                                            \
    T sum = (AT(T, a) + AT(T, b)) + (AT(T, c) + AT(T, d)); \
    AT(T, a) = sum;                                        \
    AT(T, b) = sum;                                        \
    AT(T, c) = sum;                                        \
    AT(T, d) = sum;
    RUNS(count, QUAD);
}

/* Fill, add and drain in one loop. */
static void fill_add_drain(float *fill, float *give, float *own, float *slot, float *take, float *full,
                           size_t count) {
#define ROUND(T)                                                                \
    T given = AT(T, give), sum = AT(T, own) + AT(T, slot), taken = AT(T, full); \
    AT(T, fill) = given;                                                        \
    AT(T, own) = sum;                                                           \
    AT(T, slot) = sum;                                                          \
    AT(T, take) = taken;
    RUNS(count, ROUND);
}

/* out[i] = left[i] + right[i], or left[i] if right is NULL. Non-temporal stores. */
static void stream_to(float *out, const float *left, const float *right, size_t count) {
    size_t i = 0;
#if defined(__SSE2__)
    for (; ((uintptr_t)(out + i) & 15) && i < count; i++) out[i] = right ? left[i] + right[i] : left[i];
    for (; i + 4 <= count; i += 4) {
        __m128 sum = _mm_loadu_ps(left + i);
        if (right) sum = _mm_add_ps(sum, _mm_loadu_ps(right + i));
        _mm_stream_ps(out + i, sum);
    }
    _mm_sfence();
#endif
    for (; i < count; i++) out[i] = right ? left[i] + right[i] : left[i];
}

//== group memory

static void group_run(memory_user *u, const bench_cell *cell) {
    size_t count = cell->bytes / sizeof(float), half = count / (size_t)u->b->rank_count,
           own = (size_t)u->me * half;
    float *mine = u->s->group[u->me], *other = u->s->group[u->me ^ 1];
    if (u->b->rank_count == 4) {
        bench_barrier(u->b);
        quad_add(u->s->group, own, half);
        bench_barrier(u->b);
        return;
    }
    if (cell->op == BENCH_COPY) {
        memcpy(u->copy, mine, cell->bytes);
        return;
    }
    if (cell->bytes <= BENCH_SMALL_BYTES) bench_barrier(u->b); /* the other rank has arrived */
    switch (cell->op) {
    case BENCH_ALL_REDUCE: pair_add(u->s->group[0] + own, u->s->group[1] + own, half); break;
    case BENCH_REDUCE_SCATTER: stream_to(u->out[1], u->s->group[0] + own, u->s->group[1] + own, half); break;
    case BENCH_REDUCE_SCATTER_IN_PLACE: add_to(mine + own, other + own, half); break;
    default: stream_to(other + own, mine + own, NULL, half); break;
    }
    bench_barrier(u->b); /* both halves of the result are complete */
}

//== private memory through slots

static void await(memory_user *u, const bench_word *word, uint64_t target) {
    while (__atomic_load_n(&word->value, __ATOMIC_ACQUIRE) < target) bench_relax(u->b);
}

static void tick(bench_word *word, uint64_t round) {
    __atomic_store_n(&word->value, round, __ATOMIC_RELEASE);
}

static float *slot_of(memory_user *u, int rank, uint64_t round, size_t chunk) {
    return (float *)(void *)(u->s->slots[rank] + (round % SLOTS) * (chunk + 4096));
}

/* Chunk k of chunks, counted from the end of the block. A block is half of the buffer. */
typedef struct span {
    size_t at, count;
} span;
static span chunk_of(size_t block, size_t chunk, size_t chunks, size_t k) {
    span s;
    s.at = (chunks - 1 - k) * chunk;
    s.count = block - s.at < chunk ? block - s.at : chunk;
    return s;
}

static void slots_run(memory_user *u, const bench_cell *cell, size_t chunk_bytes, int at_once) {
    size_t block = cell->bytes / sizeof(float) / 2, chunk = chunk_bytes / sizeof(float) / 2, chunks;
    int reduces = cell->op != BENCH_ALL_GATHER, drains = cell->op == BENCH_ALL_REDUCE;
    float *data = u->s->private_data[u->me], *own = data + (size_t)u->me * block,
          *others = data + (size_t)(1 - u->me) * block;
    rank_words *mine = &u->s->words[u->me], *their = &u->s->words[1 - u->me];
    uint64_t first = u->round + 1;
    if (chunk > block) chunk = block;
    chunks = (block + chunk - 1) / chunk;
    u->round += chunks;
    for (size_t k = 0; k <= chunks + (size_t)drains; k++) {
        if (at_once && k > 2 && k < chunks) { /* the first chunk may be shorter */
            size_t at = (chunks - 1 - k) * chunk;
            await(u, &their->passed, first + k - 2);
            await(u, &their->filled, first + k - 1);
            fill_add_drain(slot_of(u, u->me, first + k, chunk_bytes), others + at, own + at + chunk,
                           slot_of(u, 1 - u->me, first + k - 1, chunk_bytes), others + at + 2 * chunk,
                           slot_of(u, u->me, first + k - 2, chunk_bytes), chunk);
            tick(&mine->filled, first + k);
            tick(&mine->passed, first + k - 1);
            continue;
        }
        if (k < chunks) {
            span s = chunk_of(block, chunk, chunks, k);
            if (first + k > SLOTS) await(u, &their->passed, first + k - SLOTS);
            copy_lines(slot_of(u, u->me, first + k, chunk_bytes), (reduces ? others : own) + s.at, s.count);
            tick(&mine->filled, first + k);
        }
        if (k > 0 && k <= chunks) {
            span s = chunk_of(block, chunk, chunks, k - 1);
            float *slot = slot_of(u, 1 - u->me, first + k - 1, chunk_bytes);
            await(u, &their->filled, first + k - 1);
            if (cell->op == BENCH_ALL_REDUCE)
                pair_add(own + s.at, slot, s.count);
            else if (cell->op == BENCH_REDUCE_SCATTER)
                stream_to(u->out[0] + s.at, own + s.at, slot, s.count);
            else if (reduces)
                add_to(own + s.at, slot, s.count);
            else
                copy_lines(others + s.at, slot, s.count);
            tick(&mine->passed, first + k - 1);
        }
        if (k > 1 && drains) {
            span s = chunk_of(block, chunk, chunks, k - 2);
            await(u, &their->passed, first + k - 2);
            copy_lines(others + s.at, slot_of(u, u->me, first + k - 2, chunk_bytes), s.count);
        }
    }
    if (!drains) await(u, &their->passed, u->round);
}

//== private memory read from outside

static void fetch(memory_user *u, float *out, const float *in, size_t count) {
    struct iovec here = {out, count * sizeof(float)}, there = {(void *)(uintptr_t)in, count * sizeof(float)};
    if (process_vm_readv(getpid(), &here, 1, &there, 1, 0) != (ssize_t)(count * sizeof(float)))
        bench_die(u->b, "process_vm_readv failed");
}

static void read_run(memory_user *u, const bench_cell *cell) {
    size_t block = cell->bytes / sizeof(float) / 2, chunk = PIECE / sizeof(float),
           chunks = (block + chunk - 1) / chunk;
    float *own = u->s->private_data[u->me] + (size_t)u->me * block,
          *others = u->s->private_data[u->me] + (size_t)(1 - u->me) * block;
    const float *their_own = u->s->private_data[1 - u->me] + (size_t)(1 - u->me) * block,
                *wanted = u->s->private_data[1 - u->me] + (size_t)u->me * block;
    rank_words *mine = &u->s->words[u->me], *their = &u->s->words[1 - u->me];
    uint64_t first = u->round + 1;
    u->round += chunks;
    bench_barrier(u->b);
    for (size_t k = 0; k < chunks + (size_t)(cell->op == BENCH_ALL_REDUCE); k++) {
        span s = chunk_of(block, chunk, chunks, k < chunks ? k : chunks - 1),
             before = chunk_of(block, chunk, chunks, k > 0 ? k - 1 : 0);
        if (cell->op == BENCH_ALL_GATHER) {
            fetch(u, others + s.at, their_own + s.at, s.count);
            continue;
        }
        if (k < chunks) {
            fetch(u, (float *)(void *)u->piece, wanted + s.at, s.count);
            if (cell->op == BENCH_REDUCE_SCATTER)
                stream_to(u->out[0] + s.at, own + s.at, (float *)(void *)u->piece, s.count);
            else
                add_to(own + s.at, (float *)(void *)u->piece, s.count);
            tick(&mine->passed, first + k);
        }
        if (k == 0 || cell->op != BENCH_ALL_REDUCE) continue;
        await(u, &their->passed, first + k - 1);
        fetch(u, others + before.at, their_own + before.at, before.count);
    }
    bench_barrier(u->b);
}

//== running

static int memory_supports(void *user, const bench_cell *cell, int kind) {
    const bench *b = ((memory_user *)user)->b;
    int slots = strncmp(b->setting, "slots", 5) == 0, at_once = strncmp(b->setting, "line", 4) == 0,
        reads = strcmp(b->setting, "read") == 0;
    if (b->rank_count == 4) return kind == 1 && cell->op == BENCH_ALL_REDUCE;
    if (kind == 1)
        return !slots && !at_once && !reads
               && (cell->op == BENCH_COPY || cell->op == BENCH_ALL_REDUCE
                   || (cell->bytes >= (size_t)25 << 20 && cell->op <= BENCH_ALL_GATHER));
    if (cell->op > BENCH_ALL_GATHER || cell->bytes < 16384) return 0;
    return slots || (at_once && cell->op == BENCH_ALL_REDUCE) || (reads && cell->bytes >= (size_t)1 << 20);
}

static int memory_run(void *user, const bench_cell *cell, int kind, int calls) {
    memory_user *u = (memory_user *)user;
    for (int i = 0; i < calls; i++) {
        if (kind == 1)
            group_run(u, cell);
        else if (u->b->setting[0] == 'r')
            read_run(u, cell);
        else
            slots_run(u, cell, (size_t)atoi(strchr(u->b->setting, '-') + 1) * 1024, u->b->setting[0] == 'l');
    }
    return 0;
}

typedef struct memory_thread {
    bench b;
    memory_shared *shared;
    pthread_t thread;
    int rank;
} memory_thread;

static void *memory_main(void *argument) {
    memory_thread *t = (memory_thread *)argument;
    memory_shared *s = t->shared;
    bench_driver d;
    memory_user u;
    size_t largest = bench_largest(&t->b), block_bytes = (size_t)25 << 20;
    memset(&u, 0, sizeof u);
    memset(&d, 0, sizeof d);
    bench_join(&t->b, t->rank);
    u.b = &t->b;
    u.s = s;
    u.me = t->rank;
    s->private_data[t->rank] = bench_private(&t->b, largest);
    u.out[0] = bench_private(&t->b, block_bytes);
    t->b.huge = 1; /* from here on: group memory and slots */
    u.copy = bench_private(&t->b, largest);
    u.out[1] = bench_private(&t->b, block_bytes);
    u.piece = (char *)bench_private(&t->b, PIECE);
    s->group[t->rank] = bench_private(&t->b, largest);
    /* See DDP__OFF_PAGE in ddp.h. */
    s->slots[t->rank] = (char *)bench_private(&t->b, SLOTS * (512 * 1024 + 4096) + 2 * SKEW)
                        + (t->rank ? SKEW : 0) + 2048;
    bench_barrier(&t->b);
    d.user = &u;
    d.kind_count = 2;
    d.supports = memory_supports;
    d.run = memory_run;
    d.data[0] = s->private_data[t->rank];
    d.data[1] = s->group[t->rank];
    d.out[0] = u.out[0];
    d.out[1] = u.out[1];
    bench_run(&t->b, &d);
    return NULL;
}

int main(int argc, char **argv) {
    static memory_shared shared;
    memory_thread thread[4];
    bench b;
    bench_arguments(&b, argc, argv);
#if defined(__x86_64__)
    __builtin_cpu_init();
    three_runs = !__builtin_cpu_is("amd");
#endif
    if (b.cell_count == 0) { /* plan "start": does this setting work here? */
        struct iovec here = {&b, 1}, there = {&shared, 1};
        return strcmp(b.setting, "read") == 0 && process_vm_readv(getpid(), &here, 1, &there, 1, 0) != 1;
    }
    if (b.slot_count == 1 && b.share_path) unlink(b.share_path);
    if (b.rank_count != 2 && b.rank_count != 4)
        bench_die(&b, "the bare loops are written for two ranks and four");
    for (int r = 0; r < b.rank_count; r++) {
        thread[r].b = b;
        thread[r].shared = &shared;
        thread[r].rank = r;
        if (pthread_create(&thread[r].thread, NULL, memory_main, &thread[r]) != 0) return 1;
    }
    for (int r = 0; r < b.rank_count; r++) pthread_join(thread[r].thread, NULL);
    return 0;
}

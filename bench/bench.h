/*  bench.h - shared by the collective benchmarks: turns, start barrier, placement, rewriting, checking, CSV.

    All programs of a run map one file. They take turns block by block: while one measures, the ranks of all
    others sleep in the kernel. So two programs measure the same operation within a second or two of each
    other, on the same cores, and no program pays for being started again.

    A block is one operation at one size, repeated until its time is used up:
      ping-pong between core 0 and core 1        near or far, see bench_ping_ns
      one operation on whole numbers             every element of the result is checked
      repeat { rewrite, barrier, time, barrier } the time of the slowest rank; up to 64 KiB: 100 successive
      calls / 100
      ping-pong again                            merge.py drops a block if its two tags differ
    The barriers spin on the mapped file. The library's barrier is never used.
*/
#ifndef BENCH_H
#define BENCH_H

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BENCH_MAX_RANKS 8
#define BENCH_MAX_SLOTS 16
#define BENCH_MAX_SAMPLES 4096
#define BENCH_MAX_CELLS 32
#define BENCH_FAR_NS 120.0 /* one-way latency from which on two cores count as far */
#define BENCH_SMALL_BYTES 65536
#define BENCH_DEAD_S 120

enum {
    BENCH_ALL_REDUCE,
    BENCH_REDUCE_SCATTER,
    BENCH_REDUCE_SCATTER_IN_PLACE,
    BENCH_ALL_GATHER,
    BENCH_BROADCAST,
    BENCH_SEND_RECV,
    BENCH_BARRIER,
    BENCH_COPY
};
static const char *const bench_op_name[] = {"all_reduce",
                                            "reduce_scatter",
                                            "reduce_scatter_in_place",
                                            "all_gather",
                                            "broadcast",
                                            "send_recv",
                                            "barrier",
                                            "copy"};

/* bytes: size of the larger buffer of a rank; W blocks for reduce_scatter and all_gather. */
typedef struct bench_cell {
    int op;
    size_t bytes;
    double budget_s;
} bench_cell;

typedef struct bench_word {
    uint64_t value;
    char pad[120]; /* two lines: the prefetcher fetches them in pairs */
} bench_word;

typedef struct bench_region {            /* state of one program */
    bench_word go;                       /* number of the turn granted to this program; futex */
    bench_word arrived[BENCH_MAX_RANKS]; /* barriers entered */
    bench_word ping, pong, pinged, stop;
    struct {
        double elapsed_s;
        long preempted;
        char pad[112];
    } rank[BENCH_MAX_RANKS];
} bench_region;

typedef struct bench_share {
    bench_word ready, failed;
    bench_word end; /* the time is used up: each program passes its turn on and ends */
    bench_region region[BENCH_MAX_SLOTS];
} bench_share;

/* State of one rank. */
typedef struct bench {
    const char *system, *setting, *share_path, *out_path, *plan;
    const char *ops; /* operations to measure, "all_reduce,barrier"; NULL = all */
    size_t from_bytes, to_bytes;
    int slot, slot_count, rank, rank_count, round_count, huge;
    double seconds, start_s;
    bench_share *share;
    bench_region *region;
    uint64_t arrived, ping_count;
    int cpu[BENCH_MAX_RANKS], cpu_count;
    bench_cell cell[BENCH_MAX_CELLS];
    int cell_count;
    FILE *out;
    double *samples;
} bench;

/* The operations of one program. kind: 0 private memory, 1 group memory. */
typedef struct bench_driver {
    void *user;
    int kind_count;
    int (*supports)(void *user, const bench_cell *cell, int kind);
    int (*run)(void *user, const bench_cell *cell, int kind, int calls); /* returns 0 on success */
    float *data[2], *out[2]; /* per kind, as large as the largest cell; out: result of reduce_scatter */
    int in_place_at_start;   /* reduce_scatter in place writes its block to the start of data (MPI) */
} bench_driver;

//== time and waiting

static double bench_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void bench_relax(const bench *b) {
    if (b->rank_count > b->cpu_count) sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

static void bench_die(bench *b, const char *what) {
    fprintf(stderr, "bench: %s (%s) rank %d: %s\n", b->system, b->setting, b->rank, what);
    if (b->share) __atomic_store_n(&b->share->failed.value, 1, __ATOMIC_SEQ_CST);
    _exit(1);
}

static void bench_barrier(bench *b) {
    uint64_t target = ++b->arrived, spins = 0;
    __atomic_store_n(&b->region->arrived[b->rank].value, target, __ATOMIC_RELEASE);
    for (int r = 0; r < b->rank_count; r++) {
        while (__atomic_load_n(&b->region->arrived[r].value, __ATOMIC_ACQUIRE) < target) {
            bench_relax(b);
            if (++spins % 1000000 == 0 && __atomic_load_n(&b->share->failed.value, __ATOMIC_RELAXED))
                _exit(1);
        }
    }
}

/* Sleeps until this program's go word has reached turn. */
static void bench_wait_turn(bench *b, uint64_t turn) {
    double limit_s = bench_now() + BENCH_DEAD_S;
    for (;;) {
        uint64_t seen = __atomic_load_n(&b->region->go.value, __ATOMIC_ACQUIRE);
        if (seen >= turn) return;
        if (__atomic_load_n(&b->share->failed.value, __ATOMIC_RELAXED)) _exit(1);
        if (bench_now() > limit_s) bench_die(b, "another program of this run has stopped");
        struct timespec nap = {1, 0};
        /* The low half of the word: little endian. */
        syscall(SYS_futex, (uint32_t *)&b->region->go.value, FUTEX_WAIT, (uint32_t)seen, &nap, NULL, 0);
    }
}

static void bench_give_turn(bench *b, int slot, uint64_t turn) {
    bench_region *next = &b->share->region[slot];
    __atomic_store_n(&next->go.value, turn, __ATOMIC_RELEASE);
    syscall(SYS_futex, (uint32_t *)&next->go.value, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

//== placement

static int bench_by_value(const void *left, const void *right) {
    double l = *(const double *)left, r = *(const double *)right;
    return (l > r) - (l < r);
}

/* One-way latency of a cache line between ranks 0 and 1, median of 5 batches of 400 round trips. Collective;
   only rank 0 gets the value. Other ranks sleep meanwhile. Zero if the machine has only one core. */
static double bench_ping_ns(bench *b) {
    double batch_ns[5];
    uint64_t done = ++b->ping_count;
    bench_region *g = b->region;
    if (b->cpu_count < 2 || b->rank_count < 2) return 0;
    bench_barrier(b);
    if (b->rank > 1) {
        while (__atomic_load_n(&g->pinged.value, __ATOMIC_ACQUIRE) < done) usleep(300);
    } else {
        for (int batch = 0; batch < 5; batch++) {
            double start_s = bench_now();
            for (int i = 0; i < 400; i++) {
                uint64_t n = done * 4000 + (uint64_t)batch * 400 + (uint64_t)i;
                if (b->rank == 0) {
                    __atomic_store_n(&g->ping.value, n, __ATOMIC_RELEASE);
                    while (__atomic_load_n(&g->pong.value, __ATOMIC_ACQUIRE) != n) {
                    }
                } else {
                    while (__atomic_load_n(&g->ping.value, __ATOMIC_ACQUIRE) != n) {
                    }
                    __atomic_store_n(&g->pong.value, n, __ATOMIC_RELEASE);
                }
            }
            batch_ns[batch] = (bench_now() - start_s) * 1e9 / 800;
        }
        if (b->rank == 0) __atomic_store_n(&g->pinged.value, done, __ATOMIC_RELEASE);
    }
    bench_barrier(b);
    if (b->rank != 0) return 0;
    qsort(batch_ns, 5, sizeof(double), bench_by_value);
    return batch_ns[2];
}

/* The cores of this process. Call it before ddp_launch or mpirun restricts them. */
static void bench_find_cpus(bench *b) {
    cpu_set_t set;
    b->cpu_count = 0;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return;
    for (int c = 0; c < CPU_SETSIZE && b->cpu_count < BENCH_MAX_RANKS; c++) {
        if (CPU_ISSET(c, &set)) b->cpu[b->cpu_count++] = c;
    }
}

static void bench_pin(const bench *b) {
    cpu_set_t set;
    if (b->cpu_count == 0) return;
    CPU_ZERO(&set);
    CPU_SET(b->cpu[b->rank % b->cpu_count], &set);
    sched_setaffinity(0, sizeof set, &set);
}

//== plans

static void bench_add(bench *b, int op, size_t bytes, double budget_s) {
    bench_cell cell;
    cell.op = op;
    cell.bytes = bytes;
    cell.budget_s = budget_s;
    if (b->cell_count < BENCH_MAX_CELLS) b->cell[b->cell_count++] = cell;
}

/* quick: all_reduce at the sizes of the targets. full: all other operations too. four: more ranks than cores.
   start: no cell, to test a launcher. */
static void bench_make_plan(bench *b) {
    const size_t kib = 1024, mib = 1024 * kib;
    b->cell_count = 0;
    if (strcmp(b->plan, "start") == 0) return;
    bench_add(b, BENCH_ALL_REDUCE, kib, .04);
    if (strcmp(b->plan, "four") == 0) {
        bench_add(b, BENCH_ALL_REDUCE, 256 * kib, .1);
        bench_add(b, BENCH_ALL_REDUCE, 25 * mib, .4);
        bench_add(b, BENCH_BARRIER, 0, .04);
        return;
    }
    bench_add(b, BENCH_ALL_REDUCE, 16 * kib, .04);
    bench_add(b, BENCH_ALL_REDUCE, 256 * kib, .04);
    bench_add(b, BENCH_ALL_REDUCE, mib, .05);
    bench_add(b, BENCH_ALL_REDUCE, 25 * mib, .15);
    bench_add(b, BENCH_ALL_REDUCE, 64 * mib, .25);
    bench_add(b, BENCH_ALL_REDUCE, 256 * mib, .4);
    if (strcmp(b->plan, "quick") == 0) return;
    bench_add(b, BENCH_COPY, 256 * mib, .3);
    bench_add(b, BENCH_REDUCE_SCATTER, 25 * mib, .15);
    bench_add(b, BENCH_REDUCE_SCATTER_IN_PLACE, 25 * mib, .15);
    bench_add(b, BENCH_ALL_GATHER, 25 * mib, .15);
    bench_add(b, BENCH_BROADCAST, 25 * mib, .15);
    bench_add(b, BENCH_SEND_RECV, kib, .04);
    bench_add(b, BENCH_SEND_RECV, 25 * mib, .15);
    bench_add(b, BENCH_BARRIER, 0, .04);
}

/* Whether --ops, --from and --to include this cell. Some settings make sense only for some operations and
   sizes. */
static int bench_wanted(const bench *b, const bench_cell *cell) {
    const char *name = bench_op_name[cell->op], *found = b->ops ? strstr(b->ops, name) : NULL;
    /* Skip a longer name with this prefix. */
    while (found && found[strlen(name)] != ',' && found[strlen(name)] != 0) found = strstr(found + 1, name);
    return (!b->ops || found) && cell->bytes >= b->from_bytes && cell->bytes <= b->to_bytes;
}

static size_t bench_largest(const bench *b) {
    size_t largest = 4096;
    for (int c = 0; c < b->cell_count; c++) largest = b->cell[c].bytes > largest ? b->cell[c].bytes : largest;
    return largest;
}

//== set-up

static void bench_arguments(bench *b, int argc, char **argv) {
    memset(b, 0, sizeof *b);
    b->system = "ddp";
    b->setting = "";
    b->plan = "quick";
    b->seconds = 20;
    b->round_count = 1000;
    b->slot_count = 1;
    b->rank_count = 2;
    b->to_bytes = SIZE_MAX;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--system") == 0)
            b->system = value;
        else if (strcmp(name, "--setting") == 0)
            b->setting = value;
        else if (strcmp(name, "--share") == 0)
            b->share_path = value;
        else if (strcmp(name, "--out") == 0)
            b->out_path = value;
        else if (strcmp(name, "--plan") == 0)
            b->plan = value;
        else if (strcmp(name, "--slot") == 0)
            b->slot = atoi(value);
        else if (strcmp(name, "--slots") == 0)
            b->slot_count = atoi(value);
        else if (strcmp(name, "--ranks") == 0)
            b->rank_count = atoi(value);
        else if (strcmp(name, "--rounds") == 0)
            b->round_count = atoi(value);
        else if (strcmp(name, "--seconds") == 0)
            b->seconds = atof(value);
        else if (strcmp(name, "--ops") == 0)
            b->ops = value;
        else if (strcmp(name, "--from") == 0)
            b->from_bytes = (size_t)strtoull(value, NULL, 10);
        else if (strcmp(name, "--to") == 0)
            b->to_bytes = (size_t)strtoull(value, NULL, 10);
        else if (strcmp(name, "--huge") == 0)
            b->huge = atoi(value);
        else
            bench_die(b, "unknown argument; bench/run.sh starts this program");
    }
    if (b->rank_count < 1 || b->rank_count > BENCH_MAX_RANKS || b->slot < 0 || b->slot >= b->slot_count
        || b->slot_count > BENCH_MAX_SLOTS) {
        bench_die(b, "ranks or slots out of range; bench/run.sh starts this program");
    }
    bench_make_plan(b);
    bench_find_cpus(b);
}

/* Pins this rank to its core and maps the file of the run. Called on every rank. */
static void bench_join(bench *b, int rank) {
    b->rank = rank;
    bench_pin(b);
    if (!b->share_path) bench_die(b, "no --share; bench/run.sh starts this program");
    int file = open(b->share_path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(bench_share)) != 0) bench_die(b, "the shared file cannot be made");
    b->share = (bench_share *)mmap(NULL, sizeof(bench_share), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (b->share == (bench_share *)MAP_FAILED) bench_die(b, "the shared file cannot be mapped");
    b->region = &b->share->region[b->slot];
    if (rank != 0) return;
    b->samples = (double *)malloc(BENCH_MAX_SAMPLES * sizeof(double));
    b->out = b->out_path ? fopen(b->out_path, "a") : stdout;
    if (!b->samples || !b->out) bench_die(b, "no memory, or the output file cannot be written");
}

static float *bench_private(bench *b, size_t bytes) {
    const size_t page = (size_t)2 << 20;
    char *memory = (char *)mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                                0);
    if (memory == (char *)MAP_FAILED) bench_die(b, "no memory");
    if (b->huge) {
        memory += (page - (uintptr_t)memory % page) % page;
        madvise(memory, bytes, MADV_HUGEPAGE);
    } else {
        memory += 64; /* as from malloc: no buffer starts on a page */
    }
    return (float *)memory;
}

//== checking

static float bench_value(int rank, size_t i) { return (float)((i * 7 + (size_t)rank * 13) & 255); }

static void bench_fill(float *data, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) data[i] = bench_value(rank, i);
}

static float bench_sum(const bench *b, size_t i) {
    float sum = 0;
    for (int r = 0; r < b->rank_count; r++) sum += bench_value(r, i);
    return sum;
}

/* 0 if every element is right after one call on the numbers of bench_fill. */
static int bench_wrong(const bench *b, const bench_driver *d, const bench_cell *cell, int kind) {
    const float *data = d->data[kind], *out = d->out[kind];
    size_t count = cell->bytes / sizeof(float), block = count / (size_t)b->rank_count, wrong = 0;
    switch (cell->op) {
    case BENCH_ALL_REDUCE:
        for (size_t i = 0; i < count; i++) wrong += data[i] != bench_sum(b, i);
        break;
    case BENCH_REDUCE_SCATTER_IN_PLACE:
        out = data + (d->in_place_at_start ? 0 : (size_t)b->rank * block);
        /* fall through */
    case BENCH_REDUCE_SCATTER:
        for (size_t i = 0; i < block; i++) wrong += out[i] != bench_sum(b, (size_t)b->rank * block + i);
        break;
    case BENCH_ALL_GATHER:
        for (size_t i = 0; i < block * (size_t)b->rank_count; i++)
            wrong += data[i] != bench_value((int)(i / block), i);
        break;
    case BENCH_BROADCAST:
    case BENCH_SEND_RECV:
        for (size_t i = 0; i < count; i++) wrong += data[i] != bench_value(0, i);
        break;
    default: break;
    }
    return wrong != 0;
}

//== one block

/* Stores every element from this rank, as a backward pass would. */
static void bench_rewrite(float *data, size_t bytes, int rank, int turn) {
    size_t count = bytes / sizeof(float);
    float base = (float)(rank + 1) * 0.125f + (float)(turn & 7);
    for (size_t i = 0; i < count; i++) data[i] = base + (float)(int)(i & 15) * 0.0625f;
}

/* Number of preemptions of this thread: shows how busy the machine is. */
static long bench_preemptions(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
}

static int bench_samples(bench *b, bench_driver *d, const bench_cell *cell, int kind) {
    int calls = cell->bytes <= BENCH_SMALL_BYTES ? 100 : 1, count = 0;
    int warm_ups = cell->bytes <= BENCH_SMALL_BYTES ? 5 : 1;
    double limit_s = bench_now() + cell->budget_s;
    if (b->rank == 0) b->region->stop.value = 0;
    for (int turn = 0;; turn++) {
        bench_rewrite(d->data[kind], cell->bytes, b->rank, turn);
        bench_barrier(b);
        double start_s = bench_now();
        if (d->run(d->user, cell, kind, calls) != 0) bench_die(b, "the operation failed");
        b->region->rank[b->rank].elapsed_s = (bench_now() - start_s) / calls;
        bench_barrier(b);
        if (b->rank == 0) {
            double slowest = 0;
            for (int r = 0; r < b->rank_count; r++) {
                double elapsed_s = b->region->rank[r].elapsed_s;
                slowest = elapsed_s > slowest ? elapsed_s : slowest;
            }
            if (turn >= warm_ups) b->samples[count++] = slowest;
            b->region->stop.value = count == BENCH_MAX_SAMPLES || (count >= 3 && bench_now() > limit_s);
        }
        bench_barrier(b);
        if (b->region->stop.value) return count;
    }
}

static void bench_block(bench *b, bench_driver *d, const bench_cell *cell, int kind, int round) {
    double before_ns = bench_ping_ns(b);
    long preempted = bench_preemptions();
    bench_fill(d->data[kind], cell->bytes / sizeof(float), b->rank);
    bench_barrier(b);
    if (d->run(d->user, cell, kind, 1) != 0) bench_die(b, "the operation failed");
    if (bench_wrong(b, d, cell, kind)) {
        char text[128];
        snprintf(text, sizeof text, "WRONG RESULT of %s at %zu bytes", bench_op_name[cell->op], cell->bytes);
        bench_die(b, text);
    }
    bench_barrier(b);
    int count = bench_samples(b, d, cell, kind);
    b->region->rank[b->rank].preempted = bench_preemptions() - preempted;
    double after_ns = bench_ping_ns(b);
    if (b->rank != 0) return;
    preempted = 0;
    for (int r = 0; r < b->rank_count; r++) preempted += b->region->rank[r].preempted;
    const char *before = before_ns < BENCH_FAR_NS ? "near" : "far",
               *after = after_ns < BENCH_FAR_NS ? "near" : "far";
    qsort(b->samples, (size_t)count, sizeof(double), bench_by_value);
    double middle = count % 2 ? b->samples[count / 2]
                              : .5 * (b->samples[count / 2 - 1] + b->samples[count / 2]);
    fprintf(b->out, "%s,%s,%s,%s,%d,%zu,%d,%.3f,%s,%.1f,%.1f,%.4f,%.4f,%.4f,%d,%ld\n", b->system, b->setting,
            bench_op_name[cell->op], kind ? "group" : "private", b->rank_count, cell->bytes, round,
            bench_now(), strcmp(before, after) ? "mixed" : before, before_ns, after_ns, middle * 1e6,
            b->samples[count / 10] * 1e6, b->samples[count - 1 - count / 10] * 1e6, count, preempted);
    fflush(b->out);
}

/* Ends the run if the time is used up or one more round would not fit. Called on every rank of the program
   that opens a step. */
static void bench_check_time(bench *b, int round, int opens_round) {
    if (b->rank == 0) {
        double used_s = bench_now() - b->start_s, more_s = opens_round && round > 0 ? used_s / round : 0;
        if (used_s + more_s > b->seconds) __atomic_store_n(&b->share->end.value, 1, __ATOMIC_RELEASE);
    }
    bench_barrier(b);
}

/* Runs all cells of the plan. The order of turns is the same in all programs: round by round, cell by cell,
   slots forward in even steps and backward in odd ones. */
static void bench_run(bench *b, bench_driver *d) {
    uint64_t turn = 1;
    bench_barrier(b);
    if (b->rank == 0) {
        double limit_s = bench_now() + BENCH_DEAD_S;
        __atomic_fetch_add(&b->share->ready.value, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&b->share->ready.value, __ATOMIC_SEQ_CST) < (uint64_t)b->slot_count) {
            if (bench_now() > limit_s || b->share->failed.value)
                bench_die(b, "the other programs of this run did not start");
            usleep(20000);
        }
        if (b->slot == 0) bench_give_turn(b, 0, turn);
    }
    b->start_s = bench_now();
    for (int round = 0; round < b->round_count; round++) {
        for (int c = 0; c < b->cell_count; c++) {
            for (int place = 0; place < b->slot_count; place++, turn++) {
                /* The last slot of one step is the first one of the next. */
                int step = round * b->cell_count + c, next_step = place + 1 < b->slot_count ? step : step + 1;
                int next_place = place + 1 < b->slot_count ? place + 1 : 0;
                int slot = step % 2 ? b->slot_count - 1 - place : place;
                int next = next_step % 2 ? b->slot_count - 1 - next_place : next_place;
                if (slot != b->slot) continue;
                bench_wait_turn(b, turn);
                if (place == 0) bench_check_time(b, round, c == 0);
                if (__atomic_load_n(&b->share->end.value, __ATOMIC_ACQUIRE)) {
                    if (b->rank == 0 && place + 1 < b->slot_count) bench_give_turn(b, next, turn + 1);
                    return;
                }
                for (int k = 0; k < d->kind_count; k++) {
                    int kind = round % 2 ? d->kind_count - 1 - k : k;
                    if (!bench_wanted(b, &b->cell[c])) break;
                    if (d->supports(d->user, &b->cell[c], kind)) bench_block(b, d, &b->cell[c], kind, round);
                }
                bench_barrier(b);
                if (b->rank == 0) bench_give_turn(b, next, turn + 1);
            }
        }
    }
}

#endif /* BENCH_H */

/*  bench_sampler.c - times ddp_sampler at N = 10^8, one rank of 8, and counts its memory.

        cc -O2 -std=gnu11 bench/bench_sampler.c -o bench_sampler -lm -lpthread && ./bench_sampler [samples,
        default 1e8]

    Prints one table. For the same order PyTorch's sampler builds a list of all N integers. At 8 bytes of
    pointer and 32 of integer object each, that is 4 GB at N = 10^8 before the first sample. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "median.h"

#define REPEATS 7

static size_t memory_now, memory_peak;

static void *counted_alloc(size_t size_bytes, void *user) {
    size_t *memory = (size_t *)malloc(size_bytes + 16);
    (void)user;
    if (!memory) return NULL;
    memory[0] = size_bytes;
    memory_now += size_bytes;
    if (memory_now > memory_peak) memory_peak = memory_now;
    return memory + 2;
}

static void counted_free(void *memory, void *user) {
    (void)user;
    memory_now -= ((size_t *)memory)[-2];
    free((size_t *)memory - 2);
}

/* Processor time of this one thread, so that other programs disturb the figures less. Reading it costs about
   0.3 us. Parts that take less than that use the wall clock. */
static clockid_t clock_now = CLOCK_PROCESS_CPUTIME_ID;

static double now_s(void) {
    struct timespec t;
    clock_gettime(clock_now, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void row(const char *order, const char *what, double value, const char *unit, double limit) {
    char target[32] = "";
    if (limit > 0) snprintf(target, sizeof target, "below %g", limit);
    printf("| %-18s | %-44s | %9.3f %-8s | %-10s | %-4s |\n", order, what, value, unit, target,
           limit <= 0      ? ""
           : value < limit ? "yes"
                           : "NO");
    fflush(stdout);
}

/* Seconds from set_epoch to the first sample. Each repetition uses another epoch. */
static double first_sample_s(ddp_sampler *s) {
    double seconds[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        double start = now_s();
        ddp_sampler_set_epoch(s, (uint64_t)i + 1);
        if (ddp_sampler_next(s, NULL) < 0) exit(1);
        seconds[i] = now_s() - start;
    }
    return median(seconds, REPEATS);
}

/* Seconds to iterate over an epoch. *stall_s is the longest time of 4096 successive samples. */
static double walk_s(ddp_sampler *s, int watch, double *stall_s) {
    double start = now_s(), before = start;
    int64_t count = 0, sum = 0, sample;
    ddp_sampler_set_epoch(s, 0);
    *stall_s = 0;
    while ((sample = ddp_sampler_next(s, NULL)) >= 0) {
        sum += sample;
        count++;
        if (watch && count % 4096 == 0) {
            double now = now_s();
            if (now - before > *stall_s) *stall_s = now - before;
            before = now;
        }
    }
    start = now_s() - start;
    if (count != ddp_sampler_length(s) || sum <= 0) exit(1);
    return start;
}

/* Seconds from a seek to any position in the epoch until the sample there. */
static double seek_s(ddp_sampler *s) {
    double seconds[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        int64_t to = (int64_t)((double)ddp_sampler_length(s) * ((i * 3) % REPEATS + 0.5) / REPEATS);
        double start = now_s();
        if (ddp_sampler_seek(s, to) != DDP_OK || ddp_sampler_next(s, NULL) < 0) exit(1);
        seconds[i] = now_s() - start;
    }
    return median(seconds, REPEATS);
}

static void measure(const char *name, ddp_sampler_desc desc) {
    ddp_sampler s;
    int torch = !desc.no_shuffle && desc.shuffle != DDP_SHUFFLE_HASHED;
    double stall, seconds;
    memory_peak = 0;
    if (ddp_sampler_init(&s, &desc) != DDP_OK) {
        fprintf(stderr, "bench_sampler: %s\n", ddp_last_error());
        exit(1);
    }
    if (torch) {
        row(name, "first sample after set_epoch", first_sample_s(&s) * 1e3, "ms", 1);
        row(name, "one rank of 8 iterates over an epoch", walk_s(&s, 1, &stall), "s", 30);
        row(name, "longest time of 4096 samples in it", stall, "s", 0);
        row(name, "sampler's memory", (double)memory_peak * 1e-6, "MB", 64);
        row(name, "seek to any position", seek_s(&s), "s", 0);
    } else {
        clock_now = CLOCK_MONOTONIC;
        row(name, "first sample after set_epoch", first_sample_s(&s) * 1e6, "us", 1);
        row(name, "seek to any position", seek_s(&s) * 1e6, "us", 1);
        clock_now = CLOCK_PROCESS_CPUTIME_ID;
        seconds = walk_s(&s, 0, &stall);
        row(name, "one sample", seconds * 1e9 / (double)ddp_sampler_length(&s), "ns",
            desc.no_shuffle ? 0 : 20);
        row(name, "sampler's memory without its struct", (double)memory_peak, "bytes", 0);
    }
    ddp_sampler_free(&s);
}

int main(int argc, char **argv) {
    ddp_sampler_desc desc = DDP_ZERO;
    desc.dataset_size = argc > 1 ? (int64_t)strtod(argv[1], NULL) : INT64_C(100000000);
    desc.num_replicas = 8;
    desc.rank = 5;
    desc.alloc_fn = counted_alloc;
    desc.free_fn = counted_free;
    printf("ddp_sampler, N = %lld, rank 5 of 8, processor time, medians of %d\n\n",
           (long long)desc.dataset_size, REPEATS);
    printf("| order              | what                                         | measured           | "
           "target     | met  |\n");
    printf("|--------------------|----------------------------------------------|--------------------|-------"
           "-----|------|\n");
    measure("TORCH", desc);
    desc.window = 65536;
    if (desc.dataset_size <= INT64_C(10000000)) measure("TORCH, window 65536", desc);
    desc.window = 0;
    desc.shuffle = DDP_SHUFFLE_HASHED;
    measure("HASHED", desc);
    desc.no_shuffle = 1;
    measure("no_shuffle", desc);
    return 0;
}

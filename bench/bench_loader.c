/*  bench_loader.c - ddp_loader: small samples per second on one core, and how long a step waits for slow
    fetches.

        cc -O3 -march=native -std=gnu11 bench/bench_loader.c -o bench_loader -lpthread -lm
        ./bench_loader [seconds per row, default 1]

    First table: samples of 784 bytes and a label, copied from 60000 in memory, in PyTorch's shuffled order.
    Worker and consumer share one core. The rate is per second of processor time of both, so it includes all
    work of the loader, and other programs disturb it less. In the first row the same fetches run in a plain
    loop over a sampler.

    Second table: fetches and computation are timed waits, which need no core, so two cores can run 8 workers.
    The fetches take 80% of the time that the workers have. step is the time from batch to batch, wait the
    part of it inside ddp_loader_next: means of 60 steps after the first 20. In the last rows the workers
    cannot fetch fast enough. bench/peer_loader_torch.py does the same with PyTorch's DataLoader. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#define DDP_IMPLEMENTATION
#include "../ddp.h"

enum { SAMPLES = 60000, PIXELS = 784, FIRST = 20, STEPS = 60, BATCH = 8 };

static unsigned char *images;
static double fetch_s; /* duration of the fetch of one sample */

static void wait_s(double seconds) {
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    while (nanosleep(&t, &t) != 0) {
    }
}

static ddp_result fetch_image(void *user, int64_t index, void *const *fields) {
    (void)user;
    memcpy(fields[0], images + index * PIXELS, PIXELS);
    *(uint8_t *)fields[1] = (uint8_t)(index % 10);
    return DDP_OK;
}

static ddp_result fetch_slowly(void *user, int64_t index, void *const *fields) {
    (void)user;
    wait_s(fetch_s);
    *(uint8_t *)fields[0] = (uint8_t)index;
    return DDP_OK;
}

static int by_value(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

static int failed(const char *what) {
    fprintf(stderr, "bench: %s: %s\n", what, ddp_last_error());
    return 1;
}

static double processor_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Prints one row: a plain loop, or a loader with workers. */
static int small_samples(int plain, int workers, int64_t batch, double seconds) {
    static unsigned char plain_batch[512 * PIXELS], plain_labels[512];
    const ddp_fetch_fn volatile fetch = fetch_image; /* an indirect call, as in the loader */
    ddp_tensor fields[2] = {{NULL, DDP_U8, 2, {28, 28}}, {NULL, DDP_U8, 0, {0}}};
    ddp_loader_desc desc = DDP_ZERO;
    ddp_loader *loader = NULL;
    ddp_sampler sampler;
    ddp_batch b = DDP_ZERO;
    double rates[5];
    desc.sampler.dataset_size = SAMPLES;
    desc.batch_size = batch;
    desc.fields = fields;
    desc.field_count = 2;
    desc.fetch = fetch_image;
    desc.worker_count = workers;
    desc.prefetch = 4;
    if (ddp_sampler_init(&sampler, &desc.sampler) != DDP_OK) return failed("sampler");
    if (!plain && ddp_loader_create(&loader, &desc) != DDP_OK) return failed("create");
    for (int round = -1; round < 5; round++) {
        int64_t samples = 0, index = 0;
        uint64_t epoch = 0;
        double begun = ddp_now(), start = processor_s();
        while (ddp_now() - begun < seconds / 6) {
            if (plain)
                for (b.count = 0; b.count < batch && (index = ddp_sampler_next(&sampler, NULL)) >= 0;
                     b.count++) {
                    void *to[2] = {plain_batch + b.count * PIXELS, plain_labels + b.count};
                    if (fetch(NULL, index, to) != DDP_OK) return failed("fetch");
                }
            else if (ddp_loader_next(loader, &b) != DDP_OK)
                return failed("next");
            if (b.count == 0 && plain)
                ddp_sampler_set_epoch(&sampler, ++epoch);
            else if (b.count == 0)
                ddp_loader_set_epoch(loader, ++epoch);
            samples += b.count;
        }
        if (round >= 0) rates[round] = (double)samples / (processor_s() - start);
    }
    printf("| %s | %lld | %.2f |\n",
           plain         ? "plain loop"
           : workers < 0 ? "none"
                         : "1",
           (long long)batch, median(rates, 5) * 1e-6);
    fflush(stdout);
    ddp_loader_destroy(loader);
    ddp_sampler_free(&sampler);
    return 0;
}

static int slow_samples(int workers, double compute_s, double share) {
    ddp_tensor field = {NULL, DDP_U8, 0, {0}};
    ddp_loader_desc desc = DDP_ZERO;
    ddp_loader *loader;
    ddp_batch b;
    double begun = 0, waits = 0;
    fetch_s = compute_s * workers * share / BATCH;
    desc.sampler.dataset_size = (FIRST + STEPS) * BATCH;
    desc.batch_size = BATCH;
    desc.fields = &field;
    desc.field_count = 1;
    desc.fetch = fetch_slowly;
    desc.worker_count = workers;
    if (ddp_loader_create(&loader, &desc) != DDP_OK) return failed("create");
    for (int i = -FIRST; i < STEPS; i++) {
        double before = ddp_now();
        if (i == 0) begun = before;
        if (ddp_loader_next(loader, &b) != DDP_OK) return failed("next");
        if (i >= 0) waits += ddp_now() - before;
        wait_s(compute_s);
    }
    begun = ddp_now() - begun;
    ddp_loader_destroy(loader);
    printf("| %d | %.1f | %.1f | %.0f%% | %.2f | %.3f |\n", workers, compute_s * 1e3, fetch_s * BATCH * 1e3,
           100 * share, begun / STEPS * 1e3, waits / STEPS * 1e3);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv) {
    static const int64_t batches[] = {1, 8, 64, 512};
    double seconds = argc > 1 ? atof(argv[1]) : 1;
    cpu_set_t one, all;
    images = (unsigned char *)malloc((size_t)SAMPLES * PIXELS);
    if (!images || seconds <= 0) {
        fprintf(stderr, "bench: seconds per row must be above 0\n");
        return 1;
    }
    memset(images, 7, (size_t)SAMPLES * PIXELS);
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    printf("| ddp_loader: workers | samples per batch | million samples/s on one core |\n|---|---|---|\n");
    if (small_samples(1, 0, 512, seconds)) return 1;
    for (int workers = -1; workers <= 1; workers += 2)
        for (int k = 0; k < 4; k++)
            if (small_samples(0, workers, batches[k], seconds)) return 1;
    sched_setaffinity(0, sizeof all, &all);
    printf("\n| ddp_loader: workers | compute, ms | one worker fetches a batch, ms | of compute x workers | "
           "step, ms | wait, ms |\n|---|---|---|---|---|---|\n");
    for (int workers = 1; workers <= 8; workers *= 2)
        if (slow_samples(workers, 0.02, 0.8)) return 1;
    for (int workers = 1; workers <= 4; workers *= 4)
        if (slow_samples(workers, 0.02, 1.5)) return 1;
    free(images);
    return 0;
}

/*  sampler.c - which samples each rank takes: epochs, global batches, resuming on another number of ranks

        cc -O3 -march=native examples/sampler.c -o sampler -lm -lpthread
        ./sampler                 10 samples, 4 ranks
        ./sampler 60000 8         60000 samples, 8 ranks: only the checks

    Samplers do not communicate: every rank creates its own, with the same desc except for rank. So one
    process can show all of them here. Without global_batch the indices are those of PyTorch's
    DistributedSampler for the same seed. The program checks that an epoch has every sample once. A loader
    adds threads that fetch the samples ahead. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PRINTED = 20 }; /* larger data sets are not printed */

/* Counts the remaining samples of a rank in seen, without padding, and prints them. */
static void take(ddp_sampler *sampler, int rank, int64_t samples, int *seen) {
    int is_padding;
    int64_t index;
    if (samples <= PRINTED) printf("   rank %d:", rank);
    while ((index = ddp_sampler_next(sampler, &is_padding)) >= 0) {
        if (!is_padding) seen[index]++;
        if (samples <= PRINTED) printf(is_padding ? " (%d)" : " %d", (int)index);
    }
    if (samples <= PRINTED) printf("\n");
}

static ddp_result check_once(const char *what, const int *seen, int64_t samples) {
    for (int64_t i = 0; i < samples; i++)
        if (seen[i] != 1)
            return ddp_fail(DDP_ERR_CORRUPT, "%s: sample %lld appears %d times, not once", what, (long long)i,
                            seen[i]);
    printf("   every sample once\n");
    return DDP_OK;
}

/* An epoch of all ranks. Numbers in brackets are padding: repeated samples, which give all ranks the same
   length. */
static ddp_result show_epoch(ddp_sampler_desc desc, uint64_t epoch, int *seen) {
    memset(seen, 0, sizeof(int) * (size_t)desc.dataset_size);
    printf("epoch %d, %d ranks, global_batch %d\n", (int)epoch, desc.num_replicas, (int)desc.global_batch);
    for (int r = 0; r < desc.num_replicas; r++) {
        ddp_sampler sampler;
        desc.rank = r;
        DDP_TRY(ddp_sampler_init(&sampler, &desc));
        ddp_sampler_set_epoch(&sampler, epoch);
        take(&sampler, r, desc.dataset_size, seen);
        ddp_sampler_free(&sampler);
    }
    return check_once("an epoch", seen, desc.dataset_size);
}

/* The ranks train one global batch and save. Half as many ranks load the state and take the rest. */
static ddp_result resume(ddp_sampler_desc desc, int *seen) {
    ddp_sampler_state state;
    ddp_sampler sampler;
    int ranks = desc.num_replicas;
    int fewer = ranks % 2 ? 1 : ranks / 2;
    desc.global_batch = ranks;
    desc.no_pad = 1; /* no sample twice, also in the last batch */
    memset(seen, 0, sizeof(int) * (size_t)desc.dataset_size);
    printf("one global batch of %d on %d ranks, the rest on %d\n", ranks, ranks, fewer);
    for (int r = 0; r < ranks; r++) {
        desc.rank = r;
        DDP_TRY(ddp_sampler_init(&sampler, &desc));
        if (ddp_sampler_length(&sampler) > 0) seen[ddp_sampler_next(&sampler, NULL)]++;
        DDP_TRY(ddp_sampler_save(&sampler, &state)); /* the same state on every rank: keep any */
        ddp_sampler_free(&sampler);
    }
    desc.num_replicas = fewer;
    for (int r = 0; r < fewer; r++) {
        desc.rank = r;
        DDP_TRY(ddp_sampler_init(&sampler, &desc));
        DDP_TRY(ddp_sampler_load(&sampler, &state));
        take(&sampler, r, desc.dataset_size, seen);
        ddp_sampler_free(&sampler);
    }
    return check_once("a resumed epoch", seen, desc.dataset_size);
}

/* Called by the loader's threads. A sample is its own number here. */
static ddp_result fetch(void *user, int64_t index, void *const *fields) {
    (void)user;
    memcpy(fields[0], &index, sizeof index);
    return DDP_OK;
}

/* The second batch of a loader has the samples to which a sampler can seek. */
static ddp_result load_batches(ddp_sampler_desc desc) {
    enum { BATCH = 2 };
    const ddp_tensor field = {.dtype = DDP_I64};
    ddp_loader_desc loading = {
        .sampler = desc, .batch_size = BATCH, .fields = &field, .field_count = 1, .fetch = fetch};
    ddp_loader *loader;
    ddp_batch batch;
    ddp_loader_stats stats;
    ddp_sampler sampler;
    DDP_TRY(ddp_sampler_init(&sampler, &desc));
    DDP_TRY(ddp_loader_create(&loader, &loading));
    if (ddp_loader_length(loader) > 1) {
        DDP_TRY(ddp_loader_seek(loader, 1));
        DDP_TRY(ddp_sampler_seek(&sampler, BATCH));
    }
    for (int64_t left = ddp_loader_length(loader); left > 0; left--) {
        DDP_TRY(ddp_loader_next(loader, &batch));
        const int64_t *values = (const int64_t *)batch.fields[0].data; /* (count) */
        for (int64_t i = 0; i < batch.count; i++)
            if (values[i] != ddp_sampler_next(&sampler, NULL))
                return ddp_fail(DDP_ERR_CORRUPT, "sample %lld of a batch is not that of the sampler",
                                (long long)i);
    }
    DDP_TRY(ddp_loader_get_stats(loader, &stats));
    printf("a loader of rank 0, from its second batch on: %d batches, %d samples\n", (int)stats.batches,
           (int)stats.samples);
    ddp_loader_destroy(loader);
    ddp_sampler_free(&sampler);
    return DDP_OK;
}

static ddp_result run(int64_t samples, int ranks) {
    int *seen = (int *)calloc((size_t)samples, sizeof *seen);
    ddp_sampler_desc desc = {.dataset_size = samples, .num_replicas = ranks, .seed = 0};
    if (!seen) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory to count %lld samples", (long long)samples);
    ddp_result result = show_epoch(desc, 0, seen);
    if (result == DDP_OK) result = show_epoch(desc, 1, seen);
    if (result == DDP_OK) result = resume(desc, seen);
    if (result == DDP_OK) result = load_batches(desc);
    desc.global_batch = 2 * ranks; /* rank r takes the r-th block of each global batch */
    if (result == DDP_OK) result = show_epoch(desc, 0, seen);
    free(seen);
    return result;
}

int main(int argc, char **argv) {
    int samples = argc > 1 ? atoi(argv[1]) : 10;
    int ranks = argc > 2 ? atoi(argv[2]) : 4;
    ddp_result result = DDP_OK;
    if (argc > 3 || samples < 1 || samples > 100000000 || ranks < 1 || ranks > 1024)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [samples [ranks]], at most 1e8 and 1024", argv[0]);
    if (result == DDP_OK) result = run(samples, ranks);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

/*  loader.c - batches that threads fetch ahead: resuming in the middle of an epoch, also on other ranks

        cc -O3 -march=native examples/loader.c -o loader -lm -lpthread
        ./loader

    It needs no ranks: the loaders of different ranks do not communicate, so one process shows them all.
    sampler.c has the order of the samples; train_mlp.c trains with a loader. Three parts:

        seek      three batches, then a new loader continues with the fourth
        load      2 ranks stop in the middle of an epoch, and 4 ranks continue at the saved position
        augment   random numbers that depend on sample and epoch, not on ranks and workers */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <stdio.h>
#include <string.h>

enum { SAMPLES = 100, BATCH = 8 };

/* Called by the loader's threads. A sample is its own number. */
static ddp_result fetch(void *user, int64_t index, void *const *fields) {
    (void)user;
    memcpy(fields[0], &index, sizeof index);
    return DDP_OK;
}

static ddp_result create_loader(ddp_loader **out, int ranks, int rank) {
    const ddp_tensor fields[1] = {{NULL, DDP_I64, 0, {0}}};
    ddp_sampler_desc sampler = {
        .dataset_size = SAMPLES, .num_replicas = ranks, .rank = rank, .no_pad = 1, .global_batch = BATCH};
    ddp_loader_desc desc = {sampler,          BATCH / ranks,  fields,
                            .field_count = 1, .fetch = fetch, .worker_count = 2};
    return ddp_loader_create(out, &desc);
}

/* Reads `batches` batches, or all if it is -1, and counts how often each sample occurs. */
static ddp_result read_batches(ddp_loader *loader, int batches, int *seen) {
    for (ddp_batch batch; batches != 0; batches--) {
        DDP_TRY(ddp_loader_next(loader, &batch));
        if (batch.count == 0) return DDP_OK;
        for (int64_t i = 0; i < batch.count; i++) {
            int64_t sample = ((const int64_t *)batch.fields[0].data)[i];
            if (sample != batch.indices[i])
                return ddp_fail(DDP_ERR_CORRUPT, "sample %d is %d", (int)batch.indices[i], (int)sample);
            seen[sample]++;
        }
    }
    return DDP_OK;
}

static ddp_result check_seen(const int *seen, const char *part) {
    for (int i = 0; i < SAMPLES; i++)
        if (seen[i] != 1) return ddp_fail(DDP_ERR_CORRUPT, "%s: sample %d occurs %d times", part, i, seen[i]);
    return DDP_OK;
}

/* Three batches; then a new loader continues with the fourth. */
static ddp_result resume_at_batch(void) {
    int seen[SAMPLES] = {0};
    for (int part = 0; part < 2; part++) {
        ddp_loader *loader;
        ddp_loader_stats stats;
        DDP_TRY(create_loader(&loader, 1, 0));
        ddp_result result = part ? ddp_loader_seek(loader, 3) : DDP_OK;
        if (result == DDP_OK) result = read_batches(loader, part ? -1 : 3, seen);
        if (result == DDP_OK) result = ddp_loader_get_stats(loader, &stats);
        ddp_loader_destroy(loader);
        if (result != DDP_OK) return result;
        printf("part %d: %d batches, %d samples, %.1f ms waited\n", part, (int)stats.batches,
               (int)stats.samples, 1000 * stats.wait_seconds);
    }
    return check_seen(seen, "seek");
}

/* Every rank stores the same position, so one of them is enough. */
static ddp_result change_ranks(void) {
    int seen[SAMPLES] = {0};
    ddp_sampler_state state;
    for (int part = 0; part < 2; part++) {
        int ranks = part ? 4 : 2;
        for (int rank = 0; rank < ranks; rank++) {
            ddp_loader *loader;
            DDP_TRY(create_loader(&loader, ranks, rank));
            ddp_result result = part ? ddp_loader_load(loader, &state) : DDP_OK;
            if (result == DDP_OK) result = read_batches(loader, part ? -1 : 5, seen);
            if (result == DDP_OK && !part) result = ddp_loader_save(loader, &state);
            ddp_loader_destroy(loader);
            if (result != DDP_OK) return result;
        }
    }
    DDP_TRY(check_seen(seen, "load"));
    printf("2 ranks read 5 batches, 4 ranks the rest: every sample once\n");
    return DDP_OK;
}

/* Called by the loader's threads. A sample is random: the number of pixels by which an image is shifted. */
static ddp_result fetch_shift(void *user, int64_t index, uint64_t epoch, void *const *fields) {
    enum { SEED = 1, SHIFT_STREAM = 0 };
    int64_t shift = (int64_t)(ddp_seed(SEED, epoch, index, SHIFT_STREAM) % 9) - 4;
    (void)user;
    memcpy(fields[0], &shift, sizeof shift);
    return DDP_OK;
}

/* The shifts of two epochs, on 1 and on 4 ranks. */
static ddp_result augment(void) {
    int64_t shift[2][SAMPLES], changed = 0;
    for (int ranks = 1; ranks <= 4; ranks += 3)
        for (int rank = 0; rank < ranks; rank++) {
            const ddp_tensor fields[1] = {{NULL, DDP_I64, 0, {0}}};
            ddp_sampler_desc sampler = {
                .dataset_size = SAMPLES, .num_replicas = ranks, .rank = rank, .no_pad = 1};
            ddp_loader_desc desc = {
                sampler, BATCH, fields, .field_count = 1, .worker_count = 2, .fetch_epoch = fetch_shift};
            ddp_loader *loader;
            ddp_batch batch;
            ddp_result result = ddp_loader_create(&loader, &desc);
            for (uint64_t epoch = 0; epoch < 2 && result == DDP_OK; epoch++) {
                result = ddp_loader_set_epoch(loader, epoch);
                if (result == DDP_OK) result = ddp_loader_next(loader, &batch);
                for (; result == DDP_OK && batch.count; result = ddp_loader_next(loader, &batch))
                    for (int64_t i = 0; i < batch.count; i++) {
                        int64_t *seen = &shift[epoch][batch.indices[i]];
                        int64_t value = ((const int64_t *)batch.fields[0].data)[i];
                        if (ranks == 1) *seen = value;
                        if (*seen != value) result = ddp_fail(DDP_ERR_CORRUPT, "augment: other numbers");
                    }
            }
            ddp_loader_destroy(loader);
            if (result != DDP_OK) return result;
        }
    for (int i = 0; i < SAMPLES; i++) changed += shift[0][i] != shift[1][i];
    printf("4 ranks shift every sample as 1 rank; %d of %d differ in the next epoch\n", (int)changed,
           SAMPLES);
    return changed > SAMPLES / 2 ? DDP_OK
                                 : ddp_fail(DDP_ERR_CORRUPT, "augment: epochs have the same numbers");
}

int main(int argc, char **argv) {
    ddp_result result = DDP_OK;
    if (argc > 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s, without arguments", argv[0]);
    if (result == DDP_OK) result = resume_at_batch();
    if (result == DDP_OK) result = change_ranks();
    if (result == DDP_OK) result = augment();
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

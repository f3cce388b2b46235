/*  test_shares_fill_slot.c - the shares of a chunk never reach beyond its slot.

    With caches as on AMD a chunk of a large all_reduce filled its slot. Shares are whole cache lines, so that
    for 5 or 7 ranks their total was longer than the slot. If the first chunk was a little shorter than the
    others, the last rank's share overlapped the start of the next slot, and a few elements had wrong sums. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

enum {
    CHUNK = 512 * 1024 /* bytes, of ddp.h */,
    MOST = 5 * CHUNK / 4 /* elements: four chunks and the remainder */,
    PERIOD = 143
};

static int amd(void) { return 1; }

/* Repeats after PERIOD elements. */
static float term(int rank, size_t i) { return (float)((i * 7 + (size_t)rank * 13) % 1001); }

static ddp_result reduce_one(ddp_group *world, float *data, size_t count, ddp_call_kind kind) {
    int rank = ddp_rank(world), root = ddp_world_size(world) - 1;
    float mine[PERIOD], sum[PERIOD] = {0};
    ddp_result result;
    for (size_t i = 0; i < PERIOD; i++) {
        mine[i] = term(rank, i);
        for (int r = 0; r <= root; r++) sum[i] += term(r, i);
    }
    for (size_t i = 0; i < count; i++) data[i] = mine[i % PERIOD];
    if (kind == DDP_CALL_ALL_REDUCE)
        result = ddp_all_reduce(world, data, data, count, DDP_F32, DDP_OP_SUM, NULL);
    else
        result = ddp_reduce(world, data, data, count, DDP_F32, DDP_OP_SUM, root, NULL);
    if (kind == DDP_CALL_REDUCE && rank != root) return result;
    for (size_t i = 0; i < count && result == DDP_OK; i++)
        if (data[i] != sum[i % PERIOD])
            result = ddp_fail(DDP_ERR_CORRUPT, "rank %d: %s of %zu: element %zu is %g and not %g", rank,
                              ddp_call_name(kind), count, i, (double)data[i], (double)sum[i % PERIOD]);
    return result;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    float *data = (float *)malloc(MOST * sizeof *data);
    ddp_result result = DDP_OK;
    (void)user;
    if (!data) return DDP_ERR_NO_MEMORY;
    for (size_t less = 0; less <= 128 && result == DDP_OK; less += 8) {
        result = reduce_one(world, data, MOST - less, DDP_CALL_ALL_REDUCE);
        if (result == DDP_OK && less % 32 == 0)
            result = reduce_one(world, data, MOST - less, DDP_CALL_REDUCE);
    }
    free(data);
    return result;
}

int main(void) {
    static const int sizes[] = {3, 5, 7};
    int failures = 0;
    watchdog_start(100);
    inner.is_amd = amd;
    for (int i = 0; i < 3; i++) {
        if (ranks_run(RANKS_PROCESSES, sizes[i], 60000, rank_main, NULL) == DDP_OK) continue;
        fprintf(stderr, "FAIL %d ranks: %s\n", sizes[i], ddp_last_error());
        failures++;
    }
    if (!failures) printf("ok\n");
    return failures != 0;
}

/*  test_vendors_differ.c - ranks that detect different CPU vendors divide their data in the same way.

    Each rank queried the vendor of its CPU, which determined the size of its chunks. A rank under an emulator
    that reports another vendor (valgrind can) divided an all_reduce of private memory differently than its
    peers: wrong sums, or a wait for rounds that never came. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

static uint32_t *asked;
/* Neighbours get different answers. */
static int next_vendor(void) { return (int)(__atomic_fetch_add(asked, 1, __ATOMIC_SEQ_CST) & 1); }

enum { COUNT = 300000 };

static ddp_result rank_main(ddp_group *world, void *user) {
    int rank = ddp_rank(world), size = ddp_world_size(world);
    float *data = (float *)malloc(COUNT * sizeof *data);
    ddp_result result;
    (void)user;
    if (!data) return DDP_ERR_NO_MEMORY;
    for (int i = 0; i < COUNT; i++) data[i] = (float)(i % 1000 + rank);
    result = ddp_all_reduce(world, data, data, COUNT, DDP_F32, DDP_OP_SUM, NULL);
    for (int i = 0; i < COUNT && result == DDP_OK; i++)
        if (data[i] != (float)(size * (i % 1000) + size * (size - 1) / 2))
            result = ddp_fail(DDP_ERR_CORRUPT, "rank %d: element %d is %g", rank, i, (double)data[i]);
    free(data);
    return result;
}

int main(void) {
    int failures = 0;
    watchdog_start(100);
    asked = (uint32_t *)ranks_shared(sizeof *asked);
    inner.is_amd = next_vendor;
    for (int size = 2; size <= 4; size++) {
        if (ranks_run(RANKS_PROCESSES, size, 60000, rank_main, NULL) == DDP_OK) continue;
        fprintf(stderr, "FAIL %d ranks: %s\n", size, ddp_last_error());
        failures++;
    }
    if (!failures) printf("ok\n");
    return failures != 0;
}

/*  test_empty_units.c - FSDP trains a model without elements on ranks that cannot read each other's memory.

    ddp_fsdp_create looks at a block of each unit to see whether ranks can read each other's memory. A unit
    without elements had no block. If no unit had one, the answer was yes on every group, and on such a group
    ddp_fsdp_reduce_grads used addresses that were NULL. */
#include "../../ddp_fsdp.h"
#include "../support/ranks.h"
#include "../support/relay.h"

static ddp_result train(ddp_group *world, void *user) {
    ddp_fsdp_strategy strategy = *(ddp_fsdp_strategy *)user;
    ddp_fsdp_param param;
    ddp_fsdp_unit_desc unit = {"empty", &param, 1};
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_group *group;
    ddp_fsdp *fsdp;
    float value = 0;
    memset(&param, 0, sizeof param);
    param.param.name = "w";
    param.param.value.data = &value;
    param.param.value.dtype = DDP_F32;
    param.param.value.ndim = 2;
    param.param.value.shape[1] = 4; /* rows: 0 */
    desc.units = &unit;
    desc.unit_count = 1;
    desc.strategy = strategy;
    RANKS_OK(world, relay_over(&group, world));
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &desc));
    for (int step = 0; step < 2; step++) {
        RANKS_OK(group, ddp_fsdp_unshard(fsdp, 0));
        RANKS_OK(group, ddp_fsdp_reduce_grads(fsdp, 0));
        RANKS_OK(group, ddp_fsdp_reshard(fsdp, 0));
        RANKS_OK(group, ddp_fsdp_step(fsdp, 0.1f));
    }
    ddp_fsdp_destroy(fsdp);
    ddp_group_destroy(group);
    return DDP_OK;
}

int main(void) {
    watchdog_start(60);
    for (int s = 0; s <= DDP_FSDP_NO_SHARD; s++) {
        ddp_fsdp_strategy strategy = (ddp_fsdp_strategy)s;
        if (ranks_run(RANKS_THREADS, 2, 10000, train, &strategy) != DDP_OK) {
            fprintf(stderr, "FAIL: strategy %d: %s\n", s, ddp_last_error());
            return 1;
        }
    }
    printf("ok\n");
    return 0;
}

/*  test_destroy_keeps_error.c - after a failure on one rank, its cause is still in ddp_last_error at the end.

    Once, the only rank that failed lost the cause when it freed its objects: ddp_reducer_destroy failed as
    well, since the other ranks were in another call, and its line replaced that of the failure. ddp_launch
    then reported "ranks made different calls" instead of the file that could not be written. Destroys now
    leave the line of their thread as it is.

    After a ddp_group_abort, ddp_launch reports the failure of the rank that called it, also if another rank
    returns first. Once, it then reported the lowest rank with an error other than DDP_ERR_POISONED, even if
    that rank failed last. */
#include "../../ddp.h"
#include "../../ddp_fsdp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

static const char own_error[] = "best.npy: no space left on device";

typedef enum object { REDUCER, SPLIT, FSDP, OBJECT_COUNT } object;

static ddp_result run(ddp_group *world, void *user) {
    object what = *(const object *)user;
    static float values[2][1000]; /* of ranks that are threads */
    float *value = values[ddp_rank(world)];
    ddp_group *split = NULL;
    ddp_reducer *reducer = NULL;
    ddp_fsdp *fsdp = NULL;
    ddp_fsdp_param sharded = DDP_ZERO;
    ddp_param *param = &sharded.param;
    ddp_result result;
    param->name = "w";
    param->value.data = value;
    param->value.dtype = DDP_F32;
    param->value.ndim = 1;
    param->value.shape[0] = 1000;
    if (what == REDUCER) {
        ddp_reducer_desc desc = DDP_ZERO;
        desc.params = param;
        desc.param_count = 1;
        RANKS_OK(world, ddp_reducer_create(&reducer, world, &desc));
    } else if (what == SPLIT) {
        RANKS_OK(world, ddp_group_split(world, 0, 0, &split));
    } else {
        ddp_fsdp_unit_desc unit = {NULL, &sharded, 1};
        ddp_fsdp_desc desc = DDP_ZERO;
        desc.units = &unit;
        desc.unit_count = 1;
        RANKS_OK(world, ddp_fsdp_create(&fsdp, world, &desc));
    }
    if (ddp_rank(world) == 0)
        result = ddp_fail(DDP_ERR_SYSTEM, "%s", own_error);
    else
        result = ddp_barrier(split ? split : world);
    ddp_reducer_destroy(reducer);
    ddp_fsdp_destroy(fsdp);
    ddp_group_destroy(split);
    if (ddp_rank(world) == 0 && strcmp(ddp_last_error(), own_error) != 0) {
        printf("object %d: the destroy has changed the line to: %s\n", (int)what, ddp_last_error());
        return DDP_ERR_CORRUPT;
    }
    return result;
}

/* Rank 1 fails, and aborts the group. Rank 2, which waits for it, fails first. Rank 0 fails last. */
static ddp_result abort_one(ddp_group *world, void *user) {
    (void)user;
    if (ddp_rank(world) == 2) return ddp_barrier(world);
    if (ddp_rank(world) == 0) {
        ranks_sleep_us(600000);
        return ddp_fail(DDP_ERR_TIMEOUT, "a consequence");
    }
    ddp_result result = ddp_fail(DDP_ERR_SYSTEM, "%s", own_error);
    RANKS_OK(world, ddp_group_abort(world));
    ranks_sleep_us(100000); /* rank 2 fails first */
    return result;
}

int main(void) {
    faults_start(60);
    for (int processes = 0; processes < 2; processes++)
        for (int what = 0; what < OBJECT_COUNT; what++) {
            object which = (object)what;
            ddp_launch_desc desc = DDP_ZERO;
            faults_begin(processes ? "processes" : "threads");
            desc.world_size = 2;
            desc.mode = processes ? DDP_LAUNCH_PROCESSES : DDP_LAUNCH_THREADS;
            desc.group.timeout_ms = 2000 * DDP_TEST_SLOWDOWN;
            desc.no_affinity = 1;
            ddp_result result = ddp_launch(&desc, run, &which);
            EXPECT(result != DDP_OK && result != DDP_ERR_CORRUPT, "object %d: %s", what, ddp_last_error());
            if (what) continue;
            desc.world_size = 3;
            EXPECT(ddp_launch(&desc, abort_one, NULL) == DDP_ERR_SYSTEM && says(ddp_last_error(), own_error),
                   "an abort hides the cause: %s", ddp_last_error());
        }
    return faults_end();
}

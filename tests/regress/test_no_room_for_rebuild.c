/*  test_no_room_for_rebuild.c - a reducer without room for the packed gradients of its buckets fails in every
    later step.

    After the first step buckets follow the ready order, which can need a larger packed bucket. When shared
    memory was exhausted, that step failed as it should, but the next one packed gradients into a freed
    buffer.

    test_no_room_for_rebuild [processes|threads] */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { BIG = 6000, SMALL = 1000 }; /* few enough to be packed */

/* In the order of definition backwards, c and b fill the first bucket; in the order of readiness, b and a do:
   more bytes to pack. */
static ddp_result rank_main(ddp_group *world, void *user) {
    static const size_t counts[3] = {BIG, SMALL, SMALL};
    static const int ready_order[3] = {1, 0, 2};
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_reducer *reducer = NULL;
    ddp_param params[3];
    (void)user;
    memset(params, 0, sizeof params);
    for (int i = 0; i < 3; i++) {
        params[i].name = i == 0 ? "a" : i == 1 ? "b" : "c";
        params[i].value.dtype = params[i].grad.dtype = DDP_F32;
        params[i].value.ndim = params[i].grad.ndim = 1;
        params[i].value.shape[0] = params[i].grad.shape[0] = (int64_t)counts[i];
        params[i].value.data = calloc(counts[i], 4);
        params[i].grad.data = calloc(counts[i] + 4096, 4); /* not adjacent to the others */
    }
    desc.params = params;
    desc.param_count = 3;
    desc.first_bucket_bytes = 2 * SMALL * 4;
    RANKS_OK(world, ddp_reducer_create(&reducer, world, &desc));
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 0) inner.exhaust(world);
    RANKS_OK(world, ddp_barrier(world));
    for (int step = 0; step < 3; step++) {
        ddp_result result = DDP_OK;
        for (int i = 0; i < 3 && result == DDP_OK; i++) result = ddp_reducer_ready(reducer, ready_order[i]);
        if (result == DDP_OK) result = ddp_reducer_wait(reducer);
        RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY, "step %d: %s '%s'", step, ddp_result_name(result),
                    ddp_last_error());
    }
    ddp_reducer_destroy(reducer);
    for (int i = 0; i < 3; i++) {
        free(params[i].value.data);
        free(params[i].grad.data);
    }
    return DDP_OK;
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0)
        return fprintf(stderr, "usage: test_no_room_for_rebuild [processes|threads]\n"), 2;
    faults_start(50);
    faults_begin("no room for the rebuilt buckets");
    EXPECT(ranks_run(mode, 2, 20000 * DDP_TEST_SLOWDOWN, rank_main, NULL) == DDP_OK, "%s", ddp_last_error());
    return faults_end();
}

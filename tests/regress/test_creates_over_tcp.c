/*  test_creates_over_tcp.c - a create call that the tcp backend does not support leaves the group usable.

    The create calls start collectives or messages in advance. The tcp backend refuses those on every rank.
    ddp_tp_create with chunks and ddp_pipeline_create then failed the group: each later call returned
    DDP_ERR_POISONED. The error lines named a collective, not the field, and ddp_recv, not the create
    call. */
#include "../../ddp_pipeline.h"
#include "../../ddp_tensor.h"
#include "../support/inner.h"
#include "../support/ranks.h"

static ddp_result no_compute(const ddp_pipeline_call *call, void *user) {
    (void)call, (void)user;
    return DDP_OK;
}

static ddp_result chunks(ddp_group *tcp) {
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp *tp;
    desc.max_rows = 8;
    desc.chunk_count = 2;
    RANKS_CHECK(tcp, ddp_tp_create(&tp, tcp, &desc) == DDP_ERR_UNSUPPORTED && !tp, "%s", ddp_last_error());
    RANKS_OK(tcp, ddp_group_status(tcp));
    RANKS_CHECK(tcp, strstr(ddp_last_error(), "ddp_tp_create group=world: chunk_count=2"), "%s",
                ddp_last_error());
    desc.chunk_count = 1;
    RANKS_OK(tcp, ddp_tp_create(&tp, tcp, &desc));
    ddp_tp_destroy(tp);
    return ddp_barrier(tcp);
}

static ddp_result stages(ddp_group *tcp) {
    ddp_schedule_desc shape = DDP_ZERO;
    ddp_pipeline_stage stage[2];
    ddp_pipeline_desc desc = DDP_ZERO;
    ddp_schedule *schedule;
    ddp_pipeline *pipeline;
    shape.rank_count = ddp_world_size(tcp);
    shape.microbatch_count = 2;
    RANKS_OK(tcp, ddp_schedule_create(&schedule, &shape));
    memset(stage, 0, sizeof stage);
    for (int i = 0; i < 2; i++) stage[i].forward = stage[i].backward = no_compute;
    desc.schedule = schedule;
    desc.stages = stage;
    desc.stage_count = 2;
    desc.boundary.dtype = DDP_F32;
    RANKS_CHECK(tcp, ddp_pipeline_create(&pipeline, tcp, &desc) == DDP_ERR_UNSUPPORTED && !pipeline, "%s",
                ddp_last_error());
    RANKS_OK(tcp, ddp_group_status(tcp));
    RANKS_CHECK(tcp,
                strstr(ddp_last_error(), "ddp_pipeline_create group=world: the tcp backend")
                    && !strstr(ddp_last_error(), "ddp_recv"),
                "%s", ddp_last_error());
    ddp_schedule_destroy(schedule);
    return ddp_barrier(tcp);
}

static ddp_result rank_main(ddp_group *tcp, void *user) {
    (void)user;
    RANKS_RUN(tcp, chunks(tcp));
    RANKS_RUN(tcp, stages(tcp));
    return DDP_OK;
}

int main(void) {
    watchdog_start(50);
    return ranks_run(RANKS_TCP, 2, 30000 * DDP_TEST_SLOWDOWN, rank_main, NULL) != DDP_OK;
}

/*  test_pipeline_lost.c - a rank that dies inside a callback ends the step on all others, with an error that
    names it and the waiting action.

    test_pipeline_lost */
#define DDP_PIPELINE_IMPLEMENTATION
#include "../support/pipeline.h"

enum {
    W = 4,
    TIMEOUT_MS = 600000 /* a rank that waited that long would fail the test, or the watchdog would */
};

typedef struct seen {
    int done, pid;
    ddp_result result;
    char text[512];
} seen;
static seen *all;

static ddp_result lose(ddp_group *world, void *user) {
    pipe_model m;
    ddp_schedule_desc desc = DDP_ZERO;
    ddp_pipeline_desc pipe;
    ddp_pipeline *pipeline;
    ddp_schedule *s;
    seen *mine = &all[ddp_rank(world)];
    const pipe_fault *fault = (const pipe_fault *)user;
    mine->pid = (int)getpid();
    desc.kind = DDP_SCHEDULE_ZB_H1;
    desc.rank_count = W;
    desc.microbatch_count = 2 * W;
    RANKS_OK(world, ddp_schedule_create(&s, &desc));
    pipe_build(&m, W, 1);
    m.fault = *fault;
    pipe_desc(&m, s, &pipe);
    RANKS_OK(world, ddp_pipeline_create(&pipeline, world, &pipe));
    RANKS_OK(world, ddp_pipeline_step(pipeline));
    m.steps++;
    mine->result = ddp_pipeline_step(pipeline);
    snprintf(mine->text, sizeof mine->text, "%s", ddp_last_error());
    mine->done = 1;
    ddp_pipeline_destroy(pipeline);
    ddp_schedule_destroy(s);
    return DDP_OK;
}

int main(void) {
    int failures = 0, actions = 0;
    all = (seen *)ranks_shared(W * sizeof *all);
    watchdog_start(120);
    for (int k = 0; k < 12; k++) {
        pipe_fault fault = {k % W, (5 * k) % (2 * W), 1, 0, (ddp_action_kind)(DDP_ACTION_FORWARD + k % 3), 2};
        char who[40];
        memset(all, 0, W * sizeof *all);
        ranks_run(RANKS_PROCESSES, W, TIMEOUT_MS, lose, &fault);
        snprintf(who, sizeof who, "rank %d (pid %d)", fault.stage, all[fault.stage].pid);
        for (int r = 0; r < W; r++) {
            const seen *s = &all[r];
            if (r == fault.stage && !s->done) continue;
            actions += strstr(s->text, "of micro-batch") != NULL;
            if (r != fault.stage && s->done
                && (s->result == DDP_ERR_PEER_LOST || s->result == DDP_ERR_POISONED) && strstr(s->text, who)
                && strstr(s->text, "ddp_pipeline_step group="))
                continue;
            fprintf(stderr, "FAIL %d: rank %d: done=%d %s: %s\n", k, r, s->done, ddp_result_name(s->result),
                    s->text);
            failures++;
        }
    }
    if (!actions) failures += fprintf(stderr, "FAIL no error names an action\n") > 0;
    printf("%s\n", failures ? "FAIL" : "ok");
    return failures != 0;
}

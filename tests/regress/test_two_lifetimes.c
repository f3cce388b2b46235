/*  test_two_lifetimes.c - reducers and accumulators on one array of parameters, destroyed in any order.

    alone       A reducer is destroyed before the accumulator that hands gradients to it. The accumulator must go
                on without it. It had kept a pointer to the reducer.
    two         Two reducers share the parameters, and the accumulator belongs to the first. The f32 sums of
                16-bit gradients go to the reducer that was created last. The first one had reduced them too, and
                still read them when ddp_accumulator_destroy freed them.
    adjacent    Sums of adjacent gradients are reduced as one range: nothing is packed. */
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#include "../support/ranks.h"

enum { COUNT = 1 << 18 };

typedef struct model { ddp_param params[2]; uint16_t *memory; ddp_accumulator_desc sums; } model;

/* Gradients of both parameters are adjacent in memory. */
static void model_open(model *m, ddp_reducer_desc *desc) {
    memset(m, 0, sizeof *m);
    memset(desc, 0, sizeof *desc);
    m->memory = (uint16_t *)calloc(4 * COUNT, sizeof *m->memory);
    for (int i = 0; i < 2; i++) {
        ddp_tensor value = {m->memory + (size_t)i * COUNT, DDP_BF16, 1, {COUNT}};
        m->params[i].name = i ? "second" : "first";
        m->params[i].value = m->params[i].grad = value;
        m->params[i].grad.data = m->memory + (size_t)(2 + i) * COUNT;
    }
    desc->params = m->sums.params = m->params;
    desc->param_count = m->sums.param_count = 2;
    desc->micro_batch_count = m->sums.micro_batch_count = 2;
}

static ddp_result accumulate(ddp_group *group, ddp_accumulator *accumulator) {
    for (int i = 1; i >= 0; i--) RANKS_OK(group, ddp_accumulator_ready(accumulator, i));
    RANKS_OK(group, ddp_accumulator_next(accumulator, NULL));
    return DDP_OK;
}

static ddp_result alone(ddp_group *group, void *user) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer_stats stats;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    (void)user;
    model_open(&m, &desc);
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    m.sums.reducer = reducer;
    RANKS_OK(group, ddp_accumulator_create(&accumulator, group, &m.sums));
    for (int step = 0; step < 2; step++) {
        for (int b = 0; b < 2; b++) RANKS_OK(group, accumulate(group, accumulator));
        RANKS_OK(group, ddp_reducer_wait(reducer));
    }
    RANKS_OK(group, ddp_reducer_get_stats(reducer, &stats));
    RANKS_CHECK(group, stats.bytes_reduced == 2 * COUNT * sizeof(float), "%zu bytes reduced", stats.bytes_reduced);
    RANKS_CHECK(group, stats.bytes_copied == 2 * COUNT * sizeof(float), "%zu bytes copied: only the averages are cast",
                stats.bytes_copied);
    ddp_reducer_destroy(reducer);
    for (int b = 0; b < 2; b++) RANKS_OK(group, accumulate(group, accumulator));
    ddp_accumulator_destroy(accumulator);
    free(m.memory);
    return DDP_OK;
}

static ddp_result two(ddp_group *group, void *user) {
    model m;
    ddp_reducer_desc desc;
    ddp_reducer *first, *second;
    ddp_accumulator *accumulator;
    (void)user;
    model_open(&m, &desc);
    desc.bucket_cap_bytes = desc.first_bucket_bytes = 1; /* two buckets: one runs while the other waits */
    RANKS_OK(group, ddp_reducer_create(&first, group, &desc));
    RANKS_OK(group, ddp_reducer_create(&second, group, &desc));
    m.sums.reducer = first;
    RANKS_OK(group, ddp_accumulator_create(&accumulator, group, &m.sums));
    RANKS_OK(group, accumulate(group, accumulator));
    if (ddp_rank(group) == 1) usleep(300000);
    RANKS_OK(group, accumulate(group, accumulator));
    ddp_accumulator_destroy(accumulator); /* the other rank has not come yet */
    RANKS_OK(group, ddp_reducer_wait(first));
    ddp_reducer_destroy(second);
    ddp_reducer_destroy(first);
    free(m.memory);
    return DDP_OK;
}

int main(void) {
    int failed = 0;
    watchdog_start(60);
    for (int k = 0; k < 2; k++) {
        if (ranks_run(RANKS_THREADS, 2, 10000, k ? two : alone, NULL) == DDP_OK) continue;
        fprintf(stderr, "FAIL: %s: %s\n", k ? "two" : "alone", ddp_last_error());
        failed = 1;
    }
    if (!failed) printf("ok\n");
    return failed;
}

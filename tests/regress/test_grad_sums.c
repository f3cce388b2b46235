/*  test_grad_sums.c - f32 sums of 16-bit gradients, passed from an accumulator to a reducer.

    alone       A reducer is destroyed before the accumulator that passes gradients to it. The accumulator
                must continue without it. It had kept a pointer to the reducer.
    two         Two reducers share the parameters, and the accumulator belongs to the first. The f32 sums of
                16-bit gradients go to the reducer that was created last. The first one had reduced them too,
                and still read them when ddp_accumulator_destroy freed them. Sums of adjacent gradients are
                reduced as one range: nothing is packed.
    empty       A parameter without elements, of another dtype, is placed between two gradients that the
                reducer reduces as one range. Their sums must be one range too. They were not, and the second
                gradient became a wrong number. */
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#include "../support/ranks.h"

enum { COUNT = 1 << 18 };

typedef struct model {
    ddp_param params[2];
    uint16_t *memory;
    ddp_accumulator_desc sums;
} model;

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
    RANKS_CHECK(group, stats.bytes_reduced == 2 * COUNT * sizeof(float), "%zu bytes reduced",
                stats.bytes_reduced);
    RANKS_CHECK(group, stats.bytes_copied == 2 * COUNT * sizeof(float),
                "%zu bytes copied: only the averages are cast", stats.bytes_copied);
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
    ddp_accumulator_destroy(accumulator); /* the other rank has not arrived yet */
    RANKS_OK(group, ddp_reducer_wait(first));
    ddp_reducer_destroy(second);
    ddp_reducer_destroy(first);
    free(m.memory);
    return DDP_OK;
}

static ddp_result empty(ddp_group *group, void *user) {
    /* 1 and 2 as bf16: the average of equal gradients. */
    static const uint16_t number[3] = {0x3f80, 0, 0x4000};
    static const int64_t counts[3] = {COUNT - 7, 0, COUNT}; /* 7: not a multiple of the alignment */
    ddp_param params[3];
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_accumulator_desc sums = DDP_ZERO;
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    uint16_t *memory = (uint16_t *)calloc(4 * COUNT, sizeof *memory);
    (void)user;
    memset(params, 0, sizeof params);
    for (int i = 0; i < 3; i++) {
        ddp_tensor value = {memory + (size_t)(i / 2) * COUNT, i == 1 ? DDP_F16 : DDP_BF16, 1, {counts[i]}};
        params[i].value = params[i].grad = value;
        /* the empty one is at the start of the last one */
        params[i].grad.data = memory + 2 * COUNT + (i > 0 ? COUNT - 7 : 0);
    }
    desc.params = sums.params = params;
    desc.param_count = sums.param_count = 3;
    desc.micro_batch_count = sums.micro_batch_count = 2;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    sums.reducer = reducer;
    RANKS_OK(group, ddp_accumulator_create(&accumulator, group, &sums));
    for (int b = 0; b < 2; b++) {
        for (int i = 2; i >= 0; i--) {
            for (int64_t e = 0; e < counts[i]; e++) ((uint16_t *)params[i].grad.data)[e] = number[i];
            RANKS_OK(group, ddp_accumulator_ready(accumulator, i));
        }
        RANKS_OK(group, ddp_accumulator_next(accumulator, NULL));
    }
    RANKS_OK(group, ddp_reducer_wait(reducer));
    for (int i = 0; i < 3; i++)
        for (int64_t e = 0; e < counts[i]; e++)
            RANKS_CHECK(group, ((uint16_t *)params[i].grad.data)[e] == number[i],
                        "parameter %d, element %d: %#x", i, (int)e, ((uint16_t *)params[i].grad.data)[e]);
    ddp_accumulator_destroy(accumulator);
    ddp_reducer_destroy(reducer);
    free(memory);
    return DDP_OK;
}

int main(void) {
    static const struct {
        const char *name;
        ddp_rank_fn run;
    } cases[] = {{"alone", alone}, {"two", two}, {"empty", empty}};
    int failed = 0;
    watchdog_start(60);
    for (int k = 0; k < 3; k++) {
        if (ranks_run(RANKS_THREADS, 2, 10000, cases[k].run, NULL) == DDP_OK) continue;
        fprintf(stderr, "FAIL: %s: %s\n", cases[k].name, ddp_last_error());
        failed = 1;
    }
    if (!failed) printf("ok\n");
    return failed;
}

/*  test_bubble_below_zero.c - a bubble rate is a share of the span, from 0 to 1, in spite of rounding.

    A rank that never waits works as long as its span. Its work is a sum of differences of times, and was an
    ulp above the span: the rate was -2e-16. unit.pipeline, which checks the rate with measured costs, failed
    when one of its ranks was not scheduled for a while. */
#include "../../ddp_pipeline.h"

#include <stdio.h>
#include <string.h>

/* Equal costs, except for one stage, which takes up to 100 times as long, so that its rank never waits. */
static int below_zero(const ddp_schedule *s, int rank_count) {
    int count = 0;
    for (int slow = 0; slow < 3 * rank_count; slow++)
        for (int tenths = 1; tenths < 100; tenths++) {
            double seconds[3 * 3];
            ddp_stage_cost costs[3];
            ddp_schedule_report report = DDP_ZERO;
            for (int i = 0; i < 3 * rank_count; i++) seconds[i] = i == slow ? 0.1 * tenths : 0.1;
            memset(costs, 0, sizeof costs);
            for (int i = 0; i < rank_count; i++) {
                costs[i].forward = seconds[3 * i];
                costs[i].input_grad = seconds[3 * i + 1];
                costs[i].weight_grad = seconds[3 * i + 2];
            }
            if (ddp_schedule_simulate(s, costs, &report) != DDP_OK)
                return fprintf(stderr, "%s\n", ddp_last_error());
            if (report.bubble_rate >= 0 && report.bubble_rate < 1) continue;
            if (!count++)
                fprintf(stderr, "%s, %d ranks, cost %d of stage %d is %.1f: bubble rate %g\n",
                        ddp_schedule_kind_name(ddp_schedule_get_kind(s)), rank_count, slow % 3, slow / 3,
                        0.1 * tenths, report.bubble_rate);
        }
    return count;
}

int main(void) {
    static const ddp_schedule_kind kinds[] = {DDP_SCHEDULE_1F1B, DDP_SCHEDULE_GPIPE, DDP_SCHEDULE_ZB_H1,
                                              DDP_SCHEDULE_ZB_H2};
    int failures = 0;
    for (int k = 0; k < 4; k++)
        for (int rank_count = 1; rank_count <= 3; rank_count++) {
            ddp_schedule_desc desc = DDP_ZERO;
            ddp_schedule *s;
            desc.kind = kinds[k];
            desc.rank_count = rank_count;
            desc.microbatch_count = 2 * rank_count;
            if (ddp_schedule_create(&s, &desc) != DDP_OK) return fprintf(stderr, "%s\n", ddp_last_error());
            failures += below_zero(s, rank_count);
            ddp_schedule_destroy(s);
        }
    printf("%s\n", failures ? "FAIL" : "ok");
    return failures != 0;
}

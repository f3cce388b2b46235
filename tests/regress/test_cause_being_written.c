/*  test_cause_being_written.c - a rank that fails while another is still writing down the first cause returns that cause.

    The wait for the writer measured time from the last look at a peer, which was mostly never, so that it ended at once:
    with more ranks than cores some ranks returned "a rank died while reporting a failure" instead. */
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

static void *writer_main(void *argument) {
    ddp__control *control = (ddp__control *)argument;
    ranks_sleep_us(50000);
    control->poison_code = (int32_t)DDP_ERR_MISMATCH;
    snprintf(control->poison_text, sizeof control->poison_text, "the first cause");
    ddp__store(&control->poison, 2u);
    return NULL;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    ddp__control *control = ((ddp__local *)world->state)->control;
    pthread_t writer;
    int data = 0;
    (void)user;
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 1) return note(world, world, ddp_recv(world, &data, 1, DDP_I32, 0, 0, NULL));
    ddp__store(&control->poison, 1u); /* what ddp__local_poison does, slowly */
    if (pthread_create(&writer, NULL, writer_main, control) != 0) return DDP_ERR_SYSTEM;
    note(world, world, ddp_barrier(world));
    pthread_join(writer, NULL);
    return DDP_OK;
}

int main(void) {
    faults_start(20);
    faults_begin("cause");
    launch(RANKS_PROCESSES, 2, 10000, rank_main, NULL);
    for (int r = 0; r < 2; r++) {
        const seen *s = &stage_shared->rank[r];
        EXPECT(s->first == DDP_ERR_MISMATCH && says(s->text, "the first cause"), "rank %d got %s '%s'", r, ddp_result_name(s->first), s->text);
    }
    return faults_end();
}

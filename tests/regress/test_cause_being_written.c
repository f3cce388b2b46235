/*  test_cause_being_written.c - a rank that fails while another one still writes the first cause returns that
    cause.

    The wait for the writer measured time from the last check of a peer, which usually had never happened, so
    it ended at once. With more ranks than cores some ranks returned "a rank died while reporting a failure"
    instead. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#include <pthread.h>

static void *writer_main(void *world) {
    ranks_sleep_us(50000);
    inner.write_cause((ddp_group *)world, DDP_ERR_MISMATCH, "the first cause");
    return NULL;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    pthread_t writer;
    int data = 0;
    (void)user;
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 1) return note(world, world, ddp_recv(world, &data, 1, DDP_I32, 0, 0, NULL));
    inner.write_cause(world, DDP_OK, "");
    if (pthread_create(&writer, NULL, writer_main, world) != 0) return DDP_ERR_SYSTEM;
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
        EXPECT(s->first == DDP_ERR_MISMATCH && says(s->text, "the first cause"), "rank %d got %s '%s'", r,
               ddp_result_name(s->first), s->text);
    }
    return faults_end();
}

/*  test_message_wakes.c - a thread that waits for a message is woken when it completes.

    A rank's thread and its communication thread slept on one word with one flag: the first to wake cleared
    the flag, and the other one kept sleeping. A thread that completed a message for the other one did not
    wake it, nor did a collective wake a communication thread that slept for messages. Sleeps ended after 1 or
    2 ms and hid it. Here they last 10 s: a few full sleeps, and the watchdog ends the test. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { RANKS = 3, AHEAD = 3, COUNT = 4096, ROUNDS = 200, LAST_TAG = 9 };

typedef struct lane {
    int32_t out[AHEAD][COUNT], in[AHEAD][COUNT];
    ddp_work sent[AHEAD], received[AHEAD];
} lane;

/* The middle of a step of 1F1B: messages go both ways along a chain, receives are posted ahead, and some
   waits are longer than the time that a rank spins. */
static ddp_result chain(ddp_group *world, lane lanes[2]) {
    int rank = ddp_rank(world);
    uint32_t random = 12345u * (uint32_t)(rank + 1);
    for (int i = -AHEAD; i < ROUNDS; i++)
        for (int way = 0; way < 2; way++) {
            int peer = way ? rank + 1 : rank - 1, now = i % AHEAD, next = (i + AHEAD) % AHEAD;
            lane *l = &lanes[way];
            if (peer < 0 || peer >= RANKS) continue;
            if (i >= 0) {
                random = random * 1664525u + 1013904223u;
                ranks_sleep_us((int)(random >> 16) % 800);
                RANKS_OK(world, ddp_wait(world, &l->sent[now]));
                for (int k = 0; k < COUNT; k++) l->out[now][k] = i + k;
                RANKS_OK(world, ddp_send(world, l->out[now], COUNT, DDP_I32, peer, way, &l->sent[now]));
                RANKS_OK(world, ddp_wait(world, &l->received[now]));
                RANKS_CHECK(world, l->in[now][0] == i && l->in[now][COUNT - 1] == i + COUNT - 1,
                            "round %d: %d", i, l->in[now][0]);
            }
            if (i + AHEAD < ROUNDS)
                RANKS_OK(world, ddp_recv(world, l->in[next], COUNT, DDP_I32, peer, !way, &l->received[next]));
        }
    for (int way = 0; way < 2; way++)
        for (int k = 0; k < AHEAD; k++) RANKS_OK(world, ddp_wait(world, &lanes[way].sent[k]));
    return DDP_OK;
}

/* A collective on the communication thread only: the caller does not execute it, and it only sleeps. */
static ddp_result reduce_in_background(ddp_group *world) {
    int32_t sum = ddp_rank(world);
    ddp_work work;
    ranks_sleep_us(2000);
    RANKS_OK(world, ddp_all_reduce(world, &sum, &sum, 1, DDP_I32, DDP_OP_SUM, &work));
    for (int done = 0; !done; usleep(200)) RANKS_OK(world, ddp_test(world, &work, &done));
    RANKS_OK(world, ddp_wait(world, &work));
    RANKS_CHECK(world, sum == RANKS * (RANKS - 1) / 2, "sum %d", sum);
    return DDP_OK;
}

static ddp_result beside_a_receive(ddp_group *world) {
    int rank = ddp_rank(world), before = (rank + RANKS - 1) % RANKS, after = (rank + 1) % RANKS;
    for (int i = 0; i < 10; i++) {
        int32_t in = -1;
        ddp_work receive;
        RANKS_OK(world, ddp_recv(world, &in, 1, DDP_I32, before, LAST_TAG, &receive));
        RANKS_OK(world, reduce_in_background(world));
        RANKS_OK(world, ddp_send(world, &rank, 1, DDP_I32, after, LAST_TAG, NULL));
        RANKS_OK(world, ddp_wait(world, &receive));
        RANKS_CHECK(world, in == before, "in %d", in);
        RANKS_OK(world, reduce_in_background(world));
    }
    return DDP_OK;
}

/* A sender sleeps until the receiver takes a large message, or frees a place for a small one. Nothing else
   happens that could wake it. A sender that is not woken sleeps for 10 s. */
static ddp_result send_and_sleep(ddp_group *world) {
    enum { LARGE = 1 << 20, SMALL_MESSAGES = 200 };
    int rank = ddp_rank(world);
    int32_t small = 0;
    double start = ranks_now();
    char *large = (char *)calloc(LARGE, 1);
    RANKS_CHECK(world, large, "no memory");
    for (int i = 0; i < 3; i++) {
        RANKS_OK(world, ddp_barrier(world));
        if (rank == 0) RANKS_OK(world, ddp_send(world, large, LARGE, DDP_U8, 1, LAST_TAG, NULL));
        if (rank == 1) {
            ranks_sleep_us(100000); /* the sender is asleep */
            RANKS_OK(world, ddp_recv(world, large, LARGE, DDP_U8, 0, LAST_TAG, NULL));
            ranks_sleep_us(100000); /* and has no other reason to wake */
        }
    }
    free(large);
    RANKS_OK(world, ddp_barrier(world));
    if (rank == 0)
        for (int i = 0; i < SMALL_MESSAGES; i++)
            RANKS_OK(world, ddp_send(world, &i, 1, DDP_I32, 1, LAST_TAG, NULL));
    for (int i = 0; rank == 1 && i < SMALL_MESSAGES; i++) {
        if (i < 3) ranks_sleep_us(100000);
        RANKS_OK(world, ddp_recv(world, &small, 1, DDP_I32, 0, LAST_TAG, NULL));
    }
    RANKS_CHECK(world, rank > 1 || ranks_now() - start < 9, "a sleep of %.1f s", ranks_now() - start);
    return ddp_barrier(world);
}

/* ddp_group_signal wakes the ranks that sleep until its word grows. A sleeper is awake for a moment every
   2 ms. So one wake in many calls is enough. */
static ddp_result raise_and_wake(ddp_group *world) {
    enum { TIMES = 100 };
    int rank = ddp_rank(world), wakes = 0;
    void *memory;
    RANKS_OK(world, ddp_group_alloc(world, sizeof(uint64_t), &memory));
    for (uint64_t i = 1; i <= TIMES; i++) {
        int before;
        if (rank == 0) ranks_sleep_us(3000); /* the others are asleep */
        before = __atomic_load_n(&inner.wakes, __ATOMIC_SEQ_CST);
        ddp_group_signal(world, (uint64_t *)memory, i);
        wakes += __atomic_load_n(&inner.wakes, __ATOMIC_SEQ_CST) - before;
        RANKS_OK(world, ddp_group_wait_signal(world, (const uint64_t *)memory, i));
        RANKS_OK(world, ddp_barrier(world));
    }
    RANKS_CHECK(world, rank != 0 || wakes > 0, "%d calls of ddp_group_signal woke no rank", TIMES);
    return ddp_group_free(world, memory);
}

/* An abort wakes a rank that sleeps for a message. It would sleep for 10 s otherwise. */
static ddp_result abort_and_wake(ddp_group *world) {
    int32_t in;
    double start;
    ddp_group *child;
    ddp_result result;
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    start = ranks_now();
    if (ddp_rank(world) == 0) {
        ranks_sleep_us(200000);
        RANKS_OK(child, ddp_group_abort(child));
    } else {
        result = ddp_recv(child, &in, 1, DDP_I32, 0, LAST_TAG, NULL);
        RANKS_CHECK(world, result == DDP_ERR_POISONED, "%s", ddp_result_name(result));
        RANKS_CHECK(world, ranks_now() - start < 9, "a sleep of %.1f s", ranks_now() - start);
    }
    RANKS_OK(world, ddp_barrier(world)); /* a destroy wakes sleepers, too */
    ddp_group_destroy(child);
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    lane *lanes = (lane *)calloc(2, sizeof *lanes);
    ddp_result result = lanes ? chain(world, lanes) : DDP_ERR_NO_MEMORY;
    (void)user;
    if (result == DDP_OK) result = beside_a_receive(world);
    if (result == DDP_OK) result = send_and_sleep(world);
    if (result == DDP_OK) result = raise_and_wake(world);
    if (result == DDP_OK) result = abort_and_wake(world);
    free(lanes);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    faults_start(50);
    faults_begin("wakes");
    inner.p2p_slice_ms = 10000;
    desc.world_size = RANKS;
    desc.mode = argc > 1 && strcmp(argv[1], "threads") == 0 ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
    EXPECT(ddp_launch(&desc, rank_main, NULL) == DDP_OK, "%s", ddp_last_error());
    return faults_end();
}

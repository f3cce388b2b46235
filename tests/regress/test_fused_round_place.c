/*  test_fused_round_place.c - rounds in one loop and rounds in three steps use the same places of a slot.

    The large private all_reduce of two ranks fills, adds and drains in one loop from its fourth round on. The
    rounds before and after run step by step. There rank 0 filled its slot for rank 1 after its own place,
    while the loop started at the beginning. If both were used, rank 1's share had wrong sums. The loop is not
    used on AMD, so this test pretends to run on another CPU. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

enum { CHUNK = 512 * 1024 / 4 / sizeof(float) /* a quarter of a chunk of ddp.h */, MOST = 12 * CHUNK + 1 };

static int not_amd(void) { return 0; }

static float term(int rank, size_t i) { return (float)((i * 7 + (size_t)rank * 13) % 1001); }

static ddp_result reduce_one(ddp_group *world, float *send, float *recv, size_t count, ddp_op op) {
    int rank = ddp_rank(world);
    for (size_t i = 0; i < count; i++) recv[i] = -1;
    for (size_t i = 0; i < count; i++) send[i] = term(rank, i);
    RANKS_OK(world, ddp_all_reduce(world, send, recv, count, DDP_F32, op, NULL));
    for (size_t i = 0; i < count; i++) {
        float value = (term(0, i) + term(1, i)) / (op == DDP_OP_AVG ? 2 : 1);
        RANKS_CHECK(world, recv[i] == value, "element %zu of %zu is %g and not %g", i, count, (double)recv[i],
                    (double)value);
        RANKS_CHECK(world, send == recv || send[i] == term(rank, i),
                    "element %zu of %zu was sent and has changed", i, count);
    }
    return DDP_OK;
}

/* Rounds 3 to 13, of which the first is full, nearly full or one element. Each number of rounds uses other
   places of the slots. */
static ddp_result rank_main(ddp_group *world, void *user) {
    float *send = (float *)malloc(MOST * sizeof *send), *recv = (float *)malloc(MOST * sizeof *recv);
    ddp_result result = send && recv ? DDP_OK : DDP_ERR_NO_MEMORY;
    (void)user;
    for (size_t rounds = 3; rounds <= 12; rounds++)
        for (int rest = -1; rest <= 1; rest++) {
            size_t count = (size_t)((int)(rounds * CHUNK) + rest);
            if (result == DDP_OK) result = reduce_one(world, send, recv, count, DDP_OP_SUM);
            if (result == DDP_OK) result = reduce_one(world, recv, recv, count, DDP_OP_AVG);
        }
    free(send);
    free(recv);
    return result;
}

int main(void) {
    watchdog_start(100);
    inner.is_amd = not_amd;
    inner.large_bytes = 65536;
    if (ranks_run(RANKS_PROCESSES, 2, 60000, rank_main, NULL) != DDP_OK) {
        fprintf(stderr, "FAIL: %s\n", ddp_last_error());
        return 1;
    }
    printf("ok\n");
    return 0;
}

/*  test_load_after_mismatch.c - ddp_fsdp_load on two shard groups with one checkpoint group, after the ranks
    of one of them have unsharded units in different orders.

    That shard group finds the mismatch in its own agreement. Its ranks returned at once, and the ranks of the
    other shard group waited in the agreement of the checkpoint group until the timeout. Now all ranks get the
    mismatch. */
#define DDP_FSDP_IMPLEMENTATION
#define DDP_IMPLEMENTATION
#include "../../ddp_fsdp.h"
#include "../support/ranks.h"

enum { UNITS = 2, ROWS = 8 };

static ddp_result train(ddp_group *world, void *user) {
    ddp_fsdp_param params[UNITS];
    ddp_fsdp_unit_desc units[UNITS] = {{"first", &params[0], 1}, {"second", &params[1], 1}};
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_group *shards;
    ddp_fsdp *fsdp;
    float values[UNITS][ROWS] = {{0}};
    int rank = ddp_rank(world);
    (void)user;
    memset(params, 0, sizeof params);
    for (int u = 0; u < UNITS; u++) {
        ddp_tensor value = {values[u], DDP_F32, 1, {ROWS}};
        params[u].param.name = u ? "b" : "a";
        params[u].param.value = value;
        params[u].global_shape[0] = 2 * ROWS; /* each shard group has a half of the tensor */
        params[u].global_offset[0] = rank / 2 * ROWS;
    }
    RANKS_OK(world, ddp_group_split(world, rank / 2, rank, &shards));
    desc.units = units;
    desc.unit_count = UNITS;
    desc.prefetch = -1;
    desc.checkpoint_group = world;
    RANKS_OK(world, ddp_fsdp_create(&fsdp, shards, &desc));
    for (int u = 0; u < UNITS; u++) {
        int unit = rank == 1 ? UNITS - 1 - u : u; /* the other rank of its shard group takes them in order */
        RANKS_OK(world, ddp_fsdp_unshard(fsdp, unit));
        RANKS_OK(world, ddp_fsdp_reshard(fsdp, unit));
    }
    double begin = ddp_now();
    ddp_result result = ddp_fsdp_load(fsdp, "/tmp/no_such_checkpoint");
    RANKS_CHECK(world, result == DDP_ERR_MISMATCH && strstr(ddp_last_error(), "different orders"), "%s: %s",
                ddp_result_name(result), ddp_last_error());
    RANKS_CHECK(world, ddp_now() - begin < 5, "load took %.1f s", ddp_now() - begin);
    ddp_fsdp_destroy(fsdp);
    ddp_group_destroy(shards);
    return DDP_OK;
}

int main(void) {
    watchdog_start(90);
    if (ranks_run(RANKS_THREADS, 4, 20000, train, NULL) != DDP_OK) {
        fprintf(stderr, "FAIL: %s\n", ddp_last_error());
        return 1;
    }
    printf("ok\n");
    return 0;
}

/*  checkpoint_tool.c - writes and reads the checkpoint of support/checkpoints.h on two ranks, for
    checkpoint_safetensors.py.

    checkpoint_tool save DIR VERSION | load DIR VERSION | foreign DIR VERSION      foreign: a model without
    optimizer and state */
#include <string.h>
#include <sys/stat.h>

#define DDP_IMPLEMENTATION
#include "../../ddp_fsdp.h"

#include "../support/checkpoints.h"

static char **arguments;

static ddp_result work(ddp_group *group, void *user) {
    int version = atoi(arguments[3]), foreign = strcmp(arguments[1], "foreign") == 0;
    ddp_result result;
    ckpt_rank k;
    (void)user;
    ckpt_open(&k, ddp_rank(group), ddp_world_size(group), 0, 0);
    if (foreign) k.count = 12; /* only the model */
    if (strcmp(arguments[1], "save") == 0) {
        ckpt_fill(&k, version);
        result = ddp__checkpoint_save(group, arguments[2], k.slices, k.count, &k.state, NULL, 3000, 1);
    } else {
        result = ddp__checkpoint_load(group, NULL, arguments[2], k.slices, k.count, NULL, NULL, &k.state);
        if (result == DDP_OK && !(foreign ? ckpt_each(&k, version, 1) : ckpt_has(&k, version)))
            result = ddp_fail(DDP_ERR_CORRUPT, "the values are wrong");
    }
    ckpt_close(&k);
    return result;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: %s save|load|foreign DIR VERSION\n", argv[0]), 2;
    watchdog_start(60);
    arguments = argv;
    if (ranks_run(RANKS_THREADS, 2, 30000 * DDP_TEST_SLOWDOWN, work, NULL) == DDP_OK) return 0;
    printf("%s\n", ddp_last_error());
    return 1;
}

/*  test_save_without_memory.c - a save or load in which an allocation of one rank fails, each in turn, ends
    on every rank at once.

    If the bookkeeping of a collective found no memory, that rank returned, and the others waited in the
    collective for the whole timeout.

    test_save_without_memory */
#include "ddp_fsdp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { AHEAD = 32 };

typedef struct turn {
    int number, loads, fired;
    char dir[100];
} turn;

/* Of this rank; refuse_at: the allocation that fails, 0 = none. */
static __thread int calls, refuse_at;
static turn trial;

static void *scarce(size_t size_bytes, void *user) {
    (void)user;
    if (refuse_at && ++calls == refuse_at) {
        trial.fired = 1;
        return NULL;
    }
    return malloc(size_bytes ? size_bytes : 1);
}
static void spare(void *memory, void *user) {
    (void)user;
    free(memory);
}

static ddp_result fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                       void *user) {
    (void)user, (void)param;
    for (int64_t i = 0; i < row_count * 3; i++) ((float *)out)[i] = (float)(first_row * 3 + i);
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    ddp_fsdp_param params[2];
    ddp_fsdp_unit_desc units[2];
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp = NULL;
    ddp_work work[AHEAD];
    float ahead[AHEAD] = {0};
    ddp_result result;
    (void)user;
    memset(params, 0, sizeof params);
    memset(units, 0, sizeof units);
    for (int u = 0; u < 2; u++) {
        params[u].param.name = units[u].name = u ? "b" : "a";
        params[u].param.value.dtype = params[u].param.grad.dtype = DDP_F32;
        params[u].param.value.ndim = params[u].param.grad.ndim = 2;
        params[u].param.value.shape[0] = params[u].param.grad.shape[0] = 5;
        params[u].param.value.shape[1] = params[u].param.grad.shape[1] = 3;
        units[u].params = &params[u], units[u].param_count = 1;
    }
    desc.units = units, desc.unit_count = 2, desc.init_fn = fill;
    refuse_at = calls = 0;
    RANKS_OK(world, ddp_fsdp_create(&fsdp, world, &desc));
    if (trial.loads) RANKS_OK(world, ddp_fsdp_save(fsdp, trial.dir));
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 1) ranks_sleep_us(5000);
    /* In flight, so that the following calls on rank 0 must be queued, with additional memory. */
    for (int i = 0; i < AHEAD; i++)
        RANKS_OK(world, ddp_all_reduce(world, &ahead[i], &ahead[i], 1, DDP_F32, DDP_OP_SUM, &work[i]));
    if (ddp_rank(world) == 0) refuse_at = trial.number;
    result = trial.loads ? ddp_fsdp_load(fsdp, trial.dir) : ddp_fsdp_save(fsdp, trial.dir);
    refuse_at = 0;
    EXPECT(result == DDP_OK || strstr(ddp_last_error(), "could not be allocated"),
           "%s, allocation %d, rank %d: %s", trial.loads ? "load" : "save", trial.number, ddp_rank(world),
           ddp_last_error());
    EXPECT((result == DDP_OK) == !trial.fired || ddp_rank(world), "%s, allocation %d: %s although %s",
           trial.loads ? "load" : "save", trial.number, ddp_result_name(result),
           trial.fired ? "it failed" : "none failed");
    for (int i = 0; i < AHEAD; i++) (void)ddp_wait(world, &work[i]);
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

int main(void) {
    char folder[] = "saves.XXXXXX", command[64];
    ddp_launch_desc desc = DDP_ZERO;
    int numbers = 0;
    faults_start(150 * DDP_TEST_SLOWDOWN);
    faults_begin("a rank without memory in save and load");
    EXPECT(mkdtemp(folder) != NULL, "no folder");
    desc.world_size = 2;
    desc.mode = DDP_LAUNCH_THREADS;
    desc.group.timeout_ms = 8000 * DDP_TEST_SLOWDOWN;
    desc.group.alloc_fn = scarce;
    desc.group.free_fn = spare;
    for (trial.loads = 0; trial.loads < 2; trial.loads++)
        for (trial.number = 1, trial.fired = 1; trial.fired; trial.number++) {
            trial.fired = 0;
            snprintf(trial.dir, sizeof trial.dir, "%s/%d_%d", folder, trial.loads, trial.number);
            ddp_launch(&desc, rank_main, NULL);
            numbers += trial.fired;
        }
    EXPECT(numbers > 10, "only %d allocations failed", numbers);
    printf("%d allocations failed in turn\n", numbers);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    EXPECT(system(command) == 0, "%s is left", folder);
    return faults_end();
}

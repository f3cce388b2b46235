/*  test_stopped_rank.c - a rank that stops costs one timeout, not one per group, and the error names it.

    Once, only the group of the first wait failed. Each further collective on another group with that rank,
    such as the ones inside the destroy of a reducer or of a split, waited for a timeout of its own: from the
    first wait to the end of ddp_launch four timeouts and more passed. Now the rank is marked in shared
    memory, and every group that contains it fails at its next wait. Groups without it stay usable. A chain of
    receives names the stopped rank, not the neighbour that waits too. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#define W 4
#define TIMEOUT_MS 4000

typedef struct plan {
    int messages;
} plan;

/* param: outlives the reducer. */
static ddp_result make_reducer(ddp_group *group, ddp_reducer **out, ddp_param *param, float *values) {
    ddp_reducer_desc desc = DDP_ZERO;
    memset(param, 0, sizeof *param);
    param->name = "w";
    param->value.data = values;
    param->value.dtype = DDP_F32;
    param->value.ndim = 1;
    param->value.shape[0] = 1000;
    desc.params = param;
    desc.param_count = 1;
    return ddp_reducer_create(out, group, &desc);
}

/* The call in which all ranks wait for the stopped one. */
static ddp_result first_wait(ddp_group *world, const plan *p) {
    float x = 1;
    if (!p->messages) return ddp_all_reduce(world, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL);
    return ddp_recv(world, &x, 1, DDP_F32, ddp_rank(world) + 1, 7, NULL);
}

static ddp_result run(ddp_group *world, void *user) {
    plan *p = (plan *)user;
    int rank = ddp_rank(world);
    static float values[2][1000];
    ddp_group *all, *pair, *third;
    ddp_reducer *first, *second;
    ddp_param params[2];
    seen *mine = &stage_shared->rank[rank];
    char wanted[64];
    RANKS_OK(world, ddp_group_split(world, 0, 0, &all));
    RANKS_OK(world, ddp_group_split(world, rank / 2, 0, &pair));
    RANKS_OK(world, ddp_group_split(world, 1, -rank, &third));
    RANKS_OK(world, make_reducer(world, &first, &params[0], values[0]));
    RANKS_OK(world, make_reducer(all, &second, &params[1], values[1]));
    mine->pid = getpid();
    RANKS_OK(world, ddp_barrier(world));
    if (rank == W - 1) raise(SIGSTOP);
    mine->start_at = ddp_now();
    mine->first = first_wait(world, p);
    snprintf(mine->text, sizeof mine->text, "%s", ddp_last_error());
    snprintf(wanted, sizeof wanted, "pid %d)", (int)stage_shared->rank[W - 1].pid);
    EXPECT(mine->first == DDP_ERR_TIMEOUT && strstr(mine->text, wanted), "rank %d: %s, without '%s'", rank,
           mine->text, wanted);
    EXPECT(ddp_barrier(pair) == (rank < 2 ? DDP_OK : DDP_ERR_TIMEOUT), "rank %d: %s", rank, ddp_last_error());
    if (rank == 2)
        EXPECT(strstr(ddp_last_error(), wanted), "rank 2: %s, without '%s'", ddp_last_error(), wanted);
    ddp_reducer_destroy(second);
    ddp_reducer_destroy(first);
    EXPECT(ddp_barrier(third) == DDP_ERR_TIMEOUT, "rank %d: %s", rank, ddp_last_error());
    ddp_group_destroy(third);
    ddp_group_destroy(pair);
    ddp_group_destroy(all);
    return faults_failures ? DDP_ERR_CORRUPT : mine->first;
}

int main(void) {
    faults_start(120);
    for (int messages = 0; messages < 2; messages++) {
        plan p = {messages};
        ddp_launch_desc desc = DDP_ZERO;
        double start, end;
        faults_begin(messages ? "a chain of receives" : "all_reduce");
        desc.world_size = W;
        desc.group.timeout_ms = TIMEOUT_MS;
        desc.no_affinity = 1;
        EXPECT(ddp_launch(&desc, run, &p) == DDP_ERR_TIMEOUT, "ddp_launch: %s", ddp_last_error());
        end = ddp_now();
        start = stage_shared->rank[0].start_at;
        printf("%s: %.2f timeouts from the first wait to the end of ddp_launch\n", faults_scenario,
               (end - start) * 1e3 / TIMEOUT_MS);
        EXPECT(end - start < 2.6e-3 * TIMEOUT_MS * DDP_TEST_SLOWDOWN, "%.2f s, timeout_ms is %d", end - start,
               TIMEOUT_MS);
    }
    return faults_end();
}

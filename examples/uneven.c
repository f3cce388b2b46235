/*  uneven.c - ranks that have different numbers of batches, in one page: nobody waits for a gradient that does not come.

    cc -O3 -march=native examples/uneven.c -o uneven -lm -lpthread
    ./uneven                      rank r has r + 1 times as many batches as rank 0; --help lists the flags

        step     0       1       2
        rank 0   batch   zeros   zeros      a rank that is through answers with zeros, averages are over the others;
        rank 1   batch   batch   zeros      with --stop everybody ends where the first rank has no batch: here after step 0
        rank 2   batch   batch   batch

    Before each step every rank tells ddp_join_step whether it has a batch, and hears how many have one. The layer y = W x learns what another one
    computes. At the end all ranks have the same weights, and every batch that was there to be used is counted once. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "gpt/launcher.h"
#include "gpt/options.h"
#include "extras/training.h"
#include <math.h>

enum { ROWS = 4, COLUMNS = 6, BATCH = 8 };

typedef struct settings {
    int ranks, batches, stop, threads;
} settings;
typedef struct model {
    ddp_param w;
    float values[ROWS * COLUMNS];
} model;

/* One step of SGD: a rank without a batch takes it too, so that its weights stay those of the others. */
static ddp_result update(void *user) {
    model *m = (model *)user;
    const float *gradient = (const float *)m->w.grad.data;
    for (int i = 0; i < ROWS * COLUMNS; i++) m->values[i] -= 0.1f * gradient[i];
    return DDP_OK;
}

/* The gradient of batch number `batch` of a rank; returns its loss. */
static double backward(model *m, int rank, int batch) {
    float *gradient = (float *)m->w.grad.data;
    double loss = 0;
    memset(gradient, 0, ROWS * COLUMNS * sizeof(float));
    for (int s = 0; s < BATCH; s++)
        for (int r = 0; r < ROWS; r++) {
            float x[COLUMNS], error = 0;
            for (int c = 0; c < COLUMNS; c++) {
                x[c] = cosf((float)(1 + rank + 7 * batch + 13 * s) * (float)(c + 1));
                error += (m->values[r * COLUMNS + c] - sinf((float)(r * COLUMNS + c))) * x[c];
            }
            loss += (double)(error * error) / (BATCH * ROWS);
            for (int c = 0; c < COLUMNS; c++) gradient[r * COLUMNS + c] += error * x[c] / BATCH;
        }
    return loss;
}

/* Steps for as long as ddp_join_step says. losses: of this rank's batches; first and last: those of rank 0's and the last rank's. Collective. */
static ddp_result run(ddp_group *world, ddp_join *join, ddp_reducer *reducer, model *m, int batches,
                      metric *losses, double *first, double *last) {
    for (int batch = 0;; batch++) {
        int active;
        ddp_result result = ddp_join_step(join, batch < batches, &active);
        if (result != DDP_OK || active == 0) return result;
        *last = backward(m, ddp_rank(world), batch);
        if (batch == 0) *first = *last;
        metric_add(losses, *last, 0);
        result = ddp_reducer_ready(reducer, 0);
        if (result == DDP_OK) result = ddp_reducer_wait(reducer); /* the average over `active` ranks */
        if (result == DDP_OK) result = update(m);
        if (result != DDP_OK) return result;
    }
}

static ddp_result train(ddp_group *world, void *user) {
    const settings *set = (const settings *)user;
    int ranks = ddp_world_size(world), rank = ddp_rank(world),
        used = set->batches * (set->stop ? ranks : ranks * (ranks + 1) / 2);
    model m = DDP_ZERO;
    ddp_reducer_desc reducer_desc = DDP_ZERO;
    ddp_join_desc join_desc = DDP_ZERO;
    ddp_reducer *reducer = NULL;
    ddp_join *join = NULL;
    metric losses = DDP_ZERO;
    metric_total total;
    double loss[2] = {0, 0};
    ddp_result result;
    m.w.name = "w";
    m.w.value.data = m.values, m.w.value.dtype = DDP_F32, m.w.value.ndim = 2, m.w.value.shape[0] = ROWS,
    m.w.value.shape[1] = COLUMNS;
    reducer_desc.params = &m.w;
    reducer_desc.param_count = 1;
    result = ddp_reducer_create(&reducer, world, &reducer_desc);
    join_desc.reducer = reducer;
    join_desc.mode = set->stop ? DDP_JOIN_STOP : DDP_JOIN_SHADOW;
    join_desc.step_fn = update;
    join_desc.user = &m;
    if (result == DDP_OK) result = ddp_join_create(&join, world, &join_desc);
    if (result == DDP_OK)
        result = run(world, join, reducer, &m, set->batches * (rank + 1), &losses, &loss[0], &loss[1]);
    if (result == DDP_OK) result = drift_check(world, &m.w, 1, 0, 1);
    if (result == DDP_OK) result = metric_all_reduce(world, &losses, 1, used, &total);
    if (result == DDP_OK)
        result = ddp_broadcast(world, loss, 2, DDP_F64, ranks - 1, NULL); /* of the rank that has most */
    if (result == DDP_OK && set->batches >= 100 && !(loss[1] < 1e-2 * loss[0]))
        result = ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g", loss[0], loss[1]);
    if (result == DDP_OK && rank == 0)
        printf("%d ranks, rank 0 with %d batches, rank %d with %d: %lld batches used, loss %.4f -> %.2g, "
               "equal weights\n",
               ranks, set->batches, ranks - 1, set->batches * ranks, (long long)total.count, loss[0],
               loss[1]);
    ddp_join_destroy(join);
    ddp_reducer_destroy(reducer);
    return result;
}

int main(int argc, char **argv) {
    settings set = {0, 100, 0, 0};
    const option options[] = {
        {"--ranks", "N", &set.ranks, NULL, NULL, 0, DDP_MAX_LOCAL_RANKS,
         "ranks to start; 0 = 3, or those of a launcher"},
        {"--batches", "N", &set.batches, NULL, NULL, 1, 1e6, "batches of rank 0"},
        {"--stop", NULL, &set.stop, NULL, NULL, 0, 1, "stop with the first rank that has no batch"},
        {"--threads-as-ranks", NULL, &set.threads, NULL, NULL, 0, 1, "ranks are threads of one process"},
    };
    ddp_launch_desc desc = DDP_ZERO;
    int status = options_read("uneven: trains on ranks that have different numbers of batches", options, 4,
                              argc, argv, NULL);
    if (status >= 0) return status;
    desc.world_size = ranks_to_start(set.ranks, 3);
    desc.group.log_fn = print_notice;
    desc.mode = set.threads ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
    if (ddp_launch(&desc, train, &set) == DDP_OK) return 0;
    fprintf(stderr, "uneven: %s\n", ddp_last_error());
    return 1;
}

/* The program in which compile.call_paths counts functions: one named call, after a setup that ends with a
   barrier. Built without optimization; ranks are threads. See tests/support/callpath.py. */
#define DDP_IMPLEMENTATION
#include "ddp_fsdp.h"
#include "watchdog.h"

enum { COUNT = 1 << 16 };
static const char *mode;
void callpath_start(void);
void callpath_start(void) {} /* the next call is counted */

static void describe(ddp_param *param, const char *name, float *values) {
    memset(param, 0, sizeof *param);
    param->name = name;
    param->value.data = values;
    param->value.dtype = DDP_F32;
    param->value.ndim = 1;
    param->value.shape[0] = COUNT;
}

/* Two units of one parameter. unshard: the first step, where nothing is prefetched. prefetch: the second
   step, where the call for one unit starts the next one on the communication thread. */
static ddp_result run_fsdp(ddp_group *world) {
    float *values = (float *)calloc(2 * COUNT, sizeof *values);
    ddp_fsdp_param params[2];
    ddp_fsdp_unit_desc units[2] = {{"a", &params[0], 1}, {"b", &params[1], 1}};
    ddp_fsdp_desc desc = DDP_ZERO;
    int queued = strcmp(mode, "prefetch") == 0;
    ddp_fsdp *fsdp;
    memset(params, 0, sizeof params);
    describe(&params[0].param, "a.w", values);
    describe(&params[1].param, "b.w", values + COUNT);
    desc.units = units;
    desc.unit_count = 2;
    DDP_TRY(ddp_fsdp_create(&fsdp, world, &desc));
    for (int step = 0; step < 2; step++) {
        if (queued) usleep(200000); /* the communication thread works off its queue */
        DDP_TRY(ddp_barrier(world));
        if (step == queued) callpath_start();
        for (int u = 0; u < 2; u++) {
            DDP_TRY(ddp_fsdp_unshard(fsdp, u));
            if (queued) usleep(200000);
            memset(params[u].param.grad.data, 0, COUNT * sizeof *values);
        }
        for (int u = 0; u < 2; u++) DDP_TRY(ddp_fsdp_reduce_grads(fsdp, u));
        DDP_TRY(ddp_fsdp_step(fsdp, 0.1f));
    }
    ddp_fsdp_destroy(fsdp);
    free(values);
    return DDP_OK;
}

/* Two buckets of one gradient each. The first one is reduced by the communication thread, as soon as it is
   ready. */
static ddp_result run_reducer(ddp_group *world) {
    float *values = (float *)calloc(4 * COUNT, sizeof *values);
    ddp_param params[2];
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_reducer *reducer;
    for (int i = 0; i < 2; i++) {
        describe(&params[i], "w", values + i * COUNT);
        params[i].grad = params[i].value;
        params[i].grad.data = values + (2 + i) * COUNT;
    }
    desc.params = params;
    desc.param_count = 2;
    desc.first_bucket_bytes = COUNT * sizeof *values;
    DDP_TRY(ddp_reducer_create(&reducer, world, &desc));
    DDP_TRY(ddp_barrier(world));
    callpath_start();
    DDP_TRY(ddp_reducer_ready(reducer, 1));
    usleep(200000); /* otherwise this thread reduces it inside ddp_reducer_wait */
    DDP_TRY(ddp_reducer_ready(reducer, 0));
    DDP_TRY(ddp_reducer_wait(reducer));
    ddp_reducer_destroy(reducer);
    free(values);
    return DDP_OK;
}

static ddp_result run(ddp_group *world, void *user) {
    (void)user;
    return strcmp(mode, "reducer") == 0 ? run_reducer(world) : run_fsdp(world);
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = DDP_ZERO;
    mode = argc > 1 ? argv[1] : "unshard";
    watchdog_start(60);
    desc.mode = DDP_LAUNCH_THREADS;
    desc.world_size = 2;
    if (ddp_launch(&desc, run, NULL) == DDP_OK) return 0;
    fprintf(stderr, "%s\n", ddp_last_error());
    return 1;
}

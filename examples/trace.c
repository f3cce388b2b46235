/*  trace.c - a timeline of all ranks: a slow rank, and gradient buckets that overlap with backward

        cc -O3 -march=native examples/trace.c -o trace -lm -lpthread
        ./trace                      2 ranks, writes trace.json
        ./trace 4 steps.json         4 ranks, writes steps.json

    Open the file in https://ui.perfetto.dev or chrome://tracing. Each rank has three rows: its calls and
    spans, its communication thread, and its messages. The last rank is slow in forward: the others wait for
    it in ddp_reducer_wait. The program reads the file again and checks it. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAYERS = 6, COUNT = 1 << 19, STEPS = 4 };

typedef struct options {
    int ranks;
    const char *path;
} options;

static void sleep_ms(int ms) {
    struct timespec t = {0, ms * 1000000L};
    nanosleep(&t, NULL);
}

/* Two milliseconds of work per layer. It starts at the last layer: the reducer sends the buckets of the upper
   layers while the lower ones are still computed. */
static ddp_result backward(ddp_reducer *reducer, float *grads) {
    for (int l = LAYERS - 1; l >= 0; l--) {
        for (int i = 0; i < COUNT; i++) grads[(size_t)l * COUNT + i] = 1;
        sleep_ms(2);
        DDP_TRY(ddp_reducer_ready(reducer, l));
    }
    return DDP_OK;
}

static ddp_result train(ddp_group *world, ddp_reducer *reducer, float *grads) {
    int slow = ddp_rank(world) == ddp_world_size(world) - 1;
    for (int step = 0; step < STEPS; step++) {
        double start = ddp_now();
        sleep_ms(slow ? 15 : 5);
        ddp_trace_span(world, "forward", start);
        start = ddp_now();
        DDP_TRY(backward(reducer, grads));
        ddp_trace_span(world, "backward", start);
        DDP_TRY(ddp_reducer_wait(reducer));
    }
    for (int i = 0; i < COUNT * LAYERS; i++)
        if (grads[i] != 1) return ddp_fail(DDP_ERR_CORRUPT, "gradient %d is %g, not 1", i, (double)grads[i]);
    return DDP_OK;
}

/* Number of lines of a file that contain `text`; -1 if it cannot be read. */
static int count_in_file(const char *path, const char *text) {
    char line[1024];
    int count = 0;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (fgets(line, sizeof line, file)) count += strstr(line, text) != NULL;
    fclose(file);
    return count;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    const options *o = (const options *)user;
    int ranks = ddp_world_size(world);
    float *params = calloc((size_t)LAYERS * COUNT, sizeof *params);
    float *grads = calloc((size_t)LAYERS * COUNT, sizeof *grads);
    if (!params || !grads) return ddp_fail(DDP_ERR_NO_MEMORY, "memory for parameters is missing");
    ddp_param list[LAYERS] = {0};
    for (int l = 0; l < LAYERS; l++) {
        list[l].name = "w";
        list[l].value = (ddp_tensor){params + (size_t)l * COUNT, DDP_F32, 1, {COUNT}};
        list[l].grad.data = grads + (size_t)l * COUNT;
    }
    ddp_reducer *reducer;
    ddp_reducer_desc desc = {.params = list, .param_count = LAYERS, .bucket_cap_bytes = 4 << 20};
    DDP_TRY(ddp_reducer_create(&reducer, world, &desc));

    DDP_TRY(ddp_trace_start(world, 0));
    DDP_TRY(train(world, reducer, grads));
    DDP_TRY(ddp_trace_write(world, o->path));

    ddp_reducer_destroy(reducer);
    free(params);
    free(grads);
    if (ddp_rank(world) != 0) return DDP_OK;
    int spans = count_in_file(o->path, "\"forward\""), calls = count_in_file(o->path, "\"ddp_all_reduce\"");
    printf("%s: %d ranks, %d forward spans, %d all-reduces\n", o->path, ranks, spans, calls);
    if (spans == ranks * STEPS && calls >= (ranks > 1 ? ranks * STEPS : 0)) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "%s: events are missing", o->path);
}

int main(int argc, char **argv) {
    options o = {.ranks = 2, .path = "trace.json"};
    if (argc > 1) o.ranks = atoi(argv[1]);
    if (argc > 2) o.path = argv[2];
    ddp_launch_desc desc = {.world_size = o.ranks};
    ddp_result result = DDP_OK;
    if (argc > 3 || o.ranks < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [file]]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &o);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

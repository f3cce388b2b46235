/*  schedules.c - every pipeline schedule as text, with its bubble, memory and weight versions

        cc -O3 -march=native examples/schedules.c -o schedules -lm -lpthread
        ./schedules                            4 ranks, 8 micro-batches, 2 chunks per rank
        ./schedules 8 24 2 18.5 18.1 9.3 0.6   ranks, micro-batches, chunks; time of F, I, W and a transfer
        ./schedules -o pictures 4 8            also writes pictures/ZB-H1.svg, .csv and .json of each kind;
                                               ui.perfetto.dev shows a .json

    F is forward, I the gradient of inputs, W the gradient of weights, B both; 2F0 is F of stage 2 and
    micro-batch 0. One process draws all of them; no ranks are started. The bubble is the share of time in
    which ranks wait. Memory counts the activations of micro-batches in flight. The F, I and W of a rank are
    divided by its number of chunks. The last part reads a schedule of your own. */
#define DDP_IMPLEMENTATION
#include "../ddp_pipeline.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    double ranks, micro_batches, chunks, forward, input_grad, weight_grad, transfer;
    const char *folder; /* NULL = no files */
} settings;

/* Draws a schedule in memory that the caller frees. */
static ddp_result draw(const ddp_schedule *schedule, ddp_schedule_format format, const ddp_stage_cost *costs,
                       char **text) {
    size_t size_bytes = 0;
    DDP_TRY(ddp_schedule_draw(schedule, format, costs, NULL, NULL, &size_bytes));
    *text = (char *)malloc(size_bytes);
    if (!*text) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for a drawing");
    return ddp_schedule_draw(schedule, format, costs, NULL, *text, &size_bytes);
}

static ddp_result save(const ddp_schedule *schedule, ddp_schedule_format format, const char *ending,
                       const ddp_stage_cost *costs, const char *folder) {
    const char *name = ddp_schedule_kind_name(ddp_schedule_get_kind(schedule));
    char path[4096], *text = NULL;
    snprintf(path, sizeof path, "%s/%s.%s", folder, name, ending);
    ddp_result result = draw(schedule, format, costs, &text);
    FILE *file = result == DDP_OK ? fopen(path, "w") : NULL;
    int written = file && fputs(text, file) >= 0;
    if (file && fclose(file) != 0) written = 0;
    free(text);
    if (result != DDP_OK || written) return result;
    return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
}

/* Prints a schedule and its properties, and checks them. */
static ddp_result show(const ddp_schedule *schedule, const ddp_stage_cost *costs, const settings *s) {
    ddp_schedule_report report = {0};
    char *text = NULL;
    DDP_TRY(ddp_schedule_check(schedule));
    DDP_TRY(ddp_schedule_simulate(schedule, costs, &report));
    printf("%s: bubble %.4f, memory for %.2f micro-batches, weight versions: %d\n",
           ddp_schedule_kind_name(ddp_schedule_get_kind(schedule)), report.bubble_rate, report.peak_memory,
           report.weight_versions);
    ddp_result result = DDP_OK;
    if (s->ranks * s->micro_batches <= 256) result = draw(schedule, DDP_SCHEDULE_TEXT, costs, &text);
    if (result == DDP_OK) printf("%s\n", text ? text : "");
    free(text);
    DDP_TRY(result);

    /* No rank computes less than its share. No schedule is slower than one micro-batch at a time. */
    double stages = ddp_schedule_stage_count(schedule);
    double work = s->micro_batches * (s->forward + s->input_grad + s->weight_grad);
    double slowest = work * s->ranks + s->micro_batches * stages * 2 * s->transfer;
    if (report.span < work * (1 - 1e-9) || report.makespan > slowest * (1 + 1e-9))
        return ddp_fail(DDP_ERR_CORRUPT, "the simulated time %g is not in %g to %g", report.span, work,
                        slowest);
    if (!s->folder) return DDP_OK;
    DDP_TRY(save(schedule, DDP_SCHEDULE_CSV, "csv", costs, s->folder));
    DDP_TRY(save(schedule, DDP_SCHEDULE_SVG, "svg", costs, s->folder));
    return save(schedule, DDP_SCHEDULE_TRACE, "json", costs, s->folder);
}

/* The number of chunks per rank that a kind supports. */
static int chunks_of(ddp_schedule_kind kind, int wanted) {
    switch (kind) {
    case DDP_SCHEDULE_ZB_V:
    case DDP_SCHEDULE_DUALPIPE_V: return 2;
    case DDP_SCHEDULE_INTERLEAVED_1F1B:
    case DDP_SCHEDULE_INTERLEAVED_ZB_1P:
    case DDP_SCHEDULE_LOOPED_BFS: return wanted;
    default: return 1;
    }
}

static ddp_result show_kind(ddp_schedule_kind kind, const settings *s) {
    ddp_schedule_desc desc = {.kind = kind, .rank_count = (int)s->ranks};
    desc.microbatch_count = (int)s->micro_batches;
    desc.chunk_count = chunks_of(kind, (int)s->chunks);
    if (kind == DDP_SCHEDULE_AUTO) desc.memory_limit = 2 * s->ranks;
    int stages = desc.rank_count * desc.chunk_count;
    ddp_stage_cost *costs = (ddp_stage_cost *)calloc((size_t)stages, sizeof *costs);
    if (!costs) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for %d stages", stages);
    for (int i = 0; i < stages; i++) {
        costs[i].forward = s->forward / desc.chunk_count;
        costs[i].input_grad = s->input_grad / desc.chunk_count;
        costs[i].weight_grad = s->weight_grad / desc.chunk_count;
        costs[i].transfer = s->transfer;
        costs[i].activation = 1.0 / desc.chunk_count;
    }
    desc.costs = costs;
    ddp_schedule *schedule;
    ddp_result result = ddp_schedule_create(&schedule, &desc);
    if (result == DDP_OK)
        result = show(schedule, costs, s);
    else if (result == DDP_ERR_INVALID) { /* not defined for these numbers: the text names the nearest ones */
        printf("%s: %s\n\n", ddp_schedule_kind_name(kind), ddp_last_error());
        result = DDP_OK;
    }
    ddp_schedule_destroy(schedule);
    free(costs);
    return result;
}

/* A schedule may also be text: a line per rank. It is checked before it runs, and lowered to the list that a
   rank executes: with the messages between ranks. */
static ddp_result show_own(void) {
    static const char good[] = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n";
    static const char stuck[] = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"; /* 1F1 waits for 0F1, after 0B0 */
    char text[4096];
    size_t size_bytes = sizeof text;
    ddp_schedule *schedule, *lowered;
    DDP_TRY(ddp_schedule_parse(&schedule, good));
    DDP_TRY(ddp_schedule_check(schedule));
    DDP_TRY(ddp_schedule_lower(&lowered, schedule, DDP_LOWER_MERGE | DDP_LOWER_COMM));
    DDP_TRY(ddp_schedule_write(lowered, DDP_SCHEDULE_CSV, text, &size_bytes));
    printf("a schedule of your own:\n%s\nwith the messages between ranks:\n%s\n", good, text);
    ddp_schedule_destroy(schedule);
    ddp_schedule_destroy(lowered);
    DDP_TRY(ddp_schedule_parse(&schedule, stuck));
    ddp_result result = ddp_schedule_check(schedule);
    ddp_schedule_destroy(schedule);
    if (result != DDP_ERR_INVALID) return ddp_fail(DDP_ERR_CORRUPT, "the check accepts a deadlock");
    printf("one that cannot run:\n%s\n%s\n", stuck, ddp_last_error());
    return DDP_OK;
}

/* Reads argv[i] if it exists; *value keeps its default otherwise. */
static ddp_result read_number(int argc, char **argv, int i, const char *name, double min, double max,
                              int is_whole, double *value) {
    if (i >= argc) return DDP_OK;
    char *end;
    double number = strtod(argv[i], &end);
    int valid = end != argv[i] && *end == 0 && number >= min && number <= max;
    if (!valid || (is_whole && number != (int)number))
        return ddp_fail(DDP_ERR_INVALID, "%s=%.60s: give a %snumber from %g to %g", name, argv[i],
                        is_whole ? "whole " : "", min, max);
    *value = number;
    return DDP_OK;
}

static ddp_result read_arguments(int argc, char **argv, settings *s) {
    int i = 1;
    if (argc > 1 && strcmp(argv[1], "-o") == 0) {
        if (argc == 2 || !argv[2][0]) return ddp_fail(DDP_ERR_INVALID, "-o needs a folder");
        s->folder = argv[2];
        i = 3;
    }
    if (argc > i + 7 || (argc > i && strncmp(argv[i], "--", 2) == 0))
        return ddp_fail(DDP_ERR_INVALID,
                        "usage: schedules [-o FOLDER] [ranks [micro-batches [chunks [F [I [W "
                        "[transfer]]]]]]]");
    DDP_TRY(read_number(argc, argv, i, "ranks", 1, 4096, 1, &s->ranks));
    DDP_TRY(read_number(argc, argv, i + 1, "micro-batches", 1, 65536, 1, &s->micro_batches));
    DDP_TRY(read_number(argc, argv, i + 2, "chunks", 1, 64, 1, &s->chunks));
    DDP_TRY(read_number(argc, argv, i + 3, "F", 0, 1e6, 0, &s->forward));
    DDP_TRY(read_number(argc, argv, i + 4, "I", 0, 1e6, 0, &s->input_grad));
    DDP_TRY(read_number(argc, argv, i + 5, "W", 0, 1e6, 0, &s->weight_grad));
    DDP_TRY(read_number(argc, argv, i + 6, "transfer", 0, 1e6, 0, &s->transfer));
    double count = s->ranks * s->micro_batches * s->chunks;
    if (count > 1e6)
        return ddp_fail(DDP_ERR_INVALID, "ranks x micro-batches x chunks = %g: use at most 1000000", count);
    if (s->forward + s->input_grad + s->weight_grad == 0)
        return ddp_fail(DDP_ERR_INVALID, "F, I and W are 0: give one of them some time");
    return DDP_OK;
}

int main(int argc, char **argv) {
    settings s = {
        .ranks = 4, .micro_batches = 8, .chunks = 2, .forward = 1, .input_grad = 1, .weight_grad = 1};
    ddp_result result = read_arguments(argc, argv, &s);
    for (int kind = 0; kind < DDP_SCHEDULE_KIND_COUNT && result == DDP_OK; kind++)
        result = show_kind((ddp_schedule_kind)kind, &s);
    if (result == DDP_OK) result = show_own();
    if (result != DDP_OK) fprintf(stderr, "schedules: %s\n", ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

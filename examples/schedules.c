/*  schedules.c - every pipeline schedule side by side: who computes what, and how long ranks wait.

    cc -O2 examples/schedules.c -o schedules -lm -lpthread
    ./schedules                            4 ranks, 8 micro-batches, 2 chunks per rank where a schedule has chunks
    ./schedules 8 24 2 18.5 18.1 9.3 0.6   ranks, micro-batches, chunks; what F, I and W of a stage take, and a transfer
    ./schedules -o pictures 4 8            also pictures/ZB-H1.svg, .csv and .json (for Perfetto) of each

    Wrong input is one sentence, and status 1.

    F forward, I gradient of inputs, W gradient of weights, B = I and W; 2F0 is stage 2, micro-batch 0. A schedule that is not defined for these numbers says what
    the nearest ones are. The costs of a stage are shared by its chunks: with 2 chunks per rank a stage has half of the layers. */
#define DDP_IMPLEMENTATION
#include "../ddp_pipeline.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int complain(const char *what) {
    fprintf(stderr, "schedules: %s: %s\n", what, ddp_last_error());
    return 1;
}

/* The schedule as text of a format; the caller frees it. */
static char *drawn(const ddp_schedule *schedule, ddp_schedule_format format, const ddp_stage_cost *costs) {
    size_t size = 0;
    char *text = NULL;
    if (ddp_schedule_draw(schedule, format, costs, NULL, NULL, &size) == DDP_OK) text = (char *)malloc(size);
    if (text && ddp_schedule_draw(schedule, format, costs, NULL, text, &size) != DDP_OK) text[0] = 0;
    return text;
}

static int save(const ddp_schedule *schedule, const ddp_stage_cost *costs, const char *folder,
                const char *name) {
    static const struct {
        ddp_schedule_format format;
        const char *ending;
    } files[] = {
        {DDP_SCHEDULE_CSV, "csv"},
        {DDP_SCHEDULE_SVG, "svg"},
        {DDP_SCHEDULE_TRACE, "json"},
    };
    for (int i = 0; i < 3; i++) {
        char path[4096], *text = drawn(schedule, files[i].format, costs);
        FILE *file;
        int written;
        snprintf(path, sizeof path, "%s/%s.%s", folder, name, files[i].ending);
        file = text ? fopen(path, "w") : NULL;
        written = file && fputs(text, file) >= 0;
        if (file && fclose(file) != 0) written = 0;
        free(text);
        if (!written)
            return fprintf(stderr, "schedules: %s cannot be written: %s\n", path, strerror(errno)), 1;
    }
    return 0;
}

/* Draws one kind and checks what must hold for it: no rank computes more or less than its share, and none waits longer than one micro-batch at a time makes it. */
static int show(ddp_schedule_kind kind, const ddp_schedule_desc *numbers, const double *cost,
                const char *folder) {
    int vee = kind == DDP_SCHEDULE_ZB_V || kind == DDP_SCHEDULE_DUALPIPE_V, p = numbers->rank_count,
        m = numbers->microbatch_count, chunks, failed = 0;
    ddp_schedule_desc desc = *numbers;
    ddp_stage_cost *costs;
    ddp_schedule_report report = DDP_ZERO;
    ddp_schedule *schedule;
    double work = m * (cost[0] + cost[1] + cost[2]), alone;
    char *text;
    int chunked = kind == DDP_SCHEDULE_INTERLEAVED_1F1B || kind == DDP_SCHEDULE_INTERLEAVED_ZB_1P
                  || kind == DDP_SCHEDULE_LOOPED_BFS;
    desc.kind = kind;
    desc.chunk_count = chunks = vee ? 2 : chunked ? numbers->chunk_count : 1;
    costs = (ddp_stage_cost *)calloc((size_t)(p * chunks), sizeof *costs);
    if (!costs) return 1;
    for (int stage = 0; stage < p * chunks; stage++) {
        costs[stage].forward = cost[0] / chunks, costs[stage].input_grad = cost[1] / chunks,
        costs[stage].weight_grad = cost[2] / chunks;
        costs[stage].transfer = cost[3];
        costs[stage].activation = 1.0 / chunks;
    }
    desc.costs = costs;
    desc.memory_limit = kind == DDP_SCHEDULE_AUTO ? 2 * p : 0;
    if (ddp_schedule_create(&schedule, &desc) != DDP_OK) { /* not for these numbers */
        printf("%s: %s\n\n", ddp_schedule_kind_name(kind), ddp_last_error());
        free(costs);
        return 0;
    }
    if (ddp_schedule_check(schedule) != DDP_OK || ddp_schedule_simulate(schedule, costs, &report) != DDP_OK)
        return complain(ddp_schedule_kind_name(kind));
    text = p * m <= 256 ? drawn(schedule, DDP_SCHEDULE_TEXT, costs) : NULL;
    printf("%s: bubble %.4f, memory for %.2f micro-batches, %d version%s of weights\n%s\n",
           ddp_schedule_kind_name(kind), report.bubble_rate, report.peak_memory, report.weight_versions,
           report.weight_versions == 1 ? "" : "s", text ? text : "");
    alone = m * p * chunks * ((cost[0] + cost[1] + cost[2]) / chunks + 2 * cost[3]);
    if (report.span < work * (1 - 1e-9) || report.makespan > alone * (1 + 1e-9))
        failed = fprintf(stderr, "schedules: %g is out of bounds\n", report.span) != 0;
    if (folder && save(schedule, costs, folder, ddp_schedule_kind_name(kind))) failed = 1;
    free(text);
    free(costs);
    ddp_schedule_destroy(schedule);
    return failed;
}

/* What stands where in the command line. */
static const struct {
    const char *name;
    double least, most, usual;
    int whole;
} NUMBERS[] = {
    {"ranks", 1, 4096, 4, 1},   {"micro-batches", 1, 65536, 8, 1},
    {"chunks", 1, 64, 2, 1},    {"F", 0, 1e6, 1, 0},
    {"I", 0, 1e6, 1, 0},        {"W", 0, 1e6, 1, 0},
    {"transfer", 0, 1e6, 0, 0},
};
enum { NUMBER_COUNT = (int)(sizeof NUMBERS / sizeof *NUMBERS) };

#define USAGE "schedules [-o FOLDER] [ranks [micro-batches [chunks [F [I [W [transfer]]]]]]]"

/* 0, or 1 when something is wrong, which has been said. */
static int read_arguments(int argc, char **argv, double *number, const char **folder) {
    int given = 0;
    for (int i = 0; i < NUMBER_COUNT; i++) number[i] = NUMBERS[i].usual;
    for (int i = 1; i < argc; i++) {
        char *end = argv[i];
        double value;
        if (strcmp(argv[i], "-o") == 0) {
            if (i + 1 == argc || !argv[i + 1][0]) return fprintf(stderr, "schedules: -o needs a folder\n"), 1;
            *folder = argv[++i];
            continue;
        }
        if (strncmp(argv[i], "--", 2) == 0)
            return fprintf(stderr, "schedules: there is no flag %.60s: " USAGE "\n", argv[i]), 1;
        if (given == NUMBER_COUNT)
            return fprintf(stderr, "schedules: %.60s is one too many: " USAGE "\n", argv[i]), 1;
        value = strtod(argv[i], &end);
        if (end == argv[i] || *end || !(value >= NUMBERS[given].least && value <= NUMBERS[given].most)
            || (NUMBERS[given].whole && value != (int)value))
            return fprintf(stderr, "schedules: %s=%.60s: give a %snumber from %g to %g\n",
                           NUMBERS[given].name, argv[i], NUMBERS[given].whole ? "whole " : "",
                           NUMBERS[given].least, NUMBERS[given].most),
                   1;
        number[given++] = value;
    }
    if (number[0] * number[1] * number[2] > 1e6)
        return fprintf(stderr,
                       "schedules: ranks times micro-batches times chunks are %g; give smaller ones, up to "
                       "1000000\n",
                       number[0] * number[1] * number[2]),
               1;
    if (number[3] + number[4] + number[5] <= 0)
        return fprintf(stderr, "schedules: F, I and W are 0; give one of them some time\n"), 1;
    return 0;
}

int main(int argc, char **argv) {
    double number[NUMBER_COUNT];
    const char *folder = NULL;
    ddp_schedule_desc desc = DDP_ZERO;
    int failed = 0;
    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return puts("schedules: draws every pipeline schedule\n  " USAGE), 0;
    if (read_arguments(argc, argv, number, &folder)) return 1;
    desc.rank_count = (int)number[0], desc.microbatch_count = (int)number[1],
    desc.chunk_count = (int)number[2];
    for (int kind = 0; kind < DDP_SCHEDULE_KIND_COUNT && !failed; kind++)
        failed = show((ddp_schedule_kind)kind, &desc, number + 3, folder);
    return failed;
}

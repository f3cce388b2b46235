/*  test_trace.c - ddp_trace_*: which events a timeline contains, the ring, and bad arguments.

    test_trace BACKEND [W ...]     one of support/ranks.h */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include <sys/stat.h>
#include <unistd.h>

static char path[64]; /* the same on every rank */

/* The number of lines that contain both texts; -1 if the file cannot be read. */
static int lines_with(const char *first, const char *second) {
    char line[1024];
    int count = 0;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (fgets(line, sizeof line, file)) count += strstr(line, first) && strstr(line, second);
    fclose(file);
    return count;
}

#define LINES(world, expected, first, second)                                                            \
    do {                                                                                                 \
        int lines = ddp_rank(world) ? (expected) : lines_with(first, second);                            \
        RANKS_CHECK(world, lines == (expected), "%d lines with %s and %s, not %d", lines, first, second, \
                    (expected));                                                                         \
        RANKS_OK(world, ddp_barrier(world));                                                             \
    } while (0)

/* Blocking and asynchronous collectives, messages and spans, each with the numbers of its call. */
static ddp_result events(ddp_group *world, int is_tcp) {
    int w = ddp_world_size(world), rank = ddp_rank(world);
    float data[40] = {0};
    ddp_work work;
    double start = ddp_now();
    RANKS_OK(world, ddp_trace_start(world, 0));
    RANKS_OK(world, ddp_all_reduce(world, data, data, 40, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_OK(world, ddp_all_reduce(world, data, data, 30, DDP_F32, DDP_OP_SUM, &work));
    RANKS_OK(world, ddp_wait(world, &work));
    ddp_trace_span(world, "a \"name\"\n with more than 31 bytes", start);
    if (w > 1 && !is_tcp) {
        if (rank == 0) RANKS_OK(world, ddp_send(world, data, 7, DDP_F32, w - 1, 3, NULL));
        if (rank == w - 1) RANKS_OK(world, ddp_recv(world, data, 7, DDP_F32, 0, 3, NULL));
    }
    RANKS_OK(world, ddp_trace_write(world, path));
    LINES(world, w, "\"ddp_all_reduce\"", "\"count\":40");
    LINES(world, w, "\"ddp_all_reduce\"", "\"count\":30");
    LINES(world, w, "{\"name\":\"a _name__ with more than 31 byt\"", "\"tid\":0");
    LINES(world, w, "{\"name\":\"ddp_wait\"", "\"ph\":\"X\"");
    LINES(world, w > 1 && !is_tcp ? 2 : 0, "\"cat\":\"message\"", "\"ph\":\"b\"");
    LINES(world, w > 1 && !is_tcp ? 2 : 0, "\"cat\":\"message\"", "\"ph\":\"e\"");
    LINES(world, w, "\"process_name\"", " rank ");
    /* written events are deleted */
    RANKS_OK(world, ddp_trace_write(world, path));
    LINES(world, 0, "\"ddp_all_reduce\"", "");
    return DDP_OK;
}

/* A ring of 4 keeps the newest 4 events. Only the last rank records. */
static ddp_result ring(ddp_group *world) {
    ddp_group *group;
    RANKS_OK(world, ddp_group_split(world, 0, 0, &group));
    if (ddp_rank(world) == ddp_world_size(world) - 1) RANKS_OK(group, ddp_trace_start(group, 4));
    for (int i = 0; i < 10; i++) {
        char name[24];
        snprintf(name, sizeof name, "span %d", i);
        ddp_trace_span(group, name, ddp_now());
    }
    RANKS_OK(group, ddp_trace_write(group, path));
    LINES(world, 4, "span", "\"ph\":\"X\"");
    LINES(world, 0, "span 5", "");
    LINES(world, 1, "span 6", "");
    LINES(world, 1, "span 9", "");
    ddp_group_destroy(group);
    return DDP_OK;
}

static ddp_result fails(ddp_group *world, ddp_result result, ddp_result expected, const char *text) {
    RANKS_CHECK(world, result == expected && strstr(ddp_last_error(), text), "%s \"%s\", not \"%s\"",
                ddp_result_name(result), ddp_last_error(), text);
    return DDP_OK;
}

/* The world stays usable after each, and no event is lost. */
static ddp_result bad_input(ddp_group *world) {
    char missing[96], fifo[96];
    int is_first = ddp_rank(world) == 0;
    snprintf(missing, sizeof missing, "%s.missing/trace.json", path);
    snprintf(fifo, sizeof fifo, "%s.fifo", path);
    ddp_trace_span(world, "kept", ddp_now());
    DDP_TRY(fails(world, ddp_trace_start(NULL, 0), DDP_ERR_INVALID, "ddp_trace_start"));
    DDP_TRY(fails(world, ddp_trace_start(world, -1), DDP_ERR_INVALID, "event_count=-1; use 0"));
    DDP_TRY(
        fails(world, ddp_trace_start(world, 0), DDP_ERR_INVALID, "recorded already")); /* since events() */
    DDP_TRY(fails(world, ddp_trace_write(NULL, path), DDP_ERR_INVALID, "group is NULL"));
    DDP_TRY(fails(world, ddp_trace_write(world, is_first ? NULL : path), DDP_ERR_INVALID, "path is NULL"));
    DDP_TRY(fails(world, ddp_trace_write(world, missing), DDP_ERR_SYSTEM, "No such file"));
    if (is_first) RANKS_CHECK(world, mkfifo(fifo, 0600) == 0, "mkfifo");
    ddp_result result = ddp_trace_write(world, fifo); /* a FIFO without a reader must not block */
    if (is_first) unlink(fifo);
    DDP_TRY(fails(world, result, DDP_ERR_SYSTEM, fifo));
    if (access("/dev/full", W_OK) == 0)
        DDP_TRY(fails(world, ddp_trace_write(world, "/dev/full"), DDP_ERR_SYSTEM, "not a regular file"));
    ddp_trace_span(NULL, "x", 0);
    ddp_trace_span(world, NULL, 0);
    RANKS_OK(world, ddp_trace_write(world, path));
    LINES(world, ddp_world_size(world), "kept", "");
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    ranks_mode mode = *(ranks_mode *)user;
    RANKS_RUN(world, events(world, mode == RANKS_TCP)); /* no messages */
    RANKS_RUN(world, ring(world));
    RANKS_RUN(world, bad_input(world));
    if (ddp_rank(world) == 0) printf("ok: %s W=%d\n", ranks_mode_name(mode), ddp_world_size(world));
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 4, 0};
    ranks_mode mode;
    snprintf(path, sizeof path, "/tmp/ddp_trace_%d.json", (int)getpid());
    int result = ranks_each(argc, argv, defaults, 60, &mode, rank_main) != 0;
    unlink(path);
    return result;
}

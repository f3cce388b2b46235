/*  fuzz_schedule.c - arbitrary text as a schedule: a libFuzzer harness.

    A schedule that parses is written, read and written again, and checked. An accepted one must run to its
    end in the simulator, can be lowered, is still valid then, takes the same time, and can be drawn. A
    separate harness: clang -fsanitize=fuzzer,address fuzz_schedule.c; the initial corpus is
    corpus_schedule/. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DDP_STATIC /* functions without a caller are not compiled, and no group is created here */
#define DDP_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../ddp_pipeline.h"

static char *text_of(const ddp_schedule *s, ddp_schedule_format format) {
    size_t size = 0, room;
    char *text;
    if (ddp_schedule_write(s, format, NULL, &size) != DDP_OK) abort();
    text = (char *)malloc(size);
    room = size;
    if (ddp_schedule_write(s, format, text, &room) != DDP_OK || room != size || strlen(text) + 1 != size)
        abort();
    return text;
}

/* All guarantees of an accepted schedule. */
static void use(const ddp_schedule *s) {
    ddp_schedule_report before = DDP_ZERO, after = DDP_ZERO;
    if (ddp_schedule_simulate(s, NULL, &before) != DDP_OK || !(before.span > 0) || before.peak_in_flight < 1)
        abort();
    for (unsigned parts = 1; parts < 16; parts++) {
        ddp_schedule *to;
        if (ddp_schedule_lower(&to, s, parts) != DDP_OK) continue; /* it has that part */
        if (ddp_schedule_check(to) != DDP_OK || ddp_schedule_simulate(to, NULL, &after) != DDP_OK) abort();
        if (!(parts & DDP_LOWER_MERGE)
            && (after.span != before.span || after.peak_in_flight != before.peak_in_flight))
            abort();
        ddp_schedule_destroy(to);
    }
    for (int format = DDP_SCHEDULE_TEXT; format <= DDP_SCHEDULE_TRACE; format++)
        free(text_of(s, (ddp_schedule_format)format));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *csv = (char *)malloc(size + 1), *once, *twice; /* of exact size */
    ddp_schedule *s, *again;
    memcpy(csv, data, size);
    csv[size] = 0;
    if (ddp_schedule_parse(&s, csv) == DDP_OK) {
        once = text_of(s, DDP_SCHEDULE_CSV);
        if (ddp_schedule_parse(&again, once) == DDP_OK) {
            twice = text_of(again, DDP_SCHEDULE_CSV);
            if (strcmp(once, twice) != 0) abort();
            free(twice);
            ddp_schedule_destroy(again);
        } else if (once[strspn(once, "\n")])
            abort(); /* a schedule of one idle cell becomes empty */
        if (ddp_schedule_check(s) == DDP_OK)
            use(s);
        else if (!strstr(ddp_last_error(), "ddp_schedule_check: "))
            abort();
        free(once);
        ddp_schedule_destroy(s);
    } else if (s || !strstr(ddp_last_error(), "ddp_schedule_parse: "))
        abort();
    free(csv);
    return 0;
}

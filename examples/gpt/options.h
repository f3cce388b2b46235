/*  options.h - the command line of a small example: a table of flags, what is wrong as one sentence, and --help.

        int ranks = 2, steps = 100;
        const option options[] = {{"--ranks", "N", &ranks, NULL, NULL, 1, 64, "ranks to start"}, ...};
        int status = options_read("mesh: trains on a grid of ranks", options, count, argc, argv, NULL);
        if (status >= 0) return status;                                   0 after --help, 1 after a sentence on stderr */
#ifndef DDP_EXAMPLE_OPTIONS_H
#define DDP_EXAMPLE_OPTIONS_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One of whole, number and text is set; whole without a value's name is a switch, which becomes 1. What they hold before is the default. */
typedef struct option {
    const char *name, *value; /* "--ranks", "N" */
    int *whole;
    double *number;
    const char **text;
    double least, most;
    const char *help;
} option;

static inline void options_help(const char *title, const option *options, int count) {
    printf("%s\n", title);
    for (int i = 0; i < count; i++) {
        const option *o = &options[i];
        char left[64];
        snprintf(left, sizeof left, "%s %s", o->name, o->value ? o->value : "");
        printf("  %-20s%s", left, o->help);
        if (o->value && o->whole)
            printf("; default %d\n", *o->whole);
        else if (o->number)
            printf("; default %g\n", *o->number);
        else
            printf(o->text && *o->text ? "; default %s\n" : "\n", o->text ? *o->text : "");
    }
    printf("  %-20sthis text\n", "--help");
}

/* 1 when the value is taken. */
static inline int option__set(const option *o, const char *value) {
    char *end;
    double number;
    if (o->text) return *o->text = value, value[0] != 0;
    errno = 0;
    number = o->number ? strtod(value, &end) : (double)strtoll(value, &end, 10);
    if (end == value || *end || errno || !(number >= o->least && number <= o->most)) return 0;
    if (o->number)
        *o->number = number;
    else
        *o->whole = (int)number;
    return 1;
}

/* -1 = go on; otherwise the status to leave with: 0 after --help, 1 after a sentence on stderr that begins with the title's first word. What begins
   with no dash goes to paths, which ends with NULL and holds argc entries; paths NULL = there is no such thing. */
static inline int options_read(const char *title, const option *options, int count, int argc, char **argv,
                               const char **paths) {
    int name_length = (int)strcspn(title, ": "), path_count = 0;
    for (int i = 1; i < argc; i++) {
        const char *equals = strchr(argv[i], '='), *value = equals ? equals + 1 : NULL;
        size_t length = equals ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        const option *o = NULL;
        if (!strcmp(argv[i], "--help")) return options_help(title, options, count), 0;
        if (argv[i][0] != '-' && paths) {
            paths[path_count++] = argv[i];
            continue;
        }
        for (int k = 0; k < count; k++)
            if (strlen(options[k].name) == length && !strncmp(argv[i], options[k].name, length))
                o = &options[k];
        if (!o)
            return fprintf(stderr, "%.*s: there is no flag %.60s; --help lists the flags\n", name_length,
                           title, argv[i]),
                   1;
        if (!o->value && equals)
            return fprintf(stderr, "%.*s: %s takes no value\n", name_length, title, o->name), 1;
        if (!o->value) {
            *o->whole = 1;
            continue;
        }
        if (!equals && i + 1 < argc) value = argv[++i];
        if (!value)
            return fprintf(stderr, "%.*s: %s needs a value; --help lists the flags\n", name_length, title,
                           o->name),
                   1;
        if (option__set(o, value)) continue;
        if (o->text)
            return fprintf(stderr, "%.*s: %s needs a value; --help lists the flags\n", name_length, title,
                           o->name),
                   1;
        return fprintf(stderr, "%.*s: %s %.60s: give a %snumber from %.15g to %.15g\n", name_length, title,
                       o->name, value, o->whole ? "whole " : "", o->least, o->most),
               1;
    }
    if (paths) paths[path_count] = NULL;
    return -1;
}

#endif /* DDP_EXAMPLE_OPTIONS_H */

/* MIT License: see LICENSE. */

/*  options.h - parses the command line of an example by a table of flags, and prints --help

        int ranks = 2, steps = 100;
        const option options[] = {{"--ranks", "N", &ranks, NULL, NULL, 1, 64, "ranks to start"}, ...};
        int status = options_read("mesh: trains on a grid of ranks", options, count, argc, argv, NULL);
        if (status >= 0) return status;    0 after --help, 1 after an error on stderr */
#ifndef DDP_EXAMPLE_OPTIONS_H
#define DDP_EXAMPLE_OPTIONS_H

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Exactly one of whole, number and text is set: the variable that receives the value. It holds the default. A
   flag with whole and without a value name is a switch, which sets the variable to 1. */
typedef struct option {
    const char *name, *value; /* "--ranks", and the value's name, "N"; NULL = a switch */
    int *whole;
    double *number;
    const char **text;
    double min, max;
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
        else if (o->text && *o->text)
            printf("; default %s\n", *o->text);
        else
            printf("\n");
    }
    printf("  %-20sprint this text\n", "--help");
}

/* Returns 1 if the value is valid. */
static inline int option__set(const option *o, const char *value) {
    char *end;
    double number;
    if (o->text) {
        *o->text = value;
        return value[0] != 0;
    }
    errno = 0;
    number = o->number ? strtod(value, &end) : (double)strtoll(value, &end, 10);
    if (end == value || *end || errno || !(number >= o->min && number <= o->max)) return 0;
    if (o->number)
        *o->number = number;
    else
        *o->whole = (int)number;
    return 1;
}

/* Prints "name: message" on stderr, where name is the first word of the title. Returns 1. */
static inline int option__error(const char *title, const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "%.*s: ", (int)strcspn(title, ": "), title);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    return 1;
}

/* Parses the command line. Returns -1 on success, otherwise the exit status of the program: 0 after --help, 1
   after an error, which is printed on stderr. Arguments without a dash are stored in paths, which has argc
   entries and ends with NULL. With paths NULL such an argument is an error. */
static inline int options_read(const char *title, const option *options, int count, int argc, char **argv,
                               const char **paths) {
    int path_count = 0;
    for (int i = 1; i < argc; i++) {
        const char *equals = strchr(argv[i], '='), *value = equals ? equals + 1 : NULL;
        size_t length = equals ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        const option *o = NULL;
        if (!strcmp(argv[i], "--help")) {
            options_help(title, options, count);
            return 0;
        }
        if (argv[i][0] != '-' && paths) {
            paths[path_count++] = argv[i];
            continue;
        }
        for (int k = 0; k < count; k++)
            if (strlen(options[k].name) == length && !strncmp(argv[i], options[k].name, length))
                o = &options[k];
        if (!o) return option__error(title, "unknown flag %.60s; --help lists the flags", argv[i]);
        if (!o->value && equals) return option__error(title, "%s takes no value", o->name);
        if (!o->value) {
            *o->whole = 1;
            continue;
        }
        if (!equals && i + 1 < argc) value = argv[++i];
        if (value && option__set(o, value)) continue;
        if (!value || o->text)
            return option__error(title, "%s needs a value; --help lists the flags", o->name);
        return option__error(title, "%s %.60s: give %s from %.15g to %.15g", o->name, value,
                             o->whole ? "an integer" : "a number", o->min, o->max);
    }
    if (paths) paths[path_count] = NULL;
    return -1;
}

#endif /* DDP_EXAMPLE_OPTIONS_H */

/* MIT License: see LICENSE. */

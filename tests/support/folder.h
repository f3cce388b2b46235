/*  folder.h - a separate folder for the files of a cmocka program: cmocka_run_group_tests(tests, make_folder,
   remove_folder). */
#ifndef DDP_TEST_FOLDER_H
#define DDP_TEST_FOLDER_H

#include "unit.h"
#include <unistd.h>

static char folder[64], path_of_text[256];

/* Until the next call. */
static inline const char *path_of(const char *name) {
    snprintf(path_of_text, sizeof path_of_text, "%s/%s", folder, name);
    return path_of_text;
}

/* Writes a file, and returns its path. */
static inline const char *put(const char *name, const void *bytes, size_t size_bytes) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size_bytes, file), size_bytes);
    assert_int_equal(fclose(file), 0);
    return path_of_text;
}

static inline int make_folder(void **state) {
    (void)state;
    snprintf(folder, sizeof folder, "files.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static inline int remove_folder(void **state) {
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

#endif /* DDP_TEST_FOLDER_H */

/*  fail_alloc.h - an allocator in which one allocation fails: number fail_at of this thread, counted from now on. */
#ifndef DDP_TEST_FAIL_ALLOC_H
#define DDP_TEST_FAIL_ALLOC_H

#include <stdlib.h>

static __thread int fail_at; /* counted down; 0 = none */
static __thread int failed;  /* 1 once it has failed */

static void *fail_alloc(size_t size_bytes, void *user) {
    (void)user;
    if (fail_at && --fail_at == 0) {
        failed = 1;
        return NULL;
    }
    return malloc(size_bytes);
}

static void fail_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

#endif /* DDP_TEST_FAIL_ALLOC_H */

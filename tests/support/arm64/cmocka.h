/*  cmocka.h - the part of cmocka that the unit tests use, for a machine without its library. The first
    failure ends the program. */
#ifndef DDP_TEST_ARM64_CMOCKA_H
#define DDP_TEST_ARM64_CMOCKA_H

#include <inttypes.h>

typedef struct cmocka_test {
    const char *name;
    void (*test)(void **);
    int (*setup)(void **), (*teardown)(void **);
} cmocka_test;
#define CMUnitTest cmocka_test /* struct CMUnitTest */

#define fail_msg(...) \
    (printf("%s:%d: ", __FILE__, __LINE__), printf(__VA_ARGS__), printf("\n"), fflush(stdout), exit(1))
#define print_error(...) fprintf(stderr, __VA_ARGS__)
#define fail() fail_msg("fail()")
#define cmocka_must(true_or, text) ((true_or) ? (void)0 : fail_msg("%s", text))
#define assert_true(x) cmocka_must(x, #x)
#define assert_false(x) cmocka_must(!(x), "not " #x)
#define assert_null(x) cmocka_must(!(x), #x " is NULL")
#define assert_non_null(x) cmocka_must(x, #x " is not NULL")
#define assert_ptr_equal(a, b) cmocka_must((const void *)(a) == (const void *)(b), #a " is " #b)
#define assert_ptr_not_equal(a, b) cmocka_must((const void *)(a) != (const void *)(b), #a " is not " #b)
#define assert_in_range(x, low, high)                                                      \
    cmocka_must((uintmax_t)(x) >= (uintmax_t)(low) && (uintmax_t)(x) <= (uintmax_t)(high), \
                #x " is from " #low " to " #high)
#define assert_memory_equal(a, b, size) cmocka_must(memcmp(a, b, size) == 0, #a " has the bytes of " #b)
#define assert_int_equal(a, b) cmocka_ints(__FILE__, __LINE__, #a " == " #b, (intmax_t)(a), (intmax_t)(b), 1)
#define assert_int_not_equal(a, b) \
    cmocka_ints(__FILE__, __LINE__, #a " != " #b, (intmax_t)(a), (intmax_t)(b), 0)
#define assert_string_equal(a, b) cmocka_strings(__FILE__, __LINE__, a, b)

static inline void cmocka_ints(const char *file, int line, const char *text, intmax_t a, intmax_t b,
                               int equal) {
    if ((a == b) == equal) return;
    printf("%s:%d: %s: %" PRIdMAX ", %" PRIdMAX "\n", file, line, text, a, b);
    exit(1);
}

static inline void cmocka_strings(const char *file, int line, const char *a, const char *b) {
    if (strcmp(a, b) == 0) return;
    printf("%s:%d: \"%s\" is not \"%s\"\n", file, line, a, b);
    exit(1);
}

#define cmocka_unit_test(f) \
    { #f, f, NULL, NULL }
#define cmocka_unit_test_setup_teardown(f, setup, teardown) \
    { #f, f, setup, teardown }
#define cmocka_run_group_tests(tests, setup, teardown) \
    cmocka_run(tests, sizeof(tests) / sizeof *(tests), setup, teardown)
#define cmocka_run_group_tests_name(name, tests, setup, teardown) \
    cmocka_run(tests, sizeof(tests) / sizeof *(tests), setup, teardown)

static inline int cmocka_run(const cmocka_test *tests, size_t count, int (*setup)(void **),
                             int (*teardown)(void **)) {
    void *group = NULL;
    if (setup && setup(&group) != 0) fail_msg("the setup of the tests failed");
    for (size_t i = 0; i < count; i++) {
        void *state = group;
        printf("%s\n", tests[i].name);
        fflush(stdout);
        if (tests[i].setup && tests[i].setup(&state) != 0) fail_msg("the setup failed");
        tests[i].test(&state);
        if (tests[i].teardown && tests[i].teardown(&state) != 0) fail_msg("the teardown failed");
    }
    if (teardown && teardown(&group) != 0) fail_msg("the teardown of the tests failed");
    printf("%zu tests passed\n", count);
    return count == 0;
}

#endif /* DDP_TEST_ARM64_CMOCKA_H */

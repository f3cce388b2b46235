/*  watchdog.h - ends a test that hangs, with all its children, and prints its name.

    Call watchdog_start(60) at the top of main, before any thread or rank exists. If the program still runs
    after 60 s (times DDP_TEST_SLOWDOWN under a sanitizer, and DDP_TEST_PATIENCE), a line on stderr names it,
    and its whole process group gets SIGKILL.

    The watcher is a separate process, not a thread and not a signal: a test can block every signal, hold
    every lock, or fork. It is forked twice, so it is not a child of the test: wait() and checks for remaining
    children never see it. It ends as soon as the test has ended. A test that a debugger started has none. */
#ifndef DDP_TEST_WATCHDOG_H
#define DDP_TEST_WATCHDOG_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef DDP_TEST_SLOWDOWN
#define DDP_TEST_SLOWDOWN 1 /* the build sets it for sanitizer flavours */
#endif
#ifndef DDP_TEST_PATIENCE
#define DDP_TEST_PATIENCE 3 /* for a slow or busy machine: a late limit costs nothing if no test hangs */
#endif

/* The name of the program from /proc, so that main does not have to pass argv[0]. */
static void watchdog_name(char *name, size_t size_bytes) {
    char path[256];
    char *slash;
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    slash = strrchr(path, '/');
    snprintf(name, size_bytes, "%s", slash ? slash + 1 : "test");
}

/* Whether the process has ended, reaped or not. A zombie counts as ended: `x=$(test 2>&1)` in a shell reaps
   the test only after the watcher, which shares its stderr, has left. */
static int watchdog_gone(pid_t test) {
    char path[64], text[256];
    char *state;
    size_t length;
    FILE *file;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)test);
    file = fopen(path, "r");
    if (!file) return 1;
    length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    state = strrchr(text, ')'); /* "pid (name) S ...": the name may hold anything */
    return !state || state[1] != ' ' || state[2] == 'Z' || state[2] == 'X';
}

/* Whether a debugger started this process: a breakpoint must not let the time run out. */
static int watchdog_is_traced(void) {
    char line[128];
    int tracer = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "TracerPid: %d", &tracer) == 1) break;
    if (file) fclose(file);
    return tracer != 0;
}

/* The watcher: polls the test every 50 ms, which costs nothing measurable, works on every kernel, and cannot
   be blocked. */
static void watchdog_watch(pid_t test, int seconds, const char *name) {
    struct timespec pause;
    struct timespec start, now;
    char line[256];
    int length;
    pause.tv_sec = 0;
    pause.tv_nsec = 50 * 1000 * 1000;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        if (watchdog_gone(test)) _exit(0);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)(now.tv_sec - start.tv_sec) + (double)(now.tv_nsec - start.tv_nsec) * 1e-9 >= seconds)
            break;
        nanosleep(&pause, NULL);
    }
    length = snprintf(line, sizeof line,
                      "watchdog: %s (pid %d) still runs after %d s; killing its process group\n", name,
                      (int)test, seconds);
    if (write(2, line, (size_t)length) < 0) { /* stderr is closed: kill all the same */
    }
    kill(-test, SIGKILL);
    _exit(0);
}

/* Called once, by the one process in which main starts. The test then leads its own process group, so that
   the kill cannot reach the runner. It dies with the runner instead (PR_SET_PDEATHSIG), also on Ctrl-C. */
static void watchdog_start(int seconds) {
    char name[128];
    pid_t test = getpid(), child;
    if (watchdog_is_traced()) return;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    watchdog_name(name, sizeof name);
    fflush(NULL);
    child = fork();
    if (child == 0) {
        if (fork() != 0) _exit(0);
        setsid(); /* out of the group that it kills */
        prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
        /* only the test keeps stdout open: a reader of the pipe sees its end when the test ends */
        close(0);
        close(1);
        watchdog_watch(test, seconds * DDP_TEST_SLOWDOWN * DDP_TEST_PATIENCE, name);
    }
    if (child > 0) {
        int status;
        while (waitpid(child, &status, 0) < 0) {
        }
    } else {
        fprintf(stderr, "watchdog: %s runs without one, fork failed\n", name);
    }
}

#endif /* DDP_TEST_WATCHDOG_H */

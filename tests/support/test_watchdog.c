/* The watchdog ends a test that hangs, and its children, but no other process. A test that ends in time is
   unaffected. */
#define _GNU_SOURCE
#undef DDP_TEST_SLOWDOWN
#define DDP_TEST_SLOWDOWN 1
#define DDP_TEST_PATIENCE 1
#include <errno.h>
#include <fcntl.h>
#include <poll.h>

#include "watchdog.h"

/* Runs body in a child with a watchdog of seconds, its stderr into text; returns its wait status. A
   grandchild started by the body holds alive open, so the end of that pipe shows that no process of the group
   is left. */
static int run(void (*body)(void), int seconds, char *text, size_t size_bytes) {
    int error_pipe[2], alive[2], status, left = 0;
    size_t length = 0;
    ssize_t n;
    struct pollfd wait_for;
    pid_t child;
    if (pipe(error_pipe) || pipe2(alive, O_CLOEXEC)) return -1;
    child = fork();
    if (child == 0) {
        dup2(error_pipe[1], 2);
        close(error_pipe[0]);
        close(error_pipe[1]);
        close(alive[0]);
        watchdog_start(seconds);
        body();
        _exit(0);
    }
    close(error_pipe[1]);
    close(alive[1]);
    /* As a shell does in x=$(test 2>&1): everything is read before the child is reaped. */
    while (length + 1 < size_bytes && (n = read(error_pipe[0], text + length, size_bytes - 1 - length)) > 0)
        length += (size_t)n;
    text[length] = 0;
    close(error_pipe[0]);
    wait_for.fd = alive[0];
    wait_for.events = POLLIN;
    if (poll(&wait_for, 1, 20000) != 1 || !(wait_for.revents & POLLHUP)) {
        fprintf(stderr, "a process of the killed test is left\n");
        left = 1;
    }
    close(alive[0]);
    return waitpid(child, &status, 0) == child && !left ? status : -1;
}

static void quick(void) {
    /* The watcher is not a child of this process. */
    if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD) _exit(3);
}

static void hang_with_children(void) {
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    if (fork() == 0 && fork() == 0)
        for (;;) pause();
    for (;;) pause();
}

int main(void) {
    char text[512];
    struct timespec start, end;
    int status;

    clock_gettime(CLOCK_MONOTONIC, &start);
    status = run(quick, 40, text, sizeof text);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (status != 0 || text[0]) return fprintf(stderr, "quick: status %d, text: %s\n", status, text), 1;
    if (end.tv_sec - start.tv_sec > 15) return fprintf(stderr, "the watcher stays after its test\n"), 1;

    status = run(hang_with_children, 1, text, sizeof text);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
        return fprintf(stderr, "hang: status %d\n", status), 1;
    if (!strstr(text, "watchdog: support.watchdog") || !strstr(text, "after 1 s"))
        return fprintf(stderr, "text: %s\n", text), 1;
    puts("a hanging test and its children are killed, one that ends is not");
    return 0;
}

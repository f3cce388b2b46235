/*  test_echo.c - a rank that receives its own hello has not connected to rank 0.

    A socket that connects to a port of its own machine, on which no process listens yet, can get that very
    port and is then connected to itself. A service that echoes looks the same. The rank used its own hello as
    the message that all ranks are present, then its own data as rank 0's answer, and read far past its
    end. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/ports.h"

#include <poll.h>
#include <sys/socket.h>

enum { ECHOES = 3 };

static pid_t start_rank(int rank, int port, int listener) {
    pid_t pid = fork();
    seen *s = &stage_shared->rank[rank];
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    int32_t sum = 1;
    char url[64];
    if (pid != 0) return pid;
    if (listener >= 0) close(listener);
    machine_salt = rank + 1;
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    desc.init_method = url;
    desc.rank = rank;
    desc.world_size = 2;
    desc.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
    s->first = ddp_group_create(&world, &desc);
    if (s->first == DDP_OK) s->first = ddp_all_reduce(world, &sum, &sum, 1, DDP_I32, DDP_OP_SUM, NULL);
    snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
    s->done = sum == 2;
    ddp_group_destroy(world);
    _exit(0);
}

/* Echoes everything to one connection. */
static void echo_once(int listener) {
    struct pollfd visitor = {listener, POLLIN, 0};
    int fd = poll(&visitor, 1, 20000 * DDP_TEST_SLOWDOWN) == 1 ? accept(listener, NULL, NULL) : -1;
    unsigned char bytes[1024];
    ssize_t n;
    EXPECT(fd >= 0, "no rank connected: %s", strerror(errno));
    while (fd >= 0 && (n = recv(fd, bytes, sizeof bytes, 0)) > 0)
        (void)!send(fd, bytes, (size_t)n, MSG_NOSIGNAL);
    close(fd);
}

int main(void) {
    int listener, port;
    pid_t pids[2];
    faults_start(50);
    faults_begin("an echo at rank 0's port");
    port = some_ports(1);
    listener = inner.tcp_listen("127.0.0.1", port);
    EXPECT(listener >= 0, "%s", strerror(errno));
    pids[1] = start_rank(1, port, listener);
    for (int i = 0; i < ECHOES; i++) echo_once(listener);
    close(listener);
    pids[0] = start_rank(0, port, -1);
    for (int r = 0; r < 2; r++) {
        const seen *s = &stage_shared->rank[r];
        waitpid(pids[r], NULL, 0);
        EXPECT(s->done && s->first == DDP_OK, "rank %d got %s '%s'", r,
               s->done ? ddp_result_name(s->first) : "killed, or a wrong sum", s->text);
    }
    return faults_end();
}

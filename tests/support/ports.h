/*  ports.h - TCP ports that are reserved for a test until it and all its children have ended.

    A port that is free now can belong to another test, or to the local end of a connection, a moment later:
    the system assigns those from the range in /proc. So ports are taken below that range, in blocks. An
    abstract socket claims a block. It belongs to the network namespace, as ports do, is inherited by forked
    children, and ends with the last of them. Tests of other checkouts and users claim other blocks. A port on
    which a service listens is skipped.

    Call ports_claim() at the top of main, before open files are counted and ranks are forked. Otherwise the
    first some_ports() calls it. */
#ifndef DDP_TEST_PORTS_H
#define DDP_TEST_PORTS_H

#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    PORTS_IN_BLOCK = 128,
    PORTS_FROM = 10240,
    PORTS_TO = 20000 /* SLURM jobs without a port have the next 10,000 */
};
/* of the block: its first port, and how many were returned */
static int ports_first, ports_given;
static int ports_claimed_by = -1; /* a descriptor */

/* Ports for tests: from the return value up to *end. If the system's range leaves none below, they are above
   it. */
static int ports_range(int *end) {
    int low = 32768, high = 60999;
    FILE *file = fopen("/proc/sys/net/ipv4/ip_local_port_range", "r");
    if (file && fscanf(file, "%d %d", &low, &high) != 2) low = 32768, high = 60999;
    if (file) fclose(file);
    *end = low < PORTS_TO ? low : PORTS_TO;
    if (*end >= PORTS_FROM + 8 * PORTS_IN_BLOCK) return PORTS_FROM;
    *end = 65536;
    if (high <= 65536 - 8 * PORTS_IN_BLOCK) return high + 1;
    *end = PORTS_TO; /* all blocks are taken: use one anyway, since tests rarely meet */
    return PORTS_FROM;
}

/* Claims a block for this process and its children. Returns 0, with a line on stderr, if none is free. */
static inline int ports_claim(void) {
    int end, from = ports_range(&end), blocks = (end - from) / PORTS_IN_BLOCK,
             fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    for (int i = 0; fd >= 0 && i < blocks; i++) {
        struct sockaddr_un name;
        int first = from + ((int)getpid() + i) % blocks * PORTS_IN_BLOCK, length;
        memset(&name, 0, sizeof name);
        name.sun_family = AF_UNIX;
        length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ddp tests: ports from %d", first);
        if (bind(fd, (struct sockaddr *)&name,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length))
            != 0)
            continue;
        ports_first = first;
        ports_given = 0;
        ports_claimed_by = fd;
        return 1;
    }
    if (fd >= 0) close(fd);
    fprintf(stderr, "ports.h: no block of ports is left from %d to %d\n", from, end - 1);
    return 0;
}

/* Whether no process listens on the port, at any address. */
static int ports_free(int port) {
    static const int families[2] = {AF_INET6, AF_INET};
    for (int i = 0; i < 2; i++) {
        struct sockaddr_in6 at6;
        struct sockaddr_in at;
        int fd = socket(families[i], SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, error = 0;
        if (fd < 0) continue; /* a machine without it */
        memset(&at6, 0, sizeof at6);
        memset(&at, 0, sizeof at);
        at6.sin6_family = AF_INET6, at6.sin6_port = htons((uint16_t)port);
        at.sin_family = AF_INET, at.sin_port = htons((uint16_t)port);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (i == 0) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
        if (bind(fd, i ? (struct sockaddr *)&at : (struct sockaddr *)&at6, i ? sizeof at : sizeof at6) != 0
            || listen(fd, 1) != 0)
            error = errno;
        close(fd);
        if (error == EADDRINUSE) return 0;
    }
    return 1;
}

/* The first of count successive ports that were not returned before. 0 if none are left. */
static inline int some_ports(int count) {
    if (!ports_first && !ports_claim()) return 0;
    for (int run = 0; ports_given < PORTS_IN_BLOCK;) {
        run = ports_free(ports_first + ports_given++) ? run + 1 : 0;
        if (run == count) return ports_first + ports_given - count;
    }
    fprintf(stderr, "ports.h: no %d ports in a row are left of those from %d on\n", count, ports_first);
    return 0;
}

/* Whether IPv6 works on this machine; prints a line on stdout if not. */
static inline int ports_have_ipv6(void) {
    struct sockaddr_in6 at;
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), have;
    memset(&at, 0, sizeof at);
    at.sin6_family = AF_INET6;
    at.sin6_addr.s6_addr[15] = 1;
    have = fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0;
    if (fd >= 0) close(fd);
    if (!have) printf("no ::1 here: cases of IPv6 are left out\n");
    return have;
}

#endif /* DDP_TEST_PORTS_H */

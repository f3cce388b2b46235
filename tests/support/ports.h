/*  ports.h - TCP ports that are a test's own until it ends, with all its children.

    A port that was free a moment ago may be another test's by now, or the local end of any connection: the system gives those out from a range that
    /proc tells. So ports are taken below that range, in blocks. A block is claimed by an abstract socket, which belongs to the network namespace as
    ports do, is held by whoever was forked since, and goes with the last of them: tests of other checkouts and users claim other blocks. A service that
    listens there all the same is passed over.

    Call ports_claim() at the top of main, before open files are counted and ranks are forked; otherwise the first some_ports() does. */
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

enum { PORTS_IN_BLOCK = 128, PORTS_FROM = 10240, PORTS_TO = 20000 /* SLURM jobs without a port have the next 10,000 */ };
static int ports_first, ports_given; /* of the block: its first port, and how many from there on have been given out */
static int ports_claimed_by = -1;    /* a descriptor */

/* Ports that tests may have: from the return value up to *end. Where the system's own range leaves nothing below, they are above it. */
static int ports_range(int *end) {
    int low = 32768, high = 60999;
    FILE *file = fopen("/proc/sys/net/ipv4/ip_local_port_range", "r");
    if (file && fscanf(file, "%d %d", &low, &high) != 2) low = 32768, high = 60999;
    if (file) fclose(file);
    *end = low < PORTS_TO ? low : PORTS_TO;
    if (*end >= PORTS_FROM + 8 * PORTS_IN_BLOCK) return PORTS_FROM;
    *end = 65536;
    if (high <= 65536 - 8 * PORTS_IN_BLOCK) return high + 1;
    *end = PORTS_TO; /* it takes all: better than chance still, since tests do not meet each other */
    return PORTS_FROM;
}

/* Claims a block for this process and those that it forks; 0 and a line on stderr when there is none. */
static inline int ports_claim(void) {
    int end, from = ports_range(&end), blocks = (end - from) / PORTS_IN_BLOCK, fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    for (int i = 0; fd >= 0 && i < blocks; i++) {
        struct sockaddr_un name;
        int first = from + ((int)getpid() + i) % blocks * PORTS_IN_BLOCK, length;
        memset(&name, 0, sizeof name);
        name.sun_family = AF_UNIX;
        length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ddp tests: ports from %d", first);
        if (bind(fd, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)) != 0) continue;
        ports_first = first;
        ports_given = 0;
        ports_claimed_by = fd;
        return 1;
    }
    if (fd >= 0) close(fd);
    fprintf(stderr, "ports.h: no block of ports is left from %d to %d\n", from, end - 1);
    return 0;
}

/* Whether nobody listens there, at any address. */
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
        if (bind(fd, i ? (struct sockaddr *)&at : (struct sockaddr *)&at6, i ? sizeof at : sizeof at6) != 0 || listen(fd, 1) != 0) error = errno;
        close(fd);
        if (error == EADDRINUSE) return 0;
    }
    return 1;
}

/* The first of count ports in a row that are this test's now, given to nobody before; 0 when none are left. */
static inline int some_ports(int count) {
    if (!ports_first && !ports_claim()) return 0;
    for (int run = 0; ports_given < PORTS_IN_BLOCK;) {
        run = ports_free(ports_first + ports_given++) ? run + 1 : 0;
        if (run == count) return ports_first + ports_given - count;
    }
    fprintf(stderr, "ports.h: no %d ports in a row are left of those from %d on\n", count, ports_first);
    return 0;
}

/* Whether this machine reaches itself by IPv6; a line on stdout says when it does not. */
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

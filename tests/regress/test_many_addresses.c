/* test_many_addresses.c - rank 0 of a rendezvous by file, and of a group created by a split over TCP,
   publishes its addresses. There was room for about 13. A machine with more networks, such as bridges for
   containers, left the others out, and ranks that needed one of those waited until the timeout. Here the only
   reachable address follows 40 others. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

enum { OTHERS = 40 };

/* The addresses of the machine: no rank can connect to a multicast group. */
int getifaddrs(struct ifaddrs **out) {
    static struct sockaddr_storage addresses[OTHERS + 1];
    static struct ifaddrs list[OTHERS + 1];
    for (int i = 0; i <= OTHERS; i++) {
        struct sockaddr_in *at = (struct sockaddr_in *)(void *)&addresses[i];
        at->sin_family = AF_INET;
        at->sin_addr.s_addr = htonl(i < OTHERS ? 0xefffff64u + (unsigned)i : 0x7f000001u);
        list[i].ifa_addr = (struct sockaddr *)at;
        list[i].ifa_next = i < OTHERS ? &list[i + 1] : NULL;
    }
    *out = list;
    return 0;
}

void freeifaddrs(struct ifaddrs *list) { (void)list; }

static ddp_result rank_main(ddp_group *world, void *user) {
    ddp_group *child;
    int64_t rank = ddp_rank(world), sum = 0;
    (void)user;
    RANKS_OK(world, ddp_group_split(world, rank == 1, 0, &child));
    RANKS_OK(child, ddp_all_reduce(child, &rank, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
    RANKS_CHECK(world, sum == (rank == 1 ? 1 : 5), "the sum is %d", (int)sum);
    ddp_group_destroy(child);
    return DDP_OK;
}

int main(void) {
    watchdog_start(50);
    ddp_result result = ranks_run(RANKS_TCP, 4, 10000 * DDP_TEST_SLOWDOWN, rank_main, NULL);
    if (result != DDP_OK)
        return fprintf(stderr, "FAIL %s: %s\n", ddp_result_name(result), ddp_last_error()), 1;
    printf("ok\n");
    return 0;
}

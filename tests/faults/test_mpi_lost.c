/*  test_mpi_lost.c - a rank is killed under mpirun. If mpirun leaves the others alive, each gets an error
    that names it.

    test_mpi_lost               starts mpirun for each case and counts the ranks with the right result
    test_mpi_lost CASE          the program that mpirun starts */
#include "../../ddp.h"
#include "../support/ranks.h"

#include <signal.h>

enum { W = 4, VICTIM = 3, BIG = 300000 };
static const struct {
    const char *name;
    int block;
    ddp_result want;
} cases[] = {
    {"barrier", 64, DDP_ERR_PEER_LOST},
    {"barrier", 2, DDP_ERR_PEER_LOST},
    {"training", 64, DDP_ERR_PEER_LOST},
    {"training", 2, DDP_ERR_PEER_LOST},
    {"recv", 2, DDP_ERR_PEER_LOST},
    {"async", 2, DDP_ERR_PEER_LOST},
    {"any", 64, DDP_ERR_PEER_LOST},
    {"barrier", 1, DDP_ERR_TIMEOUT}, /* a whole machine is gone: no process there can report it */
};

static ddp_result wait_somehow(ddp_group *g, const char *how, int dies) {
    static float data[BIG];
    ddp_work work = DDP_ZERO;
    ddp_result result = DDP_OK;
    if (strcmp(how, "training") == 0 || strcmp(how, "any") == 0) {
        for (int i = 0; result == DDP_OK; i++) {
            if (dies && i == 5) raise(SIGKILL);
            result = ddp_all_reduce(g, data, data, BIG, DDP_F32, DDP_OP_AVG, NULL);
        }
        return result;
    }
    if (dies) raise(SIGKILL);
    if (strcmp(how, "recv") == 0) return ddp_recv(g, data, BIG, DDP_F32, VICTIM, 0, NULL);
    if (strcmp(how, "barrier") == 0) return ddp_barrier(g);
    result = ddp_all_reduce(g, data, data, BIG, DDP_F32, DDP_OP_SUM, &work);
    return result == DDP_OK ? ddp_wait(g, &work) : result;
}

static int rank_main(const char *how, ddp_result want) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *g;
    ddp_result result;
    const char *missing;
    int rank;
    desc.init_method = "mpi://";
    desc.timeout_ms = want == DDP_ERR_TIMEOUT ? 8000 : 60000;
    desc.order = strcmp(how, "any") == 0 ? DDP_ORDER_ANY : DDP_ORDER_TREE;
    result = ddp_group_create(&g, &desc);
    if (result == DDP_OK) result = ddp_barrier(g);
    if (result != DDP_OK) {
        printf("FAIL before: %s\n", ddp_last_error());
        return 1;
    }
    rank = ddp_rank(g);
    result = wait_somehow(g, how, rank == VICTIM);
    missing = strstr(ddp_last_error(), "missing: rank "); /* and ranks that stand still at this moment */
    if (result == want && (strstr(ddp_last_error(), ": rank 3") || (missing && strchr(missing, '3'))))
        printf("content: %s\n", ddp_last_error());
    else
        printf("FAIL %s: %s\n", ddp_result_name(result), ddp_last_error());
    result = ddp_barrier(g);
    if (result != DDP_ERR_POISONED)
        printf("FAIL afterwards %s: %s\n", ddp_result_name(result), ddp_last_error());
    fflush(stdout);
    ddp_group_destroy(g);
    _exit(0); /* MPI cannot be finalised without the dead rank */
}

int main(int argc, char **argv) {
    int failures = 0;
    watchdog_start(argc > 1 ? 60 : 170);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1) return rank_main(cases[atoi(argv[1])].name, cases[atoi(argv[1])].want);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[800], line[900], block[16];
        int content = 0, wrong = 0;
        FILE *out;
        snprintf(block, sizeof block, "%d", cases[i].block);
        setenv("DDP_TEST_BLOCK", block, 1);
        snprintf(command, sizeof command, "mpirun --enable-recovery -n %d '%s' %d 2>&1", W, argv[0], (int)i);
        out = popen(command, "r");
        while (out && fgets(line, sizeof line, out)) {
            content += strncmp(line, "content: ", 9) == 0;
            wrong += strncmp(line, "FAIL", 4) == 0;
            printf("%s block=%d | %s", cases[i].name, cases[i].block, line);
        }
        if (out) pclose(out);
        if (content == W - 1 && !wrong) continue;
        printf("FAIL %s block=%d: %d of %d ranks are content\n", cases[i].name, cases[i].block, content,
               W - 1);
        failures++;
    }
    return failures != 0;
}

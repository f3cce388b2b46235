/*  test_stopped_elsewhere.c - a rank of another machine that stops or dies costs one timeout, not one per
    group.

    Ranks of one machine mark such a rank in shared memory. Over the tcp and mpi backends nothing was marked:
    each further group with that rank waited for a timeout of its own, and so did each split and the calls
    inside a destroy. Now all groups that descend from one handle of the world share a record of lost ranks.
    Failures carry it to the other machines. Groups without the rank stay usable.

    test_stopped_elsewhere             starts the ranks of each case: over tcp, or with DDP_USE_MPI by mpirun
    test_stopped_elsewhere FILE CASE   started by mpirun */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/ports.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

enum { W = 4, TIMEOUT_MS = 4000 };

static const struct {
    const char *name;
    int block; /* ranks of a machine */
    int victim, signal, messages;
    ddp_result want;
} cases[] = {
#if defined(DDP_USE_MPI)
    {"mpi 4by2", 2, 3, SIGSTOP, 0, DDP_ERR_TIMEOUT},
    {"mpi 4by1", 1, 3, SIGSTOP, 0, DDP_ERR_TIMEOUT},
    {"mpi 4by1, a chain of receives", 1, 3, SIGSTOP, 1, DDP_ERR_TIMEOUT},
    {"mpi 4by2, killed", 2, 3, SIGKILL, 0, DDP_ERR_PEER_LOST},
    /* No process of its machine is left to report it. */
    {"mpi 4by1, killed", 1, 3, SIGKILL, 0, DDP_ERR_TIMEOUT},
#else
    {"tcp", 1, 3, SIGSTOP, 0, DDP_ERR_TIMEOUT},
    {"tcp, rank 0", 1, 0, SIGSTOP, 0, DDP_ERR_TIMEOUT},
    {"tcp, killed", 1, 3, SIGKILL, 0, DDP_ERR_PEER_LOST},
#endif
};

/* Shared by the ranks and the process that starts them. */
typedef struct board {
    pid_t pid[W];
    double start_at[W], end_at[W];
    int finished, failures;
} board;
static board *shared;

#define NEED(condition)                                                                    \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            say(&shared->failures);                                                        \
            fprintf(stderr, "FAIL line %d, rank %d: %s: %s\n", __LINE__, rank, #condition, \
                    ddp_last_error());                                                     \
        }                                                                                  \
    } while (0)

static ddp_result make_reducer(ddp_group *group, ddp_reducer **out, ddp_param *param, float *values) {
    ddp_reducer_desc desc = DDP_ZERO;
    memset(param, 0, sizeof *param);
    param->name = "w";
    param->value.data = values;
    param->value.dtype = DDP_F32;
    param->value.ndim = 1;
    param->value.shape[0] = 1000;
    desc.params = param;
    desc.param_count = 1;
    return ddp_reducer_create(out, group, &desc);
}

/* A rank, up to the destroy of its world. */
static void run(ddp_group *world, int number) {
    int rank = ddp_rank(world), victim = cases[number].victim, to_victim = rank / 2 == victim / 2;
    ddp_result want = cases[number].want, result;
    static float values[2][1000];
    float x = 1;
    ddp_group *all, *pair, *axis, *later = NULL;
    ddp_reducer *first, *second;
    ddp_param params[2];
    char wanted[32];
    NEED(ddp_group_split(world, 0, 0, &all) == DDP_OK);
    NEED(ddp_group_split(world, rank / 2, 0, &pair) == DDP_OK);
    NEED(ddp_group_split(world, rank % 2, 0, &axis) == DDP_OK);
    NEED(make_reducer(world, &first, &params[0], values[0]) == DDP_OK);
    NEED(make_reducer(all, &second, &params[1], values[1]) == DDP_OK);
    shared->pid[rank] = getpid();
    NEED(ddp_barrier(world) == DDP_OK);
    if (rank == victim) raise(cases[number].signal);
    shared->start_at[rank] = ddp_now();
    if (cases[number].messages)
        result = ddp_recv(world, &x, 1, DDP_F32, rank + 1, 7, NULL);
    else
        result = ddp_all_reduce(world, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL);
    NEED(result == want);
    printf("rank %d: %.2f timeouts: %s\n", rank, (ddp_now() - shared->start_at[rank]) * 1e3 / TIMEOUT_MS,
           ddp_last_error());
    result = ddp_barrier(all);
    NEED(result == want || result == DDP_ERR_POISONED);
    snprintf(wanted, sizeof wanted, "(world rank %d)", victim);
    if (!strstr(ddp_last_error(), wanted) && cases[number].messages) {
        /* Of the chain only rank 2 waits for the victim. If another rank's timeout reaches rank 2 before its
           own, the lost rank is still unknown. This barrier detects it, after a second timeout. */
        snprintf(wanted, sizeof wanted, "missing: rank %d", victim);
    }
    NEED(strstr(ddp_last_error(), wanted));
    result = ddp_barrier(pair);
    NEED(to_victim ? result == want : result == DDP_OK);
    NEED(ddp_group_split(world, rank, 0, &later) == DDP_ERR_POISONED && !later);
    NEED(ddp_group_split(all, 0, 0, &later) == DDP_ERR_POISONED && !later);
    NEED((ddp_barrier(axis) == DDP_OK) == (rank % 2 != victim % 2));
    ddp_reducer_destroy(second);
    ddp_reducer_destroy(first);
    ddp_group_destroy(axis);
    ddp_group_destroy(pair);
    ddp_group_destroy(all);
    ddp_group_destroy(world);
    shared->end_at[rank] = ddp_now();
}

static void check(int number) {
    double worst = 0, first = 0;
    for (int r = 0; r < W; r++) {
        if (r == cases[number].victim) continue;
        if (first == 0 || shared->start_at[r] < first) first = shared->start_at[r];
        if (shared->end_at[r] > worst) worst = shared->end_at[r];
    }
    printf("%s: %.2f timeouts from the first wait to the end\n", cases[number].name,
           (worst - first) * 1e3 / TIMEOUT_MS);
    EXPECT(shared->finished == W - 1, "%d ranks have finished", shared->finished);
    EXPECT(shared->failures == 0, "%d failures", shared->failures);
    EXPECT(worst - first < 2.6e-3 * TIMEOUT_MS * DDP_TEST_SLOWDOWN, "%.2f s, timeout_ms is %d", worst - first,
           TIMEOUT_MS);
}

#if defined(DDP_USE_MPI)
static int rank_main(const char *path, int number) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world;
    int fd = open(path, O_RDWR);
    shared = (board *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    desc.init_method = "mpi://";
    desc.timeout_ms = TIMEOUT_MS;
    if (shared == MAP_FAILED || ddp_group_create(&world, &desc) != DDP_OK) return 1;
    run(world, number);
    fflush(NULL);
    if (__atomic_add_fetch(&shared->finished, 1, __ATOMIC_SEQ_CST) == W - 1)
        kill(shared->pid[cases[number].victim], SIGKILL);
    _exit(0); /* MPI cannot be finalised without the stopped rank */
}

static void run_case(const char *program, int number) {
    char path[] = "/tmp/test_stopped_elsewhere.XXXXXX", command[800], block[16];
    int fd = mkstemp(path);
    EXPECT(fd >= 0 && ftruncate(fd, sizeof *shared) == 0, "%s", strerror(errno));
    shared = (board *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    snprintf(block, sizeof block, "%d", cases[number].block);
    setenv("DDP_TEST_BLOCK", block, 1);
    snprintf(command, sizeof command, "mpirun --enable-recovery -n %d '%s' %s %d 2>&1", W, program, path,
             number);
    fflush(NULL);
    if (system(command) != 0) printf("mpirun reports the killed rank\n");
    check(number);
    munmap(shared, sizeof *shared);
    close(fd);
    unlink(path);
}
#else
static int rank_main(const char *path, int number) {
    (void)path;
    return number;
}

static void run_case(const char *program, int number) {
    int port = some_ports(1), status;
    pid_t pid[W];
    (void)program;
    shared = (board *)ranks_shared(sizeof *shared);
    for (int r = 0; r < W; r++) {
        fflush(NULL);
        pid[r] = fork();
        if (pid[r] == 0) {
            char url[64];
            ddp_group_desc desc = DDP_ZERO;
            ddp_group *world = NULL;
            prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
            machine_salt = r + 1;
            snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
            desc.init_method = url;
            desc.rank = r;
            desc.world_size = W;
            desc.timeout_ms = TIMEOUT_MS;
            if (ddp_group_create(&world, &desc) == DDP_OK) run(world, number);
            say(&shared->finished);
            fflush(NULL);
            _exit(0);
        }
    }
    for (int r = 0; r < W; r++)
        if (r != cases[number].victim) waitpid(pid[r], &status, 0);
    kill(pid[cases[number].victim], SIGKILL);
    waitpid(pid[cases[number].victim], &status, 0);
    check(number);
}
#endif

int main(int argc, char **argv) {
    if (argc > 2) {
        watchdog_start(100);
        setvbuf(stdout, NULL, _IOLBF, 0);
        return rank_main(argv[1], atoi(argv[2]));
    }
    faults_start(230);
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        faults_begin(cases[i].name);
        run_case(argv[0], i);
    }
    return faults_end();
}

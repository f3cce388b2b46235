/*  test_thread_pools.c - the ranks of a launch together have one thread per core, also in libraries that were
    loaded before the ranks were forked.

    libgomp and OpenBLAS read OMP_NUM_THREADS when they are loaded. ddp_launch set it in the forked rank only:
    two ranks on two cores ran four threads. Built with the real libgomp, and with the real OpenBLAS
    (WITH_OPENBLAS) or with functions here that replace those of OpenBLAS, MKL and BLIS. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#include <omp.h>
#include <sched.h>
#if defined(WITH_OPENBLAS)
#include <cblas.h>
#else
static int openblas = 64, mkl = 64, blis = 64; /* threads */
void openblas_set_num_threads(int threads);
int openblas_get_num_threads(void);
void MKL_Set_Num_Threads(int threads);
int MKL_Get_Max_Threads(void);
void bli_thread_set_num_threads(int64_t threads);
int64_t bli_thread_get_num_threads(void);
void openblas_set_num_threads(int threads) { openblas = threads; }
int openblas_get_num_threads(void) { return openblas; }
void MKL_Set_Num_Threads(int threads) { mkl = threads; }
int MKL_Get_Max_Threads(void) { return mkl; }
void bli_thread_set_num_threads(int64_t threads) { blis = (int)threads; }
int64_t bli_thread_get_num_threads(void) { return blis; }
#endif

enum { POOLS = 4 };
static const char *const pool_names[POOLS] = {"OpenMP", "OpenBLAS", "MKL", "BLIS"};

typedef struct numbers {
    int pool[POOLS], team, tasks;
} numbers; /* team: threads that a parallel region has; tasks: of the process, after work */
static numbers *of_rank;

static void read_pools(int pool[POOLS]) {
    pool[0] = omp_get_max_threads();
    pool[1] = openblas_get_num_threads();
#if defined(WITH_OPENBLAS)
    pool[2] = pool[3] = 0;
#else
    pool[2] = mkl;
    pool[3] = blis;
#endif
}

/* Typical numerical work: a parallel region, and a matrix product that is large enough for all threads of a
   pool. */
static void work(numbers *n) {
    int team = 0;
#pragma omp parallel
    {
#pragma omp atomic
        team++;
    }
    n->team = team;
#if defined(WITH_OPENBLAS)
    enum { SIZE = 700 };
    double *a = (double *)calloc(3 * SIZE * SIZE, sizeof *a);
    if (a)
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, SIZE, SIZE, SIZE, 1.0, a, SIZE,
                    a + SIZE * SIZE, SIZE, 0.0, a + 2 * SIZE * SIZE, SIZE);
    free(a);
#endif
}

static int count_tasks(void) {
    DIR *folder = opendir("/proc/self/task");
    struct dirent *entry;
    int count = 0;
    while (folder && (entry = readdir(folder)) != NULL) count += entry->d_name[0] != '.';
    if (folder) closedir(folder);
    return count;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    numbers *n = &of_rank[ddp_rank(world)];
    (void)user;
    read_pools(n->pool);
    work(n);
    n->tasks = count_tasks();
    return ddp_barrier(world);
}

/* Runs two ranks; each pool must have want[pool] threads in them, and afterwards its earlier number. */
static void expect_threads(const char *scenario, ddp_launch_mode mode, int no_affinity,
                           const int want[POOLS]) {
    ddp_launch_desc desc = DDP_ZERO;
    int before[POOLS], after[POOLS];
    faults_begin(scenario);
    memset(of_rank, 0, 2 * sizeof *of_rank);
    read_pools(before);
    desc.world_size = 2;
    desc.mode = mode;
    desc.no_affinity = no_affinity;
    desc.group.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
    EXPECT(ddp_launch(&desc, rank_main, NULL) == DDP_OK, "%s", ddp_last_error());
    read_pools(after);
    for (int p = 0; p < POOLS; p++) {
        EXPECT(before[p] == after[p], "%s had %d threads before the launch and %d after it", pool_names[p],
               before[p], after[p]);
        for (int r = 0; r < 2; r++)
            EXPECT(of_rank[r].pool[p] == want[p], "rank %d: %s has %d threads, not %d", r, pool_names[p],
                   of_rank[r].pool[p], want[p]);
    }
    for (int r = 0; r < 2; r++) {
        EXPECT(of_rank[r].team == want[0], "rank %d: a parallel region has %d threads, not %d", r,
               of_rank[r].team, want[0]);
        if (mode == DDP_LAUNCH_PROCESSES && want[0] == 1 && want[1] == 1)
            EXPECT(of_rank[r].tasks == 1, "rank %d: its process has %d threads", r, of_rank[r].tasks);
    }
}

int main(void) {
    static const char *const variables[] = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS",
                                            "MKL_NUM_THREADS", "BLIS_NUM_THREADS"};
    int share, all[POOLS], want[POOLS];
    cpu_set_t cpus;
    for (int i = 0; i < 5; i++) {
        if (!getenv(variables[i])) continue;
        fprintf(stderr, "%s is set, for which the libraries were loaded: skipped\n", variables[i]);
        return 77;
    }
    faults_start(60);
    of_rank = (numbers *)ranks_shared(2 * sizeof *of_rank);
    sched_getaffinity(0, sizeof cpus, &cpus);
    share = CPU_COUNT(&cpus) / 2 ? CPU_COUNT(&cpus) / 2 : 1;
    read_pools(all);
    for (int p = 0; p < POOLS; p++) want[p] = all[p] < share ? all[p] : share;

    expect_threads("processes", DDP_LAUNCH_PROCESSES, 0, want);
    expect_threads("processes, once more", DDP_LAUNCH_PROCESSES, 0, want);
    expect_threads("threads", DDP_LAUNCH_THREADS, 0, want);
    expect_threads("no_affinity", DDP_LAUNCH_PROCESSES, 1, all);
    expect_threads("no_affinity, threads", DDP_LAUNCH_THREADS, 1, all);

    setenv("OMP_NUM_THREADS", "7",
           1); /* libraries that read it would have other numbers now; the pools here show no change */
    expect_threads("OMP_NUM_THREADS is the user's", DDP_LAUNCH_PROCESSES, 0, all);
    expect_threads("OMP_NUM_THREADS is the user's, threads", DDP_LAUNCH_THREADS, 0, all);
    EXPECT(strcmp(getenv("OMP_NUM_THREADS"), "7") == 0, "it is %s now", getenv("OMP_NUM_THREADS"));
    unsetenv("OMP_NUM_THREADS");

    setenv("OPENBLAS_NUM_THREADS", "7", 1);
    want[1] = all[1];
    expect_threads("OPENBLAS_NUM_THREADS is the user's", DDP_LAUNCH_PROCESSES, 0, want);
    unsetenv("OPENBLAS_NUM_THREADS");

#if !defined(WITH_OPENBLAS)
    openblas = mkl = blis = 1;
    want[1] = want[2] = want[3] = 1;
    expect_threads("the program itself has lowered the numbers", DDP_LAUNCH_PROCESSES, 0, want);
    EXPECT(share > 1 || (openblas == 1 && mkl == 1 && blis == 1), "a number was changed");
#endif
    return faults_end();
}

/*  test_launch.c - ddp_launch as a guest in another program: signals, other children, descriptors, buffered
    output, cores, restarts, idle ranks, and leftovers after its own process is killed. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#include <fcntl.h>

static ddp_result barriers_main(ddp_group *world, void *user) {
    for (int i = 0; i < *(int *)user; i++) RANKS_OK(world, ddp_barrier(world));
    return DDP_OK;
}

static ddp_result launch_barriers(int w) {
    int rounds = 3;
    return launch(RANKS_PROCESSES, w, 20000, barriers_main, &rounds);
}

//== a good guest ===========================================================================

static void test_many_launches(void) {
    faults_begin("60 launches have no leftovers");
    for (int i = 0; i < 60; i++) EXPECT(launch_barriers(2 + i % 3) == DDP_OK, "%s", ddp_last_error());
    for (int i = 0; i < 20; i++) {
        int rounds = 3;
        EXPECT(launch(RANKS_THREADS, 2 + i % 3, 20000, barriers_main, &rounds) == DDP_OK, "%s",
               ddp_last_error());
    }
}

static void on_signal(int number) { (void)number; }

static void test_signal_handlers_come_back(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGCHLD, SIGHUP, SIGPIPE, SIGUSR1};
    struct sigaction mine, now;
    sigset_t before, after;
    faults_begin("signal handlers and mask are as before");
    memset(&mine, 0, sizeof mine);
    mine.sa_handler = on_signal;
    for (int i = 0; i < 6; i++) sigaction(signals[i], &mine, NULL);
    sigprocmask(SIG_BLOCK, NULL, &before);
    EXPECT(launch_barriers(2) == DDP_OK, "%s", ddp_last_error());
    sigprocmask(SIG_BLOCK, NULL, &after);
    EXPECT(memcmp(&before, &after, 8) == 0, "the signal mask changed");
    for (int i = 0; i < 6; i++) {
        sigaction(signals[i], NULL, &now);
        EXPECT(now.sa_handler == on_signal, "signal %d has another handler", signals[i]);
        signal(signals[i], SIG_DFL);
    }
}

static void test_other_children_are_left_alone(void) {
    int status = 0;
    pid_t early, late;
    faults_begin("the caller's own children are not reaped");
    early = fork();
    if (early == 0) _exit(7);
    late = fork();
    if (late == 0) {
        ranks_sleep_us(1000000);
        _exit(8);
    }
    ranks_sleep_us(20000);
    {
        int rounds = 3;
        EXPECT(ranks_run(RANKS_PROCESSES, 3, 20000, barriers_main, &rounds) == DDP_OK, "%s",
               ddp_last_error());
    }
    EXPECT(waitpid(early, &status, 0) == early && WEXITSTATUS(status) == 7,
           "the caller's child was reaped by another process");
    EXPECT(waitpid(late, &status, 0) == late && WEXITSTATUS(status) == 8,
           "the caller's child was reaped or killed by another process");
}

static void test_ignored_sigchld(void) {
    faults_begin("SIGCHLD ignored by the caller"); /* the kernel reaps the children, so wait() returns none */
    signal(SIGCHLD, SIG_IGN);
    EXPECT(launch_barriers(2) == DDP_OK, "%s", ddp_last_error());
    signal(SIGCHLD, SIG_DFL);
}

static ddp_result print_main(ddp_group *world, void *user) {
    (void)user;
    printf("rank %d\n", ddp_rank(world)); /* stays in the buffer until the rank flushes */
    return DDP_OK;
}

static void test_buffered_output(void) {
    int out[2], saved = dup(1);
    char text[4096];
    size_t length = 0;
    ssize_t got;
    faults_begin("buffered output appears once");
    fflush(stdout);
    if (pipe(out) != 0) return;
    dup2(out[1], 1);
    setvbuf(stdout, NULL, _IOFBF, 4096);
    printf("before\n");
    {
        ddp_result result = ranks_run(RANKS_PROCESSES, 3, 20000, print_main, NULL);
        printf("after\n");
        fflush(stdout);
        dup2(saved, 1);
        close(saved), close(out[1]);
        EXPECT(result == DDP_OK, "%s", ddp_last_error());
    }
    while (length < sizeof text - 1 && (got = read(out[0], text + length, sizeof text - 1 - length)) > 0)
        length += (size_t)got;
    text[length] = 0;
    close(out[0]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    EXPECT(length == 7 + 3 * 7 + 6 && strncmp(text, "before\n", 7) == 0 && strstr(text, "rank 0\n")
               && strstr(text, "rank 1\n") && strstr(text, "rank 2\n") && strstr(text, "after\n"),
           "output is '%s'", text);
}

//== cores ==================================================================================

static int core_count(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[4096];
    int bits = 0;
    while (file && fgets(line, sizeof line, file))
        for (char *c = line + 13; strncmp(line, "Cpus_allowed:", 13) == 0 && *c; c++) {
            char digit[2] = {*c, 0};
            bits += __builtin_popcount((unsigned)strtoul(digit, NULL, 16));
        }
    if (file) fclose(file);
    return bits;
}

typedef struct cores {
    int seen[RANKS_MAX];
    char omp[RANKS_MAX][16], blas[RANKS_MAX][16];
} cores;

static ddp_result cores_main(ddp_group *world, void *user) {
    cores *c = (cores *)user;
    int rank = ddp_rank(world);
    const char *omp = getenv("OMP_NUM_THREADS"), *blas = getenv("OPENBLAS_NUM_THREADS");
    c->seen[rank] = core_count();
    snprintf(c->omp[rank], sizeof c->omp[rank], "%s", omp ? omp : "unset");
    snprintf(c->blas[rank], sizeof c->blas[rank], "%s", blas ? blas : "unset");
    __atomic_add_fetch(&stage_shared->counter, 1, __ATOMIC_SEQ_CST);
    return DDP_OK;
}

static void test_cores(void) {
    cores *c = (cores *)ranks_shared(sizeof *c);
    int all = core_count(), share = all / 2 ? all / 2 : 1;
    char want[16];
    ddp_launch_desc desc = DDP_ZERO;
    unsetenv("OMP_NUM_THREADS");
    unsetenv("OPENBLAS_NUM_THREADS");
    faults_begin("each rank gets its share of cores");
    EXPECT(launch(RANKS_PROCESSES, 2, 20000, cores_main, c) == DDP_OK, "%s", ddp_last_error());
    snprintf(want, sizeof want, "%d", share);
    for (int r = 0; r < 2; r++) {
        EXPECT(c->seen[r] >= 1 && c->seen[r] <= (all + 1) / 2, "rank %d of 2 may use %d of %d cores", r,
               c->seen[r], all);
        EXPECT(strcmp(c->omp[r], want) == 0 && strcmp(c->blas[r], want) == 0,
               "rank %d: OMP_NUM_THREADS %s, OPENBLAS_NUM_THREADS %s, wanted %s", r, c->omp[r], c->blas[r],
               want);
    }
    EXPECT(core_count() == all && !getenv("OMP_NUM_THREADS") && !getenv("RANK"),
           "the caller's own cores or environment changed");
    EXPECT(launch(RANKS_PROCESSES, 2 * all + 1, 20000, cores_main, c) == DDP_OK, "%s", ddp_last_error());
    for (int r = 0; r < 2 * all + 1; r++)
        EXPECT(c->seen[r] >= 1 && strcmp(c->omp[r], "1") == 0, "rank %d: %d cores, %s threads", r, c->seen[r],
               c->omp[r]);

    faults_begin("the user's settings are unchanged");
    setenv("OMP_NUM_THREADS", "5", 1);
    EXPECT(launch(RANKS_PROCESSES, 2, 20000, cores_main, c) == DDP_OK, "%s", ddp_last_error());
    EXPECT(strcmp(c->omp[1], "5") == 0, "OMP_NUM_THREADS %s", c->omp[1]);
    unsetenv("OMP_NUM_THREADS");

    faults_begin("no_affinity");
    desc.world_size = 2;
    desc.no_affinity = 1;
    EXPECT(ddp_launch(&desc, cores_main, c) == DDP_OK, "%s", ddp_last_error());
    EXPECT(c->seen[0] == all && strcmp(c->omp[0], "unset") == 0, "%d cores, %s threads", c->seen[0],
           c->omp[0]);

    faults_begin("world_size 0 is one rank per core");
    memset(&desc, 0, sizeof desc);
    EXPECT(ddp_launch(&desc, cores_main, c) == DDP_OK, "%s", ddp_last_error());
    EXPECT(stage_shared->counter == all, "%d ranks for %d cores", stage_shared->counter, all);
    munmap(c, sizeof *c);
}

//== idle ranks =============================================================================

/* All except rank 0 wait for a second; a wait must sleep. */
static ddp_result idle_main(ddp_group *world, void *user) {
    int what = *(int *)user;
    float x = 0;
    struct rusage before, after;
    double used, start;
    ddp_work work = DDP_ZERO;
    RANKS_OK(world, ddp_barrier(world));
    getrusage(RUSAGE_SELF, &before);
    start = ranks_now();
    if (ddp_rank(world) == 0) ranks_sleep_us(1000000);
    if (what == 0) RANKS_OK(world, ddp_barrier(world));
    if (what == 1) {
        RANKS_OK(world, ddp_all_reduce(world, &x, &x, 1, DDP_F32, DDP_OP_SUM, &work));
        RANKS_OK(world, ddp_wait(world, &work));
    }
    if (what == 2) {
        if (ddp_rank(world) == 0)
            for (int r = 1; r < ddp_world_size(world); r++)
                RANKS_OK(world, ddp_send(world, &x, 1, DDP_F32, r, 0, NULL));
        else
            RANKS_OK(world, ddp_recv(world, &x, 1, DDP_F32, 0, 0, NULL));
    }
    getrusage(RUSAGE_SELF, &after);
    used = (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec
                    - before.ru_stime.tv_sec)
           + 1e-6
                 * (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec + after.ru_stime.tv_usec
                            - before.ru_stime.tv_usec);
    stage_shared->numbers[ddp_rank(world)] = (int)(used / (ranks_now() - start) * 1e6);
    return DDP_OK;
}

static void test_idle_ranks_sleep(void) {
    static const char *const names[] = {"16 ranks, 15 wait 1 s in a barrier",
                                        "16 ranks, 15 wait 1 s for asynchronous work",
                                        "16 ranks, 15 wait 1 s for a message"};
    for (int what = 0; what < 3; what++) {
        const int *used = stage_shared->numbers + 1;
        /* Other work of the machine can be accounted to single ranks, but waits that spin make all of them
           busy. */
        int median = 0;
        faults_begin(names[what]);
        EXPECT(launch(RANKS_PROCESSES, 16, 20000, idle_main, &what) == DDP_OK, "%s", ddp_last_error());
        for (int r = 0; r < 15; r++) {
            int as_busy = 0;
            for (int other = 0; other < 15; other++) as_busy += used[other] >= used[r];
            if (as_busy >= 8 && used[r] > median) median = used[r];
        }
        printf("%s: half of the ranks used up to %.1f%% of a core\n", names[what], median * 1e-4);
        /* 15 that spin on two cores: 13% each. */
        EXPECT(median < 50000, "most of those that wait used %.1f%% of a core", median * 1e-4);
    }
}

//== failures ===============================================================================

static ddp_result restart_main(ddp_group *world, void *user) {
    int fail_attempts = *(int *)user, attempt;
    if (ddp_rank(world) == 0) __atomic_add_fetch(&stage_shared->counter, 1, __ATOMIC_SEQ_CST);
    RANKS_OK(world, ddp_barrier(world));
    attempt = __atomic_load_n(&stage_shared->counter, __ATOMIC_SEQ_CST);
    ddp_group *half;
    RANKS_OK(world, ddp_group_split(world, ddp_rank(world) % 2, 0, &half));
    RANKS_CHECK(world, ddp_group_attempt(world) == attempt - 1 && ddp_group_attempt(half) == attempt - 1,
                "attempt %d and %d of a split, wanted %d", ddp_group_attempt(world), ddp_group_attempt(half),
                attempt - 1);
    ddp_group_destroy(half);
    if (attempt > fail_attempts) return DDP_OK;
    int fails = ddp_rank(world) == ddp_world_size(world) / 2; /* rank 1 of 3, rank 0 of 1 */
    if (fails && attempt % 2) kill(getpid(), SIGKILL);
    if (fails) return ddp_fail(DDP_ERR_CORRUPT, "attempt %d failed", attempt);
    return ddp_barrier(world);
}

static void test_restarts(void) {
    static const struct {
        int ranks, failures, restarts;
        ddp_result want;
        int attempts;
    } table[] = {
        {3, 0, 3, DDP_OK, 1},
        {3, 1, 1, DDP_OK, 2},
        {3, 3, 3, DDP_OK, 4},
        {3, 2, 1, DDP_ERR_CORRUPT, 2},
        {3, 1, 0, DDP_ERR_PEER_LOST, 1},
        {3, 9, 2, DDP_ERR_PEER_LOST, 3},
        {1, 0, 1, DDP_OK, 1},
        {1, 2, 2, DDP_OK, 3},
        {1, 2, 1, DDP_ERR_CORRUPT, 2},
        {1, 9, 2, DDP_ERR_PEER_LOST, 3},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        ddp_launch_desc desc = DDP_ZERO;
        leftovers before = leftovers_now();
        int failures = table[i].failures;
        ddp_result result;
        faults_begin("max_restarts");
        desc.world_size = table[i].ranks;
        desc.max_restarts = table[i].restarts;
        desc.group.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
        result = ddp_launch(&desc, restart_main, &failures);
        EXPECT(result == table[i].want, "%d failures, %d restarts: %s '%s'", failures, table[i].restarts,
               ddp_result_name(result), ddp_last_error());
        EXPECT(stage_shared->counter == table[i].attempts, "%d failures, %d restarts: %d attempts, wanted %d",
               failures, table[i].restarts, stage_shared->counter, table[i].attempts);
        expect_nothing_left(before);
    }
}

/* A create or a launch inside joins the same ranks, any number of times. */
static ddp_result inside_main(ddp_group *again, void *user) {
    ddp_group *world = *(ddp_group **)user;
    int32_t sum = ddp_rank(world) + 1, w = ddp_world_size(world);
    float *memory;
    RANKS_CHECK(world, ddp_rank(again) == ddp_rank(world) && ddp_world_size(again) == w, "%d of %d",
                ddp_rank(again), ddp_world_size(again));
    RANKS_OK(world, ddp_group_alloc(again, 64, (void **)&memory));
    RANKS_OK(world, ddp_all_reduce(again, &sum, &sum, 1, DDP_I32, DDP_OP_SUM, NULL));
    RANKS_CHECK(world, sum == w * (w + 1) / 2, "the sum is %d", (int)sum);
    return DDP_OK;
}

/* A launch inside may state the number of these ranks, and lists a device for each of them. */
static ddp_result inside_checks(ddp_group *world) {
    static const int devices[4] = {0};
    const int w = ddp_world_size(world);
    const struct {
        int world_size, has_devices, device_count;
        const char *words; /* of its error; NULL = none */
    } table[] = {
        {w, 0, 0, NULL},     {w + 1, 0, 0, " inside a ddp_launch of "},          {0, 1, w, NULL},
        {0, 1, w + 1, NULL}, {0, 1, w - 1, " on this machine; list one device"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = table[i].world_size;
        desc.devices = table[i].has_devices ? devices : NULL;
        desc.device_count = table[i].device_count;
        ddp_result result = ddp_launch(&desc, inside_main, &world);
        RANKS_CHECK(world, result == (table[i].words ? DDP_ERR_INVALID : DDP_OK), "launch %d inside: %s '%s'",
                    (int)i, ddp_result_name(result), ddp_last_error());
        RANKS_CHECK(world, !table[i].words || says(ddp_last_error(), table[i].words),
                    "launch %d inside: '%s'", (int)i, ddp_last_error());
    }
    return DDP_OK;
}

static ddp_result again_main(ddp_group *world, void *user) {
    ddp_launch_desc desc = DDP_ZERO;
    ddp_group *again;
    RANKS_OK(world, inside_checks(world));
    for (int i = 0; i < *(int *)user; i++) {
        RANKS_OK(world, ddp_group_create(&again, NULL));
        RANKS_OK(world, inside_main(again, &world));
        ddp_group_destroy(again);
    }
    RANKS_OK(world, ddp_launch(&desc, inside_main, &world));
    return ddp_barrier(world);
}

static void *limited_alloc(size_t size_bytes, void *left) {
    return (*(int *)left)-- > 0 ? malloc(size_bytes) : NULL;
}
static void limited_free(void *memory, void *left) {
    (void)left;
    free(memory);
}

/* A create inside a launch for which a rank has no memory ends on the others too, and the world stays
   usable. */
static ddp_result inside_without_memory_main(ddp_group *world, void *user) {
    (void)user;
    for (int poor = 0; poor < ddp_world_size(world); poor++) {
        int left = ddp_rank(world) == poor ? 0 : 100;
        ddp_group_desc desc = DDP_ZERO;
        ddp_group *again;
        desc.alloc_fn = limited_alloc, desc.free_fn = limited_free, desc.user = &left;
        ddp_result result = ddp_group_create(&again, &desc),
                   want = ddp_rank(world) == poor || poor == 0 ? DDP_ERR_NO_MEMORY : DDP_OK;
        RANKS_CHECK(world, result == want && !again == (want != DDP_OK), "%s '%s'", ddp_result_name(result),
                    ddp_last_error());
        RANKS_CHECK(world, ddp_rank(world) != poor || says(ddp_last_error(), "could not be allocated"),
                    "'%s'", ddp_last_error());
        RANKS_OK(world, ddp_barrier(world));
        ddp_group_destroy(again);
    }
    return DDP_OK;
}

static void test_inside(void) {
    int times = 70;
    faults_begin("a create and a launch inside");
    EXPECT(launch(RANKS_PROCESSES, 3, 20000, again_main, &times) == DDP_OK, "%s", ddp_last_error());
    EXPECT(launch(RANKS_THREADS, 3, 20000, again_main, &times) == DDP_OK, "%s", ddp_last_error());
    EXPECT(launch(RANKS_PROCESSES, 1, 20000, again_main, &times) == DDP_OK, "%s", ddp_last_error());
    EXPECT(launch(RANKS_PROCESSES, 3, 20000, inside_without_memory_main, NULL) == DDP_OK, "%s",
           ddp_last_error());
}

/* Survivors that make no call are killed after timeout_ms. */
static ddp_result deaf_main(ddp_group *world, void *user) {
    (void)user;
    seen_by(world)->pid = getpid();
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    RANKS_OK(world, ddp_barrier(world));
    if (ddp_rank(world) == 1) return ddp_fail(DDP_ERR_CORRUPT, "rank 1 gives up");
    for (;;) pause();
}

static void test_deaf_survivors(void) {
    const double patience = RUN_INTO_MS * 1e-3 * DDP_TEST_SLOWDOWN;
    ddp_result result;
    faults_begin("survivors that never return");
    result = launch(RANKS_PROCESSES, 3, RUN_INTO_MS, deaf_main, NULL);
    EXPECT(result == DDP_ERR_CORRUPT && says(ddp_last_error(), "rank 1 gives up"), "%s '%s'",
           ddp_result_name(result), ddp_last_error());
    EXPECT(launch_seconds > 0.99 * patience && launch_seconds < patience + PROMPT_SECONDS, "took %.2f s",
           launch_seconds);
    for (int r = 0; r < 3; r++) EXPECT(gone(stage_shared->rank[r].pid), "rank %d is still there", r);
}

/* An error text from the failing rank reaches the caller completely, even if it is long. */
static ddp_result long_text_main(ddp_group *world, void *user) {
    char text[150];
    (void)user;
    memset(text, 'y', sizeof text - 1);
    text[sizeof text - 1] = 0;
    if (ddp_rank(world) == 1) return ddp_fail(DDP_ERR_ENGINE, "<%s>", text);
    return DDP_OK;
}

static void test_error_text(void) {
    ddp_result result;
    faults_begin("the failing rank's line reaches the caller");
    result = launch(RANKS_PROCESSES, 2, 20000, long_text_main, NULL);
    EXPECT(result == DDP_ERR_ENGINE && says(ddp_last_error(), "<yyy") && says(ddp_last_error(), "yyy>"),
           "%s '%s'", ddp_result_name(result), ddp_last_error());
    result = launch(RANKS_THREADS, 2, 20000, long_text_main, NULL);
    EXPECT(result == DDP_ERR_ENGINE && says(ddp_last_error(), "<yyy") && says(ddp_last_error(), "yyy>"),
           "%s '%s'", ddp_result_name(result), ddp_last_error());
}

//== signals to the launching process =======================================================

/* Rank 0 is outside the library, the others are inside. */
static ddp_result signalled_main(ddp_group *world, void *user) {
    (void)user;
    seen_by(world)->pid = getpid();
    RANKS_OK(world, ddp_barrier(world));
    say(&stage_shared->counter);
    if (ddp_rank(world) == 0)
        for (;;) pause();
    return ddp_barrier(world);
}

static void count_signal(int number) {
    __atomic_add_fetch(&stage_shared->numbers[number], 1, __ATOMIC_SEQ_CST);
}

/* Every rank has its own handler and leaves when it is called: a clean stop, such as saving a checkpoint. */
static volatile sig_atomic_t told;
static void tell(int number) {
    (void)number;
    told = 1;
}
static ddp_result handler_main(ddp_group *world, void *user) {
    (void)user;
    signal(SIGINT, tell);
    signal(SIGTERM, tell);
    seen_by(world)->pid = getpid();
    RANKS_OK(world, ddp_barrier(world));
    say(&stage_shared->counter);
    while (!told) ranks_sleep_us(1000);
    say(&stage_shared->finished);
    return ddp_barrier(world);
}

/* A separate launching process gets a signal while its ranks work. Its exit status shows whether the launch
   returned. */
static void signal_a_launcher(const char *scenario, int number, ddp_rank_fn fn, int own_handler) {
    enum { W = 3, RETURNED = 40 };
    int status = 0;
    double start;
    pid_t launcher;
    faults_begin(scenario);
    fflush(NULL);
    launcher = fork();
    if (launcher == 0) {
        ddp_launch_desc desc = DDP_ZERO;
        ddp_result result;
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        if (own_handler) signal(number, count_signal);
        desc.world_size = W;
        desc.group.timeout_ms = 20000 * DDP_TEST_SLOWDOWN;
        result = ddp_launch(&desc, fn, NULL);
        snprintf(stage_shared->rank[0].text, sizeof stage_shared->rank[0].text, "%s",
                 result == DDP_OK ? "" : ddp_last_error());
        stage_shared->rank[0].first = result;
        _exit(RETURNED + (result == DDP_OK));
    }
    EXPECT(heard(&stage_shared->counter, W), "only %d of %d ranks came", stage_shared->counter, W);
    ranks_sleep_us(20000);
    start = ranks_now();
    kill(launcher, number);
    EXPECT(waitpid(launcher, &status, 0) == launcher, "waitpid");
    launch_seconds = ranks_now() - start;
    for (int r = 0; r < W; r++) EXPECT(gone(stage_shared->rank[r].pid), "rank %d outlived its parent", r);
    if (number == SIGKILL) return;
    if (fn == handler_main) {
        EXPECT(stage_shared->finished == W, "%d of %d ranks got the signal", stage_shared->finished, W);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == RETURNED + 1, "status %x: %s '%s'", status,
               ddp_result_name(stage_shared->rank[0].first), stage_shared->rank[0].text);
    } else {
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == RETURNED, "launch did not return: status %x",
               status);
        EXPECT(stage_shared->rank[0].first == DDP_ERR_PEER_LOST, "launch gave %s '%s'",
               ddp_result_name(stage_shared->rank[0].first), stage_shared->rank[0].text);
    }
    EXPECT(launch_seconds < 2 * PROMPT_SECONDS, "took %.2f s", launch_seconds);
}

static void test_signals(void) {
    signal_a_launcher("SIGINT to the launcher", SIGINT, signalled_main, 0);
    signal_a_launcher("SIGTERM to the launcher", SIGTERM, signalled_main, 0);
    signal_a_launcher("SIGINT, ranks have handlers", SIGINT, handler_main, 0);
    signal_a_launcher("SIGTERM, ranks have handlers", SIGTERM, handler_main, 0);
    signal_a_launcher("SIGINT, the launcher has a handler", SIGINT, handler_main, 1);
    signal_a_launcher("kill -9 of the launcher", SIGKILL, signalled_main, 0);
    signal_a_launcher("kill -9 of the launcher, ranks have handlers", SIGKILL, handler_main, 0);
}

/* devices[local rank], of the world that is launched and of one that a launch inside joins. */
static ddp_result device_main(ddp_group *world, void *user) {
    const int *list = (const int *)user, rank = ddp_local_rank(world), have = ddp_group_device_index(world);
    RANKS_CHECK(world, have == list[rank], "local rank %d has device %d", rank, have);
    return DDP_OK;
}

static ddp_result devices_main(ddp_group *world, void *user) {
    static const int inner_list[] = {2, 0, 4};
    ddp_launch_desc desc = DDP_ZERO;
    RANKS_OK(world, device_main(world, user));
    desc.devices = inner_list;
    desc.device_count = 3;
    RANKS_OK(world, ddp_launch(&desc, device_main, (void *)(uintptr_t)inner_list));
    return device_main(world, user);
}

static void test_devices(void) {
    static const int list[] = {5, 3, 1};
    ddp_launch_desc desc = DDP_ZERO;
    faults_begin("devices by local rank");
    desc.world_size = desc.device_count = 3;
    desc.devices = list;
    EXPECT(ddp_launch(&desc, devices_main, (void *)(uintptr_t)list) == DDP_OK, "%s", ddp_last_error());
    desc.mode = DDP_LAUNCH_THREADS;
    EXPECT(ddp_launch(&desc, devices_main, (void *)(uintptr_t)list) == DDP_OK, "%s", ddp_last_error());
}

int main(void) {
    faults_start(150);
    test_devices();
    test_many_launches();
    test_signal_handlers_come_back();
    test_other_children_are_left_alone();
    test_ignored_sigchld();
    test_buffered_output();
    test_cores();
    test_idle_ranks_sleep();
    test_restarts();
    test_inside();
    test_deaf_survivors();
    test_error_text();
    test_signals();
    return faults_end();
}

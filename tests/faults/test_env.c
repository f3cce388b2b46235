/*  test_env.c - processes that were not forked from one ddp_launch find each other by environment variables,
   or report why not. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#include <sys/socket.h>
#include <sys/un.h>

/* The rank variables of one launcher; %r %w %t are replaced by rank, world size and a tag that differs
   between jobs. */
typedef struct family {
    const char *name;
    const char *variables[8];
} family;

static const family families[] = {
    {"torchrun",
     {"RANK=%r", "WORLD_SIZE=%w", "LOCAL_RANK=%r", "LOCAL_WORLD_SIZE=%w", "MASTER_ADDR=127.0.0.1",
      "MASTER_PORT=%t", "TORCHELASTIC_RESTART_COUNT=2"}},
    {"torchrun, no local variables", {"RANK=%r", "WORLD_SIZE=%w", "MASTER_ADDR=localhost", "MASTER_PORT=%t"}},
    {"torchrun with its agent store",
     {"RANK=%r", "WORLD_SIZE=%w", "LOCAL_RANK=%r", "LOCAL_WORLD_SIZE=%w", "MASTER_ADDR=127.0.0.1",
      "MASTER_PORT=%t", "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RUN_ID=none"}},
    {"mpirun",
     {"OMPI_COMM_WORLD_RANK=%r", "OMPI_COMM_WORLD_SIZE=%w", "OMPI_COMM_WORLD_LOCAL_RANK=%r",
      "OMPI_COMM_WORLD_LOCAL_SIZE=%w", "PMIX_NAMESPACE=%t"}},
    {"mpiexec.hydra",
     {"PMI_RANK=%r", "PMI_SIZE=%w", "MPI_LOCALRANKID=%r", "MPI_LOCALNRANKS=%w", "PMI_PORT=host:%t"}},
    {"srun",
     {"SLURM_PROCID=%r", "SLURM_NTASKS=%w", "SLURM_LOCALID=%r", "SLURM_STEP_ID=0", "SLURM_JOB_ID=%t",
      "SLURM_JOB_NODELIST=node1", "SLURM_RESTART_COUNT=1"}},
};

static int next_tag; /* main starts it at a number derived from its pid */

static void clear_environment(void) {
    static const char *const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "TORCHELASTIC_USE_AGENT_STORE",
                                        "TORCHELASTIC_RUN_ID",
                                        "TORCHELASTIC_RESTART_COUNT",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMIX_NAMESPACE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "MPI_LOCALNRANKS",
                                        "PMI_PORT",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_ID",
                                        "SLURM_JOB_ID",
                                        "SLURM_JOB_NODELIST",
                                        "SLURM_STEP_TASKS_PER_NODE",
                                        "SLURM_RESTART_COUNT"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

/* Sets NAME=value, with %r, %w and %t replaced. */
static void set_variable(const char *variable, int rank, int world_size, int tag) {
    char name[64], value[128];
    size_t n = strcspn(variable, "="), length = 0;
    snprintf(name, sizeof name, "%.*s", (int)n, variable);
    value[0] = 0;
    for (const char *c = variable + n + 1; *c; c++) {
        if (*c == '%')
            length += (size_t)snprintf(value + length, sizeof value - length, "%d",
                                       c[1] == 'r'   ? rank
                                       : c[1] == 'w' ? world_size
                                                     : tag),
                c++;
        else
            value[length++] = *c, value[length] = 0;
    }
    setenv(name, value, 1);
}

typedef ddp_result (*body)(ddp_group *world, void *user);

/* A process with these variables; slot: the place of its results. */
static pid_t spawn_variables(const char *const *variables, int slot, int rank, int world_size, int tag,
                             int timeout_ms, body fn, void *user) {
    pid_t pid;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        seen *s = &stage_shared->rank[slot];
        ddp_group_desc desc = DDP_ZERO;
        ddp_group *world = NULL;
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        clear_environment();
        for (int i = 0; i < 8 && variables[i]; i++) set_variable(variables[i], rank, world_size, tag);
        desc.timeout_ms = timeout_ms * DDP_TEST_SLOWDOWN;
        s->first = ddp_group_create(&world, &desc);
        if (s->first == DDP_OK && fn) s->first = fn(world, user);
        s->first_at = ranks_now();
        snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
        s->done = 1;
        ddp_group_destroy(world);
        _exit(0);
    }
    stage_shared->rank[slot].pid = pid;
    return pid;
}

static pid_t spawn(const family *f, int slot, int rank, int world_size, int tag, int timeout_ms, body fn,
                   void *user) {
    return spawn_variables(f->variables, slot, rank, world_size, tag, timeout_ms, fn, user);
}

static void reap(int first, int count) {
    int status;
    for (int i = first; i < first + count; i++) waitpid(stage_shared->rank[i].pid, &status, 0);
}

static ddp_result work(ddp_group *world, void *user) {
    int64_t mine = ddp_rank(world) + *(int *)user, sum = 0, w = ddp_world_size(world),
            want = w * (w - 1) / 2 + w * *(int *)user;
    float *big;
    void *memory;
    const char *restarts = getenv("TORCHELASTIC_RESTART_COUNT");
    if (!restarts) restarts = getenv("SLURM_RESTART_COUNT");
    ddp_group *split;
    RANKS_OK(world, ddp_group_split(world, ddp_rank(world) % 2, 0, &split));
    int attempt = restarts ? atoi(restarts) : 0;
    RANKS_CHECK(world, ddp_group_attempt(world) == attempt && ddp_group_attempt(split) == attempt,
                "attempts %d and %d of a split, wanted %d", ddp_group_attempt(world),
                ddp_group_attempt(split), attempt);
    ddp_group_destroy(split);
    RANKS_CHECK(world, ddp_local_rank(world) == ddp_rank(world) && ddp_local_world_size(world) == w,
                "local rank %d/%d", ddp_local_rank(world), ddp_local_world_size(world));
    for (int i = 0; i < 100; i++) {
        RANKS_OK(world, ddp_all_reduce(world, &mine, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
        RANKS_CHECK(world, sum == want, "sum %lld, wanted %lld: another job's numbers?", (long long)sum,
                    (long long)want);
    }
    /* Memory allocated after the start is shared too. */
    RANKS_OK(world, ddp_group_alloc(world, 4 << 20, &memory));
    big = (float *)memory;
    for (int i = 0; i < 1 << 20; i++) big[i] = 1;
    RANKS_OK(world, ddp_all_reduce(world, big, big, 1 << 20, DDP_F32, DDP_OP_SUM, NULL));
    for (int i = 0; i < 1 << 20; i++) RANKS_CHECK(world, big[i] == (float)w, "element %d", i);
    return ddp_barrier(world);
}

static void expect_all_ok(int first, int count) {
    for (int i = first; i < first + count; i++) {
        const seen *s = &stage_shared->rank[i];
        EXPECT(s->done && s->first == DDP_OK, "process %d: %s '%s'", i,
               s->done ? ddp_result_name(s->first) : "died", s->text);
    }
}

//== joining ================================================================================

static void test_families(void) {
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        for (int w = 1; w <= 4; w++) {
            int zero = 0, tag = next_tag++;
            faults_begin(families[f].name);
            /* Rank 0 last. */
            for (int r = w - 1; r >= 0; r--) spawn(&families[f], r, r, w, tag, 20000, work, &zero);
            reap(0, w);
            expect_all_ok(0, w);
        }
}

static void test_late_and_twice(void) {
    int zero = 0, tag = next_tag++;
    faults_begin("ranks come one after the other, and the same job again");
    for (int round = 0; round < 3; round++) { /* the name is free again at once */
        for (int r = 0; r < 3; r++) {
            spawn(&families[0], r, round == 1 ? 2 - r : r, 3, tag, 20000, work, &zero);
            ranks_sleep_us(50000);
        }
        reap(0, 3);
        expect_all_ok(0, 3);
    }
}

static void test_two_jobs(void) {
    int a = 0, b = 1000000;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        int tag_a = next_tag++, tag_b = next_tag++;
        faults_begin("two jobs at once do not mix");
        for (int r = 0; r < 3; r++) {
            spawn(&families[f], r, r, 3, tag_a, 20000, work, &a);
            spawn(&families[f], 3 + r, 2 - r, 3, tag_b, 20000, work, &b);
        }
        reap(0, 6);
        expect_all_ok(0, 6);
    }
}

/* ddp_launch in a process that a launcher started joins that world and starts nothing. */
static ddp_result inner_main(ddp_group *world, void *user) {
    __atomic_add_fetch(&stage_shared->counter, 1, __ATOMIC_SEQ_CST);
    RANKS_CHECK(world, ddp_world_size(world) == 3, "world of %d", ddp_world_size(world));
    return work(world, user);
}

static void test_launch_joins(void) {
    static const int devices[3] = {0};
    for (int listed = 3; listed >= 2; listed--) { /* entries of devices; three are needed */
        int zero = 0, tag = next_tag++;
        faults_begin(listed == 3 ? "ddp_launch inside a launcher's world" : "one device is missing there");
        fflush(NULL);
        for (int r = 0; r < 3; r++) {
            pid_t pid = fork();
            if (pid == 0) {
                ddp_launch_desc desc = DDP_ZERO;
                seen *s = &stage_shared->rank[r];
                clear_environment();
                for (int i = 0; i < 8 && families[0].variables[i]; i++)
                    set_variable(families[0].variables[i], r, 3, tag);
                desc.world_size = r ? 3 : 0; /* the number of the launcher, or none */
                desc.devices = devices;
                desc.device_count = listed;
                s->first = ddp_launch(&desc, inner_main, &zero);
                snprintf(s->text, sizeof s->text, "%s", ddp_last_error());
                s->done = 1;
                _exit(0);
            }
            stage_shared->rank[r].pid = pid;
        }
        reap(0, 3);
        if (listed == 3) expect_all_ok(0, 3);
        EXPECT(stage_shared->counter == (listed == 3 ? 3 : 0), "%d ranks ran", stage_shared->counter);
        for (int r = 0; r < 3 && listed < 3; r++) {
            const seen *s = &stage_shared->rank[r];
            EXPECT(s->done && s->first == DDP_ERR_INVALID && says(s->text, "device_count=2 with 3 ranks"),
                   "rank %d: %s '%s'", r, ddp_result_name(s->first), s->text);
        }
    }
}

/* Variables of an earlier job: without the comparison, the program would wait for rank 1 of that job. */
static void test_old_variables(void) {
    static const struct {
        const char *what;
        int launches, world_size;
        const char *word;
    } table[] = {
        {"ddp_launch", 1, 4, "ddp_launch: desc.world_size=4 contradicts"},
        {"ddp_launch of one rank", 1, 1, "ddp_launch: desc.world_size=1 contradicts"},
        {"ddp_group_create", 0, 4, "ddp_group_create: desc.world_size=4 contradicts"},
    };
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
            const seen *s = &stage_shared->rank[0];
            char want[160], name[64];
            pid_t pid;
            faults_begin(table[i].what);
            fflush(NULL);
            pid = fork();
            if (pid == 0) {
                ddp_launch_desc desc = DDP_ZERO;
                ddp_group *world = NULL;
                seen *mine = &stage_shared->rank[0];
                int zero = 0;
                clear_environment();
                for (int v = 0; v < 8 && families[f].variables[v]; v++)
                    set_variable(families[f].variables[v], 0, 2, next_tag);
                desc.world_size = desc.group.world_size = table[i].world_size;
                desc.group.timeout_ms = RUN_INTO_MS;
                mine->first = table[i].launches ? ddp_launch(&desc, inner_main, &zero)
                                                : ddp_group_create(&world, &desc.group);
                snprintf(mine->text, sizeof mine->text, "%s", ddp_last_error());
                mine->done = 1;
                _exit(0);
            }
            waitpid(pid, NULL, 0);
            snprintf(name, sizeof name, "%.*s", (int)strcspn(families[f].variables[1], "="),
                     families[f].variables[1]);
            snprintf(want, sizeof want, "%s %s=2 in the environment", table[i].word, name);
            EXPECT(s->done && s->first == DDP_ERR_INVALID && says(s->text, want), "%s: %s '%s', not '%s'",
                   families[f].name, ddp_result_name(s->first), s->text, want);
        }
}

//== not joining ============================================================================

/* Variables that a single process must reject, with a word that its error must contain. */
static void test_bad_variables(void) {
    static const struct {
        const char *what, *word;
        ddp_result want;
        const char *variables[8];
    } table[] = {
        {"RANK without WORLD_SIZE", "WORLD_SIZE", DDP_ERR_INVALID, {"RANK=0"}},
        {"WORLD_SIZE without RANK", "RANK", DDP_ERR_INVALID, {"WORLD_SIZE=2"}},
        {"RANK = WORLD_SIZE",
         "RANK=2 with WORLD_SIZE=2; use ranks 0 to 1",
         DDP_ERR_INVALID,
         {"RANK=2", "WORLD_SIZE=2", "MASTER_PORT=1"}},
        {"RANK is not a number",
         "RANK=one in the environment is not an integer from 0",
         DDP_ERR_INVALID,
         {"RANK=one", "WORLD_SIZE=2"}},
        {"the number of restarts is not a number",
         "TORCHELASTIC_RESTART_COUNT=two in the environment is not an integer from 0",
         DDP_ERR_INVALID,
         {"RANK=0", "WORLD_SIZE=1", "TORCHELASTIC_RESTART_COUNT=two"}},
        {"RANK has a tail", "RANK", DDP_ERR_INVALID, {"RANK=1x", "WORLD_SIZE=2"}},
        {"RANK negative",
         "RANK=-1 in the environment is not an integer from 0",
         DDP_ERR_INVALID,
         {"RANK=-1", "WORLD_SIZE=2"}},
        {"WORLD_SIZE 0",
         "WORLD_SIZE=0 in the environment, but a world has at least 1 rank",
         DDP_ERR_INVALID,
         {"RANK=0", "WORLD_SIZE=0"}},
        {"WORLD_SIZE 0 without RANK",
         "WORLD_SIZE=0 in the environment, but a world has at least 1 rank",
         DDP_ERR_INVALID,
         {"WORLD_SIZE=0"}},
        {"WORLD_SIZE overflows", "WORLD_SIZE", DDP_ERR_INVALID, {"RANK=0", "WORLD_SIZE=4294967298"}},
        {"LOCAL_RANK not a number",
         "LOCAL_RANK",
         DDP_ERR_INVALID,
         {"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=?"}},
        {"LOCAL_RANK >= LOCAL_WORLD_SIZE",
         "LOCAL_RANK",
         DDP_ERR_INVALID,
         {"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=5", "LOCAL_WORLD_SIZE=2"}},
        {"LOCAL_WORLD_SIZE > WORLD_SIZE",
         "LOCAL_WORLD_SIZE",
         DDP_ERR_INVALID,
         {"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=4"}},
        {"a world of two machines",
         "machine",
         DDP_ERR_UNSUPPORTED,
         {"RANK=0", "WORLD_SIZE=4", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2"}},
        {"more ranks than a machine holds",
         "64",
         DDP_ERR_UNSUPPORTED,
         {"RANK=0", "WORLD_SIZE=65", "MASTER_PORT=3"}},
        {"mpirun on two machines",
         "machine",
         DDP_ERR_UNSUPPORTED,
         {"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=0",
          "OMPI_COMM_WORLD_LOCAL_SIZE=1"}},
        {"PMI_RANK alone", "PMI_SIZE", DDP_ERR_INVALID, {"PMI_RANK=0"}},
        {"a SLURM batch script is no rank",
         "",
         DDP_OK,
         {"SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_LOCALID=0"}},
        {"RANK empty is unset", "", DDP_OK, {"RANK=", "WORLD_SIZE="}},
        {"a world of one", "", DDP_OK, {"RANK=0", "WORLD_SIZE=1"}},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const seen *s = &stage_shared->rank[0];
        faults_begin(table[i].what);
        spawn_variables(table[i].variables, 0, 0, 0, next_tag++, 1000, NULL, NULL);
        reap(0, 1);
        EXPECT(s->done && s->first == table[i].want, "%s '%s'", s->done ? ddp_result_name(s->first) : "died",
               s->text);
        EXPECT(says(s->text, table[i].word), "'%s' does not contain '%s'", s->text, table[i].word);
    }
}

static void test_missing(void) {
    for (int missing = DDP_TEST_SLOWDOWN > 1 ? 2 : 0; missing < 3; missing++) {
        int tag = next_tag++, zero = 0;
        double start = ranks_now();
        faults_begin("a rank that never starts");
        for (int r = 0; r < 3; r++) {
            if (r != missing)
                spawn(&families[0], r, r, 3, tag, RUN_INTO_MS, work, &zero);
            else
                stage_shared->rank[r].pid = 0;
        }
        for (int r = 0; r < 3; r++) {
            const seen *s = &stage_shared->rank[r];
            if (r == missing) continue;
            reap(r, 1);
            EXPECT(s->done && s->first == DDP_ERR_TIMEOUT, "rank %d: %s '%s'", r,
                   s->done ? ddp_result_name(s->first) : "died", s->text);
            EXPECT(names_rank(s->text, missing), "rank %d: '%s' does not name rank %d", r, s->text, missing);
        }
        EXPECT(ranks_now() - start < 8 + PROMPT_SECONDS, "took %.2f s of 8 s", ranks_now() - start);
    }
}

static void test_contradictions(void) {
    static const struct {
        const char *what;
        int rank[3], size[3];
    } table[] = {
        {"two processes with one rank", {0, 1, 1}, {3, 3, 3}},
        {"two processes are rank 0", {0, 0, 1}, {3, 3, 3}},
        {"another world size", {0, 1, 2}, {3, 3, 4}},
        {"rank 0 has another world size", {0, 1, 2}, {4, 3, 3}},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        int tag = next_tag++, zero = 0, mismatches = 0;
        double start = ranks_now();
        faults_begin(table[i].what);
        for (int k = 0; k < 3; k++)
            spawn(&families[0], k, table[i].rank[k], table[i].size[k], tag, RUN_INTO_MS, work, &zero);
        reap(0, 3);
        for (int k = 0; k < 3; k++) {
            const seen *s = &stage_shared->rank[k];
            EXPECT(s->done && s->first != DDP_OK, "process %d: %s", k,
                   s->done ? "joined all the same" : "died");
            EXPECT(s->first == DDP_ERR_MISMATCH || s->first == DDP_ERR_TIMEOUT
                       || s->first == DDP_ERR_PEER_LOST,
                   "process %d: %s '%s'", k, ddp_result_name(s->first), s->text);
            mismatches += s->first == DDP_ERR_MISMATCH;
        }
        EXPECT(mismatches >= 1, "no rank returned DDP_ERR_MISMATCH: '%s' '%s' '%s'",
               stage_shared->rank[0].text, stage_shared->rank[1].text, stage_shared->rank[2].text);
        EXPECT(ranks_now() - start < 8 + PROMPT_SECONDS, "took %.2f s", ranks_now() - start);
    }
}

//== strangers ==============================================================================

/* The abstract socket where ranks of a torchrun job meet. */
static void job_socket(int tag, char *name, size_t size) {
    for (int i = 0; i < 8 && families[0].variables[i]; i++) set_variable(families[0].variables[i], 0, 3, tag);
    EXPECT(inner.job_socket(name, size) == DDP_OK, "%s", ddp_last_error());
    clear_environment();
}

static int is_there(const char *name) {
    FILE *file = fopen("/proc/net/unix", "r");
    char line[512];
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) found = strstr(line, name) != NULL;
    if (file) fclose(file);
    return found;
}

/* A connection to the socket, of either type; -1 if it does not exist. */
static int visit(const char *name) {
    static const int types[] = {SOCK_SEQPACKET, SOCK_STREAM, SOCK_DGRAM};
    struct sockaddr_un address;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, name, strlen(name));
    for (int i = 0; i < 3; i++) {
        int fd = socket(AF_UNIX, types[i], 0);
        if (connect(fd, (struct sockaddr *)&address,
                    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name)))
            == 0)
            return fd;
        close(fd);
    }
    return -1;
}

static void test_strangers(void) {
    static const char *const what[] = {
        "a silent connection",       "a stranger sends garbage", "a stranger sends a lot of garbage",
        "a stranger leaves at once", "40 silent connections",    "a stranger sends zeros of many sizes"};
    static char garbage[65536];
    for (size_t i = 0; i < sizeof garbage; i++) garbage[i] = (char)ranks_mix(i);
    for (int kind = 0; kind < 6; kind++) {
        int tag = next_tag++, zero = 0, fds[40], fd_count = 0, visited = 0;
        double start = ranks_now(), until = start + 20 * DDP_TEST_SLOWDOWN;
        char name[108];
        faults_begin(what[kind]);
        job_socket(tag, name, sizeof name);
        spawn(&families[0], 0, 0, 3, tag, 30000, work, &zero);
        while (visited < (kind == 4 ? 40 : 1) && ranks_now() < until) {
            int fd = visit(name);
            if (fd < 0) {
                ranks_sleep_us(2000);
                continue;
            } /* rank 0 does not listen yet */
            visited++;
            if (kind == 1) (void)!send(fd, garbage, 100, MSG_NOSIGNAL);
            for (int n = 0; kind == 2 && n < 20; n++)
                (void)!send(fd, garbage, sizeof garbage, MSG_NOSIGNAL | MSG_DONTWAIT);
            for (size_t n = 0; kind == 5 && n < 1000; n += 8)
                (void)!send(fd, memset(garbage, 0, n + 1), n, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (kind == 3)
                close(fd);
            else
                fds[fd_count++] = fd;
        }
        EXPECT(visited > 0, "found no socket to visit");
        ranks_sleep_us(50000);
        spawn(&families[0], 1, 1, 3, tag, 30000, work, &zero);
        ranks_sleep_us(50000);
        spawn(&families[0], 2, 2, 3, tag, 30000, work, &zero);
        reap(0, 3);
        expect_all_ok(0, 3);
        EXPECT(ranks_now() - start < 3 * PROMPT_SECONDS, "the job took %.2f s to come together",
               ranks_now() - start);
        while (fd_count > 0) close(fds[--fd_count]);
        EXPECT(!is_there(name), "socket @%s is left", name);
    }
}

/* Any user can compute the name of the rendezvous socket, and bind it first. Every rank that finds it taken
   reports the holder. */
static pid_t hold_name(const char *name, int listens) {
    struct sockaddr_un address;
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    pid_t pid = fork();
    int fd;
    if (pid != 0) return pid;
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(1);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); /* setuid clears it */
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, name, strlen(name));
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(fd, (struct sockaddr *)&address, length) != 0 || (listens && listen(fd, 100) != 0)) _exit(1);
    say(&stage_shared->counter);
    for (;;) pause();
}

static void test_name_is_taken(void) {
    if (geteuid() != 0) {
        printf("not root: a second user that holds the name is left out\n");
        return;
    }
    for (int listens = 0; listens < 2; listens++) {
        int tag = next_tag++, zero = 0;
        char name[108], want[64];
        pid_t holder;
        faults_begin(listens ? "another user listens at the job's socket"
                             : "another user holds the name of the job's socket");
        job_socket(tag, name, sizeof name);
        holder = hold_name(name, listens);
        EXPECT(heard(&stage_shared->counter, 1), "uid 65534 could not take @%s", name);
        for (int r = 0; r < 1 + listens; r++) spawn(&families[0], r, r, 3, tag, 20000, work, &zero);
        reap(0, 1 + listens);
        snprintf(want, sizeof want, "pid %d of another user (uid 65534)", (int)holder);
        for (int r = 0; r < 1 + listens; r++) {
            const seen *s = &stage_shared->rank[r];
            EXPECT(s->done && s->first == DDP_ERR_SYSTEM, "rank %d: %s '%s'", r,
                   s->done ? ddp_result_name(s->first) : "died", s->text);
            EXPECT(says(s->text, name) && says(s->text, "MASTER_PORT") && says(s->text, "file:///path"),
                   "rank %d: '%s'", r, s->text);
            EXPECT(says(s->text, listens ? want : "does not listen"), "rank %d: '%s' does not contain '%s'",
                   r, s->text, want);
        }
        kill(holder, SIGKILL);
        waitpid(holder, NULL, 0);
    }
}

//== dying ==================================================================================

static ddp_result forever(ddp_group *world, void *user) {
    void *memory;
    RANKS_OK(world, ddp_group_alloc(world, 1 << 20, &memory));
    __atomic_add_fetch(&stage_shared->counter, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        ddp_result result = ddp_all_reduce(world, memory, memory, 1 << 18, DDP_F32, DDP_OP_MAX, NULL);
        if (result != DDP_OK) return result;
        (void)user;
    }
}

static void test_one_dies(void) {
    for (int victim = 0; victim < 3; victim++) {
        int tag = next_tag++;
        char pid[32];
        faults_begin("one process of a joined world is killed");
        for (int r = 0; r < 3; r++) spawn(&families[0], r, r, 3, tag, 20000, forever, NULL);
        EXPECT(heard(&stage_shared->counter, 3), "only %d of 3 ranks came", stage_shared->counter);
        ranks_sleep_us(20000);
        event_now();
        kill(stage_shared->rank[victim].pid, SIGKILL);
        /* it stays a zombie for a while: its parent (this test) does not reap it, as mpirun may */
        for (int r = 0; r < 3; r++)
            if (r != victim) reap(r, 1);
        snprintf(pid, sizeof pid, "%d", (int)stage_shared->rank[victim].pid);
        for (int r = 0; r < 3; r++) {
            const seen *s = &stage_shared->rank[r];
            if (r == victim) continue;
            EXPECT(s->done && s->first == DDP_ERR_PEER_LOST && names_rank(s->text, victim)
                       && says(s->text, pid),
                   "rank %d: %s '%s'", r, s->done ? ddp_result_name(s->first) : "died", s->text);
            EXPECT(s->first_at - stage_shared->event_at < PROMPT_SECONDS,
                   "rank %d learned of it after %.3f s", r, s->first_at - stage_shared->event_at);
        }
        reap(victim, 1);
    }
}

static void test_all_die(void) {
    leftovers files;
    int zero = 0, tag = next_tag++;
    char name[108];
    faults_begin("kill -9 of every process has no leftovers");
    files = leftovers_now();
    job_socket(tag, name, sizeof name);
    for (int r = 0; r < 3; r++) spawn(&families[0], r, r, 3, tag, 20000, forever, NULL);
    EXPECT(heard(&stage_shared->counter, 3), "only %d of 3 ranks came", stage_shared->counter);
    for (int r = 0; r < 3; r++) kill(stage_shared->rank[r].pid, SIGKILL);
    reap(0, 3);
    expect_nothing_left(files);
    EXPECT(!is_there(name), "socket @%s is left", name);
    faults_begin("and the same job can start again at once");
    for (int r = 0; r < 3; r++) spawn(&families[0], r, r, 3, tag, 20000, work, &zero);
    reap(0, 3);
    expect_all_ok(0, 3);

    faults_begin("killed while waiting for the others");
    spawn(&families[0], 0, 0, 3, tag, 20000, work, &zero);
    spawn(&families[0], 1, 1, 3, tag, 20000, work, &zero);
    ranks_sleep_us(100000);
    kill(stage_shared->rank[0].pid, SIGKILL);
    kill(stage_shared->rank[1].pid, SIGKILL);
    reap(0, 2);
    for (int r = 0; r < 3; r++) spawn(&families[0], r, r, 3, tag, 20000, work, &zero);
    reap(0, 3);
    expect_all_ok(0, 3);
}

static void say_hello(void) { say(&stage_shared->finished); }

/* A rank that dies during the rendezvous, and is restarted by its launcher, takes its place again. (If all
   others have arrived before, the job ends at once instead.) */
static void test_rank_comes_back(void) {
    int zero = 0, tag = next_tag++;
    faults_begin("a rank dies before the world is complete and comes again");
    inner.hello_is_read = say_hello;
    spawn(&families[0], 0, 0, 3, tag, 20000, work, &zero);
    spawn(&families[0], 1, 1, 3, tag, 20000, work, &zero);
    EXPECT(heard(&stage_shared->finished, 1), "rank 0 did not read the hello of rank 1");
    kill(stage_shared->rank[1].pid, SIGKILL);
    reap(1, 1);
    spawn(&families[0], 1, 1, 3, tag, 20000, work, &zero);
    EXPECT(heard(&stage_shared->finished, 2), "rank 0 did not read the second hello of rank 1");
    inner.hello_is_read = NULL;
    spawn(&families[0], 2, 2, 3, tag, 20000, work, &zero);
    reap(0, 3);
    expect_all_ok(0, 3);
}

int main(void) {
    leftovers before;
    faults_start(120);
    clear_environment();
    next_tag = (int)getpid() * 200; /* unique among the runs */
    before = leftovers_now();
    test_families();
    test_late_and_twice();
    test_two_jobs();
    test_launch_joins();
    test_old_variables();
    test_bad_variables();
    test_missing();
    test_contradictions();
    test_strangers();
    test_name_is_taken();
    test_one_dies();
    test_all_die();
    test_rank_comes_back();
    faults_begin("the end");
    expect_nothing_left(before);
    return faults_end();
}

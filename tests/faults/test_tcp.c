/*  test_tcp.c - rendezvous of ranks on several machines by address, file or SLURM variables, and its errors.
    Unauthenticated peers cannot disturb it. The error on all ranks names a rank that is lost, late or makes
    another call.

    test_tcp meeting|strangers|secret|frames|calls

    Every process counts as a separate machine. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/ports.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

enum { LOG = 8192 };
static char (*logs)[LOG]; /* text passed to log_fn, by slot */

typedef ddp_result (*body)(ddp_group *world, void *user);
typedef struct job {
    const char *variables[12]; /* %r %w %p are rank, world size and a port */
    const char *url;           /* init_method; NULL = env:// */
    int world_size, port, timeout_ms;
    body fn;
} job;
static ddp_order order;         /* of the rank that is started */
static const char *desc_secret; /* of the rank that is started */

static void keep_log(const char *text, void *user) {
    char *log = (char *)user;
    size_t n = strlen(log);
    snprintf(log + n, LOG - n, "%s\n", text);
}

static void fill_in(char *out, size_t size, const char *text, int rank, const job *j) {
    size_t n = 0;
    for (out[0] = 0; *text && n + 12 < size; text++) {
        if (*text != '%') {
            out[n++] = *text;
            out[n] = 0;
            continue;
        }
        text++;
        n += (size_t)snprintf(out + n, size - n, "%d",
                              *text == 'r'   ? rank
                              : *text == 'w' ? j->world_size
                                             : j->port);
    }
}

static pid_t start(const job *j, int slot, int rank) {
    pid_t pid;
    fflush(NULL);
    logs[slot][0] = 0;
    pid = fork();
    if (pid == 0) {
        seen *s = &stage_shared->rank[slot];
        ddp_group_desc desc = DDP_ZERO;
        ddp_group *world = NULL;
        char url[128], text[256];
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        machine_salt = slot + 1;
        for (int i = 0; i < 12 && j->variables[i]; i++) {
            fill_in(text, sizeof text, j->variables[i], rank, j);
            putenv(strdup(text));
        }
        if (j->url) {
            fill_in(url, sizeof url, j->url, rank, j);
            desc.init_method = url;
            if (!j->variables[0]) {
                desc.rank = rank;
                desc.world_size = j->world_size;
            }
        }
        desc.timeout_ms = j->timeout_ms * DDP_TEST_SLOWDOWN;
        desc.order = order;
        desc.secret = desc_secret;
        desc.log_fn = keep_log;
        desc.user = logs[slot];
        s->start_at = ranks_now();
        s->first = ddp_group_create(&world, &desc);
        if (s->first == DDP_OK) s->first = j->fn(world, NULL);
        s->first_at = ranks_now();
        snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
        if (world && s->first != DDP_OK) {
            s->second = ddp_barrier(world);
            snprintf(s->text2, sizeof s->text2, "%s", ddp_last_error());
        }
        s->done = 1;
        ddp_group_destroy(world);
        _exit(0);
    }
    stage_shared->rank[slot].pid = pid;
    return pid;
}

static void start_all(const job *j) {
    for (int r = j->world_size - 1; r >= 0; r--) start(j, r, r);
}

static void reap(int first, int count) {
    int status;
    for (int i = first; i < first + count; i++) waitpid(stage_shared->rank[i].pid, &status, 0);
}

/* The expected result of a process, with words that its error must contain. */
static void expect(int slot, ddp_result want, const char *word, const char *word2) {
    const seen *s = &stage_shared->rank[slot];
    EXPECT(s->done && s->first == want, "process %d: %s '%s'", slot,
           s->done ? ddp_result_name(s->first) : "died", s->text);
    EXPECT(says(s->text, word) && says(s->text, word2), "process %d: '%s' does not contain '%s' and '%s'",
           slot, s->text, word, word2);
}

static void expect_ok(int count) {
    for (int i = 0; i < count; i++) expect(i, DDP_OK, "", "");
}

static ddp_result work(ddp_group *world, void *user) {
    int64_t mine = ddp_rank(world), sum = 0, w = ddp_world_size(world);
    (void)user;
    RANKS_CHECK(world, strcmp(inner.backend_name(world), "tcp") == 0, "%s", inner.backend_name(world));
    RANKS_CHECK(world, ddp_local_rank(world) == 0 && ddp_local_world_size(world) == 1, "%d/%d",
                ddp_local_rank(world), ddp_local_world_size(world));
    for (int i = 0; i < 20; i++) {
        RANKS_OK(world, ddp_all_reduce(world, &mine, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
        RANKS_CHECK(world, sum == w * (w - 1) / 2, "sum %lld", (long long)sum);
    }
    return ddp_barrier(world);
}

/* Stops rank 0 shortly before the timeout of the waiting ranks, until after it: they must still get its
   information. */
static void rank0_stands_still(void) {
    ranks_sleep_us((RUN_INTO_MS * DDP_TEST_SLOWDOWN - 500) * 1000L);
    kill(stage_shared->rank[0].pid, SIGSTOP);
    ranks_sleep_us(2000000);
    kill(stage_shared->rank[0].pid, SIGCONT);
}

/* A listening socket of this process. */
static int occupy(int port) {
    int fd = inner.tcp_listen("", port);
    EXPECT(fd >= 0, "port %d: %s", port, strerror(errno));
    return fd;
}

/* A connection to a port of this machine, tried for some seconds; -1 = no process listens there. */
static int connect_to(uint32_t host, int port, double seconds) {
    double until = ranks_now() + seconds;
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(host);
    do {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
        close(fd);
        ranks_sleep_us(2000);
    } while (ranks_now() < until);
    return -1;
}

static int visit(int port) {
    int fd = connect_to(INADDR_LOOPBACK, port, 20 * DDP_TEST_SLOWDOWN);
    EXPECT(fd >= 0, "no process listens at port %d", port);
    return fd;
}

static void say_hello_is_read(void) { say(&stage_shared->counter); }

#define TORCH "RANK=%r", "WORLD_SIZE=%w", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "MASTER_PORT=%p"

//== meeting ================================================================================

static void test_meeting(void) {
    static const job jobs[] = {
        {{TORCH, "MASTER_ADDR=localhost"}, NULL, 4, 0, 20000, work},
        {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 3, 0, 20000, work},
        {{TORCH, "MASTER_ADDR=::1"}, NULL, 2, 0, 20000, work},
        {{TORCH, "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1", "DDP_MASTER_PORT=%p"}, NULL, 2, 0, 20000, work},
        {{"OMPI_COMM_WORLD_RANK=%r", "OMPI_COMM_WORLD_SIZE=%w", "OMPI_COMM_WORLD_LOCAL_RANK=0",
          "OMPI_COMM_WORLD_LOCAL_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=%p"},
         NULL,
         2,
         0,
         20000,
         work},
        {{NULL}, "tcp://127.0.0.1:%p", 3, 0, 20000, work},
        {{NULL}, "tcp://[::1]:%p", 2, 0, 20000, work},
        {{TORCH}, "tcp://localhost:%p", 2, 0, 20000, work},
        {{"SLURM_PROCID=%r", "SLURM_NTASKS=%w", "SLURM_LOCALID=0", "SLURM_STEP_ID=0", "SLURM_JOB_ID=%p",
          "SLURM_STEP_TASKS_PER_NODE=1(x3)", "SLURM_JOB_NODELIST=127.0.0.[1-3,7]"},
         NULL,
         3,
         0,
         20000,
         work},
    };
    int ipv6 = ports_have_ipv6();
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        job j = jobs[i];
        faults_begin(j.url ? j.url : j.variables[5]);
        if (!ipv6 && strstr(faults_scenario, "::1")) continue;
        j.port = some_ports(1);
        start_all(&j);
        reap(0, j.world_size);
        expect_ok(j.world_size);
    }
}

/* An IPv4 address of this machine that is not loopback; 0 = it has none. */
static uint32_t own_address(void) {
    struct ifaddrs *list;
    uint32_t found = 0;
    if (getifaddrs(&list) != 0) return 0;
    for (struct ifaddrs *a = list; a; a = a->ifa_next) {
        struct sockaddr_in at;
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET) continue;
        memcpy(&at, a->ifa_addr, sizeof at);
        if (ntohl(at.sin_addr.s_addr) >> 24 != 127) found = ntohl(at.sin_addr.s_addr);
    }
    freeifaddrs(list);
    return found;
}

/* Rank 0 listens at MASTER_ADDR if that is one of its own addresses that others can use, or literally
   loopback. */
static void test_listen(void) {
    enum { LOOPBACK = 0x7f000001, LOOPBACK_2 = 0x7f000002 };
    uint32_t own = own_address();
    char own_text[48];
    snprintf(own_text, sizeof own_text, "MASTER_ADDR=%u.%u.%u.%u", own >> 24, own >> 16 & 255, own >> 8 & 255,
             own & 255);
    struct {
        const char *variable;
        uint32_t open, closed;
        int reported;
    } table[] = {
        {"MASTER_ADDR=127.0.0.1", LOOPBACK, LOOPBACK_2, 0},
        {"MASTER_ADDR=127.0.0.2", LOOPBACK_2, LOOPBACK, 0},
        {own_text, own, LOOPBACK, 0},
        {"MASTER_ADDR=192.0.2.1", LOOPBACK_2, 0, 1} /* an address of no machine */,
        {"MASTER_ADDR=no.such.host.invalid", LOOPBACK_2, 0, 1},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        job j = {{TORCH, table[i].variable}, NULL, 2, 0, 20000, work};
        int fd, other = -1;
        if (!table[i].open) continue;
        faults_begin(table[i].variable);
        j.port = some_ports(1);
        start(&j, 0, 0);
        fd = connect_to(table[i].open, j.port, 15 * DDP_TEST_SLOWDOWN);
        EXPECT(fd >= 0, "rank 0 does not listen there");
        if (table[i].closed) other = connect_to(table[i].closed, j.port, 0);
        EXPECT(other < 0, "rank 0 listens at another address too");
        EXPECT(says(logs[0], "all interfaces") == table[i].reported, "the log contains '%s'", logs[0]);
        close(fd);
        if (other >= 0) close(other);
        kill(stage_shared->rank[0].pid, SIGKILL);
        reap(0, 1);
    }
}

static void test_node_lists(void) {
    static const struct {
        const char *list, *first;
    } table[] = {
        {"node[003-010,12]", "node003"}, {"node7", "node7"}, {"a,b,c", "a"}, {"gpu[1,3-5]-ib,x", "gpu1-ib"},
        {"r[1-2]n[08-11],z", "r1n08"},   {"", ""},           {"n[", "n"},    {"n[4", "n4"},
    };
    faults_begin("SLURM node lists");
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        char out[64];
        inner.first_host(out, sizeof out, table[i].list);
        EXPECT(strcmp(out, table[i].first) == 0, "%s: %s", table[i].list, out);
    }
}

/* torchrun's agent listens at MASTER_PORT, and other services after it: one that never sends anything, and
   one that sends first. */
static void test_agent(void) {
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RUN_ID=none",
              "TORCHELASTIC_RESTART_COUNT=0"},
             NULL,
             3,
             0,
             40000,
             work};
    int fds[3];
    pid_t talker;
    faults_begin("the agent serves MASTER_PORT");
    j.port = some_ports(1 + 16); /* rank 0 uses one of the 16 ports after it */
    for (int i = 0; i < 3; i++) fds[i] = occupy(j.port + i);
    talker = fork();
    if (talker == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        for (;;) {
            struct pollfd wait = {fds[2], POLLIN, 0};
            int fd = poll(&wait, 1, -1) > 0 ? accept(fds[2], NULL, NULL) : -1;
            if (fd >= 0)
                (void)!write(fd,
                             "220 mail.example.org ESMTP ready, and a long line so that it is more than a "
                             "few bytes\r\n",
                             88);
        }
    }
    start_all(&j);
    reap(0, 3);
    expect_ok(3);
    kill(talker, SIGKILL);
    waitpid(talker, NULL, 0);
    for (int i = 0; i < 3; i++) close(fds[i]);
}

static void test_file(void) {
    char url[64];
    job j = {{NULL}, NULL, 3, 0, 20000, work};
    FILE *file;
    faults_begin("a file, of which an older job has left one");
    snprintf(url, sizeof url, "file:///tmp/ddp_test_tcp_%d", (int)getpid());
    j.url = url;
    file = fopen(url + 7, "w");
    fprintf(file, "0123456789abcdef %d 127.0.0.1\n", some_ports(1));
    fclose(file);
    start(&j, 1, 1);
    start(&j, 2, 2);
    ranks_sleep_us(50000);
    start(&j, 0, 0);
    reap(0, 3);
    expect_ok(3);
    EXPECT(access(url + 7, F_OK) != 0, "%s is left", url + 7);
    faults_begin("a file in a folder that is not there");
    j.url = "file:///nowhere/at/all";
    j.world_size = 2;
    j.timeout_ms = 500;
    start_all(&j);
    reap(0, 2);
    expect(0, DDP_ERR_SYSTEM, "/nowhere/at/all", "No such file");
    expect(1, DDP_ERR_TIMEOUT, "/nowhere/at/all", "does not exist yet");
}

//== not meeting ============================================================================

static void test_bad_input(void) {
    static const struct {
        job j;
        ddp_result want;
        const char *word, *word2;
    } table[] = {
        {{{NULL}, "tcp://localhost", 2, 0, 500, work}, DDP_ERR_INVALID, "tcp://host:port", ""},
        {{{NULL}, "tcp://localhost:", 2, 0, 500, work}, DDP_ERR_INVALID, "tcp://host:port", ""},
        {{{NULL}, "tcp://:3", 2, 0, 500, work}, DDP_ERR_INVALID, "tcp://host:port", ""},
        {{{NULL}, "tcp://a:70000", 2, 0, 500, work}, DDP_ERR_INVALID, "tcp://host:port", ""},
        {{{NULL}, "tcp://a:1x", 2, 0, 500, work}, DDP_ERR_INVALID, "tcp://host:port", ""},
        {{{NULL}, "file://x", 2, 0, 500, work}, DDP_ERR_INVALID, "file:///path", ""},
        {{{"X=1"}, "tcp://a:1", 2, 0, 500, work}, DDP_ERR_INVALID, "world_size", "variables"},
        {{{TORCH}, NULL, 2, 3, 500, work}, DDP_ERR_UNSUPPORTED, "MASTER_ADDR", "machine"},
        {{{TORCH, "MASTER_ADDR=a"}, NULL, 2, 70000, 500, work}, DDP_ERR_INVALID, "70000", "MASTER_PORT"},
        {{{TORCH, "MASTER_ADDR=no.such.host.invalid"}, NULL, 2, 33, 500, work},
         DDP_ERR_TIMEOUT,
         "no.such.host.invalid",
         "has no address"},
        {{{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 1, 500, work},
         DDP_ERR_TIMEOUT,
         "127.0.0.1 port 1",
         "refused"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        faults_begin(table[i].word);
        start(&table[i].j, 1, 1);
        reap(1, 1);
        expect(1, table[i].want, table[i].word, table[i].word2);
    }
}

static void test_port_in_use(void) {
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 0, 3000, work};
    char pid[32], heir[32];
    int fd;
    faults_begin("MASTER_PORT is in use");
    j.port = some_ports(1);
    fd = occupy(j.port);
    start(&j, 0, 0);
    reap(0, 1);
    snprintf(pid, sizeof pid, "in use by pid %d (", (int)getpid());
    /* it has inherited the socket */
    snprintf(heir, sizeof heir, "in use by pid %d (", (int)stage_shared->rank[0].pid);
    expect(0, DDP_ERR_SYSTEM, "DDP_MASTER_PORT", "");
    EXPECT(says(stage_shared->rank[0].text, pid) || says(stage_shared->rank[0].text, heir),
           "'%s' does not contain '%s'", stage_shared->rank[0].text, pid);
    close(fd);
}

#define SECRET "DDP_SECRET=0f1e2d3c4b5a69788796a5b4c3d2e1f0"

/* Ranks that contradict rank 0. With a secret they are ranks of this job, which ends. Without one they could
   be anyone. */
static void test_contradictions(void) {
    static const struct {
        const char *what;
        int rank, size;
        const char *word;
        ddp_order order;
    } table[] = {
        {"two processes with one rank", 1, 3, "have rank 1", DDP_ORDER_TREE},
        {"another order", 2, 3, "rank 2 (pid", DDP_ORDER_ANY},
        {"another world size", 2, 4, "has world_size=4", DDP_ORDER_DEFAULT},
    };
    for (size_t i = 0; i < 2 * sizeof table / sizeof *table; i++) {
        int secured = i % 2, k = (int)i / 2;
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1", secured ? SECRET : NULL}, NULL, 3, 0, 20000, work};
        faults_begin(table[k].what);
        j.port = some_ports(1);
        start(&j, 0, 0);
        inner.hello_is_read = say_hello_is_read;
        start(&j, 1, 1);
        inner.hello_is_read = NULL;
        EXPECT(heard(&stage_shared->counter, 1), "rank 1 does not come");
        j.world_size = table[k].size;
        order = table[k].order;
        start(&j, 3, table[k].rank);
        reap(3, 1);
        order = DDP_ORDER_DEFAULT;
        j.world_size = 3;
        expect(3, DDP_ERR_MISMATCH, table[k].word, "");
        if (secured) {
            reap(0, 2);
            expect(0, DDP_ERR_MISMATCH, table[k].word, "");
            continue;
        }
        start(&j, 2, 2);
        reap(0, 3);
        expect_ok(3);
        EXPECT(says(logs[0], "refused 127.0.0.1 port") && says(logs[0], table[k].word),
               "the log contains '%s'", logs[0]);
    }
}

/* Hellos that no rank of this build would send are rejected; the rendezvous continues. */
static void test_bad_hellos(void) {
    static const struct {
        const char *what;
        uint32_t version;
        int rank, cut, swap;
        const char *word;
    } table[] = {
        {"a rank with another version", 990102, 1, 0, 0, "99.1.2"},
        {"a rank with a negative number", 0, -1, 0, 0, "have rank -1"},
        {"a rank after the last one", 0, 3, 0, 0, "have rank 3"},
        {"a rank that claims to be rank 0", 0, 0, 0, 0, "have rank 0"},
        {"a hello without its last fields", 0, 1, 24, 0, "does not use the ddp protocol"},
        {"a machine with the other byte order", 0, 1, 0, 1, "byte order"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 0, 20000, work};
        char letter[4096], token[64];
        size_t size;
        int fd;
        faults_begin(table[i].what);
        j.port = some_ports(1);
        start(&j, 0, 0);
        snprintf(token, sizeof token, "torch:%d::", j.port);
        size = inner.hello(letter, token, table[i].rank, 2,
                           table[i].version ? table[i].version : inner.version);
        if (table[i].cut)
            memset(letter + size - INNER_TEXT + table[i].cut, 0, (size_t)(INNER_TEXT - table[i].cut));
        for (int b = 0; b < 4 && table[i].swap; b++) {
            char byte = letter[b];
            letter[b] = letter[7 - b];
            letter[7 - b] = byte;
        }
        fd = visit(j.port);
        (void)!write(fd, letter, size);
        while (recv(fd, letter, sizeof letter, 0) > 0) {
        }
        close(fd);
        start(&j, 1, 1);
        reap(0, 2);
        expect_ok(2);
        EXPECT(says(logs[0], table[i].word), "the log contains '%s'", logs[0]);
    }
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 3, 0, RUN_INTO_MS, work};
    faults_begin("a rank that was refused is missing at the timeout");
    j.port = some_ports(1);
    start(&j, 0, 0);
    start(&j, 1, 1);
    j.world_size = 4;
    start(&j, 2, 2);
    reap(0, 3);
    expect(0, DDP_ERR_TIMEOUT, "missing: rank 2", "has world_size=4");
    expect(1, DDP_ERR_TIMEOUT, "missing: rank 2", "");
    expect(2, DDP_ERR_MISMATCH, "has world_size=4", "");
}

static void test_missing(void) {
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 4, 0, RUN_INTO_MS, work};
    faults_begin("ranks 1 and 3 never come");
    j.port = some_ports(1);
    start(&j, 2, 2);
    start(&j, 0, 0);
    rank0_stands_still();
    for (int r = 0; r < 4; r += 2) {
        reap(r, 1);
        expect(r, DDP_ERR_TIMEOUT, "missing: rank 1,3", "");
    }
    faults_begin("rank 0 never comes");
    j.timeout_ms = 1500;
    j.port = some_ports(1);
    start(&j, 1, 1);
    reap(1, 1);
    expect(1, DDP_ERR_TIMEOUT, "rank 0 did not arrive", "refused");
}

static void test_other_jobs(void) {
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1", "TORCHELASTIC_RESTART_COUNT=1"}, NULL, 3, 0, 20000, work},
        stale = j;
    faults_begin("a rank of an earlier job comes by");
    stale.variables[6] = "TORCHELASTIC_RESTART_COUNT=0";
    j.port = stale.port = some_ports(1);
    start(&j, 0, 0);
    start(&stale, 5, 1);
    reap(5, 1);
    expect(5, DDP_ERR_MISMATCH, "another job", "");
    start(&j, 1, 1);
    start(&j, 2, 2);
    reap(0, 3);
    expect_ok(3);
    EXPECT(says(logs[0], "refused") && says(logs[0], "127.0.0.1 port") && says(logs[0], "another job"),
           "the log contains '%s'", logs[0]);
}

//== strangers ==============================================================================

static void test_strangers(void) {
    static const char *const what[] = {"a stranger sends garbage", "a stranger sends half a hello and stays",
                                       "a port scanner", "a flood of silent visitors"};
    static unsigned char garbage[4096];
    for (size_t i = 0; i < sizeof garbage; i++) garbage[i] = (unsigned char)ranks_mix(i);
    for (int kind = 0; kind < 4; kind++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1", kind == 0 || kind == 3 ? SECRET : NULL},
                 NULL,
                 3,
                 0,
                 40000,
                 work};
        int count = kind == 3 ? 400 : kind == 2 ? 50 : 5, fds[400];
        char letter[4096];
        faults_begin(what[kind]);
        j.port = some_ports(1);
        (void)inner.hello(letter, "", 1, 3, 1);
        start(&j, 0, 0);
        for (int i = 0; i < count; i++) {
            fds[i] = visit(j.port);
            if (kind == 0) (void)!send(fds[i], garbage, sizeof garbage, MSG_NOSIGNAL);
            if (kind == 1) (void)!send(fds[i], letter, 8, MSG_NOSIGNAL);
            if (kind == 2) close(fds[i]);
        }
        start(&j, 1, 1);
        start(&j, 2, 2);
        reap(0, 3);
        expect_ok(3);
        /* 1: the job began before their time was up. */
        EXPECT(says(logs[0], kind == 1 ? "" : "refused 127.0.0.1 port"), "the log contains '%s'", logs[0]);
        EXPECT(kind != 3 || says(logs[0], "other connections are waiting"), "no connection was closed: '%s'",
               logs[0]);
        for (int i = 0; i < count && kind != 2; i++) close(fds[i]);
    }
}

/* A silent unauthenticated peer is disconnected after a while. */
static void test_silence(void) {
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 0, 40000, work};
    char byte;
    int fd;
    faults_begin("a silent stranger");
    j.port = some_ports(1);
    start(&j, 0, 0);
    fd = visit(j.port);
    EXPECT(recv(fd, &byte, 1, 0) == 0, "it received data");
    close(fd);
    start(&j, 1, 1);
    reap(0, 2);
    expect_ok(2);
    EXPECT(says(logs[0], "did not send its rank in time"), "the log contains '%s'", logs[0]);
}

//== a peer played by the test ===============================================================

/* A peer played by the test: it joins like a rank and then sends a frame that no rank would send. */

enum { BLOCK = 16384 }; /* bytes of the all_reduce that the real rank makes */

static ddp_call frame_call(ddp_call_kind kind, ddp_dtype dtype, size_t count) {
    ddp_call call;
    memset(&call, 0, sizeof call);
    call.kind = kind;
    call.dtype = dtype;
    call.count = count;
    call.root = -1;
    return call;
}

/* Sends a head and `following` bytes, of which text is the start. */
static void send_frame(int fd, uint32_t kind, int result, uint64_t size, const ddp_call *call,
                       size_t following, const void *text) {
    static unsigned char bytes[64 + 4 * BLOCK];
    size_t head = inner.frame(bytes, kind, result, size, call);
    memset(bytes + head, 0, following);
    if (text) memcpy(bytes + head, text, strlen((const char *)text) + 1);
    (void)!send(fd, bytes, head + following, MSG_NOSIGNAL);
}

/* Reads that many bytes; returns the number received before the other side closed, or before 20 s. */
static size_t read_bytes(int fd, void *out, size_t size) {
    size_t got = 0;
    while (got < size) {
        struct pollfd wait = {fd, POLLIN, 0};
        ssize_t n = poll(&wait, 1, 20000 * DDP_TEST_SLOWDOWN) == 1
                        ? recv(fd, (char *)out + got, size - got, 0)
                        : -1;
        if (n <= 0) break;
        got += (size_t)n;
    }
    return got;
}

/* The next connection to a listener; -1 if none arrives. */
static int welcome(int listener) {
    struct pollfd wait = {listener, POLLIN, 0};
    return poll(&wait, 1, 20000 * DDP_TEST_SLOWDOWN) == 1 ? accept(listener, NULL, NULL) : -1;
}

static size_t head_size(void) {
    unsigned char bytes[256];
    return inner.frame(bytes, INNER_NEWS, 0, 0, NULL);
}

//== secret =================================================================================

static ddp_result work_and_split(ddp_group *world, void *user) {
    int64_t one = 1, sum = 0;
    ddp_group *half = NULL;
    RANKS_OK(world, work(world, user));
    RANKS_OK(world,
             ddp_group_split(world, ddp_rank(world) == 0, 0, &half)); /* its ranks meet over TCP again */
    RANKS_OK(world, ddp_all_reduce(half, &one, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
    RANKS_CHECK(world, sum == ddp_world_size(half), "sum %lld", (long long)sum);
    ddp_group_destroy(half);
    return ddp_barrier(world);
}

static char secret_path[64];

static void write_secret(const char *text, mode_t mode) {
    FILE *file;
    unlink(secret_path);
    file = fopen(secret_path, "w");
    if (file) fputs(text, file);
    if (file) fclose(file);
    chmod(secret_path, mode);
}

static void test_secret(void) {
    static const char *const what[] = {"DDP_SECRET", "desc.secret", "DDP_SECRET_FILE",
                                       "desc.secret before DDP_SECRET"};
    char variable[96];
    snprintf(variable, sizeof variable, "DDP_SECRET_FILE=%s", secret_path);
    for (int i = 0; i < 4; i++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 3, 0, 20000, work_and_split};
        faults_begin(what[i]);
        j.port = some_ports(1);
        write_secret("0f1e2d3c4b5a69788796a5b4c3d2e1f0\n",
                     0600); /* as in SECRET: a newline is not part of it */
        for (int r = 0; r < 3; r++) {
            desc_secret = i == 1 || i == 3 ? SECRET + strlen("DDP_SECRET=") : NULL;
            j.variables[6] = i == 0 || (i == 2 && r == 1) ? SECRET
                             : i == 2                     ? variable
                             : i == 3                     ? "DDP_SECRET=x"
                                                          : NULL;
            start(&j, r, r);
        }
        desc_secret = NULL;
        reap(0, 3);
        expect_ok(3);
    }
    unlink(secret_path);
}

/* A process without the right secret is rejected; the ranks that have it form the world. */
static void test_wrong_secret(void) {
    static const struct {
        const char *what, *rank0, *other, *word;
    } table[] = {
        {"another secret", SECRET, "DDP_SECRET=0f1e2d3c4b5a69788796a5b4c3d2e1f1",
         "and rank 0 have different secrets"},
        {"a rank without a secret", SECRET, NULL, "rank 0 has a secret and rank 1 ("},
        {"rank 0 without a secret", NULL, SECRET, "has a secret and rank 0 has none"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 0, 20000, work};
        faults_begin(table[i].what);
        j.port = some_ports(1);
        j.variables[6] = table[i].rank0;
        start(&j, 0, 0);
        j.variables[6] = table[i].other;
        start(&j, 3, 1);
        reap(3, 1);
        expect(3, DDP_ERR_MISMATCH, table[i].word, "");
        j.variables[6] = table[i].rank0;
        start(&j, 1, 1);
        reap(0, 2);
        expect_ok(2);
        EXPECT(says(logs[0], "refused 127.0.0.1 port") && says(logs[0], table[i].word),
               "the log contains '%s'", logs[0]);
    }
}

/* A process at rank 0's port that does not have the secret: a rank sends it nothing but its hello and one
   proof. */
static void test_false_rank0(void) {
    static const char *const what[] = {"it admits without a challenge", "its proof is the rank's own",
                                       "its proof is wrong"};
    static const char zeros[65] = "0000000000000000000000000000000000000000000000000000000000000000";
    for (int i = 0; i < 3; i++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1", SECRET}, NULL, 2, 0, 3000, work};
        char bytes[2048];
        size_t letter = head_size() + INNER_TEXT;
        int listener, fd;
        faults_begin(what[i]);
        j.port = some_ports(1);
        listener = occupy(j.port);
        start(&j, 1, 1);
        fd = welcome(listener);
        EXPECT(read_bytes(fd, bytes, letter) == letter && !says(bytes + head_size(), "0f1e2d3c"),
               "a wrong hello");
        if (i > 0) send_frame(fd, INNER_CHALLENGE, 0, INNER_TEXT, NULL, INNER_TEXT, "");
        if (i > 0) EXPECT(read_bytes(fd, bytes, letter) == letter, "no proof arrived");
        send_frame(fd, INNER_NEWS, 1, INNER_TEXT, NULL, INNER_TEXT, i == 1 ? bytes + head_size() : zeros);
        send_frame(fd, INNER_NEWS, 0, INNER_TEXT, NULL, INNER_TEXT, "pid 1 on nowhere");
        EXPECT(read_bytes(fd, bytes, 1) == 0, "the rank joins it");
        close(fd);
        close(listener);
        reap(1, 1);
        EXPECT(stage_shared->rank[1].first == DDP_ERR_TIMEOUT, "%s",
               ddp_result_name(stage_shared->rank[1].first));
    }
}

/* Forwards all bytes between a rank and rank 0, and stores those of the rank. Returns their number. */
static size_t record(int from_rank, int to_rank0, char *kept, size_t room) {
    size_t size = 0;
    char bytes[4096];
    for (;;) {
        struct pollfd wait[2] = {{from_rank, POLLIN, 0}, {to_rank0, POLLIN, 0}};
        if (poll(wait, 2, 20000 * DDP_TEST_SLOWDOWN) <= 0) return size;
        for (int i = 0; i < 2; i++) {
            ssize_t n = wait[i].revents ? recv(wait[i].fd, bytes, sizeof bytes, 0) : -2;
            if (n == 0 || n == -1) return size;
            if (n < 0) continue;
            (void)!send(wait[1 - i].fd, bytes, (size_t)n, MSG_NOSIGNAL);
            for (ssize_t k = 0; i == 0 && k < n && size < room; k++) kept[size++] = bytes[k];
        }
    }
}

/* Replayed frames of an honest rank do not admit their sender to a job with the same token and secret. */
static void test_replay(void) {
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1", SECRET, "DDP_MASTER_PORT=%p"}, NULL, 2, 0, 20000, work},
        through;
    static char kept[65536], answer[4096];
    size_t letter = head_size() + INNER_TEXT, size;
    int listener, fd, relayed;
    faults_begin("a recorded handshake is sent again");
    j.variables[4] = "MASTER_PORT=29500"; /* the job token */
    j.port = some_ports(1);
    through = j;
    through.port = some_ports(1);
    listener = occupy(through.port);
    start(&j, 0, 0);
    start(&through, 1, 1);
    relayed = welcome(listener);
    fd = visit(j.port);
    size = record(relayed, fd, kept, sizeof kept);
    EXPECT(size > 2 * letter, "%zu bytes were recorded", size);
    close(relayed);
    close(fd);
    close(listener);
    reap(0, 2);
    expect_ok(2);
    start(&j, 0, 0);
    fd = visit(j.port);
    (void)!write(fd, kept, letter);
    EXPECT(read_bytes(fd, answer, letter) == letter, "no challenge arrived");
    (void)!write(fd, kept + letter, letter);
    EXPECT(read_bytes(fd, answer, letter) == letter && says(answer + head_size(), "have different secrets"),
           "it is not refused");
    close(fd);
    start(&j, 1, 1);
    reap(0, 2);
    expect_ok(2);
    EXPECT(says(logs[0], "and rank 0 have different secrets"), "the log contains '%s'", logs[0]);
}

static void test_secret_files(void) {
    static const struct {
        const char *what, *word;
    } table[] = {
        {"none", "No such file"},
        {"a symbolic link", "is a symbolic link"},
        {"a FIFO", "is not a regular file"},
        {"a folder", "is not a regular file"},
        {"others may read it", "chmod 600"},
        {"it is empty", "is empty"},
        {"it is large", "too large"},
        {"it is another user's", "belongs to another user"},
    };
    static char large[5000];
    memset(large, 'x', sizeof large - 1);
    for (int i = 0; i < 8; i++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 1, 3000, work};
        char variable[96];
        faults_begin(table[i].what);
        snprintf(variable, sizeof variable, "DDP_SECRET_FILE=%s", secret_path);
        j.variables[6] = variable;
        write_secret(i == 5 ? "\n" : i == 6 ? large : "x", i == 4 ? 0640 : 0600);
        if (i < 4) unlink(secret_path);
        if (i == 1) EXPECT(symlink("/etc/hostname", secret_path) == 0, "symlink: %s", strerror(errno));
        if (i == 2) EXPECT(mkfifo(secret_path, 0600) == 0, "mkfifo: %s", strerror(errno));
        if (i == 3) EXPECT(mkdir(secret_path, 0700) == 0, "mkdir: %s", strerror(errno));
        /* Only root can change the owner. */
        if (i == 7 && chown(secret_path, 12345, (gid_t)-1) != 0) continue;
        start(&j, 1, 1);
        reap(1, 1);
        expect(1, DDP_ERR_INVALID, table[i].word, secret_path);
        if (i == 3) rmdir(secret_path);
    }
    unlink(secret_path);
    faults_begin("an empty desc.secret");
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 1, 3000, work};
    desc_secret = "";
    start(&j, 1, 1);
    desc_secret = NULL;
    reap(1, 1);
    expect(1, DDP_ERR_INVALID, "desc.secret is empty", "");
}

//== frames =================================================================================

static ddp_result reduce_block(ddp_group *world, void *user) {
    static unsigned char block[BLOCK];
    (void)user;
    memset(block, 7, sizeof block);
    return ddp_all_reduce(world, block, block, BLOCK, DDP_U8, DDP_OP_MAX, NULL);
}

/* The frame that the played peer sends instead of the right one. */
typedef struct bad_frame {
    const char *what;
    uint32_t kind;
    int32_t result;
    uint64_t size;    /* as the head has it */
    size_t following; /* bytes that are sent */
    const char *text; /* of news */
    ddp_result want;
    const char *word, *not_word;
} bad_frame;

static const bad_frame bad_frames[] = {
    {"data of 4 bytes", INNER_DATA, 0, 4, 4, NULL, DDP_ERR_MISMATCH, "4 bytes", ""},
    {"data of no bytes", INNER_DATA, 0, 0, 0, NULL, DDP_ERR_MISMATCH, " 0 bytes", ""},
    {"data that is one byte too long", INNER_DATA, 0, BLOCK + 1, BLOCK + 1, NULL, DDP_ERR_MISMATCH,
     "16385 bytes", ""},
    {"data that claims 2^63 bytes", INNER_DATA, 0, UINT64_C(1) << 63, 64, NULL, DDP_ERR_MISMATCH,
     "invalid frame", ""},
    {"data with result 1, which has no bytes", INNER_DATA, 1, 0, 0, NULL, DDP_ERR_MISMATCH, "frame", ""},
    {"data with result -4", INNER_DATA, -4, BLOCK, BLOCK, NULL, DDP_ERR_MISMATCH, "invalid frame", ""},
    {"a second hello", INNER_HELLO, 0, INNER_TEXT, INNER_TEXT, "x", DDP_ERR_MISMATCH, "invalid frame", ""},
    {"an unknown kind", 77, 0, INNER_TEXT, INNER_TEXT, "x", DDP_ERR_MISMATCH, "invalid frame", ""},
    {"news with a positive result", INNER_NEWS, 5, INNER_TEXT, INNER_TEXT, "x", DDP_ERR_MISMATCH,
     "invalid frame", ""},
    {"news with an unknown result", INNER_NEWS, -99, INNER_TEXT, INNER_TEXT, "x", DDP_ERR_MISMATCH,
     "invalid frame", ""},
    {"news of 4 bytes", INNER_NEWS, -8, 4, 4, NULL, DDP_ERR_MISMATCH, "invalid frame", ""},
    {"news with control characters", INNER_NEWS, -8, INNER_TEXT, INNER_TEXT, "cause\x1b[2J\nof \xff",
     DDP_ERR_UNSUPPORTED, "cause\\x1b[2J\\x0aof \\xff", "\x1b"},
};

static void expect_frame(int slot, const bad_frame *bad) {
    expect(slot, bad->want, bad->word, "");
    EXPECT(!*bad->not_word || !strstr(stage_shared->rank[slot].text, bad->not_word),
           "the line has a control character");
}

/* The test is rank 1 of 2. */
static void test_bad_frames_to_rank0(void) {
    ddp_call cards = frame_call(DDP_CALL_ALL_GATHER, DDP_U64, 4),
             reduce = frame_call(DDP_CALL_ALL_REDUCE, DDP_U8, BLOCK);
    reduce.op = DDP_OP_MAX;
    for (size_t i = 0; i < sizeof bad_frames / sizeof *bad_frames; i++) {
        const bad_frame *bad = &bad_frames[i];
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 0, 20000, reduce_block};
        static char letter[4096], answer[4 * BLOCK];
        char token[64];
        size_t head = head_size(), got;
        int fd;
        faults_begin(bad->what);
        j.port = some_ports(1);
        snprintf(token, sizeof token, "torch:%d::", j.port);
        start(&j, 0, 0);
        fd = visit(j.port);
        (void)!write(fd, letter, inner.hello(letter, token, 1, 2, inner.version));
        /* Two answers: admitted, and all ranks are present. */
        got = read_bytes(fd, answer, 2 * (head + INNER_TEXT));
        EXPECT(got == 2 * (head + INNER_TEXT), "rank 0 did not admit rank 1: %zu bytes", got);
        send_frame(fd, INNER_DATA, 0, 32, &cards, 32, NULL);
        got = read_bytes(fd, answer, head + 64);
        EXPECT(got == head + 64, "rank 0 gathered %zu bytes", got);
        send_frame(fd, bad->kind, bad->result, bad->size, bad->kind == INNER_DATA ? &reduce : NULL,
                   bad->following, bad->text);
        got = read_bytes(fd, answer, head + BLOCK);
        EXPECT(got < head + BLOCK, "rank 0 answered with %zu bytes", got);
        reap(0, 1);
        expect_frame(0, bad);
        close(fd);
    }
}

/* The test is rank 0 of 2. */
static void test_bad_frames_from_rank0(void) {
    ddp_call cards = frame_call(DDP_CALL_ALL_GATHER, DDP_U64, 4),
             reduce = frame_call(DDP_CALL_ALL_REDUCE, DDP_U8, BLOCK);
    reduce.op = DDP_OP_MAX;
    for (size_t i = 0; i < 2 * sizeof bad_frames / sizeof *bad_frames; i++) {
        const bad_frame *bad = &bad_frames[i / 2];
        int early = i % 2; /* the first call, made by ddp_group_create, already has a bad answer */
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 0, 20000, reduce_block};
        static char bytes[4 * BLOCK];
        size_t head = head_size();
        int listener, fd;
        if (early && strstr(bad->what, "claims")) continue; /* the lengths are those of the other call */
        faults_begin(bad->what);
        j.port = some_ports(1);
        listener = occupy(j.port);
        start(&j, 1, 1);
        fd = welcome(listener);
        EXPECT(read_bytes(fd, bytes, head + INNER_TEXT) == head + INNER_TEXT, "no hello arrived");
        send_frame(fd, INNER_NEWS, 1, INNER_TEXT, NULL, INNER_TEXT, "");
        send_frame(fd, INNER_NEWS, 0, INNER_TEXT, NULL, INNER_TEXT, "pid 1 on nowhere");
        EXPECT(read_bytes(fd, bytes, head + 32) == head + 32, "no card arrived");
        if (!early) {
            send_frame(fd, INNER_DATA, 0, 64, &cards, 64, NULL);
            EXPECT(read_bytes(fd, bytes, head + BLOCK) == head + BLOCK, "no data arrived");
        }
        send_frame(fd, bad->kind, bad->result, bad->size,
                   bad->kind != INNER_DATA ? NULL
                   : early                 ? &cards
                                           : &reduce,
                   bad->following, bad->text);
        reap(1, 1);
        expect_frame(1, bad);
        close(fd);
        close(listener);
    }
}

/* Rank 0's data for a call that this rank has not made is invalid, and not kept for the next call. */
static void test_unasked_answer(void) {
    ddp_call cards = frame_call(DDP_CALL_ALL_GATHER, DDP_U64, 4);
    job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 2, 0, 20000, reduce_block};
    static char bytes[4 * BLOCK];
    int listener, fd;
    faults_begin("rank 0 answers twice");
    j.port = some_ports(1);
    listener = occupy(j.port);
    start(&j, 1, 1);
    fd = welcome(listener);
    EXPECT(read_bytes(fd, bytes, head_size() + INNER_TEXT) == head_size() + INNER_TEXT, "no hello arrived");
    send_frame(fd, INNER_NEWS, 1, INNER_TEXT, NULL, INNER_TEXT, "");
    send_frame(fd, INNER_NEWS, 0, INNER_TEXT, NULL, INNER_TEXT, "pid 1 on nowhere");
    send_frame(fd, INNER_DATA, 0, 64, &cards, 64, NULL);
    send_frame(fd, INNER_DATA, 0, 64, &cards, 64, NULL);
    reap(1, 1);
    expect(1, DDP_ERR_MISMATCH, "", "");
    close(fd);
    close(listener);
}

//== after the rendezvous ====================================================================

static ddp_result forever(ddp_group *world, void *user) {
    float x = 1;
    (void)user;
    say(&stage_shared->counter);
    for (;;) {
        ddp_result result = ddp_all_reduce(world, &x, &x, 1, DDP_F32, DDP_OP_MAX, NULL);
        if (result != DDP_OK) return result;
    }
}

static void test_killed(void) {
    for (int victim = 0; victim < 3; victim++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 3, 0, 20000, forever};
        char word[64];
        faults_begin("a rank is killed");
        j.port = some_ports(1);
        start_all(&j);
        EXPECT(heard(&stage_shared->counter, 3), "only %d of 3 ranks came", stage_shared->counter);
        event_now();
        kill(stage_shared->rank[victim].pid, SIGKILL);
        snprintf(word, sizeof word, "rank %d (pid %d on ", victim, (int)stage_shared->rank[victim].pid);
        for (int r = 0; r < 3; r++) {
            const seen *s = &stage_shared->rank[r];
            reap(r, 1);
            if (r == victim) continue;
            expect(r, DDP_ERR_PEER_LOST, word, "closed the connection");
            EXPECT(s->second == DDP_ERR_POISONED && says(s->text2, word), "rank %d: then %s '%s'", r,
                   ddp_result_name(s->second), s->text2);
            EXPECT(s->first_at - stage_shared->event_at < PROMPT_SECONDS,
                   "rank %d learned of it after %.3f s", r, s->first_at - stage_shared->event_at);
        }
    }
}

/* Rank 1 differs from the others; arrived is 2 after they have made the call. */
static ddp_result differ(ddp_group *world, void *user) {
    float x[8] = {0};
    (void)user;
    return ddp_rank(world) == 1 ? ddp_all_reduce(world, x, x, 8, DDP_F32, DDP_OP_SUM, NULL)
                                : ddp_all_reduce(world, x, x, 7, DDP_F32, DDP_OP_SUM, NULL);
}

static ddp_result leave(ddp_group *world, void *user) {
    (void)user;
    return ddp_rank(world) == 1 ? DDP_OK : ddp_barrier(world);
}

static ddp_result call_off(ddp_group *world, void *user) {
    (void)user;
    if (ddp_rank(world) != 1) {
        say(&stage_shared->counter);
        return ddp_barrier(world);
    }
    heard(&stage_shared->counter, 2);
    RANKS_OK(world, ddp_group_abort(world));
    return ddp_group_status(world);
}

static ddp_result sleepy(ddp_group *world, void *user) {
    (void)user;
    /* It is alive, and makes no call. */
    while (ddp_rank(world) == 1 && ddp_group_status(world) == DDP_OK) ranks_sleep_us(1000);
    if (ddp_rank(world) == 1) return ddp_group_status(world);
    say(&stage_shared->numbers[0]);
    return ddp_barrier(world);
}

static void test_calls(void) {
    static const struct {
        const char *what;
        body fn;
        ddp_result want;
        const char *word, *word2;
        int lazy, still;
    } table[] = {
        {"another count", differ, DDP_ERR_MISMATCH, "ranks made different calls",
         "rank 1 ddp_all_reduce f32 count=8 sum", 0, 0},
        {"a rank leaves", leave, DDP_ERR_PEER_LOST, "rank 1 (pid ", "has destroyed this group", 1, 0},
        {"a rank aborts", call_off, DDP_ERR_POISONED, "rank 1 (pid ", "called ddp_group_abort", 0, 0},
        {"a rank makes no call", sleepy, DDP_ERR_TIMEOUT, "arrived: rank 0,2; missing: rank 1", "", 0, 0},
        {"a rank makes no call, and rank 0 stands still for a while", sleepy, DDP_ERR_TIMEOUT,
         "arrived: rank 0,2; missing: rank 1", "", 0, 1},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"},
                 NULL,
                 3,
                 0,
                 table[i].want == DDP_ERR_TIMEOUT ? RUN_INTO_MS : 20000,
                 table[i].fn};
        faults_begin(table[i].what);
        j.port = some_ports(1);
        start_all(&j);
        if (table[i].still) {
            EXPECT(heard(&stage_shared->numbers[0], 2), "only %d of 2 ranks came", stage_shared->numbers[0]);
            rank0_stands_still();
        }
        reap(0, 3);
        for (int r = 0; r < 3; r++)
            if (r != 1 || !table[i].lazy) expect(r, table[i].want, table[i].word, table[i].word2);
    }
}

/* A stopped process answers no call, while its kernel keeps the connection. */
static void test_stopped(void) {
    for (int victim = 0; victim < 2; victim++) {
        job j = {{TORCH, "MASTER_ADDR=127.0.0.1"}, NULL, 3, 0, RUN_INTO_MS, forever};
        faults_begin(victim ? "a rank is stopped" : "rank 0 is stopped");
        j.port = some_ports(1);
        start_all(&j);
        EXPECT(heard(&stage_shared->counter, 3), "only %d of 3 ranks came", stage_shared->counter);
        kill(stage_shared->rank[victim].pid, SIGSTOP);
        for (int r = 0; r < 3; r++)
            if (r != victim) {
                reap(r, 1);
                expect(r, DDP_ERR_TIMEOUT, victim ? "missing: rank 1" : "rank 0 (pid",
                       victim ? "arrived: rank 0,2" : "does not answer");
            }
        kill(stage_shared->rank[victim].pid, SIGKILL);
        kill(stage_shared->rank[victim].pid, SIGCONT);
        reap(victim, 1);
    }
}

//== many ===================================================================================

static ddp_result many(ddp_group *world, void *user) {
    static const ddp_dtype dtypes[] = {DDP_F32, DDP_BF16, DDP_I32};
    enum { COUNT = 33 };
    int w = ddp_world_size(world);
    size_t counts[128];
    (void)user;
    for (int d = 0; d < 3; d++)
        for (int op = DDP_OP_SUM; op <= DDP_OP_AVG; op++) {
            ranks_data data;
            uint64_t have[COUNT], want[COUNT];
            data.dtype = dtypes[d];
            data.seed = (uint64_t)(d + op);
            data.specials = 0;
            ranks_fill(have, &data, ddp_rank(world), 0, COUNT);
            ranks_reduce(want, &data, (ddp_op)op, w, (uint64_t)w, 0, COUNT);
            RANKS_OK(world, ddp_all_reduce(world, have, have, COUNT, data.dtype, (ddp_op)op, NULL));
            RANKS_CHECK(world, ranks_compare(have, want, COUNT, data.dtype, 0, NULL) < 0, "%s op %d",
                        ddp_dtype_name(data.dtype), op);
        }
    for (int i = 0; i < w; i++) counts[i] = 1;
    RANKS_CHECK(world,
                ddp_all_gather_v(world, &w, 1, calloc((size_t)w, 4), counts, NULL, DDP_I32, NULL)
                    == DDP_ERR_UNSUPPORTED,
                "%s", ddp_last_error());
    return ddp_barrier(world);
}

static void test_many(void) {
    job j = {{NULL}, "tcp://127.0.0.1:%p", 70, 0, 40000, many};
    int status;
    faults_begin("more ranks than a machine holds");
    j.port = some_ports(1);
    /* The last ranks reuse the slots of the first ones. */
    for (int r = j.world_size - 1; r >= 0; r--) start(&j, r % RANKS_MAX, r);
    while (wait(&status) > 0 || errno != ECHILD) EXPECT(status == 0, "a rank ended with %d", status);
    expect_ok(RANKS_MAX);
}

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    leftovers before;
    faults_start(120);
    logs = (char(*)[LOG])ranks_shared(sizeof *logs * RANKS_MAX);
    if (!ports_claim()) return 1;
    before = leftovers_now();
    if (!strcmp(part, "meeting")) {
        test_meeting();
        test_listen();
        test_node_lists();
        test_agent();
        test_file();
        test_bad_input();
        test_many();
    } else if (!strcmp(part, "strangers")) {
        test_port_in_use();
        test_contradictions();
        test_bad_hellos();
        test_missing();
        test_other_jobs();
        test_strangers();
        test_silence();
    } else if (!strcmp(part, "secret")) {
        snprintf(secret_path, sizeof secret_path, "/tmp/ddp_test_secret_%d", (int)getpid());
        test_secret();
        test_wrong_secret();
        test_false_rank0();
        test_replay();
        test_secret_files();
    } else if (!strcmp(part, "frames")) {
        test_bad_frames_to_rank0();
        test_bad_frames_from_rank0();
        test_unasked_answer();
    } else {
        test_killed();
        test_calls();
        test_stopped();
    }
    faults_begin("the end");
    expect_nothing_left(before);
    return faults_end();
}

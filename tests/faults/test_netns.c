/*  test_netns.c - ranks on two machines (network namespaces) with a cable between them, which is cut during
    training.

    Skipped without root or iproute2. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"
#include "../support/network.h"

static char path[64]; /* of the file of file:// */

typedef ddp_result (*body)(ddp_group *world, void *user);

/* Ranks 0 and 1 on machine 0, 2 and 3 on machine 1, as torchrun starts them. */
static void start(const char *init_method, int timeout_ms, body fn) {
    static int port = 29500;
    port++;
    for (int rank = 3; rank >= 0; rank--) {
        pid_t pid;
        fflush(NULL);
        pid = fork();
        if (pid == 0) {
            static const char *const names[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                                "MASTER_PORT"};
            int values[5] = {rank, 4, rank % 2, 2, port};
            seen *s = &stage_shared->rank[rank];
            ddp_group_desc desc = DDP_ZERO;
            ddp_group *world = NULL;
            char text[16];
            prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
            if (enter(rank / 2) != 0) _exit(1);
            for (int i = 0; i < 5; i++) {
                snprintf(text, sizeof text, "%d", values[i]);
                setenv(names[i], text, 1);
            }
            setenv("MASTER_ADDR", "10.77.0.1", 1);
            desc.init_method = init_method;
            desc.timeout_ms = timeout_ms;
            s->first = ddp_group_create(&world, &desc);
            if (s->first == DDP_OK) s->first = fn(world, NULL);
            s->first_at = ranks_now();
            snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
            s->done = 1;
            ddp_group_destroy(world);
            _exit(0);
        }
        stage_shared->rank[rank].pid = pid;
    }
}

static void reap(void) {
    int status;
    for (int r = 0; r < 4; r++) waitpid(stage_shared->rank[r].pid, &status, 0);
}

static ddp_result work(ddp_group *world, void *user) {
    int64_t one = 1, sum = 0;
    int me = ddp_rank(world);
    ddp_group *here = NULL, *across = NULL;
    float *big = (float *)calloc(1 << 18, sizeof *big);
    (void)user;
    RANKS_CHECK(world, strcmp(inner.backend_name(world), "tcp") == 0, "%s", inner.backend_name(world));
    RANKS_CHECK(world, ddp_local_rank(world) == me % 2 && ddp_local_world_size(world) == 2, "%d/%d",
                ddp_local_rank(world), ddp_local_world_size(world));
    for (int i = 0; i < 100; i++)
        RANKS_OK(world, ddp_all_reduce(world, &one, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
    RANKS_CHECK(world, sum == 4, "%lld", (long long)sum);
    /* Of one machine: any size goes through shared memory. */
    RANKS_OK(world, ddp_group_split(world, me / 2, me, &here));
    RANKS_CHECK(world, strcmp(inner.backend_name(here), "local") == 0, "%s", inner.backend_name(here));
    for (int i = 0; i < 1 << 18; i++) big[i] = (float)me;
    RANKS_OK(world, ddp_all_reduce(here, big, big, 1 << 18, DDP_F32, DDP_OP_SUM, NULL));
    RANKS_CHECK(world, big[77] == (float)(me / 2 * 4 + 1), "%g", big[77]);
    RANKS_OK(world, ddp_group_split(world, 1 - me % 2, -me, &across)); /* rank 0 of it is on machine 1 */
    RANKS_CHECK(world, strcmp(inner.backend_name(across), "tcp") == 0 && ddp_local_world_size(across) == 1,
                "%s", inner.backend_name(across));
    RANKS_OK(world, ddp_all_reduce(across, &one, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
    RANKS_CHECK(world, sum == 2, "%lld", (long long)sum);
    ddp_group_destroy(across);
    ddp_group_destroy(here);
    free(big);
    return ddp_barrier(world);
}

static void test_meeting(void) {
    const char *const methods[] = {"env://", "tcp://10.77.0.1:29400", "tcp://[fd77::1]:29401", path};
    for (int i = 0; i < 4; i++) {
        faults_begin(methods[i]);
        if (i == 2 && on(1, "ip -6 addr show dev cable 2>/dev/null | grep -q fd77::2") != 0) continue;
        start(methods[i], 20000, work);
        reap();
        for (int r = 0; r < 4; r++) {
            const seen *s = &stage_shared->rank[r];
            EXPECT(s->done && s->first == DDP_OK, "rank %d: %s '%s'", r,
                   s->done ? ddp_result_name(s->first) : "died", s->text);
        }
    }
}

static ddp_result train(ddp_group *world, void *user) {
    float x[64] = {0};
    (void)user;
    say(&stage_shared->counter);
    for (;;) {
        ddp_result result = ddp_all_reduce(world, x, x, 64, DDP_F32, DDP_OP_SUM, NULL);
        if (result != DDP_OK) return result;
    }
}

/* The call is in flight on one machine when the cable is cut; the other machine makes it only then. There it
   can succeed, since all ranks have arrived. */
static ddp_result late(ddp_group *world, void *user) {
    ddp_result result;
    (void)user;
    say(&stage_shared->counter);
    if (ddp_rank(world) < 2) heard(&stage_shared->numbers[0], 1);
    result = ddp_barrier(world);
    return result == DDP_OK ? ddp_barrier(world) : result;
}

static void test_cut(void) {
    static const struct {
        const char *what;
        body fn;
    } table[] = {{"the cable is cut in the middle of training", train},
                 {"the cable is cut while one machine waits", late}};
    enum { TIMEOUT_MS = 6000 };
    for (int i = 0; i < 2; i++) {
        faults_begin(table[i].what);
        start("env://", TIMEOUT_MS, table[i].fn);
        EXPECT(heard(&stage_shared->counter, 4), "only %d of 4 ranks came", stage_shared->counter);
        ranks_sleep_us(100000);
        event_now();
        EXPECT(on(1, "ip link set cable down") == 0, "the cable cannot be cut");
        say(&stage_shared->numbers[0]);
        reap();
        for (int r = 0; r < 4; r++) {
            const seen *s = &stage_shared->rank[r];
            int names = r < 2 ? names_rank(s->text, 2) || names_rank(s->text, 3) : names_rank(s->text, 0);
            double took = s->first_at - stage_shared->event_at;
            EXPECT(s->done && (s->first == DDP_ERR_PEER_LOST || s->first == DDP_ERR_TIMEOUT),
                   "rank %d: %s '%s'", r, s->done ? ddp_result_name(s->first) : "died", s->text);
            EXPECT(names, "rank %d: '%s' does not name a rank of the other machine", r, s->text);
            EXPECT(took < TIMEOUT_MS * 1e-3 + PROMPT_SECONDS, "rank %d: after %.2f s of %d ms", r, took,
                   TIMEOUT_MS);
            printf("rank %d after %.2f s: %s\n", r, took, s->text);
        }
        EXPECT(on(1, "ip link set cable up") == 0, "the cable cannot be reconnected");
    }
}

int main(void) {
    faults_start(100);
    snprintf(path, sizeof path, "file:///tmp/ddp_test_netns_%d", (int)getpid());
    if (geteuid() != 0 || !make_network()) {
        fprintf(stderr, "no root, network namespaces or iproute2 here: skipped\n");
        return 77;
    }
    test_meeting();
    test_cut();
    return faults_end();
}

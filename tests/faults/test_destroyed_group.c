/*  test_destroyed_group.c - a rank that destroys a group is lost to the others: DDP_ERR_PEER_LOST names it,
    without a timeout.

    test_destroyed_group [processes|threads] */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { W = 3, LEAVER = 1, TAG = 2 };
enum { IN_BARRIER, IN_RECV, IN_SEND, IN_ASYNC, CALLS };
static const char *const call_titles[CALLS] = {"ddp_barrier", "ddp_recv", "ddp_send", "ddp_all_reduce"};
static const char *const call_names[CALLS] = {"barrier", "recv", "send of 1 MiB", "asynchronous all_reduce"};

static ddp_result call_of(ddp_group *group, int call) {
    enum { LARGE = 1 << 18 };
    float *data = (float *)calloc(LARGE, sizeof *data);
    ddp_work work = DDP_ZERO;
    ddp_result result = DDP_ERR_NO_MEMORY;
    if (!data) return result;
    if (call == IN_BARRIER) result = ddp_barrier(group);
    if (call == IN_RECV) result = ddp_recv(group, data, 1, DDP_F32, LEAVER, TAG, NULL);
    if (call == IN_SEND) result = ddp_send(group, data, LARGE, DDP_F32, LEAVER, TAG, NULL);
    if (call == IN_ASYNC) {
        result = ddp_all_reduce(group, data, data, 4, DDP_F32, DDP_OP_SUM, &work);
        if (result == DDP_OK) result = ddp_wait(group, &work);
    }
    free(data);
    return result;
}

/* early: it leaves before the others call. */
typedef struct plan {
    int call, early;
} plan;

static ddp_result rank_main(ddp_group *world, void *user) {
    const plan *p = (const plan *)user;
    ddp_group *child = NULL;
    ddp_result result;
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    RANKS_OK(world, ddp_barrier(child));
    if (ddp_rank(world) == LEAVER) {
        if (!p->early) ranks_sleep_us(100000);
        ddp_group_destroy(child);
        say(&stage_shared->counter);
        meet_outside(W); /* the rank itself stays */
        return DDP_OK;
    }
    if (p->early) heard(&stage_shared->counter, 1);
    result = call_of(child, p->call);
    (void)!note(world, child, result);
    meet_outside(W);
    ddp_group_destroy(child);
    return DDP_OK;
}

static void run(ranks_mode mode, int call, int early) {
    char scenario[120];
    plan p;
    p.call = call;
    p.early = early;
    snprintf(scenario, sizeof scenario, "%s: a rank destroys a group %s the others' %s",
             ranks_mode_name(mode), early ? "before" : "during", call_names[call]);
    faults_begin(scenario);
    EXPECT(launch(mode, W, 20000, rank_main, &p) == DDP_OK, "%s", ddp_last_error());
    for (int r = 0; r < W; r++) {
        const seen *s = &stage_shared->rank[r];
        if (r == LEAVER) continue;
        EXPECT(s->done && s->first == DDP_ERR_PEER_LOST, "rank %d: %s '%s'", r,
               s->done ? ddp_result_name(s->first) : "died", s->text);
        EXPECT(names_rank(s->text, LEAVER) && says(s->text, "destroyed this group"), "rank %d: '%s'", r,
               s->text);
        EXPECT(says(s->text, call_titles[call]), "rank %d: '%s'", r, s->text);
        EXPECT(s->second == DDP_ERR_POISONED, "rank %d: the next call returned %s", r,
               ddp_result_name(s->second));
    }
    EXPECT(launch_seconds < PROMPT_SECONDS, "took %.1f s", launch_seconds);
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) {
        fprintf(stderr, "usage: test_destroyed_group [processes|threads]\n");
        return 2;
    }
    faults_start(100);
    for (int call = 0; call < CALLS; call++)
        for (int early = 0; early < 2; early++) run(mode, call, early);
    return faults_end();
}

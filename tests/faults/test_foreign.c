/*  test_foreign.c - failures over a plugged-in backend: no rank hangs, and each error names the failure and
    the rank.

    test_foreign foreign|foreign_threads */
#include "../../ddp.h"
#include "../support/ranks.h"

#include <signal.h>

enum { KILLED_IN_COLLECTIVE, KILLED_BEFORE_MESSAGE, LEFT, ABSENT, OTHER_COUNT, OTHER_CALL, SCENARIOS };
static const struct {
    const char *what;
    int processes;
    ddp_result want;
    const char *texts[3];
} table[SCENARIOS] = {
    /* UCX or the control group reports it, whichever detects it first. */
    {"killed in a collective", 1, DDP_ERR_PEER_LOST, {"rank 1", "", ""}},
    {"killed before its message", 1, DDP_ERR_PEER_LOST, {"rank 1", "", ""}},
    {"left", 0, DDP_ERR_PEER_LOST, {"rank 1", "has destroyed this group", ""}},
    {"absent", 0, DDP_ERR_TIMEOUT, {"timed out after", "missing", "rank 1"}},
    {"another count", 0, DDP_ERR_MISMATCH, {"rank 1", "20 bytes", "16 bytes"}},
    {"another call", 0, DDP_ERR_MISMATCH, {"rank 1", "ddp_broadcast", "ddp_all_reduce"}},
};

typedef struct report {
    int entered;
    ddp_result first, second;
    char text[600], again[600];
} report;
typedef struct plan {
    int scenario;
    report *reports;
} plan;

/* Calls until one fails. */
static ddp_result fail_sooner_or_later(ddp_group *g, int with_message) {
    float data[8] = {1};
    ddp_result result = with_message ? ddp_recv(g, data, 4, DDP_F32, 1, 0, NULL) : DDP_OK;
    while (result == DDP_OK) result = ddp_all_reduce(g, data, data, 4, DDP_F32, DDP_OP_MAX, NULL);
    return result;
}

static ddp_result rank_main(ddp_group *g, void *user) {
    const plan *p = (const plan *)user;
    report *mine = &p->reports[ddp_rank(g)];
    float data[8] = {1};
    __atomic_store_n(&mine->entered, 1, __ATOMIC_RELEASE);
    if (ddp_rank(g) == 1) {
        for (int r = 0; r < 3; r++)
            while (!__atomic_load_n(&p->reports[r].entered, __ATOMIC_ACQUIRE)) ranks_sleep_us(100);
        for (int i = 0; i < 10 && p->scenario != KILLED_BEFORE_MESSAGE; i++)
            RANKS_OK(g, ddp_all_reduce(g, data, data, 4, DDP_F32, DDP_OP_MAX, NULL));
        if (table[p->scenario].processes) raise(SIGKILL);
        if (p->scenario == LEFT) return DDP_OK;
        if (p->scenario == OTHER_COUNT) (void)!ddp_all_reduce(g, data, data, 5, DDP_F32, DDP_OP_MAX, NULL);
        if (p->scenario == OTHER_CALL) (void)!ddp_broadcast(g, data, 4, DDP_F32, 0, NULL);
        while (ddp_group_status(g) == DDP_OK) ranks_sleep_us(1000);
    }
    mine->first = fail_sooner_or_later(g, p->scenario == KILLED_BEFORE_MESSAGE && ddp_rank(g) == 0);
    snprintf(mine->text, sizeof mine->text, "%s", ddp_last_error());
    mine->second = ddp_barrier(g);
    snprintf(mine->again, sizeof mine->again, "%s", ddp_last_error());
    return DDP_OK;
}

static int check(const char *what, int rank, const report *r, ddp_result want, const char *const *texts) {
    /* Rank 1 can get the error from its own call. */
    int good = r->first == want || (rank == 1 && r->first == DDP_ERR_POISONED);
    for (int i = 0; i < 3; i++) good = good && strstr(r->text, texts[i]) && strstr(r->again, texts[i]);
    if (!good || r->second != DDP_ERR_POISONED)
        return fprintf(stderr, "FAIL %s, rank %d: %s '%s', then %s '%s'\n", what, rank,
                       ddp_result_name(r->first), r->text, ddp_result_name(r->second), r->again),
               1;
    return 0;
}

int main(int argc, char **argv) {
    ranks_mode mode;
    int failures = 0;
    if (argc < 2 || ranks_mode_parse(argv[1], &mode) != 0)
        return fprintf(stderr, "usage: test_foreign foreign|foreign_threads\n"), 2;
    watchdog_start(60);
    for (int s = 0; s < SCENARIOS; s++) {
        plan p;
        if (table[s].processes && mode != RANKS_FOREIGN) continue;
        p.scenario = s;
        p.reports = (report *)ranks_shared(3 * sizeof(report));
        ddp_result result = ranks_run(mode, 3, s == ABSENT ? 8000 : 20000, rank_main, &p);
        for (int r = 0; r < 3; r++)
            if (r != 1 || s >= ABSENT)
                failures += check(table[s].what, r, &p.reports[r], table[s].want, table[s].texts);
        if (failures)
            fprintf(stderr, "FAIL %s: the launch gave %s '%s'\n", table[s].what, ddp_result_name(result),
                    result == DDP_OK ? "" : ddp_last_error());
    }
    if (!failures) printf("ok: %s\n", ranks_mode_name(mode));
    return failures != 0;
}

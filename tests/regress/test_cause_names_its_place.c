/*  test_cause_names_its_place.c - the cause that other ranks and calls report contains where it began.

    The timeout of a ddp_recv appeared in the barrier of every other rank as "timed out after 500 ms: rank 0
    did not send (tag 4)", without the rank and the call that had waited. A failed group that failed a second
    one gave it a whole error line, or a rank number of the first group.

    test_cause_names_its_place [processes|threads|tcp] */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { W = 4, SHORT_MS = RUN_INTO_MS / 4 };

static void note_call(ddp_group *world, ddp_result result, int second) {
    seen *s = seen_by(world);
    if (second)
        s->second = result;
    else
        s->first = result;
    snprintf(second ? s->text2 : s->text, sizeof s->text, "%s", result == DDP_OK ? "" : ddp_last_error());
    s->pid = getpid();
    s->done = 1;
}

static int count_of(const char *text, const char *word) {
    int count = 0;
    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word)) count++;
    return count;
}

static void expect_cause(int rank, const char *text, const char *cause) {
    EXPECT(strstr(text, cause), "rank %d: no '%s' in '%s'", rank, cause, text);
    EXPECT(count_of(text, "cause: ") <= 1, "rank %d: '%s'", rank, text);
}

//== a message that is never sent =============================================================

static ddp_result message_main(ddp_group *world, void *user) {
    float x = 0;
    int rank = ddp_rank(world);
    (void)user;
    RANKS_OK(world, ddp_barrier(world));
    if (rank == 1) note_call(world, ddp_recv(world, &x, 1, DDP_F32, 0, 4, NULL), 0);
    if (rank == 1) say(&stage_shared->counter);
    heard(&stage_shared->counter, 1);
    if (rank != 1) note_call(world, ddp_barrier(world), 0);
    note_call(world, ddp_barrier(world), 1);
    meet_outside(W);
    return DDP_OK;
}

//== a collective that a rank misses, and its next call =========================================

static ddp_result late_main(ddp_group *world, void *user) {
    float x = 0;
    int rank = ddp_rank(world);
    (void)user;
    RANKS_OK(world, ddp_barrier(world));
    if (rank == 3) heard(&stage_shared->counter, 3);
    note_call(world,
              rank == 3 ? ddp_all_reduce(world, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL) : ddp_barrier(world),
              0);
    say(&stage_shared->counter);
    note_call(world, ddp_barrier(world), 1);
    meet_outside(W);
    return DDP_OK;
}

//== a failure that propagates from a group to its parent ========================================

static ddp_result child_main(ddp_group *world, void *user) {
    ddp_group *child;
    float x = 0;
    int rank = ddp_rank(world);
    (void)user;
    RANKS_OK(world, ddp_group_split(world, rank / 2, 0, &child));
    RANKS_OK(world, ddp_barrier(world));
    if (rank == 3) { /* rank 1 of its group; rank 2 never sends */
        ddp_result result = ddp_recv(child, &x, 1, DDP_F32, 0, 9, NULL);
        note_call(world, result, 0);
        ddp_fail(result, "%s", seen_by(world)->text);
        ddp_group_poison(world, result, ddp_last_error());
        say(&stage_shared->counter);
    }
    heard(&stage_shared->counter, 1);
    note_call(world, ddp_barrier(world), 1);
    meet_outside(W);
    ddp_group_destroy(child);
    return DDP_OK;
}

//== a rank lost in a child group is lost in the parent =========================================

static ddp_result lost_main(ddp_group *world, void *user) {
    ddp_group *child;
    ddp_mesh *mesh = NULL;
    ddp_mesh_desc grid = DDP_ZERO;
    float x = 0;
    int rank = ddp_rank(world), on_mesh = *(const int *)user;
    grid.ndim = 2;
    grid.shape[0] = 2;
    grid.shape[1] = 2;
    grid.names[0] = "dp";
    grid.names[1] = "tp";
    if (on_mesh) RANKS_OK(world, ddp_mesh_create(&mesh, world, &grid));
    if (on_mesh)
        child = ddp_mesh_group(mesh, "dp");
    else
        RANKS_OK(world, ddp_group_split(world, rank % 2, 0, &child));
    RANKS_OK(world, ddp_barrier(world));
    seen_by(world)->pid = getpid();
    if (rank == 3 && ranks_on.start == RANKS_LAUNCHED) {
        kill(getpid(), SIGKILL);
    } else if (rank != 3) {
        if (rank == 1) note_call(world, ddp_all_reduce(child, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL), 0);
        if (rank == 1) say(&stage_shared->counter);
        heard(&stage_shared->counter, 1);
        note_call(world, ddp_barrier(world), 1);
    }
    if (mesh)
        ddp_mesh_destroy(mesh);
    else
        ddp_group_destroy(child);
    return DDP_OK;
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    char pid[32];
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) return 2;
    faults_start(150);
    const seen *rank = stage_shared->rank;
    int messages = mode != RANKS_TCP; /* the tcp backend has none */

    if (messages) {
        faults_begin("a message that never comes");
        (void)launch(mode, W, SHORT_MS, message_main, NULL);
        for (int r = 0; r < W; r++) {
            EXPECT(rank[r].first == DDP_ERR_TIMEOUT && rank[r].second == DDP_ERR_POISONED, "rank %d: %s, %s",
                   r, rank[r].text, rank[r].text2);
            if (r != 1) expect_cause(r, rank[r].text, ": cause: rank 1 in ddp_recv tag=4: timed out after");
            expect_cause(r, rank[r].text2, ": cause: rank 1 in ddp_recv tag=4: timed out after");
        }
        EXPECT(strstr(rank[1].text, "rank 1/4 ddp_recv") == rank[1].text && !strstr(rank[1].text, "cause: "),
               "%s", rank[1].text);

        faults_begin("from a group to its parent");
        (void)launch(mode, W, SHORT_MS, child_main, NULL);
        for (int r = 0; r < W; r++)
            expect_cause(r, rank[r].text2, ": cause: rank 1 of group=world.1 in ddp_recv: timed out after");
    }

    faults_begin("a collective that rank 3 misses");
    (void)launch(mode, W, SHORT_MS, late_main, NULL);
    for (int r = 0; r < W; r++) {
        EXPECT(rank[r].first != DDP_OK && rank[r].second != DDP_OK, "rank %d: %s, %s", r, rank[r].text,
               rank[r].text2);
        if (r != 3) EXPECT(!strstr(rank[r].text, "cause: "), "the call itself: %s", rank[r].text);
        expect_cause(r, r == 3 ? rank[r].text : rank[r].text2, ": cause: rank ");
        expect_cause(r, r == 3 ? rank[r].text : rank[r].text2, " in ddp_barrier seq=");
    }

    for (int on_mesh = 0; on_mesh < 2; on_mesh++) {
        faults_begin(on_mesh ? "lost on an axis of a mesh" : "lost in a split");
        (void)launch(mode, W, 20000, lost_main, &on_mesh);
        snprintf(pid, sizeof pid, "%d", (int)rank[3].pid);
        EXPECT(rank[1].first == DDP_ERR_PEER_LOST && says(rank[1].text, mode == RANKS_TCP ? "rank 1" : pid),
               "child: %s", rank[1].text);
        EXPECT(strstr(rank[1].text, "rank 0/2 ") == rank[1].text && names_rank(rank[1].text, 1), "child: %s",
               rank[1].text);
        for (int r = 0; r < 3; r++) {
            EXPECT(rank[r].second != DDP_OK && names_rank(rank[r].text2, 3), "rank %d: %s", r, rank[r].text2);
            EXPECT(mode == RANKS_TCP || says(rank[r].text2, pid), "rank %d: no pid %s in '%s'", r, pid,
                   rank[r].text2);
        }
    }
    return faults_end();
}

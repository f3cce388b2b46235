/*  test_agree.c - ddp_agree_groups over the axes of a mesh: every rank of the mesh returns the same result,
    and its error line has one prefix and one cause.

    test_agree BACKEND [W ...]     one of support/ranks.h

    The mesh has two rows ("replicas") if W is even, and W / 2 columns ("shard"). groups[0] is a row. */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#define WHO "ddp_fsdp_save"
#define SECONDS (5.0 * ranks_slow())

typedef struct axes {
    ddp_group *world, *groups[2];
    int columns, row, column;
} axes;

static ddp_result agree(const axes *a, ddp_result mine, int number) {
    char what[40];
    snprintf(what, sizeof what, "dtype=f32 number=%d", number);
    return ddp_agree_groups(a->groups, 2, WHO, mine, (uint64_t)number, what);
}

static int count_of(const char *text, const char *word) {
    int count = 0;
    for (; (text = strstr(text, word)) != NULL; text++) count++;
    return count;
}

/* Checks the result, its cause, and that this rank's prefix is in front of it once. */
static ddp_result look(const axes *a, ddp_result got, ddp_result wanted, const char *cause, double start) {
    const char *text = ddp_last_error();
    RANKS_CHECK(a->world, ddp_now() - start < SECONDS, "it took %.1f s", ddp_now() - start);
    RANKS_CHECK(a->world, got == wanted, "%s: %s", ddp_result_name(got), text);
    if (wanted == DDP_OK) return DDP_OK;
    RANKS_CHECK(a->world, count_of(text, cause) == 1 && count_of(text, WHO) == 1, "\"%s\"", text);
    /* the failing rank's own line stays unchanged if it names the call */
    RANKS_CHECK(a->world,
                strncmp(text, WHO ": ", strlen(WHO) + 2) == 0
                    || (strncmp(text, "rank ", 5) == 0 && count_of(text, "/") == 1),
                "\"%s\"", text);
    return DDP_OK;
}

/* Each rank fails in turn, with a line that has no prefix, that of the call, or that of a failure in the
   world. */
static ddp_result one_fails(const axes *a) {
    int w = ddp_world_size(a->world), rank = ddp_rank(a->world);
    for (int k = 0; k < 3 * w; k++) {
        int odd = k % w, row = odd / a->columns, column = odd % a->columns;
        char cause[40], line[200] = "";
        double start = ddp_now();
        ddp_result mine = rank == odd ? DDP_ERR_SYSTEM : DDP_OK;
        snprintf(cause, sizeof cause, "the disk of %d is full", odd);
        if (rank == odd && k < w)
            ddp_fail(mine, "%s", cause);
        else if (rank == odd && k < 2 * w)
            ddp_fail(mine, WHO ": %s", cause);
        else if (rank == odd)
            ddp_fail_in(mine, WHO, a->world, "%s", cause);
        RANKS_OK(a->world, look(a, agree(a, mine, 0), DDP_ERR_SYSTEM, cause, start));
        if (k >= w) continue;
        /* rank 0 and rank 3 of a mesh of 2 x 2, where rank 1 fails */
        if (a->row == row && a->columns > 1)
            snprintf(line, sizeof line, "rank %d/%d " WHO " group=world.shard: rank %d: %s", a->column,
                     a->columns, column, cause);
        else if (a->columns > 1)
            snprintf(line, sizeof line,
                     "rank %d/2 " WHO " group=world.replicas: rank %d: group=world.shard: rank %d: %s",
                     a->row, row, column, cause);
        RANKS_CHECK(a->world, !line[0] || strcmp(ddp_last_error(), line) == 0, "\"%s\" instead of \"%s\"",
                    ddp_last_error(), line);
    }
    return DDP_OK;
}

/* Of several failures all ranks return that of the lowest rank. A failure that only follows from another one
   comes last. */
static ddp_result several_fail(const axes *a) {
    int w = ddp_world_size(a->world), rank = ddp_rank(a->world);
    double start = ddp_now();
    ddp_result mine = rank == 0 ? DDP_ERR_POISONED : rank == w - 1 ? DDP_ERR_SYSTEM : DDP_ERR_CORRUPT;
    ddp_fail(mine, "<failure of %d>", rank);
    ddp_result wanted = w == 1 ? DDP_ERR_POISONED : w == 2 ? DDP_ERR_SYSTEM : DDP_ERR_CORRUPT;
    return look(a, agree(a, mine, 0), wanted, w == 1 ? "<failure of 0>" : "<failure of 1>", start);
}

/* A number that differs on one rank, or one row. A failure takes precedence. */
static ddp_result numbers(const axes *a) {
    int w = ddp_world_size(a->world), rank = ddp_rank(a->world);
    for (int odd = 0; odd < w && w > 1; odd++) {
        double start = ddp_now();
        int number = rank == odd ? 7 : 3;
        RANKS_OK(a->world, look(a, agree(a, DDP_OK, number), DDP_ERR_MISMATCH, "number=7", start));
        RANKS_CHECK(a->world, strstr(ddp_last_error(), "number=3") && !strstr(ddp_last_error(), "dtype"),
                    "%s", ddp_last_error());
        start = ddp_now();
        ddp_result mine = rank == odd ? ddp_fail(DDP_ERR_SYSTEM, "<failure>") : DDP_OK;
        RANKS_OK(a->world, look(a, agree(a, mine, number), DDP_ERR_SYSTEM, "<failure>", start));
    }
    if (w == 1 || w % 2) return DDP_OK;
    double start = ddp_now();
    RANKS_OK(a->world, look(a, agree(a, DDP_OK, a->row), DDP_ERR_MISMATCH,
                            "ranks differ: rank 0 number=0, rank 1 number=1;", start));
    return DDP_OK;
}

/* NULL and groups of one rank are ignored; without other groups the rank is by itself. */
static ddp_result left_out(const axes *a) {
    int rank = ddp_rank(a->world), w = ddp_world_size(a->world);
    ddp_group *solo, *groups[3];
    double start = ddp_now();
    RANKS_OK(a->world, ddp_group_split(a->world, rank, 0, &solo));
    groups[0] = solo;
    groups[1] = NULL;
    groups[2] = a->world;
    ddp_result mine = rank == w - 1 ? ddp_fail(DDP_ERR_SYSTEM, "<failure>") : DDP_OK;
    RANKS_OK(a->world,
             look(a, ddp_agree_groups(groups, 3, WHO, mine, 0, ""), DDP_ERR_SYSTEM, "<failure>", start));
    RANKS_CHECK(a->world, w == 1 || strstr(ddp_last_error(), "group=world: "), "\"%s\"", ddp_last_error());
    mine = rank == w - 1 ? ddp_fail(DDP_ERR_SYSTEM, "<failure>") : DDP_OK;
    RANKS_OK(a->world,
             look(a, ddp_agree_groups(groups, 2, WHO, mine, (uint64_t)rank, ""), mine, "<failure>", start));
    ddp_group_destroy(solo);
    return DDP_OK;
}

/* The group of the last row has failed. The other rows return its error without waiting. */
static ddp_result a_group_fails(const axes *a) {
    int w = ddp_world_size(a->world);
    double start = ddp_now();
    if (w == 1 || w % 2 || a->columns == 1) return DDP_OK;
    if (ddp_rank(a->world) == w - 1) RANKS_OK(a->world, ddp_group_abort(a->groups[0]));
    RANKS_OK(a->world, look(a, agree(a, DDP_OK, 0), DDP_ERR_POISONED, "called ddp_group_abort", start));
    RANKS_CHECK(a->world,
                a->row == 1 || strstr(ddp_last_error(), "group=world.replicas: rank 1: group=world.shard: "),
                "\"%s\"", ddp_last_error());
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    double start = ranks_now();
    int w = ddp_world_size(world);
    axes a;
    ddp_mesh *mesh;
    ddp_mesh_desc desc = DDP_ZERO;
    desc.ndim = 2;
    desc.names[0] = "replicas";
    desc.names[1] = "shard";
    desc.shape[0] = w % 2 ? 1 : 2;
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &desc));
    a.world = world;
    a.columns = w / desc.shape[0];
    a.row = ddp_rank(world) / a.columns;
    a.column = ddp_rank(world) % a.columns;
    a.groups[0] = ddp_mesh_group(mesh, "shard");
    a.groups[1] = ddp_mesh_group(mesh, "replicas");
    RANKS_OK(world, agree(&a, DDP_OK, 5));
    RANKS_RUN(world, one_fails(&a));
    RANKS_RUN(world, several_fail(&a));
    RANKS_RUN(world, numbers(&a));
    RANKS_RUN(world, left_out(&a));
    RANKS_RUN(world, a_group_fails(&a));
    ddp_mesh_destroy(mesh);
    if (ddp_rank(world) == 0)
        printf("ok: %s W=%d in %.1f s\n", ranks_mode_name(*(ranks_mode *)user), w, ranks_now() - start);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 3, 4, 6, 0};
    ranks_mode mode;
    return ranks_each(argc, argv, defaults, 90, &mode, rank_main) != 0;
}

/*  test_mesh.c - a grid of ranks: members of each group, concurrent use of groups, and invalid meshes.

    test_mesh BACKEND [W ...]     one of support/ranks.h */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

/* The group along dimension d has the ranks that a plain loop over the grid finds. */
static ddp_result members_of(ddp_group *world, ddp_mesh *mesh, const ddp_mesh_desc *desc, const int *shape,
                             int d) {
    int rank = ddp_rank(world), stride = 1, have[DDP_MAX_LOCAL_RANKS], place;
    ddp_group *group = ddp_mesh_group(mesh, desc->names[d]);
    RANKS_CHECK(world, group, "%s: %s", desc->names[d], ddp_last_error());
    for (int i = d + 1; i < desc->ndim; i++) stride *= shape[i];
    place = rank / stride % shape[d];
    RANKS_CHECK(world, ddp_world_size(group) == shape[d] && ddp_rank(group) == place, "%s: rank %d of %d",
                desc->names[d], ddp_rank(group), ddp_world_size(group));
    RANKS_CHECK(world, strstr(ddp_group_name(group), desc->names[d]), "%s: its name is %s", desc->names[d],
                ddp_group_name(group));
    RANKS_OK(group, ddp_all_gather(group, &rank, have, 1, DDP_I32, NULL));
    for (int i = 0; i < shape[d]; i++)
        RANKS_CHECK(world, have[i] == rank + (i - place) * stride, "%s: rank %d is %d of the world",
                    desc->names[d], i, have[i]);
    return DDP_OK;
}

/* Every way to write world_size as shape[0] * shape[1] * shape[2], with and without a 0 for one of them. */
static ddp_result all_shapes(ddp_group *world) {
    int w = ddp_world_size(world);
    for (int a = 1; a <= w; a++)
        for (int b = 1; b <= w / a; b++)
            for (int open = -1; open < 3 && w % (a * b) == 0 && w % a == 0; open++) {
                ddp_mesh_desc desc = DDP_ZERO;
                int shape[3];
                ddp_mesh *mesh;
                desc.ndim = 3;
                desc.names[0] = "pp", desc.names[1] = "dp", desc.names[2] = "tp";
                shape[0] = a, shape[1] = b, shape[2] = w / (a * b);
                for (int i = 0; i < 3; i++) desc.shape[i] = i == open ? 0 : shape[i];
                RANKS_OK(world, ddp_mesh_create(&mesh, world, &desc));
                for (int d = 0; d < 3; d++) {
                    ddp_result result = members_of(world, mesh, &desc, shape, d);
                    if (result != DDP_OK) return result;
                }
                ddp_mesh_destroy(mesh);
            }
    ddp_mesh_destroy(NULL);
    return DDP_OK;
}

/* Work in flight on all groups of a rank at once, waited for in the opposite order. */
static ddp_result side_by_side(ddp_group *world) {
    enum { ROUNDS = 50, COUNT = 1000 };
    static const char *const names[] = {"dp", "tp"};
    int w = ddp_world_size(world), rank = ddp_rank(world);
    ddp_mesh_desc desc = DDP_ZERO;
    ddp_mesh *mesh;
    float *data = (float *)malloc(2 * COUNT * sizeof *data);
    desc.ndim = 2;
    desc.shape[1] = w % 2 == 0 ? 2 : 1;
    desc.names[0] = names[0], desc.names[1] = names[1];
    RANKS_CHECK(world, data, "malloc");
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &desc));
    for (int round = 0; round < ROUNDS; round++) {
        ddp_work work[2];
        for (int i = 0; i < 2 * COUNT; i++) data[i] = (float)(rank + round);
        for (int g = 0; g < 2; g++)
            RANKS_OK(world, ddp_all_reduce(ddp_mesh_group(mesh, names[g]), data + g * COUNT, data + g * COUNT,
                                           COUNT, DDP_F32, DDP_OP_SUM, &work[g]));
        for (int g = 1; g >= 0; g--) {
            ddp_group *group = ddp_mesh_group(mesh, names[g]);
            int n = ddp_world_size(group), stride = g == 0 ? desc.shape[1] : 1,
                first = rank - ddp_rank(group) * stride;
            float want = (float)(n * (first + round) + stride * n * (n - 1) / 2);
            RANKS_OK(world, ddp_wait(group, &work[g]));
            for (int i = 0; i < COUNT; i++)
                RANKS_CHECK(world, data[g * COUNT + i] == want, "%s: %g, wanted %g", names[g],
                            data[g * COUNT + i], want);
        }
    }
    ddp_mesh_destroy(mesh);
    free(data);
    return DDP_OK;
}

static ddp_result refused(ddp_group *world, const ddp_mesh_desc *desc, const char *text) {
    ddp_mesh *mesh = (ddp_mesh *)(uintptr_t)1;
    ddp_result result = ddp_mesh_create(&mesh, world, desc);
    RANKS_CHECK(world, result == DDP_ERR_INVALID && mesh == NULL && strstr(ddp_last_error(), text),
                "wanted \"%s\", have %s \"%s\"", text, ddp_result_name(result), ddp_last_error());
    return DDP_OK;
}

#define REFUSED(world, desc, text)                                    \
    do {                                                              \
        ddp_result refused_result = refused((world), (desc), (text)); \
        if (refused_result != DDP_OK) return refused_result;          \
    } while (0)

static ddp_result bad_input(ddp_group *world) {
    int w = ddp_world_size(world);
    char both[64];
    ddp_mesh *mesh;
    ddp_mesh_desc desc = DDP_ZERO, good;
    desc.ndim = 2;
    desc.shape[0] = w, desc.shape[1] = 1;
    desc.names[0] = "dp", desc.names[1] = "tp";
    good = desc;
    RANKS_CHECK(world, ddp_mesh_create(NULL, world, &good) == DDP_ERR_INVALID, "out");
    RANKS_CHECK(world, ddp_mesh_create(&mesh, NULL, &good) == DDP_ERR_INVALID && !mesh, "world");
    RANKS_CHECK(world, ddp_mesh_create(&mesh, world, NULL) == DDP_ERR_INVALID, "desc");
    desc.ndim = 0;
    REFUSED(world, &desc, "ndim=0; use 1 to 8");
    desc.ndim = DDP_MAX_NDIM + 1;
    REFUSED(world, &desc, "ndim=9");
    desc = good;
    desc.shape[1] = 3;
    snprintf(both, sizeof both, "has %d ranks, but the world has %d", 3 * w, w);
    REFUSED(world, &desc, both);
    desc.shape[0] = desc.shape[1] = 1;
    snprintf(both, sizeof both, "has 1 ranks, but the world has %d", w);
    if (w > 1) REFUSED(world, &desc, both);
    desc.shape[0] = desc.shape[1] = 0x7fffffff;
    REFUSED(world, &desc, "but the world has");
    desc = good;
    desc.shape[0] = 0, desc.shape[1] = w + 1;
    snprintf(both, sizeof both, "%d ranks do not divide world_size=%d", w + 1, w);
    REFUSED(world, &desc, both);
    desc.shape[1] = 0;
    REFUSED(world, &desc, "shape[1]=0; use 1 or more");
    desc.shape[0] = -2;
    REFUSED(world, &desc, "shape[0]=-2");
    desc = good;
    desc.names[1] = "dp";
    REFUSED(world, &desc, "two dimensions have the name \"dp\"");
    desc.names[1] = NULL;
    REFUSED(world, &desc, "names[1] is \"\"");
    desc.names[1] = "a name without an end";
    REFUSED(world, &desc, "of 1 to 15 bytes");
    RANKS_OK(world, ddp_mesh_create(&mesh, world, &good));
    RANKS_CHECK(world,
                !ddp_mesh_group(mesh, "pp")
                    && strstr(ddp_last_error(), "name \"pp\" is not a dimension of mesh dp="),
                "%s", ddp_last_error());
    RANKS_CHECK(world, !ddp_mesh_group(mesh, NULL) && !ddp_mesh_group(NULL, "dp"), "NULL");
    ddp_mesh_destroy(mesh);
    return DDP_OK;
}

/* If ranks pass different meshes, all return that error, and the world stays usable. */
static ddp_result different(ddp_group *world) {
    int w = ddp_world_size(world), last = ddp_rank(world) == w - 1;
    char text[128];
    ddp_mesh *mesh;
    ddp_mesh_desc desc = DDP_ZERO;
    ddp_result result;
    if (w == 1) return DDP_OK;
    desc.ndim = 2;
    desc.shape[0] = last ? 1 : w, desc.shape[1] = last ? w : 1;
    desc.names[0] = "dp", desc.names[1] = "tp";
    result = ddp_mesh_create(&mesh, world, &desc);
    snprintf(
        text, sizeof text,
        "ddp_mesh_create group=world: ranks differ: rank 0 dp=%d, rank %d dp=1; give every rank the same", w,
        w - 1);
    RANKS_CHECK(world, result == DDP_ERR_MISMATCH && !mesh && strstr(ddp_last_error(), text), "%s \"%s\"",
                ddp_result_name(result), ddp_last_error());
    RANKS_OK(world, ddp_barrier(world));
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    double start = ranks_now();
    RANKS_RUN(world, all_shapes(world));
    RANKS_RUN(world, side_by_side(world));
    RANKS_RUN(world, bad_input(world));
    RANKS_RUN(world, different(world));
    if (ddp_rank(world) == 0)
        printf("ok: %s W=%d in %.1f s\n", ranks_mode_name(*(ranks_mode *)user), ddp_world_size(world),
               ranks_now() - start);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 4, 6, 8, 0};
    ranks_mode mode;
    return ranks_each(argc, argv, defaults, 90, &mode, rank_main) != 0;
}

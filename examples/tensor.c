/*  tensor.c - tensors over ranks: views, copies, and every conversion from one placement to another

        cc -O3 -march=native examples/tensor.c -o tensor -lm -lpthread
        ./tensor                  2 ranks
        ./tensor 4                4 ranks
        mpirun --oversubscribe -n 4 ./tensor 4    the ranks of a launcher

    A placement states which part of a global tensor each rank holds:

        REPLICATE   every rank has all of it
        SHARD(d)    every rank has a piece along dimension d; the last piece may be smaller
        PARTIAL     every rank has a summand of the full shape

    ddp_tensor_redistribute converts one into another with the cheapest collective. The table shows which
    collective that is, and how many bytes rank 0 sends. PyTorch calls such a tensor DTensor. */
#define DDP_IMPLEMENTATION
#include "../ddp_tensor.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 5, COLUMNS = 6 }; /* of the global tensor; element (i, j) is 10 i + j */
static const int64_t shape[2] = {ROWS, COLUMNS};

/* Compares this rank's part of the global tensor with the formula. */
static ddp_result check(ddp_group *group, const char *what, const ddp_tensor *part,
                        const ddp_tensor_box *box) {
    const float *data = (const float *)part->data;
    for (int64_t i = 0; i < box->shape[0]; i++)
        for (int64_t j = 0; j < box->shape[1]; j++) {
            float expected = (float)(10 * (box->offset[0] + i) + box->offset[1] + j);
            if (data[i * box->shape[1] + j] != expected)
                return ddp_fail(DDP_ERR_CORRUPT, "%s: element (%d, %d) of rank %d is %g, not %g", what,
                                (int)i, (int)j, ddp_rank(group), (double)data[i * box->shape[1] + j],
                                (double)expected);
        }
    return DDP_OK;
}

/* The global tensor, in full on this rank. */
static ddp_result create_full(ddp_group *group, ddp_tensor *full) {
    DDP_TRY(ddp_tensor_create(group, full, DDP_F32, 2, shape));
    for (int k = 0; k < ROWS * COLUMNS; k++)
        ((float *)full->data)[k] = (float)(10 * (k / COLUMNS) + k % COLUMNS);
    return DDP_OK;
}

/* Calls on the tensors of one rank. A view shares the memory of its tensor, a copy has its own. */
static ddp_result local_tensors(ddp_group *group) {
    ddp_tensor full, row, halves, copy = {.dtype = DDP_BF16}, corner, turned = DDP_ZERO;
    DDP_TRY(create_full(group, &full));
    DDP_TRY(ddp_tensor_slice(&full, 0, 2, 3, &row));                           /* (1, 6): row 2 */
    DDP_TRY(ddp_tensor_view(&row, 2, (int64_t[]){2, -1}, &halves));            /* (2, 3) */
    DDP_TRY(ddp_tensor_copy(group, &halves, &copy));                           /* (2, 3), in bfloat16 */
    DDP_TRY(ddp_tensor_transpose(group, &full, (int[]){1, 0}, &turned));       /* (6, 5) */
    DDP_TRY(ddp_tensor_create(group, &corner, DDP_F32, 2, (int64_t[]){2, 2})); /* (2, 2) */
    DDP_TRY(ddp_tensor_fill(group, &corner, -1));
    DDP_TRY(ddp_tensor_copy_box(group, &turned, (int64_t[]){4, 3}, &corner, NULL, (int64_t[]){2, 2}));

    const uint16_t *half = (const uint16_t *)copy.data;
    const float *last = (const float *)corner.data; /* (4, 3), (4, 4), (5, 3), (5, 4) of the transpose */
    int right = ((float *)halves.data)[3] == 23 && half[3] == 0x41b8; /* 23 in bfloat16 */
    right = right && last[0] == 34 && last[1] == 44 && last[2] == 35 && last[3] == 45;
    ddp_tensor_free(group, &corner);
    ddp_tensor_free(group, &turned);
    ddp_tensor_free(group, &copy);
    ddp_tensor_free(group, &full);
    return right ? DDP_OK : ddp_fail(DDP_ERR_CORRUPT, "rank %d: a view or a copy is wrong", ddp_rank(group));
}

/* Converts one placement into another. A PARTIAL result is added up for the check. */
static ddp_result convert(ddp_group *group, const ddp_tensor *full, ddp_placement from, ddp_placement to) {
    int rank = ddp_rank(group), ranks = ddp_world_size(group);
    ddp_tensor_box box, all;
    ddp_tensor_plan plan;
    ddp_tensor in = DDP_ZERO, sum = {.dtype = DDP_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
    DDP_TRY(ddp_tensor_shard(group, full, from, &in));
    DDP_TRY(ddp_placement_shard_box(to, 2, shape, rank, ranks, &box));
    DDP_TRY(ddp_placement_shard_box(DDP_REPLICATE, 2, shape, rank, ranks, &all));
    ddp_tensor out = {.dtype = DDP_F32, .ndim = 2, .shape = {box.shape[0], box.shape[1]}};
    DDP_TRY(ddp_tensor_redistribute_plan(group, &in, from, to, &out, &plan));
    DDP_TRY(ddp_tensor_redistribute(group, &in, from, to, &out)); /* allocates out */
    if (rank == 0)
        printf("%-10s %-10s %-22s %5zu\n", ddp_placement_name(from), ddp_placement_name(to), plan.collective,
               plan.sent_bytes);
    if (to == DDP_PARTIAL) {
        DDP_TRY(ddp_tensor_redistribute(group, &out, to, DDP_REPLICATE, &sum));
        DDP_TRY(check(group, "PARTIAL", &sum, &all));
    } else {
        DDP_TRY(check(group, plan.collective, &out, &box));
    }
    ddp_tensor_free(group, &sum);
    ddp_tensor_free(group, &out);
    ddp_tensor_free(group, &in);
    return DDP_OK;
}

static ddp_result placements(ddp_group *group) {
    const ddp_placement list[4] = {DDP_REPLICATE, DDP_SHARD(0), DDP_SHARD(1), DDP_PARTIAL};
    ddp_tensor full;
    DDP_TRY(create_full(group, &full));
    if (ddp_rank(group) == 0) printf("%-10s %-10s %-22s %5s\n", "from", "to", "collective", "bytes");
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) DDP_TRY(convert(group, &full, list[from], list[to]));
    ddp_tensor_free(group, &full);
    return DDP_OK;
}

/* Rank 0 has a tensor, such as one from a file. It distributes the columns, and gathers them again. */
static ddp_result from_one_rank(ddp_group *group) {
    ddp_tensor full = DDP_ZERO, columns = DDP_ZERO, back = DDP_ZERO;
    ddp_tensor_box box;
    char text[512];
    size_t size = sizeof text;
    if (ddp_rank(group) == 0) DDP_TRY(create_full(group, &full));
    DDP_TRY(ddp_tensor_distribute(group, &full, 0, DDP_SHARD(1), &columns)); /* only rank 0 reads full */
    DDP_TRY(ddp_placement_shard_box(DDP_SHARD(1), 2, shape, ddp_rank(group), ddp_world_size(group), &box));
    DDP_TRY(check(group, "ddp_tensor_distribute", &columns, &box));
    DDP_TRY(ddp_tensor_print(group, &columns, DDP_SHARD(1), text, &size));
    if (ddp_rank(group) == 0) printf("\n%s\n", text);

    DDP_TRY(
        ddp_tensor_gather(group, &columns, DDP_SHARD(1), shape, 0, &back)); /* only rank 0 allocates back */
    if (ddp_rank(group) == 0 && memcmp(back.data, full.data, sizeof(float) * ROWS * COLUMNS) != 0)
        return ddp_fail(DDP_ERR_CORRUPT, "ddp_tensor_gather: the tensor differs from the one distributed");
    ddp_tensor_free(group, &back);
    ddp_tensor_free(group, &columns);
    ddp_tensor_free(group, &full);
    return DDP_OK;
}

/* Two axes, such as data parallel and tensor parallel: a placement along each. With random values that depend
   on the global position, a rank can create its part of a tensor by itself. */
static ddp_result mesh(ddp_group *world) {
    ddp_mesh_desc desc = {.ndim = 2, .shape = {0, ddp_world_size(world) % 2 ? 1 : 2}, .names = {"dp", "tp"}};
    ddp_mesh *grid;
    ddp_tensor_box box, all;
    DDP_TRY(ddp_mesh_create(&grid, world, &desc));
    ddp_tensor_layout rows = {
        .ndim = 2, .shape = {ROWS, COLUMNS}, .axis_count = 2, .placement = {DDP_SHARD(0), DDP_SHARD(0)}};
    rows.axes[0] = ddp_mesh_group(grid, "dp");
    rows.axes[1] = ddp_mesh_group(grid, "tp");
    ddp_tensor_layout replicated = rows;
    memset(replicated.placement, 0, sizeof replicated.placement); /* DDP_REPLICATE */

    DDP_TRY(ddp_tensor_layout_box(&rows, &box));
    DDP_TRY(ddp_tensor_layout_box(&replicated, &all));
    ddp_tensor part, full = DDP_ZERO, expected;
    ddp_tensor_plan plan;
    DDP_TRY(ddp_tensor_create(world, &part, DDP_F32, 2, box.shape));
    DDP_TRY(ddp_tensor_create(world, &expected, DDP_F32, 2, all.shape));
    DDP_TRY(ddp_tensor_init_normal(&box, DDP_F32, 1, 0, 0.02, part.data));
    DDP_TRY(ddp_tensor_init_normal(&all, DDP_F32, 1, 0, 0.02, expected.data));
    DDP_TRY(ddp_tensor_redistribute_mesh(&part, &rows, &replicated, &full, &plan));
    if (ddp_rank(world) == 0)
        printf("mesh %d x %d: rows over both axes -> replicated, %s, %zu bytes\n",
               ddp_world_size(rows.axes[0]), ddp_world_size(rows.axes[1]), plan.collective, plan.sent_bytes);
    if (memcmp(full.data, expected.data, sizeof(float) * ROWS * COLUMNS) != 0)
        return ddp_fail(DDP_ERR_CORRUPT, "rank %d: the parts of the mesh do not form the tensor",
                        ddp_rank(world));
    ddp_tensor_free(rows.axes[0], &full);
    ddp_tensor_free(world, &expected);
    ddp_tensor_free(world, &part);
    ddp_mesh_destroy(grid);
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    (void)user;
    DDP_TRY(local_tensors(world));
    DDP_TRY(placements(world));
    DDP_TRY(from_one_rank(world));
    return mesh(world);
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = DDP_OK;
    if (argc > 2 || desc.world_size < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

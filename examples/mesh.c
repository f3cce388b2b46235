/*  mesh.c - a grid of ranks: data parallel in one direction, tensor parallel in the other

        cc -O3 -march=native examples/mesh.c -o mesh -lm -lpthread
        ./mesh                    2 x 2 ranks
        ./mesh 3 1                3 data-parallel x 1 tensor-parallel ranks
        mpirun --oversubscribe -n 4 ./mesh 2 2    the ranks of a launcher

        mesh {2, 2}        tp 0           tp 1
           dp 0            rank 0 ------- rank 1      a row is a group "tp": it adds parts of y
                             |              |
           dp 1            rank 2 ------- rank 3      a column is a group "dp": it averages gradients

    A linear layer y = W x learns the outputs of another layer. Each tp rank holds some columns of W, and
    multiplies them with its part of x. An all-reduce along tp adds the products. Each dp rank has some of the
    samples. An all-reduce along dp averages the gradients. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 8, COLUMNS = 12, SAMPLES = 12, STEPS = 300 };

static float target(int row, int column) { return sinf((float)(row * COLUMNS + column)); }
static float input(int sample, int column) { return cosf((float)(sample * sample + 3 * column)); }

/* The output of the other layer. */
static float label(int sample, int row) {
    float y = 0;
    for (int c = 0; c < COLUMNS; c++) y += target(row, c) * input(sample, c);
    return y;
}

/* One step with the samples and columns of this rank. *loss is the mean square error over all samples. */
static ddp_result step(ddp_group *dp, ddp_group *tp, float *weight, float *loss) {
    int samples = SAMPLES / ddp_world_size(dp), first_sample = ddp_rank(dp) * samples;
    int columns = COLUMNS / ddp_world_size(tp), first_column = ddp_rank(tp) * columns;
    float y[SAMPLES * ROWS] = {0};        /* (samples, ROWS) */
    float gradient[ROWS * COLUMNS] = {0}; /* (ROWS, columns), as weight */

    for (int s = 0; s < samples; s++)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < columns; c++)
                y[s * ROWS + r] += weight[r * columns + c] * input(first_sample + s, first_column + c);
    DDP_TRY(ddp_all_reduce(tp, y, y, (size_t)(samples * ROWS), DDP_F32, DDP_OP_SUM, NULL));

    *loss = 0;
    for (int s = 0; s < samples; s++)
        for (int r = 0; r < ROWS; r++) {
            float error = y[s * ROWS + r] - label(first_sample + s, r);
            *loss += error * error / (float)(samples * ROWS);
            for (int c = 0; c < columns; c++)
                gradient[r * columns + c] += error * input(first_sample + s, first_column + c)
                                             / (float)samples;
        }
    DDP_TRY(ddp_all_reduce(dp, gradient, gradient, (size_t)(ROWS * columns), DDP_F32, DDP_OP_AVG, NULL));
    for (int i = 0; i < ROWS * columns; i++) weight[i] -= 0.1f * gradient[i];
    return ddp_all_reduce(dp, loss, loss, 1, DDP_F32, DDP_OP_AVG, NULL);
}

static ddp_result train(ddp_group *world, ddp_group *dp, ddp_group *tp) {
    float weight[ROWS * COLUMNS] = {0}, loss = 0, first_loss = 0;
    for (int i = 0; i < STEPS; i++) {
        DDP_TRY(step(dp, tp, weight, &loss));
        if (i == 0) first_loss = loss;
    }
    if (ddp_rank(world) == 0)
        printf("%d x %d ranks: loss %.4f -> %.2g in %d steps\n", ddp_world_size(dp), ddp_world_size(tp),
               (double)first_loss, (double)loss, STEPS);
    if (loss < 1e-3f * first_loss) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g: it must fall by a factor of 1000",
                    (double)first_loss, (double)loss);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    const int *shape = (const int *)user;
    ddp_mesh_desc desc = {.ndim = 2, .shape = {shape[0], shape[1]}, .names = {"dp", "tp"}};
    ddp_mesh *mesh;
    DDP_TRY(ddp_mesh_create(&mesh, world, &desc)); /* the last dimension varies fastest: see the drawing */
    ddp_result result = train(world, ddp_mesh_group(mesh, "dp"), ddp_mesh_group(mesh, "tp"));
    ddp_mesh_destroy(mesh);
    return result;
}

int main(int argc, char **argv) {
    int shape[2] = {2, 2};
    ddp_launch_desc desc = DDP_ZERO;
    ddp_result result = DDP_OK;
    if (argc > 1) shape[0] = atoi(argv[1]);
    if (argc > 2) shape[1] = atoi(argv[2]);
    if (argc > 3 || shape[0] < 1 || shape[1] < 1)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [data-parallel ranks [tensor-parallel ranks]]",
                          argv[0]);
    else if (SAMPLES % shape[0] || COLUMNS % shape[1])
        result = ddp_fail(DDP_ERR_INVALID, "%d x %d ranks: use divisors of %d and %d", shape[0], shape[1],
                          SAMPLES, COLUMNS);
    if (result == DDP_OK) desc.world_size = shape[0] * shape[1];
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, shape);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

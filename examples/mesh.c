/*  mesh.c - a grid of ranks in one page: data parallel in one direction, tensor parallel in the other.

    cc -O3 -march=native examples/mesh.c -o mesh -lm -lpthread
    ./mesh                        2 x 2 ranks
    ./mesh 3 1                    3 data-parallel x 1 tensor-parallel; mpirun -n 4 ./mesh 2 2 takes the ranks of a launcher

    A layer y = W x learns what another one computes. The columns of W are dealt out over "tp": each rank multiplies its columns with its part
    of x, and the partial y are added along tp. Samples are dealt out over "dp": the gradient of the columns is averaged along dp. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 8, COLUMNS = 12, SAMPLES = 12, STEPS = 300 };

static float target(int row, int column) { return sinf((float)(row * COLUMNS + column)); }
static float input(int sample, int column) { return cosf((float)(sample * sample + 3 * column)); }

/* What the layer should give for a sample. */
static float wanted(int sample, int row) {
    float y = 0;
    for (int c = 0; c < COLUMNS; c++) y += target(row, c) * input(sample, c);
    return y;
}

/* One step on this rank's samples and columns; *loss is the mean square over all. */
static ddp_result step(ddp_group *dp, ddp_group *tp, float *w, int columns, float *loss) {
    int samples = SAMPLES / ddp_world_size(dp), first_sample = ddp_rank(dp) * samples,
        first_column = ddp_rank(tp) * columns;
    float y[SAMPLES * ROWS] = {0}, gradient[ROWS * COLUMNS] = {0};
    ddp_result result;
    for (int s = 0; s < samples; s++)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < columns; c++)
                y[s * ROWS + r] += w[r * columns + c] * input(first_sample + s, first_column + c);
    result = ddp_all_reduce(tp, y, y, (size_t)(samples * ROWS), DDP_F32, DDP_OP_SUM, NULL);
    if (result != DDP_OK) return result;
    *loss = 0;
    for (int s = 0; s < samples; s++)
        for (int r = 0; r < ROWS; r++) {
            float error = y[s * ROWS + r] - wanted(first_sample + s, r);
            *loss += error * error / (float)(samples * ROWS);
            for (int c = 0; c < columns; c++)
                gradient[r * columns + c] += error * input(first_sample + s, first_column + c)
                                             / (float)samples;
        }
    result = ddp_all_reduce(dp, gradient, gradient, (size_t)(ROWS * columns), DDP_F32, DDP_OP_AVG, NULL);
    for (int i = 0; i < ROWS * columns; i++) w[i] -= 0.1f * gradient[i];
    return result == DDP_OK ? ddp_all_reduce(dp, loss, loss, 1, DDP_F32, DDP_OP_AVG, NULL) : result;
}

static ddp_result train(ddp_group *world, void *user) {
    ddp_mesh_desc desc = DDP_ZERO;
    ddp_mesh *mesh;
    ddp_group *dp, *tp;
    float w[ROWS * COLUMNS] = {0}, loss = 0, first = 0;
    desc.ndim = 2;
    desc.shape[0] = ((int *)user)[0], desc.names[0] = "dp";
    desc.shape[1] = ((int *)user)[1],
    desc.names[1] = "tp"; /* the last dimension runs fastest: tp ranks are neighbours */
    ddp_result result = ddp_mesh_create(&mesh, world, &desc);
    if (result != DDP_OK) return result;
    dp = ddp_mesh_group(mesh, "dp");
    tp = ddp_mesh_group(mesh, "tp");
    if (SAMPLES % desc.shape[0] || COLUMNS % desc.shape[1])
        result = ddp_fail(DDP_ERR_INVALID,
                          "%d samples and %d columns are not to be dealt out evenly over %d x %d ranks",
                          SAMPLES, COLUMNS, desc.shape[0], desc.shape[1]);
    for (int i = 0; i < STEPS && result == DDP_OK; i++) {
        result = step(dp, tp, w, COLUMNS / desc.shape[1], &loss);
        if (i == 0) first = loss;
    }
    if (result == DDP_OK && !(loss < 1e-3f * first))
        result = ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g", (double)first, (double)loss);
    if (result == DDP_OK && ddp_rank(world) == 0)
        printf("%d x %d ranks: loss %.4f -> %.2g in %d steps\n", desc.shape[0], desc.shape[1], (double)first,
               (double)loss, STEPS);
    ddp_mesh_destroy(mesh);
    return result;
}

static void print_notice(const char *text, void *user) {
    (void)user;
    fprintf(stderr, "%s\n", text);
}

int main(int argc, char **argv) {
    int shape[2] = {argc > 1 ? atoi(argv[1]) : 2, argc > 2 ? atoi(argv[2]) : 2};
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = shape[0] * shape[1];
    desc.group.log_fn = print_notice; /* such as ranks that are waited for */
    if (shape[0] < 1 || shape[1] < 1)
        return fprintf(stderr, "usage: mesh [data-parallel ranks] [tensor-parallel ranks]\n"), 1;
    if (ddp_launch(&desc, train, shape) == DDP_OK) return 0;
    fprintf(stderr, "mesh: %s\n", ddp_last_error());
    return 1;
}

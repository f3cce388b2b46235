/*  model_parallel.c - a model cut in two by hand: half of its layers on each of two ranks, joined by a send and a receive.

    cc -O3 -march=native examples/model_parallel.c -o model_parallel -lm -lpthread
    ./model_parallel                  --help lists the flags; mpirun -n 2 ./model_parallel takes the ranks of a launcher

        rank 0   layers 0 1   forward ───────┐                                  ┌─ backward   update
                                       activations                        gradients
        rank 1   layers 2 3                  └─ forward   loss   backward ──────┘             update

    For a model that does not fit where one rank is: each holds half of the weights, gradients and momentum. Nothing else is gained, because one
    rank waits while the other computes, as the last line shows. Cutting the batch into micro-batches fills that time: see train_gpt_pipeline.c.

    The model learns which arm of a spiral a point is on. At the end every rank trains all layers alone and finds its half of the weights again,
    bit for bit. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "gpt/launcher.h"
#include "gpt/mlp.h"
#include "gpt/options.h"

enum { LAYERS = 4, CUT = 2, ROWS = 128, CLASSES = 3 };
static const int WIDTHS[LAYERS + 1] = {2, 64, 64, 64, CLASSES};

/* Layers first to end - 1, and nothing of the others. */
typedef struct model {
    int first, end, parameter_count;
    mlp_layer layer[LAYERS];
    float *memory, *values, *grads, *momentum, *pack; /* parameter_count each, but for pack */
    float *out[LAYERS + 1],
        *d_out[LAYERS + 1]; /* (ROWS, WIDTHS[i]): what goes into layer i, and its gradient */
} model;

static ddp_result model_create(model *m, int first, int end) {
    float *at;
    size_t floats = MLP_PACK_FLOATS;
    memset(m, 0, sizeof *m);
    m->first = first, m->end = end;
    for (int i = first; i < end; i++) m->parameter_count += (WIDTHS[i] + 1) * WIDTHS[i + 1];
    for (int i = first; i <= end; i++) floats += (size_t)(2 * ROWS * WIDTHS[i]);
    m->memory = at = (float *)calloc(floats + 3 * (size_t)m->parameter_count, sizeof(float));
    if (!at) return ddp_fail(DDP_ERR_NO_MEMORY, "layers %d to %d", first, end - 1);
    m->values = at, m->grads = at + m->parameter_count, m->momentum = m->grads + m->parameter_count;
    for (int i = first; i < end; i++) {
        mlp_layer layer = {WIDTHS[i], WIDTHS[i + 1], i < LAYERS - 1, at, at + WIDTHS[i] * WIDTHS[i + 1],
                           NULL,      NULL};
        layer.d_weight = layer.weight + m->parameter_count, layer.d_bias = layer.bias + m->parameter_count;
        m->layer[i] = layer;
        mlp_init(&layer, 1, i);
        at = layer.bias + WIDTHS[i + 1];
    }
    at = m->momentum + m->parameter_count;
    for (int i = first; i <= end; i++) {
        m->out[i] = at, m->d_out[i] = at + ROWS * WIDTHS[i];
        at += 2 * ROWS * WIDTHS[i];
    }
    m->pack = at;
    return DDP_OK;
}

/* Row r of a step's batch: a point on one of three arms, which is its label. Whoever needs a batch computes it. */
static int sample(int step, int r, float *point) {
    uint64_t bits = gpt_random(7, (uint64_t)step * ROWS + (uint64_t)r);
    float t = (float)(bits >> 44) / 1048576.0f, angle;
    int arm = (int)(bits % CLASSES);
    angle = 6.2831853f * (t + (float)arm / CLASSES);
    if (point) point[0] = t * cosf(angle), point[1] = t * sinf(angle);
    return arm;
}

static void forward(model *m) {
    for (int i = m->first; i < m->end; i++)
        mlp_forward(&m->layer[i], m->pack, ROWS, m->out[i], m->out[i + 1]);
}

static void backward(model *m) {
    for (int i = m->end - 1; i >= m->first; i--)
        mlp_backward(&m->layer[i], m->pack, ROWS, m->out[i], m->out[i + 1], m->d_out[i + 1],
                     i ? m->d_out[i] : NULL);
}

static double loss_of(model *m, int step) {
    double loss = 0;
    for (int r = 0; r < ROWS; r++)
        loss += mlp_loss(CLASSES, m->out[LAYERS] + r * CLASSES, sample(step, r, NULL), NULL,
                         m->d_out[LAYERS] + r * CLASSES, 1.0f / ROWS)
                / ROWS;
    return loss;
}

static void update(model *m) { /* SGD with momentum */
    for (int i = 0; i < m->parameter_count; i++)
        m->values[i] -= 0.1f * (m->momentum[i] = 0.9f * m->momentum[i] + m->grads[i]);
}

/* One step on one rank, which has all layers. */
static double step_alone(model *m, int step) {
    double loss;
    for (int r = 0; r < ROWS; r++) sample(step, r, m->out[0] + 2 * r);
    forward(m);
    loss = loss_of(m, step);
    backward(m);
    update(m);
    return loss;
}

/* The same on two: what crosses the cut is the output of layer CUT - 1, and its gradient on the way back. *waiting grows by the time in there. */
static ddp_result step_halves(ddp_group *world, model *m, int step, double *loss, double *waiting) {
    ddp_result result;
    double start;
    if (ddp_rank(world) == 0) {
        for (int r = 0; r < ROWS; r++) sample(step, r, m->out[0] + 2 * r);
        forward(m);
        start = ddp_now();
        result = ddp_send(world, m->out[CUT], (size_t)(ROWS * WIDTHS[CUT]), DDP_F32, 1, 0, NULL);
        if (result == DDP_OK)
            result = ddp_recv(world, m->d_out[CUT], (size_t)(ROWS * WIDTHS[CUT]), DDP_F32, 1, 1, NULL);
        *waiting += ddp_now() - start;
        backward(m);
    } else {
        start = ddp_now();
        result = ddp_recv(world, m->out[CUT], (size_t)(ROWS * WIDTHS[CUT]), DDP_F32, 0, 0, NULL);
        *waiting += ddp_now() - start;
        forward(m);
        *loss = loss_of(m, step);
        backward(m);
        if (result == DDP_OK)
            result = ddp_send(world, m->d_out[CUT], (size_t)(ROWS * WIDTHS[CUT]), DDP_F32, 0, 1, NULL);
    }
    update(m);
    return result;
}

/* Trains all layers alone: the last loss, and this rank's half of the weights, are the same. */
static ddp_result check(const model *half, int steps, double last) {
    model whole;
    double loss = 0;
    ddp_result result = model_create(&whole, 0, LAYERS);
    for (int step = 0; result == DDP_OK && step < steps; step++) loss = step_alone(&whole, step);
    if (result == DDP_OK
        && memcmp(half->values, whole.layer[half->first].weight,
                  (size_t)half->parameter_count * sizeof(float))
               != 0)
        result = ddp_fail(DDP_ERR_CORRUPT, "the weights of layers %d to %d are not those of one rank",
                          half->first, half->end - 1);
    if (result == DDP_OK && half->first > 0 && loss != last)
        result = ddp_fail(DDP_ERR_CORRUPT, "the loss is %.17g, and on one rank %.17g", last, loss);
    free(whole.memory);
    return result;
}

static ddp_result train(ddp_group *world, void *user) {
    int steps = *(int *)user, rank = ddp_rank(world);
    model m;
    double loss = 0, report[2] = {0, 0}, both[4], waiting = 0,
           start; /* first loss; share of time that this rank waits */
    ddp_result result;
    if (ddp_world_size(world) != 2)
        return ddp_fail(DDP_ERR_INVALID, "this is for two ranks, and the launcher started %d",
                        ddp_world_size(world));
    result = rank == 0 ? model_create(&m, 0, CUT) : model_create(&m, CUT, LAYERS);
    start = ddp_now();
    for (int step = 0; result == DDP_OK && step < steps; step++) {
        result = step_halves(world, &m, step, &loss, &waiting);
        if (step == 0) report[0] = loss;
    }
    report[1] = waiting / (ddp_now() - start);
    if (result == DDP_OK) result = check(&m, steps, loss);
    if (result == DDP_OK) result = ddp_all_gather(world, report, both, 2, DDP_F64, NULL);
    if (result == DDP_OK) result = ddp_broadcast(world, &loss, 1, DDP_F64, 1, NULL);
    if (result == DDP_OK && steps >= 300 && !(loss < both[2] / 2))
        result = ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g", both[2], loss);
    if (result == DDP_OK && rank == 0)
        printf("loss %.4f -> %.4f in %d steps; weights as on one rank, bit for bit\nrank 0 waited %.0f%% of "
               "the time, rank 1 %.0f%%\n",
               both[2], loss, steps, 100 * both[1], 100 * both[3]);
    free(m.memory);
    return result;
}

int main(int argc, char **argv) {
    int steps = 500, threads = 0, status;
    const option options[] = {
        {"--steps", "N", &steps, NULL, NULL, 1, 1e6, "optimizer steps"},
        {"--threads-as-ranks", NULL, &threads, NULL, NULL, 0, 1, "ranks are threads of one process"},
    };
    ddp_launch_desc desc = DDP_ZERO;
    status = options_read("model_parallel: trains a model whose layers lie on two ranks", options, 2, argc,
                          argv, NULL);
    if (status >= 0) return status;
    desc.world_size = 2;
    desc.group.log_fn = print_notice;
    desc.mode = threads ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
    if (ddp_launch(&desc, train, &steps) == DDP_OK) return 0;
    fprintf(stderr, "model_parallel: %s\n", ddp_last_error());
    return 1;
}

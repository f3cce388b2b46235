/*  dp_vs_ddp.c - data parallel of the old kind, where one rank owns everything, beside DDP: what a step takes, and what rank 0 carries.

    cc -O3 -march=native examples/dp_vs_ddp.c -o dp_vs_ddp -lm -lpthread
    ./dp_vs_ddp                       on 1, 2, 4 ranks: a table, and dp_vs_ddp.svg; --help lists the flags
    mpirun -n 8 ./dp_vs_ddp           on the ranks of a launcher alone

    DataParallel, as in torch.nn.DataParallel. Rank 0 has the batch, the weights and the optimizer; the others lend it their time:

        rank 0   scatter batch   broadcast weights   backward   gather every rank's gradients   add them up   update
        rank r        share              copy        backward         send                         wait        wait

    DDP. Every rank has its share of the batch, the weights and the optimizer; gradients are averaged bucket by bucket while backward runs:

        rank r   backward, all_reduce   update

    Both train the same model on the same batch, and end with the same weights, bit for bit. Bytes are counted from the calls: what a rank sends and
    receives in a step; an all_reduce of n bytes sends and receives 2 n (W - 1) / W each. Memory is what the program holds on rank 0. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "gpt/launcher.h"
#include "gpt/mlp.h"
#include "gpt/options.h"
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LAYERS = 3, INPUTS = 784, CLASSES = 10, WARM_UP = 2, MOST_ROWS = 8 };
enum { DP, HOW_DDP, HOWS };
static const char *const TITLES[HOWS] = {"DataParallel", "DDP"};
static const char *const COLORS[HOWS] = {"#d1495b", "#4c78a8"};

typedef struct settings {
    int ranks, batch, width, steps, threads;
    const char *svg;
} settings;

/* What was measured on so many ranks: milliseconds, megabytes through rank 0 in a step, megabytes on rank 0. */
enum { TIME, BYTES, MEMORY, MEASURES };
typedef struct row {
    int ranks;
    double value[HOWS][MEASURES];
} row;
typedef struct job {
    const settings *set;
    row *into; /* in memory that the ranks share with the caller */
} job;

//== one rank =============================================================================================== >>rank

typedef struct worker {
    ddp_group *world;
    const settings *set;
    int how, rank, world_size, share; /* share: rows of the batch that a rank computes */
    mlp_layer layer[LAYERS];
    size_t count; /* parameters */
    float *weights, *momentum, *grads,
        *all_grads; /* momentum: of ranks that update; all_grads: (world_size, count), DataParallel's rank 0 */
    const void **sources; /* (world_size): where all_grads has each rank's */
    float *batch, *out[LAYERS + 1], *d_out[LAYERS + 1], *pack; /* batch: DataParallel's rank 0 */
    int32_t *batch_labels, *labels;
    ddp_param params[2 * LAYERS];
    ddp_reducer *reducer;
    void *taken[32];
    int taken_count, no_room;
    double held; /* bytes */
} worker;

static void *take(worker *w, size_t size_bytes) {
    void *memory = calloc(1, size_bytes);
    w->held += (double)size_bytes;
    if (memory)
        w->taken[w->taken_count++] = memory;
    else
        w->no_room = 1;
    return memory;
}

static int width_of(const worker *w, int layer) {
    return layer == 0 ? INPUTS : layer == LAYERS ? CLASSES : w->set->width;
}

static void place(const worker *w, float *const *weight, float *const *grad, mlp_layer *layer) {
    for (int i = 0; i < LAYERS; i++) {
        mlp_layer l = {width_of(w, i),    width_of(w, i + 1), i < LAYERS - 1, weight[2 * i],
                       weight[2 * i + 1], grad[2 * i],        grad[2 * i + 1]};
        layer[i] = l;
    }
}

/* The reducer of DDP, which places the gradients; DataParallel has them in one array. */
static ddp_result build_layers(worker *w) {
    float *weight[2 * LAYERS], *grad[2 * LAYERS], *at = w->weights;
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_result result = DDP_OK;
    for (int i = 0; i < 2 * LAYERS; i++) {
        ddp_param *p = &w->params[i];
        p->name = i % 2 ? "bias" : "weight";
        p->value.data = weight[i] = at;
        p->value.dtype = DDP_F32;
        p->value.ndim = 1;
        p->value.shape[0] = i % 2 ? width_of(w, i / 2 + 1)
                                  : (int64_t)width_of(w, i / 2) * width_of(w, i / 2 + 1);
        grad[i] = w->grads ? w->grads + (at - w->weights) : NULL;
        at += p->value.shape[0];
    }
    place(w, weight, grad, w->layer);
    for (int i = 0; i < LAYERS; i++) mlp_init(&w->layer[i], 1, i);
    if (w->how == DP) return DDP_OK;
    desc.params = w->params;
    desc.param_count = 2 * LAYERS;
    result = ddp_reducer_create(&w->reducer, w->world, &desc);
    for (int i = 0; i < 2 * LAYERS; i++) grad[i] = (float *)w->params[i].grad.data;
    w->held += (double)w->count * sizeof(float);
    place(w, weight, grad, w->layer);
    return result;
}

/* Row r of the global batch: noise, and which of CLASSES directions of it is the greatest. */
static int32_t draw(int r, float *point) {
    int32_t label = 0;
    for (int i = 0; i < INPUTS; i++)
        point[i] = (float)(gpt_random(11, (uint64_t)r * INPUTS + (uint64_t)i) >> 40) / 8388608.0f - 1.0f;
    for (int c = 1; c < CLASSES; c++) label = point[c] > point[label] ? c : label;
    return label;
}

static ddp_result worker_create(worker *w, ddp_group *world, const settings *set, int how) {
    int master, owns;
    memset(w, 0, sizeof *w);
    w->world = world, w->set = set, w->how = how, w->rank = ddp_rank(world),
    w->world_size = ddp_world_size(world);
    master = how == DP && w->rank == 0, owns = how == HOW_DDP || master;
    w->share = set->batch / w->world_size;
    for (int i = 0; i < LAYERS; i++) w->count += (size_t)(width_of(w, i) + 1) * (size_t)width_of(w, i + 1);
    w->weights = (float *)take(w, w->count * sizeof(float));
    w->grads = how == DP ? (float *)take(w, w->count * sizeof(float)) : NULL;
    w->momentum = owns ? (float *)take(w, w->count * sizeof(float)) : NULL;
    w->all_grads = master ? (float *)take(w, (size_t)w->world_size * w->count * sizeof(float)) : NULL;
    w->sources = master ? (const void **)take(w, (size_t)w->world_size * sizeof *w->sources) : NULL;
    w->batch = master ? (float *)take(w, (size_t)set->batch * INPUTS * sizeof(float)) : NULL;
    w->batch_labels = master ? (int32_t *)take(w, (size_t)set->batch * sizeof(int32_t)) : NULL;
    w->labels = (int32_t *)take(w, (size_t)w->share * sizeof(int32_t));
    w->pack = (float *)take(w, MLP_PACK_FLOATS * sizeof(float));
    for (int i = 0; i <= LAYERS; i++) {
        w->out[i] = (float *)take(w, (size_t)(w->share * width_of(w, i)) * sizeof(float));
        w->d_out[i] = i ? (float *)take(w, (size_t)(w->share * width_of(w, i)) * sizeof(float)) : NULL;
    }
    if (w->no_room)
        return ddp_fail(DDP_ERR_NO_MEMORY,
                        "the model does not fit in memory; use a smaller --width or --batch");
    for (int r = 0; master && r < set->batch; r++)
        w->batch_labels[r] = draw(r, w->batch + (size_t)r * INPUTS);
    for (int r = 0; how == HOW_DDP && r < w->share; r++)
        w->labels[r] = draw(w->rank * w->share + r, w->out[0] + (size_t)r * INPUTS);
    return build_layers(w);
}

static void worker_free(worker *w) {
    ddp_reducer_destroy(w->reducer);
    for (int i = 0; i < w->taken_count; i++) free(w->taken[i]);
}

/* Forward and backward of this rank's share. Under DDP each layer's gradients are on their way while the layers below are computed. */
static ddp_result compute(worker *w, double *loss) {
    ddp_result result = DDP_OK;
    *loss = 0;
    for (int i = 0; i < LAYERS; i++) mlp_forward(&w->layer[i], w->pack, w->share, w->out[i], w->out[i + 1]);
    for (int r = 0; r < w->share; r++)
        *loss += mlp_loss(CLASSES, w->out[LAYERS] + r * CLASSES, w->labels[r], NULL,
                          w->d_out[LAYERS] + r * CLASSES, 1.0f / (float)w->share)
                 / w->share;
    for (int i = LAYERS - 1; i >= 0 && result == DDP_OK; i--) {
        mlp_backward(&w->layer[i], w->pack, w->share, w->out[i], w->out[i + 1], w->d_out[i + 1], w->d_out[i]);
        if (w->reducer) result = ddp_reducer_ready(w->reducer, 2 * i + 1);
        if (w->reducer && result == DDP_OK) result = ddp_reducer_ready(w->reducer, 2 * i);
    }
    return result;
}

/* SGD with momentum on what lies at one place. */
static void update(float *weight, float *momentum, const float *grad, size_t count) {
    for (size_t i = 0; i < count; i++) weight[i] -= 0.02f * (momentum[i] = 0.9f * momentum[i] + grad[i]);
}

static ddp_result step_dp(worker *w, double *loss) {
    size_t share = (size_t)w->share;
    ddp_result result = ddp_scatter(w->world, w->batch, w->out[0], share * INPUTS, DDP_F32, 0, NULL);
    if (result == DDP_OK) result = ddp_scatter(w->world, w->batch_labels, w->labels, share, DDP_I32, 0, NULL);
    if (result == DDP_OK) result = ddp_broadcast(w->world, w->weights, w->count, DDP_F32, 0, NULL);
    if (result == DDP_OK) result = compute(w, loss);
    if (result == DDP_OK) result = ddp_gather(w->world, w->grads, w->all_grads, w->count, DDP_F32, 0, NULL);
    if (result != DDP_OK || w->rank != 0) return result;
    for (int r = 0; r < w->world_size; r++) w->sources[r] = w->all_grads + (size_t)r * w->count;
    ddp_reduce_tree(w->grads, w->sources, w->world_size, w->count, DDP_F32, DDP_OP_AVG,
                    0); /* in the order in which DDP adds */
    update(w->weights, w->momentum, w->grads, w->count);
    return DDP_OK;
}

static ddp_result step_ddp(worker *w, double *loss) {
    ddp_result result = compute(w, loss);
    if (result == DDP_OK) result = ddp_reducer_wait(w->reducer);
    for (int i = 0; i < 2 * LAYERS && result == DDP_OK; i++) {
        float *weight = (float *)w->params[i].value.data;
        update(weight, w->momentum + (weight - w->weights), (const float *)w->params[i].grad.data,
               (size_t)w->params[i].value.shape[0]);
    }
    return result;
}

/* Trains one way. final (count): rank 0's weights at the end, which the first way leaves there and the second one finds. */
static ddp_result measure(ddp_group *world, const settings *set, int how, float **final, double *value) {
    worker w;
    double loss = 0, first = 0, fastest = 1e9, w1 = ddp_world_size(world), start = 0;
    int block = set->steps < 10 ? set->steps
                                : 10; /* steps in a row: one alone may begin with the others' work done */
    ddp_result result = worker_create(&w, world, set, how);
    for (int step = -WARM_UP; step < set->steps && result == DDP_OK; step++) {
        if (step >= 0 && step % block == 0) start = ddp_now();
        result = how == DP ? step_dp(&w, &loss) : step_ddp(&w, &loss);
        if (step >= 0 && step % block == block - 1 && ddp_now() - start < fastest)
            fastest = ddp_now() - start; /* whatever else runs only adds to it */
        if (step == -WARM_UP) first = loss;
    }
    value[TIME] = fastest / block * 1e3;
    value[MEMORY] = w.held / 1e6;
    value[BYTES] = how == DP ? (w1 - 1) * ((INPUTS + 1) * (double)w.share + 2 * (double)w.count) * 4e-6
                             : 4 * (w1 - 1) / w1 * (double)w.count * 4e-6;
    if (result == DDP_OK && set->steps >= 10 && !(loss < first))
        result = ddp_fail(DDP_ERR_CORRUPT, "%s: the loss went from %g to %g", TITLES[how], first, loss);
    if (result == DDP_OK && how == DP && w.rank == 0) {
        *final = (float *)malloc(w.count * sizeof(float));
        if (*final)
            memcpy(*final, w.weights, w.count * sizeof(float));
        else
            result = ddp_fail(DDP_ERR_NO_MEMORY, "a copy of the weights");
    } else if (result == DDP_OK && *final && memcmp(*final, w.weights, w.count * sizeof(float)) != 0)
        result = ddp_fail(DDP_ERR_CORRUPT, "on %d ranks DataParallel and DDP end with other weights",
                          w.world_size);
    worker_free(&w);
    return result;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    const job *j = (const job *)user;
    int ranks = ddp_world_size(world);
    row r = {ranks, {{0}, {0}}};
    float *final = NULL;
    ddp_result result = DDP_OK;
    if (j->set->batch % ranks)
        return ddp_fail(DDP_ERR_INVALID, "--batch %d is not divisible by %d ranks; use --batch %d",
                        j->set->batch, ranks, ranks * 32);
    for (int how = 0; how < HOWS && result == DDP_OK; how++)
        result = measure(world, j->set, how, &final, r.value[how]);
    free(final);
    if (result == DDP_OK && ddp_rank(world) == 0) *j->into = r;
    return result;
}

//== the drawing ========================================================================================= >>drawing

/* A pair of bars for each number of ranks. */
static void draw_panel(FILE *file, double left, const row *rows, int count, int measure_index,
                       const char *title) {
    const double width = 230, top = 90, bottom = 340, group = width / count, bar = group * 0.4;
    double most = 0;
    for (int i = 0; i < count * HOWS; i++) {
        double value = rows[i / HOWS].value[i % HOWS][measure_index];
        most = value > most ? value : most;
    }
    fprintf(file, "<text x='%.1f' y='74'>%s</text><path d='M%.1f %.1fh%.1f' stroke='#333'/>\n", left, title,
            left, bottom, width);
    for (int i = 0; i < count; i++) {
        double x = left + group * (i + 0.5);
        for (int how = 0; how < HOWS; how++) {
            double value = rows[i].value[how][measure_index],
                   height = most > 0 ? (bottom - top - 16) * value / most : 0;
            fprintf(file, "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='%s'/>",
                    x + (how - 1) * bar, bottom - height, bar - 1, height, COLORS[how]);
            fprintf(file, "<text x='%.1f' y='%.1f' font-size='%d' text-anchor='middle'>%.3g</text>\n",
                    x + (how - 0.5) * bar, bottom - height - 4, count > 4 ? 7 : 11, value);
        }
        fprintf(file, "<text x='%.1f' y='%.1f' text-anchor='middle'>%d</text>\n", x, bottom + 18,
                rows[i].ranks);
    }
    fprintf(file, "<text x='%.1f' y='%.1f' text-anchor='middle'>ranks</text>\n", left + width / 2,
            bottom + 38);
}

static int draw_chart(const settings *set, const row *rows, int count) {
    static const char *const titles[MEASURES] = {"time of a step, ms", "through rank 0 in a step, MB",
                                                 "memory of rank 0, MB"};
    FILE *file = fopen(set->svg, "w");
    if (!file) return 0;
    fprintf(file,
            "<svg xmlns='http://www.w3.org/2000/svg' width='800' height='400' viewBox='0 0 800 400' "
            "font-family='sans-serif' font-size='13'>\n"
            "<rect width='800' height='400' fill='white'/>\n<text x='30' y='24' font-size='15'>an MLP of "
            "width %d, %d rows in a step, %ld cores</text>\n",
            set->width, set->batch, sysconf(_SC_NPROCESSORS_ONLN));
    for (int how = 0; how < HOWS; how++)
        fprintf(file, "<rect x='%d' y='38' width='12' height='12' fill='%s'/><text x='%d' y='49'>%s</text>\n",
                30 + 140 * how, COLORS[how], 48 + 140 * how, TITLES[how]);
    for (int m = 0; m < MEASURES; m++) draw_panel(file, 30 + 255 * m, rows, count, m, titles[m]);
    fprintf(file, "</svg>\n");
    return fclose(file) == 0;
}

/* Whether the drawing can be made, asked before anything is measured. Leaves everything as it was. */
static int can_draw(const char *path) {
    int existed = access(path, F_OK) == 0;
    FILE *file = fopen(path, "a");
    if (file && fclose(file) == 0 && !existed) unlink(path);
    return file != NULL;
}

//== the whole ============================================================================================== >>main

/* 1, 2, 4 ... and ranks at the end; or once on a launcher's. Returns how many rows there are, -1 after a failure. */
static int measure_all(const settings *set, row *rows) {
    int count = 0;
    for (int ranks = 1; count < MOST_ROWS; ranks = ranks * 2 < set->ranks ? ranks * 2 : set->ranks) {
        ddp_launch_desc desc = DDP_ZERO;
        job j = {set, &rows[count]};
        desc.world_size = ranks_to_start(0, ranks);
        desc.group.log_fn = print_notice;
        desc.mode = set->threads ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
        if (ddp_launch(&desc, rank_main, &j) != DDP_OK)
            return fprintf(stderr, "dp_vs_ddp: %s\n", ddp_last_error()), -1;
        if (!rows[count].ranks) return 0; /* another rank of a launcher than rank 0 */
        if (count == 0)
            printf("          time of a step, ms       through rank 0, MB       memory of rank 0, MB\n"
                   "  ranks   DataParallel     DDP     DataParallel     DDP     DataParallel     DDP\n");
        printf("  %5d", rows[count].ranks);
        for (int m = 0; m < MEASURES; m++)
            printf("%s%12.1f %7.1f", m ? "     " : "   ", rows[count].value[DP][m],
                   rows[count].value[HOW_DDP][m]);
        printf("\n");
        fflush(stdout);
        if (rows[count++].ranks != ranks || ranks == set->ranks) break;
    }
    return count;
}

int main(int argc, char **argv) {
    settings set = {4, 256, 512, 50, 0, "dp_vs_ddp.svg"};
    const option options[] = {
        {"--ranks", "N", &set.ranks, NULL, NULL, 1, DDP_MAX_LOCAL_RANKS, "measures on 1, 2, 4 ... N ranks"},
        {"--batch", "N", &set.batch, NULL, NULL, 1, 65536, "rows of a step, over all ranks"},
        {"--width", "N", &set.width, NULL, NULL, 1, 8192, "of the two hidden layers"},
        {"--steps", "N", &set.steps, NULL, NULL, 1, 1e6, "steps, of which the fastest ten in a row count"},
        {"--svg", "FILE", NULL, NULL, &set.svg, 0, 0, "where to draw"},
        {"--threads-as-ranks", NULL, &set.threads, NULL, NULL, 0, 1, "ranks are threads of one process"},
    };
    row *rows;
    int count = options_read("dp_vs_ddp: DataParallel beside DDP", options, 6, argc, argv, NULL);
    if (count >= 0) return count;
    rows = (row *)mmap(NULL, MOST_ROWS * sizeof *rows, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                       0);
    if (rows == MAP_FAILED) return fprintf(stderr, "dp_vs_ddp: no memory\n"), 1;
    if (!can_draw(set.svg))
        return fprintf(stderr, "dp_vs_ddp: %s cannot be written: %s; choose another place with --svg\n",
                       set.svg, strerror(errno)),
               1;
    count = measure_all(&set, rows);
    if (count <= 0) return count < 0;
    printf("Both end with the same weights, bit for bit. There are %ld cores; where there are more ranks "
           "they take turns.\n",
           sysconf(_SC_NPROCESSORS_ONLN));
    if (!draw_chart(&set, rows, count))
        return fprintf(stderr, "dp_vs_ddp: %s cannot be written: %s\n", set.svg, strerror(errno)), 1;
    printf("%s: drawn\n", set.svg);
    return 0;
}

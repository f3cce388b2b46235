/*  train_mlp.c - Fashion-MNIST by DDP, in one page: data, ranks, gradients that are averaged while backward runs, a test that counts each image once.

    apt-get install dataset-fashion-mnist          the data; or give a folder with the four files of MNIST or one of its family, gzipped or not
    cc -O3 -march=native examples/train_mlp.c -o train_mlp -lm -lpthread
    ./train_mlp                                    on every core; --help lists the flags; mpirun -n 2 ./train_mlp takes the ranks of a launcher

    A step takes --batch images, in micro-batches of MICRO: those of a rank add up in pairs, then over ranks in the same tree. So 1, 2 and 4 ranks end
    with the same weights, bit for bit, as the last line shows. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "launcher.h"
#include "mlp.h"
#include "options.h"
#include "sources.h"
#include "training.h"

enum { LAYERS = 3, PARAMS = 2 * LAYERS, MICRO = 64, HIDDEN = 256, TRAIN = 0, TEST = 1 };
#define TRY(call) do { ddp_result try_result = (call); if (try_result != DDP_OK) return try_result; } while (0)
#define WRONG(...) ddp_fail(DDP_ERR_INVALID, __VA_ARGS__)

typedef struct job {
    int ranks, epochs, batch, threads;
    double lr;
    source images[2], labels[2]; /* of TRAIN and TEST; opened once, before there are ranks, which share the pages */
    source *fields[2][3];        /* both, and NULL */
    int widths[LAYERS + 1];      /* pixels, HIDDEN, HIDDEN, classes */
} job;

typedef struct trainer {
    job *plan;
    ddp_group *world;
    mlp model;
    ddp_param params[PARAMS]; /* weight and bias of each layer */
    float *moments[PARAMS];   /* Adam's, two for each number */
    ddp_loader *loader[2];
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
} trainer;

//== data ====================================================================================================

static ddp_result open_data(job *j, const char *folder) {
    static const char *const names[] = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};
    for (int i = 0; i < 4; i++) {
        source *images = &j->images[i / 2], *s = i % 2 ? &j->labels[i / 2] : images;
        int32_t label = 0;
        void *field = &label;
        char path[4096];
        snprintf(path, sizeof path - 4, "%s/%s", folder, names[i]);
        if (access(path, R_OK) != 0) strcat(path, ".gz");
        if (access(path, R_OK) != 0) return WRONG("there is no %.300s; run `apt-get install dataset-fashion-mnist`, or give a folder that has it", path);
        TRY(source_open_idx(s, path));
        if (s->sample.dtype != DDP_U8 || (i % 2 ? s->sample.ndim != 0 : ddp_tensor_count(&s->sample) > 1 << 20))
            return WRONG("%.300s does not hold %s of one byte each; give files as MNIST has them", path, i % 2 ? "labels" : "pixels");
        if (s->count != images->count || (i == 2 && ddp_tensor_count(&s->sample) != j->widths[0]))
            return WRONG("%.300s has another number of %s than the file before it; give files that belong together", path, i % 2 ? "samples" : "pixels");
        if (i == 0) j->widths[0] = (int)ddp_tensor_count(&s->sample);
        for (int64_t k = 0; i % 2 && k < s->count; k++) {
            TRY(source_fetch(s, k, &field));
            memcpy(&label, field, 1);
            j->widths[LAYERS] = label >= j->widths[LAYERS] ? label + 1 : j->widths[LAYERS];
        }
    }
    return DDP_OK;
}

/* Threads of its own fetch micro-batches ahead, in the sampler's order. */
static ddp_result build_loader(trainer *t, int set) {
    job *j = t->plan;
    ddp_tensor fields[2] = {j->images[set].sample, j->labels[set].sample};
    ddp_loader_desc desc = DDP_ZERO;
    desc.sampler.dataset_size = j->images[set].count;
    desc.sampler.num_replicas = ddp_world_size(t->world);
    desc.sampler.rank = ddp_rank(t->world);
    desc.sampler.global_batch = set == TRAIN ? j->batch : 0;              /* the same global batches on any number of ranks, the last one padded */
    desc.sampler.no_shuffle = desc.sampler.no_pad = set == TEST;          /* every image once: ranks may have different numbers of them */
    desc.batch_size = MICRO;
    desc.fields = fields;
    desc.field_count = 2;
    desc.fetch = source_fetch_each;
    desc.fetch_user = j->fields[set];
    return ddp_loader_create(&t->loader[set], &desc);
}

//== a step ==================================================================================================

/* What makes the model parallel. Gradients are NULL: the reducer places them where peers read them. Collective. */
static ddp_result build(trainer *t) {
    ddp_reducer_desc reducer = DDP_ZERO;
    ddp_accumulator_desc accumulator = DDP_ZERO;
    if (mlp_create(&t->model, LAYERS, t->plan->widths, MICRO, 1)) return ddp_fail(DDP_ERR_NO_MEMORY, "the model does not fit in memory");
    for (int i = 0; i < PARAMS; i++) {
        const mlp_layer *l = &t->model.layer[i / 2];
        ddp_param param = {i % 2 ? "bias" : "weight", {i % 2 ? l->bias : l->weight, DDP_F32, 1, {(int64_t)(i % 2 ? 1 : l->inputs) * l->outputs}}, DDP_ZERO, DDP_ZERO};
        t->params[i] = param;
        t->moments[i] = (float *)calloc(2 * (size_t)param.value.shape[0], sizeof(float));
        if (!t->moments[i]) return ddp_fail(DDP_ERR_NO_MEMORY, "the optimizer does not fit in memory");
    }
    reducer.params = accumulator.params = t->params;
    reducer.param_count = accumulator.param_count = PARAMS;
    reducer.micro_batch_count = accumulator.micro_batch_count = t->plan->batch / MICRO / ddp_world_size(t->world);
    TRY(ddp_reducer_create(&t->reducer, t->world, &reducer));
    for (int i = 0; i < PARAMS; i++) *(i % 2 ? &t->model.layer[i / 2].d_bias : &t->model.layer[i / 2].d_weight) = (float *)t->params[i].grad.data;
    accumulator.reducer = t->reducer;
    TRY(ddp_accumulator_create(&t->accumulator, t->world, &accumulator));
    TRY(build_loader(t, TRAIN));
    return build_loader(t, TEST);
}

/* metrics: the loss, and how many are right. */
static void forward(trainer *t, const ddp_batch *batch, metric *metrics) {
    mlp *m = &t->model;
    const uint8_t *pixels = (const uint8_t *)batch->fields[0].data, *labels = (const uint8_t *)batch->fields[1].data;
    int classes = t->plan->widths[LAYERS], rows = (int)batch->count, is_right;
    for (int i = 0; i < rows * t->plan->widths[0]; i++) m->out[0][i] = (float)pixels[i] / 128 - 0.5f;
    for (int i = 0; i < LAYERS; i++) mlp_forward(&m->layer[i], m->pack, rows, m->out[i], m->out[i + 1]);
    for (int r = 0; r < rows; r++) {
        double loss = mlp_loss(classes, m->out[LAYERS] + r * classes, labels[r], &is_right, m->d_out[LAYERS] + r * classes, 1.0f / (float)rows);
        metric_add(&metrics[0], loss, batch->is_padding[r]);
        metric_add(&metrics[1], is_right, batch->is_padding[r]);
    }
}

/* Announces gradients as soon as they are final: after the last micro-batch they are on their way while the layers below are computed. */
static ddp_result backward(trainer *t, int rows, int *last) {
    mlp *m = &t->model;
    for (int i = LAYERS - 1; i >= 0; i--) {
        mlp_backward(&m->layer[i], m->pack, rows, m->out[i], m->out[i + 1], m->d_out[i + 1], i ? m->d_out[i] : NULL);
        TRY(ddp_accumulator_ready(t->accumulator, 2 * i + 1));
        TRY(ddp_accumulator_ready(t->accumulator, 2 * i));
    }
    return ddp_accumulator_next(t->accumulator, last);
}

/* One epoch: trains, or tests. *step counts those of all epochs. Collective. */
static ddp_result run_epoch(trainer *t, int set, int epoch, int *step, int steps, metric_total *totals) {
    metric metrics[2];
    ddp_batch batch;
    int last;
    memset(metrics, 0, sizeof metrics);
    TRY(ddp_loader_set_epoch(t->loader[set], (uint64_t)epoch));
    for (;;) {
        TRY(ddp_loader_next(t->loader[set], &batch));
        if (batch.count == 0) return metric_all_reduce(t->world, metrics, 2, t->plan->images[set].count, totals);
        forward(t, &batch, metrics);
        if (set == TEST) continue;
        TRY(backward(t, (int)batch.count, &last));
        if (!last) continue;
        TRY(ddp_reducer_wait(t->reducer)); /* every gradient is the average over ranks */
        ++*step;
        for (int i = 0; i < PARAMS; i++) {
            size_t count = (size_t)t->params[i].value.shape[0];
            gpt_adamw((float *)t->params[i].value.data, (const float *)t->params[i].grad.data, t->moments[i], t->moments[i] + count, count,
                      (float)(t->plan->lr * (steps + 1 - *step) / steps), 0.9f, 0.999f, 1e-8f, i % 2 ? 0.0f : 0.01f, *step, 1.0f);
        }
        TRY(drift_check(t->world, t->params, PARAMS, *step, 100));
    }
}

//== the whole ===============================================================================================

static ddp_result train(trainer *t) {
    job *j = t->plan;
    int step = 0, steps = (int)((j->images[TRAIN].count + j->batch - 1) / j->batch) * j->epochs, speaks = ddp_rank(t->world) == 0;
    metric_total trained[2], tested[2];
    ddp_loader_stats stats = DDP_ZERO;
    uint64_t hash = 0;
    double start = ddp_now();
    for (int epoch = 0; epoch < j->epochs; epoch++) {
        TRY(run_epoch(t, TRAIN, epoch, &step, steps, trained));
        TRY(run_epoch(t, TEST, epoch, &step, steps, tested));
        if (!speaks) continue;
        printf("epoch %2d/%d   loss %.4f   test loss %.4f   accuracy %.2f%%   %.1f s\n", epoch + 1, j->epochs, trained[0].mean, tested[0].mean,
               100 * tested[1].mean, ddp_now() - start);
        fflush(stdout);
    }
    for (int i = 0; i < PARAMS; i++) hash = hash * 31 + drift_hash(t->params[i].value.data, (size_t)t->params[i].value.shape[0] * sizeof(float));
    TRY(drift_check(t->world, t->params, PARAMS, step, 1));
    TRY(ddp_loader_get_stats(t->loader[TRAIN], &stats));
    if (speaks)
        printf("ranks: %d, %.2f s of the time waiting for data\ntest images right: %.0f of %lld\nweights hash: %016llx\n", ddp_world_size(t->world),
               stats.wait_seconds, tested[1].sum, (long long)tested[1].count, (unsigned long long)hash);
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    trainer t;
    int ranks = ddp_world_size(world), share = ((job *)user)->batch / (MICRO * ranks);
    ddp_result result;
    memset(&t, 0, sizeof t);
    t.plan = (job *)user;
    t.world = world;
    if (share < 1 || t.plan->batch != share * MICRO * ranks || (share & (share - 1) && ranks > 1))
        return WRONG("--batch %d is not 1, 2, 4 ... micro-batches of %d for each of %d ranks; use --batch %d", t.plan->batch, MICRO, ranks, MICRO * ranks);
    result = build(&t);
    if (result == DDP_OK) result = train(&t);
    for (int set = 0; set < 2; set++) ddp_loader_destroy(t.loader[set]);
    ddp_accumulator_destroy(t.accumulator);
    ddp_reducer_destroy(t.reducer);
    for (int i = 0; i < PARAMS; i++) free(t.moments[i]);
    free(t.model.memory);
    return result;
}

int main(int argc, char **argv) {
    job j = {0, 10, 256, 0, 1.5e-3, {DDP_ZERO, DDP_ZERO}, {DDP_ZERO, DDP_ZERO}, {{NULL, NULL, NULL}, {NULL, NULL, NULL}}, {0}};
    const option options[] = {{"--ranks", "N", &j.ranks, NULL, NULL, 0, DDP_MAX_LOCAL_RANKS,
                               "ranks to start; 0 = one per core, up to 4, or those of a launcher"},
                              {"--epochs", "N", &j.epochs, NULL, NULL, 1, 10000, "times through the data"},
                              {"--batch", "N", &j.batch, NULL, NULL, MICRO, 65536, "images of a step, over all ranks"},
                              {"--lr", "X", NULL, &j.lr, NULL, 1e-9, 10, "learning rate at the start"},
                              {"--threads-as-ranks", NULL, &j.threads, NULL, NULL, 0, 1, "ranks are threads of one process"}};
    const char *folder = "/usr/share/datasets/fashion-mnist", **paths = (const char **)calloc((size_t)argc + 1, sizeof *paths);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    ddp_launch_desc desc = DDP_ZERO;
    ddp_result result;
    int status = paths ? options_read("train_mlp: trains a classifier on the images of a folder", options, 5, argc, argv, paths) : 1;
    if (status < 0) {
        if (paths[0]) folder = paths[0];
        for (int i = 1; i < LAYERS; i++) j.widths[i] = HIDDEN;
        for (int set = 0; set < 2; set++) j.fields[set][0] = &j.images[set], j.fields[set][1] = &j.labels[set];
        desc.world_size = ranks_to_start(j.ranks, cores >= 4 ? 4 : cores >= 2 ? 2 : 1);
        desc.group.log_fn = print_notice;
        desc.mode = j.threads ? DDP_LAUNCH_THREADS : DDP_LAUNCH_PROCESSES;
        result = open_data(&j, folder);
        if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &j);
        if ((status = result != DDP_OK) != 0) fprintf(stderr, "train_mlp: %s\n", ddp_last_error());
        for (int i = 0; i < 4; i++) source_close(i % 2 ? &j.labels[i / 2] : &j.images[i / 2]);
    }
    free(paths);
    return status;
}

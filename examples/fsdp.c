/*  fsdp.c - sharded training: units by name, means over tokens, a repeated step, background saves, export

        cc -O3 -march=native examples/fsdp.c -o fsdp -lm -lpthread
        ./fsdp                    2 ranks; writes the checkpoint saved_fsdp and saved_fsdp.safetensors
        ./fsdp 4 /tmp/model       4 ranks, and other names

    The "model" is a list of tensors that learn fixed values; train_mlp_fsdp.c has a network.

        ddp_fsdp_wrap        makes one unit of the parameters with names h.0.*, one of h.1.*, ...
        ddp_fsdp_mean        gradients are divided by the tokens of all ranks, which have different numbers
        ddp_fsdp_zero_grad   one rank has a bad batch: all ranks drop the gradients and repeat the step
        ddp_fsdp_save        copies the shards, and a thread writes them while training continues
        ddp_fsdp_sync_buffers  a running loss, which each rank updates by its own data, is that of rank 0
        state.per_rank       each rank draws random numbers; a load gives each its own generator back
        ddp_fsdp_get_full    one rank receives a complete parameter
        ddp_fsdp_export      rank 0 writes the whole model to one safetensors file

    The steps after the save are repeated from the checkpoint, and end with the same loss, bit by bit.
    The loop unshards one unit at a time. Its memory is printed: it falls with the number of ranks. */
#define DDP_IMPLEMENTATION
#include "../ddp_fsdp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 3, PARAMS = 2 * LAYERS + 1, SIZE = 64, STEPS = 100, BAD_STEP = 10, SAVE_STEP = 50 };
static const char *const names[PARAMS] = {"h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias",
                                          "h.2.weight", "h.2.bias", "head"};

typedef struct trainer {
    ddp_group *world;
    ddp_fsdp_param params[PARAMS];
    ddp_fsdp_unit_desc units[LAYERS + 1];
    int unit_count;
    ddp_fsdp *fsdp;
    ddp_fsdp_state state; /* rng[0]: this rank's generator */
    float running_loss;   /* a buffer */
    const char *folder;
} trainer;

static float target(int param, int64_t element) { return sinf((float)(param * 1000 + element)); }

/* First values of this rank's rows: zeros. */
static ddp_result init(const ddp_fsdp_param *param, int64_t first_row, int64_t rows, void *out, void *user) {
    int64_t row = param->param.value.ndim > 1 ? SIZE : 1;
    for (int64_t i = 0; i < rows * row; i++) ((float *)out)[i] = 0;
    (void)first_row;
    (void)user;
    return DDP_OK;
}

static ddp_result create(trainer *t) {
    static const char *const prefixes[] = {"h.*"}, *const buffer_names[] = {"running_loss"};
    const ddp_tensor buffer = {&t->running_loss, DDP_F32, 0, {0}};
    ddp_param list[PARAMS];
    for (int i = 0; i < PARAMS; i++) {
        int is_matrix = i % 2 == 0;
        list[i] = (ddp_param){.name = names[i], .value = {NULL, DDP_F32, 1 + is_matrix, {SIZE, SIZE}}};
    }
    ddp_fsdp_wrap_desc wrap = {.prefixes = prefixes, .prefix_count = 1, .storage = t->params};
    t->unit_count = ddp_fsdp_wrap(list, PARAMS, &wrap, t->units, LAYERS + 1);
    if (t->unit_count < 0) return (ddp_result)t->unit_count;
    t->state.per_rank = 1;
    t->state.rng[0] = ddp_seed(1, 0, (uint64_t)ddp_rank(t->world), 0);
    ddp_fsdp_desc desc = {.units = t->units,
                          .unit_count = t->unit_count,
                          .per_token = 1,
                          .overwrite_gradients = 1,
                          .optimizer = {.kind = DDP_OPTIMIZER_SGD, .momentum = 0.9f},
                          .init_fn = init,
                          .state = &t->state,
                          .buffers = &buffer,
                          .buffer_names = buffer_names,
                          .buffer_count = 1,
                          .save_in_background = 1};
    return ddp_fsdp_create(&t->fsdp, t->world, &desc);
}

/* Gradients of a loss that is summed over this rank's tokens. */
static ddp_result backward(trainer *t, int tokens, ddp_mean *loss) {
    for (int u = t->unit_count - 1; u >= 0; u--) {
        DDP_TRY(ddp_fsdp_unshard(t->fsdp, u));
        for (int p = 0; p < t->units[u].param_count; p++) {
            const ddp_fsdp_param *param = &t->units[u].params[p];
            const float *w = (const float *)param->param.value.data;
            float *d_w = (float *)param->param.grad.data;
            double sum = 0;
            for (int64_t i = 0; i < ddp_tensor_count(&param->param.value); i++) {
                float error = w[i] - target(param->index, i);
                d_w[i] = (float)tokens * error;
                sum += 0.5 * (double)(error * error);
            }
            ddp_mean_add(loss, tokens * sum, 0);
        }
        DDP_TRY(ddp_fsdp_reduce_grads(t->fsdp, u));
        DDP_TRY(ddp_fsdp_reshard(t->fsdp, u));
    }
    ddp_mean_add(loss, 0, tokens);
    return DDP_OK;
}

/* 10 to 19 tokens, from this rank's generator. */
static int random_tokens(trainer *t) {
    t->state.rng[0] = t->state.rng[0] * 6364136223846793005u + 1442695040888963407u;
    return 10 + (int)((t->state.rng[0] >> 33) % 10);
}

/* In BAD_STEP the last rank reads a damaged batch, once. *loss: the mean over the tokens of all ranks. */
static ddp_result train_step(trainer *t, int step, double *loss, int *repeated) {
    int last = ddp_rank(t->world) == ddp_world_size(t->world) - 1;
    DDP_TRY(ddp_fsdp_sync_buffers(t->fsdp, 0));
    for (int attempt = 0;; attempt++) {
        ddp_mean mean = {0};
        DDP_TRY(backward(t, random_tokens(t), &mean));
        t->running_loss = 0.9f * t->running_loss + 0.1f * (float)ddp_mean_value(&mean);
        if (step == BAD_STEP && attempt == 0 && last) ddp_mean_add(&mean, (double)NAN, 0);
        DDP_TRY(ddp_fsdp_mean(t->fsdp, &mean));
        *loss = ddp_mean_value(&mean); /* the same on every rank: all repeat the step, or none */
        if (isfinite(*loss)) break;
        DDP_TRY(ddp_fsdp_zero_grad(t->fsdp));
        *repeated += 1;
    }
    return ddp_fsdp_step(t->fsdp, 0.1f);
}

static ddp_result train_steps(trainer *t, double *first, double *loss, int *repeated) {
    for (int step = (int)t->state.step + 1; step <= STEPS; step++) {
        DDP_TRY(train_step(t, step, loss, repeated));
        if (step == 1) *first = *loss;
        if (step == SAVE_STEP) DDP_TRY(ddp_fsdp_save(t->fsdp, t->folder)); /* returns before it is on disk */
    }
    return ddp_fsdp_save_wait(t->fsdp);
}

/* The last rank receives the complete head: *error is its largest distance from the target. Rank 0 writes the
   whole model. */
static ddp_result export_model(trainer *t, float *error) {
    static float head[SIZE][SIZE];
    const int unit = t->unit_count - 1, last = ddp_world_size(t->world) - 1;
    char path[1100];
    ddp_tensor out = {head, DDP_F32, 2, {SIZE, SIZE}};
    DDP_TRY(ddp_fsdp_get_full(t->fsdp, unit, 0, last, ddp_rank(t->world) == last ? &out : NULL));
    *error = 0;
    for (int i = 0; i < SIZE * SIZE && ddp_rank(t->world) == last; i++)
        *error = fmaxf(*error, fabsf(head[i / SIZE][i % SIZE] - target(PARAMS - 1, i)));
    snprintf(path, sizeof path, "%.1000s.safetensors", t->folder);
    return ddp_fsdp_export(t->fsdp, path);
}

static ddp_result train(trainer *t) {
    double first = 0, loss = 0, again = 0;
    float running_loss, error;
    uint64_t rng;
    int repeated = 0, is_root = ddp_rank(t->world) == 0;
    ddp_fsdp_memory memory;
    DDP_TRY(create(t));
    for (int u = 0; u < t->unit_count && is_root; u++)
        printf("unit %s: %d parameters\n", t->units[u].name, t->units[u].param_count);
    DDP_TRY(train_steps(t, &first, &loss, &repeated));
    DDP_TRY(ddp_fsdp_get_memory(t->fsdp, &memory));
    running_loss = t->running_loss;
    rng = t->state.rng[0];
    DDP_TRY(ddp_fsdp_load(t->fsdp, t->folder)); /* back to SAVE_STEP */
    DDP_TRY(train_steps(t, &first, &again, &repeated));
    DDP_TRY(export_model(t, &error));
    if (is_root)
        printf("loss %.3f -> %.2g, %d step repeated, at most %zu bytes per rank, step %d is saved in %s\n",
               first, loss, repeated, memory.peak.total, SAVE_STEP, t->folder);
    if (repeated != 1) return ddp_fail(DDP_ERR_CORRUPT, "%d steps were repeated, not 1", repeated);
    if (t->unit_count != LAYERS + 1) return ddp_fail(DDP_ERR_CORRUPT, "%d units", t->unit_count);
    if (again != loss || t->running_loss != running_loss || t->state.rng[0] != rng)
        return ddp_fail(DDP_ERR_CORRUPT, "from the checkpoint, other numbers: the loss is %.9g, not %.9g",
                        again, loss);
    if (error > 0.01f) return ddp_fail(DDP_ERR_CORRUPT, "an element of head is off by %g", (double)error);
    return loss < 1e-3 * first ? DDP_OK
                               : ddp_fail(DDP_ERR_CORRUPT, "the loss went from %g to %g", first, loss);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    trainer t = {.world = world, .folder = (const char *)user};
    ddp_result result = train(&t);
    ddp_fsdp_destroy(t.fsdp);
    return result;
}

int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    ddp_result result = DDP_OK;
    if (argc > 3 || desc.world_size < 1)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [folder]]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, argc > 2 ? argv[2] : "saved_fsdp");
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */

/*  test_ddp_parity.c - one training run has the same bits on any number of ranks. A small tied autoencoder
    with accumulation, clipping and Adam is compared, weights and norms, over W ranks x m micro-batches,
    processes and threads, bucket sizes, and gradients placed by the reducer or by the caller.

    The sum over all micro-batches of a step must be equal. It is a tree over their global index: rank r takes
    the block r*m .. r*m + m - 1, where m is a power of two unless one rank has them all. */
#include "ddp.h"
#include "../support/ranks.h"

enum { INPUT = 24, HIDDEN = 17, ROWS = 3, STEPS = 12, PARAMS = 5, ELEMENTS = INPUT * HIDDEN };

typedef struct plan {
    int micro_batches; /* per rank and step */
    size_t bucket_bytes;
    int given; /* gradients in one block of the trainer's */
    int skip;  /* parameters are equal already */
} plan;

typedef struct outcome {
    uint64_t hash;
    double first_loss, last_loss;
} outcome;

static outcome *shared; /* rank 0 stores it here */

/* wte is used twice: encode h = tanh(x wte + b1), decode y = (h * gain) wte^T + b2. */
typedef struct network {
    float wte[ELEMENTS], b1[HIDDEN], gain[HIDDEN], b2[INPUT];
    double scale; /* y = ... * scale; f64 for a second dtype */
    float moment1[PARAMS][ELEMENTS], moment2[PARAMS][ELEMENTS];
    double scale_moment1, scale_moment2;
    float block[2 * ELEMENTS + 2 * HIDDEN + INPUT]; /* gradients, if given */
    double scale_block[1];
    ddp_param params[PARAMS + 1]; /* the last is the second use of wte */
} network;

static float number(uint64_t seed) {
    return (float)((double)(int64_t)ranks_mix(seed) / 9223372036854775808.0);
}

static void network_param(network *n, int index, const char *name, void *value, ddp_dtype dtype, int64_t rows,
                          int64_t columns) {
    ddp_param *param = &n->params[index];
    param->name = name;
    param->value.data = value;
    param->value.dtype = dtype;
    param->value.ndim = columns ? 2 : 1;
    param->value.shape[0] = rows;
    param->value.shape[1] = columns;
}

static void network_init(network *n, const plan *p, int rank) {
    memset(n, 0, sizeof *n);
    network_param(n, 0, "wte", n->wte, DDP_F32, INPUT, HIDDEN);
    network_param(n, 1, "b1", n->b1, DDP_F32, HIDDEN, 0);
    network_param(n, 2, "gain", n->gain, DDP_F32, HIDDEN, 0);
    network_param(n, 3, "b2", n->b2, DDP_F32, INPUT, 0);
    network_param(n, 4, "scale", &n->scale, DDP_F64, 1, 0);
    network_param(n, 5, "head", n->wte, DDP_F32, INPUT, HIDDEN);
    for (int i = 0; i < ELEMENTS; i++) n->wte[i] = 0.2f * number((uint64_t)i);
    for (int i = 0; i < HIDDEN; i++) n->gain[i] = 1.0f;
    n->scale = 1.0;
    if (rank != 0 && !p->skip) n->wte[5] = 99.0f; /* the broadcast from rank 0 overwrites this */
    if (p->given) {
        float *at = n->block;
        static const int order[PARAMS] = {0, 1, 2, 3, 5};
        for (int k = 0; k < PARAMS; k++) {
            n->params[order[k]].grad.data = at;
            at += ddp_tensor_count(&n->params[order[k]].value);
        }
        n->params[4].grad.data = n->scale_block;
    }
}

/* Gradients of one micro-batch; each is announced as soon as it is final. Sums over rows are plain loops: the
   result of a micro-batch is the same on every rank. */
static ddp_result network_backward(network *n, ddp_accumulator *accumulator, uint64_t micro_batch,
                                   double *loss) {
    float x[ROWS][INPUT], h[ROWS][HIDDEN], g[ROWS][HIDDEN], y[ROWS][INPUT], dy[ROWS][INPUT], dg[ROWS][HIDDEN];
    float *wte = (float *)n->params[0].grad.data, *b1 = (float *)n->params[1].grad.data,
          *gain = (float *)n->params[2].grad.data;
    float *b2 = (float *)n->params[3].grad.data, *head = (float *)n->params[5].grad.data;
    double *scale = (double *)n->params[4].grad.data;
    static const int announced[PARAMS + 1] = {4, 3, 5, 2, 1, 0};
    ddp_result result;
    *loss = 0;
    *scale = 0;
    memset(wte, 0, sizeof n->wte);
    memset(head, 0, sizeof n->wte);
    memset(b1, 0, sizeof n->b1);
    memset(gain, 0, sizeof n->gain);
    memset(b2, 0, sizeof n->b2);
    for (int r = 0; r < ROWS; r++) {
        float a = number(micro_batch * 64 + (uint64_t)r * 2),
              b = number(micro_batch * 64 + (uint64_t)r * 2 + 1);
        for (int i = 0; i < INPUT; i++) x[r][i] = a * cosf((float)i * 0.3f) + b * sinf((float)i * 0.7f);
        for (int j = 0; j < HIDDEN; j++) {
            float sum = n->b1[j];
            for (int i = 0; i < INPUT; i++) sum += x[r][i] * n->wte[i * HIDDEN + j];
            h[r][j] = tanhf(sum);
            g[r][j] = h[r][j] * n->gain[j];
            dg[r][j] = 0;
        }
        for (int i = 0; i < INPUT; i++) {
            float sum = n->b2[i];
            for (int j = 0; j < HIDDEN; j++) sum += g[r][j] * n->wte[i * HIDDEN + j];
            y[r][i] = sum;
            dy[r][i] = (float)((double)sum * n->scale) - x[r][i];
            *loss += 0.5 * (double)dy[r][i] * (double)dy[r][i];
            *scale += (double)dy[r][i] * (double)y[r][i];
            dy[r][i] = (float)((double)dy[r][i] * n->scale);
            b2[i] += dy[r][i];
            for (int j = 0; j < HIDDEN; j++) {
                head[i * HIDDEN + j] += dy[r][i] * g[r][j];
                dg[r][j] += dy[r][i] * n->wte[i * HIDDEN + j];
            }
        }
        for (int j = 0; j < HIDDEN; j++) {
            float dh = dg[r][j] * n->gain[j] * (1 - h[r][j] * h[r][j]);
            gain[j] += dg[r][j] * h[r][j];
            b1[j] += dh;
            for (int i = 0; i < INPUT; i++) wte[i * HIDDEN + j] += x[r][i] * dh;
        }
    }
    for (int k = 0; k <= PARAMS; k++) {
        result = ddp_accumulator_ready(accumulator, announced[k]);
        if (result != DDP_OK) return result;
    }
    return DDP_OK;
}

static void network_adam(network *n, int step) {
    float correct1 = 1 - powf(0.9f, (float)(step + 1)), correct2 = 1 - powf(0.95f, (float)(step + 1));
    for (int i = 0; i < 4; i++) {
        float *value = (float *)n->params[i].value.data;
        const float *grad = (const float *)n->params[i].grad.data;
        int64_t count = ddp_tensor_count(&n->params[i].value);
        for (int64_t k = 0; k < count; k++) {
            n->moment1[i][k] = 0.9f * n->moment1[i][k] + 0.1f * grad[k];
            n->moment2[i][k] = 0.95f * n->moment2[i][k] + 0.05f * grad[k] * grad[k];
            value[k] -= 0.01f * (n->moment1[i][k] / correct1) / (sqrtf(n->moment2[i][k] / correct2) + 1e-8f);
        }
    }
    n->scale -= 0.01 * *(const double *)n->params[4].grad.data;
}

static uint64_t hash_bytes(uint64_t hash, const void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)memory)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static ddp_result train(ddp_group *group, void *user) {
    const plan *p = (const plan *)user;
    network *n = (network *)malloc(sizeof *n);
    int rank = ddp_rank(group), w = ddp_world_size(group);
    ddp_reducer *reducer;
    ddp_reducer_desc desc = DDP_ZERO;
    ddp_accumulator *accumulator;
    ddp_accumulator_desc accumulate = DDP_ZERO;
    uint64_t hash = UINT64_C(0xcbf29ce484222325), lowest, highest;
    network_init(n, p, rank);
    desc.params = accumulate.params = n->params;
    desc.param_count = accumulate.param_count = PARAMS + 1;
    desc.micro_batch_count = accumulate.micro_batch_count = p->micro_batches;
    desc.first_bucket_bytes = desc.bucket_cap_bytes = p->bucket_bytes;
    desc.skip_initial_broadcast = p->skip;
    RANKS_OK(group, ddp_reducer_create(&reducer, group, &desc));
    accumulate.reducer = reducer;
    RANKS_OK(group, ddp_accumulator_create(&accumulator, group, &accumulate));
    for (int step = 0; step < STEPS; step++) {
        double loss = 0;
        float norm = 0;
        for (int b = 0; b < p->micro_batches; b++) {
            double part;
            int last = 0;
            RANKS_OK(group, network_backward(n, accumulator,
                                             (uint64_t)((step * w + rank) * p->micro_batches + b), &part));
            RANKS_OK(group, ddp_accumulator_next(accumulator, &last));
            RANKS_CHECK(group, last == (b + 1 == p->micro_batches), "micro-batch %d: last=%d", b, last);
            loss += part;
        }
        RANKS_OK(group, ddp_reducer_wait(reducer));
        RANKS_OK(group, ddp_reducer_clip_grad_norm(reducer, 0.5f, &norm));
        hash = hash_bytes(hash, &norm, sizeof norm);
        network_adam(n, step);
        if (rank == 0 && step == 0) shared->first_loss = loss / p->micro_batches;
        if (rank == 0) shared->last_loss = loss / p->micro_batches;
    }
    hash = hash_bytes(hash, n->wte, sizeof n->wte);
    hash = hash_bytes(hash, n->b1, sizeof n->b1);
    hash = hash_bytes(hash, n->gain, sizeof n->gain);
    hash = hash_bytes(hash, n->b2, sizeof n->b2);
    hash = hash_bytes(hash, &n->scale, sizeof n->scale);
    RANKS_OK(group, ddp_all_reduce(group, &hash, &lowest, 1, DDP_U64, DDP_OP_MIN, NULL));
    RANKS_OK(group, ddp_all_reduce(group, &hash, &highest, 1, DDP_U64, DDP_OP_MAX, NULL));
    RANKS_CHECK(group, lowest == hash && highest == hash, "ranks ended with different weights");
    if (rank == 0) shared->hash = hash;
    ddp_accumulator_destroy(accumulator);
    ddp_reducer_destroy(reducer);
    free(n);
    return DDP_OK;
}

int main(void) {
    static const struct {
        int total, ways[4][2];
    } runs[] = {
        /* {ranks, micro-batches each}, 0 = no more */
        {8, {{1, 8}, {2, 4}, {4, 2}, {8, 1}}}, {3, {{1, 3}, {3, 1}, {0, 0}, {0, 0}}},
        {6, {{1, 6}, {3, 2}, {6, 1}, {0, 0}}}, {12, {{1, 12}, {3, 4}, {6, 2}, {0, 0}}},
        {7, {{1, 7}, {7, 1}, {0, 0}, {0, 0}}}, {1, {{1, 1}, {0, 0}, {0, 0}, {0, 0}}},
    };
    int failures = 0;
    watchdog_start(90);
    shared = (outcome *)ranks_shared(sizeof *shared);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        uint64_t want = 0;
        for (int k = 0; k < 4 && runs[i].ways[k][0]; k++)
            for (int variant = 0; variant < 4; variant++) {
                static const size_t bucket_bytes[4] = {0, 1, 2000, 0};
                plan p;
                ddp_result result;
                p.micro_batches = runs[i].ways[k][1];
                p.bucket_bytes = bucket_bytes[variant];
                p.given = variant >= 2;
                p.skip = variant == 3;
                memset(shared, 0, sizeof *shared);
                result = ranks_run(variant % 2 ? RANKS_THREADS : RANKS_PROCESSES, runs[i].ways[k][0],
                                   20000 * DDP_TEST_SLOWDOWN, train, &p);
                if (k == 0 && variant == 0) want = shared->hash;
                if (result == DDP_OK && shared->hash == want && shared->last_loss < 0.7 * shared->first_loss)
                    continue;
                fprintf(stderr,
                        "FAIL %d micro-batches on %d ranks, variant %d: %s, weights %016llx, want %016llx, "
                        "loss %g to %g: %s\n",
                        runs[i].total, runs[i].ways[k][0], variant, ddp_result_name(result),
                        (unsigned long long)shared->hash, (unsigned long long)want, shared->first_loss,
                        shared->last_loss, result == DDP_OK ? "" : ddp_last_error());
                failures++;
            }
        printf("%d micro-batches: %016llx\n", runs[i].total, (unsigned long long)want);
        fflush(stdout);
    }
    printf("%d failures\n", failures);
    return failures != 0;
}

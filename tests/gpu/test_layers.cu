/*  test_layers.cu - tensor-parallel layers over device memory: forward and backward give the results of the
    same layers on the CPU, with the same bits each time.

    test_layers processes|threads [W ...]     Built with -DDDP_TEST_ON_CPU it runs on the fake GPU, as
                                              test_conformance.cu, with a fake cuBLASLt. */
#include "../support/device.h"
#include "../../ddp_tensor.h"
#include <string>
#include <vector>

enum { KEPT = 16, WIDTH = 37 };
static const int64_t ROWS = 24; /* 1, 2, 3 and 4 ranks divide them evenly */
#define LAYER_TRY(call)                    \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)

/* A buffer on the CPU and its counterpart on the device. */
typedef struct twin {
    unsigned char *near;
    void *far;
    size_t count;
} twin;

typedef struct place {
    device_rank *d;
    ddp_tp *near, *far;
    ddp_tp_desc desc;
    int rank, ranks;
    size_t size;
    uint64_t seed, digest; /* of all bits copied back */
    twin kept[KEPT];
    int kept_count;
} place;

static double number(uint64_t seed) { return (double)(ranks_mix(seed) >> 40) / 8388608.0 - 1; }

/* Numbers of this rank, until drop. */
static ddp_result take(place *p, twin *t, int64_t count) {
    RANKS_CHECK(p->d->cpu, p->kept_count < KEPT, "KEPT is too small");
    t->count = (size_t)count;
    t->near = (unsigned char *)malloc(t->count * p->size + 1);
    RANKS_OK(p->d->cpu, ddp_device_cuda()->alloc(NULL, t->count * p->size, &t->far));
    for (size_t i = 0; i < t->count; i++) {
        double x = number(p->seed * 1000003 + (uint64_t)p->rank * 4099 + i);
        if (p->size == 4)
            ((float *)t->near)[i] = (float)x;
        else
            ((double *)t->near)[i] = x;
    }
    p->seed++;
    p->kept[p->kept_count++] = *t;
    return device_up(p->d, t->far, t->near, t->count * p->size);
}

static void drop(place *p) {
    while (p->kept_count) {
        twin *t = &p->kept[--p->kept_count];
        free(t->near);
        ddp_device_cuda()->free(NULL, t->far);
    }
}

static double value(const place *p, const void *data, size_t i) {
    return p->size == 4 ? (double)((const float *)data)[i] : ((const double *)data)[i];
}

/* exactly: bit for bit. */
static ddp_result same(place *p, const twin *t, const char *what, int exactly) {
    unsigned char *back = (unsigned char *)malloc(t->count * p->size + 1);
    double most = 0.01, near = p->size == 4 ? 1e-5 : 1e-12;
    ddp_result result = device_down(p->d, back, t->far, t->count * p->size);
    for (size_t i = 0; i < t->count; i++)
        most = fabs(value(p, t->near, i)) > most ? fabs(value(p, t->near, i)) : most;
    for (size_t i = 0; i < t->count * p->size; i++)
        p->digest = (p->digest ^ back[i]) * UINT64_C(1099511628211);
    for (size_t i = 0; i < t->count && result == DDP_OK; i++) {
        double have = value(p, back, i), want = value(p, t->near, i);
        if (exactly ? memcmp(back + i * p->size, t->near + i * p->size, p->size) == 0
                    : fabs(have - want) <= near * most)
            continue;
        free(back);
        RANKS_CHECK(p->d->cpu, 0, "%s: element %zu of %zu is %.17g, on the CPU %.17g", what, i, t->count,
                    have, want);
    }
    free(back);
    return result;
}
#define NEAR(t) LAYER_TRY(same(p, &(t), #t, 0))
#define SAME(t) LAYER_TRY(same(p, &(t), #t, 1))

#define OK(call) RANKS_OK(p->d->cpu, call)

static int64_t own_rows(const place *p) { return p->desc.sequence_parallel ? ROWS / p->ranks : ROWS; }

static ddp_result linear(place *p, const ddp_tp_linear_desc *desc) {
    ddp_tp_linear *near, *far;
    int column = desc->split == DDP_TP_COLUMN;
    OK(ddp_tp_linear_create(&near, p->near, desc));
    OK(ddp_tp_linear_create(&far, p->far, desc));
    int64_t in = ddp_tp_linear_in_features(near), out = ddp_tp_linear_out_features(near);
    int64_t x_count = (column ? own_rows(p) : ROWS) * (desc->scatter_input ? desc->in_features : in);
    int64_t y_count = (column ? ROWS : own_rows(p)) * (desc->gather_output ? desc->out_features : out);
    twin w, b = {NULL, NULL, 0}, x, y, dy, dx, dw, db = {NULL, NULL, 0};
    LAYER_TRY(take(p, &w, in * out));
    LAYER_TRY(take(p, &x, x_count));
    LAYER_TRY(take(p, &y, y_count));
    LAYER_TRY(take(p, &dy, y_count));
    LAYER_TRY(take(p, &dx, x_count));
    LAYER_TRY(take(p, &dw, in * out));
    if (!desc->no_bias) {
        LAYER_TRY(take(p, &b, out));
        LAYER_TRY(take(p, &db, out));
    }
    OK(ddp_tp_linear_forward(near, w.near, b.near, x.near, ROWS, y.near));
    OK(ddp_tp_linear_forward(far, w.far, b.far, x.far, ROWS, y.far));
    OK(ddp_tp_linear_backward(near, w.near, x.near, dy.near, ROWS, dx.near, dw.near, db.near));
    OK(ddp_tp_linear_backward(far, w.far, x.far, dy.far, ROWS, dx.far, dw.far, db.far));
    NEAR(y);
    NEAR(dx);
    NEAR(dw);
    NEAR(db);
    ddp_tp_linear_destroy(near);
    ddp_tp_linear_destroy(far);
    drop(p);
    return DDP_OK;
}

static ddp_result linears(place *p) {
    ddp_tp_linear_desc plain = DDP_ZERO, whole = DDP_ZERO, qkv = DDP_ZERO;
    plain.in_features = 13, plain.out_features = 17;
    for (int split = 0; split < 2; split++) {
        plain.split = split ? DDP_TP_ROW : DDP_TP_COLUMN;
        plain.no_bias = 0;
        LAYER_TRY(linear(p, &plain));
        plain.no_bias = 1;
        LAYER_TRY(linear(p, &plain));
    }
    qkv.in_features = 24, qkv.heads = 24, qkv.kv_heads = 12, qkv.head_size = 2;
    LAYER_TRY(linear(p, &qkv));
    if (p->desc.sequence_parallel) return DDP_OK;
    whole.in_features = 5, whole.out_features = 4, whole.gather_output = 1; /* of 3 ranks the last has none */
    LAYER_TRY(linear(p, &whole));
    qkv.out_features = 96, qkv.gather_output = 1;
    LAYER_TRY(linear(p, &qkv));
    whole.split = DDP_TP_ROW, whole.in_features = 4, whole.gather_output = 0, whole.scatter_input = 1;
    return linear(p, &whole);
}

static ddp_result mlp(place *p, ddp_tp_activation activation, int asynchronous) {
    ddp_tp_mlp_desc desc = DDP_ZERO;
    ddp_tp_mlp *near, *far;
    twin w[4], g[4], x, y, dy, dx, saved;
    desc.channels = 9, desc.hidden = 14, desc.activation = activation;
    OK(ddp_tp_mlp_create(&near, p->near, &desc));
    OK(ddp_tp_mlp_create(&far, p->far, &desc));
    for (int i = 0; i < 4; i++) {
        ddp_tp_linear *of = ddp_tp_mlp_linear(near, i / 2);
        int64_t count = ddp_tp_linear_out_features(of) * (i % 2 ? 1 : ddp_tp_linear_in_features(of));
        LAYER_TRY(take(p, &w[i], count));
        LAYER_TRY(take(p, &g[i], count));
    }
    LAYER_TRY(take(p, &x, own_rows(p) * desc.channels));
    LAYER_TRY(take(p, &y, own_rows(p) * desc.channels));
    LAYER_TRY(take(p, &dy, own_rows(p) * desc.channels));
    LAYER_TRY(take(p, &dx, own_rows(p) * desc.channels));
    LAYER_TRY(take(p, &saved, (int64_t)ddp_tp_mlp_saved_count(near, ROWS)));
    const void *near_w[4] = {w[0].near, w[1].near, w[2].near, w[3].near},
               *far_w[4] = {w[0].far, w[1].far, w[2].far, w[3].far};
    void *near_g[4] = {g[0].near, g[1].near, g[2].near, g[3].near},
         *far_g[4] = {g[0].far, g[1].far, g[2].far, g[3].far};
    OK(ddp_tp_mlp_forward(near, near_w, x.near, ROWS, saved.near, y.near));
    OK(ddp_tp_mlp_backward(near, near_w, x.near, saved.near, dy.near, ROWS, dx.near, near_g));
    /* again: nothing is allocated, and the host never waits */
    for (int time = 0; time < 1 + asynchronous; time++) {
#if defined(DDP_TEST_ON_CPU)
        OK(ddp_barrier(p->d->cpu));
        if (p->rank == 0) fake_record_from_here();
        OK(ddp_barrier(p->d->cpu));
#endif
        OK(ddp_tp_mlp_forward(far, far_w, x.far, ROWS, saved.far, y.far));
        OK(ddp_tp_mlp_backward(far, far_w, x.far, saved.far, dy.far, ROWS, dx.far, far_g));
    }
#if defined(DDP_TEST_ON_CPU)
    if (asynchronous) {
        int device = 0;
        device_get(&device);
        std::string calls = fake_record(device);
        for (const char *what : {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaStreamSynchronize",
                                 "cudaEventSynchronize", "GetHeuristic", "cublasLtCreate"})
            RANKS_CHECK(p->d->cpu, calls.find(what) == std::string::npos, "a second step calls %s:\n%s", what,
                        calls.c_str());
        RANKS_CHECK(p->d->cpu, calls.find("kernel(") != std::string::npos, "no kernels in the record");
    }
#endif
    NEAR(y);
    NEAR(dx);
    NEAR(saved);
    for (int i = 0; i < 4; i++) NEAR(g[i]);
    ddp_tp_mlp_destroy(near);
    ddp_tp_mlp_destroy(far);
    drop(p);
    return DDP_OK;
}

static ddp_result embedding(place *p) {
    ddp_tp_embedding_desc desc = DDP_ZERO;
    ddp_tp_embedding *near, *far;
    ddp_tensor_box box;
    int32_t tokens[24];
    twin w, y, dy, dw;
    desc.vocab = 10, desc.padded_vocab = 16, desc.channels = 7;
    /* Some tokens are frequent. */
    for (int i = 0; i < ROWS; i++) tokens[i] = (int32_t)(ranks_mix((uint64_t)i) % (uint64_t)(i % 3 ? 10 : 3));
    OK(ddp_tp_embedding_create(&near, p->near, &desc));
    OK(ddp_tp_embedding_create(&far, p->far, &desc));
    OK(ddp_tp_embedding_box(near, &box));
    LAYER_TRY(take(p, &w, box.shape[0] * 7));
    LAYER_TRY(take(p, &dw, box.shape[0] * 7));
    LAYER_TRY(take(p, &y, own_rows(p) * 7));
    LAYER_TRY(take(p, &dy, own_rows(p) * 7));
    OK(ddp_tp_embedding_forward(near, w.near, tokens, ROWS, y.near));
    OK(ddp_tp_embedding_forward(far, w.far, tokens, ROWS, y.far));
    OK(ddp_tp_embedding_backward(near, tokens, dy.near, ROWS, dw.near));
    OK(ddp_tp_embedding_backward(far, tokens, dy.far, ROWS, dw.far));
    SAME(y);
    SAME(dw);
    ddp_tp_embedding_destroy(near);
    ddp_tp_embedding_destroy(far);
    drop(p);
    return DDP_OK;
}

/* in_place: the gradient overwrites the logits */
static ddp_result cross_entropy(place *p, int64_t vocab, int64_t padded, int in_place) {
    ddp_tp_loss_desc desc = DDP_ZERO;
    int64_t columns = padded ? padded : vocab, piece = (columns + p->ranks - 1) / p->ranks,
            first = piece * p->rank < columns ? piece * p->rank : columns;
    int64_t count = columns - first < piece ? columns - first : piece;
    int32_t targets[24];
    double near_mean = -1, far_mean = -1;
    twin logits, losses, d;
    desc.vocab = vocab, desc.padded_vocab = padded, desc.z_loss = in_place ? 1e-2 : 0;
    for (int i = 0; i < ROWS; i++)
        targets[i] = i % 5 == 2 ? -100 : (int32_t)(ranks_mix((uint64_t)(i + 77)) % (uint64_t)vocab);
    LAYER_TRY(take(p, &logits, ROWS * count));
    LAYER_TRY(take(p, &losses, ROWS));
    LAYER_TRY(take(p, &d, ROWS * count));
    OK(ddp_tp_cross_entropy(p->near, &desc, logits.near, targets, ROWS, losses.near, &near_mean,
                            in_place ? logits.near : d.near));
    OK(ddp_tp_cross_entropy(p->far, &desc, logits.far, targets, ROWS, losses.far, &far_mean,
                            in_place ? logits.far : d.far));
    RANKS_CHECK(p->d->cpu, fabs(near_mean - far_mean) <= (p->size == 4 ? 1e-5 : 1e-12) * fabs(near_mean),
                "mean %.17g, on the CPU %.17g", far_mean, near_mean);
    NEAR(losses);
    NEAR(logits);
    NEAR(d);
    OK(ddp_tp_cross_entropy(p->far, &desc, d.far, targets, ROWS, NULL, NULL, NULL));
    drop(p);
    return DDP_OK;
}

static ddp_result norm(place *p, int rms, int64_t n) {
    ddp_tp_layer_norm_desc desc = DDP_ZERO;
    ddp_tp_layer_norm *near, *far;
    twin w, b = {NULL, NULL, 0}, x, y, stats, dy, dw, db = {NULL, NULL, 0};
    int64_t rows = own_rows(p);
    desc.channels = n, desc.rms = rms, desc.eps = 1e-3;
    OK(ddp_tp_layer_norm_create(&near, p->near, &desc));
    OK(ddp_tp_layer_norm_create(&far, p->far, &desc));
    LAYER_TRY(take(p, &w, n));
    LAYER_TRY(take(p, &dw, n));
    LAYER_TRY(take(p, &x, rows * n));
    LAYER_TRY(take(p, &y, rows * n));
    LAYER_TRY(take(p, &stats, 2 * rows));
    LAYER_TRY(take(p, &dy, rows * n));
    if (!rms) {
        LAYER_TRY(take(p, &b, n));
        LAYER_TRY(take(p, &db, n));
    }
    OK(ddp_tp_layer_norm_forward(near, w.near, b.near, x.near, rows, stats.near, y.near));
    OK(ddp_device_cuda()->use_stream(p->d->group, DDP_STREAM_COMM)); /* as calls of another group may do */
    OK(ddp_tp_layer_norm_forward(far, w.far, b.far, x.far, rows, stats.far, y.far));
    NEAR(stats);
    /* In place: dx is the same array as dy. */
    OK(ddp_tp_layer_norm_backward(near, w.near, x.near, stats.near, dy.near, rows, dy.near, dw.near,
                                  db.near));
    OK(ddp_tp_layer_norm_backward(far, w.far, x.far, stats.far, dy.far, rows, dy.far, dw.far, db.far));
    NEAR(y);
    NEAR(dy);
    NEAR(dw);
    NEAR(db);
    OK(ddp_tp_layer_norm_backward(near, w.near, x.near, stats.near, dy.near, rows, NULL, dw.near, db.near));
    OK(ddp_tp_layer_norm_backward(far, w.far, x.far, stats.far, dy.far, rows, NULL, dw.far, db.far));
    NEAR(dw);
    OK(ddp_tp_layer_norm_backward(far, w.far, x.far, stats.far, dy.far, rows, y.far, NULL, NULL));
    ddp_tp_layer_norm_destroy(near);
    ddp_tp_layer_norm_destroy(far);
    drop(p);
    return DDP_OK;
}

static ddp_result dropout(place *p) {
    ddp_tp_dropout_desc desc = DDP_ZERO;
    twin x, y;
    LAYER_TRY(take(p, &x, ROWS * WIDTH));
    LAYER_TRY(take(p, &y, ROWS * WIDTH));
    desc.rate = 0.3, desc.key = UINT64_C(0x123456789abcdef), desc.first_row = 5 + p->rank;
    OK(ddp_tp_dropout(p->near, &desc, x.near, ROWS, WIDTH, y.near));
    OK(ddp_tp_dropout(p->far, &desc, x.far, ROWS, WIDTH, y.far));
    SAME(y);
    desc.columns = 2 * WIDTH, desc.first_column = 11;
    OK(ddp_tp_dropout(p->near, &desc, x.near, ROWS, WIDTH, x.near));
    OK(ddp_tp_dropout(p->far, &desc, x.far, ROWS, WIDTH, x.far));
    SAME(x);
    desc.rate = 0;
    OK(ddp_tp_dropout(p->near, &desc, x.near, ROWS, WIDTH, y.near));
    OK(ddp_tp_dropout(p->far, &desc, x.far, ROWS, WIDTH, y.far));
    SAME(y);
    drop(p);
    return DDP_OK;
}

/* as in a build without cuBLASLt */
static ddp_result plain_gemm(const ddp_gemm *g, void *) {
    return g->dtype == DDP_F32 ? ddp__cuda_plain_gemm<float>(g) : ddp__cuda_plain_gemm<double>(g);
}

static ddp_result in_a_context(device_rank *d, const ddp_tp_desc *desc, uint64_t *digest) {
    place it = {d,
                NULL,
                NULL,
                *desc,
                ddp_rank(d->cpu),
                ddp_world_size(d->cpu),
                ddp_dtype_size(desc->dtype),
                1,
                UINT64_C(14695981039346656037),
                {},
                0},
          *p = &it;
    ddp_tp_desc near = *desc;
    near.gemm = NULL;
    OK(ddp_tp_create(&p->near, d->cpu, &near));
    OK(ddp_tp_create(&p->far, d->group, desc));
    LAYER_TRY(linears(p));
    LAYER_TRY(mlp(p, DDP_TP_GELU, desc->chunk_count == 0 && device_uses_nccl()));
    LAYER_TRY(mlp(p, DDP_TP_RELU, 0));
    LAYER_TRY(mlp(p, DDP_TP_SILU_GATED, 0));
    LAYER_TRY(embedding(p));
    LAYER_TRY(cross_entropy(p, 10, 16, 0));
    LAYER_TRY(cross_entropy(p, 131, 0, 1));
    for (int rms = 0; rms < 2; rms++) {
        LAYER_TRY(norm(p, rms, 1));
        LAYER_TRY(norm(p, rms, 50));
    }
    LAYER_TRY(dropout(p));
    ddp_tp_destroy(p->near);
    ddp_tp_destroy(p->far);
    *digest = p->digest;
    return DDP_OK;
}

/* More rows than the tokens of one launch. */
static ddp_result many_tokens(device_rank *d) {
    enum { MANY = 2000 };
    int32_t tokens[MANY];
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp_loss_desc loss = DDP_ZERO;
    ddp_tp_embedding_desc e = DDP_ZERO;
    ddp_tp_embedding *near, *far;
    double near_mean, far_mean;
    twin w, y, dw, losses;
    desc.dtype = DDP_F64, desc.max_rows = MANY;
    place it = {d, NULL, NULL, desc, ddp_rank(d->cpu), ddp_world_size(d->cpu), 8, 1, 0, {}, 0}, *p = &it;
    for (int i = 0; i < MANY; i++) tokens[i] = (int32_t)(ranks_mix((uint64_t)i) % 300);
    e.vocab = loss.vocab = 300, e.channels = 3;
    OK(ddp_tp_create(&p->near, d->cpu, &desc));
    OK(ddp_tp_create(&p->far, d->group, &desc));
    OK(ddp_tp_embedding_create(&near, p->near, &e));
    OK(ddp_tp_embedding_create(&far, p->far, &e));
    LAYER_TRY(take(p, &w, 900));
    LAYER_TRY(take(p, &dw, 900));
    LAYER_TRY(take(p, &y, MANY * 3));
    LAYER_TRY(take(p, &losses, MANY));
    OK(ddp_tp_embedding_forward(near, w.near, tokens, MANY, y.near));
    OK(ddp_tp_embedding_forward(far, w.far, tokens, MANY, y.far));
    OK(ddp_tp_embedding_backward(near, tokens, y.near, MANY, dw.near));
    OK(ddp_tp_embedding_backward(far, tokens, y.far, MANY, dw.far));
    SAME(y);
    SAME(dw);
    loss.vocab = 3 * p->ranks;
    for (int i = 0; i < MANY; i++) tokens[i] = (int32_t)(i % 7 ? i % loss.vocab : -100);
    OK(ddp_tp_cross_entropy(p->near, &loss, y.near, tokens, MANY, losses.near, &near_mean, NULL));
    OK(ddp_tp_cross_entropy(p->far, &loss, y.far, tokens, MANY, losses.far, &far_mean, NULL));
    RANKS_CHECK(d->cpu, fabs(near_mean - far_mean) < 1e-12, "mean %.17g, on the CPU %.17g", far_mean,
                near_mean);
    NEAR(losses);
    drop(p);
    ddp_tp_embedding_destroy(near);
    ddp_tp_embedding_destroy(far);
    ddp_tp_destroy(p->near);
    ddp_tp_destroy(p->far);
    return DDP_OK;
}

/* One by one: all transposes, with gaps between rows, at odd addresses. */
static ddp_result product(place *p, ddp_gemm_fn gemm, ddp_gemm g, int64_t offset) {
    ddp_gemm far = g;
    twin a, b, c;
    LAYER_TRY(take(p, &a, 700));
    LAYER_TRY(take(p, &b, 700));
    LAYER_TRY(take(p, &c, 700));
    g.a = a.near + (size_t)offset * p->size, g.b = b.near + 2 * (size_t)offset * p->size,
    g.c = c.near + 3 * (size_t)offset * p->size;
    far.a = (char *)a.far + (size_t)offset * p->size, far.b = (char *)b.far + 2 * (size_t)offset * p->size,
    far.c = (char *)c.far + 3 * (size_t)offset * p->size;
    OK(ddp_gemm_builtin(&g, NULL));
    OK(gemm(&far, p->d->group));
    NEAR(c);
    drop(p);
    return DDP_OK;
}

static ddp_result products(device_rank *d, ddp_gemm_fn gemm) {
    for (int wide = 0; wide < 2; wide++)
        for (int way = 0; way < 16; way++) {
            place it = {d, NULL, NULL, {}, ddp_rank(d->cpu), 1, wide ? 8u : 4u, (uint64_t)way, 0, {}, 0};
            ddp_gemm g = DDP_ZERO;
            g.dtype = wide ? DDP_F64 : DDP_F32, g.trans_a = way & 1, g.trans_b = way >> 1 & 1,
            g.accumulate = way >> 2 & 1;
            g.m = 5, g.n = 7, g.k = 11, g.lda = 13, g.ldb = 14, g.ldc = 9;
            LAYER_TRY(product(&it, gemm, g, way >> 3));
            g.k = 0;
            LAYER_TRY(product(&it, gemm, g, 0));
            g.m = 1, g.n = 1, g.k = 1, g.lda = g.ldb = g.ldc = 1;
            LAYER_TRY(product(&it, gemm, g, way >> 3));
        }
    return DDP_OK;
}

#if defined(DDP_USE_CUBLASLT)
/* The product of the layers on a group of GPUs. */
static ddp_result gemm_of_group(const ddp_gemm *g, void *user) {
    return (g->dtype == DDP_F32 ? ddp__cuda_layer_gemm<float> : ddp__cuda_layer_gemm<double>)(g, user);
}

//== products with epilogues ==================================================

static double gelu(double x, double *slope) {
    double t = tanh(0.79788456080286536 * (x + 0.044715 * x * x * x));
    *slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286536 * (1 + 3 * 0.044715 * x * x);
    return 0.5 * x * (1 + t);
}

/* An array in device memory, and its elements as they should be. */
struct far_array {
    device_rank *d;
    ddp_dtype dtype;
    std::vector<double> want;
    void *memory, *at; /* at: some elements from the start of memory */
    far_array(device_rank *rank, ddp_dtype type, uint64_t seed, int64_t count, size_t offset)
        : d(rank), dtype(type), want((size_t)count), memory(NULL), at(NULL) {
        size_t size = ddp_dtype_size(dtype);
        std::vector<unsigned char> rounded(want.size() * size + 1);
        if (ddp_device_cuda()->alloc(NULL, (want.size() + offset) * size, &memory) != DDP_OK) return;
        at = (char *)memory + offset * size;
        for (size_t i = 0; i < want.size(); i++) want[i] = number(seed * 1000003 + i) / 0.7;
        ddp_device_cpu()->cast(rounded.data(), dtype, want.data(), DDP_F64, want.size());
        ddp_device_cpu()->cast(want.data(), DDP_F64, rounded.data(), dtype, want.size());
        ddp_device_cuda()->copy(at, rounded.data(), want.size() * size);
    }
    ~far_array() {
        if (memory) ddp_device_cuda()->free(NULL, memory);
    }
    std::vector<double> have() const {
        std::vector<unsigned char> stored(want.size() * ddp_dtype_size(dtype) + 1);
        std::vector<double> x(want.size());
        ddp_device_cuda()->copy(stored.data(), at, want.size() * ddp_dtype_size(dtype));
        ddp_device_cpu()->cast(x.data(), DDP_F64, stored.data(), dtype, x.size());
        return x;
    }
    ddp_result near(const char *what, const ddp_cuda_gemm_desc *g) const {
        double largest = 0.1, tolerance = dtype == DDP_F64 ? 1e-12 : dtype == DDP_F32 ? 1e-5 : 2e-2;
        std::vector<double> x = have();
        for (double v : want) largest = fabs(v) > largest ? fabs(v) : largest;
        for (size_t i = 0; i < x.size(); i++)
            RANKS_CHECK(d->cpu, fabs(x[i] - want[i]) <= tolerance * largest,
                        "%s, %s m=%lld n=%lld k=%lld trans %d %d epilogue %d: element %zu is %.9g, not %.9g",
                        what, ddp_dtype_name(dtype), (long long)g->m, (long long)g->n, (long long)g->k,
                        g->trans_a, g->trans_b, (int)g->epilogue, i, x[i], want[i]);
        return DDP_OK;
    }
};

/* One product against plain loops. way: bit 0 and 1 transpose, the rest selects the addend: none, another
   matrix, c. gap: elements between rows. */
static ddp_result epilogue_of(device_rank *d, ddp_cuda_gemm_desc g, int way, int gap, size_t offset) {
    g.trans_a = way & 1;
    g.trans_b = way >> 1 & 1;
    g.lda = (g.trans_a ? g.m : g.k) + gap;
    g.ldb = (g.trans_b ? g.k : g.n) + gap;
    g.ldc = g.n + gap;
    far_array a(d, g.dtype, 1, (g.trans_a ? g.k : g.m) * g.lda, offset);
    far_array b(d, g.dtype, 2, (g.trans_b ? g.n : g.k) * g.ldb, offset);
    far_array c(d, g.dtype, 3, g.m * g.ldc, offset), add(d, g.dtype, 4, g.m * g.ldc, offset);
    far_array bias(d, g.dtype, 5, g.n, offset), sums(d, g.dtype, 6, g.m, offset),
        aux(d, g.dtype, 7, g.m * g.n, offset);
    const std::vector<double> &added = way >> 2 == 2 ? c.want : add.want;
    if (!gap) g.lda = g.ldb = g.ldc = 0; /* the default */
    g.a = a.at;
    g.b = b.at;
    g.c = c.at;
    g.bias = bias.at;
    g.bias_grad = sums.at;
    g.aux = aux.at;
    if (way >> 2) g.addend = way >> 2 == 2 ? c.at : add.at;
    RANKS_OK(d->cpu, ddp_cuda_gemm(d->group, &g, d->stream));
    for (int64_t i = 0; i < g.m; i++) {
        double sum_of_row = 0, slope;
        int64_t lda = (g.trans_a ? g.m : g.k) + gap, ldb = (g.trans_b ? g.k : g.n) + gap;
        for (int64_t k = 0; k < g.k; k++)
            sum_of_row += a.want[(size_t)(g.trans_a ? k * lda + i : i * lda + k)];
        for (int64_t j = 0; j < g.n; j++) {
            size_t to = (size_t)(i * (g.n + gap) + j), at = (size_t)(i * g.n + j);
            double p = way >> 2 ? added[to] : 0;
            for (int64_t k = 0; k < g.k; k++)
                p += a.want[(size_t)(g.trans_a ? k * lda + i : i * lda + k)]
                     * b.want[(size_t)(g.trans_b ? j * ldb + k : k * ldb + j)];
            if (g.epilogue == DDP_CUDA_EPILOGUE_BIAS || g.epilogue == DDP_CUDA_EPILOGUE_GELU)
                p += bias.want[(size_t)j];
            if (g.epilogue == DDP_CUDA_EPILOGUE_GELU) {
                aux.want[at] = p;
                p = gelu(p, &slope);
            }
            if (g.epilogue == DDP_CUDA_EPILOGUE_GELU_GRAD) {
                gelu(aux.want[at], &slope);
                p *= slope;
            }
            c.want[to] = p;
        }
        if (g.epilogue == DDP_CUDA_EPILOGUE_BIAS_GRAD) sums.want[(size_t)i] = sum_of_row;
    }
    LAYER_TRY(c.near("c", &g)); /* and between its rows what was there */
    LAYER_TRY(aux.near("aux", &g));
    LAYER_TRY(sums.near("bias_grad", &g));
    if (way >> 2 == 2) return DDP_OK;
    std::vector<double> first[3] = {c.have(), aux.have(), sums.have()};
    RANKS_OK(d->cpu, ddp_cuda_gemm(d->group, &g, d->stream));
    std::vector<double> second[3] = {c.have(), aux.have(), sums.have()};
    for (int i = 0; i < 3; i++) RANKS_CHECK(d->cpu, first[i] == second[i], "other bits the second time");
    return DDP_OK;
}

/* Every dtype and epilogue: with cuBLASLt's epilogues, and without them. cuBLASLt can refuse them in two
   ways, in the heuristics and at the product. */
static ddp_result epilogues(device_rank *d) {
    static const int64_t sizes[7][3] = {{5, 7, 11}, {16, 24, 8}, {40, 8, 300}, {3, 8, 1},
                                        {3, 8, 0},  {4, 0, 5},   {0, 3, 2}};
    for (int refusal = 0; refusal < 3; refusal++)
        for (ddp_dtype dtype : {DDP_F32, DDP_F64, DDP_F16, DDP_BF16})
            for (int epilogue = 0; epilogue <= DDP_CUDA_EPILOGUE_BIAS_GRAD; epilogue++)
                for (int way = 0; way < 14; way++) { /* each size with both values of trans_a */
                    ddp_cuda_gemm_desc g = DDP_ZERO;
                    const int64_t *size = sizes[way / 2];
                    int uses_aux = epilogue == DDP_CUDA_EPILOGUE_GELU
                                   || epilogue == DDP_CUDA_EPILOGUE_GELU_GRAD;
                    g.dtype = dtype;
                    g.epilogue = (ddp_cuda_epilogue)epilogue;
                    g.m = size[0];
                    g.n = size[1];
                    g.k = size[2];
                    if (g.k == 300 && epilogue == DDP_CUDA_EPILOGUE_BIAS_GRAD && refusal == 1)
                        g.m = 2048, g.n = 1; /* a thread adds several rows */
#if defined(DDP_TEST_ON_CPU)
                    int fused = fake_lt_fused, wants = epilogue && refusal == 0 && g.m * g.n * g.k > 0;
                    if (uses_aux && (ddp_dtype_size(dtype) > 2 || g.n % 8)) wants = 0;
                    fake_lt_refused = refusal ? ~(uint64_t)0 : 0;
                    fake_lt_late = refusal == 2;
                    fake_lt_refusal = refusal == 1 ? CUBLAS_STATUS_NOT_SUPPORTED
                                                   : CUBLAS_STATUS_INVALID_VALUE;
#endif
                    ddp_result result = epilogue_of(d, g, way, way % 3 ? 0 : 8, way % 4 == 3);
#if defined(DDP_TEST_ON_CPU)
                    fake_lt_refused = 0, fake_lt_late = 0;
                    LAYER_TRY(result);
                    RANKS_CHECK(d->cpu, fake_lt_fused - fused == wants * (way >> 2 == 2 ? 1 : 2),
                                "epilogue %d of %s m=%lld: %d products with an epilogue", epilogue,
                                ddp_dtype_name(dtype), (long long)g.m, fake_lt_fused - fused);
#endif
                    LAYER_TRY(result);
                    if (uses_aux && way == 0) { /* the sizes of cuBLASLt's GELU without gaps */
                        g.m = 6;
                        g.n = 16;
                        g.k = 3;
                        LAYER_TRY(epilogue_of(d, g, 2, 0, 0));
                    }
                }
    return DDP_OK;
}

static ddp_result refused(device_rank *d, ddp_result have, ddp_result want, const char *text) {
    RANKS_CHECK(d->cpu, have == want && strstr(ddp_last_error(), text), "%s: %s", ddp_result_name(have),
                ddp_last_error());
    return DDP_OK;
}

static ddp_result bad_products(device_rank *d) {
    ddp_gemm layer = DDP_ZERO;
    ddp_cuda_gemm_desc g = DDP_ZERO, bad;
    void *memory;
    layer.dtype = DDP_F32;
    layer.m = layer.n = layer.k = 1;
    RANKS_OK(d->cpu, ddp_device_cuda()->alloc(NULL, 4096, &memory));
    g.m = g.n = g.k = 1;
    g.a = g.b = g.c = memory;
#define REFUSED(change, text)                                                                   \
    do {                                                                                        \
        bad = g;                                                                                \
        change;                                                                                 \
        LAYER_TRY(refused(d, ddp_cuda_gemm(d->group, &bad, d->stream), DDP_ERR_INVALID, text)); \
    } while (0)
    LAYER_TRY(refused(d, ddp_cuda_gemm(d->group, NULL, 0), DDP_ERR_INVALID, "ddp_cuda_gemm: desc is NULL"));
    LAYER_TRY(refused(d, ddp_cuda_gemm(NULL, &g, 0), DDP_ERR_INVALID, "the group has no GPUs"));
    LAYER_TRY(refused(d, ddp_cuda_gemm(d->cpu, &g, 0), DDP_ERR_INVALID, "pass one of ddp_cuda_group_create"));
    REFUSED(bad.dtype = DDP_I8, "dtype=i8");
    REFUSED(bad.m = -1, "ddp_cuda_gemm: m=-1");
    REFUSED(bad.n = -1, "n=-1");
    REFUSED(bad.k = -2, "k=-2");
    REFUSED((bad.k = 3, bad.lda = 2), "lda=2 is below 3");
    REFUSED((bad.n = 3, bad.ldb = 2), "ldb=2 is below 3");
    REFUSED((bad.k = 3, bad.trans_b = 1, bad.ldb = -1), "ldb=-1 is below 3");
    REFUSED((bad.n = 3, bad.ldc = 1), "ldc=1 is below 3");
    REFUSED(bad.a = NULL, "a is NULL");
    REFUSED(bad.b = NULL, "b is NULL");
    REFUSED(bad.c = NULL, "c is NULL");
    REFUSED(bad.epilogue = (ddp_cuda_epilogue)5, "epilogue=5 is invalid");
    REFUSED(bad.epilogue = (ddp_cuda_epilogue)7, "epilogue=7 is invalid");
    REFUSED(bad.epilogue = DDP_CUDA_EPILOGUE_BIAS, "bias is NULL");
    REFUSED((bad.epilogue = DDP_CUDA_EPILOGUE_GELU, bad.aux = memory), "bias is NULL");
    REFUSED((bad.epilogue = DDP_CUDA_EPILOGUE_GELU, bad.bias = memory), "aux is NULL");
    REFUSED(bad.epilogue = DDP_CUDA_EPILOGUE_GELU_GRAD, "aux is NULL");
    REFUSED(bad.epilogue = DDP_CUDA_EPILOGUE_BIAS_GRAD, "bias_grad is NULL");
#undef REFUSED
    LAYER_TRY(refused(d, ddp_cuda_gemm_tf32(NULL, d->group), DDP_ERR_INVALID, "ddp_cuda_gemm_tf32: gemm is"));
    LAYER_TRY(refused(d, ddp_cuda_gemm_tf32(&layer, NULL), DDP_ERR_INVALID, "set gemm_user"));
    LAYER_TRY(
        refused(d, ddp_cuda_gemm_tf32(&layer, d->cpu), DDP_ERR_INVALID, "ddp_cuda_gemm_tf32: the group"));
    layer.m = -1;
    LAYER_TRY(refused(d, ddp_cuda_gemm_tf32(&layer, d->group), DDP_ERR_INVALID, "ddp_cuda_gemm_tf32: m=-1"));
#if defined(DDP_TEST_ON_CPU)
    int asked, products = fake_lt_tf32;
    fake_fail("cublasLtMatmul", -1, 1, 0, 0);
    LAYER_TRY(
        refused(d, ddp_cuda_gemm(d->group, &g, d->stream), DDP_ERR_ENGINE,
                "ddp_cuda_gemm f32 m=1 n=1 k=1 epilogue=0: cublasLtMatmul: the function failed to launch "
                "(CUBLAS_STATUS_EXECUTION_FAILED)"));
    asked = fake_lt_asked;
    RANKS_OK(d->cpu, ddp_cuda_gemm(d->group, &g, d->stream)); /* with an algorithm that is cached */
    RANKS_CHECK(d->cpu, fake_lt_asked == asked, "cuBLASLt is queried again");
    bad = g;
    bad.a = (char *)memory + 256;
    bad.b = (char *)memory + 32;
    RANKS_OK(d->cpu,
             ddp_cuda_gemm(d->group, &bad, d->stream)); /* at other addresses, with the same alignment */
    RANKS_CHECK(d->cpu, fake_lt_asked == asked, "cuBLASLt is queried for another address");
    bad.b = (char *)memory + 40;
    RANKS_OK(d->cpu, ddp_cuda_gemm(d->group, &bad, d->stream));
    RANKS_CHECK(d->cpu, fake_lt_asked == asked + 1, "an algorithm for 16 bytes is used with 8");
    for (int n = 1; n < 200; n++) { /* more algorithms than the cache has */
        g.n = n % 100 + 1;
        RANKS_OK(d->cpu, ddp_cuda_gemm(d->group, &g, d->stream));
    }
    g.n = 36; /* 37 is the oldest of the last 64: the next new one replaces it */
    fake_lt_state = CUBLAS_STATUS_NOT_SUPPORTED;
    LAYER_TRY(refused(d, ddp_cuda_gemm(d->group, &g, d->stream), DDP_ERR_ENGINE,
                      "cublasLtMatmulAlgoGetHeuristic: it failed (CUBLAS_STATUS_NOT_SUPPORTED)"));
    fake_lt_state = CUBLAS_STATUS_SUCCESS;
    asked = fake_lt_asked;
    for (int n = 37; n >= 36; n--) { /* the failure replaced nothing */
        g.n = n;
        RANKS_OK(d->cpu, ddp_cuda_gemm(d->group, &g, d->stream));
        RANKS_CHECK(d->cpu, fake_lt_asked == asked + 37 - n, "n=%d: %d queries", n, fake_lt_asked - asked);
    }
    RANKS_CHECK(d->cpu, fake_lt_tf32 == products, "TF32 unasked for");
    layer.m = 1;
    layer.n = layer.ldb = layer.ldc = 36;
    layer.lda = 1;
    layer.a = layer.b = memory;
    layer.c = memory;
    RANKS_OK(d->cpu, ddp_cuda_gemm_tf32(&layer, d->group));
    RANKS_CHECK(d->cpu, fake_lt_tf32 == products + 1, "no TF32");
    fake_fail("cublasLtMatmul", -1, 1, 0, 0);
    LAYER_TRY(
        refused(d, ddp_cuda_gemm_tf32(&layer, d->group), DDP_ERR_ENGINE, "ddp_cuda_gemm_tf32 f32 m=1 n=36"));
#endif
    ddp_device_cuda()->free(NULL, memory);
    return DDP_OK;
}

#if defined(DDP_TEST_ON_CPU)
//== tables of algorithms =====================================================

static std::string read_text(const char *path) {
    std::string text;
    char part[4096];
    FILE *file = fopen(path, "r");
    for (size_t n; file && (n = fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
    if (file) fclose(file);
    return text;
}
static void write_text(const std::string &path, const std::string &text) {
    FILE *file = fopen(path.c_str(), "w");
    if (file && fwrite(text.data(), 1, text.size(), file) != text.size())
        printf("%s: cannot write\n", path.c_str());
    if (file) fclose(file);
}
static std::string replaced(std::string text, const char *from, const char *to) {
    size_t at = text.find(from);
    return at == std::string::npos ? "not found: " + std::string(from) : text.replace(at, strlen(from), to);
}
static ddp_result bits_of(device_rank *d, ddp_group *group, const ddp_cuda_gemm_desc &g, const far_array &c,
                          std::vector<double> *out) {
    RANKS_OK(d->cpu, ddp_cuda_gemm(group, &g, d->stream));
    *out = c.have();
    return DDP_OK;
}

/* Algorithms one by one; a table with one of them; tables with mistakes, which change nothing. */
static ddp_result tables(device_rank *d) {
    ddp_cuda_gemm_algo algos[8];
    int count, used;
    std::string path = "/tmp/ddp_gemm_" + std::to_string((long)getpid());
    far_array a(d, DDP_F64, 1, 40 * 300, 0), b(d, DDP_F64, 2, 300 * 8, 0), c(d, DDP_F64, 3, 40 * 8, 0),
        sums(d, DDP_F64, 4, 40, 0);
    std::vector<double> plain, other, bits;
    ddp_cuda_gemm_desc g = DDP_ZERO, half = DDP_ZERO;
    ddp_group *group;
    RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group)); /* without cached choices */
    g.m = 40;
    g.n = 8;
    g.k = 300;
    g.a = a.at;
    g.b = b.at;
    g.c = c.at;
    g.dtype = DDP_F64;
    half = g, half.dtype = DDP_BF16, half.epilogue = DDP_CUDA_EPILOGUE_GELU, half.aux = half.c,
    half.bias = b.at;
    for (int capacity = 1; capacity <= 8; capacity++) { /* the fake cuBLASLt has three, half of them fused */
        RANKS_OK(d->cpu, ddp_cuda_gemm_algos(d->group, &half, algos, capacity, &count));
        int fused = (capacity + 1) / 2 < 3 ? (capacity + 1) / 2 : 3, wants = fused + 3;
        if (wants > capacity) wants = capacity;
        RANKS_CHECK(d->cpu, count == wants, "%d algorithms of %d", count, capacity);
        for (int i = 0; i < count; i++)
            RANKS_CHECK(d->cpu, algos[i].separate == (i >= fused), "algorithm %d of %d", i, capacity);
    }
    half.dtype = DDP_F32; /* never fused */
    RANKS_OK(d->cpu, ddp_cuda_gemm_algos(d->group, &half, algos, 8, &count));
    RANKS_CHECK(d->cpu, count == 3 && algos[0].separate, "%d algorithms for GELU in f32", count);
    g.epilogue = DDP_CUDA_EPILOGUE_BIAS_GRAD;
    g.bias_grad = sums.at;
    LAYER_TRY(bits_of(d, group, g, c, &plain));
    RANKS_OK(d->cpu, ddp_cuda_gemm_algos(group, &g, algos, 8, &count));
    RANKS_CHECK(d->cpu, count == 6, "%d algorithms", count);
    for (int i = 0; i < count; i++) {
        g.algo = &algos[i];
        int fused = fake_lt_fused;
        LAYER_TRY(bits_of(d, group, g, c, i == 4 ? &other : &bits));
        RANKS_CHECK(d->cpu, fake_lt_fused - fused == (i < 3), "algorithm %d", i);
        if (i != 4) RANKS_CHECK(d->cpu, (bits == plain) == (i % 3 == 0), "algorithm %d has other bits", i);
    }
    g.algo = NULL;
    RANKS_OK(d->cpu, ddp_cuda_gemm_save(group, path.c_str(), &g, &algos[4], 1));
    const std::string text = read_text(path.c_str());
    for (int again = 0; again < 2; again++) {
        RANKS_OK(d->cpu, ddp_cuda_gemm_load(group, path.c_str(), again ? NULL : &used));
        int asked = fake_lt_asked;
        LAYER_TRY(bits_of(d, group, g, c, &bits));
        RANKS_CHECK(d->cpu, used == 1 && bits == other && fake_lt_asked == asked, "a table of %d products",
                    used);
    }
    ddp_cuda_gemm_desc odd = g; /* the table is for an alignment of 16 bytes */
    odd.bias_grad = (char *)sums.at + 8;
    odd.m = 39;
    LAYER_TRY(bits_of(d, group, odd, c, &bits));
    for (size_t i = 39 * 8; i < bits.size(); i++) bits[i] = other[i] = plain[i];
    LAYER_TRY(bits_of(d, group, g, c, &other));
#define WRONG(changed, line, says)                                                                        \
    do {                                                                                                  \
        write_text(path, changed);                                                                        \
        LAYER_TRY(                                                                                        \
            refused(d, ddp_cuda_gemm_load(group, path.c_str(), &used), DDP_ERR_INVALID, line ": " says)); \
        LAYER_TRY(bits_of(d, group, g, c, &bits));                                                        \
        RANKS_CHECK(d->cpu, bits == other, "a wrong table replaced the one before");                      \
    } while (0)
    std::string product = text.substr(text.find("f64 "), text.find("end ") - text.find("f64 "));
    WRONG("", "line 0", "the line end is missing");
    WRONG("a table\n", "line 1", "the first line is not ddp_cuda_gemm 1");
    WRONG(text.substr(0, text.find("end ")), "line 4", "the line end is missing");
    WRONG(text.substr(0, text.size() - 1), "line 5", "the line is cut off");
    WRONG(text.substr(0, text.find("separate=")), "line 4", "the line is cut off");
    WRONG(text + "\n", "line 6", "text after the line end");
    WRONG(replaced(text, "end 1", "end 2"), "line 5", "it counts other products");
    WRONG(replaced(text, "end 1", "end 01"), "line 5", "it counts other products");
    WRONG(replaced(text, "chip ", "ship "), "line 2", "a product before");
    WRONG(replaced(text, text.substr(text.find("chip "), text.find("cublaslt ") - text.find("chip ")).c_str(),
                   ""),
          "line 2", "no version after a line chip");
    WRONG(replaced(text, "cublaslt 1", "cublaslt v"), "line 3", "no version after a line chip");
    WRONG(replaced(text, "cublaslt 130101\n", ""), "line 3", "a product before");
    WRONG(replaced(text, "end 1", (product + "end 2").c_str()), "line 5",
          "a product that an earlier line has");
    WRONG(replaced(text, "algo=", "algo=ffffffff"), "line 4", "no product");
    WRONG(replaced(text, "algo=0", "algo=f"), "line 4", "cuBLASLt refuses this algorithm");
    for (const char *change : {"f64 >f46 ",
                               "f64 >i8 ",
                               " nn > nx ",
                               " nn > nnn ",
                               "m=40>m=-40",
                               "m=40>m=0",
                               "m=40>m=040",
                               "m=40>m=99999999999999999999",
                               "k=300>k=0x12c",
                               "lda=300>lda=299",
                               "lda=300>lda=0",
                               "ldc=8>ldc= 8",
                               "=bias_grad>=bias_grab",
                               "=bias_grad>=none",
                               "addend=0>addend=2",
                               "tf32=0>tf32=2",
                               "align=8>align=12",
                               "align=8>align=32",
                               "align=8>align=0",
                               "separate=1>separate=2",
                               "algo=0>algo=g"}) {
        std::string from = change, to = from.substr(from.find('>') + 1);
        from.resize(from.find('>'));
        std::string changed = replaced(replaced(text, "align=16", "align=8"), from.c_str(), to.c_str());
        RANKS_CHECK(d->cpu, changed.find("not found") == std::string::npos, "%s", changed.c_str());
        WRONG(changed, "line 4", "no product as ddp_cuda_gemm_save writes it");
    }
    WRONG(replaced(text, "f64 ", (std::string(600, ' ') + "f64 ").c_str()), "line 4",
          "the line is cut off, or longer than 511");
    WRONG(std::string(text).insert(text.find("f64 "), 1, '\0'), "line 4", "the line is cut off");
#undef WRONG
    std::string foreign = text.substr(0, text.find("end ")) + "chip another GPU\ncublaslt 130101\n" + product
                          + "end 2\n";
    write_text(path, foreign); /* two sections */
    RANKS_OK(d->cpu, ddp_cuda_gemm_load(group, path.c_str(), &used));
    RANKS_CHECK(d->cpu, used == 1, "%d products of two GPUs", used);
    write_text(path, text);
    fake_lt_version++; /* another version of cuBLASLt */
    ddp_result loaded = ddp_cuda_gemm_load(group, path.c_str(), &used);
    fake_lt_version--;
    RANKS_OK(d->cpu, loaded);
    LAYER_TRY(bits_of(d, group, g, c, &bits));
    RANKS_CHECK(d->cpu, used == 0 && bits == plain, "%d products of another version", used);
    LAYER_TRY(refused(d, ddp_cuda_gemm_load(group, NULL, NULL), DDP_ERR_INVALID, "path is NULL"));
    LAYER_TRY(refused(d, ddp_cuda_gemm_load(NULL, path.c_str(), NULL), DDP_ERR_INVALID,
                      "gemm_load: the group has no"));
    LAYER_TRY(refused(d, ddp_cuda_gemm_load(group, "/missing/table", NULL), DDP_ERR_SYSTEM,
                      "/missing/table: No such"));
    LAYER_TRY(refused(d, ddp_cuda_gemm_save(group, "/missing/table", &g, algos, 1), DDP_ERR_SYSTEM,
                      "/missing/table: "));
    LAYER_TRY(
        refused(d, ddp_cuda_gemm_save(group, NULL, &g, algos, 1), DDP_ERR_INVALID, "path, descs or algos"));
    LAYER_TRY(
        refused(d, ddp_cuda_gemm_save(group, path.c_str(), &g, algos, 1025), DDP_ERR_INVALID, "count=1025"));
    LAYER_TRY(
        refused(d, ddp_cuda_gemm_save(d->cpu, path.c_str(), &g, algos, 1), DDP_ERR_INVALID, "has no GPUs"));
    LAYER_TRY(refused(d, ddp_cuda_gemm_algos(group, &g, algos, 0, &count), DDP_ERR_INVALID, "capacity=0"));
    g.n = -1;
    LAYER_TRY(refused(d, ddp_cuda_gemm_algos(group, &g, algos, 8, &count), DDP_ERR_INVALID,
                      "gemm_algos: m=40 n=-1"));
    LAYER_TRY(refused(d, ddp_cuda_gemm_save(group, path.c_str(), &g, algos, 1), DDP_ERR_INVALID,
                      "gemm_save: m=40"));
    RANKS_CHECK(d->cpu, read_text(path.c_str()) == text, "a refused table was written");
    remove(path.c_str());
    ddp_group_destroy(group);
    return DDP_OK;
}

/* Two ranks with different tables, or one without. */
static ddp_result tables_of_ranks(device_rank *d) {
    ddp_cuda_gemm_algo none = DDP_ZERO;
    int rank = ddp_rank(d->cpu);
    int64_t pid = getpid(); /* of rank 0 */
    RANKS_OK(d->cpu, ddp_broadcast(d->cpu, &pid, 1, DDP_I64, 0, NULL));
    std::string first = "/tmp/ddp_gemm_" + std::to_string((long)pid), second = first + "_1";
    if (rank == 0) {
        RANKS_OK(d->cpu, ddp_cuda_gemm_save(d->group, first.c_str(), NULL, &none, 0));
        write_text(second, replaced(read_text(first.c_str()), "cublaslt 1", "cublaslt 2"));
    }
    RANKS_OK(d->cpu, ddp_barrier(d->cpu));
    RANKS_OK(d->cpu, ddp_cuda_gemm_load(d->group, first.c_str(), NULL));
    const char *path = (rank == 0 ? first : second).c_str();
    LAYER_TRY(refused(d, ddp_cuda_gemm_load(d->group, path, NULL), DDP_ERR_MISMATCH, "table="));
    if (rank == 1) path = "/missing/table";
    LAYER_TRY(
        refused(d, ddp_cuda_gemm_load(d->group, path, NULL), DDP_ERR_SYSTEM, "/missing/table: No such file"));
    if (rank == 0) remove(first.c_str());
    if (rank == 0) remove(second.c_str());
    return DDP_OK;
}
#endif
#endif

#if defined(DDP_TEST_ON_CPU)
/* The nth call of a kind fails inside a layer, which returns the error; the next call is normal. */
static ddp_result failing(device_rank *d) {
    static const struct {
        const char *function;
        int nth, layer;
    } faults[] = {
        {"kernel", 1, 0}, {"kernel", 2, 0}, {"cudaMemsetAsync", 1, 0}, {"cudaMemcpyAsync", 1, 0},
        {"kernel", 1, 1}, {"kernel", 4, 1}, {"cudaMemcpyAsync", 1, 1},
    };
    static const int32_t targets[4] = {0, 1, 2, 1};
    ddp_tp_desc desc = DDP_ZERO;
    ddp_tp_layer_norm_desc norm_desc = DDP_ZERO;
    ddp_tp_loss_desc loss = DDP_ZERO;
    ddp_tp_layer_norm *norm;
    twin x, w, stats, dw, db;
    desc.max_rows = 4, norm_desc.channels = 3, loss.vocab = 3;
    place it = {d, NULL, NULL, desc, 0, 1, 4, 1, 0, {}, 0}, *p = &it;
    OK(ddp_tp_create(&p->far, d->group, &desc));
    OK(ddp_tp_layer_norm_create(&norm, p->far, &norm_desc));
    LAYER_TRY(take(p, &x, 12));
    LAYER_TRY(take(p, &w, 3));
    LAYER_TRY(take(p, &stats, 8));
    LAYER_TRY(take(p, &dw, 3));
    LAYER_TRY(take(p, &db, 3));
    for (size_t f = 0; f < sizeof faults / sizeof *faults; f++)
        for (int fails = 1; fails >= 0; fails--) {
            double mean;
            ddp_result result;
            if (fails) fake_fail(faults[f].function, -1, faults[f].nth, 0, 0);
            if (faults[f].layer)
                result = ddp_tp_cross_entropy(p->far, &loss, x.far, targets, 4, NULL, &mean, x.far);
            else
                result = ddp_tp_layer_norm_backward(norm, w.far, x.far, stats.far, x.far, 4, x.far, dw.far,
                                                    db.far);
            RANKS_CHECK(d->cpu, (result == DDP_ERR_ENGINE) == fails && (result == DDP_OK) != fails,
                        "%s %d: %s %s", faults[f].function, faults[f].nth, ddp_result_name(result),
                        ddp_last_error());
            RANKS_CHECK(d->cpu, !fails || fake_fault_fired(1), "%s was not called that many times",
                        faults[f].function);
        }
    ddp_tp_layer_norm_destroy(norm);
    ddp_tp_destroy(p->far);
    drop(p);
    return DDP_OK;
}

/* A step of one rank fails. Its error reaches the ranks that wait in the collective after that step; for a
   mean, before the value is used. */
static ddp_result failing_alone(device_rank *d) {
    static const int32_t words[4] = {0, 1, 2, 1};
    int last = ddp_world_size(d->cpu) - 1, device;
    void *memory;
    RANKS_CHECK(d->cpu, device_get(&device) == cudaSuccess, "no device");
    RANKS_OK(d->cpu, ddp_device_cuda()->alloc(NULL, 1 << 14, &memory));
    for (int turn = 0; turn < 4; turn++) {
        float *x = (float *)memory;
        int sums = turn == 3, fails = turn == 1 ? 2 : 1;
        double mean = -1;
        ddp_tp_desc desc = DDP_ZERO;
        ddp_tp_embedding_desc table = DDP_ZERO;
        ddp_tp_layer_norm_desc channels = DDP_ZERO;
        ddp_tp_loss_desc loss = DDP_ZERO;
        ddp_tp_embedding *embedding;
        ddp_tp_layer_norm *norm;
        ddp_group *group;
        ddp_tp *tp;
        ddp_result result;
        desc.max_rows = 4, desc.sequence_parallel = sums, table.vocab = table.channels = 4,
        channels.channels = 4, loss.vocab = 4;
        RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &group));
        RANKS_OK(d->cpu, ddp_tp_create(&tp, group, &desc));
        RANKS_OK(d->cpu, ddp_tp_embedding_create(&embedding, tp, &table));
        RANKS_OK(d->cpu, ddp_tp_layer_norm_create(&norm, tp, &channels));
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        if (ddp_rank(d->cpu) == last) fake_fail("kernel", device, fails, 0, 0);
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        if (turn < 2)
            result = ddp_tp_cross_entropy(tp, &loss, x, words, 4, NULL, &mean, x + 64);
        else if (turn == 2)
            result = ddp_tp_embedding_forward(embedding, x, words, 4, x + 64);
        else
            result = ddp_tp_layer_norm_backward(norm, x, x + 64, x + 128, x + 192, 1, x + 256, x + 320,
                                                x + 384);
        RANKS_CHECK(d->cpu, result != DDP_OK || (turn >= 2 && ddp_rank(d->cpu) != last),
                    "turn %d: a mean of %g", turn, mean);
        if (result == DDP_OK) result = ddp_barrier(group);
        RANKS_CHECK(d->cpu,
                    result == DDP_ERR_ENGINE
                        && strstr(ddp_last_error(), "ddp_device_cuda layer: cudaLaunchHostFunc"),
                    "turn %d: %s %s", turn, ddp_result_name(result), ddp_last_error());
        RANKS_OK(d->cpu, ddp_barrier(d->cpu));
        fake_fault_fired(1);
        ddp_tp_layer_norm_destroy(norm);
        ddp_tp_embedding_destroy(embedding);
        ddp_tp_destroy(tp);
        ddp_group_destroy(group);
    }
    ddp_device_cuda()->free(NULL, memory);
    return DDP_OK;
}
#endif

static ddp_result rank_main(ddp_group *world, void *user) {
    static const struct {
        ddp_dtype dtype;
        int sequence_parallel, chunks, accumulate, plain;
    } cases[] = {
        {DDP_F64, 0, 0, 0, 0}, {DDP_F64, 1, 3, 1, 1}, {DDP_F32, 1, 0, 0, 0},
        {DDP_F32, 0, 3, 1, 0}, {DDP_F32, 1, 0, 0, 0},
    };
    uint64_t digest[5];
    device_rank d;
    LAYER_TRY(device_rank_open(&d, world, 1 << 17));
    for (int i = 0; i < 5; i++) {
        ddp_tp_desc desc = DDP_ZERO;
        desc.dtype = cases[i].dtype, desc.max_rows = ROWS,
        desc.sequence_parallel = cases[i].sequence_parallel, desc.chunk_count = cases[i].chunks;
        desc.accumulate_grads = cases[i].accumulate, desc.gemm = cases[i].plain ? plain_gemm : NULL;
        RANKS_RUN(world, in_a_context(&d, &desc, &digest[i]));
    }
    RANKS_CHECK(world, digest[2] == digest[4], "other bits in a second run");
    RANKS_RUN(world, many_tokens(&d));
    RANKS_RUN(world, products(&d, plain_gemm));
#if defined(DDP_USE_CUBLASLT)
    RANKS_RUN(world, products(&d, gemm_of_group));
    if (ddp_world_size(world) == 1) {
        RANKS_RUN(world, epilogues(&d));
        RANKS_RUN(world, bad_products(&d));
    }
#if defined(DDP_TEST_ON_CPU)
    if (ddp_world_size(world) == 1) RANKS_RUN(world, tables(&d));
    if (ddp_world_size(world) == 2) RANKS_RUN(world, tables_of_ranks(&d));
#endif
#endif
#if defined(DDP_TEST_ON_CPU)
    if (ddp_world_size(world) == 1) RANKS_RUN(world, failing(&d));
    if (ddp_world_size(world) == 2) RANKS_RUN(world, failing_alone(&d));
#endif
    LAYER_TRY(device_rank_close(&d));
#if defined(DDP_TEST_ON_CPU) && defined(DDP_USE_CUBLASLT)
    RANKS_CHECK(world, fake_lt_handles == 0, "%d handles of cuBLASLt are left", fake_lt_handles);
#endif
    return device_ok(world, user);
}

int main(int argc, char **argv) { return device_each(argc, argv, rank_main); }

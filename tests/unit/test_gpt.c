/*  test_gpt.c - proves examples/gpt/gpt.h: its products, functions, gradients, announcements and determinism.

    The reference is a GPT in double precision, written as plainly as possible below. It checks the loss of
    gpt.h, and every kind of gradient against a central difference.

CONTENTS      (search for the tags)
    >>reference  >>math  >>gemm  >>parameters  >>gradients  >>announcements  >>determinism  >>generation
                                                            >>optimizer  >>main
*/
#include "../support/unit.h"
#include <pthread.h>

#include "../../examples/gpt/gpt.h"
#include "../support/adamw.h"

/* [-1, 1). */
static double uniform(uint64_t i) { return (double)(gpt_random(99, i) >> 11) / 9007199254740992.0 * 2 - 1; }

static float *floats(size_t n) {
    float *p = (float *)calloc(n + 1, sizeof(float));
    assert_non_null(p);
    return p;
}

static void fill(float *p, size_t n, uint64_t seed) {
    for (size_t i = 0; i < n; i++) p[i] = (float)uniform(seed * 1000003 + i);
}

static void assert_near(double got, double want, double tolerance, const char *what, int at) {
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s [%d]: got %.9g, want %.9g, tolerance %.2g", what, at, got, want, tolerance);
}

//== reference =========================================================================== >>reference

static void reference_norm(double *out, const double *x, const double *w, const double *b, int C) {
    double mean = 0, var = 0;
    for (int j = 0; j < C; j++) mean += x[j] / C;
    for (int j = 0; j < C; j++) var += (x[j] - mean) * (x[j] - mean) / C;
    for (int j = 0; j < C; j++) out[j] = (x[j] - mean) / sqrt(var + 1e-5) * w[j] + b[j];
}

static void reference_linear(double *out, const double *in, const double *w, const double *b, int C, int N) {
    for (int o = 0; o < N; o++) {
        out[o] = b ? b[o] : 0;
        for (int j = 0; j < C; j++) out[o] += in[j] * w[o * C + j];
    }
}

static double reference_gelu(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

/* The dropout of one sequence: probability and key; p = 0 is none. */
typedef struct reference_dropout {
    double p;
    uint64_t key;
} reference_dropout;

static double reference_factor(const reference_dropout *d, int place, int at) {
    uint64_t bits = d->p > 0 ? gpt_random(gpt_random(d->key, (uint64_t)place), (uint64_t)at) : 0;
    if (d->p == 0) return 1;
    return (double)(bits >> 40) / (1 << 24) < d->p ? 0 : 1 / (1 - d->p);
}

/* x (T, C) through one block; w holds the block's twelve tensors, the first of which is parameter `first` */
static void reference_block(double *x, double **w, int T, int C, int NH, const reference_dropout *drop,
                            int first) {
    int HS = C / NH;
    double *qkv = (double *)calloc((size_t)(T * 3 * C), sizeof(double)),
           *n = (double *)calloc((size_t)(9 * C + T), sizeof(double));
    double *y = n + C, *fc = y + C, *p = fc + 4 * C, *more = p + T;
    for (int t = 0; t < T; t++) {
        reference_norm(n, x + t * C, w[0], w[1], C);
        reference_linear(qkv + t * 3 * C, n, w[2], w[3], C, 3 * C);
    }
    for (int t = 0; t < T; t++) {
        for (int h = 0; h < NH; h++) {
            const double *q = qkv + t * 3 * C + h * HS;
            double sum = 0;
            for (int s = 0; s <= t; s++) {
                p[s] = 0;
                for (int j = 0; j < HS; j++) p[s] += q[j] * qkv[s * 3 * C + C + h * HS + j];
                p[s] = exp(p[s] / sqrt(HS));
                sum += p[s];
            }
            for (int j = 0; j < HS; j++) {
                y[h * HS + j] = 0;
                for (int s = 0; s <= t; s++)
                    y[h * HS + j] += p[s] / sum * reference_factor(drop, first + 2, (h * T + t) * T + s)
                                     * qkv[s * 3 * C + 2 * C + h * HS + j];
            }
        }
        reference_linear(more, y, w[4], w[5], C, C);
        for (int j = 0; j < C; j++) x[t * C + j] += more[j] * reference_factor(drop, first + 4, t * C + j);
        reference_norm(n, x + t * C, w[6], w[7], C);
        reference_linear(fc, n, w[8], w[9], C, 4 * C);
        for (int j = 0; j < 4 * C; j++) fc[j] = reference_gelu(fc[j]);
        reference_linear(more, fc, w[10], w[11], 4 * C, C);
        for (int j = 0; j < C; j++) x[t * C + j] += more[j] * reference_factor(drop, first + 10, t * C + j);
    }
    free(qkv);
    free(n);
}

/* Mean loss of one micro-batch; w is a table in the order of the parameter list. m has dropout and keys. */
static double reference_loss(const gpt_config *c, double **w, const int *tokens, const int *targets, int B,
                             int T, const gpt_model *m) {
    int C = c->channels, V = c->vocab, head = gpt_param_head(c);
    double *x = (double *)calloc((size_t)(T * C + C + V), sizeof(double)), *n = x + T * C, *logits = n + C,
           loss = 0;
    for (int b = 0; b < B; b++) {
        const reference_dropout drop = {m->dropout, m->keys ? m->keys[b] : 0};
        for (int i = 0; i < T * C; i++) {
            double embedding = w[0][tokens[b * T + i / C] * C + i % C] + w[1][i];
            x[i] = embedding * reference_factor(&drop, 0, i);
        }
        for (int l = 0; l < c->layers; l++) {
            int first = gpt_block_first_param(l);
            reference_block(x, w + first, T, C, c->heads, &drop, first);
        }
        for (int t = 0; t < T; t++) {
            double sum = 0;
            reference_norm(n, x + t * C, w[head - 2], w[head - 1], C);
            reference_linear(logits, n, w[head], NULL, C, V);
            for (int v = 0; v < V; v++) sum += exp(logits[v]);
            loss += log(sum) - logits[targets[b * T + t]];
        }
    }
    free(x);
    return loss / (B * T);
}

//== math ===================================================================================== >>math

static void test_exp_is_accurate(void **state) {
    double worst = 0;
    (void)state;
    for (int i = 0; i < 400000; i++) {
        float x = (float)((i < 200000 ? 87.0 : 1.0) * uniform((uint64_t)i)), got;
        double e = exp((double)x);
        got = gpt__exp(gpt__splat(x))[GPT_LANES - 1];
        if (fabs(got - e) / e > worst) worst = fabs(got - e) / e;
    }
    if (worst > 2e-7) fail_msg("relative error %.3g", worst);
    assert_true(gpt__exp(gpt__splat(0))[0] == 1.0f);
    assert_true(gpt__exp(gpt__splat(-1e30f))[0] < 1e-37f && gpt__exp(gpt__splat(-1e30f))[0] >= 0);
    assert_true(isfinite(gpt__exp(gpt__splat(1e30f))[0]));
    assert_true(isnan(gpt__exp(gpt__splat(NAN))[0]));
}

static void test_gelu_and_its_slope(void **state) {
    (void)state;
    for (int i = 0; i < 20000; i++) {
        float x = (float)(12 * uniform((uint64_t)i)), y, d = 1;
        double h = 1e-5, slope = (reference_gelu(x + h) - reference_gelu(x - h)) / (2 * h);
        gpt__gelu(&y, &x, 1);
        gpt__gelu_backward(&d, &x, 1);
        assert_near(y, reference_gelu(x), 3e-7 * fabs(x) + 1e-9, "gelu", i);
        assert_near(d, slope, 2e-6, "gelu'", i);
    }
}

//== gemm ===================================================================================== >>gemm

static void check_gemm(float *pack, int m, int n, int k, int ta, int tb, int with_bias, int with_add) {
    size_t row = (size_t)n + 3; /* C is wider than the product: the rest must stay */
    float *a = floats((size_t)m * (size_t)k), *b = floats((size_t)k * (size_t)n), *bias = floats((size_t)n);
    float *c = floats((size_t)m * row), *old = floats((size_t)m * row);
    fill(a, (size_t)m * (size_t)k, 1);
    fill(b, (size_t)k * (size_t)n, 2);
    fill(bias, (size_t)n, 3);
    fill(c, (size_t)m * row, 4);
    memcpy(old, c, sizeof(float) * (size_t)m * row);
    gpt_gemm(pack, m, n, k, ta ? gpt__matrix(a, 1, (size_t)m) : gpt__matrix(a, (size_t)k, 1),
             tb ? gpt__matrix(b, 1, (size_t)k) : gpt__matrix(b, (size_t)n, 1),
             gpt__output(c, row, with_bias ? bias : NULL, with_add ? c : NULL));
    for (int i = 0; i < m; i++)
        for (size_t j = 0; j < row; j++) {
            double want = 0;
            if (j >= (size_t)n) {
                assert_true(c[(size_t)i * row + j] == old[(size_t)i * row + j]);
                continue;
            }
            for (int p = 0; p < k; p++)
                want += (double)a[ta ? p * m + i : i * k + p] * b[tb ? (int)j * k + p : p * n + (int)j];
            want += (with_bias ? bias[j] : 0) + (with_add ? old[(size_t)i * row + j] : 0);
            assert_near(c[(size_t)i * row + j], want, 1e-6 * (k + 8), "gemm", i * n + (int)j);
        }
    free(a);
    free(b);
    free(bias);
    free(c);
    free(old);
}

static void test_gemm_against_plain_loops(void **state) {
    static const int sizes[][3] = {
        {1, 1, 1},     {1, 5, 3},      {2, 17, 4},    {4, 31, 7},     {5, 32, 8},    {6, 33, 9},
        {8, 16, 16},   {11, 48, 5},    {12, 64, 12},  {13, 65, 13},   {23, 95, 31},  {24, 96, 384},
        {25, 97, 385}, {37, 130, 300}, {241, 33, 17}, {250, 40, 800}, {3, 1030, 20}, {64, 1, 64},
    };
    float *pack = floats(GPT_PACK_A_FLOATS + GPT_PACK_B_FLOATS);
    (void)state;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int kind = 0; kind < 16; kind++)
            check_gemm(pack, sizes[s][0], sizes[s][1], sizes[s][2], kind & 1, kind >> 1 & 1, kind >> 2 & 1,
                       kind >> 3);
    free(pack);
}

//== parameters ========================================================================= >>parameters

static void test_parameter_list(void **state) {
    static const struct {
        int index;
        const char *name;
        int rows, columns, unit;
    } known[] = {
        {0, "wte", 256, 32, 0},
        {1, "wpe", 64, 32, 0},
        {2, "h.0.ln1.weight", 32, 1, 1},
        {16, "h.1.attn.qkv.weight", 96, 32, 2},
        {24, "h.1.mlp.proj.weight", 32, 128, 2},
        {35, "h.2.mlp.fc.bias", 128, 1, 3},
        {38, "ln_f.weight", 32, 1, 4},
        {39, "ln_f.bias", 32, 1, 4},
        {40, "head.weight", 256, 32, 4},
    };
    gpt_config c = {256, 64, 3, 4, 32};
    gpt_param p;
    int64_t total = 0;
    (void)state;
    assert_int_equal(gpt_param_count(&c), 2 + 36 + 3);
    assert_int_equal(gpt_param_info(&c, -1, &p), -1);
    assert_int_equal(gpt_param_info(&c, 41, &p), -1);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_int_equal(gpt_param_info(&c, known[i].index, &p), 0);
        assert_string_equal(p.name, known[i].name);
        assert_int_equal(p.ndim, known[i].columns > 1 ? 2 : 1);
        assert_int_equal(p.shape[0], known[i].rows);
        assert_int_equal(p.shape[1], known[i].columns);
        assert_int_equal(p.unit, known[i].unit);
    }
    assert_int_equal(gpt_param_info(&c, 40, &p), 0);
    assert_int_equal(p.tied_to, 0);
    assert_int_equal(gpt_param_head(&c), 40);
    for (int i = 0; i < 40; i++) {
        gpt_param_info(&c, i, &p);
        assert_int_equal(p.tied_to, -1);
        assert_int_equal(p.count, p.shape[0] * p.shape[1]);
        total += p.count;
    }
    assert_int_equal(total, 256 * 32 + 64 * 32 + 3 * (12 * 32 * 32 + 13 * 32) + 2 * 32);
    c.heads = 5;
    assert_non_null(gpt_config_check(&c));
}

static void test_shards_are_initialised_like_the_whole(void **state) {
    gpt_config c = {64, 32, 2, 2, 64};
    (void)state;
    for (int i = 0; i < gpt_param_count(&c); i++) {
        gpt_param p;
        float *whole, *parts, *other;
        double sum = 0, square = 0;
        gpt_param_info(&c, i, &p);
        whole = floats((size_t)p.count);
        parts = floats((size_t)p.count);
        other = floats((size_t)p.count);
        gpt_param_init(&c, 5, i, 0, p.count, whole);
        for (int64_t at = 0; at < p.count; at += 37)
            gpt_param_init(&c, 5, i, at, p.count - at < 37 ? p.count - at : 37, parts + at);
        assert_memory_equal(whole, parts, sizeof(float) * (size_t)p.count);
        gpt_param_init(&c, 6, i, 0, p.count, other);
        for (int64_t j = 0; j < p.count; j++) {
            sum += whole[j];
            square += (double)whole[j] * whole[j];
        }
        if (p.deviation > 0) {
            assert_true(memcmp(whole, other, sizeof(float) * (size_t)p.count) != 0);
            assert_near(sum / (double)p.count, 0, 5 * p.deviation / sqrt((double)p.count), p.name, i);
            assert_near(sqrt(square / (double)p.count), p.deviation, 0.1 * p.deviation, p.name, i);
        } else
            assert_near(sum / (double)p.count, p.constant, 0, p.name, i);
        free(whole);
        free(parts);
        free(other);
    }
}

//== gradients =========================================================================== >>gradients

/* A model with values large enough that every path matters, and a batch of text for it. */
typedef struct fixture {
    gpt_model model;
    int B, T, *tokens, *targets;
} fixture;

static void fixture_create(fixture *f, int V, int context, int layers, int heads, int C, int B, int T) {
    gpt_config c;
    c.vocab = V;
    c.context = context;
    c.layers = layers;
    c.heads = heads;
    c.channels = C;
    assert_int_equal(gpt_model_create(&f->model, &c, B, GPT_OWN_VALUES | GPT_OWN_GRADS), 0);
    gpt_model_init(&f->model, 3);
    for (int i = 0; i + 1 < f->model.param_count; i++) {
        gpt_param p;
        gpt_param_info(&c, i, &p);
        for (int64_t j = 0; j < p.count; j++)
            f->model.values[i][j] += 0.25f * (float)uniform((uint64_t)(i * 100000 + j));
    }
    f->B = B;
    f->T = T;
    f->tokens = (int *)calloc((size_t)(B * T), sizeof(int));
    f->targets = (int *)calloc((size_t)(B * T), sizeof(int));
    for (int i = 0; i < B * T; i++) {
        f->tokens[i] = (int)(gpt_random(1, (uint64_t)i) % (uint64_t)V);
        f->targets[i] = (int)(gpt_random(2, (uint64_t)i) % (uint64_t)V);
    }
}

static void fixture_destroy(fixture *f) {
    gpt_model_destroy(&f->model);
    free(f->tokens);
    free(f->targets);
}

/* Every gradient tensor against central differences of the reference, at samples elements each. */
static void check_gradients(fixture *f, int samples) {
    const gpt_config *c = &f->model.config;
    int count = f->model.param_count, head = count - 1;
    double **w = (double **)calloc((size_t)count, sizeof *w), loss;
    for (int i = 0; i < head; i++) {
        gpt_param p;
        gpt_param_info(c, i, &p);
        w[i] = (double *)calloc((size_t)p.count, sizeof(double));
        for (int64_t j = 0; j < p.count; j++) w[i][j] = f->model.values[i][j];
    }
    w[head] = w[0];
    loss = gpt_model_forward_backward(&f->model, f->tokens, f->targets, f->B, f->T, NULL, NULL);
    assert_near(loss, reference_loss(c, w, f->tokens, f->targets, f->B, f->T, &f->model), 2e-6, "loss", 0);
    if (f->model.dropout == 0)
        assert_near(gpt_model_forward(&f->model, f->tokens, f->targets, f->B, f->T), loss, 0, "forward only",
                    0);
    for (int i = 0; i < head; i++) {
        gpt_param p;
        float *g = f->model.grads[i], *tied = i == 0 ? f->model.grads[head] : NULL;
        double rms = 0;
        gpt_param_info(c, i, &p);
        for (int64_t j = 0; j < p.count; j++) rms += (double)g[j] * g[j] / (double)p.count;
        for (int s = 0; s < samples; s++) {
            int64_t j = (int64_t)(gpt_random(17, (uint64_t)(i * 1000 + s)) % (uint64_t)p.count);
            double keep = w[i][j], h = 1e-4, up, down, slope;
            w[i][j] = keep + h;
            up = reference_loss(c, w, f->tokens, f->targets, f->B, f->T, &f->model);
            w[i][j] = keep - h;
            down = reference_loss(c, w, f->tokens, f->targets, f->B, f->T, &f->model);
            w[i][j] = keep;
            slope = (up - down) / (2 * h);
            assert_near(g[j] + (tied ? tied[j] : 0), slope, 1e-5 * sqrt(rms) + 2e-5 * fabs(slope) + 1e-7,
                        p.name, (int)j);
        }
    }
    for (int i = 0; i < head; i++) free(w[i]);
    free(w);
}

static void test_gradients_of_every_parameter(void **state) {
    fixture f;
    (void)state;
    fixture_create(&f, 11, 9, 2, 2, 10, 2, 7); /* head size 5: nothing divides a vector */
    check_gradients(&f, 30);
    fixture_destroy(&f);
    fixture_create(&f, 37, 8, 1, 2, 64, 3, 8); /* full tiles and odd ones */
    check_gradients(&f, 12);
    fixture_destroy(&f);
    fixture_create(&f, 5, 3, 0, 1, 8, 2, 3); /* no block at all */
    check_gradients(&f, 12);
    fixture_destroy(&f);
}

static void test_gradients_of_long_attention(void **state) {
    fixture f;
    (void)state;
    fixture_create(&f, 13, 160, 1, 2, 24, 2, 150); /* three blocks of queries, the last one short */
    check_gradients(&f, 3);
    fixture_destroy(&f);
}

/* The masks are those of the reference, in forward and in backward. */
static void test_gradients_with_dropout(void **state) {
    const uint64_t keys[3] = {7, 8, 9};
    fixture f;
    (void)state;
    fixture_create(&f, 11, 9, 2, 2, 10, 3, 9);
    f.model.dropout = 0.25f;
    f.model.keys = keys;
    check_gradients(&f, 20);
    fixture_destroy(&f);
    fixture_create(&f, 13, 160, 1, 2, 24, 1, 150); /* three blocks of queries */
    f.model.dropout = 0.5f;
    f.model.keys = keys;
    check_gradients(&f, 2);
    fixture_destroy(&f);
}

/* The elements of x (B, T, C) that are 0. */
static int count_zeros(const float *x, size_t n) {
    int zeros = 0;
    for (size_t i = 0; i < n; i++) zeros += x[i] == 0;
    return zeros;
}

static void test_dropout_share_scale_and_keys(void **state) {
    enum { T = 64, C = 32, N = T * C };
    static const float shares[] = {0.1f, 0.5f, 0.9f};
    const uint64_t keys[2] = {7, 8}, swapped[2] = {8, 7};
    float *ones = floats(2 * N), *a = floats(2 * N), *b = floats(2 * N);
    gpt_config c = {16, T, 1, 2, C};
    gpt_pass pass;
    (void)state;
    memset(&pass, 0, sizeof pass);
    pass.config = &c;
    pass.batch = 2;
    pass.length = T;
    for (int i = 0; i < 2 * N; i++) ones[i] = 1;
    for (int k = 0; k < 3; k++) {
        double share = shares[k], deviation = sqrt(share * (1 - share) * 2 * N);
        pass.dropout = shares[k];
        pass.keys = keys;
        gpt__dropout(&pass, 3, a, ones, NULL);
        assert_near(count_zeros(a, 2 * N), share * 2 * N, 4 * deviation, "zeros", k);
        for (int i = 0; i < 2 * N; i++)
            if (a[i] != 0) assert_near(a[i], 1 / (1 - share), 1e-6 / (1 - share), "scale", i);
        gpt__dropout(&pass, 3, b, ones, ones); /* the same masks, and a sum */
        for (int i = 0; i < 2 * N; i++) assert_near(b[i], a[i] + 1, 0, "sum", i);
        gpt__dropout(&pass, 4, b, ones, NULL);
        assert_true(memcmp(a, b, 2 * N * sizeof(float)) != 0); /* another place */
        assert_true(memcmp(a, a + N, N * sizeof(float)) != 0); /* another key */
        pass.keys = swapped;
        gpt__dropout(&pass, 3, b, ones, NULL);
        assert_memory_equal(a, b + N, N * sizeof(float)); /* the key decides, not the row of the batch */
        assert_memory_equal(a + N, b, N * sizeof(float));
    }
    free(ones);
    free(a);
    free(b);
}

static void test_gradients_accumulate(void **state) {
    fixture f;
    float **once;
    (void)state;
    fixture_create(&f, 20, 16, 2, 2, 24, 2, 16);
    once = (float **)calloc((size_t)f.model.param_count, sizeof *once);
    gpt_model_forward_backward(&f.model, f.tokens, f.targets, f.B, f.T, NULL, NULL);
    for (int i = 0; i < f.model.param_count; i++) {
        gpt_param p;
        gpt_param_info(&f.model.config, i, &p);
        once[i] = floats((size_t)p.count);
        memcpy(once[i], f.model.grads[i], sizeof(float) * (size_t)p.count);
    }
    f.model.accumulate = 1;
    gpt_model_forward_backward(&f.model, f.tokens, f.targets, f.B, f.T, NULL, NULL);
    for (int i = 0; i < f.model.param_count; i++) {
        gpt_param p;
        gpt_param_info(&f.model.config, i, &p);
        for (int64_t j = 0; j < p.count; j++)
            assert_near(f.model.grads[i][j], 2 * once[i][j], 1e-6 + 1e-5 * fabsf(once[i][j]), p.name, (int)j);
        free(once[i]);
    }
    free(once);
    fixture_destroy(&f);
}

/* Input gradients first and weight gradients later, as pipeline schedules do, give the bits of one call. */
static void check_two_parts(float dropout) {
    const uint64_t keys[2] = {7, 8};
    fixture f;
    gpt_pass pass;
    gpt_block w, g;
    float *d_out, *d_in, *both, *first[GPT_BLOCK_PARAMS];
    size_t n;
    fixture_create(&f, 20, 16, 1, 2, 24, 2, 16);
    f.model.dropout = dropout;
    f.model.keys = keys;
    n = (size_t)(2 * 16 * 24);
    d_out = floats(n);
    d_in = floats(n);
    both = floats(n);
    fill(d_out, n, 8);
    gpt_model_forward_backward(&f.model, f.tokens, f.targets, f.B, f.T, NULL, NULL);
    pass = gpt_model_train_pass(&f.model, f.B, f.T);
    w = gpt_block_view(f.model.values, 0);
    g = gpt_block_view(f.model.grads, 0);
    gpt_block_backward(&pass, &w, &g, f.model.stream, &f.model.blocks[0], &f.model.temps, d_out, both);
    for (int i = 0; i < GPT_BLOCK_PARAMS; i++) {
        gpt_param p;
        gpt_param_info(&f.model.config, 2 + i, &p);
        first[i] = floats((size_t)p.count);
        memcpy(first[i], f.model.grads[2 + i], sizeof(float) * (size_t)p.count);
        memset(f.model.grads[2 + i], 0xff, sizeof(float) * (size_t)p.count);
    }
    pass.parts = GPT_INPUT_GRADS;
    gpt_block_backward(&pass, &w, &g, f.model.stream, &f.model.blocks[0], &f.model.temps, d_out, d_in);
    assert_memory_equal(d_in, both, sizeof(float) * n);
    pass.parts = GPT_WEIGHT_GRADS;
    gpt_block_backward(&pass, &w, &g, f.model.stream, &f.model.blocks[0], &f.model.temps, d_out, NULL);
    for (int i = 0; i < GPT_BLOCK_PARAMS; i++) {
        gpt_param p;
        gpt_param_info(&f.model.config, 2 + i, &p);
        assert_memory_equal(first[i], f.model.grads[2 + i], sizeof(float) * (size_t)p.count);
        free(first[i]);
    }
    free(d_out);
    free(d_in);
    free(both);
    fixture_destroy(&f);
}

static void test_block_backward_in_two_parts(void **state) {
    (void)state;
    check_two_parts(0);
    check_two_parts(0.25f);
}

/* Training has dropout, and so has a recomputed forward; evaluation and generation have none. */
static void test_dropout_is_only_in_training(void **state) {
    const uint64_t keys[2] = {7, 8};
    fixture f[2];
    double loss, training;
    float *logits = floats(20);
    (void)state;
    for (int i = 0; i < 2; i++) fixture_create(&f[i], 20, 16, 2, 2, 24, 2, 16);
    gpt_model_destroy(&f[1].model);
    assert_int_equal(gpt_model_create(&f[1].model, &f[0].model.config, 2, GPT_OWN_GRADS | GPT_RECOMPUTE), 0);
    memcpy(f[1].model.values, f[0].model.values, (size_t)f[0].model.param_count * sizeof(float *));
    loss = gpt_model_forward(&f[0].model, f[0].tokens, f[0].targets, 2, 16);
    memcpy(logits, gpt_model_logits(&f[0].model, f[0].tokens, 0, 16), 20 * sizeof(float));
    for (int i = 0; i < 2; i++) {
        f[i].model.dropout = 0.5f;
        f[i].model.keys = keys;
    }
    assert_true(gpt_model_forward(&f[0].model, f[0].tokens, f[0].targets, 2, 16) == loss);
    assert_memory_equal(gpt_model_logits(&f[0].model, f[0].tokens, 0, 16), logits, 20 * sizeof(float));
    training = gpt_model_forward_backward(&f[0].model, f[0].tokens, f[0].targets, 2, 16, NULL, NULL);
    assert_true(training != loss);
    assert_true(gpt_model_forward_backward(&f[1].model, f[0].tokens, f[0].targets, 2, 16, NULL, NULL)
                == training);
    for (int i = 0; i < f[0].model.param_count; i++) {
        gpt_param p;
        gpt_param_info(&f[0].model.config, i, &p);
        assert_memory_equal(f[0].model.grads[i], f[1].model.grads[i], sizeof(float) * (size_t)p.count);
    }
    free(logits);
    for (int i = 0; i < 2; i++) fixture_destroy(&f[i]);
}

//== announcements =================================================================== >>announcements

typedef struct listener {
    fixture *f;
    int order[64], calls;
    float *snapshot[64];
} listener;

static void listen_ready(void *user, int index) {
    listener *l = (listener *)user;
    gpt_param p;
    assert_int_equal(gpt_param_info(&l->f->model.config, index, &p), 0);
    assert_null(l->snapshot[index]); /* once */
    l->snapshot[index] = floats((size_t)p.count);
    memcpy(l->snapshot[index], l->f->model.grads[index], sizeof(float) * (size_t)p.count);
    l->order[l->calls++] = index;
}

static void test_each_gradient_is_announced_once_and_final(void **state) {
    fixture f;
    listener l;
    int unit = 3;
    (void)state;
    memset(&l, 0, sizeof l);
    fixture_create(&f, 20, 16, 2, 2, 24, 2, 16);
    l.f = &f;
    for (int i = 0; i < f.model.param_count; i++) { /* leftovers of an earlier step must not show */
        gpt_param p;
        gpt_param_info(&f.model.config, i, &p);
        memset(f.model.grads[i], 0xff, sizeof(float) * (size_t)p.count);
    }
    gpt_model_forward_backward(&f.model, f.tokens, f.targets, f.B, f.T, listen_ready, &l);
    assert_int_equal(l.calls, f.model.param_count);
    assert_int_equal(l.order[0], gpt_param_head(&f.model.config));
    for (int i = 0; i < l.calls; i++) {
        gpt_param p;
        int index = l.order[i];
        gpt_param_info(&f.model.config, index, &p);
        assert_true(p.unit <= unit); /* from the head down */
        unit = p.unit;
        assert_memory_equal(l.snapshot[index], f.model.grads[index], sizeof(float) * (size_t)p.count);
        for (int64_t j = 0; j < p.count; j++) assert_true(isfinite(f.model.grads[index][j]));
        free(l.snapshot[index]);
    }
    fixture_destroy(&f);
}

static void test_tied_matrix_has_two_gradients(void **state) {
    fixture f;
    int head, used = 0, unused = 0;
    (void)state;
    fixture_create(&f, 50, 8, 1, 2, 24, 1, 8);
    head = gpt_param_head(&f.model.config);
    assert_ptr_equal(f.model.values[0], f.model.values[head]);
    assert_ptr_not_equal(f.model.grads[0], f.model.grads[head]);
    gpt_model_forward_backward(&f.model, f.tokens, f.targets, f.B, f.T, NULL, NULL);
    /* The use in the embedding changes only the rows of its tokens, that in the head all rows. */
    for (int v = 0; v < 50; v++) {
        int seen = 0;
        double embed = 0, out = 0;
        for (int i = 0; i < 8; i++) seen |= f.tokens[i] == v;
        for (int j = 0; j < 24; j++) {
            embed += fabsf(f.model.grads[0][v * 24 + j]);
            out += fabsf(f.model.grads[head][v * 24 + j]);
        }
        assert_true((embed > 0) == seen);
        assert_true(out > 0);
        used += seen;
        unused += !seen;
    }
    assert_true(used && unused);
    fixture_destroy(&f);
}

//== determinism ======================================================================= >>determinism

/* Gradients and values anywhere in memory, with other models between them: the same bits. */
static void test_same_bits_wherever_the_memory_is(void **state) {
    fixture a, b;
    gpt_model loose;
    double loss;
    (void)state;
    fixture_create(&a, 64, 70, 2, 2, 40, 2, 70);
    fixture_create(&b, 30, 12, 1, 1, 16, 1, 12);
    assert_int_equal(gpt_model_create(&loose, &a.model.config, 5, 0), 0);
    loss = gpt_model_forward_backward(&a.model, a.tokens, a.targets, 2, 70, NULL, NULL);
    gpt_model_forward_backward(&b.model, b.tokens, b.targets, 1, 12, NULL, NULL);
    for (int i = 0; i < loose.param_count; i++) {
        gpt_param p;
        gpt_param_info(&loose.config, i, &p);
        loose.values[i] = a.model.values[i];
        loose.grads[i] = floats((size_t)p.count + 3) + i % 3; /* not aligned */
    }
    assert_true(gpt_model_forward_backward(&loose, a.tokens, a.targets, 2, 70, NULL, NULL) == loss);
    for (int i = 0; i < loose.param_count; i++) {
        gpt_param p;
        gpt_param_info(&loose.config, i, &p);
        assert_memory_equal(loose.grads[i], a.model.grads[i], sizeof(float) * (size_t)p.count);
        free(loose.grads[i] - i % 3);
    }
    gpt_model_destroy(&loose);
    fixture_destroy(&a);
    fixture_destroy(&b);
}

static void *train_a_step(void *user) {
    fixture *f = (fixture *)user;
    gpt_model_forward_backward(&f->model, f->tokens, f->targets, f->B, f->T, NULL, NULL);
    return NULL;
}

/* Ranks can be threads of one process: two models at work at once do not affect each other. */
static void test_same_bits_in_two_threads(void **state) {
    fixture f[3];
    pthread_t thread[2];
    (void)state;
    for (int i = 0; i < 3; i++) fixture_create(&f[i], 64, 70, 2, 2, 40, 2, 70);
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&thread[i], NULL, train_a_step, &f[i]), 0);
    for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
    train_a_step(&f[2]);
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < f[2].model.param_count; i++) {
            gpt_param p;
            gpt_param_info(&f[2].model.config, i, &p);
            assert_memory_equal(f[t].model.grads[i], f[2].model.grads[i], sizeof(float) * (size_t)p.count);
        }
    for (int i = 0; i < 3; i++) fixture_destroy(&f[i]);
}

#ifndef GPT_USE_CBLAS
/* A sequence has the same losses by itself, in a batch, and shortened. */
static void test_losses_do_not_depend_on_neighbours(void **state) {
    fixture f;
    float losses[3 * 70];
    (void)state;
    fixture_create(&f, 64, 70, 2, 2, 40, 3, 70);
    gpt_model_forward(&f.model, f.tokens, f.targets, 3, 70);
    memcpy(losses, f.model.head.losses, sizeof losses);
    for (int b = 0; b < 3; b++) {
        gpt_model_forward(&f.model, f.tokens + b * 70, f.targets + b * 70, 1, 70);
        assert_memory_equal(losses + b * 70, f.model.head.losses, sizeof(float) * 70);
        gpt_model_forward(&f.model, f.tokens + b * 70, f.targets + b * 70, 1, 33);
        assert_memory_equal(losses + b * 70, f.model.head.losses, sizeof(float) * 33);
    }
    fixture_destroy(&f);
}
#endif

//== generation ========================================================================= >>generation

static void test_incremental_logits_are_those_of_the_whole(void **state) {
    fixture f;
    float whole[29];
    int text[80], again[80];
    (void)state;
    fixture_create(&f, 29, 70, 2, 2, 40, 1, 70);
    memcpy(whole, gpt_model_logits(&f.model, f.tokens, 0, 70), sizeof whole);
    for (int step = 1; step < 70; step = step * 2 + 1) {
        const float *logits = NULL;
        for (int done = 0; done < 70; done += step)
            logits = gpt_model_logits(&f.model, f.tokens, done, done + step < 70 ? done + step : 70);
        for (int i = 0; i < 29; i++) assert_near(logits[i], whole[i], 1e-4, "logit", i);
#ifndef GPT_USE_CBLAS
        assert_memory_equal(logits, whole, sizeof whole);
#endif
    }
    text[0] = again[0] = 1;
    gpt_generate(&f.model, text, 1, 80, 1.0f, 4); /* past the end of the context */
    gpt_generate(&f.model, again, 1, 80, 1.0f, 4);
    assert_memory_equal(text, again, sizeof text);
    for (int i = 0; i < 80; i++) assert_in_range(text[i], 0, 28);
    gpt_generate(&f.model, again, 1, 80, 1.0f, 5);
    assert_true(memcmp(text, again, sizeof text) != 0);
    fixture_destroy(&f);
}

static void test_sampling_follows_the_distribution(void **state) {
    float logits[3] = {0, 1.0986123f, -100}; /* 1/4, 3/4, 0 */
    int seen[3] = {0, 0, 0};
    (void)state;
    for (int i = 0; i < 1000; i++) seen[gpt_sample(logits, 3, 1.0f, i / 1000.0)]++;
    assert_in_range(seen[0], 248, 252);
    assert_int_equal(seen[0] + seen[1], 1000);
    assert_int_equal(gpt_sample(logits, 3, 0, 0.01), 1);
}

//== training ============================================================================ >>training

/* All parts together: a small model memorizes a repeating text. */
static void test_training_learns(void **state) {
    fixture f;
    float *m[64], *v[64];
    double loss = 0;
    (void)state;
    fixture_create(&f, 12, 32, 1, 2, 32, 2, 32);
    gpt_model_init(&f.model, 1);
    for (int i = 0; i < 64; i++) {
        f.tokens[i] = i * i % 12;
        f.targets[i] = (i + 1) * (i + 1) % 12;
    }
    for (int i = 0; i < f.model.param_count; i++) {
        gpt_param p;
        gpt_param_info(&f.model.config, i, &p);
        m[i] = floats((size_t)p.count);
        v[i] = floats((size_t)p.count);
    }
    for (int step = 1; step <= 60; step++) {
        int head = f.model.param_count - 1;
        loss = gpt_model_forward_backward(&f.model, f.tokens, f.targets, 2, 32, NULL, NULL);
        if (step == 1) assert_near(loss, log(12), 0.1, "loss at the start", 0);
        for (int j = 0; j < 12 * 32; j++) f.model.grads[0][j] += f.model.grads[head][j];
        for (int i = 0; i < head; i++) {
            gpt_param p;
            gpt_param_info(&f.model.config, i, &p);
            adamw(f.model.values[i], f.model.grads[i], m[i], v[i], (size_t)p.count, 1e-2f, 0.9f, 0.95f, 1e-8f,
                  0.0f, step);
        }
    }
    assert_true(loss < 0.1);
    for (int i = 0; i < f.model.param_count; i++) {
        free(m[i]);
        free(v[i]);
    }
    fixture_destroy(&f);
}

//== main ===================================================================================== >>main

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp_is_accurate),
        cmocka_unit_test(test_gelu_and_its_slope),
        cmocka_unit_test(test_gemm_against_plain_loops),
        cmocka_unit_test(test_parameter_list),
        cmocka_unit_test(test_shards_are_initialised_like_the_whole),
        cmocka_unit_test(test_gradients_of_every_parameter),
        cmocka_unit_test(test_gradients_of_long_attention),
        cmocka_unit_test(test_gradients_with_dropout),
        cmocka_unit_test(test_dropout_share_scale_and_keys),
        cmocka_unit_test(test_gradients_accumulate),
        cmocka_unit_test(test_block_backward_in_two_parts),
        cmocka_unit_test(test_dropout_is_only_in_training),
        cmocka_unit_test(test_each_gradient_is_announced_once_and_final),
        cmocka_unit_test(test_tied_matrix_has_two_gradients),
        cmocka_unit_test(test_same_bits_wherever_the_memory_is),
        cmocka_unit_test(test_same_bits_in_two_threads),
#ifndef GPT_USE_CBLAS
        cmocka_unit_test(test_losses_do_not_depend_on_neighbours),
#endif
        cmocka_unit_test(test_incremental_logits_are_those_of_the_whole),
        cmocka_unit_test(test_sampling_follows_the_distribution),
        cmocka_unit_test(test_training_learns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

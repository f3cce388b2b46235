/*  test_gpt.cu - examples/gpt/gpt_cuda.cuh: each kernel against a plain loop, each unit and ten steps of training
    against gpt.h on the CPU. Recomputation, graphs of units and of micro-batches, slots and tensor
    parallelism change only what they must.

    test_gpt processes|threads [W ...]     1 rank runs all except tensor parallelism, 2 and more only that.
                                           Built with -DDDP_TEST_ON_CPU it runs on the fake GPU, as
                                           test_conformance.cu; the same rank count again runs with another
                                           seed, and must give the same bits. */
#include "../support/device.h"
#if defined(DDP_TEST_ON_CPU)
#include "../support/fake_cuda_names.h"
#include "../support/fake_kernel.h"
#endif
#include "../../examples/gpt/gpt_cuda.cuh"
#include "../support/adamw.h"
#include <map>
#include <string>
#include <vector>

typedef std::vector<float> floats;
#if defined(DDP_TEST_ON_CPU)
#define NEAR_F32 1e-5 /* of the largest element: sums in another order */
#else
#define NEAR_F32 1e-4 /* and fast exponentials */
#endif
#define GPT_TRY(call)                      \
    do {                                   \
        ddp_result tried = (call);         \
        if (tried != DDP_OK) return tried; \
    } while (0)

static float number(uint64_t seed, uint64_t i) {
    return (float)((double)(ranks_mix(seed * 1000003 + i) >> 40) / 8388608.0 - 1);
}
static floats numbers(uint64_t seed, size_t count, float size) {
    floats x(count);
    for (size_t i = 0; i < count; i++) x[i] = size * number(seed, i);
    return x;
}

/* Numbers of a 16-bit dtype. */
static uint16_t half_of(ddp_dtype dtype, float x) {
    return dtype == DDP_F16 ? gpt_cuda_round_f16(x).bits : gpt_cuda_round_bf16(x).bits;
}
static float float_of(ddp_dtype dtype, uint16_t bits) {
    gpt_f16 f16 = {bits};
    gpt_bf16 bf16 = {bits};
    return dtype == DDP_F16 ? gpt_cuda_to_float(f16) : gpt_cuda_to_float(bf16);
}

/* Device memory of one dtype, freed with the scope. */
struct far_memory {
    device_rank *d;
    ddp_dtype dtype;
    std::vector<void *> kept;
    far_memory(device_rank *rank, ddp_dtype type) : d(rank), dtype(type) {}
    ~far_memory() {
        for (void *memory : kept) ddp_device_cuda()->free(NULL, memory);
    }
    size_t size() const { return dtype == DDP_F32 ? 4 : 2; }
    void *take(size_t bytes) {
        void *memory = NULL;
        if (ddp_device_cuda()->alloc(NULL, bytes + 16, &memory) == DDP_OK) kept.push_back(memory);
        return memory;
    }
    void *take_rows(size_t count) { return take(count * size()); }
    void put(void *to, const floats &x) {
        std::vector<uint16_t> half(x.size());
        for (size_t i = 0; i < x.size(); i++) half[i] = half_of(dtype, x[i]);
        ddp_device_cuda()->copy(to, dtype == DDP_F32 ? (const void *)x.data() : half.data(),
                                x.size() * size());
    }
    void *up(const floats &x) {
        void *to = take_rows(x.size());
        if (to) put(to, x);
        return to;
    }
    void *bytes(const void *data, size_t bytes) {
        void *to = take(bytes);
        if (to) ddp_device_cuda()->copy(to, data, bytes);
        return to;
    }
    floats down(const void *from, size_t count) const {
        floats x(count);
        std::vector<uint16_t> half(count);
        ddp_device_cuda()->copy(dtype == DDP_F32 ? (void *)x.data() : half.data(), from, count * size());
        for (size_t i = 0; i < count && dtype != DDP_F32; i++) x[i] = float_of(dtype, half[i]);
        return x;
    }
    floats down_f32(const void *from, size_t count) const {
        floats x(count);
        ddp_device_cuda()->copy(x.data(), from, count * 4);
        return x;
    }
    void round(floats &x) const {
        for (float &v : x)
            if (dtype != DDP_F32) v = float_of(dtype, half_of(dtype, v));
    }
    floats some(uint64_t seed, size_t count, float scale = 1) const {
        floats x = numbers(seed, count, scale);
        round(x);
        return x;
    }
};

static std::string named(const char *what, int unit) { return what + std::to_string(unit); }

/* All of have within tolerance of want, relative to want's largest. */
static ddp_result near(const far_memory &f, const char *what, const floats &have, const floats &want,
                       double tolerance) {
    double largest = 1e-6;
    RANKS_CHECK(f.d->cpu, have.size() == want.size(), "%s: %zu elements for %zu", what, have.size(),
                want.size());
    for (float x : want) largest = fabs(x) > largest ? fabs(x) : largest;
    for (size_t i = 0; i < want.size(); i++)
        RANKS_CHECK(f.d->cpu, fabs((double)have[i] - want[i]) <= tolerance * largest,
                    "%s, %s: element %zu of %zu is %.9g and should be %.9g, the largest being %g", what,
                    ddp_dtype_name(f.dtype), i, want.size(), have[i], want[i], largest);
    return DDP_OK;
}

static ddp_result same(const far_memory &f, const char *what, const floats &have, const floats &want) {
    RANKS_CHECK(f.d->cpu, have.size() == want.size(), "%s: %zu elements for %zu", what, have.size(),
                want.size());
    for (size_t i = 0; i < want.size(); i++)
        RANKS_CHECK(f.d->cpu, memcmp(&have[i], &want[i], 4) == 0,
                    "%s, %s: element %zu of %zu is %.9g and should be %.9g to the bit", what,
                    ddp_dtype_name(f.dtype), i, want.size(), have[i], want[i]);
    return DDP_OK;
}

/* Results that must have the same bits in every run, with every seed. */
static ddp_result remember(const far_memory &f, const std::string &what, const floats &bits) {
    static std::map<std::string, floats> known;
    if (known.count(what)) return same(f, what.c_str(), bits, known[what]);
    known[what] = bits;
    return DDP_OK;
}

//== kernels ==================================================================

/* A model without memory of its own, for launches. */
static ddp_result shape(far_memory &f, gpt_cuda *m, int C, int V, int B, int T) {
    gpt_cuda_desc desc = DDP_ZERO;
    desc.config.vocab = V, desc.config.context = T + 1, desc.config.heads = 1, desc.config.channels = C;
    desc.batch = B, desc.length = T, desc.dtype = f.dtype, desc.stream = f.d->stream;
    gpt_cuda__shape(m, &desc);
    m->partial = (float *)f.take((size_t)C * 2 * GPT_CUDA__NORM_BLOCKS * 4);
    RANKS_CHECK(f.d->cpu, m->partial, "no memory");
    return DDP_OK;
}

static double unit_round(const far_memory &f) { return f.dtype == DDP_F32 ? NEAR_F32 / 5 : 6e-3; }

static ddp_result norms(device_rank *d, ddp_dtype dtype, int C, int rows, int residual) {
    far_memory f(d, dtype);
    gpt_cuda m;
    size_t n = (size_t)rows * (size_t)C;
    floats x = f.some(1, n), r = f.some(2, n), b = f.some(3, (size_t)C), w = f.some(4, (size_t)C),
           s = f.some(5, (size_t)C), dy = f.some(6, n), add = f.some(7, n);
    floats sum = x, out(n), mean((size_t)rows), rstd((size_t)rows), dx(n), dw((size_t)C), ds((size_t)C);
    std::vector<double> weights((size_t)C), shifts((size_t)C);
    GPT_TRY(shape(f, &m, C, 64, rows, 1));
    if (residual)
        for (size_t i = 0; i < n; i++) sum[i] = x[i] + r[i] + b[i % (size_t)C];
    f.round(sum);
    for (int i = 0; i < rows; i++) {
        const float *v = &sum[(size_t)i * (size_t)C], *g = &dy[(size_t)i * (size_t)C];
        double mu = 0, square = 0, a = 0, c = 0;
        for (int j = 0; j < C; j++) mu += v[j] / (double)C;
        for (int j = 0; j < C; j++) square += (v[j] - mu) * (v[j] - mu) / C;
        double q = 1 / sqrt(square + 1e-5);
        mean[(size_t)i] = (float)mu, rstd[(size_t)i] = (float)q;
        for (int j = 0; j < C; j++) {
            double norm = (v[j] - mu) * q;
            out[(size_t)i * (size_t)C + (size_t)j] = (float)(norm * w[(size_t)j] + s[(size_t)j]);
            a += g[j] * w[(size_t)j] / C, c += g[j] * w[(size_t)j] * norm / C;
            weights[(size_t)j] += g[j] * norm, shifts[(size_t)j] += g[j];
        }
        for (int j = 0; j < C; j++) {
            size_t at = (size_t)i * (size_t)C + (size_t)j;
            dx[at] = (float)((g[j] * w[(size_t)j] - a - (v[j] - mu) * q * c) * q + (residual ? add[at] : 0));
        }
    }
    for (size_t j = 0; j < (size_t)C; j++) dw[j] = (float)weights[j], ds[j] = (float)shifts[j];
    void *far_x = f.up(x), *far_out = f.take_rows(n), *far_w = f.up(w), *far_dx = f.up(add),
         *far_dw = f.take_rows((size_t)C), *far_ds = f.take_rows((size_t)C);
    float *far_mean = (float *)f.take((size_t)rows * 4), *far_rstd = (float *)f.take((size_t)rows * 4);
    RANKS_OK(d->cpu,
             GPT_CUDA__AS(&m, gpt_cuda__norm, far_out, far_mean, far_rstd, far_x, far_x,
                          residual ? f.up(b) : NULL, residual ? f.up(r) : NULL, far_w, f.up(s), rows));
    GPT_TRY(near(f, "layer norm", f.down(far_out, n), out, unit_round(f)));
    GPT_TRY(near(f, "its mean", f.down_f32(far_mean, (size_t)rows), mean, 1e-5));
    GPT_TRY(near(f, "its rstd", f.down_f32(far_rstd, (size_t)rows), rstd, 1e-5));
    GPT_TRY(near(f, "its sum", f.down(far_x, n), sum, unit_round(f)));
    RANKS_OK(d->cpu, GPT_CUDA__AS(&m, gpt_cuda__norm_backward, far_dx, residual ? far_dx : NULL, far_dw,
                                  far_ds, f.up(dy), far_x, far_mean, far_rstd, far_w));
    GPT_TRY(near(f, "layer norm backward", f.down(far_dx, n), dx, 2 * unit_round(f)));
    GPT_TRY(near(f, "its weight gradient", f.down(far_dw, (size_t)C), dw, 2 * unit_round(f)));
    return near(f, "its bias gradient", f.down(far_ds, (size_t)C), ds, 2 * unit_round(f));
}

/* Rows of `columns`: sums with bias and residual; and a matrix times a vector. */
static ddp_result rows_and_columns(device_rank *d, ddp_dtype dtype, int rows, int columns) {
    far_memory f(d, dtype);
    gpt_cuda m;
    size_t n = (size_t)rows * (size_t)columns, N = (size_t)columns;
    floats x = f.some(1, n, 3), r = f.some(2, n), b = f.some(3, N), sum(n), vector((size_t)rows);
    GPT_TRY(shape(f, &m, columns, rows, rows, 1));
    for (size_t i = 0; i < n; i++) sum[i] = x[i] + b[i % N] + r[i];
    for (int i = 0; i < rows; i++) {
        double product = 0;
        for (size_t j = 0; j < N; j++) product += (double)x[(size_t)i * N + j] * b[j];
        vector[(size_t)i] = (float)product;
    }
    void *far_x = f.up(x), *far_r = f.up(r), *far_b = f.up(b), *out = f.take_rows(n);
    float *far_vector = (float *)f.take((size_t)rows * 4);
    RANKS_OK(d->cpu, GPT_CUDA__AS(&m, gpt_cuda__add, out, far_x, far_b, far_r, rows, columns));
    GPT_TRY(near(f, "bias and residual", f.down(out, n), sum, unit_round(f)));
    RANKS_OK(d->cpu, gpt_cuda__as(dtype, [&](auto type) {
                 typedef decltype(type) T;
                 return GPT_CUDA_LAUNCH(gpt_cuda__matrix_vector_kernel<T>, (unsigned)(rows + 7) / 8, 256, 0,
                                        d->stream, far_vector, (const T *)far_x, (const T *)far_b, rows,
                                        columns);
             }));
    return near(f, "a matrix times a vector", f.down_f32(far_vector, (size_t)rows), vector, 1e-5);
}

static ddp_result embedding(device_rank *d, ddp_dtype dtype, int C, int V, int B, int T) {
    far_memory f(d, dtype);
    gpt_cuda m;
    int n = B * T;
    size_t width = (size_t)C, rows = (size_t)n * width;
    std::vector<int32_t> batch(gpt_cuda_batch_ints(n));
    floats wte = f.some(1, (size_t)V * width), wpe = f.some(2, (size_t)(T + 1) * width), dy = f.some(3, rows),
           out(rows);
    std::vector<double> dte((size_t)V * width), dpe((size_t)(T + 1) * width);
    GPT_TRY(shape(f, &m, C, V, B, T));
    for (int i = 0; i < n; i++)
        batch[(size_t)i] = (int32_t)(ranks_mix((uint64_t)i) % (uint64_t)(i % 2 ? V : (V + 3) / 4)),
        batch[(size_t)(n + i)] = 0;
    RANKS_CHECK(d->cpu, gpt_cuda_batch_sort(batch.data(), n, V) == 0, "a good batch is refused");
    for (size_t i = 0; i < rows; i++) {
        size_t row = i / width, at = (size_t)batch[row] * width + i % width,
               position = row % (size_t)T * width + i % width;
        out[i] = wte[at] + wpe[position];
        dte[at] += dy[i], dpe[position] += dy[i];
    }
    const int32_t *far_batch = (const int32_t *)f.bytes(batch.data(), batch.size() * 4);
    void *far_out = f.take_rows(rows), *far_dte = f.up(numbers(9, dte.size(), 1)),
         *far_dpe = f.up(numbers(9, dpe.size(), 1));
    RANKS_OK(d->cpu, GPT_CUDA__AS(&m, gpt_cuda__embed, far_out, f.up(wte), f.up(wpe), far_batch));
    GPT_TRY(near(f, "embedding", f.down(far_out, rows), out, unit_round(f)));
    RANKS_OK(d->cpu, GPT_CUDA__AS(&m, gpt_cuda__embed_backward, far_dte, far_dpe, far_batch, f.up(dy)));
    GPT_TRY(near(f, "token gradient", f.down(far_dte, dte.size()), floats(dte.begin(), dte.end()),
                 unit_round(f)));
    m.desc.tied_grads = 1;
    for (double &x : dte) x *= 2;
    RANKS_OK(d->cpu, GPT_CUDA__AS(&m, gpt_cuda__embed_backward, far_dte, far_dpe, far_batch, f.up(dy)));
    GPT_TRY(near(f, "token gradient, added", f.down(far_dte, dte.size()), floats(dte.begin(), dte.end()),
                 2 * unit_round(f)));
    return near(f, "position gradient", f.down(far_dpe, dpe.size()), floats(dpe.begin(), dpe.end()),
                unit_round(f));
}

static ddp_result classifier(device_rank *d, ddp_dtype dtype, int V, int rows) {
    far_memory f(d, dtype);
    gpt_cuda m;
    std::vector<int32_t> targets((size_t)rows);
    const float scale = dtype == DDP_F16 ? 512 : 1;
    GPT_TRY(shape(f, &m, 8, V, rows, 1));
    if (dtype == DDP_F16) m.desc.loss_scale = (const float *)f.bytes(&scale, sizeof scale);
    size_t padded = (size_t)m.padded;
    floats x = f.some(1, (size_t)rows * padded, 8), gradient(x.size()), losses((size_t)rows);
    double sum = 0;
    for (size_t i = 0; i < (size_t)rows; i++) {
        double total = 0, top = -1e30;
        targets[i] = (int32_t)(i == 0 ? V - 1 : ranks_mix(i) % (uint64_t)V);
        for (size_t j = 0; j < (size_t)V; j++) top = x[i * padded + j] > top ? x[i * padded + j] : top;
        for (size_t j = 0; j < (size_t)V; j++) total += exp(x[i * padded + j] - top);
        losses[i] = (float)(top + log(total) - x[i * padded + (size_t)targets[i]]);
        for (size_t j = 0; j < (size_t)V; j++)
            gradient[i * padded + j] =
                (float)((exp(x[i * padded + j] - top) / total - (j == (size_t)targets[i])) / rows * scale);
        /* Memory that was never written. */
        for (size_t j = (size_t)V; j < padded; j++) x[i * padded + j] = NAN;
    }
    void *far = f.up(x);
    float *far_losses = (float *)f.take((size_t)rows * 4);
    double *far_sum = (double *)f.take(8), have;
    RANKS_OK(d->cpu, GPT_CUDA__AS(&m, gpt_cuda__classify, far, far_losses,
                                  (const int32_t *)f.bytes(targets.data(), targets.size() * 4)));
    GPT_TRY(near(f, "losses", f.down_f32(far_losses, (size_t)rows), losses, NEAR_F32 / 5));
    GPT_TRY(near(f, "gradient of the logits", f.down(far, x.size()), gradient, unit_round(f)));
    RANKS_OK(d->cpu, GPT_CUDA_LAUNCH(gpt_cuda__sum_kernel, 1, 256, 0, d->stream, far_sum, far_losses, rows));
    ddp_device_cuda()->copy(&have, far_sum, 8);
    for (float loss : f.down_f32(far_losses, (size_t)rows)) sum += loss;
    RANKS_CHECK(d->cpu, fabs(have - sum) <= 1e-12 * fabs(sum),
                "the sum of the losses is %.17g and should be %.17g", have, sum);
    return DDP_OK;
}

/* f16 differs from bf16 only in its conversions, which each kernel has. */
static ddp_result f16_kernels(device_rank *d) {
    GPT_TRY(norms(d, DDP_F16, 72, 37, 1));
    GPT_TRY(rows_and_columns(d, DDP_F16, 600, 24));
    GPT_TRY(embedding(d, DDP_F16, 264, 300, 2, 9));
    return classifier(d, DDP_F16, 51, 300);
}

static ddp_result kernels(device_rank *d, ddp_dtype dtype) {
    int wide = dtype == DDP_F32 ? 25300 : 50500; /* rows of logits that do not fit into shared memory */
    for (int residual = 0; residual < 2; residual++) {
        GPT_TRY(norms(d, dtype, 8, 1, residual));
        GPT_TRY(norms(d, dtype, 72, 37, residual));
        GPT_TRY(norms(d, dtype, 264, 11, residual)); /* a little more than a warp reads at once */
        GPT_TRY(norms(d, dtype, 1600, 5, residual));
    }
    GPT_TRY(norms(d, dtype, 8, 8 * GPT_CUDA__NORM_BLOCKS + 3, 1)); /* a warp has several rows */
    GPT_TRY(norms(d, dtype, GPT_CUDA__CHANNELS, 2, 1));
    GPT_TRY(rows_and_columns(d, dtype, 1, 8));
    GPT_TRY(rows_and_columns(d, dtype, 600, 24));
    GPT_TRY(rows_and_columns(d, dtype, 3, 2056));
    GPT_TRY(embedding(d, dtype, 8, 3, 3, 11));
    GPT_TRY(embedding(d, dtype, 264, 300, 2, 9));
    for (int V : {1, 51, 64, 3000}) GPT_TRY(classifier(d, dtype, V, V == 51 ? 300 : 3));
    return classifier(d, dtype, wide, 2);
}

//== descriptions =============================================================

static gpt_cuda_desc plain(device_rank *d, ddp_dtype dtype) {
    gpt_cuda_desc desc = DDP_ZERO;
    gpt_config config = {51, 12, 2, 2, 64};
    desc.config = config, desc.dtype = dtype, desc.batch = 2, desc.length = 10, desc.stream = d->stream;
    desc.group = d->group;
    return desc;
}

static ddp_result checks(device_rank *d) {
    struct {
        const char *says;
        gpt_cuda_desc desc;
    } bad[16];
    gpt_cuda_desc good = plain(d, DDP_BF16);
    gpt_cuda *m;
    int n = 0;
    for (auto &b : bad) b.desc = good;
    bad[n].says = "multiple of heads", bad[n++].desc.config.heads = 3;
    bad[n].says = "multiple of 8", bad[n++].desc.config.channels = 60;
    bad[n].says = "multiple of 8", bad[n++].desc.config.channels = GPT_CUDA__CHANNELS + 8;
    bad[n].says = "bf16, f16 or f32", bad[n++].desc.dtype = DDP_F64;
    bad[n].says = "context of 12", bad[n++].desc.length = 13;
    bad[n].says = "at least 1", bad[n++].desc.batch = 0;
    bad[n].says = "micro-batches can be kept", bad[n++].desc.slots = -1;
    bad[n].says = "units 4 to 3", bad[n++].desc.first_unit = 4;
    bad[n].says = "units 0 to 4", bad[n++].desc.end_unit = 5;
    bad[n].says = "do not divide 2 heads", bad[n++].desc.tensor_ranks = 3;
    bad[n].says = "numbered from 0", bad[n].desc.tensor_ranks = 2, bad[n++].desc.tensor_rank = 2;
    bad[n].says = "not captured", bad[n].desc.tensor_ranks = 2, bad[n++].desc.graphs = 1;
    bad[n].says = "over 2 tensor ranks", bad[n].desc.config.channels = 8, bad[n].desc.config.heads = 2,
    bad[n++].desc.tensor_ranks = 2;
    bad[n].says = "more than 67108864 tokens", bad[n].desc.batch = 1 << 25, bad[n++].desc.length = 3;
    RANKS_CHECK(d->cpu, gpt_cuda_check(&good) == NULL, "a good description is refused: %s",
                gpt_cuda_check(&good));
    for (int i = 0; i < n; i++) {
        const char *wrong = gpt_cuda_check(&bad[i].desc);
        RANKS_CHECK(d->cpu, wrong && strstr(wrong, bad[i].says), "'%s' should contain '%s'",
                    wrong ? wrong : "nothing", bad[i].says);
        RANKS_CHECK(d->cpu,
                    gpt_cuda_create(&m, &bad[i].desc) == DDP_ERR_INVALID && !m
                        && strstr(ddp_last_error(), bad[i].says),
                    "create returned %s", ddp_last_error());
    }
    good.graphs = 1, good.stream = 0;
    RANKS_CHECK(d->cpu,
                gpt_cuda_create(&m, &good) == DDP_ERR_INVALID
                    && strstr(ddp_last_error(), "stream of their own"),
                "create returned %s", ddp_last_error());
    good.graphs = 0;
    for (ddp_group *none : {(ddp_group *)NULL, d->cpu}) {
        gpt_cuda_desc without = good;
        without.group = none;
        RANKS_CHECK(d->cpu,
                    gpt_cuda_create(&m, &without) == DDP_ERR_INVALID && !m
                        && strstr(ddp_last_error(), "group has no GPUs"),
                    "create returned %s", ddp_last_error());
    }
    good.tensor_ranks = 2;
    RANKS_CHECK(d->cpu,
                gpt_cuda_create(&m, &good) == DDP_ERR_INVALID && strstr(ddp_last_error(), "without a group"),
                "create returned %s", ddp_last_error());
    RANKS_CHECK(d->cpu,
                gpt_cuda_create(NULL, &good) == DDP_ERR_INVALID
                    && gpt_cuda_create(&m, NULL) == DDP_ERR_INVALID,
                "NULL is taken");
    gpt_cuda_destroy(NULL);
    return DDP_OK;
}

/* The boxes of all ranks cover each sharded parameter once, and the others on every rank. */
static ddp_result boxes(device_rank *d) {
    gpt_cuda_desc desc = plain(d, DDP_BF16);
    gpt_param p;
    gpt_cuda_box box[3];
    double flops = 0;
    desc.config.heads = 4;
    for (desc.tensor_ranks = 1; desc.tensor_ranks <= 4; desc.tensor_ranks *= 2)
        for (int index = 0; gpt_param_info(&desc.config, index, &p) == 0; index++) {
            std::vector<int> seen((size_t)p.count);
            int cut = p.unit > 0 && p.unit < 3 && desc.tensor_ranks > 1
                      && (strstr(p.name, "qkv") || strstr(p.name, "fc") || strstr(p.name, "proj.weight"));
            for (desc.tensor_rank = 0; desc.tensor_rank < desc.tensor_ranks; desc.tensor_rank++) {
                int count = gpt_cuda_param_boxes(&desc, index, box);
                RANKS_CHECK(d->cpu, count == (cut && strstr(p.name, "qkv") ? 3 : 1), "%s has %d boxes",
                            p.name, count);
                for (int k = 0; k < count; k++)
                    for (int64_t i = 0; i < box[k].rows * box[k].columns; i++)
                        seen[(size_t)((box[k].row + i / box[k].columns) * p.shape[1] + box[k].column
                                      + i % box[k].columns)]++;
            }
            desc.tensor_rank = 0;
            for (int times : seen)
                RANKS_CHECK(d->cpu, times == (cut ? 1 : desc.tensor_ranks),
                            "%s: an element is in %d boxes of %d ranks", p.name, times, desc.tensor_ranks);
        }
    RANKS_CHECK(d->cpu, gpt_cuda_param_boxes(&desc, gpt_param_count(&desc.config), box) == 0,
                "a parameter too many");
    desc.tensor_ranks = 2;
    flops = gpt_cuda_flops(&desc);
    RANKS_CHECK(d->cpu, flops == 20.0 * (6.0 * 51 * 64 + 2 * (6.0 * 12 * 64 * 64 + 6.0 * 64 * 10) / 2),
                "%g flops", flops);
    return DDP_OK;
}

static ddp_result sorting(device_rank *d) {
    for (int V : {1, 7, 256, 257, 70000})
        for (int n : {1, 5, 200}) {
            std::vector<int32_t> b(gpt_cuda_batch_ints(n), -7);
            int count = 0, at = 0;
            for (int i = 0; i < 2 * n; i++) b[(size_t)i] = (int32_t)(ranks_mix((uint64_t)i) % (uint64_t)V);
            RANKS_CHECK(d->cpu, b.size() % 4 == 0 && gpt_cuda_batch_sort(b.data(), n, V) == 0,
                        "a good batch is refused");
            for (int t = 0; t < V; t++) {
                int first = at;
                for (int i = 0; i < n; i++)
                    if (b[(size_t)i] == t)
                        RANKS_CHECK(d->cpu, b[(size_t)(2 * n + at++)] == i,
                                    "V %d n %d: position %d of token %d", V, n, i, t);
                if (at > first)
                    RANKS_CHECK(d->cpu,
                                b[(size_t)(3 * n + count++)] == first
                                    && b[(size_t)(3 * n + count)] >= at - (at == n),
                                "V %d n %d: begin of token %d", V, n, t);
            }
            RANKS_CHECK(d->cpu, b[(size_t)(3 * n + count)] == n && b[(size_t)(4 * n + 1)] == count,
                        "V %d n %d: %d tokens", V, n, count);
            b[(size_t)(n - 1)] = V;
            RANKS_CHECK(d->cpu, gpt_cuda_batch_sort(b.data(), n, V) == -1,
                        "a token outside of the vocabulary is taken");
            b[(size_t)(n - 1)] = 0, b[(size_t)n] = -1;
            RANKS_CHECK(d->cpu, gpt_cuda_batch_sort(b.data(), n, V) == -1, "a target below 0 is taken");
        }
    return DDP_OK;
}

//== a model compared with gpt.h ==============================================

/* The same parameters on the CPU and on the device; apart: position of the boxes of qkv. */
struct pair {
    far_memory f;
    gpt_cuda_desc desc;
    gpt_cuda *m;
    gpt_model cpu;
    int apart;
    std::vector<std::vector<void *>> values, grads; /* per unit */
    std::vector<std::vector<int32_t>> batches;      /* on the host */
    std::vector<int32_t *> far_batches;
    double *sum; /* on the device */
    pair(device_rank *d, const gpt_cuda_desc &it) : f(d, it.dtype), desc(it), m(NULL), apart(0), sum(NULL) {
        memset(&cpu, 0, sizeof cpu);
    }
    ~pair() {
        gpt_cuda_destroy(m);
        gpt_model_destroy(&cpu);
    }
    int units() const { return desc.config.layers + 2; }
};

/* A rank's part of a full parameter, box after box. */
static floats own(const pair &p, int index, const float *whole) {
    gpt_cuda_box box[3];
    gpt_param info;
    floats part;
    int count = gpt_cuda_param_boxes(&p.desc, index, box);
    gpt_param_info(&p.desc.config, index, &info);
    for (int k = 0; k < count; k++)
        for (int64_t i = 0; i < box[k].rows; i++)
            for (int64_t j = 0; j < box[k].columns; j++)
                part.push_back(whole[(box[k].row + i) * info.shape[1] + box[k].column + j]);
    return part;
}

static ddp_result table(pair *p, int index, const floats &x, std::vector<void *> *to) {
    gpt_cuda_box box[3];
    int count = gpt_cuda_param_boxes(&p->desc, index, box);
    /* Three equal boxes, if it is qkv: no other parameter has room for more pointers. */
    if (count == 1 && p->apart && x.size() % 3 == 0) {
        gpt_param info;
        gpt_param_info(&p->desc.config, index, &info);
        if (strstr(info.name, "qkv")) {
            count = 3;
            for (int k = 0; k < 3; k++) box[k].rows = info.shape[0] / 3, box[k].columns = info.shape[1];
        }
    }
    size_t at = 0;
    for (int k = 0; k < 3; k++) {
        size_t n = k < count ? (size_t)(box[k].rows * box[k].columns) : 0;
        if (k == 0 && !p->apart) n = x.size();
        if (k > 0 && (!p->apart || !n)) {
            to->push_back(NULL);
            continue;
        }
        to->push_back(p->f.up(floats(x.begin() + (ptrdiff_t)at, x.begin() + (ptrdiff_t)(at + n))));
        RANKS_CHECK(p->f.d->cpu, to->back(), "no memory");
        at += n;
    }
    return DDP_OK;
}

static ddp_result pair_open(pair *p, int micro_batches) {
    gpt_param info;
    int n = p->desc.batch * p->desc.length;
    RANKS_CHECK(p->f.d->cpu,
                gpt_model_create(&p->cpu, &p->desc.config, p->desc.batch, GPT_OWN_VALUES | GPT_OWN_GRADS)
                    == 0,
                "no memory");
    gpt_model_init(&p->cpu, 5);
    p->values.resize((size_t)p->units());
    p->grads.resize((size_t)p->units());
    for (int i = 0; gpt_param_info(&p->desc.config, i, &info) == 0; i++) {
        float *value = p->cpu.values[i];
        /* Larger than at the start of training, so that all of it counts. */
        for (int64_t j = 0; j < info.count && info.tied_to < 0; j++) {
            value[j] = info.ndim == 2 ? 4 * value[j] : value[j] + 0.3f * number((uint64_t)i, (uint64_t)j);
            if (p->desc.dtype != DDP_F32)
                value[j] = float_of(p->desc.dtype, half_of(p->desc.dtype, value[j]));
        }
        GPT_TRY(table(p, i, own(*p, i, value), &p->values[(size_t)info.unit]));
        GPT_TRY(table(p, i, floats(own(*p, i, value).size(), NAN), &p->grads[(size_t)info.unit]));
    }
    for (int b = 0; b < micro_batches; b++) {
        std::vector<int32_t> batch(gpt_cuda_batch_ints(n));
        for (int i = 0; i < 2 * n; i++)
            batch[(size_t)i] = (int32_t)(ranks_mix((uint64_t)(1000 * b + i))
                                         % (uint64_t)p->desc.config.vocab);
        RANKS_CHECK(p->f.d->cpu, gpt_cuda_batch_sort(batch.data(), n, p->desc.config.vocab) == 0,
                    "a good batch is refused");
        p->far_batches.push_back((int32_t *)p->f.bytes(batch.data(), batch.size() * 4));
        p->batches.push_back(batch);
    }
    p->sum = (double *)p->f.take(8);
    RANKS_OK(p->f.d->cpu, gpt_cuda_create(&p->m, &p->desc));
    return DDP_OK;
}

/* The gradient of parameter index on this rank. */
static floats gradient(const pair &p, int index) {
    gpt_param info;
    gpt_cuda_box box[3];
    floats all;
    gpt_param_info(&p.desc.config, index, &info);
    int first = info.unit == 0                      ? 0
                : info.unit <= p.desc.config.layers ? gpt_block_first_param(info.unit - 1)
                                                    : gpt_param_count(&p.desc.config) - 3;
    int count = gpt_cuda_param_boxes(&p.desc, index, box);
    size_t total = 0;
    for (int k = 0; k < count; k++) total += (size_t)(box[k].rows * box[k].columns);
    const std::vector<void *> &at = p.grads[(size_t)info.unit];
    size_t slot = (size_t)(3 * (index - first)), parts = at[slot + 1] ? 3 : 1;
    for (size_t k = 0; k < parts; k++) {
        floats part = p.f.down(at[slot + k], total / parts);
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

static floats gradients(const pair &p) {
    floats all;
    for (int i = 0; i < gpt_param_count(&p.desc.config); i++) {
        floats g = gradient(p, i);
        all.insert(all.end(), g.begin(), g.end());
    }
    return all;
}

static ddp_result forward(pair *p, int slot, int batch) {
    for (int unit = 0; unit < p->units(); unit++)
        RANKS_OK(p->f.d->cpu, gpt_cuda_unit_forward(p->m, unit, slot, p->values[(size_t)unit].data(),
                                                    p->far_batches[(size_t)batch], NULL, NULL));
    return DDP_OK;
}

static ddp_result backward(pair *p, int slot, int batch) {
    for (int unit = p->units(); unit-- > 0;)
        RANKS_OK(p->f.d->cpu, gpt_cuda_unit_backward(p->m, unit, slot, p->values[(size_t)unit].data(),
                                                     p->grads[(size_t)unit].data(),
                                                     p->far_batches[(size_t)batch], NULL, NULL, NULL));
    return DDP_OK;
}

static ddp_result loss(pair *p, int slot, double *mean) {
    RANKS_OK(p->f.d->cpu, gpt_cuda_loss(p->m, slot, p->sum));
    ddp_device_cuda()->copy(mean, p->sum, 8);
    *mean /= p->desc.batch * p->desc.length;
    return DDP_OK;
}

static ddp_result compare_gradients(pair *p, int unit, double tolerance) {
    gpt_param info;
    for (int i = 0; gpt_param_info(&p->desc.config, i, &info) == 0; i++)
        if (info.unit == unit || unit < 0)
            GPT_TRY(near(p->f, info.name, gradient(*p, i), own(*p, i, p->cpu.grads[i]), tolerance));
    return DDP_OK;
}

/* Each unit by itself: its input is the CPU's result of the unit before, rounded to dtype. */
static ddp_result units(device_rank *d, const gpt_cuda_desc &desc, int apart) {
    pair p(d, desc);
    double tolerance = desc.dtype == DDP_F32 ? NEAR_F32 : 2e-2, mean;
    gpt_pass pass;
    p.apart = apart;
    GPT_TRY(pair_open(&p, 1));
    const int *tokens = p.batches[0].data(), *targets = tokens + desc.batch * desc.length;
    size_t n = (size_t)(desc.batch * desc.length * desc.config.channels), logits = (size_t)desc.config.vocab;
    int head = desc.config.layers + 1;
    pass = gpt_model_pass(&p.cpu, desc.batch, desc.length);
    for (int unit = 0; unit <= head; unit++) {
        double sum = gpt_model_unit_forward(&p.cpu, &pass, unit, tokens, targets);
        RANKS_OK(d->cpu, gpt_cuda_unit_forward(p.m, unit, 0, p.values[(size_t)unit].data(), p.far_batches[0],
                                               NULL, NULL));
        if (unit == head) {
            GPT_TRY(loss(&p, 0, &mean));
            sum /= desc.batch * desc.length;
            RANKS_CHECK(d->cpu, fabs(mean - sum) <= tolerance * 0.1 * sum,
                        "the loss is %.9g and should be %.9g", mean, sum);
            break;
        }
        float *out = gpt__model_stream(&p.cpu, unit);
        floats want(out, out + n);
        GPT_TRY(near(p.f, named("forward of unit ", unit).c_str(),
                     p.f.down(gpt_cuda_stream_of(p.m, unit + 1, 0), n), want, tolerance));
        p.f.round(want);
        memcpy(out, want.data(), n * 4);
        p.f.put(gpt_cuda_stream_of(p.m, unit + 1, 0), want);
    }
    float *far_logits = (float *)p.f.take(logits * 4);
    RANKS_OK(d->cpu, gpt_cuda_logits(p.m, 0, p.values[(size_t)head].data(), 3, far_logits));
    GPT_TRY(near(p.f, "logits", p.f.down_f32(far_logits, logits),
                 floats(p.cpu.head.logits + 3 * logits, p.cpu.head.logits + 4 * logits), tolerance));
    for (int unit = head; unit >= 0; unit--) {
        gpt_model_unit_backward(&p.cpu, &pass, unit, tokens, targets);
        RANKS_OK(d->cpu,
                 gpt_cuda_unit_backward(p.m, unit, 0, p.values[(size_t)unit].data(),
                                        p.grads[(size_t)unit].data(), p.far_batches[0], NULL, NULL, NULL));
        GPT_TRY(compare_gradients(&p, unit, tolerance));
        if (unit == 0) break;
        floats want(p.cpu.d_stream, p.cpu.d_stream + n);
        GPT_TRY(near(p.f, named("backward of unit ", unit).c_str(), p.f.down(gpt_cuda_d_stream_of(p.m), n),
                     want, tolerance));
        p.f.round(want);
        memcpy(p.cpu.d_stream, want.data(), n * 4);
        p.f.put(gpt_cuda_d_stream_of(p.m), want);
    }
    return DDP_OK;
}

/* Whole micro-batches, forward and backward one after the other: losses and all gradients, which are also
   those of gpt.h. */
static ddp_result whole(device_rank *d, const gpt_cuda_desc &desc, double tolerance, floats *out) {
    pair p(d, desc);
    GPT_TRY(pair_open(&p, 2));
    for (int b = 0; b < 2; b++) {
        const int *tokens = p.batches[(size_t)b].data();
        double have, want = gpt_model_forward_backward(&p.cpu, tokens, tokens + desc.batch * desc.length,
                                                       desc.batch, desc.length, NULL, NULL);
        GPT_TRY(forward(&p, 0, b));
        GPT_TRY(loss(&p, 0, &have));
        RANKS_CHECK(d->cpu, fabs(have - want) <= 0.1 * tolerance * want,
                    "the loss is %.9g and should be %.9g", have, want);
        GPT_TRY(backward(&p, 0, b));
        GPT_TRY(compare_gradients(&p, -1, tolerance));
        floats g = gradients(p);
        out->push_back((float)have);
        out->insert(out->end(), g.begin(), g.end());
    }
    return DDP_OK;
}

/* One gradient for both uses of wte: the sum of the two, also when backward runs again. */
static ddp_result tied(device_rank *d, gpt_cuda_desc desc, double tolerance) {
    desc.tied_grads = 1;
    pair p(d, desc);
    gpt_param info;
    GPT_TRY(pair_open(&p, 1));
    const int *tokens = p.batches[0].data(), head = gpt_param_head(&desc.config);
    gpt_model_forward_backward(&p.cpu, tokens, tokens + desc.batch * desc.length, desc.batch, desc.length,
                               NULL, NULL);
    gpt_param_info(&desc.config, 0, &info);
    for (int64_t i = 0; i < info.count; i++) p.cpu.grads[0][i] += p.cpu.grads[head][i];
    p.grads.back()[6] = p.grads[0][0];
    for (int time = 0; time < 2; time++) {
        GPT_TRY(forward(&p, 0, 0));
        GPT_TRY(backward(&p, 0, 0));
        GPT_TRY(compare_gradients(&p, 0, tolerance));
    }
    return DDP_OK;
}

/* The calls of a step of two micro-batches: graphs and no other products, or kernels. A later step allocates
   nothing. */
static ddp_result recorded(device_rank *d, int later, size_t want) {
#if defined(DDP_TEST_ON_CPU)
    std::string calls = fake_record(0);
    size_t launches = 0, graphs = 0;
    for (size_t at = 0; (at = calls.find("cudaLaunchKernel(", at)) != std::string::npos; at++) launches++;
    for (size_t at = 0; (at = calls.find("cudaGraphLaunch(", at)) != std::string::npos; at++) graphs++;
    if (later)
        for (const char *what :
             {"cudaMalloc", "cudaFree", "GetHeuristic", "cublasLtCreate", "cudaGraphInstantiate"})
            RANKS_CHECK(d->cpu, calls.find(what) == std::string::npos, "a later step calls %s:\n%s", what,
                        calls.c_str());
    if (want)
        RANKS_CHECK(d->cpu,
                    graphs == want && launches == 2 && calls.find("cublasLtMatmul(") == std::string::npos,
                    "%zu graphs, %zu kernels:\n%s", graphs, launches, calls.c_str());
    else
        RANKS_CHECK(d->cpu, graphs == 0 && launches > 50, "%zu graphs, %zu kernels", graphs, launches);
#else
    (void)d, (void)later, (void)want;
#endif
    return DDP_OK;
}

/* The same two micro-batches times times, in flight at the same time in two slots as in a pipeline: the bits
   of want, which had them one by one. */
static ddp_result pipelined(device_rank *d, gpt_cuda_desc desc, int times, const floats &want) {
    desc.slots = 2;
    pair p(d, desc);
    GPT_TRY(pair_open(&p, 2));
    for (int time = 0; time < times; time++) {
        floats have, g;
        double mean;
#if defined(DDP_TEST_ON_CPU)
        if (time == times - 1) fake_record_from_here();
#endif
        for (int b = 0; b < 2; b++) GPT_TRY(forward(&p, b, b));
        for (int b = 0; b < 2; b++) {
            GPT_TRY(backward(&p, b, b));
            GPT_TRY(loss(&p, b, &mean));
            g = gradients(p);
            have.push_back((float)mean);
            have.insert(have.end(), g.begin(), g.end());
        }
        GPT_TRY(same(p.f, named("two slots, time ", time).c_str(), have, want));
    }
    return recorded(d, times > 1, desc.graphs ? 16 : 0);
}

static void *const *const *tables(const std::vector<std::vector<void *>> &of,
                                  std::vector<void *const *> *list) {
    list->clear();
    for (const std::vector<void *> &unit : of) list->push_back(unit.data());
    return list->data();
}

static ddp_result micro_batch(pair *p, gpt_cuda *m, int slot, int batch) {
    std::vector<void *const *> values, grads;
    return gpt_cuda_micro_batch(m, slot, tables(p->values, &values), tables(p->grads, &grads),
                                p->far_batches[(size_t)batch]);
}

/* Whole micro-batches as one call, of two batches in two slots, each with its graph: the bits of want,
   whatever units were called between. */
static ddp_result micro_batches(device_rank *d, gpt_cuda_desc desc, const floats &want) {
    desc.slots = 2;
    pair p(d, desc);
    GPT_TRY(pair_open(&p, 2));
    for (int time = 0; time < 4; time++) {
        floats have, g;
        double mean;
#if defined(DDP_TEST_ON_CPU)
        if (time == 3) fake_record_from_here();
#endif
        for (int b = 0; b < 2; b++) {
            RANKS_OK(d->cpu, micro_batch(&p, p.m, b, b));
            GPT_TRY(loss(&p, b, &mean));
            g = gradients(p);
            have.push_back((float)mean);
            have.insert(have.end(), g.begin(), g.end());
        }
        GPT_TRY(same(p.f, named("micro-batches, time ", time).c_str(), have, want));
        if (time == 3) GPT_TRY(recorded(d, 1, desc.graphs ? 2 : 0));
        /* An earlier backward of another slot overwrites its activations and logits. */
        if (time == 1) GPT_TRY(forward(&p, 0, 1));
        if (time == 2) {
            GPT_TRY(forward(&p, 1, 1));
            RANKS_OK(d->cpu, micro_batch(&p, p.m, 0, 0));
            GPT_TRY(backward(&p, 1, 1));
            GPT_TRY(same(p.f, "units around a micro-batch", gradients(p),
                         floats(want.end() - (ptrdiff_t)g.size(), want.end())));
        }
    }
    return DDP_OK;
}

/* More sets of pointers than cached graphs: each gives the same result. */
static ddp_result many_pointers(device_rank *d, gpt_cuda_desc desc) {
    void *d_in[GPT_CUDA__GRAPHS + 2];
    desc.graphs = 1;
    pair p(d, desc);
    floats first;
    int head = desc.config.layers + 1;
    size_t n = (size_t)(desc.batch * desc.length * desc.config.channels);
    GPT_TRY(pair_open(&p, 1));
    for (void *&at : d_in) at = p.f.take_rows(n);
    GPT_TRY(forward(&p, 0, 0));
    for (int time = 0; time < 3; time++)
        for (int i = 0; i < GPT_CUDA__GRAPHS + 2; i++)
            for (int twice = 0; twice < 2; twice++) {
                RANKS_OK(d->cpu, gpt_cuda_unit_backward(p.m, head, 0, p.values[(size_t)head].data(),
                                                        p.grads[(size_t)head].data(), p.far_batches[0], NULL,
                                                        NULL, d_in[i]));
                floats have = p.f.down(d_in[i], n);
                if (first.empty()) first = have;
                GPT_TRY(same(p.f, "backward of the head", have, first));
            }
    /* Of micro-batches too: here with another address of a vector's gradient. */
    for (int i = 0; i < 3 * (GPT_CUDA__GRAPHS + 2); i++) {
        p.grads[(size_t)head][0] = d_in[i / 2 % (GPT_CUDA__GRAPHS + 2)];
        RANKS_OK(d->cpu, micro_batch(&p, p.m, 0, 0));
        floats have = gradients(p);
        if (i == 0) first = have;
        GPT_TRY(same(p.f, named("micro-batch ", i).c_str(), have, first));
    }
    return DDP_OK;
}

/* A model in f16 with a loss scale in device memory, which changes between launches of one graph: the same
   loss, and gradients times the scale. A scale that is too large makes some of them infinite. */
static ddp_result scaled(device_rank *d) {
    gpt_cuda_desc desc = plain(d, DDP_F16);
    far_memory memory(d, DDP_F32);
    desc.graphs = 1;
    desc.loss_scale = (const float *)memory.up({1});
    pair p(d, desc);
    gpt_param info;
    GPT_TRY(pair_open(&p, 1));
    const int *tokens = p.batches[0].data();
    double have, want = gpt_model_forward_backward(&p.cpu, tokens, tokens + desc.batch * desc.length,
                                                   desc.batch, desc.length, NULL, NULL);
    for (float scale : {1024.0f, 64.0f, 1e9f, 256.0f}) {
        size_t infinite = 0;
        memory.put((void *)desc.loss_scale, {scale});
        RANKS_OK(d->cpu, micro_batch(&p, p.m, 0, 0));
        GPT_TRY(loss(&p, 0, &have));
        RANKS_CHECK(d->cpu, fabs(have - want) <= 1e-3 * want, "the loss is %.9g and should be %.9g", have,
                    want);
        for (int i = 0; gpt_param_info(&desc.config, i, &info) == 0; i++) {
            floats g = gradient(p, i);
            for (float &x : g) {
                infinite += !isfinite(x);
                x /= scale;
            }
            if (scale < 1e9f) GPT_TRY(near(p.f, info.name, g, own(p, i, p.cpu.grads[i]), 1e-2));
        }
        RANKS_CHECK(d->cpu, (infinite > 0) == (scale == 1e9f), "%zu infinite gradients with scale %g",
                    infinite, (double)scale);
    }
    return DDP_OK;
}

static ddp_result variants(device_rank *d, ddp_dtype dtype) {
    gpt_cuda_desc desc = plain(d, dtype);
    far_memory f(d, dtype);
    floats bits, again;
    double tolerance = dtype == DDP_F32 ? 2 * NEAR_F32 : 5e-2;
#if defined(DDP_TEST_ON_CPU)
    int fused = fake_lt_fused;
    GPT_TRY(whole(d, desc, tolerance, &bits));
    RANKS_CHECK(d->cpu, fake_lt_fused - fused == 2 * 2 * (dtype == DDP_F32 ? 6 : 8),
                "%d products with an epilogue", fake_lt_fused - fused);
#else
    GPT_TRY(whole(d, desc, tolerance, &bits));
#endif
    GPT_TRY(remember(f, std::string("a model in ") + ddp_dtype_name(dtype), bits));
    for (int recompute = 0; recompute < 2; recompute++)
        for (int graphs = 0; graphs < 2; graphs++) {
            desc.recompute = recompute, desc.graphs = graphs;
            GPT_TRY(pipelined(d, desc, graphs ? 4 : 1 + !recompute, bits));
            GPT_TRY(micro_batches(d, desc, bits));
        }
    desc.recompute = 1, desc.graphs = 0;
    GPT_TRY(whole(d, desc, tolerance, &again));
    GPT_TRY(same(f, "with recomputation", again, bits));
    GPT_TRY(tied(d, plain(d, dtype), tolerance));
    return many_pointers(d, plain(d, dtype));
}

/* Ten steps of AdamW on each side from the same parameters. */
static ddp_result training(device_rank *d) {
    gpt_cuda_desc desc = plain(d, DDP_F32);
    pair p(d, desc);
    gpt_param info;
    int params = gpt_param_count(&desc.config), head = gpt_param_head(&desc.config);
    std::vector<floats> value((size_t)params), state[2][2];
    GPT_TRY(pair_open(&p, 10));
    for (int i = 0; gpt_param_info(&desc.config, i, &info) == 0; i++) {
        value[(size_t)i].assign(p.cpu.values[i], p.cpu.values[i] + info.count);
        for (auto &side : state)
            for (auto &moment : side) moment.push_back(floats((size_t)info.count));
    }
    for (int step = 1; step <= 10; step++) {
        const int *tokens = p.batches[(size_t)step - 1].data();
        double have, want = gpt_model_forward_backward(&p.cpu, tokens, tokens + desc.batch * desc.length,
                                                       desc.batch, desc.length, NULL, NULL);
        GPT_TRY(forward(&p, 0, step - 1));
        GPT_TRY(loss(&p, 0, &have));
        GPT_TRY(backward(&p, 0, step - 1));
        RANKS_CHECK(d->cpu, fabs(have - want) <= 1e-4, "step %d: the loss is %.9g and should be %.9g", step,
                    have, want);
        floats tied = gradient(p, head);
        for (int i = 0; i < params; i++) {
            gpt_param_info(&desc.config, i, &info);
            if (info.tied_to >= 0) continue;
            floats g = gradient(p, i);
            size_t n = (size_t)info.count, k = (size_t)i;
            for (size_t j = 0; j < n && i == 0; j++)
                g[j] += tied[j], p.cpu.grads[0][j] += p.cpu.grads[head][j];
            adamw(p.cpu.values[i], p.cpu.grads[i], state[0][0][k].data(), state[0][1][k].data(), n, 1e-3f,
                  0.9f, 0.95f, 1e-8f, 0.1f, step);
            adamw(value[k].data(), g.data(), state[1][0][k].data(), state[1][1][k].data(), n, 1e-3f, 0.9f,
                  0.95f, 1e-8f, 0.1f, step);
            int first = info.unit == 0                    ? 0
                        : info.unit <= desc.config.layers ? gpt_block_first_param(info.unit - 1)
                                                          : params - 3;
            p.f.put(p.values[(size_t)info.unit][(size_t)(3 * (i - first))], value[k]);
            if (i == 0) p.f.put(p.values.back()[6], value[k]);
        }
    }
    return DDP_OK;
}

//== errors and memory =========================================================

static ddp_result misuse(device_rank *d) {
    gpt_cuda_desc desc = plain(d, DDP_BF16);
    desc.first_unit = 1, desc.end_unit = 3;
    pair p(d, desc);
    GPT_TRY(pair_open(&p, 1));
    void *const *values = p.values[1].data(), *const *grads = p.grads[1].data();
    std::vector<void *> odd = p.values[1], none = p.values[1];
    const int32_t *batch = p.far_batches[0];
    void *in = gpt_cuda_stream_of(p.m, 1, 0);
    odd[3] = (char *)odd[3] + 2, none[9] = NULL;
#define BAD(call, text)                                                                             \
    do {                                                                                            \
        ddp_result refused = (call);                                                                \
        RANKS_CHECK(d->cpu, refused == DDP_ERR_INVALID && strstr(ddp_last_error(), text), "%d, %s", \
                    (int)refused, ddp_last_error());                                                \
    } while (0)
    BAD(gpt_cuda_unit_forward(NULL, 1, 0, values, batch, NULL, NULL), "model is NULL");
    BAD(gpt_cuda_unit_forward(p.m, 0, 0, values, batch, NULL, NULL), "has 1 to 2");
    BAD(gpt_cuda_unit_forward(p.m, 3, 0, values, batch, NULL, NULL), "unit 3 is not this rank's");
    BAD(gpt_cuda_unit_forward(p.m, 1, 1, values, batch, NULL, NULL), "slot 1 of 1");
    BAD(gpt_cuda_unit_forward(p.m, 1, 0, NULL, batch, NULL, NULL), "values is NULL");
    BAD(gpt_cuda_unit_forward(p.m, 1, 0, odd.data(), batch, NULL, NULL), "values[3], of parameter 1");
    BAD(gpt_cuda_unit_forward(p.m, 1, 0, none.data(), batch, NULL, NULL), "values[9], of parameter 3");
    BAD(gpt_cuda_unit_forward(p.m, 1, 0, values, batch, (char *)in + 4, NULL), "unit 1: in is");
    BAD(gpt_cuda_unit_forward(p.m, 1, 0, values, batch, in, in), "same memory");
    BAD(gpt_cuda_unit_backward(p.m, 1, 0, values, NULL, batch, NULL, NULL, NULL), "grads is NULL");
    BAD(gpt_cuda_unit_backward(p.m, 1, 0, values, grads, batch, NULL, (char *)in + 8, NULL), "d_out is");
    BAD(gpt_cuda_loss(p.m, 0, p.sum), "unit 3 is not this rank's");
    BAD(micro_batch(&p, NULL, 0, 0), "model is NULL");
    BAD(micro_batch(&p, p.m, 0, 0), "goes through all, 0 to 3");
    RANKS_CHECK(d->cpu,
                !gpt_cuda_stream_of(p.m, 0, 0) && gpt_cuda_stream_of(p.m, 3, 0)
                    && !gpt_cuda_stream_of(p.m, 4, 0) && !gpt_cuda_stream_of(p.m, 1, 1),
                "streams");
    desc.first_unit = 3, desc.end_unit = 4;
    pair q(d, desc);
    GPT_TRY(pair_open(&q, 1));
    BAD(gpt_cuda_unit_forward(q.m, 3, 0, q.values[3].data(), NULL, NULL, NULL), "needs batch");
    BAD(gpt_cuda_loss(q.m, 0, NULL), "sum is");
    BAD(gpt_cuda_logits(q.m, 0, q.values[3].data(), 10, (float *)in), "position 10 of 10");
    BAD(gpt_cuda_logits(q.m, 0, q.values[3].data(), 9, NULL), "logits is NULL");
    desc.first_unit = 0, desc.graphs = 1;
    pair r(d, desc);
    GPT_TRY(pair_open(&r, 1));
    std::vector<void *const *> list;
    BAD(gpt_cuda_micro_batch(r.m, 0, NULL, tables(r.grads, &list), r.far_batches[0]),
        "values or grads is NULL");
    BAD(gpt_cuda_micro_batch(r.m, 0, tables(r.values, &list), NULL, r.far_batches[0]),
        "values or grads is NULL");
    BAD(gpt_cuda_micro_batch(r.m, 0, tables(r.values, &list), list.data(), NULL), "needs batch");
    BAD(micro_batch(&r, r.m, 1, 0), "slot 1 of 1");
    for (int time = 0; time < 3; time++) {
        void *kept = r.grads[2][9];
        RANKS_OK(d->cpu, micro_batch(&r, r.m, 0, 0));
        r.grads[2][9] = NULL;
        BAD(micro_batch(&r, r.m, 0, 0), "unit 2: grads[9], of parameter 3");
        r.grads[2][9] = kept;
    }
#undef BAD
    return DDP_OK;
}

/* The stages of a pipeline, each with its own units, pass their inputs and gradients on in memory of the
   caller: the bits of one full model. */
static ddp_result stages(device_rank *d, int recompute) {
    gpt_cuda_desc desc = plain(d, DDP_BF16);
    pair all(d, desc);
    GPT_TRY(pair_open(&all, 1));
    size_t n = (size_t)(desc.batch * desc.length * desc.config.channels);
    void *between[2] = {all.f.take_rows(n), all.f.take_rows(n)},
         *d_between[2] = {all.f.take_rows(n), all.f.take_rows(n)};
    GPT_TRY(forward(&all, 0, 0));
    GPT_TRY(backward(&all, 0, 0));
    floats want = gradients(all), have;
    desc.recompute = recompute, desc.slots = 2;
    gpt_cuda *stage[2] = {NULL, NULL};
    desc.end_unit = 2;
    RANKS_OK(d->cpu, gpt_cuda_create(&stage[0], &desc));
    desc.first_unit = 2, desc.end_unit = 4;
    RANKS_OK(d->cpu, gpt_cuda_create(&stage[1], &desc));
    for (std::vector<void *> &list : all.grads)
        for (void *at : list)
            if (at) ddp_device_cuda()->fill_zero(at, 16);
    ddp_result result = DDP_OK;
    for (int unit = 0; unit < 4 && result == DDP_OK; unit++)
        result = gpt_cuda_unit_forward(stage[unit / 2], unit, 1, all.values[(size_t)unit].data(),
                                       all.far_batches[0], unit == 2 ? between[0] : NULL,
                                       unit == 1 ? between[0] : NULL);
    for (int unit = 3; unit >= 0 && result == DDP_OK; unit--)
        result = gpt_cuda_unit_backward(stage[unit / 2], unit, 1, all.values[(size_t)unit].data(),
                                        all.grads[(size_t)unit].data(), all.far_batches[0],
                                        unit == 2 ? between[0] : NULL, unit == 1 ? d_between[0] : NULL,
                                        unit == 2 ? d_between[0] : NULL);
    have = gradients(all);
    gpt_cuda_destroy(stage[0]);
    gpt_cuda_destroy(stage[1]);
    RANKS_OK(d->cpu, result);
    return same(all.f, "two stages", have, want);
}

struct noted {
    double flops;
    int count;
};
static void note(void *user, const char *kernel, double flops, double bytes) {
    noted *n = (noted *)user;
    n->count += bytes > 0 && kernel[0];
    n->flops += flops;
}

/* Notes sum to the formula, except for attention, in which backward computes one product again. */
static ddp_result notes(device_rank *d) {
    gpt_cuda_desc desc = plain(d, DDP_BF16);
    noted all = {0, 0};
    desc.note = note, desc.note_user = &all;
    pair p(d, desc);
    GPT_TRY(pair_open(&p, 1));
    gpt_cuda_attention it = gpt_cuda__attention_of(&p.m->desc);
    double products = 6.0 * 20 * (51 * 64 + 2 * 12 * 64 * 64),
           attention = 2 * (gpt_cuda_attention_flops(&it, 0) + gpt_cuda_attention_flops(&it, 1));
    GPT_TRY(forward(&p, 0, 0));
    GPT_TRY(backward(&p, 0, 0));
    RANKS_CHECK(d->cpu, all.flops == products + attention && all.count >= 40,
                "%g flops in %d notes; products %g, attention %g", all.flops, all.count, products, attention);
    return DDP_OK;
}

#if defined(DDP_TEST_ON_CPU)
/* Device memory is one piece of the predicted size. */
static ddp_result memory(device_rank *d) {
    for (int i = 0; i < 24; i++) {
        gpt_cuda_desc desc = plain(d, i % 2 ? DDP_F32 : DDP_BF16);
        gpt_cuda *m;
        desc.recompute = i / 2 % 2, desc.slots = 1 + i / 4 % 2;
        if (i / 8 == 1) desc.end_unit = 2;
        if (i / 8 == 2) desc.first_unit = 2;
        fake_record_from_here();
        RANKS_OK(d->cpu, gpt_cuda_create(&m, &desc));
        std::string calls = fake_record(0),
                    want = "cudaMalloc(" + std::to_string(gpt_cuda_bytes(&desc)) + ")";
        RANKS_CHECK(d->cpu,
                    calls.find(want) != std::string::npos
                        && calls.find("cudaMalloc(") == calls.rfind("cudaMalloc("),
                    "%s is not the one allocation:\n%s", want.c_str(), calls.c_str());
        gpt_cuda_destroy(m);
    }
    return DDP_OK;
}

/* Without the epilogues of cuBLASLt: nearly the same. cuBLASLt can refuse them in two ways, in the heuristics
   and at the product. */
static ddp_result refused(device_rank *d, ddp_dtype dtype) {
    floats out;
    gpt_cuda_desc desc = plain(d, dtype);
    RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &desc.group)); /* without cached choices */
    fake_lt_refused = ~(uint64_t)0;
    fake_lt_refusal = dtype == DDP_F32 ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_NOT_SUPPORTED;
    fake_lt_late = dtype == DDP_F32;
    int fused = fake_lt_fused;
    ddp_result result = whole(d, desc, dtype == DDP_F32 ? 2 * NEAR_F32 : 5e-2, &out);
    ddp_group_destroy(desc.group);
    fake_lt_refused = 0, fake_lt_late = 0;
    GPT_TRY(result);
    RANKS_CHECK(d->cpu, fused == fake_lt_fused, "an epilogue ran all the same");
    return DDP_OK;
}

/* Forward, backward and loss of a model without parameters of its own. */
static ddp_result step(pair *p, gpt_cuda *m, int in_one) {
    if (in_one) {
        GPT_TRY(micro_batch(p, m, 0, 0));
        return gpt_cuda_loss(m, 0, p->sum);
    }
    for (size_t unit = 0; unit < p->values.size(); unit++)
        GPT_TRY(
            gpt_cuda_unit_forward(m, (int)unit, 0, p->values[unit].data(), p->far_batches[0], NULL, NULL));
    for (size_t unit = p->values.size(); unit-- > 0;)
        GPT_TRY(gpt_cuda_unit_backward(m, (int)unit, 0, p->values[unit].data(), p->grads[unit].data(),
                                       p->far_batches[0], NULL, NULL, NULL));
    return gpt_cuda_loss(m, 0, p->sum);
}

/* Every call of CUDA and cuBLASLt fails once: an error that names it, no leak, and the model stays usable. */
static ddp_result faults(device_rank *d, int in_one) {
    static const char *const functions[] = {
        "cudaMalloc",           "cublasLtCreate",         "cublasLtMatmulAlgoGetHeuristic",
        "cublasLtMatmul",       "cudaLaunchKernel",       "cudaMemsetAsync",
        "cudaMemcpyAsync",      "cudaStreamBeginCapture", "cudaStreamEndCapture",
        "cudaGraphInstantiate", "cudaGraphLaunch"};
    gpt_cuda_desc desc = plain(d, DDP_BF16);
    desc.graphs = desc.recompute = 1;
    pair good(d, desc);
    GPT_TRY(pair_open(&good, 1));
    GPT_TRY(forward(&good, 0, 0));
    GPT_TRY(backward(&good, 0, 0));
    floats want = gradients(good);
    for (const char *function : functions) /* from the 50th on inside a capture */
        for (int nth = 1; nth < 100; nth *= in_one || DDP_TEST_SLOWDOWN > 1 ? 8 : 2) {
            gpt_cuda *m = NULL;
            ddp_result result;
            RANKS_OK(d->cpu, device_group(d->cpu, d->stream, &desc.group)); /* without a handle of cuBLASLt */
            fake_fail(function, -1, nth, 0, 0);
            result = gpt_cuda_create(&m, &desc);
            for (int time = 0; time < 3 && result == DDP_OK; time++) result = step(&good, m, in_one);
            int fired = fake_fault_fired(1);
            RANKS_CHECK(d->cpu,
                        fired ? result == DDP_ERR_ENGINE || result == DDP_ERR_NO_MEMORY : result == DDP_OK,
                        "%s %d: %d, %s", function, nth, (int)result, ddp_last_error());
            RANKS_CHECK(d->cpu, !fired || strstr(ddp_last_error(), function), "%s %d is called '%s'",
                        function, nth, ddp_last_error());
            RANKS_CHECK(d->cpu, fired || nth > 1, "%s is never called", function);
            if (fired && m) {
                for (int time = 0; time < 3; time++) {
                    RANKS_OK(d->cpu, step(&good, m, in_one));
                    GPT_TRY(same(good.f, "a step after one that failed", gradients(good), want));
                }
            }
            gpt_cuda_destroy(m);
            ddp_group_destroy(desc.group);
            if (!fired) break;
        }
    int handles = fake_lt_handles;
    RANKS_CHECK(d->cpu, handles == 1, "%d handles of cuBLASLt live", handles);
    return DDP_OK;
}
#endif

//== tensor parallelism =====================================================

static ddp_result cut(device_rank *d, ddp_dtype dtype) {
    far_memory f(d, dtype);
    gpt_cuda_desc desc = plain(d, dtype);
    desc.tensor = d->group;
    desc.config.heads = 4;
    for (int apart = 0; apart < 2; apart++) GPT_TRY(units(d, desc, apart));
    floats bits, again;
    GPT_TRY(whole(d, desc, dtype == DDP_F32 ? 2 * NEAR_F32 : 5e-2, &bits));
    desc.recompute = 1;
    GPT_TRY(whole(d, desc, dtype == DDP_F32 ? 2 * NEAR_F32 : 5e-2, &again));
    return same(f, "a tensor cut with recomputation", again, bits);
}

static ddp_result test(ddp_group *world, void *user) {
    device_rank d;
    GPT_TRY(device_rank_open(&d, world, 1 << 16));
    for (ddp_dtype dtype : {DDP_F32, DDP_BF16}) {
        if (ddp_world_size(world) > 1) {
            GPT_TRY(cut(&d, dtype));
            continue;
        }
        GPT_TRY(kernels(&d, dtype));
        for (int apart = 0; apart < 2; apart++) GPT_TRY(units(&d, plain(&d, dtype), apart));
        GPT_TRY(variants(&d, dtype));
#if defined(DDP_TEST_ON_CPU)
        GPT_TRY(refused(&d, dtype));
#endif
    }
    if (ddp_world_size(world) == 1) {
        GPT_TRY(checks(&d));
        GPT_TRY(boxes(&d));
        GPT_TRY(sorting(&d));
        GPT_TRY(f16_kernels(&d));
        GPT_TRY(units(&d, plain(&d, DDP_F16), 0));
        GPT_TRY(scaled(&d));
        GPT_TRY(training(&d));
        GPT_TRY(misuse(&d));
        GPT_TRY(notes(&d));
        for (int recompute = 0; recompute < 2; recompute++) GPT_TRY(stages(&d, recompute));
#if defined(DDP_TEST_ON_CPU)
        GPT_TRY(memory(&d));
        for (int in_one = 0; in_one < 2; in_one++) GPT_TRY(faults(&d, in_one));
#endif
    }
    GPT_TRY(device_rank_close(&d));
    return device_ok(world, user);
}

int main(int argc, char **argv) { return device_each(argc, argv, test); }

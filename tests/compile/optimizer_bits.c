/*  optimizer_bits.c - AdamW of ddp_fsdp.h has the bits of a plain loop, at any element, and for any two
    compilers.

    Prints a checksum of the bits of all kinds of optimizers: matrix.sh builds this with several compilers and
    options, and compares. It calls only the arithmetic; functions without a caller are not compiled. */
#define DDP_STATIC
#define DDP_IMPLEMENTATION
#include "ddp_fsdp.h"
#include "gpt.h" /* gpt_random */
#include "../support/adamw.h"

enum { COUNT_MAX = 67, OFFSET_MAX = 8, STEPS = 4 };

static uint64_t checksum = UINT64_C(0xcbf29ce484222325);

static void check_in(const void *data, size_t size_bytes) {
    for (size_t i = 0; i < size_bytes; i++)
        checksum = (checksum ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001b3);
}

static float number(int i, int of, int step) {
    uint64_t bits = gpt_random((uint64_t)of, (uint64_t)(i + 1000 * step));
    return ((float)(int32_t)(bits >> 32) * 0x1p-31f) * (bits & 1 ? 1.0f : 1e-3f);
}

static float lr_of(int step) { return 1e-3f * (float)step / 3; }

/* Elements [offset, offset + count); the neighbours must not change. The same element has the same numbers in
   every call. */
static int adamw_case(int offset, int count) {
    float w[4][COUNT_MAX + OFFSET_MAX + 16] = {{0}}, (*ours)[COUNT_MAX + OFFSET_MAX + 16],
                                        other[4][COUNT_MAX + OFFSET_MAX + 16];
    ddp_param param = DDP_ZERO;
    ddp__optimizer_param state;
    ddp_update_tensor tensor;
    ddp_optimizer optimizer;
    memset(&optimizer, 0, sizeof optimizer);
    memset(&state, 0, sizeof state);
    optimizer.desc.beta1 = 0.9f;
    optimizer.desc.beta2 = 0.95f;
    optimizer.desc.eps = 1e-8f;
    optimizer.desc.weight_decay = 0.1f;
    optimizer.desc.params = &param;
    optimizer.desc.param_count = 1;
    optimizer.device = ddp_device_cpu();
    optimizer.params = &state;
    optimizer.tensors = &tensor;
    param.value.dtype = DDP_F32;
    state.count = (size_t)count;
    state.square_index = -1;
    for (int i = 0; i < offset + count + 16; i++) w[0][i] = number(i, 1, 0);
    memcpy(other, w, sizeof w);
    ours = w;
    for (int step = 1; step <= STEPS; step++) {
        float lr = lr_of(step);
        optimizer.step = step;
        for (int i = 0; i < offset + count + 16; i++) ours[1][i] = other[1][i] = number(i, 2, step);
        adamw(other[0] + offset, other[1] + offset, other[2] + offset, other[3] + offset, (size_t)count, lr,
              0.9f, 0.95f, 1e-8f, 0.1f, step);
        param.value.data = ours[0] + offset;
        param.grad.data = ours[1] + offset;
        state.state[0] = ours[2] + offset;
        state.state[1] = ours[3] + offset;
        const ddp__optimizer_step_factors factors = ddp__optimizer_factors(&optimizer, lr, 1, NULL);
        ddp__optimizer_pass(&optimizer, &factors, 1);
    }
    if (memcmp(ours, other, sizeof w) != 0)
        return printf("count=%d offset=%d: a plain loop has other bits\n", count, offset);
    if (offset == 0) check_in(w, sizeof w);
    return 0;
}

/* Each kind of update, in pieces that begin anywhere. */
#define KINDS_CASE(real, dtype_, function)                                                             \
    static int kinds_##function(void) {                                                                \
        for (int kind = DDP_UPDATE_ADAMW; kind <= DDP_UPDATE_SGD; kind++)                              \
            for (int piece = COUNT_MAX; piece > 0; piece -= 13) {                                      \
                real x[4][COUNT_MAX] = {{0}};                                                          \
                static real whole[4][COUNT_MAX];                                                       \
                ddp_update u = DDP_ZERO;                                                               \
                ddp_update_tensor t = DDP_ZERO;                                                        \
                u.kind = (ddp_update_kind)kind;                                                        \
                u.dtype = dtype_;                                                                      \
                u.rate = 0.25f;                                                                        \
                u.beta1 = 0.9f;                                                                        \
                u.one_minus_beta1 = (real)1 - (real)0.9f;                                              \
                u.beta2 = 0.99f;                                                                       \
                u.one_minus_beta2 = (real)1 - (real)0.99f;                                             \
                u.inv_sqrt_bias_correction2 = 3.7f;                                                    \
                u.eps = 1e-6f;                                                                         \
                u.decay_factor = 0.999f;                                                               \
                u.decay = 0.03f;                                                                       \
                u.scale = 0.7f;                                                                        \
                u.nesterov = 1;                                                                        \
                u.grad_scale = 0.3f;                                                                   \
                for (int i = 0; i < COUNT_MAX; i++) x[0][i] = (real)number(i, 1, 0) / 3;               \
                for (int step = 1; step <= STEPS; step++) {                                            \
                    u.first = step == 1;                                                               \
                    for (int i = 0; i < COUNT_MAX; i++) x[1][i] = (real)number(i, 2, step) / 7;        \
                    for (int at = 0; at < COUNT_MAX; at += piece) {                                    \
                        t.value = x[0] + at;                                                           \
                        t.grad = x[1] + at;                                                            \
                        t.state0 = x[2] + at;                                                          \
                        t.state1 = x[3] + at;                                                          \
                        t.count = (size_t)(at + piece < COUNT_MAX ? piece : COUNT_MAX - at);           \
                        function(&u, &t);                                                              \
                    }                                                                                  \
                }                                                                                      \
                if (piece == COUNT_MAX) {                                                              \
                    memcpy(whole, x, sizeof x);                                                        \
                    check_in(x, sizeof x);                                                             \
                } else if (memcmp(whole, x, sizeof x) != 0)                                            \
                    return printf(#function " kind %d in pieces of %d has other bits\n", kind, piece); \
            }                                                                                          \
        return 0;                                                                                      \
    }
KINDS_CASE(float, DDP_F32, ddp__update_f32)
KINDS_CASE(double, DDP_F64, ddp__update_f64)

int main(void) {
    int failed = kinds_ddp__update_f32() | kinds_ddp__update_f64();
    for (int offset = 0; offset < OFFSET_MAX; offset++)
        for (int count = 1; count <= COUNT_MAX; count++) failed |= adamw_case(offset, count);
    printf("%016llx\n", (unsigned long long)checksum);
    return failed != 0;
}

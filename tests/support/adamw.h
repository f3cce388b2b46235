/*  adamw.h - AdamW (Loshchilov and Hutter 2019) as a plain loop, the reference for ddp_optimizer. */
#ifndef DDP_TEST_ADAMW_H
#define DDP_TEST_ADAMW_H

#include <math.h>
#include <stddef.h>

/* A product that no compiler fuses with the addition that follows. */
static inline float adamw_product(float a, float b) {
    volatile float product = a * b;
    return product;
}

/* Updates n elements of the value w and its moments m and v from the gradient g. step counts from 1. */
static inline void adamw(float *w, const float *g, float *m, float *v, size_t n, float lr, float beta1,
                         float beta2, float eps, float weight_decay, int step) {
    float rate = (float)(lr / (1.0 - pow(beta1, step)));
    float inv_sqrt_bias_correction2 = (float)(1.0 / sqrt(1.0 - pow(beta2, step)));
    float decay_factor = 1.0f - (float)((double)lr * weight_decay);
    for (size_t i = 0; i < n; i++) {
        m[i] = adamw_product(beta1, m[i]) + adamw_product(1.0f - beta1, g[i]);
        v[i] = adamw_product(beta2, v[i]) + adamw_product(1.0f - beta2, adamw_product(g[i], g[i]));
        w[i] = adamw_product(decay_factor, w[i])
               - adamw_product(rate, m[i]) / (adamw_product(inv_sqrt_bias_correction2, sqrtf(v[i])) + eps);
    }
}

#endif /* DDP_TEST_ADAMW_H */

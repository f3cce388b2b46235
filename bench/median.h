/*  median.h - quantiles of a few measurements. */
#ifndef DDP_BENCH_MEDIAN_H
#define DDP_BENCH_MEDIAN_H

#include <stdlib.h>

static inline int by_value(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* Both functions sort x. */
static inline double quantile(double *x, int count, double q) {
    qsort(x, (size_t)count, sizeof *x, by_value);
    return x[(int)(q * (count - 1) + 0.5)];
}
static inline double median(double *x, int count) {
    qsort(x, (size_t)count, sizeof *x, by_value);
    return (x[(count - 1) / 2] + x[count / 2]) / 2;
}

#endif /* DDP_BENCH_MEDIAN_H */

/* MIT License: see LICENSE. */

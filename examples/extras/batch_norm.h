/*  batch_norm.h - batch normalization, with statistics of one rank or of all ranks of a group.

USAGE
    Copy it next to ddp.h and include it after ddp.h. All functions are static.

EXAMPLE
    batch_norm_desc desc = DDP_ZERO;
    desc.channels = 16;
    desc.group = world;                              // NULL = statistics of this rank only
    batch_norm_create(&norm, &desc);
    batch_norm_buffers(norm, buffers);               // 3 tensors for ddp_reducer_desc.buffers

    batch_norm_forward(norm, weight, bias, x, y, 64, 28 * 28, 1);        // x, y: (64, 16, 28, 28)
    batch_norm_backward(norm, weight, x, dy, dx, d_weight, d_bias, 64, 28 * 28);
    batch_norm_forward(norm, weight, bias, x, y, 64, 28 * 28, 0);        // evaluation: running statistics
    batch_norm_destroy(norm);

CONCEPTS
    Statistics    Mean and variance of each channel, over samples and space, in one training forward (Ioffe
                  and Szegedy 2015). Without a group they are those of this rank, as in PyTorch's BatchNorm2d.
                  With a group they are over the samples of all ranks, as in SyncBatchNorm. Ranks may have
                  different numbers of samples, also none.
    Running       running = (1 - momentum) running + momentum statistic. The variance among them is unbiased.
    statistics    They are not trained: give them to ddp_reducer_desc.buffers. Without a group they differ
                  between ranks, so call ddp_reducer_sync_buffers before each training forward.
    Bits          Sums of one sample and channel are in f64 and in a fixed order. Sums over samples are exact
                  (ddp_exact_sum). With a group, the results have the same bits for every distribution of the
                  same samples over ranks. Without a group the statistics depend on the rank's samples, so a
                  training run has other bits on another number of ranks.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). With a group, an invalid argument on one rank is an error on
    all ranks. Only NULL norm is a local error.

NOT DONE HERE
    No cumulative average (momentum None of PyTorch), no backward of an evaluation, no device memory.
*/
#ifndef DDP_EXAMPLE_BATCH_NORM_H
#define DDP_EXAMPLE_BATCH_NORM_H

#ifndef DDP_H
#include "../../ddp.h"
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Zero means default, except for channels. */
typedef struct batch_norm_desc {
    int channels;     /* required */
    float eps;        /* 0 = 1e-5; added to the variance */
    float momentum;   /* 0 = 0.1; weight of a new statistic in the running statistics, at most 1 */
    ddp_group *group; /* NULL = statistics of this rank only. Must outlive the batch_norm */
} batch_norm_desc;

/* The sums of one channel. */
typedef struct batch_norm__sums {
    ddp_exact_sum first;  /* forward: of x. Backward: of dy */
    ddp_exact_sum second; /* forward: of x^2. Backward: of dy x */
} batch_norm__sums;

/* The head of the message that ranks add, followed by the sums of each channel: all are 64-bit integers. */
typedef struct batch_norm__message {
    int64_t invalid_ranks, count;
} batch_norm__message;

typedef struct batch_norm {
    batch_norm_desc desc;              /* with defaults resolved */
    float *running_mean, *running_var; /* (channels); 0 and 1 at the start */
    int64_t forward_count;             /* training forwards: num_batches_tracked of PyTorch */
    /* Of the last training forward: */
    double *mean, *inv_std; /* (channels) */
    int64_t count;          /* values per channel, of all ranks; 0 = none, or it has failed */
    batch_norm__message *message;
    batch_norm__sums *sums; /* (channels), follows *message in memory */
} batch_norm;

/* Creates a batch norm for host memory. Not collective. Free *out with batch_norm_destroy.
   Errors: DDP_ERR_INVALID; DDP_ERR_NO_MEMORY. *out is then NULL. */
static inline ddp_result batch_norm_create(batch_norm **out, const batch_norm_desc *desc) {
    if (out) *out = NULL;
    if (!out || !desc) return ddp_fail(DDP_ERR_INVALID, "batch_norm_create: out or desc is NULL");
    if (desc->channels < 1 || desc->channels > 1 << 20)
        return ddp_fail(DDP_ERR_INVALID, "batch_norm_create: channels=%d; use 1 to 1048576", desc->channels);
    if (!(desc->eps >= 0 && desc->eps <= 1) || !(desc->momentum >= 0 && desc->momentum <= 1))
        return ddp_fail(DDP_ERR_INVALID, "batch_norm_create: eps=%g momentum=%g; use 0 to 1, 0 = default",
                        (double)desc->eps, (double)desc->momentum);
    size_t n = (size_t)desc->channels;
    size_t message_bytes = sizeof(batch_norm__message) + n * sizeof(batch_norm__sums);
    batch_norm *norm = (batch_norm *)calloc(1, sizeof *norm + message_bytes
                                                   + n * (2 * sizeof(double) + 2 * sizeof(float)));
    if (!norm) return ddp_fail(DDP_ERR_NO_MEMORY, "batch_norm_create: %d channels", desc->channels);
    norm->desc = *desc;
    if (desc->eps == 0) norm->desc.eps = 1e-5f;
    if (desc->momentum == 0) norm->desc.momentum = 0.1f;
    norm->message = (batch_norm__message *)(norm + 1);
    norm->sums = (batch_norm__sums *)(norm->message + 1);
    norm->mean = (double *)(norm->sums + n);
    norm->inv_std = norm->mean + n;
    norm->running_mean = (float *)(norm->inv_std + n);
    norm->running_var = norm->running_mean + n;
    for (size_t c = 0; c < n; c++) norm->running_var[c] = 1;
    *out = norm;
    return DDP_OK;
}

/* NULL is ignored. */
static inline void batch_norm_destroy(batch_norm *norm) { free(norm); }

/* Fills in the tensors of running_mean, running_var and forward_count, for ddp_reducer_desc.buffers. */
static inline void batch_norm_buffers(batch_norm *norm, ddp_tensor buffers[3]) {
    memset(buffers, 0, 3 * sizeof *buffers);
    for (int i = 0; i < 2; i++) {
        buffers[i].dtype = DDP_F32;
        buffers[i].ndim = 1;
        buffers[i].shape[0] = norm->desc.channels;
    }
    buffers[0].data = norm->running_mean;
    buffers[1].data = norm->running_var;
    buffers[2].data = &norm->forward_count;
    buffers[2].dtype = DDP_I64;
}

/* Sums of `space` products a b in f64, in a fixed order that compilers can vectorise. b NULL: of a. */
static inline double batch_norm__row_sum(const float *a, const float *b, int64_t space) {
    double lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 8 <= space; i += 8)
        for (int k = 0; k < 8; k++) lane[k] += b ? (double)a[i + k] * b[i + k] : (double)a[i + k];
    for (; i < space; i++) lane[i % 8] += b ? (double)a[i] * b[i] : (double)a[i];
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

/* Adds the sums of this rank's values, or counts it as invalid, and makes the sums those of all ranks.
   right NULL: of left and left squared; otherwise of left and left times right. */
static inline ddp_result batch_norm__sum(batch_norm *norm, const char *call, const char *invalid,
                                         const float *left, const float *right, int64_t samples,
                                         int64_t space) {
    int channels = norm->desc.channels;
    size_t words = (sizeof *norm->message + (size_t)channels * sizeof *norm->sums) / sizeof(int64_t);
    memset(norm->message, 0, words * sizeof(int64_t));
    norm->message->invalid_ranks = invalid != NULL;
    norm->message->count = invalid ? 0 : samples * space;
    for (int64_t i = 0; i < samples && !invalid; i++)
        for (int c = 0; c < channels; c++) {
            const float *a = left + (i * channels + c) * space;
            const float *b = right ? right + (i * channels + c) * space : a;
            ddp_exact_sum_add(&norm->sums[c].first, batch_norm__row_sum(a, NULL, space));
            ddp_exact_sum_add(&norm->sums[c].second, batch_norm__row_sum(a, b, space));
        }
    if (norm->desc.group)
        DDP_TRY(
            ddp_all_reduce(norm->desc.group, norm->message, norm->message, words, DDP_I64, DDP_OP_SUM, NULL));
    if (invalid) return ddp_fail(DDP_ERR_INVALID, "%s: %s", call, invalid);
    if (!norm->message->invalid_ranks) return DDP_OK;
    return ddp_fail(DDP_ERR_INVALID, "%s: %lld other ranks have an invalid argument; see their errors", call,
                    (long long)norm->message->invalid_ranks);
}

/* NULL for valid sizes. */
static inline const char *batch_norm__check_sizes(int64_t samples, int64_t space) {
    if (samples < 0 || space < 1) return "samples is negative, or space is below 1";
    if (samples > INT64_MAX / 64 / space) return "samples times space overflows; use smaller batches";
    return NULL;
}

/* y = (x - mean) / sqrt(variance + eps) * weight + bias, per channel. x, y: (samples, channels, space), not
   overlapping. space is height times width; 1 for a batch of vectors. weight, bias: (channels), or both NULL
   for 1 and 0.
   training 1: uses the statistics of x and updates the running statistics. With a group it is collective and
   blocks; space must be the same on all ranks. samples may be 0, then x and y may be NULL.
   training 0: uses the running statistics. Not collective.
   Errors: DDP_ERR_INVALID, also if all ranks together have fewer than 2 values per channel in training. The
   running statistics are then unchanged. */
static inline ddp_result batch_norm_forward(batch_norm *norm, const float *weight, const float *bias,
                                            const float *x, float *y, int64_t samples, int64_t space,
                                            int training) {
    const char *invalid = batch_norm__check_sizes(samples, space);
    if (!norm) return ddp_fail(DDP_ERR_INVALID, "batch_norm_forward: norm is NULL");
    if (!invalid && samples && (!x || !y)) invalid = "x or y is NULL";
    if (!invalid && !weight != !bias) invalid = "only one of weight and bias is NULL; set both, or neither";
    if (training) {
        norm->count = 0;
        DDP_TRY(batch_norm__sum(norm, "batch_norm_forward", invalid, x, NULL, samples, space));
        double n = (double)norm->message->count, momentum = norm->desc.momentum;
        if (norm->message->count < 2)
            return ddp_fail(DDP_ERR_INVALID,
                            "batch_norm_forward: %lld values per channel; training needs 2 or more",
                            (long long)norm->message->count);
        for (int c = 0; c < norm->desc.channels; c++) {
            double mean = ddp_exact_sum_value(&norm->sums[c].first) / n;
            double variance = ddp_exact_sum_value(&norm->sums[c].second) / n - mean * mean;
            if (variance < 0) variance = 0; /* by rounding, if all values are nearly equal */
            norm->mean[c] = mean;
            norm->inv_std[c] = 1 / sqrt(variance + norm->desc.eps);
            norm->running_mean[c] = (float)((1 - momentum) * norm->running_mean[c] + momentum * mean);
            norm->running_var[c] = (float)((1 - momentum) * norm->running_var[c]
                                           + momentum * variance * (n / (n - 1)));
        }
        norm->count = norm->message->count;
        norm->forward_count++;
    } else if (invalid) {
        return ddp_fail(DDP_ERR_INVALID, "batch_norm_forward: %s", invalid);
    }
    for (int64_t row = 0; row < samples * norm->desc.channels; row++) {
        int c = (int)(row % norm->desc.channels);
        double variance = norm->running_var[c];
        double inv_std = training ? norm->inv_std[c] : 1 / sqrt(variance + norm->desc.eps);
        float mean = training ? (float)norm->mean[c] : norm->running_mean[c];
        float scale = (float)inv_std * (weight ? weight[c] : 1);
        float shift = bias ? bias[c] : 0;
        for (int64_t i = row * space; i < (row + 1) * space; i++) y[i] = (x[i] - mean) * scale + shift;
    }
    return DDP_OK;
}

/* Gradients of the last training forward, with its x, weight and sizes. dx may be dy. d_weight, d_bias:
   (channels), overwritten; both NULL if weight is NULL.
   Without a group they are sums over this rank's samples. With a group they are sums over the samples of all
   ranks, divided by the number of ranks: the averages that a reducer computes from SyncBatchNorm's gradients.
   All ranks get the same ones, so that a reducer may average them again. If the number of ranks is not a
   power of two, this can round them once more.
   With a group it is collective and blocks. Errors: DDP_ERR_INVALID, also if the forward is missing. */
static inline ddp_result batch_norm_backward(batch_norm *norm, const float *weight, const float *x,
                                             const float *dy, float *dx, float *d_weight, float *d_bias,
                                             int64_t samples, int64_t space) {
    const char *invalid = batch_norm__check_sizes(samples, space);
    if (!norm) return ddp_fail(DDP_ERR_INVALID, "batch_norm_backward: norm is NULL");
    if (!invalid && norm->count == 0)
        invalid = "the training forward is missing; call batch_norm_forward first";
    if (!invalid && samples && (!x || !dy || !dx)) invalid = "x, dy or dx is NULL";
    if (!invalid && (!weight != !d_weight || !weight != !d_bias))
        invalid = "only some of weight, d_weight and d_bias are NULL; set all, or none";
    DDP_TRY(batch_norm__sum(norm, "batch_norm_backward", invalid, dy, x, samples, space));
    if (norm->message->count != norm->count)
        return ddp_fail(DDP_ERR_INVALID,
                        "batch_norm_backward: %lld values per channel, but %lld in the forward before; pass "
                        "the same samples",
                        (long long)norm->message->count, (long long)norm->count);
    double n = (double)norm->count;
    int ranks = norm->desc.group ? ddp_world_size(norm->desc.group) : 1;
    for (int c = 0; c < norm->desc.channels; c++) {
        double sum = ddp_exact_sum_value(&norm->sums[c].first), mean = norm->mean[c];
        double dot = (ddp_exact_sum_value(&norm->sums[c].second) - mean * sum) * norm->inv_std[c];
        double scale = norm->inv_std[c] * (weight ? (double)weight[c] : 1);
        /* dx = scale (dy - sum / n - normalized x * dot / n) = scale dy + of_x x + constant */
        float of_dy = (float)scale, of_x = (float)(-scale * norm->inv_std[c] * dot / n);
        float constant = (float)(-scale * sum / n);
        if (weight) {
            d_weight[c] = (float)(dot / ranks);
            d_bias[c] = (float)(sum / ranks);
        }
        for (int64_t s = 0; s < samples; s++) {
            int64_t begin = (s * norm->desc.channels + c) * space;
            for (int64_t i = begin; i < begin + space; i++)
                dx[i] = of_dy * dy[i] + of_x * (x[i] - (float)mean) + constant;
        }
    }
    return DDP_OK;
}

#endif /* DDP_EXAMPLE_BATCH_NORM_H */

/*  training.h - metrics over all ranks, early stopping, a check for drifting parameters, data that rank 0
    prepares, messages of any size, and log lines.

USAGE
    Copy it next to ddp.h and include it after ddp.h. All functions are static.

EXAMPLE
    metric accuracy = DDP_ZERO;                 // on each rank, for its samples of an evaluation
    while ((sample = ddp_sampler_next(&sampler, &is_padding)) >= 0)
        metric_add(&accuracy, is_right(sample), is_padding);
    metric_all_reduce(world, &accuracy, 1, dataset_size, &total);

    drift_check(world, params, param_count, step, 100);  // after each step; compares in every 100th step

    rank0_first(world, download_and_unpack, &job);       // the other ranks wait until rank 0 has finished

    early_stop stop = {5, 0.001};                        // patience, min_delta
    early_stop_check(world, &stop, validation_loss, &is_best, &is_over);
    if (is_best) ddp_fsdp_save(fsdp, "best", NULL);

    gather_bytes(world, text, strlen(text), 0, &texts);  // rank 0: texts.data[r], texts.size_bytes[r]
    broadcast_bytes(world, 0, &config, &config_bytes);   // sets the size on the other ranks
    log_rank0(world, "step %d", step);                   // one line for all ranks
    log_each(world, "step %d", step);                    // [rank 2/8] step 100

CONCEPTS
    metric        Sums are exact (ddp_exact_sum): the mean has the same bits on any number of ranks and in any
                  order of samples. Padding samples of the sampler are not counted.
    drift_check   Compares one hash per rank. Only if they differ, it compares each parameter and names it.
    early_stop    Rank 0's loss decides, so that all ranks stop in the same step even if their losses differ.
    *_bytes       Objects of any size: receivers get the size with the data. Ranks first agree on memory.
    log_*         One write per line: lines of different ranks do not mix. Not collective.
    rank0_first   May take longer than the group's timeout. Rank 0 sends heartbeats while it works, so that
                  the other ranks notice when it dies.
    With device memory, use the CPU group that the device group was made from, and copy the parameters to
    host memory for drift_check.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). An invalid argument on one rank is an error on all ranks;
    the other ranks name the rank that has it. Only a NULL group or NULL out is a local error.

NOT DONE HERE
    No metrics that are not sums, such as AUC. No drift check of optimizer state. No preparation per node.
*/
#ifndef DDP_EXAMPLE_TRAINING_H
#define DDP_EXAMPLE_TRAINING_H

#ifndef DDP_H
#include "../../ddp.h"
#endif
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

//== errors of one rank =====================================================================================

/* Result and error line of one rank, in the form in which they are broadcast. */
typedef struct training__status {
    int32_t result;
    char text[508];
} training__status;

static inline training__status training__status_of(ddp_result result) {
    training__status status;
    memset(&status, 0, sizeof status);
    status.result = result;
    if (result != DDP_OK) snprintf(status.text, sizeof status.text, "%.507s", ddp_last_error());
    return status;
}

/* This rank if it has failed, otherwise the world size. An all-reduce with DDP_OP_MIN over these values gives
   the lowest failed rank. */
static inline uint64_t training__failed_rank(ddp_group *group, const training__status *own) {
    return (uint64_t)(own->result == DDP_OK ? ddp_world_size(group) : ddp_rank(group));
}

/* Returns the error of rank failed_rank on every rank. A rank that has failed itself returns its own error.
   DDP_OK if no rank has failed. Collective. */
static inline ddp_result training__share_error(ddp_group *group, uint64_t failed_rank,
                                               const training__status *own) {
    training__status status = *own;
    if (failed_rank >= (uint64_t)ddp_world_size(group)) return DDP_OK;
    DDP_TRY(ddp_broadcast(group, &status, sizeof status, DDP_U8, (int)failed_rank, NULL));
    if (own->result != DDP_OK) return ddp_fail((ddp_result)own->result, "%s", own->text);
    return ddp_fail((ddp_result)status.result, "on rank %d %.480s", (int)failed_rank, status.text);
}

/* All ranks return the first error among their results, in rank order. Collective. */
static inline ddp_result training__agree(ddp_group *group, ddp_result result) {
    training__status own = training__status_of(result);
    uint64_t failed_rank = training__failed_rank(group, &own);
    DDP_TRY(ddp_all_reduce(group, &failed_rank, &failed_rank, 1, DDP_U64, DDP_OP_MIN, NULL));
    return training__share_error(group, failed_rank, &own);
}

//== metrics ================================================================================================

/* Sum and count over the samples of one rank. Initialise it with zeros. The sum is exact, so it does not
   depend on the order of samples or on their distribution over ranks. */
typedef struct metric {
    ddp_exact_sum sum;
    int64_t count;
} metric;

/* Result over all ranks. */
typedef struct metric_total {
    double sum;  /* exact sum, rounded once */
    double mean; /* sum / count */
    int64_t count;
} metric_total;

/* Adds one sample: its loss, or 1 or 0 for a right or wrong prediction.
   is_padding: the flag of ddp_sampler_next; a padding sample is not counted.
   After an infinite or NaN value the sum and the mean are infinite or NaN. */
static inline void metric_add(metric *m, double value, int is_padding) {
    if (is_padding) return;
    ddp_exact_sum_add(&m->sum, value);
    m->count++;
}

/* Checks the arguments of this rank. */
static inline ddp_result metric__check(const metric *metrics, int metric_count, int64_t sample_count,
                                       const metric_total *totals) {
    if (!metrics || !totals) return ddp_fail(DDP_ERR_INVALID, "metric_all_reduce: metrics or totals is NULL");
    if (metric_count < 1)
        return ddp_fail(DDP_ERR_INVALID, "metric_all_reduce: metric_count=%d; give at least one",
                        metric_count);
    if (sample_count < 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "metric_all_reduce: sample_count=%lld; give the size of the data set, or 0",
                        (long long)sample_count);
    return DDP_OK;
}

/* Sums metric_count metrics over all ranks into totals, then resets the metrics to zero.
   sample_count: samples that all ranks together must have added to each metric; 0 = not checked.
   Collective, with the same counts on every rank; blocking. A rank may have added no samples.
   Errors are the same on every rank, even if only one rank has an invalid argument:
       DDP_ERR_INVALID    also if a metric has no samples, or not sample_count of them
       DDP_ERR_MISMATCH   metric_count differs between ranks
       DDP_ERR_NO_MEMORY
   On an error metrics and totals are unchanged.
   A NULL group is an error on this rank only. */
static inline ddp_result metric_all_reduce(ddp_group *group, metric *metrics, int metric_count,
                                           int64_t sample_count, metric_total *totals) {
    enum { CELLS = (int)(sizeof(metric) / sizeof(int64_t)) };
    metric *sums = NULL;
    ddp_result result;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "metric_all_reduce: group is NULL");
    result = metric__check(metrics, metric_count, sample_count, totals);
    if (result == DDP_OK) {
        sums = (metric *)malloc((size_t)metric_count * sizeof *sums);
        if (!sums) result = ddp_fail(DDP_ERR_NO_MEMORY, "metric_all_reduce: %d metrics", metric_count);
    }
    result = training__agree(group, result);
    if (result == DDP_OK)
        result = ddp_all_reduce(group, metrics, sums, (size_t)metric_count * CELLS, DDP_I64, DDP_OP_SUM,
                                NULL);
    for (int i = 0; i < metric_count && result == DDP_OK; i++) {
        if (sums[i].count == 0)
            result = ddp_fail(DDP_ERR_INVALID,
                              "metric_all_reduce: metric %d of %d has no samples; call metric_add first", i,
                              metric_count);
        else if (sample_count && sums[i].count != sample_count)
            result = ddp_fail(DDP_ERR_INVALID,
                              "metric_all_reduce: metric %d of %d has %lld samples, expected %lld; %s", i,
                              metric_count, (long long)sums[i].count, (long long)sample_count,
                              sums[i].count > sample_count
                                  ? "pass is_padding of ddp_sampler_next to metric_add, or use no_pad"
                                  : "evaluate the whole epoch, without drop_last");
    }
    for (int i = 0; i < metric_count && result == DDP_OK; i++) {
        totals[i].sum = ddp_exact_sum_value(&sums[i].sum);
        totals[i].count = sums[i].count;
        totals[i].mean = totals[i].sum / (double)totals[i].count;
    }
    if (result == DDP_OK) memset(metrics, 0, (size_t)metric_count * sizeof *metrics);
    free(sums);
    return result;
}

//== early stopping =========================================================================================

/* Stops a training that no longer improves. Set the first two fields; the others start with zeros. */
typedef struct early_stop {
    int patience;              /* required; checks in a row without an improvement before the training ends */
    double min_delta;          /* a loss improves if it is below the best one by more than this; 0 or more */
    double best;               /* the last loss that improved */
    int64_t improvement_count; /* checks that improved */
    int checks_without_improvement; /* in a row, until now */
} early_stop;

static inline ddp_result early_stop__check_fields(const early_stop *stop) {
    if (stop->patience < 1 || !(stop->min_delta >= 0))
        return ddp_fail(DDP_ERR_INVALID,
                        "early_stop_check: patience=%d min_delta=%g; patience must be 1 or more, min_delta 0 "
                        "or more",
                        stop->patience, stop->min_delta);
    return DDP_OK;
}

/* Compares the loss of rank 0 with the best one. *is_best 1: it has improved, so save a checkpoint.
   *is_over 1: the last `patience` checks have brought no improvement, so end the training. All ranks get the
   same answers. A NaN is no improvement. The struct is plain data: store it in a checkpoint to resume.
   Collective; blocking. loss is read only on rank 0.
   Errors are the same on every rank, and *stop is unchanged: DDP_ERR_INVALID for invalid fields on any
   rank. */
static inline ddp_result early_stop_check(ddp_group *group, early_stop *stop, double loss, int *is_best,
                                          int *is_over) {
    uint64_t seen[2] = {0, UINT64_MAX}; /* the lowest failed rank, and the bits of rank 0's loss */
    training__status own;
    ddp_result result;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "early_stop_check: group is NULL");
    if (!stop || !is_best || !is_over)
        result = ddp_fail(DDP_ERR_INVALID, "early_stop_check: stop, is_best or is_over is NULL");
    else
        result = early_stop__check_fields(stop);
    own = training__status_of(result);
    seen[0] = training__failed_rank(group, &own);
    if (ddp_rank(group) == 0 && loss == loss) memcpy(&seen[1], &loss, sizeof loss);
    result = ddp_all_reduce(group, seen, seen, 2, DDP_U64, DDP_OP_MIN, NULL);
    if (result == DDP_OK) result = training__share_error(group, seen[0], &own);
    if (result != DDP_OK) return result;
    memcpy(&loss, &seen[1], sizeof loss); /* all ones are a NaN */
    *is_best = loss == loss && (!stop->improvement_count || loss < stop->best - stop->min_delta);
    if (*is_best) {
        stop->best = loss;
        stop->improvement_count++;
        stop->checks_without_improvement = 0;
    } else {
        stop->checks_without_improvement++;
    }
    *is_over = stop->checks_without_improvement >= stop->patience;
    return DDP_OK;
}

//== drift ==================================================================================================

static inline uint64_t drift__mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash << 29 | hash >> 35;
}

/* Hash of the bits: 0.0 and -0.0 differ. Four independent chains make it as fast as memory is read. */
static inline uint64_t drift_hash(const void *data, size_t size_bytes) {
    const unsigned char *at = (const unsigned char *)data;
    uint64_t chain[4] = {1, 2, 3, 4}, words[4], hash = size_bytes;
    for (size_t left = size_bytes; left > 0;) {
        size_t n = left < sizeof words ? left : sizeof words;
        if (n < sizeof words) memset(words, 0, sizeof words);
        memcpy(words, at, n);
        for (int i = 0; i < 4; i++) chain[i] = drift__mix(chain[i], words[i]);
        at += n;
        left -= n;
    }
    for (int i = 0; i < 4; i++) hash = drift__mix(hash, chain[i]);
    return hash ^ hash >> 32;
}

static inline uint64_t drift__tensor_hash(const ddp_param *param) {
    return drift_hash(param->value.data,
                      (size_t)ddp_tensor_count(&param->value) * ddp_dtype_size(param->value.dtype));
}

/* Lists the ranks outside the majority as " 1 5 6" and returns their number. The majority has the most
   frequent hash; among equally frequent ones, that of the lowest rank. */
static inline int drift__minority(const uint64_t *hash, int ranks, char *text, size_t size) {
    int best = 0, votes = 0, others = 0;
    size_t used = 0;
    for (int r = 0; r < ranks; r++) {
        int same = 0;
        for (int k = 0; k < ranks; k++) same += hash[k] == hash[r];
        if (same > votes) {
            best = r;
            votes = same;
        }
    }
    for (int r = 0; r < ranks; r++) {
        if (hash[r] == hash[best]) continue;
        others++;
        if (used + 16 < size)
            used += (size_t)snprintf(text + used, size - used, " %d", r);
        else if (used + 5 < size)
            used += (size_t)snprintf(text + used, size - used, " ...");
    }
    return others;
}

/* Called when the ranks' hashes differ. The error names the first parameter that differs, the number of such
   parameters, and the ranks outside the majority. Collective. */
static inline ddp_result drift__report(ddp_group *group, const ddp_param *params, int param_count,
                                       int64_t step) {
    int ranks = ddp_world_size(group), tensors = 0, others = 0;
    uint64_t *hash = (uint64_t *)malloc((size_t)ranks * sizeof *hash);
    char list[160] = "", name[64] = "";
    ddp_result result = DDP_OK;
    if (!hash) result = ddp_fail(DDP_ERR_NO_MEMORY, "drift_check: the hashes of %d ranks", ranks);
    for (int i = 0; i < param_count && result == DDP_OK; i++) {
        uint64_t mine = drift__tensor_hash(&params[i]);
        int differ = 0;
        result = ddp_all_gather(group, &mine, hash, 1, DDP_U64, NULL);
        for (int r = 1; r < ranks && result == DDP_OK; r++) differ |= hash[r] != hash[0];
        if (!differ || tensors++) continue;
        snprintf(name, sizeof name, "%d \"%.48s\"", i, params[i].name ? params[i].name : "");
        others = drift__minority(hash, ranks, list, sizeof list);
    }
    free(hash);
    if (result != DDP_OK) return result;
    if (!tensors)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "drift_check: step %lld: parameters changed while they were read; call it between "
                        "optimizer steps",
                        (long long)step);
    return ddp_fail(DDP_ERR_CORRUPT,
                    "drift_check: step %lld: parameter %s, the first of %d that differ, has other values on "
                    "rank%s%s than on the other %d; look for rank-dependent arithmetic, or for writes "
                    "outside the optimizer step",
                    (long long)step, name, tensors, others > 1 ? "s" : "", list, ranks - others);
}

/* Checks the arguments of this rank and sets *hash to the hash of all its parameters. */
static inline ddp_result drift__hash(const ddp_param *params, int param_count, int64_t step, int64_t every,
                                     uint64_t *hash) {
    *hash = 0;
    if (step < 0 || every < 1)
        return ddp_fail(DDP_ERR_INVALID,
                        "drift_check: step=%lld every=%lld; step must be 0 or more, every 1 or more",
                        (long long)step, (long long)every);
    if (param_count < 0)
        return ddp_fail(DDP_ERR_INVALID, "drift_check: param_count=%d; give 0 or more", param_count);
    if (!params && param_count > 0) return ddp_fail(DDP_ERR_INVALID, "drift_check: params is NULL");
    for (int i = 0; i < param_count; i++) {
        int64_t count = ddp_tensor_count(&params[i].value);
        if (count < 0 || !ddp_dtype_size(params[i].value.dtype) || (count > 0 && !params[i].value.data))
            return ddp_fail(DDP_ERR_INVALID,
                            "drift_check: parameter %d \"%.48s\": value.data is NULL, or value has an "
                            "invalid dtype or shape",
                            i, params[i].name ? params[i].name : "");
        *hash = drift__mix(*hash, drift__tensor_hash(&params[i]));
    }
    return DDP_OK;
}

/* Checks that all ranks have the same parameters, bit for bit. Compares if step is a multiple of `every`;
   at other steps it returns at once. Reads the values once and sends 40 bytes.
   Collective, with the same step and `every` on every rank; blocking.
   Errors are the same on every rank, even if only one rank has an invalid argument:
       DDP_ERR_CORRUPT    names the first parameter that differs, and the ranks outside the majority
       DDP_ERR_MISMATCH   param_count differs between ranks
       DDP_ERR_INVALID
   A rank with an invalid step or `every` compares at once. If the other ranks return without comparing, the
   next collective call fails on all ranks.
   A NULL group is an error on this rank only. */
static inline ddp_result drift_check(ddp_group *group, const ddp_param *params, int param_count, int64_t step,
                                     int64_t every) {
    /* seen holds numbers and their complements: DDP_OP_MIN over both gives minimum and maximum over ranks. */
    uint64_t seen[5], hash;
    training__status own;
    ddp_result result;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "drift_check: group is NULL");
    if (step >= 0 && every > 0 && step % every) return DDP_OK;
    own = training__status_of(drift__hash(params, param_count, step, every, &hash));
    seen[0] = hash;
    seen[1] = ~hash;
    seen[2] = (uint64_t)param_count;
    seen[3] = ~(uint64_t)param_count;
    seen[4] = training__failed_rank(group, &own);
    result = ddp_all_reduce(group, seen, seen, 5, DDP_U64, DDP_OP_MIN, NULL);
    if (result == DDP_OK) result = training__share_error(group, seen[4], &own);
    if (result != DDP_OK) return result;
    if (seen[2] != ~seen[3])
        return ddp_fail(DDP_ERR_MISMATCH,
                        "drift_check: param_count differs: it is %d to %d; pass the same on every rank",
                        (int)seen[2], (int)~seen[3]);
    return seen[0] == ~seen[1] ? DDP_OK : drift__report(group, params, param_count, step);
}

//== rank 0 first ===========================================================================================

typedef ddp_result (*rank0_fn)(void *user);

/* Contents of a heartbeat: whether prepare has returned, its result and its error line. */
typedef struct rank0__heartbeat {
    int32_t done, result;
    char text[512];
} rank0__heartbeat;

typedef struct rank0__job {
    rank0_fn prepare;
    void *user;
    pthread_mutex_t lock;
    pthread_cond_t finished;
    rank0__heartbeat status; /* protected by lock */
} rank0__job;

static inline void rank0__finish(rank0__job *job, ddp_result result, const char *text) {
    pthread_mutex_lock(&job->lock);
    job->status.done = 1;
    job->status.result = result;
    if (result != DDP_OK) snprintf(job->status.text, sizeof job->status.text, "%s", text);
    pthread_cond_signal(&job->finished);
    pthread_mutex_unlock(&job->lock);
}

static inline void *rank0__thread(void *argument) {
    rank0__job *job = (rank0__job *)argument;
    ddp_result result = job->prepare(job->user);
    rank0__finish(job, result, ddp_last_error());
    return NULL;
}

/* Waits until prepare has returned, at most sleep_ms. Returns the heartbeat to send. */
static inline rank0__heartbeat rank0__wait(rank0__job *job, int sleep_ms) {
    rank0__heartbeat beat;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += sleep_ms / 1000;
    until.tv_nsec += sleep_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_mutex_lock(&job->lock);
    while (!job->status.done && pthread_cond_timedwait(&job->finished, &job->lock, &until) == 0) {
    }
    beat = job->status;
    pthread_mutex_unlock(&job->lock);
    return beat;
}

/* Rank 0: runs prepare on a thread. Broadcasts a heartbeat four times per timeout, at least once per second,
   until prepare has returned. */
static inline ddp_result rank0__run(ddp_group *group, rank0__job *job, rank0__heartbeat *beat) {
    int sleep_ms = ddp_group_timeout_ms(group) / 4 + 1, running = 0;
    pthread_condattr_t clock;
    pthread_t thread;
    ddp_result result;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->finished, &clock);
    if (!job->prepare)
        rank0__finish(job, DDP_ERR_INVALID, "rank0_first: prepare is NULL on rank 0");
    else if (ddp_world_size(group) == 1)
        rank0__thread(job);
    else if (pthread_create(&thread, NULL, rank0__thread, job) == 0)
        running = 1;
    else
        rank0__finish(job, DDP_ERR_SYSTEM, "rank0_first: rank 0 cannot create a thread; raise ulimit -u");
    do {
        *beat = rank0__wait(job, sleep_ms < 1000 ? sleep_ms : 1000);
        result = ddp_broadcast(group, beat, sizeof *beat, DDP_U8, 0, NULL);
    } while (result == DDP_OK && !beat->done);
    if (running) pthread_join(thread, NULL);
    pthread_cond_destroy(&job->finished);
    pthread_mutex_destroy(&job->lock);
    pthread_condattr_destroy(&clock);
    return result;
}

/* Runs prepare(user) on rank 0. The other ranks wait, then return its result and its ddp_last_error().
   prepare may take longer than the group's timeout, because rank 0 sends heartbeats. If rank 0 dies or is
   stopped, the other ranks return an error.
   prepare runs on its own thread and must not call functions with the group. If another rank dies, prepare
   still runs to its end; then rank 0 returns the error.
   Collective, blocking. prepare and user are read only on rank 0.
   Errors: the result of prepare; DDP_ERR_INVALID if prepare is NULL on rank 0; DDP_ERR_SYSTEM; the errors of
   ddp_broadcast. */
static inline ddp_result rank0_first(ddp_group *group, rank0_fn prepare, void *user) {
    rank0__job job;
    rank0__heartbeat beat;
    ddp_result result;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "rank0_first: group is NULL");
    memset(&job, 0, sizeof job);
    memset(&beat, 0, sizeof beat);
    job.prepare = prepare;
    job.user = user;
    if (ddp_rank(group) == 0) {
        result = rank0__run(group, &job, &beat);
    } else {
        do {
            result = ddp_broadcast(group, &beat, sizeof beat, DDP_U8, 0, NULL);
        } while (result == DDP_OK && !beat.done);
    }
    if (result != DDP_OK || beat.result == DDP_OK) return result;
    return ddp_fail((ddp_result)beat.result, "%s", beat.text);
}

//== messages of any size ===================================================================================

/* Byte strings, one per rank. */
typedef struct byte_list {
    int count;            /* 0 on ranks that received none */
    unsigned char **data; /* (count) */
    uint64_t *size_bytes; /* (count) */
} byte_list;

/* Frees the strings and makes the list empty. */
static inline void byte_list_free(byte_list *list) {
    free(list->data); /* all memory of the list */
    memset(list, 0, sizeof *list);
}

/* Allocates a list for strings of the given sizes. */
static inline ddp_result byte_list__alloc(byte_list *list, const uint64_t *sizes, int count) {
    uint64_t total = (uint64_t)count * (sizeof *list->data + sizeof *list->size_bytes);
    for (int r = 0; r < count; r++) {
        if (sizes[r] > SIZE_MAX / 2 - total)
            return ddp_fail(DDP_ERR_NO_MEMORY, "gather_bytes: %llu bytes of rank %d",
                            (unsigned long long)sizes[r], r);
        total += sizes[r] + 1;
    }
    list->data = (unsigned char **)malloc((size_t)total);
    if (!list->data)
        return ddp_fail(DDP_ERR_NO_MEMORY, "gather_bytes: %llu bytes for the strings of %d ranks",
                        (unsigned long long)total, count);
    list->size_bytes = (uint64_t *)(void *)(list->data + count);
    list->count = count;
    unsigned char *place = (unsigned char *)(list->size_bytes + count);
    for (int r = 0; r < count; r++) {
        list->data[r] = place;
        list->size_bytes[r] = sizes[r];
        place[sizes[r]] = 0; /* a text can be printed */
        place += sizes[r] + 1;
    }
    return DDP_OK;
}

/* Sends size_bytes bytes of data from each rank to root. There *out holds the strings of all ranks, each with
   a zero after its last byte. On other ranks *out is empty. Sizes may differ and may be 0, then data may be
   NULL. Free *out with byte_list_free.
   Collective, with the same root; blocking.
   Errors are the same on every rank, and *out is empty: DDP_ERR_INVALID; DDP_ERR_NO_MEMORY of root; those of
   ddp_send. */
static inline ddp_result gather_bytes(ddp_group *group, const void *data, size_t size_bytes, int root,
                                      byte_list *out) {
    if (out) memset(out, 0, sizeof *out);
    if (!group || !out) return ddp_fail(DDP_ERR_INVALID, "gather_bytes: group or out is NULL");
    int ranks = ddp_world_size(group), rank = ddp_rank(group);
    uint64_t own[2] = {size_bytes, (uint64_t)root}; /* of each rank: size, then root */
    uint64_t *sizes = (uint64_t *)malloc((size_t)ranks * sizeof own);
    ddp_result result = DDP_OK;
    if (!sizes)
        result = ddp_fail(DDP_ERR_NO_MEMORY, "gather_bytes: the sizes of %d ranks", ranks);
    else if (root < 0 || root >= ranks)
        result = ddp_fail(DDP_ERR_INVALID, "gather_bytes: root=%d; use 0 to %d", root, ranks - 1);
    else if (!data && size_bytes)
        result = ddp_fail(DDP_ERR_INVALID, "gather_bytes: data is NULL");
    result = training__agree(group, result);
    if (result == DDP_OK) result = ddp_all_gather(group, own, sizes, 2, DDP_U64, NULL);
    for (int r = 0; r < ranks && result == DDP_OK; r++) {
        int other = (int)sizes[2 * r + 1];
        sizes[r] = sizes[2 * r];
        if (other != root)
            result = ddp_fail(DDP_ERR_MISMATCH,
                              "gather_bytes: root=%d, but %d on rank %d; pass the same on every rank", root,
                              other, r);
    }
    if (result == DDP_OK)
        result = training__agree(group, rank == root ? byte_list__alloc(out, sizes, ranks) : DDP_OK);
    for (int r = 0; r < ranks && rank == root && result == DDP_OK; r++) {
        if (r == root)
            memcpy(out->data[r], data ? data : "", size_bytes);
        else if (sizes[r])
            result = ddp_recv(group, out->data[r], (size_t)sizes[r], DDP_U8, r, 0, NULL);
    }
    if (rank != root && size_bytes && result == DDP_OK)
        result = ddp_send(group, data, size_bytes, DDP_U8, root, 0, NULL);
    free(sizes);
    if (result != DDP_OK) byte_list_free(out);
    return result;
}

/* Broadcasts bytes of root to all ranks. In: on root, *data and *size_bytes. Out: on other ranks *size_bytes,
   and *data is a copy with a zero after its last byte, to be freed with free().
   Collective, with the same root; blocking.
   Errors are the same on every rank; *data on other ranks is then NULL: DDP_ERR_INVALID; DDP_ERR_NO_MEMORY;
   those of ddp_broadcast. */
static inline ddp_result broadcast_bytes(ddp_group *group, int root, void **data, size_t *size_bytes) {
    if (!group || !data || !size_bytes)
        return ddp_fail(DDP_ERR_INVALID, "broadcast_bytes: group, data or size_bytes is NULL");
    int ranks = ddp_world_size(group), is_root = ddp_rank(group) == root;
    uint64_t size = *size_bytes;
    ddp_result result = DDP_OK;
    if (!is_root) *data = NULL;
    if (root < 0 || root >= ranks)
        result = ddp_fail(DDP_ERR_INVALID, "broadcast_bytes: root=%d; use 0 to %d", root, ranks - 1);
    else if (is_root && !*data && size)
        result = ddp_fail(DDP_ERR_INVALID, "broadcast_bytes: data is NULL on root");
    DDP_TRY(training__agree(group, result));
    DDP_TRY(ddp_broadcast(group, &size, 1, DDP_U64, root, NULL));
    if (!is_root && size < SIZE_MAX) *data = calloc(1, (size_t)size + 1);
    if (!*data && size)
        result = ddp_fail(DDP_ERR_NO_MEMORY, "broadcast_bytes: %llu bytes", (unsigned long long)size);
    result = training__agree(group, result);
    if (result == DDP_OK && size) result = ddp_broadcast(group, *data, (size_t)size, DDP_U8, root, NULL);
    *size_bytes = (size_t)size;
    if (result == DDP_OK || is_root) return result;
    free(*data);
    *data = NULL;
    return result;
}

//== log ====================================================================================================

static inline void training__log(const char *prefix, const char *format, va_list values) {
    char line[1024];
    size_t used = (size_t)snprintf(line, sizeof line, "%s", prefix);
    vsnprintf(line + used, sizeof line - used - 1, format, values);
    used = strlen(line);
    line[used] = '\n';
    fflush(stdout);
    fwrite(line, 1, used + 1, stdout);
    fflush(stdout); /* one write per line */
}

/* Prints a line to stdout on rank 0, with printf's format and no newline at its end. At most 1000 bytes. */
static inline void log_rank0(ddp_group *group, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void log_rank0(ddp_group *group, const char *format, ...) {
    va_list values;
    if (ddp_rank(group) != 0) return;
    va_start(values, format);
    training__log("", format, values);
    va_end(values);
}

/* Prints a line to stdout on the calling rank. It starts with "[rank 2/8] ". */
static inline void log_each(ddp_group *group, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void log_each(ddp_group *group, const char *format, ...) {
    char prefix[64];
    va_list values;
    snprintf(prefix, sizeof prefix, "[rank %d/%d] ", ddp_rank(group), ddp_world_size(group));
    va_start(values, format);
    training__log(prefix, format, values);
    va_end(values);
}

#endif /* DDP_EXAMPLE_TRAINING_H */

/* MIT License: see LICENSE. */

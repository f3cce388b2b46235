/*  training.h - three things that most training loops need beside the step: a metric over all ranks, a look for weights that drift apart, and
    data that rank 0 prepares while the others wait.

USAGE
    metric accuracy = DDP_ZERO;                                       each rank, over its samples of an evaluation
    while ((sample = ddp_sampler_next(&sampler, &is_padding)) >= 0) metric_add(&accuracy, is_right(sample), is_padding);
    metric_all_reduce(world, &accuracy, 1, dataset_size, &total);     total.mean is the same bits on any number of ranks

    drift_check(world, params, param_count, step, 100);               after every step; looks at every hundredth

    rank0_first(world, download_and_unpack, &job);                    the others wait, however long it takes; a rank 0 that dies is noticed

    Everything is static and needs ddp.h alone. A group over device memory: give the group of host memory that it was made from, and to drift_check
    copies of the values. */
#ifndef DDP_EXAMPLE_TRAINING_H
#define DDP_EXAMPLE_TRAINING_H

#ifndef DDP_H
#include "../../ddp.h"
#endif
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

//== what is wrong on one rank ============================================================================= >>told

typedef struct training__told {
    int32_t result;
    char text[508];
} training__told;

/* This rank's result, with its line. */
static inline training__told training__told_now(ddp_result result) {
    training__told told;
    memset(&told, 0, sizeof told);
    told.result = result;
    if (result != DDP_OK) snprintf(told.text, sizeof told.text, "%.507s", ddp_last_error());
    return told;
}

/* What this rank adds to an all-reduce by DDP_OP_MIN, which leaves the lowest rank that has failed. */
static inline uint64_t training__vote(ddp_group *group, const training__told *own) {
    return (uint64_t)(own->result == DDP_OK ? ddp_world_size(group) : ddp_rank(group));
}

/* Collective: the failure of rank first, on all; a rank that has one of its own keeps that. DDP_OK where there is no such rank. */
static inline ddp_result training__tell(ddp_group *group, uint64_t first, const training__told *own) {
    training__told told = *own;
    ddp_result result;
    if (first >= (uint64_t)ddp_world_size(group)) return DDP_OK;
    result = ddp_broadcast(group, &told, sizeof told, DDP_U8, (int)first, NULL);
    if (result != DDP_OK) return result;
    if (own->result != DDP_OK) return ddp_fail((ddp_result)own->result, "%s", own->text);
    return ddp_fail((ddp_result)told.result, "on rank %d %.480s", (int)first, told.text);
}

//== metrics =============================================================================================== >>metrics

/* What a rank has seen of the samples. Starts as zeros. The sum is exact, so who has added which sample, and when, leaves no trace. */
typedef struct metric {
    ddp_exact_sum sum;
    int64_t count;
} metric;

typedef struct metric_total { /* of all ranks */
    double sum, mean;         /* the exact sum, rounded once, and that by count */
    int64_t count;
} metric_total;

/* One sample: its loss, or 1 and 0 for right and wrong. What a sampler gives only to make ranks even is not counted. A value that is not
   finite makes sum and mean so. */
static inline void metric_add(metric *m, double value, int is_padding) {
    if (is_padding) return;
    ddp_exact_sum_add(&m->sum, value);
    m->count++;
}

/* What is wrong on this rank. */
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

/* Adds up metric_count metrics over ranks, which then start from zeros again. sample_count: how many samples all ranks together must have added to each;
   0 = not checked. Collective, the same counts on every rank; a rank may have added nothing. Errors, the same on every rank, even where one alone has
   given a wrong argument: DDP_ERR_INVALID, also when a metric has no sample at all, or not sample_count of them; DDP_ERR_NO_MEMORY; DDP_ERR_MISMATCH when
   metric_count differs. Nothing is lost then, and *totals is not written. A group that is NULL is an error on that rank alone. */
static inline ddp_result metric_all_reduce(ddp_group *group, metric *metrics, int metric_count,
                                           int64_t sample_count, metric_total *totals) {
    enum { CELLS = (int)(sizeof(metric) / sizeof(int64_t)) };
    metric *sums = NULL;
    training__told own;
    uint64_t first;
    ddp_result result;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "metric_all_reduce: group is NULL");
    result = metric__check(metrics, metric_count, sample_count, totals);
    if (result == DDP_OK && !(sums = (metric *)malloc((size_t)metric_count * sizeof *sums)))
        result = ddp_fail(DDP_ERR_NO_MEMORY, "metric_all_reduce: %d metrics", metric_count);
    own = training__told_now(result);
    first = training__vote(group, &own);
    result = ddp_all_reduce(group, &first, &first, 1, DDP_U64, DDP_OP_MIN, NULL);
    if (result == DDP_OK) result = training__tell(group, first, &own);
    if (result == DDP_OK)
        result = ddp_all_reduce(group, metrics, sums, (size_t)metric_count * CELLS, DDP_I64, DDP_OP_SUM,
                                NULL);
    for (int i = 0; i < metric_count && result == DDP_OK; i++)
        if (sums[i].count == 0)
            result = ddp_fail(DDP_ERR_INVALID, "metric %d of %d: no rank has added a sample", i,
                              metric_count);
        else if (sample_count && sums[i].count != sample_count)
            result = ddp_fail(DDP_ERR_INVALID, "metric %d of %d: %lld samples were added, there are %lld; %s",
                              i, metric_count, (long long)sums[i].count, (long long)sample_count,
                              sums[i].count > sample_count
                                  ? "pass on is_padding of ddp_sampler_next, or use no_pad"
                                  : "go through the whole epoch, without drop_last");
    for (int i = 0; i < metric_count && result == DDP_OK; i++) {
        totals[i].sum = ddp_exact_sum_value(&sums[i].sum);
        totals[i].count = sums[i].count;
        totals[i].mean = totals[i].sum / (double)totals[i].count;
    }
    if (result == DDP_OK) memset(metrics, 0, (size_t)metric_count * sizeof *metrics);
    free(sums);
    return result;
}

//== drift ==================================================================================================== >>drift

static inline uint64_t drift__mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash << 29 | hash >> 35;
}

/* Of bits: 0.0 and -0.0 differ. Four chains side by side, as fast as memory is read. */
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

/* The ranks whose hash is not what most have (of equally many, what the lowest has), as " 1 5 6"; returns how many. */
static inline int drift__others(const uint64_t *hash, int ranks, char *text, size_t size) {
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

/* Ranks disagree: which tensor is the first, how many they are, and who has what others have not. */
static inline ddp_result drift__name(ddp_group *group, const ddp_param *params, int param_count,
                                     int64_t step) {
    int ranks = ddp_world_size(group), tensors = 0, others = 0;
    uint64_t *hash = (uint64_t *)malloc((size_t)ranks * sizeof *hash);
    char list[160] = "", name[64] = "";
    ddp_result result = hash ? DDP_OK
                             : ddp_fail(DDP_ERR_NO_MEMORY, "drift_check: the hashes of %d ranks", ranks);
    for (int i = 0; i < param_count && result == DDP_OK; i++) {
        uint64_t mine = drift__tensor_hash(&params[i]);
        int differ = 0;
        result = ddp_all_gather(group, &mine, hash, 1, DDP_U64, NULL);
        for (int r = 1; r < ranks && result == DDP_OK; r++) differ |= hash[r] != hash[0];
        if (!differ || tensors++) continue;
        snprintf(name, sizeof name, "%d \"%.48s\"", i, params[i].name ? params[i].name : "");
        others = drift__others(hash, ranks, list, sizeof list);
    }
    free(hash);
    if (result != DDP_OK) return result;
    if (!tensors)
        return ddp_fail(DDP_ERR_CORRUPT, "step %lld: parameters change while drift_check reads them",
                        (long long)step);
    return ddp_fail(DDP_ERR_CORRUPT,
                    "step %lld: ranks have drifted apart: parameter %s, the first of %d that differ, is "
                    "another on rank%s%s than on the other %d; "
                    "they compute differently, or something wrote to it outside of the step",
                    (long long)step, name, tensors, others > 1 ? "s" : "", list, ranks - others);
}

/* What is wrong on this rank; *hash: of all its parameters. */
static inline ddp_result drift__hash(const ddp_param *params, int param_count, int64_t step, int64_t every,
                                     uint64_t *hash) {
    *hash = 0;
    if (step < 0 || every < 1)
        return ddp_fail(DDP_ERR_INVALID,
                        "drift_check: step=%lld every=%lld; give a step from 0 and at least every 1",
                        (long long)step, (long long)every);
    if (param_count < 0)
        return ddp_fail(DDP_ERR_INVALID, "drift_check: param_count=%d; give 0 or more", param_count);
    if (!params && param_count > 0) return ddp_fail(DDP_ERR_INVALID, "drift_check: params is NULL");
    for (int i = 0; i < param_count; i++) {
        int64_t count = ddp_tensor_count(&params[i].value);
        if (count < 0 || !ddp_dtype_size(params[i].value.dtype) || (count > 0 && !params[i].value.data))
            return ddp_fail(
                DDP_ERR_INVALID,
                "drift_check: parameter %d \"%.48s\": its value has no data, or a wrong dtype or shape", i,
                params[i].name ? params[i].name : "");
        *hash = drift__mix(*hash, drift__tensor_hash(&params[i]));
    }
    return DDP_OK;
}

/* Whether all ranks have the same parameters, bit for bit: once every `every` steps, when step is a multiple of it; at other steps it returns at once. Reads
   the values once and sends 40 bytes. Collective, the same step and every on every rank. Errors, the same on every rank, even where one alone has given a
   wrong argument: DDP_ERR_CORRUPT names the first parameter that differs, and the ranks that have another one than most; DDP_ERR_MISMATCH when
   param_count differs; DDP_ERR_INVALID. A rank whose step or every is wrong looks now: where the others do not, their next call does not fit, and
   is an error on all. A group that is NULL is an error on that rank alone. */
static inline ddp_result drift_check(ddp_group *group, const ddp_param *params, int param_count, int64_t step,
                                     int64_t every) {
    uint64_t seen[5],
        hash; /* a number and its complement: the least of both are the least and the greatest over ranks */
    training__told own;
    ddp_result result;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "drift_check: group is NULL");
    if (step >= 0 && every > 0 && step % every) return DDP_OK;
    own = training__told_now(drift__hash(params, param_count, step, every, &hash));
    seen[0] = hash;
    seen[1] = ~hash;
    seen[2] = (uint64_t)param_count;
    seen[3] = ~(uint64_t)param_count;
    seen[4] = training__vote(group, &own);
    result = ddp_all_reduce(group, seen, seen, 5, DDP_U64, DDP_OP_MIN, NULL);
    if (result == DDP_OK) result = training__tell(group, seen[4], &own);
    if (result != DDP_OK) return result;
    if (seen[2] != ~seen[3])
        return ddp_fail(DDP_ERR_MISMATCH,
                        "drift_check: ranks gave between %d and %d parameters; give the same everywhere",
                        (int)seen[2], (int)~seen[3]);
    return seen[0] == ~seen[1] ? DDP_OK : drift__name(group, params, param_count, step);
}

//== rank 0 first ========================================================================================= >>rank0_first

typedef ddp_result (*rank0_fn)(void *user);

typedef struct rank0__beat {
    int32_t done, result;
    char text[512];
} rank0__beat; /* what a heartbeat carries */

typedef struct rank0__job {
    rank0_fn prepare;
    void *user;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    rank0__beat beat; /* under lock */
} rank0__job;

static inline void rank0__end(rank0__job *job, ddp_result result, const char *text) {
    pthread_mutex_lock(&job->lock);
    job->beat.done = 1;
    job->beat.result = result;
    if (result != DDP_OK) snprintf(job->beat.text, sizeof job->beat.text, "%s", text);
    pthread_cond_signal(&job->ended);
    pthread_mutex_unlock(&job->lock);
}

static inline void *rank0__carry_out(void *argument) {
    rank0__job *job = (rank0__job *)argument;
    ddp_result result = job->prepare(job->user);
    rank0__end(job, result, ddp_last_error());
    return NULL;
}

/* Sleeps until the work has ended, at most so long. Returns what is to be told then. */
static inline rank0__beat rank0__await(rank0__job *job, int sleep_ms) {
    rank0__beat beat;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += sleep_ms / 1000;
    until.tv_nsec += sleep_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_mutex_lock(&job->lock);
    while (!job->beat.done && pthread_cond_timedwait(&job->ended, &job->lock, &until) == 0) {
    }
    beat = job->beat;
    pthread_mutex_unlock(&job->lock);
    return beat;
}

/* Rank 0: tells the others that it is there, four times in a timeout, until the work has ended. */
static inline ddp_result rank0__lead(ddp_group *group, rank0__job *job, rank0__beat *beat) {
    int sleep_ms = ddp_group_timeout_ms(group) / 4 + 1, running = 0;
    pthread_condattr_t clock;
    pthread_t thread;
    ddp_result result;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->ended, &clock);
    if (!job->prepare)
        rank0__end(job, DDP_ERR_INVALID, "rank0_first: prepare is NULL on rank 0");
    else if (ddp_world_size(group) == 1)
        rank0__carry_out(job);
    else if (pthread_create(&thread, NULL, rank0__carry_out, job) == 0)
        running = 1;
    else
        rank0__end(job, DDP_ERR_SYSTEM, "rank0_first: there can be no more threads");
    do {
        *beat = rank0__await(job, sleep_ms < 1000 ? sleep_ms : 1000);
        result = ddp_broadcast(group, beat, sizeof *beat, DDP_U8, 0, NULL);
    } while (result == DDP_OK && !beat->done);
    if (running) pthread_join(thread, NULL);
    pthread_cond_destroy(&job->ended);
    pthread_mutex_destroy(&job->lock);
    pthread_condattr_destroy(&clock);
    return result;
}

/* Runs prepare on rank 0 while the others wait for it, and gives its result, and its ddp_last_error, to everybody. It may take longer than the
   group's timeout, because rank 0 tells all the time that it is there: a rank 0 that dies, or stops as a whole, still is an error on the others.
   prepare runs on a thread of its own and makes no calls on the group; it is not interrupted when another rank is lost, which rank 0 says after it.
   Collective. Errors: what prepare returned; DDP_ERR_INVALID when it is NULL on rank 0 (elsewhere it is not read); DDP_ERR_SYSTEM; those of a broadcast. */
static inline ddp_result rank0_first(ddp_group *group, rank0_fn prepare, void *user) {
    rank0__job job;
    rank0__beat beat;
    ddp_result result;
    if (!group) return ddp_fail(DDP_ERR_INVALID, "rank0_first: group is NULL");
    memset(&job, 0, sizeof job);
    memset(&beat, 0, sizeof beat);
    job.prepare = prepare;
    job.user = user;
    if (ddp_rank(group) == 0)
        result = rank0__lead(group, &job, &beat);
    else
        do result = ddp_broadcast(group, &beat, sizeof beat, DDP_U8, 0, NULL);
        while (result == DDP_OK && !beat.done);
    if (result != DDP_OK || beat.result == DDP_OK) return result;
    return ddp_fail((ddp_result)beat.result, "%s", beat.text);
}

#endif /* DDP_EXAMPLE_TRAINING_H */

/* MIT License: see LICENSE. */

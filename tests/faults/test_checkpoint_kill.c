/*  test_checkpoint_kill.c - a saving process is killed by signal 9: afterwards, exactly one whole version can
    be loaded.

    moments     killed before each call that changes something on disk, one after the other: with and without
                a file system that swaps names, keeping one checkpoint or two. Only the versions before and
                after the save are valid.
    trained     the same through ddp_fsdp_save: blocking, and on the threads of two ranks while they train.
                Values and momentum are those of one step.
    random      two ranks save one version after the other without pause, and are killed at 50 random points:
                by themselves at some call, or from outside at some time. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int calls_left; /* number of calls until this process kills itself; 0 = never */
static int no_exchange;

static int tick(void) {
    if (calls_left && __atomic_sub_fetch(&calls_left, 1, __ATOMIC_SEQ_CST) == 0) kill(getpid(), SIGKILL);
    return 0;
}

static long test_syscall(long number, ...) {
    long argument[5];
    va_list args;
    tick();
    va_start(args, number);
    for (int i = 0; i < 5; i++) argument[i] = va_arg(args, long);
    va_end(args);
    if (number == SYS_renameat2 && no_exchange) {
        errno = EINVAL;
        return -1;
    }
    return syscall(number, argument[0], argument[1], argument[2], argument[3], argument[4]);
}

#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#define open(...) (tick(), open(__VA_ARGS__))
#define pwrite(fd, data, size, at) (tick(), pwrite(fd, data, size, at))
#define fsync(fd) (tick(), fsync(fd))
#define mkdir(path, mode) (tick(), mkdir(path, mode))
#define rmdir(path) (tick(), rmdir(path))
#define unlink(path) (tick(), unlink(path))
#define rename(from, to) (tick(), rename(from, to))
#define ftruncate(fd, size) (tick(), ftruncate(fd, size))
#define syscall test_syscall
#include "../../ddp_fsdp.h"
#undef open
#undef pwrite
#undef fsync
#undef mkdir
#undef rmdir
#undef unlink
#undef rename
#undef ftruncate
#undef syscall

#define CKPT_LONG 301
#include "../support/checkpoints.h"
#include "../support/random.h"

static int failures;
static char folder[64], dir[80];

typedef struct page {
    int version, keep, background; /* the last version that was saved */
} page;
static page *shared;

#define EXPECT(condition, ...)                                                  \
    do {                                                                        \
        if (!(condition)) {                                                     \
            failures++;                                                         \
            fprintf(stderr, "FAIL %s:%d %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                       \
            fputc('\n', stderr);                                                \
        }                                                                       \
    } while (0)

static ddp_result save_version(ddp_group *group, int version) {
    ckpt_rank k;
    ddp_result result;
    ckpt_open(&k, ddp_rank(group), ddp_world_size(group), 0, 0);
    ckpt_fill(&k, version);
    result = ddp__checkpoint_save(group, dir, k.slices, k.count, &k.state, NULL, 5000, shared->keep);
    ckpt_close(&k);
    return result;
}

static ddp_result save_forever(ddp_group *group, void *user) {
    (void)user;
    for (int version = shared->version + 1;; version++) {
        ddp_result result = save_version(group, version);
        if (result != DDP_OK) return result;
        if (ddp_rank(group) == 0) __atomic_store_n(&shared->version, version, __ATOMIC_SEQ_CST);
    }
}

static ddp_group *alone(void) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group = NULL;
    desc.init_method = "self://";
    if (ddp_group_create(&group, &desc) != DDP_OK) exit(2);
    return group;
}

/* The version on disk; 0 and a failure if it is missing or a mixture. */
static int load_version(ddp_group *group, const char *path) {
    ckpt_rank k;
    ddp_result result;
    int version = 0;
    ckpt_open(&k, 0, 1, 0, 0xab);
    result = ddp__checkpoint_load(group, NULL, path, k.slices, k.count, NULL, NULL, &k.state);
    EXPECT(result == DDP_OK, "%s: %s", path, ddp_last_error());
    if (result == DDP_OK) version = (int)k.state.step;
    EXPECT(result != DDP_OK || ckpt_has(&k, version), "%s is a mixture around version %d", path, version);
    ckpt_close(&k);
    return version;
}

/* Saves the next version in a process that is killed before its call number at. Returns 0 if it completed. */
static int killed_at(int at) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        calls_left = at;
        _exit(save_version(alone(), shared->version + 1) == DDP_OK ? 0 : 3);
    }
    while (waitpid(child, &status, 0) < 0) {
    }
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return 1;
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the save ends with status %x", status);
    return 0;
}

static void test_moments(ddp_group *group, int exchange, int keep) {
    char previous[100];
    int at = 1, found;
    no_exchange = !exchange;
    snprintf(dir, sizeof dir, "%s/moments%d%d", folder, exchange, keep);
    shared->keep = keep;
    shared->version = 10;
    EXPECT(save_version(group, 10) == DDP_OK, "%s", ddp_last_error());
    for (; at < 500 && killed_at(at); at++) {
        found = load_version(group, dir);
        EXPECT(found == shared->version || found == shared->version + 1,
               "killed at call %d: version %d was found, not %d or the next", at, found, shared->version);
        shared->version = found;
    }
    printf("%s: %d calls\n", dir, at - 1);
    EXPECT(at > 30 && at < 500, "%d calls", at);
    found = load_version(group, dir);
    EXPECT(found == shared->version + 1, "version %d after the last save, not %d", found,
           shared->version + 1);
    snprintf(previous, sizeof previous, "%s.1", dir);
    if (keep == 2) EXPECT(load_version(group, previous) == found - 1, "the version before");
    snprintf(previous, sizeof previous, "%s.tmp", dir);
    EXPECT(!ckpt_exists(previous), "left behind");
}

enum { PARAMS = 2, ELEMENTS = 35 };
enum { TIMEOUT_MS = 600000 }; /* a disk can be slow; no rank should reach the timeout */

/* SGD with momentum on constant gradients: a version is the number of steps. Each sum rounds once, on
   whatever rank. */
typedef struct trained {
    ddp_fsdp_param params[PARAMS];
    ddp_fsdp_unit_desc unit;
    ddp_fsdp *fsdp;
    ddp_fsdp_state state;
} trained;

static int elements(int param) { return param ? 3 : ELEMENTS; }
static float gradient(int param, int i) { return (float)(1 + i % 3 + param); }

static float value_of(int version, int param, int i) {
    float value = (float)i, momentum = 0;
    for (int step = 0; step < version; step++) {
        momentum = 0.5f * momentum + gradient(param, i);
        value -= 0.25f * momentum;
    }
    return value;
}

static ddp_result start(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                        void *user) {
    int columns = param->param.value.ndim == 2 ? (int)param->param.value.shape[1] : 1;
    (void)user;
    for (int i = 0; i < (int)row_count * columns; i++)
        ((float *)out)[i] = (float)((int)first_row * columns + i);
    return DDP_OK;
}

static ddp_result trained_open(trained *t, ddp_group *group) {
    static const char *const names[PARAMS] = {"w", "b"};
    ddp_fsdp_desc desc = DDP_ZERO;
    memset(t, 0, sizeof *t);
    for (int k = 0; k < PARAMS; k++) {
        ddp_tensor *value = &t->params[k].param.value;
        t->params[k].param.name = names[k];
        value->dtype = DDP_F32;
        value->ndim = 2 - k;
        value->shape[0] = k ? 3 : 7;
        value->shape[1] = k ? 0 : ELEMENTS / 7;
    }
    t->unit.params = t->params;
    t->unit.param_count = PARAMS;
    desc.units = &t->unit;
    desc.unit_count = 1;
    desc.optimizer.kind = DDP_OPTIMIZER_SGD;
    desc.optimizer.momentum = 0.5f;
    desc.init_fn = start;
    desc.state = &t->state;
    desc.keep_checkpoints = shared->keep;
    desc.save_in_background = shared->background;
    return ddp_fsdp_create(&t->fsdp, group, &desc);
}

static ddp_result train_on(ddp_group *group, trained *t, int steps) {
    for (; steps > 0; steps--) {
        RANKS_OK(group, ddp_fsdp_unshard(t->fsdp, 0));
        for (int k = 0; k < PARAMS; k++)
            for (int i = 0; i < elements(k); i++) ((float *)t->params[k].param.grad.data)[i] = gradient(k, i);
        RANKS_OK(group, ddp_fsdp_reduce_grads(t->fsdp, 0));
        RANKS_OK(group, ddp_fsdp_step(t->fsdp, 0.25f));
    }
    return DDP_OK;
}

static ddp_result has_version(ddp_group *group, trained *t, int version) {
    RANKS_OK(group, ddp_fsdp_unshard(t->fsdp, 0));
    for (int k = 0; k < PARAMS; k++)
        for (int i = 0; i < elements(k); i++)
            RANKS_CHECK(group, ((float *)t->params[k].param.value.data)[i] == value_of(version, k, i),
                        "parameter %d element %d is not of version %d", k, i, version);
    RANKS_CHECK(group, t->state.step == version, "step %d, not %d", (int)t->state.step, version);
    return ddp_fsdp_reshard(t->fsdp, 0);
}

/* user: the call before which this process is killed. */
static ddp_result save_next(ddp_group *group, void *user) {
    trained t;
    RANKS_OK(group, trained_open(&t, group));
    RANKS_OK(group, ddp_fsdp_load(t.fsdp, dir));
    RANKS_OK(group, train_on(group, &t, 1));
    RANKS_OK(group, ddp_barrier(group));
    if (ddp_rank(group) == 0) calls_left = *(const int *)user;
    RANKS_OK(group, ddp_barrier(group));
    RANKS_OK(group, ddp_fsdp_save(t.fsdp, dir));
    RANKS_OK(group, train_on(group, &t, 3));
    RANKS_OK(group, ddp_fsdp_save_wait(t.fsdp));
    ddp_fsdp_destroy(t.fsdp);
    return DDP_OK;
}

/* The version on disk; 0 and a failure if it is none. Its momentum shows in the step after. */
static int load_trained(ddp_group *group) {
    trained t;
    int version = 0;
    if (trained_open(&t, group) == DDP_OK && ddp_fsdp_load(t.fsdp, dir) == DDP_OK)
        version = (int)t.state.step;
    EXPECT(version > 0 && has_version(group, &t, version) == DDP_OK && train_on(group, &t, 1) == DDP_OK
               && has_version(group, &t, version + 1) == DDP_OK,
           "%s", ddp_last_error());
    ddp_fsdp_destroy(t.fsdp);
    return version;
}

static void test_trained(ddp_group *group, int background) {
    trained t;
    int at = 1, found, killed = 1;
    snprintf(dir, sizeof dir, "%s/trained%d", folder, background);
    shared->background = background;
    shared->keep = 1 + background;
    no_exchange = background;
    EXPECT(trained_open(&t, group) == DDP_OK && train_on(group, &t, 1) == DDP_OK
               && ddp_fsdp_save(t.fsdp, dir) == DDP_OK,
           "%s", ddp_last_error());
    ddp_fsdp_destroy(t.fsdp);
    for (shared->version = 1; killed && at < 500; at++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0)
            _exit(ranks_run(RANKS_THREADS, 1 + background, TIMEOUT_MS, save_next, &at) == DDP_OK ? 0 : 3);
        while (waitpid(child, &status, 0) < 0) {
        }
        killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        EXPECT(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "the save ends with status %x",
               status);
        found = load_trained(group);
        EXPECT(found == shared->version + 1 || (killed && found == shared->version),
               "killed at call %d: version %d was found after %d", at, found, shared->version);
        shared->version = found;
    }
    printf("%s: %d calls\n", dir, at - 2);
    EXPECT(at > 30 && at < 500 && shared->version > 2, "%d calls, version %d", at, shared->version);
}

static void test_random(ddp_group *group) {
    int saved = 0;
    snprintf(dir, sizeof dir, "%s/random", folder);
    no_exchange = 0;
    shared->version = 0;
    shared->keep = 1;
    EXPECT(save_version(group, ++shared->version) == DDP_OK, "%s", ddp_last_error());
    for (int kills = 0; kills < 50; kills++) {
        int status, found, before = shared->version;
        pid_t child = fork();
        long point = (long)(random_u64() % 200);
        if (child == 0) {
            if (kills % 2) calls_left = 1 + (int)point;
            (void)ranks_run(RANKS_THREADS, 2, TIMEOUT_MS, save_forever, NULL);
            _exit(0);
        }
        if (kills % 2 == 0) {
            ranks_sleep_us(point * 1000);
            kill(child, SIGKILL);
        }
        while (waitpid(child, &status, 0) < 0) {
        }
        EXPECT(WIFSIGNALED(status), "the saves failed");
        found = load_version(group, dir);
        EXPECT(found == shared->version || found == shared->version + 1,
               "version %d was found, not %d or the next", found, shared->version);
        shared->version = found;
        saved += found - before;
    }
    printf("50 kills, %d saves\n", saved);
    EXPECT(saved > 5, "%d saves are too few for a result", saved); /* a save takes about 75 calls */
}

int main(void) {
    ddp_group *group;
    watchdog_start(150);
    shared = (page *)ranks_shared(sizeof *shared);
    snprintf(folder, sizeof folder, "checkpoint_kill.XXXXXX");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 2;
    }
    group = alone();
    test_moments(group, 1, 1);
    test_moments(group, 0, 1);
    test_moments(group, 1, 2);
    test_moments(group, 0, 2);
    test_trained(group, 0);
    test_trained(group, 1);
    test_random(group);
    ddp_group_destroy(group);
    EXPECT(ckpt_shell("rm -rf %s", folder) == 0, "rm");
    printf(failures ? "%d failures\n" : "ok\n", failures);
    return failures != 0;
}

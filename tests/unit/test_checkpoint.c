/*  test_checkpoint.c - checkpoints on disk: saved and loaded on different numbers of ranks, with every kind
    of damage, and interrupted by every failure.

    Ranks are threads. A failed load leaves memory unchanged. All ranks return the same cause, which names
    file and tensor. A failed save leaves the old checkpoint. Functions of the system are wrapped, so that any
    write of a rank can fail. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* memmem */
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
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static __thread int failing_write; /* number of writes of this thread until one fails; 0 = none */
static __thread int failing_sync;  /* the same for fsync of a folder */
static int no_exchange;            /* the file system cannot swap two names */
static int no_fallocate;           /* the file system cannot reserve room */
static int unlink_error;           /* errno of every unlink of a file; 0 = none */

static ssize_t test_pwrite(int fd, const void *data, size_t size, off_t at) {
    if (failing_write && --failing_write == 0) {
        errno = ENOSPC;
        return -1;
    }
    return pwrite(fd, data, size, at);
}

static int test_fsync(int fd) {
    struct stat info;
    if (failing_sync && fstat(fd, &info) == 0 && S_ISDIR(info.st_mode) && --failing_sync == 0) {
        errno = EIO;
        return -1;
    }
    return fsync(fd);
}

static long test_syscall(long number, ...) {
    long argument[5];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 5; i++) argument[i] = va_arg(args, long);
    va_end(args);
    if (number == SYS_renameat2 && no_exchange) {
        errno = EINVAL;
        return -1;
    }
    if (number == SYS_fallocate && no_fallocate) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return syscall(number, argument[0], argument[1], argument[2], argument[3], argument[4]);
}

/* ENOENT: another process deletes the file first. */
static int test_unlink(const char *path) {
    if (unlink_error && unlink_error != ENOENT) {
        errno = unlink_error;
        return -1;
    }
    int result = unlink(path);
    if (result != 0 || !unlink_error) return result;
    errno = unlink_error;
    return -1;
}

/* This rank opens files of the second folder instead of the first, as if on a separate disk. */
static __thread const char *other_folder[2];

static int test_open(const char *path, int flags, ...) {
    char other[1500];
    va_list args;
    va_start(args, flags);
    int mode = flags & O_CREAT ? va_arg(args, int) : 0;
    va_end(args);
    const char *at = other_folder[0] ? strstr(path, other_folder[0]) : NULL;
    if (!at) return open(path, flags, mode);
    snprintf(other, sizeof other, "%.*s%s%s", (int)(at - path), path, other_folder[1],
             at + strlen(other_folder[0]));
    return open(other, flags, mode);
}

static int cut_mapped; /* number of maps until the file is truncated; 0 = never */

static void *test_mmap(void *address, size_t length, int protection, int flags, int fd, off_t at) {
    void *map = mmap(address, length, protection, flags, fd, at);
    char path[64];
    if (!cut_mapped || map == MAP_FAILED || __atomic_sub_fetch(&cut_mapped, 1, __ATOMIC_ACQ_REL) != 0)
        return map;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (truncate(path, 4096) != 0) perror(path);
    return map;
}

#define DDP__CALL_BYTES 32 /* agreements take several calls */
#define DDP_IMPLEMENTATION
#include "../../ddp.h"
#define pwrite test_pwrite
#define fsync test_fsync
#define syscall test_syscall
#define open test_open
#define mmap test_mmap
#define unlink test_unlink
#include "../../ddp_fsdp.h"
#undef unlink
#undef pwrite
#undef fsync
#undef syscall
#undef open
#undef mmap

#include "../support/checkpoints.h"

static int failures;
static char folder[64];
static const char *scenario = "";

#define EXPECT(condition, ...)                                                                 \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            failures++;                                                                        \
            fprintf(stderr, "FAIL %s:%d [%s] %s: ", __FILE__, __LINE__, scenario, #condition); \
            fprintf(stderr, __VA_ARGS__);                                                      \
            fputc('\n', stderr);                                                               \
        }                                                                                      \
    } while (0)

//== saving and loading on W ranks ==========================================================

typedef struct job {
    const char *dir;
    int load, version, keep, whole, fail_rank, fail_at, fail_sync;
    size_t max_file_bytes;
    rlim_t largest_file;                   /* 0 = no limit */
    void (*twist)(ckpt_rank *k, int rank); /* changes the request of a rank */
    int no_check;                          /* the twist moved the values that ckpt_has compares */
    const char *other;                     /* rank 1 finds this folder instead of dir */
    const char *odd_dir;                   /* dir of rank 1; NULL = the same as on other ranks */
    int odd_keep;                          /* added on rank 1 */
    size_t odd_bytes;                      /* added to max_file_bytes on rank 1 */
    int64_t step;                          /* after a load */
    ddp_result result[4];
    char text[4][512];
    int fine[4];
} job;

static ddp_result job_rank(ddp_group *group, void *user) {
    job *j = (job *)user;
    int rank = ddp_rank(group), fill = j->load ? 0xab : 0, odd = rank == 1;
    const char *dir = odd && j->odd_dir ? j->odd_dir : j->dir;
    struct rlimit limit;
    ckpt_rank k;
    ckpt_open(&k, rank, ddp_world_size(group), j->whole, fill);
    if (!j->load) ckpt_fill(&k, j->version);
    if (j->twist) j->twist(&k, rank);
    if (j->other && rank == 1)
        other_folder[0] = strrchr(j->dir, '/'), other_folder[1] = strrchr(j->other, '/');
    failing_write = rank == j->fail_rank ? j->fail_at : 0;
    failing_sync = rank == j->fail_rank ? j->fail_sync : 0;
    getrlimit(RLIMIT_FSIZE, &limit);
    if (j->largest_file) {
        RANKS_OK(group, ddp_barrier(group)); /* the group has allocated its memory by now */
        limit.rlim_cur = j->largest_file;
        setrlimit(RLIMIT_FSIZE, &limit);
        limit.rlim_cur = limit.rlim_max;
    }
    j->result[rank] = j->load
                          ? ddp__checkpoint_load(group, NULL, dir, k.slices, k.count, NULL, NULL, &k.state)
                          : ddp__checkpoint_save(group, dir, k.slices, k.count, &k.state, NULL,
                                                 j->max_file_bytes + odd * j->odd_bytes,
                                                 j->keep + odd * j->odd_keep);
    failing_write = failing_sync = 0;
    other_folder[0] = NULL;
    if (j->largest_file) setrlimit(RLIMIT_FSIZE, &limit);
    snprintf(j->text[rank], sizeof j->text[rank], "%s", j->result[rank] == DDP_OK ? "" : ddp_last_error());
    j->fine[rank] = !j->load                    ? 1
                    : j->result[rank] != DDP_OK ? ckpt_untouched(&k, fill)
                    : j->no_check               ? 1
                                                : ckpt_has(&k, j->version);
    j->step = k.state.step;
    ckpt_close(&k);
    return ddp_barrier(group); /* a failure that all ranks agree on leaves the group usable */
}

/* Runs the job. All ranks must return want, with a line that contains the words (up to three, separated by
   |). The lines must be equal, except for the rank number in front. */
static void run(job *j, int world_size, ddp_result want, const char *words) {
    ddp_result result = ranks_run(RANKS_THREADS, world_size, 20000 * DDP_TEST_SLOWDOWN, job_rank, j);
    char all[200], *save = NULL;
    EXPECT(result == DDP_OK, "%s", ddp_last_error());
    for (int r = 0; r < world_size; r++) {
        EXPECT(j->result[r] == want, "rank %d of %d gives %s: %s", r, world_size,
               ddp_result_name(j->result[r]), j->text[r]);
        char prefix[24];
        snprintf(prefix, sizeof prefix, "rank %d/", r);
        int length = want == DDP_OK ? 0 : (int)strlen(prefix);
        EXPECT(strncmp(j->text[r], prefix, (size_t)length) == 0, "rank %d: %s", r, j->text[r]);
        EXPECT(strcmp(j->text[r] + length, j->text[0] + length) == 0, "rank 0: %s, rank %d: %s", j->text[0],
               r, j->text[r]);
        EXPECT(j->fine[r], "rank %d of %d has wrong values", r, world_size);
    }
    snprintf(all, sizeof all, "%s", words);
    for (char *word = strtok_r(all, "|", &save); word; word = strtok_r(NULL, "|", &save))
        EXPECT(strstr(j->text[0], word), "'%s' is not in: %s", word, j->text[0]);
}

static job job_of(const char *dir, int load, int version) {
    job j;
    memset(&j, 0, sizeof j);
    j.dir = dir;
    j.load = load;
    j.version = version;
    j.fail_rank = -1;
    return j;
}

static void save(const char *dir, int world_size, int version) {
    job j = job_of(dir, 0, version);
    run(&j, world_size, DDP_OK, "");
}
static void load(const char *dir, int world_size, int version) {
    job j = job_of(dir, 1, version);
    run(&j, world_size, DDP_OK, "");
}
static void refused(const char *dir, ddp_result want, const char *words) {
    job j = job_of(dir, 1, 0);
    run(&j, 2, want, words);
}

static const char *in(const char *name) { /* a path in the test's folder; valid for the next 127 calls */
    static char path[128][200];
    static int next;
    next = (next + 1) % 128;
    snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
    return path[next];
}

//== saving and loading ======================================================================

static void test_any_world_size(void) {
    scenario = "any world size";
    for (int w = 1; w <= 3; w++) {
        job j = job_of(in("any"), 0, w);
        j.max_file_bytes = w == 1 ? 0 : w == 2 ? 300000 : 1; /* one file; some; one per tensor */
        run(&j, w, DDP_OK, "");
        EXPECT(!ckpt_exists(in("any.tmp")) && !ckpt_exists(in("any.old")) && !ckpt_exists(in("any.1")),
               "something is left");
        for (int v = 1; v <= 3; v++) load(in("any"), v, w);
    }
    EXPECT(ckpt_exists(in("any/model-00012-of-00012.safetensors"))
               && ckpt_exists(in("any/optimizer-00001-of-00003.safetensors")),
           "one file per tensor");
    scenario = "every rank loads all";
    {
        job j = job_of(in("any///"), 1, 3);
        j.whole = 1;
        run(&j, 2, DDP_OK, "");
    }
    scenario = "the file sizes";
    save(in("any"), 2, 9);
    EXPECT(ckpt_shell("test $(ls %s | wc -l) = 5", in("any")) == 0, "two files, two indexes, a state");
    {
        char here[1000];
        EXPECT(getcwd(here, sizeof here) && chdir(folder) == 0, "chdir");
        save("relative/", 2, 4);
        load("./relative", 3, 4);
        EXPECT(symlink("relative", "link") == 0, "symlink");
        save("link", 1, 5);
        load("relative", 1, 5);
        EXPECT(symlink("nothing", "dangling") == 0, "symlink");
        {
            job j = job_of("dangling", 0, 6);
            run(&j, 2, DDP_ERR_INVALID, "dangling|symbolic link to a missing folder");
        }
        EXPECT(chdir(here) == 0, "chdir");
    }
}

static void test_keeps_some(void) {
    scenario = "keep 3";
    for (int exchange = 1; exchange >= 0; exchange--) {
        const char *dir = exchange ? "keep" : "keep_renamed";
        char name[64];
        no_exchange = !exchange;
        for (int v = 1; v <= 5; v++) {
            job j = job_of(in(dir), 0, v);
            j.keep = 3;
            run(&j, 1 + v % 2, DDP_OK, "");
        }
        for (int i = 0; i < 3; i++) {
            snprintf(name, sizeof name, i ? "%s.%d" : "%s", dir, i);
            load(in(name), 1, 5 - i);
        }
        snprintf(name, sizeof name, "%s.3", dir);
        EXPECT(!ckpt_exists(in(name)), "one too many");
        snprintf(name, sizeof name, "%s.old", dir);
        EXPECT(!ckpt_exists(in(name)), "left behind");
    }
    no_exchange = 0;
    scenario = "keep fewer than before";
    EXPECT(ckpt_shell("cd %s && cp -r keep.2 keep.3 && cp -r keep.2 keep.4 && touch keep.4/notes", folder)
               == 0,
           "cp");
    for (int keep = 2; keep >= 1; keep--) {
        job j = job_of(in("keep"), 0, 8 - keep);
        j.keep = keep;
        run(&j, 2, DDP_OK, "");
        if (keep == 2) load(in("keep.1"), 1, 5);
        EXPECT(ckpt_exists(in("keep.1")) == (keep == 2) && !ckpt_exists(in("keep.2"))
                   && !ckpt_exists(in("keep.3")),
               "keep %d", keep);
        EXPECT(ckpt_exists(in("keep.4/notes")), "a foreign file was deleted");
    }
    scenario = "a foreign folder has the number of an older checkpoint";
    EXPECT(ckpt_shell("mkdir %s && touch %s", in("fresh.1"), in("fresh.1/notes")) == 0, "sh");
    save(in("fresh"), 1, 1);
    save(in("fresh"), 2, 2);
    load(in("fresh"), 1, 2);
    EXPECT(ckpt_exists(in("fresh.1/notes")), "a foreign file was deleted");
    EXPECT(!ckpt_exists(in("fresh.tmp")) && !ckpt_exists(in("fresh.old")), "the previous checkpoint is left");
    scenario = "a save with keep=1 deletes older checkpoints up to the first missing number";
    save(in("gap"), 1, 1);
    EXPECT(ckpt_shell("cd %s && cp -r gap gap.1 && cp -r gap gap.3", folder) == 0, "cp");
    save(in("gap"), 2, 2);
    EXPECT(!ckpt_exists(in("gap.1")) && ckpt_exists(in("gap.3")), "gap.1 goes, gap.3 stays");
    scenario = "killed between two renames";
    no_exchange = 1;
    EXPECT(ckpt_shell("mv %s %s", in("keep_renamed"), in("keep_renamed.old")) == 0, "mv");
    load(in("keep_renamed"), 2, 5);
    save(in("keep_renamed"), 2, 6);
    load(in("keep_renamed"), 2, 6);
    no_exchange = 0;
}

static void test_stale_and_strange(void) {
    job j = job_of(in("strange"), 0, 1);
    scenario = "a save that was killed";
    EXPECT(ckpt_shell("mkdir %s && cd %s && printf '{\"format\": \"ddp check' >state.json && touch "
                      "model-00001-of-00009.safetensors",
                      in("stale.tmp"), in("stale.tmp"))
               == 0,
           "sh");
    save(in("stale"), 2, 1);
    load(in("stale"), 1, 1);
    EXPECT(!ckpt_exists(in("stale.tmp")), "left behind");
    scenario = "files of a stale folder cannot be deleted, or are deleted by another process first";
    for (int turn = 0; turn < 2; turn++) {
        job stale = job_of(in("stale"), 0, 2);
        EXPECT(ckpt_shell("cp -r %s %s", in("stale"), in("stale.tmp")) == 0, "cp");
        unlink_error = turn ? ENOENT : EACCES;
        if (turn)
            run(&stale, 2, DDP_OK, "");
        else
            run(&stale, 2, DDP_ERR_SYSTEM,
                "group=world: rank 0: |cannot delete|stale.tmp/|Permission denied");
        unlink_error = 0;
        load(in("stale"), 1, 1 + turn);
        EXPECT(ckpt_shell("rm -rf %s", in("stale.tmp")) == 0, "rm");
    }
    scenario = "foreign folders";
    EXPECT(ckpt_shell("mkdir %s && echo precious >%s", in("strange"), in("strange/notes.txt")) == 0, "sh");
    run(&j, 2, DDP_ERR_INVALID, "strange|'notes.txt'");
    EXPECT(ckpt_shell("rm %s && echo '{}' >%s", in("strange/notes.txt"), in("strange/state.json")) == 0,
           "sh");
    run(&j, 2, DDP_ERR_INVALID, "strange|without state.json");
    EXPECT(
        ckpt_shell("mkdir %s && touch %s", in("other.tmp"), in("other.tmp/model-00001-of-00001.safetensors"))
            == 0,
        "sh");
    j.dir = in("other");
    run(&j, 1, DDP_ERR_INVALID, "other.tmp");
    EXPECT(ckpt_exists(in("other.tmp/model-00001-of-00001.safetensors")) && !ckpt_exists(in("other")),
           "deleted");
    save(in("mixed"), 1, 1);
    EXPECT(ckpt_shell("echo precious >%s", in("mixed/notes.txt")) == 0, "sh");
    j.dir = in("mixed");
    run(&j, 2, DDP_ERR_INVALID, "mixed|'notes.txt'");
    load(in("mixed"), 2, 1);
    j.dir = in("no/such/folder");
    run(&j, 2, DDP_ERR_SYSTEM, "no/such|No such file");
    j.dir = in("mixed/notes.txt");
    run(&j, 2, DDP_ERR_SYSTEM, "Not a directory");
    j.dir = "";
    run(&j, 2, DDP_ERR_INVALID, "dir");
    j.dir = in("..");
    run(&j, 2, DDP_ERR_INVALID, "which is not part of a checkpoint");
    EXPECT(mkdir(in("empty"), 0777) == 0, "mkdir");
    save(in("empty"), 1, 2);
    load(in("empty"), 1, 2);
}

//== failures of a save =====================================================================

static void test_save_fails(void) {
    scenario = "a write fails";
    save(in("fails"), 2, 1);
    for (int rank = 0; rank < 3; rank++)
        for (int at = 1; at < 60; at += 1 + at / 2) {
            job j = job_of(in("fails"), 0, 2);
            char words[64];
            j.fail_rank = rank;
            j.fail_at = at;
            snprintf(words, sizeof words, "group=world: rank %d: |fails.tmp/|No space left", rank);
            if (rank && at > 12) continue; /* this rank has fewer writes */
            if (rank == 0 && at > 18) continue;
            run(&j, 3, DDP_ERR_SYSTEM, words);
            EXPECT(!ckpt_exists(in("fails.tmp")), "left behind");
        }
    load(in("fails"), 2, 1);
    scenario = "no room";
    {
        job j = job_of(in("fails"), 0, 2);
        signal(SIGXFSZ, SIG_DFL); /* must not be raised */
        j.largest_file = 100000;
        run(&j, 2, DDP_ERR_SYSTEM, "group=world: rank 0: |model-00001-of-00001.safetensors|File too large");
    }
    load(in("fails"), 2, 1);
    EXPECT(!ckpt_exists(in("fails.tmp")), "left behind");
}

/* fsync of the folder around dir fails: before anything is written, or after the new checkpoint is in place.
   No checkpoint is lost. */
static void test_sync_fails(void) {
    for (int turn = 0; turn < 4; turn++) {
        job j = job_of(in("syncs"), 0, 2);
        scenario = "a sync fails";
        no_exchange = turn & 1;
        save(in("syncs"), 2, 1);
        j.fail_rank = 0;
        j.fail_sync = turn < 2 ? 1 : 3;
        run(&j, 2, DDP_ERR_SYSTEM,
            turn < 2 ? "group=world: rank 0: |cannot sync"
                     : "group=world: rank 0: |the checkpoint is saved|cannot sync");
        load(in("syncs"), 2, turn < 2 ? 1 : 2);
        if (turn >= 2) load(in(no_exchange ? "syncs.old" : "syncs.tmp"), 2, 1);
        save(in("syncs"), 2, 3);
        load(in("syncs"), 2, 3);
        EXPECT(!ckpt_exists(in("syncs.old")) && !ckpt_exists(in("syncs.tmp")), "something is left");
    }
    no_exchange = 0;
}

/* Rank 0 exports with a failing write, and every rank gets that error; then without. */
static ddp_result export_rank(ddp_group *group, void *user) {
    float first[6] = {1, 2, 3, 4, 5, 6}, steps = 9;
    static const char *const names[1] = {"steps"};
    ddp_tensor value = {first, DDP_F32, 2, {3, 2}}, buffer = {&steps, DDP_F32, 0, {0}};
    ddp_fsdp_param param = DDP_ZERO;
    ddp_fsdp_unit_desc unit = {NULL, &param, 1};
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp;
    int at = 0;
    param.param.name = "w";
    param.param.value = value;
    desc.units = &unit;
    desc.unit_count = desc.buffer_count = 1;
    desc.buffers = &buffer;
    desc.buffer_names = names;
    RANKS_OK(group, ddp_fsdp_create(&fsdp, group, &desc));
    for (ddp_result result = DDP_ERR_SYSTEM; result != DDP_OK;) {
        failing_write = ddp_rank(group) == 0 ? ++at : 0;
        result = ddp_fsdp_export(fsdp, (const char *)user);
        failing_write = 0;
        RANKS_CHECK(group,
                    result == DDP_OK
                        || (result == DDP_ERR_SYSTEM && strstr(ddp_last_error(), "ddp_fsdp_export")
                            && strstr(ddp_last_error(), "model.tmp: No space left")),
                    "write %d: %s", at, ddp_last_error());
        if (result == DDP_OK || ddp_rank(group) > 0) continue;
        RANKS_CHECK(group,
                    ckpt_shell("test $(cat %s) = old && test ! -e %s.tmp", in("model"), in("model")) == 0,
                    "write %d: the old file is lost, or something is left", at);
    }
    RANKS_CHECK(group, ddp_rank(group) > 0 || at == 4, "%d writes: w, steps, the header", at - 1);
    failing_sync = ddp_rank(group) == 0;
    RANKS_CHECK(group,
                ddp_fsdp_export(fsdp, (const char *)user) == DDP_ERR_SYSTEM
                    && strstr(ddp_last_error(), "the file is written")
                    && strstr(ddp_last_error(), "cannot sync"),
                "%s", ddp_last_error());
    failing_sync = 0;
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

static void test_export_fails(void) {
    char path[200];
    scenario = "an export fails";
    snprintf(path, sizeof path, "%s", in("model"));
    EXPECT(ckpt_shell("echo old > %s", path) == 0, "echo");
    EXPECT(ranks_run(RANKS_THREADS, 2, 20000 * DDP_TEST_SLOWDOWN, export_rank, path) == DDP_OK, "%s",
           ddp_last_error());
    EXPECT(ckpt_exists(path) && !ckpt_exists(in("model.tmp")), "no file, or something is left");
}

/* Without fallocate files get their size by ftruncate, and have the same content. */
static void test_no_fallocate(void) {
    scenario = "no fallocate";
    no_fallocate = 1;
    save(in("sparse"), 2, 1);
    job j = job_of(in("sparse"), 0, 2);
    j.largest_file = 100000;
    run(&j, 2, DDP_ERR_SYSTEM, "group=world: rank 0: |cannot allocate space for|File too large");
    no_fallocate = 0;
    load(in("sparse"), 3, 1);
    save(in("dense"), 2, 1);
    EXPECT(ckpt_shell("diff -r %s %s", in("sparse"), in("dense")) == 0, "the files differ");
}

static void twist_hole(ckpt_rank *k, int rank) {
    if (rank == 1) k->slices[5].extent[1]--;
}
static void twist_overlap(ckpt_rank *k, int rank) {
    if (rank == 1) k->slices[4].offset[1]--;
}
static void twist_scalar(ckpt_rank *k, int rank) {
    if (rank == 0) {
        free(k->slices[2].data);
        k->slices[2].data = NULL;
    }
}
static void twist_outside(ckpt_rank *k, int rank) {
    if (rank == 1) k->slices[0].offset[0]++;
}
static void twist_shape(ckpt_rank *k, int rank) {
    if (rank != 1) return;
    k->slices[0].shape[0] = INT64_MAX / 2;
    k->slices[0].shape[1] = 16;
}
static void twist_names(ckpt_rank *k, int rank) {
    (void)rank;
    k->slices[1].name = "wte";
}
static void twist_utf8(ckpt_rank *k, int rank) {
    if (rank == 1) k->slices[1].name = "\xff";
}
static void twist_other(ckpt_rank *k, int rank) {
    if (rank == 1) k->slices[1].dtype = DDP_F16;
}
static void twist_last(ckpt_rank *k, int rank) {
    if (rank == 1) k->slices[k->count - 1].dtype = DDP_F16;
}
static void twist_long_name(ckpt_rank *k, int rank) {
    static char name[4][200]; /* the line has no room for the difference */
    memset(name[rank], 'a', 190);
    name[rank][190] = (char)('0' + rank);
    k->slices[1].name = name[rank];
}
static void twist_fewer(ckpt_rank *k, int rank) {
    if (rank == 1) k->count--;
}

static void test_bad_lists(void) {
    static const struct {
        void (*twist)(ckpt_rank *, int);
        ddp_result result;
        const char *words;
    } bad[] = {
        {twist_hole, DDP_ERR_MISMATCH, "'middle'|gap"},
        {twist_overlap, DDP_ERR_MISMATCH, "'columns'|overlap"},
        {twist_scalar, DDP_ERR_MISMATCH, "'scalar'|gap"},
        {twist_outside, DDP_ERR_INVALID, "group=world: rank 1: |'wte'|outside"},
        {twist_shape, DDP_ERR_INVALID, "group=world: rank 1: |'wte'|shape or dtype is invalid"},
        {twist_names, DDP_ERR_INVALID, "two tensors|'wte'"},
        {twist_utf8, DDP_ERR_INVALID, "UTF-8"},
        {twist_other, DDP_ERR_MISMATCH,
         "ranks differ: rank 0 tensor 1 'h.weight' bf16 [4,3,2] of the model, rank 1 tensor 1 'h.weight' f16 "
         "[4"},
        {twist_long_name, DDP_ERR_MISMATCH, "rank 0 tensor 1 'aaaa|, rank 1 tensor 1 'aaaa"},
        {twist_last, DDP_ERR_MISMATCH, "ranks differ: rank 0 tensor 14 '|, rank 1 tensor 14 '|f16"},
        {twist_fewer, DDP_ERR_MISMATCH, "rank 0 tensors=15, rank 1 tensors=14; give"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        job j = job_of(in("lists"), 0, 1);
        scenario = bad[i].words;
        j.twist = bad[i].twist;
        run(&j, 2, bad[i].result, bad[i].words);
        EXPECT(!ckpt_exists(in("lists")) && !ckpt_exists(in("lists.tmp")), "something was written");
    }
}

/* Rank 1 passes another dir or another option: the line has both values. */
static void test_other_options(void) {
    char words[4][200];
    scenario = "rank 1 differs";
    save(in("options"), 2, 1);
    for (int i = 0; i < 4; i++) {
        job j = job_of(in("options"), i == 3, 2);
        if (i == 0 || i == 3) j.odd_dir = in("another");
        if (i == 1) j.odd_keep = 2;
        if (i == 2) j.odd_bytes = 1000;
        snprintf(words[i], sizeof words[i],
                 i == 1   ? "rank 0 keep_checkpoints=1, rank 1 keep_checkpoints=2; give"
                 : i == 2 ? "rank 0 max_file_bytes=0, rank 1 max_file_bytes=1000; give"
                          : "rank 0 dir=|options, rank 1 dir=|another; give");
        run(&j, 3, DDP_ERR_MISMATCH, words[i]);
        EXPECT(!ckpt_exists(in("another")) && !ckpt_exists(in("options.tmp")), "something was written");
    }
    load(in("options"), 2, 1);
}

//== damage =================================================================================

/* A fresh copy of the good checkpoint, as "bad". */
static void renew(void) {
    EXPECT(ckpt_shell("rm -rf %s && cp -r %s %s", in("bad"), in("good"), in("bad")) == 0, "cp");
}

static void flip(const char *path, size_t at, int bit) {
    size_t length = 0;
    char *text = ckpt_read(path, &length);
    EXPECT(text && at < length, "%s has %zu bytes", path, length);
    if (!text || at >= length) return;
    text[at] = (char)(text[at] ^ 1 << bit);
    ckpt_write(path, text, length);
    free(text);
}

static void test_damage(void) {
    const char *model = "bad/model-00001-of-00002.safetensors";
    size_t length = 0;
    char *text, *found;
    job j = job_of(in("good"), 0, 3);
    j.max_file_bytes = 1300000;
    run(&j, 2, DDP_OK, "");
    scenario = "a byte of each tensor";
    renew();
    for (int t = 0; t < CKPT_TENSORS; t++) { /* detected by its first bytes */
        unsigned char start[8];
        size_t bytes = ddp_dtype_size(ckpt_model[t].dtype), at = 0;
        const char *file = NULL, *const files[] = {model, "bad/model-00002-of-00002.safetensors",
                                                   "bad/optimizer-00001-of-00001.safetensors"};
        char words[100];
        for (int d = 0; d < ckpt_model[t].ndim; d++) bytes *= (size_t)ckpt_model[t].shape[d];
        if (bytes < 4) continue; /* too short to be recognised */
        for (size_t b = 0; b < sizeof start; b++) start[b] = ckpt_byte(3, t, b);
        for (int f = 0; f < 3 && !file; f++) {
            text = ckpt_read(in(files[f]), &length);
            found = text ? (char *)memmem(text, length, start, bytes < 8 ? bytes : 8) : NULL;
            if (found) {
                file = files[f];
                at = (size_t)(found - text);
            }
            free(text);
        }
        EXPECT(file, "tensor %d was not found", t);
        if (!file) continue;
        flip(in(file), at + bytes * 2 / 3, t % 8);
        snprintf(words, sizeof words, "tensor|%s|damaged: its checksum",
                 t == 6 ? "\xc3\xa9" : ckpt_model[t].name);
        refused(in("bad"), DDP_ERR_CORRUPT, words);
        flip(in(file), at + bytes * 2 / 3, t % 8);
    }
    load(in("bad"), 2, 3);
    scenario = "a byte of the header";
    for (size_t at = 0; at < 780; at += 53) {
        renew();
        flip(in(model), at, (int)(at % 8));
        refused(in("bad"), DDP_ERR_CORRUPT, "model-00001-of-00002|header");
    }
    scenario = "a byte of the state";
    text = ckpt_read(in("good/state.json"), &length);
    free(text);
    for (size_t at = 0; at < length; at += 53) {
        renew();
        flip(in("bad/state.json"), at, (int)(at % 7));
        refused(in("bad"), DDP_ERR_CORRUPT, "state.json");
    }
    scenario = "a byte of an index";
    renew();
    flip(in("bad/model.safetensors.index.json"), 70, 3);
    refused(in("bad"), DDP_ERR_CORRUPT, "model.safetensors.index.json|checksum");
    scenario = "cut short";
    for (int cut = 0; cut < 3; cut++) {
        renew();
        EXPECT(ckpt_shell("truncate -s %s %s",
                          cut == 0   ? "-1"
                          : cut == 1 ? "1000"
                                     : "5",
                          in(model))
                   == 0,
               "truncate");
        refused(in("bad"), DDP_ERR_CORRUPT, "model-00001-of-00002");
    }
    renew();
    EXPECT(ckpt_shell("echo >>%s", in(model)) == 0, "sh");
    refused(in("bad"), DDP_ERR_CORRUPT, "model-00001-of-00002|end at byte");
    scenario = "missing files";
    renew();
    EXPECT(unlink(in(model)) == 0, "unlink");
    refused(in("bad"), DDP_ERR_CORRUPT, "model-00001-of-00002.safetensors is missing");
    renew();
    EXPECT(unlink(in("bad/optimizer.safetensors.index.json")) == 0, "unlink");
    refused(in("bad"), DDP_ERR_CORRUPT, "optimizer.safetensors.index.json|is missing");
    renew();
    EXPECT(unlink(in("bad/state.json")) == 0, "unlink");
    refused(in("bad"), DDP_ERR_CORRUPT, "state.json is missing");
    refused(in("nowhere"), DDP_ERR_SYSTEM, "nowhere|No such file");
    scenario = "a mixture of two checkpoints";
    save(in("second"), 2, 4);
    save(in("first"), 2, 3);
    EXPECT(ckpt_shell("cp %s %s", in("second/model-00001-of-00001.safetensors"), in("first/")) == 0, "cp");
    refused(in("first"), DDP_ERR_CORRUPT, "model-00001-of-00001|header");
}

/* state.json with a list of numbers of each rank: read where it is valid, refused where it is not. */
static void test_ranks_of_state(void) {
#define TEN " 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    static const char *const lists[][2] = {
        {"\"ranks\": [[1, 2," TEN "], [18446744073709551615, 2," TEN "]],\n ", NULL},
        {"\"ranks\": [],\n ", NULL},
        {"\"ranks\": 5,\n ", "state.json|expected a list"},
        {"\"ranks\": [[1, 2]],\n ", "state.json|unexpected number of entries"},
        {"\"ranks\": [[0, 1, 2," TEN "]],\n ", "state.json|unexpected number of entries"},
        {"\"ranks\": [[1, -2," TEN "]],\n ", "state.json|number"},
        {"\"ranks\": [[1, 2," TEN "]],\n \"ranks\": [[1, 2," TEN "]],\n ", "state.json|duplicate ranks"},
    };
#undef TEN
    scenario = "numbers of each rank";
    save(in("good"), 2, 3);
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        size_t length = 0, at = 0;
        renew();
        char *text = ckpt_read(in("bad/state.json"), &length), changed[8000];
        const char *files = text ? strstr(text, "\"files\"") : NULL;
        EXPECT(files && length < 4000, "%zu bytes of state.json", length);
        if (!files) return;
        at = (size_t)(files - text);
        snprintf(changed, sizeof changed, "%.*s%s%s", (int)at, text, lists[i][0], files);
        length = strlen(changed) - 11; /* the checksum, a quote, a bracket and a line break follow */
        snprintf(changed + length, 12, "%08x\"}\n", ddp__crc32c(changed, length));
        ckpt_write(in("bad/state.json"), changed, strlen(changed));
        free(text);
        if (lists[i][1])
            refused(in("bad"), DDP_ERR_CORRUPT, lists[i][1]);
        else
            load(in("bad"), 3, 3);
    }
}

static void ask_dtype(ckpt_rank *k, int rank) {
    (void)rank;
    k->slices[0].dtype = DDP_I32;
}
static void ask_float(ckpt_rank *k, int rank) {
    (void)rank;
    k->slices[1].dtype = DDP_F16;
}
static void ask_shape(ckpt_rank *k, int rank) {
    (void)rank;
    k->slices[3].shape[1] = 5;
    k->slices[3].extent[1] = 5;
}
static void ask_ndim(ckpt_rank *k, int rank) {
    (void)rank;
    k->slices[3].ndim = 1;
}
static void ask_fewer(ckpt_rank *k, int rank) {
    (void)rank;
    k->count--;
}
static void ask_more(ckpt_rank *k, int rank) {
    (void)rank;
    k->slices[k->count] = k->slices[3];
    k->slices[k->count++].name = "another";
}
static void ask_kind(ckpt_rank *k, int rank) {
    (void)rank;
    k->slices[13].file_kind = 0;
}

static void test_other_model(void) {
    static const struct {
        void (*twist)(ckpt_rank *, int);
        const char *words;
    } other[] = {
        {ask_dtype, "'wte' at bytes [|F32 [7,5]|I32 [7,5]"},
        {ask_float, "'h.weight'|BF16|F16"},
        {ask_shape, "'empty'|[0,4]|[0,5]"},
        {ask_ndim, "'empty'|[0,4]|[0]"},
        {ask_fewer, "'long.exp_avg' at bytes [|F32 [3,1001]|not among the 14"},
        {ask_more, "'another'|not in the files"},
        {ask_kind, "'wte.exp_avg_sq'"},
    };
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        job j = job_of(in("good"), 1, 0);
        scenario = other[i].words;
        j.twist = other[i].twist;
        run(&j, 2, DDP_ERR_MISMATCH, other[i].words);
    }
}

//== disks ==================================================================================

static void another_state(ckpt_rank *k, int rank) {
    (void)rank;
    k->state.step = 99;
}

/* A folder that is not shared: each rank finds a complete checkpoint, and only their states differ. */
static void test_folders_of_ranks(void) {
    job j = job_of(in("here"), 0, 1);
    scenario = "each rank has a folder of its own";
    run(&j, 2, DDP_OK, "");
    j.dir = in("there");
    j.twist = another_state;
    run(&j, 2, DDP_OK, "");
    j = job_of(in("here"), 1, 1);
    j.other = in("there");
    run(&j, 2, DDP_ERR_MISMATCH,
        "rank 0 finds checkpoint |, rank 1 finds checkpoint |the folder is not shared");
    load(in("here"), 2, 1);
}

/* Another process writes the file again while ranks read it. */
static void test_cut_while_mapped(void) {
    job j = job_of(in("cut"), 0, 3);
    scenario = "a file is cut short while it is mapped";
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int knows = madvise(page, 4096, DDP__POPULATE_READ) == 0; /* before Linux 5.14 this is a signal */
    munmap(page, 4096);
    if (!knows) return;
    for (int w = 1; w <= 2; w++) {
        j = job_of(in("cut"), 0, 3);
        run(&j, w, DDP_OK, "");
        cut_mapped = 2 * w; /* every rank has mapped both files */
        j = job_of(in("cut"), 1, 3);
        run(&j, w, DDP_ERR_SYSTEM, "cut/optimizer-|cannot be read|truncated");
    }
}

/* No file is larger than max_file_bytes, except one that holds a single tensor. Headers count: names are long
   here. */
static void test_file_sizes(void) {
    enum { TENSORS = 40, LIMIT = 3000 };
    static char names[TENSORS][200];
    static float values[TENSORS][1000];
    ddp_group_desc alone = DDP_ZERO;
    ddp_fsdp_state state = DDP_ZERO;
    ddp_group *group = NULL;
    ddp__checkpoint_slice slices[TENSORS];
    int files = 0, full = 0;
    scenario = "max_file_bytes";
    memset(slices, 0, sizeof slices);
    for (int i = 0; i < TENSORS; i++) {
        memset(names[i], 'a' + i % 26, 150);
        snprintf(names[i] + 150, 50, "%d", i);
        slices[i].name = names[i];
        slices[i].dtype = DDP_F32;
        slices[i].ndim = 1;
        int64_t count = i % 3 ? 1 : 150;
        if (i == 20) count = 1000;
        slices[i].shape[0] = slices[i].extent[0] = count;
        slices[i].data = values[i];
    }
    alone.init_method = "self://";
    EXPECT(ddp_group_create(&group, &alone) == DDP_OK, "%s", ddp_last_error());
    EXPECT(ddp__checkpoint_save(group, in("sizes"), slices, TENSORS, &state, NULL, LIMIT, 1) == DDP_OK, "%s",
           ddp_last_error());
    for (int f = 1, count = 1; f <= count; f++) {
        DIR *open_folder = opendir(in("sizes"));
        char wanted[64];
        size_t bytes = 0;
        int tensors = 0;
        struct dirent *entry;
        snprintf(wanted, sizeof wanted, "model-%05d-of-", f);
        while ((entry = readdir(open_folder)) != NULL) {
            char path[600], *text;
            if (strncmp(entry->d_name, wanted, strlen(wanted)) != 0) continue;
            count = atoi(entry->d_name + strlen(wanted));
            snprintf(path, sizeof path, "%s/%s", in("sizes"), entry->d_name);
            text = ckpt_read(path, &bytes);
            for (size_t i = 0; i + 5 < bytes; i++) tensors += memcmp(text + i, "dtype", 5) == 0;
            free(text);
        }
        closedir(open_folder);
        EXPECT(tensors >= 1 && (bytes <= LIMIT || tensors == 1), "file %d of %d has %d tensors in %zu bytes",
               f, count, tensors, bytes);
        files++;
        full += tensors > 1;
    }
    EXPECT(files >= 10 && full >= 3, "%d files, %d with several tensors", files, full);
    ddp_group_destroy(group);
}

//== models of other programs ==================================================================

/* A file of one tensor "w", in the format of other programs. */
static void write_foreign(const char *path, const char *header, const void *data, size_t bytes) {
    unsigned char all[2000];
    size_t length = strlen(header);
    for (int i = 0; i < 8; i++) all[i] = (unsigned char)(length >> 8 * i);
    memcpy(all + 8, header, length);
    memcpy(all + 8 + length, data, bytes);
    ckpt_write(path, all, 8 + length + bytes);
}

static const float foreign_values[6] = {1, -2, 0.5f, 1024, -0.0f, 3};
static int foreign_logged;
static void foreign_log(const char *text, void *user) {
    (void)user;
    foreign_logged += strstr(text, "state.json") != NULL;
}

/* Loads "w" f32 [6] and an optimizer tensor; returns the result, and whether the values are right. */
static ddp_result load_foreign(const char *dir, int *fine) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group = NULL;
    ddp_fsdp_state state;
    ddp__checkpoint_slice s[2];
    float w[6] = {9, 9, 9, 9, 9, 9}, moment[2] = {9, 9};
    ddp_result result;
    memset(s, 0, sizeof s);
    memset(&state, 5, sizeof state);
    s[0].name = "w", s[0].data = w, s[0].shape[0] = s[0].extent[0] = 6;
    s[1].name = "w.exp_avg", s[1].data = moment, s[1].shape[0] = s[1].extent[0] = 2, s[1].file_kind = 1;
    s[0].dtype = s[1].dtype = DDP_F32, s[0].ndim = s[1].ndim = 1;
    desc.init_method = "self://";
    desc.log_fn = foreign_log;
    if (ddp_group_create(&group, &desc) != DDP_OK) return DDP_ERR_SYSTEM;
    result = ddp__checkpoint_load(group, NULL, dir, s, 2, NULL, NULL, &state);
    if (result == DDP_OK)
        *fine = memcmp(w, foreign_values, sizeof w) == 0 && moment[0] == 0 && moment[1] == 0
                && state.step == 0 && state.rng[0] == UINT64_C(0x0505050505050505);
    else
        *fine = w[0] == 9 && w[5] == 9 && moment[0] == 9 && state.step != 0;
    ddp_group_destroy(group);
    return result;
}

static void test_foreign(void) {
    uint16_t half[6];
    double wide[6];
    int32_t whole[6] = {0};
    int fine = 0;
    const char *file = in("foreign/model.safetensors");
    static const struct {
        const char *header, *words;
    } bad[] = {
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,28]}}", "outside"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[0,20]}}", "end at byte 20"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[4,24]}}", "unused bytes"},
        {"{\"w\":{\"dtype\":\"I32\",\"shape\":[6],\"data_offsets\":[0,24]}}", "I32"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", "[2,3]"},
        {"{\"v\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}", "'v'"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},\"v\":{\"dtype\":\"F32\","
         "\"shape\":[3],\"data_offsets\":[12,24]}}",
         "overlaps"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[0,20]},\"m\":{\"dtype\":\"BOOL\","
         "\"shape\":[4],\"data_offsets\":[20,24]}}",
         "BOOL [4]"},
    };
    EXPECT(mkdir(in("foreign"), 0777) == 0, "mkdir");
    for (int i = 0; i < 6; i++) {
        half[i] = ranks_f32_to_bf16(foreign_values[i]);
        wide[i] = (double)foreign_values[i];
    }
    scenario = "models from elsewhere";
    write_foreign(file, "{\"w\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}", foreign_values,
                  24);
    EXPECT(load_foreign(in("foreign"), &fine) == DDP_OK && fine && foreign_logged == 1, "%s",
           ddp_last_error());
    write_foreign(file, "{\"w\":{\"dtype\":\"BF16\",\"shape\":[6],\"data_offsets\":[0,12]}} ", half, 12);
    EXPECT(load_foreign(in("foreign"), &fine) == DDP_OK && fine, "%s", ddp_last_error());
    for (int i = 0; i < 6; i++) half[i] = ranks_f32_to_f16(foreign_values[i]);
    write_foreign(file, "{\"w\":{\"dtype\":\"F16\",\"shape\":[6],\"data_offsets\":[0,12]}}", half, 12);
    EXPECT(load_foreign(in("foreign"), &fine) == DDP_OK && fine, "%s", ddp_last_error());
    write_foreign(file, "{\"w\":{\"dtype\":\"F64\",\"shape\":[6],\"data_offsets\":[0,48]}}", wide, 48);
    EXPECT(load_foreign(in("foreign"), &fine) == DDP_OK && fine, "%s", ddp_last_error());
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_foreign(file, bad[i].header, i == 3 ? (const void *)whole : foreign_values, 24);
        EXPECT(load_foreign(in("foreign"), &fine) < 0 && fine && strstr(ddp_last_error(), bad[i].words)
                   && strstr(ddp_last_error(), "foreign/model.safetensors"),
               "%s: %s", bad[i].words, ddp_last_error());
    }
    ckpt_write(file, "\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10);
    EXPECT(load_foreign(in("foreign"), &fine) == DDP_ERR_CORRUPT && fine
               && strstr(ddp_last_error(), "100 MB"),
           "%s", ddp_last_error());
    ckpt_write(file, "\x09\0\0\0\0\0\0\0{}", 10);
    EXPECT(load_foreign(in("foreign"), &fine) == DDP_ERR_CORRUPT && fine
               && strstr(ddp_last_error(), "needs 9 bytes"),
           "%s", ddp_last_error());
    scenario = "an index from elsewhere";
    write_foreign(in("foreign/part.safetensors"),
                  "{\"w\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}", foreign_values, 24);
    {
        char here[400], absolute[700];
        EXPECT(getcwd(here, sizeof here) != NULL, "getcwd");
        snprintf(absolute, sizeof absolute, "{\"weight_map\":{\"w\":\"%s/%s/part.safetensors\"}}", here,
                 in("foreign"));
        EXPECT(mkdir(in("foreign/sub"), 0777) == 0
                   && ckpt_shell("cp %s %s", in("foreign/part.safetensors"), in("foreign/sub")) == 0,
               "cp");
        const struct {
            const char *index, *words;
        } indexes[] = {
            {"{\"metadata\":{\"total_size\":24.0,\"x\":[{}]},\"weight_map\":{\"w\":\"part.safetensors\"}}",
             NULL},
            {"{\"metadata\":{}}", "missing weight_map"},
            {"{\"weight_map\":{\"w\":\"../part.safetensors\"}}", "name of a file"},
            {"{\"weight_map\":{\"w\":\"sub/../part.safetensors\"}}", "name of a file"},
            {"{\"weight_map\":{\"w\":\"sub/part.safetensors\"}}", "name of a file"},
            {absolute, "name of a file"},
            {"{\"weight_map\":{\"w\":\"other.safetensors\"}}", "other.safetensors is missing"},
            {"{\"weight_map\":{\"w\":3}}", "string"},
            {"{\"weight_map\":{}}", "'w'"},
            {"{\"weight_map\":{},\"weight_map\":{}}", "duplicate weight_map"},
            {"", "object"},
        };
        for (size_t i = 0; i < sizeof indexes / sizeof *indexes; i++) {
            ddp_result result;
            ckpt_write(in("foreign/model.safetensors.index.json"), indexes[i].index,
                       strlen(indexes[i].index));
            result = load_foreign(in("foreign"), &fine);
            EXPECT(fine
                       && (indexes[i].words ? result < 0 && strstr(ddp_last_error(), indexes[i].words)
                                            : result == DDP_OK),
                   "%s: %s", indexes[i].index, ddp_last_error());
        }
    }
    EXPECT(ckpt_shell("rm -r %s %s %s", in("foreign/model.safetensors.index.json"), in("foreign/sub"), file)
               == 0,
           "rm");
    EXPECT(load_foreign(in("foreign"), &fine) == DDP_ERR_CORRUPT && fine, "%s", ddp_last_error());
}

int main(void) {
    watchdog_start(120);
    snprintf(folder, sizeof folder, "checkpoint.XXXXXX");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 2;
    }
    test_any_world_size();
    test_keeps_some();
    test_stale_and_strange();
    test_save_fails();
    test_sync_fails();
    test_export_fails();
    test_no_fallocate();
    test_bad_lists();
    test_other_options();
    test_damage();
    test_ranks_of_state();
    test_other_model();
    test_folders_of_ranks();
    test_cut_while_mapped();
    test_file_sizes();
    test_foreign();
    EXPECT(ckpt_shell("rm -rf %s", folder) == 0, "rm");
    printf(failures ? "%d failures\n" : "ok\n", failures);
    return failures != 0;
}

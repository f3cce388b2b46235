/*  bench_checkpoint.c - speed of writing and reading checkpoints, against plain files of the same size on the
    same disk.

    cc -O3 -march=native bench_checkpoint.c -o bench_checkpoint -lpthread -lm
    ./bench_checkpoint [--mib 1024] [--rounds 7] [--dir .] [--ranks 1,2]

    Each round measures, one after the other:
      write       a plain file, 4 MiB at a time by one thread, then fsync
      save        everything: checksums, fsync of files and folders, renames
      warm read   the file is in the page cache; by one thread into memory that was used before
      warm load
      cold read, cold load   the pages of the file are dropped first
    Old checkpoints and files are deleted outside of the measured time. Prints medians as a table, and each
    round as CSV on stderr. Ranks are threads. Tensors have 16 MiB, each followed by one that is 25 times
    smaller. */
#define _GNU_SOURCE
#define DDP_IMPLEMENTATION
#include "../ddp_fsdp.h"
#include "median.h"

#include <time.h>

enum { MAX_ROUNDS = 51, MAX_TENSORS = 4096, KINDS = 6, MAX_WORLDS = 4 };
static const char *const kind_names[KINDS] = {"write",     "save",      "warm read",
                                              "warm load", "cold read", "cold load"};

static size_t mib = 1024;
static int rounds = 7, worlds[MAX_WORLDS] = {1, 2}, world_count = 2;
static const char *folder = ".";
static char dir[400], plain[400];
static double seconds[MAX_WORLDS][KINDS][MAX_ROUNDS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "bench: %s: %s\n", what, errno ? strerror(errno) : ddp_last_error());
    _exit(1);
}

/* The rows of one rank, in separate memory. */
typedef struct part {
    ddp__checkpoint_slice slices[MAX_TENSORS];
    char names[MAX_TENSORS][24];
    int count;
    uint64_t bytes;
} part;

static part *part_make(int rank, int world_size) {
    part *p = (part *)calloc(1, sizeof *p);
    uint64_t total = (uint64_t)mib << 20, given = 0;
    for (; given < total && p->count < MAX_TENSORS; p->count++) {
        ddp__checkpoint_slice *s = &p->slices[p->count];
        int64_t rows = p->count % 2 ? 160 : 4096, each = (rows + world_size - 1) / world_size,
                first = each * rank < rows ? each * rank : rows;
        snprintf(p->names[p->count], sizeof p->names[0], "layer.%d.%s", p->count / 2,
                 p->count % 2 ? "bias" : "weight");
        s->name = p->names[p->count];
        s->dtype = DDP_F32;
        s->ndim = 2;
        s->shape[0] = rows;
        s->shape[1] = s->extent[1] = 1024;
        s->offset[0] = first;
        s->extent[0] = first + each < rows ? each : rows - first;
        s->data = malloc((size_t)s->extent[0] * 4096);
        for (int64_t i = 0; i < s->extent[0] * 1024; i++) ((float *)s->data)[i] = (float)(i * 31 + p->count);
        given += (uint64_t)rows * 4096;
    }
    p->bytes = given;
    return p;
}

static void part_free(part *p) {
    for (int i = 0; i < p->count; i++) free(p->slices[i].data);
    free(p);
}

static void drop_file(const char *path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) die(path);
    close(fd);
}

static void drop_checkpoint(void) {
    char path[800];
    DIR *d = opendir(dir);
    struct dirent *entry;
    while (d && (entry = readdir(d)) != NULL) {
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (entry->d_name[0] != '.') drop_file(path);
    }
    if (d) closedir(d);
}

static double plain_write(const part *p) {
    double start;
    int fd;
    uint64_t at = 0;
    unlink(plain);
    sync();
    start = now();
    fd = open(plain, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    for (int i = 0; i < p->count; i++) {
        uint64_t bytes = (uint64_t)p->slices[i].extent[0] * 4096;
        for (uint64_t b = 0, n; b < bytes; b += n, at += n) {
            n = bytes - b < 4 << 20 ? bytes - b : 4 << 20;
            if (pwrite(fd, (char *)p->slices[i].data + b, (size_t)n, (off_t)at) != (ssize_t)n) die(plain);
        }
    }
    if (fsync(fd) != 0) die(plain);
    close(fd);
    return now() - start;
}

static double plain_read(const part *p) {
    double start = now();
    int fd = open(plain, O_RDONLY);
    uint64_t at = 0;
    for (int i = 0; i < p->count; i++) {
        uint64_t bytes = (uint64_t)p->slices[i].extent[0] * 4096;
        for (uint64_t b = 0, n; b < bytes; b += n, at += n) {
            n = bytes - b < 4 << 20 ? bytes - b : 4 << 20;
            if (pread(fd, (char *)p->slices[i].data + b, (size_t)n, (off_t)at) != (ssize_t)n) die(plain);
        }
    }
    close(fd);
    return now() - start;
}

/* One measured call on all ranks. Returns the time between two barriers, measured by rank 0. */
static double measured(ddp_group *group, part *p, int save) {
    double start;
    ddp_fsdp_state state = DDP_ZERO;
    ddp_result result;
    if (ddp_barrier(group) != DDP_OK) die("barrier");
    start = now();
    if (save)
        result = ddp__checkpoint_save(group, dir, p->slices, p->count, &state, 0, 1);
    else
        result = ddp__checkpoint_load(group, NULL, dir, p->slices, p->count, NULL, &state);
    if (result != DDP_OK) die(dir);
    if (ddp_barrier(group) != DDP_OK) die("barrier");
    return now() - start;
}

static ddp_result rank_main(ddp_group *group, void *user) {
    int rank = ddp_rank(group), world = *(int *)user;
    part *p = part_make(rank, ddp_world_size(group)), *whole = rank == 0 ? part_make(0, 1) : NULL;
    for (int round = 0; round < rounds; round++)
        for (int kind = 0; kind < KINDS; kind++) {
            double s = 0;
            if (rank == 0 && kind == 0) s = plain_write(whole);
            if (rank == 0 && kind == 1 && ddp__folder_delete(dir) != DDP_OK) die(dir);
            if (rank == 0 && kind == 1) sync();
            if (rank == 0 && kind == 4) drop_file(plain);
            if (rank == 0 && kind == 5) drop_checkpoint();
            if (kind % 2)
                s = measured(group, p, kind == 1);
            else if (kind && rank == 0)
                s = plain_read(whole);
            if (rank == 0) seconds[world][kind][round] = s;
            if (rank == 0)
                fprintf(stderr, "%d,%s,%d,%.4f,%.3f\n", ddp_world_size(group), kind_names[kind], round, s,
                        (double)p->bytes / s / 1e9);
        }
    if (whole) part_free(whole);
    part_free(p);
    return DDP_OK;
}

int main(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--mib") == 0)
            mib = (size_t)atol(argv[i + 1]);
        else if (strcmp(argv[i], "--rounds") == 0 && atoi(argv[i + 1]) > 0 && atoi(argv[i + 1]) <= MAX_ROUNDS)
            rounds = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--dir") == 0)
            folder = argv[i + 1];
        else if (strcmp(argv[i], "--ranks") == 0) {
            world_count = 0;
            for (char *word = strtok(argv[i + 1], ","); word && world_count < MAX_WORLDS;
                 word = strtok(NULL, ","))
                worlds[world_count++] = atoi(word);
        } else
            return fprintf(stderr, "usage: %s [--mib 1024] [--rounds 7] [--dir .] [--ranks 1,2]\n", argv[0]),
                   1;
    }
    snprintf(dir, sizeof dir, "%s/bench_checkpoint", folder);
    snprintf(plain, sizeof plain, "%s/bench_checkpoint.plain", folder);
    fprintf(stderr, "ranks,what,round,seconds,gb_per_s\n");
    printf("| ranks | write, GB/s | save | save / write | warm read | warm load | load / read | cold read | "
           "cold load | load / read |\n|---|---|---|---|---|---|---|---|---|---|\n");
    for (int w = 0; w < world_count; w++) {
        ddp_launch_desc desc = DDP_ZERO;
        desc.world_size = worlds[w];
        desc.mode = DDP_LAUNCH_THREADS;
        errno = 0;
        if (ddp_launch(&desc, rank_main, &w) != DDP_OK) die("launch");
        printf("| %d |", worlds[w]);
        for (int kind = 0; kind < KINDS; kind += 2) {
            double file_s = median(seconds[w][kind], rounds), ddp_s = median(seconds[w][kind + 1], rounds),
                   bytes = (double)mib * 1048576;
            printf(" %.2f | %.2f | %.0f%% |", bytes / file_s / 1e9, bytes / ddp_s / 1e9,
                   100 * file_s / ddp_s);
        }
        printf("\n");
    }
    (void)ddp__folder_delete(dir);
    unlink(plain);
    return 0;
}

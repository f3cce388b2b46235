/*  text.h - files and folders as one run of bytes, for examples that train on text.

    text_load appends every file in the order given; a folder counts as its files, in the order of their paths' bytes, so
    that every machine gets the same text. Inside a folder, dot-files, folders named build, links and binary files
    are left out. With no path at all, the text is that of the repository that this file belongs to.

    text_open_shards takes token shards of llm.c instead, as one stream in the same order. They stay where they are: text_read reads what is asked for. */
#ifndef DDP_EXAMPLE_TEXT_H
#define DDP_EXAMPLE_TEXT_H

#ifndef DDP_H
#include "../../ddp.h"
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct text_paths {
    char **path;
    int count, capacity;
} text_paths;
typedef struct text_buffer {
    uint8_t *bytes; /* NULL: the text is in shards */
    int64_t count, capacity;
    text_paths shards;
    int64_t *first; /* shards.count + 1: the byte of the text that each begins with, and count */
} text_buffer;

static ddp_result text__list_add(text_paths *list, const char *folder, const char *name) {
    size_t size_bytes = strlen(folder) + strlen(name) + 2;
    char *path = (char *)malloc(size_bytes);
    if (list->count == list->capacity) {
        int capacity = list->capacity * 2 + 64;
        char **grown = (char **)realloc(list->path, (size_t)capacity * sizeof *grown);
        if (grown) {
            list->path = grown;
            list->capacity = capacity;
        }
    }
    if (!path || list->count == list->capacity) {
        free(path);
        return ddp_fail(DDP_ERR_NO_MEMORY, "a list of %d files", list->count);
    }
    snprintf(path, size_bytes, "%s%s%s", folder, *folder ? "/" : "", name);
    list->path[list->count++] = path;
    return DDP_OK;
}

static void text__list_free(text_paths *list) {
    for (int i = 0; i < list->count; i++) free(list->path[i]);
    free(list->path);
    memset(list, 0, sizeof *list);
}

static int text__compare(const void *left, const void *right) {
    return strcmp(*(char *const *)left, *(char *const *)right);
}

static int text__ends_with(const char *name, const char *ending) {
    size_t length = strlen(name), tail = strlen(ending);
    return length >= tail && !strcmp(name + length - tail, ending);
}

/* Files below folder that may be text. Links are not followed, so there are no circles. headers_only: *.h, *.cuh and README.md of
   the folder itself. */
static ddp_result text__list_folder(text_paths *list, const char *folder, int headers_only) {
    DIR *directory = opendir(folder);
    struct dirent *entry;
    ddp_result result = DDP_OK;
    if (!directory)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; give files or folders that can be read", folder,
                        strerror(errno));
    while (result == DDP_OK && (entry = readdir(directory)) != NULL) {
        const char *name = entry->d_name;
        struct stat info;
        char *inside;
        int known;
        if (name[0] == '.' || !strcmp(name, "loss.svg")) continue;
        if (headers_only && !text__ends_with(name, ".h") && !text__ends_with(name, ".cuh")
            && strcmp(name, "README.md"))
            continue;
        result = text__list_add(list, folder, name);
        if (result != DDP_OK) break;
        known = lstat(list->path[list->count - 1], &info) == 0;
        if (known && S_ISREG(info.st_mode)) continue;
        inside = list->path[--list->count]; /* not a file: a folder gives its place to what is in it */
        if (known && !headers_only && S_ISDIR(info.st_mode) && strcmp(name, "build"))
            result = text__list_folder(list, inside, 0);
        free(inside);
    }
    closedir(directory);
    return result;
}

/* Appends a file. skip_binary: one with a zero byte in it adds nothing. */
static ddp_result text_add_file(text_buffer *t, const char *path, int skip_binary) {
    int64_t start = t->count;
    size_t got = 1;
    FILE *file = fopen(path, "rb");
    if (!file)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; give files or folders that can be read", path,
                        strerror(errno));
    while (got > 0) {
        if (t->capacity - t->count < 65536) {
            int64_t capacity = t->capacity * 2 + (1 << 20);
            uint8_t *grown = (uint8_t *)realloc(t->bytes, (size_t)capacity);
            if (!grown) {
                fclose(file);
                return ddp_fail(DDP_ERR_NO_MEMORY, "%s: the text does not fit in memory; give fewer files",
                                path);
            }
            t->bytes = grown;
            t->capacity = capacity;
        }
        got = fread(t->bytes + t->count, 1, 65536, file);
        if (skip_binary && memchr(t->bytes + t->count, 0, got)) {
            t->count = start;
            break;
        }
        t->count += (int64_t)got;
    }
    if (ferror(file)) {
        fclose(file);
        return ddp_fail(DDP_ERR_SYSTEM, "%s could not be read; give files that can", path);
    }
    fclose(file);
    return DDP_OK;
}

/* Appends what a folder holds, in the order of the paths' bytes, so that every machine gets the same text. */
static ddp_result text_add_folder(text_buffer *t, const char *folder, int headers_only) {
    text_paths list;
    ddp_result result;
    memset(&list, 0, sizeof list);
    result = text__list_folder(&list, folder, headers_only);
    if (list.count) qsort(list.path, (size_t)list.count, sizeof *list.path, text__compare);
    for (int i = 0; result == DDP_OK && i < list.count; i++) result = text_add_file(t, list.path[i], 1);
    text__list_free(&list);
    return result;
}

static int text__is_repository(const char *folder) {
    char path[4096 + 32];
    struct stat info;
    snprintf(path, sizeof path, "%s/examples/gpt/train_gpt.c", folder);
    if (stat(path, &info) != 0) return 0;
    snprintf(path, sizeof path, "%s/ddp.h", folder);
    return stat(path, &info) == 0;
}

/* This repository: here, around the executable, or around the source it was compiled from. */
static int text__find_repository(char *folder, size_t size_bytes) {
    ssize_t length;
    char *slash;
    snprintf(folder, size_bytes, ".");
    if (text__is_repository(folder)) return 1;
    length = readlink("/proc/self/exe", folder, size_bytes - 1);
    folder[length > 0 ? length : 0] = 0;
    while ((slash = strrchr(folder, '/')) != NULL) {
        *slash = 0;
        if (text__is_repository(folder)) return 1;
    }
    snprintf(folder, size_bytes, "%s", __FILE__);
    slash = strrchr(folder, '/');
    snprintf(slash ? slash : folder, 8, "%s", slash ? "/../.." : "../..");
    return text__is_repository(folder);
}

static inline ddp_result text_load(text_buffer *t, const char **paths, int path_count) {
    char folder[4096];
    ddp_result result = DDP_OK;
    if (path_count == 0) {
        if (!text__find_repository(folder, sizeof folder - 16))
            return ddp_fail(DDP_ERR_INVALID, "there is no text here; give files or folders to train on");
        result = text_add_folder(t, folder, 1);
        strcat(folder, "/examples");
        return result == DDP_OK ? text_add_folder(t, folder, 0) : result;
    }
    for (int i = 0; result == DDP_OK && i < path_count; i++) {
        struct stat info;
        int64_t before = t->count;
        if (stat(paths[i], &info) != 0)
            return ddp_fail(DDP_ERR_INVALID, "%s: %s; give files or folders that exist", paths[i],
                            strerror(errno));
        result = S_ISDIR(info.st_mode) ? text_add_folder(t, paths[i], 0) : text_add_file(t, paths[i], 0);
        if (result == DDP_OK && t->count == before)
            return ddp_fail(DDP_ERR_INVALID, "%s holds no text; give files or folders with some", paths[i]);
    }
    return result;
}

/* Token shards of llm.c: 256 int32 (magic, version, count of tokens), then the tokens in 16 bits, little-endian. Theirs is the vocabulary of GPT-2. */
#define TEXT_SHARD_MAGIC 20240520
#define TEXT_SHARD_HEADER 1024
#define TEXT_SHARD_VOCAB 50257

/* A pipe is none, and nothing is taken out of it. */
static inline int text_is_shard(const char *path) {
    int32_t magic = 0;
    struct stat info;
    FILE *file = stat(path, &info) == 0 && S_ISREG(info.st_mode) ? fopen(path, "rb") : NULL;
    size_t got = file ? fread(&magic, sizeof magic, 1, file) : 0;
    if (file) fclose(file);
    return got == 1 && magic == TEXT_SHARD_MAGIC;
}

/* pread, all of it. */
static inline ddp_result text_pread(int file, const char *path, void *to, size_t size_bytes, int64_t at) {
    uint8_t *out = (uint8_t *)to;
    while (size_bytes > 0) {
        ssize_t got = pread(file, out, size_bytes < (size_t)1 << 30 ? size_bytes : (size_t)1 << 30,
                            (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return ddp_fail(DDP_ERR_SYSTEM, "%s: reading at byte %lld: %s; give a file that can be read",
                            path, (long long)at, strerror(errno));
        if (got == 0)
            return ddp_fail(DDP_ERR_CORRUPT,
                            "%s ends at byte %lld while it is read; do not change a file in use", path,
                            (long long)at);
        out += got, at += got, size_bytes -= (size_t)got;
    }
    return DDP_OK;
}

static inline ddp_result text__shard_size(int file, const char *path, int64_t *tokens) {
    int32_t header[3];
    struct stat info;
    if (fstat(file, &info) != 0)
        return ddp_fail(DDP_ERR_SYSTEM, "%s: %s; give a file that can be read", path, strerror(errno));
    if (info.st_size < TEXT_SHARD_HEADER)
        return ddp_fail(DDP_ERR_CORRUPT, "%s ends inside its header; make the shard again", path);
    ddp_result result = text_pread(file, path, header, sizeof header, 0);
    if (result != DDP_OK) return result;
    *tokens = (info.st_size - TEXT_SHARD_HEADER) / 2;
    if (header[0] != TEXT_SHARD_MAGIC)
        return ddp_fail(DDP_ERR_CORRUPT, "%s is no token shard any more; do not change a file in use", path);
    if (header[1] != 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%s: version %d of the format, this program reads version 1",
                        path, (int)header[1]);
    if (header[2] == *tokens && info.st_size % 2 == 0) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT,
                    "%s has %lld bytes after its header, which says %d tokens of 2; make the shard again",
                    path, (long long)(info.st_size - TEXT_SHARD_HEADER), (int)header[2]);
}

/* Opened for as long as it is read: there may be more shards than files that a process may have open. */
static inline ddp_result text__open_shard(const char *path, int *file, int64_t *tokens) {
    *file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*file < 0)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; give files or folders that can be read", path,
                        strerror(errno));
    ddp_result result = text__shard_size(*file, path, tokens);
    if (result != DDP_OK) close(*file);
    return result;
}

/* Files of the paths, in the order of text_load. */
static inline ddp_result text__list_paths(text_paths *list, const char **paths, int path_count) {
    ddp_result result = DDP_OK;
    for (int i = 0; result == DDP_OK && i < path_count; i++) {
        struct stat info;
        int before = list->count;
        if (stat(paths[i], &info) != 0 || !S_ISDIR(info.st_mode)) {
            result = text__list_add(list, "", paths[i]);
            continue;
        }
        result = text__list_folder(list, paths[i], 0);
        if (list->count > before)
            qsort(list->path + before, (size_t)(list->count - before), sizeof *list->path, text__compare);
    }
    return result;
}

static inline void text_free(text_buffer *t) {
    text__list_free(&t->shards);
    free(t->first);
    free(t->bytes);
    memset(t, 0, sizeof *t);
}

/* Where the paths are token shards, or folders of them, t, which is zero, becomes their tokens, 2 bytes each; otherwise it stays zero. */
static inline ddp_result text_open_shards(text_buffer *t, const char **paths, int path_count) {
    const char *other = NULL;
    int found = 0, file;
    ddp_result result = text__list_paths(&t->shards, paths, path_count);
    for (int i = 0; result == DDP_OK && i < t->shards.count; i++) {
        if (text_is_shard(t->shards.path[i]))
            found++;
        else
            other = t->shards.path[i];
    }
    if (result == DDP_OK && found && other)
        result = ddp_fail(DDP_ERR_INVALID,
                          "%s is no token shard, and another path is one; give shards alone, or text alone",
                          other);
    if (result == DDP_OK && found) t->first = (int64_t *)calloc((size_t)found + 1, sizeof *t->first);
    if (result == DDP_OK && found && !t->first)
        result = ddp_fail(DDP_ERR_NO_MEMORY, "a list of %d shards", found);
    for (int i = 0; result == DDP_OK && i < found; i++) {
        int64_t tokens = 0;
        result = text__open_shard(t->shards.path[i], &file, &tokens);
        if (result == DDP_OK) close(file);
        t->count = t->first[i + 1] = t->first[i] + 2 * tokens;
    }
    if (result != DDP_OK || !found) text_free(t);
    return result;
}

/* The shard that byte `at` of the text lies in. */
static inline int text__shard_of(const text_buffer *t, int64_t at) {
    int low = 0, high = t->shards.count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (t->first[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Bytes [at, at + size_bytes) of the text, which has them. Every thread may read at once. */
static inline ddp_result text_read(const text_buffer *t, int64_t at, size_t size_bytes, void *out) {
    uint8_t *to = (uint8_t *)out;
    if (t->bytes) {
        memcpy(to, t->bytes + at, size_bytes);
        return DDP_OK;
    }
    for (int i = text__shard_of(t, at), file; size_bytes > 0; i++) {
        int64_t tokens = 0, left = t->first[i + 1] - at;
        size_t n = (uint64_t)left < size_bytes ? (size_t)left : size_bytes;
        if (n == 0) continue;
        ddp_result result = text__open_shard(t->shards.path[i], &file, &tokens);
        if (result != DDP_OK) return result;
        if (2 * tokens == t->first[i + 1] - t->first[i])
            result = text_pread(file, t->shards.path[i], to, n, TEXT_SHARD_HEADER + at - t->first[i]);
        else
            result = ddp_fail(DDP_ERR_CORRUPT,
                              "%s has other tokens than at the start; do not change a file in use",
                              t->shards.path[i]);
        close(file);
        if (result != DDP_OK) return result;
        to += n, at += (int64_t)n, size_bytes -= n;
    }
    return DDP_OK;
}

/* The token of 2 bytes at byte `at` is not in the vocabulary. */
static inline ddp_result text_bad_token(const text_buffer *t, int64_t at, int token, int vocab) {
    int i = text__shard_of(t, at);
    return ddp_fail(DDP_ERR_CORRUPT,
                    "%s: token %lld is %d, and the vocabulary ends at %d; make the shard again",
                    t->shards.path[i], (long long)(at - t->first[i]) / 2, token, vocab - 1);
}

#endif /* DDP_EXAMPLE_TEXT_H */

/* MIT License: see LICENSE. */

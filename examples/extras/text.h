/*  text.h - files and folders as one text, or token shards of llm.c as one sequence of tokens.

USAGE
    Copy it next to ddp.h and include it after ddp.h. sources.h includes it. All functions are static.

EXAMPLE
    const char *paths[] = {"books", "extra.txt"};
    text_buffer text = DDP_ZERO;
    text_open_shards(&text, paths, 2);          // text.count stays 0 if the paths are not token shards
    if (text.count == 0) text_load(&text, paths, 2);
    text_read(&text, 1000, sizeof window, window);
    text_free(&text);

CONCEPTS
    text_load         Reads files into memory, in the order of the paths. A folder contributes its files in
                      byte order of their paths, so every machine gets the same text. Within a folder it skips
                      names that begin with '.', folders named build, links, and binary files.
    text_open_shards  Opens token shards: 256 int32 (magic, version, token count), then tokens of 16 bits,
                      little-endian, of GPT-2's vocabulary. The tokens remain in the files; text_read reads
                      them.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). Lines name the file and the remedy.

NOT DONE HERE
    No tokenizer, no gzip, no mapping of files (see sources.h).
*/
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

/* Initialise it with zeros. */
typedef struct text_buffer {
    uint8_t *bytes;          /* NULL if the text is in shards */
    int64_t count, capacity; /* in bytes; a token has 2 bytes */
    text_paths shards;
    int64_t *first; /* shards.count + 1 offsets: shard i has bytes first[i] to first[i + 1] - 1 of the text */
} text_buffer;

//== lists of files =========================================================================================

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
        return ddp_fail(DDP_ERR_NO_MEMORY, "%s: list of %d files", name, list->count + 1);
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

/* Appends the files of a folder and its subfolders that can be text. Does not follow links, so it ends.
   headers_only: only *.h, *.cuh and README.md, without subfolders. */
static ddp_result text__list_folder(text_paths *list, const char *folder, int headers_only) {
    DIR *directory = opendir(folder);
    struct dirent *entry;
    ddp_result result = DDP_OK;
    if (!directory)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; pass readable files or folders", folder, strerror(errno));
    while (result == DDP_OK && (entry = readdir(directory)) != NULL) {
        const char *name = entry->d_name;
        struct stat info;
        char *subfolder;
        int found;
        if (name[0] == '.' || !strcmp(name, "loss.svg")) continue;
        if (headers_only && !text__ends_with(name, ".h") && !text__ends_with(name, ".cuh")
            && strcmp(name, "README.md"))
            continue;
        result = text__list_add(list, folder, name);
        if (result != DDP_OK) break;
        found = lstat(list->path[list->count - 1], &info) == 0;
        if (found && S_ISREG(info.st_mode)) continue;
        list->count--; /* not a file: remove it and, if it is a folder, append its files */
        subfolder = list->path[list->count];
        if (found && !headers_only && S_ISDIR(info.st_mode) && strcmp(name, "build"))
            result = text__list_folder(list, subfolder, 0);
        free(subfolder);
    }
    closedir(directory);
    return result;
}

//== text in memory =========================================================================================

/* Appends a file. skip_binary: a file with a zero byte appends nothing. */
static ddp_result text_add_file(text_buffer *t, const char *path, int skip_binary) {
    int64_t start = t->count;
    size_t got = 1;
    FILE *file = fopen(path, "rb");
    if (!file)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; pass readable files or folders", path, strerror(errno));
    while (got > 0) {
        if (t->capacity - t->count < 65536) {
            int64_t capacity = t->capacity * 2 + (1 << 20);
            uint8_t *grown = (uint8_t *)realloc(t->bytes, (size_t)capacity);
            if (!grown) {
                fclose(file);
                return ddp_fail(DDP_ERR_NO_MEMORY, "%s: the text does not fit in memory; pass fewer files",
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
        return ddp_fail(DDP_ERR_SYSTEM, "%s: read error; pass readable files", path);
    }
    fclose(file);
    return DDP_OK;
}

/* Appends the files of a folder in byte order of their paths. */
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

/* Finds the root of ddp's repository: the current folder, a parent folder of the executable, or the folder
   that this file was compiled from. Returns 0 if none is a repository. */
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
    if (slash)
        strcpy(slash, "/../.."); /* shorter than the file name that it replaces */
    else
        strcpy(folder, "../..");
    return text__is_repository(folder);
}

/* Appends files and folders to t. Without paths it loads the source text of ddp's repository.
   Free it with text_free, also after an error.
   Errors: DDP_ERR_INVALID (missing or unreadable path, path without text, no repository), DDP_ERR_SYSTEM,
   DDP_ERR_NO_MEMORY. */
static inline ddp_result text_load(text_buffer *t, const char **paths, int path_count) {
    char folder[4096];
    ddp_result result = DDP_OK;
    if (path_count == 0) {
        if (!text__find_repository(folder, sizeof folder - 16))
            return ddp_fail(DDP_ERR_INVALID, "ddp's repository was not found; pass files or folders of text");
        result = text_add_folder(t, folder, 1);
        strcat(folder, "/examples");
        return result == DDP_OK ? text_add_folder(t, folder, 0) : result;
    }
    for (int i = 0; result == DDP_OK && i < path_count; i++) {
        struct stat info;
        int64_t before = t->count;
        if (stat(paths[i], &info) != 0)
            return ddp_fail(DDP_ERR_INVALID, "%s: %s; pass files or folders that exist", paths[i],
                            strerror(errno));
        result = S_ISDIR(info.st_mode) ? text_add_folder(t, paths[i], 0) : text_add_file(t, paths[i], 0);
        if (result == DDP_OK && t->count == before)
            return ddp_fail(DDP_ERR_INVALID, "%s has no text; pass files or folders with text", paths[i]);
    }
    return result;
}

//== token shards of llm.c ==================================================================================

#define TEXT_SHARD_MAGIC 20240520
#define TEXT_SHARD_HEADER 1024 /* bytes */
#define TEXT_SHARD_VOCAB 50257 /* of GPT-2 */

/* 1 if path is a regular file that begins with TEXT_SHARD_MAGIC. Does not read from pipes. */
static inline int text_is_shard(const char *path) {
    int32_t magic = 0;
    struct stat info;
    FILE *file;
    size_t got;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return 0;
    file = fopen(path, "rb");
    if (!file) return 0;
    got = fread(&magic, sizeof magic, 1, file);
    fclose(file);
    return got == 1 && magic == TEXT_SHARD_MAGIC;
}

/* Reads size_bytes at byte `at` of a file, as pread does, but never fewer. */
static inline ddp_result text_pread(int file, const char *path, void *to, size_t size_bytes, int64_t at) {
    uint8_t *out = (uint8_t *)to;
    while (size_bytes > 0) {
        ssize_t got = pread(file, out, size_bytes < (size_t)1 << 30 ? size_bytes : (size_t)1 << 30,
                            (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return ddp_fail(DDP_ERR_SYSTEM, "%s: reading at byte %lld: %s; pass a readable file", path,
                            (long long)at, strerror(errno));
        if (got == 0)
            return ddp_fail(DDP_ERR_CORRUPT,
                            "%s: truncated at byte %lld while it was open; do not change files in use", path,
                            (long long)at);
        out += got;
        at += got;
        size_bytes -= (size_t)got;
    }
    return DDP_OK;
}

/* Checks the header of a shard and sets *tokens. */
static inline ddp_result text__shard_size(int file, const char *path, int64_t *tokens) {
    int32_t header[3];
    struct stat info;
    if (fstat(file, &info) != 0)
        return ddp_fail(DDP_ERR_SYSTEM, "%s: %s; pass a readable file", path, strerror(errno));
    if (info.st_size < TEXT_SHARD_HEADER)
        return ddp_fail(DDP_ERR_CORRUPT, "%s: truncated: it ends inside its header; create it again", path);
    DDP_TRY(text_pread(file, path, header, sizeof header, 0));
    *tokens = (info.st_size - TEXT_SHARD_HEADER) / 2;
    if (header[0] != TEXT_SHARD_MAGIC)
        return ddp_fail(DDP_ERR_CORRUPT, "%s is no longer a token shard; do not change files in use", path);
    if (header[1] != 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%s: shard version %d; only version 1 is supported", path,
                        (int)header[1]);
    if (header[2] == *tokens && info.st_size % 2 == 0) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT,
                    "%s has %lld bytes after its header, not 2 for each of %d tokens; create it again", path,
                    (long long)(info.st_size - TEXT_SHARD_HEADER), (int)header[2]);
}

/* Opens a shard for one read. Shards do not stay open, because the limit of open files can be smaller. */
static inline ddp_result text__open_shard(const char *path, int *file, int64_t *tokens) {
    *file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*file < 0)
        return ddp_fail(DDP_ERR_INVALID, "%s: %s; pass readable files or folders", path, strerror(errno));
    ddp_result result = text__shard_size(*file, path, tokens);
    if (result != DDP_OK) close(*file);
    return result;
}

/* Appends the files of the paths, in the order of text_load. */
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

/* Frees all memory and sets *t to zero. A zero text may be freed. */
static inline void text_free(text_buffer *t) {
    text__list_free(&t->shards);
    free(t->first);
    free(t->bytes);
    memset(t, 0, sizeof *t);
}

/* If all paths are token shards, or folders of token shards, *t becomes their tokens, 2 bytes each.
   If none is a shard, *t stays zero and the result is DDP_OK. t must be zero.
   Errors: DDP_ERR_INVALID (shards and other files mixed), DDP_ERR_CORRUPT, DDP_ERR_UNSUPPORTED (version),
   DDP_ERR_SYSTEM, DDP_ERR_NO_MEMORY. *t is zero after an error. */
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
                          "%s is not a token shard, but another file is; pass only shards, or only text",
                          other);
    if (result == DDP_OK && found) t->first = (int64_t *)calloc((size_t)found + 1, sizeof *t->first);
    if (result == DDP_OK && found && !t->first)
        result = ddp_fail(DDP_ERR_NO_MEMORY, "%s: list of %d shards", t->shards.path[0], found);
    for (int i = 0; result == DDP_OK && i < found; i++) {
        int64_t tokens = 0;
        result = text__open_shard(t->shards.path[i], &file, &tokens);
        if (result == DDP_OK) close(file);
        t->first[i + 1] = t->first[i] + 2 * tokens;
        t->count = t->first[i + 1];
    }
    if (result != DDP_OK || !found) text_free(t);
    return result;
}

/* Index of the shard that contains byte `at` of the text. */
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

/* Copies bytes [at, at + size_bytes) of the text to out. The range must be inside the text. Thread-safe. */
static inline ddp_result text_read(const text_buffer *t, int64_t at, size_t size_bytes, void *out) {
    uint8_t *to = (uint8_t *)out;
    if (t->bytes) {
        memcpy(to, t->bytes + at, size_bytes);
        return DDP_OK;
    }
    for (int i = text__shard_of(t, at); size_bytes > 0; i++) {
        int64_t tokens = 0, left = t->first[i + 1] - at;
        size_t n = (uint64_t)left < size_bytes ? (size_t)left : size_bytes;
        ddp_result result;
        int file;
        if (n == 0) continue;
        DDP_TRY(text__open_shard(t->shards.path[i], &file, &tokens));
        if (2 * tokens == t->first[i + 1] - t->first[i])
            result = text_pread(file, t->shards.path[i], to, n, TEXT_SHARD_HEADER + at - t->first[i]);
        else
            result = ddp_fail(DDP_ERR_CORRUPT,
                              "%s: its token count has changed since it was opened; do not change files in "
                              "use",
                              t->shards.path[i]);
        close(file);
        if (result != DDP_OK) return result;
        to += n;
        at += (int64_t)n;
        size_bytes -= n;
    }
    return DDP_OK;
}

/* Returns the error for a token outside the vocabulary, read at byte `at` of the text. */
static inline ddp_result text_bad_token(const text_buffer *t, int64_t at, int token, int vocab) {
    int i = text__shard_of(t, at);
    return ddp_fail(DDP_ERR_CORRUPT,
                    "%s: token %lld is %d, but the vocabulary has %d; create the shard again",
                    t->shards.path[i], (long long)(at - t->first[i]) / 2, token, vocab);
}

#endif /* DDP_EXAMPLE_TEXT_H */

/* MIT License: see LICENSE. */

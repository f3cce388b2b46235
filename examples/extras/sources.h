/*  sources.h - samples out of files, for ddp_loader_create: IDX (MNIST and its family), .npy, the token shards of llm.c, plain text.

        source s;
        source_open_tokens(&s, "data/tinyshakespeare_*.bin", 1024);      s.count samples, each as s.sample says
        desc.sampler.dataset_size = s.count;  desc.fields = &s.sample;  desc.field_count = 1;
        desc.fetch = source_fetch;  desc.fetch_user = &s;
        ...
        source_close(&s);                                                after the loader

    Files are mapped, not read: a process holds what it looks at, and processes of one machine share it. A file may be gzipped, whatever its
    name is; it is then unpacked into memory by the system's gzip. What a mapped file loses while it is open ends the program (SIGBUS).
    Every thread may fetch at once. A function that fails leaves nothing open, and its line names the file and what to do. */
#ifndef DDP_EXAMPLE_SOURCES_H
#define DDP_EXAMPLE_SOURCES_H

#ifndef DDP_H
#include "../../ddp.h"
#endif
#include "npy.h"
#include "text.h"
#include <fcntl.h>
#include <glob.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

typedef struct source_file {
    char *path;
    uint8_t *base;
    int64_t size_bytes;
    int is_mapped;
    const uint8_t *data; /* sample 0 of this file */
    int64_t first;       /* its number in the source */
} source_file;

typedef struct source {
    int64_t count;     /* samples, at least 1 */
    ddp_tensor sample; /* dtype and shape of one; data is NULL */
    /* the rest is private */
    source_file *file;
    int file_count;
    int64_t elements;     /* of a sample */
    int64_t stride_bytes; /* from one to the next; less than a sample takes where windows share a token */
    int element_bytes, is_signed, is_big_endian,
        widens; /* in the file; widens: 16-bit integers, which become DDP_I32 */
} source;

//== files ==================================================================================================

static inline void source_close(source *s) {
    for (int i = 0; i < s->file_count; i++) {
        if (s->file[i].is_mapped)
            munmap(s->file[i].base, (size_t)s->file[i].size_bytes);
        else
            free(s->file[i].base);
        free(s->file[i].path);
    }
    free(s->file);
    memset(s, 0, sizeof *s);
}

/* Reads a pipe to its end into memory that the caller frees; 0, or an errno. */
static inline int source__drain(int from, text_buffer *t) {
    for (;;) {
        if (t->capacity - t->count < 65536) {
            int64_t capacity = t->capacity * 2 + (1 << 20);
            uint8_t *grown = (uint8_t *)realloc(t->bytes, (size_t)capacity);
            if (!grown) return ENOMEM;
            t->bytes = grown;
            t->capacity = capacity;
        }
        ssize_t got = read(from, t->bytes + t->count, (size_t)(t->capacity - t->count));
        if (got > 0)
            t->count += got;
        else if (got == 0)
            return 0;
        else if (errno != EINTR)
            return errno;
    }
}

#ifndef __cplusplus
extern char **environ;
#endif

/* Starts gzip -dc with the file as its input; *from is where its output comes. */
static inline int source__gzip_start(int file, pid_t *child, int *from) {
    static char name[] = "gzip", option[] = "-dc", none[] = "/dev/null";
    char *const arguments[] = {name, option, NULL};
    posix_spawn_file_actions_t actions;
    int ends[2], error = pipe(ends) == 0 ? 0 : errno;
    if (error) return error;
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, file, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addopen(&actions, 2, none, O_WRONLY, 0);
    error = posix_spawnp(child, name, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error) close(ends[0]);
    *from = ends[0];
    return error;
}

static inline ddp_result source__unpack(source_file *f, int file) {
    text_buffer t = DDP_ZERO;
    pid_t child, ended;
    int from, status = 0, error = source__gzip_start(file, &child, &from);
    if (error)
        return ddp_fail(DDP_ERR_SYSTEM,
                        "%.300s: gzip could not be started: %s; install it, or unpack the file", f->path,
                        strerror(error));
    error = source__drain(from, &t);
    close(from);
    while ((ended = waitpid(child, &status, 0)) < 0 && errno == EINTR) {
    }
    f->base = t.bytes;
    f->size_bytes = t.count;
    if (error)
        return ddp_fail(error == ENOMEM ? DDP_ERR_NO_MEMORY : DDP_ERR_SYSTEM,
                        "%.300s: unpacking: %s after %lld bytes", f->path, strerror(error),
                        (long long)t.count);
    if (ended < 0)
        return ddp_fail(DDP_ERR_SYSTEM,
                        "%.300s: nobody knows how gzip ended: %s; do not ignore SIGCHLD while opening",
                        f->path, strerror(errno));
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        return ddp_fail(
            DDP_ERR_CORRUPT,
            "%.300s: damaged, or cut short: gzip -dc failed after %lld bytes; fetch the file again", f->path,
            (long long)t.count);
    return t.count > 0 ? DDP_OK
                       : ddp_fail(DDP_ERR_CORRUPT, "%.300s unpacks to nothing; give another file", f->path);
}

/* Appends a file and maps it, or unpacks it into memory. */
static inline ddp_result source__add_file(source *s, const char *path) {
    source_file *grown = (source_file *)realloc(s->file, (size_t)(s->file_count + 1) * sizeof *grown), *f;
    unsigned char head[2] = {0};
    struct stat info;
    ddp_result result;
    int file;
    if (!grown) return ddp_fail(DDP_ERR_NO_MEMORY, "%.300s: a list of %d files", path, s->file_count + 1);
    s->file = grown;
    f = &s->file[s->file_count++];
    memset(f, 0, sizeof *f);
    f->path = strdup(path);
    if (!f->path) return ddp_fail(DDP_ERR_NO_MEMORY, "%.300s: its name", path);
    file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return ddp_fail(DDP_ERR_INVALID, "%.300s: %s; give a file that can be read", path, strerror(errno));
    if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode))
        result = ddp_fail(DDP_ERR_INVALID, "%.300s is no file; give one", path);
    else if (info.st_size == 0)
        result = ddp_fail(DDP_ERR_CORRUPT, "%.300s is empty; give another file", path);
    else if (pread(file, head, 2, 0) == 2 && head[0] == 0x1f && head[1] == 0x8b)
        result = source__unpack(f, file);
    else {
        void *base = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, file, 0);
        result = base != MAP_FAILED
                     ? DDP_OK
                     : ddp_fail(DDP_ERR_SYSTEM, "%.300s could not be mapped: %s", path, strerror(errno));
        if (result == DDP_OK) {
            f->base = (uint8_t *)base;
            f->size_bytes = (int64_t)info.st_size;
            f->is_mapped = 1;
        }
    }
    close(file);
    return result;
}

//== samples ================================================================================================

static inline void source__copy(const source *s, void *to, const uint8_t *from) {
    int64_t n = s->elements;
    if (s->widens) {
        int32_t *out = (int32_t *)to;
        for (int64_t i = 0; i < n; i++) {
            uint16_t value;
            memcpy(&value, from + 2 * i, 2);
            if (s->is_big_endian) value = __builtin_bswap16(value);
            out[i] = s->is_signed ? (int16_t)value : value;
        }
    } else if (s->is_big_endian && s->element_bytes > 1) {
        uint8_t *out = (uint8_t *)to;
        int size = s->element_bytes;
        for (int64_t i = 0; i < n; i++, out += size, from += size)
            for (int k = 0; k < size; k++) out[k] = from[size - 1 - k];
    } else {
        memcpy(to, from, (size_t)n * (size_t)s->element_bytes);
    }
}

/* Writes sample index, 0 to count - 1, to fields[0]; for ddp_loader_desc.fetch, with the source as fetch_user. */
static inline ddp_result source_fetch(void *user, int64_t index, void *const *fields) {
    const source *s = (const source *)user;
    int low = 0, high = s->file_count - 1;
    if (index < 0 || index >= s->count)
        return ddp_fail(DDP_ERR_INVALID, "%.300s: sample %lld, but there are %lld",
                        s->file ? s->file[0].path : "a closed source", (long long)index, (long long)s->count);
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (s->file[middle].first <= index)
            low = middle;
        else
            high = middle - 1;
    }
    source__copy(s, fields[0], s->file[low].data + (index - s->file[low].first) * s->stride_bytes);
    return DDP_OK;
}

/* Field f comes from the f-th source of a list that ends with NULL: `source *both[] = {&images, &labels, NULL}` as fetch_user. */
static inline ddp_result source_fetch_each(void *user, int64_t index, void *const *fields) {
    source *const *list = (source *const *)user;
    ddp_result result = DDP_OK;
    for (int f = 0; result == DDP_OK && list[f]; f++) result = source_fetch(list[f], index, fields + f);
    return result;
}

/* What elements of so many bytes are here: kind is 'f', 'i' signed, 'u' unsigned. */
static inline int source__set_element(source *s, char kind, int size_bytes) {
    s->element_bytes = size_bytes;
    s->is_signed = kind == 'i';
    s->widens = size_bytes == 2 && kind != 'f';
    if (kind == 'f')
        s->sample.dtype = size_bytes == 2   ? DDP_F16
                          : size_bytes == 4 ? DDP_F32
                          : size_bytes == 8 ? DDP_F64
                                            : DDP_DTYPE_DEFAULT;
    else if (size_bytes == 1)
        s->sample.dtype = kind == 'i' ? DDP_I8 : DDP_U8;
    else if (size_bytes == 2 || (size_bytes == 4 && kind == 'i'))
        s->sample.dtype = DDP_I32;
    else
        s->sample.dtype = size_bytes != 8 ? DDP_DTYPE_DEFAULT : kind == 'i' ? DDP_I64 : DDP_U64;
    return s->sample.dtype != DDP_DTYPE_DEFAULT;
}

/* One array from byte data_at to the end of the file: the first of its dimensions counts the samples. */
static inline ddp_result source__set_array(source *s, int64_t data_at, const int64_t *shape, int ndim) {
    source_file *f = s->file;
    int64_t size_bytes = s->element_bytes;
    int overflows = 0;
    s->count = shape[0];
    s->sample.ndim = ndim - 1;
    for (int i = 1; i < ndim; i++) s->sample.shape[i - 1] = shape[i];
    s->elements = ddp_tensor_count(&s->sample);
    overflows = s->elements < 0 || __builtin_mul_overflow(size_bytes, s->elements, &s->stride_bytes)
                || __builtin_mul_overflow(s->stride_bytes, s->count, &size_bytes);
    if (!overflows && (s->count == 0 || s->elements == 0))
        return ddp_fail(DDP_ERR_INVALID, "%.300s holds no samples; give another file", f->path);
    if (overflows || size_bytes != f->size_bytes - data_at)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s: %lld samples of %lld elements of %d bytes do not fill the %lld bytes after "
                        "its header; fetch the file again",
                        f->path, (long long)s->count, (long long)s->elements, s->element_bytes,
                        (long long)(f->size_bytes - data_at));
    f->data = f->base + data_at;
    return DDP_OK;
}

static inline ddp_result source__finish(source *s, ddp_result result) {
    if (result != DDP_OK) source_close(s);
    return result;
}

//== IDX ====================================================================================================

/* 0 0 type ndim, each dimension in 4 bytes, then the elements; all big-endian. */
static inline ddp_result source__idx(source *s) {
    static const struct {
        uint8_t code;
        char kind, size_bytes;
    } types[] = {{8, 'u', 1}, {9, 'i', 1}, {11, 'i', 2}, {12, 'i', 4}, {13, 'f', 4}, {14, 'f', 8}};
    const source_file *f = s->file;
    const uint8_t *h = f->base;
    int64_t shape[DDP_MAX_NDIM + 1];
    int found = 0, ndim;
    if (f->size_bytes < 4 || h[0] || h[1])
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s is no IDX file, which begins with two zero bytes; give one, plain or gzipped",
                        f->path);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (h[2] == types[i].code) found = source__set_element(s, types[i].kind, types[i].size_bytes);
    if (!found)
        return ddp_fail(
            DDP_ERR_CORRUPT,
            "%.300s: its elements are of type 0x%02x, which IDX does not have; fetch the file again", f->path,
            h[2]);
    ndim = h[3];
    if (ndim < 1 || ndim > DDP_MAX_NDIM + 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%.300s has %d dimensions; 1 to %d can be read", f->path, ndim,
                        DDP_MAX_NDIM + 1);
    if (f->size_bytes < 4 + 4 * ndim)
        return ddp_fail(DDP_ERR_CORRUPT, "%.300s ends inside its header, at byte %lld; fetch the file again",
                        f->path, (long long)f->size_bytes);
    for (int i = 0; i < ndim; i++) {
        const uint8_t *d = h + 4 + 4 * i;
        shape[i] = (int64_t)((uint32_t)d[0] << 24 | (uint32_t)d[1] << 16 | (uint32_t)d[2] << 8 | d[3]);
    }
    s->is_big_endian = 1;
    return source__set_array(s, 4 + 4 * ndim, shape, ndim);
}

/* Opens an IDX file. A sample is one entry of the first dimension; 16-bit elements come as DDP_I32. */
static inline ddp_result source_open_idx(source *s, const char *path) {
    ddp_result result;
    memset(s, 0, sizeof *s);
    result = source__add_file(s, path);
    return source__finish(s, result == DDP_OK ? source__idx(s) : result);
}

//== .npy ===================================================================================================

/* "<f4": byte order, kind and bytes of an element. 0 when ddp has no such dtype. */
static inline int source__npy_descr(source *s, const char *descr) {
    char order = descr[0];
    int kind = 0, size_bytes = 0;
    if (strlen(descr) == 3) {
        kind = descr[1];
        size_bytes = descr[2] - '0';
    }
    if (!kind || !strchr("<>|=", order) || !strchr("fiub", kind)) return 0;
    if (kind == 'b' && size_bytes != 1) return 0;
    s->is_big_endian = order == '>';
    return source__set_element(s, (char)(kind == 'b' ? 'u' : kind), size_bytes);
}

static inline ddp_result source__npy(source *s, const char *function) {
    const source_file *f = s->file;
    npy_names names = {function, f->path, NULL};
    npy_header header;
    DDP_TRY(npy_parse(&names, f->base, f->size_bytes, &header));
    if (header.fortran_order)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%.300s is in Fortran order; save numpy.ascontiguousarray of it",
                        f->path);
    if (!source__npy_descr(s, header.descr))
        return ddp_fail(DDP_ERR_UNSUPPORTED,
                        "%.300s: its elements are '%s', which is not a ddp_dtype; save them as another",
                        f->path, header.descr);
    if (header.ndim == 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "%.300s holds a single value; the first dimension of an array counts the samples",
                        f->path);
    if (header.ndim > DDP_MAX_NDIM + 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%.300s has more than %d dimensions; reshape the array", f->path,
                        DDP_MAX_NDIM + 1);
    return source__set_array(s, header.data_offset, header.shape, header.ndim);
}

/* Opens an array as numpy.save writes it. A sample is one entry of the first dimension; bool comes as DDP_U8, 16-bit integers as DDP_I32. */
static inline ddp_result source_open_npy(source *s, const char *path) {
    ddp_result result;
    memset(s, 0, sizeof *s);
    result = source__add_file(s, path);
    return source__finish(s, result == DDP_OK ? source__npy(s, __func__) : result);
}

//== windows of tokens ======================================================================================

/* Windows of context + 1 tokens, one every `context`: the last token of a window is the first of the next, so that each token but a file's first is
   predicted once. As in llm.c, a window lies within its file, and what is left at the end of a file, less than context, is not used. */
static inline ddp_result source__add_windows(source *s, source_file *f, const uint8_t *data, int64_t tokens,
                                             int64_t context) {
    if (tokens < context + 1)
        return ddp_fail(DDP_ERR_INVALID,
                        "%.300s has %lld tokens, and a sample takes %lld; use a smaller context or more text",
                        f->path, (long long)tokens, (long long)context + 1);
    f->data = data;
    f->first = s->count;
    s->count += (tokens - 1) / context;
    s->elements = s->sample.shape[0] = context + 1;
    s->sample.ndim = 1;
    s->stride_bytes = context * s->element_bytes;
    return DDP_OK;
}

/* 256 int32: magic, version, count of tokens; then so many uint16. */
static inline ddp_result source__shard(source *s, source_file *f, int64_t context) {
    int32_t header[3];
    if (f->size_bytes < TEXT_SHARD_HEADER)
        return ddp_fail(DDP_ERR_CORRUPT, "%.300s ends inside its header of %d bytes; make the shard again",
                        f->path, TEXT_SHARD_HEADER);
    memcpy(header, f->base, sizeof header);
    if (header[0] != TEXT_SHARD_MAGIC)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s is no token shard of llm.c: it begins with %d, not %d; make it with llm.c's "
                        "scripts for GPT-2",
                        f->path, (int)header[0], TEXT_SHARD_MAGIC);
    if (header[1] != 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%.300s: version %d; only 1 is known", f->path, (int)header[1]);
    if (header[2] < 0 || f->size_bytes != TEXT_SHARD_HEADER + 2 * (int64_t)header[2])
        return ddp_fail(
            DDP_ERR_CORRUPT,
            "%.300s has %lld bytes after its header, which says %d tokens of 2; make the shard again",
            f->path, (long long)(f->size_bytes - TEXT_SHARD_HEADER), (int)header[2]);
    return source__add_windows(s, f, f->base + TEXT_SHARD_HEADER, header[2], context);
}

/* Opens the token shards that match a pattern of glob, in the order of their paths' bytes. A sample is context + 1 tokens of DDP_I32: what the model
   reads and, one further, what it predicts. Windows are numbered through all shards. */
static inline ddp_result source_open_tokens(source *s, const char *pattern, int64_t context) {
    glob_t found;
    ddp_result result = DDP_OK;
    int status;
    memset(s, 0, sizeof *s);
    if (context < 1 || context > INT32_MAX)
        return ddp_fail(DDP_ERR_INVALID, "%.300s: context=%lld; set it to 1 or more", pattern,
                        (long long)context);
    status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status == GLOB_NOSPACE) return ddp_fail(DDP_ERR_NO_MEMORY, "%.300s: the list of its files", pattern);
    if (status != 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "%.300s: no file has such a name; give the shards' path, with * for what differs",
                        pattern);
    qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, text__compare);
    source__set_element(s, 'u', 2);
    for (size_t i = 0; result == DDP_OK && i < found.gl_pathc; i++) {
        result = source__add_file(s, found.gl_pathv[i]);
        if (result == DDP_OK) result = source__shard(s, &s->file[s->file_count - 1], context);
    }
    globfree(&found);
    return source__finish(s, result);
}

/* Opens files and folders as one text, as text_load does. A sample is context + 1 bytes. The text is read into memory. */
static inline ddp_result source_open_text(source *s, const char **paths, int path_count, int64_t context) {
    text_buffer t = DDP_ZERO;
    ddp_result result;
    memset(s, 0, sizeof *s);
    if (context < 1 || context > INT32_MAX)
        return ddp_fail(DDP_ERR_INVALID, "a text: context=%lld; set it to 1 or more", (long long)context);
    result = text_load(&t, paths, path_count);
    s->file = (source_file *)calloc(1, sizeof *s->file);
    if (!s->file) {
        free(t.bytes);
        return result == DDP_OK ? ddp_fail(DDP_ERR_NO_MEMORY, "a text: its description") : result;
    }
    s->file_count = 1;
    s->file->path = strdup("the text");
    s->file->base = t.bytes;
    s->file->size_bytes = t.count;
    if (result == DDP_OK && !s->file->path) result = ddp_fail(DDP_ERR_NO_MEMORY, "a text: its name");
    source__set_element(s, 'u', 1);
    return source__finish(s, result == DDP_OK ? source__add_windows(s, s->file, t.bytes, t.count, context)
                                              : result);
}

#endif /* DDP_EXAMPLE_SOURCES_H */

/* MIT License: see LICENSE. */

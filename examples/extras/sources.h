/*  sources.h - samples from files for ddp_loader: IDX (MNIST), .npy, token shards of llm.c, plain text.

USAGE
    Copy it together with npy.h and text.h next to ddp.h and include it after ddp.h. All functions are static.

EXAMPLE
    source s;
    source_open_tokens(&s, "data/tinyshakespeare_*.bin", 1024);    // sets s.count and s.sample
    desc.sampler.dataset_size = s.count;
    desc.fields = &s.sample;
    desc.field_count = 1;
    desc.fetch = source_fetch;
    desc.fetch_user = &s;
    ...                                                            // ddp_loader_create, training
    source_close(&s);                                              // after ddp_loader_destroy

CONCEPTS
    A source is a list of files with samples of one dtype and shape, numbered from 0 to count - 1:

        file 0: samples 0 .. a-1    file 1: samples a .. b-1    file 2: samples b .. count-1

    Files are mapped (mmap), so the processes of one machine share their pages. gzip files are recognised by
    their first bytes and are unpacked into memory by the program gzip.
    Any number of threads may call source_fetch at the same time.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). Lines name the file and the remedy. After a failed open the
    source is zero and nothing is open. Truncating a mapped file ends the program with SIGBUS.

NOT DONE HERE
    No decoding of images or compressed arrays (.npz), no streams, no download.
*/
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
    uint8_t *base; /* contents of the file: mapped or, after unpacking, allocated */
    int64_t size_bytes;
    int is_mapped;
    const uint8_t *data; /* first sample of this file */
    int64_t first;       /* index of that sample in the source */
} source_file;

typedef struct source {
    int64_t count;     /* number of samples, at least 1 */
    ddp_tensor sample; /* dtype and shape of one sample; data is NULL */
    /* private */
    source_file *file;
    int file_count;
    int64_t elements;     /* elements of one sample */
    int64_t stride_bytes; /* distance between samples; windows of tokens overlap by one token */
    int element_bytes;    /* bytes of an element in the file */
    int is_signed;
    int is_big_endian;
    int widens; /* 1 = 16-bit integers in the file, DDP_I32 in the sample */
} source;

//== files ==================================================================================================

/* Unmaps and frees all files and sets *s to zero. A zero source may be closed. */
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

/* Reads a pipe to its end into memory that the caller frees. Returns 0 or an errno. */
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
        if (got > 0) t->count += got;
        if (got == 0) return 0;
        if (got < 0 && errno != EINTR) return errno;
    }
}

#ifndef __cplusplus
extern char **environ;
#endif

/* Starts gzip -dc with `file` as its standard input. *from is the read end of its output. */
static inline int source__gzip_start(int file, pid_t *child, int *from) {
    static char name[] = "gzip", option[] = "-dc", none[] = "/dev/null";
    char *const arguments[] = {name, option, NULL};
    posix_spawn_file_actions_t actions;
    int ends[2], error;
    if (pipe(ends) != 0) return errno;
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

static inline ddp_result source__map(source_file *f, int file, int64_t size_bytes) {
    void *base = mmap(NULL, (size_t)size_bytes, PROT_READ, MAP_SHARED, file, 0);
    if (base == MAP_FAILED)
        return ddp_fail(DDP_ERR_SYSTEM, "%.300s: mmap: %s; copy it to another file system", f->path,
                        strerror(errno));
    f->base = (uint8_t *)base;
    f->size_bytes = size_bytes;
    f->is_mapped = 1;
    return DDP_OK;
}

static inline ddp_result source__unpack(source_file *f, int file) {
    text_buffer t = DDP_ZERO;
    pid_t child, ended;
    int from, status = 0, error = source__gzip_start(file, &child, &from);
    if (error)
        return ddp_fail(DDP_ERR_SYSTEM, "%.300s: cannot start gzip: %s; install it, or unpack the file",
                        f->path, strerror(error));
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
                        "%.300s: the exit status of gzip was lost: %s; do not ignore SIGCHLD while a file "
                        "is opened",
                        f->path, strerror(errno));
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s: damaged or truncated: gzip -dc failed after %lld bytes; download it again",
                        f->path, (long long)t.count);
    if (t.count == 0)
        return ddp_fail(DDP_ERR_CORRUPT, "%.300s is empty after unpacking; pass another file", f->path);
    return DDP_OK;
}

/* Appends a file to the source. Maps it or, if it is a gzip file, unpacks it into memory. */
static inline ddp_result source__add_file(source *s, const char *path) {
    source_file *grown = (source_file *)realloc(s->file, (size_t)(s->file_count + 1) * sizeof *grown), *f;
    unsigned char head[2] = {0};
    struct stat info;
    ddp_result result;
    int file;
    if (!grown) return ddp_fail(DDP_ERR_NO_MEMORY, "%.300s: list of %d files", path, s->file_count + 1);
    s->file = grown;
    f = &s->file[s->file_count++];
    memset(f, 0, sizeof *f);
    f->path = strdup(path);
    if (!f->path) return ddp_fail(DDP_ERR_NO_MEMORY, "%.300s: copy of the path", path);
    file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return ddp_fail(DDP_ERR_INVALID, "%.300s: %s; pass a readable file", path, strerror(errno));
    if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode))
        result = ddp_fail(DDP_ERR_INVALID, "%.300s is not a regular file; pass the path of a file", path);
    else if (info.st_size == 0)
        result = ddp_fail(DDP_ERR_CORRUPT, "%.300s is empty; pass another file", path);
    else if (pread(file, head, 2, 0) == 2 && head[0] == 0x1f && head[1] == 0x8b)
        result = source__unpack(f, file);
    else
        result = source__map(f, file, (int64_t)info.st_size);
    close(file);
    return result;
}

//== samples ================================================================================================

/* Copies the elements of one sample in host byte order; widens 16-bit integers to 32 bits. */
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
        for (int64_t i = 0; i < n; i++) {
            for (int k = 0; k < size; k++) out[k] = from[size - 1 - k];
            out += size;
            from += size;
        }
    } else {
        memcpy(to, from, (size_t)n * (size_t)s->element_bytes);
    }
}

/* Copies sample `index` to fields[0]. For ddp_loader_desc.fetch, with the source as fetch_user.
   Thread-safe. DDP_ERR_INVALID unless 0 <= index < count. */
static inline ddp_result source_fetch(void *user, int64_t index, void *const *fields) {
    const source *s = (const source *)user;
    int low = 0, high = s->file_count - 1;
    if (index < 0 || index >= s->count)
        return ddp_fail(DDP_ERR_INVALID,
                        "source_fetch: %.300s: index=%lld must be 0 or more and less than %lld",
                        s->file ? s->file[0].path : "closed source", (long long)index, (long long)s->count);
    /* the last file with first <= index */
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

/* Copies sample `index` of several sources, one per field. For ddp_loader_desc.fetch; fetch_user is a list of
   sources that ends with NULL, such as `source *both[] = {&images, &labels, NULL}`. */
static inline ddp_result source_fetch_each(void *user, int64_t index, void *const *fields) {
    source *const *list = (source *const *)user;
    ddp_result result = DDP_OK;
    for (int f = 0; result == DDP_OK && list[f]; f++) result = source_fetch(list[f], index, fields + f);
    return result;
}

/* Sets the dtype for elements of a file. kind: 'f' float, 'i' signed, 'u' unsigned.
   Returns 0 if ddp has no such dtype. */
static inline int source__set_element(source *s, char kind, int size_bytes) {
    static const struct {
        char kind, size_bytes;
        ddp_dtype dtype;
    } dtypes[] = {
        {'f', 2, DDP_F16}, {'f', 4, DDP_F32}, {'f', 8, DDP_F64}, {'i', 1, DDP_I8},  {'u', 1, DDP_U8},
        {'i', 2, DDP_I32}, {'u', 2, DDP_I32}, {'i', 4, DDP_I32}, {'i', 8, DDP_I64}, {'u', 8, DDP_U64},
    };
    s->element_bytes = size_bytes;
    s->is_signed = kind == 'i';
    s->widens = size_bytes == 2 && kind != 'f';
    s->sample.dtype = DDP_DTYPE_DEFAULT;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (dtypes[i].kind == kind && dtypes[i].size_bytes == size_bytes) s->sample.dtype = dtypes[i].dtype;
    return s->sample.dtype != DDP_DTYPE_DEFAULT;
}

/* Sets the source to one array, stored from byte data_at to the end of the file. A sample is one entry of the
   first dimension. */
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
        return ddp_fail(DDP_ERR_INVALID, "%.300s has no samples; pass another file", f->path);
    if (overflows || size_bytes != f->size_bytes - data_at)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s: %lld samples of %lld elements of %d bytes do not fill the %lld bytes after "
                        "its header; download it again",
                        f->path, (long long)s->count, (long long)s->elements, s->element_bytes,
                        (long long)(f->size_bytes - data_at));
    f->data = f->base + data_at;
    return DDP_OK;
}

/* The end of every open: closes the source if it has failed. */
static inline ddp_result source__finish(source *s, ddp_result result) {
    if (result != DDP_OK) source_close(s);
    return result;
}

//== IDX ====================================================================================================

/* Reads the header. The file is big-endian:
       byte 0    2      3      4             4 + 4 ndim
            0 0  type   ndim   dimensions    elements        each dimension has 4 bytes */
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
                        "%.300s is not an IDX file: it does not begin with two zero bytes; pass an IDX file, "
                        "plain or gzipped",
                        f->path);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (h[2] == types[i].code) found = source__set_element(s, types[i].kind, types[i].size_bytes);
    if (!found)
        return ddp_fail(DDP_ERR_CORRUPT, "%.300s: invalid IDX element type 0x%02x; download it again",
                        f->path, h[2]);
    ndim = h[3];
    if (ndim < 1 || ndim > DDP_MAX_NDIM + 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%.300s has %d dimensions; 1 to %d are supported", f->path, ndim,
                        DDP_MAX_NDIM + 1);
    if (f->size_bytes < 4 + 4 * ndim)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s: truncated: it ends inside its header, at byte %lld; "
                        "download it again",
                        f->path, (long long)f->size_bytes);
    for (int i = 0; i < ndim; i++) {
        const uint8_t *d = h + 4 + 4 * i;
        shape[i] = (int64_t)((uint32_t)d[0] << 24 | (uint32_t)d[1] << 16 | (uint32_t)d[2] << 8 | d[3]);
    }
    s->is_big_endian = 1;
    return source__set_array(s, 4 + 4 * ndim, shape, ndim);
}

/* Opens an IDX file. A sample is one entry of the first dimension. 16-bit elements become DDP_I32. */
static inline ddp_result source_open_idx(source *s, const char *path) {
    ddp_result result;
    memset(s, 0, sizeof *s);
    result = source__add_file(s, path);
    return source__finish(s, result == DDP_OK ? source__idx(s) : result);
}

//== .npy ===================================================================================================

/* Parses NumPy's dtype, such as "<f4": byte order, kind, bytes of an element. bool is read as u8.
   Returns 0 if ddp has no such dtype. */
static inline int source__npy_descr(source *s, const char *descr) {
    char order = descr[0];
    int kind = 0, size_bytes = 0;
    if (strlen(descr) == 3) {
        kind = descr[1];
        size_bytes = descr[2] - '0';
    }
    if (!kind || !strchr("<>|=", order) || !strchr("fiub", kind)) return 0;
    if (kind == 'b' && size_bytes != 1) return 0;
    if (kind == 'b') kind = 'u';
    s->is_big_endian = order == '>';
    return source__set_element(s, (char)kind, size_bytes);
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
                        "%.300s: dtype '%s' has no ddp_dtype; save the array with another dtype", f->path,
                        header.descr);
    if (header.ndim == 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "%.300s has no dimensions; save an array whose first dimension is the samples",
                        f->path);
    if (header.ndim > DDP_MAX_NDIM + 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%.300s has more than %d dimensions; reshape the array", f->path,
                        DDP_MAX_NDIM + 1);
    return source__set_array(s, header.data_offset, header.shape, header.ndim);
}

/* Opens a .npy file. A sample is one entry of the first dimension. bool becomes DDP_U8, and 16-bit integers
   become DDP_I32. */
static inline ddp_result source_open_npy(source *s, const char *path) {
    ddp_result result;
    memset(s, 0, sizeof *s);
    result = source__add_file(s, path);
    return source__finish(s, result == DDP_OK ? source__npy(s, __func__) : result);
}

//== windows of tokens ======================================================================================

/* Appends the windows of one file: context + 1 tokens each, at distance `context`. Neighbours share one
   token, so every token except the first of a file is predicted once:

       tokens    0 1 2 3 4 5 6 7 8 9     context 4
       window 0  [- - - - -]
       window 1          [- - - - -]     token 9 is not used

   As in llm.c, a window does not cross files, and tokens after the last full window are not used. */
static inline ddp_result source__add_windows(source *s, source_file *f, const uint8_t *data, int64_t tokens,
                                             int64_t context) {
    if (tokens < context + 1)
        return ddp_fail(DDP_ERR_INVALID,
                        "%.300s has %lld tokens, but a sample needs %lld; use a smaller context or more text",
                        f->path, (long long)tokens, (long long)context + 1);
    f->data = data;
    f->first = s->count;
    s->count += (tokens - 1) / context;
    s->elements = context + 1;
    s->sample.ndim = 1;
    s->sample.shape[0] = context + 1;
    s->stride_bytes = context * s->element_bytes;
    return DDP_OK;
}

/* Reads the header of a token shard: 256 int32, of which the first three are magic, version and token count.
   The tokens follow as uint16. */
static inline ddp_result source__shard(source *s, source_file *f, int64_t context) {
    int32_t header[3];
    if (f->size_bytes < TEXT_SHARD_HEADER)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s: truncated: it ends inside its header of %d bytes; create it again", f->path,
                        TEXT_SHARD_HEADER);
    memcpy(header, f->base, sizeof header);
    if (header[0] != TEXT_SHARD_MAGIC)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "%.300s is not a token shard of llm.c: it begins with %d, not %d; create it with "
                        "llm.c's scripts for GPT-2",
                        f->path, (int)header[0], TEXT_SHARD_MAGIC);
    if (header[1] != 1)
        return ddp_fail(DDP_ERR_UNSUPPORTED, "%.300s: shard version %d; only version 1 is supported", f->path,
                        (int)header[1]);
    if (header[2] < 0 || f->size_bytes != TEXT_SHARD_HEADER + 2 * (int64_t)header[2])
        return ddp_fail(
            DDP_ERR_CORRUPT,
            "%.300s has %lld bytes after its header, not 2 for each of %d tokens; create it again", f->path,
            (long long)(f->size_bytes - TEXT_SHARD_HEADER), (int)header[2]);
    return source__add_windows(s, f, f->base + TEXT_SHARD_HEADER, header[2], context);
}

/* Opens the token shards that match a glob pattern, in byte order of their paths. A sample is a window of
   context + 1 tokens as DDP_I32: inputs are tokens 0 to context - 1, targets are tokens 1 to context. */
static inline ddp_result source_open_tokens(source *s, const char *pattern, int64_t context) {
    glob_t found;
    ddp_result result = DDP_OK;
    int status;
    memset(s, 0, sizeof *s);
    if (context < 1 || context > INT32_MAX)
        return ddp_fail(DDP_ERR_INVALID, "%.300s: context=%lld; set it to 1 or more", pattern,
                        (long long)context);
    status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status == GLOB_NOSPACE) return ddp_fail(DDP_ERR_NO_MEMORY, "%.300s: list of files", pattern);
    if (status != 0)
        return ddp_fail(DDP_ERR_INVALID,
                        "%.300s: no file matches; pass the path of the shards, such as 'data/train_*.bin'",
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

/* Opens files and folders as one text; see text_load. A sample is a window of context + 1 bytes as DDP_U8.
   The text is read into memory. */
static inline ddp_result source_open_text(source *s, const char **paths, int path_count, int64_t context) {
    text_buffer t = DDP_ZERO;
    ddp_result result;
    memset(s, 0, sizeof *s);
    if (context < 1 || context > INT32_MAX)
        return ddp_fail(DDP_ERR_INVALID, "source_open_text: context=%lld; set it to 1 or more",
                        (long long)context);
    result = text_load(&t, paths, path_count);
    s->file = (source_file *)calloc(1, sizeof *s->file);
    if (!s->file) {
        free(t.bytes);
        return result == DDP_OK ? ddp_fail(DDP_ERR_NO_MEMORY, "source_open_text: list of 1 file") : result;
    }
    s->file_count = 1;
    s->file->path = strdup("the text");
    s->file->base = t.bytes;
    s->file->size_bytes = t.count;
    if (result == DDP_OK && !s->file->path)
        result = ddp_fail(DDP_ERR_NO_MEMORY, "source_open_text: name of the text");
    source__set_element(s, 'u', 1);
    if (result == DDP_OK) result = source__add_windows(s, s->file, t.bytes, t.count, context);
    return source__finish(s, result);
}

#endif /* DDP_EXAMPLE_SOURCES_H */

/* MIT License: see LICENSE. */

/*  npy.h - saves and loads tensors as NumPy's .npy files.

USAGE
    Copy it next to ddp.h and include it after ddp.h or ddp_tensor.h. All functions are static.

EXAMPLE
    ddp_tensor tensor = DDP_ZERO;               // data NULL: npy_load allocates
    if (npy_load(group, "weights.npy", &tensor) != DDP_OK) return puts(ddp_last_error());
    ...
    npy_save(group, &tensor, "weights.npy");
    ddp_tensor_free(group, &tensor);

CONCEPTS
    A file has a prefix, a header of text, and values. Version 1 stores the length of the text in 2 bytes,
    versions 2 and 3 in 4:

        byte 0        6      7      8        10 or 12                                          data_offset
             \x93NUMPY major  minor  length   {'descr': '<f4', ..., 'shape': (3, 4), } spaces \n values

    npy_load and npy_save need the group only for memory and error lines: every rank may use its own file.
    npy_parse reads the header of a file that is in memory or mapped. sources.h opens .npy files with it.

ERRORS
    As in ddp.h: ddp_result and ddp_last_error(). Lines name the call, the file and, for damage, the byte.

NOT DONE HERE
    No Fortran order of two dimensions or more, no big-endian values, no records, no .npz.
*/
#ifndef DDP_EXAMPLE_NPY_H
#define DDP_EXAMPLE_NPY_H

#ifndef DDP_H
#include "../../ddp.h"
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

//== types ==================================================================================================

#define NPY_MAX_NDIM 64           /* NumPy's limit; DDP_MAX_NDIM is smaller */
#define NPY_MAX_HEADER (1 << 20)  /* bytes of a header's text */
#define NPY_PREFIX_BYTES 12       /* enough to compute where the values begin */
#define NPY_BLOCK_BYTES (1 << 20) /* of host memory, for values of a device */

/* The names that error lines use. */
typedef struct npy_names {
    const char *function;   /* the public call */
    const char *path;       /* the file */
    const ddp_group *group; /* may be NULL */
} npy_names;

typedef struct npy_header {
    char descr[16];    /* "<f4": byte order, kind, bytes of an element */
    int fortran_order; /* 0 also where both orders are the same: at most one entry of shape exceeds 1 */
    int ndim;
    int64_t shape[NPY_MAX_NDIM]; /* entries are 0 or more; their product may overflow */
    int64_t data_offset;         /* byte of the file where the values begin */
} npy_header;

//== header =================================================================================================

/* Position in the header's text. `at` and `end` count bytes of the file. */
typedef struct npy__parser {
    const npy_names *names;
    const char *bytes; /* of the file, from byte 0 to end */
    int64_t at, end;
} npy__parser;

static inline ddp_result npy__damaged(const npy__parser *p, const char *expected) {
    return ddp_fail_in(DDP_ERR_CORRUPT, p->names->function, p->names->group,
                       "%.300s: at byte %lld there should be %s; save the array again", p->names->path,
                       (long long)p->at, expected);
}

/* Skips spaces and returns the character that follows them, or -1 at the end. */
static inline int npy__peek(npy__parser *p) {
    while (p->at < p->end && p->bytes[p->at] && strchr(" \t\r\n", p->bytes[p->at])) p->at++;
    return p->at < p->end ? (unsigned char)p->bytes[p->at] : -1;
}

static inline ddp_result npy__expect(npy__parser *p, char wanted, const char *expected) {
    if (npy__peek(p) != wanted) return npy__damaged(p, expected);
    p->at++;
    return DDP_OK;
}

/* Whether `word` is next; if so, skips it. */
static inline int npy__skip_word(npy__parser *p, const char *word) {
    int64_t length = (int64_t)strlen(word);
    npy__peek(p);
    if (p->end - p->at < length || memcmp(p->bytes + p->at, word, (size_t)length) != 0) return 0;
    p->at += length;
    return 1;
}

/* A string of at most 15 bytes in either kind of quotes. */
static inline ddp_result npy__parse_string(npy__parser *p, char out[16], const char *expected) {
    int quote = npy__peek(p);
    int64_t first = p->at + 1, last = first;
    if (quote != '\'' && quote != '"') return npy__damaged(p, expected);
    while (last < p->end && p->bytes[last] != quote) last++;
    if (last == p->end || last - first > 15) return npy__damaged(p, expected);
    memset(out, 0, 16);
    memcpy(out, p->bytes + first, (size_t)(last - first));
    p->at = last + 1;
    return DDP_OK;
}

/* "(3, 4)", "(3,)" or "()". Python 2 wrote (3L, 4L). */
static inline ddp_result npy__parse_shape(npy__parser *p, npy_header *out) {
    DDP_TRY(npy__expect(p, '(', "the ( of a shape"));
    while (npy__peek(p) != ')') {
        int64_t entry = 0, start = p->at;
        int digit = npy__peek(p);
        if (digit < '0' || digit > '9') return npy__damaged(p, "an entry of a shape, which is a number");
        if (out->ndim == NPY_MAX_NDIM)
            return ddp_fail_in(DDP_ERR_UNSUPPORTED, p->names->function, p->names->group,
                               "%.300s has more than %d dimensions; reshape the array", p->names->path,
                               NPY_MAX_NDIM);
        while (p->at < p->end && p->bytes[p->at] >= '0' && p->bytes[p->at] <= '9') {
            if (__builtin_mul_overflow(entry, 10, &entry)
                || __builtin_add_overflow(entry, p->bytes[p->at] - '0', &entry)) {
                p->at = start;
                return npy__damaged(p, "an entry of a shape below 2^63");
            }
            p->at++;
        }
        if (p->at < p->end && p->bytes[p->at] == 'L') p->at++;
        out->shape[out->ndim++] = entry;
        if (npy__peek(p) == ',')
            p->at++;
        else if (npy__peek(p) != ')' || out->ndim == 1)
            return npy__damaged(p, "a comma after an entry of a shape");
    }
    p->at++;
    return DDP_OK;
}

/* The header's text: a Python dict with three keys in any order. */
static inline ddp_result npy__parse_text(npy__parser *p, npy_header *out) {
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    int seen = 0, large = 0, key;
    char name[16];
    DDP_TRY(npy__expect(p, '{', "the { of a header"));
    while (npy__peek(p) != '}') {
        int64_t start = p->at;
        DDP_TRY(npy__parse_string(p, name, "a key of the header in quotes"));
        for (key = 0; key < 3 && strcmp(name, keys[key]) != 0; key++) {
        }
        if (key == 3 || seen >> key & 1) {
            p->at = start;
            return npy__damaged(p, "'descr', 'fortran_order' or 'shape', each once");
        }
        seen |= 1 << key;
        DDP_TRY(npy__expect(p, ':', "a colon"));
        if (key == 0 && npy__peek(p) == '[')
            return ddp_fail_in(DDP_ERR_UNSUPPORTED, p->names->function, p->names->group,
                               "%.300s: its elements are records; save each field as an array",
                               p->names->path);
        if (key == 0) DDP_TRY(npy__parse_string(p, out->descr, "a dtype in quotes"));
        if (key == 1) {
            out->fortran_order = npy__skip_word(p, "True");
            if (!out->fortran_order && !npy__skip_word(p, "False")) return npy__damaged(p, "True or False");
        }
        if (key == 2) DDP_TRY(npy__parse_shape(p, out));
        if (npy__peek(p) == ',')
            p->at++;
        else if (npy__peek(p) != '}')
            return npy__damaged(p, "a comma or the } of the header");
    }
    p->at++;
    if (npy__peek(p) != -1) return npy__damaged(p, "spaces up to the end of the header");
    for (key = 0; key < 3; key++)
        if (!(seen >> key & 1))
            return ddp_fail_in(DDP_ERR_CORRUPT, p->names->function, p->names->group,
                               "%.300s: its header has no '%s'; save the array again", p->names->path,
                               keys[key]);
    for (int i = 0; i < out->ndim; i++) large += out->shape[i] > 1;
    if (large < 2) out->fortran_order = 0;
    return DDP_OK;
}

/* Sets out->data_offset and *text_offset from the first bytes of a file. If the file is shorter than
   `prefix`, the rest of `prefix` is zero. On success the header is inside the file_bytes of the file. */
static inline ddp_result npy__parse_prefix(const npy_names *names,
                                           const unsigned char prefix[NPY_PREFIX_BYTES], int64_t file_bytes,
                                           npy_header *out, int64_t *text_offset) {
    int version = prefix[6];
    uint32_t length = (uint32_t)prefix[8] | (uint32_t)prefix[9] << 8;
    if (memcmp(prefix, "\x93NUMPY", 6) != 0)
        return ddp_fail_in(DDP_ERR_CORRUPT, names->function, names->group,
                           "%.300s is not a .npy file: at byte 0 there should be \\x93NUMPY; use numpy.save",
                           names->path);
    if (file_bytes >= 8 && (version < 1 || version > 3 || prefix[7]))
        return ddp_fail_in(DDP_ERR_UNSUPPORTED, names->function, names->group,
                           "%.300s: version %d.%d of the format; save it as 1.0, 2.0 or 3.0", names->path,
                           version, prefix[7]);
    if (version != 1) length |= (uint32_t)prefix[10] << 16 | (uint32_t)prefix[11] << 24;
    *text_offset = version == 1 ? 10 : 12;
    out->data_offset = *text_offset + (int64_t)length;
    if (file_bytes < out->data_offset)
        return ddp_fail_in(DDP_ERR_CORRUPT, names->function, names->group,
                           "%.300s ends at byte %lld, inside its header of %lld bytes; copy the file again",
                           names->path, (long long)file_bytes, (long long)out->data_offset);
    if (length > NPY_MAX_HEADER)
        return ddp_fail_in(DDP_ERR_UNSUPPORTED, names->function, names->group,
                           "%.300s: a header of %lu bytes; at most %d can be read", names->path,
                           (unsigned long)length, NPY_MAX_HEADER);
    return DDP_OK;
}

/* Reads the header of a file in memory: `bytes` has all file_bytes bytes. *out is complete only on success.
   Not collective. Errors: DDP_ERR_CORRUPT; DDP_ERR_UNSUPPORTED for records, another version of the format,
   more than NPY_MAX_NDIM dimensions, or a header of more than NPY_MAX_HEADER bytes. */
static inline ddp_result npy_parse(const npy_names *names, const void *bytes, int64_t file_bytes,
                                   npy_header *out) {
    npy__parser p = {names, (const char *)bytes, 0, 0};
    unsigned char prefix[NPY_PREFIX_BYTES] = {0};
    memset(out, 0, sizeof *out);
    memcpy(prefix, bytes, (size_t)(file_bytes < NPY_PREFIX_BYTES ? file_bytes : NPY_PREFIX_BYTES));
    DDP_TRY(npy__parse_prefix(names, prefix, file_bytes, out, &p.at));
    p.end = out->data_offset;
    return npy__parse_text(&p, out);
}

//== tensors ================================================================================================

static const struct {
    char descr[4];
    ddp_dtype dtype;
} npy__dtypes[] = {
    {"<f4", DDP_F32}, {"<f8", DDP_F64}, {"<f2", DDP_F16}, {"<u2", DDP_BF16}, {"|i1", DDP_I8},
    {"|u1", DDP_U8},  {"<i4", DDP_I32}, {"<i8", DDP_I64}, {"<u8", DDP_U64},
};
#define NPY__DTYPES ((int)(sizeof npy__dtypes / sizeof *npy__dtypes))

typedef struct npy__shape_text {
    char text[DDP_MAX_NDIM * 22 + 4];
} npy__shape_text;

/* The shape as Python writes it: "()", "(3,)", "(3, 4)". */
static inline const char *npy__print_shape(const ddp_tensor *t, npy__shape_text *out) {
    size_t used = 1;
    strcpy(out->text, "(");
    for (int i = 0; i < t->ndim; i++)
        used += (size_t)snprintf(out->text + used, sizeof out->text - used, "%s%lld", i ? ", " : "",
                                 (long long)t->shape[i]);
    strcpy(out->text + used, t->ndim == 1 ? ",)" : ")");
    return out->text;
}

/* Bytes of a tensor's values; -1 if it is not a tensor or does not fit in memory. */
static inline int64_t npy__bytes(const ddp_tensor *t) {
    int64_t bytes = ddp_tensor_count(t);
    if (bytes < 0 || __builtin_mul_overflow(bytes, (int64_t)ddp_dtype_size(t->dtype), &bytes)) return -1;
    return bytes > PTRDIFF_MAX / 2 ? -1 : bytes;
}

/* Sets *out to the dtype and shape of the values, without data. wanted: the dtype of the caller's tensor, 0 =
   any. On success the values are inside the file. */
static inline ddp_result npy__to_tensor(const npy_names *names, const npy_header *header, int64_t file_bytes,
                                        ddp_dtype wanted, ddp_tensor *out) {
    int64_t room = file_bytes - header->data_offset;
    npy__shape_text text;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < NPY__DTYPES; i++)
        if (strcmp(header->descr, npy__dtypes[i].descr) == 0) out->dtype = npy__dtypes[i].dtype;
    if (!out->dtype || (out->dtype == DDP_BF16 && wanted != DDP_BF16))
        return ddp_fail_in(
            DDP_ERR_UNSUPPORTED, names->function, names->group,
            "%.300s: its elements are '%s', which is not a ddp_dtype%s", names->path, header->descr,
            out->dtype ? "; to load bf16, set out->dtype to DDP_BF16" : "; save them as another");
    if (wanted && wanted != out->dtype)
        return ddp_fail_in(DDP_ERR_INVALID, names->function, names->group,
                           "%.300s: its elements are %s, but out->dtype is %s", names->path,
                           ddp_dtype_name(out->dtype), ddp_dtype_name(wanted));
    if (header->ndim > DDP_MAX_NDIM)
        return ddp_fail_in(DDP_ERR_UNSUPPORTED, names->function, names->group,
                           "%.300s has %d dimensions, more than %d; reshape the array", names->path,
                           header->ndim, DDP_MAX_NDIM);
    out->ndim = header->ndim;
    memcpy(out->shape, header->shape, sizeof out->shape);
    npy__print_shape(out, &text);
    if (header->fortran_order)
        return ddp_fail_in(DDP_ERR_UNSUPPORTED, names->function, names->group,
                           "%.300s: %s in Fortran order; save numpy.ascontiguousarray of it", names->path,
                           text.text);
    if (npy__bytes(out) < 0)
        return ddp_fail_in(DDP_ERR_CORRUPT, names->function, names->group,
                           "%.300s: a shape of %s does not fit in memory; save the array again", names->path,
                           text.text);
    if (npy__bytes(out) > room)
        return ddp_fail_in(
            DDP_ERR_CORRUPT, names->function, names->group,
            "%.300s ends at byte %lld, but %s of %s from byte %lld on needs %lld more; copy the "
            "file again",
            names->path, (long long)file_bytes, text.text, ddp_dtype_name(out->dtype),
            (long long)header->data_offset, (long long)(npy__bytes(out) - room));
    return DDP_OK;
}

/* Writes the prefix and the header of a tensor's file and returns their bytes, a multiple of 64 as NumPy has
   it. */
static inline size_t npy__print_header(char out[512], const ddp_tensor *t) {
    npy__shape_text shape;
    const char *descr = "";
    size_t length;
    for (int i = 0; i < NPY__DTYPES; i++)
        if (npy__dtypes[i].dtype == t->dtype) descr = npy__dtypes[i].descr;
    memcpy(out, "\x93NUMPY\x01", 8);
    length = 10
             + (size_t)snprintf(out + 10, 400, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }",
                                descr, npy__print_shape(t, &shape));
    while ((length + 1) % 64) out[length++] = ' ';
    out[length++] = '\n';
    out[8] = (char)((length - 10) & 255);
    out[9] = (char)((length - 10) >> 8);
    return length;
}

//== files ==================================================================================================

static inline ddp_result npy__system_error(const npy_names *names, const char *action) {
    return ddp_fail_in(DDP_ERR_SYSTEM, names->function, names->group, "%s %.300s: %s", action, names->path,
                       strerror(errno));
}

static inline ddp_result npy__read(const npy_names *names, int fd, void *data, int64_t bytes,
                                   int64_t offset) {
    for (char *to = (char *)data; bytes > 0;) {
        ssize_t n = pread(fd, to, (size_t)bytes, (off_t)offset);
        if (n == 0)
            return ddp_fail_in(DDP_ERR_CORRUPT, names->function, names->group,
                               "%.300s ends at byte %lld: it was cut while it was read; load it again",
                               names->path, (long long)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return npy__system_error(names, "reading");
        to += n;
        offset += n;
        bytes -= n;
    }
    return DDP_OK;
}

static inline ddp_result npy__write(const npy_names *names, int fd, const void *data, int64_t bytes) {
    for (const char *from = (const char *)data; bytes > 0;) {
        ssize_t n = write(fd, from, (size_t)bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return npy__system_error(names, "writing");
        from += n;
        bytes -= n;
    }
    return DDP_OK;
}

/* The group's device, with this thread on its compute stream. */
static inline ddp_result npy__enter(ddp_group *group, const ddp_device **device) {
    *device = group ? ddp_group_device(group) : ddp_device_cpu();
    return (*device)->use_stream ? (*device)->use_stream(group, DDP_STREAM_COMPUTE) : DDP_OK;
}

/* Copies the values between the file and the tensor. Values of device memory pass through host memory. */
static inline ddp_result npy__transfer(const npy_names *names, ddp_group *group, const ddp_device *device,
                                       int fd, const ddp_tensor *t, int64_t data_offset, int writes) {
    int64_t bytes = npy__bytes(t), at = 0, n;
    ddp_result result = DDP_OK;
    char *block;
    if (device == ddp_device_cpu()) {
        if (writes) return npy__write(names, fd, t->data, bytes);
        return npy__read(names, fd, t->data, bytes, data_offset);
    }
    block = (char *)ddp_host_alloc(group, (size_t)(bytes < NPY_BLOCK_BYTES ? bytes : NPY_BLOCK_BYTES));
    if (!block) return DDP_ERR_NO_MEMORY;
    for (; at < bytes && result == DDP_OK; at += n) {
        char *data = (char *)t->data + at;
        n = bytes - at < NPY_BLOCK_BYTES ? bytes - at : NPY_BLOCK_BYTES;
        if (writes) {
            device->copy(block, data, (size_t)n);
            result = npy__write(names, fd, block, n);
        } else {
            result = npy__read(names, fd, block, n, data_offset + at);
            if (result == DDP_OK) device->copy(data, block, (size_t)n);
        }
    }
    ddp_host_free(group, block);
    if (result == DDP_OK && device->check) result = device->check(group);
    return result;
}

/* Reads the header of an open file. */
static inline ddp_result npy__read_header(const npy_names *names, ddp_group *group, int fd, npy_header *out,
                                          int64_t *file_bytes) {
    npy__parser p = {names, NULL, 0, 0};
    unsigned char prefix[NPY_PREFIX_BYTES] = {0};
    struct stat info;
    ddp_result result;
    char *bytes;
    memset(out, 0, sizeof *out);
    if (fstat(fd, &info) != 0) return npy__system_error(names, "inspecting");
    if (!S_ISREG(info.st_mode))
        return ddp_fail_in(DDP_ERR_INVALID, names->function, names->group,
                           "%.300s is not a regular file; give a .npy file", names->path);
    *file_bytes = (int64_t)info.st_size;
    DDP_TRY(npy__read(names, fd, prefix, *file_bytes < NPY_PREFIX_BYTES ? *file_bytes : NPY_PREFIX_BYTES, 0));
    DDP_TRY(npy__parse_prefix(names, prefix, *file_bytes, out, &p.at));
    p.bytes = bytes = (char *)ddp_host_alloc(group, (size_t)out->data_offset);
    if (!bytes) return DDP_ERR_NO_MEMORY;
    p.end = out->data_offset;
    result = npy__read(names, fd, bytes, out->data_offset, 0);
    if (result == DDP_OK) result = npy__parse_text(&p, out);
    ddp_host_free(group, bytes);
    return result;
}

/* Sets *t to memory for the values: that of `out`, which must fit, or new memory. */
static inline ddp_result npy__allocate(const npy_names *names, ddp_group *group, const ddp_device *device,
                                       const ddp_tensor *out, ddp_tensor *t) {
    size_t bytes = (size_t)npy__bytes(t);
    npy__shape_text have, need;
    int same = out->ndim == t->ndim;
    if (!out->data) return device->alloc(group, bytes, &t->data);
    if (out->ndim < 0 || out->ndim > DDP_MAX_NDIM)
        return ddp_fail_in(DDP_ERR_INVALID, names->function, group, "out: ndim=%d; use 0 to %d", out->ndim,
                           DDP_MAX_NDIM);
    for (int i = 0; same && i < t->ndim; i++) same = out->shape[i] == t->shape[i];
    if (!same)
        return ddp_fail_in(DDP_ERR_INVALID, names->function, group, "out is %s, but %.300s is %s",
                           npy__print_shape(out, &have), names->path, npy__print_shape(t, &need));
    t->data = out->data;
    return DDP_OK;
}

/* Loads a file of format 1.0 to 3.0 in C order.
   out->data NULL: memory is allocated as by ddp_tensor_create, and the caller frees it with ddp_tensor_free.
   Otherwise out->shape must be that of the file, and the values go to out->data.
   out->dtype 0: the file's. DDP_BF16 reads a file of u16: NumPy has no bf16, so npy_save writes it as u16.
   group NULL: the CPU and malloc. Not collective, blocking. Bytes after the values are not read.
   On failure *out is unchanged, except that a failed read leaves part of the values at out->data.
   Errors: DDP_ERR_SYSTEM; DDP_ERR_CORRUPT; DDP_ERR_UNSUPPORTED (Fortran order, a dtype unknown to ddp);
   DDP_ERR_INVALID (not a regular file, out does not fit); DDP_ERR_NO_MEMORY. */
static inline ddp_result npy_load(ddp_group *group, const char *path, ddp_tensor *out) {
    npy_names names = {__func__, path, group};
    const ddp_device *device;
    npy_header header;
    int64_t file_bytes = 0;
    ddp_tensor t;
    ddp_result result;
    int fd;
    if (!path) return ddp_fail_in(DDP_ERR_INVALID, __func__, group, "path is NULL");
    if (!out) return ddp_fail_in(DDP_ERR_INVALID, __func__, group, "out is NULL");
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe without a writer does not block */
    if (fd < 0) return npy__system_error(&names, "opening");
    result = npy__read_header(&names, group, fd, &header, &file_bytes);
    if (result == DDP_OK) result = npy__to_tensor(&names, &header, file_bytes, out->dtype, &t);
    if (result == DDP_OK) result = npy__enter(group, &device);
    if (result == DDP_OK) result = npy__allocate(&names, group, device, out, &t);
    if (result == DDP_OK) {
        result = npy__transfer(&names, group, device, fd, &t, header.data_offset, 0);
        if (result == DDP_OK)
            *out = t;
        else if (t.data != out->data)
            device->free(group, t.data);
    }
    close(fd);
    return result;
}

/* Saves a tensor of the group's device as format 1.0. bf16 is stored as u16, its bits.
   The values are written to a temporary file in the same folder, which is synced and then renamed to path.
   After a failure the old file is unchanged, and the temporary file is removed.
   group NULL: host memory. Not collective, blocking. Errors: DDP_ERR_SYSTEM; DDP_ERR_INVALID;
   DDP_ERR_NO_MEMORY. */
static inline ddp_result npy_save(ddp_group *group, const ddp_tensor *tensor, const char *path) {
    static unsigned files; /* gives each thread its own name */
    char temporary[4096], header[512];
    npy_names names = {__func__, temporary, group};
    const ddp_device *device;
    ddp_result result;
    size_t header_bytes;
    int fd;
    if (!tensor) return ddp_fail_in(DDP_ERR_INVALID, __func__, group, "tensor is NULL");
    if (!path) return ddp_fail_in(DDP_ERR_INVALID, __func__, group, "path is NULL");
    if (!ddp_dtype_size(tensor->dtype))
        return ddp_fail_in(DDP_ERR_INVALID, __func__, group,
                           "tensor: dtype=%d is invalid; use DDP_F32 to DDP_U64", (int)tensor->dtype);
    if (npy__bytes(tensor) < 0)
        return ddp_fail_in(DDP_ERR_INVALID, __func__, group,
                           "tensor: ndim=%d and shape are invalid, or do not fit in memory", tensor->ndim);
    if (!tensor->data && npy__bytes(tensor) > 0)
        return ddp_fail_in(DDP_ERR_INVALID, __func__, group, "tensor: data is NULL");
    DDP_TRY(npy__enter(group, &device));
    do { /* a process with the same number may have left a file of that name when it was killed */
        unsigned number = __atomic_fetch_add(&files, 1, __ATOMIC_RELAXED);
        int length = snprintf(temporary, sizeof temporary, "%s.%d.%u.tmp", path, (int)getpid(), number);
        if (length >= (int)sizeof temporary)
            return ddp_fail_in(DDP_ERR_INVALID, __func__, group, "path has more than %d bytes",
                               (int)sizeof temporary - 30);
        fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EEXIST);
    if (fd < 0) return npy__system_error(&names, "creating");
    header_bytes = npy__print_header(header, tensor);
    result = npy__write(&names, fd, header, (int64_t)header_bytes);
    if (result == DDP_OK) result = npy__transfer(&names, group, device, fd, tensor, (int64_t)header_bytes, 1);
    if (result == DDP_OK && fsync(fd) != 0 && errno != EINVAL) result = npy__system_error(&names, "syncing");
    if (close(fd) != 0 && result == DDP_OK) result = npy__system_error(&names, "closing");
    if (result == DDP_OK && rename(temporary, path) != 0) {
        names.path = path;
        result = npy__system_error(&names, "renaming to");
    }
    if (result != DDP_OK) unlink(temporary);
    return result;
}

#endif /* DDP_EXAMPLE_NPY_H */

/* MIT License: see LICENSE. */

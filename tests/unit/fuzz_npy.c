/*  fuzz_npy.c - arbitrary bytes as a .npy file: a libFuzzer harness.

    An accepted file has the file's bytes as values, and is the same after the library has written and read it
    again. Otherwise the error names the file. A separate harness: clang -fsanitize=fuzzer,address fuzz_npy.c;
    the initial corpus is corpus_npy/. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DDP_STATIC /* functions without a caller are not compiled, and no group is created here */
#define DDP_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../ddp_tensor.h"
#include "../../examples/extras/npy.h"

static char path[64];
static int file = -1;

static void put(const void *data, size_t size, int64_t at) {
    if (pwrite(file, data, size, (off_t)at) != (ssize_t)size) abort();
}

static void use(const ddp_tensor *t, const uint8_t *data, size_t size) {
    int64_t bytes = npy__bytes(t);
    char head[512], text[2048];
    size_t length, room = sizeof text;
    ddp_tensor again = DDP_ZERO;
    if (bytes < 0 || (size_t)bytes > size || t->ndim > DDP_MAX_NDIM) abort();
    if (bytes && !memmem(data, size, t->data, (size_t)bytes)) abort();
    if (ddp_tensor_print(NULL, t, DDP_REPLICATE, text, &room) != DDP_OK) abort();
    length = npy__print_header(head, t);
    if (length % 64 || ftruncate(file, 0) != 0) abort();
    put(head, length, 0);
    put(t->data, (size_t)bytes, (int64_t)length);
    again.dtype = t->dtype;
    if (npy_load(NULL, path, &again) != DDP_OK) abort();
    if (again.ndim != t->ndim || memcmp(again.shape, t->shape, sizeof t->shape) != 0
        || memcmp(again.data, t->data, (size_t)bytes) != 0)
        abort();
    ddp_tensor_free(NULL, &again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (file < 0) {
        file = memfd_create("fuzz", 0);
        if (file < 0) abort();
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    for (int half = 0; half < 2; half++) { /* half 1: read as bf16 */
        ddp_tensor t = DDP_ZERO;
        npy_names names = {"fuzz", path, NULL};
        npy_header header;
        ddp_result result;
        t.dtype = half ? DDP_BF16 : DDP_DTYPE_DEFAULT;
        if (ftruncate(file, 0) != 0) abort();
        put(data, size, 0);
        result = npy_load(NULL, path, &t);
        /* The reader of mapped files accepts the same headers. */
        if (result == DDP_OK
            && (npy_parse(&names, data, (int64_t)size, &header) != DDP_OK || header.ndim != t.ndim))
            abort();
        if (npy_parse(&names, data, (int64_t)size, &header) != DDP_OK && !strstr(ddp_last_error(), path))
            abort();
        if (result != DDP_OK) result = npy_load(NULL, path, &t);
        if (result == DDP_OK)
            use(&t, data, size);
        else if (t.data || !strstr(ddp_last_error(), path)
                 || (result != DDP_ERR_CORRUPT && result != DDP_ERR_UNSUPPORTED
                     && (result != DDP_ERR_INVALID || !half)))
            abort();
        if (result == DDP_OK) ddp_tensor_free(NULL, &t);
    }
    return 0;
}

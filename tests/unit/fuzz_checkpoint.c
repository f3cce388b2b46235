/*  fuzz_checkpoint.c - arbitrary bytes as the JSON of a checkpoint: a libFuzzer harness.

    The first byte selects the meaning of the rest: h = header of a tensor file (its data as long as the
    largest valid end), s = state.json, i = index of a model, v = any value. A separate harness: clang
    -fsanitize=fuzzer,address fuzz_checkpoint.c; the initial corpus is corpus/. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DDP_STATIC /* functions without a caller are not compiled, and no group is created here */
#define DDP_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../ddp_fsdp.h"

static ddp_group zero, *alone = &zero; /* provides the allocator */

static void *fuzz_alloc(size_t size_bytes, void *user) {
    (void)user;
    return malloc(size_bytes);
}
static void fuzz_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

/* Data that ends at the last number in the text, so that many headers are valid. */
static uint64_t last_number(const char *text, size_t length) {
    uint64_t number = 0;
    while (length && (text[length - 1] < '0' || text[length - 1] > '9')) length--;
    for (uint64_t scale = 1;
         length && text[length - 1] >= '0' && text[length - 1] <= '9' && scale < 1000000000;
         length--, scale *= 10)
        number += scale * (uint64_t)(text[length - 1] - '0');
    return number;
}

/* The guarantees of a header that was accepted. */
static void check_header(const ddp__load_file *header, uint64_t data_bytes) {
    uint64_t total = 0;
    for (int i = 0; i < header->count; i++) {
        const ddp__file_tensor *r = &header->records[i];
        if (r->begin > r->end || r->end > data_bytes
            || r->end - r->begin != r->count * (uint64_t)r->dtype->size)
            abort();
        if (i && ddp__string_compare(r - 1, r) >= 0) abort();
        if (ddp__file_tensor_find(header, r->name) != r) abort();
        total += r->end - r->begin;
    }
    if (total != data_bytes) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    ddp__load_state loading;
    ddp__load_file header;
    ddp__json j;
    size_t length = size ? size - 1 : 0;
    char *text;
    alone->desc.alloc_fn = fuzz_alloc;
    alone->desc.free_fn = fuzz_free;
    if (size == 0) return 0;
    memset(&loading, 0, sizeof loading);
    memset(&header, 0, sizeof header);
    loading.files = (ddp__load_file *)ddp_host_alloc(alone, (length / 7 + 1) * sizeof *loading.files);
    if (!loading.files) return 0;
    text = (char *)malloc(length ? length : 1); /* of exact size */
    memcpy(text, data + 1, length);
    j = ddp__json_reader(text, length);
    if (data[0] == 'h') {
        uint64_t data_bytes = last_number(text, length);
        header.dir = header.name = "fuzz";
        header.text = text;
        if (ddp__header_read(alone, &header, length, data_bytes) == DDP_OK) check_header(&header, data_bytes);
        ddp_host_free(alone, header.records);
    } else if (data[0] == 's') {
        if (!ddp__state_read(&loading, &j) && !j.error) abort();
    } else if (data[0] == 'i') {
        if (!ddp__index_read(&loading, &j) && !j.error) abort();
    } else {
        if (!(ddp__json_skip(&j) && ddp__json_end(&j)) != (j.error != NULL)) abort();
        if (j.at > j.end) abort();
    }
    ddp_host_free(alone, loading.files);
    free(text);
    return 0;
}

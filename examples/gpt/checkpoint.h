/*  checkpoint.h - the checkpoint file of train_gpt, train_gpt_tensor and train_gpt_cuda

    A file holds the complete model, so any of these trainers continues from it, on any number of ranks:

        checkpoint_header
        values             parameter_count x f32, in the order of gpt_param_info; a tied value once
        first moments      the same, of AdamW
        second moments     the same
        checksum           u64, FNV-1a of all bytes before it

    Numbers have the byte order of this machine. Only rank 0 reads and writes the file. */
#ifndef DDP_EXAMPLE_CHECKPOINT_H
#define DDP_EXAMPLE_CHECKPOINT_H

#include "train.h"

typedef struct checkpoint_header {
    char magic[8];
    uint32_t version, header_bytes;
    run_saved run;
    int64_t parameter_count;
} checkpoint_header;

#define CHECKPOINT_MAGIC "ddp gpt" /* 8 bytes with the terminating zero */
#define CHECKPOINT_VERSION 2

/* Reads a whole file and verifies its checksum before any number of it is used. */
static ddp_result checkpoint_read(const char *path, text_buffer *file, checkpoint_header *header) {
    uint64_t hash, stored;
    struct stat info;
    int64_t body; /* bytes of values and moments */
    if (stat(path, &info) != 0)
        return ddp_fail(DDP_ERR_INVALID, "--resume %s: %s; give a file that --checkpoint wrote", path,
                        strerror(errno));
    if (S_ISREG(info.st_mode)) DDP_TRY(text_add_file(file, path, 0));
    if (file->count < (int64_t)sizeof header->magic
        || memcmp(file->bytes, CHECKPOINT_MAGIC, sizeof header->magic))
        return ddp_fail(DDP_ERR_INVALID, "--resume %s: not a checkpoint; give a file that --checkpoint wrote",
                        path);
    body = file->count - (int64_t)sizeof *header - (int64_t)sizeof hash;
    if (body >= 0) memcpy(header, file->bytes, sizeof *header);
    if (body >= 0 && (header->version != CHECKPOINT_VERSION || header->header_bytes != sizeof *header))
        return ddp_fail(DDP_ERR_INVALID,
                        "--resume %s: format version %u, but this program reads version %d; train again, or "
                        "use the program that wrote it",
                        path, header->version, CHECKPOINT_VERSION);
    if (body < 0 || body / 12 < header->parameter_count)
        return ddp_fail(DDP_ERR_CORRUPT, "--resume %s: truncated; use another copy or an older checkpoint",
                        path);
    hash = hash_bytes(HASH_START, file->bytes, (size_t)file->count - sizeof hash);
    memcpy(&stored, file->bytes + file->count - sizeof stored, sizeof stored);
    if (hash != stored || header->parameter_count < 1 || body != header->parameter_count * 12)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "--resume %s: damaged, the checksum does not match; use another copy or an older "
                        "checkpoint",
                        path);
    return DDP_OK;
}

/* Rank 0: compares the checkpoint with the model, once the model's shape is known. */
static ddp_result checkpoint_check(const run *r, const checkpoint_header *header) {
    if (r->plan.first_step == 0 || header->parameter_count == r->parameter_count) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT,
                    "--resume %s: the checkpoint has %lld parameters, but the model has %lld; use another "
                    "checkpoint",
                    r->options->resume, (long long)header->parameter_count, (long long)r->parameter_count);
}

/* A checkpoint that is being written, to a temporary file. checkpoint_end renames it, so a kill at any time
   leaves the previous checkpoint or the new one. */
typedef struct checkpoint_writer {
    FILE *file;
    uint64_t hash;
    char temporary[4096];
} checkpoint_writer;

static void checkpoint_put(checkpoint_writer *w, const void *data, size_t size_bytes) {
    w->hash = hash_bytes(w->hash, data, size_bytes);
    if (size_bytes) fwrite(data, 1, size_bytes, w->file); /* checkpoint_end checks ferror */
}

static ddp_result checkpoint_begin(checkpoint_writer *w, const run *r, const char *path, int64_t step) {
    checkpoint_header header;
    memset(&header, 0, sizeof header);
    memcpy(header.magic, CHECKPOINT_MAGIC, sizeof header.magic);
    header.version = CHECKPOINT_VERSION;
    header.header_bytes = sizeof header;
    header.run.config = r->plan.config;
    header.run.text_hash = r->plan.text_hash;
    header.run.step = step;
    header.parameter_count = r->parameter_count;
    w->hash = HASH_START;
    w->file = NULL;
    DDP_TRY(ddp_sampler_save(&r->sampler, &header.run.data));
    snprintf(w->temporary, sizeof w->temporary, "%s.tmp", path);
    w->file = fopen(w->temporary, "wb");
    if (!w->file)
        return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s; choose another path", path,
                        strerror(errno));
    checkpoint_put(w, &header, sizeof header);
    return DDP_OK;
}

static ddp_result checkpoint_end(checkpoint_writer *w, const char *path) {
    uint64_t hash = w->hash;
    int failed, error;
    checkpoint_put(w, &hash, sizeof hash);
    failed = fflush(w->file) != 0 || ferror(w->file) || fsync(fileno(w->file)) != 0;
    failed = fclose(w->file) != 0 || failed;
    if (!failed && rename(w->temporary, path) == 0) return DDP_OK;
    error = errno;
    unlink(w->temporary);
    return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s; an older checkpoint there is unchanged", path,
                    strerror(error));
}

#endif /* DDP_EXAMPLE_CHECKPOINT_H */

/* MIT License: see LICENSE. */

/*  checkpoint.h - the checkpoint file of train_gpt and train_gpt_tensor: the global model, whatever ranks have trained it.

    checkpoint_header, then parameter_count values, first moments and second moments, as f32, in the order of the parameter list, then the FNV-1a hash
    of all bytes before it. Numbers as this machine has them. Rank 0 alone reads and writes. */
#ifndef DDP_EXAMPLE_CHECKPOINT_H
#define DDP_EXAMPLE_CHECKPOINT_H

#include "train.h"

typedef struct checkpoint_header {
    char magic[8];
    uint32_t version, header_bytes;
    run_saved run;
    int64_t parameter_count;
} checkpoint_header;

#define CHECKPOINT_MAGIC "ddp gpt" /* with its zero: 8 bytes */
#define CHECKPOINT_VERSION 1

/* Reads the whole file, so that nothing is believed before its hash is right. */
static ddp_result checkpoint_read(const char *path, text_buffer *file, checkpoint_header *header) {
    uint64_t hash, stored;
    struct stat info;
    int64_t body;
    if (stat(path, &info) != 0)
        return WRONG("--resume %s: %s; give a file that --checkpoint has written", path, strerror(errno));
    if (S_ISREG(info.st_mode)) TRY(text_add_file(file, path, 0));
    if (file->count < (int64_t)sizeof header->magic
        || memcmp(file->bytes, CHECKPOINT_MAGIC, sizeof header->magic))
        return WRONG("--resume %s: this is no checkpoint; give a file that --checkpoint has written", path);
    body = file->count - (int64_t)sizeof *header - (int64_t)sizeof hash;
    if (body >= 0) memcpy(header, file->bytes, sizeof *header);
    if (body >= 0 && (header->version != CHECKPOINT_VERSION || header->header_bytes != sizeof *header))
        return WRONG("--resume %s: version %u of the format, this program reads version %d; train anew, or "
                     "use the program that wrote it",
                     path, header->version, CHECKPOINT_VERSION);
    if (body < 0 || body / 12 < header->parameter_count)
        return ddp_fail(DDP_ERR_CORRUPT, "--resume %s is cut short; give an older or a complete copy", path);
    hash = hash_bytes(HASH_START, file->bytes, (size_t)file->count - sizeof hash);
    memcpy(&stored, file->bytes + file->count - sizeof stored, sizeof stored);
    if (hash != stored || header->parameter_count < 1 || body != header->parameter_count * 12)
        return ddp_fail(DDP_ERR_CORRUPT,
                        "--resume %s is damaged, its hash does not fit its contents; give another copy",
                        path);
    return DDP_OK;
}

/* The file fits the plan: rank 0 asks once the model's shape is known. */
static ddp_result checkpoint_check(const run *r, const checkpoint_header *header) {
    if (r->plan.first_step == 0 || header->parameter_count == r->parameter_count) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "%s holds %lld parameters, the model has %lld; train anew",
                    r->options->resume, (long long)header->parameter_count, (long long)r->parameter_count);
}

/* A file that is being written, beside the one that it replaces at the end: whenever this is killed, one whole checkpoint is there. */
typedef struct checkpoint_writer {
    FILE *file;
    uint64_t hash;
    char temporary[4096];
} checkpoint_writer;

static void checkpoint_put(checkpoint_writer *w, const void *data, size_t size_bytes) {
    w->hash = hash_bytes(w->hash, data, size_bytes);
    if (size_bytes) fwrite(data, 1, size_bytes, w->file); /* ferror tells at the end */
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
    TRY(ddp_sampler_save(&r->sampler, &header.run.data));
    snprintf(w->temporary, sizeof w->temporary, "%s.tmp", path);
    w->file = fopen(w->temporary, "wb");
    if (!w->file)
        return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s; choose a place where it can", path,
                        strerror(errno));
    checkpoint_put(w, &header, sizeof header);
    return DDP_OK;
}

static ddp_result checkpoint_end(checkpoint_writer *w, const char *path) {
    uint64_t hash = w->hash;
    int failed;
    checkpoint_put(w, &hash, sizeof hash);
    failed = fflush(w->file) != 0 || ferror(w->file) || fsync(fileno(w->file)) != 0;
    failed = fclose(w->file) != 0 || failed;
    if (!failed && rename(w->temporary, path) == 0) return DDP_OK;
    failed = errno;
    unlink(w->temporary);
    return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s; what was there is untouched", path,
                    strerror(failed));
}

#endif /* DDP_EXAMPLE_CHECKPOINT_H */

/* MIT License: see LICENSE. */

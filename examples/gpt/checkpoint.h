/*  checkpoint.h - the checkpoint file of train_gpt, train_gpt_pipeline, train_gpt_tensor and train_gpt_cuda

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

// clang-format off
#define CHECKPOINT_FLAGS \
    {"--checkpoint", FLAG_TEXT, NOT_SAVED, AT(checkpoint), 0, 0, \
     "FILE write a checkpoint there after each validation"}, \
    {"--resume", FLAG_TEXT, NOT_SAVED, AT(resume), 0, 0, \
     "FILE continue from a checkpoint of train_gpt, _pipeline, _tensor or _cuda, on any ranks" RESUMED_FLAGS}
// clang-format on

#define CHECKPOINT_MAGIC "ddp gpt" /* 8 bytes with the terminating zero */
#define CHECKPOINT_VERSION 3

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

/* The file of --resume, on rank 0. */
typedef struct checkpoint_file {
    text_buffer file;
    checkpoint_header header;
} checkpoint_file;

/* Rank 0: checks the path of --checkpoint and reads the file of --resume. Sets *saved for make_plan. */
static inline ddp_result checkpoint_open(checkpoint_file *f, const run_options *o, const run_saved **saved) {
    *saved = o->resume ? &f->header.run : NULL;
    if (o->checkpoint) DDP_TRY(check_writable(o->checkpoint));
    return o->resume ? checkpoint_read(o->resume, &f->file, &f->header) : DDP_OK;
}

static inline void checkpoint_close(checkpoint_file *f) {
    free(f->file.bytes);
    memset(&f->file, 0, sizeof f->file);
}

/* The tensors of a checkpoint: values (which 0), first moments (1) and second moments (2) of each parameter
   that is not tied. Stores what this rank needs of a full tensor. */
typedef void (*checkpoint_set_fn)(void *trainer, int which, int param, const float *full);
/* Sets *full to the full tensor on rank 0. It is valid until the next call. Collective. */
typedef ddp_result (*checkpoint_get_fn)(void *trainer, int which, int param, const float **full);

/* Broadcasts the tensors of rank 0's file, calls set for each on every rank, and closes the file.
   Collective. */
static inline ddp_result checkpoint_load(const run *r, checkpoint_file *f, checkpoint_set_fn set,
                                         void *trainer) {
    gpt_config config = run_model_config(r);
    size_t at = sizeof f->header;
    ddp_result result = DDP_OK;
    float *full;
    DDP_TRY(broadcast_result(r->world, r->rank == 0 ? checkpoint_check(r, &f->header) : DDP_OK));
    full = (float *)malloc(run_largest_param(r) * sizeof(float));
    if (!full) return run_out_of_memory();
    for (int which = 0; which < 3; which++)
        for (int i = 0; i < gpt_param_count(&config) && result == DDP_OK; i++) {
            size_t count = (size_t)r->infos[i].count;
            if (r->infos[i].tied_to >= 0) continue;
            if (r->rank == 0) memcpy(full, f->file.bytes + at, count * sizeof(float));
            at += count * sizeof(float);
            result = ddp_broadcast(r->world, full, count, DDP_F32, 0, NULL);
            if (result == DDP_OK) set(trainer, which, i, full);
        }
    free(full);
    checkpoint_close(f);
    return result;
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

/* Writes the file of --checkpoint on rank 0. get: called on every rank, in the order of the file.
   Collective. */
static ddp_result checkpoint_save(const run *r, int64_t step, checkpoint_get_fn get, void *trainer) {
    gpt_config config = run_model_config(r);
    const char *path = r->options->checkpoint;
    checkpoint_writer w;
    ddp_result result = r->rank == 0 ? checkpoint_begin(&w, r, path, step) : DDP_OK;
    DDP_TRY(broadcast_result(r->world, result));
    for (int which = 0; which < 3; which++)
        for (int i = 0; i < gpt_param_count(&config) && result == DDP_OK; i++) {
            const float *full = NULL;
            if (r->infos[i].tied_to >= 0) continue;
            result = get(trainer, which, i, &full);
            if (r->rank == 0 && result == DDP_OK)
                checkpoint_put(&w, full, (size_t)r->infos[i].count * sizeof(float));
        }
    if (r->rank == 0 && result == DDP_OK)
        result = checkpoint_end(&w, path);
    else if (r->rank == 0) {
        fclose(w.file);
        unlink(w.temporary);
    }
    return result == DDP_OK || r->rank == 0 ? broadcast_result(r->world, result) : result;
}

#endif /* DDP_EXAMPLE_CHECKPOINT_H */

/* MIT License: see LICENSE. */

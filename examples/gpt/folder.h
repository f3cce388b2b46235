/*  folder.h - for the trainers that use ddp_fsdp.h: names of strategies and dtypes, and checkpoint folders

    ddp_fsdp_save writes complete tensors, so a checkpoint does not depend on the ranks that wrote it. The
    configuration of the run is stored in the ddp_fsdp_state: see folder_state. */
#ifndef DDP_EXAMPLE_FOLDER_H
#define DDP_EXAMPLE_FOLDER_H

#include "../../ddp_fsdp.h"
#include "train.h"

#define FOLDER_MAGIC UINT64_C(0x6770742d) /* "gpt-": the upper half of rng[3] */
#define FOLDER_DROPOUT_UNIT 131072.0      /* of user[7]: above every size of a vocabulary */
enum { STRATEGY_COUNT = 4 };

/* The value of --strategy for a ddp_fsdp_strategy. */
static inline const char *strategy_name(int strategy) {
    static const char *const names[STRATEGY_COUNT] = {"full", "grad", "optim", "none"};
    return names[strategy];
}

/* The ddp_fsdp_strategy of a name. NULL is the default; STRATEGY_COUNT = invalid. */
static inline int find_strategy(const char *name) {
    int s = 0;
    while (s < STRATEGY_COUNT && name && strcmp(name, strategy_name(s))) s++;
    return s;
}

/* The dtype of a name; NULL = fallback, DDP_DTYPE_DEFAULT = invalid. */
static inline ddp_dtype find_dtype(const char *name, ddp_dtype fallback) {
    if (!name) return fallback;
    if (!strcmp(name, "f32")) return DDP_F32;
    if (!strcmp(name, "bf16")) return DDP_BF16;
    return !strcmp(name, "f16") ? DDP_F16 : DDP_DTYPE_DEFAULT;
}

/* Stores the configuration of the run: seven integers, and the vocabulary with the f32 bits of dropout, in
   user; seed, hash of the text, bits of lr, and FOLDER_MAGIC with lr_decay_steps in rng. */
static void folder_state(ddp_fsdp_state *s, const run_plan *p) {
    const run_config *c = &p->config;
    float dropout = (float)c->dropout;
    uint32_t bits;
    const int32_t numbers[] = {c->layers, c->heads,       c->channels, c->context,
                               c->batch,  c->micro_batch, c->steps};
    for (int i = 0; i < 7; i++) s->user[i] = numbers[i];
    memcpy(&bits, &dropout, sizeof bits);
    s->user[7] = c->vocab + FOLDER_DROPOUT_UNIT * bits;
    s->rng[0] = (uint64_t)c->seed;
    s->rng[1] = p->text_hash;
    memcpy(&s->rng[2], &c->lr, sizeof c->lr);
    s->rng[3] = FOLDER_MAGIC << 32 | (uint32_t)c->lr_decay_steps;
}

static void folder_state_read(const ddp_fsdp_state *s, run_saved *saved) {
    run_config *c = &saved->config;
    int32_t *const numbers[] = {&c->layers, &c->heads,       &c->channels, &c->context,
                                &c->batch,  &c->micro_batch, &c->steps};
    double units = floor(s->user[7] / FOLDER_DROPOUT_UNIT), vocab = s->user[7] - units * FOLDER_DROPOUT_UNIT;
    uint32_t bits = units >= 0 && units <= UINT32_MAX ? (uint32_t)units : 0;
    float dropout;
    for (int i = 0; i < 7; i++) *numbers[i] = s->user[i] >= 1 && s->user[i] <= 1e9 ? (int32_t)s->user[i] : 1;
    c->vocab = vocab >= 1 && vocab <= 65536 ? (int32_t)vocab : 0;
    memcpy(&dropout, &bits, sizeof dropout);
    c->dropout = dropout >= 0 && dropout < 1 ? dropout : 0;
    c->lr_decay_steps = (int32_t)(s->rng[3] & 0x7fffffff);
    if (c->lr_decay_steps < 1 || c->lr_decay_steps > 1000000000) c->lr_decay_steps = c->steps;
    c->seed = (int64_t)s->rng[0];
    memcpy(&c->lr, &s->rng[2], sizeof c->lr);
    saved->text_hash = s->rng[1];
    saved->step = s->step;
    saved->data = s->sampler;
}

/* Reads `count` integers after `key` in the text of a state.json. Returns 0 if they are missing. */
static int find_numbers(const char *text, const char *key, int count, uint64_t *out) {
    const char *at = strstr(text, key);
    char *end;
    if (!at) return 0;
    at += strlen(key);
    for (int i = 0; i < count; i++) {
        at += strspn(at, ": [,");
        out[i] = strtoull(at, &end, 10);
        if (end == at) return 0;
        at = end;
    }
    return 1;
}

/* Rank 0: reads the configuration of the checkpoint, from which the model's shape follows. ddp_fsdp_load
   reads and verifies the rest. */
static ddp_result folder_read(const run_options *o, run_saved *saved) {
    const char *path = o->resume;
    char name[4096], text[8192];
    uint64_t user[8], step;
    ddp_fsdp_state state = DDP_ZERO;
    size_t size;
    FILE *file;
    snprintf(name, sizeof name, "%s/state.json", path);
    file = fopen(name, "rb");
    if (!file)
        return ddp_fail(DDP_ERR_INVALID, "--resume %s: %s; give a folder that --checkpoint wrote", name,
                        strerror(errno));
    size = fread(text, 1, sizeof text - 1, file);
    text[size] = 0;
    fclose(file);
    if (!find_numbers(text, "\"step\"", 1, &step) || !find_numbers(text, "\"rng\"", 4, state.rng)
        || !find_numbers(text, "\"user\"", 8, user) || state.rng[3] >> 32 != FOLDER_MAGIC)
        return ddp_fail(DDP_ERR_INVALID,
                        "--resume %s: not a checkpoint of %s; give a folder that --checkpoint wrote", path,
                        o->program->name);
    state.step = (int64_t)step;
    memcpy(state.user, user, sizeof user); /* the file stores the bits of the doubles as integers */
    folder_state_read(&state, saved);
    return DDP_OK;
}

/* Rank 0: checks whether a checkpoint stores queries, keys and values as this run expects: in separate
   tensors (separate = 1) or in one (0). remedy: the advice at the end of the error. ddp_fsdp_load checks all
   else. */
static inline ddp_result folder_check_qkv(const char *path, int separate, const char *remedy) {
    char name[4096], *text = NULL;
    size_t capacity = 0;
    int mismatch = 0;
    FILE *file;
    snprintf(name, sizeof name, "%s/model.safetensors.index.json", path);
    file = fopen(name, "rb");
    if (!file) return DDP_OK;
    if (getdelim(&text, &capacity, 0, file) > 0)
        mismatch = strstr(text, separate ? ".attn.qkv.weight\"" : ".attn.q.weight\"") != NULL;
    free(text);
    fclose(file);
    if (!mismatch) return DDP_OK;
    if (separate)
        return ddp_fail(DDP_ERR_INVALID,
                        "--resume %s has queries, keys and values in one tensor, but this run needs separate "
                        "tensors; %s",
                        path, remedy);
    return ddp_fail(DDP_ERR_INVALID,
                    "--resume %s has queries, keys and values in separate tensors, but this run needs one "
                    "tensor; %s",
                    path, remedy);
}

/* Checks at the start whether a checkpoint can be written to the folder, and leaves it unchanged. */
static ddp_result folder_check(const char *path) {
    char state[4096];
    struct stat info;
    struct dirent *entry;
    int exists = stat(path, &info) == 0, files = 0, writable;
    DIR *folder;
    if (exists && !S_ISDIR(info.st_mode))
        return ddp_fail(DDP_ERR_INVALID, "%s cannot be written: it is not a folder; choose another path",
                        path);
    if (exists)
        writable = access(path, W_OK) == 0;
    else
        writable = mkdir(path, 0777) == 0 && rmdir(path) == 0;
    if (!writable)
        return ddp_fail(DDP_ERR_INVALID, "%s cannot be written: %s; choose another path", path,
                        strerror(errno));
    folder = exists ? opendir(path) : NULL;
    while (folder && (entry = readdir(folder)) != NULL)
        files += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    if (folder) closedir(folder);
    snprintf(state, sizeof state, "%s/state.json", path);
    if (files && stat(state, &info) != 0)
        return ddp_fail(DDP_ERR_INVALID, "%s cannot be written: it holds other files; choose another folder",
                        path);
    return DDP_OK;
}

#endif /* DDP_EXAMPLE_FOLDER_H */

/* MIT License: see LICENSE. */

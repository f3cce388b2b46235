/*  folder.h - what the trainers on ddp_fsdp.h share: names of strategies, and checkpoints that are a folder that ddp_fsdp_save writes.

    Tensors are whole, whatever ranks had which part of them. What decides the bits of the run is in the state: whole numbers in `user`, others in `rng`. */
#ifndef DDP_EXAMPLE_FOLDER_H
#define DDP_EXAMPLE_FOLDER_H

#include "../../ddp_fsdp.h"
#include "train.h"

#define FOLDER_MAGIC UINT64_C(0x6770742d) /* "gpt-", the upper half of rng[3] */
enum { STRATEGY_COUNT = 4 };

/* What --strategy calls a ddp_fsdp_strategy. */
static inline const char *strategy_name(int strategy) {
    static const char *const names[STRATEGY_COUNT] = {"full", "grad", "optim", "none"};
    return names[strategy];
}

/* NULL = the default; STRATEGY_COUNT = there is none of that name. */
static inline int find_strategy(const char *name) {
    int s = 0;
    while (s < STRATEGY_COUNT && name && strcmp(name, strategy_name(s))) s++;
    return s;
}

static void folder_state(ddp_fsdp_state *s, const run_plan *p) {
    const run_config *c = &p->config;
    const int32_t numbers[] = {c->layers, c->heads,       c->channels, c->context,
                               c->batch,  c->micro_batch, c->steps};
    for (int i = 0; i < 7; i++) s->user[i] = numbers[i];
    s->user[7] = c->vocab;
    s->rng[0] = (uint64_t)c->seed;
    s->rng[1] = p->text_hash;
    memcpy(&s->rng[2], &c->lr, sizeof c->lr);
    s->rng[3] = FOLDER_MAGIC << 32 | (uint32_t)c->lr_decay_steps;
}

static void folder_state_read(const ddp_fsdp_state *s, run_saved *saved) {
    run_config *c = &saved->config;
    int32_t *const numbers[] = {&c->layers, &c->heads,       &c->channels, &c->context,
                                &c->batch,  &c->micro_batch, &c->steps};
    for (int i = 0; i < 7; i++) *numbers[i] = s->user[i] >= 1 && s->user[i] <= 1e9 ? (int32_t)s->user[i] : 1;
    c->vocab = s->user[7] >= 1 && s->user[7] <= 65536 ? (int32_t)s->user[7] : 0;
    c->lr_decay_steps = (int32_t)(s->rng[3] & 0x7fffffff);
    if (c->lr_decay_steps < 1 || c->lr_decay_steps > 1000000000) c->lr_decay_steps = c->steps;
    c->seed = (int64_t)s->rng[0];
    memcpy(&c->lr, &s->rng[2], sizeof c->lr);
    saved->text_hash = s->rng[1];
    saved->step = s->step;
    saved->data = s->sampler;
}

/* Reads count numbers behind "key": in a state.json; 0 when they are not there. */
static int numbers_after(const char *text, const char *key, int count, uint64_t *out) {
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

/* Rank 0: the run that a checkpoint is from, which decides the model's shape; ddp_fsdp_load reads all of it, and finds what is damaged. */
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
        return WRONG("--resume %s: %s; give a folder that --checkpoint has written", name, strerror(errno));
    size = fread(text, 1, sizeof text - 1, file);
    text[size] = 0;
    fclose(file);
    if (!numbers_after(text, "\"step\"", 1, &step) || !numbers_after(text, "\"rng\"", 4, state.rng)
        || !numbers_after(text, "\"user\"", 8, user) || state.rng[3] >> 32 != FOLDER_MAGIC)
        return WRONG("--resume %s: this is no checkpoint of %s; give a folder that --checkpoint has written",
                     path, o->program->name);
    state.step = (int64_t)step;
    memcpy(state.user, user, sizeof user); /* the file has the bits of doubles */
    folder_state_read(&state, saved);
    return DDP_OK;
}

/* Rank 0: whether a folder has queries, keys and values as this run needs them: apart, or as one tensor. ddp_fsdp_load looks at all else. instead: what to
   do with the other kind. */
static inline ddp_result folder_check_qkv(const char *path, int apart, const char *instead) {
    char name[4096], *text = NULL;
    size_t capacity = 0;
    int other = 0;
    FILE *file;
    snprintf(name, sizeof name, "%s/model.safetensors.index.json", path);
    file = fopen(name, "rb");
    if (!file) return DDP_OK;
    if (getdelim(&text, &capacity, 0, file) > 0)
        other = strstr(text, apart ? ".attn.qkv.weight\"" : ".attn.q.weight\"") != NULL;
    free(text);
    fclose(file);
    if (!other) return DDP_OK;
    return WRONG("--resume %s has queries, keys and values %s, and this run needs them %s; %s", path,
                 apart ? "in one tensor" : "apart", apart ? "apart" : "in one tensor", instead);
}

/* Whether a checkpoint can be made there or replaced, asked at the start. Leaves everything as it was. */
static ddp_result folder_check(const char *path) {
    char state[4096];
    struct stat info;
    struct dirent *entry;
    int there = stat(path, &info) == 0, files = 0;
    DIR *folder;
    if (there && !S_ISDIR(info.st_mode))
        return WRONG("%s cannot be written, it is not a folder; remove it or choose another place", path);
    if (there ? access(path, W_OK) != 0 : mkdir(path, 0777) != 0 || rmdir(path) != 0)
        return WRONG("%s cannot be written: %s; choose a place where it can", path, strerror(errno));
    folder = there ? opendir(path) : NULL;
    while (folder && (entry = readdir(folder)) != NULL)
        files += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    if (folder) closedir(folder);
    snprintf(state, sizeof state, "%s/state.json", path);
    if (files && stat(state, &info) != 0)
        return WRONG("%s cannot be written, it holds other files; choose another place", path);
    return DDP_OK;
}

#endif /* DDP_EXAMPLE_FOLDER_H */

/* MIT License: see LICENSE. */

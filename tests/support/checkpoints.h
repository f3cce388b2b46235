/*  checkpoints.h - shared by tests of checkpoints: a synthetic model, cut into boxes for W ranks, and
    folders. The values follow from a version number.

    Include after ddp_fsdp.h, with DDP_IMPLEMENTATION: the functions under test are private. */
#ifndef DDP_TEST_CHECKPOINTS_H
#define DDP_TEST_CHECKPOINTS_H

#include "ranks.h"

//== the model ==============================================================================

#ifndef CKPT_LONG
#define CKPT_LONG 100001 /* elements of a row of the larger tensors */
#endif

typedef struct ckpt_tensor {
    const char *name;
    ddp_dtype dtype;
    int ndim;
    int64_t shape[4];
    int cut; /* the dimension that ranks divide among them, in ceil(d / W) each */
    int kind;
} ckpt_tensor;

static const ckpt_tensor ckpt_model[] = {
    {"wte", DDP_F32, 2, {7, 5}, 0, 0},
    {"h.weight", DDP_BF16, 3, {4, 3, 2}, 0, 0},
    {"scalar", DDP_F32, 0, {0}, 0, 0},
    {"empty", DDP_F32, 2, {0, 4}, 0, 0},
    {"columns", DDP_I32, 2, {6, 8}, 1, 0},
    {"middle", DDP_F16, 3, {4, 6, 3}, 1, 0},
    {"\xc3\xa9 \"\\\n", DDP_I8, 1, {5}, 0, 0},
    {"long", DDP_F32, 2, {3, CKPT_LONG}, 0, 0},
    {"wide", DDP_F64, 2, {2, CKPT_LONG * 2 / 3}, 1, 0},
    {"bytes", DDP_U8, 1, {1}, 0, 0},
    {"u64", DDP_U64, 1, {2}, 0, 0},
    {"i64", DDP_I64, 1, {9}, 0, 0},
    {"wte", DDP_F32, 2, {7, 5}, 0, 1},
    {"wte.exp_avg_sq", DDP_F64, 2, {7, 5}, 0, 1},
    {"long.exp_avg", DDP_F32, 2, {3, 1001}, 0, 1},
};
#define CKPT_TENSORS ((int)(sizeof ckpt_model / sizeof ckpt_model[0]))

/* Byte b of a tensor of a version. */
static unsigned char ckpt_byte(int version, int tensor, uint64_t b) {
    uint64_t x = (b + 1) * UINT64_C(0x9e3779b97f4a7c15)
                 + (uint64_t)(version * 100 + tensor) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 31) * UINT64_C(0x94d049bb133111eb);
    return (unsigned char)(x >> 56);
}

typedef struct ckpt_rank {
    ddp__checkpoint_slice slices[CKPT_TENSORS + 2];
    int count;
    ddp_fsdp_state state;
} ckpt_rank;

static uint64_t ckpt_box_count(const ddp__checkpoint_slice *s) {
    uint64_t count = s->data ? 1 : 0;
    for (int d = 0; d < s->ndim; d++) count *= (uint64_t)s->extent[d];
    return count;
}

/* Allocates the boxes of this rank of W, filled with fill. whole: every rank has the full tensors. */
static RANKS_UNUSED void ckpt_open(ckpt_rank *k, int rank, int world_size, int whole, int fill) {
    memset(k, 0, sizeof *k);
    k->count = CKPT_TENSORS;
    memset(&k->state, fill, sizeof k->state);
    for (int t = 0; t < CKPT_TENSORS; t++) {
        const ckpt_tensor *m = &ckpt_model[t];
        ddp__checkpoint_slice *s = &k->slices[t];
        size_t bytes = ddp_dtype_size(m->dtype);
        s->name = m->name;
        s->dtype = m->dtype;
        s->ndim = m->ndim;
        s->file_kind = m->kind;
        for (int d = 0; d < m->ndim; d++) {
            s->shape[d] = s->extent[d] = m->shape[d];
            if (d == m->cut && !whole) {
                int64_t each = (m->shape[d] + world_size - 1) / world_size;
                s->offset[d] = each * rank < m->shape[d] ? each * rank : m->shape[d];
                s->extent[d] = s->offset[d] + each < m->shape[d] ? each : m->shape[d] - s->offset[d];
            }
            bytes *= (size_t)s->extent[d];
        }
        if (m->ndim == 0 && rank > 0 && !whole) continue; /* data NULL: not here */
        s->data = malloc(bytes + 1);
        memset(s->data, fill, bytes + 1);
    }
}

static RANKS_UNUSED void ckpt_close(ckpt_rank *k) {
    for (int t = 0; t < CKPT_TENSORS; t++) free(k->slices[t].data);
}

/* Element by element, from the definition: fills the boxes with the values of a version, or compares them. */
static int ckpt_each(ckpt_rank *k, int version, int compare) {
    for (int t = 0; t < (k->count ? k->count : CKPT_TENSORS); t++) {
        const ddp__checkpoint_slice *s = &k->slices[t];
        uint64_t count = ckpt_box_count(s), size = ddp_dtype_size(s->dtype);
        for (uint64_t i = 0; i < count; i++) {
            uint64_t rest = i, at = 0, stride = 1;
            for (int d = s->ndim - 1; d >= 0; d--) {
                at += (rest % (uint64_t)s->extent[d] + (uint64_t)s->offset[d]) * stride;
                rest /= (uint64_t)s->extent[d];
                stride *= (uint64_t)s->shape[d];
            }
            for (uint64_t b = 0; b < size; b++) {
                unsigned char *have = (unsigned char *)s->data + i * size + b,
                              want = ckpt_byte(version, t, at * size + b);
                if (!compare)
                    *have = want;
                else if (*have != want)
                    return fprintf(stderr, "tensor %d '%s' element %llu of the box\n", t, s->name,
                                   (unsigned long long)i),
                           0;
            }
        }
    }
    return 1;
}

static RANKS_UNUSED void ckpt_fill(ckpt_rank *k, int version) {
    (void)ckpt_each(k, version, 0);
    memset(&k->state, 0, sizeof k->state);
    k->state.step = version;
    k->state.sampler.seed = UINT64_MAX - (uint64_t)version;
    k->state.sampler.position = INT64_MIN + version;
    k->state.sampler.shuffle = -version;
    k->state.scaler.scale = 65536.0 / 3 * version;
    k->state.scaler.growth_tracker = 7;
    for (int i = 0; i < 4; i++) k->state.rng[i] = UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(version + i);
    for (int i = 0; i < 8; i++)
        k->state.user[i] = i == 0 ? NAN : i == 1 ? -0.0 : i == 2 ? version : 1.0 / (version + i);
}

/* Do boxes and state have this version's values? */
static RANKS_UNUSED int ckpt_has(ckpt_rank *k, int version) {
    ckpt_rank want;
    memset(&want, 0, sizeof want); /* no data: only the state */
    ckpt_fill(&want, version);
    if (memcmp(&want.state, &k->state, sizeof want.state) != 0)
        return fprintf(stderr, "the state differs\n"), 0;
    return ckpt_each(k, version, 1);
}

/* Is everything as ckpt_open with this fill left it? */
static RANKS_UNUSED int ckpt_untouched(const ckpt_rank *k, int fill) {
    for (size_t i = 0; i < sizeof k->state; i++)
        if (((const unsigned char *)&k->state)[i] != (unsigned char)fill) return 0;
    for (int t = 0; t < CKPT_TENSORS; t++) {
        uint64_t bytes = ckpt_box_count(&k->slices[t]) * ddp_dtype_size(k->slices[t].dtype);
        for (uint64_t i = 0; i < bytes; i++)
            if (((const unsigned char *)k->slices[t].data)[i] != (unsigned char)fill) return 0;
    }
    return 1;
}

//== folders ================================================================================

/* Reads a whole file; NULL if it does not exist. */
static RANKS_UNUSED char *ckpt_read(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    char *text;
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    *length = (size_t)ftell(file);
    rewind(file);
    text = (char *)malloc(*length + 1);
    if (fread(text, 1, *length, file) != *length) {
        fclose(file);
        free(text);
        return NULL;
    }
    text[*length] = '\0';
    fclose(file);
    return text;
}

static RANKS_UNUSED void ckpt_write(const char *path, const void *data, size_t length) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, length, file) != length || fclose(file) != 0) {
        perror(path);
        exit(2);
    }
}

static RANKS_UNUSED int ckpt_shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static RANKS_UNUSED int ckpt_shell(const char *format, ...) {
    char command[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    return system(command);
}

static RANKS_UNUSED int ckpt_exists(const char *path) { return access(path, F_OK) == 0; }

#endif /* DDP_TEST_CHECKPOINTS_H */

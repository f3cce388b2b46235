/*  test_tied_names.c - a checkpoint of another program can have any of the names of a tied weight, or several
    with equal bytes.

    Loading required the name of the first use and rejected every other one. A file with both "wte" and
    "head", or only "head", failed with "is none of the tensors that are loaded" or "is in none of the files".

    test_tied_names BACKEND [W ...]; see support/ranks.h */
#include "ddp_fsdp.h"
#include "../support/ranks.h"

#include <sys/stat.h>

enum { ROWS = 5, COLUMNS = 3, COUNT = ROWS * COLUMNS };

static char folder[64];

static float value_of(int i) { return (float)i * 0.25f - 1; }

/* One file: a header, then tensors tensors, each with the values. wrong: one element of this one differs.
   half: this one is in bf16. -1 = none. */
static void write_file(const char *const *names, int tensors, int wrong, int half) {
    char header[1000] = "{", path[200];
    unsigned char data[8 * COUNT * sizeof(float)], size[8];
    size_t at = 0;
    for (int t = 0; t < tensors; t++) {
        size_t bytes = COUNT * (t == half ? 2 : sizeof(float)), length = strlen(header);
        float values[COUNT];
        for (int i = 0; i < COUNT; i++) values[i] = value_of(i);
        if (t == wrong) values[COUNT - 1] += 1;
        ddp_device_cpu()->cast(data + at, t == half ? DDP_BF16 : DDP_F32, values, DDP_F32, COUNT);
        snprintf(header + length, sizeof header - length,
                 "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}", t ? "," : "",
                 names[t], t == half ? "BF16" : "F32", ROWS, COLUMNS, at, at + bytes);
        at += bytes;
    }
    strcat(header, "}");
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)(strlen(header) >> 8 * i);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *file = fopen(path, "wb");
    size_t written = file ? fwrite(size, 1, 8, file) + fwrite(header, 1, strlen(header), file)
                                + fwrite(data, 1, at, file)
                          : 0;
    if (written != 8 + strlen(header) + at || fclose(file) != 0) {
        perror(path);
        exit(2);
    }
}

static ddp_result fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                       void *user) {
    (void)param, (void)first_row, (void)user;
    for (int64_t i = 0; i < row_count * COLUMNS; i++) ((float *)out)[i] = -9;
    return DDP_OK;
}

/* A matrix with three uses in two units, and a separate parameter. */
static ddp_result create(ddp_group *group, ddp_fsdp_param *params, ddp_fsdp **fsdp, int strategy) {
    static const char *const names[] = {"wte", "head", "other", "again"};
    ddp_fsdp_unit_desc units[2];
    ddp_fsdp_desc desc = DDP_ZERO;
    memset(params, 0, 4 * sizeof *params);
    memset(units, 0, sizeof units);
    for (int i = 0; i < 4; i++) {
        params[i].param.name = names[i];
        params[i].param.value.dtype = DDP_F32;
        params[i].param.value.ndim = 2;
        params[i].param.value.shape[0] = ROWS;
        params[i].param.value.shape[1] = COLUMNS;
        if (i % 2) params[i].tied_to = "wte";
    }
    for (int u = 0; u < 2; u++) {
        units[u].params = &params[2 * u];
        units[u].param_count = 2;
    }
    desc.units = units;
    desc.unit_count = 2;
    desc.init_fn = fill;
    desc.strategy = (ddp_fsdp_strategy)strategy;
    RANKS_OK(group, ddp_fsdp_create(fsdp, group, &desc));
    return DDP_OK;
}

typedef struct trial {
    const char *names[4];
    int tensors, wrong, half;
    const char *words[4];
} trial;

static const trial trials[] = {
    {{"other", "wte"}, 2, -1, -1, {NULL}},
    {{"other", "wte", "head"}, 3, -1, -1, {NULL}},
    {{"other", "head"}, 2, -1, -1, {NULL}},
    {{"other", "again"}, 2, -1, -1, {NULL}},
    {{"head", "other", "again"}, 3, -1, -1, {NULL}},
    {{"wte", "head", "other", "again"}, 4, -1, -1, {NULL}},
    {{"wte", "head", "other"}, 3, 1, -1, {"'head'", "'wte'", "bytes differ", "remove"}},
    {{"head", "other", "again"}, 3, 2, -1, {"'again'", "'wte'", "bytes differ", "remove"}},
    {{"wte", "head", "other"}, 3, -1, 1, {"'head'", "'wte'", "dtypes differ", "remove"}},
    {{"other"}, 1, -1, -1, {"'wte'", "not in the files", NULL, NULL}},
    {{"other", "wte", "tail"}, 3, -1, -1, {"'tail'", "not among the", NULL, NULL}},
};

static ddp_result cases(ddp_group *world, void *user) {
    (void)user;
    for (size_t t = 0; t < sizeof trials / sizeof *trials; t++) {
        const trial *c = &trials[t];
        ddp_fsdp_param params[4];
        ddp_fsdp *fsdp;
        float want;
        if (ddp_rank(world) == 0) write_file(c->names, c->tensors, c->wrong, c->half);
        RANKS_OK(world, ddp_barrier(world));
        RANKS_OK(world, create(world, params, &fsdp, (int)t % 4));
        ddp_result result = ddp_fsdp_load(fsdp, folder);
        RANKS_CHECK(world, c->words[0] ? result == DDP_ERR_MISMATCH : result == DDP_OK, "trial %zu: %s: %s",
                    t, ddp_result_name(result), ddp_last_error());
        for (int k = 0; k < 4 && c->words[k]; k++)
            RANKS_CHECK(world, strstr(ddp_last_error(), c->words[k]), "trial %zu: '%s' is not in: %s", t,
                        c->words[k], ddp_last_error());
        for (int u = 0; u < 2; u++) RANKS_OK(world, ddp_fsdp_unshard(fsdp, u));
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < COUNT; i++) {
                want = c->words[0] ? -9 : value_of(i);
                RANKS_CHECK(world, ((const float *)params[k].param.value.data)[i] == want,
                            "trial %zu: %s[%d] is %g", t, params[k].param.name, i,
                            (double)((const float *)params[k].param.value.data)[i]);
            }
        if (t < 4) { /* a save writes the weight once, under the name of its first use */
            char saved[100];
            snprintf(saved, sizeof saved, "%s/saved", folder);
            RANKS_OK(world, ddp_fsdp_save(fsdp, saved));
            RANKS_OK(world, ddp_fsdp_load(fsdp, saved));
        }
        ddp_fsdp_destroy(fsdp);
        RANKS_OK(world, ddp_barrier(world));
    }
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 3, 0};
    char command[128];
    ranks_mode mode;
    snprintf(folder, sizeof folder, "/tmp/ddp-tied-XXXXXX");
    if (!mkdtemp(folder)) return 2;
    int failed = ranks_each(argc, argv, worlds, 60, &mode, cases) != 0;
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) != 0 || failed;
}

/*  test_not_a_file.c - a FIFO, a symbolic link or a folder in place of a checkpoint's file is an immediate
    error, in a load and in a save.

    Files were opened without a check. A FIFO in place of state.json, an index or a tensor file waited for its
    other end forever, whatever the timeout, and a symbolic link was followed to any target.

    test_not_a_file BACKEND [W ...]; see support/ranks.h */
#include "ddp_fsdp.h"
#include "../support/ranks.h"

#include <sys/stat.h>

static char folder[64];

static void path_in(char out[200], const char *dir, const char *name) {
    snprintf(out, 200, "%s/%s/%s", folder, dir, name);
}

/* The folder `tried`: a copy of the checkpoint, or empty. */
static int start_over(int copy) {
    char command[400];
    snprintf(command, sizeof command, "cd %s && rm -rf tried && %s", folder,
             copy ? "cp -r saved tried" : "mkdir tried");
    return system(command);
}

static ddp_result fill(const ddp_fsdp_param *param, int64_t first_row, int64_t row_count, void *out,
                       void *user) {
    (void)param, (void)user;
    for (int64_t i = 0; i < row_count; i++) ((float *)out)[i] = (float)(first_row + i);
    return DDP_OK;
}

static ddp_result cases(ddp_group *world, void *user) {
    static const char *const files[] = {"state.json", "model.safetensors.index.json",
                                        "optimizer.safetensors.index.json",
                                        "model-00001-of-00001.safetensors"};
    static const char *const kinds[] = {"a FIFO", "a symbolic link", "a folder"};
    ddp_fsdp_param param;
    ddp_fsdp_unit_desc unit = {"unit", &param, 1};
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_fsdp *fsdp;
    char dir[200], file[200], target[200];
    (void)user;
    memset(&param, 0, sizeof param);
    param.param.name = "w";
    param.param.value.dtype = DDP_F32;
    param.param.value.ndim = 1;
    param.param.value.shape[0] = 7;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.init_fn = fill;
    RANKS_OK(world, ddp_fsdp_create(&fsdp, world, &desc));
    snprintf(dir, sizeof dir, "%s/saved", folder);
    RANKS_OK(world, ddp_fsdp_save(fsdp, dir));
    RANKS_OK(world, ddp_fsdp_load(fsdp, dir));
    for (int f = 0; f < 6; f++) /* 4: an index of another program, 5: its only file */
        for (int kind = 0; kind < 3; kind++) {
            const char *name = f < 4 ? files[f] : files[1];
            if (f == 5) name = "model.safetensors";
            if (ddp_rank(world) == 0) {
                RANKS_CHECK(world, start_over(f < 4) == 0, "cp");
                path_in(file, "tried", name);
                snprintf(target, sizeof target, "%s/saved/%s", folder, files[f % 4]);
                if (f < 4) RANKS_CHECK(world, unlink(file) == 0, "unlink %s", file);
                int made = kind == 0 ? mkfifo(file, 0600) : 0;
                if (kind == 1) made = symlink(target, file);
                if (kind == 2) made = mkdir(file, 0700);
                RANKS_CHECK(world, made == 0, "%s", file);
            }
            RANKS_OK(world, ddp_barrier(world));
            snprintf(dir, sizeof dir, "%s/tried", folder);
            ddp_result result = ddp_fsdp_load(fsdp, dir);
            RANKS_CHECK(world, result == DDP_ERR_SYSTEM, "load of %s, %s: %s: %s", name, kinds[kind],
                        ddp_result_name(result), ddp_last_error());
            RANKS_CHECK(world, strstr(ddp_last_error(), name) && strstr(ddp_last_error(), kinds[kind]),
                        "%s as %s: %s", name, kinds[kind], ddp_last_error());
            if (f == 0) { /* the folder that the save would replace is not recognised as a checkpoint */
                result = ddp_fsdp_save(fsdp, dir);
                RANKS_CHECK(world, result == DDP_ERR_INVALID, "save over %s: %s: %s", kinds[kind],
                            ddp_result_name(result), ddp_last_error());
            }
            RANKS_OK(world, ddp_barrier(world));
        }
    ddp_fsdp_destroy(fsdp);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int worlds[] = {1, 2, 0};
    char command[128];
    ranks_mode mode;
    snprintf(folder, sizeof folder, "/tmp/ddp-files-XXXXXX");
    if (!mkdtemp(folder)) return 2;
    int failed = ranks_each(argc, argv, worlds, 60, &mode, cases) != 0;
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) != 0 || failed;
}

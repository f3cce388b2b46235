/*  launcher.h - what a program does differently when torchrun, mpirun or srun has started it, and where the
    notices of ddp.h go. */
#ifndef DDP_EXAMPLE_LAUNCHER_H
#define DDP_EXAMPLE_LAUNCHER_H

#include <stdio.h>
#include <stdlib.h>

/* For desc.world_size: the number that the user asked for; without one, `otherwise`, or 0 when a launcher has
   already started the ranks. */
static inline int ranks_to_start(int asked, int otherwise) {
    static const char *const variables[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                            "SLURM_STEP_ID"};
    for (int i = 0; i < 4 && !asked; i++) {
        const char *value = getenv(variables[i]);
        if (value && value[0]) return 0;
    }
    return asked ? asked : otherwise;
}

/* For desc.group.log_fn: ranks that are waited for, a fallback that was taken. */
static inline void print_notice(const char *text, void *user) {
    (void)user;
    fprintf(stderr, "%s\n", text);
}

#endif /* DDP_EXAMPLE_LAUNCHER_H */

/* MIT License: see LICENSE. */

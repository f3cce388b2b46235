/*  launcher.h - for examples: how many ranks ddp_launch starts, and a log function

    Under torchrun, mpirun or srun the ranks are running already. Otherwise the example starts its own. */
#ifndef DDP_EXAMPLE_LAUNCHER_H
#define DDP_EXAMPLE_LAUNCHER_H

#include <stdio.h>
#include <stdlib.h>

/* For ddp_launch_desc.world_size: `requested` if it is not 0; otherwise 0 under a launcher, which has started
   the ranks; otherwise `fallback`. */
static inline int ranks_to_start(int requested, int fallback) {
    static const char *const variables[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                            "SLURM_STEP_ID"};
    for (int i = 0; i < 4 && !requested; i++) {
        const char *value = getenv(variables[i]);
        if (value && value[0]) return 0;
    }
    return requested ? requested : fallback;
}

/* For desc.group.log_fn. Messages are, for example, that the rendezvous waits for a rank. */
static inline void print_notice(const char *text, void *user) {
    (void)user;
    fprintf(stderr, "%s\n", text);
}

#endif /* DDP_EXAMPLE_LAUNCHER_H */

/* MIT License: see LICENSE. */

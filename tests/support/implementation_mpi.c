/*  implementation_mpi.c - the bodies of ddp.h for tests under mpirun. DDP_TEST_BLOCK ranks in a row, if it is set, are as if on a machine of their
    own. What takes several chunks and pieces is small enough for a test. */
#include <stdlib.h>

static int pretended_machine(void) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *block = getenv("DDP_TEST_BLOCK");
    return rank && block ? 1 + atoi(rank) / atoi(block) : 0;
}

#define DDP__MACHINE_SALT pretended_machine()
#define DDP__MPI_CHUNK_BYTES ((size_t)65536)
#define DDP__MPI_PIECE_BYTES ((size_t)300000)
#define DDP_IMPLEMENTATION
#include "ddp.h"

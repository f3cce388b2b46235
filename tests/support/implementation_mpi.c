/*  implementation_mpi.c - the bodies of ddp.h and ddp_fsdp.h for tests under mpirun. What takes several chunks and pieces is small enough for a test. */
#include "machines.h"
#define DDP__MPI_CHUNK_BYTES ((size_t)65536)
#define DDP__MPI_PIECE_BYTES ((size_t)300000)
#define DDP_IMPLEMENTATION
#include "ddp_fsdp.h"

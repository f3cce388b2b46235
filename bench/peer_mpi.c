/*  peer_mpi.c - the operations of bench.h with MPI. One source, compiled once per MPI library. Started by
    run.sh.

    mpicc -O3 -march=native peer_mpi.c && mpirun -n 2 ./a.out --share FILE --plan full ...
*/
#define _GNU_SOURCE
#include "bench.h"

#include <mpi.h>

typedef struct mpi_user {
    int rank, rank_count;
    float *data, *out;
} mpi_user;

static int mpi_supports(void *user, const bench_cell *cell, int kind) {
    (void)user;
    (void)kind;
    return cell->op != BENCH_COPY;
}

/* One send_recv is one way. Successive calls alternate in direction. Both ends measure the time. */
static int mpi_send_recv(mpi_user *u, int count, int calls) {
    int result = 0, peer = 1 - u->rank;
    for (int i = 0; i < calls && result == 0; i++) {
        result = (i & 1) == u->rank
                     ? MPI_Send(u->data, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD)
                     : MPI_Recv(u->data, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    return result;
}

static int mpi_run(void *user, const bench_cell *cell, int kind, int calls) {
    mpi_user *u = (mpi_user *)user;
    int count = (int)(cell->bytes / sizeof(float)), block = count / u->rank_count, result = 0;
    (void)kind;
    switch (cell->op) {
    case BENCH_ALL_REDUCE:
        for (int i = 0; i < calls; i++)
            result |= MPI_Allreduce(MPI_IN_PLACE, u->data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        return result;
    case BENCH_REDUCE_SCATTER:
        for (int i = 0; i < calls; i++)
            result |= MPI_Reduce_scatter_block(u->data, u->out, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        return result;
    case BENCH_REDUCE_SCATTER_IN_PLACE:
        for (int i = 0; i < calls; i++)
            result |= MPI_Reduce_scatter_block(MPI_IN_PLACE, u->data, block, MPI_FLOAT, MPI_SUM,
                                               MPI_COMM_WORLD);
        return result;
    case BENCH_ALL_GATHER:
        for (int i = 0; i < calls; i++)
            result |= MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, u->data, block, MPI_FLOAT, MPI_COMM_WORLD);
        return result;
    case BENCH_BROADCAST:
        for (int i = 0; i < calls; i++) result |= MPI_Bcast(u->data, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        return result;
    case BENCH_SEND_RECV: return mpi_send_recv(u, count, calls);
    case BENCH_BARRIER:
        for (int i = 0; i < calls; i++) result |= MPI_Barrier(MPI_COMM_WORLD);
        return result;
    default: return 1;
    }
}

int main(int argc, char **argv) {
    bench b;
    bench_driver d;
    mpi_user u;
    if (MPI_Init(&argc, &argv) != MPI_SUCCESS) return 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &u.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &u.rank_count);
    bench_arguments(&b, argc, argv);
    if (u.rank_count != b.rank_count) {
        fprintf(stderr, "bench: mpirun started %d ranks instead of %d\n", u.rank_count, b.rank_count);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    if (b.cell_count > 0) {
        bench_join(&b, u.rank);
        memset(&d, 0, sizeof d);
        d.user = &u;
        d.kind_count = 1;
        d.supports = mpi_supports;
        d.run = mpi_run;
        d.in_place_at_start = 1;
        d.data[0] = u.data = bench_private(&b, bench_largest(&b));
        d.out[0] = u.out = bench_private(&b, bench_largest(&b));
        bench_run(&b, &d);
    }
    MPI_Finalize();
    return 0;
}

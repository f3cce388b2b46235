/*  bench_mpi.c - cost of ddp over Open MPI: all_reduce of f32, four methods in turn in the same processes.

    mpicc -O3 -march=native bench_mpi.c -o bench_mpi -lpthread -lm
    mpirun -n 2 ./bench_mpi          one machine: the local backend, in both orders, and MPI
    mpirun -n 2 ./bench_mpi 1        each rank on an emulated machine of its own: the tree, flat
    mpirun -n 4 ./bench_mpi 2        two ranks per emulated machine: the tree, hierarchical

    Emulated machines communicate through shared memory, as fast as MPI does within a machine. On a network
    all variants would differ less. The buffer is rewritten before every call. Up to 64 KiB, 50 calls are
    timed together. Figures are medians over turns of the slowest rank. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <mpi.h>

static int ranks_of_a_machine; /* 0 = no emulation */
static int machine_of_this_rank(void) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    return ranks_of_a_machine && rank ? 1 + atoi(rank) / ranks_of_a_machine : 0;
}
#define DDP__MACHINE_SALT machine_of_this_rank()
#define DDP_USE_MPI
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "median.h"

enum { BLOCKING, STARTED, ANY, TREE, FINGERPRINT, METHODS, TURNS = 60 };
static const char *const names[] = {"MPI_Allreduce", "MPI_Iallreduce + MPI_Test", "DDP_ORDER_ANY",
                                    "DDP_ORDER_TREE", "MPI_Iallreduce of 16 bytes"};
static ddp_group *groups[METHODS];

static void check(ddp_result result) {
    if (result == DDP_OK) return;
    fprintf(stderr, "%s\n", ddp_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void start_and_test(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op) {
    MPI_Request request;
    int done = 0;
    MPI_Iallreduce(send, recv, count, type, op, MPI_COMM_WORLD, &request);
    while (!done) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
}

static void call(int method, float *data, size_t count) {
    static uint64_t word[2], most[2];
    if (method == BLOCKING)
        MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (method == STARTED)
        start_and_test(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM);
    else if (method == FINGERPRINT)
        start_and_test(word, most, 2, MPI_UINT64_T, MPI_MAX);
    else
        check(ddp_all_reduce(groups[method], data, data, count, DDP_F32, DDP_OP_SUM, NULL));
}

static void measure(float *data, size_t size_bytes, int rank) {
    static double us[METHODS][TURNS];
    size_t count = size_bytes / sizeof *data;
    int calls = size_bytes <= 65536 ? 50 : 1;
    for (int turn = -2; turn < TURNS; turn++)
        for (int method = 0; method < METHODS; method++) {
            double start, own_us, slowest;
            for (size_t i = 0; i < count; i++) data[i] = (float)(i & 7) + (float)rank;
            MPI_Barrier(MPI_COMM_WORLD);
            start = MPI_Wtime();
            for (int i = 0; i < calls; i++) call(method, data, count);
            own_us = (MPI_Wtime() - start) * 1e6 / calls;
            MPI_Allreduce(&own_us, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (turn >= 0) us[method][turn] = slowest;
        }
    if (rank != 0) return;
    printf("| %zu KiB |", size_bytes / 1024);
    for (int method = 0; method < METHODS; method++) printf(" %.3g |", median(us[method], TURNS));
    printf(" %.2f |\n", median(us[TREE], TURNS) / median(us[BLOCKING], TURNS));
    fflush(stdout);
}

int main(int argc, char **argv) {
    static const size_t sizes[] = {1024, 65536, 1 << 20, 25 << 20};
    ddp_group_desc desc = DDP_ZERO;
    float *data = (float *)malloc(sizes[3]);
    int rank, size, provided;
    if (argc > 1) ranks_of_a_machine = atoi(argv[1]);
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    desc.order = DDP_ORDER_ANY;
    check(ddp_group_from_mpi(&groups[ANY], MPI_COMM_WORLD, &desc));
    desc.order = DDP_ORDER_TREE;
    check(ddp_group_from_mpi(&groups[TREE], MPI_COMM_WORLD, &desc));
    if (rank == 0) {
        printf("%d ranks, %s. Microseconds.\n\n| size |", size,
               !ranks_of_a_machine       ? "one machine"
               : ranks_of_a_machine == 1 ? "one emulated machine per rank"
                                         : "on emulated machines");
        for (int method = 0; method < METHODS; method++) printf(" %s |", names[method]);
        printf(" tree / MPI_Allreduce |\n|---|---|---|---|---|---|---|\n");
    }
    for (int i = 0; i < 4; i++) measure(data, sizes[i], rank);
    ddp_group_destroy(groups[TREE]);
    ddp_group_destroy(groups[ANY]);
    free(data);
    MPI_Finalize();
    return 0;
}

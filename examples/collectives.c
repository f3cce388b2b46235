/*  collectives.c - every collective once, on small vectors: a table shows what each rank gets

        cc -O3 -march=native examples/collectives.c -o collectives -lm -lpthread
        ./collectives                   4 ranks
        ./collectives 2                 2 ranks, up to 8
        mpirun --oversubscribe -n 4 ./collectives 4     the ranks of a launcher

    Element i of rank r's vector is 10 r + i. The program compares every result with a plain formula. Then it
    shows asynchronous calls, messages, groups of some ranks, and what a failure of a group looks like.

    A program that already uses MPI makes a group from its communicator:
        mpicc -O3 -march=native -DDDP_USE_MPI examples/collectives.c -o collectives -lm -lpthread
        mpirun --oversubscribe -n 4 ./collectives */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 8, MAX = 2 * MAX_RANKS };

typedef struct row {
    int count, values[MAX];
} row;

/* Compares the result of this rank with the expected one. Rank 0 gathers and prints the results of all. */
static ddp_result show(ddp_group *world, const char *name, const int *result, const int *expected,
                       int count) {
    row mine = {.count = count}, all[MAX_RANKS];
    memcpy(mine.values, result, (size_t)count * sizeof(int));
    for (int i = 0; i < count; i++)
        if (result[i] != expected[i])
            return ddp_fail(DDP_ERR_CORRUPT, "%s: element %d on rank %d is %d, not %d", name, i,
                            ddp_rank(world), result[i], expected[i]);
    DDP_TRY(ddp_gather(world, &mine, all, sizeof mine / sizeof(int), DDP_I32, 0, NULL));
    if (ddp_rank(world) != 0) return DDP_OK;
    printf("%-15s", name);
    for (int r = 0; r < ddp_world_size(world); r++) {
        int width = 0;
        for (int i = 0; i < all[r].count; i++) width += printf(" %d", all[r].values[i]);
        printf("%*s |", width < 17 ? 17 - width : 0, "");
    }
    printf("\n");
    return DDP_OK;
}

/* Collectives in which every rank sends or receives the same number of elements. */
static ddp_result equal_counts(ddp_group *world) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world), sum = 10 * ranks * (ranks - 1) / 2;
    int send[MAX], out[MAX], expected[MAX];
    for (int i = 0; i < MAX; i++) send[i] = 10 * rank + i;
    DDP_TRY(show(world, "send", send, send, ranks));

    DDP_TRY(ddp_all_reduce(world, send, out, 2, DDP_I32, DDP_OP_SUM, NULL));
    DDP_TRY(show(world, "all_reduce SUM", out, (int[]){sum, sum + ranks}, 2));
    DDP_TRY(ddp_all_reduce(world, send, out, 2, DDP_I32, DDP_OP_MAX, NULL));
    DDP_TRY(show(world, "all_reduce MAX", out, (int[]){10 * (ranks - 1), 10 * (ranks - 1) + 1}, 2));
    DDP_TRY(ddp_reduce(world, send, out, 2, DDP_I32, DDP_OP_MIN, 0, NULL)); /* only rank 0 receives */
    DDP_TRY(show(world, "reduce MIN", out, (int[]){0, 1}, rank == 0 ? 2 : 0));

    memcpy(out, send, sizeof out);
    DDP_TRY(ddp_broadcast(world, out, 2, DDP_I32, ranks - 1, NULL)); /* from the last rank */
    DDP_TRY(show(world, "broadcast", out, (int[]){10 * (ranks - 1), 10 * (ranks - 1) + 1}, 2));

    for (int r = 0; r < ranks; r++) expected[r] = 10 * r;
    DDP_TRY(ddp_all_gather(world, send, out, 1, DDP_I32, NULL));
    DDP_TRY(show(world, "all_gather", out, expected, ranks));
    DDP_TRY(ddp_gather(world, send, out, 1, DDP_I32, 0, NULL));
    DDP_TRY(show(world, "gather", out, expected, rank == 0 ? ranks : 0));

    DDP_TRY(ddp_scatter(world, send, out, 1, DDP_I32, 0, NULL)); /* element r of rank 0 */
    DDP_TRY(show(world, "scatter", out, &rank, 1));
    DDP_TRY(ddp_reduce_scatter(world, send, out, 1, DDP_I32, DDP_OP_SUM, NULL));
    DDP_TRY(show(world, "reduce_scatter", out, (int[]){sum + ranks * rank}, 1));

    for (int r = 0; r < ranks; r++) expected[r] = 10 * r + rank;
    DDP_TRY(ddp_all_to_all(world, send, out, 1, DDP_I32, NULL)); /* element j goes to rank j */
    return show(world, "all_to_all", out, expected, ranks);
}

/* Ranks send different numbers of elements: ranks with even numbers 1, the others 2. */
static ddp_result different_counts(ddp_group *world) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world), count = 0;
    int send[MAX], out[MAX], expected[MAX];
    size_t send_counts[MAX_RANKS], recv_counts[MAX_RANKS];
    for (int i = 0; i < MAX; i++) send[i] = 10 * rank + i;

    for (int r = 0; r < ranks; r++) {
        recv_counts[r] = r % 2 ? 2 : 1;
        for (int i = 0; i < 1 + r % 2; i++) expected[count++] = 10 * r + i;
    }
    DDP_TRY(ddp_all_gather_v(world, send, recv_counts[rank], out, recv_counts, NULL, DDP_I32, NULL));
    DDP_TRY(show(world, "all_gather_v", out, expected, count));

    for (int r = 0; r < ranks; r++) send_counts[r] = recv_counts[rank]; /* the same number to every rank */
    count = 0;
    for (int r = 0; r < ranks; r++) /* packed: rank r's elements for this rank start at rank * its count */
        for (int i = 0; i < 1 + r % 2; i++) expected[count++] = 10 * r + rank * (1 + r % 2) + i;
    DDP_TRY(ddp_all_to_all_v(world, send, send_counts, NULL, out, recv_counts, NULL, DDP_I32, NULL));
    return show(world, "all_to_all_v", out, expected, count);
}

/* With a ddp_work, a call returns at once. Its buffers may be used again after ddp_wait. */
static ddp_result asynchronous(ddp_group *world) {
    enum { COUNT = 100000 };
    static int data[COUNT];
    int ranks = ddp_world_size(world), done = 0;
    ddp_work work;
    for (int i = 0; i < COUNT; i++) data[i] = 1;
    DDP_TRY(ddp_all_reduce(world, data, data, COUNT, DDP_I32, DDP_OP_SUM, &work));
    while (!done) DDP_TRY(ddp_test(world, &work, &done)); /* the place for other work */
    DDP_TRY(ddp_wait(world, &work));                      /* does not block, because done is 1 */
    return show(world, "asynchronous", &data[COUNT - 1], &ranks, 1);
}

/* Every rank sends to the next one. In a batch, the order of sends and receives does not matter. */
static ddp_result messages(ddp_group *world) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world);
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks, out;
    if (ranks == 1) return DDP_OK; /* a rank sends only to other ranks */
    DDP_TRY(ddp_p2p_begin(world));
    DDP_TRY(ddp_send(world, &rank, 1, DDP_I32, next, 0, NULL));
    DDP_TRY(ddp_recv(world, &out, 1, DDP_I32, previous, 0, NULL));
    DDP_TRY(ddp_p2p_end(world));
    return show(world, "send and recv", &out, &previous, 1);
}

/* A library that does not get the world can create a group of the same ranks. Ranks with even and with odd
   numbers also form a group each. Its rank 0 then aborts it: all calls of its ranks fail with one cause, and
   the world continues. */
static ddp_result groups(ddp_group *world) {
    int rank = ddp_rank(world), ranks = ddp_world_size(world), sum = 0, out;
    ddp_group *library, *half;
    DDP_TRY(ddp_group_create(&library, NULL));
    DDP_TRY(ddp_all_reduce(library, &rank, &out, 1, DDP_I32, DDP_OP_MAX, NULL));
    DDP_TRY(show(world, "second group", &out, (int[]){ranks - 1}, 1));
    ddp_group_destroy(library);

    DDP_TRY(ddp_group_split(world, rank % 2, rank, &half));
    for (int r = rank % 2; r < ranks; r += 2) sum += r;
    DDP_TRY(ddp_all_reduce(half, &rank, &out, 1, DDP_I32, DDP_OP_SUM, NULL));
    DDP_TRY(show(world, "sum over half", &out, &sum, 1));

    if (ddp_rank(half) == 0) DDP_TRY(ddp_group_abort(half));
    ddp_result failure = ddp_barrier(half);
    if (failure == DDP_OK || ddp_group_status(half) == DDP_OK || ddp_group_status(world) != DDP_OK)
        return ddp_fail(DDP_ERR_CORRUPT, "rank %d: an abort must fail its group, and no other", rank);
    if (rank == 0) printf("after an abort: %s, %s\n", ddp_result_name(failure), ddp_last_error());
    ddp_group_destroy(half);
    return ddp_barrier(world);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world);
    (void)user;
    if (ranks > MAX_RANKS) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1 to %d", ranks, MAX_RANKS);
    if (ddp_rank(world) == 0) {
        printf("%d ranks, rank 0 is rank %d of %d on its machine\n%-15s", ranks, ddp_local_rank(world),
               ddp_local_world_size(world), "");
        for (int r = 0; r < ranks; r++) printf(" rank %-12d|", r);
        printf("\n");
    }
    DDP_TRY(equal_counts(world));
    DDP_TRY(different_counts(world));
    DDP_TRY(asynchronous(world));
    DDP_TRY(messages(world));
    return groups(world);
}

#if defined(DDP_USE_MPI)
int main(int argc, char **argv) {
    ddp_group *world;
    MPI_Init(&argc, &argv);
    ddp_result result = ddp_group_from_mpi(&world, MPI_COMM_WORLD, NULL);
    if (result == DDP_OK) result = rank_main(world, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    ddp_group_destroy(world);
    MPI_Finalize();
    return result != DDP_OK;
}
#else
int main(int argc, char **argv) {
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 4};
    ddp_result result = DDP_OK;
    if (argc > 2 || desc.world_size < 1) result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, NULL);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}
#endif

/* MIT License: see LICENSE. */

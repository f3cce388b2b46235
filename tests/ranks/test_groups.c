/*  test_groups.c - splitting, group memory, asynchronous work, batches of tasks, status and abort.

    test_groups BACKEND [W ...]     one of support/ranks.h */
#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"

#include <pthread.h>

/* Checks the sum of member numbers over a group, and that all ranks agree on it. */
static ddp_result sum_is(ddp_group *g, int64_t mine, int64_t want, const char *what) {
    int64_t sum = -1;
    RANKS_OK(g, ddp_all_reduce(g, &mine, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
    RANKS_CHECK(g, sum == want, "%s: sum %lld, wanted %lld", what, (long long)sum, (long long)want);
    return DDP_OK;
}

#define SUM_IS(g, mine, want, what)                                  \
    do {                                                             \
        ddp_result sum_result = sum_is((g), (mine), (want), (what)); \
        if (sum_result != DDP_OK) return sum_result;                 \
    } while (0)

/* Every rank reports its world rank; the group must list them in this order. */
static ddp_result members_are(ddp_group *g, int world_rank, const int *want, int count, const char *what) {
    int have[DDP_MAX_LOCAL_RANKS];
    RANKS_CHECK(g, ddp_world_size(g) == count, "%s: size %d, wanted %d", what, ddp_world_size(g), count);
    RANKS_CHECK(g, ddp_rank(g) < count && want[ddp_rank(g)] == world_rank, "%s: world rank %d has rank %d",
                what, world_rank, ddp_rank(g));
    RANKS_CHECK(
        g, ddp_local_rank(g) <= ddp_rank(g) && (ddp_local_world_size(g) == count || ranks_per_machine() < 64),
        "%s: local rank %d/%d", what, ddp_local_rank(g), ddp_local_world_size(g));
    RANKS_OK(g, ddp_all_gather(g, &world_rank, have, 1, DDP_I32, NULL));
    for (int i = 0; i < count; i++)
        RANKS_CHECK(g, have[i] == want[i], "%s: rank %d is world rank %d, wanted %d", what, i, have[i],
                    want[i]);
    return DDP_OK;
}

static ddp_result splits(ddp_group *world) {
    int rank = ddp_rank(world), w = ddp_world_size(world);
    /* colour and key of a rank, by method */
    static const char *const names[] = {"parity",     "one each",     "all, keys reversed",
                                        "equal keys", "some in none", "blocks, odd keys",
                                        "key INT_MIN"};
    for (int method = 0; method < 7; method++) {
        int color[DDP_MAX_LOCAL_RANKS] = {0}, key[DDP_MAX_LOCAL_RANKS] = {0}, want[DDP_MAX_LOCAL_RANKS],
            count = 0;
        ddp_group *child = NULL;
        ddp_result result = DDP_OK;
        for (int r = 0; r < w; r++) {
            switch (method) {
            case 0: color[r] = r % 2, key[r] = 0; break;
            case 1: color[r] = 1000000 * r, key[r] = r; break;
            case 2: color[r] = 5, key[r] = -r; break;
            case 3: color[r] = 0, key[r] = 42; break;
            case 4: color[r] = r % 3 == 1 ? -1 - r : 0, key[r] = r; break;
            case 5: color[r] = r / 2, key[r] = r % 2 ? -1 : 1; break;
            default: color[r] = 2147483647, key[r] = r == w - 1 ? -2147483647 - 1 : 2147483647; break;
            }
        }
        for (int r = 0; r < w; r++) { /* insertion by (key, rank) */
            int at;
            if (color[r] != color[rank]) continue;
            for (at = count++; at > 0 && key[want[at - 1]] > key[r]; at--) want[at] = want[at - 1];
            want[at] = r;
        }
        RANKS_OK(world, ddp_group_split(world, color[rank], key[rank], &child));
        RANKS_CHECK(world, (child == NULL) == (color[rank] < 0),
                    "%s: a negative colour, and only that, gives no group", names[method]);
        if (child) result = members_are(child, rank, want, count, names[method]);
        if (result != DDP_OK) return result;
        SUM_IS(world, 1, w, "parent after split");
        ddp_group_destroy(child);
    }
    return DDP_OK;
}

/* Splits of splits, with interleaved calls on all levels; descendants use the memory of each group. */
static ddp_result nested(ddp_group *world) {
    int rank = ddp_rank(world), w = ddp_world_size(world), depth = 1;
    ddp_group *levels[8];
    void *memory[8];
    levels[0] = world;
    RANKS_OK(world, ddp_group_alloc(world, 4096, &memory[0]));
    while (depth < 8 && ddp_world_size(levels[depth - 1]) > 1) { /* halves: [0, n/2) and the rest */
        ddp_group *up = levels[depth - 1];
        RANKS_OK(up, ddp_group_split(up, ddp_rank(up) >= ddp_world_size(up) / 2, 0, &levels[depth]));
        RANKS_OK(levels[depth], ddp_group_alloc(levels[depth], 4096, &memory[depth]));
        depth++;
    }
    for (int round = 0; round < 50; round++)
        for (int i = 0; i < depth; i++) {
            int level = round % 2 ? i : depth - 1 - i;
            int64_t *cell = (int64_t *)memory[level / 2] + level; /* memory of an ancestor, or its own */
            *cell = rank + round;
            RANKS_OK(levels[level], ddp_all_reduce(levels[level], cell, cell, 1, DDP_I64, DDP_OP_MAX, NULL));
            if (level == 0)
                RANKS_CHECK(world, *cell == w - 1 + round, "round %d: max over the world is %lld", round,
                            (long long)*cell);
            RANKS_CHECK(world, *cell >= rank + round && *cell < w + round, "round %d level %d: max is %lld",
                        round, level, (long long)*cell);
        }
    while (depth-- > 0) {
        /* The others are left for the destroy of the world. */
        if (depth % 2) RANKS_OK(levels[depth], ddp_group_free(levels[depth], memory[depth]));
        if (depth == 0) RANKS_OK(levels[0], ddp_group_free(levels[0], memory[0]));
        if (depth > 0) ddp_group_destroy(levels[depth]);
    }
    return DDP_OK;
}

/* Rank r of the grandchild is rank r + 1 of the child and rank r + 2 of the world. ddp_group_peer translates
   it. */
static ddp_result grandchildren(ddp_group *world) {
    int rank = ddp_rank(world);
    ddp_group *child = NULL, *grandchild = NULL;
    void *memory;
    if (ddp_world_size(world) < 4) return DDP_OK;
    RANKS_OK(world, ddp_group_alloc(world, sizeof rank, &memory));
    memcpy(memory, &rank, sizeof rank);
    RANKS_OK(world, ddp_group_split(world, rank > 0 ? 0 : -1, 0, &child));
    if (child) RANKS_OK(child, ddp_group_split(child, rank > 1 ? 0 : -1, 0, &grandchild));
    for (int r = 0; grandchild && r < ddp_world_size(grandchild); r++) {
        const int *theirs = (const int *)ddp_group_peer(grandchild, memory, r);
        RANKS_CHECK(world, !theirs || *theirs == r + 2, "rank %d has the memory of rank %d", r, *theirs);
    }
    ddp_group_destroy(grandchild);
    ddp_group_destroy(child);
    return ddp_group_free(world, memory);
}

/* Calls on different groups can be in flight together, in whatever order ranks wait. */
static ddp_result many_groups_at_once(ddp_group *world) {
    int rank = ddp_rank(world), w = ddp_world_size(world);
    enum { COUNT = 16000 }; /* 64 KB, the maximum of every backend */
    float *data[3];
    ddp_group *groups[3];
    ddp_work works[3];
    memset(works, 0, sizeof works);
    groups[0] = world;
    RANKS_OK(world, ddp_group_split(world, rank % 2, 0, &groups[1]));
    RANKS_OK(world, ddp_group_split(world, 0, -rank, &groups[2]));
    for (int i = 0; i < 3; i++) data[i] = (float *)malloc(COUNT * sizeof(float));
    for (int round = 0; round < 20; round++) {
        int order[3] = {round % 3, (round + 1) % 3, (round + 2) % 3};
        for (int i = 0; i < 3; i++)
            for (int k = 0; k < COUNT; k++) data[i][k] = (float)(rank + 1);
        /* Odd and even ranks issue in opposite order across groups: valid, since the order counts per
           group. */
        for (int i = 0; i < 3; i++)
            RANKS_OK(world,
                     ddp_all_reduce(groups[order[rank % 2 ? i : 2 - i]], data[order[rank % 2 ? i : 2 - i]],
                                    data[order[rank % 2 ? i : 2 - i]], COUNT, DDP_F32, DDP_OP_SUM,
                                    &works[order[rank % 2 ? i : 2 - i]]));
        for (int i = 0; i < 3; i++) RANKS_OK(world, ddp_wait(groups[order[i]], &works[order[i]]));
        for (int i = 0; i < 3; i++) {
            int want = 0;
            for (int r = 0; r < w; r++) want += i == 1 && r % 2 != rank % 2 ? 0 : r + 1;
            for (int k = 0; k < COUNT; k += 997)
                RANKS_CHECK(world, data[i][k] == (float)want, "round %d group %d: %g, wanted %d", round, i,
                            (double)data[i][k], want);
        }
    }
    for (int i = 0; i < 3; i++) free(data[i]);
    ddp_group_destroy(groups[2]);
    ddp_group_destroy(groups[1]);
    return DDP_OK;
}

static int count_lines(const char *path) {
    FILE *file = fopen(path, "r");
    int lines = 0, c;
    while (file && (c = getc(file)) != EOF) lines += c == '\n';
    if (file) fclose(file);
    return lines;
}

static ddp_result memory(ddp_group *world) {
    static const size_t sizes[] = {1, 63, 64, 65, 4096, 100000, 1048577, (size_t)9 << 20};
    int rank = ddp_rank(world), w = ddp_world_size(world), lines[2] = {0, 0};
    void *out = &out;
    RANKS_CHECK(world, ddp_group_alloc(world, 0, &out) == DDP_ERR_INVALID && out == NULL,
                "zero bytes give %p", out);
    RANKS_CHECK(world, ddp_group_alloc(world, 1, NULL) == DDP_ERR_INVALID, "out is NULL");
    RANKS_OK(world, ddp_group_free(world, NULL));
    /* Dirty memory is zeroed when it is allocated again, and mappings do not accumulate. */
    for (int round = 0; round < 60; round++) {
        void *blocks[8];
        for (int i = 0; i < 8; i++) {
            unsigned char *b;
            RANKS_OK(world, ddp_group_alloc(world, sizes[(i + round) % 8], &blocks[i]));
            b = (unsigned char *)blocks[i];
            RANKS_CHECK(world, (uintptr_t)b % 64 == 0, "alignment of %p", blocks[i]);
            for (size_t k = 0; k < sizes[(i + round) % 8]; k += 1 + (k > 4096) * 509)
                RANKS_CHECK(world, b[k] == 0, "round %d: byte %zu of %zu is %d", round, k,
                            sizes[(i + round) % 8], b[k]);
            b[sizes[(i + round) % 8] - 1] = 0;
            memset(b, 0xdd, sizes[(i + round) % 8] < 200000 ? sizes[(i + round) % 8] : 200000);
        }
        for (int i = 0; i < 8; i++) RANKS_OK(world, ddp_group_free(world, blocks[(i * 3 + round) % 8]));
        if (round == 9) lines[0] = count_lines("/proc/self/maps");
        if (round == 59) lines[1] = count_lines("/proc/self/maps");
    }
    RANKS_CHECK(world, lines[1] <= lines[0] + 8 * w, "/proc/self/maps grew from %d to %d lines", lines[0],
                lines[1]);
    { /* blocks do not overlap, within and between ranks, and count as group memory at an offset */
        float *a, *b;
        void *pa, *pb;
        enum { MANY = 69000 };
        RANKS_OK(world, ddp_group_alloc(world, 70000 * sizeof(float), &pa));
        RANKS_OK(world, ddp_group_alloc(world, 70000 * sizeof(float), &pb));
        a = (float *)pa + 3;
        b = (float *)pb + 5;
        for (int i = 0; i < MANY; i++) a[i] = (float)(rank + i), b[i] = -1;
        RANKS_OK(world, ddp_all_reduce(world, a, b, MANY, DDP_F32, DDP_OP_MAX, NULL));
        for (int i = 0; i < MANY; i++)
            RANKS_CHECK(world, a[i] == (float)(rank + i) && b[i] == (float)(w - 1 + i), "element %d: %g %g",
                        i, (double)a[i], (double)b[i]);
        RANKS_CHECK(world, ddp_group_free(world, a) == DDP_ERR_INVALID,
                    "a pointer into the middle was freed");
        RANKS_OK(world, ddp_group_free(world, pb));
        RANKS_OK(world, ddp_group_free(world, pa));
    }
    RANKS_CHECK(world, ddp_group_free(world, &rank) == DDP_ERR_INVALID, "a pointer from elsewhere was freed");
    if (w > 1) { /* ranks that free different blocks free none: both are still there */
        void *blocks[2];
        for (int i = 0; i < 2; i++) RANKS_OK(world, ddp_group_alloc(world, 4096, &blocks[i]));
        RANKS_CHECK(world, ddp_group_free(world, blocks[rank == w - 1]) == DDP_ERR_MISMATCH, "%s",
                    ddp_last_error());
        for (int i = 0; i < 2; i++) RANKS_OK(world, ddp_group_free(world, blocks[i]));
    }
    RANKS_OK(world, ddp_group_status(world));
    return DDP_OK;
}

/* Ranks signal their progress in words: data written before a signal is visible after the wait for it, also
   next to asynchronous collectives. A rank that proceeds without a signal is detected. */
static ddp_result words(ddp_group *world) {
    enum { ROUNDS = 200, DONE = 8, DATA = 16 };
    int rank = ddp_rank(world), w = ddp_world_size(world);
    ddp_group *child;
    void *memory;
    uint64_t *mine;
    int64_t one = 1, sum = 0;
    ddp_work work = DDP_ZERO;
    char text[64];
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    RANKS_OK(child, ddp_group_alloc(child, 17 * sizeof *mine, &memory));
    mine = (uint64_t *)memory;
    for (int r = 0; r < w; r++) /* The same on all ranks. */
        if (!ddp_group_peer(child, mine, r)) {
            ddp_group_destroy(child);
            return DDP_OK;
        }
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        RANKS_OK(child, ddp_group_wait_signal(child, mine + DONE, round - 1));
        mine[DATA] = round * 100 + (uint64_t)rank;
        ddp_group_signal(child, mine, round);
        if (round % 50 == 0)
            RANKS_OK(child, ddp_all_reduce(child, &one, &sum, 1, DDP_I64, DDP_OP_SUM, &work));
        if (ranks_mix(round * 64 + (uint64_t)rank) % 16 == 0) ranks_sleep_us(100);
        RANKS_OK(child, ddp_group_wait_signal(child, mine, round));
        for (int r = 0; r < w; r++) {
            const uint64_t *theirs = (const uint64_t *)ddp_group_peer(child, mine, r);
            RANKS_CHECK(world, theirs[DATA] == round * 100 + (uint64_t)r, "round %d: rank %d has %d",
                        (int)round, r, (int)theirs[DATA]);
        }
        ddp_group_signal(child, mine + DONE, round);
        if (round % 50 == 0) RANKS_OK(child, ddp_wait(child, &work));
    }
    RANKS_CHECK(world, sum == w, "sum %lld", (long long)sum);
    /* Odd ranks signal and enter the next collective at once. That is no mismatch. */
    if (rank == w - 1) ranks_sleep_us(30000);
    ddp_group_signal(child, mine, ROUNDS + 1);
    if (rank % 2 == 0) RANKS_OK(child, ddp_group_wait_signal(child, mine, ROUNDS + 1));
    RANKS_OK(child, ddp_barrier(child));
    snprintf(text, sizeof text, "rank %d called ddp_barrier", w - 1);
    if (w > 1 && rank < w - 1) {
        RANKS_CHECK(world,
                    ddp_group_wait_signal(child, mine, ROUNDS + 2) == DDP_ERR_MISMATCH
                        && strstr(ddp_last_error(), text),
                    "a stray: %s", ddp_last_error());
        RANKS_CHECK(world, strstr(ddp_last_error(), " after seq="), "no number of the last collective: %s",
                    ddp_last_error());
    } else if (w > 1) {
        RANKS_CHECK(world, ddp_barrier(child) == DDP_ERR_MISMATCH && strstr(ddp_last_error(), text),
                    "of the stray: %s", ddp_last_error());
    }
    ddp_group_destroy(child);
    return DDP_OK;
}

/* A size that is far too large is an error on every rank, and the group stays usable. */
static ddp_result too_much_memory(ddp_group *world) {
    static const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 100, SIZE_MAX / 64, (size_t)1 << 55};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *out = &out;
        ddp_result result = ddp_group_alloc(world, sizes[i], &out);
        RANKS_CHECK(world, (result == DDP_ERR_NO_MEMORY || result == DDP_ERR_INVALID) && out == NULL,
                    "%zu bytes: %s", sizes[i], ddp_result_name(result));
    }
    SUM_IS(world, 1, ddp_world_size(world), "after failed allocations");
    return DDP_OK;
}

/* Split and destroy leave nothing mapped. The lines are counted while no rank has a child group: ranks as
   threads share one list of mappings. The allocator can map arenas at any time, so only growth with the
   rounds is a leak. */
static ddp_result split_churn(ddp_group *world, int rounds) {
    int rank = ddp_rank(world), w = ddp_world_size(world), lines[2] = {0, 0};
    for (int round = 0; round < rounds; round++) {
        ddp_group *child;
        RANKS_OK(world, ddp_group_split(world, (rank + round) % 2, rank, &child));
        if (round % 50 == 0) SUM_IS(child, 1, (w + ((rank + round) % 2 == round % 2)) / 2, "churned group");
        ddp_group_destroy(child);
        if (round != rounds / 2 && round != rounds - 1) continue;
        RANKS_OK(world, ddp_barrier(world));
        lines[round == rounds - 1] = count_lines("/proc/self/maps");
        RANKS_OK(world, ddp_barrier(world));
    }
    RANKS_CHECK(world, lines[1] <= lines[0] + 4 * w + rounds / 20,
                "/proc/self/maps grew from %d to %d lines in %d rounds", lines[0], lines[1], rounds / 2);
    return DDP_OK;
}

//== asynchronous work ======================================================================

static ddp_result async_order(ddp_group *world) {
    enum { MANY = 500 };
    int w = ddp_world_size(world), rank = ddp_rank(world);
    int64_t *cells = (int64_t *)calloc(MANY + 1, sizeof *cells);
    ddp_work *works = (ddp_work *)calloc(MANY, sizeof *works), none = DDP_ZERO, copy;
    int done = 0;
    RANKS_OK(world, ddp_wait(world, &none));
    RANKS_OK(world, ddp_test(world, &none, &done));
    RANKS_CHECK(world, done == 1, "a test of no work returned %d", done);
    /* Each call reads the output of the one before: issue order is execution order. */
    cells[0] = 1;
    for (int i = 0; i < MANY; i++)
        RANKS_OK(world, ddp_all_reduce(world, &cells[i], &cells[i + 1], 1, DDP_I64,
                                       i % 16 ? DDP_OP_MAX : DDP_OP_SUM, &works[i]));
    { /* a blocking call is issued after them, so they are complete when it returns */
        int64_t want = 1;
        for (int i = 0; i < MANY; i++) want = i % 16 ? want : (int64_t)((uint64_t)want * (uint64_t)w);
        RANKS_OK(world, ddp_barrier(world));
        RANKS_CHECK(world, cells[MANY] == want, "the last of %d dependent calls gave %lld, wanted %lld", MANY,
                    (long long)cells[MANY], (long long)want);
    }
    for (int i = 0; i < MANY; i++) {
        RANKS_OK(world, ddp_test(world, &works[i], &done));
        RANKS_CHECK(world, done == 1, "call %d is not done after a later barrier", i);
        copy = works[i];
        RANKS_OK(world, ddp_wait(world, i % 2 ? &copy : &works[i]));
        RANKS_CHECK(world, i % 2 || works[i].op == NULL, "*work is not reset after its wait");
        if (i % 2) memset(&works[i], 0, sizeof works[i]);
    }
    /* Not done while a peer is missing; ddp_test does not block. */
    if (w > 1) {
        int64_t one = 1, sum = 0;
        if (rank == 0) {
            RANKS_OK(world, ddp_recv(world, &sum, 1, DDP_I64, 1, 0, NULL)); /* rank 1 has tested by then */
            RANKS_OK(world, ddp_all_reduce(world, &one, &sum, 1, DDP_I64, DDP_OP_SUM, &works[0]));
        } else {
            RANKS_OK(world, ddp_all_reduce(world, &one, &sum, 1, DDP_I64, DDP_OP_SUM, &works[0]));
            RANKS_OK(world, ddp_test(world, &works[0], &done));
            RANKS_CHECK(world, rank != 1 || done == 0, "done before rank 0 has issued it");
            if (rank == 1) RANKS_OK(world, ddp_send(world, &one, 1, DDP_I64, 0, 0, NULL));
        }
        RANKS_OK(world, ddp_wait(world, &works[0]));
        RANKS_CHECK(world, sum == w, "sum %lld", (long long)sum);
    }
    free(cells), free(works);
    return DDP_OK;
}

/* Three dependent blocking calls inside one task. */
static ddp_result task(ddp_group *group, void *argument) {
    int64_t *cell = (int64_t *)argument;
    ddp_result result = ddp_all_reduce(group, cell, cell, 1, DDP_I64, DDP_OP_SUM, NULL);
    if (result == DDP_OK) result = ddp_broadcast(group, cell, 1, DDP_I64, 0, NULL);
    if (result == DDP_OK) result = ddp_barrier(group);
    return result;
}

static ddp_result failing_task(ddp_group *group, void *argument) {
    (void)group, (void)argument;
    return ddp_fail(DDP_ERR_CORRUPT, "this task always fails");
}

/* Tasks that append their number to a list. */
typedef struct number_list {
    int numbers[4], count;
    pthread_t issuer;
    int issued_all; /* the issuer has enqueued the task after this one */
} number_list;
typedef struct numbered {
    number_list *list;
    int number;
} numbered;

static ddp_result append(ddp_group *group, void *argument) {
    const numbered *n = (const numbered *)argument;
    (void)group;
    n->list->numbers[n->list->count++] = n->number;
    return DDP_OK;
}

/* Appends its number, then the next one by a blocking task inside this one, while another task waits in the
   queue. */
static ddp_result append_inside(ddp_group *group, void *argument) {
    const numbered *n = (const numbered *)argument;
    numbered inner = {n->list, n->number + 1};
    RANKS_OK(group, append(group, argument));
    if (!pthread_equal(pthread_self(), n->list->issuer))
        while (!__atomic_load_n(&n->list->issued_all, __ATOMIC_ACQUIRE)) ranks_sleep_us(100);
    RANKS_OK(group, ddp_group_enqueue(group, append, &inner, NULL));
    RANKS_CHECK(group, n->list->count == inner.number + 1, "the task inside has not run: %d numbers",
                n->list->count);
    return DDP_OK;
}

/* Tasks run in the order in which they are issued. A task that is issued inside a task runs at once. */
static ddp_result task_order(ddp_group *world) {
    for (int round = 0; round < 200;
         round++) { /* the first task may not have started when the second comes */
        number_list list = {{-1, -1, -1, -1}, 0, pthread_self(), 1};
        numbered first = {&list, 0}, second = {&list, 1};
        ddp_work work = DDP_ZERO;
        RANKS_OK(world, ddp_group_enqueue(world, append, &first, &work));
        RANKS_OK(world, ddp_group_enqueue(world, append, &second, NULL));
        RANKS_CHECK(world, list.count == 2 && list.numbers[0] == 0 && list.numbers[1] == 1,
                    "round %d: %d tasks, %d first", round, list.count, list.numbers[0]);
        RANKS_OK(world, ddp_wait(world, &work));
    }
    {
        number_list list = {{-1, -1, -1, -1}, 0, pthread_self(), 0};
        numbered outer = {&list, 0}, last = {&list, 2};
        ddp_work works[2] = {DDP_ZERO, DDP_ZERO};
        RANKS_OK(world, ddp_group_enqueue(world, append_inside, &outer, &works[0]));
        RANKS_OK(world, ddp_group_enqueue(world, append, &last, &works[1]));
        __atomic_store_n(&list.issued_all, 1, __ATOMIC_RELEASE);
        for (int i = 0; i < 2; i++) RANKS_OK(world, ddp_wait(world, &works[i]));
        for (int i = 0; i < 3; i++)
            RANKS_CHECK(world, list.numbers[i] == i, "task %d ran as number %d", list.numbers[i], i);
    }
    return DDP_OK;
}

/* A sum and a broadcast of host memory that take two calls, the second of one element, end with the data. */
static ddp_result host_collectives(ddp_group *world) {
    enum { PIECE = 32768 / 4, COUNT = PIECE + 1, CANARY = PIECE };
    int w = ddp_world_size(world), rank = ddp_rank(world);
    float *in = (float *)malloc((COUNT + CANARY) * sizeof *in),
          *out = (float *)malloc((COUNT + CANARY) * sizeof *out);
    RANKS_CHECK(world, in && out, "no memory");
    for (int sums = 0; sums < 2; sums++) {
        float want = sums ? (float)(w * (w + 1) / 2) : 1;
        for (int i = 0; i < COUNT + CANARY; i++) {
            in[i] = (float)(rank + 1);
            out[i] = i < COUNT && !sums ? in[i] : (float)(-1 - rank);
        }
        RANKS_OK(world, ddp_host_collective(world, sums ? DDP_CALL_ALL_REDUCE : DDP_CALL_BROADCAST,
                                            sums ? in : out, out, COUNT, DDP_F32, DDP_OP_SUM, sums ? -1 : 0));
        for (int i = 0; i < COUNT + CANARY; i++)
            RANKS_CHECK(world, out[i] == (i < COUNT ? want : (float)(-1 - rank)),
                        "sums=%d: element %d of %d is %g", sums, i, COUNT, (double)out[i]);
    }
    free(in), free(out);
    return DDP_OK;
}

static ddp_result tasks(ddp_group *world) {
    int w = ddp_world_size(world);
    int64_t cells[20], after = 1;
    ddp_work works[20], last = DDP_ZERO;
    memset(works, 0, sizeof works);
    for (int i = 0; i < 20; i++) {
        cells[i] = i;
        RANKS_OK(world, ddp_group_enqueue(world, task, &cells[i], &works[i]));
    }
    RANKS_OK(world, ddp_all_reduce(world, &after, &after, 1, DDP_I64, DDP_OP_SUM, &last));
    for (int i = 19; i >= 0; i--) {
        RANKS_OK(world, ddp_wait(world, &works[i]));
        RANKS_CHECK(world, cells[i] == (int64_t)i * w, "task %d gave %lld", i, (long long)cells[i]);
    }
    RANKS_OK(world, ddp_wait(world, &last));
    RANKS_CHECK(world, after == w, "the call after the tasks gave %lld", (long long)after);
    /* The failure of a task is the result of its wait, including the text. */
    RANKS_OK(world, ddp_group_enqueue(world, failing_task, NULL, &last));
    RANKS_CHECK(world, ddp_wait(world, &last) == DDP_ERR_CORRUPT, "a failing task");
    RANKS_CHECK(world, strstr(ddp_last_error(), "this task always fails"), "its text is '%s'",
                ddp_last_error());
    return DDP_OK;
}

/* Calls of layers: an average without a divisor averages over all ranks. */
static ddp_result averages_of_calls(ddp_group *world) {
    float mine = (float)(ddp_rank(world) + 1), got = 0, w = (float)ddp_world_size(world);
    ddp_call call = DDP_ZERO;
    call.kind = DDP_CALL_ALL_REDUCE;
    call.dtype = DDP_F32;
    call.op = DDP_OP_AVG;
    call.send = &mine;
    call.recv = &got;
    call.count = 1;
    for (call.divisor = 0; call.divisor <= 4; call.divisor += 2) {
        RANKS_OK(world, ddp_group_call(world, &call, NULL));
        RANKS_CHECK(world, got == w * (w + 1) / 2 / (call.divisor ? (float)call.divisor : w),
                    "divisor %d gives %g", (int)call.divisor, (double)got);
    }
    return DDP_OK;
}

/* Destroying a group right after its last call, on ranks that arrive at different times, loses nothing. */
static ddp_result destroy_right_away(ddp_group *world) {
    int rank = ddp_rank(world), w = ddp_world_size(world);
    for (int round = 0; round < 50; round++) {
        ddp_group *child;
        int64_t one = 1, sum = 0;
        RANKS_OK(world, ddp_group_split(world, 0, -rank, &child));
        if (ranks_mix((uint64_t)(round * 64 + rank)) % 4 == 0) ranks_sleep_us(200);
        RANKS_OK(child, ddp_all_reduce(child, &one, &sum, 1, DDP_I64, DDP_OP_SUM, NULL));
        RANKS_CHECK(world, sum == w, "sum %lld", (long long)sum);
        ddp_group_destroy(child);
    }
    return DDP_OK;
}

/* A rank destroys a group while its collective waits for the others. The destroy returns at once. The next
   call of the others reports it. */
static ddp_result destroy_with_work_pending(ddp_group *world) {
    int rank = ddp_rank(world), w = ddp_world_size(world);
    static int64_t sum[DDP_MAX_LOCAL_RANKS]; /* outlives the call */
    ddp_group *child;
    ddp_work work;
    ddp_result result;
    char text[64];
    if (w == 1 || strcmp(inner.backend_name(world), "local") != 0) return DDP_OK;
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    snprintf(text, sizeof text, "rank %d (pid", w - 1);
    if (rank == w - 1) {
        RANKS_OK(child, ddp_all_reduce(child, &sum[rank], &sum[rank], 1, DDP_I64, DDP_OP_SUM, &work));
        ddp_group_destroy(child);
    }
    RANKS_OK(world, ddp_barrier(world));
    if (rank == w - 1) return DDP_OK;
    result = ddp_barrier(child);
    RANKS_CHECK(world, result == DDP_ERR_PEER_LOST, "%s", ddp_result_name(result));
    RANKS_CHECK(world, strstr(ddp_last_error(), text), "%s", ddp_last_error());
    RANKS_CHECK(world, strstr(ddp_last_error(), "with pending work"), "%s", ddp_last_error());
    ddp_group_destroy(child);
    return DDP_OK;
}

/* Aborting a child: its pending and later calls fail on every member and name the rank that aborted; the
   parent stays usable. */
static ddp_result abort_child(ddp_group *world) {
    enum { LARGE = 16000 }; /* 64 KB, the maximum of every backend */
    int rank = ddp_rank(world), w = ddp_world_size(world);
    ddp_group *child;
    ddp_result first, second;
    char text[256];
    float *data = (float *)calloc(LARGE, sizeof *data);
    RANKS_CHECK(world, data, "no memory");
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    /* Threads read each other's buffers. */
    RANKS_OK(child, ddp_all_reduce(child, data, data, LARGE, DDP_F32, DDP_OP_SUM, NULL));
    free(data);
    RANKS_OK(child, ddp_group_status(child));
    RANKS_OK(world, ddp_barrier(world));
    if (rank == w - 1) {
        ranks_sleep_us(20000);
        RANKS_OK(child, ddp_group_abort(child));
    }
    first = ddp_barrier(child);
    snprintf(text, sizeof text, "rank %d", w - 1);
    RANKS_CHECK(world, first != DDP_OK && strstr(ddp_last_error(), text),
                "first call after an abort: %s '%s'", ddp_result_name(first), ddp_last_error());
    RANKS_CHECK(world, ddp_group_status(child) == first || rank == w - 1,
                "status is another code than the first failure: %s",
                ddp_result_name(ddp_group_status(child)));
    second = ddp_barrier(child);
    RANKS_CHECK(world, second == DDP_ERR_POISONED && strstr(ddp_last_error(), text), "second: %s '%s'",
                ddp_result_name(second), ddp_last_error());
    ddp_group_destroy(child);
    RANKS_OK(world, ddp_group_status(world));
    SUM_IS(world, 1, w, "parent of an aborted group");
    return DDP_OK;
}

static ddp_result rank_main(ddp_group *world, void *user) {
    double start = ranks_now();
    int w = ddp_world_size(world);
    int block = ranks_per_machine() < w ? ranks_per_machine() : w, here = w - ddp_rank(world) / block * block;
    RANKS_CHECK(world,
                ddp_rank(world) >= 0 && ddp_rank(world) < w
                    && ddp_local_rank(world) == ddp_rank(world) % block
                    && ddp_local_world_size(world) == (here < block ? here : block),
                "rank %d local %d/%d", ddp_rank(world), ddp_local_rank(world), ddp_local_world_size(world));
    RANKS_RUN(world, splits(world));
    RANKS_RUN(world, nested(world));
    RANKS_RUN(world, grandchildren(world));
    RANKS_RUN(world, many_groups_at_once(world));
    /* otherwise it is private to each rank, see test_tcp.c */
    if (!(ranks_on.is & RANKS_APART)) RANKS_RUN(world, memory(world));
    RANKS_RUN(world, words(world));
    if (!(ranks_on.is & RANKS_APART)) RANKS_RUN(world, too_much_memory(world));
    RANKS_RUN(world, split_churn(world, (w <= 4 ? 1000 : w <= 8 ? 200 : 20) / ranks_slow() + 2));
    if (!(ranks_on.is & RANKS_NO_MESSAGES)) RANKS_RUN(world, async_order(world));
    RANKS_RUN(world, tasks(world));
    RANKS_RUN(world, task_order(world));
    RANKS_RUN(world, host_collectives(world));
    RANKS_RUN(world, averages_of_calls(world));
    RANKS_RUN(world, destroy_right_away(world));
    RANKS_RUN(world, destroy_with_work_pending(world));
    RANKS_RUN(world, abort_child(world));
    if (ddp_rank(world) == 0)
        printf("ok: %s W=%d in %.1f s\n", ranks_mode_name(*(ranks_mode *)user), w, ranks_now() - start);
    fflush(stdout);
    return DDP_OK;
}

int main(int argc, char **argv) {
    static const int defaults[] = {1, 2, 3, 4, 7, 0};
    ranks_mode mode;
    return ranks_each(argc, argv, defaults, 400, &mode, rank_main) != 0;
}

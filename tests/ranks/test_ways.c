/* Large private data has three methods: slots through the caches, non-temporal slots, and reading the peers'
   buffers in one copy. The method is learned; here each is forced in turn, and all must give the same result.
   All ranks fall back to slots if one rank cannot read its peers, reads another process instead, or has a
   buffer that only its owner can read. A hole in a buffer is an error that names its rank. A process that has
   ended is lost. */
#include "ddp.h"
#include "inner.h"
#include "watchdog.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { BLOCK = 50021 }; /* elements: not a whole number of chunks, lines or pages */

#define TRY(call)                    \
    do {                             \
        ddp_result r_ = (call);      \
        if (r_ != DDP_OK) return r_; \
    } while (0)
#define CHECK(condition)                                                                                   \
    do {                                                                                                   \
        if (!(condition))                                                                                  \
            return ddp_fail(DDP_ERR_CORRUPT, "rank %d line %d way %d: %s", ddp_rank(world), __LINE__, way, \
                            #condition);                                                                   \
    } while (0)

static float value(int rank, size_t i) { return (float)((i * 7 + (size_t)rank * 13) % 251); }

static void fill(float *data, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) data[i] = value(rank, i);
}

/* A call by the method, and whether it was used: reading in one copy ends with a single round, slots use one
   for each chunk. */
#define CALL(reads, call)                                    \
    do {                                                     \
        uint64_t round_ = inner.round(world);                \
        inner.force_way(world, way);                         \
        TRY(call);                                           \
        CHECK(!(reads) || inner.round(world) == round_ + 1); \
    } while (0)

static ddp_result every_call(ddp_group *world, int way, int reads) {
    int me = ddp_rank(world), w = ddp_world_size(world), root = w - 1;
    size_t all = (size_t)w * BLOCK, counts[8], offsets[8];
    float *in = (float *)malloc(all * sizeof *in), *out = (float *)malloc(all * sizeof *out);
    CHECK(in && out && w <= 8);
    for (int p = 0; p < w; p++) {
        counts[p] = BLOCK - (size_t)p * 11;
        offsets[p] = (size_t)p * BLOCK;
    }

    fill(in, all, me);
    CALL(reads, ddp_broadcast(world, in, all, DDP_F32, root, NULL));
    for (size_t i = 0; i < all; i++) CHECK(in[i] == value(root, i));

    fill(in, BLOCK, me);
    CALL(reads, ddp_all_gather(world, in, out, BLOCK, DDP_F32, NULL));
    for (size_t i = 0; i < all; i++) CHECK(out[i] == value((int)(i / BLOCK), i % BLOCK));
    fill(out + (size_t)me * BLOCK, BLOCK, me);
    CALL(reads, ddp_all_gather(world, out + (size_t)me * BLOCK, out, BLOCK, DDP_F32, NULL));
    for (size_t i = 0; i < all; i++) CHECK(out[i] == value((int)(i / BLOCK), i % BLOCK));
    CALL(reads, ddp_all_gather_v(world, in, counts[me], out, counts, offsets, DDP_F32, NULL));
    for (int p = 0; p < w; p++)
        for (size_t i = 0; i < counts[p]; i++) CHECK(out[offsets[p] + i] == value(p, i));

    CALL(reads, ddp_gather(world, in, out, BLOCK, DDP_F32, root, NULL));
    for (size_t i = 0; me == root && i < all; i++) CHECK(out[i] == value((int)(i / BLOCK), i % BLOCK));
    fill(in, all, me);
    CALL(reads, ddp_scatter(world, in, out, BLOCK, DDP_F32, root, NULL));
    for (size_t i = 0; i < BLOCK; i++) CHECK(out[i] == value(root, (size_t)me * BLOCK + i));
    CALL(reads, ddp_all_to_all(world, in, out, BLOCK, DDP_F32, NULL));
    for (size_t i = 0; i < all; i++) CHECK(out[i] == value((int)(i / BLOCK), (size_t)me * BLOCK + i % BLOCK));

    for (int in_place = 0; in_place < 2; in_place++) {
        float *to = in_place ? in + (size_t)me * BLOCK : out;
        fill(in, all, me);
        CALL(reads, ddp_reduce_scatter(world, in, to, BLOCK, DDP_F32, DDP_OP_SUM, NULL));
        for (size_t i = 0; i < BLOCK; i++) {
            float sum = 0; /* whole numbers: exact in any order */
            for (int r = 0; r < w; r++) sum += value(r, (size_t)me * BLOCK + i);
            CHECK(to[i] == sum);
        }
    }
    free(in);
    free(out);
    return DDP_OK;
}

static ddp_result ways(ddp_group *world, void *user) {
    int way = inner.way_read;
    (void)user;
    TRY(ddp_barrier(world)); /* all ranks have arrived, and are readable */
    CHECK(inner.can_read_peers(world));
    for (way = 0; way < inner.ways; way++) TRY(every_call(world, way, way == inner.way_read));
    if (ddp_rank(world) == 1) *inner.can_read(world, 0) = -1;
    return every_call(world, inner.way_read, 0);
}

/* The root's buffer has a hole, and then the root has ended. */
static ddp_result nothing_there(ddp_group *world, void *user) {
    size_t size = (size_t)1 << 20;
    char *mine = (char *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int way = inner.way_read, gone = *(const int *)user;
    ddp_result result;
    CHECK(mine != (char *)MAP_FAILED);
    TRY(ddp_barrier(world));
    CHECK(inner.can_read_peers(world));
    TRY(ddp_barrier(world));
    if (ddp_rank(world) == 1 && gone) *inner.pid(world, 1) = 1 << 30; /* more than there are */
    if (ddp_rank(world) == 1 && !gone) CHECK(mprotect(mine + size / 2, size / 4, PROT_NONE) == 0);
    TRY(ddp_barrier(world));
    inner.force_way(world, way);
    result = ddp_broadcast(world, mine, size / 4, DDP_F32, 1, NULL);
    if (gone)
        CHECK(result == DDP_ERR_PEER_LOST
              && strstr(ddp_last_error(), "rank 1 (pid 1073741824) no longer exists"));
    else
        CHECK(result == DDP_ERR_SYSTEM
              && strstr(ddp_last_error(), "could not read the buffer of rank 1: Bad address"));
    munmap(mine, size);
    return DDP_OK;
}

/* A pid can belong to another process here than there: in containers that share everything except their
   processes. */
static ddp_result another_process(ddp_group *world, void *user) {
    int me = ddp_rank(world), way = inner.way_read;
    float *in = (float *)malloc(BLOCK * sizeof *in), *out = (float *)malloc(2 * BLOCK * sizeof *out);
    (void)user;
    CHECK(in && out);
    TRY(ddp_barrier(world));
    if (me == 0) *inner.pid(world, 1) = (int32_t)getpid();
    TRY(ddp_barrier(world));
    fill(in, BLOCK, me);
    if (me == 1) TRY(ddp_send(world, in, BLOCK, DDP_F32, 0, 7, NULL));
    if (me == 0) TRY(ddp_recv(world, out, BLOCK, DDP_F32, 1, 7, NULL));
    for (size_t i = 0; me == 0 && i < BLOCK; i++) CHECK(out[i] == value(1, i));
    inner.force_way(world, way);
    TRY(ddp_all_gather(world, in, out, BLOCK, DDP_F32, NULL));
    for (size_t i = 0; i < 2 * BLOCK; i++) CHECK(out[i] == value((int)(i / BLOCK), i % BLOCK));
    CHECK(me == 1 || *inner.can_read(world, 1) == -1);
    free(in);
    free(out);
    return DDP_OK;
}

/* Memory that this rank reads and writes normally, but that other processes cannot read: as device memory. */
static void *secret_memory(size_t size) {
    void *memory = MAP_FAILED;
#if defined(SYS_memfd_secret)
    int fd = (int)syscall(SYS_memfd_secret, 0u);
    if (fd >= 0 && ftruncate(fd, (off_t)size) == 0)
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
#endif
    return memory == MAP_FAILED ? NULL : memory;
}

static ddp_result secret(ddp_group *world, void *user) {
    int me = ddp_rank(world), w = ddp_world_size(world), way = inner.way_read, has = 0;
    size_t all = (size_t)w * BLOCK;
    float *in = (float *)secret_memory(all * sizeof *in), *out = (float *)malloc(all * sizeof *out);
    int32_t ok = in != NULL;
    (void)user;
    CHECK(out);
    TRY(ddp_all_reduce(world, &ok, &ok, 1, DDP_I32, DDP_OP_MIN, NULL));
    has = ok;
    if (!has && me == 0) fprintf(stderr, "no memory here that only its owner can read\n");
    if (has) {
        fill(in, all, me);
        inner.force_way(world, way);
        TRY(ddp_all_gather(world, in, out, BLOCK, DDP_F32, NULL));
        for (size_t i = 0; i < all; i++) CHECK(out[i] == value((int)(i / BLOCK), i % BLOCK));
        inner.force_way(world, way);
        TRY(ddp_reduce_scatter(world, in, out, BLOCK, DDP_F32, DDP_OP_MAX, NULL));
        inner.force_way(world, way);
        TRY(ddp_broadcast(world, in, all, DDP_F32, 1, NULL));
        for (size_t i = 0; i < all; i++) CHECK(in[i] == value(1, i));
        if (me == 1) TRY(ddp_send(world, in, all, DDP_F32, 0, 7, NULL));
        if (me == 0) TRY(ddp_recv(world, out, all, DDP_F32, 1, 7, NULL));
        for (size_t i = 0; me == 0 && i < all; i++) CHECK(out[i] == value(1, i));
        CHECK(*inner.can_read(world, !me) == 1); /* other buffers still are read in one copy */
        munmap(in, all * sizeof *in);
    }
    free(out);
    return DDP_OK;
}

static int run(const char *name, ddp_rank_fn fn, int world_size, int number) {
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = world_size;
    desc.group.timeout_ms = 60000;
    if (ddp_launch(&desc, fn, &number) == DDP_OK) return 0;
    fprintf(stderr, "%s with %d ranks: %s\n", name, world_size, ddp_last_error());
    return 1;
}

static long try_to_read(void) {
#if defined(SYS_process_vm_readv)
    char from = 1, to = 0;
    struct iovec here, there;
    here.iov_base = &to;
    there.iov_base = &from;
    here.iov_len = there.iov_len = 1;
    return syscall(SYS_process_vm_readv, (long)getpid(), &here, 1ul, &there, 1ul, 0ul);
#else
    return -1;
#endif
}

int main(void) {
    watchdog_start(120);
    inner.large_bytes = 65536;
    if (try_to_read() != 1) {
        fprintf(stderr, "process_vm_readv is refused here: skipped\n");
        return 77;
    }
    if (run("ways", ways, 2, 0) || run("ways", ways, 3, 0) || run("secret", secret, 3, 0)) return 1;
    if (run("a hole", nothing_there, 3, 0) || run("gone", nothing_there, 3, 1)
        || run("another process", another_process, 2, 0))
        return 1;
    printf("ways: ok\n");
    return 0;
}

/*  test_join_without_memory.c - a rank that has met the others, and then has no memory for its own handle.

    Ranks start by their numbers, as under a launcher. Rank 1's last allocation in ddp_group_create fails, and
    its process stays alive. The group of rank 0 is complete. Once, the first call of rank 0 waited for the
    whole timeout: only a process that had ended was detected.

    test_join_without_memory */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

static int calls, refuse_at; /* the allocation that fails; 0 = none */
static void *alloc_fn(size_t size_bytes, void *user) {
    (void)user;
    return ++calls == refuse_at ? NULL : malloc(size_bytes);
}
static void free_fn(void *memory, void *user) {
    (void)user;
    free(memory);
}

static ddp_result join(ddp_group **group, int rank, const char *name) {
    ddp_group_desc desc = DDP_ZERO;
    desc.rank = rank;
    desc.world_size = 2;
    desc.name = name;
    desc.timeout_ms = 60000;
    desc.alloc_fn = alloc_fn;
    desc.free_fn = free_fn;
    calls = 0;
    return ddp_group_create(group, &desc);
}

/* Rank 1: joins once to count its allocations, then without the last of them, and stays alive until rank 0
   has finished. */
static int rank1(const char *const names[2], int done) {
    ddp_group *group = NULL;
    char byte;
    if (join(&group, 1, names[0]) != DDP_OK) return 1;
    refuse_at = calls;
    ddp_group_destroy(group);
    if (join(&group, 1, names[1]) != DDP_ERR_NO_MEMORY || group) return 2;
    return read(done, &byte, 1) == 0 ? 0 : 3;
}

int main(void) {
    char first[32], second[32];
    const char *names[2];
    int done[2], status = 0;
    ddp_group *group = NULL;
    faults_start(100 * DDP_TEST_SLOWDOWN);
    faults_begin("rank 1 has no memory for its handle");
    snprintf(first, sizeof first, "first%d", (int)getpid());
    snprintf(second, sizeof second, "second%d", (int)getpid());
    names[0] = first;
    names[1] = second;
    EXPECT(pipe(done) == 0, "no pipe");
    pid_t pid = fork();
    if (pid == 0) {
        close(done[1]);
        _exit(rank1(names, done[0]));
    }
    EXPECT(join(&group, 0, first) == DDP_OK, "%s", ddp_last_error());
    ddp_group_destroy(group);
    group = NULL;
    double start = ddp_now();
    ddp_result result = join(&group, 0, second);
    EXPECT(result == DDP_OK, "%s", ddp_last_error());
    if (result == DDP_OK) result = ddp_barrier(group);
    EXPECT(result == DDP_ERR_PEER_LOST, "%s: %s", ddp_result_name(result), ddp_last_error());
    EXPECT(strstr(ddp_last_error(), "returned DDP_ERR_NO_MEMORY"), "%s", ddp_last_error());
    EXPECT(ddp_now() - start < 20 * DDP_TEST_SLOWDOWN, "it took %.1f s", ddp_now() - start);
    ddp_group_destroy(group);
    close(done[1]);
    EXPECT(waitpid(pid, &status, 0) == pid && status == 0, "rank 1: status %x", status);
    return faults_end();
}

/*  test_commit_limit.c - where the system limits committed memory, control memory is reserved in a memfd too.

    With vm.overcommit_memory=2 a page of a memfd that exceeds the commit limit is a SIGBUS when it is
    touched. Control memory was only reserved in folders, so a rank could die in any call. With the other
    modes there is no such limit, and control memory stays sparse: a group of 64 ranks would take 752 MiB.

    The mode is read from /proc; the test puts a file of its own in its place, in a mount namespace. */
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { NO_NAMESPACES = 77 };

/* KiB of the job's memfd that have pages; -1 = no memfd exists. */
static int committed(void) {
    struct stat file;
    char path[64], name[64];
    for (int fd = 0; fd < 256; fd++) {
        ssize_t n;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        n = readlink(path, name, sizeof name - 1);
        name[n > 0 ? n : 0] = 0;
        if (strncmp(name, "/memfd:ddp", 10) == 0 && fstat(fd, &file) == 0) return (int)(file.st_blocks / 2);
    }
    return -1;
}

static ddp_result count_pages(ddp_group *world, void *user) {
    ddp_group *child;
    void *memory;
    int before = committed(), alone;
    (void)user;
    RANKS_OK(world, ddp_barrier(world));
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    alone = committed();
    RANKS_OK(world, ddp_barrier(world));
    RANKS_OK(world, ddp_group_alloc(world, 1 << 20, &memory));
    if (ddp_rank(world) == 0) {
        stage_shared->numbers[0] = before;
        stage_shared->numbers[1] = alone;
        stage_shared->numbers[2] = committed();
    }
    RANKS_OK(world, ddp_barrier(world));
    ddp_group_destroy(child);
    return ddp_barrier(world);
}

/* The first split has room, and the second has none. */
static ddp_result split_fails(ddp_group *world, void *user) {
    ddp_group *child = NULL;
    ddp_result result;
    (void)user;
    inner.no_room = 1;
    result = ddp_group_split(world, 0, 0, &child);
    RANKS_CHECK(world,
                result == DDP_ERR_NO_MEMORY && !child && says(ddp_last_error(), "vm.overcommit_memory=2"),
                "%s '%s'", ddp_result_name(result), ddp_last_error());
    inner.no_room = 0;
    RANKS_OK(world, ddp_group_split(world, 0, 0, &child));
    ddp_group_destroy(child);
    return ddp_barrier(world);
}

/* In a separate process, with this mode in /proc. Returns its wait status. */
static int run(const char *mode, int no_room, int ranks, ddp_rank_fn fn) {
    int status = -1;
    pid_t pid = fork();
    if (pid == 0) {
        char path[] = "/tmp/test_commit_limit.XXXXXX";
        seen *s = &stage_shared->rank[0];
        int fd = mkstemp(path);
        if (syscall(SYS_unshare, 0x00020000 /* CLONE_NEWNS */) != 0
            || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
            _exit(NO_NAMESPACES);
        if (fd < 0 || write(fd, mode, 2) != 2
            || mount(path, "/proc/sys/vm/overcommit_memory", NULL, MS_BIND, NULL) != 0)
            _exit(NO_NAMESPACES);
        close(fd);
        inner.no_room = no_room;
        s->first = ranks_run(RANKS_PROCESSES, ranks, 20000 * DDP_TEST_SLOWDOWN, fn, NULL);
        snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
        s->done = 1;
        unlink(path);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    return status;
}

int main(void) {
    enum { MIB = 1024 };
    static const struct {
        const char *what, *mode;
        int no_room, ranks;
        ddp_rank_fn fn;
        ddp_result want;
        int least, most; /* KiB of control memory, before a rank makes a call */
    } table[] = {
        {"no limit", "0\n", 0, 2, count_pages, DDP_OK, 0, MIB},
        {"no limit, 64 ranks", "1\n", 0, 64, count_pages, DDP_OK, 0, 32 * MIB},
        {"a limit", "2\n", 0, 2, count_pages, DDP_OK, 3 * MIB, 8 * MIB},
        {"a limit that is reached", "2\n", 1, 2, count_pages, DDP_ERR_NO_MEMORY, 0, 0},
        {"a limit that a split reaches", "2\n", 0, 2, split_fails, DDP_OK, 0, 0},
        {"nothing is reserved without a limit", "0\n", 1, 2, count_pages, DDP_OK, 0, MIB},
    };
    faults_start(110);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const seen *s = &stage_shared->rank[0];
        const int *kib = stage_shared->numbers;
        int status;
        faults_begin(table[i].what);
        status = run(table[i].mode, table[i].no_room, table[i].ranks, table[i].fn);
        if (WIFEXITED(status) && WEXITSTATUS(status) == NO_NAMESPACES) {
            fprintf(stderr, "no mount namespaces here: skipped\n");
            return 77;
        }
        EXPECT(WIFEXITED(status) && s->done, "wait status %d", status);
        EXPECT(s->first == table[i].want, "%s '%s'", ddp_result_name(s->first), s->text);
        if (table[i].want != DDP_OK)
            EXPECT(says(s->text, "vm.overcommit_memory=2") && says(s->text, "vm.overcommit_ratio"), "'%s'",
                   s->text);
        printf("%s: %d KiB, after a split %d, after ddp_group_alloc %d\n", table[i].what, kib[0], kib[1],
               kib[2]);
        EXPECT(kib[0] >= table[i].least && kib[0] <= table[i].most, "%d KiB have pages", kib[0]);
        if (table[i].least) EXPECT(kib[1] >= 2 * table[i].least, "%d KiB after a split", kib[1]);
        if (table[i].most)
            EXPECT(kib[2] >= kib[1] + table[i].ranks * MIB, "%d KiB after ddp_group_alloc", kib[2]);
    }
    return faults_end();
}

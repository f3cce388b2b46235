/*  test_small_tmp.c - without memfd, folders that are too small for shared memory are an error and not a
    SIGBUS.

    The file of a job is sparse: the first access to a page without room in the folder killed the process. The
    folders are small file systems in a separate mount namespace. */
#include <sys/mount.h>
#include <sys/syscall.h>

#include "../../ddp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include "../support/faults.h"

enum { NO_NAMESPACES = 77, SPLITS = 20 };

/* Every rank returns that a split, or group memory, has no room; the world stays usable. */
static ddp_result small_main(ddp_group *world, void *user) {
    ddp_group *child[SPLITS];
    void *memory = NULL;
    int count = 0;
    ddp_result result = DDP_OK;
    (void)user;
    while (count < SPLITS && (result = ddp_group_split(world, 0, 0, &child[count])) == DDP_OK)
        RANKS_OK(world, ddp_barrier(child[count++]));
    RANKS_CHECK(world, count < SPLITS, "%d splits had room", count);
    RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY && says(ddp_last_error(), "ddp_group_split"), "%s '%s'",
                ddp_result_name(result), ddp_last_error());
    result = ddp_group_alloc(world, 64 << 20, &memory);
    RANKS_CHECK(world, result == DDP_ERR_NO_MEMORY && !memory, "%s '%s'", ddp_result_name(result),
                ddp_last_error());
    while (count > 0) ddp_group_destroy(child[--count]);
    return ddp_barrier(world);
}

static ddp_result meet_main(ddp_group *world, void *user) {
    (void)user;
    return ddp_barrier(world);
}

/* In a separate process, /dev/shm, /tmp and the current folder have these sizes, and memfd_create is refused.
   Returns its wait status. */
static int run(const char *shm_size, const char *tmp_size, ranks_mode mode, ddp_rank_fn fn) {
    int status = -1;
    pid_t pid = fork();
    if (pid == 0) {
        char shm[32], tmp[32];
        seen *s = &stage_shared->rank[0];
        snprintf(shm, sizeof shm, "size=%s", shm_size);
        snprintf(tmp, sizeof tmp, "size=%s", tmp_size);
        if (syscall(SYS_unshare, 0x00020000 /* CLONE_NEWNS */) != 0
            || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
            _exit(NO_NAMESPACES);
        if (mount("tmpfs", "/dev/shm", "tmpfs", 0, shm) != 0 || mount("tmpfs", "/tmp", "tmpfs", 0, tmp) != 0
            || chdir("/tmp") != 0)
            _exit(NO_NAMESPACES);
        inner.refuses = 1;
        s->first = ranks_run(mode, 2, 20000 * DDP_TEST_SLOWDOWN, fn, NULL);
        snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
        s->done = 1;
        _exit(0);
    }
    waitpid(pid, &status, 0);
    return status;
}

int main(void) {
    static const struct {
        const char *what, *shm, *tmp;
        ddp_rank_fn fn;
        ddp_result want;
    } table[] = {
        {"no room for the header of a job", "16k", "16k", meet_main, DDP_ERR_NO_MEMORY},
        {"no room for the control memory of a group", "64k", "64k", meet_main, DDP_ERR_NO_MEMORY},
        {"room for the groups of two ranks, and for some more", "64k", "24m", small_main, DDP_OK},
        {"only a small /dev/shm has room", "24m", "64k", small_main, DDP_OK},
    };
    static const ranks_mode modes[] = {RANKS_PROCESSES, RANKS_THREADS};
    faults_start(60);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (int m = 0; m < 2; m++) {
            const seen *s = &stage_shared->rank[0];
            int status;
            faults_begin(table[i].what);
            status = run(table[i].shm, table[i].tmp, modes[m], table[i].fn);
            if (WIFEXITED(status) && WEXITSTATUS(status) == NO_NAMESPACES) {
                fprintf(stderr, "no mount namespaces here: skipped\n");
                return 77;
            }
            EXPECT(WIFEXITED(status) && s->done, "%s: wait status %d", ranks_mode_name(modes[m]), status);
            EXPECT(s->first == table[i].want, "%s: %s '%s'", ranks_mode_name(modes[m]),
                   ddp_result_name(s->first), s->text);
            EXPECT(table[i].want == DDP_OK || (says(s->text, "no space in") && says(s->text, "enlarge")),
                   "%s: '%s'", ranks_mode_name(modes[m]), s->text);
        }
    return faults_end();
}

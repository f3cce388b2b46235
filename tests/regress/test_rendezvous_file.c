/*  test_rendezvous_file.c - a file of file:// that another user could have replaced is rejected at once.

    Rank 0 followed a symbolic link and truncated and filled the link's target, which disclosed the nonce of
    the job. A FIFO blocked every rank in open(), for longer than timeout_ms. A file that others could write
    could send the ranks to any address. */
#include "../../ddp.h"
#include "../support/ranks.h"
#include "../support/faults.h"

#include <sys/stat.h>

enum { TIMEOUT_MS = 20000, NOBODY = 65534 };
typedef enum thing {
    A_FIFO,
    A_LINK,
    A_LINK_TO_NOTHING,
    A_FOLDER,
    FOR_ALL,
    FOR_GROUP,
    OF_NOBODY,
    THINGS
} thing;
static const struct {
    const char *name, *word;
} things[THINGS] = {
    {"a FIFO", "is not a regular file"},
    {"a symbolic link", "is a symbolic link"},
    {"a symbolic link to nothing", "is a symbolic link"},
    {"a folder", "is not a regular file"},
    {"a file that all can write", "can be written by other users (mode 666)"},
    {"a file that the group can write", "can be written by other users (mode 660)"},
    {"a file of uid 65534", "belongs to uid 65534"},
};
static char folder[64], path[96], target[96];

static void write_file(const char *name, const char *text, int mode) {
    FILE *file = fopen(name, "w");
    if (file) fputs(text, file);
    if (file) fclose(file);
    if (!file || chmod(name, (mode_t)mode) != 0) perror(name);
}

static void place(thing what) {
    if (what == A_FIFO && mkfifo(path, 0600) != 0) perror("mkfifo");
    if (what == A_LINK || what == A_LINK_TO_NOTHING)
        if (symlink(target, path) != 0) perror("symlink");
    if (what == A_LINK) write_file(target, "precious\n", 0600);
    if (what == A_FOLDER && mkdir(path, 0700) != 0) perror("mkdir");
    if (what == FOR_ALL || what == FOR_GROUP) write_file(path, "", what == FOR_ALL ? 0666 : 0660);
    if (what == OF_NOBODY) write_file(path, "", 0600);
    if (what == OF_NOBODY && chown(path, NOBODY, NOBODY) != 0) perror("chown");
}

static pid_t start_rank(int rank) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *world = NULL;
    seen *s = &stage_shared->rank[rank];
    char url[128];
    pid_t pid = fork();
    if (pid != 0) return pid;
    snprintf(url, sizeof url, "file://%s", path);
    desc.init_method = url;
    desc.rank = rank;
    desc.world_size = 2;
    desc.timeout_ms = TIMEOUT_MS * DDP_TEST_SLOWDOWN;
    s->start_at = ranks_now();
    s->first = ddp_group_create(&world, &desc);
    if (s->first == DDP_OK) s->first = ddp_barrier(world);
    s->first_at = ranks_now();
    snprintf(s->text, sizeof s->text, "%s", s->first == DDP_OK ? "" : ddp_last_error());
    s->done = 1;
    ddp_group_destroy(world);
    _exit(0);
}

static void test_refused(void) {
    for (int what = 0; what < THINGS; what++)
        for (int rank = 0; rank < 2; rank++) {
            const seen *s = &stage_shared->rank[rank];
            struct stat file;
            char text[64] = "";
            FILE *kept;
            pid_t pid;
            if (what == OF_NOBODY && geteuid() != 0) continue;
            faults_begin(things[what].name);
            place((thing)what);
            pid = start_rank(rank);
            if (!heard(&stage_shared->rank[rank].done, 1))
                kill(pid, SIGKILL); /* it waits until the FIFO is opened */
            EXPECT(waitpid(pid, NULL, 0) == pid, "waitpid");
            EXPECT(s->done && s->first == DDP_ERR_SYSTEM, "rank %d: %s '%s'", rank,
                   s->done ? ddp_result_name(s->first) : "still waits", s->text);
            EXPECT(s->first_at - s->start_at < PROMPT_SECONDS, "rank %d: it took %.3f s", rank,
                   s->first_at - s->start_at);
            EXPECT(says(s->text, things[what].word) && says(s->text, path) && says(s->text, "remove it"),
                   "rank %d: '%s'", rank, s->text);
            EXPECT(lstat(path, &file) == 0, "rank %d removed %s", rank, things[what].name);
            kept = fopen(target, "r");
            if (kept && !fgets(text, sizeof text, kept)) text[0] = 0;
            if (kept) fclose(kept);
            EXPECT(what == A_LINK ? strcmp(text, "precious\n") == 0 : !kept,
                   "rank %d wrote '%s' to the target of the link", rank, text);
            remove(path);
            remove(target);
        }
}

/* Allowed: the file of an earlier job of this user. While rank 0 waits, only this user can access the new
   one. */
static void test_replaced(void) {
    pid_t pids[2];
    struct stat file;
    int is_new = 0;
    double until = ranks_now() + PROMPT_SECONDS;
    faults_begin("a file of this user that others can read");
    write_file(path, "0123456789abcdef 1 127.0.0.1\n", 0644);
    pids[0] = start_rank(0);
    while (!is_new && ranks_now() < until) {
        is_new = stat(path, &file) == 0 && (file.st_mode & 0777) == 0600;
        ranks_sleep_us(1000);
    }
    EXPECT(is_new, "the file has mode %03o", (unsigned)(file.st_mode & 0777));
    pids[1] = start_rank(1);
    for (int r = 0; r < 2; r++) {
        const seen *s = &stage_shared->rank[r];
        EXPECT(waitpid(pids[r], NULL, 0) == pids[r], "waitpid");
        EXPECT(s->done && s->first == DDP_OK, "rank %d: %s '%s'", r, ddp_result_name(s->first), s->text);
    }
    EXPECT(access(path, F_OK) != 0, "%s is left", path);
}

int main(void) {
    faults_start(60);
    snprintf(folder, sizeof folder, "/tmp/ddp_test_rendezvous_file_%d", (int)getpid());
    snprintf(path, sizeof path, "%s/meet", folder);
    snprintf(target, sizeof target, "%s/target", folder);
    if (mkdir(folder, 0700) != 0) perror(folder);
    test_refused();
    test_replaced();
    rmdir(folder);
    return faults_end();
}
